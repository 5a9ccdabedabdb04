"""An output row depends on its own query, position and cache content, and on nothing else, bit for bit.  (C14.6)

Of context attention: on its query, the context and the live rows.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pagedkv.devices.cpu.device import CpuDevice
from pagedkv.devices.protocol import Device
from pagedkv.values.profiles import PROFILES
from tests.kernels.arrays import Bits, Table, bf16_noise, scattered_table
from tests.kernels.criterion import build_cache
from tests.kernels.paged_cache import AnyRoute, PagedCache, assert_same_planes

CONTEXT = 700
CONTEXTS = [CONTEXT, 61, 0, 130]
kinds = pytest.mark.parametrize(
    ("profile", "route"), [*itertools.product(PROFILES, ("decode", "prefill")), ("bf16", "context")]
)


def build(
    device: Device, profile: str, table: Table, *, contexts: list[int], max_context: int | None = None,
    route: AnyRoute = "decode",
) -> PagedCache:
    """A cache whose row r holds `contexts[r]` tokens of noise that depends on r only; its kernels are loaded."""
    cache = build_cache(device, np.random.default_rng(3), profile, table, route, max_context=max_context)
    cache.ops.prepare(profile, 64, order=cache.view.order)
    for row, tokens in enumerate(contexts):
        cache.fill(np.random.default_rng(100 + row), row, tokens)
    return cache


def queries(width: int, seed: int = 5) -> Bits:
    return bf16_noise(np.random.default_rng(seed), (1, width, 6, 64))


def block(width: int, seed: int = 5, *, query_heads: int = 8) -> tuple[Bits, Bits, Bits]:
    """Queries and temporary rows of one draft block."""
    rng = np.random.default_rng(seed)
    q, k, v = (bf16_noise(rng, (1, width, heads, 64)) for heads in (query_heads, 2, 2))
    return q, k, v


def attend_block(
    cache: PagedCache, inputs: tuple[Bits, Bits, Bits], context: int, live: list[int] | None = None, *, row: int = 0
) -> tuple[Bits, npt.NDArray[np.float32]]:
    """Attend with one draft block behind the context of a row."""
    q, k, v = inputs
    return cache.attend(q, [context], [row], route="context", new_rows=(k, v), valid_columns=live)


def attended(cache: PagedCache, route: AnyRoute, tokens: int, row: int = 0) -> Bits:
    """Attend with the last four columns of a row, or with a draft block behind it."""
    if route == "context":
        return attend_block(cache, block(4), tokens, row=row)[0]
    return cache.attend(queries(4), [tokens - 4], [row], route=route)[0]


def assert_all_same(results: list[Bits]) -> None:
    assert results[0].any()
    for result in results[1:]:
        np.testing.assert_array_equal(results[0], result)


# ---- every op ------------------------------------------------------------------------------------------------------
@kinds
def test_page_ids_and_table_width_have_no_effect(device: Device, profile: str, route: AnyRoute) -> None:
    """C3.6, S2, S71: identity, offset, reversed, 2p + 1, random and far page maps; a wider table and max_context."""
    ids = np.arange(12, dtype=np.int32)
    maps = [ids, ids + 3, ids[::-1], 2 * ids + 1, 100 - 7 * ids, np.random.default_rng(2).permutation(ids)]
    tables = [np.ascontiguousarray(pages.reshape(1, 12)) for pages in maps]
    tables.append(np.concatenate([tables[-1], np.arange(12, 82, dtype=np.int32)[np.newaxis]], axis=1))

    assert_all_same([
        attended(build(device, profile, table, contexts=[CONTEXT], route=route), route, CONTEXT) for table in tables
    ])  # fmt: skip


@pytest.mark.parametrize("route", ["decode", "context"])
def test_max_context_has_no_effect(device: Device, route: AnyRoute) -> None:
    """A row within one key group is finished directly or beside a merge of others: the same bits."""
    table = scattered_table(1, 12)

    assert_all_same([
        attended(build(device, "bf16", table, contexts=[512], max_context=limit, route=route), route, 512)
        for limit in (512, 513, 768)
    ])  # fmt: skip


@kinds
def test_no_result_depends_on_the_order_of_threads(profile: str, route: AnyRoute) -> None:
    """A race gives other bits when lanes, warps and blocks run in another order."""
    results = []
    for order, seed, threads in (("ascending", 0, 2), ("descending", 0, 2), ("random", 1, 2), ("random", 2, 1)):
        device = CpuDevice(order=order, seed=seed, threads=threads)
        cache = build(device, profile, scattered_table(4, 12), contexts=CONTEXTS, route=route)
        rows = [row for row, tokens in enumerate(CONTEXTS) if tokens or route == "context"]
        outs = [attended(cache, route, CONTEXTS[row], row) for row in rows]
        results.append({**cache.host_planes(), "out": np.concatenate(outs)})
        device.close()

    for result in results[1:]:
        assert_same_planes(results[0], result)


@pytest.mark.parametrize(("profile", "route"), [*((name, "decode") for name in PROFILES), ("bf16", "context")])
def test_a_batch_equals_its_rows_alone(device: Device, profile: str, route: AnyRoute) -> None:
    """S1: B, the other rows, their order, their lengths and where the table rows lie have no effect."""
    contexts = CONTEXTS if route == "context" else [CONTEXT, 61, 130, 5]
    cache = build(device, profile, scattered_table(4, 12), contexts=contexts, route=route)
    blocks, valid = [block(5, seed) for seed in range(4)], [5, 3, 4, 1]

    def attend(rows: list[int]) -> tuple[npt.NDArray[Any], ...]:
        q, k, v = (np.concatenate([blocks[row][part] for row in rows]) for part in range(3))
        live = [valid[row] for row in rows]
        positions = [contexts[row] - (5 if route == "decode" else 0) for row in rows]
        return cache.attend(q, positions, rows, route=route, new_rows=(k, v) if route == "context" else None,
                            valid_columns=live)  # fmt: skip

    alone = [attend([row]) for row in range(4)]
    for order in ([0, 1, 2, 3], [2, 3, 0, 1], [3, 2, 1, 0]):
        for part, batched in enumerate(attend(order)):
            np.testing.assert_array_equal(np.concatenate([alone[row][part] for row in order]), batched)


# ---- causal attention ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("first", [0, 60, 505, CONTEXT - 16])
@pytest.mark.parametrize("profile", PROFILES)
def test_columns_of_one_call_equal_single_steps(device: Device, profile: str, first: int) -> None:
    """W has no effect, also where the columns of one tile end in different pages and key groups."""
    cache = build(device, profile, scattered_table(1, 12), contexts=[CONTEXT])
    q = queries(16)

    together, _ = cache.attend(q, [first], [0], route="decode")

    for width in (1, 3):
        for begin in range(0, 16 - width + 1, width):
            part, _ = cache.attend(q[:, begin : begin + width], [first + begin], [0], route="decode")
            np.testing.assert_array_equal(together[:, begin : begin + width], part)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_prefill_does_not_depend_on_its_chunks(device: Device, profile: str) -> None:
    """S43: 530 tokens at once, in chunks of 5, 64, 128 and the rest behind a cached prefix of such lengths."""
    rng = np.random.default_rng(11)
    q, k, v = (bf16_noise(rng, (1, 530, heads, 64)) for heads in (6, 2, 2))
    whole = build(device, profile, scattered_table(1, 12), contexts=[])
    expected, _ = whole.attend(q, [0], [0], route="prefill", new_rows=(k, v))
    chunked = build(device, profile, scattered_table(1, 12), contexts=[])

    parts = []
    for begin, end in ((0, 5), (5, 69), (69, 197), (197, 198), (198, 530)):
        new_rows = (k[:, begin:end].copy(), v[:, begin:end].copy())
        parts.append(chunked.attend(q[:, begin:end].copy(), [begin], [0], route="prefill", new_rows=new_rows)[0])

    np.testing.assert_array_equal(expected, np.concatenate(parts, axis=1))


@pytest.mark.parametrize("profile", PROFILES)
def test_both_routes_have_one_arithmetic(device: Device, profile: str) -> None:
    """More than C14.6 asks: decode's partial results and prefill's running fold meet in the same order."""
    cache = build(device, profile, scattered_table(1, 12), contexts=[CONTEXT])
    q = queries(16)

    for first in (0, 505, CONTEXT - 16):
        results = [cache.attend(q, [first], [0], route=route) for route in ("decode", "prefill")]
        np.testing.assert_array_equal(results[0][0], results[1][0])
        np.testing.assert_array_equal(results[0][1], results[1][1])


# ---- context attention ---------------------------------------------------------------------------------------------
def widened(inputs: tuple[Bits, Bits, Bits], width: int) -> tuple[Bits, Bits, Bits]:
    """The same live columns before dead ones of NaN."""
    q, k, v = (np.full((1, width, *rows.shape[2:]), 0x7FC0, np.uint16) for rows in inputs)
    for wide, rows in zip((q, k, v), inputs, strict=True):
        wide[:, : rows.shape[1]] = rows
    return q, k, v


@pytest.mark.parametrize("live", [1, 3, 8])
@pytest.mark.parametrize("context", [0, 61, CONTEXT])
def test_the_width_of_the_call_has_no_effect(device: Device, context: int, live: int) -> None:
    """W rounds up to a captured shape: the same live columns give the same bits in any of them."""
    cache = build(device, "bf16", scattered_table(1, 12), contexts=[context], route="context")
    inputs = block(live)
    expected = attend_block(cache, inputs, context)

    for width in (live + 1, 16):
        found = attend_block(cache, widened(inputs, width), context, [live])
        for part in range(2):
            np.testing.assert_array_equal(expected[part], found[part][:, :live])


@pytest.mark.parametrize("group_size", [1, 3, 4, 6, 16])
@pytest.mark.parametrize("context", [0, 61, CONTEXT])
def test_equal_queries_give_equal_rows_wherever_they_stand(device: Device, context: int, group_size: int) -> None:
    """Every column sees the same keys, so the place of a row among tiles, full or not, decides nothing."""
    cache = build(device, "bf16", scattered_table(1, 12), contexts=[context], route="context")
    q, k, v = block(7, query_heads=2 * group_size)
    q[...] = q[:, :1, :1]

    out, lse = attend_block(cache, (q, k, v), context)

    for head in range(2):
        heads = slice(head * group_size, (head + 1) * group_size)
        assert (out[:, :, heads] == out[:, :1, heads.start : heads.start + 1]).all()
        assert (lse[:, :, heads] == lse[:, :1, heads.start : heads.start + 1]).all()


@pytest.mark.deferred
@pytest.mark.parametrize(("profile", "route"), [("k8v4", "decode"), ("bf16", "context")])
def test_a_captured_call_replays_with_new_lengths(device: Device, profile: str, route: AnyRoute) -> None:
    """C15.3: one graph serves every context, row and count of live columns, each read on the device."""
    contexts = CONTEXTS if route == "context" else [CONTEXT, 64, 4, 130]
    cache = build(device, profile, scattered_table(4, 12), contexts=contexts, route=route)
    q, k, v = block(4)
    lengths, rows, valid = cache.ints([0]), cache.ints([-1]), cache.ints([0])
    out, inputs = cache.put(np.zeros_like(q)), [*map(cache.put, (q, k, v))]
    options = {"valid_columns": valid, "workspace": device.empty((1 << 16,), np.uint8)}
    if route == "context":
        graph = cache.capture(cache.ops.context_attention, *inputs, out, lengths, rows, **options)
    else:
        graph = cache.capture(cache.ops.causal_attention_cached, inputs[0], out, lengths, rows, route=route, **options)

    for row, live in ((1, 4), (0, 3), (2, 4), (3, 1), (0, 0), (0, 4)):
        length = contexts[row] - (4 if route == "decode" else 0)
        for array, value in ((lengths, length), (rows, row if live else -1), (valid, live)):
            cache.set(array, [value])
        graph.launch(cache.stream)
        replayed = cache.get(out)
        eager, _ = cache.attend(q, [length], [row], route=route, new_rows=(k, v) if route == "context" else None,
                                valid_columns=[live])  # fmt: skip
        np.testing.assert_array_equal(eager, replayed)


def test_a_captured_block_follows_its_pages(device: Device) -> None:
    """C15.2: pages {0, 1}, then {2, 3}, then {5, 4} with the same content: the table changes, the graph does not."""
    cache = build(device, "bf16", np.array([[0, 1], [2, 3], [5, 4]], np.int32), contexts=[], route="context")
    for row in range(3):
        cache.fill(np.random.default_rng(9), row, 100)
    q, k, v = (cache.put(array) for array in block(4))
    out = cache.put(np.zeros_like(block(4)[0]))
    lengths, rows = cache.ints([100]), cache.ints([0])
    workspace = device.empty((1 << 16,), np.uint8)
    graph = cache.capture(cache.ops.context_attention, q, k, v, out, lengths, rows, workspace=workspace)

    results = []
    for pages in ([0, 1], [2, 3], [5, 4]):
        cache.set(cache.view.block_tables[:1], [pages])
        graph.launch(cache.stream)
        results.append(cache.get(out))

    assert_all_same(results)


@pytest.mark.deferred
def test_a_captured_prefix_append_reads_its_counts_on_the_device(device: Device) -> None:
    """C14.4, C15.3: counts, positions and rows change between replays; rows 1 and 0, a row of 0 between live ones."""
    cache = build(device, "bf16", scattered_table(3, 3), contexts=[], route="context")
    rng = np.random.default_rng(21)
    k, v = (bf16_noise(rng, (3, 16, 2, 64)) for _ in "kv")
    positions, counts, rows = cache.ints([0, 0, 0]), cache.ints([0, 0, 0]), cache.ints([-1, -1, -1])
    graph = cache.capture(cache.ops.append_prefix, cache.put(k), cache.put(v), positions, counts, rows)
    expected = cache.host_planes()

    for first, live, chosen in (([0, 63, 60], [1, 0, 16], [1, 2, 0]), ([120, 5, 0], [7, 16, 0], [2, 1, -1])):
        for array, values in ((positions, first), (counts, live), (rows, chosen)):
            cache.set(array, values)
        graph.launch(cache.stream)
        expected = cache.with_rows(expected, k, v, first, chosen, live)

        assert_same_planes(expected, cache.host_planes())
