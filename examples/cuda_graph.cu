/* cuda_graph.cu - CUDA graphs: a slot of the device always has the same address, so the step is
   captured once for each slot, and launched as the graph of the slot that a batch lies in. What
   makes a batch ready stays outside of the capture, where it belongs. (Not run on a GPU yet.)

   Build:  nvcc -O2 -I. examples/cuda_graph.cu -o cuda_graph
   Run:    ./cuda_graph */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#define SPDL_CUDA_IMPLEMENTATION
#include "spdl_cuda.h"

enum { FLOATS = 1 << 16, BATCHES = 100, SLOTS = 3, LAYERS = 8 };
struct Batch { float x[FLOATS]; };

SPDL_FN(load, void, Batch) {
    const uint64_t n = spdl_sequence(task);
    if (n == BATCHES) return SPDL_END;
    *out = (Batch *)spdl_buffer(task); /* memory that the device reads */
    if (*out == NULL) return SPDL_E_NOMEM;
    for (int i = 0; i < FLOATS; i++) (*out)->x[i] = (float)n;
    return SPDL_OK;
}

static spdl_result describe(void *item, spdl_cuda_view *view) {
    view->data = item;
    view->bytes = sizeof(Batch);
    return SPDL_OK;
}

__global__ void layer(const Batch *batch, float *sum) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    sum[i] += batch->x[i] / LAYERS;
}

struct Model {
    float *sum; /* on the device */
    cudaStream_t stream;
    cudaGraphExec_t graph[SLOTS];
};

/* The step of a batch in this slot, captured when the slot is seen first. */
static bool capture(Model *m, const Batch *batch, cudaGraphExec_t *exec) {
    cudaGraph_t graph;
    if (cudaStreamBeginCapture(m->stream, cudaStreamCaptureModeThreadLocal)) return false;
    for (int i = 0; i < LAYERS; i++) layer<<<FLOATS / 256, 256, 0, m->stream>>>(batch, m->sum);
    return !cudaStreamEndCapture(m->stream, &graph) && !cudaGraphInstantiate(exec, graph, 0) &&
           !cudaGraphDestroy(graph);
}

static bool step(Model *m, const spdl_cuda_batch *batch) {
    cudaGraphExec_t *graph = &m->graph[batch->slot];
    return (*graph || capture(m, (const Batch *)batch->data, graph)) &&
           !cudaGraphLaunch(*graph, m->stream);
}

static void train(Model *m, spdl_cuda *cuda, spdl_pipeline *pipeline) {
    spdl_cuda_iter_desc ahead = spdl_cuda_iter_desc();
    spdl_cuda_iter *it;
    spdl_cuda_batch batch;
    ahead.next = spdl_pipeline_next;
    ahead.source = pipeline;
    ahead.view = describe;
    ahead.free_item = spdl_buffer_free;
    if (spdl_cuda_iter_create(&it, cuda, &ahead) != SPDL_OK) return;
    while (spdl_cuda_iter_next(it, m->stream, &batch, SPDL_FOREVER) == SPDL_OK && step(m, &batch)) {}
    spdl_cuda_iter_destroy(it);
}

/* What the model has summed up. */
static float run(spdl_cuda *cuda) {
    Model m = Model();
    spdl_pipeline_desc loader = spdl_pipeline_desc();
    spdl_pipeline *pipeline = NULL;
    float sum = 0;
    loader.workers = 2;
    loader.allocator = spdl_cuda_allocator(cuda);
    const spdl_stage rows[] = {
        SPDL_SOURCE(load).with_item_bytes(sizeof(Batch)).with_free_item(spdl_buffer_free),
        SPDL_SINK(3) };
    if (!cudaMalloc(&m.sum, FLOATS * sizeof(float)) &&
        !cudaMemset(m.sum, 0, FLOATS * sizeof(float)) &&
        !cudaStreamCreateWithFlags(&m.stream, cudaStreamNonBlocking) &&
        spdl_pipeline_create(&pipeline, &loader, rows) == SPDL_OK) train(&m, cuda, pipeline);
    spdl_pipeline_destroy(pipeline);
    cudaStreamSynchronize(m.stream); /* closing has waited for copies, not for the steps */
    cudaMemcpy(&sum, m.sum + FLOATS - 1, sizeof sum, cudaMemcpyDeviceToHost);
    return sum;
}

int main() {
    spdl_cuda_desc slots = spdl_cuda_desc();
    spdl_error error;
    spdl_cuda *cuda;
    slots.slot_bytes = sizeof(Batch);
    slots.device_slots = SLOTS;
    slots.error = &error;
    if (spdl_cuda_open(&cuda, &slots) != SPDL_OK)
        return puts(error.text) < 0 || error.result != SPDL_E_NOT_FOUND; /* no GPU: no show */
    const float sum = run(cuda);
    printf("%.0f after %d batches\n", sum, BATCHES);
    spdl_cuda_close(cuda);
    return sum != BATCHES * (BATCHES - 1) / 2;
}
