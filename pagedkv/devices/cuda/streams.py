"""Streams, events and graphs of the cuda device.

A stream is non-blocking: the legacy default stream orders nothing here.  Our capture notes every node beside CUDA's
(`devices/streams.py`), because CUDA shows neither a node's parameters nor an unjoined stream.  Events carry no times.
A graph keeps the arrays of its nodes, and the pool of the temporaries of its calls, from which nobody else allocates.
Clauses: C12, C15.1.
"""

from __future__ import annotations

from typing import Any

from pagedkv.devices.cuda.context import CudaContext
from pagedkv.devices.cuda.staging import Staging
from pagedkv.devices.protocol import Device, Extent, NodeRecord, Stream
from pagedkv.devices.streams import BaseEvent, BaseStream, Capture, nested_graph, own_stream


class CudaEvent(BaseEvent):
    """A point in a stream's work.  Made by `CudaDevice.event`.  `native` is CuPy's event."""

    context: CudaContext

    def __init__(self, context: CudaContext) -> None:
        super().__init__(context)
        self.native: Any = context.api.invoke("cuda.Event", disable_timing=True)

    def synchronize(self) -> None:
        """Wait until the recorded point has passed."""
        self._check("event.synchronize")
        self.context.api.invoke("cuda.runtime.eventSynchronize", self.native.ptr)

    def query(self) -> bool:
        """Has the recorded point passed?"""
        self._check("event.query")
        return self.context.api.is_done("cuda.runtime.eventQuery", self.native.ptr)


class CudaStream(BaseStream):
    """A queue of operations on the GPU.  Made by `CudaDevice.stream`.

    Attributes:
        native: CuPy's stream; an embedder's own CuPy work may use it too.
        staging: of pageable sources.
    """

    context: CudaContext

    def __init__(self, context: CudaContext, device: Device, number: int) -> None:
        super().__init__(context, device, number)
        self.native: Any = context.api.invoke("cuda.Stream", non_blocking=True)
        self.staging = Staging(context, self.native)

    def note(
        self, keep: tuple[Any, ...], kind: str, name: str, grid: Extent = (0, 0, 0), block: Extent = (0, 0, 0),
        argument_bytes: bytes = b"", reads: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Note the node that was just submitted, while a capture is on; `keep` are the arrays that it uses."""
        if (capture := self.capture) is not None:
            capture.nodes.append(NodeRecord(kind, name, tuple(sorted(self.tail)), grid, block, argument_bytes, reads))
            capture.operations.append(keep)
            self.tail = {len(capture.nodes) - 1}

    def synchronize(self) -> None:
        """Wait until everything submitted has run."""
        self.context.check_outside_capture("stream.synchronize")
        self.context.api.invoke("cuda.runtime.streamSynchronize", self.native.ptr)
        self.staging.release()

    def _record(self, event: CudaEvent) -> None:
        self.context.api.invoke("cuda.runtime.eventRecord", event.native.ptr, self.native.ptr)

    def _wait(self, event: CudaEvent) -> None:
        self.context.api.invoke("cuda.runtime.streamWaitEvent", self.native.ptr, event.native.ptr)


class CudaGraph:
    """Recorded work with frozen arguments.  Made by `CudaDevice.end_capture`.

    Attributes:
        nodes: the nodes that we noted; a `call` is one node here, and one node per array operation in CUDA.
        native: CuPy's graph.
    """

    def __init__(self, context: CudaContext, capture: Capture[tuple[Any, ...]], native: Any) -> None:
        self._context = context
        self.native = native
        self.nodes = tuple(capture.nodes)
        self._keep = tuple(capture.operations)
        self._pool = context.take_call_pool()

    @property
    def memory_bytes(self) -> int:
        """Bytes of temporaries that the graph keeps for its replays; part of the graph allowance (C5.3)."""
        return int(self._context.api.invoke("cuda.MemoryPool.total_bytes", self._pool))

    def launch(self, stream: Stream) -> None:
        """Submit all nodes; one driver call."""
        own: CudaStream = own_stream(self._context, stream, "graph.launch")
        if own.capture is not None:
            raise nested_graph()
        self._context.api.invoke("cuda.Graph.launch", self.native, own.native)

    def upload(self, stream: Stream) -> None:
        """Move the graph to the GPU ahead of its first launch."""
        own: CudaStream = own_stream(self._context, stream, "graph.upload")
        self._context.api.invoke("cuda.Graph.upload", self.native, own.native)

    def debug_text(self) -> str:
        """Give CUDA's own description of the graph, in the language of Graphviz."""
        return str(self._context.api.invoke("cuda.Graph.debug_dot_str", self.native))
