"""Attention on a device against the FP64 oracle over what the cache then holds.  (C14.5, codecs 7)"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.devices.protocol import Device
from pagedkv.values.planes import PageOrder
from tests.kernels.arrays import Bits, Rng, Table, bf16_noise
from tests.kernels.paged_cache import AnyRoute, PagedCache
from tests.oracle.attention_oracle import CONTEXT_CRITERION, CRITERIA, StoredRows, attend, attend_context, stored_rows

Lse = npt.NDArray[np.float32]
Block = tuple[Bits, Bits, Bits]


def rows_of(cache: PagedCache, row: int, tokens: int) -> StoredRows:
    """Decode the first tokens of a table row."""
    view = cache.view
    return stored_rows(view.storage.name, cache.host_planes(), order=view.order, pages=cache.table[row].tolist(),
                       tokens=tokens, kv_heads=view.num_kv_heads, head_dim=view.head_dim)  # fmt: skip


def check_causal(
    cache: PagedCache, q: Bits, out: Bits, lse: Lse, *, position: int, row: int = 0, scale: float | None = None
) -> None:
    """Compare the columns of one batch entry (W, Hq, D), the first at `position`, with the oracle."""
    profile, width = cache.view.storage.name, q.shape[0]
    factor = cache.view.head_dim**-0.5 if scale is None else scale
    positions = range(position, position + width)
    reference, reference_lse = attend(profile, q, rows_of(cache, row, position + width), positions=positions,
                                      scale=factor)  # fmt: skip
    np.testing.assert_allclose(lse, reference_lse, rtol=2e-6, atol=2e-6)
    CRITERIA[profile].assert_met(out, reference)


def check_context(
    cache: PagedCache, inputs: Block, out: Bits, lse: Lse, *, context: int, entry: int = 0, row: int = 0,
    live: int | None = None, scale: float | None = None,
) -> None:
    """Compare the live columns of one batch entry with the oracle over the paged context and the live rows."""
    q, k, v = (array[entry, :live] for array in inputs)
    factor = cache.view.head_dim**-0.5 if scale is None else scale
    reference, reference_lse = attend_context(q, rows_of(cache, row, context) if context else None, k, v, scale=factor)
    np.testing.assert_allclose(lse[entry, :live], reference_lse, rtol=2e-6, atol=2e-6)
    CONTEXT_CRITERION.assert_met(out[entry, :live], reference)


def build_cache(device: Device, rng: Rng, profile: str, table: Table, route: AnyRoute, **choices: Any) -> PagedCache:
    """A cache of random bytes, in the page order that a route reads: a draft pool is head-major."""
    order: PageOrder = "head-major" if route == "context" else "page-major"
    return PagedCache.build(device, profile, order=order, table=table, rng=rng, **choices)


def draw_block(
    rng: Rng, cache: PagedCache, *, batch: int = 1, width: int, query_heads: int = 4, rms: float = 1.0
) -> Block:
    """Queries and new rows of one call."""
    kv_heads, head_dim = cache.view.num_kv_heads, cache.view.head_dim
    q, k, v = (bf16_noise(rng, (batch, width, heads, head_dim), rms) for heads in (query_heads, kv_heads, kv_heads))
    return q, k, v


def check_call(
    device: Device, rng: Rng, profile: str, table: Table, *, route: AnyRoute = "decode", position: int, width: int = 1,
    query_heads: int = 4, row: int = 0, rms: float = 1.0, scale: float | None = None, **choices: Any,
) -> None:
    """Attend with `width` new columns behind `position` tokens of noise, and compare with the oracle."""
    cache = build_cache(device, rng, profile, table, route, **choices)
    cache.fill(rng, row, position, rms)
    q, k, v = draw_block(rng, cache, width=width, query_heads=query_heads, rms=rms)

    out, lse = cache.attend(q, [position], [row], route=route, new_rows=(k, v), scale=scale)

    if route == "context":
        check_context(cache, (q, k, v), out, lse, context=position, row=row, scale=scale)
    else:
        check_causal(cache, q[0], out[0], lse[0], position=position, row=row, scale=scale)
