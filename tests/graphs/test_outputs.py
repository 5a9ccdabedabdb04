"""What a step delivers, and to whom: each token once, in the order of the step, whatever the caller's list does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.graphs import ControlBuffers, DecodeLoop
from tests.host.refusals import refused
from tests.host.test_sequences import Equal, Thrower
from tests.toy_model import ToyModel, decode_all, opened_store, prefilled, prompt

GEOMETRY = pk.KVGeometry(layers=1, query_heads=2, kv_heads=1, head_dim=64)
ROWS = 4


def opened(concurrency: int = ROWS) -> AbstractContextManager[pk.Store]:
    """Open a small store and check it at the end."""
    return opened_store(GEOMETRY, max_context=128, concurrency=concurrency)


def texts_alone(output_tokens: int = 12) -> list[list[int]]:
    """Return the text of each prompt of `running`, decoded alone in a store of one row."""
    with opened(concurrency=1) as store:
        texts = []
        for seed in range(ROWS):
            loop = DecodeLoop(store, ToyModel(store))
            sequence = prefilled(loop, prompt(58 + seed, seed), output_tokens)
            texts += decode_all(loop, [sequence])
            store.finish(sequence)
        return texts


def running(store: pk.Store, output_tokens: int = 12) -> tuple[DecodeLoop, list[pk.Sequence]]:
    """Return a loop and a sequence in each row; their next steps cross pages at different times."""
    loop = DecodeLoop(store, ToyModel(store))
    return loop, [prefilled(loop, prompt(58 + seed, seed), output_tokens) for seed in range(ROWS)]


# ---- the answer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [2], [1, 0]], ids=str)
def test_an_answer_is_a_mapping_in_the_order_of_the_step(order: list[int]) -> None:
    """Tokens of a prefill and of a step that nobody got come together; later answers do not change."""
    with opened() as store:
        loop, sequences = running(store)
        named = [sequences[row] for row in order]
        loop._advance([*reversed(sequences)], frozenset())  # broke off before its tokens were handed over
        first, then, none = loop.step(named), loop.step(iter(named)), loop.step([])

    texts = texts_alone()
    for answer, tokens in ((first, slice(0, 3)), (then, slice(3, 4)), (none, None)):
        expected = {sequences[row]: texts[row][tokens] for row in order} if tokens else {}
        assert (len(answer), answer.token_count) == (len(expected), sum(map(len, expected.values())))
        assert list(answer) == list(expected)
        assert (dict(answer), repr(answer), list(answer.items())) == (expected, repr(expected), list(expected.items()))
        assert answer == expected
        assert expected == answer
        assert bool(answer) is bool(expected)
        assert all(sequence in answer and answer[sequence] is answer[sequence] for sequence in expected)
        assert [sequence in answer for sequence in sequences] == [sequence in expected for sequence in sequences]
        assert answer.get(pk.Sequence(1, 0, 99)) is None
    assert first != then


@pytest.mark.parametrize("steps", [
    [[0, 1, 2, 3], [0, 1, 2, 3], [3, 2, 1, 0], [1], [1, 2], [2, 0], [0, 1, 3], [0], [3], [3, 0, 1]],
    [[2], [2], [0], [1, 3], [3, 1], [0, 1, 2, 3]], [[3], [2, 3], [1, 2, 3], [0, 1, 2, 3], [0, 1, 2], [0, 1], [0]],
], ids=len)
def test_sequences_get_their_own_tokens_in_whatever_batches_they_come(steps: list[list[int]]) -> None:
    """C11.3, C14.6: spans, gaps, ascending and descending rows; a list, a tuple, and one list mutated in place."""
    texts = texts_alone()
    with opened() as store:
        loop, sequences = running(store)
        got: dict[pk.Sequence, list[int]] = {sequence: [] for sequence in sequences}
        kept: list[pk.Sequence] = []
        for number, rows in enumerate(steps):
            kept[:] = [sequences[row] for row in rows]
            named = (kept, tuple(kept), pickle.loads(pickle.dumps(kept)))[number % 3]
            for sequence, tokens in loop.step(named).items():
                got[sequence] += tokens
        count = {row: sum(row in rows for rows in steps) for row in range(ROWS)}

    assert list(got.values()) == [texts[row][: count[row] + 1 if count[row] else 0] for row in range(ROWS)]


def test_the_last_token_of_a_budget_ends_its_row_alone() -> None:
    """C9.2: outputs of 1 to 4 tokens; who has ended may be named, and gets nothing more."""
    texts = texts_alone()
    with opened() as store:
        loop = DecodeLoop(store, ToyModel(store))
        sequences = [prefilled(loop, prompt(58 + seed, seed), 1 + seed) for seed in range(ROWS)]
        reasons = []
        answers = []
        for _ in range(4):
            answers.append({sequence.row: tokens for sequence, tokens in loop.step(sequences).items()})
            reasons.append([loop.finish_reason(sequence) for sequence in sequences])

    assert answers == [{0: texts[0][:1], **{row: texts[row][:2] for row in (1, 2, 3)}},
                       {2: texts[2][2:3], 3: texts[3][2:3]}, {3: texts[3][3:4]}, {}]
    ended = ["length"]
    assert reasons == [ended * 2 + [None] * 2, ended * 3 + [None], ended * 4, ended * 4]


@pytest.mark.parametrize("position", [0, 1, 5])
@pytest.mark.parametrize("of_rows", [1, 2])
@pytest.mark.parametrize("form", [list, set, np.array, iter])
def test_a_stop_token_is_delivered_and_ends_its_row(
    position: int, of_rows: int, form: Callable[[list[int]], Any]
) -> None:
    """A stop token of one row's text or of each of two; the first token of a text is the one that prefill samples."""
    texts = texts_alone()
    tokens_that_stop = [text[position] for text in texts[:of_rows]]
    with opened() as store:
        loop, sequences = running(store)
        got = decode_all(loop, sequences, stop_tokens=form(tokens_that_stop))
        reasons = [loop.finish_reason(sequence) for sequence in sequences]

    for text, tokens, reason in zip(texts, got, reasons, strict=True):
        stops = [place for place, token in enumerate(text) if token in tokens_that_stop]
        assert (tokens, reason) == ((text[: stops[0] + 1], "stop") if stops else (text, "length"))


# ---- the list of a step --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends_at_once", ["length", "stop"])
def test_the_row_of_one_that_ended_before_the_first_step_can_change_hands(ends_at_once: str) -> None:
    """Its only token comes with the first step of `decode`; then it is finished, and another one takes its row."""
    texts = texts_alone()
    with opened() as store:
        loop = DecodeLoop(store, ToyModel(store))
        short = prefilled(loop, prompt(58, 0), 1 if ends_at_once == "length" else 5)
        long = prefilled(loop, prompt(59, 1), 12)
        text: list[int] = []
        for tokens in loop.decode([short, long], stop_tokens=[texts[0][0]]):
            text += tokens[long]
            if short in tokens:
                assert (tokens[short], loop.finish_reason(short)) == (texts[0][:1], ends_at_once)
                store.finish(short)
                later = prefilled(loop, prompt(60, 2), 3)
                assert later.row == short.row

        assert text == texts[1]
        assert decode_all(loop, [later]) == [texts[2][:3]]


def test_the_same_list_is_asked_again_when_a_row_changed_hands() -> None:
    """C10.1: the handle of the earlier sequence is refused, also if the next step has the same list object."""
    texts = texts_alone()
    with opened() as store:
        loop, sequences = running(store)
        loop.step(sequences)
        store.finish(sequences[1])
        with refused(pk.StaleHandle, "C10.1", loop._outputs):
            loop.step(sequences)
        later = prefilled(loop, prompt(58, 0), 12)
        assert later.row == sequences[1].row
        with refused(pk.MisuseError, "C9.4", loop._outputs):
            loop.step(sequences)
        sequences[1] = later
        answer = loop.step(sequences)
        loop.forget(sequences[2])
        with refused(pk.MisuseError, "C9.4", loop._outputs):
            loop.step(sequences)

    assert [answer[sequence] for sequence in sequences] == [
        texts[0][2:3] if row == 0 else texts[0][:2] if row == 1 else texts[row][2:3] for row in range(ROWS)
    ]


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize("foreign", [Equal(), Thrower(), None, 7, "ab", [], pk.Sequence(9, 0, 1)],
                         ids=lambda one: type(one).__name__)
def test_what_is_no_known_handle_is_refused_and_forgotten_in_silence(foreign: Any, has_ended: bool) -> None:
    """C11.3: in any place of a list of its length or another; nothing was delivered."""
    with opened() as store:
        loop, sequences = running(store)
        loop.step(sequences)
        if has_ended:
            loop.step(sequences, stop_tokens=range(1009))
        state = loop._outputs
        for named in ([foreign], [*sequences[:3], foreign], [foreign, *sequences[1:]], [*sequences, foreign],
                      (sequences[0], foreign), [sequences[0], sequences[0]], [sequences[1], copy.copy(sequences[1])]):
            with pytest.raises(pk.PagedKVError):
                loop.step(named)
            with pytest.raises(pk.PagedKVError):
                loop.decode(named)
        loop.forget(foreign)
        with pytest.raises(pk.MisuseError):
            loop.finish_reason(foreign)
        assert loop._outputs is state
        assert len(loop.step(sequences)) == (0 if has_ended else ROWS)


@pytest.mark.parametrize("named", [None, 7, 1.5, object()])
def test_a_step_of_nothing_that_can_be_walked_is_refused(named: Any) -> None:
    """C11.3."""
    with opened() as store:
        loop, _ = running(store)
        for call in (loop.step, loop.decode):
            with refused(pk.MisuseError, "C11.3", loop._outputs):
                call(named)


# ---- the words of a unit -------------------------------------------------------------------------------------


def test_words_that_are_kept_are_those_of_the_same_rows_and_columns() -> None:
    """C11.3: of a read-only column of rows; positions and tokens are always new, what a run leaves out is inert."""
    one, two, writable = np.array([2, 0]), np.array([1, 3]), np.array([3, 1])
    one.flags.writeable = two.flags.writeable = False
    columns: Any
    with opened() as store:
        control = ControlBuffers(store, batch=4, width=1)
        for number, (rows, columns) in enumerate([
            (one, 1), (one, 1), (two, 1), (two, 0), (two, np.array([1, 0], np.int32)), (two, 0), (one[:1], 1), (one, 1),
            (writable, 1), (writable, 1), (writable[::-1], 1), (one, np.array([0, 1], np.int32)), (one, 1),
        ]):
            if rows is writable:
                writable[:] = number % 4, (number + 1) % 4
            firsts = np.arange(rows.size, dtype=np.int32) + 10 * number
            live = np.broadcast_to(columns, rows.shape).astype(np.int32)
            control.write(rows, firsts, columns, (firsts + 5)[:, None])
            pad = [0] * (4 - rows.size)
            assert control.ingress_host[: 12 + rows.size].tolist() == [
                *rows, *(-1 for _ in pad), *firsts, *pad, *live, *pad, *(firsts + 5),
            ]


def test_words_of_the_caller_are_those_of_the_last_write() -> None:
    """C15.1: written again for other rows or another array; no words are zeros; a refusal writes nothing."""
    rows, others = np.array([2, 0]), np.array([1, 3, 0])
    rows.flags.writeable = others.flags.writeable = False
    first, second = np.array([[1, 2], [3, 4]], np.int32), np.array([[5, 6], [7, 8]], np.int32)
    with opened_store(GEOMETRY, max_context=128, concurrency=ROWS, caller_words=2) as store:
        control = ControlBuffers(store, batch=4, width=1)
        for chosen, columns, words in [
            (rows, 1, first), (rows, 1, first), (rows, 1, second), (rows, 1, None), (rows, 1, None), (rows, 1, first),
            (rows, 0, first), (others, 1, None), (rows, 1, second), (rows[::-1], 1, second), (rows[::-1], 1, None),
        ]:
            zeros = np.zeros(chosen.size, np.int32)
            control.write(chosen, zeros, columns, zeros[:, None], words)
            expected = np.zeros((4, 2), np.int32)
            expected[: chosen.size] = 0 if words is None else words
            assert control.words_host.tolist() == expected.tolist()
        control.write(rows, zeros, 1, zeros[:, None], first)
        before = control.ingress_host.tolist()
        zeros = np.zeros(3, np.int32)
        for wrong in (first, first[:, :1], first.astype(np.int64), [[1, 2]] * 3):
            with pytest.raises(pk.MisuseError, match="caller_words"):
                control.write(others, zeros, 1, zeros[:, None], wrong)  # type: ignore[arg-type]
        assert control.ingress_host.tolist() == before
