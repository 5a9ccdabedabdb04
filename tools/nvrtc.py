"""NVRTC through ctypes: CUDA C++ text in, a cubin's resource figures out; no GPU, no driver, no CuPy.

The library is looked for in the wheels of NVIDIA, then where the system's loader finds it.  Programs are
self-contained: every file of `cuda_src` is handed over as a named header, so nothing is read from disk by
the compiler and no CUDA header is needed.

`compile_program` may be called from several threads at once: NVRTC compiles them in parallel.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pagedkv as pk

_MIB = 1 << 20


@dataclass(frozen=True)
class Nvrtc:
    """A loaded NVRTC.

    Attributes:
        version: (major, minor).
        architectures: the real architectures it compiles for, as ``sm_90``.
        path: the file that was loaded.
    """

    version: tuple[int, int]
    architectures: frozenset[str]
    path: str
    library: ctypes.CDLL


@dataclass(frozen=True)
class Compiled:
    """What one compilation left behind.

    Attributes:
        log: the compiler's and the assembler's messages.
        ptx: the PTX text that the machine code was made from.
        is_ok: False when there were errors; `log` has them.
    """

    log: str
    ptx: str
    is_ok: bool


@dataclass(frozen=True)
class KernelResources:
    """What the assembler says about one kernel, in bytes where the name says so.

    `threads_max` is the launch bound that the source states, None without one.
    """

    kernel: str
    registers: int
    spill_load_bytes: int
    spill_store_bytes: int
    local_bytes: int
    shared_bytes: int
    threads_max: int | None


@functools.cache
def load_nvrtc() -> Nvrtc:
    """Find and load NVRTC.

    Raises:
        MissingRequirement: no NVRTC is installed; the message says which wheel brings it.
    """
    for candidate in _candidates():
        try:
            library = ctypes.CDLL(candidate)
        except OSError:
            continue
        major, minor = ctypes.c_int(), ctypes.c_int()
        _check(library, library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        count = ctypes.c_int()
        _check(library, library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        numbers = (ctypes.c_int * count.value)()
        _check(library, library.nvrtcGetSupportedArchs(numbers))
        return Nvrtc((major.value, minor.value), frozenset(f"sm_{n}" for n in numbers), candidate, library)
    raise pk.MissingRequirement(
        "compiling the kernel set",
        expected="NVRTC, NVIDIA's run-time compiler",
        got="no libnvrtc in the installed wheels or on the loader's path",
        remedy="install it with `python -m pip install nvidia-cuda-nvrtc` (part of the extra `dev`); no GPU is needed",
        clause="C4.5",
    )


def _candidates() -> list[str]:
    found: list[str] = []
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        # Newest first: nvidia/cu13/lib holds CUDA 13, nvidia/cuda_nvrtc/lib holds CUDA 12.
        files = (p for p in Path(location).glob("*/lib/libnvrtc.so.*") if re.fullmatch(r"libnvrtc\.so\.\d+", p.name))
        found += [str(p) for p in sorted(files, key=lambda p: int(p.name.rpartition(".")[2]), reverse=True)]
    system = ctypes.util.find_library("nvrtc")
    return found + ([system] if system else [])


def compile_program(
    nvrtc: Nvrtc, text: str, *, name: str, headers: Mapping[str, str], options: Sequence[str]
) -> Compiled:
    """Compile one translation unit.

    Args:
        nvrtc: from `load_nvrtc`.
        text: CUDA C++.
        name: what messages call the text.
        headers: file name -> text, for `#include`.
        options: as on NVRTC's command line.
    """
    library = nvrtc.library
    program = ctypes.c_void_p()
    names = (ctypes.c_char_p * len(headers))(*(n.encode() for n in headers))
    texts = (ctypes.c_char_p * len(headers))(*(t.encode() for t in headers.values()))
    code = library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), len(headers), texts, names)
    _check(library, code)
    try:
        flags = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        code = library.nvrtcCompileProgram(program, len(options), flags)
        log = _text(library, program, "ProgramLog")
        if code:
            return Compiled(log or _error(library, code), "", False)
        return Compiled(log, _text(library, program, "PTX"), True)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    assert size.value < 1024 * _MIB, f"NVRTC reports {size.value} bytes of {what}"
    buffer = ctypes.create_string_buffer(max(size.value, 1))
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.value.decode(errors="replace")


def _error(library: ctypes.CDLL, code: int) -> str:
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return f"NVRTC error {code}: {library.nvrtcGetErrorString(code).decode()}"


def _check(library: ctypes.CDLL, code: int) -> None:
    assert code == 0, _error(library, code)


_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_PTX_ENTRY = re.compile(r"^\s*(?:\.visible\s+)?\.entry\s+(\w+)", re.MULTILINE)
_PTX_BOUND = re.compile(r"\.(?:max|req)ntid\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?")


def read_resources(compiled: Compiled) -> list[KernelResources]:
    """Return the figures of every kernel in an assembler log made with ``--ptxas-options=-v``, by name.

    A function that the assembler did not inline is charged to the kernel under which the log lists it: its stack and
    spills cost that kernel's threads.
    """
    bounds = _launch_bounds(compiled.ptx)
    found: dict[str, KernelResources] = {}
    kernel = ""
    stack = spill_stores = spill_loads = 0
    for line in compiled.log.splitlines():
        if entry := _ENTRY.search(line):
            kernel, stack, spill_stores, spill_loads = entry[1], 0, 0, 0
        elif frame := _STACK.search(line):
            stack += int(frame[1])
            spill_stores += int(frame[2])
            spill_loads += int(frame[3])
        elif (used := _USED.search(line)) and kernel:
            shared = _SHARED.search(line)
            found[kernel] = KernelResources(
                kernel=kernel,
                registers=int(used[1]),
                spill_load_bytes=spill_loads,
                spill_store_bytes=spill_stores,
                local_bytes=stack,
                shared_bytes=int(shared[1]) if shared else 0,
                threads_max=bounds.get(kernel),
            )
    return [found[name] for name in sorted(found)]


def _launch_bounds(ptx: str) -> dict[str, int]:
    bounds: dict[str, int] = {}
    entries = list(_PTX_ENTRY.finditer(ptx))
    for entry, following in zip(entries, [*entries[1:], None], strict=True):
        body = ptx[entry.end() : following.start() if following else len(ptx)]
        if bound := _PTX_BOUND.search(body):
            x, y, z = (int(n or 1) for n in bound.groups())
            bounds[entry[1]] = x * y * z
    return bounds
