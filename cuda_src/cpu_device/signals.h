// Signals inside kernels: recorded, and the OS thread goes on in run_block with the block abandoned.
#pragma once

#include "cpu_device/blocks.h"

// ---------------------------------------------------------------------------------------------------------
// Signals

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
#if defined(__x86_64__)
    uintptr_t sp = static_cast<uintptr_t>(context->uc_mcontext.gregs[REG_RSP]);
    uintptr_t pc = static_cast<uintptr_t>(context->uc_mcontext.gregs[REG_RIP]);
#else
    uintptr_t sp = context->uc_mcontext.sp, pc = context->uc_mcontext.pc;
#endif
    // A frame larger than a slot may point its stack pointer into the neighbour: the region says which worker,
    // and the worker says which fiber.
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
    fault->pc = pc;
    // A non-canonical or misaligned vector access arrives without an address (SI_KERNEL).
    fault->address_known = (number == SIGSEGV || number == SIGBUS) && info->si_code != SI_KERNEL;
    fault->address = fault->address_known ? reinterpret_cast<uintptr_t>(info->si_addr) : 0;
    pk_fiber* back = &worker->scheduler;
    describe_signal(worker, worker->current);
    worker->current = back;
#if defined(__x86_64__)
    context->uc_mcontext.gregs[REG_RSP] = reinterpret_cast<greg_t>(back->saved_sp);
    context->uc_mcontext.gregs[REG_RIP] = reinterpret_cast<greg_t>(back->saved_ip);
    context->uc_mcontext.gregs[REG_RBX] = reinterpret_cast<greg_t>(back->saved_x);
    context->uc_mcontext.gregs[REG_RBP] = reinterpret_cast<greg_t>(back->saved_fp);
#else
    context->uc_mcontext.sp = reinterpret_cast<uintptr_t>(back->saved_sp);
    context->uc_mcontext.pc = reinterpret_cast<uintptr_t>(back->saved_ip);
    context->uc_mcontext.regs[19] = reinterpret_cast<uintptr_t>(back->saved_x);
    context->uc_mcontext.regs[29] = reinterpret_cast<uintptr_t>(back->saved_fp);
#endif
}

// Somebody else (a test runner's fault handler) may have come after us: be first again, and chain to them.
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
