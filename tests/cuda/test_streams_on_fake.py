"""The tests of `tests/kernels/test_cpu_streams.py` on the cuda device without a GPU: the same refusals."""

from __future__ import annotations

import pytest

import tests.kernels.test_cpu_streams as on_cpu
from tests.cuda.on_fake import fake_device_in_place_of_cpu
from tests.kernels.test_cpu_streams import *  # noqa: F403 - every test of that file

NOT_HERE = {
    "test_copies_that_do_not_fit_are_refused":
        "CuPy arrays are never read-only; the other cases are done in test_device_on_fake",
    "test_arrays_end_at_the_guard_within_their_alignment":
        "guard pages are the cpu device's",
    "test_memory_returns_with_the_last_view":
        "looks into the cpu device's memory",
    "test_memory_bytes_are_this_hosts":
        "a GPU's memory is its own; done in test_device_on_fake",
}
for _name in NOT_HERE:
    del globals()[_name]


@pytest.fixture(autouse=True)
def _open_the_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cpu, "cpu_device", fake_device_in_place_of_cpu)
