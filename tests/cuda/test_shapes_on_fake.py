"""The tests of `tests/graphs/test_shapes.py` on the cuda device, on a CuPy that has no GPU."""

from __future__ import annotations

import pytest

import pagedkv.store.opening
from pagedkv.devices.cuda.device import CudaDevice
from tests.graphs.test_shapes import *  # noqa: F403 - every test of that file


@pytest.fixture(autouse=True)
def _open_the_cuda_device(fake_device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pagedkv.store.opening, "open_device", lambda name: fake_device)
