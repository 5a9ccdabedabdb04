"""Planes: one K, V, code or scale slab of one layer, and the address of every byte in it.

    page-major   (N, H, P, X)        head-major   (H, N, P, X)          NumPy order; x is fastest

    +-- page group 0 ----------------+-- page group 1 ---        +-- head 0 --------------------+-- head 1 ...
    | head 0        | head 1         | head 0                    | page 0      | page 1         | page 0
    | o=0 o=1 .. 63 | o=0 ..         |                           | o=0 .. o=63 | o=0 ..         |

    byte(x, o, h, g) = base + x*nb0 + o*nb1 + h*nb_head + g*nb_page       (C3.7, C3.8)

Position p lives in block p >> 6 at offset p & 63; `g = table[row, block]` is the same in every
plane of a pool (C3.5, C3.9).  Example: page-major BF16, D = 128, H = 8: nb1 = 256, nb_head = 16,384,
nb_page = 131,072; position 70 of head 2 in page group 5 starts at 5*131072 + 2*16384 + 6*256.

A page group on the Host, or on its way, is one record of the pool, whatever the page order of its planes (C5.7, C8.1):

    [ plane 0: head 0 | head 1 | ... | pad to 256 ][ plane 1 | pad ] ...        planes in ordinal order (C4.2)

Every record of a pool has the same size, a multiple of 256; so of n records in a row each can be kept or freed alone.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from pagedkv.values.profiles import Profile, Role, plane_schema
from pagedkv.values.quantities import PAGE_TOKENS, SLAB_ALIGN_BYTES, align_up

PageOrder = Literal["page-major", "head-major"]


@dataclass(frozen=True)
class PlaneGeometry:
    """One plane: role, layer, element dtype, leading extent X, kv_heads H, pages N and page order."""

    role: Role
    layer: int
    dtype: np.dtype[np.generic]
    extent: int
    kv_heads: int
    pages: int
    order: PageOrder

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """NumPy shape: (N, H, P, X) page-major, (H, N, P, X) head-major."""
        if self.order == "page-major":
            return (self.pages, self.kv_heads, PAGE_TOKENS, self.extent)
        return (self.kv_heads, self.pages, PAGE_TOKENS, self.extent)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token and KV head (the stride nb1)."""
        return self.extent * self.dtype.itemsize

    @property
    def head_stride_bytes(self) -> int:
        """Distance between two KV heads of one page group."""
        block_bytes = PAGE_TOKENS * self.row_bytes
        return block_bytes if self.order == "page-major" else self.pages * block_bytes

    @property
    def page_stride_bytes(self) -> int:
        """Distance between two page groups of one KV head."""
        block_bytes = PAGE_TOKENS * self.row_bytes
        return self.kv_heads * block_bytes if self.order == "page-major" else block_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all KV heads."""
        return self.kv_heads * self.row_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page group in this plane.  (C3.11)"""
        return PAGE_TOKENS * self.token_bytes

    @property
    def span_bytes(self) -> int:
        """Exact bytes of the whole slab."""
        return self.pages * self.page_bytes


def plane_inventory(
    profile: str | Profile, *, layers: int, kv_heads: int, head_dim: int, pages: int, order: PageOrder
) -> tuple[PlaneGeometry, ...]:
    """Return every plane of a pool, layer by layer, K code, V code, K scale, V scale.  (C4.2)"""
    schema = plane_schema(profile, head_dim)
    return tuple(
        PlaneGeometry(plane.role, layer, plane.dtype, plane.extent, kv_heads, pages, order)
        for layer in range(layers)
        for plane in schema
    )


@dataclass(frozen=True)
class PageRecord:
    """Layout of one page group outside its planes.  (C8.1)

    Attributes:
        planes: the planes' geometry, in ordinal order.
        offsets_bytes: where the payload of each plane begins: (H, 64, X); multiples of 256.
        total_bytes: the end of the last payload, padding included.
    """

    planes: tuple[PlaneGeometry, ...]
    offsets_bytes: tuple[int, ...] = field(init=False)
    total_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        sizes = [align_up(plane.page_bytes, SLAB_ALIGN_BYTES) for plane in self.planes]
        ends = tuple(itertools.accumulate(sizes, initial=0))
        object.__setattr__(self, "offsets_bytes", ends[:-1])
        object.__setattr__(self, "total_bytes", ends[-1])
