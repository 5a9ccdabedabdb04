"""The C side of the cpu device as Python sees it: structures, functions, and one loaded library per process.

Mirrors the layouts in `cuda_src/cpu_device/state.h`; a test compares the sizes.  Knows no array and no stream.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any

from pagedkv.devices.cpu.compiler import Announce, Compiler, build_runtime

ORDERS = {"ascending": 0, "descending": 1, "random": 2}

FAULT_SIGNAL = 1
FAULT_MEMORY = 7

NODE_KERNEL = 0
NODE_COPY = 1

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


class Buffer(ctypes.Structure):
    """A guarded mapping (`pk_buffer`)."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("mapped_bytes", ctypes.c_uint64),
        ("start", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
    )


class _Loaded:
    """The library, loaded by whoever needs it first; written under `lock`, never unloaded."""

    lock = threading.Lock()
    library: ctypes.CDLL | None = None


def load_library(compiler: Compiler, announce: Announce) -> Any:
    """Load the runtime library, once per process; a second compiler shares it, because the layouts are equal."""
    with _Loaded.lock:
        if _Loaded.library is None:
            library = ctypes.CDLL(str(build_runtime(compiler, announce)), mode=ctypes.RTLD_GLOBAL)
            _declare(library)
            _Loaded.library = library
        return _Loaded.library


def _declare(library: ctypes.CDLL) -> None:
    pointer = ctypes.c_void_p
    library.pk_run.argtypes = [pointer, ctypes.c_char_p, ctypes.c_uint64]
    library.pk_run.restype = ctypes.c_int
    library.pk_run_one.argtypes = [pointer, ctypes.c_char_p, ctypes.c_char_p]
    library.pk_run_one.restype = ctypes.c_int
    library.pk_last_fault.argtypes = [ctypes.POINTER(Fault)]
    library.pk_last_fault.restype = None
    library.pk_device_create.argtypes = [ctypes.c_int, ctypes.c_int32, ctypes.c_uint64, ctypes.c_double]
    library.pk_device_create.restype = pointer
    library.pk_device_set_order.argtypes = [pointer, ctypes.c_int32, ctypes.c_uint64]
    library.pk_device_set_order.restype = None
    library.pk_device_destroy.argtypes = [pointer]
    library.pk_device_destroy.restype = None
    library.pk_buffer_create.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int, ctypes.POINTER(Buffer)]
    library.pk_buffer_create.restype = ctypes.c_int
    library.pk_buffer_check.argtypes = [ctypes.POINTER(Buffer), ctypes.POINTER(ctypes.c_int64)]
    library.pk_buffer_check.restype = ctypes.c_int
    library.pk_buffer_retire.argtypes = [ctypes.POINTER(Buffer)]
    library.pk_buffer_retire.restype = None
    library.pk_buffer_destroy.argtypes = [ctypes.POINTER(Buffer)]
    library.pk_buffer_destroy.restype = None
