"""LogicalPages: the identity of page content, apart from where it lies.  (C7)

An address space's membership is an ordered list of logical pages, never of physical ids: content
keeps its identity while replicas come and go (C16.5).  A descriptor holds, as columns:

    serial       int64   generation of the descriptor; 0 while it is free
    content      int64   content epoch: advances when materialized and when committed columns are withdrawn
    committed    int32   committed columns 0..64; derived from the frontier while the page has a writer
    references   int32   address spaces that hold it
    writer       int32   execution row that may append, or -1; a writer implies one reference (C7.5)
    device       int32   page group id of the Device replica, or -1
    block        int32   logical block in its writer's space

Columns are written in slices, once per window of bound pages, not once per step: whether a bound
page is already a member follows from its writer's `mapped_end` (C6.5, C7 preamble).

Read next: `address_space.py`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagedkv.free_runs import FreeRuns, Ids


class LogicalPages:
    """Descriptors of one pool as columns; index order means nothing.

    Written by the methods below alone, which `address_space.py` calls.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free_runs = FreeRuns(capacity)
        self.serial = np.zeros(capacity, np.int64)
        self.content = np.zeros(capacity, np.int64)
        self.committed = np.zeros(capacity, np.int32)
        self.references = np.zeros(capacity, np.int32)
        self.writer = np.full(capacity, -1, np.int32)
        self.device = np.full(capacity, -1, np.int32)
        self.block = np.full(capacity, -1, np.int32)
        self._stamp_next = 1

    def describe(self, page_ids: Ids, *, writer: int, first_block: int, after: int = -1) -> Ids:
        """Take descriptors for pages that `writer` will map from `first_block` on.  (C7.5)

        The content epoch they get is the one they show once materialized (C7.6).
        """
        logical = self.free_runs.take(page_ids.size, after)
        self.references[logical] = 1
        self.writer[logical] = writer
        self.device[logical] = page_ids
        self.block[logical] = np.arange(first_block, first_block + page_ids.size)
        self.committed[logical] = 0
        self.renew(logical)
        return logical

    def renew(self, logical: Ids) -> None:
        """Begin a new life of descriptors: earlier handles are stale, the content is another.  (C7.3, C7.6)"""
        self.serial[logical] = self._stamps(logical.size)
        self.renew_content(logical)

    def renew_content(self, logical: Ids | npt.NDArray[np.int64]) -> None:
        """Advance the content epoch: other bytes will stand here from now on.  (C7.6)"""
        self.content[logical] = self._stamps(logical.size)

    def recycle(self, logical: Ids) -> None:
        """Free descriptors whose last reference went; their generation ends.  (C7.3)"""
        self.serial[logical] = 0
        self.references[logical] = 0
        self.writer[logical] = -1
        self.device[logical] = -1
        self.block[logical] = -1
        self.committed[logical] = 0
        self.free_runs.give(logical)

    def _stamps(self, count: int) -> npt.NDArray[np.int64]:
        first = self._stamp_next
        self._stamp_next += count
        return np.arange(first, first + count)
