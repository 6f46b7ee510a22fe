/* loaders_in_turn.c - several processes that load for one trainer: a loader each, of rank i of n of
   one sampler, taken in turn. So the trainer gets the same items in each n batches, for any n: it
   trains on what it would have trained on with one process. It is the way to use a library that is
   not thread-safe on all processors: one worker in each process.

   Build:  cc -O2 -I. examples/loaders_in_turn.c -o loaders_in_turn -lpthread
   Run:    ./loaders_in_turn [PROCESSES] */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <stdio.h>
#include <stdlib.h>

enum { ITEMS = 960, GLOBAL = 24, MOST = 8 };

typedef struct item { uint64_t index; double value; } item;

/* A library with a global state, say: two threads at a time would break it. */
static double library(uint64_t index) {
    static double state;
    state = (double)index;
    for (int i = 0; i < 1000; i++) state = state * 0.999 + 1;
    return state;
}

SPDL_FN(load, spdl_index, item) {
    if (!(*out = (item *)spdl_buffer(task))) return SPDL_E_NOMEM;
    (*out)->index = in->index;
    (*out)->value = library(in->index);
    return SPDL_OK;
}

int main(int argc, char **argv) {
    const int n = argc > 1 ? atoi(argv[1]) : 3;
    spdl_loader *loader[MOST];
    spdl_sampler *sampler[MOST];
    uint64_t sum = 0, items = 0;
    spdl_result result = SPDL_OK;
    if (n < 1 || n > MOST || GLOBAL % n) return fprintf(stderr, "1, 2, 3, 4, 6 or 8\n"), 2;
    for (int i = 0; i < n; i++) { /* all of them before anything that makes threads */
        spdl_sampler_desc order = { .order = SPDL_SAMPLE_SHUFFLED, .count = ITEMS, .seed = 7,
                                    .ranks = { i, n } };
        spdl_loader_desc desc = { .pipeline = { .workers = 1 }, .slot_count = 2 };
        if (spdl_sampler_create(&sampler[i], &order) != SPDL_OK
            || spdl_loader_open(&loader[i], &desc, SPDL_STAGES(
                   SPDL_INDEX(sampler[i]), SPDL_PIPE(load),
                   SPDL_BATCH(GLOBAL / n, .item_bytes = sizeof(item)),
                   SPDL_SINK(2))) != SPDL_OK)
            return fprintf(stderr, "spdl: rank %d cannot start\n", i), 1;
    }
    for (uint64_t step = 0; result == SPDL_OK; step++) { /* a step takes one batch of each */
        for (int i = 0; i < n && result == SPDL_OK; i++) {
            spdl_loader_batch batch;
            if ((result = spdl_loader_next(loader[i], &batch, SPDL_FOREVER)) != SPDL_OK) continue;
            for (size_t k = 0; k < batch.count; k++) /* in any order: the same for any n */
                sum += (((const item *)batch.data)[k].index + 1) * (step + 1);
            items += batch.count;
            spdl_loader_done(loader[i], &batch);
        }
    }
    if (result != SPDL_END) fprintf(stderr, "spdl: %s\n", spdl_result_text(result));
    printf("%d processes: %llu items, sum of steps %llu\n", n, (unsigned long long)items,
           (unsigned long long)sum);
    for (int i = 0; i < n; i++) {
        spdl_loader_close(loader[i]);
        spdl_sampler_destroy(sampler[i]);
    }
    return result != SPDL_END;
}
