"""The journal: every decision of a store's ledger as one JSON line, so that a run can be repeated without a device.

    {"schema": 2, "store_id": 7, "window_pages": 64, "config": {...}}
    {"revision": 1, "operation": "prepare_activation", "arguments": {...}, "answer": {...},
     "state": {"main": [0, 3, 5]}}
    {"revision": 2, "operation": "finish", "arguments": {...}, "refused": {"error": "UnitInFlight", "clause": "C12.2"},
     "state": ...}

`state` is (allocated, reserved, available) of each pool after the operation, so a replay notices a wrong counter at
once (C6.2).  A Refusal is written with its fields under "refused".

A line is written and flushed after its operation, so after a crash the journal holds every operation that ended.  If a
line cannot be written, the operation is still valid and answers as usual: an error would lose its handle and the slices
to publish.  The failure is logged, the journal ends at that line, and `close` raises JournalFailed.  The lines before
it can be repeated.  If an operation breaks off after its first write, the journal ends too, because a replay cannot
repeat an interrupt.  An operation that an exception ends before its first write has no line, and the journal goes on.

The journal holds no queries and no pins of transfers (C7.4).  So a replay differs at an operation that was refused
because of such a pin.
"""

from __future__ import annotations

import fcntl
import json
import logging
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, TextIO

from pagedkv.errors import Caught, JournalFailed, MisuseError, PagedKVError, shown
from pagedkv.ledger.active_spaces import WINDOW_PAGES
from pagedkv.ledger.ledger import Ledger
from pagedkv.record.words import JournalWords, Words, refusal_words
from pagedkv.values.config import config_as_json

_LOG = logging.getLogger("pagedkv")

SCHEMA = 2

_CUT_OFF = InterruptedError("an interrupt cut a line off")


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
        failure: the error of the line that could not be written; no line is written after it.
        lines: whole lines so far; the header is line 0, so this is the revision of the next operation.
    """

    def __init__(self, target: str | PathLike[str] | TextSink) -> None:
        self.failure: BaseException | None = None
        self.lines = 0
        self._has_ended = False
        self._is_closed = False
        self._own_file: TextIO | None = None
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
        self._file: TextSink = target if self._own_file is None else self._own_file  # type: ignore[assignment]

    def write(self, line: Mapping[str, object]) -> None:
        """Write one line and flush it; a failure is logged and ends the journal."""
        if self._has_ended or self._is_closed:
            return
        self._has_ended, self.failure = True, _CUT_OFF  # until the line is whole and counted
        with Caught() as caught:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._file.flush()
        if caught.error is None:
            self.lines += 1
            self._has_ended = False
            self.failure = None
        else:
            self.failure = caught.error
            _LOG.error("the journal ends after %d lines: %s; operations continue", self.lines, shown(caught.error))

    def end(self, why: str) -> None:
        """End the journal: log the reason, and write no further line."""
        if not self._has_ended:
            self._has_ended = True
            _LOG.error("the journal ends after %d lines: %s", self.lines, why)

    def close(self) -> None:
        """Close a file that the journal opened; raises JournalFailed, once, if a line could not be written."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._own_file is not None:
            with Caught() as caught:
                self._own_file.close()
            self.failure = self.failure or caught.error
        if self.failure is not None:
            raise JournalFailed("a complete journal", expected="every line written", got=shown(self.failure),
                                remedy=f"repeat the {self.lines} lines that it holds, or record again",
                                clause="C12.4", lines=self.lines) from self.failure

    def close_after(self, error: BaseException) -> None:
        """Close while `error` is being raised: a failure of the journal becomes a note of that error."""
        try:
            self.close()
        except JournalFailed as second:
            error.add_note(f"and {second}")


def _open_alone(path: Path) -> TextIO:
    """Open a file and empty it, under a lock that ends with it: a second store must not write between its lines."""
    file = path.open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.is_file():  # not a pipe or a terminal
            file.truncate(0)
    except BaseException:
        file.close()
        raise
    return file


class JournalRecorder:
    """Writes every operation of one ledger to a journal; passed to `Ledger.record_in`."""

    def __init__(self, ledger: Ledger, journal: Journal) -> None:
        self.journal = journal
        self._words = JournalWords(ledger)
        self._operation = ""
        self._operation_arguments: Mapping[str, Any] = {}
        self._argument_words: Words = {}
        journal.write({"schema": SCHEMA, "store_id": ledger.sequences.store_id, "window_pages": WINDOW_PAGES,
                       "config": config_as_json(ledger.config)})

    def begin(self, operation: str, arguments: Mapping[str, Any]) -> None:
        """Translate the arguments of an operation now, while their handles are current."""
        self._operation, self._operation_arguments = operation, arguments
        self._argument_words = self._words.arguments(arguments)

    def answer(self, answer: object) -> None:
        """Write the line of an operation that answered."""
        self._write(self._words.outcome(self.journal.lines, self._operation_arguments, answer))

    def refuse(self, error: PagedKVError) -> None:
        """Write the line of an operation that was refused."""
        self._write(refusal_words(error))

    def break_off(self, error: BaseException) -> None:
        """End the journal: a replay cannot repeat an operation that broke off."""
        self.journal.end(f"{self._operation} broke off: {shown(error)}")

    def _write(self, outcome: Words) -> None:
        self.journal.write({"revision": self.journal.lines, "operation": self._operation,
                            "arguments": self._argument_words, **outcome, "state": self._words.state()})
