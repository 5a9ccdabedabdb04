"""Storage profiles: the closed set of formats in which K and V rows are stored.  (C4)

A profile names four plane roles.  Per token and KV head, for head_dim D:

    profile         k_code        v_code        k_scale        v_scale
    bf16            BF16 [D]      BF16 [D]      -              -
    int8-g64        I8   [D]      I8   [D]      FP16 [D/64]    FP16 [D/64]
    fp8-e4m3-row    E4M3 [D]      E4M3 [D]      FP16 [1]       FP16 [1]
    nvfp4-g16       E2M1 [D/2]    E2M1 [D/2]    E4M3 [D/16]    E4M3 [D/16]
    k8v4            E4M3 [D]      E2M1 [D/2]    FP16 [1]       E4M3 [D/16]

`plane_schema` is the one function that resolves (profile, head_dim); every byte count in the
library is a sum over its result (C4.2).  The order K code, V code, K scale, V scale is the
plane ordinal of pools, host pages and transfers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from pagedkv.errors import ConfigError, shown

Role = Literal["k_code", "v_code", "k_scale", "v_scale"]
ROLES: tuple[Role, ...] = ("k_code", "v_code", "k_scale", "v_scale")

CODEC_EVENTS = ("saturated", "nonfinite", "zero_groups")
"""What appends count, in the order of the counters; a group is 64 dims (int8), a row (fp8) or 16 dims (fp4).

saturated: the largest magnitude is beyond the largest scale.  nonfinite: stored with a NaN or infinite scale.
zero_groups: stored with scale zero.  Codecs 8 names the first two.
"""

HEAD_DIMS_BF16 = tuple(range(16, 257, 16))
HEAD_DIMS_QUANTIZED = (64, 128, 256)
HEAD_DIMS_CONTEXT = (64, 128)
"""Of `context_attention`, so of a Draft Full pool (C14.4)."""
QUERY_GROUP_MAX = 16
KV_HEADS_MAX = 4096
QUERY_HEADS_MAX = KV_HEADS_MAX * QUERY_GROUP_MAX


@dataclass(frozen=True)
class Format:
    """How one vector is stored: a code and, when quantized, a scale for every `scale_dims` values.

    `values_per_code` is 2 for packed E2M1; `scale_dims` 0 means one scale for the whole row.
    """

    code_dtype: np.dtype[np.generic]
    values_per_code: int
    scale_dtype: np.dtype[np.generic] | None
    scale_dims: int


BF16_FORMAT = Format(np.dtype(np.uint16), 1, None, 0)
INT8_FORMAT = Format(np.dtype(np.int8), 1, np.dtype(np.uint16), 64)
FP8_FORMAT = Format(np.dtype(np.uint8), 1, np.dtype(np.uint16), 0)
FP4_FORMAT = Format(np.dtype(np.uint8), 2, np.dtype(np.uint8), 16)


@dataclass(frozen=True)
class Profile:
    """One storage profile: the formats of K and V, and which of them is rotated first (codecs 1)."""

    name: str
    k: Format
    v: Format
    rotates_k: bool
    rotates_v: bool

    @property
    def is_quantized(self) -> bool:
        """Whether the profile has scale planes."""
        return self.k.scale_dtype is not None

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> str | tuple[object, ...]:
        """Copy and unpickle a profile of the set as itself, so that a configuration crosses a process boundary."""
        if any(known is self for known in PROFILES.values()):
            return resolve_profile, (self.name,)
        return super().__reduce__()


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("bf16", BF16_FORMAT, BF16_FORMAT, rotates_k=False, rotates_v=False),
        Profile("int8-g64", INT8_FORMAT, INT8_FORMAT, rotates_k=False, rotates_v=False),
        Profile("fp8-e4m3-row", FP8_FORMAT, FP8_FORMAT, rotates_k=True, rotates_v=False),
        Profile("nvfp4-g16", FP4_FORMAT, FP4_FORMAT, rotates_k=True, rotates_v=True),
        Profile("k8v4", FP8_FORMAT, FP4_FORMAT, rotates_k=True, rotates_v=True),
    )
}

_ALIASES: dict[str, str] = {"fp8-e4m3fn-row256": "fp8-e4m3-row"}


@dataclass(frozen=True)
class PlaneRole:
    """One plane of a layer: its role, the dtype of one element and its leading extent X."""

    role: Role
    dtype: np.dtype[np.generic]
    extent: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one token and KV head in this plane."""
        return self.extent * self.dtype.itemsize


def resolve_profile(profile: str | Profile) -> Profile:
    """Return the profile of that name or alias, in any letter case; refuse any other.  (C0, C4)"""
    if isinstance(profile, Profile):
        if any(known is profile for known in PROFILES.values()):
            return profile
    elif isinstance(profile, str):
        name = profile.lower()
        named = PROFILES.get(_ALIASES.get(name, name))
        if named is not None:
            return named
    raise ConfigError(
        "the storage profile", expected="one of " + ", ".join(PROFILES), got=shown(profile),
        remedy="choose a profile of the closed set", clause="C4.1",
    )


def check_head_dim(profile: Profile, head_dim: int) -> None:
    """Refuse a head_dim that the profile does not support.  (C4.5)"""
    allowed = HEAD_DIMS_QUANTIZED if profile.is_quantized else HEAD_DIMS_BF16
    if type(head_dim) is not int or head_dim not in allowed:
        expected = "64, 128 or 256" if profile.is_quantized else "a multiple of 16 from 16 to 256"
        raise ConfigError(
            f"head_dim of profile {profile.name}", expected=expected, got=shown(head_dim),
            remedy="use a supported head_dim or profile bf16", clause="C4.5",
        )


def check_heads(query_heads: int, kv_heads: int) -> None:
    """Refuse a group of query heads per KV head that no kernel serves; both are positive integers.  (C4.5)"""
    if query_heads % kv_heads or query_heads // kv_heads > QUERY_GROUP_MAX:
        raise ConfigError(
            "the head geometry", expected=f"query_heads = kv_heads times 1 to {QUERY_GROUP_MAX}",
            got=f"{query_heads} query heads over {kv_heads} KV heads", remedy="use a supported group size",
            clause="C4.5",
        )


def plane_schema(profile: str | Profile, head_dim: int) -> tuple[PlaneRole, ...]:
    """Return the planes of one layer in ordinal order: K code, V code, K scale, V scale.  (C4.2)"""
    resolved = resolve_profile(profile)
    check_head_dim(resolved, head_dim)

    sides: tuple[tuple[Role, Role, Format], ...] = (
        ("k_code", "k_scale", resolved.k), ("v_code", "v_scale", resolved.v),
    )
    planes = [PlaneRole(code, form.code_dtype, head_dim // form.values_per_code) for code, _, form in sides]
    for _, scale, form in sides:
        if form.scale_dtype is not None:
            planes.append(PlaneRole(scale, form.scale_dtype, head_dim // form.scale_dims if form.scale_dims else 1))
    return tuple(planes)
