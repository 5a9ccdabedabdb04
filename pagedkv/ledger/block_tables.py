"""BlockTable: the host mirror of one pool's execution table.  (C11)

    host mirror  (C, L) int32     row r: [ id id id | id id | -1 -1 -1 ]
                                           members    bound   unmapped
    device table (C, L) int32     the same members; entries beyond membership are unspecified (C11.1)

A row is contiguous, so what a row gains reaches the device as one slice (C11.2).  The mirror is
written when ids are bound; the slice is published when they become members.  The ledger only says
which slices: the store copies them on the stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

UNMAPPED = -1


@dataclass(frozen=True)
class TableSlices:
    """Slices to publish, one per row: row[i] gains block_count[i] entries from first_block[i] on."""

    rows: npt.NDArray[np.int64]
    first_blocks: npt.NDArray[np.int64]
    block_counts: npt.NDArray[np.int64]

    def flat(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return (rows, blocks) of every single entry, slice after slice."""
        return flatten_ranges(self.rows, self.first_blocks, self.block_counts)


class BlockTable:
    """The host mirror of one pool."""

    def __init__(self, *, rows: int, blocks: int) -> None:
        self.mirror = np.full((rows, blocks), UNMAPPED, np.int32)

    @property
    def blocks(self) -> int:
        """L: entries of one row."""
        return self.mirror.shape[1]


def flatten_ranges(
    rows: npt.NDArray[np.int64], firsts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Expand ranges [first, first + count) of rows to (row, column) pairs.

    Example: rows [4, 7], firsts [2, 0], counts [3, 1] -> rows [4, 4, 4, 7], columns [2, 3, 4, 0].
    """
    total = int(counts.sum())
    starts = np.cumsum(counts) - counts
    columns = np.arange(total) + np.repeat(firsts - starts, counts)
    return np.repeat(rows, counts), columns
