"""What every test shares: the device, the seed, and the folder of the checkout.

Randomness comes from one seed: printed in the header and again beside each failure, chosen with `--seed N`
(or `--seed random`).  Each test draws from its own generator, made of the seed and the test's name, so a
test sees the same numbers alone, in another order, or on another worker.

Tests marked `deferred` run on the cpu device as it is and, three seeds each, on one that defers work (design 4);
the long run adds seeds up to 50.  `--device-mode deferred --device-seeds N` runs every test so.  Most tests leave
a seed nothing to choose: `--note-choices FILE` lists those that do, and `--with-choices FILE` runs them alone.
"""

from __future__ import annotations

import os
import re
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

import pagedkv as pk
from pagedkv import devices
from pagedkv.devices.cpu.deferred import SCHEDULES
from pagedkv.devices.cpu.device import CpuDevice
from pagedkv.devices.cuda.device import CudaDevice
from pagedkv.devices.cuda.runtime import CudaRuntime
from tests.cuda.fake_cupy import FakeCupy
from tests.kernels.cpu_helpers import cpu_device

SEED_DEFAULT = 20_480
DEFERRED_SEEDS = 3
DEFERRED_SEEDS_LONG = 50
ROOT = Path(__file__).resolve().parent.parent
LISTED = pytest.StashKey[frozenset[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device-mode", default="", choices=("", "eager", "deferred"), help="one mode for every test")
    parser.addoption("--device-seeds", type=int, default=3, help="seeds of the deferred mode (%(default)s)")
    parser.addoption("--note-choices", default="", help="a file that the tests are added to whose order a seed chose")
    parser.addoption("--with-choices", default="", help="such a file: run the tests in it alone")
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
    return report


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mode, seeds = metafunc.config.option.device_mode, metafunc.config.option.device_seeds
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    is_marked = "deferred" in marks
    if "eager_only" in marks:
        return
    listed = _listed(metafunc.config)
    if listed is not None and not any(name.startswith(f"{metafunc.definition.nodeid}[") for name in listed):
        seeds = 1  # it will be deselected
    if mode == "deferred":
        modes = [pytest.param(number, id=f"deferred{number}") for number in range(seeds)]
    elif is_marked and not mode:
        modes = [pytest.param(None, id="eager")]
        modes += [pytest.param(number, id=f"deferred{number}") for number in range(DEFERRED_SEEDS)]
        modes += [
            pytest.param(number, id=f"deferred{number}", marks=pytest.mark.long)
            for number in range(DEFERRED_SEEDS, DEFERRED_SEEDS_LONG)
        ]
    else:
        return
    metafunc.parametrize("device_mode", modes, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Only the cpu device has a deferred mode: the streams of another one are real.
    kept = [item for item in items if not _is_deferred_elsewhere(item)]
    listed = _listed(config)
    if listed is not None:
        kept = [item for item in kept if _seedless(item) in listed]
    if len(kept) < len(items):
        remaining = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in remaining])
        items[:] = kept


def _listed(config: pytest.Config) -> frozenset[str] | None:
    """Return the names of the tests to run alone, or None."""
    path = config.option.with_choices
    if path and LISTED not in config.stash:
        config.stash[LISTED] = frozenset(Path(path).read_text().splitlines())
    return config.stash.get(LISTED, None)


def _is_deferred_elsewhere(item: pytest.Item) -> bool:
    values = item.callspec.params if hasattr(item, "callspec") else {}
    return values.get("device_mode") is not None and values.get("device", "cpu") != "cpu"


def _seedless(item: pytest.Item) -> str:
    """Return the name of a test without the seed that it runs with."""
    return re.sub(r"deferred\d+", "deferred", item.nodeid)


@pytest.fixture(autouse=True)
def device_mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int | None]:
    """The deferred seed of every cpu device that the test opens by name; None for eager ones."""
    number: int | None = getattr(request, "param", None)
    opened: list[CpuDevice] = []

    def deferred(**options: Any) -> CpuDevice:
        assert number is not None
        opened.append(CpuDevice(mode="deferred", schedule=SCHEDULES[number % 3], seed=number, **options))
        return opened[-1]

    if number is not None:
        monkeypatch.setattr(devices, "CpuDevice", deferred)
    yield number
    note = request.config.option.note_choices
    if note and any(device.order_choices for device in opened):
        with Path(note).open("a") as lines:
            lines.write(_seedless(request.node) + "\n")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The run's seed, for code that takes one."""
    return int(request.config.option.seed)


@pytest.fixture
def rng(request: pytest.FixtureRequest, seed: int) -> np.random.Generator:
    """A generator that depends on the seed and on the test's name only."""
    return np.random.default_rng([seed, zlib.crc32(request.node.nodeid.encode())])


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, device_mode: int | None) -> Iterator[pk.Device]:
    """Each device in turn; without a GPU, the cuda device on a CuPy that has none (`tests/cuda/fake_cupy.py`)."""
    if request.param == "cpu":
        opened = pk.open_device("cpu")  # needs a compiler, which the `cpu` extra brings: its absence is a failure
    else:
        try:
            opened = pk.open_device("cuda")
        except pk.MissingRequirement:
            opened = request.getfixturevalue("fake_device")
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
