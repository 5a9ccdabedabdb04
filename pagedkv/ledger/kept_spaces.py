"""RetainedSpaces: the inactive address spaces of one pool.  (C7.8, C9.8, C9.10)

An inactive space is an ordered list of logical pages without a row, a reservation or a writer:

    blocks     0       1       2        3
    members  [ full  | full  | full   | tail )       every page but the last is full
    tokens   0 ---------- protected_frontier ----- frontier

Pages [0, frontier / 64) may belong to other spaces too and are immutable; a partial tail belongs to
this space alone.  The protected frontier is what `truncate` may not cut below: retaining sets it to
the frontier, `protect` moves it.  A page's `protected` column is the maximum over its inactive spaces.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedkv.errors import MisuseError
from pagedkv.ledger.events import PageEvents, PoolEvents
from pagedkv.ledger.free_runs import Ids, Index, highest, part_of
from pagedkv.ledger.pages import LogicalPages, Pages
from pagedkv.ledger.pool import PagePool
from pagedkv.values.quantities import PAGE_MASK, PAGE_SHIFT, PAGE_TOKENS, pages_for_tokens


@dataclass(eq=False)
class RetainedSpace:
    """One inactive space; written by `RetainedSpaces` alone.

    Attributes:
        members: (n,) int32, logical pages in block order; n = ceil(frontier / 64).
        index: the same pages as the columns' index, found once for all forks of them.
        frontier, protected_frontier: tokens.
    """

    members: Ids
    index: Index
    frontier: int
    protected_frontier: int


class RetainedSpaces:
    """The inactive spaces of one pool, by the number of their continuation."""

    def __init__(self, pool: PagePool, pages: LogicalPages, events: PoolEvents | None = None) -> None:
        self.pool = pool
        self.pages = pages
        self.events = PoolEvents(pool.name, PageEvents()) if events is None else events
        self.spaces: dict[int, RetainedSpace] = {}

    def keep(self, number: int, members: Ids, frontier: int) -> None:
        """Hold pages whose inactive reference and committed columns are set, and protect them.  (C7.8, C9.8)"""
        self.spaces[number] = RetainedSpace(members, self.pages.index_of(members), frontier, 0)
        self._raise_protection(self.spaces[number], frontier)

    def require_releasable(self, number: int, what: str) -> None:
        """Refuse to let go of a space while a copy uses one of its pages.  (C7.4)"""
        self.pages.require_releasable(self.spaces[number].index)
        self.require_untransferred(number, what)

    def require_untransferred(self, number: int, what: str) -> None:
        """Refuse to let go of a space while a transfer uses one of its page groups.  (C7.4)"""
        if self.pool.pins_total:
            self.pool.require_unpinned(self.pages.device[self.spaces[number].members], what)

    def release(self, number: int) -> Ids:
        """Give up every membership; a page goes back to available with its last reference.  (C9.8)

        Returns:
            The page group ids that became available.
        """
        space = self.take(number)
        return self.drop(space.index, first_block=0, pages=space.members.size)

    def take(self, number: int) -> RetainedSpace:
        """Remove a space that becomes active or ends: its protection goes, its references stay.  (C10.4)"""
        space = self.spaces[number]
        self._lower_protection(number, space, 0)
        del self.spaces[number]
        return space

    def drop(self, logical: Pages, *, first_block: int, pages: int) -> Ids:
        """Drop one inactive reference of each of `pages` pages, which stand from a block on.

        Returns:
            The page group ids that became available: the last ones, because spaces share prefixes only.
        """
        page_ids = self.pages.release(logical)
        if page_ids.size:
            self.pool.release(page_ids, leased=page_ids.size)
            self.events.record("release", None, first_block + pages - page_ids.size, page_ids)
        return page_ids

    def sole_pages(self, members: Ids) -> int:
        """Return how many of the pages would become available with one reference fewer."""
        return int(np.count_nonzero(self.pages.references[self.pages.index_of(members)] == 1)) if members.size else 0

    def protect(self, number: int, tokens: int) -> None:
        """Set the protected frontier, up or down.  (C7.8)

        Raises:
            MisuseError: tokens is negative or above the committed frontier; nothing changed.
        """
        space = self.spaces[number]
        if not 0 <= tokens <= space.frontier:
            raise MisuseError(f"protection of Continuation(number={number}) in pool {self.pool.name}",
                              expected=f"0 to {space.frontier} tokens", got=tokens,
                              remedy="only what is committed can be protected", clause="C7.8")
        if tokens >= space.protected_frontier:
            self._raise_protection(space, tokens)
        else:
            self._lower_protection(number, space, tokens)

    def truncate(self, number: int, tokens: int) -> Ids:
        """Lower the committed frontier and drop the pages behind it.  (C9.10)

        Returns:
            The page group ids that became available.

        Raises:
            MisuseError: tokens above the committed or below the protected frontier, or a page that another space
                references, or a copy uses, is cut; nothing changed.
        """
        space = self.spaces[number]
        what = f"truncate of Continuation(number={number}) in pool {self.pool.name}"
        if not space.protected_frontier <= tokens <= space.frontier:
            raise MisuseError(what, expected=f"{space.protected_frontier} (protected) to {space.frontier} tokens",
                              got=tokens, remedy="lower the protected frontier with protect first", clause="C9.10")
        cut = space.members[tokens >> PAGE_SHIFT :]
        self.pages.require_private(cut, what)
        self.pages.require_releasable(cut)
        self.pool.require_unpinned(self.pages.device[cut], "truncate")
        keep = pages_for_tokens(tokens)
        if tokens < space.frontier and tokens & PAGE_MASK:
            self.pages.withdraw(space.members[keep - 1 : keep], tokens & PAGE_MASK)
        gone = space.members[keep:]
        space.members = space.members[:keep].copy()
        space.index = part_of(space.index, 0, keep)
        space.frontier = tokens
        return self.drop(gone, first_block=keep, pages=gone.size)

    def _raise_protection(self, space: RetainedSpace, tokens: int) -> None:
        first = space.protected_frontier >> PAGE_SHIFT
        last = pages_for_tokens(tokens)
        self.pages.raise_protection(part_of(space.index, first, last),
                                    _cover(space.protected_frontier, first, last - first),
                                    _cover(tokens, first, last - first))
        space.protected_frontier = tokens

    def _lower_protection(self, number: int, space: RetainedSpace, tokens: int) -> None:
        first, last = tokens >> PAGE_SHIFT, pages_for_tokens(space.protected_frontier)
        changed = part_of(space.index, first, last)
        before = _cover(space.protected_frontier, first, last - first)
        after = _cover(tokens, first, last - first)
        others = self._others(number, first, changed, space.members[first:last])
        self.pages.lower_protection(changed, before, after if others is None else np.maximum(after, others))
        space.protected_frontier = tokens

    def _others(self, number: int, first: int, at: Index, changed: Ids) -> npt.NDArray[np.int32] | None:
        """Return the most that the other inactive spaces protect partly of pages from block `first` on, or None.

        Whole pages are counted in `protectors`, so only a page that another inactive space holds, and none
        protects whole, is looked for: rare, because what is protected partly is the tail of one space.
        """
        if not changed.size or highest(self.pages.references[at] - self.pages.active[at]) <= 1:
            return None
        most = np.zeros(changed.size, np.int32)
        for other_number, other in self.spaces.items():
            if other_number == number:
                continue
            held = other.members[first : first + changed.size]
            same = held == changed[: held.size]
            covered = _cover(other.protected_frontier, first, held.size)
            most[: held.size] = np.maximum(most[: held.size], np.where(same, covered, 0))
        return most


def _cover(frontier: int, first_block: int, blocks: int) -> npt.NDArray[np.int32]:
    """Return the columns that lie below a frontier in each block: 130 from block 1 on -> 64, 2, 0."""
    columns = np.zeros(blocks, np.int32)
    full = (frontier >> PAGE_SHIFT) - first_block
    if full >= 0:
        columns[:full] = PAGE_TOKENS
        columns[full : full + 1] = frontier & PAGE_MASK
    return columns
