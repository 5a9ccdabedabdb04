"""The store: one thread, completion before commit, a latch after a device error, aborts, a closed store."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.devices.cpu.device import CpuDevice
from tests.placement import shuffle_placement
from tests.toy_model import run_unit

CONFIG = pk.StoreConfig(pk.KVGeometry(layers=1, query_heads=2, kv_heads=1, head_dim=64), profile="int8-g64",
                        max_context=256, max_concurrency=2, kv_capacity=pk.ExplicitCapacity(512),
                        backend=pk.MTPBackend(draft_window=3))

# 16 KiB past the end: within the guard behind the buffer. Farther out may lie memory of somebody else.
CRASH = """
extern "C" __global__ void crash(int* target) { target[1 << 12] = 1; }
extern "C" __global__ void slip(int* target) { target[1] = 1; }
"""


def test_a_unit_is_committed_only_after_it_completed() -> None:
    """C12.3: wait, or poll after submit, comes first; nothing changed by the refusal."""
    with pk.open_store(CONFIG, device="cpu") as store:
        sequence = store.activate(prompt_tokens=10, output_tokens=5)
        unit = store.begin_unit(store.batch([sequence]), 10)
        with pytest.raises(pk.MisuseError, match="wait"):
            store.commit(unit)

        assert store.committed_tokens(sequence) == 0
        store.submit(unit)
        store.stream.synchronize()
        assert store.poll() == [unit]
        store.commit(unit)
        assert store.committed_tokens(sequence) == 10
        with pytest.raises(pk.MisuseError, match="has ended"):
            store.commit(unit)
        assert store.poll() == []
        store.check()


@pytest.mark.parametrize(("output", "columns"), [(5, {"main": 64, "mtp": 64}), (52, {"main": 64, "mtp": 64}),
                                                 (53, {"main": 64, "mtp": 128}), (246, {"main": 256, "mtp": 256})])
def test_budget_and_lead_are_reserved_in_whole_pages(output: int, columns: dict[str, int]) -> None:
    """C9.1, C5.6: a row may write to the end of its last page, below S = 256; the lead is rounded up with it."""
    with pk.open_store(CONFIG, device="cpu") as store:
        sequence = store.activate(prompt_tokens=10, output_tokens=output)
        batch = store.batch([sequence])
        assert columns == {pool: int(store.covered_columns(batch, pool)[0]) for pool in ("main", "mtp")}
        with pytest.raises(pk.EntitlementExceeded if output < 246 else pk.MisuseError):
            store.begin_unit(batch, columns["main"] + 1)

        run_unit(store, sequence, columns)
        assert columns["main"] == store.committed_tokens(sequence) >= store.budget_tokens(sequence)
        store.check()


def test_an_abort_in_flight_takes_effect_at_the_boundary() -> None:
    """C12.4, C9.5: abort ends the sequence with its unit; a failed unit leaves its frontiers, and the row thaws."""
    with pk.open_store(CONFIG, device="cpu") as store:
        sequence, other = (store.activate(prompt_tokens=10, output_tokens=5) for _ in range(2))
        unit = store.begin_unit(store.batch([sequence]), 10)

        assert store.abort(sequence) is False
        store.wait(unit)
        store.commit(unit)
        with pytest.raises(pk.StaleHandle):
            store.committed_tokens(sequence)
        store.fail(store.begin_unit(store.batch([other]), {"main": 10, "mtp": 12}))
        assert store.committed_tokens(other) == store.committed_tokens(other, "mtp") == 0
        store.finish(other)
        assert store.memory_summary()["main"]["available_pages"] == 8
        store.check()


def test_a_device_error_latches_the_store() -> None:
    """C12.4: afterwards only close, memory_summary and the evidence answer."""
    with pk.open_store(CONFIG, device="cpu") as store:
        sequence = store.activate(prompt_tokens=10, output_tokens=5)
        module = store.device.load(pk.ModuleSpec(name="crash", text=CRASH, kernels=("crash",)))
        target = store.device.zeros((4,), np.int32)
        store.device.begin_capture(store.stream)
        module.kernel("crash").launch((1, 1, 1), (1, 1, 1), [target], store.stream)
        graph = store.device.end_capture(store.stream)
        with pytest.raises(pk.DeviceFault, match="crash"):  # noqa: PT012 - which of the two meets it depends on the mode
            store.launch_graph(graph)
            store.check()  # where a device that defers its work meets the fault

        assert isinstance(store.evidence, pk.DeviceFault)
        with pytest.raises(pk.StoreLatched):
            store.finish(sequence)
        with pytest.raises(pk.StoreLatched):
            store.try_activate(prompt_tokens=1, output_tokens=1)
        assert store.memory_summary()["main"]["reserved_pages"] == 1


def test_lost_handles_are_found_again() -> None:
    """C12.4: `sequences`, `units` and `continuations` give handles that equal the original ones."""
    with pk.open_store(CONFIG, device="cpu") as store:
        assert (store.sequences(), store.units(), store.continuations()) == ([], [], [])
        first, second = (store.activate(prompt_tokens=10, output_tokens=5) for _ in range(2))
        units = [store.begin_unit(store.batch([sequence]), 10) for sequence in (second, first)]

        assert store.sequences() == [first, second]
        assert store.units() == units
        assert "written" not in repr(units[0]), "the arrays of a unit are not printed"
        assert repr(units[0].batch) == f"Batch(sequences={(second,)})"
        store.units().clear()
        store.fail(store.units()[0])
        assert store.units() == units[1:]
        unit = store.units()[0]
        store.wait(unit)
        store.commit(unit)
        saved = store.finish(store.sequences()[0], retain=True, state=pk.STATE_FOLLOWS)
        assert (store.sequences(), store.units(), store.continuations()) == ([second], [], [saved])


def test_another_thread_is_refused() -> None:
    """One thread per store; the refusal changes nothing."""
    errors: list[BaseException] = []

    def intrude(store: pk.Store) -> None:
        try:
            store.activate(prompt_tokens=1, output_tokens=1)
        except pk.MisuseError as error:
            errors.append(error)

    with pk.open_store(CONFIG, device="cpu") as store:
        thread = threading.Thread(target=intrude, args=(store,))
        thread.start()
        thread.join()

        assert len(errors) == 1
        assert store.memory_summary()["main"]["available_pages"] == 8
        store.check()


def test_a_closed_store_refuses_and_closing_twice_is_harmless() -> None:
    """The life of a store ends once, a device that it opened by name ends with it, and its counters still answer."""
    store = pk.open_store(CONFIG, device="cpu")
    named = store.device
    store.close()
    store.close()

    for ask in (store.sequences, store.units, store.continuations, store.poll, store.inspect, store.check,
                lambda: store.activate(prompt_tokens=1, output_tokens=1), lambda: store.observe(print)):
        with pytest.raises(pk.MisuseError, match="a closed one"):
            ask()
    assert store.event_counts()["main"]["release"] == {"pages": 0, "bytes": 0}
    with pytest.raises(pk.MisuseError, match="closed device"):
        named.stream()
    passed = pk.open_device("cpu")
    pk.open_store(CONFIG, device=passed).close()
    passed.stream()
    passed.close()


def test_closing_waits_for_units_in_flight_and_names_them(caplog: pytest.LogCaptureFixture) -> None:
    """C12.4: one warning says which units and sequences ended; without a unit in flight there is none."""
    device = CpuDevice(mode="deferred", schedule="late")
    with caplog.at_level(logging.WARNING, logger="pagedkv"), pk.open_store(CONFIG, device) as store:
        first, second = (store.activate(prompt_tokens=10, output_tokens=5) for _ in range(2))
        target = store.device.pinned((4,), np.int32)
        store.begin_unit(store.batch([second]), 1, name="verify")
        store.begin_unit(store.batch([first]), 1, name="draft")
        store.device.copy(target, store.device.zeros((4,), np.int32), store.stream)
    device.close()
    assert not target.any()
    texts = f"verify#1 of {second}; draft#2 of {first}"
    assert caplog.messages == [f"close ended units in flight without a commit: {texts}"]

    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="pagedkv"), pk.open_store(CONFIG, device="cpu") as store:
        run_unit(store, store.activate(prompt_tokens=10, output_tokens=5), 10)
    assert not caplog.messages


def interrupted_wait(stream: pk.Stream) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("fault", ["none", "unit", "unit and memory", "wait", "latched"])
def test_closing_runs_to_its_end_and_raises_the_first_error(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C12.4: of a failed kernel, an overwritten canary and an interrupt the first is raised, the rest are notes."""
    device = CpuDevice(mode="deferred", schedule="late")
    store = pk.open_store(CONFIG, device)
    store.owns_device = True
    kernels = device.load(pk.ModuleSpec("crash", text=CRASH, kernels=("crash", "slip")))
    kept = device.zeros((1,), np.int32, align_bytes=64)
    store.begin_unit(store.batch([store.activate(prompt_tokens=10, output_tokens=5)]), 1)
    if fault in ("unit", "unit and memory", "latched"):
        kernels.kernel("crash").launch((1, 1, 1), (1, 1, 1), [store.device.zeros((4,), np.int32)], store.stream)
    if fault == "unit and memory":
        other = device.stream()
        kernels.kernel("slip").launch((1, 1, 1), (1, 1, 1), [kept], other)
        other.synchronize()
    if fault == "latched":
        with pytest.raises(pk.DeviceFault):
            store.check()
    if fault == "wait":
        monkeypatch.setattr(type(store.stream), "synchronize", interrupted_wait)
    kind = {"unit": pk.DeviceFault, "unit and memory": pk.DeviceFault, "wait": KeyboardInterrupt}.get(fault)
    with contextlib.nullcontext() if kind is None else pytest.raises(kind) as caught:
        store.close()
    if fault == "unit and memory":
        assert caught is not None
        assert "crash" in str(caught.value)
        assert "overwritten" in caught.value.__notes__[0]
    store.close()
    for use in (store.poll, device.stream):
        with pytest.raises(pk.MisuseError, match="closed"):
            use()
    assert device.allocated_bytes <= 2 * 16, "what the test and the traceback of the fault hold"


def test_pools_commit_and_trim_apart() -> None:
    """C9.9, C13.1: a round maps both pools, commits each its own and trims each its own tail."""
    with pk.open_store(CONFIG, device="cpu") as store:
        sequence = store.activate(prompt_tokens=62, output_tokens=10)
        batch = store.batch([sequence])
        run_unit(store, sequence, {"main": 62, "mtp": 62})
        run_unit(store, sequence, {"main": 1, "mtp": 4}, {"main": 1, "mtp": 2})

        assert (store.committed_tokens(sequence), store.committed_tokens(sequence, "mtp")) == (63, 64)
        assert (len(store.page_ids(sequence)), len(store.page_ids(sequence, "mtp"))) == (1, 2)
        assert (store.trim(batch), store.trim(batch, "mtp")) == (0, 1)
        store.truncate(sequence, 10, "mtp")
        assert (store.committed_tokens(sequence), store.committed_tokens(sequence, "mtp")) == (63, 10)
        store.check()


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_rows_that_cross_together_are_published_by_two_device_calls(device: pk.Device, rows: int) -> None:
    """C11.2: one row is one copy; more are one copied list and one launch.  A window of ids is published at once."""
    tokens = 70 * 64
    config = dataclasses.replace(CONFIG, max_context=tokens, max_concurrency=7, backend=None,
                                 kv_capacity=pk.ExplicitCapacity(7 * tokens))
    with pk.open_store(config, device) as store:
        shuffle_placement(store, seed=1)
        batch = store.batch([store.activate(prompt_tokens=tokens, output_tokens=0) for _ in range(rows)])
        calls = 1 if rows == 1 else 2
        for columns, expected in ((64, calls), (8, 0), (8, 0), (64 * 63 - 16, 0), (1, calls), (64 * 5, 0)):
            before = device.driver_calls
            unit = store.begin_unit(batch, columns)
            assert device.driver_calls - before == expected
            store.wait(unit)
            store.commit(unit)
            store.check()  # compares the device tables
        assert store.published_slices == 5 * rows


def test_rows_that_cross_together_into_more_than_their_windows_are_published_whole(device: pk.Device) -> None:
    """C11.2: 70 new pages of each of 3 rows, where the list holds 64 for each."""
    tokens = 70 * 64
    config = dataclasses.replace(CONFIG, max_context=tokens, max_concurrency=3, backend=None,
                                 kv_capacity=pk.ExplicitCapacity(3 * tokens))
    with pk.open_store(config, device) as store:
        shuffle_placement(store, seed=1)
        batch = store.batch([store.activate(prompt_tokens=tokens, output_tokens=0) for _ in range(3)])
        before = device.driver_calls
        store.fail(store.begin_unit(batch, tokens))
        assert device.driver_calls - before == 4 + 1, "two lists of one copy and one launch, and the wait"
        store.check()  # compares the device tables


def append_token(store: pk.Store, view: pk.PagedKVLayerView, word: int, position: int) -> None:
    """Append one K and V row of a word at a position, through the view of one sequence."""
    k, v = (store.device.zeros((1, 1, 1, 64), np.uint16) for _ in range(2))
    k[...], v[...] = word, word
    positions = store.device.zeros((1,), np.int32)
    positions[...] = position
    store.ops.append(view, k, v, positions, stream=store.stream)
    store.stream.synchronize()


@pytest.mark.parametrize("pool", ["main", "mtp"])
def test_a_view_of_one_sequence_holds_until_it_ends(device: pk.Device, pool: str) -> None:
    """C14.1, C6.1: it shows pages that are mapped later, and never those of the next sequence of the same row."""
    with pk.open_store(CONFIG, device=device) as store:
        first = store.activate(prompt_tokens=100, output_tokens=5)
        view = store.layer_view(first, pool)
        store.ensure_mapped_to_tokens(first, 70, pool)
        append_token(store, view, 0x3F80, 65)
        scales = store.views[pool][0].k_scale_pages
        assert scales is not None
        page = scales[store.page_ids(first, pool)[1]]
        assert float(page[0, 1].view(np.float16)[0]) > 0
        store.finish(first)
        second = store.activate(prompt_tokens=100, output_tokens=5)
        assert second.row == first.row
        store.ensure_mapped_to_tokens(second, 70, pool)

        before = {role: plane.copy() for (plane, _), role in zip(store.views[pool][0].planes, "abcd", strict=True)}
        with pytest.raises(pk.StaleHandle):
            append_token(store, view, 0x4000, 65)
        for (plane, _), role in zip(store.views[pool][0].planes, "abcd", strict=True):
            np.testing.assert_array_equal(np.asarray(before[role]), np.asarray(plane))
        append_token(store, store.layer_view(second, pool), 0x4000, 65)
        store.check()
    with pytest.raises(pk.MisuseError, match="a closed one"):
        append_token(store, view, 0, 65)


def test_a_view_of_one_sequence_is_refused_under_capture_and_for_what_is_not_there(device: pk.Device) -> None:
    """C15.2, C14.1: a graph would freeze the row's address; nothing is recorded."""
    with pk.open_store(CONFIG, device=device) as store:
        sequence = store.activate(prompt_tokens=100, output_tokens=5)
        view = store.layer_view(sequence)
        k, positions = store.device.zeros((1, 1, 1, 64), np.uint16), store.device.zeros((1,), np.int32)
        store.ops.prepare("int8-g64", 64)
        store.device.begin_capture(store.stream)
        with pytest.raises(pk.CaptureRefused, match="layer_view"):
            store.layer_view(sequence)
        with pytest.raises(pk.CaptureRefused, match="view of one sequence"):
            store.ops.append(view, k, k, positions, stream=store.stream)
        assert not store.device.end_capture(store.stream).nodes
        for pool, layer in (("main", 1), ("main", -1), ("main", True), ("draft", 0), (None, 0)):
            with pytest.raises(pk.MisuseError):
                store.layer_view(sequence, pool, layer)  # type: ignore[arg-type]
        store.finish(sequence)
        with pytest.raises(pk.StaleHandle):
            store.layer_view(sequence)
