// Warp collectives of CUDA on the cpu device; collectives.h holds the runtime's side.
#pragma once

#include "cpu_device/math.h"

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

enum { PK_REDUCE_COUNT_MAX = 64 };  // values of one rendezvous; longer arrays take several

// One function over the data of all lanes: 32 input pointers, 32 output pointers.
typedef void (*pk_cooperation)(const void* const* inputs, void* const* outputs);

extern "C" {
uint64_t pk_warp_collective(uint32_t operation, uint32_t mask, uint64_t value, uint32_t source, const char* file,
                            int line);
void pk_warp_reduce(uint32_t operation, float* values, uint32_t count, const char* file, int line);
void pk_warp_cooperate(pk_cooperation run, const void* input, void* output, const char* file, int line);
}

static inline void __syncwarp(uint32_t mask = 0xFFFFFFFFu, PK_HERE) {
    pk_warp_collective(PK_SYNCWARP, mask, 0, 0, file, line);
}

// ---- shuffles --------------------------------------------------------------------------------------------------

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

// ---- votes -----------------------------------------------------------------------------------------------------

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

// ---- reductions (kernels/runtime.cuh says what they compute) ---------------------------------------------------

template <int N>
static inline void pk_warp_reduce_n(uint32_t operation, float (&values)[N], const char* file, int line) {
    for (int i = 0; i < N; i += PK_REDUCE_COUNT_MAX) {
        uint32_t count = N - i < PK_REDUCE_COUNT_MAX ? N - i : PK_REDUCE_COUNT_MAX;
        pk_warp_reduce(operation, values + i, count, file, line);
    }
}

template <int N>
static inline void pk_warp_max(float (&values)[N], PK_HERE) { pk_warp_reduce_n(PK_WARP_MAX, values, file, line); }
template <int N>
static inline void pk_warp_sum(float (&values)[N], PK_HERE) { pk_warp_reduce_n(PK_WARP_SUM, values, file, line); }
