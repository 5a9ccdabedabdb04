// Workers and blocks: stacks, shared memory, running order, and one block from its first thread to its last.
#pragma once

#include "cpu_device/collectives.h"

// ---------------------------------------------------------------------------------------------------------
// Shared memory: one mapping per declaration and worker, poisoned when a block first reaches it

static size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

static bool map_shared(pk_shared_buffer* buffer, const void* key, size_t bytes, const char* name) {
    size_t pages = round_up(bytes, PK_PAGE_BYTES), total = pages + 2 * PK_PAGE_BYTES;
    void* base = mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return false;
    uint8_t* first = static_cast<uint8_t*>(base) + PK_PAGE_BYTES;
    if (mprotect(first, pages, PROT_READ | PROT_WRITE) != 0) {
        munmap(base, total);
        return false;
    }
    buffer->key = key;
    buffer->name = name;
    buffer->bytes = bytes;
    buffer->base = static_cast<uint8_t*>(base);
    buffer->mapped_bytes = total;
    buffer->start = first + pages - round_up(bytes, 16);
    buffer->slack = round_up(bytes, 16) - bytes;
    memset(first, CANARY, pages);
    return true;
}

static PK_NOINLINE void* first_use(pk_worker* worker, const void* key, size_t bytes, const char* name) {
    uint32_t index = worker->shared_count;
    // The n-th buffer of a block is nearly always the n-th buffer of the block before.
    uint32_t position = worker->shared_active_count;
    if (position < SHARED_ACTIVE_MAX && worker->shared_active[position] < worker->shared_count &&
        worker->shared_buffers[worker->shared_active[position]].key == key) {
        index = worker->shared_active[position];
    } else {
        for (uint32_t i = 0; i < worker->shared_count; ++i) {
            if (worker->shared_buffers[i].key == key) index = i;
        }
    }
    size_t in_use = worker->shared_active_bytes + bytes;
    if (position == SHARED_ACTIVE_MAX || in_use > SHARED_BYTES_MAX) {
        record_fault(worker, worker->current, PK_FAULT_SHARED,
                     "too much shared memory: '%s' (%zu bytes) brings the block to %zu bytes in %u buffers, the limit "
                     "is %u bytes in %u",
                     name, bytes, in_use, position + 1, static_cast<unsigned>(SHARED_BYTES_MAX),
                     static_cast<unsigned>(SHARED_ACTIVE_MAX));
        abandon(worker);
    }
    if (index == worker->shared_count) {
        if (index == SHARED_CACHE_MAX) {  // full: give back the mapping of one that this block does not use
            index = 0;
            for (uint32_t i = 0; i < position;) {
                i = worker->shared_active[i] == index ? (++index, 0) : i + 1;
            }
            munmap(worker->shared_buffers[index].base, worker->shared_buffers[index].mapped_bytes);
            worker->shared_buffers[index].key = nullptr;
        }
        if (!map_shared(&worker->shared_buffers[index], key, bytes, name)) {
            record_fault(worker, worker->current, PK_FAULT_MEMORY,
                         "no host memory for shared buffer '%s' (%zu bytes)", name, bytes);
            abandon(worker);
        }
        if (index == worker->shared_count) worker->shared_count += 1;
    }
    pk_shared_buffer* buffer = &worker->shared_buffers[index];
    memset(buffer->start, POISON, bytes);
    worker->shared_active[position] = index;
    worker->shared_active_key[position] = key;
    worker->shared_active_start[position] = buffer->start;
    worker->shared_active_count = position + 1;
    worker->shared_active_bytes = in_use;
    return buffer->start;
}

PK_PUBLIC void* pk_shared(const void* key, size_t bytes, const char* name) {
    pk_worker* worker = worker_of(pk_self());
    for (uint32_t i = 0; i < worker->shared_active_count; ++i) {
        if (worker->shared_active_key[i] == key) return worker->shared_active_start[i];
    }
    return first_use(worker, key, bytes, name);
}

// The slack behind a buffer whose size is no multiple of 16 is watched by bytes instead of by a page.
static void check_shared_slack(pk_worker* worker) {
    for (uint32_t i = 0; i < worker->shared_active_count; ++i) {
        pk_shared_buffer* buffer = &worker->shared_buffers[worker->shared_active[i]];
        for (size_t k = 0; k < buffer->slack; ++k) {
            uint8_t* at = buffer->start + buffer->bytes + k;
            if (*at == CANARY) continue;
            memset(buffer->start + buffer->bytes, CANARY, buffer->slack);
            record_fault(worker, &worker->scheduler, PK_FAULT_SHARED,
                         "shared buffer '%s' (%zu bytes) was written %zu bytes past its end", buffer->name,
                         buffer->bytes, k);
            return;
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// Workers

static struct pk_region {
    uintptr_t slots;
    pk_worker* worker;
} regions[REGIONS_MAX];           // read by the signal handler: a worker is published before it runs anything
static int region_count;
static pthread_mutex_t regions_mutex = PTHREAD_MUTEX_INITIALIZER;

static const size_t kRegionBytes = static_cast<size_t>(THREADS_MAX) * PK_SLOT_BYTES;

static pk_fiber* fiber_at(pk_worker* worker, uint32_t index) {
    uintptr_t slot = reinterpret_cast<uintptr_t>(worker->slots) + static_cast<uintptr_t>(index) * PK_SLOT_BYTES;
    return reinterpret_cast<pk_fiber*>(slot + PK_SLOT_BYTES - PK_PAGE_BYTES + ((slot >> 9) & PK_STAGGER_MASK));
}

static pk_worker* create_worker(pk_device* device) {
    size_t bytes = round_up(sizeof(pk_worker), PK_PAGE_BYTES);
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    pk_worker* worker = static_cast<pk_worker*>(memory);
    // Reserve one slot more than needed, so that an aligned run of slots lies inside.
    size_t reserved = kRegionBytes + PK_SLOT_BYTES;
    void* space = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED) {
        munmap(memory, bytes);
        return nullptr;
    }
    uintptr_t start = round_up(reinterpret_cast<uintptr_t>(space), PK_SLOT_BYTES);
    uintptr_t first = reinterpret_cast<uintptr_t>(space), last = first + reserved;
    if (start > first) munmap(space, start - first);
    uintptr_t end = start + kRegionBytes;
    if (last > end) munmap(reinterpret_cast<void*>(end), last - end);
    worker->slots = reinterpret_cast<uint8_t*>(start);
    worker->device = device;
    worker->current = &worker->scheduler;
    pthread_mutex_lock(&regions_mutex);
    int index = 0;
    while (index < region_count && regions[index].worker) ++index;
    bool full = index == REGIONS_MAX;
    if (!full) {
        regions[index].worker = worker;
        __atomic_store_n(&regions[index].slots, start, __ATOMIC_RELEASE);
        if (index == region_count) __atomic_store_n(&region_count, index + 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&regions_mutex);
    if (full) {
        munmap(worker->slots, kRegionBytes);
        munmap(memory, bytes);
        return nullptr;
    }
    return worker;
}

static void destroy_worker(pk_worker* worker) {
    pthread_mutex_lock(&regions_mutex);
    for (int i = 0; i < region_count; ++i) {
        if (regions[i].worker != worker) continue;
        __atomic_store_n(&regions[i].slots, 0, __ATOMIC_RELEASE);
        regions[i].worker = nullptr;
    }
    pthread_mutex_unlock(&regions_mutex);
    for (uint32_t i = 0; i < worker->shared_count; ++i) {
        munmap(worker->shared_buffers[i].base, worker->shared_buffers[i].mapped_bytes);
    }
    munmap(worker->slots, kRegionBytes);
    munmap(worker, round_up(sizeof(pk_worker), PK_PAGE_BYTES));
}

// Ranks of one warp.  `state` is used in random order only.
static void order_lanes(pk_warp* warp, pk_fiber* const* fiber_of_lane, uint32_t lanes, int32_t order,
                        uint64_t* state) {
    warp->existing = lanes == 32 ? 0xFFFFFFFFu : (1u << lanes) - 1;
    warp->identity = order == PK_ASCENDING;
    for (uint32_t rank = 0; rank < lanes; ++rank) {
        warp->lane_of_rank[rank] = static_cast<uint8_t>(order == PK_DESCENDING ? lanes - 1 - rank : rank);
    }
    if (order == PK_RANDOM) {
        for (uint32_t rank = lanes; rank > 1; --rank) {
            uint32_t other = static_cast<uint32_t>((mix(state) >> 32) * rank >> 32);
            uint8_t lane = warp->lane_of_rank[rank - 1];
            warp->lane_of_rank[rank - 1] = warp->lane_of_rank[other];
            warp->lane_of_rank[other] = lane;
        }
    }
    for (uint32_t rank = 0; rank < lanes; ++rank) {
        uint32_t lane = warp->lane_of_rank[rank];
        warp->rank_of_lane[lane] = static_cast<uint8_t>(rank);
        warp->fiber_of_rank[rank] = fiber_of_lane[lane];
        fiber_of_lane[lane]->rank = static_cast<uint8_t>(rank);
    }
}

static void order_block(pk_worker* worker, int32_t order, uint64_t seed) {
    uint64_t state = seed;
    pk_fiber* fibers[LANES];
    for (uint32_t w = 0; w < worker->warp_count; ++w) {
        uint32_t lanes = worker->thread_count - w * LANES;
        if (lanes > LANES) lanes = LANES;
        for (uint32_t lane = 0; lane < lanes; ++lane) fibers[lane] = fiber_at(worker, w * LANES + lane);
        order_lanes(&worker->warps[w], fibers, lanes, order, &state);
        worker->warp_order[w] = &worker->warps[order == PK_DESCENDING ? worker->warp_count - 1 - w : w];
    }
    if (order == PK_RANDOM) {
        for (uint32_t w = worker->warp_count; w > 1; --w) {
            uint32_t other = static_cast<uint32_t>((mix(&state) >> 32) * w >> 32);
            pk_warp* warp = worker->warp_order[w - 1];
            worker->warp_order[w - 1] = worker->warp_order[other];
            worker->warp_order[other] = warp;
        }
    }
    worker->order = order;
}

// Stacks, start frames and thread indices for blocks of this shape.  False: the host has no memory.
static bool prepare_fibers(pk_worker* worker, const uint32_t* shape) {
    uint32_t count = shape[0] * shape[1] * shape[2];
    for (; worker->slots_committed < count; ++worker->slots_committed) {
        uint8_t* slot = worker->slots + static_cast<size_t>(worker->slots_committed) * PK_SLOT_BYTES;
        size_t used = PK_STACK_BYTES + PK_PAGE_BYTES;
        if (mprotect(slot + PK_SLOT_BYTES - used, used, PROT_READ | PROT_WRITE) != 0) return false;
    }
    worker->thread_count = count;
    worker->warp_count = (count + LANES - 1) / LANES;
    worker->block.threads = uint3{shape[0], shape[1], shape[2]};
    for (uint32_t i = 0; i < count; ++i) {
        pk_fiber* fiber = fiber_at(worker, i);
        fiber->saved_sp = fiber;  // 256-byte aligned; the stack grows down from here
        fiber->saved_ip = reinterpret_cast<void*>(pk_fiber_start);
        fiber->saved_x = fiber;
        fiber->saved_fp = nullptr;
        fiber->thread = uint3{i % shape[0], i / shape[0] % shape[1], i / (shape[0] * shape[1])};
        fiber->linear = i;
        fiber->block = &worker->block;
        fiber->warp = &worker->warps[i / LANES];
        fiber->lane = static_cast<uint8_t>(i % LANES);
    }
    order_block(worker, worker->device->order, 0);
    worker->fibers_fresh = true;
    return true;
}

// ---------------------------------------------------------------------------------------------------------
// Blocks

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

// Completes the text of a signal with what the runtime knows; the host knows the device buffers.
static void describe_signal(pk_worker* worker, const pk_fiber* fiber) {
    pk_fault* fault = &worker->fault;
    uint64_t address = fault->address, region = reinterpret_cast<uint64_t>(worker->slots);
    fault->thread[0] = fiber->thread.x;
    fault->thread[1] = fiber->thread.y;
    fault->thread[2] = fiber->thread.z;
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

static uint64_t ordered_block(const pk_launch* launch, uint64_t position) {
    switch (launch->device->order) {
        case PK_DESCENDING: return launch->block_count - 1 - position;
        case PK_RANDOM: {
            unsigned __int128 place = static_cast<unsigned __int128>(launch->multiplier) * position + launch->offset;
            return static_cast<uint64_t>(place % launch->block_count);
        }
        default: return position;
    }
}

// Runs one block to its end.  False: it faulted, and worker->fault says how.
static bool run_block(pk_worker* worker, pk_launch* launch, uint64_t block) {
    const pk_node* node = launch->node;
    int32_t order = launch->device->order;
    worker->block.index = uint3{static_cast<uint32_t>(block % node->grid[0]),
                                static_cast<uint32_t>(block / node->grid[0] % node->grid[1]),
                                static_cast<uint32_t>(block / node->grid[0] / node->grid[1])};
    if (order == PK_RANDOM) {
        uint64_t state = launch->device->seed ^ (launch->serial * 0x9E3779B97F4A7C15u);
        order_block(worker, order, mix(&state) ^ block);
    } else if (order != worker->order) {
        order_block(worker, order, 0);
    }
    for (uint32_t w = 0; w < worker->warp_count; ++w) {
        pk_warp* warp = &worker->warps[w];
        warp->ready = warp->live = warp->existing;
        warp->yielded = warp->at_barrier = 0;
        warp->group_count = 0;
    }
    worker->live = worker->thread_count;
    worker->arrived = worker->predicate_count = 0;
    worker->idle_rounds = 0;
    worker->idle_since_ns = 0;
    worker->shared_active_count = 0;
    worker->shared_active_bytes = 0;

    worker->current = first_ready(worker);
    switch_to(&worker->scheduler, worker->current);

    pk_fault* fault = &worker->fault;
    if (fault->kind == PK_FAULT_NONE && worker->live == 0) check_shared_slack(worker);
    bool whole = fault->kind == PK_FAULT_NONE && worker->live == 0;
    if (worker->live != 0 || fault->kind != PK_FAULT_NONE) worker->fibers_fresh = false;
    if (fault->kind != PK_FAULT_NONE) {
        fault->block[0] = worker->block.index.x;
        fault->block[1] = worker->block.index.y;
        fault->block[2] = worker->block.index.z;
        snprintf(fault->kernel, sizeof(fault->kernel), "%s", node->name);
    }
    return whole;
}

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

static bool is_prepared(const pk_worker* worker, const uint32_t* shape) {
    const uint3& threads = worker->block.threads;
    return worker->fibers_fresh && threads.x == shape[0] && threads.y == shape[1] && threads.z == shape[2];
}

static bool publish(pk_launch* launch);

// Takes blocks until none is left.  `may_publish`: the caller's own loop, which asks for helpers when it is slow.
static bool run_blocks(pk_worker* worker, pk_launch* launch, bool may_publish) {
    const pk_node* node = launch->node;
    bool published = false;
    worker->launch = launch;
    worker->block.blocks = uint3{node->grid[0], node->grid[1], node->grid[2]};
    uint64_t started = may_publish ? now_ns() : 0;
    while (!__atomic_load_n(&launch->abort, __ATOMIC_RELAXED)) {
        uint64_t position = __atomic_fetch_add(&launch->next, 1, __ATOMIC_RELAXED);
        if (position >= launch->block_count) break;
        uint64_t block = ordered_block(launch, position);
        if (!is_prepared(worker, node->block) && !prepare_fibers(worker, node->block)) {
            record_fault(worker, &worker->scheduler, PK_FAULT_MEMORY, "no host memory for the stacks of %u threads",
                         node->block[0] * node->block[1] * node->block[2]);
            snprintf(worker->fault.kernel, sizeof(worker->fault.kernel), "%s", node->name);
            report_fault(launch, worker, block);
            break;
        }
        if (!run_block(worker, launch, block)) report_fault(launch, worker, block);
        if (may_publish && !published && position + 2 < launch->block_count && now_ns() - started > kWakeAfterNs) {
            published = true;
            may_publish = publish(launch);
        }
    }
    worker->launch = nullptr;
    return published && may_publish;
}
