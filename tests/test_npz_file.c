/* .npz and .npy in files that are not read at once: here every file counts as a large one, and its
   tail is read in small steps. Also what is asked for beyond reading one array: rows, other
   byte and index orders, many arrays, whole files, a row of a pipeline. The fixtures of tests/data
   are read from memory, too: both ways must agree about everything. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define SPDL__NPZ_SMALL_FILE 0
#define SPDL__ZIP_TAIL_BYTES 64
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "test.h"
#include "zip.h"

#include "../examples/npz_writer.h"

static const char *const fixtures[] = {
    "big_endian.npy",    "big_endian.npz",          "descriptors.npz",       "dtypes_deflated.npz",
    "dtypes_stored.npz", "fortran.npy",             "methods.npz",           "names.npz",
    "none.npz",          "object.npy",              "object.npz",            "shapes_deflated.npz",
    "shapes_stored.npz", "structured_deflated.npz", "structured_stored.npz", "unicode_fields.npy",
    "version1.npy",      "version2.npy",            "version3.npy",          "streams.npz"
};
enum { FIXTURES = sizeof fixtures / sizeof fixtures[0] };

static const char *fixture_path(const char *name) {
    static char path[512];
    const char *end = strrchr(__FILE__, '/');
    const int length = end != NULL ? (int)(end - __FILE__ + 1) : 0;
    snprintf(path, sizeof path, "%.*sdata/%s", length, __FILE__, name);
    return path;
}

static uint8_t *read_file(const char *path, size_t *bytes) {
    FILE *in = fopen(path, "rb");
    uint8_t *data;
    REQUIRE(in != NULL && fseek(in, 0, SEEK_END) == 0);
    *bytes = (size_t)ftell(in);
    rewind(in);
    data = (uint8_t *)malloc(*bytes + 1);
    REQUIRE(data != NULL && fread(data, 1, *bytes, in) == *bytes);
    fclose(in);
    return data;
}

/* A file that is gone when the test is over. */
static char folder[64];

static const char *make_path(const char *name) {
    static char path[128];
    if (folder[0] == 0) {
        test_folder(folder, sizeof folder);
    }
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void write_file(const char *path, const void *data, size_t bytes) {
    FILE *out = fopen(path, "wb");
    REQUIRE(out != NULL && fwrite(data, 1, bytes, out) == bytes && fclose(out) == 0);
}

static void remove_files(const char *name) {
    remove(make_path(name));
    rmdir(folder);
}

static spdl_npz *open_path(const char *path) {
    spdl_npz *npz = NULL;
    spdl_error error = { 0 };
    spdl_npz_desc desc = { 0 };
    desc.error = &error;
    if (!CHECK_EQ(spdl_npz_open(&npz, path, &desc), SPDL_OK)) {
        fprintf(stderr, "%s\n", error.text);
        test_leave();
    }
    return npz;
}

/* Writes the arrays of a fixture as they are read: with the numbers of this machine. */
static void write_native(const char *path, const char *name) {
    spdl_npz_bundle *bundle = NULL;
    npz_writer *w = NULL;
    REQUIRE(spdl_npz_load(&bundle, fixture_path(name), NULL) == SPDL_OK);
    REQUIRE(npz_writer_open(&w, path, NULL) == SPDL_OK);
    for (size_t i = 0; i < bundle->count; ++i) {
        const spdl_npz_array *a = &bundle->arrays[i];
        CHECK_EQ(npz_writer_add(w, a->name, a->info.dtype, a->info.ndim, a->info.shape,
                                     a->data, NULL), SPDL_OK);
    }
    CHECK_EQ(npz_writer_finish(w, NULL), SPDL_OK);
    npz_writer_close(w);
    spdl_npz_bundle_free(bundle);
}

static size_t index_of(const spdl_npz *npz, const char *name) {
    size_t index = 0;
    if (!CHECK(spdl_npz_find(npz, name, &index) == SPDL_OK)) fprintf(stderr, "%s\n", name);
    return index;
}

/* ============================================================================================= */
/* From a file as from memory */

/* Reads array `index` of both; says whether all came out the same, errors included. */
static bool same_array(const spdl_npz *a, const spdl_npz *b, size_t index) {
    spdl_npy_info info[2];
    spdl_error error[2];
    static uint8_t data[2][200000];
    spdl_result result[2];
    memset(info, 0, sizeof info);
    memset(error, 0, sizeof error);
    result[0] = spdl_npz_info(a, index, &info[0], &error[0]);
    result[1] = spdl_npz_info(b, index, &info[1], &error[1]);
    if (result[0] != result[1] || strcmp(error[0].text, error[1].text) != 0) return false;
    if (result[0] != SPDL_OK) return true;
    if (memcmp(&info[0], &info[1], sizeof info[0]) != 0) return false;
    result[0] = spdl_npz_read(a, index, data[0], sizeof data[0], &error[0]);
    result[1] = spdl_npz_read(b, index, data[1], sizeof data[1], &error[1]);
    if (result[0] != result[1] || strcmp(error[0].text, error[1].text) != 0) return false;
    return result[0] != SPDL_OK || memcmp(data[0], data[1], (size_t)info[0].bytes) == 0;
}

static bool same_archive(const char *path, const uint8_t *data, size_t bytes) {
    spdl_error error[2];
    spdl_npz *npz[2] = { NULL, NULL };
    spdl_npz_desc desc = { 0 };
    bool same;
    memset(error, 0, sizeof error);
    desc.error = &error[0];
    if (spdl_npz_open(&npz[0], path, &desc) != SPDL_OK) npz[0] = NULL;
    desc.error = &error[1];
    spdl_npz_open_memory(&npz[1], data, bytes, path, &desc);
    same = (npz[0] != NULL) == (npz[1] != NULL) && strcmp(error[0].text, error[1].text) == 0 &&
           spdl_npz_count(npz[0]) == spdl_npz_count(npz[1]);
    for (size_t i = 0; same && i < spdl_npz_count(npz[0]); ++i) {
        same = strcmp(spdl_npz_name(npz[0], i), spdl_npz_name(npz[1], i)) == 0 &&
               same_array(npz[0], npz[1], i);
    }
    if (!same) fprintf(stderr, "file:   %s\nmemory: %s\n", error[0].text, error[1].text);
    spdl_npz_close(npz[0]);
    spdl_npz_close(npz[1]);
    return same;
}

static void file_as_memory(void) {
    for (size_t i = 0; i < FIXTURES; ++i) {
        size_t bytes;
        uint8_t *data = read_file(fixture_path(fixtures[i]), &bytes);
        if (!CHECK(same_archive(fixture_path(fixtures[i]), data, bytes)))
            fprintf(stderr, "%s\n", fixtures[i]);
        free(data);
    }
}

/* Cut at every length, and one byte changed at a time; the head of every file is enough. */
static void put_byte(FILE *file, size_t at, uint8_t byte) {
    REQUIRE(fseek(file, (long)at, SEEK_SET) == 0 && fputc(byte, file) != EOF && fflush(file) == 0);
}

static void broken_file_as_memory(void) {
    static const char *const broken[] = { "version2.npy", "names.npz", "descriptors.npz",
                                          "shapes_deflated.npz" };
    char path[128];
    strcpy(path, make_path("broken"));
    for (size_t i = 0; i < sizeof broken / sizeof broken[0]; ++i) {
        size_t bytes;
        uint8_t *data = read_file(fixture_path(broken[i]), &bytes);
        FILE *file;
        write_file(path, data, bytes);
        file = fopen(path, "r+b");
        REQUIRE(file != NULL);
        for (size_t at = 0; at < bytes; at += TEST_SANITIZED ? 7 : 1) {
            data[at] ^= 0x55;
            put_byte(file, at, data[at]);
            if (!CHECK(same_archive(path, data, bytes)))
                fprintf(stderr, "%s, byte %zu\n", broken[i], at);
            data[at] ^= 0x55;
            put_byte(file, at, data[at]);
        }
        for (size_t cut = bytes - 1; cut > 0; cut -= TEST_SANITIZED && cut > 7 ? 7 : 1) {
            REQUIRE(ftruncate(fileno(file), (off_t)cut) == 0);
            if (!CHECK(same_archive(path, data, cut)))
                fprintf(stderr, "%s cut at %zu\n", broken[i], cut);
        }
        fclose(file);
        free(data);
    }
    remove_files("broken");
}

/* Comments and ZIP64 records that reach out of the first look at the tail. */
static void long_tails(void) {
    size_t bytes, more;
    uint8_t *data = read_file(fixture_path("names.npz"), &bytes), *longer;
    longer = (uint8_t *)calloc(bytes + 70000, 1);
    REQUIRE(longer != NULL);
    memcpy(longer, data, bytes);
    for (more = 0; more < 65536; more = 3 * more + 1) {
        longer[bytes - 2] = (uint8_t)more;
        longer[bytes - 1] = (uint8_t)(more >> 8);
        write_file(make_path("tail"), longer, bytes + more);
        CHECK(same_archive(make_path("tail"), longer, bytes + more));
    }
    write_file(make_path("tail"), longer, bytes + 69000); /* no end can be found */
    CHECK(same_archive(make_path("tail"), longer, bytes + 69000));
    free(longer);
    free(data);
    remove_files("tail");
}

/* Views of numbers that have this order in the file. */
static void check_views(const char *path, char order) {
    spdl_npz *npz = open_path(path);
    for (size_t i = 0; i < spdl_npz_count(npz); ++i) {
        const void *view = NULL, *again = NULL;
        uint8_t data[1000];
        bool aligned = false;
        spdl_npy_info info;
        REQUIRE(spdl_npz_info(npz, i, &info, NULL) == SPDL_OK);
        REQUIRE(spdl_npz_read(npz, i, data, sizeof data, NULL) == SPDL_OK);
        if (info.dtype[0] != '|' && order != SPDL__NPY_HOST_ORDER) {
            CHECK_EQ(spdl_npz_view(npz, i, &view, NULL, NULL), SPDL_E_UNSUPPORTED);
            continue;
        }
        REQUIRE(spdl_npz_view(npz, i, &view, &aligned, NULL) == SPDL_OK);
        CHECK(memcmp(view, data, (size_t)info.bytes) == 0);
        CHECK_EQ(aligned, (uintptr_t)view % 64 == 0);
        CHECK(spdl_npz_view(npz, i, &again, NULL, NULL) == SPDL_OK && again == view);
    }
    spdl_npz_close(npz);
}

static void views_of_a_file(void) {
    check_views(fixture_path("dtypes_stored.npz"), '<');
    write_native(make_path("native"), "dtypes_stored.npz");
    check_views(make_path("native"), SPDL__NPY_HOST_ORDER);
    remove_files("native");
}

static void *view_all(void *npz) {
    const void *view = NULL;
    for (size_t i = 0; i < spdl_npz_count((spdl_npz *)npz); ++i)
        CHECK_EQ(spdl_npz_view((spdl_npz *)npz, i, &view, NULL, NULL), SPDL_OK);
    return NULL;
}

/* All make the mapping at the same time; one of them wins. */
static void views_by_several_threads(void) {
    write_native(make_path("native"), "dtypes_stored.npz");
    for (int round = 0; round < 50; ++round) {
        spdl_npz *npz = open_path(make_path("native"));
        test_thread thread[3];
        for (int i = 0; i < 3; ++i)
            REQUIRE(test_thread_start(&thread[i], view_all, npz));
        for (int i = 0; i < 3; ++i) test_join(thread[i]);
        spdl_npz_close(npz);
    }
    remove_files("native");
}

/* A file that is cut off while it is open makes every call fail and none crash, also after a view
   has mapped it. */
static void cut_while_open(void) {
    static const char *const cut[] = { "dtypes_stored.npz", "dtypes_deflated.npz", "version1.npy" };
    for (size_t k = 0; k < 3; ++k) {
        spdl_error error = { 0 };
        const void *view = NULL;
        uint8_t buffer[1000];
        spdl_npy_info info;
        size_t bytes;
        uint8_t *data = read_file(fixture_path(cut[k]), &bytes);
        spdl_npz *npz;
        write_file(make_path("cut"), data, bytes);
        npz = open_path(make_path("cut"));
        spdl_npz_view(npz, 0, &view, NULL, NULL);
        REQUIRE(truncate(make_path("cut"), 0) == 0);
        CHECK_EQ(spdl_npz_read(npz, 0, buffer, sizeof buffer, &error), SPDL_E_IO);
        CHECK(strstr(error.text, "at byte 0 of ") != NULL);
        CHECK(strstr(error.text, ": it ended while it was read") != NULL);
        CHECK_EQ(spdl_npz_info(npz, 0, &info, &error), SPDL_E_IO);
        CHECK_EQ(spdl_npz_view(npz, 0, &view, NULL, &error), SPDL_E_IO);
        CHECK_EQ(spdl_npz_read_rows(npz, 0, 0, 1, buffer, sizeof buffer, &error), SPDL_E_IO);
        spdl_npz_close(npz);
        free(data);
    }
    remove_files("cut");
}

/* Writes an archive of one stored array of `count` bytes, which `more` other ones follow in its
   member. Returns where the array begins. */
static size_t write_more(const char *name, unsigned count, unsigned more) {
    uint8_t file[30 + 5 + 128 + 2500 + 46 + 5 + 22], *at = file;
    const size_t usize = 128 + count + more, directory = 30 + 5 + usize;
    spdl__crc crc;
    REQUIRE(count + more <= 2500);
    memset(file, 0, sizeof file);
    spdl__crc_init(&crc);
    memset(file + 35, ' ', 128);
    snprintf((char *)file + 45, 118, "{'descr': '|u1', 'fortran_order': False, 'shape': (%u,), }",
             count);
    file[35 + strlen((char *)file + 35)] = ' ';
    memcpy(file + 35, "\x93NUMPY\1\0\x76\0", 10);
    for (unsigned i = 0; i < count + more; ++i) file[35 + 128 + i] = (uint8_t)(i * 7 + i / 256);
    at = put32(put32(at, 0x04034b50), 0);
    at = put32(put32(at + 2, 0), spdl__crc_add(&crc, 0, file + 35, usize));
    put32(put32(put32(at, usize), usize), 5);
    memcpy(file + 30, "a.npy", 5);
    at = file + directory;
    put32(at, 0x02014b50);
    memcpy(at + 6, file + 4, 26);
    memcpy(at + 46, "a.npy", 5);
    put32(put32(put32(at + 51, 0x06054b50) + 4, 1 << 16 | 1), 51);
    put32(at + 51 + 16, directory);
    write_file(make_path(name), file, directory + 51 + 22);
    return 35 + 128;
}

/* An array that lies before the cut is read, though what is read ahead is not all there. */
static void cut_behind_what_is_read(void) {
    uint8_t data[1200], again[1200];
    const size_t at = write_more("cut", 1200, 1300);
    spdl_npz *npz = open_path(make_path("cut"));
    spdl_error error = { 0 };
    spdl_npy_info info;
    CHECK_EQ(spdl_npz_read_rows(npz, 0, 0, 1200, data, 1200, NULL), SPDL_OK);
    CHECK(data[1] == 7 && data[1199] == (uint8_t)(1199 * 7 + 4)); /* from the window */
    CHECK_EQ(spdl_npz_read(npz, 0, again, 1200, &error), SPDL_OK);
    CHECK(memcmp(again, data, 1200) == 0);
    REQUIRE(truncate(make_path("cut"), (off_t)(at + 1200)) == 0);
    CHECK_EQ(spdl_npz_info(npz, 0, &info, &error), SPDL_OK);
    CHECK_EQ(spdl_npz_read_rows(npz, 0, 0, 1200, again, 1200, &error), SPDL_OK);
    CHECK(memcmp(again, data, 1200) == 0);
    CHECK_EQ(spdl_npz_read(npz, 0, again, 1200, &error), SPDL_E_IO); /* its CRC needs the rest */
    CHECK(strstr(error.text, "a': at byte 1363 of 2736: it ended") != NULL);
    REQUIRE(truncate(make_path("cut"), (off_t)(at + 100)) == 0); /* a few bytes behind the cut */
    CHECK_EQ(spdl_npz_read_rows(npz, 0, 1000, 10, again, 10, &error), SPDL_E_IO);
    CHECK(strstr(error.text, "it ended") != NULL);
    spdl_npz_close(npz);
    remove_files("cut");
}

/* A stored member of 5 GiB in a sparse file, made by hand: local header, array header, a hole, and
   a directory that needs ZIP64 for everything. */
static void member_over_4_gib(void) {
    const uint64_t count = (uint64_t)5 << 30;
    char text[129];
    uint8_t local[37] = "PK\3\4", entry[46 + 7 + 28] = "PK\1\2", end[98] = "PK\6\6";
    const uint64_t data_at = sizeof local + 128, directory = data_at + count + 3;
    spdl_npy_info info;
    spdl_error error = { 0 };
    const void *view = NULL;
    uint8_t got[4], *at;
    spdl_npz_desc desc = { 0 };
    spdl_npz *npz = NULL;
    FILE *out = fopen(make_path("large"), "wb");
    REQUIRE(out != NULL);
    memset(text, ' ', sizeof text);
    snprintf(text + 10, 119, "{'descr': '|u1', 'fortran_order': False, 'shape': (%llu,), }",
             (unsigned long long)count);
    text[strlen(text)] = ' ';
    memcpy(text, "\x93NUMPY\1\0\x76\0", 10);
    local[26] = 7;
    memcpy(local + 30, "big.npy", 7);
    at = entry + 20;
    memset(at, 0xff, 8);
    entry[28] = 7;
    entry[30] = 28;
    memset(entry + 42, 0xff, 4);
    memcpy(entry + 46, "big.npy\1\0\30", 10);
    at = put64(put64(entry + 57, 128 + count), 128 + count);
    put64(at, 0);
    put64(end + 4, 44);
    put64(put64(end + 24, 1), 1);
    put64(put64(end + 40, sizeof entry), directory);
    memcpy(end + 56, "PK\6\7", 4);
    put32(put64(end + 64, directory + sizeof entry), 1);
    memcpy(end + 76, "PK\5\6", 4);
    memset(end + 84, 0xff, 12);
    fwrite(local, 1, sizeof local, out);
    fwrite(text, 1, 128, out);
    fseeko(out, (off_t)(data_at + count - 4), SEEK_SET);
    fwrite("last...", 1, 7, out);
    fwrite(entry, 1, sizeof entry, out);
    fwrite(end, 1, sizeof end, out);
    REQUIRE(fclose(out) == 0);
    desc.error = &error;
    if (!CHECK(spdl_npz_open(&npz, make_path("large"), &desc) == SPDL_OK))
        fprintf(stderr, "%s\n", error.text);
    if (!CHECK_EQ(spdl_npz_info(npz, 0, &info, &error), SPDL_OK))
        fprintf(stderr, "%s\n", error.text);
    CHECK_EQ(info.bytes, count);
    CHECK_EQ(spdl_npz_read_rows(npz, 0, count - 4, 4, got, 4, &error), SPDL_OK);
    CHECK(memcmp(got, "last", 4) == 0);
    const spdl_result viewed = spdl_npz_view(npz, 0, &view, NULL, &error);
    if (sizeof(size_t) < 8) /* there are not so many addresses */
        CHECK(viewed < 0 && strstr(error.text, "big") != NULL);
    else if (CHECK_EQ(viewed, SPDL_OK))
        CHECK(memcmp((const uint8_t *)view + count - 4, "last", 4) == 0);
    spdl_npz_close(npz);
    remove_files("large");
}

/* A directory is limited, before anything of it is read. */
static void directory_over_1_gib(void) {
    uint8_t end[22] = "PK\5\6";
    spdl_error error = { 0 };
    spdl_npz_desc desc = { 0 };
    spdl_npz *npz = NULL;
    FILE *out = fopen(make_path("large"), "wb");
    put32(end + 12, ((uint64_t)1 << 30) + 1024);
    REQUIRE(out != NULL && fseeko(out, ((off_t)1 << 30) + 1024, SEEK_SET) == 0);
    REQUIRE(fwrite(end, 1, sizeof end, out) == sizeof end && fclose(out) == 0);
    desc.error = &error;
    CHECK_EQ(spdl_npz_open(&npz, make_path("large"), &desc), SPDL_E_LIMIT);
    CHECK(strstr(error.text, "large: a central directory of 1073742848 bytes") != NULL);
    remove_files("large");
}

/* A file that claims 8 EiB for its bytes: the sum of its arrays is more than there are addresses.
   Of the file systems there, that of memory takes it. */
static void sizes_beyond_memory(void) {
#if TEST_LINUX && defined(MFD_CLOEXEC)
    const uint64_t csize = (uint64_t)1 << 53, directory = csize + 64;
    uint8_t entry[71 + 56 + 20 + 22] = "PK\1\2";
    spdl_error error = { 0 };
    spdl_npz_desc desc = { 0 };
    spdl_npz_bundle *bundle = NULL;
    const int file = memfd_create("npz", MFD_CLOEXEC);
    char path[40];
    if (file < 0 || ftruncate(file, (off_t)(directory + sizeof entry)) != 0)
        TEST_SKIP("no file system takes so large a file");
    put16(entry + 10, 8);
    memset(entry + 20, 0xff, 8);
    put16(entry + 28, 5);
    put16(entry + 30, 20);
    memcpy(entry + 46, "a.npy\1\0\20", 9);
    put64(put64(entry + 55, csize * 1000), csize);
    memcpy(entry + 71, "PK\6\6\54", 5);
    put64(put64(put64(put64(entry + 95, 1), 1), 71), directory);
    memcpy(entry + 127, "PK\6\7", 4);
    put32(put64(entry + 135, directory + 71), 1);
    memcpy(entry + 147, "PK\5\6", 4);
    memset(entry + 155, 0xff, 12);
    REQUIRE(pwrite(file, entry, sizeof entry, (off_t)directory) == (ssize_t)sizeof entry);
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    desc.error = &error;
    CHECK_EQ(spdl_npz_load(&bundle, path, &desc), SPDL_E_LIMIT);
    if (!CHECK(strstr(error.text, "its arrays are larger than max_bytes") != NULL))
        fprintf(stderr, "%s\n", error.text);
    close(file);
#else
    TEST_SKIP("needs memfd_create");
#endif
}

/* ============================================================================================= */
/* Bytes that are not as they were */

/* An array of bytes: each machine can view it. */
static void crc_of_reads_alone(void) {
    enum { U1 = 5 };
    static const char *const files[] = { "dtypes_stored.npz", "dtypes_deflated.npz" };
    for (size_t k = 0; k < 2; ++k) {
        const void *view = NULL;
        spdl_error error = { 0 };
        spdl_npz_desc desc = { 0 };
        spdl_npz_bundle *bundle = NULL;
        uint8_t data[1000];
        size_t bytes;
        uint8_t *file = read_file(fixture_path(files[k]), &bytes);
        spdl_npz *npz = open_path(fixture_path(files[k]));
        file[npz->zip.members[U1].offset + 30 + 6 + 20 + (k == 0 ? 140 : 50)] ^= 1;
        spdl_npz_close(npz);
        desc.error = &error;
        REQUIRE(spdl_npz_open_memory(&npz, file, bytes, "m", &desc) == SPDL_OK);
        CHECK(spdl_npz_read(npz, U1, data, sizeof data, &error) < 0);
        if (k == 0) CHECK(strstr(error.text, "m: member 'u1': CRC-32 is ") != NULL);
        CHECK_EQ(spdl_npz_read(npz, 4, data, sizeof data, &error), SPDL_OK);
        if (k == 0) CHECK_EQ(spdl_npz_view(npz, U1, &view, NULL, &error), SPDL_OK);
        if (k == 0) CHECK_EQ(spdl_npz_read_rows(npz, U1, 0, 5, data, 15, NULL), SPDL_OK);
        CHECK(spdl_npz_load_memory(&bundle, file, bytes, "m", &desc) < 0);
        CHECK(bundle == NULL && strstr(error.text, "m: member 'u1': ") != NULL);
        desc.no_crc = true;
        if (k == 0) CHECK_EQ(spdl_npz_load_memory(&bundle, file, bytes, "m", &desc), SPDL_OK);
        spdl_npz_bundle_free(bundle);
        spdl_npz_close(npz);
        free(file);
    }
}

/* ============================================================================================= */
/* Orders */

/* Structured arrays are read as they are, whatever the byte order of their fields. */
static void number_order_in_structs(void) {
    spdl_npz *npz = open_path(fixture_path("structured_deflated.npz"));
    uint8_t data[60];
    spdl_npy_info info;
    spdl_error error = { 0 };
    CHECK_EQ(spdl_npz_info(npz, index_of(npz, "mixed"), &info, &error), SPDL_OK);
    CHECK_STR(info.dtype, "[('big', '>i4'), ('when', '<M8[us]'), ('text', '<U2')]");
    CHECK_EQ(spdl_npz_read(npz, index_of(npz, "mixed"), data, sizeof data, &error), SPDL_OK);
    CHECK(data[0] == 0 && data[1] == 7 && data[2] == 14 && data[3] == 21); /* its pattern */
    spdl_npz_close(npz);
}

/* Any shape and size of element: the turned array has the right element everywhere. */
static void index_order_of_any_shape(void) {
    uint64_t state = test_seed();
    for (int round = 0; round < 200; ++round) {
        static uint8_t from[300000], to[300000];
        static const uint64_t sizes[] = { 1, 2, 3, 4, 8, 16, 24 };
        uint64_t count = 1, index[6], rest, at, step;
        spdl_npy_info info;
        bool right = true;
        memset(&info, 0, sizeof info);
        info.ndim = 2 + (int)(test_random(&state) % 4);
        info.itemsize = sizes[test_random(&state) % 7];
        for (int i = 0; i < info.ndim; ++i) {
            info.shape[i] = 1 + test_random(&state) % (info.ndim == 2 ? 100 : 9);
            count *= info.shape[i];
        }
        if (count * info.itemsize > sizeof from) continue;
        info.count = count;
        for (uint64_t k = 0; k < count * info.itemsize; ++k)
            from[k] = (uint8_t)(k / info.itemsize * 31 + k / info.itemsize / 256 + k);
        spdl__npy_to_c_order(to, from, &info);
        for (uint64_t k = 0; k < count && right; ++k) {
            rest = k;
            for (int i = info.ndim - 1; i >= 0; --i) {
                index[i] = rest % info.shape[i];
                rest /= info.shape[i];
            }
            at = 0;
            step = 1;
            for (int i = 0; i < info.ndim; step *= info.shape[i++]) at += index[i] * step;
            right = memcmp(to + k * info.itemsize, from + at * info.itemsize,
                           (size_t)info.itemsize) == 0;
        }
        CHECK(right);
    }
}

static void ranges_of_rows(void) {
    spdl_npz *npz = open_path(fixture_path("shapes_stored.npz"));
    spdl_error error = { 0 };
    uint16_t rows[7], all[7];
    const size_t vector = index_of(npz, "vector");
    REQUIRE(spdl_npz_read(npz, vector, all, sizeof all, NULL) == SPDL_OK);
    for (uint64_t first = 0; first <= 7; ++first) {
        for (uint64_t count = 0; first + count <= 7; ++count) {
            CHECK_EQ(spdl_npz_read_rows(npz, vector, first, count, rows, 2 * (size_t)count, NULL),
                     SPDL_OK);
            CHECK(memcmp(rows, all + first, 2 * (size_t)count) == 0);
        }
    }
    CHECK_EQ(spdl_npz_read_rows(npz, vector, 0, 8, rows, sizeof rows, &error), SPDL_E_INVALID);
    CHECK(strstr(error.text, "no 8 rows from row 0; it has 7") != NULL);
    CHECK_EQ(spdl_npz_read_rows(npz, vector, 8, 0, rows, sizeof rows, &error), SPDL_E_INVALID);
    CHECK_EQ(spdl_npz_read_rows(npz, vector, UINT64_MAX, 2, rows, 14, &error), SPDL_E_INVALID);
    CHECK_EQ(spdl_npz_read_rows(npz, vector, 0, 7, rows, 13, &error), SPDL_E_INVALID);
    CHECK(strstr(error.text, "the rows have 14 bytes, the memory for them 13") != NULL);
    CHECK_EQ(spdl_npz_read_rows(npz, vector, 0, 7, NULL, 14, &error), SPDL_E_INVALID);
    CHECK_EQ(spdl_npz_read_rows(npz, index_of(npz, "zero_d"), 0, 1, rows, 14, NULL),
             SPDL_E_INVALID);
    CHECK_EQ(spdl_npz_read_rows(npz, index_of(npz, "empty"), 0, 0, NULL, 0, NULL), SPDL_OK);
    CHECK_EQ(spdl_npz_read_rows(npz, index_of(npz, "empty_middle"), 1, 2, NULL, 0, NULL), SPDL_OK);
    spdl_npz_close(npz);
}

/* ============================================================================================= */
/* Whole files, and the row of a pipeline */

static void check_bundle(const spdl_npz_bundle *bundle, const char *path) {
    spdl_npz *npz = open_path(path);
    static uint8_t data[200000];
    REQUIRE(bundle->count == spdl_npz_count(npz));
    for (size_t i = 0; i < bundle->count; ++i) {
        spdl_npz_array *array = &bundle->arrays[i];
        spdl_npy_info info;
        CHECK_STR(array->name, spdl_npz_name(npz, i));
        REQUIRE(spdl_npz_info(npz, i, &info, NULL) == SPDL_OK);
        CHECK(memcmp(&info, &array->info, sizeof info) == 0);
        CHECK_EQ((uintptr_t)array->data % 64, 0);
        REQUIRE(spdl_npz_read(npz, i, data, sizeof data, NULL) == SPDL_OK);
        CHECK(memcmp(data, array->data, (size_t)info.bytes) == 0);
        CHECK(spdl_npz_bundle_find(bundle, array->name) == array);
    }
    spdl_npz_close(npz);
}

static void whole_files(void) {
    static const char *const files[] = { "streams.npz", "dtypes_stored.npz", "shapes_deflated.npz",
                                         "none.npz", "version2.npy", "structured_deflated.npz" };
    spdl_npz_bundle *bundle = NULL;
    spdl_error error = { 0 };
    spdl_npz_desc desc = { 0 };
    desc.error = &error;
    for (size_t i = 0; i < sizeof files / sizeof files[0]; ++i) {
        if (!CHECK_EQ(spdl_npz_load(&bundle, fixture_path(files[i]), &desc), SPDL_OK)) {
            fprintf(stderr, "%s\n", error.text);
            continue;
        }
        check_bundle(bundle, fixture_path(files[i]));
        spdl_npz_bundle_free(bundle);
    }
    REQUIRE(spdl_npz_load(&bundle, fixture_path("dtypes_stored.npz"), NULL) == SPDL_OK);
    CHECK(spdl_npz_bundle_find(bundle, "f4.npy") == spdl_npz_bundle_find(bundle, "f4"));
    CHECK(spdl_npz_bundle_find(bundle, "f4") != NULL);
    CHECK(spdl_npz_bundle_find(bundle, "none") == NULL && !spdl_npz_bundle_find(bundle, "x.npy"));
    CHECK(!spdl_npz_bundle_find(NULL, "f4") && !spdl_npz_bundle_find(bundle, NULL));
    spdl_npz_bundle_free(bundle);
    CHECK_EQ(spdl_npz_load(&bundle, fixture_path("names.npz"), &desc), SPDL_OK);
    CHECK_EQ(bundle->count, 6); /* without a text, a folder and an empty member */
    CHECK(spdl_npz_bundle_find(bundle, "readme.txt") == NULL);
    spdl_npz_bundle_free(bundle);
    CHECK_EQ(spdl_npz_load(&bundle, "/nowhere", &desc), SPDL_E_IO);
    desc.max_bytes = 500; /* less than all of it, more than the largest */
    CHECK_EQ(spdl_npz_load(&bundle, fixture_path("version1.npy"), &desc), SPDL_OK);
    spdl_npz_bundle_free(bundle);
    CHECK_EQ(spdl_npz_load(&bundle, fixture_path("dtypes_stored.npz"), &desc), SPDL_E_LIMIT);
    CHECK_STR(strchr(error.text, ':'), ": its arrays are larger than max_bytes, which is 500");
    CHECK_EQ(spdl_npz_load(NULL, "x", &desc), SPDL_E_INVALID);
    CHECK_EQ(spdl_npz_load(&bundle, NULL, &desc), SPDL_E_INVALID);
    spdl_npz_bundle_free(NULL);
}

/* What no_crc maps is the file's, and changing it changes only the bundle. */
static void arrays_that_are_lent(void) {
    static const uint64_t shape[] = { 300, 1000 }, one[] = { 4 };
    static uint8_t numbers[300000];
    spdl_npz_bundle *bundle = NULL, *copied = NULL;
    npz_writer *w = NULL;
    spdl_npz_desc desc = { 0 };
    for (size_t i = 0; i < sizeof numbers; ++i) numbers[i] = (uint8_t)(i * 31 + i / 256);
    REQUIRE(npz_writer_open(&w, make_path("lent"), NULL) == SPDL_OK);
    REQUIRE(npz_writer_add(w, "a", "|u1", 2, shape, numbers, NULL) == SPDL_OK);
    REQUIRE(npz_writer_add(w, "b", "|u1", 1, one, "1234", NULL) == SPDL_OK);
    REQUIRE(npz_writer_add(w, "c", ">f4", 1, one, numbers, NULL) == SPDL_OK);
    REQUIRE(npz_writer_add(w, "d", "<f4", 1, one, numbers, NULL) == SPDL_OK);
    REQUIRE(npz_writer_finish(w, NULL) == SPDL_OK);
    npz_writer_close(w);
    REQUIRE(spdl_npz_load(&copied, make_path("lent"), &desc) == SPDL_OK);
    desc.no_crc = true;
    for (int round = 0; round < 2; ++round) {
        REQUIRE(spdl_npz_load(&bundle, make_path("lent"), &desc) == SPDL_OK);
        CHECK(copied->mapping_ == NULL && bundle->mapping_ != NULL);
        CHECK(bundle->bytes < 10000 && copied->bytes > 300000);
        for (size_t i = 0; i < 4; ++i) {
            const uint8_t *data = (const uint8_t *)bundle->arrays[i].data;
            CHECK_EQ((uintptr_t)data % 64, 0);
            CHECK_EQ(data > (const uint8_t *)bundle->mapping_ &&
                     data < (const uint8_t *)bundle->mapping_ + bundle->mapped_, i == 0);
            CHECK(memcmp(data, copied->arrays[i].data, (size_t)copied->arrays[i].info.bytes) == 0);
            CHECK(memcmp(&bundle->arrays[i].info, &copied->arrays[i].info,
                         sizeof bundle->arrays[i].info) == 0);
        }
        memset(bundle->arrays[0].data, 0, 300000);
        spdl_npz_bundle_free(bundle);
    }
    spdl_npz_bundle_free(copied);
    CHECK_EQ(spdl_npz_load(&bundle, fixture_path("dtypes_deflated.npz"), &desc), SPDL_OK);
    CHECK(bundle->mapping_ == NULL); /* there was nothing to lend */
    spdl_npz_bundle_free(bundle);
    remove_files("lent");
}

static void what_is_expected(void) {
    static const uint64_t any[] = { 0, 3 }, all[] = { 0, 0 };
    static const uint64_t exact[] = { 5, 3 }, other[] = { 5, 4 };
    spdl_npz_bundle *bundle = NULL;
    const spdl_npz_array *f4;
    spdl_error error = { 0 };
    char text[64];
    REQUIRE(spdl_npz_load(&bundle, fixture_path("dtypes_stored.npz"), NULL) == SPDL_OK);
    f4 = spdl_npz_bundle_find(bundle, "f4");
    CHECK_EQ(spdl_npz_expect(f4, "<f4", 2, any, &error), SPDL_OK);
    CHECK_EQ(spdl_npz_expect(f4, "f4", 2, exact, NULL), SPDL_OK);
    CHECK_EQ(spdl_npz_expect(f4, ">f4", 2, exact, &error), SPDL_OK);
    CHECK_EQ(spdl_npz_expect(f4, "<f8", 2, any, &error), SPDL_E_INVALID);
    snprintf(text, sizeof text, "array 'f4' is '%cf4' (5, 3), not '<f8' (any, 3)",
             SPDL__NPY_HOST_ORDER);
    CHECK(strstr(error.text, text) != NULL);
    CHECK_EQ(spdl_npz_expect(f4, "<f4", 2, other, &error), SPDL_E_INVALID);
    CHECK_EQ(spdl_npz_expect(f4, "<f8", 2, all, &error), SPDL_E_INVALID);
    CHECK(strstr(error.text, "not '<f8' (any, any)") != NULL);
    CHECK_EQ(spdl_npz_expect(f4, "<f4", 0, NULL, &error), SPDL_E_INVALID);
    CHECK(strstr(error.text, "(5, 3), not '<f4' ()") != NULL);
    CHECK_EQ(spdl_npz_expect(f4, "<f4", 1, exact, &error), SPDL_E_INVALID);
    CHECK(strstr(error.text, "(5, 3), not '<f4' (5,)") != NULL);
    CHECK_EQ(spdl_npz_expect(spdl_npz_bundle_find(bundle, "no"), "<f4", 2, any, &error),
             SPDL_E_NOT_FOUND);
    CHECK(strstr(error.text, "the array is missing, it should be '<f4' (") != NULL);
    CHECK_EQ(spdl_npz_expect(f4, NULL, 2, any, &error), SPDL_E_INVALID);
    CHECK_EQ(spdl_npz_expect(f4, "<f4", 2, NULL, &error), SPDL_E_INVALID);
    spdl_npz_bundle_free(bundle);
}

static const char *const rows[] = { "streams.npz", "dtypes_stored.npz", "version1.npy" };
static char row_path[3][512];

SPDL_FN(next_path, void, char) {
    const uint64_t n = spdl_sequence(task);
    if (n == 9) return SPDL_END;
    *out = (char *)malloc(600);
    if (*out == NULL) return SPDL_E_NOMEM;
    snprintf(*out, 600, "%s", n == 4 ? "/nowhere.npz" : row_path[n % 3]);
    return SPDL_OK;
}

static void row_of_a_pipeline(void) {
    for (int i = 0; i < 3; ++i) strcpy(row_path[i], fixture_path(rows[i]));
    for (int workers = 0; workers < 3; ++workers) {
        spdl_npz_desc files = { 0 };
        spdl_pipeline *p = NULL;
        spdl_npz_bundle *bundle;
        spdl_error error = { 0 };
        spdl_pipeline_desc desc = { 0 };
        uint64_t n = 0;
        desc.workers = TEST_WORKERS(workers);
        desc.error = &error;
        if (!CHECK_EQ(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
                SPDL_SOURCE(next_path, .free_item = free),
                SPDL_NPZ(workers ? &files : NULL, .concurrency = 2, .max_failures = 1),
                SPDL_SINK(3))), SPDL_OK)) {
            fprintf(stderr, "%s\n", error.text);
            return;
        }
        while (SPDL_NEXT(p, &bundle, SPDL_FOREVER) == SPDL_OK) {
            if (n == 4) ++n; /* this one cannot be read */
            check_bundle(bundle, row_path[n++ % 3]);
            spdl_npz_bundle_free(bundle);
        }
        CHECK_EQ(n, 9);
        CHECK(!spdl_pipeline_failed(p));
        spdl_pipeline_destroy(p);
    }
}

SPDL_FN(bad_path, void, char) {
    static char none[] = "/nowhere.npz";
    (void)task;
    *out = none;
    return SPDL_OK;
}

static void row_that_fails(void) {
    spdl_pipeline *p = NULL;
    spdl_npz_bundle *bundle;
    const spdl_pipeline_desc desc = { 0 };
    const spdl_stage stages[] = { SPDL_SOURCE(bad_path), SPDL_NPZ(NULL), SPDL_SINK(1) };
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_TABLE(stages)) == SPDL_OK);
    CHECK_EQ(SPDL_NEXT(p, &bundle, SPDL_FOREVER), SPDL_E_IO);
    CHECK(strstr(spdl_pipeline_error(p)->text, "/nowhere.npz: No such file") != NULL);
    CHECK_EQ(spdl_pipeline_error(p)->stage, 1);
    spdl_pipeline_destroy(p);
}

TEST_TABLE(npz_file) {
    TEST_CASE(file_as_memory), TEST_CASE(broken_file_as_memory), TEST_CASE(long_tails),
    TEST_CASE(views_of_a_file), TEST_CASE(views_by_several_threads), TEST_CASE(cut_while_open),
    TEST_CASE(cut_behind_what_is_read), TEST_CASE(directory_over_1_gib),
    TEST_CASE(sizes_beyond_memory),
    TEST_CASE(member_over_4_gib), TEST_CASE(crc_of_reads_alone),
    TEST_CASE(number_order_in_structs), TEST_CASE(index_order_of_any_shape),
    TEST_CASE(ranges_of_rows), TEST_CASE(whole_files), TEST_CASE(arrays_that_are_lent),
    TEST_CASE(what_is_expected), TEST_CASE(row_of_a_pipeline), TEST_CASE(row_that_fails), TEST_END
};
