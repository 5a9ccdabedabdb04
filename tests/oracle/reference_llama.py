"""An independent Llama forward pass: what the model runner must agree with, written to be read against the formulas.

Contiguous cache, BF16 like the store's `bf16` profile; attention in float64 over the decoded rows, output rounded to
BF16 (C14.5); residual stream and linear layers in float32.  Nothing here comes from pagedkv except the arrays of the
weights, which are handed in.

What it shares with the runner by definition, not by code: q, k and v are rounded to BF16 after the rotation, pairs are
interleaved (2i, 2i + 1), silu(g) = g / (1 + exp(-g)).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def round_to_bf16(values: npt.NDArray[Any]) -> F64:
    """Round finite values to the nearest BF16, ties to even, by arithmetic: 8 significant bits, no bit patterns."""
    wide = values.astype(np.float32).astype(np.float64)
    _, exponent = np.frexp(wide)
    ulp = np.ldexp(1.0, np.maximum(exponent - 8, -133))
    rounded: F64 = np.rint(wide / ulp) * ulp
    return rounded


class ReferenceLlama:
    """One sequence, growing by `advance`; make a new one for a new sequence.

    Args:
        weights: an object with the fields of `LlamaWeights`.
    """

    def __init__(self, weights: Any) -> None:
        self.weights = weights
        self.config = weights.config
        self.keys: list[list[F64]] = [[] for _ in range(self.config.layers)]
        self.values: list[list[F64]] = [[] for _ in range(self.config.layers)]

    def advance(self, token: int) -> F32:
        """Append one token and return the logits after it, (vocabulary,)."""
        c, w = self.config, self.weights
        position = len(self.keys[0])
        x: F32 = w.embedding[token].astype(np.float32)
        for index, layer in enumerate(w.layers):
            qkv = layer.qkv @ self._norm(x, layer.attention_norm)
            q, k, v = np.split(qkv, [c.query_columns, c.query_columns + c.kv_columns])
            q = self._rotate(q.reshape(c.query_heads, c.head_dim), position)
            k = self._rotate(k.reshape(c.kv_heads, c.head_dim), position)
            self.keys[index].append(round_to_bf16(k))
            self.values[index].append(round_to_bf16(v.reshape(c.kv_heads, c.head_dim)))
            attended = self._attend(index, round_to_bf16(q))
            x = x + layer.attention_output @ round_to_bf16(attended).astype(np.float32).reshape(-1)
            gate, up = np.split(layer.gate_up @ self._norm(x, layer.feed_forward_norm), 2)
            x = x + layer.down @ (gate / (1 + np.exp(-gate)) * up)
        logits: F32 = w.embedding @ self._norm(x, w.final_norm)
        return logits

    def _norm(self, x: F32, weight: F32) -> F32:
        mean_square = float(np.mean(np.square(x, dtype=np.float64)))
        normed: F32 = x * np.float32((mean_square + self.config.rms_epsilon) ** -0.5) * weight
        return normed

    def _rotate(self, heads: F32, position: int) -> F32:
        """Turn each pair (2i, 2i + 1) of each head by position * base**(-2i / D), as complex numbers."""
        D = self.config.head_dim
        turns = np.exp(1j * position * self.config.rope_base ** (-np.arange(0, D, 2) / D))
        turned = (heads[:, 0::2] + 1j * heads[:, 1::2]) * turns
        return np.stack([turned.real, turned.imag], axis=-1).reshape(heads.shape).astype(np.float32)

    def _attend(self, index: int, q: F64) -> F64:
        """Softmax attention of (Hq, D) over all positions so far; query head h reads head h * Hkv // Hq."""
        group = self.config.query_heads // self.config.kv_heads
        keys, values = np.stack(self.keys[index], axis=1), np.stack(self.values[index], axis=1)
        out = np.empty_like(q)
        for head in range(self.config.query_heads):
            scores = keys[head // group] @ q[head] / np.sqrt(self.config.head_dim)
            weights = np.exp(scores - scores.max())
            out[head] = weights @ values[head // group] / weights.sum()
        return out


def teacher_forced(weights: Any, ids: Sequence[int]) -> F32:
    """Return the logits after each prefix of `ids`: (len(ids), vocabulary)."""
    model = ReferenceLlama(weights)
    return np.stack([model.advance(token) for token in ids])


def greedy(weights: Any, prompt_ids: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """Continue a prompt greedily.

    Returns:
        `count` tokens, and beside each its margin: the gap between the two largest logits it was chosen by.  A caller
        compares tokens up to the first small margin only: below it, another rounding may choose the other token.
    """
    model = ReferenceLlama(weights)
    logits = np.stack([model.advance(token) for token in prompt_ids])[-1]
    tokens: list[int] = []
    gaps: list[float] = []
    for step in range(count):
        tokens.append(int(np.argmax(logits)))
        gaps.append(float(margins(logits)))
        if step + 1 < count:
            logits = model.advance(tokens[-1])
    return tokens, gaps


def margins(logits: F32) -> F32:
    """Return the gap between the two largest logits, over the last axis."""
    top: F32 = np.partition(logits, -2, axis=-1)[..., -2:]
    gaps: F32 = top[..., 1] - top[..., 0]
    return gaps


def mean_divergence(reference: F32, logits: F32) -> float:
    """Return the mean over rows of KL(softmax(reference) || softmax(logits)), in nats."""

    def log_softmax(rows: F32) -> F64:
        shifted = rows.astype(np.float64) - rows.max(axis=-1, keepdims=True)
        normal: F64 = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        return normal

    p, q = log_softmax(reference), log_softmax(logits)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())
