"""Snapshots: a checkpoint of an active sequence, which runs on.  (C10.6)

    block        0        1        2           tail
    before     [ own    | shared | own       | own, written )
    sequence   [ shared | shared | shared    | own, written )      no table entry changes
    checkpoint [ shared | shared | shared    | copy         )      the copy is paid from available

Full pages lose their writer in place and gain a reference; an aligned frontier copies nothing.

Read next: `ledgers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pagedkv.activation import Refusal, TailCopy
from pagedkv.address_space import AddressSpaces
from pagedkv.continuation import Continuation, Continuations
from pagedkv.errors import MisuseError
from pagedkv.free_runs import Ids
from pagedkv.quantities import PAGE_MASK, PAGE_SHIFT
from pagedkv.sequence import Sequence


@dataclass(eq=False)
class PreparedSnapshot:
    """Claims of a snapshot that is neither committed nor aborted.

    Attributes:
        sequence, state: what is checkpointed, and the caller's handle.
        copies: to be executed before the commit.
        tails: per pool, the descriptor that the checkpoint's copied tail will have.
        is_open: written by `Snapshots` alone.
    """

    sequence: Sequence
    state: object
    copies: tuple[TailCopy, ...]
    tails: dict[str, Ids]
    is_open: bool = True


class Snapshots:
    """Prepares, commits and aborts snapshots; owns no state of its own.

    Whoever calls has checked that the handle is current and no unit in flight selects the row.
    """

    def __init__(self, spaces: Mapping[str, AddressSpaces], continuations: Continuations) -> None:
        self.spaces = dict(spaces)
        self.continuations = continuations

    def explain(self, sequence: Sequence) -> Refusal | None:
        """Return why a snapshot cannot be taken now, or None; no side effects.  (C10.6)"""
        for name, spaces in self.spaces.items():
            provisional = spaces.provisional_pages(sequence.row)
            if provisional:
                return Refusal(name, provisional, 0, forever=False, reason="provisional")
        for name, spaces in self.spaces.items():
            needed = int(int(spaces.frontier[sequence.row]) & PAGE_MASK > 0)
            if needed > spaces.pool.available:
                return Refusal(name, needed, spaces.pool.available, forever=False)
        return None

    def prepare(self, sequence: Sequence, state: object) -> PreparedSnapshot | Refusal:
        """Claim the pages of copied tails, in every pool or in none."""
        refusal = self.explain(sequence)
        if refusal is not None:
            return refusal
        copies: list[TailCopy] = []
        tails: dict[str, Ids] = {}
        for name, spaces in self.spaces.items():
            frontier = int(spaces.frontier[sequence.row])
            block, columns = frontier >> PAGE_SHIFT, frontier & PAGE_MASK
            if not columns:
                continue
            granted = spaces.pool.try_reserve(1)
            assert granted, f"pool {name} changed between check and grant"
            source = spaces.members[sequence.row, block : block + 1]
            destination = spaces.pool.bind(1)
            tails[name] = spaces.pages.describe_copy(destination, block=block, columns=columns)
            spaces.pages.pin(source)
            copies.append(TailCopy(name, int(spaces.pages.device[source[0]]), int(destination[0]), columns))
        return PreparedSnapshot(sequence, state, tuple(copies), tails)

    def commit(self, prepared: PreparedSnapshot) -> Continuation:
        """Freeze and share full pages, and publish the checkpoint: its tails are copied on the stream."""
        self._end(prepared, "commit")
        row = prepared.sequence.row
        kept: dict[str, tuple[Ids, int]] = {}
        for name, spaces in self.spaces.items():
            members = spaces.freeze(row)
            spaces.pages.share(members)
            tail = prepared.tails.get(name)
            if tail is not None:
                spaces.pages.unpin(self._source_tail(spaces, row))
                spaces.pool.materialize(1)
                spaces.pages.publish_copy(tail, writer=-1, active=0)
                members = np.concatenate((members, tail))
            kept[name] = (members, int(spaces.frontier[row]))
        return self.continuations.keep(kept, prepared.state)

    def abort(self, prepared: PreparedSnapshot) -> None:
        """Give the claims back; the sequence is as it was."""
        self._end(prepared, "abort")
        for name, tail in prepared.tails.items():
            spaces = self.spaces[name]
            page_ids = spaces.pages.device[tail]
            spaces.pages.unpin(self._source_tail(spaces, prepared.sequence.row))
            spaces.pages.abort_copy(tail)
            spaces.pool.release(page_ids, leased=0)

    def _source_tail(self, spaces: AddressSpaces, row: int) -> Ids:
        block = int(spaces.frontier[row]) >> PAGE_SHIFT
        return spaces.members[row, block : block + 1]

    def _end(self, prepared: PreparedSnapshot, operation: str) -> None:
        if not isinstance(prepared, PreparedSnapshot) or not prepared.is_open:
            raise MisuseError(f"{operation} of a snapshot", expected="one that is prepared", got="one that has ended",
                              remedy="commit or abort each once", clause="C10.6")
        prepared.is_open = False
