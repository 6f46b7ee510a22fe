/* peer_mutex.h - the peers every Linux has: a queue, a thread pool and a pipeline on pthread
   mutexes and condition variables, each in its best form.

   What was done for them: a waiter is counted under the mutex and signalled after it is unlocked,
   and whoever signals takes the waiter off the count, so that no waiter is signalled twice and
   nobody is signalled in vain; a place of the in-order edge has its own condition variable, so that
   a thread is only woken when its own place is free. */
#ifndef PEER_MUTEX_H_INCLUDED
#define PEER_MUTEX_H_INCLUDED

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PEER_MAX_STAGES 8
#define PEER_MAX_THREADS 256

typedef enum peer_result { PEER_OK, PEER_WAIT, PEER_CLOSED } peer_result;

static inline void *peer_alloc(size_t bytes) {
    void *memory = calloc(1, bytes);
    if (memory == NULL) abort();
    return memory;
}

static inline void peer_thread(pthread_t *thread, void *(*main)(void *), void *arg) {
    if (pthread_create(thread, NULL, main, arg) != 0) abort();
}

/* Spins a little before it sleeps, where there is such a mutex: it measured a little better. */
static inline void peer_mutex_init(pthread_mutex_t *mutex) {
#ifdef PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_ADAPTIVE_NP);
    pthread_mutex_init(mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
#else
    pthread_mutex_init(mutex, NULL);
#endif
}

/* ---- queue: bounded, first in first out, any number of threads on both sides ---- */

typedef struct peer_queue {
    pthread_mutex_t mutex;
    pthread_cond_t filled;
    pthread_cond_t emptied;
    void **items;
    uint32_t capacity;
    uint32_t head;
    uint32_t tail;
    uint32_t count;
    int getters; /* waiting and not yet signalled */
    int putters;
    bool closed;
} peer_queue;

static inline void peer_queue_init(peer_queue *q, uint32_t capacity) {
    memset(q, 0, sizeof *q);
    peer_mutex_init(&q->mutex);
    pthread_cond_init(&q->filled, NULL);
    pthread_cond_init(&q->emptied, NULL);
    q->items = (void **)peer_alloc(capacity * sizeof *q->items);
    q->capacity = capacity;
}

static inline void peer_queue_destroy(peer_queue *q) {
    pthread_cond_destroy(&q->emptied);
    pthread_cond_destroy(&q->filled);
    pthread_mutex_destroy(&q->mutex);
    free(q->items);
}

/* Unlocks, then wakes one of the waiters if there are any. */
static inline void peer_unlock_and_signal(pthread_mutex_t *mutex, pthread_cond_t *cond,
                                          int *waiters) {
    const bool signal = *waiters > 0;
    if (signal) --*waiters;
    pthread_mutex_unlock(mutex);
    if (signal) pthread_cond_signal(cond);
}

static inline void peer_queue_put(peer_queue *q, void *item) {
    q->items[q->tail] = item;
    q->tail = q->tail + 1 == q->capacity ? 0 : q->tail + 1;
    ++q->count;
    peer_unlock_and_signal(&q->mutex, &q->filled, &q->getters);
}

static inline void *peer_queue_get(peer_queue *q) {
    void *item = q->items[q->head];
    q->head = q->head + 1 == q->capacity ? 0 : q->head + 1;
    --q->count;
    peer_unlock_and_signal(&q->mutex, &q->emptied, &q->putters);
    return item;
}

static inline peer_result peer_queue_refuse(peer_queue *q) {
    const peer_result result = q->closed ? PEER_CLOSED : PEER_WAIT;
    pthread_mutex_unlock(&q->mutex);
    return result;
}

static inline peer_result peer_queue_try_push(peer_queue *q, void *item) {
    pthread_mutex_lock(&q->mutex);
    if (q->closed || q->count == q->capacity) return peer_queue_refuse(q);
    peer_queue_put(q, item);
    return PEER_OK;
}

static inline peer_result peer_queue_try_pop(peer_queue *q, void **item) {
    pthread_mutex_lock(&q->mutex);
    if (q->count == 0) return peer_queue_refuse(q);
    *item = peer_queue_get(q);
    return PEER_OK;
}

static inline peer_result peer_queue_push(peer_queue *q, void *item) {
    pthread_mutex_lock(&q->mutex);
    while (q->count == q->capacity && !q->closed) {
        ++q->putters;
        pthread_cond_wait(&q->emptied, &q->mutex);
    }
    if (q->closed) return peer_queue_refuse(q);
    peer_queue_put(q, item);
    return PEER_OK;
}

static inline peer_result peer_queue_pop(peer_queue *q, void **item) {
    pthread_mutex_lock(&q->mutex);
    while (q->count == 0 && !q->closed) {
        ++q->getters;
        pthread_cond_wait(&q->filled, &q->mutex);
    }
    if (q->count == 0) return peer_queue_refuse(q);
    *item = peer_queue_get(q);
    return PEER_OK;
}

/* Pops drain what is inside; with `drop` there is nothing left to drain. */
static inline void peer_queue_close(peer_queue *q, bool drop) {
    pthread_mutex_lock(&q->mutex);
    q->closed = true;
    if (drop) q->count = 0;
    pthread_mutex_unlock(&q->mutex);
    pthread_cond_broadcast(&q->filled);
    pthread_cond_broadcast(&q->emptied);
}

/* ---- order: an edge that is its own reorder buffer ----
   Item number n may be put when n < head + capacity and lies at n % capacity; items come out by
   number. A stage takes numbers in order, so the one at the head is always in somebody's hands and
   always has a place. While it is slow, the next number of the same place may come to wait too, so
   they are all woken: hardly ever more than one. */

typedef struct peer_place {
    pthread_cond_t emptied;
    void *item;
    int putters;
    bool full;
} peer_place;

typedef struct peer_order {
    pthread_mutex_t mutex;
    pthread_cond_t filled;
    peer_place *places;
    uint32_t capacity;
    uint64_t head;
    int getters;
    bool closed;
    bool dropped;
} peer_order;

static inline void peer_order_init(peer_order *q, uint32_t capacity) {
    uint32_t i;
    memset(q, 0, sizeof *q);
    peer_mutex_init(&q->mutex);
    pthread_cond_init(&q->filled, NULL);
    q->places = (peer_place *)peer_alloc(capacity * sizeof *q->places);
    q->capacity = capacity;
    for (i = 0; i < capacity; ++i) pthread_cond_init(&q->places[i].emptied, NULL);
}

static inline void peer_order_destroy(peer_order *q) {
    uint32_t i;
    for (i = 0; i < q->capacity; ++i) pthread_cond_destroy(&q->places[i].emptied);
    pthread_cond_destroy(&q->filled);
    pthread_mutex_destroy(&q->mutex);
    free(q->places);
}

static inline peer_place *peer_order_place(peer_order *q, uint64_t number) {
    return &q->places[number % q->capacity];
}

static inline peer_result peer_order_push(peer_order *q, uint64_t number, void *item) {
    peer_place *place = peer_order_place(q, number);
    pthread_mutex_lock(&q->mutex);
    while (number >= q->head + q->capacity && !q->dropped) {
        ++place->putters;
        pthread_cond_wait(&place->emptied, &q->mutex);
    }
    if (q->dropped) {
        pthread_mutex_unlock(&q->mutex);
        return PEER_CLOSED;
    }
    place->item = item;
    place->full = true;
    if (number == q->head) {
        peer_unlock_and_signal(&q->mutex, &q->filled, &q->getters);
    } else {
        pthread_mutex_unlock(&q->mutex); /* nobody can take it yet */
    }
    return PEER_OK;
}

/* Leaves the place of the head. What follows may have been ready for long: then another getter
   goes on. Unlocks. */
static inline void peer_order_advance(peer_order *q, peer_place *place) {
    const bool room = place->putters > 0;
    bool more;
    place->full = false;
    more = peer_order_place(q, ++q->head)->full && q->getters > 0;
    if (more) --q->getters;
    place->putters = 0;
    pthread_mutex_unlock(&q->mutex);
    if (more) pthread_cond_signal(&q->filled);
    if (room) pthread_cond_broadcast(&place->emptied);
}

static inline peer_result peer_order_pop(peer_order *q, uint64_t *number, void **item) {
    peer_place *place;
    pthread_mutex_lock(&q->mutex);
    while (!(place = peer_order_place(q, q->head))->full && !q->closed) {
        ++q->getters;
        pthread_cond_wait(&q->filled, &q->mutex);
    }
    if (!place->full || q->dropped) {
        pthread_mutex_unlock(&q->mutex);
        return PEER_CLOSED;
    }
    *number = q->head;
    *item = place->item;
    peer_order_advance(q, place);
    return PEER_OK;
}

static inline void peer_order_close(peer_order *q, bool drop) {
    uint32_t i;
    pthread_mutex_lock(&q->mutex);
    q->closed = true;
    q->dropped = q->dropped || drop;
    pthread_mutex_unlock(&q->mutex);
    pthread_cond_broadcast(&q->filled);
    for (i = 0; drop && i < q->capacity; ++i) pthread_cond_broadcast(&q->places[i].emptied);
}

/* ---- pool: threads that take jobs from one queue ---- */

typedef struct peer_job {
    void (*fn)(void *arg, int worker);
    void *arg;
} peer_job;

typedef struct peer_pool {
    pthread_mutex_t mutex;
    pthread_cond_t filled;
    pthread_cond_t emptied;
    pthread_cond_t idle;
    pthread_t threads[PEER_MAX_THREADS];
    peer_job *jobs;
    uint32_t capacity;
    uint32_t head;
    uint32_t count;
    uint32_t running;
    int workers;
    int started; /* hands out the worker numbers */
    int getters;
    int putters;
    bool draining;
    bool closed;
} peer_pool;

/* Takes the next job; the mutex is held before, and is not after. */
static inline peer_job peer_pool_take(peer_pool *pool) {
    const peer_job job = pool->jobs[pool->head];
    pool->head = pool->head + 1 == pool->capacity ? 0 : pool->head + 1;
    --pool->count;
    ++pool->running;
    peer_unlock_and_signal(&pool->mutex, &pool->emptied, &pool->putters);
    return job;
}

static inline void *peer_pool_main(void *arg) {
    peer_pool *pool = (peer_pool *)arg;
    int worker;
    pthread_mutex_lock(&pool->mutex);
    worker = pool->started++;
    for (;;) {
        peer_job job;
        while (pool->count == 0 && !pool->closed) {
            ++pool->getters;
            pthread_cond_wait(&pool->filled, &pool->mutex);
        }
        if (pool->count == 0) break;
        job = peer_pool_take(pool);
        job.fn(job.arg, worker);
        pthread_mutex_lock(&pool->mutex);
        --pool->running;
        if (pool->draining && pool->running == 0 && pool->count == 0) {
            pthread_cond_broadcast(&pool->idle);
        }
    }
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

static inline peer_pool *peer_pool_create(int workers, uint32_t capacity) {
    peer_pool *pool = (peer_pool *)peer_alloc(sizeof *pool);
    int i;
    peer_mutex_init(&pool->mutex);
    pthread_cond_init(&pool->filled, NULL);
    pthread_cond_init(&pool->emptied, NULL);
    pthread_cond_init(&pool->idle, NULL);
    pool->jobs = (peer_job *)peer_alloc(capacity * sizeof *pool->jobs);
    pool->capacity = capacity;
    pool->workers = workers;
    for (i = 0; i < workers; ++i) peer_thread(&pool->threads[i], peer_pool_main, pool);
    return pool;
}

static inline void peer_pool_submit(peer_pool *pool, void (*fn)(void *, int), void *arg) {
    uint32_t at;
    pthread_mutex_lock(&pool->mutex);
    while (pool->count == pool->capacity) {
        ++pool->putters;
        pthread_cond_wait(&pool->emptied, &pool->mutex);
    }
    at = pool->head + pool->count++;
    if (at >= pool->capacity) at -= pool->capacity;
    pool->jobs[at].fn = fn;
    pool->jobs[at].arg = arg;
    peer_unlock_and_signal(&pool->mutex, &pool->filled, &pool->getters);
}

static inline void peer_pool_drain(peer_pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    pool->draining = true;
    while (pool->running > 0 || pool->count > 0) pthread_cond_wait(&pool->idle, &pool->mutex);
    pool->draining = false;
    pthread_mutex_unlock(&pool->mutex);
}

static inline void peer_pool_destroy(peer_pool *pool) {
    int i;
    pthread_mutex_lock(&pool->mutex);
    pool->closed = true;
    pthread_mutex_unlock(&pool->mutex);
    pthread_cond_broadcast(&pool->filled);
    for (i = 0; i < pool->workers; ++i) pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->idle);
    pthread_cond_destroy(&pool->emptied);
    pthread_cond_destroy(&pool->filled);
    pthread_mutex_destroy(&pool->mutex);
    free(pool->jobs);
    free(pool);
}

/* ---- pipeline: each stage has its own threads, between bounded queues ---- */

/* A stage: returns false when there is no more (a source) and gets `in` as NULL there. */
typedef bool (*peer_fn)(void *ctx, uint64_t number, void *in, void **out);

typedef struct peer_stage {
    peer_fn fn;
    void *ctx;
    int threads;
} peer_stage;

typedef union peer_edge {
    peer_queue queue; /* as items are done */
    peer_order order; /* in the order of the source */
} peer_edge;

typedef struct peer_pipeline peer_pipeline;

typedef struct peer_runner {
    peer_pipeline *pipeline;
    int stage;
} peer_runner;

struct peer_pipeline {
    peer_stage stages[PEER_MAX_STAGES];
    peer_edge edges[PEER_MAX_STAGES]; /* edge k lies behind stage k */
    peer_runner runners[PEER_MAX_STAGES];
    int running[PEER_MAX_STAGES]; /* threads left, by atomic builtins */
    pthread_t threads[PEER_MAX_THREADS];
    int thread_count;
    int stage_count;
    bool ordered;
};

static inline void peer_edge_init(peer_pipeline *p, int edge, uint32_t capacity) {
    if (p->ordered) {
        peer_order_init(&p->edges[edge].order, capacity);
    } else {
        peer_queue_init(&p->edges[edge].queue, capacity);
    }
}

static inline void peer_edge_destroy(peer_pipeline *p, int edge) {
    if (p->ordered) {
        peer_order_destroy(&p->edges[edge].order);
    } else {
        peer_queue_destroy(&p->edges[edge].queue);
    }
}

static inline peer_result peer_edge_push(peer_pipeline *p, int edge, uint64_t number, void *item) {
    if (p->ordered) return peer_order_push(&p->edges[edge].order, number, item);
    return peer_queue_push(&p->edges[edge].queue, item);
}

static inline peer_result peer_edge_pop(peer_pipeline *p, int edge, uint64_t *number, void **item) {
    if (p->ordered) return peer_order_pop(&p->edges[edge].order, number, item);
    *number = 0;
    return peer_queue_pop(&p->edges[edge].queue, item);
}

static inline void peer_edge_close(peer_pipeline *p, int edge, bool drop) {
    if (p->ordered) {
        peer_order_close(&p->edges[edge].order, drop);
    } else {
        peer_queue_close(&p->edges[edge].queue, drop);
    }
}

static inline void peer_run_source(peer_pipeline *p) {
    const peer_stage *stage = &p->stages[0];
    uint64_t number = 0;
    void *item;
    while (stage->fn(stage->ctx, number, NULL, &item)) {
        if (peer_edge_push(p, 0, number++, item) != PEER_OK) return;
    }
}

static inline void peer_run_stage(peer_pipeline *p, int at) {
    const peer_stage *stage = &p->stages[at];
    uint64_t number;
    void *in;
    void *out;
    while (peer_edge_pop(p, at - 1, &number, &in) == PEER_OK) {
        stage->fn(stage->ctx, number, in, &out);
        if (peer_edge_push(p, at, number, out) != PEER_OK) return;
    }
}

static inline void *peer_runner_main(void *arg) {
    const peer_runner *runner = (const peer_runner *)arg;
    peer_pipeline *p = runner->pipeline;
    if (runner->stage == 0) {
        peer_run_source(p);
    } else {
        peer_run_stage(p, runner->stage);
    }
    if (__atomic_sub_fetch(&p->running[runner->stage], 1, __ATOMIC_ACQ_REL) == 0) {
        peer_edge_close(p, runner->stage, false);
    }
    return NULL;
}

static inline void peer_stage_start(peer_pipeline *p, int at) {
    int i;
    p->runners[at].pipeline = p;
    p->runners[at].stage = at;
    for (i = 0; i < p->stages[at].threads; ++i) {
        if (p->thread_count == PEER_MAX_THREADS) abort();
        peer_thread(&p->threads[p->thread_count++], peer_runner_main, &p->runners[at]);
    }
}

static inline peer_pipeline *peer_pipeline_create(const peer_stage *stages, int stage_count,
                                                  uint32_t buffer_size, bool ordered) {
    peer_pipeline *p = (peer_pipeline *)peer_alloc(sizeof *p);
    int i;
    p->stage_count = stage_count;
    p->ordered = ordered;
    for (i = 0; i < stage_count; ++i) {
        p->stages[i] = stages[i];
        p->running[i] = stages[i].threads;
        peer_edge_init(p, i, buffer_size);
    }
    for (i = 0; i < stage_count; ++i) peer_stage_start(p, i);
    return p;
}

static inline bool peer_pipeline_next(peer_pipeline *p, void **item) {
    uint64_t number;
    return peer_edge_pop(p, p->stage_count - 1, &number, item) == PEER_OK;
}

/* Drops what is inside and waits until every stage function has returned. */
static inline void peer_pipeline_destroy(peer_pipeline *p) {
    int i;
    for (i = 0; i < p->stage_count; ++i) peer_edge_close(p, i, true);
    for (i = 0; i < p->thread_count; ++i) pthread_join(p->threads[i], NULL);
    for (i = 0; i < p->stage_count; ++i) peer_edge_destroy(p, i);
    free(p);
}

#endif /* PEER_MUTEX_H_INCLUDED */
