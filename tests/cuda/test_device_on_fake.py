"""The cuda device's own parts, on a CuPy that has no GPU: pools, staging, faults, and what only CuPy refuses."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pagedkv.devices import open_device
from pagedkv.devices.cuda import device as cuda
from pagedkv.devices.cuda import staging as cuda_staging
from pagedkv.devices.cuda.device import CudaDevice
from pagedkv.devices.cuda.runtime import CudaRuntime, find_cupy
from pagedkv.devices.protocol import ModuleSpec, cpu_only
from pagedkv.errors import CapacityError, CaptureRefused, DeviceFault, MissingRequirement, MisuseError
from pagedkv.tools.doctor import check_device
from tests.cuda.fake_cupy import CUDARuntimeError, FakeCupy
from tests.kernels.cpu_helpers import captured

NULL = r"""
extern "C" __global__ void null(const int* maybe, int* out, int value) { out[threadIdx.x] = maybe ? maybe[0] : value; }
"""


def double(target: Any, source: Any) -> None:
    target[...] = (source + source) * 1


def sum_of_products(target: Any, source: Any) -> None:
    target[...] = source @ source


HIDDEN = ("mat", "mul")


def hidden_product(target: Any, source: Any) -> None:
    target[...] = getattr(np, "".join(HIDDEN))(source, source)


def read_back(target: Any, source: Any) -> None:
    if source[0, 0] > 0:
        target[...] = 1


def with_numpy(target: Any, source: Any) -> None:
    target[...] = source + np.arange(3)


def divide(target: Any, source: Any) -> None:
    raise ZeroDivisionError


@cpu_only
def marked(target: Any, source: Any) -> None:
    target[...] = source


@pytest.fixture
def device(fake_device: CudaDevice) -> CudaDevice:
    return fake_device


def pair(device: CudaDevice) -> tuple[Any, Any]:
    return device.zeros((3, 3), np.float32), device.zeros((3, 3), np.float32)


def fill(device: CudaDevice, target: Any, values: Any) -> None:
    stream = device.stream()
    device.copy(target, np.ascontiguousarray(values, target.dtype), stream)
    stream.synchronize()


# ---- calls -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("fn", "message"), [
    (sum_of_products, "library matrix product"), (hidden_product, "library matrix product"),
    (read_back, "read nothing back"),
])
def test_products_and_values_read_back_are_refused_under_capture(
    device: CudaDevice, fn: Callable[..., None], message: str
) -> None:
    """C15.1: the byte code shows an open product; CuPy itself refuses a hidden one, and a branch on device data."""
    target, source = pair(device)
    stream = device.stream()
    fill(device, source, np.arange(9).reshape(3, 3))
    device.call(stream, fn, target, source)
    device.begin_capture(stream)
    with pytest.raises(CaptureRefused, match=message):
        device.call(stream, fn, target, source)
    device.abort_capture(stream)

    assert fn is read_back or np.array_equal(source.get() @ source.get(), target.get())


@pytest.mark.parametrize(("fn", "error", "message"), [
    (marked, MisuseError, "marked cpu_only"), (with_numpy, TypeError, "Unsupported type"),
    (divide, ZeroDivisionError, "^$"),
])
def test_a_call_that_fails_tells_its_caller_at_submission(
    device: CudaDevice, fn: Callable[..., None], error: type[Exception], message: str
) -> None:
    """Under capture too, and the capture stays open.

    `marked` would run NumPy's products on CuPy's arrays; `np.arange(n)` without `like=source` works on cpu by accident.
    """
    target, source = pair(device)
    stream = device.stream()
    with pytest.raises(error, match=message):
        device.call(stream, fn, target, source)
    fill(device, source, np.zeros((3, 3)))
    device.begin_capture(stream)
    with pytest.raises(error, match=message):
        device.call(stream, fn, target, source)

    assert device.end_capture(stream).nodes == ()


def test_a_captured_call_runs_once_and_replays_on_memory(device: CudaDevice, machine: FakeCupy) -> None:
    """C15.1: what it launched is replayed; Python is not entered again, and temporaries are the graph's."""
    target, source = pair(device)
    stream = device.stream()
    device.call(stream, double, target, source)
    graph = captured(device, stream, lambda: device.call(stream, double, target, source))
    assert graph.memory_bytes > 0
    gc.collect()
    others = [device.zeros((3, 3), np.float32) for _ in range(4)]
    for step in (1.0, 2.0):
        fill(device, source, np.full((3, 3), step))
        graph.launch(stream)
        assert target.get().tolist() == [[2 * step] * 3] * 3

    assert not any(other.get().any() for other in others), "temporaries of a replay lie in memory of nobody else"
    held = graph.memory_bytes
    large = [device.zeros((50, 50), np.float32) for _ in range(2)]
    device.call(stream, double, *large)
    assert graph.memory_bytes == held, "later calls allocate elsewhere"


def test_a_graph_without_a_warm_up_is_refused_because_nothing_can_be_allocated(device: CudaDevice) -> None:
    """Thread-local capture refuses cudaMalloc, and the capture is broken afterwards."""
    target, source = pair(device)
    stream = device.stream()
    device.begin_capture(stream)
    with pytest.raises(CaptureRefused, match="memory reserved by a warm-up"):
        device.call(stream, double, target, source)
    with pytest.raises(CaptureRefused):
        device.end_capture(stream)
    assert not stream.is_capturing
    device.call(stream, double, target, source)
    device.begin_capture(stream)
    device.call(stream, double, target, source)

    assert [node.name for node in device.end_capture(stream).nodes] == ["double"]


def test_a_pinned_array_in_a_call_is_the_same_memory_seen_by_cupy(device: CudaDevice) -> None:
    """Otherwise NumPy would run on the host at capture, and never again."""
    pinned, target = device.pinned((3, 3), np.float32), device.zeros((3, 3), np.float32)
    stream = device.stream()
    pinned[...] = 1
    device.call(stream, double, target, pinned)
    graph = captured(device, stream, lambda: device.call(stream, double, target, pinned))
    pinned[...] = 5
    graph.launch(stream)

    assert target.get().tolist() == [[10.0] * 3] * 3


# ---- copies and launches ---------------------------------------------------------------------------------------------
def test_a_pageable_source_is_read_before_the_copy_returns(device: CudaDevice, machine: FakeCupy) -> None:
    """Design 4: in pieces through pinned memory, each half written again only behind its event."""
    half = cuda_staging.STAGING_HALF_BYTES
    stream = device.stream()
    target = device.empty(5 * half + 3, np.uint8)
    source = np.arange(target.size, dtype=np.uint32).astype(np.uint8)
    machine.log.clear()
    device.copy(target, source, stream)
    submitted = list(machine.log)

    assert submitted.count("memcpyAsync") == 6
    # Halves are left five times; the first wait is for the first half, before its second use.
    assert [name for name in submitted if name != "memcpyAsync"] == ["eventRecord"] + 4 * [
        "eventRecord", "eventSynchronize",
    ]
    assert np.array_equal(source, target.get())


def test_small_pageable_copies_share_one_staging_until_the_stream_is_waited_for(
    device: CudaDevice, machine: FakeCupy
) -> None:
    """Publishing a table slice costs one driver call, pins nothing, and needs no event after a synchronization."""
    half = cuda_staging.STAGING_HALF_BYTES
    stream, target, large = device.stream(), device.zeros(4, np.int32), device.empty(2 * half, np.uint8)
    calls = device.driver_calls
    for value in range(10):
        device.copy(target, np.full(4, value, np.int32), stream)
    assert device.driver_calls - calls == 10
    assert target.get().tolist() == [9] * 4

    for _ in range(3):
        stream.synchronize()
        machine.log.clear()
        device.copy(large, np.zeros(2 * half, np.uint8), stream)
        assert machine.log == ["memcpyAsync", "eventRecord", "memcpyAsync"]


def test_none_is_a_null_pointer_and_not_a_missing_parameter(device: CudaDevice) -> None:
    """CuPy's own launch would hand the driver a null where it expects the parameter's address."""
    kernel = device.load(ModuleSpec("test_null", text=NULL, kernels=("null",))).kernel("null")
    out, one, stream = device.zeros(4, np.int32), device.zeros(1, np.int32), device.stream()
    for maybe, value in ((None, 7), (one, 0)):
        kernel.launch((1, 1, 1), (4, 1, 1), (maybe, out, np.int32(7)), stream)
        assert out.get().tolist() == [value] * 4


# ---- faults ----------------------------------------------------------------------------------------------------------
def test_an_error_of_earlier_work_is_a_device_fault(device: CudaDevice, machine: FakeCupy) -> None:
    """C12.4: the wait and the query raise it, with CUDA's number; `cupy.cuda.Event.done` would say False for ever."""
    for use, status in ((device.stream().synchronize, 700), (device.event().query, 719)):
        machine.fail_with = status
        with pytest.raises(DeviceFault, match=str(status)) as caught:
            use()

        assert caught.value.fields["status"] == status
        machine.fail_with = 0
    for status, answer in ((0, True), (600, False)):  # CuPy returns CUDA's status of a query
        machine.fail_with = status
        assert device.event().query() == answer


def test_caches_are_emptied_and_counted(device: CudaDevice) -> None:
    """C5.3: F is what the driver reports after the caches of this process are emptied, and the plan prints them.

    C5.4: the error of memory that is not there names the array and its bytes.
    """
    free, total = device.memory_bytes()
    with pytest.raises(CapacityError, match=f"allocation of {free + 1} bytes for the slab"):
        device.empty(free + 1, np.uint8, name="the slab")
    array = device.empty(1000, np.uint8)
    view = array[10:]
    del array
    assert (device.memory_bytes(), device.allocated_bytes) == ((free - 1000, total), 1000)
    del view
    assert (device.memory_bytes(), device.allocated_bytes) == ((free - 1000, total), 0)

    assert device.empty_caches() == 1000
    assert device.memory_bytes() == (free, total)


def test_pinned_bytes_are_counted_and_may_be_dropped_under_capture(device: CudaDevice) -> None:
    """cudaFreeHost would break the capture: it waits until the end."""
    stream = device.stream()
    pinned = device.pinned(100, np.int32)
    assert device.pinned_bytes == 400
    device.begin_capture(stream)
    del pinned
    gc.collect()
    device.end_capture(stream)

    assert device.pinned_bytes == 0


# ---- compilation -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("option", ["--use_fast_math", "-ftz=true", "--ftz=true", "--fmad=true", "--prec-div=false"])
def test_options_that_change_bits_are_refused(machine: FakeCupy, option: str) -> None:
    """C14.6: both devices compute the same."""
    with pytest.raises(MisuseError, match="change bits"):
        CudaDevice(runtime=CudaRuntime(machine), options=(option,))


def test_a_source_that_nvrtc_refuses_comes_with_its_messages(device: CudaDevice) -> None:
    with pytest.raises(MisuseError, match="line 1: error: nonsense") as caught:
        device.load(ModuleSpec("test_nonsense", text="nonsense", kernels=("none",)))

    assert caught.value.fields["compiler_output"] == "line 1: error: nonsense"


def test_a_module_is_compiled_once_a_machine(machine: FakeCupy) -> None:
    """The second device finds machine code and signatures in the cache."""
    spec = ModuleSpec("test_null", text=NULL, kernels=("null",))
    CudaDevice(runtime=CudaRuntime(machine), announce=lambda line: None).load(spec)
    said: list[str] = []
    kernel = CudaDevice(runtime=CudaRuntime(machine), announce=said.append).load(spec).kernel("null")

    assert said == []
    assert kernel.parameters == ("pointer to const", "pointer", "int32")


# ---- what is missing -------------------------------------------------------------------------------------------------
def _cupy(**changes: Any) -> Callable[[str], Any]:
    """Give an importer of a CuPy on a good machine, changed in one point."""
    version = changes.pop("version", "14.2.0")
    capability = changes.pop("capability", (9, 0))
    getVersion = changes.pop("nvrtc", lambda: (13, 0))
    api = {
        "is_hip": False, "CUDARuntimeError": CUDARuntimeError, "driverGetVersion": lambda: 13000,
        "getDeviceCount": lambda: 1, "getDevice": lambda: 0,
        "deviceGetAttribute": lambda number, index: capability[number - 75],
    }
    cuda = SimpleNamespace(runtime=SimpleNamespace(**{**api, **changes}),
                           driver=SimpleNamespace(CUDADriverError=ArithmeticError),
                           nvrtc=SimpleNamespace(getVersion=getVersion))
    return lambda name: SimpleNamespace(__version__=version, cuda=cuda)


def _raise(error: Exception) -> Callable[..., Any]:
    def raising(*_: object) -> Any:
        raise error

    return raising


@pytest.mark.parametrize(("load", "got", "remedy"), [
    (_raise(ModuleNotFoundError("no", name="cupy")), "CuPy is not installed", r"pagedkv\[cuda13\]"),
    (_raise(ModuleNotFoundError("no", name="numpy.core")), "lacks the module numpy.core", r"pagedkv\[cuda13\]"),
    (_raise(ImportError("libcuda broken")), "does not load: libcuda broken", r"pagedkv\[cuda13\]"),
    (_cupy(version="13.6.0"), "CuPy 13.6.0", r"pagedkv\[cuda13\]"),
    (_cupy(is_hip=True), "for ROCm", r"pagedkv\[cuda13\]"),
    (_cupy(driverGetVersion=lambda: 0), "no NVIDIA driver", "install NVIDIA's driver"),
    (_cupy(getDeviceCount=_raise(CUDARuntimeError(100))), "cudaError 100", "install NVIDIA's driver"),
    (_cupy(getDeviceCount=lambda: 0), "no GPU", "make a GPU visible"),
    (_cupy(capability=(7, 5)), "GPU 0 with compute capability 7.5", "newer GPU"),
    (_cupy(nvrtc=_raise(RuntimeError("libnvrtc.so.13"))), "no NVRTC: libnvrtc.so.13", r"pagedkv\[cuda13\]"),
])
def test_what_is_missing_is_said_exactly_with_how_to_get_it(load: Callable[[str], Any], got: str, remedy: str) -> None:
    """One line each; `doctor` prints them."""
    with pytest.raises(MissingRequirement, match=got) as caught:
        find_cupy(load)

    assert "\n" not in str(caught.value)
    assert re.search(remedy, caught.value.remedy)
    assert find_cupy(_cupy(capability=(8, 0))).__version__ == "14.2.0", "compute capability 8.0 is enough"


def test_auto_and_doctor_open_the_gpu_that_answers(machine: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says which device it is and why; the doctor says what is missing."""
    line = "cuda device: a GPU that is not there (sm_90), CuPy 14.2.0"
    monkeypatch.setattr(cuda, "find_cupy", lambda: machine)
    devices = [open_device(name) for name in ("auto", "cuda")]
    found = check_device("cuda")
    monkeypatch.setattr(cuda, "find_cupy", lambda: find_cupy(_cupy(driverGetVersion=lambda: 0)))
    missing = check_device("cuda")

    assert [device.description for device in devices] == [f"{line}; chosen because it answers", f"{line}; asked for"]
    assert (found.status, found.found) == ("ok", f"{line}; asked for")
    assert (missing.status, missing.found) == ("missing", "no NVIDIA driver")
    assert "driver" in missing.remedy
