// Atomics and fences of CUDA on the cpu device.
//
// An atomic that leaves memory unchanged is probably part of a spin loop, so it lets other threads run.
#pragma once

#include "cpu_device/math.h"

static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_block() { __threadfence(); }
static inline void __threadfence_system() { __threadfence(); }

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
#undef PK_ATOMICS
#undef PK_ATOMIC
