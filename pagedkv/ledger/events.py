"""Events: what happens to page groups, delivered to observers in order.  (C6.5, C9.6, C13.3)

    kind          which page groups                                              row
    materialize   became members (of a checkpoint's copied tail too)             the row, None for a checkpoint
    publish       are entries of the device table now: new slices, or the        the row
                  whole membership of an activation
    trim          returned to the reservation of the same space                  the row
    release       returned to available with their last reference                the row, None for a continuation
    demote        left the Device for the Host      \\  nobody emits these yet:
    restore       came back from the Host           /  no page has a Host replica

A release that names a row is also the end of that row's membership.  It may list no page group, where all of them stay
with other spaces or with the retained continuation.  So a picture that is kept from events alone (materialize and
publish set blocks, trim removes them, a release of a row empties it) is at every moment what the rows map.  No event
lists pages that are bound and unmapped.

Ledgers record an event where they change something, so no event tells of a refused or aborted operation.  The store
delivers at the end of the operation.  Counters always count; events are made only while somebody observes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from pagedkv.errors import Caught, MisuseError
from pagedkv.ledger.free_runs import Ids

if TYPE_CHECKING:
    from pagedkv.ledger.active_spaces import TableSlices

_LOG = logging.getLogger("pagedkv")

EventKind = Literal["materialize", "publish", "trim", "demote", "restore", "release"]
EVENT_KINDS: tuple[EventKind, ...] = get_args(EventKind)


@dataclass(frozen=True)
class PageEvent:
    """What happened to page groups at consecutive blocks of one space.

    Attributes:
        kind: materialize, publish, trim, demote, restore or release.
        pool: whose page groups.
        row: the execution row, or None where an inactive space is meant.
        first_block: the block of the first page group; the others follow.
        page_ids: the page groups in block order; empty for a release of a row from which nothing became available.
    """

    kind: EventKind
    pool: str
    row: int | None
    first_block: int
    page_ids: tuple[int, ...]


PageObserver = Callable[[PageEvent], object]
"""Called with each event, in order; what it returns is ignored."""


class PageEvents:
    """Delivers to the observers of one store what its pools record.

    Attributes:
        is_observed: whether anybody observes; no event is made otherwise.
        pending: recorded and not yet delivered, in order.
    """

    def __init__(self) -> None:
        self.is_observed = False
        self.pending: list[PageEvent] = []
        self._observers: dict[int, PageObserver] = {}
        self._token_next = 1
        self._is_delivering = False

    def observe(self, observer: PageObserver) -> Callable[[], None]:
        """Call `observer` with every later event; returns a function that ends this, and may be called twice.

        Raises:
            MisuseError: the observer cannot be called.
        """
        if not callable(observer):
            raise MisuseError("an observer", expected="something that can be called with a PageEvent",
                              got=repr(observer), remedy="pass a function of one argument", clause="C9.6")
        token = self._token_next
        self._token_next += 1
        self._observers[token] = observer
        self.is_observed = True

        def unsubscribe() -> None:
            self._observers.pop(token, None)
            self.is_observed = bool(self._observers)

        return unsubscribe

    def deliver(self) -> None:
        """Call every observer with every pending event, in order.

        An error of an observer is logged, and the next observer is called.  What is no Exception (an interrupt, an
        exit, a cancellation) leaves this call after every observer has had every event.  An observer may use the store:
        this same call delivers what that causes, after the events that are pending now.
        """
        if not self.pending or self._is_delivering:
            return
        delivered, first = 0, None
        try:
            self._is_delivering = True
            for event in self.pending:  # grows while it is read, when an observer uses the store
                delivered += 1
                for observer in tuple(self._observers.values()):
                    with Caught(all_kinds=True) as caught:
                        observer(event)
                    if not isinstance(caught.error, Exception):
                        first = first or caught.error
                    else:
                        _LOG.error("observer %r failed at %s; the operation is valid", observer, event,
                                   exc_info=caught.error)
        finally:
            del self.pending[:delivered]
            self._is_delivering = False
        if first is not None:
            raise first


class PoolEvents:
    """Counts what happens to the page groups of one pool, and records it while somebody observes.

    Attributes:
        pages: page groups by kind so far.
    """

    def __init__(self, pool: str, events: PageEvents) -> None:
        self.pages: dict[EventKind, int] = dict.fromkeys(EVENT_KINDS, 0)
        self._pool = pool
        self._events = events

    def record(self, kind: EventKind, row: int | None, first_block: int, page_ids: Ids) -> None:
        """Record page groups at consecutive blocks of one space."""
        self.pages[kind] += page_ids.size
        if self._events.is_observed:
            self._events.pending.append(PageEvent(kind, self._pool, row, first_block, tuple(page_ids.tolist())))

    def record_slices(self, kind: EventKind, slices: TableSlices, table: Ids) -> None:
        """Record the page groups of slices of a host mirror, (C, L) int32, one event a row."""
        self.pages[kind] += int(slices.block_counts.sum())
        if self._events.is_observed:
            for row, first, count in slices.each():
                page_ids = tuple(table[row, first : first + count].tolist())
                self._events.pending.append(PageEvent(kind, self._pool, row, first, page_ids))
