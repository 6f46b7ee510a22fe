/* cuda_headspace.c - where does the time of a training step go? The same loop on batches from the
   loader, on batches kept in pinned memory (what loading costs is gone), and on batches kept on the
   device (what the bus costs is gone too). Loading is too slow on purpose.

   Build:  cc -O2 -I. examples/cuda_headspace.c -o cuda_headspace -lpthread -ldl
   Run:    ./cuda_headspace */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#define SPDL_CUDA_DLOPEN
#define SPDL_CUDA_IMPLEMENTATION
#include "spdl_cuda.h"

#include <poll.h>

enum { STEPS = 200, KEPT = 20, LOADERS = 2, BYTES = 1 << 20 };

SPDL_FN(next_slot, void, spdl_cuda_host) {
    const uint64_t n = spdl_sequence(task), shape[] = { BYTES };
    const int64_t patience = SPDL_SECONDS(0.1);
    spdl_result result = SPDL_TIMEOUT;
    void *bytes;
    if (n == STEPS) return SPDL_END;
    while (result == SPDL_TIMEOUT && !spdl_stopping(task))
        result = spdl_cuda_host_get((spdl_cuda *)spdl_ctx(task), out, patience);
    if (result != SPDL_OK) return result == SPDL_TIMEOUT ? SPDL_SKIP : result;
    result = spdl_cuda_host_add(*out, "bytes", "u1", 1, shape, &bytes);
    if (result != SPDL_OK) {
        spdl_cuda_host_free(*out);
        return result;
    }
    memset(bytes, (int)(n & 0xff), BYTES);
    return SPDL_OK;
}

/* Stands for a read that takes 3 ms; with LOADERS of them at a time, one is ready every 1.5 ms. */
SPDL_FN(slow_load, spdl_cuda_host, spdl_cuda_host) {
    poll(NULL, 0, 3);
    *out = in;
    return SPDL_OK;
}

/* Stands for a training step that takes 1 ms. */
static void train_step(const spdl_cuda_batch *batch) {
    const uint64_t end = spdl_time_ns() + 1000000;
    while (spdl_time_ns() < end) (void)*(void *const volatile *)&batch->dev;
}

static void close_pipeline(void *pipeline) { spdl_pipeline_destroy((spdl_pipeline *)pipeline); }

static spdl_pipeline *open_pipeline(spdl_cuda *cuda) {
    spdl_pipeline *pipeline;
    const spdl_pipeline_desc desc = { .workers = LOADERS };
    spdl_pipeline_create(&pipeline, &desc, SPDL_STAGES(
        SPDL_SOURCE(next_slot, .ctx = cuda, .free_item = spdl_cuda_host_free),
        SPDL_PIPE(slow_load, .concurrency = LOADERS),
        SPDL_SINK(3)));
    return pipeline;
}

/* Steps per second once the first KEPT steps are done; 0 when it did not run to the end. */
static double steps_per_second(spdl_cuda *cuda, spdl_cuda_cache cache) {
    spdl_cuda_iter_desc desc = { .next = spdl_pipeline_next_fn, .cache = cache,
                                 .stop_after = STEPS, .delete_source = close_pipeline };
    uint64_t step = 0, start = 0;
    spdl_cuda_iter *it;
    spdl_cuda_batch batch;
    spdl_result result;
    desc.num_caches = cache == SPDL_CUDA_CACHE_NONE ? 0 : KEPT;
    desc.source = open_pipeline(cuda);
    if (!desc.source) return 0;
    if (spdl_cuda_iter_open(&it, cuda, &desc) != SPDL_OK) {
        close_pipeline(desc.source);
        return 0;
    }
    while ((result = spdl_cuda_next(it, NULL, &batch)) == SPDL_OK) {
        train_step(&batch);
        if (++step == KEPT) start = spdl_time_ns();
    }
    spdl_cuda_iter_close(it);
    return result == SPDL_END ? (double)(step - KEPT) * 1e9 / (double)(spdl_time_ns() - start) : 0;
}

int main(void) {
    spdl_error error = { .text = "" };
    const spdl_cuda_desc desc = { .slot_bytes = BYTES, .host_slots = 12, .error = &error };
    double today, host, device;
    spdl_cuda *cuda;
    if (spdl_cuda_open(&cuda, &desc) != SPDL_OK) {
        fprintf(stderr, "cuda_headspace: %s\n", error.text);
        return 1;
    }
    today = steps_per_second(cuda, SPDL_CUDA_CACHE_NONE);
    host = steps_per_second(cuda, SPDL_CUDA_CACHE_HOST);
    device = steps_per_second(cuda, SPDL_CUDA_CACHE_DEVICE);
    spdl_cuda_error(cuda, &error);
    spdl_cuda_close(cuda);
    if (today <= 0 || host <= 0 || device <= 0) {
        fprintf(stderr, "cuda_headspace: it did not run to the end. %s\n", error.text);
        return 1;
    }
    printf("on the device  %7.1f steps/s: the ceiling\n", device);
    printf("on the host    %7.1f steps/s: the bus costs %.1f %%\n", host,
           100 * (device / host - 1));
    printf("today          %7.1f steps/s: loading costs %.1f %%\n", today,
           100 * (host / today - 1));
    return 0;
}
