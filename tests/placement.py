"""Scatter page ids, so that no test passes because pages happen to be neighbours."""

from __future__ import annotations

import numpy as np

import pagedkv as pk
from pagedkv.ledger.free_runs import FreeRuns, Ids


class ShuffledRuns(FreeRuns):
    """Free ids handed out in random order: the least local placement the pool's contract allows (C3.6)."""

    def __init__(self, capacity: int, seed: int) -> None:
        super().__init__(capacity)
        self._random = np.random.default_rng(seed)

    def take(self, count: int, after: int = -1) -> Ids:
        """Take `count` random free ids; `after` is ignored."""
        chosen = self._random.choice(np.flatnonzero(self.mask()), size=count, replace=False).astype(np.int32)
        remaining = np.setdiff1d(np.flatnonzero(self.mask()).astype(np.int32), chosen)
        self.run_count = self.id_count = 0
        self.give(remaining)
        return chosen


def shuffle_placement(store: pk.Store, *, seed: int) -> None:
    """Make an unused store hand out page ids in random order, another one in every pool."""
    for index, spaces in enumerate(store._ledger.active.values()):
        assert spaces.pool.available == spaces.pool.capacity, "shuffle before anything is activated"
        spaces.pool.free_runs = ShuffledRuns(spaces.pool.capacity, seed + index)
