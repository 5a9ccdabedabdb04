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
from pagedkv.transfer.engine import TransferEngine
from pagedkv.transfer.mover import PageMover
from pagedkv.transfer.plan import Direction, Transfer
from pagedkv.values.planes import PackedPlanes, PlaneGeometry
from tests.kernels.arrays import to_device, to_host
from tests.placement import shuffle_placement
from tests.toy_model import ToyModel, decode_all, prefilled

GEOMETRY = pk.KVGeometry(layers=1, query_heads=2, kv_heads=2, head_dim=16)
SCHEDULES = ("late", "early", "random")
CONTEXT = 512

Ids = npt.NDArray[np.int32]
Bits = npt.NDArray[np.uint16]
Scene = Callable[[CpuDevice], None]


def deferred_device(seed: int) -> CpuDevice:
    """Open a quiet deferred device; three seeds in a row use the three schedules."""
    return CpuDevice(mode="deferred", schedule=SCHEDULES[seed % 3], seed=seed, order="random", threads=1,
                     announce=lambda line: None)  # fmt: skip


class Stage:
    """A store, an engine over its planes, and host-side helpers."""

    def __init__(self, device: CpuDevice, *, slots: int = 4, staging_pages: int = 4) -> None:
        config = pk.StoreConfig(GEOMETRY, profile="bf16", max_context=CONTEXT, max_concurrency=2,
                                kv_capacity=pk.ExplicitCapacity(1024))  # fmt: skip
        self.device = device
        self.store = pk.open_store(config, device=device)
        shuffle_placement(self.store, seed=3)
        self.random = np.random.default_rng(11)
        self.mover = PageMover(device, self.store.ops, self.store.stream, {"main": self.planes}, slots=slots,
                               staging_pages=staging_pages)  # fmt: skip
        self.engine = TransferEngine(self.mover)

    @property
    def planes(self) -> list[tuple[Any, PlaneGeometry]]:
        """Every plane of Main with its geometry."""
        return [(self.store._slabs[s.name], s.plane) for s in self.store.layout.slabs if s.plane is not None]

    def noise(self, *shape: int) -> Bits:
        """Return BF16 values near 1, as bits."""
        return self.random.integers(0x3F00, 0x4000, shape, np.uint16)

    def put(self, values: npt.NDArray[Any]) -> Any:
        """Copy to a device array of its own, on the store's stream."""
        return to_device(self.device, self.store.stream, values)

    def get(self, array: Any) -> npt.NDArray[Any]:
        """Copy a device array to the host, after everything on the store's stream."""
        return to_host(self.device, self.store.stream, array)

    def extent(self, pages: int, name: str = "extent") -> npt.NDArray[np.uint8]:
        """Return pinned host memory for so many packed pages."""
        return self.device.pinned((self.mover.packed_bytes("main", pages),), np.uint8, name=name)

    def extent_of(self, k: npt.NDArray[Any], v: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        """Return a pinned extent that holds pages (n, H, P, D) of K and of V."""
        extent = self.extent(len(k), "saved extent")
        for part, values in zip(self.packed(extent, len(k)), (k, v), strict=True):
            part[...] = values
        return extent

    def packed(self, extent: npt.NDArray[np.uint8], pages: int) -> list[npt.NDArray[Any]]:
        """Return the parts of an extent as (n, H, P, D) arrays, one per plane."""
        layout = PackedPlanes(tuple(geometry for _, geometry in self.planes), pages)
        return [extent[offset : offset + plane.span_bytes].view(plane.dtype).reshape(plane.shape)
                for plane, offset in zip(layout.planes, layout.offsets_bytes, strict=True)]  # fmt: skip

    def activate(self, tokens: int) -> pk.Sequence:
        """Activate a sequence that may have so many tokens."""
        return self.store.activate(prompt_tokens=tokens, output_tokens=0)

    def filled(self, tokens: int) -> tuple[pk.Sequence, Bits, Bits]:
        """Activate a sequence and commit all its tokens; return their rows too."""
        sequence = self.activate(tokens)
        k, v = self.append(sequence, tokens)
        self.settle()
        return sequence, k, v

    def append(self, sequence: pk.Sequence, tokens: int) -> tuple[Bits, Bits]:
        """Append noise to a sequence in one unit that stays in flight; return its rows as (tokens, H, D)."""
        unit = self.store.begin_unit(self.store.batch([sequence]), tokens, name="append")
        k, v = (self.noise(1, tokens, GEOMETRY.kv_heads, GEOMETRY.head_dim) for _ in range(2))
        first, rows = self.put(unit.first_positions["main"]), self.put(unit.rows.astype(np.int32))
        view, stream = self.store.views["main"][0], self.store.stream
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

    def ids(self, sequence: pk.Sequence) -> Ids:
        """Return the page ids of a sequence."""
        return np.array(self.store.page_ids(sequence), np.int32)

    def plan(self, direction: Direction, sources: Ids, destinations: Ids, *, host_pages: int) -> Transfer:
        """Plan a transfer of pages that a sequence holds."""
        pages = self.store._ledger.active["main"].pages
        on_device = destinations if direction == "h2d" else sources
        logical = np.array([np.flatnonzero(pages.device == page_id)[0] for page_id in on_device.tolist()], np.int32)
        return self.engine.ledger.plan(direction, "main", pages, logical, sources, destinations, host_pages=host_pages)

    def move(self, direction: Direction, ids: Ids, extent: npt.NDArray[np.uint8]) -> Transfer:
        """Submit a save of pages to an extent (d2h), or a restore of them (h2d)."""
        host = np.arange(ids.size, dtype=np.int32)
        sources, destinations = (ids, host) if direction == "d2h" else (host, ids)
        transfer = self.plan(direction, sources, destinations, host_pages=ids.size)
        assert self.engine.submit(transfer, extent)
        return transfer

    def finish_transfer(self, transfer: Transfer) -> None:
        """Poll until the transfer is done, then publish it."""
        while transfer.state == "submitted":
            self.engine.poll()
        self.engine.publish(transfer)


@contextmanager
def staged(device: CpuDevice, **options: int) -> Iterator[Stage]:
    """Open a stage; close its store when the scene ended well, invariants checked."""
    stage = Stage(device, **options)
    yield stage
    stage.engine.drain()
    stage.store.check()
    stage.store.close()


def pages_of(rows: Bits) -> Bits:
    """Cut rows (tokens, H, D) into whole pages (n, H, 64, D)."""
    return rows.reshape(-1, 64, *rows.shape[1:]).swapaxes(1, 2)


def save_behind_append(device: CpuDevice) -> None:
    """S45: pages are saved while the unit that wrote them may still wait; the host gets the new content."""
    with staged(device) as stage:
        sequence = stage.activate(192)
        k, v = stage.append(sequence, 192)
        extent = stage.extent(3)
        transfer = stage.move("d2h", stage.ids(sequence), extent)
        stage.finish_transfer(transfer)
        saved = [part.copy() for part in stage.packed(device.readable(extent), 3)]
        stage.settle()

        assert np.array_equal(pages_of(k), saved[0])
        assert np.array_equal(pages_of(v), saved[1])


def restore_behind_reader(device: CpuDevice) -> None:
    """S46: pages are overwritten while attention over their old content may still wait."""
    with staged(device) as stage:
        sequence, *_ = stage.filled(128)
        expected = stage.get(stage.attend(sequence, 128))
        k, v = pages_of(stage.noise(128, 2, 16)), pages_of(stage.noise(128, 2, 16))
        extent = stage.extent_of(k, v)
        out = stage.attend(sequence, 128)
        transfer = stage.move("h2d", stage.ids(sequence), extent)
        stage.engine.wait(transfer)
        stage.engine.publish(transfer)

        assert np.array_equal(expected, stage.get(out))
        assert np.array_equal(k, stage.get(stage.planes[0][0])[stage.ids(sequence)])


def read_behind_restore(device: CpuDevice) -> None:
    """A restore that does not block the host: its next reader waits on the stream."""
    with staged(device) as stage:
        sequence, k, v = stage.filled(128)
        expected = stage.get(stage.attend(sequence, 128))
        extent = stage.extent_of(pages_of(k), pages_of(v))
        for plane, _ in stage.planes:
            device.copy(plane, np.full(plane.shape, 0x4040, np.uint16), stage.store.stream)
        stage.store.stream.synchronize()
        transfer = stage.move("h2d", stage.ids(sequence), extent)
        stage.engine.order_before(transfer, stage.store.stream)
        stage.engine.publish(transfer)
        out = stage.attend(sequence, 128)

        assert np.array_equal(expected, stage.get(out))
        stage.engine.wait(transfer)


def move_both_ways(device: CpuDevice) -> None:
    """Saves and restores of shredded pages run side by side, each through its lane's staging and slots."""
    with staged(device, slots=2) as stage:
        sequence, k, v = stage.filled(448)
        ids = stage.ids(sequence)
        old, new = ids[:3], ids[3:6]
        restored = pages_of(stage.noise(192, 2, 16)), pages_of(stage.noise(192, 2, 16))
        source = stage.extent_of(*restored)
        saves, host = [], np.arange(3, dtype=np.int32)
        for number in range(5):
            extent = stage.extent(3, f"saved extent {number}")
            save = stage.plan("d2h", np.roll(old, number), host, host_pages=3)
            while not stage.engine.submit(save, extent, method="packed"):
                for done in stage.engine.poll():
                    stage.engine.publish(done)
            saves.append((extent, number))
            if number == 1:
                restore = stage.plan("h2d", host, new, host_pages=3)
                assert stage.engine.submit(restore, source, method="packed")
        while stage.engine.ledger.open:
            for done in stage.engine.poll():
                stage.engine.publish(done)

        for extent, number in saves:
            for rows, part in zip((k, v), stage.packed(device.readable(extent), 3), strict=True):
                assert np.array_equal(np.roll(pages_of(rows)[:3], number, axis=0), part)
        for values, (plane, _) in zip(restored, stage.planes, strict=True):
            assert np.array_equal(values, stage.get(plane)[new])


def trim_while_saving(device: CpuDevice) -> None:
    """A mapped page behind the frontier is saved; it may be trimmed and written anew only after that."""
    with staged(device) as stage:
        sequence = stage.activate(192)
        batch = stage.store.batch([sequence])
        k, _ = stage.append(sequence, 192)
        stage.store.wait(stage.unit)
        stage.store.commit(stage.unit, 64)
        extent = stage.extent(3)
        transfer = stage.move("d2h", stage.ids(sequence), extent)
        _until_accepted(lambda: stage.store.trim(batch), lambda: stage.finish_transfer(transfer))
        stage.append(sequence, 128)
        stage.settle()
        if transfer.state == "submitted":
            stage.finish_transfer(transfer)

        assert np.array_equal(pages_of(k), stage.packed(device.readable(extent), 3)[0])


def finish_while_saving(device: CpuDevice) -> None:
    """S26: a sequence ends while its pages are saved; the next one gets them only after that."""
    _release_while_saving(device, is_aborted=False)


def abort_while_saving(device: CpuDevice) -> None:
    """S26 to S28: an aborted transfer holds its pages until what it queued has run."""
    _release_while_saving(device, is_aborted=True)


def _release_while_saving(device: CpuDevice, *, is_aborted: bool) -> None:
    with staged(device) as stage:
        sequence, other = stage.activate(512), stage.activate(512)
        stage.append(sequence, 192)
        stage.settle()
        transfer = stage.move("d2h", stage.ids(sequence), stage.extent(3))
        assert not (is_aborted and stage.engine.abort(transfer))
        end = _poll_until_aborted if is_aborted else Stage.finish_transfer
        _until_accepted(lambda: stage.store.finish(sequence), lambda: end(stage, transfer))
        stage.filled(512)  # another sequence writes every page that was released
        if is_aborted:
            _poll_until_aborted(stage, transfer)
        stage.store.finish(other)


def save_and_read(device: CpuDevice) -> None:
    """The owner publishes as soon as the ledger lets it, and reads the host replica."""
    with staged(device) as stage:
        sequence, k, _ = stage.filled(64)
        extent = stage.extent(1)
        transfer = stage.move("d2h", stage.ids(sequence), extent)
        _until_accepted(lambda: stage.engine.publish(transfer), lambda: stage.engine.wait(transfer))
        saved = stage.packed(device.readable(extent), 1)[0].copy()
        stage.engine.wait(transfer)

        assert np.array_equal(pages_of(k), saved)


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


def _until_accepted(act: Callable[[], object], otherwise: Callable[[], object]) -> None:
    """Do something that a transfer may forbid; when it does, do the other thing first."""
    try:
        act()
    except pk.MisuseError:
        otherwise()
        act()


def _poll_until_aborted(stage: Stage, transfer: Transfer) -> None:
    while transfer.state != "aborted" or transfer in stage.engine.ledger.open:
        stage.engine.poll()


SCENES: tuple[Scene, ...] = (
    save_behind_append, restore_behind_reader, read_behind_restore, move_both_ways, trim_while_saving,
    finish_while_saving, abort_while_saving, save_and_read, decode_in_a_loop, decode_by_polling,
)  # fmt: skip
