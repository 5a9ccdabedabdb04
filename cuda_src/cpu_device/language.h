// CUDA C++ on the cpu device: types, qualifiers, the running thread, the block barrier and shared memory.
//
// Every CUDA thread is a fiber (fibers.h).  `pk_self` finds the running fiber from the stack pointer, because a
// thread-local pointer would cost a call per access in a shared library:
//
//   slot (128 KiB, aligned to 128 KiB)
//   [ PROT_NONE, 60 KiB | stack, 64 KiB, grows down <- top | pk_fiber (at k * 256 in the last page) | ... ]
//
//   k = slot index mod 16 moves both the pk_fiber and the top of the stack by k * 256 bytes, so that the hot
//   lines of neighbouring fibers lie in different cache sets.
//
// warp.h, math.h and atomics.h hold the other CUDA functions.  None of the four includes a header of a C or C++
// library, so that every compiler reads the same text.
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
typedef __UINTPTR_TYPE__ uintptr_t;

// ---- qualifiers ------------------------------------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
// A `__shared__` array in an embedder's text is one static array: blocks of such a module run one after another.
#define __shared__ static

// ---- vector types ----------------------------------------------------------------------------------------------

#define PK_VECTOR(scalar, name, align2, align4)                                                    \
    struct name##1 { scalar x; };                                                                  \
    struct __attribute__((aligned(align2))) name##2 { scalar x, y; };                              \
    struct name##3 { scalar x, y, z; };                                                            \
    struct __attribute__((aligned(align4))) name##4 { scalar x, y, z, w; };                        \
    static inline name##1 make_##name##1(scalar x) { return name##1{x}; }                          \
    static inline name##2 make_##name##2(scalar x, scalar y) { return name##2{x, y}; }             \
    static inline name##3 make_##name##3(scalar x, scalar y, scalar z) { return name##3{x, y, z}; } \
    static inline name##4 make_##name##4(scalar x, scalar y, scalar z, scalar w) { return name##4{x, y, z, w}; }

PK_VECTOR(signed char, char, 2, 4)
PK_VECTOR(unsigned char, uchar, 2, 4)
PK_VECTOR(short, short, 4, 8)
PK_VECTOR(unsigned short, ushort, 4, 8)
PK_VECTOR(int, int, 8, 16)
PK_VECTOR(unsigned int, uint, 8, 16)
PK_VECTOR(float, float, 8, 16)
PK_VECTOR(double, double, 16, 16)
#undef PK_VECTOR

// ---- the running thread ----------------------------------------------------------------------------------------

struct pk_warp;

struct pk_block {        // the scheduler writes these before the first thread of the block runs
    uint3 index;         // blockIdx
    uint3 threads;       // blockDim
    uint3 blocks;        // gridDim
    uint32_t progressed; // set by atomics that change memory, cleared by the scheduler when no other thread can run
};

struct pk_fiber {
    void* saved_sp;      // these four are valid while the fiber does not run
    void* saved_ip;
    void* saved_x;       // x86-64: rbx, aarch64: x19
    void* saved_fp;      // x86-64: rbp, aarch64: x29
    uint3 thread;        // threadIdx
    pk_block* block;
    pk_warp* warp;
    uint8_t lane;        // (x + blockDim.x * (y + blockDim.y * z)) mod 32
    uint8_t rank;        // position of the lane in the running order of its warp
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

// ---- barrier and shared memory ---------------------------------------------------------------------------------

// Functions of the runtime library.  `file` and `line` name the caller's source line in errors.
extern "C" {
void pk_block_barrier(int predicate, uint32_t* true_count, const char* file, int line);
void* pk_shared(const void* key, size_t bytes, const char* name);
void pk_yield();
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

static inline void __trap(PK_HERE) { pk_trap(file, line); }
static inline void __nanosleep(uint32_t) { pk_yield(); }
