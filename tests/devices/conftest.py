"""The devices of these tests: quiet, eager, with one thread.

`device` is the cpu device, then the cuda device on a CuPy that has no GPU; `other` is a second one of the same kind.  A
test that takes `cpu` needs a part that only the cpu device has, or does something that CuPy forbids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from pagedkv.devices.cpu.device import CpuDevice
from pagedkv.devices.cuda.device import CudaDevice
from pagedkv.devices.cuda.runtime import CudaRuntime
from pagedkv.devices.device import BaseDevice
from tests.cuda.fake_cupy import FakeCupy
from tests.kernels.cpu_helpers import cpu_device

Opener = Callable[..., AbstractContextManager[BaseDevice]]


@contextmanager
def fake_cuda_device(**options: Any) -> Iterator[CudaDevice]:
    """Open the cuda device over a cpu device with these options."""
    with cpu_device(**options) as below:
        device = CudaDevice(runtime=CudaRuntime(FakeCupy(below)), announce=lambda line: None)
        yield device
        device.close()


@pytest.fixture(params=["cpu", "cuda"])
def opener(request: pytest.FixtureRequest) -> Opener:
    """A function that opens a device of one kind."""
    openers: dict[str, Opener] = {"cpu": cpu_device, "cuda": fake_cuda_device}
    return openers[request.param]


def opened_device(opener: Opener) -> Iterator[BaseDevice]:
    """A device of each kind."""
    with opener() as opened:
        yield opened


device = pytest.fixture(opened_device)
other = pytest.fixture(opened_device)


@pytest.fixture
def cpu() -> Iterator[CpuDevice]:
    """The cpu device."""
    with cpu_device() as opened:
        yield opened
