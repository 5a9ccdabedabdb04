"""Deferred mode of the cpu device: streams are real queues, and work runs only when something forces it.

A submission waits in its stream.  `stream.synchronize`, `event.synchronize` and `event.query` force what they
ask about, and the seed picks a legal order across streams:

    late     only what must run for the answer runs; other streams stay where they are
    early    everything that may run runs, other streams first
    random   any stream's next operation, until the answer is there

So nothing works because it happened to be early, or late.  Besides the order, four things are checked that a GPU
leaves to luck; each raises a StreamHazard that names the operation and the buffer:

    pinned memory that an asynchronous operation reads is fingerprinted at submission, slice by slice, and compared
        at execution: staging that was re-used too early
    host memory that an operation will write is poisoned at submission, and `require_readable` refuses it until the
        host knows that the operation is done: early reads
    pageable sources are copied at submission, as CUDA does (`cpu.py`)
    operations of two streams without an order between them must not touch the same bytes (`cpu_races.py`)

Order is kept in clocks: a stream's clock says how many operations of every stream lie before its next one; an
event holds a clock; the host's clock says what the host has seen.  Clauses: C7.4, C12, C15.1.
"""

from __future__ import annotations

import random
from collections import deque

from pagedkv.devices.cpu.execution import Executor
from pagedkv.devices.cpu.footprints import Footprint, Span, clip, first_common, footprint_of, read_bytes, write_bytes
from pagedkv.devices.cpu.memory import POISON, Memory
from pagedkv.devices.cpu.operations import CopyOperation, KernelOperation, Operation
from pagedkv.devices.cpu.races import Clock, Races, Submission
from pagedkv.errors import StreamHazard

SCHEDULES = ("late", "early", "random")

HISTORY_MAX = 1024  # operations that ran and that something may still race with
LATE_QUERIES_MAX = 3  # a late event says "not yet" at most so often


def joined(one: Clock, other: Clock) -> Clock:
    """Give the clock of what lies before both."""
    both = dict(one)
    for stream, count in other.items():
        if count > both.get(stream, 0):
            both[stream] = count
    return both


class Queues:
    """Everything submitted to one device and not yet run.

    Attributes:
        host: clock of what the host knows to be done.
        choices: how often the seed decided among several orders, or how late an event is; 0: every seed runs the same.
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
        self._unseen: list[Submission] = []  # write host memory, and the host does not know that they are done

    def add_stream(self) -> None:
        """Count a stream: with one alone nothing can race, and nothing is watched."""
        self._streams_count += 1

    # -- submission ----------------------------------------------------------------------------------------

    def submit(
        self, operation: Operation, *, stream: int, stream_label: str, after: Clock, footprint: Footprint | None = None
    ) -> Clock:
        """Queue one operation.

        Args:
            operation: what runs, and when: after everything in `after`, and after what the host has seen.
            stream: number of the stream; `stream_label` is for messages.
            after: clock of the stream.
            footprint: what it touches, when that is known already.

        Returns:
            The clock of the stream after it.
        """
        index = self._submitted.get(stream, 0)
        clock = joined(after, self.host)
        submission = Submission(
            operation, stream=stream, index=index, after=clock,
            footprint=footprint_of(operation, self._memory) if footprint is None else footprint,
            label=f"{self._name(operation)}, operation {index} of {stream_label}",
        )  # fmt: skip
        self._take_fingerprints(submission)
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

    def _take_fingerprints(self, submission: Submission) -> None:
        submission.fingerprints = [(span[0], read_bytes(span)) for span in submission.footprint.pinned_reads]

    def _poison(self, submission: Submission) -> None:
        written = submission.footprint.host_writes
        if not written:
            return
        self._unseen.append(submission)
        read = [span for queue in self._waiting.values() for other in queue for span in other.footprint.reach]
        for span in written:
            # Bytes that something reads first are not the operation's yet.
            if not first_common([span], [*read, *submission.footprint.reads, *submission.footprint.may_read]):
                write_bytes(span[0], bytes([POISON]) * (span[1] - span[0]))

    # -- forcing -------------------------------------------------------------------------------------------

    def finish(self, clock: Clock) -> None:
        """Run what `clock` names, and what the seed runs besides; then the host knows it."""
        self._run_until(clock)
        self.host = joined(self.host, clock)
        self._forget()

    def query(self, clock: Clock, asked: int) -> bool:
        """Say whether what `clock` names has run, and let time pass; `asked` counts earlier questions."""
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
        # Whatever lies before the clock is in the clock: joining is transitive.
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
        """Give the waiting operations that lie before a clock, in an order in which they can run."""
        found: dict[tuple[int, int], Submission] = {}
        open_clocks = [clock]
        while open_clocks:
            for stream, count in open_clocks.pop().items():
                for submission in self._waiting.get(stream, ()):
                    if submission.index < count and (stream, submission.index) not in found:
                        found[stream, submission.index] = submission
                        open_clocks.append(submission.after)
        chain: list[Submission] = []
        done = dict(self._done)
        while found:
            ready = [
                key for key, submission in found.items()
                if done.get(key[0], 0) == key[1]
                and all(done.get(stream, 0) >= count for stream, count in submission.after.items())
            ]  # fmt: skip
            for key in ready:
                chain.append(found.pop(key))
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
        ]  # fmt: skip

    def _compare_fingerprints(self, submission: Submission) -> None:
        for start, expected in submission.fingerprints:
            found = read_bytes((start, start + len(expected)))
            if found == expected:
                continue
            place = next(at for at, (one, other) in enumerate(zip(expected, found, strict=True)) if one != other)
            buffer = self._memory.name_of(start + place)
            raise StreamHazard(
                submission.label, expected="pinned memory as it was at submission",
                got=f"other bytes in {buffer}: the host wrote there before the operation had run",
                remedy="write again only after an event behind the operation, or use another slot",
                clause="C15.1", operation=submission.label, other="", buffer=buffer,
            )  # fmt: skip

    def _refresh_fingerprints(self, submission: Submission) -> None:
        """What the device itself writes into pinned memory is meant: expect the new bytes from here on."""
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
        """Refuse a host read of bytes that an operation writes which the host does not know to be done.

        Raises:
            StreamHazard: names the operation and the buffer.
        """
        for submission in self._unseen:
            common = first_common([span], submission.footprint.host_writes)
            if common is not None and not self._is_known(submission):
                buffer = self._memory.name_of(common[0])
                raise StreamHazard(
                    f"a host read of {buffer}", expected=f"the host to have waited for {submission.label}",
                    got="a read before it", remedy="wait for an event behind it, for its stream, or for the unit",
                    clause="C12.4", operation=submission.label, other="", buffer=buffer,
                )  # fmt: skip

    def _is_known(self, submission: Submission) -> bool:
        return self.host.get(submission.stream, 0) > submission.index

    def _forget(self) -> None:
        """Drop what every later operation is ordered after."""
        self._unseen = [submission for submission in self._unseen if not self._is_known(submission)]
        waiting = [other for queue in self._waiting.values() for other in queue]
        self._history = [
            past for past in self._history
            if not self._is_known(past) or not all(other.is_after(past) for other in waiting)
        ]  # fmt: skip

    def clear(self) -> None:
        """Drop what has not run; called when the device closes."""
        self._waiting.clear()
        self._history.clear()
        self._unseen.clear()
