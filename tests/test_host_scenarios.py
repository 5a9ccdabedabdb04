"""How other systems' Host tiers failed, tried on this one (the scenarios S27 to S83 that test_host_tier.py leaves)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.graphs import DecodeLoop, LeastRecent, RetainedText
from tests.host.test_bulk_cost import calls_of
from tests.test_host_tier import finish_copies, is_free, kept_tokens, opened
from tests.test_sharing import GEOMETRY, rows_of, write
from tests.toy_model import ToyModel, opened_store, prompt, retained, run_unit

RECORD = 2 * 2 * 2 * 64 * 64 * 2
"""Bytes of a Host page of GEOMETRY in bf16: layers, K and V, heads, tokens, head_dim, bytes."""


@contextmanager
def on_no_device(**options: Any) -> Iterator[pk.Store]:
    """Open a store whose ledgers are real and whose bytes are not."""
    with opened_store(GEOMETRY, device="none", **options) as store:
        yield store


@pytest.mark.deferred
@pytest.mark.parametrize("seed", range(3))
def test_s27_an_abort_with_a_page_coming_and_a_page_going(seed: int) -> None:
    """S27: a staged fork restores two pages and sends a tail; whichever ends first, the pages return after both."""
    with opened(tokens=8 * 64) as store:
        head = kept_tokens(store, 128, seed)
        fork = store.activate(source=head, prompt_tokens=22, output_tokens=0)
        write(store, fork, 22, seed=seed + 5)
        kept = retained(store, fork)
        before = rows_of(store, kept)
        store.demote(head)
        assert [page >= 0 for page in store.page_ids(kept)] == [False, False, True]
        blocker = store.activate(prompt_tokens=5 * 64, output_tokens=0)
        sequence = store.activate(source=kept, prompt_tokens=1, output_tokens=0, allow_demote_source=True, wait=False)
        if store.is_restoring(sequence):
            available = store.memory_summary()["main"]["available_pages"]
            assert store.abort(sequence) is False
            if store.poll_copies():
                assert store.memory_summary()["main"]["available_pages"] == available
            finish_copies(store)
        else:
            assert store.abort(sequence)
        with pytest.raises(pk.StaleHandle):
            store.is_restoring(sequence)
        store.finish(blocker)
        assert rows_of(store, store.activate(source=kept, prompt_tokens=1, output_tokens=0)) == before


@pytest.mark.deferred
def test_s33_pins_return_to_zero_when_a_hit_is_not_used() -> None:
    """S33: fifty claims of a prefix that is on both tiers, each given up."""
    with opened() as store:
        kept = kept_tokens(store, 150)
        store.demote(kept)
        store.finish(store.activate(source=kept, prompt_tokens=1, output_tokens=1))
        inspection = store.inspect().pools["main"]
        assert (inspection.host >= 0).sum() == 3
        for _ in range(50):
            store.abort(store.activate(source=kept, prompt_tokens=1, output_tokens=1, wait=False))
            finish_copies(store)
            assert not store.inspect().pools["main"].pins.any()
        store.release(kept)
        assert is_free(store)


@pytest.mark.parametrize("tokens", [64, 100, 128, 149])
def test_s43_a_restored_prefix_and_the_rest_of_a_prompt_are_a_cold_prefill(tokens: int) -> None:
    """S43, C14.6: hits at every kind of frontier, out of the Host onto scattered pages, bit for bit."""
    ids = prompt(150, 1)
    with opened() as store:
        loop = DecodeLoop(store, ToyModel(store), prefill_chunk=16)
        cold = store.activate(prompt_tokens=150, output_tokens=8)
        loop.prefill(cold, ids)
        expected, token = rows_of(store, cold), loop.last_token(cold)
        loop.forget(cold)
        kept = retained(store, cold)
        store.demote(kept)
        hit = store.activate(source=kept, frontier=tokens, prompt_tokens=150 - tokens, output_tokens=8)
        loop.prefill(hit, ids[tokens:], last_token=None)

        assert (rows_of(store, hit), loop.last_token(hit)) == (expected, token)


@pytest.mark.parametrize("seed", range(4))
def test_s48_counters_of_both_tiers_add_up_under_demotion(seed: int) -> None:
    """S48: a full pool, a thousand admissions that demote, drop and release for room; sums are constant."""
    rng = random.Random(seed)
    with on_no_device(max_context=320, concurrency=8, tokens=24 * 64, host_arena_bytes=20 * RECORD) as store:
        kept: list[pk.Continuation] = []
        admitted = refused = 0
        for _ in range(1000):
            source = rng.choice(kept) if kept and rng.random() < 0.3 else None
            answer = store.try_activate(prompt_tokens=rng.randint(1, 120), output_tokens=0, source=source,
                                        allow_demote_source=source is not None and rng.random() < 0.5)
            admitted += isinstance(answer, pk.Sequence)
            if isinstance(answer, pk.Sequence):
                run_unit(store, answer, 1)
                kept.append(retained(store, answer))
            elif kept:
                refused += 1
                victim = rng.choice(kept)
                act = rng.choice((store.demote, store.demote, store.drop_device, store.drop_host, store.release))
                act(victim)
                if act == store.release:
                    kept.remove(victim)
            summary, host = store.memory_summary()["main"], store.host_summary()
            assert 0 <= summary["available_pages"] <= summary["capacity_pages"] == 24
            assert 0 <= host["used_bytes"] <= host["capacity_bytes"] == 20 * RECORD
            assert host["used_bytes"] + host["free_bytes"] == host["capacity_bytes"]
            pools = store.inspect().pools["main"]
            assert int((pools.host >= 0).sum()) * RECORD == host["used_bytes"]
        store.check()
        assert admitted > 100
        assert refused > 100
        for one in kept:
            store.release(one)
        assert is_free(store)


@pytest.mark.deferred
def test_s50_the_record_that_a_restore_reads_stays() -> None:
    """S50: an arena of two records, one of them being restored; another demotion finds no room, and drops none."""
    with opened(host_arena_bytes=2 * RECORD) as store:
        first, second, third = (kept_tokens(store, 64, seed) for seed in range(3))
        before = rows_of(store, first)
        for one in (first, second):
            assert store.demote(one) == 1
        sequence = store.activate(source=first, prompt_tokens=1, output_tokens=0, wait=False)
        assert store.demote(third, wait=False) == pk.Refusal("main", 1, 0, forever=False, reason="host")
        while store.is_restoring(sequence):
            store.poll_copies()
        assert rows_of(store, sequence) == before
        assert store.drop_host(first) == 0, "an active sequence uses the page"
        store.finish(sequence)
        assert store.drop_host(first) == RECORD
        assert store.demote(third) == 1


@pytest.mark.parametrize("steps", [250, pytest.param(10_000, marks=pytest.mark.long)])
def test_s54_a_soak_beyond_the_device(steps: int) -> None:
    """S54: 96 sequences, pages for 30 % of them, copies beside writes; every page has the bytes that were written."""
    rng = random.Random(steps)
    pages = 96 * 2 * 3 // 10
    with opened_store(GEOMETRY, max_context=320, concurrency=8, tokens=pages * 64, placement_seed=7,
                      host_arena_bytes=400 * RECORD, retained_tokens=96 * 320) as store:
        kept: list[pk.Continuation | None] = [None] * 96
        bytes_of: list[list[bytes]] = [[] for _ in range(96)]
        running: dict[pk.Sequence, int] = {}
        restored = 0
        for step in range(steps):
            store.poll_copies()
            number = rng.randrange(96)
            if number not in running.values():
                source, tokens = kept[number], rng.randint(1, 40)
                if source is not None and store.committed_tokens(source) > 200 and store.demote(source) is not None:
                    store.release(source)
                    kept[number], source, bytes_of[number] = None, None, []
                answer = store.try_activate(prompt_tokens=tokens, output_tokens=0, source=source, wait=False,
                                            keep_source=source is None)
                if isinstance(answer, pk.Sequence):
                    restored += store.is_restoring(answer)
                    running[answer], kept[number] = number, None
                else:
                    for victim in rng.sample([one for one in kept if one is not None], min(8, 96 - kept.count(None))):
                        store.demote(victim, wait=False)
            for sequence in [one for one in running if not store.is_restoring(one) and rng.random() < 0.4]:
                number = running.pop(sequence)
                was = bytes_of[number]
                assert not was or rows_of(store, sequence) == was, f"conversation {number} at step {step}"
                covered = int(store.covered_columns(store.batch([sequence]))[0])
                write(store, sequence, rng.randint(1, covered), seed=step)
                bytes_of[number] = rows_of(store, sequence)
                kept[number] = retained(store, sequence)
        finish_copies(store)
        assert restored > steps // 20


def test_s55_heads_and_tokens_are_told_apart() -> None:
    """S55: as many KV heads as tokens in a page; views and records say which axis is which, and bytes come back."""
    geometry = pk.KVGeometry(layers=1, query_heads=64, kv_heads=64, head_dim=64)
    found = {}
    for heads in (2, 64):
        shape = geometry if heads == 64 else pk.KVGeometry(layers=1, query_heads=32, kv_heads=2, head_dim=64)
        with opened_store(shape, max_context=128, concurrency=2, placement_seed=2, host_arena_bytes=8 << 20) as store:
            view = store.views["main"][0]
            planes = store.config.pools[0].planes
            found[heads] = (view.storage, view.order, planes[0].page_bytes, store.config.pools[0].record_bytes)
            assert view.k_pages.shape == (4, heads, 64, 64)
            kept = kept_tokens(store, 100)
            before = rows_of(store, kept)
            store.demote(kept)
            assert rows_of(store, store.activate(source=kept, prompt_tokens=1, output_tokens=0)) == before
    assert found[2][:2] == found[64][:2] == (pk.PROFILES["bf16"], "page-major")
    assert [32 * one for one in found[2][2:]] == list(found[64][2:])


def test_s83_making_room_costs_as_much_among_many_as_among_few() -> None:
    """S83: 200 admissions of a page each, among 1,000 retained pages and among 4,000; calls are counted, not timed."""
    counts = []
    for pages in (1_000, 4_000):
        with on_no_device(max_context=64, concurrency=2, tokens=pages * 64, retained_tokens=1 << 20) as store:
            policy = LeastRecent()
            for number in range(pages):
                keep_one(store, policy, number)

            def admit(store: pk.Store = store, policy: LeastRecent = policy, pages: int = pages) -> None:
                for number in range(pages, pages + 200):
                    refusal = store.try_activate(prompt_tokens=64, output_tokens=0)
                    assert isinstance(refusal, pk.Refusal)
                    assert policy.make_room(store, refusal, None)
                    keep_one(store, policy, number)

            counts.append(calls_of(admit))
            assert policy.counters.evicted_pages == 200
            policy.release_all(store)
    assert counts[1] < 1.05 * counts[0]


def keep_one(store: pk.Store, policy: LeastRecent, seed: int) -> None:
    """Serve a page of random tokens, and let a policy keep it."""
    sequence = store.activate(prompt_tokens=64, output_tokens=0)
    run_unit(store, sequence, 64)
    ids = np.random.default_rng(seed).integers(0, 1 << 20, 64, np.int32)
    policy.keep(store, retained(store, sequence, RetainedText(ids, None)))
