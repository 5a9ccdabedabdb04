// The runtime of the cpu device: CUDA threads as fibers, blocks on a few OS threads, faults as answers.
//
// One shared library, loaded once per process; kernel modules take the functions of language.h and warp.h from it.
//
//   pk_run(device, nodes)            launches and copies, in order, in one call (a graph replays through it)
//     run_kernel                     the caller and the helper threads take blocks from one counter
//       run_block(worker)            one block: warp by warp, the lanes of a warp until all of them wait
//         fibers                     switch directly to each other; the last one returns to run_block
//
// Nothing here knows Python, pages or models.

#include "cpu_device/collectives.h"
#include "cpu_device/signals.h"

// ---- OS threads ------------------------------------------------------------------------------------------------

// Offers a launch to the helpers.  Returns false when they are busy with another one.
static bool publish(pk_launch* launch) {
    pk_device* device = launch->device;
    pthread_mutex_lock(&device->mutex);
    bool is_free = device->job == nullptr;
    if (is_free) {
        device->job = launch;
        __atomic_fetch_add(&device->job_serial, 1, __ATOMIC_RELEASE);
        pthread_cond_broadcast(&device->work);
    }
    pthread_mutex_unlock(&device->mutex);
    return is_free;
}

static void unpublish(pk_device* device) {
    pthread_mutex_lock(&device->mutex);
    device->job = nullptr;
    while (device->helpers_active > 0) pthread_cond_wait(&device->done, &device->mutex);
    pthread_mutex_unlock(&device->mutex);
}

enum { SIGNAL_STACK_BYTES = 64 * 1024 };

static pthread_key_t signal_stack_key;
static pthread_once_t signal_stack_once = PTHREAD_ONCE_INIT;

// Runs at the end of an OS thread, which may be one of the caller's.
static void remove_signal_stack(void* memory) {
    stack_t present, none = {};
    none.ss_flags = SS_DISABLE;
    sigaltstack(nullptr, &present);
    if (present.ss_sp == memory) sigaltstack(&none, nullptr);
    munmap(memory, SIGNAL_STACK_BYTES);
}

static void create_signal_stack_key() { pthread_key_create(&signal_stack_key, remove_signal_stack); }

// Gives this OS thread a stack for signal handlers, unless it has one; it is unmapped when the thread ends.
static bool install_signal_stack() {
    stack_t present;
    sigaltstack(nullptr, &present);
    if (!(present.ss_flags & SS_DISABLE) && present.ss_size >= 16 * 1024) return true;
    pthread_once(&signal_stack_once, create_signal_stack_key);
    stack_t stack = {};
    stack.ss_size = SIGNAL_STACK_BYTES;
    stack.ss_sp = map_memory(stack.ss_size);
    if (!stack.ss_sp) return false;
    if (sigaltstack(&stack, nullptr) == 0 && pthread_setspecific(signal_stack_key, stack.ss_sp) == 0) return true;
    remove_signal_stack(stack.ss_sp);
    return false;
}

// Sets rounding and denormals, so that no setting of another library in this OS thread changes results.  Returns the
// value before.
#if defined(__x86_64__)
static const uint32_t kFloatControl = 0x1F80;  // round to nearest, denormals kept, exceptions masked
static uint32_t set_float_control(uint32_t control) {
    uint32_t before = __builtin_ia32_stmxcsr();
    if (before != control) __builtin_ia32_ldmxcsr(control);
    return before;
}
#else
static const uint64_t kFloatControl = 0;
static uint64_t set_float_control(uint64_t control) {
    uint64_t before;
    asm volatile("mrs %0, fpcr" : "=r"(before));
    if (before != control) asm volatile("msr fpcr, %0" : : "r"(control));
    return before;
}
#endif

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

// ---- blocks of a launch ----------------------------------------------------------------------------------------

// Returns the block at a position of the running order.
static uint64_t ordered_block(const pk_launch* launch, uint64_t position) {
    if (launch->device->order == PK_ASCENDING) return position;
    if (launch->device->order == PK_DESCENDING) return launch->block_count - 1 - position;
    unsigned __int128 place = static_cast<unsigned __int128>(launch->multiplier) * position + launch->offset;
    return static_cast<uint64_t>(place % launch->block_count);
}

// Stops the launch, and keeps the fault of its lowest block.
static void report_fault(pk_launch* launch, pk_worker* worker, uint64_t block) {
    pk_device* device = launch->device;
    __atomic_store_n(&launch->abort, 1, __ATOMIC_RELAXED);
    if (worker->fault.kind == PK_FAULT_NONE) return;  // stopped because another block faulted
    pthread_mutex_lock(&device->mutex);
    if (launch->fault.kind == PK_FAULT_NONE || block < launch->fault_block) {
        launch->fault = worker->fault;
        launch->fault_block = block;
    }
    pthread_mutex_unlock(&device->mutex);
    worker->fault.kind = PK_FAULT_NONE;
}

// Runs blocks until none is left.  `may_publish`: the launching OS thread, which asks for helpers when it is slow.
// Returns whether it published the launch.
static bool run_blocks(pk_worker* worker, pk_launch* launch, bool may_publish) {
    const pk_node* node = launch->node;
    bool has_published = false;
    worker->launch = launch;
    worker->block.blocks = node->grid;
    uint64_t started = may_publish ? now_ns() : 0;
    while (!__atomic_load_n(&launch->abort, __ATOMIC_RELAXED)) {
        uint64_t position = __atomic_fetch_add(&launch->next, 1, __ATOMIC_RELAXED);
        if (position >= launch->block_count) break;
        uint64_t block = ordered_block(launch, position);
        if (!prepare_fibers(worker, node->block)) {
            record_fault(worker, &worker->scheduler, PK_FAULT_MEMORY, "no host memory for the stacks of %u threads",
                         node->block.x * node->block.y * node->block.z);
            snprintf(worker->fault.kernel, sizeof(worker->fault.kernel), "%s", node->name);
            report_fault(launch, worker, block);
            break;
        }
        if (!run_block(worker, launch, block)) report_fault(launch, worker, block);
        if (may_publish && position + 2 < launch->block_count && now_ns() - started > kWakeAfterNs) {
            has_published = publish(launch);
            may_publish = false;
        }
    }
    worker->launch = nullptr;
    return has_published;
}

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

// ---- launches --------------------------------------------------------------------------------------------------

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
    launch.block_count = static_cast<uint64_t>(node->grid.x) * node->grid.y * node->grid.z;
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

// Runs the nodes in order.  Returns 0, or 1 when one failed: pk_last_fault describes it, and later nodes did not run.
PK_PUBLIC int pk_run(pk_device* device, const pk_node* nodes, uint64_t count) {
    ensure_signal_handlers();
    if (!has_signal_stack) has_signal_stack = install_signal_stack();
    pk_fault* fault = &last_fault;
    fault->kind = PK_FAULT_NONE;
    auto float_control = set_float_control(kFloatControl);
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

// Runs one node with these arguments, so that the host need not write their address into the node.
PK_PUBLIC int pk_run_one(pk_device* device, const pk_node* node, const uint64_t* slots) {
    pk_node copy = *node;
    copy.slots = slots;
    return pk_run(device, &copy, 1);
}

// The fault of the last pk_run of this OS thread.
PK_PUBLIC void pk_last_fault(pk_fault* fault) { *fault = last_fault; }

// ---- devices ---------------------------------------------------------------------------------------------------

PK_PUBLIC pk_device* pk_device_create(int threads, int32_t order, uint64_t seed, double spin_seconds) {
    size_t bytes = round_up(sizeof(pk_device), PK_PAGE_BYTES);
    pk_device* device = static_cast<pk_device*>(map_memory(bytes));
    if (!device) return nullptr;
    pthread_mutex_init(&device->mutex, nullptr);
    pthread_mutex_init(&device->serial_mutex, nullptr);
    pthread_cond_init(&device->work, nullptr);
    pthread_cond_init(&device->done, nullptr);
    device->order = order;
    device->seed = seed;
    device->spin_limit_ns = static_cast<uint64_t>(spin_seconds * 1e9);
    // Helpers take no signals except faults: the main thread handles Ctrl-C.
    sigset_t blocked, before;
    sigfillset(&blocked);
    for (int i = 0; i < SIGNALS; ++i) sigdelset(&blocked, kSignals[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
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
