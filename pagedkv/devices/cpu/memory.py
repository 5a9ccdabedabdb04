"""Memory of the cpu device: guarded mappings behind NumPy arrays.

    [ guard 64 KiB | canary ... | data | canary | guard 64 KiB ]
                                ^ start, aligned to align_bytes

The data ends less than `align_bytes` before the rear guard: a kernel that runs past the guard faults at once, and the
canary shows a write into the slack.  The last array or view over a mapping returns the memory, also after the device
was closed.  While the device is open, the addresses of the last few freed buffers stay reserved, so a late access
faults and names its buffer.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.devices.memory import BaseMemory, HostAllocation, no_memory

POISON = 0xFF
PINNED_ALIGN_BYTES = 64
FREED_REMEMBERED = 64

# Bound once, because every pointer of every launch uses them.
_addressof = ctypes.addressof
_from_buffer: Any = ctypes.c_char.from_buffer


class Buffer(ctypes.Structure):
    """A guarded mapping (`pk_buffer`)."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("base", "mapped_bytes", "start", "bytes"))


class Allocation(HostAllocation):
    """One mapping behind arrays.

    Attributes:
        buffer: the mapping.
        label: for messages: name, dtype and shape.
        serial: its key in `Memory`.
    """

    __slots__ = ("buffer", "label", "serial")
    memory: Memory

    def __init__(self, memory: Memory, buffer: Buffer, label: str, serial: int, *, is_pinned: bool) -> None:
        self.buffer, self.label, self.serial = buffer, label, serial  # first: `release` needs them
        super().__init__(memory, is_pinned=is_pinned)

    def __del__(self) -> None:
        if hasattr(self, "memory"):  # not where an interrupt ended the construction
            self.memory.release(self)


class Memory(BaseMemory):
    """All mappings of one device.

    Attributes:
        violations: overwritten canaries of mappings that were returned; the context raises them and clears the list.
    """

    def __init__(self, library: Any) -> None:
        super().__init__()
        self._library = library
        self._serials = itertools.count(1)
        # Re-entrant: the collector may free an array in the middle of any of these methods.
        self._lock = threading.RLock()
        self._live: dict[int, tuple[str, Buffer]] = {}
        self._freed: deque[tuple[str, Buffer]] = deque()  # oldest first; without memory, but with their addresses
        self._remembered = FREED_REMEMBERED  # most entries of `_freed`; 0 after `forget_freed`
        self.violations: list[str] = []

    def array(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], *, align_bytes: int, is_zero: bool, name: str | None
    ) -> npt.NDArray[Any]:
        """Map device memory of zeros, which cost nothing, or of 0xFF."""
        return self._map(shape, dtype, align_bytes, 0 if is_zero else POISON, name, is_pinned=False)

    def pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any], *, name: str | None = None) -> npt.NDArray[Any]:
        """Map host memory of 0xFF."""
        return self._map(shape, dtype, PINNED_ALIGN_BYTES, POISON, name, is_pinned=True)

    def _map(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], align_bytes: int, fill: int, name: str | None,
        *, is_pinned: bool,
    ) -> npt.NDArray[Any]:
        byte_count = math.prod(shape) * dtype.itemsize
        label = f"{f'{name!r} ' if name else ''}{dtype} {shape}"
        buffer = Buffer()
        if self._library.pk_buffer_create(byte_count, align_bytes, fill, ctypes.byref(buffer)) != 0:
            raise no_memory(byte_count, name, "host memory", "none")
        serial = next(self._serials)
        allocation = Allocation(self, buffer, label, serial, is_pinned=is_pinned)
        with self._lock:
            self._live[serial] = (label, buffer)
            self.note(serial, byte_count, is_pinned=is_pinned)
        return allocation.array(buffer.start, shape, dtype)

    def release(self, allocation: Allocation) -> None:
        """Return a mapping after its last array."""
        buffer = allocation.buffer
        with self._lock:
            if (offset := self._overwritten(buffer)) is not None:
                self.violations.append(_overwrite_text(allocation.label, buffer, offset))
            self._live.pop(allocation.serial, None)
            self.forget(allocation.serial, is_pinned=allocation.is_pinned)
            self._library.pk_buffer_retire(ctypes.byref(buffer))
            self._freed.append((allocation.label, buffer))
            self._drop_freed()

    def forget_freed(self) -> None:
        """Give the addresses of freed buffers back, now and from now on: no kernel can access them any more."""
        with self._lock:
            self._remembered = 0
            self._drop_freed()

    def __del__(self) -> None:
        self.forget_freed()

    def check(self) -> list[str]:
        """Give a line for every overwritten canary; of returned mappings only since the last check."""
        with self._lock:
            lines, self.violations = self.violations, []
            for serial in list(self._live):
                label, buffer = self._live.get(serial, ("", None))
                if buffer is not None and (offset := self._overwritten(buffer)) is not None:
                    lines.append(_overwrite_text(label, buffer, offset))
            return lines

    def describe(self, address: int) -> str:
        """Say where in a live or freed mapping an address lies; empty when in none."""
        with self._lock:
            live, freed = list(self._live.values()), list(self._freed)
        for label, buffer in live:
            if not buffer.base <= address < buffer.base + buffer.mapped_bytes:
                continue
            end = buffer.start + buffer.bytes
            if address < buffer.start:
                return f"{buffer.start - address} bytes before buffer {label}"
            if address >= end:
                return f"{address - end} bytes past the end of buffer {label}"
            return f"inside buffer {label}, at byte {address - buffer.start}"
        for label, buffer in freed:
            if buffer.base <= address < buffer.base + buffer.mapped_bytes:
                return f"in buffer {label}, which was freed"
        return ""

    def name_of(self, address: int) -> str:
        """Name an address: a buffer and the byte within it, or pageable host memory."""
        return self.describe(address).removeprefix("inside ") or "pageable host memory"

    def buffer_of(self, address: int) -> str:
        """Give the label of the buffer that holds an address, or "pageable host memory"."""
        with self._lock:
            for label, buffer in self._live.values():
                if buffer.start <= address < buffer.start + buffer.bytes:
                    return label
        return "pageable host memory"

    def _drop_freed(self) -> None:
        while len(self._freed) > self._remembered:
            self._library.pk_buffer_destroy(ctypes.byref(self._freed.popleft()[1]))

    def _overwritten(self, buffer: Buffer) -> int | None:
        offset = ctypes.c_int64()
        hit = self._library.pk_buffer_check(ctypes.byref(buffer), ctypes.byref(offset))
        return offset.value if hit else None


def _overwrite_text(label: str, buffer: Buffer, offset: int) -> str:
    if offset < 0:
        return f"buffer {label} was overwritten {-offset} bytes before its start"
    return f"buffer {label} was overwritten {offset - buffer.bytes} bytes past its end"


def address_of(array: npt.NDArray[Any]) -> int:
    """Give the address of the first element."""
    try:
        # A quarter of the cost of `array.ctypes.data`, which builds an object.
        return _addressof(_from_buffer(array))
    except (TypeError, ValueError, BufferError):  # read-only, empty or not contiguous
        return int(array.ctypes.data)


def host_memory_bytes() -> tuple[int, int]:
    """Give free and total memory of this host, within its control group, in bytes."""
    fields: dict[str, int] = {}
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        key, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            fields[key] = int(words[0]) * 1024
    total = fields.get("MemTotal", 0)
    free = fields.get("MemAvailable", fields.get("MemFree", 0))
    limit, used = _read_number("/sys/fs/cgroup/memory.max"), _read_number("/sys/fs/cgroup/memory.current")
    if limit is not None:
        total = min(total, limit)
        free = min(free, max(0, limit - (used or 0)))
    return free, total


def _read_number(path: str) -> int | None:
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
