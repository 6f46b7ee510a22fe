/* bench_stats.c - what statistics cost.

       make bench-stats

   This file is compiled twice: once as it is, and once with SPDL__NO_STATS, which leaves out every
   counter, histogram, wait and gap, and the consumer's clock (workers read theirs all the same:
   it tells them after how many short calls to look downstream). Both are in one program and run in
   turns, so that what the machine does besides meets both alike; the figure is the median over
   pairs of runs. Each run is asked afterwards whether it has counted, and what it should not. The
   program fails where the goal is surely missed: all of the interval is over it; and where a side
   is quicker with statistics than without, by more than the error of the method: then it measures
   something else.

   overhead_pct           three stages that do nothing, 4 workers, buffer_size 16: how much longer
                          an item takes with statistics, in percent; the note is the same measured
                          for a side against itself, which is the error of the method
   overhead_inline_pct    the same with SPDL_INLINE: no other thread, no cache line that moves
   reporter_pct           the same, with a reporter (JSON every 0.1 s) against without
   create_us              spdl_pipeline_create and _destroy of the inline one, which reads no /proc
   snapshot_us            spdl_pipeline_stats of 5 stages and 8 workers, while they run
   process_us             spdl__process_read */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"

/* How long `items` items take; `report` is NULL, or what to write meanwhile. */
typedef double (*hop_fn)(int workers, uint64_t items, const spdl_report_desc *report);
double hop_counted(int workers, uint64_t items, const spdl_report_desc *report);
double hop_uncounted(int workers, uint64_t items, const spdl_report_desc *report);

#if SPDL__NO_STATS
#define HOP hop_uncounted
#else
#define HOP hop_counted
#endif

SPDL_FN(count_up, void, void) {
    *out = (void *)(uintptr_t)(spdl_sequence(task) + 1);
    return SPDL_OK;
}

SPDL_FN(pass, void, void) {
    *out = in;
    return SPDL_OK;
}

static spdl_pipeline *hop_open(int workers, const spdl_report_desc *report) {
    spdl_pipeline_desc desc = { 0 };
    spdl_pipeline *p;
    desc.workers = workers > 0 ? workers : SPDL_INLINE;
    desc.report = report;
    if (spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_SOURCE(count_up, .buffer_size = 16),
            SPDL_PIPE(pass, .concurrency = 4, .buffer_size = 16),
            SPDL_PIPE(pass, .concurrency = 4, .buffer_size = 16),
            SPDL_PIPE(pass, .concurrency = 4),
            SPDL_SINK(16))) != SPDL_OK)
        exit(1);
    return p;
}

double HOP(int workers, uint64_t items, const spdl_report_desc *report) {
    static spdl_stats stats;
    spdl_pipeline *p = hop_open(workers, report);
    uint64_t start = 0, end, i;
    for (i = 0; i <= items; ++i) {
        void *item;
        if (spdl_pipeline_next(p, &item, SPDL_FOREVER) != SPDL_OK) exit(1);
        if ((uintptr_t)item != i + 1) exit(1);
        if (i == 0) start = spdl_time_ns();
    }
    end = spdl_time_ns();
    spdl_pipeline_stats(p, &stats);
    spdl_pipeline_destroy(p);
    if (stats.delivered != items + 1 || (stats.stage[1].tasks == 0) != (SPDL__NO_STATS != 0)) {
        fprintf(stderr, "bench: a side counts what it should not, or does not\n");
        exit(1);
    }
    return (double)(end - start);
}

#if !SPDL__NO_STATS
#include "bench.h"

#define RUN_MS 40.0
#define PAIRS 41

/* Two sides, and on which pipeline. */
typedef struct pairing {
    hop_fn with, without;
    const spdl_report_desc *report; /* of the first side */
    int workers;
    uint64_t items;
} pairing;

static bool failed;

/* How much longer the first side takes, in percent, pair by pair. */
static void pair_pct(const pairing *is, double *pct, int pairs) {
    int i;
    for (i = 0; i < pairs; ++i) {
        double with = 0, without = 0;
        if (i % 2) with = is->with(is->workers, is->items, is->report);
        without = is->without(is->workers, is->items, NULL);
        if (!(i % 2)) with = is->with(is->workers, is->items, is->report);
        pct[i] = 100 * (with / without - 1);
    }
}

static double hop_run(const void *arg, uint64_t items) {
    const pairing *is = (const pairing *)arg;
    return is->without(is->workers, items, NULL);
}

static void row_pair(const char *name, double goal, pairing is) {
    const bench_row row = { name, "%", NULL, false, goal, false, 0 };
    const pairing same = { is.without, is.without, NULL, is.workers, 0 };
    pairing control = same;
    char text[64], json[64];
    bench_note note = { text, NULL, json };
    double pct[BENCH_MAX_ROUNDS], itself[BENCH_MAX_ROUNDS], error;
    const bench_sides sides = { pct, NULL, bench_rounds(PAIRS), 1 };
    const bench_sides control_sides = { itself, NULL, bench_rounds(PAIRS), 1 };
    spdl_interval found, nothing;
    if (!bench_wanted(name)) return;
    is.items = control.items = bench_calibrate(hop_run, &is, 2000, RUN_MS);
    pair_pct(&is, pct, sides.rounds);
    pair_pct(&control, itself, sides.rounds);
    error = bench_median(itself, sides.rounds);
    snprintf(text, sizeof text, "itself: %+.1f %%", error);
    snprintf(json, sizeof json, ",\"itself\":%.3g", error);
    bench_print_sides(&row, &sides, &note);
    found = bench_interval(&row, &sides);
    nothing = bench_interval(&row, &control_sides);
    failed |= goal > 0 && (found.low > goal || found.high < nothing.low - 1);
}

/* ---- what a call takes ---- */

static double snapshot_us(const void *arg) {
    spdl_pipeline *p = (spdl_pipeline *)(uintptr_t)arg;
    enum { CALLS = 2000 };
    static spdl_stats stats;
    uint64_t start;
    int i;
    start = bench_ns();
    for (i = 0; i < CALLS; ++i) spdl_pipeline_stats(p, &stats);
    return (double)(bench_ns() - start) / CALLS / 1e3;
}

static double process_us(const void *arg) {
    enum { CALLS = 200 };
    const uint64_t start = bench_ns();
    spdl__process_stats stats;
    int i;
    (void)arg;
    for (i = 0; i < CALLS; ++i) spdl__process_read(&stats);
    return (double)(bench_ns() - start) / CALLS / 1e3;
}

static double create_us(const void *arg) {
    enum { CALLS = 200 };
    const uint64_t start = bench_ns();
    int i;
    (void)arg;
    for (i = 0; i < CALLS; ++i) spdl_pipeline_destroy(hop_open(0, NULL));
    return (double)(bench_ns() - start) / CALLS / 1e3;
}

static void row_call(const char *name, const char *unit, bench_side_fn call, const void *arg) {
    const bench_row row = { name, unit, NULL, false, 0, false, 0 };
    if (bench_wanted(name)) bench_compare_sides(&row, 9, call, arg, NULL, NULL);
}

int main(int argc, char **argv) {
    spdl_report_desc report = { 0 };
    spdl_pipeline *p;
    bench_start("stats", argc, argv);
    report.every = 0.1;
    report.json = "/dev/null";
    row_pair("overhead_pct", 5, (pairing){ hop_counted, hop_uncounted, NULL, 4, 0 });
    row_pair("overhead_inline_pct", 5, (pairing){ hop_counted, hop_uncounted, NULL, 0, 0 });
    row_pair("reporter_pct", 0, (pairing){ hop_counted, hop_counted, &report, 4, 0 });
    p = hop_open(8, NULL);
    row_call("snapshot_us", "us", snapshot_us, p);
    row_call("process_us", "us", process_us, NULL);
    spdl_pipeline_destroy(p);
    row_call("create_us", "us", create_us, NULL);
    return failed;
}
#endif
