"""The model, row by row: a row's bits are its own, whatever runs beside it.  (C14.6)

Attention here is the fake unit's; that the real one is invariant is tested with the kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import pagedkv as pk
from pagedkv.graphs import NO_TOKEN, Sampling, choose_largest
from pagedkv.tools.llama import functions
from pagedkv.tools.llama.functions import bf16_bits, multiply_blocks
from pagedkv.tools.llama.model import LlamaModel
from pagedkv.tools.llama.self_check import check_row_independence
from pagedkv.tools.llama.weights import LlamaWeights
from tests.model.fake_unit import FAKE_DEVICE, FakeCache, FakeUnit, Route, assert_same_choices, run_unit
from tests.model.tiny import TINY
from tests.oracle.reference_llama import mean_divergence, round_to_bf16, teacher_forced

Float32Array = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def model(tiny_weights: LlamaWeights) -> LlamaModel:
    return LlamaModel(tiny_weights, FAKE_DEVICE, max_context=160, keep_logits=True)


def random_ids(seed: int, count: int) -> list[int]:
    return [int(value) for value in np.random.default_rng(seed).integers(0, TINY.vocabulary, count)]


def bits_of(model: LlamaModel, unit: FakeUnit) -> npt.NDArray[np.uint32]:
    """Return a copy of a unit's logits, (B, W, V), as bits."""
    bits: npt.NDArray[np.uint32] = model.logits(unit).copy().view(np.uint32)
    return bits


@pytest.mark.parametrize(("B", "W"), [(1, 1), (3, 5), (15, 1), (16, 1), (17, 1), (8, 4)])
@pytest.mark.parametrize("route", ["decode", "prefill"])
def test_a_batch_equals_each_row_alone(model: LlamaModel, route: Route, B: int, W: int) -> None:
    """C14.6, one layer up: logits of B rows at once are, bit for bit, those of every row by itself."""
    columns = [random_ids(b, W) for b in range(B)]
    together = run_unit(model, columns, route=route)
    logits = bits_of(model, together)

    for b in range(B):
        alone = run_unit(model, columns[b : b + 1], route=route, rows=[b])
        np.testing.assert_array_equal(logits[b], bits_of(model, alone)[0])
        np.testing.assert_array_equal(together.next_tokens[b], alone.next_tokens[0])


@pytest.mark.parametrize("widths", [[1] * 40, [16, 16, 8], [5, 16, 17, 2]])
def test_chunks_equal_the_whole(model: LlamaModel, widths: list[int]) -> None:
    ids = random_ids(7, 40)
    expected = bits_of(model, run_unit(model, [ids], route="prefill", rows=[3]))[0]

    cache, begin, parts = FakeCache(TINY), 0, []
    for width in widths:
        columns = [ids[begin : begin + width]]
        unit = run_unit(model, columns, cache=cache, route="prefill", first=[begin], rows=[3])
        parts.append(bits_of(model, unit)[0])
        begin += width

    np.testing.assert_array_equal(expected, np.concatenate(parts))


def test_inert_rows_and_columns_disturb_nobody(model: LlamaModel) -> None:
    """Inert columns hold ids beyond the vocabulary, and inert rows a position beyond the tables."""
    ids = random_ids(3, 3)
    dense = run_unit(model, [ids])
    expected = bits_of(model, dense)[0]
    masked = run_unit(model, [[], ids, []], first=[10**6, 0, -1], rows=[-1, 0, -1], W=5)

    np.testing.assert_array_equal(expected, bits_of(model, masked)[1, :3])
    np.testing.assert_array_equal(dense.next_tokens[0], masked.next_tokens[1, :3])
    assert [NO_TOKEN] * 12 == [*masked.next_tokens[[0, 2]].ravel(), *masked.next_tokens[1, 3:]]


def test_prefill_answers_after_the_last_live_column_only(tiny_weights: LlamaWeights, model: LlamaModel) -> None:
    ids = random_ids(4, 6)
    every = run_unit(model, [ids], route="prefill", W=8)
    last = run_unit(LlamaModel(tiny_weights, FAKE_DEVICE, max_context=160), [ids], route="prefill", W=8)

    assert [[NO_TOKEN] * 5 + [every.next_tokens[0, 5]] + [NO_TOKEN] * 2] == last.next_tokens.tolist()


def test_every_unit_samples_the_same_token_at_a_position(tiny_weights: LlamaWeights) -> None:
    """C14.6: decode alone, a verify unit beside greedy rows, the last row of a prefill; other seeds, other texts."""
    model = LlamaModel(tiny_weights, FAKE_DEVICE, max_context=160)
    ids, words = random_ids(8, 6), Sampling(1.5, 0.95, seed=4).words
    plain = run_unit(model, [ids], route="decode")
    verified = run_unit(model, [[7, 8], ids, []], words=[(0, 0, 0), words, (0, 0, 0)], W=8)
    expected = verified.next_tokens[1, :6].tolist()

    assert plain.next_tokens[0].tolist() != expected
    assert verified.next_tokens[0].tolist() == [*run_unit(model, [[7, 8]]).next_tokens[0], *[NO_TOKEN] * 6]
    assert verified.next_tokens[2].tolist() == [NO_TOKEN] * 8
    cache = FakeCache(TINY)
    for position, token in enumerate(ids):
        alone = run_unit(model, [[token]], cache=cache, first=[position], rows=[2], words=[words])
        assert alone.next_tokens.tolist() == [[expected[position]]]
        last = run_unit(model, [ids[: position + 1]], route="prefill", W=8, words=[words])
        assert last.next_tokens[0, position] == expected[position]
    others = {run_unit(model, [ids], route="prefill", words=[Sampling(1.5, seed=seed).words]).next_tokens[0, -1]
              for seed in range(20)}
    assert len(others) > 10


def test_a_replay_reads_the_arrays_again(model: LlamaModel) -> None:
    unit = run_unit(model, [[5]])
    answers = set()
    for token in range(40):
        unit.tokens[0, 0] = token
        unit.replay()
        answers.add(int(unit.next_tokens[0, 0]))
        assert run_unit(model, [[token]]).next_tokens[0, 0] == unit.next_tokens[0, 0]

    assert len(answers) > 1


def test_a_live_column_without_a_token_and_logits_of_an_unseen_shape_are_refused(
    model: LlamaModel, tiny_weights: LlamaWeights
) -> None:
    with pytest.raises(pk.MisuseError, match=r"expected token ids in \[0, 320\), got -1"):
        run_unit(model, [[NO_TOKEN]])
    with pytest.raises(pk.MisuseError, match="keep_logits=True"):
        LlamaModel(tiny_weights, FAKE_DEVICE, max_context=8).logits(FakeUnit(FakeCache(TINY), route="decode", B=2, W=1))


def test_equal_logits_choose_the_lowest_id() -> None:
    logits = np.zeros((16, 9), np.float32)
    logits[1, [4, 7]] = 2.0
    choice = np.full(16, -1, np.int32)
    choose_largest(logits, choice)

    assert [0, 4, *[0] * 14] == choice.tolist()


def test_logits_that_are_not_finite_choose_no_token() -> None:
    """A NaN was the largest, and chose its own place: often 0, which ends a text."""
    logits = np.zeros((16, 9), np.float32)
    logits[0, 0], logits[1, 3], logits[2, 2], logits[3], logits[4, 0] = np.nan, np.nan, np.inf, -np.inf, -np.inf
    choice = np.full(16, 7, np.int32)
    choose_largest(logits, choice)

    assert [NO_TOKEN] * 4 + [1] + [0] * 11 == choice.tolist()


def test_the_tiny_model_agrees_with_the_reference(model: LlamaModel, tiny_weights: LlamaWeights) -> None:
    ids = random_ids(11, 100)
    expected = teacher_forced(tiny_weights, ids)
    logits = model.logits(run_unit(model, [ids], route="prefill", rows=[1]))[0]

    assert mean_divergence(expected, logits) <= 1e-3
    assert_same_choices(expected, logits, margin_min=0.2)


# --- rounding --------------------------------------------------------------------------------------------------------


def test_bf16_rounds_to_nearest_even_and_keeps_what_is_special() -> None:
    values = np.array(
        [0.0, -0.0, 1.0, np.inf, -np.inf, 3.3895314e38, 3.4028235e38, 1e-45, 9.1835e-41], np.float32
    )  # the largest BF16, the largest float32 (rounds up to infinity), and subnormals
    expected = [0x0000, 0x8000, 0x3F80, 0x7F80, 0xFF80, 0x7F7F, 0x7F80, 0x0000, 0x0001]
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001], np.uint32).view(np.float32)
    nans = np.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)

    assert expected == bf16_bits(values).tolist()
    assert [0x3F80, 0x3F82, 0x3F81] == bf16_bits(ties).tolist()
    assert all((int(bits) & 0x7FFF) > 0x7F80 for bits in bf16_bits(nans))

    generator = np.random.default_rng(5)
    values = (generator.standard_normal(20_000) * 10.0 ** generator.integers(-40, 38, 20_000)).astype(np.float32)
    rounded = (bf16_bits(values).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(round_to_bf16(values), rounded.astype(np.float64))


# --- the start-up check ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_products_in_blocks_of_16_are_row_independent_at_every_thread_count(threads: int) -> None:
    """The library splits work by thread count; each count runs in a process of its own, at the real model's sizes."""
    program = (
        "from dataclasses import replace; from tests.model.tiny import TINY, random_weights; "
        "from pagedkv.tools.llama.self_check import check_row_independence; "
        "check_row_independence(random_weights(replace(TINY, layers=1, hidden=576, intermediate=1536, query_heads=9, "
        "kv_heads=3, vocabulary=12288), 0))"
    )
    environment = os.environ | {"OPENBLAS_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False,
                          timeout=120)

    assert (0, "") == (done.returncode, done.stderr)


def depends_on_the_row_count(x: Float32Array, weight: Float32Array, out: Float32Array) -> None:
    multiply_blocks(x, weight, out)
    if len(x) > 16:
        out[3, 5] = np.nextafter(out[3, 5], np.float32(np.inf))


def depends_on_the_place_in_the_block(x: Float32Array, weight: Float32Array, out: Float32Array) -> None:
    multiply_blocks(x, weight, out)
    out[12::16, 0] *= np.float32(1.0000002)


def mixes_rows(x: Float32Array, weight: Float32Array, out: Float32Array) -> None:
    multiply_blocks(x, weight, out)
    out[...] += np.float32(1e-3) * out[:1]


@pytest.mark.parametrize(("multiply", "message"), [
    (depends_on_the_row_count, "the product with qkv to give row 3 the same bits"),
    (depends_on_the_place_in_the_block, "1 of 320 elements different"), (mixes_rows, "the product with qkv"),
])
def test_a_product_whose_rows_are_not_independent_is_refused(
    tiny_weights: LlamaWeights, multiply: Callable[..., None], message: str
) -> None:
    with pytest.raises(pk.MisuseError, match=message) as caught:
        check_row_independence(tiny_weights, multiply=multiply)

    assert f"give row {caught.value.row} " in str(caught.value)


@pytest.mark.parametrize("name", ["gate_rows", "rms_norm", "rotate_and_round"])
def test_an_element_by_element_function_gives_a_row_the_same_bits_at_every_place(name: str) -> None:
    """`exp` in vector code may treat the last elements of an array apart; here each of 33 rows runs alone as well."""
    generator = np.random.default_rng(9)
    F, D, rows = 1536, 64, 33
    wide = (generator.standard_normal((rows, 2 * F)) * 30).astype(np.float32)
    cosines, sines = generator.standard_normal((2, rows, 1, D)).astype(np.float32)

    def run(begin: int, end: int) -> npt.NDArray[Any]:
        x = wide[begin:end].copy()
        n = end - begin
        if name == "gate_rows":
            gated = np.empty((n, F), np.float32)
            functions.gate_rows(x, gated)
            return gated
        if name == "rms_norm":
            normed = np.empty((n, 576), np.float32)
            functions.rms_norm(x[:, :576].copy(), wide[0, :576].copy(), np.float32(1e-5), normed)
            return normed
        heads = [np.empty((n, 1, count, D), np.uint16) for count in (9, 3, 3)]
        functions.rotate_and_round(x[:, :960].copy(), cosines[begin:end], sines[begin:end], *heads)
        return np.concatenate(heads, axis=2)

    together = run(0, rows)
    for index in range(rows):
        np.testing.assert_array_equal(together[index].view(np.uint8), run(index, index + 1)[0].view(np.uint8))
