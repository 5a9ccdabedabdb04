"""A store that a test of this folder opens by name gets the cuda device on a CuPy that has no GPU.

So a file here runs the tests of another folder again by importing them: capture, replay, publication, refusals and the
exact equalities hold for the calls that the cuda device makes to CuPy.
"""

from __future__ import annotations

import pytest

import pagedkv.store.opening
from pagedkv.devices.cuda.device import CudaDevice
from pagedkv.devices.cuda.runtime import CudaRuntime


@pytest.fixture(autouse=True)
def _open_the_cuda_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(_: str) -> CudaDevice:
        return CudaDevice(runtime=CudaRuntime(request.getfixturevalue("machine")), announce=lambda line: None)

    monkeypatch.setattr(pagedkv.store.opening, "open_device", opened)
