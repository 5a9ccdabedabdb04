"""What the parts of one cpu device share: the runtime's handle, memory, the call counter, and the open state.

Streams, kernels and graphs hold the context, not the device, so imports go one way and whichever of them is
dropped last closes it.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

from pagedkv.devices import refusals
from pagedkv.devices.cpu.deferred import Queues
from pagedkv.devices.cpu.execution import Executor
from pagedkv.devices.cpu.memory import Memory
from pagedkv.devices.cpu.runtime import ORDERS
from pagedkv.errors import CapacityError, DeviceFault

_contexts: weakref.WeakSet[CpuContext] = weakref.WeakSet()


class CpuContext:
    """Shared state of one device.

    Attributes:
        memory: its buffers.
        executor: runs packed nodes.
        queues: what waits, in deferred mode; None in eager mode.
        driver_calls: submissions that CUDA would make through its driver, so far.
        capturing_on: label of the stream on which a capture began; empty when none is on.  Written by the device.
    """

    def __init__(
        self, library: Any, *, threads: int, order: str, seed: int, spin_seconds: float, schedule: str | None = None
    ) -> None:
        self._library = library
        self._handle = library.pk_device_create(threads, ORDERS[order], seed, spin_seconds)
        if not self._handle:
            raise CapacityError(
                "the cpu device", expected="memory for its runtime", got="none", remedy="free memory", clause="C12.4"
            )
        self._state = "open"
        self._finalizer = weakref.finalize(self, library.pk_device_destroy, self._handle)
        self.memory = Memory(library)
        self.executor = Executor(library, self._handle, self.memory)
        self.queues = (
            None if schedule is None else Queues(self.memory, self.executor, schedule=schedule, seed=seed)
        )
        self.driver_calls = 0
        self.capturing_on = ""
        _contexts.add(self)

    def set_order(self, order: str, seed: int) -> None:
        """Choose the order of lanes, warps and blocks for later launches."""
        self._library.pk_device_set_order(self._handle, ORDERS[order], seed)

    def check_usable(self) -> None:
        """Refuse use after `close`, and in a process that was forked: the helpers do not live there."""
        if self._state != "open":
            raise refusals.unusable("cpu", self._state)

    def refuse_in_capture(self, what: str) -> None:
        """Refuse what CUDA forbids while any stream captures."""
        if self.capturing_on:
            raise refusals.in_capture(what, self.capturing_on)

    def raise_overwritten(self, found: list[str]) -> None:
        """Raise for overwritten canaries, if there are any."""
        if found:
            raise DeviceFault(
                "memory around a buffer",
                expected="the canary bytes written at its allocation",
                got="; ".join(found),
                remedy="look for a kernel or a host write past the end of the buffer",
                clause="C12.4",
                kernel="",
                block=None,
                thread=None,
                address=None,
                buffer=found[0],
                reason=found[0],
            )

    def raise_violations(self) -> None:
        """Raise what was found when buffers were freed."""
        if self.memory.violations:
            found, self.memory.violations = self.memory.violations, []
            self.raise_overwritten(found)

    def close(self) -> bool:
        """Stop the OS threads.  False: it was closed already."""
        if self._state != "open":
            return False
        self._state = "a closed device"
        if self.queues is not None:
            self.queues.clear()
        self.capturing_on = ""
        self._finalizer()
        self.memory.forget_freed()
        return True

    def note_fork(self) -> None:
        """Become unusable: called in the child of a fork."""
        if self._state == "open":
            self._state = "a device of the parent process, after fork"
            self._finalizer.detach()


def _after_fork_in_child() -> None:
    for context in list(_contexts):
        context.note_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
