"""The Host tier on a device: bytes and tokens there and back, copies beside decode, and failures.  (C7, C8, C10)"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

import pagedkv as pk
from pagedkv.graphs import DecodeLoop
from tests.test_sharing import DRAFT, GEOMETRY, rows_of, write
from tests.toy_model import ToyModel, decode_all, opened_store, prefilled, prompt, retained

ARENA_BYTES = 8 << 20


def opened(
    profile: str = "bf16", *, backend: pk.MTPBackend | pk.DraftFullBackend | None = None, sanitizer: bool = True,
    tokens: int = 8 * 320, host_arena_bytes: int = ARENA_BYTES,
) -> AbstractContextManager[pk.Store]:
    """Open a store with a Host arena, and eight rows of 320 tokens."""
    return opened_store(GEOMETRY, profile=profile, max_context=320, concurrency=8, tokens=tokens, backend=backend,
                        placement_seed=7, sanitizer=sanitizer, host_arena_bytes=host_arena_bytes)


def kept_tokens(store: pk.Store, tokens: int, seed: int = 1) -> pk.Continuation:
    """Return a continuation of so many tokens in every pool."""
    sequence = store.activate(prompt_tokens=tokens, output_tokens=0)
    for pool in store.config.pools:
        write(store, sequence, tokens, pool.name, seed)
    return retained(store, sequence)


def finish_copies(store: pk.Store) -> None:
    """Poll until no copy is in flight."""
    while store.poll_copies():
        pass


def is_free(store: pk.Store) -> bool:
    """Say whether every page, row, record and pin is free."""
    summary = store.memory_summary()
    pages = all(summary[pool.name]["available_pages"] == pool.pages for pool in store.config.pools)
    pins = all(not pool.pins.any() for pool in store.inspect().pools.values())
    return pages and pins and not store.host_summary()["used_bytes"] and not store.sequences()


# ---- there and back ------------------------------------------------------------------------------------------


@pytest.mark.deferred
@pytest.mark.parametrize("keep_source", [True, False])
@pytest.mark.parametrize("profile", sorted(pk.PROFILES))
def test_bytes_go_to_the_host_and_come_back(profile: str, keep_source: bool) -> None:
    """C7.4, C8.1: 150 tokens, other pages in between, and a tail inside a page; sanitizer mode compares digests."""
    with opened(profile) as store:
        kept = kept_tokens(store, 150)
        other = kept_tokens(store, 64, seed=3)
        before = rows_of(store, kept)
        assert store.demote(kept) == 3
        assert store.page_ids(kept) == [-1, -1, -1]
        filler = kept_tokens(store, 300, seed=9)  # takes the page groups that became available
        sequence = store.activate(source=kept, prompt_tokens=20, output_tokens=4, keep_source=keep_source)

        assert rows_of(store, sequence) == before
        write(store, sequence, 20, seed=5)
        if keep_source:
            store.release(kept)
        store.finish(sequence)
        for one in (other, filler):
            store.release(one)
        assert is_free(store)


@pytest.mark.deferred
@pytest.mark.parametrize("backend", [pk.MTPBackend(3), DRAFT], ids=["mtp", "draft"])
def test_both_pools_share_the_arena(backend: pk.MTPBackend | pk.DraftFullBackend) -> None:
    """C5.7, C8.1: records of two sizes, page-major and head-major planes; each pool at its own frontier."""
    with opened(backend=backend) as store:
        pool, kept = store.config.pools[1].name, kept_tokens(store, 150)
        before = {name: rows_of(store, kept, name) for name in ("main", pool)}
        assert store.demote(kept) == 6
        used = sum(3 * config.record_bytes for config in store.config.pools)
        host = store.host_summary()
        assert (host["capacity_bytes"], host["used_bytes"]) == (ARENA_BYTES, used)
        assert (host["free_bytes"], host["copied_pages"]) == (ARENA_BYTES - used, 6)
        fork = store.activate(source=kept, frontier={"main": 150, pool: 70}, prompt_tokens=1, output_tokens=1)
        assert rows_of(store, fork) == before["main"]
        part = rows_of(store, fork, pool)
        assert [rows[: len(few)] for rows, few in zip(before[pool], part, strict=True)] == part
        counts = store.event_counts()
        assert [counts[name]["demote"]["pages"] for name in ("main", pool)] == [3, 3]
        assert counts["main"]["restore"] == {"pages": 2, "bytes": 2 * store.config.pools[0].page_bytes}


def test_a_demoted_conversation_says_what_one_that_never_moved_says() -> None:
    """C14.6: eight conversations under a pool for three, demoted between turns, restored beside decode."""
    prompts = [prompt(100 + 7 * i, i) for i in range(8)]

    def talk(store: pk.Store, demotes: bool) -> list[list[int]]:
        loop = DecodeLoop(store, ToyModel(store))
        kept, texts = [], []
        for ids in prompts:
            sequence = prefilled(loop, ids, 30)
            texts += decode_all(loop, [sequence])
            kept.append(retained(store, sequence, loop.last_token(sequence)))
            if demotes:
                assert isinstance(store.demote(kept[-1]), int)
        running = prefilled(loop, prompt(60, 99), 100) if demotes else None
        for index, one in enumerate(kept):
            token = store.state_of(one)
            assert isinstance(token, int)
            sequence = store.activate(source=one, prompt_tokens=10, output_tokens=20, keep_source=False,
                                      wait=not demotes)
            while store.is_restoring(sequence):
                assert running is not None
                loop.step([running])
            loop.prefill(sequence, prompt(9, 1000 + index), last_token=token)
            texts += decode_all(loop, [sequence])
            kept[index] = retained(store, sequence)
            if demotes:
                store.demote(kept[index])
        return texts

    with opened(tokens=8 * 320) as store:
        expected = talk(store, demotes=False)
    with opened(tokens=3 * 320) as store:
        assert talk(store, demotes=True) == expected


# ---- beside decode -------------------------------------------------------------------------------------------


@pytest.mark.deferred
def test_a_restoring_sequence_is_published_at_a_boundary() -> None:
    """C10.10: it is refused by name, in no table and in no batch; a commit of another unit publishes it."""
    with opened() as store:
        kept = kept_tokens(store, 150)
        before = rows_of(store, kept)
        store.demote(kept)
        running = store.activate(prompt_tokens=10, output_tokens=100)
        sequence = store.activate(source=kept, prompt_tokens=1, output_tokens=1, wait=False)
        if store.is_restoring(sequence):
            for use in (store.finish, store.committed_tokens, lambda held: store.batch([held])):
                with pytest.raises(pk.MisuseError, match=r"restoring.*\(C10\.10\)"):
                    use(sequence)
            assert sequence not in store.sequences()
        while store.is_restoring(sequence):
            write(store, running, 1)
        assert rows_of(store, sequence) == before


@pytest.mark.deferred
def test_a_demotion_beside_decode_ends_at_a_boundary() -> None:
    """C7.4, S45: until then the pages stay; a fork taken meanwhile keeps them on the Device."""
    with opened() as store:
        one, two = kept_tokens(store, 150), kept_tokens(store, 64, seed=4)
        before = rows_of(store, one)
        assert store.demote(one, wait=False) == 3
        assert store.demote(two, wait=False) == 1
        fork = store.activate(source=one, prompt_tokens=1, output_tokens=1)
        finish_copies(store)
        assert [page >= 0 for page in store.page_ids(one)[:2]] == [True, True]
        assert store.page_ids(two) == [-1]
        assert rows_of(store, fork) == before
        store.finish(fork)
        store.demote(one)
        assert store.page_ids(one) == [-1, -1, -1]


@pytest.mark.deferred
def test_an_aborted_restore_gives_everything_back() -> None:
    """S26 to S28: at once or when its copies have run, twice, a hundred times; nothing leaks."""
    with opened() as store:
        kept = kept_tokens(store, 150)
        store.demote(kept)
        for _ in range(100):
            sequence = store.activate(source=kept, prompt_tokens=1, output_tokens=1, wait=False)
            if store.is_restoring(sequence):
                assert store.abort(sequence) is False
            else:
                assert store.abort(sequence)
            finish_copies(store)
            with pytest.raises(pk.StaleHandle):
                store.is_restoring(sequence)
            store.drop_device(kept)
        store.release(kept)
        assert is_free(store)


def test_more_copies_than_slots_wait_their_turn() -> None:
    """S57: submission never blocks and never grows; the queue drains in order."""
    with opened() as store:
        kept = [kept_tokens(store, 64, seed) for seed in range(12)]
        before = [rows_of(store, one) for one in kept]
        for one in kept:
            assert store.demote(one, wait=False) == 1
        finish_copies(store)
        assert all(store.page_ids(one) == [-1] for one in kept)
        forks = [store.activate(source=one, prompt_tokens=0, output_tokens=1, wait=False) for one in kept[:8]]
        finish_copies(store)
        assert [rows_of(store, fork) for fork in forks] == before[:8]


# ---- the staged fork -----------------------------------------------------------------------------------------


@pytest.mark.deferred
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("free", [2, 0])
def test_a_fork_into_a_full_pool_takes_the_tail_in_place(free: int, wait: bool) -> None:
    """C10.8, both cases: its bytes stay, the source's lie on the Host, and a later fork of the source reads them."""
    with opened(tokens=8 * 64) as store:
        kept = kept_tokens(store, 150)
        before, tail = rows_of(store, kept), store.page_ids(kept)[2]
        blocker = store.activate(prompt_tokens=(5 - free) * 64, output_tokens=0)
        target: dict[str, Any] = {"source": kept, "prompt_tokens": 64 * (free + 1) - 22, "output_tokens": 0}
        refusal = store.try_activate(**target)
        assert refusal == pk.Refusal("main", free + 1, free, forever=False)
        fork = store.activate(**target, allow_demote_source=True, wait=wait)
        while store.is_restoring(fork):
            store.poll_copies()
        assert (rows_of(store, fork), store.page_ids(fork)[2], store.page_ids(kept)[2]) == (before, tail, -1)
        write(store, fork, 64 * (free + 1) - 22, seed=5)
        store.finish(fork)
        store.finish(blocker)
        assert rows_of(store, store.activate(source=kept, prompt_tokens=0, output_tokens=0)) == before


# ---- failures ------------------------------------------------------------------------------------------------


def fail_copy(store: pk.Store, number: int) -> None:
    """Let the copy of that number, from now on, fail."""
    assert store._copies is not None
    mover = store._copies.mover
    first = mover.counters.operations
    mover.fails = lambda operation: operation == first + number


ACTS: dict[str, Callable[[pk.Store, pk.Continuation], object]] = {
    "demote": lambda store, kept: store.demote(kept),
    "fork": lambda store, kept: store.activate(source=kept, prompt_tokens=1, output_tokens=1),
    "move": lambda store, kept: store.activate(source=kept, prompt_tokens=1, output_tokens=1, keep_source=False),
}


@pytest.mark.deferred
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("act", ACTS)
def test_a_copy_that_fails_leaves_everything_as_it_was(act: str, number: int) -> None:
    """C10.2, S52, S53: nothing is published, nothing leaks, the source is valid where it was, and it works later."""
    with opened() as store:
        kept = kept_tokens(store, 300)
        before = rows_of(store, kept)
        if act != "demote":
            store.demote(kept)
        taken = store.inspect()
        fail_copy(store, number)
        with pytest.raises(pk.TransferFailed):
            ACTS[act](store, kept)
        assert store._copies is not None
        store._copies.mover.fails = None
        store.check()
        assert store.inspect().differences(taken) == []
        answer = ACTS[act](store, kept)
        rows = rows_of(store, answer) if isinstance(answer, pk.Sequence) else rows_of(
            store, store.activate(source=kept, prompt_tokens=0, output_tokens=0))
        assert rows == before


def test_a_copy_that_fails_beside_decode_is_told_by_poll_copies() -> None:
    """The handle is stale then, and every claim was given back; a commit does not raise it.  (C10.10)"""
    with opened() as store:
        kept = kept_tokens(store, 300)
        store.demote(kept)
        assert store._copies is not None
        mover = store._copies.mover
        slots, mover._in.slots = mover._in.slots, []
        sequence = store.activate(source=kept, prompt_tokens=1, output_tokens=1, wait=False)
        assert store.is_restoring(sequence)
        mover._in.slots = slots
        fail_copy(store, 1)
        running = store.activate(prompt_tokens=10, output_tokens=10)
        write(store, running, 1)
        with pytest.raises(pk.StaleHandle):
            store.is_restoring(sequence)
        with pytest.raises(pk.TransferFailed):
            store.poll_copies()
        mover.fails = None
        assert store.poll_copies() is False


def test_refusals_of_the_host_tier_name_what_is_missing() -> None:
    """C5.7, C8.2, C10.9: no arena, a full arena, a demoted source in use; nothing changes."""
    with opened_store(GEOMETRY, max_context=320, concurrency=2) as store:
        kept = kept_tokens(store, 64)
        with pytest.raises(pk.MisuseError, match=r"host_arena_bytes.*\(C5\.7\)"):
            store.demote(kept)
        assert set(store.host_summary().values()) == {0}
    record = 2 * 2 * 64 * 64 * 2 * 2
    with opened(host_arena_bytes=3 * record) as store:
        one, two = kept_tokens(store, 150), kept_tokens(store, 64, seed=2)
        assert store.demote(one) == 3
        assert store.demote(two) == pk.Refusal("main", 1, 0, forever=False, reason="host")
        before = store.inspect()
        assert isinstance(store.demote(two), pk.Refusal)
        assert store.inspect().differences(before) == []
        store.release(one)
        assert store.demote(two) == 1
        wrong: Any
        for wrong in (1, None, "no"):
            with pytest.raises(pk.MisuseError, match="wait was refused"):
                store.try_activate(source=two, prompt_tokens=1, output_tokens=0, wait=wrong)


def test_close_with_copies_in_flight_waits_for_them() -> None:
    """The arena and the planes are freed behind the copies."""
    config = pk.StoreConfig(GEOMETRY, profile="bf16", max_context=320, max_concurrency=2,
                            kv_capacity=pk.ExplicitCapacity(640), host_arena_bytes=ARENA_BYTES)
    store = pk.open_store(config, device="cpu")
    kept = kept_tokens(store, 300)
    assert store.demote(kept, wait=False) == 5
    store.close()
    with pytest.raises(pk.MisuseError, match="an open store"):
        store.poll_copies()
