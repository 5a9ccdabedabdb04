"""An output row depends on its own query, position and cache content, and on nothing else, bit for bit.  (C14.6)"""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.devices.cpu.device import CpuDevice
from pagedkv.devices.protocol import Device
from pagedkv.values.attention_shape import Route
from pagedkv.values.profiles import PROFILES
from tests.kernels.paged_cache import Bits, PagedCache, Table, bf16_noise, scattered_table

CONTEXT = 700


def build(
    device: Device, profile: str, table: Table, *, contexts: list[int], max_context: int | None = None
) -> PagedCache:
    """A cache whose row r holds `contexts[r]` tokens of noise that depends on r only."""
    cache = PagedCache.build(device, profile, table=table, rng=np.random.default_rng(3), max_context=max_context)
    for row, tokens in enumerate(contexts):
        cache.fill(np.random.default_rng(100 + row), row, tokens)
    return cache


def queries(width: int, seed: int = 5) -> Bits:
    return bf16_noise(np.random.default_rng(seed), (1, width, 6, 64))


@pytest.mark.parametrize("profile", PROFILES)
def test_a_batch_equals_its_rows_alone(device: Device, profile: str) -> None:
    """B, the other rows, their order, their lengths and where the table rows lie have no effect."""
    contexts = [CONTEXT, 61, 130]
    cache = build(device, profile, scattered_table(3, 12), contexts=contexts)
    q = np.concatenate([queries(2, seed) for seed in range(3)])
    positions = [tokens - 2 for tokens in contexts]
    alone = [cache.attend(q[row : row + 1], positions[row : row + 1], [row], route="decode")[0] for row in range(3)]

    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        batched, _ = cache.attend(q[order], [positions[row] for row in order], order, route="decode")
        np.testing.assert_array_equal(np.concatenate([alone[row] for row in order]), batched)


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
    """530 tokens at once, in chunks of 5, 64, 128 and the rest; each chunk appends its own rows."""
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


@pytest.mark.parametrize("route", ["decode", "prefill"])
@pytest.mark.parametrize("profile", PROFILES)
def test_page_ids_and_table_width_have_no_effect(device: Device, profile: str, route: Route) -> None:
    """C3.6: identity, offset, reversed, 2p + 1 and random page maps; a wider table with a larger max_context."""
    ids = np.arange(12, dtype=np.int32)
    maps = [ids, ids + 3, ids[::-1], 2 * ids + 1, np.random.default_rng(2).permutation(ids)]
    tables = [np.ascontiguousarray(pages.reshape(1, 12)) for pages in maps]
    tables.append(np.concatenate([tables[-1], np.arange(12, 82, dtype=np.int32)[np.newaxis]], axis=1))
    q = queries(4)

    results = []
    for table in tables:
        cache = build(device, profile, table, contexts=[CONTEXT])
        results.append(cache.attend(q, [CONTEXT - 4], [0], route=route)[0])

    for result in results[1:]:
        np.testing.assert_array_equal(results[0], result)


def test_max_context_has_no_effect(device: Device) -> None:
    """A row within one key group is finished directly or beside a merge of others: the same bits."""
    q = queries(4)

    results = []
    for max_context in (512, 513, 768):
        cache = build(device, "bf16", scattered_table(1, 12), contexts=[512], max_context=max_context)
        results.append(cache.attend(q, [508], [0], route="decode")[0])

    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.parametrize("profile", PROFILES)
def test_no_result_depends_on_the_order_of_threads(profile: str) -> None:
    """A race gives other bits when lanes, warps and blocks run in another order."""
    q = queries(5)
    results = []
    for order, seed, threads in (("ascending", 0, 2), ("descending", 0, 2), ("random", 1, 2), ("random", 2, 1)):
        device = CpuDevice(order=order, seed=seed, threads=threads)
        cache = build(device, profile, scattered_table(1, 12), contexts=[CONTEXT])
        outputs = [cache.attend(q, [CONTEXT - 5], [0], route=route)[0] for route in ("decode", "prefill")]
        results.append([*cache.host_planes().values(), *outputs])
        device.close()

    for result in results[1:]:
        for expected, found in zip(results[0], result, strict=True):
            np.testing.assert_array_equal(expected, found)


def test_a_captured_step_replays_with_new_lengths(device: Device) -> None:
    """C15.3: one graph serves every context; lengths, rows and inputs are read on the device."""
    contexts = [CONTEXT, 64, 1]
    cache = build(device, "k8v4", scattered_table(3, 12), contexts=contexts)
    q = queries(1)
    positions, rows = cache.ints([0]), cache.ints([0])
    q_device, out = cache.put(q), cache.put(np.zeros_like(q))
    workspace = device.empty((1 << 16,), np.uint8)
    cache.device.begin_capture(cache.stream)
    cache.ops.causal_attention_cached(cache.view, q_device, out, positions, rows, route="decode", workspace=workspace,
                                      stream=cache.stream)  # fmt: skip
    graph = cache.device.end_capture(cache.stream)

    for row in (1, 0, 2, 0):
        position = contexts[row] - 1
        device.copy(positions, np.array([position], np.int32), cache.stream)
        device.copy(rows, np.array([row], np.int32), cache.stream)
        graph.launch(cache.stream)
        replayed = cache.get(out)
        eager, _ = cache.attend(q, [position], [row], route="decode")
        np.testing.assert_array_equal(eager, replayed)
