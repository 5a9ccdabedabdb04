"""CountingDevice: a device whose copies, launches and waits do nothing but count; `open_device("none")`.

A store and a decode loop run on it, so that what is timed is the host's own work (`pagedkv bench step`), and so that a
policy is tried at the speed of the ledgers (`pagedkv trace`).  Arrays are NumPy arrays that nobody fills: every word
that a loop reads is 0, and the system maps no memory for them.  Copies complete at once.  Nothing is checked.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.devices.memory import no_memory
from pagedkv.devices.protocol import Event, Extent, ModuleSpec, NodeRecord, Shape, Stream
from pagedkv.devices.users import Users

RESERVED_BYTES_MAX = 1 << 26
"""A larger array is planes or a Host arena, which nobody fills here: the system reserves nothing for it."""

MAP_NORESERVE = 0x4000
"""Of Linux; the name is in `mmap` from Python 3.12 on."""


class CountingDevice:
    """Implements `pagedkv.Device`; `driver_calls` counts what a device would do."""

    name = "none"
    description = "no device: ledgers and host tables only; copies, launches and waits do nothing but count"
    keeps_bytes = False

    def __init__(self) -> None:
        self.driver_calls = 0
        self.state = CountingState()

    def empty(
        self, shape: Shape, dtype: npt.DTypeLike, *, align_bytes: int = 256, name: str | None = None
    ) -> npt.NDArray[Any]:
        """Allocate aligned zeros, which the system maps when somebody touches them."""
        extents = (shape,) if isinstance(shape, int) else shape
        byte_count = math.prod(extents) * np.dtype(dtype).itemsize
        memory = _zeros(byte_count + align_bytes, name)
        first = -memory.ctypes.data % align_bytes
        return memory[first : first + byte_count].view(dtype).reshape(extents)

    zeros = empty

    def pinned(self, shape: Shape, dtype: npt.DTypeLike, *, name: str | None = None) -> npt.NDArray[Any]:
        """Allocate zeros."""
        return self.empty(shape, dtype, name=name)

    def stream(self) -> CountingStream:
        """Make a stream."""
        return CountingStream(self)

    def event(self) -> CountingEvent:
        """Make an event."""
        return CountingEvent(self)

    def load(self, spec: ModuleSpec) -> CountingModule:
        """Compile nothing."""
        return CountingModule(self, spec)

    def copy(self, destination: Any, source: Any, stream: Stream) -> None:  # noqa: ARG002
        """Count a copy."""
        self.driver_calls += 1

    def call(self, stream: Stream, fn: Callable[..., Any], *arguments: Any) -> None:  # noqa: ARG002
        """Count a call."""
        self.driver_calls += 1

    def require_usable(self, what: str, array: object, *, is_written: bool) -> None:
        """Accept every array."""

    def readable(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Give the array."""
        return array

    def begin_capture(self, stream: Stream) -> None:
        """Let the stream say that it captures."""
        _own(stream).is_capturing = True

    def end_capture(self, stream: Stream) -> CountingGraph:
        """Give a graph that counts its launches."""
        _own(stream).is_capturing = False
        return CountingGraph(self)

    def abort_capture(self, stream: Stream) -> None:
        """End the capture."""
        _own(stream).is_capturing = False

    def address(self, array: npt.NDArray[Any]) -> int:
        """Give the address of the first element."""
        return int(array.ctypes.data)

    def memory_bytes(self) -> tuple[int, int]:
        """Give the free and total memory of the host."""
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page_bytes, os.sysconf("SC_PHYS_PAGES") * page_bytes

    def empty_caches(self) -> int:
        """Keep nothing."""
        return 0

    def close(self) -> None:
        """Hold nothing."""


def _zeros(byte_count: int, name: str | None) -> npt.NDArray[np.uint8]:
    """Return zeros; many of them may be more than the machine has memory, but not more than it has addresses."""
    if byte_count <= RESERVED_BYTES_MAX:
        return np.zeros(byte_count, np.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    try:
        return np.frombuffer(mmap.mmap(-1, byte_count, flags=flags), np.uint8)
    except (OSError, OverflowError) as error:
        raise no_memory(byte_count, name, "addresses", str(error)) from error


def _own(stream: Stream) -> CountingStream:
    assert isinstance(stream, CountingStream), f"{stream} is no stream of a counting device"
    return stream


class CountingState:
    """A device that can always be used."""

    unusable = capturing_on = ""

    def __init__(self) -> None:
        self.users = Users()

    def check_outside_capture(self, what: str) -> None:
        """Refuse nothing."""


class CountingStream:
    """A stream on which everything has run."""

    def __init__(self, device: CountingDevice) -> None:
        self.device = device
        self.is_capturing = False

    def synchronize(self) -> None:
        """Count a wait."""
        self.device.driver_calls += 1

    def record(self, event: Event) -> None:  # noqa: ARG002
        """Count a record."""
        self.device.driver_calls += 1

    def wait(self, event: Event) -> None:  # noqa: ARG002
        """Count a wait."""
        self.device.driver_calls += 1


class CountingEvent:
    """An event that has passed."""

    def __init__(self, device: CountingDevice) -> None:
        self._device = device

    def synchronize(self) -> None:
        """Count a wait."""
        self._device.driver_calls += 1

    def query(self) -> bool:
        """Count a query."""
        self._device.driver_calls += 1
        return True


class CountingGraph:
    """A graph without nodes."""

    nodes: tuple[NodeRecord, ...] = ()

    def __init__(self, device: CountingDevice) -> None:
        self._device = device

    def launch(self, stream: Stream) -> None:  # noqa: ARG002
        """Count a launch."""
        self._device.driver_calls += 1

    def upload(self, stream: Stream) -> None:  # noqa: ARG002
        """Count an upload."""
        self._device.driver_calls += 1


class CountingModule:
    """A module that exports every name; its kernels are itself."""

    def __init__(self, device: CountingDevice, spec: ModuleSpec) -> None:
        self._device = device
        self.spec = spec
        self.name = spec.name

    def kernel(self, name: str) -> CountingModule:  # noqa: ARG002
        """Give a kernel that counts its launches."""
        return self

    def launch(
        self, grid: Extent, block: Extent, arguments: Sequence[Any], stream: Stream, *, reads: Sequence[Any] = (),  # noqa: ARG002
        through: Sequence[Any] = (),  # noqa: ARG002
    ) -> None:
        """Count a launch."""
        self._device.driver_calls += 1
