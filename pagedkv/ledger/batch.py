"""Batch: sequences that are selected together, and the columns that a unit writes for each.  (C11.3, C14.4)

    batch entry   0   1   2            one value per entry: (B,) int32
    row           5   0   3            the same value per execution row, 0 elsewhere: (C,) int32

A ledger computes with values per row, so that a step is a few vector operations on whole columns.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import compress
from itertools import count as count_from
from operator import is_not
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.errors import MisuseError, shown
from pagedkv.ledger.sequences import Sequence
from pagedkv.values.checks import checked_counts

Columns = int | SequenceOf[int] | npt.NDArray[np.integer[Any]]
"""Columns of each batch entry: one number for all, or one per entry."""

FEW = 8
"""So few handles are read one by one."""

COUNT_MAX = 1 << 30
"""Counts are below this: a frontier and a count add up below 2^31."""


class EntryColumns(NamedTuple):
    """Columns in one pool: `by_entry` (B,) int32 in batch order, `by_row` (C,) int32, 0 in rows not selected.

    `width` is the most columns of an entry, `rows` the index of the batch, and `is_uniform` says that all entries
    write the same number.
    """

    by_entry: npt.NDArray[np.int32]
    by_row: npt.NDArray[np.int32]
    width: int
    rows: slice | npt.NDArray[np.int64]
    is_uniform: bool


@dataclass(eq=False)
class Batch:
    """Sequences selected together, in batch order; made by `Store.batch`.

    Attributes:
        sequences, rows, serials: in batch order; rows and serials of the handles are (B,) int64.
        rows_mask: the rows as bits of one integer.
        index: the rows as NumPy indexes a column fastest: a slice where each is one more than the one before.
        stamp: `Sequences.stamp` at the last check of the handles.
        by_width: a cache: the columns of a unit in which every entry writes the same number, by that number.
    """

    sequences: tuple[Sequence, ...]
    rows: npt.NDArray[np.int64] = field(repr=False)
    serials: npt.NDArray[np.int64] = field(repr=False)
    index: slice | npt.NDArray[np.int64] = field(repr=False)
    rows_mask: int = field(repr=False)
    stamp: int = field(repr=False)
    by_width: dict[int, EntryColumns] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.sequences)

    def __reduce__(self) -> tuple[object, ...]:
        """Copy and pickle without the arrays: those of a copy could be written."""
        return batch_of, (self.sequences, *numbers_of(self.sequences), self.stamp)


def batch_of(
    sequences: tuple[Sequence, ...], rows: npt.NDArray[np.int64], serials: npt.NDArray[np.int64], stamp: int,
    rows_mask: int | None = None,
) -> Batch:
    """Return the batch of sequences whose handles the caller has checked; two sequences of one row set one bit."""
    rows.flags.writeable = serials.flags.writeable = False
    count = rows.size
    if count == 1:
        row = rows.item(0)
        return Batch(sequences, rows, serials, slice(row, row + 1), 1 << row, stamp)
    if rows_mask is None:
        is_selected = np.zeros(rows.item(rows.argmax()) + 1 if count else 0, np.bool_)
        is_selected[rows] = True
        rows_mask = int.from_bytes(np.packbits(is_selected, bitorder="little").tobytes(), "little")
    index: slice | npt.NDArray[np.int64] = rows
    if count and rows.item(-1) - rows.item(0) == count - 1:
        first = rows.item(0)
        if rows.tobytes() == np.arange(first, first + count).tobytes():
            index = slice(first, first + count)
    return Batch(sequences, rows, serials, index, rows_mask, stamp)


def common_ends(old: tuple[Sequence, ...], sequences: tuple[Sequence, ...]) -> tuple[int, int]:
    """Return how many handles, the same objects, both tuples have in front, and how many of the others at the end.

    The answer may be less than that.
    """
    most = min(len(old), len(sequences))
    if most <= FEW:  # they are read faster than they are compared
        return 0, 0
    first = next(compress(count_from(), map(is_not, old, sequences)), most)
    tails = map(is_not, reversed(old[first:]), reversed(sequences[first:]))
    return first, next(compress(count_from(), tails), most - first)


def batch_after(
    previous: Batch, sequences: tuple[Sequence, ...], ends: tuple[int, int], current: npt.NDArray[np.int64], stamp: int
) -> Batch:
    """Return the batch of sequences that has common ends with another one, as `batch_of`.

    From step to step a batch loses or gains few sequences: 256 handles take 5 us where reading each takes 25.

    Args:
        current: the serial of the sequence of each row; the caller has checked the handles between the ends.
        stamp: of the sequences; a batch whose ends have an older one keeps that, so that its handles are checked.
    """
    first, last = ends
    kept, others = len(previous.sequences) - last, sequences[first : len(sequences) - last]
    numbers = [sequence.row for sequence in others]
    rows = np.array(numbers, np.int64)
    left, rows_mask = previous.sequences[first:kept], None
    if len(left) + len(others) <= 2 * FEW:
        rows_mask = previous.rows_mask if first or last else 0
        if rows_mask:
            for sequence in left:
                rows_mask &= ~(1 << sequence.row)
        for row in numbers:
            rows_mask |= 1 << row
    if not first and not last:
        return batch_of(sequences, rows, current[rows], stamp, rows_mask)
    spliced = np.concatenate((previous.rows[:first], rows, previous.rows[kept:]))
    if previous.stamp == stamp:
        return batch_of(sequences, spliced, current[spliced], stamp, rows_mask)
    serials = np.concatenate((previous.serials[:first], current[rows], previous.serials[kept:]))
    return batch_of(sequences, spliced, serials, previous.stamp, rows_mask)


def numbers_of(sequences: tuple[Sequence, ...]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the rows and the serials of handles, (n,) int64."""
    rows = np.array([sequence.row for sequence in sequences], np.int64)
    return rows, np.array([sequence.serial for sequence in sequences], np.int64)


def column_counts(what: str, entries: int, columns: Columns) -> npt.NDArray[np.int32]:
    """Return columns as (B,) int32; refuse other types, negative or too large counts, and a wrong number of them."""
    if type(columns) is int and 0 <= columns < COUNT_MAX:
        return np.full(entries, columns, np.int32)
    remedy = "pass one count, or one per batch entry"
    counts = np.asarray(checked_counts(what, columns, remedy=remedy, clause="C14.4"))
    if counts.dtype.kind not in "iu" or counts.shape not in ((), (entries,)) or (counts < 0).any():
        raise MisuseError(what, expected=f"a non-negative integer for all, or one for each of {entries} entries",
                          got=shown(columns), remedy=remedy, clause="C14.4")
    if (counts >= COUNT_MAX).any():
        raise MisuseError(what, expected=f"fewer than {COUNT_MAX} columns", got=shown(columns),
                          remedy="pass one count per batch entry", clause="C14.4")
    return np.broadcast_to(counts, (entries,)).astype(np.int32)
