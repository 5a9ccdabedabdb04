"""Graph capture on both devices: what is frozen, what is read anew, and what CUDA forbids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedkv.devices.cpu.device import CpuDevice
from pagedkv.devices.device import BaseDevice
from pagedkv.devices.protocol import ModuleSpec, Stream
from pagedkv.errors import CaptureRefused, DeviceFault, MisuseError
from tests.kernels.cpu_helpers import ADD, captured, kernel


def add_to(target: Any, amount: float) -> None:
    target += np.float32(amount)


def launch_add(device: BaseDevice, a: Any, out: Any, bias: float, stream: Stream) -> None:
    arguments = (a, out, np.int32(out.size), np.float32(bias))
    kernel(device, "add", ADD).launch((1, 1, 1), (32, 1, 1), arguments, stream)


def ready(device: BaseDevice) -> tuple[Any, Any, Stream]:
    """Return two arrays and a stream, after the first launch of the kernel: nothing compiles under capture."""
    a, out, stream = device.zeros(8, np.float32), device.zeros(8, np.float32), device.stream()
    launch_add(device, a, out, 0.0, stream)
    return a, out, stream


def test_capture_records_and_does_not_run(device: BaseDevice) -> None:
    """Nothing happens before the first launch of the graph; every launch then runs all nodes once."""
    (a, out, stream), back = ready(device), device.zeros(8, np.float32)
    device.begin_capture(stream)
    assert stream.is_capturing
    launch_add(device, a, out, 1.0, stream)
    device.copy(back, out, stream)
    device.call(stream, add_to, back, 0.5)
    graph = device.end_capture(stream)
    assert not stream.is_capturing
    assert not back.any()

    for step in range(3):
        a[:] = step
        graph.launch(stream)
        assert back.tolist() == [step + 1.5] * 8
    assert [(n.kind, n.name, n.dependencies) for n in graph.nodes] == [
        ("kernel", "add", ()), ("copy", "copy", (0,)), ("call", "add_to", (1,))
    ]
    assert (graph.nodes[0].grid, graph.nodes[0].block) == ((1, 1, 1), (32, 1, 1))
    words = np.frombuffer(graph.nodes[0].argument_bytes, np.uint64)
    assert words.tolist()[:2] == [device.address(a), device.address(out)]
    assert graph.nodes[0].argument_bytes[16:20] == np.int32(8).tobytes()


def test_replay_is_unaffected_by_python_objects_used_at_capture(device: BaseDevice) -> None:
    """Argument lists, scalars and array shapes may change; deleted arrays stay mapped as long as the graph lives."""
    a, out, stream = device.zeros((2, 4), np.float32), device.zeros((2, 4), np.float32), device.stream()
    a[:] = 4.0
    found, grid, amount = kernel(device, "add", ADD), [1, 1, 1], np.array([1.0], np.float32)
    arguments: list[Any] = [a, out, np.int32(8), np.float32(2.0)]
    device.begin_capture(stream)
    found.launch(tuple(grid), (32, 1, 1), arguments, stream)  # type: ignore[arg-type]
    device.call(stream, add_to, out, amount[0])
    graph = device.end_capture(stream)
    watch = out.view()
    arguments.clear()
    grid[0], amount[0], out.shape = 0, 100.0, (8,)
    del a, out, found
    for _ in range(80):
        device.zeros(8, np.float32)
    graph.launch(stream)

    assert watch.tolist() == [[7.0] * 4] * 2


GLOBAL_STEP = 1.0


def add_global(target: Any) -> None:
    target += GLOBAL_STEP


def add_through_helper(target: Any) -> None:
    add_global(target)


def test_replay_is_unaffected_by_globals_assigned_later(device: BaseDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture copies the function, the globals that it names, and the functions that it calls."""
    out, stream = device.zeros(2, np.float32), device.stream()
    graph = captured(device, stream, lambda: device.call(stream, add_through_helper, out))
    monkeypatch.setitem(globals(), "GLOBAL_STEP", 50.0)
    monkeypatch.setitem(globals(), "add_global", add_to)
    graph.launch(stream)

    assert out.tolist() == [1.0, 1.0]


def test_what_cuda_forbids_under_capture_is_refused_and_changes_nothing(device: BaseDevice) -> None:
    """Allocation, waits, queries, pageable copies, nesting, loading, wrong arguments; the capture stays open."""
    spec = ModuleSpec("test_late", text='extern "C" __global__ void late() {}', kernels=("late",))
    (a, out, stream), other, event = ready(device), device.stream(), device.event()
    device.begin_capture(stream)
    launch_add(device, a, out, 1.0, stream)
    forbidden: list[Callable[[], object]] = [
        lambda: device.empty(8, np.float32), lambda: device.zeros(8, np.float32), lambda: device.pinned(8, np.float32),
        stream.synchronize, other.synchronize, event.synchronize, event.query, lambda: stream.wait(event),
        lambda: device.copy(out, np.zeros(8, np.float32), stream),
        lambda: device.copy(np.zeros(8, np.float32), out, stream),
        lambda: device.begin_capture(stream), lambda: device.begin_capture(other), lambda: device.end_capture(other),
        lambda: device.load(spec),
    ]
    before = device.driver_calls
    for use in forbidden:
        with pytest.raises(CaptureRefused):
            use()
    with pytest.raises(MisuseError, match="argument 2"):
        kernel(device, "add", ADD).launch((1, 1, 1), (32, 1, 1), (a, out, 8, 1.0), stream)
    assert before == device.driver_calls
    graph = device.end_capture(stream)
    graph.launch(stream)

    assert len(graph.nodes) == 1
    assert out.tolist() == [1.0] * 8


def test_other_streams_run_eagerly_during_a_capture(cpu: CpuDevice) -> None:
    """As in CUDA's thread-local mode."""
    (a, out, stream), other = ready(cpu), cpu.stream()
    cpu.begin_capture(stream)
    launch_add(cpu, a, out, 3.0, other)
    cpu.copy(a, np.full(8, 2.0, np.float32), other)

    assert (out.tolist(), a.tolist()) == ([3.0] * 8, [2.0] * 8)
    assert cpu.end_capture(stream).nodes == ()


def test_a_stream_joins_by_waiting_and_is_joined_back_by_an_event(device: BaseDevice) -> None:
    """Fork and join; dependencies say what waits for what, and submission order runs them."""
    (a, b, main), side, c = ready(device), device.stream(), device.zeros(8, np.float32)
    fork, join = device.event(), device.event()
    device.begin_capture(main)
    launch_add(device, a, b, 1.0, main)
    main.record(fork)
    side.wait(fork)
    assert side.is_capturing
    launch_add(device, b, c, 10.0, side)
    launch_add(device, a, a, 0.0, main)
    side.record(join)
    main.wait(join)
    launch_add(device, c, a, 100.0, main)
    graph = device.end_capture(main)
    assert not side.is_capturing
    graph.launch(main)

    assert [n.dependencies for n in graph.nodes] == [(), (0,), (0,), (1, 2)]
    assert a.tolist() == [111.0] * 8


@pytest.mark.parametrize("more_after_record", [False, True])
def test_an_unjoined_stream_is_refused_and_the_capture_dropped(device: BaseDevice, more_after_record: bool) -> None:
    """Never joined back, or with work after the event that joined it."""
    (a, b, main), side = ready(device), device.stream()
    fork, join = device.event(), device.event()
    device.begin_capture(main)
    main.record(fork)
    side.wait(fork)
    launch_add(device, a, b, 1.0, side)
    if more_after_record:
        side.record(join)
        launch_add(device, a, b, 1.0, side)
        main.wait(join)
    with pytest.raises(CaptureRefused, match="work of stream 1 that stream 0"):
        device.end_capture(main)

    assert not main.is_capturing
    assert not side.is_capturing
    assert not b.any()
    device.begin_capture(main)
    device.end_capture(main)


def test_an_event_of_a_capture_means_nothing_outside_of_it(device: BaseDevice) -> None:
    """Query, synchronize and wait are refused after the capture, until it is recorded again."""
    stream, event = device.stream(), device.event()
    device.begin_capture(stream)
    stream.record(event)
    device.end_capture(stream)
    for use in (event.query, event.synchronize, lambda: stream.wait(event)):
        with pytest.raises(CaptureRefused, match="recorded in another capture"):
            use()
    stream.record(event)

    assert event.query()


def test_an_aborted_capture_leaves_nothing(device: BaseDevice) -> None:
    """Streams run eagerly again, and another capture may begin."""
    a, out, stream = ready(device)
    device.begin_capture(stream)
    launch_add(device, a, out, 1.0, stream)
    device.abort_capture(stream)
    with pytest.raises(CaptureRefused, match="got no capture"):
        device.abort_capture(stream)
    launch_add(device, a, out, 2.0, stream)
    device.begin_capture(stream)

    assert device.end_capture(stream).nodes == ()
    assert out.tolist() == [2.0] * 8


def test_a_graph_is_not_launched_on_a_capturing_stream(device: BaseDevice) -> None:
    """Graphs do not nest; another stream may launch it meanwhile."""
    (a, out, stream), other = ready(device), device.stream()
    graph = captured(device, stream, lambda: launch_add(device, a, out, 1.0, stream))
    device.begin_capture(stream)
    with pytest.raises(CaptureRefused, match="graphs do not nest"):
        graph.launch(stream)
    graph.launch(other)
    device.end_capture(stream)

    assert out.tolist() == [1.0] * 8


def test_a_fault_in_a_replay_names_its_kernel_and_stops_there(cpu: CpuDevice) -> None:
    """Later nodes do not run; with other memory contents the graph runs again."""
    text = 'extern "C" __global__ void store_where(const int* where, float* out) { out[where[0]] = 1.0f; }'
    where, out, done = (cpu.zeros(1, np.int32), cpu.zeros(64, np.float32, name="out"), cpu.zeros(1, np.float32))
    stream = cpu.stream()
    found = kernel(cpu, "store_where", text)
    graph = captured(cpu, stream, lambda: found.launch((1, 1, 1), (1, 1, 1), (where, out), stream),
                     lambda: cpu.call(stream, add_to, done, 1.0))
    where[0] = 64
    with pytest.raises(DeviceFault, match=r"kernel store_where.*past the end of buffer 'out'"):
        graph.launch(stream)
    assert not done.any()
    where[0] = 63
    graph.launch(stream)

    assert (1.0, 1.0) == (float(out[63]), float(done[0]))


def test_a_long_graph_of_kernels_is_one_call_into_c(cpu: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls in the middle make three runs; Python is entered for nothing else."""
    a, _, stream = ready(cpu)
    cpu.begin_capture(stream)
    for step in range(30):
        if step in {10, 20}:
            cpu.call(stream, add_to, a, 1.0)
        launch_add(cpu, a, a, 1.0, stream)
    graph = cpu.end_capture(stream)
    executor, runs = cpu._context.executor, []
    native_run = executor.native_run

    def counted(handle: int, packed: bytes, count: int) -> int:
        runs.append(count)
        return int(native_run(handle, packed, count))

    monkeypatch.setattr(executor, "native_run", counted)
    graph.launch(stream)

    assert runs == [10, 10, 10]
    assert a.tolist() == [32.0] * 8
