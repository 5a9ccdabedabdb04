"""KeptSpaces: the inactive address spaces of one pool.  (C7.8, C9.8, C9.10)

An inactive space is an ordered list of logical pages without a row, a reservation or a writer:

    blocks     0       1       2        3
    members  [ full  | full  | full   | tail )       every page but the last is full
    tokens   0 ---------- protected_frontier ----- frontier

Pages [0, frontier / 64) may belong to other spaces too and are immutable; a partial tail belongs to this space alone.
`truncate` never cuts below the protected frontier: `keep` sets it to the frontier, and `protect` moves it.  The
`protected` column of a page is the maximum over its inactive spaces.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedkv.errors import MisuseError, shown
from pagedkv.ledger.events import PageEvents, PoolEvents
from pagedkv.ledger.free_runs import Ids, Index, highest, lowest, part_of
from pagedkv.ledger.pages import LogicalPages, Pages
from pagedkv.ledger.pool import PagePool
from pagedkv.values.quantities import PAGE_MASK, PAGE_SHIFT, PAGE_TOKENS, pages_for_tokens


@dataclass(eq=False)
class KeptSpace:
    """One inactive space; written by `KeptSpaces` alone.

    Attributes:
        members: (n,) int32, logical pages in block order; n = ceil(frontier / 64).
        index: the same pages as a fast index of the columns, computed once for all forks.
        frontier, protected_frontier: tokens.
    """

    members: Ids
    index: Index
    frontier: int
    protected_frontier: int


class KeptSpaces:
    """The inactive spaces of one pool, `by_number` of their continuation; the caller checks handles and numbers."""

    def __init__(self, pool: PagePool, pages: LogicalPages, events: PoolEvents | None = None) -> None:
        self.pool = pool
        self.pages = pages
        self.events = PoolEvents(pool.name, PageEvents()) if events is None else events
        self.by_number: dict[int, KeptSpace] = {}
        self._partial: dict[int, dict[int, int]] = {}  # page -> the columns, 1 to 63, that each space protects of it

    def keep(self, number: int, members: Ids, frontier: int) -> None:
        """Retain pages whose inactive reference and committed columns are set, and protect them.  (C7.8, C9.8)"""
        self.by_number[number] = KeptSpace(members, self.pages.index_of(members), frontier, 0)
        self._raise_protection(number, self.by_number[number], frontier)

    def take(self, number: int) -> KeptSpace:
        """Remove a space that becomes active or ends: its protection ends, its references stay.  (C10.4)"""
        space = self.by_number[number]
        self._lower_protection(number, space, 0)
        del self.by_number[number]
        return space

    def release(self, number: int) -> None:
        """Give up every membership; free the pages that nobody references any more.  (C9.8)"""
        space = self.take(number)
        self.drop(space.index, first_block=0, pages=space.members.size)

    def drop(self, logical: Pages, *, first_block: int, pages: int) -> None:
        """Drop one inactive reference of each of `pages` pages from a block on.  (C9.8)

        Spaces share prefixes only, so the freed pages are the last ones.
        """
        page_ids = self.pages.release(logical)
        first = first_block + pages - page_ids.size
        if page_ids.size and lowest(page_ids) < 0:  # some have no Device replica
            on_device = np.flatnonzero(page_ids >= 0)
            if on_device.size:
                self.pool.release(page_ids[on_device], leased=on_device.size)
                self.events.record_runs("release", first + on_device, page_ids[on_device])
        elif page_ids.size:
            self.pool.release(page_ids, leased=page_ids.size)
            self.events.record("release", None, first, page_ids)

    def sole_pages(self, members: Ids) -> int:
        """Return how many page groups would become available if each page lost one reference."""
        if not members.size:
            return 0
        at = self.pages.index_of(members)
        return int(np.count_nonzero((self.pages.references[at] == 1) & (self.pages.device[at] >= 0)))

    def protect(self, number: int, tokens: int) -> None:
        """Set the protected frontier, up or down.  (C7.8)"""
        space = self.by_number[number]
        if tokens >= space.protected_frontier:
            self._raise_protection(number, space, tokens)
        else:
            self._lower_protection(number, space, tokens)

    def require_truncate(self, number: int, tokens: int) -> None:
        """Refuse a cut outside protected..committed, or inside a page of several spaces.

        Whole pages behind the cut may belong to other spaces too: they lose one reference.  (C9.10)
        """
        space = self.by_number[number]
        what = f"truncate of Continuation(number={number}) in pool {self.pool.name}"
        if not space.protected_frontier <= tokens <= space.frontier:
            raise MisuseError(what, expected=f"{space.protected_frontier} (protected) to {space.frontier} tokens",
                              got=shown(tokens), remedy="lower the protected frontier with protect first",
                              clause="C9.10")
        if tokens < space.frontier and tokens & PAGE_MASK:
            block = tokens >> PAGE_SHIFT
            self.pages.require_private(what, space.members[block : block + 1])

    def truncate(self, number: int, tokens: int) -> None:
        """Lower the committed frontier, as `require_truncate` allowed, and drop the pages behind it.  (C9.10)"""
        space = self.by_number[number]
        pages = pages_for_tokens(tokens)
        if tokens < space.frontier and tokens & PAGE_MASK:
            self.pages.withdraw(space.members[pages - 1 : pages], tokens & PAGE_MASK)
        dropped = space.members[pages:]
        space.members = space.members[:pages].copy()
        space.index = part_of(space.index, 0, pages)
        space.frontier = tokens
        self.drop(dropped, first_block=pages, pages=dropped.size)

    def _raise_protection(self, number: int, space: KeptSpace, tokens: int) -> None:
        first = space.protected_frontier >> PAGE_SHIFT
        last = pages_for_tokens(tokens)
        self.pages.raise_protection(part_of(space.index, first, last),
                                    _cover(space.protected_frontier, first, last - first),
                                    _cover(tokens, first, last - first))
        self._set_protected(number, space, tokens)

    def _lower_protection(self, number: int, space: KeptSpace, tokens: int) -> None:
        first, last = tokens >> PAGE_SHIFT, pages_for_tokens(space.protected_frontier)
        changed = part_of(space.index, first, last)
        before = _cover(space.protected_frontier, first, last - first)
        after = _cover(tokens, first, last - first)
        others = self._others(number, changed, before, space.members[first:last])
        self.pages.lower_protection(changed, before, after if others is None else np.maximum(after, others))
        self._set_protected(number, space, tokens)

    def _set_protected(self, number: int, space: KeptSpace, tokens: int) -> None:
        """Note a protected frontier, and the page in which it lies."""
        if space.protected_frontier & PAGE_MASK:
            page = space.members.item(space.protected_frontier >> PAGE_SHIFT)
            del self._partial[page][number]
            if not self._partial[page]:
                del self._partial[page]
        if tokens & PAGE_MASK:
            self._partial.setdefault(space.members.item(tokens >> PAGE_SHIFT), {})[number] = tokens & PAGE_MASK
        space.protected_frontier = tokens

    def _others(self, number: int, at: Index, before: Ids, changed: Ids) -> npt.NDArray[np.int32] | None:
        """Return the most columns that another inactive space protects of each page, or None if it does not matter.

        `protectors` counts the spaces that protect a whole page.  A space protects at most one page in part, so
        `_partial` has one entry for each.  Nothing here takes longer when more spaces share the pages.
        """
        if not changed.size or highest(self.pages.references[at] - self.pages.active[at]) <= 1:
            return None
        left = self.pages.protectors[at] - (before >> PAGE_SHIFT)
        if lowest(left) > 0:
            return None
        most = np.zeros(changed.size, np.int32)
        for place in (left == 0).nonzero()[0].tolist():
            partial = self._partial.get(changed.item(place), {})
            most[place] = max((columns for other, columns in partial.items() if other != number), default=0)
        return most


def _cover(frontier: int, first_block: int, blocks: int) -> npt.NDArray[np.int32]:
    """Return the columns that lie below a frontier in each block: 130 from block 1 on -> 64, 2, 0."""
    columns = np.zeros(blocks, np.int32)
    full = (frontier >> PAGE_SHIFT) - first_block
    if full >= 0:
        columns[:full] = PAGE_TOKENS
        columns[full : full + 1] = frontier & PAGE_MASK
    return columns
