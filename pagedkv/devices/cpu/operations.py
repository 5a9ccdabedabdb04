"""What a stream of the cpu device carries: one frozen object per submission.

An operation is packed when it is submitted: kernel arguments as bytes, arrays as views of its own over the same
memory.  So whatever the caller does to its Python objects later, the operation is the same; only memory
contents are read when it runs.  In eager mode it runs at submission, in deferred mode when something forces it,
in a capture it becomes a node.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt

from pagedkv.devices.cpu.execution import Executor
from pagedkv.devices.cpu.runtime import NODE, NODE_COPY, NODE_KERNEL
from pagedkv.devices.protocol import Extent, NodeRecord

NO_EXTENT: Extent = (0, 0, 0)


# Named tuples, because a launch makes one and a frozen dataclass costs four times as much.
class KernelOperation(NamedTuple):
    """One launch.

    Attributes:
        name: the kernel's name.
        grid: blocks.
        block: threads.
        entry: address of the compiled entry.
        name_address: of the name as a C string.
        is_serial: blocks run one after another on one OS thread.
        slots: 8 bytes per argument.
        keep: arrays whose memory the launch uses.
        reads: (address, bytes) of the pinned slices it declared.
        is_read_only: per parameter, is it a pointer to const?
        kernel: what owns the code and the name; held, not used.
    """

    name: str
    grid: Extent
    block: Extent
    entry: int
    name_address: int
    is_serial: bool
    slots: bytes
    keep: tuple[npt.NDArray[Any], ...]
    reads: tuple[tuple[int, int], ...]
    is_read_only: tuple[bool, ...]
    kernel: object

    def packed(self, slots_address: int) -> bytes:
        """Pack for the C side."""
        return NODE.pack(
            NODE_KERNEL,
            self.is_serial,
            self.entry,
            self.name_address,
            slots_address,
            *self.grid,
            *self.block,
            0,
            0,
            0,
        )

    def record(self, dependencies: tuple[int, ...]) -> NodeRecord:
        """Describe as a node."""
        return NodeRecord("kernel", self.name, self.grid, self.block, self.slots, dependencies, self.reads)

    def run(self, executor: Executor) -> None:
        """Run to the end, or raise DeviceFault."""
        executor.run_one(self.packed(0), self.slots)


class CopyOperation(NamedTuple):
    """One copy of bytes between two addresses, held by `keep`."""

    destination_address: int
    source_address: int
    byte_count: int
    keep: tuple[npt.NDArray[Any], ...]
    slots: bytes = b""

    def packed(self, slots_address: int) -> bytes:
        """Pack for the C side."""
        addresses = (self.destination_address, self.source_address, self.byte_count)
        return NODE.pack(NODE_COPY, 0, 0, 0, slots_address, *NO_EXTENT, *NO_EXTENT, *addresses)

    def record(self, dependencies: tuple[int, ...]) -> NodeRecord:
        """Describe as a node."""
        words = struct.pack("<QQQ", self.destination_address, self.source_address, self.byte_count)
        return NodeRecord("copy", "copy", NO_EXTENT, NO_EXTENT, words, dependencies)

    def run(self, executor: Executor) -> None:
        """Copy."""
        executor.run_one(self.packed(0), b"")


class CallOperation(NamedTuple):
    """One call of array work: the frozen function and its frozen arguments."""

    name: str
    fn: Callable[..., Any]
    arguments: tuple[Any, ...]

    def record(self, dependencies: tuple[int, ...]) -> NodeRecord:
        """Describe as a node."""
        return NodeRecord("call", self.name, NO_EXTENT, NO_EXTENT, b"", dependencies)

    def run(self, executor: Executor) -> None:  # noqa: ARG002 - the shape of the other operations
        """Call."""
        self.fn(*self.arguments)


NativeOperation = KernelOperation | CopyOperation
NodeOperation = KernelOperation | CopyOperation | CallOperation


class PackedRun:
    """Consecutive kernels and copies of a graph, packed once; one C call runs them all."""

    def __init__(self, operations: Sequence[NativeOperation]) -> None:
        self._operations = tuple(operations)  # hold memory and code
        self._slots = [
            ctypes.create_string_buffer(operation.slots, max(1, len(operation.slots))) for operation in operations
        ]
        self._packed = b"".join(
            operation.packed(ctypes.addressof(slots)) for operation, slots in zip(operations, self._slots, strict=True)
        )

    def run(self, executor: Executor) -> None:
        """Run them in order, or raise DeviceFault."""
        executor.run_many(self._packed, len(self._operations))


class GraphOperation(NamedTuple):
    """One launch of a graph: its nodes in order, and the segments that run them."""

    name: str
    operations: tuple[NodeOperation, ...]
    segments: tuple[PackedRun | CallOperation, ...]

    def run(self, executor: Executor) -> None:
        """Run all nodes in order, or raise DeviceFault."""
        for segment in self.segments:
            segment.run(executor)


Operation = NodeOperation | GraphOperation
