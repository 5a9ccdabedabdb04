"""The tests of `tests/graphs/test_draft_units.py` on the cuda device, on a CuPy that has no GPU.

Read next: `fake_cupy.py`.
"""

from __future__ import annotations

import pytest

import pagedkv.opening
from pagedkv.devices.cuda import CudaDevice
from pagedkv.devices.cuda_runtime import CudaRuntime
from tests.cuda.fake_cupy import FakeCupy
from tests.graphs.test_draft_units import *  # noqa: F403 - every test of that file


@pytest.fixture(autouse=True)
def _open_the_cuda_device(machine: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(_: str) -> CudaDevice:
        return CudaDevice(runtime=CudaRuntime(machine), announce=lambda line: None)

    monkeypatch.setattr(pagedkv.opening, "open_device", opened)
