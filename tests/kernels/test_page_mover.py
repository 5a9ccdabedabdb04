"""Whole pages between planes and packed host memory: every profile, both orders, both methods.  (C8.3, C14.4)"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pagedkv.devices.protocol import Device
from pagedkv.errors import MisuseError, TransferFailed
from pagedkv.ledger.pages import LogicalPages
from pagedkv.ops.ops import Ops
from pagedkv.transfer.engine import TransferEngine
from pagedkv.transfer.mover import PageMover
from pagedkv.transfer.plan import page_runs
from pagedkv.values.planes import PackedPlanes, PageOrder, PlaneGeometry, plane_inventory
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


def mover_of(device: Device, planes: Planes, **options: Any) -> PageMover:
    return PageMover(device, Ops(device), device.stream(), {"main": planes}, **options)


def move(mover: PageMover, direction: Any, runs: Any, **options: Any) -> None:
    """Submit a transfer of the pool and wait for it."""
    ticket = mover.submit(direction, "main", runs, **options)
    assert ticket is not None
    mover.wait(ticket)


def page_bytes(plane: npt.NDArray[Any], geometry: PlaneGeometry, pages: npt.NDArray[Any] | list[int]) -> Bytes:
    """Return the listed pages as (n, bytes), whatever the order of the plane."""
    by_page = plane if geometry.order == "page-major" else plane.swapaxes(0, 1)
    return np.ascontiguousarray(by_page[pages]).view(np.uint8).reshape(len(pages), -1)


def parts(extent: Bytes, planes: Planes, pages: int) -> list[tuple[npt.NDArray[Any], PlaneGeometry]]:
    """Cut a packed extent into one array per plane."""
    layout = PackedPlanes(tuple(geometry for _, geometry in planes), pages)
    return [(extent[offset : offset + plane.span_bytes].view(plane.dtype).reshape(plane.shape), plane)
            for plane, offset in zip(layout.planes, layout.offsets_bytes, strict=True)]


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


@pytest.mark.parametrize("method", ["copies", "packed"])
@pytest.mark.parametrize("order", ["page-major", "head-major"])
@pytest.mark.parametrize("profile", PROFILES)
def test_pages_go_out_and_come_back_in_other_places(
    device: Device, noise: Any, profile: str, order: PageOrder, method: Any
) -> None:
    """C8.1, C8.3, S71: packed in logical order, restored to other ids; every other byte of the planes stays."""
    planes = build(device, noise, profile, order)
    before = host_planes(device, planes)
    mover = mover_of(device, planes, staging_pages=2)
    old, new, host = [7, 8, 2, 9, 10], [0, 4, 3, 5, 1], np.arange(5, dtype=np.int32)
    extent = device.pinned((mover.packed_bytes("main", 5),), np.uint8)
    move(mover, "d2h", page_runs(np.array(old, np.int32), host), host=extent, host_pages=5, method=method)
    for (part, packed), plane, (_, geometry) in zip(parts(extent, planes, 5), before, planes, strict=True):
        assert np.array_equal(page_bytes(part, packed, list(range(5))), page_bytes(plane, geometry, old))
    move(mover, "h2d", page_runs(host, np.array(new, np.int32)), host=extent, host_pages=5, method=method)

    assert_moved(device, planes, before, old, new)


@pytest.mark.parametrize("order", ["page-major", "head-major"])
def test_pages_move_within_the_device(device: Device, noise: Any, order: PageOrder) -> None:
    """C8.3: device to device by runs; sources and everything else keep their bytes."""
    planes = build(device, noise, "nvfp4-g16", order)
    before = host_planes(device, planes)
    old, new = [2, 3, 4], [8, 9, 0]
    move(mover_of(device, planes), "d2d", page_runs(np.array(old, np.int32), np.array(new, np.int32)))

    assert_moved(device, planes, before, old, new)


def test_a_part_of_an_extent_can_be_restored(device: Device, noise: Any) -> None:
    """C8.1: pages 1 and 2 of an extent of four, by either method."""
    planes = build(device, noise)
    mover = mover_of(device, planes)
    extent = device.pinned((mover.packed_bytes("main", 4),), np.uint8)
    extent[:] = noise(extent.size)
    for method, new in (("copies", [5, 9]), ("packed", [11, 2])):
        runs = page_runs(np.array([1, 2], np.int32), np.array(new, np.int32))
        move(mover, "h2d", runs, host=extent, host_pages=4, method=method)
        for after, (part, packed), (_, geometry) in zip(host_planes(device, planes), parts(extent, planes, 4), planes,
                                                        strict=True):
            assert np.array_equal(page_bytes(after, geometry, new), page_bytes(part, packed, [1, 2]))


def test_operations_grow_with_runs_until_the_packed_method_is_cheaper(device: Device, noise: Any) -> None:
    """S57, C8.3: one copy per run and plane; many runs become one kernel and one copy per plane and chunk."""
    planes = build(device, noise)  # 7 planes: K code and scale, V code and scale, two layers, less none
    count = len(planes)
    mover = mover_of(device, planes, staging_pages=32)
    extent = device.pinned((mover.packed_bytes("main", PAGES),), np.uint8)
    expected = {1: count, 2: 2 * count, 6: 2 * count + 1}
    for runs_count, operations in expected.items():
        ids = np.concatenate([np.arange(2) + start for start in range(0, runs_count * 2, 2)]).astype(np.int32)
        ids = np.roll(ids.reshape(-1, 2), 1, axis=0).ravel() if runs_count == 2 else _shredded(runs_count)
        before = mover.counters.operations
        runs = page_runs(ids, np.arange(ids.size, dtype=np.int32))
        move(mover, "d2h", runs, host=extent, host_pages=PAGES)

        assert (len(runs), mover.counters.operations - before) == (runs_count, operations)
    whole = sum(geometry.page_bytes for _, geometry in planes)
    ids_bytes = 6 * 4
    assert mover.counters.bytes == mover.counters.pages * whole + ids_bytes


def _shredded(runs: int) -> npt.NDArray[np.int32]:
    """Return ids with so many runs: one run of three pages, or every second page."""
    return np.arange(3, dtype=np.int32) if runs == 1 else np.arange(0, 2 * runs, 2, dtype=np.int32)


def test_a_full_lane_says_so_and_costs_nothing(device: Device, noise: Any) -> None:
    """S57: 400 pages queued against four slots: back-pressure is an answer, and cost per transfer is constant."""
    planes = build(device, noise, "bf16")
    mover = mover_of(device, planes, slots=4)
    extent = device.pinned((mover.packed_bytes("main", 1),), np.uint8)
    runs = page_runs(np.array([3], np.int32), np.array([0], np.int32))
    costs, waited = set(), 0
    for _ in range(400):
        before = (mover.counters.operations, device.driver_calls)
        ticket = mover.submit("d2h", "main", runs, host=extent, host_pages=1)
        if ticket is None:
            assert mover.counters.operations == before[0]
            waited += 1
            continue
        costs.add(mover.counters.operations - before[0])
        assert device.driver_calls - before[1] <= 4 + 3 + len(planes)  # slots asked, three fences, copies

    assert costs == {len(planes)}
    assert mover.counters.refused == waited


@pytest.mark.parametrize("failing", range(5))
@pytest.mark.parametrize("direction", ["d2h", "h2d"])
def test_a_failed_copy_publishes_nothing(device: Device, noise: Any, direction: Any, failing: int) -> None:
    """S53: the nth of five page copies fails; the transfer is aborted and unpinned, and its source unchanged."""
    planes = build(device, noise, "bf16")[:1]
    pages = LogicalPages(PAGES)
    logical = pages.describe(np.arange(PAGES, dtype=np.int32), writer=0, first_block=0)
    engine = TransferEngine(mover_of(device, planes, fails=lambda number: number == failing))
    scattered, host = np.array([1, 3, 5, 7, 9], np.int32), np.arange(5, dtype=np.int32)
    extent = device.pinned((engine.mover.packed_bytes("main", 5),), np.uint8)
    extent[:] = 1
    before = host_planes(device, planes)
    sides = (scattered, host) if direction == "d2h" else (host, scattered)
    transfer = engine.ledger.plan(direction, "main", pages, logical[scattered], *sides, host_pages=5)
    with pytest.raises(TransferFailed, match=f"copy {failing} of a transfer"):
        engine.submit(transfer, extent, method="copies")
    with pytest.raises(MisuseError, match="publish of transfer"):
        engine.publish(transfer)
    while engine.ledger.open:
        assert engine.poll() == []

    assert (transfer.state, pages.pins_total, engine.ledger.counters.published) == ("aborted", 0, 0)
    assert engine.mover.counters.copies == failing
    if direction == "d2h":
        assert np.array_equal(before[0], host_planes(device, planes)[0])


def test_transfers_that_cannot_be_served_are_refused_before_anything_is_queued(device: Device, noise: Any) -> None:
    """A small extent, no extent, and the packed method for scattered host pages; a second submit."""
    planes = build(device, noise, "bf16")
    mover = mover_of(device, planes)
    extent = device.pinned((mover.packed_bytes("main", 3),), np.uint8)
    gap = page_runs(np.array([0, 1], np.int32), np.array([0, 2], np.int32))
    before = device.driver_calls
    for host, pages, method in ((None, 3, None), (extent[:-1], 3, None), (extent, 4, None)):
        with pytest.raises(MisuseError, match="a host extent of"):
            mover.submit("d2h", "main", gap, host=host, host_pages=pages, method=method)
    with pytest.raises(MisuseError, match="one range of host pages"):
        mover.submit("d2h", "main", gap, host=extent, host_pages=3, method="packed")

    assert device.driver_calls == before


def test_packing_refuses_what_it_cannot_check_on_the_device(device: Device, noise: Any) -> None:
    """C14.2: a packed array that is too small, of another type, or that overlaps a plane; no page is nothing to do."""
    planes = build(device, noise, "bf16")
    ops, stream = Ops(device), device.stream()
    page_ids = device.zeros((2,), np.int32)
    needed = PackedPlanes(tuple(geometry for _, geometry in planes), 2).total_bytes
    packed = device.zeros((needed,), np.uint8)
    for bad, match in ((packed[:-256], "at least"), (packed.view(np.int8), "the packed pages")):
        for op in (ops.pack_pages, ops.unpack_pages):
            with pytest.raises(MisuseError, match=match):
                op(planes, page_ids, bad, stream=stream)
    with pytest.raises(MisuseError, match="share no byte"):
        ops.pack_pages(planes, page_ids, planes[0][0].view(np.uint8).reshape(-1), stream=stream)
    before = device.driver_calls
    ops.pack_pages(planes, page_ids[:0], packed, stream=stream)

    assert device.driver_calls == before
