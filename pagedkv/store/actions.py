"""Actions: execute the decisions of the ledger on the store's stream.  (C10.3, C10.5, C11.2)

    publish                new table windows of rows            ledger -> device table, before the launches that read it
    copy_tails             committed columns of partial tails   page group -> page group, in every plane of a pool
    publish_memberships    the whole row of an activation       ledger -> device table, after its tails

Each action is queued in stream order; only `check_tables` waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pagedkv.devices.protocol import Array, Device, Stream
from pagedkv.ledger.active_spaces import ActiveSpaces, TableSlices
from pagedkv.ledger.free_runs import Ids
from pagedkv.ledger.ledger import PoolSlices
from pagedkv.ledger.transaction import TailCopy, Transaction
from pagedkv.ops.ops import Ops
from pagedkv.ops.page_moves import set_entries
from pagedkv.store.sanitizer import Sanitizer
from pagedkv.values.planes import PlaneGeometry


class Actions:
    """Executes decisions of one store's ledger; made by the store.

    Args:
        ops, device, stream, sanitizer: of the store.
        planes: per pool, every plane with its geometry, in ordinal order.
        tables: per pool, (C, L) int32 on the device.
        entries: (2 * n,) int64 on the device: n table entries on their way to a table.
        active: per pool, the active spaces of the ledger; only read.

    Attributes:
        published_slices: table slices published so far.
    """

    def __init__(
        self, ops: Ops, device: Device, stream: Stream, planes: Mapping[str, Sequence[tuple[Array, PlaneGeometry]]],
        tables: Mapping[str, Array], entries: Array, active: Mapping[str, ActiveSpaces], sanitizer: Sanitizer | None,
    ) -> None:
        self.published_slices = 0
        self._ops = ops
        self._device = device
        self._stream = stream
        self._planes = planes
        self._tables = tables
        self._entries = entries
        self._set_entries_kernel = ops.kernels.page_moves()["set_entries"]
        self._active = active
        self._sanitizer = sanitizer

    def close(self) -> None:
        """Let go of the store's arrays."""
        self._planes, self._tables, self._entries, self._sanitizer = {}, {}, None, None

    def publish(self, slices: PoolSlices) -> None:
        """Publish new slices, and record an event for each.  (C11.2)

        Only windows of ids that were just bound are copied: a window holds the pages that become members later.  In
        sanitizer mode an entry beyond the membership names the guard page, so there each new slice is copied.
        """
        for pool, new_slices in slices.items():
            spaces = self._active[pool]
            if self._sanitizer is not None:
                self._copy_slices(pool, spaces, new_slices)
                self._sanitizer.poison(pool, new_slices)
            elif spaces.new_windows:
                self._copy_slices(pool, spaces, TableSlices.of(spaces.new_windows))
            spaces.new_windows.clear()
            self.published_slices += new_slices.rows.size
            spaces.events.record_slices("publish", new_slices, spaces.table)

    def _copy_slices(self, pool: str, spaces: ActiveSpaces, slices: TableSlices) -> None:
        """Copy slices of the host mirror to the device table.

        One row is one copy.  Several rows are one copy of a list and one launch that sets its entries, or as many of
        both as the buffer of the list asks for.
        """
        table, (rows, first_blocks, _, pages) = self._tables[pool], slices
        if rows.size == 1:
            row, first = rows.item(0), first_blocks.item(0)
            blocks = slice(first, first + pages)
            self._device.copy(table[row, blocks], spaces.table[row, blocks].copy(), self._stream)
            return
        entries, most = spaces.entries(slices), self._entries.size // 2
        for first in range(0, pages, most):
            part = np.ascontiguousarray(entries[:, first : first + most])
            on_device = self._entries[: part.size]
            self._device.copy(on_device, part, self._stream)
            set_entries(self._set_entries_kernel, table, on_device, part.size // 2, stream=self._stream)

    def execute(self, transaction: Transaction) -> None:
        """Copy the tails of a transaction, then publish its tables.  (C10.3)"""
        self.copy_tails(transaction.copies)
        self.publish_memberships(transaction.row, transaction.tables)

    def publish_memberships(self, row: int, tables: Mapping[str, Ids]) -> None:
        """Copy the whole membership of an activated row to the device table of each pool.  (C11.2)"""
        for pool, page_ids in tables.items():
            if self._sanitizer is not None:  # noted first: an activation that breaks off behind the copy is withdrawn
                self._sanitizer.adopt(pool, row, page_ids.size)
            if page_ids.size:
                self._device.copy(self._tables[pool][row, : page_ids.size], page_ids, self._stream)
                self.published_slices += 1

    def copy_tails(self, copies: Sequence[TailCopy]) -> None:
        """Copy committed columns of partial tails.  Launches: one per plane and tail.  (C10.5, C10.6)"""
        for copy in copies:
            if self._sanitizer is not None:
                self._sanitizer.poison_page(copy.pool, copy.destination_page)
            self._ops.copy_columns(self._planes[copy.pool], copy.source_page, copy.destination_page, copy.columns,
                                   stream=self._stream)

    def check_tables(self) -> None:
        """Demand that every device table shows the memberships and the bound windows; waits for the stream.  (C11.1)"""
        for pool, spaces in self._active.items():
            table = np.empty_like(spaces.table)
            self._device.copy(table, self._tables[pool], self._stream)
            self._stream.synchronize()
            is_ahead = self._sanitizer is None  # of a window every entry is there
            members = spaces.columns_below(spaces.bound_end if is_ahead else spaces.mapped_end)
            if (table[members] != spaces.table[members]).any():
                raise AssertionError(f"pool {pool}: the device table differs from the membership")
