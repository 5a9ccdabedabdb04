"""The real model says the same on shared, copied and moved pages as on pages of its own.  (C10, C14.6)

Compared are tokens and the bytes of every committed cache row, with the same route at every position.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import pagedkv as pk
from pagedkv.graphs import DecodeLoop
from pagedkv.tools.llama.model import LlamaModel
from pagedkv.tools.llama.tokenizer import Tokenizer
from pagedkv.tools.llama.weights import LlamaWeights
from tests.model.generation import Said, cache_digest, contract_ids
from tests.toy_model import opened_store, prefilled, retained

pytestmark = pytest.mark.model

MAX_CONTEXT = 512
PROFILES = (pytest.param("bf16", marks=pytest.mark.long), "k8v4")


@pytest.fixture(scope="module")
def text(tokenizer: Tokenizer) -> list[int]:
    return contract_ids(tokenizer)


@contextmanager
def a_loop(weights: LlamaWeights, profile: str) -> Iterator[tuple[pk.Store, DecodeLoop]]:
    """Open a store of eight lanes, its pages scattered, and a loop over the model."""
    device = pk.open_device("cpu")
    model = LlamaModel(weights, device, max_context=MAX_CONTEXT)
    with opened_store(model.geometry, profile=profile, max_context=MAX_CONTEXT, concurrency=8, device=device,
                      placement_seed=5) as store:
        yield store, DecodeLoop(store, model)
    device.close()


def decode(loop: DecodeLoop, sequences: list[pk.Sequence], steps: int) -> dict[pk.Sequence, tuple[int, ...]]:
    """Step all sequences together; return the new tokens of each."""
    said: dict[pk.Sequence, list[int]] = {sequence: [] for sequence in sequences}
    for _ in range(steps):
        for sequence, tokens in loop.step(sequences).items():
            said[sequence] += tokens
    return {sequence: tuple(tokens) for sequence, tokens in said.items()}


def unshared(weights: LlamaWeights, profile: str, turns: list[tuple[list[int], int]]) -> Said:
    """Run one sequence on pages of its own: prefill each turn, the last sampled token before it, and decode."""
    with a_loop(weights, profile) as (store, loop):
        sequence = store.activate(prompt_tokens=MAX_CONTEXT // 2, output_tokens=MAX_CONTEXT // 2)
        tokens: tuple[int, ...] = ()
        for index, (ids, steps) in enumerate(turns):
            loop.prefill(sequence, ids, last_token=loop.last_token(sequence) if index else None)
            tokens += decode(loop, [sequence], steps)[sequence]
        return Said(tokens, cache_digest(store, sequence))


@pytest.mark.parametrize("profile", PROFILES)
def test_forks_and_a_snapshot_say_what_unshared_runs_say(weights: LlamaWeights, text: list[int], profile: str) -> None:
    """S39, C10.5, C10.6: one prompt of 100 tokens, four suffixes, and child 2 forked again at an unaligned frontier.

    The snapshot was taken while child 2 ran on; resumed when that child has ended, it goes the same way, past a page.
    """
    prompt, suffixes = text[:100], [text[200 + 9 * i : 205 + 9 * i] for i in range(4)]
    again = text[400:403]
    with a_loop(weights, profile) as (store, loop):
        saved = retained(store, prefilled(loop, prompt, 0), "attention only: the pages are all")
        children = [store.activate(source=saved, frontier=100, prompt_tokens=len(suffix), output_tokens=60)
                    for suffix in suffixes]
        assert len({tuple(store.page_ids(child)[:1]) for child in children}) == 1
        assert len({store.page_ids(child)[1] for child in children}) == 4
        for child, suffix in zip(children, suffixes, strict=True):
            loop.prefill(child, suffix, last_token=None)
        said = decode(loop, children, 12)
        checkpoint = store.snapshot(children[2], state=loop.last_token(children[2]))
        grandchild = store.activate(source=checkpoint, prompt_tokens=len(again) + 1, output_tokens=30)
        loop.prefill(grandchild, again, last_token=loop.last_token(children[2]))
        more = decode(loop, [*children, grandchild], 16)
        store.check()
        got = [Said(said[child] + more[child], cache_digest(store, child)) for child in children]
        got_again = Said(said[children[2]] + more[grandchild], cache_digest(store, grandchild))
        loop.forget(children[2])
        store.finish(children[2])
        state = store.state_of(checkpoint)
        assert isinstance(state, int)
        resumed = store.activate(source=checkpoint, prompt_tokens=1, output_tokens=40)
        loop.resume(resumed, state)
        tokens = said[children[2]] + decode(loop, [resumed], 16)[resumed]
        assert Said(tokens, cache_digest(store, resumed)) == got[2]

    assert got == [unshared(weights, profile, [(prompt + suffix, 28)]) for suffix in suffixes]
    assert got_again == unshared(weights, profile, [(prompt + suffixes[2], 12), (again, 16)])


@pytest.mark.parametrize("profile", PROFILES)
def test_a_conversation_continued_by_move_says_what_an_uninterrupted_one_says(
    weights: LlamaWeights, text: list[int], profile: str
) -> None:
    """C10.4: three turns; between them the sequence is retained, and moved back into activity."""
    turns = [(text[600:640], 9), (text[640:671], 10), (text[671:700], 11)]
    with a_loop(weights, profile) as (store, loop):
        sequence = prefilled(loop, turns[0][0], 20)
        tokens = decode(loop, [sequence], turns[0][1])[sequence]
        for ids, steps in turns[1:]:
            pages, last = store.page_ids(sequence), loop.last_token(sequence)
            loop.forget(sequence)
            saved = retained(store, sequence, last)
            kept = store.page_ids(saved)
            assert pages[: len(kept)] == kept
            sequence = store.activate(source=saved, keep_source=False, prompt_tokens=len(ids) + 1, output_tokens=20)
            assert store.page_ids(sequence) == kept, "a Move copies nothing"
            with pytest.raises(pk.StaleHandle):
                store.release(saved)
            loop.prefill(sequence, ids, last_token=last)
            tokens += decode(loop, [sequence], steps)[sequence]
            store.check()
        got = Said(tokens, cache_digest(store, sequence))

    assert got == unshared(weights, profile, turns)
