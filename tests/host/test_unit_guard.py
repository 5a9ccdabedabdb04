"""What a unit in flight freezes, and how it ends.  (C9.5, C12)"""

from __future__ import annotations

import pytest

from pagedkv.errors import EntitlementExceeded, MisuseError, StaleHandle, UnitInFlight
from pagedkv.ledger.check import check_ledgers
from pagedkv.ledger.units import UnitGuard, rows_mask_of
from pagedkv.values.config import MTPBackend
from tests.host.builders import (
    activate,
    assert_unchanged,
    begin,
    counts,
    frontier,
    make_ledgers,
    mapped,
    refused,
    snapshot,
    trim,
    write,
)


def test_rows_are_bits_of_one_integer() -> None:
    """Any number of rows, in any order.  (C12.1)"""
    ledgers = make_ledgers(max_context=64, max_concurrency=70)
    sequences = [activate(ledgers, 1) for _ in range(70)]

    assert rows_mask_of(ledgers.batch([sequences[69], sequences[0], sequences[3]]).rows) == 1 << 69 | 0b1001
    unit, _ = begin(ledgers, [sequences[69]], 1)
    assert ledgers.guard.rows_in_flight == 1 << 69
    with refused(UnitInFlight, "C12.2", ledgers, match="row 69"):
        ledgers.finish(sequences[69])
    ledgers.finish(sequences[0])
    ledgers.commit_unit(unit, {"main": 1})
    check_ledgers(ledgers)


def test_a_row_in_flight_refuses_every_change_and_names_row_and_unit() -> None:
    """finish, trim, truncate and another unit, until completion.  (C12.1, C12.2, C12.4)"""
    ledgers = make_ledgers()
    sequences = [activate(ledgers, 200) for _ in range(2)]
    write(ledgers, sequences, 70)
    frozen, both = ledgers.batch(sequences[:1]), ledgers.batch(sequences)
    unit, _ = ledgers.begin_unit("decode", frozen, {"main": 1})

    with refused(UnitInFlight, "C12.2", ledgers, match=r"finish of row 0 .* unit decode#2 until") as caught:
        ledgers.finish(sequences[0])
    assert caught.value.fields == {"row": 0, "unit": "decode#2"}
    with refused(UnitInFlight, "C12.2", ledgers, match="trim of row 0 of pool main"):
        ledgers.trim(both, "main")
    with refused(UnitInFlight, "C12.2", ledgers, match="truncate of row 0 of pool main"):
        ledgers.truncate(sequences[0], 5, "main")
    with refused(UnitInFlight, "C12.2", ledgers, match="a unit of row 0"):
        ledgers.begin_unit("prefill", both, {"main": 1})
    check_ledgers(ledgers)
    ledgers.commit_unit(unit, {"main": 1})
    ledgers.truncate(sequences[0], 5, "main")
    ledgers.finish(sequences[0])
    check_ledgers(ledgers)


def test_the_refusal_names_the_unit_of_that_row() -> None:
    """Two units in flight: the second one holds row 1.  (C12.2)"""
    ledgers = make_ledgers()
    sequences = [activate(ledgers, 100) for _ in range(2)]
    units = [
        ledgers.begin_unit(name, ledgers.batch([s]), {"main": 1})[0] for name, s in zip("ab", sequences, strict=True)
    ]

    with refused(UnitInFlight, "C12.2", ledgers, match="row 1 .* unit b#2"):
        ledgers.finish(sequences[1])
    ledgers.fail_unit(units[1])
    ledgers.finish(sequences[1])
    with refused(UnitInFlight, "C12.2", ledgers, match="row 0 .* unit a#1"):
        ledgers.finish(sequences[0])
    check_ledgers(ledgers)


def test_rows_outside_the_unit_are_free_to_change() -> None:
    """Only selected rows are frozen.  (C12.1)"""
    ledgers = make_ledgers(max_concurrency=3)
    sequences = [activate(ledgers, 200) for _ in range(3)]
    write(ledgers, sequences, 130)
    unit, _ = begin(ledgers, sequences[0], 1)

    ledgers.truncate(sequences[1], 3, "main")
    ledgers.finish(sequences[2])
    write(ledgers, sequences[1], 1)
    ledgers.commit_unit(unit, {"main": 1})

    assert (frontier(ledgers, sequences[0]), frontier(ledgers, sequences[1])) == (131, 4)
    check_ledgers(ledgers)


def test_a_unit_that_writes_no_column_freezes_its_rows_too() -> None:
    """Zero columns select a row without writing; nothing is mapped.  (C12.1)"""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 100)
    unit, slices = begin(ledgers, sequence, 0)

    assert slices == {}
    with refused(UnitInFlight, "C12.2", ledgers):
        ledgers.finish(sequence)
    ledgers.commit_unit(unit, {"main": 0})
    assert (frontier(ledgers, sequence), mapped(ledgers, sequence)) == (0, [])
    check_ledgers(ledgers)


def test_a_unit_names_at_least_one_pool() -> None:
    """Columns for no pool at all are misuse.  (C9.4)"""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 100)

    with refused(MisuseError, "C9.4", ledgers):
        begin(ledgers, sequence, {})


def test_a_unit_knows_where_its_rows_started() -> None:
    """First positions are the frontiers at its start, per pool, in batch order; they do not move.  (C12.1)"""
    ledgers = make_ledgers(backend=MTPBackend(5))
    sequences = [activate(ledgers, 200) for _ in range(2)]
    write(ledgers, sequences, {"main": [70, 3], "mtp": [9, 0]})
    unit, _ = begin(ledgers, sequences[::-1], {"main": [1, 2], "mtp": 5})

    assert unit.first_positions["main"].tolist() == [3, 70]
    assert unit.first_positions["mtp"].tolist() == [0, 9]
    assert unit.columns["mtp"].tolist() == [5, 5]
    ledgers.commit_unit(unit, {"main": [1, 2]})
    assert unit.first_positions["main"].tolist() == [3, 70]
    check_ledgers(ledgers)


def test_columns_given_by_the_caller_are_copied() -> None:
    """Changing the caller's array later does not change the unit in flight.  (C12.1)"""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 200)
    columns = ledgers.spaces["main"].frontier[:1].copy()
    columns[0] = 5
    unit, _ = begin(ledgers, sequence, columns)
    columns[0] = 100

    assert unit.columns["main"].tolist() == [5]


def test_counts_that_units_of_a_batch_share_cannot_be_changed() -> None:
    """The same number of columns again is the same array: a caller may read it only.  (C12.1)"""
    ledgers = make_ledgers()
    batch = ledgers.batch([activate(ledgers, 200)])
    for _ in range(2):
        unit, _ = ledgers.begin_unit("step", batch, {"main": 5})
        assert unit.columns["main"].tolist() == [5]
        with pytest.raises(ValueError, match="read-only"):
            unit.columns["main"][0] = 100
        ledgers.commit_unit(unit)
    assert frontier(ledgers, batch.sequences[0]) == 10
    check_ledgers(ledgers)


def test_a_refusal_names_the_first_row_of_several_in_flight() -> None:
    """Both rows of the batch are frozen, by different units: row 0 and its unit are named.  (C12.2)"""
    ledgers = make_ledgers()
    sequences = [activate(ledgers, 100) for _ in range(2)]
    for sequence in reversed(sequences):
        begin(ledgers, sequence, 1)

    with refused(UnitInFlight, "C12.2", ledgers, match="row 0 .* unit step#2") as caught:
        begin(ledgers, sequences, 1)
    assert caught.value.fields == {"row": 0, "unit": "step#2"}


@pytest.mark.parametrize("pools", [["main"], ["main", "mtp"]])
def test_a_commit_without_counts_accepts_everything(pools: list[str]) -> None:
    """Every column of every pool that the unit wrote, and of no other.  (C9.5, C13.1)"""
    ledgers = make_ledgers(backend=MTPBackend(5))
    sequences = [activate(ledgers, 200) for _ in range(2)]
    unit, _ = begin(ledgers, sequences, {pool: [3, 70] for pool in pools})
    ledgers.commit_unit(unit)

    expected = {"main": [3, 70], "mtp": [3, 70] if "mtp" in pools else [0, 0]}
    assert {name: [frontier(ledgers, held, name) for held in sequences] for name in ledgers.spaces} == expected
    with refused(MisuseError, "C12.3", ledgers):
        ledgers.commit_unit(unit)
    check_ledgers(ledgers)


def test_frontiers_advance_at_completion_only() -> None:
    """Mapped when it begins, readable when it is committed.  (C9.5, C12.3)"""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 200)
    unit, _ = begin(ledgers, sequence, 70)

    assert (frontier(ledgers, sequence), len(mapped(ledgers, sequence))) == (0, 2)
    ledgers.commit_unit(unit, {"main": 66})
    assert (frontier(ledgers, sequence), len(mapped(ledgers, sequence))) == (66, 2)
    assert not unit.is_open
    check_ledgers(ledgers)


def test_a_failed_unit_stays_invisible() -> None:
    """Its pages stay mapped and provisional until trimmed; the frontier did not move.  (C9.5)"""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 200)
    write(ledgers, sequence, 10)
    before = counts(ledgers)
    unit, _ = begin(ledgers, sequence, 120)
    ledgers.fail_unit(unit)

    assert (frontier(ledgers, sequence), len(mapped(ledgers, sequence))) == (10, 3)
    assert trim(ledgers, sequence) == 2
    assert counts(ledgers) == before
    check_ledgers(ledgers)


@pytest.mark.parametrize("accepted", [4, [1, 4], [4, 1]])
def test_no_more_is_accepted_than_was_written(accepted: int | list[int]) -> None:
    """Each entry by its own columns, although the page has room.  (C9.5)"""
    ledgers = make_ledgers()
    sequences = [activate(ledgers, 200) for _ in range(2)]
    unit, _ = begin(ledgers, sequences, 3)

    with refused(MisuseError, "C9.5", ledgers, match=r"at most \[3, 3\]"):
        ledgers.commit_unit(unit, {"main": accepted})
    ledgers.commit_unit(unit, {"main": [1, 3]})
    assert [frontier(ledgers, sequence) for sequence in sequences] == [1, 3]
    check_ledgers(ledgers)


def test_a_refused_commit_changes_no_pool_and_keeps_the_unit_in_flight() -> None:
    """The first pool is right, the second is not.  (C9.5, C13.1)"""
    ledgers = make_ledgers(backend=MTPBackend(5))
    sequence = activate(ledgers, 200)
    unit, _ = begin(ledgers, sequence, {"main": 6, "mtp": 5})

    with refused(MisuseError, "C9.5", ledgers):
        ledgers.commit_unit(unit, {"main": 6, "mtp": 6})
    with refused(MisuseError, "C14.4", ledgers):
        ledgers.commit_unit(unit, {"main": 6, "mtp": -1})
    assert unit.is_open
    ledgers.commit_unit(unit, {"main": 6, "mtp": 5})
    assert (frontier(ledgers, sequence), frontier(ledgers, sequence, "mtp")) == (6, 5)
    check_ledgers(ledgers)


def test_a_commit_names_pools_that_the_unit_wrote() -> None:
    """Another pool is refused; a pool that is left out keeps its frontier.  (C9.9)"""
    ledgers = make_ledgers(backend=MTPBackend(5))
    sequence = activate(ledgers, 200)
    unit, _ = begin(ledgers, sequence, {"main": 6})

    with refused(MisuseError, "C9.9", ledgers, match=r"one of \['main'\]"):
        ledgers.commit_unit(unit, {"main": 1, "mtp": 1})
    ledgers.commit_unit(unit, {})
    assert frontier(ledgers, sequence) == 0
    check_ledgers(ledgers)


def test_a_unit_ends_exactly_once() -> None:
    """A second commit or fail is refused, whatever ended it.  (C12.3, S35)"""
    ledgers = make_ledgers()
    sequences = [activate(ledgers, 200) for _ in range(2)]
    committed, _ = begin(ledgers, sequences[0], 3)
    failed, _ = begin(ledgers, sequences[1], 3)
    ledgers.commit_unit(committed, {"main": 3})
    ledgers.fail_unit(failed)

    for unit in (committed, failed):
        with refused(MisuseError, "C12.3", ledgers, match=f"unit {unit.label}"):
            ledgers.commit_unit(unit, {"main": 1})
        with refused(MisuseError, "C12.3", ledgers):
            ledgers.fail_unit(unit)
    assert [frontier(ledgers, sequence) for sequence in sequences] == [3, 0]
    check_ledgers(ledgers)


def test_a_unit_of_another_store_is_refused() -> None:
    """Same number, same rows, another store: it stays open there.  (C12.3)"""
    ours, theirs = make_ledgers(store_id=1), make_ledgers(store_id=2)
    begin(ours, activate(ours, 100), 1)
    foreign, _ = begin(theirs, activate(theirs, 100), 1)

    with refused(MisuseError, "C12.3", ours, theirs):
        ours.commit_unit(foreign, {"main": 1})
    with refused(MisuseError, "C12.3", ours, theirs):
        ours.fail_unit(foreign)
    assert foreign.is_open


def test_a_refused_unit_freezes_nothing() -> None:
    """Beyond the entitlement: the row can be finished at once, and unit numbers have no hole.  (C9.3, C12.1)"""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 100)

    with refused(EntitlementExceeded, "C9.3", ledgers):
        begin(ledgers, sequence, 129)
    unit, _ = begin(ledgers, sequence, 1)
    assert unit.label == "step#1"
    ledgers.fail_unit(unit)
    ledgers.finish(sequence)
    check_ledgers(ledgers)


def test_an_abort_at_a_boundary_ends_at_once() -> None:
    """As finish does.  (C12.4)"""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 200)
    write(ledgers, sequence, 70)

    assert ledgers.abort(sequence) is True
    assert counts(ledgers) == (0, 0, 8)
    check_ledgers(ledgers)


@pytest.mark.parametrize("ends_by", ["commit", "fail"])
def test_an_abort_in_flight_takes_effect_at_the_boundary(ends_by: str) -> None:
    """Nothing moves before; then pages and row are free and the handle is stale.  (C12.4)"""
    ledgers = make_ledgers()
    sequences = [activate(ledgers, 200) for _ in range(2)]
    unit, _ = begin(ledgers, sequences, 70)
    held = counts(ledgers)

    assert ledgers.abort(sequences[0]) is False
    assert ledgers.abort(sequences[0]) is False, "a second abort changes nothing"
    assert counts(ledgers) == held
    check_ledgers(ledgers)
    with refused(UnitInFlight, "C12.2", ledgers):
        ledgers.finish(sequences[0])
    if ends_by == "commit":
        ledgers.commit_unit(unit, {"main": 70})
    else:
        ledgers.fail_unit(unit)

    assert counts(ledgers) == (2, 2, 4), "the other sequence of the unit stays"
    with refused(StaleHandle, "C10.1", ledgers):
        ledgers.abort(sequences[0])
    assert frontier(ledgers, sequences[1]) == (70 if ends_by == "commit" else 0)
    check_ledgers(ledgers)


def test_an_abort_waits_for_the_unit_of_its_own_row() -> None:
    """Another unit that ends first does not end it.  (C12.4)"""
    ledgers = make_ledgers()
    sequences = [activate(ledgers, 100) for _ in range(2)]
    units = [begin(ledgers, sequence, 1)[0] for sequence in sequences]
    ledgers.abort(sequences[0])

    ledgers.commit_unit(units[1], {"main": 1})
    assert ledgers.sequences.active_count == 2
    ledgers.commit_unit(units[0], {"main": 1})
    assert ledgers.sequences.active_rows() == [sequences[1].row]
    check_ledgers(ledgers)


def test_an_abort_does_not_reach_the_next_sequence_of_the_row() -> None:
    """It is forgotten with the sequence it was meant for.  (C12.4)"""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 100)
    unit, _ = begin(ledgers, sequence, 1)
    ledgers.abort(sequence)
    ledgers.commit_unit(unit, {"main": 1})
    again = activate(ledgers, 100)
    write(ledgers, again, 5)

    assert again.row == sequence.row
    assert frontier(ledgers, again) == 5
    check_ledgers(ledgers)


def test_asking_the_guard_about_thawed_rows_changes_nothing() -> None:
    """No unit, no refusal.  (C12.2)"""
    guard = UnitGuard()
    before = snapshot(guard)

    guard.require_thawed(0b1011, "trim")

    assert_unchanged(before, guard)
