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
is always (n,) int32, distinct descriptors.

Read next: `address_space.py`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagedkv.errors import MisuseError
from pagedkv.free_runs import FreeRuns, Ids
from pagedkv.quantities import PAGE_TOKENS

Mask = npt.NDArray[np.bool_]

NO_WRITER = -1


class LogicalPages:
    """Descriptors of one pool as columns; index order means nothing.

    Written by the methods below alone, which `address_space.py` and `retained_spaces.py` call.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free_runs = FreeRuns(capacity)
        self.serial = np.zeros(capacity, np.int64)
        self.content = np.zeros(capacity, np.int64)
        self.committed = np.zeros(capacity, np.int32)
        self.protected = np.zeros(capacity, np.int32)
        self.protectors = np.zeros(capacity, np.int32)
        self.references = np.zeros(capacity, np.int32)
        self.active = np.zeros(capacity, np.int32)
        self.writer = np.full(capacity, NO_WRITER, np.int32)
        self.device = np.full(capacity, -1, np.int32)
        self.block = np.full(capacity, -1, np.int32)
        self.pins = np.zeros(capacity, np.int32)
        self.pins_total = 0
        self._stamp_next = 1

    # ---- private pages ----------------------------------------------------------------------------

    def describe(self, page_ids: Ids, *, writer: int, first_block: int, after: int = -1) -> Ids:
        """Take descriptors for pages that row `writer` will map from `first_block` on.  (C7.5)

        The content epoch they get is the one they show once materialized (C7.6).
        """
        logical = self._take(page_ids, first_block, after)
        self.references[logical] = 1
        self.active[logical] = 1
        self.writer[logical] = writer
        return logical

    def renew(self, logical: Ids) -> None:
        """Begin a new life of descriptors: earlier handles are stale, the content is another.  (C7.3, C7.6)"""
        self.serial[logical] = self._stamps(logical.size)
        self.renew_content(logical)

    def renew_content(self, logical: Ids | npt.NDArray[np.int64]) -> None:
        """Advance the content epoch: other bytes will stand here from now on.  (C7.6)"""
        self.content[logical] = self._stamps(logical.size)

    def recycle(self, logical: Ids) -> None:
        """Free descriptors of private pages whose space ends; their generation ends.  (C7.3)"""
        self.serial[logical] = 0
        self.references[logical] = 0
        self.active[logical] = 0
        self.writer[logical] = NO_WRITER
        self.device[logical] = -1
        self.block[logical] = -1
        self.committed[logical] = 0
        self.free_runs.give(logical)

    def freeze(self, logical: Ids, committed: npt.NDArray[np.int32] | int) -> None:
        """Take the writer away: from now on `committed` is what the pages hold for good.  (C7.5, C10.6)

        Raises:
            MisuseError: a page without a writer, or more than 64 columns.
        """
        self._require("freezing", logical, self.writer[logical] >= 0, "a page with a writer", "C7.5")
        self._require("freezing", logical, self._are_columns(logical, committed), "0 to 64 committed columns", "C7")
        self.writer[logical] = NO_WRITER
        self.committed[logical] = committed

    def thaw(self, logical: Ids, writer: int) -> None:
        """Let row `writer` append again, or cut.  (C7.5, C10.4)

        Raises:
            MisuseError: a page with a writer, another reference, a pin, protected columns, or no Device replica.
        """
        what = "a writer"
        self._require(what, logical, self.writer[logical] < 0, "a page without a writer", "C7.5")
        self._require(what, logical, self.references[logical] == 1, "a page of one space", "C7.5")
        self._require(what, logical, self.device[logical] >= 0, "a page with a Device replica", "C7.5")
        self._require(what, logical, self.protected[logical] == 0, "a page that no checkpoint protects", "C7.5")
        self.require_unpinned(what, logical)
        self.writer[logical] = writer

    # ---- references -------------------------------------------------------------------------------

    def share(self, logical: Ids) -> None:
        """Add a reference of an inactive space: the pages are immutable.  (C7.5, C10.5)

        Raises:
            MisuseError: a page that has a writer, is not full, or nobody holds.
        """
        self.require_shareable(logical)
        self.references[logical] += 1

    def require_shareable(self, logical: Ids) -> None:
        """Refuse pages that no second space may hold.  (C7.5, C16.8)"""
        self._require("sharing", logical, self.references[logical] > 0, "a page that a space holds", "C7.5")
        self._require("sharing", logical, self.writer[logical] < 0, "a page without a writer", "C7.5")
        self._require("sharing", logical, self.committed[logical] == PAGE_TOKENS, "a full page", "C16.8")

    def activate(self, logical: Ids) -> None:
        """Turn one reference of each page into an active one.  (C7.7)

        Raises:
            MisuseError: every reference is active already, or the page has no Device replica.
        """
        self._require("an active reference", logical, self.active[logical] < self.references[logical],
                      "a page with an inactive reference", "C7")
        self._require("an active reference", logical, self.device[logical] >= 0, "a page with a Device replica", "C7.7")
        self.active[logical] += 1

    def deactivate(self, logical: Ids) -> None:
        """Turn one active reference of each page into an inactive one; a writer goes first.  (C9.8)

        Raises:
            MisuseError: no reference is active, or the page has a writer.
        """
        self._require("giving up an active reference", logical, self.active[logical] > 0,
                      "a page with an active reference", "C9.8")
        self._require("giving up an active reference", logical, self.writer[logical] < 0,
                      "a page without a writer", "C9.8")
        self.active[logical] -= 1

    def release(self, logical: Ids) -> Ids:
        """Drop one inactive reference of each page; descriptors whose last one went are freed.  (C7.3, C9.8)

        Returns:
            The page group ids of the Device replicas that went with them, in the order given.

        Raises:
            MisuseError: every reference is active, or the last one of a pinned page would go.
        """
        self.require_releasable(logical)
        self.references[logical] -= 1
        gone = logical[self.references[logical] == 0]
        page_ids: Ids = self.device[gone]
        self.protected[gone] = 0
        self.protectors[gone] = 0
        self.recycle(gone)
        return page_ids

    def require_private(self, logical: Ids, what: str) -> None:
        """Refuse pages that another space references.  (C9.6, C9.10)"""
        self._require(what, logical, self.references[logical] <= 1, "a page of one space", "C9.10")

    def require_releasable(self, logical: Ids) -> None:
        """Refuse pages of which no inactive reference can go.  (C9.8)"""
        self._require("a release", logical, self.references[logical] > self.active[logical],
                      "a page with an inactive reference", "C9.8")
        self.require_unpinned("a release", logical)

    # ---- protection and content -------------------------------------------------------------------

    def raise_protection(
        self, logical: Ids, before: npt.NDArray[np.int32], columns: npt.NDArray[np.int32]
    ) -> None:
        """Let one inactive space protect `columns` of each page instead of `before`, which is less.  (C7.8)

        Raises:
            MisuseError: more columns than are committed, or a page with a writer.
        """
        self._require("protection", logical, self.writer[logical] < 0, "a page without a writer", "C7.8")
        self._require("protection", logical, (before <= columns) & (columns <= self.committed[logical]),
                      "at most the committed columns", "C7.8")
        self.protectors[logical] += (columns == PAGE_TOKENS) & (before < PAGE_TOKENS)
        self.protected[logical] = np.maximum(self.protected[logical], columns)

    def lower_protection(
        self, logical: Ids, before: npt.NDArray[np.int32], most: npt.NDArray[np.int32]
    ) -> None:
        """Let one inactive space protect less than `before`; `most` is what any space protects partly now.  (C7.8)

        Raises:
            MisuseError: a page that is protected less than `before`.
        """
        full = (before == PAGE_TOKENS).astype(np.int32)
        holds = (self.protectors[logical] >= full) & (self.protected[logical] >= before)
        self._require("giving up protection", logical, holds, "a page that is protected so far", "C7.8")
        self.protectors[logical] -= full
        self.protected[logical] = np.where(self.protectors[logical] > 0, PAGE_TOKENS, most)

    def withdraw(self, logical: Ids, columns: int) -> None:
        """Cut committed columns of pages without a writer: other content from now on.  (C7.6, C9.10)

        Raises:
            MisuseError: columns below the protected or above the committed ones, a page with a writer, another
                reference or a pin.
        """
        what = f"a cut to {columns} columns"
        self._require(what, logical, self.writer[logical] < 0, "a page without a writer", "C9.10")
        self._require(what, logical, self.references[logical] == 1, "a page of one space", "C9.10")
        self._require(what, logical, self.protected[logical] <= columns, "a page not protected beyond that", "C9.10")
        self._require(what, logical, self.committed[logical] >= columns, "a page with as many committed", "C9.10")
        self.require_unpinned(what, logical)
        changed = logical[self.committed[logical] > columns]
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
        logical = self._take(page_ids, block, after)
        self.committed[logical] = columns
        self.pins[logical] = 1
        self.pins_total += logical.size
        return logical

    def publish_copy(self, logical: Ids, *, writer: int, active: int) -> None:
        """Give filled descriptors to one space: `active` 1 with its row as writer, or 0 and no writer.  (C7.4)

        Raises:
            MisuseError: a page that no copy fills.
        """
        self._require_filled("the publication of a copy", logical)
        self._unpin(logical)
        self.references[logical] = 1
        self.active[logical] = active
        self.writer[logical] = writer

    def abort_copy(self, logical: Ids) -> None:
        """Free descriptors whose copy did not end well.  (C7.4, C10.2)

        Raises:
            MisuseError: a page that no copy fills.
        """
        self._require_filled("the abort of a copy", logical)
        self._unpin(logical)
        self.recycle(logical)

    def pin(self, logical: Ids) -> None:
        """Hold sources of a copy: while pinned they are neither released, cut nor written.  (C7.4)

        Raises:
            MisuseError: a page without a Device replica, one that is being filled, or one that nobody holds.
        """
        self._require("a pin", logical, self.device[logical] >= 0, "a page with a Device replica", "C7.4")
        self._require("a pin", logical, self.references[logical] > 0, "a page that a space holds", "C7.4")
        self.pins[logical] += 1
        self.pins_total += logical.size

    def unpin(self, logical: Ids) -> None:
        """Undo one `pin`.

        Raises:
            MisuseError: a page that is not pinned (S35).
        """
        self._require("an unpin", logical, (self.pins[logical] > 0) & (self.references[logical] > 0),
                      "a pinned source", "C7.4")
        self._unpin(logical)

    # ---- helpers ----------------------------------------------------------------------------------

    def _take(self, page_ids: Ids, first_block: int, after: int) -> Ids:
        logical = self.free_runs.take(page_ids.size, after)
        self.device[logical] = page_ids
        self.block[logical] = np.arange(first_block, first_block + page_ids.size)
        self.renew(logical)
        return logical

    def _unpin(self, logical: Ids) -> None:
        self.pins[logical] -= 1
        self.pins_total -= logical.size

    def _stamps(self, count: int) -> npt.NDArray[np.int64]:
        first = self._stamp_next
        self._stamp_next += count
        return np.arange(first, first + count)

    def _are_columns(self, logical: Ids, columns: npt.NDArray[np.int32] | int) -> Mask:
        given = np.broadcast_to(np.asarray(columns), logical.shape)
        return (given >= 0) & (given <= PAGE_TOKENS)

    def _require_filled(self, what: str, logical: Ids) -> None:
        is_filled = (self.references[logical] == 0) & (self.pins[logical] == 1)
        self._require(what, logical, is_filled, "a page that a copy fills", "C7.4")

    def require_unpinned(self, what: str, logical: Ids) -> None:
        """Refuse pages that a transaction reads or fills, unless another space holds them meanwhile.  (C7.4)

        Of a shared page one reference may go: whoever pinned it claims a space that holds it.
        """
        if self.pins_total:
            is_kept = (self.pins[logical] == 0) | (self.references[logical] > 1)
            self._require(what, logical, is_kept, "a page that no copy uses", "C7.4")

    def _require(self, what: str, logical: Ids, holds: Mask, expected: str, clause: str) -> None:
        """Refuse an operation unless the condition holds for every page; names the first that fails."""
        if holds.all():
            return
        page = int(logical[np.flatnonzero(~holds)[0]])
        raise MisuseError(
            f"{what} of logical page {page}", expected=expected,
            got=f"references {self.references[page]} (active {self.active[page]}), writer {self.writer[page]}, "
                f"committed {self.committed[page]}, protected {self.protected[page]}, pins {self.pins[page]}, "
                f"page group {self.device[page]}",
            remedy="finish, release or truncate what stands in the way first", clause=clause, logical=page,
        )
