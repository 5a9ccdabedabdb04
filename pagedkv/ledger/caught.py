"""Caught: whatever a foreign callable raised, held instead of spreading.

    with Caught() as caught:
        observer(event)
    if caught.error is not None: ...

For the places where somebody else's code is called and any Exception is an answer: an observer of the store, an
operation that a replay repeats.  What is no Exception (an interrupt, an exit) goes on.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Caught:
    """Holds the Exception that left the block, if one did; written by `__exit__` alone."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            self.error = error
        return self.error is not None
