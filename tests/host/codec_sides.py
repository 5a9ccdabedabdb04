"""The two vectors of each profile, and those that share a format.  (C4)"""

from __future__ import annotations

from typing import TypeAlias

from pagedkv.codecs import Kind

Side: TypeAlias = tuple[str, Kind]
"""A profile and one of its two vectors."""

INT8_SIDES: list[Side] = [("int8-g64", "k"), ("int8-g64", "v")]
FP8_SIDES: list[Side] = [("fp8-e4m3-row", "k"), ("fp8-e4m3-row", "v"), ("k8v4", "k")]
FP4_SIDES: list[Side] = [("nvfp4-g16", "k"), ("nvfp4-g16", "v"), ("k8v4", "v")]
QUANTIZED_SIDES = [*INT8_SIDES, *FP8_SIDES, *FP4_SIDES]
SIDES: list[Side] = [("bf16", "k"), ("bf16", "v"), *QUANTIZED_SIDES]
ROTATED_SIDES: list[Side] = [("fp8-e4m3-row", "k"), ("k8v4", "k"), *FP4_SIDES]

INT8: Side = ("int8-g64", "k")
FP8: Side = ("fp8-e4m3-row", "v")
FP4: Side = ("nvfp4-g16", "k")
