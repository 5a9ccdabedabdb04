"""A loop with a draft: verify units, what they accept; stops and words of a sequence; the hook.  (C13, C14.6, C15.1)"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import pagedkv as pk
from pagedkv.graphs import DecodeLoop, PromptLookup, Unit
from tests.host.refusals import refused
from tests.toy_model import ToyModel, decode_all, opened_store, prefilled, prompt

GEOMETRY = pk.KVGeometry(layers=2, query_heads=2, kv_heads=1, head_dim=16)

Int32 = npt.NDArray[np.int32]


def opened(rows: int = 3, **options: Any) -> Any:
    """Open a store for units of 5 columns; unwritten pages are NaN."""
    options = {"max_context": 512, "decode_columns_max": 5, "sanitizer": True, **options}
    return opened_store(GEOMETRY, concurrency=rows, placement_seed=1, **options)


class Oracle:
    """Proposes what the text will be, with mistakes at random, so that every count is accepted at some time."""

    def __init__(self, futures: list[list[int]], seed: int) -> None:
        self.futures = [np.array(future, np.int32) for future in futures]
        self.random = random.Random(seed)
        self.calls = 0

    def propose(self, texts: Int32, lengths: Int32, most: Int32) -> Int32:
        """Find each text by its beginning; propose 0 to 4 of the tokens behind it, some of them wrong."""
        self.calls += 1
        proposals = np.full((len(texts), 4), -1, np.int32)
        for entry, length in enumerate(lengths.tolist()):
            (future,) = (each for each in self.futures if each[:length].tolist() == texts[entry, :length].tolist())
            ahead = future[length : length + self.random.randint(0, 4)]
            proposals[entry, : ahead.size] = ahead
            if ahead.size and self.random.random() < 0.5:
                proposals[entry, self.random.randrange(ahead.size)] = 1
        return proposals


def texts_of(prompts: list[list[int]], new_tokens: int, **options: Any) -> list[list[int]]:
    """Return what plain decoding makes of each prompt, alone."""
    texts = []
    for ids in prompts:
        with opened(1) as store:
            loop = DecodeLoop(store, ToyModel(store), **options)
            texts += decode_all(loop, [prefilled(loop, ids, new_tokens)])
    return texts


@pytest.mark.deferred
@pytest.mark.parametrize("use_graphs", [True, False])
@pytest.mark.parametrize("number", range(3))
def test_speculated_text_is_plain_text_whatever_is_proposed(number: int, use_graphs: bool) -> None:
    """C14.6, C13.3: rows of other lengths, stops inside accepted runs, ends of budgets; frontiers, pages as plain."""
    rng = random.Random(number)
    prompts = [prompt(rng.randint(1, 90), 10 * number + each) for each in range(3)]
    plain = texts_of(prompts, 150)
    lengths = [rng.randint(1, 150) for _ in prompts]
    stops = [set(rng.sample(text[:length], min(2, length))) if rng.random() < 0.5 else set()
             for text, length in zip(plain, lengths, strict=True)]
    expected = [text[: next((at for at, token in enumerate(text[:length]) if token in own), length - 1) + 1]
                for text, length, own in zip(plain, lengths, stops, strict=True)]
    with opened() as store:
        draft = Oracle([ids + text for ids, text in zip(prompts, plain, strict=True)], number)
        loop = DecodeLoop(store, ToyModel(store), draft=draft, use_graphs=use_graphs)
        sequences = [store.activate(prompt_tokens=len(ids), output_tokens=length)
                     for ids, length in zip(prompts, lengths, strict=True)]
        for sequence, ids, own in zip(sequences, prompts, stops, strict=True):
            loop.prefill(sequence, ids, stop_tokens=own)
        assert decode_all(loop, sequences) == expected
        for sequence, ids, text in zip(sequences, prompts, expected, strict=True):
            committed = len(ids) + len(text) - 1
            assert store.committed_tokens(sequence) == committed
            assert len(store.page_ids(sequence)) == -(-committed // 64)
            assert loop.last_token(sequence) == text[-1]
        statistics = loop.statistics
        assert statistics.accepted_tokens <= statistics.proposed_tokens
        assert statistics.decoded_tokens == sum(map(len, expected))


def test_verify_units_accept_trim_and_are_counted() -> None:
    """C13.1, C9.6: of many proposals some are accepted; pages behind the frontier go back at once."""
    prompts = [prompt(40, each) for each in range(3)]
    plain = texts_of(prompts, 400)
    with opened() as store:
        draft = Oracle([ids + text for ids, text in zip(prompts, plain, strict=True)], 5)
        loop = DecodeLoop(store, ToyModel(store), draft=draft)
        assert decode_all(loop, [prefilled(loop, ids, 400) for ids in prompts]) == plain
        statistics = loop.statistics
        assert 0.2 < statistics.acceptance < 0.8
        assert statistics.trimmed_pages >= statistics.trims > 0
        assert statistics.decode_steps < 300
        assert any("verify/decode" in key for key in loop.graphs.replays())


def test_near_the_end_of_a_lease_a_unit_narrows() -> None:
    """C9.2: proposals stay within what the lease covers; a row ends with "length" where no column and span are left."""
    ids = prompt(30, 4)
    (plain,) = texts_of([ids], 300)
    for is_full in (False, True):
        with opened(6, tokens=448, kv_lease_growth=True, lease_window_tokens=64, forced_span_tokens=8,
                    max_context=448) as store:
            loop = DecodeLoop(store, ToyModel(store), draft=Oracle([ids + plain], 6))
            sequence = prefilled(loop, ids, 300)
            while is_full and isinstance(store.try_activate(prompt_tokens=1, output_tokens=1), pk.Sequence):
                pass
            (text,) = decode_all(loop, [sequence])
            assert text == plain[: len(text)]
            assert loop.finish_reason(sequence) == "length"
            assert (len(text) < 300) == is_full
            assert store.covered_columns(store.batch([sequence]), forced=True)[0] >= 8 * is_full


def test_what_a_prompt_replaces_leaves_the_text() -> None:
    """A turn behind output, a resume, and a prompt in place of the last token: the draft sees the text as it is."""
    class Recorder:
        def __init__(self) -> None:
            self.texts: list[list[int]] = []

        def propose(self, texts: Int32, lengths: Int32, most: Int32) -> Int32:
            assert (most >= 0).all()
            for array in (texts, lengths, most):
                with pytest.raises(ValueError, match="read-only"):
                    array[...] = 1
            self.texts = [row[:length].tolist() for row, length in zip(texts, lengths, strict=True)]
            return np.full((len(texts), 1), -1, np.int32)

    with opened(1) as store:
        draft = Recorder()
        loop = DecodeLoop(store, ToyModel(store), draft=draft)
        sequence = store.activate(prompt_tokens=40, output_tokens=100)
        loop.prefill(sequence, [5, 6, 7])
        (first,) = loop.step([sequence]).values()
        loop.step([sequence])
        assert draft.texts == [[5, 6, 7, *first]]
        last = loop.last_token(sequence)
        assert store.committed_tokens(sequence) == 5
        loop.prefill(sequence, [8, 9], last_token=last)
        third = loop.last_token(sequence)
        loop.step([sequence])
        assert draft.texts[0] == [5, 6, 7, *first, last, 8, 9, third]
        kept = store.snapshot(sequence, state=loop.last_token(sequence))
        known = draft.texts[0]
        loop.prefill(sequence, [3], last_token=None)
        now = loop.last_token(sequence)
        loop.step([sequence])
        assert draft.texts[0] == [*known, 3, now]
        store.finish(sequence)
        again = store.activate(prompt_tokens=0, output_tokens=20, source=kept)
        loop.resume(again, 77)
        loop.step([again])
        assert draft.texts == [[77]]
        store.finish(again)
        store.release(kept)


@pytest.mark.parametrize(("text", "options", "expected"), [
    ([7, 4, 9, 2, 7, 4], {}, [9, 2, 7, 4]),
    ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], {}, [9, 2, 3, 8]),
    ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], {"ngram_max": 2}, [8, 1, 2, 3]),
    ([5, 5, 5], {}, [5]),
    ([1, 2, 3], {}, []),
    ([4], {}, []),
    ([6, 1, 6], {"ngram_min": 2}, []),
])
def test_prompt_lookup_finds_what_followed_the_last_occurrence(
    text: list[int], options: dict[str, int], expected: list[int]
) -> None:
    """The longest last tokens that occur before count, and of several places the last."""
    texts = np.array([text + [0] * 3, [9] * (len(text) + 3)], np.int32)
    lengths, most = np.array([len(text), 1], np.int32), np.array([4, 0], np.int32)
    (row, other) = PromptLookup(**options).propose(texts, lengths, most).tolist()
    assert [token for token in row if token >= 0] == expected
    assert set(other) == {-1}


def test_prompt_lookup_equals_a_search_row_by_row(seed: int) -> None:
    """200 rounds of random texts over few tokens."""
    rng = random.Random(seed)

    def search(text: list[int], most: int) -> list[int]:
        for ngram in range(3, 0, -1):
            for end in range(len(text) - 1, ngram - 1, -1):
                if len(text) > ngram and text[end - ngram : end] == text[-ngram:]:
                    return text[end : end + most]
        return []

    for _ in range(200):
        rows = [[rng.randrange(4) for _ in range(rng.randint(1, 30))] for _ in range(rng.randint(1, 5))]
        most = [rng.randint(-1, 4) for _ in rows]
        texts = np.full((len(rows), 32), 3, np.int32)
        for entry, row in enumerate(rows):
            texts[entry, : len(row)] = row
        if max(most) < 1:
            continue
        proposals = PromptLookup().propose(texts, np.array(list(map(len, rows)), np.int32), np.array(most, np.int32))
        found = [[token for token in row if token >= 0] for row in proposals.tolist()]
        assert found == [search(row, count) if count > 0 else [] for row, count in zip(rows, most, strict=True)]


# ---- refusals ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("given", [None, [[1]], np.ones((1, 4)), np.ones((2, 4), np.int32), np.ones((1, 5), np.int32),
                                   np.ones(4, np.int32)], ids=repr)
def test_proposals_of_another_form_are_refused(given: object) -> None:
    """Nothing is delivered, and the next step of a draft that behaves gives the plain text."""
    class Draft:
        given: object = None

        def propose(self, texts: Int32, lengths: Int32, most: Int32) -> Any:
            return self.given if self.given is not Draft else np.full((1, 1), -1, np.int32)

    ids = prompt(20, 1)
    (plain,) = texts_of([ids], 6)
    with opened(1) as store:
        draft = Draft()
        draft.given = given
        loop = DecodeLoop(store, ToyModel(store), draft=draft)
        sequence = prefilled(loop, ids, 6)
        with refused(pk.MisuseError, "C13.1", loop._outputs, match="proposals"):
            loop.step([sequence])
        draft.given = Draft
        assert decode_all(loop, [sequence]) == [plain]


@pytest.mark.parametrize("wrong", [0, 9, -1])
def test_a_model_that_accepts_what_it_cannot_is_refused(wrong: int) -> None:
    """C13.1: fewer columns than the last token's own, or more than the unit wrote."""
    class Accepting(ToyModel):
        writes_accepted = True

        def enqueue(self, unit: Unit) -> None:
            super().enqueue(unit)
            if unit.key.unit == "verify":
                unit.call(fill, unit.accepted, wrong)

    ids = prompt(20, 1)
    (plain,) = texts_of([ids], 30)
    with opened(1) as store:
        loop = DecodeLoop(store, Accepting(store), draft=Oracle([ids + plain], 1))
        sequence = prefilled(loop, ids, 30)
        with pytest.raises(pk.MisuseError, match="columns accepted by"):
            decode_all(loop, [sequence])


def fill(array: Any, value: int) -> None:
    """Fill an array."""
    array[...] = value


@pytest.mark.parametrize(("options", "error", "match"), [
    ({"draft": PromptLookup(), "draft_tokens": 5}, pk.ConfigError, "decode_columns_max"),
    ({"draft": PromptLookup(), "draft_tokens": 0}, pk.ConfigError, "from 1 to 4"),
    ({"draft": 3}, pk.MisuseError, "propose"), ({"before_replay": 3}, pk.MisuseError, "hook"),
])
def test_drafts_and_hooks_that_cannot_work_are_refused_at_once(
    options: dict[str, Any], error: type[Exception], match: str
) -> None:
    """C5.4: a width that the store was not planned for, and what is no draft or hook."""
    with opened(1) as store, pytest.raises(error, match=match):
        DecodeLoop(store, ToyModel(store), **options)


def test_a_backend_that_nobody_drives_is_refused_at_once() -> None:
    """C13.1: the loop writes Main alone."""
    with opened(1, backend=pk.MTPBackend(4), decode_columns_max=None) as store:
        with pytest.raises(pk.MisuseError, match="drives_backend"):
            DecodeLoop(store, ToyModel(store))
        DecodeLoop(store, ToyModel(store), drives_backend=True)


# ---- stops, words, hook, ends ------------------------------------------------------------------------
def test_own_stop_tokens_end_their_own_sequence_alone() -> None:
    """A token that is another row's stop token is text; the step's stop tokens are for all; prefill may sample one."""
    prompts = [prompt(20, each) for each in range(3)]
    plain = texts_of(prompts, 12)
    with opened() as store:
        loop = DecodeLoop(store, ToyModel(store))
        sequences = [store.activate(prompt_tokens=20, output_tokens=12) for _ in prompts]
        stops = [{plain[1][4]}, {plain[1][7]}, {plain[2][0]}]
        for sequence, ids, own in zip(sequences, prompts, stops, strict=True):
            loop.prefill(sequence, ids, stop_tokens=own)
        assert loop.finish_reason(sequences[2]) == "stop"
        ended: list[pk.Sequence] = []
        texts: dict[pk.Sequence, list[int]] = {sequence: [] for sequence in sequences}
        for tokens in loop.decode(sequences, stop_tokens=[plain[0][8]]):
            for sequence, new in tokens.items():
                texts[sequence] += new
            ended += tokens.ended
        assert list(texts.values()) == [plain[0][:9], plain[1][:8], plain[2][:1]]
        assert (ended, loop.step(sequences).ended) == ([sequences[2], sequences[1], sequences[0]], ())


class Watching(ToyModel):
    """Adds the first word of an entry to its tokens, so that words change the text."""

    def enqueue(self, unit: Unit) -> None:
        """Enqueue the model."""
        super().enqueue(unit)
        unit.call(add_words, unit.words, unit.valid_columns, unit.next_tokens)


def add_words(words: Any, valid_columns: Any, next_tokens: Any) -> None:
    """next_tokens += words[:, :1] in rows with a live column."""
    live = (valid_columns > 0)[:, None]
    next_tokens[...] = next_tokens + words[:, :1] * live


def test_words_reach_every_unit_of_their_sequence() -> None:
    """C15.1: of prefill, decode and resume; other rows, other words; a row without words has zeros."""
    prompts = [prompt(100, each) for each in range(3)]
    words = [[3, -1], None, [70, 5]]

    def run(order: list[int], meddle: Callable[[Unit, pk.Batch], object] | None = None) -> list[list[int]]:
        with opened(caller_words=2) as store:
            loop = DecodeLoop(store, Watching(store), prefill_chunk=64, before_replay=meddle)
            sequences = []
            for each in order:
                sequences.append(store.activate(prompt_tokens=100, output_tokens=20))
                loop.prefill(sequences[-1], prompts[each], words=words[each])
            return decode_all(loop, sequences)

    alone = [run([each])[0] for each in range(3)]
    assert run([2, 0, 1]) == [alone[2], alone[0], alone[1]]
    seen: list[list[list[int]]] = []

    def hook(unit: Unit, batch: pk.Batch) -> None:
        seen.append(unit.control.words_host[: len(batch)].tolist())
        unit.control.words_host[: len(batch), 0] = 0

    plain = run([1])[0]
    with opened(caller_words=2) as store:
        loop = DecodeLoop(store, Watching(store), prefill_chunk=64, before_replay=hook)
        sequence = store.activate(prompt_tokens=100, output_tokens=20)
        loop.prefill(sequence, prompts[1], words=[9, 8])
        assert decode_all(loop, [sequence]) == [plain], "the hook set every word to zero"
        assert seen == [[[9, 8]]] * len(seen)
        assert len(seen) == 2 + 19
        for wrong in ([1], [1, 2, 3], [1, "2"], [1, 2**31], 5):
            with refused(pk.MisuseError, "C15.1", loop._outputs):
                loop.prefill(sequence, [1], last_token=1, words=wrong)  # type: ignore[arg-type]


def test_an_error_of_the_hook_takes_the_step_back() -> None:
    """C9.10: as one of the model; the next step gives the token that it would have given."""
    ids = prompt(20, 1)
    (plain,) = texts_of([ids], 5)
    fails = [False]

    def hook(unit: Unit, batch: pk.Batch) -> None:
        if fails[0]:
            raise ZeroDivisionError

    with opened(1) as store:
        loop = DecodeLoop(store, ToyModel(store), before_replay=hook)
        sequence = prefilled(loop, ids, 5)
        text = loop.step([sequence])[sequence]
        fails[0] = True
        with pytest.raises(ZeroDivisionError):
            loop.step([sequence])
        fails[0] = False
        assert text + decode_all(loop, [sequence])[0] == plain


def test_pieces_may_be_smaller_than_a_chunk() -> None:
    """`advance(tokens_max)`: any division of a prompt gives the same text.  (C14.6)"""
    ids = prompt(100, 2)
    (plain,) = texts_of([ids], 5)
    with opened(1) as store:
        loop = DecodeLoop(store, ToyModel(store), prefill_chunk=32)
        sequence = store.activate(prompt_tokens=100, output_tokens=5)
        pieces = loop.begin_prefill(sequence, ids)
        assert [pieces.advance(most) for most in (1, 16, 40, None, 7)] == [99, 83, 51, 19, 12]
        for wrong in (0, -1, True, 1.0):
            with refused(pk.MisuseError, "C14.4", loop._outputs):
                pieces.advance(wrong)  # type: ignore[arg-type]
        assert pieces.advance() == 0
        assert decode_all(loop, [sequence]) == [plain]
