/* Guests: threads of other job systems that work in a pool for a while (spdl_pool_run), alone and
   beside workers; and what a profiler gets to see. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

static void guests_point(const char *id);

#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#define SPDL_TEST_POINT(id) guests_point(id)
#include "../spdl.h"
#include "test.h"

static __thread uint64_t chaos; /* 0: none, else a random state */
static uint64_t chaos_seed;     /* the start of it on threads that have none */

static void guests_point(const char *id) {
    (void)id;
    if (chaos_seed == 0) return;
    if (chaos == 0) chaos = (chaos_seed ^ (uint64_t)(uintptr_t)&chaos) | 1;
    switch (test_random(&chaos) % 16) {
    case 0: test_sleep_us(30); break;
    case 1: case 2: case 3: test_yield(); break;
    default: break;
    }
}

/* --- helpers --- */

static int get(const int *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static void set(int *p, int value) { __atomic_store_n(p, value, __ATOMIC_RELEASE); }
static int add(int *p, int more) { return __atomic_fetch_add(p, more, __ATOMIC_ACQ_REL); }

static void await(const int *p, int value) {
    const uint64_t start = spdl_time_ns();
    while (get(p) != value) {
        REQUIRE(spdl_time_ns() - start < 10000000000u);
        test_sleep_us(100);
    }
}

static spdl_pool *pool_of(int workers, int guests) {
    const spdl_pool_desc desc = { .workers = workers, .guests = guests };
    spdl_pool *pool = NULL;
    REQUIRE(spdl_pool_create(&pool, &desc) == SPDL_OK);
    return pool;
}

/* A job system of its own: threads that come to the pool again and again. */
typedef struct crew {
    spdl_pool *pool;
    int64_t budget_ns; /* 0: another one each time */
    int count, stop, full, bad;
    test_thread thread[8];
} crew;

static void *crew_main(void *arg) {
    crew *c = (crew *)arg;
    uint64_t seed = (uint64_t)(uintptr_t)&seed | 1;
    while (!get(&c->stop)) {
        const int64_t budget = c->budget_ns ? c->budget_ns : (int64_t)(test_random(&seed) % 100000);
        const spdl_result result = spdl_pool_run(c->pool, budget);
        if (result == SPDL_FULL) add(&c->full, 1);
        if (result != SPDL_OK && result != SPDL_EMPTY && result != SPDL_FULL) add(&c->bad, 1);
        if (result != SPDL_OK) test_sleep_us(20);
    }
    return NULL;
}

static void crew_start(crew *c, spdl_pool *pool, int count, int64_t budget_ns) {
    memset(c, 0, sizeof *c);
    c->pool = pool;
    c->budget_ns = budget_ns;
    for (; c->count < count; ++c->count)
        REQUIRE(test_thread_start(&c->thread[c->count], crew_main, c));
}

static void crew_end(crew *c) {
    set(&c->stop, 1);
    for (int i = 0; i < c->count; ++i) test_join(c->thread[i]);
    CHECK_EQ(get(&c->bad), 0);
}

static int alive; /* items */

static void item_free(void *item) {
    add(&alive, -1);
    free(item);
}

/* `ctx` items in an epoch. */
SPDL_FN(count_up, void, int) {
    if (spdl_sequence(task) == (uint64_t)(uintptr_t)spdl_ctx(task)) return SPDL_END;
    if ((*out = (int *)malloc(sizeof(int))) == NULL) return SPDL_E_NOMEM;
    **out = (int)spdl_sequence(task);
    add(&alive, 1);
    return SPDL_OK;
}

SPDL_FN(work, int, int) {
    if (*in % 7 == 0) test_yield();
    *out = in;
    return SPDL_OK;
}

#define ITEMS(...) \
    SPDL_SOURCE(count_up, .free_item = item_free, .ctx = (void *)(uintptr_t)__VA_ARGS__)

/* Takes an epoch of n items, in order. */
static void take_all(spdl_pipeline *p, int n, spdl_result end) {
    spdl_result result;
    int *item, next = 0;
    while ((result = SPDL_NEXT(p, &item, SPDL_FOREVER)) == SPDL_OK) {
        CHECK_EQ(*item, next);
        ++next;
        item_free(item);
    }
    CHECK_EQ(result, end);
    CHECK_EQ(next, n);
}

/* --- pipelines --- */

static void guests_do_all_the_work(void) {
    static const int workers[] = { 0, 0, 0, 1, 2 }, guests[] = { 1, 2, 3, 1, 2 };
    for (int i = 0; i < 5; ++i)
        for (int buffer = 1; buffer < 20; buffer += 9) {
            spdl_pool *pool = pool_of(workers[i], guests[i]);
            const spdl_pipeline_desc desc = { .pool = pool };
            spdl_stats stats;
            spdl_pipeline *p;
            crew c;
            CHECK_EQ(pool->desc.workers, workers[i]);
            crew_start(&c, pool, 3, 200000);
            REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
                ITEMS(500, .continuous = true, .buffer_size = buffer),
                SPDL_PIPE(work, .concurrency = 4),
                SPDL_SINK(buffer))) == SPDL_OK);
            for (int epoch = 0; epoch < 3; ++epoch) take_all(p, 500, SPDL_END);
            spdl_pipeline_stats(p, &stats);
            CHECK_EQ(stats.workers, workers[i] + guests[i]);
            CHECK(stats.stage[1].tasks > 0);
            spdl_pipeline_destroy(p);
            CHECK_EQ(alive, 0);
            crew_end(&c);
            spdl_pool_destroy(pool);
        }
}

/* A game with one thread: a little work each frame. */
static void one_thread_is_guest_and_trainer(void) {
    spdl_pool *pool = pool_of(0, 1);
    const spdl_pipeline_desc desc = { .pool = pool };
    int frames, taken = 0;
    spdl_pipeline *p;
    int *item;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        ITEMS(300), SPDL_PIPE(work), SPDL_SINK(8))) == SPDL_OK);
    CHECK_EQ(SPDL_NEXT(p, &item, 0), SPDL_TIMEOUT);
    CHECK_EQ(SPDL_NEXT(p, &item, 1000000), SPDL_TIMEOUT); /* nobody works */
    for (frames = 0; frames < 100000; ++frames) {
        const spdl_result ran = spdl_pool_run(pool, 50000);
        spdl_result got;
        CHECK(ran == SPDL_OK || ran == SPDL_EMPTY);
        while ((got = SPDL_NEXT(p, &item, 0)) == SPDL_OK) {
            CHECK_EQ(*item, taken);
            ++taken;
            item_free(item);
        }
        if (got == SPDL_END) break;
        CHECK_EQ(got, SPDL_TIMEOUT);
    }
    CHECK_EQ(taken, 300);
    CHECK_EQ(spdl_pool_run(pool, SPDL_FOREVER), SPDL_EMPTY);
    spdl_pipeline_destroy(p);
    spdl_pool_destroy(pool);
    CHECK_EQ(alive, 0);
}

/* Pushed items, and nobody but guests to take them. */
static void guests_answer_pushes(void) {
    spdl_pool *pool = pool_of(0, 2);
    const spdl_pipeline_desc desc = { .pool = pool };
    spdl_pipeline *p;
    crew c;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_FEED(int, .free_item = item_free, .buffer_size = 2),
        SPDL_PIPE(work), SPDL_SINK(2))) == SPDL_OK);
    crew_start(&c, pool, 2, 30000);
    for (int i = 0; i < 500; ++i) {
        int *item = (int *)malloc(sizeof(int)), *back;
        REQUIRE(item != NULL);
        *item = i;
        add(&alive, 1);
        REQUIRE(spdl_pipeline_push(p, item, SPDL_FOREVER) == SPDL_OK);
        REQUIRE(SPDL_NEXT(p, &back, SPDL_FOREVER) == SPDL_OK);
        CHECK_EQ(*back, i);
        item_free(back);
    }
    spdl_pipeline_push_end(p);
    take_all(p, 0, SPDL_END);
    spdl_pipeline_destroy(p);
    crew_end(&c);
    spdl_pool_destroy(pool);
    CHECK_EQ(alive, 0);
}

/* --- the budget --- */

static int calls, slow_from;

/* Quick, but one call lasts longer than the budget. */
SPDL_FN(long_at_last, int, int) {
    if (add(&calls, 1) == slow_from) {
        const uint64_t end = spdl_time_ns() + 20000000;
        while (spdl_time_ns() < end) {}
    }
    *out = in;
    return SPDL_OK;
}

static void no_call_begins_after_the_budget(void) {
    spdl_pool *pool = pool_of(0, 1);
    const spdl_pipeline_desc desc = { .pool = pool };
    spdl_pipeline *p;
    int *item;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        ITEMS(1000, .buffer_size = 200), SPDL_PIPE(long_at_last), SPDL_SINK(100))) == SPDL_OK);
    slow_from = -1;
    CHECK_EQ(spdl_pool_run(pool, SPDL_FOREVER), SPDL_EMPTY); /* all calls were quick so far */
    for (int i = 0; i < 10; ++i) {
        for (int k = 0; k < 50; ++k) {
            REQUIRE(SPDL_NEXT(p, &item, 0) == SPDL_OK);
            item_free(item);
        }
        slow_from = calls + i;
        CHECK_EQ(spdl_pool_run(pool, 15000000), SPDL_OK);
        CHECK_EQ(calls, slow_from + 1); /* that was the last one */
        slow_from = -1;
        CHECK_EQ(spdl_pool_run(pool, SPDL_FOREVER), SPDL_EMPTY);
    }
    spdl_pipeline_destroy(p);
    spdl_pool_destroy(pool);
    CHECK_EQ(alive, 0);
}

static void count_job(void *arg, int worker, void *local) {
    (void)worker;
    (void)local;
    add((int *)arg, 1);
}

static void no_budget_only_looks(void) {
    spdl_pool *pool = pool_of(0, 1);
    int ran = 0;
    CHECK_EQ(spdl_pool_run(pool, 0), SPDL_EMPTY);
    REQUIRE(spdl_pool_submit(pool, count_job, &ran, 0) == SPDL_OK);
    CHECK_EQ(spdl_pool_run(pool, 0), SPDL_OK);
    CHECK_EQ(ran, 0);
    CHECK_EQ(spdl_pool_run(pool, SPDL_SECONDS(1)), SPDL_EMPTY);
    CHECK_EQ(ran, 1);
    spdl_pool_destroy(pool);
}

/* --- places --- */

typedef struct hold {
    int running, go, inside;
    spdl_pool *pool;
    spdl_pipeline *pipeline;
} hold;

static void hold_job(void *arg, int worker, void *local) {
    hold *h = (hold *)arg;
    (void)worker;
    (void)local;
    CHECK_EQ(spdl_pool_run(h->pool, 0), SPDL_E_INVALID); /* inside already */
    CHECK_EQ(spdl_pool_drain(h->pool, 0), SPDL_E_INVALID);
    CHECK_EQ(spdl_pool_stop(h->pool, 0), SPDL_E_INVALID);
    add(&h->running, 1);
    while (!get(&h->go)) test_sleep_us(100);
    add(&h->inside, 1);
}

static void *run_once(void *arg) {
    hold *h = (hold *)arg;
    CHECK_EQ(spdl_pool_run(h->pool, SPDL_FOREVER), SPDL_EMPTY);
    return NULL;
}

static void as_many_guests_as_places(void) {
    spdl_pool *pool = pool_of(1, 2), *plain = pool_of(1, 0);
    test_thread thread[2];
    hold h = { .pool = pool };
    CHECK_EQ(spdl_pool_run(NULL, 0), SPDL_E_INVALID);
    CHECK_EQ(spdl_pool_run(plain, 0), SPDL_E_INVALID);
    for (int i = 0; i < 3; ++i) REQUIRE(spdl_pool_submit(pool, hold_job, &h, 0) == SPDL_OK);
    for (int i = 0; i < 2; ++i)
        REQUIRE(test_thread_start(&thread[i], run_once, &h));
    await(&h.running, 3);
    CHECK_EQ(spdl_pool_run(pool, SPDL_FOREVER), SPDL_FULL);
    set(&h.go, 1);
    for (int i = 0; i < 2; ++i) test_join(thread[i]);
    CHECK_EQ(spdl_pool_run(pool, SPDL_FOREVER), SPDL_EMPTY);
    spdl_pool_destroy(pool);
    spdl_pool_destroy(plain);
    CHECK_EQ(h.inside, 3);
}

/* Who destroys or drains a pool without workers does what nobody else does. */
static void jobs_wait_for_guests_or_the_end(void) {
    const spdl_pool_desc desc = { .guests = 2, .queue_size = 4 };
    spdl_pool *pool;
    int ran = 0;
    REQUIRE(spdl_pool_create(&pool, &desc) == SPDL_OK);
    for (int round = 1; round < 4; ++round) {
        for (int i = 0; i < 4; ++i)
            REQUIRE(spdl_pool_submit(pool, count_job, &ran, 0) == SPDL_OK);
        CHECK_EQ(spdl_pool_submit(pool, count_job, &ran, 1000), SPDL_TIMEOUT);
        if (round < 3) CHECK_EQ(spdl_pool_drain(pool, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(ran, round < 3 ? 4 * round : 8);
    }
    spdl_pool_destroy(pool);
    CHECK_EQ(ran, 12);
}

/* The guest is in a job, and goes when that is over. */
static void destroy_waits_for_guests(void) {
    for (int round = 0; round < 20; ++round) {
        spdl_pool *pool = pool_of(round % 2, 1);
        hold h = { .pool = pool };
        test_thread thread;
        REQUIRE(test_thread_start(&thread, run_once, &h));
        test_join(thread); /* nothing to do yet */
        REQUIRE(spdl_pool_submit(pool, hold_job, &h, 0) == SPDL_OK);
        if (round % 2 == 0) REQUIRE(test_thread_start(&thread, run_once, &h));
        await(&h.running, 1);
        set(&h.go, 1);
        spdl_pool_destroy(pool);
        CHECK_EQ(h.inside, 1);
        if (round % 2 == 0) test_join(thread);
    }
}

static char said[4][SPDL_TEXT_BYTES];
static int lines;

static void on_log(spdl_log_level level, const char *text, void *user) {
    (void)user;
    if (level == SPDL_LOG_ERROR) snprintf(said[lines++ % 4], SPDL_TEXT_BYTES, "%s", text);
}

SPDL_FN(stops_inside, int, int) {
    hold *h = (hold *)spdl_ctx(task);
    *out = in;
    if (*in != 5) return SPDL_OK;
    CHECK_EQ(spdl_pipeline_stop(h->pipeline, SPDL_FOREVER), SPDL_OK); /* does not wait for itself */
    spdl_pipeline_destroy(h->pipeline);
    spdl_pool_destroy(h->pool);
    add(&h->inside, 1);
    return SPDL_OK;
}

static void stop_and_destroy_inside(void) {
    const spdl_pool_desc pool_desc = { .guests = 1, .logger = { .log_fn = on_log } };
    spdl_pipeline_desc desc = { .logger = { .log_fn = on_log } };
    hold h = { 0 };
    int *item;
    REQUIRE(spdl_pool_create(&h.pool, &pool_desc) == SPDL_OK);
    desc.pool = h.pool;
    REQUIRE(spdl_pipeline_create(&h.pipeline, &desc, SPDL_STAGES(
        ITEMS(100), SPDL_PIPE(stops_inside, .ctx = &h), SPDL_SINK(20))) == SPDL_OK);
    CHECK_EQ(spdl_pool_run(h.pool, SPDL_FOREVER), SPDL_EMPTY);
    CHECK_EQ(h.inside, 1);
    CHECK_EQ(lines, 2);
    CHECK(strstr(said[0], "spdl_pipeline_destroy: called on a worker") != NULL);
    CHECK(strstr(said[1], "spdl_pool_destroy:") != NULL);
    while (SPDL_NEXT(h.pipeline, &item, 0) == SPDL_OK) item_free(item);
    spdl_pipeline_destroy(h.pipeline);
    spdl_pool_destroy(h.pool);
    CHECK_EQ(alive, 0);
}

/* --- hooks --- */

static int inits, finis, init_fails; /* 1 + the place where it does; -1: everywhere */
static uint32_t places_seen;

static spdl_result on_init(void *ctx, int worker, void **local) {
    (void)ctx;
    if (worker + 1 == init_fails || init_fails < 0) return SPDL_E_NOMEM;
    add(&inits, 1);
    *local = (void *)(uintptr_t)(100 + worker);
    return SPDL_OK;
}

static void on_fini(void *ctx, int worker, void *local) {
    (void)ctx;
    CHECK_EQ((uintptr_t)local, 100 + worker);
    add(&finis, 1);
}

SPDL_FN(has_local, int, int) {
    CHECK_EQ((uintptr_t)spdl_local(task), 100 + spdl__task_worker(task));
    CHECK(spdl__task_worker(task) < 4);
    __atomic_fetch_or(&places_seen, 1u << spdl__task_worker(task), __ATOMIC_RELAXED);
    *out = in;
    return SPDL_OK;
}

static void job_has_local(void *arg, int worker, void *local) {
    CHECK_EQ((uintptr_t)local, 100 + worker);
    add((int *)arg, 1);
}

static void places_have_hooks(void) {
    for (int workers = 0; workers < 3; ++workers) {
        const spdl_pool_desc pool_desc = { .workers = workers, .guests = 2, .init = on_init,
                                           .fini = on_fini };
        spdl_pipeline_desc desc = { 0 };
        spdl_pipeline *p[2];
        int jobs = 0;
        crew c;
        inits = finis = init_fails = 0;
        REQUIRE(spdl_pool_create(&desc.pool, &pool_desc) == SPDL_OK);
        CHECK_EQ(inits, workers + 2);
        crew_start(&c, desc.pool, 3, 20000);
        for (int i = 0; i < 10; ++i)
            CHECK_EQ(spdl_pool_submit(desc.pool, job_has_local, &jobs, SPDL_FOREVER), SPDL_OK);
        for (int i = 0; i < 2; ++i)
            REQUIRE(spdl_pipeline_create(&p[i], &desc, SPDL_STAGES(
                ITEMS(300),
                SPDL_PIPE(has_local, .init = on_init, .fini = on_fini, .concurrency = 3),
                SPDL_SINK(3))) == SPDL_OK);
        take_all(p[0], 300, SPDL_END);
        spdl_pipeline_destroy(p[0]);
        take_all(p[1], 300, SPDL_END);
        spdl_pipeline_destroy(p[1]);
        CHECK(inits > workers + 2 && inits <= 3 * (workers + 2)); /* where there was a call */
        CHECK_EQ(finis, inits - (workers + 2));
        crew_end(&c);
        spdl_pool_destroy(desc.pool);
        CHECK_EQ(finis, inits);
        CHECK_EQ(jobs, 10);
        CHECK_EQ(alive, 0);
    }
    CHECK((places_seen & 3) != 0); /* place 0 of no worker, or beside one */
}

static void init_that_fails_on_a_place(void) {
    for (int workers = 0; workers < 2; ++workers) {
        spdl_pipeline_desc desc = { .logger = { .log_fn = on_log } };
        spdl_pipeline *p;
        int *item;
        for (init_fails = workers + 1; init_fails <= workers + 2; ++init_fails) {
            spdl_error error;
            const spdl_pool_desc bad = { .workers = workers, .guests = 2, .init = on_init,
                                         .fini = on_fini, .error = &error };
            spdl_pool *pool;
            inits = finis = 0;
            CHECK_EQ(spdl_pool_create(&pool, &bad), SPDL_E_NOMEM);
            CHECK(strstr(error.text, "init of a worker failed") != NULL);
            CHECK_EQ(finis, inits);
        }
        init_fails = -1;
        inits = finis = 0;
        desc.pool = pool_of(workers, 2);
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            ITEMS(300), SPDL_PIPE(has_local, .init = on_init, .fini = on_fini),
            SPDL_SINK(3))) == SPDL_OK);
        CHECK_EQ(spdl_pool_run(desc.pool, SPDL_FOREVER), SPDL_EMPTY);
        CHECK_EQ(SPDL_NEXT(p, &item, SPDL_FOREVER), SPDL_E_NOMEM);
        spdl_pipeline_destroy(p);
        CHECK(inits == 0 && finis == 0);
        spdl_pool_destroy(desc.pool);
        CHECK_EQ(alive, 0);
    }
    init_fails = 0;
}

static void one_pipeline_too_many(void) {
    spdl_pipeline_desc desc = { .logger = { .log_fn = on_log } };
    spdl_pipeline *p[65];
    int made = 0;
    inits = finis = init_fails = 0;
    desc.pool = pool_of(0, 2);
    while (made < 65 && spdl_pipeline_create(&p[made], &desc, SPDL_STAGES(
               ITEMS(3, .init = on_init, .fini = on_fini), SPDL_SINK(3))) == SPDL_OK)
        ++made;
    CHECK_EQ(made, 64);
    CHECK_EQ(inits, 0);
    CHECK_EQ(spdl_pool_run(desc.pool, SPDL_FOREVER), SPDL_EMPTY); /* has been in all of them */
    CHECK_EQ(inits, 64);
    while (made > 0) {
        int *item;
        CHECK_EQ(SPDL_NEXT(p[made - 1], &item, 0), SPDL_OK);
        item_free(item);
        spdl_pipeline_destroy(p[--made]);
    }
    spdl_pool_destroy(desc.pool);
    CHECK_EQ(finis, inits);
    CHECK_EQ(alive, 0);
}

/* --- consumers with next_works_ns on a shared pool: they are guests while they work --- */

SPDL_FN(takes_long, int, int) {
    test_sleep_us(2000);
    *out = in;
    return SPDL_OK;
}

/* The rest is for the guest: the consumer, for whom its calls are too long, must not keep the one
   place while it sleeps. */
static void a_consumer_leaves_its_place_to_sleep(void) {
    static const int64_t works[] = { 0, 100000, SPDL_FOREVER };
    for (int i = 0; i < 3; ++i) {
        spdl_pipeline_desc desc = { .pool = pool_of(0, 1), .next_works_ns = works[i] };
        spdl_pipeline *p;
        crew c;
        crew_start(&c, desc.pool, 1, 10000000);
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            ITEMS(20), SPDL_PIPE(takes_long), SPDL_SINK(2))) == SPDL_OK);
        take_all(p, 20, SPDL_END);
        spdl_pipeline_destroy(p);
        crew_end(&c);
        spdl_pool_destroy(desc.pool);
        CHECK_EQ(alive, 0);
    }
}

static void *take_200(void *arg) {
    take_all((spdl_pipeline *)arg, 200, SPDL_END);
    return NULL;
}

static void *take_nothing(void *arg) {
    int *item;
    CHECK_EQ(SPDL_NEXT((spdl_pipeline *)arg, &item, SPDL_FOREVER), SPDL_CLOSED);
    return NULL;
}

/* Nor while there is nothing to do for it: other pipelines and jobs have the place. */
static void an_idle_consumer_has_no_place(void) {
    spdl_pool *pool = pool_of(0, 1);
    const spdl_pipeline_desc desc = { .pool = pool, .next_works_ns = SPDL_FOREVER };
    spdl_pipeline *idle, *busy;
    test_thread thread;
    int ran = 0;
    REQUIRE(spdl_pipeline_create(&idle, &desc, SPDL_STAGES(SPDL_FEED(int), SPDL_PIPE(work),
                                                           SPDL_SINK(2))) == SPDL_OK);
    REQUIRE(spdl_pipeline_create(&busy, &desc, SPDL_STAGES(ITEMS(50), SPDL_SINK(2))) == SPDL_OK);
    REQUIRE(test_thread_start(&thread, take_nothing, idle));
    while (spdl__load_relaxed32(&idle->waiting) == 0) test_sleep_us(100);
    take_all(busy, 50, SPDL_END);
    CHECK_EQ(spdl_pool_submit(pool, count_job, &ran, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(spdl_pool_drain(pool, SPDL_SECONDS(15)), SPDL_OK);
    CHECK_EQ(ran, 1);
    CHECK_EQ(spdl_pipeline_stop(idle, SPDL_FOREVER), SPDL_OK);
    test_join(thread);
    spdl_pipeline_destroy(idle);
    spdl_pipeline_destroy(busy);
    spdl_pool_destroy(pool);
    CHECK_EQ(alive, 0);
}

/* A place that was taken when the wait began is tried again. */
static void consumers_share_one_place(void) {
    const spdl_pipeline_desc desc = { .pool = pool_of(0, 1), .next_works_ns = SPDL_FOREVER };
    spdl_pipeline *p[3];
    test_thread thread[3];
    for (int i = 0; i < 3; ++i) {
        REQUIRE(spdl_pipeline_create(&p[i], &desc, SPDL_STAGES(
            ITEMS(200), SPDL_PIPE(work), SPDL_SINK(2))) == SPDL_OK);
        REQUIRE(test_thread_start(&thread[i], take_200, p[i]));
    }
    for (int i = 0; i < 3; ++i) {
        test_join(thread[i]);
        spdl_pipeline_destroy(p[i]);
    }
    spdl_pool_destroy(desc.pool);
    CHECK_EQ(alive, 0);
}

/* --- stops and failures --- */

SPDL_FN(fails_at_100, int, int) {
    if (*in == 100) return spdl_fail(task, "no more");
    *out = in;
    return SPDL_OK;
}

static void failures_are_the_same(void) {
    for (int guests = 1; guests < 4; ++guests) {
        spdl_pipeline_desc desc = { .pool = pool_of(0, guests) };
        spdl_pipeline *p;
        crew c;
        crew_start(&c, desc.pool, 3, 0);
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            ITEMS(1000), SPDL_PIPE(work, .concurrency = 2),
            SPDL_PIPE(fails_at_100, .concurrency = 3), SPDL_SINK(4))) == SPDL_OK);
        take_all(p, 100, SPDL_E_STAGE);
        spdl_pipeline_destroy(p);
        crew_end(&c);
        spdl_pool_destroy(desc.pool);
        CHECK_EQ(alive, 0);
    }
}

/* Pipelines come and go on a pool where guests come and go. */
static void stop_at_any_time(void) {
    const int rounds = TEST_SANITIZED ? 100 : 400;
    chaos_seed = test_seed();
    for (int workers = 0; workers < 2; ++workers) {
        spdl_pool *pool = pool_of(workers, 2);
        const spdl_pipeline_desc desc = { .pool = pool, .logger = { on_log, NULL } };
        crew c;
        crew_start(&c, pool, 3, 0);
        for (int round = 0; round < rounds; ++round) {
            spdl_pipeline *p[2];
            for (int i = 0; i < 2; ++i)
                REQUIRE(spdl_pipeline_create(&p[i], &desc, SPDL_STAGES(
                    ITEMS(50, .continuous = true), SPDL_PIPE(work, .concurrency = 3),
                    SPDL_SINK(1 + round % 4))) == SPDL_OK);
            for (int i = 0; i < round % 13; ++i) {
                int *item;
                REQUIRE(SPDL_NEXT(p[i % 2], &item, SPDL_FOREVER) == SPDL_OK);
                item_free(item);
            }
            if (round % 3 == 0) CHECK_EQ(spdl_pipeline_rewind(p[0], 0, SPDL_FOREVER), SPDL_OK);
            for (int i = 0; i < 3 && round % 3 == 0; ++i) {
                int *item;
                REQUIRE(SPDL_NEXT(p[0], &item, SPDL_FOREVER) == SPDL_OK);
                CHECK_EQ(*item, i);
                item_free(item);
            }
            for (int i = 0; i < 2; ++i) spdl_pipeline_destroy(p[i]);
            CHECK_EQ(get(&alive), 0);
        }
        crew_end(&c);
        spdl_pool_destroy(pool);
    }
    chaos_seed = 0;
}

/* Lets go of no item but 2; the first call lasts until main lets it end. */
SPDL_FN(only_2, int, int) {
    hold *h = (hold *)spdl_ctx(task);
    if (*in == 0) {
        set(&h->inside, 1);
        while (!get(&h->go)) test_sleep_us(100);
    }
    *out = in;
    return *in == 2 ? SPDL_OK : SPDL_SKIP;
}

static void wait_job(void *arg, int worker, void *local) {
    (void)worker;
    (void)local;
    while (!get((int *)arg)) test_sleep_us(100);
}

static void *run_briefly(void *arg) {
    hold *h = (hold *)arg;
    spdl_result result;
    do result = spdl_pool_run(h->pool, 1000000);
    while (!get(&h->inside)); /* the budget was over before the first call began */
    CHECK(result == SPDL_OK || result == SPDL_EMPTY); /* the worker was quicker */
    return NULL;
}

/* The worker sleeps, as there is nothing it could do, when the guest goes and leaves the rest to
   it: nobody else would wake it for a row in the middle. */
static void what_a_guest_leaves_wakes_a_worker(void) {
    spdl_pipeline_desc desc = { .pool = pool_of(1, 1) };
    hold h = { .pool = desc.pool };
    test_thread thread;
    spdl_pipeline *p;
    int *item, busy = 0;
    REQUIRE(spdl_pool_submit(desc.pool, wait_job, &busy, 0) == SPDL_OK);
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_FEED(int, .buffer_size = 4, .free_item = item_free), SPDL_PIPE(only_2, .ctx = &h),
        SPDL_PIPE(work), SPDL_SINK(2))) == SPDL_OK);
    while (spdl_ring_count(desc.pool->jobs) > 0) test_sleep_us(100); /* the worker has it */
    for (int i = 0; i < 3; ++i) {
        item = (int *)malloc(sizeof *item);
        REQUIRE(item != NULL);
        *item = i;
        add(&alive, 1);
        REQUIRE(spdl_pipeline_push(p, item, 0) == SPDL_OK);
    }
    spdl_pipeline_push_end(p);
    REQUIRE(test_thread_start(&thread, run_briefly, &h));
    await(&h.inside, 1);
    set(&busy, 1);
    while ((spdl__load32(&desc.pool->beacon.sleepers) & SPDL__ASLEEP) == 0) test_sleep_us(100);
    test_sleep_us(2000); /* the guest's budget is over */
    set(&h.go, 1);
    REQUIRE(SPDL_NEXT(p, &item, SPDL_FOREVER) == SPDL_OK);
    CHECK_EQ(*item, 2);
    item_free(item);
    test_join(thread);
    spdl_pipeline_destroy(p);
    spdl_pool_destroy(desc.pool);
    CHECK_EQ(alive, 0);
}

static void workers_and_guests_take_turns(void) {
    chaos_seed = test_seed();
    for (int round = 0; round < 200; ++round) {
        spdl_pipeline_desc desc = { .pool = pool_of(1, 1) };
        spdl_pipeline *p;
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            ITEMS(40), SPDL_PIPE(work, .concurrency = 2), SPDL_SINK(2))) == SPDL_OK);
        (void)spdl_pool_run(desc.pool, round % 20 * 1000);
        take_all(p, 40, SPDL_END);
        spdl_pipeline_destroy(p);
        spdl_pool_destroy(desc.pool);
        CHECK_EQ(alive, 0);
    }
    chaos_seed = 0;
}

/* --- destroy does not wait for a thread of the pool that is elsewhere --- */

typedef enum place { A_JOB, A_CALL, A_PROFILER } place;

/* A call of one pipeline. Its thread goes on to a job, to a call of another pipeline or to the
   profiler, which waits for the destroy of the first one. */
typedef struct elsewhere {
    place place;
    spdl_pool *pool;
    spdl_pipeline *other;
    int called, there, destroyed, late;
} elsewhere;

static void elsewhere_wait(elsewhere *e) {
    const uint64_t start = spdl_time_ns();
    set(&e->there, 1);
    while (!get(&e->destroyed) && !get(&e->late)) {
        if (spdl_time_ns() - start > 10000000000u) set(&e->late, 1);
        test_sleep_us(100);
    }
}

static void elsewhere_job(void *arg, int worker, void *local) {
    (void)worker;
    (void)local;
    elsewhere_wait((elsewhere *)arg);
}

static void elsewhere_event(spdl_event event, const char *name, uint64_t number, void *user) {
    elsewhere *e = (elsewhere *)user;
    (void)name;
    (void)number;
    if (event == SPDL_EVENT_WAIT_BEGIN && get(&e->called) && !get(&e->there)) elsewhere_wait(e);
}

SPDL_FN(waits_there, int, int) {
    elsewhere_wait((elsewhere *)spdl_ctx(task));
    *out = in;
    return SPDL_OK;
}

SPDL_FN(starts_it, int, int) {
    elsewhere *e = (elsewhere *)spdl_ctx(task);
    static int item;
    *out = in;
    if (e->place == A_CALL) CHECK_EQ(spdl_pipeline_push(e->other, &item, 0), SPDL_OK);
    if (e->place == A_JOB) CHECK_EQ(spdl_pool_submit(e->pool, elsewhere_job, e, 0), SPDL_OK);
    set(&e->called, 1);
    return SPDL_OK;
}

/* There is one thread: a worker or a guest. */
static void destroy_while_it_is_in(place where, bool guest) {
    elsewhere e = { .place = where };
    spdl_pool_desc pool_desc = { .workers = !guest, .guests = guest };
    spdl_pipeline_desc desc = { 0 };
    spdl_pipeline *p;
    crew c;
    pool_desc.profiler.event_fn = where == A_PROFILER ? elsewhere_event : NULL;
    pool_desc.profiler.user = &e;
    REQUIRE(spdl_pool_create(&e.pool, &pool_desc) == SPDL_OK);
    desc.pool = e.pool;
    if (where == A_CALL)
        REQUIRE(spdl_pipeline_create(&e.other, &desc, SPDL_STAGES(
            SPDL_FEED(int), SPDL_PIPE(waits_there, .ctx = &e), SPDL_SINK(1))) == SPDL_OK);
    crew_start(&c, e.pool, guest, 1000000);
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        ITEMS(1), SPDL_PIPE(starts_it, .ctx = &e), SPDL_SINK(1))) == SPDL_OK);
    await(&e.there, 1);
    spdl_pipeline_destroy(p);
    set(&e.destroyed, 1);
    CHECK_EQ(get(&e.late), 0);
    CHECK_EQ(alive, 0);
    spdl_pipeline_destroy(e.other);
    crew_end(&c);
    spdl_pool_destroy(e.pool);
}

static void destroy_waits_for_no_job(void) {
    for (int guest = 0; guest < 2; ++guest) destroy_while_it_is_in(A_JOB, guest);
}

static void destroy_waits_for_no_other_pipeline(void) {
    for (int guest = 0; guest < 2; ++guest) destroy_while_it_is_in(A_CALL, guest);
}

static void destroy_waits_for_no_profiler(void) { destroy_while_it_is_in(A_PROFILER, false); }

static void desc_is_checked(void) {
    static const int bad[][2] = { { 0, 0 }, { 1, -1 }, { -1, 1 }, { 0, 257 }, { 200, 57 } };
    for (int i = 0; i < 5; ++i) {
        spdl_error error;
        const spdl_pool_desc desc = { .workers = bad[i][0], .guests = bad[i][1], .error = &error };
        spdl_pool *pool;
        CHECK_EQ(spdl_pool_create(&pool, &desc), SPDL_E_INVALID);
        CHECK(strstr(error.text, "must be") != NULL);
    }
    spdl_pool_destroy(pool_of(0, 256));
}

/* --- profilers --- */

typedef struct seen {
    int threads, ended, tasks, jobs, waits, nexts, bad;
} seen;

static __thread spdl_event open_event[8]; /* of this thread */
static __thread int depth;

static void on_event(spdl_event event, const char *name, uint64_t number, void *user) {
    seen *s = (seen *)user;
    const bool ends = event % 2 != 0;
    if (!ends) {
        open_event[depth++ % 8] = event;
    } else if (depth == 0 || open_event[--depth % 8] != event - 1) {
        add(&s->bad, 1);
    }
    if (event == SPDL_EVENT_THREAD_BEGIN) add(&s->threads, 1);
    if (event == SPDL_EVENT_THREAD_END) add(&s->ended, 1);
    if (event == SPDL_EVENT_TASK_BEGIN) add(strcmp(name, "pool") == 0 ? &s->jobs : &s->tasks, 1);
    if (event == SPDL_EVENT_TASK_BEGIN && strcmp(name, "work") == 0 && number >= 200)
        add(&s->bad, 1);
    if (event == SPDL_EVENT_WAIT_BEGIN) add(strcmp(name, "next") == 0 ? &s->nexts : &s->waits, 1);
    if (event == SPDL_EVENT_WAIT_BEGIN && strcmp(name, "pool") == 0 && number >= 2)
        add(&s->bad, 1);
}

static void profilers_see_all(void) {
    seen s = { 0 }, own = { 0 }, inside = { 0 };
    spdl_pool_desc pool_desc = { .workers = 2, .guests = 1, .name = "pool" };
    spdl_pipeline_desc desc = { 0 }, alone = { 0 };
    spdl_pipeline *p;
    int jobs = 0;
    crew c;
    pool_desc.profiler.event_fn = on_event;
    pool_desc.profiler.user = &s;
    REQUIRE(spdl_pool_create(&desc.pool, &pool_desc) == SPDL_OK);
    while (get(&s.waits) < 2) test_sleep_us(100); /* both workers have gone to sleep */
    crew_start(&c, desc.pool, 1, 20000);
    for (int i = 0; i < 2; ++i) { /* with the pool's, and with its own */
        if (i == 1) {
            desc.profiler.event_fn = on_event;
            desc.profiler.user = &own;
        }
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            ITEMS(200), SPDL_PIPE(work, .concurrency = 2), SPDL_SINK(3))) == SPDL_OK);
        take_all(p, 200, SPDL_END);
        spdl_pipeline_destroy(p);
    }
    for (int i = 0; i < 10; ++i)
        CHECK_EQ(spdl_pool_submit(desc.pool, count_job, &jobs, SPDL_FOREVER), SPDL_OK);
    crew_end(&c);
    spdl_pool_destroy(desc.pool);
    CHECK_EQ(s.bad + own.bad, 0);
    CHECK_EQ(s.threads, 2);
    CHECK_EQ(s.ended, 2);
    CHECK_EQ(s.jobs, 10);
    CHECK_EQ(s.tasks, 401); /* the source's last call has no item */
    CHECK_EQ(own.tasks, 401);
    CHECK(s.nexts > 0 && own.nexts > 0);
    CHECK_EQ(own.threads + own.waits + own.jobs, 0);
    alone.profiler.event_fn = on_event;
    alone.profiler.user = &inside;
    for (int workers = 0; workers < 2; ++workers) { /* a pool of its own, or none */
        alone.workers = TEST_WORKERS(workers);
        memset(&inside, 0, sizeof inside);
        REQUIRE(spdl_pipeline_create(&p, &alone, SPDL_STAGES(
            ITEMS(200), SPDL_PIPE(work), SPDL_SINK(3))) == SPDL_OK);
        take_all(p, 200, SPDL_END);
        spdl_pipeline_destroy(p);
        CHECK_EQ(inside.tasks, 401);
        CHECK_EQ(inside.threads, workers);
        CHECK_EQ(inside.ended, workers);
        CHECK_EQ(inside.bad, 0);
    }
    CHECK_EQ(alive, 0);
}

TEST_TABLE(guests) {
    TEST_CASE(guests_do_all_the_work),
    TEST_CASE(one_thread_is_guest_and_trainer),
    TEST_CASE(guests_answer_pushes),
    TEST_CASE(no_call_begins_after_the_budget),
    TEST_CASE(no_budget_only_looks),
    TEST_CASE(as_many_guests_as_places),
    TEST_CASE(jobs_wait_for_guests_or_the_end),
    TEST_CASE(destroy_waits_for_guests),
    TEST_CASE(stop_and_destroy_inside),
    TEST_CASE(places_have_hooks),
    TEST_CASE(init_that_fails_on_a_place),
    TEST_CASE(one_pipeline_too_many),
    TEST_CASE(a_consumer_leaves_its_place_to_sleep),
    TEST_CASE(an_idle_consumer_has_no_place),
    TEST_CASE(consumers_share_one_place),
    TEST_CASE(failures_are_the_same),
    TEST_CASE(stop_at_any_time),
    TEST_CASE(what_a_guest_leaves_wakes_a_worker),
    TEST_CASE(workers_and_guests_take_turns),
    TEST_CASE(destroy_waits_for_no_job),
    TEST_CASE(destroy_waits_for_no_other_pipeline),
    TEST_CASE(destroy_waits_for_no_profiler),
    TEST_CASE(desc_is_checked),
    TEST_CASE(profilers_see_all),
    TEST_END,
};
