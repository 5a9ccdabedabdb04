"""What every test shares: the device, the seed, and the folder of the checkout.

Randomness comes from one seed: printed in the header and again beside each failure, chosen with `--seed N`
(or `--seed random`).  Each test draws from its own generator, made of the seed and the test's name, so a
test sees the same numbers alone, in another order, or on another worker.

Read next: `test_layers.py`.
"""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path

# Before NumPy loads: with two threads its matrix products collapse when workers share the cores (65 ms became
# 1 to 2 s), and one thread's bits differ from two threads', so every run of the tests uses one.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import pytest

import pagedkv as pk

SEED_DEFAULT = 20_480
ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
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


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The run's seed, for code that takes one."""
    return int(request.config.option.seed)


@pytest.fixture
def rng(request: pytest.FixtureRequest, seed: int) -> np.random.Generator:
    """A generator that depends on the seed and on the test's name only."""
    return np.random.default_rng([seed, zlib.crc32(request.node.nodeid.encode())])


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> Iterator[pk.Device]:
    """Each device in turn; skipped only where the machine has no such device."""
    try:
        opened = pk.open_device(request.param)
    except pk.MissingRequirement as missing:
        if request.param == "cpu":
            raise  # the cpu device needs a compiler, which the `cpu` extra brings: its absence is a failure
        pytest.skip(f"no {request.param} device: {missing.got}")
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the checkout."""
    return ROOT
