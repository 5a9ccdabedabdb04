// The header that every kernel source includes first, and the only one that reaches the cpu device's headers.
//
// A source is compiled twice: by NVRTC for a GPU, and by the system's C++ compiler for the cpu device, where every
// CUDA thread is a fiber (cpu_device/language.h).  Beyond CUDA C++ both compilers know:
//
//   PK_EXPORT(kernel)               publishes a kernel that the host may launch (export.cuh)
//   PK_SHARED(type, name, count)    `type* name`: shared by the block, 16-byte aligned (cpu: guard page behind it)
//   pk_warp_max / pk_warp_sum       replace each of a lane's N values by that of all 32 lanes (cpu: one rendezvous for
//                                   all N); the xor tree 16, 8, 4, 2, 1: v = op(v, shfl_xor(v, s))
//   pk_yield()                      the body of a spin loop
//
// The maximum drops a NaN when the other operand is a number, and +0 > -0, as max.f32 does; the sum is a plain FP32
// addition.  Both trees give the same bits on both devices (NaN payloads excepted).
#pragma once

#if defined(__CUDACC__)

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned long long uintptr_t;

#define PK_SHARED(type, name, count)                                     \
    __shared__ __align__(16) unsigned char name##_bytes[(count) * sizeof(type)]; \
    type* const name = reinterpret_cast<type*>(name##_bytes)

template <int N>
__device__ __forceinline__ void pk_warp_max(float (&values)[N]) {
#pragma unroll
    for (int stride = 16; stride > 0; stride >>= 1) {
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] = fmaxf(values[i], __shfl_xor_sync(0xFFFFFFFFu, values[i], stride));
    }
}

template <int N>
__device__ __forceinline__ void pk_warp_sum(float (&values)[N]) {
#pragma unroll
    for (int stride = 16; stride > 0; stride >>= 1) {
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] = __fadd_rn(values[i], __shfl_xor_sync(0xFFFFFFFFu, values[i], stride));
    }
}

__device__ __forceinline__ void pk_yield() { __nanosleep(32); }

#else

#include "cpu_device/atomics.h"
#include "cpu_device/warp.h"

#endif

#include "kernels/export.cuh"
