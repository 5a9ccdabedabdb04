"""The list of mutants can be planted, and the runner knows a survivor; `python -m tests.mutants` runs the list."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.checkout import ROOT
from tests.mutants import __main__ as runner
from tests.mutants.entries import MUTANTS
from tests.mutants.mutant import BODY, GONE, Misplaced, Mutant
from tests.mutants.scenes import SCENES, Scene, deferred_device
from tests.mutants.walks import SEEDS


def test_every_mutant_can_be_planted() -> None:
    """Each old text occurs once at its place, and what it becomes is Python; the message names what to plant anew."""
    misplaced = []
    for mutant in MUTANTS:
        try:
            texts = mutant.texts(ROOT)
        except Misplaced as error:
            misplaced.append(str(error))
            continue
        for path, text in texts.items():
            assert text != path.read_text(encoding="utf-8"), f"{mutant.what}: nothing changes"
            if path.suffix == ".py":
                ast.parse(text)

    names = Counter((mutant.clause, mutant.what) for mutant in MUTANTS)
    assert [name for name, count in names.items() if count > 1] == [], "the report is read by name"
    assert misplaced == []


def test_every_catcher_exists() -> None:
    """A test that was renamed catches nothing: files, functions and scenes."""
    absent = []
    scenes = {scene.__name__ for scene in SCENES}
    for catcher in dict.fromkeys(catcher for mutant in MUTANTS for catcher in mutant.catchers):
        for word in catcher.arguments:
            file, _, function = word.partition("::")
            path = ROOT / file
            name = re.sub(r"\[.*", "", function)
            if file.startswith("tests/") and (not path.is_file() or f"def {name}" not in path.read_text("utf-8")):
                absent.append(word)
        if "scene" in catcher.arguments and catcher.arguments[3] not in scenes:
            absent.append(catcher.arguments[3])

    assert absent == []


def written(folder: Path, text: str) -> Path:
    (folder / "pagedkv").mkdir()
    path = folder / "pagedkv" / "some.py"
    path.write_text(text, encoding="utf-8")
    return path


SOME = """class A:
    def f(self, x):
        if x:
            g(x,
              'é')
        return x


def f():
    h()
"""


@pytest.mark.parametrize(
    ("place", "old", "new", "expected"),
    [
        ("some.py", "if x:", "if not x:", SOME.replace("if x:", "if not x:")),
        ("some.py", "if x", GONE, SOME.replace("if x:\n            g(x,\n              'é')", "pass")),
        ("some.py:A.f", "g(", GONE, SOME.replace("g(x,\n              'é')", "pass")),
        ("some.py:A.f", BODY, "return 3", "class A:\n    def f(self, x):\n        return 3\n\n\ndef f():\n    h()\n"),
    ],
)  # fmt: skip
def test_a_mutant_changes_one_place(tmp_path: Path, place: str, old: str, new: str, expected: str) -> None:
    path = written(tmp_path, SOME)

    assert Mutant("C0", "a mistake", place, old, new, "x.py").texts(tmp_path) == {path.resolve(): expected}


@pytest.mark.parametrize(("place", "old"), [("some.py", "x"), ("some.py", "y"), ("some.py:f", "h"), ("other.py", "x")])
def test_a_place_that_is_not_one_is_refused(tmp_path: Path, place: str, old: str) -> None:
    written(tmp_path, SOME)

    with pytest.raises(Misplaced, match="plant the mutant anew"):
        Mutant("C0", "a mistake", place, old, "z", "x.py").texts(tmp_path)


@pytest.mark.parametrize(("shift", "exit_code", "told"), [("7", 0, "1 of 1"), ("(5 + 1)", 1, "SURVIVED")])
def test_a_survivor_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, shift: str, exit_code: int, told: str) -> None:
    mutant = Mutant("C2.3", "pages are of another size", "values/quantities.py", "(tokens + PAGE_MASK) >> PAGE_SHIFT",
                    f"(tokens + PAGE_MASK) >> {shift}", "host/test_quantities.py")  # fmt: skip
    monkeypatch.setattr(runner, "MUTANTS", (mutant,))
    result = CliRunner().invoke(runner.main, ["--jobs", "1"])

    assert exit_code == result.exit_code, result.output
    assert told in result.output


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: str(scene.__name__))
def test_a_scene_without_a_mistake_is_clean_under_every_seed(scene: Scene) -> None:
    """Design 4: every legal order gives the same bytes, and no order is reported as a hazard."""
    for seed in range(SEEDS):
        scene(deferred_device(seed))
