/* Writes arrays as the input says and reads them again: types, shapes and names are taken from its
   bytes. What the writer accepts must come back as it was; of what
   it refuses nothing may be left. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "fuzz.h"

#include "../examples/npz_writer.h"

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
    const struct type *type;
    int ndim;
    uint64_t shape[SPDL_NPY_MAX_DIMS];
    uint64_t bytes;
    uint8_t *data;
} array;

static unsigned take(source *s) {
    if (s->left == 0) return 0;
    --s->left;
    return *s->at++;
}

static void make_path(char *path, size_t bytes, bool npy) {
    const char *directory = getenv("TMPDIR");
    if (directory == NULL) directory = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    snprintf(path, bytes, "%s/spdl_fuzz_%ld.%s", directory, (long)getpid(), npy ? "npy" : "npz");
}

/* ---- what to write ---- */

typedef struct type {
    const char *descr;
    char kind;
    uint64_t itemsize;
    size_t unit; /* of the bytes that an order changes */
} type;

static const type types[] = {
    { "|u1", 'u', 1, 1 },      { "<f4", 'f', 4, 4 },      { ">f4", 'f', 4, 4 },
    { "<i8", 'i', 8, 8 },      { ">u2", 'u', 2, 2 },      { "<f2", 'f', 2, 2 },
    { "<f8", 'f', 8, 8 },      { "<c8", 'c', 8, 4 },      { ">c16", 'c', 16, 8 },
    { "<f16", 'f', 16, 16 },   { "|b1", 'b', 1, 1 },      { "|S5", 'S', 5, 1 },
    { "<U3", 'U', 12, 4 },     { ">U2", 'U', 8, 4 },      { "|V7", 'V', 7, 1 },
    { "<M8[ns]", 'M', 8, 8 },  { ">m8[25s]", 'm', 8, 8 }, { "|i1", 'i', 1, 1 },
    { "[('a', '<f4'), ('b', '|u1', (3,)), ('', '|V1')]", 'V', 8, 1 },
    { "[('p', '>i2'), ('q', '<f8')]", 'V', 10, 1 },
};
#define TYPES (sizeof types / sizeof types[0])

static void take_shape(source *s, array *a) {
    const unsigned how = take(s);
    int i;
    a->ndim = (int)(how & 3) + (how >= 0xfc ? 60 : 0);
    a->bytes = a->type->itemsize;
    for (i = 0; i < a->ndim; ++i) {
        a->shape[i] = how >= 0xf8 ? 1 : take(s) % 40;
        a->bytes *= a->shape[i];
    }
    if (a->bytes <= MOST_BYTES) return;
    a->ndim = 0;
    a->bytes = a->type->itemsize;
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
    a->type = &types[take(s) % TYPES];
    take_shape(s, a);
    a->data = data;
    for (i = 0; i < a->bytes; ++i) {
        data[i] = (uint8_t)(s->bytes > 0 ? s->begin[i % s->bytes] + i / 7 : i);
    }
}

/* ---- writing ---- */

static spdl_result write_array(npz_writer *writer, const array *a) {
    spdl_error error;
    spdl_result result;
    memset(&error, 0, sizeof error);
    result = npz_writer_add(writer, a->name, a->type->descr, a->ndim, a->shape, a->data, &error);
    FUZZ_CHECK((result == SPDL_OK) == (error.text[0] == '\0'));
    FUZZ_CHECK(result == SPDL_OK || result == SPDL_E_INVALID);
    return result;
}

static bool has_twice(const array *arrays, size_t count) {
    size_t i, k;
    for (i = 0; i < count; ++i)
        for (k = 0; k < i; ++k)
            if (strcmp(arrays[i].name, arrays[k].name) == 0) return true;
    return false;
}

/* The arrays that are in the file, 0 when the writer refused one or wants none. */
static size_t write_file(const char *path, source *s, array *arrays, bool npy) {
    static uint8_t data[ARRAYS][MOST_BYTES];
    const size_t wanted = npy ? 1 : take(s) % (ARRAYS + 1);
    npz_writer *writer = NULL;
    spdl_result result = npz_writer_open(&writer, path, NULL);
    size_t count;
    FUZZ_CHECK(result == SPDL_OK);
    for (count = 0; count < wanted && result == SPDL_OK; ++count) {
        take_array(s, &arrays[count], data[count]);
        result = write_array(writer, &arrays[count]);
    }
    FUZZ_CHECK(access(path, F_OK) != 0);
    if (result == SPDL_OK) result = npz_writer_finish(writer, NULL);
    FUZZ_CHECK((result != SPDL_OK) == has_twice(arrays, count) || count < wanted ||
               result == SPDL_E_INVALID);
    npz_writer_close(writer);
    FUZZ_CHECK((access(path, F_OK) == 0) == (result == SPDL_OK));
    return result == SPDL_OK ? count : 0;
}

/* ---- reading it again ---- */

static bool is_native(const type *t) {
    return t->descr[0] == '[' || t->descr[0] == '|' || t->descr[0] == SPDL__NPY_HOST_ORDER;
}

static void check_info(const spdl_npy_info *info, const array *wanted) {
    const type *t = wanted->type;
    FUZZ_CHECK(info->kind == t->kind && info->itemsize == t->itemsize && info->stored);
    FUZZ_CHECK(info->ndim == wanted->ndim && info->bytes == wanted->bytes);
    FUZZ_CHECK(memcmp(info->shape, wanted->shape, (size_t)info->ndim * sizeof info->shape[0]) == 0);
    FUZZ_CHECK(strcmp(info->dtype + 1, t->descr + 1) == 0);
    FUZZ_CHECK(info->dtype[0] == (is_native(t) ? t->descr[0] : SPDL__NPY_HOST_ORDER));
}

static void check_array(const spdl_npz *npz, size_t index, const array *a, bool npy) {
    const size_t bytes = (size_t)a->bytes, unit = is_native(a->type) ? 1 : a->type->unit;
    uint8_t *out = fuzz_out(BLOCK_OUT, bytes, true);
    const void *view = NULL;
    bool aligned = false;
    spdl_npy_info info;
    size_t found = 99;
    size_t i;
    FUZZ_CHECK(npy || strcmp(spdl_npz_name(npz, index), a->name) == 0);
    FUZZ_CHECK(npy || (spdl_npz_find(npz, a->name, &found) == SPDL_OK && found == index));
    FUZZ_CHECK(spdl_npz_info(npz, index, &info, NULL) == SPDL_OK);
    check_info(&info, a);
    FUZZ_CHECK(spdl_npz_read(npz, index, out, bytes, NULL) == SPDL_OK);
    for (i = 0; i < bytes; ++i)
        FUZZ_CHECK(out[i] == a->data[i / unit * unit + unit - 1 - i % unit]);
    if (!is_native(a->type)) return;
    FUZZ_CHECK(spdl_npz_view(npz, index, &view, &aligned, NULL) == SPDL_OK);
    FUZZ_CHECK(aligned && (bytes == 0 || memcmp(view, a->data, bytes) == 0));
}

static void check_file(const char *path, const array *arrays, size_t count, bool npy) {
    spdl_npz *npz = NULL;
    size_t i;
    FUZZ_CHECK(spdl_npz_open(&npz, path, NULL) == SPDL_OK);
    FUZZ_CHECK(spdl_npz_count(npz) == count);
    for (i = 0; i < count; ++i) check_array(npz, i, &arrays[i], npy);
    spdl_npz_close(npz);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static array arrays[ARRAYS];
    source s = { data, data, bytes, bytes };
    const unsigned how = take(&s);
    const bool npy = (how & 3) == 3;
    char path[128];
    size_t count;
    make_path(path, sizeof path, npy);
    count = write_file(path, &s, arrays, npy);
    if (count > 0) check_file(path, arrays, count, npy);
    unlink(path);
    return 0;
}
