// The online softmax in base 2, and the fixed order in which partial results meet.  (C14.6)
//
// A partial result over some keys is (m, l, O): the largest score, the sum of 2^(s - m), and the weighted sum of V
// rows with the same weights (online softmax: Milakov and Gimelshein 2018).  Scores carry the factor log2(e), so one
// exponential serves all.
//
// Which keys form a partial result depends on their absolute positions only:
//
//   key group   512 keys each below position 4096, 2048 keys each from there
//   stream      within a group, four streams: stream i takes the pages with page % 4 == i, in order
//   merge       streams 0, 1, 2, 3 in order; then groups from the left
//
//   position    0 ..      512 ..      ...   3584 ..     4096 ..             6144 ..
//   key group   0         1           ...   7           8                   9
//
// So the bits of an output row do not depend on batch, width, tile or length of other rows.  A key that is masked for
// a row is left out by a select, never by a zero weight: 0 * NaN would be NaN.
#pragma once

#include "kernels/page_address.cuh"
#include "kernels/number_formats.cuh"

namespace pagedkv {

constexpr int kShortGroupTokens = 512;
constexpr int kLongGroupTokens = 2048;
constexpr int kShortGroupsEndTokens = 4096;
constexpr int kShortGroups = kShortGroupsEndTokens / kShortGroupTokens;
constexpr int kStreams = 4;
static_assert(kShortGroupsEndTokens % kShortGroupTokens == 0, "no key group straddles the change of size");
static_assert(kShortGroupTokens % (kStreams * kPageTokens) == 0 && kLongGroupTokens % (kStreams * kPageTokens) == 0,
              "a group starts at a page that belongs to stream 0, so that page % 4 names the stream");

// Returns the key group of a position.
__device__ __forceinline__ int group_of(int position) {
    return position < kShortGroupsEndTokens ? position / kShortGroupTokens
                                            : kShortGroups + (position - kShortGroupsEndTokens) / kLongGroupTokens;
}

// Returns the first position of a key group.
__device__ __forceinline__ int group_start(int group) {
    return group < kShortGroups ? group * kShortGroupTokens
                                : kShortGroupsEndTokens + (group - kShortGroups) * kLongGroupTokens;
}

// Returns 2^x for x <= 0 or NaN: exactly 1 at 0, exactly 0 below -126, NaN for NaN; relative error below 2^-22.
// x = n + f with n integer and |f| <= 1/2; 2^f by its Taylor polynomial to degree 7, in Horner form: the remainder is
// (ln 2 / 2)^8 / 8!, about 2^-27.6.  Adding 1.5 * 2^23 rounds x to n in the low bits of the sum.
template <typename T>
__device__ __forceinline__ T exp2_fixed(const T& x) {
    const T rounder = same<T>(12582912.0f);
    const T shifted = add(x, rounder);
    const T f = subtract(x, subtract(shifted, rounder));
    T y = same<T>(0x1.ffcbfcp-17f);  // (ln 2)^7 / 7!, and so on
    y = fused(y, f, same<T>(0x1.430912p-13f));
    y = fused(y, f, same<T>(0x1.5d87fep-10f));
    y = fused(y, f, same<T>(0x1.3b2ab6p-7f));
    y = fused(y, f, same<T>(0x1.c6b08ep-5f));
    y = fused(y, f, same<T>(0x1.ebfbe0p-3f));
    y = fused(y, f, same<T>(0x1.62e430p-1f));
    y = fused(y, f, same<T>(1.0f));
    return below(x, -126.0f, 0.0f, multiply(y, power_of_low_bits(shifted)));  // the low bits of `shifted` hold n
}

// Returns log2(x) for x >= 0 or NaN: -infinity at 0, infinity at infinity; absolute error below 2^-22 max(1, |log2 x|).
// x = 2^e * f with f in [sqrt(1/2), sqrt(2)); log2 f = 2 / ln 2 * atanh((f - 1) / (f + 1)), series to the ninth power.
__device__ __forceinline__ float log2_fixed(float x) {
    const uint32_t bits = __float_as_uint(x);
    const uint32_t shifted = bits - 0x3F3504F3u;  // sqrt(1/2)
    const float exponent = static_cast<float>(static_cast<int32_t>(shifted) >> 23);
    const float f = __uint_as_float((shifted & 0x007FFFFFu) + 0x3F3504F3u);
    const float r = __fdiv_rn(__fsub_rn(f, 1.0f), __fadd_rn(f, 1.0f));
    const float square = __fmul_rn(r, r);
    float y = 0x1.484b14p-2f;                // 2 / (9 ln 2)
    y = fmaf(y, square, 0x1.a61762p-2f);     // 2 / (7 ln 2)
    y = fmaf(y, square, 0x1.2776c6p-1f);     // 2 / (5 ln 2)
    y = fmaf(y, square, 0x1.ec709ep-1f);     // 2 / (3 ln 2)
    y = fmaf(y, square, 0x1.715476p+1f);     // 2 / ln 2
    const float result = fmaf(y, r, exponent);
    return bits == 0 ? -infinity() : bits >= kInfinityBits ? x : result;
}

// Returns the maximum that exponents are taken against: 0 instead of -infinity, so that -infinity - m is never NaN.
// (The smallest finite float is a lower bound of every finite one.)
template <typename T>
__device__ __forceinline__ T reference_of(const T& maximum) {
    return below(maximum, -0x1.fffffep127f, 0.0f, maximum);
}

}  // namespace pagedkv
