"""Failures that other systems shipped, in the half that the ledgers decide.  (S4 to S86)

Each test names its scenario.  Where the design makes a failure impossible, the test shows the refusal.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from pagedkv.errors import ConfigError, MisuseError, StaleHandle
from pagedkv.ledger.activation import Refusal
from pagedkv.ledger.active_spaces import AddressSpaces
from pagedkv.ledger.block_tables import UNMAPPED
from pagedkv.ledger.check import check_ledgers
from pagedkv.ledger.ledger import StoreLedgers
from pagedkv.ledger.sequences import Sequence
from pagedkv.values.config import Backend, DraftFullBackend, MTPBackend
from tests.host.builders import (
    DRAFT_GEOMETRY,
    activate,
    begin,
    counts,
    frontier,
    make_ledgers,
    mapped,
    refuse,
    refused,
    slices_of,
    snapshot,
    trim,
    write,
)


def verify_round(ledgers: StoreLedgers, sequences: list[Sequence], width: int, rng: random.Random) -> None:
    """Run one verify unit of up to `width` columns in every pool, accept at random, and trim."""
    room = {
        name: min(int(spaces.limit[sequence.row] - spaces.frontier[sequence.row]) for sequence in sequences)
        for name, spaces in ledgers.spaces.items()
    }
    context = ledgers.config.max_context
    written = {
        name: [
            min(width, room[name], context - frontier(ledgers, sequence, name)) for sequence in sequences
        ]
        for name in ledgers.spaces
    }  # fmt: skip
    accepted = {name: [rng.randint(0, count) for count in columns] for name, columns in written.items()}
    write(ledgers, sequences, written, accepted)
    for name in ledgers.spaces:
        ledgers.trim(ledgers.batch(sequences), name)


def assert_extents_are_ordered(ledgers: StoreLedgers) -> None:
    """Assert committed <= mapped <= entitlement in every row of every pool."""
    for spaces in ledgers.spaces.values():
        assert (spaces.frontier <= spaces.mapped_end).all()
        assert (spaces.mapped_end <= spaces.limit).all()


def assert_conserved(spaces: AddressSpaces) -> None:
    """Assert that the counters and the sets of ids behind them add up."""
    pool = spaces.pool
    assert pool.allocated + pool.reserved + pool.available == pool.capacity
    leased, bound = int(spaces.mapped_mask().sum()), int(spaces.held_mask().sum())
    assert (pool.allocated, pool.bound, pool.free_runs.id_count) == (leased, bound - leased, pool.capacity - bound)
    assert not (spaces.held_mask() & pool.free_runs.mask()).any()


# ---- block tables and page ids ---------------------------------------------------------------------


def test_s4_provisional_columns_never_pass_the_end_of_the_row() -> None:
    """S4: S = 1024, 16 table columns; at 1023 tokens a verify of 4 has three inert columns.  (C11.2)"""
    ledgers = make_ledgers(max_context=1024, max_concurrency=2, tokens=1024 + 64)
    sequence, neighbour = activate(ledgers, 1024), activate(ledgers, 1)
    write(ledgers, sequence, 1023)
    assert ledgers.spaces["main"].table.mirror.shape == (2, 16)

    for columns in (2, 4, 16):
        with refused(MisuseError, "C11.2", ledgers, match="inert before the launch"):
            begin(ledgers, sequence, columns)
    write(ledgers, sequence, 1)
    with refused(MisuseError, "C11.2", ledgers):
        begin(ledgers, sequence, 1)
    assert (frontier(ledgers, sequence), len(mapped(ledgers, sequence))) == (1024, 16)
    assert (ledgers.spaces["main"].table.mirror[neighbour.row] == UNMAPPED).all()
    check_ledgers(ledgers)


@pytest.mark.parametrize("draft_window", [1, 4, 5])
def test_s79_the_context_is_reached_exactly_with_a_draft(draft_window: int) -> None:
    """S79: S = 128, provisional columns at 124..128; the one at 128 is inert, L and entitlement stay 2.  (C11.2)"""
    ledgers = make_ledgers(max_context=128, backend=MTPBackend(draft_window))
    sequence = activate(ledgers, 100, 28)
    write(ledgers, sequence, {"main": 124, "mtp": 124})

    for pool in ("main", "mtp"):
        with refused(MisuseError, "C11.2", ledgers, match="position 128 of row"):
            begin(ledgers, sequence, {"main": 4, "mtp": 4} | {pool: 5})
    write(ledgers, sequence, {"main": 4, "mtp": 4})
    for spaces in ledgers.spaces.values():
        assert (spaces.table.blocks, spaces.entitlement_pages(sequence.row)) == (2, 2)
        assert (int(spaces.frontier[sequence.row]), spaces.membership_pages(sequence.row)) == (128, 2)
    check_ledgers(ledgers)


def test_s7_a_row_in_use_names_no_page_that_it_does_not_own(seed: int) -> None:
    """S7: trimmed and finished pages go to others; every id in every row is this row's own.  (C11.1)"""
    ledgers = make_ledgers(max_context=320, max_concurrency=4, tokens=640)
    spaces, rng = ledgers.spaces["main"], random.Random(seed)
    active: list[Sequence] = []
    for _ in range(300):
        answer = activate(ledgers, 64) if not active else None
        if answer is None and len(active) < 4 and spaces.pool.available >= 3 and rng.random() < 0.3:
            answer = activate(ledgers, rng.randint(65, 192))
        active += [answer] if answer is not None else []
        verify_round(ledgers, rng.sample(active, rng.randint(1, len(active))), 70, rng)
        if rng.random() < 0.3:
            ledgers.finish(active.pop(rng.randrange(len(active))))

        owned = [entry for row in spaces.table.mirror.tolist() for entry in row if entry != UNMAPPED]
        assert len(set(owned)) == len(owned)
        assert all(spaces.pool.serials[owned] > 0)
    check_ledgers(ledgers)


@pytest.mark.parametrize("backend", [MTPBackend(5), DraftFullBackend(DRAFT_GEOMETRY)])
def test_s9_each_pool_has_its_own_table_and_ids(backend: Backend, seed: int) -> None:
    """S9: 100 alternating draft and target steps; an id is always in range of its own pool.  (C3.1, C9.9)"""
    ledgers = make_ledgers(max_context=256, max_concurrency=3, tokens=320, backend=backend)
    rng, draft = random.Random(seed), list(ledgers.spaces)[1]
    sequences = [activate(ledgers, 64), activate(ledgers, 60)]
    for step in range(100):
        pool = ("main", draft)[step % 2]
        columns = [min(rng.randint(0, 2), 60 - frontier(ledgers, sequence, pool)) for sequence in sequences]
        slices = write(ledgers, sequences, {pool: columns})

        assert set(slices) <= {pool}
        for name, spaces in ledgers.spaces.items():
            assert spaces.table.mirror.max() < spaces.pool.capacity, name
    check_ledgers(ledgers)


# ---- retries ---------------------------------------------------------------------------------------


def test_s24_a_retry_after_a_refusal_starts_from_nothing() -> None:
    """S24: what a refused attempt computed is not remembered; the retry equals a first attempt.  (C10.2)"""
    ledgers, fresh = make_ledgers(max_concurrency=3, tokens=320), make_ledgers(max_concurrency=3, tokens=320)
    blocker = activate(ledgers, 200)
    for _ in range(3):
        assert refuse(ledgers, 100) == Refusal("main", 2, 1, forever=False)
    ledgers.finish(blocker)

    again, first = activate(ledgers, 100), activate(fresh, 100)
    write(ledgers, again, 70)
    write(fresh, first, 70)

    assert (again.row, mapped(ledgers, again), counts(ledgers)) == (first.row, mapped(fresh, first), counts(fresh))
    check_ledgers(ledgers)


def test_s49_a_full_pool_refuses_cleanly_and_stays_usable() -> None:
    """S49: every page is held by active sequences; the next one waits, those that run go on.  (C10.9)"""
    ledgers = make_ledgers(max_context=128, max_concurrency=4, tokens=256)
    sequences = [activate(ledgers, 128) for _ in range(2)]
    write(ledgers, sequences, 100)

    assert refuse(ledgers, 1) == Refusal("main", 1, 0, forever=False)
    write(ledgers, sequences, 28)
    ledgers.finish(sequences[0])
    activate(ledgers, 1)
    check_ledgers(ledgers)


def test_s80_every_request_within_the_context_fits_an_empty_pool() -> None:
    """S80: beyond S never; smaller pools are not built; what does not fit now would fit alone.  (C5.2, C10.9)"""
    with refused(ConfigError, "C5.2"):
        make_ledgers(max_context=1024, tokens=1023)
    ledgers = make_ledgers(max_context=1024, tokens=1024)

    assert refuse(ledgers, 1000, 25) == Refusal("main", 17, 16, forever=True, reason="context")
    small = activate(ledgers, 1)
    assert refuse(ledgers, 1024) == Refusal("main", 16, 15, forever=False)
    ledgers.finish(small)
    activate(ledgers, 1024)
    check_ledgers(ledgers)


# ---- leaks, double frees, drift --------------------------------------------------------------------


def test_s25_a_page_released_twice_is_refused_and_ids_stay_distinct() -> None:
    """S25: [4, 4], and [4] from two holders; then everything is allocated: all ids are distinct.  (C6.1)"""
    ledgers = make_ledgers(max_context=512, max_concurrency=2)
    sequence = activate(ledgers, 512)
    write(ledgers, sequence, 512)
    pool = ledgers.spaces["main"].pool
    assert 4 in mapped(ledgers, sequence)

    with refused(MisuseError, "C6.1", ledgers):
        pool.release(np.array([4, 4], np.int32), leased=2)
    ledgers.finish(sequence)
    with refused(MisuseError, "C6.2", ledgers):
        pool.release(np.array([4], np.int32), leased=1)
    sequences = [activate(ledgers, 512) for _ in range(2)]
    write(ledgers, sequences, 512)
    assert sorted(page_id for held in sequences for page_id in mapped(ledgers, held)) == list(range(16))
    check_ledgers(ledgers)


def test_s29_speculation_leaks_no_page(seed: int) -> None:
    """S29: K = 5, 200 requests of 70 tokens, random acceptance: ordered at every step, all free after each.  (C13.1)"""
    ledgers, rng = make_ledgers(max_context=128, max_concurrency=4, backend=MTPBackend(5)), random.Random(seed)
    free = {name: counts(ledgers, name) for name in ledgers.spaces}
    for _ in range(200):
        sequence = activate(ledgers, 50, 20)
        write(ledgers, sequence, {"main": 50, "mtp": 50})
        while frontier(ledgers, sequence) < 70:
            verify_round(ledgers, [sequence], 6, rng)
            assert_extents_are_ordered(ledgers)
        ledgers.finish(sequence)

        assert {name: counts(ledgers, name) for name in ledgers.spaces} == free
        assert all(not spaces.mapped_end.any() for spaces in ledgers.spaces.values())
    check_ledgers(ledgers)


@pytest.mark.parametrize(
    ("steps", "drafts"),
    [(2_500, 2), (2_500, 5), *[pytest.param(25_000, drafts, marks=pytest.mark.long) for drafts in (2, 5)]],
)
def test_s31_no_category_of_the_accounting_drifts(steps: int, drafts: int, seed: int) -> None:
    """S31: 50,000 steps with drafts of 2 and 5; counters and the sets of ids add up after every step.  (C6.2)"""
    ledgers = make_ledgers(max_context=200, max_concurrency=4, tokens=640, backend=MTPBackend(drafts))
    rng = random.Random(seed)
    active: list[Sequence] = []
    for _ in range(steps):
        if len(active) < 4 and rng.random() < 0.2 and ledgers.spaces["main"].pool.available >= 3:
            active.append(activate(ledgers, rng.randint(1, 150), 42))
        if active:
            verify_round(ledgers, rng.sample(active, rng.randint(1, len(active))), drafts + 1, rng)
        if active and rng.random() < 0.05:
            ledgers.finish(active.pop(rng.randrange(len(active))))

        for spaces in ledgers.spaces.values():
            assert_conserved(spaces)
    check_ledgers(ledgers)


def test_s30_a_negative_count_raises_and_changes_nothing() -> None:
    """S30, S35: nothing negative is repaired, wherever it is given.  (C6.2, C9.5)"""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 200)
    batch = ledgers.batch([sequence])
    unit, _ = ledgers.begin_unit("step", batch, {"main": 10})

    with refused(MisuseError, "C14.4", ledgers):
        ledgers.commit_unit(unit, {"main": -1})
    ledgers.commit_unit(unit, {"main": 10})
    with refused(MisuseError, "C14.4", ledgers):
        ledgers.trim(batch, "main", -64)
    with refused(MisuseError, "C9.10", ledgers):
        ledgers.truncate(sequence, -1, "main")
    with refused(MisuseError, "C11.2", ledgers):
        ledgers.ensure_mapped_to_tokens(sequence, -1, "main")
    with refused(MisuseError, "C6.2", ledgers):
        ledgers.spaces["main"].pool.shrink(-1)
    check_ledgers(ledgers)


def test_s35_ending_twice_raises_and_changes_nothing() -> None:
    """S35: a second finish and a second commit are refused, not clamped.  (C12.3, C10.1)"""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 200)
    unit, _ = begin(ledgers, sequence, 100)
    ledgers.commit_unit(unit, {"main": 100})

    with refused(MisuseError, "C12.3", ledgers):
        ledgers.commit_unit(unit, {"main": 100})
    ledgers.finish(sequence)
    with refused(StaleHandle, "C10.1", ledgers):
        ledgers.finish(sequence)
    check_ledgers(ledgers)


def test_s36_promised_and_bound_pages_are_not_free_for_others() -> None:
    """S36: of 9 pages one is mapped, 3 are bound and 2 promised: asking for 4 is refused, for 3 it is not.  (C6.5)"""
    ledgers = make_ledgers(max_context=256, max_concurrency=3, tokens=576)
    first, _ = activate(ledgers, 256), activate(ledgers, 128)
    write(ledgers, first, 1)
    pool = ledgers.spaces["main"].pool
    assert (pool.allocated, pool.bound, pool.promised) == (1, 3, 2)

    assert refuse(ledgers, 256) == Refusal("main", 4, 3, forever=False)
    activate(ledgers, 192)
    check_ledgers(ledgers)


def test_s37_an_old_handle_of_a_recycled_page_is_stale() -> None:
    """S37: X held page 0, Y has it now; X's lease is refused, and Y's page has other content.  (C6.1, C7.6)"""
    ledgers = make_ledgers()
    spaces = ledgers.spaces["main"]
    x = activate(ledgers, 64)
    write(ledgers, x, 64)
    lease, content = spaces.lease(x.row, 0), int(spaces.pages.content[spaces.members[x.row, 0]])
    ledgers.finish(x)
    y = activate(ledgers, 64)
    write(ledgers, y, 64)

    assert mapped(ledgers, y) == [lease.page_id]
    with refused(StaleHandle, "C6.1", ledgers):
        spaces.require_current(lease)
    assert int(spaces.pages.content[spaces.members[y.row, 0]]) != content
    check_ledgers(ledgers)


# ---- speculative rollback --------------------------------------------------------------------------


def test_s56_a_rewind_across_a_page_boundary_gives_the_page_back() -> None:
    """S56: 126, a draft of 5 maps page 2, one accepted: [0, 1] are held; at 129 page 2 is published again.  (C9.6)"""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 200)
    write(ledgers, sequence, 126)
    slices = write(ledgers, sequence, 5, accepted=1)
    assert slices_of(slices["main"]) == [(sequence.row, 2, 1)]
    third = ledgers.spaces["main"].lease(sequence.row, 2)

    assert trim(ledgers, sequence) == 1
    assert mapped(ledgers, sequence) == [0, 1]
    with refused(StaleHandle, "C6.1", ledgers):
        ledgers.spaces["main"].require_current(third)
    assert slices_of(write(ledgers, sequence, 2)["main"]) == [(sequence.row, 2, 1)]
    assert (frontier(ledgers, sequence), len(mapped(ledgers, sequence))) == (129, 3)
    check_ledgers(ledgers)


def test_s86_every_committed_token_stays_mapped_through_trim_and_truncate(seed: int) -> None:
    """S86: after each trim and truncate every position below the frontier has a leased page.  (C9.6, C9.10)"""
    ledgers = make_ledgers(max_context=320, max_concurrency=2, backend=DraftFullBackend(DRAFT_GEOMETRY))
    rng = random.Random(seed)
    sequences = [activate(ledgers, 320) for _ in range(2)]
    for _ in range(200):
        pool, sequence = rng.choice(list(ledgers.spaces)), rng.choice(sequences)
        committed = frontier(ledgers, sequence, pool)
        columns = rng.randint(0, 320 - committed)
        write(ledgers, sequence, {pool: columns}, accepted={pool: rng.randint(0, columns)})
        before = {name: snapshot(spaces) for name, spaces in ledgers.spaces.items() if name != pool}
        if rng.random() < 0.5:
            trim(ledgers, sequence, pool, rng.randint(0, 130))
        else:
            ledgers.truncate(sequence, rng.randint(0, frontier(ledgers, sequence, pool)), pool)

        assert {name: snapshot(ledgers.spaces[name]) for name in before} == before
        for row, spaces in [(held.row, spaces) for held in sequences for spaces in ledgers.spaces.values()]:
            blocks = -(-int(spaces.frontier[row]) // 64)
            leased = spaces.mapped_mask()[spaces.table.mirror[row, :blocks]]
            assert leased.all(), f"row {row}: a committed block is not mapped"
    check_ledgers(ledgers)
