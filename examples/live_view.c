/* live_view.c - watch a pipeline work: its rates, loads and buffers are redrawn in place four times
   a second. The library has no such view: it calls a function with the numbers, and this one draws.

   Build:  cc -O2 -I. examples/live_view.c -o live_view -lpthread
   Run:    ./live_view, for 4 seconds; ./live_view 60 for a minute.

   Every second another stage gets slow: see how the buffers before it fill and those behind it run
   dry, and how the mark moves along. */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static void nap(double ms) {
    const struct timespec t = { 0, (long)(ms * 1e6) };
    nanosleep(&t, NULL);
}

typedef struct show {
    uint64_t start;
    double seconds;
} show;

typedef struct act {
    const show *during;
    int number; /* of the stage: it is slow in each third second, beginning with this one */
} act;

static double since(const show *s) { return (double)(spdl_time_ns() - s->start) * 1e-9; }

/* Items are numbers in disguise: nothing has to be freed. */
SPDL_FN(list, void, void) {
    if (since((const show *)spdl_ctx(task)) > ((const show *)spdl_ctx(task))->seconds)
        return SPDL_END;
    *out = (void *)(uintptr_t)(spdl_sequence(task) + 1);
    return SPDL_OK;
}

SPDL_FN(work, void, void) {
    const act *a = (const act *)spdl_ctx(task);
    nap((int)since(a->during) % 3 == a->number ? 6 : 1.5);
    *out = in;
    return SPDL_OK;
}

static void bar(double share) {
    for (int i = 0; i < 10; ++i) putchar(i < (int)(10 * share + 0.5) ? '#' : '.');
}

/* A line for each stage, over those that stand there: the cursor goes up as many. */
static void draw(const spdl_stats *now, const spdl_stats *total, void *user) {
    int *drawn = (int *)user;
    const double seconds = (double)now->elapsed_ns * 1e-9;
    spdl_finding finding;
    spdl_stats_find(now, &finding);
    if (*drawn > 0) printf("\033[%dA", *drawn);
    for (int i = 0; i < now->stage_count; ++i) {
        const spdl_stage_stats *stage = &now->stage[i];
        const spdl_edge_stats *edge = &now->edge[i];
        const double busy = (double)stage->busy_ns / ((double)now->elapsed_ns + 1);
        printf("%c %-8s %6.0f/s  busy ", i == finding.stage ? '>' : ' ', stage->name,
               seconds > 0 ? (double)stage->tasks / seconds : 0);
        bar(busy / stage->concurrency);
        printf("  waiting ");
        bar((double)edge->depth / edge->buffer_size);
        printf(" %2d/%d\n", edge->depth, edge->buffer_size);
    }
    printf("%llu items\033[K\n", (unsigned long long)total->delivered);
    fflush(stdout);
    *drawn = now->stage_count + 1;
}

int main(int argc, char **argv) {
    show s = { spdl_time_ns(), argc > 1 ? atof(argv[1]) : 4 };
    act acts[] = { { &s, 0 }, { &s, 1 }, { &s, 2 } };
    spdl_report_desc report = { 0 };
    spdl_pipeline_desc desc = { 0 };
    spdl_pipeline *p;
    int drawn = 0; /* lines that stand there */
    void *item;

    report.report_fn = draw;
    report.user = &drawn;
    report.every = 0.25;
    desc.workers = 6;
    desc.name = "show";
    desc.report = &report;
    if (spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_SOURCE(list, .ctx = &s, .buffer_size = 20),
            SPDL_PIPE(work, .name = "read", .ctx = &acts[0], .concurrency = 2, .buffer_size = 20),
            SPDL_PIPE(work, .name = "decode", .ctx = &acts[1], .concurrency = 2, .buffer_size = 20),
            SPDL_PIPE(work, .name = "scale", .ctx = &acts[2], .concurrency = 2),
            SPDL_SINK(20))) != SPDL_OK) return 1;
    while (spdl_pipeline_next(p, &item, SPDL_FOREVER) == SPDL_OK) nap(1);
    const bool failed = spdl_pipeline_failed(p); /* the log says why */
    spdl_pipeline_destroy(p);
    return failed;
}
