"""What the parts of one cuda device share: the door to CuPy, memory, staging, and the open state.

Streams, kernels and graphs hold the context, not the device, so imports go one way.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.devices import refusals
from pagedkv.devices.cuda.memory import CudaMemory
from pagedkv.devices.cuda.runtime import CudaRuntime


class CudaContext:
    """Shared state of one device.

    Attributes:
        api: the door to CuPy.
        index: which GPU.
        memory: its arrays and pinned buffers.
        call_pool: where array functions of `call` allocate their temporaries: warm-up and capture alike, so that a
            capture finds what it needs.  A finished graph takes the pool with it; the next calls get another one.
        capturing_on: label of the stream on which a capture began; empty when none is on.  Written by the device.
    """

    def __init__(self, api: CudaRuntime) -> None:
        self.api = api
        self.index = int(api.invoke("cuda.runtime.getDevice"))
        self.memory = CudaMemory(api, self.index)
        self.call_pool: Any = api.invoke("cuda.MemoryPool")
        self.capturing_on = ""
        self._process = os.getpid()
        self._is_closed = False

    def check_usable(self) -> None:
        """Refuse use after `close`, and in a process that was forked: CUDA does not live there."""
        if self._is_closed:
            raise refusals.unusable("cuda", "a closed device")
        if os.getpid() != self._process:
            raise refusals.unusable("cuda", "a device of the parent process, after fork")

    def refuse_in_capture(self, what: str) -> None:
        """Refuse what CUDA forbids while any stream captures."""
        if self.capturing_on:
            raise refusals.in_capture(what, self.capturing_on)

    def take_call_pool(self) -> Any:
        """Give the pool of calls to a graph, and start another one."""
        pool, self.call_pool = self.call_pool, self.api.invoke("cuda.MemoryPool")
        return pool

    def address_of(self, array: object, *, is_read_only: bool) -> int | None:
        """Give the address of a contiguous device or pinned array, None for anything else."""
        if isinstance(array, self.api.array_type):
            if not array.flags.c_contiguous or array.data.device_id != self.index:  # type: ignore[attr-defined]
                return None
            return int(array.data.ptr)  # type: ignore[attr-defined]
        if type(array) is not np.ndarray or not array.flags.c_contiguous:
            return None
        if not (array.flags.writeable or is_read_only) or self.memory.owner(array) is None:
            return None
        return int(array.ctypes.data)

    def pinned_slice(self, item: object) -> tuple[int, int] | None:
        """Give address and bytes of a contiguous pinned slice, None for anything else."""
        if type(item) is np.ndarray and item.flags.c_contiguous and self.memory.owner(item) is not None:
            return int(item.ctypes.data), item.nbytes
        return None

    def device_view(self, array: npt.NDArray[Any]) -> Any:
        """Give a pinned array as CuPy sees it: the same bytes, which a GPU may read and write in place."""
        owner = self.memory.owner(array)
        address = int(array.ctypes.data)
        memory = self.api.invoke("cuda.UnownedMemory", address, array.nbytes, owner, self.index)
        pointer = self.api.invoke("cuda.MemoryPointer", memory, 0)
        return self.api.invoke("ndarray", array.shape, array.dtype, pointer, array.strides)

    def close(self) -> bool:
        """Become unusable.  False: it was closed already."""
        was_open, self._is_closed = not self._is_closed, True
        self.capturing_on = ""
        return was_open
