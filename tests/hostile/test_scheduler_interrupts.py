"""Every line of every call of a scheduler is interrupted once.  (C9.5, C12.4)

The store is latched then, or the next calls give every other request the tokens that it would have had, each once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import pagedkv as pk
from pagedkv.graphs import LeastRecent, Request, Sampling, Scheduler, SchedulerStep
from tests.graphs.test_scheduler import SeededModel
from tests.hostile.interrupt import ERRORS, Interrupt
from tests.toy_model import prompt

CONFIG = pk.StoreConfig(
    pk.KVGeometry(layers=1, query_heads=2, kv_heads=1, head_dim=64), profile="bf16", max_context=256, max_concurrency=4,
    kv_capacity=pk.ExplicitCapacity(4 * 256), kv_lease_growth=True, lease_window_tokens=64, caller_words=4,
)

HOST_CONFIG = replace(CONFIG, host_arena_bytes=4 * CONFIG.pools[0].record_bytes)


class Stage:
    """A scheduler with graphs of every shape, one request that runs on, and one that ends in the next step."""

    def __init__(self, device: pk.Device, *, keeps: bool = False) -> None:
        self.store = pk.open_store(HOST_CONFIG if keeps else CONFIG, device)
        self.retention = LeastRecent() if keeps else None
        self.scheduler = Scheduler(self.store, SeededModel(self.store), prefill_chunk=16, retention=self.retention)
        self.requests: list[Request] = []
        self.answers: list[SchedulerStep] = []
        for n in (1, 2, 4):
            self.scheduler.submit(prompt(10, 3), 2, n=n)
            while not self.scheduler.is_idle:
                self.scheduler.step()
        self.submit(62, 30)
        self.submit(20, 4)
        for _ in range(2):
            self.step()

    def submit(self, tokens: int, count: int, n: int = 1) -> None:
        """Submit a request, unless the interrupted call did it."""
        sampling = Sampling(seed=len(self.requests))
        self.requests.append(self.scheduler.submit(prompt(tokens, tokens), count, n=n, sampling=sampling))

    def step(self) -> None:
        """Step once, and note the answer."""
        self.answers.append(self.scheduler.step())

    def finish(self) -> list[list[list[int]]]:
        """Step until all have ended; return the tokens of every output, which the answers have too."""
        while not self.scheduler.is_idle:
            self.step()
        self.store.check()
        if self.retention is not None:
            assert set(self.retention.index) == set(self.store.continuations())
            self.retention.release_all(self.store)
        assert self.store.memory_summary()["main"]["available_pages"] == 16
        assert not self.store.host_summary()["used_bytes"]
        assert not self.store.continuations()
        for request in self.requests:
            assert request.is_finished
            for output in request.outputs:
                answered = [token for answer in self.answers for token in answer.get(output, [])]
                assert output.tokens == answered
        return [[output.tokens for output in request.outputs] for request in self.requests]


def step_alone(stage: Stage) -> None:
    """A step in which a request ends."""
    stage.step()


def step_with_a_fork(stage: Stage) -> None:
    """A step that writes a prompt, keeps its prefix, forks it and moves it."""
    stage.step()


def step_that_keeps(stage: Stage) -> None:
    """A step in which a request ends, and its text is kept."""
    stage.step()


def step_with_a_hit(stage: Stage) -> None:
    """A step that starts a prompt from a kept text, which needs the pages of other texts."""
    stage.step()


def submit_hit(stage: Stage) -> None:
    """Leave one page free, and submit a prompt that begins like a kept text."""
    for tokens in (200, 190, 180):
        stage.submit(tokens, 2)
    while len(stage.store.sequences()) > 1 or stage.scheduler.statistics.waiting:
        stage.step()
    free = stage.store.memory_summary()["main"]["available_pages"]
    assert free < 4
    stage.requests.append(stage.scheduler.submit([*prompt(200, 200), 5], 40, sampling=Sampling(seed=9)))


def step_under_pressure(stage: Stage) -> None:
    """A step that admits three prompts: a text goes to the Host and another one leaves it, one is forked or moved."""
    stage.step()


def fill_tiers(stage: Stage) -> None:
    """Fill the Device and the Host with texts; go on from one on the Device, with two outputs."""
    for seed in range(6):
        request = stage.scheduler.submit(prompt(180, seed), 15)
        while not request.is_finished:
            stage.step()
    assert stage.store.host_summary()["free_bytes"] == 0
    behind = [*prompt(180, 5), *request.outputs[0].tokens, 7]
    stage.submit(100, 80)
    stage.requests.append(stage.scheduler.submit(behind, 40, n=2, sampling=Sampling(seed=9)))
    stage.submit(7, 100)


def submit(stage: Stage) -> None:
    """Submit a request."""
    stage.submit(5, 4)


def cancel_running(stage: Stage) -> None:
    """Cancel a request that runs."""
    stage.scheduler.cancel(stage.requests[0])


def cancel_prefix(stage: Stage) -> None:
    """Cancel a request of which one output waits for a row, and its prefix is kept."""
    stage.scheduler.cancel(stage.requests[-1])


def submit_outputs(stage: Stage) -> None:
    """Submit two outputs of a prompt."""
    stage.submit(40, 4, n=2)


def fill_rows(stage: Stage) -> None:
    """Submit four outputs of a prompt, of which two find a row."""
    stage.submit(40, 9, n=4)
    stage.step()


Call = Callable[[Stage], None]

BEFORE: dict[Call, Call] = {step_with_a_fork: submit_outputs, cancel_prefix: fill_rows, step_with_a_hit: submit_hit,
                           step_under_pressure: fill_tiers}
KEEPING = (step_that_keeps, step_with_a_hit, step_under_pressure)
SPARSE: dict[tuple[Call, int], int] = {
    (step_with_a_fork, 3): 5, (step_alone, 3): 2, (cancel_prefix, 3): 2, (step_that_keeps, 3): 3,
    (step_with_a_hit, 3): 9, (step_under_pressure, 3): 61, (step_under_pressure, 1): 19,
}
"""By how much the distance between two interrupts is longer."""


def staged(call: Call, device: pk.Device) -> Stage:
    """Return a stage that is ready for the call."""
    stage = Stage(device, keeps=call in KEEPING)
    if call in BEFORE:
        BEFORE[call](stage)
    return stage


@pytest.mark.parametrize(("error", "every"), ERRORS)
@pytest.mark.parametrize("call", [step_alone, step_with_a_fork, submit, cancel_running, cancel_prefix, *KEEPING])
def test_every_other_request_gets_the_tokens_it_would_have_had(
    call: Call, error: type[BaseException], every: int, opened_device: pk.Device
) -> None:
    """C9.5: one line of the call after the other, each on a stage of its own."""
    stage = staged(call, opened_device)
    with stage.store, Interrupt(0, error) as count:
        call(stage)
    stage = staged(call, opened_device)
    with stage.store:
        call(stage)
        expected = stage.finish()

    latched, distance = 0, every * SPARSE.get((call, every), 1)
    for at in [*range(1, count.lines - 15, distance), *range(max(1, count.lines - 14), count.lines + 1)]:
        stage = staged(call, opened_device)
        submitted = len(stage.requests)
        with stage.store as store:
            with pytest.raises(error, match=f"at line {at}:") as raised, Interrupt(at, error):
                call(stage)
            if store.evidence is not None:
                latched += 1
                with pytest.raises(pk.StoreLatched):
                    stage.step()
                continue
            if call.__name__.startswith(("submit", "cancel")) and len(stage.requests) == submitted:
                call(stage)
            found = stage.finish()
            if call in (cancel_running, cancel_prefix):
                assert found[1] == expected[1], str(raised.value)
            else:
                assert found == expected, str(raised.value)
    print(f"{call.__name__}: {count.lines} lines, latched at {latched}")
