/* npz_samples.c - batches of samples out of shards with x[n, ...] and y[n]. Each epoch takes the
   shards in another order. Rows load several shards at a time, cut them into samples, and put 64
   samples into each batch. A consumer sees only whole batches. Without an argument it takes the
   digits in examples/data: x is "images", y is "labels".

   Build:  cc -O2 -I. examples/npz_samples.c -o npz_samples -lpthread
   Run:    ./npz_samples ["shards/train-*.npz"] */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <stdio.h>

typedef struct Sample { uint8_t x[8][8], y; } Sample;

/* One sample a call, until the shard is used up. Looks at a shard before it takes the first. */
SPDL_FN(cut, spdl_npz_bundle, Sample) {
    const spdl_npz_array *x = spdl_npz_bundle_find(in, "images");
    const spdl_npz_array *y = spdl_npz_bundle_find(in, "labels");
    uintptr_t *next = (uintptr_t *)spdl_call_state(task), i = (*next)++; /* from 0 in each shard */
    spdl_error error;
    if (i == 0 && (spdl_npz_expect(x, "u1", 3, (uint64_t[]){ 0, 8, 8 }, &error) != SPDL_OK ||
                   spdl_npz_expect(y, "u1", 1, x->info.shape, &error) != SPDL_OK))
        return spdl_fail(task, "%s", error.text);
    if (i == y->info.count) return SPDL_SKIP; /* an empty shard */
    if ((*out = spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    memcpy((*out)->x, (const uint8_t (*)[8][8])x->data + i, sizeof (*out)->x);
    (*out)->y = ((const uint8_t *)y->data)[i];
    return i + 1 < y->info.count ? SPDL_AGAIN : SPDL_OK;
}

int main(int argc, char **argv) {
    spdl_files *shards;
    spdl_sampler *order;
    spdl_pipeline *p;
    spdl_batch *batch;
    spdl_error error;
    size_t batches = 0, sum = 0;
    if (spdl_files_open(&shards, argc > 1 ? argv[1] : "examples/data/digits_train_*.npz",
                        &(spdl_files_desc){ .error = &error }) != SPDL_OK ||
        spdl_sampler_create(&order, &(spdl_sampler_desc){ .order = SPDL_SAMPLE_SHUFFLED,
            .count = spdl_files_count(shards), .seed = 1, .error = &error }) != SPDL_OK)
        return fprintf(stderr, "npz_samples: %s\n", error.text), 1;
    if (spdl_pipeline_create(&p, NULL, SPDL_STAGES(
            SPDL_INDEX(order), SPDL_FILES_AT(shards),
            SPDL_NPZ(NULL, .concurrency = 2, .buffer_size = 4),
            SPDL_PIPE(cut, .again = true, .item_bytes = sizeof(Sample)),
            SPDL_BATCH_OF(Sample, 64), SPDL_SINK(3))) != SPDL_OK) return 1; /* the log has it */
    for (; SPDL_NEXT(p, &batch, SPDL_FOREVER) == SPDL_OK; batches++, spdl_batch_free(batch))
        for (size_t i = 0; i < batch->count; i++)
            sum += ((Sample *)batch->data)[i].y; /* a training step */
    const bool failed = spdl_pipeline_failed(p);
    printf("%zu batches, the sum of all labels is %zu\n", batches, sum);
    spdl_pipeline_destroy(p);
    spdl_sampler_destroy(order);
    spdl_files_close(shards);
    return failed;
}
