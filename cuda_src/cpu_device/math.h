// Bits and arithmetic of CUDA on the cpu device.
//
// Correctly rounded operations give the bits of the device.  The functions of the C library, at the end, do not, and
// differ between C libraries: a kernel whose bits matter brings its own.
#pragma once

#include "cpu_device/language.h"

// ---- bits ------------------------------------------------------------------------------------------------------

template <class T>
static inline uint64_t pk_to_bits(T value) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle or an atomic takes 4 or 8 bytes");
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    return bits;
}

template <class T>
static inline T pk_from_bits(uint64_t bits) {
    T value;
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}

static inline uint32_t __float_as_uint(float value) { return __builtin_bit_cast(uint32_t, value); }
static inline int __float_as_int(float value) { return __builtin_bit_cast(int, value); }
static inline float __uint_as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
static inline float __int_as_float(int bits) { return __builtin_bit_cast(float, bits); }

static inline int __popc(uint32_t x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<uint32_t>(x)); }
static inline int __ffs(int x) { return __builtin_ffs(x); }

// Byte i of the result is byte (selector nibble i & 7) of b:a; bit 3 of the nibble replicates its sign.
static inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    uint64_t bytes = (static_cast<uint64_t>(b) << 32) | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
        uint32_t nibble = (selector >> (4 * i)) & 0xFu;
        uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (nibble & 7u))) & 0xFFu;
        if (nibble & 8u) byte = (byte & 0x80u) ? 0xFFu : 0u;
        result |= byte << (8 * i);
    }
    return result;
}

template <class T>
static inline T __ldg(const T* address) { return *address; }

// ---- correctly rounded arithmetic ------------------------------------------------------------------------------

static inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
static inline float sqrtf(float a) { return __builtin_sqrtf(a); }
static inline float fabsf(float a) { return __builtin_fabsf(a); }
static inline float rintf(float a) { return __builtin_rintf(a); }
static inline float truncf(float a) { return __builtin_truncf(a); }
static inline float floorf(float a) { return __builtin_floorf(a); }
static inline float ceilf(float a) { return __builtin_ceilf(a); }
static inline double fabs(double a) { return __builtin_fabs(a); }
static inline double sqrt(double a) { return __builtin_sqrt(a); }
static inline bool isnan(float a) { return a != a; }
static inline bool isinf(float a) { return __builtin_fabsf(a) == __builtin_inff(); }
static inline bool isfinite(float a) { return __builtin_fabsf(a) < __builtin_inff(); }

// max.f32 and min.f32: a NaN is dropped when the other operand is a number, two NaNs give the canonical one,
// and +0 > -0.  Equal operands differ at most in the sign of zero, which the bit operation decides.
static inline __attribute__((always_inline)) float fmaxf(float a, float b) {
    float equal = __uint_as_float(__float_as_uint(a) & __float_as_uint(b));
    float number = a == a ? a : (b == b ? b : __uint_as_float(0x7FFFFFFFu));
    float larger = a > b ? a : (a < b ? b : number);
    return a == b ? equal : larger;
}
static inline __attribute__((always_inline)) float fminf(float a, float b) {
    float equal = __uint_as_float(__float_as_uint(a) | __float_as_uint(b));
    float number = a == a ? a : (b == b ? b : __uint_as_float(0x7FFFFFFFu));
    float smaller = a < b ? a : (a > b ? b : number);
    return a == b ? equal : smaller;
}

#define PK_MIN_MAX(type)                                                  \
    static inline type min(type a, type b) { return b < a ? b : a; }      \
    static inline type max(type a, type b) { return a < b ? b : a; }
PK_MIN_MAX(int)
PK_MIN_MAX(unsigned int)
PK_MIN_MAX(long)
PK_MIN_MAX(unsigned long)
PK_MIN_MAX(long long)
PK_MIN_MAX(unsigned long long)
#undef PK_MIN_MAX
static inline unsigned int min(int a, unsigned int b) { return min(static_cast<unsigned int>(a), b); }
static inline unsigned int min(unsigned int a, int b) { return min(a, static_cast<unsigned int>(b)); }
static inline unsigned int max(int a, unsigned int b) { return max(static_cast<unsigned int>(a), b); }
static inline unsigned int max(unsigned int a, int b) { return max(a, static_cast<unsigned int>(b)); }
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double min(double a, double b) { return __builtin_fmin(a, b); }
static inline double max(double a, double b) { return __builtin_fmax(a, b); }
static inline int abs(int a) { return a < 0 ? -a : a; }

// Conversions with saturation, as cvt does: NaN becomes 0.
static inline int __float2int_rz(float a) {
    if (!(a == a)) return 0;
    if (a >= 2147483648.0f) return 2147483647;
    if (a < -2147483648.0f) return -2147483647 - 1;
    return static_cast<int>(a);
}
static inline int __float2int_rn(float a) { return __float2int_rz(__builtin_rintf(a)); }

// ---- functions of the C library --------------------------------------------------------------------------------

#define __expf(a) __builtin_expf(a)
#define __logf(a) __builtin_logf(a)
#define __fdividef(a, b) ((a) / (b))
static inline float expf(float a) { return __builtin_expf(a); }
static inline float exp2f(float a) { return __builtin_exp2f(a); }
static inline float logf(float a) { return __builtin_logf(a); }
static inline float log2f(float a) { return __builtin_log2f(a); }
static inline float sinf(float a) { return __builtin_sinf(a); }
static inline float cosf(float a) { return __builtin_cosf(a); }
static inline float tanhf(float a) { return __builtin_tanhf(a); }
static inline float erff(float a) { return __builtin_erff(a); }
static inline float powf(float a, float b) { return __builtin_powf(a, b); }
static inline float rsqrtf(float a) { return 1.0f / __builtin_sqrtf(a); }
