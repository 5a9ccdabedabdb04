"""The README's code runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_fifteen_lines_run(tmp_path: Path) -> None:
    """A reader who pastes the embedding example gets twenty tokens and no error."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks, "the README has no python block"
    assert len(blocks[0].splitlines()) == 15
    script = tmp_path / "example.py"
    script.write_text(blocks[0], encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=README.parent,
                          env=_environment(), check=False)

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip().strip("[]").split(",")) == 20


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(README.parent)}


def test_the_second_example_goes_on_from_the_first(tmp_path: Path) -> None:
    """Fork, Snapshot and Move as the README shows them."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text("\n".join(blocks[:2]), encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=README.parent,
                          env=_environment(), check=False)

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip().splitlines()) == 2


@pytest.mark.parametrize(
    "name", ["tools/bootstrap.py", "tests/test_tour.py", "pagedkv/contract.md", "cuda_src/append.cu"]
)
def test_files_that_the_readme_names_exist(name: str) -> None:
    """A reader is sent to files that are there."""
    assert name in README.read_text(encoding="utf-8")
    assert (README.parent / name).is_file()
