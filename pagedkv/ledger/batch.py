"""Batch: sequences that are selected together, and the columns that a unit writes for each.  (C11.3, C14.4)

    batch entry   0   1   2            one value per entry: (B,) int32
    row           5   0   3            the same value per execution row, 0 elsewhere: (C,) int32

A ledger computes with values per row, so that a step is a few vector operations on whole columns.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.errors import MisuseError, shown
from pagedkv.ledger.sequences import Sequence
from pagedkv.values.checks import checked_counts

Columns = int | SequenceOf[int] | npt.NDArray[np.integer[Any]]
"""Columns of each batch entry: one number for all, or one per entry."""

COUNT_MAX = 1 << 30
"""Counts are below this: a frontier and a count add up below 2^31."""


@dataclass(frozen=True)
class EntryColumns:
    """Columns in one pool: `by_entry` (B,) int32 in batch order, `by_row` (C,) int32, 0 in rows not selected."""

    by_entry: npt.NDArray[np.int32]
    by_row: npt.NDArray[np.int32]


@dataclass(eq=False)
class Batch:
    """Sequences selected together, in batch order; made by `Store.batch`.

    Attributes:
        sequences, rows: in batch order; rows are (B,) int64, `rows_mask` has them as bits of one integer.
        stamp: `Sequences.stamp` at the last check of the handles.
        by_width: a cache: the columns of a unit in which every entry writes the same number, by that number.
    """

    sequences: tuple[Sequence, ...]
    rows: npt.NDArray[np.int64]
    rows_mask: int
    stamp: int
    by_width: dict[int, EntryColumns] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sequences)

    def __reduce__(self) -> tuple[object, ...]:
        """Copy and pickle without the arrays: those of a copy could be written."""
        return batch_of, (self.sequences, self.stamp)


def batch_of(sequences: tuple[Sequence, ...], stamp: int) -> Batch:
    """Return the batch of sequences whose handles the caller has checked; each row stands once in its mask."""
    rows = np.array([sequence.row for sequence in sequences], np.int64)
    rows.setflags(write=False)
    return Batch(sequences, rows, sum({1 << row for row in rows.tolist()}), stamp)


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
