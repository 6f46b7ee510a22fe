/* The headspace of loops whose headspace is known, in short windows, what their sources may answer,
   who frees the items, and the sentences. Planted times are sleeps, so that a loaded machine has
   them, too. */
#define SPDL__WINDOW_NS 60000000
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "test.h"

#include <poll.h>

static void sleep_ms(int ms) { (void)poll(NULL, 0, ms); }

/* --- a loop of which everything is counted --- */

enum { ITEM_ALIVE = 0x600d600d };

static int items_made, items_freed;

static void item_free(void *memory) {
    uint32_t *item = (uint32_t *)memory;
    CHECK_EQ(*item, ITEM_ALIVE);
    *item = 0;
    ++items_freed;
    free(item);
}

typedef struct loop {
    int next_ms, step_ms; /* how long they sleep */
    int beside_ms;        /* and a step in the 20 ms after a call of next */
    int count, epoch;     /* items there are, items to an epoch; 0: no end */
    spdl_result last;     /* what comes after them */
    int calls, ends;
    uint64_t asked_ns;
    bool nothing; /* items are NULL */
} loop;

static spdl_result loop_next(void *source, void **item, int64_t timeout_ns) {
    loop *l = (loop *)source;
    uint32_t *made = NULL;
    CHECK_EQ(timeout_ns, SPDL_FOREVER);
    if (l->next_ms > 0) sleep_ms(l->next_ms);
    l->asked_ns = spdl_time_ns();
    if (l->count > 0 && l->calls == l->count) {
        ++l->ends;
        return l->last;
    }
    if (l->epoch > 0 && l->calls == l->epoch * (l->ends + 1)) {
        ++l->ends;
        return SPDL_END;
    }
    ++l->calls;
    if (!l->nothing) {
        made = (uint32_t *)malloc(sizeof *made);
        REQUIRE(made != NULL);
        *made = ITEM_ALIVE;
        ++items_made;
    }
    *item = made;
    return SPDL_OK;
}

static void loop_step(void *ctx, void *item) {
    const loop *l = (const loop *)ctx;
    CHECK(l->nothing ? item == NULL : *(const uint32_t *)item == ITEM_ALIVE);
    if (l->step_ms > 0) sleep_ms(l->step_ms);
    if (l->beside_ms > 0 && spdl_time_ns() - l->asked_ns < 20000000) sleep_ms(l->beside_ms);
}

static spdl_headspace_desc desc_of(loop *l, double seconds) {
    spdl_headspace_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.next = loop_next;
    desc.source = desc.ctx = l;
    desc.step = loop_step;
    desc.free_item = item_free;
    desc.seconds = seconds;
    return desc;
}

static spdl_headspace_report measured(loop *l, double seconds) {
    const spdl_headspace_desc desc = desc_of(l, seconds);
    spdl_headspace_report report;
    CHECK_EQ(spdl_headspace(&desc, &report), SPDL_OK);
    CHECK_EQ(items_freed, items_made);
    CHECK_EQ(report.items, l->calls);
    return report;
}

static bool within(double value, double low, double high) {
    if (low <= value && value <= high) return true;
    printf("%g is not from %g to %g\n", value, low, high);
    return false;
}

/* --- planted loops: of intervals only what also holds when others have the processors --- */

static void planted_wait_is_found(void) {
    TEST_JUDGES_COSTS();
    loop l = { .next_ms = 3, .step_ms = 1 };
    const spdl_headspace_report report = measured(&l, 2.5);
    CHECK(report.gain.known && report.gain.rounds >= 5);
    CHECK(report.kind != SPDL_HEADSPACE_FEW);
    CHECK(within(report.gain.value, 2, 8) && within(report.waiting, 0.4, 0.95));
    CHECK(report.gain.low <= report.gain.value && report.gain.value <= report.gain.high);
    CHECK(within(report.harm.value, 0.5, 2));
    CHECK(within(report.ceiling / report.today, report.gain.value / 2, report.gain.value * 2));
    CHECK_EQ(strstr(report.text, "oading costs ") != NULL, true);
    CHECK(!report.ended);
}

/* Steps with a period: one in ten takes long. Windows meet it at every phase. */
static void period_step(void *ctx, void *item) {
    static int steps;
    (void)ctx, (void)item;
    sleep_ms(steps++ % 10 == 9 ? 60 : 1);
}

static void planted_periods_are_met_at_every_phase(void) {
    TEST_JUDGES_COSTS();
    loop l = { .next_ms = 6 };
    spdl_headspace_desc desc = desc_of(&l, 8);
    spdl_headspace_report report;
    desc.step = period_step;
    CHECK_EQ(spdl_headspace(&desc, &report), SPDL_OK);
    CHECK_EQ(items_freed, items_made);
    CHECK(report.gain.known); /* 129 ms to 69 */
    CHECK(within(report.gain.low, 0.8, 2.1) && within(report.gain.high, 1.7, 4));
    CHECK(report.gain.high - report.gain.low > 0.05); /* it knows how well it knows */
}

/* The steps are slower while the source is asked: nothing is waited for, all of it is harm. */
static void planted_harm_is_found(void) {
    TEST_JUDGES_COSTS();
    loop l = { .step_ms = 2, .beside_ms = 4 };
    const spdl_headspace_report report = measured(&l, 2);
    CHECK(within(report.harm.value, 1.4, 5) && within(report.waiting, 0, 0.2));
    CHECK(report.harm.known && within(report.gain.value / report.harm.value, 0.8, 1.4));
}

/* An interval of 95 % may well miss 1 now and then: not what is looked at here. */
static void planted_nothing_is_nothing(void) {
    TEST_JUDGES_COSTS();
    loop l = { .step_ms = 1 };
    const spdl_headspace_report report = measured(&l, 2);
    CHECK(report.gain.known);
    CHECK(within(report.gain.value, 0.7, 1.4) && within(report.gain.low, 0, 1.2));
    CHECK(within(report.waiting, 0, 0.2));
}

/* A pipeline that is the limit, with room for more than what it makes in a window: the loop must
   not seem to go on as fast while it lives on what was loaded in the pause. */
static uint64_t source_ns, source_calls; /* on one worker */

SPDL_FN(slow_source, void, void) {
    const uint64_t start = spdl_time_ns();
    (void)task;
    sleep_ms(4);
    source_ns += spdl_time_ns() - start;
    ++source_calls;
    *out = malloc(sizeof(uint32_t));
    if (*out == NULL) return SPDL_E_NOMEM;
    *(uint32_t *)*out = ITEM_ALIVE;
    __atomic_fetch_add(&items_made, 1, __ATOMIC_RELAXED);
    return SPDL_OK;
}

static void planted_buffers_are_drained(void) {
    TEST_JUDGES_COSTS();
    loop l = { .step_ms = 1 };
    spdl_headspace_desc desc = desc_of(&l, 3);
    spdl_headspace_report report;
    spdl_pipeline *p;
    spdl_pipeline_desc pipeline;
    memset(&pipeline, 0, sizeof pipeline);
    pipeline.workers = 1;
    REQUIRE(spdl_pipeline_create(&p, &pipeline, SPDL_STAGES(
        SPDL_SOURCE(slow_source, .free_item = item_free), SPDL_SINK(64))) == SPDL_OK);
    desc.next = spdl_pipeline_next;
    desc.source = p;
    desc.kept = 4;
    CHECK_EQ(spdl_headspace(&desc, &report), SPDL_OK);
    spdl_pipeline_destroy(p);
    /* what the source makes is what the loop can have; 1.7 times as much if it lives on them */
    CHECK(within(report.today * 1e-9 * (double)source_ns / (double)source_calls, 0.5, 1.35));
    CHECK(report.gain.value > 1.5);
    CHECK_EQ(items_freed, items_made);
}

/* --- sources --- */

static void source_ends(void) {
    loop l = { .count = 50, .last = SPDL_END };
    spdl_headspace_report report = measured(&l, 0.5);
    CHECK(report.ended);
    CHECK_EQ(report.kind, SPDL_HEADSPACE_FEW);
    CHECK_EQ(l.ends, 2); /* asked once more */
    CHECK_STR(report.text, "Too few rounds: 0, and 5 are needed. The source ended after 50 "
                           "items.");
    l = (loop){ .count = 1, .last = SPDL_END };
    CHECK_EQ(measured(&l, 0.5).items, 1);
}

static void source_is_empty(void) {
    loop l = { .count = 1, .calls = 1, .last = SPDL_END };
    const spdl_headspace_desc desc = desc_of(&l, 0.5);
    spdl_headspace_report report;
    CHECK_EQ(spdl_headspace(&desc, &report), SPDL_OK);
    CHECK(report.ended && report.items == 0);
}

static void source_has_epochs(void) {
    loop l = { .epoch = 7, .step_ms = 1 };
    const spdl_headspace_report report = measured(&l, 1);
    CHECK(!report.ended && l.ends > 5 && report.rounds > 0);
}

/* In each part of the measurement. */
static void source_fails(void) {
    static const int after[] = { 0, 5, 40, 200 };
    size_t i;
    for (i = 0; i < 4; ++i) {
        loop l = { .step_ms = 1, .last = SPDL_E_IO };
        spdl_headspace_desc desc = desc_of(&l, 2);
        spdl_headspace_report report;
        spdl_error error;
        char text[100];
        l.count = after[i] > 0 ? after[i] : 1;
        l.calls = after[i] > 0 ? 0 : 1;
        desc.error = &error;
        CHECK_EQ(spdl_headspace(&desc, &report), SPDL_E_IO);
        CHECK_EQ(error.result, SPDL_E_IO);
        snprintf(text, sizeof text, "headspace: next returned 'input or output error' after "
                                    "%d items", after[i]);
        CHECK_STR(error.text, text);
        CHECK(!report.ended);
        CHECK_EQ(items_freed, items_made);
    }
}

/* It ends while items that were loaded in a pause are dropped: calls of next without a step. */
typedef struct dropping {
    loop l;
    int steps, last_steps;
} dropping;

static spdl_result ends_in_a_drain(void *source, void **item, int64_t timeout_ns) {
    dropping *d = (dropping *)source;
    const bool again = d->steps > 5 && d->steps == d->last_steps;
    d->last_steps = d->steps;
    if (again) return SPDL_END;
    return loop_next(&d->l, item, timeout_ns);
}

static void drop_step(void *ctx, void *item) {
    dropping *d = (dropping *)ctx;
    ++d->steps;
    loop_step(&d->l, item);
}

static void source_ends_after_a_pause(void) {
    dropping d = { .l = { .next_ms = 2, .step_ms = 1 } };
    spdl_headspace_desc desc = desc_of(&d.l, 1);
    spdl_headspace_report report;
    desc.next = ends_in_a_drain;
    desc.step = drop_step;
    desc.source = desc.ctx = &d;
    desc.kept = 1;
    CHECK_EQ(spdl_headspace(&desc, &report), SPDL_OK);
    CHECK(report.ended && report.kind == SPDL_HEADSPACE_FEW);
    CHECK_EQ(items_freed, items_made);
}

/* The default of seconds, and items that nobody frees. */
static int plain_item = (int)ITEM_ALIVE;

static spdl_result plain_next(void *source, void **item, int64_t timeout_ns) {
    int *left = (int *)source;
    (void)timeout_ns;
    *item = &plain_item;
    return (*left)-- > 0 ? SPDL_OK : SPDL_END;
}

static void defaults_are_taken(void) {
    loop l = { .step_ms = 0 };
    spdl_headspace_desc desc = desc_of(&l, 0);
    spdl_headspace_report report;
    int left = 50;
    desc.next = plain_next;
    desc.source = &left;
    desc.free_item = NULL;
    CHECK_EQ(spdl_headspace(&desc, &report), SPDL_OK);
    CHECK(report.ended && report.items == 50);
}

/* A slow source does not use up the time for items to keep. */
static void items_to_keep_may_be_few(void) {
    loop l = { .next_ms = 20 };
    spdl_headspace_desc desc = desc_of(&l, 0.2);
    spdl_headspace_report report;
    CHECK_EQ(spdl_headspace(&desc, &report), SPDL_OK);
    CHECK(report.items < 25);
    CHECK_EQ(items_freed, items_made);
}

static void one_item_is_kept(void) {
    loop l = { .step_ms = 1 };
    spdl_headspace_desc desc = desc_of(&l, 1);
    spdl_headspace_report report;
    desc.kept = 1;
    CHECK_EQ(spdl_headspace(&desc, &report), SPDL_OK);
    CHECK(report.rounds > 0);
    CHECK_EQ(items_freed, items_made);
}

static void items_may_be_null(void) {
    loop l = { .step_ms = 1, .nothing = true };
    CHECK(measured(&l, 1).rounds > 0);
    CHECK_EQ(items_freed, 0);
}

/* Slow steps: it says how long to measure instead, and then that is enough. */
static void long_steps_need_longer(void) {
    loop l = { .step_ms = 10 };
    spdl_headspace_report report = measured(&l, 0.5);
    CHECK_EQ(report.kind, SPDL_HEADSPACE_FEW);
    CHECK(within(report.more_seconds, 0.5, 60));
    CHECK(strstr(report.text, ": measure for ") != NULL);
    report = measured(&(loop){ .step_ms = 10 }, 2 * report.more_seconds);
    CHECK(report.kind != SPDL_HEADSPACE_FEW);
}

/* --- arguments --- */

static void *no_memory(size_t bytes, size_t align, void *user) {
    (void)bytes, (void)align, (void)user;
    return NULL;
}

static void no_free(void *memory, size_t bytes, void *user) {
    (void)memory, (void)bytes, (void)user;
}

static void refused(const spdl_headspace_desc *desc, spdl_result result, const char *text) {
    spdl_headspace_report report;
    CHECK_EQ(spdl_headspace(desc, &report), result);
    CHECK_EQ(desc->error->result, result);
    CHECK_STR(desc->error->text, text);
}

static void desc_is_checked(void) {
    loop l = { .step_ms = 1 };
    spdl_headspace_desc desc, good = desc_of(&l, 1);
    spdl_headspace_report report;
    spdl_error error;
    good.error = &error;
    CHECK_EQ(spdl_headspace(NULL, &report), SPDL_E_INVALID);
    CHECK_EQ(spdl_headspace(&good, NULL), SPDL_E_INVALID);
    desc = good;
    desc.next = NULL;
    refused(&desc, SPDL_E_INVALID, "headspace: next is NULL");
    desc = good;
    desc.step = NULL;
    refused(&desc, SPDL_E_INVALID, "headspace: step is NULL");
    desc = good;
    desc.kept = -1;
    refused(&desc, SPDL_E_INVALID, "headspace: kept is -1, must be at least 1");
    desc = good;
    desc.seconds = 0.01;
    refused(&desc, SPDL_E_INVALID, "headspace: seconds is 0.01, must be 0.1 to 86400");
    desc = good;
    desc.seconds = __builtin_nan("");
    CHECK_EQ(spdl_headspace(&desc, &report), SPDL_E_INVALID);
    desc = good;
    desc.allocator.alloc_fn = no_memory;
    refused(&desc, SPDL_E_INVALID,
            "headspace: set both functions of the allocator or none");
    desc.allocator.free_fn = no_free;
    refused(&desc, SPDL_E_NOMEM, "headspace: out of memory");
    CHECK_EQ(l.calls, 0);
}

/* --- sentences --- */

/* `rounds` rounds of 100 steps per second, `gain` times as many without loading, give or take
   `spread`; `drops` of them, the first ones, were disturbed. */
static const char *sentence(int rounds, double gain, double spread, double waiting, int drops,
                            uint64_t run_steps) {
    static spdl_headspace_report report;
    static spdl__rounds r;
    int i;
    memset(&report, 0, sizeof report);
    memset(&r, 0, sizeof r);
    report.others = drops > 0 ? 0.8 : 0;
    r.round = rounds;
    r.drops = drops;
    for (i = 0; i < rounds; ++i) {
        r.items[SPDL__LIVE][i] = r.items[SPDL__STEPS][i] = 100;
        r.items[SPDL__STILL][i] = 100 * gain * (1 + spread * (i % 3 - 1));
        r.ns[SPDL__LIVE][i] = r.ns[SPDL__STILL][i] = 1e9;
        r.ns[SPDL__STEPS][i] = 1e9 * (1 - waiting);
        r.dropped[i] = i < drops;
    }
    spdl__headspace_judge(&report, &r, run_steps);
    return report.text;
}

static void sentences_of_gains(void) {
    CHECK_STR(sentence(12, 1 / 0.83, 0.02, 0.003, 0, 4320000),
              "Loading costs 17 % of a step (16 to 18), 2.0 h of this 12 h run: slower steps 16.7, "
              "waiting 0.3.");
    CHECK_STR(sentence(12, 4, 0.01, 0.75, 0, 0),
              "Loading costs 75 % of a step (75 to 75): slower steps 0.0, waiting 75.0.");
    CHECK_STR(sentence(12, 1 / 0.95, 0.01, 0.06, 0, 60000),
              "Loading costs 5.0 % of a step (4.5 to 5.5), under 1 minute of this 10 min run: "
              "slower steps 0.0, waiting 5.0.");
    CHECK_STR(sentence(12, 1.01, 0.003, 0.01, 0, 11160000),
              "Loading costs 1.0 % of a step (0.8 to 1.2), at most 0.4 h of this 31 h run: leave "
              "it.");
    CHECK_STR(sentence(12, 1.25, 0.01, 0.2, 4, 1000), /* of 12 rounds 4 do not count */
              "Loading costs 20 % of a step (20 to 21), 2.0 s of this 10 s run: slower steps 0.1, "
              "waiting 20.0.");
    CHECK_STR(sentence(10, 2, 0.01, 0, 8, 0), /* what holds is said all the same */
              "While other programs used up to 0.8 processors, in 8 of 10 rounds: Loading "
              "costs 50 % of a step (50 to 50): slower steps 49.9, waiting 0.0.");
}

static void sentences_without_a_gain(void) {
    CHECK_STR(sentence(12, 1, 0.01, 0.01, 0, 11160000),
              "No difference: loading costs at most 0.5 % of a step, 0.2 h of this 31 h run: leave "
              "it.");
    CHECK_STR(sentence(12, 1, 0.2, 0, 0, 0),
              "No difference: loading costs at most 9.8 % of a step; a longer measurement knows it "
              "better.");
    CHECK_STR(sentence(12, 1, 0.4, 0, 0, 0),
              "No difference: loading costs at most 18 % of a step; a longer measurement knows it "
              "better.");
    CHECK(strstr(sentence(12, 1, 0.01, 0, 0, UINT64_MAX), " run") == NULL); /* 5 billion years */
    CHECK_STR(sentence(12, 0.9, 0.01, 0, 0, 360000),
              "No difference: loading costs 0 % of a step: leave it.");
    CHECK_STR(sentence(4, 2, 0.01, 0, 0, 0), "Too few rounds: 4, and 5 are needed.");
    CHECK_STR(sentence(0, 1, 0, 0, 0, 1000), "Too few rounds: 0, and 5 are needed.");
}

TEST_TABLE(headspace) {
    TEST_CASE(planted_wait_is_found), TEST_CASE(planted_harm_is_found),
    TEST_CASE(planted_periods_are_met_at_every_phase),
    TEST_CASE(planted_nothing_is_nothing), TEST_CASE(planted_buffers_are_drained),
    TEST_CASE(source_ends), TEST_CASE(source_is_empty),
    TEST_CASE(source_has_epochs), TEST_CASE(source_fails), TEST_CASE(source_ends_after_a_pause),
    TEST_CASE(defaults_are_taken), TEST_CASE(items_to_keep_may_be_few), TEST_CASE(one_item_is_kept),
    TEST_CASE(items_may_be_null), TEST_CASE(long_steps_need_longer), TEST_CASE(desc_is_checked),
    TEST_CASE(sentences_of_gains), TEST_CASE(sentences_without_a_gain), TEST_END,
};
