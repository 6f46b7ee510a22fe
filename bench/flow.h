/* flow.h - what a queue of bench_ring is made to do, the same for ours and for every peer.

   The loops are here, as inline functions that take the calls of a queue. The file of the queue, C
   or C++, makes its thread mains of them with FLOW_CALLS, so that the calls are inlined as they
   would be in a program that uses that queue alone. Threads, clocks and checks are bench_ring.c's.

   A try call that is refused comes again after a pause or a yield, as flow_spec.wait says. Items
   are numbers from 1; the top bits say which producer they come from. The producer that ends last
   pushes one FLOW_END for each consumer. */
#ifndef FLOW_H_INCLUDED
#define FLOW_H_INCLUDED

#include "bench.h"

#define FLOW_MAX_SIDE 8 /* producers, and consumers */
#define FLOW_MAX_BATCH 128
#define FLOW_SHIFT 48
#define FLOW_END UINT64_MAX
#define FLOW_INLINE static inline __attribute__((always_inline, unused))

typedef enum flow_kind {
    FLOW_STREAM,
    FLOW_PINGPONG,
    FLOW_WORK, /* producers and consumers do some work for each item */
    FLOW_WAKE, /* an item every now and then; items are the time they were pushed */
    FLOW_IDLE  /* consumers wait, nothing comes */
} flow_kind;

typedef enum flow_call { FLOW_TRY, FLOW_BLOCK, FLOW_BATCH, FLOW_CALL_COUNT } flow_call;

/* What a refused try call does. */
typedef enum flow_wait { FLOW_HOT, FLOW_PAUSE, FLOW_PAUSE_YIELD, FLOW_YIELD } flow_wait;

typedef struct flow_spec {
    flow_kind kind;
    flow_call call;
    flow_wait wait;
    bool spsc; /* the form for one producer and one consumer, where the queue has one */
    bool pinned;
    int producers;
    int consumers;
    uint32_t capacity;
    uint32_t batch;
    uint32_t produce_work; /* turns of flow_work */
    uint32_t consume_work;
} flow_spec;

/* How a queue stands to the others of a row. */
typedef enum flow_class {
    FLOW_SLEEPS,    /* C or C++, bounded, has calls that sleep in the kernel */
    FLOW_SPINS,     /* C or C++, bounded, try calls only: who waits burns its CPU */
    FLOW_UNBOUNDED, /* C or C++, a push is never held up */
    FLOW_CHANNEL    /* the channel of another language, in a process of its own */
} flow_class;

enum { FLOW_SPSC = 1, FLOW_MPMC = 2, FLOW_UNORDERED = 4 };

typedef struct flow {
    const flow_spec *spec;
    void *queue;
    void *back; /* of FLOW_PINGPONG */
    uint64_t items;
    uint64_t each;     /* items per producer */
    uint64_t deadline; /* after that no more is pushed, but by a pair: some queues all but stop */
    uint64_t pushed;   /* by the producers that are done */
    uint64_t popped;   /* by the consumers that met an end, of unordered queues */
    int producers_left;
    bool unordered;
    pthread_barrier_t gate;
    char apart[128];
    uint64_t taken; /* of FLOW_WORK */
} flow;

typedef struct flow_thread {
    pthread_t thread;
    flow *of;
    void *local;      /* what flow_peer.enter returned */
    void *local_back; /* for flow.back */
    int index;
    bool in_order;
    uint64_t started;
    uint64_t ended;
    uint64_t count;
    uint64_t sum;
    double *samples; /* of FLOW_WAKE */
} flow_thread;

typedef void *(*flow_main)(void *thread);

typedef struct flow_mains {
    flow_main produce;
    flow_main consume;
    flow_main ping;
    flow_main pong;
    flow_main work_produce;
    flow_main work_consume;
    flow_main wake_produce;
    flow_main wake_consume;
} flow_mains;

typedef struct flow_peer {
    const char *name;
    flow_class in_class;
    unsigned can;
    void *(*open)(const flow_spec *spec);
    void (*close)(void *queue);
    void *(*enter)(void *queue); /* NULL: nothing of a thread's own */
    void (*leave)(void *local);
    const flow_mains *mains[FLOW_CALL_COUNT]; /* NULL: cannot */
} flow_peer;

/* What the file of a peer exports. */
#define FLOW_PLUGIN flow_plugin
typedef int (*flow_plugin_fn)(const flow_peer **peers);

typedef bool (*flow_push_fn)(void *queue, void *local, uint64_t item);
typedef bool (*flow_pop_fn)(void *queue, void *local, uint64_t *item);
typedef size_t (*flow_push_n_fn)(void *queue, void *local, const uint64_t *items, size_t count);
typedef size_t (*flow_pop_n_fn)(void *queue, void *local, uint64_t *items, size_t count);

/* ---- waiting and working ---- */

FLOW_INLINE void flow_refused(flow_wait wait, unsigned *times) {
    ++*times;
    if (wait == FLOW_YIELD || (wait == FLOW_PAUSE_YIELD && *times % 16 == 0) ||
        *times % 1024 == 0) {
        sched_yield();
    } else if (wait != FLOW_HOT) {
        bench_pause();
    }
}

/* A chain no compiler shortens and no core overlaps: the same time in every language. */
static inline uint64_t flow_work(uint64_t seed, uint32_t turns) {
    uint32_t i;
    seed |= 1;
    for (i = 0; i < turns; ++i) {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
    }
    return seed;
}

/* ---- the loops ---- */

FLOW_INLINE void flow_put(flow_push_fn push, void *queue, void *local, uint64_t item,
                          flow_wait wait) {
    unsigned times = 0;
    while (!push(queue, local, item)) flow_refused(wait, &times);
}

FLOW_INLINE uint64_t flow_take(flow_pop_fn pop, void *queue, void *local, flow_wait wait) {
    unsigned times = 0;
    uint64_t item;
    while (!pop(queue, local, &item)) flow_refused(wait, &times);
    return item;
}

static inline void flow_ready(flow_thread *t) {
    if (t->of->spec->pinned) bench_pin(t->index);
    pthread_barrier_wait(&t->of->gate);
    t->started = bench_ns();
}

FLOW_INLINE void flow_produced(flow_thread *t, flow_push_fn push) {
    flow *f = t->of;
    __atomic_add_fetch(&f->pushed, t->count, __ATOMIC_RELAXED);
    if (__atomic_sub_fetch(&f->producers_left, 1, __ATOMIC_ACQ_REL) == 0) {
        int i;
        for (i = 0; i < f->spec->consumers; ++i) {
            flow_put(push, f->queue, t->local, FLOW_END, f->spec->wait);
        }
    }
    t->ended = bench_ns();
}

FLOW_INLINE void flow_produce(flow_thread *t, flow_push_fn push) {
    void *const queue = t->of->queue;
    void *const local = t->local;
    const flow_wait wait = t->of->spec->wait;
    const uint64_t each = t->of->each;
    const bool pair = t->of->spec->producers + t->of->spec->consumers == 2;
    const uint64_t at_once = pair ? each : 256;
    const uint64_t base = (uint64_t)t->index << FLOW_SHIFT;
    uint64_t i = 0;
    flow_ready(t);
    while (i < each && (pair || bench_ns() < t->of->deadline)) {
        const uint64_t end = each - i < at_once ? each : i + at_once;
        while (i < end) flow_put(push, queue, local, base + ++i, wait);
    }
    t->count = i;
    t->sum = i * (i + 1) / 2;
    flow_produced(t, push);
}

/* From a queue that mixes what its producers push, an end may come before the last items: the end
   goes back until all have come. */
FLOW_INLINE bool flow_at_end(flow_thread *t, flow_push_fn push, uint64_t *told) {
    flow *f = t->of;
    if (!f->unordered) return true;
    if (__atomic_add_fetch(&f->popped, t->count - *told, __ATOMIC_ACQ_REL) ==
        __atomic_load_n(&f->pushed, __ATOMIC_ACQUIRE)) {
        return true;
    }
    *told = t->count;
    flow_put(push, f->queue, t->local, FLOW_END, f->spec->wait);
    sched_yield();
    return false;
}

/* Items of one producer must come in order; the sums tell that each came once. */
FLOW_INLINE void flow_consume_many(flow_thread *t, flow_push_fn push, flow_pop_fn pop,
                                   uint32_t work) {
    void *const queue = t->of->queue;
    void *const local = t->local;
    const flow_wait wait = t->of->spec->wait;
    uint64_t next[FLOW_MAX_SIDE] = { 0 };
    uint64_t told = 0;
    for (;;) {
        const uint64_t item = flow_take(pop, queue, local, wait);
        const uint64_t number = item & (((uint64_t)1 << FLOW_SHIFT) - 1);
        uint64_t *expected = &next[(item >> FLOW_SHIFT) % FLOW_MAX_SIDE];
        if (item == FLOW_END) {
            if (flow_at_end(t, push, &told)) break;
            continue;
        }
        t->in_order = t->in_order && number > *expected;
        *expected = number;
        t->sum += number;
        ++t->count;
        if (work > 0 && flow_work(item, work) == 0) t->in_order = false; /* it never is 0 */
    }
}

/* Of one producer every item is the one after the item before. */
FLOW_INLINE void flow_consume_one(flow_thread *t, flow_pop_fn pop) {
    void *const queue = t->of->queue;
    void *const local = t->local;
    const flow_wait wait = t->of->spec->wait;
    uint64_t count = 0;
    uint64_t wrong = 0;
    uint64_t item;
    while ((item = flow_take(pop, queue, local, wait)) != FLOW_END) wrong |= item ^ ++count;
    t->in_order = wrong == 0;
    t->count = count;
    t->sum = count * (count + 1) / 2;
}

FLOW_INLINE void flow_consume(flow_thread *t, flow_push_fn push, flow_pop_fn pop) {
    flow_ready(t);
    if (t->of->spec->producers == 1 && t->of->spec->consumers == 1) {
        flow_consume_one(t, pop);
    } else {
        flow_consume_many(t, push, pop, 0);
    }
    t->ended = bench_ns();
}

/* Producers share the items, as the workers of a stage do. */
FLOW_INLINE void flow_work_produce(flow_thread *t, flow_push_fn push) {
    flow *f = t->of;
    const uint32_t work = f->spec->produce_work;
    uint64_t number;
    flow_ready(t);
    while (bench_ns() < f->deadline &&
           (number = __atomic_add_fetch(&f->taken, 1, __ATOMIC_RELAXED)) <= f->items) {
        if (flow_work(number, work) == 0) number = 0; /* it never is 0 */
        ++t->count;
        t->sum += number;
        flow_put(push, f->queue, t->local, ((uint64_t)t->index << FLOW_SHIFT) + number,
                 f->spec->wait);
    }
    flow_produced(t, push);
}

FLOW_INLINE void flow_work_consume(flow_thread *t, flow_push_fn push, flow_pop_fn pop) {
    flow_ready(t);
    flow_consume_many(t, push, pop, t->of->spec->consume_work);
    t->ended = bench_ns();
}

FLOW_INLINE void flow_ping(flow_thread *t, flow_push_fn push, flow_pop_fn pop) {
    flow *f = t->of;
    const flow_wait wait = f->spec->wait;
    uint64_t wrong = 0;
    uint64_t i;
    flow_ready(t);
    for (i = 1; i <= f->items; ++i) {
        flow_put(push, f->queue, t->local, i, wait);
        wrong |= flow_take(pop, f->back, t->local_back, wait) ^ i;
    }
    flow_put(push, f->queue, t->local, FLOW_END, wait);
    t->ended = bench_ns();
    t->in_order = wrong == 0;
    t->count = f->items;
}

FLOW_INLINE void flow_pong(flow_thread *t, flow_push_fn push, flow_pop_fn pop) {
    flow *f = t->of;
    const flow_wait wait = f->spec->wait;
    uint64_t item;
    flow_ready(t);
    while ((item = flow_take(pop, f->queue, t->local, wait)) != FLOW_END) {
        flow_put(push, f->back, t->local_back, item, wait);
        ++t->count;
    }
    t->ended = bench_ns();
}

FLOW_INLINE void flow_wake_produce(flow_thread *t, flow_push_fn push) {
    flow *f = t->of;
    uint64_t i;
    flow_ready(t);
    for (i = 0; i < f->each; ++i) {
        bench_sleep_until(bench_ns() + 300000);
        flow_put(push, f->queue, t->local, bench_ns(), f->spec->wait);
    }
    t->count = f->each;
    flow_produced(t, push);
}

FLOW_INLINE void flow_wake_consume(flow_thread *t, flow_pop_fn pop) {
    flow *f = t->of;
    uint64_t pushed;
    flow_ready(t);
    while ((pushed = flow_take(pop, f->queue, t->local, f->spec->wait)) != FLOW_END) {
        const uint64_t now = bench_ns();
        t->in_order = t->in_order && now >= pushed;
        t->samples[t->count++] = (double)(now - pushed);
    }
    t->ended = bench_ns();
}

/* One producer, one consumer; the consumer knows how many there are. */
FLOW_INLINE void flow_batch_produce(flow_thread *t, flow_push_n_fn push_n) {
    flow *f = t->of;
    uint64_t items[FLOW_MAX_BATCH];
    uint64_t at = 0;
    flow_ready(t);
    while (at < f->items) {
        const size_t count = f->items - at < f->spec->batch ? (size_t)(f->items - at)
                                                            : f->spec->batch;
        size_t moved = 0;
        size_t i;
        unsigned times = 0;
        for (i = 0; i < count; ++i) items[i] = at + i + 1;
        at += count;
        while ((moved += push_n(f->queue, t->local, items + moved, count - moved)) < count) {
            flow_refused(f->spec->wait, &times);
        }
    }
    t->ended = bench_ns();
    t->count = at;
    t->sum = at * (at + 1) / 2;
}

FLOW_INLINE void flow_batch_consume(flow_thread *t, flow_pop_n_fn pop_n) {
    flow *f = t->of;
    const size_t batch = f->spec->batch;
    uint64_t items[FLOW_MAX_BATCH];
    uint64_t count = 0;
    uint64_t wrong = 0;
    unsigned times = 0;
    flow_ready(t);
    while (count < f->items) {
        const size_t moved = pop_n(f->queue, t->local, items, batch);
        size_t i;
        if (moved == 0) flow_refused(f->spec->wait, &times);
        for (i = 0; i < moved; ++i) wrong |= items[i] ^ (count + i + 1);
        count += moved;
    }
    t->ended = bench_ns();
    t->in_order = wrong == 0;
    t->count = count;
    t->sum = count * (count + 1) / 2;
}

/* ---- the thread mains of a queue ---- */

#define FLOW_MAIN(name, loop)                                                                      \
    static void *name(void *arg) {                                                                 \
        flow_thread *t = (flow_thread *)arg;                                                       \
        loop;                                                                                      \
        return NULL;                                                                               \
    }

#define FLOW_CALLS(name, push, pop)                                                                \
    FLOW_MAIN(name##_produce, flow_produce(t, push))                                               \
    FLOW_MAIN(name##_consume, flow_consume(t, push, pop))                                          \
    FLOW_MAIN(name##_ping, flow_ping(t, push, pop))                                                \
    FLOW_MAIN(name##_pong, flow_pong(t, push, pop))                                                \
    FLOW_MAIN(name##_work_produce, flow_work_produce(t, push))                                     \
    FLOW_MAIN(name##_work_consume, flow_work_consume(t, push, pop))                                \
    FLOW_MAIN(name##_wake_produce, flow_wake_produce(t, push))                                     \
    FLOW_MAIN(name##_wake_consume, flow_wake_consume(t, pop))                                      \
    static const flow_mains name = { name##_produce,      name##_consume,                          \
                                     name##_ping,         name##_pong,                             \
                                     name##_work_produce, name##_work_consume,                     \
                                     name##_wake_produce, name##_wake_consume };

#define FLOW_CALLS_N(name, push_n, pop_n)                                                          \
    FLOW_MAIN(name##_produce, flow_batch_produce(t, push_n))                                       \
    FLOW_MAIN(name##_consume, flow_batch_consume(t, pop_n))                                        \
    static const flow_mains name = { name##_produce, name##_consume, NULL, NULL,                   \
                                     NULL,           NULL,           NULL, NULL };

#endif /* FLOW_H_INCLUDED */
