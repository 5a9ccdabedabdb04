"""Real signals at any moment of the calls of a store and of a loop; 10,000 of them in the long run.  (C12.4)

A timer interrupts about every second call, at a random moment of it.  Afterwards the store is as before the call, or as
after it, or it is latched.  "After" is what a second store shows, which makes the same calls without interrupts.  A
handle that an interrupted call did not return is found again by the store's own lists.
"""

from __future__ import annotations

import gc
import itertools
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest

import pagedkv as pk
from pagedkv.graphs import DecodeLoop
from tests.hostile.test_interrupts import CONFIG
from tests.hostile.test_loop_interrupts import CONFIG as LOOP_CONFIG
from tests.toy_model import ToyModel, prompt

STEPS: tuple[Callable[[pk.Store], object], ...] = (
    lambda store: store.activate(prompt_tokens=100, output_tokens=120),
    lambda store: store.activate(prompt_tokens=70, output_tokens=60),
    lambda store: store.begin_unit(store.batch(store.sequences()), {"main": [100, 70], "mtp": [100, 70]}),
    lambda store: store.submit(store.units()[0]),
    lambda store: store.poll(),
    lambda store: store.wait(store.units()[0]),
    lambda store: store.commit(store.units()[0]),
    lambda store: store.snapshot(store.sequences()[0], state="state", state_frontier={"main": 1, "mtp": 0}),
    lambda store: store.activate(source=store.continuations()[0], prompt_tokens=10, output_tokens=60),
    lambda store: store.begin_round(store.batch(store.sequences()[:2])),
    lambda store: store.ensure_mapped_to_tokens(store.sequences()[0], 150),
    lambda store: store.trim(store.batch(store.sequences()[:1])),
    lambda store: store.truncate(store.sequences()[1], 60),
    lambda store: store.begin_unit(store.batch(store.sequences()), {"main": 3, "mtp": 4}),
    lambda store: store.abort(store.sequences()[2]),
    lambda store: store.wait(store.units()[0]),
    lambda store: store.commit(store.units()[0], {"main": [3, 2, 1], "mtp": 0}),
    lambda store: store.begin_unit(store.batch(store.sequences()), 1),
    lambda store: store.fail(store.units()[0]),
    lambda store: store.finish(store.sequences()[0], retain=True, state="state", state_frontier={"main": 1, "mtp": 0}),
    lambda store: store.protect(store.continuations()[0], 10),
    lambda store: store.attach_state(store.continuations()[0], "another"),
    lambda store: store.activate(source=store.continuations()[1], prompt_tokens=1, output_tokens=9, keep_source=False),
    lambda store: store.finish(store.sequences()[0]),
    lambda store: store.finish(store.sequences()[0]),
    lambda store: store.release(store.continuations()[0]),
    lambda store: store.check(),
)
"""Calls that end in an empty store; each works on what the lists of the store show."""

UNSEEN = {STEPS[5], STEPS[14], STEPS[15]}
"""Waits and an abort in flight, which `inspect` does not show; they may be made twice."""

SERIALS = {"serial", "content", "lease_serials", "sequence_serials"}
"""Numbers that an activation or a snapshot takes for good, also where it breaks off and is made again."""


class Alarm:
    """Sends SIGALRM at a random moment of a call, or never if it is silent; `hits` counts interrupted calls."""

    def __init__(self, seed: int, *, is_silent: bool = False) -> None:
        self.hits = 0
        self._is_silent = is_silent
        self._random = random.Random(seed)
        self._is_armed = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        is_here = frame is not None and frame.f_code.co_filename == __file__  # we have the answer, and must note it
        if self._is_armed and not is_here:
            self._is_armed = False
            raise KeyboardInterrupt

    def interrupts(
        self, call: Callable[[], Any], seconds: float, note: Callable[[Any], None] = lambda answer: None
    ) -> bool:
        """Make a call that takes about so long, and note its answer; say whether the signal interrupted the call."""
        try:
            self._is_armed = True
            if not self._is_silent:
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, self._random.random() * 1.5 * seconds))
            answer = call()
            self._is_armed = False
            note(answer)
        except KeyboardInterrupt:
            self.hits += 1
            return True
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return False


@pytest.fixture
def alarm(seed: int) -> Iterator[Alarm]:
    """The alarm, as the only handler of the signal; nothing is collected in the middle of a call."""
    alarm = Alarm(seed)
    earlier = signal.signal(signal.SIGALRM, alarm.handle)
    gc.disable()
    gc.collect()
    gc.freeze()  # a collection between two runs then looks at their objects only
    yield alarm
    gc.unfreeze()
    gc.enable()
    signal.signal(signal.SIGALRM, earlier)


def differences(store: pk.Store, twin: pk.Store) -> list[str]:
    """Return how two stores differ, serial numbers apart."""
    lines = twin.inspect().differences(store.inspect())
    return [line for line in lines if line.partition(":")[0].rpartition(".")[2] not in SERIALS]


def seconds_of(call: Callable[[], object]) -> float:
    """Make a call and return how long it took."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@pytest.mark.parametrize("count", [150, pytest.param(9000, marks=pytest.mark.long)])
def test_a_signal_leaves_a_store_before_after_or_latched(count: int, alarm: Alarm, opened_device: pk.Device) -> None:
    """C10.2, C12.4: and the call is made again where it had not happened."""
    latched = 0
    while alarm.hits < count:
        gc.collect()
        with pk.open_store(CONFIG, opened_device) as store, pk.open_store(CONFIG, opened_device) as twin:
            for step in itertools.chain.from_iterable(itertools.repeat(STEPS, 20)):
                seconds = seconds_of(lambda step=step: step(twin))  # type: ignore[misc]
                if not alarm.interrupts(lambda step=step: step(store), seconds):  # type: ignore[misc]
                    continue
                if store.evidence is not None:
                    latched += 1
                    with pytest.raises(pk.StoreLatched):
                        step(store)
                    break
                if differences(store, twin) or step in UNSEEN:
                    step(store)
                assert not differences(store, twin), f"after step {STEPS.index(step)}"
            else:
                store.check()
    print(f"{alarm.hits} signals, latched at {latched}")


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_a_loop_goes_on_after_signals(count: int, alarm: Alarm, opened_device: pk.Device) -> None:
    """C9.5: with the tokens that it would have given, each once; a loop whose store is latched begins anew."""
    latched = 0
    silent = Alarm(0, is_silent=True)
    expected = {tokens: texts_of_a_loop(opened_device, tokens, silent) for tokens in (16, 40)}
    while alarm.hits < count:
        gc.collect()
        tokens = alarm.hits % 2 * 24 + 16
        try:
            texts = texts_of_a_loop(opened_device, tokens, alarm)
        except pk.StoreLatched:
            latched += 1
        else:
            assert expected[tokens] == texts
    print(f"{alarm.hits} signals, latched at {latched}")


def texts_of_a_loop(device: pk.Device, tokens: int, alarm: Alarm) -> list[list[int]]:
    """Prefill two sequences and decode 30 tokens of each, by steps and by a generator, and repeat interrupted calls."""
    texts: dict[pk.Sequence, list[int]] = {}

    def note(delivered: dict[pk.Sequence, list[int]]) -> None:
        for sequence, new in delivered.items():
            texts[sequence] += new

    with pk.open_store(LOOP_CONFIG, device) as store:
        loop = DecodeLoop(store, ToyModel(store), prefill_chunk=16)
        for seed in range(2):
            sequence = store.activate(prompt_tokens=tokens, output_tokens=60)
            texts[sequence] = []
            prefill = partial(loop.prefill, sequence, prompt(tokens, seed))
            while alarm.interrupts(prefill, 0.01) and not store.committed_tokens(sequence):
                pass
        while min(map(len, texts.values())) < 30:
            alarm.interrupts(partial(loop.step, list(texts)), 0.003, note)
        store.check()
    return [text[:30] for text in texts.values()]
