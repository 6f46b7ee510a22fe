/* cuda_graph.cu - CUDA graphs: a slot of the device always has the same address, so the step is
   captured once for each slot, and launched as the graph of the slot that a batch lies in. What
   makes a batch ready stays outside of the capture, where it belongs. Without a GPU the step runs
   on the CPU. (Not run on a GPU yet.)

   Build:  nvcc -O2 -I. examples/cuda_graph.cu -o cuda_graph
   Run:    ./cuda_graph */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#define SPDL_CUDA_IMPLEMENTATION
#include "spdl_cuda.h"

enum { FLOATS = 1 << 16, BATCHES = 100, SLOTS = 3, LAYERS = 8 };

SPDL_FN(load, void, spdl_cuda_host) {
    const uint64_t n = spdl_sequence(task);
    if (n == BATCHES) return SPDL_END;
    const spdl_result result = spdl_cuda_host_take(task, (spdl_cuda *)spdl_ctx(task), out);
    if (result != SPDL_OK) return result;
    for (int i = 0; i < FLOATS; i++) ((float *)spdl_cuda_host_at(*out, 0))[i] = (float)n;
    return SPDL_OK;
}

__host__ __device__ void layer(const float *x, float *sum, int i) { sum[i] += x[i] / LAYERS; }
__global__ void layer_kernel(const float *x, float *sum) {
    layer(x, sum, (int)(blockIdx.x * blockDim.x + threadIdx.x));
}

struct Model {
    float *sum; /* on the device */
    cudaStream_t stream;
    cudaGraphExec_t graph[SLOTS];
    bool on_cpu;
};

/* The step of a batch in this slot, captured when the slot is seen first. */
static bool capture(Model *m, const float *x, cudaGraphExec_t *exec) {
    cudaGraph_t graph;
    if (cudaStreamBeginCapture(m->stream, cudaStreamCaptureModeThreadLocal)) return false;
    for (int i = 0; i < LAYERS; i++) layer_kernel<<<FLOATS / 256, 256, 0, m->stream>>>(x, m->sum);
    return !cudaStreamEndCapture(m->stream, &graph) && !cudaGraphInstantiate(exec, graph, 0) &&
           !cudaGraphDestroy(graph);
}

static bool step(Model *m, const spdl_cuda_batch *batch) {
    const float *x = (const float *)batch->dev;
    cudaGraphExec_t *graph = &m->graph[batch->slot];
    for (int i = 0; m->on_cpu && i < LAYERS * FLOATS; i++) layer(x, m->sum, i % FLOATS);
    if (m->on_cpu) return true;
    return (*graph || capture(m, x, graph)) && !cudaGraphLaunch(*graph, m->stream);
}

static int train(Model *m, spdl_cuda *cuda, spdl_pipeline *pipeline) {
    spdl_cuda_iter_desc ahead = spdl_cuda_iter_desc();
    spdl_cuda_iter *it;
    spdl_cuda_batch batch;
    int n = 0;
    ahead.next = spdl_pipeline_next_fn;
    ahead.source = pipeline;
    if (spdl_cuda_iter_open(&it, cuda, &ahead) != SPDL_OK) return 0;
    while (spdl_cuda_next(it, m->stream, &batch, SPDL_FOREVER) == SPDL_OK && step(m, &batch)) n++;
    spdl_cuda_iter_close(it);
    return n;
}

static bool open_model(Model *m, bool on_cpu) {
    m->on_cpu = on_cpu;
    if (on_cpu) return (m->sum = (float *)calloc(FLOATS, sizeof(float))) != NULL;
    return !cudaMalloc(&m->sum, FLOATS * sizeof(float)) &&
           !cudaMemset(m->sum, 0, FLOATS * sizeof(float)) &&
           !cudaStreamCreateWithFlags(&m->stream, cudaStreamNonBlocking);
}

int main() {
    Model m = Model();
    spdl_cuda_desc slots = spdl_cuda_desc();
    spdl_pipeline_desc loader = spdl_pipeline_desc();
    spdl_pipeline *pipeline = NULL;
    spdl_cuda *cuda;
    float sum = 0;
    slots.array[0] = spdl_cuda_array{ "x", "<f4", 1, { FLOATS }, 0, 0 };
    slots.device_slots = SLOTS;
    loader.workers = 2;
    if (spdl_cuda_open(&cuda, &slots) != SPDL_OK) return 1;
    const spdl_stage rows[] = {
        SPDL_SOURCE(load).with_ctx(cuda).with_free_item(spdl_cuda_host_free), SPDL_SINK(3) };
    if (open_model(&m, spdl_cuda_on_cpu(cuda)) &&
        spdl_pipeline_create(&pipeline, &loader, rows) == SPDL_OK) train(&m, cuda, pipeline);
    spdl_pipeline_destroy(pipeline);
    spdl_cuda_close(cuda); /* has waited for copies, not for the steps */
    if (!m.on_cpu) cudaStreamSynchronize(m.stream);
    if (m.on_cpu) sum = m.sum[FLOATS - 1];
    else cudaMemcpy(&sum, m.sum + FLOATS - 1, sizeof sum, cudaMemcpyDeviceToHost);
    printf("%.0f after %d batches\n", sum, BATCHES);
    return sum == BATCHES * (BATCHES - 1) / 2 ? 0 : 1;
}
