"""Replay: repeat the operations of a journal on a ledger without a device, until a result differs.

    with open("run.jsonl") as file:
        report = replay_journal(file, name="run.jsonl")
    report.difference        None, or the revision, the expected result and the result of the replay

The journal's first line describes the ledger.  The replay repeats each operation with its recorded arguments, compares
its answer or refusal and the state of every pool with the recorded ones, and checks every invariant (C16).  So the
journal of a failed run is a test, and the journal of a good run shows whether a change of the code decides differently.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pagedkv.errors import Caught, ConfigError, MisuseError, PagedKVError, shown
from pagedkv.ledger.active_spaces import WINDOW_PAGES
from pagedkv.ledger.check import check_ledger
from pagedkv.ledger.ledger import RECORDED, Ledger
from pagedkv.record.journal import SCHEMA
from pagedkv.record.words import JournalWords, Words, refusal_words
from pagedkv.values.config import config_from_json


@dataclass(frozen=True)
class JournalDifference:
    """The first difference between a journal and its replay.

    Attributes:
        revision: of the operation; 0 for the header.
        operation: its name.
        what: "answer", "refused", "state", "invariant" (C16), or "window_pages" in the header.
        expected, got: the value in the journal and the value of the replay; None for a side that has none, because one
            side answered and the other refused.
    """

    revision: int
    operation: str
    what: str
    expected: object
    got: object


@dataclass(frozen=True)
class ReplayReport:
    """The result of a replay.

    Attributes:
        operations: how many were repeated with the same outcome.
        is_truncated: the last line is incomplete, as after a crash; it was not repeated.
        difference: the first one, or None.
    """

    operations: int
    is_truncated: bool
    difference: JournalDifference | None

    def as_json(self) -> dict[str, object]:
        """Return the report as `pagedkv journal replay --json` prints it."""
        difference = None if self.difference is None else dict(vars(self.difference))
        return {"schema": 1, "operations": self.operations, "is_truncated": self.is_truncated,
                "difference": difference}


def replay_journal(lines: Iterable[str], *, name: str = "the journal", check_every: int = 1) -> ReplayReport:
    """Repeat a journal on a ledger without a device, and stop at the first difference.

    Args:
        lines: the lines of the journal with their newlines, for example an open file.
        name: the journal's name in errors.
        check_every: check the invariants after every so many operations, and at the end.  A check reads every page.

    Raises:
        MisuseError: a line that no journal contains; the error names it.  An incomplete last line without a newline is
            no error: a crash leaves such a line.
    """
    if type(check_every) is not int or check_every < 1:
        raise MisuseError("check_every", expected="at least 1 operation", got=shown(check_every),
                          remedy="pass 1 to check after each", clause="C16")
    reader = _Reader(lines, name)
    ledger, difference = reader.header()
    if difference is not None:
        return ReplayReport(0, is_truncated=False, difference=difference)
    replay = _Replay(ledger, reader)
    operations, line = 0, None
    for number, line in reader.operations():
        difference = replay.repeat(number, line)
        if difference is None and line["revision"] % check_every == 0:
            difference = replay.check(line)
        if difference is not None:
            break
        operations += 1
    if difference is None and line is not None:
        difference = replay.check(line)
    return ReplayReport(operations, reader.is_truncated, difference)


class _Reader:
    """Parses the lines of a journal, and refuses by number a line that no journal contains."""

    def __init__(self, lines: Iterable[str], name: str) -> None:
        self._objects = self._parsed(lines)
        self._name = name
        self.is_truncated = False

    def header(self) -> tuple[Ledger, JournalDifference | None]:
        """Return the ledger that the first line describes, and a difference of its window from ours."""
        number, head = next(self._objects, (1, {}))
        store_id, window = head.get("store_id"), head.get("window_pages")
        if head.get("schema") != SCHEMA or type(store_id) is not int or type(window) is not int:
            raise self.malformed(number, f"the header of a journal, schema {SCHEMA}", head)
        try:
            config = config_from_json(head.get("config"))
            pages = config.main_pages
        except ConfigError as error:
            raise self.malformed(number, "a resolved configuration", error) from error
        difference = None
        if window != WINDOW_PAGES:
            difference = JournalDifference(0, "header", "window_pages", window, WINDOW_PAGES)
        try:
            return Ledger(config, store_id), difference
        except MemoryError as error:
            raise self.malformed(number, "a configuration that fits into memory", f"{pages} pages") from error

    def operations(self) -> Iterator[tuple[int, Words]]:
        """Yield the number and the object of each further line; their revisions must be 1, 2, 3 and so on."""
        for revision, (number, line) in enumerate(self._objects, start=1):
            forms = {"revision": int, "operation": str, "arguments": dict, "state": dict}
            if any(type(line.get(key)) is not form for key, form in forms.items()):
                raise self.malformed(number, f"an operation with {', '.join(forms)}", line)
            if line["revision"] != revision:
                raise self.malformed(number, f"revision {revision}", line["revision"])
            if line["operation"] not in RECORDED:
                raise self.malformed(number, f"an operation of {sorted(RECORDED)}", line["operation"])
            if ("answer" in line) == ("refused" in line):
                raise self.malformed(number, "an answer or a refusal", line)
            yield number, line

    def malformed(self, number: int, expected: str, got: object) -> MisuseError:
        """Return the error for a line that no journal contains."""
        return MisuseError(f"line {number} of {self._name}", expected=expected, got=_shortened(got),
                           remedy="pass a journal as open_store(journal=...) wrote it", clause="C12.4", line=number)

    def _parsed(self, lines: Iterable[str]) -> Iterator[tuple[int, Words]]:
        remaining = enumerate(lines, start=1)
        current = next(remaining, None)
        while current is not None:
            number, text = current
            following = next(remaining, None)
            try:
                parsed = json.loads(text)
            except (ValueError, RecursionError) as error:
                if following is None and number > 1 and not text.endswith("\n"):
                    self.is_truncated = True
                    return
                raise self.malformed(number, "one JSON object", text.rstrip("\n")) from error
            if not isinstance(parsed, dict):
                raise self.malformed(number, "one JSON object", parsed)
            yield number, parsed
            current = following


class _Replay:
    """Repeats the operations of lines on one ledger."""

    def __init__(self, ledger: Ledger, reader: _Reader) -> None:
        self._ledger = ledger
        self._reader = reader
        self._words = JournalWords(ledger)

    def repeat(self, number: int, line: Words) -> JournalDifference | None:
        """Repeat one operation, and return how its outcome differs from the recorded one, or None."""
        outcome = json.loads(json.dumps(self._outcome(number, line)))
        for what in ("refused", "answer"):
            expected, got = line.get(what), outcome.get(what)
            if (what in line) != (what in outcome) or expected != got:
                return _difference(line, what, expected, got)
        state = self._words.state()
        return None if state == line["state"] else _difference(line, "state", line["state"], state)

    def check(self, line: Words) -> JournalDifference | None:
        """Check every invariant; skipped while a transaction is open, because its claims belong to no space yet."""
        if self._words.transactions:
            return None
        try:
            check_ledger(self._ledger)
        except AssertionError as error:
            return _difference(line, "invariant", "every invariant of C16", str(error))
        return None

    def _outcome(self, number: int, line: Words) -> Words:
        operation: Any = getattr(self._ledger, line["operation"])
        try:
            arguments = self._words.arguments_from(line["arguments"])
        except PagedKVError as error:  # a target that no caller can make
            return refusal_words(error)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise self._reader.malformed(number, f"arguments of {line['operation']}", repr(error)) from error
        with Caught() as caught:
            return self._words.outcome(line["revision"], arguments, operation(**arguments))
        assert caught.error is not None, "an operation returned no outcome and raised no error"
        return refusal_words(caught.error)


def _difference(line: Words, what: str, expected: object, got: object) -> JournalDifference:
    return JournalDifference(line["revision"], line["operation"], what, expected, got)


def _shortened(value: object) -> str:
    text = value if isinstance(value, str) else str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
