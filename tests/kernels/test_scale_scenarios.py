"""Failures that other systems shipped around scales: initialised late, swizzled, lost, ignored, out of range.

Each test names its scenario, S64 to S69.  That an append writes the codec's bytes over any content, and scales of its
input (S64, S68), is a claim of `test_append.py`; that no content around a row and no page id is seen (S69) of
`test_attention.py` and `test_attention_invariance.py`; that a scale plane is not optional (S67) of
`test_views.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import pagedkv as pk
from pagedkv import codecs
from pagedkv.devices.protocol import Device
from pagedkv.graphs import DecodeLoop
from pagedkv.values.attention_shape import Route
from pagedkv.values.profiles import PROFILES
from tests.kernels.arrays import Bits, Rng, bf16_noise, scattered_table, to_floats
from tests.kernels.paged_cache import PagedCache, assert_same_planes
from tests.oracle.attention_oracle import hadamard
from tests.toy_model import ToyModel, opened_store, prefilled

QUANTIZED = [profile.name for profile in PROFILES.values() if profile.is_quantized]
ROUTES: list[Route] = ["decode", "prefill"]


def to_bits(values: npt.NDArray[Any]) -> Bits:
    return codecs.f32_to_bf16(np.ascontiguousarray(values, np.float32))


def scale_planes(cache: PagedCache) -> dict[str, Any]:
    return {geometry.role: plane for plane, geometry in cache.view.planes if geometry.role.endswith("scale")}


@pytest.mark.parametrize("profile", QUANTIZED)
def test_a_store_never_rewrites_the_scales_of_committed_rows(profile: str) -> None:
    """S64: warm-up, capture and replays after the first append leave every code and scale byte of it alone."""
    geometry = pk.KVGeometry(layers=1, query_heads=4, kv_heads=2, head_dim=64)
    with opened_store(geometry, profile=profile, max_context=256, concurrency=1) as store:
        loop = DecodeLoop(store, ToyModel(store))
        sequence = prefilled(loop, list(range(1, 101)), 20)
        view = store.views["main"][0]
        planes = [plane for plane, _ in view.planes]
        first, second = store.page_ids(sequence)[:2]
        before = [(plane[first].copy(), plane[second, :, :36].copy()) for plane in planes]
        steps = sum(1 for _ in loop.decode([sequence]))
        after = [(plane[first].copy(), plane[second, :, :36].copy()) for plane in planes]

    assert steps == 19
    for expected, found in zip(before, after, strict=True):
        for one, other in zip(expected, found, strict=True):
            assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_sixteen_scales_come_back_in_order(device: Device, kv_heads: int) -> None:
    """S66: block g of 16 has magnitude 6 (g + 1), so scale g + 1; K and V, from the planes and through attention."""
    table = scattered_table(1, 1)
    cache = PagedCache.build(device, "nvfp4-g16", head_dim=256, kv_heads=kv_heads, table=table, rng=None)
    rng = np.random.default_rng(kv_heads)
    rotation = hadamard(256)
    magnitudes = np.repeat(6.0 * np.arange(1, 17), 16)
    signs = np.where(rng.random((2, kv_heads, 256)) < 0.5, -1.0, 1.0)
    k, v = (to_bits((magnitudes * sign) @ rotation)[np.newaxis, np.newaxis] for sign in signs)
    # Query head g of each KV head is R e(16 g): rotated, it picks the first element of K's block g.
    q = to_bits(np.tile(rotation[::16], (kv_heads, 1)))[np.newaxis, np.newaxis]

    out, lse = cache.attend(q, [0], [0], route="decode", new_rows=(k, v), scale=1.0)

    page = int(cache.table[0, 0])
    for plane in scale_planes(cache).values():
        scales = codecs.e4m3_decode(plane[page, :, 0])
        # The inputs are BF16: a scale may lie one step of 1/8 beside its number, never at another's.
        np.testing.assert_array_equal(np.tile(np.arange(1.0, 17.0), (kv_heads, 1)), np.rint(scales))
    picked = lse.reshape(kv_heads, 16) * signs[0][:, ::16]
    np.testing.assert_allclose(picked, np.tile(6.0 * np.arange(1, 17), (kv_heads, 1)), atol=2.5)
    seen = (to_floats(out)[0, 0].reshape(kv_heads, 16, 256) @ rotation)[:, 0] * signs[1]
    np.testing.assert_allclose(seen, np.tile(magnitudes, (kv_heads, 1)), atol=2.5)


@pytest.mark.parametrize(("route", "width"), [("decode", 1), ("decode", 16), ("prefill", 20)])
@pytest.mark.parametrize("profile", QUANTIZED)
def test_every_route_reads_both_scales(device: Device, rng: Rng, profile: str, route: Route, width: int) -> None:
    """S67, S68: decode, verify and prefill: V's scales doubled double the output exactly, K's change it."""
    cache = PagedCache.build(device, profile, table=scattered_table(1, 3), rng=rng)
    cache.fill(rng, 0, 150)
    q = bf16_noise(rng, (1, width, 4, 64))
    before, _ = cache.attend(q, [150 - width], [0], route=route)
    outs = {}
    for role, plane in scale_planes(cache).items():
        host = cache.get(plane)
        # One step of the exponent field: FP16 has ten bits of mantissa, E4M3 three.
        step = 1 << 10 if host.dtype == np.uint16 else 1 << 3
        cache.set(plane, np.where(host & (0x7C00 if step > 8 else 0x78), host + step, host))
        outs[role], _ = cache.attend(q, [150 - width], [0], route=route)
        cache.set(plane, host)

    np.testing.assert_array_equal(2 * to_floats(before), to_floats(outs["v_scale"]))
    assert (before != outs["k_scale"]).mean() > 0.5


@pytest.mark.parametrize("profile", PROFILES)
def test_magnitudes_have_documented_results(device: Device, rng: Rng, profile: str) -> None:
    """S69, codecs 8: 0.001 to 70,000 give the codec's bytes and finite outputs; infinity and NaN show as NaN."""
    signs = np.where(rng.random((1, 2, 2, 64)) < 0.5, -1.0, 1.0)
    for magnitude in (0.001, 1.0, 300.0, 500.0, 70000.0, np.inf, np.nan):
        cache = PagedCache.build(device, profile, table=scattered_table(1, 1), rng=rng)
        before = cache.host_planes()
        k, v = bf16_noise(rng, (1, 2, 2, 64)), to_bits(signs * magnitude)
        out, _ = cache.attend(bf16_noise(rng, (1, 2, 4, 64)), [0], [0], route="decode", new_rows=(k, v))

        assert_same_planes(cache.with_rows(before, k, v, [0], [0], [2]), cache.host_planes())
        values = to_floats(out)
        if np.isfinite(magnitude):
            assert np.isfinite(values).all(), f"{magnitude}"
            # A rotated element is a sum of signs: fp4 keeps it up to 2688 and may see nothing but zeros and those.
            kept = min(magnitude, 2688.0) if PROFILES[profile].rotates_v else magnitude
            root_mean_square = np.sqrt((values[:, 0].astype(np.float64) ** 2).mean())
            assert (0.25 if kept < magnitude else 0.7) * kept < root_mean_square < 1.4 * kept, f"{magnitude}"
        elif profile == "bf16" and np.isinf(magnitude):
            np.testing.assert_array_equal(values[0, 0], np.repeat(to_floats(v)[0, 0], 2, axis=0))
        else:
            assert (out == 0x7FFF).all(), f"{magnitude}: a NaN that nobody can overlook"
