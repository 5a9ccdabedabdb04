"""The words of a journal: arguments and answers of ledger operations as JSON, and JSON as arguments again.

    value of a caller       in JSON
    None, bool, int, str    the same value
    Sequence                {"sequence": [row, serial]}        plus the store's id, if the handle is of another store
    Continuation            {"continuation": [number]}         plus the store's id, likewise
    Batch                   {"batch": [[row, serial], ...]}    plus the store's id, likewise; in its first line
                            {"batch": revision}                of that line, while it is one of the last `BATCHES_MAX`
    Submission              {"unit": number}                   null if the unit is not in flight
    Transaction             {"transaction": revision}          of the line that prepared it; null if it has ended;
    Demotion                                                   likewise
    ActivationTarget        {"target": {...}}
    pool -> columns         {"columns": {...}}                 each count a number, a list, or an array with its dtype
    the caller's state      {"state": true}                    false if None was passed, "follows" if STATE_FOLLOWS was
    anything else           {"opaque": repr}                   the operation refuses it, recorded or repeated

The recorder has one `JournalWords` and the replay another; each remembers which revision prepared which transaction,
and which named which batch.  Both describe answers with `outcome`, so the replay compares like with like.

Token counts of all rows of a unit are one number, `zlib.crc32` over their int32 bytes, pool after pool: a line has the
same size whatever the number of rows, and a replay finds the first operation after which a row differs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any
from zlib import crc32

import numpy as np

from pagedkv.errors import PagedKVError, shown
from pagedkv.ledger.batch import Batch
from pagedkv.ledger.continuations import STATE_FOLLOWS, Continuation
from pagedkv.ledger.demotions import Demotion
from pagedkv.ledger.ledger import Ledger, PoolSlices
from pagedkv.ledger.sequences import Sequence
from pagedkv.ledger.transaction import ActivationTarget, HostCopy, Refusal, TailCopy, Transaction
from pagedkv.ledger.units import Submission

Words = dict[str, Any]

COLUMNS = frozenset({"columns", "accepted", "provisional"})
"""Arguments that hold counts of columns, for which an array of integers is as good as a list."""


INT_MAX = 1 << 62
"""A larger int is written as opaque: `json` raises at one of 5,000 digits, and the journal would end there."""


BATCHES_MAX = 16
"""Batches that a later line may name by number; the oldest is forgotten first."""


INTEGER_DTYPE = re.compile("[<>|=]?[iub][1248]")


class Opaque:
    """An argument that no operation accepts; only its repr is known."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


class JournalWords:
    """Translates for one ledger.

    Attributes:
        transactions: those that are neither committed nor aborted, demotions too, by the revision that prepared them.
        batches: the last ones, by the revision of the line that named them first.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.transactions: dict[int, Transaction | Demotion] = {}
        self.batches: dict[int, Batch] = {}
        self._new_batch: Batch | None = None

    @property
    def store_id(self) -> int:
        """The id of the ledger's store; handles with this id are written without it."""
        return self.ledger.sequences.store_id

    # ---- arguments --------------------------------------------------------------------------------

    def arguments(self, values: Mapping[str, object]) -> Words:
        """Return the arguments of an operation as JSON, by name; call it before the operation ends any handle."""
        self._new_batch = None
        return {name: self._argument(name, value) for name, value in values.items()}

    def arguments_from(self, words: Words) -> Words:
        """Return arguments that an operation accepts or refuses like the recorded ones."""
        self._new_batch = None
        return {name: self._value(value) for name, value in words.items()}

    def name_batch(self, revision: int) -> None:
        """Let `revision`, whose line is complete, name the first batch that its arguments hold in full."""
        if self._new_batch is None:
            return
        self.batches[revision], self._new_batch = self._new_batch, None
        if len(self.batches) > BATCHES_MAX:
            del self.batches[next(iter(self.batches))]

    def _argument(self, name: str, value: object) -> object:
        if name == "state":
            return {"state": "follows" if value is STATE_FOLLOWS else value is not None}
        if name == "state_frontier" and isinstance(value, Mapping):
            return _columns(value)
        if name in COLUMNS and value is not None:
            return _columns(value)
        if value is None or isinstance(value, str) or _is_plain(value):
            return value
        return self._handle(value)

    def _handle(self, value: object) -> Words:
        if isinstance(value, Sequence):
            return {"sequence": self._numbers(value.store_id, value.row, value.serial)}
        if isinstance(value, Continuation):
            return {"continuation": self._numbers(value.store_id, value.number)}
        if isinstance(value, Batch):
            for revision, known in self.batches.items():
                if known is value:
                    return {"batch": revision}
            if self._new_batch is None:
                self._new_batch = value
            return {"batch": [self._numbers(entry.store_id, entry.row, entry.serial) for entry in value.sequences]}
        if isinstance(value, Submission):
            return {"unit": value.number if value in self.ledger.units.in_flight else None}
        if isinstance(value, Transaction | Demotion):
            revisions = [revision for revision, known in self.transactions.items() if known is value]
            return {"transaction": revisions[0] if revisions else None}
        if isinstance(value, ActivationTarget):
            words = {field.name: getattr(value, field.name) for field in fields(value)}
            frontier = value.frontier
            words["frontier"] = (_columns(frontier) if isinstance(frontier, Mapping)
                                 else max(-INT_MAX, min(frontier, INT_MAX)) if type(frontier) is int
                                 else None if frontier is None else {"opaque": shown(frontier)})
            words["source"] = None if value.source is None else self._handle(value.source)
            return {"target": words}
        return {"opaque": shown(value)}

    def _numbers(self, store_id: int, *numbers: int) -> list[int]:
        if any(type(number) is not int or not _is_plain(number) for number in (store_id, *numbers)):
            return [0 for _ in numbers]  # a forged handle; no store makes one of zeros, so a replay refuses it too
        return [*numbers] if store_id == self.store_id else [*numbers, store_id]

    def _value(self, words: object) -> object:
        if not isinstance(words, dict):
            return words
        ((kind, value),) = words.items()
        match kind:
            case "state":
                return STATE_FOLLOWS if value == "follows" else True if value else None
            case "columns":
                return {pool: _counts_from(counts) for pool, counts in value.items()}
            case "counts":
                return _counts_from(value)
            case "sequence":
                return self._sequence_from(value)
            case "continuation":
                return Continuation(value[1] if len(value) > 1 else self.store_id, value[0])
            case "batch":
                if type(value) is int:
                    return self.batches[value]
                batch = self._batch_from([self._sequence_from(entry) for entry in value])
                if self._new_batch is None:
                    self._new_batch = batch
                return batch
            case "unit":
                return self._unit_from(value)
            case "transaction":
                return Opaque("a transaction that has ended") if value is None else self.transactions[value]
            case "target":
                parts: Words = {name: self._value(part) for name, part in value.items()}
                return ActivationTarget(**parts)
            case "opaque":
                return Opaque(value)
        raise ValueError(f"{kind!r} is no kind of argument")

    def _sequence_from(self, numbers: list[int]) -> Sequence:
        row, serial = numbers[:2]
        return Sequence(numbers[2] if len(numbers) > 2 else self.store_id, row, serial)

    def _batch_from(self, sequences: list[Sequence]) -> Batch:
        """Return a batch whose handles the operation itself checks, as it did when it was recorded."""
        rows = np.array([sequence.row for sequence in sequences], np.int64)
        known = {row for row in rows.tolist() if 0 <= row < self.ledger.config.max_concurrency}
        serials = np.array([sequence.serial for sequence in sequences], np.int64)
        return Batch(tuple(sequences), rows, serials, rows, sum(1 << row for row in known), stamp=-1)

    def _unit_from(self, number: int | None) -> Submission:
        if number is None:
            return Submission(0, "ended", self._batch_from([]), {}, {}, is_open=False)
        for unit in self.ledger.units.in_flight:
            if unit.number == number:
                return unit
        raise ValueError(f"no unit {number} is in flight")

    # ---- answers ----------------------------------------------------------------------------------

    def outcome(self, revision: int, arguments: Mapping[str, object], answer: object) -> Words:
        """Return {"answer": ...} for the answer of an operation, or {"refused": ...} for a Refusal.

        If the answer is a transaction, `revision` names it from now on.  If the answer is None, the frontiers of the
        handles in `arguments` take its place.
        """
        if isinstance(answer, Refusal):
            return {"refused": asdict(answer)}
        if isinstance(answer, Transaction | Demotion):
            self.transactions[revision] = answer
        ended = arguments.get("transaction", arguments.get("demotion"))
        for key in [key for key, known in self.transactions.items() if known is ended]:
            del self.transactions[key]
        return {"answer": self._frontiers_moved(arguments) if answer is None else self._answer(answer)}

    def state(self) -> dict[str, list[int]]:
        """Return (allocated, reserved, available) pages of every pool.  (C6.2)"""
        words = {}
        for name, spaces in self.ledger.active.items():
            words[name] = [spaces.pool.allocated, spaces.pool.reserved, spaces.pool.available]
        return words

    def _answer(self, answer: object) -> object:
        if isinstance(answer, bool | int):
            return answer
        if isinstance(answer, Sequence):
            return {"row": answer.row, "serial": answer.serial, "frontiers": self._row_frontiers(answer.row),
                    "pages": {name: spaces.mapped_ids(answer.row).tolist()
                              for name, spaces in self.ledger.active.items()}}
        if isinstance(answer, Continuation):
            spaces = {name: (kept.by_number[answer.number], kept.pages) for name, kept in self.ledger.kept.items()}
            return {"continuation": answer.number,
                    "frontiers": {name: space.frontier for name, (space, _) in spaces.items()},
                    "state_frontier": self._state_frontier(answer),
                    "pages": {name: pages.device[space.members].tolist() for name, (space, pages) in spaces.items()}}
        if isinstance(answer, Transaction):
            return {"row": answer.row, "pools": [plan._asdict() for plan in answer.plans],
                    "copies": _copies(answer.copies), "backups": _host_copies(answer.backups),
                    "restores": _host_copies(answer.restores),
                    "tables": {name: page_ids.tolist() for name, page_ids in answer.tables.items()}}
        if isinstance(answer, Demotion):
            return {"copies": _host_copies(answer.copies), "pages": answer.page_count}
        if isinstance(answer, list):
            return {"short": [[sequence.row, sequence.serial] for sequence in answer]}
        if isinstance(answer, tuple):
            unit, slices = answer
            words = {"unit": unit.number, "first_positions": self.first_positions(unit)}
            return {**words, "slices": self.slices(slices)} if slices else words
        assert isinstance(answer, dict), f"no words for {answer!r}"
        return {"slices": self.slices(answer)}

    def _frontiers_moved(self, arguments: Mapping[str, object]) -> object:
        """Return the frontiers of the first handle in the arguments, or None if they hold no handle."""
        for value in arguments.values():
            if isinstance(value, Submission):
                return {"frontiers": self.frontiers(value)}
            if isinstance(value, Sequence):
                return {"frontiers": self._row_frontiers(value.row)}
            if isinstance(value, Continuation) and value.number in self.ledger.continuations.states:
                spaces = {name: kept.by_number[value.number] for name, kept in self.ledger.kept.items()}
                return {"frontiers": {name: space.frontier for name, space in spaces.items()},
                        "protected": {name: space.protected_frontier for name, space in spaces.items()},
                        "state_frontier": self._state_frontier(value)}
        return None

    def _state_frontier(self, continuation: Continuation) -> dict[str, int]:
        return dict(self.ledger.continuations.states[continuation.number].state_frontier)

    def _row_frontiers(self, row: int) -> dict[str, int]:
        return {name: int(spaces.committed_end[row]) for name, spaces in self.ledger.active.items()}

    def first_positions(self, unit: Submission) -> int:
        """Return one number for the first positions of a unit, in batch order in every pool that it writes."""
        total = 0
        for first in unit.first_positions.values():
            total = crc32(first, total)  # type: ignore[arg-type]  # an array is a buffer
        return total

    def frontiers(self, unit: Submission) -> int:
        """Return one number for the committed frontiers of a unit's rows, in batch order in every pool."""
        total, index = 0, unit.batch.index
        for spaces in self.ledger.active.values():
            total = crc32(spaces.committed_end[index], total)  # type: ignore[arg-type]
        return total

    def slices(self, slices: PoolSlices) -> int:
        """Return one number for the new slices of every pool, and for the ids that were bound for them."""
        total = 0
        for name, (rows, first_blocks, block_counts, _) in slices.items():
            spaces = self.ledger.active[name]
            total = crc32(block_counts, crc32(first_blocks, crc32(rows, total)))  # type: ignore[arg-type]
            for row, first, count in spaces.new_windows:
                total = crc32(spaces.table[row, first : first + count], total)  # type: ignore[arg-type]
        return total


def refusal_words(error: BaseException) -> Words:
    """Return {"refused": ...} for the error of an operation: its class, and the clause that it cites."""
    clause = error.clause if isinstance(error, PagedKVError) else ""
    return {"refused": {"error": type(error).__name__, "clause": clause}}


def _copies(copies: tuple[TailCopy, ...]) -> list[list[object]]:
    return [[copy.pool, copy.source_page, copy.destination_page, copy.columns] for copy in copies]


def _host_copies(copies: tuple[HostCopy, ...]) -> list[list[object]]:
    return [[copy.pool, copy.page_ids.tolist(), copy.places.tolist(), copy.columns.tolist()] for copy in copies]


def _is_plain(value: object) -> bool:
    """Say whether a value is a bool, or an int that a journal holds as a number."""
    return type(value) is bool or (type(value) is int and -INT_MAX <= value <= INT_MAX)


def _columns(value: object) -> Words:
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {"columns": {key: _counts(counts) for key, counts in value.items()}}
        return {"opaque": shown(value)}
    return {"counts": _counts(value)}


def _counts(value: object) -> object:
    """Return counts as JSON if NumPy can make an integer array of them, else as opaque."""
    if _is_plain(value):
        return value
    if isinstance(value, list | tuple):
        return [_counts(part) for part in value]
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "iub":
        return {"array": value.tolist(), "dtype": value.dtype.str}
    return {"opaque": shown(value)}


def _counts_from(words: object) -> object:
    if isinstance(words, list):
        return [_counts_from(part) for part in words]
    if isinstance(words, dict):
        if "opaque" in words:
            return Opaque(words["opaque"])
        if not INTEGER_DTYPE.fullmatch(words["dtype"]):  # another one could take any amount of memory
            raise ValueError(f"{words['dtype']!r} is no dtype of counts")
        return np.array(words["array"], np.dtype(words["dtype"]))
    return words
