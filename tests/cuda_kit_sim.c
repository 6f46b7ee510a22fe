/* cuda_kit.h on the stand-in: kernels are functions that see device memory through sim_view. */
#include "cuda_kit.h"
#include "cudart_sim.h"

#include <stdio.h>
#include <stdlib.h>

enum { KIT_CHECKS = 1 << 16 };

typedef struct kit_job {
    const void *device;
    void *to; /* to be written, or NULL */
    size_t bytes;
    uint64_t seed;
    long wrong; /* of the stream's thread, until the host has waited for it */
} kit_job;

static kit_job kit_jobs[KIT_CHECKS];
static unsigned kit_used;

static void kit_must(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "cuda_kit: %s: %s\n", what, cudaGetErrorString(error));
    abort();
}

/* Nothing is launched on a device that is lost. */
static void kit_launch(void *stream, sim_kernel kernel, void *arg, uint64_t ns) {
    cudaError_t error;
#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
    if (stream == NULL) stream = cudaStreamPerThread;
#endif
    error = sim_launch((cudaStream_t)stream, kernel, arg, ns);
    if (error != sim_standing()) kit_must(error, "launch");
}

static void kit_run(void *arg) {
    kit_job *job = (kit_job *)arg;
    const void *bytes = job->bytes > 0 ? sim_view(job->device) : job;
    job->wrong = bytes ? kit_differ(bytes, job->bytes, job->seed) : (long)job->bytes;
}

static void kit_write(void *arg) {
    const kit_job *job = (const kit_job *)arg;
    const unsigned char *from = (const unsigned char *)sim_view(job->device);
    unsigned char *to = (unsigned char *)sim_view(job->to);
    size_t i;
    for (i = 0; i < job->bytes; ++i) to[i] = (unsigned char)~from[i];
}

static void kit_nothing(void *arg) { (void)arg; }

static kit_job *kit_job_new(const void *device, size_t bytes) {
    const unsigned i = __atomic_fetch_add(&kit_used, 1, __ATOMIC_RELAXED);
    if (i >= KIT_CHECKS) kit_must(cudaErrorMemoryAllocation, "more jobs without kit_wrong");
    kit_jobs[i].device = device;
    kit_jobs[i].bytes = bytes;
    kit_jobs[i].wrong = 0;
    return &kit_jobs[i];
}

void kit_invert(void *stream, void *to, const void *from, size_t bytes) {
    kit_job *job = kit_job_new(from, bytes);
    job->to = to;
    kit_launch(stream, kit_write, job, 0);
}

void kit_check(void *stream, const void *device, size_t bytes, uint64_t seed) {
    kit_job *job = kit_job_new(device, bytes);
    job->seed = seed;
    kit_launch(stream, kit_run, job, 0);
}

long kit_wrong(void) {
    long wrong = 0;
    unsigned i;
    int now = 0, count = 0;
    cudaGetDevice(&now);
    cudaGetDeviceCount(&count);
    while (count-- > 0) {
        kit_must(cudaSetDevice(count), "cudaSetDevice");
        kit_must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
    cudaSetDevice(now);
    for (i = 0; i < kit_used; ++i) wrong += kit_jobs[i].wrong;
    kit_used = 0;
    return wrong;
}

void kit_spin(void *stream, uint64_t ns) {
    kit_launch(stream, kit_nothing, NULL, ns);
}

void kit_disorder(uint64_t seed) { sim_delay(100, seed); }

void *kit_stream(bool blocking) {
    cudaStream_t s = NULL;
    kit_must(cudaStreamCreateWithFlags(&s, blocking ? cudaStreamDefault : cudaStreamNonBlocking),
             "cudaStreamCreateWithFlags");
    return s;
}

void kit_stream_free(void *stream) {
    kit_must(cudaStreamDestroy((cudaStream_t)stream), "cudaStreamDestroy");
}
