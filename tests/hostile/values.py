"""The hostile values: what a careless embedder hands to a call that wants a number, a name, a handle or a list.

`hostile_values` yields (name, value).  `hostile_calls` yields (name, call): public calls of a store, a loop and a
device that take one value; the ledgers stay as they are, whether or not the value is refused.
"""

from __future__ import annotations

import decimal
import fractions
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

import pagedkv as pk
from pagedkv.graphs import ControlBuffers, DecodeLoop, GraphCache, GraphKey, UnitGraph
from pagedkv.graphs.key import key_for
from pagedkv.graphs.unit import Unit
from tests.toy_model import ToyModel


class Speechless:
    """An object that cannot be printed."""

    def __repr__(self) -> str:
        raise LookupError("no words")


class Thorny(Speechless):
    """An object that raises whatever is asked of it."""

    __hash__ = None  # type: ignore[assignment]

    def _raise(self, *arguments: Any) -> Any:
        raise LookupError("not like this")

    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __len__ = __iter__ = __getitem__ = __bool__ = _raise
    __index__ = __int__ = __float__ = __abs__ = __getattr__ = __call__ = _raise

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        self._raise()


class ThornyInteger(int):
    """An integer that raises when it is compared."""

    __hash__ = None  # type: ignore[assignment]

    def _raise(self, *arguments: Any) -> Any:
        raise LookupError("incomparable")

    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __repr__ = __str__ = __format__ = _raise


class ThornyText(str):
    """A text that cannot be printed."""

    __slots__ = ()

    def __repr__(self) -> str:
        raise LookupError("no words")

    __str__ = __repr__


def raising() -> Iterator[int]:
    """Yield one number, then raise."""
    yield 1
    raise LookupError("no second one")


def _call_first(function: Callable[..., object], rest: tuple[Any, ...], value: Any) -> object:
    return function(value, *rest)


def huge(value: Any) -> Any:
    """Return a shape that no memory holds in place of an extent that some does."""
    return (value, 1 << 33) if type(value) is int else value


def hostile_values() -> Iterator[tuple[str, Any]]:
    """Yield (name, value); iterators are new ones in each call."""
    endless: list[Any] = []
    endless.append(endless)
    yield from (
        ("none", None), ("true", True), ("NumPy true", np.True_), ("nan", float("nan")), ("inf", float("inf")),
        ("-inf", -float("inf")), ("1.5", 1.5), ("-1", -1), ("-2^31 - 1", -(2**31) - 1), ("2^31", 2**31),
        ("2^63", 2**63), ("2^64", 2**64), ("5000 digits", 10**5000), ("-5000 digits", -(10**5000)), ("1j", 1j),
        ("decimal", decimal.Decimal("1.5")), ("fraction", fractions.Fraction(1, 2)), ("int64", np.int64(-1)),
        ("uint64", np.uint64(2**64 - 1)), ("float32 nan", np.float32("nan")), ("longdouble", np.longdouble("nan")),
        ("datetime", np.datetime64("2026-01-01")), ("text", "x"), ("empty text", ""), ("lone surrogate", "\ud800"),
        ("text subclass", ThornyText("y")), ("bytes", b"x"), ("bytearray", bytearray(b"x")),
        ("integer subclass", ThornyInteger(-7)), ("empty dict", {}), ("dict", {"nowhere": 1}),
        ("set", {-1}), ("range", range(-3, -1)), ("slice", slice(1)), ("ellipsis", ...), ("class", int),
        ("function", len), ("module", np), ("object", object()), ("speechless", Speechless()), ("thorny", Thorny()),
        ("list of speechless", [Speechless()]), ("list of thorny", [Thorny()]), ("thorny by pool", {"main": Thorny()}),
        ("endless list", endless), ("raising iterator", raising()), ("ragged", [[1], [1, 2]]),
        ("masked", np.ma.masked), ("masked array", np.ma.array([1, 2], mask=[False, True])),
        ("masked count", np.ma.array([1], mask=[True])),
        ("matrix", np.matrix([[1]])), ("0-d", np.array(-1)), ("0-d float", np.array(0.5)),
        ("objects", np.array([None, Speechless()], object)), ("structured", np.zeros(1, "i4,f4")),
        ("big-endian", np.array([-1], ">i4")), ("texts", np.array(["a"])), ("floats", np.array([np.nan])),
        ("refusal", pk.Refusal("rows", 1, 0, forever=False)),
    )  # fmt: skip


def hostile_calls(store: pk.Store) -> Iterator[tuple[str, Callable[[Any], object]]]:
    """Yield (name, call) for a store of two rows with Main alone; every call begins from the same state.

    A caller's opaque state is not here: any value is legal there.
    """
    sequence = store.activate(prompt_tokens=4, output_tokens=4)
    other = store.activate(prompt_tokens=4, output_tokens=4)
    loop, batch, device = DecodeLoop(store, ToyModel(store)), store.batch([sequence]), store.device
    loop.prefill(other, [1, 2, 3])
    store.finish(other)
    resting = store.activate(prompt_tokens=4, output_tokens=4)
    running = store.begin_unit(store.batch([resting]), 1)
    store.wait(running)
    cache = GraphCache(store, ToyModel(store))
    key = key_for(store.config, unit="u", route="decode", batch=1, width=1)
    unit, control = Unit(store, key), ControlBuffers(store, batch=1, width=1)
    one, rows = np.ones(1, np.int32), np.zeros(1, np.int64)
    tokens, array = np.zeros((1, 1), np.int32), device.zeros((4,), np.int32)
    kernel = store.ops.kernels.page_moves()["bf16_from_f32"]
    stream = store.stream

    for name in ("finish", "abort", "committed_tokens", "budget_tokens", "page_ids", "try_snapshot", "snapshot",
                 "layer_view", "release", "state_of", "protected_tokens", "submit", "wait", "commit", "fail", "batch",
                 "begin_round", "covered_columns", "trim", "begin_unit", "launch_graph", "observe", "latch",
                 "can_honour", "explain"):  # fmt: skip
        yield f"store.{name}", getattr(store, name)
    for name in ("prefill", "resume", "step", "decode"):
        extra = {"prefill": ([1],), "resume": (1,)}.get(name, ())
        yield f"loop.{name}", partial(_call_first, getattr(loop, name), extra)
    for pool_call in (store.committed_tokens, store.page_ids, store.layer_view):
        yield f"{pool_call.__name__} in a pool", partial(pool_call, sequence)
    yield from (
        ("a layer", lambda value: store.layer_view(sequence, "main", value)),
        ("retain", lambda value: store.finish(sequence, retain=value)),
        ("truncate to", lambda value: store.truncate(sequence, value)),
        ("ensure to", lambda value: store.ensure_mapped_to_tokens(sequence, value)),
        ("prompt_tokens", lambda value: store.activate(prompt_tokens=value, output_tokens=0)),
        ("output_tokens", lambda value: store.activate(prompt_tokens=1, output_tokens=value)),
        ("source", lambda value: store.activate(prompt_tokens=999, output_tokens=0, source=value)),
        ("columns", lambda value: store.begin_unit(batch, value)),
        ("columns by pool", lambda value: store.begin_unit(batch, {"main": value})),
        ("unit name", lambda value: store.begin_unit(batch, 999, name=value)),
        ("accepted", lambda value: store.commit(running, [value, value])),
        ("provisional", lambda value: store.trim(batch, "main", value)),
        ("buffer shape", lambda value: store.graph_buffer(huge(value), np.int32)),
        ("buffer dtype", lambda value: store.graph_buffer((0,), value)),
        ("empty shape", lambda value: device.empty(huge(value), np.int32)),
        ("zeros extent", lambda value: device.zeros((0, value), np.int32)),
        ("pinned dtype", lambda value: device.pinned((0,), value)),
        ("align_bytes", lambda value: device.empty((0,), np.int8, align_bytes=value)),
        ("allocation name", lambda value: device.empty((0,), np.int8, name=value)),
        ("copy to", lambda value: device.copy(value, array, stream)),
        ("copy from", lambda value: device.copy(array, value, stream)),
        ("copy on", lambda value: device.copy(array, array[:0], value)),
        ("address of", device.address),
        ("load", device.load), ("open_device", pk.open_device),
        ("call", lambda value: device.call(stream, value, array)),
        ("call on", lambda value: device.call(value, len)),
        ("launch grid", lambda value: kernel.launch(value, (1, 1, 1), (array, array, np.int64(0)), stream)),
        ("launch block", lambda value: kernel.launch((1, 1, 1), value, (array, array, np.int64(0)), stream)),
        ("launch arguments", lambda value: kernel.launch((1, 1, 1), (1, 1, 1), value, stream)),
        ("launch count", lambda value: kernel.launch((1, 1, 1), (1, 1, 1), (array, array, value), stream)),
        ("launch reads", lambda value: kernel.launch((1, 1, 1), (1, 1, 1), (array, array, np.int64(0)), stream,
                                                     reads=value)),
        ("prompt ids", lambda value: loop.prefill(sequence, value)),
        ("prompt id", lambda value: loop.prefill(sequence, [value])),
        ("stop tokens", lambda value: loop.step([sequence], stop_tokens=value)),
        ("last token", lambda value: loop.resume(sequence, value)),
        ("chunk", lambda value: DecodeLoop(store, ToyModel(store), prefill_chunk=0 if value is None else value)),
        ("model", lambda value: DecodeLoop(store, value)), ("store", lambda value: DecodeLoop(value, ToyModel(store))),
        ("unit key", cache.unit), ("graph key", lambda value: UnitGraph(store, ToyModel(store), value)),
        ("key config", lambda value: key_for(value, unit="u", route="decode", batch=1, width=1)),
        ("key pool", lambda value: key_for(store.config, unit="u", route="decode", batch=1, width=1, pool=value)),
        ("key batch", lambda value: key_for(store.config, unit="u", route="decode", batch=value, width=1)),
        ("key route", lambda value: Unit(store, key_for(store.config, unit="u", route=value, batch=1, width=1))),
        ("key scale", lambda value: GraphKey("u", "decode", 1, 1, is_masked=True, profile="bf16",
                                             geometry=store.config.geometry, max_context=256, scale=value)),
        ("unit shape", lambda value: unit.empty(huge(value), np.int32)),
        ("attend layer", lambda value: unit.attend(value, array, array, array, array)),
        ("attend pool", lambda value: unit.attend(0, array, array, array, array, pool=value)),
        ("attend q", lambda value: unit.attend(0, value, array, array, array)),
        ("unit kernel", lambda value: unit.launch(value, (1, 1, 1), (1, 1, 1), ())),
        ("control width", lambda value: ControlBuffers(store, batch=1, width=value)),
        ("control rows", lambda value: control.write(value, one, one, tokens)),
        ("control positions", lambda value: control.write(rows, value, one, tokens)),
        ("control columns", lambda value: control.write(rows, one, value, tokens)),
        ("control tokens", lambda value: control.write(rows, one, 1, value)),
        ("control words", lambda value: control.write(rows, one, 1, tokens, value)),
        ("control count", control.read_next_tokens),
        ("plan bytes", lambda value: pk.plan(store.config, value)), ("plan config", lambda value: pk.plan(value, 1)),
        ("config profile", lambda value: pk.StoreConfig(store.config.geometry, profile=value, max_context=256,
                                                        max_concurrency=1, kv_capacity=pk.ExplicitCapacity(256))),
        ("config context", lambda value: pk.StoreConfig(store.config.geometry, profile="bf16", max_context=value,
                                                        max_concurrency=1, kv_capacity=pk.ExplicitCapacity(256))),
        ("heads", lambda value: pk.KVGeometry(1, value, 1, 64)),
        ("capacity", pk.ExplicitCapacity),
        ("clause", pk.clause), ("open_store", lambda value: pk.open_store(value, device="cpu")),
    )  # fmt: skip
