"""What a unit in flight freezes, and how it ends.  (C9.5, C12)"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import EntitlementExceeded, MisuseError, StaleHandle, UnitInFlight
from pagedkv.ledger import active_spaces
from pagedkv.ledger.check import check_ledger
from pagedkv.ledger.ledger import Ledger
from pagedkv.ledger.sequences import Sequence
from pagedkv.values.config import MTPBackend
from tests.host.builders import activate, begin, counts, frontier, make_ledger, mapped, trim, write
from tests.host.refusals import refused


def several(count: int = 1, *, tokens: int = 200, **options: object) -> tuple[Ledger, list[Sequence]]:
    """Return a ledger with sequences of 200 tokens; options as of `make_ledger`."""
    ledger = make_ledger(**options)  # type: ignore[arg-type]
    return ledger, [activate(ledger, tokens) for _ in range(count)]


# ---- frozen rows ---------------------------------------------------------------------------------------------


def test_rows_are_bits_of_one_integer() -> None:
    """Any number of rows, in any order.  (C12.1)"""
    ledger, sequences = several(70, tokens=1, max_context=64, max_concurrency=70)

    assert ledger.batch([sequences[69], sequences[0], sequences[3]]).rows_mask == 1 << 69 | 0b1001
    unit, _ = begin(ledger, [sequences[69]], 1)
    assert ledger.units.rows_in_flight == 1 << 69
    with refused(UnitInFlight, "C12.2", ledger, match="row 69"):
        ledger.finish(sequences[69])
    ledger.finish(sequences[0])
    ledger.commit_unit(unit, {"main": 1})


def test_a_row_in_flight_refuses_every_change_and_names_row_and_unit() -> None:
    """finish, trim, truncate and another unit, until completion; a unit without columns freezes too.  (C12.1, C12.2)"""
    ledger, sequences = several(2)
    write(ledger, sequences, 70)
    both = ledger.batch(sequences)
    for columns in (1, 0):
        unit, slices = ledger.begin_unit("decode", ledger.batch(sequences[:1]), {"main": columns})
        assert slices == {}
        with refused(UnitInFlight, "C12.2", ledger, match=f"finish of row 0 .* unit {unit.label} uses;") as caught:
            ledger.finish(sequences[0])
        assert caught.value.fields == {"row": 0, "unit": unit.label}
        with refused(UnitInFlight, "C12.2", ledger, match="trim of row 0 of pool main"):
            ledger.trim(both, "main")
        with refused(UnitInFlight, "C12.2", ledger, match="truncate of row 0 of pool main"):
            ledger.truncate(sequences[0], 5, "main")
        with refused(UnitInFlight, "C12.2", ledger, match="a unit of row 0"):
            ledger.begin_unit("prefill", both, {"main": 1})
        ledger.commit_unit(unit, {"main": columns})
    assert frontier(ledger, sequences[0]) == 71
    ledger.truncate(sequences[0], 5, "main")
    ledger.finish(sequences[0])


def test_a_refusal_names_the_unit_of_its_first_row() -> None:
    """Two units in flight, the later one on row 0: each row names its own, a batch of both names row 0.  (C12.2)"""
    ledger, sequences = several(2)
    units = [ledger.begin_unit(name, ledger.batch([sequence]), {"main": 1})[0]
             for name, sequence in zip("ab", reversed(sequences), strict=True)]

    with refused(UnitInFlight, "C12.2", ledger, match="row 1 .* unit a#1"):
        ledger.finish(sequences[1])
    with refused(UnitInFlight, "C12.2", ledger, match="row 0 .* unit b#2") as caught:
        begin(ledger, sequences, 1)
    assert caught.value.fields == {"row": 0, "unit": "b#2"}
    ledger.fail_unit(units[1])
    ledger.finish(sequences[0])
    with refused(UnitInFlight, "C12.2", ledger, match="row 1 .* unit a#1"):
        ledger.finish(sequences[1])


def test_rows_outside_the_unit_are_free_to_change() -> None:
    """Only selected rows are frozen.  (C12.1)"""
    ledger, sequences = several(3, max_concurrency=3)
    write(ledger, sequences, 130)
    unit, _ = begin(ledger, sequences[0], 1)

    ledger.truncate(sequences[1], 3, "main")
    ledger.finish(sequences[2])
    write(ledger, sequences[1], 1)
    ledger.commit_unit(unit, {"main": 1})

    assert (frontier(ledger, sequences[0]), frontier(ledger, sequences[1])) == (131, 4)


def test_a_refused_unit_freezes_nothing() -> None:
    """No pool, or beyond the entitlement: the row can be finished at once, and numbers have no hole.  (C9.3, C9.4)"""
    ledger, (sequence,) = several(tokens=100)

    with refused(MisuseError, "C9.4", ledger):
        begin(ledger, sequence, {})
    with refused(EntitlementExceeded, "C9.3", ledger):
        begin(ledger, sequence, 129)
    unit, _ = begin(ledger, sequence, 1)
    assert unit.label == "step#1"
    ledger.fail_unit(unit)
    ledger.finish(sequence)


# ---- what a unit shows ---------------------------------------------------------------------------------------


def test_a_unit_knows_where_its_rows_started() -> None:
    """First positions are the frontiers at its start, per pool, in batch order; they do not move.  (C12.1)"""
    ledger, sequences = several(2, backend=MTPBackend(5))
    write(ledger, sequences, {"main": [70, 3], "mtp": [9, 0]})
    unit, _ = begin(ledger, sequences[::-1], {"main": [1, 2], "mtp": 5})

    assert unit.first_positions["main"].tolist() == [3, 70]
    assert unit.first_positions["mtp"].tolist() == [0, 9]
    assert unit.columns["mtp"].tolist() == [5, 5]
    ledger.commit_unit(unit, {"main": [1, 2]})
    assert unit.first_positions["main"].tolist() == [3, 70]


def test_columns_of_a_unit_are_a_copy_and_read_only() -> None:
    """The caller's array may change later; the array that units of a batch share may not.  (C12.1)"""
    ledger, (sequence,) = several()
    batch = ledger.batch([sequence])
    columns = ledger.active["main"].committed_end[:1] + 5
    unit, _ = ledger.begin_unit("step", batch, {"main": columns})
    columns[0] = 100
    assert unit.columns["main"].tolist() == [5]
    ledger.commit_unit(unit)
    for _ in range(2):
        unit, _ = ledger.begin_unit("step", batch, {"main": 5})
        with pytest.raises(ValueError, match="read-only"):
            unit.columns["main"][0] = 100
        ledger.commit_unit(unit)
    assert frontier(ledger, sequence) == 15


def test_prefill_widths_are_not_kept_by_a_batch() -> None:
    """A batch keeps prebuilt counts of decode widths only, so it does not grow with prompts."""
    ledger, (sequence,) = several()
    batch = ledger.batch([sequence])
    for columns in (1, 16, 17, 40):
        ledger.commit_unit(ledger.begin_unit("unit", batch, {"main": columns})[0])

    assert sorted(batch.by_width) == [1, 16]


# ---- commit and fail -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pools", [["main"], ["main", "mtp"]])
def test_a_commit_without_counts_accepts_everything(pools: list[str]) -> None:
    """Every column of every pool that the unit wrote, and of no other.  (C9.5, C13.1)"""
    ledger, sequences = several(2, backend=MTPBackend(5))
    unit, _ = begin(ledger, sequences, {pool: [3, 70] for pool in pools})
    ledger.commit_unit(unit)

    expected = {"main": [3, 70], "mtp": [3, 70] if "mtp" in pools else [0, 0]}
    assert {name: [frontier(ledger, held, name) for held in sequences] for name in ledger.active} == expected


def test_frontiers_advance_at_completion_only() -> None:
    """Mapped when it begins, readable when it is committed; what a failed unit wrote stays invisible.  (C9.5, C12.3)"""
    ledger, (sequence,) = several()
    write(ledger, sequence, 10)
    before = counts(ledger)
    unit, _ = begin(ledger, sequence, 120)
    assert (frontier(ledger, sequence), len(mapped(ledger, sequence))) == (10, 3)
    ledger.fail_unit(unit)
    assert (frontier(ledger, sequence), len(mapped(ledger, sequence))) == (10, 3)
    assert trim(ledger, sequence) == 2
    assert counts(ledger) == before

    unit, _ = begin(ledger, sequence, 60)
    ledger.commit_unit(unit, {"main": 56})
    assert (frontier(ledger, sequence), len(mapped(ledger, sequence)), unit.is_open) == (66, 2, False)


FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list, "tuple": tuple, "int64": np.array, "uint8": lambda counts: np.array(counts, np.uint8),
    "int32": lambda counts: np.array(counts, np.int32),
    "strided": lambda counts: np.repeat(np.array(counts, np.int32), 2)[::2],
    "backward": lambda counts: np.array(counts[::-1], np.int32)[::-1],
}


@pytest.mark.parametrize("order", [[0], [2], [0, 1, 2, 3], [1, 2], [3, 2, 1, 0], [0, 2], [2, 3, 1], [0, 2, 1, 3]],
                         ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_counts_belong_to_the_entries_in_batch_order(form: Callable[[list[int]], Any], order: list[int]) -> None:
    """Rows that are a span or not, in any order; counts in any form; then one number for all.  (C9.5, C11.3, C14.4)"""
    ledger, sequences = several(4, max_concurrency=4)
    batch = ledger.batch([sequences[row] for row in order])
    columns, accepted = [3 + 5 * row for row in order], [1 + 2 * row for row in order]
    unit, _ = ledger.begin_unit("step", batch, {"main": form(columns)})
    assert unit.columns["main"].tolist() == columns
    ledger.commit_unit(unit, {"main": form(accepted)})
    ledger.commit_unit(ledger.begin_unit("step", batch, {"main": 2})[0])
    unit, _ = ledger.begin_unit("step", batch, {"main": 4})
    ledger.commit_unit(unit, {"main": 1})

    assert unit.first_positions["main"].tolist() == [3 + 2 * row for row in order]
    assert [frontier(ledger, sequence) for sequence in sequences] == [
        4 + 2 * row if row in order else 0 for row in range(4)
    ]


@pytest.mark.parametrize("entries", [1, 3])
@pytest.mark.parametrize(("clause", "bad", "dtype"), [
    ("C9.5", -1, np.int32), ("C9.5", 4, np.int32), ("C9.5", 4, np.int64), ("C9.5", 4, object), ("C14.4", -1, np.int64),
    ("C14.4", -1, object), ("C14.4", True, np.bool_), ("C14.4", 2**63, np.uint64), ("C14.4", 1.0, np.float32),
])
def test_a_count_that_is_none_is_refused_in_the_last_entry_too(
    clause: str, bad: object, dtype: type, entries: int
) -> None:
    """Negative, more than was written, or no integer; `object` is a list.  (C9.5, C14.4)"""
    ledger, sequences = several(3, max_concurrency=3)
    unit, _ = begin(ledger, sequences[:entries], 3)
    counts: Any = [True if dtype is np.bool_ else 1] * (entries - 1) + [bad]

    with refused(MisuseError, clause, ledger):
        ledger.commit_unit(unit, {"main": counts if dtype is object else np.array(counts, dtype)})
    ledger.commit_unit(unit, {"main": np.full(entries, 3, np.int32)})


@pytest.mark.parametrize("accepted", [4, [1, 4], [4, 1]])
def test_no_more_is_accepted_than_was_written(accepted: int | list[int]) -> None:
    """Each entry by its own columns, although the page has room.  (C9.5)"""
    ledger, sequences = several(2)
    unit, _ = begin(ledger, sequences, 3)

    with refused(MisuseError, "C9.5", ledger, match=r"0 to \[3, 3\]"):
        ledger.commit_unit(unit, {"main": accepted})
    ledger.commit_unit(unit, {"main": [1, 3]})
    assert [frontier(ledger, sequence) for sequence in sequences] == [1, 3]


def test_a_refused_commit_changes_no_pool_and_keeps_the_unit_in_flight() -> None:
    """The first pool is right, the second is not; a pool that is left out keeps its frontier.  (C9.5, C9.9, C13.1)"""
    ledger, (sequence,) = several(backend=MTPBackend(5))
    unit, _ = begin(ledger, sequence, {"main": 6, "mtp": 5})

    with refused(MisuseError, "C9.5", ledger):
        ledger.commit_unit(unit, {"main": 6, "mtp": 6})
    with refused(MisuseError, "C14.4", ledger):
        ledger.commit_unit(unit, {"main": 6, "mtp": -1})
    assert unit.is_open
    ledger.commit_unit(unit, {"main": 6, "mtp": 5})
    unit, _ = begin(ledger, sequence, {"main": 6})
    with refused(MisuseError, "C9.9", ledger, match=r"one of \['main'\]"):
        ledger.commit_unit(unit, {"main": 1, "mtp": 1})
    ledger.commit_unit(unit, {})
    assert (frontier(ledger, sequence), frontier(ledger, sequence, "mtp")) == (6, 5)


def test_a_unit_ends_exactly_once_and_in_its_own_store() -> None:
    """A second commit or fail, whatever ended it, and a unit of another store are refused.  (C12.3, S35)"""
    ledger, sequences = several(2)
    theirs, (stranger,) = several(store_id=2)
    committed, failed = (begin(ledger, sequence, 3)[0] for sequence in sequences)
    foreign, _ = begin(theirs, stranger, 3)
    ledger.commit_unit(committed, {"main": 3})
    ledger.fail_unit(failed)

    for unit in (committed, failed, foreign):
        with refused(MisuseError, "C12.3", ledger, theirs, match=f"unit {unit.label}"):
            ledger.commit_unit(unit, {"main": 1})
        with refused(MisuseError, "C12.3", ledger, theirs):
            ledger.fail_unit(unit)
    assert [frontier(ledger, sequence) for sequence in sequences] == [3, 0]
    assert foreign.is_open


# ---- abort ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends_by", ["commit", "fail"])
def test_an_abort_in_flight_takes_effect_at_the_boundary(ends_by: str) -> None:
    """Nothing moves before; then pages and row are free, the handle is stale, and the abort is forgotten.  (C12.4)"""
    ledger, sequences = several(2)
    unit, _ = begin(ledger, sequences, 70)
    held = counts(ledger)

    assert ledger.abort(sequences[0]) is False
    assert ledger.abort(sequences[0]) is False, "a second abort changes nothing"
    assert counts(ledger) == held
    with refused(UnitInFlight, "C12.2", ledger):
        ledger.finish(sequences[0])
    if ends_by == "commit":
        ledger.commit_unit(unit, {"main": 70})
    else:
        ledger.fail_unit(unit)

    assert counts(ledger) == (2, 2, 4), "the other sequence of the unit stays"
    with refused(StaleHandle, "C10.1", ledger):
        ledger.abort(sequences[0])
    assert frontier(ledger, sequences[1]) == (70 if ends_by == "commit" else 0)
    again = activate(ledger, 100, written=5)
    assert (again.row, frontier(ledger, again)) == (sequences[0].row, 5)


def test_an_abort_waits_for_the_unit_of_its_own_row() -> None:
    """Another unit that ends first does not end it; at a boundary an abort ends at once, as finish does.  (C12.4)"""
    ledger, sequences = several(2)
    units = [begin(ledger, sequence, 1)[0] for sequence in sequences]
    ledger.abort(sequences[0])

    ledger.commit_unit(units[1], {"main": 1})
    assert len(ledger.sequences.active_rows()) == 2
    ledger.commit_unit(units[0], {"main": 1})
    assert ledger.sequences.active_rows() == [sequences[1].row]
    assert ledger.abort(sequences[1]) is True
    assert counts(ledger) == (0, 0, 8)


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("width", [1, 3, 8])
def test_steps_of_one_batch_map_the_pages_that_they_reach_and_no_others(
    rows: int, width: int, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Windows of three pages; acceptance, trims, pages mapped ahead and cuts at random.  (C6.5, C9.3, C9.6)

    A batch that makes the same step again knows how far its rows are from their next page.
    """
    monkeypatch.setattr(active_spaces, "WINDOW_PAGES", 3)
    rng = random.Random(f"{seed} {rows} {width}")
    ledger = make_ledger(max_context=640, max_concurrency=rows)
    sequences = [activate(ledger, 640) for _ in range(rows)]
    batch, expected, ends = ledger.batch(sequences), [0] * rows, [0] * rows
    for each in range(1, rows):
        write(ledger, sequences[each], 17 * each)
        ends[each], expected[each] = 17 * each, -(-17 * each // 64)
    while max(ends) + width <= 640:
        unit, _ = ledger.begin_unit("step", batch, {"main": width})
        expected = [max(pages, -(-(end + width) // 64)) for pages, end in zip(expected, ends, strict=True)]
        assert [len(mapped(ledger, sequence)) for sequence in sequences] == expected
        accepts_all = rng.random() < 0.7
        counts = [width if accepts_all else rng.randint(0, width) for _ in range(rows)]
        ledger.commit_unit(unit, None if accepts_all else {"main": counts})
        ends = [end + count for end, count in zip(ends, counts, strict=True)]
        if rng.random() < 0.3:
            ledger.trim(batch, "main")
            expected = [-(-end // 64) for end in ends]
        lane = rng.randrange(rows)
        if rng.random() < 0.05:
            tokens = rng.randint(1, 640)
            ledger.ensure_mapped_to_tokens(sequences[lane], tokens, "main")
            expected[lane] = max(expected[lane], -(-tokens // 64))
        if rng.random() < 0.03:
            ends[lane] -= min(ends[lane], rng.randint(0, 9))
            ledger.truncate(sequences[lane], ends[lane], "main")
            expected[lane] = -(-ends[lane] // 64)
        check_ledger(ledger)


def test_no_entry_accepts_what_only_another_one_wrote() -> None:
    """Counts that differ between entries are compared entry by entry.  (C13.1)"""
    ledger, sequences = several(2)
    unit, _ = ledger.begin_unit("step", ledger.batch(sequences), {"main": [2, 5]})
    with refused(MisuseError, "C9.5", ledger, match=r"\[2, 5\]"):
        ledger.commit_unit(unit, {"main": [3, 1]})
    ledger.commit_unit(unit, {"main": [2, 1]})
