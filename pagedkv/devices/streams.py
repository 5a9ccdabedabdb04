"""Streams and events as both devices keep them, and the capture that joins streams.

    origin stream      begin ──k1──record(e)──────────wait(f)──k3── end
                                      │                  │
    another stream                 wait(e)──k2──record(f)┘           joined by e, joined back by f

A node depends on the last node of its stream and on what its stream waited for.  The capture is whole only when every
node lies before the end of the origin stream.  Each device adds how work reaches it.  Clauses: C12, C15.1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from pagedkv.devices.context import BaseContext
from pagedkv.devices.protocol import Device, Event, NodeRecord, Stream
from pagedkv.errors import CaptureRefused, MisuseError

Recorded = TypeVar("Recorded")


class Capture(Generic[Recorded]):
    """Recorded nodes with their dependencies.

    Attributes:
        origin: the stream on which it began.
        nodes: one record a node, in submission order.
        operations: per node, the device's own data.
        streams: streams that take part, until the capture closes.
    """

    def __init__(self, origin: BaseStream) -> None:
        self.origin = origin
        self.nodes: list[NodeRecord] = []
        self.operations: list[Recorded] = []
        self.streams: list[BaseStream] = [origin]
        self.is_open = True

    def unjoined_streams(self) -> list[BaseStream]:
        """Give the streams whose work the origin stream does not wait for."""
        reached: set[int] = set()
        pending = list(self.origin.tail)
        while pending:
            node = pending.pop()
            if node not in reached:
                reached.add(node)
                pending.extend(self.nodes[node].dependencies)
        return [stream for stream in self.streams if not stream.tail <= reached]

    def close(self) -> None:
        """Release the streams; events of the capture stay unusable outside of it."""
        self.is_open = False
        for stream in self.streams:
            stream.capture, stream.tail = None, set()


class BaseEvent(ABC):
    """A point in a stream's work.  Made by `Device.event`.

    Attributes:
        capture: where it was recorded last, when that was on a capturing stream.
        nodes: the nodes of that capture that lie before it.
    """

    def __init__(self, context: BaseContext) -> None:
        self.context = context
        self.capture: Capture[Any] | None = None
        self.nodes: frozenset[int] = frozenset()

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the recorded point has passed."""

    @abstractmethod
    def query(self) -> bool:
        """Has the recorded point passed?"""

    def _check(self, what: str) -> None:
        self.context.check_outside_capture(what)
        if self.capture is not None:
            raise _captured_event(what)


class BaseStream(ABC):
    """A queue of operations.  Made by `Device.stream`.

    Attributes:
        label: for messages.
        capture: the capture in which the stream takes part.
        tail: the nodes on which its next node depends.
    """

    def __init__(self, context: BaseContext, device: Device, number: int) -> None:
        self.context = context
        self.device = device
        self.label = f"stream {number}"
        self.capture: Capture[Any] | None = None
        self.tail: set[int] = set()

    def __repr__(self) -> str:
        return f"<{self.label} of the {self.context.name} device>"

    @property
    def is_capturing(self) -> bool:
        """Are submissions recorded instead of run?"""
        return self.capture is not None

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything submitted has run."""

    def record(self, event: Event) -> None:
        """Move `event` to the end of the work that this stream has now."""
        own = self._own(event, "stream.record")
        self._record(own)
        own.capture = self.capture
        own.nodes = frozenset(self.tail)

    def wait(self, event: Event) -> None:
        """Run later submissions only after `event`; may join this stream to a capture."""
        own = self._own(event, "stream.wait")
        if own.capture is None and self.capture is not None:
            raise CaptureRefused(
                f"wait on {self.label}", expected="an event recorded in the same capture",
                got="an event recorded outside of it", clause="C15.1",
                remedy="wait before begin_capture, or record the event on a stream that takes part",
            )
        if own.capture is not None and (not own.capture.is_open or self.capture not in (None, own.capture)):
            raise _captured_event("stream.wait")
        self._wait(own)
        if self.capture is None and own.capture is not None:
            self.capture = own.capture
            self.capture.streams.append(self)
        self.tail |= own.nodes

    @abstractmethod
    def _record(self, event: Any) -> None:
        """Record an own event on the device."""

    @abstractmethod
    def _wait(self, event: Any) -> None:
        """Wait for an own event on the device."""

    def _own(self, event: Event, what: str) -> BaseEvent:
        self.context.check_usable()
        if isinstance(event, BaseEvent) and event.context is self.context:
            return event
        raise MisuseError(
            what, expected="an event of this device", got=type(event).__name__,
            remedy="make it with device.event()", clause="C14.4",
        )


def own_stream(context: BaseContext, stream: Stream, what: str) -> Any:
    """Check that the device is usable and that it made the stream, and give the stream."""
    context.check_usable()
    if isinstance(stream, BaseStream) and stream.context is context:
        return stream
    got = "a stream of another device" if isinstance(stream, BaseStream) else type(stream).__name__
    raise MisuseError(
        what, expected="a stream of this device", got=got, remedy="make it with device.stream()", clause="C14.4"
    )


def nested_graph() -> CaptureRefused:
    """Give the error of a graph launch on a capturing stream."""
    return CaptureRefused(
        "graph.launch", expected="a stream that is not capturing", got="a capturing one",
        remedy="end the capture first; graphs do not nest", clause="C15.1",
    )


def _captured_event(what: str) -> CaptureRefused:
    return CaptureRefused(
        what, expected="an event recorded outside of a capture, or in the same open one",
        got="an event recorded in another capture", remedy="record it again", clause="C15.1",
    )
