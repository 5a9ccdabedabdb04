"""The codecs once more, written apart: one element at a time, in exact rational arithmetic.  (C4.4, codecs 1-5, 8)

Nothing here comes from the package under test: no import, no table, no shared trick.  Where the package adds
integers to float bits, this file computes the exact rational result and rounds it by the definition of "nearest,
ties to even"; where the package rounds to a small format by arithmetic, this file lists every value of the format
and takes the nearest.  It is slow (microseconds per operation): use few rows.

A float32 number is carried as a Python float, which holds every float32 exactly, zeros with sign, infinities and
NaN included.  Floats are compared, but no arithmetic is done on them: every operation goes through exact integers or
`Fraction` and one explicit rounding.  Rows are lists; bytes are `bytes`.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class EncodedRow:
    """One encoded row and what was counted on the way; scale is None where the profile keeps none."""

    code: bytes
    scale: bytes | None
    saturated: int
    nonfinite: int
    zero_groups: int


# ---- exact rounding --------------------------------------------------------------------------------------------
def nearest_integer(numerator: int, denominator: int) -> int:
    """Nearest integer of a quotient, ties to even; denominator > 0."""
    below, rest = divmod(numerator, denominator)
    if 2 * rest > denominator or (2 * rest == denominator and below % 2 == 1):
        return below + 1
    return below


def power_of_two(exponent: int) -> Fraction:
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def binary_exponent(magnitude: Fraction) -> int:
    """The e with 2^e <= magnitude < 2^(e + 1), for a positive magnitude."""
    numerator, denominator = magnitude.numerator, magnitude.denominator
    exponent = numerator.bit_length() - denominator.bit_length()
    # 2^(exponent - 1) < magnitude < 2^(exponent + 1): one comparison with 2^exponent decides.
    if numerator << max(-exponent, 0) < denominator << max(exponent, 0):
        exponent -= 1
    return exponent


def round_to_binary(value: Fraction, *, fraction_bits: int, exponent_min: int, exponent_max: int) -> Fraction | None:
    """Nearest number of an IEEE binary format, ties to even, subnormals kept; None stands for infinity."""
    if value == 0:
        return Fraction(0)
    # The format's numbers around value are multiples of 2^step_exponent.
    step_exponent = max(binary_exponent(abs(value)), exponent_min) - fraction_bits
    count = nearest_integer(value.numerator << max(-step_exponent, 0), value.denominator << max(step_exponent, 0))
    rounded = count * power_of_two(step_exponent)
    if abs(rounded) >= power_of_two(exponent_max + 1):
        return None
    return rounded


def to_float32(value: Fraction, *, zero_is_negative: bool) -> float:
    """fl(value): the float32 nearest to an exact value; the caller says which zero an exact zero is."""
    rounded = round_to_binary(value, fraction_bits=23, exponent_min=-126, exponent_max=127)
    if rounded is None:
        return -math.inf if value < 0 else math.inf
    if rounded == 0:
        is_negative = value < 0 or (value == 0 and zero_is_negative)
        return -0.0 if is_negative else 0.0
    return float(rounded)


def fp16_bits(value: Fraction) -> int:
    """RNE to FP16 of a non-negative exact value, as bits."""
    rounded = round_to_binary(value, fraction_bits=10, exponent_min=-14, exponent_max=15)
    if rounded is None:
        return 0x7C00
    if rounded < power_of_two(-14):
        return int(rounded * power_of_two(24))
    exponent = binary_exponent(rounded)
    return (exponent + 15) * 1024 + int(rounded * power_of_two(10 - exponent)) - 1024


def fp16_value(bits: int) -> float:
    sign, exponent, fraction = bits >> 15, (bits >> 10) & 31, bits & 1023
    if exponent == 31:
        magnitude = math.nan if fraction else math.inf
    elif exponent == 0:
        magnitude = float(fraction * power_of_two(-24))
    else:
        magnitude = float((1024 + fraction) * power_of_two(exponent - 25))
    return -magnitude if sign else magnitude


def bf16_value(bits: int) -> float:
    (value,) = struct.unpack("<f", struct.pack("<I", bits << 16))
    return float(value)


def bf16_bits(value: float) -> int:
    """RNE to BF16 of a float32 that is not NaN."""
    sign = 0x8000 if math.copysign(1.0, value) < 0 else 0
    if math.isinf(value):
        return sign | 0x7F80
    rounded = round_to_binary(abs(Fraction(value)), fraction_bits=7, exponent_min=-126, exponent_max=127)
    if rounded is None:
        return sign | 0x7F80
    (bits,) = struct.unpack("<I", struct.pack("<f", float(rounded)))
    return sign | int(bits) >> 16


# ---- one float32 operation -------------------------------------------------------------------------------------
def _is_negative(value: float) -> bool:
    return math.copysign(1.0, value) < 0


def add(a: float, b: float) -> float:
    """fl(a + b)."""
    if math.isnan(a) or math.isnan(b) or (math.isinf(a) and math.isinf(b) and a != b):
        return math.nan
    if math.isinf(a) or math.isinf(b):
        return a if math.isinf(a) else b
    return to_float32(Fraction(a) + Fraction(b), zero_is_negative=_is_negative(a) and _is_negative(b))


def subtract(a: float, b: float) -> float:
    """fl(a - b)."""
    return add(a, -b)


def multiply(a: float, b: float) -> float:
    """fl(a * b)."""
    if math.isnan(a) or math.isnan(b) or (math.isinf(a) and b == 0) or (a == 0 and math.isinf(b)):
        return math.nan
    is_negative = _is_negative(a) != _is_negative(b)
    if math.isinf(a) or math.isinf(b):
        return -math.inf if is_negative else math.inf
    return to_float32(Fraction(a) * Fraction(b), zero_is_negative=is_negative)


def divide(a: float, b: float) -> float:
    """fl(a / b) for finite a and finite b != 0."""
    return to_float32(Fraction(a) / Fraction(b), zero_is_negative=_is_negative(a) != _is_negative(b))


# ---- the small formats, by enumeration -------------------------------------------------------------------------
def e4m3_value(code: int) -> float:
    exponent, fraction = (code >> 3) & 15, code & 7
    if exponent == 15 and fraction == 7:
        return math.nan
    magnitude = Fraction(fraction, 8 * 64) if exponent == 0 else Fraction(8 + fraction, 8) * power_of_two(exponent - 7)
    return -float(magnitude) if code & 0x80 else float(magnitude)


def e2m1_value(code: int) -> float:
    magnitude = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[code & 7]
    return -magnitude if code & 8 else magnitude


E4M3_MAGNITUDES = [e4m3_value(code) for code in range(0x7F)]
E2M1_MAGNITUDES = [e2m1_value(code) for code in range(8)]


def nearest_code(value: float, magnitudes: list[float], sign_bit: int) -> int:
    """Code of the listed magnitude nearest to |value|, ties to the even code, saturating, sign of zero kept."""
    above = min(bisect_left(magnitudes, abs(value)), len(magnitudes) - 1)
    below = max(above - 1, 0)
    exact = abs(Fraction(value))
    to_above, to_below = abs(Fraction(magnitudes[above]) - exact), abs(exact - Fraction(magnitudes[below]))
    if to_above == to_below:
        code = above if above % 2 == 0 else below
    else:
        code = above if to_above < to_below else below
    return code | (sign_bit if _is_negative(value) else 0)


def e4m3_code(value: float) -> int:
    return nearest_code(value, E4M3_MAGNITUDES, 0x80)


def e2m1_code(value: float) -> int:
    return nearest_code(value, E2M1_MAGNITUDES, 0x8)


# ---- codecs 1: rotation ----------------------------------------------------------------------------------------
def rotate_row(row: list[float]) -> list[float]:
    """R x with the rounding order of codecs 1."""
    z = list(row)
    stride = 1
    while stride < len(z):
        for i in range(len(z)):
            if i & stride == 0:
                z[i], z[i + stride] = add(z[i], z[i + stride]), subtract(z[i], z[i + stride])
        stride *= 2
    factor = {64: 0x3E000000, 128: 0x3DB504F3, 256: 0x3D800000}[len(row)]
    (c,) = struct.unpack("<f", struct.pack("<I", factor))
    return [multiply(value, c) for value in z]


# ---- codecs 3-5 and 8: one group -------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Group:
    codes: list[int]
    scale: int
    counted: str


def _largest(values: list[float]) -> Fraction:
    return max(abs(Fraction(value)) for value in values)


def _int8_group(values: list[float]) -> _Group:
    largest = _largest(values)
    scale = fp16_bits(Fraction(to_float32(largest / 127, zero_is_negative=False)))
    if scale == 0x7C00:
        return _Group([0] * len(values), scale, "nonfinite")
    if scale == 0:
        return _Group([0] * len(values), scale, "zero_groups")
    reciprocal = divide(1.0, fp16_value(scale))
    numbers = [nearest_integer(*multiply(value, reciprocal).as_integer_ratio()) for value in values]
    return _Group([max(-127, min(127, number)) % 256 for number in numbers], scale, "")


def _fp8_group(values: list[float]) -> _Group:
    largest = _largest(values)
    if largest == 0:
        return _Group([0] * len(values), 0, "zero_groups")
    raw = Fraction(to_float32(largest / 448, zero_is_negative=False))
    scale = fp16_bits(min(max(raw, power_of_two(-24)), Fraction(65504)))
    reciprocal = divide(1.0, fp16_value(scale))
    codes = [e4m3_code(multiply(value, reciprocal)) for value in values]
    return _Group(codes, scale, "saturated" if largest > 448 * 65504 else "")


def _fp4_group(values: list[float]) -> _Group:
    largest = _largest(values)
    if largest == 0:
        return _Group([0] * len(values), 0, "zero_groups")
    raw = Fraction(to_float32(largest / 6, zero_is_negative=False))
    scale = e4m3_code(float(min(max(raw, power_of_two(-9)), Fraction(448))))
    codes = [e2m1_code(divide(value, e4m3_value(scale))) for value in values]
    return _Group(codes, scale, "saturated" if largest > 2688 else "")


@dataclass(frozen=True)
class _Format:
    group_dims: int | None
    encode: Callable[[list[float]], _Group]
    scale_bytes: int
    nan_scale: int


_INT8 = _Format(64, _int8_group, 2, 0x7E00)
_FP8 = _Format(None, _fp8_group, 2, 0x7E00)
_FP4 = _Format(16, _fp4_group, 1, 0x7F)

# profile -> (K format, K rotated, V format, V rotated), the two tables of codecs 1 and C4.
_PROFILES: dict[str, tuple[_Format, bool, _Format, bool]] = {
    "int8-g64": (_INT8, False, _INT8, False), "fp8-e4m3-row": (_FP8, True, _FP8, False),
    "nvfp4-g16": (_FP4, True, _FP4, True), "k8v4": (_FP8, True, _FP4, True),
}


def _format_of(profile: str, kind: str) -> _Format:
    k_format, _, v_format, _ = _PROFILES[profile]
    return k_format if kind == "k" else v_format


# ---- rows ------------------------------------------------------------------------------------------------------
def encode_row(profile: str, kind: str, row: list[int]) -> EncodedRow:
    """Encode one row of BF16 bits."""
    if profile == "bf16":
        return EncodedRow(b"".join(struct.pack("<H", bits) for bits in row), None, 0, 0, 0)
    values = [bf16_value(bits) for bits in row]
    _, rotates_k, _, rotates_v = _PROFILES[profile]
    is_rotated = rotates_k if kind == "k" else rotates_v
    return encode_values(profile, kind, rotate_row(values) if is_rotated else values)


def encode_values(profile: str, kind: str, values: list[float]) -> EncodedRow:
    """Encode one row of float32 values without rotation; quantized profiles only."""
    kept = _format_of(profile, kind)
    group_dims = kept.group_dims or len(values)
    groups = []
    for first in range(0, len(values), group_dims):
        group = values[first : first + group_dims]
        if all(math.isfinite(value) for value in group):
            groups.append(kept.encode(group))
        else:
            groups.append(_Group([0] * group_dims, kept.nan_scale, "nonfinite"))
    codes = [code for group in groups for code in group.codes]
    if kept is _FP4:
        codes = [codes[2 * j] + 16 * codes[2 * j + 1] for j in range(len(codes) // 2)]
    scale = b"".join(group.scale.to_bytes(kept.scale_bytes, "little") for group in groups)
    counted = [group.counted for group in groups]
    return EncodedRow(bytes(codes), scale, counted.count("saturated"), counted.count("nonfinite"),
                      counted.count("zero_groups"))


def decode_row(profile: str, kind: str, code: bytes, scale: bytes | None) -> list[float]:
    """Decode one row, in the stored basis."""
    if profile == "bf16":
        return [bf16_value(code[i] + 256 * code[i + 1]) for i in range(0, len(code), 2)]
    assert scale is not None
    kept = _format_of(profile, kind)
    if kept is _INT8:
        numbers = [float(byte - 256 if byte > 127 else byte) for byte in code]
    elif kept is _FP8:
        numbers = [e4m3_value(byte) for byte in code]
    else:
        numbers = [e2m1_value(byte >> shift & 15) for byte in code for shift in (0, 4)]
    if kept.scale_bytes == 1:
        scales = [e4m3_value(byte) for byte in scale]
    else:
        scales = [fp16_value(scale[i] + 256 * scale[i + 1]) for i in range(0, len(scale), 2)]
    group_dims = len(numbers) // len(scales)
    return [multiply(number, scales[index // group_dims]) for index, number in enumerate(numbers)]
