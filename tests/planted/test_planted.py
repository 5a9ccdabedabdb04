"""Every planted mistake is caught, by name, under nearly every seed; without it every scene is clean."""

from __future__ import annotations

import re

import pytest

from pagedkv.devices.cpu import races as cpu_races
from pagedkv.devices.cpu.deferred import Queues
from pagedkv.devices.cpu.races import Races
from pagedkv.errors import PagedKVError
from tests.planted.mistakes import MISTAKES, Mistake
from tests.planted.scenes import SCENES, Scene, deferred_device

SEEDS = 10
CAUGHT_MIN = 9


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: str(scene.__name__))
def test_a_scene_without_a_mistake_is_clean_under_every_seed(scene: Scene) -> None:
    """Design 4: every legal order gives the same bytes, and no order is reported as a hazard."""
    for seed in range(SEEDS):
        scene(deferred_device(seed))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: str(mistake.what))
def test_a_planted_mistake_is_caught_by_name(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under at least 9 of 10 seeds the error names the operation and the buffer."""
    mistake.plant(monkeypatch)
    outcomes = [outcome_of(mistake, seed) for seed in range(SEEDS)]
    caught = sum(outcome == "" for outcome in outcomes)

    assert caught >= CAUGHT_MIN, f"{caught} of {SEEDS} seeds caught it: {[text for text in outcomes if text]}"


def test_at_least_twelve_mistakes_are_planted() -> None:
    """Of every kind: fences, staging, publication, pins, completion and capture."""
    assert len(MISTAKES) >= 12
    assert len({mistake.what for mistake in MISTAKES}) == len(MISTAKES)


def outcome_of(mistake: Mistake, seed: int) -> str:
    """Run the scene once; return nothing when the mistake was named, else what happened instead."""
    try:
        mistake.scene(deferred_device(seed))
    except mistake.errors as error:
        missing = [part for part in (mistake.operation, mistake.buffer) if not re.search(part, str(error))]
        return f"seed {seed}: {missing} not in: {error}" if missing else ""
    except (PagedKVError, AssertionError) as error:
        return f"seed {seed}: {type(error).__name__}: {error}"
    return f"seed {seed}: nothing happened"


ABLATIONS = (
    ("fingerprints are not compared", Queues, "_compare_fingerprints", "a slot of page ids is re-used"),
    ("host reads are not asked about", Queues, "require_readable", "poll takes every submitted unit for done"),
    ("known bytes are not compared", Races, "_refuse_common", "a save does not wait for the writers"),
    ("no operation is tried in the other order", Races, "_try", "the next reader does not wait"),
)


@pytest.mark.parametrize(("what", "owner", "method", "mistake_start"), ABLATIONS, ids=[row[0] for row in ABLATIONS])
def test_a_mistake_escapes_without_the_check_that_catches_it(
    what: str, owner: type, method: str, mistake_start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each check of the device is needed: with it removed, a mistake is named under fewer seeds than demanded."""
    (mistake,) = (mistake for mistake in MISTAKES if mistake.what.startswith(mistake_start))
    mistake.plant(monkeypatch)
    monkeypatch.setattr(owner, method, lambda *arguments: [b"" for _ in arguments[-1]] if method == "_try" else None)
    if method == "_try":
        monkeypatch.setattr(cpu_races, "_differ", lambda found, after, pieces: False)
    caught = sum(outcome_of(mistake, seed) == "" for seed in range(SEEDS))

    assert caught < CAUGHT_MIN, f"{what}, and still {caught} of {SEEDS} seeds caught it"
