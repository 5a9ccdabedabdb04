// Workers and the blocks that they run: stacks, running order, and one block from its first thread to its last.
#pragma once

#include "cpu_device/memory.h"

// ---- workers ---------------------------------------------------------------------------------------------------

static struct pk_region {
    uintptr_t slots;
    pk_worker* worker;
} regions[REGIONS_MAX];           // the signal handler reads them: a worker enters before it runs anything
static int region_count;
static pthread_mutex_t regions_mutex = PTHREAD_MUTEX_INITIALIZER;

static const size_t kRegionBytes = static_cast<size_t>(THREADS_MAX) * PK_SLOT_BYTES;

static pk_fiber* fiber_at(pk_worker* worker, uint32_t index) {
    uintptr_t slot = reinterpret_cast<uintptr_t>(worker->slots) + static_cast<uintptr_t>(index) * PK_SLOT_BYTES;
    return reinterpret_cast<pk_fiber*>(slot + PK_SLOT_BYTES - PK_PAGE_BYTES + ((slot >> 9) & PK_STAGGER_MASK));
}

static pk_worker* create_worker(pk_device* device) {
    size_t bytes = round_up(sizeof(pk_worker), PK_PAGE_BYTES);
    pk_worker* worker = static_cast<pk_worker*>(map_memory(bytes));
    if (!worker) return nullptr;
    // One slot more than needed, so that an aligned run of slots lies inside.
    size_t reserved = kRegionBytes + PK_SLOT_BYTES;
    uintptr_t first = reinterpret_cast<uintptr_t>(reserve_addresses(reserved));
    if (!first) {
        munmap(worker, bytes);
        return nullptr;
    }
    uintptr_t start = round_up(first, PK_SLOT_BYTES), end = start + kRegionBytes, last = first + reserved;
    if (start > first) munmap(reinterpret_cast<void*>(first), start - first);
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
        munmap(worker, bytes);
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

// ---- running order ---------------------------------------------------------------------------------------------

// Swaps items in a random order that depends on *state only.
template <class T>
static void shuffle(T* items, uint32_t count, uint64_t* state) {
    for (uint32_t left = count; left > 1; --left) {
        uint32_t other = static_cast<uint32_t>((mix(state) >> 32) * left >> 32);
        T item = items[left - 1];
        items[left - 1] = items[other];
        items[other] = item;
    }
}

// Fills the running order of one warp; only a random order changes *state.
static void order_lanes(pk_warp* warp, pk_fiber* const* fiber_of_lane, uint32_t lanes, int32_t order,
                        uint64_t* state) {
    warp->existing = lanes == 32 ? 0xFFFFFFFFu : (1u << lanes) - 1;
    warp->identity = order == PK_ASCENDING;
    for (uint32_t rank = 0; rank < lanes; ++rank) {
        warp->lane_of_rank[rank] = static_cast<uint8_t>(order == PK_DESCENDING ? lanes - 1 - rank : rank);
    }
    if (order == PK_RANDOM) shuffle(warp->lane_of_rank, lanes, state);
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
    if (order == PK_RANDOM) shuffle(worker->warp_order, worker->warp_count, &state);
    worker->order = order;
}

// Writes stacks, start frames and thread indices for blocks of this shape, unless they are already there.  Returns
// false when the host has no memory.
static bool prepare_fibers(pk_worker* worker, const uint3& shape) {
    if (worker->fibers_fresh && memcmp(&worker->block.threads, &shape, sizeof(shape)) == 0) return true;
    uint32_t count = shape.x * shape.y * shape.z;
    for (; worker->slots_committed < count; ++worker->slots_committed) {
        uint8_t* slot = worker->slots + static_cast<size_t>(worker->slots_committed) * PK_SLOT_BYTES;
        size_t used = PK_STACK_BYTES + PK_PAGE_BYTES;
        if (mprotect(slot + PK_SLOT_BYTES - used, used, PROT_READ | PROT_WRITE) != 0) return false;
    }
    worker->thread_count = count;
    worker->warp_count = (count + LANES - 1) / LANES;
    worker->block.threads = shape;
    for (uint32_t i = 0; i < count; ++i) {
        pk_fiber* fiber = fiber_at(worker, i);
        fiber->saved_sp = fiber;  // 256-byte aligned; the stack grows down from here
        fiber->saved_ip = reinterpret_cast<void*>(pk_fiber_start);
        fiber->saved_x = fiber;
        fiber->saved_fp = nullptr;
        fiber->thread = uint3{i % shape.x, i / shape.x % shape.y, i / (shape.x * shape.y)};
        fiber->block = &worker->block;
        fiber->warp = &worker->warps[i / LANES];
        fiber->lane = static_cast<uint8_t>(i % LANES);
    }
    order_block(worker, worker->device->order, 0);
    worker->fibers_fresh = true;
    return true;
}

// ---- one block -------------------------------------------------------------------------------------------------

// Runs one block to its end.  Returns false when it did not get there; worker->fault then says why, unless another
// block's fault stopped it.
static bool run_block(pk_worker* worker, pk_launch* launch, uint64_t block) {
    const pk_node* node = launch->node;
    int32_t order = launch->device->order;
    worker->block.index = uint3{static_cast<uint32_t>(block % node->grid.x),
                                static_cast<uint32_t>(block / node->grid.x % node->grid.y),
                                static_cast<uint32_t>(block / node->grid.x / node->grid.y)};
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
    bool is_whole = fault->kind == PK_FAULT_NONE && worker->live == 0;
    if (!is_whole) worker->fibers_fresh = false;
    if (fault->kind != PK_FAULT_NONE) {
        fault->block = worker->block.index;
        snprintf(fault->kernel, sizeof(fault->kernel), "%s", node->name);
    }
    return is_whole;
}
