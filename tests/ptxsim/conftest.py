"""The emulator, an external tool that may be absent: shared/ptxsim, in or beside the checkout."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.ptxsim.simulated_device import SimulatedDevice, load_simulator


@pytest.fixture(scope="session")
def simulator() -> ModuleType:
    """The emulator; tests that ask for it are skipped where it or NVRTC is absent."""
    return load_simulator()


@pytest.fixture
def simulated(simulator: ModuleType) -> SimulatedDevice:
    """A fresh emulated device."""
    return SimulatedDevice(simulator)
