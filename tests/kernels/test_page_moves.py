"""zero_pages, fill_pages and the BF16 conversions.  (C14.4)"""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv import codecs
from pagedkv.devices.protocol import Device
from pagedkv.errors import MisuseError
from pagedkv.ops.ops import Ops
from pagedkv.ops.page_moves import set_entries
from pagedkv.values.planes import PageOrder
from pagedkv.values.profiles import PROFILES
from tests.kernels.arrays import Rng, scattered_table, to_device, to_host
from tests.kernels.paged_cache import PagedCache, assert_same_planes


@pytest.mark.parametrize("order", ["page-major", "head-major"])
@pytest.mark.parametrize("profile", PROFILES)
def test_zeroed_pages_are_zero_and_neighbours_are_not(device: Device, rng: Rng, profile: str, order: PageOrder) -> None:
    """C14.4: every byte of pages 1 and 3 in every plane; pages 0, 2 and 4 keep theirs."""
    cache = PagedCache.build(device, profile, kv_heads=3, order=order, table=scattered_table(1, 2), rng=rng)
    expected = cache.host_planes()
    for plane in expected.values():
        (plane if order == "page-major" else plane.swapaxes(0, 1))[[1, 3]] = 0

    cache.ops.zero_pages(cache.view.planes, cache.ints([3, 1]), stream=cache.stream)

    assert_same_planes(expected, cache.host_planes())


@pytest.mark.parametrize("order", ["page-major", "head-major"])
def test_filled_pages_hold_their_planes_word_and_neighbours_do_not(device: Device, rng: Rng, order: PageOrder) -> None:
    """C14.4: every byte of pages 1 and 3, a word for each plane; pages 0, 2 and 4 keep theirs."""
    cache = PagedCache.build(device, "k8v4", kv_heads=3, order=order, table=scattered_table(1, 2), rng=rng)
    expected = cache.host_planes()
    words = [0x01020304, 0xFFFFFFFE, 0x7E007E00, 0]
    for plane, word in zip(expected.values(), words, strict=True):
        pages = plane if order == "page-major" else plane.swapaxes(0, 1)
        pages[[1, 3]] = np.tile(np.array([word], np.uint32).view(plane.dtype), plane.shape[3])[: plane.shape[3]]

    cache.ops.fill_pages(cache.view.planes, cache.ints([3, 1]), words, stream=cache.stream)

    assert_same_planes(expected, cache.host_planes())


@pytest.mark.parametrize("words", [[], [0, 0], [-1], [1 << 32]])
def test_words_that_do_not_fit_are_refused(device: Device, rng: Rng, words: list[int]) -> None:
    """C14.4: one pattern of 32 bits per plane; nothing is written."""
    cache = PagedCache.build(device, "bf16", table=scattered_table(1, 1), rng=rng)
    before = cache.host_planes()

    with pytest.raises(MisuseError, match="1 numbers of 32 bits"):
        cache.ops.fill_pages(cache.view.planes[:1], cache.ints([1]), words, stream=cache.stream)

    assert_same_planes(before, cache.host_planes())


def test_no_pages_no_planes_and_planes_of_another_geometry_write_nothing(device: Device, rng: Rng) -> None:
    """An empty list of either kind is legal; all planes are checked before the first launch.  (C14.2)"""
    cache = PagedCache.build(device, "bf16", table=scattered_table(1, 1), rng=rng)
    before = cache.host_planes()
    first, (plane, geometry) = cache.view.planes

    cache.ops.zero_pages([first], cache.ints([]), stream=cache.stream)
    cache.ops.zero_pages([], cache.ints([0]), stream=cache.stream)
    with pytest.raises(MisuseError, match="plane v_code"):
        cache.ops.zero_pages([first, (plane[1:], geometry)], cache.ints([1]), stream=cache.stream)

    assert_same_planes(before, cache.host_planes())


def test_every_bf16_pattern_is_promoted_exactly(device: Device) -> None:
    """C14.4: NaN payloads included."""
    stream = device.stream()
    bits = np.arange(1 << 16, dtype=np.uint16)
    promoted = device.empty(bits.shape, np.float32)

    Ops(device).f32_from_bf16(promoted, to_device(device, stream, bits), stream=stream)

    np.testing.assert_array_equal(bits.astype(np.uint32) << 16, to_host(device, stream, promoted).view(np.uint32))


def test_rounding_to_bf16_is_to_nearest_even_and_keeps_nan_quiet(device: Device, rng: Rng) -> None:
    """C14.4: every upper half with the lower halves that decide, and random bits; the count fills no last block."""
    stream = device.stream()
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = np.concatenate([(upper[:, np.newaxis] | lower).ravel(), rng.integers(0, 1 << 32, 257, dtype=np.uint32)])
    values = bits.view(np.float32)
    rounded = device.empty(values.shape, np.uint16)

    Ops(device).bf16_from_f32(rounded, to_device(device, stream, values), stream=stream)

    np.testing.assert_array_equal(codecs.f32_to_bf16(values), to_host(device, stream, rounded))


def test_conversions_refuse_other_shapes_and_types(device: Device) -> None:
    """C14.4: nothing is converted silently, and in place is refused."""
    stream, ops = device.stream(), Ops(device)
    floats, bits = device.zeros((4,), np.float32), device.zeros((4,), np.uint16)

    with pytest.raises(MisuseError, match="the destination"):
        ops.bf16_from_f32(floats, floats, stream=stream)
    with pytest.raises(MisuseError, match="the source"):
        ops.bf16_from_f32(bits, bits, stream=stream)
    with pytest.raises(MisuseError, match="the destination"):
        ops.f32_from_bf16(floats[:3], bits, stream=stream)
    with pytest.raises(MisuseError, match="share no byte"):
        ops.f32_from_bf16(floats, floats.view(np.uint16)[:4], stream=stream)


def test_listed_entries_are_set_and_no_others(device: Device) -> None:
    """More entries than a block of threads, in a table of another width.  (C11.2)"""
    ops, stream = Ops(device), device.stream()
    expected = np.arange(40 * 30, dtype=np.int32).reshape(40, 30)
    table = to_device(device, stream, expected)
    at = np.random.default_rng(3).permutation(40 * 30)[:700]
    entries = np.stack([at, 5000 + np.arange(700)])
    expected.reshape(-1)[at] = entries[1]

    set_entries(ops.kernels.page_moves()["set_entries"], table, to_device(device, stream, entries), 700, stream=stream)

    assert np.array_equal(to_host(device, stream, table), expected)
