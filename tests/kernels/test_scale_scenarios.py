"""Failures that other systems shipped around scales: initialised late, swizzled, lost, ignored, out of range.

Each test names its scenario, S64 to S69.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import pagedkv as pk
from pagedkv import codecs
from pagedkv.devices.protocol import Device
from pagedkv.errors import MisuseError
from pagedkv.graphs import DecodeLoop
from pagedkv.values.attention_shape import Route
from pagedkv.values.profiles import PROFILES
from tests.kernels.arrays import Bits, Rng, bf16_noise, scattered_table, to_floats
from tests.kernels.paged_cache import PagedCache, assert_same_planes
from tests.oracle.attention_oracle import hadamard
from tests.toy_model import ToyModel, opened_store, prefilled

QUANTIZED = [profile.name for profile in PROFILES.values() if profile.is_quantized]
ROUTES: list[Route] = ["decode", "prefill"]
FORMAT_ERROR = {"int8-g64": 0.006, "fp8-e4m3-row": 0.026, "nvfp4-g16": 0.095, "k8v4": 0.095}
"""codecs 7: of decode(encode(x)), the worse of K and V."""


def to_bits(values: npt.NDArray[Any]) -> Bits:
    return codecs.f32_to_bf16(np.ascontiguousarray(values, np.float32))


def scale_planes(cache: PagedCache) -> dict[str, Any]:
    return {geometry.role: plane for plane, geometry in cache.view.planes if geometry.role.endswith("scale")}


@pytest.mark.parametrize("profile", QUANTIZED)
def test_the_first_operation_of_a_fresh_cache_is_an_append(device: Device, profile: str) -> None:
    """S64: nothing initialises scales, so nothing can do it late; before and after attention, bytes are the codec's."""
    cache = PagedCache.build(device, profile, table=scattered_table(1, 2), rng=None)
    rng = np.random.default_rng(1)
    k, v = (bf16_noise(rng, (1, 70, 2, 64)) for _ in "kv")

    cache.append(k, v, [0], [0])

    written = cache.host_planes()
    fresh = {role: np.full(plane.nbytes, 0xFF, np.uint8).view(plane.dtype).reshape(plane.shape)
             for role, plane in written.items()}  # fmt: skip
    assert_same_planes(cache.with_rows(fresh, k, v, [0], [0], [70]), written)
    for route in ROUTES:
        cache.attend(bf16_noise(rng, (1, 1, 4, 64)), [69], [0], route=route)
    assert_same_planes(written, cache.host_planes())


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


@pytest.mark.parametrize("profile", QUANTIZED)
def test_unequal_scales_of_k_and_v_reach_every_route(device: Device, rng: Rng, profile: str) -> None:
    """S67: K far above one and V far below; within format error of bf16 on both routes, so no scale was lost."""
    results: dict[str, list[npt.NDArray[np.float32]]] = {}
    k, v, q = (bf16_noise(rng, (1, 120, heads, 64), scale) for heads, scale in ((2, 1000.0), (2, 0.01), (4, 0.001)))
    for name in (profile, "bf16"):
        cache = PagedCache.build(device, name, table=scattered_table(1, 2), rng=None)
        cache.append(k, v, [0], [0])
        results[name] = [to_floats(cache.attend(q[:, :3].copy(), [117], [0], route=route)[0]) for route in ROUTES]

    for plain, quantized in zip(results["bf16"], results[profile], strict=True):
        error = float(np.linalg.norm(quantized - plain) / np.linalg.norm(plain))
        print(f"{profile}: {error:.4f}")
        assert error < 3 * FORMAT_ERROR[profile], "the errors of K and V add up to a little more than twice"


@pytest.mark.parametrize("lost", ["k_scale_pages", "v_scale_pages"])
@pytest.mark.parametrize("profile", QUANTIZED)
def test_a_missing_scale_plane_raises(device: Device, profile: str, lost: str) -> None:
    """S67: None is no default scale."""
    view = PagedCache.build(device, profile, table=scattered_table(1, 1), rng=None).view

    with pytest.raises(MisuseError, match=f"plane {lost.removesuffix('_pages')} of profile {profile} was refused"):
        dataclasses.replace(view, **{lost: None})  # type: ignore[arg-type]


@pytest.mark.parametrize(("route", "width"), [("decode", 1), ("decode", 16), ("prefill", 20)])
@pytest.mark.parametrize("profile", QUANTIZED)
def test_every_route_reads_both_scales(device: Device, rng: Rng, profile: str, route: Route, width: int) -> None:
    """S68: decode, verify and prefill: V's scales doubled double the output exactly, K's change it."""
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


@pytest.mark.parametrize("profile", QUANTIZED)
def test_append_writes_scales_of_its_input(device: Device, rng: Rng, profile: str) -> None:
    """S68: rows twice as large give the same codes under doubled scales."""
    k, v = (bf16_noise(rng, (1, 5, 2, 64), 4.0) for _ in "kv")
    planes = []
    for factor in (1, 2):
        cache = PagedCache.build(device, profile, table=scattered_table(1, 1), rng=None)
        cache.append(to_bits(factor * to_floats(k)), to_bits(factor * to_floats(v)), [0], [0])
        planes.append({role: plane[1, :, :5] for role, plane in cache.host_planes().items()})

    for role in ("k_code", "v_code"):
        np.testing.assert_array_equal(planes[0][role], planes[1][role])
    for role in ("k_scale", "v_scale"):
        step = 1 << 10 if planes[0][role].dtype == np.uint16 else 1 << 3
        np.testing.assert_array_equal(planes[0][role] + step, planes[1][role])


@pytest.mark.parametrize("profile", PROFILES)
def test_200_identical_prompts_agree_on_cold_and_reused_pages(device: Device, rng: Rng, profile: str) -> None:
    """S69: pages come back with other content and other scales each time; one output."""
    cache = PagedCache.build(device, profile, kv_heads=1, table=np.arange(12, dtype=np.int32).reshape(1, 12), rng=rng)
    q, k, v = (bf16_noise(rng, (1, 40, heads, 64)) for heads in (2, 1, 1))
    seen = set()
    for turn in range(200):
        cache.set(cache.view.block_tables, rng.permutation(12)[np.newaxis])
        first = turn % 3 * 24  # the prompt alone, or behind others that differ each time
        if first:
            cache.fill(rng, 0, 128, 10.0 ** (turn % 5))
        out, _ = cache.attend(q, [0], [0], route="prefill", new_rows=(k, v))
        seen.add(out.tobytes())

    assert len(seen) == 1


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
