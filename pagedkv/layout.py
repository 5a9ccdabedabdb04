"""The one table of every device byte a store owns.

The same entries are summed for a plan and walked for allocation, so the two cannot drift (C5.4).
An entry's bytes are exact; a slab is charged its span plus a constant 255 bytes of alignment.

Read next: `store.py` allocates what stands here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagedkv.config import PoolConfig, StoreConfig
from pagedkv.planes import PlaneGeometry
from pagedkv.quantities import SLAB_ALIGN_BYTES


@dataclass(frozen=True)
class Slab:
    """One allocation: who owns it, its NumPy shape and dtype, and the plane it is, if one."""

    owner: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    plane: PlaneGeometry | None = None

    @property
    def span_bytes(self) -> int:
        """Exact bytes of the array."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def charged_bytes(self) -> int:
        """Span plus the constant alignment allowance.  (C5.4)"""
        return self.span_bytes + SLAB_ALIGN_BYTES - 1


@dataclass(frozen=True)
class StoreLayout:
    """Every slab of a store in allocation order."""

    slabs: tuple[Slab, ...]

    @property
    def span_bytes(self) -> int:
        """Exact bytes of all slabs."""
        return sum(slab.span_bytes for slab in self.slabs)

    @property
    def charged_bytes(self) -> int:
        """What a plan charges for all slabs.  (C5.4)"""
        return sum(slab.charged_bytes for slab in self.slabs)

    def bytes_by_owner(self) -> dict[str, int]:
        """Return exact bytes summed by owner, in first-seen order."""
        owners: dict[str, int] = {}
        for slab in self.slabs:
            owners[slab.owner] = owners.get(slab.owner, 0) + slab.span_bytes
        return owners


def pool_slabs(pool: PoolConfig, *, blocks: int, rows: int) -> tuple[Slab, ...]:
    """Return the slabs of one pool: its planes in ordinal order, then its block table (C, L).  (C11.1)"""
    planes = tuple(
        Slab(f"pool {pool.name}", f"{pool.name}.{plane.layer}.{plane.role}", plane.shape, plane.dtype, plane)
        for plane in pool.planes
    )
    table = Slab("block tables", f"{pool.name}.block_table", (rows, blocks), np.dtype(np.int32))
    return (*planes, table)


def build_layout(config: StoreConfig) -> StoreLayout:
    """Return every slab that a store of this configuration allocates."""
    slabs: list[Slab] = []
    for pool in config.pools:
        slabs.extend(pool_slabs(pool, blocks=config.blocks, rows=config.max_concurrency))
    return StoreLayout(tuple(slabs))
