"""Whole pages between planes and records on the Host: every profile, both orders, any places.  (C8.1, C8.3, C14.4)"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pagedkv.devices.protocol import Device
from pagedkv.errors import MisuseError, TransferFailed
from pagedkv.ops.ops import Ops
from pagedkv.ops.page_moves import PlaneTable
from pagedkv.transfer.digest import PageFingerprints
from pagedkv.transfer.mover import PageMover, Ticket
from pagedkv.values import layout
from pagedkv.values.layout import host_copy_slabs
from pagedkv.values.planes import PageOrder, PageRecord, PlaneGeometry, plane_inventory
from pagedkv.values.profiles import PROFILES
from tests.kernels.arrays import to_host

PAGES = 12
Planes = list[tuple[Any, PlaneGeometry]]
Bytes = npt.NDArray[np.uint8]

pytestmark = pytest.mark.deferred


@pytest.fixture
def noise(rng: np.random.Generator) -> Any:
    """A function that gives random bytes."""
    return lambda count: rng.integers(0, 256, count, dtype=np.uint8)


def build(device: Device, noise: Any, profile: str = "k8v4", order: PageOrder = "page-major") -> Planes:
    """Make the planes of a pool of two layers, filled with noise."""
    planes: Planes = []
    stream = device.stream()
    for geometry in plane_inventory(profile, layers=2, kv_heads=2, head_dim=64, pages=PAGES, order=order):
        plane = device.empty(geometry.shape, geometry.dtype, name=f"{geometry.role} {geometry.layer}")
        device.copy(plane, noise(geometry.span_bytes).view(geometry.dtype).reshape(geometry.shape), stream)
        planes.append((plane, geometry))
    stream.synchronize()
    return planes


class Mover:
    """A mover of one pool, its arena of noise, and the fingerprints of both."""

    def __init__(self, device: Device, planes: Planes, noise: Any, *, records: int = PAGES, **options: Any) -> None:
        geometries = tuple(geometry for _, geometry in planes)
        self.device, self.record = device, PageRecord(geometries)
        self.arena = device.pinned((records * self.record.total_bytes,), np.uint8, name="host arena")
        self.arena[:] = noise(self.arena.size)
        slabs = {slab.name: device.empty(slab.shape, slab.dtype, name=slab.name)
                 for slab in host_copy_slabs({"main": geometries})}
        self.users = device.stream()
        self.tickets: list[Ticket] = []
        self.mover = PageMover(device, Ops(device), self.users, {"main": planes}, self.arena, slabs, **options)
        self.fingerprints = PageFingerprints(device, self.users, {"main": planes})

    def offsets(self, places: list[int]) -> npt.NDArray[np.int64]:
        """Return where records begin, by their number in the arena."""
        return np.array(places, np.int64) * self.record.total_bytes

    def submit(self, direction: Any, pages: list[int], places: list[int]) -> bool:
        """Submit a transfer between page groups and records."""
        return self.mover.submit(direction, "main", np.array(pages, np.int32), self.offsets(places), self.tickets)

    def move(self, direction: Any, pages: list[int], places: list[int]) -> None:
        """Submit a transfer, and wait for it."""
        assert self.submit(direction, pages, places)
        self.mover.wait(self.tickets.pop())
        self.mover.require_landed("main", self.offsets(places))

    def payloads(self, place: int) -> list[Bytes]:
        """Return the payload of each plane in one record."""
        start = place * self.record.total_bytes
        return [self.arena[start + at : start + at + geometry.page_bytes]
                for geometry, at in zip(self.record.planes, self.record.offsets_bytes, strict=True)]


def page_bytes(plane: npt.NDArray[Any], geometry: PlaneGeometry, pages: npt.NDArray[Any] | list[int]) -> Bytes:
    """Return the listed pages as (n, bytes), whatever the order of the plane."""
    by_page = plane if geometry.order == "page-major" else plane.swapaxes(0, 1)
    return np.ascontiguousarray(by_page[pages]).view(np.uint8).reshape(len(pages), -1)


def host_planes(device: Device, planes: Planes) -> list[npt.NDArray[Any]]:
    """Copy every plane to the host."""
    stream = device.stream()
    return [to_host(device, stream, plane) for plane, _ in planes]


def assert_moved(device: Device, planes: Planes, before: list[Any], old: list[int], new: list[int]) -> None:
    """Compare the pages `new` with what `old` held before; every other page holds what it held."""
    for after, plane, (_, geometry) in zip(host_planes(device, planes), before, planes, strict=True):
        assert np.array_equal(page_bytes(after, geometry, new), page_bytes(plane, geometry, old))
        others = [page for page in range(PAGES) if page not in new]
        assert np.array_equal(page_bytes(after, geometry, others), page_bytes(plane, geometry, others))


@pytest.mark.parametrize("chunk_pages", [2, 32])
@pytest.mark.parametrize("order", ["page-major", "head-major"])
@pytest.mark.parametrize("profile", PROFILES)
def test_pages_go_out_and_come_back_in_other_places(
    device: Device, noise: Any, profile: str, order: PageOrder, chunk_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C8.1, C8.3, S71: one record a page, whatever the order; every other byte of planes and arena stays."""
    monkeypatch.setattr(layout, "COPY_STAGING_PAGES", chunk_pages)
    planes = build(device, noise, profile, order)
    before, on = host_planes(device, planes), Mover(device, planes, noise)
    old, new, places = [7, 8, 2, 9, 10], [0, 4, 3, 5, 1], [3, 4, 9, 0, 6]
    arena_before = on.arena.copy()
    on.move("d2h", old, places)
    for page, place in zip(old, places, strict=True):
        for payload, plane, (_, geometry) in zip(on.payloads(place), before, planes, strict=True):
            assert np.array_equal(payload, page_bytes(plane, geometry, [page])[0])
    others = [place for place in range(PAGES) if place not in places]
    assert all(np.array_equal(*pair) for place in others for pair in zip(
        on.payloads(place), [arena_before[part.ctypes.data - on.arena.ctypes.data:][: part.size]
                             for part in on.payloads(place)], strict=True))
    columns = np.array([64, 3, 64, 1, 33], np.int32)
    ids = np.array(old, np.int32)
    assert np.array_equal(on.fingerprints.fingerprint("main", ids, columns),
                          on.fingerprints.fingerprint_records("main", on.arena, on.offsets(places), columns))
    on.move("h2d", new, places)

    assert_moved(device, planes, before, old, new)


def test_a_part_of_what_went_out_together_comes_back_alone(device: Device, noise: Any) -> None:
    """C8.1: records 1 and 3 of five in a row; the others may be overwritten meanwhile."""
    planes = build(device, noise)
    before, on = host_planes(device, planes), Mover(device, planes, noise)
    on.move("d2h", [0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    on.move("d2h", [11, 11, 11], [0, 2, 4])
    on.move("h2d", [8, 9], [1, 3])

    assert_moved(device, planes, before, [1, 3], [8, 9])


def test_operations_grow_with_chunks_and_runs(device: Device, noise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """S57, C8.3: the ids, one launch a chunk, one copy per run of records; never per plane or page group."""
    monkeypatch.setattr(layout, "COPY_STAGING_PAGES", 4)
    planes = build(device, noise)
    on, ids_bytes = Mover(device, planes, noise), 6 * 4
    for direction in ("d2h", "h2d"):
        for places, operations in (([0], 3), ([2, 3, 4, 5], 3), ([5, 6, 7, 8, 9, 10], 5), ([0, 2, 4, 6, 8, 10], 9)):
            counters = on.mover.counters
            first, pages_before, bytes_before = counters.operations, counters.pages, counters.bytes
            on.move(direction, [9, 1, 8, 3, 7, 5][: len(places)], places)
            assert counters.operations - first == operations
            assert counters.pages - pages_before == len(places)
    assert counters.bytes - bytes_before == 6 * on.record.total_bytes + ids_bytes


def test_a_full_lane_says_so_and_costs_nothing(device: Device, noise: Any) -> None:
    """S57: 400 pages queued against four slots: back-pressure is an answer, and cost per transfer is constant."""
    on = Mover(device, build(device, noise, "bf16"), noise)
    costs, waited = set(), 0
    for _ in range(400):
        before = (on.mover.counters.operations, device.driver_calls)
        if not on.submit("d2h", [3], [0]):
            assert on.mover.counters.operations == before[0]
            waited += 1
            continue
        costs.add(on.mover.counters.operations - before[0])
        assert device.driver_calls - before[1] <= 4 + 3 + 3  # slots asked, three fences, ids, launch and copy

    assert costs == {3}
    assert on.mover.counters.refused == waited


@pytest.mark.parametrize("failing", range(7))
@pytest.mark.parametrize("direction", ["d2h", "h2d"])
def test_a_failed_copy_says_how_far_it_came(device: Device, noise: Any, direction: Any, failing: int) -> None:
    """S53: the nth operation fails; the ticket of the error waits for those before it, and the source is as it was."""
    planes = build(device, noise, "bf16")
    on = Mover(device, planes, noise, fails=lambda number: number == failing)
    before, arena = host_planes(device, planes), on.arena.copy()
    with pytest.raises(TransferFailed, match=f"copy {failing} of a transfer") :
        on.submit(direction, [1, 3, 5, 7, 9], [0, 2, 4, 6, 8])
    (ticket,) = on.tickets
    on.mover.wait(ticket)

    assert on.mover.is_done(ticket)
    assert on.mover.counters.operations == failing
    if direction == "d2h":
        assert all(np.array_equal(*pair) for pair in zip(before, host_planes(device, planes), strict=True))
    else:
        assert np.array_equal(arena, on.arena)


def test_packing_refuses_what_it_cannot_check_on_the_device(device: Device, noise: Any) -> None:
    """C14.2: records that are too small, of another type, or that overlap a plane; no page is nothing to do."""
    planes = build(device, noise, "bf16")
    ops, stream = Ops(device), device.stream()
    with pytest.raises(MisuseError, match="the words of a plane table"):
        ops.plane_table(planes, device.zeros((len(planes), 5), np.int64), stream=stream)
    table = ops.plane_table(planes, device.zeros((len(planes), 6), np.int64), stream=stream)
    page_ids = device.zeros((2,), np.int32)
    records = device.zeros((2 * table.record.total_bytes,), np.uint8)
    for bad, match in ((records[:-256], "at least"), (records.view(np.int8), "the records")):
        for op in (ops.pack_pages, ops.unpack_pages):
            with pytest.raises(MisuseError, match=match):
                op(table, page_ids, bad, stream=stream)
    with pytest.raises(MisuseError, match="share no byte"):
        ops.pack_pages(table, page_ids, planes[0][0].view(np.uint8).reshape(-1), stream=stream)
    wrong: Any = planes
    with pytest.raises(MisuseError, match="what plane_table returned"):
        ops.pack_pages(wrong, page_ids, records, stream=stream)
    before = device.driver_calls
    ops.pack_pages(table, page_ids[:0], records, stream=stream)

    assert device.driver_calls == before
    assert isinstance(table, PlaneTable)
