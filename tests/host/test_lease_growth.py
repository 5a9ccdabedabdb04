"""Lease growth: what is admitted, when it grows, and how it ends where nothing is left.  (C9.2, C16.10, C16.17)"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from pagedkv.errors import ConfigError, EntitlementExceeded, MisuseError, StaleHandle, UnitInFlight
from pagedkv.ledger.activation import ActivationPlan, ActivationTarget, Refusal
from pagedkv.ledger.check import check_ledgers
from pagedkv.ledger.continuations import Continuation
from pagedkv.ledger.growth import NEVER
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
    make_config,
    make_ledgers,
    refuse,
    refused,
    snapshot,
    write,
)


def growing(
    *, max_context: int = 4096, max_concurrency: int = 2, tokens: int | None = None, backend: Backend | None = None,
    window: int = 256, forced: int = 0, columns: int | None = None,
) -> StoreLedgers:
    """Return the ledgers of a store with lease growth."""
    config = make_config(max_context=max_context, max_concurrency=max_concurrency, tokens=tokens, backend=backend)
    return StoreLedgers(dataclasses.replace(config, kv_lease_growth=True, lease_window_tokens=window,
                                            forced_span_tokens=forced, decode_columns_max=columns), 1)


def entitled(ledgers: StoreLedgers, sequence: Sequence, pool: str = "main") -> int:
    """Return the entitlement of a sequence in pages."""
    return ledgers.spaces[pool].entitlement_pages(sequence.row)


def covered(ledgers: StoreLedgers, sequences: list[Sequence], pool: str = "main") -> list[int]:
    """Return the columns that sequences may still write."""
    columns: list[int] = ledgers.covered_columns(ledgers.batch(sequences), pool).tolist()
    return columns


def begin_round(ledgers: StoreLedgers, *sequences: Sequence) -> list[Sequence]:
    """Begin a round of sequences, in this batch order."""
    return ledgers.begin_round(ledgers.batch(list(sequences)))


def run_to_the_end(ledgers: StoreLedgers, sequence: Sequence, *, columns: int = 1) -> int:
    """Decode until a launch is not covered or the budget is used; return the frontier."""
    budget = int(ledgers.sequences.budget_tokens[sequence.row])
    while frontier(ledgers, sequence) + columns <= budget:
        begin_round(ledgers, sequence)
        if covered(ledgers, [sequence])[0] < columns:
            break
        write(ledgers, sequence, columns)
        check_ledgers(ledgers)
    return frontier(ledgers, sequence)


# ---- admission -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "output", "pages"),
    [
        (1, 4000, 5 + 2),  # 1 + 256 tokens, and a cushion of pages(1) + 1
        (64, 4000, 5 + 2),
        (65, 4000, 6 + 2),
        (64, 256, 5),  # the whole budget is less than window and cushion
        (64, 320, 6),
        (64, 384, 7),
        (64, 448, 7),
        (4000, 96, 64),  # never beyond L
    ],
)
def test_an_activation_reserves_prompt_window_and_cushion(prompt: int, output: int, pages: int) -> None:
    """C9.2: min(full, pages(prompt + min(output, window)) + cushion)."""
    ledgers = growing()
    target = ActivationTarget(prompt, output)
    plan = ledgers.explain(target)
    assert isinstance(plan, ActivationPlan)

    sequence = activate(ledgers, prompt, output)

    assert entitled(ledgers, sequence) == pages == dict(plan.entitlement_pages)["main"]
    assert counts(ledgers) == (0, pages, 128 - pages)
    check_ledgers(ledgers)


@pytest.mark.parametrize(("columns", "forced", "cushion"), [(1, 0, 2), (16, 0, 2), (16, 48, 2), (16, 49, 3),
                                                            (1, 300, 6)])
def test_the_cushion_holds_the_widest_launch_and_a_forced_span(columns: int, forced: int, cushion: int) -> None:
    """C9.2: pages(W_max + forced_span_tokens) + 1."""
    ledgers = growing(columns=columns, forced=forced)

    assert ledgers.growth.cushion_pages == cushion
    assert entitled(ledgers, activate(ledgers, 64, 4000)) == 5 + cushion


def test_w_max_follows_the_draft_window() -> None:
    """C9.2: without decode_columns_max a verify of K + 1 columns is the widest launch."""
    ledgers = growing(backend=MTPBackend(15), forced=49)

    assert ledgers.growth.cushion_pages == 3


def test_a_budget_beyond_the_window_stays_available_to_others() -> None:
    """C9.2, C16.10: the same target is refused without growth, with the numbers of the whole budget."""
    whole, partly = make_ledgers(max_context=4096, tokens=4096), growing(tokens=4096)
    for ledgers in (whole, partly):
        activate(ledgers, 1024)

    assert refuse(whole, 64, 4000) == Refusal("main", 64, 48, forever=False)
    assert entitled(partly, activate(partly, 64, 4000)) == 7
    check_ledgers(partly)


def test_refusals_name_the_smaller_entitlement() -> None:
    """C10.9: explain and try_activate count window and cushion; more than S together is never honoured."""
    ledgers = growing(tokens=4096)
    activate(ledgers, 4096 - 6 * 64)

    assert refuse(ledgers, 64, 4000) == Refusal("main", 7, 6, forever=False)
    assert refuse(ledgers, 100, 4000) == Refusal("main", 65, 64, forever=True, reason="context")


def test_a_fork_reserves_what_its_source_lacks_of_the_window() -> None:
    """C9.1, C9.2: shared pages count in the entitlement, the window begins behind source and prompt."""
    ledgers = growing()
    first = activate(ledgers, 130, 4000 - 130)
    write(ledgers, first, 130)
    source = ledgers.finish(first, retain=True, state="state")
    assert counts(ledgers) == (3, 0, 125)

    fork = ledgers.try_activate(ActivationTarget(62, 3000, source))
    assert isinstance(fork, Sequence)

    assert entitled(ledgers, fork) == 3 + 4 + 2
    assert counts(ledgers) == (4, 6, 118)  # two shared, one copied
    check_ledgers(ledgers)


# ---- growth ----------------------------------------------------------------------------------------


def test_a_row_grows_by_a_window_when_it_reaches_its_cushion() -> None:
    """C9.2, C16.10: not at the frontier where the cushion begins, but one token behind it."""
    ledgers = growing()
    sequence = activate(ledgers, 64, 4000)
    write(ledgers, sequence, 320)

    before = snapshot(ledgers.spaces)
    assert begin_round(ledgers, sequence) == []
    assert_unchanged(before, ledgers.spaces)
    write(ledgers, sequence, 1)
    assert begin_round(ledgers, sequence) == []
    assert entitled(ledgers, sequence) == 7 + 4
    assert begin_round(ledgers, sequence) == []
    assert entitled(ledgers, sequence) == 7 + 4
    check_ledgers(ledgers)


def test_growth_stops_at_the_budget() -> None:
    """C9.2: prompt and output, not a page more; a full row never asks again."""
    ledgers = growing()
    sequence = activate(ledgers, 64, 500)

    assert run_to_the_end(ledgers, sequence) == 564
    assert entitled(ledgers, sequence) == 9
    assert ledgers.growth.grow_at["main"][sequence.row] == NEVER
    assert counts(ledgers) == (9, 0, 119)


@pytest.mark.parametrize(("free", "gained"), [(5, 4), (4, 4), (3, 2), (2, 2), (1, 1), (0, 0)])
def test_the_ladder_takes_the_first_rung_that_fits(free: int, gained: int) -> None:
    """C9.2: a window of 256 tokens, 128, then 64."""
    ledgers = growing(tokens=4096)
    sequence = activate(ledgers, 64, 4000)
    write(ledgers, sequence, 321)
    activate(ledgers, 4096 - 7 * 64 - free * 64)

    assert begin_round(ledgers, sequence) == ([] if gained else [sequence])
    assert entitled(ledgers, sequence) == 7 + gained
    check_ledgers(ledgers)


def test_no_rung_is_larger_than_the_window() -> None:
    """C9.2: with a window of 64 tokens a row grows by one page."""
    ledgers = growing(window=64)
    sequence = activate(ledgers, 64, 4000)
    write(ledgers, sequence, 129)

    assert ledgers.growth.ladder_pages == (1,)
    begin_round(ledgers, sequence)
    assert entitled(ledgers, sequence) == 4 + 1


def test_a_row_that_is_not_in_the_batch_does_not_grow() -> None:
    """C9.2: a round is of its batch; the answer keeps batch order."""
    ledgers = growing(max_concurrency=3, tokens=4096)
    first, second, third = (activate(ledgers, 64, 4000) for _ in range(3))
    write(ledgers, [first, second, third], 321)

    assert begin_round(ledgers, second) == []
    assert [entitled(ledgers, sequence) for sequence in (first, second, third)] == [7, 11, 7]
    ledgers.spaces["main"].pool.try_reserve(counts(ledgers)[2])
    assert begin_round(ledgers, third, second, first) == [third, first]


@pytest.mark.parametrize("backend", [MTPBackend(5), DraftFullBackend(DRAFT_GEOMETRY)])
def test_pools_grow_together_or_not_at_all(backend: Backend) -> None:
    """C6.3, C9.2: where only the backend lacks pages, Main does not grow either."""
    ledgers = growing(backend=backend, tokens=4096)
    backend_pool = list(ledgers.spaces)[1]
    sequence = activate(ledgers, 64, 3000)
    write(ledgers, sequence, {"main": 321, backend_pool: 300})
    hog = ledgers.spaces[backend_pool].pool
    taken = hog.available
    hog.try_reserve(taken)

    before = snapshot(ledgers.spaces)
    assert begin_round(ledgers, sequence) == [sequence]
    assert_unchanged(before, ledgers.spaces)
    hog.shrink(4)
    assert begin_round(ledgers, sequence) == []
    assert (entitled(ledgers, sequence), entitled(ledgers, sequence, backend_pool)) == (11, 11)
    hog.shrink(taken - 4)
    check_ledgers(ledgers)


def test_a_lead_makes_a_row_thin_too() -> None:
    """C9.2, C13.1: the MTP frontier may reach its cushion first; then both pools grow."""
    ledgers = growing(backend=MTPBackend(5))
    sequence = activate(ledgers, 64, 3000)
    write(ledgers, sequence, {"main": 318, "mtp": 321})

    begin_round(ledgers, sequence)

    assert (entitled(ledgers, sequence), entitled(ledgers, sequence, "mtp")) == (11, 11)
    check_ledgers(ledgers)


def test_each_row_grows_for_its_own_pool() -> None:
    """C9.2: of two rows one is thin in Main alone, the other in MTP too; both grow."""
    ledgers = growing(backend=MTPBackend(5))
    lagging, leading = activate(ledgers, 64, 3000), activate(ledgers, 64, 3000)
    write(ledgers, [lagging, leading], {"main": [321, 318], "mtp": [0, 321]})

    assert begin_round(ledgers, lagging, leading) == []
    assert [entitled(ledgers, row, pool) for row in (lagging, leading) for pool in ("main", "mtp")] == [11] * 4
    check_ledgers(ledgers)


def test_the_full_mtp_entitlement_keeps_its_lead() -> None:
    """C5.6, C9.2: Main stops at the budget, MTP K - 1 tokens behind it."""
    ledgers = growing(backend=MTPBackend(5), max_context=1024)
    sequence = activate(ledgers, 64, 448)
    write(ledgers, sequence, {"main": 321, "mtp": 321})
    begin_round(ledgers, sequence)

    assert (entitled(ledgers, sequence), entitled(ledgers, sequence, "mtp")) == (8, 9)
    assert list(ledgers.growth.full_pages["mtp"]) == [9, 0]


def test_begin_round_is_refused_in_flight_and_for_stale_handles() -> None:
    """C12.2, C10.1: growth happens at round boundaries; a refusal changes nothing."""
    for ledgers in (growing(), make_ledgers(max_context=4096)):
        sequence = activate(ledgers, 64, 4000)
        batch = ledgers.batch([sequence])
        unit, _ = begin(ledgers, sequence, 321 - 60)

        with refused(UnitInFlight, "C12.2", ledgers):
            ledgers.begin_round(batch)
        ledgers.commit_unit(unit)
        ledgers.finish(sequence)
        with refused(StaleHandle, "C10.1", ledgers):
            ledgers.begin_round(batch)
        with refused(StaleHandle, "C10.1", ledgers):
            ledgers.covered_columns(batch, "main")
        with refused(MisuseError, "C11.3", ledgers):
            ledgers.begin_round([sequence])  # type: ignore[arg-type]


def test_without_the_flag_nothing_grows() -> None:
    """C9.2: off by default; the whole budget is reserved and a round changes nothing."""
    ledgers = make_ledgers(max_context=4096)
    sequence = activate(ledgers, 64, 4000)
    write(ledgers, sequence, 4064)

    before = snapshot(ledgers)
    assert begin_round(ledgers, sequence) == []
    assert_unchanged(before, ledgers)
    assert covered(ledgers, [sequence]) == [32]
    with refused(MisuseError, "C3.3", ledgers):
        ledgers.covered_columns(ledgers.batch([sequence]), "mtp")


@pytest.mark.parametrize("end", ["finish", "retain", "abort", "abort in flight"])
def test_an_ended_row_leaves_nothing_to_the_next(end: str) -> None:
    """C9.8: neither full pages, nor a threshold, nor the mark of a short row."""
    ledgers = growing(tokens=4096)
    columns = ("full_pages", "grow_at", "round_frontier", "short")
    fresh = [snapshot(getattr(ledgers.growth, name)) for name in columns]
    sequence = activate(ledgers, 64, 4000)
    blocker = activate(ledgers, 4096 - 7 * 64)
    write(ledgers, sequence, 321)
    assert begin_round(ledgers, sequence) == [sequence]
    assert ledgers.growth.short[sequence.row]
    ledgers.finish(blocker)

    if end == "abort in flight":
        unit, _ = begin(ledgers, sequence, 1)
        assert ledgers.abort(sequence) is False
        ledgers.commit_unit(unit)
    elif end == "abort":
        ledgers.abort(sequence)
    else:
        ledgers.finish(sequence, retain=end == "retain", state="state" if end == "retain" else None)

    assert [snapshot(getattr(ledgers.growth, name)) for name in columns] == fresh
    check_ledgers(ledgers)


# ---- bounded completion ----------------------------------------------------------------------------


def test_a_row_that_is_not_extended_runs_on_its_cushion_and_ends_covered() -> None:
    """C9.2, C16.17: 321 of 448 tokens at the refusal; it runs to 448 exactly, and a unit beyond is refused."""
    ledgers = growing(tokens=4096)
    sequence = activate(ledgers, 64, 4000)
    activate(ledgers, 4096 - 7 * 64)
    write(ledgers, sequence, 321)

    assert begin_round(ledgers, sequence) == [sequence]
    assert covered(ledgers, [sequence]) == [127]
    assert run_to_the_end(ledgers, sequence) == 448
    assert covered(ledgers, [sequence]) == [0]
    with refused(EntitlementExceeded, "C9.3", ledgers, match="begin a round first"):
        begin(ledgers, sequence, 1)
    check_ledgers(ledgers)


def test_the_cushion_holds_a_forced_span_after_the_last_extension() -> None:
    """C9.2: a launch to one token behind the threshold, a forced span, and the next launch: all covered."""
    ledgers = growing(tokens=4096, columns=16, forced=300)
    sequence = activate(ledgers, 64, 4000)
    write(ledgers, sequence, 320)
    activate(ledgers, 4096 - entitled(ledgers, sequence) * 64)

    assert begin_round(ledgers, sequence) == []
    write(ledgers, sequence, 16)
    assert begin_round(ledgers, sequence) == [sequence]
    write(ledgers, sequence, 300)
    check_ledgers(ledgers)
    assert covered(ledgers, [sequence])[0] >= 16


def test_a_short_row_grows_again_when_pages_come_back() -> None:
    """C9.2: bounded completion is the end of the pool, not of the row; each boundary asks anew."""
    ledgers = growing(tokens=4096)
    sequence = activate(ledgers, 64, 4000)
    blocker = activate(ledgers, 4096 - 7 * 64)
    write(ledgers, sequence, 321)
    assert begin_round(ledgers, sequence) == [sequence]
    ledgers.finish(blocker)

    assert begin_round(ledgers, sequence) == []
    assert (entitled(ledgers, sequence), bool(ledgers.growth.short.any())) == (11, False)
    check_ledgers(ledgers)


def test_a_released_continuation_is_what_a_row_grows_on() -> None:
    """60, C9.2: budget beyond the window serves retained prefixes; releasing one lets the row go on."""
    ledgers = growing(tokens=4096)
    sequence, other = activate(ledgers, 64, 4000), activate(ledgers, 57 * 64)
    write(ledgers, other, 57 * 64)
    kept = ledgers.finish(other, retain=True, state="state")
    assert isinstance(kept, Continuation)
    write(ledgers, sequence, 321)

    assert begin_round(ledgers, sequence) == [sequence]
    ledgers.release(kept)
    assert begin_round(ledgers, sequence) == []
    check_ledgers(ledgers)


def test_59_a_long_budget_in_a_tight_pool_ends_with_what_it_covers() -> None:
    """59: 20,000 tokens of output, admitted with growth only; it ends where the pool ends, without an exception."""
    for ledgers, is_admitted in ((make_ledgers(max_context=20_480, tokens=20_480), False),
                                 (growing(max_context=20_480, tokens=20_480, window=4096), True)):
        activate(ledgers, 200 * 64)
        assert ledgers.activations.explain(ActivationTarget(100, 20_000)).__class__ is (
            ActivationPlan if is_admitted else Refusal
        )
    sequence = activate(ledgers, 100, 20_000)

    assert run_to_the_end(ledgers, sequence, columns=16) == 120 * 64
    assert counts(ledgers)[2] == 0


def test_60_two_lanes_share_what_is_left() -> None:
    """60: two lanes extend in turn; the total never exceeds capacity, and together they use every page."""
    ledgers = growing(max_context=4096, tokens=4096)
    lanes = [activate(ledgers, 64, 4000) for _ in range(2)]
    extended = [0, 0]
    running = list(lanes)
    while running:
        held = [entitled(ledgers, lane) for lane in lanes]
        begin_round(ledgers, *running)
        extended = [count + (entitled(ledgers, lane) > before)
                    for count, lane, before in zip(extended, lanes, held, strict=True)]
        assert sum(entitled(ledgers, lane) for lane in lanes) <= 64
        columns = covered(ledgers, running)
        running = [lane for lane, count in zip(running, columns, strict=True) if count]
        if running:
            write(ledgers, running, 1)
        check_ledgers(ledgers)

    assert sum(frontier(ledgers, lane) for lane in lanes) == 4096
    assert counts(ledgers) == (64, 0, 0)
    assert min(extended) >= 6


@pytest.mark.parametrize(
    "options",
    [{"kv_lease_growth": 1}, {"lease_window_tokens": 0}, {"lease_window_tokens": 1.5}, {"forced_span_tokens": -1},
     {"forced_span_tokens": True}],
)
def test_a_configuration_of_another_form_is_refused(options: dict[str, object]) -> None:
    """C9.2: flags are booleans, windows at least one token, spans at least none."""
    with pytest.raises(ConfigError) as refusal:
        dataclasses.replace(make_config(), **options)  # type: ignore[arg-type]

    assert refusal.value.clause == "C9.2"


# ---- the check -------------------------------------------------------------------------------------


def one_short_row() -> StoreLedgers:
    """Row 0 is at 436 of 448 tokens and was not extended: less than a launch of 16; row 1 is full, row 2 idle."""
    ledgers = growing(max_concurrency=3, tokens=4096, columns=16)
    sequence = activate(ledgers, 64, 4000)
    activate(ledgers, 4096 - 7 * 64)
    write(ledgers, sequence, 436)
    assert begin_round(ledgers, sequence) == [sequence]
    check_ledgers(ledgers)
    return ledgers


def a_short_row_is_not_marked(ledgers: StoreLedgers) -> None:
    ledgers.growth.short[0] = False


def an_idle_row_is_short(ledgers: StoreLedgers) -> None:
    ledgers.growth.short[2] = True


def a_threshold_is_a_page_late(ledgers: StoreLedgers) -> None:
    ledgers.growth.grow_at["main"][0] += 64


def a_full_row_is_asked(ledgers: StoreLedgers) -> None:
    ledgers.growth.grow_at["main"][1] = 0


def a_limit_is_beyond_the_budget(ledgers: StoreLedgers) -> None:
    ledgers.growth.full_pages["main"][1] -= 1


@pytest.mark.parametrize(
    ("message", "corrupt"),
    [("not covered", a_short_row_is_not_marked), ("idle row is short", an_idle_row_is_short),
     ("rows grow at", a_threshold_is_a_page_late), ("rows grow at", a_full_row_is_asked),
     ("beyond", a_limit_is_beyond_the_budget)],
)
def test_a_broken_law_of_growth_is_seen(message: str, corrupt: Callable[[StoreLedgers], None]) -> None:
    """C16.17: each column that decides about cover, broken by itself."""
    ledgers = one_short_row()
    corrupt(ledgers)

    with pytest.raises(AssertionError, match=message):
        check_ledgers(ledgers)


def test_a_row_whose_round_is_to_come_breaks_no_law() -> None:
    """C16.17: the law is of round boundaries; a chunk of 100 columns within the lease needs none before."""
    ledgers = growing()
    sequence = activate(ledgers, 64, 4000)
    write(ledgers, sequence, 348)
    write(ledgers, sequence, 100)

    check_ledgers(ledgers)
    assert begin_round(ledgers, sequence) == []
    check_ledgers(ledgers)
