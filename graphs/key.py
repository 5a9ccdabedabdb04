"""GraphKey: the shape by which a graph is looked up, and nothing else.  (C15.2)

Page ids, request identity, lengths and contiguity are no part of the key: one graph serves every legal content
of its shape, because the device reads the live lengths (C15.3).
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

    A draft unit passes the pool in which it attends, so that target and draft never share a graph (C3.3, C15.2).

    Raises:
        MisuseError: the store has no such pool.
    """
    profile, geometry = str(config.profile), config.geometry
    if pool != "main":
        pools = {enabled.name: enabled for enabled in config.pools}
        if not isinstance(pool, str) or pool not in pools:
            raise pk.MisuseError(f"a key of pool {pool!r}", expected=f"one of {list(pools)}",
                                 got=repr(pool), remedy="name an enabled pool", clause="C3.3")
        profile, geometry = pools[pool].profile.name, pools[pool].geometry
    return GraphKey(
        unit=unit, route=route, batch=batch, width=width, is_masked=True, profile=profile, geometry=geometry,
        max_context=config.max_context, scale=geometry.head_dim**-0.5,
    )
