"""GraphCache: the graphs of one store and one model, by shape.  (C15.2)"""

from __future__ import annotations

import pagedkv as pk
from pagedkv.graphs.capture import UnitGraph
from pagedkv.graphs.key import GraphKey
from pagedkv.graphs.unit import Model


class GraphCache:
    """Captures a unit at the first use of its shape and keeps the graph while the store is open."""

    def __init__(self, store: pk.Store, model: Model, *, use_graphs: bool = True) -> None:
        self._store = store
        self._model = model
        self._use_graphs = use_graphs
        self._graphs: dict[GraphKey, UnitGraph] = {}

    def unit(self, key: GraphKey) -> UnitGraph:
        """Return the graph of a shape, captured now if the shape is new; blank its egress until it has run once."""
        graph = self._graphs.get(key) if isinstance(key, GraphKey) else None
        if graph is None:
            graph = self._graphs[key] = UnitGraph(self._store, self._model, key, use_graph=self._use_graphs)
        if graph.replays == 0:
            graph.unit.control.blank()
        return graph

    def replays(self) -> dict[str, int]:
        """Return runs per shape, in order of first use."""
        return {str(key): graph.replays for key, graph in self._graphs.items()}
