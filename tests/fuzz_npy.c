/* Feeds any bytes to what reads .npy. The first byte picks the side of the guard page and whether
   the input is a whole file or only the text of a header, which a frame of the right length is put
   around. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "fuzz.h"

#define DATA_BYTES 64 /* after a framed header */

enum { BLOCK_FILE, BLOCK_OUT };

/* What is told of an array must be possible. */
static void check_info(const spdl_npy_info *info, size_t bytes) {
    uint64_t count = 1;
    int i;
    FUZZ_CHECK(info->ndim >= 0 && info->ndim <= SPDL_NPY_MAX_DIMS);
    FUZZ_CHECK(info->bytes < bytes && info->stored);
    for (i = 0; i < info->ndim; ++i) count *= info->shape[i];
    FUZZ_CHECK(count == info->count && info->bytes == info->count * info->itemsize);
    FUZZ_CHECK(strchr("biufcSUVMm", info->kind) != NULL && info->kind != '\0');
    FUZZ_CHECK(memchr(info->dtype, 0, sizeof info->dtype) != NULL);
    FUZZ_CHECK(info->dtype[0] != '[' || info->kind == 'V');
}

/* The bytes as in the file, where those are in order; a view of them then says where they are. */
static void check_data(const spdl_npz *npz, const spdl_npy_info *info, const uint8_t *file,
                       size_t size, bool at_end) {
    const size_t bytes = (size_t)info->bytes;
    uint8_t *out = fuzz_out(BLOCK_OUT, bytes, at_end);
    const void *view = NULL;
    const uint64_t rows = info->ndim > 0 ? info->shape[0] : 0;
    const spdl_result read = spdl_npz_read(npz, 0, out, bytes, NULL);
    const spdl_result viewed = spdl_npz_view(npz, 0, &view, NULL, NULL);
    const uint8_t *at = (const uint8_t *)view;
    FUZZ_CHECK(read == SPDL_OK || read == SPDL_E_NOMEM);
    FUZZ_CHECK(viewed == SPDL_OK || viewed == SPDL_E_UNSUPPORTED);
    if (viewed == SPDL_OK) FUZZ_CHECK(at > file && at + bytes <= file + size);
    if (viewed == SPDL_OK && bytes > 0) FUZZ_CHECK(memcmp(out, view, bytes) == 0);
    FUZZ_CHECK(bytes == 0 || spdl_npz_read(npz, 0, out, bytes - 1, NULL) == SPDL_E_INVALID);
    if (rows == 0) return;
    out = fuzz_out(BLOCK_OUT, (size_t)(info->bytes / rows), at_end);
    const spdl_result row =
        spdl_npz_read_rows(npz, 0, rows - 1, 1, out, (size_t)(info->bytes / rows), NULL);
    FUZZ_CHECK(row == SPDL_OK || (row == SPDL_E_UNSUPPORTED && viewed != SPDL_OK));
    FUZZ_CHECK(spdl_npz_read_rows(npz, 0, rows, 1, out, 0, NULL) != SPDL_OK);
}

static void try_file(const uint8_t *file, size_t size, bool at_end) {
    spdl_npy_info info;
    spdl_error error;
    spdl_npz_desc desc = { 0 };
    spdl_npz *npz = NULL;
    spdl_result opened;
    memset(&error, 0, sizeof error);
    desc.error = &error;
    opened = spdl_npz_open_memory(&npz, file, size, "fuzz", &desc);
    if (opened == SPDL_OK) opened = spdl_npz_info(npz, 0, &info, &error);
    FUZZ_CHECK(opened <= SPDL_OK && (opened == SPDL_OK) == (error.text[0] == '\0'));
    if (opened == SPDL_OK && size >= 6 && memcmp(file, "\x93NUMPY", 6) == 0) {
        check_info(&info, size);
        check_data(npz, &info, file, size, at_end);
    }
    spdl_npz_close(npz);
}

/* A frame of version 1, 2 or 3 around the text. */
static size_t frame(uint8_t *to, const uint8_t *text, size_t bytes, int version) {
    fuzz_bytes file = { to, 0, FUZZ_ROOM };
    static const uint8_t data[DATA_BYTES] = { 1, 2, 3, 4, 5, 6, 7, 8, 9 };
    fuzz_put(&file, "\x93NUMPY", 6);
    fuzz_put_le(&file, (uint64_t)version, 2);
    fuzz_put_le(&file, bytes, version == 1 ? 2 : 4);
    fuzz_put(&file, text, bytes);
    fuzz_put(&file, data, DATA_BYTES);
    return file.count;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static uint8_t framed[FUZZ_ROOM];
    const unsigned how = bytes > 0 ? data[0] : 0;
    const bool at_end = (how & 1) == 0;
    if (bytes == 0 || bytes > 60000) return 0;
    if (how == 0x93) {
        try_file(fuzz_copy(BLOCK_FILE, data, bytes, at_end), bytes, at_end);
    } else {
        const int version = 1 + (int)(how >> 1) % 3;
        const size_t size = frame(framed, data + 1, bytes - 1, version);
        try_file(fuzz_copy(BLOCK_FILE, framed, size, at_end), size, at_end);
    }
    return 0;
}
