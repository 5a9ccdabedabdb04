"""Speculation arithmetic: pools of a backend, leads, rejections and terminal settlement.  (C3.3, C5.6, C13)"""

from __future__ import annotations

import random

import pytest

from pagedkv.errors import MisuseError, UnitInFlight
from pagedkv.ledger.activation import ActivationTarget, Refusal
from pagedkv.ledger.check import check_ledgers
from pagedkv.ledger.continuations import Continuation
from pagedkv.ledger.ledger import StoreLedgers
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

DRAFT = DraftFullBackend(DRAFT_GEOMETRY)


def retain(ledgers: StoreLedgers, sequence: Sequence) -> Continuation:
    """Finish a sequence and keep it, with complete state."""
    kept = ledgers.finish(sequence, retain=True, state="state")
    assert isinstance(kept, Continuation)
    return kept


def entitled(ledgers: StoreLedgers, sequence: Sequence) -> dict[str, int]:
    """Return the entitlement of a sequence in each pool, in pages."""
    return {name: spaces.entitlement_pages(sequence.row) for name, spaces in ledgers.spaces.items()}


# ---- pools and leads -------------------------------------------------------------------------------


@pytest.mark.parametrize(("draft_window", "lead_pages"), [(1, 0), (2, 1), (5, 1)])
def test_every_row_finds_its_lead_in_the_mtp_pool(draft_window: int, lead_pages: int) -> None:
    """C5.6: M + C * ceil((K - 1) / 64); with budgets that fill Main to the page, all C rows are admitted."""
    ledgers = make_ledgers(max_context=256, max_concurrency=4, tokens=512, backend=MTPBackend(draft_window))
    assert ledgers.spaces["mtp"].pool.capacity == 8 + 4 * lead_pages

    rows = [activate(ledgers, 100, 28) for _ in range(4)]

    assert [entitled(ledgers, row) for row in rows] == [{"main": 2, "mtp": 2 + lead_pages}] * 4
    assert counts(ledgers)[2] == counts(ledgers, "mtp")[2] == 0
    check_ledgers(ledgers)


@pytest.mark.parametrize(
    ("backend", "pools"), [(None, {"main": 3}), (MTPBackend(1), {"main": 3, "mtp": 3}),
                           (MTPBackend(5), {"main": 3, "mtp": 4}), (DRAFT, {"main": 3, "draft": 3})],
)
def test_a_backend_pool_holds_the_budget_and_only_mtp_a_lead(backend: Backend | None, pools: dict[str, int]) -> None:
    """C3.3, C5.6: 192 tokens are three pages; K - 1 = 4 more positions are a fourth of MTP alone."""
    ledgers = make_ledgers(max_context=512, backend=backend)

    assert entitled(ledgers, activate(ledgers, 100, 92)) == pools


@pytest.mark.parametrize("draft_window", [2, 5, 15])
def test_mtp_leads_a_full_budget_by_its_draft(draft_window: int) -> None:
    """C3.3, C13.1: Main is at its budget of 128; MTP writes K - 1 positions more, in a page of its own."""
    ledgers = make_ledgers(max_context=320, backend=MTPBackend(draft_window))
    sequence = activate(ledgers, 100, 28)
    write(ledgers, sequence, {"main": 128, "mtp": 128})
    main = snapshot(ledgers.spaces["main"])

    write(ledgers, sequence, {"mtp": draft_window - 1}, accepted={"mtp": 0})

    assert (len(mapped(ledgers, sequence)), len(mapped(ledgers, sequence, "mtp"))) == (2, 3)
    assert frontier(ledgers, sequence, "mtp") == 128
    assert trim(ledgers, sequence, "mtp") == 1
    assert_unchanged(main, ledgers.spaces["main"])
    check_ledgers(ledgers)


def test_the_lead_ends_with_the_context() -> None:
    """C5.6, C11.2: L stays the capacity of each space; at S = 256 no lead is left."""
    ledgers = make_ledgers(max_context=256, backend=MTPBackend(5))
    sequence = activate(ledgers, 256)
    write(ledgers, sequence, {"main": 256, "mtp": 256})

    assert entitled(ledgers, sequence) == {"main": 4, "mtp": 4}
    with refused(MisuseError, "C11.2", ledgers):
        begin(ledgers, sequence, {"mtp": 1})


@pytest.mark.parametrize("source", [False, True])
def test_58_where_only_the_backend_lacks_pages_main_is_unchanged(source: bool) -> None:
    """58, C10.2: fresh, and as a fork; the refusal names the backend's pool."""
    ledgers = make_ledgers(max_context=320, max_concurrency=3, backend=DRAFT)
    kept = None
    if source:
        first = activate(ledgers, 100)
        write(ledgers, first, {"main": 100, "draft": 70})
        kept = retain(ledgers, first)
    draft = ledgers.spaces["draft"].pool
    taken = draft.available - 2
    draft.try_reserve(taken)
    target = ActivationTarget(200 - 100 * source, 0, kept)
    needed = 3 if source else 4  # one full page of the draft is shared

    before = snapshot(ledgers)
    assert ledgers.try_activate(target) == Refusal("draft", needed, 2, forever=False)
    assert_unchanged(before, ledgers)
    draft.shrink(taken)
    assert isinstance(ledgers.try_activate(target), Sequence)
    check_ledgers(ledgers)


# ---- rounds ----------------------------------------------------------------------------------------


def test_pools_draw_on_their_own_reservations_only() -> None:
    """C13.1, C16.13: Main has nothing left to map; MTP maps its lead, and neither counter of Main moves."""
    ledgers = make_ledgers(max_context=256, max_concurrency=1, tokens=256, backend=MTPBackend(5))
    sequence = activate(ledgers, 192)
    write(ledgers, sequence, {"main": 192, "mtp": 192})
    assert counts(ledgers) == (3, 0, 1)

    write(ledgers, sequence, {"mtp": 4}, accepted={"mtp": 0})

    assert (counts(ledgers), counts(ledgers, "mtp")) == ((3, 0, 1), (4, 0, 1))
    assert trim(ledgers, sequence, "mtp") == 1
    assert (counts(ledgers), counts(ledgers, "mtp")) == ((3, 0, 1), (3, 1, 1))
    check_ledgers(ledgers)


@pytest.mark.parametrize("backend", [MTPBackend(5), DRAFT])
def test_a_round_settles_each_pool_by_its_own_count(backend: Backend, seed: int) -> None:
    """C13.1, C9.9: 300 rounds; each pool's frontier is the sum of what it accepted, its trim its own rejected tail."""
    rng = random.Random(seed)
    ledgers = make_ledgers(max_context=2048, max_concurrency=2, backend=backend)
    names = list(ledgers.spaces)
    rows = [activate(ledgers, 1, 1999) for _ in range(2)]
    sums = {name: [0, 0] for name in names}
    available = {name: counts(ledgers, name)[2] for name in names}
    for _ in range(300):
        written = {name: [min(rng.randint(0, 6), 2000 - done) for done in sums[name]] for name in names}
        accepted = {name: [rng.randint(0, count) for count in columns] for name, columns in written.items()}
        write(ledgers, rows, written, accepted)
        for name in names:
            sums[name] = [done + took for done, took in zip(sums[name], accepted[name], strict=True)]
        pool = rng.choice(names)
        others = {name: snapshot(ledgers.spaces[name]) for name in names if name != pool}
        tails = [len(mapped(ledgers, row, pool)) + -done // 64 for row, done in zip(rows, sums[pool], strict=True)]

        assert ledgers.trim(ledgers.batch(rows), pool) == sum(tails)
        for name, before in others.items():
            assert_unchanged(before, ledgers.spaces[name])
        assert {name: [frontier(ledgers, row, name) for row in rows] for name in names} == sums
        assert {name: counts(ledgers, name)[2] for name in names} == available
    check_ledgers(ledgers)


def test_a_later_stage_that_needs_less_trims_nothing() -> None:
    """C13.3, C9.3: a verify maps page 2; a unit of one column, an ensure and its own trim bound leave it mapped."""
    ledgers = make_ledgers(max_context=320, backend=MTPBackend(5))
    sequence = activate(ledgers, 200)
    write(ledgers, sequence, {"main": 126, "mtp": 126})
    write(ledgers, sequence, {"main": 6}, accepted={"main": 1})
    verify = mapped(ledgers, sequence)
    assert len(verify) == 3

    assert ledgers.ensure_mapped_to_tokens(sequence, 100, "main") == {}
    assert write(ledgers, sequence, {"mtp": 4}, accepted={"mtp": 1}).keys() == {"mtp"}
    assert write(ledgers, sequence, {"main": 0}) == {}
    assert write(ledgers, sequence, {"main": 1}, accepted={"main": 0}) == {}
    assert trim(ledgers, sequence, provisional=5) == 0
    assert mapped(ledgers, sequence) == verify
    assert trim(ledgers, sequence) == 1


def test_a_draft_that_lags_catches_up_in_one_append() -> None:
    """C3.3: Draft Full has no frontier of its own making; 300 positions behind, it maps five pages at once."""
    ledgers = make_ledgers(max_context=512, backend=DRAFT)
    sequence = activate(ledgers, 300, 100)
    write(ledgers, sequence, {"main": 300})
    assert mapped(ledgers, sequence, "draft") == []

    write(ledgers, sequence, {"draft": 300})

    assert (frontier(ledgers, sequence, "draft"), len(mapped(ledgers, sequence, "draft"))) == (300, 5)
    check_ledgers(ledgers)


# ---- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [1, 4, 64])
def test_s85_a_lead_never_becomes_checkpoint_coverage(lead: int) -> None:
    """S85, C13.2: retain and snapshot are refused until the lead is truncated; coverage ends at Main's frontier."""
    ledgers = make_ledgers(max_context=320, backend=MTPBackend(5))
    sequence = activate(ledgers, 100, 100)
    write(ledgers, sequence, {"main": 100, "mtp": 100})
    write(ledgers, sequence, {"mtp": lead})

    with refused(MisuseError, "C13.2", ledgers, match="truncate it first"):
        ledgers.finish(sequence, retain=True, state="state")
    with refused(MisuseError, "C13.2", ledgers, match="truncate it first"):
        ledgers.prepare_snapshot(sequence, "state")
    ledgers.truncate(sequence, 100, "mtp")
    kept = retain(ledgers, sequence)
    space = ledgers.continuations.retained["mtp"].spaces[kept.number]
    assert (space.frontier, ledgers.spaces["mtp"].pages.committed[space.members].tolist()) == (100, [64, 36])
    check_ledgers(ledgers)


def test_s85_what_is_mapped_but_not_accepted_is_trimmed_by_retaining() -> None:
    """S85, C13.2: a draft of three layers' worth of unverified columns leaves neither coverage nor pages behind."""
    ledgers = make_ledgers(max_context=320, backend=MTPBackend(5))
    sequence = activate(ledgers, 126, 60)
    write(ledgers, sequence, {"main": 126, "mtp": 126})
    write(ledgers, sequence, {"main": 6, "mtp": 5}, accepted={"main": 1, "mtp": 0})
    assert (len(mapped(ledgers, sequence)), len(mapped(ledgers, sequence, "mtp"))) == (3, 3)

    kept = retain(ledgers, sequence)

    spaces = {name: retained.spaces[kept.number] for name, retained in ledgers.continuations.retained.items()}
    assert {name: (space.frontier, space.members.size) for name, space in spaces.items()} == {
        "main": (127, 2), "mtp": (126, 2),
    }  # fmt: skip
    assert (counts(ledgers), counts(ledgers, "mtp")) == ((2, 0, 8), (2, 0, 10))
    check_ledgers(ledgers)


@pytest.mark.parametrize("keep_source", [True, False])
def test_a_sequence_goes_on_from_verified_positions_only(keep_source: bool) -> None:
    """S85, C13.2: at hand-over no draft frontier beyond the verified position is accepted; stale rows are behind it."""
    ledgers = make_ledgers(max_context=320, backend=MTPBackend(5))
    sequence = activate(ledgers, 100, 100)
    write(ledgers, sequence, {"main": 100, "mtp": 100})
    kept = retain(ledgers, sequence)

    for bad in ({"main": 90, "mtp": 91}, {"main": 101, "mtp": 90}):
        with refused(MisuseError, "C10.7", ledgers):
            ledgers.explain(ActivationTarget(10, 10, kept, bad, keep_source))
    again = ledgers.try_activate(ActivationTarget(10, 10, kept, {"main": 90, "mtp": 89}, keep_source))
    assert isinstance(again, Sequence)
    assert (frontier(ledgers, again), frontier(ledgers, again, "mtp")) == (90, 89)
    unit, _ = begin(ledgers, again, {"main": 1, "mtp": 2})
    assert {pool: first.tolist() for pool, first in unit.first_positions.items()} == {"main": [90], "mtp": [89]}
    ledgers.commit_unit(unit)
    check_ledgers(ledgers)


# ---- terminal settlement ---------------------------------------------------------------------------


@pytest.mark.parametrize("keeps", [False, True])
def test_a_terminal_round_is_settled_in_order(keeps: bool) -> None:
    """C13.3: in flight everything is refused; commit the accepted, then finish trims, releases and retains."""
    ledgers = make_ledgers(max_context=320, max_concurrency=2, backend=MTPBackend(5))
    whole = {name: counts(ledgers, name)[2] for name in ledgers.spaces}
    sequence = activate(ledgers, 126, 100)
    write(ledgers, sequence, {"main": 126, "mtp": 126})
    batch = ledgers.batch([sequence])
    unit, _ = begin(ledgers, sequence, {"main": 6, "mtp": 6})
    verify = mapped(ledgers, sequence)

    for refuse_in_flight in (
        lambda: ledgers.finish(sequence, retain=keeps, state="state" if keeps else None),
        lambda: ledgers.trim(batch, "main"),
        lambda: ledgers.trim(batch, "mtp"),
        lambda: ledgers.truncate(sequence, 126, "mtp"),
        lambda: ledgers.prepare_snapshot(sequence, "state"),
    ):
        with refused(UnitInFlight, "C12.2", ledgers):
            refuse_in_flight()
    ledgers.commit_unit(unit, {"main": 2, "mtp": 2})
    assert mapped(ledgers, sequence) == verify
    assert (frontier(ledgers, sequence), counts(ledgers)[:2]) == (128, (3, 1))

    kept = ledgers.finish(sequence, retain=keeps, state="state" if keeps else None)
    left = 2 if keeps else 0
    assert {name: counts(ledgers, name) for name in ledgers.spaces} == {
        name: (left, 0, whole[name] - left) for name in ledgers.spaces
    }
    if kept is not None:
        ledgers.release(kept)
    assert {name: counts(ledgers, name)[2] for name in ledgers.spaces} == whole
    check_ledgers(ledgers)


def test_an_abort_in_a_verify_gives_everything_back_at_its_end() -> None:
    """C13.3, C12.4: accepted in flight, effective at the boundary; both pools are whole again."""
    ledgers = make_ledgers(max_context=320, backend=MTPBackend(5))
    whole = {name: counts(ledgers, name) for name in ledgers.spaces}
    sequence = activate(ledgers, 126, 100)
    write(ledgers, sequence, {"main": 126, "mtp": 126})
    unit, _ = begin(ledgers, sequence, {"main": 6, "mtp": 6})

    assert ledgers.abort(sequence) is False
    assert len(mapped(ledgers, sequence)) == 3
    ledgers.commit_unit(unit, {"main": 2, "mtp": 2})
    assert {name: counts(ledgers, name) for name in ledgers.spaces} == whole


@pytest.mark.parametrize("draft_window", [1, 2, 5])
def test_s29_a_draft_that_leads_leaks_nothing(draft_window: int, seed: int) -> None:
    """S29: 200 requests of 70 tokens, the draft led by K - 1 and settled; committed <= mapped <= entitlement."""
    rng = random.Random(seed)
    ledgers = make_ledgers(max_context=128, max_concurrency=4, backend=MTPBackend(draft_window))
    start = {name: counts(ledgers, name) for name in ledgers.spaces}
    for number in range(200):
        sequence = activate(ledgers, 50, 20)
        write(ledgers, sequence, {"main": 50, "mtp": 50})
        while (done := frontier(ledgers, sequence)) < 70:
            columns = min(draft_window + 1, 70 - done)
            led = done + columns + draft_window - 1 - frontier(ledgers, sequence, "mtp")
            took = rng.randint(1, columns)
            drafted = max(done + took - frontier(ledgers, sequence, "mtp"), 0)
            write(ledgers, sequence, {"main": columns, "mtp": max(led, 0)}, {"main": took, "mtp": min(drafted, led)})
            for name, spaces in ledgers.spaces.items():
                row = sequence.row
                assert spaces.frontier[row] <= spaces.mapped_end[row] <= spaces.limit[row], name
                trim(ledgers, sequence, name)
        kept = ledgers.finish(sequence, retain=number % 2 == 1, state="state" if number % 2 else None)
        if kept is not None:
            ledgers.release(kept)

        assert {name: counts(ledgers, name) for name in ledgers.spaces} == start
        assert not any(spaces.mapped_end.any() for spaces in ledgers.spaces.values())
    check_ledgers(ledgers)


def test_s80_a_request_with_a_draft_fits_an_empty_pool() -> None:
    """S80, C5.6: with any K a request of S tokens is admitted alone; one that does not fit now waits."""
    for draft_window in (1, 2, 5, 15):
        ledgers = make_ledgers(max_context=1000, tokens=1000, backend=MTPBackend(draft_window))
        small = activate(ledgers, 1)
        assert refuse(ledgers, 1000) == Refusal("main", 16, 15, forever=False)
        ledgers.finish(small)
        activate(ledgers, 900, 100)
        check_ledgers(ledgers)
