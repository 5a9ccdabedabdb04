"""Draft units: context append and context attention through a store, beside the target's units.  (C3.3, C14.4, C15)

    draft     every live column sees the draft pool up to its frontier, and the block; nothing is written
    verify    the target writes the block into Main, W columns provisionally, and accepts a prefix
    context   the accepted columns' draft rows are appended to the draft pool, their number read on the device
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import pagedkv as pk
from pagedkv.graphs import DecodeLoop, GraphCache, Model, Unit
from pagedkv.graphs.key import key_for
from tests.oracle.attention_oracle import CONTEXT_CRITERION, attend_context, stored_rows
from tests.placement import shuffle_placement
from tests.toy_model import (
    ToyModel,
    opened_store,
    prefilled,
    prompt,
    random_table,
    toy_mix,
    toy_project,
    toy_sample,
    toy_start,
)

TARGET = pk.KVGeometry(layers=2, query_heads=24, kv_heads=4, head_dim=64)
DRAFT = pk.KVGeometry(layers=2, query_heads=16, kv_heads=8, head_dim=128)
WIDTH = 5
Ints = npt.NDArray[np.int32]


def opened(
    *, max_context: int = 704, concurrency: int = 3, profile: str = "bf16", draft: pk.KVGeometry = DRAFT
) -> AbstractContextManager[pk.Store]:
    """Open a store with scattered pages and check it at the end."""
    return opened_store(TARGET, profile=profile, max_context=max_context, concurrency=concurrency, placement_seed=3,
                        backend=pk.DraftFullBackend(draft))


class ToyDraft:
    """A draft of the pool's geometry; `enqueue` is a draft block, `context` the model of context appends.

    Attributes:
        counts: (C,) int32 on the device, columns that a context append writes.
        last: device arrays q, k, v, out of the last layer of the last draft unit that was enqueued.
    """

    def __init__(self, store: pk.Store) -> None:
        self.pool = next(pool for pool in store.config.pools if pool.name == "draft")
        geometry = self.pool.geometry
        rng = np.random.default_rng(31)
        self.tables = [random_table(store, rng, heads, geometry.head_dim)
                       for heads in (geometry.query_heads, geometry.kv_heads, geometry.kv_heads)]
        self.counts = store.device.zeros((store.config.max_concurrency,), np.int32, name="counts")
        self.last: dict[str, Any] = {}

    def enqueue(self, unit: Unit) -> None:
        """Enqueue a draft block."""
        q, k, v, out, state = self._buffers(unit)
        for layer in range(self.pool.geometry.layers):
            unit.call(toy_project, state, layer, *self.tables, q, k, v)
            unit.attend_context(layer, q, k, v, out)
            unit.call(toy_mix, out, state)
        unit.call(toy_sample, state, 1009, unit.next_tokens)
        self.last = {"q": q, "k": k, "v": v, "out": out}

    def _buffers(self, unit: Unit) -> tuple[Any, ...]:
        geometry, rows = self.pool.geometry, (unit.batch, unit.width)
        q, k, v, out = (unit.empty((*rows, heads, geometry.head_dim), np.uint16) for heads in (
            geometry.query_heads, geometry.kv_heads, geometry.kv_heads, geometry.query_heads))  # fmt: skip
        state = unit.empty(rows, np.int64)
        unit.call(toy_start, unit.tokens, unit.first_positions, state)
        return q, k, v, out, state


class ToyContext(ToyDraft):
    """The same tables, as the model of context appends."""

    def enqueue(self, unit: Unit) -> None:
        """Enqueue an append of `counts` columns in every layer."""
        q, k, v, _, state = self._buffers(unit)
        for layer in range(self.pool.geometry.layers):
            unit.call(toy_project, state, layer, *self.tables, q, k, v)
            unit.append_context(layer, k, v, self.counts[: unit.batch])


class Rounds:
    """Prefilled sequences and the three units of a round, graphs or eager.

    Attributes:
        texts: the drafted and verified tokens of each sequence.
    """

    def __init__(self, store: pk.Store, *, use_graphs: bool = True) -> None:
        self.store = store
        self.target, self.draft, self.context = ToyModel(store), ToyDraft(store), ToyContext(store)
        self.loop = DecodeLoop(store, self.target, use_graphs=use_graphs, prefill_chunk=16, drives_backend=True)
        models: dict[str, Model] = {"main": self.target, "draft": self.draft, "context": self.context}
        self.caches = {kind: GraphCache(store, model, use_graphs=use_graphs) for kind, model in models.items()}
        self.texts: dict[pk.Sequence, list[int]] = {}

    def start(self, ids: list[int], output_tokens: int) -> pk.Sequence:
        """Activate, prefill the target, and append the prompt to the draft pool."""
        sequence = prefilled(self.loop, ids, output_tokens)
        self.texts[sequence] = []
        for first in range(0, len(ids), 16):
            chunk = ids[first : first + 16]
            tokens = np.array([chunk + [0] * (16 - len(chunk))], np.int32)
            self.append(self.store.batch([sequence]), tokens, [len(chunk)])
        return sequence

    def run(self, kind: str, batch: pk.Batch, tokens: Ints, *, live: list[int], written: list[int]) -> Ints:
        """Run one unit of a round and commit nothing; returns its next tokens."""
        pool = "main" if kind == "main" else "draft"
        width = tokens.shape[1]
        key = key_for(self.store.config, unit=kind, route="decode", batch=len(batch), width=width, pool=pool)
        graph = self.caches[kind].unit(key)
        self.unit = self.store.begin_unit(batch, {pool: written}, name=kind)
        graph.unit.control.write(batch.rows, self.unit.first_positions[pool], np.array(live, np.int32), tokens)
        graph.run()
        self.store.wait(self.unit)
        return graph.unit.control.read_next_tokens(len(batch))

    def append(self, batch: pk.Batch, tokens: Ints, counts: list[int]) -> None:
        """Append the first counts[b] columns to the draft pool and commit them."""
        device, stream = self.store.device, self.store.stream
        device.copy(self.context.counts[: len(batch)], np.array(counts, np.int32), stream)
        self.run("context", batch, tokens, live=[tokens.shape[1]] * len(batch), written=counts)
        self.store.commit(self.unit, {"draft": counts})

    def round(self, sequences: list[pk.Sequence], accepted: list[int]) -> None:
        """Draft a block, verify it, accept some columns, append those to the draft pool."""
        batch = self.store.batch(sequences)
        tokens = np.array([[(7 * column + len(self.texts[sequence])) % 1009 for column in range(WIDTH)]
                           for sequence in sequences], np.int32)
        full, none = [WIDTH] * len(batch), [0] * len(batch)
        drafted = self.run("draft", batch, tokens, live=full, written=none)
        self.store.commit(self.unit, {"draft": none})
        verified = self.run("main", batch, drafted, live=full, written=full)
        self.store.commit(self.unit, {"main": accepted})
        self.store.trim(batch)
        self.append(batch, verified, accepted)
        for sequence, *rows in zip(sequences, drafted.tolist(), verified.tolist(), strict=True):
            self.texts[sequence] += [token for row in rows for token in row]


def host(store: pk.Store, array: Any) -> npt.NDArray[Any]:
    """Copy a device array to the host, after everything on the stream."""
    copy = np.empty(array.shape, array.dtype)
    store.device.copy(copy, array, store.stream)
    store.stream.synchronize()
    return copy


ACCEPTED = ([5, 1, 0], [2, 5, 3], [0, 4, 5], [1, 1, 1], [5, 5, 5])


def speculate(store: pk.Store, chosen: list[int], *, use_graphs: bool = True) -> list[list[int]]:
    """Run the rounds of ACCEPTED for some of three sequences, in one batch."""
    rounds = Rounds(store, use_graphs=use_graphs)
    lengths = (61, 130, 510)
    sequences = [rounds.start(prompt(lengths[index], index), 40) for index in chosen]
    for accepted in ACCEPTED:
        rounds.round(sequences, [accepted[index] for index in chosen])
    for sequence in sequences:
        store.finish(sequence)
    return [rounds.texts[sequence] for sequence in sequences]


@pytest.mark.deferred
def test_rounds_decode_the_same_eagerly_alone_and_in_other_pages() -> None:
    """C14.6, C15.3, C3.6: draft, verify and context append, across pages and key groups, accepting 0 to W columns."""
    with opened() as store:
        together = speculate(store, [0, 1, 2])
        assert together == speculate(store, [0, 1, 2], use_graphs=False)
        assert together == [speculate(store, [index])[0] for index in range(3)]
        assert [together[index] for index in (2, 0, 1)] == speculate(store, [2, 0, 1])
    with opened() as store:
        shuffle_placement(store, seed=1)
        assert together == speculate(store, [0, 1, 2])
    assert len({tuple(text) for text in together}) == 3


def test_a_draft_block_meets_the_criterion_through_the_store() -> None:
    """C14.5, codecs 7: every row of a unit's last layer against FP64 over the pages that the store names."""
    with opened() as store:
        rounds = Rounds(store)
        sequences = [rounds.start(prompt(length, length), 40) for length in (61, 530)]
        rounds.round(sequences, [3, 5])
        rounds.run("draft", store.batch(sequences), np.ones((2, WIDTH), np.int32), live=[WIDTH, 2], written=[0, 0])
        store.commit(rounds.unit, {"draft": 0})
        view = store.views["draft"][-1]
        planes = {"k_code": host(store, view.k_pages), "v_code": host(store, view.v_pages)}
        last = {name: host(store, array) for name, array in rounds.draft.last.items()}

        for entry, (sequence, live) in enumerate(zip(sequences, (WIDTH, 2), strict=True)):
            tokens = store.committed_tokens(sequence, "draft")
            assert tokens == store.committed_tokens(sequence)
            rows = stored_rows("bf16", planes, order="head-major", pages=store.page_ids(sequence, "draft"),
                               tokens=tokens, kv_heads=DRAFT.kv_heads, head_dim=DRAFT.head_dim)
            q, k, v, out = (last[name][entry, :live] for name in ("q", "k", "v", "out"))
            CONTEXT_CRITERION.assert_met(out, attend_context(q, rows, k, v, scale=128**-0.5)[0])
            assert not last["out"][entry, live:].any()


# ---- target and draft side by side ---------------------------------------------------------------------------------
def test_target_and_draft_of_other_heads_each_get_a_graph() -> None:
    """S17: 24Q/4KV beside 16Q/8KV: both are captured, under keys of their own geometry; neither runs eagerly."""
    with opened() as store:
        rounds = Rounds(store)
        sequence = rounds.start(prompt(70, 1), 40)
        for _ in range(3):
            rounds.round([sequence], [2])

        nodes = {}
        for kind, cache in rounds.caches.items():
            for key, unit in cache._graphs.items():
                assert unit.graph is not None, f"{key} runs eagerly"
                assert key.geometry == (TARGET if kind == "main" else DRAFT)
                nodes[kind] = {node.name for node in unit.graph.nodes}
        assert {"main": 1, "draft": 1, "context": 2} == {kind: len(cache.replays()) for kind, cache
                                                         in rounds.caches.items()}
        assert {"causal_attention_decode", "append_rows"} <= nodes["main"]
        assert {"context_attention", "context_attention_merge"} <= nodes["draft"]
        assert "append_prefix" not in nodes["draft"]
        assert "append_prefix" in nodes["context"]


def test_a_draft_that_cannot_be_captured_is_an_error() -> None:
    """S17: no unit falls back to eager work in silence."""

    class Synchronizing(ToyDraft):
        def enqueue(self, unit: Unit) -> None:
            super().enqueue(unit)
            unit.stream.synchronize()

    with opened() as store:
        cache = GraphCache(store, Synchronizing(store))

        with pytest.raises(pk.CaptureRefused):
            cache.unit(key_for(store.config, unit="draft", route="decode", batch=1, width=4, pool="draft"))

        assert not cache.replays()
        assert not store.stream.is_capturing


@pytest.mark.deferred
def test_a_hundred_alternating_steps_keep_to_their_own_pool() -> None:
    """S9: each device table names pages of its own pool, the ledger's, through 100 draft and target steps."""
    with opened(max_context=256) as store:
        rounds = Rounds(store)
        sequences = [rounds.start(prompt(length, length), 120) for length in (60, 63, 9)]
        batch = store.batch(sequences)
        tokens = np.zeros((3, 1), np.int32)
        for step in range(100):
            rounds.run("draft", batch, tokens, live=[1] * 3, written=[0] * 3)
            store.commit(rounds.unit, {"draft": 0})
            tokens = rounds.run("main", batch, tokens, live=[1] * 3, written=[1] * 3)
            store.commit(rounds.unit, {"main": 1})
            rounds.append(batch, tokens, [1] * 3)
            if step % 10 == 9:
                for pool in store.config.pools:
                    table = host(store, store.block_tables[pool.name])
                    for sequence in sequences:
                        ids = store.page_ids(sequence, pool.name)
                        assert ids == table[sequence.row, : len(ids)].tolist()
                        assert all(0 <= page < pool.pages for page in ids)

        main, draft = ([set(store.page_ids(sequence, pool)) for sequence in sequences] for pool in ("main", "draft"))
        assert all(a.isdisjoint(b) for own in (main, draft) for a, b in ((own[0], own[1]), (own[1], own[2])))
        assert main != draft
        assert [160, 163, 109] == [store.committed_tokens(sequence, "draft") for sequence in sequences]


def test_the_units_of_a_round_reach_the_last_position() -> None:
    """S79: S = 128, a draft of 124..128 only reads; verify and append write up to 127, and both pools stop there."""
    with opened(max_context=128, concurrency=2) as store:
        rounds = Rounds(store)
        sequence = rounds.start(prompt(124, 0), 4)
        batch = store.batch([sequence])
        drafted = rounds.run("draft", batch, np.arange(WIDTH, dtype=np.int32)[np.newaxis], live=[WIDTH], written=[0])
        store.commit(rounds.unit, {"draft": 0})
        rounds.run("main", batch, drafted, live=[WIDTH - 1], written=[WIDTH - 1])
        store.commit(rounds.unit, {"main": WIDTH - 1})
        rounds.append(batch, drafted, [WIDTH - 1])

        for pool in ("main", "draft"):
            assert (store.committed_tokens(sequence, pool), len(store.page_ids(sequence, pool))) == (128, 2)
            with pytest.raises(pk.MisuseError, match="position 128"):
                store.begin_unit(batch, {pool: 1})


# ---- keys and refusals ---------------------------------------------------------------------------------------------
def test_the_key_of_a_draft_has_the_shape_of_the_draft_pool() -> None:
    """C15.2: profile, geometry and scale of this store's pool, or no unit; target and draft never share a graph."""
    with opened(profile="k8v4") as store, opened(draft=pk.KVGeometry(1, 4, 4, 64)) as other:
        keys = {pool: key_for(store.config, unit="u", route="decode", batch=1, width=1, pool=pool)
                for pool in ("main", "draft")}

        assert ("k8v4", TARGET, 64**-0.5) == (keys["main"].profile, keys["main"].geometry, keys["main"].scale)
        assert ("bf16", DRAFT, 128**-0.5) == (keys["draft"].profile, keys["draft"].geometry, keys["draft"].scale)
        for pool in ("mtp", None, ["draft"]):
            with pytest.raises(pk.MisuseError, match="one of"):
                key_for(store.config, unit="u", route="decode", batch=1, width=1, pool=pool)  # type: ignore[arg-type]
        with pytest.raises(pk.MisuseError, match="key_for"):
            Unit(store, key_for(other.config, unit="draft", route="decode", batch=1, width=1, pool="draft"))


def test_keys_of_main_and_mtp_of_equal_geometry_differ() -> None:
    """C15.2: the key holds the pool, and a unit of one does not attend in the other, whose frontier is another."""
    config = pk.StoreConfig(TARGET, profile="bf16", max_context=256, max_concurrency=1, backend=pk.MTPBackend(2),
                            kv_capacity=pk.ExplicitCapacity(256))
    main, mtp = (key_for(config, unit="u", route="decode", batch=1, width=1, pool=pool) for pool in ("main", "mtp"))
    assert main != mtp
    assert str(main) != str(mtp)
    with pk.open_store(config, device="cpu") as store:
        arrays = (store.device.zeros((1, 1, heads, 64), np.uint16) for heads in (24, 4, 4, 24))
        with pytest.raises(pk.MisuseError, match=r"key_for\(pool='main'"):
            Unit(store, mtp).attend(0, *arrays)


def test_attention_in_the_other_pool_is_refused() -> None:
    """S17, C15.2: a unit attends with its key's scale, so only in a pool of its key's shape; an append has none."""
    with opened() as store:
        keys = [key_for(store.config, unit="u", route="decode", batch=1, width=2, pool=pool)
                for pool in ("main", "draft")]
        main, draft = (Unit(store, key) for key in keys)
        zeros = store.device.zeros
        q, out = (zeros((1, 2, 24, 64), np.uint16) for _ in range(2))
        k, v = (zeros((1, 2, 4, 64), np.uint16) for _ in range(2))
        draft_q, draft_out = (zeros((1, 2, 16, 128), np.uint16) for _ in range(2))
        draft_k, draft_v = (zeros((1, 2, 8, 128), np.uint16) for _ in range(2))

        with pytest.raises(pk.MisuseError, match=r"key_for\(pool='draft'"):
            main.attend_context(0, draft_q, draft_k, draft_v, draft_out)
        with pytest.raises(pk.MisuseError, match=r"key_for\(pool='main'"):
            draft.attend(0, q, k, v, out)
        with pytest.raises(pk.MisuseError, match="head-major"):
            main.attend_context(0, q, k, v, out, pool="main")
        for layer, pool in ((2, "draft"), (-1, "draft"), (0, "mtp")):
            with pytest.raises(pk.MisuseError, match="count layers from 0"):
                draft.attend_context(layer, draft_q, draft_k, draft_v, draft_out, pool=pool)
            with pytest.raises(pk.MisuseError, match="count layers from 0"):
                draft.append_context(layer, draft_k, draft_v, main.valid_columns, pool=pool)
        with pytest.raises(pk.MisuseError, match="counts was refused"):
            draft.append_context(0, draft_k, draft_v, zeros((2,), np.int32))
        main.append_context(0, draft_k, draft_v, store.device.zeros((1,), np.int32))
