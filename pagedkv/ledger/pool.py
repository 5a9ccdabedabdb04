"""PagePool: the page groups of one pool, counted and identified.  (C3.1, C3.6, C6)

Life of a page group id:

    free --try_reserve--> promised --bind--> bound --materialize--> leased
      ^                      |                 ^                       |
      |<------shrink---------+<----unbind------+-----dematerialize-----+
      |<-------------------release (of leases and of bound ids)--------+

    capacity = allocated + reserved + available                        always (C6.2)
    reserved = promised (no id yet) + bound (an id, unmapped)          (C6.5)

`try_reserve` promises a number of pages.  `bind` chooses ids for them before they are needed, a window at a time, so
that they are adjacent: a bound id still counts as reserved, and it is no lease.  `materialize` and `dematerialize` move
pages between reserved and allocated, and never change `available`.  Only `shrink` and `release` make pages available.
An id has a serial while it is bound or leased.  A lease holds the serial; release and dematerialize change it, so a
lease that was given up is stale (C6.1).

A pool knows no profile, no plane, no sequence and no device (C4.3).  `active_spaces.py` and `kept_spaces.py` know which
space maps which id.  They and `transaction.py` alone call the methods below, with arguments that they have checked.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedkv.ledger.free_runs import FreeRuns, Ids, Index, highest, lowest

NOTED_MAX = 256
"""Trims after which their serials are renewed, whether or not somebody asks for them."""


@dataclass(frozen=True)
class DevicePageLease:
    """The exclusive hold of one page group while its serial is current; made by `ActiveSpaces.lease`.  (C6.1)"""

    pool: str
    page_id: int
    serial: int


class PagePool:
    """Counters, free ids and serials of one pool; the methods below alone write them.

    Attributes:
        capacity: page groups, ids 0 to capacity - 1; fixed.
        allocated, reserved, bound: page groups in these states; `bound` is part of `reserved`.
        serials: (capacity,) int64, 0 while an id is free.

    Every trim makes leases stale, and mostly nobody has one.  So `dematerialize` only notes the ids, and `serials`
    renews them when somebody reads it.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self.allocated = 0
        self.reserved = 0
        self.bound = 0
        self.free_runs = FreeRuns(capacity)
        self._serials = np.zeros(capacity, np.int64)
        self._serial_next = 1
        self._stale: list[Ids] = []

    @property
    def serials(self) -> npt.NDArray[np.int64]:
        """Generations of the leases, the trimmed ones renewed."""
        if self._stale:
            self._renew_stale()
        return self._serials

    @property
    def available(self) -> int:
        """Pages that are neither allocated nor reserved."""
        return self.capacity - self.allocated - self.reserved

    @property
    def promised(self) -> int:
        """Reserved pages that have no id yet."""
        return self.reserved - self.bound

    def try_reserve(self, pages: int) -> bool:
        """Promise page groups; if fewer are available, return False and change nothing.  (C6.2)"""
        assert pages >= 0, f"pool {self.name}: a reservation of {pages} pages"
        if pages > self.available:
            return False
        self.reserved += pages
        return True

    def shrink(self, pages: int) -> None:
        """Make promised pages available again.  (C6.2)"""
        assert 0 <= pages <= self.promised, f"pool {self.name}: a shrink by {pages} of {self.promised} promised pages"
        self.reserved -= pages

    def bind(self, pages: int, after: int = -1) -> Ids:
        """Choose ids for promised pages, next to id `after` if possible; the pages stay reserved.  (C6.5)"""
        assert 0 <= pages <= self.promised, f"pool {self.name}: {pages} bound of {self.promised} promised pages"
        ids = self.free_runs.take(pages, after)
        self.bound += pages
        self.renew(ids)
        return ids

    def unbind(self, ids: Ids) -> None:
        """Undo one `bind`: the ids are free, and as many pages stay promised.  (C6.5, C10.2)"""
        self.release(ids, leased=0)
        self.reserved += ids.size

    def materialize(self, pages: int) -> None:
        """Turn bound ids into leases: reserved to allocated, available unchanged.  (C6.2)"""
        assert 0 <= pages <= self.bound, f"pool {self.name}: {pages} materialized of {self.bound} bound pages"
        self.bound -= pages
        self.reserved -= pages
        self.allocated += pages

    def dematerialize(self, ids: Ids) -> None:
        """Turn leases back into bound ids of the same reservation; the leases become stale.  (C6.2)"""
        assert ids.size <= self.allocated, f"pool {self.name}: {ids.size} dematerialized of {self.allocated} leases"
        self.allocated -= ids.size
        self.bound += ids.size
        self.reserved += ids.size
        self._stale.append(ids)
        if len(self._stale) == NOTED_MAX:
            self._renew_stale()

    def release(self, ids: Ids, *, leased: int) -> None:
        """Make distinct ids available; `leased` of them count as leases, the others as bound (S25, S35)."""
        bound = ids.size - leased
        assert 0 <= leased <= self.allocated, f"pool {self.name}: {leased} released of {self.allocated} leases"
        assert 0 <= bound <= self.bound, f"pool {self.name}: {bound} released of {self.bound} bound pages"
        at, serials = self.free_runs.index_of(ids), self.serials
        assert self._holds(at, serials), f"pool {self.name}: {ids.tolist()} released, which are not all held"
        if not isinstance(at, slice):
            at = np.sort(at)
            assert lowest(at[1:] - at[:-1]) > 0, f"pool {self.name}: {ids.tolist()} released, not distinct"
        self.allocated -= leased
        self.bound -= bound
        self.reserved -= bound
        serials[at] = 0
        self.free_runs.give(at)

    def renew(self, ids: Ids) -> None:
        """Give ids new serials, so that their earlier leases are stale.  (C6.1)"""
        self._serials[self.free_runs.index_of(ids)] = np.arange(self._serial_next, self._serial_next + ids.size)
        self._serial_next += ids.size

    def _renew_stale(self) -> None:
        self.renew(np.concatenate(self._stale))
        self._stale.clear()  # last: an interrupt before it only renews them twice

    def _holds(self, at: Index, serials: npt.NDArray[np.int64]) -> bool:
        """Say whether every id is one of this pool, bound or leased; a slice lies within the pool."""
        if isinstance(at, slice):
            return at.start == at.stop or lowest(serials[at]) > 0
        return 0 <= lowest(at) and highest(at) < self.capacity and lowest(serials[at]) > 0


def try_reserve_bundle(requests: SequenceOf[tuple[PagePool, int]]) -> PagePool | None:
    """Reserve in several pools, all or nothing; return None, or the first pool that lacks pages.  (C6.3)"""
    assert len({id(pool) for pool, _ in requests}) == len(requests) > 0, "a bundle names each pool once"
    for pool, pages in requests:
        if pages > pool.available:
            return pool
    for pool, pages in requests:
        granted = pool.try_reserve(pages)
        assert granted, f"pool {pool.name} changed between check and grant"
    return None
