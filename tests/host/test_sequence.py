"""Activation, handles and the end of a sequence, over one and two pools.  (C9.2, C9.8, C10, C11.3)"""

from __future__ import annotations

import pytest

from pagedkv.errors import EntitlementExceeded, MisuseError, StaleHandle
from pagedkv.ledger.activation import ActivationPlan, ActivationTarget, Refusal
from pagedkv.ledger.check import check_ledgers
from pagedkv.ledger.sequences import Sequence
from pagedkv.values.config import Backend, DraftFullBackend, MTPBackend
from tests.host.builders import (
    DRAFT_GEOMETRY,
    activate,
    assert_unchanged,
    begin,
    counts,
    frontier,
    make_ledgers,
    mapped,
    refuse,
    refused,
    snapshot,
    trim,
    write,
)

BACKENDS = [None, MTPBackend(1), MTPBackend(5), DraftFullBackend(DRAFT_GEOMETRY)]


@pytest.mark.parametrize(
    ("prompt_tokens", "output_tokens", "pages"), [(1, 0, 1), (64, 0, 1), (64, 1, 2), (100, 60, 3), (200, 56, 4)]
)
def test_an_activation_reserves_prompt_and_whole_output(prompt_tokens: int, output_tokens: int, pages: int) -> None:
    """ceil((prompt + output) / P) pages are in no one's available capacity, and nothing is mapped.  (C9.2, C16.10)"""
    ledgers = make_ledgers()
    sequence = activate(ledgers, prompt_tokens, output_tokens)

    assert counts(ledgers) == (0, pages, 8 - pages)
    assert mapped(ledgers, sequence) == []
    assert frontier(ledgers, sequence) == 0
    assert int(ledgers.sequences.budget_tokens[sequence.row]) == prompt_tokens + output_tokens
    check_ledgers(ledgers)


@pytest.mark.parametrize(
    ("backend", "total_tokens", "backend_pages"),
    [
        (MTPBackend(1), 64, 1),
        (MTPBackend(2), 63, 1),
        (MTPBackend(2), 64, 2),
        (MTPBackend(5), 60, 1),
        (MTPBackend(5), 61, 2),
        (MTPBackend(5), 256, 4),
        (DraftFullBackend(DRAFT_GEOMETRY), 64, 1),
        (DraftFullBackend(DRAFT_GEOMETRY), 65, 2),
    ],
)
def test_the_backend_reserves_its_lead_as_well_but_never_beyond_the_table(
    backend: Backend, total_tokens: int, backend_pages: int
) -> None:
    """MTP: ceil(min(budget + K - 1, 64 L) / P); Draft Full: as Main.  (C9.2, C5.6)"""
    ledgers = make_ledgers(backend=backend)
    activate(ledgers, total_tokens)
    name = list(ledgers.spaces)[1]

    assert counts(ledgers)[1] == -(-total_tokens // 64)
    assert counts(ledgers, name)[1] == backend_pages
    check_ledgers(ledgers)


@pytest.mark.parametrize(("prompt_tokens", "output_tokens"), [(0, 1), (-1, 5), (1, -1), (1.0, 1), (1, True), ("1", 1)])
def test_a_target_is_made_of_token_counts(prompt_tokens: int, output_tokens: int) -> None:
    """At least one prompt token, no negative output, integers only.  (C9.2)"""
    with refused(MisuseError, "C9.2"):
        ActivationTarget(prompt_tokens, output_tokens)


@pytest.mark.parametrize(
    ("prompt_tokens", "output_tokens", "pages"), [(257, 0, 5), (256, 1, 5), (1, 256, 5), (10**9, 0, 15_625_000)]
)
def test_a_budget_beyond_the_context_is_refused_for_ever_not_clamped(
    prompt_tokens: int, output_tokens: int, pages: int
) -> None:
    """prompt + output > S; waiting cannot help.  (C9.2, C10.9, S80)"""
    ledgers = make_ledgers()

    assert refuse(ledgers, prompt_tokens, output_tokens) == Refusal("main", pages, 4, forever=True, reason="context")
    check_ledgers(ledgers)


def test_the_context_is_token_exact_for_activation() -> None:
    """S = 100: 101 tokens are refused although two pages hold 128.  (C5.5, C9.2)"""
    ledgers = make_ledgers(max_context=100)

    assert refuse(ledgers, 101) == Refusal("main", 2, 2, forever=True, reason="context")
    activate(ledgers, 100)
    check_ledgers(ledgers)


def test_scarcity_of_pages_is_a_refusal_with_the_numbers() -> None:
    """5 pages: one of 4 leaves 1; 2 more do not fit now, but would alone.  (C10.9, S80)"""
    ledgers = make_ledgers(max_concurrency=3, tokens=320)
    first = activate(ledgers, 256)

    assert refuse(ledgers, 65) == Refusal("main", 2, 1, forever=False)
    ledgers.finish(first)
    activate(ledgers, 65)
    check_ledgers(ledgers)


def test_scarcity_of_rows_is_a_refusal() -> None:
    """C = 2: the third sequence waits, whatever it needs.  (C10.9)"""
    ledgers = make_ledgers(max_concurrency=2)
    sequences = [activate(ledgers, 1) for _ in range(2)]

    assert refuse(ledgers, 1) == Refusal("rows", 1, 0, forever=False, reason="rows")
    ledgers.finish(sequences[0])
    activate(ledgers, 1)
    check_ledgers(ledgers)


@pytest.mark.parametrize("backend", [MTPBackend(5), DraftFullBackend(DRAFT_GEOMETRY)])
def test_a_backend_that_lacks_pages_leaves_main_unchanged(backend: Backend) -> None:
    """Only the backend pool is short: no counter, row or column of any pool moves.  (C10.2, C6.3)"""
    ledgers = make_ledgers(backend=backend)
    name = list(ledgers.spaces)[1]
    scarce = ledgers.spaces[name].pool
    taken = scarce.available - 2
    assert scarce.try_reserve(taken)

    assert refuse(ledgers, 129) == Refusal(name, 3, 2, forever=False)
    scarce.shrink(taken)
    activate(ledgers, 129)
    check_ledgers(ledgers)


@pytest.mark.parametrize("backend", BACKENDS)
def test_explaining_has_no_side_effect_and_activation_does_what_it_said(backend: Backend | None) -> None:
    """The plan's pages and row are those that the activation takes.  (C10.9)"""
    ledgers = make_ledgers(max_concurrency=3, backend=backend)
    activate(ledgers, 64)
    target = ActivationTarget(100, 29)
    before = snapshot(ledgers)
    plan = ledgers.explain(target)
    assert_unchanged(before, ledgers)
    assert isinstance(plan, ActivationPlan)
    reserved = {name: spaces.pool.reserved for name, spaces in ledgers.spaces.items()}

    sequence = ledgers.try_activate(target)

    assert isinstance(sequence, Sequence)
    assert sequence.row == plan.row
    assert dict(plan.entitlement_pages) == {
        name: spaces.pool.reserved - reserved[name] for name, spaces in ledgers.spaces.items()
    }
    check_ledgers(ledgers)


def test_an_explained_refusal_is_the_activations_refusal() -> None:
    """Rows, pages and the context ceiling.  (C10.9)"""
    ledgers = make_ledgers(max_concurrency=3, tokens=320)
    activate(ledgers, 256)

    for target in (ActivationTarget(65, 0), ActivationTarget(257, 0)):
        assert ledgers.explain(target) == ledgers.try_activate(target)
    check_ledgers(ledgers)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_has_a_space_in_every_enabled_pool(backend: Backend | None) -> None:
    """One row number selects it in all of them.  (C10.1, C11.3)"""
    ledgers = make_ledgers(backend=backend)
    sequence = activate(ledgers, 100)

    assert [spaces.entitlement_pages(sequence.row) > 0 for spaces in ledgers.spaces.values()] == [True] * len(
        ledgers.spaces
    )
    assert ledgers.sequences.active_rows() == [sequence.row]
    assert ledgers.sequences.active_count == 1
    check_ledgers(ledgers)


def test_active_sequences_have_distinct_rows_and_a_row_serves_again() -> None:
    """A row is leased while its sequence is active, by one sequence at a time.  (C9.7)"""
    ledgers = make_ledgers(max_concurrency=3)
    sequences = [activate(ledgers, 64) for _ in range(3)]
    assert sorted(sequence.row for sequence in sequences) == [0, 1, 2]

    ledgers.finish(sequences[1])
    again = activate(ledgers, 64)

    assert again.row == sequences[1].row
    assert again != sequences[1]
    check_ledgers(ledgers)


@pytest.mark.parametrize("backend", BACKENDS)
def test_finish_gives_up_everything_in_every_pool(backend: Backend | None) -> None:
    """Mapped, bound and promised pages, and the row; the next sequence starts empty.  (C9.8)"""
    ledgers = make_ledgers(backend=backend)
    sequence = activate(ledgers, 200)
    write(ledgers, sequence, dict.fromkeys(ledgers.spaces, 130))
    before = {name: spaces.pool.capacity for name, spaces in ledgers.spaces.items()}

    ledgers.finish(sequence)

    assert {name: spaces.pool.available for name, spaces in ledgers.spaces.items()} == before
    assert ledgers.sequences.active_count == 0
    check_ledgers(ledgers)
    again = activate(ledgers, 200)
    assert [frontier(ledgers, again, name) for name in ledgers.spaces] == [0] * len(before)
    assert [mapped(ledgers, again, name) for name in ledgers.spaces] == [[]] * len(before)


def test_a_handle_of_a_finished_sequence_is_refused_everywhere() -> None:
    """Also after its row serves another sequence.  (C6.1, C10.1, S35)"""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 100)
    batch = ledgers.batch([sequence])
    write(ledgers, sequence, 10)
    ledgers.finish(sequence)

    for _ in range(2):
        with refused(StaleHandle, "C10.1", ledgers):
            ledgers.finish(sequence)
        with refused(StaleHandle, "C10.1", ledgers):
            ledgers.abort(sequence)
        with refused(StaleHandle, "C10.1", ledgers):
            ledgers.batch([sequence])
        with refused(StaleHandle, "C10.1", ledgers):
            ledgers.begin_unit("step", batch, {"main": 1})
        with refused(StaleHandle, "C10.1", ledgers):
            ledgers.trim(batch, "main")
        with refused(StaleHandle, "C10.1", ledgers):
            ledgers.truncate(sequence, 0, "main")
        with refused(StaleHandle, "C10.1", ledgers):
            ledgers.ensure_mapped_to_tokens(sequence, 1, "main")
        check_ledgers(ledgers)
        if ledgers.sequences.active_count == 0:
            assert activate(ledgers, 100).row == sequence.row


def test_a_handle_of_another_store_is_refused() -> None:
    """Same row, same serial, another store.  (C10.1)"""
    ours, theirs = make_ledgers(store_id=1), make_ledgers(store_id=2)
    activate(ours, 100)
    foreign = activate(theirs, 100)

    with refused(StaleHandle, "C10.1", ours, theirs):
        ours.finish(foreign)
    with refused(StaleHandle, "C10.1", ours, theirs):
        ours.batch([foreign])
    check_ledgers(ours)


def test_a_batch_of_another_store_is_refused() -> None:
    """Also when both stores have activated equally often.  (C10.1)"""
    ours, theirs = make_ledgers(store_id=1), make_ledgers(store_id=2)
    activate(ours, 100)
    foreign = theirs.batch([activate(theirs, 100)])

    with refused(StaleHandle, "C10.1", ours, theirs):
        ours.begin_unit("step", foreign, {"main": 1})
    with refused(StaleHandle, "C10.1", ours, theirs):
        ours.trim(foreign, "main")
    check_ledgers(ours)


def test_a_handle_made_by_hand_names_nothing() -> None:
    """A free row has no serial that a forged handle could match.  (C10.1)"""
    ledgers = make_ledgers()
    activate(ledgers, 100)

    for forged in (Sequence(1, 1, 0), Sequence(1, 1, 1), Sequence(1, 0, 0), Sequence(1, 2, 1), Sequence(1, -1, 0)):
        with refused(StaleHandle, "C10.1", ledgers):
            ledgers.finish(forged)
    check_ledgers(ledgers)


def test_a_batch_outlives_other_sequences_but_not_its_own() -> None:
    """Handles are revalidated when a row was leased or returned since.  (C10.1)"""
    ledgers = make_ledgers(max_concurrency=3)
    sequences = [activate(ledgers, 100) for _ in range(3)]
    batch = ledgers.batch(sequences[:2])
    ledgers.finish(sequences[2])
    unit, _ = ledgers.begin_unit("step", batch, {"main": 1})
    ledgers.commit_unit(unit, {"main": 1})

    ledgers.finish(sequences[1])
    with refused(StaleHandle, "C10.1", ledgers):
        ledgers.begin_unit("step", batch, {"main": 1})
    activate(ledgers, 100)
    with refused(StaleHandle, "C10.1", ledgers):
        ledgers.begin_unit("step", batch, {"main": 1})
    assert frontier(ledgers, sequences[0]) == 1
    check_ledgers(ledgers)


def test_a_batch_names_each_sequence_once() -> None:
    """An empty batch and a repeated sequence are misuse.  (C14.4)"""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 100)

    with refused(MisuseError, "C14.4", ledgers):
        ledgers.batch([])
    with refused(MisuseError, "C14.4", ledgers):
        ledgers.batch([sequence, sequence])
    assert len(ledgers.batch([sequence])) == 1


def test_pools_map_commit_and_trim_apart() -> None:
    """Main maps 3 pages, MTP 4 (its lead); after rejection each trims its own tail.  (C9.9, C13.1)"""
    ledgers = make_ledgers(max_context=320, backend=MTPBackend(5))
    sequence = activate(ledgers, 130, 60)
    write(ledgers, sequence, {"main": 128, "mtp": 128})
    unit, _ = begin(ledgers, sequence, {"main": 6, "mtp": 65})
    assert (len(mapped(ledgers, sequence)), len(mapped(ledgers, sequence, "mtp"))) == (3, 4)

    ledgers.commit_unit(unit, {"main": 0, "mtp": 1})
    assert trim(ledgers, sequence, "mtp") == 1
    assert (len(mapped(ledgers, sequence)), len(mapped(ledgers, sequence, "mtp"))) == (3, 3)
    assert trim(ledgers, sequence) == 1
    assert (len(mapped(ledgers, sequence)), len(mapped(ledgers, sequence, "mtp"))) == (2, 3)
    assert (frontier(ledgers, sequence), frontier(ledgers, sequence, "mtp")) == (128, 129)
    check_ledgers(ledgers)


def test_no_pool_follows_another() -> None:
    """A unit, a commit and a truncate that name one pool leave the other as it was.  (C9.9, C16.13)"""
    ledgers = make_ledgers(backend=DraftFullBackend(DRAFT_GEOMETRY))
    sequence = activate(ledgers, 200)
    write(ledgers, sequence, {"main": 130})
    before = snapshot(ledgers.spaces["draft"])

    write(ledgers, sequence, {"main": 10}, accepted={"main": 3})
    ledgers.truncate(sequence, 5, "main")
    trim(ledgers, sequence)
    ledgers.ensure_mapped_to_tokens(sequence, 200, "main")

    assert_unchanged(before, ledgers.spaces["draft"])
    check_ledgers(ledgers)


def test_a_pool_that_is_not_enabled_is_refused() -> None:
    """Every operation names a pool of this store.  (C3.3, C9.9)"""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 200)
    batch = ledgers.batch([sequence])

    with refused(MisuseError, "C3.3", ledgers, match="one of \\['main'\\]"):
        ledgers.begin_unit("step", batch, {"main": 1, "mtp": 1})
    with refused(MisuseError, "C3.3", ledgers):
        ledgers.trim(batch, "draft")
    with refused(MisuseError, "C3.3", ledgers):
        ledgers.truncate(sequence, 0, "rows")
    with refused(MisuseError, "C3.3", ledgers):
        ledgers.ensure_mapped_to_tokens(sequence, 1, "Main")
    check_ledgers(ledgers)


@pytest.mark.parametrize("scarce", ["main", "mtp"])
def test_a_unit_maps_in_all_its_pools_or_in_none(scarce: str) -> None:
    """Beyond one pool's entitlement nothing is mapped in the other.  (C9.3, C9.4)"""
    ledgers = make_ledgers(backend=MTPBackend(1))
    sequence = activate(ledgers, 100)

    with refused(EntitlementExceeded, "C9.3", ledgers, match=f"pool {scarce}"):
        begin(ledgers, sequence, {"main": 10, "mtp": 10} | {scarce: 129})
    check_ledgers(ledgers)


def test_a_unit_maps_only_in_the_pools_it_writes() -> None:
    """Verify in Main, a draft in MTP.  (C9.4)"""
    ledgers = make_ledgers(backend=MTPBackend(5))
    sequence = activate(ledgers, 200)

    assert list(write(ledgers, sequence, {"mtp": 70})) == ["mtp"]
    assert (mapped(ledgers, sequence), len(mapped(ledgers, sequence, "mtp"))) == ([], 2)
    assert list(write(ledgers, sequence, {"main": 70, "mtp": 1})) == ["main"]
    check_ledgers(ledgers)
