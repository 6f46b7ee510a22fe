/* tokens.h - shards of tokens, read as one sequence of uint32_t. Copy it: it needs spdl.h, POSIX
   and a little-endian processor. A shard is one of these:
       .npy     one dimension of uint16, uint32 or int32, as numpy.save writes it
       llm.c    256 int32 (20240520, 1 or 20240801, 7, then the number of tokens), and the tokens,
                uint16 or uint32
       raw      the tokens alone, as nanoGPT writes them
   A window of `length` inputs has one token more: its last token is the last target, and the first
   input of the next window. Several threads may read at the same time. */
#ifndef EXAMPLE_TOKENS_H
#define EXAMPLE_TOKENS_H

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct Shard {
    const char *path;
    spdl_npz *npy; /* or NULL, and a file, whose tokens begin at `head` */
    int file;
    off_t head;
    size_t width;          /* bytes of a token: 2 or 4 */
    uint64_t first, count; /* its tokens in the sequence */
} Shard;

typedef struct Tokens {
    Shard *shard;
    uint64_t shards, count; /* count: tokens of all shards */
} Tokens;

static inline spdl_result tokens_fail(spdl_error *error, spdl_result result, const char *path,
                                      const char *format, ...) {
    const size_t room = sizeof error->text;
    va_list arguments;
    const int used = snprintf(error->text, room, "%.300s: ", path);
    va_start(arguments, format);
    vsnprintf(error->text + used, room - (size_t)used, format, arguments);
    va_end(arguments);
    error->stage = -1;
    return error->result = result;
}

/* The number of windows: window i has the tokens i * length to i * length + length. */
static inline uint64_t tokens_windows(const Tokens *t, uint64_t length) {
    return t->count > length ? (t->count - 1) / length : 0;
}

static inline void tokens_close(Tokens *t) {
    for (uint64_t i = 0; i < t->shards; i++) {
        spdl_npz_close(t->shard[i].npy);
        if (t->shard[i].file >= 0) close(t->shard[i].file);
    }
    free(t->shard);
    t->shard = NULL;
    t->shards = t->count = 0;
}

/* Reads `bytes`, or fewer at the end of the file. Returns how many, or -1: see errno. */
static inline ssize_t tokens_pread(int file, void *to, size_t bytes, off_t at) {
    size_t used = 0;
    while (used < bytes) {
        const size_t most = 1 << 30, left = bytes - used; /* macOS refuses more than 2 GiB */
        const ssize_t got = pread(file, (char *)to + used, left < most ? left : most,
                                  at + (off_t)used);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return -1;
        if (got == 0) break;
        used += (size_t)got;
    }
    return (ssize_t)used;
}

static inline spdl_result tokens_npy(Shard *s, spdl_error *error) {
    const spdl_npz_desc desc = { 0, false, NULL, { NULL, NULL, NULL }, error };
    spdl_npy_info info;
    spdl_result result = spdl_npz_open(&s->npy, s->path, &desc);
    if (result == SPDL_OK) result = spdl_npz_info(s->npy, 0, &info, error);
    if (result != SPDL_OK) return result;
    s->width = (size_t)info.itemsize;
    s->count = info.count;
    if (info.ndim == 1 && strstr("u2 u4 i4", info.dtype + 1) != NULL) return SPDL_OK;
    return tokens_fail(error, SPDL_E_UNSUPPORTED, s->path,
                       "%d dimensions of '%s', not one of uint16, uint32 or int32", info.ndim,
                       info.dtype);
}

/* What is no shard, but would pass as raw tokens. */
static inline const char *tokens_foreign(const char *head) {
    if (memcmp(head, "version https://git-lfs", 23) == 0)
        return "a pointer of Git LFS, not the data: run git lfs pull";
    if (memcmp(head, "\x1f\x8b\x08", 3) == 0) return "packed by gzip: run gzip -d first";
    if (memcmp(head, "\x28\xb5\x2f\xfd", 4) == 0) return "packed by Zstandard: run zstd -d first";
    if (memcmp(head, "PK\3\4", 4) == 0) return "a ZIP archive, such as .npz: run unzip first";
    return NULL;
}

static inline spdl_result tokens_shard(Shard *s, size_t raw_bytes, spdl_error *error) {
    char head[24] = { 0 };
    uint32_t word[3];
    struct stat about;
    s->file = open(s->path, O_RDONLY | O_CLOEXEC);
    if (s->file < 0 || fstat(s->file, &about) != 0 ||
        tokens_pread(s->file, head, sizeof head, 0) < 0)
        return tokens_fail(error, SPDL_E_IO, s->path, "%s", strerror(errno));
    if (memcmp(head, "\x93NUMPY", 6) == 0) return tokens_npy(s, error);
    if (tokens_foreign(head) != NULL)
        return tokens_fail(error, SPDL_E_FORMAT, s->path, "%s", tokens_foreign(head));
    memcpy(word, head, sizeof word);
    s->width = raw_bytes;
    if (word[0] == 20240520 && word[1] == 1) s->width = 2, s->head = 1024;
    if (word[0] == 20240801 && word[1] == 7) s->width = 4, s->head = 1024;
    if (s->width != 2 && s->width != 4)
        return tokens_fail(error, SPDL_E_FORMAT, s->path,
                           "no header of NumPy or llm.c: raw_bytes must be 2 or 4");
    s->count = s->head > 0 ? word[2] : (uint64_t)about.st_size / s->width;
    if ((uint64_t)about.st_size != (uint64_t)s->head + s->count * s->width)
        return tokens_fail(error, SPDL_E_FORMAT, s->path,
                           "damaged: %llu tokens of %d bytes, but the file has %llu bytes",
                           (unsigned long long)s->count, (int)s->width,
                           (unsigned long long)about.st_size);
    return SPDL_OK;
}

/* Opens the shards of a list, which must outlive *t. raw_bytes: 2 or 4, the bytes of a token in
   shards without a header, or 0 to refuse those. `error` must not be NULL.
   Returns: SPDL_OK, or the error of the first file that is no shard; then nothing is open. */
static inline spdl_result tokens_open(Tokens *t, const spdl_files *files, size_t raw_bytes,
                                      spdl_error *error) {
    const uint64_t count = spdl_files_count(files);
    spdl_result result = SPDL_OK;
    t->shards = t->count = 0;
    t->shard = (Shard *)calloc((size_t)count + 1, sizeof(Shard)); /* not 0 bytes */
    if (t->shard == NULL) return tokens_fail(error, SPDL_E_NOMEM, "tokens", "no memory");
    while (result == SPDL_OK && t->shards < count) {
        Shard *s = &t->shard[t->shards];
        s->path = spdl_files_path(files, t->shards++);
        s->first = t->count;
        result = tokens_shard(s, raw_bytes, error);
        t->count += s->count;
    }
    if (result != SPDL_OK) tokens_close(t);
    return result;
}

/* Reads `count` tokens from number `first` on.
   Returns: SPDL_OK, SPDL_E_INVALID (they are not there), SPDL_E_IO. */
static inline spdl_result tokens_read(const Tokens *t, uint64_t first, size_t count, uint32_t *to,
                                      spdl_error *error) {
    uint16_t piece[4096]; /* what is widened stays in the first cache */
    const Shard *s = t->shard, *end = t->shard + t->shards;
    if (first > t->count || count > t->count - first)
        return tokens_fail(error, SPDL_E_INVALID, "tokens", "more than the shards have");
    while (end - s > 1) { /* the last shard that begins at or before `first` */
        const Shard *middle = s + (end - s) / 2;
        if (middle->first <= first) s = middle;
        else end = middle;
    }
    while (count > 0) {
        const uint64_t at = first - s->first, left = s->count - at;
        const size_t most = s->width == 4 ? count : count < 4096 ? count : 4096;
        const size_t part = left < most ? (size_t)left : most, bytes = part * s->width;
        void *into = s->width == 4 ? (void *)to : piece;
        if (s->npy != NULL) {
            spdl_result result = spdl_npz_read_rows(s->npy, 0, at, part, into, bytes, error);
            if (result != SPDL_OK) return result;
        } else {
            const off_t from = s->head + (off_t)(at * s->width);
            const ssize_t got = tokens_pread(s->file, into, bytes, from);
            if (got != (ssize_t)bytes)
                return tokens_fail(error, SPDL_E_IO, s->path, "%s",
                                   got < 0 ? strerror(errno) : "it ended while it was read");
        }
        for (size_t i = 0; s->width == 2 && i < part; i++) to[i] = piece[i];
        to += part;
        first += part;
        count -= part;
        s += part == left;
    }
    return SPDL_OK;
}

#endif /* EXAMPLE_TOKENS_H */
