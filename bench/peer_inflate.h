/* peer_inflate.h - what bench_npz compares with: the decoders of libdeflate, ISA-L and zlib, each
   in its best form, and the readers of Python in a process of their own.

   What was done for the decoders: they get the members as (pointer, length) pairs found beforehand
   and the exact size of the output, so that no ZIP or NPY header is read in their time; they keep
   their state from member to member; libdeflate and ISA-L decode a member in one call.
   A library that was not there at compile time is left out, and said so. */
#ifndef PEER_INFLATE_H_INCLUDED
#define PEER_INFLATE_H_INCLUDED

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "peer_python.h"

#ifndef __has_include
#define __has_include(header) 0
#endif
#if __has_include(<libdeflate.h>) && !defined(PEER_NO_LIBDEFLATE)
#define PEER_LIBDEFLATE 1
#include <libdeflate.h>
#else
#define PEER_LIBDEFLATE 0
#endif
#if __has_include(<isa-l.h>) && !defined(PEER_NO_ISAL)
#define PEER_ISAL 1
#include <isa-l.h>
#else
#define PEER_ISAL 0
#endif
#if __has_include(<zlib.h>) && !defined(PEER_NO_ZLIB)
#define PEER_ZLIB 1
#include <zlib.h>
#else
#define PEER_ZLIB 0
#endif

/* ---- decoders: a whole member, false when the stream is not what the directory says ---- */

typedef bool (*peer_inflate_fn)(const uint8_t *in, size_t in_bytes, uint8_t *out, size_t bytes);
typedef uint32_t (*peer_crc_fn)(const uint8_t *data, size_t bytes);

#if PEER_LIBDEFLATE
static inline bool peer_libdeflate(const uint8_t *in, size_t in_bytes, uint8_t *out,
                                   size_t bytes) {
    static __thread struct libdeflate_decompressor *decoder; /* a few, kept to the end */
    if (decoder == NULL) decoder = libdeflate_alloc_decompressor();
    return decoder != NULL && libdeflate_deflate_decompress(decoder, in, in_bytes, out, bytes,
                                                            NULL) == LIBDEFLATE_SUCCESS;
}

static inline uint32_t peer_libdeflate_crc(const uint8_t *data, size_t bytes) {
    return libdeflate_crc32(0, data, bytes);
}
#else
#define peer_libdeflate NULL
#define peer_libdeflate_crc NULL
#endif

#if PEER_ISAL
static inline bool peer_isal(const uint8_t *in, size_t in_bytes, uint8_t *out, size_t bytes) {
    static struct inflate_state state;
    isal_inflate_init(&state);
    state.next_in = (uint8_t *)(uintptr_t)in;
    state.avail_in = (uint32_t)in_bytes;
    state.next_out = out;
    state.avail_out = (uint32_t)bytes;
    return isal_inflate_stateless(&state) == ISAL_DECOMP_OK && state.avail_out == 0;
}

static inline uint32_t peer_isal_crc(const uint8_t *data, size_t bytes) {
    return crc32_gzip_refl(0, data, bytes);
}
#else
#define peer_isal NULL
#define peer_isal_crc NULL
#endif

#if PEER_ZLIB
static inline bool peer_zlib(const uint8_t *in, size_t in_bytes, uint8_t *out, size_t bytes) {
    static z_stream stream;
    static bool ready;
    if (!ready) ready = inflateInit2(&stream, -MAX_WBITS) == Z_OK;
    if (!ready || inflateReset(&stream) != Z_OK) return false;
    stream.next_in = (Bytef *)(uintptr_t)in;
    stream.avail_in = (uInt)in_bytes;
    stream.next_out = out;
    stream.avail_out = (uInt)bytes;
    return inflate(&stream, Z_FINISH) == Z_STREAM_END && stream.avail_out == 0;
}

static inline uint32_t peer_zlib_crc(const uint8_t *data, size_t bytes) {
    return (uint32_t)crc32_z(0, data, bytes);
}
#else
#define peer_zlib NULL
#define peer_zlib_crc NULL
#endif

/* What is missing, on stderr. */
static inline void peer_tell_missing(void) {
    if (!PEER_LIBDEFLATE) fputs("no peer libdeflate: apt-get install libdeflate-dev\n", stderr);
    if (!PEER_ISAL) fputs("no peer ISA-L: apt-get install libisal-dev\n", stderr);
    if (!PEER_ZLIB) fputs("no peer zlib: apt-get install zlib1g-dev\n", stderr);
}

/* ---- members: where they are in a file that NumPy wrote here (so it is trusted) ---- */

typedef struct peer_member {
    const uint8_t *in;
    size_t in_bytes;
    size_t bytes; /* .npy header and data */
    size_t head;  /* bytes of the .npy header: 128 for all arrays of the bench */
    size_t at;    /* place in the output */
    bool deflated;
} peer_member;

static inline uint32_t peer_le(const uint8_t *at, int bytes) {
    uint32_t value = 0;
    while (bytes-- > 0) value = value << 8 | at[bytes];
    return value;
}

/* The members, in the order of the directory; `gap` bytes are left free after each output. */
static inline peer_member *peer_members(const uint8_t *file, size_t file_bytes, size_t gap,
                                        size_t *count) {
    const uint8_t *end = file + file_bytes - 22;
    const uint8_t *entry = file + peer_le(end + 16, 4);
    peer_member *members;
    size_t i;
    size_t at = 0;
    *count = peer_le(end + 10, 2);
    members = (peer_member *)calloc(*count, sizeof *members);
    if (members == NULL || peer_le(end, 4) != 0x06054b50) abort();
    for (i = 0; i < *count; ++i) {
        const uint8_t *local = file + peer_le(entry + 42, 4);
        members[i].in = local + 30 + peer_le(local + 26, 2) + peer_le(local + 28, 2);
        members[i].deflated = peer_le(entry + 10, 2) == 8;
        members[i].in_bytes = peer_le(entry + 20, 4);
        members[i].bytes = peer_le(entry + 24, 4);
        members[i].head = 128;
        members[i].at = at;
        at += (members[i].bytes + gap + 63) / 64 * 64;
        entry += 46 + peer_le(entry + 28, 2) + peer_le(entry + 30, 2) + peer_le(entry + 32, 2);
    }
    return members;
}

/* ---- Python ---- */

/* Starts the peers, and says which are missing. */
static inline void peer_python_start(peer_python *p, const char *python, const char *script) {
    peer_python_begin(p, python, script);
    if (strstr(p->versions, "numpy") == NULL)
        fputs("no peer numpy: pip install numpy\n", stderr);
    if (strstr(p->versions, "spdl") == NULL)
        fputs("no peer SPDL: pip install spdl\n", stderr);
}

#endif /* PEER_INFLATE_H_INCLUDED */
