"""Keys, shapes, control buffers and captures.  (C15)"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.graphs import ControlBuffers, DecodeLoop, GraphCache, GraphKey, Unit
from pagedkv.graphs.key import key_for
from pagedkv.graphs.shapes import batch_shape, prefill_width
from tests.toy_model import ToyModel

GEOMETRY = pk.KVGeometry(layers=2, query_heads=4, kv_heads=2, head_dim=64)
CONFIG = pk.StoreConfig(GEOMETRY, profile="bf16", max_context=512, max_concurrency=6,
                        kv_capacity=pk.ExplicitCapacity(3072))


def test_the_key_is_shape_and_nothing_else() -> None:
    """C15.2: no field of the key names a page, a request or a length."""
    assert {field.name for field in dataclasses.fields(GraphKey)} == {
        "unit", "route", "batch", "width", "is_masked", "profile", "geometry", "max_context", "scale", "pool",
    }
    key = key_for(CONFIG, unit="decode", route="decode", batch=2, width=1)
    assert key == key_for(CONFIG, unit="decode", route="decode", batch=2, width=1)
    assert key != key_for(CONFIG, unit="decode", route="decode", batch=4, width=1)
    assert key.scale == 0.125


def test_few_graphs_serve_every_batch_and_every_prompt() -> None:
    """The next power of two, or the whole store; a chunk of 16 columns at least, or the whole chunk."""
    assert [batch_shape(rows, concurrency=6) for rows in range(1, 7)] == [1, 2, 4, 4, 6, 6]
    assert [prefill_width(tokens, chunk=100) for tokens in (1, 16, 17, 100, 64, 65)] == [16, 16, 32, 100, 64, 100]


def test_control_buffers_lie_side_by_side_and_unselected_entries_are_inert() -> None:
    """C11.3, C15.1: one copy carries all selectors; entries beyond the batch have row -1 and no live column."""
    with pk.open_store(dataclasses.replace(CONFIG, caller_words=3), device="cpu") as store:
        control = ControlBuffers(store, batch=4, width=2)
        control.write(np.array([3, 1]), np.array([7, 8], np.int32), np.array([2, 1], np.int32),
                      np.array([[5, 6], [9, 0]], np.int32), np.array([[31, 32, 33], [11, 12, 13]], np.int32))
        store.device.copy(control.ingress_device, control.ingress_host, store.stream)
        store.stream.synchronize()

        assert control.table_rows.tolist() == [3, 1, -1, -1]
        assert control.first_positions.tolist() == [7, 8, 0, 0]
        assert control.valid_columns.tolist() == [2, 1, 0, 0]
        assert control.tokens.tolist() == [[5, 6], [9, 0], [0, 0], [0, 0]]
        assert control.words.tolist() == [[31, 32, 33], [11, 12, 13], [0, 0, 0], [0, 0, 0]]


class Follower:
    """A model without a cache: token t is followed by t + 1; it counts the drafts that are right."""

    def enqueue(self, unit: Unit) -> None:
        unit.call(follow, unit.tokens, unit.next_tokens)
        unit.accept_greedy()


def follow(tokens: Any, next_tokens: Any) -> None:
    next_tokens[...] = tokens + 1


@pytest.mark.parametrize("use_graphs", [True, False])
def test_a_unit_counts_its_right_drafts(use_graphs: bool) -> None:
    """C13.1: in a graph and eagerly, with other tokens in each run; entries without a row have none."""
    with pk.open_store(dataclasses.replace(CONFIG, decode_columns_max=4), device="cpu") as store:
        graph = GraphCache(store, Follower(), use_graphs=use_graphs).unit(
            key_for(store.config, unit="verify", route="decode", batch=4, width=4))
        control = graph.unit.control
        for tokens, columns, accepted in [
            ([[5, 6, 7, 8], [5, 6, 8, 9], [5, 0, 0, 0]], [4, 4, 1], [4, 2, 1]),
            ([[5, 6, 0, 0], [5, 7, 0, 0], [5, 6, 7, 9]], [2, 2, 4], [2, 1, 3]),
        ]:
            control.write(np.arange(3), np.zeros(3, np.int32), np.array(columns, np.int32), np.array(tokens, np.int32))
            graph.run()
            store.stream.synchronize()
            assert control.read_accepted(3).tolist() == accepted
            assert control.read_accepted(4).tolist()[3] == 0
        with pytest.raises(pk.MisuseError, match="a count of entries"):
            control.read_accepted(5)


def test_addresses_of_a_captured_unit_never_change() -> None:
    """S14, C15.1: through many replays, activations and finishes, with memory churn between them."""
    with pk.open_store(CONFIG, device="cpu") as store:
        loop = DecodeLoop(store, ToyModel(store))
        addresses: list[list[int]] = []
        for round_index in range(5):
            sequence = store.activate(prompt_tokens=20 + 50 * round_index, output_tokens=3)
            loop.prefill(sequence, range(20 + 50 * round_index))
            for _ in loop.decode([sequence]):
                junk = store.device.empty((1 << 16,), np.uint8)
                junk[:] = round_index
            store.finish(sequence)
            unit = loop.graphs.unit(key_for(CONFIG, unit="decode", route="decode", batch=1, width=1)).unit
            arrays = [unit.tokens, unit.next_tokens, unit.table_rows, unit.views["main"][1].k_pages,
                      store.block_tables["main"], *unit._buffers]
            addresses.append([store.device.address(array) for array in arrays])

        assert addresses == addresses[:1] * 5
        assert loop.graphs.replays()["decode/decode B=1 W=1 masked bf16"] == 5 * 2
        store.check()


@pytest.mark.parametrize("call", ["begin_capture", "end_capture"])
def test_an_interrupted_capture_is_aborted(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C15.1: an interrupt as soon as the capture began or ended; the stream is free and the shape can be captured."""
    with pk.open_store(CONFIG, device="cpu") as store:
        original = getattr(store.device, call)

        def interrupt(stream: pk.Stream) -> None:
            original(stream)
            raise KeyboardInterrupt

        cache = GraphCache(store, ToyModel(store))
        key = key_for(CONFIG, unit="decode", route="decode", batch=1, width=1)
        with monkeypatch.context() as patch:
            patch.setattr(store.device, call, interrupt)
            with pytest.raises(KeyboardInterrupt):
                cache.unit(key)

        assert not store.stream.is_capturing
        assert cache.unit(key).graph is not None
        store.check()


def test_enqueue_must_ask_for_the_same_buffers() -> None:
    """C15.1: capture may not ask for a buffer that warm-up did not allocate."""

    class Growing:
        calls = 0

        def enqueue(self, unit: object) -> None:
            self.calls += 1
            unit.empty((self.calls,), np.int32)  # type: ignore[attr-defined]

    with pk.open_store(CONFIG, device="cpu") as store:
        cache = GraphCache(store, Growing())
        with pytest.raises(pk.MisuseError, match="same buffers"):
            cache.unit(key_for(CONFIG, unit="decode", route="decode", batch=1, width=1))

        assert not store.stream.is_capturing
        store.check()
