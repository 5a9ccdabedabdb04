"""A real GPU, or nothing here runs.

Read next: `test_same_bits.py`, `test_card.py`; `run` is the script for a machine that is lent for minutes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagedkv.devices.cuda import CudaDevice
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
