"""FaultyDevice: a device on which one chosen launch or copy fails.  (C10.2)

The failure is an exception on the host, as of a driver that refuses a submission: nothing of that launch or copy
happens, everything before it did.  It is no DeviceFault, so the store must keep its state and continue; only where
table entries can no longer follow the ledgers must the store latch (C11.2).

    device = FaultyDevice(pk.open_device("cpu"))
    with device.failing_at(2):           # the second launch or copy raises InjectedFault
        store.activate(...)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pagedkv as pk


class InjectedFault(Exception):
    """The failure of a launch or copy."""


class FaultyDevice:
    """A device that passes everything on to another one; `faults` counts the failures so far."""

    def __init__(self, device: pk.Device) -> None:
        self._device = device
        self._left = 0
        self.faults = 0

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
