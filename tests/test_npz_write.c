/* examples/npz_writer.h: what it writes is read back, and its bytes are looked at.
   tests/check_numpy.sh reads it with NumPy. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "test.h"

/* A clock with long ticks: writers begin at the same time. */
static uint64_t coarse_time_ns(void) {
    static uint64_t looks;
    return looks++ / 3;
}
#define spdl_time_ns coarse_time_ns
#include "../examples/npz_writer.h"
#undef spdl_time_ns

static char folder[64];
static bool folder_made;

static const char *make_path(const char *name) {
    static char path[4][200];
    static int turn;
    turn = (turn + 1) % 4;
    if (!folder_made) test_folder(folder, sizeof folder);
    folder_made = true;
    snprintf(path[turn], sizeof path[turn], "%s/%s", folder, name);
    return path[turn];
}

static bool count_file(void *count, const char *name) {
    (void)name;
    ++*(int *)count;
    return true;
}

/* How many files there are in the folder. */
static int files(void) {
    int count = 0;
    CHECK_STR(spdl__os_folder_read(folder, count_file, &count), NULL);
    return count;
}

/* Removes a file, which must be the only one: no temporary file is left. */
static void remove_last(const char *name) {
    CHECK_EQ(files(), name ? 1 : 0);
    if (name) npz_writer_remove(make_path(name));
    CHECK(rmdir(folder) == 0);
    folder_made = false;
}

static npz_writer *create(const char *path) {
    npz_writer *w = NULL;
    spdl_error error = { 0 };
    if (!CHECK_EQ(npz_writer_open(&w, path, &error), SPDL_OK)) {
        fprintf(stderr, "%s\n", error.text);
        test_leave();
    }
    return w;
}

static void finish(npz_writer *w) {
    spdl_error error = { 0 };
    if (!CHECK_EQ(npz_writer_finish(w, &error), SPDL_OK)) fprintf(stderr, "%s\n", error.text);
    npz_writer_close(w);
}

/* A type and a shape. */
typedef struct array {
    const char *dtype;
    int ndim;
    uint64_t shape[SPDL_NPY_MAX_DIMS];
} array;

static array type(const char *dtype, int ndim, uint64_t rows, uint64_t columns) {
    array a;
    memset(&a, 0, sizeof a);
    a.dtype = dtype;
    a.ndim = ndim;
    a.shape[0] = rows;
    a.shape[1] = columns;
    return a;
}

static void fill(uint8_t *to, size_t bytes, unsigned seed) {
    for (size_t i = 0; i < bytes; ++i) to[i] = (uint8_t)(i * 7 + (i >> 8) + seed);
}

static spdl_result write_array(npz_writer *w, const char *name, const array *a,
                               const void *data, spdl_error *error) {
    return npz_writer_add(w, name, a->dtype, a->ndim, a->shape, data, error);
}

static void write_one(npz_writer *w, const char *name, const array *a, const void *data) {
    spdl_error error = { 0 };
    if (!CHECK_EQ(write_array(w, name, a, data, &error), SPDL_OK))
        fprintf(stderr, "%s\n", error.text);
}

/* Reading verifies the CRC. */
static spdl_result read_it(const spdl_npz *npz, size_t index, spdl_error *error) {
    spdl_npy_info info;
    spdl_result result = spdl_npz_info(npz, index, &info, error);
    void *data = malloc(result == SPDL_OK ? (size_t)info.bytes + 1 : 1);
    REQUIRE(data != NULL);
    if (result == SPDL_OK) result = spdl_npz_read(npz, index, data, (size_t)info.bytes, error);
    free(data);
    return result;
}

/* Opens what was written; all of it must be there, and right. */
static spdl_npz *reopen(const char *path, size_t count) {
    spdl_npz *npz = NULL;
    spdl_error error = { 0 };
    spdl_npz_desc desc = { 0 };
    desc.error = &error;
    if (!CHECK_EQ(spdl_npz_open(&npz, path, &desc), SPDL_OK)) {
        fprintf(stderr, "%s\n", error.text);
        test_leave();
    }
    CHECK_EQ(spdl_npz_count(npz), count);
    for (size_t i = 0; i < spdl_npz_count(npz); ++i)
        if (!CHECK_EQ(read_it(npz, i, &error), SPDL_OK)) fprintf(stderr, "%s\n", error.text);
    return npz;
}

static size_t index_of(const spdl_npz *npz, const char *name) {
    size_t index = 0;
    if (!CHECK(spdl_npz_find(npz, name, &index) == SPDL_OK)) fprintf(stderr, "%s\n", name);
    return index;
}

/* The array has this type and content. */
static void check_array(const spdl_npz *npz, const char *name, const char *descr,
                        const void *expected, size_t bytes) {
    spdl_npy_info info;
    uint8_t *data = (uint8_t *)malloc(bytes + 1);
    const size_t index = index_of(npz, name);
    REQUIRE(data != NULL && spdl_npz_info(npz, index, &info, NULL) == SPDL_OK);
    CHECK_STR(info.dtype, descr);
    CHECK_EQ(info.bytes, bytes);
    CHECK_EQ(spdl_npz_read(npz, index, data, bytes, NULL), SPDL_OK);
    if (!CHECK(bytes == 0 || memcmp(data, expected, bytes) == 0)) fprintf(stderr, "%s\n", name);
    free(data);
}

/* ============================================================================================= */

static const struct {
    const char *dtype;
    size_t itemsize, unit;
} kinds[] = { { "|b1", 1, 1 },  { "|i1", 1, 1 },   { "<i2", 2, 2 },   { ">u4", 4, 4 },
              { "<u8", 8, 8 },  { "<f2", 2, 2 },   { ">f4", 4, 4 },   { "<f8", 8, 8 },
              { "<f16", 16, 16 }, { ">c8", 8, 4 }, { "<c16", 16, 8 }, { "|S5", 5, 1 },
              { "<U3", 12, 4 }, { ">U3", 12, 4 },  { "|V3", 3, 1 },   { "<M8[ns]", 8, 8 },
              { ">m8[25s]", 8, 8 }, { "[('x', '<f4'), ('y', '|S4')]", 8, 1 },
              { "[('gr\xc3\xb6\xc3\x9f\x65', '>f8')]", 8, 1 } };
enum { KINDS = sizeof kinds / sizeof kinds[0] };

/* What is written in the other byte order is read in that of the machine. */
static void every_kind(void) {
    uint8_t data[16 * 12], turned[16 * 12];
    npz_writer *w = create(make_path("kinds.npz"));
    spdl_npz *npz;
    char name[20], dtype[64];
    fill(data, sizeof data, 0);
    for (size_t i = 0; i < KINDS; ++i) {
        const array a = type(kinds[i].dtype, 2, 3, 4);
        snprintf(name, sizeof name, "a%d", (int)i);
        write_one(w, name, &a, data);
    }
    finish(w);
    npz = reopen(make_path("kinds.npz"), KINDS);
    for (size_t i = 0; i < KINDS; ++i) {
        const char order = kinds[i].dtype[0];
        const bool native = order == '|' || order == '[' || order == SPDL__NPY_HOST_ORDER;
        const size_t unit = native ? 1 : kinds[i].unit;
        const void *view = NULL;
        bool aligned = false;
        for (size_t k = 0; k < sizeof data; ++k)
            turned[k] = data[k / unit * unit + unit - 1 - k % unit];
        snprintf(name, sizeof name, "a%d", (int)i);
        snprintf(dtype, sizeof dtype, "%s", kinds[i].dtype);
        if (!native) dtype[0] = SPDL__NPY_HOST_ORDER;
        CHECK_STR(spdl_npz_name(npz, i), name);
        check_array(npz, name, dtype, turned, 12 * kinds[i].itemsize);
        CHECK_EQ(spdl_npz_view(npz, i, &view, &aligned, NULL),
                 native ? SPDL_OK : SPDL_E_UNSUPPORTED);
        CHECK(!native || (aligned && memcmp(view, data, 12 * kinds[i].itemsize) == 0));
    }
    spdl_npz_close(npz);
    remove_last("kinds.npz");
}

static void every_shape(void) {
    uint8_t data[24];
    npz_writer *w = create(make_path("shapes.npz"));
    array a = type("u1", 64, 2, 3);
    spdl_npy_info told;
    spdl_npz *npz;
    fill(data, sizeof data, 1);
    for (int i = 2; i < 64; ++i) a.shape[i] = 1;
    a.shape[63] = 4;
    write_one(w, "dims64", &a, data);
    CHECK_EQ(npz_writer_add(w, "zero_d", "|u1", 0, NULL, data, NULL), SPDL_OK);
    a = type("<f8", 1, 0, 0);
    write_one(w, "empty", &a, NULL);
    a = type("<f8", 2, 3, 0);
    write_one(w, "empty_too", &a, data);
    a = type("<U0", 1, 7, 0);
    write_one(w, "nothing", &a, NULL);
    finish(w);
    npz = reopen(make_path("shapes.npz"), 5);
    check_array(npz, "dims64", SPDL__NPY_HOST_ORDER == '<' ? "<u1" : ">u1", data, 24);
    check_array(npz, "zero_d", "|u1", data, 1);
    check_array(npz, "empty", SPDL__NPY_HOST_ORDER == '<' ? "<f8" : ">f8", data, 0);
    REQUIRE(spdl_npz_info(npz, index_of(npz, "dims64"), &told, NULL) == SPDL_OK);
    CHECK(told.ndim == 64 && told.shape[0] == 2 && told.shape[1] == 3 && told.shape[63] == 4);
    REQUIRE(spdl_npz_info(npz, index_of(npz, "nothing"), &told, NULL) == SPDL_OK);
    CHECK(told.kind == 'U' && told.count == 7 && told.bytes == 0);
    spdl_npz_close(npz);
    remove_last("shapes.npz");
}

/* Whatever the lengths of names and data: all of them can be viewed. */
static void alignments(void) {
    uint8_t data[100];
    npz_writer *w = create(make_path("align.npz"));
    spdl_npz *npz;
    char name[300];
    fill(data, sizeof data, 2);
    for (size_t i = 0; i < 20; ++i) {
        const array a = type("|u1", 1, i * 5, 0);
        memset(name, 'n', sizeof name);
        name[i * i / 2 + 1] = 0;
        name[0] = (char)('a' + i);
        write_one(w, name, &a, data);
    }
    finish(w);
    npz = reopen(make_path("align.npz"), 20);
    for (size_t i = 0; i < 20; ++i) {
        const void *view = NULL;
        bool aligned = false;
        CHECK_EQ(spdl_npz_view(npz, i, &view, &aligned, NULL), SPDL_OK);
        CHECK(aligned && memcmp(view, data, i * 5) == 0);
    }
    spdl_npz_close(npz);
    remove_last("align.npz");
}

static void one_npy(void) {
    uint16_t data[12];
    const array info = type(SPDL__NPY_HOST_ORDER == '<' ? "<u2" : ">u2", 2, 3, 4);
    spdl_error error = { 0 };
    npz_writer *w = create(make_path("none.npy"));
    spdl_npz *npz;
    CHECK_EQ(npz_writer_finish(w, &error), SPDL_E_FORMAT);
    CHECK(strstr(error.text, "empty, 0 bytes") != NULL);
    npz_writer_close(w);
    fill((uint8_t *)data, sizeof data, 4);
    w = create(make_path("one.npy"));
    write_one(w, "any", &info, data);
    CHECK_EQ(write_array(w, "other", &info, data, &error), SPDL_E_INVALID);
    CHECK(strstr(error.text, "one.npy: array 'other': a .npy file has one array") != NULL);
    finish(w);
    npz = reopen(make_path("one.npy"), 1);
    check_array(npz, "arr_0", info.dtype, data, 24);
    spdl_npz_close(npz);
    remove_last("one.npy");
}

/* The old file is there, whole, until the new one takes its place; what fails leaves nothing. */
static void takes_its_place_at_once(void) {
    const array info = type("|u1", 1, 4, 0);
    npz_writer *w = create(make_path("same.npz"));
    spdl_npz *npz;
    write_one(w, "old", &info, "1234");
    CHECK_EQ(files(), 1); /* the temporary one */
    finish(w);
    w = create(make_path("same.npz"));
    write_one(w, "new", &info, "5678");
    CHECK_EQ(files(), 2);
    npz = reopen(make_path("same.npz"), 1);
    check_array(npz, "old", "|u1", "1234", 4);
    finish(w);
    check_array(npz, "old", "|u1", "1234", 4); /* read when it was opened */
    spdl_npz_close(npz);
    npz = reopen(make_path("same.npz"), 1);
    check_array(npz, "new", "|u1", "5678", 4);
    spdl_npz_close(npz);
    w = create(make_path("same.npz"));
    write_one(w, "other", &info, "5678");
    npz_writer_close(w); /* without finish */
    npz = reopen(make_path("same.npz"), 1);
    check_array(npz, "new", "|u1", "5678", 4);
    spdl_npz_close(npz);
    remove_last("same.npz");
}

/* Each has a temporary file of its own, also in one tick of the clock. The last one remains. */
static void writers_of_one_path(void) {
    static const char *const data[] = { "1234", "2345", "3456" };
    const array info = type("|u1", 1, 4, 0);
    npz_writer *w[3];
    for (int i = 0; i < 3; ++i) w[i] = create(make_path("same.npz"));
    CHECK_EQ(files(), 3);
    for (int i = 0; i < 3; ++i) write_one(w[i], "a", &info, data[i]);
    for (int i = 0; i < 3; ++i) {
        spdl_npz *npz;
        finish(w[i]);
        npz = reopen(make_path("same.npz"), 1);
        check_array(npz, "a", "|u1", data[i], 4);
        spdl_npz_close(npz);
    }
    remove_last("same.npz");
}

/* Also on Windows, where fopen and rename have other names. */
static void paths_in_utf8(void) {
    static const char name[] = "gr\xc3\xb6\xc3\x9f\x65 \xe6\x95\xb0.npz";
    const array info = type("|u1", 1, 4, 0);
    spdl_npz *npz;
    npz_writer *w = create(make_path(name));
    npz_writer_close(w); /* without finish */
    CHECK_EQ(files(), 0);
    for (int i = 0; i < 2; ++i) { /* the second replaces the first */
        w = create(make_path(name));
        write_one(w, "a", &info, i ? "5678" : "1234");
        finish(w);
        CHECK_EQ(files(), 1);
    }
    npz = reopen(make_path(name), 1);
    check_array(npz, "a", "|u1", "5678", 4);
    spdl_npz_close(npz);
    remove_last(name);
}

static void refused(const array *info, const char *name, spdl_result result,
                    const char *part) {
    npz_writer *w = create(make_path("refused.npz"));
    const array good = type("|u1", 1, 4, 0);
    spdl_error error = { 0 };
    spdl_npz *npz;
    write_one(w, "there", &good, "1234");
    if (!CHECK(write_array(w, name, info, "12345678", &error) == result &&
               strstr(error.text, part) != NULL))
        fprintf(stderr, "expected \"%s\", got \"%s\"\n", part, error.text);
    write_one(w, "after", &good, "5678"); /* it goes on */
    finish(w);
    npz = reopen(make_path("refused.npz"), 2);
    check_array(npz, "after", "|u1", "5678", 4);
    spdl_npz_close(npz);
    remove_last("refused.npz");
}

static void what_cannot_be_written(void) {
    array a = type("<f3", 1, 1, 0);
    char *name = (char *)malloc(70001);
    REQUIRE(name != NULL);
    memset(name, 'n', 70000);
    name[70000] = 0;
    refused(&a, "a", SPDL_E_UNSUPPORTED, "refused.npz: array 'a': member 'arr_0': dtype '<f3'");
    a = type("|O", 1, 1, 0);
    refused(&a, "a", SPDL_E_UNSUPPORTED, "object arrays");
    a = type("|u1", 65, 1, 0);
    refused(&a, "a", SPDL_E_INVALID, "ndim is not 0 to 64");
    a.ndim = -1;
    refused(&a, "a", SPDL_E_INVALID, "ndim is not 0 to 64");
    a = type("<u8", 2, UINT64_MAX / 2, UINT64_MAX / 2);
    refused(&a, "a", SPDL_E_INVALID, "its shape overflows");
    a = type("|u1", 1, 1, 0);
    refused(&a, name, SPDL_E_INVALID, "its name is too long");
    a.dtype = "[('x', '<f4')";
    refused(&a, "a", SPDL_E_FORMAT, "is missing");
    a.dtype = "<f4', 'shape': (9,), 'descr': '<f4";
    refused(&a, "a", SPDL_E_FORMAT, "second time");
    a.dtype = name;
    refused(&a, "a", SPDL_E_INVALID, "its dtype is too long");
    free(name);
}

/* Two arrays of one name are noticed at the end, and then there is no file. */
static void names_that_are_there_twice(void) {
    const array info = type("|u1", 1, 4, 0);
    npz_writer *w = create(make_path("twice.npz"));
    spdl_error error = { 0 };
    write_one(w, "b", &info, "1234");
    write_one(w, "a", &info, "1234");
    write_one(w, "b", &info, "5678");
    write_one(w, "c", &info, "5678");
    CHECK_EQ(npz_writer_finish(w, &error), SPDL_E_INVALID);
    CHECK(strstr(error.text, "twice.npz: two arrays have one name") != NULL);
    CHECK_EQ(npz_writer_finish(w, &error), SPDL_E_INVALID);
    npz_writer_close(w);
    remove_last(NULL);
}

static void calls_at_the_wrong_time(void) {
    npz_writer *w = NULL;
    spdl_error error = { 0 };
    const array info = type("|u1", 1, 4, 0);
    CHECK_EQ(npz_writer_open(&w, "/nowhere/x.npz", &error), SPDL_E_IO);
    CHECK_STR(error.text, "/nowhere/x.npz: No such file or directory");
    CHECK(w == NULL);
    w = create(make_path("x.npz"));
    CHECK_EQ(write_array(w, "a", &info, NULL, &error), SPDL_E_INVALID);
    CHECK(strstr(error.text, "x.npz: array 'a': its data is NULL") != NULL);
    CHECK_EQ(write_array(w, "a", &info, NULL, NULL), SPDL_E_INVALID);
    CHECK_EQ(write_array(w, "a", &info, "1234", &error), SPDL_OK);
    CHECK_EQ(npz_writer_finish(w, &error), SPDL_OK);
    CHECK_EQ(npz_writer_finish(w, &error), SPDL_E_INVALID);
    CHECK(strstr(error.text, "the writer has ended") != NULL);
    CHECK_EQ(write_array(w, "b", &info, "1234", &error), SPDL_E_INVALID);
    npz_writer_close(w);
    npz_writer_close(NULL);
    remove_last("x.npz");
}

/* No file can take the place of a folder. */
static void path_that_is_a_folder(void) {
    const array info = type("|u1", 1, 4, 0);
    char inside[200];
    spdl_error error = { 0 };
    npz_writer *w = create(make_path("x.npz"));
    REQUIRE(mkdir(make_path("x.npz"), 0700) == 0);
    snprintf(inside, sizeof inside, "%s/x", make_path("x.npz"));
    REQUIRE(mkdir(inside, 0700) == 0);
    write_one(w, "a", &info, "1234");
    CHECK_EQ(npz_writer_finish(w, &error), SPDL_E_IO);
    CHECK(strstr(error.text, "x.npz: ") != NULL);
    npz_writer_close(w);
    CHECK(rmdir(inside) == 0 && rmdir(make_path("x.npz")) == 0);
    remove_last(NULL);
}

/* A disk that gets full: a limit on the size of files stands for it. */
static void disk_that_is_full(void) {
    static uint8_t data[200000];
    const array info = type("|u1", 1, sizeof data, 0);
    const struct rlimit limit = { 100000, RLIM_INFINITY };
    spdl_error error = { 0 };
    npz_writer *w;
    make_path("x");
    signal(SIGXFSZ, SIG_IGN);
    REQUIRE(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    w = create(make_path("full.npz"));
    CHECK_EQ(write_array(w, "a", &info, data, &error), SPDL_E_IO);
    CHECK(strstr(error.text, "full.npz: ") != NULL);
    CHECK_EQ(npz_writer_finish(w, &error), SPDL_E_INVALID);
    CHECK(strstr(error.text, "the writer has ended") != NULL);
    npz_writer_close(w);
    remove_last(NULL);
}

/* Each array is found by the name that it has, also where one is that of another with ".npy". */
static void names_that_end_in_npy(void) {
    static const char *const names[] = { "x.npy", "x", "x.npy.npy", ".npy", "" };
    static const char *const data[] = { "1234", "2345", "3456", "4567", "5678" };
    const array info = type("|u1", 1, 4, 0);
    npz_writer *w = create(make_path("names.npz"));
    spdl_npz_bundle *bundle = NULL;
    spdl_npz *npz;
    for (size_t i = 0; i < 5; ++i) write_one(w, names[i], &info, data[i]);
    finish(w);
    npz = reopen(make_path("names.npz"), 5);
    REQUIRE(spdl_npz_load(&bundle, make_path("names.npz"), NULL) == SPDL_OK);
    for (size_t i = 0; i < 5; ++i) {
        CHECK_STR(spdl_npz_name(npz, i), names[i]);
        CHECK_EQ(index_of(npz, names[i]), i);
        check_array(npz, names[i], "|u1", data[i], 4);
        CHECK(spdl_npz_bundle_find(bundle, names[i]) == &bundle->arrays[i]);
    }
    CHECK_EQ(index_of(npz, "x.npy.npy.npy"), 2);
    spdl_npz_bundle_free(bundle);
    spdl_npz_close(npz);
    remove_last("names.npz");
}

static void names_in_utf8(void) {
    static const char *const names[] = { "\xc3\xa4", "\xe6\x95\xb0", "\xf0\x9f\x8e\xb2" };
    const array info = type("|u1", 1, 4, 0);
    npz_writer *w = create(make_path("utf8.npz"));
    spdl_npz *npz;
    for (size_t i = 0; i < 3; ++i) write_one(w, names[i], &info, "1234");
    CHECK_EQ(spdl__le16(w->directory + 8), 0x0800);
    finish(w);
    npz = reopen(make_path("utf8.npz"), 3);
    for (size_t i = 0; i < 3; ++i) CHECK_STR(spdl_npz_name(npz, i), names[i]);
    spdl_npz_close(npz);
    remove_last("utf8.npz");
}

static const char *any_name(unsigned number) {
    static char name[60];
    memset(name, 'n', sizeof name);
    snprintf(name + number % 40, 20, "%u", number);
    return name;
}

/* Names of all lengths in no order. */
static void names_in_any_order(void) {
    enum { COUNT = 2000 };
    static unsigned at[4 * COUNT]; /* 0: not written, else the element + 1 */
    npz_writer *w = create(make_path("names.npz"));
    const array info = type("u4", 0, 0, 0); /* the numbers of this machine */
    uint64_t state = test_seed();
    unsigned count = 0, got = 0;
    spdl_npz *npz;
    memset(at, 0, sizeof at);
    for (unsigned i = 0; i < COUNT; ++i) {
        const unsigned number = (unsigned)(test_random(&state) % (4 * COUNT));
        if (at[number]) continue;
        write_one(w, any_name(number), &info, &i);
        at[number] = i + 1;
        ++count;
    }
    finish(w);
    npz = reopen(make_path("names.npz"), count);
    for (unsigned i = 0; i < 4 * COUNT; ++i) {
        if (!at[i]) continue;
        CHECK_EQ(spdl_npz_read(npz, index_of(npz, any_name(i)), &got, 4, NULL), SPDL_OK);
        CHECK_EQ(got + 1, at[i]);
    }
    spdl_npz_close(npz);
    remove_last("names.npz");
}

/* More members than 16 bits count need ZIP64, fewer do not. */
static void many_members(void) {
    static const unsigned counts[] = { 0, 65534, 65535, 70000 };
    const array info = type("|u1", 1, 4, 0);
    for (size_t k = 0; k < 4; ++k) {
        npz_writer *w = create(make_path("many.npz"));
        spdl_npz *npz = NULL;
        char name[20];
        uint8_t *file;
        FILE *in;
        long size = 0;
        for (unsigned i = 0; i < counts[k]; ++i) {
            snprintf(name, sizeof name, "m%u", i);
            REQUIRE(write_array(w, name, &info, &i, NULL) == SPDL_OK);
        }
        finish(w);
        REQUIRE(spdl_npz_open(&npz, make_path("many.npz"), NULL) == SPDL_OK);
        CHECK_EQ(spdl_npz_count(npz), counts[k]);
        for (unsigned i = 0; i < counts[k]; i += 997) {
            unsigned got = 0;
            snprintf(name, sizeof name, "m%u", i);
            CHECK_EQ(spdl_npz_read(npz, index_of(npz, name), &got, 4, NULL), SPDL_OK);
            CHECK_EQ(got, i);
        }
        spdl_npz_close(npz);
        in = fopen(make_path("many.npz"), "rb");
        REQUIRE(in != NULL && fseek(in, 0, SEEK_END) == 0 && (size = ftell(in)) >= 22);
        file = (uint8_t *)malloc(98);
        REQUIRE(file != NULL && fseek(in, size > 98 ? size - 98 : 0, SEEK_SET) == 0);
        if (size >= 98) {
            REQUIRE(fread(file, 1, 98, in) == 98);
            CHECK_EQ(memcmp(file, "PK\6\6", 4) == 0, counts[k] >= 65535);
        }
        fclose(in);
        free(file);
        remove_last("many.npz");
    }
}

/* Over 4 GiB sizes and places need ZIP64. The data are a hole, so that no disk is needed. */
static void array_over_4_gib(void) {
    const uint64_t large = ((uint64_t)4 << 30) + 64;
    const array small = type("|u1", 1, 4, 0);
    npz_writer *w = create(make_path("large.npz"));
    spdl_npz *npz = NULL;
    size_t entry;
    write_one(w, "before", &small, "1234"); /* makes room in the directory */
    entry = w->used;
    npz_writer_member(w, "large", 0, large);
    w->count++;
    CHECK_EQ(spdl__le32(w->directory + entry + 20), 0xffffffff);
    CHECK_EQ(spdl__le64(w->directory + entry + 46 + 9 + 4), large);
    w->at += large;
    REQUIRE(fseeko(w->file, (off_t)w->at, SEEK_SET) == 0);
    write_one(w, "after", &small, "5678");
    CHECK_EQ(spdl__le32(w->directory + w->used - 12), 8 << 16 | 1); /* its place alone */
    CHECK(spdl__le64(w->directory + w->used - 8) > large);
    finish(w);
    REQUIRE(spdl_npz_open(&npz, make_path("large.npz"), NULL) == SPDL_OK);
    CHECK_EQ(npz->zip.members[1].usize, large);
    check_array(npz, "before", "|u1", "1234", 4);
    check_array(npz, "after", "|u1", "5678", 4);
    spdl_npz_close(npz);
    remove_last("large.npz");
}

/* ============================================================================================= */

/* Arrays that have to be turned round are copied, into large pages if they are large. */
static void large_arrays_are_copied(void) {
    const uint64_t count = SPDL__LOAD_HUGE / 4 + 1;
    uint32_t *data = (uint32_t *)calloc(count, sizeof *data);
    spdl_npz_bundle *bundle = NULL;
    npz_writer *w = NULL;
    const uint32_t *got;
    REQUIRE(data != NULL);
    data[0] = data[count - 1] = 0x01020304;
    REQUIRE(npz_writer_open(&w, make_path("large.npz"), NULL) == SPDL_OK);
    CHECK_EQ(npz_writer_add(w, "x", SPDL__BIG_ENDIAN ? "<u4" : ">u4", 1, &count, data, NULL),
             SPDL_OK);
    CHECK_EQ(npz_writer_finish(w, NULL), SPDL_OK);
    npz_writer_close(w);
    REQUIRE(spdl_npz_load(&bundle, make_path("large.npz"), NULL) == SPDL_OK);
    got = (const uint32_t *)bundle->arrays[0].data;
    CHECK(got[0] == 0x04030201 && got[1] == 0 && got[count - 1] == 0x04030201);
    spdl_npz_bundle_free(bundle);
    free(data);
    remove_last("large.npz");
}

/* A directory behind 4 GiB, with one array before it. */
static void directory_over_4_gib(void) {
    const array info = type("|u1", 1, 4, 0);
    npz_writer *w = create(make_path("far.npz"));
    spdl_npz *npz;
    write_one(w, "first", &info, "abcd");
    w->at = (uint64_t)1 << 32; /* a hole */
    REQUIRE(fseeko(w->file, (off_t)w->at, SEEK_SET) == 0);
    write_one(w, "second", &info, "efgh");
    finish(w);
    npz = reopen(make_path("far.npz"), 2);
    check_array(npz, "first", "|u1", "abcd", 4);
    check_array(npz, "second", "|u1", "efgh", 4);
    spdl_npz_close(npz);
    remove_last("far.npz");
}

TEST_TABLE(npz_write) {
    TEST_CASE(every_kind), TEST_CASE(every_shape), TEST_CASE(alignments), TEST_CASE(one_npy),
    TEST_CASE(takes_its_place_at_once), TEST_CASE(writers_of_one_path), TEST_CASE(paths_in_utf8),
    TEST_CASE(what_cannot_be_written),
    TEST_CASE(names_that_are_there_twice), TEST_CASE(calls_at_the_wrong_time),
    TEST_CASE(path_that_is_a_folder), TEST_CASE(disk_that_is_full),
    TEST_CASE(names_that_end_in_npy), TEST_CASE(names_in_utf8), TEST_CASE(names_in_any_order),
    TEST_CASE(many_members), TEST_CASE(array_over_4_gib), TEST_CASE(directory_over_4_gib),
    TEST_CASE(large_arrays_are_copied), TEST_END
};
