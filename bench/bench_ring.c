/* bench_ring.c - the rings against a mutex and condition variable queue.

       cc -O2 -g bench/bench_ring.c -o build/bench_ring -lpthread
       build/bench_ring [--json] [--quick] [--list] [TEXT]

   spsc_single_N       one producer, one consumer, one item of 8 bytes per call, capacity N; both
                       sides by try calls, pausing and now and then yielding when refused, except
                       that the peer may block where that is faster for it
   spsc_block_vs_try   our blocking calls against our try calls, capacity 1024
   mpmc_block_PpCc_N   blocking calls, P producers and C consumers
   pingpong_*          one item there and back over two rings of 16, blocking calls
   idle_ms_per_s       CPU time of four consumers that wait on an empty ring

   With one producer and one consumer each is tied to a CPU of its own. Left alone, Linux now and
   then keeps both on one CPU for a whole run, and the figure is then one of the scheduler. The
   peer, which sleeps more, may gain from that: it is left alone where it is faster so. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define SPDL_IMPLEMENTATION
#include "../spdl.h"

#include "bench.h"
#include "peer_mutex.h"

#define MAX_THREADS 4 /* on each side */
#define RUN_MS 80.0
#define PRODUCER_SHIFT 48

#define ALWAYS_INLINE static inline __attribute__((always_inline))

typedef enum side { OURS, PEER } side;

/* A case: who pushes and pops, and how. */
typedef struct flow_case {
    side side;
    spdl_ring_mode mode;
    bool blocking;
    bool pinned;
    int producers;
    int consumers;
    uint32_t capacity;
    uint64_t items; /* of one run, calibrated */
} flow_case;

typedef struct flow {
    spdl_ring *ring;
    peer_queue queue;
    uint64_t each; /* items per producer */
    int producers_left;
    bool pinned;
    pthread_barrier_t gate;
} flow;

typedef struct flow_thread {
    pthread_t thread;
    flow *flow;
    int index;
    uint64_t started;
    uint64_t ended;
    uint64_t count;
    uint64_t sum;
    bool in_order;
} flow_thread;

typedef bool (*push_fn)(flow *f, uint64_t item);
typedef bool (*pop_fn)(flow *f, uint64_t *item);

/* ---- one call of each kind; false: closed ---- */

static void refused(unsigned *times) {
    if (++*times % 256 == 0) {
        sched_yield();
    } else {
        bench_pause();
    }
}

ALWAYS_INLINE bool ours_push(flow *f, uint64_t item) {
    return spdl_ring_push(f->ring, &item, SPDL_FOREVER) == SPDL_OK;
}

ALWAYS_INLINE bool ours_pop(flow *f, uint64_t *item) {
    return spdl_ring_pop(f->ring, item, SPDL_FOREVER) == SPDL_OK;
}

ALWAYS_INLINE bool ours_try_push(flow *f, uint64_t item) {
    unsigned times = 0;
    spdl_result result;
    while ((result = spdl_ring_try_push(f->ring, &item)) == SPDL_FULL) refused(&times);
    return result == SPDL_OK;
}

ALWAYS_INLINE bool ours_try_pop(flow *f, uint64_t *item) {
    unsigned times = 0;
    spdl_result result;
    while ((result = spdl_ring_try_pop(f->ring, item)) == SPDL_EMPTY) refused(&times);
    return result == SPDL_OK;
}

ALWAYS_INLINE bool peer_push(flow *f, uint64_t item) {
    return peer_queue_push(&f->queue, (void *)(uintptr_t)item) == PEER_OK;
}

ALWAYS_INLINE bool peer_pop(flow *f, uint64_t *item) {
    void *got = NULL;
    const bool ok = peer_queue_pop(&f->queue, &got) == PEER_OK;
    *item = (uint64_t)(uintptr_t)got;
    return ok;
}

ALWAYS_INLINE bool peer_try_push(flow *f, uint64_t item) {
    unsigned times = 0;
    peer_result result;
    while ((result = peer_queue_try_push(&f->queue, (void *)(uintptr_t)item)) == PEER_WAIT) {
        refused(&times);
    }
    return result == PEER_OK;
}

ALWAYS_INLINE bool peer_try_pop(flow *f, uint64_t *item) {
    unsigned times = 0;
    void *got = NULL;
    peer_result result;
    while ((result = peer_queue_try_pop(&f->queue, &got)) == PEER_WAIT) refused(&times);
    *item = (uint64_t)(uintptr_t)got;
    return result == PEER_OK;
}

/* ---- threads ---- */

static void close_both(flow *f) {
    if (f->ring != NULL) {
        spdl_ring_close(f->ring);
    } else {
        peer_queue_close(&f->queue, false);
    }
}

static void thread_ready(flow_thread *t) {
    if (t->flow->pinned) bench_pin(t->index);
    pthread_barrier_wait(&t->flow->gate);
}

/* The producer that ends last closes, so the end is part of the run. */
ALWAYS_INLINE void produce(flow_thread *t, push_fn push) {
    flow *f = t->flow;
    const uint64_t base = (uint64_t)t->index << PRODUCER_SHIFT;
    uint64_t i;
    thread_ready(t);
    t->started = bench_ns();
    for (i = 0; i < f->each; ++i) {
        if (!push(f, base + i)) break;
    }
    t->count = i;
    if (__atomic_sub_fetch(&f->producers_left, 1, __ATOMIC_ACQ_REL) == 0) close_both(f);
    t->ended = bench_ns();
}

/* Items of one producer must come in order; the sums tell that each came once. */
ALWAYS_INLINE void consume(flow_thread *t, pop_fn pop) {
    flow *f = t->flow;
    uint64_t next[MAX_THREADS] = { 0 };
    uint64_t count = 0;
    uint64_t sum = 0;
    uint64_t item;
    bool in_order = true;
    thread_ready(t);
    t->started = bench_ns();
    while (pop(f, &item)) {
        const uint64_t number = item & (((uint64_t)1 << PRODUCER_SHIFT) - 1);
        uint64_t *expected = &next[(item >> PRODUCER_SHIFT) % MAX_THREADS];
        in_order = in_order && number >= *expected;
        *expected = number + 1;
        sum += number;
        ++count;
    }
    t->ended = bench_ns();
    t->count = count;
    t->sum = sum;
    t->in_order = in_order;
}

#define ROLES(kind)                                                                                \
    static void *kind##_producer(void *arg) {                                                      \
        produce((flow_thread *)arg, kind##_push);                                                  \
        return NULL;                                                                               \
    }                                                                                              \
    static void *kind##_consumer(void *arg) {                                                      \
        consume((flow_thread *)arg, kind##_pop);                                                   \
        return NULL;                                                                               \
    }
ROLES(ours)
ROLES(ours_try)
ROLES(peer)
ROLES(peer_try)

typedef void *(*thread_fn)(void *);

static thread_fn producer_of(const flow_case *c) {
    if (c->side == OURS) return c->blocking ? ours_producer : ours_try_producer;
    return c->blocking ? peer_producer : peer_try_producer;
}

static thread_fn consumer_of(const flow_case *c) {
    if (c->side == OURS) return c->blocking ? ours_consumer : ours_try_consumer;
    return c->blocking ? peer_consumer : peer_try_consumer;
}

/* ---- one run ---- */

static spdl_ring *ring_make(uint64_t capacity, spdl_ring_mode mode) {
    spdl_ring *ring;
    spdl_ring_desc desc = { 0 };
    desc.capacity = capacity;
    desc.mode = mode;
    BENCH_CHECK(spdl_ring_create(&ring, &desc) == SPDL_OK);
    return ring;
}

static void flow_open(flow *f, const flow_case *c, uint64_t items) {
    memset(f, 0, sizeof *f);
    f->each = items / (uint64_t)c->producers;
    f->producers_left = c->producers;
    f->pinned = c->pinned;
    pthread_barrier_init(&f->gate, NULL, (unsigned)(c->producers + c->consumers));
    if (c->side == OURS) {
        f->ring = ring_make(c->capacity, c->mode);
    } else {
        peer_queue_init(&f->queue, c->capacity);
    }
}

static void flow_close(flow *f) {
    if (f->ring != NULL) {
        spdl_ring_destroy(f->ring, NULL, NULL);
    } else {
        peer_queue_destroy(&f->queue);
    }
    pthread_barrier_destroy(&f->gate);
}

static void flow_start(flow *f, flow_thread *t, int index, thread_fn main) {
    memset(t, 0, sizeof *t);
    t->flow = f;
    t->index = index;
    t->in_order = true;
    BENCH_CHECK(pthread_create(&t->thread, NULL, main, t) == 0);
}

/* From the first thread through the gate to the last one done. */
static double flow_elapsed(const flow_thread *threads, int count) {
    uint64_t first = threads[0].started;
    uint64_t last = threads[0].ended;
    int i;
    for (i = 1; i < count; ++i) {
        if (threads[i].started < first) first = threads[i].started;
        if (threads[i].ended > last) last = threads[i].ended;
    }
    return (double)(last - first);
}

static void flow_check(const flow *f, const flow_case *c, const flow_thread *threads) {
    const uint64_t producers = (uint64_t)c->producers;
    uint64_t count = 0;
    uint64_t sum = 0;
    int i;
    for (i = 0; i < c->consumers; ++i) {
        BENCH_CHECK(threads[c->producers + i].in_order);
        count += threads[c->producers + i].count;
        sum += threads[c->producers + i].sum;
    }
    BENCH_CHECK(count == f->each * producers);
    BENCH_CHECK(sum == f->each * (f->each - 1) / 2 * producers);
}

static double flow_run(const void *arg, uint64_t items) {
    const flow_case *c = (const flow_case *)arg;
    flow_thread threads[2 * MAX_THREADS];
    const int count = c->producers + c->consumers;
    double elapsed;
    flow f;
    int i;
    flow_open(&f, c, items);
    for (i = 0; i < count; ++i) {
        const bool producer = i < c->producers;
        flow_start(&f, &threads[i], i, producer ? producer_of(c) : consumer_of(c));
    }
    for (i = 0; i < count; ++i) pthread_join(threads[i].thread, NULL);
    elapsed = flow_elapsed(threads, count);
    flow_check(&f, c, threads);
    flow_close(&f);
    return elapsed;
}

static double flow_rate(const void *arg) {
    const flow_case *c = (const flow_case *)arg;
    const uint64_t producers = (uint64_t)c->producers;
    const uint64_t items = c->items / producers * producers;
    return (double)items * 1e3 / flow_run(c, items); /* millions per second */
}

/* ---- rows ---- */

static void calibrate(flow_case *c) { c->items = bench_calibrate(flow_run, c, 2000, RUN_MS); }

static void try_out(flow_case *best, flow_case candidate) {
    calibrate(&candidate);
    if (candidate.items > best->items) *best = candidate; /* more in the same time */
}

/* Whether the peer is faster when it blocks, and when it is not tied to CPUs, is tried out, twice
   because the second depends on where the scheduler puts it. */
static void choose_peer(flow_case *c) {
    const bool may_pin = c->pinned;
    const bool may_try = !c->blocking;
    int i;
    for (i = 0; i < 8; ++i) {
        flow_case other = *c;
        other.pinned = i % 2 == 0;
        other.blocking = i / 2 % 2 == 0;
        if (other.pinned && !may_pin) continue;
        if (!other.blocking && !may_try) continue;
        try_out(c, other);
    }
}

static void row_spsc_single(uint32_t capacity) {
    char name[32];
    bench_row row = { name, "M/s", NULL, true, 0, false, 0 };
    flow_case ours = { OURS, SPDL_RING_SPSC, false, true, 1, 1, capacity, 0 };
    flow_case peer = { PEER, SPDL_RING_SPSC, false, true, 1, 1, capacity, 0 };
    snprintf(name, sizeof name, "spsc_single_%u", (unsigned)capacity);
    if (!bench_wanted(name)) return;
    calibrate(&ours);
    choose_peer(&peer);
    row.peer_name = peer.blocking ? "mutex+condvar queue" : "mutex queue, try calls";
    bench_compare_sides(&row, 9, flow_rate, &ours, flow_rate, &peer);
}

static void row_spsc_block_vs_try(void) {
    const bench_row row = { "spsc_block_vs_try", "M/s", "own try calls", true, 0, false, 0 };
    flow_case ours = { OURS, SPDL_RING_SPSC, true, true, 1, 1, 1024, 0 };
    flow_case peer = { OURS, SPDL_RING_SPSC, false, true, 1, 1, 1024, 0 };
    if (!bench_wanted(row.name)) return;
    calibrate(&ours);
    calibrate(&peer);
    bench_compare_sides(&row, 9, flow_rate, &ours, flow_rate, &peer);
}

static void row_mpmc_block(int producers, int consumers, uint32_t capacity) {
    char name[32];
    const bench_row row = { name, "M/s", "mutex+condvar queue", true, 0, false, 0 };
    const bool two = producers == 1 && consumers == 1;
    flow_case ours = { OURS, SPDL_RING_MPMC, true, two, producers, consumers, capacity, 0 };
    flow_case peer = { PEER, SPDL_RING_MPMC, true, two, producers, consumers, capacity, 0 };
    snprintf(name, sizeof name, "mpmc_block_%dp%dc_%u", producers, consumers, (unsigned)capacity);
    if (!bench_wanted(name)) return;
    calibrate(&ours);
    choose_peer(&peer);
    bench_compare_sides(&row, 9, flow_rate, &ours, flow_rate, &peer);
}

/* ---- ping-pong ---- */

typedef struct pingpong {
    flow there;
    flow back;
    uint64_t items;
    double elapsed;
} pingpong;

ALWAYS_INLINE void pong(pingpong *p, push_fn push, pop_fn pop) {
    uint64_t item;
    while (pop(&p->there, &item)) push(&p->back, item);
}

static void *ours_pong(void *arg) {
    if (((pingpong *)arg)->there.pinned) bench_pin(1);
    pong((pingpong *)arg, ours_push, ours_pop);
    return NULL;
}

static void *peer_pong(void *arg) {
    if (((pingpong *)arg)->there.pinned) bench_pin(1);
    pong((pingpong *)arg, peer_push, peer_pop);
    return NULL;
}

ALWAYS_INLINE void ping(pingpong *p, push_fn push, pop_fn pop) {
    const uint64_t start = bench_ns();
    uint64_t i;
    for (i = 0; i < p->items; ++i) {
        uint64_t item = i + 1;
        BENCH_CHECK(push(&p->there, i));
        BENCH_CHECK(pop(&p->back, &item) && item == i);
    }
    p->elapsed = (double)(bench_ns() - start);
}

static void *ours_ping(void *arg) {
    if (((pingpong *)arg)->there.pinned) bench_pin(0);
    ping((pingpong *)arg, ours_push, ours_pop);
    return NULL;
}

static void *peer_ping(void *arg) {
    if (((pingpong *)arg)->there.pinned) bench_pin(0);
    ping((pingpong *)arg, peer_push, peer_pop);
    return NULL;
}

static double pingpong_run(const void *arg, uint64_t items) {
    const flow_case *c = (const flow_case *)arg;
    pthread_t one;
    pthread_t other;
    pingpong p;
    flow_open(&p.there, c, 0);
    flow_open(&p.back, c, 0);
    p.items = items;
    BENCH_CHECK(pthread_create(&other, NULL, c->side == OURS ? ours_pong : peer_pong, &p) == 0);
    BENCH_CHECK(pthread_create(&one, NULL, c->side == OURS ? ours_ping : peer_ping, &p) == 0);
    pthread_join(one, NULL);
    close_both(&p.there);
    pthread_join(other, NULL);
    flow_close(&p.there);
    flow_close(&p.back);
    return p.elapsed;
}

static double pingpong_ns(const void *arg) {
    const flow_case *c = (const flow_case *)arg;
    return pingpong_run(c, c->items) / (double)c->items;
}

static void row_pingpong(const char *name, spdl_ring_mode mode) {
    const bench_row row = { name, "ns", "mutex+condvar queue", false, 0, false, 0 };
    flow_case ours = { OURS, mode, true, true, 1, 1, 16, 0 };
    flow_case peer = { PEER, mode, true, false, 1, 1, 16, 0 }; /* far better on one CPU */
    if (!bench_wanted(name)) return;
    ours.items = bench_calibrate(pingpong_run, &ours, 500, RUN_MS);
    peer.items = bench_calibrate(pingpong_run, &peer, 500, RUN_MS);
    bench_compare_sides(&row, 9, pingpong_ns, &ours, pingpong_ns, &peer);
}

/* ---- idle ---- */

static double idle_ms_per_s(const void *arg) {
    const flow_case *c = (const flow_case *)arg;
    flow_thread threads[MAX_THREADS];
    double cores;
    flow f;
    int i;
    flow_open(&f, c, 0);
    pthread_barrier_destroy(&f.gate);
    pthread_barrier_init(&f.gate, NULL, (unsigned)c->consumers);
    for (i = 0; i < c->consumers; ++i) flow_start(&f, &threads[i], i, consumer_of(c));
    bench_sleep_ms(50);
    cores = bench_idle_cores();
    close_both(&f);
    for (i = 0; i < c->consumers; ++i) {
        pthread_join(threads[i].thread, NULL);
        BENCH_CHECK(threads[i].count == 0);
    }
    flow_close(&f);
    return cores * 1e3;
}

static void row_idle(void) {
    const bench_row row = { "idle_ms_per_s", "ms/s", "mutex+condvar queue", false, 0, false, 0 };
    const flow_case ours = { OURS, SPDL_RING_MPMC, true, false, 1, 4, 16, 0 };
    const flow_case peer = { PEER, SPDL_RING_MPMC, true, false, 1, 4, 16, 0 };
    if (!bench_wanted(row.name)) return;
    bench_compare_sides(&row, 5, idle_ms_per_s, &ours, idle_ms_per_s, &peer);
}

int main(int argc, char **argv) {
    static const uint32_t single[] = { 16, 64, 256, 1024, 8192 };
    static const uint32_t depth[] = { 2, 16, 1024 };
    static const int shape[][2] = { { 1, 1 }, { 4, 1 }, { 1, 4 }, { 4, 4 } };
    size_t i;
    size_t k;
    bench_start("ring", argc, argv);
    for (i = 0; i < sizeof single / sizeof single[0]; ++i) row_spsc_single(single[i]);
    row_spsc_block_vs_try();
    for (i = 0; i < sizeof shape / sizeof shape[0]; ++i) {
        for (k = 0; k < sizeof depth / sizeof depth[0]; ++k) {
            row_mpmc_block(shape[i][0], shape[i][1], depth[k]);
        }
    }
    row_pingpong("pingpong_spsc", SPDL_RING_SPSC);
    row_pingpong("pingpong_mpmc", SPDL_RING_MPMC);
    row_idle();
    return 0;
}
