"""Sampling: words of a request, and tokens that depend on the row alone.  (C14.6, C15.1)"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import pagedkv as pk
from pagedkv.graphs import NO_TOKEN, SAMPLING_WORDS, Sampling, choose_tokens

Int32 = npt.NDArray[np.int32]


class Other(np.ndarray[Any, Any]):
    """An array that is not NumPy's own: all rows at once, as on a GPU."""


def chosen(
    logits: npt.NDArray[np.float32], samplings: list[Sampling | None], positions: Any, *, at_once: bool = False
) -> list[int]:
    """Return the token of each row."""
    greedy = (0,) * SAMPLING_WORDS
    words = np.array([(*(sampling.words if sampling else greedy), 77) for sampling in samplings], np.int32)
    choice = np.full(len(words), -9, np.int32)
    choose_tokens(logits.view(Other) if at_once else logits, words,
                  np.broadcast_to(np.array(positions, np.int32), choice.shape), choice)
    return list(choice.tolist())


def counts_of(logits: list[float], sampling: Sampling, draws: int = 4000) -> npt.NDArray[np.int64]:
    """Return how often each token is chosen at so many positions."""
    rows = np.broadcast_to(np.array(logits, np.float32), (draws, len(logits)))
    return np.bincount(chosen(rows, [sampling] * draws, range(draws), at_once=True), minlength=len(logits))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("top_p", [0.3, 0.8, 1.0])
def test_tokens_have_their_shares(temperature: float, top_p: float) -> None:
    """The softmax of the divided logits, cut to the likeliest that reach top_p: float64 says how many."""
    logits = [2.0, -1.0, 1.0, 1.5, -np.inf, 0.0, 1.5]
    shares = np.exp(np.array(logits) / temperature)
    shares /= shares.sum()
    order = np.sort(shares)[::-1]
    shares[shares < order[int(np.argmax(np.cumsum(order) >= top_p - 1e-6))] - 1e-12] = 0
    shares /= shares.sum()

    counts = counts_of(logits, Sampling(temperature, top_p, seed=11))

    assert not counts[shares == 0].any()
    assert np.all(np.abs(counts / 4000 - shares) < 0.035)


def test_a_row_depends_on_nothing_else() -> None:
    """C14.6: alone, in a batch of any size, at any place and beside rows of other words, it chooses the same token."""
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((16, 1003), np.float32) * 3
    samplings = [Sampling(0.2 + 0.1 * row, 0.5 + 0.03 * row, seed=row) if row % 3 else None for row in range(16)]
    together = chosen(logits, samplings, range(100, 116))

    assert together == [chosen(logits[row : row + 1], samplings[row : row + 1], [100 + row])[0] for row in range(16)]
    assert together == chosen(logits[::-1].copy(), samplings[::-1], range(115, 99, -1))[::-1]
    assert together == chosen(logits, samplings, range(100, 116), at_once=True)


def test_seed_and_position_choose_the_random_number() -> None:
    """Neighbours of either are independent: about 1 of 64 equal tokens agree by chance."""
    logits = np.zeros((2000, 64), np.float32)
    first = chosen(logits, [Sampling(seed=3)] * 2000, range(2000), at_once=True)

    assert first == chosen(logits, [Sampling(seed=3)] * 2000, range(2000), at_once=True)
    for other in (chosen(logits, [Sampling(seed=4)] * 2000, range(2000), at_once=True),
                  chosen(logits, [Sampling(seed=3)] * 2000, range(1, 2001), at_once=True)):
        assert 10 < np.equal(first, other).sum() < 60


def test_greedy_rows_and_logits_that_are_not_finite() -> None:
    """Temperature 0 is greedy; the coldest and the smallest top_p leave the largest; no token without a finite one."""
    logits = np.array([[1, 5, 5, 2]] * 4 + [[np.nan, 1, 2, 3], [np.inf, 1, 2, 3], [-np.inf] * 4], np.float32)
    logits[1:4, 2] = 4
    rest: list[Sampling | None] = [Sampling(), Sampling(), Sampling()]
    samplings = [None, Sampling(0, 0.5, seed=9), Sampling(1e-30, seed=9), Sampling(5, 1e-6, seed=9), *rest]

    assert chosen(logits, samplings, 3) == [1, 1, 1, 1, NO_TOKEN, NO_TOKEN, NO_TOKEN]


def test_words_hold_the_numbers() -> None:
    """C15.1: seed, and the bits of two float32."""
    assert Sampling(1.0, 0.5, seed=2**31 - 1).words == (2**31 - 1, 0x3F800000, 0x3F000000)
    assert Sampling(temperature=0, seed=0).words[1] == 0


@pytest.mark.parametrize("wrong", [
    {"temperature": -1.0}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"temperature": 1e-39},
    {"temperature": 1e39}, {"temperature": "1"}, {"temperature": True}, {"top_p": 0.0}, {"top_p": 1.01},
    {"top_p": None}, {"top_p": float("nan")}, {"top_p": 1e-46}, {"seed": -1}, {"seed": 2**31}, {"seed": 1.0},
    {"seed": True},
])
def test_numbers_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    """C15.1: the message names the field; none is clamped."""
    with pytest.raises(pk.MisuseError, match=f"^{next(iter(wrong))} was refused.*C15.1"):
        Sampling(**wrong)
