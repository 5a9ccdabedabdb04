"""The journal: every ledger decision of a store as one JSON line, so that a run can be repeated without a device.

    {"schema": 1, "store_id": 7, "window_pages": 64, "config": {...}}
    {"revision": 1, "operation": "prepare_activation", "arguments": {...}, "answer": {...},
     "state": {"main": [0, 3, 5]}}
    {"revision": 2, "operation": "finish", "arguments": {...}, "refused": {"error": "UnitInFlight", "clause": "C12.2"},
     "state": ...}

`state` is (allocated, reserved, available) of each pool after the operation, so that drift is seen at once (C6.2).  A
Refusal is written with its fields under "refused".  `JournaledLedgers` is a layer around `StoreLedgers`: a store that
keeps no journal never passes through it.

A line is written and flushed after its operation, so a crash leaves what happened.  The operation stands whatever
becomes of its line, and is answered as ever: an error instead would lose a handle and what is to be published.  When a
line cannot be written, that is logged at once as an error, the journal ends there (what it holds can be repeated), and
`close` raises JournalFailed.

Not written: queries, and pins that transfers set on pages (C7.4); a journal with a refusal because of a pin differs at
that line when it is repeated.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from os import PathLike
from pathlib import Path
from typing import ParamSpec, Protocol, TextIO, TypeVar

from pagedkv.errors import JournalFailed, MisuseError
from pagedkv.ledger import active_spaces as address_space
from pagedkv.ledger.activation import ActivationTarget, PreparedActivation, Refusal
from pagedkv.ledger.caught import Caught
from pagedkv.ledger.continuations import Continuation
from pagedkv.ledger.ledger import Batch, Columns, PoolSlices, StoreLedgers
from pagedkv.ledger.sequences import Sequence
from pagedkv.ledger.snapshot import PreparedSnapshot
from pagedkv.ledger.units import Submission
from pagedkv.record.config_json import config_as_json
from pagedkv.record.words import JournalWords, Words, refusal_words
from pagedkv.values.config import StoreConfig

_LOG = logging.getLogger("pagedkv")

SCHEMA = 1

P = ParamSpec("P")
T = TypeVar("T")


class TextSink(Protocol):
    """What a journal writes to: a text file, or anything with its two methods."""

    def write(self, text: str, /) -> object:
        """Take one line, its newline included."""

    def flush(self) -> object:
        """Let what was written survive a crash of the process."""


class Journal:
    """Lines to a text file.

    Args:
        target: a path, whose file is made anew and closed by `close`; or an open text file, which stays open.

    Attributes:
        failure: why a line could not be written; nothing is written after it.

    Raises:
        MisuseError: neither of the two, or a path that cannot be written.
    """

    def __init__(self, target: str | PathLike[str] | TextSink) -> None:
        self.failure: Exception | None = None
        self._lines = 0
        self._is_closed = False
        self._opened: TextIO | None = None
        if isinstance(target, str | PathLike):
            try:
                self._opened = Path(target).open("w", encoding="utf-8")  # noqa: SIM115 - closed by `close`
            except (OSError, ValueError, TypeError) as error:  # a NUL or a surrogate in a path, a path of bytes
                raise MisuseError("a journal", expected="a path that can be written", got=str(error),
                                  remedy="name a file in a folder that exists", clause="C12.4") from error
        elif not all(callable(getattr(target, name, None)) for name in ("write", "flush")):
            raise MisuseError("a journal", expected="a path or an open text file", got=repr(target),
                              remedy="pass journal=None to keep none", clause="C12.4")
        self._file: TextSink = target if self._opened is None else self._opened  # type: ignore[assignment]

    def write(self, line: Mapping[str, object]) -> None:
        """Write one line and flush it; a failure is logged and kept, and ends the journal."""
        if self.failure is not None or self._is_closed:
            return
        with Caught() as caught:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._file.flush()
        self.failure = caught.error
        self._lines += caught.error is None
        if caught.error is not None:
            _LOG.error("the journal ends after %d lines: %r; operations go on", self._lines, caught.error)

    def close(self) -> None:
        """Close a file that the journal opened; closing twice is harmless.

        Raises:
            JournalFailed: a line could not be written meanwhile; said once.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._opened is not None:
            with Caught() as caught:
                self._opened.close()
            self.failure = self.failure or caught.error
        if self.failure is not None:
            raise JournalFailed("a complete journal", expected="every line written", got=f"{self.failure!r}",
                                remedy=f"repeat the {self._lines} lines that it holds, or record again",
                                clause="C12.4", lines=self._lines) from self.failure

    def close_after(self, error: BaseException) -> None:
        """Close beside an error that is raised already: a failure of the journal is a note to it."""
        try:
            self.close()
        except JournalFailed as second:
            error.add_note(f"and {second}")


class JournaledLedgers(StoreLedgers):
    """StoreLedgers whose every decision is written to a journal.

    Attributes:
        revision: operations so far, the refused ones too.
    """

    def __init__(self, config: StoreConfig, store_id: int, journal: Journal) -> None:
        super().__init__(config, store_id)
        self.journal = journal
        self.revision = 0
        self._words = JournalWords(self)
        journal.write({"schema": SCHEMA, "store_id": store_id, "window_pages": address_space.WINDOW_PAGES,
                       "config": config_as_json(config)})

    def _recorded(self, operation: Callable[P, T], *args: P.args, **arguments: P.kwargs) -> T:
        """Run an operation of `StoreLedgers` and write its line, whether it answers or refuses."""
        assert not args, "a journal knows arguments by name"
        given = self._words.arguments(arguments)
        self.revision += 1
        try:
            answer = operation(*args, **arguments)
        except BaseException as error:
            self._write(operation.__name__, given, refusal_words(error))
            raise
        self._write(operation.__name__, given, self._words.outcome(self.revision, arguments, answer))
        return answer

    def _write(self, operation: str, arguments: Words, outcome: Words) -> None:
        self.journal.write({"revision": self.revision, "operation": operation, "arguments": arguments, **outcome,
                            "state": self._words.state()})

    # ---- every operation of StoreLedgers that decides, in its order ---------------------------------

    def prepare_activation(self, target: ActivationTarget) -> PreparedActivation | Refusal:
        """Record `StoreLedgers.prepare_activation`."""
        return self._recorded(super().prepare_activation, target=target)

    def commit_activation(self, prepared: PreparedActivation) -> Sequence:
        """Record `StoreLedgers.commit_activation`."""
        return self._recorded(super().commit_activation, prepared=prepared)

    def abort_activation(self, prepared: PreparedActivation) -> None:
        """Record `StoreLedgers.abort_activation`."""
        self._recorded(super().abort_activation, prepared=prepared)

    def finish(self, sequence: Sequence, *, retain: bool = False, state: object = None) -> Continuation | None:
        """Record `StoreLedgers.finish`."""
        return self._recorded(super().finish, sequence=sequence, retain=retain, state=state)

    def abort(self, sequence: Sequence) -> bool:
        """Record `StoreLedgers.abort`."""
        return self._recorded(super().abort, sequence=sequence)

    def prepare_snapshot(self, sequence: Sequence, state: object = None) -> PreparedSnapshot | Refusal:
        """Record `StoreLedgers.prepare_snapshot`."""
        return self._recorded(super().prepare_snapshot, sequence=sequence, state=state)

    def commit_snapshot(self, prepared: PreparedSnapshot) -> Continuation:
        """Record `StoreLedgers.commit_snapshot`."""
        return self._recorded(super().commit_snapshot, prepared=prepared)

    def abort_snapshot(self, prepared: PreparedSnapshot) -> None:
        """Record `StoreLedgers.abort_snapshot`."""
        self._recorded(super().abort_snapshot, prepared=prepared)

    def release(self, continuation: Continuation) -> None:
        """Record `StoreLedgers.release`."""
        self._recorded(super().release, continuation=continuation)

    def attach_state(self, continuation: Continuation, state: object) -> None:
        """Record `StoreLedgers.attach_state`."""
        self._recorded(super().attach_state, continuation=continuation, state=state)

    def protect(self, continuation: Continuation, tokens: int, pool: str) -> None:
        """Record `StoreLedgers.protect`."""
        self._recorded(super().protect, continuation=continuation, tokens=tokens, pool=pool)

    def truncate_continuation(self, continuation: Continuation, tokens: int, pool: str) -> None:
        """Record `StoreLedgers.truncate_continuation`."""
        self._recorded(super().truncate_continuation, continuation=continuation, tokens=tokens, pool=pool)

    def begin_unit(self, name: str, batch: Batch, columns: Mapping[str, Columns]) -> tuple[Submission, PoolSlices]:
        """Record `StoreLedgers.begin_unit`."""
        return self._recorded(super().begin_unit, name=name, batch=batch, columns=columns)

    def commit_unit(self, unit: Submission, accepted: Mapping[str, Columns] | None = None) -> None:
        """Record `StoreLedgers.commit_unit`."""
        self._recorded(super().commit_unit, unit=unit, accepted=accepted)

    def fail_unit(self, unit: Submission) -> None:
        """Record `StoreLedgers.fail_unit`."""
        self._recorded(super().fail_unit, unit=unit)

    def begin_round(self, batch: Batch) -> list[Sequence]:
        """Record `StoreLedgers.begin_round`."""
        return self._recorded(super().begin_round, batch=batch)

    def ensure_mapped_to_tokens(self, sequence: Sequence, tokens: int, pool: str) -> PoolSlices:
        """Record `StoreLedgers.ensure_mapped_to_tokens`."""
        return self._recorded(super().ensure_mapped_to_tokens, sequence=sequence, tokens=tokens, pool=pool)

    def trim(self, batch: Batch, pool: str, provisional: Columns = 0) -> int:
        """Record `StoreLedgers.trim`."""
        return self._recorded(super().trim, batch=batch, pool=pool, provisional=provisional)

    def truncate(self, sequence: Sequence, tokens: int, pool: str) -> None:
        """Record `StoreLedgers.truncate`."""
        self._recorded(super().truncate, sequence=sequence, tokens=tokens, pool=pool)


RECORDED: SequenceOf[str] = tuple(
    name for name in vars(JournaledLedgers) if not name.startswith("_") and name in vars(StoreLedgers)
)
"""Operations that a journal may hold."""
