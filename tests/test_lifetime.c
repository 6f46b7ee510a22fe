/* Pipelines from create to destroy: stops, timeouts, init and fini, shared pools, exit and fork,
   threads and memory that cannot be had. */
#include "items.h"

static void open_gate(int *gate) { __atomic_store_n(gate, 1, __ATOMIC_RELEASE); }

/* --- taking --- */

static void timeouts_lose_nothing(void) {
    for (int w = 0; w < 3; ++w) {
        spdl_pipeline *p = START(w, SOURCE(.count = 5, .sleep_us = 60000), SPDL_SINK(3));
        spdl_result result = SPDL_OK;
        notes n = { .length = 0 };
        int timeouts = 0;
        while (result != SPDL_END) {
            void *taken;
            result = spdl_pipeline_next(p, &taken, SPDL_SECONDS(0.025));
            if (result == SPDL_OK) note_item(&n, taken);
            timeouts += result == SPDL_TIMEOUT;
            if (!CHECK(result >= 0)) break;
        }
        CHECK_STR(n.text, "01234");
        CHECK(timeouts > 0 || w == 0); /* without workers a call of the source is waited for */
        DONE(p);
    }
}

static void next_can_be_polled(void) {
    for (int w = 0; w <= 4; w += 4) {
        spdl_pipeline *p = START(w, COUNT_TO(1000),
                                 SPDL_PIPE(follow, SCRIPT(.fresh = true), .concurrency = 2,
                                           .free_item = item_free),
                                 SPDL_SINK(3));
        spdl_result result = SPDL_OK;
        long count = 0;
        while (result == SPDL_OK || result == SPDL_TIMEOUT) {
            item *it = NULL;
            result = SPDL_NEXT(p, &it, 0);
            if (result == SPDL_TIMEOUT) test_yield();
            if (result != SPDL_OK) continue;
            CHECK_EQ(it->value, count++);
            item_free(it);
        }
        CHECK_EQ(result, SPDL_END);
        CHECK_EQ(count, 1000);
        DONE(p);
    }
}

static void a_loop_goes_on_where_the_last_one_stopped(void) {
    for (int w = 0; w < 3; ++w) {
        spdl_pipeline *p = START(w, COUNT_TO(10), SPDL_SINK(3));
        TAKE(p, 3, "0 1 2");
        TAKE(p, 4, "3 4 5 6");
        RUN(p, "7 8 9", SPDL_END);
    }
}

static void an_endless_source_can_be_left_at_any_time(void) {
    const int rounds = TEST_SANITIZED ? 40 : 300;
    uint64_t state = test_seed();
    chaos_on();
    for (int i = 0; i < rounds; ++i) {
        spdl_pipeline *p = START(i % 5, COUNT_TO(-1),
                                 SPDL_PIPE(follow, SCRIPT(.fresh = true), .concurrency = 4,
                                           .free_item = item_free),
                                 SPDL_SINK(3));
        const long first = (long)(test_random(&state) % 20);
        const long second = (long)(test_random(&state) % 20);
        CHECK_EQ(take_from(p, 0, first, SPDL_OK), first);
        CHECK_EQ(take_from(p, first, second, SPDL_OK), second);
        DONE(p);
    }
}

static void a_pipeline_can_be_destroyed_at_any_item(void) {
    for (int w = 0; w < 4; ++w) {
        for (long k = 0; k <= 20; ++k) {
            spdl_pipeline *p = START(w, COUNT_TO(20),
                                     SPDL_PIPE(follow, SCRIPT(.fresh = true), .concurrency = 3,
                                               .free_item = item_free),
                                     SPDL_SINK(3));
            CHECK_EQ(take_from(p, 0, k, SPDL_OK), k);
            DONE(p);
        }
        DONE(START(w, COUNT_TO(20), SPDL_BATCH(7), SPDL_BATCH(2), SPDL_SINK(1)));
    }
    spdl_pipeline_destroy(NULL);
}

/* --- two trainers --- */

typedef struct trainer {
    spdl_pipeline *p;
    spdl_result result;
    int taken, refused;
} trainer;

static void *train(void *arg) {
    trainer *t = (trainer *)arg;
    do {
        void *taken;
        t->result = spdl_pipeline_next(t->p, &taken, SPDL_SECONDS(15));
        __atomic_add_fetch(&t->taken, t->result == SPDL_OK, __ATOMIC_RELEASE);
        t->refused += t->result == SPDL_E_INVALID;
        if (t->result == SPDL_OK) item_free(taken);
        else test_yield();
    } while (t->result == SPDL_OK || t->result == SPDL_E_INVALID);
    return NULL;
}

static void a_second_trainer_is_refused(void) {
    for (int w = 0; w < 3; ++w) {
        int gate = 0;
        script source = { .count = 1, .gate = &gate };
        trainer t = { .p = START(w, SPDL_SOURCE(count_up, .ctx = &source, .free_item = item_free),
                                 SPDL_SINK(3)) };
        const test_thread thread = thread_of(train, &t);
        void *untouched = &t;
        await(&source.calls, 1);
        await(consumer_inside(t.p), 1);
        CHECK_EQ(spdl_pipeline_next(t.p, &untouched, SPDL_FOREVER), SPDL_E_INVALID);
        CHECK_EQ(spdl_pipeline_next(t.p, &untouched, 0), SPDL_E_INVALID);
        CHECK(untouched == &t);
        open_gate(&gate);
        test_join(thread);
        CHECK(t.taken == 1 && t.result == SPDL_END);
        DONE(t.p);
    }
}

static void two_trainers_break_nothing(void) {
    chaos_on();
    for (int w = 0; w < 3; ++w) {
        const int items = TEST_SANITIZED ? 500 : 5000;
        trainer one = { .p = START(w, COUNT_TO(items), SPDL_SINK(3)) }, two = one;
        const test_thread first = thread_of(train, &one), second = thread_of(train, &two);
        test_join(first);
        test_join(second);
        CHECK_EQ(one.taken + two.taken, items);
        CHECK(one.result == SPDL_END && two.result == SPDL_END);
        DONE(one.p);
    }
}

static void next_checks_its_arguments(void) {
    spdl_pipeline *p = START(1, COUNT_TO(1), SPDL_SINK(3));
    void *taken;
    CHECK_EQ(spdl_pipeline_next(NULL, &taken, 0), SPDL_E_INVALID);
    CHECK_EQ(spdl_pipeline_next(p, NULL, 0), SPDL_E_INVALID);
    CHECK_EQ(spdl_pipeline_stop(NULL, 0), SPDL_E_INVALID);
    RUN(p, "0", SPDL_END);
}

/* --- stop --- */

/* What is in the sink is still handed out, in order, and then the end by a stop is told. */
static void the_trainer_can_stop(void) {
    for (int w = 0; w < 4; ++w) {
        spdl_pipeline *p = START(w, COUNT_TO(-1),
                                 SPDL_PIPE(follow, SCRIPT(.fresh = true), .concurrency = 2,
                                           .free_item = item_free),
                                 SPDL_SINK(3));
        CHECK_EQ(take_from(p, 0, 10, SPDL_OK), 10);
        CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(spdl_pipeline_stop(p, 0), SPDL_OK);
        CHECK(items_alive() <= 3 + 2);
        CHECK(take_from(p, 10, 1000, SPDL_CLOSED) <= 3 + 2);
        CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        TAKE_ALL(p, "", SPDL_CLOSED);
        CHECK(!spdl_pipeline_failed(p));
        DONE(p);
    }
}

static void stop_comes_before_the_first_item(void) {
    for (int w = 0; w < 4; ++w) {
        int gate = 0;
        script source = { .count = -1, .gate = &gate };
        spdl_pipeline *p = START(w, SPDL_SOURCE(count_up, .ctx = &source, .free_item = item_free),
                                 SPDL_SINK(1));
        if (w > 0) {
            await(&source.inside, 1);
            CHECK_EQ(spdl_pipeline_stop(p, 0), SPDL_TIMEOUT);
        }
        open_gate(&gate);
        CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(source.inside, 0);
        RUN(p, w ? "0" : "", SPDL_CLOSED);
        CHECK_EQ(source.calls, w > 0);
    }
}

static void stop_after_the_end_changes_nothing(void) {
    for (int w = 0; w < 3; ++w) {
        spdl_pipeline *p = START(w, COUNT_TO(3), SPDL_SINK(3));
        TAKE_ALL(p, "0 1 2", SPDL_END);
        CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        RUN(p, "", SPDL_END);
        p = START(w, SOURCE(.count = 2, .last = SPDL_E_IO), SPDL_SINK(3));
        TAKE_ALL(p, "0 1", SPDL_E_IO);
        CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        CHECK(spdl_pipeline_failed(p));
        RUN(p, "", SPDL_E_IO);
    }
}

/* The stop times out while a call is held up, and goes on; the trainer is let go at once. */
static void another_thread_can_stop(void) {
    for (int w = 1; w < 4; ++w) {
        int gate = 0;
        script slow = { .gate = &gate, .gate_at = 2, .fresh = true };
        trainer t = { .p = START(w, COUNT_TO(-1),
                                 SPDL_PIPE(follow, .ctx = &slow, .free_item = item_free),
                                 SPDL_SINK(1)) };
        const test_thread thread = thread_of(train, &t);
        await(&slow.calls, 3);
        await(&t.taken, 2);
        CHECK_EQ(spdl_pipeline_stop(t.p, 0), SPDL_TIMEOUT);
        CHECK_EQ(spdl_pipeline_stop(t.p, SPDL_SECONDS(0.02)), SPDL_TIMEOUT);
        test_join(thread);
        CHECK_EQ(t.result, SPDL_CLOSED);
        open_gate(&gate);
        CHECK_EQ(spdl_pipeline_stop(t.p, SPDL_SECONDS(15)), SPDL_OK);
        CHECK_EQ(slow.inside, 0);
        DONE(t.p);
    }
}

/* What nobody can take any more is freed by the stop, not only by destroy. */
static void stop_frees_what_is_not_in_the_sink(void) {
    for (int w = 2; w < 4; ++w) {
        int gate = 0;
        script source = { .count = -1 };
        spdl_pipeline *p = START(w, SPDL_SOURCE(count_up, .ctx = &source, .free_item = item_free,
                                                .buffer_size = 8),
                                 SPDL_PIPE(follow, SCRIPT(.gate = &gate)),
                                 SPDL_PIPE(follow, SCRIPT(.plus = 0)), SPDL_SINK(3));
        await(&source.calls, 9);
        CHECK_EQ(spdl_pipeline_stop(p, 0), SPDL_TIMEOUT);
        open_gate(&gate);
        CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(items_alive(), 0);
        CHECK_EQ(stats_of(p, 0).freed + stats_of(p, 1).freed, stats_of(p, 0).tasks);
        RUN(p, "", SPDL_CLOSED);
    }
}

/* With SPDL_INLINE the stages run on the trainer's thread, and another one stops them. */
static void another_thread_can_stop_the_trainers_work(void) {
    for (int i = 0; i < 20; ++i) {
        trainer t = { .p = START(0, COUNT_TO(-1),
                                 SPDL_PIPE(follow, SCRIPT(.every = i % 2, .result = SPDL_SKIP)),
                                 SPDL_SINK(3)) };
        const test_thread thread = thread_of(train, &t);
        sleep_us(i * 50);
        CHECK_EQ(spdl_pipeline_stop(t.p, SPDL_SECONDS(15)), SPDL_OK);
        test_join(thread);
        CHECK_EQ(t.result, SPDL_CLOSED);
        DONE(t.p);
    }
}

static spdl_pipeline *stopped_inside;

SPDL_FN(stops_itself, item, item) {
    *out = in;
    if (in->value < 5) return SPDL_OK;
    CHECK_EQ(spdl_pipeline_stop(stopped_inside, SPDL_FOREVER), SPDL_OK);
    CHECK(spdl_stopping(task));
    return SPDL_OK;
}

static void a_stage_can_stop(void) {
    for (int w = 0; w < 4; ++w) {
        script after = { .fresh = false };
        spdl_pipeline *p = START(w, COUNT_TO(-1), SPDL_PIPE(follow, SCRIPT(.stop_at = 5)),
                                 SPDL_PIPE(follow, .ctx = &after), SPDL_SINK(1));
        CHECK(take_from(p, 0, 1000, SPDL_CLOSED) <= 5);
        CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        CHECK(after.calls <= 5);
        DONE(p);
    }
}

static void stop_inside_a_stage_does_not_wait(void) {
    int gate = 0;
    script source = { .count = -1, .gate = &gate };
    stopped_inside = START(0, COUNT_TO(-1), SPDL_PIPE(stops_itself), SPDL_SINK(3));
    TAKE(stopped_inside, 1, "0");
    CHECK_EQ(take_from(stopped_inside, 1, 1000, SPDL_CLOSED), 5);
    DONE(stopped_inside);
    stopped_inside = START(3, SPDL_SOURCE(count_up, .ctx = &source, .free_item = item_free),
                           SPDL_PIPE(stops_itself), SPDL_SINK(3));
    open_gate(&gate);
    CHECK(take_from(stopped_inside, 0, 1000, SPDL_CLOSED) <= 6);
    DONE(stopped_inside);
}

/* The best of a few: what else runs on the machine is not our matter. */
static void an_idle_pipeline_stops_at_once(void) {
    uint64_t best = UINT64_MAX;
    for (int i = 0; i < 5; ++i) {
        script source = { .count = -1 };
        spdl_pipeline *p = START(4, SPDL_SOURCE(count_up, .ctx = &source, .free_item = item_free),
                                 SPDL_SINK(3));
        uint64_t start_ns, took_ns;
        await(&source.calls, 4);
        sleep_us(3000);
        start_ns = spdl_time_ns();
        CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        took_ns = spdl_time_ns() - start_ns;
        if (took_ns < best) best = took_ns;
        DONE(p);
    }
    CHECK(best < 50000000);
}

static int destroyed_inside;

static void log_of_destroy(spdl_log_level level, const char *text, void *user) {
    (void)user;
    CHECK_EQ(level, SPDL_LOG_ERROR);
    CHECK_STR(text,
              "spdl_pipeline_destroy: called on a worker of its pool, nothing was done");
    __atomic_add_fetch(&destroyed_inside, 1, __ATOMIC_RELAXED);
}

SPDL_FN(destroys_itself, item, item) {
    spdl_pipeline_destroy(*(spdl_pipeline **)spdl_ctx(task));
    *out = in;
    return SPDL_OK;
}

static void destroy_inside_a_stage_is_refused(void) {
    for (int w = 0; w < 3; ++w) {
        int gate = 0;
        spdl_pipeline *p = NULL;
        spdl_pipeline_desc desc = { .workers = TEST_WORKERS(w) };
        desc.logger.log_fn = log_of_destroy;
        REQUIRE(spdl_pipeline_create(
                    &p, &desc,
                    SPDL_STAGES(SOURCE(.count = 3, .gate = &gate),
                                SPDL_PIPE(destroys_itself, .ctx = &p), SPDL_SINK(3))) == SPDL_OK);
        open_gate(&gate);
        RUN(p, "0 1 2", SPDL_END);
        CHECK_EQ(destroyed_inside, 3 * (w + 1));
    }
}

/* --- init and fini --- */

enum { MOST_WORKERS = 8 };

typedef struct hooks {
    int fail_on; /* the worker whose init fails, or -1; MOST_WORKERS: that of each */
    spdl_result failure;
    int inits[MOST_WORKERS], finis[MOST_WORKERS], total, ended, calls;
    int failed_on;
    uint64_t thread[MOST_WORKERS];
    long items; /* of the source */
} hooks;

static spdl_result hooks_init(void *ctx, int worker, void **local) {
    hooks *h = (hooks *)ctx;
    if (worker == h->fail_on || h->fail_on == MOST_WORKERS) {
        h->failed_on = worker;
        return h->failure;
    }
    CHECK_EQ(h->inits[worker]++, 0);
    h->thread[worker] = test_thread_id();
    *local = &h->inits[worker];
    __atomic_add_fetch(&h->total, 1, __ATOMIC_RELEASE);
    return SPDL_OK;
}

static void hooks_fini(void *ctx, int worker, void *local) {
    hooks *h = (hooks *)ctx;
    CHECK(local == &h->inits[worker]);
    CHECK_EQ(h->finis[worker]++, 0);
    CHECK(h->thread[worker] == test_thread_id());
    __atomic_add_fetch(&h->ended, 1, __ATOMIC_RELEASE);
}

SPDL_FN(with_local, item, item) {
    hooks *h = (hooks *)spdl_ctx(task);
    CHECK(spdl_local(task) == &h->inits[task_worker(task)]);
    __atomic_add_fetch(&h->calls, 1, __ATOMIC_RELAXED);
    *out = in;
    return SPDL_OK;
}

SPDL_FN(source_with_local, void, item) {
    hooks *h = (hooks *)spdl_ctx(task);
    CHECK(spdl_local(task) == &h->inits[task_worker(task)]);
    if ((long)spdl_sequence(task) == h->items) return SPDL_END;
    *out = item_make((long)spdl_sequence(task));
    return SPDL_OK;
}

#define HOOKED(hooks_, ...)                                                                        \
    SPDL_PIPE(with_local, .ctx = (hooks_), .init = hooks_init, .fini = hooks_fini, __VA_ARGS__)

static void hooks_run_on(spdl_pool *pool, int workers, long items) {
    hooks first = { .fail_on = -1, .items = items }, one = first, two = first;
    const int most = workers ? workers : 1, least = items > 0;
    spdl_pipeline *p = start(pool ? 0 : workers, pool,
                             SPDL_STAGES(SPDL_SOURCE(source_with_local, .ctx = &first,
                                                     .init = hooks_init, .fini = hooks_fini,
                                                     .free_item = item_free),
                                         HOOKED(&one, .concurrency = 3),
                                         SPDL_PIPE(follow, SCRIPT(.fresh = false)),
                                         HOOKED(&two, .concurrency = 2), SPDL_SINK(3)));
    CHECK_EQ(take_from(p, 0, items + 1, SPDL_END), items);
    CHECK(one.calls == items && two.calls == items);
    spdl_pipeline_destroy(p);
    CHECK(first.total >= 1 && one.total >= least && two.total >= least);
    CHECK(first.total <= most && one.total <= most * least && two.total <= most * least);
    CHECK(first.ended == first.total && one.ended == one.total && two.ended == two.total);
}

/* On each worker that makes a call, before the first one; fini on the same thread. */
static void init_and_fini_run_once_on_each_worker(void) {
    for (int w = 0; w <= MOST_WORKERS; ++w) {
        hooks_run_on(NULL, w, 50);
        hooks_run_on(NULL, w, 0);
    }
    CHECK_EQ(items_alive(), 0);
}

static void init_and_fini_run_on_shared_workers(void) {
    spdl_pool *pool = pool_of(3);
    spdl_pipeline *other = START_ON(pool, COUNT_TO(-1), SPDL_SINK(3));
    for (int i = 0; i < 20; ++i) hooks_run_on(pool, 3, 30);
    DONE(other);
    hooks_run_on(pool, 3, 30);
    CHECK_EQ(items_alive(), 0);
    spdl_pool_destroy(pool);
}

/* A pipeline that is destroyed before its workers had a look: as many finis as inits. */
static void init_and_fini_balance_in_a_short_life(void) {
    chaos_on();
    for (int i = 0; i < 100; ++i) {
        hooks h = { .fail_on = i % 7 - 1, .failure = SPDL_E_IO };
        DONE(START(i % 5, COUNT_TO(9), HOOKED(&h, .concurrency = 2), SPDL_SINK(3)));
        CHECK_EQ(h.total, h.ended);
    }
}

/* Three workers meet in a call, and in destroy in .fini, where a merge of their states needs a
   lock. */
typedef struct meeting {
    int calls, finis; /* atomic */
} meeting;

static spdl_result meets_init(void *ctx, int worker, void **local) {
    (void)worker;
    *local = ctx;
    return SPDL_OK;
}

static void meets_fini(void *ctx, int worker, void *local) {
    meeting *m = (meeting *)ctx;
    (void)worker;
    CHECK(local == ctx);
    __atomic_add_fetch(&m->finis, 1, __ATOMIC_RELEASE);
    await(&m->finis, 3);
}

SPDL_FN(meets_calls, item, item) {
    meeting *m = (meeting *)spdl_ctx(task);
    __atomic_add_fetch(&m->calls, 1, __ATOMIC_RELEASE);
    await(&m->calls, 3);
    *out = in;
    return SPDL_OK;
}

static void finis_run_at_the_same_time_in_destroy(void) {
    meeting m = { 0, 0 };
    spdl_pipeline *p = START(3, COUNT_TO(6), SPDL_PIPE(meets_calls, .ctx = &m, .concurrency = 3,
                                                       .init = meets_init, .fini = meets_fini),
                             SPDL_SINK(1));
    CHECK_EQ(take_from(p, 0, 100, SPDL_END), 6);
    CHECK_EQ(m.finis, 0);
    DONE(p);
    CHECK_EQ(m.finis, 3);
}

/* As its first call would; no budget is for that. */
static void an_init_that_fails_ends_it(void) {
    static const spdl_result failures[] = { SPDL_E_IO, SPDL_SKIP };
    for (int i = 0; i < 16; ++i) {
        const int w = i / 4;
        hooks good = { .fail_on = -1 };
        hooks bad = { .fail_on = MOST_WORKERS, .failure = failures[i % 2] };
        const spdl_result told = i % 2 ? SPDL_E_STAGE : SPDL_E_IO;
        char text[200];
        spdl_pipeline *p = START(w, COUNT_TO(10), HOOKED(&good, .name = "good"),
                                 HOOKED(&bad, .name = "bad", .max_failures = -1), SPDL_SINK(3));
        TAKE_ALL(p, "", told);
        CHECK(spdl_pipeline_failed(p));
        CHECK_EQ(spdl_pipeline_error(p)->stage, 2);
        CHECK_STR(spdl_pipeline_error(p)->stage_name, "bad");
        snprintf(text, sizeof text, "stage 2 'bad', item 0: init on worker %d failed: %s",
                 bad.failed_on, spdl_result_text(failures[i % 2]));
        CHECK_STR(spdl_pipeline_error(p)->text, text);
        DONE(p);
        CHECK(good.total == good.ended && good.total >= 1);
        CHECK(bad.total == 0 && bad.ended == 0 && bad.calls == 0);
    }
}

/* On a worker that comes later: what was before its item in order is delivered, nothing after
   it. */
static void an_init_that_fails_later_is_a_failing_call(void) {
    chaos_on();
    for (int i = 0; i < 90; ++i) {
        const int w = 2 + i % 3;
        hooks bad = { .fail_on = i / 3 % w, .failure = SPDL_E_IO };
        spdl_pipeline *p = START(w, COUNT_TO(200),
                                 HOOKED(&bad, .name = "bad", .concurrency = 1 + i % 4,
                                        .max_failures = -1),
                                 SPDL_SINK(3));
        spdl_result result = SPDL_OK;
        long count = 0;
        item *it = NULL;
        while ((result = SPDL_NEXT(p, &it, SPDL_SECONDS(15))) == SPDL_OK) {
            CHECK_EQ(it->value, count++);
            item_free(it);
        }
        CHECK(result == SPDL_E_IO || (result == SPDL_END && bad.inits[bad.fail_on] == 0));
        CHECK_EQ(count, result == SPDL_END ? 200 : (long)spdl_pipeline_error(p)->item);
        DONE(p);
        CHECK_EQ(bad.total, bad.ended);
    }
}

/* Two workers fail in different rows, if they come there; what was told once stays. */
static void an_error_that_was_told_stays(void) {
    for (int i = 0; i < (TEST_SANITIZED ? 50 : 300); ++i) {
        hooks one = { .fail_on = 0, .failure = SPDL_E_IO };
        hooks two = { .fail_on = 1, .failure = SPDL_E_FORMAT };
        spdl_error told;
        spdl_pipeline *p = START(2, COUNT_TO(10), HOOKED(&one, .name = "one"),
                                 HOOKED(&two, .name = "two"), SPDL_SINK(3));
        spdl_result result;
        item *it = NULL;
        while ((result = SPDL_NEXT(p, &it, SPDL_SECONDS(15))) == SPDL_OK) item_free(it);
        told = *spdl_pipeline_error(p);
        CHECK_EQ(result, told.result == SPDL_OK ? SPDL_END : told.result);
        sleep_us(i % 3 * 200);
        CHECK_EQ(SPDL_NEXT(p, &it, SPDL_FOREVER), result);
        CHECK_STR(spdl_pipeline_error(p)->text, told.text);
        DONE(p);
    }
}

/* --- shared pools --- */

typedef struct tenant {
    spdl_pool *pool;
    uint64_t seed;
} tenant;

/* One after another, each to the end or left in the middle. */
static void *live(void *arg) {
    tenant *t = (tenant *)arg;
    for (int i = 0; i < (TEST_SANITIZED ? 6 : 30); ++i) {
        const long items = (long)(test_random(&t->seed) % 200);
        const long most = (long)(test_random(&t->seed) % 200);
        spdl_pipeline *p = START_ON(t->pool, COUNT_TO(items),
                                    SPDL_PIPE(follow, SCRIPT(.fresh = true), .concurrency = 3,
                                              .free_item = item_free),
                                    SPDL_PIPE(follow, SCRIPT(.plus = 0)), SPDL_SINK(3));
        CHECK_EQ(take_from(p, 0, most, most > items ? SPDL_END : SPDL_OK),
                 most > items ? items : most);
        spdl_pipeline_destroy(p);
    }
    return NULL;
}

static int jobs_run;

static void count_job(void *arg, int worker, void *local) {
    (void)arg;
    (void)worker;
    (void)local;
    __atomic_add_fetch(&jobs_run, 1, __ATOMIC_RELAXED);
}

static void share_a_pool(int workers, int tenants) {
    spdl_pool *pool = pool_of(workers);
    tenant t[8];
    test_thread threads[8];
    const int jobs = 200;
    chaos_on();
    jobs_run = 0;
    for (int i = 0; i < tenants; ++i) {
        t[i] = (tenant){ pool, test_seed() + (uint64_t)i };
        threads[i] = thread_of(live, &t[i]);
    }
    for (int i = 0; i < jobs; ++i) {
        CHECK_EQ(spdl_pool_submit(pool, count_job, NULL, SPDL_FOREVER), SPDL_OK);
        if (i % 10 == 0) sleep_us(100);
    }
    for (int i = 0; i < tenants; ++i) test_join(threads[i]);
    CHECK_EQ(spdl_pool_drain(pool, SPDL_SECONDS(15)), SPDL_OK);
    CHECK_EQ(jobs_run, jobs);
    CHECK_EQ(items_alive(), 0);
    spdl_pool_destroy(pool);
}

static void two_pipelines_share_a_pool(void) { share_a_pool(2, 2); }
static void eight_pipelines_share_a_pool(void) { share_a_pool(3, 8); }
static void eight_pipelines_share_a_worker(void) { share_a_pool(1, 8); }

/* One trainer takes from two pipelines in turn: neither starves, one worker or more. */
static void a_trainer_alternates(void) {
    for (int w = 1; w < 4; ++w) {
        spdl_pool *pool = pool_of(w);
        spdl_pipeline *a = START_ON(pool, COUNT_TO(-1), SPDL_SINK(3));
        spdl_pipeline *b = START_ON(pool, COUNT_TO(100), SPDL_SINK(1));
        for (long i = 0; i < 100; ++i)
            CHECK(take_from(a, i, 1, SPDL_OK) == 1 && take_from(b, i, 1, SPDL_OK) == 1);
        TAKE_ALL(b, "", SPDL_END);
        spdl_pipeline_destroy(a);
        DONE(b);
        spdl_pool_destroy(pool);
    }
}

static void a_pool_has_a_limit_of_pipelines(void) {
    spdl_pool *pool = pool_of(1);
    enum { MOST = 64 };
    spdl_pipeline *p[MOST], *more = NULL;
    spdl_error error;
    script source = { .count = 3 };
    const spdl_stage three = SPDL_SOURCE(count_up, .ctx = &source, .free_item = item_free);
    spdl_pipeline_desc desc = { .pool = pool, .error = &error };
    desc.logger.log_fn = log_nothing;
    for (int i = 0; i < MOST; ++i) p[i] = START_ON(pool, three, SPDL_SINK(3));
    CHECK_EQ(spdl_pipeline_create(&more, &desc, SPDL_STAGES(three, SPDL_SINK(3))),
             SPDL_E_LIMIT);
    CHECK_STR(error.text, "pipeline: the pool has 64 pipelines already");
    CHECK(more == NULL);
    spdl_pipeline_destroy(p[7]);
    p[7] = START_ON(pool, three, SPDL_SINK(3));
    for (int i = 0; i < MOST; ++i) {
        TAKE_ALL(p[i], "0 1 2", SPDL_END);
        spdl_pipeline_destroy(p[i]);
    }
    CHECK_EQ(items_alive(), 0);
    spdl_pool_destroy(pool);
}

/* --- exit and fork --- */

/* Waits up to 10 seconds for the process to end, and for it to end well. */
static void ends_well(pid_t child) {
    int status = 0;
    pid_t ended = 0;
    for (int i = 0; i < 1000 && ended == 0; ++i) {
        ended = waitpid(child, &status, WNOHANG);
        if (ended == 0) sleep_us(10000);
    }
    if (ended == 0) kill(child, SIGKILL);
    CHECK_EQ(ended, child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static spdl_pipeline *running; /* reachable: what exit leaves behind is no leak */

static void a_process_can_exit_while_one_runs(void) {
    for (int i = 0; i < 4; i += TEST_TSAN ? 3 : 1) {
        const pid_t child = fork();
        if (child == 0) {
            running = START(4, COUNT_TO(-1),
                            SPDL_PIPE(follow, SCRIPT(.sleep_us = i % 2 * 1000), .concurrency = 2),
                            SPDL_SINK(i < 2 ? 3 : 3000));
            CHECK_EQ(take_from(running, 0, 10, SPDL_OK), 10);
            exit(0);
        }
        ends_well(child);
    }
}

static void a_forked_child_may_have_its_own(void) {
    spdl_pipeline *p;
    pid_t child;
    TEST_NEEDS_FORKS();
    if (TEST_SANITIZED) TEST_SKIP("a sanitizer's locks stay locked in such a child");
    p = START(3, COUNT_TO(-1), SPDL_SINK(3));
    CHECK_EQ(take_from(p, 0, 10, SPDL_OK), 10);
    child = fork();
    if (child == 0) {
        spdl_pipeline *own = START(2, COUNT_TO(100), SPDL_SINK(3));
        CHECK_EQ(take_from(own, 0, 1000, SPDL_END), 100);
        spdl_pipeline_destroy(own);
        _exit(0);
    }
    ends_well(child);
    CHECK_EQ(take_from(p, 10, 1000, SPDL_OK), 1000);
    DONE(p);
}

/* --- threads and memory that cannot be had --- */

typedef struct heap {
    long left; /* allocations that still succeed, -1: all */
    long blocks, calls;
} heap;

typedef struct heap_head {
    void *base;
    size_t bytes;
} heap_head;

static void *heap_alloc(size_t bytes, size_t align, void *user) {
    heap *h = (heap *)user;
    const size_t before = align > sizeof(heap_head) ? align : sizeof(heap_head);
    heap_head head = { NULL, bytes };
    char *memory;
    __atomic_add_fetch(&h->calls, 1, __ATOMIC_RELAXED);
    if (h->left == 0) return NULL;
    if (h->left > 0) --h->left;
    head.base = test_memory(before, before + bytes);
    if (head.base == NULL) return NULL;
    __atomic_add_fetch(&h->blocks, 1, __ATOMIC_RELAXED);
    memory = (char *)head.base + before;
    memcpy(memory - sizeof head, &head, sizeof head);
    memset(memory, 0x5a, bytes);
    return memory;
}

static void heap_free(void *memory, size_t bytes, void *user) {
    heap *h = (heap *)user;
    heap_head head;
    memcpy(&head, (char *)memory - sizeof head, sizeof head);
    CHECK_EQ(head.bytes, bytes);
    __atomic_sub_fetch(&h->blocks, 1, __ATOMIC_RELAXED);
    test_memory_free(head.base);
}

/* A pipeline that has everything which is allocated. */
static spdl_result make_full(spdl_pipeline **p, heap *h, int workers, spdl_error *error) {
    static hooks hook;
    static script source, pass;
    spdl_pipeline_desc desc = { .workers = TEST_WORKERS(workers), .error = error };
    hook = (hooks){ .fail_on = -1 };
    source = (script){ .count = 1000 };
    pass = (script){ .fresh = true };
    desc.allocator.alloc_fn = heap_alloc;
    desc.allocator.free_fn = heap_free;
    desc.allocator.user = h;
    desc.logger.log_fn = log_nothing;
    return spdl_pipeline_create(
        p, &desc,
        SPDL_STAGES(SPDL_SOURCE(count_up, .ctx = &source, .free_item = item_free),
                    SPDL_PIPE(follow, .ctx = &pass, .concurrency = 2, .free_item = item_free),
                    HOOKED(&hook, .buffer_size = 4), SPDL_BATCH(4), SPDL_BATCH(2), SPDL_SINK(3)));
}

static void an_allocation_that_fails_is_told(void) {
    for (int w = 0; w < 3; ++w) {
        spdl_result result = SPDL_E_NOMEM;
        long k = 0;
        for (; result != SPDL_OK && k < 1000; ++k) {
            heap h = { .left = k };
            spdl_error error;
            spdl_pipeline *p = (spdl_pipeline *)(uintptr_t)1;
            result = make_full(&p, &h, w, &error);
            if (result == SPDL_OK) {
                spdl_pipeline_destroy(p);
            } else {
                CHECK(p == NULL);
                CHECK_EQ(result, SPDL_E_NOMEM);
                CHECK_EQ(error.result, SPDL_E_NOMEM);
                CHECK(strstr(error.text, "out of memory") != NULL);
            }
            CHECK_EQ(h.blocks, 0);
        }
        CHECK(result == SPDL_OK && k > 10);
        CHECK_EQ(items_alive(), 0);
    }
}

static void a_thread_that_cannot_be_had_is_told(void) {
    for (int k = 0; k < 5; ++k) {
        heap h = { .left = -1 };
        spdl_error error;
        spdl_pipeline *p = (spdl_pipeline *)(uintptr_t)1;
        char text[100];
        threads_left = k;
        CHECK_EQ(make_full(&p, &h, 5, &error), SPDL_E_THREAD);
        threads_left = -1;
        CHECK(p == NULL);
        CHECK_EQ(h.blocks, 0);
        CHECK_EQ(error.result, SPDL_E_THREAD);
        snprintf(text, sizeof text, "pool 'spdl': thread %d of 5 could not be created", k);
        CHECK_STR(error.text, text);
    }
}

static void a_running_pipeline_allocates_nothing(void) {
    for (int w = 0; w < 4; ++w) {
        heap h = { .left = -1 };
        spdl_pipeline *p = NULL;
        spdl_batch *batch;
        long calls, batches = 0;
        REQUIRE(make_full(&p, &h, w, NULL) == SPDL_OK);
        calls = h.calls;
        while (SPDL_NEXT(p, &batch, SPDL_FOREVER) == SPDL_OK) {
            ++batches;
            spdl_batch_free(batch);
        }
        CHECK_EQ(batches, 125);
        CHECK_EQ(h.calls, calls);
        CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        DONE(p);
        CHECK_EQ(h.calls, calls);
        CHECK_EQ(h.blocks, 0);
    }
}

/* Batches the trainer keeps are the exception that the header names. */
static void a_batch_there_is_no_memory_for_is_a_failure(void) {
    for (int w = 0; w < 3; ++w) {
        heap h = { .left = -1 };
        spdl_pipeline *p = NULL;
        spdl_batch *kept[125];
        spdl_result result = SPDL_OK;
        int count = 0;
        REQUIRE(make_full(&p, &h, w, NULL) == SPDL_OK);
        __atomic_store_n(&h.left, 0, __ATOMIC_RELAXED);
        while (result == SPDL_OK && count < 125) {
            result = SPDL_NEXT(p, &kept[count], SPDL_FOREVER);
            count += result == SPDL_OK;
        }
        CHECK_EQ(result, SPDL_E_NOMEM);
        CHECK(strstr(spdl_pipeline_error(p)->text, "no memory for another batch") != NULL);
        CHECK(count > 3);
        spdl_pipeline_destroy(p);
        while (count > 0) spdl_batch_free(kept[--count]);
        CHECK_EQ(items_alive(), 0);
        CHECK_EQ(h.blocks, 0);
    }
}

/* A worker makes several quick calls in a row; a failure that ends the pipeline ends that, too. */
static void no_call_follows_the_failure_that_ends_it(void) {
    for (int order = 0; order < 2; ++order) {
        script fails = { .every = 1000000, .rest = 2000, .result = SPDL_E_STAGE };
        spdl_pipeline *p = START(0, SOURCE(.count = 5000, .result = SPDL_OK, .every = 0),
                                 SPDL_PIPE(follow, .ctx = &fails,
                                           .output_order = (spdl_order)order),
                                 SPDL_SINK(64));
        CHECK_EQ(take_from(p, 0, 5000, SPDL_E_STAGE), 2000);
        CHECK_EQ(fails.calls, 2001);
        DONE(p);
    }
}

static void a_stop_frees_the_batch_that_is_filled(void) {
    for (int w = 0; w < 3; ++w) {
        spdl_pipeline *p = START(w, SOURCE(.count = -1, .sleep_us = 1000), SPDL_BATCH(100000),
                                 SPDL_SINK(1));
        void *taken;
        CHECK_EQ(spdl_pipeline_next(p, &taken, 20000000), SPDL_TIMEOUT);
        CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(items_alive(), 0);
        DONE(p);
    }
}

static spdl_pipeline *stopped_by_free;

static void stop_and_free(void *it) {
    CHECK_EQ(spdl_pipeline_stop(stopped_by_free, SPDL_FOREVER), SPDL_OK);
    item_free(it);
}

static void a_free_item_may_stop(void) {
    spdl_pipeline *p = START(2, SPDL_SOURCE(count_up, SCRIPT(.count = -1),
                                            .free_item = stop_and_free, .buffer_size = 8),
                             SPDL_PIPE(follow, SCRIPT(.sleep_us = 2000)), SPDL_SINK(1));
    stopped_by_free = p;
    sleep_us(20000);
    CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
    DONE(p);
}

static int free_gate, frees;

static void free_at_the_gate(void *it) {
    __atomic_add_fetch(&frees, 1, __ATOMIC_RELEASE);
    await(&free_gate, 1);
    item_free(it);
}

static void *stops_it(void *arg) {
    CHECK_EQ(spdl_pipeline_stop((spdl_pipeline *)arg, SPDL_FOREVER), SPDL_OK);
    return NULL;
}

/* The first stop is inside of a free_item: the second returns when all items are freed. */
static void a_second_stop_waits_for_the_first(void) {
    int freed;
    spdl_pipeline *p = START(2, SPDL_SOURCE(count_up, SCRIPT(.count = -1),
                                            .free_item = free_at_the_gate, .buffer_size = 8),
                             SPDL_PIPE(follow, SCRIPT(.sleep_us = 2000)), SPDL_SINK(1));
    test_thread first;
    sleep_us(20000);
    first = thread_of(stops_it, p);
    await(&frees, 1);
    CHECK_EQ(spdl_pipeline_stop(p, 0), SPDL_TIMEOUT);
    CHECK_EQ(spdl_pipeline_stop(p, SPDL_SECONDS(0.02)), SPDL_TIMEOUT);
    open_gate(&free_gate);
    CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
    freed = __atomic_load_n(&frees, __ATOMIC_ACQUIRE);
    CHECK(freed > 1);
    test_join(first);
    CHECK_EQ(frees, freed);
    DONE(p);
}

/* Dropped items give their room back, and are no items that could be taken. */
static void gaps_are_not_told_as_depth(void) {
    spdl_pipeline *p = START(2, COUNT_TO(-1),
                             SPDL_PIPE(follow, SCRIPT(.every = 4, .result = SPDL_SKIP)),
                             SPDL_SINK(15));
    static spdl_stats stats;
    do {
        sleep_us(1000);
        spdl_pipeline_stats(p, &stats);
    } while (stats.edge[1].depth < 16);
    sleep_us(10000); /* and no more come */
    spdl_pipeline_stats(p, &stats);
    CHECK_EQ(stats.edge[1].depth, 16);
    CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
    spdl_pipeline_stats(p, &stats);
    CHECK_EQ(stats.edge[0].depth, 0);
    DONE(p);
}

/* After a stop has been told the clock of the statistics stands still. */
static void the_clock_stops_with_the_flow(void) {
    spdl_pipeline *p = START(2, COUNT_TO(-1), SPDL_SINK(2));
    static spdl_stats before, after;
    TAKE(p, 2, "0 1");
    CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
    take_from(p, 2, 100, SPDL_CLOSED);
    spdl_pipeline_stats(p, &before);
    sleep_us(20000);
    spdl_pipeline_stats(p, &after);
    CHECK_EQ(after.elapsed_ns, before.elapsed_ns);
    CHECK_EQ(after.edge[0].empty_ns, before.edge[0].empty_ns);
    DONE(p);
}

/* A pipeline that never rests leaves its turn to the others on the pool: after a millisecond, or
   the one call that takes longer. */
static void a_busy_pipeline_shares_its_pool(void) {
    spdl_pool *pool = pool_of(1);
    spdl_pipeline *busy = START_ON(pool, COUNT_TO(-1),
                                   SPDL_PIPE(follow, SCRIPT(.sleep_us = 5000)), SPDL_SINK(1000));
    spdl_pipeline *other = START_ON(pool, COUNT_TO(3), SPDL_SINK(3));
    TAKE_ALL(other, "0 1 2", SPDL_END);
    spdl_pipeline_destroy(other);
    CHECK(stats_of(busy, 1).tasks < 100);
    DONE(busy);
    spdl_pool_destroy(pool);
}

TEST_TABLE(lifetime) {
    TEST_CASE(timeouts_lose_nothing),
    TEST_CASE(next_can_be_polled),
    TEST_CASE(a_loop_goes_on_where_the_last_one_stopped),
    TEST_CASE(an_endless_source_can_be_left_at_any_time),
    TEST_CASE(a_pipeline_can_be_destroyed_at_any_item),
    TEST_CASE(a_second_trainer_is_refused),
    TEST_CASE(two_trainers_break_nothing),
    TEST_CASE(next_checks_its_arguments),
    TEST_CASE(the_trainer_can_stop),
    TEST_CASE(stop_comes_before_the_first_item),
    TEST_CASE(stop_after_the_end_changes_nothing),
    TEST_CASE(another_thread_can_stop),
    TEST_CASE(stop_frees_what_is_not_in_the_sink),
    TEST_CASE(another_thread_can_stop_the_trainers_work),
    TEST_CASE(a_stage_can_stop),
    TEST_CASE(stop_inside_a_stage_does_not_wait),
    TEST_CASE(an_idle_pipeline_stops_at_once),
    TEST_CASE(destroy_inside_a_stage_is_refused),
    TEST_CASE(init_and_fini_run_once_on_each_worker),
    TEST_CASE(init_and_fini_run_on_shared_workers),
    TEST_CASE(init_and_fini_balance_in_a_short_life),
    TEST_CASE(finis_run_at_the_same_time_in_destroy),
    TEST_CASE(an_init_that_fails_ends_it),
    TEST_CASE(an_init_that_fails_later_is_a_failing_call),
    TEST_CASE(an_error_that_was_told_stays),
    TEST_CASE(two_pipelines_share_a_pool),
    TEST_CASE(eight_pipelines_share_a_pool),
    TEST_CASE(eight_pipelines_share_a_worker),
    TEST_CASE(a_trainer_alternates),
    TEST_CASE(a_pool_has_a_limit_of_pipelines),
    TEST_CASE(a_process_can_exit_while_one_runs),
    TEST_CASE(a_forked_child_may_have_its_own),
    TEST_CASE(an_allocation_that_fails_is_told),
    TEST_CASE(a_thread_that_cannot_be_had_is_told),
    TEST_CASE(no_call_follows_the_failure_that_ends_it),
    TEST_CASE(a_stop_frees_the_batch_that_is_filled),
    TEST_CASE(a_free_item_may_stop),
    TEST_CASE(a_second_stop_waits_for_the_first),
    TEST_CASE(gaps_are_not_told_as_depth),
    TEST_CASE(the_clock_stops_with_the_flow),
    TEST_CASE(a_busy_pipeline_shares_its_pool),
    TEST_CASE(a_running_pipeline_allocates_nothing),
    TEST_CASE(a_batch_there_is_no_memory_for_is_a_failure),
    TEST_END,
};
