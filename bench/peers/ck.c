// needs: libck-dev
// flags:
//
// In C, since ck_ring.h is none of C++. A ring holds one less than its size.
#define _GNU_SOURCE
#include <ck_ring.h>

#include "../flow.h"

typedef struct ck_queue {
    ck_ring_t ring;
    ck_ring_buffer_t slots[];
} ck_queue;

static void *queue_open(const flow_spec *spec) {
    size_t size = 4;
    ck_queue *queue;
    while (size < spec->capacity) size *= 2;
    queue = aligned_alloc(CK_MD_CACHELINE, (sizeof *queue + size * sizeof queue->slots[0] +
                                            CK_MD_CACHELINE - 1) / CK_MD_CACHELINE *
                                               CK_MD_CACHELINE);
    if (queue == NULL) bench_fail("out of memory");
    memset(queue->slots, 0, size * sizeof queue->slots[0]);
    ck_ring_init(&queue->ring, (unsigned)size);
    return queue;
}

FLOW_INLINE bool spsc_push(void *queue, void *local, uint64_t item) {
    ck_queue *q = queue;
    (void)local;
    return ck_ring_enqueue_spsc(&q->ring, q->slots, (void *)item);
}

FLOW_INLINE bool spsc_pop(void *queue, void *local, uint64_t *item) {
    ck_queue *q = queue;
    (void)local;
    return ck_ring_dequeue_spsc(&q->ring, q->slots, item);
}

FLOW_INLINE bool mpmc_push(void *queue, void *local, uint64_t item) {
    ck_queue *q = queue;
    (void)local;
    return ck_ring_enqueue_mpmc(&q->ring, q->slots, (void *)item);
}

FLOW_INLINE bool mpmc_pop(void *queue, void *local, uint64_t *item) {
    ck_queue *q = queue;
    (void)local;
    return ck_ring_dequeue_mpmc(&q->ring, q->slots, item);
}

FLOW_CALLS(spsc_try, spsc_push, spsc_pop)
FLOW_CALLS(mpmc_try, mpmc_push, mpmc_pop)

static const flow_peer table[] = {
    { "ck_ring spsc", FLOW_SPINS, FLOW_SPSC, queue_open, free, NULL, NULL,
      { &spsc_try, NULL, NULL } },
    { "ck_ring mpmc", FLOW_SPINS, FLOW_MPMC, queue_open, free, NULL, NULL,
      { &mpmc_try, NULL, NULL } },
};

int FLOW_PLUGIN(const flow_peer **peers);

int FLOW_PLUGIN(const flow_peer **peers) {
    *peers = table;
    return (int)(sizeof table / sizeof table[0]);
}
