/* cuda_headspace.c - what do loading and copying cost a training step? In the running program the
   last batches are repeated from the device, then it goes on. Loading is too slow on purpose.

   Build:  cc -O2 -I. examples/cuda_headspace.c -o cuda_headspace -lpthread -ldl
   Run:    ./cuda_headspace */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#define SPDL_CUDA_IMPLEMENTATION
#include "spdl_cuda.h"

#include <poll.h>

enum { STEPS = 150, LOADERS = 2, BYTES = 1 << 20 };

typedef struct Item { uint8_t bytes[BYTES]; } Item;

SPDL_FN(number, void, void) {
    *out = (void *)(uintptr_t)(spdl_sequence(task) + 1);
    return SPDL_OK;
}

/* Stands for a read that takes 3 ms; with LOADERS of them at a time, one is ready every 1.5 ms. */
SPDL_FN(load, void, Item) {
    *out = spdl_buffer(task);
    if (*out == NULL) return SPDL_E_NOMEM;
    memset(*out, (int)(spdl_sequence(task) & 0xff), sizeof **out);
    poll(NULL, 0, 3);
    return SPDL_OK;
}

static spdl_result describe(void *item, spdl_cuda_view *view) {
    view->data = item;
    view->bytes = sizeof(Item);
    return SPDL_OK;
}

/* Stands for a training step that takes 1 ms. */
static void train_step(const spdl_cuda_batch *batch) {
    const uint64_t end = spdl_time_ns() + 1000000;
    while (spdl_time_ns() < end) (void)*(void *const volatile *)&batch->data;
}

/* Steps per second, of STEPS steps; 0: it did not come that far. */
static double rate(spdl_cuda_iter *it) {
    const uint64_t start = spdl_time_ns();
    spdl_cuda_batch batch;
    for (int i = 0; i < STEPS; i++) {
        if (spdl_cuda_iter_next(it, NULL, &batch, SPDL_FOREVER) != SPDL_OK) return 0;
        train_step(&batch);
    }
    return STEPS * 1e9 / (double)(spdl_time_ns() - start);
}

static bool compare(spdl_cuda *cuda, spdl_pipeline *pipeline) {
    const spdl_cuda_iter_desc ahead = { .next = spdl_pipeline_next, .source = pipeline,
                                        .view = describe, .free_item = spdl_buffer_free };
    spdl_cuda_iter *it;
    if (spdl_cuda_iter_create(&it, cuda, &ahead) != SPDL_OK) return false;
    const double today = rate(it);
    spdl_cuda_iter_hold(it, 3);
    const double held = rate(it);
    spdl_cuda_iter_hold(it, 0);
    const double again = rate(it); /* training goes on */
    spdl_cuda_iter_destroy(it);
    if (today <= 0 || held <= 0 || again <= 0) return false;
    printf("on the device  %7.1f steps/s: the ceiling\n", held);
    printf("today          %7.1f steps/s: loading and copying cost %.1f %%\n", today,
           100 * (held / today - 1));
    return true;
}

static bool run(spdl_cuda *cuda) {
    const spdl_pipeline_desc loader = { .workers = LOADERS,
                                        .allocator = spdl_cuda_allocator(cuda) };
    spdl_pipeline *pipeline;
    const bool compared = spdl_pipeline_create(&pipeline, &loader, SPDL_STAGES(
        SPDL_SOURCE(number),
        SPDL_PIPE(load, .concurrency = LOADERS, .item_bytes = sizeof(Item),
                  .free_item = spdl_buffer_free),
        SPDL_SINK(3))) == SPDL_OK && compare(cuda, pipeline);
    spdl_pipeline_destroy(pipeline);
    return compared;
}

int main(void) {
    spdl_error error;
    const spdl_cuda_desc slots = { .slot_bytes = sizeof(Item), .error = &error };
    spdl_cuda *cuda;
    if (spdl_cuda_open(&cuda, &slots) != SPDL_OK) {
        puts(error.text); /* without a GPU there is nothing to show */
        return error.result != SPDL_E_NOT_FOUND;
    }
    const bool compared = run(cuda);
    spdl_cuda_close(cuda);
    return !compared;
}
