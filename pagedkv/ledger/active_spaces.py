"""ActiveSpaces: the active address spaces of one pool, as token columns over execution rows.  (C9, C11)

A space is an ordered list of logical pages (its *membership*) with token-exact limits.  The number line of one row, in
tokens, with every segment labelled:

    0 ---- shared_end ---- committed_end ------- mapped_end ---------- bound_end ---------- entitled_end
    [ immutable )[ committed )[ mapped, provisional )[ bound, unmapped    )[ promised, no id   )
      no writer    readable     writable by units      ids known, reserved   reserved

    shared_end     pages below it may belong to other spaces: full, and without a writer (C7.5); from it on every page
                   is this row's own; a multiple of P
    committed_end  the committed frontier: any token (C9.1, C16.6)
    mapped_end     membership ends here; a multiple of P; may exceed the frontier
    bound_end      ids are bound up to here, in windows of 64 pages (C6.5)
    entitled_end   entitlement = membership + reservation, in tokens; a multiple of P

Everything else is derived: membership pages = mapped_end / P, reservation = (entitled_end - mapped_end) / P.

`table` is the host mirror of the pool's block table:

    host mirror  (C, L) int32     row r: [ id id id | id id | -1 -1 -1 ]
                                           members    bound   unmapped
    device table (C, L) int32     the same members; entries beyond membership are unspecified (C11.1)

A row is contiguous, so new pages of a row reach the device as one slice (C11.2).  The ledger writes the mirror when it
binds ids, and returns the slices that are new.  The store copies a window on the stream when its ids are bound, ahead
of the pages that become members later.

Batch calls take one int32 value per execution row over all rows (0, the neutral value, in rows that are not selected),
so a step is a few vector operations for any batch.  A row uses the allocator only when it crosses a page (C9.4).  The
caller has checked that no unit in flight selects the row (`units.py`).  The spaces of one pool never read those of
another pool (C9.9).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from numpy import add, less

from pagedkv.errors import EntitlementExceeded, MisuseError, StaleHandle, shown
from pagedkv.ledger.batch import Batch, EntryColumns
from pagedkv.ledger.events import PageEvents, PoolEvents
from pagedkv.ledger.free_runs import Ids, highest
from pagedkv.ledger.pages import LogicalPages, Pages
from pagedkv.ledger.pool import DevicePageLease, PagePool
from pagedkv.values.quantities import PAGE_MASK, PAGE_SHIFT, PAGE_TOKENS, WINDOW_PAGES, pages_for_tokens

Tokens = npt.NDArray[np.int32]

RowIndex = slice | npt.NDArray[np.int64]

UNMAPPED = -1
"""A table entry that names no page group."""

FAR_COLUMNS = 8
"""After a unit of so few columns in all its rows, no row crosses a page for 8 steps on average (P = 64)."""

_ZERO = np.zeros((), np.int32)
_PAGE_TOKENS = np.full((), PAGE_TOKENS, np.int32)
_PAGE_MASK = np.full((), PAGE_MASK, np.int32)
_PAGE_STARTS = np.full((), ~PAGE_MASK, np.int32)
_PAGE_SHIFT = np.full((), PAGE_SHIFT, np.int32)


class TableSlices(NamedTuple):
    """Slices of table rows: rows[i] has block_counts[i] entries from first_blocks[i] on; all (n,) integers.

    `pages` is the sum of the counts.
    """

    rows: npt.NDArray[np.int64]
    first_blocks: npt.NDArray[np.int32]
    block_counts: npt.NDArray[np.int32]
    pages: int

    @classmethod
    def of(cls, slices: list[tuple[int, int, int]]) -> Self:
        """Return slices from (row, first block, block count) of each."""
        rows, first_blocks, block_counts = np.array(slices, np.int64).T
        return cls(rows, first_blocks.astype(np.int32), block_counts.astype(np.int32), int(block_counts.sum()))

    def each(self) -> Iterator[tuple[int, int, int]]:
        """Iterate over (row, first block, block count) of every slice."""
        return zip(self.rows.tolist(), self.first_blocks.tolist(), self.block_counts.tolist(), strict=True)

    def flat(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.integer[Any]]]:
        """Return (rows, blocks) of every single entry, slice after slice.

        Example: rows [4, 7], first_blocks [2, 0], block_counts [3, 1] -> [4, 4, 4, 7] and [2, 3, 4, 0].
        """
        counts = self.block_counts
        if self.pages == self.rows.size:  # one entry each, as a step of few columns crosses
            return self.rows, self.first_blocks
        starts = np.cumsum(counts) - counts
        blocks = np.arange(self.pages) + np.repeat(self.first_blocks - starts, counts)
        return np.repeat(self.rows, counts), blocks


class ActiveSpaces:
    """Columns of one pool's active spaces; row r of every array is execution row r.

    Attributes:
        members: (C, L) int32, logical pages below `bound_end`, -1 beyond.
        table: (C, L) int32, the host mirror of the block table: their page groups, -1 beyond `bound_end`.
        shared_end, committed_end, mapped_end, bound_end, entitled_end: (C,) int32, tokens, as drawn above; 0 in an
            idle row.
        writable_end: (C,) int32, min(entitled_end, S), so that a step compares once.
        ready_end: (C,) int32, min(bound_end, writable_end), likewise.
        new_windows: (row, first block, pages) of the ids that the last mapping bound; the store publishes a whole
            window at once, so that a row which crosses into its next page needs no copy, and clears the list.
        grows: whether leases are extended between units (C9.2); only the advice of an error depends on it.

    The methods below alone write the columns.
    """

    def __init__(
        self, pool: PagePool, pages: LogicalPages, *, rows: int, blocks: int, max_context: int | None = None,
        events: PoolEvents | None = None, grows: bool = False,
    ) -> None:
        self.pool = pool
        self.pages = pages
        self.events = PoolEvents(pool.name, PageEvents()) if events is None else events
        self.blocks = blocks
        self.max_context = blocks * PAGE_TOKENS if max_context is None else max_context
        self.grows = grows
        self.members = np.full((rows, blocks), -1, np.int32)
        self.table = np.full((rows, blocks), UNMAPPED, np.int32)
        self.shared_end = np.zeros(rows, np.int32)
        self.committed_end = np.zeros(rows, np.int32)
        self.mapped_end = np.zeros(rows, np.int32)
        self.bound_end = np.zeros(rows, np.int32)
        self.entitled_end = np.zeros(rows, np.int32)
        self.writable_end = np.zeros(rows, np.int32)
        self.ready_end = np.zeros(rows, np.int32)
        self.new_windows: list[tuple[int, int, int]] = []
        self._one_each = np.ones(rows, np.int32)
        self._row_starts = np.arange(rows) * blocks
        self._flat_members, self._flat_table = self.members.reshape(-1), self.table.reshape(-1)
        self._unit_ends = np.zeros(rows, np.int32)
        self._is_beyond = np.zeros(rows, np.bool_)
        self._crossing = np.zeros(rows, np.bool_)
        self._none_crossing = self._crossing.tobytes()
        self._is_ragged = self.max_context % PAGE_TOKENS != 0
        self._may_trail = False
        # What every row of the last unit may still write at least: within its pages, and below its `ready_end`.
        self._last_entry: EntryColumns | None = None
        self._is_repeated = False
        self._mapped_left = self._ready_left = 0

    # ---- opening and closing a space --------------------------------------------------------------

    def open(self, row: int, *, entitlement_pages: int) -> None:
        """Start an empty space whose pages the caller has reserved in the pool.  (C9.1)"""
        assert self.entitled_end[row] == 0, f"row {row} of pool {self.pool.name} holds a space already"
        self.entitled_end[row] = entitlement_pages * PAGE_TOKENS
        self._derive(row)

    def extend(self, row: int, *, pages: int) -> None:
        """Raise the entitlement by pages that the caller has reserved in the pool.  (C9.2)"""
        assert self.entitled_end[row] > 0, f"row {row} of pool {self.pool.name} holds no space"
        self.entitled_end[row] = (self.entitlement_pages(row) + pages) * PAGE_TOKENS
        self._derive(row)

    def adopt(self, row: int, members: Ids, page_ids: Ids, *, frontier: int, entitlement_pages: int) -> None:
        """Start a space from pages that hold [0, frontier), each with an active reference of this space.  (C10.3)

        Full pages have no writer; the writer of a partial tail is the row.  `page_ids` are their page groups.
        """
        count = members.size
        assert count == pages_for_tokens(frontier), f"{count} pages for {frontier} tokens"
        self.members[row, :count] = members
        self.table[row, :count] = page_ids
        self.committed_end[row] = frontier
        self.shared_end[row] = frontier & ~PAGE_MASK
        self.mapped_end[row] = self.bound_end[row] = count * PAGE_TOKENS
        self.open(row, entitlement_pages=entitlement_pages)

    def freeze(self, row: int) -> Ids:
        """Take the writer from every full committed page, and return all of them in block order.  (C10.6)"""
        first, full = self.shared_end.item(row) >> PAGE_SHIFT, self.committed_end.item(row) >> PAGE_SHIFT
        if first < full:
            self.pages.freeze(self.members[row, first:full], PAGE_TOKENS)
        self.shared_end[row] = full << PAGE_SHIFT
        return self.members[row, :full].copy()

    def detach(self, row: int) -> tuple[Ids, int]:
        """Give up reservation and row, keep the pages of a trimmed space, and return (pages, frontier).  (C9.8)"""
        frontier, mapped = self.committed_end.item(row), self.membership_pages(row)
        assert mapped == pages_for_tokens(frontier), f"row {row} of pool {self.pool.name} is not trimmed"
        self.freeze(row)
        members = self.members[row, :mapped].copy()
        if frontier & PAGE_MASK:
            self.pages.freeze(members[frontier >> PAGE_SHIFT :], frontier & PAGE_MASK)
        self.pages.deactivate(members)
        self.events.record("release", row, mapped, members[:0])
        self._vacate(row, mapped)
        return members, frontier

    def close(self, row: int) -> None:
        """Give up membership and reservation; free the pages that nobody references any more.  (C9.8)"""
        shared, mapped = self.shared_end.item(row) >> PAGE_SHIFT, self.membership_pages(row)
        bound = self.bound_end.item(row) >> PAGE_SHIFT
        table = self.table[row]
        if shared < bound:
            private = self.pages.index_of(self.members[row, shared:bound])
            self.pool.release(table[shared:bound], leased=mapped - shared)
            self.pages.recycle(private)
        first_freed = shared
        if shared:
            immutable = self.pages.index_of(self.members[row, :shared])
            page_ids = self.pages.release_active(immutable)
            if page_ids.size:
                self.pool.release(page_ids, leased=page_ids.size)
            first_freed -= page_ids.size  # spaces share prefixes only: pages of this space alone are a suffix
        committed = pages_for_tokens(self.committed_end.item(row))
        if committed < mapped:
            self.events.record("trim", row, committed, table[committed:mapped])
        self.events.record("release", row, first_freed, table[first_freed:committed])
        self._vacate(row, bound)

    # ---- units ------------------------------------------------------------------------------------

    def reaches_new_pages(self, entry: EntryColumns) -> bool:
        """Note where a unit ends in each row, and say whether some row may leave its mapped pages.

        If none may, two vector operations were enough, or none where the same batch has far to go.  Otherwise the
        caller asks `is_ready` and `is_writable`, and calls `map_reached`.  If S lies inside a page, the answer is
        always True: a row may pass S within its pages.
        """
        self._is_repeated = entry is self._last_entry
        if self._is_repeated:
            self._ready_left -= entry.width
            if self._mapped_left >= entry.width:
                self._mapped_left -= entry.width
                return False
        else:
            self._last_entry = entry
            self._mapped_left = self._ready_left = 0
        add(self.committed_end, entry.by_row, self._unit_ends)
        less(self.mapped_end, self._unit_ends, self._crossing)
        if self._is_ragged or self._crossing.tobytes() != self._none_crossing:
            return True
        self._note_mapped_left()
        return False

    def is_ready(self, entry: EntryColumns) -> bool:
        """Whether the unit stays within bound pages, below every entitlement and below S."""
        if self._ready_left > 0:
            return True
        less(self.ready_end, self._unit_ends, self._is_beyond)
        if self._is_beyond.tobytes() != self._none_crossing:
            return False
        if self._is_repeated:
            self._ready_left = self._least_left(self.ready_end, entry)
        return True

    def is_writable(self) -> bool:
        """Whether no row of the unit would write beyond its entitlement, or at or beyond S.  (C9.3, C11.2)"""
        less(self.writable_end, self._unit_ends, self._is_beyond)
        return self._is_beyond.tobytes() == self._none_crossing

    def map_reached(self, *, is_one_page: bool) -> TableSlices | None:
        """Map the pages that the unit reaches; the caller has asked `is_writable`.  (C9.3)

        `is_one_page`: the unit `is_ready`, and no row writes more than 64 columns, so no row gets more than one page.
        """
        rows = self._crossing.nonzero()[0]
        if not rows.size:
            return None
        if not is_one_page:
            return self._map(rows, self._unit_ends[rows])
        if self.new_windows:
            self.new_windows.clear()
        old_ends = self.mapped_end[rows]
        self.pool.materialize(rows.size)
        self._may_trail = True
        self.mapped_end[rows] = old_ends + _PAGE_TOKENS
        self._note_mapped_left()
        slices = TableSlices(rows, old_ends >> _PAGE_SHIFT, self._one_each[: rows.size], rows.size)
        self.events.record_slices("materialize", slices, self.table)
        return slices

    def ensure_mapped_to_tokens(self, row: int, tokens: int) -> TableSlices | None:
        """Map positions [0, tokens) of a row, and return the slices to publish, or None without new pages.

        A lower bound: a row that maps more already does not change.  The caller has called `require_entitled`.  (C9.3)
        """
        if tokens <= self.mapped_end.item(row):
            return None
        return self._map(np.array([row]), np.array([tokens], np.int32))

    def require_entitled(self, rows: npt.NDArray[np.int64], ends: npt.NDArray[np.integer[Any]]) -> None:
        """Refuse ends beyond the entitlement of their row; the error's `rows` lists all such rows.  (C9.3)"""
        over = np.flatnonzero(ends > self.entitled_end[rows])
        if over.size:
            row, end = int(rows[over[0]]), int(ends[over[0]])
            grown = "write less at once and begin a round first, which extends leases; else "
            raise EntitlementExceeded(
                f"mapping row {row} of pool {self.pool.name} to {end} tokens",
                expected=f"at most {self.entitled_end[row]} tokens "
                         f"({self.entitlement_pages(row)} pages of entitlement)",
                got=f"{end} tokens ({pages_for_tokens(end)} pages)",
                remedy=f"{grown if self.grows else ''}activate with a larger token budget", clause="C9.3",
                rows=rows[over].tolist(),
            )

    def commit(self, columns: Tokens) -> None:
        """Advance the committed frontier of every row r by columns[r], which a unit has mapped.  (C9.5)"""
        if columns.size > 1:
            add(self.committed_end, columns, self.committed_end)
        else:  # in place it takes four times as long for one row
            self.committed_end[0] = self.committed_end.item(0) + columns.item(0)

    def commit_at(self, batch: Batch, columns: Tokens) -> None:
        """Advance the committed frontiers of a batch's rows by columns of its entries, as `commit`.  (C9.5)"""
        committed = self.committed_end
        index = batch.index
        if columns.size == 1:
            row = batch.rows.item(0)
            committed[row] = committed.item(row) + columns.item(0)
        elif type(index) is slice:
            selected = committed[index]  # a view
            add(selected, columns, selected)
        else:
            committed[index] = committed[index] + columns

    # ---- between units ----------------------------------------------------------------------------

    def require_trimmable(self, index: RowIndex, provisional: Tokens | None) -> None:
        """Refuse a trim of pages that a copy uses; only then is there anything to ask.  (C7.4)"""
        rows = self._trailing_rows(index, provisional)
        if rows is not None:
            slices, _ = self._trailing_slices(rows)
            self.pages.require_unpinned(f"trim in pool {self.pool.name}", self.members[slices.flat()])

    def trim(self, index: RowIndex, provisional: Tokens | None = None) -> int:
        """Return the pages of some rows behind committed + provisional columns to their own reservations.  (C9.6)

        The pages lie behind `shared_end`, so they are the row's own.  Available does not change.

        Returns:
            How many pages.
        """
        rows = self._trailing_rows(index, provisional)
        if rows is None:
            return 0
        slices, keep_ends = self._trailing_slices(rows)
        flat_rows, blocks = slices.flat()
        at = self._row_starts[flat_rows] + blocks.astype(np.int64)  # one index: two axes take 1 us for each table
        self.pool.dematerialize(self._flat_table[at])
        self.pages.trim(self._flat_members[at])
        self.mapped_end[rows] = keep_ends
        self._mapped_left = 0
        self.events.record_slices("trim", slices, self.table)
        return slices.pages

    def require_truncate(self, row: int, tokens: int) -> None:
        """Refuse a cut above the frontier, inside a page of several spaces, or of pages that a copy uses.

        Whole pages behind the cut may belong to other spaces too.  Each leaves the entitlement, so a page that is
        available must take its place.  (C9.10, C7.4)
        """
        committed, what = self.committed_end.item(row), f"truncate of row {row} of pool {self.pool.name}"
        if not 0 <= tokens <= committed:
            raise MisuseError(what, expected=f"0 to {committed} tokens", got=shown(tokens),
                              remedy="truncate only lowers a committed frontier", clause="C9.10")
        cut = self.members[row, tokens >> PAGE_SHIFT : self.membership_pages(row)]
        self.pages.require_unpinned(what, cut)
        if tokens < committed and tokens & PAGE_MASK:
            self.pages.require_private(what, cut[:1])
        lost = self._pages_of_others(row, pages_for_tokens(tokens))
        if lost > self.pool.available:
            raise MisuseError(what, expected=f"{lost} available pages in place of those that other spaces hold too",
                              got=self.pool.available, clause="C9.10",
                              remedy="release something first, or finish it and activate a fork at the lower frontier")

    def truncate(self, row: int, tokens: int) -> None:
        """Lower the committed frontier to `tokens`, then trim; the caller has called `require_truncate`.  (C9.10)

        If the cut lies inside a page, that page gets a new content epoch; an equal frontier only trims (C7.6).
        """
        first_cut = tokens >> PAGE_SHIFT
        if self._pages_of_others(row, pages_for_tokens(tokens)):
            self._leave_shared_pages(row, pages_for_tokens(tokens))
        self.pages.thaw(self.members[row, first_cut : self.shared_end.item(row) >> PAGE_SHIFT], row)
        self.shared_end[row] = min(self.shared_end.item(row), first_cut << PAGE_SHIFT)
        if tokens < self.committed_end[row] and tokens & PAGE_MASK:
            self.pages.renew_content(self.members[row, first_cut : first_cut + 1])
        if self.pages.hosted and tokens < self.committed_end[row]:  # moved pages may have Host replicas
            self.pages.free_records(self.members[row, first_cut : self.membership_pages(row)])
        self.committed_end[row] = tokens
        self._may_trail = True
        self.trim(slice(row, row + 1))

    # ---- queries ----------------------------------------------------------------------------------

    def entitlement_pages(self, row: int) -> int:
        """Return membership plus reservation, in pages.  (C9.1)"""
        return self.entitled_end.item(row) >> PAGE_SHIFT

    def membership_pages(self, row: int) -> int:
        """Return how many pages belong to the space.  (C9.1)"""
        return self.mapped_end.item(row) >> PAGE_SHIFT

    def provisional_pages(self, row: int) -> int:
        """Return how many mapped pages lie wholly behind the frontier.  (C9.1)"""
        return self.membership_pages(row) - pages_for_tokens(self.committed_end.item(row))

    def covered_columns(self, rows: npt.NDArray[np.int64]) -> Tokens:
        """Return how many columns behind its frontier each row may still write, below S.  (C9.2, C11.2)"""
        return self.writable_end[rows] - self.committed_end[rows]

    def by_row(self, index: RowIndex, values: Tokens) -> Tokens:
        """Return (C,) int32 with values at some rows, and 0, the neutral value, elsewhere."""
        spread = np.zeros(self.committed_end.size, np.int32)
        spread[index] = values
        return spread

    def entries(self, slices: TableSlices) -> npt.NDArray[np.int64]:
        """Return (2, pages) int64: row * L + block and page group id of every entry of slices, slice after slice."""
        rows, blocks = slices.flat()
        entries = np.empty((2, slices.pages), np.int64)
        at = entries[0]
        add(self._row_starts[rows], blocks.astype(np.int64), at)  # one type: it takes half of the time of two
        entries[1] = self._flat_table[at]
        return entries

    def mapped_ids(self, row: int) -> Ids:
        """Return a copy of the page group ids that the row maps, in block order."""
        return self.table[row, : self.membership_pages(row)].copy()

    def committed_columns(self, logical: Pages) -> Tokens:
        """Return committed columns 0..64 of pages; derived from the writer's frontier.  (C7 preamble)"""
        writers = self.pages.writer[logical]
        derived = self.committed_end[writers] - (self.pages.block[logical] << PAGE_SHIFT)
        np.maximum(derived, _ZERO, out=derived)
        np.minimum(derived, _PAGE_TOKENS, out=derived)
        np.copyto(derived, self.pages.committed[logical], where=writers < _ZERO)
        return derived

    def columns_below(self, ends: Tokens) -> npt.NDArray[np.bool_]:
        """Return a (C, L) mask of the table entries that lie below ends[r] tokens."""
        return np.arange(self.blocks) < (ends >> PAGE_SHIFT)[:, None]

    def held_mask(self) -> npt.NDArray[np.bool_]:
        """Return a (capacity,) array that is True at every leased or bound page group."""
        page_ids = self.pages.device[self.pages.references > 0]
        mask = np.zeros(self.pool.capacity, np.bool_)
        mask[page_ids[page_ids >= 0]] = True
        return mask

    def mapped_mask(self) -> npt.NDArray[np.bool_]:
        """Return a (capacity,) array that is True at every leased page group, of active and inactive spaces."""
        mask = self.held_mask()
        mask[self.table[self.columns_below(self.bound_end) & ~self.columns_below(self.mapped_end)]] = False
        return mask

    def lease(self, row: int, block: int) -> DevicePageLease:
        """Return the lease of a mapped block; refuse a block that is only bound (C6.5).  (C6.1)"""
        if not 0 <= block < self.membership_pages(row):
            raise MisuseError(f"the lease of block {block} of row {row} in pool {self.pool.name}",
                              expected=f"a mapped block, 0 to {self.membership_pages(row) - 1}", got=block,
                              remedy="map the block first", clause="C6.5")
        page_id = int(self.table[row, block])
        return DevicePageLease(self.pool.name, page_id, int(self.pool.serials[page_id]))

    def require_current(self, lease: DevicePageLease) -> None:
        """Refuse a lease whose page group was released or dematerialized since.  (C6.1)"""
        page_id = lease.page_id
        is_known = lease.pool == self.pool.name and 0 <= page_id < self.pool.capacity
        if not is_known or self.pool.serials[page_id] != lease.serial or not self.mapped_mask()[page_id]:
            raise StaleHandle(f"{lease}", expected="a current lease", got="one that was released or trimmed",
                              remedy="take a new lease from the address space", clause="C6.1")

    # ---- helpers ----------------------------------------------------------------------------------

    def _map(self, rows: npt.NDArray[np.int64], ends: Tokens) -> TableSlices:
        """Map rows to ends: new pages move from the reservation of a space to its allocation.  (C6.2, C6.5)"""
        self.new_windows.clear()
        old_ends = self.mapped_end[rows]
        new_ends = (ends + _PAGE_MASK) & _PAGE_STARTS
        is_unbound = self.bound_end[rows] < new_ends
        if b"\1" in is_unbound.tobytes():  # `any` takes 1 us
            for row, end in zip(rows[is_unbound].tolist(), ends[is_unbound].tolist(), strict=True):
                self._bind_window(row, end)
        slices = self._slices(rows, old_ends, new_ends)
        self.pool.materialize(slices.pages)
        self._may_trail = True
        self.mapped_end[rows] = new_ends
        self.events.record_slices("materialize", slices, self.table)
        return slices

    def _pages_of_others(self, row: int, first_block: int) -> int:
        """Return how many pages of a row from a block on belong to other spaces too; they come before its own."""
        immutable = self.members[row, first_block : self.shared_end.item(row) >> PAGE_SHIFT]
        return int(np.count_nonzero(self.pages.references[immutable] > 1))

    def _leave_shared_pages(self, row: int, first_block: int) -> None:
        """Give up every page from a block on, and promise as many: some of them belong to other spaces.  (C9.10)"""
        shared, mapped = self.shared_end.item(row) >> PAGE_SHIFT, self.membership_pages(row)
        bound = self.bound_end.item(row) >> PAGE_SHIFT
        own, table = self.members[row, shared:bound], self.table[row]
        self.pool.release(table[shared:bound], leased=mapped - shared)
        self.pages.recycle(own)
        freed = self.pages.release_active(self.members[row, first_block:shared])
        self.pool.release(freed, leased=freed.size)
        granted = self.pool.try_reserve(bound - first_block)
        assert granted, f"pool {self.pool.name} lacks pages in place of shared ones"
        self.events.record("release", row, shared - freed.size, table[shared - freed.size : mapped])
        self.events.record("publish", row, 0, table[:first_block])
        table[first_block:bound] = UNMAPPED
        self.members[row, first_block:bound] = -1
        self.shared_end[row] = self.mapped_end[row] = self.bound_end[row] = first_block << PAGE_SHIFT
        self._derive(row)
        self._last_entry = None

    def margins_hold(self) -> bool:
        """Say whether every row of the last unit may still write what is noted as left."""
        if self._last_entry is None:
            return True
        rows = self._last_entry.rows
        committed, mapped, ready = (ends[rows] for ends in (self.committed_end, self.mapped_end, self.ready_end))
        return bool((committed + self._mapped_left <= mapped).all() and (committed + self._ready_left <= ready).all())

    def _note_mapped_left(self) -> None:
        """Note how far the rows of the last unit are from their next page, if that saves more than it takes."""
        entry = self._last_entry
        if entry is None or not self._is_repeated or self._is_ragged:
            return
        if entry.width * entry.by_entry.size <= FAR_COLUMNS:
            self._mapped_left = self._least_left(self.mapped_end, entry)

    def _least_left(self, ends: Tokens, entry: EntryColumns) -> int:
        """Return how many columns every row of a unit may write behind the unit below its end, at least."""
        left = ends[entry.rows] - self._unit_ends[entry.rows]
        return left.item(left.argmin())

    def _trailing_rows(self, index: RowIndex, provisional: Tokens | None) -> npt.NDArray[np.int64] | None:
        """Return the rows with mapped pages behind committed + provisional columns, or None if there are none.

        Those pages begin with the one that holds position `_unit_ends`.
        """
        if not self._may_trail:
            return None
        keep = self._unit_ends
        if provisional is None:
            add(self.committed_end, _PAGE_MASK, keep)
        else:
            np.copyto(keep, self.committed_end)
            keep[index] += np.minimum(provisional, self.blocks * PAGE_TOKENS)
            add(keep, _PAGE_MASK, keep)
        less(keep, self.mapped_end, self._crossing)
        if self._crossing.tobytes() == self._none_crossing:
            self._may_trail = provisional is not None
            return None
        rows = self._crossing[index].nonzero()[0]
        if not rows.size:
            return None
        if not isinstance(index, slice):
            rows = np.sort(index[rows])
        elif index.start:
            rows = rows + index.start
        return rows

    def _trailing_slices(self, rows: npt.NDArray[np.int64]) -> tuple[TableSlices, Tokens]:
        """Return the slices of the pages that `_trailing_rows` found, and where each membership ends without them."""
        kept, mapped = self._unit_ends[rows], self.mapped_end[rows]
        first_blocks = kept >> _PAGE_SHIFT
        if highest(mapped - kept) <= PAGE_TOKENS:
            return TableSlices(rows, first_blocks, self._one_each[: rows.size], rows.size), mapped - _PAGE_TOKENS
        keep_ends = first_blocks << _PAGE_SHIFT
        return self._slices(rows, keep_ends, mapped), keep_ends

    def _slices(self, rows: npt.NDArray[np.int64], first_tokens: Tokens, last_tokens: Tokens) -> TableSlices:
        """Return the slices [first_tokens[i], last_tokens[i]), multiples of P, of rows."""
        tokens, count = last_tokens - first_tokens, rows.size
        if highest(tokens) == PAGE_TOKENS:  # mostly: `sum` takes 1.5 us
            return TableSlices(rows, first_tokens >> _PAGE_SHIFT, self._one_each[:count], count)
        return TableSlices(rows, first_tokens >> _PAGE_SHIFT, tokens >> _PAGE_SHIFT, int(tokens.sum()) >> PAGE_SHIFT)

    def _bind_window(self, row: int, end_tokens: int) -> None:
        """Bind ids at least up to `end_tokens`, a whole window if the entitlement allows.  (C6.5)"""
        first = self.bound_end.item(row) >> PAGE_SHIFT
        pages = max(WINDOW_PAGES, pages_for_tokens(end_tokens) - first)
        count = min(pages, self.entitlement_pages(row) - first)
        table, members = self.table[row], self.members[row]
        page_ids = self.pool.bind(count, int(table[first - 1]) if first else -1)
        logical_after = int(members[first - 1]) if first else -1
        table[first : first + count] = page_ids
        members[first : first + count] = self.pages.describe(
            page_ids, writer=row, first_block=first, after=logical_after
        )
        self.bound_end[row] = (first + count) * PAGE_TOKENS
        self.new_windows.append((row, first, count))
        self._derive(row)

    def _derive(self, row: int) -> None:
        """Set the columns that are derived from the bound and the entitled end of a row."""
        self.writable_end[row] = end = min(self.entitled_end.item(row), self.max_context)
        self.ready_end[row] = min(self.bound_end.item(row), end)

    def _vacate(self, row: int, first: int) -> None:
        """Free the bound pages from block `first` on and the promised pages behind them, and clear the row."""
        bound = self.bound_end.item(row) >> PAGE_SHIFT
        if first < bound:
            self.pool.release(self.table[row, first:bound], leased=0)
            self.pages.recycle(self.members[row, first:bound])
        self.pool.shrink(self.entitlement_pages(row) - bound)
        self.table[row, :bound] = UNMAPPED
        self.members[row, :bound] = -1
        self.shared_end[row] = self.committed_end[row] = self.mapped_end[row] = self.bound_end[row] = 0
        self.entitled_end[row] = self.writable_end[row] = self.ready_end[row] = 0
        self._last_entry = None
