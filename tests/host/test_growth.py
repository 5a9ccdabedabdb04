"""Lease growth: what is admitted, when it grows, and how it ends where nothing is left.  (C9.2, C16.10, C16.17)"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from pagedkv.errors import EntitlementExceeded, MisuseError, StaleHandle, UnitInFlight
from pagedkv.ledger.check import check_ledger
from pagedkv.ledger.growth import NO_GROWTH
from pagedkv.ledger.ledger import Ledger
from pagedkv.ledger.sequences import Sequence
from pagedkv.ledger.transaction import ActivationPlan, ActivationTarget, Refusal
from pagedkv.values.config import Backend, MTPBackend
from tests.host.builders import activate, begin, counts, frontier, growing, make_config, make_ledger, refuse, write
from tests.host.refusals import assert_unchanged, refused, snapshot
from tests.host.sharing import DRAFT, MTP


def entitled(ledger: Ledger, sequence: Sequence, pool: str = "main") -> int:
    """Return the entitlement of a sequence in pages."""
    return ledger.active[pool].entitlement_pages(sequence.row)


def covered(ledger: Ledger, sequences: list[Sequence], pool: str = "main", *, forced: bool = False) -> list[int]:
    """Return the columns that sequences may still write, those of a forced span or not."""
    columns: list[int] = ledger.covered_columns(ledger.batch(sequences), pool, forced).tolist()
    return columns


def begin_round(ledger: Ledger, *sequences: Sequence) -> list[Sequence]:
    """Begin a round of sequences, in this batch order."""
    return ledger.begin_round(ledger.batch(list(sequences)))


def run_to_the_end(ledger: Ledger, sequence: Sequence, *, columns: int = 1) -> int:
    """Decode until a launch is not covered or the budget is used; return the frontier."""
    budget = int(ledger.sequences.budget_tokens[sequence.row])
    while frontier(ledger, sequence) + columns <= budget:
        begin_round(ledger, sequence)
        if covered(ledger, [sequence])[0] < columns:
            break
        write(ledger, sequence, columns)
        check_ledger(ledger)
    return frontier(ledger, sequence)


# ---- admission -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "output", "pages"), [
    (1, 4000, 5 + 2),  # 1 + 256 tokens, and a cushion of pages(1) + 1
    (64, 4000, 5 + 2), (65, 4000, 6 + 2), (64, 384, 7), (64, 448, 7),
    (64, 256, 5), (64, 320, 6),  # the whole budget is less than window and cushion
    (4000, 96, 64),  # never beyond L
])
def test_an_activation_reserves_prompt_window_and_cushion(prompt: int, output: int, pages: int) -> None:
    """C9.2: min(full, pages(prompt + min(output, window)) + cushion)."""
    ledger = growing()
    target = ActivationTarget(prompt, output)
    plan = ledger.transactions.explain(target)
    assert isinstance(plan, ActivationPlan)

    sequence = activate(ledger, prompt, output)

    assert entitled(ledger, sequence) == pages == dict(plan.entitlement_pages)["main"]
    assert counts(ledger) == (0, pages, 128 - pages)


@pytest.mark.parametrize(("columns", "forced", "cushion", "backend"), [
    (1, 0, 2, None), (16, 0, 2, None), (16, 48, 2, None), (16, 49, 3, None), (1, 300, 6, None),
    (None, 49, 3, MTPBackend(15)),  # a verify of K + 1 columns is the widest launch then
])
def test_the_cushion_holds_the_widest_launch_and_a_forced_span(
    columns: int | None, forced: int, cushion: int, backend: Backend | None
) -> None:
    """C9.2: pages(W_max + forced_span_tokens) + 1."""
    ledger = growing(columns=columns, forced=forced, backend=backend)

    assert ledger.growth.cushion_pages == cushion
    assert entitled(ledger, activate(ledger, 64, 4000)) == 5 + cushion


def test_a_budget_beyond_the_window_stays_available_to_others() -> None:
    """C9.2, C10.9, C16.10: a refusal counts the whole budget without growth, and window and cushion with it."""
    whole, partly = make_ledger(max_context=4096, tokens=4096), growing(tokens=4096, max_concurrency=4)
    for ledger in (whole, partly):
        activate(ledger, 1024)

    assert refuse(whole, 64, 4000) == Refusal("main", 64, 48, forever=False)
    assert entitled(partly, activate(partly, 64, 4000)) == 7
    activate(partly, (64 - 16 - 7 - 6) * 64)
    assert refuse(partly, 64, 4000) == Refusal("main", 7, 6, forever=False)
    assert refuse(partly, 100, 4000) == Refusal("main", 65, 64, forever=True, reason="context")


def test_a_fork_reserves_what_its_source_lacks_of_the_window() -> None:
    """C9.1, C9.2: shared pages count in the entitlement, the window begins behind source and prompt."""
    ledger = growing()
    first = activate(ledger, 130, 4000 - 130, written=130)
    source = ledger.finish(first, retain=True, state="state")
    assert counts(ledger) == (3, 0, 125)

    fork = ledger.try_activate(ActivationTarget(62, 3000, source))
    assert isinstance(fork, Sequence)

    assert entitled(ledger, fork) == 3 + 4 + 2
    assert counts(ledger) == (4, 6, 118)  # two shared, one copied


# ---- growth ----------------------------------------------------------------------------------------


def test_a_row_grows_by_a_window_when_it_reaches_its_cushion() -> None:
    """C9.2, C16.10: not at the frontier where the cushion begins, but one token behind it."""
    ledger = growing()
    sequence = activate(ledger, 64, 4000, written=320)

    before = snapshot(ledger.active)
    assert begin_round(ledger, sequence) == []
    assert_unchanged(before, ledger.active)
    write(ledger, sequence, 1)
    assert begin_round(ledger, sequence) == []
    assert entitled(ledger, sequence) == 7 + 4
    assert begin_round(ledger, sequence) == []
    assert entitled(ledger, sequence) == 7 + 4


def test_growth_stops_at_the_budget() -> None:
    """C9.2: prompt and output, not a page more; a full row never asks again."""
    ledger = growing()
    sequence = activate(ledger, 64, 500)

    assert run_to_the_end(ledger, sequence) == 564
    assert entitled(ledger, sequence) == 9
    assert ledger.growth.grow_at["main"][sequence.row] == NO_GROWTH
    assert counts(ledger) == (9, 0, 119)


@pytest.mark.parametrize(("window", "free", "gained"), [
    *((256, free, gained) for free, gained in ((5, 4), (4, 4), (3, 2), (2, 2), (1, 1), (0, 0))),
    (64, 5, 1),  # no rung is larger than the window
])
def test_the_ladder_takes_the_first_rung_that_fits(window: int, free: int, gained: int) -> None:
    """C9.2: a window of 256 tokens, 128, then 64."""
    ledger = growing(tokens=4096, window=window)
    sequence = activate(ledger, 64, 4000, written=64 + window + 1)
    held = entitled(ledger, sequence)
    activate(ledger, 4096 - held * 64 - free * 64)

    assert ledger.growth.ladder_pages == ((4, 2, 1) if window == 256 else (1,))
    assert begin_round(ledger, sequence) == ([] if gained else [sequence])
    assert (held, entitled(ledger, sequence)) == (3 + window // 64, 3 + window // 64 + gained)


def test_a_row_that_is_not_in_the_batch_does_not_grow() -> None:
    """C9.2: a round is of its batch; the answer keeps batch order."""
    ledger = growing(max_concurrency=3, tokens=4096)
    first, second, third = (activate(ledger, 64, 4000) for _ in range(3))
    write(ledger, [first, second, third], 321)

    assert begin_round(ledger, second) == []
    assert [entitled(ledger, sequence) for sequence in (first, second, third)] == [7, 11, 7]
    taken = counts(ledger)[2]
    assert ledger.active["main"].pool.try_reserve(taken)
    assert begin_round(ledger, third, second, first) == [third, first]
    ledger.active["main"].pool.shrink(taken)


@pytest.mark.parametrize("backend", [MTP, DRAFT])
def test_pools_grow_together_or_not_at_all(backend: Backend) -> None:
    """C6.3, C9.2: where only the backend lacks pages, Main does not grow either."""
    ledger = growing(backend=backend, tokens=4096)
    backend_pool = list(ledger.active)[1]
    sequence = activate(ledger, 64, 3000, written={"main": 321, backend_pool: 300})
    hog = ledger.active[backend_pool].pool
    taken = hog.available
    hog.try_reserve(taken)

    before = snapshot(ledger.active)
    assert begin_round(ledger, sequence) == [sequence]
    assert_unchanged(before, ledger.active)
    hog.shrink(4)
    assert begin_round(ledger, sequence) == []
    assert (entitled(ledger, sequence), entitled(ledger, sequence, backend_pool)) == (11, 11)
    hog.shrink(taken - 4)


def test_each_row_grows_for_its_own_pool() -> None:
    """C9.2, C13.1: of two rows one is thin in Main alone, the other in MTP alone, which leads; both grow in both."""
    ledger = growing(backend=MTP)
    lagging, leading = activate(ledger, 64, 3000), activate(ledger, 64, 3000)
    write(ledger, [lagging, leading], {"main": [321, 318], "mtp": [0, 321]})

    assert begin_round(ledger, lagging, leading) == []
    assert [entitled(ledger, row, pool) for row in (lagging, leading) for pool in ("main", "mtp")] == [11] * 4


def test_the_full_mtp_entitlement_keeps_its_lead() -> None:
    """C5.6, C9.2: Main stops at the budget, MTP K - 1 tokens behind it."""
    ledger = growing(backend=MTP, max_context=1024)
    sequence = activate(ledger, 64, 448, written={"main": 321, "mtp": 321})
    begin_round(ledger, sequence)

    assert (entitled(ledger, sequence), entitled(ledger, sequence, "mtp")) == (8, 9)
    assert list(ledger.growth.full_pages["mtp"]) == [9, 0]


def test_begin_round_is_refused_in_flight_and_for_stale_handles() -> None:
    """C12.2, C10.1: growth happens at round boundaries; a refusal changes nothing."""
    for ledger in (growing(), make_ledger(max_context=4096)):
        sequence = activate(ledger, 64, 4000)
        batch = ledger.batch([sequence])
        unit, _ = begin(ledger, sequence, 321 - 60)

        with refused(UnitInFlight, "C12.2", ledger):
            ledger.begin_round(batch)
        ledger.commit_unit(unit)
        ledger.finish(sequence)
        with refused(StaleHandle, "C10.1", ledger):
            ledger.begin_round(batch)
        with refused(StaleHandle, "C10.1", ledger):
            ledger.covered_columns(batch, "main")
        with refused(MisuseError, "C11.3", ledger):
            ledger.begin_round([sequence])  # type: ignore[arg-type]


def test_without_the_flag_nothing_grows() -> None:
    """C9.2: off by default; the whole budget is reserved and a round changes nothing."""
    ledger = make_ledger(max_context=4096)
    sequence = activate(ledger, 64, 4000, written=4064)

    before = snapshot(ledger)
    assert begin_round(ledger, sequence) == []
    assert_unchanged(before, ledger)
    assert covered(ledger, [sequence]) == [32]
    with refused(MisuseError, "C3.3", ledger):
        ledger.covered_columns(ledger.batch([sequence]), "mtp")


@pytest.mark.parametrize("end", ["finish", "retain", "abort", "abort in flight"])
def test_an_ended_row_leaves_nothing_to_the_next(end: str) -> None:
    """C9.8: neither full pages, nor a threshold, nor the mark of a short row."""
    ledger = growing(tokens=4096)
    columns = ("full_pages", "grow_at", "round_frontier", "short")
    fresh = [snapshot(getattr(ledger.growth, name)) for name in columns]
    sequence = activate(ledger, 64, 4000)
    blocker = activate(ledger, 4096 - 7 * 64)
    write(ledger, sequence, 321)
    assert begin_round(ledger, sequence) == [sequence]
    assert ledger.growth.short[sequence.row]
    ledger.finish(blocker)

    if end == "abort in flight":
        unit, _ = begin(ledger, sequence, 1)
        assert ledger.abort(sequence) is False
        ledger.commit_unit(unit)
    elif end == "abort":
        ledger.abort(sequence)
    else:
        ledger.finish(sequence, retain=end == "retain", state="state" if end == "retain" else None)

    assert [snapshot(getattr(ledger.growth, name)) for name in columns] == fresh


# ---- bounded completion ----------------------------------------------------------------------------


def test_a_row_that_is_not_extended_runs_on_its_cushion_and_ends_covered() -> None:
    """C9.2, C16.17: 321 of 448 tokens at the refusal; it runs to 448 exactly, and a unit beyond is refused."""
    ledger = growing(tokens=4096)
    sequence = activate(ledger, 64, 4000)
    activate(ledger, 4096 - 7 * 64)
    write(ledger, sequence, 321)

    assert begin_round(ledger, sequence) == [sequence]
    assert covered(ledger, [sequence]) == [127]
    assert run_to_the_end(ledger, sequence) == 448
    assert covered(ledger, [sequence]) == [0]
    with refused(EntitlementExceeded, "C9.3", ledger, match="begin a round first"):
        begin(ledger, sequence, 1)


def test_the_cushion_holds_a_forced_span_after_the_last_extension() -> None:
    """C9.2: a launch to one token behind the threshold, a forced span, and the next launch: all covered."""
    ledger = growing(tokens=4096, columns=16, forced=300)
    sequence = activate(ledger, 64, 4000, written=320)
    activate(ledger, 4096 - entitled(ledger, sequence) * 64)

    assert begin_round(ledger, sequence) == []
    write(ledger, sequence, 16)
    assert begin_round(ledger, sequence) == [sequence]
    write(ledger, sequence, 300)
    check_ledger(ledger)
    assert covered(ledger, [sequence], forced=True) == [68]
    assert covered(ledger, [sequence]) == [0]


@pytest.mark.parametrize("backend", [None, MTP])
@pytest.mark.parametrize("forced", [1, 60, 64, 300])
def test_no_short_round_is_without_room_for_the_forced_span(forced: int, backend: Backend | None) -> None:
    """C9.2: of 288 short rows each ends by one comparison, and the forced span is written then."""
    without_room = []
    for window, columns, free, pool in itertools.product((64, 100, 256), (3, 4, 7, 16), (0, 2), ("main", "mtp")):
        if pool == "mtp" and backend is None:
            continue
        ledger = growing(tokens=4096, window=window, columns=columns, forced=forced, backend=backend)
        sequence = activate(ledger, 64, 4000)
        spaces = ledger.active[pool]
        spaces.pool.try_reserve(taken := spaces.pool.available - free)
        write(ledger, sequence, dict.fromkeys(ledger.active, 64 + window - 1))
        while True:
            short = begin_round(ledger, sequence)
            if min(covered(ledger, [sequence], name)[0] for name in ledger.active) < columns:
                break
            write(ledger, sequence, dict.fromkeys(ledger.active, columns))
        assert short == [sequence]
        check_ledger_but_reserved(ledger, pool, taken)
        try:
            write(ledger, sequence, dict.fromkeys(ledger.active, forced))
        except EntitlementExceeded:
            without_room.append((window, columns, free, pool))
        check_ledger_but_reserved(ledger, pool, taken)
        spaces.pool.shrink(taken)

    assert without_room == []


def check_ledger_but_reserved(ledger: Ledger, pool: str, pages: int) -> None:
    """Check every invariant while a test holds pages of a pool."""
    counters = ledger.active[pool].pool
    counters.shrink(pages)
    check_ledger(ledger)
    assert counters.try_reserve(pages)


def test_a_round_refills_the_cushion_after_a_forced_span() -> None:
    """C9.2: by as many rungs as that takes, so the next forced span is covered too; else the row is short."""
    ledger = growing(tokens=4096, window=64, forced=300)
    sequence = activate(ledger, 64, 4000, written=128)
    write(ledger, sequence, 300)

    assert begin_round(ledger, sequence) == []
    assert entitled(ledger, sequence) == 13  # 428 tokens are in 7 pages, and the cushion has 6
    write(ledger, sequence, 300)
    activate(ledger, (64 - 13 - 1) * 64)
    assert begin_round(ledger, sequence) == [sequence]
    assert (entitled(ledger, sequence), covered(ledger, [sequence], forced=True)) == (14, [168])
    assert covered(ledger, [sequence]) == [0]
    check_ledger(ledger)


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize(("prompt", "output", "written", "whole", "left"), [
    (100, 28, 0, 128, 78), (100, 28, 78, 50, 0), (100, 28, 79, 49, 0), (100, 100, 100, 100, 50),  # 200 is S
])
def test_covered_columns_leave_room_for_one_forced_span(
    grows: bool, prompt: int, output: int, written: int, whole: int, left: int
) -> None:
    """C9.2, C11.2: with and without growth, at the end of the budget and of S, in each pool; never below 0."""
    config = replace(make_config(max_context=200, backend=MTP), kv_lease_growth=grows, forced_span_tokens=50)
    ledger = make_ledger(config)
    sequence = activate(ledger, prompt, output, written={"main": written})
    mtp = ledger.active["mtp"].entitlement_pages(sequence.row) * 64

    assert covered(ledger, [sequence], forced=True) == [whole]
    assert covered(ledger, [sequence]) == [left]
    assert covered(ledger, [sequence], "mtp") == [min(mtp, 200) - 50]
    with refused(MisuseError, "C9.2", ledger):
        ledger.covered_columns(ledger.batch([sequence]), "main", 50)  # type: ignore[arg-type]


@pytest.mark.parametrize("retains", [False, True])
def test_a_short_row_grows_again_when_pages_come_back(retains: bool) -> None:
    """C9.2, 60: each boundary asks anew, after a finish as after the release of a retained prefix."""
    ledger = growing(tokens=4096)
    sequence, blocker = activate(ledger, 64, 4000), activate(ledger, 57 * 64)
    write(ledger, sequence, 321)
    write(ledger, blocker, 57 * 64)
    kept = ledger.finish(blocker, retain=True, state="state") if retains else None
    assert begin_round(ledger, sequence) == [sequence]
    if kept is None:
        ledger.finish(blocker)
    else:
        ledger.release(kept)

    assert begin_round(ledger, sequence) == []
    assert (entitled(ledger, sequence), bool(ledger.growth.short.any())) == (11, False)


def test_59_a_long_budget_in_a_tight_pool_ends_with_what_it_covers() -> None:
    """59: 20,000 tokens of output, admitted with growth only; it ends where the pool ends, without an exception."""
    for ledger, is_admitted in ((make_ledger(max_context=20_480, tokens=20_480), False),
                                 (growing(max_context=20_480, tokens=20_480, window=4096), True)):
        activate(ledger, 200 * 64)
        assert ledger.transactions.explain(ActivationTarget(100, 20_000)).__class__ is (
            ActivationPlan if is_admitted else Refusal
        )
    sequence = activate(ledger, 100, 20_000)

    assert run_to_the_end(ledger, sequence, columns=16) == 120 * 64
    assert counts(ledger)[2] == 0


def test_60_two_lanes_share_what_is_left() -> None:
    """60: two lanes extend in turn; the total never exceeds capacity, and together they use every page."""
    ledger = growing(max_context=4096, tokens=4096)
    lanes = [activate(ledger, 64, 4000) for _ in range(2)]
    extended = [0, 0]
    running = list(lanes)
    while running:
        held = [entitled(ledger, lane) for lane in lanes]
        begin_round(ledger, *running)
        extended = [count + (entitled(ledger, lane) > before)
                    for count, lane, before in zip(extended, lanes, held, strict=True)]
        assert sum(entitled(ledger, lane) for lane in lanes) <= 64
        columns = covered(ledger, running)
        running = [lane for lane, count in zip(running, columns, strict=True) if count]
        if running:
            write(ledger, running, 1)
        check_ledger(ledger)

    assert sum(frontier(ledger, lane) for lane in lanes) == 4096
    assert counts(ledger) == (64, 0, 0)
    assert min(extended) >= 6


# ---- the check -------------------------------------------------------------------------------------


def test_a_row_whose_round_is_to_come_breaks_no_law() -> None:
    """C16.17: the law is of round boundaries; a chunk of 100 columns within the lease needs none before."""
    ledger = growing()
    sequence = activate(ledger, 64, 4000, written=348)
    write(ledger, sequence, 100)

    check_ledger(ledger)
    assert begin_round(ledger, sequence) == []
