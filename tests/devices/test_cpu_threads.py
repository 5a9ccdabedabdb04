"""CUDA threads on the cpu device: barriers, collectives, orders, and exact errors when threads diverge."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from pagedkv.devices.cpu.device import CpuDevice
from pagedkv.errors import DeviceFault
from tests.kernels.cpu_helpers import ORDERS, cpu_device, kernel, launch

REDUCE = r"""
extern "C" __global__ void reduce(const float* values, float* sums, int count) {
    PK_SHARED(float, partial, 128);
    float total = 0.0f;
    for (int i = threadIdx.x; i < count; i += blockDim.x) total += values[blockIdx.x * count + i];
    partial[threadIdx.x] = total;
    __syncthreads();
    for (int stride = 64; stride > 0; stride >>= 1) {
        if (threadIdx.x < stride) partial[threadIdx.x] += partial[threadIdx.x + stride];
        __syncthreads();
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = partial[0];
}
"""

# Every collective once, against what each lane can compute from the values array alone.
COLLECTIVES = r"""
extern "C" __global__ void collectives(const int* values, int* out) {
    int lane = threadIdx.x % 32, base = threadIdx.x - lane, v = values[threadIdx.x], bad = 0;
    const unsigned full = 0xFFFFFFFFu;
    bad |= (__shfl_sync(full, v, 5) != values[base + 5]) << 0;
    bad |= (__shfl_sync(full, v, lane + 3, 8) != values[base + (lane & 24) + ((lane + 3) & 7)]) << 1;
    bad |= (__shfl_up_sync(full, v, 2) != (lane < 2 ? v : values[base + lane - 2])) << 2;
    bad |= (__shfl_down_sync(full, v, 7) != (lane > 24 ? v : values[base + lane + 7])) << 3;
    bad |= (__shfl_xor_sync(full, v, 9) != values[base + (lane ^ 9)]) << 4;
    unsigned odd = 0;
    for (int i = 0; i < 32; ++i) odd |= (values[base + i] & 1u) << i;
    bad |= (__ballot_sync(full, v & 1) != odd) << 5;
    bad |= (__any_sync(full, lane == 31) != 1) << 6;
    bad |= (__all_sync(full, lane < 31) != 0) << 7;
    unsigned half = lane < 16 ? 0x0000FFFFu : 0xFFFF0000u;
    bad |= (__shfl_xor_sync(half, v, 1) != values[base + (lane ^ 1)]) << 8;
    bad |= (__ballot_sync(half, 1) != half) << 9;
    bad |= (__match_any_sync(full, lane & 3) != 0x11111111u << (lane & 3)) << 10;
    bad |= (__syncthreads_count(threadIdx.x < 40) != 40) << 11;
    bad |= (__syncthreads_or(threadIdx.x == 63) != 1) << 12;
    bad |= (__syncthreads_and(threadIdx.x != 63) != 0) << 13;
    double d = __shfl_xor_sync(full, (double)v, 16);
    bad |= (d != (double)values[base + (lane ^ 16)]) << 14;
    __syncwarp();
    out[threadIdx.x] = bad;
}
"""

WARP_REDUCE = r"""
template <int N> static unsigned mismatches_of(const float* values) {
    float largest[N], sum[N];
    unsigned bad = 0;
    for (int i = 0; i < N; ++i) largest[i] = sum[i] = values[i * 32 + threadIdx.x];
    pk_warp_max(largest);
    pk_warp_sum(sum);
    for (int i = 0; i < N; ++i) {
        float a = values[i * 32 + threadIdx.x], b = a;
        for (int s = 16; s > 0; s >>= 1) {
            a = fmaxf(a, __shfl_xor_sync(0xFFFFFFFFu, a, s));
            b = __fadd_rn(b, __shfl_xor_sync(0xFFFFFFFFu, b, s));
        }
        bool both_nan = sum[i] != sum[i] && b != b;
        bad += __float_as_uint(a) != __float_as_uint(largest[i]);
        bad += !both_nan && __float_as_uint(b) != __float_as_uint(sum[i]);
    }
    return bad;
}
extern "C" __global__ void warp_reduce(const float* values, unsigned* mismatches) {
    mismatches[threadIdx.x] = mismatches_of<70>(values) + mismatches_of<1>(values);
}
"""

# Each thread publishes its number, and its left neighbour reads it without a barrier in between.
RACE = r"""
extern "C" __global__ void race(int* out) {
    PK_SHARED(int, cell, 64);
    cell[threadIdx.x] = -1;
    __syncthreads();
    cell[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = cell[(threadIdx.x + 1) % 64];
}
"""

SPIN_LOCK = r"""
extern "C" __global__ void spin_lock(int* lock, int* counter) {
    while (atomicCAS(lock, 0, 1) != 0) {}
    *counter = *counter + 1;
    __threadfence();
    atomicExch(lock, 0);
}
"""

WAIT_FOR_NEIGHBOUR = r"""
extern "C" __global__ void wait_for_neighbour(volatile int* flags) {
    if (threadIdx.x == 0) {
        while (flags[63] == 0) __nanosleep(20);
        flags[0] = 7;
    } else {
        if (threadIdx.x == 63) flags[63] = 1;
    }
}
"""


@pytest.fixture(params=ORDERS)
def ordered(request: pytest.FixtureRequest) -> Iterator[CpuDevice]:
    """A device of each order."""
    with cpu_device(request.param, seed=5) as opened:
        yield opened


def reduce_rows(device: CpuDevice, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    rows, count = values.shape
    source, sums = device.empty(values.shape, np.float32), device.empty(rows, np.float32)
    stream = device.stream()
    device.copy(source, values, stream)
    kernel(device, "reduce", REDUCE).launch((rows, 1, 1), (128, 1, 1), (source, sums, np.int32(count)), stream)
    return np.array(sums)


@pytest.mark.parametrize(("order", "threads"), [*((order, 1) for order in ORDERS), *(("random", n) for n in (2, 3, 8))])
def test_a_reduction_in_shared_memory_has_the_same_bits(order: str, threads: int, rng: np.random.Generator) -> None:
    """Barriers make the order of lanes, warps and blocks invisible, and helper threads that share a long launch too."""
    values = rng.standard_normal((600 if threads > 1 else 37, 1000), np.float32)
    with cpu_device() as device:
        expected = reduce_rows(device, values)

    with cpu_device(order, seed=3, threads=threads) as device:
        for _ in range(3):
            assert expected.tobytes() == reduce_rows(device, values).tobytes()


@pytest.mark.parametrize("block", [32, 64, 1024])
def test_collectives_agree_with_their_definition(ordered: CpuDevice, block: int, rng: np.random.Generator) -> None:
    """Shuffles with and without width, votes, half-warp masks, counting barriers; one bit of `out` per check."""
    values, out = ordered.empty(block, np.int32), ordered.empty(block, np.int32)
    values[:] = rng.integers(-1000, 1000, block)
    launch(ordered, "collectives", COLLECTIVES, 1, block, (values, out))
    expected = 0 if block >= 64 else 1 << 11 | 1 << 12 | 1 << 13  # thread 63 and 40 threads exist from 64 on

    assert [expected] * block == out.tolist()


def test_array_reductions_have_the_bits_of_the_shuffle_tree(ordered: CpuDevice, rng: np.random.Generator) -> None:
    """NaN, both infinities, both zeros and denormals included; 70 values take two rendezvous."""
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-42, -1e-42, 3.0e38], np.float32)
    values, mismatches = ordered.empty((70, 32), np.float32), ordered.empty(32, np.uint32)
    values[:] = rng.standard_normal((70, 32), np.float32) * np.float32(2.0) ** rng.integers(-60, 60, (70, 32))
    values[10:40] = rng.choice(special, (30, 32))
    values[40:45] = rng.choice(special[3:5], (5, 32))
    values[45, :] = np.nan
    launch(ordered, "warp_reduce", WARP_REDUCE, 1, 32, (values, mismatches))

    assert [0] * 32 == mismatches.tolist()


def race_outs(order: str, seed: int) -> list[list[int]]:
    """Run the race twice on a fresh device."""
    with cpu_device(order, seed=seed) as device:
        outs = [device.empty(64, np.int32) for _ in range(2)]
        for out in outs:
            launch(device, "race", RACE, 1, 64, (out,))
        return [out.tolist() for out in outs]


def test_a_data_race_gives_different_bits_in_another_order() -> None:
    """The missing barrier shows: ascending sees the old value, descending the new one.

    A failure found under a seed is found again under it; every launch draws another order.
    """
    ascending, descending = [-1] * 63 + [0], [*range(1, 64), -1]
    assert race_outs("ascending", 11) == [ascending] * 2
    assert race_outs("descending", 11) == [descending] * 2
    first, again, other = (race_outs("random", seed) for seed in (1, 1, 2))

    assert first == again != other
    assert first[0] != first[1]
    assert other[0] not in (ascending, descending)


ORDER_OF_BLOCKS = r"""
extern "C" __global__ void order_of_blocks(int* next, int* seen) {
    int place = atomicAdd(next, 1);
    seen[place] = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
}
"""


@pytest.mark.parametrize("order", ORDERS)
def test_every_block_runs_once_in_the_chosen_order(order: str) -> None:
    """Three dimensions of grid; the random order is a permutation."""
    with cpu_device(order, seed=5) as device:
        following, seen = device.zeros(1, np.int32), device.empty(60, np.int32)
        found = kernel(device, "order_of_blocks", ORDER_OF_BLOCKS)
        found.launch((5, 4, 3), (1, 1, 1), (following, seen), device.stream())
        straight = list(range(60))
        order_seen = {str(straight): "ascending", str(straight[::-1]): "descending"}.get(str(seen.tolist()), "random")

        assert sorted(seen.tolist()) == straight
        assert order_seen == order


INDICES = r"""
extern "C" __global__ void indices(int* out) {
    int linear = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    out[block * blockDim.x * blockDim.y * blockDim.z + linear] =
        threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z +
        1000 * blockIdx.x + 10000 * blockIdx.y + 100000 * blockIdx.z;
}
"""


def test_thread_and_block_indices_cover_three_dimensions(cpu: CpuDevice) -> None:
    """x runs fastest, then y, then z; a launch of another shape on the same device starts afresh."""
    found = kernel(cpu, "indices", INDICES)
    for grid, block in (((3, 2, 2), (5, 3, 2)), ((1, 1, 4), (2, 2, 9)), ((3, 2, 2), (5, 3, 2))):
        out = cpu.empty(grid[::-1] + block[::-1], np.int32)
        found.launch(grid, block, (out,), cpu.stream())
        bz, by, bx, tz, ty, tx = np.indices(out.shape)

        assert np.array_equal(out, tx + 10 * ty + 100 * tz + 1000 * bx + 10000 * by + 100000 * bz)


@pytest.mark.parametrize(("order", "threads", "blocks", "block"), [
    *((order, 1, 3, 96) for order in ORDERS), ("ascending", 4, 500, 32),
])
def test_spin_loops_let_others_run(order: str, threads: int, blocks: int, block: int) -> None:
    """Atomics that change nothing, and __nanosleep, yield to the holder of a lock, on another OS thread too."""
    with cpu_device(order, seed=5, threads=threads) as device:
        lock, counter, flags = (device.zeros(n, np.int32) for n in (1, 1, 64))
        launch(device, "spin_lock", SPIN_LOCK, blocks, block, (lock, counter))
        launch(device, "wait_for_neighbour", WAIT_FOR_NEIGHBOUR, 1, 64, (flags,))

        assert (blocks * block, 7) == (int(counter[0]), int(flags[0]))


ENDLESS = r"""
extern "C" __global__ void endless(int* flag) {
    if (threadIdx.x == 1) while (atomicAdd(flag, 0) == 0) {}
    __syncthreads();
}
"""


def test_a_spin_that_cannot_end_is_a_fault() -> None:
    """The others wait at a barrier; the report names the thread that never comes, and the device stays usable."""
    with cpu_device(spin_seconds=0.05) as device:
        flag = device.zeros(1, np.int32)
        with pytest.raises(DeviceFault, match=r"63 of 64 threads wait .* but this thread spins") as caught:
            launch(device, "endless", ENDLESS, 1, 64, (flag,))
        assert caught.value.fields["thread"] == (1, 0, 0)

        flag[0] = 1
        launch(device, "endless", ENDLESS, 1, 64, (flag,))


DIVERGENT = {  # name: lines of a kernel from line 2 on, the thread that the message names, the message
    "exited": ("if (threadIdx.x == 37) return;\n__syncthreads();", 37,
               "divergent barrier: 63 of 64 threads wait in __syncthreads at test_exited.cu:3, but this thread exited"),
    "two_sites": ("if (threadIdx.x < 32) __syncthreads();\nelse __syncthreads();", 32,
                  "divergent barrier: 32 of 64 threads wait .*sites.cu:2, but this thread waits in .*two_sites.cu:3"),
    "in_a_collective": (
        "if (threadIdx.x == 40) { out[0] = __shfl_sync(0xFFFFFFFFu, 1, 0); return; }\n__syncthreads();", 32,
        "lanes 0x00000100 of warp 1 wait in __shfl_sync .*collective.cu:2, but lane 0 waits in __syncthreads"),
    "lane_exited": ("if (threadIdx.x == 9) return;\nout[threadIdx.x] = __ballot_sync(0xFFFFFFFFu, 1);", 9,
                    "wait in __ballot_sync with mask 0xffffffff at test_lane_exited.cu:3, but lane 9 exited"),
    "other_operation": ("out[0] = threadIdx.x < 8 ? __any_sync(0xFFFFFFFFu, 1) : __all_sync(0xFFFFFFFFu, 1);", 8,
                        "lanes 0x000000ff of warp 0 wait in __any_sync .* but lane 8 waits in __all_sync"),
    "other_mask": ("out[threadIdx.x] = __ballot_sync(threadIdx.x == 3 ? 0x0000FFFFu : 0xFFFFFFFFu, 1);", 3,
                   "but lane 3 waits in __ballot_sync with mask 0x0000ffff"),
    "not_in_mask": ("out[threadIdx.x] = __ballot_sync(0x0000FFFFu, 1);", 16,
                    "wrong mask: lane 16 calls __ballot_sync with mask 0x0000ffff, which does not name it"),
    "source_outside": (
        "if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0x0000FFFFu, 1, threadIdx.x == 2 ? 20 : 0);", 2,
        "wrong source: lane 2 reads lane 20 in __shfl_sync with mask 0x0000ffff"),
    "partial_warp": ("float value[1] = {1.0f};\npk_warp_max(value);\nout[0] = value[0];", 0,
                     "pk_warp_max needs 32 lanes .* this warp has 20"),
}


@pytest.mark.parametrize("name", DIVERGENT)
def test_divergence_is_an_exact_error(cpu: CpuDevice, name: str) -> None:
    """Kernel, block, thread and both places are named; the next launch works."""
    body, thread, message = DIVERGENT[name]
    text = f'extern "C" __global__ void {name}(int* out) {{\n{body}\n}}'
    block = 20 if name == "partial_warp" else 64 if "barrier" in message or name == "in_a_collective" else 32
    out = cpu.empty(64, np.int32)
    with pytest.raises(DeviceFault, match=message) as caught:
        launch(cpu, name, text, 2, block, (out,))
    launch(cpu, "race", RACE, 1, 64, (out,))

    assert (name, (0, 0, 0), (thread, 0, 0)) == tuple(caught.value.fields[key] for key in ("kernel", "block", "thread"))
    assert out.tolist() == [-1] * 63 + [0]


PARTIAL_WARP = r"""
extern "C" __global__ void partial(unsigned* out) {
    __syncwarp();
    int next = __shfl_down_sync(0xFFFFFFFFu, (int)threadIdx.x, 1, 8);
    unsigned votes = __ballot_sync(0xFFFFFFFFu, threadIdx.x % 2);
    __syncthreads();
    out[threadIdx.x] = votes * 256u + next;
}
"""


def test_a_partial_warp_takes_part_with_the_lanes_it_has(ordered: CpuDevice) -> None:
    """As on a GPU, nothing waits for lanes that the block does not have."""
    out = ordered.empty(40, np.uint32)
    launch(ordered, "partial", PARTIAL_WARP, 1, 40, (out,))
    votes = [0xAAAAAA00] * 32 + [0xAA00] * 8

    assert out.tolist() == [votes[t] + (t + 1 if t % 8 < 7 else t) for t in range(40)]


COOPERATE = r"""
static void transpose(const void* const* inputs, void* const* outputs) {
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 32; ++i) static_cast<int*>(outputs[lane])[i] = static_cast<const int*>(inputs[i])[lane];
}
extern "C" __global__ void cooperate(int* out) {
    int row[32], column[32];
    for (int i = 0; i < 32; ++i) row[i] = threadIdx.x * 100 + i;
    pk_warp_cooperate(transpose, row, column, __FILE__, __LINE__);
    for (int i = 0; i < 32; ++i) out[threadIdx.x * 32 + i] = column[i];
}
"""


def test_a_cooperation_sees_the_data_of_all_lanes(ordered: CpuDevice) -> None:
    """One rendezvous, one function over 32 inputs and 32 outputs: what a twin of a warp-wide instruction needs."""
    out = ordered.empty((32, 32), np.int32)
    launch(ordered, "cooperate", COOPERATE, 1, 32, (out,))
    row, lane = np.indices((32, 32))

    assert np.array_equal(out, lane * 100 + row)


LAST_BLOCK = r"""
extern "C" __global__ void last_block(int* done, int* partial, int* total) {
    PK_SHARED(int, is_last, 1);
    if (threadIdx.x == 0) partial[blockIdx.x] = blockIdx.x;
    __threadfence();
    if (threadIdx.x == 0) is_last[0] = atomicAdd(done, 1) == gridDim.x - 1;
    __syncthreads();
    if (is_last[0] && threadIdx.x == 0) {
        int sum = 0;
        for (int i = 0; i < gridDim.x; ++i) sum += partial[i];
        *total = sum;
    }
}
"""


@pytest.mark.parametrize("order", ORDERS)
def test_the_last_block_sees_the_work_of_all_others(order: str) -> None:
    """Counter, fence and shared flag, in every order and on several OS threads."""
    with cpu_device(order, threads=3) as device:
        done, partial, total = (device.zeros(n, np.int32) for n in (1, 400, 1))
        launch(device, "last_block", LAST_BLOCK, 400, 64, (done, partial, total))

        assert int(total[0]) == 400 * 399 // 2
