"""Decode prompts in one batch of a fresh store, and what each sequence said: tokens and committed cache rows."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

import pagedkv as pk
from pagedkv.graphs import DecodeLoop
from pagedkv.tools.llama.model import LlamaModel
from pagedkv.tools.llama.tokenizer import Tokenizer
from tests.checkout import ROOT
from tests.placement import shuffle_placement


@dataclass(frozen=True)
class Said:
    """What one sequence produced: its new tokens, and a digest of its committed cache rows."""

    tokens: tuple[int, ...]
    cache: str


def generate(
    model: LlamaModel, device: pk.Device, prompts: list[list[int]], new_tokens: int, *, profile: str = "bf16",
    use_graphs: bool = True, prefill_chunk: int = 128, placement_seed: int | None = None,
) -> list[Said]:  # fmt: skip
    """Decode prompts together; with a placement seed, page ids are shuffled."""
    config = pk.StoreConfig(
        model.geometry, profile=profile, max_context=model.max_context, max_concurrency=4,
        kv_capacity=pk.ExplicitCapacity(4 * model.max_context),
    )  # fmt: skip
    with pk.open_store(config, device=device) as store:
        if placement_seed is not None:
            shuffle_placement(store, seed=placement_seed)
        loop = DecodeLoop(store, model, use_graphs=use_graphs, prefill_chunk=prefill_chunk)
        sequences = [store.activate(prompt_tokens=len(ids), output_tokens=new_tokens) for ids in prompts]
        for sequence, ids in zip(sequences, prompts, strict=True):
            loop.prefill(sequence, ids)
        texts: dict[pk.Sequence, list[int]] = {sequence: [] for sequence in sequences}
        for tokens in loop.decode(sequences):
            for sequence, new in tokens.items():
                texts[sequence] += new
        said = [Said(tuple(texts[sequence]), cache_digest(store, sequence)) for sequence in sequences]
        for sequence in sequences:
            store.finish(sequence)
        store.check()
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


def contract_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a long real text."""
    return tokenizer.encode((ROOT / "pagedkv" / "contract.md").read_text(encoding="utf-8"))
