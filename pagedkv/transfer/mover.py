"""PageMover: copies whole page groups between planes and records of the Host arena, beside decode.  (C8.3, C12.1)

    users' stream   ... writers of the source, readers of the destination ──record(before)      next users
                                                                                  │            │ the host has asked
    lane stream                                                              wait(before) ─ copies ─ record(done)

`submit` queues the copies after all present work of the users' stream.  Whoever uses a destination next waits until the
host knows that they have run (`is_done`, `wait`).  One lane copies to the Host, the other one from it, so the two
directions overlap.

    to the Host      chunk of pages --one launch--> staging, records in a row --one copy per run--> arena
    from the Host    arena --one copy per run--> staging --one launch--> pages of every plane

A run is a part of a chunk whose records lie together in the arena.  The kernel gets page ids through a pinned slot.  A
lane has a fixed number of slots.  If all are in use, `submit` returns None and queues nothing; no other limit exists
(S57).  A slot is used again only after the copies that read it have run.

This file knows planes and streams, and no ledger and no pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from pagedkv.devices.protocol import Array, Device, Event, Stream
from pagedkv.errors import TransferFailed
from pagedkv.ops.ops import Ops
from pagedkv.ops.page_moves import Planes, PlaneTable
from pagedkv.values.layout import COPY_SLOTS, copy_ids, copy_staging, plane_words

Direction = Literal["d2h", "h2d"]
"""Device to Host, Host to device."""

Ids = npt.NDArray[np.int32]
Offsets = npt.NDArray[np.int64]


@dataclass
class MoverCounters:
    """What was submitted; counters only grow.  Fences are not counted."""

    transfers: int = 0
    pages: int = 0
    runs: int = 0
    bytes: int = 0
    copies: int = 0
    launches: int = 0
    refused: int = 0

    @property
    def operations(self) -> int:
        """Copies and launches."""
        return self.copies + self.launches


@dataclass(eq=False)
class Ticket:
    """The queued copies of one transfer: `done` is recorded behind the last of them."""

    done: Event


class _Slot:
    """Pinned page ids and their device copy; `last` is recorded behind the last copies that used them."""

    def __init__(self, device: Device, name: str, ids: Array) -> None:
        self.ids_host = device.pinned(ids.shape, np.int32, name=f"{name} ids host")
        self.ids_device = ids
        self.last: Event | None = None

    def is_free(self) -> bool:
        return self.last is None or self.last.query()


class _Lane:
    """A stream with its own staging; the stream's order keeps two uses of the staging apart."""

    def __init__(self, device: Device, name: str, slabs: Mapping[str, Array]) -> None:
        self.stream = device.stream()
        self.before = device.event()  # each transfer records it again: a wait means the record before that wait
        self.staging = slabs[copy_staging(name)]
        ids = slabs[copy_ids(name)]
        self.slots = [_Slot(device, f"{name} slot {number}", ids[number]) for number in range(COPY_SLOTS)]


class PageMover:
    """Copies between the planes of a store's pools and one pinned arena.

    Args:
        device: of the planes.
        ops: its kernels gather and scatter.
        users: the stream of all others that read or write the planes.
        planes: per pool, every plane with its geometry, in ordinal order (C4.2).
        arena: (bytes,) uint8, pinned.
        slabs: `host_copy_slabs` of the planes, by name.
        fails: for tests (S53): called with the number of each copy or launch, from 0 on; True makes it fail.
    """

    def __init__(
        self, device: Device, ops: Ops, users: Stream, planes: Mapping[str, Planes], arena: Array,
        slabs: Mapping[str, Array], *, fails: Callable[[int], bool] | None = None,
    ) -> None:
        self.counters = MoverCounters()
        self.fails = fails
        self._device = device
        self._ops = ops
        self._users = users
        self._arena = arena
        self._tables: dict[str, PlaneTable] = {
            pool: ops.plane_table(pool_planes, slabs[plane_words(pool)], stream=users)
            for pool, pool_planes in planes.items()
        }
        self._out, self._in = _Lane(device, "out", slabs), _Lane(device, "in", slabs)

    def submit(
        self, direction: Direction, pool: str, page_ids: Ids, offsets: Offsets, tickets: list[Ticket]
    ) -> bool:
        """Queue the copies of one transfer after the present work of the users' stream; False: every slot is in use.

        Submits: a fence, the page ids, and for each chunk a launch and a copy per run.  Allocates nothing on the
        device.  A ticket of it joins `tickets`; if a copy cannot be queued, it waits for what was (S53).

        Args:
            page_ids: (n,) int32, distinct, n >= 1.
            offsets: (n,) int64, where the record of each page begins in the arena, in bytes.
        """
        lane = self._out if direction == "d2h" else self._in
        slot = next((slot for slot in lane.slots if slot.is_free()), None)
        if slot is None:
            self.counters.refused += 1
            return False
        ticket = Ticket(self._device.event())
        self._users.record(lane.before)
        lane.stream.wait(lane.before)
        slot.last = ticket.done
        try:
            self._move(direction, self._tables[pool], page_ids, offsets, lane, slot)
        finally:
            lane.stream.record(ticket.done)
            tickets.append(ticket)
        self.counters.transfers += 1
        self.counters.pages += page_ids.size
        return True

    def is_done(self, ticket: Ticket) -> bool:
        """Say whether the copies have run; one query."""
        return ticket.done.query()

    def wait(self, ticket: Ticket) -> None:
        """Block until the copies have run."""
        ticket.done.synchronize()

    def require_landed(self, pool: str, offsets: Offsets) -> None:
        """Refuse records that a copy still writes; a GPU checks nothing here (`Device.readable`).  (C7.4)"""
        record_bytes = self._tables[pool].record.total_bytes
        for first, last in _runs(offsets, record_bytes):
            start = offsets.item(first)
            self._device.readable(self._arena[start : start + (last - first) * record_bytes])

    # ---- helpers ----------------------------------------------------------------------------------

    def _move(
        self, direction: Direction, table: PlaneTable, page_ids: Ids, offsets: Offsets, lane: _Lane, slot: _Slot
    ) -> None:
        record_bytes, count = table.record.total_bytes, page_ids.size
        slot.ids_host[:count] = page_ids
        self._copy(slot.ids_device[:count], slot.ids_host[:count], lane.stream)
        chunk_pages = lane.staging.nbytes // record_bytes
        for start, end in pairwise([*range(0, count, chunk_pages), count]):
            ids, chunk = slot.ids_device[start:end], offsets[start:end]
            if direction == "d2h":
                self._launch()
                self._ops.pack_pages(table, ids, lane.staging, stream=lane.stream)
            for first, last in _runs(chunk, record_bytes):
                outside = chunk.item(first)
                inside = lane.staging[first * record_bytes : last * record_bytes]
                record = self._arena[outside : outside + (last - first) * record_bytes]
                self._copy(*((record, inside) if direction == "d2h" else (inside, record)), lane.stream)
                self.counters.runs += 1
            if direction == "h2d":
                self._launch()
                self._ops.unpack_pages(table, ids, lane.staging, stream=lane.stream)

    def _copy(self, destination: Array, source: Array, stream: Stream) -> None:
        self._require_success()
        self._device.copy(destination, source, stream)
        self.counters.copies += 1
        self.counters.bytes += destination.nbytes

    def _launch(self) -> None:
        self._require_success()
        self.counters.launches += 1

    def _require_success(self) -> None:
        number = self.counters.operations
        if self.fails is not None and self.fails(number):
            raise TransferFailed(f"copy {number} of a transfer", expected="a copy that can be queued", got="a failure",
                                 remedy="try again; its source is as it was", clause="C7.4")


def _runs(offsets: Offsets, record_bytes: int) -> list[tuple[int, int]]:
    """Return (first, last) of each run of records that lie together, as half-open index ranges.  (C8.3)"""
    breaks = (np.flatnonzero(offsets[1:] - offsets[:-1] != record_bytes) + 1).tolist()
    return list(pairwise([0, *breaks, offsets.size]))
