/* Feeds any bytes to everything that reads .npy and .npz, as a whole file.

   CRCs are verified for one half of the inputs only: few changed files would get past them. The
   length also picks the side of the guard page. No allocation may be larger than what the file can
   become: a deflated byte makes at most 1,032. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "fuzz.h"

enum { BLOCK_FILE, BLOCK_OUT };

/* Reads a member to a block of exactly its size, and looks at every byte of a view. */
static void use_member(const spdl_npz *npz, size_t index, bool at_end) {
    spdl_npy_info info;
    spdl_error error;
    const void *view = NULL;
    bool aligned = false;
    size_t found = 0;
    uint8_t *out;
    spdl_result described;
    spdl_result read;
    spdl_result viewed;
    memset(&error, 0, sizeof error);
    described = spdl_npz_info(npz, index, &info, &error);
    FUZZ_CHECK(spdl_npz_find(npz, spdl_npz_name(npz, index), &found) == SPDL_OK);
    FUZZ_CHECK(found == index);
    FUZZ_CHECK(described <= SPDL_OK && (described == SPDL_OK) == (error.text[0] == '\0'));
    if (described != SPDL_OK) return;
    if (info.bytes > FUZZ_ROOM) return; /* a bomb, told as such */
    out = fuzz_out(BLOCK_OUT, (size_t)info.bytes, at_end);
    read = spdl_npz_read(npz, index, out, (size_t)info.bytes, &error);
    viewed = spdl_npz_view(npz, index, &view, &aligned, NULL);
    if (!info.stored) FUZZ_CHECK(viewed == SPDL_E_UNSUPPORTED);
    if (viewed != SPDL_OK) return;
    FUZZ_CHECK(aligned == ((uintptr_t)view % 64 == 0));
    if (read == SPDL_OK) FUZZ_CHECK(info.bytes == 0 || memcmp(out, view, (size_t)info.bytes) == 0);
}

static size_t largest;

static void *bounded_alloc(size_t bytes, size_t align, void *user) {
    void *memory = NULL;
    (void)user;
    if (bytes > largest) largest = bytes;
    return posix_memalign(&memory, align, bytes) == 0 ? memory : NULL;
}

static void bounded_free(void *memory, size_t bytes, void *user) {
    (void)bytes, (void)user;
    free(memory);
}

/* All at once: each array comes out as it does alone, and it fails when one of them does. What is
   no array is left out. */
static void use_all(const spdl_npz *npz, const spdl_npz_bundle *bundle, bool at_end) {
    size_t i, index;
    FUZZ_CHECK(bundle->count <= spdl_npz_count(npz));
    for (i = 0; i < bundle->count; ++i) {
        const spdl_npz_array *a = &bundle->arrays[i];
        const size_t bytes = (size_t)a->info.bytes;
        uint8_t *out;
        FUZZ_CHECK(spdl_npz_find(npz, a->name, &index) == SPDL_OK);
        FUZZ_CHECK(spdl_npz_bundle_find(bundle, a->name) == a);
        FUZZ_CHECK((uintptr_t)a->data % 64 == 0);
        if (bytes > FUZZ_ROOM) continue;
        out = fuzz_out(BLOCK_OUT, bytes, at_end);
        FUZZ_CHECK(spdl_npz_read(npz, index, out, bytes, NULL) == SPDL_OK);
        FUZZ_CHECK(bytes == 0 || memcmp(out, a->data, bytes) == 0);
    }
}

/* From a file, which the bundle may keep. */
static void use_file(const uint8_t *data, size_t bytes, const spdl_npz_desc *desc,
                     const spdl_npz_bundle *expected) {
    spdl_npz_bundle *bundle = NULL;
    char path[64];
    FILE *file;
    size_t i;
    snprintf(path, sizeof path, "/tmp/spdl_fuzz_npz_%ld", (long)getpid());
    file = fopen(path, "wb");
    FUZZ_CHECK(file != NULL && fwrite(data, 1, bytes, file) == bytes && fclose(file) == 0);
    FUZZ_CHECK((spdl_npz_load(&bundle, path, desc) == SPDL_OK) == (expected != NULL));
    for (i = 0; bundle != NULL && i < bundle->count; ++i) {
        const spdl_npz_array *a = &bundle->arrays[i], *b = &expected->arrays[i];
        FUZZ_CHECK(strcmp(a->name, b->name) == 0 && a->info.bytes == b->info.bytes);
        FUZZ_CHECK((uintptr_t)a->data % 64 == 0);
        FUZZ_CHECK(a->info.bytes == 0 || memcmp(a->data, b->data, (size_t)a->info.bytes) == 0);
    }
    spdl_npz_bundle_free(bundle);
    remove(path);
}

static spdl_result read_alone(const spdl_npz *npz, bool at_end) {
    spdl_result result = SPDL_OK;
    size_t i;
    for (i = 0; i < spdl_npz_count(npz) && result == SPDL_OK; ++i) {
        spdl_npy_info info;
        result = spdl_npz_info(npz, i, &info, NULL);
        if (result != SPDL_OK) return result;
        if (info.bytes > FUZZ_ROOM) return SPDL_E_LIMIT; /* not read: anything may be wrong */
        result = spdl_npz_read(npz, i, fuzz_out(BLOCK_OUT, (size_t)info.bytes, at_end),
                               (size_t)info.bytes, NULL);
    }
    return result;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    const bool at_end = (bytes & 2) == 0;
    spdl_npz_desc desc = { 0 };
    spdl_error error;
    spdl_npz_bundle *bundle = NULL;
    spdl_npz *npz = NULL;
    uint8_t *file;
    spdl_result result;
    size_t i;
    if (bytes > FUZZ_ROOM) return 0;
    memset(&error, 0, sizeof error);
    desc.error = &error;
    desc.no_crc = (bytes & 1) == 0;
    desc.max_bytes = (uint64_t)1 << 40;
    desc.allocator.alloc_fn = bounded_alloc;
    desc.allocator.free_fn = bounded_free;
    largest = 0;
    file = fuzz_copy(BLOCK_FILE, data, bytes, at_end);
    result = spdl_npz_open_memory(&npz, file, bytes, "fuzz", &desc);
    FUZZ_CHECK(result <= SPDL_OK && (result == SPDL_OK) == (error.text[0] == '\0'));
    FUZZ_CHECK((result == SPDL_OK) == (npz != NULL));
    if (npz == NULL) return 0;
    for (i = 0; i < spdl_npz_count(npz); ++i) use_member(npz, i, at_end);
    memset(&error, 0, sizeof error);
    result = spdl_npz_load_memory(&bundle, file, bytes, "fuzz", &desc);
    FUZZ_CHECK((result == SPDL_OK) == (error.text[0] == '\0'));
    FUZZ_CHECK((result == SPDL_OK) == (bundle != NULL));
    if (bundle != NULL) use_all(npz, bundle, at_end);
    else if (result != SPDL_E_LIMIT) FUZZ_CHECK(read_alone(npz, at_end) != SPDL_OK);
    if (bytes % 8 >= 6) use_file(file, bytes, &desc, bundle);
    FUZZ_CHECK(largest <= 1100 * bytes + ((size_t)1 << 20));
    spdl_npz_bundle_free(bundle);
    spdl_npz_close(npz);
    return 0;
}
