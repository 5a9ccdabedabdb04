"""HostCopies: runs the copies of demotions and activations, beside decode.  (C7.4, C8.3, C10.10)

    begin     submit what has a free slot of the mover; the rest waits, and nobody blocks (S57)
    advance   submit more, and say whether all copies have run
    run       block until they have
    verify    in sanitizer mode, compare the copies with their sources
    fail      block until what was queued has run: then the claims may be given back (S27)
    forget    the claims have ended

The ledger has claimed both ends: page groups that are in no table, and records that no page names.  So the copies may
run at any time until the claims end.  In sanitizer mode a job also takes digests of the committed bytes: of a page
group before its copy, of the record behind it, and of the page group that was restored from this record later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from pagedkv.devices.protocol import Array
from pagedkv.ledger.demotions import Demotion
from pagedkv.ledger.host_arena import UNIT_BYTES
from pagedkv.ledger.transaction import HostCopy, Transaction
from pagedkv.store.sanitizer import Sanitizer
from pagedkv.transfer.digest import Fingerprints
from pagedkv.transfer.mover import PageMover, Ticket

Direction = Literal["d2h", "h2d"]


@dataclass(eq=False)
class CopyJob:
    """The copies of one demotion or activation; written by `HostCopies` alone.

    Attributes:
        claims: what the ledger prepared.
        waiting: copies that no slot was free for, in order.
        tickets: of the copies that were submitted.
        is_aborting: its claims are given back when the copies have run.
    """

    claims: Demotion | Transaction
    waiting: list[tuple[Direction, HostCopy]] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)
    is_aborting: bool = False

    @property
    def copies(self) -> list[tuple[Direction, HostCopy]]:
        """Every copy, out before in."""
        if isinstance(self.claims, Demotion):
            return [("d2h", copy) for copy in self.claims.copies]
        out: list[tuple[Direction, HostCopy]] = [("d2h", copy) for copy in self.claims.backups]
        return [*out, *(("h2d", copy) for copy in self.claims.restores)]


class HostCopies:
    """Runs the copies of one store.

    Args:
        mover: executes them.
        arena: (bytes,) uint8, pinned.
        sanitizer: of the store, or None.

    Attributes:
        jobs: whose copies may still run, oldest first.
    """

    def __init__(self, mover: PageMover, arena: Array, sanitizer: Sanitizer | None) -> None:
        self.jobs: list[CopyJob] = []
        self.mover = mover
        self._arena = arena
        self._sanitizer = sanitizer
        # Of records, by pool and place: how many columns were noted, and their digests (planes,).
        self._digests: dict[tuple[str, int], tuple[int, Fingerprints]] = {}

    def begin(self, job: CopyJob) -> None:
        """Submit the copies of a job behind the present work of the store's stream, as far as slots are free."""
        self.jobs.append(job)
        job.waiting = job.copies
        if self._sanitizer is not None:
            self._note_sources(self._sanitizer, job)
        self._submit(job)

    def advance(self, job: CopyJob) -> bool:
        """Submit what waits, as far as slots are free, and say whether all copies have run.

        Raises:
            TransferFailed: a copy could not be queued; call `fail`.
        """
        return self._submit(job) and all(self.mover.is_done(ticket) for ticket in job.tickets)

    def run(self, job: CopyJob) -> None:
        """Block until the copies of a job have run; raises as `advance`."""
        while not self.advance(job):
            self._wait(job if job.tickets else self.jobs[0])

    def verify(self, job: CopyJob) -> None:
        """Demand that the copies of a job, which have run, are there.

        Raises:
            Corruption: in sanitizer mode, a copy differs from its source; the store is latched.
        """
        for direction, copy in job.copies:
            if direction == "d2h":
                self.mover.require_landed(copy.pool, _offsets(copy))
            if self._sanitizer is not None:
                self._compare(self._sanitizer, direction, copy)

    def fail(self, job: CopyJob) -> None:
        """Block until what was queued of a job has run, and forget the rest.  (S53)"""
        job.waiting.clear()
        job.is_aborting = True
        self._wait(job)

    def forget(self, job: CopyJob) -> None:
        """Drop a job whose claims have ended."""
        if job in self.jobs:
            self.jobs.remove(job)

    def drain(self) -> None:
        """Block until no copy runs; before planes and arena are freed."""
        for job in self.jobs:
            self._wait(job)

    # ---- helpers ----------------------------------------------------------------------------------

    def _submit(self, job: CopyJob) -> bool:
        """Submit what waits, as far as slots are free; say whether nothing waits any more."""
        while job.waiting:
            direction, copy = job.waiting[0]
            if not self.mover.submit(direction, copy.pool, copy.page_ids, _offsets(copy), job.tickets):
                return False
            del job.waiting[0]
        return True

    def _wait(self, job: CopyJob) -> None:
        for ticket in job.tickets:
            self.mover.wait(ticket)

    def _note_sources(self, sanitizer: Sanitizer, job: CopyJob) -> None:
        """Take digests of page groups ahead of their copy: those of the records are to be the same.  (C7.4)"""
        for direction, copy in job.copies:
            if direction == "d2h":
                digests = sanitizer.fingerprints.fingerprint(copy.pool, copy.page_ids, copy.columns)
                noted = zip(copy.places.tolist(), copy.columns.tolist(), digests, strict=True)
                self._digests.update(((copy.pool, place), (count, row)) for place, count, row in noted)

    def _compare(self, sanitizer: Sanitizer, direction: Direction, copy: HostCopy) -> None:
        """Compare the destination of a copy with what was noted of the record, also of columns that were cut since."""
        counts, digests = zip(*(self._digests[copy.pool, place] for place in copy.places.tolist()), strict=True)
        expected, columns = np.stack(digests), np.array(counts, np.int32)
        fingerprints = sanitizer.fingerprints
        if direction == "d2h":
            got = fingerprints.fingerprint_records(copy.pool, self._arena, _offsets(copy), columns)
        else:
            got = fingerprints.fingerprint(copy.pool, copy.page_ids, columns)
        what = "the copy on the Host" if direction == "d2h" else "the restored copy"
        fingerprints.require_same(what, copy.pool, copy.page_ids, expected, got)


def _offsets(copy: HostCopy) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return (n,) int64: where the records begin in the arena, in bytes."""
    return copy.places.astype(np.int64) * UNIT_BYTES
