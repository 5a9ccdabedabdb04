"""Streams, events and graphs of the cpu device.

In eager mode an operation runs at submission; in deferred mode it is queued with the stream's clock (`deferred.py`);
a stream that takes part in a capture records it.  A graph reads memory at the recorded addresses, and keeps the arrays,
so nothing else gets those addresses.  Clauses: C12, C15.1.
"""

from __future__ import annotations

from pagedkv.devices.cpu.context import CpuContext
from pagedkv.devices.cpu.deferred import joined
from pagedkv.devices.cpu.footprints import Footprint, footprint_of
from pagedkv.devices.cpu.operations import (
    CallOperation,
    GraphOperation,
    NativeOperation,
    NodeOperation,
    Operation,
    PackedRun,
)
from pagedkv.devices.cpu.races import Clock
from pagedkv.devices.protocol import Device, Stream
from pagedkv.devices.streams import BaseEvent, BaseStream, Capture, nested_graph, own_stream
from pagedkv.errors import DeviceFault


class CpuEvent(BaseEvent):
    """A point in a stream's work.  Made by `CpuDevice.event`.

    Attributes:
        clock: in deferred mode: the operations before the recorded point.
        asked: queries since it was recorded.
    """

    context: CpuContext

    def __init__(self, context: CpuContext) -> None:
        super().__init__(context)
        self.clock: Clock = {}
        self.asked = 0

    def synchronize(self) -> None:
        """Wait until the recorded point has passed."""
        self._check("event.synchronize")
        self.context.driver_calls += 1
        if self.context.queues is not None:
            with self.context.users:
                self.context.queues.finish(self.clock)

    def query(self) -> bool:
        """Has the recorded point passed?  In eager mode it always has."""
        self._check("event.query")
        self.context.driver_calls += 1
        if self.context.queues is None:
            return True
        self.asked += 1
        with self.context.users:
            return self.context.queues.query(self.clock, self.asked - 1)


class CpuStream(BaseStream):
    """A queue of operations; in eager mode it is always empty.  Made by `CpuDevice.stream`.

    Attributes:
        number: its number in clocks.
        clock: in deferred mode: the operations before its next one.
    """

    context: CpuContext
    capture: Capture[NodeOperation] | None

    def __init__(self, context: CpuContext, device: Device, number: int) -> None:
        super().__init__(context, device, number)
        self.number = number
        self.clock: Clock = {}
        if context.queues is not None:
            context.queues.add_stream()

    def submit(self, operation: Operation, footprint: Footprint | None = None) -> None:
        """Run, queue or record an operation; one driver call."""
        context = self.context
        context.driver_calls += 1
        if (capture := self.capture) is not None:
            assert not isinstance(operation, GraphOperation), "graphs do not nest"
            capture.nodes.append(operation.record(tuple(sorted(self.tail))))
            capture.operations.append(operation)
            self.tail = {len(capture.nodes) - 1}
        elif context.queues is None:
            try:
                operation.run(context.executor)
            except DeviceFault as fault:
                context.users.report(fault)
                raise
        else:
            self.clock = context.queues.submit(
                operation, stream=self.number, stream_label=self.label, after=self.clock, footprint=footprint
            )

    def synchronize(self) -> None:
        """Wait until everything submitted has run."""
        context = self.context
        context.check_outside_capture("stream.synchronize")
        context.driver_calls += 1
        if context.queues is not None:
            with context.users:
                context.queues.finish(self.clock)
        if context.memory.violations:
            context.raise_violations()

    def _record(self, event: CpuEvent) -> None:
        self.context.driver_calls += 1
        event.clock, event.asked = self.clock, 0

    def _wait(self, event: CpuEvent) -> None:
        self.context.driver_calls += 1
        if event.capture is None:
            self.clock = joined(self.clock, event.clock)


class CpuGraph:
    """Recorded work with frozen arguments.  Made by `CpuDevice.end_capture`."""

    def __init__(self, context: CpuContext, capture: Capture[NodeOperation]) -> None:
        self._context = context
        self.nodes = tuple(capture.nodes)
        segments: list[PackedRun | CallOperation] = []
        run: list[NativeOperation] = []
        for operation in capture.operations:
            if not isinstance(operation, CallOperation):
                run.append(operation)
                continue
            if run:
                segments.append(PackedRun(run))
                run = []
            segments.append(operation)
        if run:
            segments.append(PackedRun(run))
        name = f"graph of {len(self.nodes)} nodes"
        self._operation = GraphOperation(name, tuple(capture.operations), tuple(segments))
        self._footprint = footprint_of(self._operation, context.memory) if context.queues is not None else None

    def launch(self, stream: Stream) -> None:
        """Run all nodes, or queue them as one operation."""
        own: CpuStream = own_stream(self._context, stream, "graph.launch")
        if own.capture is not None:
            raise nested_graph()
        if self._context.memory.violations:
            self._context.raise_violations()
        own.submit(self._operation, self._footprint)

    def upload(self, stream: Stream) -> None:
        """Only count a driver call: the graph lies where it runs."""
        own_stream(self._context, stream, "graph.upload")
        self._context.driver_calls += 1
