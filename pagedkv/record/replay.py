"""Replay: repeat the operations of a journal on a ledger without a device, until a result differs.

    report = replay_journal("run.jsonl")
    report.difference        None, or the revision, the expected result and the result of the replay

The journal's first line describes the ledger.  The replay repeats each operation with its recorded arguments, compares
its answer or refusal and the state of every pool with the recorded ones, and checks the invariants (C16).  So the
journal of a failed run is a test, and the journal of a good run shows whether a change of the code decides differently.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from pagedkv.errors import Caught, ConfigError, MisuseError, PagedKVError, shown
from pagedkv.ledger.check import check_ledger
from pagedkv.ledger.ledger import RECORDED, Ledger
from pagedkv.record.journal import SCHEMA
from pagedkv.record.words import JournalWords, Words, refusal_words
from pagedkv.values.config import config_from_json
from pagedkv.values.quantities import WINDOW_PAGES

DEPTH_MAX = 200

LINE_MAX = 1 << 26
"""Characters of a line: a unit that maps all pages of a large store takes about 20 for each."""

PAGES_MAX = 1 << 23
"""Page groups and table entries of a replayed store: half a gigabyte of ledgers."""

# A check costs about as much as 4 operations, and as one more for every 1024 pages.
OPERATIONS_PER_CHECK_MIN = 8
PAGES_CHECKED_PER_OPERATION = 512


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


def replay_journal(
    journal: str | PathLike[str] | Iterable[str], *, name: str | None = None, check_every: int | None = None,
    pages_max: int = PAGES_MAX,
) -> ReplayReport:
    """Repeat a journal on a ledger without a device, and stop at the first difference.

    Args:
        journal: the path of a journal, an open text file, or the lines with their newlines.  An iterator, such as an
            open file, is read into memory; a path or a list is not copied.
        name: the journal's name in errors; by default its path.
        check_every: check the invariants after so many operations, and at the end.  A check reads every page, so the
            default checks more seldom the more pages there are, and costs about as much as the operations.  After a
            difference the operations since the last check are repeated with a check after each.  So a difference is
            found at its operation, unless a broken invariant heals before the next check; 1 finds that too.
        pages_max: most page groups and table entries of all pools, for which the replay needs host memory.

    Raises:
        MisuseError: a file that cannot be read, a line that no journal contains, or a larger store; the error names the
            line.  An incomplete last line without a newline is no error: a crash leaves such a line.
    """
    for what, count in (("check_every", 1 if check_every is None else check_every), ("pages_max", pages_max)):
        if type(count) is not int or count < 1:
            raise MisuseError(what, expected="a count of at least 1", got=shown(count),
                              remedy="leave it out for the default", clause="C16")
    if not isinstance(journal, str | PathLike | Iterable) or isinstance(journal, bytes | bytearray):
        raise MisuseError("a replay", expected="the path of a journal, an open text file, or lines",
                          got=_shortened(shown(journal)), remedy="pass what open_store(journal=...) wrote",
                          clause="C12.4")
    if name is None:
        name = str(journal) if isinstance(journal, str | PathLike) else "the journal"
    name = _shortened(name)
    if isinstance(journal, Iterator):
        journal = list(_lines_of(journal, name))
    replay = _Replay(_Reader(journal, name, pages_max))
    report = replay.run(check_every)
    if report.difference is None or replay.checked >= report.operations:
        return report
    again = _Replay(_Reader(journal, name, pages_max)).run(1, first=replay.checked, last=report.difference.revision)
    return report if again.difference is None else again


def _lines_of(journal: str | PathLike[str] | Iterable[str], name: str) -> Iterator[str]:
    """Yield the lines of a file or of an iterable; no line of a file is read beyond `LINE_MAX`."""
    try:
        if not isinstance(journal, str | PathLike):
            yield from journal
            return
        # A journal is ASCII, so a character that replaces another byte is in no valid line.
        with Path(journal).open(encoding="utf-8", errors="replace") as file:
            yield from iter(lambda: file.readline(LINE_MAX + 1), "")
    except (OSError, ValueError, TypeError) as error:  # also a NUL in a path, and a path of bytes
        raise MisuseError(f"reading {name}", expected="a text file that can be read", got=_shortened(error),
                          remedy="pass a path, an open text file, or text.splitlines(keepends=True)",
                          clause="C12.4") from error


class _Reader:
    """Parses the lines of a journal, and refuses by number a line that no journal contains."""

    def __init__(self, journal: str | PathLike[str] | Iterable[str], name: str, pages_max: int) -> None:
        self._name = name
        self._objects = self._parsed(_lines_of(journal, name))
        self._pages_max = pages_max
        self.is_truncated = False

    def header(self) -> tuple[Ledger, JournalDifference | None]:
        """Return the ledger that the first line describes, and a difference of its window from ours."""
        number, head = next(self._objects, (1, {}))
        store_id, window = head.get("store_id"), head.get("window_pages")
        has_schema = type(head.get("schema")) is int and head["schema"] == SCHEMA
        if not has_schema or type(store_id) is not int or type(window) is not int:
            raise self.malformed(number, f"the header of a journal, schema {SCHEMA}", head)
        try:
            config = config_from_json(head.get("config"))
            pages = config.main_pages
        except ConfigError as error:
            raise self.malformed(number, "a resolved configuration", error) from error
        difference = None
        if window != WINDOW_PAGES:
            difference = JournalDifference(0, "header", "window_pages", window, WINDOW_PAGES)
        needed = sum(pool.pages for pool in config.pools) + len(config.pools) * config.max_concurrency * config.blocks
        if needed > self._pages_max:
            raise self.malformed(number, f"at most {self._pages_max} page groups and table entries", str(needed),
                                 "raise pages_max if there is host memory for them")
        try:
            return Ledger(config, store_id), difference
        except MemoryError as error:
            raise self.malformed(number, "a configuration that fits into memory", f"{pages} pages") from error

    def operations(self) -> Iterator[tuple[int, Words]]:
        """Yield the number and the object of each further line; their revisions must be 1, 2, 3 and so on."""
        for revision, (number, line) in enumerate(self._objects, start=1):
            if "like" in line and "operation" not in line and "arguments" not in line:
                line = {"operation": "begin_unit", "arguments": {}, **line}  # noqa: PLW2901 - as if it were in full
            forms = {"revision": int, "operation": str, "arguments": dict}
            left_out = {"state": {}, "like": 0}
            if any(type(line.get(key)) is not form for key, form in forms.items()) or any(
                    type(line.get(key, value)) is not type(value) for key, value in left_out.items()):
                raise self.malformed(number, f"an operation with {', '.join(forms)}", line)
            if line["revision"] != revision:
                raise self.malformed(number, f"revision {revision}", line["revision"])
            if line["operation"] not in RECORDED:
                raise self.malformed(number, f"an operation of {sorted(RECORDED)}", line["operation"])
            if ("answer" in line) == ("refused" in line):
                raise self.malformed(number, "an answer or a refusal", line)
            yield number, line

    def malformed(
        self, number: int, expected: str, got: object,
        remedy: str = "pass a journal as open_store(journal=...) wrote it",
    ) -> MisuseError:
        """Return the error for a line that no journal contains, or that is too much."""
        return MisuseError(f"line {number} of {self._name}", expected=expected, got=_shortened(got), remedy=remedy,
                           clause="C12.4", line=number)

    def _parsed(self, lines: Iterable[str]) -> Iterator[tuple[int, Words]]:
        remaining = enumerate(lines, start=1)
        current = next(remaining, None)
        while current is not None:
            number, text = current
            if not isinstance(text, str) or len(text) > LINE_MAX:
                raise self.malformed(number, f"text of at most {LINE_MAX} characters",
                                     f"{len(text)} characters" if isinstance(text, str) else shown(text))
            if _is_deep(text):
                raise self.malformed(number, f"at most {DEPTH_MAX} brackets within each other", text)
            following = next(remaining, None)
            try:
                parsed = json.loads(text, object_pairs_hook=_unique)
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
    """Repeats the operations of lines on one ledger.

    `checked` is the revision behind which every invariant held at last.
    """

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader
        self._ledger, self._header_difference = reader.header()
        self._words = JournalWords(self._ledger)
        self._state = self._words.state()
        self._begun: tuple[int | None, Words] = (None, {})  # the last `begin_unit` in full, and its arguments
        self.checked = 0

    def run(self, check_every: int | None, *, first: int = 0, last: int | None = None) -> ReplayReport:
        """Repeat the operations up to `last`, and check after those behind `first`."""
        if self._header_difference is not None:
            return ReplayReport(0, is_truncated=False, difference=self._header_difference)
        operations, line, difference = 0, None, None
        due = first + (check_every or self._operations_per_check())
        for number, line in self._reader.operations():
            difference = self.repeat(number, line)
            if difference is None and line["revision"] >= due:
                difference = self.check(line)
                due = self.checked + (check_every or self._operations_per_check())
            if difference is not None:
                break
            operations += 1
            if line["revision"] == last:
                break
        if difference is None and line is not None and line["revision"] != self.checked:
            difference = self.check(line)
        return ReplayReport(operations, self._reader.is_truncated, difference)

    def _operations_per_check(self) -> int:
        """Return after how many operations a check, which reads the members of all spaces, is worth its time."""
        pages = sum(spaces.pool.capacity for spaces in self._ledger.active.values())
        kept = sum(space.members.size for kept in self._ledger.kept.values() for space in kept.by_number.values())
        return OPERATIONS_PER_CHECK_MIN + (pages + kept) // PAGES_CHECKED_PER_OPERATION

    def repeat(self, number: int, line: Words) -> JournalDifference | None:
        """Repeat one operation, and return how its outcome differs from the recorded one, or None."""
        outcome = json.loads(json.dumps(self._outcome(number, line)))
        for what in ("refused", "answer"):
            expected, got = line.get(what), outcome.get(what)
            if (what in line) != (what in outcome) or expected != got:
                return _difference(line, what, expected, got)
        self._words.name_batch(line["revision"])
        self._state = line.get("state", self._state)
        state = self._words.state()
        return None if state == self._state else _difference(line, "state", self._state, state)

    def check(self, line: Words) -> JournalDifference | None:
        """Check every invariant."""
        try:
            check_ledger(self._ledger)
        except AssertionError as error:
            return _difference(line, "invariant", "every invariant of C16", str(error))
        self.checked = line["revision"]
        return None

    def _outcome(self, number: int, line: Words) -> Words:
        operation: Any = getattr(self._ledger, line["operation"])
        revision, arguments = self._begun
        if "like" in line and line["like"] != revision:
            raise self._reader.malformed(number, "the revision of the last begin_unit in full", line["like"])
        try:
            if "like" not in line:
                arguments = self._words.arguments_from(line["arguments"])
        except PagedKVError as error:  # a target that no caller can make
            return refusal_words(error)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise self._reader.malformed(number, f"arguments of {line['operation']}", repr(error)) from error
        if line["operation"] == "begin_unit" and "like" not in line:
            self._begun = line["revision"], arguments
        with Caught() as caught:
            return self._words.outcome(line["revision"], arguments, operation(**arguments))
        assert caught.error is not None, "an operation returned no outcome and raised no error"
        if isinstance(caught.error, PagedKVError):
            return refusal_words(caught.error)
        # No journal holds that: such an operation has no line, or ended the journal.
        return {"refused": {"error": type(caught.error).__name__, "message": _shortened(caught.error)}}


def _difference(line: Words, what: str, expected: object, got: object) -> JournalDifference:
    return JournalDifference(line["revision"], line["operation"], what, expected, got)


def _is_deep(text: str) -> bool:
    """Say whether brackets are nested so deep that nobody could parse, compare and print the value."""
    if text.count("[") + text.count("{") <= DEPTH_MAX:
        return False
    characters = np.frombuffer(text.encode(errors="replace"), np.uint8)
    steps = np.isin(characters, list(b"[{")).astype(np.int8) - np.isin(characters, list(b"]}"))
    return int(np.cumsum(steps, dtype=np.int64).max()) > DEPTH_MAX


def _unique(pairs: list[tuple[str, object]]) -> Words:
    """Return the object of a line; ValueError if it names a key twice."""
    words = dict(pairs)
    if len(words) != len(pairs):
        raise ValueError("a key twice")
    return words


def _shortened(value: object) -> str:
    text = value if isinstance(value, str) else str(value) if isinstance(value, Exception) else shown(value)
    return text if len(text) <= 200 else text[:200] + "..."
