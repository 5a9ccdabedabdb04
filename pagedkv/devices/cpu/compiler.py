"""The C++ compiler of the cpu device, and its cache of shared libraries.

The compiler is $CXX, else g++, else clang++, else zig from the package `ziglang`.  A library is built once per
content: its name is a hash of sources, includes, flags and compiler, so nothing is ever stale.
`devices/cache_folder.py` keeps the libraries and checks them.

Flags fix the bits: `-ffp-contract=off` leaves fused operations to explicit `fmaf`, and vector instructions are
chosen by what the machine has, which changes speed only.  Knows no device and no array.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pagedkv.devices.cache_folder import SEAL_HEAD, Announce, CacheFolder, announce_on_stderr
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

VERSION_SECONDS_MAX = 60.0

_ELF_MAGIC, _ELF_SHARED_OBJECT = b"\x7fELF", 3
_ERROR_LINE = re.compile(r"\berror:")
_KILLED = re.compile(r"[Kk]illed|terminated program|terminated by signal|internal compiler error|out of memory")


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
        MissingRequirement: there is none, or $CXX names nothing that runs and says its version.
    """
    named = os.environ.get("CXX", "").strip()
    if named:
        try:
            words = tuple(shlex.split(named))
        except ValueError as error:
            raise _no_compiler(f"CXX={named!r}: {error}") from error
        if shutil.which(words[0]) is None:
            path = Path(words[0])
            kind = "is a folder" if path.is_dir() else "is not executable" if path.exists() else "is not on PATH"
            raise _no_compiler(f"CXX={named!r}, which {kind}")
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


def _no_compiler(got: str) -> MissingRequirement:
    return MissingRequirement(
        "the cpu device", expected="a C++ compiler", got=got,
        remedy="set CXX to a C++17 compiler, or unset it and install g++ or `python -m pip install 'pagedkv[cpu]'`",
        clause="C12.4",
    )  # fmt: skip


@cache
def _examine(words: tuple[str, ...]) -> Compiler:
    command = f"`{' '.join(words)} --version`"
    try:
        environment = _environment(is_zig="ziglang" in words or Path(words[0]).name.startswith("zig"))
        result = _run([*words, "--version"], timeout=VERSION_SECONDS_MAX, env=environment)
    except subprocess.TimeoutExpired as error:
        raise _no_compiler(f"{command} without an end after {VERSION_SECONDS_MAX:.0f} s") from error
    if result.returncode != 0:
        raise _no_compiler(f"{command} with {_ending(result)}: {result.stderr.strip()[:200]}")
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


def zig_cache_folder() -> Path:
    """Give the folder where zig keeps its own C library: beside the compiled kernels, not among them.

    It is made and checked as the others; zig compares the files in it with digests of its own.
    """
    return CacheFolder("zig").writable_path()


def build_runtime(compiler: Compiler, announce: Announce = announce_on_stderr) -> Path:
    """Build or find the runtime library."""
    text = '#include "cpu_device/runtime.cpp"\n'
    return build("cpu_runtime", text, compiler, announce=announce, is_shipped=True)


def build(
    name: str,
    text: str,
    compiler: Compiler,
    *,
    defines: tuple[tuple[str, str], ...] = (),
    checks: str = "",
    announce: Announce = announce_on_stderr,
    is_shipped: bool = False,
) -> Path:
    """Compile `text`, or find what an equal text gave before.

    Args:
        is_shipped: the text has sources of this library only, so that an error in it is the compiler's.

    Raises:
        MisuseError: the compiler finds errors in a text of the caller; its messages are in the error.
        MissingRequirement: the compiler is none, was killed or finds errors in our own sources; the cache folder is
            unsafe, cannot be used or has no space left.
    """
    flags = (
        *FLAGS,
        *machine_flags(compiler.kind),
        *check_flags(compiler.kind, checks),
        *(f"-D{key}={value}" for key, value in defines),
    )
    # The head of the seal is part of the key: files from before seals have other names.
    digest = hashlib.sha256("\0".join((compiler.identity, *compiler.command, *flags, text)).encode() + SEAL_HEAD)
    for included, path in reached_files(text):
        digest.update(included.encode() + b"\0" + path.read_bytes() + b"\0")

    def compile_to(library: Path) -> None:
        started = time.monotonic()
        announce(f"pagedkv: compiling {name} for the cpu device with {compiler.kind} (once)")
        source = library.with_name(f"unit-{name}.cpp")
        source.write_text(text, encoding="utf-8")
        command = [*compiler.command, *flags, f"-I{SOURCE_FOLDER}", str(source), "-o", str(library), "-lpthread", "-lm"]
        environment = _environment(is_zig=compiler.kind == "zig")
        if compiler.kind == "zig":
            environment.setdefault("ZIG_LOCAL_CACHE_DIR", str(library.with_name("zig")))
        result = _run(command, env=environment, cwd=library.parent)
        _check_result(name, compiler, result, library, environment, is_shipped=is_shipped)
        announce(f"pagedkv: compiled {name} in {time.monotonic() - started:.1f} s")

    return CacheFolder("cpu", announce=announce).file(f"{name}-{digest.hexdigest()[:32]}.so", compile_to)


def open_library(path: Path, *, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    """Load a library that `build` gave.

    Raises:
        MissingRequirement: the folder forbids execution, or the library fits another system.
    """
    try:
        return ctypes.CDLL(str(path), mode=mode)
    except OSError as error:
        expected = "a compiled library that the system loads"
        remedy = f"delete {path}; it is made again"
        if os.statvfs(path).f_flag & os.ST_NOEXEC or re.search("failed to map|not permitted", str(error)):
            expected = "a cache folder on a file system that permits execution"
            remedy = "set XDG_CACHE_HOME to a folder on a file system that is not mounted with noexec"
        raise MissingRequirement(
            "the cpu device", expected=expected, got=str(error), remedy=remedy, clause="C12.4", folder=str(path.parent),
        ) from error


def _run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False, **options
        )
    except OSError as error:
        raise _no_compiler(f"{command[0]}, which does not run: {error.strerror}") from error


def _environment(*, is_zig: bool) -> dict[str, str]:
    """Return the compiler's environment: English messages for `_check_result`, and a checked folder for zig."""
    environment = {**os.environ, "LC_ALL": "C"}
    if is_zig and not environment.get("ZIG_GLOBAL_CACHE_DIR"):
        environment["ZIG_GLOBAL_CACHE_DIR"] = str(zig_cache_folder())
    return environment


def _ending(result: subprocess.CompletedProcess[str]) -> str:
    """Say how a process ended."""
    if result.returncode >= 0:
        return f"exit code {result.returncode}"
    try:
        return f"signal {signal.Signals(-result.returncode).name}"
    except ValueError:
        return f"signal {-result.returncode}"


def _check_result(
    name: str, compiler: Compiler, result: subprocess.CompletedProcess[str], library: Path,
    environment: dict[str, str], *, is_shipped: bool,
) -> None:
    """Refuse a compilation that gave no shared library, and say whose fault it is."""
    command, output = f"`{' '.join(compiler.command)}`", result.stderr + result.stdout
    messages = _first_errors(output)
    if result.returncode == 0:
        try:
            head = library.read_bytes()[:20]
        except OSError as error:
            got = f"{command}, which ends with exit code 0 and writes no library: {error.strerror}"
            raise _no_compiler(got) from error
        if head[:4] != _ELF_MAGIC or int.from_bytes(head[16:18], sys.byteorder) != _ELF_SHARED_OBJECT:
            raise _no_compiler(f"{command}, which writes a file that is no shared library: {head!r}")
        return
    if os.strerror(errno.ENOSPC) in output:
        folders = [str(library.parent.parent), tempfile.gettempdir()]
        if compiler.kind == "zig":
            folders.append(environment["ZIG_GLOBAL_CACHE_DIR"])
        raise MissingRequirement(
            f"compiling {name}", expected="space for the compiler's files",
            got=f"no space left in one of {', '.join(folders)}:\n{messages}\n",
            remedy="free some, or set XDG_CACHE_HOME and TMPDIR to folders with space", clause="C12.4",
        )
    if result.returncode < 0 or _KILLED.search(output):
        raise MissingRequirement(
            f"compiling {name}", expected=f"{command} to run to its end", got=f"{_ending(result)}:\n{messages}\n",
            remedy="give the process more memory (the system kills compilers first), or set CXX to another compiler",
            clause="C12.4",
        )
    if is_shipped or not _ERROR_LINE.search(output):
        refusal = _no_compiler(f"{command}, which does not compile {name}: {_ending(result)}:\n{messages}\n")
        if compiler.kind == "zig":
            refusal.add_note(f"if zig compiled it before, delete {environment['ZIG_GLOBAL_CACHE_DIR']}")
        raise refusal
    raise MisuseError(
        f"module {name}",
        expected=f"C++ that {compiler.kind} compiles",
        got=f"{_ending(result)}:\n{messages}\n",
        remedy=f"mend the text of ModuleSpec {name!r}; it is compiled after runtime.cuh",
        clause="C14.4",
        compiler_output=result.stderr,
    )


def _first_errors(text: str) -> str:
    """Pick the lines that say what is wrong, with a few after each."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if "error:" in line][:3]
    picked = [line for start in starts for line in lines[start : start + 3]]
    return "\n".join(picked or lines[:20])
