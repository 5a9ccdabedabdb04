"""Several stores on one device, and every way in which a caller reaches the device of a store.  (C12.4, C15.1)

    a fault            latches every open store of the device, whoever launched the work and whoever caught the error
    another thread     is refused, also where it asks the device, a stream or the ops
    a capture          of one store: the others begin nothing that reaches the device, and go on when it has ended
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.devices.cpu.device import CpuDevice
from pagedkv.devices.cuda.device import CudaDevice
from pagedkv.graphs import DecodeLoop, Unit
from pagedkv.graphs.capture import UnitGraph
from pagedkv.graphs.key import key_for
from tests.cuda.fake_cupy import LAUNCH_FAILED, CUDARuntimeError
from tests.hostile.test_interrupts import CALLS, Stage
from tests.toy_model import ToyModel, prefilled, prompt, run_unit

CONFIG = pk.StoreConfig(pk.KVGeometry(layers=1, query_heads=2, kv_heads=1, head_dim=64), profile="bf16",
                        max_context=256, max_concurrency=2, kv_capacity=pk.ExplicitCapacity(512))
KEY = key_for(CONFIG, unit="decode", route="decode", batch=1, width=1)

# 16 KiB past the end: within the guard behind the buffer.
CRASH = 'extern "C" __global__ void crash(int* target) { target[1 << 12] = 1; }'


class Shared:
    """Two stores on one device, a unit of each in flight, and whatever the ways to the device need."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.store, self.other = pk.open_store(CONFIG, device), pk.open_store(CONFIG, device)
        self.unit_graph = UnitGraph(self.store, ToyModel(self.store), KEY, use_graph=False)
        self.bits, self.floats = device.zeros((8,), np.uint16), device.zeros((8,), np.float32)
        self.ints = device.zeros((4,), np.int32)
        self.module = device.load(pk.ModuleSpec("crash", text=CRASH, kernels=("crash",)))
        self.event = device.event()
        device.begin_capture(self.store.stream)
        self.convert()
        self.graph = device.end_capture(self.store.stream)
        self.units = {}
        for store in (self.store, self.other):
            sequence = store.activate(prompt_tokens=10, output_tokens=5)
            self.units[store] = store.begin_unit(store.batch([sequence]), 10)

    def convert(self) -> None:
        """Launch a kernel through the ops of the first store."""
        self.store.ops.f32_from_bf16(self.floats, self.bits, stream=self.store.stream)

    def break_device(self) -> None:
        """Let all later work fail; on the cuda device also every wait, as CUDA's faults are sticky."""
        if isinstance(self.device, CudaDevice):
            api = self.device._context.api

            def fail(*arguments: Any, **options: Any) -> None:
                raise CUDARuntimeError(LAUNCH_FAILED)

            for path in ("driver.launchKernel", "runtime.memcpyAsync", "Graph.launch", "runtime.streamSynchronize",
                         "runtime.eventSynchronize", "runtime.eventQuery", "runtime.eventRecord"):
                api._targets[f"cuda.{path}"] = fail
        else:
            self.device._context.executor.run_one = self.crash
            self.device._context.executor.native_run = lambda *packed: 1

    def crash(self, *packed: object) -> None:
        raise self.device._context.executor.fault()


WAYS: dict[str, Callable[[Shared], object]] = {
    "ops": Shared.convert,
    "a copy": lambda on: on.device.copy(on.floats, np.zeros(8, np.float32), on.store.stream),
    "a kernel": lambda on: on.module.kernel("crash").launch((1, 1, 1), (1, 1, 1), [on.ints], on.store.stream),
    "an eager unit": lambda on: on.unit_graph.run(),
    "a graph": lambda on: on.graph.launch(on.store.stream),
    "launch_graph": lambda on: on.store.launch_graph(on.graph),
    "another stream": lambda on: on.graph.launch(on.device.stream()),
}
WAITS: dict[str, Callable[[Shared], object]] = {
    "stream.synchronize": lambda on: on.store.stream.synchronize(),
    "event.synchronize": lambda on: on.event.synchronize(),
    "event.query": lambda on: on.event.query(),
    "store.wait": lambda on: on.store.wait(on.units[on.store]),
}
OTHERS: dict[str, Callable[[Shared], object]] = {
    "memory": lambda on: on.device.empty((4,), np.uint8),
    "pinned memory": lambda on: on.device.pinned((4,), np.uint8),
    "load": lambda on: on.device.load(pk.ModuleSpec("crash", text=CRASH, kernels=("crash",))),
    "a new stream": lambda on: on.device.stream(),
    "a new event": lambda on: on.device.event(),
    "record": lambda on: on.store.stream.record(on.event),
    "stream.wait": lambda on: on.store.stream.wait(on.event),
    "call": lambda on: on.device.call(on.store.stream, fill, on.floats),
    "begin_capture": lambda on: on.device.begin_capture(on.store.stream),
    "upload": lambda on: on.graph.upload(on.store.stream),
    "close the device": lambda on: on.device.close(),
    "open a store": lambda on: pk.open_store(CONFIG, on.device),
    "a method": lambda on: on.store.sequences(),
}


def fill(array: Any) -> None:
    array[...] = 1


def wait_often(on: Shared, wait: str) -> None:
    """Wait; a query answers "not yet" a few times."""
    for _ in range(5):
        WAITS[wait](on)


def demand_latched(on: Shared, fault: BaseException) -> None:
    """Both stores refuse to wait and to commit, and name the fault."""
    for store in (on.store, on.other):
        assert store.evidence is fault
        for call in (store.wait, store.commit):
            with pytest.raises(pk.StoreLatched):
                call(on.units[store])


@pytest.mark.eager_only("a device that defers its work meets the fault at a wait, as the next test says")
@pytest.mark.parametrize("way", WAYS)
def test_a_fault_of_any_launch_latches_every_store_of_the_device(way: str, device: pk.Device) -> None:
    """C12.4: also where the caller catches the error, so that nothing commits over data that was never written."""
    on = Shared(device)
    on.break_device()
    with pytest.raises(pk.DeviceFault) as caught:
        WAYS[way](on)

    demand_latched(on, caught.value)


@pytest.mark.parametrize("wait", WAITS)
def test_a_fault_that_a_wait_meets_latches_every_store_of_the_device(wait: str, device: pk.Device) -> None:
    """C12.4: a deferred device says it at the wait, and only once."""
    on = Shared(CpuDevice(mode="deferred") if isinstance(device, CpuDevice) else device)
    if isinstance(on.device, CpuDevice):
        WAYS["a kernel"](on)
        on.store.stream.record(on.event)
    else:
        on.break_device()
    with pytest.raises(pk.DeviceFault) as caught:
        wait_often(on, wait)

    demand_latched(on, caught.value)


def test_another_thread_reaches_nothing_of_a_store(device: pk.Device) -> None:
    """C12.4: ops, device, streams and events refuse as the store does; without a store the device is free again."""
    on, refused = Shared(device), dict[str, pk.PagedKVError | None]()

    def intrude() -> None:
        for name, call in {**WAYS, **WAITS, **OTHERS}.items():
            try:
                call(on)
            except pk.MisuseError as error:
                refused[name] = error

    thread = threading.Thread(target=intrude)
    before = [store.inspect() for store in (on.store, on.other)]
    thread.start()
    thread.join()

    assert {*WAYS, *WAITS, *OTHERS} == refused.keys()
    assert {("the thread and process that opened the store", "C12.4")} == {
        (error.expected, error.clause) for error in refused.values() if error is not None
    }
    for store, state in zip((on.store, on.other), before, strict=True):
        assert store.evidence is None
        assert not store.inspect().differences(state)
        store.fail(on.units[store])
        store.close()
    thread = threading.Thread(target=lambda: pk.open_store(CONFIG, device).close())
    thread.start()
    thread.join()
    pk.open_store(CONFIG, device).close()


def test_a_forked_process_reaches_nothing_of_a_store(device: pk.Device) -> None:
    """C12.4: the child counts what is refused, and the parent goes on."""
    on = Shared(device)
    calls = {**WAYS, **WAITS, **OTHERS}
    del calls["close the device"]
    child = os.fork()
    if child == 0:
        refused = 0
        for call in calls.values():
            try:
                call(on)
            except pk.MisuseError as error:
                refused += error.clause == "C12.4"
        os._exit(refused)
    _, status = os.waitpid(child, 0)

    assert len(calls) == os.waitstatus_to_exitcode(status)
    on.convert()
    for store in (on.store, on.other):
        store.fail(on.units[store])
        store.check()
        store.close()


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_capture_refuses_or_serves_each_call_of_another_store(is_aborted: bool, device: pk.Device) -> None:
    """C15.1: a refused call changes nothing and records nothing, and works when the capture has ended."""
    refused = []
    with pk.open_store(CONFIG, device) as capturing:
        for name, call in CALLS.items():
            stage = Stage(device)
            before = stage.store.inspect()
            device.begin_capture(capturing.stream)
            try:
                call(stage)
            except pk.CaptureRefused:
                refused.append(name)
                assert not stage.store.inspect().differences(before)
            with pytest.raises(pk.CaptureRefused):
                stage.store.close()
            with pytest.raises(pk.CaptureRefused):
                pk.open_store(CONFIG, device)
            if is_aborted:
                device.abort_capture(capturing.stream)
            else:
                assert device.end_capture(capturing.stream).nodes == ()

            assert stage.store.evidence is None
            if refused[-1:] == [name]:
                call(stage)
            stage.end()
            stage.store.close()
        capturing.check()
    assert {"begin_unit", "submit", "poll", "wait", "fail", "snapshot", "fork", "check"} <= {*refused}
    assert {"activate", "commit", "finish", "batch", "inspect"}.isdisjoint(refused)


def test_the_first_unit_of_a_store_is_begun_again_after_the_capture_of_another(device: pk.Device) -> None:
    """C15.1: it publishes table entries, which a capture does not permit; the store is not latched by that."""
    with pk.open_store(CONFIG, device) as capturing, pk.open_store(CONFIG, device) as store:
        sequence = store.activate(prompt_tokens=10, output_tokens=5)
        device.begin_capture(capturing.stream)
        with pytest.raises(pk.CaptureRefused):
            store.begin_unit(store.batch([sequence]), 10)
        device.end_capture(capturing.stream)
        run_unit(store, sequence, 10)

        assert store.committed_tokens(sequence) == 10


def test_a_loop_goes_on_when_the_capture_of_another_store_has_ended(device: pk.Device) -> None:
    """C9.5, C15.1: with the tokens that it would have given; work that it launches itself is not recorded."""
    with pk.open_store(CONFIG, device) as capturing, pk.open_store(CONFIG, device) as store:
        loop = DecodeLoop(store, ToyModel(store), prefill_chunk=16)
        sequences = [prefilled(loop, prompt(20, 1), 20) for _ in range(2)]
        texts = [loop.step([sequence])[sequence] for sequence in sequences]
        for _ in range(4):
            texts[1] += loop.step(sequences[1:])[sequences[1]]
        bits, floats = device.zeros((8,), np.uint16), device.zeros((8,), np.float32)
        for _ in range(4):
            device.begin_capture(capturing.stream)
            for call in (lambda: loop.step(sequences[:1]), lambda: list(loop.decode(sequences[:1])),
                         lambda: loop.prefill(sequences[0], [1], last_token=None),
                         lambda: UnitGraph(store, ToyModel(store), KEY)):
                with pytest.raises(pk.CaptureRefused):
                    call()
            store.ops.f32_from_bf16(floats, bits, stream=store.stream)
            assert not device.end_capture(capturing.stream).nodes
            texts[0] += loop.step(sequences[:1])[sequences[0]]

        assert texts[0] == texts[1]
        store.check()


def test_the_end_of_one_store_leaves_the_other(device: pk.Device) -> None:
    """C12.4: closing aborts an own capture, also in the middle of its warm-up, and the other store goes on."""
    store, other = pk.open_store(CONFIG, device), pk.open_store(CONFIG, device)
    sequence = other.activate(prompt_tokens=10, output_tokens=5)
    unit = other.begin_unit(other.batch([sequence]), 10)
    device.begin_capture(store.stream)
    store.close()
    other.wait(unit)
    other.commit(unit)

    assert other.committed_tokens(sequence) == 10
    store = pk.open_store(CONFIG, device)

    class Closing(ToyModel):
        def enqueue(self, unit: Unit) -> None:
            super().enqueue(unit)
            if unit.stream.is_capturing:
                store.close()

    with pytest.raises(pk.CaptureRefused):
        UnitGraph(store, Closing(store), KEY)
    other.finish(sequence)
    other.check()
    other.close()


def test_a_device_outlives_no_store_that_uses_it() -> None:
    """C12.4: a store that owns its device closes last; on a closed device a store begins nothing."""
    owner = pk.open_store(CONFIG, "cpu")
    with pk.open_store(CONFIG, owner.device) as other:
        with pytest.raises(pk.MisuseError, match="close the other store first"):
            owner.close()
        other.check()
        owner.check()
    owner.close()
    device = pk.open_device("cpu")
    store = pk.open_store(CONFIG, device)
    batch = store.batch([store.activate(prompt_tokens=10, output_tokens=5)])
    before = store.inspect()
    device.close()
    with pytest.raises(pk.MisuseError, match="closed device"):
        store.begin_unit(batch, 10)

    assert store.evidence is None
    assert not store.inspect().differences(before)
