"""Every line of every call of a decode loop is interrupted once.  (C9.5, C12.4)

The store is latched then, or the caller repeats the call and gets every token that it would have had, each once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

import pagedkv as pk
from pagedkv.graphs import ControlBuffers, DecodeLoop, Prefill, StepTokens
from tests.hostile.interrupt import Interrupt
from tests.toy_model import ToyModel, decode_all, prefilled, prompt, retained

CONFIG = pk.StoreConfig(
    pk.KVGeometry(layers=1, query_heads=2, kv_heads=1, head_dim=64), profile="bf16", max_context=256, max_concurrency=4,
    kv_capacity=pk.ExplicitCapacity(4 * 256), kv_lease_growth=True, lease_window_tokens=64, decode_columns_max=4,
)


class Stage:
    """Two sequences whose next step crosses a page, one to prefill, one to resume, and a loop with their graphs."""

    def __init__(self, device: pk.Device, *, tokens: int = 62, **options: Any) -> None:
        self.store = pk.open_store(CONFIG, device)
        self.loop = DecodeLoop(self.store, ToyModel(self.store), prefill_chunk=16, **options)
        self.running = [self.store.activate(prompt_tokens=tokens, output_tokens=100) for _ in range(2)]
        for seed, sequence in enumerate(self.running):
            self.loop.prefill(sequence, prompt(tokens, seed))
        for _ in range(2):
            self.loop.step(self.running)
        earlier = self.store.activate(prompt_tokens=20, output_tokens=20)
        self.loop.prefill(earlier, prompt(20, 5))
        self.last_token = self.loop.last_token(earlier)
        saved = retained(self.store, earlier, self.last_token)
        self.moved = self.store.activate(source=saved, keep_source=False, prompt_tokens=1, output_tokens=20)
        self.fresh = self.store.activate(prompt_tokens=40, output_tokens=20)
        self.pieces: Prefill | None = None
        self.all = [*self.running, self.fresh, self.moved]
        self.delivered: list[StepTokens] = []

    @property
    def texts(self) -> dict[pk.Sequence, list[int]]:
        """The tokens delivered so far."""
        return {sequence: [token for part in self.delivered for token in part.get(sequence, [])]
                for sequence in self.all}

    def prefill(self) -> None:
        """Prefill the third sequence in three chunks, unless an interrupt came after its end."""
        if not self.store.committed_tokens(self.fresh):
            self.loop.prefill(self.fresh, prompt(40, 9))

    def prefill_in_pieces(self) -> None:
        """Prefill the third sequence piece by piece, and go on with the prompt that has begun."""
        if self.pieces is None:
            self.pieces = self.loop.begin_prefill(self.fresh, prompt(40, 9))
        while self.pieces.advance():
            pass

    def step(self) -> None:
        """Advance the two sequences, and note their tokens."""
        self.note(self.loop.step(self.running))

    def decode(self) -> None:
        """Advance the two sequences by two steps of a generator, which this call leaves unfinished."""
        for number, delivered in enumerate(self.loop.decode(self.running)):
            self.note(delivered)
            if number == 1:
                break

    def capture(self) -> None:
        """Advance one sequence alone: a shape that the loop has not captured."""
        self.note(self.loop.step(self.running[:1]))

    def resume(self) -> None:
        """Go on with a sequence that was retained and activated again."""
        self.loop.resume(self.moved, self.last_token)

    def forget(self) -> None:
        """Forget a sequence that has not been prefilled."""
        self.loop.forget(self.fresh)

    def read(self) -> None:
        """Read what a loop knows of one sequence."""
        self.loop.last_token(self.running[0])
        self.loop.finish_reason(self.running[0])

    def note(self, delivered: StepTokens) -> None:
        """Note delivered tokens; nobody reads them before the call has ended, so no interrupt comes in between."""
        self.delivered.append(delivered)

    def go_on(self) -> list[list[int]]:
        """Prefill and resume what is not in the loop, step until every text has seven tokens, and return these."""
        self.prefill()
        if not self.texts[self.moved]:
            self.resume()
        while min(map(len, self.texts.values())) < 7:
            self.note(self.loop.step(list(self.texts)))
        self.store.check()
        return [tokens[:7] for tokens in self.texts.values()]


class Draft:
    """Proposes three tokens of the text that a stage without a draft gives, the last one changed."""

    def __init__(self) -> None:
        self.futures: list[list[int]] = []

    def propose(self, texts: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32], most: object) -> object:
        """Find the text of each row by its beginning."""
        proposals = np.full((len(texts), 3), -1, np.int32)
        for entry, length in enumerate(lengths.tolist()):
            for future in self.futures:
                if future[:length] == texts[entry, :length].tolist() and len(future) >= length + 3:
                    proposals[entry] = future[length : length + 3]
                    proposals[entry, 2] ^= 1
        return proposals


class SpeculativeStage(Stage):
    """A stage whose loop has a draft and a hook; its step accepts two tokens, rejects one, and trims a page."""

    futures: ClassVar[list[list[int]]] = []

    def __init__(self, device: pk.Device) -> None:
        draft, tokens = Draft(), 55  # two steps of three tokens each end before the last column of a page
        if not self.futures:
            prompts = [prompt(tokens, seed) for seed in range(2)]
            with pk.open_store(CONFIG, device) as store:
                loop = DecodeLoop(store, ToyModel(store), prefill_chunk=16)
                texts = decode_all(loop, [prefilled(loop, ids, 30) for ids in prompts])
            self.futures.extend(ids + text for ids, text in zip(prompts, texts, strict=True))
        draft.futures = self.futures
        super().__init__(device, tokens=tokens, draft=draft, draft_tokens=3, before_replay=lambda unit, batch: None)


STAGES: dict[str, type[SpeculativeStage]] = {"speculate": SpeculativeStage}

CALLS: dict[str, Callable[[Stage], object]] = {
    "step": Stage.step, "decode": Stage.decode, "prefill": Stage.prefill, "prefill in pieces": Stage.prefill_in_pieces,
    "resume": Stage.resume, "forget": Stage.forget, "read": Stage.read, "capture": Stage.capture,
    "speculate": Stage.step,
}
SAMPLED = {"decode": 12, "capture": 60}
"""The distance in lines between two interrupts of the quick form, where it is not 3; the long form has every line."""

PARTS = {"capture": 8}
"""The long form of a call with many lines is divided into so many tests, which the workers of a run share."""

LAST_LINES = 15
"""Lines at the end of a call, where its answer is handed over; each of them is interrupted in the quick form too."""


def cases() -> Iterator[Any]:
    """Yield call, exception, the first interrupted line, and the distance to the next one."""
    for name in CALLS:
        yield pytest.param(name, KeyboardInterrupt, 1, SAMPLED.get(name, 3))
        parts = PARTS.get(name, 1)
        for error, first in itertools.product((KeyboardInterrupt, MemoryError), range(1, parts + 1)):
            yield pytest.param(name, error, first, parts, marks=pytest.mark.long)


@pytest.mark.parametrize(("name", "error", "first", "every"), list(cases()))
def test_a_loop_that_goes_on_gives_the_tokens_it_would_have_given(
    name: str, error: type[BaseException], first: int, every: int, opened_device: pk.Device
) -> None:
    """C9.5: one line of the call after the other, each on a stage of its own."""
    call = CALLS[name]
    stage = STAGES.get(name, Stage)(opened_device)
    with stage.store, Interrupt(0, error) as count:
        call(stage)
    stage = STAGES.get(name, Stage)(opened_device)
    with stage.store:
        call(stage)
        expected = stage.go_on()

    interrupts = latched = 0
    first_of_last = max(1, count.lines - LAST_LINES + 1) if first == 1 else count.lines + 1
    for at in sorted({*range(first, count.lines + 1, every), *range(first_of_last, count.lines + 1)}):
        stage = STAGES.get(name, Stage)(opened_device)
        with stage.store as store:
            with pytest.raises(error, match=f"at line {at}:") as raised, Interrupt(at, error):
                call(stage)
            if store.evidence is not None:
                latched += 1
                with pytest.raises(pk.StoreLatched):
                    stage.step()
            else:
                call(stage)
                assert expected == stage.go_on(), str(raised.value)
        interrupts += 1
    print(f"{name}: {interrupts} of {count.lines} lines, latched at {latched}")


def test_the_speculative_step_accepts_rejects_and_trims(opened_device: pk.Device) -> None:
    """What the interrupts above are to meet."""
    stage = SpeculativeStage(opened_device)
    with stage.store:
        before = dataclasses.replace(stage.loop.statistics)
        stage.step()
        figures = stage.loop.statistics
        assert figures.proposed_tokens - before.proposed_tokens == 6
        assert figures.accepted_tokens - before.accepted_tokens == 4
        assert (before.trimmed_pages, figures.trimmed_pages) == (0, 2)


def test_no_call_of_a_loop_is_missing() -> None:
    """Every public name of a loop is in the calls above."""
    used = {name for call in CALLS.values() for name in call.__code__.co_names}
    assert {name for name in dir(DecodeLoop) if not name.startswith("_")} <= used


def test_a_write_of_selectors_after_an_interrupted_one_is_whole(opened_device: pk.Device) -> None:
    """C11.3, C15.1: with the rows and words of the write before it, with others, without words."""
    first, second = np.array([1, 0]), np.array([2, 3])
    first.flags.writeable = second.flags.writeable = False
    few = first[:1]
    words = {id(rows): np.array([[row, 9] for row in rows], np.int32) for rows in (first, second, few)}
    tokens = np.array([[5], [6]], np.int32)

    def write(control: ControlBuffers, rows: npt.NDArray[np.int64], given: npt.NDArray[np.int32] | None) -> None:
        control.write(rows, tokens[: rows.size, 0], 1, tokens[: rows.size], given)

    with pk.open_store(dataclasses.replace(CONFIG, caller_words=2), opened_device) as store:
        expected = ControlBuffers(store, batch=4, width=1)
        for interrupted, others in ((second, words[id(second)]), (few, words[id(few)]), (first, words[id(second)])):
            for then, given in ((first, words[id(first)]), (second, words[id(second)]), (first, None)):
                expected.make_inert()
                write(expected, then, given)
                control = ControlBuffers(store, batch=4, width=1)
                write(control, first, words[id(first)])
                with Interrupt(0, KeyboardInterrupt) as count:
                    write(control, interrupted, others)
                for at in range(1, count.lines + 1):
                    control = ControlBuffers(store, batch=4, width=1)
                    write(control, first, words[id(first)])
                    with pytest.raises(KeyboardInterrupt), Interrupt(at, KeyboardInterrupt):
                        write(control, interrupted, others)
                    write(control, then, given)
                    assert control.ingress_host.tolist() == expected.ingress_host.tolist(), at
