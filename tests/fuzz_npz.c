/* Feeds any bytes to everything that reads .npy and .npz:

       clang -g -O1 -fsanitize=fuzzer,address,undefined tests/fuzz_npz.c -o fuzz_npz
       mkdir -p corpus && ./fuzz_npz -max_total_time=60 corpus tests/data

   CRCs are checked for one half of the inputs only: few changed files would get past them. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

/* Reads a member to a block of exactly its size, and looks at every byte of a view. */
static void use_member(const spdl_npz *npz, size_t index) {
    spdl_npy_info info;
    spdl_error error;
    const void *view = NULL;
    bool aligned;
    size_t found = 0;
    uint8_t *copy;
    const spdl_result described = spdl_npz_info(npz, index, &info, &error);
    if (spdl_npz_find(npz, spdl_npz_name(npz, index), &found) != SPDL_OK) abort();
    if (described != SPDL_OK) {
        if (described > 0 || error.result != described || strlen(error.text) == 0) abort();
        return;
    }
    if (info.bytes > ((uint64_t)1 << 26)) return; /* a bomb, told as such: 64 MB are enough here */
    copy = (uint8_t *)malloc(info.bytes > 0 ? (size_t)info.bytes : 1);
    if (copy == NULL) return;
    const spdl_result read = spdl_npz_read(npz, index, copy, (size_t)info.bytes, &error);
    const spdl_result viewed = spdl_npz_view(npz, index, &view, &aligned, NULL);
    if (spdl_npz_stored(npz, index) ? viewed != read : viewed != SPDL_E_UNSUPPORTED) abort();
    if (viewed == SPDL_OK && memcmp(copy, view, (size_t)info.bytes) != 0) abort();
    free(copy);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    spdl_npz_desc desc = { 0 };
    spdl_error error = { 0 };
    spdl_npz *npz = NULL;
    desc.error = &error;
    desc.skip_crc = bytes % 2 == 0;
    desc.max_bytes = (uint64_t)1 << 26;
    if (spdl_npz_open_memory(&npz, data, bytes, "fuzz", &desc) != SPDL_OK) {
        if (npz != NULL || error.result >= 0 || strlen(error.text) == 0) abort();
        return 0;
    }
    for (size_t i = 0; i < spdl_npz_count(npz); ++i) use_member(npz, i);
    spdl_npz_close(npz);
    return 0;
}
