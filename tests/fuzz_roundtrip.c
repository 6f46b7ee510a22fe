/* Writes arrays as the input says and reads them again: types, shapes, orders, names, pieces
   and alignment are taken from its bytes. What the writer accepts must come back as it was; of what
   it refuses nothing may be left. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "fuzz.h"

enum { BLOCK_OUT, BLOCK_DATA };

#define ARRAYS 5
#define MOST_BYTES 65536

typedef struct source {
    const uint8_t *at;
    const uint8_t *begin;
    size_t left;
    size_t bytes;
} source;

typedef struct array {
    char name[24];
    spdl_npy_info info;
    uint8_t *data;
} array;

static unsigned take(source *s) {
    if (s->left == 0) return 0;
    --s->left;
    return *s->at++;
}

static void make_path(char *path, size_t bytes) {
    const char *directory = getenv("TMPDIR");
    if (directory == NULL) directory = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    snprintf(path, bytes, "%s/spdl_fuzz_%ld", directory, (long)getpid());
}

/* ---- what to write ---- */

typedef struct type {
    const char *descr;
    char kind;
    char order; /* as it is told; '=': by the machine */
    uint64_t itemsize;
} type;

static const type types[] = {
    { "|u1", 'u', '|', 1 },      { "<f4", 'f', '<', 4 },      { ">f4", 'f', '>', 4 },
    { "<i8", 'i', '<', 8 },      { ">u2", 'u', '>', 2 },      { "<f2", 'f', '<', 2 },
    { "<f8", 'f', '<', 8 },      { "<c8", 'c', '<', 8 },      { ">c16", 'c', '>', 16 },
    { "<f16", 'f', '<', 16 },    { "|b1", 'b', '|', 1 },      { "|S5", 'S', '|', 5 },
    { "<U3", 'U', '<', 12 },     { ">U2", 'U', '>', 8 },      { "|V7", 'V', '|', 7 },
    { "<M8[ns]", 'M', '<', 8 },  { ">m8[25s]", 'm', '>', 8 }, { "|i1", 'i', '|', 1 },
    { "[('a', '<f4'), ('b', '|u1', (3,)), ('', '|V1')]", 'V', '|', 8 },
    { "[('p', [('x', '>i2'), ('y', '<i2')]), ('q', '<f8')]", 'V', '|', 12 },
};
#define TYPES (sizeof types / sizeof types[0])

static void take_type(source *s, array *a) {
    const unsigned how = take(s);
    const type *t = &types[how % TYPES];
    a->info.kind = t->kind;
    a->info.itemsize = t->itemsize;
    a->info.byte_order = t->order;
    if (how >= 128 || strchr("biufcSUV", t->kind) == NULL || t->descr[0] == '[') {
        snprintf(a->info.descr, sizeof a->info.descr, "%s", t->descr);
    }
}

static void take_shape(source *s, array *a) {
    const unsigned how = take(s);
    int i;
    a->info.ndim = (int)(how & 3) + (how >= 0xfc ? 60 : 0);
    a->info.fortran_order = (how & 4) != 0;
    a->info.count = 1;
    for (i = 0; i < a->info.ndim; ++i) {
        a->info.shape[i] = how >= 0xf8 ? 1 : take(s) % 40;
        a->info.count *= a->info.shape[i];
    }
    a->info.bytes = a->info.count * a->info.itemsize;
    if (a->info.bytes <= MOST_BYTES) return;
    a->info.ndim = 0;
    a->info.count = 1;
    a->info.bytes = a->info.itemsize;
}

/* Mostly letters; sometimes whatever the input has. */
static void take_name(source *s, array *a) {
    const unsigned how = take(s);
    const size_t length = 1 + how % 8;
    size_t i;
    for (i = 0; i < length; ++i) {
        a->name[i] = (char)(how >= 0xe0 ? (int)take(s) : 'a' + (int)(take(s) % 26));
    }
    if ((how & 0x18) == 0x18) snprintf(a->name + strlen(a->name), 8, ".npy");
}

static void take_array(source *s, array *a, uint8_t *data) {
    size_t i;
    memset(a, 0, sizeof *a);
    take_name(s, a);
    take_type(s, a);
    take_shape(s, a);
    a->data = data;
    for (i = 0; i < a->info.bytes; ++i) {
        data[i] = (uint8_t)(s->bytes > 0 ? s->begin[i % s->bytes] + i / 7 : i);
    }
}

/* ---- writing ---- */

/* In one piece, or in pieces of as many bytes as the input says. */
static spdl_result write_array(spdl_npz_writer *writer, const array *a, unsigned how) {
    spdl_error error;
    spdl_result result;
    size_t at = 0;
    size_t piece;
    memset(&error, 0, sizeof error);
    if ((how & 1) == 0) {
        result = spdl_npz_write(writer, a->name, &a->info, a->data, &error);
    } else {
        result = spdl_npz_begin(writer, a->name, &a->info, &error);
        for (; result == SPDL_OK && at < a->info.bytes; at += piece) {
            piece = (size_t)a->info.bytes - at;
            if (piece > 1 + 3 * (size_t)how) piece = 1 + 3 * (size_t)how;
            result = spdl_npz_append(writer, a->data + at, piece, &error);
        }
    }
    FUZZ_CHECK((result == SPDL_OK) == (error.text[0] == '\0'));
    FUZZ_CHECK(result == SPDL_OK || result == SPDL_E_INVALID || result == SPDL_E_UNSUPPORTED ||
               result == SPDL_E_LIMIT);
    return result;
}

/* The arrays that are in the file, 0 when the writer refused one or wants none. */
static size_t write_file(const char *path, source *s, array *arrays,
                         const spdl_npz_write_desc *desc) {
    static uint8_t data[ARRAYS][MOST_BYTES];
    const size_t wanted = desc->npy ? 1 : take(s) % (ARRAYS + 1);
    spdl_npz_writer *writer = NULL;
    spdl_result result = spdl_npz_create(&writer, path, desc);
    size_t count;
    FUZZ_CHECK(result == SPDL_OK);
    for (count = 0; count < wanted && result == SPDL_OK; ++count) {
        take_array(s, &arrays[count], data[count]);
        result = write_array(writer, &arrays[count], take(s));
    }
    if (result == SPDL_OK) {
        FUZZ_CHECK(access(path, F_OK) != 0);
        FUZZ_CHECK(spdl_npz_finish(writer, NULL) == SPDL_OK);
    }
    spdl_npz_writer_close(writer);
    FUZZ_CHECK((access(path, F_OK) == 0) == (result == SPDL_OK));
    return result == SPDL_OK ? count : 0;
}

/* ---- reading it again ---- */

static void check_info(const spdl_npy_info *info, const spdl_npy_info *wanted) {
    FUZZ_CHECK(info->kind == wanted->kind && info->itemsize == wanted->itemsize);
    FUZZ_CHECK(info->ndim == wanted->ndim && info->bytes == wanted->bytes);
    FUZZ_CHECK(info->byte_order == wanted->byte_order || info->itemsize == 1);
    FUZZ_CHECK(memcmp(info->shape, wanted->shape, (size_t)info->ndim * sizeof info->shape[0]) == 0);
    FUZZ_CHECK(info->fortran_order == wanted->fortran_order || info->ndim < 2);
    FUZZ_CHECK(wanted->descr[0] == '\0' || strcmp(info->descr, wanted->descr) == 0);
}

/* "x.npy" may also mean the member that holds "x". */
static void check_name(const spdl_npz *npz, size_t index, const char *name) {
    const size_t length = strlen(name);
    size_t found = 99;
    FUZZ_CHECK(strcmp(spdl_npz_name(npz, index), name) == 0);
    FUZZ_CHECK(spdl_npz_find(npz, name, &found) == SPDL_OK);
    if (length < 4 || strcmp(name + length - 4, ".npy") != 0) FUZZ_CHECK(found == index);
}

static void check_array(const spdl_npz *npz, size_t index, const array *a,
                        const spdl_npz_write_desc *desc) {
    const size_t bytes = (size_t)a->info.bytes;
    uint8_t *out = fuzz_out(BLOCK_OUT, bytes, true);
    const void *view = NULL;
    bool aligned = false;
    spdl_npy_info info;
    if (!desc->npy) check_name(npz, index, a->name);
    FUZZ_CHECK(spdl_npz_info(npz, index, &info, NULL) == SPDL_OK);
    check_info(&info, &a->info);
    FUZZ_CHECK(spdl_npz_read(npz, index, out, bytes, NULL) == SPDL_OK);
    FUZZ_CHECK(bytes == 0 || memcmp(out, a->data, bytes) == 0);
    FUZZ_CHECK(spdl_npz_view(npz, index, &view, &aligned, NULL) == SPDL_OK);
    FUZZ_CHECK(bytes == 0 || memcmp(view, a->data, bytes) == 0);
    if (desc->align == 0 || desc->align >= 64) FUZZ_CHECK(aligned);
}

static void check_file(const char *path, const array *arrays, size_t count,
                       const spdl_npz_write_desc *desc) {
    spdl_npz_desc how = { 0 };
    spdl_npz *npz = NULL;
    size_t i;
    how.verify = SPDL_NPZ_VERIFY_ALL;
    FUZZ_CHECK(spdl_npz_open_file(&npz, path, &how) == SPDL_OK);
    FUZZ_CHECK(spdl_npz_count(npz) == count);
    for (i = 0; i < count; ++i) check_array(npz, i, &arrays[i], desc);
    spdl_npz_close(npz);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static const size_t aligns[] = { 0, 1, 8, 4096 };
    static array arrays[ARRAYS];
    source s = { data, data, bytes, bytes };
    const unsigned how = take(&s);
    spdl_npz_write_desc desc = { 0 };
    char path[128];
    size_t count;
    make_path(path, sizeof path);
    desc.npy = (how & 3) == 3;
    desc.align = aligns[how >> 2 & 3];
    count = write_file(path, &s, arrays, &desc);
    if (count > 0) check_file(path, arrays, count, &desc);
    unlink(path);
    return 0;
}
