"""What the codec tests share: sides, rows with placed values, and the confrontation with the oracle.  (C4.4)"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv import codecs
from pagedkv.codecs import CodecCounts
from tests.host.codec_sides import Side
from tests.oracle import codec_oracle as oracle

Rng: TypeAlias = np.random.Generator
F32: TypeAlias = npt.NDArray[np.float32]
F64: TypeAlias = npt.NDArray[np.float64]
U8: TypeAlias = npt.NDArray[np.uint8]
U16: TypeAlias = npt.NDArray[np.uint16]


def row_of(placed: dict[int, float] | list[float], head_dim: int = 64, fill: float = 0.0) -> F32:
    """One row (1, D) that holds `fill` except for the placed values."""
    row = np.full((1, head_dim), fill, np.float32)
    for dim, value in placed.items() if isinstance(placed, dict) else enumerate(placed):
        row[0, dim] = value
        assert float(row[0, dim]) == value, f"the edge {value} is not a float32"
    return row


def encoded(side: Side, values: F32) -> tuple[U8, U8, CodecCounts]:
    """Encode without rotation and confront every byte, count and decoded value with the oracle."""
    counts = CodecCounts()
    code, scale = codecs.encode_unrotated(*side, values, counts=counts)
    assert scale is not None
    expected = [oracle.encode_values(*side, [float(value) for value in row]) for row in values]
    assert_is_expected(side, code, scale, counts, expected, values.shape[1])
    return code, scale, counts


def assert_is_expected(
    side: Side, code: U8, scale: U8 | None, counts: CodecCounts, expected: list[oracle.EncodedRow], head_dim: int
) -> None:
    """Compare encoded rows, their counts and what they decode to with the oracle's rows."""
    for index, row in enumerate(expected):
        assert row.scale == (None if scale is None else scale[index].tobytes()), f"{side} scales of row {index}"
        assert row.code == code[index].tobytes(), f"{side} codes of row {index}"
    sums = CodecCounts(sum(row.saturated for row in expected), sum(row.nonfinite for row in expected),
                       sum(row.zero_groups for row in expected))
    assert sums == counts, side
    decoded = codecs.decode(*side, code, scale, head_dim)
    wanted = np.array([oracle.decode_row(*side, row.code, row.scale) for row in expected], np.float32)
    assert_same_bits(wanted.reshape(decoded.shape), decoded)


def assert_same_bits(expected: F32, actual: F32) -> None:
    """Equal bit for bit, signed zeros included; any NaN equals any NaN."""
    assert expected.dtype == actual.dtype == np.float32
    both_nan = np.isnan(expected) & np.isnan(actual)
    np.testing.assert_array_equal(np.where(both_nan, 0, expected.view(np.uint32)),
                                  np.where(both_nan, 0, actual.view(np.uint32)))


def fp16_bits(scale: U8) -> list[int]:
    return [int(bits) for bits in scale.reshape(-1).view("<u2")]


def nibbles(code: U8) -> list[int]:
    return [byte >> shift & 15 for byte in code.reshape(-1).tolist() for shift in (0, 4)]


def next_up(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(np.inf)))


def next_down(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(0)))


def bf16(values: F64) -> U16:
    return codecs.f32_to_bf16(values.astype(np.float32))
