/* Statistics: the reference pipelines, open gaps, percentiles, exact counts, texts. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* affinity */
#endif
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "test.h"

#include <math.h>

static void sleep_ns(double ns) { test_sleep_us((int64_t)(ns / 1e3)); }

static void sleep_ms(double ms) { sleep_ns(ms * 1e6); }

static spdl_pipeline *pipeline_of(int workers, const spdl_stage *rows, size_t count) {
    spdl_pipeline_desc desc = { 0 };
    spdl_pipeline *p;
    desc.workers = TEST_WORKERS(workers);
    REQUIRE(spdl_pipeline_create(&p, &desc, rows, count) == SPDL_OK);
    return p;
}

/* Items are numbers in disguise: nothing has to be freed. */
static uintptr_t count_of(const spdl_task *task) { return *(const uintptr_t *)spdl_ctx(task); }

SPDL_FN(numbers, void, void) {
    if (spdl_sequence(task) == count_of(task)) return SPDL_END;
    *out = (void *)(uintptr_t)(spdl_sequence(task) + 1);
    return SPDL_OK;
}

SPDL_FN(endless, void, void) {
    *out = (void *)(uintptr_t)(spdl_sequence(task) + 1);
    return SPDL_OK;
}

SPDL_FN(pass, void, void) {
    *out = in;
    return SPDL_OK;
}

SPDL_FN(nap, void, void) {
    sleep_ms(*(const double *)spdl_ctx(task));
    *out = in;
    return SPDL_OK;
}

static bool is_odd(const void *in) { return ((uintptr_t)in - 1) & 1; }

SPDL_FN(skip_odd, void, void) {
    *out = in;
    return is_odd(in) ? SPDL_SKIP : SPDL_OK;
}

SPDL_FN(fail_odd, void, void) {
    *out = in;
    return is_odd(in) ? spdl_fail(task, "odd") : SPDL_OK;
}

static spdl_result next_of(spdl_pipeline *p) {
    void *item;
    return spdl_pipeline_next(p, &item, SPDL_FOREVER);
}

/* --- the reference pipelines --- */

/* SPDL's simulated pipelines: an instantaneous source, up to three stages that sleep, and a trainer
   that needs 30 ms. Its table has a put wait for each of source, s1, s2, s3 and sink, because SPDL
   has a task of its own that moves items from the last stage's queue to the sink's. Here the edge
   behind the last stage is the sink, so edge k has the put wait of s(k) (k = 0: the source) and the
   get wait of the stage that reads it; the last edge has the put wait of the last stage and the get
   wait of the sink column, which is the trainer's. Readiness likewise. In the row with a batch the
   stage of 6 ms is given the 6.7 ms that it took in SPDL's measurement (149 items/s). */
enum { EDGES = 4 };

typedef struct reference {
    double stage_ms[3]; /* 0: there is none */
    int concurrency;    /* of the last stage */
    int batch;          /* of a batch behind it; 0: none */
    bool full;          /* the buffers are full in the steady state: let them fill first */
    double per_second;  /* out of the last edge */
    double put_ms[EDGES], get_ms[EDGES], ready[EDGES];
} reference;

static const double trainer_ms = 30;
static const double scale = 0.4; /* the same pipelines, faster */

static int reference_rows(const reference *r, double *ms, spdl_stage rows[6]) {
    const spdl_stage source = SPDL_SOURCE(endless);
    const spdl_stage batch = SPDL_BATCH(1);
    const spdl_stage sink = SPDL_SINK(3);
    int count = 0;
    rows[count++] = source;
    for (int i = 0; i < 3 && r->stage_ms[i] > 0; ++i) {
        const spdl_stage stage = SPDL_PIPE(nap);
        ms[i] = r->stage_ms[i] * scale;
        rows[count] = stage;
        rows[count++].ctx = &ms[i];
    }
    rows[count - 1].concurrency = r->concurrency;
    if (r->batch) {
        rows[count] = batch;
        rows[count++].size = r->batch;
    }
    rows[count++] = sink;
    return count;
}

/* Returns how much longer than asked for the trainer slept: what the machine adds on its own. */
static double reference_take(spdl_pipeline *p, const reference *r, int items) {
    double slept_ns = 0;
    for (int i = 0; i < items; ++i) {
        void *item;
        uint64_t start;
        REQUIRE(spdl_pipeline_next(p, &item, SPDL_FOREVER) == SPDL_OK);
        if (r->batch) spdl_batch_free(item);
        start = spdl_time_ns();
        sleep_ms(trainer_ms * scale);
        slept_ns += (double)(spdl_time_ns() - start);
    }
    return slept_ns / (items * trainer_ms * scale * 1e6) - 1;
}

/* Within 15 %, and a little that a machine with other things to do may add, or a sanitizer. */
static bool is_near(const char *what, int edge, double is, double expected, double slack,
                    bool tell) {
    const bool fits = fabs(is - expected) <= 0.15 * expected + slack;
    if (!fits && tell)
        fprintf(stderr, "    %s of edge %d is %.2f, not %.2f\n", what, edge, is, expected);
    return fits;
}

static bool reference_holds(const reference *r, const spdl_stats *from, const spdl_stats *to,
                            bool tell) {
    const double slack_ms = TEST_SANITIZED ? 2 : 0.7;
    const int last = to->stage_count - 1;
    const double seconds = (double)(to->elapsed_ns - from->elapsed_ns) * 1e-9;
    const double taken = (double)(to->delivered - from->delivered);
    bool held = is_near("rate", last, taken / seconds, r->per_second / scale, 0, tell);
    for (int i = 0; i <= last; ++i) {
        const spdl_edge_stats *a = &from->edge[i], *b = &to->edge[i];
        const double items = (double)(b->items - a->items), ns = items * scale * 1e6;
        const double put = (double)(b->put_wait_ns - a->put_wait_ns) / ns;
        const double get = (double)(b->get_wait_ns - a->get_wait_ns) / ns;
        const double ready = 1 - (double)(b->empty_ns - a->empty_ns) /
                                     (double)(b->elapsed_ns - a->elapsed_ns);
        held &= is_near("put wait (ms)", i, put, r->put_ms[i], slack_ms / scale, tell);
        held &= is_near("get wait (ms)", i, get, r->get_ms[i], slack_ms / scale, tell);
        held &= is_near("readiness", i, ready, r->ready[i], r->ready[i] > 0 ? 0 : 0.15, tell);
    }
    return held;
}

static bool reference_try(const reference *r, bool tell, bool *punctual) {
    double ms[3];
    spdl_stage rows[6];
    const int count = reference_rows(r, ms, rows);
    spdl_pipeline *p = pipeline_of(8, rows, (size_t)count);
    spdl_stats from, to;
    if (r->full) sleep_ms(500 * scale);
    reference_take(p, r, 9); /* until every buffer has the level it stays at */
    spdl_pipeline_stats(p, &from);
    *punctual = reference_take(p, r, 18) < 0.03;
    spdl_pipeline_stats(p, &to);
    for (int i = 1; i < count - 1 - (r->batch > 0); ++i)
        *punctual &= (double)to.stage[i].mean_ns < 1.05 * ms[i - 1] * 1e6;
    spdl_pipeline_destroy(p);
    return reference_holds(r, &from, &to, tell);
}

/* What depends on sleeps being punctual has a few attempts, and more while they are not; only the
   last ones tell what they saw. */
enum { ATTEMPTS = TEST_SANITIZED ? 8 : 5, UNPUNCTUAL_ATTEMPTS = 20 };

static void reference_check(const reference *r) {
    bool as_in_the_table = false, punctual;
    int attempts = 0, unpunctual = 0;
    while (!as_in_the_table && attempts < ATTEMPTS && unpunctual < UNPUNCTUAL_ATTEMPTS) {
        const bool last = attempts == ATTEMPTS - 1 || unpunctual == UNPUNCTUAL_ATTEMPTS - 1;
        as_in_the_table = reference_try(r, last, &punctual);
        if (punctual) ++attempts;
        else ++unpunctual;
    }
    CHECK(as_in_the_table);
}

static void reference_one_fast_stage(void) {
    static const reference r = { { 25 }, 1, 0, true, 33, { 30.2, 4.3 }, { 0 }, { 1, 1 } };
    reference_check(&r);
}

static void reference_one_slow_stage(void) {
    static const reference r = { { 35 }, 1, 0, false, 28, { 35.7, 0 }, { 0, 5.6 }, { 1, 0 } };
    reference_check(&r);
}

static void reference_slower_and_slower(void) {
    static const reference r = { { 10, 25, 40 }, 1, 0, false, 25, { 40.4, 29.8, 14.5, 0 },
                                 { 0, 0, 0, 10.1 }, { 1, 1, 1, 0 } };
    reference_check(&r);
}

static void reference_faster_and_faster(void) {
    static const reference r = { { 40, 25, 10 }, 1, 0, false, 24, { 40.9, 0, 0, 0 },
                                 { 0, 15.4, 30.3, 11.0 }, { 1, 0, 0, 0 } };
    reference_check(&r);
}

static void reference_concurrency(void) {
    static const reference r = { { 10, 25, 40 }, 2, 0, true, 33, { 30.3, 19.7, 4.5, 19.6 },
                                 { 0 }, { 1, 1, 1, 1 } };
    reference_check(&r);
}

static void reference_batch(void) {
#ifdef _WIN32
    TEST_SKIP("needs sleeps of 6.7 ms, which may end 16 ms late");
#endif
    static const reference r = { { 6.7 }, 1, 6, false, 25, { 6.6, 0, 0 }, { 0, 6.5, 10.2 },
                                 { 1, 0, 0 } };
    reference_check(&r);
}

/* --- open gaps and waits --- */

typedef struct gate {
    uintptr_t items; /* how many items may pass now */
} gate;

SPDL_FN(gated, void, void) {
    gate *g = (gate *)spdl_ctx(task);
    while (spdl_sequence(task) >= __atomic_load_n(&g->items, __ATOMIC_ACQUIRE)) {
        if (spdl_stopping(task)) return SPDL_END;
        sleep_ms(0.3);
    }
    *out = (void *)(uintptr_t)(spdl_sequence(task) + 1);
    return SPDL_OK;
}

static void *take_all(void *arg) {
    while (next_of((spdl_pipeline *)arg) == SPDL_OK) {}
    return NULL;
}

static double share(uint64_t part, uint64_t whole) { return (double)part / (double)whole; }

/* Nothing has come, or nothing comes any more: gaps and waits that are still open count. */
static void open_gaps_and_waits_are_counted(void) {
    gate g = { 0 };
    spdl_pipeline *p = pipeline_of(2, SPDL_STAGES(SPDL_SOURCE(gated, .ctx = &g), SPDL_PIPE(pass),
                                                  SPDL_SINK(2)));
    spdl_stats a, b, before;
    uint64_t elapsed;
    test_thread trainer;
    REQUIRE(test_thread_start(&trainer, take_all, p));
    for (int i = 0; i < 20; ++i) { /* the trainer may begin late */
        sleep_ms(60);
        spdl_pipeline_stats(p, &a);
        if (share(a.edge[1].get_wait_ns, a.elapsed_ns) > 0.7) break;
    }
    for (int i = 0; i < 2; ++i) {
        CHECK_EQ(a.edge[i].depth, 0);
        CHECK_EQ(a.edge[i].items, 0);
        CHECK_EQ(a.edge[i].put_wait_ns, 0);
        CHECK(a.edge[i].readiness <= 0);
        CHECK_EQ(a.edge[i].empty_ns, a.edge[i].elapsed_ns);
        CHECK(share(a.edge[i].get_wait_ns, a.elapsed_ns) > 0.7);
    }
    CHECK_EQ(a.edge[0].get_wait_ns, a.edge[0].elapsed_ns);
    CHECK_EQ(a.wait_ns, a.edge[1].get_wait_ns);
    CHECK_EQ(a.first_item_ns, 0);
    __atomic_store_n(&g.items, 5, __ATOMIC_RELEASE);
    do {
        sleep_ms(1);
        spdl_pipeline_stats(p, &a);
    } while (a.delivered < 5);
    do { /* until the trainer and the row have waited for a whole millisecond */
        before = a;
        sleep_ms(1);
        spdl_pipeline_stats(p, &a);
        elapsed = a.elapsed_ns - before.elapsed_ns;
    } while (a.edge[0].get_wait_ns - before.edge[0].get_wait_ns != elapsed ||
             a.edge[1].get_wait_ns - before.edge[1].get_wait_ns != elapsed ||
             a.wait_ns - before.wait_ns != elapsed);
    sleep_ms(50);
    spdl_pipeline_stats(p, &b);
    for (int i = 0; i < 2; ++i) { /* the edge was empty for the whole interval */
        elapsed = b.edge[i].elapsed_ns - a.edge[i].elapsed_ns;
        CHECK(elapsed >= 50000000);
        CHECK_EQ(b.edge[i].empty_ns - a.edge[i].empty_ns, elapsed);
        CHECK_EQ(b.edge[i].get_wait_ns - a.edge[i].get_wait_ns, elapsed);
    }
    CHECK_EQ(b.wait_ns - a.wait_ns, b.elapsed_ns - a.elapsed_ns);
    CHECK(b.first_item_ns >= 60000000);
    spdl_pipeline_stop(p, SPDL_FOREVER);
    test_join(trainer);
    spdl_pipeline_destroy(p);
}

/* Until both edges are full and one more item waits behind each. A worker that filled one can still
   book what it waited before, so until nothing is booked for 5 ms. */
static void await_full(spdl_pipeline *p, spdl_stats *stats) {
    uint64_t booked = 0, before;
    do {
        before = booked;
        sleep_ms(5);
        spdl_pipeline_stats(p, stats);
        booked = stats->edge[0].empty_ns + stats->edge[1].empty_ns;
    } while (stats->edge[0].depth <= stats->edge[0].buffer_size ||
             stats->edge[1].depth <= stats->edge[1].buffer_size || booked != before);
}

/* A trainer that never comes: finished items wait, the edges are full, and readiness says so. */
static void open_put_waits_are_counted(void) {
    spdl_pipeline *p = pipeline_of(2, SPDL_STAGES(SPDL_SOURCE(endless), SPDL_PIPE(pass),
                                                  SPDL_SINK(4)));
    spdl_stats a, b;
    await_full(p, &a);
    sleep_ms(50);
    spdl_pipeline_stats(p, &b);
    CHECK_EQ(b.edge[0].buffer_size, 2);
    CHECK_EQ(b.edge[1].buffer_size, 4);
    for (int i = 0; i < 2; ++i) {
        const double waited = (double)(b.edge[i].put_wait_ns - a.edge[i].put_wait_ns);
        const double elapsed = (double)(b.edge[i].elapsed_ns - a.edge[i].elapsed_ns);
        CHECK(fabs(waited / elapsed - 1) < 0.01); /* one item waits behind each */
        CHECK_EQ(b.edge[i].empty_ns, a.edge[i].empty_ns);
        CHECK_EQ(b.edge[i].get_wait_ns, a.edge[i].get_wait_ns);
        CHECK_EQ(b.edge[i].depth, b.edge[i].buffer_size + 1);
        CHECK(b.edge[i].readiness > 0.5);
    }
    CHECK_EQ(b.delivered, 0);
    CHECK_EQ(b.wait_ns, 0);
    spdl_pipeline_destroy(p);
}

/* The first item is the first that is delivered, not the first that was dropped. */
SPDL_FN(drop_two_then_wait, void, void) {
    const int *told = (const int *)spdl_ctx(task);
    *out = in;
    if ((uintptr_t)in <= 2) return SPDL_SKIP;
    while (!__atomic_load_n(told, __ATOMIC_ACQUIRE)) sleep_ms(1);
    return SPDL_OK;
}

static void first_item_is_a_delivered_one(void) {
    static uintptr_t count = 4;
    static int told;
    spdl_pipeline *p = pipeline_of(2, SPDL_STAGES(SPDL_SOURCE(numbers, .ctx = &count),
                                                  SPDL_PIPE(drop_two_then_wait, .ctx = &told),
                                                  SPDL_SINK(2)));
    spdl_stats before, stats;
    void *item = NULL;
    CHECK_EQ(spdl_pipeline_next(p, &item, SPDL_SECONDS(0.01)), SPDL_TIMEOUT);
    spdl_pipeline_stats(p, &before);
    CHECK_EQ(before.delivered, 0);
    CHECK_EQ(before.first_item_ns, 0);
    __atomic_store_n(&told, 1, __ATOMIC_RELEASE);
    CHECK_EQ(next_of(p), SPDL_OK);
    spdl_pipeline_stats(p, &stats);
    CHECK_EQ(stats.delivered, 1);
    CHECK(stats.first_item_ns >= before.elapsed_ns && stats.first_item_ns <= stats.elapsed_ns);
    spdl_pipeline_destroy(p);
}

/* After the end nothing grows any more. */
static void end_stops_the_clock(void) {
    uintptr_t count = 5;
    spdl_pipeline *p = pipeline_of(2, SPDL_STAGES(SPDL_SOURCE(numbers, .ctx = &count),
                                                  SPDL_PIPE(pass), SPDL_SINK(2)));
    spdl_stats a, b;
    while (next_of(p) == SPDL_OK) {}
    spdl_pipeline_stats(p, &a);
    sleep_ms(5);
    CHECK_EQ(next_of(p), SPDL_END);
    spdl_pipeline_stats(p, &b);
    CHECK_EQ(a.elapsed_ns, b.elapsed_ns);
    for (int i = 0; i < 2; ++i) {
        CHECK_EQ(a.edge[i].elapsed_ns, b.edge[i].elapsed_ns);
        CHECK_EQ(a.edge[i].empty_ns, b.edge[i].empty_ns);
        CHECK_EQ(a.edge[i].get_wait_ns, b.edge[i].get_wait_ns);
        CHECK_EQ(a.edge[i].put_wait_ns, b.edge[i].put_wait_ns);
        CHECK(a.edge[i].readiness >= 0 && a.edge[i].readiness <= 1);
    }
    spdl_pipeline_destroy(p);
}

/* --- percentiles --- */

static int by_size(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static spdl__histogram sums_of(const spdl__counters *counters, int count) {
    spdl__histogram sums;
    memset(&sums, 0, sizeof sums);
    for (int i = 0; i < count; ++i) spdl__counters_merge(&sums, &counters[i]);
    return sums;
}

/* Books the times on four workers and on one: both agree to the last bit, and every percentile is
   within a bucket of the true one. `times` is sorted. */
static void percentiles_hold(uint64_t *times, size_t count) {
    static const double shares[] = { 0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999, 1 };
    spdl__counters *four = (spdl__counters *)calloc(5, sizeof *four), *one = four + 4;
    spdl__histogram merged, single;
    uint64_t state = test_seed(), last = 0, sum = 0;
    REQUIRE(four != NULL);
    for (size_t i = 0; i < count; ++i) {
        spdl__counters_book(&four[test_random(&state) % 4], 1, 0, times[i]);
        spdl__counters_book(one, 1, 0, times[i]);
        sum += times[i];
    }
    merged = sums_of(four, 4);
    single = sums_of(one, 1);
    CHECK(memcmp(&merged, &single, sizeof merged) == 0);
    CHECK_EQ(single.count, count);
    CHECK_EQ(single.sum_ns, sum);
    qsort(times, count, sizeof *times, by_size);
    CHECK_EQ(single.max_ns, times[count - 1]);
    for (size_t i = 0; i < sizeof shares / sizeof shares[0]; ++i) {
        const size_t rank = (size_t)(shares[i] * (double)count);
        const double exact = (double)times[rank < count ? rank : count - 1];
        const uint64_t shown = spdl__histogram_percentile(&single, shares[i]);
        CHECK(fabs((double)shown - exact) <= exact / 16);
        CHECK(shown >= last && shown <= single.max_ns);
        last = shown;
    }
    free(four);
}

static void percentiles_of_uniform_times(void) {
    for (uint64_t unit = 1; unit <= 1000000; unit *= 1000) {
        uint64_t times[100];
        spdl__counters *counters = (spdl__counters *)calloc(1, sizeof *counters);
        spdl__histogram sums;
        REQUIRE(counters != NULL);
        for (uint64_t i = 0; i < 100; ++i) {
            times[i] = i * unit;
            spdl__counters_book(counters, 1, 0, times[i]);
        }
        sums = sums_of(counters, 1);
        if (unit == 1) {
            CHECK(fabs((double)spdl__histogram_percentile(&sums, 0.50) - 50) <= 3);
            CHECK(fabs((double)spdl__histogram_percentile(&sums, 0.90) - 90) <= 3);
            CHECK(fabs((double)spdl__histogram_percentile(&sums, 0.99) - 99) <= 3);
        }
        percentiles_hold(times, 100);
        free(counters);
    }
}

/* Every bucket and both of its borders, as a constant: the percentiles are within 1/16 of it. */
static void percentiles_of_constants(void) {
    for (unsigned power = 0; power < 43; ++power) {
        for (unsigned eighth = 8; eighth < 16; ++eighth) {
            const uint64_t start = power < 3 ? eighth - 8 : (uint64_t)eighth << (power - 3);
            for (uint64_t time = start > 0 ? start - 1 : 0; time <= start + 1; ++time) {
                uint64_t times[3] = { time, time, time };
                if (!CHECK(spdl__bucket(time) < SPDL__BUCKETS)) return;
                percentiles_hold(times, 3);
            }
        }
    }
}

/* Times too long for the histogram are in its last bucket; count, sum and maximum stay exact. */
static void percentiles_of_ages(void) {
    static const uint64_t ages[] = { (uint64_t)1 << 43, ((uint64_t)1 << 44) - 1, (uint64_t)1 << 44,
                                     (uint64_t)1 << 60 };
    for (size_t i = 0; i < sizeof ages / sizeof ages[0]; ++i) {
        spdl__counters *counters = (spdl__counters *)calloc(1, sizeof *counters);
        spdl__histogram sums;
        REQUIRE(counters != NULL);
        if (CHECK(spdl__bucket(ages[i]) < SPDL__BUCKETS)) {
            spdl__counters_book(counters, 1, 0, ages[i]);
            sums = sums_of(counters, 1);
            CHECK_EQ(sums.count, 1);
            CHECK_EQ(sums.max_ns, ages[i]);
            CHECK_EQ(sums.sum_ns, ages[i]);
            CHECK(spdl__histogram_percentile(&sums, 0.5) >= (uint64_t)1 << 42);
        }
        free(counters);
    }
}

static void percentiles_of_two_kinds(void) {
    enum { COUNT = 1000 };
    uint64_t times[COUNT];
    spdl__counters *counters = (spdl__counters *)calloc(1, sizeof *counters);
    spdl__histogram sums;
    REQUIRE(counters != NULL);
    for (size_t i = 0; i < COUNT; ++i) {
        times[i] = i % 10 == 9 ? 10000000 : 100000;
        spdl__counters_book(counters, 1, 0, times[i]);
    }
    sums = sums_of(counters, 1);
    CHECK(fabs((double)spdl__histogram_percentile(&sums, 0.50) / 1e5 - 1) <= 1.0 / 16);
    CHECK(fabs((double)spdl__histogram_percentile(&sums, 0.89) / 1e5 - 1) <= 1.0 / 16);
    CHECK(fabs((double)spdl__histogram_percentile(&sums, 0.91) / 1e7 - 1) <= 1.0 / 16);
    CHECK(fabs((double)spdl__histogram_percentile(&sums, 0.99) / 1e7 - 1) <= 1.0 / 16);
    percentiles_hold(times, COUNT);
    free(counters);
}

static void percentiles_of_lognormal_times(void) {
    enum { COUNT = 5000 };
    uint64_t times[COUNT], state = test_seed();
    for (double sigma = 0.1; sigma < 3; sigma *= 2) {
        for (size_t i = 0; i < COUNT; ++i) {
            const double u = ((double)(test_random(&state) >> 11) + 1) * 0x1p-53;
            const double v = (double)(test_random(&state) >> 11) * 0x1p-53;
            const double normal = sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
            times[i] = (uint64_t)(2e5 * exp(sigma * normal));
        }
        percentiles_hold(times, COUNT);
    }
}

static void percentiles_of_nothing(void) {
    spdl__counters *counters = (spdl__counters *)calloc(1, sizeof *counters);
    spdl__histogram sums;
    REQUIRE(counters != NULL);
    spdl__counters_book(counters, 0, 0, 1000); /* no calls took no time */
    sums = sums_of(counters, 1);
    CHECK_EQ(sums.count, 0);
    CHECK_EQ(sums.sum_ns, 0);
    CHECK_EQ(spdl__histogram_percentile(&sums, 0.5), 0);
    spdl__counters_book(counters, 10, 0, 1000); /* booked together they count as ten */
    sums = sums_of(counters, 1);
    CHECK_EQ(sums.count, 10);
    CHECK_EQ(sums.sum_ns, 1000);
    CHECK_EQ(sums.max_ns, 100);
    CHECK_EQ(spdl__histogram_percentile(&sums, 0.99), 100);
    free(counters);
}

static bool says(const char *text, const char *words) { return strstr(text, words) != NULL; }

static bool told(bool held, const char *text, bool tell) {
    if (!held && tell) fprintf(stderr, "    %s\n", text);
    return held;
}

static void verdict_check(bool (*attempt)(bool tell)) {
    bool held = false;
    for (int i = 1; i <= ATTEMPTS && !held; ++i) held = attempt(i == ATTEMPTS);
    CHECK(held);
}

/* --- histograms --- */

static void histograms_at_the_edges(void) {
    static spdl__histogram h;
    CHECK_EQ(spdl__histogram_percentile(&h, 0.5), 0);
    h.bucket[spdl__bucket(1000)] = 99;
    h.bucket[spdl__bucket(1000000)] = 1;
    h.count = 100;
    h.max_ns = 1000000;
    CHECK_EQ(spdl__histogram_percentile(&h, -1), spdl__histogram_percentile(&h, 0));
    CHECK_EQ(spdl__histogram_percentile(&h, NAN), spdl__histogram_percentile(&h, 0));
    CHECK_EQ(spdl__histogram_percentile(&h, 7), spdl__histogram_percentile(&h, 1));
    CHECK(fabs((double)spdl__histogram_percentile(&h, 0.5) / 1e3 - 1) <= 1.0 / 16);
    CHECK(fabs((double)spdl__histogram_percentile(&h, 1) / 1e6 - 1) <= 1.0 / 16);
}

/* That of a stage is what its statistics are made of. */
static void histograms_of_stages(void) {
    uintptr_t count = 300;
    spdl_pipeline *p = pipeline_of(3, SPDL_STAGES(SPDL_SOURCE(numbers, .ctx = &count),
                                                  SPDL_PIPE(fail_odd, .concurrency = 2,
                                                            .max_failures = -1),
                                                  SPDL_SINK(3)));
    static spdl__histogram h;
    spdl_stats stats;
    while (next_of(p) == SPDL_OK) {}
    spdl_pipeline_stats(p, &stats);
    spdl__row_times(p, 1, &h);
    CHECK_EQ(h.count, 150); /* failures are left out */
    CHECK_EQ(h.sum_ns / h.count, stats.stage[1].mean_ns);
    CHECK(h.sum_ns < stats.stage[1].busy_ns); /* but their time counts */
    CHECK_EQ(h.max_ns, stats.stage[1].max_ns);
    CHECK_EQ(spdl__histogram_percentile(&h, 0.9), stats.stage[1].p90_ns);
    spdl_pipeline_destroy(p);
}

/* --- edges that fill, the trainer's steps --- */

/* Nobody takes: from when something is there, no edge is empty any more. */
static void edges_that_stay_full(void) {
    spdl_pipeline *p = pipeline_of(2, SPDL_STAGES(SPDL_SOURCE(endless), SPDL_PIPE(pass),
                                                  SPDL_SINK(4)));
    spdl_stats a, b;
    await_full(p, &a);
    sleep_ms(40);
    spdl_pipeline_stats(p, &b);
    CHECK_EQ(b.edge[0].depth, b.edge[0].buffer_size + 1);
    CHECK_EQ(b.edge[1].depth, 4 + 1);
    for (int i = 0; i < 2; ++i) CHECK_EQ(b.edge[i].empty_ns, a.edge[i].empty_ns);
    spdl_pipeline_destroy(p);
}

/* A stage of 5 ms, a trainer that comes every 30 ms and takes all there is: the sink is empty for 5
   of them. */
static bool sink_is_empty_a_sixth_of_the_time(bool tell) {
    static double ms[] = { 5 };
    spdl_pipeline *p = pipeline_of(2, SPDL_STAGES(SPDL_SOURCE(endless), SPDL_PIPE(nap, .ctx = ms),
                                                  SPDL_SINK(3)));
    spdl_stats a, b;
    double empty;
    char text[100];
    for (int i = 0; i < 8; ++i) {
        if (i == 2) spdl_pipeline_stats(p, &a);
        sleep_ms(30);
        for (int k = 0; k < 4; ++k) CHECK_EQ(next_of(p), SPDL_OK); /* one was waiting behind */
    }
    spdl_pipeline_stats(p, &b);
    empty = (double)(b.edge[1].empty_ns - a.edge[1].empty_ns) /
            (double)(b.elapsed_ns - a.elapsed_ns);
    spdl_pipeline_destroy(p);
    snprintf(text, sizeof text, "empty %.2f", empty);
    return told(fabs(empty - 0.167) < 0.06, text, tell);
}

static void edges_that_fill_and_drain(void) { verdict_check(sink_is_empty_a_sixth_of_the_time); }

/* Its own time and its waits are all the time there is. */
static bool steps_are_measured(bool tell) {
    static double ms[] = { 6 };
    spdl_pipeline *p = pipeline_of(2, SPDL_STAGES(SPDL_SOURCE(endless), SPDL_PIPE(nap, .ctx = ms),
                                                  SPDL_SINK(1)));
    spdl_stats stats;
    char text[100];
    double step, all;
    sleep_ms(30); /* comes late: that is no wait, and no step */
    for (int i = 0; i < 20; ++i) {
        CHECK_EQ(next_of(p), SPDL_OK);
        sleep_ms(3);
    }
    spdl_pipeline_stats(p, &stats);
    step = (double)stats.step_mean_ns * 1e-6;
    all = (double)(stats.step_ns + stats.wait_ns + stats.first_item_ns) / (double)stats.elapsed_ns;
    spdl_pipeline_destroy(p);
    snprintf(text, sizeof text, "step %.2f ms, %.3f of the time", step, all);
    return told(step >= 3 && step < 4 && fabs(all - 1) < 0.02, text, tell);
}

static void steps_of_the_trainer(void) { verdict_check(steps_are_measured); }

/* The wait for the first item, long as it is, is not taken from the steps behind it. */
SPDL_FN(late_at_first, void, void) {
    if (spdl_sequence(task) == 0) sleep_ms(80);
    *out = (void *)(uintptr_t)(spdl_sequence(task) + 1);
    return SPDL_OK;
}

static void steps_behind_a_long_start(void) {
    spdl_pipeline *p = pipeline_of(2, SPDL_STAGES(SPDL_SOURCE(late_at_first), SPDL_SINK(3)));
    spdl_stats stats;
    for (int i = 0; i < 10; ++i) {
        CHECK_EQ(next_of(p), SPDL_OK);
        sleep_ms(3);
    }
    spdl_pipeline_stats(p, &stats);
    CHECK(stats.first_item_ns >= 80000000 && stats.wait_ns >= 70000000);
    CHECK(stats.step_ns >= 30000000 && stats.step_mean_ns >= 3000000);
    CHECK(stats.step_ns <= stats.elapsed_ns - stats.first_item_ns);
    spdl_pipeline_destroy(p);
}

/* --- the process --- */

static void burn(double ms) {
    const uint64_t end = spdl_time_ns() + (uint64_t)(ms * 1e6);
    while (spdl_time_ns() < end) {}
}

static void process_is_read(void) {
    enum { BYTES = 32 << 20 };
    spdl__process_stats a, b;
    char *memory;
    spdl__process_read(&a);
    memory = (char *)malloc(BYTES);
    REQUIRE(memory != NULL);
    for (size_t i = 0; i < BYTES; i += 4096) ((volatile char *)memory)[i] = 1;
    burn(80);
    spdl__process_read(&b);
    CHECK(b.time_ns - a.time_ns >= 80000000);
    CHECK(b.cpu_ns > a.cpu_ns && b.cpu_ns - a.cpu_ns <= b.time_ns - a.time_ns + 20000000);
    if (TEST_POSIX) /* huge pages may have made them few */
        CHECK(b.minor_faults - a.minor_faults >= 16);
    CHECK(b.major_faults >= a.major_faults);
    CHECK(!TEST_LINUX || b.resident_bytes >= a.resident_bytes + BYTES / 2);
    CHECK(b.cores_allowed > 0 && b.cores_allowed <= (double)b.cores);
    free(memory);
}

/* The readings take 0.1 ms: create and the first item do not wait for them. */
static void process_counts_from_the_second_item(void) {
    spdl_pipeline *p = pipeline_of(1, SPDL_STAGES(SPDL_SOURCE(endless), SPDL_SINK(2)));
    static spdl_stats s;
    void *item;
    REQUIRE(spdl_pipeline_next(p, &item, SPDL_FOREVER) == SPDL_OK);
    burn(100);
    CHECK_EQ(p->process_first.time_ns, 0);
    REQUIRE(spdl_pipeline_next(p, &item, SPDL_FOREVER) == SPDL_OK);
    CHECK(p->process_first.time_ns != 0);
    burn(20);
    spdl_pipeline_stats(p, &s);
    CHECK(s.process_ns >= 20000000 && s.process_ns + 90000000 <= s.elapsed_ns);
    spdl_pipeline_destroy(p);
    p = pipeline_of(1, SPDL_STAGES(SPDL_SOURCE(endless), SPDL_SINK(2)));
    spdl_pipeline_stats(p, &s); /* or from the first statistics */
    CHECK(p->process_first.time_ns != 0);
    spdl_pipeline_destroy(p);
}

#if defined(__linux__)
static void process_knows_its_affinity(void) {
    TEST_NEEDS_LINUX();
    cpu_set_t before, one;
    spdl__process_stats stats;
    spdl_pipeline *p;
    spdl_stats s;
    size_t cpu = 0;
    REQUIRE(sched_getaffinity(0, sizeof before, &before) == 0);
    while (!CPU_ISSET(cpu, &before)) ++cpu;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    REQUIRE(sched_setaffinity(0, sizeof one, &one) == 0);
    spdl__process_read(&stats);
    CHECK(stats.cores_allowed > 0 && stats.cores_allowed <= 1);
    CHECK_EQ(spdl_cores(), 1);
    REQUIRE(spdl_pipeline_create(&p, NULL, SPDL_STAGES(SPDL_SOURCE(endless),
        SPDL_PIPE(pass, .concurrency = SPDL_ALL), SPDL_SINK(1))) == SPDL_OK);
    spdl_pipeline_stats(p, &s);
    CHECK_EQ(s.workers, 1);
    CHECK_EQ(s.stage[1].concurrency, 2); /* and the thread in next */
    spdl_pipeline_destroy(p);
}
#else
static void process_knows_its_affinity(void) { TEST_SKIP("needs sched_setaffinity"); }
#endif

/* Another process burns; what it takes is not ours. */
static void process_sees_others(void) {
    TEST_NEEDS_LINUX();
    spdl__process_stats a, b;
    pid_t child;
    spdl__process_read(&a);
    child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        burn(400);
        _exit(0);
    }
    REQUIRE(waitpid(child, NULL, 0) == child);
    spdl__process_read(&b);
    CHECK(b.others_ns - a.others_ns >= 100000000); /* ticks of 10 ms; a busy machine gives less */
    CHECK(b.cpu_ns - a.cpu_ns < 200000000);
}

#if SPDL__LINUX
static void file_with(const char *folder, const char *name, const char *text) {
    char path[300], *slash = path + strlen(folder);
    FILE *file;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    while ((slash = strchr(slash + 1, '/')) != NULL) {
        *slash = '\0';
        (void)mkdir(path, 0777);
        *slash = '/';
    }
    file = fopen(path, "w");
    REQUIRE(file != NULL);
    fputs(text, file);
    fclose(file);
}

static double quota_in(const char *root, const char *self) {
    double cores = 8;
    spdl__os_cgroups(root, self, "cpu", spdl__os_quota_at, &cores);
    return cores;
}

/* Folders made as cgroups of both versions have them; `most` is 8 cores. */
static void process_knows_its_quota(void) {
    static const struct {
        const char *self;            /* /proc/self/cgroup */
        const char *files[4][2];
        double cores;
    } rows[] = {
        { "0::/a/b\n", { { "a/b/cpu.max", "max 100000\n" } }, 8 },
        { "0::/a/b\n", { { "a/b/cpu.max", "150000 100000\n" } }, 1.5 },
        { "0::/a/b\n",
          { { "a/b/cpu.max", "max 100000\n" }, { "a/cpu.max", "50000 100000\n" } }, 0.5 },
        { "0::/a\n", { { "a/cpu.max", "300000 100000\n" }, { "cpu.max", "200000 100000\n" } }, 2 },
        { "0::/not/here\n", { { "cpu.max", "200000 100000\n" } }, 2 },
        { "0::/\n", { { "cpu.max", "1600000 100000\n" } }, 8 },
        { "0::/\n", { { "cpu.max", "nonsense" } }, 8 },
        { "0::/\n", { { "cpu.max", "" } }, 8 },
        { "4:memory:/x\n3:cpu,cpuacct:/x\n0::/\n",
          { { "cpu,cpuacct/x/cpu.cfs_quota_us", "250000\n" },
            { "cpu,cpuacct/x/cpu.cfs_period_us", "100000\n" } }, 2.5 },
        { "3:cpuacct,cpu:/x/y\n",
          { { "cpuacct,cpu/x/cpu.cfs_quota_us", "100000\n" },
            { "cpuacct,cpu/x/cpu.cfs_period_us", "100000\n" },
            { "cpuacct,cpu/x/y/cpu.cfs_quota_us", "-1\n" } }, 1 },
        { "", { { NULL, NULL } }, 8 },
        { "garbage\n::\n1:cpu\n", { { NULL, NULL } }, 8 },
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) {
        char folder[64], self[128];
        test_folder(folder, sizeof folder);
        file_with(folder, "self", rows[i].self);
        for (int k = 0; k < 4 && rows[i].files[k][0] != NULL; ++k)
            file_with(folder, rows[i].files[k][0], rows[i].files[k][1]);
        snprintf(self, sizeof self, "%s/self", folder);
        if (!CHECK(fabs(quota_in(folder, self) - rows[i].cores) < 1e-9))
            fprintf(stderr, "    row %d: %g\n", (int)i, quota_in(folder, self));
        CHECK(fabs(quota_in(folder, "/nowhere") - 8) < 1e-9);
        CHECK(test_folder_remove(folder));
    }
}
#else
static void process_knows_its_quota(void) { TEST_NEEDS_LINUX(); }
#endif

/* --- counts --- */

static const int workers_tried[] = { 0, 1, 4 };
static const uintptr_t counts_tried[] = { 0, 1, 2, 10, 1000 };

static void counts_are_exact(void) {
    for (size_t w = 0; w < 3; ++w) {
        for (size_t c = 0; c < 5; ++c) {
            uintptr_t count = counts_tried[c];
            spdl_pipeline *p = pipeline_of(workers_tried[w], SPDL_STAGES(
                SPDL_SOURCE(numbers, .ctx = &count),
                SPDL_PIPE(pass, .concurrency = 3),
                SPDL_PIPE(pass, .name = "any order", .concurrency = 2,
                          .output_order = SPDL_ORDER_COMPLETION),
                SPDL_SINK(3)));
            spdl_stats stats;
            uint64_t taken = 0;
            while (next_of(p) == SPDL_OK) ++taken;
            CHECK_EQ(taken, count);
            spdl_pipeline_stats(p, &stats);
            CHECK_EQ(stats.stage_count, 3);
            CHECK_EQ(stats.workers, workers_tried[w]);
            CHECK_EQ(stats.delivered, count);
            CHECK_STR(stats.stage[0].name, "numbers");
            CHECK_STR(stats.stage[2].name, "any order");
            CHECK_EQ(stats.stage[0].kind, SPDL_KIND_SOURCE);
            CHECK_EQ(stats.stage[1].kind, SPDL_KIND_PIPE);
            CHECK_EQ(stats.stage[1].concurrency, 3);
            for (int i = 0; i < 3; ++i) {
                CHECK_EQ(stats.stage[i].tasks, count);
                CHECK_EQ(stats.stage[i].failures + stats.stage[i].skips + stats.stage[i].freed, 0);
                CHECK_EQ(stats.stage[i].in_flight, 0);
                CHECK_EQ(stats.edge[i].items, count);
                CHECK_EQ(stats.edge[i].depth, 0);
                CHECK((stats.stage[i].max_ns > 0) == (count > 0));
            }
            spdl_pipeline_destroy(p);
        }
    }
}

static void counts_of_skips_and_failures(void) {
    for (size_t w = 0; w < 3; ++w) {
        for (size_t c = 0; c < 5; ++c) {
            uintptr_t count = counts_tried[c], half = (count + 1) / 2;
            for (int fail = 0; fail < 2; ++fail) {
                spdl_stage rows[] = {
                    SPDL_SOURCE(numbers, .ctx = &count),
                    SPDL_PIPE(skip_odd, .concurrency = 2),
                    SPDL_PIPE(pass),
                    SPDL_SINK(3),
                };
                const spdl_stage failing = SPDL_PIPE(fail_odd, .concurrency = 2,
                                                     .max_failures = -1);
                spdl_pipeline *p;
                spdl_stats stats;
                if (fail) rows[1] = failing;
                p = pipeline_of(workers_tried[w], SPDL_TABLE(rows));
                while (next_of(p) == SPDL_OK) {}
                spdl_pipeline_stats(p, &stats);
                CHECK_EQ(stats.delivered, half);
                CHECK_EQ(stats.stage[0].tasks, count);
                CHECK_EQ(stats.stage[1].tasks, count);
                CHECK_EQ(stats.stage[1].skips, fail ? 0 : count - half);
                CHECK_EQ(stats.stage[1].failures, fail ? count - half : 0);
                CHECK_EQ(stats.stage[2].tasks, half);
                CHECK_EQ(stats.edge[0].items, count);
                CHECK_EQ(stats.edge[1].items, half);
                CHECK_EQ(stats.edge[2].items, half);
                spdl_pipeline_destroy(p);
            }
        }
    }
}

static void counts_of_batches(void) {
    for (size_t w = 0; w < 3; ++w) {
        for (uintptr_t count = 0; count < 14; ++count) {
            for (int drop = 0; drop < 2; ++drop) {
                const uintptr_t full = count / 3, rest = count % 3;
                const uintptr_t batches = full + (rest > 0 && !drop);
                spdl_pipeline *p = pipeline_of(workers_tried[w], SPDL_STAGES(
                    SPDL_SOURCE(numbers, .ctx = &count),
                    SPDL_BATCH(3, .drop_last = drop != 0),
                    SPDL_PIPE(pass),
                    SPDL_SINK(3)));
                spdl_stats stats;
                void *batch;
                while (spdl_pipeline_next(p, &batch, SPDL_FOREVER) == SPDL_OK)
                    spdl_batch_free(batch);
                spdl_pipeline_stats(p, &stats);
                CHECK_STR(stats.stage[1].name, "batch");
                CHECK_EQ(stats.stage[1].kind, SPDL_KIND_BATCH);
                CHECK_EQ(stats.stage[1].tasks, batches);
                CHECK_EQ(stats.stage[1].skips, drop ? rest : 0);
                CHECK_EQ(stats.stage[2].tasks, batches);
                CHECK_EQ(stats.edge[0].items, count);
                CHECK_EQ(stats.edge[1].items, batches);
                CHECK_EQ(stats.delivered, batches);
                spdl_pipeline_destroy(p);
            }
        }
    }
}

/* Whatever a stop finds is freed, and told: nothing is unaccounted for. */
static void counts_after_a_stop(void) {
    for (int taken = 0; taken < 20; ++taken) {
        spdl_pipeline *p = pipeline_of(3, SPDL_STAGES(SPDL_SOURCE(endless),
                                                      SPDL_PIPE(skip_odd, .concurrency = 2),
                                                      SPDL_PIPE(pass, .concurrency = 3),
                                                      SPDL_SINK(3)));
        spdl_stats stats;
        uint64_t freed = 0;
        for (int i = 0; i < taken; ++i) CHECK_EQ(next_of(p), SPDL_OK);
        CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        while (next_of(p) == SPDL_OK) {}
        spdl_pipeline_stats(p, &stats);
        for (int i = 0; i < 3; ++i) {
            freed += stats.stage[i].freed;
            CHECK_EQ(stats.stage[i].in_flight, 0);
        }
        CHECK_EQ(stats.stage[0].tasks, stats.delivered + stats.stage[1].skips + freed);
        spdl_pipeline_destroy(p);
    }
}

/* --- times --- */

SPDL_FN(slow_failures, void, void) {
    *out = in;
    sleep_ms(is_odd(in) ? 8 : 1);
    return is_odd(in) ? spdl_fail(task, "slow") : SPDL_OK;
}

static void failures_are_not_in_the_times(void) {
    uintptr_t count = 20;
    spdl_pipeline *p = pipeline_of(2, SPDL_STAGES(SPDL_SOURCE(numbers, .ctx = &count),
                                                  SPDL_PIPE(slow_failures, .max_failures = -1),
                                                  SPDL_SINK(3)));
    spdl_stats stats;
    while (next_of(p) == SPDL_OK) {}
    spdl_pipeline_stats(p, &stats);
    CHECK_EQ(stats.stage[1].tasks, 20);
    CHECK_EQ(stats.stage[1].failures, 10);
    CHECK(stats.stage[1].busy_ns >= 90000000 && stats.stage[1].busy_ns <= stats.elapsed_ns);
    CHECK(stats.stage[1].mean_ns >= 1000000 && stats.stage[1].mean_ns < 4000000);
    CHECK(stats.stage[1].p50_ns < 4000000);
    CHECK(stats.elapsed_ns >= 90000000);
    spdl_pipeline_destroy(p);
}

/* What a stage does: `computes_us` in each call, and in one of `every` it sleeps. */
typedef struct stall {
    int computes_us, every, sleeps_ms;
} stall;

SPDL_FN(stalls, void, void) {
    const stall *s = (const stall *)spdl_ctx(task);
    const uint64_t until = spdl_time_ns() + (uint64_t)s->computes_us * 1000;
    if (spdl_sequence(task) % (uint64_t)s->every == (uint64_t)s->every / 2) sleep_ms(s->sleeps_ms);
    while (s->computes_us > 0 && spdl_time_ns() < until) {}
    *out = in;
    return SPDL_OK;
}

/* Calls that sleep long and rarely are in max and in the split, however short the others are. */
static void slow_calls_are_seen(stall s, uintptr_t count) {
    const uint64_t slept = (uint64_t)count / (uint64_t)s.every * (uint64_t)s.sleeps_ms * 1000000;
    spdl_pipeline *p = pipeline_of(2, SPDL_STAGES(SPDL_SOURCE(numbers, .ctx = &count),
                                                  SPDL_PIPE(stalls, .ctx = &s), SPDL_SINK(3)));
    spdl_stats stats;
    while (next_of(p) == SPDL_OK) {}
    spdl_pipeline_stats(p, &stats);
    spdl_pipeline_destroy(p);
    CHECK_EQ(stats.stage[1].tasks, count);
    CHECK(stats.stage[1].max_ns >= (uint64_t)s.sleeps_ms * 1000000);
    CHECK(stats.stage[1].p50_ns < 1000000);
    if (!SPDL__METERED || TEST_SANITIZED) return;
#ifdef _WIN32
    if (stats.stage[1].split_calls == 0) TEST_SKIP("Wine knows no times of a thread");
#endif
    if (share(stats.stage[1].blocked_ns, slept) >= 0.75) return;
    CHECK(false);
    printf("    %d us of computing: %.0f %% of the sleep\n", s.computes_us,
           100 * share(stats.stage[1].blocked_ns, slept));
}

static void slow_calls_among_untimed_ones(void) {
    const stall s = { 0, 500, 40 };
    slow_calls_are_seen(s, 6000);
}

static void slow_calls_among_short_ones(void) {
    const stall s = { 3, 500, 40 };
    slow_calls_are_seen(s, 6000);
}

static void slow_calls_among_long_ones(void) {
    const stall s = { 100, 100, 50 };
    slow_calls_are_seen(s, 2000);
}

SPDL_FN(spin_20_us, void, void) {
    const uint64_t until = spdl_time_ns() + 20000;
    while (spdl_time_ns() < until) {}
    *out = in;
    return SPDL_OK;
}

static void *take_some(void *arg) {
    for (int i = 0; i < 300; ++i) CHECK_EQ(next_of((spdl_pipeline *)arg), SPDL_OK);
    return NULL;
}

/* The second thread has the address that the first one had, and is another all the same: what the
   library keeps of the first is not read on. */
static void a_thread_where_another_was_is_measured(void) {
    spdl_pipeline *p = pipeline_of(0, SPDL_STAGES(SPDL_SOURCE(endless), SPDL_PIPE(spin_20_us),
                                                  SPDL_SINK(1)));
    spdl_stats first, stats;
    for (int i = 0; i < 2; ++i) {
        test_thread thread;
        REQUIRE(test_thread_start(&thread, take_some, p));
        test_join(thread);
        spdl_pipeline_stats(p, i == 0 ? &first : &stats);
    }
    if (!TEST_POSIX && first.stage[1].split_calls == 0) {
        spdl_pipeline_destroy(p);
        TEST_SKIP("Wine knows no times of a thread");
    }
    CHECK(stats.stage[1].split_calls > first.stage[1].split_calls);
    CHECK_EQ(stats.stage[1].runnable_known, first.stage[1].runnable_known);
    spdl_pipeline_destroy(p);
}

SPDL_FN(hangs, void, void) {
    gate *g = (gate *)spdl_ctx(task);
    while (spdl_sequence(task) == 5 && !__atomic_load_n(&g->items, __ATOMIC_ACQUIRE)) sleep_ms(1);
    *out = in;
    return SPDL_OK;
}

/* A call that still runs is in the numbers, with its item. */
static void calls_that_run_are_counted(void) {
    gate g = { 0 };
    uintptr_t count = 7;
    test_thread eater;
    spdl_stats before, stats;
    spdl_pipeline *p = pipeline_of(2, SPDL_STAGES(
        SPDL_SOURCE(numbers, .ctx = &count), SPDL_PIPE(hangs, .ctx = &g), SPDL_SINK(3)));
    REQUIRE(test_thread_start(&eater, take_all, p));
    do spdl_pipeline_stats(p, &before);
    while (before.stage[1].call_item != 5 || before.stage[1].call_ns < 50000000);
    sleep_ms(50);
    spdl_pipeline_stats(p, &stats);
    CHECK_EQ(stats.stage[1].in_flight, 1);
    CHECK_EQ(stats.stage[1].call_item, 5);
    CHECK(stats.stage[1].tasks <= 5); /* short ones are booked together */
    CHECK(stats.stage[1].call_ns >= 100000000);
    CHECK(stats.stage[1].busy_ns >= stats.stage[1].call_ns);
    CHECK_EQ(stats.stage[1].max_ns, before.stage[1].max_ns); /* not of the one that runs */
    CHECK(stats.stage[1].max_ns < stats.stage[1].call_ns);
    __atomic_store_n(&g.items, 1, __ATOMIC_RELEASE);
    test_join(eater);
    before = stats;
    spdl_pipeline_stats(p, &stats);
    CHECK_EQ(stats.stage[1].in_flight, 0);
    CHECK_EQ(stats.stage[1].call_ns, 0);
    CHECK(stats.stage[1].busy_ns >= before.stage[1].busy_ns);
    CHECK(stats.stage[1].max_ns >= before.stage[1].call_ns - 1000000);
    spdl_pipeline_destroy(p);
}

SPDL_FN(either_way, void, void) {
    *out = in;
    return spdl_route(task, (int)(spdl_sequence(task) & 1));
}

/* Merges, and marks on their way, are no calls. */
static void nothing_runs_after_the_end(void) {
    uintptr_t count = 3;
    spdl_stats stats;
    int running = 0;
    for (int k = 0; k < (TEST_SANITIZED ? 100 : 1000); ++k) {
        spdl_pipeline *p = pipeline_of(2, SPDL_STAGES(
            SPDL_SOURCE(numbers, .ctx = &count), SPDL_BRANCH(either_way), SPDL_PATH("a"),
            SPDL_PATH("b"), SPDL_MERGE(), SPDL_SINK(3)));
        while (next_of(p) == SPDL_OK) {}
        spdl_pipeline_stats(p, &stats);
        for (int i = 0; i < stats.stage_count; ++i) running += stats.stage[i].in_flight;
        spdl_pipeline_destroy(p);
    }
    CHECK_EQ(running, 0);
}

static void polls_are_counted(void) {
    gate g = { 0 };
    spdl_stats stats;
    void *item;
    spdl_pipeline *p = pipeline_of(1, SPDL_STAGES(SPDL_SOURCE(gated, .ctx = &g), SPDL_SINK(3)));
    for (int i = 0; i < 7; ++i) CHECK_EQ(spdl_pipeline_next(p, &item, 0), SPDL_TIMEOUT);
    __atomic_store_n(&g.items, 1, __ATOMIC_RELEASE);
    CHECK_EQ(next_of(p), SPDL_OK);
    spdl_pipeline_stats(p, &stats);
    CHECK_EQ(stats.polls, 7);
    CHECK_EQ(stats.next_works, false);
    spdl_pipeline_destroy(p);
}

static void times_are_those_of_the_calls(void) {
    static double naps[] = { 3 };
    uintptr_t count = 20;
    spdl_pipeline *p = pipeline_of(4, SPDL_STAGES(
        SPDL_SOURCE(numbers, .ctx = &count),
        SPDL_PIPE(nap, .ctx = naps, .concurrency = 2),
        SPDL_SINK(3)));
    spdl_stats stats;
    const spdl_stage_stats *stage = &stats.stage[1];
    while (next_of(p) == SPDL_OK) {}
    spdl_pipeline_stats(p, &stats);
    CHECK(stage->p50_ns >= 2800000 && stage->p50_ns < 4500000); /* 3 ms and a bucket below */
    CHECK(stage->mean_ns >= 3000000);
    CHECK(stage->p50_ns <= stage->p90_ns && stage->p90_ns <= stage->p99_ns);
    CHECK(stage->p99_ns <= stage->max_ns && stage->mean_ns <= stage->max_ns);
    CHECK(stage->busy_ns >= 60000000);
    CHECK(stats.elapsed_ns < stage->busy_ns); /* two calls at a time */
    spdl_pipeline_destroy(p);
}

static void frees_slowly(void *item) {
    if (item != NULL) sleep_ms(10);
}

SPDL_FN(makes_another, void, void) {
    sleep_ms(1);
    *out = (void *)((uintptr_t)in + 1000);
    return SPDL_OK;
}

/* What the library calls after a call, such as a .free_item, is in no call of the next row. */
static void times_are_not_those_of_frees(void) {
    uintptr_t count = 20;
    spdl_pipeline *p = pipeline_of(1, SPDL_STAGES(
        SPDL_SOURCE(numbers, .ctx = &count, .free_item = frees_slowly),
        SPDL_PIPE(makes_another), SPDL_PIPE(makes_another), SPDL_SINK(3)));
    spdl_stats stats;
    while (next_of(p) == SPDL_OK) {}
    spdl_pipeline_stats(p, &stats);
    CHECK(stats.stage[1].p50_ns < 6000000);
    CHECK(stats.stage[2].p50_ns < 6000000);
    CHECK(stats.stage[2].exposed_ns < stats.stage[1].exposed_ns);
    spdl_pipeline_destroy(p);
}

/* --- snapshots of a running pipeline --- */

typedef struct watch {
    spdl_pipeline *pipeline;
    uint32_t done;
    uint64_t snapshots; /* atomic */
} watch;

static void *watch_stats(void *arg) {
    watch *w = (watch *)arg;
    spdl_stats *last = (spdl_stats *)calloc(2, sizeof *last), *now = last + 1;
    while (!__atomic_load_n(&w->done, __ATOMIC_ACQUIRE)) {
        bool held = true;
        char text[64];
        spdl_pipeline_stats(w->pipeline, now);
        for (int i = 0; i < now->stage_count; ++i) {
            const spdl_stage_stats *a = &last->stage[i], *b = &now->stage[i];
            const spdl_edge_stats *edge = &now->edge[i];
            held = held && b->tasks >= a->tasks && b->failures >= a->failures;
            held = held && b->skips >= a->skips && b->busy_ns >= a->busy_ns;
            held = held && b->max_ns >= a->max_ns && b->p99_ns <= b->max_ns;
            held = held && b->in_flight >= 0 && b->in_flight <= b->concurrency;
            held = held && edge->items >= last->edge[i].items;
            held = held && b->freed >= a->freed;
            held = held && edge->put_wait_ns >= last->edge[i].put_wait_ns;
            held = held && edge->get_wait_ns >= last->edge[i].get_wait_ns;
            held = held && edge->empty_ns >= last->edge[i].empty_ns;
            held = held && edge->elapsed_ns >= last->edge[i].elapsed_ns;
            held = held && edge->readiness >= 0 && edge->readiness <= 1;
            held = held && edge->depth >= 0 && edge->depth <= edge->buffer_size + b->concurrency;
        }
        held = held && now->delivered >= last->delivered && now->elapsed_ns >= last->elapsed_ns;
        held = held && now->wait_ns >= last->wait_ns && now->step_ns <= now->elapsed_ns;
        held = held && now->step_ns >= last->step_ns && now->polls >= last->polls;
        if (!CHECK(held)) break;
        spdl_stats_text(now, text, sizeof text);
        *last = *now;
        __atomic_store_n(&w->snapshots, w->snapshots + 1, __ATOMIC_RELEASE);
        if (w->snapshots % 8 == 0) sleep_ms(0.05);
    }
    free(last);
    return NULL;
}

static void snapshots_of_a_running_pipeline(void) {
    uintptr_t count = TEST_SANITIZED ? 4000 : 20000;
    spdl_pipeline *p = pipeline_of(3, SPDL_STAGES(
        SPDL_SOURCE(numbers, .ctx = &count),
        SPDL_PIPE(fail_odd, .concurrency = 2, .max_failures = -1),
        SPDL_PIPE(pass, .concurrency = 2, .output_order = SPDL_ORDER_COMPLETION),
        SPDL_BATCH(4),
        SPDL_SINK(3)));
    watch w[2] = { { p, 0, 0 }, { p, 0, 0 } };
    test_thread threads[2];
    void *batch;
    for (int i = 0; i < 2; ++i)
        REQUIRE(test_thread_start(&threads[i], watch_stats, &w[i]));
    for (int i = 0; i < 2; ++i) /* it is running until the first snapshots are there */
        while (__atomic_load_n(&w[i].snapshots, __ATOMIC_ACQUIRE) == 0) sleep_ms(0.1);
    while (spdl_pipeline_next(p, &batch, SPDL_FOREVER) == SPDL_OK) spdl_batch_free(batch);
    for (int i = 0; i < 2; ++i) {
        __atomic_store_n(&w[i].done, 1, __ATOMIC_RELEASE);
        test_join(threads[i]);
        CHECK(w[i].snapshots > 0);
    }
    spdl_pipeline_destroy(p);
}

/* --- texts --- */

static bool slow_stage_is_named(bool tell) {
    static double slow[] = { 4 }, quick[] = { 0.3 };
    uintptr_t count = 25;
    spdl_pipeline *p = pipeline_of(4, SPDL_STAGES(
        SPDL_SOURCE(numbers, .ctx = &count),
        SPDL_PIPE(nap, .name = "read", .ctx = quick),
        SPDL_PIPE(nap, .name = "decode", .ctx = slow),
        SPDL_PIPE(nap, .name = "scale", .ctx = quick, .concurrency = 2),
        SPDL_SINK(3)));
    char text[400];
    spdl_stats stats;
    while (next_of(p) == SPDL_OK) {}
    spdl_pipeline_stats(p, &stats);
    spdl_stats_verdict(&stats, text, sizeof text);
    spdl_pipeline_destroy(p);
    return told(says(text, "The consumer waited") && says(text, "stage 2 'decode'") &&
                    !says(text, "'read'") && !says(text, "'scale'"), text, tell);
}

static void verdict_names_the_slow_stage(void) { verdict_check(slow_stage_is_named); }

static bool slow_trainer_is_told(bool tell) {
    static double quick[] = { 0.3 };
    spdl_pipeline *p = pipeline_of(2, SPDL_STAGES(SPDL_SOURCE(endless),
                                                  SPDL_PIPE(nap, .name = "decode", .ctx = quick),
                                                  SPDL_SINK(3)));
    char text[400];
    spdl_stats stats;
    spdl_pipeline_stats(p, &stats);
    spdl_stats_verdict(&stats, text, sizeof text);
    CHECK_STR(text, "Nothing was delivered: the consumer did not call next.");
    for (int i = 0; i < 25; ++i) {
        CHECK_EQ(next_of(p), SPDL_OK);
        sleep_ms(3);
    }
    spdl_pipeline_stats(p, &stats);
    spdl_stats_verdict(&stats, text, sizeof text);
    spdl_pipeline_destroy(p);
    return told(says(text, "Loading keeps up: the consumer waited"), text, tell);
}

static void verdict_of_a_slow_trainer(void) { verdict_check(slow_trainer_is_told); }

/* With one worker, two stages of the same kind share it: it is the workers that are too few. */
static bool too_few_workers_are_told(bool tell) {
    static double slow[] = { 3 }, quick[] = { 1 };
    uintptr_t count = 20;
    spdl_pipeline *p = pipeline_of(1, SPDL_STAGES(
        SPDL_SOURCE(numbers, .ctx = &count),
        SPDL_PIPE(nap, .name = "read", .ctx = quick),
        SPDL_PIPE(nap, .name = "decode", .ctx = slow, .concurrency = 4),
        SPDL_SINK(3)));
    char text[400];
    spdl_stats stats;
    while (next_of(p) == SPDL_OK) {}
    spdl_pipeline_stats(p, &stats);
    spdl_stats_verdict(&stats, text, sizeof text);
    spdl_pipeline_destroy(p);
    return told(says(text, "the only worker was busy") || says(text, "other programs used"), text,
                tell);
}

static void verdict_of_too_few_workers(void) { verdict_check(too_few_workers_are_told); }

/* Calls that wait for others keep no worker busy, however many there are. */
static void verdict_of_deferred_calls(void) {
    char text[400];
    spdl_stats stats;
    memset(&stats, 0, sizeof stats);
    stats.elapsed_ns = 1000000000;
    stats.wait_ns = 800000000;
    stats.first_item_ns = 1000;
    stats.delivered = 100;
    stats.workers = 2;
    stats.stage_count = 1;
    snprintf(stats.stage[0].name, sizeof stats.stage[0].name, "fetch");
    stats.stage[0].kind = SPDL_KIND_PIPE;
    stats.stage[0].concurrency = 256;
    stats.stage[0].deferred = true;
    stats.stage[0].busy_ns = 192 * stats.elapsed_ns;
    spdl_stats_verdict(&stats, text, sizeof text);
    CHECK_STR(text, "The consumer waited 80 % of its time: no stage was busy more than 75 % of the "
                    "time. The limit is not known: SPDL_DOCTOR=30 measures it.");
    stats.stage[0].busy_ns = 230 * stats.elapsed_ns;
    spdl_stats_verdict(&stats, text, sizeof text);
    CHECK_STR(text, "The consumer waited 80 % of its time: stage 0 'fetch' was busy 90 % of the "
                    "time (concurrency 256). Write .concurrency = 512: up to 2x. If the last step "
                    "gained nothing, take it back: its calls wait for each other.");
}

/* 3000 requests, of which 683 were dropped: find_path is busy all the time. */
static spdl_stats stats_pushed(void) {
    spdl_stats stats;
    memset(&stats, 0, sizeof stats);
    stats.elapsed_ns = 10000000000u;
    stats.wait_ns = 10000000;
    stats.delivered = 2317;
    stats.workers = 2;
    stats.stage_count = 2;
    snprintf(stats.stage[0].name, sizeof stats.stage[0].name, "feed");
    snprintf(stats.stage[1].name, sizeof stats.stage[1].name, "find_path");
    stats.stage[0].kind = SPDL_KIND_FEED;
    stats.stage[1].kind = SPDL_KIND_PIPE;
    stats.stage[0].concurrency = stats.stage[1].concurrency = 1;
    stats.stage[0].tasks = 3000;
    stats.stage[0].skips = 683;
    stats.stage[0].mean_ns = 40000000;
    stats.stage[0].p50_ns = 38000000;
    stats.stage[0].p99_ns = 83000000;
    stats.stage[1].tasks = 2317;
    stats.stage[1].busy_ns = 10000000000u;
    stats.answer_wait_ns = 5000000000u;
    return stats;
}

static const char *verdict_of(const spdl_stats *stats) {
    static char text[600];
    spdl_stats_verdict(stats, text, sizeof text);
    return text;
}

/* Of a pipeline with a feed: whether requests were dropped and why, and where the time of the
   others went. Nothing is said of a trainer. */
static void verdict_of_requests(void) {
    spdl_stats stats = stats_pushed();
    CHECK_STR(verdict_of(&stats), "683 of 3000 requests were dropped: stage 1 'find_path' was busy "
                                  "100 % of the time (concurrency 1). Write .concurrency = 2: up "
                                  "to 1.3x. It gains less if its calls wait for each other. "
                                  "Answers took 38.0 ms (p50) to 83.0 ms (p99), most of it "
                                  "waiting in front of stage 1 'find_path'.");
    stats.stage[1].concurrency = 2;
    stats.stage[1].busy_ns = 19000000000u;
    CHECK(says(verdict_of(&stats), "dropped: all 2 workers were busy, most of all with stage 1"));
    stats.stage[1].busy_ns = 2000000000u;
    CHECK(says(verdict_of(&stats), "dropped: more came at once than its buffer_size. Answers"));
    stats.edge[0].readiness = 0.9;
    CHECK(says(verdict_of(&stats), "dropped: the workers lacked processor time. Answers"));
    stats.edge[1].elapsed_ns = stats.elapsed_ns;
    stats.edge[1].put_wait_ns = stats.elapsed_ns / 2;
    CHECK(says(verdict_of(&stats), "dropped: answers were not taken in time. Answers"));
    stats.stage[0].skips = 0;
    CHECK_STR(verdict_of(&stats), "Answers took 38.0 ms (p50) to 83.0 ms (p99), most of it waiting "
                                  "in front of stage 1 'find_path', busy 10 % of the time.");
    stats.answer_wait_ns = 60000000000u;
    CHECK(says(verdict_of(&stats), "(p99), most of it until they were taken."));
    stats.answer_wait_ns = 0;
    stats.stage[0].mean_ns = 1000000;
    CHECK(says(verdict_of(&stats), "(p99), most of it in calls: no request waited long."));
    stats.stage[1].kind = SPDL_KIND_BATCH;
    stats.stage[1].busy_ns = 0;
    CHECK(says(verdict_of(&stats), "(p99), most of it until a batch was full."));
    stats.delivered = 0;
    CHECK_STR(verdict_of(&stats), "Nothing was answered.");
    stats.stage[0].tasks = 0;
    CHECK_STR(verdict_of(&stats), "Nothing was pushed.");
}

/* The stage that limits is marked though nobody waits in next; the row of the feed has the times of
   the answers, and no load. */
static void texts_of_requests(void) {
    const spdl_stats stats = stats_pushed();
    char text[4000];
    spdl_stats_text(&stats, text, sizeof text);
    CHECK(says(text, "\n3000 requests, 2317 items in 10.0 s, "));
    CHECK(says(text, "  feed                  1      3000   300/s 38.0 ms 83.0 ms    0 ns "
                     "   -"));
    CHECK(says(text, "\n> find_path "));
    CHECK(!says(text, "trainer"));
    spdl__text json = spdl__text_start(text, sizeof text);
    spdl__json_stats(&json, &stats, NULL);
    CHECK(says(text, "\"finding\":{\"limit\":\"concurrency\",\"stage\":1,\"concurrency\":{\"1\":"));
    CHECK(says(text, "\"answer_wait_ns\":5000000000,"));
    CHECK(says(text, "\"p50_ns\":38000000,"));
}

/* Numbers that every text of the tests below is made of. */
static spdl_stats stats_made_up(void) {
    static const char *const names[] = { "list_files", "decode_jpeg", "a_name_longer_than_a_column",
                                         "batch", "collate" };
    spdl_stats stats;
    memset(&stats, 0, sizeof stats);
    stats.elapsed_ns = 10000000000u;
    stats.workers = 8;
    stats.stage_count = 5;
    stats.delivered = 250;
    stats.first_item_ns = 123000000;
    stats.wait_ns = 4000000000u;
    for (int i = 0; i < 5; ++i) {
        spdl_stage_stats *stage = &stats.stage[i];
        spdl_edge_stats *edge = &stats.edge[i];
        snprintf(stage->name, sizeof stage->name, "%s", names[i]);
        stage->kind = i == 0 ? SPDL_KIND_SOURCE : i == 3 ? SPDL_KIND_BATCH : SPDL_KIND_PIPE;
        stage->concurrency = i == 1 ? 4 : 1;
        stage->tasks = i < 3 ? 1000 : 250;
        stage->failures = i == 1 ? 12 : 0;
        stage->busy_ns = i == 1 ? 36000000000u : i == 3 ? 0 : 1000000000u;
        stage->mean_ns = stage->p50_ns = stage->busy_ns / stage->tasks;
        stage->p99_ns = stage->max_ns = 3 * stage->mean_ns;
        edge->buffer_size = i == 4 ? 3 : 2;
        edge->items = stage->tasks;
        edge->put_wait_ns = i == 0 ? 8000000000u : 0;
        edge->get_wait_ns = i > 0 ? 5000000000u : 0;
        edge->elapsed_ns = stats.elapsed_ns;
        edge->empty_ns = i > 0 ? 9000000000u : 0;
        edge->readiness = i > 0 ? 0.1 : 1;
    }
    return stats;
}

static void text_tells_the_verdict_first(void) {
    const spdl_stats stats = stats_made_up();
    char text[4000], verdict[600];
    const int length = spdl_stats_text(&stats, text, sizeof text);
    const int short_length = spdl_stats_verdict(&stats, verdict, sizeof verdict);
    CHECK_EQ(length, strlen(text));
    CHECK_EQ(short_length, strlen(verdict));
    CHECK(strncmp(text, verdict, strlen(verdict)) == 0 && text[strlen(verdict)] == '\n');
    CHECK(says(verdict, "stage 1 'decode_jpeg'") && says(verdict, "90 %"));
    CHECK_EQ(text[length - 1], '\n');
    CHECK(says(text, "250 items"));
}

/* A line for each stage, 100 columns wide, the slow one marked; then one for each with losses. */
static void text_is_a_table(void) {
    static const char head[] = "  stage              conc     tasks    rate     p50     p99     max"
                               " busy  cpu runq block ready waits";
    static const char *const shown[] = {
        "  100/s 1.00 ms 3.00 ms 3.00 ms  10%    -             100%      ",
        "  100/s 36.0 ms  108 ms  108 ms  90%  90%         6%   10%   75%",
        "  100/s 1.00 ms 3.00 ms 3.00 ms  10%  50%  50%         10%      ",
        " 25.0/s       -       -       -    -    -              10%      ",
        " 25.0/s 4.00 ms 12.0 ms 12.0 ms  10%    -              10%      ",
    };
    static const char *const below[] = {
        "  consumer              1       250  25.0/s 2.00 ms 9.00 ms  182 ms  61%",
        "  decode_jpeg: 12 failed", "  batch: 3 skipped"
    };
    spdl_stats stats = stats_made_up();
    char text[4000], *line;
    int rows = 0, marks = 0, losses = 0;
    bool begun = false;
    stats.step_p50_ns = 2000000;
    stats.step_p99_ns = 9000000;
    stats.step_max_ns = 182000000;
    stats.stage[3].skips = 3;
    stats.stage[1].split_calls = stats.stage[2].split_calls = 9;
    stats.stage[1].cpu_ns = stats.stage[1].busy_ns / 10 * 9; /* 4 % of the rest is too little */
    stats.stage[1].runnable_ns = stats.stage[1].busy_ns / 25;
    stats.stage[1].blocked_ns = stats.stage[1].busy_ns / 50 * 3;
    stats.stage[2].cpu_ns = stats.stage[2].runnable_ns = stats.stage[2].busy_ns / 2;
    stats.stage[1].exposed_ns = stats.wait_ns / 2;
    stats.stage[1].exposed_idle_ns = stats.stage[2].exposed_ns = stats.wait_ns / 4;
    spdl_stats_text(&stats, text, sizeof text);
    CHECK_EQ(strlen(head), 100);
    for (line = strtok(text, "\n"); line != NULL; line = strtok(NULL, "\n")) {
        const bool row = begun && strlen(line) == 100;
        if (row) {
            char name[19];
            snprintf(name, sizeof name, "%.18s", stats.stage[rows].name);
            CHECK(strncmp(line + 2, name, strlen(name)) == 0);
            CHECK_EQ(line[0] == '>', rows == 1);
            marks += line[0] == '>';
            CHECK(says(line, shown[rows++]));
        } else if (begun) {
            CHECK_EQ(rows, 5);
            CHECK_STR(line, below[losses++]);
        }
        begun = begun || strcmp(line, head) == 0;
    }
    CHECK_EQ(rows, 5);
    CHECK_EQ(marks, 1);
    CHECK_EQ(losses, 3);
}

static void texts_are_cut_to_the_buffer(void) {
    const spdl_stats stats = stats_made_up();
    int (*const writers[])(const spdl_stats *, char *, size_t) = { spdl_stats_text,
                                                                   spdl_stats_verdict };
    for (int w = 0; w < 2; ++w) {
        char whole[4000], cut[4000];
        const int length = writers[w](&stats, whole, sizeof whole);
        CHECK_EQ(writers[w](&stats, NULL, 0), length);
        for (size_t bytes = 0; bytes <= (size_t)length + 2; ++bytes) {
            memset(cut, '#', sizeof cut);
            CHECK_EQ(writers[w](&stats, cut, bytes), length);
            CHECK_EQ(cut[bytes], '#');
            if (bytes == 0) continue;
            CHECK(memcmp(cut, whole, bytes <= (size_t)length ? bytes - 1 : (size_t)length) == 0);
            CHECK_EQ(cut[bytes <= (size_t)length ? bytes - 1 : (size_t)length], '\0');
        }
    }
}

/* Stages at the limits: all of them, names and numbers as long as they get. */
static void text_of_the_largest_pipeline(void) {
    spdl_stats stats;
    char text[16000];
    int rows = 0;
    memset(&stats, 0xff, sizeof stats);
    stats.next_works = stats.shared_pool = stats.may_doctor = false;
    stats.stage_count = SPDL_MAX_STAGES;
    for (int i = 0; i < SPDL_MAX_STAGES; ++i) {
        memset(stats.stage[i].name, 'n', SPDL_NAME_BYTES);
        stats.stage[i].name[SPDL_NAME_BYTES - 1] = '\0';
        stats.stage[i].kind = SPDL_KIND_PIPE;
        stats.stage[i].concurrency = 4096;
        stats.stage[i].deferred = stats.stage[i].runnable_known = false;
        stats.stage[i].from = stats.stage[i].alone = stats.stage[i].lock_found = false;
        stats.stage[i].in_order = false;
        stats.edge[i].buffer_size = stats.edge[i].depth = 1 << 20;
        stats.edge[i].readiness = 1;
    }
    CHECK((size_t)spdl_stats_text(&stats, text, sizeof text) < sizeof text);
    for (const char *c = text; *c; ++c) rows += *c == '\n';
    CHECK_EQ(rows, 2 * SPDL_MAX_STAGES + 5); /* losses too, the verdict, the run, the heading */
}

static void durations_have_three_digits(void) {
    static const struct {
        double ns;
        const char *text;
    } rows[] = {
        { 0, "0 ns" },         { 7, "7 ns" },         { 999, "999 ns" },    { 1000, "1.00 us" },
        { 9994, "9.99 us" },   { 9996, "10.0 us" },   { 99940, "99.9 us" }, { 99960, "100 us" },
        { 999400, "999 us" },  { 999600, "1.00 ms" }, { 25e6, "25.0 ms" },  { 1e9, "1.00 s" },
        { 999.7e6, "1.00 s" }, { 61e9, "61.0 s" },    { 3600e9, "3600 s" },
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) {
        spdl__text cells = spdl__text_start(NULL, 0);
        CHECK_STR(spdl__duration(&cells, rows[i].ns), rows[i].text);
    }
}

/* Whatever bytes are in a name: as many characters, and nothing that a terminal obeys. */
static void names_keep_their_column(void) {
    static const struct {
        const char *name, *shown;
    } rows[] = {
        { "decode", "decode  |" },        { "", "        |" },
        { "longer than it", "longer t|" }, { "\033[2J\tx", "?[2J?x  |" },
        { "d\xc3\xa9j\xc3\xa0", "d\xc3\xa9j\xc3\xa0    |" },
        { "\xe4\xb8\xad\xe6\x96\x87", "\xe4\xb8\xad\xe6\x96\x87      |" },
        { "\xc3", "?       |" },          { "\xc2\x9b" "2J", "?2J     |" },
        { "\xc0\xaf\xed\xa0\x80\xf5", "??????  |" }, { "\x7f", "?       |" },
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) {
        char buffer[100];
        spdl__text text = spdl__text_start(buffer, sizeof buffer);
        spdl__text_name(&text, rows[i].name, 8);
        spdl__text_add(&text, "|");
        CHECK_STR(buffer, rows[i].shown);
    }
}

/* --- why the trainer waits --- */

static void sleeps_a_while(void *arg, int worker, void *local) {
    (void)arg;
    (void)worker;
    (void)local;
    sleep_ms(60);
}

typedef struct blame_case {
    double first_ms, last_ms; /* what the two stages take */
    int first_calls;          /* concurrency of the first */
    int guilty;               /* the row that most of the waiting falls on */
} blame_case;

/* The parts that fall on the stages make up what the trainer waited, and most of it falls on the
   one that is slow. */
static void waits_are_exposed(void) {
    static const blame_case cases[] = { { 4, 0.1, 1, 1 }, { 0.1, 4, 1, 2 }, { 10, 0.1, 2, 1 } };
    for (int i = 0; i < 3; ++i) {
        double naps[] = { cases[i].first_ms, cases[i].last_ms };
        uintptr_t count = 60;
        spdl_pipeline *p = pipeline_of(4, SPDL_STAGES(
            SPDL_SOURCE(numbers, .ctx = &count),
            SPDL_PIPE(nap, .ctx = &naps[0], .concurrency = cases[i].first_calls),
            SPDL_PIPE(nap, .ctx = &naps[1]), SPDL_SINK(3)));
        uint64_t sum = 0, guilty;
        spdl_stats stats;
        while (next_of(p) == SPDL_OK) {}
        spdl_pipeline_stats(p, &stats);
        for (int k = 0; k < stats.stage_count; ++k)
            sum += stats.stage[k].exposed_ns + stats.stage[k].exposed_idle_ns;
        guilty = stats.stage[cases[i].guilty].exposed_ns;
        CHECK(stats.wait_ns > 0 && sum <= stats.wait_ns + stats.wait_ns / 100);
        CHECK(sum >= stats.wait_ns - stats.wait_ns / 100);
        if (!CHECK(guilty > stats.wait_ns / (TEST_SANITIZED ? 4 : 3)))
            printf("    case %d: %.1f of %.1f ms\n", i, (double)guilty / 1e6,
                   (double)stats.wait_ns / 1e6);
        spdl_pipeline_destroy(p);
    }
}

/* One worker, which is in a call of the last stage: what waits in front of it waits for a worker.
   */
static void waits_for_a_worker_are_exposed(void) {
    double naps[] = { 3, 3 };
    uintptr_t count = 30;
    spdl_pipeline *p = pipeline_of(1, SPDL_STAGES(
        SPDL_SOURCE(numbers, .ctx = &count), SPDL_PIPE(nap, .ctx = &naps[0]),
        SPDL_PIPE(nap, .ctx = &naps[1]), SPDL_SINK(3)));
    spdl_stats stats;
    uint64_t calls;
    while (next_of(p) == SPDL_OK) {}
    spdl_pipeline_stats(p, &stats);
    calls = stats.stage[1].exposed_ns + stats.stage[2].exposed_ns;
    CHECK(calls > stats.wait_ns / 2 && calls <= stats.wait_ns + stats.wait_ns / 100);
    spdl_pipeline_destroy(p);
    /* a pool that is busy with something else */
    {
        spdl_pool_desc desc = { .workers = 1 };
        spdl_pool *pool;
        spdl_pipeline_desc on_pool = { .workers = 0 };
        REQUIRE(spdl_pool_create(&pool, &desc) == SPDL_OK);
        REQUIRE(spdl_pool_submit(pool, sleeps_a_while, NULL, SPDL_FOREVER) == SPDL_OK);
        on_pool.pool = pool;
        count = 1;
        REQUIRE(spdl_pipeline_create(&p, &on_pool, SPDL_STAGES(
            SPDL_SOURCE(numbers, .ctx = &count), SPDL_PIPE(nap, .ctx = &naps[0]),
            SPDL_SINK(3))) == SPDL_OK);
        while (next_of(p) == SPDL_OK) {}
        spdl_pipeline_stats(p, &stats);
        CHECK(stats.stage[0].exposed_idle_ns > 30000000);
        spdl_pipeline_destroy(p);
        spdl_pool_destroy(pool);
    }
}

/* An item that lies there while the trainer is in next, woken late, counts as ready; and not longer
   than the wait. */
/* Computes for 0.5 ms. */
SPDL_FN(turns, void, void) {
    const uint64_t begun = spdl_time_ns();
    while (spdl_time_ns() - begun < 500000) {}
    *out = in;
    return SPDL_OK;
}

/* The consumer's time in next is its wait, also while a worker that it woke has its processor. */
static bool time_in_next_is_waiting(bool tell) {
    uintptr_t count = 200;
    spdl_pipeline *p = pipeline_of(2, SPDL_STAGES(
        SPDL_SOURCE(numbers, .ctx = &count), SPDL_PIPE(turns), SPDL_SINK(3)));
    uint64_t inside = 0, since = spdl_time_ns();
    char text[100];
    spdl_stats stats;
    while (next_of(p) == SPDL_OK) {
        inside += spdl_time_ns() - since;
        sleep_ms(2);
        since = spdl_time_ns();
    }
    spdl_pipeline_stats(p, &stats);
    CHECK(stats.workers_runnable_ns < 4 * stats.elapsed_ns);
    spdl_pipeline_destroy(p);
    CHECK(stats.wait_ns <= inside + 1000000);
    snprintf(text, sizeof text, "%.0f us in next, %.0f of them waiting", 5e-6 * (double)inside,
             5e-6 * (double)stats.wait_ns);
    return told(inside < stats.wait_ns + 200 * 40000, text, tell);
}

static void time_in_next_beside_an_item(void) { verdict_check(time_in_next_is_waiting); }

TEST_TABLE(stats) {
    TEST_CASE(waits_are_exposed),
    TEST_CASE(waits_for_a_worker_are_exposed),
    TEST_CASE(time_in_next_beside_an_item),
    TEST_CASE(reference_one_fast_stage),
    TEST_CASE(reference_one_slow_stage),
    TEST_CASE(reference_slower_and_slower),
    TEST_CASE(reference_faster_and_faster),
    TEST_CASE(reference_concurrency),
    TEST_CASE(reference_batch),
    TEST_CASE(open_gaps_and_waits_are_counted),
    TEST_CASE(open_put_waits_are_counted),
    TEST_CASE(first_item_is_a_delivered_one),
    TEST_CASE(end_stops_the_clock),
    TEST_CASE(percentiles_of_uniform_times),
    TEST_CASE(percentiles_of_constants),
    TEST_CASE(percentiles_of_ages),
    TEST_CASE(percentiles_of_two_kinds),
    TEST_CASE(percentiles_of_lognormal_times),
    TEST_CASE(percentiles_of_nothing),
    TEST_CASE(histograms_at_the_edges),
    TEST_CASE(histograms_of_stages),
    TEST_CASE(edges_that_stay_full),
    TEST_CASE(edges_that_fill_and_drain),
    TEST_CASE(steps_of_the_trainer),
    TEST_CASE(steps_behind_a_long_start),
    TEST_CASE(process_is_read),
    TEST_CASE(process_counts_from_the_second_item),
    TEST_CASE(process_knows_its_affinity),
    TEST_CASE(process_sees_others),
    TEST_CASE(process_knows_its_quota),
    TEST_CASE(counts_are_exact),
    TEST_CASE(counts_of_skips_and_failures),
    TEST_CASE(counts_of_batches),
    TEST_CASE(counts_after_a_stop),
    TEST_CASE(failures_are_not_in_the_times),
    TEST_CASE(slow_calls_among_untimed_ones),
    TEST_CASE(slow_calls_among_short_ones),
    TEST_CASE(slow_calls_among_long_ones),
    TEST_CASE(calls_that_run_are_counted), TEST_CASE(a_thread_where_another_was_is_measured),
    TEST_CASE(nothing_runs_after_the_end),
    TEST_CASE(polls_are_counted),
    TEST_CASE(times_are_those_of_the_calls),
    TEST_CASE(times_are_not_those_of_frees),
    TEST_CASE(snapshots_of_a_running_pipeline),
    TEST_CASE(verdict_names_the_slow_stage),
    TEST_CASE(verdict_of_a_slow_trainer),
    TEST_CASE(verdict_of_too_few_workers),
    TEST_CASE(verdict_of_deferred_calls),
    TEST_CASE(verdict_of_requests),
    TEST_CASE(texts_of_requests),
    TEST_CASE(text_tells_the_verdict_first),
    TEST_CASE(text_is_a_table),
    TEST_CASE(texts_are_cut_to_the_buffer),
    TEST_CASE(text_of_the_largest_pipeline),
    TEST_CASE(durations_have_three_digits),
    TEST_CASE(names_keep_their_column),
    TEST_END,
};
