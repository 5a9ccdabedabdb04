"""An independent Llama forward pass: what the model runner must agree with, written to be read against the formulas.

Contiguous cache, BF16 like the store's `bf16` profile unless a caller passes another codec; attention in float64 over
the decoded rows, output rounded to BF16 (C14.5); residual stream and linear layers in float32.  Nothing here comes from
pagedkv except the arrays of the weights, which are handed in.

What it shares with the runner by definition, not by code: q, k and v are rounded to BF16 after the rotation, pairs are
interleaved (2i, 2i + 1), silu(g) = g / (1 + exp(-g)).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        stored: the cache: (kind, rows) -> the rows that attention reads, float64; `kind` is "k" or "v", rows are
            (tokens, Hkv, D) float64 BF16 numbers.  By default the rows themselves, which is the profile `bf16`.
    """

    def __init__(self, weights: Any, stored: Callable[[str, F64], F64] = lambda _, rows: rows) -> None:
        self.weights = weights
        self.config = weights.config
        self.stored = stored
        empty = np.empty((0, self.config.kv_heads, self.config.head_dim))
        self.keys: list[F64] = [empty] * self.config.layers
        self.values: list[F64] = [empty] * self.config.layers

    def advance(self, tokens: Sequence[int]) -> F32:
        """Append tokens and return the logits after each, (T, vocabulary)."""
        c, w = self.config, self.weights
        positions = len(self.keys[0]) + np.arange(len(tokens))
        x: F32 = w.embedding[list(tokens)].astype(np.float32)
        for index, layer in enumerate(w.layers):
            qkv = self._norm(x, layer.attention_norm) @ layer.qkv.T
            q, k, v = np.split(qkv, [c.query_columns, c.query_columns + c.kv_columns], axis=1)
            q = self._rotate(q.reshape(-1, c.query_heads, c.head_dim), positions)
            k = self._rotate(k.reshape(-1, c.kv_heads, c.head_dim), positions)
            v = v.reshape(-1, c.kv_heads, c.head_dim)
            self.keys[index] = np.concatenate([self.keys[index], self.stored("k", round_to_bf16(k))])
            self.values[index] = np.concatenate([self.values[index], self.stored("v", round_to_bf16(v))])
            attended = self._attend(index, round_to_bf16(q), positions)
            x = x + round_to_bf16(attended).astype(np.float32).reshape(len(x), -1) @ layer.attention_output.T
            gate, up = np.split(self._norm(x, layer.feed_forward_norm) @ layer.gate_up.T, 2, axis=1)
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.down.T
        logits: F32 = self._norm(x, w.final_norm) @ w.embedding.T
        return logits

    def _norm(self, x: F32, weight: F32) -> F32:
        mean_square = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
        normed: F32 = x * ((mean_square + self.config.rms_epsilon) ** -0.5).astype(np.float32) * weight
        return normed

    def _rotate(self, heads: F32, positions: npt.NDArray[np.int64]) -> F32:
        """Turn each pair (2i, 2i + 1) of each head by position * base**(-2i / D), as complex numbers."""
        D = self.config.head_dim
        turns = np.exp(1j * positions[:, None, None] * self.config.rope_base ** (-np.arange(0, D, 2) / D))
        turned = (heads[..., 0::2] + 1j * heads[..., 1::2]) * turns
        return np.stack([turned.real, turned.imag], axis=-1).reshape(heads.shape).astype(np.float32)

    def _attend(self, index: int, q: F64, positions: npt.NDArray[np.int64]) -> F64:
        """Softmax attention of (T, Hq, D) over positions up to each one's own; head h reads KV head h * Hkv // Hq."""
        group = self.config.query_heads // self.config.kv_heads
        keys, values = self.keys[index], self.values[index]
        out = np.empty_like(q)
        for head in range(self.config.query_heads):
            scores = q[:, head] @ keys[:, head // group].T / np.sqrt(self.config.head_dim)
            scores[np.arange(len(keys)) > positions[:, None]] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = weights @ values[:, head // group] / weights.sum(axis=1, keepdims=True)
        return out


def teacher_forced(weights: Any, ids: Sequence[int], **options: Any) -> F32:
    """Return the logits after each prefix of `ids`: (len(ids), vocabulary)."""
    return ReferenceLlama(weights, **options).advance(ids)


def greedy(weights: Any, prompt_ids: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """Continue a prompt greedily.

    Returns:
        `count` tokens, and beside each its margin: the gap between the two largest logits it was chosen by.  A caller
        compares tokens up to the first small margin only: below it, another rounding may choose the other token.
    """
    model = ReferenceLlama(weights)
    logits = model.advance(prompt_ids)[-1]
    tokens: list[int] = []
    gaps: list[float] = []
    for step in range(count):
        tokens.append(int(np.argmax(logits)))
        gaps.append(float(margins(logits)))
        if step + 1 < count:
            logits = model.advance(tokens[-1:])[-1]
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
