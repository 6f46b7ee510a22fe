/* cuda_stream.c - batches as kernels want them: images and labels, each an array of its own, by one
   copy. Each call of `fill` decodes a batch where it stays: the iterator pins that memory, opens
   the device, and sends batches ahead.

   Build:  cc -O2 -I. examples/cuda_stream.c -o cuda_stream -lpthread -ldl
   Run:    ./cuda_stream */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#define SPDL_CUDA_IMPLEMENTATION
#include "spdl_cuda.h"

enum { IMAGES = 32, SIDE = 224, BATCHES = 200 };

typedef struct Batch { /* a struct of arrays */
    int32_t count;
    int32_t label[IMAGES];
    uint8_t image[IMAGES][3 * SIDE * SIDE];
} Batch;

/* Stands for a decoder. Several workers fill batches at the same time. */
SPDL_FN(fill, spdl_batch, Batch) {
    size_t i;
    *out = spdl_buffer(task);
    if (*out == NULL) return SPDL_E_NOMEM;
    (*out)->count = (int32_t)in->count;
    for (i = 0; i < in->count; i++) {
        const uint64_t n = ((const spdl_index *)in->items[i])->index; /* or a path */
        (*out)->label[i] = (int32_t)n;
        memset((*out)->image[i], (int)(n & 0xff), sizeof (*out)->image[i]);
    }
    return SPDL_OK;
}

/* Here a training step would be launched on the stream. */
static bool train(const Batch *on_device, spdl_cuda_stream stream) {
    (void)stream; /* step<<<grid, block, 0, stream>>>(on_device->image, on_device->label) */
    return on_device != NULL;
}

/* How many batches there were. */
static uint64_t run(spdl_pipeline *pipeline, spdl_error *error) {
    const spdl_cuda_iter_desc desc = { .next = spdl_pipeline_next, .source = pipeline,
                                       .buffers = true, .error = error };
    const spdl_cuda_stream stream = NULL; /* or a cudaStream_t of yours */
    const uint64_t start = spdl_time_ns();
    uint64_t n = 0;
    spdl_cuda_iter *it;
    spdl_cuda_batch batch;
    spdl_cuda_stats stats;
    if (spdl_cuda_iter_open(&it, &desc) != SPDL_OK) return 0;
    while (spdl_cuda_iter_next(it, stream, &batch, SPDL_FOREVER) == SPDL_OK &&
           train(batch.data, stream))
        n++;
    spdl_cuda_get_stats(batch.cuda, &stats);
    printf("%llu batches, %.2f GB/s; of %.1f MB %.1f were not pinned; waited for copies %.1f ms\n",
           (unsigned long long)n, (double)stats.bytes / (double)(spdl_time_ns() - start),
           (double)stats.bytes / 1e6, (double)stats.pageable_bytes / 1e6,
           (double)stats.wait_copy_ns / 1e6);
    spdl_cuda_iter_destroy(it); /* before the pipeline, whose memory it has pinned */
    return n;
}

int main(void) {
    spdl_error error = { 0 };
    const spdl_pipeline_desc desc = { .workers = 2, .error = &error };
    spdl_pipeline *pipeline;
    uint64_t n = 0;
    if (spdl_pipeline_create(&pipeline, &desc, SPDL_STAGES(
            SPDL_COUNT(IMAGES * BATCHES), SPDL_BATCH(IMAGES),
            SPDL_PIPE(fill, .item_bytes = sizeof(Batch), .concurrency = 2,
                      .free_item = spdl_buffer_free),
            SPDL_SINK(3))) == SPDL_OK)
        n = run(pipeline, &error);
    spdl_pipeline_destroy(pipeline);
    if (error.result != SPDL_OK) puts(error.text);
    return n != BATCHES && error.result != SPDL_E_NOT_FOUND; /* without a GPU: nothing to show */
}
