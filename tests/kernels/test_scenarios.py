"""Failures that other systems shipped, in the half that kernels decide: rows, pages, masks, offsets.  (S10 to S75)

Each test names its scenario.  S1, S2, S43 and S71 are claims of `test_attention_invariance.py`, S5 of `test_views.py`,
S61 of `test_attention.py`, scales have `test_scale_scenarios.py`.  The half that ledgers decide is in
`tests/host/test_scenarios.py`, the half that graphs decide in `tests/graphs/`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from pagedkv.devices.protocol import Array, Device
from pagedkv.ops.ops import Ops
from pagedkv.ops.views import PagedKVBatchLayerView
from pagedkv.values.attention_shape import AttentionShape, Route, workspace_bytes
from pagedkv.values.layout import PLANE_WORDS
from pagedkv.values.planes import PageOrder
from pagedkv.values.profiles import PROFILES
from tests.kernels.arrays import BF16_NAN, MARK_BF16, Bits, Rng, bf16_noise, scattered_table, to_floats
from tests.kernels.criterion import check_causal
from tests.kernels.paged_cache import HostPlanes, PagedCache, assert_same_planes

ROUTES: list[Route] = ["decode", "prefill"]


def poisoned(device: Device, profile: str, table: list[list[int]], **choices: Any) -> PagedCache:
    """Return a cache whose every code and scale byte is 0xFF: NaN in each format that has one."""
    cache = PagedCache.build(device, profile, table=np.array(table, np.int32), rng=None, **choices)
    cache.overwrite(0xFF)
    return cache


def planes_of(cache: PagedCache) -> list[Array]:
    return [plane for plane, _ in cache.view.planes]


def without_pages(planes: HostPlanes, pages: list[int]) -> HostPlanes:
    """Return the planes with the given pages cleared, to compare the others."""
    rest = {role: plane.copy() for role, plane in planes.items()}
    for plane in rest.values():
        plane[pages] = 0
    return rest


# ---- tables and rows -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("profile", PROFILES)
def test_padding_rows_of_a_graph_touch_nothing(device: Device, profile: str) -> None:
    """S10, S62: captured at B = 8, replayed with 5 live rows; rows 5 to 7 carry the worst garbage of an earlier one."""
    rng = np.random.default_rng(3)
    table = scattered_table(8, 2, permutation=rng)
    cache = poisoned(device, profile, table.tolist())
    for row in range(8):
        cache.fill(rng, row, 60 + row)
    q, k, v = (bf16_noise(rng, (8, 2, heads, 64)) for heads in (4, 2, 2))
    for rows in (q, k, v):
        rows[5:] = BF16_NAN
    positions = [60, 61, 62, 63, 64, 126, 0, 2**31 - 4]
    rows_, valid = [4, 3, 2, 1, 0, *[-1] * 3], [*[2] * 5, *[0] * 3]
    out = cache.put(np.full_like(q, MARK_BF16))
    selectors = [cache.ints([0] * 8), cache.ints(list(range(8))), cache.ints([2] * 8)]
    inputs = tuple(map(cache.put, (q, k, v)))
    graph = cache.capture(cache.ops.causal_attention, *inputs, out, *selectors[:2], valid_columns=selectors[2],
                          route="decode", workspace=None)  # fmt: skip
    before = cache.host_planes()
    expected, _ = cache.attend(q[:5], positions[:5], rows_[:5], route="decode", new_rows=(k[:5], v[:5]))
    written = cache.host_planes()
    for plane, role in zip(planes_of(cache), before, strict=True):
        cache.set(plane, before[role])

    for selector, content in zip(selectors, (positions, rows_, valid), strict=True):
        cache.set(selector, content)
    graph.launch(cache.stream)

    found = cache.get(out)
    np.testing.assert_array_equal(expected, found[:5])
    assert not found[5:].any()
    assert_same_planes(written, cache.host_planes())
    owned = table[:5].reshape(-1).tolist()
    assert_same_planes(without_pages(before, owned), without_pages(cache.host_planes(), owned))


@pytest.mark.parametrize("filler", [0xFF, 0x00, None], ids=["0xFF", "zeros", "as left"])
def test_a_workspace_is_used_again_by_a_smaller_plan(device: Device, filler: int | None) -> None:
    """S12: 16 sequences of 8192 tokens, then 2 of 10 in the same workspace, split and not split."""
    rng = np.random.default_rng(4)
    cache = PagedCache.build(device, "bf16", head_dim=16, kv_heads=1, table=scattered_table(16, 128), rng=None)
    for row in range(16):
        cache.fill(rng, row, 8192 if row > 1 else 10)
    narrow = dataclasses.replace(cache.view, max_context=512)
    workspace = device.zeros((workspace_bytes(AttentionShape("decode", 16, 2, 4, 1, 16, 8192)),), np.uint8)

    def attend(view: PagedKVBatchLayerView, q: Bits, rows: list[int], positions: list[int], space: Array) -> Bits:
        out = cache.put(np.full_like(q, MARK_BF16))
        cache.ops.causal_attention_cached(view, cache.put(q), out, cache.ints(positions), cache.ints(rows),
                                          route="decode", workspace=space, stream=cache.stream)  # fmt: skip
        return cache.get(out)

    large, small = (bf16_noise(rng, (batch, 2, 4, 16)) for batch in (16, 2))
    fresh = device.empty((workspace.nbytes,), np.uint8)
    expected = attend(cache.view, small, [0, 1], [8, 8], fresh)
    attend(cache.view, large, list(range(16)), [8, 8, *[8190] * 14], workspace)
    if filler is not None:
        device.copy(workspace, np.full(workspace.nbytes, filler, np.uint8), cache.stream)

    np.testing.assert_array_equal(expected, attend(cache.view, small, [0, 1], [8, 8], workspace))
    np.testing.assert_array_equal(expected, attend(narrow, small, [0, 1], [8, 8], workspace))


@pytest.mark.parametrize("tokens", [1, 511, 512, 700])
@pytest.mark.parametrize("profile", ["bf16", "nvfp4-g16"])
def test_max_context_of_a_graph_is_not_seen_in_its_results(device: Device, profile: str, tokens: int) -> None:
    """S15, C14.6: we promise bit equality of eager with max = actual and a graph with max = 65,536; here it is."""
    rng = np.random.default_rng(5)
    table = np.zeros((1, 1024), np.int32)
    table[0, :11] = scattered_table(1, 11, permutation=rng)[0]
    cache = PagedCache.build(device, profile, table=table, rng=rng)
    cache.fill(rng, 0, tokens)
    q = bf16_noise(rng, (1, 1, 4, 64))
    tight = dataclasses.replace(cache, view=dataclasses.replace(cache.view, max_context=tokens))
    expected, _ = tight.attend(q, [tokens - 1], [0], route="decode")

    out, arguments = cache.put(np.full_like(q, MARK_BF16)), (cache.ints([tokens - 1]), cache.ints([0]))
    graph = cache.capture(cache.ops.causal_attention_cached, cache.put(q), out, *arguments, route="decode",
                          workspace=cache.workspace("decode", q))  # fmt: skip
    graph.launch(cache.stream)

    np.testing.assert_array_equal(expected, cache.get(out))


@pytest.mark.parametrize("order", ["page-major", "head-major"])
@pytest.mark.parametrize("profile", PROFILES)
def test_sixty_padding_rows_leave_first_and_last_page_alone(device: Device, profile: str, order: PageOrder) -> None:
    """S16, S62: -1 is no index from the end; nor is row 0's first page a trash slot."""
    rng = np.random.default_rng(6)
    owned = rng.permutation(np.arange(1, 9, dtype=np.int32)).reshape(4, 2)
    table = np.vstack([owned, np.array([[0, 12]] * 4, np.int32)])  # and nobody owns page 13, the last
    cache = PagedCache.build(device, profile, order=order, table=table, rng=rng)
    before = cache.host_planes()
    k, v = (bf16_noise(rng, (64, 1, 2, 64)) for _ in "kv")
    positions = rng.integers(0, 128, 64).tolist()
    rows = [0, 1, 2, 3, *[-1] * 60]
    rng.shuffle(rows)

    cache.append(k, v, positions, rows)

    live = [int(row >= 0) for row in rows]
    assert_same_planes(cache.with_rows(before, k, v, positions, rows, live), cache.host_planes())


# ---- prefixes ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("profile", PROFILES)
def test_empty_parts_of_a_partition_merge_to_nothing(device: Device, profile: str) -> None:
    """S63: 10 tokens in a partition made for 9 key groups, beside a long row and one that sees nothing."""
    rng = np.random.default_rng(11)
    cache = poisoned(device, profile, scattered_table(3, 70).tolist(), kv_heads=1)
    cache.fill(rng, 0, 10)
    cache.fill(rng, 1, 1500)
    q = bf16_noise(rng, (3, 2, 2, 64))

    out, lse = cache.attend(q, [8, 1498, 0], [0, 1, 2], route="decode", valid_columns=[2, 2, 0])
    alone, _ = cache.attend(q[:1], [8], [0], route="decode")

    assert not np.isnan(lse).any()
    assert np.isneginf(lse[2]).all()
    assert not out[2].any(), "exact +0 where nothing is seen"
    check_causal(cache, q[0], out[0], lse[0], position=8, row=0)
    check_causal(cache, q[1], out[1], lse[1], position=1498, row=1)
    np.testing.assert_array_equal(alone, out[:1])


@pytest.mark.parametrize("route", ROUTES)
def test_scores_far_below_zero_keep_their_softmax(device: Device, rng: Rng, route: Route) -> None:
    """S63: an empty running maximum is -infinity, not zero: every score here is below -1000, in three key groups."""
    cache = PagedCache.build(device, "bf16", table=scattered_table(1, 20), rng=rng)
    q = np.repeat(np.abs(to_floats(bf16_noise(rng, (1, 1, 1, 64)))) + 1, 4, axis=2)
    k = -(np.abs(rng.standard_normal((1, 1100, 2, 64))) + 8)
    bits_q, bits_k = ((np.asarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16) for x in (q, k))
    cache.append(bits_k, bf16_noise(rng, (1, 1100, 2, 64)), [0], [0])

    out, lse = cache.attend(bits_q, [1099], [0], route=route, scale=1.0)

    assert lse.max() < -500
    check_causal(cache, bits_q[0], out[0], lse[0], position=1099, scale=1.0)


# ---- large pools and long contexts ---------------------------------------------------------------------------------
@pytest.mark.eager_only  # the deferred device compares what a launch may write: 76 GB of mapped memory here
@pytest.mark.parametrize("order", ["page-major", "head-major"])
def test_pages_behind_4_gib_are_addressed(device: Device, order: PageOrder) -> None:
    """S72, S73: the scale plane alone exceeds 2^32 bytes and 2^31 elements; the last pages give what pages 0 to 2 give.

    Append, attention, pack, unpack and zero_pages.  The planes are mapped, not filled: 76 GB of addresses, of which a
    few pages have memory.
    """
    if device.name != "cpu":
        pytest.skip("only the cpu device maps memory that nobody touches for nothing")
    heads, page_scale_bytes = 8, 64 * 8 * 4
    last = 2**32 // page_scale_bytes + 2
    rng = np.random.default_rng(12)
    results: list[tuple[list[Any], list[Any]]] = []
    q, k, v = (bf16_noise(rng, (1, 150, n, 64)) for n in (8, heads, heads))
    for ids in ([0, 1, 2], [last - 1, last, last - 2]):
        cache = PagedCache.build(device, "nvfp4-g16", kv_heads=heads, order=order,
                                 table=np.array([[*ids, last]], np.int32), rng=None, allocate=device.zeros)  # fmt: skip
        plane = cache.view.k_scale_pages
        assert plane is not None
        assert plane.nbytes > 2**32
        assert plane.size > 2**31
        outs = [cache.attend(q, [0], [0], route="prefill", new_rows=(k, v))[0]]
        outs.append(cache.attend(q[:, -4:].copy(), [146], [0], route="decode")[0])
        at = (ids,) if order == "page-major" else (slice(None), ids)
        contents = [array[at].copy() for array in planes_of(cache)]
        listed = cache.view.planes
        words = device.zeros((len(listed), PLANE_WORDS), np.int64)
        table = cache.ops.plane_table(listed, words, stream=cache.stream)
        packed = device.zeros((3 * table.record.total_bytes,), np.uint8)
        cache.ops.pack_pages(table, cache.ints(ids), packed, stream=cache.stream)
        outs.append(cache.get(packed))
        cache.ops.zero_pages(listed, cache.ints(ids), stream=cache.stream)
        cache.ops.unpack_pages(table, cache.ints(ids), packed, stream=cache.stream)
        for array, content in zip(planes_of(cache), contents, strict=True):
            np.testing.assert_array_equal(array[at], content)
        cache.ops.zero_pages(listed, cache.ints(ids[:2]), stream=cache.stream)
        contents += [array[at].copy() for array in planes_of(cache)]
        results.append((outs, contents))
        del cache, plane

    page_axis = 0 if order == "page-major" else 1
    for expected, found in zip(*results, strict=True):
        for first, second in zip(expected, found, strict=True):
            np.testing.assert_array_equal(first, second)
    for before, after in zip(results[1][1][:4], results[1][1][4:], strict=True):
        assert before.any()
        assert not np.take(after, [0, 1], page_axis).any()
        np.testing.assert_array_equal(np.take(before, 2, page_axis), np.take(after, 2, page_axis))


@pytest.mark.parametrize("profile", PROFILES)
def test_lengths_around_half_and_all_of_max_context(device: Device, rng: Rng, profile: str) -> None:
    """S75: max_context 4096; prompts of 1300, 2047, 2048, 2049, 4095 and 4096 tokens."""
    cache = PagedCache.build(device, profile, kv_heads=1, table=scattered_table(1, 64, permutation=rng), rng=rng)
    assert cache.view.max_context == 4096
    cache.fill(rng, 0, 4096)
    q = bf16_noise(rng, (1, 1, 2, 64))
    for tokens in (1300, 2047, 2048, 2049, 4095, 4096):
        for route in ROUTES:
            out, lse = cache.attend(q, [tokens - 1], [0], route=route)
            check_causal(cache, q[0], out[0], lse[0], position=tokens - 1)


# ---- what a graph remembers ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("profile", PROFILES)
def test_a_replay_does_not_see_what_became_of_its_captured_objects(device: Device, profile: str, route: Route) -> None:
    """C15.1: views, arrays' shapes, lists and scalars are bent or gone after the capture; the bits are eager's."""
    rng = np.random.default_rng(14)
    cache = poisoned(device, profile, scattered_table(2, 10, permutation=rng).tolist(), kv_heads=1)
    cache.fill(rng, 1, 600)
    q, k, v = (bf16_noise(rng, (1, 3, heads, 64)) for heads in (3, 1, 1))
    expected, expected_lse = cache.attend(q, [600], [1], route=route, new_rows=(k, v))
    written = cache.host_planes()
    shape = AttentionShape(route, 1, 3, 3, 1, 64, cache.view.max_context)
    arrays = [*map(cache.put, (q, k, v, np.full_like(q, MARK_BF16))), cache.ints([600]), cache.ints([1])]
    lse = cache.put(np.zeros((1, 3, 3), np.float32))
    workspace = device.empty((max(workspace_bytes(shape), 1),), np.uint8)
    keywords: dict[str, Any] = {
        "route": route, "valid_columns": cache.ints([3]), "scale": 0.125, "lse": lse, "workspace": workspace,
    }  # fmt: skip
    ops = Ops(device)
    ops.prepare(profile, 64)
    graph = cache.capture(ops.causal_attention, *arrays, **keywords)
    del workspace
    cache.overwrite(0)  # what the eager call appended
    out, shapes = arrays[3], (arrays[3].shape, lse.shape)
    seeded = np.random.default_rng(14)
    scattered_table(2, 10, permutation=seeded)
    cache.fill(seeded, 1, 600)

    view = cache.view
    for name, value in (("head_dim", 128), ("num_kv_heads", 7), ("max_context", 1), ("order", "head-major"),
                        ("arguments", ()), ("named_arrays", ())):  # fmt: skip
        object.__setattr__(view, name, value)
    for array in (*arrays, *planes_of(cache), view.block_tables, lse):
        array.shape = (-1,)
    arrays.clear()
    keywords.clear()
    ops.kernels._loaded.clear()
    del ops
    graph.launch(cache.stream)

    np.testing.assert_array_equal(expected, cache.get(out).reshape(shapes[0]))
    np.testing.assert_array_equal(expected_lse, cache.get(lse).reshape(shapes[1]))
    found = cache.host_planes()
    pages = cache.table[1].tolist()
    for role, plane in written.items():
        rows = found[role].reshape(plane.shape)[pages].reshape(-1, plane.shape[3])[:603]
        np.testing.assert_array_equal(plane[pages].reshape(-1, plane.shape[3])[:603], rows)
