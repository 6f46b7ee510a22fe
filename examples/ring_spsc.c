/* ring_spsc.c - two threads over one ring: the producer pushes numbers and closes, the
   consumer adds up what it gets until the ring is closed and drained.

   Build:  cc -O2 -I. examples/ring_spsc.c -o ring_spsc -lpthread
   Windows: gcc -O2 -I. examples/ring_spsc.c -o ring_spsc.exe
        or: cl /O2 /std:c11 /I. examples\ring_spsc.c
   Run:    ./ring_spsc */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#include "thread.h"

#include <inttypes.h>
#include <stdio.h>

enum { COUNT = 1000000 };

static void *produce(void *arg) {
    spdl_ring *ring = (spdl_ring *)arg;
    for (uint64_t number = 1; number <= COUNT; number++)
        if (spdl_ring_push(ring, &number, SPDL_FOREVER) != SPDL_OK) break;
    spdl_ring_close(ring);
    return NULL;
}

int main(void) {
    const spdl_ring_desc desc = { .capacity = 64, .item_bytes = sizeof(uint64_t),
                                  .mode = SPDL_RING_SPSC };
    const uint64_t expected = (uint64_t)COUNT * (COUNT + 1) / 2;
    uint64_t number, sum = 0, items = 0;
    spdl_ring *ring;
    thread producer;
    spdl_result result = spdl_ring_create(&ring, &desc);
    if (result != SPDL_OK) {
        fprintf(stderr, "ring_spsc: %s\n", spdl_result_text(result));
        return 1;
    }
    if (!thread_start(&producer, produce, ring)) {
        fprintf(stderr, "ring_spsc: no thread\n");
        spdl_ring_destroy(ring, NULL, NULL);
        return 1;
    }
    const uint64_t start = spdl_time_ns();
    while ((result = spdl_ring_pop(ring, &number, SPDL_FOREVER)) == SPDL_OK) {
        sum += number;
        items++;
    }
    const double seconds = (double)(spdl_time_ns() - start) * 1e-9;
    thread_join(&producer);
    spdl_ring_destroy(ring, NULL, NULL);
    printf("%" PRIu64 " items, sum %" PRIu64 " (%s), %.1f million items/s, then: %s\n", items, sum,
           sum == expected ? "right" : "wrong", (double)items * 1e-6 / seconds,
           spdl_result_text(result));
    return sum == expected && result == SPDL_CLOSED ? 0 : 1;
}
