// Eight floats that one thread works on, and 16-byte loads and stores.
//
// A GPU thread holds a Float8 in eight registers.  On the cpu a Float8 is one 256-bit vector, the only parallelism
// inside a thread there.  Each operation is the same IEEE operation on each element, so both give the same bits.  The
// same functions exist for float, so that a formula is written once for both types.  Multiply-add is always one
// explicit fused operation: no compiler flag decides a result.
//
// The cpu's versions use built-ins of GCC and Clang and no header.
#pragma once

// Unroll a loop completely, so that the arrays that it indexes stay in registers; or do not unroll it.
#if defined(__CUDACC__)
#define PK_UNROLL _Pragma("unroll")
#define PK_KEEP_LOOP _Pragma("unroll 1")
#elif defined(__clang__)
#define PK_UNROLL _Pragma("clang loop unroll(full)")
#define PK_KEEP_LOOP _Pragma("clang loop unroll(disable)")
#else
#define PK_UNROLL _Pragma("GCC unroll 16")
#define PK_KEEP_LOOP _Pragma("GCC unroll 1")
#endif

namespace pagedkv {

// ---- one float -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float subtract(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float fused(float a, float b, float c) { return fmaf(a, b, c); }
// The larger number; b when a is NaN.
__device__ __forceinline__ float larger(float a, float b) { return a > b ? a : b; }
__device__ __forceinline__ float below(float x, float limit, float then, float otherwise) {
    return x < limit ? then : otherwise;
}
// 2^n for the integer n in the low bits of x, -126 <= n <= 127.
__device__ __forceinline__ float power_of_low_bits(float x) {
    return __uint_as_float((__float_as_uint(x) << 23) + 0x3F800000u);
}

// ---- eight floats --------------------------------------------------------------------------------------------------

#if defined(__CUDACC__)

struct Float8 {
    float at[8];

    __device__ __forceinline__ float operator[](int i) const { return at[i]; }
    __device__ __forceinline__ float& operator[](int i) { return at[i]; }
};

#define PK_ELEMENTWISE(declaration, expression)                          \
    __device__ __forceinline__ Float8 declaration {                      \
        Float8 result;                                                   \
        PK_UNROLL for (int i = 0; i < 8; ++i) result.at[i] = expression; \
        return result;                                                   \
    }
PK_ELEMENTWISE(same8(float value), value)
PK_ELEMENTWISE(add(const Float8& a, const Float8& b), add(a[i], b[i]))
PK_ELEMENTWISE(subtract(const Float8& a, const Float8& b), subtract(a[i], b[i]))
PK_ELEMENTWISE(multiply(const Float8& a, const Float8& b), multiply(a[i], b[i]))
PK_ELEMENTWISE(multiply(const Float8& a, float b), multiply(a[i], b))
PK_ELEMENTWISE(fused(const Float8& a, const Float8& b, const Float8& c), fused(a[i], b[i], c[i]))
PK_ELEMENTWISE(fused(float a, const Float8& b, const Float8& c), fused(a, b[i], c[i]))
PK_ELEMENTWISE(larger(const Float8& a, const Float8& b), larger(a[i], b[i]))
PK_ELEMENTWISE(below(const Float8& x, float limit, float then, const Float8& otherwise),
               below(x[i], limit, then, otherwise[i]))
PK_ELEMENTWISE(power_of_low_bits(const Float8& x), power_of_low_bits(x[i]))
#undef PK_ELEMENTWISE

// Reads eight floats; `source` is 16-byte aligned.
__device__ __forceinline__ Float8 load8(const float* source) {
    const float4 low = reinterpret_cast<const float4*>(source)[0];
    const float4 high = reinterpret_cast<const float4*>(source)[1];
    return Float8{{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}

// Writes eight floats; `target` is 16-byte aligned.
__device__ __forceinline__ void store8(float* target, const Float8& value) {
    reinterpret_cast<float4*>(target)[0] = make_float4(value[0], value[1], value[2], value[3]);
    reinterpret_cast<float4*>(target)[1] = make_float4(value[4], value[5], value[6], value[7]);
}

// Element r is ((0+1)+(2+3)) + ((4+5)+(6+7)) of rows[r]: the tree of horizontal additions of 256-bit vectors.
__device__ __forceinline__ Float8 row_sums(const Float8 (&rows)[8]) {
    Float8 result;
    PK_UNROLL for (int r = 0; r < 8; ++r) {
        const Float8& row = rows[r];
        result[r] = add(add(add(row[0], row[1]), add(row[2], row[3])), add(add(row[4], row[5]), add(row[6], row[7])));
    }
    return result;
}

#else  // cpu

#define PK_INLINE inline __attribute__((always_inline))

typedef float Float8 __attribute__((vector_size(32)));
typedef float Float8Memory __attribute__((vector_size(32), aligned(16), may_alias));
typedef uint32_t Bits8 __attribute__((vector_size(32)));
typedef int32_t Int8 __attribute__((vector_size(32)));

template <typename To, typename From>
PK_INLINE To reinterpret_bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits, read as another type");
    To to;
    __builtin_memcpy(&to, &from, sizeof(To));
    return to;
}

PK_INLINE Float8 same8(float value) { return Float8{value, value, value, value, value, value, value, value}; }
PK_INLINE Float8 add(const Float8& a, const Float8& b) { return a + b; }
PK_INLINE Float8 subtract(const Float8& a, const Float8& b) { return a - b; }
PK_INLINE Float8 multiply(const Float8& a, const Float8& b) { return a * b; }
PK_INLINE Float8 multiply(const Float8& a, float b) { return a * same8(b); }
PK_INLINE Float8 larger(const Float8& a, const Float8& b) { return a > b ? a : b; }

PK_INLINE Float8 fused(const Float8& a, const Float8& b, const Float8& c) {
#if defined(__clang__)
    return __builtin_elementwise_fma(a, b, c);
#elif defined(__FMA__)
    return __builtin_ia32_vfmaddps256(a, b, c);
#else
    Float8 result;
    for (int i = 0; i < 8; ++i) result[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return result;
#endif
}

PK_INLINE Float8 fused(float a, const Float8& b, const Float8& c) { return fused(same8(a), b, c); }

PK_INLINE Float8 below(const Float8& x, float limit, float then, const Float8& otherwise) {
    return x < same8(limit) ? same8(then) : otherwise;
}

PK_INLINE Float8 power_of_low_bits(const Float8& x) {
    return reinterpret_bits<Float8>((reinterpret_bits<Bits8>(x) << 23) + 0x3F800000u);
}

PK_INLINE Float8 load8(const float* source) { return *reinterpret_cast<const Float8Memory*>(source); }
PK_INLINE void store8(float* target, const Float8& value) { *reinterpret_cast<Float8Memory*>(target) = value; }

PK_INLINE Float8 row_sums(const Float8 (&rows)[8]) {
#if defined(__AVX__)
    // After two horizontal additions: elements 0..3 of four rows in the lower half, 4..7 in the upper.
    const Float8 first = __builtin_ia32_haddps256(__builtin_ia32_haddps256(rows[0], rows[1]),
                                                  __builtin_ia32_haddps256(rows[2], rows[3]));
    const Float8 second = __builtin_ia32_haddps256(__builtin_ia32_haddps256(rows[4], rows[5]),
                                                   __builtin_ia32_haddps256(rows[6], rows[7]));
    return __builtin_ia32_vperm2f128_ps256(first, second, 0x20) + __builtin_ia32_vperm2f128_ps256(first, second, 0x31);
#else
    Float8 result;
    for (int r = 0; r < 8; ++r) {
        const Float8 row = rows[r];
        result[r] = ((row[0] + row[1]) + (row[2] + row[3])) + ((row[4] + row[5]) + (row[6] + row[7]));
    }
    return result;
#endif
}

#endif

// A number in every element of T.
template <typename T>
__device__ __forceinline__ T same(float value);
template <>
__device__ __forceinline__ float same<float>(float value) { return value; }
template <>
__device__ __forceinline__ Float8 same<Float8>(float value) { return same8(value); }

// Copies two vectors into a thread's own array of 16; collect8 copies eight elements back.
__device__ __forceinline__ void spread16(float (&values)[16], const Float8& low, const Float8& high) {
    PK_UNROLL for (int i = 0; i < 8; ++i) {
        values[i] = low[i];
        values[i + 8] = high[i];
    }
}

__device__ __forceinline__ Float8 collect8(const float (&values)[16], int at) {
    Float8 result;
    PK_UNROLL for (int i = 0; i < 8; ++i) result[i] = values[at + i];
    return result;
}

// ---- 8 and 16 bytes ------------------------------------------------------------------------------------------------

// Reads 8 bytes; `source` is 8-byte aligned.  Returns a value, because NVRTC reads a referenced uint2 word by word.
__device__ __forceinline__ uint2 load_pair(const void* source) { return *static_cast<const uint2*>(source); }

// Reads 16 bytes; `source` is 16-byte aligned.
__device__ __forceinline__ uint4 load16(const void* source) { return *static_cast<const uint4*>(source); }

// Writes 16 bytes; `target` is 16-byte aligned.
__device__ __forceinline__ void store16(void* target, const uint4& value) { *static_cast<uint4*>(target) = value; }

}  // namespace pagedkv
