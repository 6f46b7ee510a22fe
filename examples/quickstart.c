/* cc -O2 -I. examples/quickstart.c -o quickstart -lpthread     (while you write: -DSPDL_DEBUG) */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#include <stdio.h>

SPDL_FN(mean, spdl_npz_bundle, double) {             /* a stage, called by all threads */
    const spdl_npz_array *images = spdl_npz_bundle_find(in, "images");
    double sum = 0;
    if (images == NULL) return spdl_fail(task, "there is no array 'images'");
    for (size_t i = 0; i < images->info.count; ++i) sum += ((uint8_t *)images->data)[i];
    if ((*out = spdl_buffer(task)) == NULL) return SPDL_E_NOMEM; /* its place in the batch */
    **out = sum / (double)images->info.count;
    return SPDL_OK;
}

int main(void) {
    spdl_files *files;
    spdl_pipeline *p;
    spdl_batch *batch;
    spdl_error error;
    if (spdl_files_open(&files, "examples/data/digits_train_*.npz",
                        &(spdl_files_desc){ .error = &error }) != SPDL_OK)
        return puts(error.text), 1;
    if (spdl_pipeline_create(&p, NULL, SPDL_STAGES(
            SPDL_FILES(files),                       /* the source: paths */
            SPDL_NPZ(NULL, .concurrency = SPDL_ALL), /* loads each file */
            SPDL_PIPE(mean, .concurrency = SPDL_ALL),
            SPDL_BATCH_OF(double, 16),               /* one block of memory */
            SPDL_SINK(3))) != SPDL_OK) return 1;     /* the log says which row and why */
    while (SPDL_NEXT(p, &batch, SPDL_FOREVER) == SPDL_OK) { /* in the order of the files */
        printf("%zu files, mean of the first %.3f\n", batch->count, ((double *)batch->data)[0]);
        spdl_batch_free(batch);
    }
    bool failed = spdl_pipeline_failed(p);
    if (failed) puts(spdl_pipeline_error(p)->text);
    spdl_pipeline_destroy(p);
    spdl_files_close(files);
    return failed;
}
