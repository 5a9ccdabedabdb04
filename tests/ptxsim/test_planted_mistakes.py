"""A test of the emulator's use: mistakes of order and place are reported by its sanitizer, whatever the lanes' order.

The same mistakes as on the cpu device, in the same named tests; there a wrong result gives them away, here a report of
the read that came too early or went astray.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from tests.kernels.planted_kernels import PLANTED, Planted
from tests.kernels.test_planted_kernels import run_named_test
from tests.ptxsim.simulated_device import SimulatedDevice, SimulatorReport

REPORTED = [planted for planted in PLANTED if planted.kinds]
QUICK = (
    "lanes read their neighbours' maxima too early", "streams are merged before they ended",
    "temporary rows are folded before they ended",
)  # fmt: skip
assert set(QUICK) <= {planted.what for planted in REPORTED}


@pytest.mark.parametrize("planted", [
    pytest.param(planted, marks=() if planted.what in QUICK else (pytest.mark.long,), id=planted.what.replace(" ", "-"))
    for planted in REPORTED
])  # fmt: skip
def test_a_planted_mistake_is_reported_by_the_sanitizer(
    simulator: ModuleType, rng: np.random.Generator, planted: Planted
) -> None:
    """C14.6: a missing barrier, or an address outside its array, is an error and not a matter of luck."""
    device = SimulatedDevice(simulator, sources=planted.sources())

    with pytest.raises(SimulatorReport) as report:
        run_named_test(planted, device, rng)

    assert report.value.kinds & planted.kinds, report.value
