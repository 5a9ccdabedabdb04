"""Transfers: the ledger of copies of whole page groups beside decode.  (C7.4, C8.3, C10.10)

    planned --submitted--> submitted --completed--> complete --publish--> published
       |                         |                     |
       +--abort--> aborted       |                     +--abort--> aborted
                                 +--publish, when ordered--> published    pins end with completion
                                 +--abort------------------> aborted      at completion

`plan` pins the logical pages: nobody releases, cuts or writes them (C7.4).  The pins end when the transfer is published
or aborted and its copies have run.  After `publish`, the owner may put the destination into a space or a table, or drop
the source.  `publish` requires that the copies have run or, if the destination is on the device, that its next users
are ordered after the copies.  It also requires that the content has not changed since the plan (C7.6).

This file coalesces runs of adjacent ids, and knows no device.  `mover.py` knows the planes and executes the runs.
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
    """One copy of page groups of one pool; made by `Transfers.plan`, and written by `Transfers` alone.

    Attributes:
        number: in the order of plans.
        direction: "d2h", "h2d" or "d2d".
        pool: its name.
        pages: the descriptors of the pool.
        logical: (n,) int32, the descriptors whose pages are copied; pinned while the copies run.
        runs: the copies; on the host side, ids are pages of the extent.
        host_pages: pages of the whole host extent; 0 for "d2d".
        contents: (n,) int64, content epochs of the pages when it was planned (C7.6).
        state: as drawn above.
        has_run: the copies have run, or were never submitted.
        is_ordered: the destination's next users wait for the copies on their stream.
        is_aborting: it becomes "aborted" when its copies have run.
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
        """How many pages it copies."""
        return self.logical.size

    @property
    def label(self) -> str:
        """Direction, number and pool, as errors print it."""
        return f"transfer {self.direction}#{self.number} of {self.page_count} pages of pool {self.pool}"


@dataclass
class TransferCounters:
    """Transfers by outcome, and the pages and runs of their plans; counters only grow."""

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
        """Pin the logical pages, and coalesce the copies of their page groups into runs.  (C7.4, C8.3)

        logical: (n,) int32, descriptors of pages that a space holds.  sources, destinations: (n,) int32, one pair for
        each descriptor: page groups of `pool` on the device, pages of a packed extent of `host_pages` pages on the
        host.  The caller has claimed the destinations.
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
        """Note that the copies were submitted."""
        self._require_state(transfer, "submit", "planned")
        transfer.state = "submitted"

    def ordered(self, transfer: Transfer) -> None:
        """Note that the destination's next users wait for the copies on their stream."""
        self._require_state(transfer, "an order after", "submitted", "complete")
        transfer.is_ordered = True

    def completed(self, transfer: Transfer) -> None:
        """Note that the copies have run: finish a pending abort, or unpin if published; a repeat is ignored (S26)."""
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
        """Let the owner use the destination or drop the source; refuse content that changed since the plan.  (C16.9)"""
        may_be_ordered = transfer.direction != "d2h" and transfer.is_ordered and not transfer.is_aborting
        self._require_state(transfer, "publish", *(("complete", "submitted") if may_be_ordered else ("complete",)))
        if not np.array_equal(transfer.pages.content[transfer.logical], transfer.contents):
            raise StaleHandle(f"publish of {transfer.label}", expected="pages with the content that was planned",
                              got="other content epochs", remedy="abort it and plan another transfer", clause="C7.6")
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
    """Coalesce (source, destination) pairs, in their order, into runs.  Python work per run, not per page.  (C8.3)

        sources       [ 7 8 9 | 3 | 12 13 ]
        destinations  [ 0 1 2 | 3 |  4  5 ]        ->  (7, 0, 3)  (3, 3, 1)  (12, 4, 2)

    A run extends while both sides advance by one, so that a plane stores it in one piece on both sides.
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
