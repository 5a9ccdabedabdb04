"""Undo: what gives claims back when their transaction does not end well.  (C10.2)

    undo: Undo = []
    try:
        pool.try_reserve(3);  undo.append((pool.shrink, 3))        each claim is followed by its opposite
        ...
    except BaseException:
        undo_all(undo)                                             the last one first
        raise

A plain list, because an `ExitStack` of four callbacks costs 6 us, a fifth of a fork.

Read next: `activation.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Undo = list[tuple[Callable[[Any], object], Any]]
"""Calls and their only argument, in the order in which the claims were made."""


def undo_all(undo: Undo) -> None:
    """Call everything in a list, the last first, and empty it; one that raises keeps none of the others from it."""
    try:
        while undo:
            call, argument = undo.pop()
            call(argument)
    finally:
        if undo:
            undo_all(undo)
