"""Speculation arithmetic: pools of a backend, leads, rejections and terminal settlement.  (C3.3, C5.6, C13)"""

from __future__ import annotations

import random

import pytest

from pagedkv.errors import UnitInFlight
from pagedkv.ledger.check import check_ledger
from pagedkv.ledger.ledger import Ledger
from pagedkv.ledger.sequences import Sequence
from pagedkv.ledger.transaction import Refusal
from pagedkv.values.config import Backend, MTPBackend
from tests.host.builders import activate, begin, counts, frontier, make_ledger, mapped, refuse, running, trim, write
from tests.host.refusals import assert_unchanged, refused, snapshot
from tests.host.sharing import DRAFT, MTP


def entitled(ledger: Ledger, sequence: Sequence) -> dict[str, int]:
    """Return the entitlement of a sequence in each pool, in pages."""
    return {name: spaces.entitlement_pages(sequence.row) for name, spaces in ledger.active.items()}


# ---- pools and leads -------------------------------------------------------------------------------


@pytest.mark.parametrize(("draft_window", "lead_pages"), [(1, 0), (2, 1), (5, 1)])
def test_every_row_finds_its_lead_in_the_mtp_pool(draft_window: int, lead_pages: int) -> None:
    """C5.6: M + C * ceil((K - 1) / 64); with budgets that fill Main to the page, all C rows are admitted."""
    ledger = make_ledger(max_context=256, max_concurrency=4, tokens=512, backend=MTPBackend(draft_window))
    assert ledger.active["mtp"].pool.capacity == 8 + 4 * lead_pages

    rows = [activate(ledger, 100, 28) for _ in range(4)]

    assert [entitled(ledger, row) for row in rows] == [{"main": 2, "mtp": 2 + lead_pages}] * 4
    assert counts(ledger)[2] == counts(ledger, "mtp")[2] == 0


@pytest.mark.parametrize("draft_window", [2, 5, 15])
def test_mtp_leads_a_full_budget_by_its_draft_and_pays_for_it_alone(draft_window: int) -> None:
    """Main is at its budget of 128 with nothing left to map; MTP writes K - 1 positions more.  (C3.3, C13.1, C16.13)"""
    ledger = make_ledger(max_context=320, max_concurrency=1, tokens=320, backend=MTPBackend(draft_window))
    sequence = activate(ledger, 100, 28, written={"main": 128, "mtp": 128})
    main, before = snapshot(ledger.active["main"]), counts(ledger, "mtp")
    assert (counts(ledger), before[:2]) == ((2, 0, 3), (2, 1))

    write(ledger, sequence, {"mtp": draft_window - 1}, accepted={"mtp": 0})

    assert (len(mapped(ledger, sequence)), len(mapped(ledger, sequence, "mtp"))) == (2, 3)
    assert frontier(ledger, sequence, "mtp") == 128
    assert counts(ledger, "mtp") == (3, 0, before[2])
    assert trim(ledger, sequence, "mtp") == 1
    assert counts(ledger, "mtp") == before
    assert_unchanged(main, ledger.active["main"])


# ---- rounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [MTP, DRAFT])
def test_a_round_settles_each_pool_by_its_own_count(backend: Backend, seed: int) -> None:
    """C13.1, C9.9: 300 rounds; each pool's frontier is the sum of what it accepted, its trim its own rejected tail."""
    rng = random.Random(seed)
    ledger = make_ledger(max_context=2048, max_concurrency=2, backend=backend)
    names = list(ledger.active)
    rows = [activate(ledger, 1, 1999) for _ in range(2)]
    sums = {name: [0, 0] for name in names}
    available = {name: counts(ledger, name)[2] for name in names}
    for _ in range(300):
        written = {name: [min(rng.randint(0, 6), 2000 - done) for done in sums[name]] for name in names}
        accepted = {name: [rng.randint(0, count) for count in columns] for name, columns in written.items()}
        write(ledger, rows, written, accepted)
        for name in names:
            sums[name] = [done + took for done, took in zip(sums[name], accepted[name], strict=True)]
        pool = rng.choice(names)
        others = {name: snapshot(ledger.active[name]) for name in names if name != pool}
        tails = [len(mapped(ledger, row, pool)) + -done // 64 for row, done in zip(rows, sums[pool], strict=True)]

        assert ledger.trim(ledger.batch(rows), pool) == sum(tails)
        for name, before in others.items():
            assert_unchanged(before, ledger.active[name])
        assert {name: [frontier(ledger, row, name) for row in rows] for name in names} == sums
        assert {name: counts(ledger, name)[2] for name in names} == available


def test_a_later_stage_that_needs_less_trims_nothing() -> None:
    """C13.3, C9.3: a verify maps page 2; a unit of one column, an ensure and its own trim bound leave it mapped."""
    ledger, sequence = running(200, written={"main": 126, "mtp": 126}, max_context=320, backend=MTP)
    write(ledger, sequence, {"main": 6}, accepted={"main": 1})
    verify = mapped(ledger, sequence)
    assert len(verify) == 3

    assert ledger.ensure_mapped_to_tokens(sequence, 100, "main") == {}
    assert write(ledger, sequence, {"mtp": 4}, accepted={"mtp": 1}).keys() == {"mtp"}
    assert write(ledger, sequence, {"main": 0}) == {}
    assert write(ledger, sequence, {"main": 1}, accepted={"main": 0}) == {}
    assert trim(ledger, sequence, provisional=5) == 0
    assert mapped(ledger, sequence) == verify
    assert trim(ledger, sequence) == 1


def test_a_draft_that_lags_catches_up_in_one_append() -> None:
    """C3.3: Draft Full has no frontier of its own making; 300 positions behind, it maps five pages at once."""
    ledger, sequence = running(300, 100, written={"main": 300}, max_context=512, backend=DRAFT)
    assert mapped(ledger, sequence, "draft") == []

    write(ledger, sequence, {"draft": 300})

    assert (frontier(ledger, sequence, "draft"), len(mapped(ledger, sequence, "draft"))) == (300, 5)


# ---- terminal settlement ---------------------------------------------------------------------------


@pytest.mark.parametrize("keeps", [False, True])
def test_a_terminal_round_is_settled_in_order(keeps: bool) -> None:
    """C13.3: in flight everything is refused; commit the accepted, then finish trims, releases and retains."""
    ledger = make_ledger(max_context=320, max_concurrency=2, backend=MTP)
    whole = {name: counts(ledger, name)[2] for name in ledger.active}
    sequence = activate(ledger, 126, 100, written={"main": 126, "mtp": 126})
    batch = ledger.batch([sequence])
    unit, _ = begin(ledger, sequence, {"main": 6, "mtp": 6})
    verify = mapped(ledger, sequence)

    for refuse_in_flight in (lambda: ledger.finish(sequence, retain=keeps, state="state" if keeps else None),
                             lambda: ledger.trim(batch, "main"), lambda: ledger.trim(batch, "mtp"),
                             lambda: ledger.truncate(sequence, 126, "mtp"),
                             lambda: ledger.prepare_snapshot(sequence, "state")):
        with refused(UnitInFlight, "C12.2", ledger):
            refuse_in_flight()
    ledger.commit_unit(unit, {"main": 2, "mtp": 2})
    assert mapped(ledger, sequence) == verify
    assert (frontier(ledger, sequence), counts(ledger)[:2]) == (128, (3, 1))

    kept = ledger.finish(sequence, retain=keeps, state="state" if keeps else None)
    left = 2 if keeps else 0
    assert {name: counts(ledger, name) for name in ledger.active} == {name: (left, 0, whole[name] - left)
                                                                        for name in ledger.active}
    if kept is not None:
        ledger.release(kept)
    assert {name: counts(ledger, name)[2] for name in ledger.active} == whole


def test_an_abort_in_a_verify_gives_everything_back_at_its_end() -> None:
    """C13.3, C12.4: accepted in flight, effective at the boundary; both pools are whole again."""
    ledger = make_ledger(max_context=320, backend=MTP)
    whole = {name: counts(ledger, name) for name in ledger.active}
    sequence = activate(ledger, 126, 100, written={"main": 126, "mtp": 126})
    unit, _ = begin(ledger, sequence, {"main": 6, "mtp": 6})

    assert ledger.abort(sequence) is False
    assert len(mapped(ledger, sequence)) == 3
    ledger.commit_unit(unit, {"main": 2, "mtp": 2})
    assert {name: counts(ledger, name) for name in ledger.active} == whole


@pytest.mark.parametrize("draft_window", [1, 2, 5])
def test_s29_a_draft_that_leads_leaks_nothing(draft_window: int, seed: int) -> None:
    """S29: 200 requests of 70 tokens, the draft led by K - 1 and settled; committed <= mapped <= entitlement."""
    rng = random.Random(seed)
    ledger = make_ledger(max_context=128, max_concurrency=4, backend=MTPBackend(draft_window))
    start = {name: counts(ledger, name) for name in ledger.active}
    for number in range(200):
        sequence = activate(ledger, 50, 20, written={"main": 50, "mtp": 50})
        while (done := frontier(ledger, sequence)) < 70:
            columns = min(draft_window + 1, 70 - done)
            led = done + columns + draft_window - 1 - frontier(ledger, sequence, "mtp")
            took = rng.randint(1, columns)
            drafted = max(done + took - frontier(ledger, sequence, "mtp"), 0)
            write(ledger, sequence, {"main": columns, "mtp": max(led, 0)}, {"main": took, "mtp": min(drafted, led)})
            for name, spaces in ledger.active.items():
                row = sequence.row
                assert spaces.committed_end[row] <= spaces.mapped_end[row] <= spaces.entitled_end[row], name
                trim(ledger, sequence, name)
        kept = ledger.finish(sequence, retain=number % 2 == 1, state="state" if number % 2 else None)
        if kept is not None:
            ledger.release(kept)

        assert {name: counts(ledger, name) for name in ledger.active} == start
        assert not any(spaces.mapped_end.any() for spaces in ledger.active.values())


def test_s80_a_request_with_a_draft_fits_an_empty_pool() -> None:
    """S80, C5.6: with any K a request of S tokens is admitted alone; one that does not fit now waits."""
    for draft_window in (1, 2, 5, 15):
        ledger, small = running(1, max_context=1000, tokens=1000, backend=MTPBackend(draft_window))
        assert refuse(ledger, 1000) == Refusal("main", 16, 15, forever=False)
        ledger.finish(small)
        activate(ledger, 900, 100)
        check_ledger(ledger)
