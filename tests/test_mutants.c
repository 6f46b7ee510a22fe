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

/* Behind a call that takes long others go on, until all 64 slots are holes. */
static void holes_fill_the_window(void) {
    int gate = 0;
    script row = { .gate = &gate, .gate_at = 0, .every = 1, .result = SPDL_SKIP };
    spdl_pipeline *p = START(2, COUNT_TO(200), SPDL_PIPE(follow, .ctx = &row, .concurrency = 2,
                                                         .buffer_size = 25),
                             FOLLOW(.plus = 0), SPDL_SINK(1));
    await(&row.calls, 64);
    sleep_us(20000);
    CHECK_EQ(__atomic_load_n(&row.calls, __ATOMIC_ACQUIRE), 64);
    open_gate(&gate);
    TAKE_ALL(p, "", SPDL_END);
    CHECK_EQ(row.calls, 200);
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
    int waits_for; /* a row */
    long value;
} two_failures;

SPDL_FN(by_parity, item, item) {
    *out = in;
    CHECK_EQ(spdl_route(task, (int)(in->value % 2)), SPDL_OK);
    return SPDL_OK;
}

/* Waits until a failure of this row is recorded. */
static void await_failure(const spdl_task *task, int row) {
    const uint64_t start = spdl_time_ns();
    while (!(rows_failed(task_pipeline(task)) >> row & 1)) {
        REQUIRE(spdl_time_ns() - start < 15000000000u);
        sleep_us(200);
    }
}

SPDL_FN(fails_after_the_other, item, item) {
    const two_failures *f = (const two_failures *)spdl_ctx(task);
    *out = in;
    if (in->value != f->value) return SPDL_OK;
    if (f->waits_for != 0) await_failure(task, f->waits_for);
    return spdl_fail(task, "item %ld", in->value);
}

/* Of two failures the one is told that comes first in order of the items, though the other was
   there before it, and further downstream. */
static void the_failure_that_is_met_is_told(void) {
    for (int i = 2; i < 6; ++i) {
        two_failures first = { 5, 4 }, second = { 0, 5 };
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

SPDL_FN(fails_one_after_the_other, item, item) {
    *out = in;
    if (in->value < 2 || in->value > 3) return SPDL_OK;
    if (in->value == 2) await_failure(task, 1); /* that of item 3 */
    return spdl_fail(task, "value %ld", in->value);
}

/* The same of two failures of one row. */
static void the_first_item_of_a_row_is_told(void) {
    for (int workers = 2; workers < 6; ++workers) {
        spdl_pipeline *p = START(workers, COUNT_TO(20),
                                 SPDL_PIPE(fails_one_after_the_other, .concurrency = 2,
                                           .max_failures = 0), SPDL_SINK(2));
        TAKE_ALL(p, "0 1", SPDL_E_STAGE);
        CHECK(strstr(spdl_pipeline_error(p)->text, "item 2: value 2") != NULL);
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
    await(&source.calls, calls + 8); /* a worker woken at half may be done before the last takes */
    DONE(p);
}

/* A worker sleeps, as the row is at its limit: a higher one wakes it. */
static void a_higher_limit_wakes_a_worker(void) {
    int gate = 0;
    script row = { .gate = &gate, .gate_at = 0 };
    spdl_pipeline *p = START(2, SPDL_FEED(item, .buffer_size = 4, .free_item = item_free),
                             SPDL_PIPE(follow, .ctx = &row, .concurrency = 2), SPDL_SINK(4));
    CHECK_EQ(spdl_pipeline_set_concurrency(p, 1, 1), SPDL_OK);
    for (long i = 0; i < 2; ++i) CHECK_EQ(spdl_pipeline_push(p, item_make(i), 0), SPDL_OK);
    await(&row.calls, 1);
    sleep_us(20000);
    CHECK_EQ(__atomic_load_n(&row.calls, __ATOMIC_ACQUIRE), 1);
    CHECK_EQ(spdl_pipeline_set_concurrency(p, 1, 2), SPDL_OK);
    await(&row.calls, 2);
    open_gate(&gate);
    CHECK_EQ(take_from(p, 0, 2, SPDL_OK), 2);
    DONE(p);
}

/* The row of SPDL_UNBATCH is a pipe of one call, also for those who ask. */
static void a_row_that_takes_batches_apart_is_a_pipe(void) {
    spdl_pipeline *p = START(1, COUNT_TO(4), SPDL_BATCH(2), SPDL_UNBATCH(), SPDL_SINK(2));
    CHECK_EQ(spdl_pipeline_set_concurrency(p, 2, 1), SPDL_OK);
    CHECK_EQ(spdl_pipeline_set_concurrency(p, 2, 2), SPDL_E_LIMIT);
    CHECK_EQ(spdl_pipeline_set_concurrency(p, 1, 1), SPDL_E_INVALID);
    TAKE_ALL(p, "0 1 2 3", SPDL_END);
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
        thaw();
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
        __atomic_store_n(&s.left, 0, __ATOMIC_RELAXED);
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

/* --- races, step by step --- */

static spdl_pipeline *fed_by_pushes(spdl_pool *pool, script *row, int room, bool drops) {
    return START_ON(pool, SPDL_FEED(item, .buffer_size = room, .free_item = item_free,
                                    .drop_oldest = drops),
                    SPDL_PIPE(follow, .ctx = row, .concurrency = 1), SPDL_SINK(16));
}

/* After it the worker looks at its pipelines. */
static void wakes_a_worker(void *arg, int worker, void *local) {
    (void)arg, (void)worker, (void)local;
}

typedef struct gathered {
    spdl_pool *pool;
    int flushes, gate[2];
} gathered;

SPDL_FN(adds_one_at_the_end, item, item) {
    gathered *g = (gathered *)spdl_ctx(task);
    *out = in;
    if (spdl_flushing(task)) {
        *out = item_make(100);
        if (__atomic_add_fetch(&g->flushes, 1, __ATOMIC_RELEASE) == 1)
            CHECK_EQ(spdl_pool_submit(g->pool, holds_the_worker, g->gate, 0), SPDL_OK);
    }
    return SPDL_OK;
}

/* Another thread makes the call of .flush between the look at a mark and the swap: the word is the
   same again. */
static void two_that_pass_a_mark_flush_once(void) {
    gathered g = { .pool = pool_of(2) };
    spdl_pipeline *p;
    freeze_some("pipeline about to pass", 1);
    p = START_ON(g.pool, COUNT_TO(1), SPDL_PIPE(adds_one_at_the_end, .ctx = &g, .flush = true,
                                                .free_item = item_free), SPDL_SINK(4));
    await(&frozen, 1);
    CHECK_EQ(spdl_pool_submit(g.pool, wakes_a_worker, NULL, 0), SPDL_OK);
    await(&g.gate[0], 1); /* the other one has made the call, and is elsewhere */
    thaw();
    TAKE_ALL(p, "0 100", SPDL_END);
    CHECK_EQ(g.flushes, 1);
    open_gate(&g.gate[1]);
    DONE(p);
    spdl_pool_destroy(g.pool);
}

typedef struct taker {
    spdl_pipeline *p;
    spdl_result result;
    long value;
} taker;

static void *takes_one(void *arg) {
    taker *t = (taker *)arg;
    item *it = NULL;
    t->result = SPDL_NEXT(t->p, &it, SPDL_FOREVER);
    if (t->result == SPDL_OK) {
        t->value = it->value;
        item_free(it);
    }
    return NULL;
}

static void *pushes_one(void *arg) {
    taker *t = (taker *)arg;
    item *it = item_make(t->value);
    t->result = spdl_pipeline_push(t->p, it, SPDL_FOREVER);
    if (t->result != SPDL_OK) item_free(it);
    return NULL;
}

/* An item comes after the last look of next, and before next says that it waits. */
static void an_item_that_comes_before_a_wait_is_seen(void) {
    script row = { .plus = 0 };
    spdl_pool *pool = pool_of(1);
    spdl_pipeline *p = fed_by_pushes(pool, &row, 4, false);
    taker t = { .p = p };
    test_thread consumer;
    freeze_some("consumer found nothing", 1);
    consumer = thread_of(takes_one, &t);
    await(&frozen, 1);
    CHECK_EQ(spdl_pipeline_push(p, item_make(7), 0), SPDL_OK);
    await(&row.calls, 1);
    sleep_us(20000); /* it is put, and the worker sleeps */
    thaw();
    test_join(consumer);
    CHECK_EQ(t.result, SPDL_OK);
    CHECK_EQ(t.value, 7);
    DONE(p);
    spdl_pool_destroy(pool);
}

/* Room comes after the last look of push, and before push says that it waits. */
static void room_that_comes_before_a_wait_is_seen(void) {
    int gate = 0;
    script row = { .gate = &gate, .gate_at = 0 };
    spdl_pool *pool = pool_of(1);
    spdl_pipeline *p = fed_by_pushes(pool, &row, 1, false);
    taker t = { .p = p };
    test_thread producer;
    for (item *it = item_make(0);; it = item_make(++t.value)) {
        if (spdl_pipeline_push(p, it, 0) == SPDL_OK) {
            if (t.value == 0) await(&row.calls, 1);
            continue;
        }
        item_free(it);
        break;
    }
    freeze_some("producer found no room", 1);
    producer = thread_of(pushes_one, &t);
    await(&frozen, 1);
    open_gate(&gate);
    await(&row.calls, (int)t.value);
    sleep_us(20000); /* all were taken */
    thaw();
    test_join(producer);
    CHECK_EQ(t.result, SPDL_OK);
    CHECK_EQ(take_from(p, 0, t.value + 1, SPDL_OK), t.value + 1);
    DONE(p);
    spdl_pool_destroy(pool);
}

/* A push between the last look of a worker and its word that it sleeps. */
static void work_that_comes_before_a_sleep_is_seen(void) {
    script row = { .plus = 0 };
    spdl_pool *pool;
    spdl_pipeline *p;
    freeze_some("pool found nothing", 1);
    pool = pool_of(1);
    p = fed_by_pushes(pool, &row, 4, false);
    await(&frozen, 1);
    CHECK_EQ(spdl_pipeline_push(p, item_make(0), 0), SPDL_OK);
    thaw();
    await(&row.calls, 1); /* the consumer, who would wake it, is not there */
    CHECK_EQ(take_from(p, 0, 1, SPDL_OK), 1);
    DONE(p);
    spdl_pool_destroy(pool);
}

/* A push between the look of a worker at one of several pipelines and its word that nothing is
   there. */
static void work_that_comes_to_a_quiet_pipeline_is_seen(void) {
    script row[2] = { { .plus = 0 }, { .plus = 0 } };
    spdl_pool *pool = pool_of(1);
    spdl_pipeline *p[2];
    freeze_some("pool found a client quiet", 1);
    for (int i = 0; i < 2; ++i) p[i] = fed_by_pushes(pool, &row[i], 4, false);
    CHECK_EQ(spdl_pipeline_push(p[0], item_make(0), 0), SPDL_OK);
    await(&frozen, 1); /* in one of them */
    CHECK_EQ(spdl_pipeline_push(p[1], item_make(0), 0), SPDL_OK);
    CHECK_EQ(spdl_pipeline_push(p[0], item_make(1), 0), SPDL_OK);
    thaw();
    await(&row[0].calls, 2);
    await(&row[1].calls, 1);
    for (int i = 0; i < 2; ++i) spdl_pipeline_destroy(p[i]);
    CHECK_EQ(items_alive(), 0);
    spdl_pool_destroy(pool);
}

static void *stops_it(void *arg) {
    CHECK_EQ(spdl_pipeline_stop((spdl_pipeline *)arg, SPDL_SECONDS(15)), SPDL_OK);
    return NULL;
}

/* A push that drops the oldest item looks at it, and a stop frees it: it is freed once. */
static void a_stop_frees_what_a_push_was_to_drop(void) {
    int gate = 0;
    script row = { .gate = &gate, .gate_at = 0 };
    spdl_pool *pool = pool_of(2);
    spdl_pipeline *p = START_ON(pool, SPDL_FEED(item, .buffer_size = 2, .free_item = item_free,
                                                .drop_oldest = true),
                                SPDL_PIPE(follow, SCRIPT(.plus = 0), .concurrency = 1),
                                SPDL_PIPE(follow, .ctx = &row, .concurrency = 1), SPDL_SINK(1));
    taker t = { .p = p, .value = 99 };
    test_thread producer, stopper;
    CHECK_EQ(spdl_pipeline_push(p, item_make(0), 0), SPDL_OK);
    await(&row.calls, 1);
    for (long i = 1; i < 30; ++i) { /* the row between is full, and nobody is in it */
        CHECK_EQ(spdl_pipeline_push(p, item_make(i), 0), SPDL_OK);
        sleep_us(1000);
    }
    freeze_some("feed is full", 1);
    producer = thread_of(pushes_one, &t);
    await(&frozen, 1);
    stopper = thread_of(stops_it, p); /* waits for the call */
    while (!rows_are_shut(p)) sleep_us(200);
    freeze_some("feed drops", 1);
    await(&frozen, 1);
    open_gate(&gate);
    test_join(stopper);
    thaw();
    test_join(producer);
    CHECK_EQ(t.result, SPDL_CLOSED);
    DONE(p);
    spdl_pool_destroy(pool);
}

static void *rewinds_it(void *arg) {
    CHECK_EQ(spdl_pipeline_rewind((spdl_pipeline *)arg, 0, SPDL_SECONDS(15)), SPDL_OK);
    return NULL;
}

/* A stop comes when a rewind is the keeper and has not cleared earlier stops yet: the stop is one
   of them. It waits for the rewind, and frees nothing. */
static void a_stop_before_a_rewind_is_over(void) {
    spdl_pipeline *p = START(1, COUNT_TO(-1), SPDL_SINK(1));
    test_thread rewinder, stopper;
    freeze_some("rewind is the keeper", 1);
    rewinder = thread_of(rewinds_it, p);
    await(&frozen, 1);
    stopper = thread_of(stops_it, p);
    while (!rows_are_shut(p)) sleep_us(100);
    sleep_us(50000); /* it sleeps until the rewind is over */
    thaw();
    test_join(stopper);
    test_join(rewinder);
    CHECK(take_from(p, 0, 3, SPDL_OK) == 3);
    DONE(p);
}

TEST_TABLE(mutants) {
    TEST_CASE(a_hole_that_another_passed_takes_no_room),
    TEST_CASE(holes_fill_the_window),
    TEST_CASE(a_dead_number_is_not_of_the_next_call),
    TEST_CASE(items_of_a_batch_that_is_dropped_are_counted),
    TEST_CASE(the_failure_that_is_met_is_told),
    TEST_CASE(the_first_item_of_a_row_is_told),
    TEST_CASE(an_error_behind_a_failed_request_is_told),
    TEST_CASE(a_consumer_that_works_is_woken_for_a_row),
    TEST_CASE(a_large_buffer_is_filled_before_it_is_empty),
    TEST_CASE(a_higher_limit_wakes_a_worker),
    TEST_CASE(a_row_that_takes_batches_apart_is_a_pipe),
    TEST_CASE(a_source_with_a_thread_may_stop),
    TEST_CASE(destroy_waits_for_a_next_function),
    TEST_CASE(a_second_load_forgets_nothing),
    TEST_CASE(ranks_that_change_share_what_was_delivered),
    TEST_CASE(the_key_of_a_flush_is_its_own),
    TEST_CASE(two_that_pass_a_mark_flush_once),
    TEST_CASE(an_item_that_comes_before_a_wait_is_seen),
    TEST_CASE(room_that_comes_before_a_wait_is_seen),
    TEST_CASE(work_that_comes_before_a_sleep_is_seen),
    TEST_CASE(work_that_comes_to_a_quiet_pipeline_is_seen),
    TEST_CASE(a_stop_frees_what_a_push_was_to_drop),
    TEST_CASE(a_stop_before_a_rewind_is_over),
    TEST_END,
};
