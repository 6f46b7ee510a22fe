/* Feeds any bytes to the decoder as what is left of a deflate stream, and compares with zlib.

   The stream begins with a stored block that holds the header of an array; the input goes on after
   it, as it is. It is read alone, and by spdl_npz_load_memory between two members that are fine.
   zlib says what must come out, and whether anything may; without zlib only
   crashes, and members that harm their neighbours, are found. The last byte of the input picks the
   side of the guard page and whether the size that is given is right. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "fuzz.h"

#ifndef __has_include
#define __has_include(header) 0
#endif
#if __has_include(<zlib.h>) && !defined(FUZZ_NO_ZLIB)
#define FUZZ_ZLIB 1
#include <zlib.h>
#else
#define FUZZ_ZLIB 0
#endif

#define STORED_HEAD 5 /* of the block with the header */
#define MOST (FUZZ_ROOM - 65536)

enum { BLOCK_FILE, BLOCK_STREAM, BLOCK_EXPECTED, BLOCK_OUT };

/* A stream of the input, and what zlib says of it. */
typedef struct stream {
    uint8_t *at;
    size_t bytes;
    bool good;  /* all of the input is a stream of no more than MOST bytes */
    bool known; /* or is surely none */
    bool skips;  /* what follows the array is not read, where the size is not right */
    bool longer; /* a stream, then something else, which may pass as NumPy lets it pass */
    size_t count; /* bytes of the array */
    uint8_t *expected;
} stream;

#if FUZZ_ZLIB
/* Decodes to s->expected as far as it goes. */
static void decode_by_zlib(stream *s) {
    z_stream z;
    int status;
    memset(&z, 0, sizeof z);
    if (inflateInit2(&z, -MAX_WBITS) != Z_OK) abort();
    z.next_in = s->at;
    z.avail_in = (uInt)s->bytes;
    z.next_out = s->expected;
    z.avail_out = (uInt)(FUZZ_NPY_HEAD + MOST);
    status = inflate(&z, Z_FINISH);
    s->count = FUZZ_NPY_HEAD + MOST - z.avail_out;
    s->count = s->count > FUZZ_NPY_HEAD ? s->count - FUZZ_NPY_HEAD : 0;
    s->good = status == Z_STREAM_END && z.avail_in == 0;
    s->longer = status == Z_STREAM_END && z.avail_in > 0;
    s->known = s->good || (!s->longer && (status == Z_DATA_ERROR || z.avail_out > 0));
    inflateEnd(&z);
}
#else
static void decode_by_zlib(stream *s) {
    s->count = 1000;
    s->good = s->known = s->longer = false;
}
#endif

/* The header names as many bytes as the stream has, which does not depend on what it names. */
static void stream_make(stream *s, const uint8_t *data, size_t bytes) {
    static const uint8_t stored[STORED_HEAD] = { 0, FUZZ_NPY_HEAD, 0, 0xff ^ FUZZ_NPY_HEAD, 0xff };
    s->bytes = STORED_HEAD + FUZZ_NPY_HEAD + bytes;
    s->at = fuzz_block(BLOCK_STREAM, s->bytes, true);
    s->expected = fuzz_block(BLOCK_EXPECTED, FUZZ_NPY_HEAD + MOST, true);
    memcpy(s->at, stored, STORED_HEAD);
    fuzz_npy_head(s->at + STORED_HEAD, 0);
    if (bytes > 0) memcpy(s->at + STORED_HEAD + FUZZ_NPY_HEAD, data, bytes);
    decode_by_zlib(s);
    fuzz_npy_head(s->at + STORED_HEAD, s->count);
    decode_by_zlib(s);
}

/* A member that is fine: matches, literals and zeros, in a fixed block. Its data are 'b' 3,000
   times: a literal, then lengths of 258 at distance 1. */
static size_t put_neighbour(uint8_t *to, size_t *count) {
    fuzz_bytes bytes = { to, 0, 512 };
    uint64_t bits = 0;
    unsigned have = 0;
    int i;
    *count = 1 + 11 * 258;
    fuzz_put_le(&bytes, 0, 1);
    fuzz_put_le(&bytes, FUZZ_NPY_HEAD, 2);
    fuzz_put_le(&bytes, (uint64_t)~FUZZ_NPY_HEAD, 2);
    fuzz_npy_head(to + bytes.count, *count);
    bytes.count += FUZZ_NPY_HEAD;
    bits = 3;      /* the last block, fixed codes */
    bits |= 0x49u << 3; /* 'b': 0x30 + 0x62 = 0x92 in 8 bits, the highest first */
    have = 11;
    for (i = 0; i < 11; ++i) { /* 285: 0xc5 in 8 bits, then distance code 0 in 5 */
        bits |= (uint64_t)0xa3 << have;
        have += 13;
        for (; have >= 8; have -= 8, bits >>= 8) fuzz_put_le(&bytes, bits & 255, 1);
    }
    have += 7; /* the end of the block */
    for (; have > 0; have = have > 8 ? have - 8 : 0, bits >>= 8) fuzz_put_le(&bytes, bits & 255, 1);
    return bytes.count;
}

/* An archive of the stream between two neighbours; `usize` is what its entry says. */
static size_t archive_make(uint8_t *to, const stream *s, size_t usize) {
    fuzz_bytes file = { to, 0, FUZZ_ROOM };
    fuzz_member members[3];
    uint8_t neighbour[512];
    uint8_t plain[FUZZ_NPY_HEAD + 3000];
    size_t count;
    const size_t bytes = put_neighbour(neighbour, &count);
    size_t directory;
    int i;
    fuzz_npy_head(plain, count);
    memset(plain + FUZZ_NPY_HEAD, 'b', count);
    for (i = 0; i < 3; ++i) {
        fuzz_member *m = &members[i];
        memset(m, 0, sizeof *m);
        m->name = i == 0 ? "a.npy" : i == 1 ? "x.npy" : "z.npy";
        m->method = 8;
        m->csize = (uint32_t)(i == 1 ? s->bytes : bytes);
        m->usize = (uint32_t)(i == 1 ? usize : FUZZ_NPY_HEAD + count);
        m->crc = i == 1 ? fuzz_crc(s->expected, FUZZ_NPY_HEAD + s->count)
                        : fuzz_crc(plain, FUZZ_NPY_HEAD + count);
        fuzz_put_local(&file, m);
        fuzz_put(&file, i == 1 ? s->at : neighbour, m->csize);
    }
    directory = file.count;
    for (i = 0; i < 3; ++i) fuzz_put_entry(&file, &members[i]);
    fuzz_put_end(&file, 3, directory);
    return file.count;
}

static bool all_bytes(const uint8_t *data, size_t count, uint8_t byte) {
    size_t i;
    for (i = 0; i < count && data[i] == byte; ++i) {
    }
    return i == count;
}

/* What came out of the stream, whichever way it was read. */
static void check(const stream *s, spdl_result result, const uint8_t *out, bool honest) {
    FUZZ_CHECK(result == SPDL_OK || result == SPDL_E_FORMAT || result == SPDL_E_CHECKSUM ||
               result == SPDL_E_LIMIT);
    if (honest && s->good) FUZZ_CHECK(result == SPDL_OK);
    if (s->known && !(honest && s->good) && !s->skips) FUZZ_CHECK(result != SPDL_OK);
    if (result != SPDL_OK || !(s->known || s->longer)) return;
    FUZZ_CHECK(memcmp(out, s->expected + FUZZ_NPY_HEAD, s->count) == 0);
}

static void read_alone(const spdl_npz *npz, const stream *s, bool at_end, bool honest) {
    uint8_t *out = fuzz_out(BLOCK_OUT, s->count, at_end);
    spdl_error error;
    spdl_npy_info info;
    spdl_result result;
    memset(&error, 0, sizeof error);
    result = spdl_npz_info(npz, 1, &info, &error);
    if (result == SPDL_OK) FUZZ_CHECK(info.bytes == s->count);
    result = spdl_npz_read(npz, 1, out, s->count, &error);
    FUZZ_CHECK((result == SPDL_OK) == (error.text[0] == '\0'));
    check(s, result, out, honest);
}

/* Among two that must come out right when the stream does. */
static void load_among(const uint8_t *file, size_t size, const spdl_npz_desc *desc, const stream *s,
                       bool honest) {
    const size_t count = 1 + 11 * 258;
    spdl_npz_bundle *bundle = NULL;
    const spdl_result result = spdl_npz_load_memory(&bundle, file, size, "fuzz", desc);
    check(s, result, bundle != NULL ? (const uint8_t *)bundle->arrays[1].data : NULL, honest);
    if (bundle == NULL) return;
    FUZZ_CHECK(all_bytes((const uint8_t *)bundle->arrays[0].data, count, 'b'));
    FUZZ_CHECK(all_bytes((const uint8_t *)bundle->arrays[2].data, count, 'b'));
    spdl_npz_bundle_free(bundle);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    const unsigned how = bytes > 0 ? data[bytes - 1] : 0;
    const bool at_end = (how & 1) == 0;
    const bool honest = (how & 6) != 6;
    spdl_npz_desc desc = { 0 };
    spdl_npz *npz = NULL;
    uint8_t *file;
    size_t size;
    stream s;
    if (bytes > 65536) return 0;
    stream_make(&s, data, bytes);
    file = fuzz_block(BLOCK_FILE, FUZZ_ROOM, true);
    size = archive_make(file, &s, FUZZ_NPY_HEAD + s.count + (honest ? 0 : 1 + (how >> 3)));
    file = (uint8_t *)memmove(fuzz_block(BLOCK_FILE, 0, at_end) - (at_end ? size : 0), file, size);
    desc.no_crc = (how & 8) != 0;
    s.skips = desc.no_crc && !honest;
    FUZZ_CHECK(spdl_npz_open_memory(&npz, file, size, "fuzz", &desc) == SPDL_OK);
    read_alone(npz, &s, at_end, honest);
    load_among(file, size, &desc, &s, honest);
    spdl_npz_close(npz);
    return 0;
}
