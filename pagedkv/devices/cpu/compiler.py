"""The C++ compiler of the cpu device, and its cache of shared libraries.

The compiler is $CXX, else g++, else clang++, else zig from the package `ziglang`.  A library is built once per
content: its name is a hash of sources, includes, flags and compiler, so nothing is ever stale and processes
that build at the same time end with the same file (written aside, renamed into place).

Flags fix the bits: `-ffp-contract=off` leaves fused operations to explicit `fmaf`, and vector instructions are
chosen by what the machine has, which changes speed only.  Knows no device and no array.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pagedkv.devices.sources import SOURCE_FOLDER, reached_files
from pagedkv.errors import MissingRequirement, MisuseError

FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fPIC",
    "-shared",
    "-g1",
    "-Wall",
    "-Wno-unused-function",
    "-Wno-unknown-pragmas",
)
# What the x86-64-v3 level adds; a machine without one of these gets the baseline and a libm fmaf.
V3_FEATURES = frozenset(("avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"))

Announce = Callable[[str], None]


def announce_on_stderr(line: str) -> None:
    """Say one line on standard error."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler that was found.

    Attributes:
        kind: "gcc", "clang" or "zig".
        command: program and leading arguments.
        identity: path or package and version; part of every cache key.
    """

    kind: str
    command: tuple[str, ...]
    identity: str


def find_compiler() -> Compiler:
    """Find the compiler: $CXX, g++, clang++, ziglang.

    Raises:
        MissingRequirement: there is none, or $CXX names nothing that runs.
    """
    named = os.environ.get("CXX", "").strip()
    if named:
        words = tuple(shlex.split(named))
        if shutil.which(words[0]) is None:
            raise MissingRequirement(
                "the cpu device",
                expected="a C++ compiler",
                got=f"CXX={named!r}, which is not on PATH",
                remedy="set CXX to a C++17 compiler, or unset it",
                clause="C12.4",
            )
        return _examine(words)
    for program in ("g++", "clang++"):
        if shutil.which(program) is not None:
            return _examine((program,))
    if importlib.util.find_spec("ziglang") is not None:
        return zig_compiler()
    raise MissingRequirement(
        "the cpu device",
        expected="a C++ compiler ($CXX, g++, clang++ or the package ziglang)",
        got="none of them",
        remedy="install g++ or clang++, or run `python -m pip install 'pagedkv[cpu]'`",
        clause="C12.4",
    )


def zig_compiler() -> Compiler:
    """Give zig from the package `ziglang`."""
    version = importlib.metadata.version("ziglang")
    return Compiler("zig", (sys.executable, "-m", "ziglang", "c++", "-nostdlib++"), f"ziglang {version}")


@cache
def _examine(words: tuple[str, ...]) -> Compiler:
    result = subprocess.run([*words, "--version"], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise MissingRequirement(
            "the cpu device",
            expected=f"`{' '.join(words)} --version` to succeed",
            got=f"exit code {result.returncode}: {result.stderr.strip()[:200]}",
            remedy="set CXX to a C++17 compiler",
            clause="C12.4",
        )
    first = result.stdout.splitlines()[0] if result.stdout else ""
    if "ziglang" in words or "ziglang" in result.stdout or Path(words[0]).name.startswith("zig"):
        kind = "zig"
    elif "clang" in result.stdout.lower():
        kind = "clang"
    else:
        kind = "gcc"
    path = Path(shutil.which(words[0]) or words[0]).resolve()
    return Compiler(kind, words, f"{path} {' '.join(words[1:])} {first}")


@cache
def cpu_features() -> frozenset[str]:
    """Give the names of this machine's x86 features; empty when the system does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.split())


def machine_flags(kind: str) -> tuple[str, ...]:
    """Give the instruction-set flags for this machine."""
    if platform.machine() != "x86_64":
        return ("-mcpu=baseline",) if kind == "zig" else ()
    level = "x86-64-v3" if cpu_features() >= V3_FEATURES else "x86-64"
    # Zig spells it with underscores, and without a level compiles for exactly this machine.
    return (f"-march={level.replace('-', '_') if kind == 'zig' else level}",)


def check_flags(kind: str, checks: str) -> tuple[str, ...]:
    """Give the flags of the trap build: `checks` is "" or "bounds"."""
    if checks != "bounds":
        return ("-fno-sanitize=all",) if kind == "zig" else ()
    if kind == "gcc":
        return ("-fsanitize=alignment,bounds", "-fsanitize-undefined-trap-on-error")
    return ("-fsanitize=alignment,bounds", "-fsanitize-trap=all")


def cache_folder() -> Path:
    """Give the user's cache folder for compiled libraries."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "pagedkv" / "cpu"


def zig_cache_folder() -> Path:
    """Give the folder where zig keeps its own C library: beside the compiled kernels, not among them."""
    return cache_folder().parent / "zig"


def build_runtime(compiler: Compiler, announce: Announce = announce_on_stderr) -> Path:
    """Build or find the runtime library."""
    text = '#include "cpu_device/runtime.cpp"\n'
    return build("cpu_runtime", text, compiler, announce=announce)


def build(
    name: str,
    text: str,
    compiler: Compiler,
    *,
    defines: tuple[tuple[str, str], ...] = (),
    checks: str = "",
    announce: Announce = announce_on_stderr,
) -> Path:
    """Compile `text`, or find what an equal text gave before.

    Raises:
        MisuseError: the compiler refuses the text; its messages are in the error.
        MissingRequirement: the cache folder cannot be made.
    """
    flags = (
        *FLAGS,
        *machine_flags(compiler.kind),
        *check_flags(compiler.kind, checks),
        *(f"-D{key}={value}" for key, value in defines),
    )
    digest = hashlib.sha256("\0".join((compiler.identity, *compiler.command, *flags, text)).encode())
    for included, path in reached_files(text):
        digest.update(included.encode() + b"\0" + path.read_bytes() + b"\0")
    folder = cache_folder()
    target = folder / f"{name}-{digest.hexdigest()[:32]}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MissingRequirement(
            "the cpu device",
            expected="a writable cache folder for compiled kernels",
            got=f"{folder}: {error.strerror}",
            remedy="set XDG_CACHE_HOME to a writable folder",
            clause="C12.4",
        ) from error
    started = time.monotonic()
    announce(f"pagedkv: compiling {name} for the cpu device with {compiler.kind} (once)")
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder) as scratch:
        source, library = Path(scratch) / f"unit-{name}.cpp", Path(scratch) / "library.so"
        source.write_text(text, encoding="utf-8")
        command = [*compiler.command, *flags, f"-I{SOURCE_FOLDER}", str(source), "-o", str(library), "-lpthread", "-lm"]
        environment = dict(os.environ)
        if compiler.kind == "zig":
            environment.setdefault("ZIG_GLOBAL_CACHE_DIR", str(zig_cache_folder()))
            environment.setdefault("ZIG_LOCAL_CACHE_DIR", str(Path(scratch) / "zig"))
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=scratch)
        if result.returncode != 0:
            raise MisuseError(
                f"module {name}",
                expected=f"C++ that {compiler.kind} compiles",
                got=f"exit code {result.returncode}:\n{_first_errors(result.stderr)}\n",
                remedy="mend the source; it is compiled after runtime.cuh",
                clause="C14.4",
                compiler_output=result.stderr,
            )
        library.replace(target)
    announce(f"pagedkv: compiled {name} in {time.monotonic() - started:.1f} s")
    return target


def _first_errors(text: str) -> str:
    """Pick the lines that say what is wrong, with a few after each."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if "error:" in line][:3]
    picked = [line for start in starts for line in lines[start : start + 3]]
    return "\n".join(picked or lines[:20])
