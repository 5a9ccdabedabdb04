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
from tests.host.codec_cases import U8, Rng, encoded, fp16_bits, next_down, next_up, nibbles, row_of
from tests.host.codec_sides import FP4, FP4_SIDES, FP8, INT8, INT8_SIDES, QUANTIZED_SIDES, Side

TIE_CODES = [7, 0, 2, 2, 4, 4, 6, 6, 15, 8, 10, 10, 12, 12, 14, 14]
"""E2M1 codes of 6, the seven ties and their negatives: each tie goes to the even code."""


def codes_of(side: Side, code: U8) -> list[int]:
    """Codes as numbers: signed for int8, nibbles for fp4."""
    numbers: list[int] = code.view(np.int8).reshape(-1).tolist() if side == INT8 else code.reshape(-1).tolist()
    return nibbles(code) if side == FP4 else numbers


def scales_of(side: Side, scale: U8) -> list[int]:
    return [int(byte) for byte in scale.reshape(-1)] if side == FP4 else fp16_bits(scale)


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


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dim", [0, 31, 127, 255])
@pytest.mark.parametrize(
    ("side", "largest", "one", "group_dims", "codes"),
    [(INT8, 127.0, 0x3C00, 64, (127, -127)), (FP8, 448.0, 0x3C00, 256, (0x7E, 0xFE)), (FP4, 6.0, 0x38, 16, (0x7, 0xF))],
)
def test_lone_outlier_leaves_every_other_code_zero(
    side: Side, largest: float, one: int, group_dims: int, codes: tuple[int, int], dim: int, sign: int
) -> None:
    """Its own group carries scale 1 and one largest code; every other group is a zero group.  (codecs 6)"""
    code, scale, counts = encoded(side, row_of({dim: sign * largest}, 256))

    groups = 256 // group_dims
    assert [one if group == dim // group_dims else 0 for group in range(groups)] == scales_of(side, scale)
    assert [codes[sign < 0] if i == dim else 0 for i in range(256)] == codes_of(side, code)
    assert CodecCounts(zero_groups=groups - 1) == counts


MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
TO_ODD = [next_up(0.25), next_down(0.75), next_up(1.25), next_down(1.75), next_up(2.5), next_down(3.5), next_up(5.0)]
STEP = 2.0**-20
INT8_LIMIT, FP8_LIMIT = 127.0 * 65520, 448.0 * 65504


EDGES: dict[str, tuple[Side, list[float], list[int], list[int]]] = {
    # name: side, first values (the rest is zero), every scale, first codes
    "-0 beside an outlier, fp8": (FP8, [448.0, *[-0.0] * 63], [0x3C00], [0x7E, *[0x80] * 63]),
    "-0 beside an outlier, fp4": (FP4, [6.0, *[-0.0] * 63], [0x38, 0, 0, 0], [7, *[8] * 15, *[0] * 48]),
    "-0 beside an outlier, int8": (INT8, [127.0, *[-0.0] * 63], [0x3C00], [127, *[0] * 63]),
    # -1/4 is the tie that goes to zero; fp8 below half a step
    "negatives round to -0, fp4": (FP4, [6.0, -0.25, 0.25, -0.125], [0x38, 0, 0, 0], [7, 8, 0, 8]),
    "negatives round to -0, fp8": (FP8, [448.0, -(2.0**-10), 2.0**-10, -(2.0**-11)], [0x3C00], [0x7E, 0x80, 0, 0x80]),
    # an inexact scale: 422 / 448 = 1929.14 / 2048, 422 / 127 = 1701.3 / 512, 422 / 6 = 70.3 in steps of 8
    "maximum 422, fp8": (FP8, [422.0, -422.0, 211.0], [0x3B89], [0x7E, 0xFE, 0x76]),
    "maximum 422, int8": (INT8, [422.0, -422.0, 211.0], [0x42A5], [127, -127, 64]),
    "maximum 422, fp4": (FP4, [422.0, -422.0, 211.0], [0x69, 0, 0, 0], [7, 15, 5]),
    # the smallest scales: 2^-20 / 127 < 2^-25; 2^-17 / 127 = 1.008 * 2^-24, where 128 steps are limited to 127
    "near 2^-20, int8": (INT8, [STEP, -STEP], [0], [0, 0]),
    "near 2^-17, int8": (INT8, [8 * STEP, -STEP, 3 * STEP], [1], [127, -16, 48]),
    "near 2^-20, fp8": (FP8, [STEP, -STEP, 1.5 * STEP], [1], [0x58, 0xD8, 0x5C]),  # 16, -16, 24 steps of 2^-24
    "near 2^-20, fp4": (FP4, [STEP, -STEP], [1, 0, 0, 0], [0, 8, *[0] * 62]),
    # under scale 1 each magnitude is its own code, each tie goes to the even code and its neighbour to the odd one
    "every e2m1 magnitude": (FP4, MAGNITUDES + [-m for m in MAGNITUDES], [0x38, 0, 0, 0], list(range(16))),
    "every e2m1 tie": (FP4, [6.0, *TIES, -6.0, *(-tie for tie in TIES)], [0x38, 0, 0, 0], TIE_CODES),
    "beside every e2m1 tie": (FP4, [6.0, *TO_ODD], [0x38, 0, 0, 0], [7, 1, 1, 3, 3, 5, 5, 7]),
    "beside 3072, fp4": (FP4, [3072.0, -3072.0, 672.0], [0x7E, 0, 0, 0], [7, 15, 3]),  # a quarter of 448 * 6
    "fp8 floor": (FP8, [2.0**-149, -(2.0**-149), 448 * 2.0**-25], [1], [0, 0x80, 0x76]),
    "fp8 top": (FP8, [FP8_LIMIT, -FP8_LIMIT], [0x7BFF], [0x7E, 0xFE]),
    "fp8 beyond": (FP8, [next_up(FP8_LIMIT), -16 * FP8_LIMIT, FP8_LIMIT / 2, -1.0], [0x7BFF], [0x7E, 0xFE, 0x76, 0x80]),
    "int8 to infinity": (INT8, [1.0, -INT8_LIMIT], [0x7C00], [0, 0]),
    "int8 below infinity": (INT8, [1.0, -next_down(INT8_LIMIT)], [0x7BFF], [0, -127]),
    **{
        # int8 keeps FP16 subnormals: half of the smallest goes to a zero scale; 190 steps are limited, since the scale
        # was rounded down by a third; 1.5 steps are a tie between 1 and 2; 2^-14 is the smallest normal
        f"int8 scale of {largest!r}": (INT8, [largest, -largest], [bits], [code, -code])
        for largest, bits, code in (
            (127 * 2.0**-25, 0x0000, 0), (next_up(127 * 2.0**-25), 0x0001, 64), (127 * 2.0**-24, 0x0001, 127),
            (190 * 2.0**-24, 0x0001, 127), (127 * 1.5 * 2.0**-24, 0x0002, 95), (127 * 2.0**-14, 0x0400, 127),
            (127.0 * 1023 * 2.0**-24, 0x03FF, 127),
        )
    },
    **{
        # 3 and 1 * 2^-9 / 6 are raised to the floor; 2^-11 is the tie at 1/4 step; 2^-149 the smallest FP32; 9 * 2^-9 a
        # tie to 2 steps, so that 4.5 -> 4; raw scales 1.0625 and 1.1875 are ties to 1.0 and 1.25; 3072 saturates
        f"fp4 scale of {largest!r}": (FP4, [largest, -largest], [byte, 0, 0, 0], [code, code | 8])
        for largest, byte, code in (
            (6 * 2.0**-9, 0x01, 7), (3 * 2.0**-9, 0x01, 5), (2.0**-10, 0x01, 1), (2.0**-11, 0x01, 0),
            (2.0**-149, 0x01, 0), (9 * 2.0**-9, 0x02, 6), (6.375, 0x38, 7), (next_up(6.375), 0x39, 7),
            (7.125, 0x3A, 7), (2688.0, 0x7E, 7), (next_up(2688.0), 0x7E, 7), (3072.0, 0x7E, 7),
            (float(np.finfo(np.float32).max), 0x7E, 7),
        )
    },
}  # fmt: skip
COUNTED = {
    "near 2^-20, int8": CodecCounts(zero_groups=1), "fp8 top": CodecCounts(), "fp8 beyond": CodecCounts(saturated=1),
    "int8 to infinity": CodecCounts(nonfinite=1), "int8 below infinity": CodecCounts(),
    "fp4 scale of 2688.0": CodecCounts(zero_groups=3), "fp4 scale of 3072.0": CodecCounts(saturated=1, zero_groups=3),
}


@pytest.mark.parametrize("name", EDGES)
def test_an_edge_has_these_bytes(name: str) -> None:
    """Scales and codes as literals, so that no mistake that codec and oracle share can hide.  (codecs 3-6, 8)"""
    side, values, scales, codes = EDGES[name]
    code, scale, counts = encoded(side, row_of(values))

    assert scales == scales_of(side, scale)
    assert codes == codes_of(side, code)[: len(codes)]
    assert COUNTED.get(name, counts) == counts


def test_every_tie_under_every_scale_is_a_true_division() -> None:
    """tie * S / S is the tie itself for all 126 scales; a product with 1 / S misses some of them.  (codecs 5)"""
    ties = np.array([6.0, *TIES], np.float32)
    scales = codecs.e4m3_decode(np.arange(1, 0x7F, dtype=np.uint8))
    groups = np.zeros((128, 16), np.float32)
    groups[:126, :8] = scales[:, np.newaxis] * ties
    groups[:126, 8:] = -groups[:126, :8]
    code, scale, _ = encoded(FP4, groups.reshape(8, 256))

    assert [*range(1, 0x7F), 0, 0] == scale.reshape(-1).tolist()
    assert TIE_CODES * 126 + [0] * 32 == nibbles(code)


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


@pytest.mark.parametrize(("side", "divisor", "largest"), [
    (INT8, 127, float.fromhex("0x1.fc3f82p+6")), (INT8, 127, float.fromhex("0x1.fd3d82p+11")),
    (FP8, 448, float.fromhex("0x1.2aecp+9")), (FP8, 448, float.fromhex("0x1.c187fep+8")),
    (FP4, 6, float.fromhex("0x1.c7fffep-3")),
])
def test_scale_is_a_true_division(side: Side, divisor: int, largest: float) -> None:
    """Maxima for which a product with the reciprocal of 127, 448 or 6 stores the neighbouring scale.  (codecs 3-5)"""
    encoded(side, row_of([largest, -largest]))

    value = np.array([largest], np.float32)
    raw_scales = np.concatenate((value / np.float32(divisor), value * (np.float32(1) / np.float32(divisor))))
    rounded = codecs.e4m3_encode(raw_scales) if side == FP4 else raw_scales.astype(np.float16)
    assert rounded[0] != rounded[1], "the maximum would no longer tell the two rules apart"


# ---- codecs 8: non-finite and out of domain --------------------------------------------------------------------------
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [INT8, FP8, FP4, ("k8v4", "k"), ("k8v4", "v")])
@pytest.mark.parametrize("dim", [0, 77, 127])
def test_nonfinite_value_marks_its_group_and_nothing_else(side: Side, dim: int, bad: float, rng: Rng) -> None:
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


def test_largest_bf16_is_outside_every_quantized_domain() -> None:
    """0x7F7F: non-finite for int8, saturated for fp8 and fp4, overflow in a rotation.  (codecs 8)"""
    rows = np.full((1, 64), 0x7F7F, np.uint16)
    expected = {
        ("int8-g64", "k"): CodecCounts(nonfinite=1), ("int8-g64", "v"): CodecCounts(nonfinite=1),
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


@pytest.mark.parametrize(("function", "arguments", "error", "message"), [
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
])
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
