/* cuda_headspace.c - where does the time of a training step go? In the running program, the last
   batches are repeated from the device (what loading and the bus cost is gone), then from the host
   (what loading costs is gone), and then it goes on. Loading is too slow on purpose.

   Build:  cc -O2 -I. examples/cuda_headspace.c -o cuda_headspace -lpthread -ldl
   Run:    ./cuda_headspace */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#define SPDL_CUDA_IMPLEMENTATION
#include "spdl_cuda.h"

#include <poll.h>

enum { STEPS = 150, LOADERS = 2, BYTES = 1 << 20 };

SPDL_FN(number, void, void) {
    *out = (void *)(uintptr_t)(spdl_sequence(task) + 1);
    return SPDL_OK;
}

/* Stands for a read that takes 3 ms; with LOADERS of them at a time, one is ready every 1.5 ms. */
SPDL_FN(load, void, spdl_cuda_host) {
    spdl_result result = spdl_cuda_host_take(task, spdl_ctx(task), out);
    if (result != SPDL_OK) return result;
    memset(spdl_cuda_host_at(*out, 0), (int)(spdl_sequence(task) & 0xff), BYTES);
    poll(NULL, 0, 3);
    return SPDL_OK;
}

/* Stands for a training step that takes 1 ms. */
static void train_step(const spdl_cuda_batch *batch) {
    const uint64_t end = spdl_time_ns() + 1000000;
    while (spdl_time_ns() < end) (void)*(void *const volatile *)&batch->dev;
}

/* Steps per second, of STEPS steps; 0: it did not come that far. */
static double rate(spdl_cuda_iter *it) {
    const uint64_t start = spdl_time_ns();
    spdl_cuda_batch batch;
    for (int i = 0; i < STEPS; i++) {
        if (spdl_cuda_next(it, NULL, &batch, SPDL_FOREVER) != SPDL_OK) return 0;
        train_step(&batch);
    }
    return STEPS * 1e9 / (double)(spdl_time_ns() - start);
}

static int compare(spdl_cuda *cuda, spdl_pipeline *pipeline) {
    const spdl_cuda_iter_desc desc = { .next = spdl_pipeline_next_fn, .source = pipeline };
    double today, device, host;
    spdl_cuda_iter *it;
    if (spdl_cuda_iter_open(&it, cuda, &desc) != SPDL_OK) return 1;
    today = rate(it);
    spdl_cuda_iter_hold(it, 3, SPDL_CUDA_HOLD_DEVICE);
    device = rate(it);
    spdl_cuda_iter_hold(it, 3, SPDL_CUDA_HOLD_HOST);
    host = rate(it);
    spdl_cuda_iter_hold(it, 0, SPDL_CUDA_HOLD_HOST); /* training would go on here */
    spdl_cuda_iter_close(it);
    if (today <= 0 || host <= 0 || device <= 0) return 1;
    printf("on the device  %7.1f steps/s: the ceiling\n", device);
    printf("on the host    %7.1f steps/s: the bus costs %.1f %%\n", host,
           100 * (device / host - 1));
    printf("today          %7.1f steps/s: loading costs %.1f %%\n", today,
           100 * (host / today - 1));
    return 0;
}

int main(void) {
    const spdl_cuda_desc slots = { .array = { { .name = "bytes", .type = "u1", .ndim = 1,
                                                .shape = { BYTES } } }, .host_slots = 8 };
    const spdl_pipeline_desc loader = { .workers = LOADERS };
    int failed = 1;
    spdl_cuda *cuda;
    spdl_pipeline *pipeline;
    if (spdl_cuda_open(&cuda, &slots) != SPDL_OK) return 1;
    if (spdl_pipeline_create(&pipeline, &loader, SPDL_STAGES(
            SPDL_SOURCE(number), SPDL_PIPE(load, .ctx = cuda, .concurrency = LOADERS,
                                           .free_item = spdl_cuda_host_free),
            SPDL_SINK(3))) == SPDL_OK) failed = compare(cuda, pipeline);
    spdl_pipeline_destroy(pipeline);
    spdl_cuda_close(cuda);
    return failed;
}
