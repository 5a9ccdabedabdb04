"""Every line of every public call of a store is interrupted once.  (C10.2, C12.4)

Afterwards the store is as before the call, or as after it, or it is latched.  Where it is not latched, the call is made
again if it had not happened, everything is finished, and every page is free: never two owners of one page, never an
error of another kind later.
"""

from __future__ import annotations

import contextlib
import gc
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pagedkv as pk
from pagedkv.devices.cpu.device import CpuDevice
from tests.hostile.interrupt import ERRORS, Interrupt
from tests.kernels.cpu_helpers import cpu_device
from tests.toy_model import retained, run_unit

GEOMETRY = pk.KVGeometry(layers=1, query_heads=2, kv_heads=1, head_dim=64)
CONFIG = pk.StoreConfig(
    GEOMETRY, profile="int8-g64", max_context=512, max_concurrency=8, kv_capacity=pk.ExplicitCapacity(34 * 64),
    backend=pk.MTPBackend(4), kv_lease_growth=True, lease_window_tokens=64, codec_events=True,
    host_arena_bytes=1 << 20,
)


class Stage:
    """A store in which every public call has something to do: the subject of one interrupt.

    Attributes:
        running: 100 tokens committed, and one page of Main behind the frontier.
        settled: 70 tokens committed, and no page behind the frontier.
        thin: 130 tokens committed, beyond the point at which its lease grows.
        fresh: nothing mapped.
        other: 65 tokens committed, in the unit `flying`, which the device has finished.
        kept: a continuation of 130 tokens, protected up to 64 tokens, with a state.
        far: a continuation of 130 tokens on the Host alone.
        near: likewise, in both places.
        coming: a sequence that restores `far`, whose copies have run, where the call asks for it; else None.
        shared: a continuation whose full pages `running` shares.
        buffers: of `graph_buffer`; its array must not die inside the interrupted block.
        graph: captured, copies the first of them into the second.
    """

    def __init__(self, device: pk.Device, call: str = "") -> None:
        self.store = store = pk.open_store(CONFIG, device)
        self.far, self.near = retained(store, self.written(130)), retained(store, self.written(64))
        store.demote(self.far)
        store.demote(self.near)
        store.finish(store.activate(prompt_tokens=1, output_tokens=0, source=self.near))
        self.kept = retained(store, self.written(130))
        store.protect(self.kept, 64)
        self.running = self.written(100, output_tokens=300)
        self.shared = store.snapshot(self.running, state="state")
        self.batch = store.batch([self.running])
        store.ensure_mapped_to_tokens(self.running, 140)
        self.settled = self.written(70)
        self.thin = self.written(130, output_tokens=300, prompt_tokens=1)
        self.thin_batch = store.batch([self.thin])
        self.other = self.written(65, output_tokens=20)
        self.fresh = store.activate(prompt_tokens=70, output_tokens=0)
        self.flying = store.begin_unit(store.batch([self.other]), {"main": 4, "mtp": 4})
        store.submit(self.flying)
        store.wait(self.flying)
        source, target = self.buffers = [store.graph_buffer((16,), "u1") for _ in range(2)]
        device.begin_capture(store.stream)
        device.copy(target, source, store.stream)
        self.graph = device.end_capture(store.stream)
        if call == "staged fork":
            self.fill_main(but=1)
        self.coming = None
        if call in COMING:
            self.coming = store.activate(prompt_tokens=1, output_tokens=0, source=self.far, wait=False)

    def fill_main(self, *, but: int) -> None:
        """Leave so many pages of Main free."""
        free = self.store.memory_summary()["main"]["available_pages"]
        for _ in range(free - but):
            retained(self.store, self.written(64))

    def written(self, tokens: int, output_tokens: int = 0, prompt_tokens: int = 0) -> pk.Sequence:
        """Activate a sequence and commit tokens in both pools; the prompt is all of them unless it is named."""
        sequence = self.store.activate(prompt_tokens=prompt_tokens or tokens, output_tokens=output_tokens)
        run_unit(self.store, sequence, {"main": tokens, "mtp": tokens})
        return sequence

    def end(self) -> None:
        """Finish whatever there is, by the store's own lists, and demand that every page is free."""
        store = self.store
        while store.poll_copies():
            pass
        for unit in store.units():
            store.fail(unit)
        for sequence in store.sequences():
            store.finish(sequence)
        for continuation in store.continuations():
            store.release(continuation)
        store.check()
        for pool in store.inspect().pools.values():
            assert (pool.capacity, 0) == (pool.available, int((pool.serial != 0).sum()))
        assert store.host_summary()["used_bytes"] == 0


CALLS: dict[str, Callable[[Stage], object]] = {
    "activate": lambda on: on.store.activate(prompt_tokens=70, output_tokens=60),
    "try_activate": lambda on: on.store.try_activate(prompt_tokens=4000, output_tokens=60),
    "fork": lambda on: on.store.activate(prompt_tokens=10, output_tokens=60, source=on.kept),
    "move": lambda on: on.store.activate(prompt_tokens=10, output_tokens=60, source=on.kept, keep_source=False),
    "finish": lambda on: on.store.finish(on.running),
    "retain": lambda on: on.store.finish(on.running, retain=True, state="state"),
    "abort": lambda on: on.store.abort(on.running),
    "abort in flight": lambda on: on.store.abort(on.other),
    "snapshot": lambda on: on.store.snapshot(on.settled, state="state"),
    "try_snapshot": lambda on: on.store.try_snapshot(on.running, state="state"),
    "release": lambda on: on.store.release(on.kept),
    "release shared": lambda on: on.store.release(on.shared),
    "protect": lambda on: on.store.protect(on.kept, 100),
    "lower protection": lambda on: on.store.protect(on.kept, 3),
    "demote": lambda on: on.store.demote(on.kept),
    "demote beside decode": lambda on: on.store.demote(on.kept, wait=False),
    "demote without a copy": lambda on: on.store.demote(on.near),
    "restore": lambda on: on.store.activate(prompt_tokens=10, output_tokens=60, source=on.far),
    "restore and move": lambda on: on.store.activate(prompt_tokens=1, output_tokens=0, source=on.far,
                                                     keep_source=False),
    "restore beside decode": lambda on: on.store.activate(prompt_tokens=1, output_tokens=0, source=on.far, wait=False),
    "staged fork": lambda on: on.store.activate(prompt_tokens=40, output_tokens=0, source=on.kept,
                                                allow_demote_source=True),
    "drop_device": lambda on: on.store.drop_device(on.near),
    "drop_host": lambda on: on.store.drop_host(on.near),
    "poll_copies": lambda on: on.store.poll_copies(),
    "is_restoring": lambda on: on.store.is_restoring(on.running),
    "abort a restore": lambda on: on.store.abort(on.running if on.coming is None else on.coming),
    "explain_release": lambda on: on.store.explain_release(on.kept),
    "attach_state": lambda on: on.store.attach_state(on.kept, "another"),
    "batch": lambda on: on.store.batch([on.running]),
    "begin_unit": lambda on: on.store.begin_unit(on.batch, {"main": 100, "mtp": 3}),
    "submit": lambda on: on.store.submit(on.flying),
    "poll": lambda on: on.store.poll(),
    "wait": lambda on: on.store.wait(on.flying),
    "commit": lambda on: on.store.commit(on.flying, {"main": 2, "mtp": 1}),
    "commit everything": lambda on: on.store.commit(on.flying),
    "fail": lambda on: on.store.fail(on.flying),
    "begin_round": lambda on: on.store.begin_round(on.thin_batch),
    "covered_columns": lambda on: on.store.covered_columns(on.batch),
    "ensure_mapped_to_tokens": lambda on: on.store.ensure_mapped_to_tokens(on.fresh, 70),
    "ensure_mapped_to_tokens in a window": lambda on: on.store.ensure_mapped_to_tokens(on.running, 200),
    "trim": lambda on: on.store.trim(on.batch),
    "truncate": lambda on: on.store.truncate(on.running, 97),
    "truncate a continuation": lambda on: on.store.truncate(on.kept, 70),
    "check": lambda on: on.store.check(),
    "inspect": lambda on: on.store.inspect(),
    "can_honour": lambda on: on.store.can_honour(pk.ActivationTarget(10, 60, on.kept, None, True)),
    "explain": lambda on: on.store.explain(pk.ActivationTarget(10, 60, on.kept, None, True)),
    "lists": lambda on: (on.store.sequences(), on.store.units(), on.store.continuations()),
    "frontiers": lambda on: (
        on.store.committed_tokens(on.kept), on.store.protected_tokens(on.kept), on.store.budget_tokens(on.running),
        on.store.page_ids(on.running), on.store.page_ids(on.kept), on.store.state_of(on.kept),
    ),
    "layer_view": lambda on: on.store.layer_view(on.running, "mtp"),
    "counters": lambda on: (
        on.store.memory_summary(), on.store.host_summary(), on.store.event_counts(), on.store.codec_counts(),
        on.store.graph_bytes, on.store.published_slices, on.store.evidence,
    ),
    "observe": lambda on: on.store.observe(lambda event: None)(),
    "graph_buffer": lambda on: on.buffers.append(on.store.graph_buffer((16,), "u1")),
    "launch_graph": lambda on: on.store.launch_graph(on.graph),
}


COMING = ("poll_copies", "abort a restore")
"""Calls with a restore in flight."""


def test_no_call_of_a_store_is_missing() -> None:
    """Every public name of a store is in the calls above, or has a test of its own below."""
    used = {name for call in CALLS.values() for name in call.__code__.co_names}
    assert {name for name in dir(pk.Store) if not name.startswith("_")} - used == {"close", "latch"}


@pytest.mark.parametrize(("error", "every"), ERRORS)
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_any_line_leaves_before_after_or_a_latched_store(
    name: str, error: type[BaseException], every: int, opened_device: pk.Device
) -> None:
    """C10.2, C12.4: one line of the call after the other, each on a stage of its own."""
    call = CALLS[name]
    stage = Stage(opened_device, name)
    before = stage.store.inspect()
    with Interrupt(0, error) as count:
        call(stage)
    after = stage.store.inspect()
    stage.end()
    stage.store.close()

    latched = 0
    for at in range(1, count.lines + 1, every):
        stage = Stage(opened_device, name)
        with pytest.raises(error, match=f"at line {at}:") as raised, Interrupt(at, error):
            call(stage)
        if stage.store.evidence is None:
            now = stage.store.inspect()
            has_happened = not now.differences(after)
            assert has_happened or not now.differences(before), f"{raised.value}: {now.differences(before)[:3]}"
            stage.store.check()
            if not has_happened:
                call(stage)
            stage.end()
        else:
            latched += 1
            with pytest.raises(pk.StoreLatched):
                call(stage)
        stage.store.close()
    print(f"{name}: {count.lines} lines, latched at {latched}")


def refuse(store: pk.Store, sequence: pk.Sequence) -> None:
    """Ask for what a store refuses, and then for something else."""
    with pytest.raises(pk.MisuseError):
        store.truncate(sequence, 5000)
    store.units()  # writes the line


@pytest.mark.parametrize("is_own", [True, False])
def test_an_interrupt_leaves_no_gap_in_a_journal(is_own: bool, device: pk.Device, tmp_path: Path) -> None:
    """C12.4: a line that was not written has no number; where one is cut off, the journal ends and closing says so."""
    lines, path = 1, tmp_path / "run.jsonl"
    while True:
        file = io.StringIO()
        store = pk.open_store(CONFIG, device, journal=path if is_own else file)
        sequence = store.activate(prompt_tokens=70, output_tokens=0)
        try:
            with Interrupt(lines, KeyboardInterrupt):
                refuse(store, sequence)
            has_ended = True
        except KeyboardInterrupt:
            has_ended = False
        assert store.evidence is None
        store.finish(sequence)
        kept = None
        try:
            store.close()
        except pk.JournalFailed as failed:
            kept = failed.lines
        text = path.read_text(encoding="utf-8") if is_own else file.getvalue()
        assert ('"finish"' in text) == (kept is None)
        assert not is_own or (text.endswith("}\n") and kept in (None, text.count("\n")))
        assert pk.replay_journal(text.splitlines(keepends=True)).difference is None
        if has_ended:
            break
        lines += 1
    assert lines > 50


@pytest.fixture
def quick_collection() -> Iterator[None]:
    """Let the collector skip everything that is there already."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def allocated_bytes(device: pk.Device) -> int:
    assert isinstance(device, CpuDevice)
    return device.allocated_bytes


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("error", "every"), ERRORS)
def test_a_store_whose_closing_was_interrupted_closes_with_the_next_call(
    error: type[BaseException], every: int, opened_device: pk.Device, tmp_path: Path, quick_collection: None
) -> None:
    """C12.4: nothing of it stays on the device, and another store may write its journal."""
    lines, at = 1, 0
    while at <= lines:
        bytes_before = allocated_bytes(opened_device)
        store = pk.open_store(CONFIG, opened_device, journal=tmp_path / "journal.jsonl")
        store.begin_unit(store.batch([store.activate(prompt_tokens=70, output_tokens=0)]), 70)
        was_raised = at == 0
        try:
            with Interrupt(at, error) as count:
                store.close()
            lines = count.lines if at == 0 else lines
        except (error, pk.JournalFailed):  # which a failed allocation may become
            was_raised = True
        with contextlib.suppress(pk.JournalFailed):
            store.close()
        with pytest.raises(pk.MisuseError, match="a closed one"):
            store.poll()
        del store
        gc.collect()
        # Python swallows an interrupt inside of a finalizer, which then cannot give its memory back.
        assert not was_raised or allocated_bytes(opened_device) == bytes_before, f"interrupted at line {at} of {lines}"
        at += every if at else 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_store_whose_latching_was_interrupted_is_latched_or_not(
    error: type[BaseException], opened_device: pk.Device
) -> None:
    """C12.4: the evidence is the whole fault or nothing."""
    lines = at = 0
    while at <= lines:
        fault = pk.DeviceFault("a launch", expected="no error", got="one", remedy="close the store", clause="C12.4")
        with pk.open_store(CONFIG, opened_device) as store:
            with contextlib.suppress(error), Interrupt(at, error) as count:
                store.latch(fault)
            assert store.evidence in (None, fault)
            store.latch(fault)
            assert store.evidence is fault
        lines = lines or count.lines
        at += 1


@pytest.mark.parametrize(("error", "first", "every"), [
    (KeyboardInterrupt, 1, 97),
    *(pytest.param(error, first, 4, marks=pytest.mark.long)
      for error in (KeyboardInterrupt, MemoryError) for first in range(1, 5)),
])
def test_a_store_that_did_not_open_leaves_nothing(
    error: type[BaseException], first: int, every: int, tmp_path: Path, quick_collection: None
) -> None:
    """C12.4, C5.2: neither memory on the device, which has no kernels yet, nor a journal that is still locked."""
    at, has_opened = first, False
    while not has_opened:
        store: pk.Store | None = None
        with cpu_device() as device:
            with contextlib.suppress(error, pk.PagedKVError), Interrupt(at, error) as count:
                store = pk.open_store(CONFIG, device, journal=tmp_path / "journal.jsonl")
            has_opened = count.lines < at
            with contextlib.suppress(pk.JournalFailed):
                if store is not None:
                    store.close()
            del store
            gc.collect()
            assert has_opened or device.allocated_bytes == 0, f"interrupted at line {at}"
        at += every
    print(f"every {every}th of {count.lines} lines")
