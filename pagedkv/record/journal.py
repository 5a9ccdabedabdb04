"""The journal: every decision of a store's ledger as one JSON line, so that a run can be repeated without a device.

    {"schema": 5, "store_id": 7, "window_pages": 64, "config": {...}}
    {"revision": 1, "operation": "prepare_activation", "arguments": {...}, "answer": {...}, "state": {...}}
    {"revision": 2, "operation": "begin_unit", "arguments": {"name": "unit", "batch": {"batch": [[0, 1]]}, ...},
     "answer": {"unit": 1, "first_positions": 558161692, "slices": 2666930069}, "state": {"main": [1, 2, 5]}}
    {"revision": 3, "operation": "commit_unit", "arguments": {"unit": {"unit": 1}, ...}, "answer": {"frontiers": ...}}
    {"revision": 4, "like": 2, "answer": {"unit": 2, "first_positions": 1696784233}}
    {"revision": 5, "operation": "finish", "arguments": {...}, "refused": {"error": "UnitInFlight", "clause": "C12.2"}}

`like` is the revision of the last line with a `begin_unit` in full: this is one with the same arguments.  An argument
that is left out has its default.  `state` is (allocated, reserved, available) of each pool after the operation, so a
replay notices a wrong counter at once (C6.2); a line without it has the state of the line before.  A Refusal is written
with its fields under "refused".  `words.py` describes arguments, and the numbers that stand for frontiers and first
positions of all rows and for new slices of tables.

The last line waits in memory until the store's next call, which writes it before it returns or raises.  So two lines of
a decode step are written by one system call, and a crash loses at most the line of the last call.  Where a full disk or
an interrupt leaves a part of a line in a file that the journal opened, the file is cut behind its last whole line.

If a line cannot be written, the operation is still valid and answers as usual: an error would lose its handle and the
slices to publish.  The failure is logged, the journal ends at that line, and `close` raises JournalFailed.  The lines
before it can be repeated.  If an operation breaks off after its first write, the journal ends too, because a replay
cannot repeat an interrupt.  An operation that an exception ends before its first write has no line, and the journal
goes on.

The journal holds no queries and no pins of transfers (C7.4).  So a replay differs at an operation that was refused
because of such a pin.
"""

from __future__ import annotations

import fcntl
import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from io import FileIO
from itertools import chain
from json import JSONEncoder
from os import PathLike
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

from pagedkv.errors import Caught, JournalFailed, MisuseError, PagedKVError, shown
from pagedkv.ledger.batch import Batch, Columns
from pagedkv.ledger.ledger import Ledger, PoolSlices
from pagedkv.ledger.pool import PagePool
from pagedkv.ledger.units import Submission
from pagedkv.record.words import JournalWords, Words, refusal_words
from pagedkv.values.config import config_as_json
from pagedkv.values.quantities import WINDOW_PAGES

_LOG = logging.getLogger("pagedkv")

P = ParamSpec("P")
T = TypeVar("T")

SCHEMA = 5

_CUT_OFF = InterruptedError("an interrupt cut a line off")

_json = JSONEncoder(separators=(",", ":")).encode

_NOTHING = object()

_COMMIT = b'{"revision":%d,"operation":"commit_unit","arguments":{"unit":{"unit":%d}},"answer":{"frontiers":%d%b}\n'

_Begin = tuple[Batch | None, str, dict[str, int], bytes]
"""The last `begin_unit` in full, if its columns are ints: its arguments, and the text of one that is like it."""


_NO_BEGIN: _Begin = (None, "", {}, b"")


class TextSink(Protocol):
    """A text file, or any object with these two methods."""

    def write(self, text: str, /) -> object:
        """Write one line, which ends with a newline."""

    def flush(self) -> object:
        """Save the lines so far against a crash of the process."""


class Journal:
    """Writes lines to a text file.

    Args:
        target: a path, whose file is overwritten and which `close` closes; or an open text file, which stays open.

    Attributes:
        lines: whole lines so far; the header is line 0, so this plus those that wait is the revision of the next one.
        waiting: lines that `flush` has yet to write.
    """

    def __init__(self, target: str | PathLike[str] | TextSink) -> None:
        self.lines = 0
        self.waiting: list[bytes] = []
        self._end: BaseException | str | None = None  # why no further line is written
        self._is_closed = False
        self._own_file: FileIO | None = None
        self._bytes = 0
        if isinstance(target, str | PathLike):
            try:
                self._own_file = _open_alone(Path(target))
            except (OSError, ValueError, TypeError) as error:  # a NUL or a surrogate in a path, a path of bytes
                raise MisuseError("a journal", expected="a path that can be written, and that no other store writes",
                                  got=str(error), remedy="name a file of its own in a folder that exists",
                                  clause="C12.4") from error
        elif not all(callable(getattr(target, name, None)) for name in ("write", "flush")):
            raise MisuseError("a journal", expected="a path or an open text file", got=shown(target),
                              remedy="pass journal=None to record nothing", clause="C12.4")
        else:
            self._file = target

    def write(self, line: Mapping[str, object]) -> None:
        """Write a line behind those that wait, as `flush` does."""
        self.waiting.append(_json(line).encode() + b"\n")
        self.flush()

    def flush(self) -> None:
        """Write the lines that wait by one call; a failure is logged and ends the journal.

        After an error a file that the journal opened is cut behind its last whole line.
        """
        waiting = self.waiting
        if self._end is not None:
            waiting.clear()
            return
        self._end = _CUT_OFF  # until the lines are whole and counted
        content, done, file = b"".join(waiting), 0, self._own_file
        lines, bytes_before = self.lines, self._bytes
        count = len(waiting)
        waiting.clear()
        with Caught(all_kinds=True) as caught:
            if file is not None:
                done = file.write(content)
                while done < len(content):  # a full disk takes a part, and refuses the next call
                    done += file.write(content[done:])
                self._bytes = bytes_before + done
                self.lines = lines + count
            else:
                for line in content.decode().splitlines(keepends=True):
                    self._file.write(line)
                    self._file.flush()
                    self.lines += 1
            self._end = None
        error = caught.error
        if error is None:
            return
        if file is not None:
            whole = content.rfind(b"\n", 0, done) + 1
            self.lines = lines + content.count(b"\n", 0, whole)
            with Caught(error):  # a pipe cannot be cut
                file.truncate(bytes_before + whole)
        if not isinstance(error, Exception):
            raise error
        self._end = error
        _LOG.error("the journal ends after %d lines: %s; operations continue", self.lines, shown(error))

    def end(self, why: str) -> None:
        """End the journal: write what waits, log the reason, and write no further line."""
        self.flush()
        if self._end is None:
            self._end = why
            _LOG.error("the journal ends after %d lines: %s", self.lines, why)

    def close(self) -> None:
        """Write what waits, and close a file that the journal opened; raises JournalFailed, once, if a line is lost."""
        if self._is_closed:
            return
        self.flush()
        self._is_closed = True
        failure, self._end = self._end, self._end or "closed"
        if self._own_file is not None:
            with Caught() as caught:
                self._own_file.close()
            failure = failure or caught.error
        if isinstance(failure, BaseException):
            raise JournalFailed("a complete journal", expected="every line written", got=shown(failure),
                                remedy=f"replay the {self.lines} lines that it holds, or record again",
                                clause="C12.4", lines=self.lines) from failure

    def close_after(self, error: BaseException) -> None:
        """Close while `error` is being raised: a failure of the journal becomes a note of that error."""
        try:
            self.close()
        except JournalFailed as second:
            error.add_note(f"and {second}")


def _open_alone(path: Path) -> FileIO:
    """Open a file and empty it, under a lock that ends with it: a second store must not write between its lines."""
    file = path.open("ab", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.is_file():  # not a pipe or a terminal
            file.truncate(0)
    except BaseException:
        file.close()
        raise
    return file


class JournalRecorder:
    """Hands every operation of one ledger to a journal; passed to `Ledger.record_in`.

    Args:
        defers: let the last decision wait; the store calls `Journal.flush` in its next call.  Otherwise each decision
            is written before its operation returns.
    """

    def __init__(self, ledger: Ledger, journal: Journal, *, defers: bool = False) -> None:
        self.journal = journal
        self._ledger = ledger
        self._words = JournalWords(ledger)
        self._waiting_max = int(defers)
        self._pools = [spaces.pool for spaces in ledger.active.values()]
        self._counts: list[tuple[PagePool, int, int]] = []
        pools = b",".join(b'"%b":[%%d,%%d,%%d]' % pool.name.encode() for pool in self._pools)
        self._state_form = b',"state":{%b}' % pools  # `json` takes four times as long
        self._state()
        self._usual = _NO_BEGIN
        journal.write({"schema": SCHEMA, "store_id": ledger.sequences.store_id, "window_pages": WINDOW_PAGES,
                       "config": config_as_json(ledger.config)})

    def reporting(self, operation: Callable[P, T]) -> Callable[P, T]:
        """Return an operation of the ledger that notes each of its calls here."""
        name = operation.__name__
        parameters = list(inspect.signature(operation).parameters.values())
        names = [parameter.name for parameter in parameters]
        defaults = {p.name: p.default for p in parameters}

        @functools.wraps(operation)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            arguments = {**dict(zip(names, args, strict=False)), **kwargs}
            given = {key: value for key, value in arguments.items() if value is not defaults.get(key, _NOTHING)}
            words = self._words.arguments(given)  # now, while its handles are current
            try:
                answer = operation(*args, **kwargs)
            except BaseException as error:
                self._raised(name, words, error)
                raise
            self._answered(name, arguments, words, answer)
            return answer

        usual: dict[str, Callable[..., Any]] = {"begin_unit": self._beginning, "commit_unit": self._committing}
        return usual[name](operation, call) if name in usual else call

    def _beginning(self, operation: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `begin_unit` with a short way for the arguments of the last one."""
        words = self._words

        def begin_unit(name: str, batch: Batch, columns: Mapping[str, Columns]) -> tuple[Submission, PoolSlices]:
            usual_batch, usual_name, usual_columns, form = self._usual
            if batch is not usual_batch or name != usual_name or type(columns) is not dict:
                return call(name, batch, columns)  # type: ignore[no-any-return]
            for count in columns.values():
                if type(count) is not int:  # an array is compared with nothing
                    return call(name, batch, columns)  # type: ignore[no-any-return]
            if columns != usual_columns:
                return call(name, batch, columns)  # type: ignore[no-any-return]
            try:
                answer: tuple[Submission, PoolSlices] = operation(name, batch, columns)
            except BaseException as error:
                self._raised("begin_unit", words.arguments({"name": name, "batch": batch, "columns": columns}), error)
                raise
            unit, slices = answer
            rest = b',"slices":%d}' % words.slices(slices) if slices else b"}"
            self._note(form, unit.number, words.first_positions(unit), rest)
            return answer

        return begin_unit

    def _committing(self, operation: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `commit_unit` with a short way for a commit of every column."""
        words = self._words

        def commit_unit(unit: Submission, accepted: Mapping[str, Columns] | None = None) -> None:
            if accepted is not None or type(unit) is not Submission:
                call(unit, accepted)
                return
            try:
                operation(unit)
            except BaseException as error:
                self._raised("commit_unit", words.arguments({"unit": unit, "accepted": None}), error)
                raise
            self._note(_COMMIT, unit.number, words.frontiers(unit), b"}")

        return commit_unit

    def _raised(self, operation: str, arguments: Words, error: BaseException) -> None:
        """Note a refusal.  After an operation that broke off the journal ends: a replay cannot repeat it."""
        if isinstance(error, PagedKVError):
            self._note_words(operation, arguments, refusal_words(error))
        elif self._ledger.unsettled:
            self.journal.end(f"{operation} broke off: {shown(error)}")

    def _answered(self, operation: str, values: Mapping[str, Any], arguments: Words, answer: object) -> None:
        """Note an answer, and keep a `begin_unit` that will probably come again."""
        revision = self.journal.lines + len(self.journal.waiting)
        self._note_words(operation, arguments, self._words.outcome(revision, values, answer))
        if operation == "begin_unit":
            counts = arguments["columns"]["columns"]
            if all(type(count) is int for count in counts.values()):
                form = b'{"revision":%%d,"like":%d,"answer":{"unit":%%d,"first_positions":%%d%%b}\n' % revision
                self._usual = values["batch"], values["name"], counts, form

    def _note(self, form: bytes, number: int, checksum: int, rest: bytes) -> None:
        """Let a line wait, or write it with the one that waits: `form` with its values, and the rest of the answer."""
        waiting = self.journal.waiting
        for pool, allocated, reserved in self._counts:
            if pool.allocated != allocated or pool.reserved != reserved:
                rest += self._state()
                break
        waiting.append(form % (self.journal.lines + len(waiting), number, checksum, rest))
        if len(waiting) > self._waiting_max:
            self.journal.flush()

    def _note_words(self, operation: str, arguments: Words, outcome: Words) -> None:
        """Let a line wait, or write it with the one that waits."""
        waiting = self.journal.waiting
        revision = self.journal.lines + len(waiting)
        if operation == "begin_unit":
            self._usual = _NO_BEGIN  # before its line is the last one in full
        text = _json({"revision": revision, "operation": operation, "arguments": arguments, **outcome})
        counts = [(pool, pool.allocated, pool.reserved) for pool in self._pools]
        waiting.append(b"%b%b}\n" % (text[:-1].encode(), b"" if counts == self._counts else self._state()))
        self._words.name_batch(revision)
        if len(waiting) > self._waiting_max:
            self.journal.flush()

    def _state(self) -> bytes:
        """Return the state as the last part of a line, and note its counters."""
        self._counts = [(pool, pool.allocated, pool.reserved) for pool in self._pools]
        return self._state_form % tuple(chain.from_iterable(self._words.state().values()))
