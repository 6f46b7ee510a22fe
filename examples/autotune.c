/* autotune.c - how many reads at a time does this disk like? Nobody says: a program can follow the
   advisor of the statistics itself. Every tenth of a second it asks what limits, gives that row the
   calls that are advised, and takes them back where they did not help.

   Build:  cc -O2 -I. examples/autotune.c -o autotune -lpthread
   Run:    ./autotune */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <poll.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>

SPDL_FN(next_number, void, void) {
    *out = (void *)(uintptr_t)(spdl_sequence(task) + 1);
    return SPDL_OK;
}

/* Stands for a disk whose reads take 4 ms when there are up to 4 at a time, and longer beyond. */
SPDL_FN(read_sample, void, void) {
    static atomic_int reads;
    const int now = atomic_fetch_add(&reads, 1) + 1;
    poll(NULL, 0, now > 4 ? now : 4);
    atomic_fetch_sub(&reads, 1);
    *out = in;
    return SPDL_OK;
}

/* Items per second in a tenth of a second; *finding is what limited in it. */
static double tenth(spdl_pipeline *p, spdl_finding *finding) {
    static spdl_stats stats, before;
    const uint64_t start = spdl_time_ns();
    uint64_t items = 0;
    void *item;
    spdl_pipeline_stats(p, &before);
    while (spdl_time_ns() - start < 100000000)
        items += spdl_pipeline_next(p, &item, SPDL_FOREVER) == SPDL_OK;
    spdl_pipeline_stats(p, &stats);
    spdl_stats_since(&stats, &before); /* not what other settings did */
    (void)spdl_stats_find(&stats, finding);
    return (double)items * 1e9 / (double)(spdl_time_ns() - start);
}

int main(void) {
    const spdl_pipeline_desc desc = { .workers = 16 };
    spdl_pipeline *p;
    spdl_finding advice;
    int calls = 1;
    if (spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_SOURCE(next_number),
            SPDL_PIPE(read_sample, .concurrency = 16),
            SPDL_SINK(8))) != SPDL_OK) return 1;
    (void)spdl_pipeline_set_concurrency(p, 1, calls);
    double rate = tenth(p, &advice);
    const double first = rate;
    while (advice.limit == SPDL_LIMIT_CONCURRENCY && advice.concurrency[1] > calls) {
        const int before = calls;
        const double old = rate;
        /* twice as many at a time: a step of 16 times hides the least number that does */
        calls = advice.concurrency[1] < 2 * calls ? advice.concurrency[1] : 2 * calls;
        if (spdl_pipeline_set_concurrency(p, 1, calls) != SPDL_OK) return 1;
        (void)tenth(p, &advice); /* let it settle */
        rate = tenth(p, &advice);
        printf("%2d reads at a time: %.0f items/s\n", calls, rate);
        if (rate > 1.05 * old) continue;
        (void)spdl_pipeline_set_concurrency(p, 1, calls = before);
        break;
    }
    spdl_pipeline_destroy(p);
    printf("%.0f items/s at the start; best with %d reads at a time\n", first, calls);
    return 0;
}
