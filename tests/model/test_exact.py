"""The real model says the same, bit for bit, however its rows are batched, placed, chunked or run.  (C14.6)

Prompts of 63, 64, 65 and 1,000 tokens, 128 new tokens each: every row crosses a page in decode, and the
longest merges partials of two key groups.  Compared are the tokens and the bytes of every committed
cache row of every layer.
"""

from __future__ import annotations

from typing import Any

import pytest

import pagedkv as pk
from pagedkv.tools.llama.model import LlamaModel
from pagedkv.tools.llama.tokenizer import Tokenizer
from pagedkv.tools.llama.weights import LlamaWeights
from tests.model.generation import Said, contract_ids, generate

pytestmark = pytest.mark.model

PROMPT_TOKENS = (63, 64, 65, 1000)
QUICK_TOKENS = (64, 1000)
NEW_TOKENS = 128


@pytest.fixture(scope="module")
def model(weights: LlamaWeights, opened_device: pk.Device) -> LlamaModel:
    return LlamaModel(weights, opened_device, max_context=1280)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Prompts of real text."""
    ids = contract_ids(tokenizer)
    return [ids[7 * length : 8 * length] for length in PROMPT_TOKENS[:3]] + [ids[: PROMPT_TOKENS[3]]]


@pytest.fixture(scope="module")
def together(model: LlamaModel, opened_device: pk.Device, prompts: list[list[int]]) -> list[Said]:
    """All prompts in one batch, replayed, in pages that lie side by side."""
    return generate(model, opened_device, prompts, NEW_TOKENS)


@pytest.mark.parametrize("index", [
    pytest.param(index, id=f"{tokens}-tokens", marks=() if tokens in QUICK_TOKENS else (pytest.mark.long,))
    for index, tokens in enumerate(PROMPT_TOKENS)
])  # fmt: skip
def test_a_row_alone_says_what_it_says_in_the_batch(
    model: LlamaModel, opened_device: pk.Device, prompts: list[list[int]], together: list[Said], index: int
) -> None:
    """C14.6: B and the other rows are invisible."""
    assert len(together[index].tokens) == NEW_TOKENS
    assert generate(model, opened_device, [prompts[index]], NEW_TOKENS) == [together[index]]


@pytest.mark.parametrize("options", [{"placement_seed": 11, "use_graphs": False}, {"prefill_chunk": 1024}], ids=str)
def test_scattered_pages_eager_units_and_one_whole_prefill_change_no_bit(
    model: LlamaModel, opened_device: pk.Device, prompts: list[list[int]], together: list[Said], options: dict[str, Any]
) -> None:
    """C3.6, C14.6, C15.3, S43: random page ids, every unit enqueued anew; 1,000 columns against chunks of 128."""
    assert generate(model, opened_device, prompts, NEW_TOKENS, **options) == together
