/* examples/tokens.h: shards of all kinds are one sequence, and what is no shard is refused by name.
   tests/check_examples.sh runs it in a pipeline. */
#include "items.h"

#if TEST_POSIX && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#include <unistd.h>

static bool interrupted; /* each second pread is; the others read at most 1,000 bytes */

static ssize_t pread_in_parts(int file, void *to, size_t bytes, off_t at) {
    static int calls;
    if (interrupted && ++calls % 2) {
        errno = EINTR;
        return -1;
    }
    return pread(file, to, interrupted && bytes > 1000 ? 1000 : bytes, at);
}
#define pread pread_in_parts
#include "../examples/tokens.h"
#undef pread

static char folder[64];
static spdl_error error;

static void folder_remove(void) {
    if (folder[0] != '\0' && !test_folder_remove(folder)) fprintf(stderr, "%s is left\n", folder);
}

static const char *path_of(const char *name) {
    static char path[256];
    if (folder[0] == '\0') {
        test_folder(folder, sizeof folder);
        atexit(folder_remove);
    }
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

/* Writes a file of two parts. */
static void put(const char *name, const void *head, size_t head_bytes, const void *data,
                size_t bytes) {
    FILE *file = fopen(path_of(name), "wb");
    REQUIRE(file != NULL);
    CHECK_EQ(fwrite(head, 1, head_bytes, file), head_bytes);
    CHECK_EQ(fwrite(data, 1, bytes, file), bytes);
    CHECK_EQ(fclose(file), 0);
}

/* A .npy file as numpy.save writes it. */
static void put_npy(const char *name, const char *descr, const char *shape, const void *data,
                    size_t bytes) {
    char head[129];
    int used;
    memset(head, ' ', sizeof head);
    memcpy(head, "\x93NUMPY\1\0v", 10); /* version 1.0, a header of 118 bytes */
    used = snprintf(head + 10, 118, "{'descr': '%s', 'fortran_order': False, 'shape': (%s), }",
                    descr, shape);
    head[10 + used] = ' ';
    head[127] = '\n';
    put(name, head, 128, data, bytes);
}

static spdl_files *files_of(const char *name) {
    spdl_files *files = NULL;
    REQUIRE(spdl_files_open(&files, path_of(name), NULL) == SPDL_OK);
    return files;
}

static uint32_t token_of(uint64_t at, size_t width) {
    const uint32_t value = (uint32_t)(at * 2654435761u >> 7);
    return width == 2 ? value & 0xffff : value;
}

/* A shard with the tokens from `first` on. kind: 0 raw, 1 llm.c, 2 .npy */
static void put_shard(const char *name, uint64_t first, uint32_t count, size_t width, int kind) {
    static char data[4 * 20000];
    const uint32_t magic[256] = { width == 2 ? 20240520 : 20240801, width == 2 ? 1 : 7, count };
    char shape[20];
    for (uint32_t i = 0; i < count; ++i) {
        const uint32_t wide = token_of(first + i, width);
        const uint16_t narrow = (uint16_t)wide;
        memcpy(data + i * width, width == 2 ? (const void *)&narrow : &wide, width);
    }
    snprintf(shape, sizeof shape, "%u,", (unsigned)count);
    if (kind == 0) put(name, "", 0, data, count * width);
    if (kind == 1) put(name, magic, sizeof magic, data, count * width);
    if (kind == 2) put_npy(name, width == 2 ? "<u2" : "<u4", shape, data, count * width);
}

/* Every part of the sequence, also of several shards, of empty ones and of many pieces. */
static void shards_of_all_kinds(void) {
    static const uint32_t counts[] = { 5, 0, 1, 9000, 3, 13000, 41, 0, 2, 0 };
    static const size_t widths[] = { 2, 2, 4, 2, 2, 4, 4, 2, 4, 2 };
    static const int kinds[] = { 0, 1, 2, 2, 1, 1, 2, 2, 1, 0 };
    static uint32_t got[22100], expected[22100];
    char name[] = "0.bin";
    uint64_t state = test_seed(), total = 0;
    spdl_files *files;
    Tokens t;
    for (size_t i = 0; i < 10; ++i, ++name[0]) {
        put_shard(name, total, counts[i], widths[i], kinds[i]);
        for (uint32_t k = 0; k < counts[i]; ++k, ++total)
            expected[total] = token_of(total, widths[i]);
    }
    files = files_of("*.bin");
    REQUIRE(tokens_open(&t, files, 2, &error) == SPDL_OK);
    CHECK_EQ(t.count, total);
    for (int i = 0; i < 2000; ++i) {
        const uint64_t first = i == 0 ? 0 : test_random(&state) % (total + 1);
        const uint64_t most = i % 2 ? 12 : total;
        const size_t count = i == 0 ? total : test_random(&state) % (most + 1);
        memset(got, 0xee, sizeof got);
        if (count > total - first) {
            CHECK_EQ(tokens_read(&t, first, count, got, &error), SPDL_E_INVALID);
            continue;
        }
        CHECK_EQ(tokens_read(&t, first, count, got, &error), SPDL_OK);
        CHECK(memcmp(got, expected + first, 4 * count) == 0 && got[count] == 0xeeeeeeee);
    }
    CHECK_EQ(tokens_read(&t, UINT64_MAX, 1, got, &error), SPDL_E_INVALID);
    CHECK_EQ(tokens_read(&t, 1, SIZE_MAX, got, &error), SPDL_E_INVALID);
    tokens_close(&t);
    spdl_files_close(files);
}

/* A read that is interrupted, or returns less than it should, goes on. */
static void reads_in_parts(void) {
    static uint32_t got[20000];
    spdl_files *files;
    Tokens t;
    put_shard("a.bin", 0, 3000, 2, 0);
    put_shard("b.bin", 3000, 17000, 4, 1);
    files = files_of("*.bin");
    interrupted = true;
    REQUIRE(tokens_open(&t, files, 2, &error) == SPDL_OK);
    CHECK_EQ(tokens_read(&t, 0, 20000, got, &error), SPDL_OK);
    interrupted = false;
    for (uint32_t i = 0; i < 20000; ++i)
        if (!CHECK_EQ(got[i], token_of(i, i < 3000 ? 2 : 4))) break;
    tokens_close(&t);
    spdl_files_close(files);
}

static void windows_of_a_length(void) {
    static const struct {
        uint64_t tokens, length, windows;
    } cases[] = { { 0, 4, 0 }, { 1, 4, 0 }, { 4, 4, 0 }, { 5, 4, 1 }, { 8, 4, 1 }, { 9, 4, 2 } };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        const Tokens t = { NULL, 0, cases[i].tokens };
        CHECK_EQ(tokens_windows(&t, cases[i].length), cases[i].windows);
    }
}

/* The file that was written last is the second of two, and is refused. */
static void refused(const char *name, size_t raw_bytes, spdl_result result, const char *words) {
    char text[400];
    spdl_files *files;
    Tokens t;
    put_shard("a.bin", 0, 100, 2, 1);
    files = files_of("*.bin");
    snprintf(text, sizeof text, "%s: %s", path_of(name), words);
    CHECK_EQ(tokens_open(&t, files, raw_bytes, &error), result);
    CHECK_EQ(error.result, result);
    CHECK_STR(error.text, text);
    CHECK(t.shard == NULL && t.shards == 0);
    spdl_files_close(files);
}

static void shards_that_are_damaged(void) {
    static const struct {
        uint32_t magic, version, tokens;
        size_t bytes, raw_bytes;
        const char *words;
    } cases[] = {
        { 20240520, 1, 10, 1043, 0,
          "damaged: 10 tokens of 2 bytes, but the file has 1043 bytes" },
        { 20240520, 1, 10, 1046, 2,
          "damaged: 10 tokens of 2 bytes, but the file has 1046 bytes" },
        { 20240801, 7, 10, 1060, 0,
          "damaged: 10 tokens of 4 bytes, but the file has 1060 bytes" },
        { 20240520, 1, 0xffffffff, 1044, 2,
          "damaged: 4294967295 tokens of 2 bytes, but the file has 1044 bytes" },
        { 20240520, 1, 0, 1023, 0, "damaged: 0 tokens of 2 bytes, but the file has 1023 bytes" },
        { 9, 9, 9, 45, 2, "damaged: 22 tokens of 2 bytes, but the file has 45 bytes" },
        { 9, 9, 9, 46, 4, "damaged: 11 tokens of 4 bytes, but the file has 46 bytes" },
        { 20240520, 2, 10, 1044, 0, "no header of NumPy or llm.c: raw_bytes must be 2 or 4" },
        { 20240801, 1, 10, 1064, 3, "no header of NumPy or llm.c: raw_bytes must be 2 or 4" },
        { 20240520, 1, 10, 6, 0, "damaged: 0 tokens of 2 bytes, but the file has 6 bytes" },
        { 20240520, 1, 10, 0, 0, "no header of NumPy or llm.c: raw_bytes must be 2 or 4" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        uint32_t file[300] = { cases[i].magic, cases[i].version, cases[i].tokens };
        put("x.bin", file, cases[i].bytes, "", 0);
        refused("x.bin", cases[i].raw_bytes, SPDL_E_FORMAT, cases[i].words);
    }
}

static void files_that_are_no_shards(void) {
    static const struct {
        const char *begin;
        size_t bytes;
        const char *words;
    } cases[] = {
        { "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 6\n", 63,
          "a pointer of Git LFS, not the data: run git lfs pull" },
        { "\x1f\x8b\x08\0", 4, "packed by gzip: run gzip -d first" },
        { "\x28\xb5\x2f\xfd", 4, "packed by Zstandard: run zstd -d first" },
        { "PK\3\4", 4, "a ZIP archive, such as .npz: run unzip first" },
    };
    spdl_files *files;
    Tokens t;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        for (size_t raw_bytes = 0; raw_bytes < 4; raw_bytes += 2) {
            put("x.bin", cases[i].begin, cases[i].bytes, "12345678", 8);
            refused("x.bin", raw_bytes, SPDL_E_FORMAT, cases[i].words);
        }
    }
    files = files_of("x.bin");
    remove(path_of("x.bin"));
    CHECK_EQ(tokens_open(&t, files, 2, &error), SPDL_E_IO);
    CHECK(strstr(error.text, "x.bin: No such file or directory") != NULL);
    spdl_files_close(files);
}

/* The data of a .npy file alone are tokens, in any byte order; of no other type than these. */
static void arrays_of_numpy(void) {
    static const uint8_t data[8] = { 1, 2, 3, 4, 5, 6, 7, 8 };
    static const struct {
        const char *dtype;
        uint64_t count;
        uint32_t first;
    } good[] = { { "<u2", 4, 0x0201 }, { ">u2", 4, 0x0102 }, { "<u4", 2, 0x04030201 },
                 { ">i4", 2, 0x01020304 }, { "<i4", 2, 0x04030201 } };
    static const struct {
        const char *dtype, *shape, *words;
    } bad[] = {
        { "<i8", "1,", "1 dimensions of '<i8', not one of uint16, uint32 or int32" },
        { "<i2", "4,", "1 dimensions of '<i2', not one of uint16, uint32 or int32" },
        { "|u1", "8,", "1 dimensions of '|u1', not one of uint16, uint32 or int32" },
        { "<f4", "2,", "1 dimensions of '<f4', not one of uint16, uint32 or int32" },
        { "<u2", "2, 2", "2 dimensions of '<u2', not one of uint16, uint32 or int32" },
        { "<u4", "", "0 dimensions of '<u4', not one of uint16, uint32 or int32" },
    };
    char shape[20];
    spdl_files *files;
    Tokens t;
    for (size_t i = 0; i < sizeof good / sizeof good[0]; ++i) {
        uint32_t first;
        snprintf(shape, sizeof shape, "%d,", (int)good[i].count);
        put_npy("x.bin", good[i].dtype, shape, data, sizeof data);
        files = files_of("x.bin");
        REQUIRE(tokens_open(&t, files, 0, &error) == SPDL_OK);
        CHECK_EQ(t.count, good[i].count);
        CHECK_EQ(tokens_read(&t, 0, 1, &first, &error), SPDL_OK);
        CHECK_EQ(first, good[i].first);
        tokens_close(&t);
        spdl_files_close(files);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; ++i) {
        put_npy("x.bin", bad[i].dtype, bad[i].shape, data, i == 5 ? 4 : sizeof data);
        refused("x.bin", 2, SPDL_E_UNSUPPORTED, bad[i].words);
    }
    put_npy("x.bin", "<u2", "9,", data, sizeof data);
    files = files_of("x.bin");
    CHECK_EQ(tokens_open(&t, files, 2, &error), SPDL_E_FORMAT);
    CHECK(strstr(error.text, "x.bin: ") != NULL);
    spdl_files_close(files);
}

/* Where llm.c's int and 32-bit offsets end; and a shard that is cut after it was opened. */
static void tokens_over_4_gib(void) {
    const uint64_t size = ((uint64_t)5 << 30) + 2;
    static const uint8_t mark[4] = { 0xd2, 0x04, 0xe1, 0x10 }; /* 1234, 4321 */
    uint32_t got[3];
    spdl_files *files;
    Tokens t;
    FILE *file;
    put("big.bin", "", 0, "", 0);
    file = fopen(path_of("big.bin"), "r+b");
    REQUIRE(file != NULL && fseeko(file, (off_t)(size - sizeof mark), SEEK_SET) == 0);
    REQUIRE(fwrite(mark, sizeof mark, 1, file) == 1 && fflush(file) == 0);
    files = files_of("big.bin");
    REQUIRE(tokens_open(&t, files, 2, &error) == SPDL_OK);
    CHECK_EQ(t.count, size / 2);
    CHECK_EQ(tokens_read(&t, size / 2 - 3, 3, got, &error), SPDL_OK);
    CHECK(got[0] == 0 && got[1] == 1234 && got[2] == 4321);
    REQUIRE(ftruncate(fileno(file), (off_t)size - 2) == 0);
    CHECK_EQ(tokens_read(&t, size / 2 - 3, 3, got, &error), SPDL_E_IO);
    CHECK(strstr(error.text, "big.bin: it ended while it was read") != NULL);
    tokens_close(&t);
    spdl_files_close(files);
    fclose(file);
}

TEST_TABLE(tokens) {
    TEST_CASE(shards_of_all_kinds), TEST_CASE(reads_in_parts), TEST_CASE(windows_of_a_length),
    TEST_CASE(shards_that_are_damaged), TEST_CASE(files_that_are_no_shards),
    TEST_CASE(arrays_of_numpy), TEST_CASE(tokens_over_4_gib), TEST_END
};
#else
static void shards(void) { TEST_SKIP("needs POSIX and a little-endian processor"); }
TEST_TABLE(tokens) { TEST_CASE(shards), TEST_END };
#endif
