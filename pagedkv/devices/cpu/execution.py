"""Running packed nodes on the C side, and turning its faults into errors.

Knows bytes and memory, no operation, stream or capture.  Clause C12.4: a fault names what happened, and the
process and the device survive it.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

from pagedkv.devices.cpu.memory import Memory
from pagedkv.devices.cpu.runtime import FAULT_MEMORY, FAULT_SIGNAL, Fault
from pagedkv.errors import DeviceFault

ADDR2LINE_SECONDS = 10.0


class Executor:
    """Runs packed nodes on one runtime device."""

    def __init__(self, library: Any, handle: int, memory: Memory) -> None:
        self._library = library
        self._handle = handle
        self._memory = memory
        self._run_one = library.pk_run_one
        self._run = library.pk_run

    def run_one(self, packed: bytes, slots: bytes) -> None:
        """Run one packed node; `slots` are its arguments.

        Raises:
            DeviceFault: the kernel failed.
        """
        if self._run_one(self._handle, packed, slots):
            raise self._error()

    def run_many(self, packed: bytes, count: int) -> None:
        """Run packed nodes, whose arguments lie where they say, in one call.

        Raises:
            DeviceFault: a kernel failed; the nodes after it did not run.
        """
        if self._run(self._handle, packed, count):
            raise self._error()

    def _error(self) -> DeviceFault:
        fault = Fault()
        self._library.pk_last_fault(ctypes.byref(fault))
        kernel = fault.kernel.decode(errors="replace")
        text = fault.text.decode(errors="replace")
        block = (int(fault.block[0]), int(fault.block[1]), int(fault.block[2]))
        thread = (int(fault.thread[0]), int(fault.thread[1]), int(fault.thread[2]))
        address = int(fault.address) if fault.address_known else None
        where = self._memory.describe(address) if address is not None else ""
        if where:
            text = f"an access {where}"
        if address is not None:
            text = f"{text} (address {address:#x})"
        line = source_line(int(fault.pc)) if fault.kind == FAULT_SIGNAL else ""
        if line:
            text = f"{text} at {line}"
        remedy = "mend the kernel or its arguments; the device itself goes on"
        if fault.kind == FAULT_MEMORY:
            remedy = "free memory, or use fewer threads"
        return DeviceFault(
            f"kernel {kernel}, block {block}, thread {thread}",
            expected="a launch that runs to its end",
            got=text,
            remedy=remedy,
            clause="C12.4",
            kernel=kernel,
            block=block,
            thread=thread,
            address=address,
            buffer=where,
            reason=text,
        )


def source_line(pc: int) -> str:
    """Give "file:line" of an instruction in a compiled module; empty when addr2line is absent or does not know."""
    program = shutil.which("addr2line")
    path, offset = _mapped_file(pc)
    if program is None or not path.endswith(".so"):
        return ""
    try:
        result = subprocess.run(
            [program, "-e", path, hex(offset)], capture_output=True, text=True, check=False, timeout=ADDR2LINE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    words = result.stdout.split()
    file, _, line = words[0].rpartition(":") if words else ("", "", "")
    return f"{Path(file).name}:{line}" if line.isdigit() and line != "0" else ""


def _mapped_file(pc: int) -> tuple[str, int]:
    """Find the mapped file that holds an address, and the address within it."""
    bases: dict[str, int] = {}
    for row in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        words = row.split(maxsplit=5)
        if len(words) < 6:
            continue
        first, last = (int(word, 16) for word in words[0].split("-"))
        base = bases.setdefault(words[5], first)
        if first <= pc < last:
            return words[5], pc - base
    return "", 0
