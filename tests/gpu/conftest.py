"""A real GPU, or nothing here runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagedkv.devices.cuda.device import CudaDevice
from pagedkv.errors import MissingRequirement


@pytest.fixture
def gpu() -> Iterator[CudaDevice]:
    """The cuda device of this machine."""
    try:
        device = CudaDevice(reason="asked for by a test")
    except MissingRequirement as missing:
        pytest.skip(f"no cuda device: {missing.got}")
    yield device
    device.close()
