"""SmolLM2 itself: the reference knows a capital, and the runner agrees with the reference."""

from __future__ import annotations

import pytest

from pagedkv.tools.llama.model import LlamaModel
from pagedkv.tools.llama.tokenizer import Tokenizer
from pagedkv.tools.llama.weights import LlamaWeights
from tests.model.fake_unit import FAKE_DEVICE, PASSAGE, FakeCache, assert_same_choices, run_unit
from tests.oracle.reference_llama import greedy, mean_divergence, teacher_forced

pytestmark = pytest.mark.model

@pytest.fixture(scope="module")
def model(weights: LlamaWeights) -> LlamaModel:
    return LlamaModel(weights, FAKE_DEVICE, max_context=160, keep_logits=True)


def test_the_reference_knows_the_capital_of_france(weights: LlamaWeights, tokenizer: Tokenizer) -> None:
    tokens, gaps = greedy(weights, tokenizer.encode("The capital of France is"), 2)

    assert tokenizer.decode(tokens) == " Paris."
    assert min(gaps) > 1.0


def test_the_runner_agrees_with_the_reference(model: LlamaModel, weights: LlamaWeights, tokenizer: Tokenizer) -> None:
    """Teacher forcing over a passage in one prefill unit: mean divergence, and every choice that is not close."""
    ids = tokenizer.encode(PASSAGE)
    expected = teacher_forced(weights, ids)

    logits = model.logits(run_unit(model, [ids], cache=FakeCache(model.config, rows=2), route="prefill", rows=[1]))[0]

    assert mean_divergence(expected, logits) <= 1e-3
    assert_same_choices(expected, logits, margin_min=0.2)


def test_three_prompts_decoded_together_equal_each_alone(model: LlamaModel, tokenizer: Tokenizer) -> None:
    """Prefill one by one, then decode in one batch of rows at different positions."""
    prompts = [tokenizer.encode(text) for text in ("The capital of France is", "1, 2, 3,", "Once upon a time")]

    def continue_rows(chosen: list[int], steps: int) -> dict[int, list[int]]:
        cache = FakeCache(model.config, rows=3)
        texts: dict[int, list[int]] = {}
        for index in chosen:
            unit = run_unit(model, [prompts[index]], cache=cache, route="prefill", rows=[index])
            texts[index] = [int(unit.next_tokens[0, len(prompts[index]) - 1])]
        for step in range(steps):
            last = [texts[index][-1:] for index in chosen]
            unit = run_unit(model, last, cache=cache, first=[len(prompts[index]) + step for index in chosen],
                            rows=chosen)
            for b, index in enumerate(chosen):
                texts[index].append(int(unit.next_tokens[b, 0]))
        return texts

    together = continue_rows([0, 1, 2], steps=3)

    alone = [continue_rows([index], steps=3)[index] for index in range(3)]
    assert alone == [together[index] for index in range(3)]
    assert tokenizer.decode(together[0]).startswith(" Paris.")
    assert tokenizer.decode(together[1]).startswith(" 4,")
