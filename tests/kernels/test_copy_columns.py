"""copy_columns: the committed columns of a page, and not one byte behind them.  (C10.5, C14.4)

That a forked tail then decodes as a fresh one does is a claim of `tests/test_sharing.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedkv.devices.protocol import Device
from pagedkv.errors import MisuseError
from pagedkv.values.planes import PageOrder, plane_inventory
from pagedkv.values.profiles import HEAD_DIMS_QUANTIZED, PROFILES
from tests.kernels.arrays import Rng, scattered_table
from tests.kernels.paged_cache import HostPlanes, PagedCache, assert_same_planes

ORDERS: list[PageOrder] = ["page-major", "head-major"]
SHAPES = [
    (profile.name, head_dim) for profile in PROFILES.values()
    for head_dim in (HEAD_DIMS_QUANTIZED if profile.is_quantized else (*HEAD_DIMS_QUANTIZED, 80))
]
COLUMNS = (1, 2, 31, 33, 40, 63, 64)
PAGES = 7


def noisy_cache(device: Device, rng: Rng, profile: str, **choices: Any) -> PagedCache:
    """Return a cache of PAGES pages and three heads, full of noise."""
    return PagedCache.build(device, profile, kv_heads=3, table=np.array([[PAGES - 2]], np.int32), rng=rng, **choices)


def invert_page(cache: PagedCache, source: int, destination: int) -> None:
    """Give the destination the complement of every byte of the source: one that is copied shows."""
    for plane, geometry in cache.view.planes:
        host = cache.get(plane)
        pages = host if geometry.order == "page-major" else host.swapaxes(0, 1)
        pages[destination] = ~pages[source]
        cache.device.copy(plane, host, cache.stream)
        cache.stream.synchronize()


def with_columns(planes: HostPlanes, order: PageOrder, *, source: int, destination: int, columns: int) -> HostPlanes:
    """Return host planes as they must be after the copy."""
    expected = {role: plane.copy() for role, plane in planes.items()}
    for plane in expected.values():
        pages = plane if order == "page-major" else plane.swapaxes(0, 1)
        pages[destination, :, :columns] = pages[source, :, :columns]
    return expected


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("profile", "head_dim"), SHAPES)
def test_columns_and_no_others_arrive(device: Device, rng: Rng, profile: str, head_dim: int, order: PageOrder) -> None:
    """C10.5: the destination's rest, the source, other heads and other pages; ids in any order, first and last too."""
    cache = noisy_cache(device, rng, profile, head_dim=head_dim, order=order)
    for columns in COLUMNS:
        source, destination = (int(page) for page in rng.permutation(PAGES)[:2])
        if columns in (33, 64):
            source, destination = (0, PAGES - 1) if columns == 33 else (PAGES - 1, 0)
        invert_page(cache, source, destination)
        before = cache.host_planes()

        cache.ops.copy_columns(cache.view.planes, source, destination, columns, stream=cache.stream)

        expected = with_columns(before, order, source=source, destination=destination, columns=columns)
        assert_same_planes(expected, cache.host_planes())


@pytest.mark.deferred
@pytest.mark.parametrize("order", ORDERS)
def test_a_captured_copy_reads_the_page_anew_at_each_replay(device: Device, rng: Rng, order: PageOrder) -> None:
    """C15.1: one node per plane; the numbers are frozen and the bytes are not."""
    cache = noisy_cache(device, rng, "k8v4", order=order)
    cache.ops.prepare("k8v4", 64)
    invert_page(cache, 1, 4)
    before = cache.host_planes()

    device.begin_capture(cache.stream)
    cache.ops.copy_columns(cache.view.planes, 1, 4, 33, stream=cache.stream)
    graph = device.end_capture(cache.stream)

    assert_same_planes(before, cache.host_planes())
    for _ in range(2):
        graph.launch(cache.stream)
        assert_same_planes(with_columns(before, order, source=1, destination=4, columns=33), cache.host_planes())
        for plane, geometry in cache.view.planes:
            noise = rng.integers(0, 256, geometry.span_bytes, dtype=np.uint8)
            device.copy(plane, noise.view(geometry.dtype).reshape(geometry.shape), cache.stream)
        before = cache.host_planes()


@pytest.mark.eager_only  # the deferred device compares what a launch may write: 4 GiB of mapped memory here
@pytest.mark.parametrize("order", ORDERS)
def test_columns_behind_4_gib_are_copied(device: Device, order: PageOrder) -> None:
    """C3.10, S72: a plane beyond 2^32 bytes, mapped and not filled; from its last page down and from its first up."""
    if device.name != "cpu":
        pytest.skip("only the cpu device maps memory that nobody touches for nothing")
    heads, row_bytes = 8, 4
    last = 2**32 // (64 * heads * row_bytes) + 2
    geometry = plane_inventory("nvfp4-g16", layers=1, kv_heads=heads, head_dim=64, pages=last + 1, order=order)[2]
    plane: Any = device.zeros(geometry.shape, geometry.dtype)
    assert plane.nbytes > 2**32
    pages = plane if order == "page-major" else plane.swapaxes(0, 1)
    rng = np.random.default_rng(72)
    stream, cache = device.stream(), PagedCache.build(device, "bf16", table=scattered_table(1, 1), rng=None)
    for source, destination in ((last, last - 1), (1, last - 2), (last - 1, 0)):
        content = rng.integers(1, 256, pages[source].shape, dtype=np.uint8)
        pages[source], pages[destination] = content, ~content

        cache.ops.copy_columns([(plane, geometry)], source, destination, 33, stream=stream)

        stream.synchronize()
        np.testing.assert_array_equal(content, pages[source])
        np.testing.assert_array_equal(content[:, :33], pages[destination][:, :33])
        np.testing.assert_array_equal(~content[:, 33:], pages[destination][:, 33:])


# ---- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("numbers", "name"), [
    ((-1, 1, 5), "source page"), ((PAGES, 1, 5), "source page"), ((1.0, 2, 5), "source page"),
    ((0, -1, 5), "destination page"), ((0, PAGES, 5), "destination page"), ((0, True, 5), "destination page"),
    ((0, "1", 5), "destination page"), ((2, 2, 5), "another page than source 2"),
    ((0, 1, 0), "number of copied columns"), ((0, 1, 65), "number of copied columns"),
    ((0, 1, -3), "number of copied columns"), ((0, 1, np.float32(5)), "number of copied columns"),
    ((0, 1, None), "number of copied columns"),
])  # fmt: skip
def test_numbers_of_no_columns_are_refused(device: Device, rng: Rng, numbers: tuple[Any, Any, Any], name: str) -> None:
    """C10.5: two pages of the pool and 1 to 64 columns; no byte changes."""
    cache = noisy_cache(device, rng, "int8-g64")
    before = cache.host_planes()

    with pytest.raises(MisuseError, match=name) as refusal:
        cache.ops.copy_columns(cache.view.planes, *numbers, stream=cache.stream)

    assert refusal.value.clause == "C10.5"
    assert_same_planes(before, cache.host_planes())


def test_integers_of_numpy_are_integers(device: Device, rng: Rng) -> None:
    """Ledgers count in NumPy: 64 columns of a plane fit no int8, and a page id comes from an array."""
    cache = noisy_cache(device, rng, "bf16")
    before = cache.host_planes()

    cache.ops.copy_columns(cache.view.planes, np.int32(5), np.int64(2), np.int8(64), stream=cache.stream)  # type: ignore[arg-type]

    expected = with_columns(before, "page-major", source=5, destination=2, columns=64)
    assert_same_planes(expected, cache.host_planes())


@pytest.mark.parametrize("fault", ["geometry", "pages", "overlap"])
def test_planes_that_do_not_fit_are_refused_before_the_first_is_copied(device: Device, rng: Rng, fault: str) -> None:
    """C14.2: another geometry, a page that the second plane has not, and a plane twice."""
    cache = noisy_cache(device, rng, "bf16")
    before = cache.host_planes()
    fewer = plane_inventory("bf16", layers=1, kv_heads=3, head_dim=64, pages=PAGES - 1, order="page-major")[1]
    first, second = cache.view.planes
    second = {"geometry": (second[0][1:], second[1]), "pages": (second[0][1:], fewer), "overlap": first}[fault]
    match = {"geometry": "plane v_code", "pages": f"from 0 to {PAGES - 2}", "overlap": "share no byte"}[fault]

    with pytest.raises(MisuseError, match=match):
        cache.ops.copy_columns([first, second], 1, PAGES - 1, 5, stream=cache.stream)

    assert_same_planes(before, cache.host_planes())


def test_no_planes_are_nothing_to_do(device: Device, rng: Rng) -> None:
    """An empty list is legal, as in every op of pages; the numbers are checked all the same."""
    cache = noisy_cache(device, rng, "bf16")

    cache.ops.copy_columns([], 0, 1, 5, stream=cache.stream)
    with pytest.raises(MisuseError, match="number of copied columns"):
        cache.ops.copy_columns([], 0, 1, 65, stream=cache.stream)
