"""The codecs' edges as literal bytes, each confronted with the oracle too, and their refusals.  (C4.4, codecs 2-6, 8)

Edges (codecs 6) and out-of-domain rows (codecs 8) go through `encode_unrotated`: a rotation would hide them.  Rotated
edges, random rows and the format error are in `test_codec_rows.py`, the number formats in `test_number_formats.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pagedkv import codecs
from pagedkv.codecs import CodecCounts, Kind
from pagedkv.errors import ConfigError, MisuseError, PagedKVError
from tests.host.codec_cases import (
    FP4,
    FP4_SIDES,
    FP8,
    INT8,
    INT8_SIDES,
    QUANTIZED_SIDES,
    Side,
    encoded,
    fp16_bits,
    next_down,
    next_up,
    nibbles,
    row_of,
)

# ---- codecs 2: bf16 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["k", "v"])
def test_bf16_keeps_every_bit_pattern(kind: Kind) -> None:
    """NaN payloads, infinities and signed zeros survive encode and decode.  (codecs 2)"""
    rows = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    counts = CodecCounts()
    code, scale = codecs.encode("bf16", kind, rows, counts=counts)
    decoded = codecs.decode("bf16", kind, code, scale, 256)

    assert rows.astype("<u2").tobytes() == code.tobytes()
    assert scale is None
    np.testing.assert_array_equal(rows.astype(np.uint32) << 16, decoded.view(np.uint32))
    assert CodecCounts() == counts


def test_bf16_takes_exact_values_without_rotation_and_refuses_others() -> None:
    """The profile copies bits, so a value that would need rounding is refused.  (codecs 2)"""
    exact = codecs.bf16_to_f32(np.arange(0x7F00, 0x8000, dtype=np.uint16).reshape(1, 256))
    code, _ = codecs.encode_unrotated("bf16", "k", exact)
    assert np.arange(0x7F00, 0x8000, dtype="<u2").tobytes() == code.tobytes()

    with pytest.raises(MisuseError, match="2 of 16 values that are not") as caught:
        codecs.encode_unrotated("bf16", "k", row_of({3: next_up(1.0), 4: next_down(1.0)}, 16))
    assert caught.value.inexact_count == 2


# ---- codecs 6: edges -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("side", QUANTIZED_SIDES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_zero_row_is_zero_bytes(side: Side, head_dim: int, zero: float) -> None:
    """All codes and scales of a zero row are zero, whatever the sign of its zeros.  (codecs 3, 4, 5)"""
    code, scale, counts = encoded(side, row_of({}, head_dim, fill=zero))

    assert not code.any()
    assert not scale.any()
    assert scale.size // (2 if side not in FP4_SIDES else 1) == counts.zero_groups


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dim", [0, 31, 127, 255])
def test_lone_outlier_leaves_every_other_code_zero(dim: int, sign: float) -> None:
    """Its own group carries scale 1 and one largest code; every other group is a zero group.  (codecs 6)"""
    code, scale, counts = encoded(INT8, row_of({dim: sign * 127.0}, 256))
    assert [0x3C00 if group == dim // 64 else 0 for group in range(4)] == fp16_bits(scale)
    assert [int(sign) * 127 if i == dim else 0 for i in range(256)] == code.view(np.int8)[0].tolist()
    assert CodecCounts(zero_groups=3) == counts

    code, scale, counts = encoded(FP8, row_of({dim: sign * 448.0}, 256))
    assert [0x3C00] == fp16_bits(scale)
    assert [(0x7E if sign > 0 else 0xFE) if i == dim else 0 for i in range(256)] == code[0].tolist()
    assert CodecCounts() == counts

    code, scale, counts = encoded(FP4, row_of({dim: sign * 6.0}, 256))
    assert [0x38 if group == dim // 16 else 0 for group in range(16)] == scale[0].tolist()
    assert [(0x7 if sign > 0 else 0xF) if i == dim else 0 for i in range(256)] == nibbles(code)
    assert CodecCounts(zero_groups=15) == counts


def test_negative_zero_keeps_its_sign_beside_an_outlier() -> None:
    """0x80 in a non-zero fp8 row and 0x8 in a non-zero fp4 group; int8 has one zero only.  (codecs 4, 5)"""
    code, _, _ = encoded(FP8, row_of({0: 448.0}, fill=-0.0))
    assert [0x7E] + [0x80] * 63 == code[0].tolist()

    code, scale, _ = encoded(FP4, row_of({0: 6.0}, fill=-0.0))
    assert [0x7] + [0x8] * 15 + [0x0] * 48 == nibbles(code)
    assert [0x38, 0, 0, 0] == scale[0].tolist()

    code, _, _ = encoded(INT8, row_of({0: 127.0}, fill=-0.0))
    assert [127] + [0] * 63 == code[0].tolist()


def test_negative_value_that_rounds_to_zero_keeps_its_sign() -> None:
    """-1/4 is the tie that goes to zero: code 0x8, not 0x0; fp8 below half a step gives 0x80.  (codecs 4, 5)"""
    code, _, _ = encoded(FP4, row_of([6.0, -0.25, 0.25, -0.125]))
    assert [0x7, 0x8, 0x0, 0x8] == nibbles(code)[:4]

    code, _, _ = encoded(FP8, row_of([448.0, -(2.0**-10), 2.0**-10, -(2.0**-11)]))
    assert [0x7E, 0x80, 0x00, 0x80] == code[0, :4].tolist()


def test_row_maximum_422() -> None:
    """A maximum whose scale is inexact in every format, with its largest code all the same.  (codecs 6)"""
    code, scale, _ = encoded(FP8, row_of([422.0, -422.0, 211.0]))
    assert [0x3B89] == fp16_bits(scale)  # 422 / 448 = 1929.14 / 2048 -> 1929 / 2048
    assert [0x7E, 0xFE, 0x76] == code[0, :3].tolist()

    code, scale, _ = encoded(INT8, row_of([422.0, -422.0, 211.0]))
    assert [0x42A5] == fp16_bits(scale)  # 422 / 127 = 1701.3 / 512 -> 1701 / 512
    assert [127, -127, 64] == code.view(np.int8)[0, :3].tolist()

    code, scale, _ = encoded(FP4, row_of([422.0, -422.0, 211.0]))
    assert [0x69, 0, 0, 0] == scale[0].tolist()  # 422 / 6 = 70.3, steps of 8 -> 72
    assert [0x7, 0xF, 0x5] == nibbles(code)[:3]


def test_values_near_two_to_the_minus_20() -> None:
    """The smallest scales: FP16 subnormals, the fp8 floor 2^-24 and the fp4 floor 2^-9.  (codecs 6)"""
    step = 2.0**-20
    code, scale, counts = encoded(INT8, row_of([step, -step]))
    assert [0x0000] == fp16_bits(scale)  # 2^-20 / 127 < 2^-25
    assert not code.any()
    assert CodecCounts(zero_groups=1) == counts

    code, scale, _ = encoded(INT8, row_of([8 * step, -step, 3 * step]))
    assert [0x0001] == fp16_bits(scale)  # 2^-17 / 127 = 1.008 * 2^-24
    assert [127, -16, 48] == code.view(np.int8)[0, :3].tolist()  # 128 steps of 2^-24 are limited to 127

    code, scale, _ = encoded(FP8, row_of([step, -step, 1.5 * step]))
    assert [0x0001] == fp16_bits(scale)
    assert [0x58, 0xD8, 0x5C] == code[0, :3].tolist()  # 16, -16, 24 steps of 2^-24

    code, scale, _ = encoded(FP4, row_of([step, -step]))
    assert [0x01, 0, 0, 0] == scale[0].tolist()
    assert [0x0, 0x8] + [0x0] * 62 == nibbles(code)


@pytest.mark.parametrize(
    ("largest", "bits", "code_of_largest"),
    [
        (127 * 2.0**-25, 0x0000, 0),  # exactly half of the smallest FP16: to even, a zero scale
        (next_up(127 * 2.0**-25), 0x0001, 64),
        (127 * 2.0**-24, 0x0001, 127),
        (190 * 2.0**-24, 0x0001, 127),  # 190 steps, limited: the scale was rounded down by a third
        (127 * 1.5 * 2.0**-24, 0x0002, 95),  # a tie between 1 and 2 steps
        (127 * 2.0**-14, 0x0400, 127),  # the smallest normal FP16
        (127.0 * 1023 * 2.0**-24, 0x03FF, 127),
    ],
)
def test_int8_keeps_subnormal_scales(largest: float, bits: int, code_of_largest: int) -> None:
    """FP16 subnormals are stored and used, and -128 never occurs.  (codecs 3)"""
    code, scale, _ = encoded(INT8, row_of([largest, -largest]))

    assert [bits] == fp16_bits(scale)
    assert [code_of_largest, -code_of_largest] == code.view(np.int8)[0, :2].tolist()


def test_every_e2m1_magnitude_and_every_tie() -> None:
    """Under scale 1 each magnitude is its own code and each of the seven ties goes to the even code.  (codecs 5)"""
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    code, scale, _ = encoded(FP4, row_of(magnitudes + [-value for value in magnitudes]))
    assert [0x38, 0, 0, 0] == scale[0].tolist()
    assert list(range(16)) == nibbles(code)[:16]

    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    code, _, _ = encoded(FP4, row_of([6.0, *ties, -6.0, *(-value for value in ties)]))
    assert [7, 0, 2, 2, 4, 4, 6, 6, 15, 8, 10, 10, 12, 12, 14, 14] == nibbles(code)[:16]

    to_odd_codes = [next_up(0.25), next_down(0.75), next_up(1.25), next_down(1.75), next_up(2.5), next_down(3.5)]
    code, _, _ = encoded(FP4, row_of([6.0, *to_odd_codes, next_up(5.0)]))
    assert [7, 1, 1, 3, 3, 5, 5, 7] == nibbles(code)[:8]


def test_every_tie_under_every_scale_is_a_true_division() -> None:
    """tie * S / S is the tie itself for all 126 scales; a product with 1 / S misses some of them.  (codecs 5)"""
    ties = np.array([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    scales = codecs.e4m3_decode(np.arange(1, 0x7F, dtype=np.uint8))
    groups = np.zeros((128, 16), np.float32)
    groups[:126, :8] = scales[:, np.newaxis] * ties
    groups[:126, 8:] = -groups[:126, :8]
    code, scale, _ = encoded(FP4, groups.reshape(8, 256))

    assert [*range(1, 0x7F), 0, 0] == scale.reshape(-1).tolist()
    expected = [7, 0, 2, 2, 4, 4, 6, 6, 15, 8, 10, 10, 12, 12, 14, 14]
    assert expected * 126 + [0] * 32 == nibbles(code)


@pytest.mark.parametrize(
    ("largest", "scale_byte", "code_of_largest"),
    [
        (6 * 2.0**-9, 0x01, 0x7),
        (3 * 2.0**-9, 0x01, 0x5),  # raw scale 2^-10, raised to the floor
        (2.0**-10, 0x01, 0x1),
        (2.0**-11, 0x01, 0x0),  # the tie at 1/4 step: a non-zero group of zero codes
        (2.0**-149, 0x01, 0x0),  # the smallest FP32
        (9 * 2.0**-9, 0x02, 0x6),  # raw scale 1.5 steps, tie to 2: 4.5 -> 4
        (6.375, 0x38, 0x7),  # raw scale 1.0625, tie to 1.0
        (next_up(6.375), 0x39, 0x7),
        (7.125, 0x3A, 0x7),  # raw scale 1.1875, tie to 1.25
        (2688.0, 0x7E, 0x7),
    ],
)
def test_fp4_scale_edges(largest: float, scale_byte: int, code_of_largest: int) -> None:
    """The floor, the ties and the top of the scale; none of these counts as saturated.  (codecs 5, 6)"""
    code, scale, counts = encoded(FP4, row_of([largest, -largest]))

    assert [scale_byte, 0, 0, 0] == scale[0].tolist()
    assert [code_of_largest, code_of_largest | 8] == nibbles(code)[:2]
    assert CodecCounts(zero_groups=3) == counts


def test_fp8_multiplies_by_the_rounded_reciprocal() -> None:
    """Row maximum 49: the product gives 7 subnormal steps where the quotient would give 6.  (codecs 4)"""
    values = row_of([49.0, 0.0013885498046875, -0.0013885498046875])
    code, scale, _ = encoded(FP8, values)

    assert [0x2F00] == fp16_bits(scale)
    assert [0x7E, 0x07, 0x87] == code[0, :3].tolist()
    quotient = codecs.e4m3_encode(values / np.float32(0.109375))
    assert 0x06 == quotient[0, 1], "the row would no longer tell the two rules apart"


@pytest.mark.parametrize("scale_bits", [0x0007, 0x0033, 0x352A, 0x4694, 0x7ADE])
def test_products_decide_where_the_quotient_is_a_tie(scale_bits: int) -> None:
    """Values at tie * S: fl(x * fl(1 / S)) may fall beside the tie, and that side counts.  (codecs 3, 4)"""
    scale = np.array([scale_bits], np.uint16).view(np.float16).astype(np.float32)[0]
    halves = np.append(np.arange(126), 0).astype(np.float32) + np.float32(0.5)
    values = scale * np.insert(halves, [0, 63], np.float32(127))[np.newaxis, :128]
    code, stored, _ = encoded(INT8, values)
    assert [scale_bits, scale_bits] == fp16_bits(stored)
    assert (np.rint(values / scale) != code.view(np.int8)).any(), "the row would no longer tell the two rules apart"

    magnitudes = codecs.e4m3_decode(np.arange(0x7F, dtype=np.uint8))
    middles = (magnitudes[1:] + magnitudes[:-1]) / np.float32(2)
    values = scale * np.insert(middles, 0, [448, -448]).astype(np.float32)[np.newaxis, :]
    code, stored, _ = encoded(FP8, values)
    assert [scale_bits] == fp16_bits(stored)
    assert (codecs.e4m3_encode(values / scale) != code).any(), "the row would no longer tell the two rules apart"


@pytest.mark.parametrize(
    ("side", "divisor", "largest"),
    [
        (INT8, 127, float.fromhex("0x1.fc3f82p+6")),
        (INT8, 127, float.fromhex("0x1.fd3d82p+11")),
        (FP8, 448, float.fromhex("0x1.2aecp+9")),
        (FP8, 448, float.fromhex("0x1.c187fep+8")),
        (FP4, 6, float.fromhex("0x1.c7fffep-3")),
    ],
)
def test_scale_is_a_true_division(side: Side, divisor: int, largest: float) -> None:
    """Maxima for which a product with the reciprocal of 127, 448 or 6 stores the neighbouring scale.  (codecs 3-5)"""
    encoded(side, row_of([largest, -largest]))

    value = np.array([largest], np.float32)
    raw_scales = np.concatenate((value / np.float32(divisor), value * (np.float32(1) / np.float32(divisor))))
    rounded = codecs.e4m3_encode(raw_scales) if side == FP4 else raw_scales.astype(np.float16)
    assert rounded[0] != rounded[1], "the maximum would no longer tell the two rules apart"


def test_fp8_floor_and_top_of_the_scale() -> None:
    """Below 448 * 2^-24 the scale is 2^-24; at 448 * 65504 it is the largest FP16, not yet saturated.  (codecs 4)"""
    code, scale, _ = encoded(FP8, row_of([2.0**-149, -(2.0**-149), 448 * 2.0**-25]))
    assert [0x0001] == fp16_bits(scale)
    assert [0x00, 0x80, 0x76] == code[0, :3].tolist()

    code, scale, counts = encoded(FP8, row_of([448.0 * 65504, -448.0 * 65504]))
    assert [0x7BFF] == fp16_bits(scale)
    assert [0x7E, 0xFE] == code[0, :2].tolist()
    assert CodecCounts() == counts


# ---- codecs 8: non-finite and out of domain --------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [INT8, FP8, FP4, ("k8v4", "k"), ("k8v4", "v")])
@pytest.mark.parametrize("dim", [0, 77, 127])
def test_nonfinite_value_marks_its_group_and_nothing_else(
    side: Side, dim: int, bad: float, rng: np.random.Generator
) -> None:
    """Scale NaN and codes zero for that group (row for fp8); other groups and rows keep their bytes.  (codecs 8)"""
    rows = rng.standard_normal((3, 128)).astype(np.float32)
    expected_code, expected_scale = codecs.encode_unrotated(*side, rows)
    assert expected_scale is not None
    rows[1, dim] = bad
    code, scale, counts = encoded(side, rows)

    group_dims = 64 if side in INT8_SIDES else 16 if side in FP4_SIDES else 128
    group = dim // group_dims
    code_bytes = group_dims // 2 if side in FP4_SIDES else group_dims
    nan_scale = b"\x7f" if side in FP4_SIDES else b"\x00\x7e"
    expected_code[1, group * code_bytes : (group + 1) * code_bytes] = 0
    expected_scale[1, group * len(nan_scale) : (group + 1) * len(nan_scale)] = np.frombuffer(nan_scale, np.uint8)
    np.testing.assert_array_equal(expected_code, code)
    np.testing.assert_array_equal(expected_scale, scale)
    assert CodecCounts(nonfinite=1) == counts
    is_marked = np.zeros((3, 128), np.bool_)
    is_marked[1, group * group_dims : (group + 1) * group_dims] = True
    np.testing.assert_array_equal(is_marked, np.isnan(codecs.decode(*side, code, scale, 128)))


def test_int8_scale_that_rounds_to_infinity() -> None:
    """From 127 * 65520 on: scale 0x7C00, codes zero, counted as non-finite; just below: 0x7BFF.  (codecs 8)"""
    limit = 127.0 * 65520
    code, scale, counts = encoded(INT8, row_of([1.0, -limit], 128))
    assert [0x7C00, 0x0000] == fp16_bits(scale)
    assert not code.any()
    assert CodecCounts(nonfinite=1, zero_groups=1) == counts

    code, scale, counts = encoded(INT8, row_of([1.0, -next_down(limit)], 128))
    assert [0x7BFF, 0x0000] == fp16_bits(scale)
    assert -127 == code.view(np.int8)[0, 1]
    assert CodecCounts(zero_groups=1) == counts


def test_fp8_row_beyond_the_domain_saturates() -> None:
    """Above 448 * 65504 the scale is 0x7BFF and codes saturate; the boundary itself does not count.  (codecs 8)"""
    limit = 448.0 * 65504
    code, scale, counts = encoded(FP8, row_of([next_up(limit), -16 * limit, limit / 2, -1.0]))

    assert [0x7BFF] == fp16_bits(scale)
    assert [0x7E, 0xFE, 0x76, 0x80] == code[0, :4].tolist()
    assert CodecCounts(saturated=1) == counts


def test_fp4_group_beyond_the_domain_saturates() -> None:
    """Above 2688 the scale byte is 0x7E and codes saturate: 3072, the next float32, the largest float32.  (codecs 8)"""
    for largest in (3072.0, next_up(2688.0), float(np.finfo(np.float32).max)):
        code, scale, counts = encoded(FP4, row_of([largest, -largest, 672.0]))
        assert [0x7E, 0, 0, 0] == scale[0].tolist()
        assert [0x7, 0xF, 0x3] == nibbles(code)[:3]
        assert CodecCounts(saturated=1, zero_groups=3) == counts


def test_largest_bf16_is_outside_every_quantized_domain() -> None:
    """0x7F7F: non-finite for int8, saturated for fp8 and fp4, overflow in a rotation.  (codecs 8)"""
    rows = np.full((1, 64), 0x7F7F, np.uint16)
    expected = {
        ("int8-g64", "k"): CodecCounts(nonfinite=1),
        ("int8-g64", "v"): CodecCounts(nonfinite=1),
        ("fp8-e4m3-row", "v"): CodecCounts(saturated=1),
    }
    for side in QUANTIZED_SIDES:
        counts = CodecCounts()
        code, _ = codecs.encode(*side, rows, counts=counts)
        groups_count = 4 if side in FP4_SIDES else 1
        assert expected.get(side, CodecCounts(nonfinite=groups_count)) == counts, side
        assert code.any() == (side == FP8)

    _, scale, counts = encoded(FP4, codecs.bf16_to_f32(rows))
    assert [0x7E] * 4 == scale[0].tolist()
    assert CodecCounts(saturated=4) == counts


# ---- refusals --------------------------------------------------------------------------------------------------------


GOOD = np.zeros((2, 64), np.uint16)
GOOD_VALUES = np.zeros((2, 64), np.float32)
GOOD_CODE, GOOD_SCALE = np.zeros((2, 32), np.uint8), np.zeros((2, 4), np.uint8)


@pytest.mark.parametrize(
    ("function", "arguments", "error", "message"),
    [
        (codecs.encode, ("int4", "k", GOOD), ConfigError, "int4"),
        (codecs.encode, ("bf16", "q", GOOD), MisuseError, "expected 'k' or 'v', got 'q'"),
        (codecs.encode, ("bf16", "k", GOOD_VALUES), MisuseError, "a NumPy array of uint16, got float32"),
        (codecs.encode, ("bf16", "k", GOOD.tolist()), MisuseError, "got list"),
        (codecs.encode, ("bf16", "k", GOOD[0]), MisuseError, r"got shape \(64,\)"),
        (codecs.encode, ("nvfp4-g16", "k", GOOD.T), MisuseError, "strided"),
        (codecs.encode, ("nvfp4-g16", "k", GOOD[:, :16].copy()), ConfigError, "64, 128 or 256, got 16"),
        (codecs.encode, ("bf16", "v", GOOD[:, :24].copy()), ConfigError, "from 16 to 256, got 24"),
        (codecs.encode_unrotated, ("k8v4", "k", GOOD), MisuseError, "array of float32, got uint16"),
        (codecs.encode_unrotated, ("k8v4", "x", GOOD_VALUES), MisuseError, "got 'x'"),
        (codecs.encode_unrotated, ("k8v4", "k", GOOD_VALUES[:, ::2]), MisuseError, "strided"),
        (codecs.encode_unrotated, ("k8v4", "k", np.zeros((2, 96), np.float32)), ConfigError, "got 96"),
        (codecs.rotate, (np.zeros((1, 80), np.float32),), MisuseError, "rows of 80"),
        (codecs.rotate, (np.zeros((1, 64)),), MisuseError, "got float64"),
        (codecs.rotate, (np.zeros(64, np.float32),), MisuseError, r"got shape \(64,\)"),
        (codecs.decode, ("nvfp4-g16", "k", GOOD_CODE, None, 64), MisuseError, r"uint8 \(2, 4\), got NoneType"),
        (codecs.decode, ("nvfp4-g16", "k", GOOD_CODE, GOOD_SCALE, 128), MisuseError, r"uint8 \(N, 64\)"),
        (codecs.decode, ("nvfp4-g16", "k", GOOD_CODE, GOOD_SCALE[:1], 64), MisuseError, r"got uint8 \(1, 4\)"),
        (codecs.decode, ("nvfp4-g16", "k", GOOD_CODE, GOOD_SCALE.view(np.int8), 64), MisuseError, "got int8"),
        (codecs.decode, ("nvfp4-g16", "k", GOOD_CODE[:, ::-1], GOOD_SCALE, 64), MisuseError, "strided"),
        (codecs.decode, ("bf16", "k", GOOD.view(np.uint8), GOOD_SCALE, 64), MisuseError, "got ndarray"),
        (codecs.decode, ("bf16", "k", GOOD, None, 64), MisuseError, "got uint16"),
        (codecs.decode, ("bf16", "k", GOOD.view(np.uint8), None, 63), ConfigError, "got 63"),
        (codecs.decode, ("bf16", "z", GOOD.view(np.uint8), None, 64), MisuseError, "got 'z'"),
        (codecs.bf16_to_f32, (GOOD_VALUES,), MisuseError, "got float32"),
        (codecs.f32_to_bf16, (np.zeros(3),), MisuseError, "got float64"),
        (codecs.e4m3_encode, (np.zeros(3),), MisuseError, "got float64"),
        (codecs.e4m3_decode, (np.zeros(3, np.int8),), MisuseError, "got int8"),
        (codecs.e2m1_encode, (np.array([np.nan, 0], np.float32),), MisuseError, "got 1 NaN of 2 values"),
        (codecs.e2m1_decode, (np.array([3, 16], np.uint8),), MisuseError, "got a byte of 0x10"),
    ],
)
def test_refusals_say_what_was_expected(
    function: Callable[..., object], arguments: tuple[object, ...], error: type[PagedKVError], message: str
) -> None:
    """Wrong profile, kind, head_dim, dtype, shape or layout is refused, never converted.  (C4.1, C4.5)"""
    with pytest.raises(error, match=message) as caught:
        function(*arguments)

    assert str(caught.value).endswith(f"({caught.value.clause})")
    assert isinstance(caught.value, ValueError)


def test_refusal_counts_nothing() -> None:
    """Counters hold what encoders stored, so a refused call leaves them as they were.  (codecs 8)"""
    counts = CodecCounts(1, 2, 3)
    with pytest.raises(ConfigError) as caught:
        codecs.encode("k8v4", "k", np.zeros((5, 48), np.uint16), counts=counts)

    assert CodecCounts(1, 2, 3) == counts
    assert caught.value.clause == "C4.5"
