"""A small model whose text changes with every flipped bit, and the calls that tests of the decode loop share.

A hash of the token, its position and the bits of the previous layer's attention output picks queries, keys and values
from fixed tables.  The next token is a hash of the last output's bits.  So equal tokens mean equal bits in every layer
of every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

import pagedkv as pk
from pagedkv.graphs import DecodeLoop, Unit
from tests.bf16 import bf16_from_f32
from tests.placement import shuffle_placement

TABLE_ROWS = 257


class ToyModel:
    """Random tables on the device; one attention per layer, no linear algebra."""

    def __init__(self, store: pk.Store, *, seed: int = 7, vocabulary: int = 1009) -> None:
        geometry = store.config.geometry
        self.geometry = geometry
        self.vocabulary = vocabulary
        random = np.random.default_rng(seed)
        self.q_table = random_table(store, random, geometry.query_heads, geometry.head_dim)
        self.k_table = random_table(store, random, geometry.kv_heads, geometry.head_dim)
        self.v_table = random_table(store, random, geometry.kv_heads, geometry.head_dim)
        self.enqueue_count = 0

    def enqueue(self, unit: Unit) -> None:
        """Enqueue all layers; counts how often it is called."""
        self.enqueue_count += 1
        rows = (unit.batch, unit.width)
        q = unit.empty((*rows, self.geometry.query_heads, self.geometry.head_dim), np.uint16)
        out = unit.empty((*rows, self.geometry.query_heads, self.geometry.head_dim), np.uint16)
        k = unit.empty((*rows, self.geometry.kv_heads, self.geometry.head_dim), np.uint16)
        v = unit.empty((*rows, self.geometry.kv_heads, self.geometry.head_dim), np.uint16)
        state = unit.empty(rows, np.int64)
        unit.call(toy_start, unit.tokens, unit.first_positions, state)
        for layer in range(self.geometry.layers):
            unit.call(toy_project, state, layer, self.q_table, self.k_table, self.v_table, q, k, v)
            unit.attend(layer, q, k, v, out)
            unit.call(toy_mix, out, state)
        unit.call(toy_sample, state, self.vocabulary, unit.next_tokens)


def toy_start(tokens: Any, first_positions: Any, state: Any) -> None:
    """state (B, W) int64 = a hash of token and position."""
    positions = first_positions[:, None] + np.arange(tokens.shape[1], like=tokens)
    state[...] = tokens.astype(np.int64) * 7919 + positions * 104729


def toy_project(state: Any, layer: int, q_table: Any, k_table: Any, v_table: Any, q: Any, k: Any, v: Any) -> None:
    """Pick rows of the tables by the state's hash."""
    index = (state + layer * 31) % TABLE_ROWS
    q[...] = q_table[index]
    k[...] = k_table[(index * 3 + 1) % TABLE_ROWS]
    v[...] = v_table[(index * 5 + 2) % TABLE_ROWS]


def toy_mix(out: Any, state: Any) -> None:
    """Fold the bits of an attention output (B, W, Hq, D) into the state."""
    bits = out.reshape(*out.shape[:2], -1).astype(np.int64)
    weights = np.arange(bits.shape[-1], like=bits) * 2 + 1
    state[...] = (state * 1_000_003 + (bits * weights).sum(axis=-1)) % 2_147_483_647


def toy_sample(state: Any, vocabulary: int, next_tokens: Any) -> None:
    """The next token is the state's hash."""
    next_tokens[...] = state % vocabulary


@contextlib.contextmanager
def opened_store(
    geometry: pk.KVGeometry, *, max_context: int, concurrency: int, profile: str = "bf16", tokens: int | None = None,
    device: pk.Device | str = "cpu", placement_seed: int | None = None, **options: Any,
) -> Iterator[pk.Store]:
    """Open a store with pages for every row, or for `tokens`, scattered by a seed; check it at the end."""
    capacity = pk.ExplicitCapacity(tokens or concurrency * -(-max_context // 64) * 64)
    config = pk.StoreConfig(geometry, profile=profile, max_context=max_context, max_concurrency=concurrency,
                            kv_capacity=capacity, **options)
    with pk.open_store(config, device=device) as store:
        if placement_seed is not None:
            shuffle_placement(store, seed=placement_seed)
        yield store
        store.check()


def random_table(store: pk.Store, random: np.random.Generator, heads: int, head_dim: int) -> Any:
    """Return (TABLE_ROWS, heads, head_dim) random BF16 bits on the device."""
    values = bf16_from_f32(random.standard_normal((TABLE_ROWS, heads, head_dim)).astype(np.float32))
    table = store.device.empty(values.shape, np.uint16)
    store.device.copy(table, values, store.stream)
    store.stream.synchronize()
    return table


def prompt(tokens: int, seed: int) -> list[int]:
    """Return random token ids."""
    ids: list[int] = np.random.default_rng(seed).integers(0, 1009, tokens).tolist()
    return ids


def run_unit(store: pk.Store, sequence: pk.Sequence, columns: int | dict[str, int],
             accepted: int | dict[str, int] | None = None) -> None:
    """Begin, complete and commit a unit of one sequence; nothing is launched."""
    unit = store.begin_unit(store.batch([sequence]), columns)
    store.wait(unit)
    store.commit(unit, accepted)


def retained(store: pk.Store, sequence: pk.Sequence, state: object = "complete") -> pk.Continuation:
    """Finish a sequence and return its continuation; the state belongs to what each pool has committed."""
    committed = {pool.name: store.committed_tokens(sequence, pool.name) for pool in store.config.pools}
    saved = store.finish(sequence, retain=True, state=state, state_frontier=committed)
    assert saved is not None
    return saved


def prefilled(loop: DecodeLoop, ids: list[int], output_tokens: int) -> pk.Sequence:
    """Activate a sequence for a prompt and its output, and prefill it."""
    sequence = loop.store.activate(prompt_tokens=len(ids), output_tokens=output_tokens)
    loop.prefill(sequence, ids)
    return sequence


def decode_all(
    loop: DecodeLoop, sequences: list[pk.Sequence], *, stop_tokens: Iterable[int] = (),
    after_step: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """Decode sequences to their end; return the new tokens of each."""
    texts: dict[pk.Sequence, list[int]] = {sequence: [] for sequence in sequences}
    for tokens in loop.decode(sequences, stop_tokens=stop_tokens):
        for sequence, new in tokens.items():
            texts[sequence] += new
        after_step()
    return list(texts.values())
