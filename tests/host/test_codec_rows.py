"""Whole rows through the codecs: rotation, random rows against the oracle, the format error.  (C4.4, codecs 1, 6, 7)

Rotated edges are constant rows, whose rotation is a single outlier.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from pagedkv import codecs
from pagedkv.codecs import CodecCounts
from pagedkv.values.profiles import HEAD_DIMS_BF16, PROFILES, plane_schema
from tests.host.codec_cases import F32, F64, U8, U16, Rng, assert_is_expected, assert_same_bits, bf16, encoded, row_of
from tests.host.codec_sides import FP4_SIDES, FP8_SIDES, INT8_SIDES, QUANTIZED_SIDES, ROTATED_SIDES, SIDES, Side
from tests.oracle import codec_oracle as oracle
from tests.oracle.attention_oracle import hadamard


# ---- codecs 1: rotation ----------------------------------------------------------------------------------------------
def constant_row(peak: float, head_dim: int) -> U16:
    """The constant BF16 row whose rotation is `peak` in dim 0 and zero elsewhere; D = 64 or 256."""
    constant = np.full((1, head_dim), peak / head_dim**0.5)
    rows = bf16(constant)
    assert float(codecs.bf16_to_f32(rows)[0, 0]) == constant[0, 0], f"the edge {peak} is not a BF16 number"
    return rows


@pytest.mark.parametrize("head_dim", [64, 256])
def test_rotation_of_a_hadamard_row_is_one_outlier(head_dim: int) -> None:
    """R times row i of the natural-order matrix is sqrt(D) at dim i and +0 elsewhere, exactly.  (codecs 1)"""
    signs = np.sign(hadamard(head_dim)).astype(np.float32)
    rotated = codecs.rotate(np.float32(1.25) * signs)

    assert_same_bits((1.25 * head_dim**0.5 * np.eye(head_dim)).astype(np.float32), rotated)


def test_rotation_at_128_uses_the_given_factor() -> None:
    """A constant row of 1 becomes 128 times 0x3DB504F3 in dim 0.  (codecs 1)"""
    rotated = codecs.rotate(np.ones((1, 128), np.float32))

    assert 0x413504F3 == rotated.view(np.uint32)[0, 0]
    assert not rotated[0, 1:].any()


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("side", ROTATED_SIDES)
@pytest.mark.parametrize(
    "peak", [422.0, -422.0, 49.0, 6.375, 3072.0, 6 * 2.0**-9, 2.0**-20, 0.0, 127.0, 2.0**24, 2.0**27, 2.0**-129]
)
def test_constant_row_is_an_outlier_after_rotation(side: Side, head_dim: int, peak: float) -> None:
    """A constant row through `encode` has the bytes of its single rotated value without rotation.  (codecs 6)"""
    rows = constant_row(peak, head_dim)
    counts = CodecCounts()
    code, scale = codecs.encode(*side, rows, counts=counts)

    expected_code, expected_scale, expected_counts = encoded(side, row_of([peak], head_dim))
    np.testing.assert_array_equal(expected_code, code)
    np.testing.assert_array_equal(expected_scale, scale)
    assert expected_counts == counts


@pytest.mark.parametrize("side", ROTATED_SIDES)
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("bad_bits", [0x7FC0, 0xFF81, 0x7F80, 0xFF80])
def test_rotation_spreads_a_nonfinite_value_in_its_row_only(side: Side, head_dim: int, bad_bits: int, rng: Rng) -> None:
    """The rotated value counts: every group of the row is marked, its neighbour rows are not.  (codecs 8)"""
    rows = bf16(rng.standard_normal((3, head_dim)))
    clean_code, clean_scale = codecs.encode(*side, rows)
    rows[1, head_dim - 1] = bad_bits
    counts = CodecCounts()
    code, scale = codecs.encode(*side, rows, counts=counts)

    assert clean_scale is not None
    assert scale is not None
    assert not code[1].any()
    is_fp4 = side in FP4_SIDES
    assert (b"\x7f" * (head_dim // 16) if is_fp4 else b"\x00\x7e") == scale[1].tobytes()
    assert CodecCounts(nonfinite=head_dim // 16 if is_fp4 else 1) == counts
    np.testing.assert_array_equal(clean_code[[0, 2]], code[[0, 2]])
    np.testing.assert_array_equal(clean_scale[[0, 2]], scale[[0, 2]])


# ---- random rows against the oracle ----------------------------------------------------------------------------------
def random_rows(head_dim: int, rng: Rng) -> U16:
    """BF16 rows (7, D): unit, narrow, wide exponents, subnormal, sparse, domain edges, any bits at all."""
    normal = rng.standard_normal((4, head_dim))
    normal[1] *= 0.25
    normal[2] *= 2.0 ** rng.integers(-30, 30, head_dim)
    normal[3] *= 2.0**-131
    sparse = rng.standard_normal((1, head_dim)) * (rng.random((1, head_dim)) < 0.02)
    edge = rng.standard_normal((1, head_dim)) * 1.0e7
    any_bits = rng.integers(0, 1 << 16, (1, head_dim)).astype(np.uint16)
    return np.concatenate((bf16(np.concatenate((normal, sparse, edge))), any_bits))


@pytest.mark.parametrize("side", SIDES)
def test_random_bf16_rows_have_the_bytes_of_the_oracle(side: Side, rng: Rng) -> None:
    """Codes, scales, counts and decoded bits, with rotation, for every head_dim tried.  (C4.4)"""
    for head_dim in (16, 64, 80, 128, 256) if side[0] == "bf16" else (64, 128, 256):
        rows = random_rows(head_dim, rng)
        counts = CodecCounts()
        code, scale = codecs.encode(*side, rows, counts=counts)

        expected = [oracle.encode_row(*side, [int(bits) for bits in row]) for row in rows]
        assert_is_expected(side, code, scale, counts, expected, head_dim)


@pytest.mark.parametrize("side", QUANTIZED_SIDES)
def test_random_float32_rows_have_the_bytes_of_the_oracle(side: Side, rng: Rng) -> None:
    """Full-width significands, as a rotation leaves them, at three magnitudes.  (C4.4)"""
    for head_dim in (64, 128, 256):
        magnitudes = np.array([[1.0], [2.0**-22], [1.0e4]], np.float32)
        encoded(side, rng.standard_normal((3, head_dim)).astype(np.float32) * magnitudes)


def test_rotation_has_the_bits_of_the_oracle(rng: Rng) -> None:
    """The order of the butterfly decides the last bits: ascending strides, every step rounded.  (codecs 1)"""
    for head_dim in (64, 128, 256):
        rows = (rng.standard_normal((2, head_dim)) * 2.0 ** rng.integers(-8, 8, head_dim)).astype(np.float32)
        expected = np.array([oracle.rotate_row([float(x) for x in row]) for row in rows], np.float32)
        assert_same_bits(expected, codecs.rotate(rows))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_row_bytes_depend_on_the_row_alone(side: Side, head_dim: int, rng: Rng) -> None:
    """A row among others, alone, and in another order has the same bytes; no rows give no bytes.  (C4.4)"""
    rows = random_rows(head_dim, rng)
    before = rows.copy()
    code, scale = codecs.encode(*side, rows)
    reversed_code, reversed_scale = codecs.encode(*side, rows[::-1].copy())
    empty_code, empty_scale = codecs.encode(*side, rows[:0])

    np.testing.assert_array_equal(before, rows)
    np.testing.assert_array_equal(code, reversed_code[::-1])
    for index in range(len(rows)):
        alone_code, alone_scale = codecs.encode(*side, rows[index : index + 1])
        np.testing.assert_array_equal(code[index], alone_code[0])
        if scale is not None:
            assert reversed_scale is not None
            assert alone_scale is not None
            np.testing.assert_array_equal(scale[index], alone_scale[0])
            np.testing.assert_array_equal(scale[index], reversed_scale[len(rows) - 1 - index])
    assert (0, code.shape[1]) == empty_code.shape
    assert (None if scale is None else (0, scale.shape[1])) == (None if empty_scale is None else empty_scale.shape)
    assert (0, head_dim) == codecs.decode(*side, empty_code, empty_scale, head_dim).shape


@pytest.mark.parametrize("side", SIDES)
def test_byte_counts_come_from_the_plane_schema(side: Side) -> None:
    """Code and scale rows have exactly the bytes that planes reserve for them.  (C4.2)"""
    profile, kind = side
    for head_dim in HEAD_DIMS_BF16 if profile == "bf16" else (64, 128, 256):
        code, scale = codecs.encode(profile, kind, np.zeros((2, head_dim), np.uint16))
        row_bytes: dict[str, int] = {plane.role: plane.row_bytes for plane in plane_schema(profile, head_dim)}
        assert (2, row_bytes[f"{kind}_code"]) == code.shape
        assert row_bytes.get(f"{kind}_scale") == (None if scale is None else scale.shape[1])


def test_bytes_do_not_alias_the_rows_and_names_may_be_aliases(rng: Rng) -> None:
    """Changing the rows afterwards changes no byte; an alias and a Profile give the bytes of the name.  (C0)"""
    rows = bf16(rng.standard_normal((2, 256)))
    code, _ = codecs.encode("bf16", "k", rows)
    fp8_code, _ = codecs.encode("fp8-e4m3-row", "k", rows)
    np.testing.assert_array_equal(fp8_code, codecs.encode("FP8-E4M3FN-row256", "k", rows)[0])
    np.testing.assert_array_equal(fp8_code, codecs.encode(PROFILES["fp8-e4m3-row"], "k", rows)[0])
    before = code.copy()
    rows[:] = 0

    np.testing.assert_array_equal(before, code)


def test_numpy_error_state_of_the_caller_is_left_alone(rng: Rng) -> None:
    """Underflow and infinities are part of the format, so `seterr(all="raise")` raises nothing here.  (codecs 8)"""
    rows = random_rows(256, rng)
    expected = [codecs.encode(*side, rows) for side in SIDES]
    with np.errstate(all="raise"):
        for side, (code, scale) in zip(SIDES, expected, strict=True):
            actual_code, actual_scale = codecs.encode(*side, rows)
            codecs.decode(*side, actual_code, actual_scale, 256)
            np.testing.assert_array_equal(code, actual_code)
            np.testing.assert_array_equal(scale, actual_scale)
        assert np.geterr()["under"] == "raise"


# ---- codecs 7: format error ------------------------------------------------------------------------------------------
FORMAT_ERRORS = {"bf16": 0.0016, "int8": 0.006, "fp8": 0.026, "fp4": 0.095}


def format_of(side: Side) -> str:
    return "bf16" if side[0] == "bf16" else "int8" if side in INT8_SIDES else "fp8" if side in FP8_SIDES else "fp4"


def relative_error(actual: F32, reference: F64) -> float:
    return float(np.linalg.norm(actual - reference) / np.linalg.norm(reference))


def gaussian(side: Side, head_dim: int, rng: Rng) -> tuple[U8, U8 | None, F64]:
    """Code, scale and the exact numbers that they stand for, of 512 Gaussian rows."""
    values = rng.standard_normal((512, head_dim)).astype(np.float32)
    if side[0] == "bf16":
        return *codecs.encode(*side, codecs.f32_to_bf16(values)), values.astype(np.float64)
    rows = codecs.f32_to_bf16(values)
    code, scale = codecs.encode(*side, rows)
    reference = codecs.bf16_to_f32(rows).astype(np.float64)
    if side in ROTATED_SIDES:
        reference = reference @ hadamard(head_dim)
    return code, scale, reference


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_format_error_is_the_measured_one(side: Side, head_dim: int, rng: Rng) -> None:
    """decode(encode(x)) against R x where the profile rotates, else x: within a tenth of the figure.  (codecs 7)"""
    code, scale, reference = gaussian(side, head_dim, rng)
    error = relative_error(codecs.decode(*side, code, scale, head_dim), reference)

    assert error == pytest.approx(FORMAT_ERRORS[format_of(side)], rel=0.1)


def shift_scales(code: U8, scale: U8, scale_bytes: int) -> tuple[U8, U8]:
    return code, np.roll(scale.reshape(-1), scale_bytes).reshape(scale.shape)


def swap_nibbles(code: U8, scale: U8) -> tuple[U8, U8]:
    return (code >> np.uint8(4)) | (code << np.uint8(4)), scale


def shift_codes(code: U8, scale: U8) -> tuple[U8, U8]:
    return np.roll(code, 1, axis=1), scale


def swap_scale_bytes(code: U8, scale: U8) -> tuple[U8, U8]:
    return code, np.ascontiguousarray(scale.reshape(-1, 2)[:, ::-1]).reshape(scale.shape)


@pytest.mark.parametrize(("side", "damage", "expected"), [
    *((side, partial(shift_scales, scale_bytes=1), 0.345) for side in FP4_SIDES),
    *((side, swap_nibbles, 1.414) for side in FP4_SIDES),
    *((side, partial(shift_scales, scale_bytes=2), None) for side in (*INT8_SIDES, *FP8_SIDES)),
    *((side, shift_codes, 1.414) for side in QUANTIZED_SIDES),
    *((side, swap_scale_bytes, None) for side in (*INT8_SIDES, *FP8_SIDES)),
])
def test_misplaced_scales_or_codes_exceed_twice_the_format_error(
    side: Side, damage: Callable[[U8, U8], tuple[U8, U8]], expected: float | None, rng: Rng
) -> None:
    """The bound that layout tests rely on does find a layout bug.  (codecs 7)"""
    code, scale, reference = gaussian(side, 256, rng)
    assert scale is not None
    wrong_code, wrong_scale = damage(code, scale)
    with np.errstate(all="ignore"):
        error = relative_error(codecs.decode(*side, wrong_code, wrong_scale, 256), reference)

    assert not error <= 2 * FORMAT_ERRORS[format_of(side)]
    if expected is not None:
        assert error == pytest.approx(expected, rel=0.05)
