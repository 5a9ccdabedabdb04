"""The tests of `tests/kernels/test_cpu_capture.py` on the cuda device without a GPU: the same refusals."""

from __future__ import annotations

import pytest

import tests.kernels.test_cpu_capture as on_cpu
from tests.cuda.on_fake import fake_device_in_place_of_cpu
from tests.kernels.test_cpu_capture import *  # noqa: F403 - every test of that file

NOT_HERE = {
    "test_other_streams_run_eagerly_during_a_capture":
        "CUDA does not pin staging memory while this thread captures",
    "test_a_fault_in_a_replay_names_its_kernel_and_stops_there":
        "guard pages and buffer names are the cpu device's",
    "test_a_long_graph_of_kernels_is_one_call_into_c":
        "looks into the cpu device's executor",
}
for _name in NOT_HERE:
    del globals()[_name]


@pytest.fixture(autouse=True)
def _open_the_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cpu, "cpu_device", fake_device_in_place_of_cpu)
