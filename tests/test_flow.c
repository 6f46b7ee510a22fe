/* Pipelines: one to many, calls that ask for what they may not, flush, epochs, rows of quick
   stages. Streams of one input are in test_again.c, branches in test_branch.c, deferred calls
   in test_defer.c, push mode, live changes and policies in test_push.c. */
#define ITEMS_PRIVATE
#include "flow.h"

/* --- what a call may ask for --- */

SPDL_FN(routes_nowhere, item, item) {
    *out = in;
    return spdl_route(task, 0);
}

static const char not_a_branch[] = "spdl_route in a stage that is no SPDL_BRANCH";

static void routing_is_for_branches(void) {
    for (int i = 0; i < CROWDS; ++i) {
        spdl_pipeline *p = START(crowds[i], COUNT_TO(6), SPDL_PIPE(routes_nowhere), SPDL_SINK(2));
        TAKE_ALL(p, "", SPDL_E_INVALID);
        failed_with(p, 1, "stage 1 'routes_nowhere', item 0: spdl_route in a stage that is "
                          "no SPDL_BRANCH");
        DONE(p);
    }
}

/* Does as if it had worked. */
SPDL_FN(routes_regardless, item, item) {
    const int how = *(const int *)spdl_ctx(task);
    CHECK_EQ(spdl_route(task, 0), SPDL_E_INVALID);
    if (how == 1) *out = in;
    if (how == 2) *out = item_make(7);
    if (how == 3) spdl_take(task);
    if (how == 3) item_free(in);
    return how == 0 ? SPDL_SKIP : SPDL_OK;
}

static void an_answer_that_is_ignored_fails_the_call(void) {
    for (int i = 0; i < 4 * CROWDS; ++i) {
        spdl_pipeline *p = START(crowds[i / 4], COUNT_TO(6),
                                 SPDL_PIPE(routes_regardless, .ctx = &(int){ i % 4 },
                                           .free_item = item_free), SPDL_SINK(2));
        TAKE_ALL(p, "", SPDL_E_INVALID);
        failed_with(p, 1, "stage 1 'routes_regardless', item 0: spdl_route in a stage that "
                          "is no SPDL_BRANCH");
        DONE(p);
    }
}

/* In the middle of a sitting, whatever failures are allowed. */
SPDL_FN(routes_late, item, item) {
    *out = in;
    if (in->value < 200) return SPDL_OK;
    CHECK_EQ(spdl_route(task, 0), SPDL_E_INVALID);
    if (*(const bool *)spdl_ctx(task)) spdl_take(task); /* and hands it on all the same */
    return SPDL_OK;
}

SPDL_FN(ends_with_a_route, void, item) {
    if (spdl_sequence(task) < 3) {
        *out = item_make((long)spdl_sequence(task));
        return SPDL_OK;
    }
    CHECK_EQ(spdl_route(task, 0), SPDL_E_INVALID);
    return SPDL_END;
}

static void no_budget_is_for_a_wrong_row(void) {
    for (int i = 0; i < 2 * CROWDS; ++i) {
        const int w = crowds[i / 2];
        bool takes = i % 2;
        spdl_pipeline *p = START(w, COUNT_TO(400),
                                 SPDL_PIPE(routes_late, .ctx = &takes, .max_failures = -1,
                                           .free_item = item_free),
                                 SPDL_SINK(4));
        CHECK_EQ(take_from(p, 0, 1000, SPDL_E_INVALID), 200);
        CHECK(strstr(spdl_pipeline_error(p)->text, not_a_branch) != NULL);
        DONE(p);
        p = START(w, SPDL_SOURCE(ends_with_a_route, .max_failures = -1, .free_item = item_free),
                  SPDL_SINK(4));
        TAKE_ALL(p, "0 1 2", SPDL_E_INVALID);
        CHECK(strstr(spdl_pipeline_error(p)->text, not_a_branch) != NULL);
        DONE(p);
    }
}

/* A source asks for a buffer, and there is nothing to fill it with. */
SPDL_FN(fills_three, void, item) {
    item *buffer = (item *)spdl_buffer(task);
    if (spdl_sequence(task) == 3) return SPDL_END;
    buffer->value = (long)spdl_sequence(task);
    *out = buffer;
    return SPDL_OK;
}

static void a_source_may_end_with_a_buffer(void) {
    for (int i = 0; i < 2 * CROWDS; ++i) {
        const spdl_stage source = SPDL_SOURCE(fills_three, .item_bytes = i % 2 ? 0 : sizeof(item),
                                              .continuous = true);
        const spdl_stage batch = SPDL_BATCH(2, .item_bytes = sizeof(item)), sink = SPDL_SINK(2);
        spdl_pipeline *p = i % 2 ? START(crowds[i / 2], source, batch, sink)
                                 : START(crowds[i / 2], source, sink);
        for (int epoch = 0; epoch < 9; ++epoch) {
            void *taken;
            for (long k = 0; k < (i % 2 ? 2 : 3); ++k) {
                REQUIRE(spdl_pipeline_next(p, &taken, SPDL_SECONDS(15)) == SPDL_OK);
                if (i % 2 == 0) CHECK_EQ(((item *)taken)->value, k);
                else CHECK_EQ(((spdl_batch *)taken)->count, 2 - k);
                if (i % 2 == 0) spdl_buffer_free(taken);
                else spdl_batch_free(taken);
            }
            CHECK_EQ(spdl_pipeline_next(p, &taken, SPDL_SECONDS(15)), SPDL_END);
        }
        DONE(p);
    }
}

/* A task that was kept, and a thread that uses it: during the call, and after it. */
typedef struct misuse {
    spdl_result (*use)(spdl_task *task, item *it);
    spdl_result result;
    const char *function, *more;
} misuse;

typedef struct leak {
    spdl_task *task;
    item *it;
    const misuse *way;
    int lines, calls;
} leak;

static spdl_result use_take(spdl_task *task, item *it) {
    (void)it;
    spdl_take(task);
    return SPDL_OK;
}

static spdl_result use_fail(spdl_task *task, item *it) {
    return spdl_fail(task, "value %d", (int)it->value);
}

static spdl_result use_route(spdl_task *task, item *it) {
    (void)it;
    return spdl_route(task, 0);
}

static spdl_result use_state(spdl_task *task, item *it) {
    (void)it;
    return spdl_call_state(task) != NULL ? SPDL_OK : SPDL_E_INVALID; /* what it holds is nobody's */
}

static spdl_result use_buffer(spdl_task *task, item *it) {
    (void)it;
    return spdl_buffer(task) == NULL ? SPDL_OK : SPDL_E_INVALID;
}

static spdl_result use_defer(spdl_task *task, item *it) {
    (void)it;
    return spdl_defer(task).pipeline == NULL ? SPDL_OK : SPDL_E_INVALID;
}

static const misuse misuses[] = {
    { use_route, SPDL_E_INVALID, "spdl_route", "" },
    { use_take, SPDL_OK, "spdl_take", "" },
    { use_fail, SPDL_E_STAGE, "spdl_fail", ": value 9" },
    { use_state, SPDL_OK, "spdl_call_state", "" },
    { use_buffer, SPDL_OK, "spdl_buffer", "" },
    { use_defer, SPDL_OK, "spdl_defer", "" },
};
#define MISUSES ((int)(sizeof misuses / sizeof misuses[0]))

static void log_of_leak(spdl_log_level level, const char *text, void *user) {
    leak *l = (leak *)user;
    char told[100];
    snprintf(told, sizeof told, "%s: not inside of a call of this stage%s", l->way->function,
             l->way->more);
    CHECK_EQ(level, SPDL_LOG_ERROR);
    CHECK_STR(text, told);
    __atomic_add_fetch(&l->lines, 1, __ATOMIC_RELAXED);
}

static void *misuse_elsewhere(void *arg) {
    const leak *l = (const leak *)arg;
    CHECK_EQ(l->way->use(l->task, l->it), l->way->result);
    return NULL;
}

/* The input of item 1 is dropped, and freed: nobody has taken it. */
SPDL_FN(leaks_its_task, item, item) {
    leak *l = (leak *)spdl_ctx(task);
    l->task = task;
    *out = in;
    if (in->value != 1) return SPDL_OK;
    test_join(thread_of(misuse_elsewhere, l));
    return SPDL_SKIP;
}

static void a_task_is_of_its_call_only(void) {
    for (int i = 0; i < CROWDS * MISUSES; ++i) {
        leak l = { .it = item_make(9), .way = &misuses[i % MISUSES] };
        spdl_pipeline_desc desc = { .workers = TEST_WORKERS(crowds[i / MISUSES]) };
        spdl_pipeline *p = NULL;
        desc.logger.log_fn = log_of_leak;
        desc.logger.user = &l;
        REQUIRE(spdl_pipeline_create(&p, &desc,
                                     SPDL_STAGES(COUNT_TO(3), SPDL_PIPE(leaks_its_task, .ctx = &l),
                                                 SPDL_SINK(4))) == SPDL_OK);
        TAKE_ALL(p, "0 2", SPDL_END);
        CHECK_EQ(l.lines, 1);
        (void)misuse_elsewhere(&l); /* the call has returned */
        test_join(thread_of(misuse_elsewhere, &l));
        CHECK_EQ(l.lines, 3);
        item_free(l.it);
        DONE(p);
    }
}

static void *misuse_all_the_time(void *arg) {
    leak *l = (leak *)arg;
    for (int i = 0; __atomic_load_n(&l->calls, __ATOMIC_ACQUIRE) == 0; ++i) {
        l->way = &misuses[i % MISUSES];
        (void)misuse_elsewhere(l);
    }
    return NULL;
}

/* While the calls come and go: refused each time, and nothing is broken. */
static void misuse_beside_the_calls_breaks_nothing(void) {
    leak l = { .it = item_make(9) };
    spdl_pipeline_desc desc = { .workers = 1 };
    spdl_pipeline *p = NULL;
    test_thread thread;
    desc.logger.log_fn = log_of_leak;
    desc.logger.user = &l;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(COUNT_TO(500), SCATTER(BURST(.plus = 2)),
                                                        SPDL_SINK(4))) == SPDL_OK);
    l.task = p->task[0];
    CHECK_EQ(take_from(p, 0, 2, SPDL_OK), 2);
    thread = thread_of(misuse_all_the_time, &l);
    await(&l.lines, 1);
    CHECK_EQ(take_from_any(p), 998);
    __atomic_store_n(&l.calls, 1, __ATOMIC_RELEASE);
    test_join(thread);
    item_free(l.it);
    DONE(p);
}

SPDL_FN(keeps_its_task, item, item) {
    ((leak *)spdl_ctx(task))->task = task;
    *out = in;
    return SPDL_OK;
}

static void *takes_the_second(void *p) {
    CHECK_EQ(take_from((spdl_pipeline *)p, 1, 1, SPDL_OK), 1);
    return NULL;
}

/* The task of an earlier call, while another thread is about to call with it. */
static void a_task_is_of_one_thread(void) {
    leak l = { .it = item_make(9) };
    spdl_pipeline_desc desc = { .workers = SPDL_INLINE };
    spdl_pipeline *p = NULL;
    test_thread thread;
    desc.logger.log_fn = log_of_leak;
    desc.logger.user = &l;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(COUNT_TO(-1),
                                                        SPDL_PIPE(keeps_its_task, .ctx = &l),
                                                        SPDL_SINK(1))) == SPDL_OK);
    CHECK_EQ(take_from(p, 0, 1, SPDL_OK), 1);
    freeze_some("pipeline takes", 1);
    thread = thread_of(takes_the_second, p);
    await(&frozen, 1);
    for (int i = 0; i < MISUSES; ++i) {
        l.way = &misuses[i];
        (void)misuse_elsewhere(&l);
    }
    CHECK_EQ(l.lines, MISUSES);
    thaw();
    test_join(thread);
    item_free(l.it);
    DONE(p);
}

/* --- one to many --- */

static void many_of_one_fill_batches(void) {
    for (int i = 0; i < CROWDS; ++i)
        RUN_BATCHES(START(crowds[i], COUNT_TO(4), SCATTER(BURST(.plus = 3)), SPDL_BATCH(5),
                          SPDL_SINK(1)),
                    "0 1 2 100 101|102 200 201 202 300|301 302", SPDL_END);
}

static void one_input_may_become_very_many(void) {
    for (int i = 0; i < CROWDS; i += TEST_SANITIZED ? 3 : 1) {
        spdl_pipeline *p = START(crowds[i], COUNT_TO(1), SCATTER(BURST(.plus = 100000)),
                                 SPDL_PIPE(follow, SCRIPT(.plus = 0)), SPDL_SINK(256));
        CHECK_EQ(take_from(p, 0, 1000000, SPDL_END), 100000);
        DONE(p);
    }
}

/* Stopped, or left, with items of one input on both sides. */
static void many_of_one_are_freed_at_a_stop(void) {
    for (int i = 0; i < 2 * CROWDS; ++i) {
        spdl_pipeline *p = START(crowds[i / 2], COUNT_TO(-1), SCATTER(BURST(.plus = 50)),
                                 SCATTER(BURST(.plus = 2)), SPDL_SINK(1));
        TAKE(p, 3, "0 1 100");
        if (i % 2) CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        DONE(p);
    }
}

/* --- flush --- */

static void a_stage_may_gather_by_its_own_rule(void) {
    static const struct {
        long count;
        const char *text;
    } cases[] = { { 10, "10 11 15 9" }, { 9, "10 11 15" }, { 5, "10" }, { 3, "3" }, { 0, "" } };
    for (int i = 0; i < 5 * CROWDS; ++i) {
        scale s = { .limit = 10 };
        spdl_pipeline *p = START(crowds[i / 5], COUNT_TO(cases[i % 5].count),
                                 FOLLOW(.fresh = true), WEIGH(&s), SPDL_SINK(1));
        RUN(p, cases[i % 5].text, SPDL_END);
        CHECK_EQ(s.flushes, 1); /* also when there is nothing to flush */
    }
}

static void a_flush_may_fail(void) {
    for (int i = 0; i < CROWDS; ++i) {
        scale s = { .limit = 10, .flushed_bad = true };
        spdl_pipeline *p = START(crowds[i], COUNT_TO(10), WEIGH(&s), SPDL_SINK(1));
        TAKE_ALL(p, "10 11 15", SPDL_E_STAGE);
        failed_with(p, 1, "stage 1 'weigh', item 0: 9 is left");
        DONE(p);
        s = (scale){ .limit = 10, .flushed_bad = true };
        RUN(START(crowds[i], COUNT_TO(10), WEIGH(&s, .max_failures = 1), SPDL_SINK(1)), "10 11 15",
            SPDL_END);
        CHECK_EQ(s.flushes, 2); /* and once more, as it may hold something */
    }
}

/* What a pipeline that is cut short flushes is not delivered: it is freed at a stop or destroy. */
static void nothing_is_flushed_behind_a_failure(void) {
    for (int i = 0; i < CROWDS; ++i) {
        scale s = { .limit = 10 };
        spdl_pipeline *p = START(crowds[i], COUNT_TO(20), WEIGH(&s, .buffer_size = 1),
                                 FOLLOW(.every = 11, .result = SPDL_E_IO), SPDL_SINK(1));
        RUN(p, "10", SPDL_E_IO);
        CHECK_EQ(s.flushes, 1);
        p = START(crowds[i], COUNT_TO(-1), FOLLOW(.plus = 0), WEIGH(&s), SPDL_SINK(1));
        TAKE(p, 1, "10");
        CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(s.flushes, 2);
        DONE(p);
        CHECK_EQ(s.flushes, 2);
    }
}

/* Keeps everything, and hands it on backwards. */
typedef struct stack {
    item *kept[100];
    int count;
} stack;

SPDL_FN(reverse, item, item) {
    stack *s = (stack *)spdl_ctx(task);
    if (!spdl_flushing(task)) {
        spdl_take(task);
        s->kept[s->count++] = in;
        return SPDL_SKIP;
    }
    if (s->count == 0) return SPDL_SKIP;
    *out = s->kept[--s->count];
    return SPDL_AGAIN;
}

#define REVERSE(stack_)                                                                            \
    SPDL_PIPE(reverse, .ctx = (stack_), .again = true, .flush = true, .free_item = item_free)

static void a_flush_may_hand_on_many(void) {
    for (int i = 0; i < CROWDS; ++i) {
        stack s = { .count = 0 };
        RUN(START(crowds[i], COUNT_TO(7), REVERSE(&s), FOLLOW(.plus = 0), SPDL_SINK(1)),
            "6 5 4 3 2 1 0", SPDL_END);
        RUN(START(crowds[i], COUNT_TO(0), REVERSE(&s), SPDL_SINK(1)), "", SPDL_END);
    }
}

/* As reverse, but a call with three left fails, once in each even epoch. */
typedef struct shaky_stack {
    stack stack;
    bool fails;
    uint64_t slipped;
    int inits, finis, gathered; /* atomic */
} shaky_stack;

static spdl_result shaky_init(void *ctx, int worker, void **local) {
    (void)worker;
    __atomic_add_fetch(&((shaky_stack *)ctx)->inits, 1, __ATOMIC_RELAXED);
    *local = ctx;
    return SPDL_OK;
}

static void shaky_fini(void *ctx, int worker, void *local) {
    (void)worker;
    CHECK(local == ctx && ((shaky_stack *)ctx)->stack.count == 0);
    __atomic_add_fetch(&((shaky_stack *)ctx)->finis, 1, __ATOMIC_RELAXED);
}

SPDL_FN(reverse_badly, item, item) {
    shaky_stack *s = (shaky_stack *)spdl_ctx(task);
    CHECK(spdl_local(task) == s);
    if (!spdl_flushing(task)) {
        __atomic_add_fetch(&s->gathered, 1, __ATOMIC_RELAXED);
        if (s->stack.count == 100) return SPDL_SKIP;
        spdl_take(task);
        s->stack.kept[s->stack.count++] = in;
        return SPDL_SKIP;
    }
    if (s->stack.count == 0) return SPDL_SKIP;
    if (s->fails && s->stack.count == 3 && spdl_epoch(task) % 2 == 0 &&
        s->slipped != spdl_epoch(task) + 1) {
        s->slipped = spdl_epoch(task) + 1;
        return spdl_fail(task, "it slipped");
    }
    *out = s->stack.kept[--s->stack.count];
    return SPDL_AGAIN;
}

#define REVERSE_BADLY(stack_)                                                                      \
    SPDL_PIPE(reverse_badly, .ctx = (stack_), .again = true, .flush = true, .max_failures = -1,    \
              .init = shaky_init, .fini = shaky_fini, .free_item = item_free)

/* What a row has gathered is freed by a stop that waited, a rewind, a load and destroy: while it
   gathers, in the middle of its series, and behind a failure. */
static void what_is_gathered_ends_with_its_run(void) {
    enum { STOPS, REWINDS, LOADS, DESTROYS, WAYS };
    for (int i = 0; i < CROWDS * WAYS * 3; ++i) {
        const int way = i / 3 % WAYS, when = i % 3, workers = crowds[i / (3 * WAYS)];
        shaky_stack s = { .fails = when == 2 };
        char text[SPDL_STATE_BYTES];
        const char *texts[] = { text };
        spdl_pipeline *p = START(workers, COUNT_TO(when == 0 ? -1 : 20), FOLLOW(.plus = 0),
                                 REVERSE_BADLY(&s), SPDL_SINK(1));
        if (way == LOADS) CHECK(spdl_state_save(p, text, sizeof text) > 0);
        if (when == 0) {
            void *none;
            while (__atomic_load_n(&s.gathered, __ATOMIC_RELAXED) < 5)
                CHECK_EQ(spdl_pipeline_next(p, &none, 1000000), SPDL_TIMEOUT);
        } else {
            TAKE(p, 2, "19 18");
        }
        if (way == STOPS) CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        if (way == REWINDS) CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_FOREVER), SPDL_OK);
        if (way == LOADS) CHECK_EQ(spdl_state_load(p, texts, 1, SPDL_FOREVER, NULL), SPDL_OK);
        if (way == STOPS) CHECK_EQ(s.stack.count, 0);
        if ((way == REWINDS || way == LOADS) && when > 0)
            TAKE_ALL(p, "19 18 17 16 15 14 13 12 11 10 9 8 7 6 5 4 3 2 1 0", SPDL_END);
        DONE(p);
        CHECK_EQ(s.stack.count, 0);
        CHECK(s.inits > 0 && s.inits == s.finis);
    }
}

/* A failed call ends a series: the rest is freed, and no item of it is in the next epoch. */
static void the_rest_of_a_failed_series_is_freed(void) {
    for (int i = 0; i < CROWDS; ++i) {
        shaky_stack s = { .fails = true };
        spdl_pipeline *p = START(crowds[i], CONTINUOUS(.count = 5), REVERSE_BADLY(&s),
                                 SPDL_SINK(1));
        for (int epoch = 0; epoch < 4; ++epoch) {
            TAKE_EPOCH(p, epoch % 2 == 0 ? "4 3" : "4 3 2 1 0");
        }
        DONE(p);
    }
}

/* --- epochs --- */

static void epochs_are_alike(void) {
    for (int i = 0; i < 2 * CROWDS; ++i) {
        spdl_pipeline *p =
            START(crowds[i / 2], CONTINUOUS(.count = 5),
                  SPDL_PIPE(follow, SCRIPT(.fresh = true), .concurrency = 1 + i % 2 * 3,
                            .free_item = item_free, .buffer_size = 1),
                  FOLLOW(.plus = 10), SPDL_SINK(1));
        for (int epoch = 0; epoch < 3; ++epoch) TAKE_EPOCH(p, "10 11 12 13 14");
        TAKE(p, 2, "10 11"); /* and it goes on */
        DONE(p);
    }
}

static void epochs_may_be_empty(void) {
    for (int i = 0; i < CROWDS; ++i) {
        spdl_pipeline *p = START(crowds[i], CONTINUOUS(.count = 0), FOLLOW(.plus = 0),
                                 SPDL_BATCH(3), SPDL_SINK(2));
        for (int epoch = 0; epoch < 20; ++epoch) TAKE_EPOCH_OF_BATCHES(p, "");
        DONE(p);
        p = START(crowds[i], CONTINUOUS(.count = 7), FOLLOW(.every = 1, .result = SPDL_SKIP),
                  SPDL_SINK(1));
        for (int epoch = 0; epoch < 20; ++epoch) TAKE_EPOCH(p, "");
        DONE(p);
    }
}

static void no_batch_spans_two_epochs(void) {
    for (int i = 0; i < CROWDS; ++i) {
        spdl_pipeline *p = START(crowds[i], CONTINUOUS(.count = 8), SPDL_BATCH(3, .buffer_size = 1),
                                 SPDL_PIPE(pass_batch), SPDL_SINK(1));
        for (int epoch = 0; epoch < 3; ++epoch) TAKE_EPOCH_OF_BATCHES(p, "0 1 2|3 4 5|6 7");
        DONE(p);
        p = START(crowds[i], CONTINUOUS(.count = 8), SPDL_BATCH(3, .drop_last = true),
                  SPDL_SINK(1));
        for (int epoch = 0; epoch < 3; ++epoch) TAKE_EPOCH_OF_BATCHES(p, "0 1 2|3 4 5");
        DONE(p);
        p = START(crowds[i], CONTINUOUS(.count = 6), SPDL_BATCH(3), SPDL_SINK(1));
        for (int epoch = 0; epoch < 3; ++epoch) TAKE_EPOCH_OF_BATCHES(p, "0 1 2|3 4 5");
        DONE(p);
    }
}

/* The calls of two epochs never overlap in one stage: the count of those inside would show it. */
static void an_epoch_ends_before_the_next_begins(void) {
    for (int i = 2; i < CROWDS; ++i) {
        int gate = 0;
        script s = { .gate = &gate, .gate_at = 2 };
        spdl_pipeline *p = START(crowds[i], CONTINUOUS(.count = 3),
                                 SPDL_PIPE(follow, .ctx = &s, .concurrency = 8,
                                           .output_order = SPDL_ORDER_COMPLETION),
                                 SPDL_SINK(9));
        await(&s.calls, 3);
        sleep_us(20000);
        CHECK_EQ(__atomic_load_n(&s.calls, __ATOMIC_ACQUIRE), 3);
        __atomic_store_n(&gate, 1, __ATOMIC_RELEASE);
        await(&s.calls, 6); /* without anybody taking: it runs on into the next epoch */
        for (int epoch = 0; epoch < 3; ++epoch) {
            static long values[10];
            CHECK_EQ(take_values(p, values, 10, SPDL_END), 3);
        }
        DONE(p);
    }
}

static void flushes_belong_to_an_epoch(void) {
    for (int i = 0; i < CROWDS; ++i) {
        scale s = { .limit = 10 };
        stack kept = { .count = 0 };
        spdl_pipeline *p = START(crowds[i], CONTINUOUS(.count = 10), WEIGH(&s), SPDL_SINK(1));
        for (int epoch = 0; epoch < 3; ++epoch) TAKE_EPOCH(p, "10 11 15 9");
        DONE(p);
        p = START(crowds[i], CONTINUOUS(.count = 4), REVERSE(&kept), FOLLOW(.plus = 1),
                  SPDL_SINK(1));
        for (int epoch = 0; epoch < 3; ++epoch) TAKE_EPOCH(p, "4 3 2 1");
        spdl_pipeline_destroy(p);
        while (kept.count > 0) item_free(kept.kept[--kept.count]); /* of an epoch that was cut */
        CHECK_EQ(items_alive(), 0);
        p = START(crowds[i], CONTINUOUS(.count = 4), SCATTER(BURST(.modulo = 4)), SPDL_SINK(1));
        for (int epoch = 0; epoch < 3; ++epoch) TAKE_EPOCH(p, "100 200 201 300 301 302");
        DONE(p);
    }
}

/* Fails in the third epoch, at item 4. */
SPDL_FN(wears_out, void, item) {
    const long number = (long)spdl_sequence(task), epoch = (long)spdl_epoch(task);
    if (number == 6) return SPDL_END;
    if (epoch == 2 && number == 4) return spdl_fail(task, "the disk is worn out");
    *out = item_make(number);
    return SPDL_OK;
}

static void an_error_ends_this_epoch_and_all_others(void) {
    for (int i = 0; i < CROWDS; ++i) {
        spdl_pipeline *p = START(crowds[i], SPDL_SOURCE(wears_out, .continuous = true,
                                                        .free_item = item_free),
                                 FOLLOW(.fresh = true), SPDL_SINK(1));
        TAKE_EPOCH(p, "0 1 2 3 4 5");
        TAKE_EPOCH(p, "0 1 2 3 4 5");
        TAKE_ALL(p, "0 1 2 3", SPDL_E_STAGE);
        failed_with(p, 0, "stage 0 'wears_out', item 4, epoch 2: the disk is worn out");
        DONE(p);
    }
}

/* --- how far a row runs ahead --- */

SPDL_FN(one_of, item, item) {
    script *s = (script *)spdl_ctx(task);
    spdl_result result;
    script_enter(s);
    result = script_act(s, task, in->value);
    *out = in;
    script_leave(s);
    return result == SPDL_OK && in->value % s->count != 0 ? SPDL_SKIP : result;
}

/* A filter that keeps one of 32 works on while the first one it kept is slow, though the sink has
   room for one only: as far as there are slots for the places of what it drops. */
static void a_filter_runs_ahead_of_a_slow_call(void) {
    for (int i = 2; i < CROWDS; ++i) {
        int gate = 0;
        script s = { .gate = &gate, .gate_at = 0, .count = 32 };
        spdl_pipeline *p = START(crowds[i], COUNT_TO(500),
                                 SPDL_PIPE(one_of, .ctx = &s, .concurrency = 2), SPDL_SINK(1));
        await(&s.calls, 64);
        sleep_us(10000);
        CHECK_EQ(__atomic_load_n(&s.calls, __ATOMIC_ACQUIRE), SPDL__WINDOW);
        open_gate(&gate);
        RUN(p, "0 32 64 96 128 160 192 224 256 288 320 352 384 416 448 480", SPDL_END);
    }
}

SPDL_FN(drop_all, item, item) { return SPDL_SKIP; }

static item one_item = { ALIVE, 0 };

SPDL_FN(ones, void, item) {
    *out = &one_item;
    return (long)spdl_sequence(task) < *(const long *)spdl_ctx(task) ? SPDL_OK : SPDL_END;
}

/* The time of all processors for an item that is dropped, while the trainer sleeps: the best of
   some. */
static double dropping_ns(long items, int sink, bool passes) {
    double best = 1e18;
    for (int round = 0; round < 3; ++round) {
        const spdl_stage last = SPDL_SINK(sink), row = SPDL_PIPE(pass_on);
        const spdl_stage rows[] = {
            SPDL_SOURCE(ones, .ctx = &items, .buffer_size = 64),
            SPDL_PIPE(drop_all, .concurrency = 2, .buffer_size = passes ? sink : 0),
            passes ? row : last, last
        };
        uint64_t since;
        spdl_pipeline *p;
        item *it;
        since = test_cpu_ns();
        p = start(2, NULL, rows, passes ? 4 : 3);
        CHECK_EQ(SPDL_NEXT(p, &it, SPDL_SECONDS(30)), SPDL_END);
        const double ns = (double)(test_cpu_ns() - since);
        spdl_pipeline_destroy(p);
        if (ns < best) best = ns;
    }
    return best / (double)items;
}

/* Whatever the window is: nobody walks over the places of what was dropped but who passes them. */
static void dropping_costs_the_same_in_any_window(void) {
    const long items = TEST_SANITIZED ? 70000 : 100000;
    for (int passes = 0; passes < 2; ++passes) {
        const double small = dropping_ns(items, 8, passes);
        const double large = dropping_ns(items, 32768, passes);
        const double tick = 16e6 / (double)items; /* Windows counts whole ones */
        if (!CHECK(large < 8 * small + tick))
            printf("    %.0f and %.0f ns an item\n", small, large);
    }
}

/* --- rows of quick stages --- */

/* Where everything behind is tried: one worker does all stages, or many are in each other's way. */
static const int herds[] = { 0, 1, 3, 16 };
enum { HERDS = 4, LINKS = 4, MANY = 600 };

/* What the quick stages are told; the source is the first. */
typedef struct links {
    script link[LINKS];
    int budget[LINKS];
    int concurrency, sink;
    spdl_order order; /* of the second */
    int batch; /* behind the third, and a quick stage behind that; 0: none */
    script behind;
} links;

/* A batch goes on as it came. */
SPDL_FN(follow_batch, spdl_batch, spdl_batch) {
    script_enter((script *)spdl_ctx(task));
    *out = in;
    script_leave((script *)spdl_ctx(task));
    return SPDL_OK;
}

/* Those at odd places hand on their input, the other ones new items. */
static spdl_pipeline *start_links(links *l, int workers) {
    const spdl_stage sink = SPDL_SINK(l->sink), batch = SPDL_BATCH(l->batch);
    const spdl_stage rows[] = {
        SPDL_SOURCE(count_up, .ctx = &l->link[0], .free_item = item_free,
                    .max_failures = l->budget[0]),
        SPDL_PIPE(follow, .ctx = &l->link[1], .max_failures = l->budget[1], .name = "first",
                  .buffer_size = 1),
        SPDL_PIPE(follow, .ctx = &l->link[2], .max_failures = l->budget[2], .name = "second",
                  .free_item = item_free, .concurrency = l->concurrency,
                  .output_order = l->order),
        SPDL_PIPE(follow, .ctx = &l->link[3], .max_failures = l->budget[3], .name = "third"),
        l->batch ? batch : sink,
        SPDL_PIPE(follow_batch, .ctx = &l->behind),
        sink,
    };
    l->link[0].count = MANY;
    l->link[2].fresh = true;
    return start(workers, NULL, rows, l->batch ? 7 : 5);
}

/* Takes the values below `end` but those that a stage has dropped: 3, 10, 17, ... */
static void take_but(spdl_pipeline *p, long end, bool dropped, spdl_result result) {
    void *taken = NULL;
    for (long value = 0; value < end; ++value) {
        item *it = NULL;
        if (dropped && value % 7 == 3) continue;
        REQUIRE(SPDL_NEXT(p, &it, SPDL_SECONDS(15)) == SPDL_OK);
        CHECK_EQ(it->magic, ALIVE);
        CHECK_EQ(it->value, value);
        item_free(it);
    }
    CHECK_STR(spdl_result_text(spdl_pipeline_next(p, &taken, SPDL_SECONDS(15))),
              spdl_result_text(result));
}

/* Whether shape `i` is to be tried. Who takes items one by one from workers that share a processor
   with others waits for its turn again and again: there not all of them are, which is told. */
static bool there_is_time(uint64_t since, int i, int shapes) {
    if (i < 4 * HERDS || spdl_time_ns() - since < 4000000000u) return i < shapes;
    if (i < shapes) printf("    no time for the last %d of %d shapes\n", shapes - i, shapes);
    return false;
}

/* Drops, failures that are tolerated and the one that is not, in each of them. */
static void quick_stages_drop_and_fail_one_by_one(void) {
    static const char *const names[] = { "count_up", "first", "second", "third" };
    const uint64_t since = spdl_time_ns();
    for (int i = 0; there_is_time(since, i, HERDS * LINKS * 3 * 4); ++i) {
        const int at = i % LINKS, what = i / LINKS % 3, how = i / LINKS / 3 % 4;
        links l = { .concurrency = how % 2 ? 4 : 1, .sink = how / 2 ? 64 : i % 5 ? 8 : 1 };
        spdl_pipeline *p;
        l.link[at].every = what == 2 ? 500 : 7;
        l.link[at].rest = what == 2 ? 499 : 3;
        l.link[at].result = what == 0 ? SPDL_SKIP : SPDL_E_STAGE;
        l.budget[at] = what == 1 ? -1 : 0;
        p = start_links(&l, herds[(i + i / LINKS / 12) % HERDS]);
        if (what < 2) {
            take_but(p, MANY, at > 0, SPDL_END);
        } else {
            char text[80];
            snprintf(text, sizeof text, "stage %d '%s', item 499: value 499 is bad", at,
                     names[at]);
            take_but(p, 499, false, SPDL_E_STAGE);
            failed_with(p, at, text);
        }
        if (what < 2) CHECK_EQ(stats_of(p, at).skips + stats_of(p, at).failures, at ? 86 : 100);
        DONE(p);
    }
}

/* Takes batches of the values below `end`, but those that a stage has dropped. */
static void take_batches_but(spdl_pipeline *p, int size, long end, bool dropped,
                             spdl_result result) {
    void *taken = NULL;
    long value = 0;
    while (value < end) {
        spdl_batch *batch = NULL;
        REQUIRE(SPDL_NEXT(p, &batch, SPDL_SECONDS(15)) == SPDL_OK);
        CHECK(batch->count > 0);
        for (size_t i = 0; i < batch->count; ++i, ++value) {
            if (dropped && value % 7 == 3) ++value;
            CHECK_EQ(((item *)batch->items[i])->value, value);
        }
        if (dropped && value % 7 == 3) ++value;
        CHECK(batch->count == (size_t)size || value == end);
        spdl_batch_free(batch);
    }
    CHECK_EQ(value, end);
    CHECK_STR(spdl_result_text(spdl_pipeline_next(p, &taken, SPDL_SECONDS(15))),
              spdl_result_text(result));
}

/* With room for many batches behind them, and for one. */
static void quick_stages_fill_batches(void) {
    static const int sizes[] = { 1, 7, 64, 1000 };
    const uint64_t since = spdl_time_ns();
    for (int i = 0; there_is_time(since, i, HERDS * LINKS * 3 * 4); ++i) {
        const int at = i % LINKS, what = i / LINKS % 3, how = i / LINKS / 3 % 4;
        links l = { .concurrency = how % 2 ? 4 : 1, .sink = how / 2 ? 16 : 1,
                    .batch = sizes[i % 5 % 4] };
        spdl_pipeline *p;
        l.link[at].every = what == 2 ? 500 : 7;
        l.link[at].rest = what == 2 ? 499 : 3;
        l.link[at].result = what == 0 ? SPDL_SKIP : SPDL_E_STAGE;
        l.budget[at] = what == 1 ? -1 : 0;
        p = start_links(&l, herds[(i + i / LINKS / 12) % HERDS]);
        take_batches_but(p, l.batch, what < 2 ? MANY : 499 - 499 % l.batch, what < 2 && at > 0,
                         what < 2 ? SPDL_END : SPDL_E_STAGE);
        if (what < 2) CHECK_EQ(stats_of(p, at).skips + stats_of(p, at).failures, at ? 86 : 100);
        CHECK_EQ(stats_of(p, 4).tasks, l.behind.calls);
        DONE(p);
    }
}

/* In a stage whose items may overtake others, too: each comes out once. */
static void quick_stages_may_overtake(void) {
    static long values[MANY];
    const uint64_t since = spdl_time_ns();
    uint64_t state = test_seed();
    chaos_on();
    for (int i = 0; there_is_time(since, i, HERDS * LINKS * 3 * 2); ++i) {
        const int at = i % LINKS, what = i / LINKS % 3;
        links l = { .concurrency = 4, .sink = i / LINKS / 3 % 2 ? 64 : 2,
                    .order = SPDL_ORDER_COMPLETION };
        spdl_pipeline *p;
        size_t count;
        l.link[at].every = 7;
        l.link[at].rest = 3;
        l.link[at].result = what == 0 ? SPDL_SKIP : what == 1 ? SPDL_E_STAGE : SPDL_OK;
        if (what == 1) l.budget[at] = -1;
        if (what == 2) l.link[at].stop_at = 1 + (long)(test_random(&state) % (MANY - 100));
        p = start_links(&l, herds[(i + i / LINKS / 6) % HERDS]);
        count = take_values(p, values, MANY + 1, what == 2 ? SPDL_CLOSED : SPDL_END);
        qsort(values, count, sizeof values[0], by_value_of);
        for (size_t k = 1; k < count; ++k) CHECK(values[k - 1] < values[k]);
        if (what < 2) CHECK_EQ(count, at ? MANY - 86 : MANY);
        if (what < 2) CHECK_EQ(stats_of(p, at).skips + stats_of(p, at).failures, at ? 86 : 100);
        DONE(p);
    }
}

/* From inside of each, and from outside, at any moment. */
static void quick_stages_can_be_stopped(void) {
    const uint64_t since = spdl_time_ns();
    uint64_t state = test_seed();
    chaos_on();
    for (int i = 0; there_is_time(since, i, HERDS * (LINKS + 1) * 8); ++i) {
        const int at = i % (LINKS + 1);
        const long when = 1 + (long)(test_random(&state) % (MANY - 100)); /* not at the end */
        links l = { .concurrency = 1 + i / 5 % 2 * 3, .sink = i / 10 % 2 ? 64 : i % 7 ? 8 : 1 };
        spdl_pipeline *p;
        if (at < LINKS) l.link[at].stop_at = when;
        p = start_links(&l, herds[(i + i / 40) % HERDS]);
        if (at < LINKS) {
            CHECK(take_from(p, 0, MANY + 1, SPDL_CLOSED) <= when + 1);
        } else {
            spdl_result result;
            CHECK_EQ(take_from(p, 0, when, SPDL_OK), when);
            result = spdl_pipeline_stop(p, 0);
            CHECK(result == SPDL_OK || result == SPDL_TIMEOUT);
            CHECK(take_from(p, when, MANY + 1, SPDL_CLOSED) <= MANY - when);
        }
        DONE(p);
    }
}

/* A source that waits, as one does that reads a socket, until what it made before has come through:
   another worker has to be told of it. */
SPDL_FN(waits_now_and_then, void, item) {
    script *s = (script *)spdl_ctx(task);
    const long value = (long)spdl_sequence(task);
    if (value >= s->count) return SPDL_END;
    if (value % s->every == 1 && value > s->every) await(&s->calls, (int)(value / s->every));
    *out = item_make(value);
    return SPDL_OK;
}

SPDL_FN(keeps_few, item, item) {
    *out = in;
    return in->value % ((const script *)spdl_ctx(task))->every == 0 && in->value ? SPDL_OK
                                                                                : SPDL_SKIP;
}

SPDL_FN(tells_of_it, item, item) {
    sleep_us(200);
    *out = in;
    __atomic_add_fetch(&((script *)spdl_ctx(task))->calls, 1, __ATOMIC_RELEASE);
    return SPDL_OK;
}

static void a_source_may_wait_for_what_it_made(void) {
    for (int i = 2; i < HERDS; ++i) {
        script s = { .count = 200000, .every = 499 };
        spdl_pipeline *p = START(herds[i], SPDL_SOURCE(waits_now_and_then, .ctx = &s,
                                                       .free_item = item_free),
                                 SPDL_PIPE(keeps_few, .ctx = &s),
                                 SPDL_PIPE(tells_of_it, .ctx = &s), SPDL_SINK(64));
        CHECK_EQ(take_from_any(p), 400);
        DONE(p);
    }
}

/* --- calls that wait for others --- */

/* The first items are dropped; then as many calls meet as there may be. */
typedef struct barrier {
    int drops, peers, inside;
} barrier;

SPDL_FN(drop_then_meet, item, item) {
    barrier *b = (barrier *)spdl_ctx(task);
    const int value = (int)in->value % (b->drops + b->peers);
    *out = in;
    if (value < b->drops) return SPDL_SKIP;
    (void)__atomic_add_fetch(&b->inside, 1, __ATOMIC_ACQ_REL);
    await(&b->inside, ((int)in->value / (b->drops + b->peers) + 1) * b->peers);
    return SPDL_OK;
}

/* Up to `concurrency` calls may wait for each other, also behind dropped items that a trainer who
   sleeps, or a row after it, has not passed yet. */
static void calls_may_meet_behind_dropped_items(void) {
    static const int drops[] = { 2, 30, 62, 63, 64, 65, 200 }, peers[] = { 4, 40 };
    for (int i = 0; i < 7 * 2 * 2; ++i) {
        barrier b = { .drops = drops[i % 7], .peers = peers[i / 7 % 2] };
        const spdl_stage sink = SPDL_SINK(1), row = SPDL_PIPE(pass_on);
        const spdl_stage rows[] = {
            SPDL_SOURCE(count_up, SCRIPT(.count = 3 * (b.drops + b.peers)), .free_item = item_free),
            SPDL_PIPE(drop_then_meet, .ctx = &b, .concurrency = b.peers),
            i / 14 ? row : sink, sink
        };
        spdl_pipeline *p = start(b.peers + 1, NULL, rows, i / 14 ? 4 : 3);
        CHECK_EQ(take_from_any(p), 3 * b.peers);
        DONE(p);
    }
}

/* Items that come one by one; `inside` is how many. */
SPDL_FN(comes_now_and_then, void, item) {
    script *s = (script *)spdl_ctx(task);
    const long value = (long)spdl_sequence(task);
    if (value >= s->count) return SPDL_END;
    sleep_us(200);
    __atomic_add_fetch(&s->inside, 1, __ATOMIC_RELEASE);
    *out = item_make(value);
    return SPDL_OK;
}

/* Quick, but for the call for item 200, which takes 100 ms, and one a little later, in which the
   source must be able to go on. */
SPDL_FN(is_slow_twice, item, item) {
    script *s = (script *)spdl_ctx(task);
    if (in->value == 200) sleep_us(100000);
    if (in->value == 280)
        await(&s->inside, __atomic_load_n(&s->inside, __ATOMIC_ACQUIRE) + 2);
    *out = in;
    return SPDL_OK;
}

static void a_quick_stage_may_wait_for_its_source(void) {
    for (int w = 2; w <= 8; w += 3) {
        script s = { .count = 300 };
        spdl_pipeline *p =
            START(w, SPDL_SOURCE(comes_now_and_then, .ctx = &s, .free_item = item_free,
                                 .buffer_size = 16),
                  SPDL_PIPE(is_slow_twice, .ctx = &s), SPDL_SINK(4));
        CHECK_EQ(take_from(p, 0, 1000, SPDL_END), 300);
        DONE(p);
    }
}

/* Calls that are completed before they return; for items 100 to 149 the source does that, when it
   is called next. */
typedef struct handed_over {
    script items;
    spdl_deferred call;
    int there, calls;
} handed_over;

SPDL_FN(completes_and_comes, void, item) {
    handed_over *h = (handed_over *)spdl_ctx(task);
    if (__atomic_load_n(&h->there, __ATOMIC_ACQUIRE)) {
        const spdl_deferred call = h->call;
        __atomic_store_n(&h->there, 0, __ATOMIC_RELEASE);
        CHECK_EQ(spdl_complete(call, SPDL_SKIP, NULL), SPDL_OK);
    }
    if (spdl_sequence(task) > 100 && spdl_sequence(task) <= 150) /* else no room may be left */
        await(&h->calls, (int)spdl_sequence(task));
    return comes_now_and_then(task, in, out); /* the script is its first member */
}

SPDL_FN(hands_over, item, item) {
    handed_over *h = (handed_over *)spdl_ctx(task);
    const spdl_deferred call = spdl_defer(task);
    (void)out;
    __atomic_add_fetch(&h->calls, 1, __ATOMIC_RELEASE);
    if (in->value < 100 || in->value >= 150) {
        CHECK_EQ(spdl_complete(call, SPDL_SKIP, NULL), SPDL_OK);
    } else {
        h->call = call;
        __atomic_store_n(&h->there, 1, __ATOMIC_RELEASE);
    }
    return SPDL_PENDING;
}

/* The only call of the stage is under way when the source is called, which ends it. */
static void a_source_may_complete_calls_behind_it(void) {
    handed_over h = { .items.count = 200 };
    spdl_pipeline *p =
        START(4, SPDL_SOURCE(completes_and_comes, .ctx = &h, .free_item = item_free),
              SPDL_PIPE(hands_over, .ctx = &h, .deferred = true), SPDL_SINK(4));
    CHECK_EQ(take_from(p, 0, 1000, SPDL_END), 0);
    CHECK_EQ(stats_of(p, 1).skips, 200);
    DONE(p);
}

/* A worker that gets no processor in the middle of something keeps what is ready from nobody: the
   trainer takes all of it, and every call of next returns. */
static void a_frozen_worker_does_not_stop_the_trainer(void) {
    static const char *const points[] = { "pipeline takes", "pipeline put",
                                          "pool about to sleep" };
    for (int i = 0; i < 3 * 3; ++i) {
        script s = { .count = -1 };
        spdl_pipeline *p =
            START(1 + i % 3, SPDL_SOURCE(count_up, .ctx = &s, .free_item = item_free),
                  SPDL_PIPE(follow, SCRIPT(.plus = 0)), SPDL_SINK(16));
        spdl_stats stats;
        long taken = take_from(p, 0, 500, SPDL_OK);
        int empty = 0;
        freeze(points[i / 3]);
        while (empty < 20) {
            item *it = NULL;
            const spdl_result result = SPDL_NEXT(p, &it, 0);
            if (result == SPDL_OK) {
                CHECK_EQ(it->value, taken++);
                item_free(it);
                continue;
            }
            REQUIRE(CHECK_EQ(result, SPDL_TIMEOUT));
            if (__atomic_load_n(&frozen, __ATOMIC_ACQUIRE) > 0) ++empty;
            sleep_us(200);
        }
        spdl_pipeline_stats(p, &stats);
        CHECK_EQ(stats.delivered, taken);
        thaw();
        CHECK_EQ(take_from(p, taken, 100, SPDL_OK), 100);
        DONE(p);
    }
}

SPDL_FN(by_hash, item, item) {
    *out = in;
    return spdl_route(task, (int)((uint32_t)in->value * 2654435761u >> 9) & 1);
}

/* A merge hands on in the order in which its branch has routed, whoever looks, and when. */
static void quick_paths_are_merged_in_order(void) {
    static long first[1000], values[1000];
    size_t count = 0;
    const uint64_t since = spdl_time_ns();
    chaos_on();
    for (int i = 0; there_is_time(since, i, HERDS * 12); ++i) {
        spdl_pipeline *p =
            START(herds[i % HERDS], COUNT_TO(900), SPDL_BRANCH(by_hash), SPDL_PATH("few"),
                  SPDL_PIPE(follow, SCRIPT(.plus = 0)),
                  SPDL_PIPE(follow, SCRIPT(.every = 2, .result = SPDL_SKIP)),
                  SPDL_PIPE(follow, SCRIPT(.every = 3, .result = SPDL_SKIP)),
                  SPDL_PATH("all", .buffer_size = 900),
                  SPDL_PIPE(follow, SCRIPT(.plus = 0)), SPDL_MERGE(), SPDL_SINK(2));
        const size_t got = take_values(p, i ? values : first, 1000, SPDL_END);
        if (i == 0) count = got;
        CHECK_EQ(got, count);
        for (size_t k = 1; i == 0 && k < got; ++k) CHECK(first[k - 1] < first[k]);
        CHECK(i == 0 || memcmp(first, values, count * sizeof first[0]) == 0);
        DONE(p);
    }
}

static uint32_t hash_of(const item *it) {
    uint32_t x = (uint32_t)it->value * 2654435761u;
    x = (x ^ x >> 15) * 2246822519u;
    return x ^ x >> 13;
}

SPDL_FN(by_half, item, item) {
    *out = in;
    return spdl_route(task, (int)(hash_of(in) & 1));
}

SPDL_FN(by_half_again, item, item) {
    *out = in;
    return spdl_route(task, (int)(hash_of(in) >> 20 & 1));
}

/* Keeps one in s->every, and with `plus` lets others run. */
SPDL_FN(thin, item, item) {
    const script *s = (const script *)spdl_ctx(task);
    *out = in;
    if (s->plus) test_yield();
    return hash_of(in) >> 4 & (uint32_t)(s->every - 1) ? SPDL_SKIP : SPDL_OK;
}

/* The same where calls that end in any order leave holes in front of a row without room (a stage, a
   merge) or of the merge itself: they are passed over all the same, and who is about to take the
   last room is at work. */
static spdl_pipeline *start_holes(int workers, int what) {
    static script upto = { .count = 400 }, all;
    static script fourth = { .every = 4, .plus = 1 }, eighth = { .every = 8 };
    static script few = { .every = 16 };
    const spdl_stage from = SPDL_SOURCE(count_up, .ctx = &upto, .free_item = item_free);
    const spdl_stage thinned = SPDL_PIPE(thin, .ctx = &fourth, .concurrency = 4, .buffer_size = 1);
    const spdl_stage merged = SPDL_MERGE(), more = SPDL_PATH("more", .buffer_size = 1200);
    switch (what) {
    case 0:
        return START(workers, from, SPDL_BRANCH(by_half), SPDL_PATH("few"),
                     SPDL_PIPE(thin, .ctx = &eighth), SPDL_PIPE(follow, .ctx = &all), more, thinned,
                     SPDL_PIPE(follow, .ctx = &all, .buffer_size = 1), merged, SPDL_SINK(4));
    case 1:
        return START(workers, from, SPDL_BRANCH(by_half), SPDL_PATH("few"),
                     SPDL_PIPE(thin, .ctx = &few), more, thinned, merged, SPDL_SINK(4));
    default:
        return START(workers, from, SPDL_BRANCH(by_half), SPDL_PATH("few"),
                     SPDL_PIPE(thin, .ctx = &few), more, SPDL_BRANCH(by_half_again),
                     SPDL_PATH("one"), thinned, SPDL_PATH("other", .buffer_size = 400), merged,
                     merged, SPDL_SINK(1));
    }
}

static void paths_with_holes_are_merged_in_order(void) {
    static long first[3][1000], values[1000];
    size_t count[3] = { 0 };
    const uint64_t since = spdl_time_ns();
    chaos_on();
    for (int i = 0; there_is_time(since, i, 3 * HERDS * 32); ++i) {
        const int what = i % 3;
        spdl_pipeline *p = start_holes(herds[i / 3 % HERDS], what);
        const size_t got = take_values(p, i < 3 ? first[what] : values, 1000, SPDL_END);
        if (i < 3) count[what] = got;
        REQUIRE(CHECK_EQ(got, count[what]));
        for (size_t k = 1; i < 3 && k < got; ++k) CHECK(first[what][k - 1] < first[what][k]);
        REQUIRE(CHECK(i < 3 || memcmp(first[what], values, got * sizeof values[0]) == 0));
        DONE(p);
    }
}

/* Snapshots while it runs add up, and never go backwards. */
typedef struct watcher {
    spdl_pipeline *p;
    int over;
} watcher;

static void *watch_stats(void *arg) {
    static spdl_stats before, now;
    const watcher *w = (const watcher *)arg;
    memset(&before, 0, sizeof before);
    while (__atomic_load_n(&w->over, __ATOMIC_ACQUIRE) == 0) {
        spdl_pipeline_stats(w->p, &now);
        for (int i = 0; i < now.stage_count; ++i) {
            CHECK(now.stage[i].in_flight <= now.stage[i].concurrency);
            CHECK(now.stage[i].tasks >= before.stage[i].tasks);
            CHECK(now.stage[i].skips >= before.stage[i].skips);
            CHECK(now.stage[i].busy_ns >= before.stage[i].busy_ns);
            CHECK(now.edge[i].items >= before.edge[i].items);
            CHECK(now.edge[i].get_wait_ns >= before.edge[i].get_wait_ns);
            CHECK(now.edge[i].get_wait_ns <= now.edge[i].elapsed_ns);
            CHECK(now.edge[i].empty_ns <= now.edge[i].elapsed_ns);
        }
        before = now;
    }
    return NULL;
}

static void quick_stages_are_counted_one_by_one(void) {
    for (int i = 0; i < HERDS * 4; ++i) {
        static spdl_stats s;
        links l = { .concurrency = 1 + i % 2 * 3, .sink = i / 2 % 2 ? 64 : 8 };
        spdl_pipeline *p = start_links(&l, herds[i / 4]);
        watcher w = { .p = p };
        const test_thread thread = thread_of(watch_stats, &w);
        take_but(p, MANY, false, SPDL_END);
        __atomic_store_n(&w.over, 1, __ATOMIC_RELEASE);
        test_join(thread);
        spdl_pipeline_stats(p, &s);
        for (int k = 0; k < LINKS; ++k) {
            CHECK_EQ(s.stage[k].tasks, MANY);
            CHECK_EQ(s.edge[k].items, MANY);
            CHECK_EQ(s.stage[k].freed, 0);
            CHECK(s.stage[k].max_ns <= s.elapsed_ns);
        }
        DONE(p);
    }
}

/* --- which of the source's items are in what is delivered --- */

SPDL_FN(hands_a_batch_on, spdl_batch, spdl_batch) {
    *out = in;
    return SPDL_OK;
}

/* Every slot carries the lowest and the highest of the source's items in it, over all epochs; from
   the first batch row on which item comes next. */
static void deliveries_know_their_sources(void) {
    for (int c = 0; c < CROWDS; ++c) {
        script s = { .count = 23 };
        spdl_pipeline *p = START(
            crowds[c], SPDL_SOURCE(count_up, .ctx = &s, .free_item = item_free),
            SPDL_PIPE(follow, SCRIPT(.plus = 0), .concurrency = 3), SPDL_BATCH(5),
            SPDL_PIPE(hands_a_batch_on, .concurrency = 2), SPDL_SINK(3));
        for (long i = 0; i < 5; ++i) {
            spdl_batch *batch = NULL;
            REQUIRE(SPDL_NEXT(p, &batch, SPDL_SECONDS(15)) == SPDL_OK);
            CHECK_EQ((long)(p->last_item.range >> SPDL__SPAN_BITS), i < 4 ? 5 * i + 5 : 23);
            CHECK_EQ((long)(p->last_item.range & SPDL__SPAN_MAX), 0);
            spdl_batch_free(batch);
        }
        DONE(p);
    }
}

/* --- a lock --- */

typedef struct bolt {
    uint32_t word;
    spdl__os_event parked;
    bool got;
} bolt;

static void *bolt_tries(void *arg) {
    bolt *b = (bolt *)arg;
    b->got = spdl__try_lock(&b->word);
    return NULL;
}

static void *bolt_waits(void *arg) {
    bolt *b = (bolt *)arg;
    spdl__lock(&b->word, &b->parked);
    spdl__unlock(&b->word, &b->parked);
    return NULL;
}

/* One who tries, and comes late, leaves the 2 by which one who sleeps is known. */
static void a_try_hides_nobody_who_sleeps(void) {
    static bolt b;
    test_thread tries, waits;
    REQUIRE(spdl__os_event_init(&b.parked));
    freeze("lock tried");
    REQUIRE(test_thread_start(&tries, bolt_tries, &b));
    await(&frozen, 1); /* it has seen an open lock */
    spdl__lock(&b.word, &b.parked);
    REQUIRE(test_thread_start(&waits, bolt_waits, &b));
    while (spdl__load32(&b.word) != 2) sleep_us(100);
    thaw();
    test_join(tries);
    CHECK(!b.got);
    REQUIRE(CHECK_EQ(spdl__load32(&b.word), 2));
    spdl__unlock(&b.word, &b.parked);
    test_join(waits);
    CHECK_EQ(spdl__load32(&b.word), 0);
    spdl__os_event_fini(&b.parked);
}

TEST_TABLE(flow) {
    TEST_CASE(routing_is_for_branches),
    TEST_CASE(an_answer_that_is_ignored_fails_the_call),
    TEST_CASE(no_budget_is_for_a_wrong_row),
    TEST_CASE(a_source_may_end_with_a_buffer),
    TEST_CASE(a_task_is_of_its_call_only),
    TEST_CASE(misuse_beside_the_calls_breaks_nothing),
    TEST_CASE(a_task_is_of_one_thread),
    TEST_CASE(many_of_one_fill_batches),
    TEST_CASE(one_input_may_become_very_many),
    TEST_CASE(many_of_one_are_freed_at_a_stop),
    TEST_CASE(a_stage_may_gather_by_its_own_rule),
    TEST_CASE(a_flush_may_fail),
    TEST_CASE(nothing_is_flushed_behind_a_failure),
    TEST_CASE(a_flush_may_hand_on_many),
    TEST_CASE(what_is_gathered_ends_with_its_run),
    TEST_CASE(the_rest_of_a_failed_series_is_freed),
    TEST_CASE(epochs_are_alike),
    TEST_CASE(epochs_may_be_empty),
    TEST_CASE(no_batch_spans_two_epochs),
    TEST_CASE(an_epoch_ends_before_the_next_begins),
    TEST_CASE(flushes_belong_to_an_epoch),
    TEST_CASE(an_error_ends_this_epoch_and_all_others),
    TEST_CASE(a_filter_runs_ahead_of_a_slow_call),
    TEST_CASE(dropping_costs_the_same_in_any_window),
    TEST_CASE(quick_stages_drop_and_fail_one_by_one),
    TEST_CASE(quick_stages_fill_batches),
    TEST_CASE(quick_stages_may_overtake),
    TEST_CASE(quick_stages_can_be_stopped),
    TEST_CASE(a_source_may_wait_for_what_it_made),
    TEST_CASE(calls_may_meet_behind_dropped_items),
    TEST_CASE(a_quick_stage_may_wait_for_its_source),
    TEST_CASE(a_source_may_complete_calls_behind_it),
    TEST_CASE(a_frozen_worker_does_not_stop_the_trainer),
    TEST_CASE(quick_paths_are_merged_in_order),
    TEST_CASE(paths_with_holes_are_merged_in_order),
    TEST_CASE(quick_stages_are_counted_one_by_one),
    TEST_CASE(deliveries_know_their_sources),
    TEST_CASE(a_try_hides_nobody_who_sleeps),
    TEST_END,
};
