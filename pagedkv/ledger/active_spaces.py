"""AddressSpaces: the active address spaces of one pool, as token columns over execution rows.  (C9)

Each space is an ordered list of logical pages (its *membership*) with token-exact limits.  On the
number line of one row, all in tokens, with every segment labelled:

    0 ---- shared_end ---- frontier ------------ mapped_end ---------- bound_end ---------- limit
    [ immutable )[ committed )[ mapped, provisional )[ bound, unmapped    )[ promised, no id   )
      no writer    readable     writable by units      ids known, reserved   reserved

    shared_end pages below it may belong to other spaces: full, and without a writer (C7.5); from it on
               every page is this row's own; a multiple of P
    frontier   committed frontier, any token (C9.1, C16.6)
    mapped_end membership ends here; a multiple of P; may exceed the frontier
    bound_end  ids are named up to here, in windows of 64 pages (C6.5)
    limit      entitlement = membership + reservation, in tokens; a multiple of P

Everything else is derived: membership pages = mapped_end / P, reservation = (limit - mapped_end) / P.
Batch calls take one int32 value per execution row over the whole span (rows not meant carry the
neutral value), so the per-step path is a few vector operations whatever the batch; a row touches the
allocator only when it crosses a page boundary (C9.4).

Whoever calls has checked that no unit in flight selects the row (`unit_guard.py`).  A pool's spaces
never look at another pool's (C9.9).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagedkv.errors import EntitlementExceeded, MisuseError, StaleHandle
from pagedkv.ledger.block_tables import UNMAPPED, BlockTable, TableSlices, flatten_ranges
from pagedkv.ledger.events import PageEvents, PoolEvents
from pagedkv.ledger.free_runs import Ids
from pagedkv.ledger.pages import LogicalPages, Pages
from pagedkv.ledger.pool import DevicePageLease, PagePool
from pagedkv.values.quantities import PAGE_MASK, PAGE_SHIFT, PAGE_TOKENS, pages_for_tokens

Tokens = npt.NDArray[np.int32]

WINDOW_PAGES = 64
"""Pages bound at once: 4096 tokens, so that a row asks for ids once in 4096 steps (C6.5)."""

_ZERO = np.zeros((), np.int32)
_PAGE_TOKENS = np.full((), PAGE_TOKENS, np.int32)

HOLD = np.int32(1 << 30)
"""Neutral `keep_tokens` of `trim`: beyond every limit, so nothing of that row is trimmed."""


class AddressSpaces:
    """Columns of one pool's active spaces; row r of every array is execution row r.

    Attributes:
        members: (C, L) int32, logical pages below `bound_end`, -1 beyond.
        shared_end, frontier, mapped_end, bound_end, limit: (C,) int32, tokens, as drawn above; 0 in rows without one.
        ceiling: (C,) int32, min(limit, S): what one comparison per step is made with.
        grows: whether leases are extended at round boundaries (C9.2); for the advice in errors alone.

    The columns, and the mirror of the table, are written by the methods below alone.
    """

    def __init__(
        self, pool: PagePool, pages: LogicalPages, table: BlockTable, *, max_context: int | None = None,
        events: PoolEvents | None = None,
    ) -> None:
        self.pool = pool
        self.events = PoolEvents(pool.name, PageEvents()) if events is None else events
        self.max_context = table.blocks * PAGE_TOKENS if max_context is None else max_context
        self.grows = False
        self.pages = pages
        self.table = table
        rows = table.mirror.shape[0]
        self.members = np.full((rows, table.blocks), -1, np.int32)
        self.shared_end = np.zeros(rows, np.int32)
        self.frontier = np.zeros(rows, np.int32)
        self.mapped_end = np.zeros(rows, np.int32)
        self.bound_end = np.zeros(rows, np.int32)
        self.limit = np.zeros(rows, np.int32)
        self.ceiling = np.zeros(rows, np.int32)
        self._crossing = np.zeros(rows, np.bool_)
        self._none_crossing = self._crossing.tobytes()

    def open(self, row: int, *, entitlement_pages: int) -> None:
        """Start an empty space whose pages the caller has reserved in the pool.  (C9.1)"""
        assert self.limit[row] == 0, f"row {row} of pool {self.pool.name} holds a space already"
        self.limit[row] = entitlement_pages * PAGE_TOKENS
        self.ceiling[row] = min(entitlement_pages * PAGE_TOKENS, self.max_context)

    def extend(self, row: int, *, pages: int) -> None:
        """Raise the entitlement by pages that the caller has reserved in the pool.  (C9.2)"""
        assert self.limit[row] > 0, f"row {row} of pool {self.pool.name} holds no space"
        self.limit[row] += pages * PAGE_TOKENS
        self.ceiling[row] = min(int(self.limit[row]), self.max_context)

    def covered_columns(self, rows: npt.NDArray[np.int64]) -> Tokens:
        """Return how many columns behind its frontier each row may still write, below S.  (C9.2, C11.2)"""
        return self.ceiling[rows] - self.frontier[rows]

    def adopt(self, row: int, members: Ids, page_ids: Ids, *, frontier: int, entitlement_pages: int) -> None:
        """Start a space from pages that hold [0, frontier), each with this space's active reference.  (C10.3)

        Full pages stay without a writer; the writer of a partial tail is the row.  `page_ids` are the pages' page
        groups: what was published for the row.
        """
        self.open(row, entitlement_pages=entitlement_pages)
        count = members.size
        assert count == pages_for_tokens(frontier), f"{count} pages for {frontier} tokens"
        self.members[row, :count] = members
        self.table.mirror[row, :count] = page_ids
        self.frontier[row] = frontier
        self.shared_end[row] = frontier & ~PAGE_MASK
        self.mapped_end[row] = self.bound_end[row] = count * PAGE_TOKENS

    def freeze(self, row: int) -> Ids:
        """Take the writer from every full committed page, and return all of them in block order.  (C10.6)"""
        first, full = self.shared_end.item(row) >> PAGE_SHIFT, self.frontier.item(row) >> PAGE_SHIFT
        if first < full:
            self.pages.freeze(self.members[row, first:full], PAGE_TOKENS)
        self.shared_end[row] = full << PAGE_SHIFT
        return self.members[row, :full].copy()

    def detach(self, row: int) -> tuple[Ids, int]:
        """Give up reservation and row; the pages of a trimmed space stay, with an inactive reference.  (C9.8)

        Returns:
            The logical pages in block order, and the frontier.
        """
        frontier, mapped = int(self.frontier[row]), self.membership_pages(row)
        assert mapped == pages_for_tokens(frontier), f"row {row} of pool {self.pool.name} is not trimmed"
        self.freeze(row)
        members = self.members[row, :mapped].copy()
        if frontier & PAGE_MASK:
            self.pages.freeze(members[frontier >> PAGE_SHIFT :], frontier & PAGE_MASK)
        self.pages.deactivate(members)
        self.events.record("release", row, mapped, members[:0])
        self._vacate(row, mapped)
        return members, frontier

    def provisional_pages(self, row: int) -> int:
        """Return how many mapped pages lie wholly behind the frontier.  (C9.1)"""
        return self.membership_pages(row) - pages_for_tokens(int(self.frontier[row]))

    def spread(self, rows: npt.NDArray[np.int64], values: Tokens) -> Tokens:
        """Return (C,) int32 with values at rows and 0, the neutral value, elsewhere."""
        span = np.zeros_like(self.frontier)
        span[rows] = values
        return span

    def has_row_beyond_ceiling(self, ends: Tokens) -> bool:
        """Whether some row would write beyond its entitlement or at or beyond S; one comparison.  (C9.3, C11.2)"""
        np.less(self.ceiling, ends, out=self._crossing)
        return self._crossing.tobytes() != self._none_crossing

    def entitlement_pages(self, row: int) -> int:
        """Return membership plus reservation, in pages.  (C9.1)"""
        return self.limit.item(row) >> PAGE_SHIFT

    def membership_pages(self, row: int) -> int:
        """Return how many pages belong to the space.  (C9.1)"""
        return self.mapped_end.item(row) >> PAGE_SHIFT

    def ensure_mapped_to_tokens(self, ends: Tokens) -> TableSlices | None:
        """Map positions [0, ends[r]) of every row r; a lower bound, 0 asks for nothing.  (C9.3)

        Membership that is large enough stays as it is.  New pages move reservation to allocation of
        the same space; neither frontier nor entitlement changes.

        Returns:
            The table slices to publish, or None when no row crossed a page boundary.

        Raises:
            EntitlementExceeded: some row needs more than its entitlement; nothing changed in any row.
        """
        np.less(self.mapped_end, ends, out=self._crossing)
        if self._crossing.tobytes() == self._none_crossing:
            return None
        self.require_entitled(ends)
        rows = np.flatnonzero(self._crossing)
        old_ends = self.mapped_end[rows]
        new_ends = (ends[rows] + PAGE_MASK) & ~PAGE_MASK
        for row in rows[new_ends > self.bound_end[rows]].tolist():
            self._bind_window(row, int(ends[row]))
        counts = ((new_ends - old_ends) >> PAGE_SHIFT).astype(np.int64)
        self.pool.materialize(int(counts.sum()))
        self.mapped_end[rows] = new_ends
        slices = TableSlices(rows, (old_ends >> PAGE_SHIFT).astype(np.int64), counts)
        self.events.record_slices("materialize", slices, self.table.mirror)
        return slices

    def require_entitled(self, ends: Tokens) -> None:
        """Refuse ends beyond the entitlement of their row.  (C9.3)

        Raises:
            EntitlementExceeded: names the first such row; `rows` lists them all.
        """
        over = np.flatnonzero(ends > self.limit)
        if over.size:
            row = int(over[0])
            end, grown = int(ends[row]), "write less at once and begin a round first, which extends leases; else "
            raise EntitlementExceeded(
                f"mapping row {row} of pool {self.pool.name} to {end} tokens",
                expected=f"at most {int(self.limit[row])} tokens ({self.entitlement_pages(row)} pages of entitlement)",
                got=f"{end} tokens ({pages_for_tokens(end)} pages)",
                remedy=f"{grown if self.grows else ''}activate with a larger token budget", clause="C9.3",
                rows=over.tolist(),
            )

    def require_commit(self, columns: Tokens) -> None:
        """Refuse a commit that is negative or leaves the membership; names the first such row.  (C9.5)"""
        np.less(self.mapped_end, self.frontier + columns, out=self._crossing)
        if self._crossing.tobytes() == self._none_crossing:
            np.less(columns, _ZERO, out=self._crossing)
            if self._crossing.tobytes() == self._none_crossing:
                return
        row = int(np.flatnonzero(self._crossing)[0])
        raise MisuseError(
            f"a commit of {int(columns[row])} tokens to row {row} of pool {self.pool.name}",
            expected=f"0 to {int(self.mapped_end[row] - self.frontier[row])} tokens (mapped beyond the frontier)",
            got=f"{int(columns[row])}", remedy="map before the unit writes and commit what it wrote", clause="C9.5",
        )

    def commit(self, columns: Tokens) -> None:
        """Advance the committed frontier of every row r by columns[r].  (C9.5)

        Raises:
            MisuseError: a negative count, or a frontier beyond the membership; nothing changed.
        """
        self.require_commit(columns)
        self.frontier += columns

    def trim(self, keep_tokens: Tokens) -> int:
        """Keep ceil(max(committed, keep_tokens[r]) / P) pages of every row r; `HOLD` keeps all.  (C9.6)

        Trailing pages return to the reservation of the same space: available does not change.

        Returns:
            How many pages were trimmed.

        Raises:
            MisuseError: another space references a trailing page, or a copy uses one; nothing changed.
        """
        keep_ends = (np.maximum(self.frontier, keep_tokens) + PAGE_MASK) & ~PAGE_MASK
        rows = np.flatnonzero(self.mapped_end > keep_ends)
        if not rows.size:
            return 0
        keep_blocks = (keep_ends[rows] >> PAGE_SHIFT).astype(np.int64)
        counts = (self.mapped_end[rows] >> PAGE_SHIFT).astype(np.int64) - keep_blocks
        flat = flatten_ranges(rows, keep_blocks, counts)
        logical = self.members[flat]
        self.pages.require_private(logical, f"trim in pool {self.pool.name}")
        self.pool.dematerialize(self.table.mirror[flat])
        self.pages.renew(logical)
        self.mapped_end[rows] = keep_ends[rows]
        self.events.record_slices("trim", TableSlices(rows, keep_blocks, counts), self.table.mirror)
        return int(counts.sum())

    def truncate(self, row: int, tokens: int) -> None:
        """Lower the committed frontier to `tokens`, then trim.  (C9.10)

        The page that is cut inside gets a new content epoch; an equal frontier only trims (C7.6).

        Raises:
            MisuseError: tokens is negative or above the committed frontier, or another space references a page that
                is cut or trimmed, or a copy uses one (C7.4); nothing changed.
        """
        committed = int(self.frontier[row])
        if not 0 <= tokens <= committed:
            raise MisuseError(f"truncate of row {row} of pool {self.pool.name}", expected=f"0 to {committed} tokens",
                              got=tokens, remedy="truncate only lowers a committed frontier", clause="C9.10")
        first_cut = tokens >> PAGE_SHIFT
        self.pool.require_unpinned(self.mapped_ids(row)[first_cut:], "truncate")
        self.pages.require_unpinned("truncate", self.members[row, first_cut : self.membership_pages(row)])
        immutable = self.members[row, first_cut : int(self.shared_end[row]) >> PAGE_SHIFT]
        self.pages.require_private(immutable, f"truncate of row {row} of pool {self.pool.name}")
        self.pages.thaw(immutable, row)
        self.shared_end[row] = min(int(self.shared_end[row]), first_cut << PAGE_SHIFT)
        if tokens < committed and tokens & PAGE_MASK:
            self.pages.renew_content(self.members[row, first_cut : first_cut + 1])
        self.frontier[row] = tokens
        self.trim_row(row)

    def trim_row(self, row: int) -> None:
        """Return every page of one row that lies wholly behind its frontier to its reservation.  (C9.6)"""
        if self.provisional_pages(row):
            keep_tokens = np.full_like(self.frontier, HOLD)
            keep_tokens[row] = 0
            self.trim(keep_tokens)

    def close(self, row: int) -> None:
        """Give up membership and reservation; a page returns to available with its last reference.  (C9.8)"""
        shared, mapped = self.shared_end.item(row) >> PAGE_SHIFT, self.membership_pages(row)
        bound = self.bound_end.item(row) >> PAGE_SHIFT
        if shared < bound:
            private = self.pages.index_of(self.members[row, shared:bound])
            self.pool.release(self.table.mirror[row, shared:bound], leased=mapped - shared)
            self.pages.recycle(private)
        first_gone = shared
        if shared:
            immutable = self.pages.index_of(self.members[row, :shared])
            page_ids = self.pages.release_active(immutable)
            if page_ids.size:
                self.pool.release(page_ids, leased=page_ids.size)
            first_gone -= page_ids.size  # spaces share prefixes only: what nobody else holds is a suffix
        kept = pages_for_tokens(self.frontier.item(row))
        mirror = self.table.mirror[row]
        if kept < mapped:
            self.events.record("trim", row, kept, mirror[kept:mapped])
        self.events.record("release", row, first_gone, mirror[first_gone:kept])
        self._vacate(row, bound)

    def _vacate(self, row: int, kept: int) -> None:
        """Return the bound pages from block `kept` on and the promise behind them, and clear the row."""
        bound = self.bound_end.item(row) >> PAGE_SHIFT
        if kept < bound:
            self.pool.release(self.table.mirror[row, kept:bound], leased=0)
            self.pages.recycle(self.members[row, kept:bound])
        self.pool.shrink(self.entitlement_pages(row) - bound)
        self.table.mirror[row, :bound] = UNMAPPED
        self.members[row, :bound] = -1
        self.shared_end[row] = self.frontier[row] = self.mapped_end[row] = self.bound_end[row] = 0
        self.limit[row] = self.ceiling[row] = 0

    def lease(self, row: int, block: int) -> DevicePageLease:
        """Return the lease of a mapped block.  (C6.1)

        Raises:
            MisuseError: the block is not mapped; a bound block counts as unmapped (C6.5).
        """
        if not 0 <= block < self.membership_pages(row):
            raise MisuseError(f"the lease of block {block} of row {row} in pool {self.pool.name}",
                              expected=f"a mapped block, 0 to {self.membership_pages(row) - 1}", got=block,
                              remedy="map the block first", clause="C6.5")
        page_id = int(self.table.mirror[row, block])
        return DevicePageLease(self.pool.name, page_id, int(self.pool.serials[page_id]))

    def require_current(self, lease: DevicePageLease) -> None:
        """Refuse a lease that was released or dematerialized.  (C6.1)

        Raises:
            StaleHandle: the page group is free, bound or leased anew.
        """
        page_id = lease.page_id
        known = lease.pool == self.pool.name and 0 <= page_id < self.pool.capacity
        if not known or self.pool.serials[page_id] != lease.serial or not self.mapped_mask()[page_id]:
            raise StaleHandle(f"{lease}", expected="a current lease", got="one that was released or trimmed",
                              remedy="take the lease anew from the address space", clause="C6.1")

    def mapped_mask(self) -> npt.NDArray[np.bool_]:
        """Return a (capacity,) array that is True at every leased page group, of active and inactive spaces."""
        mask = self.held_mask()
        mask[self.table.mirror[self.columns_below(self.bound_end) & ~self.columns_below(self.mapped_end)]] = False
        return mask

    def held_mask(self) -> npt.NDArray[np.bool_]:
        """Return a (capacity,) array that is True at every leased or bound page group."""
        mask = np.zeros(self.pool.capacity, np.bool_)
        mask[self.pages.device[self.pages.references > 0]] = True
        return mask

    def mapped_ids(self, row: int) -> Ids:
        """Return a copy of the page group ids that the row maps, in block order."""
        return self.table.mirror[row, : self.membership_pages(row)].copy()

    def committed_columns(self, logical: Pages) -> Tokens:
        """Return committed columns 0..64 of pages; derived from the writer's frontier.  (C7 preamble)"""
        writers = self.pages.writer[logical]
        derived = self.frontier[writers] - (self.pages.block[logical] << PAGE_SHIFT)
        np.maximum(derived, _ZERO, out=derived)
        np.minimum(derived, _PAGE_TOKENS, out=derived)
        np.copyto(derived, self.pages.committed[logical], where=writers < _ZERO)
        return derived

    def _bind_window(self, row: int, end_tokens: int) -> None:
        """Bind at least up to `end_tokens`, in whole windows, never beyond the entitlement.  (C6.5)"""
        first = int(self.bound_end[row]) >> PAGE_SHIFT
        wanted = max(WINDOW_PAGES, pages_for_tokens(end_tokens) - first)
        count = min(wanted, self.entitlement_pages(row) - first)
        mirror, members = self.table.mirror[row], self.members[row]
        page_ids = self.pool.bind(count, int(mirror[first - 1]) if first else -1)
        logical_after = int(members[first - 1]) if first else -1
        mirror[first : first + count] = page_ids
        members[first : first + count] = self.pages.describe(
            page_ids, writer=row, first_block=first, after=logical_after
        )
        self.bound_end[row] = (first + count) * PAGE_TOKENS

    def columns_below(self, ends: Tokens) -> npt.NDArray[np.bool_]:
        """Return a (C, L) mask of the table entries that lie below ends[r] tokens."""
        return np.arange(self.table.blocks) < (ends >> PAGE_SHIFT)[:, None]
