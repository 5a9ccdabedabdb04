"""Finding: a walk that went wrong, as text, as JSON and as an exception; and the search for a shorter history of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from pagedkv.tools.fuzz.events import Event, WalkShape

Item = TypeVar("Item")


@dataclass(frozen=True)
class Finding:
    """A walk in which store and model differ.

    Attributes:
        seed: of all walks; `round_seed` is the seed of this walk, and `event` the number of its last event.
        message: the difference.
        last: the last events, in order.
        shortest: the shortest history found that shows a difference, and `shortest_message` that difference.
        journal: the journal of the shortest history; `pagedkv journal replay` runs it on the ledgers alone.
    """

    seed: int
    round_seed: int
    event: int
    shape: WalkShape
    message: str
    last: tuple[Event, ...]
    shortest: tuple[Event, ...]
    shortest_message: str
    journal: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object of `pagedkv fuzz --json`."""
        history = [{"number": event.number, "kind": event.kind, **event.arguments} for event in self.shortest]
        finding = {
            "round": self.round_seed, "event": self.event, "message": self.message, "store": asdict(self.shape),
            "shortest_message": self.shortest_message, "shortest": history, "journal": list(self.journal),
        }  # fmt: skip
        return {"schema": 1, "seed": self.seed, "finding": finding}

    def __str__(self) -> str:
        last = "\n".join(f"  {event}" for event in self.last)
        short = "\n".join(f"  {event}" for event in self.shortest)
        return (
            f"seed {self.seed}, round {self.round_seed}, event {self.event}: {self.message}\n"
            f"store: {self.shape}\nlast events:\n{last}\n"
            f"shortest history, {len(self.shortest)} events, then: {self.shortest_message}\n{short}\n"
            "its journal, for pagedkv journal replay:\n" + "".join(self.journal)
        )


class FuzzFound(AssertionError):
    """Store and model differ; `finding` has the evidence."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


def shortest(
    items: list[Item], find: Callable[[list[Item]], tuple[int, str] | None], *, message: str, seconds: float
) -> tuple[list[Item], str]:
    """Return fewer items that still show a difference, and the difference.

    Delta debugging: leave out runs of items, long runs first, while the rest still shows a difference.  Items after the
    one that shows it are dropped at once.  The difference may change on the way: a shorter history is worth more than
    the same message.

    Args:
        items: items that show a difference.
        find: runs items; returns how many of them ran until the difference, and its message, or None.
        message: of the difference that `items` show.
        seconds: time limit of the search.
    """
    end = time.monotonic() + seconds
    length = max(len(items) // 2, 1)
    while True:
        start, has_shrunk = 0, False
        while start < len(items):
            if time.monotonic() > end:
                return items, message
            candidate = items[:start] + items[start + length :]
            difference = find(candidate)
            if difference is None:
                start += length
            else:
                items, message, has_shrunk = candidate[: difference[0]], difference[1], True
        if length == 1 and not has_shrunk:
            return items, message
        length = max(length // 2, 1)
