/* npz_batches.c - batches of training samples out of many .npz files: one row of the pipeline loads
   the files, several at a time, the next cuts them into samples, and batches of 64 come out at the
   end. Without arguments it takes the digits in examples/data.

   Build:  cc -O2 -I. examples/npz_batches.c -o npz_batches -lpthread
   Run:    ./npz_batches [FILE.npz ...]     (with arrays "images" (n, 8, 8) and "labels" (n,)) */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 64, PIXELS = 64, FILES = 48 };

typedef struct Files {
    char **paths; /* NULL: those in examples/data */
    uint64_t count;
} Files;

/* The samples of one file; images and labels lie in the bundle. */
typedef struct Samples {
    spdl_npz_bundle *bundle;
    const uint8_t *images, *labels;
    size_t count;
} Samples;

typedef struct Batch {
    uint8_t images[BATCH][PIXELS];
    uint8_t labels[BATCH];
    size_t count;
} Batch;

SPDL_FN(next_file, void, char) {
    const Files *files = spdl_ctx(task);
    const uint64_t n = spdl_sequence(task);
    if (n == files->count) return SPDL_END;
    if ((*out = malloc(SPDL_TEXT_BYTES)) == NULL) return SPDL_E_NOMEM;
    if (files->paths) snprintf(*out, SPDL_TEXT_BYTES, "%s", files->paths[n]);
    else snprintf(*out, SPDL_TEXT_BYTES, "examples/data/digits_train_%02d.npz", (int)n);
    return SPDL_OK;
}

static void samples_free(void *item) {
    Samples *samples = item;
    spdl_npz_bundle_free(samples->bundle);
    free(samples);
}

/* Looks at what is in a file before anybody computes with it, and keeps it. */
SPDL_FN(check, spdl_npz_bundle, Samples) {
    const spdl_npz_array *images = spdl_npz_bundle_find(in, "images");
    const spdl_npz_array *labels = spdl_npz_bundle_find(in, "labels");
    spdl_error error;
    if (spdl_npz_expect(images, "u1", 3, (uint64_t[]){ 0, 8, 8 }, &error) != SPDL_OK ||
        spdl_npz_expect(labels, "u1", 1, images->info.shape, &error) != SPDL_OK)
        return spdl_fail(task, "%s", error.text);
    if ((*out = malloc(sizeof **out)) == NULL) return SPDL_E_NOMEM;
    **out = (Samples){ in, images->data, labels->data, (size_t)labels->info.count };
    spdl_take(task); /* the bundle is the samples' now */
    return SPDL_OK;
}

/* Fills a batch from the files one after the other; false at the end. */
static bool next_batch(spdl_pipeline *p, Samples **file, size_t *at, Batch *batch) {
    for (batch->count = 0; batch->count < BATCH; batch->count++, ++*at) {
        while (*file == NULL || *at == (*file)->count) {
            if (*file) samples_free(*file);
            *file = NULL;
            *at = 0;
            if (SPDL_NEXT(p, file, SPDL_FOREVER) != SPDL_OK) return batch->count > 0;
        }
        memcpy(batch->images[batch->count], (*file)->images + *at * PIXELS, PIXELS);
        batch->labels[batch->count] = (*file)->labels[*at];
    }
    return true;
}

int main(int argc, char **argv) {
    Files files = { argc > 1 ? argv + 1 : NULL, argc > 1 ? (uint64_t)argc - 1 : FILES };
    spdl_pipeline *p;
    Samples *file = NULL;
    size_t at = 0, batches = 0, samples = 0;
    uint64_t sum = 0;
    static Batch batch;
    if (spdl_pipeline_create(&p, NULL, SPDL_STAGES(
            SPDL_SOURCE(next_file, .ctx = &files, .free_item = free),
            SPDL_NPZ(NULL, .concurrency = SPDL_ALL, .buffer_size = 4),
            SPDL_PIPE(check, .free_item = samples_free),
            SPDL_SINK(3))) != SPDL_OK) return 1;
    while (next_batch(p, &file, &at, &batch)) {
        batches++;
        samples += batch.count;
        for (size_t i = 0; i < batch.count; i++) sum += batch.labels[i]; /* a training step */
    }
    const bool failed = spdl_pipeline_failed(p);
    if (failed) fprintf(stderr, "npz_batches: %s\n", spdl_pipeline_error(p)->text);
    else printf("%zu samples in %zu batches, mean label %.2f\n", samples, batches,
                samples ? (double)sum / (double)samples : 0);
    spdl_pipeline_destroy(p);
    return failed ? 1 : 0;
}
