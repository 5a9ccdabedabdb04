"""Operations of the cpu device: one frozen object for each submission to a stream.

The submission packs kernel arguments as bytes, and arrays as views of its own over the same memory.  So nothing that
the caller does to its Python objects later changes the operation; only memory contents are read when it runs.  In
eager mode it runs at submission, in deferred mode when something forces it, and in a capture it becomes a node.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt

from pagedkv.devices.cpu.runtime import NODE, NODE_COPY, NODE_KERNEL, Executor
from pagedkv.devices.kernels import Launch
from pagedkv.devices.protocol import Extent, NodeRecord

NO_EXTENT: Extent = (0, 0, 0)


# Named tuples, because every launch makes one, and a frozen dataclass costs four times as much.
class KernelOperation(NamedTuple):
    """One launch.

    Attributes:
        name: the kernel's name.
        launch: the checked launch.
        entry: address of the compiled entry.
        name_address: of the name as a C string.
        is_serial: blocks run one after another on one OS thread.
        is_read_only: per parameter, is it a pointer to const?
        kernel: the owner of code and name; keeps them loaded.
    """

    name: str
    launch: Launch
    entry: int
    name_address: int
    is_serial: bool
    is_read_only: tuple[bool, ...]
    kernel: object

    @property
    def slots(self) -> bytes:
        """8 bytes per argument."""
        return self.launch.slots

    def packed(self, slots_address: int) -> bytes:
        """Pack for the C side."""
        code = (self.is_serial, self.entry, self.name_address, slots_address)
        return NODE.pack(NODE_KERNEL, *code, *self.launch.grid, *self.launch.block, 0, 0, 0)

    def record(self, dependencies: tuple[int, ...]) -> NodeRecord:
        """Describe as a node."""
        launch = self.launch
        return NodeRecord("kernel", self.name, dependencies, launch.grid, launch.block, launch.slots, launch.reads)

    def run(self, executor: Executor) -> None:
        """Run to the end, or raise DeviceFault."""
        executor.run_one(self.packed(0), self.launch.slots)


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
        return NodeRecord("copy", "copy", dependencies, argument_bytes=words)

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
        return NodeRecord("call", self.name, dependencies)

    def run(self, executor: Executor) -> None:  # noqa: ARG002 - the shape of the other operations
        """Call."""
        self.fn(*self.arguments)


NativeOperation = KernelOperation | CopyOperation
NodeOperation = KernelOperation | CopyOperation | CallOperation


class PackedRun:
    """Consecutive kernels and copies of a graph, packed once; one C call runs them all."""

    def __init__(self, operations: Sequence[NativeOperation]) -> None:
        self._operations = tuple(operations)  # keep memory and code alive
        self._slots = [
            ctypes.create_string_buffer(operation.slots, max(1, len(operation.slots))) for operation in operations
        ]
        self._packed = b"".join(
            operation.packed(ctypes.addressof(slots)) for operation, slots in zip(operations, self._slots, strict=True)
        )

    def run(self, executor: Executor) -> None:
        """Run them in order, or raise DeviceFault; the nodes after a fault do not run."""
        # No method of the executor in between: a replay runs this several times a step.
        if executor.native_run(executor.handle, self._packed, len(self._operations)):
            raise executor.fault()


class GraphOperation(NamedTuple):
    """One launch of a graph: its nodes in order, and the segments that run them.

    A segment is a run of kernels and copies, which is one C call, or one call.
    """

    name: str
    operations: tuple[NodeOperation, ...]
    segments: tuple[PackedRun | CallOperation, ...]

    def run(self, executor: Executor) -> None:
        """Run all nodes in order, or raise DeviceFault."""
        for segment in self.segments:
            segment.run(executor)


Operation = NodeOperation | GraphOperation
