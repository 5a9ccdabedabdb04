"""Streams and events of the cuda device.

A stream is non-blocking: the legacy default stream orders nothing here.  What a capture records is noted beside CUDA,
node by node (`captures.py`), because CUDA tells neither a node's parameters nor which stream was not joined.  Events
carry no times.  Clauses: C12, C15.1.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from pagedkv.devices import refusals
from pagedkv.devices.captures import Capture
from pagedkv.devices.cuda.context import CudaContext
from pagedkv.devices.cuda.staging import Staging
from pagedkv.devices.protocol import Device, Event, Extent, NodeRecord, Stream

CudaCapture: TypeAlias = "Capture[CudaStream, CapturedNode]"

NO_EXTENT: Extent = (0, 0, 0)


class CapturedNode(NamedTuple):
    """What the launch helper notes of one submission.

    Attributes:
        keep: arrays whose memory the node uses; the graph holds them.
    """

    kind: str
    name: str
    grid: Extent = NO_EXTENT
    block: Extent = NO_EXTENT
    argument_bytes: bytes = b""
    reads: tuple[tuple[int, int], ...] = ()
    keep: tuple[Any, ...] = ()

    def record(self, dependencies: tuple[int, ...]) -> NodeRecord:
        """Describe as a node."""
        return NodeRecord(
            self.kind, self.name, self.grid, self.block, self.argument_bytes, dependencies, self.reads
        )


class CudaEvent:
    """A point in a stream's work.  Made by `CudaDevice.event`.

    `native` is CuPy's event.
    """

    def __init__(self, context: CudaContext) -> None:
        self.context = context
        self.native: Any = context.api.invoke("cuda.Event", disable_timing=True)
        # Set when recorded on a capturing stream: the capture, and the nodes the event stands for.
        self.capture: CudaCapture | None = None
        self.nodes: frozenset[int] = frozenset()

    def synchronize(self) -> None:
        """Wait until the recorded point has passed.

        Raises:
            DeviceFault: work before it failed.
        """
        self._look("event.synchronize")
        self.context.api.invoke("cuda.runtime.eventSynchronize", self.native.ptr)

    def query(self) -> bool:
        """Has the recorded point passed?

        Raises:
            DeviceFault: work before it failed.
        """
        self._look("event.query")
        return self.context.api.is_done("cuda.runtime.eventQuery", self.native.ptr)

    def _look(self, what: str) -> None:
        self.context.check_usable()
        self.context.refuse_in_capture(what)
        if self.capture is not None:
            raise refusals.captured_event(what)


class CudaStream:
    """A queue of operations on the GPU.  Made by `CudaDevice.stream`.

    Attributes:
        native: CuPy's stream; an embedder's own CuPy work may go there too.
        label: for messages.
        staging: of pageable sources.
    """

    def __init__(self, context: CudaContext, device: Device, label: str) -> None:
        self.context = context
        self._device = device
        self.label = label
        self.native: Any = context.api.invoke("cuda.Stream", non_blocking=True)
        self.staging = Staging(context, self.native)
        self.capture: CudaCapture | None = None
        self.tail: set[int] = set()  # nodes that the next recorded operation depends on

    def __repr__(self) -> str:
        return f"<{self.label} of the cuda device>"

    @property
    def device(self) -> Device:
        """The device that made the stream."""
        return self._device

    @property
    def is_capturing(self) -> bool:
        """Are submissions recorded instead of run?"""
        return self.capture is not None

    def note(self, node: CapturedNode) -> None:
        """Note what was just submitted, while a capture is on."""
        if self.capture is not None:
            self.tail = {self.capture.add(node, self.tail)}

    def synchronize(self) -> None:
        """Wait until everything submitted has run.

        Raises:
            DeviceFault: something submitted failed.
        """
        self.context.check_usable()
        self.context.refuse_in_capture("stream.synchronize")
        self.context.api.invoke("cuda.runtime.streamSynchronize", self.native.ptr)
        self.staging.release()

    def record(self, event: Event) -> None:
        """Let `event` stand for everything submitted to this stream so far."""
        self.context.check_usable()
        own = self._own(event, "stream.record")
        self.context.api.invoke("cuda.runtime.eventRecord", own.native.ptr, self.native.ptr)
        own.capture = self.capture
        own.nodes = frozenset(self.tail) if self.capture else frozenset()

    def wait(self, event: Event) -> None:
        """Let later submissions run only after what `event` stands for; may join this stream to a capture."""
        self.context.check_usable()
        own = self._own(event, "stream.wait")
        if own.capture is None:
            if self.capture is not None:
                raise refusals.event_from_outside(self.label)
        elif not own.capture.is_open or (self.capture is not None and self.capture is not own.capture):
            raise refusals.captured_event("stream.wait")
        self.context.api.invoke("cuda.runtime.streamWaitEvent", self.native.ptr, own.native.ptr)
        if own.capture is None:
            return
        if self.capture is None:
            self.capture = own.capture
            self.capture.streams.append(self)
        self.tail |= own.nodes

    def leave_capture(self) -> None:
        """Forget the capture; called by it when it closes."""
        self.capture = None
        self.tail = set()

    def _own(self, event: Event, what: str) -> CudaEvent:
        if not isinstance(event, CudaEvent) or event.context is not self.context:
            raise refusals.foreign_event(what, event)
        return event


def own_stream(context: CudaContext, stream: Stream, what: str) -> CudaStream:
    """Give the stream as one of this context, or refuse it."""
    if type(stream) is CudaStream and stream.context is context:
        return stream
    got = "a stream of another device" if isinstance(stream, CudaStream) else type(stream).__name__
    raise refusals.foreign_stream(what, got)
