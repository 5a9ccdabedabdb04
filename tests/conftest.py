"""What every test shares: the device, the seed, and the folder of the checkout.

Randomness comes from one seed: printed in the header and again beside each failure, chosen with `--seed N`
(or `--seed random`).  Each test draws from its own generator, made of the seed and the test's name, so a
test sees the same numbers alone, in another order, or on another worker.

Tests marked `deferred` run on the cpu device as it is and on one that defers work (design 4): with seed 0, and where
that seed had a choice, with `--device-seeds N` seeds in all.  `--device-mode deferred` runs every test so.
"""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

# Before NumPy loads: with two threads its matrix products collapse when workers share the cores (65 ms became
# 1 to 2 s), and one thread's bits differ from two threads', so every run of the tests uses one.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import pytest
from _pytest.runner import runtestprotocol

import pagedkv as pk
from pagedkv import devices
from pagedkv.devices.cpu.deferred import SCHEDULES
from pagedkv.devices.cpu.device import CpuDevice
from pagedkv.devices.cuda.device import CudaDevice
from pagedkv.devices.cuda.runtime import CudaRuntime
from tests.cuda.fake_cupy import FakeCupy
from tests.kernels.cpu_helpers import cpu_device
from tests.ptxsim.simulated_device import SimulatedDevice, load_simulator

SEED_DEFAULT = 20_480
ROOT = Path(__file__).resolve().parent.parent
DEVICE_SEED = pytest.StashKey[int]()
HAD_CHOICE = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device-mode", default="", choices=("", "eager", "deferred"), help="one mode for every test")
    parser.addoption("--device-seeds", type=int, default=3, help="seeds where one has a choice (%(default)s)")
    parser.addoption("--emulated", action="store_true", help="kernel tests run under the emulator and its sanitizer")
    parser.addoption("--seed", default=str(SEED_DEFAULT), help="an integer, or 'random' (%(default)s)")


def pytest_configure(config: pytest.Config) -> None:
    # Settled before workers start, which receive the option's value: they all use the same seed.
    if config.option.seed == "random":
        config.option.seed = str(secrets.randbelow(1 << 31))


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.seed} (repeat with --seed {config.option.seed})"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.append(("seed", f"--seed {item.config.option.seed}"))
        if DEVICE_SEED in item.stash:
            report.sections.append(("seed of the deferred device", str(item.stash[DEVICE_SEED])))
    return report


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mode = metafunc.config.option.device_mode
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    if "eager_only" not in marks and ("deferred" in marks or mode):
        metafunc.parametrize("device_mode", [mode] if mode else ["eager", "deferred"], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Only the cpu device has a deferred mode: the streams of another one are real.
    elsewhere = [item for item in items if _is_deferred(item) and _parameters(item).get("device", "cpu") != "cpu"]
    config.hook.pytest_deselected(items=elsewhere)
    dropped = set(elsewhere)
    items[:] = [item for item in items if item not in dropped]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a deferred test with seed 0, and with further seeds while it passes and one of them had a choice."""
    if not _is_deferred(item):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports: list[pytest.TestReport] = []
    for number in range(item.config.option.device_seeds):
        item.stash[DEVICE_SEED] = number
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        if not (all(report.passed for report in reports) and item.stash.get(HAD_CHOICE, False)):
            break
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _is_deferred(item: pytest.Item) -> bool:
    return _parameters(item).get("device_mode") == "deferred"


@pytest.fixture(autouse=True)
def device_mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int | None]:
    """The deferred seed of every cpu device that the test opens by name; None for eager ones."""
    number = request.node.stash[DEVICE_SEED] if _is_deferred(request.node) else None
    opened: list[CpuDevice] = []

    def deferred(**options: Any) -> CpuDevice:
        assert number is not None
        opened.append(CpuDevice(mode="deferred", schedule=SCHEDULES[number % 3], seed=number, **options))
        return opened[-1]

    if number is not None:
        monkeypatch.setattr(devices, "CpuDevice", deferred)
    yield number
    if any(device.order_choices for device in opened):
        request.node.stash[HAD_CHOICE] = True


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The run's seed, for code that takes one."""
    return int(request.config.option.seed)


@pytest.fixture
def rng(request: pytest.FixtureRequest, seed: int) -> np.random.Generator:
    """A generator that depends on the seed and on the test's name only."""
    return np.random.default_rng([seed, zlib.crc32(request.node.nodeid.encode())])


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, device_mode: int | None) -> Iterator[Any]:
    """Each device in turn; without a GPU, the cuda device on a CuPy that has none (`tests/cuda/fake_cupy.py`)."""
    if request.config.option.emulated:
        yield SimulatedDevice(load_simulator())
        return
    if request.param == "cpu":
        opened = pk.open_device("cpu")  # needs a compiler, which the `cpu` extra brings: its absence is a failure
    else:
        try:
            opened = pk.open_device("cuda")
        except pk.MissingRequirement:
            opened = request.getfixturevalue("fake_device")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def opened_device() -> Iterator[pk.Device]:
    """One cpu device for all stores of a file."""
    opened = pk.open_device("cpu")
    yield opened
    opened.close()


@pytest.fixture
def machine() -> Iterator[FakeCupy]:
    """The machine below `fake_device`."""
    with cpu_device() as below:
        yield FakeCupy(below)


@pytest.fixture
def fake_device(machine: FakeCupy) -> Iterator[CudaDevice]:
    """The product's cuda device on a CuPy that has no GPU."""
    opened = CudaDevice(runtime=CudaRuntime(machine), announce=lambda line: None)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the checkout."""
    return ROOT
