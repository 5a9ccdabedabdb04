"""The tests of `tests/graphs/test_draft_units.py` on the cuda device, on a CuPy that has no GPU."""

from __future__ import annotations

import pytest

import pagedkv.store.opening
from pagedkv.devices.cuda.device import CudaDevice
from pagedkv.devices.cuda.runtime import CudaRuntime
from tests.cuda.fake_cupy import FakeCupy
from tests.graphs.test_draft_units import *  # noqa: F403 - every test of that file


@pytest.fixture(autouse=True)
def _open_the_cuda_device(machine: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(_: str) -> CudaDevice:
        return CudaDevice(runtime=CudaRuntime(machine), announce=lambda line: None)

    monkeypatch.setattr(pagedkv.store.opening, "open_device", opened)
