"""BF16, E4M3FN and E2M1: every code, every midpoint, and what lies beyond.  (C14.4, codecs 4, 5)"""

from __future__ import annotations

import numpy as np

from pagedkv import codecs
from tests.host.codec_cases import Rng, assert_same_bits
from tests.oracle import codec_oracle as oracle


def test_e4m3_rounds_every_midpoint_to_the_even_code() -> None:
    """All 126 midpoints, the float32 on either side of each, every value, and what lies beyond 448.  (codecs 4)"""
    values = codecs.e4m3_decode(np.arange(0x7F, dtype=np.uint8))
    middle = (values[1:] + values[:-1]) / np.float32(2)
    beside = np.concatenate((np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(500))))
    beyond = np.array([464.0, 480.0, 1.0e30, 2.0**-149], np.float32)
    tried = np.concatenate((values, middle, beside, beyond))
    tried = np.concatenate((tried, -tried))

    assert [oracle.e4m3_code(float(value)) for value in tried] == codecs.e4m3_encode(tried).tolist()
    assert [0x7E, 0xFE] == codecs.e4m3_encode(np.array([np.inf, -np.inf], np.float32)).tolist()
    assert list(range(0x7F)) == codecs.e4m3_encode(values).tolist()
    assert [0x7F, 0xFF] == codecs.e4m3_encode(np.array([np.nan, np.copysign(np.nan, -1)], np.float32)).tolist()


def test_small_formats_decode_every_code() -> None:
    """256 E4M3FN codes with two NaN, 16 E2M1 codes, and all 256 packed pairs.  (codecs 4, 5)"""
    every_byte = np.arange(256, dtype=np.uint8)
    expected = np.array([oracle.e4m3_value(code) for code in range(256)], np.float32)
    assert_same_bits(expected, codecs.e4m3_decode(every_byte))
    assert [0x7F, 0xFF] == np.isnan(expected).nonzero()[0].tolist()
    expected = np.array([oracle.e2m1_value(code) for code in range(16)], np.float32)
    assert_same_bits(expected, codecs.e2m1_decode(every_byte[:16]))
    assert list(range(16)) == codecs.e2m1_encode(expected).tolist()

    pairs = codecs.unpack_pairs(every_byte.reshape(1, 256))
    assert (0x1, 0x2) == (pairs[0, 2 * 0x21], pairs[0, 2 * 0x21 + 1]), "dim 2j lies in the low half"
    np.testing.assert_array_equal(every_byte.reshape(1, 256), codecs.pack_pairs(pairs))


def test_bf16_rounding(rng: Rng) -> None:
    """RNE with carries, overflow to infinity, subnormals, and NaN that stay NaN.  (C14.4)"""
    bits = np.concatenate((
        rng.integers(0, 1 << 32, 500, dtype=np.uint32),
        rng.integers(0, 1 << 16, 300, dtype=np.uint32) << np.uint32(16) | np.uint32(0x8000),
        np.array([0x7F7F7FFF, 0x7F7F8000, 0xFF7FFFFF, 0x0000_8000, 0x0000_8001, 0x3FFFFFFF, 0x80000000], np.uint32),
    ))
    values = bits.view(np.float32)
    values = values[~np.isnan(values)]
    assert [oracle.bf16_bits(float(value)) for value in values] == codecs.f32_to_bf16(values).tolist()

    signalling = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFC10000], np.uint32).view(np.float32)
    assert [0x7FC0, 0xFFC0, 0x7FFF, 0xFFC1] == codecs.f32_to_bf16(signalling).tolist()
    every = np.arange(1 << 16, dtype=np.uint16)
    finite = every[np.isfinite(codecs.bf16_to_f32(every))]
    np.testing.assert_array_equal(finite, codecs.f32_to_bf16(codecs.bf16_to_f32(finite)))
