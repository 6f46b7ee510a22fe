/* Calls rings a given number of times on one thread, for tools that count instructions:
   tests/check_budget.sh and tests/check_cross.sh.

       budget_ring CASE COUNT

   CASE is a mode and what is done, COUNT items in all:
       spsc_single, mpmc_single   a push and a pop in turns, so that the ring runs empty each time
       spsc_burst, mpmc_burst     64 pushes and 64 pops in turns, as when both sides keep busy
       spsc_block, mpmc_block     as burst, by the calls that may wait
       spsc_push, mpmc_push       pushes only
       spsc_pop, mpmc_pop         all pushes, then all pops
       asymmetric                 nothing; fails where light barriers are not free
   The difference of two runs with different counts has nothing of start and end in it. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BURST = 64 };

static spdl_ring *ring_of(spdl_ring_mode mode, uint64_t capacity) {
    spdl_ring_desc desc = { 0 };
    spdl_ring *ring;
    desc.capacity = capacity;
    desc.mode = mode;
    desc.item_bytes = sizeof(uint64_t);
    if (spdl_ring_create(&ring, &desc) != SPDL_OK) exit(2);
    return ring;
}

/* Each returns whether all items came, by their sum. The ring holds `burst` of them. */

static bool try_bursts(spdl_ring *ring, uint64_t count, uint64_t burst) {
    uint64_t in = 0, out = 0, item, sum = 0;
    while (out < count) {
        for (; in < out + burst; ++in) {
            item = in;
            if (spdl_ring_try_push(ring, &item) != SPDL_OK) return false;
        }
        for (; out < in; ++out) {
            if (spdl_ring_try_pop(ring, &item) != SPDL_OK) return false;
            sum += item;
        }
    }
    return sum == count * (count - 1) / 2;
}

static bool block_bursts(spdl_ring *ring, uint64_t count, uint64_t burst) {
    uint64_t in = 0, out = 0, item, sum = 0;
    while (out < count) {
        for (; in < out + burst; ++in) {
            item = in;
            if (spdl_ring_push(ring, &item, SPDL_FOREVER) != SPDL_OK) return false;
        }
        for (; out < in; ++out) {
            if (spdl_ring_pop(ring, &item, SPDL_FOREVER) != SPDL_OK) return false;
            sum += item;
        }
    }
    return sum == count * (count - 1) / 2;
}

static bool pairs(spdl_ring *ring, uint64_t count) {
    uint64_t i, item, sum = 0;
    for (i = 0; i < count; ++i) {
        item = i;
        if (spdl_ring_try_push(ring, &item) != SPDL_OK) return false;
        if (spdl_ring_try_pop(ring, &item) != SPDL_OK) return false;
        sum += item;
    }
    return sum == count * (count - 1) / 2;
}

static bool pushes(spdl_ring *ring, uint64_t count) {
    uint64_t i;
    for (i = 0; i < count; ++i)
        if (spdl_ring_try_push(ring, &i) != SPDL_OK) return false;
    return true;
}

static bool run(const char *what, spdl_ring *ring, uint64_t count) {
    if (strcmp(what, "single") == 0) return pairs(ring, count);
    if (strcmp(what, "burst") == 0) return try_bursts(ring, count, BURST);
    if (strcmp(what, "block") == 0) return block_bursts(ring, count, BURST);
    if (strcmp(what, "push") == 0) return pushes(ring, count);
    if (strcmp(what, "pop") == 0) return try_bursts(ring, count, count);
    return false;
}

int main(int argc, char **argv) {
    const uint64_t count = argc == 3 ? strtoull(argv[2], NULL, 10) : 0;
    const bool spsc = argc == 3 && strncmp(argv[1], "spsc_", 5) == 0;
    const bool mpmc = argc == 3 && strncmp(argv[1], "mpmc_", 5) == 0;
    spdl_ring *ring;
    bool held;
    if (argc == 3 && strcmp(argv[1], "asymmetric") == 0) return !spdl__os_barrier();
    if (count == 0 || (!spsc && !mpmc)) return 2;
    ring = ring_of(spsc ? SPDL_RING_SPSC : SPDL_RING_MPMC, argv[1][5] == 'p' ? count : 1024);
    held = run(argv[1] + 5, ring, count);
    spdl_ring_destroy(ring, NULL, NULL);
    return !held;
}
