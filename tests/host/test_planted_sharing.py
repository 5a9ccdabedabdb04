"""Bugs planted in what shares pages, each of which must be found: by a random walk, or by a named test.  (C7, C10)

A walk or a test that finds nothing is evidence only if it would find something.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagedkv.errors import PagedKVError
from tests.host import test_activation, test_claims, test_continuation, test_snapshot
from tests.host.planted import Planted
from tests.host.planted_sharing import PLANTED_SHARING, Hollow
from tests.host.sharing import MTP
from tests.host.test_sharing_walk import SharingWalk

STEPS = 150
SEEDS = 6


def walk(seed: int) -> None:
    """Walk over stores of two pools until something is found."""
    for number in range(SEEDS):
        SharingWalk(seed + number, MTP).run(STEPS)


def one_prepared_fork(_: int) -> None:
    """Hold an activation open and try everything on its source."""
    test_claims.test_a_source_of_a_prepared_activation_stays_as_it_is(keep_source=True)


def cut_continuation(_: int) -> None:
    """Cut a continuation inside its first page."""
    test_continuation.test_truncating_a_continuation_drops_pages_and_cuts_one(32)


FOUND_BY: dict[str, Callable[[int], None]] = {
    "a source is claimed by nobody": one_prepared_fork,
    "a source may be taken away": one_prepared_fork,
    "an activation may end twice": lambda _: test_claims.test_a_prepared_activation_ends_once("fork", "commit"),
    "a moving source may be forked": lambda _: test_claims.test_a_source_that_is_being_moved_is_nobody_s_fork(),
    "the source's tail is not pinned": (
        lambda _: test_claims.test_a_shared_page_that_a_prepared_fork_copies_may_lose_its_other_holders()
    ),
    "pages with a pin are released": (
        lambda _: test_claims.test_a_tail_that_a_snapshot_copies_is_neither_cut_nor_let_go()
    ),
    "a backend may lead Main where a sequence goes on": (
        lambda _: test_activation.test_with_a_backend_every_pool_s_frontier_is_named_and_none_leads_main(
            {"main": 100, "mtp": 101}, "C10.7"
        )
    ),
    "any source is a hit": lambda _: test_activation.test_a_continuation_without_state_is_never_a_hit(),
    "a moved tail keeps what was cut": (
        lambda _: test_activation.test_a_move_inside_a_private_page_cuts_it_and_advances_its_content_epoch(100)
    ),
    "the budget forgets what came from the source": (
        lambda _: test_activation.test_the_budget_lies_behind_the_source(True, 130, 1, 62, 4)
    ),
    "a lead is checkpointed": lambda _: test_snapshot.test_a_backend_that_leads_main_is_no_checkpoint(MTP),
    "nothing is retained": lambda _: test_snapshot.test_nothing_committed_is_nothing_to_keep(None),
    "a row is cut below what others share": (
        lambda _: test_continuation.test_truncating_a_row_inside_or_across_a_shared_page_is_refused("fork", 64)
    ),
    "a move counts pages that others hold as its own": (
        lambda _: test_activation.test_a_move_inside_a_shared_page_copies_it_first()
    ),
    "a move cuts what others read": lambda _: test_activation.test_a_move_inside_a_shared_page_copies_it_first(),
    "a cut continuation keeps its pages": cut_continuation,
    "a cut continuation keeps its frontier": cut_continuation,
    "a cut continuation's tail keeps its columns": cut_continuation,
    "a continuation is cut below what it protects": (
        lambda _: test_continuation.test_truncating_below_what_is_protected_is_refused_until_it_is_lowered()
    ),
    "what a move releases is not reserved again": (
        lambda _: test_activation.test_a_move_counts_the_pages_that_it_releases()
    ),
    "lowering forgets the other spaces": (
        lambda _: test_continuation.test_a_page_protects_the_most_of_what_its_inactive_spaces_protect()
    ),
    "a cut row leaves its pages without a writer": (
        lambda _: test_continuation.test_truncating_a_row_inside_or_across_a_shared_page_is_refused("fork", 1)
    ),
}  # fmt: skip
"""Bugs that a legal walk never or rarely meets, because it takes a misuse, an open claim or a narrow case: the test
that meets each."""


@pytest.mark.parametrize("planted", PLANTED_SHARING, ids=[planted.what for planted in PLANTED_SHARING])
def test_a_bug_planted_in_sharing_is_found(
    planted: Planted | Hollow, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whatever it breaks first."""
    planted.plant(monkeypatch)

    # A refusal that does not come is pytest's own failure, which is no Exception.
    errors = (AssertionError, PagedKVError, IndexError, ValueError, KeyError, pytest.fail.Exception)
    with pytest.raises(errors) as found:
        FOUND_BY.get(planted.what, walk)(seed)
    print(f"{planted.what}: {repr(found.value)[:200]}")


def test_without_a_planted_bug_nothing_is_found(seed: int) -> None:
    """So that what is found above is the planted bug."""
    for find in {*FOUND_BY.values(), walk}:
        find(seed)


def test_every_named_bug_is_planted() -> None:
    """A bug that is renamed keeps its test."""
    assert set(FOUND_BY) - {planted.what for planted in PLANTED_SHARING} == set()
    assert len({planted.what for planted in PLANTED_SHARING}) == len(PLANTED_SHARING)
