"""Finding: what a random walk found, as text, as JSON, and as the exception that carries it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pagedkv.tools.fuzz_events import Event, WalkShape


@dataclass(frozen=True)
class Finding:
    """A walk that found something.

    Attributes:
        seed: of all walks, and `round_seed` of this one; `event` is its number within the round.
        message: what differed.
        last: events before it, in order.
        shortest: the fewest events that were found to show something, and `shortest_message` what they show.
        journal: lines of their journal, which `pagedkv journal replay` runs on the ledgers alone.
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
        """Return what `pagedkv fuzz --json` prints."""
        history = [{"number": event.number, "kind": event.kind, **event.arguments} for event in self.shortest]
        told = {"message": self.message, "store": asdict(self.shape), "shortest_message": self.shortest_message}
        where = {"round": self.round_seed, "event": self.event}
        evidence = {"shortest": history, "journal": list(self.journal)}
        return {"schema": 1, "seed": self.seed, "finding": {**where, **told, **evidence}}

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
    """A walk found something; `finding` says what."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding
