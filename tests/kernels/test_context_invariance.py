"""An output row of context attention depends on its query, the context and the live rows, bit for bit.  (C14.6)"""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.devices.cpu.device import CpuDevice
from pagedkv.devices.protocol import Device
from tests.kernels.paged_cache import Bits, PagedCache, Table, bf16_noise, scattered_table

CONTEXT = 700
CONTEXTS = [CONTEXT, 61, 0, 130]


def build(device: Device, table: Table, *, contexts: list[int], max_context: int | None = None) -> PagedCache:
    """A draft cache whose row r holds `contexts[r]` tokens of noise that depends on r only."""
    cache = PagedCache.build(device, "bf16", order="head-major", table=table, rng=np.random.default_rng(3),
                             max_context=max_context)  # fmt: skip
    cache.ops.prepare("bf16", 64, order="head-major")
    for row, tokens in enumerate(contexts):
        cache.fill(np.random.default_rng(100 + row), row, tokens)
    return cache


def block(width: int, seed: int = 5, *, query_heads: int = 8) -> tuple[Bits, Bits, Bits]:
    """Queries and temporary rows of one batch entry."""
    rng = np.random.default_rng(seed)
    q, k, v = (bf16_noise(rng, (1, width, heads, 64)) for heads in (query_heads, 2, 2))
    return q, k, v


def widened(inputs: tuple[Bits, Bits, Bits], width: int) -> tuple[Bits, Bits, Bits]:
    """The same live columns before dead ones of NaN."""
    q, k, v = (np.full((1, width, *rows.shape[2:]), 0x7FC0, np.uint16) for rows in inputs)
    for wide, rows in zip((q, k, v), inputs, strict=True):
        wide[:, : rows.shape[1]] = rows
    return q, k, v


def test_a_batch_equals_its_rows_alone(device: Device) -> None:
    """B, the other rows, their order, their lengths and where the table rows lie have no effect."""
    cache = build(device, scattered_table(4, 12), contexts=CONTEXTS)
    blocks = [block(5, seed) for seed in range(4)]
    valid = [5, 3, 4, 1]
    alone = [
        cache.attend_context(*blocks[row], [CONTEXTS[row]], [row], valid_columns=[valid[row]]) for row in range(4)
    ]

    for order in ([0, 1, 2, 3], [2, 3, 0, 1], [3, 2, 1, 0]):
        q, k, v = (np.concatenate([blocks[row][part] for row in order]) for part in range(3))
        batched = cache.attend_context(q, k, v, [CONTEXTS[row] for row in order], order,
                                       valid_columns=[valid[row] for row in order])  # fmt: skip
        for part in range(2):
            np.testing.assert_array_equal(np.concatenate([alone[row][part] for row in order]), batched[part])


@pytest.mark.parametrize("live", [1, 3, 8])
@pytest.mark.parametrize("context", [0, 61, CONTEXT])
def test_the_width_of_the_call_has_no_effect(device: Device, context: int, live: int) -> None:
    """W rounds up to a captured shape: the same live columns give the same bits in any of them."""
    cache = build(device, scattered_table(1, 12), contexts=[context])
    inputs = block(live)
    expected = cache.attend_context(*inputs, [context], [0])

    for width in (live + 1, 16):
        found = cache.attend_context(*widened(inputs, width), [context], [0], valid_columns=[live])
        for part in range(2):
            np.testing.assert_array_equal(expected[part], found[part][:, :live])


@pytest.mark.parametrize("group_size", [1, 3, 4, 6, 16])
@pytest.mark.parametrize("context", [0, 61, CONTEXT])
def test_equal_queries_give_equal_rows_wherever_they_stand(device: Device, context: int, group_size: int) -> None:
    """Every column sees the same keys, so the place of a row among tiles, full or not, decides nothing."""
    cache = build(device, scattered_table(1, 12), contexts=[context])
    q, k, v = block(7, query_heads=2 * group_size)
    q[...] = q[:, :1, :1]

    out, lse = cache.attend_context(q, k, v, [context], [0])

    for head in range(2):
        heads = slice(head * group_size, (head + 1) * group_size)
        assert (out[:, :, heads] == out[:, :1, heads.start : heads.start + 1]).all()
        assert (lse[:, :, heads] == lse[:, :1, heads.start : heads.start + 1]).all()


def test_page_ids_and_table_width_have_no_effect(device: Device) -> None:
    """C3.6: identity, offset, reversed, 2p + 1 and random page maps; a wider table with a larger max_context."""
    ids = np.arange(12, dtype=np.int32)
    maps = [ids, ids + 3, ids[::-1], 2 * ids + 1, np.random.default_rng(2).permutation(ids)]
    tables = [np.ascontiguousarray(pages.reshape(1, 12)) for pages in maps]
    tables.append(np.concatenate([tables[-1], np.arange(12, 82, dtype=np.int32)[np.newaxis]], axis=1))

    results = []
    for table in tables:
        cache = build(device, table, contexts=[CONTEXT])
        results.append(cache.attend_context(*block(4), [CONTEXT], [0])[0])

    for result in results[1:]:
        np.testing.assert_array_equal(results[0], result)


def test_max_context_has_no_effect(device: Device) -> None:
    """A context of one key group is finished directly, or beside a merge of others: the same bits."""
    results = []
    for max_context in (512, 513, 768):
        cache = build(device, scattered_table(1, 12), contexts=[512], max_context=max_context)
        results.append(cache.attend_context(*block(4), [512], [0])[0])

    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_no_result_depends_on_the_order_of_threads() -> None:
    """A race gives other bits when lanes, warps and blocks run in another order."""
    results = []
    for order, seed, threads in (("ascending", 0, 2), ("descending", 0, 2), ("random", 1, 2), ("random", 2, 1)):
        device = CpuDevice(order=order, seed=seed, threads=threads)
        cache = build(device, scattered_table(4, 12), contexts=CONTEXTS)
        results.append([
            cache.attend_context(*block(5), [tokens], [row])[0] for row, tokens in enumerate(CONTEXTS)
        ])  # fmt: skip
        device.close()

    for result in results[1:]:
        for expected, found in zip(results[0], result, strict=True):
            np.testing.assert_array_equal(expected, found)


@pytest.mark.deferred
def test_a_captured_block_replays_with_new_lengths(device: Device) -> None:
    """C15.3: one graph serves every context, row and count of live columns, each read on the device."""
    cache = build(device, scattered_table(4, 12), contexts=CONTEXTS)
    q, k, v = block(4)
    lengths, rows, valid = cache.ints([0]), cache.ints([-1]), cache.ints([0])
    q_device, k_device, v_device = (cache.put(array) for array in (q, k, v))
    out = cache.put(np.zeros_like(q))
    workspace = device.empty((1 << 16,), np.uint8)
    device.begin_capture(cache.stream)
    cache.ops.context_attention(cache.view, q_device, k_device, v_device, out, lengths, rows, valid_columns=valid,
                                workspace=workspace, stream=cache.stream)  # fmt: skip
    graph = device.end_capture(cache.stream)

    for row, live in ((1, 4), (0, 3), (2, 4), (3, 1), (0, 0), (0, 4)):
        for array, value in ((lengths, CONTEXTS[row]), (rows, row if live else -1), (valid, live)):
            device.copy(array, np.array([value], np.int32), cache.stream)
        graph.launch(cache.stream)
        replayed = cache.get(out)
        eager, _ = cache.attend_context(q, k, v, [CONTEXTS[row]], [row], valid_columns=[live])
        np.testing.assert_array_equal(eager, replayed)


def test_a_captured_block_follows_its_pages(device: Device) -> None:
    """C15.2: pages {0, 1}, then {2, 3}, then {5, 4} with the same content: the table changes, the graph does not."""
    cache = build(device, np.array([[0, 1], [2, 3], [5, 4]], np.int32), contexts=[])
    for row in range(3):
        cache.fill(np.random.default_rng(9), row, 100)
    table = cache.view.block_tables
    q, k, v = (cache.put(array) for array in block(4))
    out = cache.put(np.zeros_like(block(4)[0]))
    lengths, rows = cache.ints([100]), cache.ints([0])
    workspace = device.empty((1 << 16,), np.uint8)
    device.begin_capture(cache.stream)
    cache.ops.context_attention(cache.view, q, k, v, out, lengths, rows, workspace=workspace, stream=cache.stream)
    graph = device.end_capture(cache.stream)

    results = []
    for pages in ([0, 1], [2, 3], [5, 4]):
        device.copy(table[:1], np.array([pages], np.int32), cache.stream)
        graph.launch(cache.stream)
        results.append(cache.get(out))

    assert results[0].any()
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.deferred
def test_a_captured_prefix_append_reads_its_counts_on_the_device(device: Device) -> None:
    """C14.4, C15.3: counts, positions and rows change between replays; rows 1 and 0, a row of 0 between live ones."""
    cache = build(device, scattered_table(3, 3), contexts=[])
    rng = np.random.default_rng(21)
    k, v = (bf16_noise(rng, (3, 16, 2, 64)) for _ in "kv")
    k_device, v_device = cache.put(k), cache.put(v)
    positions, counts, rows = cache.ints([0, 0, 0]), cache.ints([0, 0, 0]), cache.ints([-1, -1, -1])
    device.begin_capture(cache.stream)
    cache.ops.append_prefix(cache.view, k_device, v_device, positions, counts, rows, stream=cache.stream)
    graph = device.end_capture(cache.stream)
    expected = cache.host_planes()

    for first, live, chosen in (([0, 63, 60], [1, 0, 16], [1, 2, 0]), ([120, 5, 0], [7, 16, 0], [2, 1, -1])):
        for array, values in ((positions, first), (counts, live), (rows, chosen)):
            device.copy(array, np.array(values, np.int32), cache.stream)
        graph.launch(cache.stream)
        expected = cache.with_rows(expected, k, v, first, chosen, live)

        for role, plane in cache.host_planes().items():
            np.testing.assert_array_equal(expected[role], plane)
