// Conversions between FP32 and the formats of the cache: BF16, FP16, E4M3FN, E2M1, INT8.  (codecs 2-5)
//
// Integer arithmetic and explicit rounding only: without library functions and hardware conversions every compiler and
// every device gives the same bits.  Two methods occur often:
//
//   round to nearest even by a carry   add half of the dropped bits, less one when the kept part is even: the carry
//                                      enters the exponent by itself
//   round by a large addend            x + 2^k rounds to nearest even at the last bit of 2^k and leaves the count of
//                                      steps in the low bits (subnormal results)
//
// Each processor has its own default NaN, so every NaN that arithmetic gives becomes the one BF16 NaN 0x7FFF;
// `bf16_keep_nan` is for values that are only stored.
#pragma once

#include "kernels/float8.cuh"

namespace pagedkv {

constexpr uint32_t kMagnitudeMask = 0x7FFFFFFFu;
constexpr uint32_t kInfinityBits = 0x7F800000u;
constexpr uint16_t kHalfNan = 0x7E00;
constexpr uint8_t kE4m3Nan = 0x7F;

__device__ __forceinline__ float infinity() { return __uint_as_float(kInfinityBits); }

// ---- BF16 ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float bf16_to_float(uint32_t bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ uint32_t bf16_round_bits(uint32_t bits) {
    return (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
}

// Rounds the result of arithmetic to BF16: RNE, overflow to infinity, every NaN to 0x7FFF.
__device__ __forceinline__ uint32_t bf16_result(float value) {
    const uint32_t bits = __float_as_uint(value);
    return (bits & kMagnitudeMask) > kInfinityBits ? 0x7FFFu : bf16_round_bits(bits);
}

// Rounds a stored value to BF16: as above, but a NaN keeps its sign and upper payload and becomes quiet.  (C14.4)
__device__ __forceinline__ uint32_t bf16_keep_nan(float value) {
    const uint32_t bits = __float_as_uint(value);
    return (bits & kMagnitudeMask) > kInfinityBits ? (bits >> 16) | 0x40u : bf16_round_bits(bits);
}

// ---- FP16 scales -----------------------------------------------------------------------------------------------

// Returns the value of FP16 bits without sign; 2^112 lifts the exponent, subnormals included.
__device__ __forceinline__ float half_to_float(uint32_t bits) {
    const float finite = __fmul_rn(__uint_as_float((bits & 0x7FFFu) << 13), __uint_as_float(0x77800000u));
    return (bits & 0x7C00u) == 0x7C00u ? __uint_as_float(kInfinityBits | ((bits & 0x3FFu) << 13)) : finite;
}

// Rounds a finite non-negative float to FP16 bits: RNE, subnormals kept, from 65520 on infinity 0x7C00.
__device__ __forceinline__ uint32_t float_to_half(float value) {
    const uint32_t bits = __float_as_uint(value);
    const uint32_t subnormal = __float_as_uint(__fadd_rn(value, 0.5f)) - 0x3F000000u;  // steps of 2^-24
    const uint32_t normal = (bits + 0xFFFu + ((bits >> 13) & 1u) - (112u << 23)) >> 13;
    return bits >= 0x477FF000u ? 0x7C00u : bits < 0x38800000u ? subnormal : normal;
}

// ---- E4M3FN ----------------------------------------------------------------------------------------------------

// Rounds to E4M3FN: RNE, saturating to +-448, the sign of zero kept.  `value` is not NaN.
__device__ __forceinline__ uint32_t float_to_e4m3(float value) {
    const uint32_t raw = __float_as_uint(value);
    const uint32_t magnitude = raw & kMagnitudeMask;
    const uint32_t bits = magnitude > 0x43E00000u ? 0x43E00000u : magnitude;  // 448
    const uint32_t subnormal = __float_as_uint(__fadd_rn(__uint_as_float(bits), 16384.0f)) - 0x46800000u;  // 2^-9 steps
    const uint32_t normal = (bits + 0x7FFFFu + ((bits >> 20) & 1u) - (120u << 23)) >> 20;
    return (bits < 0x3C800000u ? subnormal : normal) | ((raw >> 24) & 0x80u);
}

// Returns the value of an E4M3FN code; 0x7F and 0xFF are NaN.  2^120 lifts the exponent, subnormals included.
__device__ __forceinline__ float e4m3_to_float(uint32_t code) {
    const uint32_t magnitude = code & 0x7Fu;
    const float lifted = __uint_as_float(((code & 0x80u) << 24) | (magnitude << 20));
    const float finite = __fmul_rn(lifted, __uint_as_float(0x7B800000u));
    return magnitude == 0x7Fu ? __uint_as_float(0x7FC00000u) : finite;
}

// ---- E2M1 ------------------------------------------------------------------------------------------------------

// Rounds to E2M1: RNE (ties to the even code), saturating to +-6, the sign kept also of zero.  `value` is not NaN.
__device__ __forceinline__ uint32_t float_to_e2m1(float value) {
    const uint32_t raw = __float_as_uint(value);
    const float a = __uint_as_float(raw & kMagnitudeMask);
    // Code c starts at the tie below it; the tie itself belongs to the even neighbour.
    const uint32_t code = uint32_t(a > 0.25f) + uint32_t(a >= 0.75f) + uint32_t(a > 1.25f) + uint32_t(a >= 1.75f) +
                          uint32_t(a > 2.5f) + uint32_t(a >= 3.5f) + uint32_t(a > 5.0f);
    return code | ((raw >> 28) & 8u);
}

// Twice the magnitude of each E2M1 code 0..7, four bits each: 0 1 2 3 4 6 8 12.
constexpr uint32_t kE2m1Doubled = 0xC8643210u;

// ---- eight values at once ----------------------------------------------------------------------------------------

#if defined(__CUDACC__)

// Eight BF16 numbers in memory order.
__device__ __forceinline__ Float8 bf16_decode8(const uint4& bits) {
    return Float8{{__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xFFFF0000u),
                   __uint_as_float(bits.y << 16), __uint_as_float(bits.y & 0xFFFF0000u),
                   __uint_as_float(bits.z << 16), __uint_as_float(bits.z & 0xFFFF0000u),
                   __uint_as_float(bits.w << 16), __uint_as_float(bits.w & 0xFFFF0000u)}};
}

// Eight INT8 codes in memory order.  Byte b ^ 0x80 placed in 2^23's last byte is 2^23 + 128 + b exactly.
__device__ __forceinline__ Float8 int8_decode8(const uint2& codes) {
    Float8 result;
    PK_UNROLL for (int i = 0; i < 8; ++i) {
        const uint32_t word = (i < 4 ? codes.x : codes.y) ^ 0x80808080u;
        result[i] = __fsub_rn(__uint_as_float(__byte_perm(word, 0x4B000000u, 0x7540u + (i & 3))), 8388736.0f);
    }
    return result;
}

// Eight E4M3FN codes in memory order.
__device__ __forceinline__ Float8 e4m3_decode8(const uint2& codes) {
    Float8 result;
    PK_UNROLL
    for (int i = 0; i < 8; ++i) result[i] = e4m3_to_float(((i < 4 ? codes.x : codes.y) >> (8 * (i & 3))) & 0xFFu);
    return result;
}

// Twice the value of eight E2M1 codes, code i in bits [4i, 4i + 4).
__device__ __forceinline__ Float8 e2m1_decode8_doubled(uint32_t codes) {
    Float8 result;
    PK_UNROLL for (int i = 0; i < 8; ++i) {
        const uint32_t code = codes >> (4 * i);
        const float magnitude = __uint_as_float(0x4B000000u | ((kE2m1Doubled >> ((code & 7u) << 2)) & 15u));
        const uint32_t sign = (code & 8u) << 28;
        result[i] = __uint_as_float(__float_as_uint(__fsub_rn(magnitude, 8388608.0f)) | sign);
    }
    return result;
}

#else  // cpu

// GCC would split a widening of eight elements in halves; these built-ins are one instruction.
#if defined(__AVX2__) && !defined(__clang__)
typedef short Short8 __attribute__((vector_size(16)));
typedef char Char16 __attribute__((vector_size(16)));
typedef long long Long2 __attribute__((vector_size(16)));

PK_INLINE Bits8 widen_words(const uint4& words) {
    return reinterpret_bits<Bits8>(__builtin_ia32_pmovzxwd256(reinterpret_bits<Short8>(words)));
}

PK_INLINE Bits8 widen_bytes(const uint2& bytes) {
    const Long2 padded = {reinterpret_bits<long long>(bytes), 0};
    return reinterpret_bits<Bits8>(__builtin_ia32_pmovzxbd256(reinterpret_bits<Char16>(padded)));
}
#else
typedef uint16_t Uint8x16 __attribute__((vector_size(16)));
typedef uint8_t Uint8x8 __attribute__((vector_size(8)));

PK_INLINE Bits8 widen_words(const uint4& words) {
    return __builtin_convertvector(reinterpret_bits<Uint8x16>(words), Bits8);
}

PK_INLINE Bits8 widen_bytes(const uint2& bytes) {
    return __builtin_convertvector(reinterpret_bits<Uint8x8>(bytes), Bits8);
}
#endif

PK_INLINE Float8 bf16_decode8(const uint4& bits) {
    return reinterpret_bits<Float8>(widen_words(bits) << 16);
}

PK_INLINE Float8 int8_decode8(const uint2& codes) {
    const Int8 values = reinterpret_bits<Int8>(widen_bytes(codes) << 24) >> 24;
    return __builtin_convertvector(values, Float8);
}

PK_INLINE Float8 e4m3_decode8(const uint2& codes) {
    const Bits8 code = widen_bytes(codes);
    const Bits8 magnitude = code & 0x7Fu;
    const Float8 finite = reinterpret_bits<Float8>(((code & 0x80u) << 24) | (magnitude << 20)) * 0x1p120f;
    const Bits8 is_nan = reinterpret_bits<Bits8>(magnitude == 0x7Fu);
    return reinterpret_bits<Float8>(reinterpret_bits<Bits8>(finite) | (is_nan & 0x7FC00000u));
}

PK_INLINE Float8 e2m1_decode8_doubled(uint32_t codes) {
    const Bits8 places = {0, 4, 8, 12, 16, 20, 24, 28};
    const Bits8 code = (Bits8{} + codes) >> places;
    const Bits8 doubled = ((Bits8{} + kE2m1Doubled) >> ((code & 7u) << 2)) & 15u;
    const Float8 magnitude = __builtin_convertvector(reinterpret_bits<Int8>(doubled), Float8);
    return reinterpret_bits<Float8>(reinterpret_bits<Bits8>(magnitude) | ((code & 8u) << 28));
}

#endif

}  // namespace pagedkv
