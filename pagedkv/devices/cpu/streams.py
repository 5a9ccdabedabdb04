"""Streams and events of the cpu device, and the capture that joins them.

Every submission is an operation handed to `CpuStream.submit`.  In eager mode it runs there and then, in deferred
mode it is queued with the stream's clock (`cpu_deferred.py`).  While a capture is on, a stream that takes part in
it records instead (`captures.py`).  Clauses: C12, C15.1.
"""

from __future__ import annotations

from typing import TypeAlias

from pagedkv.devices import refusals
from pagedkv.devices.captures import Capture
from pagedkv.devices.cpu.context import CpuContext
from pagedkv.devices.cpu.deferred import joined
from pagedkv.devices.cpu.footprints import Footprint
from pagedkv.devices.cpu.operations import GraphOperation, NodeOperation, Operation
from pagedkv.devices.cpu.races import Clock
from pagedkv.devices.protocol import Device, Event, Stream

CpuCapture: TypeAlias = "Capture[CpuStream, NodeOperation]"


class CpuEvent:
    """A point in a stream's work.  Made by `CpuDevice.event`."""

    def __init__(self, context: CpuContext) -> None:
        self.context = context
        # Set when recorded on a capturing stream: the capture, and the nodes the event stands for.
        self.capture: CpuCapture | None = None
        self.nodes: frozenset[int] = frozenset()
        # In deferred mode: what lies before the recorded point, and how often it was asked about.
        self.clock: Clock = {}
        self.asked = 0

    def synchronize(self) -> None:
        """Wait until the recorded point has passed."""
        self._look("event.synchronize")
        if self.context.queues is not None:
            self.context.queues.finish(self.clock)

    def query(self) -> bool:
        """Has the recorded point passed?  In eager mode it always has."""
        self._look("event.query")
        if self.context.queues is None:
            return True
        self.asked += 1
        return self.context.queues.query(self.clock, self.asked - 1)

    def _look(self, what: str) -> None:
        self.context.check_usable()
        self.context.refuse_in_capture(what)
        if self.capture is not None:
            raise refusals.captured_event(what)
        self.context.driver_calls += 1


class CpuStream:
    """A queue of operations; in eager mode it is always empty.  Made by `CpuDevice.stream`."""

    def __init__(self, context: CpuContext, device: Device, number: int) -> None:
        self.context = context
        self._device = device
        self.number = number
        self.label = f"stream {number}"
        self.clock: Clock = {}  # in deferred mode: what lies before the next operation
        if context.queues is not None:
            context.queues.add_stream()
        self.capture: CpuCapture | None = None
        self.tail: set[int] = set()  # nodes that the next recorded operation depends on

    def __repr__(self) -> str:
        return f"<{self.label} of the cpu device>"

    @property
    def device(self) -> Device:
        """The device that made the stream."""
        return self._device

    @property
    def is_capturing(self) -> bool:
        """Are submissions recorded instead of run?"""
        return self.capture is not None

    def submit(self, operation: Operation, footprint: Footprint | None = None) -> None:
        """Run, queue or record one operation; `footprint` when it is known already."""
        queues = self.context.queues
        if self.capture is not None:
            assert not isinstance(operation, GraphOperation), "graphs do not nest"
            self.tail = {self.capture.add(operation, self.tail)}
        elif queues is None:
            operation.run(self.context.executor)
        else:
            self.clock = queues.submit(
                operation, stream=self.number, stream_label=self.label, after=self.clock, footprint=footprint
            )

    def synchronize(self) -> None:
        """Wait until everything submitted has run."""
        self.context.check_usable()
        self.context.refuse_in_capture("stream.synchronize")
        self.context.driver_calls += 1
        if self.context.queues is not None:
            self.context.queues.finish(self.clock)
        self.context.raise_violations()

    def record(self, event: Event) -> None:
        """Let `event` stand for everything submitted to this stream so far."""
        self.context.check_usable()
        own = self._own(event, "stream.record")
        self.context.driver_calls += 1
        own.capture = self.capture
        own.nodes = frozenset(self.tail) if self.capture else frozenset()
        own.clock, own.asked = self.clock, 0

    def wait(self, event: Event) -> None:
        """Let later submissions run only after what `event` stands for; may join this stream to a capture."""
        self.context.check_usable()
        own = self._own(event, "stream.wait")
        if own.capture is None:
            if self.capture is not None:
                raise refusals.event_from_outside(self.label)
            self.context.driver_calls += 1
            self.clock = joined(self.clock, own.clock)
            return
        if not own.capture.is_open or (self.capture is not None and self.capture is not own.capture):
            raise refusals.captured_event("stream.wait")
        self.context.driver_calls += 1
        if self.capture is None:
            self.capture = own.capture
            self.capture.streams.append(self)
        self.tail |= own.nodes

    def leave_capture(self) -> None:
        """Forget the capture; called by it when it closes."""
        self.capture = None
        self.tail = set()

    def _own(self, event: Event, what: str) -> CpuEvent:
        if not isinstance(event, CpuEvent) or event.context is not self.context:
            raise refusals.foreign_event(what, event)
        return event


def own_stream(context: CpuContext, stream: Stream, what: str) -> CpuStream:
    """Give the stream as one of this context, or refuse it."""
    if type(stream) is CpuStream and stream.context is context:
        return stream
    got = "a stream of another device" if isinstance(stream, CpuStream) else type(stream).__name__
    raise refusals.foreign_stream(what, got)
