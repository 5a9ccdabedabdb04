"""Random histories of a scheduler, beside a model of three lines: the token that follows another one at a position.

Requests come, are cancelled, and end; others take rows and pages of the same store; a hook fails at random.  Whatever
happens, the tokens of an output are those of its request alone, each once and in order.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

import pagedkv as pk
from pagedkv.graphs import (
    LeastRecent,
    Output,
    PromptLookup,
    Request,
    RetainedPrefix,
    RetainedText,
    Sampling,
    Scheduler,
    Unit,
)

OPERATIONS_A_ROUND = 400
VOCABULARIES = (5, 13, 1009)
HOST_PAGE_BYTES = 2 * pk.PAGE_TOKENS * 16 * 2
WORDS = 4
WORD_FACTORS = (7919, 3, 5, 104729)

GEOMETRY = pk.KVGeometry(layers=1, query_heads=1, kv_heads=1, head_dim=16)


class HookFailed(Exception):
    """What the hook of a walk raises at random."""


class NextToken:
    """A model without attention."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def enqueue(self, unit: Unit) -> None:
        """Enqueue one array function."""
        unit.call(write_next, unit.tokens, unit.first_positions, unit.words, self.vocabulary, unit.next_tokens)


def write_next(tokens: Any, first_positions: Any, words: Any, vocabulary: int, next_tokens: Any) -> None:
    """Write the token that follows each column."""
    positions = first_positions[:, None] + np.arange(tokens.shape[1], like=tokens)
    mixed = (words.astype(np.int64) * np.array(WORD_FACTORS)).sum(axis=1)[:, None]
    next_tokens[...] = (tokens.astype(np.int64) * 31 + positions * 17 + mixed % vocabulary + 7) % vocabulary


class Guesses:
    """Proposes up to four tokens at random."""

    def __init__(self, rng: random.Random, vocabulary: int) -> None:
        self._rng = rng
        self._vocabulary = vocabulary

    def propose(
        self, texts: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32], most: npt.NDArray[np.int32]  # noqa: ARG002
    ) -> npt.NDArray[np.int32]:
        """Return random tokens."""
        proposals = np.full((len(texts), 4), -1, np.int32)
        for entry in range(len(texts)):
            count = self._rng.randint(0, 4)
            proposals[entry, :count] = [self._rng.randrange(self._vocabulary) for _ in range(count)]
        return proposals


class CheckedRetention(LeastRecent):
    """Compares each source with its prompt: the model, which has no attention, would not notice a wrong one."""

    def find(self, store: pk.Store, prompt_ids: npt.NDArray[np.int32], salt: Hashable) -> RetainedPrefix | None:
        """Find a source, and compare it."""
        found = super().find(store, prompt_ids, salt)
        if found is not None:
            text = store.state_of(found.source)
            assert isinstance(text, RetainedText), f"{found} is not of a scheduler"
            same = text.salt == salt and np.array_equal(text.tokens[: found.tokens], prompt_ids[: found.tokens])
            assert same, f"{found} holds other tokens than {prompt_ids.tolist()}"
            assert found.tokens < prompt_ids.size, f"{found} leaves no token of {prompt_ids.tolist()}"
        return found


class SchedulerWalk:
    """One store, one scheduler, and a random history.

    Raises:
        AssertionError: an output differs from its request alone, or a page is lost.
    """

    def __init__(self, rng: random.Random, device: pk.Device, counts: Counter[str]) -> None:
        self.rng = rng
        self.counts = counts
        rows, grows = rng.randint(1, 6), rng.random() < 0.4
        self.config = pk.StoreConfig(
            GEOMETRY, profile="bf16", max_context=256, max_concurrency=rows, decode_columns_max=5, caller_words=WORDS,
            kv_capacity=pk.ExplicitCapacity(64 * rng.randint(max(4, rows), 4 * rows)), kv_lease_growth=grows,
            lease_window_tokens=64, host_arena_bytes=rng.choice((0, rng.randint(1, 40) * HOST_PAGE_BYTES)),
        )
        self.store = pk.open_store(self.config, device)
        self.retention = rng.choice((None, CheckedRetention(), CheckedRetention(entries_max=rng.randint(1, 5))))
        self.vocabulary = rng.choice(VOCABULARIES)
        draft = rng.choice((None, PromptLookup(), Guesses(rng, self.vocabulary)))
        self.fails = False
        self.scheduler = Scheduler(
            self.store, NextToken(self.vocabulary), prefill_chunk=rng.choice((16, 64, 128)), draft=draft,
            before_replay=self._hook if rng.random() < 0.3 else None, use_graphs=rng.random() < 0.5,
            retention=self.retention,
        )
        self.others: list[pk.Sequence] = []
        self.had_others = False
        self.cases: dict[Request, Callable[[int], list[int]]] = {}
        self.heard: dict[Output, list[int]] = {}

    def perform(self) -> None:
        """Do something at random."""
        operation = self.rng.choices(("submit", "step", "cancel", "others"), (3, 10, 0.5, 0.5))[0]
        self.counts[f"scheduler {operation}"] += 1
        if operation == "submit":
            self._submit()
        elif operation == "step":
            self._step()
        elif operation == "cancel" and self.cases:
            self.scheduler.cancel(self.rng.choice(list(self.cases)))
        elif operation == "others":
            self._let_others_act()

    def end(self) -> None:
        """Serve what is left, and compare everything."""
        for sequence in self.others:
            self.store.finish(sequence)
        self.others.clear()
        steps = 0
        while not self.scheduler.is_idle:
            self._step()
            steps += 1
            assert steps < 100_000, "requests wait for ever"
        for request, text_of in self.cases.items():
            for output in request.outputs:
                self._compare(output, text_of(output.index))
        self.store.check()
        if self.retention is not None:
            assert set(self.retention.index) == set(self.store.continuations()), "the policy lost a text"
            self.counts["scheduler hits"] += self.retention.counters.hits
            self.counts["scheduler demotions"] += self.retention.counters.demotions
            self.counts["scheduler evictions"] += self.retention.counters.evictions
            self.retention.release_all(self.store)
        assert not self.store.host_summary()["used_bytes"], "records are lost"
        memory = self.store.memory_summary()["main"]
        assert memory["available_pages"] == memory["capacity_pages"], f"pages are lost: {memory}"
        assert not self.store.sequences(), f"sequences are left: {self.store.sequences()}"
        assert not self.store.continuations(), f"continuations are left: {self.store.continuations()}"
        self.store.close()

    def _submit(self) -> None:
        rng = self.rng
        ids = [rng.randrange(self.vocabulary) for _ in range(rng.choice((1, rng.randint(1, 70), rng.randint(1, 200))))]
        if self.cases and rng.random() < 0.5:  # the beginning of an earlier text
            request = rng.choice(list(self.cases))
            text = [*request.prompt_ids.tolist(), *request.outputs[0].tokens]
            ids = [*text[: rng.choice((len(text), rng.randint(1, len(text))))], *ids[: rng.randint(0, 30)]]
        new_tokens = rng.randint(1, 120)
        stops = frozenset(rng.sample(range(self.vocabulary), rng.choice((0, 0, 1, 2))))
        n = rng.choice((1, 1, 1, 2, 4))
        sampling = Sampling(seed=rng.randrange(1 << 20)) if rng.random() < 0.5 else None
        words = [rng.randrange(-(1 << 31), 1 << 31) for _ in range(WORDS - 3 if sampling else WORDS)]
        refused = None
        try:
            request = self.scheduler.submit(ids, new_tokens, stop_tokens=stops, n=n, words=words, sampling=sampling,
                                            salt=rng.choice((None, "a", "a", "b")))
        except pk.ActivationRefused as error:
            refused = error
        fits = len(ids) + new_tokens <= self.config.max_context
        assert fits == (refused is None), f"{len(ids)} + {new_tokens} tokens: {refused}"
        if refused is not None:
            self.counts["scheduler refusals"] += 1
            return

        def text_of(index: int) -> list[int]:
            own = [*(Sampling(seed=sampling.seed + index).words if sampling else ()), *words]
            mixed = sum(word * factor for word, factor in zip(own, WORD_FACTORS, strict=True)) % self.vocabulary
            text: list[int] = []
            token, position = ids[-1], len(ids) - 1
            while len(text) < new_tokens and not (text and token in stops):
                token = (token * 31 + position * 17 + mixed + 7) % self.vocabulary
                text.append(token)
                position += 1
            return text

        self.cases[request] = text_of
        for output in request.outputs:
            self.heard[output] = []

    def _step(self) -> None:
        self.fails = self.rng.random() < 0.05
        try:
            answer = self.scheduler.step()
        except HookFailed:
            self.counts["scheduler steps that failed"] += 1
            return
        except pk.ActivationRefused:
            assert self.others, "nobody else holds a row or a page"
            self.store.finish(self.others.pop())
            return
        finally:
            self.fails = False
        for output, tokens in answer.items():
            self.heard[output] += tokens
        self.counts["scheduler tokens"] += answer.token_count

    def _let_others_act(self) -> None:
        if self.others and self.rng.random() < 0.5:
            self.store.finish(self.others.pop())
            return
        taken = self.store.try_activate(prompt_tokens=self.rng.randint(1, 100), output_tokens=0)
        if isinstance(taken, pk.Sequence):
            self.others.append(taken)
            self.had_others = True

    def _compare(self, output: Output, text: list[int]) -> None:
        tokens = output.tokens
        assert tokens == self.heard[output], f"{output} has {tokens}, and its steps told {self.heard[output]}"
        assert tokens == text[: len(tokens)], f"{output} has {tokens}, and alone it would have {text}"
        is_whole = len(tokens) == len(text)
        may_be_cut = output.reason == "cancelled" or (
            output.reason == "length" and self.config.kv_lease_growth and self.had_others
        )
        assert is_whole or may_be_cut, f"{output} has {len(tokens)} of {len(text)} tokens"
        if output.reason == "stop":
            assert tokens[-1] in output.request.stop_tokens, f"{output} ended with {tokens[-1]}"

    def _hook(self, unit: Unit, batch: pk.Batch) -> None:  # noqa: ARG002
        if self.fails:
            raise HookFailed


def fuzz_scheduler(
    seed: int, operations: int, *, device: str = "cpu", progress: Callable[[int], None] = lambda _: None
) -> Counter[str]:
    """Walk so many operations in rounds, each with its own store; return what happened how often.

    Raises:
        AssertionError: a difference; a note names the seed of the round.
    """
    counts: Counter[str] = Counter()
    opened = pk.open_device(device)
    for done in range(0, operations, OPERATIONS_A_ROUND):
        round_seed = seed * 1_000_003 + done
        walk = SchedulerWalk(random.Random(round_seed), opened, counts)
        try:
            for _ in range(min(OPERATIONS_A_ROUND, operations - done)):
                walk.perform()
            walk.end()
        except BaseException as error:
            error.add_note(f"in the scheduler round of seed {round_seed}")
            raise
        progress(done)
    return counts
