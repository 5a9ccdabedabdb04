"""What only a real card shows: CUDA's own refusals, real order, memory, and an error that ends the context."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.devices.cuda import staging as cuda_staging
from pagedkv.devices.cuda.device import CudaDevice
from pagedkv.graphs import DecodeLoop
from tests.checkout import ROOT
from tests.cuda.test_device_on_fake import double, fill, hidden_product, pair, read_back, sum_of_products, with_numpy
from tests.graphs.test_decode_loop import GEOMETRY
from tests.kernels.cpu_helpers import captured
from tests.toy_model import ToyModel, opened_store, prefilled

SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) { }
}
"""
SPIN_CYCLES = 200_000_000  # a tenth of a second


def spin(device: CudaDevice, stream: pk.Stream) -> None:
    """Keep a stream busy for a while."""
    kernel = device.load(pk.ModuleSpec("test_spin", text=SPIN, kernels=("spin",))).kernel("spin")
    kernel.launch((1, 1, 1), (1, 1, 1), (np.int64(SPIN_CYCLES),), stream)


# ---- capture ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fn", [sum_of_products, hidden_product, read_back])
def test_the_device_survives_what_cuda_refuses_under_capture(gpu: CudaDevice, fn: Callable[..., None]) -> None:
    """C15.1: products in the open and hidden, and a value read back."""
    target, source = pair(gpu)
    stream = gpu.stream()
    fill(gpu, source, np.arange(9).reshape(3, 3))
    gpu.call(stream, fn, target, source)
    stream.synchronize()
    gpu.begin_capture(stream)
    with pytest.raises(pk.CaptureRefused):
        gpu.call(stream, fn, target, source)
    gpu.abort_capture(stream)
    gpu.call(stream, double, target, source)
    stream.synchronize()

    assert np.array_equal(target.get(), 2 * source.get())


def test_a_capture_without_a_warm_up_is_refused_and_one_with_it_is_not(gpu: CudaDevice) -> None:
    """Thread-local mode refuses cudaMalloc."""
    target, source = gpu.zeros((777, 3), np.float32), gpu.zeros((777, 3), np.float32)
    stream = gpu.stream()
    gpu.begin_capture(stream)
    with pytest.raises(pk.CaptureRefused):
        gpu.call(stream, double, target, source)
    gpu.abort_capture(stream)
    gpu.call(stream, double, target, source)
    graph = captured(gpu, stream, lambda: gpu.call(stream, double, target, source))
    gc.collect()
    others = [gpu.zeros((777, 3), np.float32) for _ in range(8)]
    fill(gpu, source, np.ones((777, 3)))
    graph.launch(stream)
    stream.synchronize()

    assert (target.get() == 2).all()
    assert not any(other.get().any() for other in others)
    assert graph.memory_bytes >= target.nbytes


def test_numpy_arrays_among_cupys_are_refused(gpu: CudaDevice) -> None:
    """As on the CuPy without a GPU."""
    with pytest.raises(TypeError, match="Unsupported type"):
        gpu.call(gpu.stream(), with_numpy, *pair(gpu))


def test_streams_fork_and_join_in_a_capture(gpu: CudaDevice) -> None:
    """The dependencies that we note are those that CUDA keeps: the graph runs in order on every replay.

    CUDA ends a capture with an unjoined stream with an error; we refuse before that, and both streams live.
    """
    (a, b), c = pair(gpu), gpu.zeros((3, 3), np.float32)
    main, side, fork, join = gpu.stream(), gpu.stream(), gpu.event(), gpu.event()
    for stream in (main, side):
        gpu.call(stream, double, b, a)
        stream.synchronize()

    def forked() -> None:
        gpu.begin_capture(main)
        main.record(fork)
        side.wait(fork)
        gpu.call(side, double, b, a)

    forked()
    with pytest.raises(pk.CaptureRefused, match="does not wait for"):
        gpu.end_capture(main)
    fill(gpu, a, np.ones((3, 3)))
    gpu.call(side, double, b, a)
    side.synchronize()
    main.synchronize()
    assert (b.get() == 2).all()

    forked()
    side.record(join)
    main.wait(join)
    gpu.call(main, double, c, b)
    graph = gpu.end_capture(main)
    fill(gpu, a, np.full((3, 3), 2))
    graph.launch(main)
    main.synchronize()

    assert (c.get() == 8).all()
    assert [node.dependencies for node in graph.nodes] == [(), (0,)]
    assert "digraph" in graph.debug_text()


# ---- order -----------------------------------------------------------------------------------------------------------
def test_a_pageable_source_may_be_rewritten_as_soon_as_copy_returns(gpu: CudaDevice) -> None:
    """Behind a busy stream, below and above a half of the staging."""
    stream = gpu.stream()
    for byte_count in (1000, 3 * cuda_staging.STAGING_HALF_BYTES + 5):
        target, source = gpu.zeros(byte_count, np.uint8), np.full(byte_count, 7, np.uint8)
        spin(gpu, stream)
        gpu.copy(target, source, stream)
        source[...] = 9
        stream.synchronize()

        assert (target.get() == 7).all()


def test_streams_wait_for_events_only(gpu: CudaDevice) -> None:
    """A stream that waits sees what came before; an event is not done while its stream is busy."""
    target, source = pair(gpu)
    first, second, event = gpu.stream(), gpu.stream(), gpu.event()
    gpu.call(first, double, target, source)
    gpu.call(second, double, target, source)
    fill(gpu, source, np.ones((3, 3)))
    spin(gpu, first)
    gpu.call(first, double, source, source)
    first.record(event)
    assert not event.query()
    second.wait(event)
    gpu.call(second, double, target, source)
    second.synchronize()

    assert event.query()
    assert (target.get() == 4).all()


def test_kernels_and_calls_use_pinned_memory_in_place(gpu: CudaDevice) -> None:
    """Unified addressing: the same bytes on both sides."""
    pinned, target = gpu.pinned((3, 3), np.float32), gpu.zeros((3, 3), np.float32)
    stream = gpu.stream()
    pinned[...] = 3
    gpu.call(stream, double, target, pinned)
    gpu.call(stream, double, pinned, target)
    stream.synchronize()

    assert (pinned == 12).all()


# ---- memory, interchange, cost ---------------------------------------------------------------------------------------
def test_memory_is_taken_given_back_and_reported(gpu: CudaDevice) -> None:
    """C5.3; 1 GiB, so that the driver's own granularity does not matter."""
    gpu.empty_caches()
    free, total = gpu.memory_bytes()
    array = gpu.zeros(1 << 30, np.uint8)
    during, _ = gpu.memory_bytes()
    assert gpu.allocated_bytes == 1 << 30
    assert free - during >= 1 << 30
    assert not array[:: 1 << 20].any()
    del array
    assert gpu.empty_caches() >= 1 << 30

    assert gpu.memory_bytes() == (free, total)
    with pytest.raises(pk.CapacityError, match="for too much"):
        gpu.empty(2 * total, np.uint8, name="too much")


def test_arrays_cross_dlpack_without_a_copy(gpu: CudaDevice) -> None:
    """What torch, and every other framework, does."""
    cupy = pytest.importorskip("cupy")
    array = gpu.zeros(16, np.int32)
    shared = cupy.from_dlpack(array)

    assert gpu.address(shared) == gpu.address(array)


def test_a_decode_step_is_one_launch_and_one_wait(gpu: CudaDevice) -> None:
    """C9.4, C11.2: the same count as on cpu."""
    with opened_store(GEOMETRY, max_context=1280, concurrency=1, device=gpu) as store:
        loop = DecodeLoop(store, ToyModel(store))
        sequence = prefilled(loop, list(range(16)), 30)
        steps = sum(1 for _ in loop.decode([sequence]))

        assert steps == 29
        assert loop.statistics.driver_calls_per_step == 2.0


FAULT = """
import numpy as np, pagedkv as pk
device = pk.open_device("cuda")
text = 'extern "C" __global__ void bad(int* p) { p[1LL << 40] = 1; }'
kernel = device.load(pk.ModuleSpec("test_fault", text=text, kernels=("bad",))).kernel("bad")
array = device.zeros(4, np.int32)
geometry = pk.KVGeometry(layers=1, query_heads=2, kv_heads=1, head_dim=64)
config = pk.StoreConfig(geometry, profile="bf16", max_context=128, max_concurrency=1,
                        kv_capacity=pk.ExplicitCapacity(128))
store = pk.open_store(config, device=device)
sequence = store.activate(prompt_tokens=8, output_tokens=8)
unit = store.begin_unit(store.batch([sequence]), 8)
kernel.launch((1, 1, 1), (1, 1, 1), (array,), store.stream)
try:
    store.wait(unit)
except pk.DeviceFault as fault:
    assert fault.status == 700, fault
else:
    raise SystemExit("no fault")
try:
    store.activate(prompt_tokens=1, output_tokens=1)
except pk.StoreLatched:
    pass
else:
    raise SystemExit("not latched")
assert store.memory_summary()["main"]["capacity_pages"] == 2
store.close()
print("latched")
"""


def test_an_access_out_of_bounds_latches_the_store(gpu: CudaDevice) -> None:
    """C12.4; in a process of its own, because CUDA's context does not survive."""
    result = subprocess.run([sys.executable, "-c", FAULT], cwd=ROOT, capture_output=True, text=True, timeout=120,
                            check=False)

    assert (result.returncode, result.stdout.strip()) == (0, "latched"), result.stderr


@pytest.mark.long
def test_every_shipped_module_loads(gpu: CudaDevice) -> None:
    """The driver accepts what NVRTC makes, of every profile and head dimension."""
    for spec in pk.shipped_modules():
        assert gpu.load(spec).spec == spec
