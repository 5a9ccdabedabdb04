"""Small programs that use the library as it is meant, on a deferred device; each ends with the right bytes.

Without a mistake in the product every scene passes under every seed.  With a mutant of `order.py` it
must end in an error that names the operation and the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

import pagedkv as pk
from pagedkv.devices.cpu.device import CpuDevice
from pagedkv.graphs import DecodeLoop
from pagedkv.values.planes import PlaneGeometry
from tests.kernels.arrays import to_device, to_host
from tests.placement import shuffle_placement
from tests.toy_model import ToyModel, decode_all, prefilled

GEOMETRY = pk.KVGeometry(layers=1, query_heads=2, kv_heads=2, head_dim=16)
SCHEDULES = ("late", "early", "random")
GEOMETRY_ROW = (GEOMETRY.kv_heads, GEOMETRY.head_dim)
CONTEXT = 512

Ids = npt.NDArray[np.int32]
Bits = npt.NDArray[np.uint16]
Scene = Callable[[CpuDevice], None]


def deferred_device(seed: int) -> CpuDevice:
    """Open a quiet deferred device; three seeds in a row use the three schedules."""
    return CpuDevice(mode="deferred", schedule=SCHEDULES[seed % 3], seed=seed, order="random", threads=1,
                     announce=lambda line: None)  # fmt: skip


class Stage:
    """A store with a Host arena, and host-side helpers."""

    def __init__(self, device: CpuDevice, backend: pk.MTPBackend | None = None) -> None:
        config = pk.StoreConfig(GEOMETRY, profile="bf16", max_context=CONTEXT, max_concurrency=2, backend=backend,
                                kv_capacity=pk.ExplicitCapacity(1024), host_arena_bytes=1 << 18)  # fmt: skip
        self.device = device
        self.store = pk.open_store(config, device=device)
        shuffle_placement(self.store, seed=3)
        self.random = np.random.default_rng(11)

    @property
    def planes(self) -> list[tuple[Any, PlaneGeometry]]:
        """Every plane of Main with its geometry."""
        return [(self.store._slabs[slab.name], slab.plane) for slab in self.store.layout.slabs
                if slab.plane is not None and slab.name.startswith("main.")]

    def noise(self, *shape: int) -> Bits:
        """Return BF16 values near 1, as bits."""
        return self.random.integers(0x3F00, 0x4000, shape, np.uint16)

    def put(self, values: npt.NDArray[Any]) -> Any:
        """Copy to a device array of its own, on the store's stream."""
        return to_device(self.device, self.store.stream, values)

    def get(self, array: Any) -> npt.NDArray[Any]:
        """Copy a device array to the host, after everything on the store's stream."""
        return to_host(self.device, self.store.stream, array)

    def activate(self, tokens: int) -> pk.Sequence:
        """Activate a sequence that may have so many tokens."""
        return self.store.activate(prompt_tokens=tokens, output_tokens=0)

    def filled(self, tokens: int) -> tuple[pk.Sequence, Bits, Bits]:
        """Activate a sequence and commit all its tokens in every pool; return their rows of Main too."""
        sequence = self.activate(tokens)
        return sequence, *self.written(sequence, tokens)

    def written(self, sequence: pk.Sequence, tokens: int) -> tuple[Bits, Bits]:
        """Append and commit noise in every pool; return the rows of Main."""
        rows = {}
        for pool in self.store.config.pools:
            rows[pool.name] = self.append(sequence, tokens, pool.name)
            self.settle()
        return rows["main"]

    def append(self, sequence: pk.Sequence, tokens: int, pool: str = "main") -> tuple[Bits, Bits]:
        """Append noise to a sequence in one unit that stays in flight; return its rows as (tokens, H, D)."""
        unit = self.store.begin_unit(self.store.batch([sequence]), {pool: tokens}, name="append")
        k, v = (self.noise(1, tokens, GEOMETRY.kv_heads, GEOMETRY.head_dim) for _ in range(2))
        first, rows = self.put(unit.first_positions[pool]), self.put(unit.rows.astype(np.int32))
        view, stream = self.store.views[pool][0], self.store.stream
        self.store.ops.append(view, self.put(k), self.put(v), first, rows, stream=stream)
        self.unit = unit
        return k[0], v[0]

    def settle(self) -> None:
        """Wait for the unit in flight and commit it."""
        self.store.wait(self.unit)
        self.store.commit(self.unit)

    def attend(self, sequence: pk.Sequence, tokens: int) -> Any:
        """Attend once over the first `tokens` positions of a sequence; return the output on the device."""
        shape = (1, 1, GEOMETRY.query_heads, GEOMETRY.head_dim)
        out = self.device.empty(shape, np.uint16, name="attention output")
        query = self.put(np.full(shape, 0x3F80, np.uint16))
        first, rows = self.put(np.array([tokens - 1], np.int32)), self.put(np.array([sequence.row], np.int32))
        view, stream = self.store.views["main"][0], self.store.stream
        self.store.ops.causal_attention_cached(view, query, out, first, rows, route="decode", workspace=None,
                                               stream=stream)  # fmt: skip
        return out

    def kept(self, tokens: int) -> tuple[pk.Continuation, Bits, Bits]:
        """Retain a sequence of so many tokens; return their rows too."""
        sequence, k, v = self.filled(tokens)
        return self.retained(sequence), k, v

    def retained(self, sequence: pk.Sequence) -> pk.Continuation:
        """Finish a sequence and keep it."""
        saved = self.store.finish(sequence, retain=True, state="complete")
        assert saved is not None
        return saved

    def rows(self, held: pk.Sequence) -> list[Bits]:
        """Return the committed rows (tokens, H, D) of K and of V of a sequence."""
        ids, tokens = self.store.page_ids(held), self.store.committed_tokens(held)
        return [self.get(plane)[ids].swapaxes(1, 2).reshape(-1, *GEOMETRY_ROW)[:tokens] for plane, _ in self.planes]

    def restored(self, source: pk.Continuation) -> pk.Sequence:
        """Activate from a continuation, beside other work, and poll until it is there."""
        sequence = self.store.activate(source=source, prompt_tokens=0, output_tokens=0, wait=False)
        self.poll()
        return sequence

    def poll(self) -> None:
        """End every copy in flight."""
        while self.store.poll_copies():
            pass


@contextmanager
def staged(device: CpuDevice, backend: pk.MTPBackend | None = None) -> Iterator[Stage]:
    """Open a stage; close its store when the scene ended well, invariants checked."""
    stage = Stage(device, backend)
    yield stage
    stage.store.check()
    stage.store.close()


def demote_behind_a_copied_tail(device: CpuDevice) -> None:
    """S45: a checkpoint goes to the Host while the copy of its tail may still wait."""
    with staged(device) as stage:
        sequence, k, v = stage.filled(100)
        checkpoint = stage.store.snapshot(sequence, state="complete")
        stage.store.demote(checkpoint, wait=False)
        stage.poll()
        stage.store.finish(sequence)
        for values, rows in zip((k, v), stage.rows(stage.restored(checkpoint)), strict=True):
            assert np.array_equal(values, rows)


def restore_behind_reader(device: CpuDevice) -> None:
    """S46: page groups that attention may still read go to a continuation that comes back from the Host."""
    with staged(device) as stage:
        saved, k, _ = stage.kept(512)
        stage.store.demote(saved)
        sequence, *_ = stage.filled(512)
        expected = stage.get(stage.attend(sequence, 512))
        out = stage.attend(sequence, 512)
        stage.store.finish(sequence)
        restored = stage.restored(saved)

        assert np.array_equal(expected, stage.get(out))
        assert np.array_equal(k, stage.rows(restored)[0])


def move_both_ways(device: CpuDevice) -> None:
    """A fork sends the tails of two pools to the Host and restores the pages before them, in one go."""
    with staged(device, pk.MTPBackend(1)) as stage:
        store = stage.store
        head, *first = stage.kept(128)
        fork = store.activate(source=head, prompt_tokens=22, output_tokens=0)
        second = stage.written(fork, 22)
        saved = stage.retained(fork)
        store.demote(head)
        blocker = stage.activate(CONTEXT)
        target: dict[str, Any] = {"source": saved, "prompt_tokens": CONTEXT - 150, "output_tokens": 0}
        assert isinstance(store.try_activate(**target), pk.Refusal)
        sequence = store.activate(**target, allow_demote_source=True, wait=False)
        stage.poll()
        for before, behind, rows in zip(first, second, stage.rows(sequence), strict=True):
            assert np.array_equal(np.concatenate((before, behind)), rows)
        for one in (sequence, blocker):
            store.finish(one)
        for before, behind, rows in zip(first, second, stage.rows(stage.restored(saved)), strict=True):
            assert np.array_equal(np.concatenate((before, behind)), rows)


def write_behind_demotion(device: CpuDevice) -> None:
    """S26: the page groups of a demoted continuation are written anew only when they have been copied."""
    with staged(device) as stage:
        saved, k, v = stage.kept(512)
        stage.store.demote(saved, wait=False)
        for _ in range(2):
            if stage.store.memory_summary()["main"]["available_pages"] < 16:
                stage.poll()
        for _ in range(2):
            stage.filled(512)  # every page group of the pool
        for sequence in stage.store.sequences():
            stage.store.finish(sequence)
        for values, rows in zip((k, v), stage.rows(stage.restored(saved)), strict=True):
            assert np.array_equal(values, rows)


def write_behind_aborted_restore(device: CpuDevice) -> None:
    """S27, S28: an aborted activation holds its page groups until what it queued has run."""
    with staged(device) as stage:
        saved, *_ = stage.kept(512)
        stage.store.demote(saved)
        sequence = stage.store.activate(source=saved, prompt_tokens=0, output_tokens=0, wait=False)
        stage.store.abort(sequence)
        if stage.store.memory_summary()["main"]["available_pages"] < 16:
            stage.poll()
        first, k, v = stage.filled(512)
        stage.filled(512)
        for values, rows in zip((k, v), stage.rows(first), strict=True):
            assert np.array_equal(values, rows)


def decode_in_a_loop(device: CpuDevice) -> None:
    """Two sequences through prefill, page crossings and graph replays; S19 to S22."""
    assert decoded_texts(device) == texts_of_an_eager_device()


@cache
def texts_of_an_eager_device() -> list[list[int]]:
    """Return what `decoded_texts` are where every operation runs at its submission."""
    return decoded_texts(CpuDevice(threads=1, announce=lambda line: None))


def decoded_texts(device: CpuDevice) -> list[list[int]]:
    """Decode two sequences across page crossings and return their tokens."""
    with staged(device) as stage:
        loop = DecodeLoop(stage.store, ToyModel(stage.store))
        return decode_all(loop, [prefilled(loop, list(range(tokens)), 4) for tokens in (62, 70)])


def decode_by_polling(device: CpuDevice) -> None:
    """The same by hand: submit, poll until the unit is done, read, commit."""
    with staged(device) as stage:
        loop = DecodeLoop(stage.store, ToyModel(stage.store))
        sequence = prefilled(loop, list(range(62)), 4)
        (token,) = loop.step([sequence])[sequence][:1]
        captured = next(unit for key, unit in loop.graphs._graphs.items() if key.unit == "decode")
        batch, text = stage.store.batch([sequence]), [token]
        for _ in range(2):
            unit = stage.store.begin_unit(batch, 1, name="decode")
            tokens = np.array([[text[-1]]], np.int32)
            captured.unit.control.write(batch.rows, unit.first_positions["main"], unit.columns["main"], tokens)
            captured.run()
            stage.store.submit(unit)
            while unit not in stage.store.poll():
                pass
            text.append(int(captured.unit.control.read_next_tokens(1)[0, 0]))
            stage.store.commit(unit)

        assert len(text) == 3


SCENES: tuple[Scene, ...] = (
    demote_behind_a_copied_tail, restore_behind_reader, move_both_ways, write_behind_demotion,
    write_behind_aborted_restore, decode_in_a_loop, decode_by_polling,
)  # fmt: skip
