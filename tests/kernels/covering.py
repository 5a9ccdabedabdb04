"""Pairwise coverings: few cases in which every two values of different axes meet at least once.

    axes       name -> values                     a case takes one value of each
    is_legal   two (axis, value) choices -> bool  pairs that no case may hold; every value needs a legal partner

A full product of this folder's axes has half a million cases; most mistakes in a kernel need two things to meet (a
codec and a head size, a width and a context), and a covering of some three hundred cases holds all such meetings.

The generator is greedy: each case starts from a pair that is still missing, then each axis in random order takes the
value that brings the most missing pairs; the best of a few such cases is kept.  Same seed, same cases.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Mapping, Sequence

Choice = tuple[str, Hashable]
Case = dict[str, Hashable]
Pair = frozenset[Choice]

CANDIDATES = 3
"""Cases tried for each that is kept: twelve find a covering no smaller by one case in a hundred, in twice the time."""


def legal_pairs(axes: Mapping[str, Sequence[Hashable]], is_legal: Callable[[Choice, Choice], bool]) -> set[Pair]:
    """Return every two choices of different axes that may meet."""
    return {
        frozenset(((first, a), (second, b)))
        for first, second in itertools.combinations(axes, 2)
        for a, b in itertools.product(axes[first], axes[second])
        if is_legal((first, a), (second, b))
    }


def pairs_of(case: Mapping[str, Hashable]) -> set[Pair]:
    """Return every two choices of one case."""
    return {frozenset(pair) for pair in itertools.combinations(case.items(), 2)}


def pairwise_covering(
    axes: Mapping[str, Sequence[Hashable]], is_legal: Callable[[Choice, Choice], bool], *, seed: int
) -> list[Case]:
    """Return cases that together hold every legal pair, and no illegal one."""
    draw = random.Random(seed)
    missing: dict[Pair, None] = dict.fromkeys(sorted(legal_pairs(axes, is_legal), key=_text_of))  # an ordered set
    draw_order = list(missing)
    draw.shuffle(draw_order)
    cases: list[Case] = []
    while missing:
        while draw_order[-1] not in missing:
            draw_order.pop()
        candidates = [case for _ in range(CANDIDATES) if (case := _grow(axes, is_legal, draw_order[-1], missing, draw))]
        assert candidates, f"no legal case holds {sorted(draw_order[-1], key=str)}"
        best = max(candidates, key=lambda case: sum(pair in missing for pair in pairs_of(case)))
        for pair in pairs_of(best):
            missing.pop(pair, None)
        cases.append({axis: best[axis] for axis in axes})
    return cases


def _grow(
    axes: Mapping[str, Sequence[Hashable]], is_legal: Callable[[Choice, Choice], bool], start: Pair,
    missing: Mapping[Pair, None], draw: random.Random,
) -> Case | None:
    """Complete a pair to a case; None when the choices made leave an axis without a legal value."""
    case = dict(sorted(start, key=str))
    rest = [axis for axis in axes if axis not in case]
    draw.shuffle(rest)
    for axis in rest:
        legal = [value for value in axes[axis] if all(is_legal((axis, value), taken) for taken in case.items())]
        if not legal:
            return None
        draw.shuffle(legal)
        case[axis] = max(
            legal, key=lambda value: sum(frozenset(((axis, value), taken)) in missing for taken in case.items())
        )
    return case


def _text_of(pair: Pair) -> str:
    return str(sorted(map(str, pair)))
