// Warp collectives: a rendezvous of the lanes that the mask names, then results for all of them.
#pragma once

#include "cpu_device/fibers.h"

#define PK_REFUSES static __attribute__((noreturn)) PK_NOINLINE

PK_REFUSES void refuse_lane(pk_fiber* self, uint32_t operation, uint32_t mask, const char* file, int line) {
    pk_worker* worker = worker_of(self);
    record_fault(worker, self, PK_FAULT_COLLECTIVE,
                 "wrong mask: lane %u calls %s with mask 0x%08x, which does not name it, at %s:%d", self->lane,
                 operation_name(operation), mask, base_name(file), line);
    abandon(worker);
}

PK_REFUSES void refuse_source(pk_fiber* self, uint32_t lane, uint32_t source, const pk_group* group) {
    pk_worker* worker = worker_of(self);
    record_fault(worker, fiber_of_lane(self->warp, lane), PK_FAULT_COLLECTIVE,
                 "wrong source: lane %u reads lane %u in %s with mask 0x%08x at %s:%d, and that lane takes no part",
                 lane, source, operation_name(group->operation), group->mask, base_name(group->file), group->line);
    abandon(worker);
}

PK_REFUSES void refuse_partial_warp(pk_fiber* self, uint32_t operation, const char* file, int line) {
    pk_worker* worker = worker_of(self);
    record_fault(worker, self, PK_FAULT_COLLECTIVE, "%s needs 32 lanes at %s:%d, and this warp has %u",
                 operation_name(operation), base_name(file), line,
                 static_cast<unsigned>(__builtin_popcount(self->warp->existing)));
    abandon(worker);
}

// The xor tree: at each stride row l becomes op(row l, row l + stride).  Both rows of a pair would get the same bits,
// so only the lower one is computed.
static void reduce_rows(pk_warp* warp, bool is_max, uint32_t count) {
    for (uint32_t stride = 16; stride > 0; stride >>= 1) {
        for (uint32_t lane = 0; lane < stride; ++lane) {
            float* __restrict__ a = warp->rows[lane];
            const float* __restrict__ b = warp->rows[lane + stride];
            if (is_max) {
                for (uint32_t i = 0; i < count; ++i) a[i] = fmaxf(a[i], b[i]);
            } else {
                for (uint32_t i = 0; i < count; ++i) a[i] = a[i] + b[i];
            }
        }
    }
    memcpy(warp->totals, warp->rows[0], count * sizeof(float));
}

// Computes the results of a collective whose lanes have all arrived.
static void complete(pk_fiber* self, pk_warp* warp, const pk_group* group) {
    uint32_t lanes = group->required;
    switch (group->operation & 0xFFu) {
        case PK_SHFL:
        case PK_SHFL_UP:
        case PK_SHFL_DOWN:
        case PK_SHFL_XOR:
            for (uint32_t rest = lanes; rest; rest &= rest - 1) {
                uint32_t lane = lowest(rest), source = warp->sources[lane];
                if (source > 31 || !(lanes >> source & 1u)) refuse_source(self, lane, source, group);
                warp->results[lane] = warp->values[source];
            }
            break;
        case PK_BALLOT:
        case PK_ANY:
        case PK_ALL: {
            uint32_t set = 0;
            for (uint32_t rest = lanes; rest; rest &= rest - 1) {
                set |= static_cast<uint32_t>(warp->values[lowest(rest)]) << lowest(rest);
            }
            uint64_t result = set;
            if (group->operation == PK_ANY) result = set != 0;
            if (group->operation == PK_ALL) result = set == lanes;
            for (uint32_t rest = lanes; rest; rest &= rest - 1) warp->results[lowest(rest)] = result;
            break;
        }
        case PK_MATCH_ANY:
            for (uint32_t rest = lanes; rest; rest &= rest - 1) {
                uint32_t lane = lowest(rest), equal = 0;
                for (uint32_t other = lanes; other; other &= other - 1) {
                    if (warp->values[lowest(other)] == warp->values[lane]) equal |= 1u << lowest(other);
                }
                warp->results[lane] = equal;
            }
            break;
        case PK_WARP_MAX:
        case PK_WARP_SUM:
            reduce_rows(warp, (group->operation & 0xFFu) == PK_WARP_MAX, group->operation >> 8);
            break;
        case PK_COOPERATE:
            warp->cooperation(warp->inputs, warp->outputs);
            break;
    }
}

// Arrives, waits for the other lanes of the mask, and returns when the results are there.
static inline __attribute__((always_inline)) void rendezvous(pk_fiber* self, uint32_t operation, uint32_t mask,
                                                             const char* file, int line) {
    pk_warp* warp = self->warp;
    pk_group* group = nullptr;
    for (uint32_t i = 0; i < warp->group_count; ++i) {
        if (warp->groups[i].mask == mask && warp->groups[i].operation == operation) {
            group = &warp->groups[i];
            break;
        }
    }
    if (!group) {
        group = &warp->groups[warp->group_count++];
        *group = pk_group{operation, mask, mask & warp->existing, 0, file, line};
    }
    group->arrived |= 1u << self->lane;
    warp->ready &= ~(1u << self->rank);
    if (group->arrived == group->required) {
        complete(self, warp, group);
        warp->ready |= ranks_of(warp, group->required);
        *group = warp->groups[--warp->group_count];
        worker_of(self)->idle_since_ns = 0;
    }
    leave(worker_of(self), warp, self);
}

PK_PUBLIC uint64_t pk_warp_collective(uint32_t operation, uint32_t mask, uint64_t value, uint32_t source,
                                      const char* file, int line) {
    pk_fiber* self = pk_self();
    if (!(mask >> self->lane & 1u)) refuse_lane(self, operation, mask, file, line);
    self->warp->values[self->lane] = value;
    self->warp->sources[self->lane] = source;
    rendezvous(self, operation, mask, file, line);
    return self->warp->results[self->lane];
}

PK_PUBLIC void pk_warp_reduce(uint32_t operation, float* values, uint32_t count, const char* file, int line) {
    pk_fiber* self = pk_self();
    pk_warp* warp = self->warp;
    if (warp->existing != 0xFFFFFFFFu) refuse_partial_warp(self, operation, file, line);
    float* row = warp->rows[self->lane];
    for (uint32_t i = 0; i < count; ++i) row[i] = values[i];
    rendezvous(self, operation | count << 8, 0xFFFFFFFFu, file, line);  // another count is another operation
    for (uint32_t i = 0; i < count; ++i) values[i] = warp->totals[i];
}

PK_PUBLIC void pk_warp_cooperate(pk_cooperation run, const void* input, void* output, const char* file, int line) {
    pk_fiber* self = pk_self();
    pk_warp* warp = self->warp;
    if (warp->existing != 0xFFFFFFFFu) refuse_partial_warp(self, PK_COOPERATE, file, line);
    warp->inputs[self->lane] = input;
    warp->outputs[self->lane] = output;
    warp->cooperation = run;
    rendezvous(self, PK_COOPERATE, 0xFFFFFFFFu, file, line);
}
