"""causal_attention: the numerical criterion, masks, stale bytes, refusals.  (C14.2, C14.4, C14.5, codecs 7)"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pagedkv.devices.protocol import Device, ModuleSpec
from pagedkv.errors import MisuseError
from pagedkv.ops.attention import ATTENTION_BLOCK
from pagedkv.ops.ops import Ops
from pagedkv.values import attention_shape
from pagedkv.values.attention_shape import AttentionShape, Route, key_groups, workspace_bytes
from pagedkv.values.profiles import PROFILES
from tests.checkout import ROOT
from tests.kernels.arrays import BF16_NAN, Rng, bf16_noise, scattered_table, to_device, to_host
from tests.kernels.criterion import check_causal, check_step
from tests.kernels.paged_cache import PagedCache, assert_same_planes, kill_columns

ROUTES: list[Route] = ["decode", "prefill"]
VARIANTS = [("bf16", 64), ("bf16", 80), ("int8-g64", 128), ("fp8-e4m3-row", 256), ("nvfp4-g16", 64), ("k8v4", 128)]


# ---- the criterion -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("position", [0, 1, 31, 32, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize(("profile", "head_dim"), VARIANTS)
def test_decode_steps_meet_the_criterion(device: Device, rng: Rng, profile: str, head_dim: int, position: int) -> None:
    """codecs 7: W = 1 around pages, group 3, unit RMS; the row is appended by the same call."""
    check_step(device, rng, profile, scattered_table(2, 3, permutation=rng), position=position, query_heads=6, row=1,
               head_dim=head_dim)  # fmt: skip


@pytest.mark.parametrize(("route", "width", "position"), [
    ("decode", 6, 61), ("decode", 6, 17), ("decode", 7, 17), ("decode", 16, 120), ("prefill", 17, 31),
    ("prefill", 66, 63), ("prefill", 5, 0),
])  # fmt: skip
@pytest.mark.parametrize(("profile", "head_dim"), VARIANTS)
def test_several_columns_meet_the_criterion(
    device: Device, rng: Rng, profile: str, head_dim: int, route: Route, width: int, position: int
) -> None:
    """codecs 7: verify widths and prefill chunks that cross pages."""
    check_step(device, rng, profile, scattered_table(1, 3), position=position, width=width, query_heads=8, route=route,
               head_dim=head_dim)  # fmt: skip


@pytest.mark.parametrize("position", [510, 511, 512, 1023, 1024, 1025, 4095, 4096, 8191, 8192])
@pytest.mark.parametrize("profile", ["bf16", "k8v4"])
def test_contexts_of_many_key_groups_meet_the_criterion(device: Device, rng: Rng, profile: str, position: int) -> None:
    """C14.6: around the ends of key groups, where decode leaves partial results to the merge."""
    check_step(device, rng, profile, scattered_table(1, 129, permutation=rng), position=position, width=2,
               query_heads=3, kv_heads=1)  # fmt: skip


@pytest.mark.parametrize("scale", [0.0, 0.03, 1.0, -0.125])
def test_the_scale_multiplies_the_scores(device: Device, rng: Rng, scale: float) -> None:
    """C14.4: any finite scale; zero makes the softmax uniform."""
    check_step(device, rng, "bf16", scattered_table(1, 2), position=79, scale=scale)


@pytest.mark.parametrize("position", [0, 6, 14, 30, 31])
def test_a_zero_query_averages_the_values(device: Device, rng: Rng, position: int) -> None:
    """codecs 7: uniform softmax for nvfp4."""
    cache = PagedCache.build(device, "nvfp4-g16", table=scattered_table(1, 1), rng=rng)
    cache.fill(rng, 0, position + 1)
    q = np.zeros((1, 1, 4, 64), np.uint16)

    out, lse = cache.attend(q, [position], [0], route="decode")

    check_causal(cache, q[0], out[0], lse[0], position=position)


def test_the_only_key_is_the_output(device: Device, rng: Rng) -> None:
    """C14.4: at position 0 the output is V, bit for bit in bf16."""
    cache = PagedCache.build(device, "bf16", table=scattered_table(1, 1), rng=rng)
    q, k, v = (bf16_noise(rng, (1, 1, heads, 64)) for heads in (4, 2, 2))

    out, _ = cache.attend(q, [0], [0], route="decode", new_rows=(k, v))

    np.testing.assert_array_equal(np.repeat(v[0, 0], 2, axis=0), out[0, 0])


# ---- masks and stale bytes -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("profile", PROFILES)
def test_inert_columns_are_zero_and_write_nothing(device: Device, rng: Rng, profile: str) -> None:
    """C14.4: valid columns 0, 7 and 16 of 16; exact +0, lse -infinity, no cache byte, NaN inputs harmless."""
    cache = PagedCache.build(device, profile, table=scattered_table(3, 3), rng=rng)
    for row in range(3):
        cache.fill(rng, row, 60)
    before = cache.host_planes()
    valid = [0, 7, 16]
    q, k, v = (bf16_noise(rng, (3, 16, heads, 64)) for heads in (6, 2, 2))
    kill_columns((q, k, v), valid)

    rows = [-1, 2, 0]
    out, lse = cache.attend(q, [60, 60, 60], rows, route="decode", new_rows=(k, v), valid_columns=valid)

    assert_same_planes(cache.with_rows(before, k, v, [60, 60, 60], rows, valid), cache.host_planes())
    for entry, count in enumerate(valid):
        assert not out[entry, count:].any(), "inert columns are exact +0"
        assert np.isneginf(lse[entry, count:]).all()
        if count:
            live = (entry, slice(count))
            check_causal(cache, q[live], out[live], lse[live], position=60, row=rows[entry])


@pytest.mark.parametrize("route", ROUTES)
def test_an_entry_without_a_table_row_is_inert(device: Device, rng: Rng, route: Route) -> None:
    """C14.4: row -1 gives exact +0 and no cache byte, whatever the columns say."""
    cache = PagedCache.build(device, "k8v4", table=scattered_table(2, 2), rng=rng)
    before = cache.host_planes()
    q, k, v = (bf16_noise(rng, (1, 3, heads, 64)) for heads in (4, 2, 2))

    out, lse = cache.attend(q, [5], [-1], route=route, new_rows=(k, v))

    assert not out.any()
    assert np.isneginf(lse).all()
    assert_same_planes(before, cache.host_planes())


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("profile", PROFILES)
def test_stale_bytes_behind_the_frontier_have_no_effect(device: Device, rng: Rng, profile: str, route: Route) -> None:
    """C9.6, S61: a pool of NaN around 1 to 125 written tokens: finite, and the bits of a pool of zeros."""
    for tokens in (1, 13, 29, 31, 32, 61, 62, 63, 64, 70, 125):
        results = []
        for stale in (0x00, 0xFF):
            seeded = np.random.default_rng(7)
            cache = PagedCache.build(device, profile, table=scattered_table(1, 3), rng=rng)
            cache.overwrite(stale)
            cache.fill(seeded, 0, tokens)
            q, k, v = (bf16_noise(seeded, (1, 3, heads, 64)) for heads in (4, 2, 2))
            results.append(cache.attend(q, [tokens], [0], route=route, new_rows=(k, v))[0])

        assert ((results[1] & 0x7F80) != 0x7F80).all(), "finite"
        np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("profile", PROFILES)
def test_nan_of_a_later_column_reaches_no_earlier_one(device: Device, rng: Rng, profile: str, route: Route) -> None:
    """C14.6: a masked key is left out by a select, not by a zero weight; it does reach the columns that see it."""
    cache = PagedCache.build(device, profile, table=scattered_table(1, 2), rng=rng)
    cache.fill(rng, 0, 62)
    q, k, v = (bf16_noise(rng, (1, 4, heads, 64)) for heads in (4, 2, 2))
    clean, _ = cache.attend(q, [62], [0], route=route, new_rows=(k, v))
    k[0, 2], v[0, 2] = BF16_NAN, BF16_NAN

    out, _ = cache.attend(q, [62], [0], route=route, new_rows=(k, v))

    np.testing.assert_array_equal(clean[0, :2], out[0, :2])
    assert (out[0, 2:] == 0x7FFF).all(), "NaN of a visible key reaches the output, as the one NaN of arithmetic"


@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("profile", [p.name for p in PROFILES.values() if p.is_quantized])
def test_a_nan_scale_reaches_the_output(device: Device, rng: Rng, profile: str, kind: str) -> None:
    """codecs 8: a group marked by its scale is seen as NaN, also after the merge of key groups."""
    cache = PagedCache.build(device, profile, kv_heads=1, table=scattered_table(1, 10), rng=rng)
    cache.fill(rng, 0, 600)
    k, v = (bf16_noise(rng, (1, 1, 1, 64)) for _ in "kv")
    (k if kind == "k" else v)[0, 0, 0, 5] = BF16_NAN
    cache.append(k, v, [100], [0])
    q = bf16_noise(rng, (1, 1, 2, 64))

    for position in (100, 599):
        out, _ = cache.attend(q, [position], [0], route="decode")
        assert (out == 0x7FFF).any()
    seen_before, _ = cache.attend(q, [99], [0], route="decode")
    assert not (seen_before == 0x7FFF).any()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("profile", PROFILES)
def test_the_cached_variant_reads_and_gives_equal_bits(device: Device, rng: Rng, profile: str, route: Route) -> None:
    """C14.4: read-only; the same bits as the fused call."""
    cache = PagedCache.build(device, profile, table=scattered_table(1, 3), rng=rng)
    cache.fill(rng, 0, 90)
    q, k, v = (bf16_noise(rng, (1, 9, heads, 64)) for heads in (4, 2, 2))
    fused, _ = cache.attend(q, [90], [0], route=route, new_rows=(k, v))
    before = cache.host_planes()

    cached, _ = cache.attend(q, [90], [0], route=route)

    np.testing.assert_array_equal(fused, cached)
    assert_same_planes(before, cache.host_planes())


# ---- workspace, constants and refusals -----------------------------------------------------------------------------
def test_key_group_constants_stand_in_both_languages() -> None:
    """The numbers that size launches are the kernels' own."""
    softmax = (ROOT / "cuda_src" / "kernels/softmax.cuh").read_text(encoding="utf-8")
    attention = (ROOT / "cuda_src" / "kernels/attention_tiles.cuh").read_text(encoding="utf-8")

    def constant(text: str, name: str) -> int:
        found = re.search(rf"constexpr int {name} = (\d+);", text)
        assert found, f"no constant {name}"
        return int(found[1])

    assert constant(softmax, "kShortGroupTokens") == attention_shape.SHORT_GROUP_TOKENS
    assert constant(softmax, "kLongGroupTokens") == attention_shape.LONG_GROUP_TOKENS
    assert constant(softmax, "kShortGroupsEndTokens") == attention_shape.SHORT_GROUPS_END_TOKENS
    assert constant(attention, "kRows") == attention_shape.TILE_ROWS
    assert constant(softmax, "kStreams") * 32 == ATTENTION_BLOCK[0]


@pytest.mark.parametrize(("tokens", "expected"), [
    (1, 1), (512, 1), (513, 2), (4096, 8), (4097, 9), (6144, 9), (6145, 10), (262_144, 134),
])  # fmt: skip
def test_key_groups_cover_a_context(tokens: int, expected: int) -> None:
    """C14.6: 512 keys each below 4096, then 2048 each."""
    assert expected == key_groups(tokens)


def test_workspace_is_nothing_where_nothing_is_split() -> None:
    """C14.4: prefill, and decode within one key group; else (m, l, O[D]) for each query row and key group."""
    shape = AttentionShape("decode", 2, 3, 8, 2, 64, 1000)

    assert 2 * 3 * 8 * 2 * (64 + 2) * 4 == workspace_bytes(shape)
    assert workspace_bytes(AttentionShape("decode", 2, 3, 8, 2, 64, 512)) == 0
    assert workspace_bytes(AttentionShape("prefill", 1, 4096, 8, 2, 64, 8192)) == 0


@pytest.mark.parametrize(("changes", "named"), [
    ({"route": "auto"}, "route"), ({"batch": 0}, "B of route"), ({"width": 17}, "W of route decode"),
    ({"route": "prefill", "batch": 2}, "B of route prefill"), ({"query_heads": 34}, "head geometry"),
    ({"query_heads": 7}, "head geometry"), ({"max_context": 0}, "max_context"),
    ({"route": "prefill", "width": 1 << 29}, "query rows of one KV head"), ({"head_dim": 272}, "D of route"),
])  # fmt: skip
def test_a_shape_out_of_range_is_refused(changes: dict[str, Any], named: str) -> None:
    """C14.4, C14.6: the envelope, before anything is launched."""
    good = {"route": "decode", "batch": 1, "width": 1, "query_heads": 8, "kv_heads": 2, "head_dim": 64}

    with pytest.raises(MisuseError, match=named):
        AttentionShape(**{**good, "max_context": 64, **changes})


# ---- the exponential and the logarithm -----------------------------------------------------------------------------
FUNCTIONS_TEXT = """
extern "C" __global__ void evaluate(float* powers, float* logarithms, const float* x, int32_t count) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    powers[at] = pagedkv::exp2_fixed(x[at]);
    logarithms[at] = pagedkv::log2_fixed(-x[at]);
}
"""


def evaluate(device: Device, x: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return exp2_fixed(x) and log2_fixed(-x) as the device computes them."""
    module = device.load(ModuleSpec("fixed_functions", ("kernels/softmax.cuh",), (), FUNCTIONS_TEXT, ("evaluate",)))
    stream = device.stream()
    results = [device.empty(x.shape, np.float32) for _ in range(2)]
    arguments = (*results, to_device(device, stream, x), np.int32(x.size))
    module.kernel("evaluate").launch((-(-x.size // 256), 1, 1), (256, 1, 1), arguments, stream)
    powers, logarithms = (to_host(device, stream, result) for result in results)
    return powers, logarithms


def test_the_exponential_is_accurate_and_exact_at_its_ends(device: Device, rng: Rng) -> None:
    """softmax.cuh: relative error below 2^-22; 1 at 0; 0 below -126; NaN passes."""
    x = np.concatenate([-rng.random(100_000) * 126, np.linspace(-1, 0, 4097)]).astype(np.float32)
    edges = np.array([0.0, -0.0, -126.5, -1000.0, -np.inf, np.nan], np.float32)

    powers, _ = evaluate(device, x)
    at_edges, _ = evaluate(device, edges)

    relative = np.abs(powers.astype(np.float64) / np.exp2(x.astype(np.float64)) - 1)
    assert relative.max() < 2.0**-22
    np.testing.assert_array_equal(np.array([1, 1, 0, 0, 0, np.nan], np.float32), at_edges)


def test_the_logarithm_is_accurate(device: Device, rng: Rng) -> None:
    """softmax.cuh: error below 2^-22 max(1, |log2 x|), the range of softmax sums and far beyond."""
    wide, narrow = np.exp2(rng.random(100_000) * 240 - 120), 1 + rng.random(10_000)
    x = np.concatenate([wide, narrow, [1.0, 2.0]]).astype(np.float32)

    _, logarithms = evaluate(device, -x)
    _, edges = evaluate(device, np.array([-0.0, -np.inf, np.nan, -1.0], np.float32))

    exact = np.log2(x.astype(np.float64))
    assert (np.abs(logarithms - exact) / np.maximum(1, np.abs(exact))).max() < 2.0**-22
    np.testing.assert_array_equal(np.array([-np.inf, np.inf, np.nan, 0], np.float32), edges)


def test_ops_load_what_a_profile_needs_once(device: Device) -> None:
    """C15.1: `prepare` loads every module, so that nothing compiles under capture."""
    ops = Ops(device)

    ops.prepare("bf16", 64)

    rows, out = device.zeros((1, 1, 2, 64), np.uint16), device.zeros((1, 1, 2, 64), np.uint16)
    cache = PagedCache.build(device, "bf16", table=scattered_table(1, 1), rng=np.random.default_rng(1), ops=ops)
    selectors = (cache.ints([0]), cache.ints([0]))
    graph = cache.capture(ops.causal_attention, rows, rows, rows, out, *selectors, route="decode", workspace=None)

    assert [node.name for node in graph.nodes] == ["append_rows", "causal_attention_decode"]
