"""The shared state of one cuda device: the door to CuPy, memory, and the pool of calls."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedkv.devices.context import BaseContext
from pagedkv.devices.cuda.memory import CudaMemory
from pagedkv.devices.cuda.runtime import CudaRuntime
from pagedkv.devices.memory import byte_range, lies_within


class CudaContext(BaseContext):
    """Shared state of one cuda device.

    Attributes:
        api: the door to CuPy.
        index: number of the GPU.
        memory: its arrays and pinned buffers.
        call_pool: the functions of `call` allocate their temporaries here, in a warm-up and in a capture, so that the
            capture finds free blocks.  A finished graph takes the pool; later calls get another one.
    """

    memory: CudaMemory

    def __init__(self, api: CudaRuntime) -> None:
        super().__init__("cuda", api.users)
        self.api = api
        self.index = int(api.invoke("cuda.runtime.getDevice"))
        self.memory = CudaMemory(api, self.index)
        self.call_pool: Any = api.invoke("cuda.MemoryPool")

    @property
    def driver_calls(self) -> int:
        """Counted calls so far."""
        return self.api.calls

    def take_call_pool(self) -> Any:
        """Give the pool of calls to a graph, and start another one."""
        pool, self.call_pool = self.call_pool, self.api.invoke("cuda.MemoryPool")
        return pool

    # -- arrays --------------------------------------------------------------------------------------------

    def is_native(self, value: object) -> bool:
        """Is it an array of CuPy?"""
        return isinstance(value, self.api.array_type)

    def is_array(self, value: object) -> bool:
        """Is it an array of CuPy, or exactly a numpy.ndarray?"""
        return type(value) is np.ndarray or self.is_native(value)

    def is_own(self, array: Any) -> bool:
        """Does all of it lie in memory of this GPU, or in pinned memory of this device?"""
        if self.is_native(array):
            return bool(array.data.device_id == self.index) and self.lies_within(array)
        return isinstance(array, np.ndarray) and self.memory.owner(array) is not None and lies_within(array)

    def lies_within(self, array: Any) -> bool:
        """Does all of an array that `is_array` accepts lie in the memory that it is over?"""
        if not self.is_native(array):
            return lies_within(array)
        (low, high), memory = byte_range(int(array.data.ptr), array), array.data.mem
        return bool(memory.ptr <= low and high <= memory.ptr + memory.size)

    def address(self, array: Any) -> int:
        """Give the address of the first element."""
        return int(array.data.ptr) if self.is_native(array) else int(array.ctypes.data)

    def view(self, array: Any) -> Any:
        """Give an array as CuPy sees it; of a pinned one the same bytes, which a GPU reads and writes in place."""
        if self.is_native(array):
            return array.view()
        return self.memory.native_view(array)

    def address_of(self, argument: Any, *, is_read_only: bool) -> int | None:
        """Give the address of an array that a kernel may use, None for anything else."""
        if not self.is_array(argument) or not argument.flags.c_contiguous or not self.is_own(argument):
            return None
        if self.is_native(argument):
            address = int(argument.data.ptr)
            return address if address % argument.dtype.itemsize == 0 else None
        flags = argument.flags
        return int(argument.ctypes.data) if flags.aligned and (flags.writeable or is_read_only) else None
