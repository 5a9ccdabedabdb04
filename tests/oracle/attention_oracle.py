"""Naive softmax attention in FP64 over the decoded rows of a paged cache.  (C14.5, codecs 7)

Nothing here comes from the package under test.  Rows are gathered one by one through the block table and decoded with
the values of codes that `codec_oracle.py` lists; rotation is a product with the whole Hadamard matrix.  Slow and
obvious on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.oracle import codec_oracle

Floats = npt.NDArray[np.float64]
Bits = npt.NDArray[np.uint16]
Planes = Mapping[str, npt.NDArray[Any]]

FORMATS = {
    "bf16": ("bf16", "bf16"), "int8-g64": ("int8", "int8"), "fp8-e4m3-row": ("fp8", "fp8"), "nvfp4-g16": ("fp4", "fp4"),
    "k8v4": ("fp8", "fp4"),
}
"""Formats of K and V (C4)."""
ROTATED_K = ("fp8-e4m3-row", "nvfp4-g16", "k8v4")
ROTATED_V = ("nvfp4-g16", "k8v4")
"""Which vectors are rotated (codecs 1)."""

E4M3: Floats = np.array([codec_oracle.e4m3_value(code) for code in range(256)])
E2M1: Floats = np.array([codec_oracle.e2m1_value(code) for code in range(16)])


def bf16_values(bits: Bits) -> Floats:
    promoted: npt.NDArray[np.float32] = (bits.astype(np.uint32) << 16).view(np.float32)
    return promoted.astype(np.float64)


def decode(form: str, code: npt.NDArray[np.uint8], scale: npt.NDArray[np.uint8] | None, head_dim: int) -> Floats:
    """Return the numbers of stored rows, (N, D), in the stored basis."""
    if form == "bf16":
        return bf16_values(np.ascontiguousarray(code).view(np.uint16))
    assert scale is not None
    scale = np.ascontiguousarray(scale)
    if form == "int8":
        return code.view(np.int8).astype(np.float64) * np.repeat(scale.view(np.float16).astype(np.float64), 64, axis=1)
    if form == "fp8":
        return E4M3[code] * scale.view(np.float16).astype(np.float64)
    values = np.empty((len(code), head_dim))
    values[:, 0::2] = E2M1[code & 15]
    values[:, 1::2] = E2M1[code >> 4]
    return values * np.repeat(E4M3[scale], 16, axis=1)


def hadamard(head_dim: int) -> Floats:
    """The natural-order Hadamard matrix over sqrt(D): entry (i, j) has the sign of the parity of i & j."""
    signs = [[1.0 - 2.0 * ((i & j).bit_count() % 2) for j in range(head_dim)] for i in range(head_dim)]
    matrix: Floats = np.array(signs) / np.sqrt(head_dim)
    return matrix


@dataclass(frozen=True)
class StoredRows:
    """Decoded K and V rows of one sequence, (n, Hkv, D), in the stored basis."""

    k: Floats
    v: Floats


def stored_rows(
    profile: str, planes: Planes, *, order: str, pages: Sequence[int], tokens: int, kv_heads: int, head_dim: int
) -> StoredRows:
    """Gather positions [0, tokens) through a table row and decode them.  planes: host copies by role."""

    def gather(role: str) -> npt.NDArray[np.uint8]:
        plane = planes[role]
        rows: list[npt.NDArray[Any]] = []
        for position in range(tokens):
            page, offset = pages[position // 64], position % 64
            heads = plane[page, :, offset] if order == "page-major" else plane[:, page, offset]
            rows.extend(heads[head] for head in range(kv_heads))
        return np.stack(rows).view(np.uint8).reshape(tokens * kv_heads, -1)

    def decoded(kind: str, form: str) -> Floats:
        scale = None if form == "bf16" else gather(f"{kind}_scale")
        return decode(form, gather(f"{kind}_code"), scale, head_dim).reshape(tokens, kv_heads, head_dim)

    form_k, form_v = FORMATS[profile]
    return StoredRows(decoded("k", form_k), decoded("v", form_v))


def attend(profile: str, q: Bits, rows: StoredRows, *, positions: Sequence[int], scale: float) -> tuple[Floats, Floats]:
    """Return out (W, Hq, D) and lse (W, Hq) in FP64 for query columns at `positions`.  q: (W, Hq, D) BF16 bits."""
    width, query_heads, head_dim = q.shape
    group_size = query_heads // rows.k.shape[1]
    rotation = hadamard(head_dim) if profile in ROTATED_K else None
    queries = bf16_values(q)
    if rotation is not None:
        queries = queries @ rotation
    out = np.zeros((width, query_heads, head_dim))
    lse = np.full((width, query_heads), -np.inf)
    for column, position in enumerate(positions):
        for head in range(query_heads):
            k = rows.k[: position + 1, head // group_size]
            v = rows.v[: position + 1, head // group_size]
            scores = scale * (k @ queries[column, head])
            largest = scores.max()
            weights = np.exp(scores - largest)
            out[column, head] = (weights @ v) / weights.sum()
            lse[column, head] = largest + np.log(weights.sum())
    if profile in ROTATED_V:
        assert rotation is not None
        out = out @ rotation
    return out, lse


def attend_context(q: Bits, context: StoredRows | None, k: Bits, v: Bits, *, scale: float) -> tuple[Floats, Floats]:
    """Return out (V, Hq, D) and lse (V, Hq) in FP64 for the live columns of one draft block; non-causal.

    q: (V, Hq, D), k, v: (V, Hkv, D), BF16 bits of the live columns alone; context: the paged rows, None where there
    are none.  Every column sees every context row and every row of k and v.
    """
    live, query_heads, head_dim = q.shape
    group_size = query_heads // k.shape[1]
    all_k, all_v = bf16_values(k), bf16_values(v)
    if context is not None:
        all_k, all_v = np.concatenate([context.k, all_k]), np.concatenate([context.v, all_v])
    queries = bf16_values(q)
    out, lse = np.zeros((live, query_heads, head_dim)), np.zeros((live, query_heads))
    for column in range(live):
        for head in range(query_heads):
            scores = scale * (all_k[:, head // group_size] @ queries[column, head])
            weights = np.exp(scores - scores.max())
            out[column, head] = (weights @ all_v[:, head // group_size]) / weights.sum()
            lse[column, head] = scores.max() + np.log(weights.sum())
    return out, lse


@dataclass(frozen=True)
class Criterion:
    """The bounds of codecs 7."""

    relative_l2: float
    absolute: float
    relative: float

    def assert_met(self, out: Bits, reference: Floats) -> float:
        """Compare live outputs, any shape; return the relative L2 error."""
        values = bf16_values(out)
        assert np.isfinite(values).all(), "no output is NaN or infinite"
        error = values - reference
        relative_l2 = float(np.linalg.norm(error) / max(float(np.linalg.norm(reference)), 1e-30))
        largest = float(np.abs(error).max(initial=0.0))
        limit = self.absolute + self.relative * float(np.abs(reference).max(initial=0.0))
        assert relative_l2 <= self.relative_l2, f"relL2 {relative_l2:.3e} > {self.relative_l2:.3e}"
        assert largest <= limit, f"largest error {largest:.3e} > {limit:.3e}"
        return relative_l2


CONTEXT_CRITERION = Criterion(3.0e-3, 3.0e-4, 2.0**-7)
CRITERIA = {name: Criterion(2.8e-3 if name == "bf16" else 3.2e-3, 1.0e-3, 2.0**-7) for name in FORMATS}
