/* Pipelines that are fed, changed while they run, and told how to be scheduled; and that the
   number of workers changes no result. */
#define SPDL__WARN_NS 50000000 /* after which a push says that nobody calls next */
#define ITEMS_PRIVATE
#include "flow.h"

#if defined(__linux__)
#include <sys/syscall.h>
#endif

#define FEED(...) SPDL_FEED(item, .free_item = item_free, .buffer_size = __VA_ARGS__)

/* --- push --- */

/* A push that is refused leaves the item to us. */
static spdl_result push(spdl_pipeline *p, long value, int64_t timeout_ns) {
    item *it = item_make(value);
    const spdl_result result = spdl_pipeline_push(p, it, timeout_ns);
    if (result != SPDL_OK) item_free(it);
    return result;
}

typedef struct producer {
    spdl_pipeline *p;
    long first, count;
    int64_t timeout_ns;
    bool end;
    /* what came of it */
    long accepted, refused;
    spdl_result last;
} producer;

/* How long answers took. */
static spdl__histogram answers_of(const spdl_pipeline *p) {
    spdl__histogram times;
    spdl__row_times(p, 0, &times);
    return times;
}

/* Each item until it is accepted, or the pipeline is closed. */
static void *produce(void *arg) {
    producer *one = (producer *)arg;
    for (long i = 0; i < one->count && one->last != SPDL_CLOSED; ++i) {
        do {
            one->last = push(one->p, one->first + i, one->timeout_ns);
            if (one->last != SPDL_OK) ++one->refused, test_yield();
        } while (one->last != SPDL_OK && one->last != SPDL_CLOSED);
        one->accepted += one->last == SPDL_OK;
    }
    if (one->end) CHECK_EQ(spdl_pipeline_push_end(one->p), SPDL_OK);
    return NULL;
}

static void items_can_be_pushed(void) {
    static const int64_t timeouts[] = { SPDL_FOREVER, 0, 200000 };
    chaos_on();
    for (int i = 0; i < 3 * CROWDS; ++i) {
        producer one = { .count = 500, .timeout_ns = timeouts[i % 3], .end = true };
        test_thread thread;
        one.p = START(crowds[i / 3], FEED(1 + i % 2), FOLLOW(.fresh = true),
                      SPDL_PIPE(follow, SCRIPT(.plus = 0), .concurrency = 2), SPDL_SINK(1));
        thread = thread_of(produce, &one);
        CHECK_EQ(take_from(one.p, 0, 1000, SPDL_END), 500);
        test_join(thread);
        CHECK_EQ(one.accepted, 500);
        CHECK_EQ(push(one.p, 7, SPDL_FOREVER), SPDL_CLOSED);
        CHECK_EQ(spdl_pipeline_push_end(one.p), SPDL_OK); /* again: nothing new */
        DONE(one.p);
    }
}

static void nothing_has_to_be_pushed(void) {
    for (int i = 0; i < CROWDS; ++i) {
        void *taken;
        spdl_pipeline *p = START(crowds[i], FEED(2), FOLLOW(.plus = 0), SPDL_SINK(1));
        CHECK_EQ(spdl_pipeline_next(p, &taken, 1000000), SPDL_TIMEOUT);
        CHECK_EQ(spdl_pipeline_push_end(p), SPDL_OK);
        RUN(p, "", SPDL_END);
        DONE(START(crowds[i], FEED(2), FOLLOW(.plus = 0), SPDL_SINK(1)));
    }
}

SPDL_FN(by_parity, item, item) {
    *out = in;
    return spdl_route(task, (int)in->value % 2);
}

static void any_row_may_stand_behind_a_feed(void) {
    for (int i = 0; i < CROWDS; ++i) {
        producer one = { .count = 7, .timeout_ns = SPDL_FOREVER, .end = true };
        test_thread thread;
        one.p = START(crowds[i], FEED(1), SPDL_BATCH(3), SPDL_SINK(1));
        thread = thread_of(produce, &one);
        TAKE_BATCHES(one.p, "0 1 2|3 4 5|6", SPDL_END);
        test_join(thread);
        DONE(one.p);
        one = (producer){ .count = 7, .timeout_ns = SPDL_FOREVER, .end = true };
        one.p = START(crowds[i], FEED(1), SPDL_BRANCH(by_parity), SPDL_PATH("even"),
                      FOLLOW(.plus = 10), SPDL_PATH("odd"),
                      SPDL_PIPE(follow, SCRIPT(.plus = 0), .concurrency = 2), SPDL_MERGE(),
                      SPDL_SINK(1));
        thread = thread_of(produce, &one);
        TAKE_ALL(one.p, "10 1 12 3 14 5 16", SPDL_END);
        test_join(thread);
        DONE(one.p);
    }
}

/* As many as buffer_size wait behind a feed. */
static void a_full_feed_tells_it(void) {
    for (int i = 0; i < 2 * CROWDS; ++i) {
        const int workers = crowds[i / 2], room = i % 2 ? 4 : 1;
        int gate = 0;
        script s = { .gate = &gate, .gate_at = 0 };
        spdl_pipeline *p = START(workers, FEED(room), SPDL_PIPE(follow, .ctx = &s), SPDL_SINK(9));
        long pushed = 0;
        if (workers > 0) {
            CHECK_EQ(push(p, pushed++, 0), SPDL_OK);
            await(&s.calls, 1);
        }
        for (int k = 0; k < room; ++k) CHECK_EQ(push(p, pushed++, 0), SPDL_OK);
        CHECK_EQ(push(p, 100, 0), SPDL_FULL);
        CHECK_EQ(push(p, 100, 1000000), SPDL_TIMEOUT);
        CHECK_EQ(push(p, 100, 0), SPDL_FULL);
        open_gate(&gate);
        if (workers == 0) CHECK_EQ(take_from(p, 0, 1, SPDL_OK), 1);
        CHECK_EQ(push(p, pushed++, workers ? SPDL_SECONDS(15) : 0), SPDL_OK);
        CHECK_EQ(spdl_pipeline_push_end(p), SPDL_OK);
        CHECK_EQ(take_from(p, workers == 0, 100, SPDL_END), pushed - (workers == 0));
        DONE(p);
    }
}

static void the_newest_items_may_win(void) {
    for (int i = 0; i < CROWDS; ++i) {
        const int workers = crowds[i];
        int gate = 0;
        script s = { .gate = &gate, .gate_at = 0 };
        spdl_pipeline *p = START(workers, FEED(4, .drop_oldest = true),
                                 SPDL_PIPE(follow, .ctx = &s), SPDL_SINK(9));
        CHECK_EQ(push(p, 0, 0), SPDL_OK);
        if (workers > 0) await(&s.calls, 1);
        for (long k = 1; k <= 100; ++k) CHECK_EQ(push(p, k, k % 2 ? 0 : SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(items_alive(), workers ? 5 : 4); /* the others have been freed already */
        open_gate(&gate);
        CHECK_EQ(spdl_pipeline_push_end(p), SPDL_OK);
        TAKE_ALL(p, workers ? "0 97 98 99 100" : "97 98 99 100", SPDL_END);
        CHECK_EQ(stats_of(p, 0).tasks, 101);
        CHECK_EQ(stats_of(p, 0).skips, workers ? 96 : 97);
        CHECK_EQ(answers_of(p).count, workers ? 5 : 4);
        DONE(p);
    }
}

/* --- how long answers take --- */

/* What the answers taken so far must have taken at least and at most: both ends of every push and
   every take are known. */
typedef struct answers {
    uint64_t answers, least, most;
    uint64_t before[64], after[64]; /* the push of each item */
} answers;

static void push_timed(spdl_pipeline *p, answers *b, long value) {
    b->before[value] = spdl_time_ns();
    CHECK_EQ(push(p, value, SPDL_FOREVER), SPDL_OK);
    b->after[value] = spdl_time_ns();
}

/* Takes an answer; the oldest item in it is that of `oldest`, or its own value if that is -1. */
static spdl_result take_timed(spdl_pipeline *p, answers *b, long oldest, bool batch) {
    const uint64_t since = spdl_time_ns();
    void *taken = NULL;
    const spdl_result result = spdl_pipeline_next(p, &taken, SPDL_SECONDS(15));
    const uint64_t now = spdl_time_ns();
    if (result != SPDL_OK) return result;
    if (oldest < 0) oldest = ((item *)taken)->value % 100;
    ++b->answers;
    b->least += since > b->after[oldest] ? since - b->after[oldest] : 0;
    b->most += now - b->before[oldest];
    if (batch) spdl_batch_free(taken);
    else item_free((item *)taken);
    return result;
}

static void answers_took(spdl_pipeline *p, const answers *b) {
    const spdl__histogram times = answers_of(p);
    const uint64_t unit = b->answers << SPDL__PUSHED_BITS;
    const spdl_stage_stats feed = stats_of(p, 0);
    CHECK_EQ(times.count, b->answers);
    CHECK(times.sum_ns + unit >= b->least && times.sum_ns <= b->most + unit);
    CHECK_EQ(feed.mean_ns, times.count ? times.sum_ns / times.count : 0);
    CHECK_EQ(feed.p99_ns, spdl__histogram_percentile(&times, 0.99));
    CHECK_EQ(feed.busy_ns, 0); /* it makes no calls */
}

SPDL_FN(drops_odd, item, item) {
    *out = in;
    return in->value % 2 ? SPDL_SKIP : SPDL_OK;
}

/* From its push until it is taken, whatever rows it has passed. Here they lie in the sink first. */
static void answers_are_timed_from_their_push(void) {
    for (int i = 0; i < 3 * CROWDS; ++i) {
        answers b = { .answers = 0 };
        spdl_stats stats;
        spdl_pipeline *p =
            i % 3 == 0 ? START(crowds[i / 3], FEED(64), FOLLOW(.plus = 0), SPDL_SINK(9))
            : i % 3 == 1
                ? START(crowds[i / 3], FEED(64), SPDL_PIPE(drops_odd, .concurrency = 2),
                        SPDL_BRANCH(by_parity), SPDL_PATH("even"), FOLLOW(.plus = 100),
                        SPDL_PATH("odd"), SPDL_MERGE(), SPDL_SINK(9))
                : START(crowds[i / 3], FEED(64), FOLLOW(.plus = 0, .fresh = true),
                        SPDL_PIPE(follow, SCRIPT(.plus = 300), .concurrency = 3,
                                  .output_order = SPDL_ORDER_COMPLETION), SPDL_SINK(9));
        for (long value = 0; value < 20; ++value) push_timed(p, &b, value);
        CHECK_EQ(spdl_pipeline_push_end(p), SPDL_OK);
        sleep_us(3000);
        CHECK_EQ(take_timed(p, &b, -1, false), SPDL_OK);
        answers_took(p, &b);
        while (take_timed(p, &b, -1, false) == SPDL_OK) {}
        CHECK_EQ(b.answers, i % 3 == 1 ? 10 : 20);
        answers_took(p, &b);
        spdl_pipeline_stats(p, &stats);
        CHECK(stats.answer_wait_ns <= b.most);
        DONE(p);
    }
}

/* A batch is as old as the oldest item in it. */
static void a_batch_is_as_late_as_its_oldest(void) {
    for (int i = 0; i < CROWDS; ++i) {
        answers b = { .answers = 0 };
        spdl_pipeline *p = START(crowds[i], FEED(9), FOLLOW(.plus = 0), SPDL_BATCH(3),
                                 SPDL_PIPE(pass_batch, .concurrency = 2), SPDL_SINK(9));
        for (long value = 0; value < 7; ++value) {
            push_timed(p, &b, value);
            sleep_us(1000);
        }
        CHECK_EQ(spdl_pipeline_push_end(p), SPDL_OK);
        for (long k = 0; k < 3; ++k) CHECK_EQ(take_timed(p, &b, 3 * k, true), SPDL_OK);
        CHECK_EQ(take_timed(p, &b, 0, true), SPDL_END);
        answers_took(p, &b);
        DONE(p);
    }
}

SPDL_FN(thrice, item, item) {
    void **state = spdl_call_state(task);
    const long times = (long)(uintptr_t)*state;
    *out = item_make(in->value * 100 + times);
    *state = (void *)(uintptr_t)(times + 1);
    return times == 2 ? SPDL_OK : SPDL_AGAIN;
}

/* Each item of one that becomes many is an answer to it; the last are answers to what came last. */
static void each_of_many_answers_its_input(void) {
    for (int i = 0; i < CROWDS; ++i) {
        answers b = { .answers = 0 };
        scale s = { .limit = 1000 };
        spdl_pipeline *p = START(crowds[i], FEED(9), SCATTER(BURST(.plus = 3)), SPDL_SINK(20));
        for (long value = 0; value < 4; ++value) push_timed(p, &b, value);
        sleep_us(1000);
        for (long k = 0; k < 12; ++k) CHECK_EQ(take_timed(p, &b, k / 3, false), SPDL_OK);
        answers_took(p, &b);
        DONE(p);
        b = (answers){ .answers = 0 };
        p = START(crowds[i], FEED(9), SPDL_PIPE(thrice, .again = true, .free_item = item_free),
                  SPDL_SINK(2));
        for (long value = 0; value < 4; ++value) push_timed(p, &b, value);
        for (long k = 0; k < 12; ++k) CHECK_EQ(take_timed(p, &b, k / 3, false), SPDL_OK);
        answers_took(p, &b);
        DONE(p);
        b = (answers){ .answers = 0 };
        p = START(crowds[i], FEED(9), WEIGH(&s), SPDL_SINK(2));
        for (long value = 1; value < 4; ++value) push_timed(p, &b, value);
        CHECK_EQ(spdl_pipeline_push_end(p), SPDL_OK);
        CHECK_EQ(take_timed(p, &b, 1, false), SPDL_OK); /* the oldest that is in it */
        CHECK_EQ(take_timed(p, &b, 3, false), SPDL_END);
        answers_took(p, &b);
        DONE(p);
    }
}

/* In units of 256 ns; also on processors whose clocks differ. */
static void the_age_of_a_push_is_exact(void) {
    static const struct {
        uint64_t pushed, now, age;
    } rows[] = { { 0, 0, 0 }, { 512, 1024, 512 }, { 300, 1000, 512 }, { 1024, 512, 0 },
                 { (uint64_t)1 << 62, ((uint64_t)1 << 62) + 256, 256 },
                 { ((uint64_t)1 << 44) - 256, ((uint64_t)1 << 44) + 512, 768 }, /* it wraps */
                 { 0, (uint64_t)7200 * 1000000000, (uint64_t)7200 * 1000000000 } };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i)
        for (uint64_t result = 0; result < 3; ++result) {
            const uint64_t range = spdl__range_pushed(rows[i].pushed);
            CHECK_EQ(spdl__range_age(spdl__range_result(range, result), rows[i].now), rows[i].age);
        }
}

/* A pipeline with a source has no answers. */
static void a_source_is_asked_for_nothing(void) {
    spdl_stats stats;
    spdl_pipeline *p = START(1, COUNT_TO(5), FOLLOW(.plus = 0), SPDL_SINK(1));
    TAKE_ALL(p, "0 1 2 3 4", SPDL_END);
    spdl_pipeline_stats(p, &stats);
    CHECK_EQ(stats.answer_wait_ns, 0);
    CHECK_EQ(answers_of(p).count, 5); /* calls */
    CHECK(stats.stage[0].busy_ns > 0);
    DONE(p);
}

/* While the consumer pauses each push has room at once, as the oldest item makes way. A row that
   would need a hole for each of these is refused. */
static void drop_oldest_refuses_newest(void) {
    static const spdl_order orders[] = { SPDL_ORDER_INPUT, SPDL_ORDER_COMPLETION };
    const spdl_stage refused[] = { FEED(4, .drop_oldest = true),
                                   SPDL_PIPE(follow, SCRIPT(.plus = 0), .concurrency = 2),
                                   SPDL_SINK(3) };
    spdl_pipeline_desc desc = { .workers = 2 };
    spdl_pipeline *p = NULL;
    spdl_error error;
    desc.error = &error;
    CHECK_EQ(spdl_pipeline_create(&p, &desc, SPDL_TABLE(refused)), SPDL_E_INVALID);
    CHECK(strstr(error.text, "stage 1 'follow': several calls in input order right after a "
                             "feed with drop_oldest") != NULL);
    for (int i = 0; i < 2; ++i) {
        long last = -1;
        p = START(
            2, FEED(4, .drop_oldest = true),
            SPDL_PIPE(follow, SCRIPT(.plus = 0), .concurrency = 1 + i, .output_order = orders[i]),
            SPDL_SINK(3));
        for (long k = 0; k < 1000; ++k) {
            spdl_result result = push(p, k, 0);
            for (int tries = 0; result == SPDL_FULL && tries < 100; ++tries) { /* one was taking */
                sleep_us(100);
                result = push(p, k, 0);
            }
            CHECK_EQ(result, SPDL_OK);
        }
        CHECK_EQ(spdl_pipeline_push_end(p), SPDL_OK);
        for (item *it; SPDL_NEXT(p, &it, SPDL_SECONDS(15)) == SPDL_OK; item_free(it))
            last = it->value > last ? it->value : last;
        CHECK_EQ(last, 999);
        DONE(p);
    }
}

/* Beside readers that are at work: nothing is lost but what made way, and never the last. */
static void items_make_way_in_order(void) {
    chaos_on();
    for (int i = 0; i < 2 * CROWDS; ++i) {
        producer one = { .count = TEST_SANITIZED ? 2000 : 20000, .end = true };
        long last = -1, taken = 0;
        test_thread thread;
        one.p = START(crowds[i / 2], FEED(1 + i % 2 * 3, .drop_oldest = true), FOLLOW(.plus = 0),
                      SPDL_SINK(1));
        thread = thread_of(produce, &one);
        for (item *it; SPDL_NEXT(one.p, &it, SPDL_SECONDS(15)) == SPDL_OK;) {
            CHECK(it->value > last);
            last = it->value;
            ++taken;
            item_free(it);
        }
        test_join(thread);
        CHECK_EQ(last, one.count - 1);
        CHECK_EQ(stats_of(one.p, 0).skips + (uint64_t)taken, one.count);
        DONE(one.p);
    }
}

/* Whoever waits in push is told of a stop and of a failure. */
static void a_push_that_waits_is_closed(void) {
    for (int i = 0; i < 3 * CROWDS; ++i) {
        const int workers = crowds[i / 3];
        producer one = { .count = 1000, .timeout_ns = SPDL_FOREVER };
        const bool fails = i % 3 == 2;
        test_thread thread;
        one.p = START(workers, FEED(2),
                      FOLLOW(.every = fails ? 100 : 0, .rest = 99, .result = SPDL_E_IO),
                      SPDL_SINK(1));
        thread = thread_of(produce, &one);
        CHECK_EQ(take_from(one.p, 0, fails ? 1000 : 20, fails ? SPDL_E_IO : SPDL_OK),
                 fails ? 99 : 20);
        if (i % 3 == 0) sleep_us(3000); /* it waits by now */
        if (!fails) CHECK_EQ(spdl_pipeline_stop(one.p, SPDL_FOREVER), SPDL_OK);
        test_join(thread);
        CHECK_EQ(one.last, SPDL_CLOSED);
        CHECK(one.accepted < 1000);
        CHECK_EQ(push(one.p, 1, 0), SPDL_CLOSED);
        DONE(one.p);
    }
}

static spdl_result init_without_luck(void *ctx, int worker, void **local) {
    (void)ctx, (void)worker, (void)local;
    return SPDL_E_IO;
}

/* Nothing will ever make room then. */
static void a_push_that_waits_is_told_of_a_failed_init(void) {
    for (int i = 0; i < 2; ++i) {
        producer one = { .count = 10, .timeout_ns = SPDL_FOREVER };
        one.p = START(1 + i, FEED(2), SPDL_PIPE(follow, SCRIPT(.plus = 0),
                                                .init = init_without_luck),
                      SPDL_SINK(1));
        produce(&one);
        CHECK_EQ(one.last, SPDL_CLOSED);
        TAKE_ALL(one.p, "", SPDL_E_IO);
        DONE(one.p);
    }
}

/* A thread with deadlines: whatever the stages do, a push with a timeout of 0 comes back. */
static void a_push_is_never_held_up(void) {
    for (int i = 0; i < 2; ++i) {
        uint64_t longest = UINT64_MAX;
        for (int again = 0; again < 5 && longest > 40000000; ++again) {
            producer one = { .p = START(2, FEED(2, .drop_oldest = i != 0),
                                        FOLLOW(.sleep_us = 100000), SPDL_SINK(1)) };
            const uint64_t end = spdl_time_ns() + 150000000;
            longest = 0;
            for (uint64_t now = spdl_time_ns(); now < end; now = spdl_time_ns()) {
                const spdl_result result = push(one.p, 1, 0);
                const uint64_t took = spdl_time_ns() - now;
                CHECK(result == SPDL_OK || result == SPDL_FULL);
                if (took > longest) longest = took;
                sleep_us(500);
            }
            DONE(one.p);
        }
        CHECK(longest <= 40000000);
    }
}

static void only_a_feed_can_be_pushed_to(void) {
    item *it = item_make(1);
    spdl_pipeline *p = START(1, COUNT_TO(3), SPDL_SINK(1));
    CHECK_EQ(spdl_pipeline_push(p, it, 0), SPDL_E_INVALID);
    CHECK_EQ(spdl_pipeline_push_end(p), SPDL_E_INVALID);
    CHECK_EQ(spdl_pipeline_push(NULL, it, 0), SPDL_E_INVALID);
    CHECK_EQ(spdl_pipeline_push_end(NULL), SPDL_E_INVALID);
    item_free(it);
    RUN(p, "0 1 2", SPDL_END);
}

/* One producer at a time; a second one is told, and breaks nothing. */
static void two_producers_break_nothing(void) {
    chaos_on();
    for (int i = 0; i < CROWDS; ++i) {
        static bool seen[600];
        producer one[2];
        test_thread threads[2];
        spdl_pipeline *p = START(crowds[i], FEED(2), FOLLOW(.plus = 0), SPDL_SINK(1));
        memset(seen, 0, sizeof seen);
        for (int k = 0; k < 2; ++k) {
            one[k] = (producer){ .p = p, .first = k * 300, .count = 300, .timeout_ns = 100000 };
            threads[k] = thread_of(produce, &one[k]);
        }
        for (int k = 0; k < 600; ++k) {
            item *it = NULL;
            if (!CHECK_EQ(SPDL_NEXT(p, &it, SPDL_SECONDS(15)), SPDL_OK)) break;
            CHECK(!seen[it->value]);
            seen[it->value] = true;
            item_free(it);
        }
        for (int k = 0; k < 2; ++k) test_join(threads[k]);
        CHECK_EQ(spdl_pipeline_push_end(p), SPDL_OK);
        RUN(p, "", SPDL_END);
    }
}

static void a_second_producer_is_refused(void) {
    producer one = { .count = 10, .timeout_ns = SPDL_FOREVER };
    test_thread thread;
    one.p = START(0, FEED(2), FOLLOW(.plus = 0), SPDL_SINK(1)); /* nobody makes room */
    for (long i = 0; i < 2; ++i) CHECK_EQ(push(one.p, 200 + i, 0), SPDL_OK); /* else it passes */
    thread = thread_of(produce, &one);
    while (push(one.p, 100, 0) != SPDL_E_INVALID) sleep_us(100);
    CHECK_EQ(push(one.p, 100, SPDL_FOREVER), SPDL_E_INVALID);
    CHECK_EQ(spdl_pipeline_push_end(one.p), SPDL_E_INVALID);
    CHECK_EQ(spdl_pipeline_stop(one.p, SPDL_FOREVER), SPDL_OK);
    test_join(thread);
    CHECK_EQ(one.last, SPDL_CLOSED);
    DONE(one.p);
}

static void a_push_in_a_forked_child_is_told(void) {
    spdl_pipeline *p = START(1, FEED(2), FOLLOW(.plus = 0), SPDL_SINK(1));
    pid_t child;
    CHECK_EQ(push(p, 0, SPDL_FOREVER), SPDL_OK);
    child = fork();
    if (child == 0) {
        spdl_result result = SPDL_OK;
        for (int most = 100; most > 0 && result == SPDL_OK; --most)
            result = push(p, 9, SPDL_FOREVER);
        CHECK_EQ(result, SPDL_E_INVALID);
        spdl_pipeline_destroy(p);
        _exit(0);
    }
    ends_well(child);
    CHECK_EQ(push(p, 1, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(spdl_pipeline_push_end(p), SPDL_OK);
    RUN(p, "0 1", SPDL_END);
}

/* --- failures that are handed to the consumer --- */

static spdl_result start_answering(spdl_pipeline **p, int workers, spdl_error *error,
                                   const spdl_stage *rows, size_t count) {
    spdl_pipeline_desc desc = { .deliver_failures = true, .error = error };
    desc.workers = TEST_WORKERS(workers);
    desc.logger.log_fn = log_nothing;
    return spdl_pipeline_create(p, &desc, rows, count);
}

#define ANSWERING(p, workers, ...)                                                                 \
    REQUIRE(start_answering(&(p), (workers), NULL, SPDL_STAGES(__VA_ARGS__)) == SPDL_OK)

/* What next returned, up to the end: "3" an item, "!3" an input that failed, "(..)" a batch. */
static void take_answers(spdl_pipeline *p, notes *n, spdl_result end) {
    spdl_result result;
    void *taken = NULL;
    n->length = 0;
    for (;;) {
        const char *gap = n->length > 0 ? " " : "";
        result = spdl_pipeline_next(p, &taken, SPDL_SECONDS(15));
        if (result != SPDL_OK && result != SPDL_E_STAGE) break;
        if (result == SPDL_OK && taken != NULL && *(uint32_t *)taken != ALIVE) {
            const spdl_batch *batch = (const spdl_batch *)taken;
            note(n, "%s(%d)", gap, (int)batch->count);
            spdl_batch_free(taken);
            continue;
        }
        note(n, "%s%s%ld", gap, result == SPDL_OK ? "" : "!",
             taken != NULL ? ((item *)taken)->value : -1);
        if (taken != NULL) item_free(taken);
        if (result != SPDL_OK) CHECK(!spdl_pipeline_failed(p));
    }
    CHECK_STR(spdl_result_text(result), spdl_result_text(end));
}

static void ask_all(spdl_pipeline *p, notes *n, long count, spdl_result end) {
    producer one = { .p = p, .count = count, .timeout_ns = SPDL_FOREVER, .end = true };
    const test_thread thread = thread_of(produce, &one);
    take_answers(p, n, end);
    test_join(thread);
    DONE(p);
}

#define FAILING(...) SPDL_PIPE(follow, SCRIPT(.every = 3, .result = SPDL_E_STAGE), __VA_ARGS__)

/* In the place of its result, with one call at a time and with several, and in rows behind. */
static void a_failed_request_is_answered_in_order(void) {
    static const char *const all = "!0 1 2 !3 4 5 !6 7 8 !9 10 11";
    notes n;
    chaos_on();
    for (int i = 0; i < CROWDS; ++i) {
        script behind = { .sleep_us = 50 };
        spdl_pipeline *p;
        ANSWERING(p, crowds[i], FEED(2), FAILING(.name = "bad"), SPDL_SINK(2));
        ask_all(p, &n, 12, SPDL_END);
        CHECK_STR(n.text, all);
        ANSWERING(p, crowds[i], FEED(2), FAILING(.concurrency = 3), FOLLOW(.plus = 0),
                  SPDL_PIPE(follow, .ctx = &behind, .concurrency = 2), SPDL_SINK(1));
        ask_all(p, &n, 12, SPDL_END);
        CHECK_STR(n.text, all);
        CHECK_EQ(behind.calls, 8); /* not for those that have failed */
        ANSWERING(p, crowds[i], FEED(2), SPDL_PIPE(follow, SCRIPT(.every = 3, .result = SPDL_FULL)),
                  SPDL_SINK(2)); /* which no stage may return */
        ask_all(p, &n, 12, SPDL_END);
        CHECK_STR(n.text, all);
    }
}

SPDL_FN(fails_all_but_first, item, item) {
    script *s = (script *)spdl_ctx(task);
    __atomic_add_fetch(&s->calls, 1, __ATOMIC_RELEASE);
    *out = in;
    return in->value == 0 ? SPDL_OK : SPDL_E_STAGE;
}

/* More failures pass a row than a sitting has calls. */
static void many_failures_pass_a_row(void) {
    int gate = 0;
    script fails = { .calls = 0 }, waits = { .gate = &gate };
    void *taken;
    spdl_pipeline *p;
    ANSWERING(p, 2, FEED(100), SPDL_PIPE(fails_all_but_first, .ctx = &fails, .buffer_size = 100),
              SPDL_PIPE(follow, .ctx = &waits), SPDL_SINK(100));
    for (long value = 0; value < 80; ++value) CHECK_EQ(push(p, value, SPDL_FOREVER), SPDL_OK);
    await(&fails.calls, 80);
    open_gate(&gate);
    for (long value = 0; value < 80; ++value) {
        const spdl_result result = spdl_pipeline_next(p, &taken, SPDL_SECONDS(15));
        REQUIRE(result == (value ? SPDL_E_STAGE : SPDL_OK));
        CHECK_EQ(((item *)taken)->value, value);
        item_free(taken);
    }
    CHECK_EQ(waits.calls, 1);
    DONE(p);
}

/* Also after a pause of hours, and when the clock of the thread that put was ahead. */
static void ages_over_36_minutes(void) {
    static const double seconds[] = { 0, 1e-5, 1, 2000, 2400, 4500, 90000, 400000 };
    for (size_t i = 0; i < sizeof seconds / sizeof seconds[0]; ++i) {
        const uint64_t put = (uint64_t)1 << 50, age = (uint64_t)(seconds[i] * 1e9) >> 10 << 10;
        const spdl__item nothing = { NULL, 0, 0 };
        spdl__slot slot = { .item = NULL };
        const spdl__edge edge = { .slot = &slot };
        spdl__edge to = edge;
        spdl__put_at(&to, 7, &nothing, put);
        CHECK(spdl__slot_has(&slot, 7));
        CHECK_EQ(spdl__slot_age(&slot, put + age), age);
        CHECK_EQ(spdl__slot_age(&slot, put - age), 0);
    }
}

/* A failure that is ready is taken at once, whoever has a lock of the pipeline. */
static void next_is_wait_free_with_failures(void) {
    spdl_pipeline *p;
    void *taken = NULL;
    ANSWERING(p, 1, FEED(2), FAILING(.name = "bad"), SPDL_SINK(2));
    CHECK_EQ(push(p, 0, SPDL_FOREVER), SPDL_OK);
    while (!spdl__edge_ready(p->sink, 0)) sleep_us(100);
    spdl__lock(&p->error_lock, &p->locks);
    CHECK_EQ(spdl_pipeline_next(p, &taken, SPDL_FOREVER), SPDL_E_STAGE);
    spdl__unlock(&p->error_lock, &p->locks);
    REQUIRE(taken != NULL);
    CHECK_STR(spdl_pipeline_error(p)->text, "stage 1 'bad', item 0: value 0 is bad");
    item_free(taken);
    DONE(p);
}

static int notes_of_character(const notes *n, char which) {
    int count = 0;
    for (size_t i = 0; i < n->length; ++i) count += n->text[i] == which;
    return count;
}

/* Each is answered once, whatever lies between. */
static void a_failed_request_passes_any_row(void) {
    notes n;
    chaos_on();
    for (int i = 0; i < CROWDS; ++i) {
        spdl_pipeline *p;
        ANSWERING(p, crowds[i], FEED(4),
                  FAILING(.concurrency = 4, .output_order = SPDL_ORDER_COMPLETION), SPDL_SINK(2));
        ask_all(p, &n, 300, SPDL_END);
        CHECK_EQ(notes_of_character(&n, '!'), 100);
        CHECK_EQ(notes_of_character(&n, ' '), 299);
        ANSWERING(p, crowds[i], FEED(2), FAILING(.concurrency = 2), SPDL_BRANCH(by_parity),
                  SPDL_PATH("even"), FOLLOW(.plus = 10), SPDL_PATH("odd"),
                  SPDL_PIPE(follow, SCRIPT(.every = 5, .result = SPDL_E_IO), .concurrency = 2),
                  SPDL_MERGE(), SPDL_SINK(1));
        ask_all(p, &n, 12, SPDL_END);
        CHECK_STR(n.text, "!0 1 12 !3 14 !5 !6 7 18 !9 20 11");
        ANSWERING(p, crowds[i], FEED(1), FAILING(.name = "bad"), SPDL_BATCH(3), SPDL_SINK(1));
        ask_all(p, &n, 10, SPDL_END); /* it overtakes those that wait for their batch */
        CHECK_STR(n.text, "!0 !3 (3) !6 (3) !9");
    }
}

SPDL_FN(takes_and_fails, item, item) {
    if (in->value % 2 == 0) {
        spdl_take(task);
        item_free(in);
    }
    return SPDL_E_IO;
}
SPDL_FN(fails_to_flush, item, item) {
    if (spdl_flushing(task)) return spdl_fail(task, "the rest is bad");
    return SPDL_SKIP;
}
SPDL_FN(again_then_fails, item, item) {
    void **state = spdl_call_state(task);
    if (*state != NULL) return spdl_fail(task, "one of %ld is enough", in->value);
    *state = task;
    *out = item_make(in->value + 100);
    return SPDL_AGAIN;
}

/* An input that the call has taken is not handed on, nor is there one of a flush. */
static void a_failed_request_may_have_no_input(void) {
    notes n;
    for (int i = 0; i < CROWDS; ++i) {
        spdl_pipeline *p;
        ANSWERING(p, crowds[i], FEED(1), SPDL_PIPE(takes_and_fails), SPDL_SINK(1));
        ask_all(p, &n, 4, SPDL_END);
        CHECK_STR(n.text, "!-1 !1 !-1 !3");
        ANSWERING(p, crowds[i], FEED(1), SPDL_PIPE(fails_to_flush, .flush = true), SPDL_SINK(1));
        ask_all(p, &n, 4, SPDL_END);
        CHECK_STR(n.text, "!-1");
        ANSWERING(p, crowds[i], FEED(1),
                  SPDL_PIPE(again_then_fails, .again = true, .free_item = item_free),
                  SPDL_SINK(1));
        ask_all(p, &n, 3, SPDL_END);
        CHECK_STR(n.text, "100 !0 101 !1 102 !2");
    }
}

typedef struct late_answers {
    spdl_deferred call[8];
    int asked;
} late_answers;

SPDL_FN(answers_late, item, item) {
    late_answers *l = (late_answers *)spdl_ctx(task);
    l->call[in->value] = spdl_defer(task);
    __atomic_add_fetch(&l->asked, 1, __ATOMIC_RELEASE);
    return SPDL_PENDING;
}

static void a_deferred_call_fails_alike(void) {
    late_answers l = { .asked = 0 };
    spdl_pipeline *p;
    void *taken;
    ANSWERING(p, 2, FEED(4), SPDL_PIPE(answers_late, .ctx = &l, .deferred = true,
                                       .concurrency = 4), SPDL_SINK(4));
    for (long i = 0; i < 4; ++i) CHECK_EQ(push(p, i, SPDL_FOREVER), SPDL_OK);
    await(&l.asked, 4);
    for (int i = 3; i >= 0; --i)
        CHECK_EQ(spdl_complete_fail(l.call[i], "no answer to %d", i), SPDL_OK);
    for (long i = 0; i < 4; ++i) {
        char text[64];
        CHECK_EQ(spdl_pipeline_next(p, &taken, SPDL_SECONDS(15)), SPDL_E_STAGE);
        CHECK_EQ(((item *)taken)->value, i);
        item_free(taken);
        snprintf(text, sizeof text, "item %ld: no answer to %ld", i, i);
        CHECK(strstr(spdl_pipeline_error(p)->text, text) != NULL);
        CHECK_EQ(spdl_pipeline_error(p)->item, i);
        CHECK_EQ(spdl_pipeline_error(p)->stage, 1);
    }
    CHECK(!spdl_pipeline_failed(p));
    DONE(p);
}

/* A stop and a rewind free what nobody took, and the records are used again. */
static void failures_that_nobody_takes_are_freed(void) {
    for (int i = 1; i < CROWDS; ++i) {
        spdl_pipeline *p;
        void *taken;
        ANSWERING(p, crowds[i], FEED(3), SPDL_PIPE(follow, SCRIPT(.every = 1,
                                                                  .result = SPDL_E_IO)),
                  FOLLOW(.plus = 0), SPDL_SINK(3));
        for (int round = 0; round < 40; ++round) {
            while (push(p, round, 1000000) == SPDL_OK) {}
            CHECK_EQ(spdl_pipeline_next(p, &taken, SPDL_SECONDS(15)), SPDL_E_STAGE);
            CHECK_EQ(((item *)taken)->value, round);
            CHECK_EQ(spdl_pipeline_error(p)->result, SPDL_E_IO);
            item_free(taken);
            CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_FOREVER), SPDL_OK);
            CHECK_EQ(spdl_pipeline_error(p)->result, SPDL_OK);
        }
        CHECK_EQ(push(p, 7, SPDL_FOREVER), SPDL_OK);
        DONE(p);
    }
}

static spdl_result no_init(void *ctx, int worker, void **local) {
    (void)ctx;
    (void)worker;
    (void)local;
    return SPDL_E_STAGE;
}

/* What no item alone is to blame for ends the pipeline, and is told apart by its result. */
static void a_wrong_row_ends_all_the_same(void) {
    notes n;
    for (int i = 0; i < CROWDS; ++i) {
        producer one = { .count = 4, .timeout_ns = SPDL_FOREVER, .end = true };
        ANSWERING(one.p, crowds[i], FEED(4), SPDL_PIPE(follow, SCRIPT(.plus = 0), .init = no_init),
                  SPDL_SINK(1));
        produce(&one);
        take_answers(one.p, &n, SPDL_E_INVALID);
        CHECK_STR(n.text, "");
        CHECK(spdl_pipeline_failed(one.p));
        CHECK_EQ(spdl_pipeline_error(one.p)->stage, 1);
        DONE(one.p);
    }
}

static void only_pushed_requests_are_answered(void) {
    spdl_pipeline *p;
    spdl_error error;
    CHECK_EQ(start_answering(&p, 1, &error, SPDL_STAGES(COUNT_TO(3), SPDL_SINK(1))),
             SPDL_E_INVALID);
    CHECK(strstr(error.text, "deliver_failures of the desc is for pipelines that begin with "
                             "SPDL_FEED") != NULL);
    CHECK_EQ(start_answering(&p, 1, &error, SPDL_STAGES(FEED(1), FAILING(.max_failures = 3),
                                                        SPDL_SINK(1))), SPDL_E_INVALID);
    CHECK(strstr(error.text, "max_failures is set, but with deliver_failures") != NULL);
}

/* --- concurrency that changes --- */

static void stages_are_found_by_name(void) {
    spdl_pipeline *p = START(1, COUNT_TO(3), FOLLOW(.plus = 0), SPDL_BATCH(2),
                             SPDL_PIPE(pass_batch, .name = "collate"), SPDL_SINK(1));
    CHECK_EQ(spdl__pipeline_find(p, "count_up"), 0);
    CHECK_EQ(spdl__pipeline_find(p, "follow"), 1);
    CHECK_EQ(spdl__pipeline_find(p, "batch"), 2);
    CHECK_EQ(spdl__pipeline_find(p, "collate"), 3);
    CHECK_EQ(spdl__pipeline_find(p, "pass_batch"), -1);
    CHECK_EQ(spdl__pipeline_find(p, ""), -1);
    CHECK_EQ(spdl__pipeline_find(p, NULL), -1);
    DONE(p);
}

static void wrong_changes_are_refused(void) {
    spdl_pipeline *p = START(1, COUNT_TO(3),
                             SPDL_PIPE(follow, SCRIPT(.plus = 0), .concurrency = 4),
                             FOLLOW(.plus = 0), SPDL_BATCH(2), SPDL_SINK(1));
    static const int no_rows[] = { -1, 0, 3, 4, 5, INT16_MAX };
    for (int i = 0; i < 6; ++i)
        CHECK_EQ(spdl_pipeline_set_concurrency(p, no_rows[i], 1), SPDL_E_INVALID);
    CHECK_EQ(spdl_pipeline_set_concurrency(NULL, 1, 1), SPDL_E_INVALID);
    CHECK_EQ(spdl_pipeline_set_concurrency(p, 1, 0), SPDL_E_LIMIT);
    CHECK_EQ(spdl_pipeline_set_concurrency(p, 1, -1), SPDL_E_LIMIT);
    CHECK_EQ(spdl_pipeline_set_concurrency(p, 1, 5), SPDL_E_LIMIT);
    CHECK_EQ(spdl_pipeline_set_concurrency(p, 2, 2), SPDL_E_LIMIT);
    CHECK_EQ(spdl_pipeline_set_concurrency(p, 1, 4), SPDL_OK);
    CHECK_EQ(spdl_pipeline_set_concurrency(p, 1, 1), SPDL_OK);
    CHECK_EQ(spdl_pipeline_set_concurrency(p, 2, 1), SPDL_OK);
    RUN_BATCHES(p, "0 1|2", SPDL_END);
}

/* Up and down, while it runs: the bound holds as soon as calls that were too many have ended. */
static void concurrency_changes_while_it_runs(void) {
    static const int bounds[] = { 1, 6, 2, 5, 1, 3 };
    for (int order = 0; order < 2; ++order) {
        script s = { .sleep_us = 200 };
        spdl_pipeline *p = START(8, COUNT_TO(-1),
                                 SPDL_PIPE(follow, .ctx = &s, .concurrency = 6,
                                           .output_order = (spdl_order)order),
                                 SPDL_SINK(64));
        long next = 0;
        for (int i = 0; i < 6; ++i) {
            const uint64_t start = spdl_time_ns();
            CHECK_EQ(spdl_pipeline_set_concurrency(p, 1, bounds[i]), SPDL_OK);
            /* a call whose item was taken before may begin, or note how many there were, later */
            for (int tries = 0; tries < 5; ++tries) {
                while (__atomic_load_n(&s.inside, __ATOMIC_ACQUIRE) > bounds[i]) test_yield();
                __atomic_store_n(&s.most, 0, __ATOMIC_SEQ_CST);
                for (int items = 0; items < 100 || __atomic_load_n(&s.most, __ATOMIC_SEQ_CST) <
                                                       bounds[i]; ++items, ++next) {
                    item *it = NULL;
                    REQUIRE(spdl_time_ns() - start < 10000000000u); /* it is reached, too */
                    REQUIRE(SPDL_NEXT(p, &it, SPDL_SECONDS(15)) == SPDL_OK);
                    CHECK(order == SPDL_ORDER_COMPLETION || it->value == next);
                    item_free(it);
                }
                if (__atomic_load_n(&s.most, __ATOMIC_SEQ_CST) <= bounds[i]) break;
            }
            CHECK(__atomic_load_n(&s.most, __ATOMIC_SEQ_CST) <= bounds[i]);
        }
        DONE(p);
    }
}

/* Nobody is awake, one call is held: raising the bound starts another. */
static void a_higher_bound_takes_effect_at_once(void) {
    int begin = 0, gate = 0;
    script s = { .gate = &gate, .gate_at = 0 };
    spdl_pipeline *p = START(2, SOURCE(.count = 10, .gate = &begin, .gate_at = 0),
                             SPDL_PIPE(follow, .ctx = &s, .concurrency = 2), SPDL_SINK(10));
    CHECK_EQ(spdl_pipeline_set_concurrency(p, spdl__pipeline_find(p, "follow"), 1), SPDL_OK);
    open_gate(&begin);
    await(&s.calls, 1);
    sleep_us(20000);
    CHECK_EQ(__atomic_load_n(&s.calls, __ATOMIC_ACQUIRE), 1);
    CHECK_EQ(spdl_pipeline_set_concurrency(p, spdl__pipeline_find(p, "follow"), 2), SPDL_OK);
    await(&s.calls, 10);
    open_gate(&gate);
    CHECK_EQ(take_from(p, 0, 100, SPDL_END), 10);
    DONE(p);
}

/* --- scheduling --- */

#if defined(__linux__)
typedef struct cpu_mask_t {
    uint64_t word[16]; /* 1,024 processors */
} cpu_mask_t;

typedef struct wish {
    int nice, sched, cpu; /* cpu -1: any */
    bool met;
} wish;

static bool wish_met(const wish *w) {
    const id_t tid = (id_t)syscall(SYS_gettid);
    cpu_mask_t mask;
    bool met = getpriority(PRIO_PROCESS, tid) == w->nice;
    met = met && sched_getscheduler((pid_t)tid) == w->sched;
    if (w->cpu < 0) return met;
    memset(&mask, 0, sizeof mask);
    if (syscall(SYS_sched_getaffinity, 0L, sizeof mask, &mask) < 0) return false;
    for (int cpu = 0; cpu < 1024; ++cpu)
        met = met && (mask.word[cpu / 64] >> cpu % 64 & 1) == (uint64_t)(cpu == w->cpu);
    return met;
}

SPDL_FN(looks_at_itself, item, item) {
    CHECK(wish_met((const wish *)spdl_ctx(task)));
    *out = in;
    return SPDL_OK;
}

SPDL_FN(source_that_looks, void, item) {
    CHECK(wish_met((const wish *)spdl_ctx(task)));
    if (spdl_sequence(task) == 40) return SPDL_END;
    *out = item_make((long)spdl_sequence(task));
    return SPDL_OK;
}

/* On the workers of the pool and on the thread of a source; not on the consumer's thread. */
static void policy_holds(spdl_policy policy, wish w) {
    spdl_pipeline_desc desc = { .workers = 2, .policy = policy };
    spdl_pipeline *p = NULL;
    const wish before = { getpriority(PRIO_PROCESS, 0), sched_getscheduler(0), -1, false };
    REQUIRE(spdl_pipeline_create(
                &p, &desc,
                SPDL_STAGES(SPDL_SOURCE(source_that_looks, .ctx = &w, .threads = 1,
                                        .free_item = item_free),
                            SPDL_PIPE(looks_at_itself, .ctx = &w, .concurrency = 2),
                            SPDL_SINK(1))) == SPDL_OK);
    CHECK_EQ(take_from(p, 0, 100, SPDL_END), 40);
    CHECK(wish_met(&before));
    DONE(p);
}

static void workers_are_scheduled_as_asked(void) {
    TEST_NEEDS_LINUX();
    cpu_mask_t mask;
    int last = -1;
    const int nice_now = getpriority(PRIO_PROCESS, 0), sched_now = sched_getscheduler(0);
    if (sched_now != SCHED_OTHER) TEST_SKIP("this shell is not plain itself");
    policy_holds((spdl_policy){ .sched = SPDL_SCHED_BATCH }, (wish){ nice_now, 3, -1, false });
    policy_holds((spdl_policy){ .polite = true, .nice = 19 }, (wish){ 19, 3, -1, false });
    if (nice_now > 10) TEST_SKIP("this shell has a nice of more than 10");
    memset(&mask, 0, sizeof mask);
    REQUIRE(syscall(SYS_sched_getaffinity, 0L, sizeof mask, &mask) > 0);
    for (int cpu = 0; cpu < 1024; ++cpu)
        if (mask.word[cpu / 64] >> cpu % 64 & 1) last = cpu;
    policy_holds((spdl_policy){ .nice = 0 }, (wish){ nice_now, SCHED_OTHER, -1, false });
    policy_holds((spdl_policy){ .nice = 11 }, (wish){ 11, SCHED_OTHER, -1, false });
    policy_holds((spdl_policy){ .polite = true }, (wish){ 10, 3, -1, false });
    policy_holds((spdl_policy){ .polite = true, .nice = 12, .sched = SPDL_SCHED_IDLE },
                 (wish){ 12, 5, -1, false });
    policy_holds((spdl_policy){ .cpus = &last, .cpu_count = 1, .nice = 13 },
                 (wish){ 13, SCHED_OTHER, last, false });
}

#else
static void workers_are_scheduled_as_asked(void) { TEST_SKIP("needs Linux"); }
#endif

/* On the workers, and on the thread of a source. */
static void policy_refused(spdl_policy policy, spdl_result result, const char *text) {
    for (int own = 0; own < 2; ++own) {
        spdl_error error;
        spdl_pipeline_desc desc = { .workers = own ? SPDL_INLINE : 2, .error = &error };
        spdl_pipeline *p = (spdl_pipeline *)(uintptr_t)1;
        script pass = { .plus = 0 }, source = { .count = 3 };
        desc.policy = policy;
        desc.logger.log_fn = log_nothing;
        CHECK_EQ(spdl_pipeline_create(
                     &p, &desc,
                     SPDL_STAGES(SPDL_SOURCE(count_up, .ctx = &source, .threads = own),
                                 SPDL_PIPE(follow, .ctx = &pass), SPDL_SINK(1))),
                 result);
        CHECK(p == NULL && error.result == result);
        if (!CHECK(strstr(error.text, text) != NULL)) fprintf(stderr, "%s\n", error.text);
        CHECK(!own || source.calls == 0);
    }
}

static void a_policy_that_is_refused_is_told(void) {
    TEST_NEEDS_LINUX();
    static const int nowhere[] = { -1 }, missing[] = { 1023 }, beyond[] = { 5000 };
    const char *const by_the_system = "the system refuses the policy of ";
    policy_refused((spdl_policy){ .cpus = missing, .cpu_count = 1 }, SPDL_E_THREAD, by_the_system);
    policy_refused((spdl_policy){ .cpus = beyond, .cpu_count = 1 }, SPDL_E_THREAD, by_the_system);
    policy_refused((spdl_policy){ .cpus = nowhere, .cpu_count = 1 }, SPDL_E_INVALID,
                   "policy.cpus[0] is -1, must be at least 0");
    policy_refused((spdl_policy){ .nice = 20 }, SPDL_E_INVALID,
                   "policy.nice is 20, must be -20 to 19");
    policy_refused((spdl_policy){ .nice = -21 }, SPDL_E_INVALID,
                   "policy.nice is -21, must be -20 to 19");
    policy_refused((spdl_policy){ .sched = (spdl_sched)3 }, SPDL_E_INVALID,
                   "policy.sched is 3, which is no class");
    policy_refused((spdl_policy){ .cpu_count = -1 }, SPDL_E_INVALID, "policy.cpu_count is -1");
    policy_refused((spdl_policy){ .cpu_count = 2 }, SPDL_E_INVALID, "but policy.cpus is NULL");
}

/* --- the same at any number of workers --- */

static uint64_t chance_of(const spdl_task *task, uint64_t salt) {
    uint64_t state = salt * 1000003 + spdl_sequence(task);
    return test_random(&state);
}

/* Augments and drops by chance, seeded by the number of the item. */
SPDL_FN(augment, item, item) {
    const uint64_t chance = chance_of(task, *(const uint64_t *)spdl_ctx(task));
    if (chance % 64 == 0) sleep_us(200);
    if (chance % 7 == 0) return SPDL_SKIP;
    if (chance % 11 == 0) return SPDL_E_FORMAT;
    in->value ^= (long)(chance >> 20);
    *out = in;
    return SPDL_OK;
}

/* One becomes up to three, and none at all. */
SPDL_FN(multiply, item, item) {
    void **state = spdl_call_state(task);
    const uint64_t k = (uintptr_t)*state;
    if (k == chance_of(task, 7) % 4) return SPDL_SKIP;
    *out = item_make(in->value ^ (long)k);
    *state = (void *)(uintptr_t)(k + 1);
    return SPDL_AGAIN;
}

SPDL_FN(jitter, item, item) {
    in->value += (long)(chance_of(task, 3) >> 40);
    *out = in;
    return SPDL_OK;
}

SPDL_FN(by_chance, item, item) {
    *out = in;
    return spdl_route(task, (int)(chance_of(task, 5) % 2));
}

SPDL_FN(shuffle, spdl_batch, spdl_batch) {
    const uint64_t chance = chance_of(task, 9);
    for (size_t i = in->count; i > 1; --i) {
        const size_t k = (size_t)(chance % i);
        void *it = in->items[i - 1];
        in->items[i - 1] = in->items[k];
        in->items[k] = it;
    }
    *out = in;
    return SPDL_OK;
}

/* Every byte of every batch of two epochs, as one number. */
static uint64_t digest_of(int workers, uint64_t seed) {
    uint64_t digest = seed, ends = 0;
    spdl_pipeline *p =
        START(workers, SPDL_SOURCE(count_up, SCRIPT(.count = 300), .continuous = true,
                                   .buffer_size = 8, .free_item = item_free),
              SPDL_PIPE(augment, .ctx = &seed, .concurrency = 4, .max_failures = -1,
                        .buffer_size = 8),
              SPDL_PIPE(multiply, .again = true, .free_item = item_free), SPDL_BRANCH(by_chance),
              SPDL_PATH("a"), SPDL_PIPE(jitter, .concurrency = 3), SPDL_PATH("b"), SPDL_MERGE(),
              SPDL_BATCH(7), SPDL_PIPE(shuffle, .concurrency = 2), SPDL_SINK(3));
    while (ends < 2) {
        spdl_batch *batch = NULL;
        const spdl_result result = SPDL_NEXT(p, &batch, SPDL_SECONDS(15));
        if (result != SPDL_OK && !CHECK_EQ(result, SPDL_END)) break;
        digest = digest * 0x100000001b3u ^ (result == SPDL_OK ? batch->count : 99);
        for (size_t i = 0; result == SPDL_OK && i < batch->count; ++i)
            digest = digest * 0x100000001b3u ^ (uint64_t)((const item *)batch->items[i])->value;
        if (result == SPDL_OK) spdl_batch_free(batch);
        else ++ends;
    }
    DONE(p);
    return digest;
}

static void the_same_seed_gives_the_same_batches(void) {
    static const int workers[] = { 0, 1, 3, 16 };
    chaos_on();
    for (uint64_t seed = test_seed(), last = seed + 3; seed < last; ++seed) {
        const uint64_t digest = digest_of(0, seed);
        for (int i = 0; i < 4; ++i) CHECK_EQ(digest_of(workers[i], seed), digest);
        CHECK(digest_of(0, seed + 1) != digest);
    }
}

/* The consumer comes when the log has its line. */
typedef struct latecomer {
    spdl_pipeline *p;
    int lines; /* atomic */
} latecomer;

static void log_of_push(spdl_log_level level, const char *text, void *user) {
    latecomer *l = (latecomer *)user;
    CHECK_EQ(level, SPDL_LOG_WARN);
    CHECK_STR(text, "spdl_pipeline_push waits: nobody calls next");
    __atomic_add_fetch(&l->lines, 1, __ATOMIC_RELEASE);
}

static void *take_late(void *arg) {
    latecomer *l = (latecomer *)arg;
    await(&l->lines, 1);
    sleep_us(120000);
    CHECK_EQ(__atomic_load_n(&l->lines, __ATOMIC_ACQUIRE), 1); /* one for each wait */
    CHECK_EQ(take_from(l->p, 0, 100, SPDL_END), 9);
    return NULL;
}

static void a_push_that_waits_for_nobody_says_it(void) {
    for (int i = 0; i < 2; ++i) {
        latecomer l = { 0 };
        spdl_pipeline_desc desc = { .workers = i ? 1 : SPDL_INLINE };
        test_thread thread;
        desc.logger.log_fn = log_of_push;
        desc.logger.user = &l;
        REQUIRE(spdl_pipeline_create(&l.p, &desc, SPDL_STAGES(
                    FEED(1), SPDL_PIPE(pass_on), SPDL_SINK(1))) == SPDL_OK);
        CHECK_EQ(push(l.p, 0, SPDL_FOREVER), SPDL_OK);
        thread = thread_of(take_late, &l);
        for (long value = 1; value < 9; ++value)
            CHECK_EQ(push(l.p, value, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(spdl_pipeline_push_end(l.p), SPDL_OK);
        test_join(thread);
        DONE(l.p);
    }
}

/* A call that runs is no reason for the line, nor is a timeout. */
static void a_push_that_waits_for_a_call_is_silent(void) {
    latecomer l = { 0 };
    int gate = 0;
    spdl_pipeline_desc desc = { .workers = 1 };
    producer one = { .count = 3, .timeout_ns = SPDL_FOREVER, .end = true };
    test_thread thread;
    desc.logger.log_fn = log_of_push;
    desc.logger.user = &l;
    REQUIRE(spdl_pipeline_create(&one.p, &desc, SPDL_STAGES(
                FEED(1), FOLLOW(.gate = &gate, .gate_at = 0), SPDL_SINK(3))) == SPDL_OK);
    thread = thread_of(produce, &one);
    sleep_us(200000);
    open_gate(&gate);
    test_join(thread);
    CHECK_EQ(l.lines, 0);
    CHECK_EQ(take_from(one.p, 0, 100, SPDL_END), 3);
    DONE(one.p);
}

TEST_TABLE(push){
    TEST_CASE(a_push_that_waits_for_nobody_says_it),
    TEST_CASE(a_push_that_waits_for_a_call_is_silent),
    TEST_CASE(items_can_be_pushed),
    TEST_CASE(nothing_has_to_be_pushed),
    TEST_CASE(any_row_may_stand_behind_a_feed),
    TEST_CASE(a_full_feed_tells_it),
    TEST_CASE(the_newest_items_may_win),
    TEST_CASE(answers_are_timed_from_their_push),
    TEST_CASE(a_batch_is_as_late_as_its_oldest),
    TEST_CASE(each_of_many_answers_its_input),
    TEST_CASE(the_age_of_a_push_is_exact),
    TEST_CASE(ages_over_36_minutes),
    TEST_CASE(next_is_wait_free_with_failures),
    TEST_CASE(a_source_is_asked_for_nothing),
    TEST_CASE(drop_oldest_refuses_newest),
    TEST_CASE(items_make_way_in_order),
    TEST_CASE(a_push_that_waits_is_closed),
    TEST_CASE(a_push_that_waits_is_told_of_a_failed_init),
    TEST_CASE(a_push_is_never_held_up),
    TEST_CASE(only_a_feed_can_be_pushed_to),
    TEST_CASE(two_producers_break_nothing),
    TEST_CASE(a_second_producer_is_refused),
    TEST_CASE(a_push_in_a_forked_child_is_told),
    TEST_CASE(many_failures_pass_a_row),
    TEST_CASE(a_failed_request_is_answered_in_order),
    TEST_CASE(a_failed_request_passes_any_row),
    TEST_CASE(a_failed_request_may_have_no_input),
    TEST_CASE(a_deferred_call_fails_alike),
    TEST_CASE(failures_that_nobody_takes_are_freed),
    TEST_CASE(a_wrong_row_ends_all_the_same),
    TEST_CASE(only_pushed_requests_are_answered),
    TEST_CASE(stages_are_found_by_name),
    TEST_CASE(wrong_changes_are_refused),
    TEST_CASE(concurrency_changes_while_it_runs),
    TEST_CASE(a_higher_bound_takes_effect_at_once),
    TEST_CASE(workers_are_scheduled_as_asked),
    TEST_CASE(a_policy_that_is_refused_is_told),
    TEST_CASE(the_same_seed_gives_the_same_batches),
    TEST_END,
};
