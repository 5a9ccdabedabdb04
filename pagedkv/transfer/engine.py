"""TransferEngine: the ledger of transfers, and the mover that executes them.  (C7.4, C10.10, C12.1)

    transfer = engine.ledger.plan("d2h", "main", pages, logical, sources, destinations, host_pages=n)    # pinned
    engine.submit(transfer, host)        # False: every slot is in use; poll, and try again
    ...                                  # decode runs beside the copies
    for done in engine.poll():           # or engine.wait(transfer)
        engine.publish(done)             # now the owner may use the destination and drop the source

A restore that must not block the host can publish before its copies have run.  `engine.order_before(transfer, stream)`
makes the next users wait on their stream; then `publish` accepts the transfer.  If a copy cannot be queued, the
transfer is aborted: nothing is published, and its pins end when the queued copies have run (S53).

In sanitizer mode `submit` computes digests of the committed bytes of the source, and `publish` of the destination.
Both calls may then wait for the device, and a difference stops the store (C12.4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pagedkv.devices.protocol import Stream
from pagedkv.errors import MisuseError, TransferFailed
from pagedkv.ledger.free_runs import Ids
from pagedkv.transfer.digest import Fingerprints, PageFingerprints
from pagedkv.transfer.mover import Method, PageMover, Ticket
from pagedkv.transfer.plan import Transfer, Transfers
from pagedkv.values.quantities import PAGE_TOKENS

Host = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class _SourceDigests:
    """Digests of the first `columns` rows of each source page of a transfer, at its `submit`."""

    columns: npt.NDArray[np.int32]
    digests: Fingerprints
    host: Host | None


class TransferEngine:
    """Runs the transfers of one store.

    Args:
        mover: executes them.
        fingerprints: of the same planes, in sanitizer mode; None compares nothing.

    Attributes:
        ledger: the transfers that have not ended.
        mover: executes them.
    """

    def __init__(self, mover: PageMover, *, fingerprints: PageFingerprints | None = None) -> None:
        self.ledger = Transfers()
        self.mover = mover
        self._fingerprints = fingerprints
        self._source_digests: dict[int, _SourceDigests] = {}
        self._in_flight: dict[int, tuple[Transfer, Ticket, Host | None]] = {}

    def submit(
        self, transfer: Transfer, host: Host | None = None, *, method: Method | None = None,
        columns: npt.NDArray[np.int32] | None = None,
    ) -> bool:
        """Queue the copies behind the present work of the users' stream; return False if no slot is free.

        host: the whole pinned extent, for "d2h" and "h2d"; nobody else uses it until the copies have run.
        method: None chooses the one with fewer operations.
        columns: (n,) int32, committed columns of each page, 0 to 64, for the digests; None counts whole pages.
        """
        if transfer.state != "planned":
            raise MisuseError(f"submit of {transfer.label}", expected="a transfer that is planned",
                              got=f"one that is {transfer.state}", remedy="submit it once", clause="C7.4")
        source = self._digest_source(transfer, host, columns)
        try:
            ticket = self.mover.submit(
                transfer.direction, transfer.pool, transfer.runs, host=host, host_pages=transfer.host_pages,
                method=method,
            )
        except TransferFailed as failed:
            self._take(transfer, failed.fields["ticket"], host)
            self.ledger.abort(transfer)
            raise
        if ticket is None:
            return False
        self._take(transfer, ticket, host)
        if source is not None:
            self._source_digests[transfer.number] = source
        return True

    def poll(self) -> list[Transfer]:
        """Return the transfers whose copies have run since the last call; each may be published or aborted."""
        completed = []
        for transfer, ticket, _ in list(self._in_flight.values()):
            if self.mover.is_done(ticket):
                completed += self._complete(transfer)
        return completed

    def wait(self, transfer: Transfer) -> None:
        """Block until the copies have run."""
        if transfer.number in self._in_flight:
            self.mover.wait(self._in_flight[transfer.number][1])
            self._complete(transfer)

    def drain(self) -> None:
        """Block until no copy is in flight; call it before the planes or the extents are freed."""
        for transfer, _, _ in list(self._in_flight.values()):
            self.wait(transfer)

    def order_before(self, transfer: Transfer, stream: Stream) -> None:
        """Make the next work of `stream` run after the copies; the host does not wait."""
        if transfer.number in self._in_flight:
            self.mover.order_before(self._in_flight[transfer.number][1], stream)
        self.ledger.ordered(transfer)

    def publish(self, transfer: Transfer) -> None:
        """Give the destination to its owner; in sanitizer mode, Corruption if its bytes differ from the source."""
        if transfer.number in self._source_digests:
            self._compare(transfer)
        self.ledger.publish(transfer)

    def abort(self, transfer: Transfer) -> bool:
        """End it unpublished: now (True), or when `poll` or `wait` notices that its copies have run (False)."""
        self._source_digests.pop(transfer.number, None)
        return self.ledger.abort(transfer)

    def _digest_source(
        self, transfer: Transfer, host: Host | None, columns: npt.NDArray[np.int32] | None
    ) -> _SourceDigests | None:
        if self._fingerprints is None:
            return None
        counts = np.full(transfer.page_count, PAGE_TOKENS, np.int32) if columns is None else columns
        if counts.shape != (transfer.page_count,) or counts.min() < 0 or counts.max() > PAGE_TOKENS:
            raise MisuseError(f"committed columns of {transfer.label}",
                              expected=f"{transfer.page_count} numbers, 0 to 64", got=counts.tolist(),
                              remedy="pass one count per page", clause="C7.4")
        is_host = transfer.direction == "h2d"
        if is_host or transfer.direction == "d2h":
            self.mover.require_extent(transfer.pool, transfer.direction, host, transfer.host_pages)
        sources = _ids(transfer, "source")
        return _SourceDigests(counts.copy(), self._digest(transfer, host if is_host else None, sources, counts), host)

    def _compare(self, transfer: Transfer) -> None:
        assert self._fingerprints is not None, "the source has digests"
        if transfer.is_ordered:
            self.wait(transfer)
        if transfer.state != "complete":
            return  # the ledger refuses it
        source = self._source_digests[transfer.number]
        destinations = _ids(transfer, "destination")
        host = source.host if transfer.direction == "d2h" else None
        copied = self._digest(transfer, host, destinations, source.columns)
        self._fingerprints.require_same(f"publish of {transfer.label}: the copy", transfer.pool, destinations,
                                        source.digests, copied)
        del self._source_digests[transfer.number]

    def _digest(
        self, transfer: Transfer, host: Host | None, pages: Ids, columns: npt.NDArray[np.int32]
    ) -> Fingerprints:
        assert self._fingerprints is not None, "in sanitizer mode"
        if host is None:
            return self._fingerprints.fingerprint(transfer.pool, pages, columns)
        return self._fingerprints.fingerprint_extent(transfer.pool, host, transfer.host_pages, pages, columns)

    def _take(self, transfer: Transfer, ticket: object, host: Host | None) -> None:
        assert isinstance(ticket, Ticket), "the mover fails with the ticket of what it queued"
        self.ledger.submitted(transfer)
        self._in_flight[transfer.number] = (transfer, ticket, host)

    def _complete(self, transfer: Transfer) -> list[Transfer]:
        _, _, host = self._in_flight.pop(transfer.number)
        if host is not None and transfer.direction == "d2h":
            self.mover.require_landed(transfer.pool, transfer.runs, host, transfer.host_pages)
        self.ledger.completed(transfer)
        return [transfer] if transfer.state == "complete" else []


def _ids(transfer: Transfer, side: Literal["source", "destination"]) -> Ids:
    """Return the page ids of one side, in the order of the plan."""
    return np.concatenate([
        np.arange(first, first + run.count, dtype=np.int32)
        for run in transfer.runs for first in (run.source if side == "source" else run.destination,)
    ])
