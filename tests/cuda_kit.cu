// cuda_kit.h on a device; built by nvcc.
#include "cuda_kit.h"

#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>

static unsigned long long *kit_count; // wrong bytes; pinned, device and host write it

static void kit_must(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "cuda_kit: %s: %s\n", what, cudaGetErrorString(error));
    abort();
}

__device__ static unsigned char kit_device_byte(uint64_t seed, size_t i) {
    uint64_t z = (seed + 1) * 0x9e3779b97f4a7c15u + i / 8 * 0xbf58476d1ce4e5b9u;
    z ^= z >> 29;
    return (unsigned char)(z >> (i % 8 * 8));
}

__global__ static void kit_compare(const unsigned char *bytes, size_t count, uint64_t seed,
                                   unsigned long long *wrong) {
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    for (; i < count; i += (size_t)gridDim.x * blockDim.x)
        if (bytes[i] != kit_device_byte(seed, i)) atomicAdd_system(wrong, 1ull);
}

__global__ static void kit_wait(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < ns);
}

static void kit_end() { cudaFreeHost(kit_count); }

/* A launch, without a look at the last error, which may be the caller's. */
template <typename... Arguments>
static void kit_launch(void (*kernel)(Arguments...), int blocks, int threads, void *stream,
                       Arguments... arguments) {
    void *list[] = { (void *)&arguments... };
    kit_must(cudaLaunchKernel((const void *)kernel, dim3(blocks), dim3(threads), list, 0,
                              (cudaStream_t)stream),
             "cudaLaunchKernel");
}

static unsigned long long *kit_counter() {
    if (kit_count == nullptr) {
        kit_must(cudaHostAlloc((void **)&kit_count, sizeof *kit_count, cudaHostAllocPortable),
                 "cudaHostAlloc");
        *kit_count = 0;
        atexit(kit_end);
    }
    return kit_count;
}

extern "C" void kit_check(void *stream, const void *device, size_t bytes, uint64_t seed) {
    if (bytes == 0) return;
    kit_launch<const unsigned char *, size_t, uint64_t, unsigned long long *>(
        kit_compare, 64, 256, stream, (const unsigned char *)device, bytes, seed, kit_counter());
}

extern "C" long kit_wrong(void) {
    unsigned long long *count = kit_counter();
    kit_must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    const long wrong = (long)*count;
    *count = 0;
    return wrong;
}

__global__ static void kit_change(unsigned char *to, const unsigned char *from, size_t count) {
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    for (; i < count; i += (size_t)gridDim.x * blockDim.x) to[i] = (unsigned char)~from[i];
}

extern "C" void kit_invert(void *stream, void *to, const void *from, size_t bytes) {
    if (bytes == 0) return;
    kit_launch<unsigned char *, const unsigned char *, size_t>(
        kit_change, 64, 256, stream, (unsigned char *)to, (const unsigned char *)from, bytes);
}

extern "C" void kit_spin(void *stream, uint64_t ns) {
    kit_launch<unsigned long long>(kit_wait, 1, 1, stream, ns);
}

extern "C" void kit_disorder(uint64_t seed) { (void)seed; }

extern "C" void *kit_stream(bool blocking) {
    cudaStream_t s;
    kit_must(cudaStreamCreateWithFlags(&s, blocking ? cudaStreamDefault : cudaStreamNonBlocking),
             "cudaStreamCreateWithFlags");
    return s;
}

extern "C" void kit_stream_free(void *stream) {
    kit_must(cudaStreamDestroy((cudaStream_t)stream), "cudaStreamDestroy");
}
