"""The cpu device in deferred mode: when work runs, in which orders, and which mistakes it finds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest

from pagedkv.devices.cpu.device import CpuDevice
from pagedkv.devices.kernels import BaseKernel
from pagedkv.errors import DeviceFault, StreamHazard
from tests.kernels.cpu_helpers import captured, kernel

SCHEDULES = ("late", "early", "random")
COPY_INTS = r"""
extern "C" __global__ void copy_ints(int* out, const int* in, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = in[i];
}
"""
FAULT = 'extern "C" __global__ void fault(int* out) { out[1 << 10] = 1; }'


@contextmanager
def deferred(schedule: str = "late", seed: int = 0) -> Iterator[CpuDevice]:
    device = CpuDevice(mode="deferred", schedule=schedule, seed=seed, threads=1, announce=lambda line: None)
    try:
        yield device
    finally:
        device.close()


def add(target: Any, amount: int) -> None:
    target += amount


def multiply(target: Any, factor: int) -> None:
    target *= factor


def assign(target: Any, source: Any) -> None:
    target[...] = source


def assign_second(target: Any, source: Any) -> None:
    target[1] = source


def note(log: Any, number: int) -> None:
    log[0] += 1
    log[log[0]] = number + 1


def copier(device: CpuDevice) -> BaseKernel:
    return kernel(device, "copy_ints", COPY_INTS)


@pytest.fixture(params=SCHEDULES)
def device(request: pytest.FixtureRequest) -> Iterator[CpuDevice]:
    """A deferred device of each schedule."""
    with deferred(request.param) as opened:
        yield opened


# ---- when ------------------------------------------------------------------------------------------------------------
def test_nothing_runs_before_it_is_forced(device: CpuDevice) -> None:
    """Copies, calls, kernels and graphs wait, and run in stream order when the stream is synchronized."""
    stream, target, other = device.stream(), device.zeros(4, np.int32), device.zeros(4, np.int32)
    graph = captured(device, stream, lambda: device.call(stream, add, target, 100))
    device.copy(target, np.array([1, 2, 3, 4], np.int32), stream)
    device.call(stream, add, target, 10)
    graph.launch(stream)
    copier(device).launch((1, 1, 1), (32, 1, 1), (other, target, np.int32(4)), stream)

    assert not target.any()
    stream.synchronize()
    assert other.tolist() == [111, 112, 113, 114]


def test_an_event_forces_what_lies_before_it_on_every_stream(device: CpuDevice) -> None:
    """Record and wait order streams; a later record of the event does not change an earlier wait."""
    one, two, target = device.stream(), device.stream(), device.zeros(4, np.int32)
    first, last = device.event(), device.event()
    device.call(one, add, target, 1)
    one.record(first)
    two.wait(first)
    device.call(two, multiply, target, 7)
    two.record(last)
    last.synchronize()

    assert target.tolist() == [7] * 4


def test_a_query_becomes_true_in_the_end_and_forces_what_it_answers(device: CpuDevice) -> None:
    """C12.4: polling ends, and True means that the work has run; an event that was never recorded has passed."""
    stream, target, event = device.stream(), device.zeros(4, np.int32), device.event()
    assert event.query()
    for _ in range(20):
        device.call(stream, add, target, 1)
    stream.record(event)
    while not event.query():
        pass

    assert target.tolist() == [20] * 4


def test_late_runs_what_is_needed_and_early_runs_everything() -> None:
    """The two ends between which a random seed picks.

    S21: a late event is not ready at first, so code that takes "not yet" for "done" reads old values.
    """
    for seed, (schedule, expected) in itertools.product(range(8), (("late", 0), ("early", 1))):
        with deferred(schedule, seed) as device:
            one, two, event = device.stream(), device.stream(), device.event()
            asked, beside = device.zeros(1, np.int32), device.zeros(1, np.int32)
            device.call(one, add, asked, 1)
            device.call(two, add, beside, 1)
            one.record(event)
            assert schedule == "early" or not event.query()
            one.synchronize()

            assert (1, expected) == (int(asked[0]), int(beside[0])), schedule


def test_one_seed_repeats_and_seeds_differ() -> None:
    """The order across streams comes from the seed alone."""

    def order(seed: int) -> list[int]:
        with deferred("random", seed) as device:
            assert f"deferred (random, seed {seed})" in device.description
            streams = [device.stream() for _ in range(4)]
            log, done = device.zeros(5, np.int32), device.event()
            for number, stream in enumerate(streams):
                device.call(stream, note, log.view(), number)
            for stream in streams[1:]:
                stream.record(done)
                streams[0].wait(done)
            with pytest.raises(StreamHazard):  # the streams share the log, which is a race
                streams[0].synchronize()
            return [int(entry) for entry in log]

    orders = [order(seed) for seed in range(8)]

    assert orders == [order(seed) for seed in range(8)]
    assert len({tuple(one) for one in orders}) > 1


def test_a_device_says_whether_its_seed_had_a_choice(device: CpuDevice) -> None:
    """A single stream leaves no choice, so such a test need not run with fifty seeds."""
    one, two, target = device.stream(), device.stream(), device.zeros(2, np.int32)
    for _ in range(3):
        device.call(one, add, target[:1], 1)
    one.synchronize()
    assert device.order_choices == 0

    event = device.event()
    device.call(one, add, target[:1], 1)
    device.call(two, add, target[1:], 1)
    one.record(event)
    while not event.query():
        pass
    two.synchronize()
    assert device.order_choices > 0


def test_every_legal_order_gives_the_same_bytes(rng: np.random.Generator) -> None:
    """A random program of fenced copies and calls on three streams equals its eager run, under every schedule."""
    program = [(int(rng.integers(3)), int(rng.integers(3)), int(rng.integers(4)), int(rng.integers(4)))
               for _ in range(60)]

    def run(device: CpuDevice) -> list[list[int]]:
        streams, buffers = [device.stream() for _ in range(3)], [device.zeros(4, np.int32) for _ in range(4)]
        last = [device.event() for _ in range(4)]  # behind the last user of each buffer
        for place, (kind, number, source, target) in enumerate(program):
            stream = streams[number]
            for used in {source, target}:
                stream.wait(last[used])
            if kind == 0 and source != target:
                device.copy(buffers[target], buffers[source], stream)
            elif kind == 1:
                device.call(stream, add, buffers[target], place)
            else:
                device.copy(buffers[target], np.full(4, place, np.int32), stream)
            for used in {source, target}:
                last[used] = device.event()
                stream.record(last[used])
        for stream in streams:
            stream.synchronize()
        return [buffer.tolist() for buffer in buffers]

    expected = run(CpuDevice(threads=1, announce=lambda line: None))
    for seed in range(9):
        with deferred(SCHEDULES[seed % 3], seed) as device:
            assert run(device) == expected, seed


def test_a_fault_is_raised_where_work_is_forced(device: CpuDevice) -> None:
    """C12.4: the launch returns, the wait raises, and the device stays usable."""
    stream, target = device.stream(), device.zeros(4, np.int32)
    kernel(device, "fault", FAULT).launch((1, 1, 1), (1, 1, 1), (target,), stream)
    device.call(stream, add, target, 1)
    with pytest.raises(DeviceFault, match="kernel fault"):
        stream.synchronize()
    stream.synchronize()

    assert target.tolist() == [1] * 4


# ---- memory of the host ----------------------------------------------------------------------------------------------
def test_staging_that_is_reused_too_early_is_named(device: CpuDevice) -> None:
    """S19, S20, S22: pinned bytes change between submission and execution; another slice may change.

    Pageable sources are copied at submission, as CUDA stages them: later changes have no effect.
    """
    stream, target, pageable = device.stream(), device.zeros(4, np.int32), np.array([1, 2, 3, 4], np.int32)
    device.copy(target, pageable, stream)
    pageable[:] = -7
    stream.synchronize()
    assert target.tolist() == [1, 2, 3, 4]

    staging = device.pinned((2, 4), np.int32, name="staging")
    staging[:] = 1
    device.copy(target, staging[0], stream)
    staging[1] = 2
    stream.synchronize()
    device.copy(target, staging[0], stream)
    staging[0, 3] = 3
    with pytest.raises(StreamHazard, match=r"copy of 16 bytes from 'staging'.* other bytes in .*'staging'.* byte 12"):
        stream.synchronize()


def test_a_replay_reads_its_pinned_words_when_it_runs_and_they_are_fingerprinted_at_the_launch() -> None:
    """C15.1: memory is read anew by each replay; between a launch and its execution it must not change."""
    with deferred() as device:
        stream, target = device.stream(), device.zeros(4, np.int32)
        words = device.pinned((4,), np.int32, name="words")
        words[:] = 0
        graph = captured(device, stream, lambda: device.copy(target, words, stream))
        for step in (5, 6):
            words[:] = step
            graph.launch(stream)
            stream.synchronize()
            assert target.tolist() == [step] * 4
        graph.launch(stream)
        words[2] = 9
        with pytest.raises(StreamHazard, match=r"graph of 1 nodes.*'words'"):
            stream.synchronize()


def test_pinned_slices_that_a_launch_declares_are_fingerprinted(device: CpuDevice) -> None:
    """A kernel reads slot 0 of a ring: slot 1 is free, slot 0 is not."""
    stream, out = device.stream(), device.zeros(4, np.int32)
    ring = device.pinned((2, 4), np.int32, name="ring")
    ring[:] = 1
    for slot, outcome in ((1, nullcontext()), (0, pytest.raises(StreamHazard, match=r"kernel copy_ints.*'ring'"))):
        copier(device).launch((1, 1, 1), (32, 1, 1), (out, ring, np.int32(4)), stream, reads=[ring[0]])
        ring[slot] = 2
        with outcome:
            stream.synchronize()


def test_what_the_device_writes_into_staging_is_no_reuse(device: CpuDevice) -> None:
    """Device to host, then host to device from the same bytes, both queued: legal, and right."""
    stream, staging = device.stream(), device.pinned((4,), np.int32)
    source, target = device.zeros(4, np.int32), device.zeros(4, np.int32)
    staging[:] = 5
    device.copy(target, staging, stream)
    device.call(stream, add, source, 3)
    device.copy(staging, source, stream)
    device.copy(target, staging, stream)
    stream.synchronize()

    assert target.tolist() == [3] * 4


@pytest.mark.parametrize("is_pinned", [True, False])
def test_destinations_on_the_host_are_poison_until_the_copy_has_run(is_pinned: bool) -> None:
    """S21: neither old values nor lucky new ones; `readable` names the operation that the host did not wait for.

    An early schedule is no order: the host has waited for another stream only.
    """
    for schedule, content in (("late", -1), ("early", 0)):
        with deferred(schedule) as device:
            stream, other, source = device.stream(), device.stream(), device.zeros(4, np.int32)
            back = device.pinned((4,), np.int32, name="back") if is_pinned else np.zeros(4, np.int32)
            back[:] = -7
            device.copy(back, source, stream)
            device.call(other, add, device.zeros(4, np.int32), 1)
            assert back.tolist() == [-1] * 4
            other.synchronize()

            assert back.tolist() == [content] * 4
            with pytest.raises(StreamHazard, match=r"a host read of .* copy of 16 bytes") as caught:
                device.readable(back)
            assert "'back'" in str(caught.value) or not is_pinned
            stream.synchronize()
            assert device.readable(back).tolist() == [0] * 4


# ---- races -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_fenced", [True, False])
@pytest.mark.parametrize("pair", ["kernel-copy", "copy-kernel", "call-call", "kernel-kernel", "graph-copy"])
def test_unordered_operations_on_the_same_bytes_are_named(pair: str, is_fenced: bool, seed: int) -> None:
    """S45, S46: writer before reader and reader before writer, on two streams, with the fence and without."""
    with deferred(SCHEDULES[seed % 3], seed) as device:
        one, two, fence, end = device.stream(), device.stream(), device.event(), device.event()
        shared, ones, out = (device.zeros(64, np.int32, name=name) for name in ("shared", "ones", "out"))
        ones += 1
        copier(device)  # compiled before the capture
        first, second = pair.split("-")
        if first == "graph":
            captured(device, one, lambda: submit(device, "kernel", one, shared, ones)).launch(one)
        else:
            submit(device, first, one, shared, ones)
        if is_fenced:
            one.record(fence)
            two.wait(fence)
        submit(device, second, two, out, shared)
        two.record(end)
        one.wait(end)
        if is_fenced:
            one.synchronize()
            assert out.tolist() == [1] * 64
        else:
            with pytest.raises(StreamHazard, match="'shared'") as caught:
                one.synchronize()
            assert all("stream" in str(text) for text in (caught.value.operation, caught.value.other))


def submit(device: CpuDevice, kind: str, stream: Any, target: Any, source: Any) -> None:
    """Copy source to target in one of three ways."""
    if kind == "copy":
        device.copy(target, source, stream)
    elif kind == "call":
        device.call(stream, assign, target, source)
    else:
        copier(device).launch((1, 1, 1), (32, 1, 1), (target, source, np.int32(target.size)), stream)


def test_disjoint_parts_of_one_array_are_no_race(device: CpuDevice) -> None:
    """Two streams use pages of one plane at once: the bytes that their kernels touch decide."""
    one, two = device.stream(), device.stream()
    plane, values = device.zeros((2, 64), np.int32), device.zeros(64, np.int32)
    values += 3
    submit(device, "call", one, plane[0], values)
    device.call(two, assign_second, plane, values)
    one.synchronize()
    two.synchronize()

    assert plane.tolist() == [[3] * 64] * 2


def test_the_host_orders_what_it_waited_for(device: CpuDevice) -> None:
    """No event is needed between streams when the host waited for the first before submitting to the second."""
    one, two, three = device.stream(), device.stream(), device.stream()
    shared, out, ones = (device.zeros(64, np.int32) for _ in range(3))
    ones += 1
    device.call(three, add, device.zeros(4, np.int32), 1)  # waits without an order to anything, so the history stays
    submit(device, "kernel", one, shared, ones)
    one.synchronize()
    submit(device, "kernel", two, out, shared)
    two.synchronize()

    assert out.tolist() == [1] * 64
