/* Sources of other kinds: those that block, on a thread of their own; those that take from a next
   function, as of another pipeline; and several that a merge joins. */
#include "flow.h"

#include <float.h>
#include <math.h>

/* --- a source that blocks --- */

/* Items 0 to count - 1, then a call that returns only when `gate` opens. */
typedef struct blocker {
    long count;
    spdl_result last; /* what that call returns; SPDL_OK: one more item */
    bool emits;
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
    if (b->emits) return spdl_emit(task, item_make(value));
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
    void *memory = NULL;
    (void)user;
    if (align < sizeof(void *)) align = sizeof(void *);
    if (posix_memalign(&memory, align, bytes)) return NULL;
    __atomic_add_fetch(&blocks_alive, 1, __ATOMIC_RELEASE);
    return memory;
}

static void count_free(void *memory, size_t bytes, void *user) {
    (void)bytes, (void)user;
    free(memory);
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
    desc.workers = workers;
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
        b = (blocker){ .count = i % 3, .last = lasts[i % 4], .emits = i / 4 % 2 };
        p = start_counted(crowds[i / 8],
                          SPDL_STAGES(BLOCK(&b, .emits = b.emits, .max_failures = -1),
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

/* One on either path, and two that block at once: what comes last frees it all. */
static void two_blocked_sources(void) {
    for (int i = 0; i < 2 * CROWDS; ++i) {
        static blocker a, b;
        spdl_pipeline *p;
        a = b = (blocker){ .count = 1, .emits = i % 2 };
        p = start_counted(crowds[i / 2],
                          SPDL_STAGES(SPDL_PATH("a"), BLOCK(&a, .emits = a.emits), SPDL_PATH("b"),
                                      BLOCK(&b, .emits = b.emits), FOLLOW(.plus = 0), SPDL_MERGE(),
                                      SPDL_SINK(4)));
        await(&a.inside, 1);
        await(&b.inside, 1);
        CHECK_EQ(spdl_pipeline_stop(p, 1), SPDL_TIMEOUT);
        spdl_pipeline_destroy(p);
        if (i / 2 % 2) open_gate(&a.gate);
        else open_gate(&b.gate);
        sleep_us(2000);
        all_is_freed(i / 2 % 2 ? &b.gate : &a.gate);
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
        take_from(p, 0, 1, SPDL_OK); /* with workers = 0 init runs in here */
        await(&b.inside, 1);
        CHECK_EQ(spdl_pipeline_stop(p, 1), SPDL_TIMEOUT);
        spdl_pipeline_destroy(p);
        CHECK_EQ(other.inits, crowds[i] ? crowds[i] : 1);
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
        pthread_t thread;
        b = (blocker){ .count = 0 };
        frozen = 0;
        freeze("source about to block");
        p = START(crowds[i], BLOCK(&b), SPDL_SINK(1));
        await(&frozen, 1);
        CHECK_EQ(spdl_pipeline_stop(p, i % 2 ? 1 : 0), SPDL_TIMEOUT);
        thread = thread_of(destroys, p);
        sleep_us(2000);
        freeze(NULL);
        pthread_join(thread, NULL);
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
        static blocker b;
        spdl_pipeline *p;
        pthread_t thread;
        void *none;
        b = (blocker){ .count = 0 };
        p = START(crowds[i], BLOCK(&b, .max_failures = 1), FOLLOW(.plus = 0), SPDL_SINK(1));
        await(&b.inside, 1);
        thread = thread_of(stops, p);
        CHECK_EQ(spdl_pipeline_next(p, &none, SPDL_SECONDS(15)), SPDL_CLOSED);
        pthread_join(thread, NULL);
        open_gate(&b.gate);
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
    SPDL_FROM(item, spdl_pipeline_next_fn, (p), .free_item = item_free, __VA_ARGS__)

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
        failed_with(p, 0, "spdl: stage 0 'inner', item 4: spdl: stage 1 'follow', item 4: value 4 "
                          "is bad");
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
        failed_with(p, 0, "spdl: stage 0 'hand', item 1: input or output error");
        DONE(p);
        h = (hand){ .says = closed };
        p = START(crowds[i], SPDL_FROM(item, hand_next, &h), SPDL_SINK(1));
        TAKE_ALL(p, "0 1", SPDL_E_STAGE);
        failed_with(p, 0, "spdl: stage 0 'from', item 2: its next function returned 6 (closed)");
        DONE(p);
        h = (hand){ .says = now_and_then };
        RUN(START(crowds[i], SPDL_FROM(item, hand_next, &h, .max_failures = 1), SPDL_SINK(1)),
            "0 2", SPDL_END);
        CHECK_EQ(h.timeouts_bad, 0);
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

/* --- several sources --- */

SPDL_FN(every_other, item, item) {
    *out = in;
    return spdl_route(task, (int)(in->value % 2));
}

SPDL_FN(add_up, spdl_batch, item) {
    long sum = 0;
    for (size_t i = 0; i < in->count; ++i) sum += ((const item *)in->items[i])->value;
    *out = item_make(sum);
    return SPDL_OK;
}

#define FROM_ON(plus_) COUNT_TO(3), FOLLOW(.plus = (plus_))
#define UP_TO(count_, plus_) COUNT_TO(count_), FOLLOW(.plus = (plus_), .fresh = true)
#define ROBIN() SPDL_MERGE(.merge_order = SPDL_MERGE_ROBIN)
#define WEIGHTED() SPDL_MERGE(.merge_order = SPDL_MERGE_WEIGHTED)

static void two_sources_are_merged(void) {
    for (int i = 0; i < CROWDS; ++i) {
        RUN_SORTED(START(crowds[i], SPDL_PATH("a"), COUNT_TO(5), SPDL_PATH("b"), UP_TO(4, 100),
                         SPDL_MERGE(), SPDL_SINK(1)),
                   "0 1 2 3 4 100 101 102 103", SPDL_END);
        RUN(START(crowds[i], SPDL_PATH("a"), UP_TO(3, 1), SPDL_PATH("b"), UP_TO(3, 4), ROBIN(),
                  SPDL_SINK(1)),
            "1 4 2 5 3 6", SPDL_END);
        RUN(START(crowds[i], SPDL_PATH("a"), UP_TO(2, 0), SPDL_PATH("b"), UP_TO(5, 10), ROBIN(),
                  FOLLOW(.plus = 1), SPDL_SINK(1)),
            "1 11 2 12 13 14 15", SPDL_END);
    }
}

/* With one worker, too, none of them starves. */
static void sources_have_turns(void) {
    for (int i = 0; i < 2 * CROWDS; ++i) {
        spdl_pipeline *p = START(crowds[i / 2], SPDL_PATH("a"), COUNT_TO(-1), SPDL_PATH("b"),
                                 COUNT_TO(-1), FOLLOW(.plus = 1000000), SPDL_PATH("c"),
                                 COUNT_TO(-1), FOLLOW(.plus = 2000000), SPDL_MERGE(),
                                 SPDL_SINK(1 + i % 2 * 9));
        long values[300], from[3] = { 0 };
        take_values(p, values, 300, SPDL_OK);
        for (int k = 0; k < 300; ++k) ++from[values[k] / 1000000];
        for (int k = 0; k < 3 && crowds[i / 2] < 2; ++k) CHECK(from[k] >= 30);
        DONE(p);
    }
}

static void sources_may_be_empty(void) {
    for (int i = 0; i < CROWDS; ++i) {
        RUN(START(crowds[i], SPDL_PATH("a"), COUNT_TO(0), SPDL_PATH("b"), COUNT_TO(3), SPDL_MERGE(),
                  SPDL_SINK(1)),
            "0 1 2", SPDL_END);
        RUN(START(crowds[i], SPDL_PATH("a"), COUNT_TO(3), SPDL_PATH("b"), COUNT_TO(0), ROBIN(),
                  SPDL_SINK(1)),
            "0 1 2", SPDL_END);
        RUN(START(crowds[i], SPDL_PATH("a"), COUNT_TO(0), SPDL_PATH("b"), COUNT_TO(0), ROBIN(),
                  SPDL_SINK(1)),
            "", SPDL_END);
    }
}

/* Rows of every kind before and after. */
static void five_sources_are_merged(void) {
    for (int i = 0; i < 2 * CROWDS; ++i)
        RUN_SORTED(START(crowds[i / 2], SPDL_PATH("a"), COUNT_TO(3), SPDL_PATH("b"),
                         SPDL_SOURCE(count_up, SCRIPT(.count = 2), .threads = i % 2,
                                     .free_item = item_free),
                         SPDL_PIPE(follow, SCRIPT(.plus = 10), .concurrency = 3,
                                   .output_order = SPDL_ORDER_COMPLETION),
                         SPDL_PATH("c"), COUNT_TO(2), SCATTER(BURST(.plus = 2)), SPDL_PATH("d"),
                         COUNT_TO(4), SPDL_BRANCH(every_other), SPDL_PATH("d1"),
                         FOLLOW(.plus = 20), SPDL_PATH("d2"), SPDL_MERGE(), SPDL_PATH("e"),
                         COUNT_TO(9), WEIGH(&(scale){ .limit = 30 }), SPDL_MERGE(),
                         FOLLOW(.times = 10), SPDL_SINK(1)),
                   "0 0 10 10 10 20 30 100 110 200 220 360 1000 1010", SPDL_END);
}

/* --- weights --- */

static void check_mix(int workers, double wa, double wb, long a, long b, const char *text) {
    RUN(START(workers, SPDL_PATH("a", .weight = wa), UP_TO(a, 0), SPDL_PATH("b", .weight = wb),
              UP_TO(b, 100), WEIGHTED(), SPDL_SINK(1)),
        text, SPDL_END);
}

static void weights_mix_in_their_ratio(void) {
    for (int i = 0; i < CROWDS; ++i) {
        check_mix(crowds[i], 1, 1, 3, 3, "0 100 1 101 2 102");
        check_mix(crowds[i], 3, 1, 6, 2, "0 1 2 100 3 4 5 101");
        check_mix(crowds[i], 1, 3, 2, 6, "100 101 0 102 103 104 1 105");
        check_mix(crowds[i], 0.3, 0.1, 6, 2, "0 1 100 2 3 4 101 5");
        check_mix(crowds[i], 1e6, 1, 3, 1, "0 1 2 100");
        check_mix(crowds[i], 5e-324, DBL_MAX, 2, 3, "100 101 102 0 1");
        check_mix(crowds[i], 1e-323, 5e-324, 4, 2, "0 1 100 2 3 101");
        check_mix(crowds[i], 1, 2, 4, 2, "100 0 101 1 2 3");
        check_mix(crowds[i], 1, 2, 0, 2, "100 101");
    }
}

/* One of three ends: the rest keep their ratio. */
static void a_path_that_ends_leaves_the_ratios(void) {
    for (int i = 0; i < CROWDS; ++i)
        RUN(START(crowds[i], SPDL_PATH("a", .weight = 2), UP_TO(6, 0), SPDL_PATH("b", .weight = 4),
                  UP_TO(2, 100), SPDL_PATH("c", .weight = 1), UP_TO(3, 200), WEIGHTED(),
                  SPDL_SINK(1)),
            "100 0 101 1 200 2 3 201 4 5 202", SPDL_END);
}

/* Against whole numbers and long counts. */
static void weights_are_compared_exactly(void) {
    static const double w[] = { 5e-324, 1e-323, 1e-310, 2.2250738585072014e-308, 0.1, 0.2, 0.3, 1,
                                3, 1e6, 0x1.fffffffffffffp+52, 1e300, DBL_MAX };
    static const uint64_t n[] = { 1, 2, 3, 10, 1u << 20, ((uint64_t)1 << 53) + 1, UINT64_MAX };
    const size_t ws = sizeof w / sizeof w[0], ns = sizeof n / sizeof n[0];
    for (size_t i = 0; i < ws * ws * ns * ns; ++i) {
        const double wa = w[i % ws], wb = w[i / ws % ws];
        const uint64_t a = n[i / ws / ws % ns], b = n[i / ws / ws / ns];
        const bool less = spdl__weight_less(a, wa, b, wb), more = spdl__weight_less(b, wb, a, wa);
        const long double x = (long double)a / (long double)wa;
        const long double y = (long double)b / (long double)wb;
        CHECK(!(less && more));
        if (x < y * 0.999999999L) CHECK(less);
        if (y < x * 0.999999999L) CHECK(more);
        if (wa == wb) CHECK_EQ(less, a < b);
        if (wa == wb) CHECK_EQ(more, b < a);
    }
    CHECK(spdl__weight_less(((uint64_t)1 << 60), 3, ((uint64_t)1 << 60) + 1, 3));
    CHECK(!spdl__weight_less(1, 1, 3, 3) && !spdl__weight_less(3, 3, 1, 1));
    /* 0.3 is a little less than three times 0.1 */
    CHECK(!spdl__weight_less(3, 0.3, 1, 0.1) && spdl__weight_less(1, 0.1, 3, 0.3));
}

/* Slow paths are waited for: the order is always the same. */
static void a_weighted_mix_is_the_same_every_time(void) {
    static long first[60];
    for (int i = 0; i < 6 * CROWDS; ++i) {
        long values[61];
        spdl_pipeline *p =
            START(crowds[i % CROWDS], SPDL_PATH("a", .weight = 0.7),
                  SOURCE(.count = 30, .sleep_us = i % 2 ? 200 : 0), SPDL_PATH("b", .weight = 0.2),
                  UP_TO(20, 100), SPDL_PATH("c", .weight = 0.1),
                  SPDL_SOURCE(count_up, SCRIPT(.count = 10, .sleep_us = i % 3 ? 0 : 300),
                              .threads = 1, .free_item = item_free),
                  SPDL_PIPE(follow, SCRIPT(.plus = 200), .concurrency = 3), WEIGHTED(),
                  SPDL_SINK(1 + i % 3));
        CHECK_EQ(take_values(p, values, 61, SPDL_END), 60);
        if (i == 0) memcpy(first, values, sizeof first);
        CHECK(memcmp(first, values, sizeof first) == 0);
        DONE(p);
    }
}

/* --- epochs, failures, stops --- */

#define EPOCHS_OF(count_, plus_) CONTINUOUS(.count = (count_)), FOLLOW(.plus = (plus_))

static void epochs_of_several_sources(void) {
    for (int i = 0; i < CROWDS; ++i) {
        spdl_pipeline *p = START(crowds[i], SPDL_PATH("a"), EPOCHS_OF(2, 0), SPDL_PATH("b"),
                                 EPOCHS_OF(3, 10), ROBIN(), SPDL_SINK(1));
        for (int k = 0; k < 4; ++k) TAKE_EPOCH(p, "0 10 1 11 12");
        DONE(p);
        p = START(crowds[i], SPDL_PATH("a", .weight = 3), EPOCHS_OF(4, 0),
                  SPDL_PATH("b", .weight = 1), EPOCHS_OF(2, 10), WEIGHTED(), SPDL_BATCH(4),
                  SPDL_PIPE(add_up, .free_item = item_free), SPDL_SINK(1));
        for (int k = 0; k < 4; ++k) TAKE_EPOCH(p, "13 14");
        DONE(p);
        p = START(crowds[i], SPDL_PATH("a"), EPOCHS_OF(0, 0), SPDL_PATH("b"), EPOCHS_OF(2, 10),
                  SPDL_MERGE(), SPDL_SINK(1));
        for (int k = 0; k < 4; ++k) TAKE_EPOCH(p, "10 11");
        DONE(p);
    }
}

/* A path that fails ends them all, though others never end, or block. */
static void a_source_that_fails_ends_them_all(void) {
    static const spdl_merge_order orders[] = { SPDL_MERGE_READY, SPDL_MERGE_ROBIN,
                                               SPDL_MERGE_WEIGHTED };
    for (int i = 0; i < 6 * CROWDS; ++i) {
        static blocker b;
        const spdl_merge_order order = orders[i % 3];
        const double weight = order == SPDL_MERGE_WEIGHTED ? 1 : 0;
        const spdl_stage endless = COUNT_TO(-1), blocks = BLOCK(&b);
        spdl_pipeline *p;
        long values[1000];
        b = (blocker){ .count = 2 };
        p = START(crowds[i / 6], SPDL_PATH("a", .weight = weight), COUNT_TO(20),
                  SPDL_PIPE(follow, SCRIPT(.plus = 0, .every = 99, .rest = 2,
                                           .result = SPDL_E_STAGE)),
                  FOLLOW(.plus = 0), SPDL_PATH("b", .weight = weight), i / 3 % 2 ? endless : blocks,
                  FOLLOW(.plus = 100), SPDL_MERGE(.merge_order = order), SPDL_SINK(1));
        (void)take_values(p, values, 1000, SPDL_E_STAGE);
        failed_with(p, 2, "spdl: stage 2 'follow', item 2: value 2 is bad");
        open_gate(&b.gate);
        DONE(p);
    }
}

/* The first one that is seen is reported, and that does not change when it was. */
static void several_sources_fail_at_once(void) {
    for (int i = 0; i < 150; ++i) {
        const script bad = { .every = 5, .rest = 4, .result = SPDL_E_STAGE };
        script at[4] = { bad, bad, bad, bad };
        spdl_pipeline *p =
            START(1 + i % 4, SPDL_PATH("a"), COUNT_TO(-1), SPDL_PIPE(follow, .ctx = &at[0]),
                  SPDL_PIPE(follow, .ctx = &at[1]), SPDL_PATH("b"),
                  SPDL_SOURCE(count_up, SCRIPT(.count = -1), .threads = i / 4 % 2,
                              .free_item = item_free),
                  SPDL_PIPE(follow, .ctx = &at[2], .threads = 1),
                  SPDL_PIPE(follow, .ctx = &at[3], .threads = 1), SPDL_MERGE(), SPDL_SINK(1));
        char text[SPDL_TEXT_BYTES];
        spdl_result result = SPDL_OK;
        at[1].rest = at[3].rest = 4 - i % 3;
        while (result == SPDL_OK) {
            item *it;
            result = spdl_pipeline_next(p, (void **)&it, SPDL_SECONDS(15));
            if (result == SPDL_OK) item_free(it);
        }
        CHECK_EQ(result, SPDL_E_STAGE);
        snprintf(text, sizeof text, "%s", spdl_pipeline_error(p)->text);
        if (i % 5 == 0) sleep_us(500);
        CHECK_STR(spdl_pipeline_error(p)->text, text);
        DONE(p);
    }
}

static void several_sources_stop_anywhere(void) {
    for (int i = 0; i < 200; ++i) {
        spdl_pipeline *p =
            START(crowds[i % CROWDS], SPDL_PATH("a", .weight = 2), COUNT_TO(i % 7 ? -1 : 9),
                  SPDL_PATH("b", .weight = 1),
                  SPDL_SOURCE(count_up, SCRIPT(.count = -1), .threads = i / 4 % 2,
                              .free_item = item_free),
                  FOLLOW(.plus = 0), WEIGHTED(), FOLLOW(.plus = 0, .stop_at = i / 9),
                  SPDL_SINK(1 + i % 3));
        item *it;
        for (int k = 0; k < i % 10 && spdl_pipeline_next(p, (void **)&it, -1) == SPDL_OK; ++k)
            item_free(it);
        DONE(p);
    }
}

/* Two pipelines mixed, and what either does is its own. */
static void pipelines_are_mixed(void) {
    for (int i = 0; i < CROWDS; ++i) {
        spdl_pipeline *a = START(1, COUNT_TO(6), SPDL_SINK(2));
        spdl_pipeline *b = START(0, COUNT_TO(2), FOLLOW(.plus = 100), SPDL_SINK(1));
        spdl_pipeline *p = START(crowds[i], SPDL_PATH("a", .weight = 3), FROM(a, .name = "a's"),
                                 SPDL_PATH("b", .weight = 1), FROM(b, .name = "b's"), WEIGHTED(),
                                 FOLLOW(.plus = 0), SPDL_SINK(1));
        TAKE_ALL(p, "0 1 2 100 3 4 5 101", SPDL_END);
        spdl_pipeline_destroy(p);
        spdl_pipeline_destroy(a);
        DONE(b);
    }
}

/* Counts and turns begin again; a pipeline that is a source is rewound before. */
static void several_sources_are_rewound(void) {
    for (int i = 0; i < 12 * CROWDS; ++i) {
        const int threads = i / CROWDS % 2;
        spdl_pipeline *a = START(1, COUNT_TO(6), SPDL_SINK(2));
        spdl_pipeline *p =
            START(crowds[i % CROWDS], SPDL_PATH("a", .weight = 2), FROM(a, .name = "a's"),
                  SPDL_PATH("b", .weight = 1),
                  SPDL_SOURCE(count_up, SCRIPT(.count = 3), .threads = threads,
                              .free_item = item_free),
                  FOLLOW(.plus = 100), WEIGHTED(), SPDL_SINK(1 + i % 3));
        for (int k = 0; k < i % 10; ++k) {
            item *it = NULL;
            if (spdl_pipeline_next(p, (void **)&it, SPDL_FOREVER) == SPDL_OK) item_free(it);
        }
        CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(spdl_pipeline_rewind(a, 0, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_FOREVER), SPDL_OK);
        TAKE_ALL(p, "0 1 100 2 3 101 4 5 102", SPDL_END);
        spdl_pipeline_destroy(p);
        DONE(a);
    }
}

static int least_first(void *ctx, const signed char *ready, int paths) {
    *(int *)ctx += 1;
    for (int i = paths - 1; i >= 0; --i)
        if (ready[i] >= 0) return ready[i] ? i : -1;
    return -1;
}

static void a_function_chooses_among_sources(void) {
    for (int i = 0; i < CROWDS; ++i) {
        int asked = 0;
        RUN(START(crowds[i], SPDL_PATH("a"), UP_TO(3, 0), SPDL_PATH("b"), UP_TO(3, 10),
                  SPDL_MERGE(.merge_order = SPDL_MERGE_CHOICE, .merge_fn = least_first,
                             .ctx = &asked),
                  SPDL_SINK(1)),
            "10 11 12 0 1 2", SPDL_END);
        CHECK(asked >= 6);
    }
}

/* --- rows that are refused --- */

SPDL_FN(another, void, spdl_batch) { return SPDL_END; }

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

static void rows_of_several_sources_are_checked(void) {
    const spdl_stage one = COUNT_TO(1), two = SPDL_PATH("two"), a = SPDL_PATH("a");
    const spdl_stage light = SPDL_PATH("light", .weight = 1), merge = SPDL_MERGE();
    spdl_stage weighted = WEIGHTED(), odd = one;
    REFUSED("0 'merge': the first row must be SPDL_SOURCE, SPDL_FROM or SPDL_FEED, or SPDL_PATH "
            "before several sources", merge, SPDL_SINK(1));
    REFUSED("2 'merge': SPDL_MERGE of fewer than 2 paths", a, one, merge, SPDL_SINK(1));
    REFUSED("0 'a': SPDL_PATH without SPDL_MERGE below", a, one, two, one, SPDL_SINK(1));
    REFUSED("1 'merge': after SPDL_PATH of several sources there must be SPDL_SOURCE or SPDL_FROM",
            a, merge, SPDL_SINK(1));
    REFUSED("1 'pass_on': after SPDL_PATH of several sources there must be SPDL_SOURCE or "
            "SPDL_FROM", a, SPDL_PIPE(pass_on), two, one, merge, SPDL_SINK(1));
    REFUSED("2 'count_up': only the first row may be SPDL_SOURCE or SPDL_FROM, or the first of a "
            "path when the table begins with SPDL_PATH", a, one, one, two, one, merge,
            SPDL_SINK(1));
    REFUSED("1 'count_up': only the first row may be SPDL_SOURCE or SPDL_FROM, or the first of a "
            "path when the table begins with SPDL_PATH", one, one, SPDL_SINK(1));
    REFUSED("3 'count_up': only the first row may be SPDL_SOURCE or SPDL_FROM, or the first of a "
            "path when the table begins with SPDL_PATH", one, SPDL_BRANCH(pass_on), a, one, two,
            merge, SPDL_SINK(1));
    REFUSED("1 'feed': only the first row may be SPDL_FEED: one of several sources is SPDL_SOURCE "
            "or SPDL_FROM", a, SPDL_FEED(item), two, one, merge, SPDL_SINK(1));
    REFUSED("5 'b': SPDL_PATH without SPDL_BRANCH above", a, one, two, one, merge, SPDL_PATH("b"),
            one, SPDL_SINK(1));
    REFUSED("0 'a': buffer_size is set, but there is no edge before a source: set that of the "
            "source", SPDL_PATH("a", .buffer_size = 2), one, two, one, merge, SPDL_SINK(1));
    odd.continuous = true;
    REFUSED("3 'count_up': continuous is set for some of the sources that a merge joins, but not "
            "for all", a, one, two, odd, merge, SPDL_SINK(1));
    REFUSED("4 'merge': merge_order is SPDL_MERGE_BATCHES, which joins what one SPDL_BRANCH has "
            "split", a, SPDL_SOURCE(another), two, SPDL_SOURCE(another),
            SPDL_MERGE(.merge_order = SPDL_MERGE_BATCHES), SPDL_SINK(1));
    REFUSED("4 'merge': merge_order is SPDL_MERGE_WEIGHTED, which joins several sources", one,
            SPDL_BRANCH(pass_on), light, light, weighted, SPDL_SINK(1));
    REFUSED("2 'two': weight is 0, must be more than 0: its merge is SPDL_MERGE_WEIGHTED", light,
            one, two, one, weighted, SPDL_SINK(1));
    REFUSED("2 'light': weight is set, but its merge is not SPDL_MERGE_WEIGHTED", one,
            SPDL_BRANCH(pass_on), light, two, merge, SPDL_SINK(1));
    REFUSED("0 'a': weight is -1, must be more than 0", SPDL_PATH("a", .weight = -1), one, two, one,
            merge, SPDL_SINK(1));
    REFUSED("0 'a': weight is inf, must be more than 0", SPDL_PATH("a", .weight = INFINITY), one,
            light, one, weighted, SPDL_SINK(1));
    REFUSED("0 'a': weight is nan, must be more than 0", SPDL_PATH("a", .weight = (double)NAN), one,
            light, one, weighted, SPDL_SINK(1));
    REFUSED("4 'merge' merges 'item *' of stage 1 'count_up' with 'spdl_batch *' of stage 3 "
            "'another'", a, one, two, SPDL_SOURCE(another), merge, SPDL_SINK(1));
}

static void rows_of_other_sources_are_checked(void) {
    const spdl_stage from = SPDL_FROM(item, hand_next, NULL);
    spdl_stage odd = from;
    REFUSED("0 'count_up': threads is 2, must be 1 to 1",
            SPDL_SOURCE(count_up, SCRIPT(.count = 1), .threads = 2), SPDL_SINK(1));
    odd.emits = true;
    REFUSED("0 'from': emits is set, but what SPDL_FROM yields are items", odd, SPDL_SINK(1));
    odd = from;
    odd.type = NULL;
    REFUSED("0 'from': next is set, but type is NULL", odd, SPDL_SINK(1));
    odd = from;
    odd.next = NULL;
    odd.fn = &count_up_spdl;
    REFUSED("0 'count_up': type is set, but only feed rows have it", odd, SPDL_SINK(1));
    odd = from;
    odd.fn = &count_up_spdl;
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
    TEST_CASE(a_blocked_source_gives_its_buffer_back),
    TEST_CASE(two_blocked_sources),
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
    TEST_CASE(any_next_function_is_a_source),
    TEST_CASE(from_stops_while_it_waits),
    TEST_CASE(from_stops_with_its_pipeline),
    TEST_CASE(two_sources_are_merged),
    TEST_CASE(sources_have_turns),
    TEST_CASE(sources_may_be_empty),
    TEST_CASE(five_sources_are_merged),
    TEST_CASE(weights_mix_in_their_ratio),
    TEST_CASE(a_path_that_ends_leaves_the_ratios),
    TEST_CASE(weights_are_compared_exactly),
    TEST_CASE(a_weighted_mix_is_the_same_every_time),
    TEST_CASE(epochs_of_several_sources),
    TEST_CASE(a_source_that_fails_ends_them_all),
    TEST_CASE(several_sources_fail_at_once),
    TEST_CASE(several_sources_stop_anywhere),
    TEST_CASE(pipelines_are_mixed),
    TEST_CASE(several_sources_are_rewound),
    TEST_CASE(a_function_chooses_among_sources),
    TEST_CASE(rows_of_several_sources_are_checked),
    TEST_CASE(rows_of_other_sources_are_checked),
    TEST_END
};
