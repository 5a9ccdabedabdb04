"""Allocations as both devices check and count them, and the way from a NumPy array back to its memory.

An array over host memory keeps its allocation alive through `base`; so does every view of it.  Clauses: C3.8, C5.4.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.devices.protocol import Shape
from pagedkv.errors import CapacityError, Caught, MisuseError, shown

ALIGN_BYTES_MAX = 4096
BYTES_MAX = (1 << 63) - 1
ARRAY_BASES_MAX = 8  # NumPy collapses views of views to two bases; each stride trick adds one


class HostAllocation:
    """Memory that NumPy can reach.

    Attributes:
        memory: the device's memory that made it.
        is_pinned: host memory that kernels and asynchronous copies may use.
    """

    __slots__ = ("__array_interface__", "__weakref__", "is_pinned", "memory")

    def __init__(self, memory: BaseMemory, *, is_pinned: bool) -> None:
        self.is_pinned = is_pinned
        self.memory = memory
        self.__array_interface__: dict[str, object] = {}

    def array(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Make the array over this memory."""
        self.__array_interface__ = {
            "version": 3, "shape": shape, "typestr": dtype.str, "descr": dtype.descr, "data": (address, False),
        }
        return np.asarray(self)


class BaseMemory(ABC):
    """All memory of one device.

    Attributes:
        allocated_bytes: of live device arrays, as requested, without alignment and guards.
        pinned_bytes: of live pinned arrays.
    """

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.pinned_bytes = 0

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
        base: Any = array.base
        for _ in range(ARRAY_BASES_MAX):
            if isinstance(base, HostAllocation):
                return base if base.memory is self else None
            if base is None:
                return None
            base = getattr(base, "base", None)
        return None


def check_allocation(shape: Shape, dtype: npt.DTypeLike, align_bytes: int = 1) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Check what a caller asks for, and give it as NumPy's own types."""
    with Caught() as caught:
        given = (shape,) if isinstance(shape, int) else shape
        extents, resolved = tuple(int(operator.index(extent)) for extent in given), np.dtype(dtype)
    if caught.error is not None:
        raise MisuseError(
            "an allocation", expected="a shape of integers and a dtype", got=f"shape {shown(shape)}, {shown(dtype)}",
            remedy="pass the shape and dtype of the array", clause="C15.1",
        ) from caught.error
    if not 1 <= align_bytes <= ALIGN_BYTES_MAX or align_bytes & (align_bytes - 1):
        raise MisuseError(
            "an allocation", expected=f"align_bytes a power of two from 1 to {ALIGN_BYTES_MAX}", got=align_bytes,
            remedy="use 256 for planes and 16 for rows", clause="C3.8",
        )
    if resolved.hasobject or min(extents, default=0) < 0:
        raise MisuseError(
            "an allocation", expected="a shape without negative extents and a dtype of plain bytes",
            got=f"shape {shown(extents)}, dtype {resolved}",
            remedy="pass the shape and dtype of the array", clause="C15.1",
        )
    byte_count = math.prod(extents) * resolved.itemsize
    if byte_count > BYTES_MAX:  # the allocator would see only its low 64 bits
        raise no_memory(byte_count, None, "an address space", f"2**{byte_count.bit_length()} bytes asked for")
    return extents, resolved


def no_memory(byte_count: int, name: str | None, kind: str, got: object) -> CapacityError:
    """Give the error of an allocation for which there is no memory."""
    return CapacityError(
        f"allocation of {shown(byte_count)} bytes{f' for {name}' if name else ''}", expected=f"{kind} for it", got=got,
        remedy="build a smaller store", clause="C5.4", bytes=byte_count,
    )
