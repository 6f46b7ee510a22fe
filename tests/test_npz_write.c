/* What the writer of .npz and .npy makes: it is read back here, its bytes are looked at, and where
   there is a Python with NumPy that reads it too. Files lie in a folder of /tmp that is removed. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "test.h"

#include <dirent.h>
#include <sys/resource.h>

static char folder[] = "/tmp/spdl_write_XXXXXX";
static bool folder_made;

static const char *make_path(const char *name) {
    static char path[4][200];
    static int turn;
    turn = (turn + 1) % 4;
    if (!folder_made) REQUIRE(mkdtemp(folder) != NULL);
    folder_made = true;
    snprintf(path[turn], sizeof path[turn], "%s/%s", folder, name);
    return path[turn];
}

/* How many files there are in the folder. */
static int files(void) {
    DIR *all = opendir(folder);
    int count = -2; /* . and .. */
    REQUIRE(all != NULL);
    while (readdir(all) != NULL) ++count;
    closedir(all);
    return count;
}

/* Removes a file, which must be the only one: no temporary file is left. */
static void remove_last(const char *name) {
    CHECK_EQ(files(), name ? 1 : 0);
    if (name) CHECK(remove(make_path(name)) == 0);
    CHECK(rmdir(folder) == 0);
    memset(folder + sizeof folder - 7, 'X', 6);
    folder_made = false;
}

static spdl_npz_writer *create(const char *path, const spdl_npz_write_desc *with) {
    spdl_npz_writer *w = NULL;
    spdl_error error = { 0 };
    spdl_npz_write_desc desc = { 0 };
    if (with) desc = *with;
    desc.error = &error;
    if (!CHECK_EQ(spdl_npz_create(&w, path, &desc), SPDL_OK)) {
        fprintf(stderr, "%s\n", error.text);
        test_leave();
    }
    return w;
}

static void finish(spdl_npz_writer *w) {
    spdl_error error = { 0 };
    if (!CHECK_EQ(spdl_npz_finish(w, &error), SPDL_OK)) fprintf(stderr, "%s\n", error.text);
    spdl_npz_writer_close(w);
}

static spdl_npy_info type(char kind, uint64_t itemsize, int ndim, uint64_t rows,
                          uint64_t columns) {
    spdl_npy_info info;
    memset(&info, 0, sizeof info);
    info.kind = kind;
    info.itemsize = itemsize;
    info.ndim = ndim;
    info.shape[0] = rows;
    info.shape[1] = columns;
    return info;
}

static void fill(uint8_t *to, size_t bytes, unsigned seed) {
    for (size_t i = 0; i < bytes; ++i) to[i] = (uint8_t)(i * 7 + (i >> 8) + seed);
}

static void write_one(spdl_npz_writer *w, const char *name, const spdl_npy_info *info,
                      const void *data) {
    spdl_error error = { 0 };
    if (!CHECK_EQ(spdl_npz_write(w, name, info, data, &error), SPDL_OK))
        fprintf(stderr, "%s\n", error.text);
}

/* Opens what was written; all of it must be there, and right. */
static spdl_npz *reopen(const char *path, size_t count) {
    spdl_npz *npz = NULL;
    spdl_error error = { 0 };
    spdl_npz_desc desc = { 0 };
    desc.error = &error;
    if (!CHECK_EQ(spdl_npz_open_file(&npz, path, &desc), SPDL_OK)) {
        fprintf(stderr, "%s\n", error.text);
        test_leave();
    }
    CHECK_EQ(spdl_npz_count(npz), count);
    for (size_t i = 0; i < spdl_npz_count(npz); ++i)
        if (!CHECK_EQ(spdl_npz_check(npz, i, &error), SPDL_OK)) fprintf(stderr, "%s\n", error.text);
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
    CHECK_STR(info.descr, descr);
    CHECK_EQ(info.bytes, bytes);
    CHECK_EQ(info.header_bytes % 64, 0);
    CHECK_EQ(spdl_npz_read(npz, index, data, bytes, NULL), SPDL_OK);
    if (!CHECK(bytes == 0 || memcmp(data, expected, bytes) == 0)) fprintf(stderr, "%s\n", name);
    free(data);
}

/* ============================================================================================= */

static const struct {
    char kind;
    uint64_t itemsize;
    const char *little, *big;
} kinds[] = { { 'b', 1, "|b1", "|b1" },   { 'i', 1, "|i1", "|i1" },   { 'i', 2, "<i2", ">i2" },
              { 'u', 4, "<u4", ">u4" },   { 'u', 8, "<u8", ">u8" },   { 'f', 2, "<f2", ">f2" },
              { 'f', 4, "<f4", ">f4" },   { 'f', 8, "<f8", ">f8" },   { 'f', 16, "<f16", ">f16" },
              { 'c', 8, "<c8", ">c8" },   { 'c', 16, "<c16", ">c16" }, { 'S', 5, "|S5", "|S5" },
              { 'U', 12, "<U3", ">U3" },  { 'V', 3, "|V3", "|V3" } };
enum { KINDS = sizeof kinds / sizeof kinds[0] };

static void every_kind(void) {
    uint8_t data[16 * 12];
    spdl_npz_writer *w = create(make_path("kinds.npz"), NULL);
    spdl_npz *npz;
    char name[20];
    fill(data, sizeof data, 0);
    for (int order = 0; order < 3; ++order) {
        for (size_t i = 0; i < KINDS; ++i) {
            spdl_npy_info info = type(kinds[i].kind, kinds[i].itemsize, 2, 3, 4);
            info.byte_order = "\0<>"[order];
            info.fortran_order = i % 2 == 0;
            snprintf(name, sizeof name, "a%d_%d", order, (int)i);
            write_one(w, name, &info, data);
        }
    }
    finish(w);
    npz = reopen(make_path("kinds.npz"), 3 * KINDS);
    for (int order = 0; order < 3; ++order) {
        for (size_t i = 0; i < KINDS; ++i) {
            const char host = order == 0 ? spdl__npy_host_order() : "\0<>"[order];
            const void *view = NULL;
            bool aligned = false;
            spdl_npy_info info;
            snprintf(name, sizeof name, "a%d_%d", order, (int)i);
            CHECK_STR(spdl_npz_name(npz, (size_t)order * KINDS + i), name);
            check_array(npz, name, host == '<' ? kinds[i].little : kinds[i].big, data,
                        12 * (size_t)kinds[i].itemsize);
            REQUIRE(spdl_npz_info(npz, index_of(npz, name), &info, NULL) == SPDL_OK);
            CHECK_EQ(info.fortran_order, i % 2 == 0);
            CHECK_EQ(spdl_npz_view(npz, index_of(npz, name), &view, &aligned, NULL), SPDL_OK);
            CHECK(aligned);
        }
    }
    spdl_npz_close(npz);
    remove_last("kinds.npz");
}

static void types_by_descr(void) {
    static const char *const descrs[] = { "<M8[ns]", "<m8[25s]", "[('x', '<f4'), ('y', '|S4')]",
                                          "[('gr\xc3\xb6\xc3\x9f\x65', '<f8')]" };
    spdl_npz_writer *w = create(make_path("descr.npz"), NULL);
    uint64_t data[3] = { 1, 2, 3 };
    spdl_npz *npz;
    for (int i = 0; i < 4; ++i) {
        spdl_npy_info info = type(0, 0, 1, 3, 0);
        strcpy(info.descr, descrs[i]);
        write_one(w, (const char *[]){ "a", "b", "c", "d" }[i], &info, data);
    }
    finish(w);
    npz = reopen(make_path("descr.npz"), 4);
    for (int i = 0; i < 4; ++i) {
        spdl_npy_info info;
        check_array(npz, (const char *[]){ "a", "b", "c", "d" }[i], descrs[i], data, 24);
        REQUIRE(spdl_npz_info(npz, (size_t)i, &info, NULL) == SPDL_OK);
        CHECK_EQ(info.version, i == 3 ? 3 : 1);
    }
    spdl_npz_close(npz);
    remove_last("descr.npz");
}

static void every_shape(void) {
    uint8_t data[24];
    spdl_npz_writer *w = create(make_path("shapes.npz"), NULL);
    spdl_npy_info info = type('u', 1, 64, 2, 3), told;
    spdl_npz *npz;
    fill(data, sizeof data, 1);
    for (int i = 2; i < 64; ++i) info.shape[i] = 1;
    info.shape[63] = 4;
    write_one(w, "dims64", &info, data);
    info = type('u', 1, 0, 0, 0);
    write_one(w, "zero_d", &info, data);
    info = type('f', 8, 1, 0, 0);
    write_one(w, "empty", &info, NULL);
    info = type('f', 8, 2, 3, 0);
    write_one(w, "empty_too", &info, data);
    info = type('U', 0, 1, 7, 0);
    write_one(w, "nothing", &info, NULL);
    finish(w);
    npz = reopen(make_path("shapes.npz"), 5);
    check_array(npz, "dims64", "|u1", data, 24);
    check_array(npz, "zero_d", "|u1", data, 1);
    check_array(npz, "empty", spdl__npy_host_order() == '<' ? "<f8" : ">f8", data, 0);
    REQUIRE(spdl_npz_info(npz, index_of(npz, "dims64"), &told, NULL) == SPDL_OK);
    CHECK(told.ndim == 64 && told.shape[0] == 2 && told.shape[1] == 3 && told.shape[63] == 4);
    REQUIRE(spdl_npz_info(npz, index_of(npz, "nothing"), &told, NULL) == SPDL_OK);
    CHECK(told.kind == 'U' && told.count == 7 && told.bytes == 0);
    spdl_npz_close(npz);
    remove_last("shapes.npz");
}

static void alignments(void) {
    for (size_t align = 1; align <= 32768; align *= 2) {
        spdl_npz_write_desc desc = { 0 };
        uint8_t data[100];
        spdl_npz_member member;
        spdl_npz_writer *w;
        spdl_npz *npz;
        char name[300];
        desc.align = align;
        w = create(make_path("align.npz"), &desc);
        fill(data, sizeof data, 2);
        for (size_t i = 0; i < 20; ++i) {
            const spdl_npy_info info = type('u', 1, 1, i * 5, 0);
            memset(name, 'n', sizeof name);
            name[i * i / 2 + 1] = 0;
            name[0] = (char)('a' + i);
            write_one(w, name, &info, data);
        }
        finish(w);
        npz = reopen(make_path("align.npz"), 20);
        for (size_t i = 0; i < 20; ++i) {
            const uint64_t name_bytes = i * i / 2 + 1 + 4;
            REQUIRE(spdl_npz_stat(npz, i, &member) == SPDL_OK);
            spdl__npz_reader *r = (spdl__npz_reader *)malloc(sizeof *r);
            REQUIRE(r != NULL);
            spdl__npz_init_reader(r, npz, NULL);
            REQUIRE(spdl__npz_locate(r, i));
            CHECK_EQ((r->payload + member.bytes - i * 5) % align, 0);
            CHECK(r->payload - member.file_offset < 30 + name_bytes + 6 + align);
            spdl__npz_fini_reader(r);
            free(r);
        }
        spdl_npz_close(npz);
        remove_last("align.npz");
    }
}

static void in_pieces(void) {
    static uint8_t data[300000];
    const spdl_npy_info info = type('i', 4, 2, 75, 1000);
    spdl_npz_writer *w = create(make_path("pieces.npz"), NULL);
    spdl_error error = { 0 };
    uint64_t state = test_seed();
    spdl_npz *npz;
    fill(data, sizeof data, 3);
    CHECK_EQ(spdl_npz_append(w, data, 1, &error), SPDL_E_INVALID);
    CHECK_EQ(spdl_npz_begin(w, "a", &info, &error), SPDL_OK);
    for (size_t at = 0, piece; at < sizeof data; at += piece) {
        piece = (size_t)(test_random(&state) % 20000);
        if (piece > sizeof data - at) piece = sizeof data - at;
        CHECK_EQ(spdl_npz_append(w, data + at, piece, &error), SPDL_OK);
    }
    CHECK_EQ(spdl_npz_append(w, data, 1, &error), SPDL_E_INVALID);
    CHECK(strstr(error.text, "more data than the shape says") != NULL);
    CHECK_EQ(spdl_npz_begin(w, "b", &info, &error), SPDL_OK);
    CHECK_EQ(spdl_npz_append(w, data, 1000, &error), SPDL_OK);
    CHECK_EQ(spdl_npz_begin(w, "c", &info, &error), SPDL_E_INVALID);
    CHECK(strstr(error.text, "the last array lacks data") != NULL);
    CHECK_EQ(spdl_npz_finish(w, &error), SPDL_E_INVALID);
    CHECK_EQ(spdl_npz_append(w, data + 1000, sizeof data - 1000, &error), SPDL_OK);
    finish(w);
    npz = reopen(make_path("pieces.npz"), 2);
    check_array(npz, "a", spdl__npy_host_order() == '<' ? "<i4" : ">i4", data, sizeof data);
    check_array(npz, "b", spdl__npy_host_order() == '<' ? "<i4" : ">i4", data, sizeof data);
    spdl_npz_close(npz);
    remove_last("pieces.npz");
}

static void one_npy(void) {
    uint16_t data[12];
    const spdl_npy_info info = type('u', 2, 2, 3, 4);
    spdl_npz_write_desc desc = { 0 };
    spdl_npz_writer *w;
    spdl_error error = { 0 };
    spdl_npz *npz;
    fill((uint8_t *)data, sizeof data, 4);
    desc.npy = desc.sync = true;
    w = create(make_path("one.npy"), &desc);
    CHECK_EQ(spdl_npz_finish(w, &error), SPDL_E_INVALID);
    CHECK(strstr(error.text, "no array was written") != NULL);
    write_one(w, "any", &info, data);
    CHECK_EQ(spdl_npz_write(w, "other", &info, data, &error), SPDL_E_INVALID);
    CHECK(strstr(error.text, "a .npy file holds one array") != NULL);
    finish(w);
    npz = reopen(make_path("one.npy"), 1);
    check_array(npz, "arr_0", spdl__npy_host_order() == '<' ? "<u2" : ">u2", data, 24);
    spdl_npz_close(npz);
    remove_last("one.npy");
}

/* The old file is there, whole, until the new one takes its place; what fails leaves nothing. */
static void takes_its_place_at_once(void) {
    const spdl_npy_info info = type('u', 1, 1, 4, 0);
    spdl_npz_writer *w = create(make_path("same.npz"), NULL);
    spdl_npz *npz;
    write_one(w, "old", &info, "1234");
    CHECK_EQ(files(), 1); /* the temporary one */
    finish(w);
    w = create(make_path("same.npz"), NULL);
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
    w = create(make_path("same.npz"), NULL);
    write_one(w, "other", &info, "5678");
    spdl_npz_writer_close(w); /* without finish */
    npz = reopen(make_path("same.npz"), 1);
    check_array(npz, "new", "|u1", "5678", 4);
    spdl_npz_close(npz);
    remove_last("same.npz");
}

static void refused(const spdl_npy_info *info, const char *name, spdl_result result,
                    const char *part) {
    spdl_npz_writer *w = create(make_path("refused.npz"), NULL);
    const spdl_npy_info good = type('u', 1, 1, 4, 0);
    spdl_error error = { 0 };
    spdl_npz *npz;
    write_one(w, "there", &good, "1234");
    if (!CHECK(spdl_npz_write(w, name, info, "12345678", &error) == result &&
               strstr(error.text, part) != NULL))
        fprintf(stderr, "expected \"%s\", got \"%s\"\n", part, error.text);
    CHECK_EQ(spdl_npz_begin(w, name, info, NULL), result);
    write_one(w, "after", &good, "5678"); /* it goes on */
    finish(w);
    npz = reopen(make_path("refused.npz"), 2);
    check_array(npz, "after", "|u1", "5678", 4);
    spdl_npz_close(npz);
    remove_last("refused.npz");
}

static void what_cannot_be_written(void) {
    spdl_npy_info info = type('f', 3, 1, 1, 0);
    char *name = (char *)malloc(70001);
    REQUIRE(name != NULL);
    memset(name, 'n', 70000);
    name[70000] = 0;
    refused(&info, "a", SPDL_E_UNSUPPORTED, "f3' is not known");
    info = type('O', 8, 1, 1, 0);
    refused(&info, "a", SPDL_E_UNSUPPORTED, "object arrays");
    info = type('u', 1, 65, 1, 0);
    refused(&info, "a", SPDL_E_INVALID, "ndim or descr");
    info.ndim = -1;
    refused(&info, "a", SPDL_E_INVALID, "ndim or descr");
    info = type('u', 8, 2, UINT64_MAX / 2, UINT64_MAX / 2);
    refused(&info, "a", SPDL_E_INVALID, "overflows");
    info = type('u', 1, 1, 1, 0);
    refused(&info, "there", SPDL_E_INVALID, "there is one of this name");
    refused(&info, name, SPDL_E_LIMIT, "a name too long");
    strcpy(info.descr, "<f4', 'x");
    refused(&info, "a", SPDL_E_INVALID, "at byte");
    memset(info.descr, 'x', sizeof info.descr);
    refused(&info, "a", SPDL_E_INVALID, "ndim or descr");
    for (size_t i = 0; i + 14 < sizeof info.descr; i += 14) /* as info has it of many fields */
        memcpy(info.descr + i, i == 0 ? "[('a', '<f4')," : " ('a', '<f4'),", 14);
    info.descr[sizeof info.descr - 1] = 0;
    refused(&info, "a", SPDL_E_INVALID, "member 'a': its descr is cut off");
    free(name);
}

static void arguments_that_are_wrong(void) {
    spdl_npz_writer *w = NULL;
    spdl_error error = { 0 };
    spdl_npz_write_desc desc = { 0 };
    const spdl_npy_info info = type('u', 1, 1, 4, 0);
    desc.error = &error;
    CHECK_EQ(spdl_npz_create(NULL, "x", &desc), SPDL_E_INVALID);
    CHECK_EQ(spdl_npz_create(&w, NULL, &desc), SPDL_E_INVALID);
    desc.align = 3;
    CHECK_EQ(spdl_npz_create(&w, make_path("x"), &desc), SPDL_E_INVALID);
    desc.align = 65536;
    CHECK_EQ(spdl_npz_create(&w, make_path("x"), &desc), SPDL_E_INVALID);
    desc.align = 0;
    CHECK_EQ(spdl_npz_create(&w, "/nowhere/x.npz", &desc), SPDL_E_IO);
    CHECK_STR(error.text, "/nowhere/x.npz: No such file or directory");
    CHECK(w == NULL);
    w = create(make_path("x.npz"), NULL);
    CHECK_EQ(spdl_npz_write(NULL, "a", &info, "1234", &error), SPDL_E_INVALID);
    CHECK_EQ(spdl_npz_write(w, NULL, &info, "1234", &error), SPDL_E_INVALID);
    CHECK_EQ(spdl_npz_write(w, "a", NULL, "1234", &error), SPDL_E_INVALID);
    CHECK_EQ(spdl_npz_begin(w, "a", NULL, &error), SPDL_E_INVALID);
    CHECK_EQ(spdl_npz_append(NULL, "a", 1, &error), SPDL_E_INVALID);
    CHECK_EQ(spdl_npz_append(w, NULL, 1, &error), SPDL_E_INVALID);
    CHECK_EQ(spdl_npz_finish(NULL, &error), SPDL_E_INVALID);
    CHECK_EQ(spdl_npz_write(w, "a", &info, NULL, &error), SPDL_E_INVALID);
    CHECK(strstr(error.text, "its data is NULL") != NULL);
    CHECK_EQ(spdl_npz_append(w, "1234", 4, &error), SPDL_OK);
    CHECK_EQ(spdl_npz_finish(w, &error), SPDL_OK);
    CHECK_EQ(spdl_npz_finish(w, &error), SPDL_E_INVALID);
    CHECK(strstr(error.text, "the writer has finished") != NULL);
    CHECK_EQ(spdl_npz_write(w, "b", &info, "1234", &error), SPDL_E_INVALID);
    spdl_npz_writer_close(w);
    spdl_npz_writer_close(NULL);
    remove_last("x.npz");
}

/* A disk that gets full: a limit on the size of files stands for it. */
static void disk_that_is_full(void) {
    static uint8_t data[200000];
    const spdl_npy_info info = type('u', 1, 1, sizeof data, 0);
    const struct rlimit limit = { 100000, RLIM_INFINITY };
    spdl_error error = { 0 };
    spdl_npz_writer *w;
    make_path("x");
    signal(SIGXFSZ, SIG_IGN);
    REQUIRE(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    w = create(make_path("full.npz"), NULL);
    CHECK_EQ(spdl_npz_write(w, "a", &info, data, &error), SPDL_E_IO);
    CHECK(strstr(error.text, "full.npz: ") != NULL);
    CHECK_EQ(spdl_npz_finish(w, &error), SPDL_E_INVALID);
    CHECK(strstr(error.text, "the writer has failed before") != NULL);
    spdl_npz_writer_close(w);
    remove_last(NULL);
}

/* Each array is found by the name that it has, also where one is that of another with ".npy". */
static void names_that_end_in_npy(void) {
    static const char *const names[] = { "x.npy", "x", "x.npy.npy", ".npy", "" };
    const spdl_npy_info info = type('u', 1, 1, 4, 0);
    spdl_npz_writer *w = create(make_path("names.npz"), NULL);
    spdl_npz_bundle *bundle = NULL;
    spdl_npz *npz;
    for (size_t i = 0; i < 5; ++i) write_one(w, names[i], &info, "1234\0005678" + i);
    finish(w);
    npz = reopen(make_path("names.npz"), 5);
    REQUIRE(spdl_npz_load(&bundle, make_path("names.npz"), NULL) == SPDL_OK);
    for (size_t i = 0; i < 5; ++i) {
        CHECK_STR(spdl_npz_name(npz, i), names[i]);
        CHECK_EQ(index_of(npz, names[i]), i);
        check_array(npz, names[i], "|u1", "1234\0005678" + i, 4);
        CHECK(spdl_npz_bundle_find(bundle, names[i]) == &bundle->arrays[i]);
    }
    CHECK_EQ(index_of(npz, "x.npy.npy.npy"), 2);
    spdl_npz_bundle_free(bundle);
    spdl_npz_close(npz);
    remove_last("names.npz");
}

/* NumPy cannot even open an archive that says UTF-8 and holds something else. */
static void names_that_are_not_utf8(void) {
    static const char *const bad[] = { "\xe4", "a\xc3", "\xc0\x80", "\xed\xa0\x80", "\xff",
                                       "\xf4\x90\x80\x80", "\xe2\x82x", "\x80" };
    static const char *const good[] = { "\xc3\xa4", "\xe6\x95\xb0", "\xf0\x9f\x8e\xb2",
                                        "\xed\x9f\xbf", "\xf4\x8f\xbf\xbf" };
    const spdl_npy_info info = type('u', 1, 1, 4, 0);
    spdl_npz_writer *w;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; ++i)
        refused(&info, bad[i], SPDL_E_INVALID, "its name is not UTF-8");
    w = create(make_path("utf8.npz"), NULL);
    for (size_t i = 0; i < sizeof good / sizeof good[0]; ++i) write_one(w, good[i], &info, "1234");
    finish(w);
    spdl_npz_close(reopen(make_path("utf8.npz"), sizeof good / sizeof good[0]));
    remove_last("utf8.npz");
}

static const char *any_name(unsigned number) {
    static char name[60];
    memset(name, 'n', sizeof name);
    snprintf(name + number % 40, 20, "%u", number);
    return name;
}

/* Names of all lengths in no order, some for the second time: those are refused, whenever. */
static void names_in_any_order(void) {
    enum { COUNT = 2000 };
    static unsigned at[4 * COUNT]; /* 0: not written, else the element + 1 */
    spdl_npz_writer *w = create(make_path("names.npz"), NULL);
    const spdl_npy_info info = type('u', 4, 0, 0, 0);
    spdl_error error = { 0 };
    uint64_t state = test_seed();
    unsigned count = 0, got = 0;
    spdl_npz *npz;
    memset(at, 0, sizeof at);
    for (unsigned i = 0; i < COUNT; ++i) {
        const unsigned number = (unsigned)(test_random(&state) % (4 * COUNT));
        const spdl_result result = spdl_npz_write(w, any_name(number), &info, &i, &error);
        CHECK_EQ(result, at[number] ? SPDL_E_INVALID : SPDL_OK);
        if (at[number]) CHECK(strstr(error.text, "there is one of this name") != NULL);
        if (at[number]) continue;
        at[number] = i + 1;
        ++count;
    }
    for (unsigned i = 0; i < 4 * COUNT; ++i)
        if (at[i]) CHECK_EQ(spdl_npz_begin(w, any_name(i), &info, NULL), SPDL_E_INVALID);
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
    const spdl_npy_info info = type('u', 4, 0, 0, 0);
    for (size_t k = 0; k < 4; ++k) {
        spdl_npz_writer *w = create(make_path("many.npz"), NULL);
        spdl_npz *npz = NULL;
        char name[20];
        uint8_t *file;
        FILE *in;
        long size = 0;
        for (unsigned i = 0; i < counts[k]; ++i) {
            snprintf(name, sizeof name, "m%u", i);
            REQUIRE(spdl_npz_write(w, name, &info, &i, NULL) == SPDL_OK);
        }
        finish(w);
        REQUIRE(spdl_npz_open_file(&npz, make_path("many.npz"), NULL) == SPDL_OK);
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

/* An array of 5 GiB, and another after it: a hole in the file stands for its data. */
static void array_over_4_gib(void) {
    const uint64_t large = (uint64_t)5 << 30;
    const spdl_npy_info info = type('u', 1, 1, large, 0), small = type('u', 1, 1, 4, 0);
    spdl_npz_writer *w = create(make_path("large.npz"), NULL);
    const void *view = NULL;
    bool aligned = false;
    spdl_npz_member member;
    spdl_npz *npz = NULL;
    uint8_t got[4];
    REQUIRE(spdl_npz_begin(w, "large", &info, NULL) == SPDL_OK);
    w->at += large - 4;
    w->left = 4;
    REQUIRE(spdl_npz_append(w, "last", 4, NULL) == SPDL_OK);
    write_one(w, "after", &small, "1234");
    finish(w);
    REQUIRE(spdl_npz_open_file(&npz, make_path("large.npz"), NULL) == SPDL_OK);
    REQUIRE(spdl_npz_stat(npz, 0, &member) == SPDL_OK);
    CHECK_EQ(member.bytes, large + 128);
    CHECK_EQ(spdl_npz_read_rows(npz, 0, large - 4, 4, got, 4, NULL), SPDL_OK);
    CHECK(memcmp(got, "last", 4) == 0);
    REQUIRE(spdl_npz_view(npz, 0, &view, &aligned, NULL) == SPDL_OK);
    CHECK(aligned && memcmp((const uint8_t *)view + large - 4, "last", 4) == 0);
    REQUIRE(spdl_npz_stat(npz, 1, &member) == SPDL_OK);
    CHECK(member.file_offset > large);
    check_array(npz, "after", "|u1", "1234", 4);
    spdl_npz_close(npz);
    remove_last("large.npz");
}

/* ============================================================================================= */

typedef struct counting {
    long calls, fail_at, blocks;
} counting;

static void *counting_alloc(size_t bytes, size_t align, void *user) {
    counting *c = (counting *)user;
    void *memory = NULL;
    if (++c->calls == c->fail_at || posix_memalign(&memory, align, bytes) != 0) return NULL;
    c->blocks++;
    return memory;
}

static void counting_free(void *memory, size_t bytes, void *user) {
    (void)bytes;
    ((counting *)user)->blocks--;
    free(memory);
}

/* Writes with an allocator that fails once; returns whether it did not come to that. */
static bool with_failing_allocation(long fail_at) {
    static uint8_t zeros[1 + 258 * 10];
    counting c = { 0, 0, 0 };
    spdl_npz_writer *w = NULL;
    spdl_error error = { 0 };
    spdl_npz_write_desc desc = { 0 };
    const spdl_npy_info info = type('u', 1, 1, sizeof zeros, 0);
    spdl_result result;
    char name[20];
    c.fail_at = fail_at;
    desc.error = &error;
    desc.allocator.alloc_fn = counting_alloc;
    desc.allocator.free_fn = counting_free;
    desc.allocator.user = &c;
    result = spdl_npz_create(&w, make_path("alloc.npz"), &desc);
    for (int i = 0; i < 70 && result == SPDL_OK; ++i) {
        snprintf(name, sizeof name, "a%d", i);
        result = spdl_npz_write(w, name, &info, zeros, &error);
    }
    if (result == SPDL_OK) result = spdl_npz_finish(w, &error);
    spdl_npz_writer_close(w);
    CHECK_EQ(c.blocks, 0);
    CHECK_EQ(result, c.calls >= fail_at ? SPDL_E_NOMEM : SPDL_OK);
    CHECK(result == SPDL_OK || strstr(error.text, "no memory") != NULL);
    CHECK_EQ(files(), result == SPDL_OK);
    return c.calls < fail_at;
}

static void every_allocation_fails(void) {
    long k = 1;
    make_path("x");
    while (!with_failing_allocation(k)) REQUIRE(++k < 500);
    CHECK(k > 70);
    remove_last("alloc.npz");
}

/* NumPy reads it and finds the same, where there is one. */
static void numpy_reads_it(void) {
    static uint8_t zeros[1 + 258 * 50];
    spdl_npz_write_desc desc = { 0 };
    spdl_npz_writer *w;
    spdl_npy_info info = type('u', 1, 1, sizeof zeros, 0);
    float table[6] = { 0, 1, 2, 3, 4, 5 };
    char command[900];
    if (system("python3 -c 'import numpy' 2>/dev/null") != 0) TEST_SKIP("needs Python with NumPy");
    w = create(make_path("numpy.npz"), &desc);
    write_one(w, "zeros", &info, zeros);
    info = type('f', 4, 2, 2, 3);
    info.fortran_order = true;
    write_one(w, "\xc3\xa4", &info, table);
    info = type(0, 0, 1, 3, 0);
    strcpy(info.descr, "[('gr\xc3\xb6\xc3\x9f\x65', '<f4'), ('s', '|S4')]");
    write_one(w, "struct", &info, table);
    finish(w);
    desc.npy = true;
    w = create(make_path("numpy.npy"), &desc);
    info = type('f', 4, 2, 2, 3);
    write_one(w, "x", &info, table);
    finish(w);
    snprintf(command, sizeof command, "python3 -c \"import numpy as np\n"
             "f = np.load('%s')\n"
             "assert sorted(f.files) == ['struct', 'zeros', '\xc3\xa4'], f.files\n"
             "assert f['zeros'].shape == (%d,) and not f['zeros'].any()\n"
             "t = f['\xc3\xa4']\n"
             "assert t.flags.f_contiguous and t.tolist() == [[0, 2, 4], [1, 3, 5]], t\n"
             "s = f['struct']\n"
             "assert s.dtype.names == ('gr\xc3\xb6\xc3\x9f\x65', 's')\n"
             "assert s['gr\xc3\xb6\xc3\x9f\x65'].tolist() == [0, 2, 4], s\n"
             "assert np.load('%s', mmap_mode='r').tolist() == [[0, 1, 2], [3, 4, 5]]\n"
             "\"", make_path("numpy.npz"), (int)sizeof zeros, make_path("numpy.npy"));
    CHECK_EQ(system(command), 0);
    CHECK(remove(make_path("numpy.npy")) == 0);
    remove_last("numpy.npz");
}

TEST_TABLE(npz_write) {
    TEST_CASE(every_kind), TEST_CASE(types_by_descr), TEST_CASE(every_shape),
    TEST_CASE(alignments), TEST_CASE(in_pieces), TEST_CASE(one_npy),
    TEST_CASE(takes_its_place_at_once), TEST_CASE(what_cannot_be_written),
    TEST_CASE(arguments_that_are_wrong), TEST_CASE(disk_that_is_full),
    TEST_CASE(names_that_end_in_npy), TEST_CASE(names_that_are_not_utf8),
    TEST_CASE(names_in_any_order), TEST_CASE(many_members),
    TEST_CASE(array_over_4_gib), TEST_CASE(every_allocation_fails), TEST_CASE(numpy_reads_it),
    TEST_END
};
