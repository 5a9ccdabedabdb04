"""Sanitizer: poison, guard pages and checks, for a store that looks for corruption.  (C11.1, C12.4, C16)

    a page group enters a membership    its bytes become NaN before the launch of the unit that may write it
    a page group leaves a membership    the entries that named it point at the guard page again
    `check`                             every entry beyond a membership must point at the guard page, and nobody may
                                        have written the guard page

So a launch that reads an unwritten row or a stale entry computes NaN, and not another sequence's numbers:

    plane                      unwritten            guard page
    bf16 codes                 0x7FC0               0xFFFF     quiet NaN
    FP16 scales                0x7E00               0xFFFF     quiet NaN; INT8 and E4M3 codes are NaN through them
    E4M3 scales and codes      0x7F                 0xFF       NaN
    INT8 and E2M1 codes        0x7F                 0xFF       numbers, but their scales make them NaN

The two patterns differ, so a dump of a page shows whether it is the guard page.  Everything runs on the store's stream
before the launches that may read it.  A store without a sanitizer makes none of these calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pagedkv.devices.protocol import Array, Device, Stream
from pagedkv.errors import Corruption
from pagedkv.ledger.active_spaces import ActiveSpaces, TableSlices
from pagedkv.ops.ops import Ops
from pagedkv.transfer.digest import PageFingerprints
from pagedkv.values.planes import PlaneGeometry
from pagedkv.values.quantities import PAGE_SHIFT

GUARD_BYTE = 0xFF
UNWRITTEN_BF16 = 0x7FC0_7FC0
UNWRITTEN_FP16 = 0x7E00_7E00
UNWRITTEN_BYTES = 0x7F7F_7F7F


class Sanitizer:
    """Poison, guard pages and corruption checks of one store; made by the store.

    Attributes:
        fingerprints: digests of page groups, for transfers and tests.

    Args:
        ops, device, stream: of the store.
        planes: per pool, every plane with its geometry; each has one page group behind the pool's last id.
        tables: per pool, (C, L) int32 on the device.
        spaces: per pool, the active spaces of the ledger; only read.
        latch: stops the store with the evidence.
        scratch: (1,) int32 on the device; its other users on the stream write it before they read it.
    """

    def __init__(
        self, ops: Ops, device: Device, stream: Stream, planes: Mapping[str, Sequence[tuple[Array, PlaneGeometry]]],
        tables: Mapping[str, Array], spaces: Mapping[str, ActiveSpaces], *, latch: Callable[[Corruption], None],
        scratch: Array,
    ) -> None:
        self.fingerprints = PageFingerprints(device, stream, planes, latch=latch)
        self._ops = ops
        self._device = device
        self._stream = stream
        self._planes = planes
        self._tables = tables
        self._spaces = spaces
        self._latch = latch
        self._published = {pool: np.zeros(table.shape[0], np.int64) for pool, table in tables.items()}
        self._page = scratch
        self._set_guard_pages()

    def poison(self, pool: str, new_slices: TableSlices) -> None:
        """Fill page groups that have just entered a membership; their entries are on the device already.  (C11.1)

        Launches: one per plane and slice.
        """
        planes = self._planes[pool]
        words = [unwritten_word(geometry) for _, geometry in planes]
        table, published = self._tables[pool], self._published[pool]
        for row, first, count in new_slices.each():
            self._ops.fill_pages(planes, table[row, first : first + count], words, stream=self._stream)
            published[row] = first + count

    def adopt(self, pool: str, row: int, blocks: int) -> None:
        """Note that the first `blocks` entries of a row were published; their pages hold committed content.  (C11.1)"""
        self._published[pool][row] = blocks

    def poison_page(self, pool: str, page_id: int) -> None:
        """Fill one page group before a copy writes a part of it.  (C11.1)  Launches: one per plane."""
        self._device.copy(self._page, np.array([page_id], np.int32), self._stream)
        planes = self._planes[pool]
        words = [unwritten_word(geometry) for _, geometry in planes]
        self._ops.fill_pages(planes, self._page, words, stream=self._stream)

    def withdraw(self) -> None:
        """Point the entries that left a membership at the guard page; one copy per row with such entries.  (C11.1)"""
        for pool, published in self._published.items():
            spaces = self._spaces[pool]
            members = (spaces.mapped_end >> PAGE_SHIFT).astype(np.int64)
            for row in np.flatnonzero(published > members).tolist():
                first, end = int(members[row]), int(published[row])
                guard = np.full(end - first, spaces.pool.capacity, np.int32)
                self._device.copy(self._tables[pool][row, first:end], guard, self._stream)
            np.minimum(published, members, out=published)

    def check(self) -> None:
        """Compare every table entry and every guard page with its expected value; waits for the stream.  (C16)"""
        for pool, spaces in self._spaces.items():
            table = np.empty_like(spaces.table)
            self._device.copy(table, self._tables[pool], self._stream)
            self._stream.synchronize()
            members = spaces.columns_below(spaces.mapped_end)
            expected = np.where(members, spaces.table, np.int32(spaces.pool.capacity))
            wrong = np.argwhere(table != expected)
            if wrong.size:
                row, block = wrong[0].tolist()
                whose = "its member" if members[row, block] else "the guard page"
                self._stop(Corruption(
                    f"block {block} of row {row} in the table of pool {pool}",
                    expected=f"{whose} {int(expected[row, block])}", got=f"{int(table[row, block])}",
                    remedy="find who wrote the table, or forgot to publish", clause="C11.1",
                    pool=pool, row=row, block=block,
                ))
            self._check_guard_page(pool, spaces.pool.capacity)

    def _check_guard_page(self, pool: str, guard: int) -> None:
        for plane, geometry in self._planes[pool]:
            for run in _guard_runs(plane, geometry):
                host = np.empty(run.shape, run.dtype)
                self._device.copy(host, run, self._stream)
                self._stream.synchronize()
                if (host.view(np.uint8) != GUARD_BYTE).any():
                    self._stop(Corruption(
                        f"plane {geometry.role} of layer {geometry.layer} in the guard page {guard} of pool {pool}",
                        expected=f"{GUARD_BYTE:#x} in every byte", got="bytes that somebody wrote",
                        remedy="find who wrote through an entry beyond a membership", clause="C11.1",
                        pool=pool, page_id=guard, role=geometry.role, layer=geometry.layer,
                    ))

    def _set_guard_pages(self) -> None:
        """Fill the guard pages, and point every entry at them.  (C11.1)"""
        for pool, table in self._tables.items():
            for plane, geometry in self._planes[pool]:
                for run in _guard_runs(plane, geometry):
                    poison = np.full(run.nbytes, GUARD_BYTE, np.uint8).view(geometry.dtype).reshape(run.shape)
                    self._device.copy(run, poison, self._stream)
            guard = self._spaces[pool].pool.capacity
            self._device.copy(table, np.full(table.shape, guard, np.int32), self._stream)
        self._stream.synchronize()

    def _stop(self, error: Corruption) -> None:
        self._latch(error)
        raise error


def unwritten_word(geometry: PlaneGeometry) -> int:
    """Return the 32-bit pattern of an unwritten row of a plane: NaN, or a number that its scale makes NaN."""
    if geometry.dtype.itemsize == 1:
        return UNWRITTEN_BYTES
    return UNWRITTEN_FP16 if geometry.role.endswith("scale") else UNWRITTEN_BF16


def _guard_runs(plane: Array, geometry: PlaneGeometry) -> list[Array]:
    """Return the contiguous parts of the page group behind the last id."""
    return [plane[-1]] if geometry.order == "page-major" else [head[-1] for head in plane]
