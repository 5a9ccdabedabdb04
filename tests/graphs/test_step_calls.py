"""The Python calls of a replayed decode step: they are most of the host's time between two replays."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.graphs import DecodeLoop, Unit
from tests.checkout import ROOT
from tests.toy_model import opened_store

CALLS_MAX = 70
OUR_FOLDERS = tuple(str(ROOT / folder) + os.sep for folder in ("pagedkv", "graphs"))


class OneLayerModel:
    """The model of the README's first example: an array function, attention, an array function."""

    def enqueue(self, unit: Unit) -> None:
        """Enqueue the three."""
        q, k, v, out = (unit.empty((unit.batch, unit.width, heads, 64), np.uint16) for heads in (4, 2, 2, 4))
        unit.call(embed, unit.tokens, q, k, v)
        unit.attend(0, q, k, v, out)
        unit.call(sample, out, unit.next_tokens)


def embed(tokens: Any, q: Any, k: Any, v: Any) -> None:
    q[...] = k[...] = v[...] = 0x3F80 + tokens[:, :, None, None] % 16


def sample(out: Any, next_tokens: Any) -> None:
    next_tokens[...] = out[:, :, 0, 0] % 100


def calls_of(function: Callable[[], object]) -> Counter[str]:
    """Return how often each Python function of this package is called, and each generator resumed."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: object) -> None:
        path = os.path.realpath(frame.f_code.co_filename)
        if event == "call" and path.startswith(OUR_FOLDERS):
            calls[f"{os.path.relpath(path, ROOT)} {frame.f_code.co_qualname}"] += 1

    previous = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(previous)
    return calls


@pytest.mark.eager_only("a deferred device makes more calls, to order the work")
def test_a_replayed_step_makes_few_python_calls() -> None:
    """One sequence, no page crossed, the shape captured before; the message lists the calls by function."""
    geometry = pk.KVGeometry(layers=1, query_heads=4, kv_heads=2, head_dim=64)
    with opened_store(geometry, profile="k8v4", max_context=256, concurrency=2) as store:
        loop = DecodeLoop(store, OneLayerModel())
        sequence = store.activate(prompt_tokens=16, output_tokens=20)
        loop.prefill(sequence, range(16))
        for _ in range(3):
            loop.step([sequence])
        calls = calls_of(lambda: loop.step([sequence]))

        assert calls["graphs/decode_loop.py DecodeLoop._run"] == 1
        assert calls.total() <= CALLS_MAX, "\n".join(f"{count} {name}" for name, count in calls.most_common())
