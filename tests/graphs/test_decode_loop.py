"""The loop: batches, lengths, stops, refusals, and the exact equalities of C14.6 and C15.3."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.graphs import DecodeLoop, Unit
from tests.host.refusals import refused
from tests.placement import shuffle_placement
from tests.toy_model import ToyModel, decode_all, opened_store, prefilled, prompt

GEOMETRY = pk.KVGeometry(layers=2, query_heads=6, kv_heads=2, head_dim=64)


def opened(profile: str = "bf16", *, concurrency: int = 4) -> AbstractContextManager[pk.Store]:
    """Open a store of a small geometry and check it at the end."""
    return opened_store(GEOMETRY, profile=profile, max_context=1280, concurrency=concurrency)


def generate(
    store: pk.Store, prompts: list[list[int]], new_tokens: int, *, use_graphs: bool = True, prefill_chunk: int = 128
) -> list[list[int]]:
    """Decode prompts in one batch and return their new tokens."""
    loop = DecodeLoop(store, ToyModel(store), use_graphs=use_graphs, prefill_chunk=prefill_chunk)
    sequences = [prefilled(loop, ids, new_tokens) for ids in prompts]
    texts = decode_all(loop, sequences)
    for sequence in sequences:
        assert loop.finish_reason(sequence) == "length"
        store.finish(sequence)
    return texts


@pytest.mark.deferred
@pytest.mark.parametrize("profile", sorted(pk.PROFILES))
def test_rows_decode_the_same_alone_eagerly_and_in_other_pages(profile: str) -> None:
    """C14.6, C15.3, C3.6, S1, S2: across page crossings and merges; a captured graph serves every content."""
    prompts = [prompt(tokens, seed) for seed, tokens in enumerate((63, 64, 600))]
    with opened(profile) as store:
        together = generate(store, prompts, 8)
        assert together == [generate(store, [ids], 8)[0] for ids in prompts]
        assert together == generate(store, prompts, 8, use_graphs=False)
    with opened(profile) as store:
        shuffle_placement(store, seed=5)
        assert together == generate(store, prompts, 8)


def test_chunked_and_whole_prefill_decode_the_same() -> None:
    """C14.6, S43: chunking is not visible in an output row."""
    ids = prompt(700, 6)
    with opened(concurrency=1) as store:
        whole = generate(store, [ids], 4, prefill_chunk=1024)
        for chunk in (16, 64, 100, 128):
            assert generate(store, [ids], 4, prefill_chunk=chunk) == whole, chunk


@pytest.mark.deferred
def test_every_decode_step_is_one_replay_and_two_calls_between_crossings() -> None:
    """C9.4, C11.2, C15: the graph launch and the wait; the model is called by warm-up and capture of a shape alone."""
    with opened(concurrency=1) as store:
        model = ToyModel(store)
        loop = DecodeLoop(store, model)
        sequence = prefilled(loop, prompt(16, 1), 30)
        steps = sum(1 for _ in loop.decode([sequence]))

        assert steps == loop.statistics.decode_steps == 29
        assert loop.statistics.driver_calls_per_step == 2.0
        assert (model.enqueue_count, sum(loop.graphs.replays().values())) == (4, 1 + 29)


@pytest.mark.deferred
def test_padding_rows_of_a_captured_batch_touch_nothing() -> None:
    """S10, S16, S62: 3 live rows in a graph of B = 4 after 4 live rows; other pages keep their bytes."""
    prompts = [prompt(30 + 40 * row, row) for row in range(4)]
    with opened() as store:
        generate(store, prompts, 3)
        three = generate(store, prompts[:3], 3)
    with opened() as store:
        planes = store.views["main"][0].k_pages
        loop = DecodeLoop(store, ToyModel(store))
        sequences = [prefilled(loop, ids, 3) for ids in prompts[:3]]
        owned = [page for sequence in sequences for page in store.page_ids(sequence)]
        others = np.setdiff1d(np.arange(planes.shape[0]), owned)
        before = planes[others].copy()

        assert decode_all(loop, sequences) == three
        assert np.array_equal(planes[others], before)


@pytest.mark.deferred
def test_decode_ends_at_stop_tokens_and_delivers_them() -> None:
    """A stop token ends its row; the other rows continue."""
    ids = [prompt(20, 1), prompt(40, 2)]
    with opened() as store:
        reference = generate(store, ids, 12)
        stop = reference[0][3]
        loop = DecodeLoop(store, ToyModel(store))
        sequences = [prefilled(loop, one, 12) for one in ids]
        texts = decode_all(loop, sequences, stop_tokens=[stop])

        assert texts[0] == reference[0][: reference[0].index(stop) + 1]
        assert loop.finish_reason(sequences[0]) == "stop"
        assert len(texts[1]) == 12 or texts[1][-1] == stop


@pytest.mark.deferred
def test_max_context_is_reached_exactly() -> None:
    """S4, S75: a sequence runs to S - 1 cached tokens and no further; nothing is written past the row."""
    with opened_store(GEOMETRY, max_context=100, concurrency=1) as store:
        loop = DecodeLoop(store, ToyModel(store))
        sequence = prefilled(loop, prompt(90, 1), 10)

        assert len(decode_all(loop, [sequence])[0]) == 10
        assert store.committed_tokens(sequence) == 99
        with pytest.raises(pk.MisuseError, match="positions below max_context"):
            store.begin_unit(store.batch([sequence]), 2)


def test_prefill_refuses_what_was_not_activated_and_changes_nothing() -> None:
    """C9.2: a prompt beyond the budget, an empty one, and one that is no list of integers."""
    with opened() as store:
        loop = DecodeLoop(store, ToyModel(store))
        sequence = store.activate(prompt_tokens=4, output_tokens=2)
        for bad in ([], [1] * 7, [0.5, 1.5]):
            with pytest.raises(pk.MisuseError, match="a prompt"):
                loop.prefill(sequence, bad)  # type: ignore[arg-type]

        assert store.committed_tokens(sequence) == 0
        with pytest.raises(pk.MisuseError, match="prefilled"):
            loop.step([sequence])


@pytest.mark.deferred
def test_a_running_sequence_that_was_finished_is_stale_and_nothing_is_delivered() -> None:
    """C10.1: the next call gives the other sequence the same tokens."""
    with opened() as store:
        reference = generate(store, [prompt(20, 2)], 4)[0]
        loop = DecodeLoop(store, ToyModel(store))
        finished, other = (prefilled(loop, prompt(20, seed), 4) for seed in (1, 2))
        store.finish(finished)
        with pytest.raises(pk.StaleHandle, match="finished"):
            loop.step([finished, other])

        assert [reference] == decode_all(loop, [other])
        ended = prefilled(loop, prompt(10, 1), 1)
        store.finish(ended)
        assert [1] == [len(tokens) for tokens in loop.step([ended]).values()], "no error: it had ended by then"
        assert (0, "length") == (len(loop.step([ended])), loop.finish_reason(ended))


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_a_refused_call_leaves_a_unit_of_the_caller_with_the_loop_s_names_in_flight(name: str) -> None:
    """C12.2, C12.3: after a refusal the loop takes its own units back, and no unit that somebody else began."""
    with opened() as store:
        loop = DecodeLoop(store, ToyModel(store))
        sequence = prefilled(loop, prompt(20, 1), 8)
        unit = store.begin_unit(store.batch([sequence]), 2, name=name)
        with pytest.raises(pk.UnitInFlight):
            loop.step([sequence])
        with pytest.raises(pk.UnitInFlight):
            loop.prefill(sequence, [5], last_token=None)
        assert store.units() == [unit]
        store.wait(unit)
        store.commit(unit, 1)
        assert store.committed_tokens(sequence) == 21


@pytest.mark.parametrize("call", [
    lambda loop, aborted, _: loop.forget(aborted), lambda loop, _, other: loop.last_token(other),
    lambda loop, _, other: loop.step([other]), lambda loop, _, other: loop.prefill(other, [5], last_token=None),
], ids=["forget", "last_token", "step", "prefill"])
def test_a_call_of_the_loop_in_the_middle_of_a_step_is_refused(
    call: Callable[[DecodeLoop, pk.Sequence, pk.Sequence], object]
) -> None:
    """C12.3: an observer aborts a sequence in the step, and calls the loop when the commit releases its pages.

    The step goes on, and no other sequence loses what the commit wrote.
    """
    with opened() as store:
        reference = generate(store, [prompt(30, 2)], 8)[0]
        loop = DecodeLoop(store, ToyModel(store))
        aborted, other = prefilled(loop, prompt(64, 1), 8), prefilled(loop, prompt(30, 2), 8)
        refusals = []

        def observe(event: pk.PageEvent) -> None:
            if event.kind == "publish":
                assert not store.abort(aborted)
            elif event.kind == "release":
                with pytest.raises(pk.MisuseError, match="in the middle of its own decode") as caught:
                    call(loop, aborted, other)
                refusals.append(caught.value)

        stop = store.observe(observe)
        text = loop.step([aborted, other])[other]
        stop()
        assert len(refusals) == 1
        assert reference == text + decode_all(loop, [other])[0]


def test_a_server_that_never_forgets_keeps_one_sequence_a_row() -> None:
    """Prefill and resume forget the earlier sequence of the row, and the loop then refuses it."""
    with opened(concurrency=2) as store:
        loop = DecodeLoop(store, ToyModel(store))
        for _ in range(3):
            sequences = [prefilled(loop, prompt(8, 1), 3) for _ in range(2)]
            decode_all(loop, sequences)
            last = loop.last_token(sequences[0])
            saved = store.finish(sequences[0], retain=True, state=last)
            store.finish(sequences[1])
            again = store.activate(source=saved, keep_source=False, prompt_tokens=0, output_tokens=4)
            loop.resume(again, last)

            assert set(loop._outputs.handles) == {again, sequences[1]}
            with pytest.raises(pk.MisuseError, match="prefill or resume first"):
                loop.finish_reason(sequences[0])
            assert 3 == len(decode_all(loop, [again])[0]), "the pending token is one of four"
            store.finish(again)


def test_a_row_can_change_hands_between_two_steps_of_decode() -> None:
    """A server finishes a sequence that has ended, without `forget`, and prefills another in its row."""
    with opened(concurrency=2) as store:
        reference = generate(store, [prompt(20, 2)], 6)[0]
        loop = DecodeLoop(store, ToyModel(store))
        short, long = prefilled(loop, prompt(20, 1), 2), prefilled(loop, prompt(20, 2), 6)
        text: list[int] = []
        for tokens in loop.decode([short, long]):
            text += tokens[long]
            if short in tokens:
                assert "length" == loop.finish_reason(short)
                store.finish(short)
                later = prefilled(loop, prompt(20, 3), 2)
                assert later.row == short.row

        assert text == reference
        assert 2 == len(decode_all(loop, [later])[0])


class MuteModel(ToyModel):
    """A toy model that writes no token, or -1, in one kind of unit."""

    def __init__(self, store: pk.Store, mute_in: str, *, is_negative: bool) -> None:
        super().__init__(store)
        self.mute_in, self.is_negative = mute_in, is_negative

    def enqueue(self, unit: Unit) -> None:
        if unit.key.unit != self.mute_in:
            super().enqueue(unit)
        elif self.is_negative:
            unit.call(write_no_token, unit.next_tokens)


def write_no_token(next_tokens: Any) -> None:
    """Leave what is no id."""
    next_tokens[...] = -1


@pytest.mark.parametrize("mute_in", ["prefill", "decode"])
@pytest.mark.parametrize("is_negative", [False, True])
def test_a_model_that_writes_no_token_is_refused_at_once(mute_in: str, is_negative: bool) -> None:
    """C14.4: the egress would repeat the token of another unit; no frontier moves."""
    with opened() as store:
        loop = DecodeLoop(store, MuteModel(store, mute_in, is_negative=is_negative))
        sequence = store.activate(prompt_tokens=5, output_tokens=5)
        if mute_in == "decode":
            loop.prefill(sequence, prompt(5, 1))
        before = store.committed_tokens(sequence)

        with refused(pk.MisuseError, "C14.4", loop._outputs, match="write next_tokens of every live column"):
            loop.step([sequence]) if mute_in == "decode" else loop.prefill(sequence, prompt(5, 1))
        assert store.committed_tokens(sequence) == before
