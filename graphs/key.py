"""GraphKey: what a captured graph is looked up by.  Shape, and nothing else.  (C15.2)

Page ids, request identity, lengths and contiguity never enter: one graph serves every legal content
of its shape, because live lengths are read on the device (C15.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import pagedkv as pk


@dataclass(frozen=True)
class GraphKey:
    """One shape: unit name, route, B, W, dense or masked, profile, geometry and score scale.

    `scale` is frozen at capture (C14.4); `max_context` sizes the launch.
    """

    unit: str
    route: pk.Route
    batch: int
    width: int
    is_masked: bool
    profile: str
    geometry: pk.KVGeometry
    max_context: int
    scale: float

    def __str__(self) -> str:
        mask = "masked" if self.is_masked else "dense"
        return f"{self.unit}/{self.route} B={self.batch} W={self.width} {mask} {self.profile}"


def key_for(
    config: pk.StoreConfig, *, unit: str, route: pk.Route, batch: int, width: int, pool: str = "main"
) -> GraphKey:
    """Return the key of a masked unit of one pool's profile and geometry, with the default scale.

    A draft unit names the pool that it attends in, so that target and draft never share a graph (C3.3, C15.2).

    Raises:
        MisuseError: the store has no such pool.
    """
    profile, geometry = str(config.profile), config.geometry
    if pool != "main":  # every step asks for a key of Main
        found = next((known for known in config.pools if known.name == pool), None)
        if found is None:
            raise pk.MisuseError(f"a key of pool {pool!r}", expected=f"one of {[own.name for own in config.pools]}",
                                 got=repr(pool), remedy="name an enabled pool", clause="C3.3")
        profile, geometry = found.profile.name, found.geometry
    return GraphKey(
        unit=unit, route=route, batch=batch, width=width, is_masked=True, profile=profile, geometry=geometry,
        max_context=config.max_context, scale=geometry.head_dim**-0.5,
    )
