"""What append and both attentions refuse, before anything is launched: no byte of any plane or output changes.

C14.2: dtype, shape, layout, overlap and envelope; each message names the argument.  (C14.4)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pagedkv.devices.protocol import Device
from pagedkv.errors import MisuseError
from pagedkv.ops.ops import Ops
from tests.kernels.arrays import MARK_BF16, Rng, scattered_table
from tests.kernels.paged_cache import PagedCache, assert_same_planes

Wrong = dict[str, Any]


def bits(*shape: int) -> npt.NDArray[np.uint16]:
    return np.zeros(shape, np.uint16)


APPEND: list[tuple[Wrong, str]] = [
    ({"k": np.zeros((1, 2, 2, 64), np.float32)}, "k was refused"),
    ({"k": bits(1, 2, 2, 128)}, "k was refused"),
    ({"k": bits(1, 0, 2, 64)}, "k was refused"),
    ({"v": bits(1, 3, 2, 64)}, "v was refused"),
    ({"first_positions": np.zeros(1, np.int64)}, "first_positions was refused"),
    ({"table_rows": np.zeros(2, np.int32)}, "table_rows was refused"),
    ({"valid_columns": np.zeros((1, 1), np.int32)}, "valid_columns was refused"),
    ({"k": bits(1, 641, 2, 64), "v": bits(1, 641, 2, 64)}, "dense call"),
    ({"k": "inside the cache"}, "share no byte"),
    ({"k": "strided"}, "not C-contiguous"),
]
BOTH_ATTENTIONS: list[tuple[Wrong, str]] = [
    ({"q": np.zeros((1, 2, 4, 64), np.float32)}, "q was refused"),
    ({"q": bits(1, 2, 5, 64), "out": bits(1, 2, 5, 64)}, "head geometry"),
    ({"q": bits(1, 17, 4, 64), "out": bits(1, 17, 4, 64)}, "W of route decode"),
    ({"out": bits(1, 1, 4, 64)}, "out was refused"),
    ({"k": bits(1, 2, 4, 64)}, "k was refused"),
    ({"v": bits(2, 2, 2, 64)}, "v was refused"),
    ({"v": np.zeros((1, 2, 2, 64), np.int16)}, "v was refused"),
    ({"table_rows": np.zeros(2, np.int32)}, "table_rows was refused"),
    ({"valid_columns": np.zeros(1, np.int64)}, "valid_columns was refused"),
    ({"lse": np.zeros((1, 2, 4), np.float64)}, "lse was refused"),
    ({"lse": "workspace"}, "lse was refused"),
    ({"workspace": np.zeros(4223, np.uint8)}, "workspace was refused"),
    ({"workspace": np.zeros(4224, np.int8)}, "workspace was refused"),
    ({"workspace": None}, "workspace was refused"),
    *(({"scale": scale}, "scale was refused") for scale in (float("nan"), float("inf"), 3e38, 10**400, True)),
    ({"out": "q"}, "share no byte"),
    ({"out": "v"}, "out was refused"),
    ({"k": "v", "out": "q"}, "share no byte"),
    *(({name: "crooked"}, "16-byte aligned") for name in ("q", "k", "v", "out")),
]
CAUSAL: list[tuple[Wrong, str]] = [
    ({"first_positions": np.zeros(1, np.int64)}, "first_positions was refused"),
    ({"route": "prefil"}, "route was refused"),
    ({"route": "prefill", "workspace": None, "out": "q"}, "share no byte"),
    ({"route": "prefill", "q": bits(1, 641, 4, 64), "out": bits(1, 641, 4, 64), "k": bits(1, 641, 2, 64),
      "v": bits(1, 641, 2, 64)}, "dense call"),
    ({"k": "inside the cache"}, "share no byte"),
    ({"q": "inside the cache"}, "share no byte"),
]  # fmt: skip
CONTEXT: list[tuple[Wrong, str]] = [({"context_lengths": np.zeros(1, np.int64)}, "context_lengths was refused")]


@pytest.mark.parametrize(("op", "wrong", "named"), [
    *(("append", *case) for case in APPEND), *(("causal_attention", *case) for case in (*BOTH_ATTENTIONS, *CAUSAL)),
    *(("context_attention", *case) for case in (*BOTH_ATTENTIONS, *CONTEXT)),
])  # fmt: skip
def test_a_refused_call_changes_nothing(device: Device, rng: Rng, op: str, wrong: Wrong, named: str) -> None:
    """A wrong argument is an array, a number, the name of another argument, or a way to bend its own array."""
    order = "head-major" if op == "context_attention" else "page-major"
    cache = PagedCache.build(device, "bf16", order=order, table=scattered_table(1, 10), rng=rng)  # type: ignore[arg-type]
    before = cache.host_planes()
    arguments: Wrong = {"k": bits(1, 2, 2, 64), "v": bits(1, 2, 2, 64), "table_rows": np.zeros(1, np.int32)}
    arguments["context_lengths" if op == "context_attention" else "first_positions"] = np.zeros(1, np.int32)
    if op != "append":
        out = np.full((1, 2, 4, 64), MARK_BF16, np.uint16)
        arguments |= {"q": bits(1, 2, 4, 64), "out": out, "workspace": np.zeros(4224, np.uint8)}
    if op == "causal_attention":
        arguments["route"] = "decode"
    given = {**arguments, **wrong}
    on_device = {name: cache.put(value) if isinstance(value, np.ndarray) else value for name, value in given.items()}
    for name, value in wrong.items():
        if not isinstance(value, str):
            continue
        shape = getattr(arguments.get(name), "shape", ())
        if value == "inside the cache":
            on_device[name] = cache.view.k_pages.reshape(-1)[: np.prod(shape)].reshape(shape)
        elif value == "strided":
            on_device[name] = cache.put(arguments[name])[:, :, ::-1]
        elif value == "crooked":
            on_device[name] = device.zeros((int(np.prod(shape)) + 4,), np.uint16)[4:].reshape(shape)
        elif value in given:
            on_device[name] = on_device[value]

    with pytest.raises(MisuseError, match=named):
        getattr(cache.ops, op)(cache.view, **on_device, stream=cache.stream)

    assert_same_planes(before, cache.host_planes())
    if isinstance(given.get("out"), np.ndarray):
        np.testing.assert_array_equal(given["out"], cache.get(on_device["out"]))


@pytest.mark.parametrize("op", ["append", "causal_attention", "context_attention"])
def test_what_is_no_view_is_refused(device: Device, op: str) -> None:
    """C14.1: by name, before anything else is looked at."""
    names = {"append": (), "causal_attention": ("workspace", "route"), "context_attention": ("workspace",)}[op]
    count = 5 if op == "append" else 7

    with pytest.raises(MisuseError, match="PagedKVBatchLayerView"):
        getattr(Ops(device), op)(*[None] * count, **dict.fromkeys(names), stream=device.stream())
