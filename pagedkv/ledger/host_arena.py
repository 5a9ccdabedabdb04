"""HostArena: which parts of the pinned arena hold records of Host pages; no memory.  (C8)

    units      0        12        24        36                     60
    arena      [ record  | record  |  free   | record of another pool | free ...
                                   ^ one range of free units, as wide as it lies

A record is one Host page: every plane's payload, in a whole number of units of 256 bytes that is the same for all
pages of a pool.  A record is named by its first unit.  Records that are taken together lie together if some range is
wide enough, but nothing else binds them: each is given back by itself, and the free units beside it join it (C8.1).  So
there is no extent that could be split, and no handle that could be stale.

A plan takes for several pools, or for none, from the ranges as they lie; `free_units` is a sum and proves nothing.  It
holds for one revision of the arena (C8.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.ledger.free_runs import Ids

Units = npt.NDArray[np.int64]

UNIT_BYTES = 256


class ArenaPlan(NamedTuple):
    """The records that a plan takes, and the free ranges behind it; it holds while `revision` is the arena's.

    `places` has one (n,) int32 array of first units for each request.
    """

    revision: int
    places: tuple[Ids, ...]
    starts: Units
    ends: Units


class HostArena:
    """Free ranges of the arena, ascending and never adjacent; the methods below alone write them.

    Attributes:
        units: of 256 bytes, in the whole arena.
        starts, ends: (n,) int64, half-open free ranges.
        revision: changes with every `apply` and `release`.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.units = capacity_bytes // UNIT_BYTES
        self.starts = np.zeros(min(self.units, 1), np.int64)
        self.ends = np.full(min(self.units, 1), self.units, np.int64)
        self.revision = 0

    @property
    def free_units(self) -> int:
        """Units that no record holds; a summary, which does not say whether a record fits.  (C8.2)"""
        return int((self.ends - self.starts).sum())

    def room(self, record_units: int) -> int:
        """Return how many records of so many units fit into the free ranges as they lie."""
        return int(((self.ends - self.starts) // record_units).sum())

    def plan(
        self, requests: Sequence[tuple[int, int]], releases: Sequence[tuple[Ids, int]] = ()
    ) -> ArenaPlan | int:
        """Return a plan of all requests, or the index of the first that does not fit; no side effects.  (C8.2)

        requests: (records, units of each) of each request.  They are placed in this order: in the first free range
        that takes all records, or else piece by piece from the lowest range upward.
        releases: (first units, units of each), records to give back before that.
        """
        starts, ends = self.starts, self.ends
        for places, record_units in releases:
            starts, ends = _joined(starts, ends, places, record_units)
        taken: list[Ids] = []
        for index, (records, record_units) in enumerate(requests):
            fitting = (ends - starts) // record_units
            whole = np.flatnonzero(fitting >= records)
            counts = np.zeros_like(fitting)
            if whole.size:
                counts[whole[0]] = records
            else:
                before = np.cumsum(fitting) - fitting
                counts = np.clip(records - before, 0, fitting)
                if int(counts.sum()) < records:
                    return index
            first = np.repeat(starts - (np.cumsum(counts) - counts) * record_units, counts)
            taken.append((first + np.arange(records) * record_units).astype(np.int32))
            starts = starts + counts * record_units
            is_left = starts < ends
            starts, ends = starts[is_left], ends[is_left]
        return ArenaPlan(self.revision, tuple(taken), starts, ends)

    def apply(self, plan: ArenaPlan) -> None:
        """Take the records of a plan, and give back those that it releases.  (C8.2)"""
        assert plan.revision == self.revision, f"a plan of revision {plan.revision} at revision {self.revision}"
        self.starts, self.ends = plan.starts, plan.ends
        self.revision += 1

    def release(self, places: Ids, record_units: int) -> None:
        """Give records back, in any order.  (C8.1)"""
        starts, ends = _joined(self.starts, self.ends, places, record_units)
        assert not ends.size or 0 <= starts[0] <= ends[-1] <= self.units, f"records {places.tolist()} released"
        self.starts, self.ends = starts, ends
        self.revision += 1


def _joined(starts: Units, ends: Units, places: Ids, record_units: int) -> tuple[Units, Units]:
    """Return free ranges with the units of records added, neighbours joined; no record may be free already (S25)."""
    if not places.size:
        return starts, ends
    units = places.astype(np.int64)
    first, last = np.concatenate((starts, units)), np.concatenate((ends, units + record_units))
    order = np.argsort(first, kind="stable")
    first, last = first[order], last[order]
    assert (first[1:] >= last[:-1]).all(), f"records {places.tolist()} released, some of them twice"
    is_apart = first[1:] != last[:-1]
    return first[np.concatenate(([True], is_apart))], last[np.concatenate((is_apart, [True]))]
