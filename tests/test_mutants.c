/* What one changed line of the library would break, and no other test shows; `make mutate` looks
   for more. Where only a race shows it, threads are held at a point of the library, so that it
   happens every time. */
#include "flow.h"

/* --- rows --- */

/* A thread that sees a hole, which another one passes before it, leaves the room as it was. (After
   some of them there would be none.) */
static void a_hole_that_another_passed_takes_no_room(void) {
    spdl_pipeline *p = START(4, COUNT_TO(-1), SPDL_PIPE(follow, .concurrency = 2, SCRIPT(
                                 .every = 2, .result = SPDL_SKIP), .buffer_size = 1),
                             SPDL_PIPE(follow, SCRIPT(.plus = 0), .concurrency = 3), SPDL_SINK(2));
    spdl_result result = SPDL_OK;
    int held = 0, silent = 0;
    for (long value = 1; held < 8 && silent < 100 && result >= SPDL_OK;) {
        item *it = NULL;
        freeze_some("pipeline passes a hole", 1);
        while (__atomic_load_n(&frozen, __ATOMIC_ACQUIRE) < 2) {
            result = SPDL_NEXT(p, &it, 20000000);
            silent = result == SPDL_OK ? 0 : silent + 1;
            if (result != SPDL_OK) break; /* nobody else comes while one is held */
            CHECK_EQ(it->value, value);
            value += 2;
            item_free(it);
        }
        held += __atomic_load_n(&frozen, __ATOMIC_ACQUIRE) > 1;
        thaw();
    }
    CHECK_EQ(held, 8);
    DONE(p);
}

typedef struct numbers {
    spdl_deferred first, second;
    item *in[2];
    int calls;
} numbers;

SPDL_FN(keeps_its_number, item, item) {
    numbers *n = (numbers *)spdl_ctx(task);
    const int call = n->calls;
    (void)out;
    if (call == 0) n->first = spdl_defer(task);
    else n->second = spdl_defer(task);
    n->in[call] = in;
    __atomic_store_n(&n->calls, call + 1, __ATOMIC_RELEASE);
    return SPDL_PENDING;
}

/* The number of a call that is over is dead, though its place is another call's. */
static void a_dead_number_is_not_of_the_next_call(void) {
    numbers n = { .calls = 0 };
    item *it = NULL;
    spdl_pipeline *p = START(1, COUNT_TO(2), SPDL_PIPE(keeps_its_number, .ctx = &n,
                                                       .deferred = true, .concurrency = 1,
                                                       .free_item = item_free), SPDL_SINK(2));
    await(&n.calls, 1);
    CHECK_EQ(spdl_complete(n.first, SPDL_OK, n.in[0]), SPDL_OK);
    await(&n.calls, 2);
    CHECK_EQ(spdl_complete(n.first, SPDL_SKIP, NULL), SPDL_E_INVALID);
    CHECK_EQ(spdl_complete(n.second, SPDL_OK, n.in[1]), SPDL_OK);
    CHECK_EQ(spdl_complete(n.second, SPDL_OK, n.in[1]), SPDL_E_INVALID);
    for (long i = 0; i < 2; ++i) {
        REQUIRE(SPDL_NEXT(p, &it, SPDL_SECONDS(15)) == SPDL_OK);
        CHECK_EQ(it->value, i);
        item_free(it);
    }
    DONE(p);
}

static void items_of_a_batch_that_is_dropped_are_counted(void) {
    for (int i = 0; i < CROWDS; ++i) {
        spdl_pipeline *p = START(crowds[i], COUNT_TO(11), SPDL_BATCH(4, .drop_last = true),
                                 SPDL_SINK(3));
        TAKE_BATCHES(p, "0 1 2 3|4 5 6 7", SPDL_END);
        CHECK_EQ(stats_of(p, 1).skips, 3);
        DONE(p);
    }
}

/* --- failures --- */

typedef struct two_failures {
    int *mine, *other;
    long value;
} two_failures;

SPDL_FN(by_parity, item, item) {
    *out = in;
    CHECK_EQ(spdl_route(task, (int)(in->value % 2)), SPDL_OK);
    return SPDL_OK;
}

SPDL_FN(fails_after_the_other, item, item) {
    const two_failures *f = (const two_failures *)spdl_ctx(task);
    *out = in;
    if (in->value != f->value) return SPDL_OK;
    if (f->other != NULL) await(f->other, 1);
    sleep_us(f->other != NULL ? 20000 : 0); /* that one is recorded */
    open_gate(f->mine);
    return spdl_fail(task, "item %ld", in->value);
}

/* Of two failures the one is told that comes first in order of the items, though the other was
   there before it, and further downstream. */
static void the_failure_that_is_met_is_told(void) {
    for (int i = 2; i < 6; ++i) {
        int late = 0, early = 0;
        two_failures first = { &late, &early, 4 }, second = { &early, NULL, 5 };
        spdl_pipeline *p = START(i, COUNT_TO(20), SPDL_BRANCH(by_parity), SPDL_PATH("even"),
                                 SPDL_PIPE(fails_after_the_other, .ctx = &first, .max_failures = 0),
                                 SPDL_PATH("odd"),
                                 SPDL_PIPE(fails_after_the_other, .ctx = &second,
                                           .max_failures = 0),
                                 SPDL_MERGE(), SPDL_SINK(2));
        TAKE_ALL(p, "0 1 2 3", SPDL_E_STAGE);
        CHECK_EQ(spdl_pipeline_error(p)->stage, 3);
        CHECK_EQ(rows_failed(p), 1 << 3 | 1 << 5);
        DONE(p);
    }
}

SPDL_FN(fails_then_errs, item, item) {
    *out = in;
    if (in->value == 1) return spdl_fail(task, "item 1");
    if (in->value == 3) CHECK_EQ(spdl_route(task, 0), SPDL_E_INVALID); /* it is no branch */
    return SPDL_OK;
}

/* After a request that failed, what ends the pipeline is told as itself. */
static void an_error_behind_a_failed_request_is_told(void) {
    for (int i = 0; i < CROWDS; ++i) {
        static const spdl_result results[] = { SPDL_OK, SPDL_E_STAGE, SPDL_OK, SPDL_E_INVALID };
        spdl_pipeline_desc desc = { .workers = TEST_WORKERS(crowds[i]), .deliver_failures = true };
        spdl_pipeline *p = NULL;
        desc.logger.log_fn = log_nothing;
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
                    SPDL_FEED(item, .buffer_size = 4, .free_item = item_free),
                    SPDL_PIPE(fails_then_errs), SPDL_SINK(2))) == SPDL_OK);
        for (long k = 0; k < 4; ++k) {
            item *it = NULL;
            CHECK_EQ(spdl_pipeline_push(p, item_make(k), SPDL_SECONDS(15)), SPDL_OK);
            CHECK_EQ(SPDL_NEXT(p, &it, SPDL_SECONDS(15)), results[k]);
            if (k % 2) CHECK_EQ(spdl_pipeline_error(p)->result, results[k]);
            if (k < 3 && CHECK(it != NULL)) item_free(it);
        }
        CHECK(strstr(spdl_pipeline_error(p)->text, "stage 1 'fails_then_errs', item 3") != NULL);
        DONE(p);
    }
}

/* --- who is woken --- */

static void holds_the_worker(void *arg, int worker, void *local) {
    int *gate = (int *)arg;
    (void)worker, (void)local;
    open_gate(&gate[0]);
    await(&gate[1], 1);
}

SPDL_FN(comes_late, void, item) {
    if (spdl_sequence(task) == 5) return SPDL_END;
    sleep_us(20000);
    *out = item_make((long)spdl_sequence(task));
    return SPDL_OK;
}

/* The only worker is elsewhere, and the consumer sleeps in next: it is woken for a row that it can
   run. */
static void a_consumer_that_works_is_woken_for_a_row(void) {
    const spdl_pool_desc pool_desc = { .workers = 1, .guests = 1 };
    int gate[2] = { 0, 0 };
    spdl_pipeline_desc desc = { .next_works_ns = SPDL_FOREVER };
    spdl_pipeline *p = NULL;
    desc.logger.log_fn = log_nothing;
    REQUIRE(spdl_pool_create(&desc.pool, &pool_desc) == SPDL_OK);
    REQUIRE(spdl_pool_submit(desc.pool, holds_the_worker, gate, 0) == SPDL_OK);
    await(&gate[0], 1);
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
                SPDL_SOURCE(comes_late, .threads = 1, .free_item = item_free),
                FOLLOW(.plus = 0), SPDL_SINK(2))) == SPDL_OK);
    CHECK_EQ(take_from(p, 0, 100, SPDL_END), 5);
    open_gate(&gate[1]);
    DONE(p);
    spdl_pool_destroy(desc.pool);
}

/* The consumer takes most of a large buffer and does not come back: it is filled meanwhile. */
static void a_large_buffer_is_filled_before_it_is_empty(void) {
    script source = { .count = -1 };
    spdl_pipeline *p = START(1, SPDL_SOURCE(count_up, .ctx = &source, .free_item = item_free),
                             SPDL_SINK(16));
    int calls = 0, before = -1;
    item *it = NULL;
    while (calls < 16 || calls != before) { /* full, and the worker asleep */
        before = calls;
        sleep_us(20000);
        calls = __atomic_load_n(&source.calls, __ATOMIC_ACQUIRE);
    }
    for (long i = 0; i < 14; ++i) {
        REQUIRE(SPDL_NEXT(p, &it, SPDL_SECONDS(15)) == SPDL_OK);
        CHECK_EQ(it->value, i);
        item_free(it);
    }
    await(&source.calls, calls + 12);
    DONE(p);
}

/* --- stop and destroy --- */

SPDL_FN(stops_in_its_source, void, item) {
    if (spdl_sequence(task) == 3)
        CHECK_EQ(spdl_pipeline_stop(*(spdl_pipeline **)spdl_ctx(task), SPDL_SECONDS(15)), SPDL_OK);
    *out = item_make((long)spdl_sequence(task));
    return SPDL_OK;
}

/* A stop on the thread of a source does not wait for the call that it is in. */
static void a_source_with_a_thread_may_stop(void) {
    for (int i = 0; i < CROWDS; ++i) {
        const uint64_t start_ns = spdl_time_ns();
        static spdl_pipeline *p;
        spdl_pipeline_desc desc = { .workers = TEST_WORKERS(crowds[i]) };
        spdl_pipeline *made = NULL;
        item *it = NULL;
        spdl_result result;
        desc.logger.log_fn = log_nothing;
        freeze("source about to block"); /* no call before p is known */
        REQUIRE(spdl_pipeline_create(&made, &desc, SPDL_STAGES(
                    SPDL_SOURCE(stops_in_its_source, .ctx = &p, .threads = 1,
                                .free_item = item_free), SPDL_SINK(2))) == SPDL_OK);
        p = made;
        freeze(NULL);
        while ((result = SPDL_NEXT(p, &it, SPDL_SECONDS(15))) == SPDL_OK) item_free(it);
        CHECK_EQ(result, SPDL_CLOSED);
        CHECK(spdl_time_ns() - start_ns < 10000000000u);
        DONE(p);
    }
}

typedef struct slow_next {
    int inside, left;
} slow_next;

/* Keeps to no timeout, but comes back. */
static spdl_result next_is_late(void *source, void **out, int64_t timeout_ns) {
    slow_next *s = (slow_next *)source;
    (void)out, (void)timeout_ns;
    open_gate(&s->inside);
    sleep_us(100000);
    open_gate(&s->left);
    return SPDL_TIMEOUT;
}

/* Destroy waits for a next function, also when a stop has not. */
static void destroy_waits_for_a_next_function(void) {
    for (int i = 0; i < CROWDS; ++i) {
        slow_next s = { 0, 0 };
        spdl_pipeline *p = START(crowds[i], SPDL_FROM(item, next_is_late, &s), SPDL_SINK(1));
        await(&s.inside, 1);
        s.left = 0;
        CHECK_EQ(spdl_pipeline_stop(p, 1), SPDL_TIMEOUT);
        DONE(p);
        CHECK_EQ(s.left, 1);
    }
}

/* --- positions --- */

/* Sums that are heavy enough, one item after the other. */
static void a_second_load_forgets_nothing(void) {
    for (int loads = 1; loads < 4; ++loads) {
        char text[SPDL_STATE_BYTES];
        const char *texts[] = { text };
        scale s = { .limit = 10 };
        spdl_error error;
        spdl_pipeline *p = START(0, CONTINUOUS(.count = 12), WEIGH(&s), SPDL_SINK(1));
        TAKE(p, 1, "10"); /* 0 1 2 3 4 */
        REQUIRE(spdl_state_save(p, text, sizeof text) > 0);
        TAKE(p, 2, "11 15");
        for (int i = 0; i < loads; ++i)
            CHECK_EQ(spdl_state_load(p, texts, 1, SPDL_FOREVER, &error), SPDL_OK);
        TAKE_EPOCH(p, "11 15 19 11");
        TAKE_EPOCH(p, "10 11 15 19 11");
        DONE(p);
    }
}

static spdl_pipeline *of_rank(int rank, int world, spdl_sampler **sampler) {
    spdl_sampler_desc desc = { .count = 60 };
    desc.ranks.rank = rank;
    desc.ranks.world = world;
    REQUIRE(spdl_sampler_create(sampler, &desc) == SPDL_OK);
    return START(1, SPDL_INDEX(*sampler, .continuous = true), SPDL_SINK(2));
}

/* What all ranks were given is shared by the new ones. */
static void ranks_that_change_share_what_was_delivered(void) {
    char text[4][SPDL_STATE_BYTES];
    const char *texts[] = { text[0], text[1], text[2] };
    spdl_sampler *sampler;
    spdl_error error;
    for (int rank = 0; rank < 3; ++rank) {
        spdl_pipeline *p = of_rank(rank, 3, &sampler);
        for (int i = 0; i < 4; ++i) {
            spdl_index *index;
            REQUIRE(SPDL_NEXT(p, &index, SPDL_SECONDS(15)) == SPDL_OK);
            spdl_buffer_free(index);
        }
        CHECK(spdl_state_save(p, text[rank], SPDL_STATE_BYTES) > 0);
        CHECK(strstr(text[rank], " delivered=4 ") != NULL);
        spdl_pipeline_destroy(p);
        spdl_sampler_destroy(sampler);
    }
    for (int world = 1; world < 3; ++world) {
        spdl_pipeline *p = of_rank(0, world, &sampler);
        CHECK_EQ(spdl_state_load(p, texts, 3, SPDL_FOREVER, &error), SPDL_OK);
        CHECK(spdl_state_save(p, text[3], SPDL_STATE_BYTES) > 0);
        CHECK(strstr(text[3], world == 1 ? " delivered=12 " : " delivered=6 ") != NULL);
        spdl_pipeline_destroy(p);
        spdl_sampler_destroy(sampler);
    }
}

typedef struct keys {
    uint64_t of_item[8], of_flush[4];
    int items, flushes;
} keys;

SPDL_FN(notes_its_key, item, item) {
    keys *k = (keys *)spdl_ctx(task);
    if (spdl_flushing(task)) {
        k->of_flush[k->flushes++ % 4] = spdl_item_key(task);
        return SPDL_SKIP;
    }
    k->of_item[k->items++ % 8] = spdl_item_key(task);
    *out = in;
    return SPDL_OK;
}

/* The call of .flush has a key of its own in each epoch, and the same in each run. */
static void the_key_of_a_flush_is_its_own(void) {
    keys k[2];
    memset(k, 0, sizeof k);
    for (int run = 0; run < 2; ++run) {
        spdl_pipeline *p = START(run, CONTINUOUS(.count = 4),
                                 SPDL_PIPE(notes_its_key, .ctx = &k[run], .flush = true,
                                           .free_item = item_free), SPDL_SINK(1));
        TAKE_EPOCH(p, "0 1 2 3");
        TAKE_EPOCH(p, "0 1 2 3");
        DONE(p);
        CHECK(k[run].of_flush[0] != k[run].of_flush[1]);
        for (int i = 0; i < 8; ++i) {
            CHECK(k[run].of_item[i] != k[run].of_flush[0]);
            CHECK(k[run].of_item[i] != k[run].of_flush[1]);
        }
    }
    CHECK_EQ(k[0].of_flush[0], k[1].of_flush[0]);
    CHECK_EQ(k[0].of_flush[1], k[1].of_flush[1]);
}

TEST_TABLE(mutants) {
    TEST_CASE(a_hole_that_another_passed_takes_no_room),
    TEST_CASE(a_dead_number_is_not_of_the_next_call),
    TEST_CASE(items_of_a_batch_that_is_dropped_are_counted),
    TEST_CASE(the_failure_that_is_met_is_told),
    TEST_CASE(an_error_behind_a_failed_request_is_told),
    TEST_CASE(a_consumer_that_works_is_woken_for_a_row),
    TEST_CASE(a_large_buffer_is_filled_before_it_is_empty),
    TEST_CASE(a_source_with_a_thread_may_stop),
    TEST_CASE(destroy_waits_for_a_next_function),
    TEST_CASE(a_second_load_forgets_nothing),
    TEST_CASE(ranks_that_change_share_what_was_delivered),
    TEST_CASE(the_key_of_a_flush_is_its_own),
    TEST_END,
};
