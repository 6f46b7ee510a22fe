/* bench_trace.c - what hooks, meters and traces cost.

       make bench-trace ARGS="[--json] [--quick] [--list] [TEXT]"

   The same pipeline from two objects of this file: one as users have it, one compiled without any
   of the hooks (the private macro SPDL__NO_TRACE). A source, three stages with a concurrency of 4,
   a buffer_size of 16, 4 workers, and the trainer takes every item; the shape of bench_pipeline's
   pull3_ordered on 4 processors. All sides run in turns, every round in another order, and what is
   printed is the median over the rounds of one round's ratio.

   trace_overhead_pct       no-op stages: hooks there and no trace asked for, against none at all
   trace_overhead_10us_pct  the same with stages of 10 us
   trace_overhead_inline_pct  no-op stages with SPDL_INLINE: one thread, hence the least noise
   trace_on_pct             no-op stages: with a trace against without
   trace_on_10us_pct        the same with stages of 10 us
   trace_on_inline_pct      no-op stages with SPDL_INLINE
   trace_file_ms            writing the file of a trace of 100000 events */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"

typedef struct trace_case {
    int workers;
    uint64_t us;    /* of each call */
    uint64_t items;
    int events;     /* of trace_events; 0: no trace */
} trace_case;

double trace_plain_run(const trace_case *is);
double trace_hooks_run(const trace_case *is);

#ifdef SPDL__NO_TRACE
#define TRACE_RUN trace_plain_run
#else
#define TRACE_RUN trace_hooks_run
#endif

SPDL_FN(make_item, void, void) {
    if (spdl_sequence(task) == ((const trace_case *)spdl_ctx(task))->items) return SPDL_END;
    *out = (void *)(uintptr_t)(spdl_sequence(task) + 1);
    return SPDL_OK;
}

SPDL_FN(work, void, void) {
    const uint64_t us = ((const trace_case *)spdl_ctx(task))->us;
    const uint64_t end = us > 0 ? spdl_time_ns() + us * 1000 : 0;
    while (us > 0 && spdl_time_ns() < end) {
    }
    *out = in;
    return SPDL_OK;
}

/* Nanoseconds from the first item to the last; negative when an item is missing or out of order. */
double TRACE_RUN(const trace_case *is) {
    spdl_pipeline_desc desc = { 0 };
    void *ctx = (void *)(uintptr_t)is;
    spdl_pipeline *p;
    uint64_t start = 0, end = 0, taken = 0;
    void *item;
    desc.workers = is->workers > 0 ? is->workers : SPDL_INLINE;
    desc.trace = "/dev/null";
    desc.trace_events = is->events;
    if (spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_SOURCE(make_item, .ctx = ctx, .buffer_size = 16),
            SPDL_PIPE(work, .ctx = ctx, .concurrency = 4, .buffer_size = 16),
            SPDL_PIPE(work, .ctx = ctx, .concurrency = 4, .buffer_size = 16),
            SPDL_PIPE(work, .ctx = ctx, .concurrency = 4), SPDL_SINK(16))) != SPDL_OK)
        return -1;
    while (spdl_pipeline_next(p, &item, SPDL_FOREVER) == SPDL_OK) {
        if (taken == 0) start = spdl_time_ns();
        if ((uintptr_t)item != ++taken) break;
    }
    end = spdl_time_ns();
    spdl_pipeline_destroy(p);
    return taken == is->items ? (double)(end - start) : -1;
}

#ifndef SPDL__NO_TRACE
#include "bench.h"

enum { ROUNDS = 41 };

static double plain_ns(const void *arg) {
    const double ns = trace_plain_run((const trace_case *)arg);
    BENCH_CHECK(ns > 0);
    return ns;
}

static double hooks_ns(const void *arg) {
    const double ns = trace_hooks_run((const trace_case *)arg);
    BENCH_CHECK(ns > 0);
    return ns;
}

/* By how many percent `more` takes longer than `less`. */
static void row_pct(const char *name, double goal, bench_side_fn more, const trace_case *more_case,
                    bench_side_fn less, const trace_case *less_case) {
    const bench_row row = { name, "%", NULL, false, goal, false, 0 };
    const int rounds = bench_rounds(ROUNDS);
    double pct[BENCH_MAX_ROUNDS], took[BENCH_MAX_ROUNDS];
    char text[64];
    bench_note note = { text, NULL, NULL };
    const bench_sides sides = { pct, NULL, rounds, 1 };
    int i;
    if (!bench_wanted(name)) return;
    for (i = 0; i < rounds; ++i) {
        double a = i % 2 ? more(more_case) : 0;
        const double b = less(less_case);
        if (i % 2 == 0) a = more(more_case);
        pct[i] = 100 * (a / b - 1);
        took[i] = b / (double)less_case->items;
    }
    snprintf(text, sizeof text, "of %.0f ns an item", bench_median(took, rounds));
    bench_print_sides(&row, &sides, &note);
}

static void rows_pct(void) {
    static const struct {
        const char *off, *on;
        trace_case is;
        double goal;
    } cases[] = {
        { "trace_overhead_pct", "trace_on_pct", { 4, 0, 200000, 0 }, 2 },
        { "trace_overhead_10us_pct", "trace_on_10us_pct", { 4, 10, 1500, 0 }, 1 },
        { "trace_overhead_inline_pct", "trace_on_inline_pct", { 0, 0, 200000, 0 }, 2 },
    };
    size_t i;
    for (i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        trace_case on = cases[i].is;
        on.events = 1 << 14;
        row_pct(cases[i].off, cases[i].goal, hooks_ns, &cases[i].is, plain_ns, &cases[i].is);
        row_pct(cases[i].on, 0, hooks_ns, &on, hooks_ns, &cases[i].is);
    }
}

static void silent(spdl_log_level level, const char *text, void *user) {
    (void)level, (void)text, (void)user;
}

static double file_ms(const void *arg) {
    const trace_case *is = (const trace_case *)arg;
    spdl_pipeline_desc desc = { 0 };
    spdl_pipeline *p;
    uint64_t start;
    void *item;
    desc.trace = "/dev/null";
    desc.trace_events = is->events;
    desc.logger.log_fn = silent;
    BENCH_CHECK(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_SOURCE(make_item, .ctx = (void *)(uintptr_t)is), SPDL_BATCH(32), SPDL_SINK(2)))
        == SPDL_OK);
    while (spdl_pipeline_next(p, &item, SPDL_FOREVER) == SPDL_OK) spdl_batch_free(item);
    start = bench_ns();
    spdl_pipeline_destroy(p); /* which writes it */
    return (double)(bench_ns() - start) / 1e6;
}

static void row_file(void) {
    const bench_row row = { "trace_file_ms", "ms", NULL, false, 0, false, 0 };
    const trace_case is = { 0, 0, 57000, 1 << 17 }; /* nearly 2 events an item */
    if (bench_wanted(row.name)) bench_compare_sides(&row, 7, file_ms, &is, NULL, NULL);
}

int main(int argc, char **argv) {
    bench_start("trace", argc, argv);
    rows_pct();
    row_file();
    return 0;
}
#endif
