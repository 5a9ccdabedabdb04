"""Undo: what gives claims back when their transaction does not end well.  (C10.2)

    undo: Undo = []
    try:
        pool.try_reserve(3);  undo.append((pool.shrink, 3))        each claim is followed by its opposite
        ...
    except BaseException as error:
        undo_all(undo, error)                                      the last one first
        raise

A plain list, because an `ExitStack` of four callbacks costs 6 us, a fifth of a fork.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagedkv.ledger.caught import Caught

Undo = list[tuple[Callable[[Any], object], Any]]
"""Calls and their only argument, in the order in which the claims were made."""


def undo_all(undo: Undo, error: BaseException | None = None) -> None:
    """Call everything in a list, the last first, and empty it; one that raises keeps none of the others from it.

    Args:
        undo: calls and their arguments.
        error: why; what a call raises becomes a note of it.  Without one, the first that a call raises is raised.
    """
    first = error
    try:
        while undo:
            call, argument = undo.pop()
            with Caught() as caught:
                call(argument)
            if first is None:
                first = caught.error
            elif caught.error is not None:
                first.add_note(f"and a claim could not be given back: {caught.error}")
    finally:
        if undo:  # an interrupt
            undo_all(undo, error)
    if error is None and first is not None:
        raise first
