"""The closed set of profiles, its byte table and the order of planes.  (C4)"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pagedkv.errors import ConfigError
from pagedkv.values.profiles import PROFILES, Profile, plane_schema, resolve_profile
from tests.host.refusals import refused

NAMES = ("bf16", "int8-g64", "fp8-e4m3-row", "nvfp4-g16", "k8v4")


def supported_head_dims(name: str) -> list[int]:
    return list(range(16, 257, 16)) if name == "bf16" else [64, 128, 256]


SUPPORTED = [(name, head_dim) for name in NAMES for head_dim in supported_head_dims(name)]


def test_the_set_is_closed() -> None:
    """Five profiles, in the order of the table, which resolve to themselves and print as their names.  (C4.1)"""
    assert tuple(PROFILES) == NAMES
    assert [profile.name for profile in PROFILES.values()] == list(NAMES)
    assert [resolve_profile(profile) is profile for profile in PROFILES.values()] == [True] * 5
    assert [str(profile) for profile in PROFILES.values()] == list(NAMES)


@pytest.mark.parametrize(("name", "key_bytes", "value_bytes", "bytes_at_64", "bytes_at_128"), [
    ("bf16", 512, 512, 256, 512), ("int8-g64", 264, 264, 132, 264), ("fp8-e4m3-row", 258, 258, 132, 260),
    ("nvfp4-g16", 144, 144, 72, 144), ("k8v4", 258, 144, 102, 202)
])  # fmt: skip
def test_bytes_of_a_token_and_head_are_those_of_the_table(
    name: str, key_bytes: int, value_bytes: int, bytes_at_64: int, bytes_at_128: int
) -> None:
    """K and V at D = 256; a row scale does not shrink with D, so bytes are no ratio.  (C4 table, C4.2)"""
    of_side = [sum(plane.row_bytes for plane in plane_schema(name, 256) if plane.role[0] == side) for side in "kv"]

    assert of_side == [key_bytes, value_bytes]
    assert [sum(plane.row_bytes for plane in plane_schema(name, d)) for d in (64, 128)] == [bytes_at_64, bytes_at_128]


@pytest.mark.parametrize(("name", "expected"), [
    ("bf16", [("uint16", 256), ("uint16", 256)]),
    ("int8-g64", [("int8", 256), ("int8", 256), ("uint16", 4), ("uint16", 4)]),
    ("fp8-e4m3-row", [("uint8", 256), ("uint8", 256), ("uint16", 1), ("uint16", 1)]),
    ("nvfp4-g16", [("uint8", 128), ("uint8", 128), ("uint8", 16), ("uint8", 16)]),
    ("k8v4", [("uint8", 256), ("uint8", 128), ("uint16", 1), ("uint8", 16)]),
])
def test_planes_stand_in_ordinal_order(name: str, expected: list[tuple[str, int]]) -> None:
    """K code, V code, K scale, V scale, each with its own dtype and leading extent.  (C4.2, C4 table)"""
    planes = plane_schema(name, 256)

    assert [plane.role for plane in planes] == ["k_code", "v_code", "k_scale", "v_scale"][: len(expected)]
    assert [(plane.dtype.name, plane.extent) for plane in planes] == expected


@pytest.mark.parametrize(("name", "head_dim"), SUPPORTED)
def test_code_rows_start_16_byte_aligned(name: str, head_dim: int) -> None:
    """Every row that a kernel reads with 16-byte loads is a whole number of them.  (C3.10)"""
    codes = [plane for plane in plane_schema(name, head_dim) if plane.role.endswith("code")]

    assert [plane.row_bytes % 16 for plane in codes] == [0, 0]


@pytest.mark.parametrize(("name", "head_dim"), SUPPORTED)
def test_the_last_dim_of_a_row_has_its_own_code_and_scale(name: str, head_dim: int) -> None:
    """x is the plane's own coordinate: d, d >> 1, d/64, 0 or d/16; dim D - 1 is the last of each.  (C3.8)"""
    profile = PROFILES[name]
    planes = {plane.role: plane for plane in plane_schema(name, head_dim)}

    for side, kept in (("k", profile.k), ("v", profile.v)):
        last = head_dim - 1
        assert planes[f"{side}_code"].extent - 1 == last // kept.values_per_code  # type: ignore[index]
        if kept.scale_dtype is not None:
            expected = last // kept.scale_dims if kept.scale_dims else 0
            assert planes[f"{side}_scale"].extent - 1 == expected  # type: ignore[index]


@pytest.mark.parametrize(("alias", "name"), [
    ("BF16", "bf16"), ("INT8-G64", "int8-g64"), ("FP8-E4M3FN-row256", "fp8-e4m3-row"), ("NVFP4-G16", "nvfp4-g16"),
    ("K8V4", "k8v4"), ("nvfp4-G16", "nvfp4-g16")
])  # fmt: skip
def test_aliases_name_the_same_profile(alias: str, name: str) -> None:
    """Aliases are accepted on input, in any letter case.  (C0)"""
    assert resolve_profile(alias) is PROFILES[name]


def test_only_quantized_profiles_have_scales_and_only_fp8_and_fp4_keys_are_rotated() -> None:
    """bf16 keeps bits; fp8 rotates K, nvfp4 and k8v4 rotate both.  (C4, codecs 1)"""
    assert [profile.is_quantized for profile in PROFILES.values()] == [False, True, True, True, True]
    assert [profile.rotates_k for profile in PROFILES.values()] == [False, False, True, True, True]
    assert [profile.rotates_v for profile in PROFILES.values()] == [False, False, False, True, True]


@pytest.mark.parametrize("name", ["", "fp16", "bf-16", "k4v8", None, 16])
def test_a_name_outside_the_set_is_refused_with_the_set(name: str) -> None:
    """`k8v4` is not a run-time mix of widths.  (C4.1)"""
    with refused(ConfigError, "C4.1", match="bf16, int8-g64, fp8-e4m3-row, nvfp4-g16, k8v4"):
        resolve_profile(name)


def test_a_profile_made_by_hand_is_not_in_the_set() -> None:
    """Equal or not, only the members themselves are profiles.  (C4.1)"""
    mixed = Profile("k8v4", PROFILES["bf16"].k, PROFILES["bf16"].v, rotates_k=False, rotates_v=False)

    with refused(ConfigError, "C4.1"):
        resolve_profile(mixed)
    with refused(ConfigError, "C4.1"):
        resolve_profile(dataclasses.replace(PROFILES["bf16"]))


@pytest.mark.parametrize("head_dim", [0, 8, 15, 17, 24, 257, 272, -16, 64.0, True, np.int64(64)])
def test_head_dims_of_bf16_are_multiples_of_16_up_to_256(head_dim: int) -> None:
    """Anything else is refused with the reason.  (C4.5)"""
    with refused(ConfigError, "C4.5", match="multiple of 16 from 16 to 256"):
        plane_schema("bf16", head_dim)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "bf16"])
@pytest.mark.parametrize("head_dim", [16, 32, 80, 96, 192, 255, 512])
def test_head_dims_of_quantized_profiles_are_64_128_and_256(name: str, head_dim: int) -> None:
    """A head_dim that bf16 serves is not one for every profile.  (C4.5)"""
    with refused(ConfigError, "C4.5", match="64, 128 or 256"):
        plane_schema(name, head_dim)
