"""Activation from a continuation: Fork and Move, page by page, in one pool and in two.  (C9.2, C10)"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pagedkv.errors import EntitlementExceeded, MisuseError, StaleHandle
from pagedkv.ledger.continuations import STATE_FOLLOWS, Continuation
from pagedkv.ledger.transaction import ActivationTarget, PoolPlan, Refusal, TailCopy
from pagedkv.values.config import Backend
from tests.host.builders import counts
from tests.host.refusals import refused
from tests.host.sharing import BACKENDS, DRAFT, MTP, SharedLedger, retained

# ---- Fork ------------------------------------------------------------------------------------------------


def test_a_fork_at_1000_shares_15_pages_and_copies_40_columns() -> None:
    """F = 1000: position 1000 goes to offset 40 of the private page; no frontier is rounded.  (C10.5, C2.1)"""
    store, source = retained(1000, max_context=1280)
    ids = store.page_ids(source)
    target = ActivationTarget(1, 99, source)
    assert store.explain(target).pools == (PoolPlan("main", 18, 1000, 15, 40, 3),)
    prepared = store.prepare(target)
    (copy,) = prepared.copies
    assert copy == TailCopy("main", ids[15], int(prepared.tables["main"][15]), 40)
    assert prepared.tables["main"].tolist()[:15] == ids[:15]
    store.copy(prepared.copies)
    fork = store.ledger.commit_activation(prepared)

    assert store.page_ids(fork)[:15] == ids[:15]
    assert store.page_ids(fork)[15] == copy.destination_page != ids[15]
    assert store.frontier(fork) == 1000
    assert store.column("references", fork) == [2] * 15 + [1]
    assert store.column("active", fork) == [1] * 16
    assert store.column("writer", fork) == [-1] * 15 + [fork.row]
    assert store.read(fork) == store.read(source)
    store.append(fork, 1)
    assert store.bytes["main"][copy.destination_page, 40] == store.read(fork)[1000]
    assert store.page_ids(fork)[:15] == store.page_ids(source)[:15]


@pytest.mark.parametrize(("frontier", "references"), [(130, [3, 3, 1]), (100, [3, 1, 1])])
def test_each_fork_adds_a_reference_to_full_pages_alone(frontier: int, references: list[int]) -> None:
    """The source stays as it is; at 100 of 130, 36 columns of its second page are copied.  (C10.5; vectors 44, 45)"""
    store, source = retained(130)
    kept, tail = store.read(source), store.column("committed", source)

    first = store.go_on(source, 66, frontier=frontier)
    assert store.column("references", source) == [(count + 1) // 2 for count in references]
    second = store.go_on(source, frontier=frontier)
    assert store.column("references", source) == references
    assert store.column("active", source) == [count - 1 for count in references]
    store.append(first, 66)

    assert (store.read(source), store.column("committed", source)) == (kept, tail)
    assert store.frontier(first) == frontier + 66
    assert store.read(first)[:frontier] == kept[:frontier] == store.read(second)


@pytest.mark.parametrize("frontier", [64, 128])
@pytest.mark.parametrize("keep_source", [True, False])
def test_an_aligned_frontier_copies_nothing_and_the_next_page_is_fresh(frontier: int, keep_source: bool) -> None:
    """A Move releases what lies beyond; no content changes.  (C10.4, C10.5, C10.7; vector 46)"""
    store, source = retained(130)
    before, kept, ids = store.available(), store.read(source), store.page_ids(source)
    contents = store.column("content", source)
    prepared = store.prepare(ActivationTarget(1, 0, source, frontier, keep_source))
    assert prepared.copies == ()

    sequence = store.ledger.commit_activation(prepared)

    assert store.page_ids(sequence) == ids[: frontier // 64]
    assert store.column("content", sequence) == contents[: frontier // 64]
    assert store.available() == before - 1 + (0 if keep_source else 3 - frontier // 64)
    store.append(sequence, 1)
    assert store.page_ids(sequence)[-1] not in ids[: frontier // 64]
    assert store.read(sequence)[:-1] == kept[:frontier]


def test_a_fork_of_a_fork_shares_what_both_hold() -> None:
    """The second generation shares its parent's pages and the grandparent's.  (C10.5)"""
    store, first = retained(100, max_context=320)
    child = store.go_on(first, 60)
    store.append(child, 60)
    second = store.finish(child)
    grandchild = store.go_on(second, 100)
    store.append(grandchild, 100)

    assert store.column("references", grandchild) == [3, 2, 1, 1, 1]
    assert store.logical(grandchild)[:2] == store.logical(second)[:2]
    assert store.logical(second)[0] == store.logical(first)[0]
    assert store.logical(second)[1] != store.logical(first)[1]
    assert store.read(grandchild)[:160] == store.read(second)
    assert store.read(second)[:100] == store.read(first)


# ---- Move ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 128, 130])
def test_a_move_keeps_identity_and_copies_nothing(tokens: int) -> None:
    """The same logical pages, page groups, contents and bytes; the row writes behind the frontier.  (C10.4)"""
    store, source = retained(tokens)
    before = (store.logical(source), store.page_ids(source), store.column("content", source),
              store.column("serial", source), store.read(source))
    free = store.available()
    prepared = store.prepare(ActivationTarget(3, 0, source, keep_source=False))
    assert prepared.copies == ()
    sequence = store.ledger.commit_activation(prepared)

    assert before == (store.logical(sequence), store.page_ids(sequence), store.column("content", sequence),
                      store.column("serial", sequence), store.read(sequence))
    pages = len(before[0])
    assert free - store.available() == -(-(tokens + 3) // 64) - pages
    full = tokens // 64
    assert store.column("writer", sequence) == [-1] * full + [sequence.row] * (pages - full)
    assert store.column("protected", sequence) == store.column("protectors", sequence) == [0] * pages
    assert store.ledger.continuations.handles() == []
    store.append(sequence, 3)
    assert store.read(sequence)[:tokens] == before[4]


@pytest.mark.parametrize("frontier", [70, 100, 127, 129, 200, 249])
def test_a_move_inside_a_private_page_cuts_it_and_advances_its_content_epoch(frontier: int) -> None:
    """Committed columns are withdrawn inside the page that is cut, and in no other.  (C7.6, C10.7)"""
    store, source = retained(250)
    kept, contents, serials = store.read(source), store.column("content", source), store.column("serial", source)
    prepared = store.prepare(ActivationTarget(2, 0, source, frontier, keep_source=False))
    assert prepared.copies == ()
    sequence = store.ledger.commit_activation(prepared)

    pages = frontier // 64 + 1
    assert store.column("serial", sequence) == serials[:pages]
    assert store.column("content", sequence)[:-1] == contents[: pages - 1]
    assert store.column("content", sequence)[-1] > max(contents)
    store.append(sequence, 2)
    assert store.read(sequence)[:frontier] == kept[:frontier]


def test_a_move_inside_a_shared_page_copies_it_first() -> None:
    """Another continuation holds the page that is cut: it keeps its bytes.  (C10.7, C16.7)"""
    store, source = retained(130, max_context=320)
    other = store.finish(store.go_on(source, frontier=128))
    kept, ids = store.read(source), store.page_ids(source)
    assert store.explain(ActivationTarget(5, 0, source, 100, keep_source=False)).pools == (
        PoolPlan("main", 2, 100, 1, 36, 1, released_pages=1),
    )
    free = store.available()
    sequence = store.go_on(source, 5, frontier=100, keep_source=False)

    assert store.available() == free - 1 + 1  # the copy, and the source's own tail
    assert store.page_ids(sequence)[0] == ids[0]
    assert store.page_ids(sequence)[1] not in ids
    store.append(sequence, 5)
    assert store.read(sequence)[:100] == kept[:100]
    assert store.read(other) == kept[:128]
    assert store.column("references", other) == [2, 1]


def test_a_moved_source_s_shared_pages_stay_shared_and_without_a_writer() -> None:
    """Move of a source whose full pages a running fork reads.  (C10.7)"""
    store, source = retained(130, max_context=320)
    fork = store.go_on(source, 20)
    kept = store.read(source)
    sequence = store.go_on(source, 20, keep_source=False)

    assert store.column("references", sequence) == store.column("active", sequence) == [2, 2, 1]
    assert store.column("writer", sequence) == [-1, -1, sequence.row]
    store.append(sequence, 20)
    store.append(fork, 20)
    assert store.read(sequence)[:130] == kept == store.read(fork)[:130]
    assert store.read(sequence)[130:] != store.read(fork)[130:]


def test_a_move_counts_the_pages_that_it_releases() -> None:
    """No page is available, and the target fits because its source's own pages come back.  (C10.2)"""
    store, source = retained(256, max_context=256, max_concurrency=4, tokens=256)
    assert store.available() == 0
    assert store.refuse(ActivationTarget(1, 127, source, 64)) == Refusal("main", 2, 0, forever=False)

    sequence = store.go_on(source, 1, 127, frontier=64, keep_source=False)

    assert counts(store.ledger) == (1, 2, 1)
    store.append(sequence, 128)


def test_a_tail_that_must_be_copied_needs_its_page_before_anything_is_released() -> None:
    """A moved source's pages come back at the commit, behind the copy.  (C10.2, C10.3)"""
    store, source = retained(200, max_context=256, max_concurrency=4, tokens=256)
    store.finish(store.go_on(source, frontier=128))
    assert store.available() == 0

    answer = store.refuse(ActivationTarget(1, 0, source, 100, keep_source=False))

    assert answer == Refusal("main", 1, 0, forever=False)
    assert store.go_on(source, 1, frontier=64, keep_source=False).row == 0


# ---- frontiers, handles, state ---------------------------------------------------------------------------


@pytest.mark.parametrize("frontier", [0, -1, 131, True, 64.0, "64"])
@pytest.mark.parametrize("keep_source", [True, False])
def test_a_frontier_lies_within_what_main_committed(frontier: int, keep_source: bool) -> None:
    """Not 0, not beyond, and an integer.  (C10.7, C9.9; vector 48)"""
    store, source = retained(130)
    clause = "C10.7" if type(frontier) is int else "C9.9"
    for wanted in (frontier, {"main": frontier}):
        expected = "C10.7" if isinstance(wanted, dict) else clause
        for ask in (store.ledger.transactions.explain, store.ledger.prepare_activation, store.ledger.try_activate):
            with refused(MisuseError, expected, store.ledger):
                ask(ActivationTarget(1, 0, source, wanted, keep_source))


@pytest.mark.parametrize(("frontier", "clause"), [
    (100, "C9.9"), ({"main": 100}, "C9.9"), ({"mtp": 100}, "C9.9"), ({}, "C9.9"),
    ({"main": 100, "mtp": 100, "draft": 1}, "C9.9"), ([100, 100], "C9.9"), ({"main": 100, "mtp": 101}, "C10.7"),
    ({"main": 130, "mtp": 121}, "C10.7"), ({"main": 100, "mtp": -1}, "C10.7"), ({"main": 0, "mtp": 0}, "C10.7"),
    ({"main": 131, "mtp": 0}, "C10.7"), ({"main": 100, "mtp": None}, "C10.7"), ({"main": 100, "mtp": False}, "C10.7"),
    ({"mtp": 0, "main": None}, "C10.7"), ({"mtp": 0, "main": "1"}, "C10.7"),
])
def test_with_a_backend_every_pool_s_frontier_is_named_and_none_leads_main(
    frontier: Mapping[str, int], clause: str
) -> None:
    """Missing and unknown pools, a backend beyond its own frontier or Main's, no number; any order.  (C9.9, S85)"""
    store, source = retained({"main": 130, "mtp": 120}, backend=MTP)

    with refused(MisuseError, clause, store.ledger):
        store.ledger.transactions.explain(ActivationTarget(1, 0, source, frontier))


class Fickle(dict[str, int]):
    """A mapping that answers otherwise than what it holds."""

    def __getitem__(self, key: str) -> int:
        return 10


def test_a_frontier_is_read_once() -> None:
    """What was checked is what is used, whatever a mapping answers the next time.  (C10.7)"""
    store, source = retained(150)
    with refused(MisuseError, "C10.7", store.ledger, match="192"):
        store.ledger.try_activate(ActivationTarget(1, 0, source, Fickle(main=192)))


@pytest.mark.parametrize("backend", [MTP, DRAFT])
@pytest.mark.parametrize("keep_source", [True, False])
@pytest.mark.parametrize(("frontier", "expected"), [
    (None, (130, 120)), ({"main": 130, "backend": 120}, (130, 120)), ({"main": 100, "backend": 100}, (100, 100)),
    ({"main": 100, "backend": 64}, (100, 64)), ({"main": 64, "backend": 3}, (64, 3)),
    ({"main": 70, "backend": 0}, (70, 0)), ({"main": 1, "backend": 1}, (1, 1)),
])
def test_each_pool_goes_on_at_its_own_frontier(
    backend: Backend, keep_source: bool, frontier: Mapping[str, int] | None, expected: tuple[int, int]
) -> None:
    """Fork and Move; a backend may begin at 0.  (C9.9, C10.5)"""
    store = SharedLedger(backend=backend)
    name = list(store.ledger.active)[1]
    source = store.retain({"main": 130, name: 120})
    kept = {pool: store.read(source, pool) for pool in ("main", name)}
    named = frontier and {name if pool == "backend" else pool: tokens for pool, tokens in frontier.items()}

    sequence = store.go_on(source, 20, 5, frontier=named, keep_source=keep_source)

    assert tuple(store.frontier(sequence, pool) for pool in ("main", name)) == expected
    for pool, tokens in zip(("main", name), expected, strict=True):
        assert store.read(sequence, pool) == kept[pool][:tokens]
        if keep_source:
            assert store.read(source, pool) == kept[pool]
    store.append(sequence, {"main": 25, name: 20})
    for pool, tokens in zip(("main", name), expected, strict=True):
        assert store.read(sequence, pool)[:tokens] == kept[pool][:tokens]
    store.check()
    store.end(sequence)
    for handle in store.ledger.continuations.handles():
        store.release(handle)
    assert all(store.available(pool) == spaces.pool.capacity for pool, spaces in store.ledger.active.items())


def test_a_continuation_without_state_is_never_a_hit() -> None:
    """KV presence alone proves no resumability; `attach_state` completes it or takes it back.  (C2.2, C16.16)"""
    store, source = retained(130, state=STATE_FOLLOWS)
    target = ActivationTarget(1, 0, source)
    for ask in (store.ledger.transactions.explain, store.ledger.prepare_activation, store.ledger.try_activate):
        with refused(MisuseError, "C2.2", store.ledger, match="never a hit"):
            ask(target)
    store.ledger.attach_state(source, 0)  # false, but not None: the store never looks into a state
    store.end(store.activate(target))
    store.ledger.attach_state(source, STATE_FOLLOWS)
    with refused(MisuseError, "C2.2", store.ledger):
        store.ledger.transactions.explain(target)


@pytest.mark.parametrize("bad", [None, 3, "x", ()])
def test_a_target_and_a_source_are_what_they_say(bad: object) -> None:
    """An ActivationTarget, and a Continuation of this store.  (C10.9, C9.8)"""
    store, other = SharedLedger(), SharedLedger()
    with refused(MisuseError, "C10.9", store.ledger):
        store.ledger.transactions.explain(bad)  # type: ignore[arg-type]
    if bad is not None:
        with refused(MisuseError, "C9.8", store.ledger):
            store.ledger.transactions.explain(ActivationTarget(1, 0, bad))  # type: ignore[arg-type]
    source = other.retain(64)
    with refused(StaleHandle, "C9.8", store.ledger):
        store.ledger.transactions.explain(ActivationTarget(1, 0, Continuation(7, source.number)))
    with refused(StaleHandle, "C9.8", other.ledger):
        other.ledger.transactions.explain(ActivationTarget(1, 0, Continuation(1, True)))


@pytest.mark.parametrize(("arguments", "clause"), [
    ((1, 0, None, 64), "C10.7"), ((1, 0, None, None, False), "C10.7"),
    *((tokens, "C9.2") for tokens in ((0, 0), (0, 1), (-1, 5), (1, -1), (1.0, 1), (1, True), ("1", 1))),
    *(((1, 0, Continuation(1, 1), None, keep_source), "C10.7") for keep_source in (None, 0, 1, "no")),
])
def test_a_target_says_what_it_means(arguments: Any, clause: str) -> None:
    """Token counts; without a source a prompt, no frontier and no Move; `keep_source` is a bool.  (C10.7, C9.2)"""
    with refused(MisuseError, clause):
        ActivationTarget(*arguments)


def test_a_prompt_of_nothing_is_legal_with_a_source() -> None:
    """All of the prompt is in the source; its budget is what is left.  (C9.2)"""
    store, source = retained(130)
    sequence = store.go_on(source, 0, 0)

    assert int(store.ledger.sequences.budget_tokens[sequence.row]) == 130
    assert store.ledger.active["main"].entitlement_pages(sequence.row) == 3
    store.append(sequence, 62)  # the tail page is entitled, token-exact limits are the caller's budget
    with refused(EntitlementExceeded, "C9.3", store.ledger):
        store.append(sequence, 1)


# ---- budgets and answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_source", [True, False])
@pytest.mark.parametrize(("frontier", "prompt", "output", "entitlement"),
                         [(130, 1, 61, 3), (130, 1, 62, 4), (130, 126, 0, 4), (64, 0, 1, 2)])
def test_the_budget_lies_behind_the_source(
    keep_source: bool, frontier: int, prompt: int, output: int, entitlement: int
) -> None:
    """Entitlement covers frontier + prompt + output; what is kept is not charged again.  (C9.1, C9.2, C16.4)"""
    store, source = retained(130)
    free = store.available()
    target = ActivationTarget(prompt, output, source, frontier, keep_source)
    (plan,) = store.explain(target).pools
    sequence = store.activate(target)

    assert store.ledger.active["main"].entitlement_pages(sequence.row) == plan.entitlement_pages == entitlement
    assert int(store.ledger.sequences.budget_tokens[sequence.row]) == frontier + prompt + output
    assert free - store.available() == plan.claimed_pages - plan.released_pages
    assert counts(store.ledger)[1] == entitlement - len(store.logical(sequence))


@pytest.mark.parametrize("keep_source", [True, False])
def test_source_and_budget_beyond_the_context_are_refused_for_ever(keep_source: bool) -> None:
    """130 + 127 > 256: no waiting helps.  At the exact ceiling it is granted.  (C9.2, C10.9)"""
    store, source = retained(130)

    answer = store.refuse(ActivationTarget(1, 126, source, None, keep_source))
    assert answer == Refusal("main", 5, 4, forever=True, reason="context")
    store.go_on(source, 1, 125, keep_source=keep_source)


def test_rows_are_asked_for_before_pages_and_waiting_helps() -> None:
    """C = 2: both rows run; the source stays valid.  (C10.9)"""
    store, source = retained(64, max_concurrency=2, tokens=512)
    first = store.start(1)
    store.start(1)

    answer = store.refuse(ActivationTarget(1, 0, source))
    assert answer == Refusal("rows", 1, 0, forever=False, reason="rows")
    store.end(first)
    store.go_on(source, 1)


@pytest.mark.parametrize("keep_source", [True, False])
def test_s36_the_pages_of_the_claimed_prefix_are_not_free_for_its_growth(keep_source: bool) -> None:
    """S36: 5 free pages of which 2 are the prefix: a claim of 4 more is refused, for only 3 remain.  (C10.9)"""
    store, source = retained(128, max_context=384, max_concurrency=4, tokens=384)
    store.start(1)
    assert store.available() == 3

    answer = store.refuse(ActivationTarget(1, 255, source, None, keep_source))
    assert answer == Refusal("main", 4, 3, forever=False)
    sequence = store.go_on(source, 1, 191, keep_source=keep_source)
    assert (store.available(), len(store.logical(sequence))) == (0, 2)


@pytest.mark.parametrize("backend", [MTP, DRAFT])
@pytest.mark.parametrize("keep_source", [True, False])
def test_a_refusal_in_the_second_pool_leaves_the_first_as_it_was(backend: Backend, keep_source: bool) -> None:
    """Only the backend lacks pages; then it has them.  (C10.2; vector 58)"""
    store = SharedLedger(backend=backend)
    name = list(store.ledger.active)[1]
    source = store.retain({"main": 130, name: 70})
    scarce = store.ledger.active[name].pool
    taken = scarce.available
    assert scarce.try_reserve(taken)

    answer = store.refuse(ActivationTarget(60, 0, source, None, keep_source))
    # Entitlement ceil(190 / 64) or, with the lead of 4, ceil(194 / 64); one page is shared, and a Move keeps the tail.
    entitlement = 4 if name == "mtp" else 3
    assert answer == Refusal(name, entitlement - (1 if keep_source else 2), 0, forever=False)
    scarce.shrink(taken)
    store.go_on(source, 60, keep_source=keep_source)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("keep_source", [True, False])
def test_explaining_a_source_has_no_side_effect_and_activation_does_what_it_said(
    backend: Backend | None, keep_source: bool
) -> None:
    """Pages, row, copies and table of every pool.  (C10.9)"""
    store = SharedLedger(backend=backend)
    source = store.retain(dict.fromkeys(store.ledger.active, 130))
    other = store.finish(store.go_on(source, frontier=dict.fromkeys(store.ledger.active, 128)))
    target = ActivationTarget(10, 5, source, dict.fromkeys(store.ledger.active, 100), keep_source)
    plan = store.explain(target)
    free = {name: spaces.pool.available for name, spaces in store.ledger.active.items()}
    prepared = store.prepare(target)
    assert (prepared.row, prepared.plans) == (plan.row, plan.pools)
    assert plan.kind == ("fork" if keep_source else "move")
    assert [(copy.pool, copy.columns) for copy in prepared.copies] == [(part.pool, 36) for part in plan.pools]
    store.copy(prepared.copies)

    sequence = store.ledger.commit_activation(prepared)

    assert sequence.row == plan.row
    for part in plan.pools:
        assert prepared.tables[part.pool].tolist() == store.page_ids(sequence, part.pool)
        assert free[part.pool] - store.available(part.pool) == part.claimed_pages - part.released_pages
        assert part.kept_pages == 1
        assert store.read(sequence, part.pool) == store.read(other, part.pool)[:100]
