/* cuda_stream.c - batches from a pipeline to the device, in plain C: stages write straight into
   pinned memory (batches in place), and the iterator sends them ahead by one copy each.

   Build:  cc -O2 -I. examples/cuda_stream.c -o cuda_stream -lpthread -ldl
   Run:    ./cuda_stream */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#define SPDL_CUDA_IMPLEMENTATION
#include "spdl_cuda.h"

enum { IMAGES = 32, SIDE = 224, BATCHES = 200 };

typedef struct Image {
    int32_t label;
    uint8_t pixels[3 * SIDE * SIDE];
} Image;

/* Stands for a decoder. Its buffer is its place in the batch that the device reads. */
SPDL_FN(load, void, Image) {
    const uint64_t n = spdl_sequence(task);
    if (n == IMAGES * BATCHES) return SPDL_END;
    *out = spdl_buffer(task);
    if (*out == NULL) return SPDL_E_NOMEM;
    (*out)->label = (int32_t)n;
    memset((*out)->pixels, (int)(n & 0xff), sizeof (*out)->pixels);
    return SPDL_OK;
}

/* Here a training step would be launched on the stream; batch->data is an Image[] on the device. */
static bool train(const spdl_cuda_batch *batch, uint64_t n) {
    return batch->sequence == n && batch->bytes == IMAGES * sizeof(Image);
}

static void report(const spdl_cuda *cuda, uint64_t ns) {
    spdl_cuda_stats stats;
    spdl_cuda_get_stats(cuda, &stats);
    printf("%llu batches, %.2f GB/s; of %.1f MB %.1f were not pinned; waited for copies %.1f ms\n",
           (unsigned long long)stats.batches, (double)stats.bytes / (double)ns,
           (double)stats.bytes / 1e6, (double)stats.pageable_bytes / 1e6,
           (double)stats.wait_copy_ns / 1e6);
}

/* How many batches were right. */
static uint64_t run(spdl_cuda *cuda, spdl_pipeline *pipeline) {
    const spdl_cuda_iter_desc ahead = { .next = spdl_pipeline_next, .source = pipeline,
                                        .item_bytes = sizeof(Image) };
    const spdl_cuda_stream stream = NULL; /* or a cudaStream_t of yours */
    const uint64_t start = spdl_time_ns();
    uint64_t n = 0;
    spdl_cuda_iter *it;
    spdl_cuda_batch batch;
    if (spdl_cuda_iter_create(&it, cuda, &ahead) != SPDL_OK) return 0;
    while (spdl_cuda_iter_next(it, stream, &batch, SPDL_FOREVER) == SPDL_OK && train(&batch, n))
        n++;
    spdl_cuda_iter_destroy(it);
    report(cuda, spdl_time_ns() - start);
    return n;
}

static spdl_pipeline *open_loader(spdl_cuda *cuda) {
    const spdl_pipeline_desc desc = { .workers = 2, .allocator = spdl_cuda_allocator(cuda) };
    spdl_pipeline *pipeline;
    if (spdl_pipeline_create(&pipeline, &desc, SPDL_STAGES(
            SPDL_SOURCE(load), SPDL_BATCH(IMAGES, .item_bytes = sizeof(Image)),
            SPDL_SINK(3))) != SPDL_OK) return NULL;
    return pipeline;
}

int main(void) {
    spdl_error error;
    spdl_cuda *cuda;
    const spdl_cuda_desc slots = { .slot_bytes = IMAGES * sizeof(Image), .error = &error };
    if (spdl_cuda_open(&cuda, &slots) != SPDL_OK) {
        puts(error.text); /* without a GPU there is nothing to show */
        return error.result != SPDL_E_NOT_FOUND;
    }
    spdl_pipeline *pipeline = open_loader(cuda);
    const uint64_t n = pipeline != NULL ? run(cuda, pipeline) : 0;
    spdl_pipeline_destroy(pipeline);
    spdl_cuda_close(cuda);
    return n != BATCHES;
}
