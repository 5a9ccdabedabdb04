"""Both devices check a launch against the kernel's real signature before anything runs."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pagedkv.devices.cpu.device import CpuDevice
from pagedkv.devices.device import BaseDevice
from pagedkv.devices.kernels import BaseKernel
from pagedkv.devices.protocol import ModuleSpec
from pagedkv.errors import DeviceFault, MisuseError
from tests.devices.conftest import Opener
from tests.kernels.cpu_helpers import ADD, kernel

EVERY_KIND = r"""
extern "C" __global__ void every_kind(double* out, const float* in, bool b, signed char i1, unsigned char u1, short i2,
                                      unsigned short u2, int i4, unsigned u4, long long i8, unsigned long long u8,
                                      float f4, double f8) {
    double all[] = {in ? in[0] : -1.0, double(b), double(i1), double(u1), double(i2), double(u2), double(i4),
                    double(u4), double(i8), double(u8), double(f4), f8};
    for (int i = 0; i < 12; ++i) out[i] = all[i];
}
"""

SCALARS = (
    np.bool_(True), np.int8(-8), np.uint8(200), np.int16(-3000), np.uint16(60000), np.int32(-(2**31)),
    np.uint32(2**32 - 1), np.int64(-(2**52)), np.uint64(2**53), np.float32(0.1), np.float64(0.1),
)


def add_kernel(device: BaseDevice) -> tuple[BaseKernel, list[Any]]:
    a, out = device.zeros(8, np.float32), device.zeros(8, np.float32)
    return kernel(device, "add", ADD), [a, out, np.int32(8), np.float32(1.0)]


def test_every_parameter_kind_arrives(device: BaseDevice) -> None:
    """Pointers, null, bool and all integer and floating sizes, at their extremes; what is not exported is refused."""
    out, source = device.empty(12, np.float64), device.empty(1, np.float32)
    source[0] = 3.5
    module = device.load(ModuleSpec("test_every_kind", text=EVERY_KIND, kernels=("every_kind",)))
    found = module.kernel("every_kind")
    for array, first in ((source, 3.5), (None, -1.0)):
        found.launch((1, 1, 1), (1, 1, 1), (out, array, *SCALARS), device.stream())

        assert [first, *(float(s) for s in SCALARS)] == out.tolist()
    assert found.parameters[:4] == ("pointer", "pointer to const", "bool", "int8")
    assert module.kernel("every_kind") is found
    with pytest.raises(MisuseError, match=r"kernel missing of module test_every_kind .* PK_EXPORT"):
        module.kernel("missing")


@pytest.mark.parametrize("position", range(2, 13))
def test_a_scalar_of_another_type_is_refused(device: BaseDevice, position: int) -> None:
    """Also a Python number, which has no size; and an array in its place."""
    out = device.zeros(12, np.float64)
    found = kernel(device, "every_kind", EVERY_KIND)
    right: list[Any] = [out, None, *SCALARS]
    others: list[Any] = [s for s in SCALARS if type(s) is not type(right[position])]
    for wrong in (*others, 1, 1.0, True, None, out, np.array(1, np.int32)):
        arguments = [*right]
        arguments[position] = wrong
        with pytest.raises(MisuseError, match=rf"launch of every_kind .* argument {position} "):
            found.launch((1, 1, 1), (1, 1, 1), arguments, device.stream())

    assert not out.any()


Wrong = dict[str, Any]
REFUSED: list[tuple[Wrong, str]] = [
    # Arrays that a GPU could not use.
    ({"first": np.zeros(8, np.float32)}, "argument 0 .*pageable host memory or of another device"),
    ({"first": lambda device, other: other.zeros(8, np.float32)}, "argument 0 .*(of another|a C-contiguous) device"),
    ({"first": lambda device, other: device.zeros(16, np.float32)[::2]}, "argument 0 .*with strides"),
    ({"first": lambda device, other: device.zeros((4, 4), np.float32).T}, "argument 0 .*with strides"),
    ({"first": lambda device, other: device.pinned(8, np.float32).view(np.recarray)}, "argument 0 .*recarray"),
    ({"first": [1.0, 2.0]}, "argument 0 .*list"),
    ({"first": lambda device, other: device.address(device.zeros(8, np.float32))}, "argument 0 .*int"),
    ({"first": np.float32(1.0)}, "argument 0 .*numpy.float32"),
    *(({"count": count}, f"expected 4 arguments, got {count}") for count in (0, 3, 5)),
    # Zero, negative, more than 1024 threads, beyond the limits of an axis, not three integers.
    *(({"grid": grid}, "launch of add was refused") for grid in (
        (0, 1, 1), (1, 1, 0), (1, -1, 1), (1, 65536, 1), (2**31, 1, 1), (1, 1), (1.0, 1, 1))),
    *(({"block": block}, "launch of add was refused") for block in ((0, 1, 1), (1025, 1, 1), (33, 32, 1), (1, 1, 65))),
    *(({"stream": stream}, "expected a stream of this device") for stream in (
        None, 0, lambda device, other: other.stream())),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "message"), REFUSED)
def test_a_refused_launch_runs_nothing(device: BaseDevice, other: BaseDevice, wrong: Wrong, message: str) -> None:
    """Nothing runs, and nothing is counted; a function of the two devices makes what only they can give."""
    found, right = add_kernel(device)
    given: Wrong = {"grid": (1, 1, 1), "block": (8, 1, 1), "stream": device.stream(), "count": 4, "first": right[0]}
    given |= {name: value(device, other) if callable(value) else value for name, value in wrong.items()}
    arguments = [given["first"], *right[1:], *right][: given["count"]]
    calls = device.driver_calls
    with pytest.raises(MisuseError, match=message):
        found.launch(given["grid"], given["block"], arguments, given["stream"])

    assert calls == device.driver_calls
    assert not right[1].any()


def test_a_read_only_array_may_go_where_the_kernel_only_reads(cpu: CpuDevice) -> None:
    found, right = add_kernel(cpu)
    frozen = right[0].view()
    frozen.flags.writeable = False
    found.launch((1, 1, 1), (8, 1, 1), [frozen, *right[1:]], cpu.stream())
    with pytest.raises(MisuseError, match="read-only"):
        found.launch((1, 1, 1), (8, 1, 1), [right[0], frozen, *right[2:]], cpu.stream())

    assert right[1].tolist() == [1.0] * 8


def test_views_of_device_arrays_are_device_arrays(device: BaseDevice) -> None:
    """Slices, reshapes and other dtypes of device and pinned memory keep their owner, and keep it alive."""
    found, right = add_kernel(device)
    base = device.zeros((4, 16), np.uint8)
    view = base[1:3].view(np.float32).reshape(8)[::1]
    del base
    staging = device.pinned(8, np.float32)
    staging[:] = 5.0
    found.launch((1, 1, 1), (8, 1, 1), [staging, view, *right[2:]], device.stream())

    assert view.tolist() == [6.0] * 8


def test_only_pinned_slices_may_be_declared_as_reads(device: BaseDevice) -> None:
    """They are recorded with the launch; a device array or pageable memory is refused."""
    found, right = add_kernel(device)
    ring = device.pinned((4, 8), np.float32)
    stream = device.stream()
    device.begin_capture(stream)
    found.launch((1, 1, 1), (8, 1, 1), right, stream, reads=[ring[2]])
    for wrong in (right[0], np.zeros(4), ring[:, 1]):
        with pytest.raises(MisuseError, match="pinned slices"):
            found.launch((1, 1, 1), (8, 1, 1), right, stream, reads=[wrong])
    (node,) = device.end_capture(stream).nodes

    assert node.reads == ((device.address(ring) + 64, 32),)


def test_a_closed_device_refuses_use(device: BaseDevice) -> None:
    """Closing twice is legal; arrays stay readable."""
    found, right = add_kernel(device)
    stream = device.stream()
    device.close()
    device.close()
    launch = functools.partial(found.launch, (1, 1, 1), (8, 1, 1), right, stream)
    for use in (launch, lambda: device.zeros(1, np.int8), stream.synchronize, device.stream):
        with pytest.raises(MisuseError, match="got a closed device"):
            use()

    assert right[1].tolist() == [0.0] * 8


def test_launches_from_two_python_threads_are_independent(opener: Opener) -> None:
    """The interpreter lock is not held while a kernel runs; faults stay with their caller."""
    with opener(threads=3) as device:
        found, right = add_kernel(device)
        stream = device.stream()

        def work(number: int) -> list[float]:
            out = device.zeros(8, np.float32)
            for _ in range(50):
                found.launch((30, 1, 1), (32, 1, 1), [right[0], out, np.int32(8), np.float32(number)], stream)
                with pytest.raises(DeviceFault) as caught:
                    found.launch((1, 1, 1), (8, 1, 1), [None, out, np.int32(8), np.float32(number)], stream)
                assert caught.value.fields["kernel"] == "add"
            return [float(v) for v in out]

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(work, range(4))) == [[float(n)] * 8 for n in range(4)]
