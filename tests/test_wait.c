/* The wait rule: a turn that took long bars turns for a multiple of that time, and they come back.
   The turns of this file are as long as `slow_us` says, by the test point inside of a turn. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
static void wait_point(const char *id);
#define SPDL_TEST_POINT(id) wait_point(id)
#include "../spdl.h"
#include "test.h"

static uint64_t slow_ns;  /* how long a turn takes, besides what the system needs */
static uint64_t turns;    /* that were given */
static spdl_ring *pushed; /* gets an item in each turn; or NULL */
static int pushes;        /* so many */

static void wait_point(const char *id) {
    void *item = NULL;
    uint64_t until;
    if (strcmp(id, "turn") != 0) return;
    until = spdl_time_ns() + __atomic_load_n(&slow_ns, __ATOMIC_RELAXED);
    __atomic_add_fetch(&turns, 1, __ATOMIC_RELAXED);
    for (int i = 0; pushed != NULL && i < pushes; ++i)
        CHECK_EQ(spdl_ring_try_push(pushed, &item), SPDL_OK);
    while (spdl_time_ns() < until) test_sleep_us(20);
}

static void turns_begin(uint64_t ns) {
    __atomic_store_n(&slow_ns, ns, __ATOMIC_RELAXED);
    __atomic_store_n(&turns, 0, __ATOMIC_RELAXED);
}

/* Each of these threads may be in a turn when another one bars them. */
static void check_turns(uint64_t since, uint64_t threads) {
    const uint64_t bar = SPDL__TURN_BARS * slow_ns;
    const uint64_t given = __atomic_load_n(&turns, __ATOMIC_RELAXED);
    const uint64_t most = threads * ((spdl_time_ns() - since) / bar + 2);
    CHECK(given >= 1);
    CHECK(given <= most);
}

static void a_slow_turn_bars_turns_for_a_while(void) {
    uint64_t barred = 0, from, until;
    turns_begin(1000000);
    from = spdl_time_ns();
    CHECK(spdl__turn(&barred));
    CHECK(barred >= from + (SPDL__TURN_BARS + 1) * slow_ns);
    barred = until = spdl_time_ns() + 50000000; /* however late this thread is here */
    CHECK(!spdl__turn(&barred) || spdl_time_ns() >= until);
    while (!spdl__turn(&barred)) test_sleep_us(1000);
    CHECK(spdl_time_ns() >= until);
    CHECK(barred > until); /* it was slow, too */
    CHECK(turns >= 2);
}

static void a_quick_turn_bars_none(void) {
    int quick = 0;
    turns_begin(0);
    for (int i = 0; i < 200000 && quick < 20; ++i) {
        const uint64_t before = spdl_time_ns();
        uint64_t barred = 1;
        CHECK(spdl__turn(&barred));
        if (spdl_time_ns() - before > SPDL__TURN_LONG_NS) continue;
        CHECK_EQ(barred, 1);
        ++quick;
    }
    CHECK(quick > 0);
}

/* As many pauses and turns as may be, unless turns are barred. */
static void a_barred_wait_sleeps_after_its_pauses(void) {
    uint64_t barred = spdl_time_ns() + 3600000000000u;
    int round = 0, breaths = 0;
    turns_begin(0);
    while (spdl__backoff(&round, 5, &barred)) ++breaths;
    CHECK_EQ(breaths, SPDL_SPINS);
    CHECK_EQ(turns, 0);
    for (barred = 0, round = breaths = 0; spdl__backoff(&round, 5, &barred); ++breaths) barred = 0;
    CHECK_EQ(breaths, SPDL_SPINS + 5);
    CHECK_EQ(turns, 5);
}

/* --- those who wait --- */

static uint64_t job_ended;

static void short_job(void *arg, int worker, void *local) {
    (void)arg, (void)worker, (void)local;
    __atomic_add_fetch(&job_ended, 1, __ATOMIC_ACQ_REL);
}

static void workers_stop_giving_turns(void) {
    spdl_pool_desc desc = { .workers = 2 };
    spdl_pool *pool;
    uint64_t since;
    REQUIRE(spdl_pool_create(&pool, &desc) == SPDL_OK);
    turns_begin(2000000);
    since = spdl_time_ns();
    for (uint64_t i = 1; i <= 50; ++i) {
        CHECK_EQ(spdl_pool_submit(pool, short_job, NULL, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(spdl_pool_drain(pool, SPDL_FOREVER), SPDL_OK);
        test_sleep_us(300); /* they sleep again */
    }
    CHECK_EQ(job_ended, 50);
    check_turns(since, 2);
    turns_begin(0);
    spdl_pool_destroy(pool);
}

typedef struct ends {
    spdl_ring *there, *back;
} ends;

static void *ring_echo(void *arg) {
    const ends *e = (const ends *)arg;
    void *item;
    while (spdl_ring_pop(e->there, &item, SPDL_FOREVER) == SPDL_OK)
        CHECK_EQ(spdl_ring_push(e->back, &item, SPDL_FOREVER), SPDL_OK);
    return NULL;
}

static void rings_stop_giving_turns(void) {
    spdl_ring_desc desc = { .capacity = 4 };
    test_thread thread;
    uint64_t since;
    ends e;
    REQUIRE(spdl_ring_create(&e.there, &desc) == SPDL_OK);
    REQUIRE(spdl_ring_create(&e.back, &desc) == SPDL_OK);
    REQUIRE(test_thread_start(&thread, ring_echo, &e));
    turns_begin(2000000);
    since = spdl_time_ns();
    for (uintptr_t i = 0; i < 200; ++i) {
        void *item = (void *)i;
        CHECK_EQ(spdl_ring_push(e.there, &item, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(spdl_ring_pop(e.back, &item, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ((uintptr_t)item, i);
    }
    check_turns(since, 2); /* one waits on each */
    turns_begin(0);
    spdl_ring_close(e.there);
    test_join(thread);
    spdl_ring_destroy(e.there, NULL, NULL);
    spdl_ring_destroy(e.back, NULL, NULL);
}

/* Other threads of the ring had the turn, if much has moved in it. */
static void a_turn_of_the_ring_is_not_lost(void) {
    static const spdl_ring_mode modes[] = { SPDL_RING_MPMC, SPDL_RING_SPSC };
    for (int i = 0; i < 2; ++i) {
        spdl_ring_desc desc = { .capacity = 64, .mode = modes[i] };
        int round = SPDL_SPINS;
        spdl_ring *ring;
        REQUIRE(spdl_ring_create(&ring, &desc) == SPDL_OK);
        turns_begin(200000);
        pushed = ring;
        pushes = SPDL__RING_MOVES;
        CHECK(spdl__ring_backoff(ring, &round));
        CHECK_EQ(ring->barred, 0);
        pushes = SPDL__RING_MOVES - 1;
        CHECK(spdl__ring_backoff(ring, &round));
        CHECK(ring->barred > 0);
        pushed = NULL;
        turns_begin(0);
        spdl_ring_destroy(ring, NULL, NULL);
    }
}

SPDL_FN(numbers, void, void) {
    if (spdl_sequence(task) == 200) return SPDL_END;
    *out = (void *)(uintptr_t)(spdl_sequence(task) + 1);
    test_sleep_us(200); /* all others sleep again and again */
    return SPDL_OK;
}

SPDL_FN(pass, void, void) {
    (void)task;
    *out = in;
    return SPDL_OK;
}

static void pipelines_stop_giving_turns(void) {
    for (int next_works = 0; next_works < 2; ++next_works) {
        spdl_pipeline_desc desc = { .workers = 2 - next_works };
        spdl_pipeline *p;
        uint64_t since;
        void *item;
        uintptr_t at = 0;
        desc.next_works_ns = next_works ? SPDL_FOREVER : 0;
        turns_begin(2000000);
        since = spdl_time_ns();
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_SOURCE(numbers, .threads = 1, .buffer_size = 2), SPDL_PIPE(pass, .concurrency = 2),
            SPDL_SINK(3))) == SPDL_OK);
        while (spdl_pipeline_next(p, &item, SPDL_FOREVER) == SPDL_OK)
            CHECK_EQ((uintptr_t)item, ++at);
        CHECK_EQ(at, 200);
        check_turns(since, 4); /* workers, consumer, producer */
        turns_begin(0);
        spdl_pipeline_destroy(p);
    }
}

TEST_TABLE(wait) {
    TEST_CASE(a_slow_turn_bars_turns_for_a_while),
    TEST_CASE(a_quick_turn_bars_none),
    TEST_CASE(a_barred_wait_sleeps_after_its_pauses),
    TEST_CASE(workers_stop_giving_turns),
    TEST_CASE(rings_stop_giving_turns),
    TEST_CASE(a_turn_of_the_ring_is_not_lost),
    TEST_CASE(pipelines_stop_giving_turns),
    TEST_END,
};
