"""The shared state of one cpu device: the C library's handle, memory, queues, and the call counter."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.devices.context import BaseContext
from pagedkv.devices.cpu.deferred import Queues
from pagedkv.devices.cpu.memory import Memory, address_of
from pagedkv.devices.cpu.runtime import ORDERS, Executor
from pagedkv.devices.memory import lies_within
from pagedkv.devices.users import Users
from pagedkv.errors import CapacityError, DeviceFault


class CpuContext(BaseContext):
    """Shared state of one cpu device.

    Attributes:
        memory: its buffers.
        executor: runs packed nodes.
        queues: waiting operations in deferred mode; None in eager mode.
        driver_calls: submissions so far that CUDA would make through its driver.
    """

    memory: Memory
    driver_calls = 0

    def __init__(
        self, library: Any, *, threads: int, order: str, seed: int, spin_seconds: float, schedule: str | None = None
    ) -> None:
        self._library = library
        self._handle = library.pk_device_create(threads, ORDERS[order], seed, spin_seconds)
        if not self._handle:
            raise CapacityError(
                "the cpu device", expected="memory for its runtime", got="none", remedy="free memory", clause="C12.4"
            )
        self._finalizer = weakref.finalize(self, library.pk_device_destroy, self._handle)
        super().__init__("cpu", Users())
        self.memory = Memory(library)
        self.executor = Executor(library, self._handle, self.memory)
        self.queues = None if schedule is None else Queues(self.memory, self.executor, schedule=schedule, seed=seed)

    def set_order(self, order: str, seed: int) -> None:
        """Choose the order of lanes, warps and blocks for later launches."""
        self._library.pk_device_set_order(self._handle, ORDERS[order], seed)

    def raise_overwritten(self, lines: list[str]) -> None:
        """Raise DeviceFault for overwritten canaries, if there are any."""
        if lines:
            fault = DeviceFault(
                "memory around a buffer", expected="the canary bytes written at its allocation", got="; ".join(lines),
                remedy="look for a kernel or a host write past the end of the buffer", clause="C12.4",
                kernel="", block=None, thread=None, address=None, buffer=lines[0], reason=lines[0],
            )
            self.users.report(fault)
            raise fault

    def raise_violations(self) -> None:
        """Raise DeviceFault for canaries that were overwritten when their buffers were freed."""
        lines, self.memory.violations = self.memory.violations, []
        self.raise_overwritten(lines)

    def close(self) -> bool:
        """Stop the OS threads, drop waiting work and check the canaries; False when it was closed already."""
        if not super().close():
            return False
        if self.queues is not None:
            self.queues.clear()
        self._finalizer()
        self.memory.forget_freed()
        self.raise_overwritten(self.memory.check())
        return True

    def note_fork(self) -> None:
        """Become unusable in the child of a fork, where the OS threads do not live and cannot be stopped."""
        super().note_fork()
        self._finalizer.detach()

    # -- arrays --------------------------------------------------------------------------------------------

    def is_array(self, value: object) -> bool:
        """Is it exactly a numpy.ndarray?"""
        return type(value) is np.ndarray

    def is_own(self, array: Any) -> bool:
        """Does all of it lie in memory of this device, pinned memory included?"""
        return isinstance(array, np.ndarray) and self.memory.owner(array) is not None and lies_within(array)

    def address(self, array: npt.NDArray[Any]) -> int:
        """Give the address of the first element."""
        return address_of(array)

    def view(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Give an array object of its own over the same memory."""
        return array.view()

    def address_of(self, argument: Any, *, is_read_only: bool) -> int | None:
        """Give the address of an array that a kernel may use, None for anything else."""
        if type(argument) is not np.ndarray:
            return None
        allocation, flags = self.memory.owner(argument), argument.flags
        is_usable = flags.carray or (is_read_only and flags.c_contiguous and flags.aligned)
        if allocation is None or not is_usable:
            return None
        address = address_of(argument)
        return address if allocation.address <= address <= allocation.end - argument.nbytes else None
