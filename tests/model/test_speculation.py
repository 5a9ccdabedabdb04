"""The real model with prompt lookup says what it says without, token by token.  (C13.3, C14.6)"""

from __future__ import annotations

from typing import Any

import pytest

import pagedkv as pk
from pagedkv.graphs import DecodeLoop, PromptLookup
from pagedkv.tools.llama.model import LlamaModel
from pagedkv.tools.llama.tokenizer import Tokenizer
from pagedkv.tools.llama.weights import LlamaWeights
from tests.model import texts
from tests.toy_model import decode_all, prefilled

pytestmark = pytest.mark.model

ROWS = 8


def said(
    weights: LlamaWeights, device: pk.Device, prompts: list[list[int]], new_tokens: int, **options: Any
) -> tuple[list[list[int]], DecodeLoop]:
    """Return the new tokens of each prompt, and the loop."""
    config = pk.StoreConfig(weights.config.geometry, profile="bf16", max_context=1024, max_concurrency=ROWS,
                            kv_capacity=pk.ExplicitCapacity(ROWS * 1024), decode_columns_max=9)
    with pk.open_store(config, device) as store:
        loop = DecodeLoop(store, LlamaModel(weights, device, max_context=1024), **options)
        answers = decode_all(loop, [prefilled(loop, ids, new_tokens) for ids in prompts])
        store.check()
        return answers, loop


@pytest.mark.parametrize(("rows", "new_tokens", "trims"), [
    (2, 40, 0), pytest.param(ROWS, 400, 50, marks=pytest.mark.long),
])
def test_speculated_text_is_the_plain_text(
    weights: LlamaWeights, opened_device: pk.Device, tokenizer: Tokenizer, rows: int, new_tokens: int, trims: int
) -> None:
    """In the long form acceptance is between 20 and 80 %, and a row gives back a page at least 50 times."""
    sources = [texts.PROSE, texts.NUMBERS, texts.CODE]
    prompts = [tokenizer.encode(sources[each % 3])[each * 3 :][:180] for each in range(rows)]
    plain, _ = said(weights, opened_device, prompts, new_tokens)
    speculated, loop = said(weights, opened_device, prompts, new_tokens, draft=PromptLookup(), draft_tokens=8)
    assert speculated == plain
    figures = loop.statistics
    print(f"{figures.decode_steps} steps, {figures.proposed_tokens} proposed, {figures.acceptance:.2f} accepted, "
          f"{figures.trims} trims, {figures.trimmed_pages} pages")
    assert figures.accepted_tokens
    if trims:
        assert 0.2 < figures.acceptance < 0.8
        assert figures.trimmed_pages >= trims
