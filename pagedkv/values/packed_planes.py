"""PackedPlanes: how n page groups of a pool lie side by side when they leave their planes.  (C5.7, C8.1)

    [ plane 0: n pages | pad to 256 ][ plane 1: n pages | pad ] ...         planes in ordinal order (C4.2)

Pages are in logical order, without holes and without device ids.  Within its part a plane keeps its own page
order, with n in place of N; so a run of adjacent pages is one copy on both sides (one per head if head-major).
Host extents and the staging of transfers use this layout alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pagedkv.errors import MisuseError
from pagedkv.values.planes import PlaneGeometry
from pagedkv.values.quantities import SLAB_ALIGN_BYTES, align_up


@dataclass(frozen=True)
class PackedPlanes:
    """Layout of `pages` packed page groups of the given planes.

    Attributes:
        planes: the planes' geometry with N = pages, in the order given.
        offsets_bytes: where each plane's part begins; multiples of 256.
        total_bytes: the end of the last part, padding included.

    Raises:
        MisuseError: no page.
    """

    planes: tuple[PlaneGeometry, ...]
    pages: int
    offsets_bytes: tuple[int, ...] = field(init=False)
    total_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        if type(self.pages) is not int or self.pages < 1:
            raise MisuseError("a packed layout", expected="at least one page", got=repr(self.pages),
                              remedy="move nothing when there is nothing to move", clause="C8.1")
        packed = tuple(replace(plane, pages=self.pages) for plane in self.planes)
        offsets, end = [], 0
        for plane in packed:
            offsets.append(end)
            end += align_up(plane.span_bytes, SLAB_ALIGN_BYTES)
        object.__setattr__(self, "planes", packed)
        object.__setattr__(self, "offsets_bytes", tuple(offsets))
        object.__setattr__(self, "total_bytes", end)
