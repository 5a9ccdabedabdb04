"""What a careless embedder does through public names: every refusal is ours, and nothing changed by it.

Tests of one owner stand with that owner; here is what crosses several: handles, units, loops, copies, closing.
`hostile/` has every hostile value and array in every call.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.devices import CpuDevice
from pagedkv.graphs import DecodeLoop, GraphKey, Unit, UnitGraph
from tests.host.refusals import refused
from tests.hostile.values import Speechless
from tests.toy_model import ToyModel

GEOMETRY = pk.KVGeometry(layers=2, query_heads=2, kv_heads=1, head_dim=64)
CONFIG = pk.StoreConfig(GEOMETRY, profile="bf16", max_context=256, max_concurrency=2,
                        kv_capacity=pk.ExplicitCapacity(512))
KEY = GraphKey("decode", "decode", 1, 1, is_masked=True, profile="bf16", geometry=GEOMETRY, max_context=256,
               scale=0.125)
CRASH = """
extern "C" __global__ void crash(int* target) { target[1 << 12] = 1; }
"""


@contextlib.contextmanager
def opened() -> Iterator[pk.Store]:
    """Open the small store on the cpu device and check it at the end."""
    with pk.open_store(CONFIG, device="cpu") as store:
        yield store
        store.check()


class Meddler:
    """A model that does something of its own before and after the work of another."""

    def __init__(self, inner: ToyModel, before: Callable[[Unit], None] | None = None,
                 after: Callable[[Unit], None] | None = None) -> None:
        self.inner, self.before, self.after = inner, before, after

    def enqueue(self, unit: Unit) -> None:
        """Enqueue it all."""
        if self.before:
            self.before(unit)
        self.inner.enqueue(unit)
        if self.after:
            self.after(unit)


def fail_beyond_position_11(valid_columns: Any, first_positions: Any) -> None:
    """Raise on the stream, at a replay only."""
    if (valid_columns > 0).any() and first_positions.max() > 11:
        raise LookupError("no such position")


class Shifting(pk.Sequence):
    """A handle that may answer otherwise each time it is asked."""

    @property
    def rows(self) -> int:
        return self.row


class Unchecked(pk.ActivationTarget):
    """A target whose numbers nobody has checked."""

    def __post_init__(self) -> None:
        return None


def test_what_is_of_another_kind_is_refused() -> None:
    """C9.3, C10.1: no handle, one of another kind, a repr that raises, an int with more digits than Python prints."""
    with opened() as store:
        sequence = store.activate(prompt_tokens=4, output_tokens=0)
        batch = store.batch([sequence])
        unprintable: tuple[Any, ...] = (Speechless(), [Speechless()], 10**5000)
        strangers = (*unprintable, sequence, [sequence], None, 5)
        no_sequences = (*unprintable, None, 5, "x", [], pk.Refusal("rows", 1, 0, forever=False),
                        Shifting(sequence.store_id, sequence.row, sequence.serial))
        table: tuple[tuple[str, tuple[Any, ...], Callable[[Any], object]], ...] = (
            *(("C10.1", no_sequences, getattr(store, name))
              for name in ("finish", "abort", "committed_tokens", "budget_tokens", "page_ids")),
            *(("C12.3", strangers, getattr(store, name)) for name in ("submit", "wait", "commit", "fail")),
            ("C11.3", (sequence, None, 5), store.batch), ("C11.3", strangers, lambda value: store.begin_unit(value, 1)),
            ("C9.8", unprintable, store.release),
            ("C9.8", unprintable, lambda value: store.finish(sequence, state=value)),
            ("C9.8", (*unprintable, 1, "no", np.True_, None), lambda value: store.finish(sequence, retain=value)),
            ("C9.10", unprintable, lambda value: store.truncate(sequence, value)),
            ("C3.3", unprintable, lambda value: store.page_ids(sequence, value)),
            ("C3.3", ([],), lambda value: store.committed_tokens(sequence, value)),
            ("C9.3", unprintable, lambda value: store.ensure_mapped_to_tokens(sequence, value)),
            ("C9.2", unprintable, lambda value: store.activate(prompt_tokens=value, output_tokens=0)),
            ("C9.2", unprintable, lambda value: store.activate(prompt_tokens=1, output_tokens=value)),
            ("C10.9", ((4, 0), Unchecked(-500, 0)), store.can_honour),
            ("C14.4", unprintable, lambda value: store.begin_unit(batch, value)),
            ("C12.2", unprintable, lambda value: store.begin_unit(batch, 1, name=value)),
            ("C15.1", (*unprintable, None), store.launch_graph),
            ("C15.1", unprintable, lambda value: store.graph_buffer(value, value)),
            ("C9.6", unprintable, store.observe), ("C12.4", unprintable, store.latch),
        )
        for clause, values, call in table:
            for value in values:
                with refused(pk.MisuseError, clause, store._ledger):
                    call(value)
        with refused(pk.MisuseError, "C9.8", store._ledger, match="retain"):
            store.finish(sequence, retain=1)  # type: ignore[arg-type]
        assert store.evidence is None
        assert store.begin_unit(batch, 1, name="unit").label == "unit#1"
        store.fail(store.units()[0])


@pytest.mark.parametrize(("shape", "dtype", "error"), [
    ("12", np.int32, pk.MisuseError), (5.0, np.int32, pk.MisuseError), (4, "no type", pk.MisuseError),
    ((1 << 62,), np.int32, pk.CapacityError), (1 << 20000, np.int8, pk.CapacityError),
], ids=["str", "float", "dtype", "2**64 bytes", "digits"])
def test_a_buffer_that_no_memory_has_is_refused(shape: Any, dtype: Any, error: type[pk.PagedKVError]) -> None:
    """C15.1, C5.4: 2**64 bytes are not taken for none."""
    with opened() as store, pytest.raises(error):
        store.graph_buffer(shape, dtype)


@pytest.mark.parametrize("duplicate", [
    lambda batch: batch, copy.copy, copy.deepcopy, lambda batch: pickle.loads(pickle.dumps(batch)),
])
def test_what_a_batch_and_its_unit_show_cannot_be_written(duplicate: Callable[[pk.Batch], pk.Batch]) -> None:
    """C12.1: rows, positions and counts of a unit in flight are the ledgers' own; so for a unit of a copied batch."""
    with opened() as store:
        batch = store.batch([store.activate(prompt_tokens=200, output_tokens=0)])
        store.fail(store.begin_unit(batch, 3))
        unit = store.begin_unit(duplicate(batch), [3])
        for array in (batch.rows, unit.rows, unit.columns["main"], unit.written["main"].by_row,
                      unit.first_positions["main"]):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 100
        store.fail(unit)


def test_columns_that_call_the_store_are_read_before_any_check() -> None:
    """C12.1: their row goes into one unit, and not into a second one while its columns are being read."""

    class Meddling:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            if not store.units():
                store.begin_unit(batch, 1)
            return np.array([1])

    with opened() as store:
        batch = store.batch([store.activate(prompt_tokens=4, output_tokens=0)])
        with pytest.raises(pk.UnitInFlight):
            store.begin_unit(batch, Meddling())  # type: ignore[arg-type]
        with pytest.raises(pk.UnitInFlight):
            store.begin_unit(batch, {"main": Meddling()})  # type: ignore[dict-item]
        assert store.evidence is None
        store.fail(store.units()[0])


@pytest.mark.parametrize(("row", "serial", "process"), [
    (True, 1, -1), ("0", 1, -1), (0.0, 1, -1), (np.int64(0), 1, -1), (-1, 1, -1), (0, None, -1), (0, 1, 0xFFFFFFFF),
])
def test_a_forged_handle_is_stale(row: Any, serial: Any, process: int) -> None:
    """C10.1: plain integers name a row, and the process is a part of the store's id: both could number from 1."""
    with opened() as store:
        own = store.activate(prompt_tokens=4, output_tokens=0)
        assert (own.store_id >> 32, own.row, own.serial) == (os.getpid(), 0, 1)
        with refused(pk.StaleHandle, "C10.1", store._ledger):
            store.finish(pk.Sequence(own.store_id & process, row, serial))


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_work_submitted_after_a_completion_is_waited_for(is_interrupted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """C12.3: a second submit takes the completion back, and so does one that an interrupt ends."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with opened() as store:
        unit = store.begin_unit(store.batch([store.activate(prompt_tokens=4, output_tokens=0)]), 4)
        store.wait(unit)
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            if is_interrupted:
                patch.setattr(store.device, "event", interrupt)
            store.submit(unit)
            assert not is_interrupted
        with refused(pk.MisuseError, "C12.3", store._ledger):
            store.commit(unit)
        store.wait(unit)
        store.commit(unit)
        assert store.poll() == []


def test_who_asks_for_evidence_in_the_middle_of_an_operation_leaves_none() -> None:
    """C12.4: as a watching thread or a signal handler does; afterwards the operation has not broken off."""

    class Watching(io.StringIO):
        def flush(self) -> None:
            seen.append(store.evidence)

    seen: list[pk.PagedKVError | None] = []
    store = pk.open_store(CONFIG, device="cpu")
    store.close()
    store = pk.open_store(CONFIG, device="cpu", journal=Watching())
    store.finish(store.activate(prompt_tokens=4, output_tokens=0))

    assert {type(error) for error in seen[1:]} == {pk.BrokenOff}
    assert store.evidence is None
    store.close()


def test_a_store_is_neither_copied_nor_pickled() -> None:
    """C1.1: a shallow copy would share ledgers and forget the latch."""
    with opened() as store:
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(pk.MisuseError, match="a copy of a store"):
                duplicate(store)


def test_a_configuration_crosses_a_process_boundary() -> None:
    """C4.1: its profile is the one of the set again, so automatic capacity resolves."""
    config = pk.StoreConfig(GEOMETRY, profile="k8v4", max_context=256, max_concurrency=2, kv_capacity=pk.AutoCapacity())
    for twin in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert twin.profile is pk.PROFILES["k8v4"]
        assert pk.plan(twin, 1 << 40) == pk.plan(config, 1 << 40)


def launch_a_crash(store: pk.Store) -> None:
    """Launch a kernel that will fail; a deferred device says so when something waits for it."""
    module = store.device.load(pk.ModuleSpec("crash", text=CRASH, kernels=("crash",)))
    module.kernel("crash").launch((1, 1, 1), (1, 1, 1), [store.device.zeros((4,), np.int32)], store.stream)


@pytest.mark.parametrize("call", [
    lambda store, model: store.check(), lambda store, model: UnitGraph(store, model, KEY),
    lambda store, model: store.close(),
], ids=["check", "warm-up", "close"])
def test_a_call_that_meets_a_fault_latches_the_store(call: Callable[[pk.Store, ToyModel], object]) -> None:
    """C12.4: not only a wait; the store closes all the same, once, and the fault is a note on what came first."""
    store = pk.open_store(CONFIG, device=CpuDevice(mode="deferred"))
    model = ToyModel(store)
    launch_a_crash(store)
    with pytest.raises(pk.DeviceFault, match="crash") as caught:
        call(store, model)

    assert store.evidence is caught.value
    store.close()
    with pytest.raises(pk.MisuseError, match="a closed one"):
        store.poll()
    other, first = pk.open_store(CONFIG, device=CpuDevice(mode="deferred")), KeyError("first")
    launch_a_crash(other)
    other.__exit__(KeyError, first, None)
    assert "crash" in first.__notes__[0]


def test_closing_comes_after_a_capture_and_before_the_device() -> None:
    """C12.4: a capture that its owner left open keeps no store from closing; the wrong order is said once."""
    device = pk.open_device("cpu")
    store = pk.open_store(CONFIG, device=device)
    device.begin_capture(store.stream)
    store.close()
    assert not store.stream.is_capturing

    store = pk.open_store(CONFIG, device=device)
    device.close()
    with pytest.raises(pk.MisuseError, match="closed device"):
        store.close()
    store.close()


@pytest.mark.parametrize("device", [None, 5, [], object()])
def test_what_is_no_device_or_no_configuration_is_refused(device: Any) -> None:
    """C1.1: with the names that would do."""
    with pytest.raises(pk.MisuseError, match="auto, cpu, cuda, none or a Device"):
        pk.open_store(CONFIG, device=device)
    with pytest.raises(pk.ConfigError, match="StoreConfig"):
        pk.open_store(device, device="cpu")


def test_ledgers_beyond_host_memory_are_a_capacity_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """C5.2: explicit capacity measures nothing, so the allocation says it."""

    def lack(config: pk.StoreConfig, store_id: int) -> None:
        raise MemoryError("Unable to allocate 256. GiB")

    monkeypatch.setattr("pagedkv.store.store.Ledger", lack)
    with pytest.raises(pk.CapacityError, match="page descriptors"):
        pk.open_store(CONFIG, device="cpu")


# ---- the loop ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [None, 5, "abc", [True], [-5], [1 << 40], [1 << 70], [[1], [1, 2]], [None]], ids=repr)
def test_what_is_no_token_id_is_neither_prefilled_nor_a_stop(ids: Any) -> None:
    """C14.4: 2^40 would wrap to another token, True would be 1, and a text stops nothing."""
    with opened() as store:
        loop = DecodeLoop(store, ToyModel(store))
        sequence = store.activate(prompt_tokens=4, output_tokens=2)
        with refused(pk.MisuseError, "C14.4", store._ledger, loop._outputs):
            loop.prefill(sequence, ids)
        loop.prefill(sequence, [1, 2, 3, 4])
        with refused(pk.MisuseError, "C14.4", store._ledger, loop._outputs):
            loop.step([sequence], stop_tokens=ids)


def test_a_refused_step_changes_no_sequence() -> None:
    """C11.3, C9.4: stop tokens end nothing before every handle was looked at; decode refuses before its first step."""
    with opened() as store:
        loop = DecodeLoop(store, ToyModel(store))
        sequence, stranger = (store.activate(prompt_tokens=4, output_tokens=2) for _ in range(2))
        loop.prefill(sequence, [1, 2, 3, 4])
        stops = [loop.last_token(sequence)]
        cases: tuple[tuple[Any, str], ...] = (([sequence, sequence], "C11.3"), (sequence, "C11.3"), (None, "C11.3"),
                                              ([[]], "C11.3"), ([sequence, stranger], "C9.4"))
        for named, clause in cases:
            with refused(pk.MisuseError, clause, store._ledger, loop._outputs):
                loop.step(named, stop_tokens=stops)
            with refused(pk.MisuseError, clause, store._ledger, loop._outputs):
                loop.decode(named, stop_tokens=stops)


@pytest.mark.parametrize("mode", ["eager", "deferred"])
@pytest.mark.parametrize("use_graphs", [True, False])
def test_a_call_that_raises_at_a_replay_moves_nothing(use_graphs: bool, mode: str) -> None:
    """C9.5: the error is the model's own; its step may be made again."""
    with pk.open_store(CONFIG, device=CpuDevice(mode=mode)) as store:
        meddler = Meddler(ToyModel(store), after=lambda unit: unit.call(
            fail_beyond_position_11, unit.valid_columns, unit.first_positions))
        loop = DecodeLoop(store, meddler, use_graphs=use_graphs)
        sequence = store.activate(prompt_tokens=10, output_tokens=6)
        loop.prefill(sequence, range(10))
        loop.step([sequence])
        loop.step([sequence])
        for _ in range(2):
            with pytest.raises(LookupError, match="no such position"):
                loop.step([sequence])

        assert store.committed_tokens(sequence) == 12


@pytest.mark.parametrize("meddling", [
    lambda unit: unit.attend(2, None, None, None, None), lambda unit: unit.attend(-1, None, None, None, None),
    lambda unit: unit.attend(True, None, None, None, None),
    lambda unit: unit.attend(0, None, None, None, None, pool="mtp"), lambda unit: unit.empty(5.0, np.int32),
    lambda unit: unit.empty((1,), "zz"), lambda unit: unit.launch(None, (1, 1, 1), (1, 1, 1), ()),
])
def test_what_a_model_asks_wrongly_is_refused_at_its_first_enqueue(meddling: Callable[[Unit], None]) -> None:
    """C14.1, C15.1: layer -1 would be the last one; nothing is allocated and no frontier moves."""
    with opened() as store:
        loop = DecodeLoop(store, Meddler(ToyModel(store), before=meddling))
        sequence = store.activate(prompt_tokens=4, output_tokens=2)
        with pytest.raises(pk.MisuseError):
            loop.prefill(sequence, [1, 2, 3, 4])

        assert (store.committed_tokens(sequence), store.graph_bytes) == (0, 0)


@pytest.mark.parametrize("changed", [
    {"batch": True}, {"batch": "1"}, {"batch": 0}, {"batch": 1.5}, {"width": 0}, {"route": "x"}, {"profile": "k8v4"},
    {"max_context": 64}, {"geometry": pk.KVGeometry(1, 1, 1, 64)}, {"scale": None}, {"scale": float("nan")},
], ids=repr)
def test_a_key_that_is_no_shape_of_the_store_is_refused(changed: dict[str, Any]) -> None:
    """C15.2: a captured unit is what its key says."""
    with opened() as store:
        model = ToyModel(store)
        assert UnitGraph(store, model, KEY).graph is not None
        with pytest.raises(pk.MisuseError):
            UnitGraph(store, model, dataclasses.replace(KEY, **changed))


def test_a_loop_is_built_of_a_store_and_a_model() -> None:
    """C15: anything else is said at construction, not at the first prefill."""
    with opened() as store:
        for wrong in ((None, ToyModel(store)), (store, None), (store, object())):
            with pytest.raises(pk.MisuseError, match="a decode loop"):
                DecodeLoop(*wrong)
        with pytest.raises(pk.MisuseError, match="got the class ToyModel; make one of the class"):
            DecodeLoop(store, ToyModel)  # type: ignore[arg-type]


@pytest.mark.parametrize("ask", [
    lambda: pk.plan(None, 1),  # type: ignore[arg-type]
    lambda: pk.plan(CONFIG, 1 << 40, total_bytes=-1),
    lambda: pk.plan(CONFIG, 1 << 40, cache_bytes="x"),  # type: ignore[arg-type]
    lambda: pk.control_words(batch="1", width=1),  # type: ignore[arg-type]
    lambda: pk.control_words(batch=0, width=1),
    lambda: pk.control_words(batch=1, width=1, words=65),
    lambda: pk.clause(5),  # type: ignore[arg-type]
])  # fmt: skip
def test_values_of_another_kind_are_refused(ask: Callable[[], object]) -> None:
    """C5.3, C15.1, C0: functions of plain values."""
    with pytest.raises(pk.MisuseError):
        ask()


def test_a_plan_never_takes_more_pages_than_ids() -> None:
    """C3.6: page ids are int32, however much memory there is."""
    config = pk.StoreConfig(GEOMETRY, profile="bf16", max_context=1 << 30, max_concurrency=4096,
                            kv_capacity=pk.AutoCapacity())

    assert pk.plan(config, 1 << 60).pages == 1 << 30
