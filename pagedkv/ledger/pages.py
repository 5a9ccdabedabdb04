"""LogicalPages: the identity of page content, apart from where it lies.  (C7)

An address space's membership is an ordered list of logical pages, never of physical ids: content
keeps its identity while replicas come and go (C16.5).  A descriptor holds, as columns:

    serial       int64   generation of the descriptor; 0 while it is free
    content      int64   content epoch: advances when materialized and when committed columns are withdrawn
    committed    int32   committed columns 0..64; derived from the frontier while the page has a writer
    protected    int32   columns 0..64 that an inactive space protects: the maximum over them (C7.8)
    protectors   int32   inactive spaces that protect all 64 columns
    references   int32   address spaces that hold it
    active       int32   those of them that are active
    writer       int32   execution row that may append, or -1; a writer implies one reference (C7.5)
    device       int32   page group id of the Device replica, or -1
    block        int32   logical block at which every space holds it, or -1
    pins         int32   transactions that read it, or are filling it (C7.4)

Life of a descriptor:

    free --describe (references 1, writer)--------------------+--> written --freeze--> immutable --release--> free
      ^--describe_copy (references 0, one pin)--publish_copy--+                 ^  |
                            |                                                   +--+ share: references + 1
                            +--abort_copy--> free

Columns are written in slices: for private pages once per window of bound pages, not once per step.
Whether a bound page is already a member follows from its writer's `mapped_end` (C6.5, C7 preamble).

Every method checks its preconditions over all pages first: a refusal changes no column.  `logical`
is always (n,) int32, distinct descriptors, or the index that `index_of` made of them; whoever calls
several methods in a row makes it once.

A precondition bounds the least or the greatest value of a column, because finding that costs 0.5 us
for 64 pages, and comparing, then asking `all`, 2.2.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagedkv.errors import MisuseError
from pagedkv.ledger.free_runs import FreeRuns, Ids, Index, count_of, highest, lowest
from pagedkv.values.quantities import PAGE_SHIFT, PAGE_TOKENS

Mask = npt.NDArray[np.bool_]
Columns = npt.NDArray[np.int32]
Pages = Ids | Index

NO_WRITER = -1

_FREE = np.array([[0], [0], [0], [0], [0], [NO_WRITER], [-1], [-1]], np.int32)
"""(8, 1): what the int32 columns, in the order drawn above, hold of a free descriptor; its pins have gone before."""

_NOWHERE = slice(0, 0)
_NO_IDS: Ids = np.zeros(0, np.int32)
_ONE = np.ones((), np.int32)  # an operand of the columns' own type: 0.4 us less than a Python 1


class LogicalPages:
    """Descriptors of one pool as columns; index order means nothing.

    Written by the methods below alone, which `address_space.py` and `retained_spaces.py` call.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free_runs = FreeRuns(capacity)
        self.serial = np.zeros(capacity, np.int64)
        self.content = np.zeros(capacity, np.int64)
        # Rows of one matrix, so that a descriptor is freed by one assignment: 0.5 us for 64 pages, column by column 2.
        self._columns = np.repeat(_FREE, capacity, axis=1)
        self.committed: Columns = self._columns[0]
        self.protected: Columns = self._columns[1]
        self.protectors: Columns = self._columns[2]
        self.references: Columns = self._columns[3]
        self.active: Columns = self._columns[4]
        self.writer: Columns = self._columns[5]
        self.device: Columns = self._columns[6]
        self.block: Columns = self._columns[7]
        self.pins = np.zeros(capacity, np.int32)
        self.pins_total = 0
        self._stamp_next = 1

    # ---- private pages ----------------------------------------------------------------------------

    def describe(self, page_ids: Ids, *, writer: int, first_block: int, after: int = -1) -> Ids:
        """Take descriptors for pages that row `writer` will map from `first_block` on.  (C7.5)

        The content epoch they get is the one they show once materialized (C7.6).
        """
        logical, at = self._take(page_ids, first_block, after)
        self.references[at] = 1
        self.active[at] = 1
        self.writer[at] = writer
        return logical

    def index_of(self, logical: Pages) -> Index:
        """Return descriptors as the columns' fastest index."""
        return self.free_runs.index_of(logical)

    def page_ids(self, logical: Pages) -> Ids:
        """Return a copy of the page group ids of Device replicas, -1 where there is none."""
        at = self.free_runs.index_of(logical)
        found: Ids = self.device[at]
        return found.copy() if isinstance(at, slice) else found

    def renew(self, logical: Pages) -> None:
        """Begin a new life of descriptors: earlier handles are stale, the content is another.  (C7.3, C7.6)"""
        at = self.free_runs.index_of(logical)
        self.serial[at] = self._stamps(count_of(at))
        self.renew_content(at)

    def renew_content(self, logical: Pages) -> None:
        """Advance the content epoch: other bytes will stand here from now on.  (C7.6)"""
        at = self.free_runs.index_of(logical)
        self.content[at] = self._stamps(count_of(at))

    def recycle(self, logical: Pages) -> None:
        """Free descriptors of private pages whose space ends; their generation ends.  (C7.3)"""
        at = self.free_runs.index_of(logical)
        self.serial[at] = 0
        self._columns[:, at] = _FREE
        self.free_runs.give(at)

    def freeze(self, logical: Pages, committed: int) -> None:
        """Take the writer away: from now on `committed` is what the pages hold for good.  (C7.5, C10.6)

        Raises:
            MisuseError: a page without a writer, or more than 64 columns.
        """
        at = self.free_runs.index_of(logical)
        self._require_least("freezing", at, self.writer[at], 0, "a page with a writer", "C7.5")
        if not 0 <= committed <= PAGE_TOKENS:
            raise MisuseError(f"freezing at {committed} columns", expected=f"0 to {PAGE_TOKENS}", got=committed,
                              remedy="a page holds no more", clause="C7")
        self.writer[at] = NO_WRITER
        self.committed[at] = committed

    def thaw(self, logical: Pages, writer: int) -> None:
        """Let row `writer` append again, or cut.  (C7.5, C10.4)

        Raises:
            MisuseError: a page with a writer, another reference, a pin, protected columns, or no Device replica.
        """
        what = "a writer"
        at = self.free_runs.index_of(logical)
        self._require_most(what, at, self.writer[at], NO_WRITER, "a page without a writer", "C7.5")
        self._require_sole(what, at, "C7.5")
        self._require_least(what, at, self.device[at], 0, "a page with a Device replica", "C7.5")
        self._require_most(what, at, self.protected[at], 0, "a page that no checkpoint protects", "C7.5")
        self.require_unpinned(what, at)
        self.writer[at] = writer

    # ---- references -------------------------------------------------------------------------------

    def share(self, logical: Pages) -> None:
        """Add a reference of an inactive space: the pages are immutable.  (C7.5, C10.5)

        Raises:
            MisuseError: a page that has a writer, is not full, or nobody holds.
        """
        at = self.free_runs.index_of(logical)
        held = self.references[at]
        self._require_least("sharing", at, held, 1, "a page that a space holds", "C7.5")
        self._require_most("sharing", at, self.writer[at], NO_WRITER, "a page without a writer", "C7.5")
        self._require_least("sharing", at, self.committed[at], PAGE_TOKENS, "a full page", "C16.8")
        self.references[at] = held + _ONE

    def share_active(self, logical: Pages) -> None:
        """Add an active reference: `share` and `activate` in one, for a Fork.  (C7.5, C10.5)

        Raises:
            MisuseError: a page that has a writer, is not full, nobody holds, or has no Device replica.
        """
        at = self.free_runs.index_of(logical)
        self._require_least("sharing", at, self.device[at], 0, "a page with a Device replica", "C7.7")
        self.share(at)
        self.active[at] += _ONE

    def activate(self, logical: Pages) -> None:
        """Turn one reference of each page into an active one.  (C7.7)

        Raises:
            MisuseError: every reference is active already, or the page has no Device replica.
        """
        what = "an active reference"
        at = self.free_runs.index_of(logical)
        active = self.active[at]
        self._require_least(what, at, self.references[at] - active, 1, "a page with an inactive reference", "C7")
        self._require_least(what, at, self.device[at], 0, "a page with a Device replica", "C7.7")
        self.active[at] = active + _ONE

    def deactivate(self, logical: Pages) -> None:
        """Turn one active reference of each page into an inactive one; a writer goes first.  (C9.8)

        Raises:
            MisuseError: no reference is active, or the page has a writer.
        """
        what = "giving up an active reference"
        at = self.free_runs.index_of(logical)
        active = self.active[at]
        self._require_least(what, at, active, 1, "a page with an active reference", "C9.8")
        self._require_most(what, at, self.writer[at], NO_WRITER, "a page without a writer", "C9.8")
        self.active[at] = active - _ONE

    def release(self, logical: Pages) -> Ids:
        """Drop one inactive reference of each page; descriptors whose last one went are freed.  (C7.3, C9.8)

        Returns:
            The page group ids of the Device replicas that went with them, in the order given.

        Raises:
            MisuseError: every reference is active, or the last one of a pinned page would go.
        """
        at = self.free_runs.index_of(logical)
        self.require_releasable(at)
        return self._drop_reference(at)

    def release_active(self, logical: Pages) -> Ids:
        """Drop one active reference of each page: `deactivate` and `release` in one, for a finish.  (C9.8)

        Returns:
            The page group ids of the Device replicas that went with them, in the order given.

        Raises:
            MisuseError: no reference is active, the page has a writer, or the last reference of a pinned page would go.
        """
        what = "giving up an active reference"
        at = self.free_runs.index_of(logical)
        active = self.active[at]
        self._require_least(what, at, active, 1, "a page with an active reference", "C9.8")
        self._require_most(what, at, self.writer[at], NO_WRITER, "a page without a writer", "C9.8")
        self.require_unpinned(what, at)
        self.active[at] = active - _ONE
        return self._drop_reference(at)

    def require_private(self, logical: Pages, what: str) -> None:
        """Refuse pages that another space references.  (C9.6, C9.10)"""
        at = self.free_runs.index_of(logical)
        self._require_most(what, at, self.references[at], 1, "a page of one space", "C9.10")

    def require_releasable(self, logical: Pages) -> None:
        """Refuse pages of which no inactive reference can go.  (C9.8)"""
        at = self.free_runs.index_of(logical)
        self._require_least("a release", at, self.references[at] - self.active[at], 1,
                            "a page with an inactive reference", "C9.8")
        self.require_unpinned("a release", at)

    # ---- protection and content -------------------------------------------------------------------

    def raise_protection(self, logical: Pages, before: Columns, columns: Columns) -> None:
        """Let one inactive space protect `columns` of each page instead of `before`, which is less.  (C7.8)

        Raises:
            MisuseError: more columns than are committed, or a page with a writer.
        """
        at = self.free_runs.index_of(logical)
        self._require_most("protection", at, self.writer[at], NO_WRITER, "a page without a writer", "C7.8")
        for low, high in ((before, columns), (columns, self.committed[at])):
            self._require_least("protection", at, high - low, 0, "at most the committed columns", "C7.8")
        self.protectors[at] += (columns >> PAGE_SHIFT) - (before >> PAGE_SHIFT)
        self.protected[at] = np.maximum(self.protected[at], columns)

    def lower_protection(self, logical: Pages, before: Columns, most: Columns) -> None:
        """Let one inactive space protect less than `before`; `most` is what any space protects partly now.  (C7.8)

        Raises:
            MisuseError: a page that is protected less than `before`.
        """
        what, expected = "giving up protection", "a page that is protected so far"
        at = self.free_runs.index_of(logical)
        left = self.protectors[at] - (before >> PAGE_SHIFT)
        self._require_least(what, at, left, 0, expected, "C7.8")
        self._require_least(what, at, self.protected[at] - before, 0, expected, "C7.8")
        self.protectors[at] = left
        self.protected[at] = np.maximum(np.minimum(left, _ONE) << PAGE_SHIFT, most)

    def withdraw(self, logical: Pages, columns: int) -> None:
        """Cut committed columns of pages without a writer: other content from now on.  (C7.6, C9.10)

        Raises:
            MisuseError: columns below the protected or above the committed ones, a page with a writer, another
                reference or a pin.
        """
        what = f"a cut to {columns} columns"
        at = self.free_runs.index_of(logical)
        committed = self.committed[at]
        self._require_most(what, at, self.writer[at], NO_WRITER, "a page without a writer", "C9.10")
        self._require_sole(what, at, "C9.10")
        self._require_most(what, at, self.protected[at], columns, "a page not protected beyond that", "C9.10")
        self._require_least(what, at, committed, columns, "a page with as many committed", "C9.10")
        self.require_unpinned(what, at)
        if not committed.size or highest(committed) == columns:
            return
        changed = self._where(at, committed > columns)
        self.committed[changed] = columns
        self.renew_content(changed)

    # ---- transactions -----------------------------------------------------------------------------

    def describe_copy(self, page_ids: Ids, *, block: int, columns: int, after: int = -1) -> Ids:
        """Take descriptors that a copy of `columns` committed columns will fill; pinned until it ends.  (C7.4)

        Raises:
            MisuseError: no column, or more than 64.
        """
        if not 1 <= columns <= PAGE_TOKENS:
            raise MisuseError(f"a copy of {columns} columns", expected=f"1 to {PAGE_TOKENS}", got=columns,
                              remedy="an aligned frontier copies nothing", clause="C10.5")
        logical, at = self._take(page_ids, block, after)
        self.committed[at] = columns
        self.pins[at] = 1
        self.pins_total += logical.size
        return logical

    def publish_copy(self, logical: Pages, *, writer: int, active: int) -> None:
        """Give filled descriptors to one space: `active` 1 with its row as writer, or 0 and no writer.  (C7.4)

        Raises:
            MisuseError: a page that no copy fills.
        """
        at = self.free_runs.index_of(logical)
        self._require_filled("the publication of a copy", at)
        self._unpin(at)
        self.references[at] = 1
        self.active[at] = active
        self.writer[at] = writer

    def abort_copy(self, logical: Pages) -> None:
        """Free descriptors whose copy did not end well.  (C7.4, C10.2)

        Raises:
            MisuseError: a page that no copy fills.
        """
        at = self.free_runs.index_of(logical)
        self._require_filled("the abort of a copy", at)
        self._unpin(at)
        self.recycle(at)

    def pin(self, logical: Pages) -> None:
        """Hold sources of a copy: while pinned they are neither released, cut nor written.  (C7.4)

        Raises:
            MisuseError: a page without a Device replica, one that is being filled, or one that nobody holds.
        """
        at = self.free_runs.index_of(logical)
        self._require_least("a pin", at, self.device[at], 0, "a page with a Device replica", "C7.4")
        self._require_least("a pin", at, self.references[at], 1, "a page that a space holds", "C7.4")
        self.pins[at] += _ONE
        self.pins_total += count_of(at)

    def unpin(self, logical: Pages) -> None:
        """Undo one `pin`.

        Raises:
            MisuseError: a page that is not pinned (S35).
        """
        at = self.free_runs.index_of(logical)
        self._require_least("an unpin", at, self.pins[at], 1, "a pinned source", "C7.4")
        self._require_least("an unpin", at, self.references[at], 1, "a pinned source", "C7.4")
        self._unpin(at)

    def require_unpinned(self, what: str, logical: Pages) -> None:
        """Refuse pages that a transaction reads or fills, unless another space holds them meanwhile.  (C7.4)

        Of a shared page one reference may go: whoever pinned it claims a space that holds it.
        """
        if self.pins_total:
            at = self.free_runs.index_of(logical)
            is_kept = (self.pins[at] == 0) | (self.references[at] > 1)
            self._require(what, at, is_kept, "a page that no copy uses", "C7.4")

    # ---- helpers ----------------------------------------------------------------------------------

    def _take(self, page_ids: Ids, first_block: int, after: int) -> tuple[Ids, Index]:
        logical = self.free_runs.take(page_ids.size, after)
        at = self.free_runs.index_of(logical)
        self.device[at] = page_ids
        self.block[at] = np.arange(first_block, first_block + page_ids.size, dtype=np.int32)
        self.renew(at)
        return logical, at

    def _drop_reference(self, at: Index) -> Ids:
        self.references[at] = left = self.references[at] - _ONE
        gone = self._where_zero(at, left)
        if gone is _NOWHERE:
            return _NO_IDS
        page_ids = self.page_ids(gone)
        self.recycle(gone)
        return page_ids

    def _unpin(self, at: Index) -> None:
        self.pins[at] -= _ONE
        self.pins_total -= count_of(at)

    def _stamps(self, count: int) -> npt.NDArray[np.int64]:
        first = self._stamp_next
        self._stamp_next += count
        return np.arange(first, first + count)

    def _where_zero(self, at: Index, values: Columns) -> Index:
        """Return the descriptors whose value is 0, in order; no value is negative, and all or none is usual."""
        if not values.size or lowest(values):
            return _NOWHERE
        return self._where(at, values == 0) if highest(values) else at

    def _where(self, at: Index, mask: Mask) -> Index:
        """Return the descriptors at which a condition holds, in order."""
        found = mask.nonzero()[0]
        chosen = found + at.start if isinstance(at, slice) else at[found]
        return self.free_runs.index_of(chosen.astype(np.int32))

    def _require_filled(self, what: str, at: Index) -> None:
        pins, expected = self.pins[at], "a page that a copy fills"
        self._require_most(what, at, self.references[at], 0, expected, "C7.4")
        self._require_least(what, at, pins, 1, expected, "C7.4")
        self._require_most(what, at, pins, 1, expected, "C7.4")

    def _require_sole(self, what: str, at: Index, clause: str) -> None:
        """Refuse pages that nobody or another space references."""
        references, expected = self.references[at], "a page of one space"
        self._require_least(what, at, references, 1, expected, clause)
        self._require_most(what, at, references, 1, expected, clause)

    def _require_least(self, what: str, at: Index, values: Columns, least: int, expected: str, clause: str) -> None:
        """Refuse an operation unless every page's value is at least so much."""
        if values.size and values.item(values.argmin()) < least:
            self._require(what, at, values >= least, expected, clause)

    def _require_most(self, what: str, at: Index, values: Columns, most: int, expected: str, clause: str) -> None:
        """Refuse an operation unless every page's value is at most so much."""
        if values.size and values.item(values.argmax()) > most:
            self._require(what, at, values <= most, expected, clause)

    def _require(self, what: str, at: Index, holds: Mask, expected: str, clause: str) -> None:
        """Refuse an operation unless the condition holds for every page; names the first that fails."""
        if holds.all():
            return
        first = int(holds.argmin())
        page = at.start + first if isinstance(at, slice) else int(at[first])
        raise MisuseError(
            f"{what} of logical page {page}", expected=expected,
            got=f"references {self.references[page]} (active {self.active[page]}), writer {self.writer[page]}, "
                f"committed {self.committed[page]}, protected {self.protected[page]}, pins {self.pins[page]}, "
                f"page group {self.device[page]}",
            remedy="finish, release or truncate what stands in the way first", clause=clause, logical=page,
        )
