"""A test of the tests: each mistake that is planted in a kernel is caught by the test that is named for it."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import numpy as np
import pytest

from pagedkv.devices.cpu.device import CpuDevice
from pagedkv.errors import DeviceFault
from pagedkv.ops.ops import Ops
from tests.kernels.planted_kernels import CONTROLS, PLANTED, Planted, PlantedDevice


def run_named_test(planted: Planted, device: Any, rng: np.random.Generator) -> None:
    """Run the test that is named in `planted`, with the changed kernels."""
    fixtures = {"device": device, "rng": rng, "ops": Ops(device)}
    wanted = inspect.signature(planted.caught_by).parameters
    arguments = {**{name: value for name, value in fixtures.items() if name in wanted}, **planted.arguments}
    assert set(wanted) == set(arguments)
    planted.caught_by(**arguments)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.what.replace(" ", "-"))
def test_a_planted_mistake_is_caught_by_its_test(rng: np.random.Generator, planted: Planted) -> None:
    """Lanes, warps and blocks run in one fixed order, so that a missing barrier shows at once."""
    device = CpuDevice(threads=1, order=planted.order)
    try:
        with pytest.raises((AssertionError, DeviceFault)):
            run_named_test(planted, PlantedDevice(device, planted), rng)
    finally:
        with contextlib.suppress(DeviceFault):  # it may have written where nothing lies
            device.close()


@pytest.mark.parametrize("planted", CONTROLS, ids=lambda planted: planted.source)
def test_nothing_planted_is_not_caught(rng: np.random.Generator, planted: Planted) -> None:
    """The way in which mistakes are planted is no mistake."""
    device = CpuDevice(threads=1)

    run_named_test(planted, PlantedDevice(device, planted), rng)

    device.close()
