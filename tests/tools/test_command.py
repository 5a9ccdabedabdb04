"""The command: figures on stdout, talk on stderr, and the four exit codes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import pagedkv as pk
from pagedkv.ledger.ledger import Ledger
from pagedkv.record.journal import Journal, JournalRecorder
from pagedkv.tools import command, doctor
from pagedkv.tools.console import version
from tests.checkout import ROOT
from tests.host.builders import activate, make_config, write


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(command.main, list(arguments), prog_name="pagedkv")


def refusal(kind: type[pk.PagedKVError]) -> pk.PagedKVError:
    return kind("this", expected="that", got="other", remedy="do it", clause="C1.1")


def test_version_is_the_projects() -> None:
    """Installed or run from the checkout."""
    result = invoke("--version")

    assert (0, f"pagedkv, version {version()}\n") == (result.exit_code, result.stdout)


@pytest.mark.parametrize(("words", "names"), [
    ("C12.2", "C12.2"), ("codecs 3", "codecs 3"), ("codecs/3", "codecs 3"), ("C10.8/C12.3", "C10.8/C12.3"),
    ("C12.3/codecs/3/C10.8", "C12.3/codecs 3/C10.8"), ("codecs.md/3/codecs 4", "codecs 3/codecs 4"),
])
def test_help_prints_clauses_in_the_order_given(words: str, names: str) -> None:
    """As an error cites them, side by side; a codec section is one word in quotes or two words."""
    result = invoke("help", *words.split("/"))

    assert (0, "\n\n".join(pk.clause(name) for name in names.split("/")) + "\n") == (result.exit_code, result.stdout)


@pytest.mark.parametrize(("words", "said"), [
    ("help c12.9", "C12.2"), ("help C10.8 c12.9", ""), ("help C10.8 codecs", ""), ("run", ""),
    ("kernels report --arch sm_75", "sm_120"), ("kernels report --module none", "page_moves"),
])
def test_what_does_not_exist_is_usage(words: str, said: str) -> None:
    """Exit code 2, and not half an answer on stdout; the message lists what there is."""
    result = invoke(*words.split())

    assert (2, "") == (result.exit_code, result.stdout)
    assert said in result.stderr


@pytest.mark.parametrize("path", [(), ("bench",), ("journal",), ("kernels",)], ids=" ".join)
def test_the_lists_of_commands_cut_no_sentence(path: tuple[str, ...]) -> None:
    """Click ends what does not fit 80 columns with three dots."""
    for result in (invoke(*path, "--help"), invoke("help")):
        _, _, listed = result.stdout.partition("Commands")

        assert listed
        assert "..." not in listed
    for line in ("kernels report", "journal replay", "doctor", "run", "C16", "codecs 8"):
        assert line in result.stdout, "help names nested commands in full, and sections"


@pytest.mark.parametrize(
    ("kind", "code"),
    [(pk.MissingRequirement, 3), (pk.ConfigError, 2), (pk.MisuseError, 2), (pk.CapacityError, 1), (pk.StaleHandle, 1)],
)
def test_refusals_become_exit_codes(kind: type[pk.PagedKVError], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message goes to stderr, without a traceback."""

    def refuse() -> doctor.Diagnosis:
        raise refusal(kind)

    monkeypatch.setattr(doctor, "diagnose", refuse)
    result = invoke("doctor")

    assert (code, "") == (result.exit_code, result.stdout)
    assert "this was refused: expected that, got other; do it. (C1.1)" in result.stderr


@pytest.mark.parametrize("name", ["help", "doctor", "kernels report"])
def test_a_command_imports_no_other_command(name: str) -> None:
    """So `pagedkv help C12.2` answers at once."""
    program = (
        "import sys; from pagedkv.tools import command; "
        "command.main([*sys.argv[1:], '--help'], standalone_mode=False); "
        "print('\\n', *sorted(m for m in sys.modules if m.removeprefix('pagedkv.tools.') in command.COMMANDS.values()))"
    )
    done = subprocess.run([sys.executable, "-c", program, *name.split()], cwd=ROOT, capture_output=True, text=True,
                          timeout=60, check=True)  # fmt: skip

    assert done.stdout.splitlines()[-1].split() == [f"pagedkv.tools.{command.COMMANDS[name]}"]


def test_doctor_prints_one_json_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schema, version, devices, checks, with a refusal's own words; where nothing can run, the exit code is 3."""

    def refuse(name: str) -> pk.Device:
        raise refusal(pk.MissingRequirement)

    diagnosis = doctor.diagnose()
    assert diagnosis.devices["cpu"]
    assert "none" not in diagnosis.devices, "a machine where only that runs can run nothing"
    assert [check.status for check in diagnosis.checks if check.name == "device none"] == ["ok"]
    assert [] == [check.name for check in diagnosis.checks if (check.status == "missing") != bool(check.remedy)]
    checks = (doctor.Check("device cpu", "ok", "fine"), doctor.check_device("cuda", refuse))
    for is_usable in (True, False):
        devices = {"cpu": is_usable, "cuda": False}
        monkeypatch.setattr(doctor, "diagnose", lambda devices=devices: doctor.Diagnosis(checks, devices))
        result = invoke("doctor", "--json")

        assert result.exit_code == (0 if is_usable else 3)
        assert ("usable here: cpu;" in result.stderr) == is_usable
        assert "-> do it" in invoke("doctor").stdout
        assert json.loads(result.stdout) == {
            "schema": 1, "version": version(), "devices": devices,
            "checks": [{"name": "device cpu", "status": "ok", "found": "fine", "remedy": ""},
                       {"name": "device cuda", "status": "missing", "found": "other", "remedy": "do it"}],
        }  # fmt: skip


def test_a_compiler_is_found_in_the_devices_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """$CXX, then g++, then clang++, then ziglang."""
    monkeypatch.setenv("CXX", "my-c++ -m64")
    monkeypatch.setattr("shutil.which", lambda name: f"bin/{name}")
    assert doctor.check_compiler().found == "bin/my-c++ ($CXX)"

    monkeypatch.delenv("CXX")
    assert doctor.check_compiler().found == "bin/g++"

    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert doctor.check_compiler().status == "missing"


# ---- journal replay --------------------------------------------------------------------------------
@pytest.fixture
def journal_file(tmp_path: Path) -> Path:
    """A journal of five operations."""
    lines = io.StringIO()
    ledgers = Ledger(make_config(), 1)
    ledgers.record_in(JournalRecorder(ledgers, Journal(lines)))
    sequence = activate(ledgers, 200)
    write(ledgers, sequence, 130)
    ledgers.finish(sequence)
    path = tmp_path / "run.jsonl"
    path.write_text(lines.getvalue(), encoding="utf-8")
    return path


def test_a_journal_that_repeats_is_ok_also_where_a_crash_cut_it_off(journal_file: Path) -> None:
    """Exit code 0, as a user runs it: a process of its own, without a device; stderr says that a line is missing."""
    done = subprocess.run([sys.executable, "-m", "pagedkv.tools.command", "journal", "replay", str(journal_file)],
                          cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (0, "5 operations, no difference\n", "") == (done.returncode, done.stdout, done.stderr)

    journal_file.write_text(journal_file.read_text(encoding="utf-8")[:-30], encoding="utf-8")
    result = invoke("journal", "replay", "--json", str(journal_file))
    assert (0, {"schema": 1, "operations": 4, "is_truncated": True, "difference": None}) == (
        result.exit_code, json.loads(result.stdout),
    )  # fmt: skip
    assert "cut off" in result.stderr


def test_the_first_difference_is_a_finding(journal_file: Path) -> None:
    """Exit code 1; the revision, what was expected and what came."""
    text = journal_file.read_text(encoding="utf-8")
    journal_file.write_text(text.replace('"first_positions":558161692', '"first_positions":1'))
    result = invoke("journal", "replay", str(journal_file))

    assert result.exit_code == 1
    assert "revision 3, begin_unit: answer differs" in result.stdout
    assert '"first_positions": 1' in result.stdout
    report = json.loads(invoke("journal", "replay", "--json", str(journal_file)).stdout)
    assert (report["schema"], report["operations"], report["is_truncated"]) == (1, 2, False)
    assert (report["difference"]["revision"], report["difference"]["what"]) == (3, "answer")
    assert report["difference"]["got"]["first_positions"] == 558161692


def test_what_is_no_journal_is_usage(journal_file: Path) -> None:
    """Exit code 2, the file and the line; likewise without a file."""
    lines = journal_file.read_text(encoding="utf-8").splitlines(keepends=True)
    journal_file.write_bytes(lines[0].encode() + b"\xff\xfe\n" + lines[2].encode())
    result = invoke("journal", "replay", str(journal_file))

    assert (2, "") == (result.exit_code, result.stdout)
    assert f"line 2 of {journal_file} was refused" in result.stderr
    assert invoke("journal", "replay", str(journal_file / "absent")).exit_code == 2
    assert invoke("journal", "replay").exit_code == 2
