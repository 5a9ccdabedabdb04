"""Codec events on the device: the kernels count exactly the groups that the NumPy codec counts.  (codecs 8)"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv import codecs
from pagedkv.codecs import CodecCounts
from pagedkv.devices.protocol import Device
from pagedkv.graphs import DecodeLoop, Unit
from pagedkv.ops.modules import attention_module, events_module
from pagedkv.ops.ops import Ops
from pagedkv.values.layout import PLANE_WORDS
from pagedkv.values.planes import PageOrder
from pagedkv.values.profiles import CODEC_EVENTS, HEAD_DIMS_QUANTIZED, PROFILES
from tests.host.codec_cases import next_up
from tests.host.codec_sides import QUANTIZED_SIDES, Side
from tests.kernels.arrays import BF16_NAN, Bits, Rng, bf16_noise, scattered_table, to_device, to_host
from tests.kernels.paged_cache import PagedCache, assert_same_planes, kill_columns
from tests.kernels.test_append import edge_rows
from tests.toy_model import opened_store, prefilled, run_unit

QUANTIZED = [profile.name for profile in PROFILES.values() if profile.is_quantized]
FP8_LIMIT, FP4_LIMIT = 448.0 * 65504.0, 2688.0


def in_order(counts: CodecCounts) -> list[int]:
    return [getattr(counts, name) for name in CODEC_EVENTS]


def counting(device: Device, profile: str, rng: Rng, **options: Any) -> PagedCache:
    """Return a cache whose view counts events."""
    cache = PagedCache.build(device, profile, table=scattered_table(3, 3, permutation=rng), rng=rng, **options)
    cache.view = dataclasses.replace(cache.view, codec_counts=device.zeros(len(CODEC_EVENTS), np.uint64))
    return cache


def planted_rows(rng: Rng, shape: tuple[int, ...], live: list[int]) -> Bits:
    """Return noise (B, W, Hkv, D), in whose live rows lie values outside the domain or at its edge, and zeros.

    After rotation, the sum of a row over sqrt(D) is its largest value: some rows reach the limits of fp8 and fp4
    exactly, and some exceed them by the smallest step of BF16.
    """
    rows = bf16_noise(rng, shape)
    head_dim, root = shape[-1], float(np.sqrt(shape[-1]))
    values = codecs.bf16_to_f32(rows).reshape(-1, head_dim)
    fp8 = FP8_LIMIT * root / 14329.0  # 14329 = 14272 + 57, which are BF16 numbers
    whole, fp4 = slice(None), FP4_LIMIT / root
    plants: list[list[tuple[Any, float]]] = [
        [(whole, 0.0)], [(whole, -0.0)], [(slice(0, 16), 0.0)], [(slice(-64, None), 1e-38)],
        [(0, np.nan)], [(-1, np.inf)], [(head_dim // 2, -np.inf)], [(3, np.nan), (-3, np.inf)], [(whole, 3.3e38)],
        [(whole, fp4)], [(whole, next_bf16(fp4))], [(17, FP4_LIMIT)], [(5, -2704.0)],
        [(whole, 0.0), (0, 14272 * fp8), (1, 57 * fp8)], [(whole, 0.0), (0, 14272 * fp8), (1, 58 * fp8)],
        [(9, 8.3e6)], [(9, 8.323e6)], [(whole, 0.0), (11, 3.7e-6)], [(whole, 0.0), (11, 3.8e-6)],
    ]
    live_rows = np.flatnonzero(np.arange(shape[1]) < np.array(live)[:, np.newaxis])  # columns; a row is (column, head)
    live_rows = (live_rows[:, np.newaxis] * shape[2] + np.arange(shape[2])).reshape(-1)
    assert len(live_rows) >= len(plants)
    for row, plant in zip(rng.permutation(live_rows), plants, strict=False):
        for place, value in plant:
            values[row, place] = value
    return codecs.f32_to_bf16(values).reshape(shape)


def next_bf16(value: float) -> float:
    return float(codecs.bf16_to_f32(codecs.f32_to_bf16(np.array([value], np.float32)) + np.uint16(1))[0])


def expected_counts(cache: PagedCache, k: Bits, v: Bits, live: list[int], counts: CodecCounts) -> None:
    """Add what the NumPy codec counts in the live columns."""
    for entry, columns in enumerate(live):
        for kind, rows in (("k", k), ("v", v)):
            flat = np.ascontiguousarray(rows[entry, :columns]).reshape(-1, cache.view.head_dim)
            codecs.encode(cache.view.storage, kind, flat, counts=counts)  # type: ignore[arg-type]


# ---- kernels -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("head_dim", HEAD_DIMS_QUANTIZED)
@pytest.mark.parametrize("side", QUANTIZED_SIDES, ids="-".join)
def test_every_edge_is_counted_and_its_bytes_are_the_same(device: Device, rng: Rng, side: Side, head_dim: int) -> None:
    """codecs 6 and 8: without rotation, the limits and their neighbours; a second call adds to the first."""
    values = np.concatenate([edge_rows(head_dim, rng), np.zeros((3, head_dim), np.float32)])
    values[-2:, 0] = FP8_LIMIT, next_up(FP8_LIMIT)
    counts = CodecCounts()
    code, scale = codecs.encode_unrotated(*side, values, counts=counts)
    assert scale is not None
    stream = device.stream()
    codes, scales = device.empty(code.shape, np.uint8), device.empty(scale.shape, np.uint8)
    rows, counters = to_device(device, stream, values), device.zeros(len(CODEC_EVENTS), np.uint64)

    for _ in range(2):
        Ops(device).encode_unrotated(*side, rows, codes, scales, event_counts=counters, stream=stream)

    assert [2 * count for count in in_order(counts)] == to_host(device, stream, counters).tolist()
    assert all(in_order(counts)[side[0] == "int8-g64" :])
    np.testing.assert_array_equal(scale, to_host(device, stream, scales))
    np.testing.assert_array_equal(code, to_host(device, stream, codes))


@pytest.mark.deferred
@pytest.mark.parametrize(("head_dim", "order"), [(64, "page-major"), (128, "head-major"), (256, "page-major")])
@pytest.mark.parametrize("profile", QUANTIZED)
def test_every_append_counts_its_live_rows(
    device: Device, rng: Rng, profile: str, head_dim: int, order: PageOrder
) -> None:
    """C14.4: append, append_prefix and attention; dead columns, a rejected tail and table row -1 count nothing."""
    cache = counting(device, profile, rng, head_dim=head_dim, order=order)
    positions, rows, live = [60, 7, 126], [2, -1, 0], [8, 0, 6]
    counts, selectors = CodecCounts(), (cache.ints(positions), cache.ints(rows))
    for op in ("append", "append_prefix", "causal_attention"):
        before = cache.host_planes()
        k, v = (planted_rows(rng, (3, 8, 2, head_dim), live) for _ in "kv")
        kill_columns((k, v), live)
        expected_counts(cache, k, v, live, counts)

        if op == "append":
            cache.append(k, v, positions, rows, live)
        elif op == "append_prefix":
            cache.ops.append_prefix(cache.view, cache.put(k), cache.put(v), selectors[0], cache.ints(live),
                                    selectors[1], stream=cache.stream)
        else:
            cache.attend(bf16_noise(rng, (3, 8, 2, head_dim)), positions, rows, route="decode", new_rows=(k, v),
                         valid_columns=live)
        assert in_order(counts) == cache.get(cache.view.codec_counts).tolist(), op
        assert_same_planes(cache.with_rows(before, k, v, positions, rows, live), cache.host_planes())
    assert all(in_order(counts)[profile == "int8-g64" :])


def test_ordinary_rows_and_moved_bytes_count_nothing(device: Device, rng: Rng) -> None:
    """Copies, fills, packing and unpacking move bytes; rows of noise have no event."""
    cache = counting(device, "nvfp4-g16", rng)
    cache.fill(rng, 0, 70)
    planes = cache.view.planes
    packed = device.zeros((1 << 16,), np.uint8)
    pages = cache.ints([int(cache.table[0, 0])])

    cache.ops.fill_pages(planes, cache.ints([2]), [0x7F7F7F7F] * 4, stream=cache.stream)
    cache.ops.copy_columns(planes, 2, 4, 33, stream=cache.stream)
    table = cache.ops.plane_table(planes, device.zeros((len(planes), PLANE_WORDS), np.int64), stream=cache.stream)
    cache.ops.pack_pages(table, pages, packed, stream=cache.stream)
    cache.ops.unpack_pages(table, cache.ints([6]), packed, stream=cache.stream)

    assert cache.get(cache.view.codec_counts).tolist() == [0, 0, 0]


def test_modules_without_counting_are_as_they_were(device: Device) -> None:
    """The define and the parameter are in the counting module alone, which has no attention."""
    plain, events = attention_module("k8v4", 64), events_module("k8v4", 64)
    ops, profile = Ops(device), PROFILES["k8v4"]
    without = ops.kernels.encoding(profile, 64, counts_events=False)

    assert plain.defines == (("PK_PROFILE", "4"), ("PK_HEAD_DIM", "64"))
    assert events.defines == (*plain.defines, ("PK_CODEC_EVENTS", "1"))
    assert without is ops.kernels.attention(profile, 64)
    for name, kernel in ops.kernels.encoding(profile, 64, counts_events=True).items():
        assert kernel.parameters == (*without[name].parameters, "pointer")  # type: ignore[attr-defined]


@pytest.mark.parametrize(("profile", "counters", "match"), [
    ("bf16", np.zeros(3, np.uint64), "codec_counts of profile bf16"), ("k8v4", np.zeros(3, np.int64), "uint64"),
    ("k8v4", np.zeros(4, np.uint64), "uint64"), ("k8v4", [0, 0, 0], "codec_counts"),
])  # fmt: skip
def test_a_view_refuses_counters_of_another_form(
    device: Device, rng: Rng, profile: str, counters: Any, match: str
) -> None:
    view = PagedCache.build(device, profile, table=scattered_table(1, 1), rng=rng).view
    with pytest.raises(pk.MisuseError, match=match):
        dataclasses.replace(view, codec_counts=counters)


def test_counters_share_no_byte_with_rows_or_codes(device: Device, rng: Rng) -> None:
    """C14.2: an append writes the counters, so no other array may lie there."""
    cache = counting(device, "int8-g64", rng)
    rows = device.zeros((1, 1, 2, 64), np.uint16)
    view = dataclasses.replace(cache.view, codec_counts=rows.reshape(-1)[:12].view(np.uint64))
    with pytest.raises(pk.MisuseError, match="share no byte"):
        cache.ops.append(view, rows, cache.put(np.zeros((1, 1, 2, 64), np.uint16)), cache.ints([0]), cache.ints([0]),
                         stream=cache.stream)
    codes, scales = device.zeros((1, 64), np.uint8), device.zeros((1, 2), np.uint8)
    with pytest.raises(pk.MisuseError, match="share no byte"):
        cache.ops.encode_unrotated("int8-g64", "k", device.zeros((1, 64), np.float32), codes, scales,
                                   event_counts=codes.reshape(-1)[:24].view(np.uint64), stream=cache.stream)


# ---- stores --------------------------------------------------------------------------------------------------------
GEOMETRY = pk.KVGeometry(layers=2, query_heads=4, kv_heads=2, head_dim=64)
GROUPS_OF_A_TOKEN = {"bf16": 0, "int8-g64": 2, "fp8-e4m3-row": 2, "nvfp4-g16": 8, "k8v4": 5}
"""Groups of one K and one V row of 64 dims."""


class ZeroModel:
    """Writes rows of zeros: every group that a unit writes is one event."""

    def enqueue(self, unit: Unit) -> None:
        q, k, v, out = (unit.empty((unit.batch, unit.width, heads, 64), np.uint16) for heads in (4, 2, 2, 4))
        unit.call(clear, q, k, v)
        for layer in range(GEOMETRY.layers):
            unit.attend(layer, q, k, v, out)
        unit.call(clear_tokens, unit.next_tokens)


def clear(q: Any, k: Any, v: Any) -> None:
    q[...] = k[...] = v[...] = 0


def clear_tokens(next_tokens: Any) -> None:
    next_tokens[...] = 1


@pytest.mark.deferred
@pytest.mark.parametrize("profile", PROFILES)
def test_replayed_units_count_and_warm_up_and_copies_do_not(device: Device, profile: str) -> None:
    """C15.1: the counters keep their address; a captured unit counts at each replay, its inert rows never."""
    with opened_store(GEOMETRY, profile=profile, max_context=256, concurrency=4, device=device, codec_events=True,
                      sanitizer=True, backend=pk.MTPBackend(draft_window=2)) as store:
        of_a_token = GROUPS_OF_A_TOKEN[profile] * GEOMETRY.layers * GEOMETRY.kv_heads
        loop = DecodeLoop(store, ZeroModel(), drives_backend=True)

        def zeros(tokens: int) -> dict[str, dict[str, int]]:
            none = dict.fromkeys(CODEC_EVENTS, 0)
            return {"main": {**none, "zero_groups": tokens * of_a_token}, "mtp": none}

        assert store.codec_counts() == zeros(0)
        sequences = [prefilled(loop, [1] * tokens, 20) for tokens in (21, 70, 3)]
        assert store.codec_counts() == zeros(94)
        for step in range(1, 5):
            loop.step(sequences)
            assert store.codec_counts() == zeros(94 + 3 * step)
        store.snapshot(sequences[1], state=pk.STATE_FOLLOWS)
        store.finish(sequences[0])
        assert store.codec_counts() == zeros(106)


def test_each_pool_counts_its_own_rows(device: Device, rng: Rng) -> None:
    """C3.3: Main and MTP have counters of their own, and bf16 pools have none."""
    with opened_store(GEOMETRY, profile="fp8-e4m3-row", max_context=64, concurrency=1, device=device,
                      codec_events=True, backend=pk.MTPBackend(draft_window=2)) as store:
        sequence = store.activate(prompt_tokens=4, output_tokens=1)
        run_unit(store, sequence, {"main": 4, "mtp": 4})
        rows = np.full((1, 4, 2, 64), BF16_NAN, np.uint16)
        k, v = (to_device(device, store.stream, rows) for _ in "kv")
        first, table_rows = (to_device(device, store.stream, np.zeros(1, np.int32)) for _ in range(2))
        store.ops.append(store.views["mtp"][0], k, v, first, table_rows, stream=store.stream)

        assert store.codec_counts() == {"main": {"saturated": 0, "nonfinite": 0, "zero_groups": 0},
                                        "mtp": {"saturated": 0, "nonfinite": 16, "zero_groups": 0}}
        (_, view) = store.views["main"]
        assert view.codec_counts is store.views["main"][0].codec_counts


def test_counts_are_refused_where_nobody_counts_and_under_capture(device: Device) -> None:
    """A store without the request has no counters; a capture goes on after the refusal."""
    with opened_store(GEOMETRY, profile="k8v4", max_context=64, concurrency=1, device=device) as store:
        assert store.views["main"][0].codec_counts is None
        with pytest.raises(pk.MisuseError, match=r"codec_events=True"):
            store.codec_counts()
    with opened_store(GEOMETRY, profile="k8v4", max_context=64, concurrency=1, device=device,
                      codec_events=True) as store:  # fmt: skip
        device.begin_capture(store.stream)
        with pytest.raises(pk.CaptureRefused):
            store.codec_counts()
        device.end_capture(store.stream)
        assert store.codec_counts()["main"] == dict.fromkeys(CODEC_EVENTS, 0)
