/* cuda_tokens.cu - tokens for a trainer such as llm.c: windows of a shard are written straight into
   pinned batches (batches in place), go to the device by one copy each, and the host looks at them
   too, as llm.c does to check that they are in the vocabulary. One epoch follows the other without
   a pause. Without a GPU the same loop runs on the CPU. (Not run on a GPU yet.)

   Build:  nvcc -O2 -I. examples/cuda_tokens.cu -o cuda_tokens
   Run:    ./cuda_tokens */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#define SPDL_CUDA_IMPLEMENTATION
#include "spdl_cuda.h"

enum { TOKENS = 256, BATCH = 16, WINDOWS = BATCH * 40, EPOCHS = 3, VOCABULARY = 50257 };
struct Window { int32_t inputs[TOKENS], targets[TOKENS]; };

SPDL_FN(window, void, Window) { /* stands for pread of a shard */
    const uint64_t n = spdl_sequence(task);
    if (n == WINDOWS) return SPDL_END;
    *out = (Window *)spdl_buffer(task); /* its place in the batch that the device reads */
    if (*out == NULL) return SPDL_E_NOMEM;
    for (int i = 0; i < TOKENS; i++) {
        (*out)->inputs[i] = (int32_t)((n * TOKENS + (uint64_t)i) % VOCABULARY);
        (*out)->targets[i] = (int32_t)((n * TOKENS + (uint64_t)i + 1) % VOCABULARY);
    }
    return SPDL_OK;
}

__host__ __device__ void step(const Window *windows, int *right, int i) { /* stands for a model */
    for (int t = 0; t < TOKENS; t++)
        right[i] += windows[i].targets[t] == (windows[i].inputs[t] + 1) % VOCABULARY;
}
__global__ void step_kernel(const Window *windows, int *right) {
    step(windows, right, (int)threadIdx.x);
}

static bool check_tokens(const Window *windows) { /* on the host, while the device has them too */
    for (int i = 0; i < BATCH; i++)
        for (int t = 0; t < TOKENS; t++)
            if (windows[i].inputs[t] < 0 || windows[i].inputs[t] >= VOCABULARY) return false;
    return true;
}

/* Trains for EPOCHS epochs; how many batches that were. */
static int train(spdl_cuda_iter *it, int *right, cudaStream_t stream, bool on_cpu) {
    int n = 0, epochs = 0;
    while (epochs < EPOCHS) {
        spdl_cuda_batch batch;
        const spdl_result result = spdl_cuda_next(it, stream, &batch, SPDL_FOREVER);
        if (result == SPDL_END) epochs++;
        if (result < 0) return -1;
        if (result != SPDL_OK) continue;
        const Window *windows = (const Window *)batch.dev;
        for (int i = 0; on_cpu && i < BATCH; i++) step(windows, right, i);
        if (!on_cpu) step_kernel<<<1, BATCH, 0, stream>>>(windows, right);
        if (!check_tokens((const Window *)batch.host)) return -1;
        n++;
    }
    return n;
}

static int run(spdl_cuda *cuda) {
    const bool on_cpu = spdl_cuda_on_cpu(cuda);
    spdl_cuda_iter_desc ahead = spdl_cuda_iter_desc();
    spdl_pipeline_desc loader = spdl_pipeline_desc();
    int counts[BATCH] = { 0 }, *right = counts, n = -1, sum = 0;
    spdl_pipeline *pipeline = NULL;
    spdl_cuda_iter *it = NULL;
    if (!on_cpu && (cudaMalloc(&right, sizeof counts) || cudaMemset(right, 0, sizeof counts)))
        return 1;
    loader.workers = 2;
    loader.allocator = spdl_cuda_slots(cuda);
    const spdl_stage rows[] = { SPDL_SOURCE(window).with_continuous(true),
                                SPDL_BATCH(BATCH).with_item_bytes(sizeof(Window)), SPDL_SINK(3) };
    if (spdl_pipeline_create(&pipeline, &loader, rows) != SPDL_OK) return 1;
    ahead.next = spdl_pipeline_next_fn;
    ahead.source = pipeline;
    ahead.view = spdl_cuda_view_batch;
    ahead.free_item = spdl_batch_free;
    if (spdl_cuda_iter_open(&it, cuda, &ahead) == SPDL_OK) n = train(it, right, NULL, on_cpu);
    spdl_cuda_iter_close(it);
    spdl_pipeline_destroy(pipeline);
    if (!on_cpu) cudaMemcpy(counts, right, sizeof counts, cudaMemcpyDeviceToHost);
    for (int i = 0; i < BATCH; i++) sum += counts[i];
    printf("%d batches, %d tokens were right\n", n, sum);
    return n == EPOCHS * WINDOWS / BATCH && sum == EPOCHS * WINDOWS * TOKENS ? 0 : 1;
}

int main() {
    spdl_cuda_desc slots = spdl_cuda_desc();
    spdl_cuda *cuda;
    slots.slot_bytes = BATCH * sizeof(Window);
    slots.device = SPDL_CUDA_LOCAL_RANK; /* one process for each GPU, by torchrun, mpirun or srun */
    slots.host_slots = -1;               /* everything is sent from where it is */
    slots.keep_host = true;
    if (spdl_cuda_open(&cuda, &slots) != SPDL_OK) return 1;
    const int failed = run(cuda);
    spdl_cuda_close(cuda);
    return failed;
}
