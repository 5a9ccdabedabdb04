"""The mutant list stays plantable, and every listed mistake is noticed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagedkv.tools.mutant_list import MUTANTS, Mutant
from tests.checkout import ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.clause}-{mutant.what.replace(' ', '-')}")
def test_a_mutant_names_one_place_and_tests_that_exist(mutant: Mutant) -> None:
    """A source that moved on must have its mutants planted anew."""
    text = (ROOT / mutant.file).read_text(encoding="utf-8")

    assert text.count(mutant.old) == 1
    assert mutant.old != mutant.new
    for name in mutant.tests:
        assert not name.startswith("tests/") or (ROOT / name).is_file(), name


@pytest.mark.long
def test_every_mutant_is_killed() -> None:
    """A clause counts as tested only if its mutant dies."""
    done = subprocess.run(
        [sys.executable, "tools/mutants.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
