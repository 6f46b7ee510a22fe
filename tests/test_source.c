/* Sources of other kinds: those that block, on a thread of their own, and those that take from
   a next function, as of another pipeline. */
#include "flow.h"

/* --- a source that blocks --- */

/* Items 0 to count - 1, then a call that returns only when `gate` opens. */
typedef struct blocker {
    long count;
    spdl_result last; /* what that call returns; SPDL_OK: one more item */
    int gate, inside, inits, finis;
} blocker;

SPDL_FN(block, void, item) {
    blocker *b = (blocker *)spdl_ctx(task);
    const long value = (long)spdl_sequence(task);
    const bool blocks = value == b->count;
    if (blocks) {
        __atomic_store_n(&b->inside, 1, __ATOMIC_RELEASE);
        await(&b->gate, 1);
        if (b->last == SPDL_E_STAGE) return spdl_fail(task, "too late");
        if (b->last != SPDL_OK) return b->last;
    }
    *out = item_make(value);
    return SPDL_OK;
}

static spdl_result blocker_init(void *ctx, int worker, void **local) {
    (void)worker, (void)local;
    __atomic_add_fetch(&((blocker *)ctx)->inits, 1, __ATOMIC_RELEASE);
    return SPDL_OK;
}

static void blocker_fini(void *ctx, int worker, void *local) {
    (void)worker, (void)local;
    __atomic_add_fetch(&((blocker *)ctx)->finis, 1, __ATOMIC_RELEASE);
}

#define BLOCK(...)                                                                                 \
    SPDL_SOURCE(block, .threads = 1, .free_item = item_free, .ctx = __VA_ARGS__)

/* An allocator that counts what is not freed, and a log that must not be written to. */
static long blocks_alive;
static int log_lines, log_closed;

static void *count_alloc(size_t bytes, size_t align, void *user) {
    void *memory = test_memory(align, bytes);
    (void)user;
    if (memory == NULL) return NULL;
    __atomic_add_fetch(&blocks_alive, 1, __ATOMIC_RELEASE);
    return memory;
}

static void count_free(void *memory, size_t bytes, void *user) {
    (void)bytes, (void)user;
    test_memory_free(memory);
    __atomic_sub_fetch(&blocks_alive, 1, __ATOMIC_RELEASE);
}

static void count_log(spdl_log_level level, const char *text, void *user) {
    (void)level, (void)user, (void)text;
    CHECK_EQ(__atomic_load_n(&log_closed, __ATOMIC_ACQUIRE), 0);
    __atomic_add_fetch(&log_lines, 1, __ATOMIC_RELAXED);
}

static spdl_pipeline *start_counted(int workers, const spdl_stage *rows, size_t count) {
    spdl_pipeline_desc desc = { 0 };
    spdl_pipeline *p = NULL;
    desc.workers = TEST_WORKERS(workers);
    desc.allocator.alloc_fn = count_alloc;
    desc.allocator.free_fn = count_free;
    desc.logger.log_fn = count_log;
    __atomic_store_n(&log_closed, 0, __ATOMIC_RELEASE);
    REQUIRE(spdl_pipeline_create(&p, &desc, rows, count) == SPDL_OK);
    return p;
}

/* Everything is freed some time after the gate was opened. */
static void all_is_freed_soon(int *gate) {
    const uint64_t start = spdl_time_ns();
    open_gate(gate);
    while (__atomic_load_n(&blocks_alive, __ATOMIC_ACQUIRE) > 0 || items_alive() > 0) {
        REQUIRE(spdl_time_ns() - start < 15000000000u);
        sleep_us(200);
    }
    CHECK_EQ(items_alive(), 0);
}

/* And nothing before. */
static void all_is_freed(int *gate) {
    CHECK(__atomic_load_n(&blocks_alive, __ATOMIC_ACQUIRE) > 0);
    all_is_freed_soon(gate);
}

/* Stop waits no longer than it says, destroy not at all; the thread frees what it finds. */
static void a_blocked_source_is_left_alone(void) {
    static const spdl_result lasts[] = { SPDL_OK, SPDL_END, SPDL_SKIP, SPDL_E_STAGE };
    for (int i = 0; i < 8 * CROWDS; ++i) {
        static blocker b;
        spdl_pipeline *p;
        uint64_t since;
        b = (blocker){ .count = i % 3, .last = lasts[i % 4] };
        p = start_counted(crowds[i / 8],
                          SPDL_STAGES(BLOCK(&b, .continuous = i / 4 % 2, .max_failures = -1),
                                      FOLLOW(.plus = 0), SPDL_SINK(1)));
        if (i % 2) take_from(p, 0, i % 3, SPDL_OK);
        await(&b.inside, 1);
        CHECK_EQ(spdl_pipeline_stop(p, 1000000), SPDL_TIMEOUT);
        since = spdl_time_ns();
        spdl_pipeline_destroy(p);
        CHECK(spdl_time_ns() - since < 4000000000u);
        __atomic_store_n(&log_closed, 1, __ATOMIC_RELEASE);
        all_is_freed(&b.gate);
    }
}

/* It has slept for room before the call that blocks: when that returns, the pool is gone. */
static void a_blocked_source_that_has_slept_is_left_alone(void) {
    for (int i = 0; i < CROWDS; ++i) {
        static blocker b;
        spdl_pipeline *p;
        b = (blocker){ .count = 12, .last = SPDL_END };
        p = start_counted(crowds[i], SPDL_STAGES(BLOCK(&b), FOLLOW(.plus = 0), SPDL_SINK(1)));
        sleep_us(5000); /* its buffers are full */
        take_from(p, 0, 12, SPDL_OK);
        await(&b.inside, 1);
        CHECK_EQ(spdl_pipeline_stop(p, 1000000), SPDL_TIMEOUT);
        spdl_pipeline_destroy(p);
        __atomic_store_n(&log_closed, 1, __ATOMIC_RELEASE);
        all_is_freed(&b.gate);
    }
}

/* A buffer of the library's is given back. */
SPDL_FN(block_with_buffer, void, void) {
    blocker *b = (blocker *)spdl_ctx(task);
    *out = spdl_buffer(task);
    __atomic_store_n(&b->inside, 1, __ATOMIC_RELEASE);
    await(&b->gate, 1);
    return b->last;
}

static void a_blocked_source_gives_its_buffer_back(void) {
    for (int i = 0; i < 2 * CROWDS; ++i) {
        static blocker b;
        spdl_pipeline *p;
        b = (blocker){ .last = i % 2 ? SPDL_OK : SPDL_SKIP };
        p = start_counted(crowds[i / 2],
                          SPDL_STAGES(SPDL_SOURCE(block_with_buffer, .ctx = &b, .threads = 1,
                                                  .item_bytes = 100), SPDL_SINK(1)));
        await(&b.inside, 1);
        CHECK_EQ(spdl_pipeline_stop(p, 1), SPDL_TIMEOUT);
        spdl_pipeline_destroy(p);
        all_is_freed(&b.gate);
    }
}

/* Its fini runs when it is back; those of the others before destroy has returned. */
static void a_blocked_source_runs_fini(void) {
    for (int i = 0; i < CROWDS; ++i) {
        static blocker b, other;
        spdl_pipeline *p;
        b = other = (blocker){ .count = 1 };
        p = start_counted(crowds[i],
                          SPDL_STAGES(BLOCK(&b, .init = blocker_init, .fini = blocker_fini),
                                      SPDL_PIPE(pass_on, .ctx = &other, .init = blocker_init,
                                                .fini = blocker_fini),
                                      SPDL_SINK(1)));
        take_from(p, 0, 1, SPDL_OK); /* with SPDL_INLINE init runs in here */
        await(&b.inside, 1);
        CHECK_EQ(spdl_pipeline_stop(p, 1), SPDL_TIMEOUT);
        spdl_pipeline_destroy(p);
        CHECK_EQ(other.inits, 1); /* of the thread that ran its one call */
        CHECK_EQ(other.finis, other.inits);
        CHECK_EQ(b.finis, 0);
        all_is_freed(&b.gate);
        CHECK_EQ(b.inits, 1);
        CHECK_EQ(b.finis, 1);
    }
}

/* Without a stop destroy waits for it, here for less than its patience. */
static void destroy_waits_for_a_source(void) {
    for (int i = 0; i < CROWDS; ++i) {
        spdl_pipeline *p = START(crowds[i],
                                 SPDL_SOURCE(count_up, SCRIPT(.count = -1, .sleep_us = 20000),
                                             .threads = 1, .free_item = item_free),
                                 SPDL_SINK(1));
        take_from(p, 0, 1, SPDL_OK);
        DONE(p); /* the script is gone then */
    }
}

/* The thread is about to call while the pipeline is destroyed: it does not. */
static void *destroys(void *p) {
    spdl_pipeline_destroy((spdl_pipeline *)p);
    return NULL;
}

static void a_call_that_begins_late_is_none(void) {
    for (int i = 0; i < CROWDS; ++i) {
        static blocker b;
        spdl_pipeline *p;
        test_thread thread;
        b = (blocker){ .count = 0 };
        freeze("source about to block");
        p = START(crowds[i], BLOCK(&b), SPDL_SINK(1));
        await(&frozen, 1);
        CHECK_EQ(spdl_pipeline_stop(p, i % 2 ? 1 : 0), SPDL_TIMEOUT);
        thread = thread_of(destroys, p);
        sleep_us(2000);
        thaw();
        test_join(thread);
        sleep_us(i % 2 ? 2000 : 0); /* an abandoned thread is still at it */
        CHECK_EQ(b.inside, 0);
    }
}

/* The trainer does not wait for what does not come. */
static void *stops(void *p) {
    sleep_us(2000);
    (void)spdl_pipeline_stop((spdl_pipeline *)p, 0);
    return NULL;
}

static void the_trainer_of_a_blocked_source_is_free(void) {
    for (int i = 0; i < CROWDS; ++i) {
        static blocker each[CROWDS]; /* destroy may leave its thread behind for a moment */
        blocker *const b = &each[i];
        spdl_pipeline *p;
        test_thread thread;
        void *none;
        *b = (blocker){ .count = 0 };
        p = START(crowds[i], BLOCK(b, .max_failures = 1), FOLLOW(.plus = 0), SPDL_SINK(1));
        await(&b->inside, 1);
        thread = thread_of(stops, p);
        CHECK_EQ(spdl_pipeline_next(p, &none, SPDL_SECONDS(15)), SPDL_CLOSED);
        test_join(thread);
        open_gate(&b->gate);
        DONE(p);
    }
}

/* Stopped and destroyed at any time. */
static void blocked_sources_stop_anywhere(void) {
    uint64_t seed = test_seed();
    chaos_on();
    for (int i = 0; i < (TEST_SANITIZED ? 100 : 400); ++i) {
        static blocker b;
        spdl_pipeline *p;
        b = (blocker){ .count = (long)(test_random(&seed) % 20) };
        p = start_counted(crowds[i % CROWDS],
                          SPDL_STAGES(BLOCK(&b, .buffer_size = 30), FOLLOW(.plus = 0),
                                      SPDL_SINK(30)));
        sleep_us((long)(test_random(&seed) % 300));
        (void)spdl_pipeline_stop(p, (int64_t)(test_random(&seed) % 3));
        if (i % 3 == 0) open_gate(&b.gate);
        if (i % 3 == 0 || spdl_pipeline_stop(p, 1) == SPDL_TIMEOUT) spdl_pipeline_destroy(p);
        else spdl_pipeline_destroy(p);
        all_is_freed_soon(&b.gate); /* it may have been open */
    }
    CHECK_EQ(items_alive(), 0);
}

/* --- SPDL_FROM --- */

#define FROM(p, ...)                                                                               \
    SPDL_FROM(item, spdl_pipeline_next, (p), .free_item = item_free, __VA_ARGS__)

static void a_pipeline_is_a_source(void) {
    for (int i = 0; i < CROWDS * CROWDS; ++i) {
        const int buffer = 1 + i % 3;
        spdl_pipeline *inner = START(crowds[i / CROWDS], COUNT_TO(12), FOLLOW(.times = 2),
                                     SPDL_SINK(buffer));
        spdl_pipeline *p = START(crowds[i % CROWDS], FROM(inner, .buffer_size = buffer),
                                 FOLLOW(.plus = 1, .fresh = true), SPDL_SINK(buffer));
        TAKE_ALL(p, "1 3 5 7 9 11 13 15 17 19 21 23", SPDL_END);
        spdl_pipeline_destroy(p);
        DONE(inner);
    }
}

static void three_pipelines_in_a_row(void) {
    spdl_pipeline *a = START(1, COUNT_TO(6), SPDL_SINK(1));
    spdl_pipeline *b = START(0, FROM(a, .name = "a"), FOLLOW(.plus = 1), SPDL_SINK(1));
    spdl_pipeline *c = START(2, FROM(b, .name = "b"), SPDL_BATCH(4), SPDL_SINK(1));
    TAKE_BATCHES(c, "1 2 3 4|5 6", SPDL_END);
    spdl_pipeline_destroy(c);
    spdl_pipeline_destroy(b);
    DONE(a);
}

/* Both on one pool of one worker: the thread of the source is not that. */
static void from_a_pipeline_of_the_same_pool(void) {
    spdl_pool *pool = pool_of(1);
    spdl_pipeline *inner = START_ON(pool, COUNT_TO(50), FOLLOW(.plus = 0), SPDL_SINK(1));
    spdl_pipeline *p = START_ON(pool, FROM(inner, .name = "inner"), FOLLOW(.plus = 0),
                                SPDL_SINK(1));
    CHECK_EQ(take_from_any(p), 50);
    spdl_pipeline_destroy(p);
    DONE(inner);
    spdl_pool_destroy(pool);
}

static void epochs_of_another_pipeline(void) {
    for (int i = 0; i < CROWDS; ++i) {
        spdl_pipeline *inner = START(1, CONTINUOUS(.count = 5), SPDL_SINK(1));
        spdl_pipeline *p = START(crowds[i], FROM(inner, .continuous = true), SPDL_BATCH(2),
                                 SPDL_SINK(2));
        for (int epoch = 0; epoch < 4; ++epoch) {
            notes n = { .length = 0 };
            CHECK_EQ(take(p, &n, 9, "|", note_batch), SPDL_END);
            CHECK_STR(n.text, "0 1|2 3|4");
        }
        spdl_pipeline_destroy(p);
        spdl_pipeline_destroy(inner);
        CHECK_EQ(items_alive(), 0);
    }
}

static void from_reports_why(void) {
    for (int i = 0; i < CROWDS; ++i) {
        spdl_pipeline *inner =
            START(2, COUNT_TO(9),
                  SPDL_PIPE(follow, SCRIPT(.every = 9, .rest = 4, .result = SPDL_E_STAGE)),
                  SPDL_SINK(1));
        spdl_pipeline *p = START(crowds[i], FROM(inner, .name = "inner"), SPDL_SINK(1));
        TAKE_ALL(p, "0 1 2 3", SPDL_E_STAGE);
        failed_with(p, 0, "stage 0 'inner', item 4: stage 1 'follow', item 4: value 4 "
                          "is bad");
        spdl_pipeline_destroy(p);
        DONE(inner);
    }
}

static void log_last(spdl_log_level level, const char *text, void *user) {
    if (level == SPDL_LOG_ERROR) snprintf((char *)user, 100, "%s", text);
}

static void a_source_outlives_its_pipeline(void) {
    for (int i = 0; i < CROWDS; ++i) {
        char text[100] = "";
        const spdl_pipeline_desc desc = { .workers = TEST_WORKERS(1),
                                          .logger = { log_last, text } };
        spdl_pipeline *inner, *p;
        REQUIRE(spdl_pipeline_create(&inner, &desc, SPDL_STAGES(COUNT_TO(6), SPDL_SINK(1))) ==
                SPDL_OK);
        p = START(crowds[i], FROM(inner, .name = "inner"), SPDL_SINK(1));
        spdl_pipeline_destroy(inner);
        CHECK_STR(text, "spdl_pipeline_destroy: SPDL_FROM still uses it, nothing was done");
        TAKE_ALL(p, "0 1 2 3 4 5", SPDL_END);
        spdl_pipeline_destroy(p);
        text[0] = '\0';
        DONE(inner);
        CHECK_STR(text, "");
    }
}

static void *takes_from_it(void *arg) {
    item *it = NULL;
    CHECK_EQ(SPDL_NEXT((spdl_pipeline *)arg, &it, SPDL_SECONDS(15)), SPDL_OK);
    item_free(it);
    return NULL;
}

/* A source that is none, or that another thread takes from. */
static void from_says_what_is_wrong(void) {
    for (int i = 0; i < CROWDS; ++i) {
        int gate = 0;
        script slow = { .count = 1, .gate = &gate };
        spdl_pipeline *inner, *p = START(crowds[i], SPDL_FROM(item, spdl_pipeline_next, NULL),
                                         SPDL_SINK(1));
        test_thread other;
        TAKE_ALL(p, "", SPDL_E_INVALID);
        failed_with(p, 0, "stage 0 'from', item 0: invalid argument");
        DONE(p);
        inner = START(1, SPDL_SOURCE(count_up, .ctx = &slow, .free_item = item_free), SPDL_SINK(1));
        other = thread_of(takes_from_it, inner);
        await(consumer_inside(inner), 1);
        p = START(crowds[i], FROM(inner, .name = "from"), SPDL_SINK(1));
        TAKE_ALL(p, "", SPDL_E_INVALID);
        failed_with(p, 0, "stage 0 'from', item 0: invalid argument");
        open_gate(&gate);
        test_join(other);
        spdl_pipeline_destroy(p);
        DONE(inner);
    }
}

/* A next function by hand. */
typedef struct hand {
    int calls;
    const spdl_result *says; /* SPDL_OK: an item; the last one for ever */
    int timeouts_bad;
} hand;

static spdl_result hand_next(void *source, void **out, int64_t timeout_ns) {
    hand *h = (hand *)source;
    const spdl_result result = h->says[h->calls];
    if (timeout_ns <= 0 || timeout_ns > 100000000) ++h->timeouts_bad;
    if (result == SPDL_TIMEOUT) sleep_us(1000);
    if (result == SPDL_OK) *out = item_make(h->calls);
    if (result != SPDL_TIMEOUT || h->says[h->calls + 1] != SPDL_TIMEOUT) ++h->calls;
    return result;
}

static void any_next_function_is_a_source(void) {
    static const spdl_result well[] = { SPDL_OK, SPDL_TIMEOUT, SPDL_OK, SPDL_OK, SPDL_END };
    static const spdl_result badly[] = { SPDL_OK, SPDL_E_IO };
    static const spdl_result closed[] = { SPDL_OK, SPDL_OK, SPDL_CLOSED };
    static const spdl_result now_and_then[] = { SPDL_OK, SPDL_E_IO, SPDL_OK, SPDL_END };
    for (int i = 0; i < CROWDS; ++i) {
        hand h = { .says = well };
        spdl_pipeline *p;
        RUN(START(crowds[i], SPDL_FROM(item, hand_next, &h), FOLLOW(.plus = 0), SPDL_SINK(1)),
            "0 2 3", SPDL_END);
        h = (hand){ .says = badly };
        p = START(crowds[i], SPDL_FROM(item, hand_next, &h, .name = "hand"), SPDL_SINK(1));
        TAKE_ALL(p, "0", SPDL_E_IO);
        failed_with(p, 0, "stage 0 'hand', item 1: input or output error");
        DONE(p);
        h = (hand){ .says = closed };
        p = START(crowds[i], SPDL_FROM(item, hand_next, &h), SPDL_SINK(1));
        TAKE_ALL(p, "0 1", SPDL_E_STAGE);
        failed_with(p, 0, "stage 0 'from', item 2: its next function returned 1006 (closed)");
        DONE(p);
        h = (hand){ .says = now_and_then };
        RUN(START(crowds[i], SPDL_FROM(item, hand_next, &h, .max_failures = 1), SPDL_SINK(1)),
            "0 2", SPDL_END);
        CHECK_EQ(h.timeouts_bad, 0);
    }
}

/* A later row fails while it waits: it is not called any more. */
static void from_stops_when_a_row_fails(void) {
    static const spdl_result waits[] = { SPDL_OK, SPDL_TIMEOUT, SPDL_TIMEOUT };
    for (int i = 0; i < CROWDS; ++i) {
        hand h = { .says = waits };
        spdl_pipeline *p = START(crowds[i], SPDL_FROM(item, hand_next, &h, .free_item = item_free),
                                 SPDL_PIPE(follow, SCRIPT(.every = 1, .result = SPDL_E_STAGE,
                                                          .sleep_us = 3000)),
                                 SPDL_SINK(1));
        TAKE_ALL(p, "", SPDL_E_STAGE);
        for (int tries = 0; tries < 5000 && stats_of(p, 0).in_flight > 0; ++tries) sleep_us(1000);
        CHECK_EQ(stats_of(p, 0).in_flight, 0);
        DONE(p);
    }
}

/* It looks whether it should stop: no thread is left, and nothing is counted as dropped. */
static void from_stops_while_it_waits(void) {
    static const spdl_result waits[] = { SPDL_OK, SPDL_TIMEOUT, SPDL_TIMEOUT };
    for (int i = 0; i < 3 * CROWDS; ++i) {
        hand h = { .says = waits };
        spdl_pipeline *p = START(crowds[i / 3],
                                 SPDL_FROM(item, hand_next, &h, .free_item = item_free),
                                 FOLLOW(.plus = 0), SPDL_SINK(1));
        if (i % 3) TAKE(p, 1, "0");
        if (i % 3 == 2) {
            CHECK_EQ(spdl_pipeline_stop(p, SPDL_SECONDS(15)), SPDL_OK);
            CHECK_EQ(stats_of(p, 0).skips, 0);
            CHECK_EQ(stats_of(p, 0).failures, 0);
        } else {
            (void)spdl_pipeline_stop(p, 1);
        }
        DONE(p); /* h is gone then */
    }
}

static void from_stops_with_its_pipeline(void) {
    for (int i = 0; i < 30; ++i) {
        spdl_pipeline *inner = START(1, COUNT_TO(-1), SPDL_SINK(2));
        spdl_pipeline *p = START(crowds[i % CROWDS], FROM(inner, .buffer_size = 2),
                                 FOLLOW(.plus = 0), SPDL_SINK(2));
        take_from(p, 0, i, SPDL_OK);
        spdl_pipeline_destroy(p);
        spdl_pipeline_destroy(inner);
        CHECK_EQ(items_alive(), 0);
    }
}

/* A pipeline that is a source is rewound before the one that takes from it. */
static void a_pipeline_and_its_source_are_rewound(void) {
    for (int i = 0; i < 12 * CROWDS; ++i) {
        spdl_pipeline *inner = START(1 + i % 2, COUNT_TO(6), SPDL_SINK(2));
        spdl_pipeline *p = START(crowds[i % CROWDS], FROM(inner, .name = "inner"),
                                 FOLLOW(.plus = 100), SPDL_SINK(1 + i % 3));
        for (int k = 0; k < i % 10; ++k) {
            item *it = NULL;
            if (spdl_pipeline_next(p, (void **)&it, SPDL_FOREVER) == SPDL_OK) item_free(it);
        }
        CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(spdl_pipeline_rewind(inner, 0, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_FOREVER), SPDL_OK);
        TAKE_ALL(p, "100 101 102 103 104 105", SPDL_END);
        spdl_pipeline_destroy(p);
        DONE(inner);
    }
}

/* A source with a thread of its own is rewound, too, and has epochs. */
static void a_source_with_a_thread_is_as_any_other(void) {
    for (int i = 0; i < 4 * CROWDS; ++i) {
        const bool stops = i / 2 % 2;
        spdl_pipeline *p = START(crowds[i / 4],
                                 SPDL_SOURCE(count_up, SCRIPT(.count = 4), .threads = 1,
                                             .continuous = true, .free_item = item_free),
                                 SPDL_PIPE(follow, SCRIPT(.plus = 0), .concurrency = 1 + i % 2),
                                 SPDL_SINK(1 + i % 3));
        TAKE_EPOCH(p, "0 1 2 3");
        TAKE_EPOCH(p, "0 1 2 3");
        TAKE(p, 2, "0 1");
        if (stops) CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(spdl_pipeline_rewind(p, 2, SPDL_FOREVER), SPDL_OK);
        TAKE_EPOCH(p, "2 3");
        TAKE_EPOCH(p, "0 1 2 3");
        DONE(p);
    }
}

/* --- rows that are refused --- */

static void refused(const char *text, const spdl_stage *rows, size_t count) {
    spdl_pipeline_desc desc = { 0 };
    spdl_pipeline *p = NULL;
    spdl_error error;
    const char *said;
    desc.error = &error;
    desc.logger.log_fn = log_nothing;
    CHECK(spdl_pipeline_create(&p, &desc, rows, count) < 0);
    said = strstr(error.text, ": stage ");
    CHECK_STR(said != NULL ? said + 8 : error.text, text);
}

#define REFUSED(text, ...) refused((text), SPDL_STAGES(__VA_ARGS__))

static void rows_of_other_sources_are_checked(void) {
    const spdl_stage from = SPDL_FROM(item, hand_next, NULL);
    const spdl_stage one = COUNT_TO(1), a = SPDL_PATH("a"), b = SPDL_PATH("b");
    const spdl_stage merge = SPDL_MERGE();
    spdl_stage odd = from;
    REFUSED("0 'a': the first row must be SPDL_SOURCE, SPDL_FROM or SPDL_FEED", a, one, b, one,
            merge, SPDL_SINK(1));
    REFUSED("1 'count_up': only the first row may be SPDL_SOURCE, SPDL_FROM or SPDL_FEED", one, one,
            SPDL_SINK(1));
    REFUSED("3 'count_up': only the first row may be SPDL_SOURCE, SPDL_FROM or SPDL_FEED", one,
            SPDL_BRANCH(pass_on), a, one, b, merge, SPDL_SINK(1));
    REFUSED("1 'feed': only the first row may be SPDL_SOURCE, SPDL_FROM or SPDL_FEED", one,
            SPDL_FEED(item), SPDL_SINK(1));
    REFUSED("1 'pass_on': threads is set, but only source rows have it", one,
            SPDL_PIPE(pass_on, .threads = 1), SPDL_SINK(1));
    REFUSED("0 'count_up': threads is 2, must be 1 to 1",
            SPDL_SOURCE(count_up, SCRIPT(.count = 1), .threads = 2), SPDL_SINK(1));
    odd.item_bytes = 8;
    REFUSED("0 'from': item_bytes is set, but SPDL_FROM makes no items", odd, SPDL_SINK(1));
    odd = from;
    odd.type = NULL;
    REFUSED("0 'from': next is set, but type is NULL", odd, SPDL_SINK(1));
    odd = from;
    odd.next = NULL;
    odd.fn = &count_up_is_no_SPDL_FN;
    REFUSED("0 'count_up': type is set, but only feed and batch rows have it", odd, SPDL_SINK(1));
    odd = from;
    odd.fn = &count_up_is_no_SPDL_FN;
    REFUSED("0 'from': next and fn are both set", odd, SPDL_SINK(1));
    odd = from;
    odd.type = "other";
    odd.file = "rows.c";
    odd.line = 7;
    REFUSED("1 'pass_on' takes 'item *' but stage 0 'from' (rows.c:7) yields 'other *'", odd,
            SPDL_PIPE(pass_on), SPDL_SINK(1));
}

TEST_TABLE(source) {
    TEST_CASE(a_blocked_source_is_left_alone),
    TEST_CASE(a_blocked_source_that_has_slept_is_left_alone),
    TEST_CASE(a_blocked_source_gives_its_buffer_back),
    TEST_CASE(a_blocked_source_runs_fini),
    TEST_CASE(destroy_waits_for_a_source),
    TEST_CASE(a_call_that_begins_late_is_none),
    TEST_CASE(the_trainer_of_a_blocked_source_is_free),
    TEST_CASE(blocked_sources_stop_anywhere),
    TEST_CASE(a_pipeline_is_a_source),
    TEST_CASE(three_pipelines_in_a_row),
    TEST_CASE(from_a_pipeline_of_the_same_pool),
    TEST_CASE(epochs_of_another_pipeline),
    TEST_CASE(from_reports_why),
    TEST_CASE(a_source_outlives_its_pipeline),
    TEST_CASE(from_says_what_is_wrong),
    TEST_CASE(from_stops_when_a_row_fails),
    TEST_CASE(any_next_function_is_a_source),
    TEST_CASE(from_stops_while_it_waits),
    TEST_CASE(from_stops_with_its_pipeline),
    TEST_CASE(a_pipeline_and_its_source_are_rewound),
    TEST_CASE(a_source_with_a_thread_is_as_any_other),
    TEST_CASE(rows_of_other_sources_are_checked),
    TEST_END,
};
