"""A unit without a library behind it: `call` runs at once, `attend` is float64 attention over contiguous rows.

The model is compared with the reference on it when neither store, kernel nor graph takes part, so a difference lies in
the model.  `FakeCache` outlives units, as a store does; a unit's arrays are the unit's own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

import pagedkv as pk
from pagedkv.graphs import Unit
from pagedkv.tools.llama.model import LlamaModel
from pagedkv.tools.llama.weights import LlamaConfig
from tests.oracle.reference_llama import margins

Array = npt.NDArray[Any]
Route = Literal["decode", "prefill"]

PASSAGE = (
    "The river rose in the night. By morning the lower street was under 2 feet of water, and the baker carried his "
    'flour upstairs in sacks. "It has been worse," he said, "in 1953." Nobody believed him, but everybody helped.'
)


class FakeStream:
    """Nothing is ever pending on it."""

    def synchronize(self) -> None:
        return


class FakeDevice:
    """Host memory, copied at once."""

    name = "cpu"

    def stream(self) -> FakeStream:
        return FakeStream()

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        buffer = np.empty(shape, dtype)
        buffer.view(np.uint8)[...] = 0xFF
        return buffer

    def copy(self, destination: Array, source: Array, stream: FakeStream) -> None:
        destination[...] = source


FAKE_DEVICE = cast("pk.Device", FakeDevice())


class FakeCache:
    """BF16 rows of every layer and table row, decoded to float64."""

    def __init__(self, config: LlamaConfig, *, rows: int = 20, max_context: int = 160) -> None:
        shape = (config.layers, rows, max_context, config.kv_heads, config.head_dim)
        self.keys = np.full(shape, np.nan)
        self.values = np.full(shape, np.nan)


class FakeUnit(Unit):
    """Arrays of one shape; `replay` runs the recorded model again on their present content."""

    def __init__(self, cache: FakeCache, *, route: Route, B: int, W: int, K: int = 0) -> None:
        self.cache = cache
        self.route = route
        self.tokens = np.zeros((B, W), np.int32)
        self.first_positions = np.zeros(B, np.int32)
        self.valid_columns = np.zeros(B, np.int32)
        self.table_rows = np.full(B, -1, np.int32)
        self.words = np.zeros((B, K), np.int32)
        self.next_tokens = np.full((B, W), -7, np.int32)
        self._work: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        assert isinstance(function, FunctionType), f"{function} is no plain function"
        assert function.__closure__ is None, f"{function.__name__} is a closure"
        assert function.__qualname__ == function.__name__, f"{function.__qualname__} is not at module level"
        for argument in arguments:
            assert isinstance(argument, np.ndarray | np.generic), f"{function.__name__} was given {type(argument)}"
        self._work.append((function, arguments))

    def launch(self, kernel: pk.Kernel, *launch: object) -> None:
        raise AssertionError(f"{kernel} was launched where there are no kernels")

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        return FakeDevice().empty(shape, dtype)

    def attend(self, layer: int, q: Array, k: Array, v: Array, out: Array, pool: str = "main") -> None:
        self._work.append((self._attend, (layer, q, k, v, out)))

    def replay(self) -> None:
        for function, arguments in self._work:
            function(*arguments)

    def _attend(self, layer: int, q: Array, k: Array, v: Array, out: Array) -> None:
        B, _, query_heads, D = q.shape
        group = query_heads // k.shape[2]
        out[...] = 0
        for b in range(B):
            for j in range(int(self.valid_columns[b])):
                row, position = int(self.table_rows[b]), int(self.first_positions[b]) + j
                self.cache.keys[layer, row, position] = widen(k[b, j])
                self.cache.values[layer, row, position] = widen(v[b, j])
                for head in range(query_heads):
                    keys = self.cache.keys[layer, row, : position + 1, head // group]
                    scores = keys @ widen(q[b, j, head]) / np.sqrt(D)
                    weights = np.exp(scores - scores.max())
                    values = self.cache.values[layer, row, : position + 1, head // group]
                    out[b, j, head] = narrow(weights @ values / weights.sum())


def run_unit(
    model: LlamaModel, columns: list[list[int]], *, cache: FakeCache | None = None, route: Route = "decode",
    first: list[int] | None = None, rows: list[int] | None = None, W: int | None = None,
    words: list[tuple[int, int, int]] | None = None,
) -> FakeUnit:  # fmt: skip
    """Run one unit whose row b holds `columns[b]`; inert columns hold ids and positions that must not be read.

    `words` are the caller's words of each row.  Without `first` and `rows`, row b begins at position 0 of table row b;
    without `cache`, of a fresh one.
    """
    B, width = len(columns), W or max(len(row) for row in columns)
    unit = FakeUnit(cache or FakeCache(model.config), route=route, B=B, W=width, K=3 if words else 0)
    unit.words[...] = words or 0
    unit.tokens[...] = 10**6
    for b, row in enumerate(columns):
        unit.tokens[b, : len(row)] = row
        unit.valid_columns[b] = len(row)
    unit.first_positions[...] = first or [0] * B
    unit.table_rows[...] = rows or list(range(B))
    model.enqueue(unit)
    unit.replay()
    return unit


def widen(bits: Array) -> npt.NDArray[np.float64]:
    """Return the values of BF16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def narrow(values: npt.NDArray[np.float64]) -> npt.NDArray[np.uint16]:
    """Round finite values to BF16 bits: to float32 first, then nearest even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def assert_same_choices(expected: Array, logits: Array, *, margin_min: float) -> None:
    """Compare the greedy choices wherever the margin of the expected logits is clear."""
    clear = margins(expected) > margin_min
    np.testing.assert_array_equal(expected.argmax(axis=1)[clear], logits.argmax(axis=1)[clear])
