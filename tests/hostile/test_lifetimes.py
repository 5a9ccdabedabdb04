"""What ends with a store: its memory, mappings, threads and descriptors, without help of the garbage collector."""

from __future__ import annotations

import gc
import io
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.devices.cpu.device import CpuDevice
from pagedkv.graphs import DecodeLoop
from tests.toy_model import ToyModel, prompt

CONFIG = pk.StoreConfig(
    pk.KVGeometry(layers=1, query_heads=2, kv_heads=1, head_dim=64), profile="int8-g64", max_context=256,
    max_concurrency=3, kv_capacity=pk.ExplicitCapacity(3 * 256), backend=pk.MTPBackend(4), kv_lease_growth=True,
)
RESIDENT_GROWTH_MAX = 4 << 20
MAPPINGS_OF_MALLOC = 8
"""The allocator of C splits and joins a few mappings of its own; one that a store leaves comes with every cycle."""


class Held(NamedTuple):
    """What this process holds."""

    mappings: int
    threads: int
    descriptors: int
    resident_bytes: int

    @classmethod
    def now(cls) -> Held:
        """Count it."""
        gc.collect()
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(len(Path("/proc/self/maps").read_text().splitlines()), len(os.listdir("/proc/self/task")),
                   len(os.listdir("/proc/self/fd")), resident_pages * os.sysconf("SC_PAGE_SIZE"))


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Only reference counts free objects."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def use(store: pk.Store) -> DecodeLoop:
    """Prefill and decode with graphs, and leave a unit in flight."""
    loop = DecodeLoop(store, ToyModel(store), prefill_chunk=16, drives_backend=True)
    sequence = store.activate(prompt_tokens=20, output_tokens=30)
    loop.prefill(sequence, prompt(20, 1))
    for _ in range(3):
        loop.step([sequence])
    store.snapshot(sequence, state=pk.STATE_FOLLOWS)
    store.submit(store.begin_unit(store.batch([sequence]), 4))
    return loop


def cycle(folder: Path) -> list[object]:
    """Open, use and close a store; return arrays that outlive it."""
    with pk.open_store(CONFIG, "cpu", journal=folder / "run.jsonl") as store:
        loop = use(store)
        return [loop.graphs, store.device.empty((5000,), np.uint8), store.device.pinned((5000,), np.uint8)]


@pytest.mark.parametrize("cycles", [60, pytest.param(2000, marks=pytest.mark.long)])
def test_stores_that_come_and_go_leave_nothing(
    cycles: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C5.4: the arrays of each cycle outlive their device by one cycle."""
    caplog.set_level(logging.ERROR, logger="pagedkv")  # records of units that `close` ended would stay
    outlived: list[object] = []
    for number in range(cycles):
        outlived = cycle(tmp_path)
        if number == 9:
            outlived.clear()
            before = Held.now()
    outlived.clear()
    after = Held.now()
    print(f"{cycles} cycles: {before} -> {after}")
    assert after.mappings <= before.mappings + MAPPINGS_OF_MALLOC
    assert (after.threads, after.descriptors) == (before.threads, before.descriptors)
    assert after.resident_bytes - before.resident_bytes <= RESIDENT_GROWTH_MAX


def observed(store: pk.Store) -> None:
    """Observe with an observer that holds the store."""
    seen: list[object] = [store]
    store.observe(seen.append)
    seen.append(store.observe(seen.append))


def refused(store: pk.Store) -> None:
    """Ask for too much, and in flight."""
    with pytest.raises(pk.ActivationRefused):
        store.activate(prompt_tokens=300, output_tokens=0)
    with pytest.raises(pk.UnitInFlight):
        store.trim(store.batch(store.sequences()))


@pytest.mark.parametrize("mode", ["eager", "deferred"])
@pytest.mark.parametrize("and_also", [pk.Store.poll, observed, refused, pk.Store.check],
                         ids=["poll", "observed", "refused", "check"])
@pytest.mark.parametrize("is_sanitizing", [False, True])
@pytest.mark.usefixtures("no_collector")
def test_no_cycle_keeps_a_store(and_also: Callable[[pk.Store], object], is_sanitizing: bool, mode: str) -> None:
    """C5.4: store, ledgers, journal, loop and device go with their last reference, and all memory with them."""
    device = CpuDevice(mode=mode)
    store = pk.open_store(replace(CONFIG, sanitizer=is_sanitizing), device, journal=io.StringIO())
    loop = use(store)
    and_also(store)
    store.close()
    refs = [weakref.ref(one) for one in (loop, store, store._ledger, store.ops, store.stream, device, device._context)]
    memory = device._context.memory
    views = store.views
    del store, loop
    assert [ref() for ref in refs[:5]] == [None] * 5
    assert (views, memory.allocated_bytes, memory.pinned_bytes) == ({}, 0, 0)
    device.close()
    del device
    assert [ref() for ref in refs] == [None] * 7


@pytest.mark.usefixtures("no_collector")
def test_a_closed_store_holds_no_device_memory() -> None:
    """C5.4: a caller may keep the closed store for its evidence and counters."""
    device = CpuDevice()
    for config in (CONFIG, replace(CONFIG, sanitizer=True)):
        store = pk.open_store(config, device)
        use(store)
        store.close()
        assert device.allocated_bytes == device.pinned_bytes == 0
        assert store.event_counts()["main"]["publish"]["pages"] > 0
    device.close()


def test_an_array_outlives_its_device() -> None:
    """C5.4: its memory holds as long as it, and a dropped device that nobody closed leaves no mapping either."""
    mappings = 0
    for number in range(12):
        device = CpuDevice(threads=2)
        array = device.zeros((70_000,), np.uint8)
        for _ in range(70):
            device.empty((8,), np.uint8)
        if number % 2:
            device.close()
        del device
        array[:] = number
        assert (array == number).all()
        if number == 3:
            mappings = Held.now().mappings
    assert Held.now().mappings <= mappings
