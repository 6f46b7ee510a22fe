/* cuda_infer.cu - an answer for each batch: a row of the pipeline sends what stages have filled,
   launches a kernel, and hands on what the kernel wrote when it is back on the host, in order. The
   copies there, the kernels and the copies back run at the same time. Without a GPU the same
   function computes on the CPU. (Not run on a GPU yet.)

   Build:  nvcc -O2 -I. examples/cuda_infer.cu -o cuda_infer
   Run:    ./cuda_infer */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#define SPDL_CUDA_IMPLEMENTATION
#include "spdl_cuda.h"

enum { IMAGES = 64, PIXELS = 96 * 96, BATCHES = 200 };
struct Answer { int brightest; float mean; };

SPDL_FN(load, void, spdl_cuda_host) { /* stands for a decoder */
    const uint64_t n = spdl_sequence(task);
    if (n == BATCHES) return SPDL_END;
    const spdl_result result = spdl_cuda_host_take(task, (spdl_cuda *)spdl_ctx(task), out);
    if (result != SPDL_OK) return result;
    uint8_t *pixels = (uint8_t *)spdl_cuda_host_at(*out, 0);
    for (int i = 0; i < IMAGES; i++) {
        memset(pixels + i * PIXELS, (int)(n + i) % 200, PIXELS);
        pixels[i * PIXELS + (int)n] = 255;
    }
    return SPDL_OK;
}

__host__ __device__ void look(const uint8_t *pixels, Answer *answer, int image) {
    unsigned sum = 0;
    int best = 0;
    for (int i = 0; i < PIXELS; i++) {
        const uint8_t pixel = pixels[image * PIXELS + i];
        sum += pixel;
        if (pixel > pixels[image * PIXELS + best]) best = i;
    }
    answer[image].brightest = best;
    answer[image].mean = (float)sum / PIXELS;
}

__global__ void look_kernel(const uint8_t *pixels, Answer *answer) {
    look(pixels, answer, (int)threadIdx.x);
}

static spdl_result launch(spdl_task *task, const spdl_cuda_batch *batch, spdl_cuda_output *out,
                          spdl_cuda_stream stream) {
    const uint8_t *pixels = (const uint8_t *)spdl_cuda_at(batch, 0);
    Answer *answer = (Answer *)out->dev;
    for (int i = 0; stream == NULL && i < IMAGES; i++) look(pixels, answer, i); /* the CPU */
    if (stream == NULL) return SPDL_OK;
    look_kernel<<<1, IMAGES, 0, (cudaStream_t)stream>>>(pixels, answer);
    const cudaError_t error = cudaGetLastError();
    return error ? spdl_fail(task, "launch: %s", cudaGetErrorString(error)) : SPDL_OK;
}

static int answers(spdl_pipeline *pipeline) {
    spdl_cuda_output *out;
    int n = 0;
    while (SPDL_NEXT(pipeline, &out, SPDL_FOREVER) == SPDL_OK) {
        const Answer *answer = (const Answer *)out->host;
        n += answer[0].brightest == n && answer[IMAGES - 1].brightest == n;
        spdl_cuda_output_free(out);
    }
    return n;
}

int main() {
    spdl_cuda_desc slots = spdl_cuda_desc();
    spdl_pipeline_desc workers = spdl_pipeline_desc();
    spdl_pipeline *pipeline = NULL;
    spdl_cuda *cuda;
    slots.slot_bytes = IMAGES * PIXELS;
    slots.output_bytes = IMAGES * sizeof(Answer);
    slots.array[0] = spdl_cuda_array{ "pixels", "u1", 2, { IMAGES, PIXELS }, 0, 0 };
    workers.workers = 3;
    if (spdl_cuda_open(&cuda, &slots) != SPDL_OK) return 1;
    const spdl_stage rows[] = {
        SPDL_SOURCE(load).with_ctx(cuda).with_free_item(spdl_cuda_host_free),
        SPDL_CUDA_STAGE(cuda, launch), SPDL_SINK(3) };
    int n = 0;
    if (spdl_pipeline_create(&pipeline, &workers, rows) == SPDL_OK) n = answers(pipeline);
    spdl_pipeline_destroy(pipeline);
    spdl_cuda_close(cuda);
    printf("%d batches of %d images answered\n", n, IMAGES);
    return n == BATCHES ? 0 : 1;
}
