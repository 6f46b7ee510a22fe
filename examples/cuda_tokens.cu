/* cuda_tokens.cu - tokens for a trainer such as llm.c: windows of a shard are written straight into
   pinned batches (batches in place), a row looks at them on the host, as llm.c does to check that
   they are in the vocabulary, and they go to the device by one copy each. One epoch follows the
   other without a pause. (Not run on a GPU yet.)

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

SPDL_FN(check, spdl_batch, spdl_batch) {
    const Window *windows = (const Window *)in->data;
    for (size_t i = 0; i < in->count; i++)
        for (int t = 0; t < TOKENS; t++)
            if (windows[i].inputs[t] < 0 || windows[i].inputs[t] >= VOCABULARY)
                return spdl_fail(task, "token %d", (int)windows[i].inputs[t]);
    *out = in;
    return SPDL_OK;
}

__global__ void step(const Window *windows, int *right) { /* stands for a model */
    for (int t = 0; t < TOKENS; t++)
        right[threadIdx.x] += windows[threadIdx.x].targets[t] ==
                              (windows[threadIdx.x].inputs[t] + 1) % VOCABULARY;
}

/* Trains for EPOCHS epochs; how many batches that were. */
static int train(spdl_cuda_iter *it, int *right, cudaStream_t stream) {
    int n = 0, epochs = 0;
    while (epochs < EPOCHS) {
        spdl_cuda_batch batch;
        const spdl_result result = spdl_cuda_iter_next(it, stream, &batch, SPDL_FOREVER);
        if (result == SPDL_END) epochs++;
        if (result < 0) return -1;
        if (result != SPDL_OK) continue;
        step<<<1, BATCH, 0, stream>>>((const Window *)batch.data, right);
        n++;
    }
    return n;
}

static bool run(spdl_cuda *cuda) {
    spdl_cuda_iter_desc ahead = spdl_cuda_iter_desc();
    spdl_pipeline_desc loader = spdl_pipeline_desc();
    int counts[BATCH] = { 0 }, *right, n = -1, sum = 0;
    spdl_pipeline *pipeline = NULL;
    spdl_cuda_iter *it = NULL;
    if (cudaMalloc(&right, sizeof counts) || cudaMemset(right, 0, sizeof counts)) return false;
    loader.workers = 2;
    loader.allocator = spdl_cuda_allocator(cuda);
    const spdl_stage rows[] = {
        SPDL_SOURCE(window).with_continuous(true),
        SPDL_BATCH(BATCH).with_item_bytes(sizeof(Window)),
        SPDL_PIPE(check).with_free_item(spdl_batch_free), SPDL_SINK(3) };
    if (spdl_pipeline_create(&pipeline, &loader, rows) != SPDL_OK) return false;
    ahead.next = spdl_pipeline_next;
    ahead.source = pipeline;
    if (spdl_cuda_iter_create(&it, cuda, &ahead) == SPDL_OK) n = train(it, right, NULL);
    spdl_cuda_iter_destroy(it);
    spdl_pipeline_destroy(pipeline);
    cudaMemcpy(counts, right, sizeof counts, cudaMemcpyDeviceToHost);
    for (int i = 0; i < BATCH; i++) sum += counts[i];
    printf("%d batches, %d tokens were right\n", n, sum);
    return n == EPOCHS * WINDOWS / BATCH && sum == EPOCHS * WINDOWS * TOKENS;
}

int main() {
    const char *rank = getenv("LOCAL_RANK"); /* one process for each GPU, by torchrun */
    spdl_cuda_desc slots = spdl_cuda_desc();
    spdl_error error;
    spdl_cuda *cuda;
    slots.slot_bytes = BATCH * sizeof(Window);
    slots.device = rank != NULL ? SPDL_CUDA_ORDINAL(atoi(rank)) : 0;
    slots.error = &error;
    if (spdl_cuda_open(&cuda, &slots) != SPDL_OK)
        return puts(error.text) < 0 || error.result != SPDL_E_NOT_FOUND; /* no GPU: no show */
    const bool trained = run(cuda);
    spdl_cuda_close(cuda);
    return !trained;
}
