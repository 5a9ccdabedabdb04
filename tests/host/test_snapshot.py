"""Snapshot: a checkpoint of a sequence that runs on, from what is available.  (C10.6, C13.2)"""

from __future__ import annotations

import pytest

from pagedkv.errors import MisuseError, StaleHandle, UnitInFlight
from pagedkv.ledger.sequences import Sequence
from pagedkv.ledger.transaction import Refusal
from pagedkv.values.config import Backend
from tests.host.builders import begin, counts, trim
from tests.host.refusals import assert_unchanged, refused, snapshot
from tests.host.sharing import BACKENDS, DRAFT, MTP, SharedLedger, started


def shape(store: SharedLedger, sequence: Sequence) -> tuple[int, int, int, int]:
    """Return (full, immutable full, own full, tail columns) of what a snapshot would find, by the pages' writers."""
    frontier = store.frontier(sequence)
    full = frontier // 64
    immutable = store.column("writer", sequence)[:full].count(-1)
    return full, immutable, full - immutable, frontier % 64


def refuse(store: SharedLedger, sequence: Sequence) -> Refusal:
    """Ask for a snapshot that must not be taken, in both ways; the ledger must not change."""
    before = snapshot(store.ledger)
    frontier = store.state_frontier(sequence, "state")
    answer = store.ledger.prepare_snapshot(sequence, "state", frontier)
    assert isinstance(answer, Refusal), answer
    assert store.ledger.try_snapshot(sequence, "state", frontier) == answer
    assert_unchanged(before, store.ledger)
    return answer


@pytest.mark.parametrize(("inherited", "frontier", "expected", "copied"), [
    (64, 130, (2, 1, 1, 2), 1), (128, 192, (3, 2, 1, 0), 0), (0, 130, (2, 0, 2, 2), 1), (64, 64, (1, 1, 0, 0), 0),
    (0, 1, (0, 0, 0, 1), 1), (64, 65, (1, 1, 0, 1), 1), (0, 64, (1, 0, 1, 0), 0),
])
def test_a_snapshot_shares_full_pages_and_copies_the_tail_once(
    inherited: int, frontier: int, expected: tuple[int, int, int, int], copied: int
) -> None:
    """{2,1,1,2} and {3,2,1,0}: no entry of the sequence's table changes.  (C10.6; vectors 49, 50)"""
    store = SharedLedger()
    sequence = (
        store.go_on(store.retain(inherited), frontier - inherited, 20) if inherited else store.start(frontier, 20)
    )
    store.append(sequence, frontier - inherited)
    assert shape(store, sequence) == expected
    mirror = store.ledger.active["main"].table.tolist()
    seen = (store.logical(sequence), store.column("content", sequence), store.column("serial", sequence))
    free, read = store.available(), store.read(sequence)

    checkpoint = store.snapshot(sequence)

    full, immutable, _, tail = expected
    assert (store.available(), store.frontier(checkpoint)) == (free - copied, frontier)
    assert mirror == store.ledger.active["main"].table.tolist()
    assert seen == (store.logical(sequence), store.column("content", sequence), store.column("serial", sequence))
    assert store.logical(checkpoint)[:full] == store.logical(sequence)[:full]
    assert store.column("references", sequence) == [3] * immutable + [2] * (full - immutable) + [1] * copied
    assert store.column("writer", sequence) == [-1] * full + [sequence.row] * copied
    assert store.column("protected", checkpoint) == [64] * full + [tail] * copied
    assert store.column("writer", checkpoint) == [-1] * (full + copied)
    if copied:
        assert store.logical(checkpoint)[full] != store.logical(sequence)[full]
        assert store.column("active", checkpoint)[full] == 0
    store.append(sequence, 20)
    assert store.read(checkpoint) == read == store.read(sequence)[:frontier]


def test_the_running_sequence_goes_on_in_its_own_tail_from_the_next_offset() -> None:
    """Vector 49, as C10.6 has it: at 65 the checkpoint gets the copy and the row keeps its page.  (C10.6)"""
    store, sequence = started(100, written=65)
    tail = store.page_ids(sequence)[1]
    checkpoint = store.snapshot(sequence)
    store.append(sequence, 1)

    assert store.page_ids(sequence)[1] == tail != store.page_ids(checkpoint)[1]
    assert store.bytes["main"][tail, 1] == store.read(sequence)[65]
    assert store.bytes["main"][store.page_ids(checkpoint)[1], 1] == -1


def test_a_snapshot_is_paid_from_available_and_never_from_the_reservation() -> None:
    """Entitlement, reservation and leases of the sequence stay.  (C10.6, C16.10)"""
    store, sequence = started(256, written=130, tokens=320)
    assert counts(store.ledger) == (3, 1, 1)
    store.snapshot(sequence)
    assert counts(store.ledger) == (4, 1, 0)

    assert refuse(store, sequence) == Refusal("main", 1, 0, forever=False)
    store.append(sequence, 62)
    store.snapshot(sequence)  # aligned: it takes no page
    assert counts(store.ledger) == (4, 1, 0)
    store.append(sequence, 64)


@pytest.mark.parametrize("pool", ["main", "mtp"])
def test_a_snapshot_while_provisional_pages_are_mapped_is_refused_until_they_are_trimmed(pool: str) -> None:
    """A page wholly behind a frontier is no checkpoint's; the answer names pool and pages.  (C10.6; vector 51)"""
    store, sequence = started(256, written={"main": 100, "mtp": 60}, backend=MTP)
    written = {"main": 10, "mtp": 4} | {pool: 150}
    unit, _ = begin(store.ledger, sequence, written)
    store.ledger.commit_unit(unit, {"main": 10, "mtp": 4})

    pages = {"main": -(-250 // 64) - 2, "mtp": -(-210 // 64) - 1}[pool]
    assert refuse(store, sequence) == Refusal(pool, pages, 0, forever=False, reason="provisional")
    trim(store.ledger, sequence, pool)
    checkpoint = store.snapshot(sequence)
    assert [store.frontier(checkpoint, name) for name in ("main", "mtp")] == [110, 64]


def test_provisional_columns_inside_the_tail_page_are_no_obstacle_and_no_coverage() -> None:
    """The copy takes the committed columns only.  (C13.2, C7.1)"""
    store, sequence = started(128, written=100)
    unit, _ = begin(store.ledger, sequence, 10)
    store.bytes["main"][store.page_ids(sequence)[1], 36:46] = 999
    store.ledger.commit_unit(unit, {"main": 3})

    checkpoint = store.snapshot(sequence)

    assert store.column("committed", checkpoint) == [64, 39]
    assert store.bytes["main"][store.page_ids(checkpoint)[1]].tolist()[38:] == [999] + [-1] * 25


@pytest.mark.parametrize("scarce", ["main", "mtp"])
def test_a_snapshot_without_a_free_page_in_one_pool_takes_none_in_the_other(scarce: str) -> None:
    """The refusal names the pool; nothing of either changed.  (C10.2, C10.6)"""
    store, sequence = started(200, written={"main": 100, "mtp": 70}, backend=MTP)
    pool = store.ledger.active[scarce].pool
    taken = pool.available
    assert pool.try_reserve(taken)

    assert refuse(store, sequence) == Refusal(scarce, 1, 0, forever=False)
    pool.shrink(taken)
    store.snapshot(sequence)


@pytest.mark.parametrize("backend", [MTP, DRAFT])
@pytest.mark.parametrize(("main", "other"), [(100, 100), (130, 64), (128, 128), (70, 0), (64, 63)])
def test_each_pool_is_checkpointed_at_its_own_frontier(backend: Backend, main: int, other: int) -> None:
    """None is derived from another; a backend may have nothing.  (C9.9, C10.6)"""
    store = SharedLedger(backend=backend)
    name = list(store.ledger.active)[1]
    sequence = store.start(200, written={"main": main, name: other})
    free = {pool: store.available(pool) for pool in ("main", name)}
    checkpoint = store.snapshot(sequence)

    for pool, tokens in (("main", main), (name, other)):
        assert store.frontier(checkpoint, pool) == tokens
        assert free[pool] - store.available(pool) == (tokens % 64 > 0)
        assert store.read(checkpoint, pool) == store.read(sequence, pool)
    store.check()
    store.end(sequence)
    store.check()
    store.release(checkpoint)
    assert all(spaces.pool.available == spaces.pool.capacity for spaces in store.ledger.active.values())


@pytest.mark.parametrize("backend", [MTP, DRAFT])
@pytest.mark.parametrize("lead", [1, 64])
def test_a_backend_that_leads_main_is_no_checkpoint(backend: Backend, lead: int) -> None:
    """Neither snapshot nor retain, until the lead is truncated: coverage ends at Main's frontier.  (C13.2, S85)"""
    store = SharedLedger(backend=backend)
    name = list(store.ledger.active)[1]
    sequence = store.start(200, written={"main": 66, name: 66 + lead})
    ledger = store.ledger

    for ask in (lambda: ledger.prepare_snapshot(sequence), lambda: ledger.try_snapshot(sequence),
                lambda: ledger.finish(sequence, retain=True)):
        with refused(MisuseError, "C13.2", ledger, match="truncate it first"):
            ask()
    ledger.truncate(sequence, 66, name)
    for kept in (store.snapshot(sequence), store.finish(sequence)):
        assert (store.frontier(kept, name), store.column("committed", kept, name)) == (66, [64, 2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_committed_is_nothing_to_keep(backend: Backend | None) -> None:
    """Main needs a token; mapped but uncommitted pages are none.  (C9.8)"""
    store, sequence = started(200, backend=backend)
    unit, _ = begin(store.ledger, sequence, 100)
    ledger = store.ledger
    ledger.fail_unit(unit)

    for ask in (lambda: ledger.try_snapshot(sequence, "s"), lambda: ledger.finish(sequence, retain=True, state="s")):
        with refused(MisuseError, "C9.8", ledger, match="at least 1 committed token of Main"):
            ask()


def test_a_sequence_in_flight_or_ended_is_not_checkpointed() -> None:
    """C12.4: at a boundary only; a stale handle is refused.  (C10.1)"""
    store, sequence = started(200, written=100)
    unit, _ = begin(store.ledger, sequence, 1)
    with refused(UnitInFlight, "C12.2", store.ledger):
        store.ledger.try_snapshot(sequence)
    with refused(UnitInFlight, "C12.2", store.ledger):
        store.ledger.finish(sequence, retain=True)
    store.ledger.fail_unit(unit)
    store.end(sequence)
    with refused(StaleHandle, "C10.1", store.ledger):
        store.ledger.try_snapshot(sequence)


def test_snapshots_of_a_growing_sequence_share_what_is_full_at_each() -> None:
    """Five checkpoints of one run: each reads its own prefix, and pages are held once.  (C10.6, C16.4)"""
    store, sequence = started(320, max_context=320)
    taken = {}
    for tokens in (1, 63, 64, 65, 127):
        store.append(sequence, tokens)
        taken[store.snapshot(sequence)] = store.read(sequence)

    assert {checkpoint: store.read(checkpoint) for checkpoint in taken} == taken
    # Frontiers 1, 64, 128, 193, 320: two tails were copied; five full pages are the sequence's own.
    assert counts(store.ledger)[0] == 5 + 2
    store.check()
    for checkpoint in list(taken)[::-1]:
        store.release(checkpoint)
        store.check()
    assert counts(store.ledger)[0] == 5


@pytest.mark.parametrize("state", [False, 0, "s", object()])
def test_a_checkpoint_holds_the_state_it_was_given(state: object) -> None:
    """As it is, without a look into it.  (C2.2)"""
    store, sequence = started(100, written=70)
    checkpoint = store.snapshot(sequence, state=state)

    assert store.ledger.continuations.states[checkpoint.number].state is state
