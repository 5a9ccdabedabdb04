"""Races between streams of the cpu device: two operations without an order between them touch the same bytes.

The clock of an operation counts the operations before it, so unordered pairs are known whatever order the seed picked.
The bytes of a copy are exact.  Comparing memory before and after a kernel or a call shows what it wrote.  A trial shows
what it read: it runs once more with the bytes of the other operation in their other state (not yet written, or already
written).  Both runs are legal orders, so a different result proves the race.

    X runs; for every operation Y without an order to X:
      Y has run      its writes are known, old and new bytes       the trial of X uses the old ones
      Y is waiting   Y runs ahead, is compared, and is undone      the trial of X uses the new ones

One order stays unseen: the host waited for X before an opaque Y was submitted, and Y overwrites what X read.  Another
seed runs them the other way round.

Clauses: C7.4 (copies and users of pages are ordered), C12.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pagedkv.devices.cpu.footprints import Footprint, Span, clip, differences, first_common, read_bytes, write_bytes
from pagedkv.devices.cpu.memory import Memory
from pagedkv.devices.cpu.operations import Operation
from pagedkv.devices.cpu.runtime import Executor
from pagedkv.errors import DeviceFault, StreamHazard

Clock = dict[int, int]
"""Stream number -> how many of its operations come before."""

Piece = tuple[int, bytes]
"""An address and the bytes from there on."""


@dataclass(eq=False, slots=True, kw_only=True)
class Submission:
    """One operation in a queue, or in the history.

    Attributes:
        operation: the work.
        stream: number of its stream.
        index: its place in the stream.
        after: clock of the operations before it; fixed.
        footprint: the bytes that it touches.
        label: for messages.
        fingerprints: pinned bytes as they were at submission; device writes refresh them (`deferred.py`).
        replaced: the bytes that it overwrote, known after a compared run.
        has_run: the queues write it.
    """

    operation: Operation
    stream: int
    index: int
    after: Clock
    footprint: Footprint
    label: str
    fingerprints: list[Piece] = field(default_factory=list)
    replaced: list[Piece] = field(default_factory=list)
    has_run: bool = False

    def is_after(self, other: Submission) -> bool:
        """Does `other` come before this one?"""
        return self.after.get(other.stream, 0) > other.index

    @property
    def written(self) -> tuple[Span, ...]:
        """The bytes that it is known to write."""
        return self.footprint.writes + tuple(_span(piece) for piece in self.replaced)


class Races:
    """Runs operations, and compares each with those that have no order to it."""

    def __init__(self, memory: Memory, executor: Executor) -> None:
        self._memory = memory
        self._executor = executor

    def run(
        self, ours: Submission, unordered: Sequence[Submission], ahead: Callable[[Submission], list[Submission]]
    ) -> None:
        """Run an operation, and raise StreamHazard for a race with one of `unordered`.

        Every operation before it has run.  `ahead` gives the waiting operations that must run for a waiting one, in
        order, and that one last.
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
            for other, pieces, results in trials:
                if results is not None:  # in the other order it runs, so the race caused the fault
                    raise self._race(ours, other, _span(pieces[0]), "reads") from fault
            raise
        after = [(piece[0], read_bytes(_span(piece))) for piece in before]
        ours.replaced = _changed(before, after)
        changed = tuple(_span(piece) for piece in ours.replaced)
        for other, pieces in states:
            waiting = () if other.has_run else tuple(_span(piece) for piece in pieces)
            self._refuse_common(ours, changed, other, other.written + other.footprint.reads + waiting)
        for other, pieces, results in trials:
            if results is None or _differ(results, after, pieces):
                raise self._race(ours, other, _span(pieces[0]), "reads")

    def _other_state(
        self, other: Submission, mine: Footprint, ahead: Callable[[Submission], list[Submission]]
    ) -> list[Piece]:
        """Give the bytes in reach of an opaque operation in their other state: before `other`, or after it."""
        reach = mine.may_read + mine.may_write
        if not reach:
            return []
        if other.has_run:
            pieces = other.replaced
        elif first_common(reach, other.footprint.writes + other.footprint.may_write):
            pieces = self._written_ahead(ahead(other))
        else:
            return []
        different = []
        for start, data in pieces:
            for first, last in _whole(clip((start, start + len(data)), reach)):
                part = data[first - start : last - start]
                if read_bytes((first, last)) != part:
                    different.append((first, part))
        return different

    def _written_ahead(self, chain: Sequence[Submission]) -> list[Piece]:
        """Run waiting operations, note what the last one wrote, and undo them."""
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
        """Run an operation with other bytes, and undo it; None when it faulted."""
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
        )


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
    """Give the pieces of `before` that `after` changed."""
    pieces = []
    for (start, old), (_, new) in zip(before, after, strict=True):
        pieces += [(first, old[first - start : last - start]) for first, last in differences(start, old, new)]
    return pieces


def _differ(results: Sequence[bytes], after: Sequence[Piece], pieces: Sequence[Piece]) -> bool:
    """Did a trial give other results, apart from the bytes that it changed beforehand?"""
    tried = [_span(piece) for piece in pieces]
    for image, (start, real) in zip(results, after, strict=True):
        if image == real:
            continue
        changed = np.frombuffer(image, np.uint8) != np.frombuffer(real, np.uint8)
        for first, last in clip((start, start + len(real)), tried):
            changed[first - start : last - start] = False
        if changed.any():
            return True
    return False
