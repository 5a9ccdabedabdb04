"""Sequences: handles and execution rows.  (C9.7, C10.1, C11.3)

A sequence bundles one address space per enabled pool (C10.1).  Its life:

    activate   reserve in every pool, lease an execution row      all or nothing (C10.2), `transaction.py`
    units      map, publish, launch, commit, trim                 per pool (C9.9)
    finish     trim, give up reservation and row, then retain     between units (C9.8), `ledger.py`
               or release the pages

A sequence leases the same execution row in every pool's table, so one number selects the sequence in all of them.  The
row owns no page, no reservation and no frontier (C9.7).  A handle carries the serial of its sequence, so a stale handle
is refused.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy as np

from pagedkv.errors import Caught, MisuseError, StaleHandle, shown


@dataclass(frozen=True)
class Sequence:
    """A thin handle of an active sequence; made by `Store.activate`, valid until it is finished."""

    store_id: int
    row: int
    serial: int

    def __repr__(self) -> str:
        return f"Sequence(row={self.row}, serial={self.serial})"


class Sequences:
    """Execution rows, and the sequence that holds each.

    Attributes:
        serials: (C,) int64, serial of the sequence that holds a row, 0 while it is free.
        current: the handle of the sequence that holds each row, or None.
        budget_tokens: (C,) int32, tokens that the sequence may hold: source, prompt and output.
        stamp: changes whenever a sequence begins or ends; a batch checks its handles again only after that.  No two
            stores share a value, so the handles of another store's batch are checked too, and refused.

        announced: by row, the handle of a sequence that is restoring: it becomes current when its pages are there.

    The methods below alone write them.
    """

    def __init__(self, rows: int, store_id: int) -> None:
        self.store_id = store_id
        self.serials = np.zeros(rows, np.int64)
        self.current: list[Sequence | None] = [None] * rows
        self.budget_tokens = np.zeros(rows, np.int32)
        self.stamp = store_id << 32
        self.announced: dict[int, Sequence] = {}
        self._free_rows = list(range(rows - 1, -1, -1))
        self._serial_next = 1

    def handles(self) -> list[Sequence]:
        """Return a handle of every active sequence, in ascending order of rows."""
        return [handle for handle in self.current if handle is not None]

    def active_rows(self) -> list[int]:
        """Return the leased rows in ascending order."""
        return self.serials.nonzero()[0].tolist()

    def free_rows(self) -> list[int]:
        """Return the rows that an activation may lease, in ascending order."""
        return sorted(self._free_rows)

    @property
    def next_row(self) -> int | None:
        """The row that the next activation will lease, or None."""
        return self._free_rows[-1] if self._free_rows else None

    def lease_row(self) -> int:
        """Take the next row for an activation that is being prepared."""
        return self._free_rows.pop()

    def return_row(self, row: int) -> None:
        """Give a row back; no sequence holds it."""
        self._free_rows.append(row)
        self._free_rows.sort(reverse=True)

    def announce(self, row: int) -> Sequence:
        """Make the handle of a leased row ahead of its publication.  (C10.10)"""
        serial = self._serial_next
        self._serial_next = serial + 1
        self.announced[row] = handle = Sequence(self.store_id, row, serial)
        return handle

    def withdraw(self, row: int) -> None:
        """Give a leased row back; what was announced of it is never published.  (C10.2)"""
        self.announced.pop(row, None)
        self.return_row(row)

    def publish(self, row: int, budget_tokens: int, handle: Sequence | None = None) -> Sequence:
        """Turn a leased row into an active sequence, under the handle that was announced.  (C10.3)"""
        if handle is None:
            handle = self.announce(row)
        del self.announced[row]
        self.serials[row] = handle.serial
        self.current[row] = handle
        self.budget_tokens[row] = budget_tokens
        self.stamp += 1
        return handle

    def is_announced(self, sequence: Sequence) -> bool:
        """Say whether a handle is of a sequence that is restoring.  (C10.10)"""
        return bool(self.announced) and type(sequence) is Sequence and sequence in self.announced.values()

    def end(self, row: int) -> None:
        """End the sequence of a row, whose spaces were closed or detached, and return the row.  (C9.8)"""
        self.serials[row] = 0
        self.current[row] = None
        self.budget_tokens[row] = 0
        self.return_row(row)
        self.stamp += 1

    def require_all_current(self, sequences: tuple[Sequence, ...]) -> None:
        """Refuse the first handle that `require_current` refuses; handles that the store made cost no call each."""
        current = self.current
        with Caught(but=MemoryError):  # what is no handle may raise anything; the loop below refuses it
            if all(map(operator.is_, [current[sequence.row] for sequence in sequences], sequences)):
                return
        for sequence in sequences:
            self.require_current(sequence)

    def require_current(self, sequence: Sequence) -> None:
        """Refuse a handle of another store, or of a sequence that has ended.  (C10.1)"""
        if type(sequence) is not Sequence:
            raise MisuseError("a handle", expected="the Sequence that activate returned", got=shown(sequence),
                              remedy="pass the handle; try_activate may have answered with a Refusal", clause="C10.1")
        is_known = (
            type(sequence.store_id) is int and sequence.store_id == self.store_id
            and type(sequence.row) is int and 0 <= sequence.row < self.serials.size
            and type(sequence.serial) is int and sequence.serial > 0
        )
        if is_known and self.is_announced(sequence):
            raise MisuseError(f"a call with {sequence}", expected="a sequence whose pages are on the device",
                              got="one that is restoring", clause="C10.10",
                              remedy="call poll_copies until is_restoring is False, or abort it")
        if not is_known or self.serials[sequence.row] != sequence.serial:
            raise StaleHandle(shown(sequence), expected="an active sequence of this store",
                              got="one that was finished, or of another store",
                              remedy="use the handle that activate returned, until finish", clause="C10.1")
