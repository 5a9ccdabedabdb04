"""causal_attention and context_attention: the criterion, masks, stale bytes, refusals.  (C14.2, C14.4, C14.5, codecs 7)

Route "context" stands for context_attention: its W columns see the paged context and each other.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pagedkv.devices.protocol import Device, ModuleSpec
from pagedkv.errors import ConfigError, MisuseError
from pagedkv.ops.attention import ATTENTION_BLOCK
from pagedkv.ops.modules import context_module, shipped_modules
from pagedkv.ops.ops import Ops
from pagedkv.values import attention_shape
from pagedkv.values.attention_shape import ROUTES, AttentionShape, Route, key_groups, workspace_bytes
from pagedkv.values.planes import PageOrder
from pagedkv.values.profiles import PROFILES
from tests.checkout import ROOT
from tests.kernels.arrays import BF16_NAN, Rng, Table, bf16_noise, scattered_table, to_device, to_host
from tests.kernels.criterion import build_cache, check_call, check_causal, check_context, draw_block
from tests.kernels.paged_cache import AnyRoute, PagedCache, assert_same_planes, kill_columns

VARIANTS = [("bf16", 64), ("bf16", 80), ("int8-g64", 128), ("fp8-e4m3-row", 256), ("nvfp4-g16", 64), ("k8v4", 128)]
AROUND_PAGES = [*(("decode", *variant) for variant in VARIANTS), ("context", "bf16", 64), ("context", "bf16", 128)]


def long_table(blocks: int, used: int) -> Table:
    """A table row whose first `used` entries are scattered pages; the rest names no page, and is never read."""
    table = np.full((1, blocks), np.iinfo(np.int32).min, np.int32)
    table[0, :used] = scattered_table(1, used, permutation=np.random.default_rng(used))
    return table


# ---- the criterion -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("position", [0, 1, 31, 32, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize(("route", "profile", "head_dim"), AROUND_PAGES)
def test_calls_around_pages_meet_the_criterion(
    device: Device, rng: Rng, route: AnyRoute, profile: str, head_dim: int, position: int
) -> None:
    """codecs 7: unit RMS; decode steps (W = 1, group 3), whose row the call appends, and draft blocks (5, group 4)."""
    width, query_heads = (5, 8) if route == "context" else (1, 6)
    check_call(device, rng, profile, scattered_table(2, 3, permutation=rng), route=route, position=position,
               width=width, query_heads=query_heads, row=1, head_dim=head_dim)  # fmt: skip


@pytest.mark.parametrize(("route", "width", "position"), [
    ("decode", 6, 61), ("decode", 6, 17), ("decode", 7, 17), ("decode", 16, 120), ("prefill", 17, 31),
    ("prefill", 66, 63), ("prefill", 5, 0),
])  # fmt: skip
@pytest.mark.parametrize(("profile", "head_dim"), VARIANTS)
def test_several_columns_meet_the_criterion(
    device: Device, rng: Rng, profile: str, head_dim: int, route: Route, width: int, position: int
) -> None:
    """codecs 7: verify widths and prefill chunks that cross pages."""
    check_call(device, rng, profile, scattered_table(1, 3), route=route, position=position, width=width,
               query_heads=8, head_dim=head_dim)  # fmt: skip


@pytest.mark.parametrize("shape", [
    # C14.4: W 1 to 16, whose rows fill whole tiles and parts of tiles.
    *({"position": 70, "width": w, "query_heads": 6, "head_dim": d} for d in (64, 128) for w in range(1, 17)),
    # C4.5: query head h reads KV head h // (Hq / Hkv), in the cache and in the temporary rows.
    *({"position": 66, "width": 3, "query_heads": 3 * group, "kv_heads": 3} for group in (1, 4, 6, 8, 16)),
    # C14.4, C15.3: the launch is sized for the envelope; entries behind L are not read, and none where L is 0.
    *({"position": context, "width": w, "query_heads": 8, "head_dim": 128, "max_context": limit}
      for w, context, limit in ((1, 0, 64), (2, 1, 64), (1, 63, 64), (2, 64, 64), (4, 65, 128), (8, 95, 4096),
                                (16, 65, 65_537), (16, 257, 320), (1, 4096, 4096))),
    # codecs 7: the narrow set, and RMS 1.8 at W = 16.
    *({"position": 100, "width": w, "query_heads": 8, "head_dim": d, "rms": rms}
      for d in (64, 128) for rms, w in ((0.25, 5), (1.8, 16))),
], ids=lambda shape: "-".join(f"{name}={value}" for name, value in shape.items()))  # fmt: skip
def test_draft_blocks_of_every_shape_meet_the_criterion(device: Device, rng: Rng, shape: dict[str, Any]) -> None:
    used = -(-shape["position"] // 64)
    blocks = -(-shape.get("max_context", 64 * used) // 64)
    check_call(device, rng, "bf16", long_table(blocks, used), route="context", **shape)


@pytest.mark.parametrize("position", [0, 1, 510, 511, 512, 513, 1023, 1024, 1025, 4095, 4096, 4097, 8191, 8192])
@pytest.mark.parametrize(("route", "profile"), [("decode", "bf16"), ("decode", "k8v4"), ("context", "bf16")])
def test_contexts_of_several_key_groups_meet_the_criterion(
    device: Device, rng: Rng, route: AnyRoute, profile: str, position: int
) -> None:
    """C14.6: around the ends of key groups, where the merge folds partial results, and then the temporary rows."""
    width = 4 if route == "context" else 2
    table = long_table(129, -(-(position if route == "context" else position + width) // 64))
    check_call(device, rng, profile, table, route=route, position=position, width=width, query_heads=3, kv_heads=1)


@pytest.mark.parametrize("route", ["decode", "context"])
@pytest.mark.parametrize("scale", [0.0, 0.03, 1.0, -0.125])
def test_the_scale_multiplies_the_scores(device: Device, rng: Rng, scale: float, route: AnyRoute) -> None:
    """C14.4: any finite scale; zero makes the softmax uniform over all keys."""
    check_call(device, rng, "bf16", scattered_table(1, 2), route=route, position=79, width=3, scale=scale)


@pytest.mark.parametrize("route", ["decode", "context"])
def test_the_only_key_is_the_output(device: Device, rng: Rng, route: AnyRoute) -> None:
    """C14.4: at position 0, and without a context, the output of one column is its V, bit for bit in bf16."""
    cache = build_cache(device, rng, "bf16", scattered_table(1, 1), route)
    q, k, v = draw_block(rng, cache, width=1)

    out, _ = cache.attend(q, [0], [0], route=route, new_rows=(k, v))

    np.testing.assert_array_equal(np.repeat(v[0, 0], 2, axis=0), out[0, 0])


@pytest.mark.parametrize("position", [0, 6, 14, 30, 31])
def test_a_zero_query_averages_the_values(device: Device, rng: Rng, position: int) -> None:
    """codecs 7: uniform softmax for nvfp4."""
    cache = PagedCache.build(device, "nvfp4-g16", table=scattered_table(1, 1), rng=rng)
    cache.fill(rng, 0, position + 1)
    q = np.zeros((1, 1, 4, 64), np.uint16)

    out, lse = cache.attend(q, [position], [0], route="decode")

    check_causal(cache, q[0], out[0], lse[0], position=position)


@pytest.mark.parametrize(("context_score", "own_score"), [(100.0, -100.0), (-100.0, 100.0), (-90.0, -90.0)])
def test_far_apart_scores_keep_their_softmax(device: Device, context_score: float, own_score: float) -> None:
    """C14.5: the context's scores far above, far below, and all far below zero: each part has its own maximum."""
    rng = np.random.default_rng(4)
    cache = build_cache(device, rng, "bf16", scattered_table(1, 11), "context", kv_heads=1)
    q, k, v = (bf16_noise(rng, (1, 2, heads, 64)) for heads in (2, 1, 1))
    q[...] = 0
    q[..., 0] = 0x3F80  # one
    for rows, score in ((context_rows := bf16_noise(rng, (1, 600, 1, 64)), context_score), (k, own_score)):
        rows[..., 0] = np.array(score, np.float32).view(np.uint32) >> 16
    cache.append(context_rows, bf16_noise(rng, (1, 600, 1, 64)), [0], [0])

    out, lse = cache.attend(q, [600], [0], route="context", new_rows=(k, v), scale=1.0)

    check_context(cache, (q, k, v), out, lse, context=600, scale=1.0)


# ---- masks and stale bytes -----------------------------------------------------------------------------------------
@pytest.mark.deferred
@pytest.mark.parametrize(("route", "profile"), [*(("decode", name) for name in PROFILES), ("context", "bf16")])
def test_inert_columns_are_zero_and_write_nothing(device: Device, rng: Rng, route: AnyRoute, profile: str) -> None:
    """C14.4: valid columns 0, 7 and 16 of 16; exact +0, lse -infinity, NaN inputs harmless.

    A causal call writes its live rows and no other byte; context attention writes none, with one key group or several.
    """
    cache = build_cache(device, rng, profile, scattered_table(3, 10), route)
    positions, rows, valid = [60, 60, 600], [-1, 2, 0], [0, 7, 16]
    cache.fill(rng, 2, 60)
    cache.fill(rng, 0, 600)
    before = cache.host_planes()
    q, k, v = draw_block(rng, cache, batch=3, width=16, query_heads=6)
    kill_columns((q, k, v), valid)

    out, lse = cache.attend(q, positions, rows, route=route, new_rows=(k, v), valid_columns=valid)

    expected = before if route == "context" else cache.with_rows(before, k, v, positions, rows, valid)
    assert_same_planes(expected, cache.host_planes())
    for entry, (position, row, count) in enumerate(zip(positions, rows, valid, strict=True)):
        assert not out[entry, count:].any(), "inert columns are exact +0"
        assert np.isneginf(lse[entry, count:]).all()
        if count and route == "context":
            check_context(cache, (q, k, v), out, lse, context=position, entry=entry, row=row, live=count)
        elif count:
            live = (entry, slice(count))
            check_causal(cache, q[live], out[live], lse[live], position=position, row=row)


@pytest.mark.parametrize(("route", "profile"), [("decode", "k8v4"), ("prefill", "k8v4"), ("context", "bf16")])
@pytest.mark.parametrize("position", [5, 600])
def test_an_entry_without_a_table_row_is_inert(
    device: Device, rng: Rng, position: int, route: AnyRoute, profile: str
) -> None:
    """C14.4: row -1 gives exact +0 and no cache byte, whatever columns and lengths say."""
    cache = build_cache(device, rng, profile, scattered_table(2, 10), route)
    before = cache.host_planes()
    q, k, v = draw_block(rng, cache, width=3)

    out, lse = cache.attend(q, [position], [-1], route=route, new_rows=(k, v))

    assert not out.any()
    assert np.isneginf(lse).all()
    assert_same_planes(before, cache.host_planes())


@pytest.mark.parametrize("profile", ["bf16", "k8v4"])
@pytest.mark.parametrize(("route", "first", "width"), [("decode", -3, 8), ("decode", -8, 8), ("prefill", -20, 83),
                                                       ("decode", -(2**31), 3)])
def test_a_live_column_before_position_0_sees_nothing(
    device: Device, rng: Rng, profile: str, route: Route, first: int, width: int
) -> None:
    """C14.4: it is +0 with lse -infinity and writes nothing; later columns are as in a call that begins at 0."""
    before, count = min(-first, width), max(width + first, 0)
    cache, other = (build_cache(device, rng, profile, scattered_table(1, 10), route) for _ in range(2))
    planes = cache.host_planes()
    q, k, v = draw_block(rng, cache, width=width)
    kill_columns((array[:, :before] for array in (q, k, v)), [0])

    out, lse = cache.attend(q, [first], [0], route=route, new_rows=(k, v))

    assert not out[:, :before].any()
    assert np.isneginf(lse[:, :before]).all()
    rest = [np.ascontiguousarray(array[:, before:]) for array in (q, k, v)]
    expected = cache.with_rows(planes, rest[1], rest[2], [0], [0], [count]) if count else planes
    assert_same_planes(expected, cache.host_planes())
    if count:
        expected_out, expected_lse = other.attend(rest[0], [0], [0], route=route, new_rows=(rest[1], rest[2]))
        np.testing.assert_array_equal(expected_out, out[:, before:])
        np.testing.assert_array_equal(expected_lse, lse[:, before:])


@pytest.mark.parametrize(("profile", "head_dim"), [("bf16", 64), ("bf16", 128)])
def test_a_negative_context_length_is_an_empty_context(device: Device, rng: Rng, profile: str, head_dim: int) -> None:
    """C14.4: the columns see the temporary rows alone, and no table entry is read."""
    cache = build_cache(device, rng, profile, long_table(10, 1), "context", head_dim=head_dim)
    q, k, v = draw_block(rng, cache, width=5)
    expected, empty = (cache.attend(q, [n], [0], route="context", new_rows=(k, v)) for n in (0, -70))

    np.testing.assert_array_equal(expected[0], empty[0])
    np.testing.assert_array_equal(expected[1], empty[1])


@pytest.mark.parametrize(("route", "profile"), [
    *((route, name) for route in ROUTES for name in PROFILES), ("context", "bf16"),
])  # fmt: skip
def test_stale_bytes_behind_the_frontier_have_no_effect(
    device: Device, rng: Rng, route: AnyRoute, profile: str
) -> None:
    """C9.6, S61: a pool of NaN around 0 to 600 written tokens: finite, and the bits of a pool of zeros."""
    for tokens in (0, 1, 13, 29, 31, 32, 61, 62, 63, 64, 70, 125, 128, 600):
        results = []
        for stale in (0x00, 0xFF):
            seeded = np.random.default_rng(7)
            cache = build_cache(device, rng, profile, scattered_table(1, 11), route)
            cache.overwrite(stale)
            cache.fill(seeded, 0, tokens)
            q, k, v = draw_block(seeded, cache, width=3)
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


@pytest.mark.parametrize("kind", [1, 2], ids=["k", "v"])
def test_the_last_column_changes_every_output(device: Device, rng: Rng, kind: int) -> None:
    """C14.4: non-causal: an earlier column sees later ones, and only those of its own row."""
    cache = build_cache(device, rng, "bf16", scattered_table(2, 2), "context")
    for row in range(2):
        cache.fill(rng, row, 65)
    q, k, v = draw_block(rng, cache, batch=2, width=6)
    before, _ = cache.attend(q, [65, 65], [0, 1], route="context", new_rows=(k, v))
    (q, k, v)[kind][0, 5] ^= 0x8000

    after, _ = cache.attend(q, [65, 65], [0, 1], route="context", new_rows=(k, v))

    assert (before[0] != after[0]).any(axis=-1).all()
    np.testing.assert_array_equal(before[1], after[1])


@pytest.mark.parametrize("where", ["context", "temporary"])
@pytest.mark.parametrize("context", [70, 600])
def test_nan_of_a_visible_key_reaches_every_output(device: Device, rng: Rng, context: int, where: str) -> None:
    """C14.5: nothing turns a NaN that is seen into a number; as the one NaN of arithmetic."""
    cache = build_cache(device, rng, "bf16", scattered_table(1, 10), "context")
    cache.fill(rng, 0, context)
    q, k, v = draw_block(rng, cache, width=5)
    nan_row = np.full((1, 1, 2, 64), BF16_NAN, np.uint16)
    if where == "context":
        cache.append(nan_row, nan_row, [context - 3], [0])
    else:
        k[0, 2] = v[0, 2] = BF16_NAN

    out, _ = cache.attend(q, [context], [0], route="context", new_rows=(k, v))

    assert (out == 0x7FFF).all()


@pytest.mark.deferred
def test_rows_may_stand_in_any_order(device: Device, rng: Rng) -> None:
    """C11.3: B = 2 with lengths 65 and 1 in table rows 1 and 0."""
    cache = build_cache(device, rng, "bf16", scattered_table(2, 2), "context")
    cache.fill(rng, 1, 65)
    cache.fill(rng, 0, 1)
    q, k, v = draw_block(rng, cache, batch=2, width=4)

    out, lse = cache.attend(q, [65, 1], [1, 0], route="context", new_rows=(k, v))

    for entry, (context, row) in enumerate(((65, 1), (1, 0))):
        check_context(cache, (q, k, v), out, lse, context=context, entry=entry, row=row)


@pytest.mark.eager_only  # the deferred device compares what a launch may write: 6 GB of mapped memory here
def test_pages_and_heads_behind_4_gib_are_addressed(device: Device) -> None:
    """C3.10: a head-major plane of 6 GB, of which a few pages have memory; the last pages give what the first give."""
    if device.name != "cpu":
        pytest.skip("only the cpu device maps memory that nobody touches for nothing")
    pages = 3 * 2**31 // (4 * 64 * 64 * 2)
    results = []
    for ids in ([0, 1], [pages - 2, pages - 3]):
        rng = np.random.default_rng(12)
        cache = PagedCache.build(device, "bf16", kv_heads=4, order="head-major", rng=None, allocate=device.zeros,
                                 table=np.array([[*ids, pages - 2]], np.int32))  # fmt: skip
        assert cache.view.k_pages.nbytes > 2**32
        cache.fill(rng, 0, 100)
        q, k, v = draw_block(rng, cache, width=2)
        results.append(cache.attend(q, [100], [0], route="context", new_rows=(k, v))[0])
        del cache

    np.testing.assert_array_equal(results[0], results[1])


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


def test_context_modules_ship_and_others_are_refused() -> None:
    """C14.4: D 64 and 128, and no other."""
    assert {"context_d64", "context_d128"} <= {spec.name for spec in shipped_modules()}
    for head_dim in (16, 256, 64.0):
        with pytest.raises(ConfigError, match="64 or 128"):
            context_module(head_dim)  # type: ignore[arg-type]


@pytest.mark.parametrize(("route", "blocks", "nodes"), [
    ("decode", 1, ["append_rows", "causal_attention_decode"]),
    ("context", 10, ["context_attention", "context_attention_merge"]),
])  # fmt: skip
def test_a_prepared_pool_loads_nothing_under_capture(
    device: Device, rng: Rng, route: AnyRoute, blocks: int, nodes: list[str]
) -> None:
    """C15.1: `prepare` loads what a profile needs, with a draft pool's order context attention too; nodes by name."""
    ops = Ops(device)
    cache = build_cache(device, rng, "bf16", scattered_table(1, blocks), route, ops=ops)
    ops.prepare("bf16", 64, order=cache.view.order)
    q, k, v, out = (device.zeros((1, 2, 2, 64), np.uint16) for _ in range(4))
    op, options = (ops.context_attention, {}) if route == "context" else (ops.causal_attention, {"route": route})
    graph = cache.capture(op, q, k, v, out, cache.ints([0]), cache.ints([0]), workspace=cache.workspace(route, out),
                          **options)  # fmt: skip

    assert [node.name for node in graph.nodes] == nodes


@pytest.mark.parametrize(("profile", "head_dim", "order"), [
    ("bf16", 64, "page-major"), ("bf16", 256, "head-major"), ("int8-g64", 64, "head-major"),
])  # fmt: skip
def test_other_pools_are_refused(device: Device, rng: Rng, profile: str, head_dim: int, order: PageOrder) -> None:
    """C3.4, C14.4: head-major bf16 planes of head_dim 64 or 128."""
    cache = PagedCache.build(device, profile, head_dim=head_dim, order=order, table=scattered_table(1, 1), rng=rng)
    q, k, v = draw_block(rng, cache, width=1)

    with pytest.raises(MisuseError, match="head-major bf16"):
        cache.attend(q, [0], [0], route="context", new_rows=(k, v))


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
