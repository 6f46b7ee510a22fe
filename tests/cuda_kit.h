/* cuda_kit.h - what the tests of spdl_cuda.h do on a device: check bytes in a kernel, take time.
   cuda_kit_sim.c does it on the stand-in, cuda_kit.cu on a real device. */
#ifndef CUDA_KIT_INCLUDED
#define CUDA_KIT_INCLUDED

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes that depend on seed and place; the first eight of a run say which seed it was. */
static inline uint64_t kit_word(uint64_t seed, size_t i) {
    const uint64_t z = (seed + 1) * 0x9e3779b97f4a7c15u + i * 0xbf58476d1ce4e5b9u;
    return z ^ (z >> 29);
}

static inline unsigned char kit_byte(uint64_t seed, size_t i) {
    return (unsigned char)(kit_word(seed, i / 8) >> (i % 8 * 8));
}

static inline void kit_fill(void *memory, size_t bytes, uint64_t seed) {
    unsigned char *to = (unsigned char *)memory;
    size_t i;
    for (i = 0; i < bytes; ++i) to[i] = kit_byte(seed, i);
}

static inline long kit_differ(const void *memory, size_t bytes, uint64_t seed) {
    const unsigned char *from = (const unsigned char *)memory;
    long wrong = 0;
    size_t i;
    for (i = 0; i < bytes; ++i) wrong += from[i] != kit_byte(seed, i);
    return wrong;
}

/* Puts a kernel on the stream (a cudaStream_t) that counts the bytes which are not those of
   kit_fill. Any thread. */
void kit_check(void *stream, const void *device, size_t bytes, uint64_t seed);
/* Waits for all devices. The bytes that were wrong since the last call. */
long kit_wrong(void);
/* Puts a kernel on the stream that writes the bytes of `from` to `to`, all bits changed. */
void kit_invert(void *stream, void *to, const void *from, size_t bytes);
/* A kernel that takes this long. */
void kit_spin(void *stream, uint64_t ns);
/* Everything on the device late, differently each time; only the stand-in can do that. */
void kit_disorder(uint64_t seed);
/* A new stream that does not wait for the legacy stream, or one that does. */
void *kit_stream(bool blocking);
void kit_stream_free(void *stream);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* CUDA_KIT_INCLUDED */
