"""Transfers: copies of whole page groups beside decode, as the ledger sees them.  (C7.4, C8.3, C10.10)

    planned --submitted--> submitted --completed--> complete --publish--> published
       |                         |                     |
       +--abort--> aborted       |                     +--abort--> aborted
                                 +--publish, when ordered--> published    pins go with completion
                                 +--abort------------------> aborted      at completion

From the plan on, the logical pages are pinned: they are neither released, cut nor written (C7.4).  A transfer ends
published or aborted, and its pins end when its copies have run too.  From `publish` on, its owner may put the
destination into a space or a table, or drop the source.  `publish` demands that the copies have run, or, for a
destination on the device, that its next users are ordered after them; and that the content is still the planned one
(C7.6).

Runs of adjacent ids are coalesced here.  `mover.py` knows the planes and executes a run; this file knows no device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from pagedkv.errors import MisuseError, StaleHandle
from pagedkv.ledger.free_runs import Ids
from pagedkv.ledger.pages import LogicalPages

Direction = Literal["d2h", "h2d", "d2d"]
"""Device to host, host to device, device to device."""

State = Literal["planned", "submitted", "complete", "published", "aborted"]


@dataclass(frozen=True, slots=True)
class PageRun:
    """Pages [source, source + count) go to [destination, destination + count)."""

    source: int
    destination: int
    count: int


@dataclass(eq=False)
class Transfer:
    """One movement of page groups of one pool; made by `Transfers.plan`.

    Attributes:
        number: in the order of plans.
        direction: "d2h", "h2d" or "d2d".
        pool: its name.
        pages, logical: the descriptors, and which of them it moves; pinned while the copies run.
        runs: what to copy; the host side counts pages of its extent.
        host_pages: pages of the whole host extent; 0 for "d2d".
        contents: content epochs of the pages when it was planned (C7.6).
        state: written by `Transfers` alone, as are the flags.
        has_run: the copies are done, or never began.
        is_ordered: the destination's next users wait for the copies on their stream.
        is_aborting: it ends in "aborted" when its copies have run.
    """

    number: int
    direction: Direction
    pool: str
    pages: LogicalPages
    logical: Ids
    runs: tuple[PageRun, ...]
    host_pages: int
    contents: npt.NDArray[np.int64]
    state: State = "planned"
    has_run: bool = False
    is_ordered: bool = False
    is_aborting: bool = False

    @property
    def page_count(self) -> int:
        """Pages it moves."""
        return self.logical.size

    @property
    def label(self) -> str:
        """Direction, number and pool, as errors print it."""
        return f"transfer {self.direction}#{self.number} of {self.page_count} pages of pool {self.pool}"


@dataclass
class TransferCounters:
    """What was asked for and what became of it; counters only grow."""

    planned: int = 0
    published: int = 0
    aborted: int = 0
    pages: int = 0
    runs: int = 0


@dataclass
class Transfers:
    """The transfers of one store that have not ended."""

    open: list[Transfer] = field(default_factory=list)
    counters: TransferCounters = field(default_factory=TransferCounters)

    def plan(
        self, direction: Direction, pool: str, pages: LogicalPages, logical: Ids, sources: Ids, destinations: Ids, *,
        host_pages: int = 0,
    ) -> Transfer:
        """Pin the logical pages whose bytes a copy moves, and coalesce it.  (C7.4, C8.3)

        Args:
            direction: which of the two sides are page groups of `pool`; a host side names pages of a packed extent
                (`PackedPlanes`), in logical order.
            logical: (n,) int32, descriptors of the pages that a space holds.
            sources, destinations: (n,) int32, paired with them; destinations are distinct, and for "d2d" no source.
                The caller holds the destinations, as claims of its own.
            host_pages: pages of the whole extent on the host; 0 for "d2d".

        Raises:
            MisuseError: no page, ids that are not distinct, or outside the extent; nothing changed.
        """
        runs = page_runs(sources, destinations)
        self._require_distinct(direction, sources, destinations)
        host = {"d2h": destinations, "h2d": sources, "d2d": np.zeros(0, np.int32)}[direction]
        if host.size and not 0 <= int(host.min()) <= int(host.max()) < host_pages:
            raise MisuseError(f"a {direction} transfer of pool {pool}",
                              expected=f"host pages 0 to {host_pages - 1} of the extent", got=host.tolist(),
                              remedy="name pages of the packed extent", clause="C8.1")
        pages.pin(logical)
        transfer = Transfer(self.counters.planned, direction, pool, pages, logical.copy(), runs, host_pages,
                            pages.content[logical])
        self.open.append(transfer)
        self.counters.planned += 1
        self.counters.pages += transfer.page_count
        self.counters.runs += len(runs)
        return transfer

    def submitted(self, transfer: Transfer) -> None:
        """Note that the copies are on their way."""
        self._require_state(transfer, "submit", "planned")
        transfer.state = "submitted"

    def ordered(self, transfer: Transfer) -> None:
        """Note that the destination's next users wait for the copies on their stream."""
        self._require_state(transfer, "an order after", "submitted", "complete")
        transfer.is_ordered = True

    def completed(self, transfer: Transfer) -> None:
        """Note that the copies have run; an abort takes effect, and a published transfer lets its pins go.

        A second report of the same completion is ignored (S26).
        """
        if transfer.has_run:
            return
        self._require_state(transfer, "completion", "submitted", "published")
        transfer.has_run = True
        if transfer.is_aborting:
            self._end(transfer, "aborted")
        elif transfer.state == "published":
            self._unpin(transfer)
        else:
            transfer.state = "complete"

    def publish(self, transfer: Transfer) -> None:
        """Let the owner use the destination, and drop the source if it likes.  (C7.4, C16.9)

        Args:
            transfer: complete, or ordered before its users when the destination is on the device.

        Raises:
            MisuseError: the copies have not run, and nobody waits for them on a stream.
            StaleHandle: the content changed since the plan; the transfer stays open, to be aborted.
        """
        may_be_ordered = transfer.direction != "d2h" and transfer.is_ordered and not transfer.is_aborting
        self._require_state(transfer, "publish", *(("complete", "submitted") if may_be_ordered else ("complete",)))
        if not np.array_equal(transfer.pages.content[transfer.logical], transfer.contents):
            raise StaleHandle(f"publish of {transfer.label}", expected="pages with the content that was planned",
                              got="other content epochs", remedy="abort it and plan anew", clause="C7.6")
        self._end(transfer, "published")

    def abort(self, transfer: Transfer) -> bool:
        """End it without publication: now (True), or when its copies have run (False).  (C10.2, S26 to S28)"""
        if transfer.state == "submitted":
            transfer.is_aborting = True
            return False
        self._require_state(transfer, "abort", "planned", "complete")
        transfer.has_run = True
        self._end(transfer, "aborted")
        return True

    def _end(self, transfer: Transfer, state: Literal["published", "aborted"]) -> None:
        transfer.state = state
        if state == "published":
            self.counters.published += 1
        else:
            self.counters.aborted += 1
        if transfer.has_run:
            self._unpin(transfer)

    def _unpin(self, transfer: Transfer) -> None:
        transfer.pages.unpin(transfer.logical)
        self.open.remove(transfer)

    def _require_state(self, transfer: Transfer, operation: str, *states: State) -> None:
        if transfer.state not in states:
            raise MisuseError(f"{operation} of {transfer.label}", expected=f"a transfer that is {' or '.join(states)}",
                              got=f"one that is {transfer.state}", remedy="wait for its copies, and end it once",
                              clause="C7.4")

    def _require_distinct(self, direction: Direction, sources: Ids, destinations: Ids) -> None:
        apart = np.unique(destinations).size == destinations.size
        if direction == "d2d":
            apart = apart and not np.intersect1d(sources, destinations).size
        if not sources.size or not apart:
            no_sources = " and no sources" if direction == "d2d" else ""
            raise MisuseError(f"a {direction} transfer",
                              expected=f"at least one page, and destinations that are distinct{no_sources}",
                              got=f"{sources.tolist()} to {destinations.tolist()}",
                              remedy="list each destination once", clause="C8.3")


def page_runs(sources: Ids, destinations: Ids) -> tuple[PageRun, ...]:
    """Coalesce (source, destination) pairs, in the order given, into runs.  Python work per run, not per page.  (C8.3)

        sources       [ 7 8 9 | 3 | 12 13 ]
        destinations  [ 0 1 2 | 3 |  4  5 ]        ->  (7, 0, 3)  (3, 3, 1)  (12, 4, 2)

    A run goes on while both sides advance by one, so that a plane stores it in one piece on both sides.
    """
    assert sources.shape == destinations.shape, f"{sources.shape} sources, {destinations.shape} destinations"
    if not sources.size:
        return ()
    breaks = np.flatnonzero((np.diff(sources) != 1) | (np.diff(destinations) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((starts, [sources.size])))
    return tuple(
        PageRun(source, destination, count)
        for source, destination, count in zip(
            sources[starts].tolist(), destinations[starts].tolist(), counts.tolist(), strict=True
        )
    )
