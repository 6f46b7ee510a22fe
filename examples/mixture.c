/* mixture.c - three data sets in shares, as a language model is trained on web pages, code and
   books. Each is shuffled anew on every pass; two ranks share the items, by themselves or as
   torchrun, mpirun or srun say. What is at a position is arithmetic: it can be
   asked for at any time, and does not depend on workers.

   Build:  cc -O2 -I. examples/mixture.c -o mixture -lpthread
   Run:    ./mixture */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <stdio.h>

static const char *const name[] = { "web", "code", "books" };

/* Finds the text that an index stands for; here it only takes note. */
SPDL_FN(load, spdl_index, spdl_index) {
    *out = in;
    return SPDL_OK;
}

static spdl_sampler *shuffled(uint64_t count) {
    spdl_sampler_desc desc = { .count = count, .order = SPDL_SAMPLE_SHUFFLED, .seed = 1 };
    spdl_sampler *s = NULL;
    return spdl_sampler_create(&s, &desc) == SPDL_OK ? s : NULL;
}

int main(void) {
    static const double weights[] = { 0.7, 0.2, 0.1 };
    spdl_sampler *sources[] = { shuffled(5000), shuffled(100), shuffled(40) }, *mixed;
    spdl_error error;
    spdl_ranks ranks;
    spdl_pipeline *p;
    spdl_index *item;
    spdl_index at;
    uint64_t position = 0;
    int taken[3] = { 0 }, failed, i;

    if (spdl_ranks_from_env(&ranks, NULL) != SPDL_OK) ranks = (spdl_ranks){ 0, 2 };
    if (spdl_sampler_create(&mixed, &(spdl_sampler_desc){
            .order = SPDL_SAMPLE_MIXTURE, .sources = 3, .weights = weights, .samplers = sources,
            .draws = 1000, .ranks = ranks, .error = &error }) != SPDL_OK)
        return puts(error.text), 1;

    if (spdl_pipeline_create(&p, NULL, SPDL_STAGES(
            SPDL_INDEX(mixed),
            SPDL_PIPE(load, .concurrency = SPDL_ALL),
            SPDL_SINK(8))) != SPDL_OK) return 1;
    while (SPDL_NEXT(p, &item, SPDL_FOREVER) == SPDL_OK) {
        taken[item->source]++;
        position = item->position;
        spdl_buffer_free(item);
    }
    failed = spdl_pipeline_failed(p);
    if (failed) puts(spdl_pipeline_error(p)->text);
    spdl_pipeline_destroy(p);

    printf("rank %d of %d, up to position %d\n", ranks.rank, ranks.world, (int)position);
    for (i = 0; i < 3; ++i)
        printf("%-5s  %3d items\n", name[i], taken[i]);
    for (i = 0; i < 1000 && spdl_sampler_item(mixed, 1, (uint64_t)i, &at) == SPDL_OK;
         i = i * 10 + 7)
        printf("item %2d of the next epoch: %d of %s\n", i, (int)at.index, name[at.source]);
    spdl_sampler_destroy(mixed);
    for (i = 0; i < 3; ++i) spdl_sampler_destroy(sources[i]);
    return failed;
}
