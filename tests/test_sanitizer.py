"""Sanitizer mode: what nobody wrote is NaN, what was left is guarded, and a changed byte stops the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import pagedkv as pk
from pagedkv.graphs import DecodeLoop
from pagedkv.store.sanitizer import GUARD_BYTE, Sanitizer, unwritten_word
from pagedkv.values.planes import plane_inventory
from tests.bf16 import bf16_from_f32
from tests.placement import shuffle_placement
from tests.toy_model import ToyModel

GEOMETRY = pk.KVGeometry(layers=2, query_heads=4, kv_heads=2, head_dim=64)
Bits = npt.NDArray[np.uint16]


def opened(
    profile: str = "bf16", *, sanitizer: bool = True, backend: pk.DraftFullBackend | None = None,
    host_arena_bytes: int = 0,
) -> AbstractContextManager[pk.Store]:
    """Open a store of two rows and scattered pages; "draft" is a head-major BF16 pool."""
    config = pk.StoreConfig(GEOMETRY, profile=profile, max_context=256, max_concurrency=2, backend=backend,
                            kv_capacity=pk.ExplicitCapacity(512), sanitizer=sanitizer,
                            host_arena_bytes=host_arena_bytes)
    store = pk.open_store(config, device="cpu")
    shuffle_placement(store, seed=3)
    return store


def put(store: pk.Store, values: npt.NDArray[Any]) -> Any:
    target = store.device.empty(values.shape, values.dtype)
    store.device.copy(target, values, store.stream)
    return target


def noise(seed: int, *shape: int) -> Bits:
    return bf16_from_f32(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def write(store: pk.Store, row: int, first: int, tokens: int, pool: str = "main", seed: int = 1) -> None:
    """Append noise to every layer at positions [first, first + tokens) of a table row."""
    for view in store.views[pool]:
        k, v = (put(store, noise(seed + kind, 1, tokens, view.num_kv_heads, view.head_dim)) for kind in range(2))
        store.ops.append(view, k, v, put(store, np.array([first], np.int32)), put(store, np.array([row], np.int32)),
                         stream=store.stream)


def written(store: pk.Store, tokens: int, pool: str = "main", seed: int = 1) -> pk.Sequence:
    """Activate a sequence and write its first tokens in one unit."""
    sequence = store.activate(prompt_tokens=tokens, output_tokens=256 - tokens)
    unit = store.begin_unit(store.batch([sequence]), {pool: tokens})
    write(store, sequence.row, 0, tokens, pool, seed)
    store.wait(unit)
    store.commit(unit)
    return sequence


def attend(store: pk.Store, row: int, position: int, pool: str = "main", layer: int = 0) -> npt.NDArray[np.float32]:
    """Attend over [0, position] of a table row, whoever owns it, and return the values (Hq, D)."""
    view = store.views[pool][layer]
    q = noise(9, 1, 1, 4, view.head_dim)
    out = put(store, np.zeros_like(q))
    shape = pk.AttentionShape("decode", 1, 1, 4, view.num_kv_heads, view.head_dim, view.max_context)
    workspace = store.device.empty((max(pk.workspace_bytes(shape), 256),), np.uint8)
    store.ops.causal_attention_cached(view, put(store, q), out, put(store, np.array([position], np.int32)),
                                      put(store, np.array([row], np.int32)), route="decode", workspace=workspace,
                                      stream=store.stream)
    host = np.empty_like(q)
    store.device.copy(host, out, store.stream)
    store.stream.synchronize()
    values: npt.NDArray[np.float32] = (host.astype(np.uint32) << 16).view(np.float32)[0, 0]
    return values


DRAFT = pk.DraftFullBackend(pk.KVGeometry(layers=1, query_heads=4, kv_heads=2, head_dim=64))
POOLS = [*((profile, "main", None) for profile in pk.PROFILES), ("int8-g64", "draft", DRAFT)]


@pytest.fixture(params=POOLS, ids=lambda param: f"{param[0]}-{param[1]}")
def pooled(request: pytest.FixtureRequest, device_mode: int | None) -> Iterator[tuple[pk.Store, str]]:
    """A store of every profile, and one of the draft pool, with the name of the pool that is looked at."""
    profile, pool, backend = request.param
    with opened(profile, backend=backend) as store:
        yield store, pool


@pytest.mark.parametrize("tokens", [13, 63, 64, 65, 128])
def test_a_row_that_nobody_wrote_reaches_the_output_as_nan(pooled: tuple[pk.Store, str], tokens: int) -> None:
    """C11.1, S61: one position too many is NaN in every head; the written ones alone are finite, 0 x NaN excluded."""
    store, pool = pooled
    sequence = written(store, tokens, pool)
    store.ensure_mapped_to_tokens(sequence, 192, pool)

    assert np.isfinite(attend(store, sequence.row, tokens - 1, pool)).all()
    assert np.isnan(attend(store, sequence.row, tokens, pool)).all()
    store.check()


@pytest.mark.deferred
def test_a_page_that_comes_back_has_forgotten_what_it_held(pooled: tuple[pk.Store, str]) -> None:
    """C9.6, S7: a trimmed page and the pages of a finished sequence are NaN to whoever maps them next."""
    store, pool = pooled
    sequence = written(store, 100, pool)
    store.truncate(sequence, 64, pool)
    store.ensure_mapped_to_tokens(sequence, 128, pool)
    assert np.isfinite(attend(store, sequence.row, 63, pool)).all()
    assert np.isnan(attend(store, sequence.row, 64, pool)).all()
    store.finish(sequence)
    heirs = [store.activate(prompt_tokens=256, output_tokens=0) for _ in range(2)]
    for heir in heirs:
        store.ensure_mapped_to_tokens(heir, 256, pool)
        assert np.isnan(attend(store, heir.row, 0, pool)).all()
    store.check()


def leave_by_truncate(store: pk.Store, sequence: pk.Sequence, *, is_trimmed: bool = False) -> None:
    store.truncate(sequence, 0)
    if is_trimmed:
        store.ensure_mapped_to_tokens(sequence, 100)
        assert store.trim(store.batch([sequence])) == 2


def leave_by_an_abort_in_flight(store: pk.Store, sequence: pk.Sequence, *, is_committed: bool = True) -> None:
    unit = store.begin_unit(store.batch([sequence]), 1)
    assert not store.abort(sequence)
    store.wait(unit)
    (store.commit if is_committed else store.fail)(unit)


WAYS_OUT = [pk.Store.finish, pk.Store.abort, leave_by_truncate, partial(leave_by_truncate, is_trimmed=True),
            leave_by_an_abort_in_flight, partial(leave_by_an_abort_in_flight, is_committed=False)]


@pytest.mark.deferred
@pytest.mark.parametrize("leave", WAYS_OUT)
def test_entries_that_were_left_name_the_guard_page(leave: Any) -> None:
    """C11.1: whichever way pages leave a membership, a reader that comes too late gets NaN."""
    with opened("int8-g64") as store:
        sequence = written(store, 100)
        leave(store, sequence)

        assert np.isnan(attend(store, sequence.row, 99)).all()
        assert (store.block_tables["main"] == 8).all()
        store.check()


@pytest.mark.deferred
@pytest.mark.parametrize("leave", [pk.Store.finish, leave_by_truncate])
def test_a_stale_entry_that_stays_is_caught(leave: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """C12.4, S7: the planted mistake lets a late reader see another sequence's numbers; check stops the store."""
    monkeypatch.setattr(Sanitizer, "withdraw", lambda self: None)
    with opened("int8-g64") as store:
        sequence = written(store, 100)
        leave(store, sequence)
        row, stale = sequence.row, int(store.block_tables["main"][sequence.row, 0])
        assert np.isfinite(attend(store, row, 99)).all()
        with pytest.raises(pk.Corruption, match=f"block 0 of row {row}.*guard page 8, got {stale}") as caught:
            store.check()

        assert (caught.value.pool, caught.value.row, caught.value.block) == ("main", row, 0)
        assert store.evidence is caught.value
        with pytest.raises(pk.StoreLatched, match="the guard page 8"):
            store.activate(prompt_tokens=1, output_tokens=1)
        assert store.memory_summary()["main"]["capacity_pages"] == 8


def test_an_entry_of_a_member_that_changed_is_caught() -> None:
    """C11.2, C12.4: a member's entry names another page than the ledger says."""
    with opened() as store:
        sequence = written(store, 100)
        table = store.block_tables["main"]
        store.device.copy(table[sequence.row, 1:2], np.array([5], np.int32) ^ table[sequence.row, 1], store.stream)
        assert store.sanitizer is not None
        with pytest.raises(pk.Corruption, match=f"block 1 of row {sequence.row} .*expected its member"):
            store.sanitizer.check()
        assert isinstance(store.evidence, pk.Corruption), "the sanitizer's own check latches the store too"
        with pytest.raises(pk.StoreLatched):
            store.check()


@pytest.mark.deferred
def test_a_write_through_an_entry_beyond_membership_is_caught(pooled: tuple[pk.Store, str]) -> None:
    """C12.4: it lands in the guard page, hurts nobody, and stops the store at the next check."""
    store, pool = pooled
    sequence, other = written(store, 100, pool), written(store, 256, pool)
    before = attend(store, other.row, 255, pool)
    store.check()
    write(store, sequence.row, 128, 1, pool)

    assert np.array_equal(before, attend(store, other.row, 255, pool))
    with pytest.raises(pk.Corruption, match=f"guard page 8 of pool {pool}"):
        store.check()
    assert isinstance(store.evidence, pk.Corruption)


def test_without_sanitizer_mode_there_is_no_call_for_it() -> None:
    """One copy per window that was bound, and nothing more.

    With it, per row that gained pages one copy and a launch for each plane, and one copy when pages leave.
    """
    calls = {}
    for sanitizer in (False, True):
        with opened("k8v4", sanitizer=sanitizer) as store:
            counted = []
            sequence = store.activate(prompt_tokens=100, output_tokens=100)
            steps = (partial(store.ensure_mapped_to_tokens, sequence, 130),
                     partial(store.trim, store.batch([sequence])), partial(store.ensure_mapped_to_tokens, sequence, 64),
                     partial(store.truncate, sequence, 0), partial(store.finish, sequence))
            for step in steps:
                before = store.device.driver_calls
                step()
                counted.append(store.device.driver_calls - before)
            calls[sanitizer] = counted
            assert (store.sanitizer is not None) == sanitizer
    planes = 4 * GEOMETRY.layers

    assert calls == {False: [1, 0, 0, 0, 0], True: [1 + planes, 1, 1 + planes, 1, 0]}


@pytest.mark.deferred
@pytest.mark.parametrize("profile", ["bf16", "nvfp4-g16"])
def test_a_sanitized_store_says_the_same(profile: str) -> None:
    """C14.6, S61: the text of a decode loop does not depend on what nobody wrote."""
    texts = []
    for sanitizer in (False, True):
        with opened(profile, sanitizer=sanitizer) as store:
            loop = DecodeLoop(store, ToyModel(store), prefill_chunk=64)
            sequences = [store.activate(prompt_tokens=tokens, output_tokens=6) for tokens in (62, 130)]
            for sequence, tokens in zip(sequences, (62, 130), strict=True):
                loop.prefill(sequence, range(tokens))
            texts.append([[tokens[sequence] for sequence in sequences] for tokens in loop.decode(sequences)])
            store.check()
            for sequence in sequences:
                store.finish(sequence)
            store.check()

    assert texts[0] == texts[1]


# ---- fingerprints ----------------------------------------------------------------------------------


def planes_of(store: pk.Store, pool: str) -> list[Any]:
    return [(store._slabs[f"{pool}.{plane.layer}.{plane.role}"], plane)
            for config in store.config.pools if config.name == pool for plane in config.planes]


def flip(store: pk.Store, plane: Any, geometry: Any, page: int, head: int, column: int) -> None:
    """Flip the lowest bit of the last byte of one row."""
    place = (page, head, column) if geometry.order == "page-major" else (head, page, column)
    row = np.ascontiguousarray(plane[place]).copy()
    row.view(np.uint8)[-1] ^= 1
    store.device.copy(plane[place], row, store.stream)
    store.stream.synchronize()


def test_a_fingerprint_sees_one_bit_in_every_plane(pooled: tuple[pk.Store, str]) -> None:
    """C7.4: in the last committed column of the last head; and not the column behind it, which is provisional."""
    store, pool = pooled
    assert store.sanitizer is not None
    sequence = written(store, 100, pool)
    pages, columns = np.array(store.page_ids(sequence, pool), np.int32), np.array([64, 36], np.int32)
    look = store.sanitizer.fingerprints
    seen = look.fingerprint(pool, pages, columns)
    planes = planes_of(store, pool)
    assert seen.shape == (2, len(planes))
    assert np.array_equal(look.fingerprint(pool, pages[::-1], columns[::-1]), seen[::-1])
    for index, (plane, geometry) in enumerate(planes):
        flip(store, plane, geometry, int(pages[1]), 1, 36)
        look.require_same("a look", pool, pages, seen, look.fingerprint(pool, pages, columns))
        flip(store, plane, geometry, int(pages[1]), 1, 35)
        found = look.fingerprint(pool, pages, columns)
        assert np.argwhere(found != seen).tolist() == [[1, index]]
        flip(store, plane, geometry, int(pages[1]), 1, 35)
    assert store.evidence is None
    flip(store, planes[-1][0], planes[-1][1], int(pages[0]), 0, 0)
    role = planes[-1][1].role
    with pytest.raises(pk.Corruption, match=f"page {pages[0]} of pool {pool}.*plane {role} of") as bad:
        look.require_same("a look", pool, pages, seen, look.fingerprint(pool, pages, columns))

    assert store.evidence is bad.value
    assert (bad.value.page_id, bad.value.role) == (int(pages[0]), role)


@pytest.mark.deferred
@pytest.mark.parametrize("broken", [None, "record", "copy", "restored"])
@pytest.mark.parametrize(("profile", "pool", "backend"), [POOLS[4], POOLS[5]])
def test_what_goes_to_the_host_is_compared_there_and_when_it_comes_back(
    profile: str, pool: str, backend: pk.DraftFullBackend | None, broken: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7.4, C13.2: equal bytes pass, whatever becomes of columns that are not committed; one bit stops the store."""
    with opened(profile, backend=backend, host_arena_bytes=1 << 22) as store:
        source = written(store, 100)
        if pool != "main":
            unit = store.begin_unit(store.batch([source]), {pool: 100})
            write(store, source.row, 0, 100, pool)
            store.wait(unit)
            store.commit(unit)
        kept = store.finish(source, retain=True, state="state")
        assert kept is not None
        copies: Any = store._copies
        arena, verify = copies._arena, copies.verify

        def flip_before(job: Any) -> None:
            for direction, copy in job.copies:
                offset = int(copy.places[0]) * 256 + (0 if broken else -1)
                if direction == "d2h" and broken == "copy":
                    arena[offset] ^= 1
                if direction == "h2d" and broken == "restored":
                    plane, geometry = planes_of(store, copy.pool)[0]
                    flip(store, plane, geometry, int(copy.page_ids[0]), 0, 0)
            verify(job)

        monkeypatch.setattr(copies, "verify", flip_before)
        if broken == "copy":
            with pytest.raises(pk.Corruption, match="the copy on the Host of page"):
                store.demote(kept)
        else:
            store.demote(kept)
            if broken == "record":
                arena[int(store.inspect().pools[pool].host.max()) * 256] ^= 1
                with pytest.raises(pk.Corruption, match="the restored copy of page"):
                    store.activate(source=kept, prompt_tokens=1, output_tokens=0)
            elif broken == "restored":
                with pytest.raises(pk.Corruption, match="the restored copy of page"):
                    store.activate(source=kept, prompt_tokens=1, output_tokens=0)
            else:
                store.activate(source=kept, prompt_tokens=1, output_tokens=0)
        assert isinstance(store.evidence, pk.Corruption) == (broken is not None)


@pytest.mark.parametrize("profile", pk.PROFILES)
def test_poison_is_nan_in_the_plane_that_decides(profile: str) -> None:
    """C11.1: BF16 codes, or the scales of K and of V, both where nobody wrote and in the guard page."""
    kinds: dict[Any, Callable[..., Any]] = {np.dtype(np.uint16): lambda bits: bits.view(np.float16),
                                            np.dtype(np.uint8): pk.codecs.e4m3_decode}
    planes = plane_inventory(profile, layers=1, kv_heads=1, head_dim=64, pages=1, order="page-major")
    deciding = [plane for plane in planes if plane.role.endswith("scale")] or list(planes)
    assert len(deciding) == 2
    for plane in deciding:
        for word in (unwritten_word(plane), GUARD_BYTE * 0x0101_0101):
            bits = np.array([word], np.uint32).view(plane.dtype)
            values = pk.codecs.bf16_to_f32(bits) if profile == "bf16" else kinds[plane.dtype](bits)
            assert np.isnan(values).all()


def test_an_activation_that_breaks_off_behind_its_copies_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """C10.2, C11.1: its entries are on the device already, and no later check may take them for corruption."""
    with opened() as store:
        kept = store.snapshot(written(store, 130), state="state")
        copy, tables = store.device.copy, store.block_tables["main"]
        raised: list[bool] = []

        def interrupt(destination: Any, source: Any, stream: pk.Stream) -> None:
            copy(destination, source, stream)
            if np.shares_memory(destination, tables) and store._ledger.unsettled and not raised:
                raised.append(True)
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(store.device, "copy", interrupt)
            with pytest.raises(KeyboardInterrupt):
                store.activate(prompt_tokens=1, output_tokens=0, source=kept)
        store.check()
