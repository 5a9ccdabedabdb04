"""Two catchers of mutants that are no tests: the random walk and the scenes.  Exit code 1: the mutant is caught.

    python -m tests.mutants.walks fuzz SEED EVENTS
    python -m tests.mutants.walks scene NAME PATTERN ...
"""

from __future__ import annotations

import re
import sys

from pagedkv.errors import PagedKVError
from pagedkv.tools.fuzz.finding import FuzzFound
from pagedkv.tools.fuzz.run import fuzz
from tests.mutants.scenes import SCENES, deferred_device

SEEDS = 10
CAUGHT_MIN = 9


def walk(seed: int, events: int) -> int:
    """Walk beside the model; print the first difference."""
    try:
        fuzz(seed, events, shorten_seconds=0)
    except FuzzFound as found:
        print(f"event {found.finding.event} of its round: {found.finding.message}")
        return 1
    return 0


def act(name: str, patterns: list[str]) -> int:
    """Run a scene under every seed; under 9 of 10 seeds its error must match every pattern."""
    (scene,) = (each for each in SCENES if each.__name__ == name)
    caught = 0
    for seed in range(SEEDS):
        try:
            scene(deferred_device(seed))
            outcome = "clean"
        except (PagedKVError, AssertionError) as error:
            outcome = f"{type(error).__name__}: {error}"
        caught += outcome != "clean" and all(re.search(pattern, outcome) for pattern in patterns)
        print(f"seed {seed}: {outcome}")
    return int(caught >= CAUGHT_MIN)


if __name__ == "__main__":
    kind, first, *rest = sys.argv[1:]
    sys.exit(walk(int(first), int(rest[0])) if kind == "fuzz" else act(first, rest))
