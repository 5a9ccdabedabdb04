"""Speculation on a device: the bytes that a consumer reads after verify, reject, trim and truncate.  (C9.6, C9.10, C13)

A tag in every written row names its position and the number of its launch.  A consumer reads through the table; below
the frontier it must read the rows that were accepted last.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest

import pagedkv as pk
from pagedkv.graphs import DecodeLoop
from pagedkv.graphs.key import key_for
from tests.toy_model import ToyModel, decode_all, opened_store, prefilled, retained

GEOMETRY = pk.KVGeometry(layers=1, query_heads=2, kv_heads=2, head_dim=16)
DRAFT = pk.DraftFullBackend(pk.KVGeometry(layers=1, query_heads=2, kv_heads=2, head_dim=64))
BACKENDS = [pk.MTPBackend(5), DRAFT]
Tags = npt.NDArray[np.int64]


def opened(
    backend: pk.MTPBackend | pk.DraftFullBackend | None, *, max_context: int = 320, geometry: pk.KVGeometry = GEOMETRY
) -> AbstractContextManager[pk.Store]:
    """Open a store of two rows and scattered pages in sanitizer mode: an unwritten page is NaN."""
    return opened_store(geometry, max_context=max_context, concurrency=2, placement_seed=3, backend=backend,
                        sanitizer=True)


def append_tags(store: pk.Store, pool: str, row: int, first: int, width: int, live: int, launch: int) -> None:
    """Append `live` of `width` columns in every layer of a pool, each tagged with its position and the launch."""
    device, stream = store.device, store.stream
    tags = np.zeros((1, width, 1, 4), np.uint16)
    tags[0, :, 0, 0] = first + np.arange(width)
    tags[0, :, 0, 1] = launch
    for view in store.views[pool]:
        repeat = view.head_dim // 4
        rows = np.tile(np.repeat(tags, view.num_kv_heads, axis=2), (1, 1, 1, repeat))
        k, v = device.empty(rows.shape, np.uint16), device.empty(rows.shape, np.uint16)
        selectors = device.empty((3, 1), np.int32)
        device.copy(k, rows, stream)
        device.copy(v, rows, stream)
        device.copy(selectors, np.array([[first], [row], [live]], np.int32), stream)
        stream.synchronize()
        store.ops.append(view, k, v, selectors[0], selectors[1], valid_columns=selectors[2], stream=stream)


def read_tags(store: pk.Store, pool: str, row: int, tokens: int) -> Tags:
    """Return (tokens, 2): position and launch of each row that a consumer reads below a frontier; all planes agree."""
    store.stream.synchronize()
    planes = []
    for view in store.views[pool]:
        for plane in (view.k_pages, view.v_pages):
            by_page = plane if view.order == "page-major" else np.moveaxis(plane, 1, 0)
            rows = np.zeros((tokens, view.num_kv_heads, view.head_dim), np.int64)
            for position in range(tokens):
                page_id = int(store.block_tables[pool][row, position >> 6])
                rows[position] = by_page[page_id, :, position & 63]
            planes.append(rows.reshape(tokens, view.num_kv_heads * view.head_dim // 4, 4))
    tags: Tags = planes[0][:, 0, :2]
    for rows in planes:
        assert (rows[..., :2] == tags[:, None]).all(), "heads, planes or layers of a position disagree"
    return tags


class Tagged:
    """A sequence with a tag in every row, and the tags that a consumer must read."""

    def __init__(self, store: pk.Store, prompt_tokens: int, output_tokens: int) -> None:
        self.store = store
        self.sequence = store.activate(prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        self.expected: dict[str, list[tuple[int, int]]] = {pool: [] for pool in store.views}
        self.launches = 0

    def unit(self, columns: dict[str, int], accepted: dict[str, int]) -> None:
        """Write columns in every named pool, accept some, and expect those."""
        batch = self.store.batch([self.sequence])
        unit = self.store.begin_unit(batch, columns)
        self.launches += 1
        for pool, count in columns.items():
            first = int(unit.first_positions[pool][0])
            append_tags(self.store, pool, self.sequence.row, first, max(count, 1), count, self.launches)
            self.expected[pool] += [(position, self.launches) for position in range(first, first + accepted[pool])]
        self.store.wait(unit)
        self.store.commit(unit, accepted)

    def trim(self, pool: str, provisional: int = 0) -> int:
        """Trim one pool."""
        return self.store.trim(self.store.batch([self.sequence]), pool, provisional)

    def truncate(self, pool: str, tokens: int) -> None:
        """Set a frontier back."""
        self.store.truncate(self.sequence, tokens, pool)
        del self.expected[pool][tokens:]

    def compare(self) -> None:
        """Read every pool through its table and compare."""
        for pool, expected in self.expected.items():
            assert self.store.committed_tokens(self.sequence, pool) == len(expected)
            tags = read_tags(self.store, pool, self.sequence.row, len(expected))
            assert tags.tolist() == [list(tag) for tag in expected], f"pool {pool}"


@pytest.mark.parametrize("backend", BACKENDS, ids=["mtp", "draft"])
def test_s86_trim_and_truncate_move_counters_and_bytes(backend: pk.MTPBackend | pk.DraftFullBackend, seed: int) -> None:
    """S86: 60 random rounds of two rows; after each step of each pool a consumer reads what was accepted last."""
    rng = random.Random(seed)
    with opened(backend) as store:
        rows = [Tagged(store, 200, 100), Tagged(store, 150, 150)]
        for _ in range(60):
            row = rng.choice(rows)
            columns = {pool: min(rng.choice((1, 6, 40)), 300 - len(tags)) for pool, tags in row.expected.items()}
            row.unit(columns, {pool: rng.randint(0, count) for pool, count in columns.items()})
            pool = rng.choice(list(row.expected))
            if rng.random() < 0.6:
                row.trim(pool, rng.choice((0, 0, 10)))
            else:
                row.truncate(pool, rng.randint(len(row.expected[pool]) // 2, len(row.expected[pool])))
            for each in rows:
                each.compare()


def test_s85_a_hand_over_rewrites_what_the_draft_left_behind() -> None:
    """S85, C13.3: the draft leads by 4 unverified rows; after truncate and a fork the new owner's rows replace them.

    A verify's rejected rows lie in the page until they are written again (C13.2).  Its accepted rows are in what the
    last round retains, and its rejected page is available at once.
    """
    with opened(pk.MTPBackend(5)) as store:
        whole = {pool: numbers["available_pages"] for pool, numbers in store.memory_summary().items()}
        row = Tagged(store, 100, 50)
        row.unit({"main": 70, "mtp": 70}, {"main": 70, "mtp": 70})
        row.unit({"mtp": 4}, {"mtp": 4})
        for leave in (partial(store.finish, retain=True, state=1), store.snapshot):
            with pytest.raises(pk.MisuseError, match="truncate it first"):
                leave(row.sequence)
        row.truncate("mtp", 70)
        row.unit({"main": 59, "mtp": 58}, {"main": 58, "mtp": 57})
        assert read_tags(store, "main", row.sequence.row, 129)[128].tolist() == [128, 3], "rejected, and still there"
        saved = retained(store, row.sequence)
        left = {pool: whole[pool] - numbers["available_pages"] for pool, numbers in store.memory_summary().items()}
        assert left == {"main": 2, "mtp": 2}
        assert (store.committed_tokens(saved), store.committed_tokens(saved, "mtp")) == (128, 127)

        row.sequence = store.activate(source=saved, prompt_tokens=20, output_tokens=10)
        row.compare()
        row.unit({"main": 5, "mtp": 5}, {"main": 5, "mtp": 5})
        row.compare()
        store.finish(row.sequence)
        row.sequence = store.activate(source=saved, prompt_tokens=20, output_tokens=10, keep_source=False)
        for pool, tags in row.expected.items():
            del tags[128 if pool == "main" else 127 :]
        row.compare()


# ---- tokens ----------------------------------------------------------------------------------------
def verify(store: pk.Store, loop: DecodeLoop, sequence: pk.Sequence, tokens: list[int]) -> list[int]:
    """Run one verify unit in the decode route, commit the accepted columns; return the token sampled after each."""
    width = len(tokens)
    key = key_for(store.config, unit="verify", route="decode", batch=1, width=width)
    graph = loop.graphs.unit(key)
    batch = store.batch([sequence])
    unit = store.begin_unit(batch, width, name="verify")
    graph.unit.control.write(batch.rows, unit.first_positions["main"], width, np.array([tokens], np.int32))
    graph.run()
    store.wait(unit)
    sampled: list[int] = graph.unit.control.read_next_tokens(1)[0].tolist()
    agreed = next((index for index, token in enumerate(tokens[1:]) if token != sampled[index]), width - 1)
    store.commit(unit, 1 + agreed)
    store.trim(batch)
    return sampled[: 1 + agreed]


def plain(prompt: list[int], new_tokens: int) -> list[int]:
    """Return the tokens of a fresh run, one token a step."""
    with opened(pk.MTPBackend(5), geometry=TOY) as store:
        loop = DecodeLoop(store, ToyModel(store), drives_backend=True)
        return decode_all(loop, [prefilled(loop, prompt, new_tokens)])[0]


TOY = pk.KVGeometry(layers=2, query_heads=4, kv_heads=2, head_dim=64)


@pytest.mark.parametrize("drafts", [lambda text: text, lambda text: [text[0], 0, 0, 0, 0], lambda text: [0] * 5],
                         ids=["all right", "one right", "all wrong"])
def test_94_a_stop_at_a_page_boundary_continues_like_a_fresh_run(drafts: Callable[[list[int]], list[int]]) -> None:
    """94: prompt 63, verify of six columns, stopped at 64; the second request goes on token for token.  (C14.6)"""
    prompt = [(37 * i) % 1009 for i in range(63)]
    reference = plain(prompt, 40)
    with opened(pk.MTPBackend(5), geometry=TOY) as store:
        loop = DecodeLoop(store, ToyModel(store), drives_backend=True)
        first = prefilled(loop, prompt, 40)
        start = loop.last_token(first)
        assert start == reference[0]
        verified = verify(store, loop, first, [start, *drafts(reference[1:6])])
        assert verified == reference[1 : 1 + len(verified)]
        store.truncate(first, 64)
        assert len(store.page_ids(first)) == 1
        saved = retained(store, first, reference[1])
        second = store.activate(source=saved, prompt_tokens=0, output_tokens=39)
        assert store.page_ids(second) == store.page_ids(saved)
        loop.resume(second, reference[1])
        assert decode_all(loop, [second]) == [reference[2:]]


def test_speculated_equals_plain(seed: int) -> None:
    """C13, C14.6: drafts that are right, wrong and partly right; the text is the plain run's, across three pages."""
    rng = random.Random(seed)
    prompt = [(41 * i) % 1009 for i in range(50)]
    reference = plain(prompt, 150)
    with opened(pk.MTPBackend(5), geometry=TOY) as store:
        loop = DecodeLoop(store, ToyModel(store), drives_backend=True)
        sequence = prefilled(loop, prompt, 150)
        text = [loop.last_token(sequence)]
        while len(text) < 150:
            columns = min(6, 150 - len(text))
            draft = [token if rng.random() < 0.7 else 0 for token in reference[len(text) : len(text) + columns - 1]]
            text += verify(store, loop, sequence, [text[-1], *draft])
            assert store.committed_tokens(sequence) == 50 + len(text) - 1

    assert text == reference
