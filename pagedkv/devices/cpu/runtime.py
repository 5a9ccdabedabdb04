"""The C library of the cpu device: its structures and functions, and how packed nodes run and faults become errors.

The layouts are those of `cuda_src/cpu_device/state.h`; a test compares the sizes.  Knows no operation, stream or
capture.  Clause C12.4: a fault names what happened, and the process and the device survive it.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
import threading
from pathlib import Path
from typing import Any

from pagedkv.devices.cache_folder import Announce
from pagedkv.devices.cpu.compiler import Compiler, build_runtime, open_library
from pagedkv.devices.cpu.memory import Buffer, Memory
from pagedkv.errors import DeviceFault

ORDERS = {"ascending": 0, "descending": 1, "random": 2}

FAULT_SIGNAL = 1
FAULT_MEMORY = 7

NODE_KERNEL = 0
NODE_COPY = 1

ADDR2LINE_SECONDS = 10.0

# `pk_node`: kind and serial flag; entry, name and slots; grid and block; then the three words of a copy
NODE = struct.Struct("<IIQQQIIIIIIQQQ")


class Fault(ctypes.Structure):
    """Where and how a kernel failed (`pk_fault`)."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("signal", ctypes.c_int32),
        ("address_known", ctypes.c_int32),
        ("node", ctypes.c_int32),
        ("address", ctypes.c_uint64),
        ("pc", ctypes.c_uint64),
        ("block", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32 * 3),
        ("kernel", ctypes.c_char * 128),
        ("text", ctypes.c_char * 512),
    )


class _Loaded:
    """The library of this process: written under `lock`, never unloaded."""

    lock = threading.Lock()
    library: ctypes.CDLL | None = None


def load_library(compiler: Compiler, announce: Announce) -> Any:
    """Load the library, once per process: all compilers give it the same layouts."""
    with _Loaded.lock:
        if _Loaded.library is None:
            library = open_library(build_runtime(compiler, announce), mode=ctypes.RTLD_GLOBAL)
            _declare(library)
            _Loaded.library = library
        return _Loaded.library


def _declare(library: Any) -> None:
    pointer, integer, number = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64
    buffer = ctypes.POINTER(Buffer)
    for name, result, *arguments in (
        ("pk_run", integer, pointer, ctypes.c_char_p, number),
        ("pk_run_one", integer, pointer, ctypes.c_char_p, ctypes.c_char_p),
        ("pk_last_fault", None, ctypes.POINTER(Fault)),
        ("pk_device_create", pointer, integer, ctypes.c_int32, number, ctypes.c_double),
        ("pk_device_set_order", None, pointer, ctypes.c_int32, number),
        ("pk_device_destroy", None, pointer),
        ("pk_buffer_create", integer, number, number, integer, buffer),
        ("pk_buffer_check", integer, buffer, ctypes.POINTER(ctypes.c_int64)),
        ("pk_buffer_retire", None, buffer),
        ("pk_buffer_destroy", None, buffer),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


class Executor:
    """Runs packed nodes on one runtime device.

    Attributes:
        handle: the C side's device.
        native_run: runs packed nodes in one call; a result other than 0 means a fault.
    """

    def __init__(self, library: Any, handle: int, memory: Memory) -> None:
        self.handle = handle
        self.native_run = library.pk_run
        self._native_run_one = library.pk_run_one
        self._library = library
        self._memory = memory

    def run_one(self, packed: bytes, slots: bytes) -> None:
        """Run one packed node with its arguments, or raise DeviceFault."""
        if self._native_run_one(self.handle, packed, slots):
            raise self.fault()

    def fault(self) -> DeviceFault:
        """Give the error of the fault that ended the last run."""
        fault = Fault()
        self._library.pk_last_fault(ctypes.byref(fault))
        kernel = fault.kernel.decode(errors="replace")
        text = fault.text.decode(errors="replace")
        block, thread = tuple(map(int, fault.block)), tuple(map(int, fault.thread))
        address = int(fault.address) if fault.address_known else None
        where = self._memory.describe(address) if address is not None else ""
        if where:
            text = f"an access {where}"
        if address is not None:
            text = f"{text} (address {address:#x})"
        if fault.kind == FAULT_SIGNAL and (line := source_line(int(fault.pc))):
            text = f"{text} at {line}"
        is_memory = fault.kind == FAULT_MEMORY
        return DeviceFault(
            f"kernel {kernel}, block {block}, thread {thread}", expected="a launch that runs to its end", got=text,
            remedy="free memory, or use fewer threads" if is_memory
            else "correct the kernel or its arguments; the device stays usable",
            clause="C12.4", kernel=kernel, block=block, thread=thread, address=address, buffer=where, reason=text,
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
