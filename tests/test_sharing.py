"""Sharing on a device: bytes and tokens of forks, moves and snapshots, and failures between claim and commit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.graphs import DecodeLoop
from tests.host.refusals import assert_unchanged, differences, observables, snapshot
from tests.test_sanitizer import write as append_noise
from tests.toy_model import ToyModel, decode_all, opened_store, prefilled, retained, run_unit

GEOMETRY = pk.KVGeometry(layers=2, query_heads=4, kv_heads=2, head_dim=64)
DRAFT = pk.DraftFullBackend(pk.KVGeometry(layers=1, query_heads=4, kv_heads=2, head_dim=64))


def opened(
    profile: str = "bf16", *, backend: pk.MTPBackend | pk.DraftFullBackend | None = None, sanitizer: bool = True,
    tokens: int = 8 * 320,
) -> AbstractContextManager[pk.Store]:
    """Open a store of eight rows, in sanitizer mode with scattered pages; the others compare the ledgers whole."""
    return opened_store(GEOMETRY, profile=profile, max_context=320, concurrency=8, tokens=tokens, backend=backend,
                        placement_seed=7 if sanitizer else None, sanitizer=sanitizer)


def write(store: pk.Store, sequence: pk.Sequence, tokens: int, pool: str = "main", seed: int = 1) -> None:
    """Write and commit noise behind the frontier of one pool."""
    unit = store.begin_unit(store.batch([sequence]), {pool: tokens})
    append_noise(store, sequence.row, int(unit.first_positions[pool][0]), tokens, pool, seed)
    store.wait(unit)
    store.commit(unit, {pool: tokens})


def rows_of(store: pk.Store, held: pk.Sequence | pk.Continuation, pool: str = "main") -> list[bytes]:
    """Return the committed rows of every plane of a pool, in logical order."""
    store.stream.synchronize()
    pages, committed = store.page_ids(held, pool), store.committed_tokens(held, pool)
    found = []
    for view in store.views[pool]:
        for plane, _ in view.planes:
            by_page = plane if view.order == "page-major" else np.moveaxis(plane, 1, 0)
            rows = np.moveaxis(by_page[pages], 1, 2).reshape(len(pages) * 64, -1)[:committed]
            found.append(np.ascontiguousarray(rows).tobytes())
    return found


def of_two_pools(store: pk.Store) -> pk.Sequence:
    """Return a sequence of 150 tokens in Main and 140 in the other pool."""
    sequence = store.activate(prompt_tokens=160, output_tokens=20)
    write(store, sequence, 150)
    write(store, sequence, 140, store.config.pools[1].name)
    return sequence


def kept_tokens(store: pk.Store, tokens: int) -> pk.Continuation:
    """Return a continuation of so many tokens."""
    sequence = store.activate(prompt_tokens=tokens, output_tokens=0)
    write(store, sequence, tokens)
    return retained(store, sequence)


# ---- bytes ----------------------------------------------------------------------------------------------


@pytest.mark.deferred
@pytest.mark.parametrize("profile", sorted(pk.PROFILES))
def test_snapshot_fork_and_move_keep_the_bytes_below_their_frontier(profile: str) -> None:
    """C10.4..C10.6: who shares pages writes on in pages of its own, and reaches no byte of the others."""
    with opened(profile) as store:
        sequence = store.activate(prompt_tokens=150, output_tokens=100)
        write(store, sequence, 150)
        pages, before = store.page_ids(sequence), rows_of(store, sequence)
        saved = store.snapshot(sequence, state="complete")
        assert (rows_of(store, saved), store.page_ids(sequence)) == (before, pages)
        write(store, sequence, 70, seed=5)
        assert rows_of(store, saved) == before

        fork = store.activate(source=saved, frontier=150, prompt_tokens=60, output_tokens=10)
        assert rows_of(store, fork) == before
        ids, copied = store.page_ids(saved), store.page_ids(fork)
        assert (ids[:2] == copied[:2], ids[2] == copied[2]) == (True, False)
        write(store, fork, 60, seed=9)
        assert rows_of(store, saved) == before

        longer = store.activate(source=saved, prompt_tokens=0, output_tokens=0)
        store.truncate(longer, 130)
        moved = store.activate(source=saved, frontier=130, keep_source=False, prompt_tokens=60, output_tokens=10)
        assert rows_of(store, moved) == rows_of(store, longer)
        assert store.page_ids(moved) == ids
        with pytest.raises(pk.StaleHandle):
            store.state_of(saved)


@pytest.mark.parametrize("backend", [pk.MTPBackend(3), DRAFT], ids=["mtp", "draft"])
def test_each_pool_is_forked_at_its_own_frontier(backend: pk.MTPBackend | pk.DraftFullBackend) -> None:
    """C9.9, C10.5: Main at 150, the backend at 70; a head-major plane is copied as a page-major one is."""
    with opened(backend=backend) as store:
        pool, saved = store.config.pools[1].name, retained(store, of_two_pools(store))
        with pytest.raises(pk.MisuseError, match=r"name every pool.*\(C9.9\)"):
            store.activate(source=saved, frontier=150, prompt_tokens=1, output_tokens=1)
        fork = store.activate(source=saved, frontier={"main": 150, pool: 70}, prompt_tokens=1, output_tokens=1)

        assert (150, 70) == (store.committed_tokens(fork), store.committed_tokens(fork, pool))
        whole, part = rows_of(store, saved, pool), rows_of(store, fork, pool)
        assert [rows[: len(few)] for rows, few in zip(whole, part, strict=True)] == part
        checkpoint = store.snapshot(fork, state="complete", state_frontier={"main": 150, pool: 70})
        assert rows_of(store, checkpoint, pool) == part


# ---- tokens ---------------------------------------------------------------------------------------------


def alone(profile: str, ids: list[int], steps: int) -> list[int]:
    """Return what a sequence of its own says."""
    with opened(profile) as store:
        loop = DecodeLoop(store, ToyModel(store))
        return decode_all(loop, [prefilled(loop, ids, steps)])[0]


@pytest.mark.deferred
@pytest.mark.parametrize("profile", sorted(pk.PROFILES))
@pytest.mark.parametrize("frontier", [64, 100, 128])
def test_forks_say_what_unshared_runs_say(profile: str, frontier: int) -> None:
    """S39, C14.6: one prompt, four suffixes, one batch."""
    prompt = [(37 * i) % 1009 for i in range(frontier)]
    with opened(profile) as store:
        loop = DecodeLoop(store, ToyModel(store))
        saved = retained(store, prefilled(loop, prompt, 0))
        children = [store.activate(source=saved, prompt_tokens=3, output_tokens=40) for _ in range(4)]
        suffixes = [[5 + i, 11 * i, 900 - i] for i in range(4)]
        for child, suffix in zip(children, suffixes, strict=True):
            loop.prefill(child, suffix, last_token=None)
        texts = decode_all(loop, children)

    assert texts == [alone(profile, prompt + suffix, 40) for suffix in suffixes]


@pytest.mark.deferred
@pytest.mark.parametrize("whose", ["sequence", "continuation"])
@pytest.mark.parametrize("cut", [64, 128, 140])
def test_what_was_cut_goes_on_as_a_new_sequence(cut: int, whose: str) -> None:
    """C9.10, C14.6: 64 leaves a shared page, 128 a tail of its own, 140 lies in that tail; the other stays."""
    prompt, suffix = [(37 * i) % 1009 for i in range(150)], [5, 11, 900]
    with opened("int8-g64") as store:
        loop = DecodeLoop(store, ToyModel(store))
        saved = retained(store, prefilled(loop, prompt, 0))
        sequence = store.activate(source=saved, prompt_tokens=10, output_tokens=100)
        other = saved if whose == "sequence" else sequence
        before = rows_of(store, other)
        if whose == "sequence":
            loop.prefill(sequence, [700, 3], last_token=None)
            loop.step([sequence])
            store.truncate(sequence, cut)
            loop.forget(sequence)
        else:
            store.protect(saved, 0)
            store.truncate(saved, cut)
            store.attach_state(saved, "complete")
            sequence = store.activate(source=saved, prompt_tokens=3, output_tokens=40)
        loop.prefill(sequence, suffix, last_token=None)
        (text,) = decode_all(loop, [sequence])
        assert rows_of(store, other) == before

    assert text[:40] == alone("int8-g64", prompt[:cut] + suffix, 40)[:40]


def test_a_resumed_snapshot_goes_the_way_of_its_run() -> None:
    """C10.6, C9.2: the token that was sampled last is the loop's whole state, and must have room to be written."""
    with opened("int8-g64") as store:
        loop = DecodeLoop(store, ToyModel(store))
        sequence = prefilled(loop, list(range(70)), 60)
        for _ in range(5):
            loop.step([sequence])
        checkpoint = store.snapshot(sequence, state=loop.last_token(sequence))
        expected = decode_all(loop, [sequence])
        state = store.state_of(checkpoint)
        assert isinstance(state, int)
        resumed = store.activate(source=checkpoint, prompt_tokens=0, output_tokens=55)
        fresh = store.activate(prompt_tokens=5, output_tokens=1)
        full = store.activate(source=checkpoint, prompt_tokens=0, output_tokens=0)
        for target, token, match in ((fresh, 3, "committed tokens"), (full, 3, "committed tokens"),
                                     (resumed, -1, "token ids")):
            with pytest.raises(pk.MisuseError, match=match):
                loop.resume(target, token)
        loop.resume(resumed, state)

        assert decode_all(loop, [resumed]) == expected
        assert loop.finish_reason(resumed) == "length"


# ---- failures between claim and commit --------------------------------------------------------------------


class Injected(Exception):
    """What a device call raises in these tests."""


CRASH = pk.DeviceFault("a kernel", expected="no fault", got="one", remedy="none", clause="C12.4")


def fail_at(
    monkeypatch: pytest.MonkeyPatch, store: pk.Store, owner: str, name: str, number: int, error: Exception
) -> None:
    """Let the `number`-th call of a method of the store's ops or device raise, after it was counted."""
    users, target = store.device.state.users, getattr(store, owner)
    original: Callable[..., Any] = getattr(target, name)
    calls = iter(range(1, 1000))

    def call(*arguments: Any, **named: Any) -> Any:
        if next(calls) == number:
            if isinstance(error, pk.DeviceFault):
                users.report(error)
            raise error
        return original(*arguments, **named)

    monkeypatch.setattr(target, name, call)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(("change", "owner", "name"), [
    ("fork", "ops", "copy_columns"), ("move", "ops", "copy_columns"), ("snapshot", "ops", "copy_columns"),
    ("fork", "device", "copy"), ("move", "device", "copy"),
])
@pytest.mark.parametrize("error", [Injected(), CRASH], ids=["error", "device fault"])
def test_a_failure_on_the_device_leaves_no_trace_of_the_activation_or_snapshot(
    monkeypatch: pytest.MonkeyPatch, change: str, owner: str, name: str, number: int, error: Exception
) -> None:
    """C10.2, C10.6, C12.4: at each pool's copy, and at each row's publication; a device fault latches besides."""
    with opened(backend=DRAFT, sanitizer=False) as store:
        saved = retained(store, of_two_pools(store))
        other = store.activate(source=saved, prompt_tokens=1, output_tokens=1)
        bytes_before = [rows_of(store, saved, pool) for pool in ("main", "draft")]
        before, ids_before = observables(store._ledger), (store.page_ids(saved), store.page_ids(other))
        go_on = partial[Any](store.snapshot, other, state=pk.STATE_FOLLOWS) if change == "snapshot" else partial[Any](
            store.activate, source=saved, frontier={"main": 100, "draft": 70}, keep_source=change == "fork",
            prompt_tokens=9, output_tokens=9)
        with monkeypatch.context() as patch:
            fail_at(patch, store, owner, name, number, error)
            with pytest.raises(type(error)):
                go_on()

        assert differences(before, observables(store._ledger)) == []
        if error is CRASH:
            assert store.evidence is error
            with pytest.raises(pk.StoreLatched):
                store.release(saved)
            store._access.fault, store._ledger.unsettled = None, ""
        assert ids_before == (store.page_ids(saved), store.page_ids(other))
        store.check()
        assert bytes_before == [rows_of(store, saved, pool) for pool in ("main", "draft")]
        assert store.committed_tokens(go_on()) == (150 if change == "snapshot" else 100)


@pytest.mark.parametrize("sanitizer", [False, True])
def test_nothing_is_copied_published_or_withdrawn_into_a_capture(sanitizer: bool) -> None:
    """C10.5, C10.6, C11.2: a copy must happen now; recorded, it would happen at every replay instead."""
    with opened_store(GEOMETRY, max_context=320, concurrency=8, sanitizer=sanitizer) as store:
        saved, other = kept_tokens(store, 150), kept_tokens(store, 1)
        sequence = store.activate(source=saved, frontier=100, prompt_tokens=100, output_tokens=9)
        unit = store.begin_unit(store.batch([store.activate(source=other, prompt_tokens=1, output_tokens=0)]), 1)
        batch, before = store.batch([sequence]), snapshot(store._ledger)
        store.device.begin_capture(store.stream)
        copies = (partial(store.snapshot, sequence, state="s"), partial(store.begin_unit, batch, 64),
                  partial(store.activate, source=saved, prompt_tokens=9, output_tokens=9),
                  partial(store.ensure_mapped_to_tokens, sequence, 164))
        withdrawals = (partial(store.finish, sequence), partial(store.abort, sequence), partial(store.trim, batch),
                       partial(store.truncate, sequence, 0), partial(store.commit, unit), partial(store.fail, unit))
        for call in (*copies, *withdrawals) if sanitizer else copies:
            with pytest.raises(pk.CaptureRefused, match="no capture on this device"):
                call()

        assert store.device.end_capture(store.stream).nodes == ()
        assert_unchanged(before, store._ledger)
        store.fail(unit)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["begin_unit", "trim"])
def test_a_publication_that_breaks_off_latches_the_store(
    monkeypatch: pytest.MonkeyPatch, name: str, error: type[BaseException]
) -> None:
    """C11.1, C11.2, C12.4: the pages came or left by then; nothing is launched over a table that differs from them."""
    with opened(sanitizer=name == "trim") as store:
        sequence = store.activate(prompt_tokens=100, output_tokens=20)
        batch = store.batch([sequence])
        call = partial[Any](store.begin_unit, batch, 70) if name == "begin_unit" else partial[Any](store.trim, batch)
        if name == "trim":
            store.ensure_mapped_to_tokens(sequence, 70)

        def fail(*_: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(store.device, "copy", fail)
            with pytest.raises(error):
                call()

        assert isinstance(store.evidence, pk.BrokenOff)
        assert store.evidence.operation == name
        with pytest.raises(pk.StoreLatched, match=f"after {name}"):
            store.begin_unit(batch, 1)
        store._ledger.unsettled = ""
        store.check = lambda: None  # type: ignore[method-assign]


def test_a_pinned_page_that_is_bound_only_stops_the_end_in_every_pool() -> None:
    """C7.4, C9.8: the second pool's bound page is asked for before the first pool is closed, whoever ends the row."""
    with opened(backend=pk.MTPBackend(3), sanitizer=False) as store:
        sequence = store.activate(prompt_tokens=200, output_tokens=50)
        run_unit(store, sequence, {"main": 10, "mtp": 10})
        spaces = store._ledger.active["mtp"]
        bound = spaces.members[sequence.row, 2:3].copy()
        unit = store.begin_unit(store.batch([sequence]), 1)
        store.wait(unit)
        assert store.abort(sequence) is False
        spaces.pages.pin(bound)
        before = snapshot(store._ledger)
        for end in (store.commit, store.fail):
            with pytest.raises(pk.MisuseError, match=r"pins.*\(C7.4\)"):
                end(unit)
            assert_unchanged(before, store._ledger)
        spaces.pages.unpin(bound)
        store.commit(unit)

        assert store.memory_summary()["mtp"]["available_pages"] == store.memory_summary()["mtp"]["capacity_pages"]


# ---- answers --------------------------------------------------------------------------------------------


def test_a_full_pool_refuses_fork_and_snapshot_with_the_numbers() -> None:
    """C10.6, C10.9: five pages of Main; a continuation holds 3, a sequence of one page leaves 1."""
    with opened(tokens=8 * 64, sanitizer=False) as store:
        saved = kept_tokens(store, 150)
        held = store.activate(prompt_tokens=200, output_tokens=64)
        target = pk.ActivationTarget(20, 40, saved)

        assert store.memory_summary()["main"]["available_pages"] == 0
        assert store.explain(target) == pk.Refusal("main", 2, 0, forever=False)
        assert not store.can_honour(target)
        with pytest.raises(pk.ActivationRefused):
            store.activate(source=saved, prompt_tokens=20, output_tokens=40)
        write(store, held, 70)
        assert store.try_snapshot(held, state="s") == pk.Refusal("main", 1, 0, forever=False)
        with pytest.raises(pk.SnapshotRefused, match="a free page in main"):
            store.snapshot(held, state="s")
        unit = store.begin_unit(store.batch([held]), 80)
        store.wait(unit)
        store.commit(unit, 1)
        assert store.try_snapshot(held, state="s") == pk.Refusal("main", 1, 0, forever=False, reason="provisional")
        with pytest.raises(pk.SnapshotRefused, match="trim"):
            store.snapshot(held, state="s")
