/* ring_batches.c - a sensor thread pushes its samples by 16, and the main thread takes whatever is
   there, up to 32 at a time. One call moves many items, so that the two threads seldom meet.

   Build:  cc -O2 -I. examples/ring_batches.c -o ring_batches -lpthread
   Windows: gcc -O2 -I. examples/ring_batches.c -o ring_batches.exe
        or: cl /O2 /std:c11 /I. examples\ring_batches.c
   Run:    ./ring_batches */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#include "thread.h"

#include <inttypes.h>
#include <stdio.h>

enum { SAMPLES = 300000, MADE = 16, TAKEN = 32 };

typedef struct sample {
    uint64_t number;
    float xyz[4];
} sample;

static void *sense(void *arg) {
    spdl_ring *ring = (spdl_ring *)arg;
    sample made[MADE];
    uint64_t number = 0, moved;
    while (number < SAMPLES) {
        for (int i = 0; i < MADE; i++, number++) {
            made[i].number = number;
            for (int k = 0; k < 4; k++) made[i].xyz[k] = (float)(number % 100);
        }
        if (spdl_ring_push_n(ring, made, MADE, &moved, SPDL_FOREVER) != SPDL_OK) break;
    }
    spdl_ring_close(ring); /* the producer's call in SPSC; what is inside can still be popped */
    return NULL;
}

int main(void) {
    const spdl_ring_desc desc = { .capacity = 500, .item_bytes = sizeof(sample),
                                  .mode = SPDL_RING_SPSC };
    sample taken[TAKEN];
    spdl_ring *ring;
    thread sensor;
    uint64_t moved, next = 0, batches = 0;
    bool in_order = true;
    if (spdl_ring_create(&ring, &desc) != SPDL_OK || !thread_start(&sensor, sense, ring))
        return fprintf(stderr, "ring_batches: no memory or no thread\n"), 1;
    while (spdl_ring_pop_n(ring, taken, TAKEN, &moved, SPDL_FOREVER) == SPDL_OK) {
        for (uint64_t i = 0; i < moved; i++) in_order = in_order && taken[i].number == next++;
        batches++;
    }
    thread_join(&sensor);
    spdl_ring_destroy(ring, NULL, NULL);
    printf("%" PRIu64 " samples in %" PRIu64 " batches, %s\n", next, batches,
           in_order ? "in order" : "OUT OF ORDER");
    return in_order && next == SAMPLES ? 0 : 1;
}
