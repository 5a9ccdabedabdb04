"""Events: changes of page groups, delivered to observers in order.  (C6.5, C9.6, C13.3)

    kind          the page groups ...                                            row
    materialize   became members (also the copied tail of a checkpoint)          the row, None for a checkpoint
    publish       have their entries in the device table: new slices, or the     the row
                  whole membership of an activation
    trim          returned to the reservation of the same space                  the row
    release       became available, because nobody references them any more      the row, None for a continuation
    demote        became available, because the Host keeps the pages             None
    restore       came back from the Host, for an activation from a              None
                  continuation

A release with a row also ends the membership of that row.  It lists no page group if other spaces or the retained
continuation hold all of them.  A truncate that leaves pages to other spaces releases the row, and publishes the rest.
So an observer can follow from events alone which pages each row maps: materialize and publish set blocks, trim removes
them, and a release of a row empties it.  No event lists pages that are bound and unmapped.

A ledger records an event when it writes the change, so a refused or aborted operation causes none.  The store delivers
events at the end of the operation.  Counters always count; events are created only while somebody observes.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from pagedkv.errors import Caught, MisuseError, shown
from pagedkv.ledger.free_runs import Ids
from pagedkv.values.checks import is_on_the_stack

if TYPE_CHECKING:
    from pagedkv.ledger.active_spaces import TableSlices

_LOG = logging.getLogger("pagedkv")

EventKind = Literal["materialize", "publish", "trim", "demote", "restore", "release"]
EVENT_KINDS: tuple[EventKind, ...] = get_args(EventKind)


@dataclass(frozen=True)
class PageEvent:
    """One change of page groups at consecutive blocks of one space.

    Attributes:
        kind: materialize, publish, trim, demote, restore or release.
        pool: whose page groups.
        row: the execution row, or None for an inactive space.
        first_block: the block of the first page group; the others follow.
        page_ids: the page groups in block order; empty if a row ended and none of its page groups became available.
    """

    kind: EventKind
    pool: str
    row: int | None
    first_block: int
    page_ids: tuple[int, ...]


PageObserver = Callable[[PageEvent], object]
"""Called with each event, in order; its result is ignored."""


class PageEvents:
    """Delivers the events of the pools of one store to its observers.

    Attributes:
        is_observed: whether anybody observes; pools record events only then.
        pending: events that are recorded and not yet delivered, in order.
    """

    def __init__(self) -> None:
        self.is_observed = False
        self.pending: deque[PageEvent] = deque()
        self._observers: dict[int, PageObserver] = {}
        self._token_next = 1
        self._delivering: FrameType | None = None  # the call of `deliver` that is on the stack, or was interrupted

    def observe(self, observer: PageObserver) -> Callable[[], None]:
        """Call `observer` with every later event, and return a function that ends this and may be called twice."""
        if not callable(observer):
            raise MisuseError("an observer", expected="something that can be called with a PageEvent",
                              got=shown(observer), remedy="pass a function of one argument", clause="C9.6")
        token = self._token_next
        self._token_next += 1
        self._observers[token] = observer
        self.is_observed = True

        def unsubscribe() -> None:
            self._observers.pop(token, None)
            self.is_observed = bool(self._observers)

        return unsubscribe

    def end(self) -> None:
        """End every observation."""
        self._observers.clear()
        self.is_observed = False

    def deliver(self) -> None:
        """Call every observer with every pending event, in order; the error of an observer is logged.

        An error that is no Exception (an interrupt, an exit, a cancellation) leaves this call after every observer got
        every event.  An observer may use the store: this same call delivers the new events, after the pending ones.
        If an interrupt ends this call outside of an observer's call, the next operation goes on with the event of that
        moment, which an observer may get twice.
        """
        if self._delivering is not None and is_on_the_stack(self._delivering):
            return
        first: BaseException | None = None
        self._delivering = sys._getframe()
        while self.pending:
            event = self.pending[0]
            for observer in tuple(self._observers.values()):
                with Caught(all_kinds=True) as caught:
                    observer(event)
                if not isinstance(caught.error, Exception):
                    first = first or caught.error
                else:
                    _LOG.error("observer %s failed at %s; the operation is valid", shown(observer), event,
                               exc_info=caught.error)
            self.pending.popleft()  # last: after an interrupt no observer misses the event
        self._delivering = None
        if first is not None:
            raise first


class PoolEvents:
    """Counts the changes of the page groups of one pool, and records events while somebody observes.

    Attributes:
        pages: page groups by kind of event so far.
    """

    def __init__(self, pool: str, events: PageEvents) -> None:
        self.pages: dict[EventKind, int] = dict.fromkeys(EVENT_KINDS, 0)
        self._pool = pool
        self._events = events

    def record(self, kind: EventKind, row: int | None, first_block: int, page_ids: Ids) -> None:
        """Record a change of page groups at consecutive blocks of one space."""
        self.pages[kind] += page_ids.size
        if self._events.is_observed:
            self._events.pending.append(PageEvent(kind, self._pool, row, first_block, tuple(page_ids.tolist())))

    def record_slices(self, kind: EventKind, slices: TableSlices, table: Ids) -> None:
        """Record a change of the page groups in slices of a host mirror, (C, L) int32: one event per slice."""
        self.pages[kind] += slices.pages
        if self._events.is_observed:
            for row, first, count in slices.each():
                page_ids = tuple(table[row, first : first + count].tolist())
                self._events.pending.append(PageEvent(kind, self._pool, row, first, page_ids))


    def record_runs(self, kind: EventKind, blocks: npt.NDArray[np.integer[Any]], page_ids: Ids) -> None:
        """Record a change of page groups of an inactive space at ascending blocks: one event per run of blocks."""
        edges = [0, *(np.flatnonzero(blocks[1:] - blocks[:-1] != 1) + 1).tolist(), blocks.size]
        for start, end in itertools.pairwise(edges):
            self.record(kind, None, blocks.item(start), page_ids[start:end])
