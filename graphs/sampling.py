"""Sampling: the next token of each row, greedy or by temperature and top-p from a seed of the row.  (C14.6, C15.1)

    first three of the caller's words of a row   [ seed | temperature | top_p ]   the last two as float32 bits

A temperature of 0 is greedy, so a row without words is greedy.  The functions here run in a captured unit, on NumPy and
on CuPy: they read the words on the device, so requests with other seeds share one graph.

A row's token depends on its own logits, words and position alone, on no other row and on no shape.  The random number
is a hash of (seed, position), so a draft that is verified later, or a text that is decoded alone, meets the same one.
The weights of the tokens are integers, so that their sums are exact and have no order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import pagedkv as pk

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]

NO_TOKEN = -1
"""What a row without a choice gets, because no column asks for one or because its logits are not finite."""

SAMPLING_WORDS = 3
"""Caller's words that `Sampling.words` takes: give a StoreConfig at least so many `caller_words`."""

WEIGHT_BITS = 30
"""The likeliest token weighs 2^30, and one less likely by more than that factor weighs 0 and is never chosen.

262,144 tokens together weigh at most 2^48, which float64 and int64 hold exactly."""

TEMPERATURE_MAX = float(np.finfo(np.float32).max)
TEMPERATURE_MIN = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one request are chosen.

    Args:
        temperature: 0 for greedy, else a divisor of the logits that float32 holds as a normal number.
        top_p: only the likeliest tokens are chosen that together have at least this share, above 0 and at most 1;
            tokens as likely as the last of them are among them.
        seed: 0 to 2^31 - 1.

    Raises:
        MisuseError: a value outside its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        remedy = "pass finite numbers: temperature=0.7, top_p=0.9, seed=1"
        for name, low, high in (("temperature", TEMPERATURE_MIN, TEMPERATURE_MAX), ("top_p", TEMPERATURE_MIN, 1.0)):
            value = pk.checks.checked_number(name, getattr(self, name), high, remedy=remedy, clause="C15.1")
            if value < low and not (name == "temperature" and value == 0):
                least = "0, or " if name == "temperature" else ""
                raise pk.MisuseError(name, expected=f"{least}{low:.3g} to {high:.3g}", got=pk.checks.shown(value),
                                     remedy=remedy, clause="C15.1")
            object.__setattr__(self, name, value)
        pk.checks.checked_integer("seed", self.seed, 0, (1 << 31) - 1, remedy=remedy, clause="C15.1")

    @property
    def words(self) -> tuple[int, int, int]:
        """The first three words of a row: seed, and the float32 bits of temperature and top_p, each an int32."""
        temperature, top_p = np.array([self.temperature, self.top_p], np.float32).view(np.int32).tolist()
        return self.seed, temperature, top_p


def choose_largest(logits: Float32Array, choice: Int32Array) -> None:
    """Write the id of each row's largest logit; the lowest id where several are equal.

    NO_TOKEN where the largest is not finite (a NaN counts as largest): the loop refuses it, on every device.
    """
    choice[...] = np.where(np.isfinite(np.max(logits, axis=1)), np.argmax(logits, axis=1), NO_TOKEN)


def choose_tokens(logits: Float32Array, words: Int32Array, positions: Int32Array, choice: Int32Array) -> None:
    """Write a token for each row: its largest logit at temperature 0, else one by temperature, top-p and seed.

    Args:
        logits: (R, V) float32, finite or -inf.
        words: (R, K) int32, K >= 3, those of `Sampling.words` first.
        positions: (R,) int32, the position that the chosen token will have.
        choice: (R,) int32, written; NO_TOKEN where the largest logit is not finite.
    """
    choose_largest(logits, choice)
    is_warm = words[:, 1].view(np.float32) > 0
    if type(logits) is not np.ndarray:  # a captured function reads no value back: all rows at once
        choice[...] = np.where(is_warm & (choice != NO_TOKEN), _sampled(logits, words, positions), choice)
        return
    for row in np.flatnonzero(is_warm & (choice != NO_TOKEN)).tolist():  # one row fits into a core's cache
        one = slice(row, row + 1)
        choice[one] = _sampled(logits[one], words[one], positions[one])


def _sampled(logits: Any, words: Any, positions: Any) -> Any:
    """Return a token of each row by the inverse of its cumulated weights, in the order of the ids."""
    temperatures, top_p = (words[:, word].view(np.float32)[:, None] for word in (1, 2))
    divisors = np.where(temperatures > 0, temperatures, np.float32(1.0))  # a greedy row's token is not used
    with np.errstate(over="ignore", invalid="ignore"):  # a quotient may be -inf: weight 0; nor is that of a NaN used
        shares = np.exp((logits - np.max(logits, axis=1, keepdims=True)) / divisors)
        weights = np.floor(shares * np.float32(1 << WEIGHT_BITS)).astype(np.float64)
    total = np.sum(weights, axis=1, keepdims=True)
    share = np.maximum(np.ceil(total * top_p), 1.0)
    least = np.zeros_like(total)  # the largest weight at which all tokens from it upwards have the share, bit by bit
    for bit in range(WEIGHT_BITS, -1, -1):
        higher = least + float(1 << bit)
        heavier = np.sum(np.where(weights >= higher, weights, 0.0), axis=1, keepdims=True)
        least = np.where(heavier >= share, higher, least)
    cumulated = np.cumsum(np.where(weights >= least, weights, 0.0), axis=1)
    drawn = np.floor(_uniform(words[:, 0], positions)[:, None] * cumulated[:, -1:])
    return np.sum(cumulated <= drawn, axis=1).astype(np.int32)


def _uniform(seeds: Any, positions: Any) -> Any:
    """Return a number of [0, 1) for each (seed, position): 53 bits of SplitMix64 (Steele, Lea, Flood 2014)."""
    state = (seeds.astype(np.uint64) << np.uint64(32)) | positions.astype(np.uint64)
    for _ in range(2):  # twice: neighbouring seeds and positions differ in few bits
        state = state + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
