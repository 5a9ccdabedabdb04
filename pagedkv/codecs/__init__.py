"""The reference codec: which bytes a K or V row becomes, and which numbers those bytes mean.  (C4.4)

`pagedkv/codecs.md` says the bytes.  This package is that text in NumPy: kernels are compared with it, byte for byte.
No other part of the library uses it.

    rows      rows of a profile to code and scale bytes, and back; rotation
    formats   numbers of BF16, E4M3FN and E2M1 to codes, and back
"""

from __future__ import annotations

from pagedkv.codecs.formats import (
    bf16_to_f32,
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    f32_to_bf16,
    pack_pairs,
    unpack_pairs,
)
from pagedkv.codecs.rows import CodecCounts, Kind, decode, encode, encode_unrotated, rotate

__all__ = [
    "CodecCounts",
    "Kind",
    "bf16_to_f32",
    "decode",
    "e2m1_decode",
    "e2m1_encode",
    "e4m3_decode",
    "e4m3_encode",
    "encode",
    "encode_unrotated",
    "f32_to_bf16",
    "pack_pairs",
    "rotate",
    "unpack_pairs",
]
