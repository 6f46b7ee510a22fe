/* Failures are seen: what is logged, what on_drop gets, that rows which block do not hold a failure
   back; and what cannot work as its rows say is warned of when it is created. */
#include "flow.h"

/* --- a log that is kept --- */

typedef struct kept {
    test_mutex lock;
    int errors, warnings;
    char error[8][SPDL_TEXT_BYTES + 1024], warning[8][SPDL_TEXT_BYTES + 1024];
} kept;

static void log_keeps(spdl_log_level level, const char *text, void *user) {
    kept *k = (kept *)user;
    test_lock(&k->lock);
    if (level == SPDL_LOG_ERROR && k->errors < 8)
        snprintf(k->error[k->errors++], sizeof k->error[0], "%s", text);
    if (level == SPDL_LOG_WARN && k->warnings < 8)
        snprintf(k->warning[k->warnings++], sizeof k->warning[0], "%s", text);
    test_unlock(&k->lock);
}

static int warnings_of(kept *k) {
    test_lock(&k->lock);
    const int count = k->warnings;
    test_unlock(&k->lock);
    return count;
}

static spdl_pipeline *start_kept(kept *k, int workers, const spdl_stage *rows, size_t count) {
    spdl_pipeline_desc desc = { .workers = TEST_WORKERS(workers) };
    spdl_pipeline *p = NULL;
    memset(k, 0, sizeof *k);
    k->lock = (test_mutex)TEST_MUTEX;
    desc.logger.log_fn = log_keeps;
    desc.logger.user = k;
    REQUIRE(spdl_pipeline_create(&p, &desc, rows, count) == SPDL_OK);
    return p;
}

#define FAIL_AT(n, r) SCRIPT(.every = (n), .rest = (r), .result = SPDL_E_STAGE)

/* --- what is logged --- */

static void what_ends_a_pipeline_is_an_error(void) {
    for (int w = 0; w < CROWDS; ++w) {
        kept k;
        spdl_pipeline *p = start_kept(&k, crowds[w], SPDL_STAGES(
            COUNT_TO(20), SPDL_PIPE(follow, FAIL_AT(8, 5)), FOLLOW(.plus = 0), SPDL_SINK(3)));
        TAKE_ALL(p, "0 1 2 3 4", SPDL_E_STAGE);
        CHECK_EQ(rows_failed(p), 1 << 1);
        DONE(p);
        CHECK_EQ(k.errors, 1);
        CHECK_STR(k.error[0], "stage 1 'follow', item 5: value 5 is bad");
        CHECK_EQ(k.warnings, 0);
    }
}

/* Each of a batch row and a source that ends badly, too. */
static void a_source_that_fails_is_an_error(void) {
    kept k;
    spdl_pipeline *p = start_kept(&k, 2, SPDL_STAGES(
        SOURCE(.count = 3, .last = SPDL_E_IO), SPDL_BATCH(2), SPDL_SINK(3)));
    TAKE_BATCHES(p, "0 1", SPDL_E_IO);
    DONE(p);
    CHECK_EQ(k.errors, 1);
    CHECK(strstr(k.error[0], "stage 0 'count_up', item 3: ") != NULL);
}

SPDL_FN(fails_in_epoch_3, item, item) {
    *out = in;
    return spdl_epoch(task) == 3 && spdl_sequence(task) == 1 ? spdl_fail(task, "no good") : SPDL_OK;
}

static void a_failure_names_its_epoch(void) {
    for (int w = 0; w < CROWDS; ++w) {
        notes n = { .length = 0 };
        spdl_pipeline *p = START(crowds[w], CONTINUOUS(.count = 2), SPDL_PIPE(fails_in_epoch_3),
                                 SPDL_SINK(3));
        spdl_result result;
        while ((result = take(p, &n, 99, " ", note_item)) == SPDL_END) {}
        CHECK_EQ(result, SPDL_E_STAGE);
        CHECK_STR(spdl_pipeline_error(p)->text,
                  "stage 1 'fails_in_epoch_3', item 1, epoch 3: no good");
        DONE(p);
    }
}

SPDL_FN(fails_in_lines, void, item) {
    (void)out;
    return spdl_fail(task, "line 1\r\nline\t2\033[0m \177 \303\244");
}

static void a_message_is_one_line(void) {
    kept k;
    for (int twice = 0; twice < 2; ++twice) { /* an error, and a failure that is tolerated */
        spdl_pipeline *p = start_kept(&k, 2, SPDL_STAGES(
            SPDL_SOURCE(fails_in_lines, .max_failures = twice), SPDL_SINK(3)));
        TAKE_ALL(p, "", SPDL_E_STAGE);
        DONE(p);
        CHECK_EQ(k.errors, 1);
        CHECK(strstr(k.error[0], ": line 1??line?2?[0m ? \303\244") != NULL);
        CHECK_EQ(k.warnings, twice);
        if (twice) CHECK(strstr(k.warning[0], ": line 1??line?2?[0m ? \303\244") != NULL);
    }
}

static void what_was_dropped_is_one_line_at_the_end(void) {
    for (int w = 0; w < 8; ++w) {
        kept k;
        const int odd = w >= 4 && crowds[w % CROWDS] < 2; /* a warning about its concurrency */
        spdl_pipeline *p = start_kept(&k, crowds[w % CROWDS], SPDL_STAGES(
            COUNT_TO(100), SPDL_PIPE(follow, FAIL_AT(3, 1), .max_failures = -1, .name = "flaky",
                                     .concurrency = w < 4 ? 1 : 2),
            SPDL_PIPE(follow, FAIL_AT(50, 0), .max_failures = 2), SPDL_SINK(3)));
        CHECK_EQ(take_from_any(p), 65);
        CHECK_EQ(k.warnings, 2 + odd);
        CHECK_EQ(k.errors, 0);
        if (w < 4)
            CHECK_STR(k.warning[0], "33 of 100 items of stage 1 'flaky' were dropped, the "
                                    "first: item 1: value 1 is bad");
        CHECK(strncmp(k.warning[odd], "33 of 100 items of stage 1 'flaky' were dropped", 47)
              == 0);
        CHECK_STR(k.warning[1 + odd], "2 of 67 items of stage 2 'follow' were dropped, the "
                                      "first: item 0: value 0 is bad");
        CHECK_EQ(rows_failed(p), 0);
        CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        DONE(p);
        CHECK_EQ(k.warnings, 2 + odd);
    }
}

/* Item 0 fails after item 2 has begun, and that begins after item 1 has failed. */
SPDL_FN(fail_last, item, item) {
    int *begun = (int *)spdl_ctx(task);
    *out = in;
    if (in->value == 2) open_gate(begun);
    if (in->value == 0) await(begun, 1);
    return in->value < 2 ? SPDL_E_IO : SPDL_OK;
}

static void the_first_is_the_first_in_order(void) {
    for (int i = 0; i < 10; ++i) {
        kept k;
        int begun = 0;
        spdl_pipeline *p = start_kept(&k, 2, SPDL_STAGES(
            COUNT_TO(5), SPDL_PIPE(fail_last, .ctx = &begun, .concurrency = 2, .max_failures = -1,
                                   .output_order = i % 2 ? SPDL_ORDER_COMPLETION
                                                         : SPDL_ORDER_INPUT), SPDL_SINK(3)));
        CHECK_EQ(take_from_any(p), 3);
        DONE(p);
        CHECK_EQ(k.warnings, 1);
        CHECK_STR(k.warning[0], "2 of 5 items of stage 1 'fail_last' were dropped, the first: "
                                "item 0: input or output error");
    }
}

static void a_source_drops_calls(void) {
    kept k;
    spdl_pipeline *p = start_kept(&k, 1, SPDL_STAGES(
        SPDL_SOURCE(count_up, SCRIPT(.count = 5, .every = 2, .rest = 1, .result = SPDL_E_STAGE),
                    .free_item = item_free, .max_failures = -1), SPDL_SINK(3)));
    TAKE_ALL(p, "0 1 2 3 4", SPDL_END);
    CHECK_EQ(k.warnings, 1);
    CHECK(strstr(k.warning[0], " calls of stage 0 'count_up' failed, the first: item ") != NULL);
    DONE(p);
    p = start_kept(&k, 1, SPDL_STAGES(COUNT_TO(5), SPDL_SINK(3)));
    RUN(p, "0 1 2 3 4", SPDL_END); /* nothing was dropped */
    CHECK_EQ(k.warnings, 0);
}

/* After any number of items, by a stop or by destroy alone; the line and the stats agree. */
static void a_stop_reports_what_was_dropped(void) {
    for (int i = 0; i < 60; ++i) {
        char text[128];
        kept k;
        spdl_pipeline *p = start_kept(&k, crowds[i % CROWDS], SPDL_STAGES(
            COUNT_TO(-1), SPDL_PIPE(follow, FAIL_AT(2, 0), .max_failures = -1), SPDL_SINK(1)));
        CHECK_EQ(spdl_pipeline_stop(p, 0) == SPDL_OK || crowds[i % CROWDS] > 0, true);
        DONE(p);
        p = start_kept(&k, crowds[i % CROWDS], SPDL_STAGES(
            COUNT_TO(-1), SPDL_PIPE(follow, FAIL_AT(2, 0), .max_failures = -1,
                                    .concurrency = 1 + i % 3), SPDL_SINK(1)));
        for (int n = 0; n < 1 + i / 4; ++n) {
            item *it = NULL;
            REQUIRE(spdl_pipeline_next(p, (void **)&it, SPDL_SECONDS(15)) == SPDL_OK);
            item_free(it);
        }
        CHECK_EQ(k.errors, 0);
        if (i % 2) CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        snprintf(text, sizeof text, "%llu of ",
                 (unsigned long long)(i % 2 ? stats_of(p, 1).failures : 0));
        DONE(p);
        if (i % 2) CHECK(strncmp(k.warning[k.warnings - 1], text, strlen(text)) == 0);
        CHECK(strstr(k.warning[k.warnings - 1], " items of stage 1 'follow' were dropped") != NULL);
        CHECK(k.warnings <= 2); /* the other is about concurrency */
    }
}

/* With epochs: once, when it is over. */
static void epochs_are_one_run(void) {
    kept k;
    spdl_pipeline *p = start_kept(&k, 2, SPDL_STAGES(
        SPDL_SOURCE(count_up, SCRIPT(.count = 4), .free_item = item_free, .continuous = true),
        SPDL_PIPE(follow, FAIL_AT(4, 2), .max_failures = -1), SPDL_SINK(1)));
    for (int epoch = 0; epoch < 3; ++epoch) {
        CHECK_EQ(take_from_any(p), 3);
        CHECK_EQ(warnings_of(&k), 0);
    }
    DONE(p);
    CHECK_EQ(k.warnings, 1);
    CHECK(strstr(k.warning[0], "the first: item 2, epoch 0: value 2 is bad") != NULL);
}

/* A rewind begins a new run: its end has a line when more was dropped. */
static void a_rewind_is_another_run(void) {
    static const char *const lines[] = { "2 of 8 items", "4 of 16 items",
                                         "6 of 24 items" };
    for (int w = 0; w < CROWDS; ++w) {
        kept k;
        spdl_pipeline *p = start_kept(&k, crowds[w], SPDL_STAGES(
            COUNT_TO(8), SPDL_PIPE(follow, FAIL_AT(4, 2), .max_failures = 2), SPDL_SINK(1)));
        for (int i = 0; i < 3; ++i) {
            TAKE_ALL(p, "0 1 3 4 5 7", SPDL_END);
            CHECK_EQ(k.warnings, i + 1);
            CHECK(strncmp(k.warning[i], lines[i], strlen(lines[i])) == 0);
            CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_FOREVER), SPDL_OK);
        }
        DONE(p);
    }
}

/* --- on_drop --- */

typedef struct quarantine {
    script s; /* first: the ctx of the row is that of `follow`, too */
    test_mutex lock;
    long count, sum, none;
    spdl_error error; /* of the last */
} quarantine;

static void keep_dropped(void *ctx, void *dropped, const spdl_error *error) {
    quarantine *q = (quarantine *)ctx;
    const item *it = (const item *)dropped;
    test_lock(&q->lock);
    ++q->count;
    if (it == NULL) ++q->none;
    else q->sum += it->value;
    if (it != NULL) CHECK_EQ(it->magic, ALIVE);
    CHECK(error->result < 0);
    q->error = *error;
    test_unlock(&q->lock);
}

static void the_input_is_seen_before_it_is_freed(void) {
    for (int w = 0; w < 2 * CROWDS; ++w) {
        quarantine q = { .s = { .every = 3, .rest = 1, .result = SPDL_E_STAGE },
                         .lock = TEST_MUTEX };
        spdl_pipeline *p = START(crowds[w % CROWDS], COUNT_TO(10),
                                 SPDL_PIPE(follow, .ctx = &q, .max_failures = w < CROWDS ? -1 : 2,
                                           .on_drop = keep_dropped), SPDL_SINK(3));
        if (w < CROWDS)
            TAKE_ALL(p, "0 2 3 5 6 8 9", SPDL_END);
        else
            TAKE_ALL(p, "0 2 3 5 6", SPDL_E_STAGE);
        CHECK_EQ(q.count, 3); /* the fatal one, too */
        CHECK_EQ(q.sum, 1 + 4 + 7);
        CHECK_EQ(q.error.stage, 1);
        CHECK_EQ(q.error.item, 7);
        CHECK_EQ(q.error.result, SPDL_E_STAGE);
        CHECK_STR(q.error.stage_name, "follow");
        CHECK_STR(q.error.text, "stage 1 'follow', item 7: value 7 is bad");
        DONE(p);
    }
}

static void bad(quarantine *q, int value) {
    memset(q, 0, sizeof *q);
    q->s.every = 1000000;
    q->s.rest = value;
    q->s.result = SPDL_E_STAGE;
    q->lock = (test_mutex)TEST_MUTEX;
}

/* The number of a result among those of its item. */
static void a_result_has_a_number(void) {
    const spdl_pipeline_desc desc = { .workers = 1, .deliver_failures = true };
    quarantine q;
    item *got;
    bad(&q, 102);
    spdl_pipeline *p = START(2, COUNT_TO(3), SCATTER(BURST(.plus = 4)), FOLLOW(.plus = 0),
                             SPDL_PIPE(follow, .ctx = &q, .on_drop = keep_dropped), SPDL_SINK(3));
    TAKE_ALL(p, "0 1 2 3 100 101", SPDL_E_STAGE);
    CHECK_STR(spdl_pipeline_error(p)->text, "stage 3 'follow#2', item 1, result 3: value 102 "
                                             "is bad");
    CHECK_EQ(spdl_pipeline_error(p)->result_number, 3);
    CHECK_EQ(q.error.result_number, 3);
    DONE(p);
    bad(&q, 10201); /* behind two rows that make several, there is none */
    p = START(2, COUNT_TO(3), SCATTER(BURST(.plus = 4)), SCATTER(BURST(.plus = 2)),
              SPDL_PIPE(follow, .ctx = &q, .on_drop = keep_dropped, .max_failures = -1),
              SPDL_SINK(3));
    CHECK_EQ(take_from_any(p), 3 * 4 * 2 - 1);
    DONE(p);
    CHECK_STR(q.error.text, "stage 3 'follow', item 1: value 10201 is bad");
    CHECK_EQ(q.error.result_number, 0);
    bad(&q, 3); /* what .flush makes is of no item */
    p = START(1, COUNT_TO(3), SCATTER(BURST(.plus = 1)), WEIGH(&(scale){ .limit = 1000 }),
              SPDL_PIPE(follow, .ctx = &q, .on_drop = keep_dropped), SPDL_SINK(3));
    q.s.rest = 0 + 100 + 200;
    RUN(p, "", SPDL_E_STAGE);
    CHECK_STR(q.error.text, "stage 3 'follow', item 0: value 300 is bad");
    CHECK_EQ(q.error.result_number, 0);
    bad(&q, 2);
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
                SPDL_FEED(item, .free_item = item_free), SCATTER(BURST(.plus = 3)),
                SPDL_PIPE(follow, .ctx = &q), SPDL_SINK(3))) == SPDL_OK);
    REQUIRE(spdl_pipeline_push(p, item_make(0), 0) == SPDL_OK);
    for (int k = 0; k < 3; ++k) {
        CHECK_EQ(SPDL_NEXT(p, &got, SPDL_FOREVER), k < 2 ? SPDL_OK : SPDL_E_STAGE);
        CHECK_EQ(spdl_pipeline_error(p)->result_number, k < 2 ? 0 : 3);
        item_free(got);
    }
    DONE(p);
}

/* A result that a stage may not return is SPDL_E_STAGE. */
static void results_that_are_none_are_failures(void) {
    quarantine q = { .s = { .every = 3, .rest = 1, .result = SPDL_FULL }, .lock = TEST_MUTEX };
    spdl_pipeline *p = START(1, COUNT_TO(6), SPDL_PIPE(follow, .ctx = &q, .max_failures = -1,
                                                       .on_drop = keep_dropped), SPDL_SINK(3));
    RUN(p, "0 2 3 5", SPDL_END);
    CHECK_EQ(q.count, 2);
    CHECK_EQ(q.sum, 1 + 4);
    CHECK_EQ(q.error.result, SPDL_E_STAGE);
}

static void nothing_else_is_dropped(void) {
    static const spdl_result not[] = { SPDL_OK, SPDL_SKIP };
    for (int i = 0; i < 2; ++i) {
        quarantine q = { .s = { .every = 3, .rest = 1, .result = not[i] },
                         .lock = TEST_MUTEX };
        spdl_pipeline *p = START(1, COUNT_TO(10), SPDL_PIPE(follow, .ctx = &q, .max_failures = -1,
                                                            .on_drop = keep_dropped),
                                 SPDL_SINK(3));
        CHECK_EQ(take_from_any(p), i ? 7 : 10);
        DONE(p);
        CHECK_EQ(q.count, 0);
    }
}

/* Inputs that are not there: of a source, of a flush, and one that the call took. */
SPDL_FN(take_and_fail, item, item) {
    if (in != NULL) {
        spdl_take(task);
        item_free(in);
    }
    return SPDL_E_IO;
}

static void where_there_is_no_input(void) {
    quarantine q = { .s = { .count = 3, .last = SPDL_E_IO }, .lock = TEST_MUTEX };
    spdl_pipeline *p = START(1, SPDL_SOURCE(count_up, .ctx = &q, .free_item = item_free,
                                            .on_drop = keep_dropped), SPDL_SINK(3));
    RUN(p, "0 1 2", SPDL_E_IO);
    CHECK_EQ(q.count, 1);
    CHECK_EQ(q.none, 1);
    CHECK_EQ(q.error.item, 3);
    p = START(1, COUNT_TO(4), SPDL_PIPE(take_and_fail, .ctx = &q, .flush = true,
                                        .max_failures = -1, .on_drop = keep_dropped),
              SPDL_SINK(3));
    RUN(p, "", SPDL_END);
    CHECK_EQ(q.count, 1 + 4 + 1);
    CHECK_EQ(q.none, q.count);
}

/* Called again with the same input, which the first call takes if it is odd. */
SPDL_FN(twice_then_fail, item, item) {
    void **state = spdl_call_state(task);
    const bool again = *state == NULL;
    if (!again) return SPDL_E_IO;
    *state = item_make(1);
    *out = item_make(in->value);
    if (in->value % 2) {
        spdl_take(task);
        item_free(in);
    }
    return SPDL_AGAIN;
}

static void inputs_of_many_calls(void) {
    for (int w = 0; w < CROWDS; ++w) {
        quarantine q = { .lock = TEST_MUTEX };
        spdl_pipeline *p = START(crowds[w], COUNT_TO(6),
                                 SPDL_PIPE(twice_then_fail, .ctx = &q, .again = true,
                                           .free_item = item_free, .free_state = item_free,
                                           .max_failures = -1, .on_drop = keep_dropped),
                                 SPDL_SINK(3));
        RUN(p, "0 1 2 3 4 5", SPDL_END);
        CHECK_EQ(q.count, 6);
        CHECK_EQ(q.none, 3);
        CHECK_EQ(q.sum, 0 + 2 + 4);
    }
}

static void drop_batch(void *ctx, void *dropped, const spdl_error *error) {
    quarantine *q = (quarantine *)ctx;
    const spdl_batch *batch = (const spdl_batch *)dropped;
    ++q->count;
    CHECK_EQ(batch->count, 3);
    CHECK_EQ(error->item, batch->sequence);
    for (size_t i = 0; i < batch->count; ++i) q->sum += ((const item *)batch->items[i])->value;
}

SPDL_FN(odd_batches_fail, spdl_batch, spdl_batch) {
    *out = in;
    return in->sequence % 2 ? SPDL_E_IO : SPDL_OK;
}

static void batches_are_seen_whole(void) {
    quarantine q = { .count = 0 };
    spdl_pipeline *p = START(2, COUNT_TO(12), SPDL_BATCH(3),
                             SPDL_PIPE(odd_batches_fail, .ctx = &q, .max_failures = -1,
                                       .on_drop = drop_batch), SPDL_BATCH(1), SPDL_SINK(1));
    void *outer;
    int count = 0;
    for (; spdl_pipeline_next(p, &outer, SPDL_SECONDS(15)) == SPDL_OK; ++count)
        spdl_batch_free(outer);
    CHECK_EQ(count, 2);
    CHECK_EQ(q.count, 2);
    CHECK_EQ(q.sum, 3 + 4 + 5 + 9 + 10 + 11);
    DONE(p);
}

/* --- calls that are completed elsewhere --- */

typedef struct desk {
    quarantine q;
    test_mutex lock;
    spdl_deferred call[64];
    item *in[64];
    int count;
} desk;

SPDL_FN(sign_in, item, item) {
    desk *d = (desk *)spdl_ctx(task);
    test_lock(&d->lock);
    d->in[d->count] = in;
    d->call[d->count] = spdl_defer(task);
    __atomic_store_n(&d->count, d->count + 1, __ATOMIC_RELEASE);
    test_unlock(&d->lock);
    return SPDL_PENDING;
}

static void complete(desk *d, int i) {
    await(&d->count, i + 1);
    CHECK_EQ(spdl_complete(d->call[i], SPDL_OK, d->in[i]), SPDL_OK);
}

static void deferred_calls_are_seen(void) {
    for (int w = 0; w < CROWDS; ++w) {
        desk d = { .lock = TEST_MUTEX, .q.lock = TEST_MUTEX };
        spdl_pipeline *p = START(crowds[w], COUNT_TO(4),
                                 SPDL_PIPE(sign_in, .ctx = &d, .deferred = true, .concurrency = 4,
                                           .max_failures = -1, .on_drop = keep_dropped),
                                 SPDL_SINK(4));
        void *none;
        do CHECK_EQ(spdl_pipeline_next(p, &none, crowds[w] ? 0 : 50000000), SPDL_TIMEOUT);
        while (crowds[w] == 0 && d.count < 4); /* it makes the calls */
        await(&d.count, 4);
        for (int i = 0; i < 4; ++i) { /* in whatever order they came */
            const long value = d.in[i]->value;
            if (value == 2) CHECK_EQ(spdl_complete_fail(d.call[i], "%s", "gone"), SPDL_OK);
            else if (value == 1) CHECK_EQ(spdl_complete(d.call[i], SPDL_E_IO, NULL), SPDL_OK);
            else complete(&d, i);
        }
        TAKE_ALL(p, "0 3", SPDL_END); /* a worker settles them, in a call of next or before */
        CHECK_EQ(d.q.count, 2);
        CHECK_EQ(d.q.sum, 1 + 2);
        DONE(p);
    }
}

/* --- rows that block --- */

/* Item 3 fails, once so many calls of others have begun. */
typedef struct patience {
    const int *first, *second;
    int first_calls, second_calls;
} patience;

SPDL_FN(fail_late, item, item) {
    const patience *w = (const patience *)spdl_ctx(task);
    *out = in;
    if (in->value != 3) return SPDL_OK;
    await(w->first, w->first_calls);
    if (w->second != NULL) await(w->second, w->second_calls);
    sleep_us(1000);
    return spdl_fail(task, "late");
}

/* A source, and a stage above, block; the failure comes through all the same, with what was before
   it. With `own` the source has a thread of its own. */
static void a_blocked_source_holds_no_failure_back(void) {
    for (int i = 0; i < 8; ++i) {
        const bool own = i & 1, above = i & 2, order = i & 4;
        int gate = 0;
        script source = { .count = -1, .gate = &gate, .gate_at = 7 };
        script reads = { .gate = &gate, .gate_at = above ? 5 : -1 };
        patience late = { &source.calls, above ? &reads.calls : NULL, 8, 6 };
        spdl_pipeline *p = START(2 + above,
                                 SPDL_SOURCE(count_up, .ctx = &source, .free_item = item_free,
                                             .buffer_size = 1, .threads = own),
                                 SPDL_PIPE(follow, .ctx = &reads, .buffer_size = 1),
                                 SPDL_PIPE(fail_late, .ctx = &late,
                                           .output_order = order ? SPDL_ORDER_COMPLETION
                                                                 : SPDL_ORDER_INPUT),
                                 FOLLOW(.plus = 0), FOLLOW(.fresh = true), SPDL_SINK(3));
        TAKE_ALL(p, "0 1 2", SPDL_E_STAGE);
        CHECK_EQ(spdl_pipeline_error(p)->stage, 2);
        CHECK_EQ(gate, 0);
        open_gate(&gate);
        DONE(p);
    }
}

/* Every worker but one is in a call that blocks; a deferred call fails. */
static void a_call_completed_elsewhere_ends_it_now(void) {
    for (int i = 0; i < 4; ++i) {
        const bool two = i & 1, order = i & 2;
        int gate = 0;
        desk d = { .lock = TEST_MUTEX };
        script source = { .count = -1, .gate = &gate, .gate_at = two ? 5 : 3 };
        script reads = { .gate = &gate, .gate_at = 3 };
        const spdl_stage signs = SPDL_PIPE(sign_in, .ctx = &d, .deferred = true, .output_order =
                                           order ? SPDL_ORDER_COMPLETION : SPDL_ORDER_INPUT);
        const spdl_stage reading = SPDL_PIPE(follow, .ctx = &reads, .buffer_size = 1);
        const spdl_stage plain = FOLLOW(.plus = 0);
        const spdl_stage rows[] = {
            SPDL_SOURCE(count_up, .ctx = &source, .free_item = item_free, .buffer_size = 1),
            two ? reading : signs, two ? signs : plain, plain,
            SPDL_PIPE(follow, SCRIPT(.fresh = true), .free_item = item_free,
                      .concurrency = two ? 2 : 1),
            SPDL_SINK(3)
        };
        spdl_pipeline *p = start(two ? 3 : 2, NULL, SPDL_TABLE(rows));
        complete(&d, 0);
        TAKE(p, 1, "0");
        await(&d.count, 2);
        await(&source.calls, two ? 6 : 4);
        if (two) await(&reads.calls, 4);
        sleep_us(1000);
        CHECK_EQ(spdl_complete_fail(d.call[1], "%s", "refused"), SPDL_OK);
        TAKE_ALL(p, "", SPDL_E_STAGE);
        CHECK_EQ(spdl_pipeline_error(p)->item, 1);
        CHECK_EQ(gate, 0);
        open_gate(&gate);
        DONE(p);
    }
}

/* The item of `at_once` fails, and that of `later` when the consumer has looked. */
typedef struct late_call {
    int *looked;
    long at_once, later;
} late_call;

SPDL_FN(fail_in_turn, item, item) {
    const late_call *w = (const late_call *)spdl_ctx(task);
    *out = in;
    if (in->value == w->at_once) return SPDL_E_IO;
    if (in->value != w->later) return SPDL_OK;
    await(w->looked, 1);
    return spdl_fail(task, "a text that is written over the other one");
}

/* Of an earlier item of the same row, and of a later row. */
static void what_was_told_stays(void) {
    for (int i = 0; i < 20; ++i) {
        const bool one = i % 2;
        int looked = 0;
        late_call first = { &looked, 1, one ? 0 : -1 }, second = { &looked, -1, one ? -1 : 0 };
        spdl_pipeline *p = START(3, COUNT_TO(9),
                                 SPDL_PIPE(fail_in_turn, .ctx = &first, .concurrency = 2),
                                 SPDL_PIPE(fail_in_turn, .ctx = &second), SPDL_SINK(3));
        while (!spdl_pipeline_failed(p)) sleep_us(100);
        const spdl_error *told = spdl_pipeline_error(p);
        const spdl_error before = *told;
        CHECK_STR(before.text, "stage 1 'fail_in_turn', item 1: input or output error");
        open_gate(&looked);
        for (int k = 0; k < 1000; ++k) CHECK_EQ(memcmp(&before, told, sizeof before), 0);
        TAKE_ALL(p, "", SPDL_E_IO);
        CHECK(spdl_pipeline_error(p) == told);
        CHECK_EQ(memcmp(&before, told, sizeof before), 0);
        DONE(p);
    }
}

/* A thread that completes calls, one of five as failed, while the trainer rewinds: rows that it
   ends may have begun anew. */
typedef struct clerk {
    spdl_ring *calls;
    int failed;
} clerk;

SPDL_FN(hand_in, item, item) {
    clerk *c = (clerk *)spdl_ctx(task);
    spdl_deferred call = spdl_defer(task);
    CHECK_EQ(spdl_ring_push(c->calls, &call, SPDL_FOREVER), SPDL_OK);
    spdl_take(task);
    item_free(in);
    return SPDL_PENDING;
}

static void *complete_all(void *arg) {
    clerk *c = (clerk *)arg;
    spdl_deferred call;
    for (long i = 1; spdl_ring_pop(c->calls, &call, SPDL_FOREVER) == SPDL_OK; ++i) {
        if (i % 5 == 0) c->failed += spdl_complete_fail(call, "%s", "lost") == SPDL_OK;
        else CHECK_EQ(spdl_complete(call, SPDL_OK, item_make(i)), SPDL_OK);
    }
    return NULL;
}

static void rows_that_were_ended_begin_anew(void) {
    for (int w = 1; w < CROWDS; ++w) {
        clerk c = { .failed = 0 };
        const spdl_ring_desc desc = { .capacity = 64, .item_bytes = sizeof(spdl_deferred) };
        REQUIRE(spdl_ring_create(&c.calls, &desc) == SPDL_OK);
        const test_thread thread = thread_of(complete_all, &c);
        spdl_pipeline *p = START(crowds[w], COUNT_TO(-1),
                                 SPDL_PIPE(hand_in, .ctx = &c, .deferred = true, .concurrency = w,
                                           .free_item = item_free),
                                 FOLLOW(.plus = 0), FOLLOW(.plus = 0), SPDL_SINK(2));
        for (int i = 0; i < 300; ++i) {
            item *it = NULL;
            for (int n = i % 7; n > 0; --n) {
                const spdl_result result = spdl_pipeline_next(p, (void **)&it, SPDL_SECONDS(15));
                CHECK(result == SPDL_OK || result == SPDL_E_STAGE);
                if (result != SPDL_OK) break;
                item_free(it);
            }
            CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_SECONDS(15)), SPDL_OK);
        }
        CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        spdl_ring_close(c.calls);
        test_join(thread);
        CHECK(c.failed > 0);
        DONE(p);
        spdl_ring_destroy(c.calls, NULL, NULL);
    }
}

/* The one that ends what is delivered is the error; one above that fails later is in the log. */
static void all_that_fail_are_logged(void) {
    int gate = 0;
    script first = { .gate = &gate, .gate_at = 5, .every = 7, .rest = 5, .result = SPDL_E_IO };
    patience late = { &first.calls, NULL, 6, 0 };
    kept k;
    spdl_pipeline *p = start_kept(&k, 3, SPDL_STAGES(
        COUNT_TO(-1), SPDL_PIPE(follow, .ctx = &first), SPDL_PIPE(fail_late, .ctx = &late),
        SPDL_SINK(3)));
    TAKE_ALL(p, "0 1 2", SPDL_E_STAGE);
    const spdl_error before = *spdl_pipeline_error(p);
    CHECK_EQ(before.stage, 2);
    CHECK_EQ(rows_failed(p), 1 << 2);
    open_gate(&gate);
    CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(memcmp(&before, spdl_pipeline_error(p), sizeof before), 0);
    CHECK_EQ(rows_failed(p), 1 << 1 | 1 << 2);
    DONE(p);
    CHECK_EQ(k.errors, 2);
    CHECK_STR(k.error[0], "stage 2 'fail_late', item 3: late");
    CHECK(strncmp(k.error[1], "stage 1 'follow', item 5: ", 26) == 0);
}

/* Many calls of a stage that fail at once: it is logged when it is the first, or is the one that is
   reported in place of that. */
static void a_stage_is_logged_once(void) {
    for (int i = 0; i < 40; ++i) {
        kept k;
        spdl_pipeline *p = start_kept(&k, 4, SPDL_STAGES(
            COUNT_TO(50), SPDL_PIPE(follow, FAIL_AT(1, 0), .concurrency = 4,
                                    .output_order = i % 2 ? SPDL_ORDER_COMPLETION
                                                          : SPDL_ORDER_INPUT), SPDL_SINK(3)));
        TAKE_ALL(p, "", SPDL_E_STAGE);
        const spdl_error error = *spdl_pipeline_error(p);
        DONE(p);
        CHECK(k.errors >= 1 && k.errors <= (i % 2 ? 1 : 4));
        bool told = false; /* calls that fail at the same time write in any order */
        for (int n = 0; n < k.errors; ++n) told = told || strcmp(k.error[n], error.text) == 0;
        CHECK(told);
        if (i % 2 == 0) CHECK_EQ(error.item, 0);
    }
}

/* --- the verdict --- */

static void many_failures_are_in_the_verdict(void) {
    static const char fed[] = "Loading keeps up: the consumer waited 0.0 % of its time. "
                              "spdl_headspace measures what its own steps lose to loading.";
    static spdl_stats stats;
    char text[512], whole[600];
    stats.stage_count = 2;
    stats.delivered = 90;
    stats.elapsed_ns = 1000;
    strcpy(stats.stage[0].name, "list");
    strcpy(stats.stage[1].name, "decode");
    stats.stage[0].tasks = stats.stage[1].tasks = 100;
    stats.stage[1].failures = 5;
    spdl_stats_verdict(&stats, text, sizeof text);
    CHECK_STR(text, fed); /* 5 % may go unseen */
    stats.stage[0].failures = 6;
    stats.stage[1].failures = 12;
    CHECK_EQ(spdl_stats_verdict(&stats, text, sizeof text), sizeof fed - 1 +
             strlen(" 12 % of the calls of stage 1 'decode' fail."));
    snprintf(whole, sizeof whole, "%s 12 %% of the calls of stage 1 'decode' fail.", fed);
    CHECK_STR(text, whole);
    stats.delivered = 0;
    spdl_stats_verdict(&stats, text, sizeof text);
    CHECK_STR(text, "Nothing was delivered: the consumer did not call next. 12 % of the calls of "
                    "stage 1 'decode' fail.");
}

/* --- what create sees --- */

static void concurrency_without_threads_is_warned_of(void) {
    static const struct {
        int workers, concurrency;
        bool deferred, warned;
    } rows[] = { { 2, 2, 0, 0 }, { 2, 3, 0, 1 }, { 1, 0, 0, 0 }, { 1, 64, 0, 1 },
                 { 0, 4, 0, 1 }, { 1, 64, 1, 0 } };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) {
        char text[200];
        kept k;
        spdl_pipeline *p = start_kept(&k, rows[i].workers, SPDL_STAGES(
            COUNT_TO(3), FOLLOW(.plus = 0),
            SPDL_PIPE(follow, SCRIPT(.plus = 0), .name = "work",
                      .concurrency = rows[i].concurrency, .deferred = rows[i].deferred),
            SPDL_SINK(3)));
        RUN(p, "0 1 2", SPDL_END);
        CHECK_EQ(k.warnings, rows[i].warned);
        if (!rows[i].warned) continue;
        snprintf(text, sizeof text, ": stage 2 'work': concurrency is %d, but it has only "
                 "%d %s%s, and each runs one call at a time", rows[i].concurrency,
                 rows[i].workers > 0 ? rows[i].workers : 1,
                 rows[i].workers > 0 ? "worker" : "thread", rows[i].workers > 1 ? "s" : "");
        CHECK(strstr(k.warning[0], text) != NULL);
        CHECK(strstr(k.warning[0], "test_fail.c:") != NULL);
    }
}

static void the_second_of_a_name_has_a_number(void) {
    static const char *const names[] = { "count_up", "pass_on", "pass_on#2", "x#2", "x", "x#3",
                                         "a_name_that_is_cut_at_the_end_o",
                                         "a_name_that_is_cut_at_the_en#2", "pass_on#3" };
    spdl_pipeline *p = START(1, COUNT_TO(3), SPDL_PIPE(pass_on), SPDL_PIPE(pass_on),
                             SPDL_PIPE(pass_on, .name = "x#2"), SPDL_PIPE(pass_on, .name = "x"),
                             SPDL_PIPE(pass_on, .name = "x"),
                             SPDL_PIPE(pass_on, .name = "a_name_that_is_cut_at_the_end_of_it"),
                             SPDL_PIPE(pass_on, .name = "a_name_that_is_cut_at_the_end_or_so"),
                             SPDL_PIPE(pass_on), SPDL_SINK(1));
    for (int i = 0; i < 9; ++i) {
        CHECK_STR(stats_of(p, i).name, names[i]);
        CHECK_EQ(row_named(p, names[i]), i);
    }
    RUN(p, "0 1 2", SPDL_END);
}

static void on_drop_is_of_rows_that_call(void) {
    spdl_pipeline_desc desc = { .workers = 1 };
    spdl_error error;
    spdl_pipeline *p;
    desc.error = &error;
    desc.logger.log_fn = log_nothing;
    CHECK_EQ(spdl_pipeline_create(&p, &desc, SPDL_STAGES(COUNT_TO(1), SPDL_BATCH(2, .on_drop =
                                  keep_dropped), SPDL_SINK(1))), SPDL_E_INVALID);
    CHECK(strstr(error.text, "on_drop is set, but only source, pipe and branch rows have it") !=
          NULL);
}

TEST_TABLE(fail) {
    TEST_CASE(what_ends_a_pipeline_is_an_error),
    TEST_CASE(a_source_that_fails_is_an_error),
    TEST_CASE(a_failure_names_its_epoch),
    TEST_CASE(a_message_is_one_line),
    TEST_CASE(what_was_dropped_is_one_line_at_the_end),
    TEST_CASE(the_first_is_the_first_in_order),
    TEST_CASE(a_source_drops_calls),
    TEST_CASE(a_stop_reports_what_was_dropped),
    TEST_CASE(epochs_are_one_run),
    TEST_CASE(a_rewind_is_another_run),
    TEST_CASE(the_input_is_seen_before_it_is_freed),
    TEST_CASE(a_result_has_a_number),
    TEST_CASE(results_that_are_none_are_failures),
    TEST_CASE(nothing_else_is_dropped),
    TEST_CASE(where_there_is_no_input),
    TEST_CASE(inputs_of_many_calls),
    TEST_CASE(batches_are_seen_whole),
    TEST_CASE(deferred_calls_are_seen),
    TEST_CASE(a_blocked_source_holds_no_failure_back),
    TEST_CASE(a_call_completed_elsewhere_ends_it_now),
    TEST_CASE(what_was_told_stays),
    TEST_CASE(rows_that_were_ended_begin_anew),
    TEST_CASE(all_that_fail_are_logged),
    TEST_CASE(a_stage_is_logged_once),
    TEST_CASE(many_failures_are_in_the_verdict),
    TEST_CASE(concurrency_without_threads_is_warned_of),
    TEST_CASE(the_second_of_a_name_has_a_number),
    TEST_CASE(on_drop_is_of_rows_that_call),
    TEST_END
};
