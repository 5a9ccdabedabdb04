// The persistent codecs on the device: rotation, encoding of rows, decoding of codes.  (C4.4, codecs 1-8)
//
// One module is compiled per (PK_PROFILE, PK_HEAD_DIM); everything that depends on them is a constant here.
//
//   PK_PROFILE  0 bf16   1 int8-g64   2 fp8-e4m3-row   3 nvfp4-g16   4 k8v4       (pagedkv/ops/modules.py)
//
// With PK_CODEC_EVENTS, every kernel that encodes has one more parameter, `event_counts`, and counts groups (codecs 8).
//
// Encoding: a lane owns 16 consecutive dims of a row, a row takes D / 16 neighbouring lanes, a warp as many rows as
// fit.  16 is the nvfp4 group, a quarter of the int8 group and 16 bytes of int8 or fp8 codes.
//
// Rotation of D = 16 * T values (T = 4, 8, 16) in such lanes: strides 1, 2, 4, 8 lie inside a lane.  For strides 16,
// 32, ... the row passes through shared memory once, and a lane takes 256 / D columns c, c + 16, c + 32, ..., of T
// values each.  This order of the strides decides the code bytes.
//
// Every byte equals that of `pagedkv.codecs.encode`.
#pragma once

#include "kernels/number_formats.cuh"

// The parameter and the argument of counting.  They are empty without it, so that such a kernel has no trace of it.
// event_counts: (3,) saturated, nonfinite, zero_groups; CODEC_EVENTS in pagedkv/values/profiles.py.
#ifdef PK_CODEC_EVENTS
#define PK_EVENT_PARAMETER , unsigned long long *event_counts
#define PK_EVENT_ARGUMENT , event_counts
#else
#define PK_EVENT_PARAMETER
#define PK_EVENT_ARGUMENT
#endif

namespace pagedkv {

enum class Codec { kBf16, kInt8, kFp8, kFp4 };

constexpr int kProfile = PK_PROFILE;
constexpr int kHeadDim = PK_HEAD_DIM;
static_assert(kProfile >= 0 && kProfile <= 4, "the set of profiles is closed (C4.1)");
static_assert(kHeadDim % 16 == 0 && kHeadDim >= 16 && kHeadDim <= 256, "C4.5");
static_assert(kProfile == 0 || kHeadDim == 64 || kHeadDim == 128 || kHeadDim == 256, "C4.5");

constexpr Codec kCodecsK[] = {Codec::kBf16, Codec::kInt8, Codec::kFp8, Codec::kFp4, Codec::kFp8};
constexpr Codec kCodecsV[] = {Codec::kBf16, Codec::kInt8, Codec::kFp8, Codec::kFp4, Codec::kFp4};
constexpr Codec kCodecK = kCodecsK[kProfile];
constexpr Codec kCodecV = kCodecsV[kProfile];
constexpr bool kRotatesK = kProfile >= 2;
constexpr bool kRotatesV = kProfile >= 3;

__device__ constexpr int code_row_bytes(Codec codec) {
    return codec == Codec::kBf16 ? 2 * kHeadDim : codec == Codec::kFp4 ? kHeadDim / 2 : kHeadDim;
}

__device__ constexpr int scale_row_bytes(Codec codec) {
    return codec == Codec::kBf16   ? 0
           : codec == Codec::kInt8 ? kHeadDim / 64 * 2
           : codec == Codec::kFp8  ? 2
                                   : kHeadDim / 16;
}

static_assert(code_row_bytes(kCodecK) % 16 == 0 && code_row_bytes(kCodecV) % 16 == 0,
              "every code row starts 16-byte aligned (C3.10)");

constexpr int kLaneDims = 16;
constexpr int kRowLanes = kHeadDim / kLaneDims;

// ---- rotation ----------------------------------------------------------------------------------------------------

// Returns the factor c of codecs 1: the nearest float of 1 / sqrt(D).
__device__ constexpr float rotation_factor() {
    return kHeadDim == 64 ? 0.125f : kHeadDim == 256 ? 0.0625f : 0x1.6a09e6p-4f;
}

__device__ __forceinline__ void butterfly(float& a, float& b) {
    const float sum = __fadd_rn(a, b);
    const float difference = __fsub_rn(a, b);
    a = sum;
    b = difference;
}

// Replaces x by R x, with the operations in the order of codecs 1.  Whole warps call it: the kRowLanes lanes of a row
// hold its dims in order, `piece` is a lane's place among them, and only they use `row`, kHeadDim shared floats.  Two
// __syncwarp.
__device__ __forceinline__ void rotate_row(float (&x)[kLaneDims], float* row, int piece) {
    static_assert(32 % kRowLanes == 0 || !kRotatesK, "a rotated row lies within one warp");
    constexpr int kColumns = 256 / kHeadDim > 0 ? 256 / kHeadDim : 1;
    constexpr int kColumnValues = kLaneDims / kColumns;
    PK_UNROLL for (int stride = 1; stride < kLaneDims; stride *= 2) {
        PK_UNROLL for (int i = 0; i < kLaneDims; ++i) {
            if ((i & stride) == 0) butterfly(x[i], x[i + stride]);
        }
    }
    PK_UNROLL for (int i = 0; i < kLaneDims; ++i) row[piece * kLaneDims + i] = x[i];
    __syncwarp();
    PK_UNROLL for (int column = 0; column < kColumns; ++column) {
        float* values = row + piece * kColumns + column;
        float y[kColumnValues];
        PK_UNROLL for (int i = 0; i < kColumnValues; ++i) y[i] = values[i * kLaneDims];
        PK_UNROLL for (int stride = 1; stride < kColumnValues; stride *= 2) {
            PK_UNROLL for (int i = 0; i < kColumnValues; ++i) {
                if ((i & stride) == 0) butterfly(y[i], y[i + stride]);
            }
        }
        PK_UNROLL for (int i = 0; i < kColumnValues; ++i) values[i * kLaneDims] = __fmul_rn(y[i], rotation_factor());
    }
    __syncwarp();
    PK_UNROLL for (int i = 0; i < kLaneDims; ++i) x[i] = row[piece * kLaneDims + i];
}

// ---- encoding ------------------------------------------------------------------------------------------------------

// Returns the largest of kLanes neighbouring lanes' values.  Integer maximum of magnitude bits: NaN and infinity win
// over every number, where fmaxf would drop a NaN (codecs 8).
template <int kLanes>
__device__ __forceinline__ uint32_t neighbours_max(uint32_t value, uint32_t* warp_words, int lane) {
    warp_words[lane] = value;
    __syncwarp();
    uint32_t result = 0;
    PK_UNROLL for (int i = 0; i < kLanes; ++i) {
        const uint32_t other = warp_words[lane / kLanes * kLanes + i];
        result = other > result ? other : result;
    }
    return result;
}

// Stores a lane's 16 codes of one byte each.
__device__ __forceinline__ void store_codes(uint8_t* code_row, int piece, const uint32_t (&codes)[kLaneDims]) {
    uint32_t words[4];
    PK_UNROLL for (int i = 0; i < 4; ++i) {
        words[i] = codes[4 * i] | (codes[4 * i + 1] << 8) | (codes[4 * i + 2] << 16) | (codes[4 * i + 3] << 24);
    }
    store16(code_row + piece * kLaneDims, make_uint4(words[0], words[1], words[2], words[3]));
}

#ifdef PK_CODEC_EVENTS

// Counts the groups of the warp's live rows that codecs 8 names, and zero groups.  Whole warps call it; `largest_bits`
// is the largest magnitude of the lane's group.  One atomic for each kind that occurs in the warp, none for
// ordinary rows; sums of integers do not depend on the order of warps.
template <Codec kCodec>
__device__ __forceinline__ void count_events(uint32_t largest_bits, bool is_live, int piece,
                                             int lane PK_EVENT_PARAMETER) {
    constexpr int kGroupLanes = kCodec == Codec::kInt8 ? 4 : kCodec == Codec::kFp8 ? kRowLanes : 1;
    const bool is_first = is_live && piece % kGroupLanes == 0;
    const bool is_finite = largest_bits < kInfinityBits;
    const float largest = __uint_as_float(largest_bits);
    bool is_saturated = false;
    bool is_nonfinite = !is_finite;
    bool is_zero = largest_bits == 0;
    if constexpr (kCodec == Codec::kInt8) {
        // The scale decides: a small group rounds to scale 0, a large one to an infinite scale.
        const uint32_t half = is_finite ? float_to_half(__fdiv_rn(largest, 127.0f)) : kHalfNan;
        is_nonfinite = half >= 0x7C00u;  // infinite or NaN
        is_zero = half == 0;
    }
    if constexpr (kCodec == Codec::kFp8) is_saturated = is_finite && largest > 448.0f * 65504.0f;
    if constexpr (kCodec == Codec::kFp4) is_saturated = is_finite && largest > 6.0f * 448.0f;
    const bool kinds[] = {is_saturated, is_nonfinite, is_zero};
    PK_UNROLL for (int kind = 0; kind < 3; ++kind) {
        const uint32_t groups = __ballot_sync(0xFFFFFFFFu, is_first && kinds[kind]);
        if (lane == 0 && groups != 0) {
            atomicAdd(event_counts + kind, static_cast<unsigned long long>(__popc(groups)));
        }
    }
}

#endif

// Encodes one row of kHeadDim values (rotated already, where the profile rotates) and stores code and scale.  Whole
// warps call it; `x` holds the lane's 16 dims [16 * piece, 16 * piece + 16).  `is_live` is the same for all lanes of a
// row; dead rows store nothing.  `warp_words`: 32 shared words of the warp.
template <Codec kCodec>
__device__ __forceinline__ void encode_row(const float (&x)[kLaneDims], uint8_t* code_row, uint8_t* scale_row,
                                           uint32_t* warp_words, int lane, int piece,
                                           bool is_live PK_EVENT_PARAMETER) {
    static_assert(kCodec != Codec::kBf16, "bf16 rows are copied, not encoded (codecs 2)");
    uint32_t largest_bits = 0;
    PK_UNROLL for (int i = 0; i < kLaneDims; ++i) {
        const uint32_t magnitude = __float_as_uint(x[i]) & kMagnitudeMask;
        largest_bits = magnitude > largest_bits ? magnitude : largest_bits;
    }
    if constexpr (kCodec == Codec::kInt8) largest_bits = neighbours_max<4>(largest_bits, warp_words, lane);
    if constexpr (kCodec == Codec::kFp8) largest_bits = neighbours_max<kRowLanes>(largest_bits, warp_words, lane);
#ifdef PK_CODEC_EVENTS
    count_events<kCodec>(largest_bits, is_live, piece, lane, event_counts);
#endif
    if (!is_live) return;
    const bool is_finite = largest_bits < kInfinityBits;
    const float largest = __uint_as_float(largest_bits);

    if constexpr (kCodec == Codec::kInt8) {
        const uint32_t half = is_finite ? float_to_half(__fdiv_rn(largest, 127.0f)) : kHalfNan;
        // S infinite (codecs 8) gives 1 / S = 0 and so zero codes by itself.
        const float reciprocal = is_finite && half != 0 ? __fdiv_rn(1.0f, half_to_float(half)) : 0.0f;
        uint32_t codes[kLaneDims];
        PK_UNROLL for (int i = 0; i < kLaneDims; ++i) {
            const float rounded = is_finite ? rintf(__fmul_rn(x[i], reciprocal)) : 0.0f;
            const float limited = rounded > 127.0f ? 127.0f : rounded < -127.0f ? -127.0f : rounded;
            codes[i] = static_cast<uint32_t>(static_cast<int32_t>(limited)) & 0xFFu;
        }
        store_codes(code_row, piece, codes);
        if (piece % 4 == 0) reinterpret_cast<uint16_t*>(scale_row)[piece / 4] = static_cast<uint16_t>(half);
    }

    if constexpr (kCodec == Codec::kFp8) {
        const float raw = __fdiv_rn(largest, 448.0f);
        const float raised = raw < 0x1p-24f ? 0x1p-24f : raw;
        const uint32_t finite_half = largest_bits == 0 ? 0u : float_to_half(raised > 65504.0f ? 65504.0f : raised);
        const uint32_t half = is_finite ? finite_half : kHalfNan;
        const bool has_codes = is_finite && largest_bits != 0;
        const float reciprocal = has_codes ? __fdiv_rn(1.0f, half_to_float(half)) : 0.0f;
        uint32_t codes[kLaneDims];
        PK_UNROLL for (int i = 0; i < kLaneDims; ++i) {
            codes[i] = has_codes ? float_to_e4m3(__fmul_rn(x[i], reciprocal)) : 0u;
        }
        store_codes(code_row, piece, codes);
        if (piece == 0) *reinterpret_cast<uint16_t*>(scale_row) = static_cast<uint16_t>(half);
    }

    if constexpr (kCodec == Codec::kFp4) {
        const float raw = __fdiv_rn(largest, 6.0f);
        const float raised = raw < 0x1p-9f ? 0x1p-9f : raw;
        const uint32_t finite_scale = largest_bits == 0 ? 0u : float_to_e4m3(raised > 448.0f ? 448.0f : raised);
        const bool has_codes = is_finite && largest_bits != 0;
        const float scale = has_codes ? e4m3_to_float(finite_scale) : 1.0f;
        uint32_t words[2] = {0, 0};
        PK_UNROLL for (int i = 0; i < kLaneDims; ++i) {
            const uint32_t code = has_codes ? float_to_e2m1(__fdiv_rn(x[i], scale)) : 0u;
            words[i / 8] |= code << (4 * (i % 8));
        }
        *reinterpret_cast<uint2*>(code_row + piece * (kLaneDims / 2)) = make_uint2(words[0], words[1]);
        scale_row[piece] = static_cast<uint8_t>(is_finite ? finite_scale : kE4m3Nan);
    }
}

// ---- decoding ------------------------------------------------------------------------------------------------------

// Returns the scale that multiplies 8 consecutive codes starting at `dim`.  fp8 rows have one scale, which attention
// applies to scores and weights instead; fp4 codes decode to twice their value, hence the half (exact).
template <Codec kCodec>
__device__ __forceinline__ float group_scale(const uint8_t* scale_row, int dim) {
    if constexpr (kCodec == Codec::kInt8) return half_to_float(reinterpret_cast<const uint16_t*>(scale_row)[dim / 64]);
    if constexpr (kCodec == Codec::kFp4) return __fmul_rn(e4m3_to_float(scale_row[dim / 16]), 0.5f);
    return 1.0f;
}

// Decodes 8 V values from `dim` on.  bf16, int8 and fp4: the exact decoded values; fp8: the codes' values.
template <Codec kCodec>
__device__ __forceinline__ Float8 decode8(const uint8_t* code_row, const uint8_t* scale_row, int dim) {
    if constexpr (kCodec == Codec::kBf16) return bf16_decode8(load16(code_row + 2 * dim));
    if constexpr (kCodec == Codec::kFp8) return e4m3_decode8(load_pair(code_row + dim));
    if constexpr (kCodec == Codec::kInt8) {
        return multiply(int8_decode8(load_pair(code_row + dim)), group_scale<kCodec>(scale_row, dim));
    }
    if constexpr (kCodec == Codec::kFp4) {
        return multiply(e2m1_decode8_doubled(*reinterpret_cast<const uint32_t*>(code_row + dim / 2)),
                        group_scale<kCodec>(scale_row, dim));
    }
}

}  // namespace pagedkv
