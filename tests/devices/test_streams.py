"""Streams, events, copies, memory and opening of both devices, and the line on stderr where a GPU stays unused."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

import pagedkv as pk
from pagedkv import devices
from pagedkv.devices import open_device
from pagedkv.devices.cpu.device import CpuDevice
from pagedkv.devices.cuda import device as cuda
from pagedkv.devices.cuda.driver import visible_gpu
from pagedkv.devices.cuda.runtime import find_cupy
from pagedkv.devices.device import BaseDevice
from pagedkv.errors import CapacityError, MissingRequirement, MisuseError
from tests.cuda.fake_driver import NO_DEVICE, FakeDriver, load_of
from tests.devices.conftest import Opener
from tests.kernels.cpu_helpers import captured, launch


def test_copies_go_between_device_pinned_and_pageable_memory(device: BaseDevice, rng: np.random.Generator) -> None:
    """Any pair of which one side is the device's; shapes may differ when bytes agree, and arrays may be empty."""
    values = rng.integers(0, 1000, (3, 5), np.int32)
    stream = device.stream()
    on_device, other = device.empty((3, 5), np.int32), device.empty(15, np.int32)
    staging, back = device.pinned((3, 5), np.int32), np.zeros((3, 5), np.int32)
    device.copy(device.empty((0, 4), np.float32), np.zeros((4, 0), np.float32), stream)
    for destination, source in ((on_device, values), (other, on_device), (staging, other), (back, staging)):
        device.copy(destination, source, stream)

    assert np.array_equal(values, back)
    single = device.zeros((), np.int64)
    single[()] = 5
    assert int(single) == 5


def test_misuse_of_copies_events_and_memory_is_refused(device: BaseDevice, other: BaseDevice) -> None:
    """Copies: size, dtype, contiguity, read-only destinations, pageable on both sides; nothing is written.

    Allocations: alignment, objects, negative extents, and more than there is; then what another device owns.
    """
    stream, target, frozen = device.stream(), device.zeros(8, np.int32), device.pinned(8, np.int32)
    frozen.flags.writeable = False
    copies: list[tuple[Any, Any]] = [
        (target, np.ones(7, np.int32)), (target, np.ones(8, np.uint32)), (target, np.ones((4, 4), np.int32)[:, ::2]),
        (target[::2], np.ones(4, np.int32)), (np.zeros(8, np.int32), np.ones(8, np.int32)),
        (frozen, np.ones(8, np.int32)), (target, [1] * 8),
    ]
    allocations: list[tuple[Any, Any, int]] = [
        (8, np.int32, 3), (8, np.int32, 8192), (8, np.object_, 256), ((4, -1), np.int32, 256),
    ]
    cases: list[tuple[Callable[[], object], str]] = [
        *((partial(device.copy, *arrays, stream), "copy was refused") for arrays in copies),
        *((partial(device.empty, shape, dtype, align_bytes=align), "an allocation was refused")
          for shape, dtype, align in allocations),
        (lambda: stream.record(other.event()), "expected an event of this device"),
        (lambda: stream.wait(other.event()), "expected an event of this device"),
        (lambda: device.address(np.zeros(4)), "expected an array of this device"),
    ]
    for use, message in cases:
        with pytest.raises(MisuseError, match=message):
            use()
    with pytest.raises(CapacityError):
        device.zeros(1 << 50, np.uint8)

    assert not target.any()


def test_every_submission_counts_one_driver_call(device: BaseDevice) -> None:
    """Launch, copy, call, record, wait, query, both synchronizations, graph launch and upload."""
    stream, event = device.stream(), device.event()
    target, source = device.zeros(4, np.int32), device.zeros(4, np.int32)
    graph = captured(device, stream, lambda: device.copy(target, source, stream))
    before = device.driver_calls
    steps: list[Any] = [
        lambda: launch(device, "nothing", 'extern "C" __global__ void nothing() {}', 1, 1),
        lambda: device.copy(target, source, stream), lambda: device.call(stream, clear, target),
        lambda: stream.record(event), lambda: stream.wait(event), event.query, event.synchronize, stream.synchronize,
        lambda: graph.launch(stream), lambda: graph.upload(stream),
    ]
    for count, step in enumerate(steps, 1):
        step()
        assert device.driver_calls - before == count


def clear(target: Any) -> None:
    target[:] = 0


def test_events_have_passed_in_eager_mode(device: BaseDevice) -> None:
    """Recorded or not: CUDA calls an event that was never recorded complete."""
    stream, other, event = device.stream(), device.stream(), device.event()
    assert event.query()
    stream.record(event)
    other.wait(event)
    event.synchronize()

    assert event.query()
    assert (cast("Any", stream).device, stream.is_capturing) == (device, False)


@pytest.mark.parametrize("align_bytes", [1, 2, 16, 256, 512, 1024, 4096])
def test_arrays_end_at_the_guard_within_their_alignment(device: BaseDevice, align_bytes: int) -> None:
    """C3.10: addresses are its multiples; on the cpu device the slack behind the data is smaller than it."""
    for count in (1, 255, 4096, 4097):
        array = device.empty(count, np.uint8, align_bytes=align_bytes)
        address = device.address(array)

        assert address % align_bytes == 0
        assert device.name != "cpu" or -(address + count) % 4096 < align_bytes


def test_memory_returns_with_the_last_view(cpu: CpuDevice) -> None:
    """A view keeps the mapping; the count of allocated bytes falls with the last view.  Free is within total."""
    array = cpu.empty(1000, np.uint8)
    view = array[100:]
    del array
    gc.collect()
    held = cpu.allocated_bytes
    del view
    gc.collect()
    free, total = cpu.memory_bytes()

    assert (1000, 0) == (held, cpu.allocated_bytes)
    assert 0 < free <= total


def no_cupy() -> None:
    """Stand for a machine without a GPU."""
    raise MissingRequirement("device cuda", expected="a GPU", got="no GPU", remedy="use device 'cpu'", clause="C12.4")


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_open_device_says_which_and_why(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, with the reason; the result keeps the protocol."""
    monkeypatch.setattr(cuda, "find_cupy", no_cupy)
    device = open_device(name)
    line = device.description
    device.close()

    assert line.startswith("cpu device: kernels as fibers on ")
    assert "\n" not in line
    assert line.endswith("; asked for" if name == "cpu" else "; chosen because there is no cuda device: no GPU")


def test_open_device_refuses_what_it_cannot_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuda says what is missing; another name is misuse."""
    monkeypatch.setattr(cuda, "find_cupy", no_cupy)
    for name, error, message in (("cuda", MissingRequirement, "use device 'cpu'"), ("tpu", MisuseError, "one of")):
        with pytest.raises(error, match=message):
            open_device(name)


@pytest.mark.parametrize("options", [
    {"order": "sideways"}, {"threads": 0}, {"threads": 257}, {"checks": "everything"}, {"mode": "lazy"},
    {"mode": "deferred", "schedule": "sometimes"},
])
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(MisuseError, match="of the cpu device was refused"):
        CpuDevice(**options)


def test_a_forked_child_refuses_the_device_and_may_open_its_own(opener: Opener) -> None:
    """Helper threads do not survive a fork."""
    with opener(threads=2) as device:
        assert ones(device, 1).all()
        child = os.fork()
        if child == 0:
            os._exit(child_of_fork(device, opener))
        _, status = os.waitpid(child, 0)

        assert ones(device, 1).all()
        assert os.waitstatus_to_exitcode(status) == 7


def ones(device: BaseDevice, blocks: int) -> Any:
    """Let a kernel write 32 ones."""
    out = device.zeros(32, np.int32)
    text = 'extern "C" __global__ void one(int* out) { out[threadIdx.x] = 1; }'
    launch(device, "one", text, blocks, 32, (out,))
    return out


def child_of_fork(device: BaseDevice, opener: Opener) -> int:
    try:
        device.stream()
    except MisuseError as error:
        with opener(threads=2) as own:
            return 1 if "after fork" not in str(error) else 7 if ones(own, 100).all() else 2
    return 3


CONFIG = pk.StoreConfig(pk.KVGeometry(layers=1, query_heads=1, kv_heads=1, head_dim=64), profile="bf16", max_context=64,
                        max_concurrency=1, kv_capacity=pk.ExplicitCapacity(64))


@pytest.mark.parametrize(("driver", "name"), [
    (None, ""), (FakeDriver(code=NO_DEVICE), ""), (FakeDriver(gpus=0), ""), (FakeDriver(gpus=2), "H200"),
])
def test_the_driver_names_the_gpu_that_this_process_sees(driver: FakeDriver | None, name: str) -> None:
    assert visible_gpu(load_of(driver)) == name


UNUSED = (
    "pagedkv: this machine has a GPU, H200, but the store runs on the cpu device: CuPy is not installed; "
    "run `python -m pip install 'pagedkv[cuda13]'` (or cuda12, as the driver allows)\n"
)


@pytest.mark.parametrize(("driver", "said"), [(FakeDriver(), UNUSED), (None, "")], ids=["gpu", "no-gpu"])
@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_a_gpu_that_stays_unused_is_said_on_stderr(
    name: str, driver: FakeDriver | None, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where "auto" found no CuPy; a machine without a GPU, and a caller who asked for "cpu", hear nothing."""

    def no_cupy(module: str) -> None:
        raise ModuleNotFoundError(module, name="cupy")

    monkeypatch.setattr(cuda, "find_cupy", lambda: find_cupy(no_cupy))
    monkeypatch.setattr(devices, "visible_gpu", lambda: visible_gpu(load_of(driver)))
    with pk.open_store(CONFIG, device=name) as store:
        assert store.device.name == "cpu"

    lines = [line for line in capsys.readouterr().err.splitlines(keepends=True) if "compil" not in line]
    assert "".join(lines) == (said if name == "auto" else "")
