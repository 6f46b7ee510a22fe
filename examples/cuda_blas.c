/* cuda_blas.c - a layer of a network on the device, in plain C: cuBLAS is opened when the program
   runs, and called once for each batch; the answer of one comes back while the next is computed.
   (Not run on a GPU yet.)

   Build:  cc -O2 -I. examples/cuda_blas.c -o cuda_blas -lpthread -ldl -lm
   Run:    ./cuda_blas */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#define SPDL_CUDA_IMPLEMENTATION
#include "spdl_cuda.h"

#include <dlfcn.h>
#include <math.h>

enum { ROWS = 64, IN = 128, OUT = 16, BATCHES = 50, TRANSPOSED = 1, PLAIN = 0 };

typedef struct Batch { float x[ROWS][IN], weight[OUT][IN]; } Batch;

typedef struct Blas { /* what is used of cuBLAS */
    void *handle;
    int (*create)(void **handle);
    int (*sgemm)(void *handle, int ta, int tb, int m, int n, int k, const float *alpha,
                 const float *a, int lda, const float *b, int ldb, const float *beta, float *c,
                 int ldc);
} Blas;

static void find(void *library, const char *name, void *function) {
    void *symbol = library != NULL ? dlsym(library, name) : NULL;
    memcpy(function, &symbol, sizeof symbol);
}

static bool open_blas(Blas *blas) {
    void *library = dlopen("libcublas.so", RTLD_NOW);
    find(library, "cublasCreate_v2", &blas->create);
    find(library, "cublasSgemm_v2", &blas->sgemm);
    return blas->create && blas->sgemm && blas->create(&blas->handle) == 0;
}
static float weight(int i, int o) { return (float)((i * 7 + o * 3) % 11) - 5; }
static float feature(uint64_t n, int row, int i) {
    return (float)((n + (uint64_t)(row * 5 + i)) % 13);
}

SPDL_FN(load, void, Batch) {
    const uint64_t n = spdl_sequence(task);
    if (n == BATCHES) return SPDL_END;
    *out = spdl_buffer(task);
    if (*out == NULL) return SPDL_E_NOMEM;
    for (int i = 0; i < ROWS * IN; i++) (*out)->x[i / IN][i % IN] = feature(n, i / IN, i % IN);
    for (int i = 0; i < OUT * IN; i++) (*out)->weight[i / IN][i % IN] = weight(i % IN, i / IN);
    return SPDL_OK;
}

static spdl_result describe(void *item, spdl_cuda_view *view) {
    view->data = item;
    view->bytes = sizeof(Batch);
    return SPDL_OK;
}

/* y = x * w': for cuBLAS, by column, y' = w * x'. A new handle works on the legacy stream. */
static bool layer(const Blas *blas, const Batch *batch, float *y) {
    const float one = 1, zero = 0;
    return blas->sgemm(blas->handle, TRANSPOSED, PLAIN, OUT, ROWS, IN, &one, batch->weight[0], IN,
                       batch->x[0], IN, &zero, y, OUT) == 0;
}

/* Whether the answer is right; frees it. */
static bool check(spdl_cuda_output *out, uint64_t n) {
    const int row = ROWS - 1, o = OUT - 1;
    float y = 0;
    for (int i = 0; i < IN; i++) y += feature(n, row, i) * weight(i, o);
    bool right = spdl_cuda_output_wait(out, SPDL_FOREVER) == SPDL_OK &&
                       fabsf(((const float *)out->host)[row * OUT + o] - y) < 0.5f;
    spdl_cuda_output_free(out);
    return right;
}

static int answer(const Blas *blas, spdl_cuda *cuda, spdl_cuda_iter *it) {
    spdl_cuda_output *out, *last = NULL;
    spdl_cuda_batch batch;
    int right = 0, n = 0;
    for (; spdl_cuda_iter_next(it, NULL, &batch, SPDL_FOREVER) == SPDL_OK; n++, last = out) {
        if (spdl_cuda_output_get(cuda, NULL, &out, SPDL_FOREVER) != SPDL_OK) break;
        if (!layer(blas, batch.data, out->dev) || spdl_cuda_output_send(out) != SPDL_OK) break;
        if (last != NULL) right += check(last, (uint64_t)n - 1);
    }
    if (last != NULL) right += check(last, (uint64_t)n - 1);
    return right;
}

static int run(const Blas *blas, spdl_cuda *cuda) {
    const spdl_pipeline_desc loader = { .workers = 2, .allocator = spdl_cuda_allocator(cuda) };
    spdl_cuda_iter_desc ahead = { .next = spdl_pipeline_next, .view = describe,
                                  .free_item = spdl_buffer_free };
    spdl_pipeline *pipeline = NULL;
    spdl_cuda_iter *it = NULL;
    int right = 0;
    if (spdl_pipeline_create(&pipeline, &loader, SPDL_STAGES(
            SPDL_SOURCE(load, .item_bytes = sizeof(Batch), .free_item = spdl_buffer_free),
            SPDL_SINK(2))) != SPDL_OK) return 0;
    ahead.source = pipeline;
    if (spdl_cuda_iter_create(&it, cuda, &ahead) == SPDL_OK) right = answer(blas, cuda, it);
    spdl_cuda_iter_destroy(it);
    spdl_pipeline_destroy(pipeline);
    return right;
}

int main(void) {
    const spdl_cuda_desc slots = { .slot_bytes = sizeof(Batch),
                                   .output_bytes = ROWS * OUT * sizeof(float) };
    Blas blas = { 0 };
    spdl_cuda *cuda;
    if (spdl_cuda_open(&cuda, &slots) != SPDL_OK || !open_blas(&blas)) {
        spdl_cuda_close(cuda);
        return puts("no GPU, or no cuBLAS") < 0;
    }
    const int right = run(&blas, cuda);
    printf("%d batches of %d\n", right, ROWS);
    spdl_cuda_close(cuda);
    return right != BATCHES;
}
