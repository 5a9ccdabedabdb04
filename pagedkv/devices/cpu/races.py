"""Races between streams of the cpu device: two operations that nothing orders and that touch the same bytes.

An operation knows what was ordered before it (its clock), so an unordered pair is known whatever order the seed
picked.  What copies touch is exact.  What a kernel or a call wrote is seen by comparing memory around it; what
it read is seen by running it once more with the bytes of the other operation in their other state (not yet
written, or already written): both runs are legal orders, so another result is the proof.

    running X, for every operation Y that is not ordered with X:
      Y has run      its writes are known, old and new bytes      X is tried with the old ones
      Y is waiting   it is run ahead, watched and undone          X is tried with the new ones

One order cannot be seen: X ran and was seen by the host before an opaque Y was submitted, and Y then overwrites
what X read.  Another seed runs them the other way round.

Clauses: C7.4 (copies and users of pages are ordered), C12.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pagedkv.devices.cpu.execution import Executor
from pagedkv.devices.cpu.footprints import (
    Footprint,
    Span,
    clip,
    differences,
    first_common,
    read_bytes,
    write_bytes,
)
from pagedkv.devices.cpu.memory import Memory
from pagedkv.devices.cpu.operations import Operation
from pagedkv.errors import DeviceFault, StreamHazard

Clock = dict[int, int]
"""Stream number -> how many of its operations lie before."""

Piece = tuple[int, bytes]
"""An address and what stands there."""


class Submission:
    """One operation in a queue, or in the history.

    Attributes:
        operation: what runs.
        stream: number of its stream.
        index: its place in the stream.
        after: what is ordered before it; fixed.
        footprint: what it touches.
        label: for messages.
        fingerprints: pinned bytes as they were at submission; refreshed by device writes (`cpu_deferred.py`).
        replaced: once it ran while watched: what its writes replaced.
        has_run: written by the queues.
    """

    __slots__ = ("after", "fingerprints", "footprint", "has_run", "index", "label", "operation", "replaced", "stream")

    def __init__(
        self, operation: Operation, *, stream: int, index: int, after: Clock, footprint: Footprint, label: str
    ) -> None:
        self.operation = operation
        self.stream = stream
        self.index = index
        self.after = after
        self.footprint = footprint
        self.label = label
        self.fingerprints: list[Piece] = []
        self.replaced: list[Piece] = []
        self.has_run = False

    def is_after(self, other: Submission) -> bool:
        """Is `other` ordered before this one?"""
        return self.after.get(other.stream, 0) > other.index

    @property
    def written(self) -> tuple[Span, ...]:
        """Bytes known to be written by it."""
        return self.footprint.writes + tuple(_span(piece) for piece in self.replaced)


class Races:
    """Runs operations and compares them with those that nothing orders."""

    def __init__(self, memory: Memory, executor: Executor) -> None:
        self._memory = memory
        self._executor = executor

    def run(
        self, ours: Submission, unordered: Sequence[Submission], ahead: Callable[[Submission], list[Submission]]
    ) -> None:
        """Run an operation, watched.

        Args:
            ours: what runs; everything ordered before it has run.
            unordered: operations before or after it in no order, which have run or wait.
            ahead: gives the waiting operations that must run for a waiting one, in order, itself last.

        Raises:
            StreamHazard: it touches bytes that one of `unordered` touches, and one of the two writes them.
            DeviceFault: it failed.
        """
        mine = ours.footprint
        others = [other for other in unordered if _reach_each_other(mine, other.footprint)]
        for other in others:
            self._refuse_common(ours, mine.writes, other, other.written + other.footprint.reads)
            self._refuse_common(ours, mine.reads, other, other.written)
        states = [(other, self._other_state(other, mine, ahead)) for other in others]
        before = [(span[0], read_bytes(span)) for span in _whole(mine.writes + mine.may_write)]
        trials = [(other, pieces, self._try(ours, pieces, before)) for other, pieces in states if pieces]
        try:
            ours.operation.run(self._executor)
        except DeviceFault as fault:
            for other, pieces, found in trials:
                if found is not None:  # in the other order it runs: the fault is the race's
                    raise self._race(ours, other, _span(pieces[0]), "reads") from fault
            raise
        after = [(piece[0], read_bytes(_span(piece))) for piece in before]
        ours.replaced = _changed(before, after)
        seen = tuple(_span(piece) for piece in ours.replaced)
        for other, pieces in states:
            waiting = () if other.has_run else tuple(_span(piece) for piece in pieces)
            self._refuse_common(ours, seen, other, other.written + other.footprint.reads + waiting)
        for other, pieces, found in trials:
            if found is None or _differ(found, after, pieces):
                raise self._race(ours, other, _span(pieces[0]), "reads")

    def _other_state(
        self, other: Submission, mine: Footprint, ahead: Callable[[Submission], list[Submission]]
    ) -> list[Piece]:
        """Give the bytes in reach of an opaque operation as they are on the other side of `other`."""
        reach = mine.may_read + mine.may_write
        if not reach:
            return []
        if other.has_run:
            pieces = other.replaced
        elif first_common(reach, other.footprint.writes + other.footprint.may_write):
            pieces = self._written_ahead(ahead(other))
        else:
            return []
        found = []
        for start, data in pieces:
            for first, last in _whole(clip((start, start + len(data)), reach)):
                wanted = data[first - start : last - start]
                if read_bytes((first, last)) != wanted:
                    found.append((first, wanted))
        return found

    def _written_ahead(self, chain: Sequence[Submission]) -> list[Piece]:
        """Run waiting operations, note what the last one wrote, and undo all of it."""
        saved: list[Piece] = []
        try:
            for waiting in chain:
                spans = _whole(waiting.footprint.writes + waiting.footprint.may_write)
                before = [(span[0], read_bytes(span)) for span in spans]
                saved += before
                waiting.operation.run(self._executor)
            after = [(piece[0], read_bytes(_span(piece))) for piece in before]
        finally:
            for start, data in reversed(saved):
                write_bytes(start, data)
        return _changed(after, before)

    def _try(self, ours: Submission, pieces: Sequence[Piece], before: Sequence[Piece]) -> list[bytes] | None:
        """Run an operation with other bytes and undo it; None when it faulted."""
        saved = [(piece[0], read_bytes(_span(piece))) for piece in pieces]
        try:
            for start, data in pieces:
                write_bytes(start, data)
            ours.operation.run(self._executor)
            return [read_bytes(_span(piece)) for piece in before]
        except DeviceFault:
            return None
        finally:
            for start, data in (*before, *saved):
                write_bytes(start, data)

    def _refuse_common(
        self, ours: Submission, spans: Iterable[Span], other: Submission, theirs: Sequence[Span]
    ) -> None:
        common = first_common(spans, theirs)
        if common is not None:
            raise self._race(ours, other, common, "writes" if first_common([common], ours.written) else "reads")

    def _race(self, ours: Submission, other: Submission, common: Span, verb: str) -> StreamHazard:
        buffer = self._memory.name_of(common[0])
        is_read_there = verb == "writes" and not first_common([common], other.written) and other.has_run
        return StreamHazard(
            ours.label,
            expected=f"an order between it and {other.label}, which {'reads' if is_read_there else 'writes'} there too",
            got=f"none, and it {verb} {common[1] - common[0]} bytes of {buffer}",
            remedy="record an event after the first of the two and let the stream of the second wait for it",
            clause="C12.1", operation=ours.label, other=other.label, buffer=buffer,
        )  # fmt: skip


def _span(piece: Piece) -> Span:
    return piece[0], piece[0] + len(piece[1])


def _reach_each_other(mine: Footprint, theirs: Footprint) -> bool:
    writes, reach = mine.writes + mine.may_write, theirs.reach
    if first_common(writes, reach):
        return True
    return first_common(mine.reach, theirs.writes + theirs.may_write) is not None


def _whole(spans: Iterable[Span]) -> list[Span]:
    """Join spans that overlap or touch."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _changed(before: Sequence[Piece], after: Sequence[Piece]) -> list[Piece]:
    """Give the pieces of `before` that are otherwise in `after`."""
    pieces = []
    for (start, old), (_, new) in zip(before, after, strict=True):
        pieces += [(first, old[first - start : last - start]) for first, last in differences(start, old, new)]
    return pieces


def _differ(found: Sequence[bytes], after: Sequence[Piece], pieces: Sequence[Piece]) -> bool:
    """Did a trial give other results, apart from the bytes it was tried with?"""
    tried = [_span(piece) for piece in pieces]
    for image, (start, real) in zip(found, after, strict=True):
        if image == real:
            continue
        changed = np.frombuffer(image, np.uint8) != np.frombuffer(real, np.uint8)
        for first, last in clip((start, start + len(real)), tried):
            changed[first - start : last - start] = False
        if changed.any():
            return True
    return False
