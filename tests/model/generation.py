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
from tests.toy_model import decode_all, opened_store, prefilled


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
    with opened_store(model.geometry, profile=profile, max_context=model.max_context, concurrency=4, device=device,
                      placement_seed=placement_seed) as store:
        loop = DecodeLoop(store, model, use_graphs=use_graphs, prefill_chunk=prefill_chunk)
        sequences = [prefilled(loop, ids, new_tokens) for ids in prompts]
        said = [Said(tuple(text), cache_digest(store, sequence))
                for sequence, text in zip(sequences, decode_all(loop, sequences), strict=True)]
        for sequence in sequences:
            store.finish(sequence)
    return said


def cache_digest(store: pk.Store, sequence: pk.Sequence) -> str:
    """Hash the committed rows of every plane, in logical order, whatever pages they lie in."""
    pages, committed = store.page_ids(sequence), store.committed_tokens(sequence)
    digest = hashlib.sha256()
    for view in store.views["main"]:
        for plane, _ in view.planes:
            rows = np.moveaxis(plane[pages], 1, 2).reshape(len(pages) * 64, -1)[:committed]
            digest.update(np.ascontiguousarray(rows).tobytes())
    return digest.hexdigest()


def contract_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a long real text."""
    return tokenizer.encode((ROOT / "pagedkv" / "contract.md").read_text(encoding="utf-8"))
