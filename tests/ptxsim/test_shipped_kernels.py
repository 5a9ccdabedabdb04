"""Every shipped kernel, executed a second time: NVRTC's PTX under an emulator gives the cpu device's bits.  (C14.6)

Both executions share the source and nothing else: front end, types of eight floats, conversions, collectives and the
executor differ.  Planes start unwritten, so that the emulator sees every read of a byte that no one wrote, and every
byte of planes and outputs is compared, written or not.

The quick run takes one head size of each profile; the long run takes every module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagedkv.devices.cpu.device import CpuDevice
from pagedkv.ops.modules import (
    SHIPPED_HEAD_DIMS_BF16,
    SHIPPED_HEAD_DIMS_EVENTS,
    attention_module,
    context_module,
    events_module,
    shipped_modules,
)
from pagedkv.ops.ops import Ops
from pagedkv.ops.page_moves import set_entries
from pagedkv.values.attention_shape import AttentionShape, workspace_bytes
from pagedkv.values.layout import PLANE_WORDS
from pagedkv.values.profiles import CODEC_EVENTS, HEAD_DIMS_CONTEXT, HEAD_DIMS_QUANTIZED, PROFILES, plane_schema
from tests.kernels.arrays import bf16_noise, scattered_table, to_device, to_host
from tests.kernels.cpu_helpers import cpu_device
from tests.kernels.every_kernel import Results, assert_same_bits, run_every_kernel
from tests.kernels.paged_cache import PagedCache
from tests.kernels.test_linear import product
from tests.ptxsim.simulated_device import SimulatedDevice, load_simulator

QUICK_HEAD_DIM = 64
VARIANTS = [
    pytest.param(
        profile.name, head_dim, marks=() if head_dim == QUICK_HEAD_DIM else (pytest.mark.long,),
        id=f"{profile.name}-d{head_dim}",
    )
    for profile in PROFILES.values()
    for head_dim in (HEAD_DIMS_QUANTIZED if profile.is_quantized else SHIPPED_HEAD_DIMS_BF16)
]  # fmt: skip
QUICK_VARIANTS = [(name, QUICK_HEAD_DIM) for name in PROFILES]


@pytest.fixture
def simulated() -> SimulatedDevice:
    """A fresh emulated device; the test is skipped where the emulator or NVRTC is absent."""
    return SimulatedDevice(load_simulator())


@pytest.fixture
def cpu() -> Iterator[CpuDevice]:
    with cpu_device() as device:
        yield device


def written(
    device: Any, profile: str, head_dim: int, *tokens: int, pages: int = 2, order: Any = "page-major"
) -> PagedCache:
    """Return a cache whose rows hold so many tokens each; no other byte of it is written."""
    table = scattered_table(len(tokens), pages)
    cache = PagedCache.build(device, profile, head_dim=head_dim, order=order, table=table, rng=None)
    for row, count in enumerate(tokens):
        cache.fill(np.random.default_rng(row), row, count)
    return cache


def noise(*shape: int) -> Any:
    """Return BF16 values of this shape."""
    return bf16_noise(np.random.default_rng(2), shape)


# ---- bits ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("profile", "head_dim"), VARIANTS)
def test_executions_give_the_same_bits(cpu: CpuDevice, simulated: SimulatedDevice, profile: str, head_dim: int) -> None:
    """C4.4, C14.4: planes, outputs and lse of every kernel of a module; the sanitizer is silent."""
    expected = run_every_kernel(cpu, profile, head_dim)
    found = run_every_kernel(simulated, profile, head_dim)

    assert_same_bits(expected, found)
    exported = {"append_rows", "append_prefix", "causal_attention_decode", "causal_attention_merge",
                "causal_attention_prefill"}  # fmt: skip
    if PROFILES[profile].is_quantized:
        exported |= {"encode_unrotated"}
    elif head_dim in HEAD_DIMS_CONTEXT:
        exported |= {"context_attention", "context_attention_merge"}
    assert exported == {launch.kernel for launch in simulated.launches}


def test_page_moves_give_the_same_bits(cpu: CpuDevice, simulated: SimulatedDevice) -> None:
    """C14.4: pages filled, packed, unpacked and copied in part, both conversions; NaN payloads, ties, subnormals."""
    rng = np.random.default_rng(3)
    floats = rng.integers(0, 1 << 32, 1000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    halves = np.arange(0, 1 << 16, 61, dtype=np.uint16)
    results: list[Results] = []
    for device in (cpu, simulated):
        cache = PagedCache.build(device, "k8v4", table=scattered_table(1, 4), rng=np.random.default_rng(4))  # type: ignore[arg-type]
        planes = cache.view.planes
        cache.ops.zero_pages(planes, cache.ints([5, 1]), stream=cache.stream)
        words = [0x7FC07FC0, 0xFFFFFFFF, 0x7E007E00, 0x7F7F7F7F]
        cache.ops.fill_pages(planes, cache.ints([2]), words, stream=cache.stream)
        for source, destination, columns in ((3, 6, 33), (7, 4, 64), (0, 8, 1)):
            cache.ops.copy_columns(planes, source, destination, columns, stream=cache.stream)
        rounded, promoted = cache.put(np.zeros(1000, np.uint16)), cache.put(np.zeros(halves.size, np.uint32))
        cache.ops.bf16_from_f32(rounded, cache.put(floats), stream=cache.stream)
        cache.ops.f32_from_bf16(promoted.view(np.float32), cache.put(halves), stream=cache.stream)
        packed: Results = {}
        words = cache.put(np.zeros((len(planes), PLANE_WORDS), np.int64))
        described = cache.ops.plane_table(planes, words, stream=cache.stream)
        records = cache.put(np.zeros(2 * described.record.total_bytes, np.uint8))
        cache.ops.pack_pages(described, cache.ints([3, 7]), records, stream=cache.stream)
        cache.ops.unpack_pages(described, cache.ints([1, 0]), records, stream=cache.stream)
        packed["records"] = cache.get(records)
        table = cache.put(np.zeros((5, 7), np.int32))
        entries = np.array([[34, 0, 17], [11, 12, 13]], np.int64)
        set_entries(cache.ops.kernels.page_moves()["set_entries"], table, cache.put(entries), 3, stream=cache.stream)
        converted = {"table": cache.get(table), "rounded": cache.get(rounded), "promoted": cache.get(promoted)}
        results.append({**cache.host_planes(), **packed, **converted})

    assert_same_bits(results[0], results[1])
    kernels = {"fill_pages", "pack_pages", "unpack_pages", "copy_columns", "set_entries", "bf16_from_f32",
               "f32_from_bf16"}
    assert kernels == {launch.kernel for launch in simulated.launches}


def test_accepted_columns_are_the_same(cpu: CpuDevice, simulated: SimulatedDevice) -> None:
    """C13.1: more entries than a block of threads, some without a live column."""
    rng = np.random.default_rng(8)
    tokens, next_tokens = (rng.integers(0, 2, (70, 4), dtype=np.int32) for _ in range(2))
    live = rng.integers(0, 5, 70, dtype=np.int32)
    results: list[list[int]] = []
    for device in (cpu, simulated):
        either: Any = device
        stream = either.stream()
        placed = [to_device(either, stream, values) for values in (tokens, next_tokens, live, np.full_like(live, -1))]
        Ops(either).accept_greedy(*placed, stream=stream)
        results.append(to_host(either, stream, placed[3]).tolist())

    assert results[0] == results[1]
    assert {*results[0]} == {0, 1, 2, 3, 4}
    assert [launch.kernel for launch in simulated.launches] == ["accept_greedy"]


def test_products_give_the_same_bits(cpu: CpuDevice, simulated: SimulatedDevice) -> None:
    """C14.6: the model runner's kernel, beyond a block of rows and columns, with subnormal results."""
    device: Any = simulated
    rng = np.random.default_rng(5)
    x, weight = (np.ldexp(rng.standard_normal((n, 70)), -70).astype(np.float32) for n in (17, 9))
    expected, found = product(cpu, x, weight), product(device, x, weight)

    assert np.array_equal(expected.view(np.uint32), found.view(np.uint32))
    assert ((expected != 0) & (np.abs(expected) < np.finfo(np.float32).tiny)).any()
    assert [launch.kernel for launch in simulated.launches] == ["linear_rows"]


def test_every_shipped_module_is_executed() -> None:
    """C4.5: the list of this file is the library's own."""
    executed = {attention_module(*variant.values[:2]).name for variant in VARIANTS}  # type: ignore[arg-type]
    executed |= {context_module(head_dim).name for head_dim in HEAD_DIMS_CONTEXT}
    counting = [variant.values[:2] for variant in VARIANTS if variant.values[0] != "bf16"]
    counting = [values for values in counting if values[1] in SHIPPED_HEAD_DIMS_EVENTS]
    executed |= {events_module(*values).name for values in counting}  # type: ignore[arg-type]

    assert executed | {"page_moves", "verify", "linear"} == {spec.name for spec in shipped_modules()}


# ---- counters ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("profile", "head_dim"), QUICK_VARIANTS)
def test_attention_reads_visible_rows_once_and_no_more(simulated: SimulatedDevice, profile: str, head_dim: int) -> None:
    """C14.3: one tile per KV head reads its context's rows in 16-byte loads of K and whole sectors of V."""
    tokens, kv_heads = 70, 2
    cache = written(simulated, profile, head_dim, tokens)

    cache.attend(noise(1, 1, 6, head_dim), [tokens - 1], [0], route="decode")

    launch = simulated.launches[-1]
    row_bytes: dict[str, int] = {plane.role: plane.row_bytes for plane in plane_schema(profile, head_dim)}
    for plane, role, load_bytes in ((cache.view.k_pages, "k_code", 16), (cache.view.v_pages, "v_code", 32)):
        counters = launch.plane(plane)
        assert tokens * kv_heads * row_bytes[role] == counters["load_bytes"] == load_bytes * counters["load_sectors"]
        assert counters["load_bytes"] == 32 * counters["distinct_load_sectors"]
        assert not counters["store_bytes"]


@pytest.mark.parametrize("head_dim", HEAD_DIMS_CONTEXT)
def test_context_attention_reads_each_row_once_and_no_other(simulated: SimulatedDevice, head_dim: int) -> None:
    """C14.3, C14.4: one tile reads its context and the live temporary rows once, and writes to neither."""
    tokens, kv_heads, live = 70, 2, 2
    cache = written(simulated, "bf16", head_dim, tokens, order="head-major")
    q, k, v = (noise(1, 3, heads, head_dim) for heads in (8, 2, 2))

    cache.attend(q, [tokens], [0], route="context", new_rows=(k, v), valid_columns=[live])

    launch = simulated.launches[-1]
    for plane in (cache.view.k_pages, cache.view.v_pages):
        counters = launch.plane(plane)
        assert tokens * kv_heads * head_dim * 2 == counters["load_bytes"] == 32 * counters["distinct_load_sectors"]
        assert not counters["store_bytes"]
    allocations = launch.result.counters["allocs"].items()
    temporary = [counters for name, counters in allocations if name.startswith(f"uint16(1, 3, 2, {head_dim})")]
    assert [live * kv_heads * head_dim * 2] * 2 == [counters["load_bytes"] for counters in temporary]
    assert not any(counters["store_bytes"] for counters in temporary)


def test_an_empty_context_reads_no_table(simulated: SimulatedDevice) -> None:
    """C14.4: with n_b = 0 a table that nobody wrote is not read, and neither is a page."""
    cache = written(simulated, "bf16", 64, 0, pages=12, order="head-major")
    simulated.forget(cache.view.block_tables)
    q, k, v = (noise(1, 3, heads, 64) for heads in (8, 2, 2))

    cache.attend(q, [0], [0], route="context", new_rows=(k, v))

    for launch in simulated.launches:
        assert not launch.plane(cache.view.block_tables)["load_bytes"]
        assert not launch.plane(cache.view.k_pages)["load_bytes"]


@pytest.mark.parametrize(("profile", "head_dim"), QUICK_VARIANTS)
def test_append_stores_each_row_once_in_whole_sectors(simulated: SimulatedDevice, profile: str, head_dim: int) -> None:
    """C4.4: code rows leave in full sectors, inputs are read once, and no plane is read back."""
    tokens, kv_heads = 66, 2
    cache = written(simulated, profile, head_dim, tokens)

    (launch,) = simulated.launches
    for plane, geometry in cache.view.planes:
        counters = launch.plane(plane)
        assert tokens * kv_heads * geometry.row_bytes == counters["store_bytes"], geometry.role
        assert not counters["load_bytes"]
        if geometry.role.endswith("code"):
            assert counters["store_bytes"] == 32 * counters["distinct_store_sectors"]
    # Inputs, table and selectors: of the two inputs every byte once.
    allocations = launch.result.counters["allocs"].items()
    inputs = sum(counters["load_bytes"] for name, counters in allocations if name.startswith("uint16(1, "))
    assert 2 * tokens * kv_heads * head_dim * 2 == inputs


@pytest.mark.parametrize("profile", [p.name for p in PROFILES.values() if p.is_quantized])
def test_counting_costs_ordinary_rows_no_atomic_and_zero_rows_one_a_warp(
    simulated: SimulatedDevice, profile: str
) -> None:
    """codecs 8: one atomic for each kind of event in a warp; kernels that do not count have no atomic at all."""
    plain = written(simulated, profile, 64, 66)
    assert simulated.launches[-1].result.counters["global_atomic"]["requests"] == 0
    counters = simulated.zeros(len(CODEC_EVENTS), np.uint64)
    cache = replace(plain, view=replace(plain.view, codec_counts=counters))
    cache.append(noise(1, 64, 2, 64), noise(1, 64, 2, 64), [0], [0])
    assert simulated.launches[-1].result.counters["global_atomic"]["requests"] == 0

    zeros = np.zeros((1, 64, 2, 64), np.uint16)
    cache.append(zeros, zeros, [0], [0])

    launch = simulated.launches[-1]
    assert launch.result.counters["global_atomic"]["requests"] == 2 * launch.grid[0]  # a warp of K, a warp of V
    groups = {"int8-g64": 2, "fp8-e4m3-row": 2, "nvfp4-g16": 8, "k8v4": 5}[profile]
    assert cache.get(counters).tolist() == [0, 0, 128 * groups]


@pytest.mark.parametrize("columns", [1, 33, 64])
@pytest.mark.parametrize(("profile", "head_dim"), QUICK_VARIANTS)
def test_copied_columns_move_each_committed_byte_once_and_no_other(
    simulated: SimulatedDevice, profile: str, head_dim: int, columns: int
) -> None:
    """C10.5: columns behind the committed ones are unwritten: one that is read would be reported."""
    kv_heads = 2
    cache = written(simulated, profile, head_dim, columns)

    cache.ops.copy_columns(cache.view.planes, int(cache.table[0, 0]), 2, columns, stream=cache.stream)

    for launch, (plane, geometry) in zip(simulated.launches[1:], cache.view.planes, strict=True):
        assert launch.grid == (kv_heads, 1, 1)
        counters = launch.plane(plane)
        moved = kv_heads * columns * geometry.row_bytes
        assert (moved, moved) == (counters["load_bytes"], counters["store_bytes"]), geometry.role


@pytest.mark.parametrize(("profile", "head_dim"), QUICK_VARIANTS)
def test_no_kernel_has_local_memory_in_its_ptx(simulated: SimulatedDevice, profile: str, head_dim: int) -> None:
    """An array that is indexed at run time would live there, in memory that nobody planned for."""
    modules = [attention_module(profile, head_dim)] + ([context_module(head_dim)] if profile == "bf16" else [])

    for program in (simulated.load(module).program for module in modules):
        for name in program.entries():
            kernel = program.kernel(name)
            assert kernel.lw.local_off == 0, f"{name} has {kernel.lw.local_off} bytes of local memory"
            assert not [category for category in kernel.cats if "local" in category]


def test_a_workspace_is_read_only_where_it_was_written(simulated: SimulatedDevice) -> None:
    """S12: a large plan over short rows; a read of a partial result that no block left would be reported."""
    cache = written(simulated, "bf16", 64, 10, 530, pages=33)

    cache.attend(noise(2, 1, 6, 64), [9, 529], [0, 1], route="decode")

    launch = simulated.launches[-1]
    assert launch.kernel == "causal_attention_merge"
    shape = AttentionShape("decode", 2, 1, 6, 2, 64, cache.view.max_context)
    (name,) = (name for name in launch.result.counters["allocs"] if name.startswith(f"uint8({workspace_bytes(shape)},"))
    assert launch.result.counters["allocs"][name]["load_bytes"] > 0
