"""Sharing on a device: bytes and tokens of forks, moves and snapshots, and failures between claim and commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.graphs import DecodeLoop
from tests.host.refusals import assert_unchanged, differences, observables, snapshot
from tests.placement import shuffle_placement
from tests.test_sanitizer import write
from tests.toy_model import ToyModel

GEOMETRY = pk.KVGeometry(layers=2, query_heads=4, kv_heads=2, head_dim=64)
DRAFT = pk.DraftFullBackend(pk.KVGeometry(layers=1, query_heads=4, kv_heads=2, head_dim=64))


@contextmanager
def opened(
    profile: str = "bf16", *, backend: pk.MTPBackend | pk.DraftFullBackend | None = None, sanitizer: bool = True,
    tokens: int = 8 * 320,
) -> Iterator[pk.Store]:
    """Open a store of eight rows and scattered pages, in sanitizer mode: what nobody wrote is NaN."""
    config = pk.StoreConfig(GEOMETRY, profile=profile, max_context=320, max_concurrency=8, backend=backend,
                            kv_capacity=pk.ExplicitCapacity(tokens), sanitizer=sanitizer)
    with pk.open_store(config, device="cpu") as store:
        if sanitizer:  # the others compare the ledgers whole
            shuffle_placement(store, seed=7)
        yield store
        store.check()


def advance(store: pk.Store, sequence: pk.Sequence, tokens: int, pool: str = "main", seed: int = 1) -> None:
    """Write and commit noise behind the frontier of one pool."""
    unit = store.begin_unit(store.batch([sequence]), {pool: tokens})
    write(store, sequence.row, int(unit.first_positions[pool][0]), tokens, pool, seed)
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


def in_two_pools(store: pk.Store) -> pk.Sequence:
    """Return a sequence of 150 tokens in Main and 140 in the other pool."""
    sequence = store.activate(prompt_tokens=160, output_tokens=20)
    advance(store, sequence, 150)
    advance(store, sequence, 140, store.config.pools[1].name)
    return sequence


def retained(store: pk.Store, held: int | pk.Sequence) -> pk.Continuation:
    """Return a continuation of a sequence, or of so many tokens."""
    sequence = held if isinstance(held, pk.Sequence) else store.activate(prompt_tokens=held, output_tokens=0)
    if isinstance(held, int):
        advance(store, sequence, held)
    saved = store.finish(sequence, retain=True, state="complete")
    assert saved is not None
    return saved


# ---- bytes ----------------------------------------------------------------------------------------------


@pytest.mark.deferred
@pytest.mark.parametrize("profile", sorted(pk.PROFILES))
def test_a_fork_reads_the_source_s_bytes_and_writes_none_of_them(profile: str) -> None:
    """C10.5: 150 tokens are two shared pages and 22 copied columns; the fork's 151st token is its own."""
    with opened(profile) as store:
        saved = retained(store, 150)
        before = rows_of(store, saved)
        fork = store.activate(source=saved, frontier=150, prompt_tokens=60, output_tokens=10)

        assert rows_of(store, fork) == before
        assert store.page_ids(fork)[:2] == store.page_ids(saved)[:2]
        assert store.page_ids(fork)[2] != store.page_ids(saved)[2]
        advance(store, fork, 60, seed=9)
        assert rows_of(store, saved) == before


@pytest.mark.parametrize("profile", sorted(pk.PROFILES))
def test_a_move_to_a_lower_frontier_keeps_what_is_below_it(profile: str) -> None:
    """C10.4, C9.10: the pages stay where they are; the page that is cut inside has other content from then on."""
    with opened(profile) as store:
        saved = retained(store, 150)
        longer = store.activate(source=saved, prompt_tokens=0, output_tokens=0)
        store.truncate(longer, 130)
        expected, pages = rows_of(store, longer), store.page_ids(saved)
        moved = store.activate(source=saved, frontier=130, keep_source=False, prompt_tokens=60, output_tokens=10)

        assert rows_of(store, moved) == expected
        assert store.page_ids(moved) == pages
        with pytest.raises(pk.StaleHandle):
            store.state_of(saved)


@pytest.mark.deferred
@pytest.mark.parametrize("profile", sorted(pk.PROFILES))
def test_a_snapshot_keeps_its_bytes_while_the_sequence_runs_on(profile: str) -> None:
    """C10.6: no table entry of the running sequence changes, and its next tokens reach no byte of the checkpoint."""
    with opened(profile) as store:
        sequence = store.activate(prompt_tokens=100, output_tokens=100)
        advance(store, sequence, 100)
        pages = store.page_ids(sequence)
        checkpoint = store.snapshot(sequence, state="complete")
        before = rows_of(store, checkpoint)

        assert before == rows_of(store, sequence)
        assert store.page_ids(sequence) == pages
        advance(store, sequence, 70, seed=5)
        assert rows_of(store, checkpoint) == before


@pytest.mark.parametrize("backend", [pk.MTPBackend(3), DRAFT], ids=["mtp", "draft"])
def test_each_pool_is_forked_at_its_own_frontier(backend: pk.MTPBackend | pk.DraftFullBackend) -> None:
    """C9.9, C10.5: Main at 150, the backend at 70; a head-major plane is copied as a page-major one is."""
    with opened(backend=backend) as store:
        pool, saved = store.config.pools[1].name, retained(store, in_two_pools(store))
        with pytest.raises(pk.MisuseError, match=r"name every pool.*\(C9.9\)"):
            store.activate(source=saved, frontier=150, prompt_tokens=1, output_tokens=1)
        fork = store.activate(source=saved, frontier={"main": 150, pool: 70}, prompt_tokens=1, output_tokens=1)

        assert (150, 70) == (store.committed_tokens(fork), store.committed_tokens(fork, pool))
        whole, part = rows_of(store, saved, pool), rows_of(store, fork, pool)
        assert [rows[: len(few)] for rows, few in zip(whole, part, strict=True)] == part
        checkpoint = store.snapshot(fork, state="complete")
        assert rows_of(store, checkpoint, pool) == part


# ---- tokens ---------------------------------------------------------------------------------------------


def decoded(loop: DecodeLoop, sequences: list[pk.Sequence], steps: int) -> dict[pk.Sequence, list[int]]:
    """Step sequences together and return their tokens."""
    said: dict[pk.Sequence, list[int]] = {sequence: [] for sequence in sequences}
    for _ in range(steps):
        for sequence, tokens in loop.step(sequences).items():
            said[sequence] += tokens
    return said


def alone(profile: str, prompt: list[int], steps: int) -> list[int]:
    """Return what a sequence of its own says."""
    with opened(profile) as store:
        loop = DecodeLoop(store, ToyModel(store))
        sequence = store.activate(prompt_tokens=len(prompt), output_tokens=steps)
        loop.prefill(sequence, prompt)
        return decoded(loop, [sequence], steps)[sequence]


@pytest.mark.deferred
@pytest.mark.parametrize("profile", sorted(pk.PROFILES))
@pytest.mark.parametrize("frontier", [64, 100, 128])
def test_forks_say_what_unshared_runs_say(profile: str, frontier: int) -> None:
    """S39, C14.6: one prompt, four suffixes, one batch."""
    prompt = [(37 * i) % 1009 for i in range(frontier)]
    with opened(profile) as store:
        loop = DecodeLoop(store, ToyModel(store))
        root = store.activate(prompt_tokens=frontier, output_tokens=0)
        loop.prefill(root, prompt)
        saved = store.finish(root, retain=True, state="complete")
        children = [store.activate(source=saved, prompt_tokens=3, output_tokens=40) for _ in range(4)]
        suffixes = [[5 + i, 11 * i, 900 - i] for i in range(4)]
        for child, suffix in zip(children, suffixes, strict=True):
            loop.prefill(child, suffix)
        said = decoded(loop, children, 40)

    assert [said[child] for child in children] == [alone(profile, prompt + suffix, 40) for suffix in suffixes]


def test_a_resumed_snapshot_goes_the_way_of_its_run() -> None:
    """C10.6: the token that was sampled last is the loop's whole state; it is written in the decode route."""
    with opened("int8-g64") as store:
        loop = DecodeLoop(store, ToyModel(store))
        sequence = store.activate(prompt_tokens=70, output_tokens=60)
        loop.prefill(sequence, range(70))
        decoded(loop, [sequence], 5)
        checkpoint = store.snapshot(sequence, state=loop.last_token(sequence))
        expected = decoded(loop, [sequence], 55)[sequence]
        state = store.state_of(checkpoint)
        assert isinstance(state, int)
        resumed = store.activate(source=checkpoint, prompt_tokens=0, output_tokens=55)
        loop.resume(resumed, state)

        assert decoded(loop, [resumed], 60)[resumed] == expected
        assert loop.finish_reason(resumed) == "length"


def test_going_on_needs_something_to_go_on_from() -> None:
    """C9.2: a token id, something committed, and room for it."""
    with opened() as store:
        loop = DecodeLoop(store, ToyModel(store))
        fresh = store.activate(prompt_tokens=5, output_tokens=1)
        with pytest.raises(pk.MisuseError, match="committed tokens"):
            loop.resume(fresh, 3)
        saved = retained(store, 70)
        full = store.activate(source=saved, prompt_tokens=0, output_tokens=0)
        with pytest.raises(pk.MisuseError, match="committed tokens"):
            loop.resume(full, 3)
        with pytest.raises(pk.MisuseError, match="token ids"):
            loop.resume(full, -1)


# ---- failures between claim and commit --------------------------------------------------------------------


class Injected(Exception):
    """What a device call raises in these tests."""


def fail_at(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, number: int) -> None:
    """Let the `number`-th call of a method raise, after it was counted."""
    original: Callable[..., Any] = getattr(owner, name)
    calls = iter(range(1, 1000))

    def call(*arguments: Any, **named: Any) -> Any:
        if next(calls) == number:
            raise Injected
        return original(*arguments, **named)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("keep_source", [True, False])
@pytest.mark.parametrize(("owner", "name", "number"), [
    ("ops", "copy_columns", 1), ("ops", "copy_columns", 2), ("device", "copy", 1), ("device", "copy", 2),
])
def test_a_failure_on_the_device_leaves_no_trace_of_the_activation(
    monkeypatch: pytest.MonkeyPatch, keep_source: bool, owner: str, name: str, number: int
) -> None:
    """C10.2: at the first and the second pool's copy, and at the publication of each row; then it succeeds."""
    with opened(backend=DRAFT, sanitizer=False) as store:
        saved = retained(store, in_two_pools(store))
        other = store.activate(source=saved, prompt_tokens=1, output_tokens=1)
        bytes_before = [rows_of(store, saved, pool) for pool in ("main", "draft")]
        before, ids_before = observables(store._ledger), (store.page_ids(saved), store.page_ids(other))
        go_on = partial(store.activate, source=saved, frontier={"main": 100, "draft": 70}, keep_source=keep_source,
                        prompt_tokens=9, output_tokens=9)
        with monkeypatch.context() as patch:
            fail_at(patch, getattr(store, owner), name, number)
            with pytest.raises(Injected):
                go_on()

        assert differences(before, observables(store._ledger)) == []
        assert ids_before == (store.page_ids(saved), store.page_ids(other))
        store.check()
        assert bytes_before == [rows_of(store, saved, pool) for pool in ("main", "draft")]
        assert 100 == store.committed_tokens(go_on())


@pytest.mark.parametrize("number", [1, 2])
def test_a_failed_copy_leaves_no_trace_of_the_snapshot(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """C10.6: the first pool's tail, or the second's."""
    with opened(backend=DRAFT, sanitizer=False) as store:
        sequence = in_two_pools(store)
        before = observables(store._ledger)
        with monkeypatch.context() as patch:
            fail_at(patch, store.ops, "copy_columns", number)
            with pytest.raises(Injected):
                store.snapshot(sequence)

        assert differences(before, observables(store._ledger)) == []
        store.check()
        assert 150 == store.committed_tokens(store.snapshot(sequence))


def test_a_device_fault_in_a_copy_latches_the_store_and_gives_the_claims_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """C10.2, C12.4: the ledgers are as before, and nothing but the evidence answers."""
    with opened(sanitizer=False) as store:
        saved = retained(store, 150)
        before = observables(store._ledger)

        def crash(*_: object, **__: object) -> None:
            raise pk.DeviceFault("a kernel", expected="no fault", got="one", remedy="none", clause="C12.4")

        with monkeypatch.context() as patch:
            patch.setattr(store.ops, "copy_columns", crash)
            with pytest.raises(pk.DeviceFault) as caught:
                store.activate(source=saved, prompt_tokens=1, output_tokens=1)

        assert differences(before, observables(store._ledger)) == []
        assert store.evidence is caught.value
        with pytest.raises(pk.StoreLatched):
            store.release(saved)
        store._access.fault, store._ledger.unsettled = None, ""


def test_nothing_is_copied_into_a_capture() -> None:
    """C10.5, C10.6, C11.2: a tail's copy must happen now; recorded, it would happen at every replay instead."""
    with opened(sanitizer=False) as store:
        saved = retained(store, 150)
        sequence = store.activate(source=saved, frontier=100, prompt_tokens=9, output_tokens=9)
        before = snapshot(store._ledger)
        store.device.begin_capture(store.stream)
        with pytest.raises(pk.CaptureRefused):
            store.snapshot(sequence)
        with pytest.raises(pk.CaptureRefused):
            store.activate(source=saved, prompt_tokens=9, output_tokens=9)
        store.device.end_capture(store.stream)

        assert_unchanged(before, store._ledger)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_publication_that_breaks_off_latches_the_store(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """C11.2, C12.4: a unit's pages are members by then; nothing is launched over a table that does not show them."""
    with opened(sanitizer=False) as store:
        sequence = store.activate(prompt_tokens=100, output_tokens=20)
        batch = store.batch([sequence])

        def fail(*_: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(store.device, "copy", fail)
            with pytest.raises(error):
                store.begin_unit(batch, 70)

        assert isinstance(store.evidence, pk.BrokenOff)
        assert store.evidence.operation == "begin_unit"
        with pytest.raises(pk.StoreLatched, match="after begin_unit"):
            store.begin_unit(batch, 1)
        store._ledger.unsettled = ""
        store.check = lambda: None  # type: ignore[method-assign]


@pytest.mark.parametrize("retain", [1, "no", np.True_, None])
def test_whether_to_retain_is_a_bool(retain: Any) -> None:
    """C9.8: what only looks like one is refused: it would decide about pages."""
    with opened(sanitizer=False) as store:
        sequence = store.activate(prompt_tokens=70, output_tokens=0)
        advance(store, sequence, 70)
        before = snapshot(store._ledger)
        with pytest.raises(pk.MisuseError, match="retain"):
            store.finish(sequence, retain=retain)

        assert_unchanged(before, store._ledger)


def test_a_pinned_page_that_is_bound_only_stops_the_end_in_every_pool() -> None:
    """C7.4, C9.8: the second pool's bound page is asked for before the first pool is closed, whoever ends the row."""
    with opened(backend=pk.MTPBackend(3), sanitizer=False) as store:
        sequence = store.activate(prompt_tokens=200, output_tokens=50)
        advance(store, sequence, 10)
        advance(store, sequence, 10, "mtp")
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
        saved = retained(store, 150)
        held = store.activate(prompt_tokens=200, output_tokens=64)
        target = pk.ActivationTarget(20, 40, saved)

        assert store.memory_summary()["main"]["available_pages"] == 0
        assert store.explain(target) == pk.Refusal("main", 2, 0, forever=False)
        assert not store.can_honour(target)
        with pytest.raises(pk.ActivationRefused):
            store.activate(source=saved, prompt_tokens=20, output_tokens=40)
        advance(store, held, 70)
        assert store.try_snapshot(held) == pk.Refusal("main", 1, 0, forever=False)
        with pytest.raises(pk.SnapshotRefused, match="a free page in main"):
            store.snapshot(held)
        unit = store.begin_unit(store.batch([held]), 80)
        store.wait(unit)
        store.commit(unit, 1)
        assert store.try_snapshot(held) == pk.Refusal("main", 1, 0, forever=False, reason="provisional")
        with pytest.raises(pk.SnapshotRefused, match="trim"):
            store.snapshot(held)
