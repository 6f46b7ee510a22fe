/* cuda_stream.c - batches from a pipeline to the device: stages write straight into pinned slots,
   the iterator sends them ahead. Plain C; without a GPU the same program runs on the CPU.

   Build:  cc -O2 -I. examples/cuda_stream.c -o cuda_stream -lpthread -ldl
   Run:    ./cuda_stream */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#define SPDL_CUDA_IMPLEMENTATION
#include "spdl_cuda.h"

enum { IMAGES = 32, SIDE = 224, BATCHES = 200 };

/* Takes a free slot and fills its two arrays. Stands for a decoder. */
SPDL_FN(load, void, spdl_cuda_host) {
    const uint64_t n = spdl_sequence(task);
    if (n == BATCHES) return SPDL_END;
    spdl_result result = spdl_cuda_host_take(task, spdl_ctx(task), out); /* back-pressure */
    if (result != SPDL_OK) return result;
    memset(spdl_cuda_host_at(*out, 0), (int)(n & 0xff), IMAGES * 3 * SIDE * SIDE);
    for (int i = 0; i < IMAGES; i++) ((int32_t *)spdl_cuda_host_at(*out, 1))[i] = (int32_t)n + i;
    return SPDL_OK;
}

/* Here a training step would be launched, on spdl_cuda_at(batch, 0) and (batch, 1). */
static bool train(const spdl_cuda_batch *batch, uint64_t n) {
    const int32_t *labels = (const void *)((const char *)batch->host + batch->array[1].offset);
    return batch->sequence == n && labels[IMAGES - 1] == (int32_t)n + IMAGES - 1;
}

static void report(const spdl_cuda *cuda, uint64_t ns) {
    spdl_cuda_stats stats;
    spdl_cuda_get_stats(cuda, &stats);
    printf("%llu batches of %.1f MB on the %s: %.2f GB/s, %.1f CUDA calls a batch\n",
           (unsigned long long)stats.batches, (double)stats.bytes / (double)stats.batches / 1e6,
           stats.on_cpu ? "CPU" : "GPU", (double)stats.bytes / (double)ns,
           (double)stats.cuda_calls / (double)stats.batches);
    printf("waited for the source %.1f ms, the bus %.1f ms, the device %.1f ms; copied by the CPU "
           "%llu bytes\n", (double)stats.wait_source_ns / 1e6, (double)stats.wait_bus_ns / 1e6,
           (double)stats.wait_device_ns / 1e6, (unsigned long long)stats.copied_bytes);
}

/* How many batches were right. */
static uint64_t run(spdl_cuda *cuda, spdl_pipeline *pipeline) {
    const spdl_cuda_iter_desc desc = { .next = spdl_pipeline_next_fn, .source = pipeline };
    const spdl_cuda_stream stream = NULL; /* or a cudaStream_t of yours */
    const uint64_t start = spdl_time_ns();
    uint64_t n = 0;
    spdl_cuda_iter *it;
    spdl_cuda_batch batch;
    if (spdl_cuda_iter_open(&it, cuda, &desc) != SPDL_OK) return 0;
    spdl_cuda_trace(cuda, pipeline); /* with SPDL_TRACE=t.json copies are in that file, too */
    while (spdl_cuda_next(it, stream, &batch, SPDL_FOREVER) == SPDL_OK && train(&batch, n)) n++;
    spdl_cuda_trace(cuda, NULL);
    spdl_cuda_iter_close(it);
    report(cuda, spdl_time_ns() - start);
    return n;
}

int main(void) {
    const spdl_cuda_desc slots = { .array = { { .name = "images", .type = "u1", .ndim = 4,
                                                .shape = { IMAGES, 3, SIDE, SIDE } },
                                              { .name = "labels", .type = "i4", .ndim = 1,
                                                .shape = { IMAGES } } },
                                   .host_slots = 8, .keep_host = true };
    const spdl_pipeline_desc loader = { .workers = 2 };
    uint64_t n = 0;
    spdl_cuda *cuda;
    spdl_pipeline *pipeline;
    if (spdl_cuda_open(&cuda, &slots) != SPDL_OK) return 1;
    if (spdl_pipeline_create(&pipeline, &loader, SPDL_STAGES(
            SPDL_SOURCE(load, .ctx = cuda, .free_item = spdl_cuda_host_free),
            SPDL_SINK(3))) == SPDL_OK) n = run(cuda, pipeline);
    spdl_pipeline_destroy(pipeline);
    spdl_cuda_close(cuda);
    return n == BATCHES ? 0 : 1;
}
