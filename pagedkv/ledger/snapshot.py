"""Snapshots: a checkpoint of an active sequence, which runs on.  (C10.6)

    block        0        1        2           tail
    before     [ own    | shared | own       | own, written )
    sequence   [ shared | shared | shared    | own, written )      no table entry changes
    checkpoint [ shared | shared | shared    | copy         )      the copy is paid from available

Full pages lose their writer in place and gain a reference; an aligned frontier copies nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pagedkv.errors import MisuseError
from pagedkv.ledger.activation import Refusal, TailCopy
from pagedkv.ledger.active_spaces import AddressSpaces
from pagedkv.ledger.continuations import Continuation, Continuations
from pagedkv.ledger.free_runs import Ids
from pagedkv.ledger.sequences import Sequence
from pagedkv.ledger.undo import Undo, undo_all
from pagedkv.values.quantities import PAGE_MASK, PAGE_SHIFT


@dataclass(eq=False)
class PreparedSnapshot:
    """Claims of a snapshot that is neither committed nor aborted.

    Attributes:
        sequence, state: what is checkpointed, and the caller's handle.
        copies: to be executed before the commit.
        frontiers: per pool, the committed frontier that is checkpointed.
        tails: per pool, the descriptor that the checkpoint's copied tail will have.
        undo: gives every claim back.
        is_open: written by `Snapshots` alone.
    """

    sequence: Sequence
    state: object
    copies: tuple[TailCopy, ...]
    frontiers: dict[str, int]
    tails: dict[str, Ids]
    undo: Undo
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
        """Claim the pages of copied tails, in every pool or in none; whatever is raised, no claim is left."""
        refusal = self.explain(sequence)
        if refusal is not None:
            return refusal
        prepared = PreparedSnapshot(sequence, state, (), {}, {}, [])
        undo = prepared.undo
        try:
            for name, spaces in self.spaces.items():
                prepared.frontiers[name] = frontier = int(spaces.frontier[sequence.row])
                block, columns = frontier >> PAGE_SHIFT, frontier & PAGE_MASK
                if not columns:
                    continue
                granted = spaces.pool.try_reserve(1)
                assert granted, f"pool {name} changed between check and grant"
                undo.append((spaces.pool.shrink, 1))
                destination = spaces.pool.bind(1)
                undo.append((spaces.pool.unbind, destination))
                prepared.tails[name] = tail = spaces.pages.describe_copy(destination, block=block, columns=columns)
                undo.append((spaces.pages.abort_copy, tail))
                source = self._source_tail(spaces, sequence.row)
                spaces.pages.pin(source)
                undo.append((spaces.pages.unpin, source))
                source_page = int(spaces.pages.device[source[0]])
                prepared.copies += (TailCopy(name, source_page, int(destination[0]), columns),)
        except BaseException as error:
            undo_all(undo, error)
            raise
        return prepared

    def commit(self, prepared: PreparedSnapshot) -> Continuation:
        """Freeze and share full pages, and publish the checkpoint: its tails are copied on the stream.

        Raises:
            MisuseError: it has ended, or the sequence went on since `prepare`; nothing changed.
        """
        self.require_open(prepared, "commit")
        row = prepared.sequence.row
        for name, spaces in self.spaces.items():
            if int(spaces.frontier[row]) != prepared.frontiers[name]:
                raise MisuseError(f"commit of a snapshot of {prepared.sequence}",
                                  expected=f"frontier {prepared.frontiers[name]} in pool {name}, as it was prepared",
                                  got=int(spaces.frontier[row]), remedy="abort it and take another", clause="C10.6")
        prepared.is_open = False
        prepared.undo.clear()
        kept: dict[str, tuple[Ids, int]] = {}
        for name, spaces in self.spaces.items():
            members = spaces.freeze(row)
            spaces.pages.share(members)
            tail = prepared.tails.get(name)
            if tail is not None:
                spaces.pages.unpin(self._source_tail(spaces, row))
                spaces.pool.materialize(1)
                spaces.pages.publish_copy(tail, writer=-1, active=0)
                spaces.events.record("materialize", None, members.size, spaces.pages.device[tail])
                members = np.concatenate((members, tail))
            kept[name] = (members, int(spaces.frontier[row]))
        return self.continuations.keep(kept, prepared.state)

    def abort(self, prepared: PreparedSnapshot) -> None:
        """Give the claims back; the sequence is as it was."""
        self.require_open(prepared, "abort")
        prepared.is_open = False
        undo_all(prepared.undo)

    def require_open(self, prepared: PreparedSnapshot, operation: str) -> None:
        """Refuse a snapshot that was committed or aborted.  (C10.6)"""
        if not isinstance(prepared, PreparedSnapshot) or not prepared.is_open:
            raise MisuseError(f"{operation} of a snapshot", expected="one that is prepared", got="one that has ended",
                              remedy="commit or abort each once", clause="C10.6")

    def _source_tail(self, spaces: AddressSpaces, row: int) -> Ids:
        block = int(spaces.frontier[row]) >> PAGE_SHIFT
        return spaces.members[row, block : block + 1].copy()
