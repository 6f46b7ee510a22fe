/* gpu_step.c - part `step` of bench/gpu.sh: a training step. JPEGs of 500 x 375 are read, decoded
   and resized in place into pinned memory, in batches of 32; a batch is copied to the device; a
   product of matrices, one of them the batch, is repeated until the step takes 1, 5 or 20 ms. How
   many workers does that take, and what does it cost? bench/gpu_step.py is the same in PyTorch.

       STEP_WORKERS="1 2 4 8 15" STEP_MS="1 5 20" STEP_SECONDS=4 build/gpu/gpu_step FOLDER

   FOLDER is made, with the JPEGs.
   A line for each point: steps a second, that rate as a share of the steps without a loader, and
   CPU time of the process for each batch. Numbers of workers above that of the processors are left
   out. The first two batches and the last are compared with the bytes that must come.
   $STEP_CUBLAS names cuBLAS. Without it, and on the stand-in, a step is a kernel that waits. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#if defined(__has_include)
#if !__has_include(<cuda_runtime_api.h>)
#include "../tests/cudart_min/cuda_runtime_api.h" /* only to be compiled */
#endif
#endif
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#define SPDL_CUDA_IMPLEMENTATION
#include "../spdl_cuda.h"

#include "../tests/cuda_kit.h"
#include "bench.h"
#include "peer_work.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <math.h>

#ifdef BENCH_SIMULATED
enum { SIMULATED = 1 };
#else
enum { SIMULATED = 0 };
#endif

enum { BATCH = 32, SIDE = 1024 /* of the matrices: 4 MiB, less than a batch */, SLOTS = 4 };

static size_t batch_bytes;
static uint64_t sums[2]; /* of even and odd batches: there are 64 JPEGs */

static void must(cudaError_t error, const char *what) {
    if (error != cudaSuccess) bench_fail("%s: %s", what, cudaGetErrorString(error));
}

#define CUDA(call) must(call, #call)

/* ---- the step ---- */

static struct {
    void *handle; /* NULL: a kernel that waits */
    int (*gemm)(void *handle, int ta, int tb, int m, int n, int k, const float *alpha,
                const float *a, int lda, const float *b, int ldb, const float *beta, float *c,
                int ldc);
    float *b, *c;
    double one_ms;
    spdl_cuda_stream stream;
} model;

static void find(void *library, const char *name, void *function) {
    void *symbol = library != NULL ? dlsym(library, name) : NULL;
    memcpy(function, &symbol, sizeof symbol);
}

static void open_blas(void) {
    const char *named = getenv("STEP_CUBLAS");
    void *library = dlopen(named != NULL ? named : "libcublas.so", RTLD_NOW);
    int (*create)(void **handle), (*on)(void *handle, void *stream);
    find(library, "cublasCreate_v2", &create);
    find(library, "cublasSetStream_v2", &on);
    find(library, "cublasSgemm_v2", &model.gemm);
    if (create == NULL || on == NULL || model.gemm == NULL || create(&model.handle) != 0) return;
    if (on(model.handle, model.stream) != 0) bench_fail("cublasSetStream");
    CUDA(cudaMalloc((void **)&model.b, sizeof(float) * SIDE * SIDE));
    CUDA(cudaMalloc((void **)&model.c, sizeof(float) * SIDE * SIDE));
    CUDA(cudaMemset(model.b, 0, sizeof(float) * SIDE * SIDE));
}

static int products(double ms) {
    const int count = model.handle != NULL ? (int)lround(ms / model.one_ms) : 1;
    return count < 1 ? 1 : count;
}

static void step(const void *batch, double ms) {
    const float one = 1, zero = 0;
    int i;
    if (model.handle == NULL) {
        kit_spin(model.stream, (uint64_t)(ms * 1e6));
        return;
    }
    for (i = products(ms); i > 0; --i)
        if (model.gemm(model.handle, 0, 0, SIDE, SIDE, SIDE, &one, (const float *)batch, SIDE,
                       model.b, SIDE, &zero, model.c, SIDE) != 0)
            bench_fail("cublasSgemm");
}

/* Milliseconds of a step without a loader. */
static double alone(double ms, int steps) {
    uint64_t start;
    int i;
    step(model.b, ms);
    CUDA(cudaDeviceSynchronize());
    start = bench_ns();
    for (i = 0; i < steps; ++i) step(model.b, ms);
    CUDA(cudaDeviceSynchronize());
    return (double)(bench_ns() - start) * 1e-6 / steps;
}

static void open_model(void) {
    model.stream = kit_stream(false);
    if (!SIMULATED) open_blas();
    model.one_ms = 1e9; /* one product in a step */
    if (model.handle != NULL) model.one_ms = alone(1, 500);
}

/* ---- the loader ---- */

SPDL_FN(decode, spdl_index, void) {
    *out = spdl_buffer(task);
    if (*out == NULL) return SPDL_E_NOMEM;
    return peer_make(in->index, *out) ? SPDL_OK : spdl_fail(task, "the item was not made");
}

static void expect(void) {
    const size_t bytes = batch_bytes / BATCH;
    unsigned char *batch = (unsigned char *)malloc(batch_bytes);
    uint64_t i;
    for (i = 0; i < 2 * BATCH; ++i) {
        if (batch == NULL || !peer_make(i, batch + i % BATCH * bytes))
            bench_fail("a JPEG was not made");
        if ((i + 1) % BATCH == 0) sums[i / BATCH] = peer_take(0, batch, batch_bytes);
    }
    free(batch);
}

static void compare(const spdl_cuda_batch *batch, uint64_t n) {
    void *host = malloc(batch_bytes);
    BENCH_CHECK(host != NULL);
    CUDA(cudaMemcpyAsync(host, batch->data, batch_bytes, cudaMemcpyDeviceToHost,
                         (cudaStream_t)model.stream));
    CUDA(cudaStreamSynchronize((cudaStream_t)model.stream));
    if (peer_take(0, host, batch_bytes) != sums[n % 2])
        bench_fail("batch %llu is not what was loaded", (unsigned long long)n);
    free(host);
}

typedef struct rig {
    spdl_cuda *cuda;
    spdl_pipeline *loader;
    spdl_cuda_iter *it;
    spdl_cuda_batch batch;
    uint64_t n; /* batches */
} rig;

static void rig_open(rig *r, int workers) {
    spdl_cuda_desc device = { .slot_bytes = batch_bytes, .device_slots = SLOTS };
    spdl_pipeline_desc desc = { .workers = workers };
    spdl_cuda_iter_desc ahead = { .next = spdl_pipeline_next };
    spdl_error error;
    memset(r, 0, sizeof *r);
    device.error = &error;
    if (spdl_cuda_open(&r->cuda, &device) != SPDL_OK) bench_fail("%s", error.text);
    desc.allocator = spdl_cuda_allocator(r->cuda);
    BENCH_CHECK(spdl_pipeline_create(&r->loader, &desc, SPDL_STAGES(
        SPDL_COUNT(1 << 30), SPDL_PIPE(decode, .concurrency = workers),
        SPDL_BATCH(BATCH, .item_bytes = batch_bytes / BATCH), SPDL_SINK(3))) == SPDL_OK);
    ahead.source = r->loader;
    BENCH_CHECK(spdl_cuda_iter_create(&r->it, r->cuda, &ahead) == SPDL_OK);
}

static void rig_close(rig *r) {
    spdl_cuda_stats stats;
    spdl_cuda_get_stats(r->cuda, &stats);
    BENCH_CHECK(stats.pageable_bytes == 0);
    spdl_cuda_iter_destroy(r->it);
    spdl_pipeline_destroy(r->loader);
    spdl_cuda_close(r->cuda);
}

static void rig_step(rig *r, double ms, bool look) {
    const spdl_result result =
        spdl_cuda_iter_next(r->it, model.stream, &r->batch, SPDL_FOREVER);
    if (result != SPDL_OK) bench_fail("spdl_cuda_iter_next: %s", spdl_result_text(result));
    if (look) compare(&r->batch, r->n);
    step(r->batch.data, ms);
    ++r->n;
}

static void point(int workers, double ms, double alone_ms, double seconds) {
    const uint64_t ns = (uint64_t)(seconds * 1e9);
    uint64_t start, first;
    double cpu, rate;
    rig r;
    rig_open(&r, workers);
    start = bench_ns();
    while (r.n < 2 * SLOTS || bench_ns() - start < ns / 4) rig_step(&r, ms, r.n < 2);
    start = bench_ns();
    cpu = bench_cpu_ns();
    first = r.n;
    while (bench_ns() - start < ns) rig_step(&r, ms, false);
    cpu = bench_cpu_ns() - cpu;
    rate = (double)(r.n - first) * 1e9 / (double)(bench_ns() - start);
    printf("spdl.h %2d workers, step %2.0f ms: %7.1f steps/s, %.2f of the step alone, "
           "CPU %.1f ms a batch\n", workers, ms, rate, rate * alone_ms * 1e-3,
           cpu * 1e-6 / (double)(r.n - first));
    fflush(stdout);
    rig_step(&r, ms, true);
    rig_close(&r);
}

/* The numbers of a variable; returns how many. */
static int numbers(const char *name, const char *others, double to[8]) {
    const char *text = getenv(name) != NULL ? getenv(name) : others;
    char *end;
    int count;
    for (count = 0; count < 8; ++count, text = end) {
        to[count] = strtod(text, &end);
        if (end == text) break;
    }
    return count;
}

int main(int argc, char **argv) {
    double workers[8], ms[8], seconds[8];
    const int points = numbers("STEP_WORKERS", "1 2 4 8 15", workers);
    const int steps = numbers("STEP_MS", "1 5 20", ms);
    cpu_set_t may;
    int i, k;
    if (SIMULATED) {
        setenv("SPDL_LIBCUDA", "libcudart_sim.so", 0); /* the one that is loaded */
        puts("SIMULATION: there is no GPU here; the figures say nothing about any device");
    }
    if (argc != 2) return fputs("usage: gpu_step FOLDER\n", stderr) >= 0;
    if (peer_lacks(PEER_JPEG)) return puts("no libjpeg here: no step was measured") < 0;
    (void)numbers("STEP_SECONDS", "4", seconds);
    bench_print_machine(stdout);
    BENCH_CHECK(peer_jpegs(argv[1]) == 0);
    peer_open(argv[1], PEER_JPEG, 0, 0);
    batch_bytes = peer_item_bytes() * BATCH;
    expect();
    open_model();
    for (i = 0; i < steps; ++i) {
        const double alone_ms = alone(ms[i], (int)(300 / ms[i]) + 5);
        printf("a step of %.0f ms alone: %.3f ms, %s %d\n", ms[i], alone_ms,
               model.handle != NULL ? "products of 1024 x 1024, float32:" : "a kernel that waits:",
               products(ms[i]));
        for (k = 0; k < points; ++k)
            if ((int)workers[k] <= bench_allowed(&may))
                point((int)workers[k], ms[i], alone_ms, seconds[0]);
    }
    return 0;
}
