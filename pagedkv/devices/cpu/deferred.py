"""Deferred mode of the cpu device: streams are real queues, and work runs only when something forces it.

A submission waits in its stream.  `stream.synchronize`, `event.synchronize` and `event.query` force operations, and
the seed picks a legal order across streams:

    late     only the operations that the answer needs
    early    every operation that may run, other streams first
    random   the next operation of any stream, until the answer is known

So a missing wait fails, whatever the luck of the schedule.  The queues also find three mistakes that a GPU leaves to
luck; each raises a StreamHazard that names the operation and the buffer:

    staging re-used too early   pinned memory that an operation reads is copied at submission, slice by slice, and
                                compared at execution
    host reads too early        host memory that an operation will write is poisoned at submission, and
                                `require_readable` refuses it until the host knows that the operation is done
    races                       operations of two streams, with no order between them, touch the same bytes (`races.py`)

Clocks hold the order: a stream's clock counts the operations of every stream that run before its next one; an event
holds a clock; the host's clock counts the operations that the host knows to be done.  Clauses: C7.4, C12, C15.1.
"""

from __future__ import annotations

import random
from collections import deque

from pagedkv.devices.cpu.footprints import Footprint, Span, clip, first_common, footprint_of, read_bytes, write_bytes
from pagedkv.devices.cpu.memory import POISON, Memory
from pagedkv.devices.cpu.operations import CopyOperation, KernelOperation, Operation
from pagedkv.devices.cpu.races import Clock, Races, Submission
from pagedkv.devices.cpu.runtime import Executor
from pagedkv.errors import StreamHazard

SCHEDULES = ("late", "early", "random")

HISTORY_MAX = 1024  # operations that have run, and with which a later one may race
LATE_QUERIES_MAX = 3  # a late event answers "not yet" at most so often


def joined(one: Clock, other: Clock) -> Clock:
    """Give the clock that counts the operations before either clock."""
    both = dict(one)
    for stream, count in other.items():
        if count > both.get(stream, 0):
            both[stream] = count
    return both


class Queues:
    """The submissions of one device that wait, and those that may still race.

    Attributes:
        host: clock of the operations that the host knows to be done.
        choices: how often the seed decided among several orders, or how late an event is; 0: all seeds run the same.
    """

    def __init__(self, memory: Memory, executor: Executor, *, schedule: str, seed: int) -> None:
        self.schedule = schedule
        self.host: Clock = {}
        self.choices = 0
        self._memory = memory
        self._races = Races(memory, executor)
        self._executor = executor
        self._random = random.Random(f"{schedule} {seed}")
        self._streams_count = 0
        self._waiting: dict[int, deque[Submission]] = {}
        self._submitted: Clock = {}
        self._done: Clock = {}
        self._history: list[Submission] = []
        self._unseen: list[Submission] = []  # they write host memory, and the host does not know them to be done

    def add_stream(self) -> None:
        """Count a stream: a single stream cannot race, so nothing is compared."""
        self._streams_count += 1

    # -- submission ----------------------------------------------------------------------------------------

    def submit(
        self, operation: Operation, *, stream: int, stream_label: str, after: Clock, footprint: Footprint | None = None
    ) -> Clock:
        """Queue one operation behind its stream's clock `after`, and give the stream's clock after it."""
        index = self._submitted.get(stream, 0)
        clock = joined(after, self.host)
        submission = Submission(
            operation=operation, stream=stream, index=index, after=clock,
            footprint=footprint_of(operation, self._memory) if footprint is None else footprint,
            label=f"{self._name(operation)}, operation {index} of {stream_label}",
        )
        submission.fingerprints = [(span[0], read_bytes(span)) for span in submission.footprint.pinned_reads]
        self._poison(submission)
        self._waiting.setdefault(stream, deque()).append(submission)
        self._submitted[stream] = index + 1
        return {**clock, stream: index + 1}

    def _name(self, operation: Operation) -> str:
        if isinstance(operation, CopyOperation):
            source, destination = (
                self._memory.buffer_of(address) for address in (operation.source_address, operation.destination_address)
            )
            return f"copy of {operation.byte_count} bytes from {source} to {destination}"
        kind = "kernel" if isinstance(operation, KernelOperation) else "call of"
        return operation.name if operation.name.startswith("graph") else f"{kind} {operation.name}"

    def _poison(self, submission: Submission) -> None:
        written = submission.footprint.host_writes
        if not written:
            return
        self._unseen.append(submission)
        read = [span for queue in self._waiting.values() for other in queue for span in other.footprint.reach]
        for span in written:
            # Bytes that an earlier operation still reads keep their content.
            if not first_common([span], [*read, *submission.footprint.reads, *submission.footprint.may_read]):
                write_bytes(span[0], bytes([POISON]) * (span[1] - span[0]))

    # -- forcing -------------------------------------------------------------------------------------------

    def finish(self, clock: Clock) -> None:
        """Run the operations that `clock` counts, and those that the seed adds; the host knows them afterwards."""
        self._run_until(clock)
        self.host = joined(self.host, clock)
        self._forget()

    def query(self, clock: Clock, asked: int) -> bool:
        """Say whether the operations that `clock` counts have run; `asked` counts earlier queries, and time passes."""
        if not self._has_run(clock):
            self.choices += 1
            patience = self._random.randint(1, LATE_QUERIES_MAX) if self.schedule == "late" else 0
            if self.schedule != "random" and asked >= patience:
                self._run_until(clock)
            elif self.schedule == "random":
                for _ in range(self._random.randint(1, 4)):
                    self._run_some()
        if not self._has_run(clock):
            return False
        self.host = joined(self.host, clock)
        self._forget()
        return True

    def _has_run(self, clock: Clock) -> bool:
        return all(self._done.get(stream, 0) >= count for stream, count in clock.items())

    def _run_until(self, clock: Clock) -> None:
        # The clock also counts what its operations wait for, because joining is transitive.
        while not self._has_run(clock) or (self.schedule == "early" and self._runnable()):
            runnable = self._runnable()
            needed = [stream for stream in runnable if self._done.get(stream, 0) < clock.get(stream, 0)]
            if self.schedule == "late":
                runnable = needed
            elif self.schedule == "early" and len(needed) < len(runnable):
                runnable = [stream for stream in runnable if stream not in needed]
            assert runnable, f"nothing can run, and {clock} is not reached"
            self._run_next(self._chosen(runnable))

    def _run_some(self) -> None:
        if runnable := self._runnable():
            self._run_next(self._chosen(runnable))

    def _chosen(self, streams: list[int]) -> int:
        self.choices += len(streams) > 1
        return self._random.choice(streams)

    def _runnable(self) -> list[int]:
        return [stream for stream, queue in self._waiting.items() if queue and self._has_run(queue[0].after)]

    def _chain(self, clock: Clock) -> list[Submission]:
        """Give the waiting operations that a clock counts, in an order in which they can run."""
        needed: dict[tuple[int, int], Submission] = {}
        open_clocks = [clock]
        while open_clocks:
            for stream, count in open_clocks.pop().items():
                for submission in self._waiting.get(stream, ()):
                    if submission.index < count and (stream, submission.index) not in needed:
                        needed[stream, submission.index] = submission
                        open_clocks.append(submission.after)
        chain: list[Submission] = []
        done = dict(self._done)
        while needed:
            ready = [
                key for key, submission in needed.items()
                if done.get(key[0], 0) == key[1]
                and all(done.get(stream, 0) >= count for stream, count in submission.after.items())
            ]
            for key in ready:
                chain.append(needed.pop(key))
                done[key[0]] = key[1] + 1
        return chain

    def _ahead(self, submission: Submission) -> list[Submission]:
        return self._chain({submission.stream: submission.index + 1})

    # -- execution -----------------------------------------------------------------------------------------

    def _run_next(self, stream: int) -> None:
        submission = self._waiting[stream].popleft()
        self._done[stream] = submission.index + 1
        self._compare_fingerprints(submission)
        if self._streams_count > 1:
            self._races.run(submission, self._unordered(submission), self._ahead)
        else:
            submission.operation.run(self._executor)
        submission.has_run = True
        submission.fingerprints = []
        self._refresh_fingerprints(submission)
        if self._streams_count > 1:
            self._history.append(submission)
            del self._history[:-HISTORY_MAX]

    def _unordered(self, submission: Submission) -> list[Submission]:
        waiting = [other for queue in self._waiting.values() for other in queue]
        return [
            other for other in (*self._history, *waiting)
            if other.stream != submission.stream and not submission.is_after(other) and not other.is_after(submission)
        ]

    def _compare_fingerprints(self, submission: Submission) -> None:
        for start, expected in submission.fingerprints:
            current = read_bytes((start, start + len(expected)))
            if current == expected:
                continue
            place = next(at for at, (one, other) in enumerate(zip(expected, current, strict=True)) if one != other)
            buffer = self._memory.name_of(start + place)
            raise StreamHazard(
                submission.label, expected="pinned memory as it was at submission",
                got=f"other bytes in {buffer}: the host wrote there before the operation had run",
                remedy="write again only after an event behind the operation, or use another slot",
                clause="C15.1", operation=submission.label, other="", buffer=buffer,
            )

    def _refresh_fingerprints(self, submission: Submission) -> None:
        """Expect the bytes that the device itself wrote into pinned memory: only host writes are mistakes."""
        written = submission.footprint.writes + submission.footprint.may_write
        for queue in self._waiting.values():
            for other in queue:
                for number, (start, expected) in enumerate(other.fingerprints):
                    image = bytearray(expected)
                    for first, last in clip((start, start + len(expected)), written):
                        image[first - start : last - start] = read_bytes((first, last))
                    other.fingerprints[number] = (start, bytes(image))

    # -- the host ------------------------------------------------------------------------------------------

    def require_readable(self, span: Span) -> None:
        """Refuse a host read of bytes that an operation writes, unless the host knows that operation to be done."""
        for submission in self._unseen:
            common = first_common([span], submission.footprint.host_writes)
            if common is not None and not self._is_known(submission):
                buffer = self._memory.name_of(common[0])
                raise StreamHazard(
                    f"a host read of {buffer}", expected=f"the host to have waited for {submission.label}",
                    got="a read before it", remedy="wait for an event behind it, for its stream, or for the unit",
                    clause="C12.4", operation=submission.label, other="", buffer=buffer,
                )

    def _is_known(self, submission: Submission) -> bool:
        return self.host.get(submission.stream, 0) > submission.index

    def _forget(self) -> None:
        """Drop the operations that lie before every later one."""
        self._unseen = [submission for submission in self._unseen if not self._is_known(submission)]
        waiting = [other for queue in self._waiting.values() for other in queue]
        self._history = [
            past for past in self._history
            if not self._is_known(past) or not all(other.is_after(past) for other in waiting)
        ]

    def clear(self) -> None:
        """Drop all operations."""
        self._waiting.clear()
        self._history.clear()
        self._unseen.clear()
