"""The tests of `tests/kernels/test_cpu_launch.py` on the cuda device with a CuPy that has no GPU: the same refusals."""

from __future__ import annotations

import pytest

import tests.kernels.test_cpu_launch as on_cpu
from tests.cuda.on_fake import fake_device_in_place_of_cpu
from tests.kernels.test_cpu_launch import *  # noqa: F403 - every test of that file

NOT_HERE = {
    "test_arrays_that_a_gpu_could_not_use_are_refused":
        "arrays of another GPU and subclasses of ndarray do not exist here; done in test_device_on_fake",
    "test_a_read_only_array_may_go_where_the_kernel_only_reads":
        "CuPy arrays are never read-only",
}
for _name in NOT_HERE:
    del globals()[_name]


@pytest.fixture(autouse=True)
def _open_the_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cpu, "cpu_device", fake_device_in_place_of_cpu)
