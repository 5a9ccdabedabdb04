"""Memory of the cuda device: CuPy arrays and pinned buffers.

Device arrays come from a memory pool of this device alone, so that nothing of CuPy's default pool mixes in, and end
when the last array over them goes.  **An array must outlive the work that uses it**: pools hand freed bytes out again
at once, in no stream's order.  Captured graphs hold their arrays themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.devices import refusals
from pagedkv.devices.cuda.runtime import CudaRuntime
from pagedkv.devices.protocol import Shape
from pagedkv.errors import CapacityError
from pagedkv.values.quantities import align_up

ALIGN_BYTES_MAX = 4096
POOL_ALIGN_BYTES = 512  # every block of a CuPy pool begins on such an address
ARRAY_BASES_MAX = 8  # views of views collapse to two; stride tricks add one each


class DeviceAllocation:
    """One block of the pool behind CuPy arrays: their `owner`, so that it ends with the last of them."""

    def __init__(self, memory: CudaMemory, pointer: Any, byte_count: int) -> None:
        self._memory = memory
        self._pointer = pointer
        self._byte_count = byte_count
        memory.allocated_bytes += byte_count

    def __del__(self) -> None:
        self._memory.allocated_bytes -= self._byte_count


class PinnedAllocation:
    """One pinned buffer behind NumPy arrays; made by `CudaMemory` only.

    Attributes:
        memory: who it belongs to.
        buffer: CuPy's pinned memory; freed with the last array.
    """

    def __init__(self, memory: CudaMemory, buffer: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.memory = memory
        self.buffer = buffer
        self._byte_count = math.prod(shape) * dtype.itemsize
        memory.pinned_bytes += self._byte_count
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": dtype.str,
            "descr": dtype.descr,
            "data": (int(buffer.ptr), False),
        }

    def __del__(self) -> None:
        self.memory.pinned_bytes -= self._byte_count
        self.memory.retire(self.buffer)


class CudaMemory:
    """All memory that one device hands out.

    Attributes:
        allocated_bytes: of live device arrays, as asked for; pinned_bytes: the same of pinned ones.
        keeps_freed: freed pinned buffers are kept, because freeing them would break a capture.  Written by the device.
    """

    def __init__(self, api: CudaRuntime, index: int) -> None:
        self._api = api
        self._index = index
        self._pool: Any = api.invoke("cuda.MemoryPool")
        self._freed: list[Any] = []
        self.keeps_freed = False
        self.allocated_bytes = 0
        self.pinned_bytes = 0

    def array(self, shape: Shape, dtype: npt.DTypeLike, *, align_bytes: int, name: str | None = None) -> Any:
        """Allocate a device array; its content is whatever lay there.

        Raises:
            MisuseError: alignment, dtype or shape.
            CapacityError: the GPU has no memory.
        """
        extents, resolved = _checked(shape, dtype)
        if not 1 <= align_bytes <= ALIGN_BYTES_MAX or align_bytes & (align_bytes - 1):
            raise refusals.allocation_alignment(align_bytes, ALIGN_BYTES_MAX)
        byte_count = math.prod(extents) * resolved.itemsize
        slack = align_bytes if align_bytes > POOL_ALIGN_BYTES else 0
        with _naming(byte_count, name, "device memory"):
            pointer = self._api.invoke("cuda.MemoryPool.malloc", self._pool, byte_count + slack)
        if byte_count:
            start = align_up(int(pointer.ptr), align_bytes)
            owner = DeviceAllocation(self, pointer, byte_count)
            memory = self._api.invoke("cuda.UnownedMemory", start, byte_count, owner, self._index)
            pointer = self._api.invoke("cuda.MemoryPointer", memory, 0)
        return self._api.invoke("ndarray", extents, resolved, pointer)

    def clear(self, array: Any) -> None:
        """Write zero bytes, and wait: the array may be used on any stream afterwards."""
        if array.nbytes:
            # Everything before, on every stream: the pool may have handed out bytes that are still in use.
            self._api.invoke("cuda.runtime.deviceSynchronize")
            self._api.invoke("cuda.runtime.memset", int(array.data.ptr), 0, array.nbytes)
            self._api.invoke("cuda.runtime.deviceSynchronize")

    def pinned(self, shape: Shape, dtype: npt.DTypeLike, *, name: str | None = None) -> npt.NDArray[Any]:
        """Allocate pinned host memory.

        Raises:
            MisuseError: dtype or shape.
            CapacityError: the host cannot pin so much.
        """
        extents, resolved = _checked(shape, dtype)
        byte_count = math.prod(extents) * resolved.itemsize
        with _naming(byte_count, name, "memory that can be pinned"):
            buffer = self._api.invoke("cuda.PinnedMemory", max(byte_count, 1))
        return np.asarray(PinnedAllocation(self, buffer, extents, resolved))

    def owner(self, array: npt.NDArray[Any]) -> PinnedAllocation | None:
        """Find the pinned buffer behind a NumPy array, or None when it is not of this device."""
        base: Any = array.base
        for _ in range(ARRAY_BASES_MAX):
            if type(base) is PinnedAllocation:
                return base if base.memory is self else None
            if base is None:
                return None
            base = getattr(base, "base", None)
        return None

    def retire(self, buffer: Any) -> None:
        """Free a pinned buffer; later, while a capture is on."""
        if self.keeps_freed:
            self._freed.append(buffer)

    def free_kept(self) -> None:
        """Free what was kept; called when a capture has ended."""
        self.keeps_freed = False
        self._freed.clear()

    def empty_caches(self) -> int:
        """Give freed blocks back to the GPU, this device's and those of CuPy's default pool; say how many bytes."""
        held = 0
        for pool in (self._pool, self._api.invoke("get_default_memory_pool")):
            held += int(self._api.invoke("cuda.MemoryPool.free_bytes", pool))
            self._api.invoke("cuda.MemoryPool.free_all_blocks", pool)
        return held


@contextmanager
def _naming(byte_count: int, name: str | None, kind: str) -> Iterator[None]:
    """Say what was to be allocated, when it cannot be."""
    try:
        yield
    except CapacityError as error:
        raise CapacityError(
            f"allocation of {byte_count} bytes{f' for {name}' if name else ''}",
            expected=f"{kind} for it",
            got=error.got,
            remedy="build a smaller store",
            clause="C5.4",
            bytes=byte_count,
        ) from error


def _checked(shape: Shape, dtype: npt.DTypeLike) -> tuple[tuple[int, ...], np.dtype[Any]]:
    extents = (shape,) if isinstance(shape, int) else tuple(int(extent) for extent in shape)
    resolved = np.dtype(dtype)
    if resolved.hasobject or min(extents, default=0) < 0:
        raise refusals.allocation_shape(extents, resolved)
    return extents, resolved
