/* .npz and .npy in files that are not read at once: here every file counts as a large one, and its
   tail is read in small steps. Also what is asked for beyond reading one array: rows, other
   byte and index orders, many arrays, whole files, a row of a pipeline. The fixtures of tests/data
   are read from memory, too: both ways must agree about everything. */
#define SPDL__NPZ_SMALL_FILE 0
#define SPDL__ZIP_TAIL_BYTES 64
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "test.h"

#include <pthread.h>
#include <sys/wait.h>

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
        strcpy(folder, "/tmp/spdl_npz_XXXXXX");
        REQUIRE(mkdtemp(folder) != NULL);
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

static spdl_npz *open_with(const char *path, unsigned convert) {
    spdl_npz *npz = NULL;
    spdl_error error = { 0 };
    spdl_npz_desc desc = { 0 };
    desc.error = &error;
    desc.convert = convert;
    if (!CHECK_EQ(spdl_npz_open_file(&npz, path, &desc), SPDL_OK)) {
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
    spdl_npz_open_file(&npz[0], path, &desc);
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
static void broken_file_as_memory(void) {
    static const char *const broken[] = { "version2.npy", "names.npz", "descriptors.npz",
                                          "shapes_deflated.npz" };
    char path[128];
    strcpy(path, make_path("broken"));
    for (size_t i = 0; i < sizeof broken / sizeof broken[0]; ++i) {
        size_t bytes;
        uint8_t *data = read_file(fixture_path(broken[i]), &bytes);
        int file;
        write_file(path, data, bytes);
        file = open(path, O_RDWR);
        for (size_t at = 0; at < bytes; at += TEST_SANITIZED ? 7 : 1) {
            data[at] ^= 0x55;
            REQUIRE(pwrite(file, data + at, 1, (off_t)at) == 1);
            if (!CHECK(same_archive(path, data, bytes)))
                fprintf(stderr, "%s, byte %zu\n", broken[i], at);
            data[at] ^= 0x55;
            REQUIRE(pwrite(file, data + at, 1, (off_t)at) == 1);
        }
        for (size_t cut = bytes - 1; cut > 0; cut -= TEST_SANITIZED && cut > 7 ? 7 : 1) {
            REQUIRE(ftruncate(file, (off_t)cut) == 0);
            if (!CHECK(same_archive(path, data, cut)))
                fprintf(stderr, "%s cut at %zu\n", broken[i], cut);
        }
        close(file);
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

static void views_of_a_file(void) {
    spdl_npz *npz = open_with(fixture_path("dtypes_stored.npz"), 0);
    for (size_t i = 0; i < spdl_npz_count(npz); ++i) {
        const void *view = NULL, *again = NULL;
        uint8_t data[1000];
        bool aligned = false;
        spdl_npy_info info;
        REQUIRE(spdl_npz_info(npz, i, &info, NULL) == SPDL_OK);
        REQUIRE(spdl_npz_view(npz, i, &view, &aligned, NULL) == SPDL_OK);
        REQUIRE(spdl_npz_read(npz, i, data, sizeof data, NULL) == SPDL_OK);
        CHECK(memcmp(view, data, (size_t)info.bytes) == 0);
        CHECK_EQ(aligned, (uintptr_t)view % 64 == 0);
        CHECK(spdl_npz_view(npz, i, &again, NULL, NULL) == SPDL_OK && again == view);
    }
    spdl_npz_close(npz);
}

static void *view_all(void *npz) {
    const void *view = NULL;
    for (size_t i = 0; i < spdl_npz_count((spdl_npz *)npz); ++i)
        CHECK_EQ(spdl_npz_view((spdl_npz *)npz, i, &view, NULL, NULL), SPDL_OK);
    return NULL;
}

/* All make the mapping at the same time; one of them wins. */
static void views_by_several_threads(void) {
    for (int round = 0; round < 50; ++round) {
        spdl_npz *npz = open_with(fixture_path("dtypes_stored.npz"), 0);
        pthread_t thread[3];
        for (int i = 0; i < 3; ++i)
            REQUIRE(pthread_create(&thread[i], NULL, view_all, npz) == 0);
        for (int i = 0; i < 3; ++i) pthread_join(thread[i], NULL);
        spdl_npz_close(npz);
    }
}

static void from_a_descriptor(void) {
    spdl_npz *npz = NULL;
    spdl_error error = { 0 };
    spdl_npz_desc desc = { 0 };
    int ends[2];
    const int fd = open(fixture_path("fortran.npy"), O_RDONLY);
    desc.error = &error;
    REQUIRE(fd >= 0 && lseek(fd, 7, SEEK_SET) == 7);
    REQUIRE(spdl_npz_open_fd(&npz, fd, "that", &desc) == SPDL_OK);
    CHECK_EQ(lseek(fd, 0, SEEK_CUR), 7);
    close(fd);
    uint8_t data[48];
    CHECK_EQ(spdl_npz_read(npz, 0, data, sizeof data, &error), SPDL_OK);
    CHECK(data[0] == 0 && data[4] == 4 && data[8] == 8);
    spdl_npz_close(npz);
    CHECK_EQ(spdl_npz_open_fd(&npz, -1, "that", &desc), SPDL_E_IO);
    CHECK_STR(error.text, "that: Bad file descriptor");
    REQUIRE(pipe(ends) == 0);
    CHECK_EQ(spdl_npz_open_fd(&npz, ends[0], NULL, &desc), SPDL_E_IO);
    CHECK_STR(error.text, "file: a pipe or a device, not a file");
    CHECK(npz == NULL);
    close(ends[0]);
    close(ends[1]);
    CHECK_EQ(spdl_npz_open_fd(NULL, 0, NULL, &desc), SPDL_E_INVALID);
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
        spdl_npz_request request = { 0, buffer, sizeof buffer, SPDL_OK };
        size_t bytes;
        uint8_t *data = read_file(fixture_path(cut[k]), &bytes);
        spdl_npz *npz;
        write_file(make_path("cut"), data, bytes);
        npz = open_with(make_path("cut"), 0);
        spdl_npz_view(npz, 0, &view, NULL, NULL);
        REQUIRE(truncate(make_path("cut"), 0) == 0);
        CHECK_EQ(spdl_npz_read(npz, 0, buffer, sizeof buffer, &error), SPDL_E_IO);
        CHECK(strstr(error.text, "at byte 0 of ") != NULL);
        CHECK(strstr(error.text, ": it ended while it was read") != NULL);
        CHECK_EQ(spdl_npz_info(npz, 0, &info, &error), SPDL_E_IO);
        CHECK_EQ(spdl_npz_view(npz, 0, &view, NULL, &error), SPDL_E_IO);
        CHECK_EQ(spdl_npz_check(npz, 0, &error), SPDL_E_IO);
        CHECK_EQ(spdl_npz_read_rows(npz, 0, 0, 1, buffer, sizeof buffer, &error), SPDL_E_IO);
        CHECK_EQ(spdl_npz_read_many(npz, &request, 1, NULL, &error), SPDL_E_IO);
        spdl_npz_close(npz);
        free(data);
    }
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
    at = spdl__put64(spdl__put64(entry + 57, 128 + count), 128 + count);
    spdl__put64(at, 0);
    spdl__put64(end + 4, 44);
    spdl__put64(spdl__put64(end + 24, 1), 1);
    spdl__put64(spdl__put64(end + 40, sizeof entry), directory);
    memcpy(end + 56, "PK\6\7", 4);
    spdl__put32(spdl__put64(end + 64, directory + sizeof entry), 1);
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
    if (!CHECK(spdl_npz_open_file(&npz, make_path("large"), &desc) == SPDL_OK))
        fprintf(stderr, "%s\n", error.text);
    if (!CHECK_EQ(spdl_npz_info(npz, 0, &info, &error), SPDL_OK))
        fprintf(stderr, "%s\n", error.text);
    CHECK_EQ(info.bytes, count);
    CHECK_EQ(spdl_npz_read_rows(npz, 0, count - 4, 4, got, 4, &error), SPDL_OK);
    CHECK(memcmp(got, "last", 4) == 0);
    if (CHECK_EQ(spdl_npz_view(npz, 0, &view, NULL, &error), SPDL_OK))
        CHECK(memcmp((const uint8_t *)view + count - 4, "last", 4) == 0);
    spdl_npz_close(npz);
    remove_files("large");
}

/* ============================================================================================= */
/* What is told */

static spdl_npz_crc state_of(const spdl_npz *npz, size_t index) {
    spdl_npz_member member;
    REQUIRE(spdl_npz_stat(npz, index, &member) == SPDL_OK);
    return member.crc_state;
}

static void crc_states(void) {
    static const char *const files[] = { "dtypes_stored.npz", "dtypes_deflated.npz" };
    uint8_t data[1000];
    spdl_npz_member member;
    spdl_npz *npz;
    for (size_t k = 0; k < 2; ++k) {
        const void *view = NULL;
        spdl_error error = { 0 };
        spdl_npz_desc desc = { 0 };
        size_t bytes;
        uint8_t *file = read_file(fixture_path(files[k]), &bytes);
        npz = open_with(fixture_path(files[k]), 0);
        CHECK_EQ(state_of(npz, 0), SPDL_NPZ_CRC_UNCHECKED);
        spdl_npz_view(npz, 0, &view, NULL, NULL);
        CHECK_EQ(spdl_npz_read_rows(npz, 0, 0, 1, data, sizeof data, NULL),
                 k == 0 ? SPDL_OK : SPDL_E_UNSUPPORTED);
        CHECK_EQ(state_of(npz, 0), SPDL_NPZ_CRC_UNCHECKED);
        CHECK_EQ(spdl_npz_check(npz, 0, NULL), SPDL_OK);
        CHECK_EQ(state_of(npz, 0), SPDL_NPZ_CRC_GOOD);
        CHECK_EQ(spdl_npz_read(npz, 1, data, sizeof data, NULL), SPDL_OK);
        CHECK_EQ(state_of(npz, 1), SPDL_NPZ_CRC_GOOD);
        CHECK_EQ(state_of(npz, 2), SPDL_NPZ_CRC_UNCHECKED);
        REQUIRE(spdl_npz_stat(npz, 3, &member) == SPDL_OK);
        CHECK_EQ(member.stored, k == 0);
        CHECK_EQ(member.bytes, 128 + 60);
        CHECK(k == 0 ? member.file_bytes == member.bytes : member.file_bytes < member.bytes);
        CHECK(member.crc != 0 && member.file_offset > 0 && member.duplicates == 0);
        file[member.file_offset + 30 + 6 + 20 + (k == 0 ? 150 : 50)] ^= 1; /* not in a header */
        CHECK_EQ(spdl_npz_stat(npz, 99, &member), SPDL_E_NOT_FOUND);
        spdl_npz_close(npz);
        desc.error = &error;
        desc.verify = k == 0 ? SPDL_NPZ_VERIFY_ALL : SPDL_NPZ_VERIFY_READS;
        REQUIRE(spdl_npz_open_memory(&npz, file, bytes, "m", &desc) == SPDL_OK);
        CHECK(spdl_npz_check(npz, 3, &error) < 0);
        if (k == 0) {
            CHECK_EQ(state_of(npz, 3), SPDL_NPZ_CRC_BAD);
            CHECK_EQ(spdl_npz_view(npz, 3, &view, NULL, &error), SPDL_E_CHECKSUM);
            CHECK_EQ(spdl_npz_view(npz, 4, &view, NULL, &error), SPDL_OK);
            CHECK_EQ(state_of(npz, 4), SPDL_NPZ_CRC_GOOD);
        }
        spdl_npz_close(npz);
        free(file);
    }
    npz = open_with(fixture_path("version1.npy"), 0);
    CHECK_EQ(spdl_npz_check(npz, 0, NULL), SPDL_OK);
    CHECK_EQ(spdl_npz_read(npz, 0, data, sizeof data, NULL), SPDL_OK);
    CHECK_EQ(state_of(npz, 0), SPDL_NPZ_CRC_NONE);
    REQUIRE(spdl_npz_stat(npz, 0, &member) == SPDL_OK);
    CHECK(member.stored && member.bytes == 128 + 48 && member.file_offset == 0);
    spdl_npz_close(npz);
}

static void limits_of_the_desc(void) {
    spdl_npz *npz = NULL;
    spdl_npy_info info;
    spdl_error error = { 0 };
    spdl_npz_desc desc = { 0 };
    desc.error = &error;
    desc.max_ratio = 5;
    REQUIRE(spdl_npz_open_file(&npz, fixture_path("streams.npz"), &desc) == SPDL_OK);
    CHECK_EQ(spdl_npz_info(npz, index_of(npz, "zeros_0"), &info, &error), SPDL_E_LIMIT);
    CHECK(strstr(error.text, "more than max_ratio, which is 5") != NULL);
    CHECK_EQ(spdl_npz_info(npz, index_of(npz, "lcg_8"), &info, &error), SPDL_OK);
    spdl_npz_close(npz);
    desc.max_ratio = 0;
    desc.max_header_bytes = 200;
    REQUIRE(spdl_npz_open_file(&npz, fixture_path("structured_stored.npz"), &desc) == SPDL_OK);
    CHECK_EQ(spdl_npz_info(npz, index_of(npz, "simple"), &info, &error), SPDL_OK);
    CHECK_EQ(spdl_npz_info(npz, index_of(npz, "many"), &info, &error), SPDL_E_LIMIT);
    CHECK(strstr(error.text, "max_header_bytes is 200") != NULL);
    spdl_npz_close(npz);
}

static void parse_in_memory(void) {
    size_t bytes;
    uint8_t *file = read_file(fixture_path("fortran.npy"), &bytes);
    spdl_npy_info info;
    spdl_error error = { 0 };
    CHECK_EQ(spdl_npy_parse(file, bytes, &info, &error), SPDL_OK);
    CHECK(info.fortran_order && info.shape[1] == 4 && info.header_bytes == 128);
    CHECK(info.version == 1 && info.bytes == 48);
    CHECK_EQ(spdl_npy_parse(file, bytes - 1, &info, &error), SPDL_E_FORMAT);
    CHECK_STR(error.text, "memory: member 'arr_0': the shape needs 48 bytes, but 47 follow the "
                          "header");
    CHECK_EQ(spdl_npy_parse(file, 0, &info, NULL), SPDL_E_FORMAT);
    CHECK_EQ(spdl_npy_parse(NULL, 0, &info, &error), SPDL_E_INVALID);
    CHECK_EQ(spdl_npy_parse(file, bytes, NULL, &error), SPDL_E_INVALID);
    free(file);
}

/* ============================================================================================= */
/* Other orders */

static void number_order(void) {
    spdl_npz *plain = open_with(fixture_path("big_endian.npz"), 0);
    spdl_npz *npz = open_with(fixture_path("big_endian.npz"), SPDL_NPZ_NATIVE_BYTES);
    for (size_t i = 0; i < spdl_npz_count(npz); ++i) {
        uint8_t a[1000], b[1000];
        const void *view = NULL;
        spdl_npy_info info;
        size_t unit;
        REQUIRE(spdl_npz_info(npz, i, &info, NULL) == SPDL_OK);
        CHECK_EQ(info.byte_order, spdl__npy_host_order());
        CHECK_EQ(info.descr[0], '>');
        unit = info.kind == 'c' ? 8 : info.kind == 'U' ? 4 : (size_t)info.itemsize;
        REQUIRE(spdl_npz_read(plain, i, a, sizeof a, NULL) == SPDL_OK);
        REQUIRE(spdl_npz_read(npz, i, b, sizeof b, NULL) == SPDL_OK);
        for (size_t k = 0; k < info.bytes; ++k)
            CHECK_EQ(b[k], spdl__npy_host_order() == '<' ? a[k / unit * unit + unit - 1 - k % unit]
                                                         : a[k]);
        if (spdl__npy_host_order() == '<')
            CHECK_EQ(spdl_npz_view(npz, i, &view, NULL, NULL), SPDL_E_UNSUPPORTED);
    }
    spdl_npz_close(plain);
    spdl_npz_close(npz);
    npz = open_with(fixture_path("big_endian.npy"), SPDL_NPZ_NATIVE_BYTES);
    uint32_t rows[8];
    CHECK_EQ(spdl_npz_read_rows(npz, 0, 1, 2, rows, sizeof rows, NULL), SPDL_OK);
    for (unsigned i = 0; i < 8; ++i) CHECK_EQ(rows[i], 4 + i);
    spdl_npz_close(npz);
}

/* The bytes of an element, and whether a number in it is in the other byte order. */
static void check_struct(const char *descr, uint64_t itemsize, bool foreign) {
    spdl_npy_info info;
    spdl__npy_text t;
    char text[400];
    snprintf(text, sizeof text, "{'descr': %s, 'fortran_order': False, 'shape': (3,), }", descr);
    REQUIRE(spdl__npy_read(&t, (const uint8_t *)text, strlen(text), &info));
    CHECK(info.structured && info.kind == 'V' && info.byte_order == '|');
    CHECK_STR(info.descr, descr);
    CHECK_EQ(info.itemsize, itemsize);
    CHECK_EQ(info.bytes, 3 * itemsize);
    CHECK_EQ(t.foreign, foreign);
}

/* Structured arrays are read as they are, whatever the byte order of their fields. */
static void number_order_in_structs(void) {
    spdl_npz *npz = open_with(fixture_path("structured_deflated.npz"), SPDL_NPZ_NATIVE_BYTES);
    uint8_t data[60];
    spdl_npy_info info;
    spdl_error error = { 0 };
    if (spdl__npy_host_order() != '<') TEST_SKIP("written for little-endian machines");
    check_struct("[('a', '>u2'), ('b', '<u2'), ('c', '>c8'), ('s', '|S3'), ('u', '>U2')]", 23,
                 true);
    check_struct("[('x', 'u1'), ('in', [('p', '<i4'), ('q', [('r', '<i2', (2,)), ('t', 'u1')], "
                 "(2,))], (2,)), ('y', '<f8')]", 37, false);
    check_struct("[('e', '>U0', (100000000000,)), ('z', '<i4', (0,)), ('n', [('k', '<i4')], "
                 "(0,)), (('title', 'h'), '<f16')]", 16, true);
    CHECK_EQ(spdl_npz_info(npz, index_of(npz, "simple"), &info, &error), SPDL_OK);
    CHECK_EQ(spdl_npz_read(npz, index_of(npz, "simple"), data, sizeof data, &error), SPDL_OK);
    CHECK_EQ(spdl_npz_info(npz, index_of(npz, "mixed"), &info, &error), SPDL_OK);
    CHECK_EQ(spdl_npz_read(npz, index_of(npz, "mixed"), data, 60, NULL), SPDL_OK);
    spdl_npz_close(npz);
}

static void index_order(void) {
    static const char *const files[] = { "shapes_stored.npz", "shapes_deflated.npz" };
    for (size_t k = 0; k < 2; ++k) {
        spdl_npz *plain = open_with(fixture_path(files[k]), 0);
        spdl_npz *npz = open_with(fixture_path(files[k]), SPDL_NPZ_C_ORDER);
        const size_t index = index_of(npz, "fortran3");
        double a[24], b[24];
        const void *view = NULL;
        spdl_npy_info info;
        spdl_error error = { 0 };
        REQUIRE(spdl_npz_info(plain, index, &info, NULL) == SPDL_OK && info.fortran_order);
        REQUIRE(spdl_npz_info(npz, index, &info, NULL) == SPDL_OK && !info.fortran_order);
        REQUIRE(spdl_npz_read(plain, index, a, sizeof a, NULL) == SPDL_OK);
        REQUIRE(spdl_npz_read(npz, index, b, sizeof b, NULL) == SPDL_OK);
        for (size_t x = 0; x < 2; ++x)
            for (size_t y = 0; y < 3; ++y)
                for (size_t z = 0; z < 4; ++z)
                    CHECK(memcmp(&b[(x * 3 + y) * 4 + z], &a[x + 2 * (y + 3 * z)], 8) == 0);
        CHECK_EQ(spdl_npz_view(npz, index, &view, NULL, &error), SPDL_E_UNSUPPORTED);
        if (k == 0) {
            CHECK_EQ(spdl_npz_read_rows(npz, index, 0, 1, a, sizeof a, &error), SPDL_E_UNSUPPORTED);
            CHECK(strstr(error.text, "in Fortran order") != NULL);
            CHECK_EQ(spdl_npz_read_rows(plain, index, 0, 1, a, sizeof a, NULL), SPDL_E_UNSUPPORTED);
        }
        spdl_npz_close(plain);
        spdl_npz_close(npz);
    }
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
    spdl_npz *npz = open_with(fixture_path("shapes_stored.npz"), 0);
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
/* Many */

static spdl_pool *make_pool(int workers) {
    spdl_pool *pool = NULL;
    spdl_pool_desc desc = { 0 };
    desc.workers = workers;
    REQUIRE(spdl_pool_create(&pool, &desc) == SPDL_OK);
    return pool;
}

/* Reads all arrays of the file, in a random order, and compares them with single reads. */
static void check_many(const char *path, spdl_pool *pool, uint64_t *state) {
    enum { MOST = 40, ROOM = 200000 };
    static uint8_t data[MOST][ROOM], one[ROOM];
    spdl_npz_request request[MOST];
    spdl_error error = { 0 };
    spdl_npz *npz = open_with(path, 0);
    const size_t count = spdl_npz_count(npz);
    REQUIRE(count <= MOST);
    for (size_t i = 0; i < count; ++i) {
        request[i].index = i;
        request[i].data = data[i];
        request[i].bytes = ROOM;
        request[i].result = SPDL_SKIP;
    }
    for (size_t i = count; i > 1; --i) {
        const size_t k = (size_t)(test_random(state) % i);
        const spdl_npz_request held = request[i - 1];
        request[i - 1] = request[k];
        request[k] = held;
    }
    if (!CHECK_EQ(spdl_npz_read_many(npz, request, count, pool, &error), SPDL_OK))
        fprintf(stderr, "%s: %s\n", path, error.text);
    for (size_t i = 0; i < count; ++i) {
        spdl_npy_info info;
        CHECK_EQ(request[i].result, SPDL_OK);
        REQUIRE(spdl_npz_info(npz, request[i].index, &info, NULL) == SPDL_OK);
        REQUIRE(spdl_npz_read(npz, request[i].index, one, ROOM, NULL) == SPDL_OK);
        CHECK(memcmp(one, request[i].data, (size_t)info.bytes) == 0);
    }
    spdl_npz_close(npz);
}

static void many_at_once(void) {
    static const char *const files[] = { "streams.npz", "dtypes_deflated.npz", "dtypes_stored.npz",
                                         "shapes_deflated.npz", "none.npz", "version1.npy" };
    uint64_t state = test_seed();
    for (int workers = 0; workers < 4; ++workers) {
        spdl_pool *pool = workers > 0 ? make_pool(workers) : NULL;
        for (int round = 0; round < (TEST_SANITIZED ? 2 : 10); ++round)
            for (size_t i = 0; i < sizeof files / sizeof files[0]; ++i)
                check_many(fixture_path(files[i]), pool, &state);
        spdl_pool_destroy(pool);
    }
}

/* Each request has its own result, and the first failure is told. */
static void many_with_failures(void) {
    spdl_pool *pool = make_pool(2);
    for (int round = 0; round < 20; ++round) {
        spdl_npz *npz = open_with(fixture_path("names.npz"), 0);
        spdl_npz_request request[9];
        uint8_t data[9][4];
        spdl_error error = { 0 };
        for (size_t i = 0; i < 9; ++i) {
            request[i].index = 8 - i;
            request[i].data = data[i];
            request[i].bytes = 4;
        }
        request[8].bytes = 3;
        CHECK_EQ(spdl_npz_read_many(npz, request, 9, round % 2 ? pool : NULL, &error),
                 SPDL_E_FORMAT);
        CHECK(strstr(error.text, "member 'folder/'") != NULL);
        for (size_t i = 0; i < 9; ++i)
            CHECK_EQ(request[i].result, i < 3 ? SPDL_E_FORMAT : i == 8 ? SPDL_E_INVALID : SPDL_OK);
        CHECK_EQ(data[7][0], 2);
        CHECK_EQ(spdl_npz_read_many(npz, NULL, 1, NULL, &error), SPDL_E_INVALID);
        CHECK_EQ(spdl_npz_read_many(npz, NULL, 0, NULL, &error), SPDL_OK);
        CHECK_EQ(spdl_npz_read_many(NULL, request, 1, NULL, &error), SPDL_E_INVALID);
        spdl_npz_close(npz);
    }
    spdl_pool_destroy(pool);
}

static void read_as_job(void *arg, int worker, void *local) {
    uint64_t state = 1;
    static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER; /* check_many has statics */
    (void)worker;
    (void)local;
    pthread_mutex_lock(&one_at_a_time);
    check_many(fixture_path("streams.npz"), (spdl_pool *)arg, &state);
    pthread_mutex_unlock(&one_at_a_time);
}

/* Workers that read many on their own pool, which is busy with just that. */
static void many_on_workers(void) {
    spdl_pool *pool = make_pool(2);
    for (int i = 0; i < 6; ++i)
        CHECK_EQ(spdl_pool_submit(pool, read_as_job, pool, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(spdl_pool_drain(pool, SPDL_FOREVER), SPDL_OK);
    spdl_pool_destroy(pool);
}

/* ============================================================================================= */
/* Whole files, and the row of a pipeline */

static void check_bundle(const spdl_npz_bundle *bundle, const char *path) {
    spdl_npz *npz = open_with(path, 0);
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
    CHECK_EQ(spdl_npz_load(&bundle, fixture_path("names.npz"), &desc), SPDL_E_FORMAT);
    CHECK(bundle == NULL && strstr(error.text, "member 'readme.txt'") != NULL);
    CHECK_EQ(spdl_npz_load(&bundle, "/nowhere", &desc), SPDL_E_IO);
    desc.max_bytes = 300; /* less than all of it, more than the largest */
    CHECK_EQ(spdl_npz_load(&bundle, fixture_path("version1.npy"), &desc), SPDL_OK);
    spdl_npz_bundle_free(bundle);
    CHECK_EQ(spdl_npz_load(&bundle, fixture_path("dtypes_stored.npz"), &desc), SPDL_E_LIMIT);
    CHECK_EQ(spdl_npz_load(NULL, "x", &desc), SPDL_E_INVALID);
    CHECK_EQ(spdl_npz_load(&bundle, NULL, &desc), SPDL_E_INVALID);
    spdl_npz_bundle_free(NULL);
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
        desc.workers = workers;
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
    TEST_CASE(views_of_a_file), TEST_CASE(views_by_several_threads), TEST_CASE(from_a_descriptor),
    TEST_CASE(cut_while_open), TEST_CASE(member_over_4_gib),
    TEST_CASE(crc_states), TEST_CASE(limits_of_the_desc), TEST_CASE(parse_in_memory),
    TEST_CASE(number_order), TEST_CASE(number_order_in_structs), TEST_CASE(index_order),
    TEST_CASE(index_order_of_any_shape), TEST_CASE(ranges_of_rows), TEST_CASE(many_at_once),
    TEST_CASE(many_with_failures), TEST_CASE(many_on_workers), TEST_CASE(whole_files),
    TEST_CASE(row_of_a_pipeline), TEST_CASE(row_that_fails), TEST_END
};
