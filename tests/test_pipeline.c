/* Pipelines: flow and order, concurrency, batches, ownership and failures. What create refuses is
   in test_rows.c, the life cycle in test_lifetime.c, and thousands by chance in test_chance.c. */
#include "items.h"

#define FOLLOW(...) SPDL_PIPE(follow, SCRIPT(__VA_ARGS__), .free_item = item_free)

/* --- flow and order --- */

static void items_arrive_in_order(void) {
    for (int w = 0; w < 4; ++w) {
        spdl_pipeline *p = START(w, COUNT_TO(1000), SPDL_SINK(3));
        CHECK_EQ(take_from(p, 0, 10000, SPDL_END), 1000);
        DONE(p);
    }
}

static void functions_are_composed(void) {
    for (int w = 0; w < 4; ++w) {
        spdl_pipeline *p = START(w, COUNT_TO(5), FOLLOW(.times = 2),
                                 FOLLOW(.plus = 1, .fresh = true), SPDL_SINK(3));
        RUN(p, "1 3 5 7 9", SPDL_END);
    }
}

static void an_empty_source_ends(void) {
    for (int w = 0; w < 4; ++w) {
        RUN(START(w, COUNT_TO(0), SPDL_SINK(1)), "", SPDL_END);
        RUN(START(w, COUNT_TO(0), FOLLOW(.fresh = true), SPDL_SINK(1)), "", SPDL_END);
        RUN_BATCHES(START(w, COUNT_TO(0), SPDL_BATCH(2), SPDL_SINK(1)), "", SPDL_END);
    }
}

static void skipped_items_are_gone(void) {
    for (int w = 0; w < 4; ++w) {
        spdl_pipeline *p = START(w, COUNT_TO(10),
                                 FOLLOW(.every = 2, .rest = 1, .result = SPDL_SKIP), SPDL_SINK(3));
        TAKE_ALL(p, "0 2 4 6 8", SPDL_END);
        CHECK_EQ(stats_of(p, 1).skips, 5);
        DONE(p);
        p = START(w, COUNT_TO(100), FOLLOW(.every = 1, .result = SPDL_SKIP), SPDL_SINK(3));
        RUN(p, "", SPDL_END);
    }
}

/* Nothing but gaps comes out, and there is little room for them: the trainer has to be woken. */
static void gaps_wake_the_trainer(void) {
    const int rounds = TEST_SANITIZED ? 300 : 3000;
    spdl_pool *pool = pool_of(3);
    chaos_on();
    for (int i = 0; i < rounds; ++i) {
        spdl_pipeline *p = START_ON(pool, COUNT_TO(40),
                                    SPDL_PIPE(follow, SCRIPT(.every = 1, .result = SPDL_SKIP),
                                              .concurrency = 2),
                                    SPDL_SINK(1));
        RUN(p, "", SPDL_END);
    }
    spdl_pool_destroy(pool);
}

/* A source that skips makes nothing in that call; its items are numbered without gaps. */
static void a_source_may_skip(void) {
    spdl_pipeline *p = START(2, SOURCE(.count = 5, .every = 2, .result = SPDL_SKIP), SPDL_SINK(3));
    TAKE_ALL(p, "0 1 2 3 4", SPDL_END);
    CHECK_EQ(stats_of(p, 0).skips, 5);
    DONE(p);
}

SPDL_FN(from_nine, void, item) {
    if (spdl_sequence(task) == 10) return SPDL_END;
    *out = item_make(9 - (long)spdl_sequence(task));
    return SPDL_OK;
}

typedef struct countdown {
    int done;      /* the call with value n ends when so many are done: all ten run at once */
    bool by_taker; /* done means that the trainer has it */
} countdown;

SPDL_FN(smallest_first, item, item) {
    countdown *c = (countdown *)spdl_ctx(task);
    await(&c->done, (int)in->value);
    if (!c->by_taker) __atomic_add_fetch(&c->done, 1, __ATOMIC_RELEASE);
    *out = in;
    return SPDL_OK;
}

static spdl_pipeline *count_down(countdown *c, spdl_order order) {
    return START(10, SPDL_SOURCE(from_nine, .free_item = item_free, .buffer_size = 10),
                 SPDL_PIPE(smallest_first, .ctx = c, .concurrency = 10, .output_order = order),
                 SPDL_SINK(10));
}

static void completion_order_is_by_time(void) {
    countdown c = { .by_taker = true };
    spdl_pipeline *p = count_down(&c, SPDL_ORDER_COMPLETION);
    for (long i = 0; i < 10; ++i) {
        CHECK_EQ(take_from(p, i, 1, SPDL_OK), 1);
        __atomic_add_fetch(&c.done, 1, __ATOMIC_RELEASE);
    }
    RUN(p, "", SPDL_END);
}

static void input_order_is_kept(void) {
    countdown c = { .by_taker = false };
    RUN(count_down(&c, SPDL_ORDER_INPUT), "9 8 7 6 5 4 3 2 1 0", SPDL_END);
}

static void order_is_kept_among_survivors(void) {
    chaos_on();
    for (int w = 0; w < 8; ++w) {
        spdl_pipeline *p = START(
            w, COUNT_TO(40),
            SPDL_PIPE(follow, SCRIPT(.every = 3, .result = SPDL_SKIP), .concurrency = 4),
            SPDL_PIPE(follow, SCRIPT(.every = 4, .result = SPDL_E_IO), .concurrency = 3,
                      .max_failures = -1),
            SPDL_PIPE(follow, SCRIPT(.every = 5, .result = SPDL_SKIP), .concurrency = 8),
            SPDL_SINK(2));
        RUN(p, "1 2 7 11 13 14 17 19 22 23 26 29 31 34 37 38", SPDL_END);
    }
}

SPDL_FN(tells_number, item, item) {
    CHECK_EQ(spdl_sequence(task), in->value);
    CHECK(task_worker(task) >= 0 && task_worker(task) < 3);
    CHECK(spdl_local(task) == NULL && !spdl_stopping(task));
    *out = in;
    return SPDL_OK;
}

static void items_keep_their_number(void) {
    spdl_pipeline *p = START(3, COUNT_TO(100), FOLLOW(.every = 3, .result = SPDL_SKIP),
                             SPDL_PIPE(follow, SCRIPT(.fresh = true), .concurrency = 3,
                                       .output_order = SPDL_ORDER_COMPLETION,
                                       .free_item = item_free),
                             SPDL_PIPE(tells_number), SPDL_SINK(3));
    notes n = { .length = 0 };
    CHECK_EQ(take(p, &n, 1000, " ", note_item), SPDL_END);
    CHECK_EQ(n.taken, 66);
    DONE(p);
}

SPDL_FN(same_for_null, item, item) {
    *out = in;
    return in == NULL ? SPDL_OK : SPDL_SKIP;
}

SPDL_FN(nothings, void, item) { return spdl_sequence(task) == 3 ? SPDL_END : SPDL_OK; }

static void null_is_an_item(void) {
    for (int w = 0; w < 3; ++w) {
        RUN(START(w, SPDL_SOURCE(nothings, .free_item = item_free),
                  SPDL_PIPE(same_for_null, .free_item = item_free), SPDL_SINK(3)),
            "- - -", SPDL_END);
        RUN_BATCHES(START(w, SPDL_SOURCE(nothings, .free_item = item_free), SPDL_BATCH(2),
                          SPDL_SINK(3)),
                    "- -|-", SPDL_END);
        DONE(START(w, SPDL_SOURCE(nothings, .free_item = item_free), SPDL_SINK(3)));
    }
}

static void many_stages_with_little_room(void) {
    spdl_stage rows[SPDL_MAX_STAGES + 1] = { SPDL_SOURCE(count_up, .free_item = item_free) };
    script source = { .count = 200 }, pass = { .count = 0 };
    rows[0].ctx = &source;
    for (int i = 1; i < SPDL_MAX_STAGES; ++i) {
        rows[i] = (spdl_stage)SPDL_PIPE(follow, .ctx = &pass, .concurrency = i % 3 + 1);
        rows[i].buffer_size = i + 1 < SPDL_MAX_STAGES;
    }
    rows[SPDL_MAX_STAGES] = (spdl_stage)SPDL_SINK(1);
    for (int w = 0; w < 4; ++w) {
        spdl_pipeline *p = start(w, NULL, SPDL_TABLE(rows));
        CHECK_EQ(take_from(p, 0, 1000, SPDL_END), 200);
        DONE(p);
    }
}

/* --- concurrency --- */

typedef struct meeting {
    int size, arrived;
} meeting;

/* Nobody leaves before `size` calls are inside. */
SPDL_FN(meet, item, item) {
    meeting *m = (meeting *)spdl_ctx(task);
    const int number = __atomic_fetch_add(&m->arrived, 1, __ATOMIC_ACQ_REL);
    await(&m->arrived, number / m->size * m->size + m->size);
    sleep_us(100);
    *out = in;
    return SPDL_OK;
}

static void calls_run_at_the_same_time(void) {
    for (int order = 0; order < 2; ++order) {
        meeting m = { .size = 4 };
        notes n = { .length = 0 };
        spdl_pipeline *p = START(4, COUNT_TO(20),
                                 SPDL_PIPE(meet, .ctx = &m, .concurrency = 4,
                                           .output_order = (spdl_order)order),
                                 SPDL_SINK(3));
        CHECK_EQ(take(p, &n, 100, " ", note_item), SPDL_END);
        CHECK_EQ(n.taken, 20);
        DONE(p);
    }
}

static int most_inside(int concurrency, spdl_order order, long items, long us) {
    script s = { .sleep_us = us };
    notes n = { .length = 0 };
    spdl_pipeline *p = START(9, COUNT_TO(items),
                             SPDL_PIPE(follow, .ctx = &s, .concurrency = concurrency,
                                       .output_order = order),
                             SPDL_SINK(16));
    CHECK_EQ(take(p, &n, items + 1, " ", note_item), SPDL_END);
    CHECK_EQ(n.taken, items);
    DONE(p);
    return s.most;
}

static void concurrency_is_reached_and_never_exceeded(void) {
    for (int concurrency = 1; concurrency <= 8; concurrency *= 2) {
        CHECK_EQ(most_inside(concurrency, SPDL_ORDER_INPUT, 48, 3000), concurrency);
        CHECK_EQ(most_inside(concurrency, SPDL_ORDER_COMPLETION, 48, 3000), concurrency);
    }
}

static void concurrency_bounds_tiny_items_too(void) {
    chaos_on();
    for (int concurrency = 1; concurrency <= 8; concurrency *= 2) {
        CHECK(most_inside(concurrency, SPDL_ORDER_INPUT, 3000, 0) <= concurrency);
        CHECK(most_inside(concurrency, SPDL_ORDER_COMPLETION, 3000, 0) <= concurrency);
    }
}

/* Among tiny items 290 takes its time, so that the other workers fall asleep, and 300 is held up
   until everything before it has arrived. */
SPDL_FN(stumbles, item, item) {
    if (in->value == 290) sleep_us(20000);
    if (in->value == 300) await((const int *)spdl_ctx(task), 1);
    *out = in;
    return SPDL_OK;
}

static void a_slow_item_holds_back_none_before_it(void) {
    for (int i = 0; i < 10; ++i) {
        int gate = 0;
        spdl_pipeline *p = START(
            3, SPDL_SOURCE(count_up, SCRIPT(.count = 400), .free_item = item_free,
                           .buffer_size = 64),
            SPDL_PIPE(stumbles, .ctx = &gate, .buffer_size = 64),
            SPDL_PIPE(follow, SCRIPT(.fresh = true), .free_item = item_free), SPDL_SINK(64));
        CHECK_EQ(take_from(p, 0, 300, SPDL_OK), 300);
        __atomic_store_n(&gate, 1, __ATOMIC_RELEASE);
        CHECK_EQ(take_from(p, 300, 1000, SPDL_END), 100);
        DONE(p);
    }
}

static char turns[200];
static int turn;

/* Who was called, one letter a call. Long enough for a look downstream after each. */
SPDL_FN(writes_letter, item, item) {
    turns[turn++] = *(const char *)spdl_ctx(task);
    sleep_us(50);
    *out = in;
    return SPDL_OK;
}

static void one_worker_runs_downstream_first(void) {
    static char a[] = "a", b[] = "b";
    for (int w = 0; w < 2; ++w) {
        spdl_pipeline *p;
        turn = 0;
        memset(turns, 0, sizeof turns);
        p = START(w, COUNT_TO(50), SPDL_PIPE(writes_letter, .ctx = a),
                  SPDL_PIPE(writes_letter, .ctx = b), SPDL_SINK(100));
        CHECK_EQ(take_from(p, 0, 1000, SPDL_END), 50);
        DONE(p);
        CHECK_EQ(strlen(turns), 100);
        CHECK(strstr(turns, "aaa") == NULL);
    }
}

/* The room behind a stage is its buffer and a place for each call in flight, never more. */
static void a_trainer_that_sleeps_stops_the_flow(void) {
    script source = { .count = -1 }, pass = { .count = 0 };
    spdl_pipeline *p = START(4, SPDL_SOURCE(count_up, .ctx = &source, .free_item = item_free),
                             SPDL_PIPE(follow, .ctx = &pass, .concurrency = 2), SPDL_SINK(3));
    await(&source.calls, 8);
    sleep_us(20000);
    CHECK_EQ(source.calls, 8); /* 2 + 1 behind the source, 3 + 2 in the sink */
    DONE(p);
}

/* --- batches --- */

static void batches_are_cut_by_size(void) {
    for (int w = 0; w < 3; ++w) {
        RUN_BATCHES(START(w, COUNT_TO(10), SPDL_BATCH(3), SPDL_SINK(3)), "0 1 2|3 4 5|6 7 8|9",
                    SPDL_END);
        RUN_BATCHES(START(w, COUNT_TO(9), SPDL_BATCH(3), SPDL_SINK(3)), "0 1 2|3 4 5|6 7 8",
                    SPDL_END);
        RUN_BATCHES(START(w, COUNT_TO(3), SPDL_BATCH(1), SPDL_SINK(3)), "0|1|2", SPDL_END);
        RUN_BATCHES(START(w, COUNT_TO(2), SPDL_BATCH(100), SPDL_SINK(1)), "0 1", SPDL_END);
    }
}

static void the_last_batch_may_be_dropped(void) {
    for (int w = 0; w < 3; ++w) {
        spdl_pipeline *p = START(w, COUNT_TO(10), SPDL_BATCH(3, .drop_last = true), SPDL_SINK(3));
        TAKE_BATCHES(p, "0 1 2|3 4 5|6 7 8", SPDL_END);
        CHECK_EQ(stats_of(p, 1).skips, 1);
        DONE(p);
        RUN_BATCHES(START(w, COUNT_TO(9), SPDL_BATCH(3, .drop_last = true), SPDL_SINK(3)),
                    "0 1 2|3 4 5|6 7 8", SPDL_END);
        RUN_BATCHES(START(w, COUNT_TO(2), SPDL_BATCH(3, .drop_last = true), SPDL_SINK(3)), "",
                    SPDL_END);
    }
}

static void skipped_items_leave_no_hole_in_a_batch(void) {
    for (int w = 0; w < 3; ++w)
        RUN_BATCHES(START(w, COUNT_TO(10),
                          SPDL_PIPE(follow, SCRIPT(.every = 3, .result = SPDL_SKIP),
                                    .concurrency = 3),
                          SPDL_BATCH(2), SPDL_SINK(3)),
                    "1 2|4 5|7 8", SPDL_END);
}

/* Takes the first item out, makes an item of its own of the sum. */
SPDL_FN(sum, spdl_batch, item) {
    long total = 0;
    CHECK_EQ(spdl_sequence(task), in->sequence);
    for (size_t i = 0; i < in->count; ++i) total += ((const item *)in->items[i])->value;
    *out = (item *)in->items[0];
    (*out)->value = total;
    in->items[0] = NULL;
    return SPDL_OK;
}

static void a_stage_may_empty_a_batch(void) {
    for (int w = 0; w < 3; ++w)
        RUN(START(w, COUNT_TO(7), SPDL_BATCH(2),
                  SPDL_PIPE(sum, .concurrency = 2, .free_item = item_free), SPDL_SINK(3)),
            "1 5 9 6", SPDL_END);
}

static void note_batches(notes *n, void *taken) {
    spdl_batch *outer = (spdl_batch *)taken;
    for (size_t i = 0; i < outer->count; ++i) {
        const spdl_batch *inner = (const spdl_batch *)outer->items[i];
        note(n, "(");
        for (size_t k = 0; k < inner->count; ++k)
            note(n, "%ld", ((const item *)inner->items[k])->value);
        note(n, ")");
    }
    spdl_batch_free(outer);
}

static void batches_can_be_batched(void) {
    for (int w = 0; w < 3; ++w) {
        notes n = { .length = 0 };
        spdl_pipeline *p =
            START(w, COUNT_TO(9), SPDL_BATCH(2), SPDL_BATCH(2), SPDL_SINK(3));
        CHECK_EQ(take(p, &n, 10, "|", note_batches), SPDL_END);
        CHECK_STR(n.text, "(01)(23)|(45)(67)|(8)");
        DONE(p);
        p = START(w, COUNT_TO(90), SPDL_BATCH(2), SPDL_BATCH(2, .drop_last = true), SPDL_SINK(3));
        CHECK_EQ(take(p, &n, 3, "|", note_batches), SPDL_OK);
        DONE(p);
    }
}

static void batches_outlive_their_pipeline(void) {
    spdl_batch *kept[30];
    spdl_pipeline *p = START(2, COUNT_TO(100), SPDL_BATCH(3), SPDL_SINK(3));
    for (int i = 0; i < 30; ++i)
        CHECK_EQ(SPDL_NEXT(p, &kept[i], SPDL_FOREVER), SPDL_OK);
    spdl_pipeline_destroy(p);
    CHECK_EQ(items_alive(), 90);
    for (int i = 0; i < 30; ++i) {
        CHECK_EQ(((const item *)kept[i]->items[2])->value, 3 * i + 2);
        spdl_batch_free(kept[i]);
    }
    CHECK_EQ(items_alive(), 0);
    spdl_batch_free(NULL);
}

SPDL_FN(pass_batch, spdl_batch, spdl_batch) {
    *out = in;
    return in->sequence % 3 == 1 ? SPDL_SKIP : SPDL_OK;
}

static void a_batch_can_be_passed_on(void) {
    for (int w = 0; w < 3; ++w) {
        notes n = { .length = 0 };
        spdl_pipeline *p = START(w, COUNT_TO(30), SPDL_BATCH(2), SPDL_PIPE(pass_batch),
                                 SPDL_BATCH(5), SPDL_SINK(1));
        CHECK_EQ(take(p, &n, 9, "|", note_batches), SPDL_END);
        CHECK_STR(n.text, "(01)(45)(67)(1011)(1213)|(1617)(1819)(2223)(2425)(2829)");
        DONE(p);
    }
}

/* --- ownership --- */

/* Takes every input; what to do with it depends on the value. */
SPDL_FN(takes, item, item) {
    spdl_take(task);
    if (in->value % 3 == 1) {
        *out = in;
        return SPDL_OK;
    }
    item_free(in);
    return *(const spdl_result *)spdl_ctx(task);
}

static void a_stage_may_take_its_input(void) {
    static spdl_result skip = SPDL_SKIP, fail = SPDL_E_FORMAT;
    for (int w = 0; w < 3; ++w) {
        RUN(START(w, COUNT_TO(9), SPDL_PIPE(takes, .ctx = &skip), SPDL_SINK(3)), "1 4 7", SPDL_END);
        RUN(START(w, COUNT_TO(9), SPDL_PIPE(takes, .ctx = &fail, .max_failures = -1),
                  SPDL_SINK(3)),
            "1 4 7", SPDL_END);
    }
}

/* Input is freed by its maker's free_item whatever becomes of the call. */
static void inputs_are_freed_once(void) {
    static const spdl_result results[] = { SPDL_OK, SPDL_SKIP, SPDL_E_STAGE, SPDL_TIMEOUT };
    for (int i = 0; i < 16; ++i) {
        const bool fresh = i % 2 != 0;
        spdl_pipeline *p = START(
            i / 4, COUNT_TO(10),
            SPDL_PIPE(follow, SCRIPT(.fresh = fresh, .every = 3, .result = results[i % 4]),
                      .max_failures = -1, .concurrency = 2, .free_item = item_free),
            SPDL_SINK(3));
        RUN(p, results[i % 4] == SPDL_OK ? "0 1 2 3 4 5 6 7 8 9" : "1 2 4 5 7 8", SPDL_END);
    }
}

static int freed_by[2];

static void free_as_0(void *it) {
    __atomic_add_fetch(&freed_by[0], 1, __ATOMIC_RELAXED);
    item_free(it);
}

static void free_as_1(void *it) {
    __atomic_add_fetch(&freed_by[1], 1, __ATOMIC_RELAXED);
    item_free(it);
}

/* Each item by the stage that made it: those passed on still belong to the source. The third row
   frees five of its inputs itself. */
static void items_are_freed_by_their_maker(void) {
    spdl_pipeline *p =
        START(2, SPDL_SOURCE(count_up, SCRIPT(.count = 10), .free_item = free_as_0),
              SPDL_PIPE(follow, SCRIPT(.plus = 0), .free_item = free_as_1),
              SPDL_PIPE(follow, SCRIPT(.fresh = true), .free_item = free_as_1),
              SPDL_PIPE(follow, SCRIPT(.every = 1, .result = SPDL_SKIP)), SPDL_SINK(3));
    RUN(p, "", SPDL_END);
    CHECK_EQ(freed_by[0], 5);
    CHECK_EQ(freed_by[1], 10);
}

/* As a call that frees its input, and gets the same address from malloc. */
SPDL_FN(makes_it_anew, item, item) {
    if (in == NULL) return SPDL_SKIP; /* with .flush */
    spdl_take(task);
    in->value += 100;
    *out = in;
    return SPDL_OK;
}

static void a_result_at_the_address_of_a_taken_input(void) {
    for (int i = 0; i < 6; ++i) {
        freed_by[0] = freed_by[1] = 0;
        RUN_BATCHES(START(i / 2, SPDL_SOURCE(count_up, SCRIPT(.count = 6), .free_item = free_as_0),
                          SPDL_PIPE(makes_it_anew, .flush = i % 2, .free_item = free_as_1),
                          SPDL_BATCH(3), SPDL_SINK(3)),
                    "100 101 102|103 104 105", SPDL_END);
        CHECK_EQ(freed_by[0], 0);
        CHECK_EQ(freed_by[1], 6);
    }
}

static void *memory_alloc(size_t bytes, size_t align, void *user) {
    (void)user;
    return test_memory(align, bytes);
}

static void memory_free(void *memory, size_t bytes, void *user) {
    (void)bytes, (void)user;
    test_memory_free(memory);
}

typedef struct hoard {
    long *held[100]; /* inputs */
    size_t count;
    int same; /* results at the address of their input */
} hoard;

SPDL_FN(numbered, void, long) {
    if (spdl_sequence(task) == 300) return SPDL_END;
    *out = (long *)spdl_buffer(task);
    return SPDL_OK;
}

/* More buffers than the library keeps are freed at once, that of the input last. */
SPDL_FN(hoards, long, long) {
    hoard *h = (hoard *)spdl_ctx(task);
    const long number = (long)spdl_sequence(task);
    spdl_take(task);
    if (number < 100) h->held[h->count++] = in;
    while (number == 100 && h->count > 0) spdl_buffer_free(h->held[--h->count]);
    if (number >= 100) spdl_buffer_free(in);
    *out = (long *)spdl_buffer(task);
    h->same += *out == in;
    **out = number;
    return SPDL_OK;
}

/* Each buffer is that of one result. */
static void a_result_at_the_address_of_a_taken_buffer(void) {
    for (int w = 0; w < 3; ++w) {
        hoard h = { .count = 0 };
        spdl_pipeline_desc desc = { .workers = TEST_WORKERS(w) };
        spdl_pipeline *p;
        long *taken[300];
        desc.allocator.alloc_fn = memory_alloc;
        desc.allocator.free_fn = memory_free;
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_SOURCE(numbered, .item_bytes = 64, .free_item = spdl_buffer_free),
            SPDL_PIPE(hoards, .ctx = &h, .item_bytes = 64, .free_item = spdl_buffer_free),
            SPDL_SINK(1))) == SPDL_OK);
        for (int i = 0; i < 300; ++i) REQUIRE(SPDL_NEXT(p, &taken[i], SPDL_SECONDS(15)) == SPDL_OK);
        CHECK(TEST_SANITIZED || h.same > 0);
        for (int i = 0; i < 300; ++i) CHECK_EQ(*taken[i], i);
        for (int i = 0; i < 300; ++i) spdl_buffer_free(taken[i]);
        DONE(p);
    }
}

/* --- failures --- */

#define FAIL_AT(every_, rest_) SCRIPT(.every = (every_), .rest = (rest_), .result = SPDL_E_STAGE)

static void any_number_of_failures_can_be_allowed(void) {
    for (int w = 0; w < 4; ++w) {
        spdl_pipeline *p = START(w, COUNT_TO(10),
                                 SPDL_PIPE(follow, FAIL_AT(3, 0), .max_failures = -1),
                                 SPDL_SINK(3));
        TAKE_ALL(p, "1 2 4 5 7 8", SPDL_END);
        CHECK(!spdl_pipeline_failed(p));
        CHECK_EQ(spdl_pipeline_error(p)->result, SPDL_OK);
        CHECK_EQ(stats_of(p, 1).failures, 4);
        DONE(p);
    }
}

/* What a pipeline that has failed tells. */
static void failed_with(const spdl_pipeline *p, spdl_result result, int stage, uint64_t number,
                        const char *name, const char *text) {
    const spdl_error *error = spdl_pipeline_error(p);
    CHECK(spdl_pipeline_failed(p));
    CHECK_STR(spdl_result_text(error->result), spdl_result_text(result));
    CHECK_EQ(error->stage, stage);
    CHECK_EQ(error->item, number);
    CHECK_STR(error->stage_name, name);
    CHECK_STR(error->text, text);
}

static void one_failure_more_than_allowed_ends_it(void) {
    for (int w = 0; w < 4; ++w) {
        spdl_pipeline *p = START(w, COUNT_TO(20),
                                 SPDL_PIPE(follow, FAIL_AT(2, 1), .max_failures = 3),
                                 SPDL_SINK(3));
        TAKE_ALL(p, "0 2 4 6", SPDL_E_STAGE);
        failed_with(p, SPDL_E_STAGE, 1, 7, "follow",
                    "stage 1 'follow', item 7: value 7 is bad (one more than max_failures)");
        DONE(p);
        p = START(w, COUNT_TO(7), SPDL_PIPE(follow, FAIL_AT(2, 1), .max_failures = 3),
                  SPDL_SINK(3));
        RUN(p, "0 2 4 6", SPDL_END);
    }
}

static void the_first_failure_ends_it_by_default(void) {
    for (int w = 0; w < 4; ++w) {
        spdl_pipeline *p = START(w, COUNT_TO(20), FOLLOW(.fresh = true),
                                 SPDL_PIPE(follow, FAIL_AT(8, 5), .name = "decode"),
                                 FOLLOW(.fresh = true), SPDL_SINK(3));
        TAKE_ALL(p, "0 1 2 3 4", SPDL_E_STAGE);
        failed_with(p, SPDL_E_STAGE, 2, 5, "decode",
                    "stage 2 'decode', item 5: value 5 is bad");
        DONE(p);
    }
}

static void budgets_belong_to_their_stage(void) {
    for (int w = 0; w < 4; ++w) {
        spdl_pipeline *p = START(w, COUNT_TO(10),
                                 SPDL_PIPE(follow, FAIL_AT(5, 0), .max_failures = 3),
                                 SPDL_PIPE(follow, FAIL_AT(5, 1), .max_failures = 3),
                                 SPDL_SINK(3));
        RUN(p, "2 3 4 7 8 9", SPDL_END);
    }
}

/* Items before the failed one are delivered at any concurrency, those behind it are not. */
static void a_failure_cuts_the_input_order(void) {
    const int rounds = TEST_SANITIZED ? 10 : 60;
    chaos_on();
    for (int i = 0; i < rounds; ++i) {
        spdl_pipeline *p = START(
            i % 9, COUNT_TO(300), SPDL_PIPE(follow, SCRIPT(.fresh = true), .concurrency = 3,
                                            .free_item = item_free, .buffer_size = 16),
            SPDL_PIPE(follow, FAIL_AT(50, 49), .concurrency = 8, .buffer_size = 16),
            SPDL_PIPE(follow, SCRIPT(.fresh = true), .concurrency = 2, .free_item = item_free),
            SPDL_SINK(3));
        CHECK_EQ(take_from(p, 0, 1000, SPDL_E_STAGE), 49);
        failed_with(p, SPDL_E_STAGE, 2, 49, "follow#2",
                    "stage 2 'follow#2', item 49: value 49 is bad");
        DONE(p);
    }
}

/* The stage in front runs ahead and fails first, at a later item: the trainer never gets there. */
static void the_failure_that_is_told_is_the_one_that_is_met(void) {
    for (int w = 0; w < 4; ++w) {
        int gate = 0;
        script ahead = { .every = 8, .rest = 7, .result = SPDL_E_STAGE };
        spdl_pipeline *p = START(w, COUNT_TO(20),
                                 SPDL_PIPE(follow, .ctx = &ahead, .buffer_size = 16),
                                 SPDL_PIPE(follow, SCRIPT(.every = 8, .rest = 4,
                                                          .result = SPDL_E_STAGE,
                                                          .gate = w > 1 ? &gate : NULL,
                                                          .gate_at = 2)),
                                 SPDL_SINK(3));
        if (w > 1) await(&ahead.calls, 8);
        __atomic_store_n(&gate, 1, __ATOMIC_RELEASE);
        TAKE_ALL(p, "0 1 2 3", SPDL_E_STAGE);
        failed_with(p, SPDL_E_STAGE, 2, 4, "follow#2",
                    "stage 2 'follow#2', item 4: value 4 is bad");
        DONE(p);
    }
}

static void a_failure_with_completion_order_ends_it_too(void) {
    for (int w = 0; w < 6; ++w) {
        notes n = { .length = 0 };
        spdl_pipeline *p = START(w, COUNT_TO(-1),
                                 SPDL_PIPE(follow, FAIL_AT(50, 49), .concurrency = 4,
                                           .output_order = SPDL_ORDER_COMPLETION),
                                 SPDL_SINK(3));
        CHECK_EQ(take(p, &n, 100000, " ", note_item), SPDL_E_STAGE);
        CHECK(n.taken >= 49 - 3 && spdl_pipeline_error(p)->item % 50 == 49);
        DONE(p);
    }
}

/* Told also when only `next` is ever called. */
static void a_source_that_fails_is_no_silent_end(void) {
    for (int w = 0; w < 4; ++w) {
        spdl_pipeline *p = START(w, SOURCE(.count = 10, .last = SPDL_E_IO), FOLLOW(.fresh = true),
                                 SPDL_SINK(3));
        TAKE_ALL(p, "0 1 2 3 4 5 6 7 8 9", SPDL_E_IO);
        failed_with(p, SPDL_E_IO, 0, 10, "count_up",
                    "stage 0 'count_up', item 10: input or output error");
        DONE(p);
    }
}

static void a_source_has_a_budget(void) {
    for (int w = 0; w < 3; ++w) {
        RUN(START(w, SPDL_SOURCE(count_up, SCRIPT(.count = 6, .every = 3, .result = SPDL_E_IO),
                                 .free_item = item_free, .max_failures = 3),
                  SPDL_SINK(3)),
            "0 1 2 3 4 5", SPDL_END);
        RUN(START(w, SPDL_SOURCE(count_up, SCRIPT(.count = -1, .every = 3, .result = SPDL_E_IO),
                                 .free_item = item_free, .max_failures = 2),
                  SPDL_SINK(3)),
            "0 1 2 3", SPDL_E_IO);
    }
}

/* What is behind the failed stage finishes its items, what is in front is not called any more. */
static void a_failure_stops_what_is_in_front(void) {
    script source = { .count = -1 }, behind = { .count = 0 };
    spdl_pipeline *p = START(2, SPDL_SOURCE(count_up, .ctx = &source, .free_item = item_free),
                             SPDL_PIPE(follow, FAIL_AT(10, 9)), SPDL_PIPE(follow, .ctx = &behind),
                             SPDL_SINK(3));
    TAKE_ALL(p, "0 1 2 3 4 5 6 7 8", SPDL_E_STAGE);
    CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(behind.calls, 9);
    CHECK(source.calls <= 10 + (2 + 1)); /* those taken, and a full edge */
    TAKE_ALL(p, "", SPDL_E_STAGE);
    DONE(p);
}

static void a_batch_that_a_failure_cuts_is_freed(void) {
    for (int w = 0; w < 3; ++w) {
        RUN_BATCHES(START(w, COUNT_TO(20), SPDL_PIPE(follow, FAIL_AT(20, 7)), SPDL_BATCH(3),
                          SPDL_SINK(3)),
                    "0 1 2|3 4 5", SPDL_E_STAGE);
        RUN_BATCHES(START(w, COUNT_TO(20), SPDL_PIPE(follow, FAIL_AT(20, 7)),
                          SPDL_BATCH(3, .drop_last = true), SPDL_SINK(3)),
                    "0 1 2|3 4 5", SPDL_E_STAGE);
    }
}

static void results_that_are_none_are_failures(void) {
    static const struct {
        int result, told;
        const char *text;
    } cases[] = {
        { SPDL_END, SPDL_E_STAGE, "SPDL_END, which only a source may" },
        { SPDL_TIMEOUT, SPDL_E_STAGE, "1003, which is not a result of a stage function" },
        { SPDL_CLOSED, SPDL_E_STAGE, "1006, which is not a result of a stage function" },
        { 77, SPDL_E_STAGE, "77, which is not a result of a stage function" },
        { -99, -99, "-99, which is not a result of a stage function" },
    };
    for (int i = 0; i < 5; ++i) {
        const spdl_result told = (spdl_result)cases[i].told;
        char text[100];
        spdl_pipeline *p = START(1, COUNT_TO(9),
                                 SPDL_PIPE(follow, SCRIPT(.every = 3, .rest = 2,
                                                          .result = (spdl_result)cases[i].result)),
                                 SPDL_SINK(3));
        TAKE_ALL(p, "0 1", told);
        snprintf(text, sizeof text, "stage 1 'follow', item 2: returned %s", cases[i].text);
        failed_with(p, told, 1, 2, "follow", text);
        DONE(p);
    }
}

SPDL_FN(fails_at_length, item, item) { return spdl_fail(task, "%600d", (int)in->value); }

static void long_texts_and_names_are_cut(void) {
    spdl_pipeline *p = START(1, COUNT_TO(9),
                             SPDL_PIPE(fails_at_length,
                                       .name = "a name of more than thirty-one characters"),
                             SPDL_SINK(3));
    TAKE_ALL(p, "", SPDL_E_STAGE);
    CHECK_EQ(strlen(spdl_pipeline_error(p)->text), SPDL_TEXT_BYTES - 1);
    CHECK_STR(spdl_pipeline_error(p)->stage_name, "a name of more than thirty-one ");
    DONE(p);
}

TEST_TABLE(pipeline) {
    TEST_CASE(items_arrive_in_order),
    TEST_CASE(functions_are_composed),
    TEST_CASE(an_empty_source_ends),
    TEST_CASE(skipped_items_are_gone),
    TEST_CASE(gaps_wake_the_trainer),
    TEST_CASE(a_source_may_skip),
    TEST_CASE(completion_order_is_by_time),
    TEST_CASE(input_order_is_kept),
    TEST_CASE(order_is_kept_among_survivors),
    TEST_CASE(items_keep_their_number),
    TEST_CASE(null_is_an_item),
    TEST_CASE(many_stages_with_little_room),
    TEST_CASE(calls_run_at_the_same_time),
    TEST_CASE(concurrency_is_reached_and_never_exceeded),
    TEST_CASE(concurrency_bounds_tiny_items_too),
    TEST_CASE(a_slow_item_holds_back_none_before_it),
    TEST_CASE(one_worker_runs_downstream_first),
    TEST_CASE(a_trainer_that_sleeps_stops_the_flow),
    TEST_CASE(batches_are_cut_by_size),
    TEST_CASE(the_last_batch_may_be_dropped),
    TEST_CASE(skipped_items_leave_no_hole_in_a_batch),
    TEST_CASE(a_stage_may_empty_a_batch),
    TEST_CASE(batches_can_be_batched),
    TEST_CASE(batches_outlive_their_pipeline),
    TEST_CASE(a_batch_can_be_passed_on),
    TEST_CASE(a_stage_may_take_its_input),
    TEST_CASE(inputs_are_freed_once),
    TEST_CASE(items_are_freed_by_their_maker),
    TEST_CASE(a_result_at_the_address_of_a_taken_input),
    TEST_CASE(a_result_at_the_address_of_a_taken_buffer),
    TEST_CASE(any_number_of_failures_can_be_allowed),
    TEST_CASE(one_failure_more_than_allowed_ends_it),
    TEST_CASE(the_first_failure_ends_it_by_default),
    TEST_CASE(budgets_belong_to_their_stage),
    TEST_CASE(a_failure_cuts_the_input_order),
    TEST_CASE(the_failure_that_is_told_is_the_one_that_is_met),
    TEST_CASE(a_failure_with_completion_order_ends_it_too),
    TEST_CASE(a_source_that_fails_is_no_silent_end),
    TEST_CASE(a_source_has_a_budget),
    TEST_CASE(a_failure_stops_what_is_in_front),
    TEST_CASE(a_batch_that_a_failure_cuts_is_freed),
    TEST_CASE(results_that_are_none_are_failures),
    TEST_CASE(long_texts_and_names_are_cut),
    TEST_END,
};
