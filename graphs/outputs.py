"""Outputs: what a loop has sampled for each sequence, as columns over execution rows.

    handles       the sequence of each row, or None
    serials       (C,) int64: its serial, or 0
    last_tokens   (C,) int32: sampled, and not yet in the cache
    tokens_left   (C,) int32: tokens that the row may still sample
    reasons       (C,) int8: RUNNING, or why the row ended
    told          (C,) int8: the reasons that the caller has been told
    words         (C, K) int32: the caller's words of the row
    stops         the own stop tokens of each row that has some
    starts        (C,) int32: position of the first token of its text, with a draft
    lengths       (C,) int32: tokens of its text, the last token included, with a draft
    undelivered   tokens that the caller has not got yet, oldest first

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

RUNNING, STOP, LENGTH = range(3)
REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")
"""Finish reasons by their code in the column."""

NO_STOPS: frozenset[int] = frozenset()


class Sampled(NamedTuple):
    """New tokens of some sequences: one of each, (b,), or the first counts[i] of row i of `tokens`, (b, W)."""

    sequences: tuple[pk.Sequence, ...]
    tokens: Int32
    counts: Int32 | None = None

    @property
    def token_count(self) -> int:
        """How many tokens."""
        return len(self.sequences) if self.counts is None else int(self.counts.sum())

    def of_each(self) -> Iterator[tuple[pk.Sequence, list[int]]]:
        """Iterate over every sequence with its tokens."""
        if self.counts is None:
            for sequence, token in zip(self.sequences, self.tokens.tolist(), strict=True):
                yield sequence, [token]
        else:
            for sequence, tokens, count in zip(self.sequences, self.tokens.tolist(), self.counts.tolist(), strict=True):
                yield sequence, tokens[:count]

    def split(self, sequences: set[pk.Sequence]) -> tuple[Sampled, Sampled]:
        """Return the tokens of all other sequences, and of these."""
        is_taken = np.array([sequence in sequences for sequence in self.sequences], np.bool_)
        kept, taken = (
            Sampled(tuple(one for one, holds in zip(self.sequences, mask.tolist(), strict=True) if holds),
                    self.tokens[mask], None if self.counts is None else self.counts[mask])
            for mask in (~is_taken, is_taken)
        )
        return kept, taken


class StepTokens(Mapping[pk.Sequence, list[int]]):
    """New tokens of each sequence that got any, in the order of the step; builds its lists when somebody asks.

    `ended`: the named sequences that have ended since the caller was told last, with or without new tokens.
    """

    __slots__ = ("_lists", "_order", "_parts", "ended")

    def __init__(
        self, parts: SequenceOf[Sampled], order: SequenceOf[pk.Sequence] = (), ended: tuple[pk.Sequence, ...] = ()
    ) -> None:
        self.ended = ended
        self._parts = parts
        self._order = order  # of all sequences, where that of the parts is another one
        self._lists: dict[pk.Sequence, list[int]] | None = None

    def __getitem__(self, sequence: pk.Sequence) -> list[int]:
        return self._by_sequence()[sequence]

    def __iter__(self) -> Iterator[pk.Sequence]:
        return iter(self._by_sequence())

    def __len__(self) -> int:
        return len(self._parts[0].sequences) if len(self._parts) == 1 else len(self._by_sequence())

    def __repr__(self) -> str:
        return repr(self._by_sequence())

    @property
    def token_count(self) -> int:
        """New tokens of all sequences together."""
        return sum(part.token_count for part in self._parts)

    def _by_sequence(self) -> dict[pk.Sequence, list[int]]:
        lists = self._lists
        if lists is None:
            lists = {}
            for part in self._parts:
                for sequence, tokens in part.of_each():
                    lists.setdefault(sequence, []).extend(tokens)
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
    told: npt.NDArray[np.int8]
    words: Int32
    stops: Mapping[int, frozenset[int]]
    starts: Int32
    lengths: Int32
    undelivered: tuple[Sampled, ...] = ()

    def knows(self, sequence: object) -> bool:
        """Say whether the sequence has a row here."""
        return (
            type(sequence) is pk.Sequence and type(sequence.row) is int and 0 <= sequence.row < len(self.handles)
            and self.handles[sequence.row] == sequence
        )

    def with_sequence(
        self, sequence: pk.Sequence, last_token: int, tokens_left: int, *, is_new: bool, words: Int32 | None = None,
        stops: frozenset[int] = NO_STOPS, text: tuple[int, int] = (0, 0),
    ) -> Outputs:
        """Return outputs with a sequence that may sample so many more tokens, in place of the one of its row.

        Args:
            is_new: the last token has not been delivered yet.
            words: (K,) int32; None is zeros.
            stops: its own stop tokens.
            text: start and length.
        """
        others, row = self.without(sequence), sequence.row
        reason = RUNNING if tokens_left else LENGTH
        if is_new and last_token in stops:
            reason = STOP
        own_stops = {other: tokens for other, tokens in others.stops.items() if other != row}
        if stops:
            own_stops[row] = stops
        undelivered = others.undelivered
        if is_new:
            undelivered = (*undelivered, Sampled((sequence,), np.array([last_token], np.int32)))
        return Outputs(
            (*others.handles[:row], sequence, *others.handles[row + 1 :]), _with(others.serials, row, sequence.serial),
            _with(others.last_tokens, row, last_token), _with(others.tokens_left, row, tokens_left),
            _with(others.reasons, row, reason), _with(others.told, row, RUNNING),
            _with(others.words, row, 0 if words is None else words),
            own_stops, _with(others.starts, row, text[0]),
            _with(others.lengths, row, text[1]), undelivered,
        )

    def without(self, sequence: pk.Sequence) -> Outputs:
        """Return outputs without the sequence of this one's row."""
        known = self.handles[sequence.row]
        if known is None:
            return self
        handles = (*self.handles[: sequence.row], None, *self.handles[sequence.row + 1 :])
        kept, _ = self._split({known})
        return self._replace(handles=handles, serials=_with(self.serials, sequence.row, 0), undelivered=kept,
                             told=_with(self.told, sequence.row, self.reasons.item(sequence.row)))

    def with_reason(self, rows: npt.NDArray[np.int64], reason: int) -> Outputs:
        """Return outputs in which some rows have ended."""
        reasons = self.reasons.copy()
        reasons[rows] = reason
        return self._replace(reasons=reasons)

    def with_tokens(self, batch: pk.Batch, sampled: Int32, stops: Stops) -> Outputs:
        """Return outputs with one more token of each entry, sampled (b,); a stop token or the last one ends a row."""
        last_tokens, tokens_left = self.last_tokens.copy(), self.tokens_left.copy()
        last_tokens[batch.index] = sampled
        left = tokens_left[batch.index] - _ONE
        tokens_left[batch.index] = left
        outputs = Outputs(
            self.handles, self.serials, last_tokens, tokens_left, self.reasons, self.told, self.words, self.stops,
            self.starts, self.lengths, (*self.undelivered, Sampled(batch.sequences, sampled)),
        )
        is_last = left == _ZERO
        if b"\1" in is_last.tobytes():  # `any` takes 1 us
            outputs = outputs.with_reason(batch.rows[is_last], LENGTH)
        return outputs.with_stops(batch.rows, sampled, stops) if stops.of_all else outputs

    def with_accepted(self, batch: pk.Batch, sampled: Int32, counts: Int32, stops: Stops) -> Outputs:
        """Return outputs with the first counts[i] of row i of sampled, (b, W); a stop token is the last of its row."""
        rows = batch.rows
        last_tokens, tokens_left, lengths = self.last_tokens.copy(), self.tokens_left.copy(), self.lengths.copy()
        last_tokens[rows] = last = sampled[np.arange(rows.size), counts - 1]
        tokens_left[rows] -= counts
        lengths[rows] += counts
        outputs = self._replace(last_tokens=last_tokens, tokens_left=tokens_left, lengths=lengths,
                                undelivered=(*self.undelivered, Sampled(batch.sequences, sampled, counts)))
        is_last = tokens_left[rows] == 0
        if is_last.any():
            outputs = outputs.with_reason(rows[is_last], LENGTH)
        return outputs.with_stops(rows, last, stops) if stops.of_all else outputs

    def with_stops(self, rows: npt.NDArray[np.int64], sampled: Int32, stops: Stops) -> Outputs:
        """Return outputs in which the rows that sampled a stop token, (b,), have ended with it."""
        is_stop = self.are_stops(rows, sampled, stops)
        return self.with_reason(rows[is_stop], STOP) if b"\1" in is_stop.tobytes() else self

    def are_stops(self, rows: npt.NDArray[np.int64], sampled: Int32, stops: Stops) -> npt.NDArray[np.bool_]:
        """Say which tokens of some rows, (b,) or (b, W), are stop tokens of the step or of their own row."""
        found = stops.of_all
        are = np.isin(sampled, list(found)) if len(found) > 1 else sampled == next(iter(found), -1)
        if found is not stops.of_step and b"\1" in are.tobytes():  # few rows: whose stop token is it?
            for at in np.argwhere(are):
                place = tuple(at.tolist())
                token = sampled[place].item()
                are[place] = token in stops.of_step or token in self.stops.get(rows.item(place[0]), NO_STOPS)
        return are

    def has_undelivered(self, sequences: tuple[pk.Sequence, ...]) -> bool:
        """Say whether one of these sequences has tokens that were not delivered."""
        return bool(self.undelivered) and not {*sequences}.isdisjoint(
            sequence for part in self.undelivered for sequence in part.sequences
        )

    def delivered_to(
        self, sequences: tuple[pk.Sequence, ...], batch: pk.Batch | None
    ) -> tuple[StepTokens, Outputs]:
        """Return the undelivered tokens of sequences, and the outputs in which they are delivered.

        `batch`: those of them that the last step advanced.
        """
        ended: tuple[pk.Sequence, ...] = ()
        told = self.told
        if told is not self.reasons:
            ended, told = self._ended(sequences)
        if len(self.undelivered) == 1 and batch is not None and self.undelivered[0].sequences is batch.sequences:
            delivered = Outputs(self.handles, self.serials, self.last_tokens, self.tokens_left, self.reasons, told,
                                self.words, self.stops, self.starts, self.lengths)
            return StepTokens(self.undelivered, (), ended), delivered
        kept, taken = self._split(set(sequences))
        return StepTokens(taken, sequences, ended), self._replace(undelivered=kept, told=told)

    def _ended(self, sequences: tuple[pk.Sequence, ...]) -> tuple[tuple[pk.Sequence, ...], npt.NDArray[np.int8]]:
        """Return those of some sequences that have ended and were not told, and the column in which they are."""
        is_new = (self.told != self.reasons).tolist()
        ended = tuple(one for one in sequences if is_new[one.row] and self.handles[one.row] == one)
        told = self.told.copy()
        told[[one.row for one in ended]] = self.reasons[[one.row for one in ended]]
        return ended, self.reasons if told.tobytes() == self.reasons.tobytes() else told

    def _split(self, sequences: set[pk.Sequence]) -> tuple[tuple[Sampled, ...], tuple[Sampled, ...]]:
        """Return the undelivered tokens of all other sequences, and of these."""
        pairs = [part.split(sequences) for part in self.undelivered]
        return (tuple(kept for kept, _ in pairs if kept.sequences),
                tuple(taken for _, taken in pairs if taken.sequences))


class Stops(NamedTuple):
    """Stop tokens of a step: of every row (`of_step`), and those with the own ones of all its rows (`of_all`)."""

    of_step: frozenset[int]
    of_all: frozenset[int]


def no_outputs(rows: int, words: int) -> Outputs:
    """Return the outputs of a loop that knows no sequence; `words` is K."""
    zeros, reasons = np.zeros(rows, np.int32), np.zeros(rows, np.int8)
    return Outputs((None,) * rows, np.zeros(rows, np.int64), zeros, zeros, reasons, reasons,
                   np.zeros((rows, words), np.int32), {}, zeros, zeros)


_ZERO, _ONE = np.zeros((), np.int32), np.ones((), np.int32)


def _with(column: npt.NDArray[Integer], row: int, value: int | npt.NDArray[Integer]) -> npt.NDArray[Integer]:
    changed = column.copy()
    changed[row] = value
    return changed
