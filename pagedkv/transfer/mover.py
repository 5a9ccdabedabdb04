"""PageMover: executes copies of whole page groups on streams of its own, beside decode.  (C8.3, C12.1, C14.3)

    users' stream   ... writers of the source, readers of the destination ──record(before)   wait(done) ── next users
                                                                                  │             │
    lane stream                                                              wait(before) ─ copies ─ record(done)

The mover makes both fences: `submit` queues the copies after all present work of the users' stream, and `order_before`
makes its next work run after the copies.  One lane copies device to host, the other lane all copies that write the
device, so the two directions overlap.

Two methods copy the same bytes.  *copies*: one copy per run and plane (and head, if head-major).  *packed*: a kernel
gathers or scatters the pages through a packed staging buffer of the lane, so that many runs become one copy per plane.
`submit` chooses the method with fewer operations.  The kernel gets the ids through a pinned slot.

A lane has a fixed number of slots.  If all are in use, `submit` returns None and queues nothing; no other limit exists
(S57).  A slot is used again only after the copies that read it have run.

This file knows planes and streams, and no ledger and no pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from pagedkv.devices.protocol import Array, Device, Event, Stream
from pagedkv.errors import MisuseError, TransferFailed
from pagedkv.ops.ops import Ops
from pagedkv.transfer.plan import PageRun
from pagedkv.values.planes import PackedPlanes, PlaneGeometry
from pagedkv.values.quantities import ceil_div

Planes = Sequence[tuple[Array, PlaneGeometry]]
Method = Literal["copies", "packed"]

SLOTS_PER_LANE = 4
STAGING_PAGES = 32


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
    has_failed: bool = False


class _Slot:
    """Pinned page ids and their device copy; `last` is recorded behind the last copies that used them."""

    def __init__(self, device: Device, name: str, ids_max: int) -> None:
        self.ids_host = device.pinned((ids_max,), np.int32, name=f"{name} ids host")
        self.ids_device = device.empty((ids_max,), np.int32, name=f"{name} ids")
        self.last: Event | None = None

    def is_free(self) -> bool:
        return self.last is None or self.last.query()


class _Lane:
    """A stream with its own staging; the stream's order keeps two uses of the staging apart."""

    def __init__(self, device: Device, name: str, *, slots: int, ids_max: int, staging_bytes: int) -> None:
        self.stream = device.stream()
        self.before = device.event()  # each transfer records it again: a wait means the record before that wait
        self.staging = device.empty((staging_bytes,), np.uint8, name=f"{name} staging")
        self.slots = [_Slot(device, f"{name} slot {number}", ids_max) for number in range(slots)]


class PageMover:
    """Copies between the planes of a store's pools and packed host memory.

    Args:
        device: of the planes.
        ops: its kernels serve the packed method.
        users: the stream of all others that read or write the planes.
        planes: per pool, every plane with its geometry, in ordinal order (C4.2).
        slots: transfers in flight per lane.
        staging_pages: pages that one chunk of the packed method holds.
        fails: for tests (S53): called with the number of each copy or launch, from 0 on; True makes it fail.
    """

    def __init__(
        self, device: Device, ops: Ops, users: Stream, planes: Mapping[str, Planes], *, slots: int = SLOTS_PER_LANE,
        staging_pages: int = STAGING_PAGES, fails: Callable[[int], bool] | None = None,
    ) -> None:
        self.counters = MoverCounters()
        self._device = device
        self._ops = ops
        self._users = users
        self._planes = {pool: tuple(pool_planes) for pool, pool_planes in planes.items()}
        self._staging_pages = staging_pages
        self._fails = fails
        ids_max = max(geometry.pages for pool_planes in self._planes.values() for _, geometry in pool_planes)
        staging_bytes = max(
            PackedPlanes(tuple(geometry for _, geometry in pool_planes), staging_pages).total_bytes
            for pool_planes in self._planes.values()
        )
        self._out = _Lane(device, "out", slots=slots, ids_max=ids_max, staging_bytes=staging_bytes)
        self._in = _Lane(device, "in", slots=slots, ids_max=ids_max, staging_bytes=staging_bytes)

    def packed_bytes(self, pool: str, pages: int) -> int:
        """Return the bytes of a host extent of so many pages.  (C5.7)"""
        return self._layout(pool, pages).total_bytes

    def submit(
        self, direction: Literal["d2h", "h2d", "d2d"], pool: str, runs: Sequence[PageRun], *,
        host: npt.NDArray[np.uint8] | None = None, host_pages: int = 0, method: Method | None = None,
    ) -> Ticket | None:
        """Queue the copies of one transfer after the present work of the users' stream; None: every slot is in use.

        Submits: 2 fences, the copies and the launches.  Allocates nothing on the device.  If a copy cannot be queued,
        field `ticket` of TransferFailed waits for the queued copies (S53).

        host: (bytes,) uint8, pinned, laid out as PackedPlanes of `host_pages` pages; None for "d2d".
        method: None chooses the one with fewer operations; "packed" needs one range of host pages.
        """
        self.require_extent(pool, direction, host, host_pages)
        lane = self._out if direction == "d2h" else self._in
        slot = next((slot for slot in lane.slots if slot.is_free()), None)
        if slot is None:
            self.counters.refused += 1
            return None
        chosen = self._choose_method(direction, pool, runs, method)
        before, ticket = lane.before, Ticket(self._device.event())
        self._users.record(before)
        lane.stream.wait(before)
        slot.last = ticket.done
        try:
            if chosen == "packed":
                assert host is not None
                self._move_packed(direction, pool, runs, host, host_pages, lane, slot)
            else:
                self._move_copies(direction, pool, runs, host, host_pages, lane.stream)
        except TransferFailed as failed:
            ticket.has_failed = True
            failed.fields["ticket"] = ticket
            raise
        finally:
            lane.stream.record(ticket.done)
        self.counters.transfers += 1
        self.counters.runs += len(runs)
        self.counters.pages += sum(run.count for run in runs)
        return ticket

    def order_before(self, ticket: Ticket, stream: Stream) -> None:
        """Make the next work of `stream` run after the copies."""
        stream.wait(ticket.done)

    def is_done(self, ticket: Ticket) -> bool:
        """Say whether the copies have run; one query."""
        return ticket.done.query()

    def wait(self, ticket: Ticket) -> None:
        """Block until the copies have run."""
        ticket.done.synchronize()

    def require_landed(
        self, pool: str, runs: Sequence[PageRun], host: npt.NDArray[np.uint8], host_pages: int
    ) -> None:
        """Refuse host pages that a copy still writes; a GPU checks nothing here (`Device.readable`).  (C7.4)"""
        layout = self._layout(pool, host_pages)
        for geometry, extent in zip(layout.planes, self._packed_arrays(pool, host, host_pages), strict=True):
            for run in runs:
                for piece in _pieces(extent, geometry, run.destination, run.count):
                    self._device.readable(piece)

    def require_extent(self, pool: str, direction: str, host: npt.NDArray[np.uint8] | None, pages: int) -> None:
        """Refuse a host array that cannot be the extent of so many pages; "d2d" has no extent.  (C8.1)"""
        if direction == "d2d":
            return
        needed = self.packed_bytes(pool, pages)
        if host is None or host.dtype != np.uint8 or host.ndim != 1 or host.nbytes < needed:
            got = "none" if host is None else f"{host.dtype} {host.shape}"
            raise MisuseError(f"a {direction} transfer of pool {pool}",
                              expected=f"a host extent of {needed} bytes for {pages} pages", got=got,
                              remedy="size it with packed_bytes", clause="C8.1")

    # ---- copies -----------------------------------------------------------------------------------

    def _move_copies(
        self, direction: str, pool: str, runs: Sequence[PageRun], host: npt.NDArray[np.uint8] | None, host_pages: int,
        stream: Stream,
    ) -> None:
        planes = self._planes[pool]
        packed = [None] * len(planes) if host is None else self._packed_arrays(pool, host, host_pages)
        for (plane, geometry), extent in zip(planes, packed, strict=True):
            source = extent if direction == "h2d" else plane
            destination = extent if direction == "d2h" else plane
            for run in runs:
                for target, origin in zip(
                    _pieces(destination, geometry, run.destination, run.count),
                    _pieces(source, geometry, run.source, run.count), strict=True,
                ):
                    self._copy(target, origin, stream)

    def _move_packed(
        self, direction: str, pool: str, runs: Sequence[PageRun], host: npt.NDArray[np.uint8], host_pages: int,
        lane: _Lane, slot: _Slot,
    ) -> None:
        ids = np.concatenate([
            np.arange(first, first + run.count, dtype=np.int32)
            for run in runs for first in ((run.source if direction == "d2h" else run.destination),)
        ])
        host_first = runs[0].destination if direction == "d2h" else runs[0].source
        slot.ids_host[: ids.size] = ids
        self._copy(slot.ids_device[: ids.size], slot.ids_host[: ids.size], lane.stream)
        planes = self._planes[pool]
        for start, end in pairwise([*range(0, ids.size, self._staging_pages), ids.size]):
            chunk, chunk_ids = self._layout(pool, end - start), slot.ids_device[start:end]
            if direction == "d2h":
                self._launch(len(planes))
                self._ops.pack_pages(planes, chunk_ids, lane.staging, stream=lane.stream)
            staged = _packed_views(lane.staging, chunk)
            extents = self._packed_arrays(pool, host, host_pages)
            for geometry, inside, extent in zip(chunk.planes, staged, extents, strict=True):
                for staging_piece, host_piece in zip(
                    _pieces(inside, geometry, 0, end - start),
                    _pieces(extent, geometry, host_first + start, end - start), strict=True,
                ):
                    pair = (host_piece, staging_piece) if direction == "d2h" else (staging_piece, host_piece)
                    self._copy(*pair, lane.stream)
            if direction == "h2d":
                self._launch(len(planes))
                self._ops.unpack_pages(planes, chunk_ids, lane.staging, stream=lane.stream)

    def _copy(self, destination: Array, source: Array, stream: Stream) -> None:
        self._require_success()
        self._device.copy(destination, source, stream)
        self.counters.copies += 1
        self.counters.bytes += destination.nbytes

    def _launch(self, launches: int) -> None:
        self._require_success()
        self.counters.launches += launches

    def _require_success(self) -> None:
        number = self.counters.operations
        if self._fails is not None and self._fails(number):
            raise TransferFailed(f"copy {number} of a transfer", expected="a copy that can be queued", got="a failure",
                                 remedy="abort the transfer; its source is as it was", clause="C7.4", ticket=None)

    # ---- methods ----------------------------------------------------------------------------------

    def _choose_method(self, direction: str, pool: str, runs: Sequence[PageRun], method: Method | None) -> Method:
        host_starts = [run.destination if direction == "d2h" else run.source for run in runs]
        can_pack = direction != "d2d" and all(
            start + run.count == following
            for start, run, following in zip(host_starts, runs, host_starts[1:], strict=False)
        )
        if method == "packed" and not can_pack:
            raise MisuseError(f"the packed method of a {direction} transfer", expected="one range of host pages",
                              got=f"pages from {host_starts} on", remedy="leave the method open", clause="C8.3")
        if method is not None or not can_pack:
            return method or "copies"
        pages = sum(run.count for run in runs)
        pieces = sum(1 if geometry.order == "page-major" else geometry.kv_heads for _, geometry in self._planes[pool])
        chunks = ceil_div(pages, self._staging_pages)
        packed = 1 + chunks * (pieces + len(self._planes[pool]))
        return "packed" if packed < len(runs) * pieces else "copies"

    def _layout(self, pool: str, pages: int) -> PackedPlanes:
        return PackedPlanes(tuple(geometry for _, geometry in self._planes[pool]), pages)

    def _packed_arrays(self, pool: str, host: npt.NDArray[np.uint8], pages: int) -> list[Array]:
        return _packed_views(host, self._layout(pool, pages))


def _packed_views(packed: Array, layout: PackedPlanes) -> list[Array]:
    """Return every plane's part of packed bytes as an array of its geometry."""
    return [
        packed[offset : offset + plane.span_bytes].view(plane.dtype).reshape(plane.shape)
        for plane, offset in zip(layout.planes, layout.offsets_bytes, strict=True)
    ]


def _pieces(plane: Array, geometry: PlaneGeometry, first: int, count: int) -> Iterator[Array]:
    """Yield the contiguous parts of pages [first, first + count): one, or one per head if head-major."""
    if geometry.order == "page-major":
        yield plane[first : first + count]
    else:
        for head in range(geometry.kv_heads):
            yield plane[head, first : first + count]
