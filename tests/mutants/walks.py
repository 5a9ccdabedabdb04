"""Two catchers of mutants that are no tests: the random walk, and the scenes; exit code 1 when a mutant is caught.

    python -m tests.mutants.walks fuzz SEED EVENTS
    python -m tests.mutants.walks scene NAME PATTERN ...
"""

from __future__ import annotations

import re
import sys

from pagedkv.errors import PagedKVError
from pagedkv.tools.finding import FuzzFound
from pagedkv.tools.fuzz import fuzz
from tests.planted.scenes import SCENES, deferred_device

SEEDS = 10
CAUGHT_MIN = 9


def walk(seed: int, events: int) -> int:
    """Walk beside the model; print what is found first."""
    try:
        fuzz(seed, events, shorten_seconds=0)
    except FuzzFound as found:
        print(f"event {found.finding.event} of its round: {found.finding.message}")
        return 1
    return 0


def act(name: str, says: list[str]) -> int:
    """Run a scene under every seed; without patterns any error counts."""
    (scene,) = (each for each in SCENES if each.__name__ == name)
    caught = 0
    for seed in range(SEEDS):
        try:
            scene(deferred_device(seed))
            outcome = "clean"
        except (PagedKVError, AssertionError) as error:
            outcome = f"{type(error).__name__}: {error}"
        caught += outcome != "clean" and all(re.search(pattern, outcome) for pattern in says)
        print(f"seed {seed}: {outcome}")
    return int(caught >= CAUGHT_MIN)


if __name__ == "__main__":
    kind, first, *rest = sys.argv[1:]
    sys.exit(walk(int(first), int(rest[0])) if kind == "fuzz" else act(first, rest))
