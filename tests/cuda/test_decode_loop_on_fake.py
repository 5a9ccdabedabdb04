"""The decode loop on the cuda device: every test of `tests/graphs/test_decode_loop.py`, once more.

The store opens the cuda device on a CuPy without a GPU wherever the test says "cpu"; nothing else is changed.  So
capture, replay, publication, refusals and the exact equalities hold for what the cuda device asks of CuPy.
"""

from __future__ import annotations

import pytest

import pagedkv.store.opening
from pagedkv.devices.cuda.device import CudaDevice
from pagedkv.devices.cuda.runtime import CudaRuntime
from tests.cuda.fake_cupy import FakeCupy
from tests.graphs.test_decode_loop import *  # noqa: F403 - every test of that file


@pytest.fixture(autouse=True)
def _open_the_cuda_device(machine: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(_: str) -> CudaDevice:
        return CudaDevice(runtime=CudaRuntime(machine), announce=lambda line: None)

    monkeypatch.setattr(pagedkv.store.opening, "open_device", opened)
