// CUDA C++ on the cpu device: what a kernel source may use when no GPU compiler reads it.
//
// Every CUDA thread is a fiber of cpu_runtime.cpp.  The fiber that runs is found from the stack pointer (a
// thread-local pointer would cost a call per access in a shared library):
//
//   slot (128 KiB, aligned to 128 KiB)
//   [ PROT_NONE, 60 KiB | stack, 64 KiB, grows down <- top | pk_fiber (at k * 256 in the last page) | ... ]
//
//   k = slot index mod 16 staggers both the pk_fiber and the top of the stack by 256 bytes, so that the hot
//   lines of neighbouring fibers lie in different cache sets.
//
// Block barrier, warp collectives and atomics end in the runtime; the rest is inline here.  No C or C++
// library header is included, so that the same text compiles with every compiler and with NVRTC.
#pragma once

typedef __INT8_TYPE__ int8_t;
typedef __UINT8_TYPE__ uint8_t;
typedef __INT16_TYPE__ int16_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __INT32_TYPE__ int32_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT64_TYPE__ uint64_t;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef __UINTPTR_TYPE__ uintptr_t;
typedef __INTPTR_TYPE__ intptr_t;

// ---------------------------------------------------------------------------------------------------------
// Words of the language

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
// An embedder's `__shared__` array is one static array: blocks of such a module run one after another.
#define __shared__ static

// ---------------------------------------------------------------------------------------------------------
// Vector types

#define PK_VECTOR(scalar, name, align1, align2, align4)                                            \
    struct name##1 { scalar x; };                                                                  \
    struct __attribute__((aligned(align2))) name##2 { scalar x, y; };                              \
    struct name##3 { scalar x, y, z; };                                                            \
    struct __attribute__((aligned(align4))) name##4 { scalar x, y, z, w; };                        \
    static inline name##1 make_##name##1(scalar x) { return name##1{x}; }                          \
    static inline name##2 make_##name##2(scalar x, scalar y) { return name##2{x, y}; }             \
    static inline name##3 make_##name##3(scalar x, scalar y, scalar z) { return name##3{x, y, z}; } \
    static inline name##4 make_##name##4(scalar x, scalar y, scalar z, scalar w) { return name##4{x, y, z, w}; }

PK_VECTOR(signed char, char, 1, 2, 4)
PK_VECTOR(unsigned char, uchar, 1, 2, 4)
PK_VECTOR(short, short, 2, 4, 8)
PK_VECTOR(unsigned short, ushort, 2, 4, 8)
PK_VECTOR(int, int, 4, 8, 16)
PK_VECTOR(unsigned int, uint, 4, 8, 16)
PK_VECTOR(long long, longlong, 8, 16, 16)
PK_VECTOR(unsigned long long, ulonglong, 8, 16, 16)
PK_VECTOR(float, float, 4, 8, 16)
PK_VECTOR(double, double, 8, 16, 16)
#undef PK_VECTOR

struct dim3 {
    unsigned int x, y, z;
    dim3(unsigned int x_ = 1, unsigned int y_ = 1, unsigned int z_ = 1) : x(x_), y(y_), z(z_) {}
};

// ---------------------------------------------------------------------------------------------------------
// The running fiber

struct pk_warp;

struct pk_block {        // written by the scheduler before the first thread of the block runs
    uint3 index;         // blockIdx
    uint3 threads;       // blockDim
    uint3 blocks;        // gridDim
    uint32_t progressed; // set by atomics that change memory, cleared by the scheduler when nobody else can run
};

struct pk_fiber {
    void* saved_sp;      // these four are valid while the fiber does not run
    void* saved_ip;
    void* saved_x;       // x86-64: rbx, aarch64: x19
    void* saved_fp;      // x86-64: rbp, aarch64: x29
    uint3 thread;        // threadIdx
    uint32_t linear;     // x + blockDim.x * (y + blockDim.y * z)
    pk_block* block;
    pk_warp* warp;
    uint8_t lane;        // linear mod 32
    uint8_t rank;        // position of the lane in its warp's running order
};

enum {
    PK_SLOT_BYTES = 128 * 1024,
    PK_STACK_BYTES = 64 * 1024,
    PK_PAGE_BYTES = 4096,
    PK_STAGGER_MASK = 15 * 256,
};

static_assert(sizeof(pk_fiber) <= 256, "the stagger of 256 bytes must hold a fiber");

static inline __attribute__((always_inline)) pk_fiber* pk_self() {
    uintptr_t sp;
#if defined(__x86_64__)
    asm("movq %%rsp, %0" : "=r"(sp));
#elif defined(__aarch64__)
    asm("mov %0, sp" : "=r"(sp));
#else
#error "the cpu device has a context switch for x86-64 and aarch64 only"
#endif
    uintptr_t page = (sp | (PK_SLOT_BYTES - 1)) + 1 - PK_PAGE_BYTES;
    return reinterpret_cast<pk_fiber*>(page + ((sp >> 9) & PK_STAGGER_MASK));
}

#define threadIdx (pk_self()->thread)
#define blockIdx (pk_self()->block->index)
#define blockDim (pk_self()->block->threads)
#define gridDim (pk_self()->block->blocks)
static const int warpSize = 32;

// ---------------------------------------------------------------------------------------------------------
// The runtime's entry points (cpu_runtime.cpp).  `file` and `line` name the caller's source line in errors.

enum pk_operation : uint32_t {
    PK_SYNCWARP = 1,
    PK_SHFL,
    PK_SHFL_UP,
    PK_SHFL_DOWN,
    PK_SHFL_XOR,
    PK_BALLOT,
    PK_ANY,
    PK_ALL,
    PK_MATCH_ANY,
    PK_WARP_MAX,
    PK_WARP_SUM,
    PK_COOPERATE,
};

// Lanes' data of one `pk_warp_cooperate`: 32 input pointers, 32 output pointers.
typedef void (*pk_cooperation)(const void* const* inputs, void* const* outputs);

extern "C" {
void pk_block_barrier(int predicate, uint32_t* true_count, const char* file, int line);
uint64_t pk_warp_collective(uint32_t operation, uint32_t mask, uint64_t value, uint32_t source, const char* file,
                            int line);
void pk_warp_reduce(uint32_t operation, float* values, uint32_t count, const char* file, int line);
void pk_warp_cooperate(pk_cooperation run, const void* input, void* output, const char* file, int line);
void* pk_shared(const void* key, size_t bytes, const char* name);
void pk_yield();
uint32_t pk_live_lanes();
__attribute__((noreturn)) void pk_trap(const char* file, int line);
}

#define PK_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

// The key is one static byte per declaration and template instantiation.
#define PK_SHARED(type, name, count)     \
    static char name##_shared_key;       \
    type* const name = static_cast<type*>(pk_shared(&name##_shared_key, (count) * sizeof(type), #name))

static inline void __syncthreads(PK_HERE) { pk_block_barrier(0, 0, file, line); }
static inline int __syncthreads_count(int predicate, PK_HERE) {
    uint32_t count;
    pk_block_barrier(predicate != 0, &count, file, line);
    return static_cast<int>(count);
}
static inline int __syncthreads_or(int predicate, PK_HERE) { return __syncthreads_count(predicate, file, line) != 0; }
static inline int __syncthreads_and(int predicate, PK_HERE) {
    return __syncthreads_count(predicate == 0, file, line) == 0;
}

static inline void __syncwarp(uint32_t mask = 0xFFFFFFFFu, PK_HERE) {
    pk_warp_collective(PK_SYNCWARP, mask, 0, 0, file, line);
}

static inline void __trap(PK_HERE) { pk_trap(file, line); }
static inline void __nanosleep(uint32_t) { pk_yield(); }
static inline uint32_t __activemask() { return pk_live_lanes(); }

// ---------------------------------------------------------------------------------------------------------
// Warp collectives

template <class T>
static inline uint64_t pk_to_bits(T value) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves 4 or 8 bytes");
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

static inline uint32_t pk_lane() { return pk_self()->lane; }

template <class T>
static inline T __shfl_sync(uint32_t mask, T value, int source, int width = 32, PK_HERE) {
    uint32_t segment = pk_lane() & ~static_cast<uint32_t>(width - 1);
    uint32_t from = segment | (static_cast<uint32_t>(source) & static_cast<uint32_t>(width - 1));
    return pk_from_bits<T>(pk_warp_collective(PK_SHFL, mask, pk_to_bits(value), from, file, line));
}

template <class T>
static inline T __shfl_up_sync(uint32_t mask, T value, uint32_t delta, int width = 32, PK_HERE) {
    uint32_t lane = pk_lane(), offset = lane & static_cast<uint32_t>(width - 1);
    uint32_t from = delta > offset ? lane : lane - delta;
    return pk_from_bits<T>(pk_warp_collective(PK_SHFL_UP, mask, pk_to_bits(value), from, file, line));
}

template <class T>
static inline T __shfl_down_sync(uint32_t mask, T value, uint32_t delta, int width = 32, PK_HERE) {
    uint32_t lane = pk_lane(), offset = lane & static_cast<uint32_t>(width - 1);
    uint32_t from = delta >= static_cast<uint32_t>(width) - offset ? lane : lane + delta;
    return pk_from_bits<T>(pk_warp_collective(PK_SHFL_DOWN, mask, pk_to_bits(value), from, file, line));
}

template <class T>
static inline T __shfl_xor_sync(uint32_t mask, T value, int lane_mask, int width = 32, PK_HERE) {
    uint32_t lane = pk_lane(), from = lane ^ static_cast<uint32_t>(lane_mask);
    if (from > (lane | static_cast<uint32_t>(width - 1))) from = lane;
    return pk_from_bits<T>(pk_warp_collective(PK_SHFL_XOR, mask, pk_to_bits(value), from, file, line));
}

static inline uint32_t __ballot_sync(uint32_t mask, int predicate, PK_HERE) {
    return static_cast<uint32_t>(pk_warp_collective(PK_BALLOT, mask, predicate != 0, 0, file, line));
}
static inline int __any_sync(uint32_t mask, int predicate, PK_HERE) {
    return static_cast<int>(pk_warp_collective(PK_ANY, mask, predicate != 0, 0, file, line));
}
static inline int __all_sync(uint32_t mask, int predicate, PK_HERE) {
    return static_cast<int>(pk_warp_collective(PK_ALL, mask, predicate != 0, 0, file, line));
}
template <class T>
static inline uint32_t __match_any_sync(uint32_t mask, T value, PK_HERE) {
    return static_cast<uint32_t>(pk_warp_collective(PK_MATCH_ANY, mask, pk_to_bits(value), 0, file, line));
}

enum { PK_REDUCE_COUNT_MAX = 64 };  // values of one rendezvous; longer arrays take several

template <int N>
static inline void pk_warp_max_n(float (&values)[N], PK_HERE) {
    for (int i = 0; i < N; i += PK_REDUCE_COUNT_MAX) {
        uint32_t count = N - i < PK_REDUCE_COUNT_MAX ? N - i : PK_REDUCE_COUNT_MAX;
        pk_warp_reduce(PK_WARP_MAX, values + i, count, file, line);
    }
}

template <int N>
static inline void pk_warp_sum_n(float (&values)[N], PK_HERE) {
    for (int i = 0; i < N; i += PK_REDUCE_COUNT_MAX) {
        uint32_t count = N - i < PK_REDUCE_COUNT_MAX ? N - i : PK_REDUCE_COUNT_MAX;
        pk_warp_reduce(PK_WARP_SUM, values + i, count, file, line);
    }
}

static inline float pk_warp_max(float value, PK_HERE) {
    pk_warp_reduce(PK_WARP_MAX, &value, 1, file, line);
    return value;
}

static inline float pk_warp_sum(float value, PK_HERE) {
    pk_warp_reduce(PK_WARP_SUM, &value, 1, file, line);
    return value;
}

// ---------------------------------------------------------------------------------------------------------
// Bits

static inline uint32_t __float_as_uint(float value) { return __builtin_bit_cast(uint32_t, value); }
static inline int __float_as_int(float value) { return __builtin_bit_cast(int, value); }
static inline float __uint_as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
static inline float __int_as_float(int bits) { return __builtin_bit_cast(float, bits); }
static inline long long __double_as_longlong(double value) { return __builtin_bit_cast(long long, value); }
static inline double __longlong_as_double(long long bits) { return __builtin_bit_cast(double, bits); }

static inline int __popc(uint32_t x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<uint32_t>(x)); }
static inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline uint32_t __brev(uint32_t x) {
    x = ((x >> 1) & 0x55555555u) | ((x & 0x55555555u) << 1);
    x = ((x >> 2) & 0x33333333u) | ((x & 0x33333333u) << 2);
    x = ((x >> 4) & 0x0F0F0F0Fu) | ((x & 0x0F0F0F0Fu) << 4);
    return __builtin_bswap32(x);
}
static inline uint32_t __umulhi(uint32_t a, uint32_t b) {
    return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
}

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

static inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t shift) {
    return static_cast<uint32_t>((((static_cast<uint64_t>(high) << 32) | low) << (shift & 31u)) >> 32);
}
static inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
    return static_cast<uint32_t>(((static_cast<uint64_t>(high) << 32) | low) >> (shift & 31u));
}

template <class T>
static inline T __ldg(const T* address) { return *address; }
template <class T>
static inline T __ldcg(const T* address) { return *address; }
template <class T>
static inline T __ldcs(const T* address) { return *address; }
template <class T>
static inline void __stcg(T* address, T value) { *address = value; }
template <class T>
static inline void __stcs(T* address, T value) { *address = value; }

// ---------------------------------------------------------------------------------------------------------
// Arithmetic.  Correctly rounded operations have the bits of the device; the functions of libm at the end
// do not, and differ between C libraries: kernels whose bits matter write their own.

static inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
static inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline float sqrtf(float a) { return __builtin_sqrtf(a); }
static inline float fabsf(float a) { return __builtin_fabsf(a); }
static inline float rintf(float a) { return __builtin_rintf(a); }
static inline float truncf(float a) { return __builtin_truncf(a); }
static inline float floorf(float a) { return __builtin_floorf(a); }
static inline float ceilf(float a) { return __builtin_ceilf(a); }
static inline float copysignf(float a, float b) { return __builtin_copysignf(a, b); }
static inline double fabs(double a) { return __builtin_fabs(a); }
static inline double sqrt(double a) { return __builtin_sqrt(a); }
static inline double rint(double a) { return __builtin_rint(a); }
static inline double floor(double a) { return __builtin_floor(a); }
static inline bool isnan(float a) { return a != a; }
static inline bool isinf(float a) { return __builtin_fabsf(a) == __builtin_inff(); }
static inline bool isfinite(float a) { return __builtin_fabsf(a) < __builtin_inff(); }

// max.f32 and min.f32: a NaN is dropped when the other operand is a number, two NaNs give the canonical one,
// and +0 > -0.  Equal operands differ at most in the sign of zero, which the bit operation settles.
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
static inline uint32_t __float2uint_rz(float a) {
    if (!(a > 0.0f)) return 0;
    if (a >= 4294967296.0f) return 0xFFFFFFFFu;
    return static_cast<uint32_t>(a);
}
static inline uint32_t __float2uint_rn(float a) { return __float2uint_rz(__builtin_rintf(a)); }
static inline float __int2float_rn(int a) { return static_cast<float>(a); }
static inline float __uint2float_rn(uint32_t a) { return static_cast<float>(a); }

#define __expf(a) __builtin_expf(a)
#define __logf(a) __builtin_logf(a)
#define __log2f(a) __builtin_log2f(a)
#define __fdividef(a, b) ((a) / (b))
static inline float expf(float a) { return __builtin_expf(a); }
static inline float exp2f(float a) { return __builtin_exp2f(a); }
static inline float logf(float a) { return __builtin_logf(a); }
static inline float log2f(float a) { return __builtin_log2f(a); }
static inline float log1pf(float a) { return __builtin_log1pf(a); }
static inline float sinf(float a) { return __builtin_sinf(a); }
static inline float cosf(float a) { return __builtin_cosf(a); }
static inline float tanhf(float a) { return __builtin_tanhf(a); }
static inline float erff(float a) { return __builtin_erff(a); }
static inline float powf(float a, float b) { return __builtin_powf(a, b); }
static inline float rsqrtf(float a) { return 1.0f / __builtin_sqrtf(a); }
static inline double exp(double a) { return __builtin_exp(a); }
static inline double log(double a) { return __builtin_log(a); }

// ---------------------------------------------------------------------------------------------------------
// Atomics.  One that leaves memory as it was is what a spin loop does, so it lets other threads run.

static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

template <class T, class F>
static inline T pk_atomic_update(T* address, F change) {
    T old, next;
    __atomic_load(address, &old, __ATOMIC_RELAXED);
    do {
        next = change(old);
    } while (!__atomic_compare_exchange(address, &old, &next, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
    if (pk_to_bits(old) == pk_to_bits(next)) {
        pk_yield();
    } else {
        pk_self()->block->progressed = 1;
    }
    return old;
}

#define PK_ATOMIC(name, type, expression)                                                       \
    static inline type name(type* address, type value) {                                        \
        return pk_atomic_update(address, [value](type old) -> type { return expression; });     \
    }
#define PK_ATOMICS(type)                                                \
    PK_ATOMIC(atomicAdd, type, old + value)                             \
    PK_ATOMIC(atomicSub, type, old - value)                             \
    PK_ATOMIC(atomicMax, type, old < value ? value : old)               \
    PK_ATOMIC(atomicMin, type, value < old ? value : old)               \
    PK_ATOMIC(atomicAnd, type, old & value)                             \
    PK_ATOMIC(atomicOr, type, old | value)                              \
    PK_ATOMIC(atomicXor, type, old ^ value)                             \
    PK_ATOMIC(atomicExch, type, (static_cast<void>(old), value))        \
    static inline type atomicCAS(type* address, type compare, type value) {                                   \
        return pk_atomic_update(address, [=](type old) -> type { return old == compare ? value : old; });     \
    }
PK_ATOMICS(int)
PK_ATOMICS(unsigned int)
PK_ATOMICS(long long)
PK_ATOMICS(unsigned long long)
PK_ATOMIC(atomicAdd, float, old + value)
PK_ATOMIC(atomicAdd, double, old + value)
PK_ATOMIC(atomicExch, float, (static_cast<void>(old), value))
PK_ATOMIC(atomicInc, unsigned int, old >= value ? 0u : old + 1u)
PK_ATOMIC(atomicDec, unsigned int, (old == 0u || old > value) ? value : old - 1u)
#undef PK_ATOMICS
#undef PK_ATOMIC

// ---------------------------------------------------------------------------------------------------------
// Export: an entry that unpacks 8-byte argument slots, and a zero-terminated signature for the host.

#include "kernels/signature.cuh"

template <int... I> struct pk_indices {};
template <int N, int... I> struct pk_count_to : pk_count_to<N - 1, N - 1, I...> {};
template <int... I> struct pk_count_to<0, I...> { typedef pk_indices<I...> type; };

template <class T>
static inline T pk_argument(const uint64_t* slot) {
    static_assert(sizeof(T) <= 8, "kernel arguments are pointers and scalars");
    T value;
    __builtin_memcpy(&value, slot, sizeof(T));
    return value;
}

template <class... A, int... I>
static inline __attribute__((always_inline)) void pk_call_indexed(void (*kernel)(A...), const uint64_t* slots,
                                                                  pk_indices<I...>) {
    static_cast<void>(slots);
    kernel(pk_argument<A>(slots + I)...);
}

template <class... A>
static inline __attribute__((always_inline)) void pk_call(void (*kernel)(A...), const uint64_t* slots) {
    pk_call_indexed(kernel, slots, typename pk_count_to<static_cast<int>(sizeof...(A))>::type());
}

#define PK_EXPORT(kernel)                                                                                       \
    extern "C" __attribute__((visibility("default"), used)) void pk_entry_##kernel(const uint64_t* slots) {    \
        pk_call(&kernel, slots);                                                                                \
    }                                                                                                           \
    extern "C" __attribute__((visibility("default"), used)) const uint32_t* pk_signature_##kernel() {          \
        static const pk_signature<decltype(&kernel)> signature = {};                                           \
        return signature.words;                                                                                 \
    }
