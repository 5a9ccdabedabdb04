"""Open the cuda device, on a CuPy that has no GPU, where a test asks for a cpu device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pagedkv.devices.cuda.device import CudaDevice
from pagedkv.devices.cuda.runtime import CudaRuntime
from tests.cuda.fake_cupy import FakeCupy
from tests.kernels.cpu_helpers import cpu_device


@contextmanager
def fake_device_in_place_of_cpu(*settings: Any, **options: Any) -> Iterator[CudaDevice]:
    """Give the cuda device; settings and options are those of the cpu device below it."""
    with cpu_device(*settings, **options) as below:
        device = CudaDevice(runtime=CudaRuntime(FakeCupy(below)), announce=lambda line: None)
        yield device
        device.close()
