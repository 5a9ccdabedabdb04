"""Number formats of the codecs: BF16, E4M3FN, E2M1 and its packed pairs.  (codecs 2, 4, 5; C14.4)

One packed E2M1 pair:

    bit    7 6 5 4   3 2 1 0          byte j : dims 2j (low half) and 2j + 1 (high half)
          | 2j + 1 |   2j   |
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv.errors import MisuseError

BytesArray: TypeAlias = npt.NDArray[np.uint8]
BitsArray: TypeAlias = npt.NDArray[np.uint16]
FloatArray: TypeAlias = npt.NDArray[np.float32]

E4M3_MAX: Final = np.float32(448.0)
E2M1_MAX: Final = np.float32(6.0)
E4M3_NAN_CODE: Final = 0x7F
BF16_QUIET_BIT: Final = 0x0040


def bf16_to_f32(bits: BitsArray) -> FloatArray:
    """Return BF16 bits as float32, exactly; NaN payloads and signed zeros survive.  (codecs 2)"""
    check_dtype(bits, np.uint16, "promotion from BF16", "C14.4")
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: FloatArray) -> BitsArray:
    """Return float32 rounded to BF16 bits: RNE, beyond the largest finite value to infinity.  (C14.4)

    A NaN keeps its sign and upper payload bits and becomes quiet, so that no NaN rounds to infinity.
    """
    check_dtype(values, np.float32, "rounding to BF16", "C14.4")
    bits = values.view(np.uint32)
    upper = (bits >> np.uint32(16)).astype(np.uint16)
    carry = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits + carry) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), upper | np.uint16(BF16_QUIET_BIT), rounded)


def e4m3_encode(values: FloatArray) -> BytesArray:
    """Return E4M3FN codes: RNE, saturating to +-448, sign of zero kept; NaN becomes 0x7F or 0xFF.  (codecs 4)"""
    check_dtype(values, np.float32, "rounding to E4M3FN", "codecs 4")
    codes = _minifloat_codes(np.minimum(np.abs(values), E4M3_MAX), mantissa_bits=3, exponent_bias=7)
    codes[np.isnan(values)] = E4M3_NAN_CODE
    codes |= np.signbit(values).astype(np.uint8) << np.uint8(7)
    return codes


def e4m3_decode(codes: BytesArray) -> FloatArray:
    """Return the value of E4M3FN codes; 0x7F and 0xFF are NaN.  (codecs 4)"""
    check_dtype(codes, np.uint8, "promotion from E4M3FN", "codecs 4")
    return _E4M3_VALUES[codes]


def e2m1_encode(values: FloatArray) -> BytesArray:
    """Return E2M1 codes 0x0..0xF, one a byte: RNE, saturating to +-6, sign of zero kept.  (codecs 5)

    Raises:
        MisuseError: a NaN, for which the format has no code.
    """
    check_dtype(values, np.float32, "rounding to E2M1", "codecs 5")
    nan_count = int(np.count_nonzero(np.isnan(values)))
    if nan_count:
        raise MisuseError("rounding to E2M1", expected="numbers", got=f"{nan_count} NaN of {values.size} values",
                          remedy="mark the group by its scale, as codecs 8 says", clause="codecs 8",
                          nan_count=nan_count)
    codes = _minifloat_codes(np.minimum(np.abs(values), E2M1_MAX), mantissa_bits=1, exponent_bias=1)
    codes |= np.signbit(values).astype(np.uint8) << np.uint8(3)
    return codes


def e2m1_decode(codes: BytesArray) -> FloatArray:
    """Return the value of E2M1 codes 0x0..0xF, one a byte.  (codecs 5)

    Raises:
        MisuseError: a code above 0xF; unpack pairs first.
    """
    check_dtype(codes, np.uint8, "promotion from E2M1", "codecs 5")
    largest = int(codes.max(initial=0))
    if largest > 0xF:
        raise MisuseError("promotion from E2M1", expected="codes 0x0..0xF, one a byte",
                          got=f"a byte of {largest:#04x}", remedy="split packed pairs with unpack_pairs",
                          clause="codecs 5", code=largest)
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


def check_dtype(array: object, dtype: type[np.generic], refused: str, clause: str) -> None:
    """Refuse an object that is no NumPy array of that dtype."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        got = str(array.dtype) if isinstance(array, np.ndarray) else type(array).__name__
        raise MisuseError(refused, expected=f"a NumPy array of {np.dtype(dtype)}", got=got,
                          remedy="convert it explicitly", clause=clause, dtype=got)


def _minifloat_codes(magnitude: FloatArray, *, mantissa_bits: int, exponent_bias: int) -> BytesArray:
    """Round magnitudes in [0, largest value] to the codes of a small format without sign: RNE.

    Normal range: adding half of the dropped part, less one unit when the remaining part is even, carries into the
    exponent by itself.  E4M3 drops 20 bits: 1.0625 has bits 0x3F880000, the remaining part 0x3F8 is even and the
    dropped part exactly half, so it stays 0x3F8; less 120 << 3 (the biases' difference) it is 0x38, the code of 1.0.
    Subnormal range: the code counts steps of the smallest value, and a count that reaches the first normal number
    is that number's code.
    """
    dropped_bits = np.uint32(23 - mantissa_bits)
    smallest_exponent = 1 - exponent_bias
    bits = magnitude.view(np.uint32)
    half_down = np.uint32((1 << (22 - mantissa_bits)) - 1)
    rounded = (bits + half_down + ((bits >> dropped_bits) & np.uint32(1))) >> dropped_bits
    normal = rounded - np.uint32((127 - exponent_bias) << mantissa_bits)
    steps = np.rint(magnitude * np.float32(2.0 ** (mantissa_bits - smallest_exponent)))
    is_subnormal = magnitude < np.float32(2.0**smallest_exponent)
    return np.where(is_subnormal, np.where(is_subnormal, steps, 0).astype(np.uint8), normal.astype(np.uint8))


def _minifloat_values(*, mantissa_bits: int, exponent_bias: int, exponent_bits: int) -> FloatArray:
    """Return the value of every code of a sign, exponent, mantissa format without special codes."""
    codes = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    significand = np.where(exponent > 0, mantissa + (1 << mantissa_bits), mantissa)
    magnitude = np.ldexp(significand.astype(np.float32), np.maximum(exponent, 1) - exponent_bias - mantissa_bits)
    sign = np.where(codes >> (exponent_bits + mantissa_bits), np.float32(-1), np.float32(1))
    values: FloatArray = (sign * magnitude).astype(np.float32)
    return values


_E2M1_VALUES: Final[npt.NDArray[Any]] = _minifloat_values(mantissa_bits=1, exponent_bias=1, exponent_bits=2)
_E4M3_VALUES: Final[npt.NDArray[Any]] = _minifloat_values(mantissa_bits=3, exponent_bias=7, exponent_bits=4)
# E4M3FN has no infinity: the all-ones magnitude is NaN and everything else is finite.
_E4M3_VALUES[[E4M3_NAN_CODE, 0x80 | E4M3_NAN_CODE]] = np.nan
