/* npz_rows.c - training samples from an array that need not fit in memory: each batch reads rows at
   random from a stored .npz file, and nothing else of it. Makes its file first: 4,096 samples.

   Build:  cc -O2 -I. examples/npz_rows.c -o npz_rows -lpthread
   Run:    ./npz_rows [FILE.npz]            (default: samples.npz, which it writes) */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#include "npz_writer.h"

#include <stdio.h>
#include <stdlib.h>

enum { SAMPLES = 4096, WIDTH = 64, BATCH = 32, BATCHES = 100 };

typedef struct Batch {
    float rows[BATCH][WIDTH];
} Batch;

static spdl_result make(const char *path, spdl_error *error) {
    static float data[SAMPLES][WIDTH];
    npz_writer *w;
    spdl_result result = npz_writer_open(&w, path, error);
    for (int i = 0; i < SAMPLES; i++)
        for (int k = 0; k < WIDTH; k++) data[i][k] = (float)i;
    if (result == SPDL_OK)
        result = npz_writer_add(w, "x", "f4", 2, (uint64_t[]){ SAMPLES, WIDTH }, data, error);
    if (result == SPDL_OK) result = npz_writer_finish(w, error);
    npz_writer_close(w);
    return result;
}

SPDL_FN(next_batch, void, Batch) {
    if (spdl_sequence(task) == BATCHES) return SPDL_END;
    return (*out = malloc(sizeof **out)) != NULL ? SPDL_OK : SPDL_E_NOMEM;
}

/* Several calls of it read at the same time: they share the archive. */
SPDL_FN(read_rows, Batch, Batch) {
    const spdl_npz *npz = spdl_ctx(task);
    uint64_t random = spdl_sequence(task) * 0x9e3779b97f4a7c15u;
    spdl_error error;
    *out = in;
    for (int i = 0; i < BATCH; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        if (spdl_npz_read_rows(npz, 0, (random >> 33) % SAMPLES, 1, in->rows[i],
                               sizeof in->rows[i], &error) != SPDL_OK)
            return spdl_fail(task, "%s", error.text);
    }
    return SPDL_OK;
}

int main(int argc, char **argv) {
    const char *path = argc > 1 ? argv[1] : "samples.npz";
    spdl_error error = { .text = "" };
    const spdl_pipeline_desc desc = { .error = &error };
    spdl_npz *npz = NULL;
    spdl_pipeline *p = NULL;
    Batch *batch;
    double sum = 0;
    int count = 0;
    if ((argc == 1 && make(path, &error) != SPDL_OK) ||
        spdl_npz_open(&npz, path, &(spdl_npz_desc){ .error = &error }) != SPDL_OK ||
        spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_SOURCE(next_batch, .free_item = free),
            SPDL_PIPE(read_rows, .ctx = npz, .concurrency = SPDL_ALL, .free_item = free),
            SPDL_SINK(4))) != SPDL_OK)
        fprintf(stderr, "npz_rows: %s\n", error.text);
    for (; p && SPDL_NEXT(p, &batch, SPDL_FOREVER) == SPDL_OK; count++, free(batch))
        for (int i = 0; i < BATCH; i++) sum += batch->rows[i][WIDTH - 1]; /* a training step */
    const bool failed = !p || spdl_pipeline_failed(p);
    if (p && failed) fprintf(stderr, "npz_rows: %s\n", spdl_pipeline_error(p)->text);
    if (!failed) printf("%d batches, mean of all samples %.0f\n", count, sum / count / BATCH);
    spdl_pipeline_destroy(p);
    spdl_npz_close(npz);
    return failed ? 1 : 0;
}
