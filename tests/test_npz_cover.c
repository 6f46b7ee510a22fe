/* What npz does when the system does not do what it was asked: every call that reads, writes, maps
   or allocates fails once, is interrupted, or does less than it should. Beside it, what only large
   members and wrong arguments reach. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#ifndef _WIN32
#include <sys/mman.h>
#include <unistd.h>
#endif

/* ============================================================================================= */
/* Calls that fail when they are told to */

typedef enum sys_call {
    NONE, PREAD, PWRITE, OPEN, MMAP, FSYNC, RENAME, FSTAT, ALLOC
} sys_call;
typedef enum manner { FAILS, INTERRUPTED, HALVED, NOTHING } manner;

static struct {
    sys_call call;
    manner manner;
    int error;
    long at, count; /* it happens at call number `at`, from 1 */
    long times;     /* so often */
    long blocks;    /* allocated and not freed */
    void (*meanwhile)(void); /* or this happens, and the call does what it should */
} fault;

static bool hit(sys_call which) {
    if (which != fault.call) return false;
    ++fault.count;
    if (fault.count < fault.at || fault.count >= fault.at + fault.times) return false;
    if (fault.meanwhile == NULL) return true;
    fault.meanwhile();
    return false;
}

#ifndef _WIN32
static ssize_t faulty_pread(int file, void *to, size_t bytes, off_t at) {
    if (!hit(PREAD)) return pread(file, to, bytes, at);
    if (fault.manner == NOTHING) return 0;
    if (fault.manner == HALVED) return pread(file, to, bytes / 2 + 1, at);
    errno = fault.manner == INTERRUPTED ? EINTR : fault.error;
    return -1;
}

static ssize_t faulty_pwrite(int file, const void *from, size_t bytes, off_t at) {
    if (!hit(PWRITE)) return pwrite(file, from, bytes, at);
    if (fault.manner == NOTHING) return 0;
    if (fault.manner == HALVED) return pwrite(file, from, bytes / 2 + 1, at);
    errno = fault.manner == INTERRUPTED ? EINTR : fault.error;
    return -1;
}

static bool fails(sys_call which) {
    if (!hit(which)) return false;
    errno = fault.error;
    return true;
}

static int faulty_open(const char *path, int flags, ...) {
    va_list args;
    int mode;
    va_start(args, flags);
    mode = va_arg(args, int);
    va_end(args);
    return fails(OPEN) ? -1 : open(path, flags, mode);
}

static void *faulty_mmap(void *at, size_t bytes, int may, int flags, int file, off_t from) {
    return fails(MMAP) ? MAP_FAILED : mmap(at, bytes, may, flags, file, from);
}

static int faulty_fsync(int file) { return fails(FSYNC) ? -1 : fsync(file); }
static int faulty_rename(const char *from, const char *to) {
    return fails(RENAME) ? -1 : rename(from, to);
}
static int faulty_fstat(int file, struct stat *status) {
    return fails(FSTAT) ? -1 : fstat(file, status);
}

#define pread(...) faulty_pread(__VA_ARGS__)
#define pwrite(...) faulty_pwrite(__VA_ARGS__)
#define open(...) faulty_open(__VA_ARGS__, 0)
#define mmap(...) faulty_mmap(__VA_ARGS__)
#define fsync(...) faulty_fsync(__VA_ARGS__)
#define rename(...) faulty_rename(__VA_ARGS__)
#define fstat(...) faulty_fstat(__VA_ARGS__)
#endif
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#undef pread
#undef pwrite
#undef open
#undef mmap
#undef fsync
#undef rename
#undef fstat
#include "test.h"

static void *faulty_alloc(size_t bytes, size_t align, void *user) {
    void *memory = hit(ALLOC) ? NULL : test_memory(align, bytes);
    (void)user;
    if (memory == NULL) return NULL;
    __atomic_fetch_add(&fault.blocks, 1, __ATOMIC_RELAXED);
    return memory;
}

static void faulty_free(void *memory, size_t bytes, void *user) {
    (void)bytes;
    (void)user;
    __atomic_fetch_sub(&fault.blocks, 1, __ATOMIC_RELAXED);
    test_memory_free(memory);
}

static const spdl_allocator allocator = { faulty_alloc, faulty_free, NULL };

static void fault_set(sys_call which, manner how, long at, long times) {
    if (!TEST_POSIX && which != NONE && which != ALLOC)
        TEST_SKIP("needs the calls of POSIX, which fail when they are told to");
    fault.call = which;
    fault.manner = how;
    fault.error = EIO;
    fault.at = at;
    fault.times = times;
    fault.count = 0;
    fault.meanwhile = NULL;
}

/* ============================================================================================= */
/* An archive of every kind of member, large enough to be read in pieces */

#define ARRAYS 6
#define LARGE 300000

typedef struct array {
    const char *name, *descr;
    uint64_t itemsize;
    int ndim;
    uint64_t shape[2];
    bool fortran, deflated;
    uint8_t *data;
} array;

static array arrays[ARRAYS] = {
    { "deflated", "|u1", 1, 1, { LARGE, 0 }, false, true, NULL },
    { "swapped", ">i4", 4, 1, { LARGE / 4, 0 }, false, true, NULL },
    { "turned", "<f4", 4, 2, { 300, 250 }, true, false, NULL },
    { "fields", "[('a', '<i2'), ('b', '>f4')]", 6, 1, { 7, 0 }, false, false, NULL },
    { "more", "|u1", 1, 1, { LARGE - 1, 0 }, false, true, NULL },
    { "stored", "|u1", 1, 2, { 100, LARGE / 100 }, false, false, NULL },
};

static size_t bytes_of(const array *a) {
    return (size_t)(a->itemsize * a->shape[0] * (a->ndim > 1 ? a->shape[1] : 1));
}

/* Noise and zeros in turns of 300 bytes. */
static void arrays_make(void) {
    uint64_t state = 7;
    for (int i = 0; i < ARRAYS; ++i) {
        array *a = &arrays[i];
        if (a->data == NULL) a->data = (uint8_t *)calloc(bytes_of(a), 1);
        REQUIRE(a->data != NULL);
        for (size_t k = 0; k < bytes_of(a); ++k)
            a->data[k] = k / 300 % 2 == 0 ? (uint8_t)test_random(&state) : 0;
    }
}

static void arrays_free(void) {
    for (int i = 0; i < ARRAYS; ++i) {
        free(arrays[i].data);
        arrays[i].data = NULL;
    }
}

typedef struct packer {
    uint8_t *to;
    size_t room, used;
    uint64_t bits;
    unsigned count;
} packer;

static void pack(packer *p, unsigned value, unsigned count) {
    p->bits |= (uint64_t)value << p->count;
    for (p->count += count; p->count >= 8; p->count -= 8, p->bits >>= 8)
        if (p->used < p->room) p->to[p->used++] = (uint8_t)p->bits;
}

/* A code of Huffman's goes the other way round. */
static void pack_code(packer *p, unsigned code, unsigned count) {
    unsigned reversed = 0;
    for (unsigned i = 0; i < count; ++i) reversed |= (code >> i & 1) << (count - 1 - i);
    pack(p, reversed, count);
}

/* A compressor of its own: fixed codes, literals, and runs of zeros in steps of 258. */
static size_t deflate_zeros(void *to, size_t room, const void *from, size_t bytes) {
    packer p = { (uint8_t *)to, room, 0, 0, 0 };
    const uint8_t *data = (const uint8_t *)from;
    size_t zeros = 0;
    pack(&p, 3, 3); /* the last block, fixed codes */
    for (size_t i = 0; i < bytes;) {
        for (zeros = 0; i > 0 && data[i - 1] == 0 && zeros < 258 && i + zeros < bytes; ++zeros)
            if (data[i + zeros] != 0) break;
        if (zeros == 258) {
            pack_code(&p, 0xc5, 8); /* symbol 285: 258 bytes */
            pack_code(&p, 0, 5);    /* at distance 1 */
            i += 258;
        } else {
            pack_code(&p, data[i] < 144 ? 0x30u + data[i] : 0x190u - 144 + data[i],
                      data[i] < 144 ? 8 : 9);
            ++i;
        }
    }
    pack_code(&p, 0, 7);
    pack(&p, 0, 7);
    return p.used < room ? p.used : 0;
}

static char folder[64];

static const char *path_of(const char *name) {
    static char path[2][128];
    static int turn;
    turn = 1 - turn;
    snprintf(path[turn], sizeof path[turn], "%s/%s", folder, name);
    return path[turn];
}

static void folder_make(void) {
    test_folder(folder, sizeof folder);
}

static void folder_remove(void) {
    remove(path_of("a.npz"));
    remove(path_of("b.npz"));
    CHECK(rmdir(folder) == 0); /* nothing else was left in it */
}

static spdl_result write_array(spdl_npz_writer *w, const array *a, spdl_error *error) {
    return spdl_npz_writer_add(w, a->name, a->descr, a->ndim, a->shape, a->data, error);
}

static spdl_result write_all(const char *path, spdl_error *error) {
    spdl_npz_writer_desc desc = { 0 };
    spdl_npz_writer *w = NULL;
    spdl_result result;
    desc.allocator = allocator;
    desc.error = error;
    desc.sync = true;
    result = spdl_npz_writer_open(&w, path, &desc);
    for (int i = 0; i < ARRAYS && result == SPDL_OK; ++i)
        result = write_array(w, &arrays[i], error);
    if (result == SPDL_OK) result = spdl_npz_writer_finish(w, error);
    if (w != NULL && result != SPDL_OK)
        CHECK(spdl_npz_writer_add(w, "x", "|u1", 0, NULL, "x", NULL) != SPDL_OK);
    spdl_npz_writer_close(w);
    return result;
}

/* Writes a member that `file` has stored, deflated if it is to be; its entry of the new directory
   goes to *entry. */
static uint8_t *put_member(uint8_t *to, uint8_t **entry, uint64_t offset, const spdl_npz *npz,
                           size_t i, uint8_t *file) {
    char name[20];
    const size_t name_bytes = (size_t)snprintf(name, sizeof name, "%s.npy", arrays[i].name);
    uint8_t *const body = to + 30 + name_bytes, *at;
    const size_t usize = (size_t)npz->zip.members[i].usize;
    uint8_t *from = file + npz->zip.members[i].offset + 30;
    spdl__crc crc;
    size_t bytes = usize;
    from += spdl__le16(from - 4) + spdl__le16(from - 2);
    if (arrays[i].fortran) memcpy(strstr((char *)from + 10, "False"), "True ", 5);
    spdl__crc_init(&crc);
    if (!arrays[i].deflated) memcpy(body, from, bytes);
    else bytes = deflate_zeros(body, 2 * bytes, from, bytes);
    at = spdl__put16(spdl__put32(to, 0x04034b50), 20);
    at = spdl__put32(spdl__put32(at, arrays[i].deflated ? 8 << 16 : 0), 0x00210000);
    at = spdl__put32(at, spdl__crc_add(&crc, 0, from, usize));
    at = spdl__put32(spdl__put32(at, bytes), usize);
    at = spdl__put32(at, name_bytes);
    memcpy(at, name, name_bytes);
    at = spdl__put16(spdl__put32(*entry, 0x02014b50), 20);
    memcpy(at, to + 4, 26);
    memset(at + 26, 0, 10);
    at = spdl__put32(at + 36, offset);
    memcpy(at, name, name_bytes);
    *entry = at + name_bytes;
    return body + bytes;
}

/* Makes a file that was written one with deflated members. */
static void deflate_file(const char *path) {
    static uint8_t file[4000000], made[4000000], directory[4000];
    uint8_t *at = made, *entry = directory;
    spdl_npz *npz = NULL;
    FILE *f = fopen(path, "rb");
    REQUIRE(f != NULL && fread(file, 1, sizeof file, f) > 0);
    fclose(f);
    REQUIRE(spdl_npz_open(&npz, path, NULL) == SPDL_OK && spdl_npz_count(npz) == ARRAYS);
    for (size_t i = 0; i < ARRAYS; ++i) {
        uint8_t *const to = at;
        at = put_member(to, &entry, (uint64_t)(to - made), npz, i, file);
    }
    spdl_npz_close(npz);
    const size_t bytes = (size_t)(entry - directory), start = (size_t)(at - made);
    memcpy(at, directory, bytes);
    at = spdl__put32(spdl__put32(at + bytes, 0x06054b50), 0);
    at = spdl__put16(spdl__put16(at, ARRAYS), ARRAYS);
    at = spdl__put16(spdl__put32(spdl__put32(at, bytes), start), 0);
    f = fopen(path, "wb");
    REQUIRE(f != NULL && fwrite(made, 1, (size_t)(at - made), f) == (size_t)(at - made));
    fclose(f);
}

/* ============================================================================================= */
/* Everything that can be done with it; the first failure */

static uint8_t *outs[ARRAYS];

static void outs_make(void) {
    for (int i = 0; i < ARRAYS; ++i) {
        if (outs[i] == NULL) outs[i] = (uint8_t *)malloc(bytes_of(&arrays[i]));
        REQUIRE(outs[i] != NULL);
        memset(outs[i], 0xa5, bytes_of(&arrays[i]));
    }
}

static void outs_free(void) {
    for (int i = 0; i < ARRAYS; ++i) {
        free(outs[i]);
        outs[i] = NULL;
    }
}

static bool as_written; /* the file is as spdl_npz_writer_add made it, which has C order alone */

/* What is read is what was written: with native bytes and in C order. */
static bool is_right(int i, const void *read) {
    const array *a = &arrays[i];
    const uint8_t *out = (const uint8_t *)read;
    const char order = a->descr[0];
    const bool swapped = (order == '<' || order == '>') && order != SPDL__NPY_HOST_ORDER;
    bool right = true;
    for (size_t k = 0; k < bytes_of(a) && right; ++k) {
        const size_t size = (size_t)a->itemsize, element = k / size, within = k % size;
        const size_t columns = (size_t)a->shape[1], rows = (size_t)a->shape[0];
        const size_t turned = a->fortran ? element % columns * rows + element / columns : element;
        const size_t from = as_written ? element : turned;
        right = out[k] == a->data[from * size + (swapped ? size - 1 - within : within)];
    }
    return right;
}

static void outs_compare(void) {
    for (int i = 0; i < ARRAYS; ++i)
        if (!CHECK(is_right(i, outs[i]))) fprintf(stderr, "%s\n", arrays[i].name);
}

static void keep(spdl_result *first, spdl_result result) {
    if (*first == SPDL_OK && result != SPDL_E_UNSUPPORTED) *first = result;
}

static void use_one(const spdl_npz *npz, size_t i, spdl_result *first) {
    const size_t bytes = bytes_of(&arrays[i]);
    spdl_npy_info info;
    const void *view = NULL;
    keep(first, spdl_npz_info(npz, i, &info, NULL));
    keep(first, spdl_npz_read_rows(npz, i, 2, 3, outs[i], bytes, NULL));
    keep(first, spdl_npz_view(npz, i, &view, NULL, NULL));
    keep(first, spdl_npz_read(npz, i, outs[i], bytes, NULL));
}

/* Loads all; what was loaded is right. */
static spdl_result load_all(const char *path, bool no_crc) {
    spdl_error error = { 0 };
    spdl_npz_desc desc = { 0 };
    spdl_npz_bundle *bundle = NULL;
    spdl_result result;
    desc.allocator = allocator;
    desc.no_crc = no_crc;
    desc.error = &error;
    result = spdl_npz_load(&bundle, path, &desc);
    CHECK((result == SPDL_OK) == (bundle != NULL));
    CHECK((result == SPDL_OK) == (error.text[0] == 0));
    for (int i = 0; i < ARRAYS && result == SPDL_OK; ++i)
        if (!CHECK(is_right(i, bundle->arrays[i].data))) fprintf(stderr, "%s\n", arrays[i].name);
    if (result == SPDL_OK) CHECK(spdl_npz_bundle_find(bundle, "stored.npy") == &bundle->arrays[5]);
    spdl_npz_bundle_free(bundle);
    return result;
}

static spdl_result use_all(const char *path) {
    spdl_npz_desc desc = { 0 };
    spdl_npz *npz = NULL;
    spdl_result first = SPDL_OK;
    desc.allocator = allocator;
    keep(&first, spdl_npz_open(&npz, path, &desc));
    if (npz == NULL) return first;
    for (size_t i = 0; i < ARRAYS; ++i) use_one(npz, i, &first);
    spdl_npz_close(npz);
    keep(&first, load_all(path, false));
    return first;
}

/* ============================================================================================= */
/* Tests */

static void setup(void) {
    spdl_error error = { 0 };
    folder_make();
    arrays_make();
    outs_make();
    fault_set(NONE, FAILS, 0, 0);
    if (!CHECK_EQ(write_all(path_of("a.npz"), &error), SPDL_OK))
        fprintf(stderr, "%s\n", error.text);
    deflate_file(path_of("a.npz"));
}

static void teardown(void) {
    CHECK_EQ(fault.blocks, 0);
    folder_remove();
    arrays_free();
    outs_free();
}

/* Lets the call fail at its first, second, ... time until it is not reached any more. */
static void reading_survives(sys_call which, manner how, bool harmless) {
    const long step = !TEST_SANITIZED ? 1 : harmless ? 25 : 5; /* what is harmless reads all */
    for (long at = 1;; at += step) {
        fault_set(which, how, at, 1);
        const spdl_result result = use_all(path_of("a.npz"));
        const bool reached = fault.count >= at;
        fault.call = NONE;
        if (harmless || !reached) CHECK_EQ(result, SPDL_OK);
        if (!harmless && reached) CHECK(result < 0);
        if (result == SPDL_OK) outs_compare();
        CHECK_EQ(fault.blocks, 0);
        if (!reached) return;
        REQUIRE(at < 2000);
    }
}

static void reads_that_fail(void) {
    setup();
    reading_survives(PREAD, FAILS, false);
    teardown();
}

static void reads_that_end(void) {
    setup();
    reading_survives(PREAD, NOTHING, false);
    teardown();
}

static void reads_that_are_interrupted(void) {
    setup();
    reading_survives(PREAD, INTERRUPTED, true);
    reading_survives(PREAD, HALVED, true);
    teardown();
}

static void memory_that_is_not_there(void) {
    setup();
    reading_survives(ALLOC, FAILS, false);
    teardown();
}

static void other_calls_that_fail(void) {
    setup();
    reading_survives(MMAP, FAILS, false);
    reading_survives(OPEN, FAILS, false);
    reading_survives(FSTAT, FAILS, false);
    teardown();
}

/* With no_crc a file that cannot be mapped is read. */
static void loading_that_trusts(void) {
    setup();
    CHECK_EQ(load_all(path_of("a.npz"), true), SPDL_OK);
    fault_set(MMAP, FAILS, 1, 1);
    CHECK_EQ(load_all(path_of("a.npz"), true), SPDL_OK);
    CHECK_EQ(fault.count, 1);
    fault_set(NONE, FAILS, 0, 0);
    for (long at = 1; at < 20; ++at) {
        fault_set(ALLOC, FAILS, at, 1);
        const spdl_result result = load_all(path_of("a.npz"), true);
        CHECK_EQ(result, fault.count >= at ? SPDL_E_NOMEM : SPDL_OK);
        CHECK_EQ(fault.blocks, 0);
    }
    fault_set(NONE, FAILS, 0, 0);
    teardown();
}

/* Of a file that could not be written nothing is left, and what was there stays. */
static void writing_survives(sys_call which, manner how, bool harmless) {
    const long step = TEST_SANITIZED ? 5 : 1;
    for (long at = 1;; at += step) {
        spdl_error error = { 0 };
        fault_set(which, how, at, 1);
        const spdl_result result = write_all(path_of("b.npz"), &error);
        const bool reached = fault.count >= at;
        fault.call = NONE;
        if (harmless || !reached) CHECK_EQ(result, SPDL_OK);
        if (!harmless && reached) CHECK(result < 0 && error.text[0] != 0);
        CHECK((access(path_of("b.npz"), F_OK) == 0) == (result == SPDL_OK));
        as_written = true;
        if (result == SPDL_OK) CHECK_EQ(use_all(path_of("b.npz")), SPDL_OK);
        as_written = false;
        remove(path_of("b.npz"));
        CHECK_EQ(fault.blocks, 0);
        if (!reached) return;
        REQUIRE(at < 2000);
    }
}

static void writes_that_fail(void) {
    setup();
    writing_survives(PWRITE, FAILS, false);
    writing_survives(PWRITE, NOTHING, false);
    writing_survives(FSYNC, FAILS, false);
    writing_survives(RENAME, FAILS, false);
    writing_survives(OPEN, FAILS, false);
    teardown();
}

static void writes_that_are_interrupted(void) {
    setup();
    writing_survives(PWRITE, INTERRUPTED, true);
    writing_survives(PWRITE, HALVED, true);
    teardown();
}

/* A name for the new file may be taken; all of them are not. */
static void names_that_are_taken(void) {
    spdl_error error = { 0 };
    setup();
    fault_set(OPEN, FAILS, 1, 3);
    fault.error = EEXIST;
    CHECK_EQ(write_all(path_of("b.npz"), &error), SPDL_OK);
    fault_set(OPEN, FAILS, 1, 1000000);
    fault.error = EEXIST;
    CHECK_EQ(write_all(path_of("b.npz"), &error), SPDL_E_IO);
    fault_set(NONE, FAILS, 0, 0);
    teardown();
}

/* The byte in the middle of a member is another: its neighbours do not mind. */
static void damage(const char *path, off_t at) {
    FILE *file = fopen(path, "r+b");
    int byte;
    REQUIRE(file != NULL && fseek(file, (long)at, SEEK_SET) == 0);
    byte = fgetc(file);
    REQUIRE(byte != EOF && fseek(file, (long)at, SEEK_SET) == 0);
    REQUIRE(fputc(byte ^ 0x11, file) != EOF && fclose(file) == 0);
}

/* A whole file is refused for it, by its name; others of the archive can be read. */
static void damaged_members(void) {
    setup();
    for (int k = 0; k < (TEST_SANITIZED ? 8 : 40); ++k) {
        spdl_error error = { 0 };
        spdl_npz_desc desc = { 0 };
        spdl_npz_bundle *bundle = NULL;
        spdl_npz *npz = NULL;
        REQUIRE(spdl_npz_open(&npz, path_of("a.npz"), NULL) == SPDL_OK);
        const spdl__zip_member *m = &npz->zip.members[4];
        const off_t at = (off_t)(m->offset + 200 + (uint64_t)k * 3449 % (m->csize - 300));
        damage(path_of("a.npz"), at);
        const spdl_result one = spdl_npz_read(npz, 4, outs[4], bytes_of(&arrays[4]), NULL);
        CHECK(one == SPDL_E_CHECKSUM || one == SPDL_E_FORMAT);
        desc.error = &error;
        CHECK_EQ(spdl_npz_load(&bundle, path_of("a.npz"), &desc), one);
        CHECK(strstr(error.text, "member 'more': ") != NULL);
        for (size_t i = 0; i < ARRAYS; ++i) {
            if (i == 4) continue;
            CHECK_EQ(spdl_npz_read(npz, i, outs[i], bytes_of(&arrays[i]), NULL), SPDL_OK);
            CHECK(is_right((int)i, outs[i]));
        }
        spdl_npz_close(npz);
        damage(path_of("a.npz"), at);
    }
    teardown();
}

/* A limit of 2^64 - 1 is none. */
static void limits_that_are_none(void) {
    static const uint64_t limits[] = { (uint64_t)1 << 40, UINT64_MAX / 2, UINT64_MAX };
    setup();
    for (size_t i = 0; i < 3; ++i) {
        spdl_error error = { 0 };
        spdl_npz_desc desc = { 0 };
        spdl_npz_bundle *bundle = NULL;
        desc.max_bytes = limits[i];
        desc.error = &error;
        if (!CHECK_EQ(spdl_npz_load(&bundle, path_of("a.npz"), &desc), SPDL_OK))
            fprintf(stderr, "%s\n", error.text);
        spdl_npz_bundle_free(bundle);
    }
    teardown();
}

/* ============================================================================================= */
/* Files that others change */

static long heads[3]; /* where the headers of b.npz are */
static int heads_changed;

/* Three arrays of one row, so that Fortran order moves nothing; aligned, and large enough to be
   lent. */
static void rows_write(void) {
    const uint64_t shape[2] = { 1, LARGE / 3 };
    spdl_npz_writer *w = NULL;
    spdl_npz *npz = NULL;
    REQUIRE(spdl_npz_writer_open(&w, path_of("b.npz"), NULL) == SPDL_OK);
    for (int i = 0; i < 3; ++i) {
        const char name[2] = { (char)('a' + i), 0 };
        CHECK_EQ(spdl_npz_writer_add(w, name, "|u1", 2, shape, arrays[0].data, NULL), SPDL_OK);
    }
    CHECK_EQ(spdl_npz_writer_finish(w, NULL), SPDL_OK);
    spdl_npz_writer_close(w);
    REQUIRE(spdl_npz_open(&npz, path_of("b.npz"), NULL) == SPDL_OK);
    for (size_t i = 0; i < 3; ++i) {
        const void *view = NULL;
        CHECK_EQ(spdl_npz_view(npz, i, &view, NULL, NULL), SPDL_OK);
        heads[i] = (long)((uintptr_t)view - (uintptr_t)npz->mapping) - 128;
    }
    spdl_npz_close(npz);
}

/* Changes bytes of the header of one more array. */
static void head_change(long at, const void *to, size_t bytes) {
    FILE *file;
    if (heads_changed == 3) return;
    file = fopen(path_of("b.npz"), "r+b");
    REQUIRE(file != NULL && fseek(file, heads[heads_changed++] + at, SEEK_SET) == 0);
    CHECK(fwrite(to, 1, bytes, file) == bytes && fclose(file) == 0);
}

static void head_turns(void) { head_change(44, "True ", 5); }
static void head_shrinks(void) { head_change(8, "u", 1); } /* 117 bytes: the data begin earlier */

/* The bundle has all arrays, or there is an error. */
static void rows_load(bool moved) {
    spdl_error error = { 0 };
    spdl_npz_desc desc = { 0 };
    spdl_npz_bundle *bundle = NULL;
    spdl_result result;
    desc.allocator = allocator;
    desc.no_crc = true;
    desc.error = &error;
    result = spdl_npz_load(&bundle, path_of("b.npz"), &desc);
    if (!CHECK_EQ(result, SPDL_OK)) fprintf(stderr, "%s\n", error.text);
    REQUIRE(bundle != NULL && bundle->count == 3);
    for (size_t i = 0; i < 3; ++i) {
        const uint8_t *data = (const uint8_t *)bundle->arrays[i].data;
        CHECK_EQ((uintptr_t)data % 64, 0);
        CHECK(memcmp(data + (moved && data[0] == '\n'), arrays[0].data, LARGE / 3 - 1) == 0);
    }
    spdl_npz_bundle_free(bundle);
}

/* A mapped file may change between any two looks at it. Arrays that can be lent no more are copied,
   and the bundle is made again for each. */
static void files_that_change(void) {
    TEST_NEEDS_LINUX();
    folder_make();
    arrays_make();
    for (int shrinks = 0; shrinks < 2; ++shrinks)
        for (long at = 1; at < 8; ++at) {
            rows_write();
            heads_changed = 0;
            fault_set(ALLOC, FAILS, at, 1000);
            fault.meanwhile = shrinks ? head_shrinks : head_turns;
            rows_load(shrinks);
            fault_set(NONE, FAILS, 0, 0);
        }
    teardown();
}

/* Appends ZIP64 records to b.npz: one with more fields than it needs, and a comment, so that the
   tail is read in three steps. */
static void tail_lengthen(void) {
    enum { MORE = 5000, COMMENT = 4060 };
    static uint8_t tail[56 + MORE + 20 + 22 + COMMENT];
    uint8_t end[22], *at;
    long size = 0;
    FILE *file = fopen(path_of("b.npz"), "r+b");
    REQUIRE(file != NULL && fseek(file, -22, SEEK_END) == 0 && (size = ftell(file)) > 0);
    REQUIRE(fread(end, 1, 22, file) == 22);
    at = spdl__put64(spdl__put32(tail, 0x06064b50), 44 + MORE);
    at = spdl__put64(spdl__put64(at + 12, 3), 3);
    spdl__put64(spdl__put64(at, spdl__le32(end + 12)), spdl__le32(end + 16));
    at = spdl__put32(tail + 56 + MORE, 0x07064b50);
    at = spdl__put32(spdl__put64(at + 4, (uint64_t)size), 1);
    memset(spdl__put32(at, 0x06054b50) + 4, 0xff, 12);
    spdl__put16(at + 20, COMMENT);
    REQUIRE(fseek(file, size, SEEK_SET) == 0 && fwrite(tail, 1, sizeof tail, file) == sizeof tail);
    fclose(file);
}

/* Each step fails once. */
static void tails_that_cannot_be_read(void) {
    folder_make();
    arrays_make();
    for (int distant = 0; distant < 2; ++distant) {
        rows_write();
        tail_lengthen();
        if (distant) { /* the locator leads to byte 5, too far to read for: not the record */
            FILE *file = fopen(path_of("b.npz"), "r+b");
            REQUIRE(file != NULL && fseek(file, -(4060 + 22 + 12), SEEK_END) == 0);
            CHECK(fwrite("\5\0\0\0\0\0\0\0", 1, 8, file) == 8 && fclose(file) == 0);
        }
        for (int turn = 0; turn < 2; ++turn)
            for (long at = 1, reached = 1; reached; ++at) {
                spdl_error error = { 0 };
                spdl_npz_desc desc = { 0 };
                spdl_npz *npz = NULL;
                spdl_result result;
                desc.allocator = allocator;
                desc.error = &error;
                fault_set(turn ? ALLOC : PREAD, FAILS, at, 1);
                result = spdl_npz_open(&npz, path_of("b.npz"), &desc);
                reached = fault.count >= at;
                if (reached) CHECK_EQ(result, turn ? SPDL_E_NOMEM : SPDL_E_IO);
                else CHECK_EQ(result, distant ? SPDL_E_FORMAT : SPDL_OK);
                if (!reached && distant)
                    CHECK(strstr(error.text, "leads to no ZIP64 end record") != NULL);
                if (!reached) CHECK(at > (distant ? 3 : 4));
                CHECK_EQ(spdl_npz_count(npz), result == SPDL_OK ? 3 : 0);
                spdl_npz_close(npz);
                CHECK_EQ(fault.blocks, 0);
            }
    }
    fault_set(NONE, FAILS, 0, 0);
    teardown();
}

/* ============================================================================================= */
/* Tokens, tar archives and lines */

static uint8_t *tar_add(uint8_t *at, const char *name, char kind, const char *data, size_t bytes) {
    unsigned sum = 0;
    memset(at, 0, 512);
    snprintf((char *)at, 100, "%s", name);
    snprintf((char *)at + 124, 12, "%011o", (unsigned)bytes);
    at[156] = (uint8_t)kind;
    memcpy(at + 257, "ustar", 6);
    memset(at + 148, ' ', 8);
    for (int i = 0; i < 512; ++i) sum += at[i];
    snprintf((char *)at + 148, 8, "%06o", sum);
    memset(at + 512, 0, (bytes + 511) / 512 * 512);
    for (size_t i = 0; i < bytes; ++i) at[512 + i] = (uint8_t)data[i % strlen(data)];
    return at + 512 + (bytes + 511) / 512 * 512;
}

static void put_whole(const char *name, const void *data, size_t bytes) {
    FILE *file = fopen(path_of(name), "wb");
    REQUIRE(file != NULL && fwrite(data, 1, bytes, file) == bytes && fclose(file) == 0);
}

/* A window of the reader ends between a header and its data, and one of tokens is of two shards. */
static void files_write(void) {
    static uint8_t tar[70000], shard[1024 + 40];
    uint8_t *at = tar_add(tar, "a", '0', "a", 65024 - 512);
    at = tar_add(at, "x", 'x', "10 path=b\n", 10);
    CHECK_EQ(at - tar, 65536 + 512);
    at = tar_add(at, "longer", '0', "b", 600);
    put_whole("x.tar", tar, (size_t)(at - tar) + 1024);
    put_whole("lines", "one\ntwo", 7);
    spdl__put32(spdl__put32(spdl__put32(shard, 20240520), 1), 20);
    put_whole("0.bin", shard, sizeof shard);
    put_whole("1.bin", shard, sizeof shard);
}

static spdl_result use_records(spdl__records_kind kind, const char *name, const char *wanted,
                               spdl_error *error) {
    const spdl_records_desc desc = { .allocator = allocator, .error = error };
    spdl__records *records = NULL;
    spdl_record *record = NULL;
    char names[40] = "";
    spdl_result result = spdl__records_open(&records, path_of(name), kind, &desc);
    while (result == SPDL_OK) {
        result = spdl__records_next(records, &record, error);
        if (result != SPDL_OK) break;
        snprintf(names + strlen(names), 16, "%.1s%d ", (char *)record->data, (int)record->bytes);
        spdl_record_free(record);
    }
    spdl__records_close(records);
    if (result == SPDL_END) CHECK_STR(names, wanted);
    return result == SPDL_END ? SPDL_OK : result;
}

static spdl_result use_tokens(spdl_error *error) {
    const spdl_files_desc by = { .allocator = allocator, .error = error };
    const spdl_tokens_desc desc = { .length = 25, .allocator = allocator, .error = error };
    spdl_files *files = NULL;
    spdl_tokens *tokens = NULL;
    uint16_t window[26];
    spdl_result result = spdl_files_open(&files, path_of("*.bin"), &by);
    if (result == SPDL_OK) result = spdl_tokens_open(&tokens, files, &desc);
    if (result == SPDL_OK) result = spdl_tokens_read(tokens, 0, window, 2, error);
    spdl_tokens_close(tokens);
    spdl_files_close(files);
    return result;
}

/* Every read and every allocation fails once. */
static void files_that_cannot_be_read(void) {
    folder_make();
    files_write();
    for (int turn = 0; turn < 3; ++turn) {
        long looks = 0;
        for (long at = 1, reached = 1; reached; ++at) {
            spdl_error error = { 0 };
            spdl_result result = SPDL_OK;
            fault_set(turn == 0 ? ALLOC : PREAD, turn == 2 ? NOTHING : FAILS, at, 1);
            result = use_tokens(&error);
            if (result == SPDL_OK)
                result = use_records(SPDL__RECORDS_TAR, "x.tar", "a64512 b600 ", &error);
            if (result == SPDL_OK)
                result = use_records(SPDL__RECORDS_LINES, "lines", "o3 t3 ", &error);
            reached = fault.count >= at;
            if (turn == 0 || !reached || result != SPDL_OK)
                CHECK_EQ(result, !reached ? SPDL_OK : turn == 0 ? SPDL_E_NOMEM : SPDL_E_IO);
            else ++looks; /* for more behind the end */
            CHECK((error.text[0] != 0) == (result != SPDL_OK));
            CHECK_EQ(fault.blocks, 0);
            REQUIRE(at < 100);
        }
        CHECK_EQ(looks, turn == 0 ? 0 : 2);
    }
    fault_set(NONE, FAILS, 0, 0);
    remove(path_of("x.tar"));
    remove(path_of("lines"));
    remove(path_of("0.bin"));
    remove(path_of("1.bin"));
    folder_remove();
}

/* ============================================================================================= */
/* Arguments, and two threads */

static const spdl_npz *viewed;

static void view_first(void) {
    const void *view = NULL;
    fault.call = NONE;
    CHECK_EQ(spdl_npz_view(viewed, 0, &view, NULL, NULL), SPDL_OK);
}

/* Two threads make the mapping of the first view. */
static void views_at_the_same_time(void) {
    const void *view = NULL, *again = NULL;
    spdl_npz *npz = NULL;
    folder_make();
    arrays_make();
    rows_write();
    REQUIRE(spdl_npz_open(&npz, path_of("b.npz"), NULL) == SPDL_OK);
    viewed = npz;
    fault_set(MMAP, FAILS, 1, 1);
    fault.meanwhile = view_first;
    CHECK_EQ(spdl_npz_view(npz, 0, &view, NULL, NULL), SPDL_OK);
    CHECK_EQ(fault.count, 1);
    CHECK_EQ(spdl_npz_view(npz, 0, &again, NULL, NULL), SPDL_OK);
    CHECK(view == again && memcmp(view, arrays[0].data, LARGE / 3) == 0);
    spdl_npz_close(npz);
    teardown();
}

static void reading_arguments(void) {
    spdl_npz *npz = NULL;
    spdl_npz_bundle *bundle = NULL;
    spdl_npz_desc desc = { 0 };
    setup();
    CHECK_EQ(spdl_npz_load(&bundle, path_of("none"), NULL), SPDL_E_IO);
    CHECK_EQ(spdl_npz_load(NULL, path_of("a.npz"), NULL), SPDL_E_INVALID);
    CHECK(bundle == NULL && spdl_npz_bundle_find(bundle, "x") == NULL);
    desc.max_bytes = 2 * LARGE;
    CHECK_EQ(spdl_npz_load(&bundle, path_of("a.npz"), &desc), SPDL_E_LIMIT);
    CHECK_EQ(spdl_npz_load(&bundle, path_of("a.npz"), NULL), SPDL_OK);
    CHECK(spdl_npz_bundle_find(bundle, NULL) == NULL);
    CHECK(spdl_npz_bundle_find(bundle, "st") == NULL);
    CHECK(spdl_npz_bundle_find(bundle, "stored") != NULL);
    CHECK(spdl_npz_bundle_find(bundle, "not stored.npy") == NULL);
    spdl_npz_bundle_free(bundle);
    REQUIRE(spdl_npz_open(&npz, path_of("a.npz"), NULL) == SPDL_OK);
    CHECK_EQ(spdl_npz_find(npz, NULL, NULL), SPDL_E_NOT_FOUND);
    CHECK_EQ(spdl_npz_find(NULL, "stored", NULL), SPDL_E_NOT_FOUND);
    CHECK_EQ(spdl_npz_find(npz, "stored", NULL), SPDL_OK);
    CHECK_EQ(spdl_npz_info(npz, 0, NULL, NULL), SPDL_E_INVALID);
    CHECK_EQ(spdl_npz_view(npz, 5, NULL, NULL, NULL), SPDL_E_INVALID);
    spdl_npz_close(npz);
    teardown();
}

static void writing_arguments(void) {
    const array *a = &arrays[0];
    spdl_npz_writer_desc desc = { 0 };
    spdl_npz_writer *w = NULL;
    setup();
    desc.allocator.alloc_fn = faulty_alloc;
    CHECK_EQ(spdl_npz_writer_open(&w, path_of("b.npz"), &desc), SPDL_E_INVALID);
    CHECK(w == NULL);
    CHECK_EQ(write_array(w, a, NULL), SPDL_E_INVALID);
    REQUIRE(spdl_npz_writer_open(&w, path_of("b.npz"), NULL) == SPDL_OK);
    CHECK_EQ(spdl_npz_writer_add(w, NULL, a->descr, 1, a->shape, a->data, NULL), SPDL_E_INVALID);
    spdl_npz_writer_close(w);
    spdl_npz_writer_close(NULL);
    teardown();
}

TEST_TABLE(npz_cover) {
    TEST_CASE(reads_that_fail), TEST_CASE(reads_that_end), TEST_CASE(reads_that_are_interrupted),
    TEST_CASE(memory_that_is_not_there), TEST_CASE(other_calls_that_fail),
    TEST_CASE(loading_that_trusts), TEST_CASE(writes_that_fail),
    TEST_CASE(writes_that_are_interrupted), TEST_CASE(names_that_are_taken),
    TEST_CASE(damaged_members), TEST_CASE(limits_that_are_none), TEST_CASE(files_that_change),
    TEST_CASE(tails_that_cannot_be_read), TEST_CASE(files_that_cannot_be_read),
    TEST_CASE(views_at_the_same_time),
    TEST_CASE(reading_arguments), TEST_CASE(writing_arguments),
    TEST_END
};
