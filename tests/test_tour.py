"""The newcomer's walk: from a configuration to tokens, one idea a test, in reading order.

Everything here runs on the `cpu` device, with the kernels of a GPU, compiled by the system's C++ compiler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.graphs import DecodeLoop
from pagedkv.values.planes import PlaneGeometry
from tests.bf16 import bf16_from_f32
from tests.placement import shuffle_placement
from tests.toy_model import ToyModel, decode_all, prefilled

GEOMETRY = pk.KVGeometry(layers=1, query_heads=4, kv_heads=2, head_dim=64)


@contextlib.contextmanager
def small_store(profile: str = "bf16") -> Iterator[pk.Store]:
    """Open a store of one layer, 256 tokens a sequence, two sequences, eight pages; check it at the end."""
    config = pk.StoreConfig(GEOMETRY, profile=profile, max_context=256, max_concurrency=2,
                            kv_capacity=pk.ExplicitCapacity(512))
    with pk.open_store(config, device="cpu") as store:
        yield store
        store.check()


def test_1_a_page_is_64_tokens_and_a_plane_is_a_strided_slab() -> None:
    """C2, C3.7: the address of position 70, KV head 1, in page group 5 of a page-major BF16 plane."""
    plane = PlaneGeometry("k_code", 0, np.dtype(np.uint16), 64, kv_heads=2, pages=8, order="page-major")

    assert plane.shape == (8, 2, 64, 64)
    assert plane.page_stride_bytes == 2 * 64 * 64 * 2
    assert 70 >> 6 == 1, "position 70 lies in block 1"
    assert 70 & 63 == 6, "at offset 6 of its page"
    address = 5 * plane.page_stride_bytes + 1 * plane.head_stride_bytes + 6 * plane.row_bytes
    slab = np.arange(plane.span_bytes // 2, dtype=np.uint32).reshape(plane.shape)
    assert 2 * slab[5, 1, 6, 0] == address == 90_880


def test_2_an_activation_reserves_the_whole_budget_and_maps_nothing() -> None:
    """C9.2, C6.2: prompt and output are promised in pages; nothing is mapped before a unit needs it."""
    with small_store() as store:
        sequence = store.activate(prompt_tokens=100, output_tokens=60)
        summary = store.memory_summary()["main"]

        assert (summary["allocated_pages"], summary["reserved_pages"], summary["available_pages"]) == (0, 3, 5)
        assert store.page_ids(sequence) == []


def test_3_no_room_is_an_answer() -> None:
    """C10.9: a Refusal carries the numbers; `forever` says whether waiting helps."""
    with small_store() as store:
        store.activate(prompt_tokens=200, output_tokens=56)
        store.activate(prompt_tokens=200, output_tokens=56)

        assert store.try_activate(prompt_tokens=1, output_tokens=0) == pk.Refusal(
            "rows", 1, 0, forever=False, reason="rows"
        )
        assert store.try_activate(prompt_tokens=256, output_tokens=1) == pk.Refusal(
            "main", 5, 4, forever=True, reason="context"
        )
        with pytest.raises(pk.ActivationRefused, match="activation of 256"):
            store.activate(prompt_tokens=256, output_tokens=1)


def test_4_a_unit_maps_publishes_freezes_and_commits() -> None:
    """C9.4, C11.2, C12: from begin to commit the rows are frozen; the frontier moves at commit only."""
    with small_store() as store:
        sequence = store.activate(prompt_tokens=70, output_tokens=10)
        batch = store.batch([sequence])
        unit = store.begin_unit(batch, 70, name="prefill")

        assert len(store.page_ids(sequence)) == 2
        with pytest.raises(pk.UnitInFlight, match="prefill#1"):
            store.finish(sequence)
        assert store.committed_tokens(sequence) == 0
        store.wait(unit)
        store.commit(unit)
        assert store.committed_tokens(sequence) == 70


def test_5_speculation_maps_ahead_accepts_some_and_trims_the_rest() -> None:
    """C9.6, C13: a rejected tail's page returns to the same reservation; available never moves."""
    with small_store() as store:
        sequence = store.activate(prompt_tokens=62, output_tokens=66)
        batch = store.batch([sequence])
        for columns, accepted in ((62, 62), (4, 1)):
            unit = store.begin_unit(batch, columns)
            store.wait(unit)
            store.commit(unit, accepted)
        available = store.memory_summary()["main"]["available_pages"]

        assert store.committed_tokens(sequence) == 63
        assert store.trim(batch) == 1
        assert len(store.page_ids(sequence)) == 1
        assert store.memory_summary()["main"]["available_pages"] == available


def test_6_kernels_read_pages_through_the_table() -> None:
    """C14.4: append then attend; one key only, so the output is that key's value, wherever its page lies."""
    with small_store() as store:
        shuffle_placement(store, seed=1)
        sequence = store.activate(prompt_tokens=1, output_tokens=1)
        unit = store.begin_unit(store.batch([sequence]), 1)
        device = store.device
        value = bf16_from_f32(np.random.default_rng(0).standard_normal((1, 1, 2, 64)).astype(np.float32))
        q, out = device.zeros((1, 1, 4, 64), np.uint16), device.zeros((1, 1, 4, 64), np.uint16)
        k, v = device.zeros((1, 1, 2, 64), np.uint16), device.zeros((1, 1, 2, 64), np.uint16)
        positions, rows = device.zeros((1,), np.int32), device.zeros((1,), np.int32)
        device.copy(v, value, store.stream)
        store.ops.causal_attention(store.views["main"][0], q, k, v, out, positions, rows, route="decode",
                                   workspace=store.workspace, stream=store.stream)
        store.wait(unit)
        store.commit(unit)
        result = np.empty((1, 1, 4, 64), np.uint16)
        device.copy(result, out, store.stream)
        store.stream.synchronize()

        assert np.array_equal(result[0, 0, 0], value[0, 0, 0])
        assert np.array_equal(result[0, 0, 3], value[0, 0, 1]), "heads 2 and 3 share KV head 1"


def test_7_a_loop_decodes_by_replaying_one_graph() -> None:
    """C15: one shape, one graph; page ids and lengths are content, never key."""
    with small_store("k8v4") as store:
        loop = DecodeLoop(store, ToyModel(store))
        sequences = [prefilled(loop, list(range(60)), 9) for _ in range(2)]
        first, second = decode_all(loop, sequences)

        assert first == second, "equal prompts in one batch decode the same"
        assert len(first) == 9
        decode = [runs for key, runs in loop.graphs.replays().items() if key.startswith("decode")]
        assert decode == [8]
        for sequence in sequences:
            store.finish(sequence)
        assert store.memory_summary()["main"]["available_pages"] == 8


def test_8_a_continuation_is_forked_moved_and_released() -> None:
    """C10: full pages are shared, a partial tail is copied, a Move keeps every page; the last reference frees."""
    with small_store() as store:
        first = store.activate(prompt_tokens=100, output_tokens=20)
        unit = store.begin_unit(store.batch([first]), 100)
        store.wait(unit)
        store.commit(unit)
        saved = store.finish(first, retain=True, state="what the model needs besides")
        assert saved is not None
        fork = store.activate(source=saved, frontier=70, prompt_tokens=10, output_tokens=10)

        assert store.committed_tokens(fork) == 70
        assert store.page_ids(fork)[0] == store.page_ids(saved)[0]
        assert store.page_ids(fork)[1] != store.page_ids(saved)[1]
        pages = store.page_ids(saved)
        moved = store.activate(source=saved, keep_source=False, prompt_tokens=10, output_tokens=10)
        assert store.page_ids(moved) == pages
        with pytest.raises(pk.StaleHandle, match="released or moved"):
            store.state_of(saved)
        store.finish(fork)
        store.finish(moved)
        assert store.memory_summary()["main"]["available_pages"] == 8
