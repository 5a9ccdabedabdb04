"""Captured graphs of the cpu device.

Replay walks segments: a run of kernels and copies is one C call over bytes packed at the end of the capture, a
`call` node is one Python call.  Memory is read at the recorded addresses; the graph holds the arrays, so the
addresses stay theirs (C15.1).
"""

from __future__ import annotations

from pagedkv.devices import refusals
from pagedkv.devices.cpu.context import CpuContext
from pagedkv.devices.cpu.footprints import footprint_of
from pagedkv.devices.cpu.operations import CallOperation, GraphOperation, NativeOperation, PackedRun
from pagedkv.devices.cpu.streams import CpuCapture, CpuStream, own_stream
from pagedkv.devices.protocol import NodeRecord, Stream


class CpuGraph:
    """Recorded work with frozen arguments.  Made by `CpuDevice.end_capture`."""

    def __init__(self, context: CpuContext, capture: CpuCapture) -> None:
        self._context = context
        self.nodes: tuple[NodeRecord, ...] = tuple(
            operation.record(dependencies)
            for operation, dependencies in zip(capture.operations, capture.dependencies, strict=True)
        )
        segments: list[PackedRun | CallOperation] = []
        native: list[NativeOperation] = []
        for operation in capture.operations:
            if not isinstance(operation, CallOperation):
                native.append(operation)
                continue
            if native:
                segments.append(PackedRun(native))
                native = []
            segments.append(operation)
        if native:
            segments.append(PackedRun(native))
        self._operation = GraphOperation(
            f"graph of {len(self.nodes)} nodes", tuple(capture.operations), tuple(segments)
        )
        self._footprint = footprint_of(self._operation, context.memory) if context.queues is not None else None

    def launch(self, stream: Stream) -> None:
        """Run all nodes; one driver call.  In deferred mode they wait, as one operation, until something forces them.

        Raises:
            CaptureRefused: the stream is capturing.
            DeviceFault: a kernel failed; later nodes did not run.
        """
        own = self._check(stream, "graph.launch")
        if stream.is_capturing:
            raise refusals.nested_graph()
        self._context.driver_calls += 1
        own.submit(self._operation, self._footprint)

    def upload(self, stream: Stream) -> None:
        """Do nothing but count: a graph of this device is where it runs."""
        self._check(stream, "graph.upload")
        self._context.driver_calls += 1

    def _check(self, stream: Stream, what: str) -> CpuStream:
        self._context.check_usable()
        self._context.raise_violations()
        return own_stream(self._context, stream, what)
