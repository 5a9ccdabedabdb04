"""UnitGraph: from a shape to a graph, and the same work run eagerly.  (C15)

    1  build the unit: control buffers, workspace, views
    2  warm up on inert rows: compiles kernels, allocates the unit's buffers
    3  capture the same enqueue; instantiate; upload

Warm-up and capture select no row, so they touch no page.
"""

from __future__ import annotations

import pagedkv as pk
from pagedkv.graphs.key import GraphKey
from pagedkv.graphs.unit import Model, Unit


class UnitGraph:
    """A unit with its graph; `run` replays it, or enqueues the unit again if there is no graph.

    `replays` counts runs.
    """

    def __init__(self, store: pk.Store, model: Model, key: GraphKey, *, use_graph: bool = True) -> None:
        self.unit = Unit(store, key)
        self.replays = 0
        self._store = store
        self._model = model
        self.graph: pk.Graph | None = None
        self.unit.enqueue(model)
        store.stream.synchronize()
        if use_graph:
            self.graph = self._capture()

    def run(self) -> None:
        """Run the unit on the present words of its control buffers; asynchronous."""
        if self.graph is None:
            self.unit.enqueue(self._model)
        else:
            self._store.launch_graph(self.graph)
        self.replays += 1

    def _capture(self) -> pk.Graph:
        device, stream = self._store.device, self._store.stream
        try:
            device.begin_capture(stream)
            self.unit.enqueue(self._model)
            graph = device.end_capture(stream)
        except BaseException as error:
            try:
                device.abort_capture(stream)
            except pk.CaptureRefused:  # no capture began, or end_capture dropped it
                pass
            except (pk.PagedKVError, MemoryError) as second:  # must not replace the first error
                error.add_note(f"and the capture could not be aborted: {second}")
            raise
        graph.upload(stream)
        return graph
