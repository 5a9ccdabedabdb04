"""Rows of a profile: BF16 values to code and scale bytes, and bytes back to values.  (C4.4, codecs 1-8)

A *row* is the D values of one token and one KV head; N rows are encoded at once and none depends on another.

    format  group      scale                             code                       decode
    bf16    -          none                              the 16 bits themselves     exact
    int8    64 dims    FP16 of A / 127                   RNE(x * fl(1 / S))         code * S
    fp8     the row    FP16 of A / 448, >= 2^-24         E4M3FN(x * fl(1 / S))      value(code) * S
    fp4     16 dims    E4M3 of A / 6, in [2^-9, 448]     E2M1(x / S)                value(code) * S

A is the largest magnitude of the group and S the stored scale as a number.  `fl` is one rounding to FP32: every
NumPy ufunc below is one IEEE operation on float32 arrays, so each line is one `fl`.  Where a profile rotates, the
row is first multiplied by the Hadamard matrix over sqrt(D), and decoding returns the *rotated* row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv.codecs.formats import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_NAN_CODE,
    BitsArray,
    BytesArray,
    FloatArray,
    bf16_to_f32,
    check_dtype,
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    pack_pairs,
    unpack_pairs,
)
from pagedkv.errors import MisuseError, shown
from pagedkv.values.profiles import (
    BF16_FORMAT,
    FP4_FORMAT,
    FP8_FORMAT,
    HEAD_DIMS_QUANTIZED,
    INT8_FORMAT,
    Format,
    Profile,
    plane_schema,
    resolve_profile,
)

Kind: TypeAlias = Literal["k", "v"]
MaskArray: TypeAlias = npt.NDArray[np.bool_]

INT8_MAX: Final = np.float32(127.0)
FP16_TINY: Final = np.float32(2.0**-24)
FP16_MAX: Final = np.float32(65504.0)
FP16_NAN_BITS: Final = 0x7E00
E4M3_TINY: Final = np.float32(2.0**-9)
FP8_DOMAIN_MAX: Final = np.float32(448.0 * 65504.0)
FP4_DOMAIN_MAX: Final = np.float32(6.0 * 448.0)

ROTATION_FACTORS: Final[dict[int, np.float32]] = {
    64: np.float32(0.125),
    128: np.float32(float.fromhex("0x1.6a09e6p-4")),
    256: np.float32(0.0625),
}
"""The factor c of codecs 1 by head_dim; at 128 it is fl(1 / sqrt(128)), the float32 of bits 0x3DB504F3."""

assert int(ROTATION_FACTORS[128].view(np.uint32)) == 0x3DB504F3, "codecs 1 gives the factor by its bits"
assert tuple(ROTATION_FACTORS) == HEAD_DIMS_QUANTIZED, "every quantized head_dim can be rotated (C4.5)"
assert float(FP8_DOMAIN_MAX) == 448.0 * 65504.0, "the limit of codecs 8 is exact in FP32, so A > limit is exact"
assert all(head_dim % 64 == 0 for head_dim in HEAD_DIMS_QUANTIZED), "groups of 16 and 64 never straddle a row"


@dataclass
class CodecCounts:
    """Groups that encoders met beyond ordinary ones; a group is 64 dims (int8), a row (fp8) or 16 dims (fp4).

    Every `encode` adds to the object that it is given; the bf16 profile has no groups and adds nothing.  (codecs 8)
    """

    saturated: int = 0
    """Groups whose largest magnitude is beyond the format's largest scale: fp8 A > 448 * 65504, fp4 A > 2688."""
    nonfinite: int = 0
    """Groups stored with a NaN or infinite scale and zero codes."""
    zero_groups: int = 0
    """Groups stored with scale zero and zero codes (int8 includes A so small that its scale rounds to zero)."""


# ---- entry points ----------------------------------------------------------------------------------------------


def encode(
    profile: str | Profile, kind: Kind, rows: BitsArray, *, counts: CodecCounts | None = None
) -> tuple[BytesArray, BytesArray | None]:
    """Return the code and scale bytes of N BF16 rows, rotated first where the profile says so.  (C4.4, codecs 1-5)

    Args:
        profile: a profile, its name or an alias.
        rows: (N, D) uint16, BF16 bits, C-contiguous, host; any N >= 0.
        counts: added to, when given.
    Returns:
        code (N, code bytes) uint8 and scale (N, scale bytes) uint8, little-endian; scale is None for bf16.
    Raises:
        ConfigError: unknown profile, or a head_dim that it does not support.
        MisuseError: rows of another dtype, rank or contiguity, or an unknown kind.
    """
    resolved, row_format = _resolve(profile, kind)
    _check_matrix(rows, np.uint16, f"encoding BF16 rows with profile {resolved.name}", "codecs 1")
    plane_schema(resolved, int(rows.shape[1]))
    if row_format == BF16_FORMAT:
        return _bytes_of(rows.copy()), None
    values = bf16_to_f32(rows)
    if resolved.rotates_k if kind == "k" else resolved.rotates_v:
        values = rotate(values)
    return _encode_values(row_format, values, counts)


def encode_unrotated(
    profile: str | Profile, kind: Kind, values: FloatArray, *, counts: CodecCounts | None = None
) -> tuple[BytesArray, BytesArray | None]:
    """Return the code and scale bytes of N rows of values that are taken as already rotated.  (codecs 6)

    The entry of encoder tests: a rotation would hide the edges that they aim at.

    Args:
        values: (N, D) float32, C-contiguous, host: the "x" of codecs 3-5 and 8.
    Returns:
        As `encode`.
    Raises:
        As `encode`; for bf16 also MisuseError for a value that is not a BF16 number, since that profile copies bits
        and rounds nothing (codecs 2).
    """
    resolved, row_format = _resolve(profile, kind)
    _check_matrix(values, np.float32, f"encoding values with profile {resolved.name}", "codecs 6")
    plane_schema(resolved, int(values.shape[1]))
    if row_format != BF16_FORMAT:
        return _encode_values(row_format, values, counts)
    bits = values.view(np.uint32)
    inexact = np.count_nonzero(bits & np.uint32(0xFFFF))
    if inexact:
        raise MisuseError("encoding values with profile bf16",
                          expected="BF16 numbers (low 16 bits of each float32 zero)",
                          got=f"{inexact} of {bits.size} values that are not",
                          remedy="round them with f32_to_bf16 first", clause="codecs 2", inexact_count=int(inexact))
    return _bytes_of((bits >> np.uint32(16)).astype(np.uint16)), None


def decode(
    profile: str | Profile, kind: Kind, code: BytesArray, scale: BytesArray | None, head_dim: int
) -> FloatArray:
    """Return the numbers that N stored rows mean, in the stored basis: rotated where the profile rotates.  (codecs 2-5)

    Every product of a code and its scale is exact in FP32.  A NaN or infinite scale decodes to NaN (codecs 8).

    Args:
        code: (N, code bytes) uint8, C-contiguous, host, as `encode` returns it.
        scale: (N, scale bytes) uint8, C-contiguous, host; None for bf16 and for bf16 only.
    Returns:
        (N, D) float32.
    Raises:
        ConfigError: unknown profile, or a head_dim that it does not support.
        MisuseError: bytes of another dtype, shape or contiguity, or an unknown kind.
    """
    resolved, row_format = _resolve(profile, kind)
    row_bytes: dict[str, int] = {plane.role: plane.row_bytes for plane in plane_schema(resolved, head_dim)}
    _check_bytes(resolved, f"{kind}_code", code, row_bytes.get(f"{kind}_code"), None)
    _check_bytes(resolved, f"{kind}_scale", scale, row_bytes.get(f"{kind}_scale"), len(code))
    with np.errstate(all="ignore"):
        if row_format == BF16_FORMAT or scale is None:
            return bf16_to_f32(code.view("<u2").astype(np.uint16, copy=False))
        if row_format == FP4_FORMAT:
            return _scaled(e2m1_decode(unpack_pairs(code)), e4m3_decode(scale))
        numbers = code.view(np.int8).astype(np.float32) if row_format == INT8_FORMAT else e4m3_decode(code)
        return _scaled(numbers, scale.view("<f2").astype(np.float32))


def rotate(values: FloatArray) -> FloatArray:
    """Return R x for each row x, with the rounding order that decides code bytes.  (codecs 1)

    R is the natural-order Hadamard matrix over sqrt(D): symmetric, and its own inverse but for rounding.

    Args:
        values: (N, D) float32, C-contiguous, host; D in {64, 128, 256}.  Not changed.
    Raises:
        MisuseError: another dtype, rank, contiguity or D.
    """
    _check_matrix(values, np.float32, "values to be rotated", "codecs 1")
    rows_count, head_dim = values.shape
    factor = ROTATION_FACTORS.get(head_dim)
    if factor is None:
        raise MisuseError("rotation", expected="rows of 64, 128 or 256 values", got=f"rows of {head_dim}",
                          remedy="rotate whole rows of a quantized profile", clause="codecs 1", head_dim=head_dim)
    z = values
    with np.errstate(all="ignore"):
        stride = 1
        while stride < head_dim:
            # Dim i = 2 * stride * block + stride * half + offset: the pair (i, i + stride) differs in `half` only.
            pairs = z.reshape(rows_count, head_dim // (2 * stride), 2, stride)
            z = np.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), axis=2)
            stride *= 2
        return (z * factor).reshape(rows_count, head_dim)


# ---- formats: one group of values to one scale and its codes -----------------------------------------------------


@dataclass(frozen=True)
class _Groups:
    """N rows split into G groups of a format; non-finite groups hold zeros, so that no arithmetic meets them."""

    values: FloatArray
    """(N, G, dims) float32."""
    largest: FloatArray
    """(N, G) float32: A, the largest magnitude; 0 in non-finite groups."""
    nonfinite: MaskArray
    """(N, G): groups in which any value is NaN or infinite, decided here and not by how a maximum treats NaN."""


def _split(values: FloatArray, group_dims: int) -> _Groups:
    rows_count, head_dim = values.shape
    groups = values.reshape(rows_count, head_dim // group_dims, group_dims)
    nonfinite: MaskArray = np.logical_not(np.isfinite(groups).all(axis=2))
    groups = np.where(nonfinite[:, :, np.newaxis], np.float32(0), groups)
    return _Groups(groups, np.abs(groups).max(axis=2), nonfinite)


def _encode_int8(values: FloatArray, counts: CodecCounts) -> tuple[BytesArray, BytesArray]:
    """Encode per codecs 3; a scale that rounds to FP16 infinity is stored with zero codes (codecs 8)."""
    groups = _split(values, INT8_FORMAT.scale_dims)
    stored = (groups.largest / INT8_MAX).astype(np.float16)
    infinite = np.isinf(stored)
    scale = stored.astype(np.float32)
    is_usable = (scale != 0) & ~infinite
    reciprocal = np.where(is_usable, np.float32(1) / np.where(is_usable, scale, np.float32(1)), np.float32(0))
    code = np.clip(np.rint(groups.values * reciprocal[:, :, np.newaxis]), -INT8_MAX, INT8_MAX).astype(np.int8)
    bits = np.where(groups.nonfinite, np.uint16(FP16_NAN_BITS), stored.view(np.uint16))
    _count(counts, nonfinite=groups.nonfinite | infinite, zero=(scale == 0) & ~groups.nonfinite)
    return _bytes_of(code.reshape(values.shape)), _bytes_of(bits)


def _encode_fp8(values: FloatArray, counts: CodecCounts) -> tuple[BytesArray, BytesArray]:
    """Encode per codecs 4: the product with the rounded reciprocal, not the quotient."""
    groups = _split(values, values.shape[1])
    is_zero = groups.largest == 0
    stored = np.minimum(np.maximum(groups.largest / E4M3_MAX, FP16_TINY), FP16_MAX).astype(np.float16)
    reciprocal = np.float32(1) / stored.astype(np.float32)
    code = e4m3_encode(groups.values * reciprocal[:, :, np.newaxis])
    code[is_zero] = 0
    bits = np.where(is_zero, np.uint16(0), stored.view(np.uint16))
    bits = np.where(groups.nonfinite, np.uint16(FP16_NAN_BITS), bits)
    _count(counts, nonfinite=groups.nonfinite, zero=is_zero & ~groups.nonfinite,
           saturated=groups.largest > FP8_DOMAIN_MAX)
    return _bytes_of(code.reshape(values.shape)), _bytes_of(bits)


def _encode_fp4(values: FloatArray, counts: CodecCounts) -> tuple[BytesArray, BytesArray]:
    """Encode per codecs 5: two true divisions, by 6 and by the scale as stored."""
    groups = _split(values, FP4_FORMAT.scale_dims)
    is_zero = groups.largest == 0
    stored = e4m3_encode(np.minimum(np.maximum(groups.largest / E2M1_MAX, E4M3_TINY), E4M3_MAX))
    code = e2m1_encode(groups.values / e4m3_decode(stored)[:, :, np.newaxis])
    code[is_zero] = 0
    scale = np.where(is_zero, np.uint8(0), stored)
    scale = np.where(groups.nonfinite, np.uint8(E4M3_NAN_CODE), scale)
    _count(counts, nonfinite=groups.nonfinite, zero=is_zero & ~groups.nonfinite,
           saturated=groups.largest > FP4_DOMAIN_MAX)
    return pack_pairs(code.reshape(values.shape)), scale


_ENCODERS: Final[dict[Format, Callable[[FloatArray, CodecCounts], tuple[BytesArray, BytesArray]]]] = {
    INT8_FORMAT: _encode_int8,
    FP8_FORMAT: _encode_fp8,
    FP4_FORMAT: _encode_fp4,
}


def _encode_values(row_format: Format, values: FloatArray, counts: CodecCounts | None) -> tuple[BytesArray, BytesArray]:
    # A caller's np.seterr(all="raise") must not turn an underflow that the codec defines into an exception.
    with np.errstate(all="ignore"):
        return _ENCODERS[row_format](values, counts if counts is not None else CodecCounts())


def _count(counts: CodecCounts, *, nonfinite: MaskArray, zero: MaskArray, saturated: MaskArray | bool = False) -> None:
    counts.nonfinite += int(np.count_nonzero(nonfinite))
    counts.zero_groups += int(np.count_nonzero(zero))
    counts.saturated += int(np.count_nonzero(saturated))


def _scaled(numbers: FloatArray, scales: FloatArray) -> FloatArray:
    """Return numbers (N, D) times their groups' scales (N, G)."""
    rows_count, head_dim = numbers.shape
    groups = numbers.reshape(rows_count, scales.shape[1], head_dim // scales.shape[1])
    return (groups * scales[:, :, np.newaxis]).reshape(rows_count, head_dim)


def _bytes_of(array: npt.NDArray[Any]) -> BytesArray:
    """Return the little-endian bytes of a fresh array (N, X) as uint8 (N, X * item bytes), over the same memory."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False).view(np.uint8)


# ---- refusals --------------------------------------------------------------------------------------------------


def _resolve(profile: str | Profile, kind: str) -> tuple[Profile, Format]:
    resolved = resolve_profile(profile)
    if kind not in {"k", "v"}:
        raise MisuseError(f"kind of vector for profile {resolved.name}", expected="'k' or 'v'", got=shown(kind),
                          remedy="name one of the two: a profile may store them differently", clause="codecs 1")
    return resolved, resolved.k if kind == "k" else resolved.v


def _check_matrix(array: npt.NDArray[Any], dtype: type[np.generic], refused: str, clause: str) -> None:
    check_dtype(array, dtype, refused, clause)
    if array.ndim != 2 or not array.flags.c_contiguous:
        layout = "C-contiguous" if array.flags.c_contiguous else "strided"
        raise MisuseError(refused, expected="a C-contiguous array (N, D)", got=f"shape {array.shape}, {layout}",
                          remedy="reshape to one row per token and head and copy with np.ascontiguousarray",
                          clause=clause, shape=array.shape)


def _check_bytes(profile: Profile, role: str, stored: object, row_bytes: int | None, rows_count: int | None) -> None:
    """Refuse stored bytes that are not (N, row_bytes) uint8; row_bytes None: the profile has no such plane."""
    refused = f"decoding {role} of profile {profile.name}"
    if row_bytes is None:
        if stored is not None:
            raise MisuseError(refused, expected="None, since the profile has no such plane",
                              got=type(stored).__name__, remedy="pass scale=None", clause="C4")
        return
    if not isinstance(stored, np.ndarray):
        got = type(stored).__name__
    elif (
        stored.dtype != np.uint8
        or stored.ndim != 2
        or stored.shape[1] != row_bytes
        or rows_count not in (None, len(stored))
        or not stored.flags.c_contiguous
    ):
        got = f"{'' if stored.flags.c_contiguous else 'strided '}{stored.dtype} {stored.shape}"
    else:
        return
    raise MisuseError(
        refused, expected=f"C-contiguous uint8 ({'N' if rows_count is None else rows_count}, {row_bytes})", got=got,
        remedy="pass the bytes as encode returned them", clause="C4", row_bytes=row_bytes,
    )
