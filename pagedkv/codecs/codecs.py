"""The persistent codecs: which bytes a K or V row becomes, and which numbers those bytes mean.  (C4.4, codecs 1-8)

This module is the definition that kernels are compared with, byte for byte.  A *row* is the D values of one
token and one KV head; N rows are encoded at once and none depends on another.  Five formats of scale and code:

    format  group      scale                             code                       decode
    bf16    -          none                              the 16 bits themselves     exact
    int8    64 dims    FP16 of A / 127                   RNE(x * fl(1 / S))         code * S
    fp8     the row    FP16 of A / 448, >= 2^-24         E4M3FN(x * fl(1 / S))      value(code) * S
    fp4     16 dims    E4M3 of A / 6, in [2^-9, 448]     E2M1(x / S)                value(code) * S

A is the largest magnitude of the group and S the stored scale as a number.  `fl` is one rounding to FP32: every
NumPy ufunc below is one IEEE operation on float32 arrays, so each line is one `fl`.  Where a profile rotates, the
row is first multiplied by the Hadamard matrix over sqrt(D), and decoding returns the *rotated* row.

Bytes of one packed E2M1 pair (codecs 5), and where they lie for D = 64:

    bit    7 6 5 4   3 2 1 0          byte  j : dims 2j (low half) and 2j + 1 (high half)
          | 2j + 1 |   2j   |         scale g : dims [16g, 16g + 16), bytes [8g, 8g + 8)

It must know nothing of pages, planes or devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv.errors import MisuseError
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
BytesArray: TypeAlias = npt.NDArray[np.uint8]
BitsArray: TypeAlias = npt.NDArray[np.uint16]
FloatArray: TypeAlias = npt.NDArray[np.float32]
MaskArray: TypeAlias = npt.NDArray[np.bool_]

INT8_MAX: Final = np.float32(127.0)
E4M3_MAX: Final = np.float32(448.0)
E2M1_MAX: Final = np.float32(6.0)
FP16_TINY: Final = np.float32(2.0**-24)
FP16_MAX: Final = np.float32(65504.0)
E4M3_TINY: Final = np.float32(2.0**-9)
FP8_DOMAIN_MAX: Final = np.float32(448.0 * 65504.0)
FP4_DOMAIN_MAX: Final = np.float32(6.0 * 448.0)

FP16_NAN_BITS: Final = 0x7E00
E4M3_NAN_CODE: Final = 0x7F
BF16_QUIET_BIT: Final = 0x0040

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
    """What encoders met beyond ordinary groups; a group is 64 dims (int8), a row (fp8) or 16 dims (fp4).  (codecs 8)

    Every `encode` that is handed this object adds to it; only the caller resets it, by making a new one.  The
    bf16 profile has no groups and adds nothing.
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
        kind: "k" or "v".
        rows: (N, D) uint16, BF16 bits, C-contiguous, host; any N >= 0.
        counts: added to, when given.
    Returns:
        code (N, code bytes) uint8 and scale (N, scale bytes) uint8, little-endian; scale is None for bf16.
    Raises:
        ConfigError: unknown profile, or a head_dim that it does not support.
        MisuseError: rows of another dtype, rank or contiguity, or an unknown kind.
    """
    resolved, kept = _kept_format(profile, kind)
    _check_rows(resolved, rows, np.dtype(np.uint16), "BF16 rows", "codecs 1")
    if kept == BF16_FORMAT:
        return _bytes_of(rows.copy()), None
    values = bf16_to_f32(rows)
    if resolved.rotates_k if kind == "k" else resolved.rotates_v:
        values = rotate(values)
    return _encode_values(kept, values, counts)


def encode_unrotated(
    profile: str | Profile, kind: Kind, values: FloatArray, *, counts: CodecCounts | None = None
) -> tuple[BytesArray, BytesArray | None]:
    """Return the code and scale bytes of N rows of values that are taken as already rotated.  (codecs 6)

    The entry of encoder tests: a rotation would hide the edges that they aim at.

    Args:
        profile: a profile, its name or an alias.
        kind: "k" or "v".
        values: (N, D) float32, C-contiguous, host: the "x" of codecs 3-5 and 8.
        counts: added to, when given.
    Returns:
        As `encode`.
    Raises:
        ConfigError: unknown profile, or a head_dim that it does not support.
        MisuseError: values of another dtype, rank or contiguity, or an unknown kind; for bf16 also a value that
            is not a BF16 number, since that profile copies bits and rounds nothing (codecs 2).
    """
    resolved, kept = _kept_format(profile, kind)
    _check_rows(resolved, values, np.dtype(np.float32), "values", "codecs 6")
    if kept != BF16_FORMAT:
        return _encode_values(kept, values, counts)
    bits = values.view(np.uint32)
    inexact = np.count_nonzero(bits & np.uint32(0xFFFF))
    if inexact:
        raise MisuseError(
            "encoding values with profile bf16", expected="BF16 numbers (low 16 bits of each float32 zero)",
            got=f"{inexact} of {bits.size} values that are not", remedy="round them with f32_to_bf16 first",
            clause="codecs 2", inexact_count=int(inexact),
        )
    return _bytes_of((bits >> np.uint32(16)).astype(np.uint16)), None


def decode(
    profile: str | Profile, kind: Kind, code: BytesArray, scale: BytesArray | None, head_dim: int
) -> FloatArray:
    """Return the numbers that N stored rows mean, in the stored basis: rotated where the profile rotates.  (codecs 2-5)

    Every product of a code and its scale is exact in FP32.  A NaN or infinite scale decodes to NaN (codecs 8).

    Args:
        profile: a profile, its name or an alias.
        kind: "k" or "v".
        code: (N, code bytes) uint8, C-contiguous, host, as `encode` returns it.
        scale: (N, scale bytes) uint8, C-contiguous, host; None for bf16 and for bf16 only.
        head_dim: D.
    Returns:
        (N, D) float32.
    Raises:
        ConfigError: unknown profile, or a head_dim that it does not support.
        MisuseError: bytes of another dtype, shape or contiguity, or an unknown kind.
    """
    resolved, kept = _kept_format(profile, kind)
    row_bytes: dict[str, int] = {plane.role: plane.row_bytes for plane in plane_schema(resolved, head_dim)}
    _check_bytes(resolved, f"{kind}_code", code, row_bytes.get(f"{kind}_code"), None)
    _check_bytes(resolved, f"{kind}_scale", scale, row_bytes.get(f"{kind}_scale"), len(code))
    with np.errstate(all="ignore"):
        return _DECODERS[kept](code, scale if scale is not None else _NO_SCALE)


def rotate(values: FloatArray) -> FloatArray:
    """Return R x for each row x, with the rounding order that decides code bytes.  (codecs 1)

    R is the natural-order Hadamard matrix over sqrt(D): symmetric, and its own inverse but for rounding.

    Args:
        values: (N, D) float32, C-contiguous, host; D in {64, 128, 256}.  Not changed.
    Returns:
        (N, D) float32, a new array.
    Raises:
        MisuseError: another dtype, rank, contiguity or D.
    """
    _check_matrix(values, np.dtype(np.float32), "values to be rotated", "codecs 1")
    rows_count, head_dim = values.shape
    factor = ROTATION_FACTORS.get(head_dim)
    if factor is None:
        raise MisuseError(
            "rotation", expected="rows of 64, 128 or 256 values", got=f"rows of {head_dim}",
            remedy="rotate whole rows of a quantized profile", clause="codecs 1", head_dim=head_dim,
        )
    z = values
    with np.errstate(all="ignore"):
        stride = 1
        while stride < head_dim:
            # Dim i = 2 * stride * block + stride * half + offset: the pair (i, i + stride) differs in `half` only.
            pairs = z.reshape(rows_count, head_dim // (2 * stride), 2, stride)
            z = np.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), axis=2)
            stride *= 2
        return (z * factor).reshape(rows_count, head_dim)


# ---- number formats --------------------------------------------------------------------------------------------


def bf16_to_f32(bits: BitsArray) -> FloatArray:
    """Return BF16 bits as float32, exactly; NaN payloads and signed zeros survive.  (codecs 2)"""
    _check_dtype(bits, np.dtype(np.uint16), "promotion from BF16", "C14.4")
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: FloatArray) -> BitsArray:
    """Return float32 rounded to BF16 bits: RNE, beyond the largest finite value to infinity.  (C14.4)

    A NaN keeps its sign and upper payload bits and becomes quiet, so that no NaN rounds to infinity.
    """
    _check_dtype(values, np.dtype(np.float32), "rounding to BF16", "C14.4")
    bits = values.view(np.uint32)
    upper = (bits >> np.uint32(16)).astype(np.uint16)
    carry = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits + carry) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), upper | np.uint16(BF16_QUIET_BIT), rounded)


def e4m3_encode(values: FloatArray) -> BytesArray:
    """Return E4M3FN codes: RNE, saturating to +-448, sign of zero kept; NaN becomes 0x7F or 0xFF.  (codecs 4)"""
    _check_dtype(values, np.dtype(np.float32), "rounding to E4M3FN", "codecs 4")
    magnitude = np.minimum(np.abs(values), E4M3_MAX)
    codes = _minifloat_codes(magnitude, mantissa_bits=3, exponent_bias=7)
    codes[np.isnan(values)] = E4M3_NAN_CODE
    codes |= np.signbit(values).astype(np.uint8) << np.uint8(7)
    return codes


def e4m3_decode(codes: BytesArray) -> FloatArray:
    """Return the value of E4M3FN codes; 0x7F and 0xFF are NaN.  (codecs 4)"""
    _check_dtype(codes, np.dtype(np.uint8), "promotion from E4M3FN", "codecs 4")
    return _E4M3_VALUES[codes]


def e2m1_encode(values: FloatArray) -> BytesArray:
    """Return E2M1 codes 0x0..0xF, one a byte: RNE, saturating to +-6, sign of zero kept.  (codecs 5)

    Raises:
        MisuseError: a NaN, for which the format has no code.
    """
    _check_dtype(values, np.dtype(np.float32), "rounding to E2M1", "codecs 5")
    nan_count = int(np.count_nonzero(np.isnan(values)))
    if nan_count:
        raise MisuseError(
            "rounding to E2M1", expected="numbers", got=f"{nan_count} NaN of {values.size} values",
            remedy="mark the group by its scale, as codecs 8 says", clause="codecs 8", nan_count=nan_count,
        )
    magnitude = np.minimum(np.abs(values), E2M1_MAX)
    codes = _minifloat_codes(magnitude, mantissa_bits=1, exponent_bias=1)
    codes |= np.signbit(values).astype(np.uint8) << np.uint8(3)
    return codes


def e2m1_decode(codes: BytesArray) -> FloatArray:
    """Return the value of E2M1 codes 0x0..0xF, one a byte.  (codecs 5)

    Raises:
        MisuseError: a code above 0xF; unpack pairs first.
    """
    _check_dtype(codes, np.dtype(np.uint8), "promotion from E2M1", "codecs 5")
    largest = int(codes.max(initial=0))
    if largest > 0xF:
        raise MisuseError(
            "promotion from E2M1", expected="codes 0x0..0xF, one a byte", got=f"a byte of {largest:#04x}",
            remedy="split packed pairs with unpack_pairs", clause="codecs 5", code=largest,
        )
    return _E2M1_VALUES[codes]


def pack_pairs(codes: BytesArray) -> BytesArray:
    """Return (..., D/2) bytes of (..., D) four-bit codes: dim 2j in bits 0..3, dim 2j + 1 in bits 4..7.  (codecs 5)"""
    packed: BytesArray = codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))
    return packed


def unpack_pairs(packed: BytesArray) -> BytesArray:
    """Return the (..., D) four-bit codes of (..., D/2) bytes; the inverse of `pack_pairs`.  (codecs 5)"""
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    codes[..., 0::2] = packed & np.uint8(0x0F)
    codes[..., 1::2] = packed >> np.uint8(4)
    return codes


def _minifloat_codes(magnitude: FloatArray, *, mantissa_bits: int, exponent_bias: int) -> BytesArray:
    """Round magnitudes in [0, largest value] to the codes of a small format without sign: RNE.

    Normal range: adding half of the dropped part, less one unit when the kept part is even, carries into the
    exponent by itself.  E4M3 drops 20 bits: 1.0625 has bits 0x3F880000, the kept part 0x3F8 is even and the dropped
    part exactly half, so it stays 0x3F8; less 120 << 3 (the biases' difference) it is 0x38, the code of 1.0.
    Subnormal range: the code counts steps of the smallest value, and a count that reaches the first normal number
    is that number's code.
    """
    dropped_bits = np.uint32(23 - mantissa_bits)
    smallest_exponent = 1 - exponent_bias
    bits = magnitude.view(np.uint32)
    half_down = np.uint32((1 << (22 - mantissa_bits)) - 1)
    kept = (bits + half_down + ((bits >> dropped_bits) & np.uint32(1))) >> dropped_bits
    normal = kept - np.uint32((127 - exponent_bias) << mantissa_bits)
    steps = np.rint(magnitude * np.float32(2.0 ** (mantissa_bits - smallest_exponent)))
    is_subnormal = magnitude < np.float32(2.0**smallest_exponent)
    return np.where(is_subnormal, np.where(is_subnormal, steps, 0).astype(np.uint8), normal.astype(np.uint8))


def _minifloat_values(*, mantissa_bits: int, exponent_bias: int, exponent_bits: int) -> FloatArray:
    """Return the value of every code of a sign, exponent, mantissa format, special codes not singled out."""
    codes = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    significand = np.where(exponent > 0, mantissa + (1 << mantissa_bits), mantissa)
    magnitude = np.ldexp(significand.astype(np.float32), np.maximum(exponent, 1) - exponent_bias - mantissa_bits)
    sign = np.where(codes >> (exponent_bits + mantissa_bits), np.float32(-1), np.float32(1))
    values: FloatArray = (sign * magnitude).astype(np.float32)
    return values


_E2M1_VALUES: Final = _minifloat_values(mantissa_bits=1, exponent_bias=1, exponent_bits=2)
_E4M3_VALUES: Final = _minifloat_values(mantissa_bits=3, exponent_bias=7, exponent_bits=4)
# E4M3FN has no infinity: the all-ones magnitude is NaN and everything else is finite.
_E4M3_VALUES[[E4M3_NAN_CODE, 0x80 | E4M3_NAN_CODE]] = np.nan


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
    counts.nonfinite += int(np.count_nonzero(groups.nonfinite | infinite))
    counts.zero_groups += int(np.count_nonzero((scale == 0) & ~groups.nonfinite))
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
    counts.nonfinite += int(np.count_nonzero(groups.nonfinite))
    counts.saturated += int(np.count_nonzero(groups.largest > FP8_DOMAIN_MAX))
    counts.zero_groups += int(np.count_nonzero(is_zero & ~groups.nonfinite))
    return _bytes_of(code.reshape(values.shape)), _bytes_of(bits)


def _encode_fp4(values: FloatArray, counts: CodecCounts) -> tuple[BytesArray, BytesArray]:
    """Encode per codecs 5: two true divisions, by 6 and by the scale as stored."""
    groups = _split(values, FP4_FORMAT.scale_dims)
    is_zero = groups.largest == 0
    raw_scale = np.minimum(np.maximum(groups.largest / E2M1_MAX, E4M3_TINY), E4M3_MAX)
    stored = e4m3_encode(raw_scale)
    code = e2m1_encode(groups.values / e4m3_decode(stored)[:, :, np.newaxis])
    code[is_zero] = 0
    scale = np.where(is_zero, np.uint8(0), stored)
    scale = np.where(groups.nonfinite, np.uint8(E4M3_NAN_CODE), scale)
    counts.nonfinite += int(np.count_nonzero(groups.nonfinite))
    counts.saturated += int(np.count_nonzero(groups.largest > FP4_DOMAIN_MAX))
    counts.zero_groups += int(np.count_nonzero(is_zero & ~groups.nonfinite))
    return pack_pairs(code.reshape(values.shape)), scale


def _decode_bf16(code: BytesArray, _scale: BytesArray) -> FloatArray:
    return bf16_to_f32(code.view("<u2").astype(np.uint16, copy=False))


def _decode_int8(code: BytesArray, scale: BytesArray) -> FloatArray:
    return _scaled(code.view(np.int8).astype(np.float32), _fp16_scales(scale))


def _decode_fp8(code: BytesArray, scale: BytesArray) -> FloatArray:
    return _scaled(e4m3_decode(code), _fp16_scales(scale))


def _decode_fp4(code: BytesArray, scale: BytesArray) -> FloatArray:
    return _scaled(e2m1_decode(unpack_pairs(code)), e4m3_decode(scale))


def _fp16_scales(scale: BytesArray) -> FloatArray:
    return scale.view("<f2").astype(np.float32)


def _scaled(values: FloatArray, scales: FloatArray) -> FloatArray:
    """Return values (N, D) times their groups' scales (N, G)."""
    rows_count, head_dim = values.shape
    groups = values.reshape(rows_count, scales.shape[1], head_dim // scales.shape[1])
    return (groups * scales[:, :, np.newaxis]).reshape(rows_count, head_dim)


_NO_SCALE: Final = np.empty((0, 0), np.uint8)

_ENCODERS: Final[dict[Format, Callable[[FloatArray, CodecCounts], tuple[BytesArray, BytesArray]]]] = {
    INT8_FORMAT: _encode_int8,
    FP8_FORMAT: _encode_fp8,
    FP4_FORMAT: _encode_fp4,
}
_DECODERS: Final[dict[Format, Callable[[BytesArray, BytesArray], FloatArray]]] = {
    BF16_FORMAT: _decode_bf16,
    INT8_FORMAT: _decode_int8,
    FP8_FORMAT: _decode_fp8,
    FP4_FORMAT: _decode_fp4,
}


def _encode_values(kept: Format, values: FloatArray, counts: CodecCounts | None) -> tuple[BytesArray, BytesArray]:
    # A caller's np.seterr(all="raise") must not turn an underflow that the codec defines into an exception.
    with np.errstate(all="ignore"):
        return _ENCODERS[kept](values, counts if counts is not None else CodecCounts())


def _bytes_of(array: npt.NDArray[Any]) -> BytesArray:
    """Return the little-endian bytes of a fresh array (N, X) as uint8 (N, X * item bytes), over the same memory."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False).view(np.uint8)


# ---- refusals --------------------------------------------------------------------------------------------------


def _kept_format(profile: str | Profile, kind: str) -> tuple[Profile, Format]:
    resolved = resolve_profile(profile)
    if kind not in {"k", "v"}:
        raise MisuseError(
            f"kind of vector for profile {resolved.name}", expected="'k' or 'v'", got=repr(kind),
            remedy="say which of the two is meant: a profile may keep them differently", clause="codecs 1",
        )
    return resolved, resolved.k if kind == "k" else resolved.v


def _check_dtype(array: object, dtype: np.dtype[Any], refused: str, clause: str) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        got = str(array.dtype) if isinstance(array, np.ndarray) else type(array).__name__
        raise MisuseError(
            refused, expected=f"a NumPy array of {dtype}", got=got, remedy="convert it explicitly", clause=clause,
            dtype=got,
        )


def _check_matrix(array: npt.NDArray[Any], dtype: np.dtype[Any], refused: str, clause: str) -> None:
    _check_dtype(array, dtype, refused, clause)
    if array.ndim != 2 or not array.flags.c_contiguous:
        layout = "C-contiguous" if array.flags.c_contiguous else "strided"
        raise MisuseError(
            refused, expected="a C-contiguous array (N, D)", got=f"shape {array.shape}, {layout}",
            remedy="reshape to one row per token and head and copy with np.ascontiguousarray", clause=clause,
            shape=array.shape,
        )


def _check_rows(profile: Profile, rows: npt.NDArray[Any], dtype: np.dtype[Any], noun: str, clause: str) -> None:
    """Refuse rows (N, D) that are not well formed, or a D that the profile does not support."""
    _check_matrix(rows, dtype, f"encoding {noun} with profile {profile.name}", clause)
    plane_schema(profile, int(rows.shape[1]))


def _check_bytes(profile: Profile, role: str, stored: object, row_bytes: int | None, rows_count: int | None) -> None:
    """Refuse stored bytes that are not (N, row_bytes) uint8; row_bytes None means that no such plane exists."""
    refused = f"decoding {role} of profile {profile.name}"
    if row_bytes is None:
        if stored is not None:
            raise MisuseError(
                refused, expected="None, since the profile keeps no such plane", got=type(stored).__name__,
                remedy="pass scale=None", clause="C4",
            )
        return
    if not isinstance(stored, np.ndarray):
        got = type(stored).__name__
    elif (
        stored.dtype != np.uint8
        or stored.ndim != 2
        or stored.shape[1] != row_bytes
        or len(stored) != (len(stored) if rows_count is None else rows_count)
        or not stored.flags.c_contiguous
    ):
        got = f"{'' if stored.flags.c_contiguous else 'strided '}{stored.dtype} {stored.shape}"
    else:
        return
    raise MisuseError(
        refused, expected=f"C-contiguous uint8 ({'N' if rows_count is None else rows_count}, {row_bytes})", got=got,
        remedy="pass the bytes as encode returned them", clause="C4", row_bytes=row_bytes,
    )
