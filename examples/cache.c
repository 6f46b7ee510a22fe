/* cache.c - what would a loop gain if loading cost nothing? The oldest way to know: put a cache in
   front of it, which hands on the first items, keeps them, and hands them out again without asking
   the loader. The loop stays as it is; it takes from another next function.

   Build:  cc -O2 -I. examples/cache.c -o cache -lpthread
   Run:    ./cache */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>

enum { STEPS = 500, KEPT = 20 };

SPDL_FN(next_file, void, int) {
    if ((*out = (int *)malloc(sizeof **out)) == NULL) return SPDL_E_NOMEM;
    **out = (int)spdl_sequence(task);
    return SPDL_OK;
}

SPDL_FN(load, int, int) { /* stands for a read of 3 ms */
    poll(NULL, 0, 3);
    *out = in;
    return SPDL_OK;
}

static void train_step(const int *item) { /* stands for a step of 1 ms */
    const uint64_t end = spdl_time_ns() + 1000000;
    while (spdl_time_ns() < end) (void)*(const volatile int *)item;
}

/* Steps per second; `release` is NULL where the items are not the loop's. */
static double train(spdl_next_fn next, void *source, spdl_free_fn release) {
    const uint64_t start = spdl_time_ns();
    int steps = 0;
    void *item;
    for (; steps < STEPS && next(source, &item, SPDL_FOREVER) == SPDL_OK; ++steps) {
        train_step((const int *)item);
        if (release) release(item);
    }
    return steps * 1e9 / (double)(spdl_time_ns() - start);
}

static void end_loading(void *pipeline) {
    spdl_pipeline_destroy((spdl_pipeline *)pipeline);
}

int main(void) {
    spdl_pipeline *p;
    spdl_cache *cache;
    double today, cached;
    if (spdl_pipeline_create(&p, &(spdl_pipeline_desc){ .workers = 2 }, SPDL_STAGES(
            SPDL_SOURCE(next_file, .free_item = free),
            SPDL_PIPE(load, .concurrency = 2),
            SPDL_SINK(3))) != SPDL_OK) return 1;
    today = train(spdl_pipeline_next, p, free);
    if (spdl_cache_create(&cache, &(spdl_cache_desc){
            .next = spdl_pipeline_next, .source = p, .num_caches = KEPT,
            .return_caches_after = 2 * KEPT, /* the first ones are slow: let some pass */
            .delete_source = end_loading, /* as soon as it is not needed */
            .stop_after = STEPS, .free_item = free }) != SPDL_OK) return puts("out of memory"), 1;
    cached = train(spdl_cache_next, cache, NULL);
    spdl_cache_destroy(cache);
    printf("%.0f steps/s, %.0f on %d items that were kept: headspace %+.0f %%\n", today, cached,
           KEPT, 100 * (cached / today - 1));
    return 0;
}
