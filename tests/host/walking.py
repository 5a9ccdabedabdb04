"""The random walk of `pagedkv fuzz`, event by event, for tests that watch something beside the model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TextIO

import pagedkv as pk
from pagedkv.tools.fuzz.events import EventDrawer, draw_shape
from pagedkv.tools.fuzz.faulty_device import FaultyDevice
from pagedkv.tools.fuzz.walk import Walk


def walk_events(seed: int, events: int, journal: TextIO | None = None) -> Iterator[Walk]:
    """Walk one round; yield the walk before its first event, and after each one that leaves the store open.

    After the last one everything is finished and the store is closed, unless an event latched the store before.
    """
    rng = random.Random(seed)
    shape = draw_shape(rng)
    walk = Walk(shape, FaultyDevice(pk.open_device("cpu")), journal)
    drawer = EventDrawer(rng, walk.model, shape.sanitizer)
    yield walk
    for number in range(1, events + 1):
        walk.perform(drawer.draw(number))
        if walk.is_over:
            return
        if number in walk.batches:
            drawer.add_batch(number, walk.batches[number][0])
        yield walk
    walk.end_everything()
