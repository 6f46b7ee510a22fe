/* Deferred calls, threads of a stage's own, and what exit and fork do to both. */
#define SPDL__WARN_NS 50000000 /* after which destroy tells what it waits for */
#define ITEMS_PRIVATE
#include "flow.h"

#if defined(__linux__)
#include <sys/prctl.h>
#endif

/* --- a desk where calls are handed in, and clerks who complete them --- */

typedef struct letter {
    spdl_deferred deferred;
    item *in;
} letter;

typedef struct desk {
    test_mutex lock;
    letter letter[1024];
    int count;  /* handed in; atomic for those who only look */
    int taken;
    bool closed;
    /* what the clerks do */
    int wait_for;      /* begin when so many are there */
    bool backwards;    /* the last first */
    long sleep_us;
    bool fresh;        /* a new item in place of the input, ten times its value */
    long skip, fail;   /* values that end so, unless 0 */
    bool told;         /* fail with a text */
    test_thread clerk[4];
    int clerks;
    int completing; /* calls whose completion has begun; atomic */
} desk;

static void desk_add(desk *d, spdl_deferred deferred, item *in) {
    test_lock(&d->lock);
    CHECK(deferred.pipeline != NULL);
    d->letter[d->count].deferred = deferred;
    d->letter[d->count].in = in;
    __atomic_store_n(&d->count, d->count + 1, __ATOMIC_RELEASE);
    test_unlock(&d->lock);
}

/* With backwards all letters are there before the first is taken. */
static bool desk_take(desk *d, letter *l) {
    bool found;
    test_lock(&d->lock);
    found = d->taken < d->count;
    if (found) {
        const int at = d->backwards ? d->count - 1 - d->taken : d->taken;
        *l = d->letter[at];
        ++d->taken;
    }
    test_unlock(&d->lock);
    return found;
}

static void desk_complete(desk *d, const letter *l) {
    const long value = l->in->value;
    spdl_result result;
    if (d->sleep_us) sleep_us(d->sleep_us);
    __atomic_add_fetch(&d->completing, 1, __ATOMIC_RELEASE);
    if (d->skip && value == d->skip) result = spdl_complete(l->deferred, SPDL_SKIP, NULL);
    else if (d->fail && value == d->fail && d->told)
        result = spdl_complete_fail(l->deferred, "no answer to %ld", value);
    else if (d->fail && value == d->fail) result = spdl_complete(l->deferred, SPDL_E_IO, NULL);
    else result = spdl_complete(l->deferred, SPDL_OK, d->fresh ? item_make(10 * value) : l->in);
    CHECK_EQ(result, SPDL_OK);
}

static void *clerk(void *arg) {
    desk *d = (desk *)arg;
    letter l;
    for (;;) {
        const bool closed = __atomic_load_n(&d->closed, __ATOMIC_ACQUIRE);
        if (closed || __atomic_load_n(&d->count, __ATOMIC_ACQUIRE) >= d->wait_for) {
            while (desk_take(d, &l)) desk_complete(d, &l);
            if (closed) return NULL;
        }
        sleep_us(50);
    }
}

static void desk_open(desk *d, int clerks) {
    d->lock = (test_mutex)TEST_MUTEX;
    for (d->clerks = 0; d->clerks < clerks; ++d->clerks)
        d->clerk[d->clerks] = thread_of(clerk, d);
}

static void desk_close(desk *d) {
    __atomic_store_n(&d->closed, true, __ATOMIC_RELEASE);
    for (int i = 0; i < d->clerks; ++i) test_join(d->clerk[i]);
    CHECK_EQ(d->taken, d->count);
}

SPDL_FN(hand_in, item, item) {
    desk_add((desk *)spdl_ctx(task), spdl_defer(task), in);
    return SPDL_PENDING;
}

#define HAND_IN(...)                                                                               \
    SPDL_PIPE(hand_in, .deferred = true, .free_item = item_free, .ctx = __VA_ARGS__)

/* --- completing --- */

/* Until `calls` calls were handed in; without workers this thread makes them. */
static void await_calls(spdl_pipeline *p, const desk *d, int workers, int calls) {
    while (workers == 0 && __atomic_load_n(&d->count, __ATOMIC_ACQUIRE) < calls) {
        void *taken;
        if (spdl_pipeline_next(p, &taken, 100000) == SPDL_OK) item_free(taken);
    }
    await(&d->count, calls);
}

static void others_may_complete_a_call(void) {
    chaos_on();
    for (int i = 0; i < 4 * CROWDS; ++i) {
        desk d = { .fresh = i % 2, .skip = 3 };
        spdl_pipeline *p;
        desk_open(&d, 1 + i % 3);
        p = START(crowds[i / 4], SPDL_SOURCE(count_up, SCRIPT(.count = 9), .buffer_size = 1,
                                             .free_item = item_free),
                  HAND_IN(&d, .concurrency = 1 + i % 4 / 2 * 3), FOLLOW(.plus = 0), SPDL_SINK(1));
        RUN(p, i % 2 ? "0 10 20 40 50 60 70 80" : "0 1 2 4 5 6 7 8", SPDL_END);
        desk_close(&d);
    }
}

/* The next call of a worker does not begin before the deferred one has left it. The worker alone
   does all of it, so a call that seems to last 3 ms has the time of the one before. */
SPDL_FN(hand_in_slowly, item, item) {
    sleep_us(3000);
    desk_add((desk *)spdl_ctx(task), spdl_defer(task), in);
    return SPDL_PENDING;
}

static void a_deferred_call_takes_no_time_of_others(void) {
    uint64_t least = UINT64_MAX;
    for (int again = 0; again < 5 && least > 2000000; ++again) {
        desk d = { 0 };
        spdl_stats stats;
        spdl_pipeline *p;
        desk_open(&d, 1);
        p = START(1, COUNT_TO(20),
                  SPDL_PIPE(hand_in_slowly, .deferred = true, .ctx = &d, .concurrency = 20,
                            .buffer_size = 20),
                  FOLLOW(.plus = 0), SPDL_SINK(20));
        CHECK_EQ(take_from(p, 0, 100, SPDL_END), 20);
        spdl_pipeline_stats(p, &stats);
        CHECK(stats.stage[1].deferred);
        CHECK_EQ(stats.stage[1].split_calls, 0);
        if (stats.stage[2].p90_ns < least) least = stats.stage[2].p90_ns;
        DONE(p);
        desk_close(&d);
    }
    CHECK(least <= 2000000);
}

/* Behind the stage there are others, in front of it none that could run: only the completion itself
   can wake somebody. */
static void a_completion_wakes_who_waits(void) {
    for (int i = 0; i < CROWDS; ++i) {
        desk d = { .sleep_us = 2000 };
        spdl_pipeline *p;
        desk_open(&d, 1);
        p = START(crowds[i], COUNT_TO(5), HAND_IN(&d), FOLLOW(.plus = 1), SPDL_BATCH(2),
                  SPDL_SINK(1));
        RUN_BATCHES(p, "1 2|3 4|5", SPDL_END);
        desk_close(&d);
    }
}

static spdl_pipeline *stopped_while_settling;

static void stop_and_free(void *it) {
    CHECK_EQ(spdl_pipeline_stop(stopped_while_settling, SPDL_FOREVER), SPDL_OK);
    item_free(it);
}

typedef struct held_call {
    spdl_deferred call;
    int made;
} held_call;

SPDL_FN(holds, item, item) {
    held_call *held = (held_call *)spdl_ctx(task);
    held->call = spdl_defer(task);
    __atomic_store_n(&held->made, 1, __ATOMIC_RELEASE);
    return SPDL_PENDING;
}

/* The call that spdl_complete settles is not one the stop could wait for. */
static void what_a_completion_frees_may_stop(void) {
    held_call held = { .made = 0 };
    spdl_pipeline *p = START(2, SPDL_SOURCE(count_up, SCRIPT(.count = 1),
                                            .free_item = stop_and_free),
                             SPDL_PIPE(holds, .ctx = &held, .deferred = true), SPDL_SINK(1));
    stopped_while_settling = p;
    while (!__atomic_load_n(&held.made, __ATOMIC_ACQUIRE)) test_yield();
    sleep_us(20000); /* the function has returned: the call is settled here */
    CHECK_EQ(spdl_complete(held.call, SPDL_SKIP, NULL), SPDL_OK);
    DONE(p);
}

static void calls_are_completed_in_any_order(void) {
    for (int i = 0; i < 2 * CROWDS; ++i) {
        desk d = { .backwards = true, .wait_for = 10 };
        const spdl_order order = i % 2 ? SPDL_ORDER_COMPLETION : SPDL_ORDER_INPUT;
        spdl_pipeline *p;
        desk_open(&d, 1);
        p = START(crowds[i / 2], COUNT_TO(10),
                  HAND_IN(&d, .concurrency = 10, .output_order = order), SPDL_SINK(1));
        /* several workers: one may still be in its function when its call is completed */
        if (i % 2 && crowds[i / 2] > 1) RUN_SORTED(p, "0 1 2 3 4 5 6 7 8 9", SPDL_END);
        else RUN(p, i % 2 ? "9 8 7 6 5 4 3 2 1 0" : "0 1 2 3 4 5 6 7 8 9", SPDL_END);
        desk_close(&d);
    }
}

SPDL_FN(completes_at_once, item, item) {
    const spdl_deferred deferred = spdl_defer(task);
    const spdl_deferred same = spdl_defer(task); /* asked twice: one call */
    const long value = in->value;
    CHECK(deferred.pipeline == same.pipeline && deferred.id == same.id);
    if (value % 4 == 3) CHECK_EQ(spdl_complete(deferred, SPDL_SKIP, NULL), SPDL_OK);
    else if (value % 2) CHECK_EQ(spdl_complete(deferred, SPDL_OK, item_make(100 * value)), SPDL_OK);
    else CHECK_EQ(spdl_complete(deferred, SPDL_OK, in), SPDL_OK);
    return SPDL_PENDING;
}

static void a_call_may_complete_itself(void) {
    for (int i = 0; i < 2 * CROWDS; ++i)
        RUN(START(crowds[i / 2], COUNT_TO(9),
                  SPDL_PIPE(completes_at_once, .deferred = true, .free_item = item_free,
                            .concurrency = 1 + i % 2 * 7),
                  SPDL_SINK(1)),
            "0 100 2 4 500 6 8", SPDL_END);
}

static void *complete_one(void *arg) {
    const letter *l = (const letter *)arg;
    CHECK_EQ(spdl_complete(l->deferred, SPDL_OK, l->in), SPDL_OK);
    return NULL;
}

/* The thread has ended before the function returns. */
SPDL_FN(sends_a_thread, item, item) {
    letter l = { spdl_defer(task), in };
    test_join(thread_of(complete_one, &l));
    return SPDL_PENDING;
}

static void a_thread_that_ends_may_complete(void) {
    for (int i = 0; i < CROWDS; ++i)
        RUN(START(crowds[i], COUNT_TO(6),
                  SPDL_PIPE(sends_a_thread, .deferred = true, .concurrency = 2), SPDL_SINK(1)),
            "0 1 2 3 4 5", SPDL_END);
}

static void a_completion_may_be_a_failure(void) {
    for (int i = 0; i < 2 * CROWDS; ++i) {
        desk d = { .fail = 4, .told = i % 2 };
        spdl_pipeline *p;
        desk_open(&d, 1);
        p = START(crowds[i / 2], COUNT_TO(9), HAND_IN(&d, .concurrency = 3), SPDL_SINK(1));
        TAKE_ALL(p, "0 1 2 3", i % 2 ? SPDL_E_STAGE : SPDL_E_IO);
        failed_with(p, 1, i % 2 ? "stage 1 'hand_in', item 4: no answer to 4"
                             : "stage 1 'hand_in', item 4: input or output error");
        DONE(p);
        desk_close(&d);
        d = (desk){ .fail = 4, .told = i % 2 };
        desk_open(&d, 2);
        p = START(crowds[i / 2], COUNT_TO(9),
                  HAND_IN(&d, .concurrency = 3, .max_failures = 1), SPDL_SINK(1));
        RUN(p, "0 1 2 3 5 6 7 8", SPDL_END);
        desk_close(&d);
    }
}

/* The text of a failure is not that of a later one in the same place. */
static void a_failure_without_a_text_has_none(void) {
    for (int i = 0; i < CROWDS; ++i) {
        desk d = { 0 };
        spdl_pipeline *p;
        desk_open(&d, 0);
        p = START(crowds[i], COUNT_TO(9), HAND_IN(&d, .max_failures = 1), SPDL_SINK(1));
        await_calls(p, &d, crowds[i], 1);
        CHECK_EQ(spdl_complete_fail(d.letter[0].deferred, "no answer"), SPDL_OK);
        await_calls(p, &d, crowds[i], 2);
        CHECK_EQ(spdl_complete(d.letter[1].deferred, SPDL_E_IO, NULL), SPDL_OK);
        TAKE_ALL(p, "", SPDL_E_IO);
        failed_with(p, 1, "stage 1 'hand_in', item 1: input or output error "
                          "(one more than max_failures)");
        DONE(p);
    }
}

SPDL_FN(fails_at_length, item, item) {
    CHECK_EQ(spdl_complete_fail(spdl_defer(task), "%0300d", (int)in->value), SPDL_OK);
    return SPDL_PENDING;
}

static void the_text_of_a_completion_arrives_whole(void) {
    for (int i = 0; i < CROWDS; ++i) {
        char text[SPDL_TEXT_BYTES];
        spdl_pipeline *p = START(crowds[i], COUNT_TO(3),
                                 SPDL_PIPE(fails_at_length, .deferred = true), SPDL_SINK(1));
        TAKE_ALL(p, "", SPDL_E_STAGE);
        snprintf(text, sizeof text, "stage 1 'fails_at_length', item 0: %0300d", 0);
        failed_with(p, 1, text);
        DONE(p);
    }
}

/* Results that are none, told to spdl_complete. */
SPDL_FN(completes_with, item, item) {
    CHECK_EQ(spdl_complete(spdl_defer(task), *(const spdl_result *)spdl_ctx(task), NULL), SPDL_OK);
    return SPDL_PENDING;
}

static void a_completion_with_no_result_is_a_failure(void) {
    static const spdl_result results[] = { SPDL_PENDING, SPDL_END, SPDL_TIMEOUT, (spdl_result)77 };
    for (int i = 0; i < 4 * CROWDS; ++i) {
        spdl_result result = results[i % 4];
        char text[120];
        spdl_pipeline *p = START(crowds[i / 4], COUNT_TO(3),
                                 SPDL_PIPE(completes_with, .ctx = &result, .deferred = true),
                                 SPDL_SINK(1));
        TAKE_ALL(p, "", SPDL_E_STAGE);
        if (result == SPDL_END)
            snprintf(text, sizeof text, "stage 1 'completes_with', item 0: returned "
                                        "SPDL_END, which only a source may");
        else
            snprintf(text, sizeof text, "stage 1 'completes_with', item 0: returned %d, "
                                        "which is not a result of a stage function", (int)result);
        failed_with(p, 1, text);
        DONE(p);
    }
}

/* --- what is not allowed --- */

typedef struct misuse {
    int lines;
    const char *text; /* of every line in the log */
    bool fails;
    spdl_deferred deferred;
} misuse;

static void log_of_misuse(spdl_log_level level, const char *text, void *user) {
    misuse *m = (misuse *)user;
    if (level != SPDL_LOG_ERROR) return;
    CHECK_STR(text, m->text);
    __atomic_add_fetch(&m->lines, 1, __ATOMIC_RELAXED);
}

static spdl_pipeline *start_logged(int workers, misuse *m, const spdl_stage *rows, size_t count) {
    spdl_pipeline_desc desc = { .workers = TEST_WORKERS(workers) };
    spdl_pipeline *p = NULL;
    desc.logger.log_fn = log_of_misuse;
    desc.logger.user = m;
    REQUIRE(spdl_pipeline_create(&p, &desc, rows, count) == SPDL_OK);
    return p;
}

static const char no_such_call[] =
    "spdl_complete: no such call, or it was completed before";

SPDL_FN(completes_twice, item, item) {
    misuse *m = (misuse *)spdl_ctx(task);
    item *other = item_make(7);
    m->deferred = spdl_defer(task);
    CHECK_EQ(spdl_complete(m->deferred, SPDL_OK, in), SPDL_OK);
    CHECK_EQ(spdl_complete(m->deferred, SPDL_OK, other), SPDL_E_INVALID);
    CHECK_EQ(spdl_complete_fail(m->deferred, "again"), SPDL_E_INVALID);
    item_free(other); /* nothing has happened to it */
    return SPDL_PENDING;
}

static void a_call_is_completed_once(void) {
    for (int i = 0; i < CROWDS; ++i) {
        misuse m = { .text = no_such_call };
        const spdl_deferred none = { NULL, 0 };
        spdl_deferred strange;
        spdl_pipeline *p = start_logged(crowds[i], &m, SPDL_STAGES(COUNT_TO(4), SPDL_PIPE(
                                        completes_twice, .ctx = &m, .deferred = true),
                                        SPDL_SINK(1)));
        TAKE_ALL(p, "0 1 2 3", SPDL_END);
        CHECK_EQ(m.lines, 8);
        CHECK_EQ(spdl_complete(m.deferred, SPDL_OK, NULL), SPDL_E_INVALID); /* long ago */
        CHECK_EQ(spdl_complete(none, SPDL_OK, NULL), SPDL_E_INVALID);
        CHECK_EQ(spdl_complete_fail(none, "%d", 1), SPDL_E_INVALID);
        strange = m.deferred;
        for (uint64_t bit = 1; bit != 0; bit <<= 1) { /* ids that were never given out */
            strange.id = m.deferred.id ^ bit;
            CHECK_EQ(spdl_complete(strange, SPDL_OK, NULL), SPDL_E_INVALID);
        }
        DONE(p);
    }
}

/* A call that goes on elsewhere is judged by its completion, also when that comes first; what it
   asked for in vain is in the log. */
SPDL_FN(routes_before_it_goes_on, item, item) {
    misuse *m = (misuse *)spdl_ctx(task);
    (void)out;
    CHECK_EQ(spdl_route(task, 0), SPDL_E_INVALID);
    m->deferred = spdl_defer(task);
    if (m->fails)
        CHECK_EQ(spdl_complete_fail(m->deferred, "cannot"), SPDL_OK);
    else
        CHECK_EQ(spdl_complete(m->deferred, SPDL_OK, in), SPDL_OK);
    return SPDL_PENDING;
}

static void a_completion_judges_what_was_misused(void) {
    for (int i = 0; i < 2 * CROWDS; ++i) {
        misuse m = { .fails = i % 2, .text = "stage 1 'routes_before_it_goes_on', item "
                                              "0: spdl_route in a stage that is no SPDL_BRANCH" };
        spdl_pipeline *p = start_logged(
            crowds[i / 2], &m,
            SPDL_STAGES(COUNT_TO(1), SPDL_PIPE(routes_before_it_goes_on, .ctx = &m,
                                               .deferred = true, .max_failures = -1),
                        SPDL_SINK(1)));
        TAKE_ALL(p, m.fails ? "" : "0", SPDL_END);
        CHECK_EQ(m.lines, 1);
        DONE(p);
    }
}

/* Announced, and then the result is returned as usual. */
SPDL_FN(thinks_better, item, item) {
    misuse *m = (misuse *)spdl_ctx(task);
    m->deferred = spdl_defer(task);
    *out = in;
    if (in->value == 2) /* and completed all the same */
        CHECK_EQ(spdl_complete(m->deferred, SPDL_OK, item_make(99)), SPDL_OK);
    if (in->value == 3) return spdl_fail(task, "cannot");
    return in->value == 4 ? SPDL_SKIP : SPDL_OK;
}

static void a_deferred_call_may_return_after_all(void) {
    for (int i = 0; i < 2 * CROWDS; ++i) {
        misuse m = { .text = "a call that did not return SPDL_PENDING was completed with "
                             "spdl_complete" };
        spdl_pipeline *p = start_logged(
            crowds[i / 2], &m,
            SPDL_STAGES(COUNT_TO(6), SPDL_PIPE(thinks_better, .ctx = &m, .deferred = true,
                                               .free_item = item_free, .max_failures = 1,
                                               .concurrency = 1),
                        SPDL_SINK(1)));
        TAKE_ALL(p, "0 1 2 5", SPDL_END);
        CHECK_EQ(m.lines, 1);
        m.text = no_such_call;
        CHECK_EQ(spdl_complete(m.deferred, SPDL_OK, NULL), SPDL_E_INVALID);
        CHECK_EQ(m.lines, 2);
        DONE(p);
    }
}

/* As above, with a buffer: what the completion has, and what is returned. */
typedef struct second_thought {
    misuse m;
    int completed; /* 0: NULL, 1: the input, 2: what is returned, 3: the buffer, 4: a failure */
    spdl_result result;
    int out; /* 0: NULL, 1: the input, 2: another item */
    bool takes;
} second_thought;

SPDL_FN(thinks_twice, item, item) {
    const second_thought *s = (const second_thought *)spdl_ctx(task);
    const spdl_deferred call = spdl_defer(task);
    item *buffer = (item *)spdl_buffer(task);
    if (s->takes) spdl_take(task);
    *out = s->out == 1 ? in : s->out == 2 ? item_make(9) : NULL;
    if (s->completed == 4)
        CHECK_EQ(spdl_complete_fail(call, "no"), SPDL_OK);
    else
        CHECK_EQ(spdl_complete(call, SPDL_OK, s->completed == 1   ? in
                                              : s->completed == 2 ? *out
                                              : s->completed == 3 ? buffer : NULL), SPDL_OK);
    return s->result;
}

static void what_was_completed_in_vain_is_freed_once(void) {
    for (int i = 0; i < 5 * 3 * 2 * 2; ++i) {
        second_thought s = { .completed = i % 5, .out = i / 5 % 3, .takes = i / 30,
                             .result = i / 15 % 2 ? SPDL_SKIP : SPDL_OK };
        spdl_pipeline *p;
        if (s.result == SPDL_SKIP && s.out == 2) continue; /* it would be lost */
        if (s.takes && (s.out == 1 ? s.result == SPDL_SKIP : s.completed != 1)) continue;
        s.m.text = "a call that did not return SPDL_PENDING was completed with spdl_complete";
        p = start_logged(1, &s.m,
                         SPDL_STAGES(COUNT_TO(2), SPDL_PIPE(thinks_twice, .ctx = &s,
                                                            .deferred = true,
                                                            .item_bytes = sizeof(item),
                                                            .free_item = item_free),
                                     SPDL_SINK(1)));
        TAKE_ALL(p, s.result == SPDL_SKIP ? "" : s.out == 0 ? "- -" : s.out == 1 ? "0 1" : "9 9",
                 SPDL_END);
        CHECK_EQ(s.m.lines, 2);
        DONE(p);
    }
}

SPDL_FN(just_pending, item, item) { return SPDL_PENDING; }

SPDL_FN(defers_unannounced, item, item) {
    const spdl_deferred deferred = spdl_defer(task);
    CHECK(deferred.pipeline == NULL);
    CHECK_EQ(spdl_complete(deferred, SPDL_OK, in), SPDL_E_INVALID);
    return SPDL_PENDING;
}

static void pending_has_to_be_announced(void) {
    for (int i = 0; i < CROWDS; ++i) {
        spdl_pipeline *p = START(crowds[i], COUNT_TO(4), SPDL_PIPE(just_pending, .deferred = true),
                                 SPDL_SINK(1));
        TAKE_ALL(p, "", SPDL_E_STAGE);
        failed_with(p, 1, "stage 1 'just_pending', item 0: returned SPDL_PENDING without a "
                          "call of spdl_defer");
        DONE(p);
        p = START(crowds[i], COUNT_TO(4), SPDL_PIPE(defers_unannounced), SPDL_SINK(1));
        TAKE_ALL(p, "", SPDL_E_STAGE);
        failed_with(p, 1, "stage 1 'defers_unannounced', item 0: returned SPDL_PENDING "
                          "without .deferred in its row");
        DONE(p);
    }
}

static void *defer_elsewhere(void *arg) {
    CHECK(spdl_defer((spdl_task *)arg).pipeline == NULL);
    return NULL;
}

SPDL_FN(leaks_its_task, item, item) {
    test_join(thread_of(defer_elsewhere, task));
    *out = in;
    return SPDL_OK;
}

static void only_the_call_itself_defers(void) {
    for (int i = 0; i < CROWDS; ++i) {
        misuse m = { .text = "spdl_defer: not inside of a call of this stage" };
        RUN(start_logged(crowds[i], &m,
                         SPDL_STAGES(COUNT_TO(4), SPDL_PIPE(leaks_its_task, .deferred = true),
                                     SPDL_SINK(1))),
            "0 1 2 3", SPDL_END);
        CHECK_EQ(m.lines, 4);
    }
}

/* --- many, and the end of them --- */

static void a_worker_may_have_very_many_under_way(void) {
    for (int i = 0; i < 4; ++i) {
        static desk d;
        const spdl_order order = i % 2 ? SPDL_ORDER_COMPLETION : SPDL_ORDER_INPUT;
        spdl_pipeline *p;
        d = (desk){ .wait_for = 256, .backwards = true };
        desk_open(&d, 1);
        p = START(i / 2, SPDL_SOURCE(count_up, SCRIPT(.count = 256), .buffer_size = 4,
                                     .free_item = item_free),
                  HAND_IN(&d, .concurrency = 256, .output_order = order), FOLLOW(.plus = 0),
                  SPDL_SINK(1));
        if (i % 2) {
            for (long value = 255; value >= 0; --value)
                CHECK_EQ(take_from(p, value, 1, SPDL_OK), 1);
            TAKE_ALL(p, "", SPDL_END);
        } else {
            CHECK_EQ(take_from(p, 0, 1000, SPDL_END), 256);
        }
        DONE(p);
        desk_close(&d);
    }
}

static void deferred_calls_count_in_the_concurrency(void) {
    for (int i = 1; i < CROWDS; ++i) {
        desk d = { .count = 0 };
        letter l;
        spdl_pipeline *p;
        desk_open(&d, 0);
        p = START(crowds[i], COUNT_TO(100), HAND_IN(&d, .concurrency = 5), SPDL_SINK(30));
        for (int calls = 5; calls <= 15; calls += 5) {
            await(&d.count, calls);
            sleep_us(5000);
            CHECK_EQ(__atomic_load_n(&d.count, __ATOMIC_ACQUIRE), calls);
            for (int k = 0; k < 5 && desk_take(&d, &l); ++k) desk_complete(&d, &l);
        }
        await(&d.count, 20);
        CHECK_EQ(spdl_pipeline_stop(p, 0), SPDL_TIMEOUT);
        d.clerk[d.clerks++] = thread_of(clerk, &d);
        CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        desk_close(&d);
        DONE(p);
    }
}

/* It takes its input. The result of the call has that address, and comes at times after a stop. */
SPDL_FN(takes_and_hands_in, item, item) {
    spdl_take(task);
    desk_add((desk *)spdl_ctx(task), spdl_defer(task), in);
    return SPDL_PENDING;
}

static void a_completion_at_the_address_of_a_taken_input(void) {
    for (int stops = 0; stops < 2; ++stops) {
        desk d = { .count = 0 };
        letter l;
        spdl_pipeline *p;
        desk_open(&d, 0);
        p = START(1, COUNT_TO(4),
                  SPDL_PIPE(takes_and_hands_in, .ctx = &d, .deferred = true, .concurrency = 4,
                            .free_item = item_free),
                  SPDL_SINK(4));
        await(&d.count, 4);
        if (stops) CHECK_EQ(spdl_pipeline_stop(p, 0), SPDL_TIMEOUT);
        while (desk_take(&d, &l)) desk_complete(&d, &l);
        if (!stops) TAKE_ALL(p, "0 1 2 3", SPDL_END);
        desk_close(&d);
        DONE(p);
    }
}

/* Destroy comes while calls are under way: it waits for them. */
static void destroy_waits_for_deferred_calls(void) {
    for (int i = 0; i < 2 * CROWDS; ++i) {
        desk d = { .sleep_us = 5000, .wait_for = 3, .fresh = i % 2 };
        spdl_pipeline *p;
        desk_open(&d, 1);
        p = START(crowds[i / 2], COUNT_TO(-1), HAND_IN(&d, .concurrency = 3), FOLLOW(.plus = 0),
                  SPDL_SINK(1));
        await_calls(p, &d, crowds[i / 2], 3);
        DONE(p);
        CHECK_EQ(__atomic_load_n(&d.completing, __ATOMIC_ACQUIRE), d.count);
        desk_close(&d);
    }
}

typedef struct told {
    desk at;
    char text[100];
    int lines; /* atomic */
} told;

/* Whoever was waited for goes on as soon as it is told. (The source may be held up, too.) */
static void log_of_destroy(spdl_log_level level, const char *text, void *user) {
    told *t = (told *)user;
    CHECK_EQ(level, SPDL_LOG_WARN);
    if (strstr(text, "stage 0") != NULL) return;
    snprintf(t->text, sizeof t->text, "%s", text);
    __atomic_add_fetch(&t->lines, 1, __ATOMIC_RELEASE);
    __atomic_store_n(&t->at.closed, true, __ATOMIC_RELEASE);
}

SPDL_FN(waits_until_told, item, item) {
    const told *t = (const told *)spdl_ctx(task);
    while (__atomic_load_n(&t->lines, __ATOMIC_ACQUIRE) == 0) sleep_us(100);
    return SPDL_SKIP;
}

static void destroy_tells_what_it_waits_for(void) {
    for (int deferred = 0; deferred < 2; ++deferred) {
        told t = { .at = { .wait_for = 1000 } };
        const spdl_stage waits = SPDL_PIPE(waits_until_told, .ctx = &t);
        const spdl_stage rows[] = { COUNT_TO(-1), deferred ? (spdl_stage)HAND_IN(&t.at) : waits,
                                    SPDL_SINK(1) };
        spdl_pipeline_desc desc = { .workers = 2 };
        spdl_pipeline *p = NULL;
        desc.logger.log_fn = log_of_destroy;
        desc.logger.user = &t;
        desk_open(&t.at, 1);
        REQUIRE(spdl_pipeline_create(&p, &desc, rows, 3) == SPDL_OK);
        while (stats_of(p, 1).in_flight == 0) sleep_us(100);
        DONE(p);
        desk_close(&t.at);
        CHECK_EQ(t.lines, 1);
        CHECK_STR(t.text, deferred ? "spdl_pipeline_destroy waits for a call of stage 1 "
                                     "'hand_in' to return and be completed"
                                   : "spdl_pipeline_destroy waits for a call of stage 1 "
                                     "'waits_until_told' to return");
    }
}

/* A call lasts until it is completed. */
static void the_time_of_a_call_is_booked(void) {
    for (int i = 0; i < CROWDS; ++i) {
        desk d = { .sleep_us = 2000, .fail = 3 };
        spdl_pipeline *p;
        spdl_stage_stats row;
        desk_open(&d, 1);
        p = START(crowds[i], COUNT_TO(6), HAND_IN(&d, .concurrency = 2, .max_failures = 1),
                  SPDL_SINK(1));
        CHECK_EQ(take_from_any(p), 5);
        row = stats_of(p, 1);
        CHECK(row.deferred);
        CHECK_EQ(row.tasks, 6);
        CHECK_EQ(row.failures, 1);
        CHECK(row.busy_ns >= 6 * UINT64_C(2000000));
        CHECK(row.mean_ns >= 1800000);
        desk_close(&d);
        DONE(p);
    }
}

/* A next function that does not keep its timeout is left after a wait. */
static long blocks_alive;

static void *count_alloc(size_t bytes, size_t align, void *user) {
    (void)user;
    __atomic_add_fetch(&blocks_alive, 1, __ATOMIC_RELAXED);
    return test_memory(align, bytes);
}

static void count_free(void *memory, size_t bytes, void *user) {
    (void)bytes, (void)user;
    test_memory_free(memory);
    __atomic_sub_fetch(&blocks_alive, 1, __ATOMIC_RELEASE);
}

static char left_text[SPDL_TEXT_BYTES];

static void log_of_leaving(spdl_log_level level, const char *text, void *user) {
    (void)user;
    if (level == SPDL_LOG_WARN) snprintf(left_text, sizeof left_text, "%s", text);
}

static spdl_result blocks(void *source, void **out, int64_t timeout_ns) {
    int *const gate = (int *)source;
    (void)timeout_ns;
    __atomic_store_n(&gate[1], 1, __ATOMIC_RELEASE);
    await(gate, 1);
    *out = item_make(1);
    return SPDL_OK;
}

static void destroy_leaves_a_next_function_in_the_end(void) {
    for (int workers = 0; workers < 2; ++workers) {
        static int gate[2];
        const uint64_t begun = spdl_time_ns();
        spdl_pipeline_desc desc = { .workers = TEST_WORKERS(workers) };
        spdl_pipeline *p = NULL;
        gate[0] = gate[1] = 0;
        desc.logger.log_fn = log_of_leaving;
        desc.allocator.alloc_fn = count_alloc;
        desc.allocator.free_fn = count_free;
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
                    SPDL_FROM(item, blocks, gate, .free_item = item_free, .name = "other"),
                    SPDL_SINK(1))) == SPDL_OK);
        await(&gate[1], 1);
        spdl_pipeline_destroy(p);
        CHECK_STR(left_text, "spdl_pipeline_destroy no longer waits for a call of stage 0 'other' "
                             "to return");
        open_gate(gate);
        while (__atomic_load_n(&blocks_alive, __ATOMIC_ACQUIRE) > 0) {
            REQUIRE(spdl_time_ns() - begun < 15000000000u);
            sleep_us(200);
        }
        CHECK_EQ(items_alive(), 0);
    }
}

/* As below, in a row that writes into batches. */
typedef struct places {
    spdl_deferred call[3];
    item *in[3];
    void *place[3];
    int count; /* atomic */
} places;

SPDL_FN(takes_a_place, item, item) {
    places *at = (places *)spdl_ctx(task);
    const int i = __atomic_load_n(&at->count, __ATOMIC_RELAXED);
    at->call[i] = spdl_defer(task);
    at->in[i] = in;
    at->place[i] = spdl_buffer(task);
    CHECK(at->place[i] != NULL);
    __atomic_store_n(&at->count, i + 1, __ATOMIC_RELEASE);
    return SPDL_PENDING;
}

static void places_may_be_completed_after_a_stop(void) {
    for (int other = 0; other < 3; ++other) {
        places at = { .count = 0 };
        spdl_pipeline *p = START(1, COUNT_TO(-1),
                                 SPDL_PIPE(takes_a_place, .ctx = &at, .deferred = true,
                                           .concurrency = 3, .free_item = item_free),
                                 SPDL_BATCH(2, .item_bytes = sizeof(item)), SPDL_SINK(1));
        await(&at.count, 3);
        CHECK_EQ(spdl_pipeline_stop(p, 0), SPDL_TIMEOUT);
        for (int i = 2; i >= 0; --i)
            CHECK_EQ(spdl_complete(at.call[i], SPDL_OK, i != other ? at.place[i]
                                                        : i == 1   ? (void *)item_make(7)
                                                                   : (void *)at.in[i]), SPDL_OK);
        DONE(p);
    }
}

/* Completed after the stop: the items are freed, nothing is lost. */
static void calls_may_be_completed_after_a_stop(void) {
    for (int i = 0; i < 2 * CROWDS; ++i) {
        desk d = { .wait_for = 1000, .fresh = i % 2 };
        void *taken = NULL;
        spdl_pipeline *p;
        desk_open(&d, 0);
        p = START(crowds[i / 2], COUNT_TO(-1), HAND_IN(&d, .concurrency = 3), FOLLOW(.plus = 0),
                  SPDL_SINK(1));
        await_calls(p, &d, crowds[i / 2], 3);
        CHECK_EQ(spdl_pipeline_stop(p, 1000000), SPDL_TIMEOUT);
        CHECK_EQ(spdl_pipeline_next(p, &taken, SPDL_FOREVER), SPDL_CLOSED);
        d.clerk[d.clerks++] = thread_of(clerk, &d);
        __atomic_store_n(&d.closed, true, __ATOMIC_RELEASE);
        CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        desk_close(&d);
        CHECK_EQ(items_alive(), 0);
        DONE(p);
    }
}

/* Blocks that are out; each is given back once. */
static void *block_alloc(size_t bytes, size_t align, void *user) {
    void *block = test_memory(align, bytes);
    if (block == NULL) return NULL;
    __atomic_add_fetch((long *)user, 1, __ATOMIC_RELAXED);
    return block;
}

static void block_free(void *block, size_t bytes, void *user) {
    (void)bytes;
    __atomic_sub_fetch((long *)user, 1, __ATOMIC_RELAXED);
    test_memory_free(block);
}

SPDL_FN(hand_in_buffer, item, long) {
    if ((*out = (long *)spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    desk_add((desk *)spdl_ctx(task), spdl_defer(task), in);
    return SPDL_PENDING;
}

/* The buffers of calls that a stop has dropped are freed, once each: with .item_bytes and in the
   place of a batch. */
static void buffers_of_dropped_calls_are_freed(void) {
    for (int in_place = 0; in_place < 2; ++in_place) {
        desk d = { 0 };
        long blocks = 0;
        const spdl_stage call = SPDL_PIPE(hand_in_buffer, .deferred = true, .concurrency = 3,
                                          .item_bytes = in_place ? 0 : sizeof(long), .ctx = &d);
        const spdl_stage batch = SPDL_BATCH_OF(long, 2), list = SPDL_BATCH(2);
        const spdl_stage rows[] = { COUNT_TO(-1), call, in_place ? batch : list, SPDL_SINK(1) };
        spdl_pipeline_desc desc = { .workers = 1 };
        spdl_pipeline *p = NULL;
        desc.allocator.alloc_fn = block_alloc;
        desc.allocator.free_fn = block_free;
        desc.allocator.user = &blocks;
        desk_open(&d, 0);
        REQUIRE(spdl_pipeline_create(&p, &desc, rows, 4) == SPDL_OK);
        await(&d.count, 3);
        CHECK_EQ(spdl_pipeline_stop(p, 1000000), SPDL_TIMEOUT);
        for (letter l; desk_take(&d, &l);)
            CHECK_EQ(spdl_complete(l.deferred, d.taken % 2 ? SPDL_E_IO : SPDL_SKIP, NULL), SPDL_OK);
        CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        DONE(p);
        CHECK_EQ(blocks, 0);
    }
}

/* The calls of an epoch end before those of the next begin, deferred or not. */
static void an_epoch_waits_for_deferred_calls(void) {
    for (int i = 0; i < CROWDS; ++i) {
        desk d = { .sleep_us = 200 };
        spdl_pipeline *p;
        desk_open(&d, 2);
        p = START(crowds[i], SPDL_SOURCE(count_up, SCRIPT(.count = 7), .continuous = true,
                                         .buffer_size = 20, .free_item = item_free),
                  HAND_IN(&d, .concurrency = 4), FOLLOW(.plus = 0), SPDL_SINK(1));
        for (int epoch = 0; epoch < 5; ++epoch)
            CHECK_EQ(take_from(p, 0, 100, SPDL_END), 7);
        spdl_pipeline_destroy(p);
        desk_close(&d);
        CHECK_EQ(items_alive(), 0);
    }
}

/* --- threads of a stage's own --- */

typedef struct register_ {
    test_mutex lock;
    uint64_t tid[64];
    char name[64][16];
    int count; /* of different threads */
    int wait_for; /* each call waits until there were so many */
    int inits, finis;
} register_;

static void sign_in(register_ *r) {
    const uint64_t tid = test_thread_id();
    int i = 0;
    test_lock(&r->lock);
    while (i < r->count && r->tid[i] != tid) ++i;
    if (i == r->count && i < 64) {
        r->tid[i] = tid;
#if defined(__linux__)
        prctl(PR_GET_NAME, r->name[i]);
#endif
        __atomic_store_n(&r->count, i + 1, __ATOMIC_RELEASE);
    }
    test_unlock(&r->lock);
}

SPDL_FN(signs_in, item, item) {
    register_ *r = (register_ *)spdl_ctx(task);
    CHECK(spdl__task_worker(task) >= 0 && spdl__task_worker(task) < 3);
    CHECK(r->inits == 0 || *(const int *)spdl_local(task) == spdl__task_worker(task));
    sign_in(r);
    await(&r->count, r->wait_for);
    *out = in;
    return SPDL_OK;
}

SPDL_FN(also_signs_in, item, item) {
    sign_in((register_ *)spdl_ctx(task));
    *out = in;
    return SPDL_OK;
}

static void the_thread_of_a_source_that_cannot_be_had_is_told(void) {
    for (int left = 0; left < 3; ++left) {
        spdl_error error;
        spdl_pipeline_desc desc = { .workers = 2, .error = &error };
        spdl_pipeline *p = (spdl_pipeline *)(uintptr_t)1;
        script source = { .count = 3 };
        desc.logger.log_fn = log_nothing;
        threads_left = left;
        CHECK_EQ(spdl_pipeline_create(&p, &desc,
                                      SPDL_STAGES(SPDL_SOURCE(count_up, .ctx = &source,
                                                              .threads = 1, .name = "first",
                                                              .free_item = item_free),
                                                  FOLLOW(.plus = 0), SPDL_SINK(1))),
                 SPDL_E_THREAD);
        threads_left = -1;
        CHECK(p == NULL);
        CHECK(strstr(error.text, left < 2
                                     ? "pool 'spdl': thread"
                                     : "pipeline: the thread of stage 0 'first' could not "
                                       "be created") != NULL);
        CHECK_EQ(items_alive(), 0);
    }
}

/* --- exit and fork --- */

static spdl_pipeline *running; /* reachable: what exit leaves behind is no leak */
static desk left_desk;

/* Inside of calls, and with calls that nobody completes. */
static void a_process_can_exit_in_the_middle(void) {
    for (int i = 0; i < CROWDS; ++i) {
        const pid_t child = fork();
        if (child == 0) {
            left_desk = (desk){ .wait_for = 1 };
            desk_open(&left_desk, 1);
            running = START(crowds[i], COUNT_TO(-1),
                            SPDL_PIPE(follow, SCRIPT(.sleep_us = 500), .concurrency = 2),
                            HAND_IN(&left_desk, .concurrency = 4), FOLLOW(.plus = 0), SPDL_SINK(1));
            CHECK_EQ(take_from(running, 0, 10, SPDL_OK), 10);
            exit(0);
        }
        ends_well(child);
    }
}

/* What the child of a fork may do with a pipeline that has threads. */
static void child_of_fork(spdl_pipeline *p) {
    spdl_result result = SPDL_OK;
    for (int most = 100; most > 0 && result == SPDL_OK; --most) { /* what is in the sink is there */
        void *taken;
        result = spdl_pipeline_next(p, &taken, SPDL_FOREVER);
    }
    CHECK_EQ(result, SPDL_E_INVALID);
    CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_E_INVALID);
    spdl_pipeline_destroy(p);
    CHECK_EQ(spdl_pipeline_stop(p, 0), SPDL_E_INVALID);
    _exit(0);
}

static void a_forked_child_is_told(void) {
    for (int i = 0; i < 2 * CROWDS; ++i) {
        const bool threads = i % 2 || crowds[i / 2] == 0;
        spdl_pipeline *p = START(crowds[i / 2],
                                 SPDL_SOURCE(count_up, SCRIPT(.count = -1), .threads = threads,
                                             .free_item = item_free),
                                 FOLLOW(.plus = 0), FOLLOW(.fresh = true), SPDL_SINK(2));
        pid_t child;
        CHECK_EQ(take_from(p, 0, 10, SPDL_OK), 10);
        child = fork();
        if (child == 0) child_of_fork(p);
        ends_well(child);
        CHECK_EQ(take_from(p, 10, 100, SPDL_OK), 100); /* the parent goes on */
        DONE(p);
    }
}

/* Without threads there is nothing that a fork could leave behind: both go on. */
static void a_pipeline_without_threads_survives_a_fork(void) {
    spdl_pipeline *p = START(0, COUNT_TO(100), FOLLOW(.plus = 0), SPDL_SINK(2));
    pid_t child;
    CHECK_EQ(take_from(p, 0, 10, SPDL_OK), 10);
    child = fork();
    if (child == 0) {
        CHECK_EQ(take_from(p, 10, 1000, SPDL_END), 90);
        CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        DONE(p);
        _exit(0);
    }
    ends_well(child);
    CHECK_EQ(take_from(p, 10, 1000, SPDL_END), 90);
    DONE(p);
}

TEST_TABLE(defer) {
    TEST_CASE(others_may_complete_a_call),
    TEST_CASE(a_deferred_call_takes_no_time_of_others),
    TEST_CASE(a_completion_wakes_who_waits),
    TEST_CASE(what_a_completion_frees_may_stop),
    TEST_CASE(calls_are_completed_in_any_order),
    TEST_CASE(a_call_may_complete_itself),
    TEST_CASE(a_thread_that_ends_may_complete),
    TEST_CASE(a_completion_may_be_a_failure),
    TEST_CASE(a_failure_without_a_text_has_none),
    TEST_CASE(the_text_of_a_completion_arrives_whole),
    TEST_CASE(a_completion_with_no_result_is_a_failure),
    TEST_CASE(a_call_is_completed_once),
    TEST_CASE(a_completion_judges_what_was_misused),
    TEST_CASE(a_deferred_call_may_return_after_all),
    TEST_CASE(what_was_completed_in_vain_is_freed_once),
    TEST_CASE(pending_has_to_be_announced),
    TEST_CASE(only_the_call_itself_defers),
    TEST_CASE(a_worker_may_have_very_many_under_way),
    TEST_CASE(deferred_calls_count_in_the_concurrency),
    TEST_CASE(a_completion_at_the_address_of_a_taken_input),
    TEST_CASE(destroy_waits_for_deferred_calls),
    TEST_CASE(destroy_tells_what_it_waits_for),
    TEST_CASE(destroy_leaves_a_next_function_in_the_end),
    TEST_CASE(places_may_be_completed_after_a_stop),
    TEST_CASE(calls_may_be_completed_after_a_stop),
    TEST_CASE(buffers_of_dropped_calls_are_freed),
    TEST_CASE(the_time_of_a_call_is_booked),
    TEST_CASE(an_epoch_waits_for_deferred_calls),
    TEST_CASE(the_thread_of_a_source_that_cannot_be_had_is_told),
    TEST_CASE(a_process_can_exit_in_the_middle),
    TEST_CASE(a_forked_child_is_told),
    TEST_CASE(a_pipeline_without_threads_survives_a_fork),
    TEST_END,
};
