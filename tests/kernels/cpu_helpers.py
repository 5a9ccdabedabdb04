"""Small tools for the tests of the cpu device: embedder modules from text, and devices that announce nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pagedkv.devices.cpu.device import CpuDevice
from pagedkv.devices.device import BaseDevice
from pagedkv.devices.kernels import BaseKernel
from pagedkv.devices.protocol import ModuleSpec, Stream

ORDERS = ("ascending", "descending", "random")
ADD = r"""
extern "C" __global__ void add(const float* a, float* out, int n, float bias) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] + bias;
}
"""


@contextmanager
def cpu_device(order: str = "ascending", *, threads: int | None = 1, **options: Any) -> Iterator[CpuDevice]:
    """Open a quiet device and close it, canaries checked."""
    device = CpuDevice(order=order, threads=threads, announce=lambda line: None, **options)
    try:
        yield device
    finally:
        device.close()


def kernel(device: BaseDevice, name: str, text: str) -> BaseKernel:
    """Compile a text that defines one kernel, and give it."""
    return device.load(ModuleSpec(f"test_{name}", text=text, kernels=(name,))).kernel(name)


def captured(device: BaseDevice, stream: Stream, *work: Callable[[], object]) -> Any:
    """Record what each function submits on a stream."""
    device.begin_capture(stream)
    for submit in work:
        submit()
    return device.end_capture(stream)


def launch(device: BaseDevice, name: str, text: str, grid: int, block: int, arguments: Sequence[Any] = ()) -> None:
    """Compile a text and run its kernel once on a stream of its own."""
    kernel(device, name, text).launch((grid, 1, 1), (block, 1, 1), arguments, device.stream())
