/* .next_works_ns: the thread in spdl_pipeline_next runs stages while it would wait. */
#define SPDL__WARN_NS 50000000 /* after which a worker names a call of next */
#define ITEMS_PRIVATE          /* whether the consumer sleeps */
#include "flow.h"

static uint64_t trainer;

static bool is_trainer(void) { return trainer == test_thread_id(); }

static spdl_pipeline *start_works(int workers, spdl_pool *pool, int64_t works_ns,
                                  const spdl_stage *rows, size_t count) {
    spdl_pipeline_desc desc = { .pool = pool, .next_works_ns = works_ns };
    spdl_pipeline *p = NULL;
    spdl_error error = { 0 };
    if (pool == NULL) desc.workers = TEST_WORKERS(workers);
    desc.error = &error;
    desc.logger.log_fn = log_nothing;
    trainer = test_thread_id();
    if (spdl_pipeline_create(&p, &desc, rows, count) != SPDL_OK) CHECK_STR(error.text, "");
    REQUIRE(p != NULL);
    return p;
}

#define WORKS(workers, ns, ...) start_works((workers), NULL, (ns), SPDL_STAGES(__VA_ARGS__))

/* Calls of a row, and how many of them the trainer made. */
typedef struct tally {
    long us;          /* each takes so long */
    int meet;         /* as many have to be inside at once; or 0 */
    long stop_at;     /* the trainer's first call from this value on stops the pipeline, unless 0 */
    long fail_from;   /* the trainer's calls for values from here on fail, unless 0 */
    int calls, in_next, stopped;
} tally;

SPDL_FN(count_calls, item, item) {
    tally *t = (tally *)spdl_ctx(task);
    const int number = __atomic_fetch_add(&t->calls, 1, __ATOMIC_ACQ_REL);
    if (is_trainer()) __atomic_add_fetch(&t->in_next, 1, __ATOMIC_RELEASE);
    if (t->meet > 0) await(&t->calls, number / t->meet * t->meet + t->meet);
    sleep_us(t->us);
    if (t->stop_at && is_trainer() && in->value >= t->stop_at) {
        spdl_stop(task);
        ++t->stopped;
    }
    if (t->fail_from && is_trainer() && in->value >= t->fail_from)
        return spdl_fail(task, "in next");
    *out = in;
    return SPDL_OK;
}

/* Two calls wait for each other, and there is one worker. (The sink has room for all: the
   trainer takes nothing while it is in a call.) */
static void the_trainer_is_one_thread_more(void) {
    for (int w = 1; w < 4; ++w) {
        tally t = { .meet = w + 1 };
        spdl_pipeline *p = WORKS(w, SPDL_FOREVER, COUNT_TO(24),
                                 SPDL_PIPE(count_calls, .ctx = &t, .concurrency = w + 1),
                                 SPDL_SINK(24));
        CHECK_EQ(take_from(p, 0, 100, SPDL_END), 24);
        CHECK(t.in_next >= 24 / (w + 1));
        DONE(p);
    }
}

/* A call takes longer than the limit from the first one on: none of them is the trainer's.
   While the worker is in it, the trainer makes the quick ones. */
static void rows_of_long_calls_are_left_to_the_workers(void) {
    for (int w = 1; w < 3; ++w) {
        tally quick = { .us = 0 }, slow = { .us = 3000 };
        spdl_pipeline *p = WORKS(w, SPDL_SECONDS(0.001), COUNT_TO(200),
                                 SPDL_PIPE(count_calls, .ctx = &quick, .name = "quick"),
                                 SPDL_PIPE(count_calls, .ctx = &slow, .name = "slow"),
                                 SPDL_SINK(1));
        CHECK_EQ(take_from(p, 0, 1000, SPDL_END), 200);
        CHECK_EQ(slow.in_next, 0);
        CHECK(quick.in_next > 0 || w > 1);
        DONE(p);
    }
}

static void without_it_no_call_runs_in_next(void) {
    for (int w = 1; w < 4; ++w) {
        tally t = { .us = 100 };
        spdl_pipeline *p = WORKS(w, 0, COUNT_TO(100), SPDL_PIPE(count_calls, .ctx = &t),
                                 SPDL_SINK(1));
        CHECK_EQ(take_from(p, 0, 1000, SPDL_END), 100);
        CHECK_EQ(t.in_next, 0);
        DONE(p);
    }
}

static const int64_t limits[] = { SPDL_FOREVER, 20000 };

/* Rows of every kind: the same items in the same order. */
static void the_order_stays(void) {
    chaos_on();
    for (int i = 0; i < 2 * CROWDS * 4; ++i) {
        const int w = crowds[i / 2 % CROWDS];
        tally t = { .us = i % 3 * 20 };
        spdl_pipeline *p = WORKS(
            w, limits[i % 2],
            SPDL_SOURCE(count_up, SCRIPT(.count = 60), .threads = i % 5 == 0,
                        .free_item = item_free),
            SPDL_PIPE(count_calls, .ctx = &t, .concurrency = 1 + i % 4),
            SPDL_PIPE(follow, SCRIPT(.every = 3, .result = SPDL_SKIP), .concurrency = 1 + i % 2),
            SPDL_BRANCH(pass_on), SPDL_PATH("a"), FOLLOW(.fresh = true), SPDL_PATH("b"),
            SPDL_MERGE(), SPDL_BATCH(7), SPDL_UNBATCH(), SPDL_SINK(1 + i % 3));
        RUN(p, "1 2 4 5 7 8 10 11 13 14 16 17 19 20 22 23 25 26 28 29 31 32 34 35 37 38 40 41 43 "
               "44 46 47 49 50 52 53 55 56 58 59", SPDL_END);
    }
}

static void epochs_end_one_by_one(void) {
    for (int i = 0; i < 2 * CROWDS; ++i) {
        scale s = { .limit = 10 };
        spdl_pipeline *p = WORKS(crowds[i / 2], limits[i % 2], CONTINUOUS(.count = 10), WEIGH(&s),
                                 SPDL_SINK(1));
        for (int epoch = 0; epoch < 5; ++epoch) TAKE_EPOCH(p, "10 11 15 9");
        DONE(p);
    }
}

/* The time is looked at between calls. */
static void timeouts_lose_nothing(void) {
    uint64_t seed = test_seed();
    for (int i = 0; i < 2 * CROWDS; ++i) {
        spdl_pipeline *p = WORKS(crowds[i / 2], limits[i % 2],
                                 SOURCE(.count = 150, .sleep_us = 50),
                                 SPDL_PIPE(follow, SCRIPT(.sleep_us = 100), .concurrency = 2),
                                 SPDL_SINK(1 + i % 3));
        spdl_result result = SPDL_OK;
        long count = 0;
        const uint64_t since = spdl_time_ns();
        while (result == SPDL_OK || result == SPDL_TIMEOUT) {
            item *it = NULL;
            result = SPDL_NEXT(p, &it, (int64_t)(test_random(&seed) % 3 * 30000));
            REQUIRE(spdl_time_ns() - since < 30000000000u);
            if (result != SPDL_OK) continue;
            CHECK_EQ(it->value, count++);
            item_free(it);
        }
        CHECK_EQ(result, SPDL_END);
        CHECK_EQ(count, 150);
        DONE(p);
    }
}

/* --- stop, rewind, failure --- */

static void a_call_in_next_may_stop(void) {
    for (int i = 0; i < 40; ++i) {
        tally t = { .us = 20, .stop_at = 1 + i };
        spdl_pipeline *p = WORKS(1 + i % 3, SPDL_FOREVER, COUNT_TO(-1),
                                 SPDL_PIPE(count_calls, .ctx = &t, .concurrency = 1 + i % 2),
                                 SPDL_SINK(2));
        (void)take_from(p, 0, 1000000, SPDL_CLOSED);
        CHECK(t.stopped > 0);
        CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        DONE(p);
    }
}

static spdl_pipeline *inner_one;

SPDL_FN(stops_and_destroys, item, item) {
    if (is_trainer() && in->value > 5) { /* neither waits for itself */
        CHECK_EQ(spdl_pipeline_rewind(inner_one, 0, SPDL_FOREVER), SPDL_E_INVALID);
        spdl_pipeline_destroy(inner_one);
        CHECK_EQ(spdl_pipeline_stop(inner_one, SPDL_FOREVER), SPDL_OK);
    }
    sleep_us(50);
    *out = in;
    return SPDL_OK;
}

static void a_call_in_next_does_not_wait_for_itself(void) {
    for (int i = 0; i < 10; ++i) {
        int gate = 0;
        inner_one = WORKS(1 + i % 2, SPDL_FOREVER, SOURCE(.count = -1, .gate = &gate),
                          SPDL_PIPE(stops_and_destroys, .concurrency = 1 + i % 3), SPDL_SINK(1));
        open_gate(&gate);
        (void)take_from(inner_one, 0, 1000000, SPDL_CLOSED);
        DONE(inner_one);
    }
}

static void *stops_soon(void *arg) {
    sleep_us(3000);
    CHECK_EQ(spdl_pipeline_stop((spdl_pipeline *)arg, SPDL_FOREVER), SPDL_OK);
    return NULL;
}

static void another_thread_may_stop(void) {
    for (int i = 0; i < 20; ++i) {
        spdl_pipeline *p = WORKS(1 + i % 3, limits[i / 2 % 2], COUNT_TO(-1),
                                 SPDL_PIPE(follow, SCRIPT(.sleep_us = 100),
                                           .concurrency = 1 + i % 2),
                                 SPDL_SINK(2));
        const test_thread thread = thread_of(stops_soon, p);
        (void)take_from(p, 0, 1000000, SPDL_CLOSED);
        test_join(thread);
        DONE(p);
    }
}

static void it_can_be_rewound(void) {
    chaos_on();
    for (int i = 0; i < 2 * CROWDS; ++i) {
        spdl_pipeline *p = WORKS(crowds[i / 2], limits[i % 2],
                                 SPDL_SOURCE(count_up, SCRIPT(.count = 50), .free_item = item_free,
                                             .threads = i % 3 == 0),
                                 SPDL_PIPE(follow, SCRIPT(.sleep_us = 20), .concurrency = 3),
                                 FOLLOW(.fresh = true), SPDL_SINK(2));
        for (int k = 0; k < 30; ++k) {
            CHECK_EQ(take_from(p, k % 4, k, k > 50 - k % 4 ? SPDL_END : SPDL_OK), k);
            if (k % 5 == 0) CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
            CHECK_EQ(spdl_pipeline_rewind(p, (uint64_t)(k + 1) % 4, SPDL_FOREVER), SPDL_OK);
        }
        CHECK_EQ(take_from(p, 30 % 4, 1000, SPDL_END), 50 - 30 % 4);
        DONE(p);
    }
}

static void a_call_in_next_may_fail(void) {
    for (int i = 0; i < 40; ++i) {
        tally t = { .us = 20, .fail_from = 1 + i };
        spdl_pipeline *p = WORKS(1 + i % 3, SPDL_FOREVER, COUNT_TO(-1),
                                 SPDL_PIPE(count_calls, .ctx = &t, .concurrency = 1 + i / 3 % 3),
                                 FOLLOW(.fresh = true), SPDL_SINK(2));
        const long count = take_from(p, 0, 1000000, SPDL_E_STAGE);
        char text[100];
        void *none;
        snprintf(text, sizeof text, "stage 1 'count_calls', item %ld: in next", count);
        failed_with(p, 1, text);
        CHECK_EQ(spdl_pipeline_next(p, &none, SPDL_FOREVER), SPDL_E_STAGE);
        DONE(p);
    }
}

/* --- places --- */

typedef struct places {
    int inits[4], finis[4];
    int in_next; /* calls */
} places;

static spdl_result places_init(void *ctx, int worker, void **local) {
    places *h = (places *)ctx;
    if (!CHECK(worker >= 0 && worker < 3)) return SPDL_E_INVALID;
    CHECK_EQ(h->inits[worker]++, 0);
    CHECK_EQ(worker == 2, is_trainer()); /* the place after those of the workers */
    *local = &h->inits[worker];
    return SPDL_OK;
}

static void places_fini(void *ctx, int worker, void *local) {
    places *h = (places *)ctx;
    CHECK(local == &h->inits[worker]);
    CHECK_EQ(h->finis[worker]++, 0);
}

SPDL_FN(looks_at_its_place, item, item) {
    places *h = (places *)spdl_ctx(task);
    CHECK(spdl_local(task) == &h->inits[task_worker(task)]);
    CHECK_EQ(h->inits[task_worker(task)], 1);
    if (is_trainer()) ++h->in_next;
    sleep_us(20);
    *out = in;
    return SPDL_OK;
}

/* Init runs on the trainer as on any worker; its fini in destroy. */
static void the_trainer_has_a_place_of_its_own(void) {
    for (int i = 0; i < 20; ++i) {
        places h = { .in_next = 0 };
        spdl_pipeline *p = WORKS(2, SPDL_FOREVER, COUNT_TO(100),
                                 SPDL_PIPE(looks_at_its_place, .ctx = &h, .init = places_init,
                                           .fini = places_fini, .concurrency = 3),
                                 SPDL_SINK(1));
        CHECK_EQ(take_from(p, 0, 1000, SPDL_END), 100);
        DONE(p);
        CHECK_EQ(h.in_next > 0, h.inits[2] > 0);
        for (int k = 0; k < 3; ++k) CHECK_EQ(h.inits[k], h.finis[k]);
    }
}

static spdl_pool *pool_with(int workers, int guests) {
    const spdl_pool_desc desc = { .workers = workers, .guests = guests };
    spdl_pool *pool = NULL;
    REQUIRE(spdl_pool_create(&pool, &desc) == SPDL_OK);
    return pool;
}

/* On a shared pool it takes the place of a guest. */
static void on_a_shared_pool_it_is_a_guest(void) {
    spdl_pool *pool = pool_with(1, 1);
    for (int i = 0; i < 10; ++i) {
        tally t = { .meet = 2, .us = 20 };
        spdl_pipeline *p = start_works(
            0, pool, SPDL_FOREVER,
            SPDL_STAGES(COUNT_TO(20), SPDL_PIPE(count_calls, .ctx = &t, .concurrency = 2),
                        SPDL_SINK(20)));
        CHECK_EQ(take_from(p, 0, 100, SPDL_END), 20);
        CHECK(t.in_next >= 10);
        spdl_stats stats;
        spdl_pipeline_stats(p, &stats);
        CHECK(stats.shared_pool);
        DONE(p);
    }
    spdl_pool_destroy(pool);
}

/* A pool without such a place is refused: next would never work. */
static void next_works_without_place(void) {
    spdl_pipeline_desc desc = { .pool = pool_with(2, 0), .next_works_ns = 1 };
    spdl_pipeline *p = NULL;
    spdl_error error;
    desc.error = &error;
    CHECK_EQ(
        spdl_pipeline_create(&p, &desc, SPDL_STAGES(COUNT_TO(1), SPDL_PIPE(pass_on), SPDL_SINK(1))),
        SPDL_E_INVALID);
    CHECK_STR(error.text, "pipeline: next_works_ns is set, but its pool has no place for guests: "
                          "set .guests of the pool");
    CHECK(p == NULL);
    spdl_pool_destroy(desc.pool);
}

/* On a pool of guests alone nobody else times a row: its first call is the consumer's, whatever the
   limit. */
static void guest_only(void) {
    for (int i = 0; i < 2; ++i) {
        spdl_pool *pool = pool_with(0, 1);
        tally t = { .us = 0 };
        spdl_pipeline *p =
            start_works(0, pool, i ? 2000000 : SPDL_FOREVER,
                        SPDL_STAGES(COUNT_TO(10), SPDL_PIPE(count_calls, .ctx = &t), SPDL_SINK(3)));
        CHECK_EQ(take_from(p, 0, 100, SPDL_END), 10);
        CHECK_EQ(t.in_next, 10);
        DONE(p);
        spdl_pool_destroy(pool);
    }
}

/* Whether the consumer sleeps in next. */
static void await_sleep(const spdl_pipeline *p) {
    while (spdl__load32(&p->waiting) == 0) sleep_us(100);
    sleep_us(2000);
}

/* All inputs but the last are dropped, so that nothing but the row could wake the consumer. The
   first call, which is not the consumer's, lasts until the consumer sleeps. */
typedef struct keeper {
    spdl_pipeline *p;
    spdl_pool *pool;
    long last;
    int inside, calls, jobs;
} keeper;

static void job_without_end(void *arg, int worker, void *local) {
    keeper *k = (keeper *)arg;
    (void)worker, (void)local;
    __atomic_add_fetch(&k->jobs, 1, __ATOMIC_ACQ_REL);
    await(&k->calls, (int)k->last + 1);
}

SPDL_FN(keep_last, item, item) {
    keeper *k = (keeper *)spdl_ctx(task);
    if (in->value == 0) {
        CHECK(!is_trainer());
        __atomic_store_n(&k->inside, 1, __ATOMIC_RELEASE);
        await_sleep(k->p);
        if (k->last == 2) CHECK_EQ(spdl_pool_submit(k->pool, job_without_end, k, 0), SPDL_OK);
    }
    __atomic_add_fetch(&k->calls, 1, __ATOMIC_ACQ_REL);
    *out = in;
    return in->value == k->last ? SPDL_OK : SPDL_SKIP;
}

static void *guest_for_one_call(void *arg) {
    keeper *k = (keeper *)arg;
    while (__atomic_load_n(&k->inside, __ATOMIC_ACQUIRE) == 0)
        (void)spdl_pool_run(k->pool, 1000000);
    return NULL;
}

static void keeper_runs(keeper *k) {
    item *got;
    REQUIRE(SPDL_NEXT(k->p, &got, SPDL_SECONDS(10)) == SPDL_OK);
    CHECK_EQ(got->value, k->last);
    item_free(got);
    CHECK_EQ(SPDL_NEXT(k->p, &got, SPDL_SECONDS(10)), SPDL_END);
}

/* A guest whose budget ends leaves a row that the consumer could run. */
static void guest_leaves_consumer_sleeps(void) {
    keeper k = { .pool = pool_with(0, 2), .last = 3 };
    test_thread guest;
    k.p = start_works(0, k.pool, SPDL_FOREVER,
                      SPDL_STAGES(COUNT_TO(4), SPDL_PIPE(keep_last, .ctx = &k), SPDL_SINK(2)));
    guest = thread_of(guest_for_one_call, &k);
    await(&k.inside, 1);
    keeper_runs(&k);
    test_join(guest);
    DONE(k.p);
    spdl_pool_destroy(k.pool);
}

/* So does the only worker, which has a job that waits for the row. */
static void a_job_leaves_the_consumer_asleep(void) {
    keeper k = { .pool = pool_with(1, 1), .last = 2 };
    k.p = start_works(0, k.pool, SPDL_FOREVER,
                      SPDL_STAGES(SPDL_FEED(item, .buffer_size = 4, .free_item = item_free),
                                  SPDL_PIPE(keep_last, .ctx = &k), SPDL_SINK(2)));
    for (long i = 0; i < 3; ++i) CHECK_EQ(spdl_pipeline_push(k.p, item_make(i), 0), SPDL_OK);
    CHECK_EQ(spdl_pipeline_push_end(k.p), SPDL_OK);
    await(&k.inside, 1);
    keeper_runs(&k);
    await(&k.jobs, 1);
    DONE(k.p);
    spdl_pool_destroy(k.pool);
}

/* A call may wait for the consumer while the thread in next runs no stage. */
SPDL_FN(waits_for_the_consumer, item, item) {
    CHECK(!is_trainer());
    await((const int *)spdl_ctx(task), (int)in->value);
    *out = in;
    return SPDL_OK;
}

static void next_works_waits_for_itself(void) {
    int taken = 0;
    spdl_pipeline *p =
        WORKS(1, 0, COUNT_TO(50), SPDL_PIPE(waits_for_the_consumer, .ctx = &taken), SPDL_SINK(2));
    for (item *got; SPDL_NEXT(p, &got, SPDL_SECONDS(10)) == SPDL_OK; item_free(got))
        __atomic_add_fetch(&taken, 1, __ATOMIC_ACQ_REL);
    CHECK_EQ(taken, 50);
    DONE(p);
}

/* A quick row becomes slow in a call that the consumer makes, while the only worker has found
   nothing to do and sleeps: what was pushed meanwhile is the worker's. */
typedef struct lone_worker {
    spdl_pipeline *pipeline;
    int inside, released;
} lone_worker;

static void keeps_the_worker(void *arg, int worker, void *local) {
    lone_worker *w = (lone_worker *)arg;
    (void)worker, (void)local;
    __atomic_store_n(&w->inside, 1, __ATOMIC_RELEASE);
    await(&w->released, 1);
}

SPDL_FN(is_slow_once, item, item) {
    lone_worker *w = (lone_worker *)spdl_ctx(task);
    *out = in;
    if (in->value != 1) {
        sleep_us(100); /* long enough for a sitting of one call */
        return SPDL_OK;
    }
    CHECK(is_trainer());
    __atomic_store_n(&w->released, 1, __ATOMIC_RELEASE);
    sleep_us(150000); /* the worker comes back, and sleeps */
    for (long i = 2; i < 4; ++i)
        CHECK_EQ(spdl_pipeline_push(w->pipeline, item_make(i), 0), SPDL_OK);
    return SPDL_SKIP;
}

static void what_it_leaves_is_passed_on(void) {
    const spdl_pool_desc desc = { .workers = 1, .guests = 1 };
    lone_worker w = { .inside = 0 };
    spdl_pool *pool = NULL;
    item *got;
    REQUIRE(spdl_pool_create(&pool, &desc) == SPDL_OK);
    w.pipeline = start_works(0, pool, 20000000, SPDL_STAGES(
        SPDL_FEED(item, .buffer_size = 8, .free_item = item_free),
        SPDL_PIPE(is_slow_once, .ctx = &w), SPDL_PIPE(pass_on), SPDL_SINK(4)));
    CHECK_EQ(spdl_pipeline_push(w.pipeline, item_make(0), 0), SPDL_OK);
    REQUIRE(SPDL_NEXT(w.pipeline, &got, SPDL_SECONDS(15)) == SPDL_OK);
    item_free(got);
    REQUIRE(spdl_pool_submit(pool, keeps_the_worker, &w, 0) == SPDL_OK);
    await(&w.inside, 1);
    CHECK_EQ(spdl_pipeline_push(w.pipeline, item_make(1), 0), SPDL_OK);
    for (int i = 2; i < 4; ++i) {
        REQUIRE(SPDL_NEXT(w.pipeline, &got, SPDL_SECONDS(15)) == SPDL_OK);
        CHECK_EQ(got->value, i);
        item_free(got);
    }
    DONE(w.pipeline);
    spdl_pool_destroy(pool);
}

/* Without workers it does everything anyway. */
static void without_workers_nothing_changes(void) {
    tally t = { .us = 2000 };
    spdl_pipeline *p = WORKS(0, 1, COUNT_TO(10), SPDL_PIPE(count_calls, .ctx = &t), SPDL_SINK(1));
    CHECK_EQ(take_from(p, 0, 100, SPDL_END), 10);
    CHECK_EQ(t.in_next, 10);
    DONE(p);
}

/* --- the default --- */

static int workers_of(const spdl_pipeline *p) {
    spdl_stats s;
    spdl_pipeline_stats(p, &s);
    CHECK(!s.shared_pool);
    return s.workers;
}

/* All processors but one have a worker, and the trainer works while it waits. */
static void the_default_uses_all_processors(void) {
    const int cores = spdl_cores(), workers = cores > 1 ? cores - 1 : 1;
    for (int none = 0; none < 2; ++none) {
        const spdl_pipeline_desc zero = { .logger = { log_nothing, NULL } };
        tally t = { .meet = workers + 1 };
        spdl_pipeline *p;
        trainer = test_thread_id();
        REQUIRE(spdl_pipeline_create(&p, none ? NULL : &zero, SPDL_STAGES(
            COUNT_TO(4 * (workers + 1)),
            SPDL_PIPE(count_calls, .ctx = &t, .concurrency = SPDL_ALL),
            SPDL_SINK(4 * (workers + 1)))) == SPDL_OK);
        CHECK_EQ(workers_of(p), workers);
        CHECK_EQ(take_from(p, 0, 5000, SPDL_END), 4 * (workers + 1));
        CHECK(t.in_next >= 4);
        DONE(p);
    }
}

/* A number of workers means just that, and a limit of the calls in next stays as it is written. */
static void what_is_written_is_no_default(void) {
    const spdl_pipeline_desc limited = { .next_works_ns = 1, .logger = { log_nothing, NULL } };
    tally t = { .us = 0 };
    spdl_pipeline *p = WORKS(2, 0, COUNT_TO(200), SPDL_PIPE(count_calls, .ctx = &t), SPDL_SINK(1));
    CHECK_EQ(workers_of(p), 2);
    CHECK_EQ(take_from(p, 0, 5000, SPDL_END), 200);
    CHECK_EQ(t.in_next, 0);
    DONE(p);
    t = (tally){ .us = 2000 };
    REQUIRE(spdl_pipeline_create(&p, &limited, SPDL_STAGES(
        COUNT_TO(30), SPDL_PIPE(count_calls, .ctx = &t), SPDL_SINK(1))) == SPDL_OK);
    CHECK_EQ(take_from(p, 0, 5000, SPDL_END), 30);
    CHECK(t.in_next < 10);
    DONE(p);
}

static int calls_of(spdl_pipeline *p, int row) {
    const int calls = stats_of(p, row).concurrency;
    DONE(p);
    return calls;
}

/* As many calls as threads may work, wherever they are from. */
static void all_calls_are_those_of_the_threads(void) {
    const spdl_stage rows[] = { COUNT_TO(4), SPDL_PIPE(pass_on, .concurrency = SPDL_ALL),
                                SPDL_SINK(1) };
    spdl_pool *pool = pool_of(5);
    CHECK_EQ(calls_of(start_works(3, NULL, 0, SPDL_TABLE(rows)), 1), 3);
    CHECK_EQ(calls_of(start_works(3, NULL, SPDL_FOREVER, SPDL_TABLE(rows)), 1), 4);
    CHECK_EQ(calls_of(start_works(0, NULL, 0, SPDL_TABLE(rows)), 1), 1);
    CHECK_EQ(calls_of(start_works(0, pool, 0, SPDL_TABLE(rows)), 1), 5);
    spdl_pool_destroy(pool);
}

/* The consumer's call waits until the log has named it. The worker's waits until the consumer is
   inside. */
typedef struct lateness {
    int inside, lines; /* atomic */
    long value;        /* of the consumer's call */
    char text[SPDL_TEXT_BYTES];
} lateness;

static void log_of_next(spdl_log_level level, const char *text, void *user) {
    lateness *l = (lateness *)user;
    CHECK_EQ(level, SPDL_LOG_WARN);
    CHECK(!is_trainer());
    if (__atomic_load_n(&l->lines, __ATOMIC_ACQUIRE) == 0)
        snprintf(l->text, sizeof l->text, "%s", text);
    __atomic_add_fetch(&l->lines, 1, __ATOMIC_RELEASE);
}

SPDL_FN(waits_in_next, item, item) {
    lateness *l = (lateness *)spdl_ctx(task);
    if (is_trainer() && l->inside == 0) {
        l->value = in->value;
        __atomic_store_n(&l->inside, 1, __ATOMIC_RELEASE);
        await(&l->lines, 1);
        sleep_us(120000); /* no second line */
        CHECK_EQ(__atomic_load_n(&l->lines, __ATOMIC_ACQUIRE), 1);
    }
    await(&l->inside, 1);
    *out = in;
    return SPDL_OK;
}

static void a_call_that_keeps_next_is_named(void) {
    for (int i = 0; i < 4; ++i) {
        lateness l = { 0 };
        const spdl_pool_desc pool_desc = { .workers = 1, .guests = 1 };
        spdl_pipeline_desc desc = { .workers = 1, .next_works_ns = SPDL_FOREVER };
        spdl_pipeline *p = NULL;
        item *it = NULL;
        char text[SPDL_TEXT_BYTES];
        trainer = test_thread_id();
        desc.logger.log_fn = log_of_next;
        desc.logger.user = &l;
        if (i >= 2) {
            desc.workers = 0;
            REQUIRE(spdl_pool_create(&desc.pool, &pool_desc) == SPDL_OK);
        }
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
                    COUNT_TO(9), SPDL_PIPE(waits_in_next, .ctx = &l, .concurrency = 2),
                    SPDL_SINK(1))) == SPDL_OK);
        while (l.lines == 0)
            if (SPDL_NEXT(p, &it, i % 2 ? SPDL_FOREVER : 1000000) == SPDL_OK) item_free(it);
        snprintf(text, sizeof text, "spdl_pipeline_next cannot return yet: its thread is in a "
                 "call of stage 1 'waits_in_next', item %ld. If the call waits for the consumer, "
                 "write .workers = 2 or more, and no .next_works_ns", l.value);
        CHECK_STR(l.text, text);
        DONE(p);
        CHECK_EQ(l.lines, 1);
        if (i >= 2) spdl_pool_destroy(desc.pool);
    }
}

/* A client of a pool, whose guest may soon be late, or not. */
typedef struct watched {
    spdl__client client;
    bool soon;
    int looks; /* atomic */
} watched;

static bool no_step(void *self, int worker, bool again) {
    return self == NULL && worker == 0 && again;
}
static bool no_work(void *self, int worker) { return self == NULL && worker == 0; }

static void no_guest(void *self) { (void)self; }

static bool counts_looks(void *self) {
    watched *w = (watched *)self;
    __atomic_add_fetch(&w->looks, 1, __ATOMIC_RELEASE);
    return w->soon;
}

/* A worker that found a call that keeps next looks again soon: the line does not come 5 seconds
   later than it should. */
static void a_call_that_keeps_next_is_named_in_time(void) {
    const spdl_pool_desc pool_desc = { .workers = 1, .guests = 1 };
    uint64_t took[2];
    for (int soon = 0; soon < 2; ++soon) {
        watched w = { { no_step, no_work, no_guest, counts_looks, &w }, soon != 0, 0 };
        const uint64_t start = spdl_time_ns();
        spdl__client_slot *slot;
        spdl_pool *pool;
        uint64_t bit;
        REQUIRE(spdl_pool_create(&pool, &pool_desc) == SPDL_OK);
        slot = spdl__pool_attach(pool, &w.client, &bit);
        REQUIRE(slot != NULL);
        await(&w.looks, 7);
        took[soon] = spdl_time_ns() - start;
        spdl__pool_detach(pool, slot);
        spdl_pool_destroy(pool);
    }
    CHECK(took[0] >= 6 * (uint64_t)SPDL__WARN_NS);
    CHECK(took[1] < took[0] * 2 / 3); /* a third and less, if nobody is in the way */
}

/* The look itself: not yet late, late, said. */
SPDL_FN(is_looked_at, item, item) {
    int *inside = (int *)spdl_ctx(task);
    spdl_pipeline *p = task->pipeline;
    if (is_trainer() && __atomic_load_n(inside, __ATOMIC_ACQUIRE) == 0) {
        CHECK(spdl__next_watch(p) || spdl__load32(&p->watched) == 1);
        sleep_us(SPDL__WARN_NS / 1000 + 1000);
        (void)spdl__next_watch(p); /* or the worker was first */
        CHECK_EQ(spdl__load32(&p->watched), 1);
        CHECK(!spdl__next_watch(p));
        __atomic_store_n(inside, 1, __ATOMIC_RELEASE);
    }
    await(inside, 1);
    *out = in;
    return SPDL_OK;
}

static void a_call_that_may_soon_be_late(void) {
    int inside = 0;
    item *it = NULL;
    spdl_pipeline *p = WORKS(1, SPDL_FOREVER, COUNT_TO(9),
                             SPDL_PIPE(is_looked_at, .ctx = &inside, .concurrency = 2),
                             SPDL_SINK(1));
    for (; SPDL_NEXT(p, &it, SPDL_FOREVER) == SPDL_OK; item_free(it)) {}
    DONE(p);
}

TEST_TABLE(next){
    TEST_CASE(a_call_that_keeps_next_is_named_in_time),
    TEST_CASE(a_call_that_may_soon_be_late),

    TEST_CASE(a_call_that_keeps_next_is_named),
    TEST_CASE(the_trainer_is_one_thread_more),
    TEST_CASE(rows_of_long_calls_are_left_to_the_workers),
    TEST_CASE(without_it_no_call_runs_in_next),
    TEST_CASE(the_order_stays),
    TEST_CASE(epochs_end_one_by_one),
    TEST_CASE(timeouts_lose_nothing),
    TEST_CASE(a_call_in_next_may_stop),
    TEST_CASE(a_call_in_next_does_not_wait_for_itself),
    TEST_CASE(another_thread_may_stop),
    TEST_CASE(it_can_be_rewound),
    TEST_CASE(a_call_in_next_may_fail),
    TEST_CASE(the_trainer_has_a_place_of_its_own),
    TEST_CASE(on_a_shared_pool_it_is_a_guest),
    TEST_CASE(next_works_without_place),
    TEST_CASE(guest_only),
    TEST_CASE(guest_leaves_consumer_sleeps),
    TEST_CASE(a_job_leaves_the_consumer_asleep),
    TEST_CASE(next_works_waits_for_itself),
    TEST_CASE(what_it_leaves_is_passed_on),
    TEST_CASE(without_workers_nothing_changes),
    TEST_CASE(the_default_uses_all_processors),
    TEST_CASE(what_is_written_is_no_default),
    TEST_CASE(all_calls_are_those_of_the_threads),
    TEST_END,
};
