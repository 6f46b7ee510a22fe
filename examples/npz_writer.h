/* npz_writer.h - writes .npz and .npy files for NumPy and spdl.h: open, add, finish, close, as in
   npz_convert.c. Copy it: it needs spdl.h. The file is written beside `path`, and replaces it in
   finish. Members are stored, with their data aligned to 64 bytes, so that they can be viewed
   without a copy. A path that ends with ".npy" is a file of one array. One thread at a time uses a
   writer. `error` can be NULL. */
#ifndef EXAMPLE_NPZ_WRITER_H
#define EXAMPLE_NPZ_WRITER_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef _WIN32
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#include <windows.h>
#include <fcntl.h>
#include <io.h>
#include <sys/stat.h>
#endif

typedef struct npz_writer {
    FILE *file;
    char *path, *temporary;
    bool npy, ended, renamed; /* ended: by finish or by a failure of the file */
    uint64_t at, count;       /* bytes and arrays written */
    uint8_t *directory;       /* as it will be in the file */
    size_t used, room;        /* of the directory */
    uint32_t crc[256];
} npz_writer;

static inline spdl_result npz_writer_fail(spdl_error *error, spdl_result result, const char *path,
                                          const char *name, const char *why) {
    if (error == NULL) return result;
    error->stage = -1;
    if (name == NULL) snprintf(error->text, sizeof error->text, "%.400s: %s", path, why);
    else snprintf(error->text, sizeof error->text, "%.300s: array '%.100s': %s", path, name, why);
    return error->result = result;
}

static inline uint32_t npz_writer_crc(const npz_writer *w, uint32_t crc, const void *data,
                                      size_t bytes) {
    const uint8_t *at = (const uint8_t *)data;
    for (crc = ~crc; bytes > 0; bytes--) crc = crc >> 8 ^ w->crc[(crc ^ *at++) & 255];
    return ~crc;
}

static inline bool npz_writer_ascii(const char *text) {
    while (*text != 0 && (*text & 0x80) == 0) text++;
    return *text == 0;
}

/* Writes numbers of these widths, little-endian. Returns the end. */
static inline uint8_t *npz_writer_put(uint8_t *to, const char *widths, const uint64_t *value) {
    for (; *widths != 0; widths++, value++)
        for (int i = 0; i < *widths - '0'; i++) *to++ = (uint8_t)(*value >> 8 * i);
    return to;
}

/* Makes the header of an array. Returns its bytes. */
static inline size_t npz_writer_header(char *head, size_t room, const char *dtype, int ndim,
                                       const uint64_t *shape) {
    const uint16_t one = 1;
    const bool ascii = npz_writer_ascii(dtype); /* else version 3.0 */
    const char *quote = dtype[0] == '[' ? "" : "'", *own = *(const char *)&one == 1 ? "<" : ">";
    size_t start = ascii ? 10 : 12, at = start;
    at += (size_t)snprintf(head + at, room - at,
                           "{'descr': %s%s%s%s, 'fortran_order': False, 'shape': (", quote,
                           strchr("<>|=[", dtype[0]) != NULL ? "" : own, dtype, quote);
    for (int i = 0; i < ndim; i++)
        at += (size_t)snprintf(head + at, room - at, "%llu, ", (unsigned long long)shape[i]);
    at += (size_t)snprintf(head + at, room - at, "), }");
    for (head[at++] = ' '; at % 64 != 63; at++) head[at] = ' ';
    head[at++] = '\n';
    const uint64_t version[] = { ascii ? 1u : 3u, at - start };
    memcpy(head, "\x93NUMPY", 6);
    npz_writer_put((uint8_t *)head + 6, ascii ? "22" : "24", version);
    return at;
}

/* The reader of spdl.h parses the dtype, in the header of an array without elements. */
static inline spdl_result npz_writer_itemsize(const npz_writer *w, const char *name,
                                              const char *dtype, uint64_t *itemsize,
                                              spdl_error *error) {
    const spdl_npz_desc desc = { 0, false, NULL, { NULL, NULL, NULL }, error };
    const uint64_t none = 0;
    char head[8192], label[420];
    const size_t bytes = npz_writer_header(head, sizeof head, dtype, 1, &none);
    spdl_npz *npz = NULL;
    spdl_npy_info info;
    spdl_result result;
    snprintf(label, sizeof label, "%.300s: array '%.100s'", w->path, name);
    result = spdl_npz_open_memory(&npz, head, bytes, label, &desc);
    if (result == SPDL_OK) result = spdl_npz_info(npz, 0, &info, error);
    if (result == SPDL_OK) *itemsize = info.itemsize;
    spdl_npz_close(npz);
    return result;
}

/* Writes the header of a member, and its entry of the directory, which has room. ZIP64 fields are
   there only where needed. An extra field (0xd935) aligns the data, as zipalign does. */
static inline void npz_writer_member(npz_writer *w, const char *name, uint32_t crc,
                                     uint64_t bytes) {
    const bool wide = bytes >= 0xffffffffu, beyond = w->at >= 0xffffffffu;
    const uint64_t key = strlen(name) + 4, sizes = wide ? 20 : 0, date = 0x21; /* 1 January 1980 */
    const uint64_t places = (wide ? 16u : 0) + (beyond ? 8u : 0);
    const uint64_t least = wide ? 0xffffffffu : bytes;
    const uint64_t pad = 63 - (w->at + 35 + key + sizes) % 64, start = w->at;
    const uint64_t version = places > 0 ? 45 : 20, utf8 = npz_writer_ascii(name) ? 0 : 0x0800;
    const uint64_t local[] = { 0x04034b50, version, utf8, 0, 0, date, crc, least, least, key,
                               sizes + 6 + pad };
    const uint64_t entry[] = { 0x02014b50, 45, version, utf8, 0, 0, date, crc, least, least, key,
                               places > 0 ? 4 + places : 0, 0, 0, 0, 0,
                               beyond ? 0xffffffffu : start };
    const uint64_t zip64[] = { 1, 16, bytes, bytes }, align[] = { 0xd935, 2 + pad, 64 };
    const uint64_t place[] = { 1, places, wide ? bytes : start, bytes, start };
    uint8_t head[30], extra[20 + 6 + 64] = { 0 }, *at, *named;
    npz_writer_put(head, "42222244422", local);
    npz_writer_put(npz_writer_put(extra, wide ? "2288" : "", zip64), "222", align);
    named = npz_writer_put(w->directory + w->used, "42222224442222244", entry);
    memcpy(named, name, (size_t)key - 4);
    memcpy(named + key - 4, ".npy", 4);
    at = npz_writer_put(named + key, places == 0 ? "" : places == 8 ? "228" : "2288", place);
    at = npz_writer_put(at, wide && beyond ? "8" : "", &start);
    w->used = (size_t)(at - w->directory);
    w->at += fwrite(head, 1, 30, w->file) + fwrite(named, 1, (size_t)key, w->file);
    w->at += fwrite(extra, 1, (size_t)(sizes + 6 + pad), w->file);
}

#ifdef _WIN32
enum { NPZ_WRITER_WIDE = 1024 };

/* On Windows paths are UTF-8, as in spdl.h. A path that has no UTF-16 of this size becomes "". */
static inline const wchar_t *npz_writer_wide(wchar_t *wide, const char *path) {
    if (!MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, wide, NPZ_WRITER_WIDE))
        wide[0] = 0;
    return wide;
}

static inline FILE *npz_writer_create(const char *path) {
    wchar_t wide[NPZ_WRITER_WIDE];
    const int file = _wopen(npz_writer_wide(wide, path),
                            _O_CREAT | _O_EXCL | _O_WRONLY | _O_BINARY, _S_IREAD | _S_IWRITE);
    return file < 0 ? NULL : _fdopen(file, "wb");
}

static inline bool npz_writer_rename(const char *from, const char *to) {
    wchar_t wide[NPZ_WRITER_WIDE], wide_to[NPZ_WRITER_WIDE];
    errno = EACCES; /* of a folder, or a file in use */
    return MoveFileExW(npz_writer_wide(wide, from), npz_writer_wide(wide_to, to),
                       MOVEFILE_REPLACE_EXISTING) != 0;
}

static inline void npz_writer_remove(const char *path) {
    wchar_t wide[NPZ_WRITER_WIDE];
    _wremove(npz_writer_wide(wide, path));
}
#else
static inline FILE *npz_writer_create(const char *path) { return fopen(path, "wbx"); }

static inline bool npz_writer_rename(const char *from, const char *to) {
    return rename(from, to) == 0;
}

static inline void npz_writer_remove(const char *path) { remove(path); }
#endif

static inline spdl_result npz_writer_open(npz_writer **writer, const char *path,
                                          spdl_error *error) {
    const size_t length = strlen(path);
    npz_writer *w = (npz_writer *)calloc(1, sizeof *w + 2 * length + 32);
    *writer = NULL;
    if (w == NULL) return npz_writer_fail(error, SPDL_E_NOMEM, path, NULL, "no memory");
    w->path = (char *)memcpy(w + 1, path, length);
    w->temporary = w->path + length + 1;
    w->npy = length >= 4 && strcmp(path + length - 4, ".npy") == 0;
    for (uint32_t i = 0; i < 256; i++) {
        w->crc[i] = i;
        for (int k = 0; k < 8; k++) w->crc[i] = w->crc[i] >> 1 ^ (w->crc[i] & 1 ? 0xedb88320u : 0);
    }
    do { /* another writer may have the name of this moment */
        const unsigned long long now = spdl_time_ns();
        snprintf(w->temporary, length + 30, "%s.%llx.tmp", path, now);
        w->file = npz_writer_create(w->temporary);
    } while (w->file == NULL && errno == EEXIST);
    if (w->file != NULL) {
        *writer = w;
        return SPDL_OK;
    }
    npz_writer_fail(error, SPDL_E_IO, path, NULL, strerror(errno));
    free(w);
    return SPDL_E_IO;
}

/* Writes an array in C order. The name is UTF-8, without ".npy". dtype is the text in the file, as
   "<f4", "|u1", "<M8[ns]" or "[('x', '<f4')]"; "f4" has the byte order of this machine. `data` has
   the bytes that dtype and shape need. After SPDL_E_IO the writer can only be closed. */
static inline spdl_result npz_writer_add(npz_writer *w, const char *name, const char *dtype,
                                         int ndim, const uint64_t *shape, const void *data,
                                         spdl_error *error) {
    const char *why = w->ended                               ? "the writer has ended"
                      : ndim < 0 || ndim > SPDL_NPY_MAX_DIMS ? "ndim is not 0 to 64"
                      : strlen(name) > 65000                 ? "its name is too long"
                      : strlen(dtype) > 6000                 ? "its dtype is too long"
                      : w->npy && w->count > 0               ? "a .npy file has one array" : NULL;
    char head[8192];
    uint64_t bytes = 0;
    if (why == NULL) {
        const spdl_result result = npz_writer_itemsize(w, name, dtype, &bytes, error);
        if (result != SPDL_OK) return result;
        for (int i = 0; i < ndim; bytes *= shape[i++])
            if (shape[i] > 0 && bytes > SIZE_MAX / 2 / shape[i]) why = "its shape overflows";
        if (data == NULL && bytes > 0) why = "its data is NULL";
    }
    if (why != NULL) return npz_writer_fail(error, SPDL_E_INVALID, w->path, name, why);
    if (w->room - w->used < strlen(name) + 256) {
        const size_t room = 2 * w->room + strlen(name) + 4096;
        void *larger = realloc(w->directory, room);
        if (larger == NULL) return npz_writer_fail(error, SPDL_E_NOMEM, w->path, name, "no memory");
        w->directory = (uint8_t *)larger;
        w->room = room;
    }
    const size_t head_bytes = npz_writer_header(head, sizeof head, dtype, ndim, shape);
    if (!w->npy) {
        const uint32_t crc = npz_writer_crc(w, 0, head, head_bytes);
        npz_writer_member(w, name, npz_writer_crc(w, crc, data, (size_t)bytes), head_bytes + bytes);
    }
    w->at += fwrite(head, 1, head_bytes, w->file);
    if (bytes > 0) w->at += fwrite(data, 1, (size_t)bytes, w->file);
    w->count++;
    w->ended = ferror(w->file) != 0;
    return w->ended ? npz_writer_fail(error, SPDL_E_IO, w->path, NULL, strerror(errno)) : SPDL_OK;
}

static inline void npz_writer_end(npz_writer *w) {
    const uint64_t start = w->at, used = w->used, count = w->count, most = 0xffffffffu;
    const uint64_t least = count < 0xffff ? count : 0xffff;
    const uint64_t wide[] = { 0x06064b50, 44, 45, 45, 0, 0, count, count, used, start,
                              0x07064b50, 0, start + used, 1 }; /* ZIP64 */
    const uint64_t last[] = { 0x06054b50, 0, 0, least, least, used < most ? used : most,
                              start < most ? start : most, 0 };
    const bool large = count >= 0xffff || used >= most || start >= most;
    uint8_t end[56 + 20 + 22], *at = npz_writer_put(end, large ? "48224488884484" : "", wide);
    at = npz_writer_put(at, "42222442", last);
    if (used > 0) w->at += fwrite(w->directory, 1, w->used, w->file);
    w->at += fwrite(end, 1, (size_t)(at - end), w->file);
}

/* Completes the file, opens it as a reader does, and renames it. SPDL_E_INVALID: two arrays have
   one name. */
static inline spdl_result npz_writer_finish(npz_writer *w, spdl_error *error) {
    const spdl_npz_desc desc = { 0, false, NULL, { NULL, NULL, NULL }, error };
    spdl_npz *npz = NULL;
    spdl_result result;
    bool failed;
    if (w->ended)
        return npz_writer_fail(error, SPDL_E_INVALID, w->path, NULL, "the writer has ended");
    if (!w->npy) npz_writer_end(w);
    failed = ferror(w->file) != 0;
    failed = fclose(w->file) != 0 || failed;
    w->file = NULL;
    w->ended = true;
    if (failed) return npz_writer_fail(error, SPDL_E_IO, w->path, NULL, strerror(errno));
    result = spdl_npz_open(&npz, w->temporary, &desc);
    if (result == SPDL_OK && spdl_npz_count(npz) != w->count)
        result = npz_writer_fail(error, SPDL_E_INVALID, w->path, NULL, "two arrays have one name");
    spdl_npz_close(npz);
    if (result != SPDL_OK) return result;
    w->renamed = npz_writer_rename(w->temporary, w->path);
    return w->renamed ? SPDL_OK : npz_writer_fail(error, SPDL_E_IO, w->path, NULL, strerror(errno));
}

/* Frees the writer, and the file unless finish succeeded. */
static inline void npz_writer_close(npz_writer *w) {
    if (w == NULL) return;
    if (w->file != NULL) fclose(w->file);
    if (!w->renamed) npz_writer_remove(w->temporary);
    free(w->directory);
    free(w);
}

#endif /* EXAMPLE_NPZ_WRITER_H */
