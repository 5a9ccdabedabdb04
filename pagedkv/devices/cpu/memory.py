"""Memory of the cpu device: guarded mappings behind NumPy arrays.

    [ guard 64 KiB | canary ... | data | canary | guard 64 KiB ]
                                ^ start, aligned to align_bytes

The data ends at the rear guard to within `align_bytes`; a kernel that runs past it faults at once, and what it
writes into the slack is found by the canary.  An array keeps its mapping alive through `base`, so views do
too; the last one to go returns the memory.  The addresses of the last few freed buffers stay unmapped, so a
late access through them faults and has a name.
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

from pagedkv.devices import refusals
from pagedkv.devices.cpu.runtime import Buffer
from pagedkv.devices.protocol import Shape
from pagedkv.errors import CapacityError

PAGE_BYTES = 4096
POISON = 0xFF
FREED_REMEMBERED = 64

# Bound once: every pointer of every launch passes here.
_addressof = ctypes.addressof
_from_buffer: Any = ctypes.c_char.from_buffer

ARRAY_BASES_MAX = 8  # views of views collapse to two; stride tricks add one each


class Allocation:
    """One mapping and who it belongs to; made by `Memory` only.

    Attributes:
        memory: the owner.
        buffer: where it lies; fixed.
        label: for messages: name, dtype and shape; set once by `Memory`.
        is_pinned: host memory that both sides may use.
    """

    __slots__ = ("__array_interface__", "__weakref__", "buffer", "is_pinned", "label", "memory", "serial")

    def __init__(self, memory: Memory, buffer: Buffer, label: str, serial: int, *, is_pinned: bool) -> None:
        self.memory = memory
        self.buffer = buffer
        self.label = label
        self.serial = serial
        self.is_pinned = is_pinned
        self.__array_interface__: dict[str, object] = {}

    def __del__(self) -> None:
        self.memory.release(self)


class Memory:
    """All mappings of one device."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._serials = itertools.count(1)
        # Re-entrant: the collector may free an array in the middle of any of these methods.
        self._lock = threading.RLock()
        self._live: dict[int, tuple[str, Buffer]] = {}
        self._freed: deque[tuple[str, Buffer]] = deque()  # oldest first; without memory, addresses kept
        self.violations: list[str] = []  # overwritten canaries found when a mapping was returned
        self.allocated_bytes = 0  # of live device arrays, as asked for; pinned ones count apart
        self.pinned_bytes = 0

    def array(
        self,
        shape: Shape,
        dtype: npt.DTypeLike,
        *,
        align_bytes: int,
        fill: int,
        is_pinned: bool,
        name: str | None,
    ) -> npt.NDArray[Any]:
        """Map memory and give an array over it.

        Args:
            shape: as in NumPy.
            dtype: as in NumPy; no objects.
            align_bytes: power of two, 1 to 4096.
            fill: byte that fresh memory has; 0 costs nothing.
            is_pinned: for messages and checks.
            name: for messages.

        Raises:
            MisuseError: alignment, dtype or shape.
            CapacityError: the host has no memory.
        """
        extents = (shape,) if isinstance(shape, int) else tuple(int(extent) for extent in shape)
        resolved = np.dtype(dtype)
        if align_bytes < 1 or align_bytes > PAGE_BYTES or align_bytes & (align_bytes - 1):
            raise refusals.allocation_alignment(align_bytes, PAGE_BYTES)
        if resolved.hasobject or min(extents, default=0) < 0:
            raise refusals.allocation_shape(extents, resolved)
        byte_count = math.prod(extents) * resolved.itemsize
        label = f"{f'{name!r} ' if name else ''}{resolved} {extents}"
        buffer = Buffer()
        if self._library.pk_buffer_create(byte_count, align_bytes, fill, ctypes.byref(buffer)) != 0:
            raise CapacityError(
                f"allocation of {byte_count} bytes",
                expected="host memory for it",
                got="none",
                remedy="build a smaller store",
                clause="C5.4",
                bytes=byte_count,
            )
        serial = next(self._serials)
        allocation = Allocation(self, buffer, label, serial, is_pinned=is_pinned)
        with self._lock:
            self._live[serial] = (label, buffer)
            self._count(byte_count, is_pinned=is_pinned)
        allocation.__array_interface__ = {
            "version": 3,
            "shape": extents,
            "typestr": resolved.str,
            "descr": resolved.descr,
            "data": (buffer.start, False),
        }
        return np.asarray(allocation)

    def release(self, allocation: Allocation) -> None:
        """Return a mapping; called when its last array goes."""
        buffer = allocation.buffer
        with self._lock:
            if (offset := self._overwritten(buffer)) is not None:
                self.violations.append(_overwrite_text(allocation.label, buffer, offset))
            self._live.pop(allocation.serial, None)
            self._count(-buffer.bytes, is_pinned=allocation.is_pinned)
            self._library.pk_buffer_retire(ctypes.byref(buffer))
            self._freed.append((allocation.label, buffer))
            if len(self._freed) > FREED_REMEMBERED:
                self._library.pk_buffer_destroy(ctypes.byref(self._freed.popleft()[1]))

    def forget_freed(self) -> None:
        """Give the addresses of freed buffers back; called when the device closes."""
        with self._lock:
            while self._freed:
                self._library.pk_buffer_destroy(ctypes.byref(self._freed.popleft()[1]))

    def check(self) -> list[str]:
        """Give a line for every overwritten canary, of live and of returned mappings; returned ones are told once."""
        with self._lock:
            found, self.violations = self.violations, []
            for serial in list(self._live):
                label, buffer = self._live.get(serial, ("", None))
                if buffer is not None and (offset := self._overwritten(buffer)) is not None:
                    found.append(_overwrite_text(label, buffer, offset))
            return found

    def owner(self, array: npt.NDArray[Any]) -> Allocation | None:
        """Find the mapping behind an array, or None when it is not of this device."""
        base: Any = array.base
        for _ in range(ARRAY_BASES_MAX):
            if type(base) is Allocation:
                return base if base.memory is self else None
            if base is None:
                return None
            base = getattr(base, "base", None)
        return None

    def describe(self, address: int) -> str:
        """Say in which guard or freed mapping an address lies; empty when in none."""
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

    def _count(self, byte_count: int, *, is_pinned: bool) -> None:
        if is_pinned:
            self.pinned_bytes += byte_count
        else:
            self.allocated_bytes += byte_count

    def name_of(self, address: int) -> str:
        """Name what lies at an address: a buffer and the byte within it, or host memory that is none of ours."""
        return self.describe(address).removeprefix("inside ") or "pageable host memory"

    def buffer_of(self, address: int) -> str:
        """Give the label of the buffer that holds an address, or say that it is host memory that is none of ours."""
        with self._lock:
            for label, buffer in self._live.values():
                if buffer.start <= address < buffer.start + buffer.bytes:
                    return label
        return "pageable host memory"

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
        # A quarter of the price of `array.ctypes.data`, which builds an object.
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
