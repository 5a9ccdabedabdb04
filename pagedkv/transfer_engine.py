"""TransferEngine: the ledger of transfers and the mover that executes them, in step.  (C7.4, C10.10, C12.1)

    transfer = engine.plan("d2h", pool, sources, destinations, host_pages=n)      # pinned
    engine.submit(transfer, host)        # False: every slot is in use; poll, and try again
    ...                                  # decode goes on beside the copies
    for done in engine.poll():           # or engine.wait(transfer)
        engine.publish(done)             # now the owner may use the destination and drop the source

A restore that must not block the host publishes at once: `engine.order_before(transfer, stream)` lets the next
users wait on their stream, and `publish` accepts that.  A copy that cannot be queued aborts its transfer: nothing
is published, and its pins go when what was queued has run (S53).

Read next: `store.py`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagedkv.devices.protocol import Stream
from pagedkv.errors import MisuseError, TransferFailed
from pagedkv.free_runs import Ids
from pagedkv.page_mover import PageMover, Route, Ticket
from pagedkv.pool import PagePool
from pagedkv.transfers import Contents, Direction, Transfer, Transfers

Host = npt.NDArray[np.uint8]


class TransferEngine:
    """Runs the transfers of one store.

    Attributes:
        ledger: what is planned, in flight and pinned.
        mover: what executes it.
    """

    def __init__(self, mover: PageMover) -> None:
        self.ledger = Transfers()
        self.mover = mover
        self._in_flight: dict[int, tuple[Transfer, Ticket, Host | None]] = {}

    def plan(
        self, direction: Direction, pool: PagePool, sources: Ids, destinations: Ids, *, host_pages: int = 0,
        contents: Contents | None = None,
    ) -> Transfer:
        """Plan a transfer and pin its page groups; see `Transfers.plan`."""
        return self.ledger.plan(direction, pool, sources, destinations, host_pages=host_pages, contents=contents)

    def submit(self, transfer: Transfer, host: Host | None = None, *, route: Route | None = None) -> bool:
        """Queue the copies behind everything the users' stream holds now; False: no slot is free, nothing changed.

        Args:
            transfer: planned.
            host: the whole pinned extent, for "d2h" and "h2d"; it stays the transfer's until that has run.
            route: None takes the one with fewer operations.

        Raises:
            MisuseError: it was submitted before, or the extent does not fit; nothing changed.
            TransferFailed: a copy could not be queued; the transfer is aborted, or will be when it has drained.
        """
        if transfer.state != "planned":
            raise MisuseError(f"submit of {transfer.label}", expected="a transfer that is planned",
                              got=f"one that is {transfer.state}", remedy="submit it once", clause="C7.4")
        try:
            ticket = self.mover.submit(
                transfer.direction, transfer.pool.name, transfer.runs, host=host, host_pages=transfer.host_pages,
                route=route,
            )
        except TransferFailed as failed:
            self._take(transfer, failed.fields["ticket"], host)
            self.ledger.abort(transfer)
            raise
        if ticket is None:
            return False
        self._take(transfer, ticket, host)
        return True

    def poll(self) -> list[Transfer]:
        """Return the transfers whose copies are newly found to have run, and that may be published or aborted."""
        found = []
        for transfer, ticket, _ in list(self._in_flight.values()):
            if self.mover.is_done(ticket):
                found += self._complete(transfer)
        return found

    def wait(self, transfer: Transfer) -> None:
        """Block until the copies have run; nothing to do when they have."""
        if transfer.number in self._in_flight:
            self.mover.wait(self._in_flight[transfer.number][1])
            self._complete(transfer)

    def drain(self) -> None:
        """Block until no copy is in flight: before the planes or the extents go away."""
        for transfer, _, _ in list(self._in_flight.values()):
            self.wait(transfer)

    def order_before(self, transfer: Transfer, stream: Stream) -> None:
        """Let what `stream` is given next run after the copies, without the host waiting for them."""
        if transfer.number in self._in_flight:
            self.mover.order_before(self._in_flight[transfer.number][1], stream)
        self.ledger.ordered(transfer)

    def publish(self, transfer: Transfer, contents: Contents | None = None) -> None:
        """Hand the destination to its owner; see `Transfers.publish`."""
        self.ledger.publish(transfer, contents)

    def abort(self, transfer: Transfer) -> bool:
        """End it unpublished: now, or (False) when its copies have run; `poll` and `wait` settle that."""
        return self.ledger.abort(transfer)

    def _take(self, transfer: Transfer, ticket: object, host: Host | None) -> None:
        assert isinstance(ticket, Ticket), "the mover fails with the ticket of what it queued"
        self.ledger.submitted(transfer)
        self._in_flight[transfer.number] = (transfer, ticket, host)

    def _complete(self, transfer: Transfer) -> list[Transfer]:
        _, _, host = self._in_flight.pop(transfer.number)
        if host is not None and transfer.direction == "d2h":
            self.mover.require_landed(transfer.pool.name, transfer.runs, host, transfer.host_pages)
        self.ledger.completed(transfer)
        return [transfer] if transfer.state == "complete" else []
