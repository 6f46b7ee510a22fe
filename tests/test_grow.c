/* Rows with SPDL_ALL that get more calls, and the pool more threads, while their calls sleep. */
static double least_gain; /* rate that a trial must reach; 0: each helps */
#define SPDL__GROWTH_NS 300000
#define SPDL__GROWTH_CALLS 2
#define SPDL__GROWTH_EACH 1
#define SPDL__GROWTH_MEAN 50000
#define SPDL__GROWTH_ASLEEP 0.5
#define SPDL__GROWTH_MOST 0.9
#define SPDL__GROWTH_GAIN least_gain
#define SPDL__GROWTH_HOLD 1000000
#define ITEMS_PRIVATE
#include "flow.h"

#define SLEEPS(...) \
    SPDL_PIPE(follow, .concurrency = SPDL_ALL, .free_item = item_free, .ctx = __VA_ARGS__)

static int first_calls(void) { return spdl_cores() > 2 ? spdl_cores() : 2; }

/* Returns true where threads tell how long they waited for a processor. */
static bool system_tells(void) {
    spdl__os_file file = SPDL__NO_FILE;
    uint64_t wait = SPDL__NEVER;
    spdl__os_thread_times(&file, NULL, &wait);
    (void)spdl__os_file_close(file);
    return wait != SPDL__NEVER;
}

#define NEEDS_GROWTH()                                                                             \
    do {                                                                                           \
        if (!system_tells()) TEST_SKIP("the system does not tell how long threads wait");          \
        if (first_calls() >= SPDL__MAX_CALLS) TEST_SKIP("as many processors as calls at most");    \
    } while (0)

static spdl_pipeline *start_with(spdl_pipeline_desc *desc, const spdl_stage *rows, size_t count) {
    spdl_pipeline *p = NULL;
    if (desc->logger.log_fn == NULL) desc->logger.log_fn = log_nothing;
    REQUIRE(spdl_pipeline_create(&p, desc, rows, count) == SPDL_OK);
    return p;
}

#define DEFAULTS(...) start_with(&(spdl_pipeline_desc){ 0 }, SPDL_STAGES(__VA_ARGS__))

static int most_of(const script *s) { return __atomic_load_n(&s->most, __ATOMIC_RELAXED); }

static int workers_of(const spdl_pipeline *p) {
    static spdl_stats stats;
    spdl_pipeline_stats(p, &stats);
    return stats.workers;
}

/* Takes items until the row may have so many calls, or 20 seconds have passed. */
static long take_until(spdl_pipeline *p, long from, int calls) {
    const uint64_t start = spdl_time_ns();
    while ((stats_of(p, 1).concurrency < calls || workers_of(p) < calls - 1) &&
           spdl_time_ns() - start < 20000000000u)
        from += take_from(p, from, 10, SPDL_OK);
    return from;
}

static void calls_that_sleep_get_threads(void) {
    script s = { .sleep_us = 2000 };
    spdl_pipeline *p;
    long taken;
    NEEDS_GROWTH();
    least_gain = 0;
    p = DEFAULTS(COUNT_TO(-1), SLEEPS(&s), SPDL_SINK(8));
    CHECK_EQ(stats_of(p, 1).concurrency, first_calls());
    CHECK_EQ(workers_of(p), first_calls() - 1);
    taken = take_until(p, 0, SPDL__MAX_CALLS);
    CHECK_EQ(stats_of(p, 1).concurrency, SPDL__MAX_CALLS);
    CHECK_EQ(workers_of(p), SPDL__MAX_CALLS - 1);
    taken += take_from(p, taken, 1000, SPDL_OK);
    CHECK(most_of(&s) > 2 * first_calls());
    CHECK(most_of(&s) <= SPDL__MAX_CALLS);
    CHECK(stats_of(p, 1).tasks >= (uint64_t)taken);
    DONE(p);
}

/* Nothing is lost, and all is counted. */
static void all_calls_are_counted(void) {
    script s = { .sleep_us = 500, .every = 7, .rest = 3, .result = SPDL_SKIP };
    spdl_pipeline *p;
    NEEDS_GROWTH();
    least_gain = 0;
    p = DEFAULTS(COUNT_TO(700), SLEEPS(&s), SPDL_SINK(8));
    CHECK_EQ(take_from_any(p), 600);
    DONE(p);
    p = DEFAULTS(COUNT_TO(700), SLEEPS(&s, .output_order = SPDL_ORDER_COMPLETION), SPDL_SINK(8));
    CHECK_EQ(take_from_any(p), 600);
    CHECK_EQ(stats_of(p, 1).tasks, 700);
    CHECK_EQ(stats_of(p, 1).skips, 100);
    DONE(p);
}

static void calls_that_compute_get_none(void) {
    script s = { 0 };
    spdl_pipeline *p;
    NEEDS_GROWTH();
    least_gain = 0;
    p = DEFAULTS(COUNT_TO(100000), SLEEPS(&s), SPDL_SINK(8));
    CHECK_EQ(take_from(p, 0, 200000, SPDL_END), 100000);
    CHECK_EQ(stats_of(p, 1).concurrency, first_calls());
    CHECK_EQ(workers_of(p), first_calls() - 1);
    DONE(p);
}

/* A trial that does not help is taken back, and the next one waits longer. */
static void what_does_not_help_is_taken_back(void) {
    script s = { .sleep_us = 1000 };
    spdl_pipeline *p;
    uint32_t fails = 0;
    NEEDS_GROWTH();
    least_gain = 1e9;
    p = DEFAULTS(COUNT_TO(-1), SLEEPS(&s), SPDL_SINK(8));
    for (long taken = 0; fails < 3 && taken < 20000;) {
        taken += take_from(p, taken, 10, SPDL_OK);
        spdl__lock(&p->pool->growing, &p->pool->idle);
        fails = p->node[1].growth->fails;
        spdl__unlock(&p->pool->growing, &p->pool->idle);
        CHECK(stats_of(p, 1).concurrency <= 4 * first_calls());
    }
    CHECK_EQ(fails, 3);
    spdl_pipeline_stop(p, SPDL_FOREVER);
    CHECK(stats_of(p, 1).concurrency <= 4 * first_calls());
    DONE(p);
}

/* What is written bounds the calls, and nothing grows under a trace, a doctor or with .init. */
static spdl_result no_local(void *ctx, int worker, void **local) {
    (void)ctx;
    (void)worker;
    *local = NULL;
    return SPDL_OK;
}

static void nothing_grows_where_numbers_are_written(void) {
    enum { WORKERS, CONCURRENCY, INIT, TRACE, DOCTOR, CPUS, POOL, KINDS };
    const int cpu = 0;
    least_gain = 0;
    for (int kind = 0; kind < KINDS; ++kind) {
        script s = { .sleep_us = 500 };
        const spdl_doctor_desc doctor = { .seconds = 1, .quiet = true };
        spdl_pipeline_desc desc = { .workers = kind == WORKERS ? 2 : 0 };
        spdl_stage row = SLEEPS(&s);
        spdl_pool *pool = NULL;
        spdl_pipeline *p;
        int most;
        if (kind == CONCURRENCY) row.concurrency = first_calls();
        if (kind == INIT) row.init = no_local;
        if (kind == TRACE) desc.trace = "/dev/null";
        if (kind == DOCTOR) desc.doctor = &doctor;
        if (kind == CPUS) desc.policy.cpus = &cpu, desc.policy.cpu_count = 1;
        if (kind == POOL) desc.pool = pool = pool_of(2);
        if ((kind == CPUS || kind == TRACE) && !TEST_LINUX) continue;
        p = start_with(&desc, SPDL_STAGES(COUNT_TO(600), row, SPDL_SINK(8)));
        most = stats_of(p, 1).concurrency;
        CHECK_EQ(take_from(p, 0, 1000, SPDL_END), 600);
        CHECK_EQ(stats_of(p, 1).concurrency, most);
        CHECK(most_of(&s) <= most);
        CHECK(p->open == 0 || kind == DOCTOR);
        DONE(p);
        spdl_pool_destroy(pool);
    }
}

static void a_written_limit_stays(void) {
    script s = { .sleep_us = 1000 };
    spdl_pipeline *p;
    long taken;
    NEEDS_GROWTH();
    least_gain = 0;
    p = DEFAULTS(COUNT_TO(-1), SLEEPS(&s), SPDL_SINK(8));
    taken = take_until(p, 0, 2 * first_calls());
    CHECK(stats_of(p, 1).concurrency > first_calls());
    REQUIRE(spdl_pipeline_set_concurrency(p, 1, 1) == SPDL_OK);
    taken += take_from(p, taken, 200, SPDL_OK); /* those that ran have ended */
    __atomic_store_n(&s.most, 0, __ATOMIC_RELAXED);
    taken += take_from(p, taken, 200, SPDL_OK);
    CHECK_EQ(most_of(&s), 1);
    CHECK_EQ(stats_of(p, 1).concurrency, 1);
    CHECK_EQ(spdl_pipeline_set_concurrency(p, 1, SPDL__MAX_CALLS + 1), SPDL_E_LIMIT);
    CHECK_EQ(spdl_pipeline_set_concurrency(p, 1, 2 * first_calls()), SPDL_OK);
    CHECK_EQ(stats_of(p, 1).concurrency, 2 * first_calls());
    DONE(p);
}

/* A number that is set before the row has grown gets its threads. */
static void a_written_limit_gets_threads(void) {
    script s = { .sleep_us = 1000 };
    const int calls = 3 * first_calls() < SPDL__MAX_CALLS ? 3 * first_calls() : SPDL__MAX_CALLS;
    spdl_pipeline *p;
    NEEDS_GROWTH();
    least_gain = 1e9; /* no trial helps */
    p = DEFAULTS(COUNT_TO(-1), SLEEPS(&s), SPDL_SINK(8));
    REQUIRE(spdl_pipeline_set_concurrency(p, 1, calls) == SPDL_OK);
    (void)take_until(p, 0, calls);
    CHECK_EQ(stats_of(p, 1).concurrency, calls);
    CHECK_EQ(workers_of(p), calls - 1);
    DONE(p);
}

/* The system refuses threads after some. What runs goes on. */
static void refused_threads_end_the_growth(void) {
    static const int allowed[] = { 0, 1, 5 };
    NEEDS_GROWTH();
    least_gain = 0;
    for (int i = 0; i < 3; ++i) {
        script s = { .sleep_us = 500 };
        spdl_pipeline *p = DEFAULTS(COUNT_TO(900), SLEEPS(&s), SPDL_SINK(8));
        __atomic_store_n(&threads_left, allowed[i], __ATOMIC_RELEASE);
        CHECK_EQ(take_from(p, 0, 1000, SPDL_END), 900);
        CHECK_EQ(workers_of(p), first_calls() - 1 + allowed[i]);
        CHECK(most_of(&s) <= first_calls() + allowed[i]);
        CHECK(p->pool->refused);
        DONE(p);
        __atomic_store_n(&threads_left, -1, __ATOMIC_RELEASE);
    }
}

/* No memory for the task of a thread ends the growth, too. */
static int blocks_left;

static void *alloc_some(size_t bytes, size_t align, void *user) {
    (void)user;
    if (__atomic_load_n(&blocks_left, __ATOMIC_ACQUIRE) == 0) return NULL;
    if (__atomic_load_n(&blocks_left, __ATOMIC_ACQUIRE) > 0)
        __atomic_sub_fetch(&blocks_left, 1, __ATOMIC_ACQ_REL);
    return test_memory(align, bytes);
}

static void free_some(void *memory, size_t bytes, void *user) {
    (void)bytes;
    (void)user;
    if (memory != NULL) test_memory_free(memory);
}

static void refused_memory_ends_the_growth(void) {
    NEEDS_GROWTH();
    least_gain = 0;
    for (int left = 0; left < 4; ++left) {
        script s = { .sleep_us = 500 };
        spdl_pipeline_desc desc = { .allocator = { alloc_some, free_some, NULL } };
        spdl_pipeline *p;
        blocks_left = -1;
        p = start_with(&desc, SPDL_STAGES(COUNT_TO(900), SLEEPS(&s), SPDL_SINK(8)));
        __atomic_store_n(&blocks_left, left, __ATOMIC_RELEASE);
        CHECK_EQ(take_from(p, 0, 1000, SPDL_END), 900);
        CHECK(workers_of(p) <= first_calls() - 1 + left / 2);
        blocks_left = -1;
        DONE(p);
    }
}

/* Next leaves such a row to the workers: a call there would make it late. */
typedef struct by_thread {
    uint64_t consumer;
    int all, in_next;
} by_thread;

SPDL_FN(who_calls, item, item) {
    by_thread *t = (by_thread *)spdl_ctx(task);
    __atomic_add_fetch(&t->all, 1, __ATOMIC_RELAXED);
    if (t->consumer == test_thread_id()) __atomic_add_fetch(&t->in_next, 1, __ATOMIC_RELAXED);
    sleep_us(1000);
    *out = in;
    return SPDL_OK;
}

static void next_leaves_it_to_the_workers(void) {
    by_thread t = { .consumer = test_thread_id() };
    spdl_pipeline *p;
    long taken;
    NEEDS_GROWTH();
    least_gain = 0;
    p = DEFAULTS(COUNT_TO(-1),
                 SPDL_PIPE(who_calls, .ctx = &t, .concurrency = SPDL_ALL), SPDL_SINK(8));
    taken = take_until(p, 0, SPDL__MAX_CALLS);
    __atomic_store_n(&t.in_next, 0, __ATOMIC_RELAXED);
    taken += take_from(p, taken, 500, SPDL_OK);
    CHECK_EQ(__atomic_load_n(&t.in_next, __ATOMIC_RELAXED), 0);
    CHECK(__atomic_load_n(&t.all, __ATOMIC_RELAXED) >= taken);
    DONE(p);
}

/* Stops, rewinds and destroys at all moments of the growth. */
static uint64_t dice;

static void *stop_soon(void *of) {
    sleep_us((int64_t)(test_random(&dice) % 8000));
    CHECK_EQ(spdl_pipeline_stop((spdl_pipeline *)of, SPDL_FOREVER), SPDL_OK);
    return NULL;
}

static void it_ends_at_any_moment(void) {
    least_gain = 0;
    dice = test_seed();
    for (int i = 0; i < (TEST_SANITIZED ? 40 : 120); ++i) {
        script s = { .sleep_us = 300 };
        const long first = (long)(test_random(&dice) % 120);
        spdl_pipeline *p = DEFAULTS(COUNT_TO(2000), SLEEPS(&s), SPDL_SINK(8));
        test_thread stopper;
        if (i % 4 == 0) stopper = thread_of(stop_soon, p);
        if (i % 4 == 0) (void)take_from(p, 0, 5000, SPDL_CLOSED);
        if (i % 4 == 0) test_join(stopper);
        else CHECK_EQ(take_from(p, 0, first, SPDL_OK), first);
        if (i % 4 == 1) CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_FOREVER), SPDL_OK);
        if (i % 4 == 1) CHECK_EQ(take_from(p, 0, 300, SPDL_OK), 300);
        if (i % 4 == 2) CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        DONE(p);
    }
}

/* With one number written there are as many threads, and create has nothing to say. */
static int log_lines;

static void count_lines(spdl_log_level level, const char *text, void *user) {
    (void)level;
    (void)text;
    (void)user;
    ++log_lines;
}

typedef struct meeting {
    int most, calls;
} meeting;

SPDL_FN(meet_all, item, item) {
    meeting *m = (meeting *)spdl_ctx(task);
    const int number = __atomic_fetch_add(&m->calls, 1, __ATOMIC_ACQ_REL);
    await(&m->calls, number / m->most * m->most + m->most);
    *out = in;
    return SPDL_OK;
}

static void one_number_is_enough(void) {
    meeting m = { .most = 24 };
    script other = { 0 };
    spdl_pipeline_desc desc = { .logger = { count_lines, NULL } };
    spdl_pipeline *p;
    log_lines = 0;
    p = start_with(&desc, SPDL_STAGES(COUNT_TO(48), SLEEPS(&other),
                                      SPDL_PIPE(meet_all, .ctx = &m, .concurrency = 24,
                                                .free_item = item_free), SPDL_SINK(48)));
    CHECK_EQ(workers_of(p), first_calls() > 24 ? first_calls() - 1 : 23);
    CHECK_EQ(stats_of(p, 1).concurrency, first_calls()); /* SPDL_ALL: one for each processor */
    CHECK_EQ(take_from(p, 0, 100, SPDL_END), 48);
    CHECK_EQ(log_lines, 0);
    DONE(p);
}

SPDL_FN(defers, item, item) {
    *out = in;
    return SPDL_OK;
}

static void deferred_calls_need_no_threads(void) {
    spdl_pipeline *p = DEFAULTS(COUNT_TO(9), SPDL_PIPE(defers, .concurrency = 100,
                                                       .deferred = true), SPDL_SINK(9));
    CHECK_EQ(workers_of(p), first_calls() - 1);
    CHECK_EQ(take_from(p, 0, 100, SPDL_END), 9);
    DONE(p);
}

TEST_TABLE(grow){
    TEST_CASE(calls_that_sleep_get_threads),
    TEST_CASE(all_calls_are_counted),
    TEST_CASE(calls_that_compute_get_none),
    TEST_CASE(what_does_not_help_is_taken_back),
    TEST_CASE(nothing_grows_where_numbers_are_written),
    TEST_CASE(a_written_limit_stays),
    TEST_CASE(a_written_limit_gets_threads),
    TEST_CASE(refused_threads_end_the_growth),
    TEST_CASE(refused_memory_ends_the_growth),
    TEST_CASE(next_leaves_it_to_the_workers),
    TEST_CASE(it_ends_at_any_moment),
    TEST_CASE(one_number_is_enough),
    TEST_CASE(deferred_calls_need_no_threads),
    TEST_END,
};
