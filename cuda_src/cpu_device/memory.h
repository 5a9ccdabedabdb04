// Memory of the cpu device: guarded mappings, device buffers, and the shared memory of a block.
//
//   device buffer   [ guard pages | canary ... | data | canary | guard pages ]    filled by the host
//   shared buffer   [ guard page  | canary ... | data | canary | guard page  ]    one per declaration and worker
//
// The data ends as close to the second guard as its alignment allows, so that an access past the end faults.
#pragma once

#include "cpu_device/fibers.h"

// ---- mappings --------------------------------------------------------------------------------------------------

static size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// Returns zeroed memory, or null when the host has none.
static void* map_memory(size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? nullptr : memory;
}

// Returns addresses without memory, or null when the host has none.
static void* reserve_addresses(size_t bytes) {
    void* first = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return first == MAP_FAILED ? nullptr : first;
}

// Maps `bytes` of zeroed data between canaries and guards.  Returns false when the host has no memory.  `align` is a
// power of two, at most a page.
static bool map_guarded(pk_buffer* buffer, size_t bytes, size_t align, size_t guard_bytes) {
    size_t used = round_up(bytes, align), pages = round_up(used ? used : 1, PK_PAGE_BYTES);
    size_t mapped_bytes = pages + 2 * guard_bytes;
    void* base = reserve_addresses(mapped_bytes);
    if (!base) return false;
    uint8_t* first = static_cast<uint8_t*>(base) + guard_bytes;
    if (mprotect(first, pages, PROT_READ | PROT_WRITE) != 0) {
        munmap(base, mapped_bytes);
        return false;
    }
    *buffer = pk_buffer{static_cast<uint8_t*>(base), mapped_bytes, first + pages - used, bytes};
    memset(first, CANARY, pages - used);
    memset(buffer->start + bytes, CANARY, used - bytes);
    return true;
}

// ---- device buffers --------------------------------------------------------------------------------------------

// On either side, so that an access with a stride behind the end, or before the start (page -1), faults too.
enum { GUARD_BYTES = 64 * 1024 };

// Returns 0, or -1 when the host has no memory.
PK_PUBLIC int pk_buffer_create(uint64_t bytes, uint64_t align, int fill, pk_buffer* buffer) {
    if (!map_guarded(buffer, bytes, align, GUARD_BYTES)) return -1;
    if (fill) memset(buffer->start, fill, bytes);
    return 0;
}

// Returns 1 when a canary byte was overwritten; *offset is its distance from the start of the data, negative before it.
PK_PUBLIC int pk_buffer_check(const pk_buffer* buffer, int64_t* offset) {
    const uint8_t* first = buffer->base + GUARD_BYTES;
    const uint8_t* end = buffer->base + buffer->mapped_bytes - GUARD_BYTES;
    const uint8_t* at = buffer->start + buffer->bytes;
    while (at < end && *at == CANARY) ++at;
    if (at == end) {
        at = buffer->start;
        while (at > first && at[-1] == CANARY) --at;
        if (at == first) return 0;
        --at;
    }
    *offset = at - buffer->start;
    return 1;
}

// Frees the memory and keeps the addresses, so that a late access faults instead of changing another buffer.
PK_PUBLIC void pk_buffer_retire(const pk_buffer* buffer) {
    mmap(buffer->base, buffer->mapped_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

PK_PUBLIC void pk_buffer_destroy(const pk_buffer* buffer) { munmap(buffer->base, buffer->mapped_bytes); }

// ---- shared memory of a block ----------------------------------------------------------------------------------

// Finds or maps the buffer of a declaration that the block reaches for the first time, and fills it with POISON.
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
        if (index == SHARED_CACHE_MAX) {  // full: unmap a buffer that this block does not use
            index = 0;
            for (uint32_t i = 0; i < position;) {
                i = worker->shared_active[i] == index ? (++index, 0) : i + 1;
            }
            munmap(worker->shared_buffers[index].base, worker->shared_buffers[index].mapped_bytes);
            worker->shared_buffers[index] = {};
        }
        if (!map_guarded(&worker->shared_buffers[index], bytes, 16, PK_PAGE_BYTES)) {
            record_fault(worker, worker->current, PK_FAULT_MEMORY,
                         "no host memory for shared buffer '%s' (%zu bytes)", name, bytes);
            abandon(worker);
        }
        worker->shared_buffers[index].key = key;
        worker->shared_buffers[index].name = name;
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

// Canary bytes watch the slack behind a buffer whose size is no multiple of 16; the guard page begins behind them.
static void check_shared_slack(pk_worker* worker) {
    for (uint32_t i = 0; i < worker->shared_active_count; ++i) {
        pk_shared_buffer* buffer = &worker->shared_buffers[worker->shared_active[i]];
        uint8_t* end = buffer->start + buffer->bytes;
        size_t slack = round_up(buffer->bytes, 16) - buffer->bytes;
        for (size_t k = 0; k < slack; ++k) {
            if (end[k] == CANARY) continue;
            memset(end, CANARY, slack);
            record_fault(worker, &worker->scheduler, PK_FAULT_SHARED,
                         "shared buffer '%s' (%zu bytes) was written %zu bytes past its end", buffer->name,
                         buffer->bytes, k);
            return;
        }
    }
}
