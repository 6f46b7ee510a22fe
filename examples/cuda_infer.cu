/* cuda_infer.cu - an answer for each batch, as rows of a pipeline. `launch` sends what stages have
   filled and puts a kernel and the copy of its answer on streams. `arrive` is deferred: one thread
   waits for the answers and completes the calls. So no worker waits for the device; copies there,
   kernels and copies back overlap, and answers come in order. (Not run on a GPU yet.)

   Build:  nvcc -O2 -I. examples/cuda_infer.cu -o cuda_infer
   Run:    ./cuda_infer */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#define SPDL_CUDA_IMPLEMENTATION
#include "spdl_cuda.h"

#include <thread>

enum { IMAGES = 64, PIXELS = 96 * 96, BATCHES = 200, ON_DEVICE = 4, OUTPUTS = ON_DEVICE + 8 };
struct Images { uint8_t pixel[IMAGES][PIXELS]; };
struct Answer { int brightest; };
struct Call { spdl_deferred deferred; spdl_cuda_output *out; };
struct Model { spdl_cuda *cuda; cudaStream_t stream; spdl_ring *calls; };

SPDL_FN(load, void, Images) { /* stands for a decoder */
    const uint64_t n = spdl_sequence(task);
    if (n == BATCHES) return SPDL_END;
    *out = (Images *)spdl_buffer(task); /* memory that the device reads */
    if (*out == NULL) return SPDL_E_NOMEM;
    for (int i = 0; i < IMAGES; i++) {
        memset((*out)->pixel[i], (int)(n + i) % 200, PIXELS);
        (*out)->pixel[i][n] = 255;
    }
    return SPDL_OK;
}

__global__ void look(const Images *images, Answer *answer) { /* stands for a network */
    const uint8_t *pixel = images->pixel[threadIdx.x];
    int best = 0;
    for (int i = 0; i < PIXELS; i++)
        if (pixel[i] > pixel[best]) best = i;
    answer[threadIdx.x].brightest = best;
}

/* One call at a time, so that outputs are taken in order. */
SPDL_FN(launch, Images, spdl_cuda_output) {
    Model *m = (Model *)spdl_ctx(task);
    const spdl_cuda_view view = { in, sizeof *in, NULL, spdl_buffer_free, in };
    spdl_cuda_output *answer = NULL;
    spdl_cuda_batch batch;
    spdl_result result = SPDL_TIMEOUT;
    while (result == SPDL_TIMEOUT && !spdl_stopping(task))
        result = spdl_cuda_output_get(m->cuda, m->stream, &answer, SPDL_SECONDS(0.02));
    if (result == SPDL_TIMEOUT) return SPDL_SKIP;
    if (result == SPDL_OK) result = spdl_cuda_send(m->cuda, &view, &batch, SPDL_FOREVER);
    if (result == SPDL_OK) {
        spdl_take(task); /* `release` frees it, once it has been read */
        result = spdl_cuda_ready(&batch, m->stream);
        if (result == SPDL_OK)
            look<<<1, IMAGES, 0, m->stream>>>((const Images *)batch.data, (Answer *)answer->dev);
        spdl_cuda_batch_free(&batch); /* done with, on the stream */
    }
    if (result == SPDL_OK) result = spdl_cuda_output_send(answer);
    if (result == SPDL_OK) *out = answer;
    else spdl_cuda_output_free(answer);
    return result == SPDL_OK ? SPDL_OK : spdl_fail(task, "%s", spdl_result_text(result));
}

SPDL_FN(arrive, spdl_cuda_output, spdl_cuda_output) {
    const Call call = { spdl_defer(task), in };
    spdl_ring_push(((Model *)spdl_ctx(task))->calls, &call, SPDL_FOREVER); /* there is room */
    return SPDL_PENDING;
}

static void complete(Model *m) { /* of the one thread that waits */
    for (Call call; spdl_ring_pop(m->calls, &call, SPDL_FOREVER) == SPDL_OK;)
        if (spdl_cuda_output_wait(call.out, SPDL_FOREVER) == SPDL_OK)
            spdl_complete(call.deferred, SPDL_OK, call.out);
        else spdl_complete_fail(call.deferred, "the device is lost");
}

static int answers(Model *m) {
    spdl_pipeline_desc workers = spdl_pipeline_desc();
    spdl_pipeline *pipeline = NULL;
    spdl_cuda_output *out;
    int n = 0;
    workers.workers = 3;
    workers.allocator = spdl_cuda_allocator(m->cuda);
    const spdl_stage rows[] = {
        SPDL_SOURCE(load).with_item_bytes(sizeof(Images)).with_free_item(spdl_buffer_free),
        SPDL_PIPE(launch).with_ctx(m).with_free_item(spdl_cuda_output_free),
        SPDL_PIPE(arrive).with_ctx(m).with_deferred(true).with_concurrency(ON_DEVICE)
            .with_free_item(spdl_cuda_output_free), SPDL_SINK(3) };
    if (spdl_pipeline_create(&pipeline, &workers, rows) != SPDL_OK) return 0;
    while (SPDL_NEXT(pipeline, &out, SPDL_FOREVER) == SPDL_OK) {
        const Answer *answer = (const Answer *)out->host;
        n += answer[0].brightest == n && answer[IMAGES - 1].brightest == n;
        spdl_cuda_output_free(out);
    }
    spdl_pipeline_destroy(pipeline);
    return n;
}

static int run(spdl_cuda *cuda) {
    Model m = { cuda, NULL, NULL };
    spdl_ring_desc calls = spdl_ring_desc();
    calls.capacity = OUTPUTS;
    calls.item_bytes = sizeof(Call);
    if (cudaStreamCreateWithFlags(&m.stream, cudaStreamNonBlocking) ||
        spdl_ring_create(&m.calls, &calls) != SPDL_OK) return 0;
    std::thread waits(complete, &m);
    const int n = answers(&m);
    spdl_ring_close(m.calls);
    waits.join();
    spdl_ring_destroy(m.calls, NULL, NULL);
    return n;
}

int main() {
    spdl_cuda_desc slots = spdl_cuda_desc();
    spdl_error error;
    spdl_cuda *cuda;
    slots.slot_bytes = sizeof(Images);
    slots.output_bytes = IMAGES * sizeof(Answer);
    slots.output_slots = OUTPUTS;
    slots.error = &error;
    if (spdl_cuda_open(&cuda, &slots) != SPDL_OK)
        return puts(error.text) < 0 || error.result != SPDL_E_NOT_FOUND; /* no GPU: no show */
    const int n = run(cuda);
    printf("%d batches of %d images answered\n", n, IMAGES);
    spdl_cuda_close(cuda);
    return n != BATCHES;
}
