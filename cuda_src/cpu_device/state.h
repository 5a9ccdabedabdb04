// The state of the cpu device's runtime: devices, launches, workers and warps.
//
//   pk_device    settings and OS threads; of the launches that run at a time, one uses the helper threads
//   pk_launch    one kernel launch: the next block, and the fault of the lowest block
//   pk_worker    what one OS thread needs to run blocks: fibers, shared buffers, a fault
//   pk_warp      sets of lanes by state, and the operands of collectives
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>

#include "cpu_device/warp.h"

#define PK_PUBLIC extern "C" __attribute__((visibility("default")))
#define PK_NOINLINE __attribute__((noinline))

// ---- layouts that Python mirrors (pagedkv/devices/cpu/runtime.py) ----------------------------------------------

enum pk_order : int32_t { PK_ASCENDING = 0, PK_DESCENDING = 1, PK_RANDOM = 2 };

enum pk_fault_kind : int32_t {
    PK_FAULT_NONE = 0,
    PK_FAULT_SIGNAL = 1,     // `signal`, and `address` when `address_known`
    PK_FAULT_TRAP = 2,       // __trap()
    PK_FAULT_BARRIER = 3,    // divergent barrier
    PK_FAULT_COLLECTIVE = 4, // divergent or wrong warp collective
    PK_FAULT_SHARED = 5,     // shared memory: too much, or its slack was written
    PK_FAULT_SPIN = 6,       // only spinning threads for too long
    PK_FAULT_MEMORY = 7,     // the host has no memory for stacks or shared buffers
};

struct pk_fault {
    int32_t kind;
    int32_t signal;
    int32_t address_known;
    int32_t node;            // index into the nodes of pk_run
    uint64_t address;
    uint64_t pc;
    uint3 block;
    uint3 thread;
    char kernel[128];
    char text[512];
};

typedef void (*pk_entry)(const uint64_t* slots);

enum pk_node_kind : uint32_t { PK_NODE_KERNEL = 0, PK_NODE_COPY = 1 };

struct pk_node {
    uint32_t kind;
    uint32_t serial;         // 1: blocks one after another on one OS thread (static __shared__)
    pk_entry entry;
    const char* name;
    const uint64_t* slots;   // one 8-byte slot per argument
    uint3 grid;
    uint3 block;
    void* destination;       // this and the next two: copies only
    const void* source;
    uint64_t bytes;
};

struct pk_buffer {           // device memory: a mapping with guard pages, and the data in it (memory.h)
    uint8_t* base;
    uint64_t mapped_bytes;
    uint8_t* start;
    uint64_t bytes;
};

// ---- limits ----------------------------------------------------------------------------------------------------

enum {
    LANES = 32,
    THREADS_MAX = 1024,
    WARPS_MAX = THREADS_MAX / LANES,
    HELPERS_MAX = 255,
    REGIONS_MAX = 1024,             // workers of the process: each owns a region of fiber slots
    SHARED_CACHE_MAX = 256,         // shared buffers that a worker keeps mapped
    SHARED_ACTIVE_MAX = 32,         // shared buffers of one block
    SHARED_BYTES_MAX = 227 * 1024,  // what a block may have on sm_90
    CANARY = 0xA5,
    POISON = 0xFF,
};

static const uint64_t kWakeAfterNs = 20000;      // a launch that takes longer asks for helpers
static const uint64_t kHelperSpinNs = 30000;     // a helper waits this long for the next launch before it sleeps
static const uint32_t kClockEveryRounds = 64;    // idle rounds between two readings of the clock

// ---- warps, workers, launches, devices -------------------------------------------------------------------------

struct pk_group {                 // lanes that wait in one collective
    uint32_t operation;
    uint32_t mask;                // the kernel's own, in lanes
    uint32_t required;            // the lanes of the mask that exist
    uint32_t arrived;             // lanes
    const char* file;
    int line;
};

struct pk_warp {
    uint32_t ready, yielded, at_barrier, live;  // sets of ranks
    uint32_t existing;            // set of lanes (and of ranks): fewer than 32 in the last warp of an odd block
    uint32_t group_count;
    bool identity;                // rank == lane
    pk_fiber* fiber_of_rank[LANES];
    uint8_t rank_of_lane[LANES];
    uint8_t lane_of_rank[LANES];
    pk_group groups[LANES];
    uint64_t values[LANES];       // operands, valid from arrival to completion
    uint32_t sources[LANES];
    uint64_t results[LANES];      // valid from completion until the lane's next arrival
    const void* inputs[LANES];
    void* outputs[LANES];
    pk_cooperation cooperation;
    float rows[LANES][PK_REDUCE_COUNT_MAX];  // operands of a reduction
    float totals[PK_REDUCE_COUNT_MAX];       // its results: a lane that runs ahead overwrites its own row only
};

struct pk_shared_buffer : pk_buffer {
    const void* key;              // of the declaration (PK_SHARED)
    const char* name;
};

struct pk_device;
struct pk_launch;

struct pk_worker {                // one OS thread at a time uses a worker
    pk_block block;               // first member: a fiber's block pointer is also a pointer to its worker
    pk_fiber scheduler;           // the OS thread itself; only its saved registers are used
    pk_fiber* current;
    pk_launch* launch;
    pk_device* device;
    pk_worker* next_free;
    uint8_t* slots;               // a region of THREADS_MAX fiber slots
    uint32_t slots_committed;
    uint32_t thread_count, warp_count;
    bool fibers_fresh;            // thread indices and start frames match block.threads
    int32_t order;
    uint32_t live;                // threads that have not exited
    uint32_t arrived;             // threads at the block barrier
    uint32_t predicate_count, predicate_result;
    const char* barrier_file;
    int barrier_line;
    uint32_t idle_rounds;
    uint64_t idle_since_ns;
    pk_warp* warp_order[WARPS_MAX];
    uint32_t shared_count;
    uint32_t shared_active_count;
    size_t shared_active_bytes;
    uint32_t shared_active[SHARED_ACTIVE_MAX];   // indices into shared_buffers, in order of first use
    const void* shared_active_key[SHARED_ACTIVE_MAX];
    void* shared_active_start[SHARED_ACTIVE_MAX];
    pk_shared_buffer shared_buffers[SHARED_CACHE_MAX];
    pk_fault fault;
    pk_warp warps[WARPS_MAX];
};

struct pk_launch {
    const pk_node* node;
    pk_device* device;
    uint64_t block_count;
    uint64_t next;                // atomic: position of the next block in running order
    int abort;                    // atomic
    uint64_t serial;              // number of the launch, mixed into the seed
    uint64_t multiplier, offset;  // random order: block = (multiplier * position + offset) mod block_count
    pk_fault fault;               // of the lowest block that failed; guarded by the device's mutex
    uint64_t fault_block;
};

struct pk_device {
    pthread_mutex_t mutex;        // guards all below except `order` and `seed`, which the host sets between launches
    pthread_cond_t work, done;
    pk_launch* job;
    uint64_t job_serial;          // helpers that spin read it atomically
    int helpers_active;
    bool stopping;
    int helper_count;
    pk_worker* free_workers;
    int32_t order;
    uint64_t seed;
    uint64_t spin_limit_ns;
    uint64_t launches;
    pthread_mutex_t serial_mutex; // static __shared__ modules run one at a time
    pthread_t helpers[HELPERS_MAX];
};

// ---- small helpers ---------------------------------------------------------------------------------------------

static uint64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

static inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    asm volatile("yield");
#endif
}

static inline uint64_t mix(uint64_t* state) {  // splitmix64 (Steele, Lea and Flood 2014)
    uint64_t z = (*state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static const char* base_name(const char* path) {
    const char* slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static const char* operation_name(uint32_t operation) {
    switch (operation & 0xFFu) {
        case PK_SYNCWARP: return "__syncwarp";
        case PK_SHFL: return "__shfl_sync";
        case PK_SHFL_UP: return "__shfl_up_sync";
        case PK_SHFL_DOWN: return "__shfl_down_sync";
        case PK_SHFL_XOR: return "__shfl_xor_sync";
        case PK_BALLOT: return "__ballot_sync";
        case PK_ANY: return "__any_sync";
        case PK_ALL: return "__all_sync";
        case PK_MATCH_ANY: return "__match_any_sync";
        case PK_WARP_MAX: return "pk_warp_max";
        case PK_WARP_SUM: return "pk_warp_sum";
        case PK_COOPERATE: return "pk_warp_cooperate";
        default: return "collective";
    }
}

static inline uint32_t lowest(uint32_t set) { return static_cast<uint32_t>(__builtin_ctz(set)); }

static inline uint32_t ranks_of(const pk_warp* warp, uint32_t lanes) {
    if (warp->identity || lanes == warp->existing) return lanes;
    uint32_t ranks = 0;
    for (; lanes; lanes &= lanes - 1) ranks |= 1u << warp->rank_of_lane[lowest(lanes)];
    return ranks;
}

static inline uint32_t lanes_of(const pk_warp* warp, uint32_t ranks) {
    uint32_t lanes = 0;
    for (; ranks; ranks &= ranks - 1) lanes |= 1u << warp->lane_of_rank[lowest(ranks)];
    return lanes;
}

static inline pk_fiber* fiber_of_lane(const pk_warp* warp, uint32_t lane) {
    return warp->fiber_of_rank[warp->rank_of_lane[lane]];
}

static inline pk_worker* worker_of(pk_fiber* fiber) { return reinterpret_cast<pk_worker*>(fiber->block); }
