"""The one table of every device byte a store owns.

The same entries are summed for a plan and walked for allocation, so the two cannot drift (C5.4).

    slab        allocated by the store when it opens      span, exact, plus a constant 255 bytes of alignment
    allowance   reserved for later allocations            bytes, as configured: caller's state, graphs

Every entry has an owner, and every byte of a plan belongs to exactly one:

    pool main, pool mtp | draft     planes: codes and scales of every layer
    guard pages                     the page group behind the last id of each pool, in sanitizer mode
    block tables                    (C, L) int32 of each pool
    codec counters                  (3,) uint64 of each quantized pool, if the store counts codec events
    control buffers                 selectors in, sampled tokens out, table entries of a step; shared by every unit
    host copies                     staging, page ids and plane tables of copies to and from a Host arena
    attention workspace             partial results of the widest unit; shared by every captured unit
    sequence state                  declared by the caller
    graph allowance                 captured graphs, their buffers, allocator rounding
    alignment                       255 bytes of every slab

Units of a store run one after the other on its stream, so one workspace and one set of control buffers, sized for
the widest, serve them all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pagedkv.errors import ConfigError
from pagedkv.values.attention_shape import AttentionShape, workspace_bytes
from pagedkv.values.checks import checked_integer
from pagedkv.values.config import CALLER_WORDS_MAX, PoolConfig, StoreConfig
from pagedkv.values.planes import PageRecord, PlaneGeometry
from pagedkv.values.profiles import CODEC_EVENTS
from pagedkv.values.quantities import CONTEXT_TOKENS_MAX, SLAB_ALIGN_BYTES, WINDOW_PAGES

ALIGNMENT_BYTES = SLAB_ALIGN_BYTES - 1

CONTROL_INGRESS = "control.ingress"
CONTROL_EGRESS = "control.egress"
TABLE_ENTRIES = "control.table_entries"
ATTENTION_WORKSPACE = "attention.workspace"

COPY_SLOTS = 4
"""Transfers of one direction whose page ids wait for their copies."""

COPY_STAGING_BYTES = 8 << 20
COPY_STAGING_PAGES = 32
"""Most pages of one launch, of which at least one fits; 8 MiB take a third of a millisecond on a fast bus."""

PLANE_WORDS = 6
"""Words of one plane for the kernels that move whole page groups (`ops/page_moves.py`)."""


@dataclass(frozen=True)
class Slab:
    """One allocation: who owns it, its NumPy shape and dtype, and the plane it is, if one.

    Attributes:
        guard_bytes: part of the span that guard pages take.
        is_scratch: nobody reads its first content.
    """

    owner: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    plane: PlaneGeometry | None = None
    guard_bytes: int = 0
    is_scratch: bool = False

    @property
    def span_bytes(self) -> int:
        """Exact bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def charged_bytes(self) -> int:
        """Span plus the constant alignment allowance.  (C5.4)"""
        return self.span_bytes + ALIGNMENT_BYTES


@dataclass(frozen=True)
class Allowance:
    """Bytes reserved for allocations of others after the store has opened."""

    owner: str
    bytes: int


@dataclass(frozen=True)
class StoreLayout:
    """Every slab of a store in allocation order, and the allowances."""

    slabs: tuple[Slab, ...]
    allowances: tuple[Allowance, ...] = ()

    @property
    def span_bytes(self) -> int:
        """Exact bytes of all slabs, which the store allocates."""
        return sum(slab.span_bytes for slab in self.slabs)

    @property
    def charged_bytes(self) -> int:
        """What a plan charges: spans, alignment and allowances.  (C5.4)"""
        return sum(slab.charged_bytes for slab in self.slabs) + sum(allowance.bytes for allowance in self.allowances)

    def bytes_by_owner(self) -> dict[str, int]:
        """Return the charged bytes by owner, in first-seen order, alignment last; their sum is `charged_bytes`."""
        owners: dict[str, int] = {}
        for slab in self.slabs:
            owners[slab.owner] = owners.get(slab.owner, 0) + slab.span_bytes - slab.guard_bytes
            if slab.guard_bytes:
                owners["guard pages"] = owners.get("guard pages", 0) + slab.guard_bytes
        for allowance in self.allowances:
            owners[allowance.owner] = owners.get(allowance.owner, 0) + allowance.bytes
        owners["alignment"] = len(self.slabs) * ALIGNMENT_BYTES
        return owners


def control_words(*, batch: int, width: int, words: int = 0) -> tuple[int, int]:
    """Return the int32 words of a unit's ingress and egress.  (C15.1)

    Ingress: table row, first position, live columns, K words of the caller and W tokens of each entry; egress: accepted
    count and W sampled tokens.  Example: B = 4, W = 2, K = 3 -> 32 and 12.

    Raises:
        ConfigError: B or W is no integer of at least 1, or K (`words`) none from 0 to 64.
    """
    for name, extent in (("B", batch), ("W", width)):
        checked_integer(f"{name} of a unit", extent, 1, CONTEXT_TOKENS_MAX, remedy="count entries and columns",
                        clause="C15.1", kind=ConfigError)
    checked_integer("K of a unit", words, 0, CALLER_WORDS_MAX, remedy="pass caller_words of the StoreConfig",
                    clause="C15.1", kind=ConfigError)
    return batch * (3 + words + width), batch * (1 + width)


def pool_slabs(pool: PoolConfig, *, blocks: int, rows: int) -> tuple[Slab, ...]:
    """Return the slabs of one pool: planes in ordinal order, block table (C, L), codec counters if any.  (C11.1)"""
    planes = tuple(
        Slab(
            f"pool {pool.name}", f"{pool.name}.{plane.layer}.{plane.role}", plane.shape, plane.dtype, plane,
            guard_bytes=pool.guard_pages * plane.page_bytes,
        )
        for plane in pool.planes
    )
    # Entries beyond membership are unspecified (C11.1): poison on the cpu device shows who reads them nevertheless.
    table = Slab("block tables", f"{pool.name}.block_table", (rows, blocks), np.dtype(np.int32), is_scratch=True)
    counters = Slab("codec counters", f"{pool.name}.codec_counts", (len(CODEC_EVENTS),), np.dtype(np.uint64))
    return (*planes, table, counters) if pool.counts_events else (*planes, table)


def build_layout(config: StoreConfig, *, pages: int | None = None) -> StoreLayout:
    """Return every slab that a store of this configuration allocates, and its allowances.  (C5.3, C5.4)

    Args:
        config: resolved, unless a caller passes `pages`.
        pages: M to evaluate instead of the configuration's own; not checked against its limits.
    """
    pools = config.pools if pages is None else config.pools_at(pages)
    slabs: list[Slab] = []
    for pool in pools:
        slabs.extend(pool_slabs(pool, blocks=config.blocks, rows=config.max_concurrency))
    slabs.extend(_unit_slabs(config, pools))
    if config.host_arena_bytes:
        slabs.extend(host_copy_slabs({pool.name: pool.planes for pool in pools}))
    allowances = (Allowance("sequence state", config.state_bytes), Allowance("graph allowance", config.allowance_bytes))
    return StoreLayout(tuple(slabs), tuple(allowance for allowance in allowances if allowance.bytes))


def copy_staging(lane: str) -> str:
    """Return the name of the slab in which one lane of copies gathers records."""
    return f"copies.{lane}.staging"


def copy_ids(lane: str) -> str:
    """Return the name of the slab of page ids of one lane of copies."""
    return f"copies.{lane}.ids"


def plane_words(pool: str) -> str:
    """Return the name of the slab that describes a pool's planes to kernels."""
    return f"{pool}.plane_words"


def host_copy_slabs(planes: Mapping[str, tuple[PlaneGeometry, ...]]) -> list[Slab]:
    """Return the slabs of copies to and from a Host arena, for the planes of each pool.  (C8.3)"""
    owner, slabs = "host copies", []
    record_bytes = max(PageRecord(pool).total_bytes for pool in planes.values())
    staging = record_bytes * min(max(COPY_STAGING_BYTES // record_bytes, 1), COPY_STAGING_PAGES)
    pages = max(plane.pages for pool in planes.values() for plane in pool)
    for lane in ("out", "in"):
        slabs.append(Slab(owner, copy_staging(lane), (staging,), np.dtype(np.uint8), is_scratch=True))
        slabs.append(Slab(owner, copy_ids(lane), (COPY_SLOTS, pages), np.dtype(np.int32), is_scratch=True))
    for name, pool in planes.items():
        slabs.append(Slab(owner, plane_words(name), (len(pool), PLANE_WORDS), np.dtype(np.int64), is_scratch=True))
    return slabs


def _unit_slabs(config: StoreConfig, pools: tuple[PoolConfig, ...]) -> list[Slab]:
    """Return the slabs that all units of a store share, sized for the widest decode and the widest prefill unit."""
    shapes = ((config.max_concurrency, config.decode_columns), (1, config.prefill_columns_max))
    counts = (control_words(batch=b, width=w, words=config.caller_words) for b, w in shapes)
    ingress, egress = (max(words) for words in zip(*counts, strict=True))
    window = min(WINDOW_PAGES, config.blocks)
    slabs = [
        Slab("control buffers", CONTROL_INGRESS, (ingress,), np.dtype(np.int32)),
        Slab("control buffers", CONTROL_EGRESS, (egress,), np.dtype(np.int32)),
        # A table entry and its page id, for a window of every row.
        Slab("control buffers", TABLE_ENTRIES, (2 * window * config.max_concurrency,), np.dtype(np.int64),
             is_scratch=True),
    ]
    workspace = max(_workspace_bytes(config, pool) for pool in pools)
    if workspace:
        slabs.append(
            Slab("attention workspace", ATTENTION_WORKSPACE, (workspace,), np.dtype(np.uint8), is_scratch=True)
        )
    return slabs


def _workspace_bytes(config: StoreConfig, pool: PoolConfig) -> int:
    """Return the workspace of a pool's widest units; it is monotone in B and W, so no narrower unit needs more.

    A head-major pool is read by context attention alone, whose workspace is that of a decode of its shape.
    """
    geometry = pool.geometry
    decode = AttentionShape(
        "decode", config.max_concurrency, config.decode_columns, geometry.query_heads, geometry.kv_heads,
        geometry.head_dim, config.max_context,
    )
    if pool.order == "head-major":
        return workspace_bytes(decode)
    prefill = AttentionShape(
        "prefill", 1, config.prefill_columns_max, geometry.query_heads, geometry.kv_heads, geometry.head_dim,
        config.max_context,
    )
    return max(workspace_bytes(decode), workspace_bytes(prefill))
