"""Units: a unit in flight freezes its rows until it ends.  (C12)

Life of a unit:

    begin -> (launches) -> wait -> commit | fail
      pages mapped, slices published,          frontiers advance (C9.5) | stay
      rows frozen: no trim, truncate, finish   rows are thawed

While a unit is in flight, the table entries, memberships and pages of the blocks that it may read or write do not
change (C12.1).  Rows in flight are bits of one integer, so one AND finds a frozen row.  At most one unit selects
a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pagedkv.errors import MisuseError, UnitInFlight, shown
from pagedkv.ledger.batch import Batch, EntryColumns


@dataclass(eq=False, slots=True)
class Submission:
    """One unit in flight: its batch and the columns that it may write in each pool.

    Made by `Store.begin_unit`.  `first_positions[pool]` is (B,) int32: where the columns of each entry begin, in batch
    order.  `Units` alone writes `is_open`, and the store `is_completed`: whether the device has finished it.
    """

    number: int
    name: str
    batch: Batch
    written: dict[str, EntryColumns] = field(repr=False)
    first_positions: dict[str, npt.NDArray[np.int32]] = field(repr=False)
    is_open: bool = True
    is_completed: bool = False

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """Execution rows in batch order, (B,)."""
        return self.batch.rows

    @property
    def rows_mask(self) -> int:
        """The rows as bits of one integer."""
        return self.batch.rows_mask

    @property
    def columns(self) -> dict[str, npt.NDArray[np.int32]]:
        """Columns that each entry may write, (B,) int32, by pool."""
        return {pool: columns.by_entry for pool, columns in self.written.items()}

    @property
    def label(self) -> str:
        """Name and number, as errors print it."""
        return f"{self.name}#{self.number}"


class Units:
    """The units in flight of one store.

    Attributes:
        rows_in_flight: rows that a unit selects, as bits of one integer; `begin` and `end` alone write it.
        in_flight: the units, in the order of their begin; likewise.
    """

    def __init__(self) -> None:
        self.rows_in_flight = 0
        self.in_flight: list[Submission] = []
        self._number_next = 1

    def begin(
        self, name: str, batch: Batch, written: dict[str, EntryColumns],
        first_positions: dict[str, npt.NDArray[np.int32]],
    ) -> Submission:
        """Freeze the rows for a new unit; the caller has called `require_thawed`."""
        number = self._number_next
        unit = Submission(number, name, batch, written, first_positions)
        self._number_next = number + 1
        self.rows_in_flight |= batch.rows_mask
        self.in_flight.append(unit)
        return unit

    def end(self, unit: Submission) -> None:
        """Thaw the rows of a unit that completed."""
        self.in_flight.remove(unit)
        self.rows_in_flight &= ~unit.batch.rows_mask
        unit.is_open = False

    def require_open(self, unit: Submission, operation: str) -> None:
        """Refuse a unit that has ended, or that belongs to another store.  (C12.3)"""
        if type(unit) is not Submission:
            raise MisuseError(operation, expected="the unit that begin_unit returned", got=shown(unit),
                              remedy="keep the unit until its commit", clause="C12.3")
        if not unit.is_open or unit not in self.in_flight:
            raise MisuseError(f"{operation} of unit {unit.label}", expected="a unit in flight of this store",
                              got="one that has ended", remedy="end each unit exactly once", clause="C12.3")

    def require_thawed(self, rows_mask: int, operation: str, pool: str = "main") -> None:
        """Refuse an operation on rows that a unit in flight selects; the error names the first such row.  (C12.2)"""
        frozen = self.rows_in_flight & rows_mask
        if not frozen:
            return
        row = (frozen & -frozen).bit_length() - 1
        unit = next(unit for unit in self.in_flight if unit.rows_mask >> row & 1)
        raise UnitInFlight(
            f"{operation} of row {row} of pool {pool}", expected="a row that no unit in flight uses",
            got=f"a row that unit {unit.label} uses",
            remedy="first wait for the unit, then commit it or end it with fail", clause="C12.2", row=row,
            unit=unit.label,
        )
