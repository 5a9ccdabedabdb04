"""Replay: a journal's operations once more, on a ledger alone, until something differs.

    with open("run.jsonl") as file:
        report = replay_journal(file, name="run.jsonl")
    report.difference        None, or what was expected at which revision, and what came instead

Ledgers are built from the journal's first line.  Each operation is repeated with its recorded arguments; its answer or
refusal and the state of every pool are compared with the recorded ones, and every invariant is checked (C16).  So a
journal of a run that failed is a test, and one of a run that went well shows whether a change decides differently.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pagedkv.errors import Caught, ConfigError, MisuseError, PagedKVError
from pagedkv.ledger.active_spaces import WINDOW_PAGES
from pagedkv.ledger.check import check_ledger
from pagedkv.ledger.ledger import RECORDED, Ledger
from pagedkv.record.journal import SCHEMA
from pagedkv.record.words import JournalWords, Words, refusal_words
from pagedkv.values.config import config_from_json


@dataclass(frozen=True)
class JournalDifference:
    """The first place at which a replay went another way.

    Attributes:
        revision: of the operation; 0 for the header.
        operation: its name.
        what: "answer", "refused", "state", "invariant" (C16), or "window_pages" in the header.
        expected, got: what the journal says and what came; None where one answered and the other refused.
    """

    revision: int
    operation: str
    what: str
    expected: object
    got: object


@dataclass(frozen=True)
class ReplayReport:
    """What came of a replay.

    Attributes:
        operations: repeated with the same outcome.
        is_truncated: the last line was cut in the middle, as a crash leaves it; it was not repeated.
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
    """Repeat a journal on ledgers alone, and stop at the first difference.

    Args:
        lines: of the journal, with their newlines; an open file does.
        name: how errors call it.
        check_every: check the invariants after each so many operations, and at the end; a check looks at every page.

    Raises:
        MisuseError: a line that no journal has; names it.  A last line without a newline is taken for one that a crash
            cut off.
    """
    if type(check_every) is not int or check_every < 1:
        raise MisuseError("check_every", expected="at least 1 operation", got=repr(check_every),
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
    """Lines as objects, each refused with its number when it is none of a journal."""

    def __init__(self, lines: Iterable[str], name: str) -> None:
        self._objects = self._parsed(lines)
        self._name = name
        self.is_truncated = False

    def header(self) -> tuple[Ledger, JournalDifference | None]:
        """Return ledgers as the first line describes them."""
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
        """Yield the number and the object of every further line; their revisions are 1, 2, 3 and so on."""
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
        """Return the error for a line that no journal has."""
        return MisuseError(f"line {number} of {self._name}", expected=expected, got=_short(got),
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
                raise self.malformed(number, "one JSON object", text) from error
            if not isinstance(parsed, dict):
                raise self.malformed(number, "one JSON object", parsed)
            yield number, parsed
            current = following


class _Replay:
    """Repeats lines on ledgers."""

    def __init__(self, ledger: Ledger, reader: _Reader) -> None:
        self._ledger = ledger
        self._reader = reader
        self._words = JournalWords(ledger)

    def repeat(self, number: int, line: Words) -> JournalDifference | None:
        """Repeat one operation; says what differs, if anything does."""
        outcome = json.loads(json.dumps(self._outcome(number, line)))
        for what in ("refused", "answer"):
            expected, got = line.get(what), outcome.get(what)
            if (what in line) != (what in outcome) or expected != got:
                return _difference(line, what, expected, got)
        state = self._words.state()
        return None if state == line["state"] else _difference(line, "state", line["state"], state)

    def check(self, line: Words) -> JournalDifference | None:
        """Check every invariant, except while a transaction is open: no space shows its claims."""
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
            arguments = self._words.arguments_back(line["arguments"])
        except PagedKVError as error:  # a batch of handles that have ended is refused here instead of by the operation
            return refusal_words(error)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise self._reader.malformed(number, f"arguments of {line['operation']}", repr(error)) from error
        with Caught() as caught:
            return self._words.outcome(line["revision"], arguments, operation(**arguments))
        assert caught.error is not None, "nothing was returned and nothing was raised"
        return refusal_words(caught.error)


def _difference(line: Words, what: str, expected: object, got: object) -> JournalDifference:
    return JournalDifference(line["revision"], line["operation"], what, expected, got)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
