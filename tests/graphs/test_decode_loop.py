"""The loop: batches, lengths, stops, refusals, and the exact equalities of C14.6 and C15.3."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.graphs import DecodeLoop, Unit
from tests.placement import shuffle_placement
from tests.toy_model import ToyModel

GEOMETRY = pk.KVGeometry(layers=2, query_heads=6, kv_heads=2, head_dim=64)


@contextlib.contextmanager
def opened(profile: str = "bf16", *, concurrency: int = 4, device: str = "cpu") -> Iterator[pk.Store]:
    """Open a store of a small geometry and check it at the end."""
    config = pk.StoreConfig(GEOMETRY, profile=profile, max_context=1280, max_concurrency=concurrency,
                            kv_capacity=pk.ExplicitCapacity(1280 * concurrency))
    with pk.open_store(config, device=device) as store:
        yield store
        store.check()


def prompt(tokens: int, seed: int) -> list[int]:
    """Return token ids of a prompt."""
    ids: list[int] = np.random.default_rng(seed).integers(0, 1009, tokens).tolist()
    return ids


def generate(
    store: pk.Store, prompts: list[list[int]], new_tokens: int, *, use_graphs: bool = True, prefill_chunk: int = 128
) -> list[list[int]]:
    """Decode prompts in one batch and return their new tokens."""
    loop = DecodeLoop(store, ToyModel(store), use_graphs=use_graphs, prefill_chunk=prefill_chunk)
    sequences = [store.activate(prompt_tokens=len(ids), output_tokens=new_tokens) for ids in prompts]
    for sequence, ids in zip(sequences, prompts, strict=True):
        loop.prefill(sequence, ids)
    texts: dict[pk.Sequence, list[int]] = {sequence: [] for sequence in sequences}
    for tokens in loop.decode(sequences):
        for sequence, new in tokens.items():
            texts[sequence] += new
    for sequence in sequences:
        assert loop.finish_reason(sequence) == "length"
        store.finish(sequence)
    return [texts[sequence] for sequence in sequences]


@pytest.mark.parametrize("profile", sorted(pk.PROFILES))
def test_a_batch_says_what_each_row_says_alone(profile: str) -> None:
    """C14.6, S1: rows of one batch do not touch each other, across page crossings and merges."""
    prompts = [prompt(tokens, seed) for seed, tokens in enumerate((63, 64, 600))]
    with opened(profile) as store:
        together = generate(store, prompts, 5)
        alone = [generate(store, [ids], 5)[0] for ids in prompts]

    assert together == alone


@pytest.mark.deferred
def test_replay_says_what_eager_says() -> None:
    """C15.3: one captured graph serves every content; eager is the same work."""
    prompts = [prompt(60, 1), prompt(127, 2)]
    with opened() as store:
        assert generate(store, prompts, 8) == generate(store, prompts, 8, use_graphs=False)


@pytest.mark.deferred
def test_shuffled_page_ids_change_nothing() -> None:
    """C3.6, S2: results do not depend on where pages lie."""
    prompts = [prompt(200, 3), prompt(65, 4)]
    with opened() as store:
        straight = generate(store, prompts, 6)
    with opened() as store:
        shuffle_placement(store, seed=5)

        assert generate(store, prompts, 6) == straight


def test_chunked_prefill_says_what_whole_prefill_says() -> None:
    """C14.6, S43: chunking is not visible in an output row."""
    ids = prompt(700, 6)
    with opened(concurrency=1) as store:
        whole = generate(store, [ids], 4, prefill_chunk=1024)
        for chunk in (16, 64, 100, 128):
            assert generate(store, [ids], 4, prefill_chunk=chunk) == whole, chunk


def test_the_model_is_called_twice_a_shape_and_never_by_a_replay() -> None:
    """C15: warm-up and capture; replays call no model code."""
    with opened(concurrency=1) as store:
        model = ToyModel(store)
        loop = DecodeLoop(store, model)
        sequence = store.activate(prompt_tokens=16, output_tokens=20)
        loop.prefill(sequence, prompt(16, 1))
        for _ in loop.decode([sequence]):
            pass

        assert model.enqueue_count == 4
        assert sum(loop.graphs.replays().values()) == 20


@pytest.mark.deferred
def test_every_decode_step_is_one_replay_and_two_calls_between_crossings() -> None:
    """C9.4, C11.2: a step that crosses no page is the graph launch and the wait."""
    with opened(concurrency=1) as store:
        loop = DecodeLoop(store, ToyModel(store))
        sequence = store.activate(prompt_tokens=16, output_tokens=30)
        loop.prefill(sequence, prompt(16, 1))
        steps = sum(1 for _ in loop.decode([sequence]))

        assert steps == loop.statistics.decode_steps == 29
        assert loop.statistics.driver_calls_per_step == 2.0


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
        sequences = [store.activate(prompt_tokens=len(ids), output_tokens=3) for ids in prompts[:3]]
        for sequence, ids in zip(sequences, prompts, strict=False):
            loop.prefill(sequence, ids)
        owned = [page for sequence in sequences for page in store.page_ids(sequence)]
        others = np.setdiff1d(np.arange(planes.shape[0]), owned)
        before = planes[others].copy()
        texts: dict[pk.Sequence, list[int]] = {sequence: [] for sequence in sequences}
        for tokens in loop.decode(sequences):
            for sequence, new in tokens.items():
                texts[sequence] += new

        assert list(texts.values()) == three
        assert np.array_equal(planes[others], before)


@pytest.mark.deferred
def test_decode_ends_at_stop_tokens_and_delivers_them() -> None:
    """The loop owns stop tokens; the row leaves the batch, others go on."""
    ids = [prompt(20, 1), prompt(40, 2)]
    with opened() as store:
        reference = generate(store, ids, 12)
        stop = reference[0][3]
        loop = DecodeLoop(store, ToyModel(store))
        sequences = [store.activate(prompt_tokens=len(one), output_tokens=12) for one in ids]
        for sequence, one in zip(sequences, ids, strict=True):
            loop.prefill(sequence, one)
        texts: dict[pk.Sequence, list[int]] = {sequence: [] for sequence in sequences}
        for tokens in loop.decode(sequences, stop_tokens=[stop]):
            for sequence, new in tokens.items():
                texts[sequence] += new

        assert texts[sequences[0]] == reference[0][: reference[0].index(stop) + 1]
        assert loop.finish_reason(sequences[0]) == "stop"
        assert len(texts[sequences[1]]) == 12 or texts[sequences[1]][-1] == stop


@pytest.mark.deferred
def test_max_context_is_reached_exactly() -> None:
    """S4, S75: a sequence runs to S - 1 cached tokens and no further; nothing is written past the row."""
    config = pk.StoreConfig(GEOMETRY, profile="bf16", max_context=100, max_concurrency=1,
                            kv_capacity=pk.ExplicitCapacity(128))
    with pk.open_store(config, device="cpu") as store:
        loop = DecodeLoop(store, ToyModel(store))
        sequence = store.activate(prompt_tokens=90, output_tokens=10)
        loop.prefill(sequence, prompt(90, 1))
        produced = [token for tokens in loop.decode([sequence]) for token in tokens[sequence]]

        assert len(produced) == 10
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
def test_a_failing_model_thaws_its_rows() -> None:
    """C9.5: a unit that raised commits nothing and leaves the store usable."""
    with opened(concurrency=1) as store:
        model = ToyModel(store)
        loop = DecodeLoop(store, model, use_graphs=False)
        sequence = store.activate(prompt_tokens=16, output_tokens=4)
        loop.prefill(sequence, prompt(16, 1))
        captured = next(iter(loop.graphs._graphs.values()))
        captured._model = BrokenModel()
        with pytest.raises(RuntimeError, match="out of ideas"):
            loop._run(captured, store.batch([sequence]), 1, np.zeros((1, 16), np.int32))

        assert store.committed_tokens(sequence) == 16
        store.finish(sequence)


@pytest.mark.deferred
def test_an_ended_sequence_gets_what_is_undelivered_also_when_it_was_finished() -> None:
    """What `step` says of a sequence that has ended here: no error, its last tokens, then nothing."""
    with opened(concurrency=1) as store:
        loop = DecodeLoop(store, ToyModel(store))
        sequence = store.activate(prompt_tokens=10, output_tokens=1)
        loop.prefill(sequence, prompt(10, 1))
        store.finish(sequence)

        assert [1] == [len(tokens) for tokens in loop.step([sequence]).values()]
        assert {} == loop.step([sequence])
        assert "length" == loop.finish_reason(sequence)


@pytest.mark.deferred
def test_a_running_sequence_that_was_finished_is_stale_and_nothing_is_delivered() -> None:
    """C10.1: the other one gets the same tokens from the next call."""
    with opened() as store:
        reference = generate(store, [prompt(20, 2)], 4)[0]
        loop = DecodeLoop(store, ToyModel(store))
        gone, other = (store.activate(prompt_tokens=20, output_tokens=4) for _ in range(2))
        loop.prefill(gone, prompt(20, 1))
        loop.prefill(other, prompt(20, 2))
        store.finish(gone)
        with pytest.raises(pk.StaleHandle, match="finished"):
            loop.step([gone, other])

        assert reference == [token for tokens in loop.decode([other]) for token in tokens[other]]


def test_a_server_that_never_forgets_keeps_one_sequence_a_row() -> None:
    """What came before in a row is dropped by prefill and by resume alike, and then refused."""
    with opened(concurrency=2) as store:
        loop = DecodeLoop(store, ToyModel(store))
        for _ in range(3):
            sequences = [store.activate(prompt_tokens=8, output_tokens=3) for _ in range(2)]
            for sequence in sequences:
                loop.prefill(sequence, prompt(8, 1))
            for _ in loop.decode(sequences):
                pass
            last = loop.last_token(sequences[0])
            kept = store.finish(sequences[0], retain=True, state=last)
            store.finish(sequences[1])
            again = store.activate(source=kept, keep_source=False, prompt_tokens=0, output_tokens=4)
            loop.resume(again, last)

            assert set(loop._outputs) == {again, sequences[1]}
            with pytest.raises(pk.MisuseError, match="prefill or resume first"):
                loop.finish_reason(sequences[0])
            assert 3 == sum(len(tokens[again]) for tokens in loop.decode([again])), "the pending token is one of four"
            store.finish(again)


def test_a_row_can_change_hands_between_two_steps_of_decode() -> None:
    """A server finishes what has ended, with or without `forget`, and prefills another in its row."""
    with opened(concurrency=2) as store:
        reference = generate(store, [prompt(20, 2)], 6)[0]
        loop = DecodeLoop(store, ToyModel(store))
        short, long = (store.activate(prompt_tokens=20, output_tokens=output) for output in (2, 6))
        loop.prefill(short, prompt(20, 1))
        loop.prefill(long, prompt(20, 2))
        said: list[int] = []
        for tokens in loop.decode([short, long]):
            said += tokens[long]
            if short in tokens:
                assert "length" == loop.finish_reason(short)
                store.finish(short)
                later = store.activate(prompt_tokens=20, output_tokens=2)
                loop.prefill(later, prompt(20, 3))
                assert later.row == short.row

        assert said == reference
        assert 2 == sum(len(tokens[later]) for tokens in loop.decode([later]))


class BrokenModel:
    """Raises when it is enqueued."""

    def enqueue(self, unit: object) -> None:
        """Fail."""
        raise RuntimeError("out of ideas")


class Mute(ToyModel):
    """A toy model that forgets the tokens of one kind of unit."""

    def __init__(self, store: pk.Store, forgets: str) -> None:
        super().__init__(store)
        self.forgets = forgets

    def enqueue(self, unit: Unit) -> None:
        if unit.key.unit != self.forgets:
            super().enqueue(unit)


@pytest.mark.parametrize("forgets", ["prefill", "decode"])
def test_a_model_that_writes_no_token_is_found_out_at_once(forgets: str) -> None:
    """C14.4: it would repeat what another unit left in the words; no frontier moves."""
    with opened() as store:
        loop = DecodeLoop(store, Mute(store, forgets))
        sequence = store.activate(prompt_tokens=5, output_tokens=5)
        if forgets == "decode":
            loop.prefill(sequence, prompt(5, 1))
        before = store.committed_tokens(sequence)

        with pytest.raises(pk.MisuseError, match="write next_tokens of every live column"):
            loop.step([sequence]) if forgets == "decode" else loop.prefill(sequence, prompt(5, 1))
        assert store.committed_tokens(sequence) == before
