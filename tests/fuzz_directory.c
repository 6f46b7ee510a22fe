/* Feeds any bytes to what reads the directory of an archive: three members that are fine lie in
   front of the input, which is the central directory, or all that follows the members. The first
   byte picks which of the two it is, how many bytes stand in front of the archive, how many follow
   it, and the side of the guard page. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "fuzz.h"

enum { BLOCK_FILE, BLOCK_OUT };

#define MEMBERS 3
#define DATA_BYTES 32

static void put_members(fuzz_bytes *file) {
    static const char *const names[MEMBERS] = { "x.npy", "y.npy", "z" };
    uint8_t plain[FUZZ_NPY_HEAD + DATA_BYTES];
    int i;
    fuzz_npy_head(plain, DATA_BYTES);
    for (i = 0; i < MEMBERS; ++i) {
        fuzz_member m;
        memset(plain + FUZZ_NPY_HEAD, 'x' + i, DATA_BYTES);
        memset(&m, 0, sizeof m);
        m.name = names[i];
        m.csize = m.usize = sizeof plain;
        m.crc = fuzz_crc(plain, sizeof plain);
        fuzz_put_local(file, &m);
        fuzz_put(file, plain, sizeof plain);
    }
}

/* Members are read from their own bytes or not at all. */
static void use_member(const spdl_npz *npz, size_t index, size_t size) {
    const spdl__zip_member *member = &npz->zip.members[index];
    spdl_npy_info info;
    spdl_error error;
    uint8_t *out;
    size_t found = 0;
    spdl_result result;
    FUZZ_CHECK(spdl_npz_name(npz, index) != NULL);
    FUZZ_CHECK(spdl_npz_find(npz, spdl_npz_name(npz, index), &found) == SPDL_OK);
    FUZZ_CHECK(found == index);
    memset(&error, 0, sizeof error);
    result = spdl_npz_info(npz, index, &info, &error);
    FUZZ_CHECK(result <= SPDL_OK && (result == SPDL_OK) == (error.text[0] == '\0'));
    if (result != SPDL_OK) return;
    FUZZ_CHECK(member->offset < size && member->csize < size - member->offset);
    FUZZ_CHECK(info.bytes < FUZZ_ROOM);
    out = fuzz_out(BLOCK_OUT, (size_t)info.bytes, true);
    result = spdl_npz_read(npz, index, out, (size_t)info.bytes, &error);
    if (result == SPDL_OK && info.bytes == DATA_BYTES) FUZZ_CHECK(out[0] >= 'x' && out[0] <= 'z');
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static uint8_t room[FUZZ_ROOM];
    const unsigned how = bytes > 0 ? data[0] : 0;
    const bool at_end = (how & 1) == 0;
    fuzz_bytes file = { room, 0, FUZZ_ROOM };
    spdl_npz_desc desc = { 0 };
    spdl_error error;
    spdl_npz *npz = NULL;
    spdl_result result;
    size_t i;
    if (bytes == 0 || bytes > 65536) return 0;
    memset(&error, 0, sizeof error);
    desc.error = &error;
    fuzz_put(&file, "in front", (how >> 1) & 7);
    put_members(&file);
    const size_t directory = file.count - ((how >> 1) & 7);
    fuzz_put(&file, data + 1, bytes - 1);
    if ((how & 0x10) == 0) {
        file.at += (how >> 1) & 7;
        file.count -= (how >> 1) & 7;
        fuzz_put_end(&file, how >> 6 == 3 ? 65535 : how >> 6, directory);
        file.at = room;
        file.count += (how >> 1) & 7;
    }
    if ((how & 0x20) != 0) fuzz_put(&file, "behind", 6);
    result = spdl_npz_open_memory(&npz, fuzz_copy(BLOCK_FILE, room, file.count, at_end), file.count,
                                  "fuzz", &desc);
    FUZZ_CHECK(result <= SPDL_OK && (result == SPDL_OK) == (error.text[0] == '\0'));
    FUZZ_CHECK((result == SPDL_OK) == (npz != NULL));
    for (i = 0; i < spdl_npz_count(npz); ++i) use_member(npz, i, file.count);
    spdl_npz_close(npz);
    return 0;
}
