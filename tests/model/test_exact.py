"""The real model says the same, bit for bit, however its rows are batched, placed, chunked or run.  (C14.6)

Prompts of 63, 64, 65 and 1,000 tokens, 128 new tokens each: every row crosses a page in decode, and the
longest merges partials of two key groups.  Compared are the tokens and the bytes of every committed
cache row of every layer.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.graphs import DecodeLoop
from pagedkv.tools.llama import LlamaModel
from pagedkv.tools.model_weights import LlamaWeights
from pagedkv.tools.tokenizer import Tokenizer
from tests.checkout import ROOT
from tests.placement import shuffle_placement

pytestmark = pytest.mark.model

PROMPT_TOKENS = (63, 64, 65, 1000)
QUICK_TOKENS = (64, 1000)
NEW_TOKENS = 128
MAX_CONTEXT = 1280


@dataclass(frozen=True)
class Said:
    """What one sequence produced: its new tokens, and a digest of its committed cache rows."""

    tokens: tuple[int, ...]
    cache: str


def prompts_of(tokenizer: Tokenizer) -> list[list[int]]:
    """Return prompts of real text with the wanted lengths."""
    ids = tokenizer.encode((ROOT / "pagedkv" / "contract.md").read_text(encoding="utf-8"))
    return [ids[7 * length : 8 * length] for length in PROMPT_TOKENS[:3]] + [ids[: PROMPT_TOKENS[3]]]


def generate(
    weights: LlamaWeights,
    prompts: list[list[int]],
    *,
    use_graphs: bool = True,
    prefill_chunk: int = 128,
    shuffled: bool = False,
    profile: str = "bf16",
) -> list[Said]:
    """Decode prompts in one batch."""
    device = pk.open_device("cpu")
    model = LlamaModel(weights, device, max_context=MAX_CONTEXT)
    config = pk.StoreConfig(
        model.geometry,
        profile=profile,
        max_context=MAX_CONTEXT,
        max_concurrency=4,
        kv_capacity=pk.ExplicitCapacity(4 * MAX_CONTEXT),
    )
    with pk.open_store(config, device=device) as store:
        if shuffled:
            shuffle_placement(store, seed=11)
        loop = DecodeLoop(store, model, use_graphs=use_graphs, prefill_chunk=prefill_chunk)
        sequences = [store.activate(prompt_tokens=len(ids), output_tokens=NEW_TOKENS) for ids in prompts]
        for sequence, ids in zip(sequences, prompts, strict=True):
            loop.prefill(sequence, ids)
        texts: dict[pk.Sequence, list[int]] = {sequence: [] for sequence in sequences}
        for tokens in loop.decode(sequences):
            for sequence, new in tokens.items():
                texts[sequence] += new
        store.check()
        said = [Said(tuple(texts[sequence]), cache_digest(store, sequence)) for sequence in sequences]
    device.close()
    return said


def cache_digest(store: pk.Store, sequence: pk.Sequence) -> str:
    """Hash the committed rows of every plane, in logical order, whatever pages they lie in."""
    pages, committed = store.page_ids(sequence), store.committed_tokens(sequence)
    digest = hashlib.sha256()
    for view in store.views["main"]:
        for plane in (view.k_pages, view.v_pages, view.k_scales, view.v_scales):
            if plane is not None:
                rows = np.moveaxis(plane[pages], 1, 2).reshape(len(pages) * 64, -1)[:committed]
                digest.update(np.ascontiguousarray(rows).tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return prompts_of(tokenizer)


@pytest.fixture(scope="module")
def together(weights: LlamaWeights, prompts: list[list[int]]) -> list[Said]:
    """All prompts in one batch, replayed, in pages that lie side by side."""
    return generate(weights, prompts)


@pytest.mark.parametrize("index", [
    pytest.param(index, id=f"{tokens}-tokens", marks=() if tokens in QUICK_TOKENS else (pytest.mark.long,))
    for index, tokens in enumerate(PROMPT_TOKENS)
])  # fmt: skip
def test_a_row_alone_says_what_it_says_in_the_batch(
    weights: LlamaWeights, prompts: list[list[int]], together: list[Said], index: int
) -> None:
    """C14.6: B and the other rows are invisible."""
    assert len(together[index].tokens) == NEW_TOKENS
    assert generate(weights, [prompts[index]]) == [together[index]]


def test_scattered_pages_and_eager_units_change_no_bit(
    weights: LlamaWeights, prompts: list[list[int]], together: list[Said]
) -> None:
    """C3.6, C15.3: random page ids, and every unit enqueued anew instead of replayed."""
    assert generate(weights, prompts, shuffled=True, use_graphs=False) == together


def test_whole_prefill_says_what_chunks_say(
    weights: LlamaWeights, prompts: list[list[int]], together: list[Said]
) -> None:
    """C14.6, S43: one prefill unit of 1,000 columns against chunks of 128."""
    assert generate(weights, prompts, prefill_chunk=1024) == together
