/* cuda_train.cu - trains on handwritten digits (see data/README.md). Files are read straight into
   pinned slots, bytes go over the bus, and the device makes floats of them: a quarter of the
   traffic. Without a GPU the same functions run on the CPU.

   Build:  nvcc -O2 -I. examples/cuda_train.cu -o cuda_train
   Run:    ./cuda_train [FOLDER] */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#define SPDL_CUDA_IMPLEMENTATION
#include "spdl_cuda.h"

enum { FILES = 48, STEPS = FILES * 60, PIXELS = 64, CLASSES = 10, MAX_IMAGES = 360 };
struct State {                        /* on the device */
    float weight[PIXELS + 1][CLASSES]; /* the last row is the bias */
    float pixel[MAX_IMAGES][PIXELS + 1], error[MAX_IMAGES][CLASSES];
    int right[MAX_IMAGES];
};

/* The kernels: what one thread does. */
struct Normalise { /* a byte to a float, for each pixel */
    const uint8_t *from;
    State *s;
    __host__ __device__ void operator()(int i) const {
        s->pixel[i / PIXELS][i % PIXELS] = (float)from[i] / 16;
        s->pixel[i / PIXELS][PIXELS] = 1;
    }
};
struct Predict { /* probabilities less the truth, for each image */
    const uint8_t *label;
    State *s;
    __host__ __device__ void operator()(int n) const {
        float sum = 0, *p = s->error[n];
        int best = 0;
        for (int k = 0; k < CLASSES; k++) {
            p[k] = 0;
            for (int i = 0; i <= PIXELS; i++) p[k] += s->weight[i][k] * s->pixel[n][i];
            best = p[k] > p[best] ? k : best;
        }
        for (int k = 0; k < CLASSES; k++) sum += p[k] = expf(p[k]);
        for (int k = 0; k < CLASSES; k++) p[k] = p[k] / sum - (k == label[n] ? 1.0f : 0.0f);
        s->right[n] = best == label[n];
    }
};
struct Learn { /* a step down the gradient, for each weight */
    State *s;
    int count;
    __host__ __device__ void operator()(int i) const {
        float slope = 0;
        for (int n = 0; n < count; n++)
            slope += s->error[n][i % CLASSES] * s->pixel[n][i / CLASSES];
        s->weight[i / CLASSES][i % CLASSES] -= 0.5f * slope / (float)count;
    }
};
template <class Body> __global__ void kernel(Body body, int count) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count) body(i);
}
template <class Body> void run(const Body &body, int count, cudaStream_t stream, bool on_cpu) {
    for (int i = 0; on_cpu && i < count; i++) body(i);
    if (!on_cpu) kernel<<<(count + 127) / 128, 128, 0, stream>>>(body, count);
}

struct Files { char path[FILES + 1][400]; spdl_cuda *cuda; }; /* the last is the test set */

SPDL_FN(load, void, spdl_cuda_host) {
    static const char *const names[] = { "images", "labels" };
    const Files *files = static_cast<const Files *>(spdl_ctx(task));
    const uint64_t n = spdl_sequence(task);
    const char *path = files->path[n == STEPS ? FILES : n % FILES];
    spdl_npz *npz;
    size_t at;
    void *data;
    if (n > STEPS) return SPDL_END;
    if (spdl_npz_open_file(&npz, path, NULL) != SPDL_OK) return spdl_fail(task, "%s: bad", path);
    spdl_result result = spdl_cuda_host_take(task, files->cuda, out);
    for (int i = 0; i < 2 && result == SPDL_OK; i++) {
        spdl_npy_info info;
        result = spdl_npz_find(npz, names[i], &at);
        if (result == SPDL_OK) result = spdl_npz_info(npz, at, &info, NULL);
        if (result == SPDL_OK) /* inflated, or copied, into memory that the device reads */
            result = spdl_cuda_host_add(*out, names[i], "u1", info.ndim, info.shape, &data);
        if (result == SPDL_OK) result = spdl_npz_read(npz, at, data, info.bytes, NULL);
    }
    spdl_npz_close(npz);
    if (result == SPDL_OK) return result;
    spdl_cuda_host_free(*out);
    return spdl_fail(task, "%s: %s", path, spdl_result_text(result));
}

/* Trains, and counts the right answers on the last batch; -1: it did not come that far. */
static int train(spdl_cuda_iter *it, State *state, cudaStream_t stream, bool on_cpu) {
    static int right[MAX_IMAGES];
    spdl_cuda_batch batch;
    int sum = 0;
    for (int n = 0; spdl_cuda_next(it, stream, &batch, SPDL_FOREVER) == SPDL_OK; n++) {
        const uint8_t *images = (const uint8_t *)spdl_cuda_at(&batch, 0);
        const uint8_t *labels = (const uint8_t *)spdl_cuda_at(&batch, 1);
        const int count = (int)batch.array[1].shape[0];
        run(Normalise{ images, state }, count * PIXELS, stream, on_cpu);
        run(Predict{ labels, state }, count, stream, on_cpu);
        if (n < STEPS) run(Learn{ state, count }, (PIXELS + 1) * CLASSES, stream, on_cpu);
        if (n < STEPS) continue;
        if (on_cpu) memcpy(right, state->right, sizeof right);
        else if (cudaMemcpyAsync(right, state->right, sizeof right, cudaMemcpyDeviceToHost, stream)
                 || cudaStreamSynchronize(stream)) return -1;
        for (int i = 0; i < count; i++) sum += right[i];
        return sum;
    }
    return -1;
}

/* The right answers, or -1; *error says why. */
static int run(Files *files, spdl_error *error) {
    const bool on_cpu = spdl_cuda_on_cpu(files->cuda);
    spdl_cuda_iter_desc ahead = spdl_cuda_iter_desc();
    spdl_pipeline_desc loader = spdl_pipeline_desc();
    spdl_pipeline *pipeline = NULL;
    spdl_cuda_iter *it = NULL;
    cudaStream_t stream = NULL;
    State *state = NULL;
    int right = -1;
    if (on_cpu) state = (State *)calloc(1, sizeof *state);
    else if (cudaMalloc(&state, sizeof *state) || cudaMemset(state, 0, sizeof *state) ||
             cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) return -1;
    ahead.error = loader.error = error;
    loader.workers = 1;
    const spdl_stage rows[] = {
        SPDL_SOURCE(load).with_ctx(files).with_free_item(spdl_cuda_host_free), SPDL_SINK(3) };
    if (spdl_pipeline_create(&pipeline, &loader, rows) == SPDL_OK) {
        ahead.next = spdl_pipeline_next_fn;
        ahead.source = pipeline;
        if (spdl_cuda_iter_open(&it, files->cuda, &ahead) == SPDL_OK)
            right = train(it, state, stream, on_cpu);
        spdl_cuda_iter_close(it);
        if (right < 0) *error = *spdl_pipeline_error(pipeline);
        spdl_pipeline_destroy(pipeline);
    }
    if (on_cpu) free(state);
    else cudaFree(state);
    return right;
}

int main(int argc, char **argv) {
    static Files files;
    spdl_error error = spdl_error();
    spdl_cuda_desc desc = spdl_cuda_desc();
    for (int i = 0; i <= FILES; i++)
        snprintf(files.path[i], sizeof files.path[i], i < FILES ? "%.300s/digits_train_%02d.npz"
                 : "%.300s/digits_test.npz", argc > 1 ? argv[1] : "examples/data", i);
    desc.slot_bytes = MAX_IMAGES * (PIXELS + 1) + 4096;
    desc.host_slots = 8;
    desc.error = &error;
    const int right = spdl_cuda_open(&files.cuda, &desc) == SPDL_OK ? run(&files, &error) : -1;
    spdl_cuda_close(files.cuda);
    if (right < 0) fprintf(stderr, "cuda_train: %s\n", error.text);
    else printf("%.1f %% of %d test images after %d steps\n", right / 3.6, MAX_IMAGES, STEPS);
    return right > 324 ? 0 : 1;
}
