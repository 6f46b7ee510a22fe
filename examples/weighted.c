/* weighted.c - items drawn by weight, with an order function: rare classes come as often as common
   ones. A draw is two random numbers and one look into a table (Walker's alias method), whatever
   the count; it depends on (seed, epoch, position) alone, so ranks, workers and a state that is
   loaded are as with any other order. For draws without replacement sort by -log(u) / weight once
   an epoch, and return the index at that rank.

   Build:  cc -O2 -I. examples/weighted.c -o weighted -lpthread
   Run:    ./weighted */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <stdio.h>
#include <stdlib.h>

enum { ITEMS = 1000, DRAWS = 100000 };

/* Item i is kept with probability `keep`, else it is `other`: all have the same probability. */
typedef struct slot { double keep; uint32_t other; } slot;
typedef struct table { slot of[ITEMS]; uint64_t seed; } table;

/* An item with less than the mean is filled up by one that has more (Vose). */
static void table_make(table *t, const double *weight) {
    static double share[ITEMS];
    static uint32_t queue[ITEMS];
    uint32_t small = 0, large = ITEMS, i;
    double sum = 0;
    for (i = 0; i < ITEMS; i++) sum += weight[i];
    for (i = 0; i < ITEMS; i++) {
        share[i] = weight[i] * ITEMS / sum;
        t->of[i].keep = 1;
        t->of[i].other = i;
        queue[share[i] < 1 ? small++ : --large] = i;
    }
    while (small > 0 && large < ITEMS) { /* those with less lie before `small` */
        const uint32_t less = queue[--small], more = queue[large];
        t->of[less].keep = share[less];
        t->of[less].other = more;
        share[more] -= 1 - share[less];
        if (share[more] < 1) queue[small++] = queue[large++];
    }
}

static uint64_t draw(void *ctx, uint64_t epoch, uint64_t position) {
    const table *t = (const table *)ctx;
    const uint64_t key = spdl_hash(t->seed, &epoch, sizeof epoch);
    const uint64_t random = spdl_hash(key, &position, sizeof position);
    const uint32_t i = (uint32_t)((random >> 32) * ITEMS >> 32); /* two halves: two numbers */
    return (double)(uint32_t)random / 4294967296.0 < t->of[i].keep ? i : t->of[i].other;
}

SPDL_FN(load, spdl_index, spdl_index) {
    *out = in; /* finds what the index stands for; here it only takes note */
    return SPDL_OK;
}

int main(void) {
    static table t = { .seed = 7 };
    static double weight[ITEMS];
    spdl_sampler_desc order = { .order = SPDL_SAMPLE_FUNCTION, .count = ITEMS, .draws = DRAWS,
                                .index_fn = draw, .ctx = &t };
    spdl_error error;
    spdl_sampler *sampler;
    spdl_pipeline *p;
    spdl_index *item;
    int rare = 0, failed;
    for (int i = 0; i < ITEMS; i++) weight[i] = i < 10 ? 99 : 1; /* ten of a rare class */
    table_make(&t, weight);
    order.error = &error;
    if (spdl_sampler_create(&sampler, &order) != SPDL_OK) return puts(error.text), 1;
    if (spdl_pipeline_create(&p, NULL, SPDL_STAGES(
            SPDL_INDEX(sampler),
            SPDL_PIPE(load, .concurrency = SPDL_ALL),
            SPDL_SINK(8))) != SPDL_OK) return 1;
    while (SPDL_NEXT(p, &item, SPDL_FOREVER) == SPDL_OK) {
        rare += item->index < 10;
        spdl_buffer_free(item);
    }
    failed = spdl_pipeline_failed(p);
    if (failed) puts(spdl_pipeline_error(p)->text);
    spdl_pipeline_destroy(p);
    spdl_sampler_destroy(sampler);
    printf("%d of %d draws were of the rare class: 1 %% of the items, half of the weight\n", rare,
           DRAWS);
    return failed || abs(rare - DRAWS / 2) > DRAWS / 100;
}
