"""Memory of the cuda device: CuPy arrays and pinned buffers.

Device arrays come from a memory pool of this device alone, apart from CuPy's default pool; the last array over a block
frees it.  **An array must outlive the work that uses it**: a pool reuses freed bytes at once, in no stream's
order.  Captured graphs keep their arrays themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.devices.cuda.runtime import CudaRuntime
from pagedkv.devices.memory import BaseMemory, HostAllocation, no_memory
from pagedkv.errors import CapacityError
from pagedkv.values.quantities import align_up

POOL_ALIGN_BYTES = 512  # every block of a CuPy pool begins on such an address


class DeviceAllocation:
    """One block of the pool; the arrays over it hold it as their `owner`."""

    def __init__(self, memory: CudaMemory, pointer: Any, byte_count: int) -> None:
        self._memory = memory
        self._pointer = pointer
        memory.note(id(self), byte_count, is_pinned=False)

    def __del__(self) -> None:
        self._memory.forget(id(self), is_pinned=False)


class PinnedAllocation(HostAllocation):
    """One pinned buffer of CuPy behind NumPy arrays."""

    __slots__ = ("_buffer",)
    memory: CudaMemory

    def __init__(self, memory: CudaMemory, buffer: Any, byte_count: int) -> None:
        super().__init__(memory, is_pinned=True)
        self._buffer = buffer
        memory.note(id(self), byte_count, is_pinned=True)

    def __del__(self) -> None:
        self.memory.forget(id(self), is_pinned=True)
        self.memory.retire(self._buffer)


class CudaMemory(BaseMemory):
    """All memory of one device.

    Attributes:
        keeps_freed: keep freed pinned buffers, because freeing them would break a capture.  The device writes it.
    """

    def __init__(self, api: CudaRuntime, index: int) -> None:
        super().__init__()
        self._api = api
        self._index = index
        self._pool: Any = api.invoke("cuda.MemoryPool")
        self._freed: list[Any] = []
        self.keeps_freed = False

    def array(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], *, align_bytes: int, is_zero: bool, name: str | None
    ) -> Any:
        """Allocate a device array, of zeros or of the bytes that lie there."""
        byte_count = math.prod(shape) * dtype.itemsize
        slack = align_bytes if align_bytes > POOL_ALIGN_BYTES else 0
        with _naming(byte_count, name, "device memory"):
            pointer = self._api.invoke("cuda.MemoryPool.malloc", self._pool, byte_count + slack)
        if not byte_count:
            return self._api.invoke("ndarray", shape, dtype, pointer)
        start = align_up(int(pointer.ptr), align_bytes)
        if is_zero:
            # The pool may hand out bytes that a stream still uses; afterwards any stream may use the array.
            self._api.invoke("cuda.runtime.deviceSynchronize")
            self._api.invoke("cuda.runtime.memset", start, 0, byte_count)
            self._api.invoke("cuda.runtime.deviceSynchronize")
        return self._array_at(start, shape, dtype, None, byte_count, DeviceAllocation(self, pointer, byte_count))

    def pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any], *, name: str | None = None) -> npt.NDArray[Any]:
        """Allocate pinned host memory."""
        byte_count = math.prod(shape) * dtype.itemsize
        with _naming(byte_count, name, "memory that can be pinned"):
            buffer = self._api.invoke("cuda.PinnedMemory", max(byte_count, 1))
        return PinnedAllocation(self, buffer, byte_count).array(int(buffer.ptr), shape, dtype)

    def native_view(self, array: npt.NDArray[Any]) -> Any:
        """Give a pinned array as an array of CuPy over the same bytes."""
        owner, address = self.owner(array), int(array.ctypes.data)
        return self._array_at(address, array.shape, array.dtype, array.strides, array.nbytes, owner)

    def retire(self, buffer: Any) -> None:
        """Free a pinned buffer; after the capture, while one is on."""
        if self.keeps_freed:
            self._freed.append(buffer)

    def free_waiting(self) -> None:
        """Free the buffers that wait for the end of a capture."""
        self.keeps_freed = False
        self._freed.clear()

    def empty_caches(self) -> int:
        """Return the freed blocks of this device and of CuPy's default pool to the GPU; say how many bytes."""
        byte_count = 0
        for pool in (self._pool, self._api.invoke("get_default_memory_pool")):
            byte_count += int(self._api.invoke("cuda.MemoryPool.free_bytes", pool))
            self._api.invoke("cuda.MemoryPool.free_all_blocks", pool)
        return byte_count

    def _array_at(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], strides: tuple[int, ...] | None,
        byte_count: int, owner: object,
    ) -> Any:
        memory = self._api.invoke("cuda.UnownedMemory", address, byte_count, owner, self._index)
        pointer = self._api.invoke("cuda.MemoryPointer", memory, 0)
        return self._api.invoke("ndarray", shape, dtype, pointer, strides)


@contextmanager
def _naming(byte_count: int, name: str | None, kind: str) -> Iterator[None]:
    """Name the allocation in the error when there is no memory."""
    try:
        yield
    except CapacityError as error:
        raise no_memory(byte_count, name, kind, error.got) from error
