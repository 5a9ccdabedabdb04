"""Failures that other systems shipped, in the half that the ledger decides.  (S4 to S86)

Each test names its scenario.  Where the design makes a failure impossible, the test shows the refusal.
"""

from __future__ import annotations

import random

import pytest

from pagedkv.errors import ConfigError, MisuseError
from pagedkv.ledger.active_spaces import UNMAPPED, ActiveSpaces
from pagedkv.ledger.ledger import Ledger
from pagedkv.ledger.sequences import Sequence
from pagedkv.ledger.transaction import Refusal
from pagedkv.values.config import Backend, MTPBackend
from tests.host.builders import activate, begin, counts, frontier, make_ledger, mapped, refuse, trim, write
from tests.host.refusals import refused, snapshot
from tests.host.sharing import DRAFT, MTP


def verify_round(ledger: Ledger, sequences: list[Sequence], width: int, rng: random.Random) -> None:
    """Run one verify unit of up to `width` columns in every pool, accept at random, and trim."""
    room = {name: min(int(spaces.entitled_end[sequence.row] - spaces.committed_end[sequence.row])
                      for sequence in sequences) for name, spaces in ledger.active.items()}
    context = ledger.config.max_context
    written = {name: [min(width, room[name], context - frontier(ledger, sequence, name)) for sequence in sequences]
               for name in ledger.active}
    accepted = {name: [rng.randint(0, count) for count in columns] for name, columns in written.items()}
    write(ledger, sequences, written, accepted)
    for name in ledger.active:
        ledger.trim(ledger.batch(sequences), name)


def assert_conserved(spaces: ActiveSpaces) -> None:
    """Assert that the counters and the sets of ids behind them add up."""
    pool = spaces.pool
    assert pool.allocated + pool.reserved + pool.available == pool.capacity
    leased, bound = int(spaces.mapped_mask().sum()), int(spaces.held_mask().sum())
    assert (pool.allocated, pool.bound, pool.free_runs.id_count) == (leased, bound - leased, pool.capacity - bound)
    assert not (spaces.held_mask() & pool.free_runs.mask()).any()


# ---- block tables and page ids ---------------------------------------------------------------------


def test_s4_provisional_columns_never_pass_the_end_of_the_row() -> None:
    """S4: S = 1024, 16 table columns; at 1023 tokens a verify of 4 has three inert columns.  (C11.2)"""
    ledger = make_ledger(max_context=1024, max_concurrency=2, tokens=1024 + 64)
    sequence, neighbour = activate(ledger, 1024), activate(ledger, 1)
    write(ledger, sequence, 1023)
    assert ledger.active["main"].table.shape == (2, 16)

    for columns in (2, 4, 16):
        with refused(MisuseError, "C11.2", ledger, match="inert before the launch"):
            begin(ledger, sequence, columns)
    write(ledger, sequence, 1)
    with refused(MisuseError, "C11.2", ledger):
        begin(ledger, sequence, 1)
    assert (frontier(ledger, sequence), len(mapped(ledger, sequence))) == (1024, 16)
    assert (ledger.active["main"].table[neighbour.row] == UNMAPPED).all()


@pytest.mark.parametrize("draft_window", [1, 4, 5])
def test_s79_the_context_is_reached_exactly_with_a_draft(draft_window: int) -> None:
    """S79: S = 128, provisional columns at 124..128; the one at 128 is inert, L and entitlement stay 2.  (C11.2)"""
    ledger = make_ledger(max_context=128, backend=MTPBackend(draft_window))
    sequence = activate(ledger, 100, 28, written={"main": 124, "mtp": 124})

    for pool in ("main", "mtp"):
        with refused(MisuseError, "C11.2", ledger, match="position 128 of row"):
            begin(ledger, sequence, {"main": 4, "mtp": 4} | {pool: 5})
    write(ledger, sequence, {"main": 4, "mtp": 4})
    for spaces in ledger.active.values():
        assert (spaces.blocks, spaces.entitlement_pages(sequence.row)) == (2, 2)
        assert (int(spaces.committed_end[sequence.row]), spaces.membership_pages(sequence.row)) == (128, 2)


def test_s7_a_row_in_use_names_no_page_that_it_does_not_own(seed: int) -> None:
    """S7: trimmed and finished pages go to others; every id in every row is this row's own.  (C11.1)"""
    ledger = make_ledger(max_context=320, max_concurrency=4, tokens=640)
    spaces, rng = ledger.active["main"], random.Random(seed)
    active: list[Sequence] = []
    for _ in range(300):
        answer = activate(ledger, 64) if not active else None
        if answer is None and len(active) < 4 and spaces.pool.available >= 3 and rng.random() < 0.3:
            answer = activate(ledger, rng.randint(65, 192))
        active += [answer] if answer is not None else []
        verify_round(ledger, rng.sample(active, rng.randint(1, len(active))), 70, rng)
        if rng.random() < 0.3:
            ledger.finish(active.pop(rng.randrange(len(active))))

        owned = [entry for row in spaces.table.tolist() for entry in row if entry != UNMAPPED]
        assert len(set(owned)) == len(owned)
        assert all(spaces.pool.serials[owned] > 0)


@pytest.mark.parametrize("backend", [MTP, DRAFT])
def test_s9_each_pool_has_its_own_table_and_ids(backend: Backend, seed: int) -> None:
    """S9: 100 alternating draft and target steps; an id is always in range of its own pool.  (C3.1, C9.9)"""
    ledger = make_ledger(max_context=256, max_concurrency=3, tokens=320, backend=backend)
    rng, draft = random.Random(seed), list(ledger.active)[1]
    sequences = [activate(ledger, 64), activate(ledger, 60)]
    for step in range(100):
        pool = ("main", draft)[step % 2]
        columns = [min(rng.randint(0, 2), 60 - frontier(ledger, sequence, pool)) for sequence in sequences]
        slices = write(ledger, sequences, {pool: columns})

        assert set(slices) <= {pool}
        for name, spaces in ledger.active.items():
            assert spaces.table.max() < spaces.pool.capacity, name


# ---- retries ---------------------------------------------------------------------------------------


def test_s24_a_retry_after_a_refusal_starts_from_nothing() -> None:
    """S24: what a refused attempt computed is not remembered; the retry equals a first attempt.  (C10.2)"""
    ledger, fresh = make_ledger(max_concurrency=3, tokens=320), make_ledger(max_concurrency=3, tokens=320)
    blocker = activate(ledger, 200)
    for _ in range(3):
        assert refuse(ledger, 100) == Refusal("main", 2, 1, forever=False)
    ledger.finish(blocker)

    again, first = activate(ledger, 100), activate(fresh, 100)
    write(ledger, again, 70)
    write(fresh, first, 70)

    assert (again.row, mapped(ledger, again), counts(ledger)) == (first.row, mapped(fresh, first), counts(fresh))


def test_s49_a_full_pool_refuses_cleanly_and_stays_usable() -> None:
    """S49: every page is held by active sequences; the next one waits, those that run go on.  (C10.9)"""
    ledger = make_ledger(max_context=128, max_concurrency=4, tokens=256)
    sequences = [activate(ledger, 128) for _ in range(2)]
    write(ledger, sequences, 100)

    assert refuse(ledger, 1) == Refusal("main", 1, 0, forever=False)
    write(ledger, sequences, 28)
    ledger.finish(sequences[0])
    activate(ledger, 1)


def test_s80_every_request_within_the_context_fits_an_empty_pool() -> None:
    """S80: beyond S never; smaller pools are not built; what does not fit now would fit alone.  (C5.2, C10.9)"""
    with refused(ConfigError, "C5.2"):
        make_ledger(max_context=1024, tokens=1023)
    ledger = make_ledger(max_context=1024, tokens=1024)

    assert refuse(ledger, 1000, 25) == Refusal("main", 17, 16, forever=True, reason="context")
    small = activate(ledger, 1)
    assert refuse(ledger, 1024) == Refusal("main", 16, 15, forever=False)
    ledger.finish(small)
    activate(ledger, 1024)


# ---- leaks, double frees, drift --------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "drafts"), [
    (2_500, 2), (2_500, 5), *[pytest.param(25_000, drafts, marks=pytest.mark.long) for drafts in (2, 5)],
])
def test_s31_no_category_of_the_accounting_drifts(steps: int, drafts: int, seed: int) -> None:
    """S31: 50,000 steps with drafts of 2 and 5; counters and the sets of ids add up after every step.  (C6.2)"""
    ledger = make_ledger(max_context=200, max_concurrency=4, tokens=640, backend=MTPBackend(drafts))
    rng = random.Random(seed)
    active: list[Sequence] = []
    for _ in range(steps):
        if len(active) < 4 and rng.random() < 0.2 and ledger.active["main"].pool.available >= 3:
            active.append(activate(ledger, rng.randint(1, 150), 42))
        if active:
            verify_round(ledger, rng.sample(active, rng.randint(1, len(active))), drafts + 1, rng)
        if active and rng.random() < 0.05:
            ledger.finish(active.pop(rng.randrange(len(active))))

        for spaces in ledger.active.values():
            assert_conserved(spaces)


def test_s36_promised_and_bound_pages_are_not_free_for_others() -> None:
    """S36: of 9 pages one is mapped, 3 are bound and 2 promised: asking for 4 is refused, for 3 it is not.  (C6.5)"""
    ledger = make_ledger(max_context=256, max_concurrency=3, tokens=576)
    first, _ = activate(ledger, 256), activate(ledger, 128)
    write(ledger, first, 1)
    pool = ledger.active["main"].pool
    assert (pool.allocated, pool.bound, pool.promised) == (1, 3, 2)

    assert refuse(ledger, 256) == Refusal("main", 4, 3, forever=False)
    activate(ledger, 192)


# ---- speculative rollback --------------------------------------------------------------------------


def test_s86_every_committed_token_stays_mapped_through_trim_and_truncate(seed: int) -> None:
    """S86: after each trim and truncate every position below the frontier has a leased page.  (C9.6, C9.10)"""
    ledger = make_ledger(max_context=320, max_concurrency=2, backend=DRAFT)
    rng = random.Random(seed)
    sequences = [activate(ledger, 320) for _ in range(2)]
    for _ in range(200):
        pool, sequence = rng.choice(list(ledger.active)), rng.choice(sequences)
        committed = frontier(ledger, sequence, pool)
        columns = rng.randint(0, 320 - committed)
        write(ledger, sequence, {pool: columns}, accepted={pool: rng.randint(0, columns)})
        before = {name: snapshot(spaces) for name, spaces in ledger.active.items() if name != pool}
        if rng.random() < 0.5:
            trim(ledger, sequence, pool, rng.randint(0, 130))
        else:
            ledger.truncate(sequence, rng.randint(0, frontier(ledger, sequence, pool)), pool)

        assert {name: snapshot(ledger.active[name]) for name in before} == before
        for row, spaces in [(held.row, spaces) for held in sequences for spaces in ledger.active.values()]:
            blocks = -(-int(spaces.committed_end[row]) // 64)
            leased = spaces.mapped_mask()[spaces.table[row, :blocks]]
            assert leased.all(), f"row {row}: a committed block is not mapped"
