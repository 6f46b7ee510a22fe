/* cuda_stream.c - batches of bytes from a pipeline to the device: stages write straight into pinned
   slots, the iterator sends them ahead. Plain C; without a GPU (or without the CUDA runtime) the
   same program runs on the CPU.

   Build:  cc -O2 -I. examples/cuda_stream.c -o cuda_stream -lpthread -ldl
   Run:    ./cuda_stream */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#define SPDL_CUDA_DLOPEN /* the CUDA runtime is looked for when the program runs */
#define SPDL_CUDA_IMPLEMENTATION
#include "spdl_cuda.h"

enum { IMAGES = 32, SIDE = 224, BATCHES = 200 };
static const size_t IMAGE_BYTES = 3 * SIDE * SIDE;

/* Takes a free slot and fills it: an array of images and one of labels. Stands for a decoder. */
SPDL_FN(load, void, spdl_cuda_host) {
    static const uint64_t image_shape[] = { IMAGES, 3, SIDE, SIDE }, label_shape[] = { IMAGES };
    const uint64_t n = spdl_sequence(task);
    const int64_t patience = SPDL_SECONDS(0.1);
    spdl_result result = SPDL_TIMEOUT;
    void *images, *labels;
    if (n == BATCHES) return SPDL_END;
    while (result == SPDL_TIMEOUT && !spdl_stopping(task)) /* back-pressure */
        result = spdl_cuda_host_get((spdl_cuda *)spdl_ctx(task), out, patience);
    if (result != SPDL_OK) return result == SPDL_TIMEOUT ? SPDL_SKIP : result;
    if (spdl_cuda_host_add(*out, "images", "u1", 4, image_shape, &images) != SPDL_OK ||
        spdl_cuda_host_add(*out, "labels", "i4", 1, label_shape, &labels) != SPDL_OK) {
        spdl_cuda_host_free(*out);
        return spdl_fail(task, "the slot is too small");
    }
    memset(images, (int)(n & 0xff), IMAGES * IMAGE_BYTES);
    for (int i = 0; i < IMAGES; i++) ((int32_t *)labels)[i] = (int32_t)n + i;
    return SPDL_OK;
}

/* Here a training step would be launched. This looks at a pixel and a label on the device. */
static bool right(const spdl_cuda_batch *batch, uint64_t n, spdl_cuda_stream stream) {
    const char *images = (const char *)spdl_cuda_batch_array(batch, "images");
    const char *labels = (const char *)spdl_cuda_batch_array(batch, "labels");
    const size_t last = IMAGES * IMAGE_BYTES - 1;
    uint8_t pixel = 0;
    int32_t label = 0;
    return images && labels
        && spdl_cuda_peek(batch, last, &pixel, sizeof pixel, stream) == SPDL_OK
        && spdl_cuda_peek(batch, (size_t)(labels - images), &label, sizeof label, stream) == SPDL_OK
        && pixel == (n & 0xff) && label == (int32_t)n;
}

/* Runs all batches; how many were right. */
static uint64_t stream_all(spdl_cuda *cuda, spdl_pipeline *pipeline, spdl_error *error) {
    const spdl_cuda_iter_desc desc = { .next = spdl_pipeline_next_fn, .source = pipeline,
                                       .error = error };
    const spdl_cuda_stream stream = NULL; /* or a cudaStream_t of yours */
    spdl_cuda_iter *it;
    spdl_cuda_batch batch;
    uint64_t n = 0;
    if (spdl_cuda_iter_open(&it, cuda, &desc) != SPDL_OK) return 0;
    spdl_cuda_trace(cuda, pipeline); /* with SPDL_TRACE=t.json copies are in that file, too */
    while (spdl_cuda_next(it, stream, &batch) == SPDL_OK && right(&batch, n, stream)) n++;
    spdl_cuda_iter_close(it);
    spdl_cuda_trace(cuda, NULL);
    return n;
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

int main(void) {
    spdl_error error = { .text = "" };
    const spdl_cuda_desc desc = { .slot_bytes = IMAGES * IMAGE_BYTES + 4096, .host_slots = 8,
                                  .error = &error };
    spdl_cuda *cuda;
    spdl_pipeline *pipeline;
    uint64_t n = 0;
    if (spdl_cuda_open(&cuda, &desc) == SPDL_OK) {
        const spdl_pipeline_desc loader = { .workers = 2, .error = &error };
        if (spdl_pipeline_create(&pipeline, &loader, SPDL_STAGES(
                SPDL_SOURCE(load, .ctx = cuda, .free_item = spdl_cuda_host_free),
                SPDL_SINK(3))) == SPDL_OK) {
            const uint64_t start = spdl_time_ns();
            n = stream_all(cuda, pipeline, &error);
            report(cuda, spdl_time_ns() - start);
            spdl_pipeline_destroy(pipeline);
        }
        if (n < BATCHES && error.text[0] == '\0') spdl_cuda_error(cuda, &error);
        spdl_cuda_close(cuda);
    }
    if (n < BATCHES)
        fprintf(stderr, "cuda_stream: batch %llu is wrong or missing. %s\n", (unsigned long long)n,
                error.text);
    return n == BATCHES ? 0 : 1;
}
