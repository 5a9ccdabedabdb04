"""Drafts: who proposes tokens that a verify unit checks, from the text of each row alone.  (C13, C14.6)

    text of a row      7 4 9 2 7 4          the last token is sampled and not yet in the cache
    proposal, K = 3            9 2 7        "7 4" occurred before; what followed it may follow again
    verify unit, W = 4     4 9 2 7          the model samples behind each column: 9 2 5 .
    accepted               4 9 2            the columns whose token the model would have sampled, and the last token

A draft never changes the text: it only decides how many tokens a step yields.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

import pagedkv as pk

Int32 = npt.NDArray[np.int32]

NO_PROPOSAL = -1

NGRAM_MAX = 16


class Draft(Protocol):
    """The caller's draft."""

    def propose(self, texts: Int32, lengths: Int32, most: Int32) -> Int32:
        """Propose the tokens that follow the text of each row.

        Args:
            texts: (b, T) int32: row i is `texts[i, :lengths[i]]`; what lies behind is undefined.
            lengths: (b,) int32, at least 1.
            most: (b,) int32, 0 to `draft_tokens`: most tokens of each proposal.  All three are read-only.

        Returns:
            (b, K) int32, K to `draft_tokens`: the proposal of each row, then -1 in the rest.  What exceeds `most` is
            not used.
        """
        ...


class PromptLookup:
    """Proposes what followed the last occurrence of a row's last tokens in its own text.

    It needs no model, and helps where output repeats its prompt or itself: summaries, code, extraction.

    Args:
        ngram_max, ngram_min: most and fewest last tokens that are looked up; the longest ones that occur count.

    Raises:
        MisuseError: a number out of range.
    """

    def __init__(self, *, ngram_max: int = 3, ngram_min: int = 1) -> None:
        remedy = "pass 1 <= ngram_min <= ngram_max"
        self.ngram_max = pk.checks.checked_integer("ngram_max", ngram_max, 1, NGRAM_MAX, remedy=remedy, clause="C13.1")
        self.ngram_min = pk.checks.checked_integer("ngram_min", ngram_min, 1, ngram_max, remedy=remedy, clause="C13.1")

    def propose(self, texts: Int32, lengths: Int32, most: Int32) -> Int32:
        """Return the proposals of all rows; see `Draft`.  Work grows with b * T."""
        rows, tokens = texts.shape
        width = int(most.max())
        proposals = np.full((rows, width), NO_PROPOSAL, np.int32)
        is_open = most > 0
        every, columns = np.arange(rows), np.arange(width)
        for ngram in range(min(self.ngram_max, int(lengths.max()) - 1), self.ngram_min - 1, -1):
            if not is_open.any():
                break
            ends = np.arange(ngram, tokens)  # of an earlier occurrence: the position of the token behind it
            is_match = (ends < lengths[:, None]) & is_open[:, None] & (lengths > ngram)[:, None]
            for back in range(1, ngram + 1):
                wanted = texts[every, np.maximum(lengths - back, 0)]
                is_match &= texts[:, ngram - back : tokens - back] == wanted[:, None]
            found = np.flatnonzero(is_match.any(axis=1))
            if not found.size:
                continue
            behind = tokens - 1 - is_match[found, ::-1].argmax(axis=1)
            at = behind[:, None] + columns
            is_text = (at < lengths[found, None]) & (columns < most[found, None])
            proposals[found] = np.where(is_text, texts[found[:, None], np.minimum(at, tokens - 1)], NO_PROPOSAL)
            is_open[found] = False
        return proposals


class Texts:
    """The text of each row, for a draft; what lies behind a length may be overwritten at any time.

    Attributes:
        tokens: (C, S + 1) int32.
    """

    def __init__(self, rows: int, max_context: int) -> None:
        self.tokens: Int32 = np.zeros((rows, max_context + 1), np.int32)

    def write(self, row: int, first: int, tokens: Int32) -> None:
        """Write tokens of one row from index `first` on."""
        self.tokens[row, first : first + tokens.size] = tokens

    def append(self, rows: npt.NDArray[np.int64], lengths: Int32, sampled: Int32, counts: Int32) -> None:
        """Write the first counts[i] of row i of sampled, (b, W), behind lengths[i] tokens of the text of rows[i]."""
        columns = np.arange(sampled.shape[1])
        entries, columns = np.nonzero(columns < counts[:, None])
        self.tokens[rows[entries], lengths[entries] + columns] = sampled[entries, columns]

    def of(self, batch: pk.Batch, lengths: Int32, last_tokens: Int32) -> Int32:
        """Return the texts of a batch, (b, T) int32, read-only; `last_tokens` (b,) end them."""
        self.tokens[batch.rows, lengths - 1] = last_tokens  # a prompt that failed may have overwritten them
        texts: Int32 = self.tokens[batch.index, : int(lengths.max())]
        texts.flags.writeable = False
        return texts
