"""Allocations as both devices check and count them, and the way from a NumPy array back to its memory.

An array over host memory keeps its allocation alive through `base`; so does every view of it.  Clauses: C3.8, C5.4.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.devices.protocol import Shape
from pagedkv.errors import CapacityError, MisuseError, shown
from pagedkv.values.checks import INT64_MAX, array_form, checked_integer, form_bytes

ALIGN_BYTES_MAX = 4096
ARRAY_BASES_MAX = 8  # NumPy collapses views of views to two bases; each stride trick adds one


class HostAllocation:
    """Memory that NumPy can reach.

    Attributes:
        memory: the device's memory that made it.
        is_pinned: host memory that kernels and asynchronous copies may use.
        address, end: its first byte and the one behind its last.
    """

    __slots__ = ("__array_interface__", "__weakref__", "address", "end", "is_pinned", "memory")

    def __init__(self, memory: BaseMemory, *, is_pinned: bool) -> None:
        self.is_pinned = is_pinned
        self.address = self.end = 0
        self.memory = memory
        self.__array_interface__: dict[str, object] = {}

    def array(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Make the array over this memory."""
        self.address, self.end = address, address + math.prod(shape) * dtype.itemsize
        self.__array_interface__ = {
            "version": 3, "shape": shape, "typestr": dtype.str, "descr": dtype.descr, "data": (address, False),
        }
        return np.asarray(self)


class BaseMemory(ABC):
    """All memory of one device."""

    def __init__(self) -> None:
        self._live_bytes: dict[bool, dict[int, int]] = {False: {}, True: {}}  # by is_pinned, then by key

    @property
    def allocated_bytes(self) -> int:
        """Bytes of live device arrays, as requested, without alignment and guards."""
        return sum(list(self._live_bytes[False].values()))

    @property
    def pinned_bytes(self) -> int:
        """Bytes of live pinned arrays."""
        return sum(list(self._live_bytes[True].values()))

    def note(self, key: int, byte_count: int, *, is_pinned: bool) -> None:
        """Count an allocation until `forget`; an interrupt in between leaves no wrong sum."""
        self._live_bytes[is_pinned][key] = byte_count

    def forget(self, key: int, *, is_pinned: bool) -> None:
        """End the count of an allocation; one that was not counted is ignored."""
        self._live_bytes[is_pinned].pop(key, None)

    @abstractmethod
    def array(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], *, align_bytes: int, is_zero: bool, name: str | None
    ) -> Any:
        """Allocate a device array, or raise CapacityError."""

    @abstractmethod
    def pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any], *, name: str | None = None) -> npt.NDArray[Any]:
        """Allocate pinned host memory, or raise CapacityError."""

    def owner(self, array: npt.NDArray[Any]) -> HostAllocation | None:
        """Find the allocation behind an array, or None when this device did not make it."""
        origin = _origin(array)
        return origin if isinstance(origin, HostAllocation) and origin.memory is self else None


def lies_within(array: npt.NDArray[Any]) -> bool:
    """Does the array lie within the memory behind it?  A stride trick can reach beyond it.  Unknown memory: yes."""
    origin = _origin(array)
    if isinstance(origin, HostAllocation):
        first, end = origin.address, origin.end
    elif isinstance(origin, np.ndarray):
        first, end = byte_range(int(origin.ctypes.data), origin)
    else:
        return True
    low, high = byte_range(int(array.ctypes.data), array)
    return first <= low and high <= end


def byte_range(address: int, array: Any) -> tuple[int, int]:
    """Return the first byte that an array reaches and the one behind the last; `address` is its first element's."""
    if array.flags.c_contiguous:
        return address, address + int(array.nbytes)
    low = high = address
    for extent, stride in zip(array.shape, array.strides, strict=True):
        if not extent:
            return address, address
        low, high = low + min((extent - 1) * stride, 0), high + max((extent - 1) * stride, 0)
    return low, high + int(array.dtype.itemsize)


def _origin(array: npt.NDArray[Any]) -> object:
    """Return what owns the bytes of an array: a HostAllocation, an array, or any other object."""
    owner: Any = array
    for _ in range(ARRAY_BASES_MAX + 1):
        base = getattr(owner, "base", None)
        if base is None:
            break
        owner = base
        if isinstance(owner, HostAllocation):
            break
    return owner


def check_allocation(
    shape: Shape, dtype: npt.DTypeLike, align_bytes: int = 1, name: str | None = None
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Check what a caller asks for, and give it as NumPy's own types.

    Raises:
        MisuseError: no shape or dtype of an array, an alignment that is no power of two, or a name that is no text.
        CapacityError: more bytes than an address space has.
    """
    extents, resolved = array_form(shape, dtype)
    remedy = "use 256 for planes and 16 for rows"
    checked_integer("align_bytes of an allocation", align_bytes, 1, ALIGN_BYTES_MAX, remedy=remedy, clause="C3.8")
    if align_bytes & (align_bytes - 1):
        raise MisuseError("align_bytes of an allocation", expected=f"a power of two from 1 to {ALIGN_BYTES_MAX}",
                          got=align_bytes, remedy=remedy, clause="C3.8")
    if name is not None and type(name) is not str:
        raise MisuseError("the name of an allocation", expected="a text or None", got=shown(name),
                          remedy="name it for messages", clause="C15.1")
    byte_count = form_bytes(extents, resolved)
    if byte_count > INT64_MAX:  # the allocator would see only its low 64 bits
        raise no_memory(byte_count, None, "an address space", f"2**{byte_count.bit_length()} bytes asked for")
    return extents, resolved


def no_memory(byte_count: int, name: str | None, kind: str, got: object) -> CapacityError:
    """Give the error of an allocation for which there is no memory."""
    return CapacityError(
        f"allocation of {shown(byte_count)} bytes{f' for {name}' if name else ''}", expected=f"{kind} for it", got=got,
        remedy="build a smaller store", clause="C5.4", bytes=byte_count,
    )
