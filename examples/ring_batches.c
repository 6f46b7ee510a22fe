/* ring_batches.c - a sensor thread writes samples in place into a ring, two at a time or more, and
   the main thread takes whatever is there, in batches. Prints what the ring saw.

   Build:  cc -O2 -I. examples/ring_batches.c -o ring_batches -lpthread
   Run:    ./ring_batches */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>

enum { SAMPLES = 300000, BATCH = 32 };

typedef struct sample {
    uint64_t number;
    float xyz[4];
} sample;

/* No copy: the samples are made where the ring keeps them. */
static void *sense(void *arg) {
    spdl_ring *ring = (spdl_ring *)arg;
    uint64_t number = 0, have;
    void *slots;
    while (number < SAMPLES &&
           spdl_ring_reserve(ring, BATCH, &slots, &have, SPDL_FOREVER) == SPDL_OK) {
        sample *s = (sample *)slots;
        uint64_t n = 0;
        for (; n < have && number < SAMPLES; n++, number++) {
            s[n].number = number;
            s[n].xyz[0] = s[n].xyz[1] = s[n].xyz[2] = s[n].xyz[3] = (float)(number % 100);
        }
        if (spdl_ring_commit(ring, n) != SPDL_OK) break;
    }
    spdl_ring_close(ring);
    return NULL;
}

int main(void) {
    const spdl_ring_desc desc = { .capacity = 500, .item_bytes = sizeof(sample),
                                  .mode = SPDL_RING_SPSC };
    sample batch[BATCH];
    spdl_ring_counters counters;
    spdl_ring *ring;
    pthread_t sensor;
    uint64_t moved, next = 0, batches = 0;
    bool in_order = true;
    if (spdl_ring_create(&ring, &desc) != SPDL_OK) return 1;
    if (pthread_create(&sensor, NULL, sense, ring) != 0) {
        spdl_ring_destroy(ring, NULL, NULL);
        return 1;
    }
    while (spdl_ring_pop_n(ring, batch, BATCH, &moved, SPDL_FOREVER) == SPDL_OK) {
        for (uint64_t i = 0; i < moved; i++) in_order = in_order && batch[i].number == next++;
        batches++;
    }
    pthread_join(sensor, NULL);
    spdl_ring_stats(ring, &counters);
    spdl_ring_destroy(ring, NULL, NULL);
    printf("%" PRIu64 " samples in %" PRIu64 " batches, %s; the sensor waited %.2f ms for room, "
           "this thread %.2f ms for samples\n",
           counters.popped, batches, in_order ? "in order" : "OUT OF ORDER",
           (double)counters.push_wait_ns * 1e-6, (double)counters.pop_wait_ns * 1e-6);
    return in_order && counters.popped == SAMPLES ? 0 : 1;
}
