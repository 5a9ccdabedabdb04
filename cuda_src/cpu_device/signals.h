// Signals inside kernels: the handler records a fault and resumes the OS thread in run_block, behind the block.
#pragma once

#include "cpu_device/blocks.h"

static const char* signal_name(int number) {
    switch (number) {
        case SIGSEGV: return "SIGSEGV";
        case SIGBUS: return "SIGBUS";
        case SIGFPE: return "SIGFPE (an integer division by zero or overflow)";
        case SIGILL: return "SIGILL (a trap: a failed bounds or alignment check, or unreachable code)";
        case SIGTRAP: return "SIGTRAP (a trap: a failed bounds or alignment check, or unreachable code)";
        default: return "signal";
    }
}

// Names the stack or the shared buffer that the address belongs to; the host looks for it in the device buffers.
static void describe_signal(pk_worker* worker, const pk_fiber* fiber) {
    pk_fault* fault = &worker->fault;
    uint64_t address = fault->address, region = reinterpret_cast<uint64_t>(worker->slots);
    fault->thread = fiber->thread;
    snprintf(fault->text, sizeof(fault->text), "%s", signal_name(fault->signal));
    if (!fault->address_known) return;
    if (address >= region && address < region + kRegionBytes) {
        snprintf(fault->text, sizeof(fault->text), "the thread's stack overflowed (%d bytes)", PK_STACK_BYTES);
        return;
    }
    for (uint32_t i = 0; i < worker->shared_active_count; ++i) {
        const pk_shared_buffer* buffer = &worker->shared_buffers[worker->shared_active[i]];
        uint64_t base = reinterpret_cast<uint64_t>(buffer->base), start = reinterpret_cast<uint64_t>(buffer->start);
        if (address < base || address >= base + buffer->mapped_bytes) continue;
        if (address < start) {
            snprintf(fault->text, sizeof(fault->text), "an access %llu bytes before shared buffer '%s' (%zu bytes)",
                     static_cast<unsigned long long>(start - address), buffer->name, buffer->bytes);
        } else {
            snprintf(fault->text, sizeof(fault->text),
                     "an access %llu bytes past the end of shared buffer '%s' (%zu bytes)",
                     static_cast<unsigned long long>(address - start - buffer->bytes), buffer->name, buffer->bytes);
        }
        return;
    }
}

// The registers that a fiber saves, in the context that the handler returns to.
#if defined(__x86_64__)
#define PK_CONTEXT_SP uc_mcontext.gregs[REG_RSP]
#define PK_CONTEXT_PC uc_mcontext.gregs[REG_RIP]
#define PK_CONTEXT_X uc_mcontext.gregs[REG_RBX]
#define PK_CONTEXT_FP uc_mcontext.gregs[REG_RBP]
typedef greg_t pk_register;
#else
#define PK_CONTEXT_SP uc_mcontext.sp
#define PK_CONTEXT_PC uc_mcontext.pc
#define PK_CONTEXT_X uc_mcontext.regs[19]
#define PK_CONTEXT_FP uc_mcontext.regs[29]
typedef uintptr_t pk_register;
#endif

static const int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
enum { SIGNALS = 5 };
static struct sigaction previous_actions[SIGNALS];
static volatile sig_atomic_t is_chaining;
static pthread_mutex_t signals_mutex = PTHREAD_MUTEX_INITIALIZER;

static void chain(int number, siginfo_t* info, void* context) {
    for (int i = 0; i < SIGNALS; ++i) {
        if (kSignals[i] != number) continue;
        const struct sigaction* previous = &previous_actions[i];
        bool is_default = !(previous->sa_flags & SA_SIGINFO) &&
                          (previous->sa_handler == SIG_DFL || previous->sa_handler == SIG_IGN);
        if (is_default || is_chaining) {  // the second case: the previous handler raised the signal again
            signal(number, SIG_DFL);
            if (info->si_code <= 0) raise(number);  // sent, not caused by an instruction that runs again
            return;
        }
        is_chaining = 1;
        if (previous->sa_flags & SA_SIGINFO) {
            previous->sa_sigaction(number, info, context);
        } else {
            previous->sa_handler(number);
        }
        is_chaining = 0;
    }
}

static void on_signal(int number, siginfo_t* info, void* context_pointer) {
    ucontext_t* context = static_cast<ucontext_t*>(context_pointer);
    uintptr_t sp = static_cast<uintptr_t>(context->PK_CONTEXT_SP);
    // The stack pointer of a frame larger than a slot may lie in a neighbour's slot.  Therefore the region gives the
    // worker, and the worker its running fiber.
    pk_worker* worker = nullptr;
    int count = __atomic_load_n(&region_count, __ATOMIC_ACQUIRE);
    for (int i = 0; i < count; ++i) {
        uintptr_t slots = __atomic_load_n(&regions[i].slots, __ATOMIC_ACQUIRE);
        if (slots && sp - slots < kRegionBytes) worker = regions[i].worker;
    }
    if (!worker || worker->current == &worker->scheduler || info->si_code <= 0) {
        chain(number, info, context_pointer);
        return;
    }
    pk_fault* fault = &worker->fault;
    fault->kind = PK_FAULT_SIGNAL;
    fault->signal = number;
    fault->pc = static_cast<uintptr_t>(context->PK_CONTEXT_PC);
    // The signal of a non-canonical or misaligned vector access has no address (SI_KERNEL).
    fault->address_known = (number == SIGSEGV || number == SIGBUS) && info->si_code != SI_KERNEL;
    fault->address = fault->address_known ? reinterpret_cast<uintptr_t>(info->si_addr) : 0;
    pk_fiber* back = &worker->scheduler;
    describe_signal(worker, worker->current);
    worker->current = back;
    context->PK_CONTEXT_SP = reinterpret_cast<pk_register>(back->saved_sp);
    context->PK_CONTEXT_PC = reinterpret_cast<pk_register>(back->saved_ip);
    context->PK_CONTEXT_X = reinterpret_cast<pk_register>(back->saved_x);
    context->PK_CONTEXT_FP = reinterpret_cast<pk_register>(back->saved_fp);
}

// Installs our handlers, again if other code (a test runner's fault handler) replaced them: ours then chain to its own.
static void ensure_signal_handlers() {
    struct sigaction present;
    sigaction(SIGSEGV, nullptr, &present);
    if ((present.sa_flags & SA_SIGINFO) && present.sa_sigaction == on_signal) return;
    pthread_mutex_lock(&signals_mutex);
    for (int i = 0; i < SIGNALS; ++i) {
        struct sigaction ours = {};
        ours.sa_sigaction = on_signal;
        ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigemptyset(&ours.sa_mask);
        struct sigaction before;
        if (sigaction(kSignals[i], &ours, &before) != 0) continue;
        if (!(before.sa_flags & SA_SIGINFO) || before.sa_sigaction != on_signal) previous_actions[i] = before;
    }
    pthread_mutex_unlock(&signals_mutex);
}
