"""The scheduler: every answer is that of its request alone, whoever runs beside it.  (C1.2, C9.2, C10.5, C14.6)"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import pagedkv as pk
from pagedkv.graphs import Output, PromptLookup, Request, Sampling, Scheduler, Unit
from pagedkv.tools import command
from pagedkv.tools.fuzz import scheduler_walk
from pagedkv.tools.fuzz.scheduler_walk import fuzz_scheduler
from tests.toy_model import ToyModel, opened_store, prompt

GEOMETRY = pk.KVGeometry(layers=1, query_heads=2, kv_heads=1, head_dim=64)
PAGES = "available_pages"


def opened(*, max_context: int = 256, concurrency: int = 4, **options: Any) -> AbstractContextManager[pk.Store]:
    """Open a store with words for a sampling."""
    return opened_store(GEOMETRY, max_context=max_context, concurrency=concurrency, caller_words=4, **options)


class SeededModel(ToyModel):
    """The toy model, whose next token also depends on the row's words and on the position."""

    def enqueue(self, unit: Unit) -> None:
        """Enqueue the toy model, and mix the words in."""
        super().enqueue(unit)
        unit.call(mix_words, unit.words, unit.first_positions, self.vocabulary, unit.next_tokens)


def mix_words(words: Any, first_positions: Any, vocabulary: int, next_tokens: Any) -> None:
    positions = first_positions[:, None] + np.arange(next_tokens.shape[1], like=next_tokens) + 1
    mixed = (words.astype(np.int64) * np.array([7919, 3, 5, 104729])).sum(axis=1)[:, None]
    next_tokens[...] = (next_tokens + mixed * positions) % vocabulary


def run(scheduler: Scheduler) -> None:
    """Step until every request has ended."""
    while not scheduler.is_idle:
        scheduler.step()


@dataclasses.dataclass(frozen=True)
class Case:
    """A request to submit."""

    seed: int
    prompt_tokens: int
    max_new_tokens: int
    n: int = 1
    stops: tuple[int, ...] = ()
    sampling: Sampling | None = None

    def submit(self, scheduler: Scheduler) -> Request:
        """Submit it."""
        return scheduler.submit(prompt(self.prompt_tokens, self.seed), self.max_new_tokens, n=self.n,
                                stop_tokens=self.stops, sampling=self.sampling)


def random_case(random: np.random.Generator, seed: int, vocabulary: int) -> Case:
    """Return a case that fits 256 tokens; many have stops."""
    tokens = int(random.integers(1, 216)) if random.random() < 0.3 else int(random.integers(1, 70))
    stops = tuple(random.integers(0, vocabulary, max(vocabulary // 17, 1)).tolist()) if random.random() < 0.4 else ()
    sampling = Sampling(seed=int(random.integers(0, 1 << 20))) if random.random() < 0.5 else None
    return Case(seed, tokens, int(random.integers(1, 40)), int(random.choice([1, 1, 1, 2, 4])), stops, sampling)


class Alone:
    """The answers of outputs that run alone."""

    def __init__(self, store: pk.Store, *, vocabulary: int = 1009) -> None:
        self.scheduler = Scheduler(store, SeededModel(store, vocabulary=vocabulary), prefill_chunk=16)

    def answers(self, case: Case) -> list[tuple[str | None, list[int]]]:
        """Return reason and tokens of each output of a case."""
        found: list[tuple[str | None, list[int]]] = []
        for index in range(case.n):
            sampling = case.sampling and dataclasses.replace(case.sampling, seed=case.sampling.seed + index)
            request = dataclasses.replace(case, n=1, sampling=sampling).submit(self.scheduler)
            run(self.scheduler)
            found.append((request.outputs[0].reason, request.outputs[0].tokens))
        return found if case.sampling else found[:1] * case.n


def answers_of(request: Request) -> list[tuple[str | None, list[int]]]:
    """Return reason and tokens of each output."""
    return [(output.reason, output.tokens) for output in request.outputs]


@pytest.mark.parametrize(("growth", "speculates"), [(False, False), (True, False), (False, True), (True, True)])
def test_200_requests_through_8_rows_and_a_pool_for_half_of_them(
    growth: bool, speculates: bool, rng: np.random.Generator
) -> None:
    """C14.6: stops, n = 4, seeds, cancels, pieces of prompts, drafts; all pages are free at the end."""
    random = rng
    options = {"kv_lease_growth": True, "lease_window_tokens": 64} if growth else {}
    vocabulary = 5 if speculates else 1009  # of five tokens a draft guesses some
    cases = [random_case(random, seed, vocabulary) for seed in range(200)]
    if speculates:
        options["decode_columns_max"] = 4
    with opened(concurrency=8, tokens=16 * 64, placement_seed=1, **options) as store, opened() as other:
        scheduler = Scheduler(store, SeededModel(store, vocabulary=vocabulary), step_tokens=50, draft_tokens=3,
                              draft=PromptLookup() if speculates else None)
        alone = Alone(other, vocabulary=vocabulary)
        requests: list[Request] = []
        cancelled: set[int] = set()
        said: dict[Output, list[int]] = {}
        for number, case in enumerate(cases):
            requests.append(case.submit(scheduler))
            for _ in range(int(random.integers(0, 4))):
                for output, tokens in scheduler.step().items():
                    said.setdefault(output, []).extend(tokens)
            if random.random() < 0.1:
                victim = int(random.integers(0, number + 1))
                cancelled.add(victim)
                scheduler.cancel(requests[victim])
        while not scheduler.is_idle:
            for output, tokens in scheduler.step().items():
                said.setdefault(output, []).extend(tokens)

        assert store.memory_summary()["main"][PAGES] == 16
        assert not store.continuations()
        assert scheduler.statistics.rows_most == 8
        loop = scheduler.loop.statistics
        assert (0 < loop.accepted_tokens < loop.proposed_tokens) == speculates
        assert (loop.trimmed_pages > 10) == speculates
        for number, (case, request) in enumerate(zip(cases, requests, strict=True)):
            for output, (reason, tokens) in zip(request.outputs, alone.answers(case), strict=True):
                assert output.tokens == said.get(output, [])
                if number in cancelled and output.reason == "cancelled":
                    assert output.tokens == tokens[: len(output.tokens)]
                else:
                    assert (output.reason, output.tokens) == (reason, tokens), case


def test_outputs_share_the_prompt_and_the_last_one_moves_it() -> None:
    """C10.4, C10.5: 4 outputs of 130 + 20 tokens take two shared pages and one each; the prompt is written once."""
    with opened() as store:
        scheduler = Scheduler(store, SeededModel(store))
        request = scheduler.submit(prompt(130, 1), 20, n=4)
        scheduler.step()

        assert scheduler.statistics.running == 4
        assert scheduler.statistics.pages == 2 + 4
        assert not store.continuations()
        assert scheduler.loop.statistics.prefilled_tokens == 130 + 3
        run(scheduler)
        assert len({tuple(output.tokens) for output in request.outputs}) == 1


@pytest.mark.parametrize("prompt_tokens", [1, 2, 64, 65, 190, 230])
def test_outputs_of_a_request_that_fills_the_pool_take_turns(prompt_tokens: int) -> None:
    """C10.9: no room for a snapshot or for a fork beside it: the next output moves the prefix or writes its prompt."""
    with opened(tokens=256) as store, opened() as other:
        case = Case(3, prompt_tokens, 256 - prompt_tokens, 3, sampling=Sampling(seed=5))
        scheduler = Scheduler(store, SeededModel(store))
        request = case.submit(scheduler)
        run(scheduler)

        assert answers_of(request) == Alone(other).answers(case)
        assert store.memory_summary()["main"][PAGES] == 4


def test_a_fork_that_finds_no_room_moves_the_prefix() -> None:
    """C10.9: others take a page while the prefix is kept; the third output writes its prompt itself."""
    with opened(tokens=320) as store, opened() as other:
        case = Case(3, 100, 156, 3, sampling=Sampling(seed=5))
        scheduler = Scheduler(store, SeededModel(store))
        request = case.submit(scheduler)
        while request.outputs[0].reason is None:
            scheduler.step()
        assert len(store.continuations()) == 1
        held = store.activate(prompt_tokens=1, output_tokens=0)
        run(scheduler)
        store.finish(held)

        assert scheduler.loop.statistics.prefilled_tokens == 100 + 1 + 100
        assert answers_of(request) == Alone(other).answers(case)


def test_a_window_is_leased_only_where_the_whole_budget_has_room() -> None:
    """C9.2: ten pages and two outputs of nine: the second waits, so none ends early."""
    with opened(max_context=640, concurrency=2, tokens=640, kv_lease_growth=True, lease_window_tokens=64) as store:
        scheduler = Scheduler(store, SeededModel(store))
        requests = [scheduler.submit(prompt(60, seed), 500) for seed in range(2)]
        scheduler.step()
        assert scheduler.statistics.waiting == 1
        run(scheduler)

        assert [500, 500] == [len(request.outputs[0].tokens) for request in requests]


def test_an_overcommitted_pool_ends_outputs_early_and_says_what_they_would_say() -> None:
    """C9.2: the same two run together; the pages do not suffice, and the tokens are those of an output alone."""
    with opened(max_context=640, concurrency=2, tokens=640, kv_lease_growth=True, lease_window_tokens=64) as store:
        scheduler = Scheduler(store, SeededModel(store), overcommits=True)
        requests = [scheduler.submit(prompt(60, seed), 500) for seed in range(2)]
        scheduler.step()
        assert scheduler.statistics.waiting == 0
        run(scheduler)
        texts = [request.outputs[0].tokens for request in requests]
        lone = Scheduler(store, SeededModel(store))
        alone = [lone.submit(prompt(60, seed), 500) for seed in range(2)]
        run(lone)

        assert all(request.outputs[0].reason == "length" for request in requests)
        assert 400 < sum(map(len, texts)) < 1000
        assert [request.outputs[0].tokens[: len(text)] for request, text in zip(alone, texts, strict=True)] == texts
    with opened() as store, pytest.raises(pk.ConfigError, match=r"overcommits.*kv_lease_growth"):
        Scheduler(store, SeededModel(store), overcommits=True)


def test_who_never_fits_is_refused_and_who_fits_later_waits() -> None:
    """C10.9: 250 + 7 tokens are more than a sequence may have; 200 + 50 wait for the request before."""
    with opened(tokens=256) as store:
        scheduler = Scheduler(store, SeededModel(store))
        with pytest.raises(pk.ActivationRefused, match=r"250 \+ 7 tokens .* at most 4 pages.* got 5 pages") as refused:
            scheduler.submit(prompt(250, 1), 7)
        assert refused.value.refusal.forever  # type: ignore[attr-defined]
        assert scheduler.is_idle
        first, second = scheduler.submit(prompt(100, 1), 10), scheduler.submit(prompt(200, 2), 50)
        scheduler.step()
        assert (scheduler.statistics.running, scheduler.statistics.waiting) == (1, 1)
        assert scheduler.requests == [first, second]
        run(scheduler)

        assert second.outputs[0].admitted_step == (first.outputs[0].ended_step or 0) + 1
        assert scheduler.statistics.first_token_steps_max == second.outputs[0].first_token_step


def test_a_queue_that_others_block_says_so() -> None:
    """C10.9: nothing runs and others hold the pages: an error with the numbers, and the next step goes on."""
    with opened(tokens=256) as store:
        held = store.activate(prompt_tokens=128, output_tokens=0)
        scheduler = Scheduler(store, SeededModel(store))
        request = scheduler.submit(prompt(190, 2), 10)
        for _ in range(2):
            with pytest.raises(pk.ActivationRefused, match=r"expected 4 pages of main, or something.* got 2"):
                scheduler.step()
        store.finish(held)
        run(scheduler)

        assert len(request.outputs[0].tokens) == 10


def test_decode_columns_come_first_and_prompts_share_the_rest() -> None:
    """20 columns: 16 of a prompt beside the decode columns of at most four rows."""
    with opened() as store:
        scheduler = Scheduler(store, SeededModel(store), step_tokens=20)
        scheduler.submit(prompt(4, 1), 30)
        scheduler.step()
        scheduler.submit(prompt(60, 2), 5)
        written = []
        for _ in range(4):
            before = scheduler.loop.statistics.prefilled_tokens
            scheduler.step()
            written.append(scheduler.loop.statistics.prefilled_tokens - before)

        assert written == [19, 19, 19, 3]
        run(scheduler)


def test_a_model_that_refuses_a_prompt_stops_nobody_else() -> None:
    """The error names the request; cancelled, the others go on with their own tokens."""

    class Picky(SeededModel):
        def enqueue(self, unit: Unit) -> None:
            unit.call(refuse_token, unit.tokens)
            super().enqueue(unit)

    with opened() as store, opened() as other:
        scheduler = Scheduler(store, Picky(store), use_graphs=False)
        case = Case(1, 30, 12)
        good = case.submit(scheduler)
        scheduler.step()
        bad = scheduler.submit([5, 2000, 5], 4)
        with pytest.raises(ValueError, match="2000") as raised:
            scheduler.step()
        assert raised.value.__notes__ == [f"while the prompt of {bad} was written"]
        scheduler.cancel(bad)
        run(scheduler)

        assert bad.outputs[0].reason == "cancelled"
        assert answers_of(good) == Alone(other).answers(case)


def refuse_token(tokens: Any) -> None:
    if (tokens == 2000).any():
        raise ValueError("token 2000")


def test_calls_from_inside_of_a_step_are_refused() -> None:
    """C12.3: from an observer of the store."""
    with opened() as store:
        scheduler = Scheduler(store, SeededModel(store))
        request = scheduler.submit(prompt(20, 1), 3)
        errors: list[pk.MisuseError] = []

        def observe(_: object) -> None:
            for call in (scheduler.step, lambda: scheduler.submit([1], 1), lambda: scheduler.cancel(request)):
                with pytest.raises(pk.MisuseError, match="in the middle of another") as raised:
                    call()
                errors.append(raised.value)

        stop = store.observe(observe)
        run(scheduler)
        stop()

        assert errors
        assert len(request.outputs[0].tokens) == 3


@pytest.mark.parametrize(("arguments", "message"), [
    ({"prompt_ids": []}, "at least 1"), ({"prompt_ids": [-1]}, "integer token ids"),
    ({"max_new_tokens": 0}, "from 1 to"), ({"n": 0}, "n was refused"), ({"words": [1]}, "4 integers"),
    ({"words": [1 << 31, 0, 0, 0]}, "a word"), ({"sampling": 1}, "a Sampling"),
    ({"sampling": Sampling(), "words": [1, 2]}, "1 integers"),
    ({"seed": (1 << 31) - 1, "n": 2}, "seed"), ({"stop_tokens": [None]}, "stop_tokens"),
])
def test_a_refused_request_changes_nothing(arguments: dict[str, Any], message: str) -> None:
    """C10.9, C15.1."""
    with opened() as store:
        scheduler = Scheduler(store, SeededModel(store))
        with pytest.raises(pk.MisuseError, match=message):
            scheduler.submit(**{"prompt_ids": [1, 2], "max_new_tokens": 3, **arguments})

        assert scheduler.is_idle


def test_a_scheduler_refuses_a_step_without_room_for_a_prompt() -> None:
    """C14.4: four rows and a piece of 16 tokens."""
    with opened() as store:
        with pytest.raises(pk.ConfigError, match="from 20"):
            Scheduler(store, SeededModel(store), step_tokens=19)
        with pytest.raises(pk.MisuseError, match="a request that submit"):
            Scheduler(store, SeededModel(store)).cancel(object())  # type: ignore[arg-type]


# ---- random histories --------------------------------------------------------------------------------
@pytest.mark.parametrize("operations", [6_000, pytest.param(200_000, marks=pytest.mark.long)])
def test_random_histories_give_each_request_its_own_text(seed: int, operations: int) -> None:
    """Others in the store, cancels, n, stops, words, seeds, drafts, growth, and a hook that fails; no page is lost."""
    counts = fuzz_scheduler(seed, operations)
    assert min(counts[f"scheduler {what}"] for what in (
        "steps that failed", "cancel", "others", "refusals", "tokens", "submit", "step")) > 0


def test_a_history_that_differs_is_a_finding_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1; the text names the output and the seed of the round."""
    monkeypatch.setattr(scheduler_walk.SchedulerWalk, "_compare", _refuse)
    result = CliRunner().invoke(command.main, ["fuzz", "--scheduler", "--events", "400", "--seed", "5"])
    assert result.exit_code == 1
    assert "another text; in the scheduler round of seed 5000015" in result.stdout


def _refuse(*_: object) -> None:
    raise AssertionError("another text")
