"""Captured graphs of the cuda device.

A graph holds what its nodes use: the arrays behind the recorded addresses (C15.1), and the memory pool from which
captured array functions took their temporaries, to which nobody else allocates.
"""

from __future__ import annotations

from typing import Any

from pagedkv.devices import refusals
from pagedkv.devices.cuda.context import CudaContext
from pagedkv.devices.cuda.streams import CudaCapture, CudaStream, own_stream
from pagedkv.devices.protocol import NodeRecord, Stream


class CudaGraph:
    """Recorded work with frozen arguments.  Made by `CudaDevice.end_capture`.

    Attributes:
        nodes: what our own launch helper recorded; `call` is one node here, and one node per array operation in CUDA.
        native: CuPy's graph.
    """

    def __init__(self, context: CudaContext, capture: CudaCapture, native: Any, pool: Any) -> None:
        self._context = context
        self.native = native
        self.nodes: tuple[NodeRecord, ...] = tuple(
            operation.record(dependencies)
            for operation, dependencies in zip(capture.operations, capture.dependencies, strict=True)
        )
        self._keep = tuple(operation.keep for operation in capture.operations)
        self._pool = pool

    @property
    def memory_bytes(self) -> int:
        """Bytes of temporaries that the graph keeps for its replays; part of the graph allowance (C5.3)."""
        return int(self._context.api.invoke("cuda.MemoryPool.total_bytes", self._pool))

    def launch(self, stream: Stream) -> None:
        """Submit all nodes; one driver call.

        Raises:
            CaptureRefused: the stream is capturing.
            DeviceFault: earlier work failed.
        """
        own = self._own(stream, "graph.launch")
        if own.is_capturing:
            raise refusals.nested_graph()
        self._context.api.invoke("cuda.Graph.launch", self.native, own.native)

    def upload(self, stream: Stream) -> None:
        """Move the graph to the GPU ahead of its first launch."""
        own = self._own(stream, "graph.upload")
        self._context.api.invoke("cuda.Graph.upload", self.native, own.native)

    def debug_text(self) -> str:
        """Give CUDA's own description of the graph, in the language of Graphviz."""
        return str(self._context.api.invoke("cuda.Graph.debug_dot_str", self.native))

    def _own(self, stream: Stream, what: str) -> CudaStream:
        self._context.check_usable()
        return own_stream(self._context, stream, what)
