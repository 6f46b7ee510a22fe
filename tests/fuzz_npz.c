/* Feeds any bytes to everything that reads .npy and .npz, as a whole file.

   CRCs are verified for one half of the inputs only: few changed files would get past them. The
   length also picks the side of the guard page, and whether arrays are converted. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "fuzz.h"

enum { BLOCK_FILE, BLOCK_OUT, BLOCK_MANY };

#define MANY 4

/* Reads a member to a block of exactly its size, and looks at every byte of a view. */
static void use_member(const spdl_npz *npz, size_t index, bool at_end, bool converts) {
    spdl_npy_info info;
    spdl_error error;
    const void *view = NULL;
    bool aligned = false;
    size_t found = 0;
    uint8_t *out;
    spdl_npz_member member;
    spdl_result described;
    spdl_result read;
    spdl_result viewed;
    memset(&error, 0, sizeof error);
    described = spdl_npz_info(npz, index, &info, &error);
    FUZZ_CHECK(spdl_npz_find(npz, spdl_npz_name(npz, index), &found) == SPDL_OK);
    FUZZ_CHECK(described <= SPDL_OK && (described == SPDL_OK) == (error.text[0] == '\0'));
    if (described != SPDL_OK) return;
    if (info.bytes > FUZZ_ROOM) return; /* a bomb, told as such */
    out = fuzz_out(BLOCK_OUT, (size_t)info.bytes, at_end);
    read = spdl_npz_read(npz, index, out, (size_t)info.bytes, &error);
    viewed = spdl_npz_view(npz, index, &view, &aligned, NULL);
    FUZZ_CHECK(spdl_npz_stat(npz, index, &member) == SPDL_OK);
    if (!member.stored) FUZZ_CHECK(viewed == SPDL_E_UNSUPPORTED);
    if (viewed != SPDL_OK) return;
    FUZZ_CHECK(aligned == ((uintptr_t)view % 64 == 0));
    if (read == SPDL_OK) FUZZ_CHECK(info.bytes == 0 || memcmp(out, view, (size_t)info.bytes) == 0);
    FUZZ_CHECK(!converts || !info.fortran_order);
}

/* The first few at once: each comes out as it does alone. */
static void use_many(const spdl_npz *npz, bool at_end) {
    spdl_npz_request requests[MANY];
    const size_t members = spdl_npz_count(npz);
    spdl_result first = SPDL_OK;
    size_t count;
    size_t i;
    memset(requests, 0, sizeof requests);
    for (i = 0, count = 0; i < members && count < MANY; ++i) {
        spdl_npy_info info;
        if (spdl_npz_info(npz, i, &info, NULL) != SPDL_OK || info.bytes > FUZZ_ROOM) continue;
        requests[count].index = i;
        requests[count].bytes = (size_t)info.bytes;
        requests[count].data = fuzz_out(BLOCK_MANY + (int)count, (size_t)info.bytes, at_end);
        ++count;
    }
    const spdl_result result = spdl_npz_read_many(npz, requests, count, NULL, NULL);
    for (i = 0; i < count; ++i) {
        const spdl_npz_request *r = &requests[i];
        uint8_t *out = fuzz_out(BLOCK_OUT, r->bytes, at_end);
        const spdl_result alone = spdl_npz_read(npz, r->index, out, r->bytes, NULL);
        FUZZ_CHECK(alone == r->result);
        FUZZ_CHECK(alone != SPDL_OK || r->bytes == 0 || memcmp(out, r->data, r->bytes) == 0);
        if (first == SPDL_OK) first = alone;
    }
    FUZZ_CHECK(result == first);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    const bool at_end = (bytes & 2) == 0;
    spdl_npz_desc desc = { 0 };
    spdl_error error;
    spdl_npz *npz = NULL;
    spdl_result result;
    size_t i;
    if (bytes > FUZZ_ROOM) return 0;
    memset(&error, 0, sizeof error);
    desc.error = &error;
    desc.verify = (bytes & 1) == 0 ? SPDL_NPZ_VERIFY_NONE : SPDL_NPZ_VERIFY_ALL;
    desc.convert = (bytes & 12) == 0 ? SPDL_NPZ_NATIVE_BYTES | SPDL_NPZ_C_ORDER : 0;
    desc.max_bytes = (uint64_t)1 << 26;
    result = spdl_npz_open_memory(&npz, fuzz_copy(BLOCK_FILE, data, bytes, at_end), bytes, "fuzz",
                                  &desc);
    FUZZ_CHECK(result <= SPDL_OK && (result == SPDL_OK) == (error.text[0] == '\0'));
    FUZZ_CHECK((result == SPDL_OK) == (npz != NULL));
    if (npz == NULL) return 0;
    for (i = 0; i < spdl_npz_count(npz); ++i) use_member(npz, i, at_end, desc.convert != 0);
    use_many(npz, at_end);
    spdl_npz_close(npz);
    return 0;
}
