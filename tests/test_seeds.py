"""A test of the tests: what runs on a deferred device is repeated with further seeds where a seed has a choice."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.checkout import ROOT

TESTS = """
import numpy as np
import pagedkv as pk


def run(name, streams_count, device_mode):
    print(f"({name} {device_mode})")
    device = pk.open_device("cpu")
    streams = [device.stream() for _ in range(streams_count)]
    for stream in streams * 2:
        device.copy(device.zeros(2, np.int32), np.ones(2, np.int32), stream)
    event = device.event()
    streams[0].record(event)
    streams[-1].wait(event)
    streams[-1].synchronize()
    device.close()


def test_one_stream(device_mode):
    run("one", 1, device_mode)


def test_two_streams(device_mode):
    run("two", 2, device_mode)
"""


def test_a_test_is_repeated_where_a_seed_has_a_choice(tmp_path: Path) -> None:
    """Two streams can run in several orders, one stream in one."""
    (tmp_path / "test_streams.py").write_text(TESTS, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "tests.conftest", "-p", "no:cacheprovider",
         "--rootdir", ROOT, "-c", ROOT / "pyproject.toml", "--device-mode", "deferred", "--device-seeds", "4",
         tmp_path],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"\((\w+ \d)\)", done.stdout) == ["one 0", "two 0", "two 1", "two 2", "two 3"]
    assert "2 passed" in done.stdout
