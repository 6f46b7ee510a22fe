/* .npy and .npz: what NumPy writes is read right, and anything else is refused with a reason. The
   files in tests/data are made by make_fixtures.py there; broken ones are made here, byte by byte.
   All bytes that are opened lie in blocks of exactly their size, so that AddressSanitizer sees a
   read beyond them. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "test.h"

#include "../examples/npz_writer.h"

/* ============================================================================================= */
/* Bytes */

typedef struct bytes {
    uint8_t *at;
    size_t count, room;
} bytes;

static void put(bytes *to, const void *from, size_t count) {
    if (count == 0) return;
    if (to->count + count > to->room) {
        to->room = 2 * (to->count + count);
        to->at = (uint8_t *)realloc(to->at, to->room);
        if (to->at == NULL) abort();
    }
    memcpy(to->at + to->count, from, count);
    to->count += count;
}

/* Appends a little-endian number of 1 to 8 bytes. */
static void put_le(bytes *to, uint64_t value, int count) {
    for (; count > 0; --count, value >>= 8) {
        const uint8_t byte = (uint8_t)value;
        put(to, &byte, 1);
    }
}

static void put_text(bytes *to, const char *text) { put(to, text, strlen(text)); }

static void set_le(bytes *in, size_t at, uint64_t value, int count) {
    for (; count > 0; --count, value >>= 8) in->at[at++] = (uint8_t)value;
}

static void *block(size_t count) {
    void *memory = malloc(count > 0 ? count : 1);
    if (memory == NULL) abort();
    return memory;
}

/* The same bytes in a block without any room behind them. */
static uint8_t *exact(const void *from, size_t count) {
    uint8_t *copy = (uint8_t *)block(count);
    if (count > 0) memcpy(copy, from, count);
    return copy;
}

static const char *fixture_path(const char *name) {
    static char path[512];
    const char *end = strrchr(__FILE__, '/');
    const int length = end != NULL ? (int)(end - __FILE__ + 1) : 0;
    snprintf(path, sizeof path, "%.*sdata/%s", length, __FILE__, name);
    return path;
}

static bytes fixture(const char *name) {
    bytes file = { NULL, 0, 0 };
    char buffer[4096];
    size_t got;
    FILE *in = fopen(fixture_path(name), "rb");
    if (!CHECK(in != NULL)) test_leave();
    while ((got = fread(buffer, 1, sizeof buffer, in)) > 0) put(&file, buffer, got);
    fclose(in);
    return file;
}

/* ============================================================================================= */
/* What arrays hold: as pattern() in make_fixtures.py */

static void noise(uint8_t *to, size_t count) {
    uint32_t state = 12345;
    for (size_t i = 0; i < count; ++i) {
        state = state * 1664525 + 1013904223;
        to[i] = (uint8_t)(state >> 24);
    }
}

static uint8_t *pattern(const char *name, size_t count) {
    uint8_t *to = (uint8_t *)calloc(count + 1, 1);
    size_t period = 0;
    if (to == NULL) abort();
    if (strncmp(name, "far", 3) == 0) period = (size_t)atoi(name + 3);
    if (strncmp(name, "near", 4) == 0) period = (size_t)atoi(name + 4);
    if (strncmp(name, "zeros", 5) == 0) return to;
    if (strncmp(name, "lcg", 3) == 0) period = count;
    if (strncmp(name, "skew", 4) == 0) {
        noise(to, count);
        for (size_t i = 0; i < count; ++i) to[i] = (uint8_t)(((to[i] & 15) * (to[i] >> 4)) >> 4);
    } else if (period > 0) {
        noise(to, period < count ? period : count);
        for (size_t i = period; i < count; ++i) to[i] = to[i - period];
    } else {
        for (size_t i = 0; i < count; ++i) to[i] = (uint8_t)(7 * i + (i >> 8));
    }
    if (strcmp(name, "b1") == 0)
        for (size_t i = 0; i < count; ++i) to[i] &= 1;
    if (strcmp(name, "U3") == 0)
        for (size_t i = 0; i < count; ++i) to[i] = i % 4 == 0 ? to[i] : 0;
    return to;
}

/* ============================================================================================= */
/* Opening and reading */

static spdl_npz *open_bytes(const void *data, size_t count, spdl_error *error) {
    spdl_npz *npz = NULL;
    spdl_npz_desc desc = { 0 };
    desc.error = error;
    spdl_npz_open_memory(&npz, data, count, "a.npz", &desc);
    return npz;
}

static spdl_npz *open_fixture(const char *name) {
    spdl_error error = { 0 };
    spdl_npz *npz = NULL;
    spdl_npz_desc desc = { 0 };
    desc.error = &error;
    if (!CHECK_EQ(spdl_npz_open(&npz, fixture_path(name), &desc), SPDL_OK)) {
        fprintf(stderr, "%s\n", error.text);
        test_leave();
    }
    return npz;
}

static size_t index_of(const spdl_npz *npz, const char *name) {
    size_t index = 0;
    if (!CHECK(spdl_npz_find(npz, name, &index) == SPDL_OK)) fprintf(stderr, "%s\n", name);
    return index;
}

static spdl_npy_info info_of(const spdl_npz *npz, const char *name) {
    spdl_error error = { 0 };
    spdl_npy_info info;
    memset(&info, 0, sizeof info);
    if (!CHECK_EQ(spdl_npz_info(npz, index_of(npz, name), &info, &error), SPDL_OK))
        fprintf(stderr, "%s\n", error.text);
    return info;
}

/* Reads an array to a block of its size; NULL with the error otherwise. */
static uint8_t *read_array(const spdl_npz *npz, size_t index, spdl_npy_info *info,
                           spdl_error *error) {
    uint8_t *data;
    memset(error, 0, sizeof *error);
    if (spdl_npz_info(npz, index, info, error) != SPDL_OK) return NULL;
    data = (uint8_t *)block((size_t)info->bytes);
    if (spdl_npz_read(npz, index, data, (size_t)info->bytes, error) == SPDL_OK) return data;
    free(data);
    return NULL;
}

static bool is_stored(const spdl_npz *npz, size_t index) {
    spdl_npy_info info;
    return spdl_npz_info(npz, index, &info, NULL) == SPDL_OK && info.stored;
}

/* Whether reading reverses the bytes of numbers that have this order in the file. */
static bool is_foreign(const spdl_npy_info *info, char order) {
    return order != SPDL__NPY_HOST_ORDER && info->itemsize > 1 && strchr("SV", info->kind) == NULL;
}

/* The bytes of the pattern as they are read: with native bytes and in C order. */
static void reorder(uint8_t *data, const spdl_npy_info *info, bool foreign, bool fortran) {
    uint8_t *copy = exact(data, (size_t)info->bytes);
    const size_t unit = info->kind == 'U'   ? 4
                        : info->kind == 'c' ? (size_t)info->itemsize / 2
                                            : (size_t)info->itemsize;
    for (uint64_t k = 0; k < info->bytes; ++k) {
        const uint64_t turned = k / unit * unit + unit - 1 - k % unit, from = foreign ? turned : k;
        uint64_t element = k / info->itemsize, at = fortran ? 0 : element * info->itemsize;
        for (int i = info->ndim - 1; fortran && i >= 0; --i, element /= info->shape[i + 1]) {
            uint64_t stride = info->itemsize;
            for (int d = 0; d < i; ++d) stride *= info->shape[d];
            at += element % info->shape[i] * stride;
        }
        data[k] = copy[at + from % info->itemsize];
    }
    free(copy);
}

/* All arrays of a file of this byte order hold what their names say, by read and by view. */
static void check_patterns_from(const spdl_npz *npz, char order) {
    for (size_t i = 0; i < spdl_npz_count(npz); ++i) {
        const char *name = spdl_npz_name(npz, i);
        const bool fortran = strncmp(name, "fortran", 7) == 0;
        const void *view = NULL;
        bool aligned = false, foreign;
        spdl_npy_info info;
        spdl_error error;
        uint8_t *data = read_array(npz, i, &info, &error), *expected;
        if (!CHECK(data != NULL)) {
            fprintf(stderr, "%s\n", error.text);
            continue;
        }
        expected = pattern(name, (size_t)info.bytes);
        foreign = info.bytes > 0 && is_foreign(&info, order);
        reorder(expected, &info, foreign, fortran);
        if (!CHECK(memcmp(data, expected, (size_t)info.bytes) == 0)) fprintf(stderr, "%s\n", name);
        if (!is_stored(npz, i) || foreign || fortran) {
            CHECK_EQ(spdl_npz_view(npz, i, &view, &aligned, &error), SPDL_E_UNSUPPORTED);
        } else if (CHECK_EQ(spdl_npz_view(npz, i, &view, &aligned, &error), SPDL_OK)) {
            CHECK(memcmp(view, expected, (size_t)info.bytes) == 0);
            CHECK_EQ(aligned, (uintptr_t)view % 64 == 0);
        }
        free(expected);
        free(data);
    }
}

static void check_patterns(const spdl_npz *npz) { check_patterns_from(npz, '<'); }

/* Opening these bytes fails with this result and a text that contains `part`. */
static void refuses(const void *data, size_t count, spdl_result result, const char *part) {
    spdl_error error = { 0 };
    uint8_t *copy = exact(data, count);
    spdl_npz *npz = open_bytes(copy, count, &error);
    if (!CHECK(npz == NULL && error.result == result && strstr(error.text, part) != NULL))
        fprintf(stderr, "expected \"%s\" (%d), got \"%s\" (%d)\n", part, (int)result, error.text,
                (int)error.result);
    CHECK(strncmp(error.text, "a.npz: ", 7) == 0 && error.stage == -1);
    spdl_npz_close(npz);
    free(copy);
}

/* The archive opens, but the array fails so when it is described or read. */
static void refuses_array(const void *data, size_t count, const char *name, spdl_result result,
                          const char *part) {
    spdl_error error = { 0 };
    spdl_npy_info info;
    uint8_t *copy = exact(data, count), *array;
    spdl_npz *npz = open_bytes(copy, count, &error);
    if (!CHECK(npz != NULL)) {
        fprintf(stderr, "expected \"%s\", got \"%s\"\n", part, error.text);
        free(copy);
        return;
    }
    array = read_array(npz, index_of(npz, name), &info, &error);
    if (!CHECK(array == NULL && error.result == result && strstr(error.text, part) != NULL))
        fprintf(stderr, "expected \"%s\" (%d), got \"%s\" (%d)\n", part, (int)result,
                array ? "no error" : error.text, (int)error.result);
    CHECK(array != NULL || strncmp(error.text, "a.npz: member '", 15) == 0);
    free(array);
    spdl_npz_close(npz);
    free(copy);
}

/* ============================================================================================= */
/* Making .npy */

static bytes make_npy(int version, const char *header, const void *data, size_t count) {
    bytes npy = { NULL, 0, 0 };
    put(&npy, "\x93NUMPY", 6);
    put_le(&npy, (uint64_t)version, 1);
    put_le(&npy, 0, 1);
    put_le(&npy, strlen(header), version == 1 ? 2 : 4);
    put_text(&npy, header);
    put(&npy, data, count);
    return npy;
}

static spdl_result npy_result(const char *header, size_t data_bytes, spdl_npy_info *info,
                              spdl_error *error) {
    uint8_t *zeros = (uint8_t *)calloc(data_bytes + 1, 1);
    bytes npy = make_npy(1, header, zeros, data_bytes);
    uint8_t *copy = exact(npy.at, npy.count);
    spdl_npz *npz = open_bytes(copy, npy.count, error);
    const spdl_result result = npz ? spdl_npz_info(npz, 0, info, error) : SPDL_E_INVALID;
    spdl_npz_close(npz);
    free(copy);
    free(npy.at);
    free(zeros);
    return result;
}

static void header_refused(const char *header, spdl_result result, const char *part) {
    spdl_npy_info info;
    spdl_error error = { 0 };
    const spdl_result got = npy_result(header, 64, &info, &error);
    if (!CHECK(got == result && strstr(error.text, part) != NULL))
        fprintf(stderr, "%s\n  expected \"%s\", got \"%s\"\n", header, part,
                got == SPDL_OK ? "no error" : error.text);
}

static void header_read(const char *header, size_t data_bytes, char kind, uint64_t itemsize,
                        int ndim, uint64_t count) {
    spdl_npy_info info;
    spdl_error error = { 0 };
    const spdl_result got = npy_result(header, data_bytes, &info, &error);
    if (!CHECK(got == SPDL_OK && info.kind == kind && info.itemsize == itemsize &&
               info.ndim == ndim && info.count == count && info.bytes == count * itemsize))
        fprintf(stderr, "%s\n  %s\n", header, error.text);
}

/* ============================================================================================= */
/* Making .npz */

enum { ZIP_PARTS = 8 };

typedef struct zip {
    bytes file, directory;
    size_t local_at[ZIP_PARTS], data_at[ZIP_PARTS]; /* in file */
    size_t entry_at[ZIP_PARTS], end_at;             /* in file, once it is finished */
    unsigned count;
} zip;

typedef struct zip_part {
    const char *name;
    unsigned method, flags;
    uint64_t usize; /* 0: the bytes of the payload */
    uint32_t crc;   /* 0: that of the payload */
    const char *extra; /* "L8": a local extra field of 8 bytes, "D8": in the directory */
} zip_part;

static uint32_t crc_of(const void *data, size_t count) {
    static spdl__crc crc; /* by one thread only */
    if (crc.table[0][1] == 0) spdl__crc_init(&crc);
    return spdl__crc_add(&crc, 0, (const uint8_t *)data, count);
}

static unsigned extra_bytes(const char *extra, char where) {
    return extra && extra[0] == where ? (unsigned)atoi(extra + 1) : 0;
}

static void put_extra(bytes *to, const char *extra, char where) {
    const unsigned count = extra_bytes(extra, where);
    for (unsigned i = 0; i < count; ++i) put_le(to, i == 0 ? 0x35 : i == 2 ? count - 4 : 0, 1);
}

static void zip_add(zip *z, const zip_part *part, const bytes *payload) {
    const uint64_t usize = part->usize ? part->usize : payload->count;
    const uint32_t crc = part->crc ? part->crc : crc_of(payload->at, payload->count);
    bytes common = { NULL, 0, 0 };
    put_le(&common, 20, 2);
    put_le(&common, part->flags, 2);
    put_le(&common, part->method, 2);
    put_le(&common, 0x00210000, 4);
    put_le(&common, crc, 4);
    put_le(&common, payload->count, 4);
    put_le(&common, usize, 4);
    put_le(&common, strlen(part->name), 2);
    z->local_at[z->count % ZIP_PARTS] = z->file.count;
    z->entry_at[z->count % ZIP_PARTS] = z->directory.count;
    put_text(&z->directory, "PK\1\2");
    put_le(&z->directory, 20, 2);
    put(&z->directory, common.at, common.count);
    put_le(&z->directory, extra_bytes(part->extra, 'D'), 2);
    put_le(&z->directory, 0, 2 + 2 + 2);
    put_le(&z->directory, 0, 4);
    put_le(&z->directory, z->file.count, 4);
    put_text(&z->directory, part->name);
    put_extra(&z->directory, part->extra, 'D');
    put_text(&z->file, "PK\3\4");
    put(&z->file, common.at, common.count);
    put_le(&z->file, extra_bytes(part->extra, 'L'), 2);
    put_text(&z->file, part->name);
    put_extra(&z->file, part->extra, 'L');
    z->data_at[z->count % ZIP_PARTS] = z->file.count;
    put(&z->file, payload->at, payload->count);
    z->count++;
    free(common.at);
}

static void zip_end(zip *z, size_t comment) {
    const size_t start = z->file.count;
    for (unsigned i = 0; i < z->count && i < ZIP_PARTS; ++i) z->entry_at[i] += start;
    put(&z->file, z->directory.at, z->directory.count);
    z->end_at = z->file.count;
    put(&z->file, "PK\5\6\0\0\0", 8);
    put_le(&z->file, z->count, 2);
    put_le(&z->file, z->count, 2);
    put_le(&z->file, z->directory.count, 4);
    put_le(&z->file, start, 4);
    put_le(&z->file, comment, 2);
    for (size_t i = 0; i < comment; ++i) put_le(&z->file, '#', 1);
}

static void zip_free(zip *z) {
    free(z->file.at);
    free(z->directory.at);
    memset(z, 0, sizeof *z);
}

static bytes small_array(unsigned first) {
    const uint8_t data[4] = { (uint8_t)first, 2, 3, 4 };
    return make_npy(1, "{'descr': '|u1', 'fortran_order': False, 'shape': (4,), }\n", data, 4);
}

/* A deflate stream of one stored block. */
static bytes deflate_stored(const bytes *data) {
    bytes out = { NULL, 0, 0 };
    put_le(&out, 1, 1);
    put_le(&out, data->count, 2);
    put_le(&out, data->count ^ 0xffff, 2);
    put(&out, data->at, data->count);
    return out;
}

/* An archive of "one", stored, and "two", deflated, which hold 1 2 3 4 and 2 2 3 4. */
static zip two_arrays(size_t comment) {
    zip z;
    const zip_part one = { "one.npy", 0, 0, 0, 0, NULL };
    zip_part two = { "two.npy", 8, 0, 0, 0, NULL };
    bytes first = small_array(1), second = small_array(2), packed = deflate_stored(&second);
    memset(&z, 0, sizeof z);
    two.usize = second.count;
    two.crc = crc_of(second.at, second.count);
    zip_add(&z, &one, &first);
    zip_add(&z, &two, &packed);
    zip_end(&z, comment);
    free(first.at);
    free(second.at);
    free(packed.at);
    return z;
}

static void check_array(const spdl_npz *npz, const char *name, unsigned first) {
    spdl_npy_info info;
    spdl_error error;
    uint8_t *data = read_array(npz, index_of(npz, name), &info, &error);
    if (!CHECK(data != NULL && info.bytes == 4 && data[0] == first && data[3] == 4))
        fprintf(stderr, "%s: %s\n", name, error.text);
    free(data);
}

static void check_two_arrays(const void *data, size_t count) {
    spdl_error error = { 0 };
    uint8_t *copy = exact(data, count);
    spdl_npz *npz = open_bytes(copy, count, &error);
    if (CHECK(npz != NULL)) {
        CHECK_EQ(spdl_npz_count(npz), 2);
        check_array(npz, "one", 1);
        check_array(npz, "two", 2);
    } else {
        fprintf(stderr, "%s\n", error.text);
    }
    spdl_npz_close(npz);
    free(copy);
}

/* ============================================================================================= */
/* Files that NumPy wrote */

static const char *const dtype_names[] = { "b1", "i1", "i2", "i4",  "i8", "u1", "u2",
                                           "u4", "u8", "f2", "f4",  "f8", "f16", "c8",
                                           "c16", "c32", "S5", "U3", "V3", "M8", "m8" };
enum { DTYPES = sizeof dtype_names / sizeof dtype_names[0] };

static void check_dtypes(const char *file, bool stored) {
    spdl_npz *npz = open_fixture(file);
    CHECK_EQ(spdl_npz_count(npz), DTYPES);
    for (size_t i = 0; i < DTYPES; ++i) {
        const char *name = dtype_names[i];
        const spdl_npy_info info = info_of(npz, name);
        const uint64_t number = (uint64_t)atoi(name + 1);
        const bool ordered = number > 1 && strchr("SV", name[0]) == NULL;
        CHECK_STR(spdl_npz_name(npz, i), name);
        CHECK_EQ(is_stored(npz, i), stored);
        CHECK_EQ(info.kind, name[0]);
        CHECK_EQ(info.itemsize, name[0] == 'U' ? 4 * number : number);
        CHECK_EQ(info.dtype[0], ordered ? SPDL__NPY_HOST_ORDER : '|');
        CHECK(strncmp(info.dtype + 1, name, strlen(name)) == 0);
        CHECK(info.ndim == 2 && info.shape[0] == 5 && info.shape[1] == 3 && info.count == 15);
    }
    CHECK_STR(info_of(npz, "m8").dtype + 1, "m8[25s]");
    check_patterns(npz);
    spdl_npz_close(npz);
}

static void dtypes_stored(void) { check_dtypes("dtypes_stored.npz", true); }
static void dtypes_deflated(void) { check_dtypes("dtypes_deflated.npz", false); }

static void bytes_are_those_of_the_machine(void) {
    spdl_npz *npz = open_fixture("big_endian.npz");
    for (size_t i = 0; i < spdl_npz_count(npz); ++i)
        CHECK_EQ(info_of(npz, spdl_npz_name(npz, i)).dtype[0], SPDL__NPY_HOST_ORDER);
    check_patterns_from(npz, '>');
    spdl_npz_close(npz);
}

static void check_shapes(const char *file) {
    spdl_npz *npz = open_fixture(file);
    spdl_npy_info info = info_of(npz, "zero_d");
    CHECK(info.ndim == 0 && info.count == 1 && info.bytes == 8);
    info = info_of(npz, "empty");
    CHECK(info.ndim == 1 && info.count == 0 && info.bytes == 0);
    info = info_of(npz, "empty_middle");
    CHECK(info.ndim == 3 && info.shape[0] == 3 && info.shape[1] == 0 && info.shape[2] == 2);
    CHECK_EQ(info.count, 0);
    info = info_of(npz, "dims24");
    CHECK(info.ndim == 24 && info.shape[0] == 2 && info.shape[22] == 1 && info.shape[23] == 3);
    info = info_of(npz, "most_dims");
    CHECK(info.ndim == 64 && info.shape[0] == 2 && info.shape[63] == 3 && info.count == 6);
    info = info_of(npz, "fortran");
    CHECK(info.shape[0] == 3 && info.shape[1] == 4);
    check_patterns(npz);
    spdl_npz_close(npz);
}

static void shapes_stored(void) { check_shapes("shapes_stored.npz"); }
static void shapes_deflated(void) { check_shapes("shapes_deflated.npz"); }

/* numpy.arange(12) as a table of 3 rows and 4 columns, whatever the orders in the file. */
static void check_counting(const char *file, bool viewed) {
    spdl_npz *npz = open_fixture(file);
    spdl_npy_info info = info_of(npz, "arr_0");
    const void *view = NULL;
    bool aligned = false;
    int32_t data[12], row[4];
    CHECK_EQ(spdl_npz_count(npz), 1);
    CHECK_STR(spdl_npz_name(npz, 0), "arr_0");
    CHECK_EQ(index_of(npz, "arr_0.npy"), 0);
    CHECK(info.kind == 'i' && info.itemsize == 4 && info.stored);
    CHECK(info.ndim == 2 && info.shape[0] == 3 && info.shape[1] == 4);
    CHECK_STR(info.dtype + 1, "i4");
    CHECK_EQ(spdl_npz_read(npz, 0, data, sizeof data, NULL), SPDL_OK);
    for (int i = 0; i < 12; ++i) CHECK_EQ(data[i], i);
    CHECK_EQ(spdl_npz_view(npz, 0, &view, &aligned, NULL), viewed ? SPDL_OK : SPDL_E_UNSUPPORTED);
    CHECK_EQ(aligned, viewed); /* NumPy aligns .npy, and the file was read to such memory */
    CHECK(viewed ? view != NULL && memcmp(view, data, sizeof data) == 0 : view == NULL);
    CHECK_EQ(spdl_npz_read_rows(npz, 0, 1, 1, row, sizeof row, NULL),
             strcmp(file, "fortran.npy") == 0 ? SPDL_E_UNSUPPORTED : SPDL_OK);
    if (strcmp(file, "fortran.npy") != 0) CHECK(memcmp(row, data + 4, sizeof row) == 0);
    spdl_npz_close(npz);
}

static void npy_versions(void) {
    check_counting("version1.npy", SPDL__NPY_HOST_ORDER == '<');
    check_counting("version2.npy", SPDL__NPY_HOST_ORDER == '<');
    check_counting("version3.npy", SPDL__NPY_HOST_ORDER == '<');
}

static void npy_orders(void) {
    check_counting("fortran.npy", false);
    check_counting("big_endian.npy", SPDL__NPY_HOST_ORDER == '>');
}

static void npy_unicode_fields(void) {
    spdl_npz *npz = open_fixture("unicode_fields.npy");
    const spdl_npy_info info = info_of(npz, "arr_0");
    CHECK(info.kind == 'V' && info.itemsize == 6 && info.count == 4);
    CHECK_STR(info.dtype, "[('gr\xc3\xb6\xc3\x9f" "e', '<f4'), ('\xe6\x95\xb0', '<i2')]");
    spdl_npz_close(npz);
}

/* The text of a type is cut between characters of UTF-8, wherever its end would be. */
static void npy_long_types(void) {
    for (int ascii = 0; ascii < 3; ++ascii) {
        char header[600];
        spdl_error error = { 0 };
        spdl_npy_info info;
        size_t length = (size_t)snprintf(header, sizeof header, "{'descr': [('%.*s", ascii, "xx");
        for (int i = 0; i < 200; ++i)
            length += (size_t)snprintf(header + length, sizeof header - length, "\xc3\xa9");
        snprintf(header + length, sizeof header - length,
                 "', '<f4')], 'fortran_order': False, 'shape': (2,)}");
        CHECK_EQ(npy_result(header, 64, &info, &error), SPDL_OK);
        CHECK_EQ(strlen(info.dtype), ascii == 1 ? 254 : 255);
        CHECK_EQ(info.dtype[strlen(info.dtype) - 1], '\xa9');
    }
}

static void check_structured(const char *file) {
    static const struct {
        const char *name;
        uint64_t itemsize;
    } rows[] = { { "simple", 11 }, { "nested", 158 }, { "aligned", 24 },
                 { "titles", 8 },  { "mixed", 20 },   { "many", 360 } };
    spdl_npz *npz = open_fixture(file);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) {
        const spdl_npy_info info = info_of(npz, rows[i].name);
        CHECK(info.kind == 'V' && info.dtype[0] == '[');
        CHECK_EQ(info.itemsize, rows[i].itemsize);
        CHECK_EQ(info.bytes, 3 * rows[i].itemsize);
    }
    CHECK_STR(info_of(npz, "simple").dtype, "[('x', '<f4'), ('y', '<f4'), ('label', '|S3')]");
    CHECK_EQ(strlen(info_of(npz, "many").dtype), 255); /* cut */
    check_patterns(npz);
    spdl_npz_close(npz);
}

static void structured(void) {
    check_structured("structured_stored.npz");
    check_structured("structured_deflated.npz");
}

static void objects_are_refused_by_name(void) {
    bytes file = fixture("object.npy");
    refuses_array(file.at, file.count, "arr_0", SPDL_E_UNSUPPORTED,
                  "member 'arr_0': object arrays (dtype '|O') hold Python pickles");
    free(file.at);
    file = fixture("object.npz");
    refuses_array(file.at, file.count, "object", SPDL_E_UNSUPPORTED, "object arrays (dtype '|O')");
    free(file.at);
    spdl_npz *npz = open_fixture("object.npz");
    CHECK_EQ(info_of(npz, "good").count, 2); /* the others are not its hostages */
    spdl_npz_close(npz);
    header_refused("{'descr': [('a', '<f4'), ('b', [('c', 'O')])], 'fortran_order': False, "
                   "'shape': (1,)}", SPDL_E_UNSUPPORTED, "object arrays");
    header_refused("{'descr': 'O8', 'fortran_order': False, 'shape': (1,)}", SPDL_E_UNSUPPORTED,
                   "object arrays");
}

static void check_value(const spdl_npz *npz, const char *name, const char *told, int32_t value) {
    spdl_npy_info info;
    spdl_error error;
    const size_t index = index_of(npz, name);
    uint8_t *data = read_array(npz, index, &info, &error);
    CHECK_STR(spdl_npz_name(npz, index), told);
    if (CHECK(data != NULL && info.bytes == 4)) CHECK(memcmp(data, &value, sizeof value) == 0);
    free(data);
}

static void names(void) {
    spdl_npz *npz = open_fixture("names.npz");
    size_t index = 0;
    spdl_npy_info info;
    spdl_error error = { 0 };
    CHECK_EQ(spdl_npz_count(npz), 9);
    check_value(npz, "x.npy", "x.npy", 1); /* in full, as there is another x */
    check_value(npz, "x", "x", 2);
    check_value(npz, "y.npy", "y.npy", 3); /* one suffix is left out */
    check_value(npz, "y.npy.npy", "y.npy", 3);
    check_value(npz, "dir/z", "dir/z", 4);
    check_value(npz, "\xc3\xa4", "\xc3\xa4", 5);
    check_value(npz, "", "", 6);
    CHECK_EQ(spdl_npz_find(npz, "y", &index), SPDL_E_NOT_FOUND);
    CHECK_EQ(spdl_npz_find(npz, "z", &index), SPDL_E_NOT_FOUND);
    CHECK(spdl_npz_name(npz, 9) == NULL && spdl_npz_name(npz, SIZE_MAX) == NULL);
    CHECK_EQ(spdl_npz_info(npz, 9, &info, &error), SPDL_E_NOT_FOUND);
    CHECK(strstr(error.text, "no array 9; there are 9") != NULL);
    CHECK_EQ(spdl_npz_info(npz, index_of(npz, "readme.txt"), &info, &error), SPDL_E_FORMAT);
    CHECK(strstr(error.text, "member 'readme.txt': no .npy array") != NULL);
    CHECK_EQ(spdl_npz_info(npz, index_of(npz, "nothing"), &info, &error), SPDL_E_FORMAT);
    CHECK_EQ(spdl_npz_info(npz, index_of(npz, "folder/"), &info, &error), SPDL_E_FORMAT);
    CHECK(!is_stored(npz, 9));
    spdl_npz_close(npz);
}

static void data_descriptors(void) {
    spdl_npz *npz = open_fixture("descriptors.npz");
    CHECK_EQ(spdl_npz_count(npz), 2);
    check_patterns(npz);
    spdl_npz_close(npz);
}

static void no_members(void) {
    spdl_npz *npz = open_fixture("none.npz");
    size_t index;
    CHECK_EQ(spdl_npz_count(npz), 0);
    CHECK_EQ(spdl_npz_find(npz, "x", &index), SPDL_E_NOT_FOUND);
    spdl_npz_close(npz);
}

static void other_methods_are_refused_by_name(void) {
    bytes file = fixture("methods.npz");
    spdl_npz *npz = open_fixture("methods.npz");
    refuses_array(file.at, file.count, "bzip2", SPDL_E_UNSUPPORTED, "method 12 (bzip2)");
    refuses_array(file.at, file.count, "lzma", SPDL_E_UNSUPPORTED, "method 14 (LZMA)");
    CHECK_EQ(info_of(npz, "first").count, 10);
    spdl_npz_close(npz);
    free(file.at);
}

/* ============================================================================================= */
/* Inflate */

static void streams(void) {
    spdl_npz *npz = open_fixture("streams.npz");
    CHECK(spdl_npz_count(npz) > 25);
    check_patterns(npz);
    spdl_npz_close(npz);
}

static const spdl__inflate_tables *fixed_codes(void) {
    static spdl__inflate_tables made; /* by one thread only */
    if (made.litlen_bits == 0) spdl__inflate_build_fixed(&made);
    return &made;
}

/* Any stops on the way and any change of memory give the same bytes. */
static void inflate_in_pieces(void) {
    static const size_t steps[] = { 1, 2, 7, 258, 259, 300, 1000, 4093, 40000 };
    bytes file = fixture("streams.npz");
    spdl_npz *npz = open_bytes(file.at, file.count, NULL);
    REQUIRE(npz != NULL);
    for (size_t i = 0; i < spdl_npz_count(npz); ++i) {
        const spdl__zip_member *member = &npz->zip.members[i];
        const size_t usize = (size_t)member->usize;
        const uint8_t *payload;
        spdl__npz_reader *r = (spdl__npz_reader *)block(sizeof *r);
        spdl__npz_init_reader(r, npz, NULL);
        REQUIRE(spdl__npz_locate(r, i));
        payload = npz->zip.data + r->payload;
        CHECK_EQ(spdl__npz_end(r), SPDL_OK);
        free(r);
        for (size_t k = 0; k < sizeof steps / sizeof steps[0]; ++k) {
            const size_t head = steps[k] < usize ? steps[k] : usize;
            spdl__inflate *s = (spdl__inflate *)block(sizeof *s);
            uint8_t *out = (uint8_t *)block(usize), *rest = (uint8_t *)block(usize - head);
            spdl__inflate_init(s, fixed_codes(), payload, (size_t)member->csize, out);
            spdl__inflate_run(s, out + head);
            CHECK(s->out == out + head);
            s->before = out; /* the rest goes elsewhere, and looks back to the head */
            s->before_bytes = head;
            s->base = s->out = rest;
            for (size_t at = 0; at < usize - head; at += steps[k]) {
                const size_t left = usize - head - at;
                spdl__inflate_run(s, s->out + (left < steps[k] ? left : steps[k]));
            }
            CHECK(spdl__inflate_run(s, s->out) == SPDL__INFLATE_DONE);
            CHECK(s->out == rest + (usize - head) && s->in == s->in_end);
            memcpy(out + head, rest, usize - head);
            CHECK_EQ(crc_of(out, usize), member->crc);
            free(rest);
            free(out);
            free(s);
        }
    }
    spdl_npz_close(npz);
    free(file.at);
}

/* Deflate streams written out bit by bit: "110" are three bits in the order of the stream, "=5:3"
   is the number 3 in five bits, lowest first. Blanks mean nothing. */
static bytes bits(const char *text) {
    bytes out = { NULL, 0, 0 };
    unsigned held = 0, count = 0;
    while (*text != 0) {
        unsigned value = 0, width = 0;
        if (*text == '=') {
            width = (unsigned)strtoul(text + 1, (char **)(uintptr_t)&text, 10);
            value = (unsigned)strtoul(text + 1, (char **)(uintptr_t)&text, 10);
        } else if (*text == '0' || *text == '1') {
            width = 1;
            value = (unsigned)(*text++ - '0');
        } else {
            text++;
        }
        for (; width > 0; --width, value >>= 1) {
            held |= (value & 1) << count++;
            if (count < 8) continue;
            put_le(&out, held, 1);
            held = count = 0;
        }
    }
    if (count > 0) put_le(&out, held, 1);
    return out;
}

/* What inflating a stream yields, in memory of exactly `room`. */
static spdl__inflate_mode inflate_bits(const char *text, size_t room, size_t *made,
                                       const char **reason) {
    bytes stream = bits(text);
    uint8_t *in = exact(stream.at, stream.count), *out = (uint8_t *)block(room);
    spdl__inflate *s = (spdl__inflate *)block(sizeof *s);
    spdl__inflate_mode mode;
    spdl__inflate_init(s, fixed_codes(), in, stream.count, out);
    mode = spdl__inflate_run(s, out + room);
    *made = (size_t)(s->out - out);
    *reason = s->reason;
    free(s);
    free(out);
    free(in);
    free(stream.at);
    return mode;
}

static void stream_refused(const char *text, const char *part) {
    size_t made;
    const char *reason = NULL;
    const spdl__inflate_mode mode = inflate_bits(text, 1000, &made, &reason);
    if (!CHECK(mode == SPDL__INFLATE_FAILED && reason != NULL && strstr(reason, part) != NULL))
        fprintf(stderr, "expected \"%s\", got \"%s\"\n", part, reason ? reason : "no error");
}

static void stream_read(const char *text, size_t bytes_made) {
    size_t made;
    const char *reason = NULL;
    CHECK_EQ(inflate_bits(text, bytes_made, &made, &reason), SPDL__INFLATE_DONE);
    CHECK_EQ(made, bytes_made);
    if (reason != NULL) fprintf(stderr, "%s: %s\n", text, reason);
    if (bytes_made > 0) /* one byte less: it stops there, and says so */
        CHECK_EQ(inflate_bits(text, bytes_made - 1, &made, &reason), SPDL__INFLATE_FULL);
}

/* A dynamic block: 257 + a literal codes, 1 + b distance codes, the lengths of the code of code
   lengths in their order: 16 17 18 0 8 7 9 6 10 5 11 4 12 3 13 2 14 1 15. */
#define DYNAMIC "1 =2:2 "
/* Lengths: 18 and 1 with one bit each ("1" is 18, "0" is 1). */
#define LENGTHS_1_18 "=4:14 =3:0 =3:0 =3:1 =3:0 =3:0 =3:0 =3:0 =3:0 =3:0 =3:0 =3:0 =3:0 =3:0 " \
                     "=3:0 =3:0 =3:0 =3:0 =3:1 "

static void inflate_accepts(void) {
    stream_read("1 =2:1 0000000", 0);                                   /* fixed, empty */
    stream_read("1 =2:1 00110000 0000000", 1);                          /* a zero */
    stream_read("1 =2:1 00110000 0000001 00000 0000000", 4);            /* length 3, distance 1 */
    stream_read("1 =2:1 00110000 11000101 00000 0000000", 259);         /* length 258 */
    stream_read("0 =2:1 0000000 0 =2:0 000 =16:0 =16:65535 1 =2:1 0000000", 0);
    stream_read("1 =2:0 =5:0 =16:2 =16:65533 =8:7 =8:8", 2);            /* stored */
    /* 256 alone, with one bit, and no distance code: zlib takes it, so do we */
    stream_read(DYNAMIC "=5:0 =5:10 " LENGTHS_1_18 "1 =7:127 1 =7:107 0 1 =7:0 0", 0);
}

static void inflate_refuses(void) {
    stream_refused("1 =2:3 =5:0", "no known kind");
    stream_refused("1 =2:0 =5:0 =16:2 =16:2 =16:0", "two lengths");
    stream_refused("1 =2:0 =5:0 =16:2 =16:65533 =8:7", "cut off");
    stream_refused("1 =2:0 =5:0 =16:2", "cut off");
    stream_refused("1 =2:1", "cut off");
    stream_refused("0 =2:1 0000000", "cut off"); /* no last block */
    stream_refused("", "cut off");
    stream_refused("1 =2:1 0000001 00000 0000000", "reaches back"); /* a match with nothing there */
    stream_refused("1 =2:1 00110000 0000001 00001 0000000", "reaches back"); /* distance 2 of 1 */
    stream_refused("1 =2:1 00110000 11000110 00000 0000000", "not in use");  /* length 286 */
    stream_refused("1 =2:1 00110000 11000111 00000 0000000", "not in use");  /* length 287 */
    stream_refused("1 =2:1 00110000 0000001 11110 0000000", "not in use");   /* distance 30 */
    stream_refused("1 =2:1 00110000 0000001 11111 0000000", "not in use");   /* distance 31 */
    stream_refused(DYNAMIC "=5:30 =5:0 =4:0", "too many");
    stream_refused(DYNAMIC "=5:29 =5:30 =4:0", "too many");
    stream_refused(DYNAMIC "=5:0 =5:0 =4:0 =12:0", "code lengths is no code");      /* empty */
    stream_refused(DYNAMIC "=5:0 =5:0 =4:0 =3:1 =9:0", "code lengths is no code");  /* incomplete */
    stream_refused(DYNAMIC "=5:0 =5:0 =4:0 =3:1 =3:1 =3:1 =3:0", "code lengths is no code");
    stream_refused(DYNAMIC "=5:0 =5:0 =4:0 =3:1 =3:1 =6:0 0 =2:0", "run of code lengths"); /* 16 */
    stream_refused(DYNAMIC "=5:0 =5:0 " LENGTHS_1_18 "1 =7:127 1 =7:127", "run of code lengths");
    stream_refused(DYNAMIC "=5:0 =5:0 " LENGTHS_1_18 "1 =7:127 1 =7:109", "no code for its end");
    stream_refused(DYNAMIC "=5:0 =5:0 " LENGTHS_1_18 "0 0 0 1 =7:127 1 =7:104 0 0",
                   "literal code is no code"); /* four codes of one bit */
    stream_refused(DYNAMIC "=5:0 =5:2 " LENGTHS_1_18 "1 =7:127 1 =7:107 0 0 0 0",
                   "distance code is no code"); /* three of them */
    stream_refused(DYNAMIC "=5:0 =5:10 " LENGTHS_1_18 "1 =7:127 1 =7:107 0 1 =7:0 1", "not in use");
    stream_refused(DYNAMIC "=5:0 =5:0 " LENGTHS_1_18 "1 =7:127", "cut off");
    stream_refused(DYNAMIC "=5:0 =5:0 =4:15 =3:0", "cut off");
    stream_refused(DYNAMIC "=5:0 =5:0 =4:1 =3:1 =3:1 =9:0", "cut off"); /* before 16 */
    stream_refused(DYNAMIC "=5:0 =5:0 " LENGTHS_1_18 "1 =7:127 1", "cut off");
}

/* ============================================================================================= */
/* Headers */

#define HEADER(descr, shape) "{'descr': " descr ", 'fortran_order': False, 'shape': " shape ", }"

static void headers_that_are_fine(void) {
    header_read(HEADER("'<f4'", "(4, 4)"), 64, 'f', 4, 2, 16);
    header_read(HEADER("'<f4'", "(4, 4)") "   \n", 64, 'f', 4, 2, 16);
    header_read("{\"shape\":(16,),\"fortran_order\":True,\"descr\":\"<f4\"}", 64, 'f', 4, 1, 16);
    header_read(" { 'shape' : ( 2 , 8 ) , \n'fortran_order'\t: False,'descr':'=i4',\r\n} ", 64, 'i',
                4, 2, 16);
    header_read(HEADER("'f8'", "()"), 8, 'f', 8, 0, 1);
    header_read(HEADER("'?'", "(3L, 2L)"), 6, 'b', 1, 2, 6);
    header_read(HEADER("'|S7'", "(2,)"), 14, 'S', 7, 1, 2);
    header_read(HEADER("'|a7'", "(2,)"), 14, 'S', 7, 1, 2);
    header_read(HEADER("'<U0'", "(9,)"), 0, 'U', 0, 1, 9);
    header_read(HEADER("'>U0'", "(9,)"), 0, 'U', 0, 1, 9);
    header_read(HEADER("'<f12'", "(2,)"), 24, 'f', 12, 1, 2);
    header_read(HEADER("'<c24'", "(2,)"), 48, 'c', 24, 1, 2);
    header_read(HEADER("'<m8'", "(2,)"), 16, 'm', 8, 1, 2);
    header_read(HEADER("'<M8[25us]'", "(2,)"), 16, 'M', 8, 1, 2);
    header_read(HEADER("'<f4'", "(2, 0, 4000000000)"), 0, 'f', 4, 3, 0);
    header_read(HEADER("[]", "(5,)"), 0, 'V', 0, 1, 5);
    header_read(HEADER("[('a', '<f4')]", "(5,)"), 20, 'V', 4, 1, 5);
    header_read(HEADER("[('a', '<f4',)]", "(5,)"), 20, 'V', 4, 1, 5);
    header_read(HEADER("[('a', '<f4', (2, 3)), ('', '|V3'), ('b', [('c', '<i2'), ('d', 'u1', ()),"
                       "], (2,)),]", "(2,)"), 66, 'V', 33, 1, 2);
    header_read(HEADER("[(('it\\'s', \"a ]\"), '<f4')]", "(5,)"), 20, 'V', 4, 1, 5);
    header_read(HEADER("'<f4'", "(4,)"), 100, 'f', 4, 1, 4); /* more may follow the array */
}

static void headers_that_are_not(void) {
    const spdl_result format = SPDL_E_FORMAT, unsupported = SPDL_E_UNSUPPORTED;
    header_refused("", format, "'{' is missing");
    header_read(HEADER("'<f1'", "(2,)"), 2, 'f', 1, 1, 2); /* float8_e5m2 of ml_dtypes */
    header_refused("{", format, "no string");
    header_refused("{}", format, "is missing");
    header_refused("{'descr'}", format, "':' is missing");
    header_refused("{'descr': '<f4', 'fortran_order': False}", format, "shape is missing");
    header_refused("{'descr': '<f4', 'descr': '<f4'}", format, "second time");
    header_refused("{'descr': '<f4', 'colour': 'red'}", format, "unknown key");
    header_refused("{'descr': '<f4' 'shape': ()}", format, "',' is missing");
    header_refused("{'descr': '<f4", format, "''' is missing");
    header_refused("{'descr': '<f4\\", format, "''' is missing");
    header_refused(HEADER("'<f4'", "()") "x", format, "text after");
    header_refused("{'descr': '<f4', 'fortran_order': 1, 'shape': ()}", format, "neither True");
    header_refused("{'descr': '<f4', 'fortran_order': Fals", format, "neither True");
    header_refused(HEADER("'<f4'", "(-1,)"), format, "negative dimension");
    header_refused(HEADER("'<f4'", "(3)"), format, "no tuple");
    header_refused(HEADER("'<f4'", "[3]"), format, "'(' is missing");
    header_refused(HEADER("'<f4'", "(3 4)"), format, "',' is missing");
    header_refused(HEADER("'<f4'", "(3,,4)"), format, "no number");
    header_refused(HEADER("'<f4'", "(03,)"), format, "no number");
    header_refused(HEADER("'<f4'", "(1.5,)"), format, "missing");
    header_refused(HEADER("'<f4'", "(99999999999999999999999,)"), format, "no number");
    header_refused(HEADER("'<f4'", "(17,)"), format, "the shape needs 68 bytes, but 64 follow");
    header_refused(HEADER("'<f4'", "(1000000000,)"), format, "the shape needs 4000000000 bytes");
    header_refused(HEADER("'<f4'", "(4294967296, 4294967296)"), format, "overflows");
    header_refused(HEADER("'<f8'", "(1152921504606846976,)"), format, "overflows");
    header_refused(HEADER("'<f4'", "(4294967296, 4294967296, 0)"), format, "overflows");
    header_refused(HEADER("'<U0'", "(4294967296, 4294967296)"), format, "overflows");
    header_refused(HEADER("'<f3'", "(1,)"), unsupported, "dtype '<f3' is not known");
    header_refused(HEADER("''", "(1,)"), unsupported, "dtype ''");
    header_refused(HEADER("'<'", "(1,)"), unsupported, "dtype '<'");
    header_refused(HEADER("'<i'", "(1,)"), unsupported, "dtype '<i'");
    header_refused(HEADER("'float32'", "(1,)"), unsupported, "dtype 'float32'");
    header_refused(HEADER("'<i4x'", "(1,)"), unsupported, "dtype '<i4x'");
    header_refused(HEADER("'<M8[]'", "(1,)"), unsupported, "dtype '<M8[]'");
    header_refused(HEADER("'<M8[s'", "(1,)"), unsupported, "dtype '<M8[s'");
    header_refused(HEADER("'<M8[sec'", "(1,)"), unsupported, "dtype '<M8[sec'");
    header_refused(HEADER("'<M8(s)'", "(1,)"), unsupported, "dtype '<M8(s)'");
    header_refused(HEADER("'float32float32float32float32float32float32'", "(1,)"), unsupported,
                   "dtype 'float32float32float32float32float32float' is");
    header_refused(HEADER("'<U9223372036854775807'", "(1,)"), unsupported, "is not known");
    header_refused(HEADER("'|S99999999999999999999'", "(1,)"), unsupported, "is not known");
    header_refused(HEADER("None", "(1,)"), format, "neither a string nor a list");
    header_refused(HEADER("('<f4', {'unit': 'm'})", "(1,)"), format, "neither a string nor a list");
    header_refused(HEADER("[('a', '<f4'", "(1,)"), format, "missing");
    header_refused("{'descr': [('a', '<f4')", format, "']' is missing, at byte 23");
    header_refused(HEADER("[(('a' 't'), '<f4')]", "(1,)"), format, "',' is missing");
    header_refused(HEADER("[(('t', 5), '<f4')]", "(1,)"), format, "no string");
    header_refused(HEADER("[(('t', 'a', '<f4')]", "(1,)"), format, "')' is missing");
    header_refused(HEADER("[('a', '<f4', (2,) x)]", "(1,)"), format, "')' is missing");
    header_refused(HEADER("['a']", "(1,)"), format, "'(' is missing");
    header_refused(HEADER("[('a')]", "(1,)"), format, "',' is missing");
    header_refused(HEADER("[('a', '<f4') ('b', '<f4')]", "(1,)"), format, "']' is missing");
    header_refused(HEADER("[('a', '<f4', 3)]", "(1,)"), format, "'(' is missing");
    header_refused(HEADER("[('a', '<f4', (4294967296, 4294967296))]", "(1,)"), format, "overflows");
    header_refused(HEADER("[('a', '|V9223372036854775807'), ('b', 'u1')]", "(1,)"), format,
                   "overflows");
}

/* Deep nesting and many dimensions end in an error, not in a deep stack. */
/* Types that have no order of bytes may name one. */
static void orders_of_no_meaning(void) {
    static const char *const descr[] = { "S5", "V5", "u1", "b1" };
    for (size_t i = 0; i < 8; ++i) {
        const char order = i % 2 == 0 ? '<' : '>';
        char header[100];
        spdl_error error = { 0 };
        spdl_npy_info info;
        spdl_npz *npz;
        uint8_t *data;
        bytes npy;
        snprintf(header, sizeof header,
                 "{'descr': '%c%s', 'fortran_order': False, 'shape': (2,), }", order, descr[i / 2]);
        npy = make_npy(1, header, "0123456789", 10);
        npz = open_bytes(npy.at, npy.count, &error);
        REQUIRE(npz != NULL);
        data = read_array(npz, 0, &info, &error);
        if (CHECK(data != NULL)) CHECK(memcmp(data, "0123456789", (size_t)info.bytes) == 0);
        else fprintf(stderr, "%s\n", error.text);
        free(data);
        spdl_npz_close(npz);
        free(npy.at);
    }
}

static void headers_without_end(void) {
    bytes text = { NULL, 0, 0 };
    put_text(&text, "{'descr': ");
    for (int i = 0; i < 5000; ++i) put_text(&text, "[('a', ");
    put_le(&text, 0, 1);
    header_refused((const char *)text.at, SPDL_E_LIMIT, "nested more than 16");
    text.count = 0;
    put_text(&text, "{'shape': ");
    for (int i = 0; i < 5000; ++i) put_text(&text, "(");
    put_le(&text, 0, 1);
    header_refused((const char *)text.at, SPDL_E_FORMAT, "no number");
    text.count = 0;
    put_text(&text, "{'shape': (");
    for (int i = 0; i < 65; ++i) put_text(&text, "1,");
    put_le(&text, 0, 1);
    header_refused((const char *)text.at, SPDL_E_LIMIT, "more than 64 dimensions");
    free(text.at);
}

static void npy_frames(void) {
    bytes npy = small_array(1);
    for (size_t count = 6; count < npy.count; ++count)
        refuses_array(npy.at, count, "arr_0", SPDL_E_FORMAT, count < npy.count - 4 ? "no .npy array"
                                                                                  : "shape needs");
    npy.at[6] = 4;
    refuses_array(npy.at, npy.count, "arr_0", SPDL_E_UNSUPPORTED, ".npy version 4.0");
    npy.at[6] = 0;
    refuses_array(npy.at, npy.count, "arr_0", SPDL_E_UNSUPPORTED, ".npy version 0.0");
    npy.at[6] = 1;
    npy.at[7] = 1;
    refuses_array(npy.at, npy.count, "arr_0", SPDL_E_UNSUPPORTED, ".npy version 1.1");
    free(npy.at);
    npy = make_npy(2, HEADER("'|u1'", "(4,)"), "1234", 4);
    set_le(&npy, 8, 65537, 4);
    refuses_array(npy.at, npy.count, "arr_0", SPDL_E_LIMIT,
                  "a header of 65537 bytes; 65536 at most");
    set_le(&npy, 8, 0xffffffff, 4);
    refuses_array(npy.at, npy.count, "arr_0", SPDL_E_LIMIT, "a header of 4294967295 bytes");
    free(npy.at);
    refuses("\x93NUMP", 5, SPDL_E_FORMAT, "neither .npy nor .npz");
    refuses("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n", 63, SPDL_E_FORMAT,
            "a pointer of Git LFS, not the data: git lfs pull");
}

/* Header lengths of 128 to 65535 are read as what they are. */
static void npy_long_headers(void) {
    static const size_t lengths[] = { 118, 127, 128, 182, 255, 256, 4086, 32768, 40000, 65535 };
    char *text = (char *)block(65536);
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; ++i) {
        memset(text, ' ', lengths[i]);
        text[lengths[i]] = 0;
        memcpy(text, HEADER("'|u1'", "(4,)"), strlen(HEADER("'|u1'", "(4,)")));
        header_read(text, 4, 'u', 1, 1, 4);
    }
    free(text);
}

/* ============================================================================================= */
/* Archives */

static void comments_of_any_length(void) {
    static const size_t lengths[] = { 0, 1, 2, 3, 4, 5, 21, 22, 23, 1000, 65534, 65535 };
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; ++i) {
        zip z = two_arrays(lengths[i]);
        check_two_arrays(z.file.at, z.file.count);
        zip_free(&z);
    }
}

/* A member may have a comment, in the directory alone. */
static void comments_of_members(void) {
    static const unsigned lengths[] = { 1, 255, 256, 65535 };
    static const zip_part parts[] = { { "one.npy", 0, 0, 0, 0, NULL },
                                      { "two.npy", 0, 0, 0, 0, NULL } };
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; ++i) {
        bytes array[2] = { small_array(1), small_array(2) };
        zip z;
        memset(&z, 0, sizeof z);
        for (int k = 0; k < 2; ++k) {
            zip_add(&z, &parts[k], &array[k]);
            set_le(&z.directory, z.entry_at[k] + 32, lengths[i], 2);
            for (unsigned n = 0; n < lengths[i]; ++n) put_le(&z.directory, '#', 1);
            free(array[k].at);
        }
        zip_end(&z, 0);
        check_two_arrays(z.file.at, z.file.count);
        zip_free(&z);
    }
}

/* A comment may look like an end record; bytes may follow the end, or lack. */
static void comments_that_mislead(void) {
    zip z = two_arrays(100);
    set_le(&z.file, z.end_at + 40, 0x06054b50, 4);
    check_two_arrays(z.file.at, z.file.count);
    zip_free(&z);
    z = two_arrays(0);
    put_text(&z.file, "something that was appended");
    check_two_arrays(z.file.at, z.file.count);
    zip_free(&z);
    z = two_arrays(0);
    for (int i = 0; i < 70000; ++i) put_le(&z.file, 0, 1);
    refuses(z.file.at, z.file.count, SPDL_E_FORMAT, "no end of a ZIP archive in");
    zip_free(&z);
}

static void bytes_in_front(void) {
    static const size_t lengths[] = { 1, 2, 3, 63, 64, 100000 };
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; ++i) {
        zip z = two_arrays(3);
        bytes file = { NULL, 0, 0 };
        for (size_t k = 0; k < lengths[i]; ++k) put_le(&file, 'x', 1);
        put(&file, z.file.at, z.file.count);
        check_two_arrays(file.at, file.count);
        free(file.at);
        zip_free(&z);
    }
}

static void extra_fields(void) {
    static const char *const extras[] = { "L1", "L3", "L4", "L20", "D1", "D3", "D4", "D20" };
    for (size_t i = 0; i < sizeof extras / sizeof extras[0]; ++i) {
        zip z;
        zip_part part = { "one.npy", 0, 0, 0, 0, NULL };
        bytes one = small_array(1), copy;
        spdl_error error = { 0 };
        spdl_npz *npz;
        memset(&z, 0, sizeof z);
        part.extra = extras[i];
        zip_add(&z, &part, &one);
        zip_end(&z, 0);
        copy.at = exact(z.file.at, z.file.count);
        npz = open_bytes(copy.at, z.file.count, &error);
        if (CHECK(npz != NULL)) check_array(npz, "one", 1);
        spdl_npz_close(npz);
        free(copy.at);
        free(one.at);
        zip_free(&z);
    }
    zip z;
    const zip_part part = { "one.npy", 0, 0, 0, 0, "D20" };
    bytes one = small_array(1);
    memset(&z, 0, sizeof z);
    zip_add(&z, &part, &one);
    zip_end(&z, 0);
    set_le(&z.file, z.entry_at[0] + 46 + 7 + 2, 17, 2);
    refuses(z.file.at, z.file.count, SPDL_E_FORMAT, "member 'one': the extra field");
    free(one.at);
    zip_free(&z);
}

/* Appends the ZIP64 end records and an end record that refers to them. */
static void zip_end64(zip *z, uint64_t prefix) {
    const size_t start = z->file.count;
    size_t at;
    put(&z->file, z->directory.at, z->directory.count);
    at = z->file.count;
    put_text(&z->file, "PK\6\6");
    put_le(&z->file, 44, 8);
    put_le(&z->file, 45, 2);
    put_le(&z->file, 45, 2);
    put_le(&z->file, 0, 8);
    put_le(&z->file, z->count, 8);
    put_le(&z->file, z->count, 8);
    put_le(&z->file, z->directory.count, 8);
    put_le(&z->file, start - prefix, 8);
    put_text(&z->file, "PK\6\7");
    put_le(&z->file, 0, 4);
    put_le(&z->file, at - prefix, 8);
    put_le(&z->file, 1, 4);
    z->end_at = z->file.count;
    put(&z->file, "PK\5\6\0\0\0", 8);
    put_le(&z->file, UINT64_MAX, 8);
    put_le(&z->file, UINT64_MAX, 4);
    put_le(&z->file, 0, 2);
}

/* One member whose sizes and offset, by `which` bits 1 2 4, are in its ZIP64 field. */
static zip zip64_array(unsigned which, size_t prefix) {
    zip z;
    bytes one = small_array(1);
    zip_part part = { "one.npy", 0, 0, 0, 0, NULL };
    size_t at = 46 + 7 + 4, field;
    memset(&z, 0, sizeof z);
    for (size_t i = 0; i < prefix; ++i) put_le(&z.file, 0, 1);
    part.extra = "D30"; /* a foreign field of 2 bytes, then ours of up to 24 */
    zip_add(&z, &part, &one);
    set_le(&z.directory, 46 + 7 + 2, 2, 2);
    set_le(&z.directory, 42, 0, 4);
    at = 46 + 7 + 6;
    field = at + 4;
    set_le(&z.directory, at, 1, 2);
    set_le(&z.directory, at + 2, 20, 2);
    if (which & 1) set_le(&z.directory, 24, 0xffffffff, 4);
    if (which & 1) set_le(&z.directory, field, one.count, 8);
    if (which & 1) field += 8;
    if (which & 2) set_le(&z.directory, 20, 0xffffffff, 4);
    if (which & 2) set_le(&z.directory, field, one.count, 8);
    if (which & 2) field += 8;
    if (which & 4) set_le(&z.directory, 42, 0xffffffff, 4);
    if ((which & 4) && field + 8 <= z.directory.count) set_le(&z.directory, field, 0, 8);
    free(one.at);
    return z;
}

static void zip64(void) {
    static const size_t prefixes[] = { 0, 111, 70000 };
    for (unsigned which = 0; which < 7; ++which) {
        for (size_t i = 0; i < (which < 6 ? 2 : 3); ++i) {
            const size_t prefix = prefixes[i];
            zip z = zip64_array(which, prefix);
            spdl_error error = { 0 };
            uint8_t *copy;
            spdl_npz *npz;
            zip_end64(&z, prefix);
            copy = exact(z.file.at, z.file.count);
            npz = open_bytes(copy, z.file.count, &error);
            if (CHECK(npz != NULL)) check_array(npz, "one", 1);
            else fprintf(stderr, "%u %zu: %s\n", which, prefix, error.text);
            spdl_npz_close(npz);
            free(copy);
            zip_free(&z);
        }
    }
    zip z = zip64_array(7, 0); /* its field of 20 bytes has no room for all three */
    zip_end64(&z, 0);
    refuses(z.file.at, z.file.count, SPDL_E_FORMAT, "member 'one': the extra field");
    zip_free(&z);
}

static spdl_result opens(const zip *z) {
    spdl_error error = { 0 };
    spdl_npz *npz = open_bytes(z->file.at, z->file.count, &error);
    spdl_npz_close(npz);
    return error.result;
}

static void zip64_that_is_broken(void) {
    zip z = zip64_array(3, 0);
    zip_end64(&z, 0);
    set_le(&z.file, z.end_at - 20 + 16, 2, 4);
    refuses(z.file.at, z.file.count, SPDL_E_UNSUPPORTED, "several disks");
    set_le(&z.file, z.end_at - 20 + 16, 1, 4);
    set_le(&z.file, z.end_at + 10, 2, 2); /* entries: not 0xffff, and another number */
    refuses(z.file.at, z.file.count, SPDL_E_FORMAT, "disagree");
    set_le(&z.file, z.end_at + 10, 0xffff, 2);
    set_le(&z.file, z.end_at - 76, 0, 4); /* no record where the locator points */
    refuses(z.file.at, z.file.count, SPDL_E_FORMAT, "leads to no ZIP64 end record");
    zip_free(&z);
    z = zip64_array(3, 0);
    zip_end64(&z, 0);
    set_le(&z.file, z.end_at - 76 + 40, UINT64_MAX - 3, 8); /* directory of nearly 2^64 bytes */
    refuses(z.file.at, z.file.count, SPDL_E_FORMAT, "does not fit");
    set_le(&z.file, z.end_at - 76 + 40, 0, 8);
    set_le(&z.file, z.end_at - 76 + 48, UINT64_MAX - 3, 8);
    refuses(z.file.at, z.file.count, SPDL_E_FORMAT, "does not fit");
    set_le(&z.file, z.end_at - 76 + 48, 0, 8);
    refuses(z.file.at, z.file.count, SPDL_E_FORMAT, "has 0 entries, its end record claims 1");
    set_le(&z.file, z.end_at - 76 + 4, UINT64_MAX, 8); /* its own length */
    refuses(z.file.at, z.file.count, SPDL_E_FORMAT, "leads to no ZIP64 end record");
    zip_free(&z);
    z = zip64_array(3, 0);
    zip_end64(&z, 0);
    set_le(&z.file, z.end_at + 4, 1, 2);
    refuses(z.file.at, z.file.count, SPDL_E_UNSUPPORTED, "several disks");
    set_le(&z.file, z.end_at + 4, 0xffff, 2); /* the ZIP64 record has it */
    CHECK_EQ(opens(&z), SPDL_OK);
    set_le(&z.file, z.end_at - 20 + 8, UINT64_MAX, 8); /* no such place: it is before the locator */
    CHECK_EQ(opens(&z), SPDL_OK);
    for (size_t front = 0; front < 56; ++front) { /* no room for a record before the locator */
        z.file.count = 0;
        put(&z.file, z.directory.at, front);
        put(&z.file, "PK\6\7\0\0\0\0\0\0\0\0\0\0\0\0\1\0\0\0", 20);
        put(&z.file, "PK\5\6\0\0\0\0\1\0\1\0\0\0\0\0\0\0\0\0\0\0", 22);
        refuses(z.file.at, z.file.count, SPDL_E_FORMAT, "leads to no ZIP64 end record");
    }
    zip_free(&z);
}

static void directory_that_is_broken(void) {
    zip z = two_arrays(0);
    set_le(&z.file, z.end_at + 16, 0xffffffff, 4);
    refuses(z.file.at, z.file.count, SPDL_E_FORMAT, "does not fit before its end record");
    zip_free(&z);
    z = two_arrays(0);
    set_le(&z.file, z.end_at + 10, 3, 2);
    refuses(z.file.at, z.file.count, SPDL_E_FORMAT, "has 2 entries, its end record claims 3");
    set_le(&z.file, z.end_at + 10, 2, 2);
    set_le(&z.file, z.end_at + 4, 1, 2);
    refuses(z.file.at, z.file.count, SPDL_E_UNSUPPORTED, "several disks");
    zip_free(&z);
    z = two_arrays(0);
    set_le(&z.file, z.entry_at[1], 0, 4);
    refuses(z.file.at, z.file.count, SPDL_E_FORMAT, "entry 1 of the central directory");
    zip_free(&z);
    z = two_arrays(0);
    set_le(&z.file, z.entry_at[1] + 28, 8, 2); /* a name that does not fit */
    refuses(z.file.at, z.file.count, SPDL_E_FORMAT, "entry 1 of the central directory");
    zip_free(&z);
    z = two_arrays(0);
    z.file.at[z.entry_at[0] + 47] = 0; /* a zero in a name */
    refuses(z.file.at, z.file.count, SPDL_E_FORMAT, "entry 0 of the central directory");
    zip_free(&z);
    refuses("PK\3\4 and so on and so on and so on", 35, SPDL_E_FORMAT, "no end of a ZIP archive");
    refuses("", 0, SPDL_E_FORMAT, "empty");
}

/* Each refuses one member; the other is read. */
static void member_broken(size_t entry_field, uint64_t value, int count, spdl_result result,
                          const char *part) {
    zip z = two_arrays(0);
    uint8_t *copy;
    spdl_npz *npz;
    set_le(&z.file, z.entry_at[1] + entry_field, value, count);
    refuses_array(z.file.at, z.file.count, "two", result, part);
    copy = exact(z.file.at, z.file.count);
    npz = open_bytes(copy, z.file.count, NULL);
    if (CHECK(npz != NULL)) check_array(npz, "one", 1);
    spdl_npz_close(npz);
    free(copy);
    zip_free(&z);
}

static void members_that_are_broken(void) {
    const spdl_result format = SPDL_E_FORMAT, unsupported = SPDL_E_UNSUPPORTED;
    member_broken(8, 1, 2, unsupported, "member 'two': encrypted");
    member_broken(8, 0x40, 2, unsupported, "encrypted");
    member_broken(8, 0x2000, 2, unsupported, "encrypted");
    member_broken(8, 0x20, 2, unsupported, "patched data");
    member_broken(10, 12, 2, unsupported, "method 12 (bzip2)");
    member_broken(10, 14, 2, unsupported, "method 14 (LZMA)");
    member_broken(10, 93, 2, unsupported, "method 93 (Zstandard)");
    member_broken(10, 99, 2, unsupported, "method 99;");
    member_broken(10, 0, 2, format, "stored, but its sizes in the directory");
    member_broken(16, 0x12345678, 4, SPDL_E_CHECKSUM, "in the directory 12345678");
    member_broken(20, 0xffffffff, 4, format, "but must end at byte");
    member_broken(20, 0x7fffffff, 4, format, "but must end at byte");
    member_broken(20, 80, 4, format, "but must end at byte");
    member_broken(20, 20, 4, format, "cut off");
    member_broken(24, 0xffffffff, 4, format, "cannot become 4294967295");
    member_broken(24, 20, 4, format, "no .npy array: 20 bytes, a header of");
    member_broken(24, 10000, 4, format, "inflates to less than the 10000 bytes");
    member_broken(24, 71, 4, format, "but 3 follow the header");
    member_broken(42, 0xffffffff, 4, format, "its header would be at byte 4294967295");
    member_broken(42, 0x7fffffff, 4, format, "its header would be at byte 2147483647");
    zip z = two_arrays(0);
    set_le(&z.file, z.local_at[1], 0, 4);
    refuses_array(z.file.at, z.file.count, "two", format, "no header at byte 109");
    zip_free(&z);
    z = two_arrays(0);
    z.file.at[z.local_at[1] + 30] = 'T';
    refuses_array(z.file.at, z.file.count, "two", format, "byte 109 has another name");
    zip_free(&z);
    z = two_arrays(0);
    set_le(&z.file, z.local_at[1] + 28, 2, 2); /* an extra field into the directory */
    refuses_array(z.file.at, z.file.count, "two", format, "but must end at byte");
    zip_free(&z);
    z = two_arrays(0);
    z.file.at[z.data_at[0] + 70] ^= 1;
    refuses_array(z.file.at, z.file.count, "one", SPDL_E_CHECKSUM, "member 'one': CRC-32 is ");
    zip_free(&z);
}

/* Local headers of current NumPy say 0xffffffff; whatever they say does not matter. */
static void local_sizes_do_not_matter(void) {
    zip z = two_arrays(0);
    for (int i = 0; i < 2; ++i) set_le(&z.file, z.local_at[i] + 14, UINT64_MAX, 8);
    for (int i = 0; i < 2; ++i) set_le(&z.file, z.local_at[i] + 22, UINT64_MAX, 4);
    check_two_arrays(z.file.at, z.file.count);
    zip_free(&z);
}

/* No byte belongs to two members: what reaches into another is refused. */
static void members_that_overlap(void) {
    zip z = two_arrays(0);
    spdl_error error = { 0 };
    spdl_npz *npz;
    size_t inside = z.data_at[0] + 10; /* "two" moves into the data of "one" */
    memcpy(z.file.at + inside, z.file.at + z.local_at[1], 37);
    set_le(&z.file, z.entry_at[1] + 42, inside, 4);
    set_le(&z.file, z.entry_at[1] + 20, 20, 4);
    refuses_array(z.file.at, z.file.count, "one", SPDL_E_FORMAT, "but must end at byte");
    zip_free(&z);
    z = two_arrays(0);
    set_le(&z.file, z.entry_at[0] + 20, 80, 4); /* "one" reaches into the header of "two" */
    set_le(&z.file, z.entry_at[0] + 24, 80, 4);
    refuses_array(z.file.at, z.file.count, "one", SPDL_E_FORMAT, "but must end at byte");
    zip_free(&z);
    z = two_arrays(0);
    set_le(&z.file, z.entry_at[1] + 42, 0, 4); /* both at one place: the name decides */
    refuses_array(z.file.at, z.file.count, "two", SPDL_E_FORMAT, "has another name");
    npz = open_bytes(z.file.at, z.file.count, &error);
    REQUIRE(npz != NULL);
    check_array(npz, "one", 1);
    spdl_npz_close(npz);
    zip_free(&z);
}

/* ---- whole files ---- */

/* An allocator that knows the largest request, and what is out. */
typedef struct sizes {
    size_t largest, out;
} sizes;

static void *sizes_alloc(size_t count, size_t align, void *user) {
    sizes *s = (sizes *)user;
    void *memory = count > 1 << 28 ? NULL : test_memory(align, count);
    if (count > s->largest) s->largest = count;
    if (memory != NULL) s->out += count;
    return memory;
}

static void sizes_free(void *memory, size_t count, void *user) {
    ((sizes *)user)->out -= count;
    test_memory_free(memory);
}

static spdl_npz_desc sizes_desc(sizes *s, spdl_error *error) {
    spdl_npz_desc desc;
    memset(&desc, 0, sizeof desc);
    memset(s, 0, sizeof *s);
    desc.allocator.alloc_fn = sizes_alloc;
    desc.allocator.free_fn = sizes_free;
    desc.allocator.user = s;
    desc.error = error;
    return desc;
}

/* load refuses it, and has asked for no more than such a file can become. */
static void load_refuses(const zip *z, const char *part) {
    spdl_npz_bundle *bundle = NULL;
    spdl_error error = { 0 };
    sizes s;
    const spdl_npz_desc desc = sizes_desc(&s, &error);
    CHECK_EQ(spdl_npz_load_memory(&bundle, z->file.at, z->file.count, "it", &desc), SPDL_E_FORMAT);
    if (!CHECK(bundle == NULL && strstr(error.text, part) != NULL)) puts(error.text);
    CHECK(s.largest <= 1033 * z->file.count + 65536);
    CHECK_EQ(s.out, 0);
}

/* A directory may claim any size; what is there decides. */
static void sizes_that_are_claimed(void) {
    static const uint32_t claims[] = { 0xc0000000u, 0x7fffffffu, 200 };
    uint8_t block[200] = { 1 };
    const bytes deflated = { block, sizeof block, sizeof block };
    char name[20];
    zip z;
    for (size_t i = 0; i < 3; ++i) {
        z = two_arrays(0);
        set_le(&z.file, z.entry_at[0] + 20, claims[i], 4);
        set_le(&z.file, z.entry_at[0] + 24, claims[i], 4);
        load_refuses(&z, "'one': ");
        zip_free(&z);
    }
    memset(&z, 0, sizeof z);
    for (unsigned i = 0; i < 400; ++i) { /* all of them the same bytes */
        zip_part part = { name, 8, 0, 200 * 1000, 1, NULL };
        snprintf(name, sizeof name, "%u.npy", i);
        if (i == 0) zip_add(&z, &part, &deflated);
        else {
            zip other;
            memset(&other, 0, sizeof other);
            zip_add(&other, &part, &deflated);
            put(&z.directory, other.directory.at, other.directory.count);
            zip_free(&other);
        }
    }
    z.count = 400;
    for (unsigned i = 0; i < ZIP_PARTS; ++i) z.entry_at[i] = 0;
    zip_end(&z, 0);
    load_refuses(&z, "overlap");
    zip_free(&z);
}

static void zip_add_text(zip *z, const char *name, const char *text) {
    const zip_part part = { name, 0, 0, 0, 0, NULL };
    bytes data = { NULL, 0, 0 };
    put_text(&data, text);
    zip_add(z, &part, &data);
    free(data.at);
}

/* What archives of the world hold beside arrays; with "o", an array of objects. */
static zip mixed_archive(bool objects) {
    const zip_part a = { "a.npy", 0, 0, 0, 0, NULL }, b = { "b", 0, 0, 0, 0, NULL };
    const zip_part o = { "o.npy", 0, 0, 0, 0, NULL };
    zip_part notes = { "notes.md", 8, 0, 12, 0, NULL };
    bytes one = small_array(7), text = { NULL, 0, 0 }, packed, object;
    zip z;
    memset(&z, 0, sizeof z);
    put_text(&text, "twelve bytes");
    notes.crc = crc_of(text.at, text.count);
    packed = deflate_stored(&text);
    object = make_npy(1, "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n", "x", 1);
    zip_add_text(&z, "__meta__.json", "{\"columns\": 3}");
    zip_add(&z, &a, &one);
    zip_add_text(&z, "folder/", "");
    zip_add_text(&z, "folder/full/", "a folder with bytes");
    zip_add_text(&z, "", "bytes without a name");
    zip_add_text(&z, "__MACOSX/._a.npy", "Mac OS X, and more");
    zip_add(&z, &notes, &packed);
    zip_add(&z, &b, &one); /* an array without ".npy" */
    if (objects) zip_add(&z, &o, &object);
    zip_end(&z, 0);
    free(one.at), free(text.at), free(packed.at), free(object.at);
    return z;
}

/* Loads these arrays of a mixed archive; "" for all. Returns how many there were, or the result. */
static int load_mixed(bool objects, const char *const *wanted, spdl_error *error) {
    zip z = mixed_archive(objects);
    spdl_npz_bundle *bundle = NULL;
    sizes s;
    spdl_npz_desc desc = sizes_desc(&s, error);
    int result;
    desc.names = wanted;
    result = spdl_npz_load_memory(&bundle, z.file.at, z.file.count, "it", &desc);
    if (result == SPDL_OK) result = (int)bundle->count;
    for (int i = 0; i < result; ++i) CHECK(memcmp(bundle->arrays[i].data, "\7\2\3\4", 4) == 0);
    if (wanted == NULL && result > 0) CHECK(spdl_npz_bundle_find(bundle, "b") != NULL);
    spdl_npz_bundle_free(bundle);
    CHECK_EQ(s.out, 0);
    zip_free(&z);
    return result;
}

static void what_is_no_array_is_left_out(void) {
    static const char *const both[] = { "b", "a", NULL }, *const one[] = { "a.npy", NULL };
    static const char *const none[] = { NULL }, *const missing[] = { "a", "c", NULL };
    static const char *const text[] = { "notes.md", NULL };
    spdl_error error = { 0 };
    CHECK_EQ(load_mixed(false, NULL, &error), 2);
    CHECK_EQ(load_mixed(true, NULL, &error), SPDL_E_UNSUPPORTED);
    CHECK(strstr(error.text, "member 'o': object arrays") != NULL);
    CHECK_EQ(load_mixed(true, both, &error), 2);
    CHECK_EQ(load_mixed(true, one, &error), 1);
    CHECK_EQ(load_mixed(true, none, &error), 0);
    CHECK_EQ(load_mixed(true, missing, &error), SPDL_E_NOT_FOUND);
    CHECK_STR(error.text, "it: no array 'c'");
    CHECK_EQ(load_mixed(true, text, &error), SPDL_E_NOT_FOUND); /* a member, and no array */
    CHECK_STR(error.text, "it: no array 'notes.md'");
}

/* A model of PyTorch, a jar, the wrong file. */
static void an_archive_without_arrays_is_the_wrong_file(void) {
    spdl_npz_bundle *bundle = NULL;
    spdl_error error = { 0 };
    sizes s;
    const spdl_npz_desc desc = sizes_desc(&s, &error);
    zip z;
    memset(&z, 0, sizeof z);
    zip_add_text(&z, "archive/data.pkl", "a pickle of something");
    zip_add_text(&z, "archive/data/0", "numbers of something");
    zip_end(&z, 0);
    CHECK_EQ(spdl_npz_load_memory(&bundle, z.file.at, z.file.count, "it", &desc), SPDL_E_FORMAT);
    CHECK_STR(error.text, "it: no array in it, but 'archive/data.pkl'");
    CHECK(bundle == NULL);
    CHECK_EQ(s.out, 0);
    zip_free(&z);
}

/* A small file as the writer makes it; `change` is added to a byte of its last array. */
static spdl_npz_bundle *load_small(const char *dtype, int change, spdl_result *result, sizes *s) {
    static const uint64_t shape[] = { 3, 4 };
    static const float data[12] = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 };
    char folder[64], path[128];
    const spdl_npz_desc desc = sizes_desc(s, NULL);
    spdl_npz_bundle *bundle = NULL;
    npz_writer *w = NULL;
    spdl_npz *npz = NULL;
    const void *y = NULL;
    FILE *f;
    test_folder(folder, sizeof folder);
    snprintf(path, sizeof path, "%s/small.npz", folder);
    REQUIRE(npz_writer_open(&w, path, NULL) == SPDL_OK);
    CHECK_EQ(npz_writer_add(w, "x", "f4", 2, shape, data, NULL), SPDL_OK);
    CHECK_EQ(npz_writer_add(w, "y", dtype, 1, shape, data, NULL), SPDL_OK);
    CHECK_EQ(npz_writer_finish(w, NULL), SPDL_OK);
    npz_writer_close(w);
    REQUIRE(spdl_npz_open(&npz, path, NULL) == SPDL_OK);
    CHECK_EQ(spdl_npz_view(npz, 1, &y, NULL, NULL), dtype[0] == 'f' ? SPDL_OK : SPDL_E_UNSUPPORTED);
    f = fopen(path, "r+b");
    REQUIRE(f != NULL);
    if (change != 0) /* in the data of y */
        CHECK(fseek(f, (long)((const uint8_t *)y - npz->zip.data), SEEK_SET) == 0 &&
              fputc(change, f) == change);
    fclose(f);
    spdl_npz_close(npz);
    *result = spdl_npz_load(&bundle, path, &desc);
    remove(path);
    rmdir(folder);
    return bundle;
}

/* The bundle keeps the bytes of a small file, and copies the arrays that cannot be used there. */
static void small_files_are_not_copied(void) {
    spdl_result result;
    spdl_npz_bundle *bundle;
    const char *base;
    sizes s;
    bundle = load_small("f4", 0, &result, &s);
    REQUIRE(result == SPDL_OK && bundle->count == 2);
    base = (const char *)bundle->mapping_;
    for (size_t i = 0; i < 2; ++i) {
        const char *at = (const char *)bundle->arrays[i].data;
        CHECK(base != NULL && at > base && at < base + bundle->mapped_);
        CHECK_EQ((uintptr_t)at % 64, 0);
        CHECK(((const float *)bundle->arrays[i].data)[2] == 3);
    }
    memset(bundle->arrays[1].data, 0, 12); /* may be changed */
    spdl_npz_bundle_free(bundle);
    CHECK_EQ(s.out, 0);
    bundle = load_small(SPDL__BIG_ENDIAN ? "<f4" : ">f4", 0, &result, &s); /* has to be turned */
    REQUIRE(result == SPDL_OK);
    base = (const char *)bundle->mapping_;
    for (size_t i = 0; i < 2; ++i) {
        const char *at = (const char *)bundle->arrays[i].data;
        CHECK_EQ(base != NULL && at > base && at < base + bundle->mapped_, i == 0);
        CHECK_EQ((uintptr_t)at % 64, 0);
    }
    CHECK_STR(bundle->arrays[1].info.dtype, SPDL__BIG_ENDIAN ? ">f4" : "<f4");
    spdl_npz_bundle_free(bundle);
    CHECK_EQ(s.out, 0);
    bundle = load_small("f4", 77, &result, &s);
    CHECK_EQ(result, SPDL_E_CHECKSUM);
    CHECK(bundle == NULL);
    CHECK_EQ(s.out, 0);
}

/* Loads a small file, of which bytes behind the header of x were changed. */
static spdl_npz_bundle *load_changed(const char *dtype, long at, const void *to, size_t count,
                                     spdl_error *error) {
    static const uint64_t shape[] = { 3, 4 };
    static const float data[12] = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 };
    char folder[64], path[128];
    spdl_npz_desc desc = { 0 };
    spdl_npz_bundle *bundle = NULL;
    npz_writer *w = NULL;
    FILE *f;
    test_folder(folder, sizeof folder);
    snprintf(path, sizeof path, "%s/small.npz", folder);
    REQUIRE(npz_writer_open(&w, path, NULL) == SPDL_OK);
    CHECK_EQ(npz_writer_add(w, "x", dtype, 2, shape, data, NULL), SPDL_OK);
    CHECK_EQ(npz_writer_finish(w, NULL), SPDL_OK);
    npz_writer_close(w);
    f = fopen(path, "r+b");
    REQUIRE(f != NULL && fseek(f, at, SEEK_SET) == 0 && fwrite(to, 1, count, f) == count);
    fclose(f);
    desc.no_crc = true;
    desc.error = error;
    (void)spdl_npz_load(&bundle, path, &desc);
    CHECK((bundle != NULL) == (error->result == SPDL_OK));
    remove(path);
    rmdir(folder);
    return bundle;
}

static bool is_lent(const spdl_npz_bundle *bundle) {
    const char *const base = (const char *)bundle->mapping_, *at = (char *)bundle->arrays[0].data;
    return base != NULL && at > base && at < base + bundle->mapped_;
}

/* Arrays of a small file that look as if they could be lent. */
static void small_files_that_were_changed(void) {
    enum { HEAD = 64, FORTRAN = HEAD + 10 + 34, LOCAL_EXTRA = 28 };
    spdl_error error = { 0 };
    spdl_npz_bundle *bundle = load_changed("f4", FORTRAN, "False", 5, &error);
    REQUIRE(bundle != NULL);
    CHECK(is_lent(bundle));
    spdl_npz_bundle_free(bundle);
    bundle = load_changed("f4", FORTRAN, "True ", 5, &error); /* has to be turned */
    REQUIRE(bundle != NULL);
    CHECK(!is_lent(bundle) && ((const float *)bundle->arrays[0].data)[1] == 4);
    spdl_npz_bundle_free(bundle);
    bundle = load_changed("[('\xc3\xa9', 'f4')]", 0, "PK", 2, &error); /* a header of version 3 */
    REQUIRE(bundle != NULL);
    CHECK(is_lent(bundle) && ((const float *)bundle->arrays[0].data)[1] == 2);
    spdl_npz_bundle_free(bundle);
    CHECK_EQ(spdl_npz_load(&bundle, fixture_path("version1.npy"), NULL), SPDL_OK);
    CHECK(is_lent(bundle) == !SPDL__BIG_ENDIAN && bundle->arrays[0].info.stored);
    CHECK_STR(bundle->arrays[0].name, "arr_0");
    spdl_npz_bundle_free(bundle);
    CHECK(load_changed("f4", FORTRAN, "Maybe", 5, &error) == NULL);
    CHECK(strstr(error.text, "small.npz: member 'x': fortran_order is neither") != NULL);
    CHECK(load_changed("f4", LOCAL_EXTRA, "\xff\xff", 2, &error) == NULL); /* past the file */
    CHECK(strstr(error.text,
                 "small.npz: member 'x': needs 176 bytes at byte 0, but must end at") != NULL);
}

/* Of two members that are decoded in turn both fail: the first one is told. */
static void two_failures_at_a_time(void) {
    zip_part part = { "one.npy", 8, 0, 0, 1, NULL };
    bytes data = small_array(1), packed = deflate_stored(&data);
    spdl_npz_bundle *bundle = NULL;
    spdl_npz_desc desc = { 0 };
    spdl_error error = { 0 };
    zip z;
    memset(&z, 0, sizeof z);
    part.usize = data.count;
    zip_add(&z, &part, &packed);
    part.name = "two.npy";
    zip_add(&z, &part, &packed);
    zip_end(&z, 0);
    desc.error = &error;
    CHECK_EQ(spdl_npz_load_memory(&bundle, z.file.at, z.file.count, "m", &desc), SPDL_E_CHECKSUM);
    CHECK(bundle == NULL && strstr(error.text, "m: member 'one': CRC-32") != NULL);
    free(data.at);
    free(packed.at);
    zip_free(&z);
}

/* Memory for large bundles comes in large pages, unless it is the user's. */
static void large_bundles(void) {
    enum { COUNT = 4300000 };
    const zip_part part = { "a.npy", 0, 0, 0, 0, NULL };
    uint8_t *zeros = (uint8_t *)calloc(COUNT, 1);
    bytes data = make_npy(1, "{'descr': '|u1', 'fortran_order': False, 'shape': (4300000,), }",
                          zeros, COUNT);
    spdl_npz_bundle *bundle = NULL;
    spdl_error error = { 0 };
    sizes s;
    zip z;
    memset(&z, 0, sizeof z);
    data.at[data.count - 1] = 7;
    zip_add(&z, &part, &data);
    zip_end(&z, 0);
    for (int own = 0; own < 2; ++own) {
        spdl_npz_desc desc = sizes_desc(&s, &error);
        if (!own) desc.allocator = (spdl_allocator){ NULL, NULL, NULL };
        REQUIRE(spdl_npz_load_memory(&bundle, z.file.at, z.file.count, "m", &desc) == SPDL_OK);
        CHECK(((const uint8_t *)bundle->arrays[0].data)[COUNT - 1] == 7);
        CHECK(spdl_npz_bundle_find(bundle, "a.npy") == bundle->arrays);
        CHECK(spdl_npz_bundle_find(bundle, "a.npy.npy") == NULL);
        spdl_npz_bundle_free(bundle);
    }
    CHECK_EQ(s.out, 0);
    free(zeros);
    free(data.at);
    zip_free(&z);
}

/* A ZIP64 offset whose sum with the header's length passes 2^64. The sanitizers watch the reads. */
static void offsets_that_wrap(void) {
    zip_part part = { "one.npy", 0, 0, 0, 0, "D16" };
    bytes data = small_array(1);
    char folder[64], path[128];
    spdl_npz_bundle *bundle;
    uint8_t *entry;
    zip z;
    memset(&z, 0, sizeof z);
    zip_add(&z, &part, &data);
    zip_end(&z, 0);
    entry = z.file.at + z.entry_at[0];
    memset(entry + 42, 0xff, 4);
    memcpy(entry + 46 + 7, "\1\0\14\0", 4);
    test_folder(folder, sizeof folder);
    snprintf(path, sizeof path, "%s/wraps.npz", folder);
    for (int back = 1; back < 80; ++back) {
        FILE *f = fopen(path, "wb");
        REQUIRE(f != NULL);
        memset(entry + 46 + 7 + 4, 0xff, 8);
        entry[46 + 7 + 4] = (uint8_t)-back;
        CHECK_EQ(fwrite(z.file.at, 1, z.file.count, f), z.file.count);
        fclose(f);
        CHECK_EQ(spdl_npz_load(&bundle, path, NULL), SPDL_E_FORMAT);
    }
    remove(path);
    rmdir(folder);
    free(data.at);
    zip_free(&z);
}

/* The last of one name counts, wherever it lies. */
static void duplicate_names(void) {
    static const char *const written[] = { "b.npy", "a.npy", "b.npy", "c.npy", "a.npy", "b.npy" };
    spdl_error error = { 0 };
    uint8_t *copy;
    spdl_npz *npz;
    zip z;
    memset(&z, 0, sizeof z);
    for (unsigned i = 0; i < 6; ++i) {
        zip_part part = { NULL, 0, 0, 0, 0, NULL };
        bytes data = small_array(10 + i);
        part.name = written[i];
        zip_add(&z, &part, &data);
        free(data.at);
    }
    zip_end(&z, 0);
    copy = exact(z.file.at, z.file.count);
    npz = open_bytes(copy, z.file.count, &error);
    REQUIRE(npz != NULL);
    CHECK_EQ(spdl_npz_count(npz), 3);
    CHECK_STR(spdl_npz_name(npz, 0), "c");
    CHECK_STR(spdl_npz_name(npz, 1), "a");
    CHECK_STR(spdl_npz_name(npz, 2), "b");
    check_array(npz, "c", 13);
    check_array(npz, "a", 14);
    check_array(npz, "b", 15);
    spdl_npz_close(npz);
    free(copy);
    zip_free(&z);
}

/* 70,000 members, with names and places in no order; without ZIP64 the end record says 4,464. */
static void many_members(void) {
    enum { COUNT = 70000 };
    bytes data = small_array(0);
    uint64_t state = test_seed();
    char name[32];
    size_t index = 0;
    uint8_t *copy, *swapped;
    spdl_npz *npz;
    zip z;
    memset(&z, 0, sizeof z);
    for (unsigned i = 0; i < COUNT; ++i) {
        const zip_part part = { name, 0, 0, 0, 1, NULL };
        snprintf(name, sizeof name, "m%06u.npy", (i * 7919) % COUNT);
        set_le(&data, data.count - 4, i, 4);
        zip_add(&z, &part, &data);
    }
    swapped = exact(z.directory.at, z.directory.count); /* entries in another order */
    for (size_t i = 0, size = 46 + 11; i < COUNT; ++i)
        memcpy(z.directory.at + i * size, swapped + (i * 6007 % COUNT) * size, size);
    free(swapped);
    zip_end(&z, 0);
    copy = exact(z.file.at, z.file.count);
    npz = open_bytes(copy, z.file.count, NULL);
    REQUIRE(npz != NULL);
    CHECK_EQ(spdl_npz_count(npz), COUNT);
    npz->desc.no_crc = true;
    for (unsigned i = 0; i < 1000; ++i) {
        const unsigned which = (unsigned)(test_random(&state) % COUNT);
        uint8_t got[4] = { 0 };
        snprintf(name, sizeof name, "m%06u", (unsigned)((uint64_t)which * 7919 % COUNT));
        REQUIRE(spdl_npz_find(npz, name, &index) == SPDL_OK);
        CHECK_EQ(spdl_npz_read(npz, index, got, 4, NULL), SPDL_OK);
        CHECK_EQ(got[0] | got[1] << 8 | got[2] << 16, which);
    }
    spdl_npz_close(npz);
    free(copy);
    free(data.at);
    zip_free(&z);
}

/* ============================================================================================= */
/* Options, buffers and what follows an array */

/* The last member that an archive may have, and one more. */
static void members_beyond_the_limit(void) {
    zip z = two_arrays(0);
    spdl_error error = { 0 };
    spdl__zip_member members[2];
    char names[200];
    spdl__zip archive;
    spdl__zip_where where = { &archive, NULL, &error, SPDL_OK };
    spdl__zip_opening o = { &archive, &where, z.end_at, SPDL__ZIP_MEMBERS, 0, 0, true };
    memset((void *)&archive, 0, sizeof archive);
    strcpy(archive.label, "a.npz");
    archive.data = archive.tail = z.file.at;
    archive.members = members;
    archive.directory = z.entry_at[1];
    archive.count = SPDL__ZIP_MEMBERS - 1;
    CHECK(spdl__zip_read_entries(&o, names));
    archive.directory = z.entry_at[0];
    archive.count = SPDL__ZIP_MEMBERS - 1;
    CHECK(!spdl__zip_read_entries(&o, names));
    CHECK_EQ(where.result, SPDL_E_LIMIT);
    CHECK_STR(error.text, "a.npz: more than 1048576 members");
    zip_free(&z);
}

static void limits(void) {
    zip z = two_arrays(0);
    spdl_npz_desc desc = { 0 };
    spdl_error error = { 0 };
    spdl_npy_info info;
    spdl_npz *npz = NULL;
    desc.error = &error;
    desc.max_bytes = 3;
    REQUIRE(spdl_npz_open_memory(&npz, z.file.at, z.file.count, "m", &desc) == SPDL_OK);
    CHECK_EQ(spdl_npz_info(npz, 0, &info, &error), SPDL_E_LIMIT);
    CHECK_STR(error.text, "m: member 'one': 4 bytes, more than max_bytes, which is 3");
    spdl_npz_close(npz);
    desc.max_bytes = 4;
    REQUIRE(spdl_npz_open_memory(&npz, z.file.at, z.file.count, "m", &desc) == SPDL_OK);
    CHECK_EQ(spdl_npz_info(npz, 0, &info, &error), SPDL_OK);
    spdl_npz_close(npz);
    zip_free(&z);
}

/* An empty array needs no memory, but what follows it makes its CRC. */
static void bytes_after_an_empty_array(void) {
    bytes data = make_npy(1, "{'descr': '<f4', 'fortran_order': False, 'shape': (0,), }\n", "after",
                          5), packed = deflate_stored(&data);
    zip_part part = { "a.npy", 8, 0, 0, 0, NULL };
    spdl_error error = { 0 };
    zip z;
    memset(&z, 0, sizeof z);
    part.usize = data.count;
    for (int wrong = 0; wrong < 2; ++wrong) {
        part.crc = crc_of(data.at, data.count) + (uint32_t)wrong;
        zip_add(&z, &part, &packed);
        zip_end(&z, 0);
        spdl_npz *npz = open_bytes(z.file.at, z.file.count, &error);
        REQUIRE(npz != NULL);
        CHECK_EQ(spdl_npz_read(npz, 0, NULL, 0, &error), wrong ? SPDL_E_CHECKSUM : SPDL_OK);
        spdl_npz_close(npz);
        zip_free(&z);
    }
    free(data.at);
    free(packed.at);
}

/* The results of reading an array that has other bytes behind it. */
static void read_with_more(const zip *z, uint64_t max_bytes, bool no_crc, spdl_result expected) {
    spdl_npz_bundle *bundle = NULL;
    spdl_npz_desc desc = { 0 };
    spdl_npz *npz = NULL;
    uint8_t array[4];
    desc.no_crc = no_crc;
    desc.max_bytes = max_bytes;
    REQUIRE(spdl_npz_open_memory(&npz, z->file.at, z->file.count, "m", &desc) == SPDL_OK);
    CHECK_EQ(spdl_npz_read(npz, 0, array, 4, NULL), expected);
    if (expected == SPDL_OK) CHECK(memcmp(array, "\1\2\3\4", 4) == 0);
    spdl_npz_close(npz);
    CHECK_EQ(spdl_npz_load_memory(&bundle, z->file.at, z->file.count, "m", &desc), expected);
    if (bundle != NULL) CHECK(memcmp(bundle->arrays[0].data, "\1\2\3\4", 4) == 0);
    spdl_npz_bundle_free(bundle);
}

/* What follows an array is skipped, but makes its CRC: a shape that lost a bit is not believed. */
static void bytes_after_the_array(void) {
    for (int deflated = 0; deflated < 2; ++deflated) {
        bytes data = small_array(1), packed;
        zip_part part = { "a.npy", 0, 0, 0, 0, NULL };
        zip z;
        memset(&z, 0, sizeof z);
        for (int i = 0; i < 12000; ++i) put_text(&data, "after");
        packed = deflate_stored(&data);
        part.usize = data.count;
        part.method = deflated ? 8 : 0;
        part.crc = crc_of(data.at, data.count);
        zip_add(&z, &part, deflated ? &packed : &data);
        zip_end(&z, 0);
        read_with_more(&z, 0, false, SPDL_OK);
        read_with_more(&z, 60000, false, SPDL_OK);
        read_with_more(&z, 59999, false, deflated ? SPDL_E_LIMIT : SPDL_OK);
        z.file.at[z.data_at[0] + 50000] ^= 1; /* far behind the array */
        read_with_more(&z, 0, false, SPDL_E_CHECKSUM);
        read_with_more(&z, 4, true, SPDL_OK);
        free(data.at);
        free(packed.at);
        zip_free(&z);
    }
}

static void crc_can_be_skipped(void) {
    zip z = two_arrays(0);
    spdl_npz_desc desc = { 0 };
    spdl_npz *npz = NULL;
    for (int i = 0; i < 2; ++i) z.file.at[z.entry_at[i] + 16] ^= 1;
    refuses_array(z.file.at, z.file.count, "one", SPDL_E_CHECKSUM, "CRC-32");
    refuses_array(z.file.at, z.file.count, "two", SPDL_E_CHECKSUM, "CRC-32");
    desc.no_crc = true;
    REQUIRE(spdl_npz_open_memory(&npz, z.file.at, z.file.count, NULL, &desc) == SPDL_OK);
    check_array(npz, "one", 1);
    check_array(npz, "two", 2);
    spdl_npz_close(npz);
    zip_free(&z);
}

static void buffers_that_are_too_small(void) {
    zip z = two_arrays(0);
    spdl_error error = { 0 };
    spdl_npz *npz = open_bytes(z.file.at, z.file.count, &error);
    uint8_t data[5] = { 9, 9, 9, 9, 9 };
    REQUIRE(npz != NULL);
    for (size_t i = 0; i < 2; ++i) {
        CHECK_EQ(spdl_npz_read(npz, i, data, 3, &error), SPDL_E_INVALID);
        CHECK(strstr(error.text, "has 4 bytes, the memory for it 3") != NULL);
        CHECK_EQ(spdl_npz_read(npz, i, NULL, 0, &error), SPDL_E_INVALID);
        CHECK_EQ(spdl_npz_read(npz, i, NULL, 4, &error), SPDL_E_INVALID);
        CHECK(strstr(error.text, "the memory for it is NULL") != NULL);
        CHECK_EQ(spdl_npz_read(npz, i, data, 5, NULL), SPDL_OK); /* and a larger one is fine */
        CHECK(data[3] == 4 && data[4] == 9);
    }
    spdl_npz_close(npz);
    zip_free(&z);
    npz = open_fixture("shapes_deflated.npz");
    CHECK_EQ(spdl_npz_read(npz, index_of(npz, "empty"), NULL, 0, NULL), SPDL_OK);
    spdl_npz_close(npz);
}

static void arguments_that_are_wrong(void) {
    spdl_npz *npz = NULL;
    spdl_npz_bundle *bundle = NULL;
    size_t index = 0;
    spdl_error error = { 0 };
    spdl_npz_desc desc = { 0 };
    desc.error = &error;
    CHECK_EQ(spdl_npz_load_memory(NULL, "x", 1, NULL, &desc), SPDL_E_INVALID);
    CHECK_EQ(spdl_npz_load_memory(&bundle, NULL, 1, NULL, &desc), SPDL_E_INVALID);
    CHECK_EQ(spdl_npz_open(NULL, "x", &desc), SPDL_E_INVALID);
    CHECK_EQ(spdl_npz_open(&npz, NULL, &desc), SPDL_E_INVALID);
    CHECK(strlen(error.text) > 0);
    CHECK_EQ(spdl_npz_open_memory(NULL, "x", 1, NULL, NULL), SPDL_E_INVALID);
    CHECK_EQ(spdl_npz_open_memory(&npz, NULL, 1, NULL, &desc), SPDL_E_INVALID);
    CHECK_EQ(spdl_npz_open_memory(&npz, NULL, 0, NULL, &desc), SPDL_E_FORMAT);
    CHECK(npz == NULL);
    CHECK_EQ(spdl_npz_count(NULL), 0);
    CHECK(spdl_npz_name(NULL, 0) == NULL);
    CHECK_EQ(spdl_npz_find(NULL, "x", &index), SPDL_E_NOT_FOUND);
    npz = open_fixture("version1.npy");
    CHECK_EQ(spdl_npz_find(npz, "arr_0.npy", &index), SPDL_OK);
    CHECK_EQ(spdl_npz_find(npz, "arr_0.npy.npy", &index), SPDL_E_NOT_FOUND);
    spdl_npz_close(npz);
    CHECK_EQ(spdl_npz_read(NULL, 0, &index, sizeof index, &error), SPDL_E_INVALID);
    spdl_npz_close(NULL);
}

/* ============================================================================================= */
/* Files */

static void files_that_are_missing(void) {
    char folder[64], path[128];
    spdl_npz *npz = NULL;
    spdl_error error = { 0 };
    spdl_npz_desc desc = { 0 };
    desc.error = &error;
    test_folder(folder, sizeof folder);
    CHECK_EQ(spdl_npz_open(&npz, folder, &desc), SPDL_E_IO);
    CHECK(strstr(error.text, folder) != NULL && strstr(error.text, "a directory") != NULL);
    snprintf(path, sizeof path, "%s/missing.npz", folder);
    CHECK_EQ(spdl_npz_open(&npz, path, &desc), SPDL_E_IO);
    CHECK(strstr(error.text, "missing.npz: No such file") != NULL);
    snprintf(path, sizeof path, "%s/fifo", folder);
    REQUIRE(mkfifo(path, 0600) == 0);
    CHECK_EQ(spdl_npz_open(&npz, path, &desc), SPDL_E_IO);
    CHECK(strstr(error.text, "a pipe or a device") != NULL);
    remove(path);
    snprintf(path, sizeof path, "%s/empty.npz", folder);
    fclose(fopen(path, "wb"));
    CHECK_EQ(spdl_npz_open(&npz, path, &desc), SPDL_E_FORMAT);
    CHECK(strstr(error.text, "empty.npz: empty") != NULL);
    remove(path);
    CHECK_EQ(spdl_npz_open(&npz, "/dev/zero", &desc), SPDL_E_IO);
    if (access("/sys/devices/system/cpu/online", R_OK) == 0) { /* says 4096 bytes, but has few */
        CHECK_EQ(spdl_npz_open(&npz, "/sys/devices/system/cpu/online", &desc), SPDL_E_IO);
        CHECK(strstr(error.text, "while it was read") != NULL);
    }
    CHECK(npz == NULL);
    rmdir(folder);
}

/* The end of a long path is what tells, and control characters stay out of messages. */
static void messages_stay_readable(void) {
    char path[1000];
    spdl_npz *npz = NULL;
    spdl_error error = { 0 };
    spdl_npz_desc desc = { 0 };
    desc.error = &error;
    memset(path, 'p', sizeof path);
    strcpy(path + 900, "/the end.npz");
    CHECK_EQ(spdl_npz_open_memory(&npz, "", 0, path, &desc), SPDL_E_FORMAT);
    CHECK(strstr(error.text, "/the end.npz: empty") != NULL && strncmp(error.text, "...p", 4) == 0);
    CHECK_EQ(spdl_npz_open_memory(&npz, "", 0, "a\033[2Jb\n", &desc), SPDL_E_FORMAT);
    CHECK_STR(error.text, "a?[2Jb?: empty, 0 bytes");
    zip z = two_arrays(0);
    z.file.at[z.entry_at[0] + 47] = 7;
    refuses_array(z.file.at, z.file.count, "o\ae", SPDL_E_FORMAT, "member 'o?e': the header");
    zip_free(&z);
}

/* ============================================================================================= */
/* Every length, every bit, every allocation */

/* Opens bytes that may be broken and uses all of them. Returns a number that tells what was read:
   the same for the same arrays. Where there is an error, there is a text. */
static uint32_t use_all(const uint8_t *data, size_t count, const char **failed) {
    spdl_error error = { 0 };
    spdl_npz *npz = open_bytes(data, count, &error);
    uint32_t sum = 0;
    *failed = NULL;
    if (npz == NULL) {
        CHECK(error.result < 0 && strlen(error.text) > 10);
        *failed = "open";
        return 0;
    }
    for (size_t i = 0; i < spdl_npz_count(npz); ++i) {
        spdl_npy_info info;
        const void *view = NULL;
        bool aligned;
        uint8_t *array = read_array(npz, i, &info, &error);
        const bool viewed = spdl_npz_view(npz, i, &view, &aligned, NULL) == SPDL_OK;
        CHECK(array != NULL || (error.result < 0 && strstr(error.text, "member '") != NULL));
        if (viewed) CHECK(is_stored(npz, i));
        if (viewed && array != NULL) CHECK(memcmp(view, array, (size_t)info.bytes) == 0);
        if (array == NULL) *failed = "read";
        else sum = sum * 31 + crc_of(array, (size_t)info.bytes) + (uint32_t)info.count;
        free(array);
    }
    spdl_npz_close(npz);
    return sum;
}

static const char *const small_files[] = {
    "version1.npy",    "version2.npy",        "unicode_fields.npy", "fortran.npy", "object.npy",
    "descriptors.npz", "shapes_deflated.npz", "names.npz",          "methods.npz", "none.npz"
};
enum { SMALL_FILES = sizeof small_files / sizeof small_files[0] };

static void truncated_at_every_length(void) {
    for (size_t i = 0; i < SMALL_FILES; ++i) {
        bytes file = fixture(small_files[i]);
        const char *failed;
        for (size_t count = 0; count < file.count; ++count) {
            uint8_t *copy = exact(file.at, count);
            use_all(copy, count, &failed);
            if (!CHECK(failed != NULL)) fprintf(stderr, "%s, %zu bytes\n", small_files[i], count);
            free(copy);
        }
        free(file.at);
    }
}

/* An archive with a flipped bit is refused or read as it was; CRCs are what makes that so, hence a
   .npy file is only not to do harm. (With a sanitizer each third bit: some of each byte.) */
static void every_bit_flipped(void) {
    for (size_t i = 0; i < SMALL_FILES; ++i) {
        bytes file = fixture(small_files[i]);
        const char *failed;
        const uint32_t sum = use_all(file.at, file.count, &failed);
        const bool archive = strstr(small_files[i], ".npz") != NULL;
        uint8_t *copy = exact(file.at, file.count);
        for (size_t bit = 0; bit < 8 * file.count; bit += TEST_SANITIZED ? 3 : 1) {
            uint32_t flipped;
            copy[bit / 8] ^= (uint8_t)(1u << bit % 8);
            flipped = use_all(copy, file.count, &failed);
            if (!CHECK(failed != NULL || flipped == sum || !archive))
                fprintf(stderr, "%s, bit %zu of byte %zu\n", small_files[i], bit % 8, bit / 8);
            copy[bit / 8] ^= (uint8_t)(1u << bit % 8);
        }
        free(copy);
        free(file.at);
    }
}

/* The compressed bytes of a member. */
static bytes payload_of(const spdl_npz *npz, size_t index, const bytes *file) {
    const spdl__zip_member *member = &npz->zip.members[index];
    const uint8_t *local = file->at + member->offset;
    bytes out = { NULL, 0, 0 };
    put(&out, local + 30 + (local[26] | local[27] << 8) + (local[28] | local[29] << 8),
        (size_t)member->csize);
    return out;
}

/* Reads the only array in every way: all say what spdl_npz_info says, or that it is cut off. */
static void refuse_as_cut(const zip *z, uint64_t max_bytes) {
    spdl_npz *npz = NULL;
    spdl_npz_desc desc = { 0 };
    spdl_npy_info info;
    spdl_error error[3];
    spdl_result result;
    static uint8_t data[4096];
    spdl_npz_bundle *bundle = NULL;
    uint8_t *copy = exact(z->file.at, z->file.count);
    desc.max_bytes = max_bytes;
    REQUIRE(spdl_npz_open_memory(&npz, copy, z->file.count, "cut", &desc) == SPDL_OK);
    result = spdl_npz_info(npz, 0, &info, &error[0]);
    if (result == SPDL_OK) {
        result = SPDL_E_FORMAT;
        strcpy(error[0].text, "the deflate stream is cut off");
    }
    CHECK_EQ(spdl_npz_read(npz, 0, data, sizeof data, &error[1]), result);
    desc.error = &error[2];
    CHECK_EQ(spdl_npz_load_memory(&bundle, copy, z->file.count, "cut", &desc), result);
    for (int way = 1; way < 3; ++way)
        if (!CHECK(strstr(error[way].text, error[0].text) != NULL))
            fprintf(stderr, "%s\n%s\n", error[0].text, error[way].text);
    spdl_npz_close(npz);
    free(copy);
}

/* The directory says less bytes than the stream has, and the rest of it follows: decoding must not
   be taken in by what it can see there, header and type included. */
static void streams_end_where_the_directory_says(void) {
    bytes file = fixture("dtypes_deflated.npz");
    spdl_npz *npz = open_fixture("dtypes_deflated.npz");
    for (size_t i = 0; i < spdl_npz_count(npz); ++i) {
        bytes payload = payload_of(npz, i, &file);
        const size_t count = payload.count;
        const spdl__zip_member member = npz->zip.members[i];
        if (member.method == 0) payload.count = 0;
        for (; payload.count > 1; --payload.count) {
            zip_part part = { "a", 8, 0, member.usize, member.crc, NULL };
            zip z;
            if (payload.count == count) continue;
            memset(&z, 0, sizeof z);
            zip_add(&z, &part, &payload);
            put(&z.file, payload.at + payload.count, count - payload.count);
            zip_end(&z, 0);
            refuse_as_cut(&z, 0);
            refuse_as_cut(&z, 1);
            zip_free(&z);
        }
        free(payload.at);
    }
    spdl_npz_close(npz);
    free(file.at);
}

/* Bytes replaced at random, more of them at a time. */
static void random_damage(void) {
    const char *failed;
    uint64_t state = test_seed();
    for (size_t i = 0; i < SMALL_FILES; ++i) {
        bytes file = fixture(small_files[i]);
        for (int round = 0; round < (TEST_SANITIZED ? 200 : 2000); ++round) {
            uint8_t *copy = exact(file.at, file.count);
            for (uint64_t n = test_random(&state) % 8; n < 8; ++n)
                copy[test_random(&state) % file.count] = (uint8_t)test_random(&state);
            use_all(copy, file.count, &failed);
            free(copy);
        }
        free(file.at);
    }
}

/* An allocator that fails once, and knows what is out. */
typedef struct counting {
    long calls, fail_at, blocks;
    size_t out;
} counting;

static void *counting_alloc(size_t count, size_t align, void *user) {
    counting *c = (counting *)user;
    void *memory = NULL;
    if (++c->calls == c->fail_at) return NULL;
    memory = test_memory(align, count);
    if (memory == NULL) return NULL;
    c->blocks++;
    c->out += count;
    return memory;
}

static void counting_free(void *memory, size_t count, void *user) {
    counting *c = (counting *)user;
    c->blocks--;
    c->out -= count;
    test_memory_free(memory);
}

/* Opens the file and reads its arrays; returns whether no allocation was asked to fail. */
static bool with_failing_allocation(const char *name, long fail_at) {
    counting c = { 0, 0, 0, 0 };
    spdl_error error = { 0 };
    spdl_npz_desc desc = { 0 };
    spdl_npz *npz = NULL;
    spdl_result result;
    c.fail_at = fail_at;
    desc.error = &error;
    desc.allocator.alloc_fn = counting_alloc;
    desc.allocator.free_fn = counting_free;
    desc.allocator.user = &c;
    result = spdl_npz_open(&npz, fixture_path(name), &desc);
    for (size_t i = 0; result == SPDL_OK && i < spdl_npz_count(npz); ++i) {
        uint8_t data[4096];
        result = spdl_npz_read(npz, i, data, sizeof data, &error);
    }
    spdl_npz_close(npz);
    CHECK_EQ(c.blocks, 0);
    CHECK_EQ(c.out, 0);
    CHECK_EQ(result, c.calls >= fail_at ? SPDL_E_NOMEM : SPDL_OK);
    CHECK(result == SPDL_OK || strstr(error.text, "no memory for") != NULL);
    return c.calls < fail_at;
}

static void every_allocation_fails(void) {
    static const char *const files[] = { "version1.npy", "structured_deflated.npz",
                                         "structured_stored.npz", "descriptors.npz" };
    for (size_t i = 0; i < sizeof files / sizeof files[0]; ++i) {
        long k = 1;
        while (!with_failing_allocation(files[i], k)) REQUIRE(++k < 50);
        CHECK(k >= 2);
    }
    spdl_npz_desc desc = { 0 };
    spdl_npz *npz = NULL;
    desc.allocator.alloc_fn = counting_alloc;
    CHECK_EQ(spdl_npz_open_memory(&npz, "", 0, "m", &desc), SPDL_E_INVALID);
}

/* ============================================================================================= */
/* Threads */

static void *read_everything(void *npz) {
    for (int round = 0; round < 20; ++round) check_patterns((const spdl_npz *)npz);
    return NULL;
}

static void read_by_several_threads(void) {
    spdl_npz *npz = open_fixture("dtypes_deflated.npz");
    test_thread thread[4];
    for (int i = 0; i < 4; ++i)
        REQUIRE(test_thread_start(&thread[i], read_everything, npz));
    for (int i = 0; i < 4; ++i) test_join(thread[i]);
    spdl_npz_close(npz);
}

/* The check value of this CRC, and pieces of any length. */
static void crc_is_the_one_of_zip(void) {
    uint8_t data[300];
    spdl__crc crc;
    spdl__crc_init(&crc);
    noise(data, sizeof data);
    CHECK_EQ(crc_of("123456789", 9), 0xcbf43926);
    CHECK_EQ(crc_of("", 0), 0);
    for (size_t cut = 0; cut <= sizeof data; ++cut)
        CHECK_EQ(spdl__crc_add(&crc, spdl__crc_add(&crc, 0, data, cut), data + cut,
                               sizeof data - cut), crc_of(data, sizeof data));
}

TEST_TABLE(npz) {
    TEST_CASE(dtypes_stored), TEST_CASE(dtypes_deflated), TEST_CASE(bytes_are_those_of_the_machine),
    TEST_CASE(shapes_stored), TEST_CASE(shapes_deflated), TEST_CASE(npy_versions),
    TEST_CASE(npy_orders), TEST_CASE(npy_unicode_fields), TEST_CASE(npy_long_types),
    TEST_CASE(structured),
    TEST_CASE(objects_are_refused_by_name), TEST_CASE(names), TEST_CASE(data_descriptors),
    TEST_CASE(no_members), TEST_CASE(other_methods_are_refused_by_name), TEST_CASE(streams),
    TEST_CASE(inflate_in_pieces), TEST_CASE(inflate_accepts), TEST_CASE(inflate_refuses),
    TEST_CASE(headers_that_are_fine), TEST_CASE(headers_that_are_not),
    TEST_CASE(orders_of_no_meaning), TEST_CASE(headers_without_end),
    TEST_CASE(npy_frames), TEST_CASE(npy_long_headers),
    TEST_CASE(comments_of_any_length), TEST_CASE(comments_that_mislead), TEST_CASE(bytes_in_front),
    TEST_CASE(comments_of_members), TEST_CASE(extra_fields), TEST_CASE(zip64),
    TEST_CASE(zip64_that_is_broken),
    TEST_CASE(directory_that_is_broken), TEST_CASE(members_that_are_broken),
    TEST_CASE(local_sizes_do_not_matter), TEST_CASE(members_that_overlap),
    TEST_CASE(duplicate_names), TEST_CASE(many_members),
    TEST_CASE(members_beyond_the_limit), TEST_CASE(limits),
    TEST_CASE(crc_can_be_skipped),
    TEST_CASE(buffers_that_are_too_small),
    TEST_CASE(arguments_that_are_wrong), TEST_CASE(bytes_after_the_array),
    TEST_CASE(bytes_after_an_empty_array),
    TEST_CASE(files_that_are_missing), TEST_CASE(messages_stay_readable),
    TEST_CASE(truncated_at_every_length), TEST_CASE(every_bit_flipped),
    TEST_CASE(streams_end_where_the_directory_says), TEST_CASE(random_damage),
    TEST_CASE(every_allocation_fails), TEST_CASE(read_by_several_threads),
    TEST_CASE(crc_is_the_one_of_zip), TEST_CASE(sizes_that_are_claimed),
    TEST_CASE(what_is_no_array_is_left_out),
    TEST_CASE(an_archive_without_arrays_is_the_wrong_file),
    TEST_CASE(small_files_are_not_copied), TEST_CASE(small_files_that_were_changed),
    TEST_CASE(two_failures_at_a_time), TEST_CASE(large_bundles),
    TEST_CASE(offsets_that_wrap), TEST_END
};
