/* cuda_train.cu - trains on handwritten digits (see data/README.md). Files are read into pinned
   batches, bytes go over the bus, and the device makes floats of them: a quarter of the traffic.
   (Not run on a GPU yet.)

   Build:  nvcc -O2 -I. examples/cuda_train.cu -o cuda_train
   Run:    ./cuda_train [FOLDER] */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#define SPDL_CUDA_IMPLEMENTATION
#include "spdl_cuda.h"

enum { FILES = 48, STEPS = FILES * 60, PIXELS = 64, CLASSES = 10, MAX_IMAGES = 360 };
struct Batch {
    int count;
    uint8_t label[MAX_IMAGES], image[MAX_IMAGES][PIXELS];
};
struct State {                        /* on the device */
    float weight[PIXELS + 1][CLASSES]; /* the last row is the bias */
    float pixel[MAX_IMAGES][PIXELS + 1], error[MAX_IMAGES][CLASSES];
    int right[MAX_IMAGES];
};

/* The kernels: what one thread does. */
struct Normalise { /* a byte to a float, for each pixel */
    const Batch *batch;
    State *s;
    __device__ void operator()(int i) const {
        s->pixel[i / PIXELS][i % PIXELS] = (float)batch->image[i / PIXELS][i % PIXELS] / 16;
        s->pixel[i / PIXELS][PIXELS] = 1;
    }
};
struct Predict { /* probabilities less the truth, for each image */
    const Batch *batch;
    State *s;
    __device__ void operator()(int n) const {
        float sum = 0, *p = s->error[n];
        int best = 0;
        for (int k = 0; k < CLASSES; k++) {
            p[k] = 0;
            for (int i = 0; i <= PIXELS; i++) p[k] += s->weight[i][k] * s->pixel[n][i];
            best = p[k] > p[best] ? k : best;
        }
        for (int k = 0; k < CLASSES; k++) sum += p[k] = expf(p[k]);
        for (int k = 0; k < CLASSES; k++) p[k] = p[k] / sum - (k == batch->label[n] ? 1.0f : 0.0f);
        s->right[n] = best == batch->label[n];
    }
};
struct Learn { /* a step down the gradient, for each weight */
    State *s;
    int count;
    __device__ void operator()(int i) const {
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
template <class Body> void run(const Body &body, int count, cudaStream_t stream) {
    kernel<<<(count + 127) / 128, 128, 0, stream>>>(body, count);
}

SPDL_FN(load, void, Batch) {
    const uint64_t n = spdl_sequence(task);
    if (n > STEPS) return SPDL_END;
    spdl_npz_bundle *bundle = NULL;
    char path[400], name[40] = "test"; /* what comes last is the test set */
    if (n < STEPS) snprintf(name, sizeof name, "train_%02d", (int)(n % FILES));
    snprintf(path, sizeof path, "%.300s/digits_%s.npz", (const char *)spdl_ctx(task), name);
    *out = (Batch *)spdl_buffer(task); /* memory that the device reads */
    if (*out == NULL) return SPDL_E_NOMEM;
    if (spdl_npz_load(&bundle, path, NULL) != SPDL_OK) return spdl_fail(task, "%s: bad", path);
    const spdl_npz_array *labels = spdl_npz_bundle_find(bundle, "labels");
    const spdl_npz_array *images = spdl_npz_bundle_find(bundle, "images");
    const size_t count = labels != NULL ? labels->info.bytes : 0;
    const bool fits = count <= MAX_IMAGES && images && images->info.bytes == count * PIXELS;
    if (fits) memcpy((*out)->label, labels->data, count);
    if (fits) memcpy((*out)->image, images->data, count * PIXELS);
    (*out)->count = (int)count;
    spdl_npz_bundle_free(bundle);
    return fits ? SPDL_OK : spdl_fail(task, "%s: no images, or no labels", path);
}

static spdl_result describe(void *item, spdl_cuda_view *view) {
    view->data = item;
    view->bytes = sizeof(Batch);
    view->user = (void *)(uintptr_t)((const Batch *)item)->count;
    return SPDL_OK;
}

/* Trains, and counts the right answers on the last batch; -1: it did not come that far. */
static int train(spdl_cuda_iter *it, State *state, cudaStream_t stream) {
    static int right[MAX_IMAGES];
    spdl_cuda_batch batch;
    int sum = 0;
    for (int n = 0; spdl_cuda_iter_next(it, stream, &batch, SPDL_FOREVER) == SPDL_OK; n++) {
        const Batch *images = (const Batch *)batch.data;
        const int count = (int)(uintptr_t)batch.user;
        run(Normalise{ images, state }, count * PIXELS, stream);
        run(Predict{ images, state }, count, stream);
        if (n < STEPS) run(Learn{ state, count }, (PIXELS + 1) * CLASSES, stream);
        if (n < STEPS) continue;
        if (cudaMemcpyAsync(right, state->right, sizeof right, cudaMemcpyDeviceToHost, stream) ||
            cudaStreamSynchronize(stream)) return -1;
        for (int i = 0; i < count; i++) sum += right[i];
        return sum;
    }
    return -1;
}

/* The right answers, or -1; *error says why. */
static int run(spdl_cuda *cuda, const char *folder, spdl_error *error) {
    spdl_cuda_iter_desc ahead = spdl_cuda_iter_desc();
    spdl_pipeline_desc loader = spdl_pipeline_desc();
    spdl_pipeline *pipeline = NULL;
    spdl_cuda_iter *it = NULL;
    cudaStream_t stream = NULL;
    State *state = NULL;
    int right = -1;
    if (cudaMalloc(&state, sizeof *state) || cudaMemset(state, 0, sizeof *state) ||
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) return -1;
    ahead.error = loader.error = error;
    loader.workers = 1;
    loader.allocator = spdl_cuda_allocator(cuda);
    const spdl_stage rows[] = {
        SPDL_SOURCE(load).with_ctx((void *)folder).with_item_bytes(sizeof(Batch))
            .with_free_item(spdl_buffer_free), SPDL_SINK(3) };
    if (spdl_pipeline_create(&pipeline, &loader, rows) != SPDL_OK) return -1;
    ahead.next = spdl_pipeline_next;
    ahead.source = pipeline;
    ahead.view = describe;
    ahead.free_item = spdl_buffer_free;
    if (spdl_cuda_iter_create(&it, cuda, &ahead) == SPDL_OK) right = train(it, state, stream);
    spdl_cuda_iter_destroy(it);
    if (right < 0) *error = *spdl_pipeline_error(pipeline);
    spdl_pipeline_destroy(pipeline);
    cudaFree(state);
    return right;
}

int main(int argc, char **argv) {
    spdl_error error = spdl_error();
    spdl_cuda_desc slots = spdl_cuda_desc();
    spdl_cuda *cuda;
    slots.slot_bytes = sizeof(Batch);
    slots.error = &error;
    if (spdl_cuda_open(&cuda, &slots) != SPDL_OK)
        return puts(error.text) < 0 || error.result != SPDL_E_NOT_FOUND; /* no GPU: no show */
    const int right = run(cuda, argc > 1 ? argv[1] : "examples/data", &error);
    spdl_cuda_close(cuda);
    if (right < 0) fprintf(stderr, "cuda_train: %s\n", error.text);
    else printf("%.1f %% of %d test images after %d steps\n", right / 3.6, MAX_IMAGES, STEPS);
    return right > 324 ? 0 : 1;
}
