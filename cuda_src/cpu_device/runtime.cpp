// The runtime of the cpu device: CUDA threads as fibers, blocks on a few OS threads, faults as answers.
//
// One shared library, loaded once per process; kernel modules take the symbols of cpu_runtime.h from it.
//
//   pk_run(device, nodes)            launches and copies, in order, in one call (a graph replays through it)
//     run_kernel                     blocks are taken from a counter by the caller and by helper threads
//       run_block(worker)            one block: warp by warp, the lanes of a warp until all of them wait
//         fibers                     switch directly to each other; the last one returns to run_block
//
// Nothing here knows Python, pages or models.

#include "cpu_device/signals.h"

// ---------------------------------------------------------------------------------------------------------
// OS threads

static bool publish(pk_launch* launch) {
    pk_device* device = launch->device;
    pthread_mutex_lock(&device->mutex);
    bool free = device->job == nullptr;
    if (free) {
        device->job = launch;
        __atomic_fetch_add(&device->job_serial, 1, __ATOMIC_RELEASE);
        pthread_cond_broadcast(&device->work);
    }
    pthread_mutex_unlock(&device->mutex);
    return free;
}

static void unpublish(pk_device* device) {
    pthread_mutex_lock(&device->mutex);
    device->job = nullptr;
    while (device->helpers_active > 0) pthread_cond_wait(&device->done, &device->mutex);
    pthread_mutex_unlock(&device->mutex);
}

static bool install_signal_stack() {
    stack_t present;
    sigaltstack(nullptr, &present);
    if (!(present.ss_flags & SS_DISABLE) && present.ss_size >= 16 * 1024) return true;
    stack_t wanted = {};
    wanted.ss_size = 64 * 1024;
    void* memory = mmap(nullptr, wanted.ss_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return false;
    wanted.ss_sp = memory;
    return sigaltstack(&wanted, nullptr) == 0;
}

// Rounding and denormals as a GPU has them, whatever a library set in this OS thread: results must not depend on it.
static uint32_t set_float_control(uint32_t wanted) {
#if defined(__x86_64__)
    uint32_t before = __builtin_ia32_stmxcsr();
    if (before != wanted) __builtin_ia32_ldmxcsr(wanted);
#else
    uint64_t before, next = wanted;
    asm volatile("mrs %0, fpcr" : "=r"(before));
    if (before != next) asm volatile("msr fpcr, %0" : : "r"(next));
#endif
    return static_cast<uint32_t>(before);
}

#if defined(__x86_64__)
static const uint32_t kFloatControl = 0x1F80;  // round to nearest, denormals kept, exceptions masked
#else
static const uint32_t kFloatControl = 0;
#endif

static void* helper_main(void* argument) {
    pk_device* device = static_cast<pk_device*>(argument);
    install_signal_stack();
    set_float_control(kFloatControl);
    pk_worker* worker = create_worker(device);
    uint64_t seen = 0;
    while (worker) {
        uint64_t until = now_ns() + kHelperSpinNs;
        while (__atomic_load_n(&device->job_serial, __ATOMIC_ACQUIRE) == seen && now_ns() < until) relax();
        pthread_mutex_lock(&device->mutex);
        while (!device->stopping && device->job_serial == seen) pthread_cond_wait(&device->work, &device->mutex);
        if (device->stopping) break;
        seen = device->job_serial;
        pk_launch* launch = device->job;
        if (launch) device->helpers_active += 1;
        pthread_mutex_unlock(&device->mutex);
        if (!launch) continue;
        run_blocks(worker, launch, false);
        pthread_mutex_lock(&device->mutex);
        if (--device->helpers_active == 0) pthread_cond_broadcast(&device->done);
        pthread_mutex_unlock(&device->mutex);
    }
    if (!worker) return nullptr;
    pthread_mutex_unlock(&device->mutex);
    destroy_worker(worker);
    return nullptr;
}

static pk_worker* take_worker(pk_device* device) {
    pthread_mutex_lock(&device->mutex);
    pk_worker* worker = device->free_workers;
    if (worker) device->free_workers = worker->next_free;
    pthread_mutex_unlock(&device->mutex);
    return worker ? worker : create_worker(device);
}

static void give_worker(pk_device* device, pk_worker* worker) {
    pthread_mutex_lock(&device->mutex);
    worker->next_free = device->free_workers;
    device->free_workers = worker;
    pthread_mutex_unlock(&device->mutex);
}

// ---------------------------------------------------------------------------------------------------------
// Launches

static uint64_t greatest_common_divisor(uint64_t a, uint64_t b) {
    while (b) {
        uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static void run_kernel(pk_device* device, pk_worker* worker, const pk_node* node, pk_fault* fault) {
    pk_launch launch = {};
    launch.node = node;
    launch.device = device;
    launch.block_count = static_cast<uint64_t>(node->grid[0]) * node->grid[1] * node->grid[2];
    launch.serial = __atomic_add_fetch(&device->launches, 1, __ATOMIC_RELAXED);
    if (device->order == PK_RANDOM) {
        uint64_t state = device->seed + launch.serial * 0xD1B54A32D192ED03u;
        launch.offset = mix(&state) % launch.block_count;
        do {
            launch.multiplier = mix(&state) % launch.block_count;
        } while (greatest_common_divisor(launch.multiplier, launch.block_count) != 1);
    }
    if (node->serial) pthread_mutex_lock(&device->serial_mutex);
    bool may_publish = device->helper_count > 0 && launch.block_count > 2 && !node->serial;
    if (run_blocks(worker, &launch, may_publish)) unpublish(device);
    if (node->serial) pthread_mutex_unlock(&device->serial_mutex);
    if (launch.fault.kind != PK_FAULT_NONE) *fault = launch.fault;
}

static __thread int has_signal_stack;
static __thread pk_fault last_fault;

// Runs the nodes in order.  Returns 0, or 1 when one failed: see pk_last_fault; the nodes after it did not run.
PK_PUBLIC int pk_run(pk_device* device, const pk_node* nodes, uint64_t count) {
    ensure_signal_handlers();
    if (!has_signal_stack) has_signal_stack = install_signal_stack();
    pk_fault* fault = &last_fault;
    fault->kind = PK_FAULT_NONE;
    uint32_t float_control = set_float_control(kFloatControl);
    pk_worker* worker = take_worker(device);
    if (!worker) {
        set_float_control(float_control);
        memset(fault, 0, sizeof(*fault));
        fault->kind = PK_FAULT_MEMORY;
        snprintf(fault->text, sizeof(fault->text), "no host memory or address space for the stacks");
        return 1;
    }
    for (uint64_t i = 0; i < count && fault->kind == PK_FAULT_NONE; ++i) {
        if (nodes[i].kind == PK_NODE_COPY) {
            memmove(nodes[i].destination, nodes[i].source, nodes[i].bytes);
        } else {
            run_kernel(device, worker, &nodes[i], fault);
            if (fault->kind != PK_FAULT_NONE) fault->node = static_cast<int32_t>(i);
        }
    }
    give_worker(device, worker);
    set_float_control(float_control);
    return fault->kind != PK_FAULT_NONE;
}

// Runs one node whose arguments lie elsewhere: the host need not know their address.
PK_PUBLIC int pk_run_one(pk_device* device, const pk_node* node, const uint64_t* slots) {
    pk_node copy = *node;
    copy.slots = slots;
    return pk_run(device, &copy, 1);
}

// The fault of the last pk_run of this OS thread.
PK_PUBLIC void pk_last_fault(pk_fault* fault) { *fault = last_fault; }

// ---------------------------------------------------------------------------------------------------------
// Devices

PK_PUBLIC pk_device* pk_device_create(int threads, int32_t order, uint64_t seed, double spin_seconds) {
    size_t bytes = round_up(sizeof(pk_device), PK_PAGE_BYTES);
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    pk_device* device = static_cast<pk_device*>(memory);
    pthread_mutex_init(&device->mutex, nullptr);
    pthread_mutex_init(&device->serial_mutex, nullptr);
    pthread_cond_init(&device->work, nullptr);
    pthread_cond_init(&device->done, nullptr);
    device->order = order;
    device->seed = seed;
    device->spin_limit_ns = static_cast<uint64_t>(spin_seconds * 1e9);
    // Helpers take no signals but faults: Ctrl-C belongs to the main thread.
    sigset_t every, before;
    sigfillset(&every);
    for (int i = 0; i < SIGNALS; ++i) sigdelset(&every, kSignals[i]);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    for (int i = 0; i < threads - 1 && i < HELPERS_MAX; ++i) {
        if (pthread_create(&device->helpers[device->helper_count], nullptr, helper_main, device) != 0) break;
        device->helper_count += 1;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return device;
}

PK_PUBLIC void pk_device_set_order(pk_device* device, int32_t order, uint64_t seed) {
    device->order = order;
    device->seed = seed;
    device->launches = 0;
}

PK_PUBLIC void pk_device_destroy(pk_device* device) {
    pthread_mutex_lock(&device->mutex);
    device->stopping = true;
    __atomic_fetch_add(&device->job_serial, 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&device->work);
    pthread_mutex_unlock(&device->mutex);
    for (int i = 0; i < device->helper_count; ++i) pthread_join(device->helpers[i], nullptr);
    while (device->free_workers) {
        pk_worker* worker = device->free_workers;
        device->free_workers = worker->next_free;
        destroy_worker(worker);
    }
    munmap(device, round_up(sizeof(pk_device), PK_PAGE_BYTES));
}

// ---------------------------------------------------------------------------------------------------------
// Buffers: [ guard pages | canary ... | data | canary | guard pages ]

// On either side, so that a stride past the end, or one before the start (page -1), still has a name.
enum { GUARD_BYTES = 64 * 1024 };

// Returns 0, or -1 when the host has no memory.  `align` is a power of two, at most a page.
PK_PUBLIC int pk_buffer_create(uint64_t bytes, uint64_t align, int fill, pk_buffer* buffer) {
    uint64_t used = round_up(bytes, align), pages = round_up(used ? used : 1, PK_PAGE_BYTES);
    uint64_t total = GUARD_BYTES + pages + GUARD_BYTES;
    void* base = mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return -1;
    uint8_t* first = static_cast<uint8_t*>(base) + GUARD_BYTES;
    if (mprotect(first, pages, PROT_READ | PROT_WRITE) != 0) {
        munmap(base, total);
        return -1;
    }
    buffer->base = static_cast<uint8_t*>(base);
    buffer->mapped_bytes = total;
    buffer->start = first + pages - used;
    buffer->bytes = bytes;
    memset(first, CANARY, pages - used);
    if (fill) memset(buffer->start, fill, bytes);
    memset(buffer->start + bytes, CANARY, used - bytes);
    return 0;
}

// 1 when a canary byte was overwritten; *offset is its distance from the start of the buffer (negative before it).
PK_PUBLIC int pk_buffer_check(const pk_buffer* buffer, int64_t* offset) {
    const uint8_t* first = buffer->base + GUARD_BYTES;
    const uint8_t* end = buffer->base + buffer->mapped_bytes - GUARD_BYTES;
    for (const uint8_t* at = buffer->start + buffer->bytes; at < end; ++at) {
        if (*at != CANARY) {
            *offset = at - buffer->start;
            return 1;
        }
    }
    for (const uint8_t* at = buffer->start; at > first;) {
        if (*--at != CANARY) {
            *offset = at - buffer->start;
            return 1;
        }
    }
    return 0;
}

// Gives the memory back but keeps the addresses, so that a late access faults instead of hitting something new.
PK_PUBLIC void pk_buffer_retire(const pk_buffer* buffer) {
    mmap(buffer->base, buffer->mapped_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

PK_PUBLIC void pk_buffer_destroy(const pk_buffer* buffer) { munmap(buffer->base, buffer->mapped_bytes); }
