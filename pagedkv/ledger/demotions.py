"""Demotions: from the Device to the Host, for the pages of a continuation that nobody uses.  (C7.3, C7.4, C7.7)

    device only --prepare, copy, commit--> both --at once--> host only        `demote`
    both        --------------------------------drop------> host only         `drop_device`
    both        --------------------------------drop------> device only       `drop_host`
    host only   ------------------- an activation restores it ---> both       `transaction.py`

A page of an active sequence, with a writer or with a pin stays as it is: the others move.  Pages that several
continuations share move for all of them.  `prepare` takes the records of all pools or of none, and pins the pages until
the commit or the abort.  So long the continuation is not released, cut or moved: it holds every pinned page, whatever
other spaces do.  `commit` compares content epochs before it publishes, and drops a Device replica only if nobody has
begun to use the page meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pagedkv.errors import MisuseError
from pagedkv.ledger.active_spaces import ActiveSpaces
from pagedkv.ledger.continuations import Continuations
from pagedkv.ledger.free_runs import Ids
from pagedkv.ledger.host_arena import UNIT_BYTES, ArenaPlan, HostArena
from pagedkv.ledger.pages import Mask
from pagedkv.ledger.transaction import HostCopy, Refusal, host_copy


class ReleasePlan(NamedTuple):
    """What a continuation holds in one pool, and what releasing or demoting it would free now.  (C7.3, C9.8)

    Attributes:
        pages: of its membership.
        shared_pages: of these, pages that other spaces hold too; `release` frees none of them.
        host_only_pages: of these, pages without a Device replica; an activation restores them.
        released_pages: page groups that become available by `release`.
        released_host_bytes: bytes of records that `release` frees.
        demoted_pages: page groups that become available by `demote`.
        needed_host_bytes: bytes of records that `demote` takes.
    """

    pages: int
    shared_pages: int
    host_only_pages: int
    released_pages: int
    released_host_bytes: int
    demoted_pages: int
    needed_host_bytes: int


class DemotionPlan(NamedTuple):
    """Per pool, (n,) int32 each: the pages that leave the Device, and those that are copied; and their records."""

    pinned: dict[str, Ids]
    copied: dict[str, Ids]
    records: ArenaPlan


@dataclass(eq=False, slots=True)
class Demotion:
    """Claims of one `demote` that is neither committed nor aborted.

    Attributes:
        number: of the continuation.
        copies: from page groups to records that the arena has given.
        pinned: per pool, every page that is to leave the Device, those without a copy too.
        is_open: neither committed nor aborted; `Demotions` alone writes it.
    """

    number: int
    copies: tuple[HostCopy, ...]
    pinned: dict[str, Ids]
    is_open: bool = True

    @property
    def page_count(self) -> int:
        """Page groups that become available if nobody uses them before the commit."""
        return sum(logical.size for logical in self.pinned.values())


class Demotions:
    """Moves inactive pages to the Host, and drops replicas.

    Attributes:
        open: prepared and neither committed nor aborted, oldest first.
    """

    def __init__(self, active: Mapping[str, ActiveSpaces], continuations: Continuations, arena: HostArena) -> None:
        self.active = dict(active)
        self.continuations = continuations
        self.arena = arena
        self.open: list[Demotion] = []

    def explain_release(self, number: int) -> dict[str, ReleasePlan]:
        """Return what releasing or demoting a continuation would free in each pool; no side effects."""
        plans = {}
        for name, kept in self.continuations.kept.items():
            pages, at = kept.pages, kept.by_number[number].index
            record_bytes = pages.record_units * UNIT_BYTES
            is_shared, has_device, idle = pages.references[at] > 1, pages.device[at] >= 0, pages.is_idle(at)
            plans[name] = ReleasePlan(
                is_shared.size, _count(is_shared), _count(~has_device), _count(has_device & ~is_shared),
                _count((pages.host[at] >= 0) & ~is_shared) * record_bytes, _count(idle),
                _count(idle & ~pages.is_on_host(at)) * record_bytes,
            )
        return plans

    def explain(self, number: int) -> DemotionPlan | Refusal:
        """Return what a demotion moves, and the records for what only the Device holds; no side effects.  (C8.2)"""
        pinned: dict[str, Ids] = {}
        copied: dict[str, Ids] = {}
        for name, kept in self.continuations.kept.items():
            pages, space = kept.pages, kept.by_number[number]
            idle, on_host = pages.is_idle(space.index), pages.is_on_host(space.index)
            pinned[name], copied[name] = space.members[idle], space.members[idle & ~on_host]
        copied = {name: logical for name, logical in copied.items() if logical.size}
        requests = [(logical.size, self.active[name].pages.record_units) for name, logical in copied.items()]
        records = self.arena.plan(requests)
        if isinstance(records, ArenaPlan):
            return DemotionPlan(pinned, copied, records)
        count, record_units = requests[records]
        return Refusal([*copied][records], count, self.arena.room(record_units), reason="host",
                       forever=count > self.arena.units // record_units)

    def prepare(self, number: int, plan: DemotionPlan) -> Demotion:
        """Claim the records of a plan, and pin every page that is to leave the Device.  (C7.4)"""
        self.arena.apply(plan.records)
        copies = []
        for (name, logical), places in zip(plan.copied.items(), plan.records.places, strict=True):
            pages = self.active[name].pages
            copies.append(host_copy(name, pages, logical, pages.page_ids(logical), places))
        for name, logical in plan.pinned.items():
            self.active[name].pages.pin(logical)
        demotion = Demotion(number, tuple(copies), plan.pinned)
        self.open.append(demotion)
        self.continuations.demotions[number] += 1
        return demotion

    def require_committable(self, demotion: Demotion) -> None:
        """Refuse a second commit, or content that changed under the copies.  (C7.4, C7.6)"""
        self.require_open(demotion, "commit")
        for copy in demotion.copies:
            copy.require_current(self.active[copy.pool].pages)

    def require_open(self, demotion: Demotion, operation: str) -> None:
        """Refuse what `prepare` did not return, or what has ended."""
        if type(demotion) is not Demotion or not demotion.is_open or demotion not in self.open:
            raise MisuseError(f"{operation} of a demotion", expected="one that was prepared here and has not ended",
                              got="another", remedy="end each demotion once", clause="C7.4")

    def commit(self, demotion: Demotion) -> int:
        """Publish the Host replicas, drop the Device replicas of pages that nobody uses, and count these.  (C7.4)"""
        self._end(demotion)
        for copy in demotion.copies:
            self.active[copy.pool].pages.add_host(copy.logical, copy.places, copy.columns)
        return sum(self._drop_device(name, logical) for name, logical in demotion.pinned.items())

    def abort(self, demotion: Demotion) -> None:
        """Give the records and the pins back: everything is as before `prepare`.  (C10.2)"""
        self._end(demotion)
        for copy in demotion.copies:
            self.arena.release(copy.places, self.active[copy.pool].pages.record_units)

    def drop_device(self, number: int) -> int:
        """Drop the Device replicas of idle pages whose Host replica is valid, and return how many.  (C7.7)"""
        return sum(self._drop_device(name, kept.by_number[number].members)
                   for name, kept in self.continuations.kept.items())

    def drop_host(self, number: int) -> int:
        """Free the Host replicas of idle pages that keep their Device replica; return their bytes.  (C7.7)"""
        freed = 0
        for kept in self.continuations.kept.values():
            pages, space = kept.pages, kept.by_number[number]
            dropped = space.members[pages.is_idle(space.index) & (pages.host[space.index] >= 0)]
            pages.drop_host(dropped)
            freed += dropped.size * pages.record_units * UNIT_BYTES
        return freed

    # ---- helpers ----------------------------------------------------------------------------------

    def _end(self, demotion: Demotion) -> None:
        demotion.is_open = False
        self.open.remove(demotion)
        self.continuations.demotions -= Counter((demotion.number,))  # which keeps no zero
        for name, logical in demotion.pinned.items():
            self.active[name].pages.unpin(logical)

    def _drop_device(self, name: str, logical: Ids) -> int:
        spaces = self.active[name]
        pages, at = spaces.pages, spaces.pages.index_of(logical)
        dropped = logical[pages.is_idle(at) & pages.is_on_host(at)]
        if dropped.size:
            page_ids = pages.drop_device(dropped)
            spaces.pool.release(page_ids, leased=page_ids.size)
            spaces.events.record_runs("demote", pages.block[dropped], page_ids)
        return dropped.size


def _count(mask: Mask) -> int:
    return int(np.count_nonzero(mask))
