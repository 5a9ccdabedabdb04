"""LogicalPages: the identity of page content, independent of the place of its bytes.  (C7)

An address space's membership is an ordered list of logical pages, not of physical ids: content keeps its identity when
its replicas change (C16.5).  There are as many descriptors as Device and Host pages together.  A descriptor is one
entry of each of these columns:

    serial         int64   generation of the descriptor; 0 while it is free
    content        int64   content epoch: advances when materialized and when committed columns are withdrawn
    committed      int32   committed columns 0..64; derived from the row's frontier while the page has a writer
    protected      int32   protected columns 0..64: the maximum over the inactive spaces (C7.8)
    protectors     int32   inactive spaces that protect all 64 columns
    references     int32   address spaces that hold it
    active         int32   active address spaces that hold it
    writer         int32   execution row that may append, or -1; a writer implies one reference (C7.5)
    device         int32   page group id of the Device replica, or -1
    host           int32   first arena unit of the Host replica's record, or -1 (C8.1)
    block          int32   logical block, the same in every space that holds it, or -1
    pins           int32   transactions and transfers that read it, or fill it (C7.4)
    host_content   int64   content epoch of the Host replica
    host_columns   int32   columns that the Host replica covers

Life of a descriptor:

    free --describe (references 1, writer)--------------------+--> written --freeze--> immutable --release--> free
      ^--describe_copy (references 0, one pin)--publish_copy--+                 ^  |
                            |                                                   +--+ share: references + 1
                            +--abort_copy--> free

Placements (C7.3): device only, host only, both.  A page without a Device replica may be held, shared by inactive
spaces, protected and released; it cannot be written, copied, cut inside or activated.

A method writes slices of columns: for private pages once per window of bound pages, not once per step.  A bound page is
a member if it lies below its writer's `mapped_end` (C6.5, C7 preamble).

Methods assert their preconditions over all pages before they write.  `logical` is always (n,) int32, distinct
descriptors, or their index from `index_of`; a caller of several methods computes that index once.  A precondition
compares the least or the greatest value of a column: that takes 0.5 us for 64 pages, and `(column >= least).all()` 2.2.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagedkv.errors import MisuseError
from pagedkv.ledger.free_runs import FreeRuns, Ids, Index, count_of, highest, lowest
from pagedkv.ledger.host_arena import HostArena
from pagedkv.ledger.pool import NOTED_MAX
from pagedkv.values.quantities import PAGE_SHIFT, PAGE_TOKENS

Mask = npt.NDArray[np.bool_]
Columns = npt.NDArray[np.int32]
Pages = Ids | Index

NO_WRITER = -1

_FREE = np.array([[0], [0], [0], [0], [0], [NO_WRITER], [-1], [-1], [-1]], np.int32)
"""(9, 1): the int32 columns of a free descriptor, from `committed` to `block`."""

_NO_IDS: Ids = np.zeros(0, np.int32)
_ONE = np.ones((), np.int32)  # an operand of the columns' own type: 0.4 us less than a Python 1


def at_least(values: Columns, least: int) -> bool:
    """Say whether no value is below `least`."""
    return not values.size or values.item(values.argmin()) >= least


def at_most(values: Columns, most: int) -> bool:
    """Say whether no value is above `most`."""
    return not values.size or values.item(values.argmax()) <= most


class LogicalPages:
    """Descriptors of one pool as columns; their order has no meaning.  The methods below alone write them.

    Args:
        device_pages: page groups of the pool.
        arena: of the Host replicas of all pools, or None.
        record_units: of one Host page of this pool.

    Attributes:
        hosted: how many pages have a Host replica.
    """

    def __init__(self, device_pages: int, arena: HostArena | None = None, record_units: int = 1) -> None:
        self.arena = HostArena(0) if arena is None else arena
        self.record_units = record_units
        self.hosted = 0
        host_pages = self.arena.units // record_units
        self.capacity = capacity = device_pages + host_pages
        self.has_host_pages = host_pages > 0
        self.free_runs = FreeRuns(capacity)
        self._serial = np.zeros(capacity, np.int64)
        self._content = np.zeros(capacity, np.int64)
        self._trimmed: list[Ids] = []
        # Rows of one matrix, so that one assignment frees a descriptor: 0.5 us for 64 pages, column by column 2.
        self._columns = np.repeat(_FREE, capacity, axis=1)
        self.committed: Columns = self._columns[0]
        self.protected: Columns = self._columns[1]
        self.protectors: Columns = self._columns[2]
        self.references: Columns = self._columns[3]
        self.active: Columns = self._columns[4]
        self.writer: Columns = self._columns[5]
        self.device: Columns = self._columns[6]
        self.host: Columns = self._columns[7]
        self.block: Columns = self._columns[8]
        self.pins = np.zeros(capacity, np.int32)
        self.pins_total = 0
        self.host_content = np.zeros(capacity, np.int64)
        self.host_columns = np.zeros(capacity, np.int32)
        self._stamp_next = 1

    @property
    def serial(self) -> npt.NDArray[np.int64]:
        """Generations, those of trimmed pages renewed."""
        if self._trimmed:
            self._renew_trimmed()
        return self._serial

    @property
    def content(self) -> npt.NDArray[np.int64]:
        """Content epochs, those of trimmed pages renewed."""
        if self._trimmed:
            self._renew_trimmed()
        return self._content

    # ---- private pages ----------------------------------------------------------------------------

    def describe(self, page_ids: Ids, *, writer: int, first_block: int, after: int = -1) -> Ids:
        """Take descriptors, with new content epochs, for pages that row `writer` will map from a block on.  (C7.5)"""
        logical, at = self._take(page_ids, first_block, after)
        self.references[at] = 1
        self.active[at] = 1
        self.writer[at] = writer
        return logical

    def index_of(self, logical: Pages) -> Index:
        """Return descriptors as a fast index of the columns."""
        return self.free_runs.index_of(logical)

    def page_ids(self, logical: Pages) -> Ids:
        """Return a copy of the page group ids, -1 without a Device replica."""
        at = self.free_runs.index_of(logical)
        page_ids: Ids = self.device[at]
        return page_ids.copy() if isinstance(at, slice) else page_ids

    def trim(self, logical: Ids) -> None:
        """Note trimmed pages; `serial` and `content` renew them when somebody reads one of them.  (C7.3, C7.6)"""
        self._trimmed.append(logical)
        if len(self._trimmed) == NOTED_MAX:
            self._renew_trimmed()

    def renew(self, logical: Pages) -> None:
        """Give descriptors new serials and content epochs.  (C7.3, C7.6)"""
        at = self.free_runs.index_of(logical)
        self._serial[at] = self._stamps(count_of(at))
        self._content[at] = self._stamps(count_of(at))

    def renew_content(self, logical: Pages) -> None:
        """Give descriptors new content epochs: their bytes change from now on.  (C7.6)"""
        at = self.free_runs.index_of(logical)
        self.content[at] = self._stamps(count_of(at))

    def recycle(self, logical: Pages) -> None:
        """Free descriptors, which have no pins.  (C7.3)"""
        at = self.free_runs.index_of(logical)
        if self.hosted:
            self.free_records(at)
        self.serial[at] = 0
        self._columns[:, at] = _FREE
        self.free_runs.give(at)

    def freeze(self, logical: Pages, committed: int) -> None:
        """Remove the writer, and set the committed columns.  (C7.5, C10.6)"""
        at = self.free_runs.index_of(logical)
        assert at_least(self.writer[at], 0), self._state("freezing", at)
        assert 0 <= committed <= PAGE_TOKENS, f"{committed} columns in a page"
        self.writer[at] = NO_WRITER
        self.committed[at] = committed

    def thaw(self, logical: Pages, writer: int) -> None:
        """Set row `writer` as the writer of pages that one space holds.  (C7.5, C10.4)"""
        at = self.free_runs.index_of(logical)
        assert at_most(self.writer[at], NO_WRITER), self._state("a second writer", at)
        assert self._are_private(at), self._state("a writer of shared pages", at)
        assert at_least(self.device[at], 0), self._state("a writer without a Device replica", at)
        assert at_most(self.protected[at], 0), self._state("a writer of protected columns", at)
        assert not self.pins_total or at_most(self.pins[at], 0), self._state("a writer of pinned pages", at)
        self.writer[at] = writer

    # ---- references -------------------------------------------------------------------------------

    def share(self, logical: Pages) -> None:
        """Add a reference of an inactive space to full pages without a writer.  (C7.5, C10.5, C16.8)"""
        at = self.free_runs.index_of(logical)
        references = self.references[at]
        assert at_least(references, 1), self._state("sharing pages that nobody holds", at)
        assert at_most(self.writer[at], NO_WRITER), self._state("sharing pages with a writer", at)
        assert at_least(self.committed[at], PAGE_TOKENS), self._state("sharing pages that are not full", at)
        self.references[at] = references + _ONE

    def share_active(self, logical: Pages) -> None:
        """Add an active reference: `share` and `activate` in one, for a Fork.  (C7.5, C7.7, C10.5)"""
        at = self.free_runs.index_of(logical)
        on_device = not self.has_host_pages or at_least(self.device[at], 0)
        assert on_device, self._state("activating pages without a Device replica", at)
        self.share(at)
        self.active[at] += _ONE

    def activate(self, logical: Pages) -> None:
        """Turn one inactive reference of each page into an active one.  (C7.7)"""
        at = self.free_runs.index_of(logical)
        active = self.active[at]
        assert at_least(self.references[at] - active, 1), self._state("activating", at)
        on_device = not self.has_host_pages or at_least(self.device[at], 0)
        assert on_device, self._state("activating pages without a Device replica", at)
        self.active[at] = active + _ONE

    def deactivate(self, logical: Pages) -> None:
        """Turn one active reference of each page, which has no writer, into an inactive one.  (C9.8)"""
        at = self.free_runs.index_of(logical)
        active = self.active[at]
        assert at_least(active, 1), self._state("deactivating", at)
        assert at_most(self.writer[at], NO_WRITER), self._state("deactivating pages with a writer", at)
        self.active[at] = active - _ONE

    def release(self, logical: Pages) -> Ids:
        """Drop one inactive reference of each page, and free descriptors without a reference.  (C7.3, C9.8)

        Returns the page group ids of the freed descriptors in order, -1 for one without a Device replica.
        """
        at = self.free_runs.index_of(logical)
        assert at_least(self.references[at] - self.active[at], 1), self._state("releasing", at)
        return self._drop_reference(at)

    def release_active(self, logical: Pages) -> Ids:
        """Drop one active reference of each page: `deactivate` and `release` in one, for a finish.  (C9.8)"""
        at = self.free_runs.index_of(logical)
        active = self.active[at]
        assert at_least(active, 1), self._state("releasing actively", at)
        assert at_most(self.writer[at], NO_WRITER), self._state("releasing pages with a writer", at)
        left = active - _ONE  # a copy: `active` may be a view
        page_ids = self._drop_reference(at)
        self.active[at] = left
        return page_ids

    # ---- protection and content -------------------------------------------------------------------

    def raise_protection(self, logical: Pages, before: Columns, columns: Columns) -> None:
        """Raise the columns that one inactive space protects of each page, from `before` to `columns`.  (C7.8)"""
        at = self.free_runs.index_of(logical)
        assert at_most(self.writer[at], NO_WRITER), self._state("protecting pages with a writer", at)
        assert at_least(columns - before, 0), self._state("raising protection", at)
        assert at_least(self.committed[at] - columns, 0), self._state("protecting what is not committed", at)
        self.protectors[at] += (columns >> PAGE_SHIFT) - (before >> PAGE_SHIFT)
        self.protected[at] = np.maximum(self.protected[at], columns)

    def lower_protection(self, logical: Pages, before: Columns, most: Columns) -> None:
        """Lower what one inactive space protects from `before`; `most` is the new maximum over partial ones.  (C7.8)"""
        at = self.free_runs.index_of(logical)
        left = self.protectors[at] - (before >> PAGE_SHIFT)
        assert at_least(left, 0), self._state("lowering protection", at)
        assert at_least(self.protected[at] - before, 0), self._state("lowering protection", at)
        self.protectors[at] = left
        self.protected[at] = np.maximum(np.minimum(left, _ONE) << PAGE_SHIFT, most)

    def withdraw(self, logical: Pages, columns: int) -> None:
        """Cut pages of one space to `columns` committed columns; a page that loses some gets a new epoch.  (C9.10)

        A page on the Host alone keeps its record, which holds what is left; beside a Device replica the record goes.
        """
        at = self.free_runs.index_of(logical)
        committed = self.committed[at]
        assert at_most(self.writer[at], NO_WRITER), self._state("a cut of pages with a writer", at)
        assert self._are_private(at), self._state("a cut of shared pages", at)
        assert at_most(self.protected[at], columns), self._state(f"a cut to {columns} protected columns", at)
        assert at_least(committed, columns), self._state(f"a cut to {columns} columns", at)
        if committed.size and highest(committed) > columns:
            changed = self._where(at, committed > columns)
            self.committed[changed] = columns
            self.renew_content(changed)
            if self.hosted:
                self._cut_replicas(changed, columns)

    # ---- copies and pins --------------------------------------------------------------------------

    def describe_copy(self, page_ids: Ids, *, block: int, columns: int, after: int = -1) -> Ids:
        """Take descriptors for a copy of `columns` committed columns, pinned until the copy ends.  (C7.4)"""
        assert 1 <= columns <= PAGE_TOKENS, f"a copy of {columns} columns"
        logical, at = self._take(page_ids, block, after)
        self.committed[at] = columns
        self.pins[at] = 1
        self.pins_total += logical.size
        return logical

    def publish_copy(self, logical: Pages, *, writer: int, active: int) -> None:
        """Give filled descriptors to one space: `active` 1 with its row as writer, or 0 and no writer.  (C7.4)"""
        at = self.free_runs.index_of(logical)
        self._require_filled("publishing a copy", at)
        self._unpin(at)
        self.references[at] = 1
        self.active[at] = active
        self.writer[at] = writer

    def abort_copy(self, logical: Pages) -> None:
        """Free descriptors whose copy failed or was given up.  (C7.4, C10.2)"""
        at = self.free_runs.index_of(logical)
        self._require_filled("aborting a copy", at)
        self._unpin(at)
        self.recycle(at)

    def pin(self, logical: Pages) -> None:
        """Pin pages that a copy reads: nobody may release, cut or write them.  (C7.4)"""
        at = self.free_runs.index_of(logical)
        assert at_least(self.references[at], 1), self._state("pinning pages that nobody holds", at)
        self.pins[at] += _ONE
        self.pins_total += count_of(at)

    def unpin(self, logical: Pages) -> None:
        """Undo one `pin` (S35)."""
        at = self.free_runs.index_of(logical)
        assert at_least(self.pins[at], 1), self._state("unpinning", at)
        assert at_least(self.references[at], 1), self._state("unpinning", at)
        self._unpin(at)

    # ---- replicas ---------------------------------------------------------------------------------

    def is_idle(self, at: Index) -> Mask:
        """Say of each page whether its Device replica may be dropped or copied away: nobody uses it now.  (C7.7)"""
        idle: Mask = (self.device[at] >= 0) & (self.active[at] == 0) & (self.writer[at] < 0) & (self.pins[at] == 0)
        return idle

    def is_on_host(self, at: Index) -> Mask:
        """Say of each page whether its Host replica has its content and covers its committed columns.  (C7.2)"""
        valid: Mask = (self.host[at] >= 0) & (self.host_content[at] == self.content[at])
        return valid & (self.host_columns[at] >= self.committed[at])

    def add_host(self, logical: Pages, places: Ids, columns: Columns) -> None:
        """Note Host replicas with `columns` of the present content; an older one of a page is freed.  (C7.2, C7.6)"""
        at = self.free_runs.index_of(logical)
        self.free_records(at)
        self.host[at] = places
        self.host_content[at] = self.content[at]
        self.host_columns[at] = columns
        self.hosted += places.size

    def add_device(self, logical: Pages, page_ids: Ids) -> None:
        """Note Device replicas, restored from the Host.  (C7.4)"""
        at = self.free_runs.index_of(logical)
        assert at_most(self.device[at], -1), self._state("a second Device replica", at)
        assert self.is_on_host(at).all(), self._state("restoring what the Host does not hold", at)
        self.device[at] = page_ids

    def drop_host(self, logical: Pages) -> None:
        """Free the Host replicas of pages that keep their Device replica.  (C7.7)"""
        at = self.free_runs.index_of(logical)
        assert at_least(self.host[at], 0), self._state("dropping no Host replica", at)
        assert self.is_idle(at).all(), self._state("dropping the last replica, or one in use", at)
        self.free_records(at)

    def drop_device(self, logical: Pages) -> Ids:
        """Forget Device replicas of pages whose Host replica is valid, and return their page group ids.  (C7.7)"""
        at = self.free_runs.index_of(logical)
        assert self.is_on_host(at).all(), self._state("dropping the last valid replica", at)
        assert self.is_idle(at).all(), self._state("dropping no Device replica, or one in use", at)
        page_ids = self.page_ids(at)
        self.device[at] = -1
        return page_ids

    def free_records(self, logical: Pages) -> None:
        """Give back the arena's records of those pages that have one.  (C8.1)"""
        at = self.free_runs.index_of(logical)
        places = self.host[at]
        places = places[places >= 0]
        if places.size:
            self.arena.release(places, self.record_units)
            self.hosted -= places.size
            self.host[at] = -1

    # ---- refusals ---------------------------------------------------------------------------------

    def require_unpinned(self, what: str, logical: Pages) -> None:
        """Refuse pages that a copy reads or fills.  (C7.4)

        A page with several references is not refused: another space that holds it is claimed by the owner of the pin.
        """
        if self.pins_total:
            at = self.free_runs.index_of(logical)
            is_free = (self.pins[at] == 0) | (self.references[at] > 1)
            self._refuse(what, at, is_free, "a page that no copy uses", "wait for the copy, or abort it", "C7.4")

    def require_private(self, what: str, logical: Pages) -> None:
        """Refuse pages that another space references.  (C9.6, C9.10)"""
        at = self.free_runs.index_of(logical)
        if not at_most(self.references[at], 1):
            self._refuse(what, at, self.references[at] <= 1, "a page of one space",
                         "finish or release what shares it, or activate a fork at the lower frontier instead", "C9.10")

    # ---- helpers ----------------------------------------------------------------------------------

    def _renew_trimmed(self) -> None:
        self.renew(np.concatenate(self._trimmed))
        self._trimmed.clear()  # last: an interrupt before it only renews them twice

    def _take(self, page_ids: Ids, first_block: int, after: int) -> tuple[Ids, Index]:
        logical = self.free_runs.take(page_ids.size, after)
        at = self.free_runs.index_of(logical)
        self.device[at] = page_ids
        self.block[at] = np.arange(first_block, first_block + page_ids.size, dtype=np.int32)
        self.renew(at)
        return logical, at

    def _drop_reference(self, at: Index) -> Ids:
        left = self.references[at] - _ONE
        if not left.size or lowest(left):  # no value is negative; mostly all are 0, or none is
            self.references[at] = left
            return _NO_IDS
        freed = self._where(at, left == 0) if highest(left) else at
        assert not self.pins_total or at_most(self.pins[freed], 0), self._state("freeing pinned pages", freed)
        self.references[at] = left
        page_ids = self.page_ids(freed)
        self.recycle(freed)
        return page_ids

    def _unpin(self, at: Index) -> None:
        self.pins[at] -= _ONE
        self.pins_total -= count_of(at)

    def _stamps(self, count: int) -> npt.NDArray[np.int64]:
        first = self._stamp_next
        self._stamp_next += count
        return np.arange(first, first + count)

    def _where(self, at: Index, mask: Mask) -> Index:
        """Return the descriptors at which a condition holds, in order."""
        positions = mask.nonzero()[0]
        chosen = positions + at.start if isinstance(at, slice) else at[positions]
        return self.free_runs.index_of(chosen.astype(np.int32))

    def _are_private(self, at: Index) -> bool:
        references = self.references[at]
        return at_least(references, 1) and at_most(references, 1)

    def _cut_replicas(self, at: Index, columns: int) -> None:
        """Let the Host replicas of pages that were cut cover what is left, or go.  (C7.2, C7.6)"""
        is_alone = self.device[at] < 0
        self.free_records(self._where(at, ~is_alone))
        alone = self._where(at, is_alone)
        self.host_content[alone] = self.content[alone]
        self.host_columns[alone] = columns

    def _require_filled(self, what: str, at: Index) -> None:
        pins = self.pins[at]
        is_filled = at_most(self.references[at], 0) and at_least(pins, 1) and at_most(pins, 1)
        assert is_filled, self._state(what, at)

    def _state(self, what: str, at: Index) -> str:
        """Describe pages whose precondition does not hold."""
        pages = range(at.start, at.stop) if isinstance(at, slice) else at.tolist()
        return f"{what}: " + ", ".join(f"logical page {page}: {self._columns_of(page)}" for page in [*pages][:4])

    def _columns_of(self, page: int) -> str:
        return (
            f"references {self.references[page]} (active {self.active[page]}), writer {self.writer[page]}, "
            f"committed {self.committed[page]}, protected {self.protected[page]}, pins {self.pins[page]}, "
            f"page group {self.device[page]}, Host record {self.host[page]}"
        )

    def _refuse(self, what: str, at: Index, holds: Mask, expected: str, remedy: str, clause: str) -> None:
        """Refuse an operation unless the condition holds for every page; the error names the first other page."""
        if not holds.all():
            first = int(holds.argmin())
            page = at.start + first if isinstance(at, slice) else int(at[first])
            raise MisuseError(f"{what} of logical page {page}", expected=expected, got=self._columns_of(page),
                              remedy=remedy, clause=clause, logical=page)
