"""PagePool: the physical page groups of one pool, counted and identified.  (C3.1, C3.6, C6)

Life of a page group id:

    free --try_reserve--> promised --bind--> bound --materialize--> leased
      ^                      |                 ^                       |
      |<------shrink---------+<----unbind------+-----dematerialize-----+
      |<-------------------release (of leases and of bound ids)--------+

    capacity = allocated + reserved + available                        always (C6.2)
    reserved = promised (no id yet) + bound (an id, unmapped)          (C6.5)

`try_reserve` promises a number; `bind` names ids ahead of need, in windows, for locality: bound ids
still count as reserved and are no one's lease.  `materialize` and `dematerialize` move between
reserved and allocated and never change what others can take.  Only `shrink` and `release` give back.
An id carries a serial while it is bound or leased; a lease handle remembers it, and every release
and dematerialize renews it, so a handle that outlived its lease is stale (C6.1).

A pin says that a copy reads or writes the page group now: while it is pinned, an id neither leaves
its lease nor returns to available (C7.4).

A pool knows no profile, no plane, no sequence and no device (C4.3): which holder maps which id is
the business of `address_space.py`, which alone may call the id-moving methods.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from pagedkv.errors import MisuseError
from pagedkv.ledger.free_runs import FreeRuns, Ids, Index, highest, lowest


@dataclass(frozen=True)
class DevicePageLease:
    """The exclusive hold of one page group while its serial is current.  (C6.1)

    Leases come from `AddressSpaces.lease`; a lease made by hand names nothing.
    """

    pool: str
    page_id: int
    serial: int


class PagePool:
    """Counters, free ids, serials and pins of one pool; written by the methods below alone.

    Attributes:
        capacity: page groups, ids 0 to capacity - 1; fixed.
        allocated, reserved, bound: page groups in these states; `bound` is part of `reserved`.
        serials: (capacity,) int64, 0 while an id is free.
        pins: (capacity,) int32, copies that use a page group now; `pins_total` is their sum.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self.allocated = 0
        self.reserved = 0
        self.bound = 0
        self.free_runs = FreeRuns(capacity)
        self.serials = np.zeros(capacity, np.int64)
        self.pins = np.zeros(capacity, np.int32)
        self.pins_total = 0
        self._serial_next = 1

    @property
    def available(self) -> int:
        """Pages that anyone may still reserve."""
        return self.capacity - self.allocated - self.reserved

    @property
    def promised(self) -> int:
        """Reserved pages that have no id yet."""
        return self.reserved - self.bound

    def try_reserve(self, pages: int) -> bool:
        """Promise `pages` page groups; False, and nothing changed, when fewer are available.  (C6.2)"""
        if type(pages) is not int or pages < 0:
            raise MisuseError(f"a reservation in pool {self.name}", expected="a non-negative integer number of pages",
                              got=repr(pages), remedy="ask in whole pages", clause="C6.2")
        if pages > self.available:
            return False
        self.reserved += pages
        return True

    def shrink(self, pages: int) -> None:
        """Give promised pages back to available.  (C6.2)"""
        self._require_at_most("a shrink", pages, self.promised, "promised pages")
        self.reserved -= pages

    def bind(self, pages: int, after: int = -1) -> Ids:
        """Name ids for promised pages, next to id `after` when possible; they stay reserved.  (C6.5)"""
        self._require_at_most("a binding", pages, self.promised, "promised pages")
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
        self._require_at_most("materialize", pages, self.bound, "bound pages")
        self.bound -= pages
        self.reserved -= pages
        self.allocated += pages

    def dematerialize(self, ids: Ids) -> None:
        """Turn leases back into bound ids of the same reservation; their handles become stale.  (C6.2)"""
        self._require_at_most("dematerialize", ids.size, self.allocated, "leased pages")
        self.require_unpinned(ids, "dematerialize")
        self.allocated -= ids.size
        self.bound += ids.size
        self.reserved += ids.size
        self.renew(ids)

    def release(self, ids: Ids, *, leased: int) -> None:
        """Give ids back to available; the first `leased` counted as leases, the others as bound.

        Raises:
            MisuseError: an id is out of range, free already or listed twice; nothing changed (S25, S35).
        """
        bound = ids.size - leased
        if leased:
            self._require_at_most("release of leases", leased, self.allocated, "leased pages")
        if bound:
            self._require_at_most("release of bound pages", bound, self.bound, "bound pages")
        at = self.free_runs.index_of(ids)
        if not self._has(at):
            raise MisuseError(f"release of pages of pool {self.name}", expected="ids that are held", got=ids.tolist(),
                              remedy="release each page once", clause="C6.1")
        if not isinstance(at, slice):
            at = np.sort(at)
            if lowest(at[1:] - at[:-1]) == 0:
                raise MisuseError(f"release of pages of pool {self.name}", expected="distinct ids", got=ids.tolist(),
                                  remedy="list each page once", clause="C6.1")
        if self.pins_total:
            self.require_unpinned(ids, "release")
        self.allocated -= leased
        self.bound -= bound
        self.reserved -= bound
        self.serials[at] = 0
        self.free_runs.give(at)

    def pin(self, ids: Ids) -> None:
        """Hold page groups where they are while a copy uses them; pins add up.  (C7.4)

        Raises:
            MisuseError: an id is out of range or held by nobody; nothing changed.
        """
        if not self._has(self.free_runs.index_of(ids)):
            raise MisuseError(f"a pin of pages of pool {self.name}", expected="ids that are bound or leased",
                              got=ids.tolist(), remedy="reserve and bind a page before a copy uses it", clause="C7.4")
        np.add.at(self.pins, ids, 1)
        self.pins_total += ids.size

    def unpin(self, ids: Ids) -> None:
        """Undo one `pin` of the same ids.

        Raises:
            MisuseError: an id has fewer pins; nothing changed (S35).
        """
        counts = np.bincount(ids, minlength=self.capacity)
        if ids.size and (counts > self.pins).any():
            raise MisuseError(f"an unpin of pages of pool {self.name}", expected="pages that are pinned so often",
                              got=ids.tolist(), remedy="end each transfer once", clause="C7.4")
        np.subtract.at(self.pins, ids, 1)
        self.pins_total -= ids.size

    def require_unpinned(self, ids: Ids, operation: str) -> None:
        """Refuse an operation on a page group that a copy uses.  (C7.4)

        Raises:
            MisuseError: names the first such page.
        """
        if self.pins_total and self.pins[ids].any():
            page_id = int(ids[np.flatnonzero(self.pins[ids])[0]])
            raise MisuseError(f"{operation} of page {page_id} of pool {self.name}", expected="a page that no copy uses",
                              got=f"{int(self.pins[page_id])} pins of transfers",
                              remedy="wait for the transfer, or abort it", clause="C7.4", page_id=page_id)

    def renew(self, ids: Ids) -> None:
        """Give ids fresh serials, so that earlier handles of them are stale.  (C6.1)"""
        self.serials[self.free_runs.index_of(ids)] = np.arange(self._serial_next, self._serial_next + ids.size)
        self._serial_next += ids.size

    def _has(self, at: Index) -> bool:
        """Say whether every id is one of this pool, bound or leased; a slice lies within the pool."""
        if isinstance(at, slice):
            return at.start == at.stop or lowest(self.serials[at]) > 0
        return 0 <= lowest(at) and highest(at) < self.capacity and lowest(self.serials[at]) > 0

    def _require_at_most(self, what: str, pages: int, limit: int, kind: str) -> None:
        if type(pages) is not int or not 0 <= pages <= limit:
            raise MisuseError(f"{what} in pool {self.name}", expected=f"a non-negative integer, at most {limit} {kind}",
                              got=repr(pages), remedy="every page leaves the state it entered exactly once",
                              clause="C6.2")


def try_reserve_bundle(requests: SequenceOf[tuple[PagePool, int]]) -> PagePool | None:
    """Reserve in several pools, all or nothing.  (C6.3)

    Returns:
        None when every pool granted its pages, else the first pool that lacks them; then nothing changed.

    Raises:
        MisuseError: no request, a pool named twice, or no whole number of pages from 1 on asked of a pool.
    """
    pools = [pool for pool, _ in requests]
    has_counts = all(type(pages) is int and pages > 0 for _, pages in requests)
    if not pools or len({id(pool) for pool in pools}) != len(pools) or not has_counts:
        raise MisuseError("a bundle reservation", expected="distinct pools, an integer of at least one page each",
                          got=[(pool.name, pages) for pool, pages in requests],
                          remedy="name each enabled pool once", clause="C6.3")
    for pool, pages in requests:
        if pages > pool.available:
            return pool
    for pool, pages in requests:
        granted = pool.try_reserve(pages)
        assert granted, f"pool {pool.name} changed between check and grant"
    return None
