"""Host mirror of the execution tables: what a row holds, and which slices are published.  (C11)"""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.errors import MisuseError
from pagedkv.ledger.block_tables import UNMAPPED, BlockTable, TableSlices, flatten_ranges
from pagedkv.ledger.check import check_ledgers
from tests.host.builders import (
    activate,
    begin,
    frontier,
    make_ledgers,
    mapped,
    refused,
    slices_of,
    write,
)


def int64(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def test_a_fresh_table_maps_nothing() -> None:
    """(C, L) int32, every entry -1, each row contiguous.  (C11.1)"""
    table = BlockTable(rows=3, blocks=5)

    assert table.mirror.shape == (3, 5)
    assert table.mirror.dtype == np.int32
    assert table.mirror[1].flags.c_contiguous
    assert (table.mirror == UNMAPPED).all()
    assert table.blocks == 5


def test_slices_expand_to_single_entries_slice_after_slice() -> None:
    """Rows [4, 7], firsts [2, 0], counts [3, 1] -> (4, 2), (4, 3), (4, 4), (7, 0).  (C11.2)"""
    rows, columns = TableSlices(int64(4, 7), int64(2, 0), int64(3, 1)).flat()

    assert rows.tolist() == [4, 4, 4, 7]
    assert columns.tolist() == [2, 3, 4, 0]


def test_an_empty_slice_expands_to_nothing() -> None:
    """Zero counts among others, and nothing at all.  (C11.2)"""
    rows, columns = flatten_ranges(int64(1, 2, 3), int64(5, 6, 7), int64(0, 2, 0))
    nothing = flatten_ranges(int64(), int64(), int64())

    assert (rows.tolist(), columns.tolist()) == ([2, 2], [6, 7])
    assert [part.tolist() for part in nothing] == [[], []]


def test_the_first_two_pages_are_what_the_row_shows() -> None:
    """Mapping 65 tokens of a fresh store takes pages {0, 1} and publishes exactly these.  (C11.2)"""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 65)
    _, slices = begin(ledgers, sequence, 65)

    assert slices_of(slices["main"]) == [(sequence.row, 0, 2)]
    assert ledgers.spaces["main"].table.mirror[slices["main"].flat()].tolist() == [0, 1]
    assert mapped(ledgers, sequence) == [0, 1]
    check_ledgers(ledgers)


def test_only_what_a_row_gained_is_published() -> None:
    """One contiguous slice per row; a step inside a page publishes nothing.  (C9.4, C11.2)"""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 200)

    assert slices_of(write(ledgers, sequence, 63).get("main")) == [(sequence.row, 0, 1)]
    assert write(ledgers, sequence, 1) == {}
    assert slices_of(write(ledgers, sequence, 1).get("main")) == [(sequence.row, 1, 1)]
    assert slices_of(write(ledgers, sequence, 128).get("main")) == [(sequence.row, 2, 2)]
    assert write(ledgers, sequence, 0) == {}
    check_ledgers(ledgers)


def test_one_unit_publishes_the_slices_of_all_its_rows_at_once() -> None:
    """Batched over rows and new pages, in one answer per pool.  (C11.2)"""
    ledgers = make_ledgers(max_concurrency=3)
    sequences = [activate(ledgers, 200) for _ in range(3)]
    write(ledgers, sequences[1], 60)

    slices = write(ledgers, [sequences[2], sequences[1], sequences[0]], [129, 4, 1])

    assert slices_of(slices["main"]) == [(sequences[0].row, 0, 1), (sequences[2].row, 0, 3)]
    check_ledgers(ledgers)


def test_beyond_membership_the_mirror_holds_bound_ids_or_nothing() -> None:
    """Entries past the membership are ids of this space's own reservation, then -1.  (C6.5, C11.1)"""
    ledgers = make_ledgers(max_context=256, max_concurrency=2)
    sequence = activate(ledgers, 130)
    write(ledgers, sequence, 10)
    row = ledgers.spaces["main"].table.mirror[sequence.row].tolist()

    assert mapped(ledgers, sequence) == row[:1]
    assert row == [0, 1, 2, UNMAPPED]
    check_ledgers(ledgers)


def test_a_table_row_is_not_a_batch_entry_and_not_a_lane() -> None:
    """Batch order is the caller's; `rows` says which table row serves entry b.  (C11.3)"""
    ledgers = make_ledgers(max_concurrency=3)
    sequences = [activate(ledgers, 64) for _ in range(3)]
    batch = ledgers.batch([sequences[2], sequences[0]])
    unit, _ = ledgers.begin_unit("step", batch, {"main": [5, 9]})

    assert batch.rows.tolist() == [sequences[2].row, sequences[0].row]
    assert unit.columns["main"].tolist() == [5, 9]
    ledgers.commit_unit(unit, {"main": [5, 9]})
    assert [frontier(ledgers, sequence) for sequence in sequences] == [9, 0, 5]
    check_ledgers(ledgers)


def test_columns_at_or_beyond_the_context_are_refused_before_launch() -> None:
    """S = 100: position 99 is the last one, although its page has room for 128.  (C11.2)"""
    ledgers = make_ledgers(max_context=100)
    sequence = activate(ledgers, 100)
    write(ledgers, sequence, 98)

    with refused(MisuseError, "C11.2", ledgers, match="position 100 of row"):
        begin(ledgers, sequence, 3)
    write(ledgers, sequence, 2)
    assert frontier(ledgers, sequence) == 100
    check_ledgers(ledgers)


@pytest.mark.parametrize("tokens", [101, 128, 129, -1, 2**40])
def test_mapping_beyond_the_table_is_refused(tokens: int) -> None:
    """Neither beyond S nor beyond L, nor a negative limit.  (C11.2)"""
    ledgers = make_ledgers(max_context=100)
    sequence = activate(ledgers, 100)

    with refused(MisuseError, "C11.2", ledgers, match="0 to max_context = 100"):
        ledgers.ensure_mapped_to_tokens(sequence, tokens, "main")
    check_ledgers(ledgers)


def test_a_finished_row_shows_nothing() -> None:
    """No entry outlives its sequence.  (C11.1, S7)"""
    ledgers = make_ledgers()
    sequence = activate(ledgers, 200)
    write(ledgers, sequence, 130)
    ledgers.finish(sequence)

    assert (ledgers.spaces["main"].table.mirror == UNMAPPED).all()
    check_ledgers(ledgers)
