/* cuda_blas.c - a layer of a network on the device, in plain C: cuBLAS is opened when the program
   runs, and called in a row of the pipeline, one call for each batch; the answers come back in
   order. Without a GPU, or cuBLAS, the same row computes on the CPU. (Not run on a GPU yet.)

   Build:  cc -O2 -I. examples/cuda_blas.c -o cuda_blas -lpthread -ldl -lm
   Run:    ./cuda_blas */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#define SPDL_CUDA_IMPLEMENTATION
#include "spdl_cuda.h"

#include <dlfcn.h>
#include <math.h>

enum { ROWS = 64, IN = 128, OUT = 16, BATCHES = 50, TRANSPOSED = 1, PLAIN = 0 };

/* What is used of cuBLAS; the weights go to the device as the second array of each batch. */
typedef struct Blas {
    void *handle;
    int (*create)(void **handle);
    int (*set_stream)(void *handle, void *stream);
    int (*sgemm)(void *handle, int ta, int tb, int m, int n, int k, const float *alpha,
                 const float *a, int lda, const float *b, int ldb, const float *beta, float *c,
                 int ldc);
} Blas;

static void find(void *library, const char *name, void *function) {
    void *symbol = library != NULL ? dlsym(library, name) : NULL;
    memcpy(function, &symbol, sizeof symbol);
}

static float weight(int i, int o) { return (float)((i * 7 + o * 3) % 11) - 5; }
static float feature(uint64_t n, int row, int i) {
    return (float)((n + (uint64_t)(row * 5 + i)) % 13);
}

SPDL_FN(load, void, spdl_cuda_host) {
    const uint64_t n = spdl_sequence(task);
    if (n == BATCHES) return SPDL_END;
    spdl_result result = spdl_cuda_host_take(task, spdl_ctx(task), out);
    if (result != SPDL_OK) return result;
    float *x = spdl_cuda_host_at(*out, 0), *w = spdl_cuda_host_at(*out, 1);
    for (int i = 0; i < ROWS * IN; i++) x[i] = feature(n, i / IN, i % IN);
    for (int i = 0; i < OUT * IN; i++) w[i] = weight(i % IN, i / IN);
    (*out)->user = (void *)(uintptr_t)n;
    return SPDL_OK;
}

/* y = x * w', rows of OUT floats: for cuBLAS, whose matrices are by column, y' = w * x'. */
static spdl_result layer(spdl_task *task, const spdl_cuda_batch *batch, spdl_cuda_output *out,
                         spdl_cuda_stream stream) {
    const Blas *blas = batch->context;
    const float *x = spdl_cuda_at(batch, 0), *w = spdl_cuda_at(batch, 1), one = 1, zero = 0;
    float *y = out->dev;
    if (stream == NULL) { /* the CPU */
        for (int i = 0; i < ROWS * OUT; i++) {
            y[i] = 0;
            for (int k = 0; k < IN; k++) y[i] += x[i / OUT * IN + k] * w[i % OUT * IN + k];
        }
        return SPDL_OK;
    }
    if (blas->set_stream(blas->handle, stream) != 0 ||
        blas->sgemm(blas->handle, TRANSPOSED, PLAIN, OUT, ROWS, IN, &one, w, IN, x, IN, &zero, y,
                    OUT) != 0) return spdl_fail(task, "cuBLAS has failed");
    return SPDL_OK;
}

static bool right(const spdl_cuda_output *out) {
    const int row = ROWS - 1, o = OUT - 1;
    float y = 0;
    for (int i = 0; i < IN; i++) y += feature((uintptr_t)out->user, row, i) * weight(i, o);
    return fabsf(((const float *)out->host)[row * OUT + o] - y) < 0.5f;
}

static bool open_blas(Blas *blas) {
    void *library = dlopen("libcublas.so", RTLD_NOW);
    find(library, "cublasCreate_v2", &blas->create);
    find(library, "cublasSetStream_v2", &blas->set_stream);
    find(library, "cublasSgemm_v2", &blas->sgemm);
    return blas->create && blas->set_stream && blas->sgemm && blas->create(&blas->handle) == 0;
}

/* How many answers were right. */
static int run(spdl_cuda *cuda) {
    const spdl_pipeline_desc workers = { .workers = 2 };
    spdl_pipeline *p;
    spdl_cuda_output *out;
    int n = 0;
    if (spdl_pipeline_create(&p, &workers, SPDL_STAGES(
            SPDL_SOURCE(load, .ctx = cuda, .free_item = spdl_cuda_host_free),
            SPDL_CUDA_STAGE(cuda, layer), SPDL_SINK(2))) != SPDL_OK) return 0;
    while (SPDL_NEXT(p, &out, SPDL_FOREVER) == SPDL_OK) {
        n += right(out);
        spdl_cuda_output_free(out);
    }
    spdl_pipeline_destroy(p);
    return n;
}

int main(void) {
    Blas blas = { 0 };
    const spdl_cuda_desc slots = { .array = { { .name = "x", .type = "<f4", .ndim = 2,
                                                .shape = { ROWS, IN } },
                                              { .name = "w", .type = "<f4", .ndim = 2,
                                                .shape = { OUT, IN } } },
                                   .output_bytes = ROWS * OUT * sizeof(float), .context = &blas,
                                   .backend = open_blas(&blas) ? SPDL_CUDA_AUTO : SPDL_CUDA_CPU };
    spdl_cuda *cuda;
    int n;
    if (spdl_cuda_open(&cuda, &slots) != SPDL_OK) return 1;
    n = run(cuda);
    printf("%d batches of %d on the %s\n", n, ROWS, spdl_cuda_on_cpu(cuda) ? "CPU" : "GPU");
    spdl_cuda_close(cuda);
    return n == BATCHES ? 0 : 1;
}
