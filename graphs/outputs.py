"""Outputs: what a loop has sampled for each sequence, as columns over execution rows.

    handles       the sequence of each row, or None
    serials       (C,) int64: its serial, or 0
    last_tokens   (C,) int32: sampled, and not yet in the cache
    tokens_left   (C,) int32: tokens that the row may still sample
    reasons       (C,) int8: RUNNING, or why the row ended
    words         (C, K) int32: the caller's words of each row
    stops         the stop tokens of each row; stops_union are those of all rows together
    undelivered   tokens that the caller has not got yet, oldest first: (sequences, one token of each)

The columns are a value: a step makes new ones and replaces all of them with one assignment, so an interrupt finds the
outputs before the step or after it.  `handles` and `reasons` stay the same objects until a sequence comes, goes or
ends; whoever keeps something for one composition of rows compares them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

import pagedkv as pk

FinishReason = Literal["stop", "length"]
Int32 = npt.NDArray[np.int32]
Integer = TypeVar("Integer", bound=np.signedinteger[Any])
Sampled = tuple[tuple[pk.Sequence, ...], Int32]

RUNNING, STOP, LENGTH = range(3)
REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")
"""Finish reasons by their code in the column."""


class StepTokens(Mapping[pk.Sequence, list[int]]):
    """New tokens of each sequence that got any, in the order of the step; builds its lists when somebody asks.

    Attributes:
        ended: sequences of the step that have ended, each with its last tokens here or in an earlier answer.
    """

    __slots__ = ("_lists", "_order", "_parts", "ended")

    def __init__(
        self, parts: SequenceOf[Sampled], order: SequenceOf[pk.Sequence] = (), ended: tuple[pk.Sequence, ...] = ()
    ) -> None:
        self._parts = parts
        self.ended = ended
        self._order = order  # of all sequences, where that of the parts is another one
        self._lists: dict[pk.Sequence, list[int]] | None = None

    def __getitem__(self, sequence: pk.Sequence) -> list[int]:
        return self._by_sequence()[sequence]

    def __iter__(self) -> Iterator[pk.Sequence]:
        return iter(self._by_sequence())

    def __len__(self) -> int:
        return len(self._parts[0][0]) if len(self._parts) == 1 else len(self._by_sequence())

    def __repr__(self) -> str:
        return repr(self._by_sequence())

    @property
    def token_count(self) -> int:
        """New tokens of all sequences together."""
        return sum(len(sequences) for sequences, _ in self._parts)

    def _by_sequence(self) -> dict[pk.Sequence, list[int]]:
        lists = self._lists
        if lists is None:
            lists = {}
            for sequences, tokens in self._parts:
                for sequence, token in zip(sequences, tokens.tolist(), strict=True):
                    lists.setdefault(sequence, []).append(token)
            if self._order:
                lists = {sequence: lists[sequence] for sequence in self._order if sequence in lists}
            self._lists = lists
        return lists


class Outputs(NamedTuple):
    """The columns of one loop; every method returns others."""

    handles: tuple[pk.Sequence | None, ...]
    serials: npt.NDArray[np.int64]
    last_tokens: Int32
    tokens_left: Int32
    reasons: npt.NDArray[np.int8]
    words: Int32
    stops: tuple[frozenset[int], ...]
    stops_union: frozenset[int] = frozenset()
    undelivered: tuple[Sampled, ...] = ()

    def knows(self, sequence: object) -> bool:
        """Say whether the sequence has a row here."""
        return (
            type(sequence) is pk.Sequence and type(sequence.row) is int and 0 <= sequence.row < len(self.handles)
            and self.handles[sequence.row] == sequence
        )

    def with_sequence(
        self, sequence: pk.Sequence, last_token: int, tokens_left: int, *, is_new: bool, words: Int32,
        stops: frozenset[int],
    ) -> Outputs:
        """Return outputs with a sequence that may sample so many more tokens, in place of the one of its row.

        `is_new`: the last token has not been delivered yet, and may be one of its stops.
        """
        others, row = self.without(sequence), sequence.row
        all_words = others.words.copy()
        all_words[row] = words
        all_stops = (*others.stops[:row], stops, *others.stops[row + 1 :])
        reason = STOP if is_new and last_token in stops else RUNNING if tokens_left else LENGTH
        sampled = (((sequence,), np.array([last_token], np.int32)),) if is_new else ()
        return Outputs(
            (*others.handles[:row], sequence, *others.handles[row + 1 :]), _with(others.serials, row, sequence.serial),
            _with(others.last_tokens, row, last_token), _with(others.tokens_left, row, tokens_left),
            _with(others.reasons, row, reason), all_words, all_stops, frozenset().union(*all_stops),
            others.undelivered + sampled,
        )

    def without(self, sequence: pk.Sequence) -> Outputs:
        """Return outputs without the sequence of this one's row."""
        known = self.handles[sequence.row]
        if known is None:
            return self
        handles = (*self.handles[: sequence.row], None, *self.handles[sequence.row + 1 :])
        kept, _ = self._split({known})
        return self._replace(handles=handles, serials=_with(self.serials, sequence.row, 0), undelivered=kept)

    def with_reason(self, rows: npt.NDArray[np.int64], reason: int) -> Outputs:
        """Return outputs in which some rows have ended."""
        reasons = self.reasons.copy()
        reasons[rows] = reason
        return self._replace(reasons=reasons)

    def with_tokens(self, batch: pk.Batch, sampled: Int32, stops: frozenset[int]) -> Outputs:
        """Return outputs with one more token of each entry, sampled (B,); a stop token or the last one ends a row."""
        last_tokens, tokens_left = self.last_tokens.copy(), self.tokens_left.copy()
        last_tokens[batch.index] = sampled
        left = tokens_left[batch.index] - _ONE
        tokens_left[batch.index] = left
        outputs = Outputs(self.handles, self.serials, last_tokens, tokens_left, self.reasons, self.words, self.stops,
                          self.stops_union, (*self.undelivered, (batch.sequences, sampled)))
        is_last = left == _ZERO
        if b"\1" in is_last.tobytes():  # `any` takes 1 us
            outputs = outputs.with_reason(batch.rows[is_last], LENGTH)
        if self.stops_union:
            outputs = outputs.with_own_stops(batch.rows, sampled)
        return outputs.with_stops(batch.rows, sampled, stops) if stops else outputs

    def with_own_stops(self, rows: npt.NDArray[np.int64], sampled: Int32) -> Outputs:
        """Return outputs in which the rows that sampled a stop token of their own have ended with it."""
        is_known = np.isin(sampled, list(self.stops_union))
        if b"\1" not in is_known.tobytes():
            return self
        ended = [row for row, token in zip(rows[is_known].tolist(), sampled[is_known].tolist(), strict=True)
                 if token in self.stops[row]]
        return self.with_reason(np.array(ended, np.int64), STOP) if ended else self

    def with_stops(self, rows: npt.NDArray[np.int64], sampled: Int32, stops: frozenset[int]) -> Outputs:
        """Return outputs in which the rows that sampled a stop token have ended with it."""
        is_stop = np.isin(sampled, list(stops)) if len(stops) > 1 else sampled == next(iter(stops), -1)
        return self.with_reason(rows[is_stop], STOP) if b"\1" in is_stop.tobytes() else self

    def has_undelivered(self, sequences: tuple[pk.Sequence, ...]) -> bool:
        """Say whether one of these sequences has tokens that were not delivered."""
        return bool(self.undelivered) and not {*sequences}.isdisjoint(
            sequence for named, _ in self.undelivered for sequence in named
        )

    def delivered_to(
        self, sequences: tuple[pk.Sequence, ...], batch: pk.Batch | None
    ) -> tuple[StepTokens, Outputs]:
        """Return the undelivered tokens of sequences, and the outputs in which they are delivered.

        `batch`: those of them that the last step advanced.
        """
        codes = self.reasons.tobytes()
        if not self.undelivered:
            return StepTokens((), ended=tuple(one for one in sequences if codes[one.row] != RUNNING)), self
        ended: tuple[pk.Sequence, ...] = ()
        if b"\1" in codes or b"\2" in codes:
            ended = tuple(one for one in sequences if codes[one.row] != RUNNING)
        if len(self.undelivered) == 1 and batch is not None and self.undelivered[0][0] is batch.sequences:
            delivered = Outputs(self.handles, self.serials, self.last_tokens, self.tokens_left, self.reasons,
                                self.words, self.stops, self.stops_union)
            return StepTokens(self.undelivered, ended=ended), delivered
        kept, taken = self._split(set(sequences))
        return StepTokens(taken, sequences, ended), self._replace(undelivered=kept)

    def _split(self, sequences: set[pk.Sequence]) -> tuple[tuple[Sampled, ...], tuple[Sampled, ...]]:
        """Return the undelivered tokens of all other sequences, and of these."""
        parts: tuple[list[Sampled], list[Sampled]] = ([], [])
        for named, tokens in self.undelivered:
            is_taken = np.array([sequence in sequences for sequence in named], np.bool_)
            for part, mask in zip(parts, (~is_taken, is_taken), strict=True):
                if mask.any():
                    chosen = tuple(sequence for sequence, holds in zip(named, mask.tolist(), strict=True) if holds)
                    part.append((chosen, tokens[mask]))
        return tuple(parts[0]), tuple(parts[1])


def no_outputs(rows: int, words: int) -> Outputs:
    """Return the outputs of a loop that knows no sequence."""
    zeros = np.zeros(rows, np.int32)
    return Outputs((None,) * rows, np.zeros(rows, np.int64), zeros, zeros, np.zeros(rows, np.int8),
                   np.zeros((rows, words), np.int32), (frozenset(),) * rows)


_ZERO, _ONE = np.zeros((), np.int32), np.ones((), np.int32)


def _with(column: npt.NDArray[Integer], row: int, value: int) -> npt.NDArray[Integer]:
    changed = column.copy()
    changed[row] = value
    return changed
