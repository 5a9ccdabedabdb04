"""The scheduler: every answer is that of its request alone, whoever runs beside it.  (C1.2, C9.2, C10.5, C14.6)"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pagedkv as pk
from pagedkv.graphs import Scheduler
from tests.toy_model import ToyModel, opened_store, prompt

GEOMETRY = pk.KVGeometry(layers=1, query_heads=2, kv_heads=1, head_dim=64)


def opened(*, max_context: int = 256, concurrency: int = 4, **options: Any) -> AbstractContextManager[pk.Store]:
    return opened_store(GEOMETRY, max_context=max_context, concurrency=concurrency, **options)


def run(scheduler: Scheduler) -> None:
    """Step until every request has ended."""
    while not scheduler.is_idle:
        scheduler.step()


def test_requests_of_one_batch() -> None:
    with opened() as store:
        scheduler = Scheduler(store, ToyModel(store))
        requests = [scheduler.submit(prompt(20 + 30 * seed, seed), 5 + seed, n=1 + seed % 3) for seed in range(6)]
        run(scheduler)
        texts = [[output.tokens for output in request.outputs] for request in requests]
        print(scheduler.statistics)
        assert store.memory_summary()["main"]["available_pages"] == 16
        for seed, found in enumerate(texts):
            request = scheduler.submit(prompt(20 + 30 * seed, seed), 5 + seed)
            run(scheduler)
            assert found == [request.outputs[0].tokens] * (1 + seed % 3)
            assert len(found[0]) == 5 + seed
