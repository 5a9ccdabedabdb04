// Fibers: the context switch, faults, the scheduler inside a block, and the block barrier.
//
// A bit mask per warp holds the threads that may run, in *rank* order.  rank -> lane is the identity, reversed or
// shuffled: so one scheduler serves all three orders.  A lane is in exactly one of these sets of its warp:
//
//   ready      may run                                    at_barrier  waits in __syncthreads
//   yielded    may run when no other thread can           a group     waits in a collective (operation and mask)
//   (none)     exited
//
// When no thread may run and some have not exited, the block can never finish: `diagnose` names the threads that wait,
// where they wait, and a thread that is missing.  The answer is exact, because the runtime knows every wait.
#pragma once

#include "cpu_device/state.h"

// ---- context switch --------------------------------------------------------------------------------------------

// Saves the stack pointer, the resume address and the two registers that inline assembly may not clobber; the
// compiler saves the other registers that it needs.  Without `call` and `ret` the processor's return predictor stays
// right, because every lane resumes in the function in which it blocked.  The floating-point control words stay.
static inline __attribute__((always_inline)) void switch_to(pk_fiber* from, pk_fiber* to) {
#if defined(__x86_64__)
    asm volatile(
        "leaq 1f(%%rip), %%rax\n\t"
        "movq %%rsp, 0(%0)\n\t"
        "movq %%rax, 8(%0)\n\t"
        "movq %%rbx, 16(%0)\n\t"
        "movq %%rbp, 24(%0)\n\t"
        "movq 0(%1), %%rsp\n\t"
        "movq 16(%1), %%rbx\n\t"
        "movq 24(%1), %%rbp\n\t"
        "jmpq *8(%1)\n\t"
        "1:\n\t"
        : "+D"(from), "+S"(to)
        :
        : "rax", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm1", "xmm2", "xmm3",
          "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15",
          "memory", "cc");
#else
    register pk_fiber* from_ asm("x0") = from;
    register pk_fiber* to_ asm("x1") = to;
    asm volatile(
        "adr x9, 1f\n\t"
        "mov x10, sp\n\t"
        "stp x10, x9, [x0]\n\t"
        "stp x19, x29, [x0, #16]\n\t"
        "ldp x10, x9, [x1]\n\t"
        "ldp x19, x29, [x1, #16]\n\t"
        "mov sp, x10\n\t"
        "br x9\n\t"
        "1:\n\t"
        : "+r"(from_), "+r"(to_)
        :
        : "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15", "x16", "x17", "x20",
          "x21", "x22", "x23", "x24", "x25", "x26", "x27", "x28", "x30", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7",
          "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23",
          "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31", "memory", "cc");
#endif
}

// The first frame of a fiber: saved_x holds the fiber itself.
extern "C" __attribute__((visibility("hidden"), used, noreturn)) void pk_fiber_main(pk_fiber* self);
extern "C" __attribute__((visibility("hidden"))) void pk_fiber_start();
#if defined(__x86_64__)
#define PK_FIBER_START "movq %rbx, %rdi\n xorl %ebp, %ebp\n call pk_fiber_main\n ud2\n"
#else
#define PK_FIBER_START "mov x0, x19\n mov x29, xzr\n bl pk_fiber_main\n brk #1\n"
#endif
asm(".text\n"
    ".p2align 4\n"
    ".globl pk_fiber_start\n"
    ".hidden pk_fiber_start\n"
    ".type pk_fiber_start, %function\n"
    "pk_fiber_start:\n"
    PK_FIBER_START
    ".size pk_fiber_start, .-pk_fiber_start\n");

// ---- faults ----------------------------------------------------------------------------------------------------

static void record_fault(pk_worker* worker, pk_fiber* fiber, int32_t kind, const char* format, ...) {
    pk_fault* fault = &worker->fault;
    fault->kind = kind;
    fault->signal = 0;
    fault->address_known = 0;
    fault->address = 0;
    fault->thread = fiber->thread;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(fault->text, sizeof(fault->text), format, arguments);
    va_end(arguments);
}

// Returns to the scheduler for good: the fiber never resumes.
static __attribute__((noreturn)) PK_NOINLINE void abandon(pk_worker* worker) {
    pk_fiber* from = worker->current;
    worker->current = &worker->scheduler;
    switch_to(from, &worker->scheduler);
    __builtin_unreachable();
}

static void describe_lane(const pk_warp* warp, uint32_t lane, char* text, size_t bytes) {
    uint32_t rank = 1u << warp->rank_of_lane[lane];
    pk_worker* worker = worker_of(fiber_of_lane(warp, lane));
    for (uint32_t i = 0; i < warp->group_count; ++i) {
        const pk_group* group = &warp->groups[i];
        if (group->arrived >> lane & 1u) {
            snprintf(text, bytes, "waits in %s with mask 0x%08x at %s:%d", operation_name(group->operation),
                     group->mask, base_name(group->file), group->line);
            return;
        }
    }
    if (!(warp->live & rank)) {
        snprintf(text, bytes, "exited");
    } else if (warp->at_barrier & rank) {
        snprintf(text, bytes, "waits in __syncthreads at %s:%d", base_name(worker->barrier_file), worker->barrier_line);
    } else {
        snprintf(text, bytes, "spins");
    }
}

// No thread may run, or for too long only spinning threads ran.  Records the wait that cannot end.
static void diagnose(pk_worker* worker, bool spun_out) {
    char where[256];
    for (uint32_t w = 0; w < worker->warp_count; ++w) {
        pk_warp* warp = &worker->warps[w];
        if (warp->group_count == 0) continue;
        const pk_group* group = &warp->groups[0];
        uint32_t lane = lowest(group->required & ~group->arrived);
        describe_lane(warp, lane, where, sizeof(where));
        record_fault(worker, fiber_of_lane(warp, lane), PK_FAULT_COLLECTIVE,
                     "divergent warp collective: lanes 0x%08x of warp %u wait in %s with mask 0x%08x at %s:%d, "
                     "but lane %u %s",
                     group->arrived, w, operation_name(group->operation), group->mask, base_name(group->file),
                     group->line, lane, where);
        return;
    }
    for (uint32_t w = 0; w < worker->warp_count && worker->arrived > 0; ++w) {
        pk_warp* warp = &worker->warps[w];
        uint32_t missing_lanes = warp->existing & ~lanes_of(warp, warp->at_barrier);
        if (missing_lanes == 0) continue;
        uint32_t lane = lowest(missing_lanes);
        describe_lane(warp, lane, where, sizeof(where));
        record_fault(worker, fiber_of_lane(warp, lane), PK_FAULT_BARRIER,
                     "divergent barrier: %u of %u threads wait in __syncthreads at %s:%d, but this thread %s",
                     worker->arrived, worker->thread_count, base_name(worker->barrier_file), worker->barrier_line,
                     where);
        return;
    }
    record_fault(worker, worker->current, PK_FAULT_SPIN, "%s",
                 spun_out ? "spin without progress: only spinning threads ran until the time limit"
                          : "internal: a block without runnable threads");
}

// ---- scheduling inside a block ---------------------------------------------------------------------------------

static inline pk_fiber* first_ready(pk_worker* worker) {
    for (uint32_t i = 0; i < worker->warp_count; ++i) {
        pk_warp* warp = worker->warp_order[i];
        if (warp->ready) return warp->fiber_of_rank[lowest(warp->ready)];
    }
    return nullptr;
}

// No thread is ready: the block is finished, spins, or can never finish.  Returns the fiber to run next.
static PK_NOINLINE pk_fiber* idle(pk_worker* worker) {
    if (worker->live == 0) return &worker->scheduler;
    uint32_t spinning = 0;
    for (uint32_t w = 0; w < worker->warp_count; ++w) {
        pk_warp* warp = &worker->warps[w];
        spinning |= warp->yielded;
        warp->ready |= warp->yielded;
        warp->yielded = 0;
    }
    if (!spinning) {
        diagnose(worker, false);
        return &worker->scheduler;
    }
    if (__atomic_load_n(&worker->launch->abort, __ATOMIC_RELAXED)) return &worker->scheduler;
    if (worker->block.progressed) {
        worker->block.progressed = 0;
        worker->idle_since_ns = 0;
    }
    if (++worker->idle_rounds % kClockEveryRounds == 0) {
        uint64_t now = now_ns();
        if (worker->idle_since_ns == 0) worker->idle_since_ns = now;
        if (now - worker->idle_since_ns > worker->device->spin_limit_ns) {
            diagnose(worker, true);
            return &worker->scheduler;
        }
        sched_yield();
    }
    return first_ready(worker);
}

// Switches to the next fiber.  `self` is in no ready set any more, or is itself the next one.
static inline __attribute__((always_inline)) void leave(pk_worker* worker, pk_warp* warp, pk_fiber* self) {
    pk_fiber* next;
    if (warp->ready) {
        next = warp->fiber_of_rank[lowest(warp->ready)];
    } else {
        next = first_ready(worker);
        if (!next) next = idle(worker);
    }
    if (next != self) {
        worker->current = next;
        switch_to(self, next);
    }
}

extern "C" __attribute__((visibility("hidden"), used, noreturn)) void pk_fiber_main(pk_fiber* self) {
    for (;;) {
        pk_worker* worker = worker_of(self);
        const pk_node* node = worker->launch->node;
        node->entry(node->slots);
        pk_warp* warp = self->warp;
        uint32_t bit = 1u << self->rank;
        warp->live &= ~bit;
        warp->ready &= ~bit;
        worker->live -= 1;
        worker->idle_since_ns = 0;
        leave(worker, warp, self);  // resumes when the next block starts
    }
}

PK_PUBLIC void pk_yield() {
    pk_fiber* self = pk_self();
    pk_warp* warp = self->warp;
    uint32_t bit = 1u << self->rank;
    warp->ready &= ~bit;
    warp->yielded |= bit;
    leave(worker_of(self), warp, self);
}

PK_PUBLIC __attribute__((noreturn)) void pk_trap(const char* file, int line) {
    pk_fiber* self = pk_self();
    pk_worker* worker = worker_of(self);
    record_fault(worker, self, PK_FAULT_TRAP, "__trap() at %s:%d", base_name(file), line);
    abandon(worker);
}

// ---- the block barrier -----------------------------------------------------------------------------------------

PK_PUBLIC void pk_block_barrier(int predicate, uint32_t* true_count, const char* file, int line) {
    pk_fiber* self = pk_self();
    pk_worker* worker = worker_of(self);
    pk_warp* warp = self->warp;
    uint32_t bit = 1u << self->rank;
    if (worker->arrived == 0) {
        worker->barrier_file = file;
        worker->barrier_line = line;
    } else if (line != worker->barrier_line || (file != worker->barrier_file && strcmp(file, worker->barrier_file))) {
        record_fault(worker, self, PK_FAULT_BARRIER,
                     "divergent barrier: %u of %u threads wait in __syncthreads at %s:%d, but this thread waits in "
                     "__syncthreads at %s:%d",
                     worker->arrived, worker->thread_count, base_name(worker->barrier_file), worker->barrier_line,
                     base_name(file), line);
        abandon(worker);
    }
    warp->ready &= ~bit;
    warp->at_barrier |= bit;
    worker->predicate_count += static_cast<uint32_t>(predicate);
    if (++worker->arrived == worker->thread_count) {
        worker->arrived = 0;
        worker->predicate_result = worker->predicate_count;
        worker->predicate_count = 0;
        worker->idle_since_ns = 0;
        for (uint32_t w = 0; w < worker->warp_count; ++w) {
            pk_warp* other = &worker->warps[w];
            other->ready = other->at_barrier;
            other->at_barrier = 0;
        }
        pk_fiber* next = first_ready(worker);
        if (next != self) {
            worker->current = next;
            switch_to(self, next);
        }
    } else {
        leave(worker, warp, self);
    }
    // The result stays valid until every thread has read it, because the next barrier needs all threads.
    if (true_count) *true_count = worker->predicate_result;
}
