/* headspace.c - how much faster would this trainer be if loading cost nothing? It runs the
   same loop on a pipeline and on spdl_cache of the same pipeline. Loading is too slow on purpose.

   Build:  cc -O2 -I. examples/headspace.c -o headspace -lpthread
   Run:    ./headspace */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>

enum { STEPS = 200, KEPT = 20, LOADERS = 2 };

SPDL_FN(next_number, void, int) {
    const uint64_t n = spdl_sequence(task);
    if (n == STEPS) return SPDL_END;
    *out = (int *)malloc(sizeof **out);
    if (!*out) return SPDL_E_NOMEM;
    **out = (int)n;
    return SPDL_OK;
}

/* Stands for a read that takes 3 ms; with LOADERS of them at a time, one is ready every 1.5 ms. */
SPDL_FN(slow_load, int, int) {
    poll(NULL, 0, 3);
    *out = in;
    return SPDL_OK;
}

/* Stands for a training step that takes 1 ms. */
static void train_step(const int *item) {
    const uint64_t end = spdl_time_ns() + 1000000;
    while (spdl_time_ns() < end) (void)*(const volatile int *)item;
}

static spdl_pipeline *open_pipeline(void) {
    spdl_pipeline *pipeline;
    const spdl_pipeline_desc desc = { .workers = LOADERS };
    spdl_pipeline_create(&pipeline, &desc, SPDL_STAGES(
        SPDL_SOURCE(next_number, .free_item = free),
        SPDL_PIPE(slow_load, .concurrency = LOADERS),
        SPDL_SINK(3)));
    return pipeline;
}

static void close_pipeline(void *pipeline) { spdl_pipeline_destroy((spdl_pipeline *)pipeline); }

/* Steps per second once the first KEPT steps are done; 0 when it did not run to the end. */
static double steps_per_second(spdl_next_fn next, void *source, spdl_free_fn release) {
    uint64_t step = 0, start = 0;
    void *item;
    spdl_result result;
    while ((result = next(source, &item, SPDL_FOREVER)) == SPDL_OK) {
        train_step((const int *)item);
        if (release) release(item);
        if (++step == KEPT) start = spdl_time_ns();
    }
    return result == SPDL_END ? (double)(step - KEPT) * 1e9 / (double)(spdl_time_ns() - start) : 0;
}

static double measure_today(void) {
    static spdl_stats stats;
    char verdict[512];
    spdl_pipeline *pipeline = open_pipeline();
    if (!pipeline) return 0;
    const double rate = steps_per_second(spdl_pipeline_next_fn, pipeline, free);
    spdl_pipeline_stats(pipeline, &stats);
    spdl_stats_verdict(&stats, verdict, sizeof verdict);
    spdl_pipeline_destroy(pipeline);
    printf("%s\n", verdict);
    return rate;
}

static double measure_ceiling(void) {
    spdl_cache *cache;
    spdl_cache_desc desc = { .next = spdl_pipeline_next_fn, .num_caches = KEPT, .stop_after = STEPS,
                             .delete_source = close_pipeline, .free_item = free };
    desc.source = open_pipeline();
    if (!desc.source || spdl_cache_create(&cache, &desc) != SPDL_OK) {
        close_pipeline(desc.source);
        return 0;
    }
    const double rate = steps_per_second(spdl_cache_next_fn, cache, NULL);
    spdl_cache_destroy(cache);
    return rate;
}

int main(void) {
    const double today = measure_today(), ceiling = measure_ceiling();
    if (today <= 0 || ceiling <= 0) {
        fprintf(stderr, "headspace: the pipeline did not run\n");
        return 1;
    }
    printf("ceiling    %7.1f steps/s, all items cached\n", ceiling);
    printf("today      %7.1f steps/s, items from the pipeline\n", today);
    printf("headspace  %+7.1f %%\n", 100 * (ceiling / today - 1));
    return 0;
}
