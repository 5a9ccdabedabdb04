"""GraphKey: the shape by which a graph is looked up, and nothing else.  (C15.2)

Page ids, request identity, lengths and contiguity are no part of the key: one graph serves every legal content
of its shape, because the device reads the live lengths (C15.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import pagedkv as pk

EXTENT_MAX = 1 << 30
"""Beyond every B, W and max_context of a store."""

SCALE_MAX = 1e38
"""As `causal_attention` takes it: dot(q, k) times it stays a finite float."""


@dataclass(frozen=True)
class GraphKey:
    """One shape: unit name, pool, route, B, W, dense or masked, profile, geometry and score scale.

    `scale` is frozen at capture (C14.4); `max_context` sizes the launch.  `pool` is the pool in which the unit attends:
    pools of equal geometry have their own frontiers and tables.

    Raises:
        MisuseError: a field of another type, a count below 1, or a scale that is not finite.
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
    pool: str = "main"

    def __post_init__(self) -> None:
        types = {"unit": str, "route": str, "profile": str, "pool": str, "is_masked": bool, "geometry": pk.KVGeometry,
                 "scale": float}
        for name, kind in types.items():
            if type(value := getattr(self, name)) is not kind:
                raise pk.MisuseError(f"{name} of a graph key", expected=f"a {kind.__name__}",
                                     got=pk.checks.shown(value), remedy="build the key with key_for", clause="C15.2")
        for name in ("batch", "width", "max_context"):
            pk.checks.checked_integer(f"{name} of a graph key", getattr(self, name), 1, EXTENT_MAX,
                                      remedy="build the key with key_for", clause="C15.2")
        pk.checks.checked_number("scale of a graph key", self.scale, SCALE_MAX, remedy="build the key with key_for",
                                 clause="C15.2")

    def __str__(self) -> str:
        mask = "masked" if self.is_masked else "dense"
        pool = "" if self.pool == "main" else f" in {self.pool}"
        return f"{self.unit}/{self.route}{pool} B={self.batch} W={self.width} {mask} {self.profile}"


def key_for(
    config: pk.StoreConfig, *, unit: str, route: pk.Route, batch: int, width: int, pool: str = "main"
) -> GraphKey:
    """Return the key of a masked unit of one pool's profile and geometry, with the default scale.

    A draft unit passes the pool in which it attends, so that target and draft never share a graph (C3.3, C15.2).

    Raises:
        MisuseError: no configuration, one without such a pool, or a field that `GraphKey` refuses.
    """
    shown = pk.checks.shown
    if not isinstance(config, pk.StoreConfig):
        raise pk.MisuseError("a key", expected="a StoreConfig", got=shown(config), remedy="pass store.config",
                             clause="C15.2")
    profile, geometry = config.resolved_profile.name, config.geometry
    if type(pool) is not str or pool != "main":
        pools = {enabled.name: enabled for enabled in config.pools}
        if not isinstance(pool, str) or pool not in pools:
            raise pk.MisuseError(f"a key of pool {shown(pool)}", expected=f"one of {list(pools)}",
                                 got=shown(pool), remedy="name an enabled pool", clause="C3.3")
        profile, geometry = pools[pool].profile.name, pools[pool].geometry
    return GraphKey(
        unit=unit, route=route, batch=batch, width=width, is_masked=True, profile=profile, geometry=geometry,
        max_context=config.max_context, scale=geometry.head_dim**-0.5, pool=pool,
    )
