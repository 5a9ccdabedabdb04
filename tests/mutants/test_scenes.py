"""Every scene ends well; that its error names each planted mistake is shown by `tests/mutants`."""

from __future__ import annotations

import pytest

from tests.mutants.scenes import SCENES, Scene, deferred_device

SEEDS = 10


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: str(scene.__name__))
def test_a_scene_without_a_mistake_is_clean_under_every_seed(scene: Scene) -> None:
    """Design 4: every legal order gives the same bytes, and no order is reported as a hazard."""
    for seed in range(SEEDS):
        scene(deferred_device(seed))
