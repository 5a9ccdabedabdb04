"""GraphCache: the captured units of one store and one model, by shape.  (C15.2)"""

from __future__ import annotations

import pagedkv as pk
from pagedkv.graphs.capture import UnitGraph
from pagedkv.graphs.key import GraphKey
from pagedkv.graphs.unit import Model


class GraphCache:
    """Builds a captured unit at the first use of a shape and keeps it while the store is open."""

    def __init__(self, store: pk.Store, model: Model, *, use_graphs: bool = True) -> None:
        self._store = store
        self._model = model
        self._use_graphs = use_graphs
        self._units: dict[GraphKey, UnitGraph] = {}

    def unit(self, key: GraphKey) -> UnitGraph:
        """Return the captured unit of a shape, captured now if it is new; blanks its egress until it has run once."""
        found = self._units.get(key)
        if found is None:
            found = UnitGraph(self._store, self._model, key, use_graph=self._use_graphs)
            self._units[key] = found
        if found.replays == 0:
            found.unit.control.blank()
        return found

    def replays(self) -> dict[str, int]:
        """Return runs per shape, in order of first use."""
        return {str(key): unit.replays for key, unit in self._units.items()}
