/* cc -O2 -I. examples/quickstart.c -o quickstart -lpthread
   While you write a program, add -DSPDL_DEBUG: what is wrong is said (see SPDL_DEBUG in spdl.h). */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#include <stdio.h>
#include <stdlib.h>

typedef struct Sample { double x, square; } Sample;

SPDL_FN(numbers, void, Sample) {                    /* the source: called until it says END */
    if (spdl_sequence(task) == 1000) return SPDL_END;
    if ((*out = malloc(sizeof(Sample))) == NULL) return spdl_fail(task, "out of memory");
    (*out)->x = (double)spdl_sequence(task);
    return SPDL_OK;
}
SPDL_FN(square, Sample, Sample) {                   /* a stage: up to 4 calls at a time */
    in->square = in->x * in->x;
    *out = in;
    return SPDL_OK;
}

int main(void) {
    spdl_pipeline *p;
    spdl_batch *batch;
    double sum = 0;
    if (spdl_pipeline_create(&p, &(spdl_pipeline_desc){ .workers = 4 }, SPDL_STAGES(
            SPDL_SOURCE(numbers, .free_item = free),
            SPDL_PIPE(square, .concurrency = 4),
            SPDL_BATCH(32),
            SPDL_SINK(3))) != SPDL_OK) return 1;    /* the log says which row and why */
    while (SPDL_NEXT(p, &batch, SPDL_FOREVER) == SPDL_OK) {
        for (size_t i = 0; i < batch->count; ++i) sum += ((Sample *)batch->items[i])->square;
        spdl_batch_free(batch);                     /* "training" on the batch, in order */
    }
    if (spdl_pipeline_failed(p)) puts(spdl_pipeline_error(p)->text);
    spdl_pipeline_destroy(p);
    printf("sum of squares: %.0f\n", sum);
    return sum == 332833500.0 ? 0 : 1;
}
