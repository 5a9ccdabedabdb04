"""Prompts: in pieces between steps of others, behind what is committed, and in any form of integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.graphs import DecodeLoop
from tests.host.refusals import refused
from tests.toy_model import ToyModel, decode_all, opened_store, prefilled, prompt, run_unit

GEOMETRY = pk.KVGeometry(layers=1, query_heads=2, kv_heads=1, head_dim=64)
ID_MAX = 2**31 - 1


def opened() -> AbstractContextManager[pk.Store]:
    """Open a store of three rows and check it at the end."""
    return opened_store(GEOMETRY, max_context=256, concurrency=3)


def loop_of(store: pk.Store) -> DecodeLoop:
    """Return a loop that prefills 16 tokens at a time."""
    return DecodeLoop(store, ToyModel(store), prefill_chunk=16)


def alone(ids: list[int], output_tokens: int) -> list[int]:
    """Return the tokens of a prompt that is prefilled whole, with nobody beside it."""
    with opened() as store:
        loop = loop_of(store)
        return decode_all(loop, [prefilled(loop, ids, output_tokens)])[0]


# ---- in pieces -----------------------------------------------------------------------------------------------


@pytest.mark.deferred
@pytest.mark.parametrize("tokens", [1, 16, 17, 100])
def test_a_prompt_in_pieces_between_steps_gives_the_tokens_of_a_whole_one(tokens: int) -> None:
    """C14.6: nobody sees the pieces of another, and the sequence itself is unknown before its last one."""
    ids = prompt(tokens, 1)
    with opened() as store:
        loop = loop_of(store)
        other = prefilled(loop, prompt(20, 2), 30)
        text: list[int] = []
        sequence = store.activate(prompt_tokens=tokens, output_tokens=8)
        pieces = loop.begin_prefill(sequence, np.array(ids))
        assert (pieces.tokens_left, store.committed_tokens(sequence)) == (tokens, 0)
        while left := pieces.tokens_left:
            with pytest.raises(pk.MisuseError, match="prefill or resume first"):
                loop.step([other, sequence])
            text += loop.step([other])[other]
            assert pieces.advance() == max(left - 16, 0) == tokens - store.committed_tokens(sequence)
        assert pieces.advance() == 0, "nothing is written twice"
        assert (loop.statistics.prefilled_tokens, store.committed_tokens(sequence)) == (20 + tokens, tokens)
        texts = decode_all(loop, [sequence, other])

    assert texts == [alone(ids, 8), alone(prompt(20, 2), 30)[len(text) :]]


@pytest.mark.deferred
@pytest.mark.parametrize("committed", [0, 5, 64])
def test_an_error_takes_the_piece_or_the_whole_prompt_back(committed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """C9.5: at the third unit; the next call writes it again, and the tokens are those of an undisturbed prompt."""
    ids, first = prompt(50, 1), prompt(64, 3)[:committed]

    def run(call: Callable[[DecodeLoop, pk.Sequence], Iterator[None]]) -> list[int]:
        with opened() as store:
            loop = loop_of(store)
            sequence = store.activate(prompt_tokens=committed + 50, output_tokens=8)
            if committed:
                loop.prefill(sequence, first)
            wait, waits = store.wait, 0

            def failing(unit: pk.Submission) -> None:
                nonlocal waits
                waits += 1
                if waits == 3:
                    raise OSError("no")
                wait(unit)

            for _ in call(loop, sequence):
                monkeypatch.setattr(store, "wait", failing)
            return decode_all(loop, [sequence])[0]

    def undisturbed(loop: DecodeLoop, sequence: pk.Sequence) -> Iterator[None]:
        loop.prefill(sequence, ids, last_token=None)
        yield from ()

    def whole(loop: DecodeLoop, sequence: pk.Sequence) -> Iterator[None]:
        yield
        with pytest.raises(OSError, match="no"):
            loop.prefill(sequence, ids, last_token=None)
        assert loop.store.committed_tokens(sequence) == committed
        loop.prefill(sequence, ids, last_token=None)

    def in_pieces(loop: DecodeLoop, sequence: pk.Sequence) -> Iterator[None]:
        pieces = loop.begin_prefill(sequence, ids, last_token=None)
        yield
        assert [pieces.advance() for _ in range(2)] == [34, 18]
        with pytest.raises(OSError, match="no"):
            pieces.advance()
        assert (pieces.tokens_left, loop.store.committed_tokens(sequence)) == (18, committed + 32)
        assert [pieces.advance() for _ in range(2)] == [2, 0]

    assert run(undisturbed) == run(whole) == run(in_pieces)


def truncated(loop: DecodeLoop, sequence: pk.Sequence) -> None:
    loop.store.truncate(sequence, 3)


def written(loop: DecodeLoop, sequence: pk.Sequence) -> None:
    run_unit(loop.store, sequence, 3)


def another(loop: DecodeLoop, sequence: pk.Sequence) -> None:
    loop.begin_prefill(sequence, [1, 2], last_token=None).advance()


@pytest.mark.parametrize("meddle", [truncated, written, another])
@pytest.mark.parametrize("pieces_before", [1, 2, 3])
def test_somebody_else_s_write_in_between_is_refused(
    meddle: Callable[[DecodeLoop, pk.Sequence], None], pieces_before: int
) -> None:
    """C9.4: fewer tokens and more, also where the number might be one of the prompt's own."""
    with opened() as store:
        loop = loop_of(store)
        sequence = store.activate(prompt_tokens=60, output_tokens=20)
        pieces = loop.begin_prefill(sequence, prompt(48, 1))
        for _ in range(pieces_before):
            pieces.advance()
        meddle(loop, sequence)
        before = store.committed_tokens(sequence)
        calls: tuple[Callable[[], int], ...] = (pieces.advance, lambda: pieces.tokens_left)
        for call in calls:
            with refused(pk.MisuseError, "C9.4", loop._outputs, match="begin another prompt"):
                call()
        assert store.committed_tokens(sequence) == before
        loop.prefill(sequence, [1], last_token=None)


def test_a_sequence_that_ends_between_two_pieces_is_stale() -> None:
    """C10.1: its row goes to another one, of which the loop writes nothing."""
    with opened() as store:
        loop = loop_of(store)
        sequence = store.activate(prompt_tokens=40, output_tokens=20)
        pieces = loop.begin_prefill(sequence, prompt(40, 1))
        pieces.advance()
        store.finish(sequence)
        later = prefilled(loop, prompt(16, 2), 5)
        assert later.row == sequence.row
        calls: tuple[Callable[[], int], ...] = (pieces.advance, lambda: pieces.tokens_left)
        for call in calls:
            with pytest.raises(pk.StaleHandle):
                call()
        assert decode_all(loop, [later]) == [alone(prompt(16, 2), 5)]


# ---- behind what is committed --------------------------------------------------------------------------------


@pytest.mark.deferred
@pytest.mark.parametrize("way", ["fork", "move", "same sequence"])
def test_a_turn_begins_with_the_token_that_was_sampled_last(way: str) -> None:
    """C2.2: it is written ahead of the turn; where nothing is said, the prompt is refused and nothing changes."""
    turn = prompt(30, 2)
    with opened() as store:
        loop = loop_of(store)
        first = store.activate(prompt_tokens=20, output_tokens=60)
        loop.prefill(first, prompt(20, 1))
        text = [token for _ in range(5) for token in loop.step([first])[first]]
        last = loop.last_token(first)
        assert (last, store.committed_tokens(first)) == (text[-1], 25)
        sequence = first
        if way != "same sequence":
            saved = store.finish(first, retain=True, state=last)
            sequence = store.activate(source=saved, keep_source=way == "fork", prompt_tokens=31, output_tokens=7)
        for call in (loop.prefill, loop.begin_prefill):
            with refused(pk.MisuseError, "C2.2", loop._outputs, match="25 committed tokens .*none; pass last_token="):
                call(sequence, turn)
        assert store.committed_tokens(sequence) == 25
        scalar: Any = np.int64(last)
        loop.prefill(sequence, turn, last_token=scalar)
        assert store.committed_tokens(sequence) == 25 + 31
        tokens = loop.step([sequence])[sequence] + loop.step([sequence])[sequence]

    assert tokens[: len(text) + 3] == alone_behind(prompt(20, 1), text, turn, len(tokens))


def alone_behind(ids: list[int], text: list[int], turn: list[int], output_tokens: int) -> list[int]:
    """Return the tokens behind a text whose last token begins the turn by hand."""
    with opened() as store:
        loop = loop_of(store)
        sequence = store.activate(prompt_tokens=20, output_tokens=60)
        loop.prefill(sequence, ids)
        assert [token for _ in range(5) for token in loop.step([sequence])[sequence]] == text
        loop.prefill(sequence, [text[-1], *turn], last_token=None)
        tokens: list[int] = []
        while len(tokens) < output_tokens:
            tokens += loop.step([sequence])[sequence]
        return tokens


@pytest.mark.parametrize("bad", [-1, 2**31, True, 1.0, "a", [1], np.float64(2), np.True_])
def test_a_last_token_is_a_token(bad: Any) -> None:
    """C14.4: also where nothing is committed and nothing needs to be said."""
    with opened() as store:
        loop = loop_of(store)
        for committed in (0, 8):
            sequence = store.activate(prompt_tokens=20, output_tokens=5)
            if committed:
                loop.prefill(sequence, prompt(committed, 1))
            with refused(pk.MisuseError, "C14.4", loop._outputs, match="last_token"):
                loop.prefill(sequence, [1], last_token=bad)
            assert store.committed_tokens(sequence) == committed


def test_a_last_token_counts_against_the_budget() -> None:
    """C9.2: 25 tokens of a budget hold a last token and a turn of 24."""
    with opened() as store:
        loop = loop_of(store)
        sequence = store.activate(prompt_tokens=25, output_tokens=0)
        with refused(pk.MisuseError, "C9.2", loop._outputs, match="a prompt of 26 tokens"):
            loop.prefill(sequence, prompt(25, 1), last_token=3)
        loop.prefill(sequence, prompt(24, 1), last_token=3)
        assert (store.committed_tokens(sequence), len(loop.step([sequence]))) == (25, 0)


# ---- forms of a prompt ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [
    *(np.dtype(f"{sign}int{bits}").type for sign in ("", "u") for bits in (8, 16, 32, 64)), list, tuple, iter,
    lambda ids: np.repeat(np.array(ids), 2)[::2], lambda ids: [np.int16(one) for one in ids],
])
def test_a_prompt_is_integers_in_any_form(form: Any) -> None:
    """C14.4: arrays of each type, contiguous or not, and what can be walked once; stop tokens too."""
    ids = [5, 9, 0, 127, 3]
    given: Any = np.array(ids, form) if isinstance(form, type) and issubclass(form, np.generic) else form(ids)
    with opened() as store:
        loop = loop_of(store)
        sequence = store.activate(prompt_tokens=5, output_tokens=6)
        pieces = loop.begin_prefill(sequence, given)
        if isinstance(given, np.ndarray):
            given[:] = 1  # the loop has a copy
        pieces.advance()
        texts = decode_all(loop, [sequence], stop_tokens=np.array([1008, 1007]))

    assert texts == [alone(ids, 6)]


@pytest.mark.parametrize("bad", [
    np.array([1, -1]), np.array([1, -1], np.int8), np.array([2**31]), np.array([2**63], np.uint64), np.array([[1, 2]]),
    np.array(5), np.array([1.0]), np.array([True]), np.array([1, "a"], object), [1, 2.0], [None], [[1]], "ab", 7, None,
], ids=repr)
def test_what_is_no_id_is_refused_in_a_prompt_and_in_stop_tokens(bad: Any) -> None:
    """C14.4: by the loop's own refusal; nothing changed."""
    with opened() as store:
        loop = loop_of(store)
        sequence, running = store.activate(prompt_tokens=9, output_tokens=5), prefilled(loop, [1, 2], 5)
        for call in (lambda: loop.prefill(sequence, bad), lambda: loop.step([running], stop_tokens=bad),
                     lambda: loop.decode([running], stop_tokens=bad)):
            with refused(pk.MisuseError, "C14.4", loop._outputs, match=f"integer token ids from 0 to {ID_MAX}"):
                call()
        assert store.committed_tokens(sequence) == 0
        empty: Any
        for empty in ([], np.zeros(0, np.int64), np.zeros(0)):
            with refused(pk.MisuseError, "C9.2", loop._outputs, match="a prompt of 0 tokens"):
                loop.prefill(sequence, empty)
        assert len(loop.step([running], stop_tokens=np.zeros(0, np.int64))[running]) == 2
