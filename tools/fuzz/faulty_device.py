"""FaultyDevice: a device on which one chosen launch or copy fails, and whose work takes long.  (C10.2, C10.10)

The failure is an exception on the host, as of a driver that refuses a submission: nothing of that launch or copy
happens, everything before it did.  It is no DeviceFault, so the store must keep its state and continue; only where
table entries can no longer follow the ledgers must the store latch (C11.2).

    device = FaultyDevice(pk.open_device("cpu"))
    with device.failing_at(2):           # the second launch or copy raises InjectedFault
        store.activate(...)
    device.asks = 3                      # an event that is made from now on has passed when it is asked a third time
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pagedkv as pk

PATIENCE = 100
"""Questions that an event of a still device does not count, so that nobody asks forever."""


class InjectedFault(Exception):
    """The failure of a launch or copy."""


class FaultyDevice:
    """A device that passes everything on to another one.

    Attributes:
        faults: failures so far.
        asks: how often a new event must be asked until it has passed, if nobody waits for it or for a later one.
        is_still: questions do not count, except after `PATIENCE` of them.
        events: made so far; the first `waited` of them have passed.
    """

    def __init__(self, device: pk.Device) -> None:
        self._device = device
        self._left = 0
        self.faults = 0
        self.asks = 0
        self.is_still = False
        self.events = 0
        self.waited = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    @contextmanager
    def failing_at(self, number: int) -> Iterator[None]:
        """Let launch or copy `number`, counted from 1, fail within the block; 0 lets all succeed."""
        self._left = number
        try:
            yield
        finally:
            self._left = 0

    def copy(self, destination: Any, source: Any, stream: pk.Stream) -> None:
        """Copy, or fail."""
        self.count("a copy")
        self._device.copy(destination, source, stream)

    def event(self) -> pk.Event:
        """Make an event, which is late."""
        event = self._device.event()
        event.__class__ = _late(type(event))  # streams take events of their own device only
        self.events += 1
        event.late = Lateness(self, self.events, self.asks)  # type: ignore[attr-defined]
        return event

    def load(self, spec: pk.ModuleSpec) -> FaultyModule:
        """Load a module whose launches are counted."""
        return FaultyModule(self._device.load(spec), self)

    def count(self, what: str) -> None:
        """Count down to the submission that fails."""
        if self._left:
            self._left -= 1
            if not self._left:
                self.faults += 1
                raise InjectedFault(f"{what} was made to fail")


@dataclass
class Lateness:
    """How often an event of a FaultyDevice must be asked still."""

    device: FaultyDevice
    number: int
    asks: int
    patience: int = PATIENCE

    def is_over(self) -> bool:
        """Count a question, and say whether the event has passed."""
        if self.number <= self.device.waited:
            self.asks = 0
        elif self.asks and self.device.is_still and self.patience:
            self.patience -= 1
        elif self.asks:
            self.asks -= 1
        return not self.asks

    def end(self) -> None:
        """Let this event and all before it pass."""
        self.device.waited = max(self.device.waited, self.number)


@cache
def _late(kind: Any) -> Any:
    """Return a class of events that are as those of `kind`, but late."""

    class LateEvent(kind):  # type: ignore[misc]
        def query(self) -> bool:
            has_passed: bool = super().query()
            return self.late.is_over() and has_passed

        def synchronize(self) -> None:
            super().synchronize()
            self.late.end()

    return LateEvent


class FaultyModule:
    """A module of a FaultyDevice."""

    def __init__(self, module: Any, device: FaultyDevice) -> None:
        self._module = module
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def kernel(self, name: str) -> FaultyKernel:
        """Return a kernel whose launches are counted."""
        return FaultyKernel(self._module.kernel(name), self._device)


class FaultyKernel:
    """A kernel of a FaultyModule."""

    def __init__(self, kernel: pk.Kernel, device: FaultyDevice) -> None:
        self._kernel = kernel
        self._device = device
        self.name = kernel.name

    def launch(self, grid: Any, block: Any, arguments: Sequence[Any], stream: pk.Stream, **reads: Any) -> None:
        """Launch, or fail."""
        self._device.count(f"a launch of {self.name}")
        self._kernel.launch(grid, block, arguments, stream, **reads)
