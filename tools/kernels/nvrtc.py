"""NVRTC through CuPy's binding: CUDA C++ in, PTX and the assembler's figures out; no GPU and no driver.

The package cuda-core does not serve: it makes PTX only where a driver is installed, and takes no headers from memory.
`compile_program` may be called from several threads at once: CuPy releases the interpreter while NVRTC compiles.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pagedkv as pk


@dataclass(frozen=True)
class Nvrtc:
    """A loaded NVRTC: its version, the architectures it compiles for, such as ``sm_90``, and CuPy's binding."""

    version: str
    architectures: frozenset[str]
    binding: Any


@dataclass(frozen=True)
class Compiled:
    """One compilation: the messages of compiler and assembler, and the PTX, which is empty after errors."""

    log: str
    ptx: str

    @property
    def is_ok(self) -> bool:
        """Whether there is PTX."""
        return bool(self.ptx)


@dataclass(frozen=True)
class KernelResources:
    """What the assembler reports of one kernel; `threads_max` is the launch bound, None without one."""

    kernel: str
    registers: int
    spill_load_bytes: int
    spill_store_bytes: int
    local_bytes: int
    shared_bytes: int
    threads_max: int | None


@functools.cache
def load_nvrtc() -> Nvrtc:
    """Import CuPy's binding and load NVRTC.

    Raises:
        MissingRequirement: CuPy or NVRTC is not installed.
    """
    try:
        from cupy_backends.cuda.libs import nvrtc

        version = ".".join(map(str, nvrtc.getVersion()))
    except (ImportError, RuntimeError) as error:
        raise pk.MissingRequirement(
            "compiling the kernel set",
            expected="CuPy and NVRTC, NVIDIA's run-time compiler",
            got=str(error).partition("\n")[0],
            remedy="install both with `python -m pip install 'pagedkv[cuda13]'`, or the extra `dev`; no GPU is needed",
            clause="C4.5",
        ) from error
    return Nvrtc(version, frozenset(f"sm_{number}" for number in nvrtc.getSupportedArchs()), nvrtc)


def compile_program(
    nvrtc: Nvrtc, text: str, *, name: str, headers: Mapping[str, str], options: Sequence[str]
) -> Compiled:
    """Compile one translation unit.

    Args:
        nvrtc: from `load_nvrtc`.
        text: CUDA C++.
        name: the name of the text in messages.
        headers: file name -> text, for `#include`.
        options: as on NVRTC's command line.
    """
    binding = nvrtc.binding
    names, texts = ([item.encode() for item in items] for items in (headers, headers.values()))
    program = binding.createProgram(text, name, texts, names)
    try:
        binding.compileProgram(program, options)
        return Compiled(binding.getProgramLog(program), binding.getPTX(program).decode())
    except binding.NVRTCError as error:
        return Compiled(binding.getProgramLog(program) or str(error), "")
    finally:
        binding.destroyProgram(program)


_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_PTX_ENTRY = re.compile(r"^\s*(?:\.visible\s+)?\.entry\s+(\w+)", re.MULTILINE)
_PTX_BOUND = re.compile(r"\.(?:max|req)ntid\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?")


def read_resources(log: str, ptx: str) -> list[KernelResources]:
    """Return the figures of every kernel in an assembler log made with ``--ptxas-options=-v``, by name.

    The log lists functions that were not inlined under their kernel; their stack and spills count as the kernel's.
    """
    bounds = _launch_bounds(ptx)
    kernels: dict[str, KernelResources] = {}
    kernel = ""
    stack = spill_stores = spill_loads = 0
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            kernel, stack, spill_stores, spill_loads = entry[1], 0, 0, 0
        elif frame := _STACK.search(line):
            stack += int(frame[1])
            spill_stores += int(frame[2])
            spill_loads += int(frame[3])
        elif (used := _USED.search(line)) and kernel:
            shared = _SHARED.search(line)
            kernels[kernel] = KernelResources(
                kernel, int(used[1]), spill_loads, spill_stores, stack, int(shared[1]) if shared else 0,
                bounds.get(kernel),
            )  # fmt: skip
    return [kernels[name] for name in sorted(kernels)]


def _launch_bounds(ptx: str) -> dict[str, int]:
    """Return the threads of each kernel's launch bound."""
    bounds: dict[str, int] = {}
    entries = list(_PTX_ENTRY.finditer(ptx))
    for entry, following in zip(entries, [*entries[1:], None], strict=True):
        body = ptx[entry.end() : following.start() if following else len(ptx)]
        if bound := _PTX_BOUND.search(body):
            x, y, z = (int(n or 1) for n in bound.groups())
            bounds[entry[1]] = x * y * z
    return bounds
