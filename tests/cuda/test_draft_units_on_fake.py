"""The tests of `tests/graphs/test_draft_units.py` on the cuda device, on a CuPy that has no GPU.

Read next: `fake_cupy.py`.
"""

from __future__ import annotations

import pytest

import pagedkv.opening
from pagedkv.devices.cuda import CudaDevice
from tests.graphs.test_draft_units import *  # noqa: F403 - every test of that file


@pytest.fixture(autouse=True)
def _open_the_cuda_device(fake_device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pagedkv.opening, "open_device", lambda name: fake_device)
