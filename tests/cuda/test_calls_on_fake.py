"""The tests of `tests/kernels/test_cpu_calls.py` on the cuda device with a CuPy that has no GPU: the same refusals."""

from __future__ import annotations

import pytest

import tests.kernels.test_cpu_calls as on_cpu
from tests.cuda.on_fake import fake_device_in_place_of_cpu
from tests.kernels.test_cpu_calls import *  # noqa: F403 - every test of that file

NOT_HERE = {
    "test_library_matrix_products_are_refused_under_capture":
        "fills a device array from NumPy by assignment, which CuPy refuses; done in test_device_on_fake",
    "test_a_function_marked_cpu_only_may_use_matrix_products":
        "such a function is refused on cuda",
    "test_an_exception_in_a_call_reaches_the_caller":
        "a captured call runs at capture on cuda; done in test_device_on_fake",
}
for _name in NOT_HERE:
    del globals()[_name]


@pytest.fixture(autouse=True)
def _open_the_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cpu, "cpu_device", fake_device_in_place_of_cpu)
