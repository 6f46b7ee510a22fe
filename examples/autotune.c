/* autotune.c - how many reads at a time does this disk like? Nobody says: the pipeline starts with
   one, tries more while the trainer waits and the stages keep within their share of the processors,
   and less where that is enough, takes back what did not help, and says why in a line each.

   Build:  cc -O2 -I. examples/autotune.c -o autotune -lpthread
   Run:    ./autotune */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <poll.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct Sample {
    uint64_t number, sum;
} Sample;

SPDL_FN(next_sample, void, Sample) {
    *out = (Sample *)calloc(1, sizeof **out);
    if (!*out) return SPDL_E_NOMEM;
    (*out)->number = spdl_sequence(task);
    return SPDL_OK; /* for ever: the trainer says when it has had enough */
}

/* Stands for a disk whose reads take 4 ms when there are up to 4 at a time, and longer beyond. */
SPDL_FN(read_sample, Sample, Sample) {
    static atomic_int reads;
    const int now = atomic_fetch_add(&reads, 1) + 1;
    poll(NULL, 0, now > 4 ? now : 4);
    atomic_fetch_sub(&reads, 1);
    *out = in;
    return SPDL_OK;
}

/* Some work for a processor. */
SPDL_FN(decode, Sample, Sample) {
    for (uint64_t i = 0; i < 20000; i++) in->sum += i ^ in->number;
    *out = in;
    return SPDL_OK;
}

/* A message begins with a level; the decisions are for information. */
static void tell(spdl_log_level level, const char *text, void *user) {
    (void)level;
    fprintf((FILE *)user, "%s\n", text);
}

/* Trains for so many seconds. Returns items per second, 0 when the pipeline has ended. */
static double train(spdl_pipeline *p, double seconds) {
    const uint64_t start = spdl_time_ns();
    uint64_t items = 0;
    double passed = 0;
    void *sample;
    while (passed < seconds) {
        if (spdl_pipeline_next(p, &sample, SPDL_FOREVER) != SPDL_OK) return 0;
        free(sample);
        items++;
        passed = (double)(spdl_time_ns() - start) * 1e-9;
    }
    return (double)items / passed;
}

int main(void) {
    static spdl_stats stats;
    const spdl_pipeline_desc desc = {
        .workers = 16,       /* the most that can run at a time */
        .autotune = true,
        .cpu_budget = 1.0,   /* processors, for all stages together */
        .tune_seconds = 0.1, /* between decisions; the default of 0.5 suits longer runs */
        .logger = { .log_fn = tell, .user = stdout },
    };
    spdl_pipeline *p;
    if (spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_SOURCE(next_sample, .free_item = free),
            SPDL_PIPE(read_sample), /* as many as there are workers */
            SPDL_PIPE(decode, .max_concurrency = 2),
            SPDL_SINK(8))) != SPDL_OK) return 1;
    const double before = train(p, 0.2);
    train(p, 1.8);
    const double after = train(p, 0.3);
    spdl_pipeline_stats(p, &stats);
    const int row = spdl_pipeline_find(p, "read_sample");
    spdl_pipeline_destroy(p);
    printf("%.0f items/s at the start, %.0f at the end, with %d reads at a time\n", before, after,
           stats.stage[row].concurrency);
    return before > 0 && after > 0 ? 0 : 1;
}
