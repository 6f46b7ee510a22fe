/* Lists of files, lines and tar archives: what is good against a second opinion, what is bad told
   with file and byte, and the rows. tests/check_examples.sh compares with Python's tarfile. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "test.h"

#include <math.h>

static char folder[64];
static spdl_error error;

/* A path in the folder of this test, which is made by the first call and removed at its end. */
static void folder_remove(void) {
    if (folder[0] != '\0' && !test_folder_remove(folder)) fprintf(stderr, "%s is left\n", folder);
}

static const char *path_of(const char *name) {
    static char paths[8][256];
    static int turn;
    if (folder[0] == '\0') {
        test_folder(folder, sizeof folder);
        atexit(folder_remove);
    }
    turn = (turn + 1) % 8;
    snprintf(paths[turn], sizeof paths[turn], "%s/%s", folder, name);
    return paths[turn];
}

static const char *put_file(const char *name, const void *data, size_t bytes) {
    const char *path = path_of(name);
    FILE *file = fopen(path, "wb");
    REQUIRE(file != NULL);
    CHECK_EQ(fwrite(data, 1, bytes, file), bytes);
    fclose(file);
    return path;
}

static const char *put_text(const char *name, const char *text) {
    return put_file(name, text, strlen(text));
}

/* What was told has all of it: a name and words, with a star between them. */
static void told(const char *words) {
    const char *at = error.text;
    char part[128];
    for (const char *end; *words != '\0'; words = *end ? end + 1 : end) {
        end = words + strcspn(words, "*");
        snprintf(part, sizeof part, "%.*s", (int)(end - words), words);
        at = strstr(at, part);
        if (at == NULL) break;
    }
    if (!CHECK(at != NULL)) fprintf(stderr, "  '%s' lacks '%s'\n", error.text, words);
}

/* --- lists of files --- */

static spdl_files *files_of(const char *path) {
    const spdl_files_desc desc = { .error = &error };
    spdl_files *files = NULL;
    if (!CHECK_EQ(spdl_files_open(&files, path, &desc), SPDL_OK))
        fprintf(stderr, "  %s\n", error.text);
    return files;
}

/* The names in a list, from the folder on. */
static const char *names_of(const spdl_files *files) {
    static char text[2048];
    size_t length = 0;
    text[0] = '\0';
    for (uint64_t i = 0; files != NULL && i < spdl_files_count(files); ++i)
        length += (size_t)snprintf(text + length, sizeof text - length, "%s%s", i ? " " : "",
                                   spdl_files_path(files, i) + strlen(folder) + 1);
    return text;
}

static void tree_make(void) {
    static const char *const folders[] = { "a", "a/deep", "b", ".git", "A" };
    static const char *const names[] = { "a/2.tar", "a/10.tar", "a/1.txt", "a/deep/x.tar",
                                         "b/[1].tar", "b/2.tar", ".git/y.tar", "A/3.tar", "a.tar",
                                         ".tar", "a/.z.tar" };
    if (!TEST_POSIX) TEST_SKIP("Windows takes a and A for one folder");
    for (size_t i = 0; i < 5; ++i) REQUIRE(mkdir(path_of(folders[i]), 0700) == 0);
    for (size_t i = 0; i < 11; ++i) put_file(names[i], "0123456789", i);
}

static void folders_and_patterns(void) {
    static const struct { const char *path, *names; } cases[] = {
        { "", "a.tar" },
        { "a", "a/1.txt a/10.tar a/2.tar" },
        { "a/", "a/1.txt a/10.tar a/2.tar" },
        { "a/2.tar", "a/2.tar" },
        { "b/[1].tar", "b/[1].tar" },
        { "*/*.tar", "A/3.tar a/10.tar a/2.tar b/2.tar b/[1].tar" },
        { "?/?.tar", "A/3.tar a/2.tar b/2.tar" },
        { "*/*/*", "a/deep/x.tar" },
        { "*/deep/x*", "a/deep/x.tar" },
        { "a/*1*", "a/1.txt a/10.tar" },
        { "a/*a*r*", "a/10.tar a/2.tar" },
        { "b/[*", "b/[1].tar" },
        { "b/?1]*.*", "b/[1].tar" },
        { "a/.*", "a/.z.tar" },
        { "?.tar", "a.tar" },
    };
    spdl_files_desc desc = { .recursive = true, .error = &error };
    spdl_files *files;
    tree_make();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        files = files_of(path_of(cases[i].path));
        CHECK_STR(names_of(files), cases[i].names);
        spdl_files_close(files);
    }
    REQUIRE(spdl_files_open(&files, path_of(""), &desc) == SPDL_OK);
    CHECK_STR(names_of(files),
              "A/3.tar a.tar a/1.txt a/10.tar a/2.tar a/deep/x.tar b/2.tar b/[1].tar");
    CHECK_EQ(files->at[1].bytes, 8);
    CHECK_EQ(files->at[7].bytes, 4);
    CHECK(spdl_files_path(files, 8) == NULL);
    spdl_files_close(files);
    REQUIRE(spdl_files_open(&files, path_of("*"), &desc) == SPDL_OK);
    CHECK_STR(names_of(files), "a.tar");
    spdl_files_close(files);
    REQUIRE(chdir(folder) == 0);
    files = files_of("*.tar");
    CHECK_STR(spdl_files_path(files, 0), "a.tar");
    spdl_files_close(files);
    files = files_of(".");
    CHECK_STR(spdl_files_path(files, 0), "./a.tar");
    spdl_files_close(files);
}

/* A middle part of a pattern looks for folders: what is none is no answer, and no failure. */
static void middle_parts(void) {
    const spdl_files_desc desc = { .error = &error };
    spdl_files *files = NULL;
    tree_make();
    REQUIRE(symlink("nowhere", path_of("dangling")) == 0);
    REQUIRE(symlink("a.tar/nowhere", path_of("through")) == 0);
    REQUIRE(symlink("a", path_of("link")) == 0);
    REQUIRE(mkfifo(path_of("pipe"), 0600) == 0);
    files = files_of(path_of("*/*.tar"));
    CHECK_STR(names_of(files), "A/3.tar a/10.tar a/2.tar b/2.tar b/[1].tar link/10.tar link/2.tar");
    spdl_files_close(files);
    files = files_of(path_of("d*")); /* the last part */
    CHECK_STR(names_of(files), "dangling");
    CHECK_EQ(files->at[0].bytes, 0);
    spdl_files_close(files);
    CHECK_EQ(spdl_files_open(&files, path_of("dangling"), &desc), SPDL_E_IO);
    told("/dangling': No such file");
    REQUIRE(symlink("self", path_of("self")) == 0); /* there may be a folder, for all one knows */
    CHECK_EQ(spdl_files_open(&files, path_of("*/*.tar"), &desc), SPDL_E_IO);
    told("/self': ");
}

static void nothing_to_list(void) {
    static const struct { const char *path; spdl_result result; const char *told; } cases[] = {
        { "none", SPDL_E_IO, "/none': No such file" },
        { "*.none", SPDL_E_NOT_FOUND, "/*.none': no files" },
        { "none/*.tar", SPDL_E_IO, "/none/': No such file" },
        { "empty", SPDL_E_NOT_FOUND, "/empty': no files" },
        { "pipe", SPDL_E_IO, "/pipe': a pipe" },
        { "[a", SPDL_E_IO, "/[a': No such file" },
    };
    spdl_files_desc desc = { .recursive = true, .error = &error };
    spdl_files *files = (spdl_files *)folder;
    char longer[5000];
    REQUIRE(mkdir(path_of("empty"), 0700) == 0);
    REQUIRE(mkfifo(path_of("pipe"), 0600) == 0);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        files = (spdl_files *)folder;
        CHECK_EQ(spdl_files_open(&files, path_of(cases[i].path), &desc), cases[i].result);
        CHECK(files == NULL);
        told(cases[i].told);
    }
    files = files_of(path_of("pip*")); /* what reads it fails */
    CHECK_STR(names_of(files), "pipe");
    spdl_files_close(files);
    REQUIRE(unlink(path_of("pipe")) == 0);
    put_text("1", "");
    REQUIRE(symlink(".", path_of("empty/loop")) == 0);
    CHECK_EQ(spdl_files_open(&files, path_of(""), &desc), SPDL_E_LIMIT);
    told("/loop/loop*32 folders deep");
    memset(longer, 'x', sizeof longer);
    longer[sizeof longer - 1] = '\0';
    CHECK_EQ(spdl_files_open(&files, longer, &desc), SPDL_E_LIMIT);
    told("...xxxx*x': a path has more than 4095 bytes");
    longer[4500] = '*';
    CHECK(spdl_files_open(&files, longer, &desc) != SPDL_OK);
    longer[10] = '/';
    CHECK(spdl_files_open(&files, longer, &desc) != SPDL_OK);
    longer[0] = '.'; /* a folder whose path is nearly as long as a path can be */
    for (size_t i = 1; i < 4090; ++i) longer[i] = i % 2 == 0 ? '.' : '/';
    longer[4090] = '\0';
    REQUIRE(chdir(folder) == 0);
    put_text("a name", "");
    CHECK_EQ(spdl_files_open(&files, longer, &desc), SPDL_E_LIMIT);
    told("/././': a path has more than 4095 bytes");
    memset(longer, 'x', 4096);
    longer[4096] = '\0';
    put_text("list", longer);
    CHECK_EQ(spdl_files_open(&files, "@list", &desc), SPDL_E_LIMIT);
    told("list: at byte 0: '@list': a path has more than 4095 bytes");
    CHECK_EQ(spdl_files_open(&files, "", &desc), SPDL_E_INVALID);
    CHECK_EQ(spdl_files_open(&files, NULL, &desc), SPDL_E_INVALID);
    CHECK_EQ(spdl_files_open(NULL, "x", NULL), SPDL_E_INVALID);
    spdl_files_close(NULL);
}

static void lists_of_paths(void) {
    char list[512], path[300];
    spdl_files *files;
    spdl_files_desc desc = { .error = &error };
    uint64_t hash;
    tree_make();
    snprintf(list, sizeof list, "b/2.tar\r\n\n%s\na/10.tar\nb/2.tar", path_of("a.tar"));
    snprintf(path, sizeof path, "@%s", put_text("list", list));
    files = files_of(path);
    CHECK_STR(names_of(files), "b/2.tar a.tar a/10.tar b/2.tar");
    CHECK_EQ(files->at[1].bytes, 8);
    spdl_files_close(files);
    REQUIRE(chdir(folder) == 0);
    put_text("list", "a.tar\n");
    files = files_of("@list");
    CHECK_STR(spdl_files_path(files, 0), "a.tar");
    spdl_files_close(files);
    put_text("list", "a/2.tar\nb/2.tar\n"); /* which have no folder in common */
    files = files_of("@list");
    hash = spdl_files_hash(files);
    spdl_files_close(files);
    files = files_of(path);
    CHECK(hash == spdl_files_hash(files));
    spdl_files_close(files);
    put_text("list", "a.tar\nb/none.tar\n");
    CHECK_EQ(spdl_files_open(&files, path, &desc), SPDL_E_IO);
    told("/list: at byte 6: '*/b/none.tar': No such file");
    CHECK_EQ(spdl_files_open(&files, path, NULL), SPDL_E_IO);
    put_text("list", "a.tar\nb\n");
    CHECK_EQ(spdl_files_open(&files, path, &desc), SPDL_E_IO);
    told("/list: at byte 6: '*/b': a folder, not a file");
    put_file("list", "a.tar\0b\n", 8);
    CHECK_EQ(spdl_files_open(&files, path, &desc), SPDL_E_FORMAT);
    told("/list: at byte 0: '*/a.tar': a path with a zero");
    put_text("list", "\n\r\n");
    CHECK_EQ(spdl_files_open(&files, path, &desc), SPDL_E_NOT_FOUND);
    CHECK_EQ(spdl_files_open(&files, "@none", &desc), SPDL_E_IO);
    told("none: No such file");
    CHECK_EQ(spdl_files_open(&files, "@", &desc), SPDL_E_IO);
    told("(an empty path): No such file");
    memset(list, 'x', sizeof list - 1);
    list[sizeof list - 1] = '\0';
    for (int i = 0; i < 10; ++i) memcpy(list, "a.tar\n", 6);
    put_text("list", list);
    CHECK_EQ(spdl_files_open(&files, path, &desc), SPDL_E_IO); /* a name too long for the system */
    told("/list: at byte 6: '...*xxx': File*name too long");
}

/* The byte order mark is no part of the first path. What is no text is refused by its name. */
static void lists_of_another_kind(void) {
    static const struct {
        const char *bytes;
        size_t count;
        const char *what;
    } kinds[] = {
        { "\xff\xfe" "a\0\n", 6, "/list: at byte 0: UTF-16: iconv -f UTF-16 -t UTF-8 first" },
        { "\x1f\x8b\x08", 3, "/list: at byte 0: packed by gzip: gzip -d first" },
        { "version https://git-lfs.github.com/spec/v1\n", 43,
          "/list: at byte 0: a pointer of Git LFS, not the data: git lfs pull" },
        { "b.txt \n", 7, "/list: at byte 0: '*/b.txt ': No such file" },
    };
    char path[300];
    spdl_files *files;
    spdl_files_desc desc = { .error = &error };
    put_text("a.txt", "x");
    snprintf(path, sizeof path, "@%s", put_text("list", "\xef\xbb\xbf" "a.txt\n"));
    files = files_of(path);
    CHECK_STR(names_of(files), "a.txt");
    spdl_files_close(files);
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; ++i) {
        put_file("list", kinds[i].bytes, kinds[i].count);
        CHECK_EQ(spdl_files_open(&files, path, &desc), i < 3 ? SPDL_E_FORMAT : SPDL_E_IO);
        told(kinds[i].what);
    }
}

/* Names, sizes and order count; where the folder lies does not. */
static void hash_of_the_manifest(void) {
    uint64_t first, hash;
    spdl_files *files;
    char list[300];
    REQUIRE(mkdir(path_of("one"), 0700) == 0);
    put_text("one/x", "12345");
    put_text("one/y", "123");
#define HASH(path)                                                                                 \
    (files = files_of(path), hash = spdl_files_hash(files), spdl_files_close(files), hash)
    first = HASH(path_of("one"));
    CHECK(first == HASH(path_of("one/")));
    CHECK(first == HASH(path_of("one/*")));
    REQUIRE(rename(path_of("one"), path_of("two")) == 0);
    CHECK(first == HASH(path_of("two")));
    REQUIRE(chdir(path_of("two")) == 0);
    CHECK(first == HASH("?"));
    put_text("list", "two/x\ntwo/y\n");
    snprintf(list, sizeof list, "@%s", path_of("list"));
    CHECK(first == HASH(list));
    put_text("list", "two/x\ntwo/y\nlist");
    CHECK(first != HASH(list));
    REQUIRE(mkdir(path_of("three"), 0700) == 0); /* "t" is no folder */
    put_text("three/y", "123");
    REQUIRE(mkdir(path_of("own"), 0700) == 0);
    put_text("own/y", "123");
    put_text("list", "two/x\nown/y\n");
    CHECK(first != HASH(list));
    put_text("list", "two/x\nthree/y\n");
    hash = HASH(list);
    if (!TEST_POSIX) TEST_SKIP("Windows does not rename the folder that a program is in");
    REQUIRE(rename(path_of("two"), path_of("swo")) == 0);
    REQUIRE(rename(path_of("three"), path_of("shree")) == 0);
    put_text("list", "swo/x\nshree/y\n");
    first = hash;
    CHECK(first != HASH(list));
    REQUIRE(rename(path_of("swo"), path_of("two")) == 0);
    first = HASH(path_of("two"));
    put_text("two/.list", "x\ny");
    snprintf(list, sizeof list, "@%s", path_of("two/.list"));
    CHECK(first == HASH(list));
    put_text("two/.list", "y\nx");
    CHECK(first != HASH(list));
    put_text("two/x", "54321");
    CHECK(first == HASH("."));
    put_text("two/x", "5432");
    CHECK(first != HASH("."));
    put_text("two/x", "54321");
    REQUIRE(rename("x", "w") == 0);
    CHECK(first != HASH("."));
}

/* Windows separates the parts of a path by both slashes. */
static void hash_behind_backslashes(void) {
    uint64_t first, hash;
    spdl_files *files;
    char list[300];
    REQUIRE(mkdir(path_of("one"), 0700) == 0);
    put_text("one/x", "12345");
    put_text("list", "one\\x\n");
    snprintf(list, sizeof list, "@%s", path_of("list"));
    if (TEST_POSIX) TEST_SKIP("a backslash is a letter of a name");
    first = HASH(path_of("one"));
    CHECK(first == HASH(list));
#undef HASH
}

/* --- rows --- */

static spdl_pipeline *start_rows(const spdl_stage *rows, size_t count) {
    const spdl_pipeline_desc desc = { .workers = 2, .error = &error };
    spdl_pipeline *p = NULL;
    if (!CHECK_EQ(spdl_pipeline_create(&p, &desc, rows, count), SPDL_OK))
        fprintf(stderr, "  %s\n", error.text);
    REQUIRE(p != NULL);
    return p;
}
#define START(...) start_rows(SPDL_STAGES(__VA_ARGS__))

/* How it ended, with the text of a failure. */
static void ends(spdl_pipeline *p, spdl_result result, spdl_result wanted, const char *words) {
    CHECK_STR(spdl_result_text(result), spdl_result_text(wanted));
    error = *spdl_pipeline_error(p);
    told(words);
    spdl_pipeline_destroy(p);
}

/* The other end of 9, then one that is not there. */
SPDL_FN(backwards, void, spdl_index) {
    const uint64_t number = spdl_sequence(task);
    if (number == 10) return SPDL_END;
    if ((*out = (spdl_index *)calloc(1, sizeof **out)) == NULL) return SPDL_E_NOMEM;
    (*out)->index = number < 9 ? 8 - number : UINT64_MAX;
    return SPDL_OK;
}

SPDL_FN(nothing, void, spdl_index) { return spdl_sequence(task) == 1 ? SPDL_END : SPDL_OK; }

/* A dangling link in a folder fails where it is read, and a budget passes the rest. */
static void a_dangling_link_is_one_failure(void) {
    if (!TEST_POSIX) TEST_SKIP("Windows has no symbolic links for everybody");
    put_text("a", "1");
    put_text("c", "3");
    REQUIRE(symlink("nowhere", path_of("b")) == 0);
    for (int budget = 0; budget < 2; ++budget) {
        spdl_files *files = files_of(path_of(""));
        spdl_pipeline *p = START(SPDL_FILES(files), SPDL_READ(.max_failures = budget),
                                 SPDL_SINK(3));
        spdl_record *record;
        spdl_result result;
        int count = 0;
        for (; (result = SPDL_NEXT(p, &record, SPDL_FOREVER)) == SPDL_OK; ++count)
            spdl_record_free(record);
        CHECK_EQ(count, 1 + budget);
        ends(p, result, budget ? SPDL_END : SPDL_E_IO, budget ? "" : "/b: No such file");
        spdl_files_close(files);
    }
}

static void rows_of_files(void) {
    spdl_files *files;
    spdl_pipeline *p;
    spdl_result result;
    char *path, name[2] = "0";
    for (; name[0] < '9'; ++name[0]) put_text(name, "");
    put_text("8", "");
    files = files_of(path_of(""));
    REQUIRE(spdl_files_count(files) == 9);
    p = START(SPDL_FILES(files, .continuous = true), SPDL_SINK(3));
    for (int epoch = 0; epoch < 2; ++epoch) {
        for (uint64_t i = 0; i < 9; ++i) {
            REQUIRE(SPDL_NEXT(p, &path, SPDL_FOREVER) == SPDL_OK);
            CHECK(path == spdl_files_path(files, i));
        }
        CHECK_EQ(SPDL_NEXT(p, &path, SPDL_FOREVER), SPDL_END);
    }
    CHECK_EQ(spdl_pipeline_rewind(p, 7, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(SPDL_NEXT(p, &path, SPDL_FOREVER), SPDL_OK);
    CHECK(path == spdl_files_path(files, 7));
    spdl_pipeline_destroy(p);
    p = START(SPDL_SOURCE(backwards, .free_item = free), SPDL_FILES_AT(files, .concurrency = 2),
              SPDL_SINK(3));
    for (uint64_t i = 9; i-- > 0;) {
        REQUIRE(SPDL_NEXT(p, &path, SPDL_FOREVER) == SPDL_OK);
        CHECK(path == spdl_files_path(files, i));
    }
    result = SPDL_NEXT(p, &path, SPDL_FOREVER);
    ends(p, result, SPDL_E_STAGE, "files_at*no file 18446744073709551615: there are 9");
    p = START(SPDL_SOURCE(nothing), SPDL_FILES_AT(files), SPDL_SINK(3));
    result = SPDL_NEXT(p, &path, SPDL_FOREVER);
    ends(p, result, SPDL_E_STAGE, "NULL, not an index");
    spdl_files_close(files);
}

/* A position is refused by a pipeline of other files. */
static void a_position_is_of_its_files(void) {
    char text[SPDL_STATE_BYTES];
    const char *texts[] = { text };
    for (int turn = 0; turn < 3; ++turn) {
        put_text("1", turn < 2 ? "12345678" : "1234567890");
        spdl_files *files = files_of(path_of(""));
        spdl_pipeline_desc desc = { .data_hash = spdl_files_hash(files) };
        spdl_pipeline *p = NULL;
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(SPDL_FILES(files), SPDL_SINK(3))) ==
                SPDL_OK);
        error = (spdl_error){ .text = "" };
        if (turn == 0) CHECK(spdl_state_save(p, text, sizeof text) > 0);
        CHECK_EQ(spdl_state_load(p, texts, 1, SPDL_FOREVER, &error),
                 turn < 2 ? SPDL_OK : SPDL_E_INVALID);
        CHECK((strstr(error.text, "is of another data set: data=") != NULL) == (turn == 2));
        spdl_pipeline_destroy(p);
        spdl_files_close(files);
    }
}

/* Loads `text` into a pipeline of these rows, without a data_hash. The first call saves it. */
static void moved(char *text, const char *refused, const spdl_stage *rows, size_t count) {
    const char *const texts[] = { text };
    spdl_pipeline *p = NULL;
    REQUIRE(spdl_pipeline_create(&p, NULL, rows, count) == SPDL_OK);
    if (text[0] == '\0') REQUIRE(spdl_state_save(p, text, SPDL_STATE_BYTES) > 0);
    error = (spdl_error){ .text = "" };
    CHECK_EQ(spdl_state_load(p, texts, 1, SPDL_FOREVER, &error),
             refused == NULL ? SPDL_OK : SPDL_E_INVALID);
    if (refused != NULL && !CHECK(strstr(error.text, refused) != NULL))
        fprintf(stderr, "  '%s' lacks '%s'\n", error.text, refused);
    spdl_pipeline_destroy(p);
}

/* Without a data_hash, too: a list of another length, other files, another count. */
static void a_position_is_of_its_rows(void) {
    static const char other[] = "is of another data set: data=";
    char text[4][SPDL_STATE_BYTES] = { "", "", "", "" };
    for (int turn = 0; turn < 4; ++turn) {
        const char *refused = turn < 2 ? NULL : other;
        put_text("1", turn < 3 ? "12345678" : "1234567890");
        put_text("2", "12");
        if (turn == 2) put_text("3", "123");
        spdl_files *files = files_of(path_of(""));
        moved(text[0], refused, SPDL_STAGES(SPDL_FILES(files), SPDL_SINK(3)));
        moved(text[1], refused, SPDL_STAGES(SPDL_COUNT(2), SPDL_FILES_AT(files), SPDL_SINK(3)));
        moved(text[2], turn < 3 ? NULL : "data=100, here data=50;",
              SPDL_STAGES(SPDL_COUNT(turn < 3 ? 100 : 50), SPDL_SINK(3)));
        moved(text[3], turn < 2 ? NULL : other,
              SPDL_STAGES(SPDL_COUNT(turn < 2 ? 2 : 1), SPDL_FILES_AT(files), SPDL_SINK(3)));
        spdl_files_close(files);
        if (turn == 2) CHECK_EQ(remove(path_of("3")), 0);
    }
}

typedef struct blob {
    uint8_t at[400000];
    size_t count;
} blob;

static void put_le(blob *to, uint64_t value, int count) {
    for (; count > 0; --count, value >>= 8) to->at[to->count++] = (uint8_t)value;
}

static const char *put_bytes(const char *name, const blob *from) {
    return put_file(name, from->at, from->count);
}

/* Numbers without a sampler, with positions. */
static void numbers_in_order(void) {
    for (uint64_t count = 0; count < 3; ++count) {
        spdl_pipeline *p = START(SPDL_COUNT(count * 5, .continuous = true), SPDL_SINK(2));
        char text[SPDL_STATE_BYTES];
        const char *texts[] = { text };
        spdl_index *at;
        CHECK(spdl_state_save(p, text, sizeof text) > 0);
        for (uint64_t epoch = 0; epoch < 3; ++epoch) {
            for (uint64_t i = 0; i < count * 5; ++i) {
                REQUIRE(SPDL_NEXT(p, &at, SPDL_FOREVER) == SPDL_OK);
                CHECK(at->index == i && at->position == i && at->epoch == epoch && !at->source);
                spdl_buffer_free(at);
                if (epoch == 1 && i == 2) CHECK(spdl_state_save(p, text, sizeof text) > 0);
            }
            CHECK_EQ(SPDL_NEXT(p, &at, SPDL_FOREVER), SPDL_END);
        }
        CHECK_EQ(spdl_state_load(p, texts, 1, SPDL_FOREVER, &error), SPDL_OK);
        if (count > 0) {
            REQUIRE(SPDL_NEXT(p, &at, SPDL_FOREVER) == SPDL_OK);
            CHECK(at->index == 3 && at->epoch == 1);
            spdl_buffer_free(at);
        }
        spdl_pipeline_destroy(p);
    }
}

/* --- tar --- */

typedef struct member {
    const char *name;
    uint64_t size;
    char kind;         /* default '0' */
    const char *magic; /* default "ustar", of 6 bytes: with the zero */
    const char *prefix;
    bool base256, no_data, blanks;
    bool wrong; /* its sum */
} member;

static void tar_header(blob *tar, const member *m) {
    uint8_t *head = tar->at + tar->count;
    int sum = 0;
    memset(head, 0, 512);
    memcpy(head, m->name, strlen(m->name) < 100 ? strlen(m->name) : 100);
    memcpy(head + 100, "0000644", 8);
    snprintf((char *)head + 124, 12, m->blanks ? "%10llo " : "%011llo",
             (unsigned long long)m->size);
    if (m->base256) {
        memset(head + 124, 0, 12);
        head[124] = 0x80;
        for (int i = 0; i < 8; ++i) head[135 - i] = (uint8_t)(m->size >> 8 * i);
    }
    head[156] = (uint8_t)(m->kind ? m->kind : '0');
    if (m->kind == 'v') head[156] = 0; /* of an archive of version 7 */
    memcpy(head + 257, m->magic ? m->magic : "ustar", 6);
    if (m->prefix) memcpy(head + 345, m->prefix, strlen(m->prefix));
    memset(head + 148, ' ', 8);
    for (int i = 0; i < 512; ++i) sum += head[i];
    snprintf((char *)head + 148, 8, "%06o", (unsigned)(sum + m->wrong));
    tar->count += 512;
}

/* The data of a member: its bytes are those of its name, again and again. */
static void tar_data(blob *tar, const void *data, size_t count) {
    memset(tar->at + tar->count, 0, (count + 511) & ~(size_t)511);
    memcpy(tar->at + tar->count, data, count);
    tar->count += (count + 511) & ~(size_t)511;
}

static void tar_add(blob *tar, const member *m) {
    static char data[100000];
    tar_header(tar, m);
    for (size_t i = 0; i < m->size && !m->no_data; ++i) data[i] = m->name[i % strlen(m->name)];
    if (!m->no_data) tar_data(tar, data, (size_t)m->size);
}
#define ADD(tar, ...) tar_add((tar), &(member){ __VA_ARGS__ })

/* A header of kind x, g, L or K. */
static void tar_extra(blob *tar, char kind, const char *text) {
    tar_header(tar, &(member){ .name = "extra", .size = strlen(text), .kind = kind });
    tar_data(tar, text, strlen(text));
}

static void tar_end(blob *tar) {
    memset(tar->at + tar->count, 0, 1024);
    tar->count += 1024;
}

static spdl__records *records_of(const char *path, spdl__records_kind kind,
                                 spdl_records_desc desc) {
    spdl__records *records = NULL;
    desc.error = &error;
    if (!CHECK_EQ(spdl__records_open(&records, path, kind, &desc), SPDL_OK)) told("");
    REQUIRE(records != NULL);
    return records;
}

/* All records as text: "name:bytes name:bytes", those of a sample joined by +, and how it ended. */
static const char *read_records(const char *path, spdl__records_kind kind, spdl_records_desc desc,
                                spdl_result *result) {
    static char text[9000];
    spdl__records *records = records_of(path, kind, desc);
    spdl_record *record = NULL;
    size_t length = 0;
    text[0] = '\0';
    while ((*result = spdl__records_next(records, &record, &error)) == SPDL_OK) {
        for (const spdl_record *r = record; r != NULL; r = r->next) {
            CHECK(r->data[r->bytes] == 0 && ((uintptr_t)r->data & 63) == 0);
            length += (size_t)snprintf(text + length, sizeof text - length, "%s%s:%zu",
                                       r != record ? "+" : length ? " " : "", r->name, r->bytes);
        }
        spdl_record_free(record);
    }
    if (*result < 0) { /* and stays so */
        const spdl_error before = error;
        CHECK_EQ(spdl__records_next(records, &record, &error), *result);
        CHECK_STR(error.text, before.text);
    }
    spdl__records_close(records);
    return text;
}

static void tar_reads(const blob *tar, const char *wanted) {
    spdl_result result;
    const spdl_records_desc desc = { .max_bytes = 0 };
    CHECK_STR(read_records(put_bytes("x.tar", tar), SPDL__RECORDS_TAR, desc, &result), wanted);
    if (!CHECK_EQ(result, SPDL_END)) fprintf(stderr, "  %s\n", error.text);
}

static void tar_fails(const blob *tar, const char *before, spdl_result wanted, const char *words) {
    spdl_result result;
    const spdl_records_desc desc = { .max_bytes = 90000 };
    CHECK_STR(read_records(put_bytes("x.tar", tar), SPDL__RECORDS_TAR, desc, &result), before);
    CHECK_STR(spdl_result_text(result), spdl_result_text(wanted));
    told(words);
}

static void tar_of_all_kinds(void) {
    static blob tar;
    char longest[256], pax[1024];
    spdl__records *records;
    spdl_record *record = NULL;
    memset(longest, 'n', 250);
    longest[250] = '\0';
    tar.count = 0;
    tar_end(&tar);
    tar_reads(&tar, "");
    tar.count = 0;
    ADD(&tar, .name = "a/empty");
    ADD(&tar, .name = "one", .size = 1);
    ADD(&tar, .name = "block", .size = 512);
    ADD(&tar, .name = "more", .size = 513);
    ADD(&tar, .name = "old", .size = 3, .kind = 'v', .magic = "\0\0\0\0\0");
    ADD(&tar, .name = "oldfolder/", .size = 700, .kind = 'v', .magic = "\0\0\0\0\0",
        .no_data = true);
    ADD(&tar, .name = "rest", .size = 5, .prefix = "prefix");
    ADD(&tar, .name = "gnu", .size = 5, .prefix = "12345", .magic = "ustar ");
    ADD(&tar, .name = "seven", .size = 5, .kind = '7');
    ADD(&tar, .name = "blanks", .size = 6, .blanks = true);
    ADD(&tar, .name = "base256", .size = 7, .base256 = true);
    for (char kind = '3'; kind < '7'; ++kind)
        ADD(&tar, .name = "device", .size = 99, .kind = kind, .no_data = true);
    ADD(&tar, .name = "dumped", .size = 99, .kind = 'D');
    ADD(&tar, .name = "last", .size = 4);
    tar_end(&tar);
    tar_reads(&tar, "a/empty:0 one:1 block:512 more:513 old:3 prefix/rest:5 gnu:5 seven:5 "
                    "blanks:6 base256:7 last:4");
    records = records_of(path_of("x.tar"), SPDL__RECORDS_TAR,
                         (spdl_records_desc){ .max_bytes = 0 });
    for (int i = 0; i < 4; ++i) {
        spdl_record_free(record);
        REQUIRE(spdl__records_next(records, &record, &error) == SPDL_OK);
    }
    CHECK_EQ(record->offset, 6 * 512);
    CHECK(memcmp(record->data, "moremore", 8) == 0 && record->data[512] == 'm');
    spdl__records_close(records);
    spdl_record_free(record); /* it stays behind */
    spdl_record_free(NULL);
    spdl__records_close(NULL);
    tar.count = 0;
    tar_extra(&tar, 'L', longest);
    tar_extra(&tar, 'K', "the target of a link");
    ADD(&tar, .name = "short", .size = 3);
    tar_extra(&tar, 'g', "15 comment=all\n");
    snprintf(pax, sizeof pax, "%s%s260 path=%s\n11 size=20\n", "18 comment=8 path\n",
             "21 x=1\n13 path=evil\n\n", longest);
    tar_extra(&tar, 'x', pax);
    tar_header(&tar, &(member){ .name = "short", .size = 1 });
    tar_data(&tar, "12345678901234567890", 20);
    ADD(&tar, .name = "plain", .size = 2);
    tar_extra(&tar, 'L', "of a folder");
    ADD(&tar, .name = "d", .kind = '5');
    ADD(&tar, .name = "plain2", .size = 2);
    tar_end(&tar);
    snprintf(pax, sizeof pax, "%s:3 %s:20 plain:2 plain2:2", longest, longest);
    tar_reads(&tar, pax);
}

static void bad_pax_headers(void) {
    static const struct {
        const char *pax;
        char kind;
        spdl_result result;
        const char *told;
    } cases[] = {
        { "9 path=x", 'x', SPDL_E_FORMAT, "x.tar: at byte 1536: a pax header that is damaged" },
        { "99 path=x\n", 'x', SPDL_E_FORMAT, "damaged" },
        { "9 path=x\nx", 'x', SPDL_E_FORMAT, "damaged" },
        { "9 path=xy", 'x', SPDL_E_FORMAT, "damaged" },
        { "path=x\n", 'x', SPDL_E_FORMAT, "damaged" },
        { "0 path=x\n", 'x', SPDL_E_FORMAT, "damaged" },
        { "3 \n", 'x', SPDL_E_FORMAT, "damaged" },
        { "8 pathx\n", 'x', SPDL_E_FORMAT, "damaged" },
        { "99999999999999999999 path=x\n", 'x', SPDL_E_FORMAT, "damaged" },
        { "18446744073709551644 path=x\n", 'x', SPDL_E_FORMAT, "damaged" }, /* 2^64 + 28 */
        { "8 path=\n", 'x', SPDL_E_FORMAT, "a name that is empty" },
        { "9 size=x\n", 'x', SPDL_E_FORMAT, "a size that is no number" },
        { "11 size=-1\n", 'x', SPDL_E_FORMAT, "a size that is no number" },
        { "29 size=18446744073709551616\n", 'x', SPDL_E_FORMAT, "a size that is no number" },
        { "28 size=9223372036854775808\n", 'x', SPDL_E_FORMAT, "a size that is no number" },
        { "28 size=9000000000000000000\n", 'x', SPDL_E_FORMAT,
          "at byte 2560: cut off: 9000000000000000000 bytes" },
        { "22 GNU.sparse.major=1\n", 'x', SPDL_E_UNSUPPORTED, "a sparse file" },
        { "9 path=x\n", 'g', SPDL_E_UNSUPPORTED, "at byte 1536: a global pax header with a path" },
        { "9 size=1\n", 'g', SPDL_E_UNSUPPORTED, "a global pax header with a size" },
    };
    static blob tar;
    char *name = (char *)malloc(100000);
    REQUIRE(name != NULL);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        tar.count = 0;
        ADD(&tar, .name = "first", .size = 4);
        tar_extra(&tar, cases[i].kind, cases[i].pax);
        ADD(&tar, .name = "last", .size = 4);
        tar_end(&tar);
        tar_fails(&tar, "first:4", cases[i].result, cases[i].told);
    }
    tar.count = 0;
    tar_extra(&tar, 'x', "8 size=\n"); /* as in Python: 0 */
    ADD(&tar, .name = "none", .size = 4, .no_data = true);
    tar_end(&tar);
    tar_reads(&tar, "none:0");
    tar.count = 0;
    tar_extra(&tar, 'x', ""); /* no records, and a name of an old archive that is empty */
    ADD(&tar, .name = "", .kind = 'v', .magic = "\0\0\0\0\0", .no_data = true);
    tar_end(&tar);
    tar_reads(&tar, ":0");
    for (int kind = 0; kind < 2; ++kind) { /* a record that leaves its header, a zero in a name */
        static const char records[2][21] = { "20 path=xyz........\n", "20 path=x\0z........\n" };
        tar.count = 0;
        tar_header(&tar, &(member){ .name = "extra", .size = kind ? 20 : 12, .kind = 'x' });
        tar_data(&tar, records[kind], 20);
        ADD(&tar, .name = "last");
        tar_end(&tar);
        tar_fails(&tar, "", SPDL_E_FORMAT, kind ? "has a zero in it" : "damaged");
    }
    for (int length = 4095; length < 4097; ++length) {
        spdl_result result;
        memset(name, 'n', 4096);
        name[length] = '\0';
        tar.count = 0;
        tar_extra(&tar, 'L', name);
        ADD(&tar, .name = "last");
        tar_end(&tar);
        put_bytes("x.tar", &tar);
        read_records(path_of("x.tar"), SPDL__RECORDS_TAR,
                     (spdl_records_desc){ .max_bytes = 0 }, &result);
        CHECK_EQ(result, length == 4095 ? SPDL_END : SPDL_E_FORMAT);
    }
    for (int kind = 0; kind < 4; ++kind) { /* too long a name, and too long a header */
        const int digits = kind < 2 ? 4 : 5, length = kind < 2 ? 4200 : 90001;
        memset(name, 'n', 100000);
        if (kind & 1) snprintf(name, 12, "%d path=", length);
        if (kind & 1) name[digits + 6] = 'n';
        name[length] = '\0';
        if (kind & 1) name[length - 1] = '\n';
        tar.count = 0;
        tar_extra(&tar, kind & 1 ? 'x' : 'L', name);
        ADD(&tar, .name = "last");
        tar_end(&tar);
        tar_fails(&tar, "", kind < 2 ? SPDL_E_FORMAT : SPDL_E_LIMIT,
                  kind < 2 ? "too long" : "at byte 512: a header of 90001 bytes: raise max_bytes, "
                                          "which is 90000");
    }
    memset(name, 'v', 70000); /* attributes of a file take more than a window of the reader */
    memcpy(name, "70000 SCHILY.xattr.user.x=", 26);
    strcpy(name + 69999, "\n");
    tar.count = 0;
    tar_extra(&tar, 'x', name);
    ADD(&tar, .name = "last", .size = 4);
    tar_end(&tar);
    tar_reads(&tar, "last:4");
    free(name);
}

/* What is behind a link is missing. All plain files pass first, so a budget can leave links out. */
static void links_are_missing_data(void) {
    static const spdl_records_desc grouped = { .group = true };
    static const char words[] = "x.tar: at byte 1024: 2 links, the first one here: pack with tar "
                                "-h --hard-dereference, or leave links out with .max_failures = -1";
    static blob tar;
    spdl_result result;
    tar.count = 0;
    ADD(&tar, .name = "a.cls", .size = 1);
    ADD(&tar, .name = "a.jpg", .kind = '1');
    ADD(&tar, .name = "b.cls", .size = 2);
    ADD(&tar, .name = "b.jpg", .kind = '2');
    ADD(&tar, .name = "c.jpg", .size = 3);
    tar_end(&tar);
    tar_fails(&tar, "a.cls:1 b.cls:2 c.jpg:3", SPDL_E_UNSUPPORTED, words);
    CHECK_STR(read_records(path_of("x.tar"), SPDL__RECORDS_TAR, grouped, &result),
              "a.cls:1 b.cls:2 c.jpg:3");
    CHECK_EQ(result, SPDL_E_UNSUPPORTED);
    for (int budget = 0; budget >= -1; --budget) {
        spdl_files *files = files_of(path_of("x.tar"));
        spdl_pipeline *p = START(SPDL_FILES(files), SPDL_TAR(NULL, .max_failures = budget),
                                 SPDL_SINK(3));
        spdl_record *record;
        spdl_stats stats;
        int count = 0;
        while ((result = SPDL_NEXT(p, &record, SPDL_FOREVER)) == SPDL_OK) {
            spdl_record_free(record);
            ++count;
        }
        CHECK_EQ(count, 3);
        spdl_pipeline_stats(p, &stats);
        CHECK_EQ(stats.stage[1].failures, 1);
        ends(p, result, budget == 0 ? SPDL_E_UNSUPPORTED : SPDL_END, budget == 0 ? words : "");
        spdl_files_close(files);
    }
}

/* One archive behind another in a file; of a sample over the border, and what is no archive. */
static void archives_in_a_row(void) {
    static const spdl_records_desc grouped = { .group = true };
    static blob tar;
    spdl_result result;
    tar.count = 0;
    ADD(&tar, .name = "a.1", .size = 1);
    for (int i = 0; i < 9; ++i) tar_end(&tar);
    ADD(&tar, .name = "b.1", .size = 600);
    tar_end(&tar);
    ADD(&tar, .name = "b.2", .size = 2);
    tar_end(&tar);
    tar_reads(&tar, "a.1:1 b.1:600 b.2:2");
    CHECK_STR(read_records(path_of("x.tar"), SPDL__RECORDS_TAR, grouped, &result),
              "a.1:1 b.1:600+b.2:2");
    CHECK_EQ(result, SPDL_END);
    tar.count -= 1024; /* the last one was cut off */
    tar_fails(&tar, "a.1:1 b.1:600 b.2:2", SPDL_E_FORMAT, "it ends without an empty block");
    tar_end(&tar);
    memset(tar.at + tar.count, 'x', 700);
    tar.count += 700;
    tar_fails(&tar, "a.1:1 b.1:600 b.2:2", SPDL_E_FORMAT, "no header of a tar file");
    tar.count -= 600;
    tar_fails(&tar, "a.1:1 b.1:600 b.2:2", SPDL_E_FORMAT, "cut off");
}

static void bad_tars(void) {
    static blob tar;
    size_t whole;
    tar.count = 0;
    tar_fails(&tar, "", SPDL_E_FORMAT, "at byte 0: cut off: it ends without an empty block");
    put_le(&tar, 0x8b1f, 2);
    tar.count = 40; /* less than a header */
    tar_fails(&tar, "", SPDL_E_FORMAT, "at byte 0: packed by gzip");
    tar.count = 600;
    tar_fails(&tar, "", SPDL_E_FORMAT, "at byte 0: packed by gzip");
    tar.at[1] = 0x8c;
    tar_fails(&tar, "", SPDL_E_FORMAT, "at byte 0: no header of a tar file: its checksum is wrong");
    memset(tar.at, 'x', 600);
    tar_fails(&tar, "", SPDL_E_FORMAT, "at byte 0: no header of a tar file: its checksum is wrong");
    tar.count = 0;
    ADD(&tar, .name = "good", .size = 3);
    ADD(&tar, .name = "bad", .wrong = true);
    tar_end(&tar);
    tar_fails(&tar, "good:3", SPDL_E_FORMAT, "at byte 1024: no header of a tar file");
    tar.count = 0;
    ADD(&tar, .name = "sparse", .kind = 'S');
    tar_fails(&tar, "", SPDL_E_UNSUPPORTED, "at byte 0: a sparse file");
    tar.count = 0;
    ADD(&tar, .name = "part", .kind = 'M');
    tar_fails(&tar, "", SPDL_E_UNSUPPORTED, "a part of a larger archive");
    for (int i = 0; i < 5; ++i) { /* sizes */
        static const char *const fields[] = { "0000000000x", "            ", "0000000 001",
                                              "\xff\xff\xff\xff\xff\xff",
                                              "\x80\1\1\1\1\1\1\1\1\1\1" };
        int sum = 0;
        tar.count = 0;
        ADD(&tar, .name = "size", .size = 0);
        memset(tar.at + 124, 0, 12);
        memcpy(tar.at + 124, fields[i], strlen(fields[i]));
        memset(tar.at + 148, ' ', 8);
        for (int k = 0; k < 512; ++k) sum += tar.at[k];
        snprintf((char *)tar.at + 148, 8, "%06o", (unsigned)sum);
        tar_end(&tar);
        if (i == 1 || i == 2)
            tar_reads(&tar, "size:0"); /* what follows a blank is no number */
        else
            tar_fails(&tar, "", SPDL_E_FORMAT, "at byte 124: a size that is no number");
    }
    tar.count = 0;
    ADD(&tar, .name = "large", .size = (uint64_t)1 << 62, .base256 = true, .no_data = true);
    tar_fails(&tar, "", SPDL_E_FORMAT, "at byte 512: cut off: 4611686018427387904 bytes");
    tar.count = 0;
    ADD(&tar, .name = "limited\n", .size = 90001);
    tar_fails(&tar, "", SPDL_E_LIMIT, "member 'limited?' has 90001 bytes, more than max_bytes");
    tar.count = 0; /* cut at every place but inside of the last empty block: never the end */
    tar_extra(&tar, 'x', "10 path=x\n");
    ADD(&tar, .name = "y", .size = 3);
    ADD(&tar, .name = "z", .size = 513);
    whole = tar.count;
    tar_end(&tar);
    for (size_t cut = whole + 511; cut-- > 0; cut -= cut % 512 > 20 && cut % 512 < 500 ? 17 : 0) {
        spdl_result result;
        const char *text;
        put_file("cut.tar", tar.at, cut);
        text = read_records(path_of("cut.tar"), SPDL__RECORDS_TAR,
                            (spdl_records_desc){ .max_bytes = 0 }, &result);
        CHECK_EQ(result, SPDL_E_FORMAT);
        told("cut.tar: at byte*cut off: ");
        CHECK_STR(text, cut < 1536 + 3 ? "" : cut < 2560 + 513 ? "x:3" : "x:3 z:513");
    }
}

/* A member behind 5 GiB of another, which are skipped, and an archive that shrinks meanwhile. */
static void tar_over_4_gib(void) {
    static blob tar;
    const uint64_t skipped = ((uint64_t)5 << 30) + 1;
    spdl__records *records;
    spdl_record *record = NULL;
    const char *path;
    FILE *file;
    tar.count = 0;
    ADD(&tar, .name = "skipped", .size = skipped, .kind = 'D', .base256 = true, .no_data = true);
    path = put_bytes("big.tar", &tar);
    file = fopen(path, "r+b");
    REQUIRE(file != NULL);
    tar.count = 0;
    ADD(&tar, .name = "last", .size = 80000);
    tar_end(&tar);
    REQUIRE(fseeko(file, (off_t)(512 + ((skipped + 511) & ~(uint64_t)511)), SEEK_SET) == 0);
    REQUIRE(fwrite(tar.at, 1, tar.count, file) == tar.count && fflush(file) == 0);
    records = records_of(path, SPDL__RECORDS_TAR, (spdl_records_desc){ .max_bytes = 0 });
    REQUIRE(spdl__records_next(records, &record, &error) == SPDL_OK);
    CHECK_STR(record->name, "last");
    CHECK_EQ(record->offset, 5368710656);
    CHECK(memcmp(record->data, "lastlast", 8) == 0);
    spdl_record_free(record);
    CHECK_EQ(spdl__records_next(records, &record, &error), SPDL_END);
    spdl__records_close(records);
    records = records_of(path, SPDL__RECORDS_TAR, (spdl_records_desc){ .max_bytes = 0 });
    REQUIRE(ftruncate(fileno(file), 5368710656 + 70000) == 0);
    CHECK_EQ(spdl__records_next(records, &record, &error), SPDL_E_IO);
    told("big.tar: at byte 5368780656: it ended while it was read");
    CHECK_EQ(spdl__records_next(records, &record, &error), SPDL_E_IO); /* and so on */
    told("big.tar: at byte 5368780656");
    spdl__records_close(records);
    fclose(file);
}

static void samples(void) {
    static blob tar;
    const spdl_records_desc grouped = { .group = true, .max_bytes = 2000 };
    spdl__records *records;
    spdl_record *record = NULL;
    spdl_result result;
    tar.count = 0;
    ADD(&tar, .name = "d.x/1.jpg", .size = 9);
    ADD(&tar, .name = "d.x", .kind = '5');
    ADD(&tar, .name = "d.x/1.seg.png", .size = 8);
    ADD(&tar, .name = "d.x/1.cls", .size = 1);
    ADD(&tar, .name = "d.x/10.jpg", .size = 2);
    ADD(&tar, .name = "e/10.jpg", .size = 2);
    ADD(&tar, .name = "README", .size = 2);
    ADD(&tar, .name = "README2", .size = 2);
    ADD(&tar, .name = "READ.me", .size = 2);
    ADD(&tar, .name = "READ", .size = 2);
    ADD(&tar, .name = "last.a", .size = 2);
    ADD(&tar, .name = "last.b", .size = 2);
    tar_end(&tar);
    CHECK_STR(read_records(put_bytes("x.tar", &tar), SPDL__RECORDS_TAR, grouped, &result),
              "d.x/1.jpg:9+d.x/1.seg.png:8+d.x/1.cls:1 d.x/10.jpg:2 e/10.jpg:2 README:2 README2:2 "
              "READ.me:2 READ:2 last.a:2+last.b:2");
    CHECK_EQ(result, SPDL_END);
    tar.count = 0; /* a name again begins another sample; names with a dot in front are none */
    ADD(&tar, .name = "./._0.a", .size = 1);
    ADD(&tar, .name = "./0.a", .size = 1);
    ADD(&tar, .name = "./._0.b", .size = 1);
    ADD(&tar, .name = "./0.b", .size = 2);
    ADD(&tar, .name = "./0.a", .size = 3);
    ADD(&tar, .name = "./0.b", .size = 4);
    ADD(&tar, .name = "./0.b", .size = 5);
    ADD(&tar, .name = "d/.hidden", .size = 6);
    tar_end(&tar);
    CHECK_STR(read_records(put_bytes("x.tar", &tar), SPDL__RECORDS_TAR, grouped, &result),
              "./0.a:1+./0.b:2 ./0.a:3+./0.b:4 ./0.b:5");
    CHECK_EQ(result, SPDL_END);
    tar_reads(&tar, "./._0.a:1 ./0.a:1 ./._0.b:1 ./0.b:2 ./0.a:3 ./0.b:4 ./0.b:5 d/.hidden:6");
    records = records_of(path_of("x.tar"), SPDL__RECORDS_TAR, grouped);
    REQUIRE(spdl__records_next(records, &record, &error) == SPDL_OK);
    spdl__records_close(records); /* which has the next one already */
    spdl_record_free(record);
    tar.count = 0;
    ADD(&tar, .name = "a.1", .size = 900);
    ADD(&tar, .name = "b.1", .size = 1000);
    ADD(&tar, .name = "b.2", .size = 1000);
    tar_end(&tar);
    CHECK_STR(read_records(put_bytes("x.tar", &tar), SPDL__RECORDS_TAR, grouped, &result),
              "a.1:900");
    CHECK_EQ(result, SPDL_E_LIMIT);
    told("x.tar: at byte*a sample with more than max_bytes, which is 2000");
    tar.count -= 1024;
    CHECK_STR(read_records(put_bytes("x.tar", &tar), SPDL__RECORDS_TAR,
                           (spdl_records_desc){ .group = true }, &result),
              "a.1:900");
    CHECK_EQ(result, SPDL_E_FORMAT); /* the last one may lack a member: it is not handed on */
}

SPDL_FN(count_bytes, spdl_record, spdl_record) {
    CHECK(in->bytes == 0 || in->data[0] == (uint8_t)in->name[0]);
    *out = in;
    return SPDL_OK;
}

/* Counts what is alive, and gives out no more than `left` blocks. */
static size_t blocks, block_bytes, most_blocks;
static int left;

static void *counted_alloc(size_t bytes, size_t align, void *user) {
    void *memory = NULL;
    (void)user;
    if (__atomic_fetch_sub(&left, 1, __ATOMIC_RELAXED) <= 0) return NULL;
    memory = test_memory(align, bytes);
    if (memory == NULL) return NULL;
    const size_t now = __atomic_add_fetch(&blocks, 1, __ATOMIC_RELAXED);
    if (now > most_blocks) most_blocks = now; /* one call at a time */
    __atomic_add_fetch(&block_bytes, bytes, __ATOMIC_RELAXED);
    return memory;
}

static void counted_free(void *memory, size_t bytes, void *user) {
    (void)user;
    __atomic_sub_fetch(&blocks, 1, __ATOMIC_RELAXED);
    __atomic_sub_fetch(&block_bytes, bytes, __ATOMIC_RELAXED);
    test_memory_free(memory);
}

/* However many members there are: those on the edges, one in each call, and the reader. */
static void tar_in_bounded_memory(void) {
    static blob tar;
    const spdl_records_desc counted = { .allocator = { counted_alloc, counted_free, NULL } };
    spdl_pipeline *p;
    spdl_record *record;
    spdl_files *files;
    spdl_result result;
    size_t count = 0;
    tar.count = 0;
    for (int i = 0; i < 150; ++i) ADD(&tar, .name = "0.bin", .size = 600);
    tar_end(&tar);
    files = files_of(put_bytes("x.tar", &tar));
    left = 1 << 30;
    p = START(SPDL_FILES(files), SPDL_TAR(&counted), SPDL_PIPE(count_bytes, .concurrency = 2),
              SPDL_SINK(3));
    for (; (result = SPDL_NEXT(p, &record, SPDL_FOREVER)) == SPDL_OK; ++count) {
        if (count % 10 == 0) test_sleep_us(1000);
        spdl_record_free(record);
    }
    CHECK_EQ(result, SPDL_END);
    CHECK_EQ(count, 150);
    CHECK(most_blocks > 3 && most_blocks <= 1 + 1 + 2 + 2 + 3 + 1);
    spdl_pipeline_destroy(p);
    spdl_files_close(files);
    CHECK(blocks == 0 && block_bytes == 0);
}

static void rows_of_tar(void) {
    static blob tar;
    static const spdl_records_desc grouped = { .group = true };
    spdl_files *files;
    spdl_pipeline *p;
    spdl_record *record;
    spdl_result result;
    char path[] = "0.tar";
    int count = 0;
    for (; path[0] < '6'; ++path[0]) {
        tar.count = 0;
        for (int i = 0; i < 40; ++i) {
            char name[40];
            snprintf(name, sizeof name, "%c/%d.%d", path[0], i / 2, i % 2);
            ADD(&tar, .name = name, .size = (uint64_t)i * 60);
        }
        tar_end(&tar);
        put_bytes(path, &tar);
    }
    files = files_of(path_of("*.tar"));
    for (int order = 0; order < 4; ++order) {
        char wanted[40], last[6] = { 0 };
        p = START(SPDL_FILES(files),
                  SPDL_TAR(order & 1 ? &grouped : NULL,
                           .output_order = order & 2 ? SPDL_ORDER_COMPLETION : SPDL_ORDER_INPUT),
                  SPDL_PIPE(count_bytes, .concurrency = 2), SPDL_SINK(3));
        for (count = 0; (result = SPDL_NEXT(p, &record, SPDL_FOREVER)) == SPDL_OK; ++count) {
            const int step = order & 1 ? 2 : 1, each = 40 / step;
            const int file = order & 2 ? record->name[0] - '0' : count / each;
            const int at = (order & 2 ? last[file]++ : count % each) * step;
            snprintf(wanted, sizeof wanted, "%d/%d.%d", file, at / 2, at % 2);
            CHECK_STR(record->name, wanted);
            CHECK((record->next != NULL) == ((order & 1) != 0));
            spdl_record_free(record);
        }
        CHECK_EQ(result, SPDL_END);
        CHECK_EQ(count, order & 1 ? 120 : 240);
        spdl_pipeline_destroy(p);
    }
    tar.count -= 1024;
    put_bytes("5.tar", &tar);
    p = START(SPDL_FILES(files), SPDL_TAR(NULL), SPDL_SINK(3));
    for (count = 0; (result = SPDL_NEXT(p, &record, SPDL_FOREVER)) == SPDL_OK; ++count)
        spdl_record_free(record);
    CHECK_EQ(count, 240);
    ends(p, result, SPDL_E_FORMAT, "stage 1 'tar', item 5: */5.tar: at byte*ends without an empty");
    p = START(SPDL_FILES(files), SPDL_TAR(NULL), SPDL_SINK(3)); /* and no more */
    CHECK_EQ(SPDL_NEXT(p, &record, SPDL_FOREVER), SPDL_OK);
    spdl_record_free(record);
    spdl_pipeline_destroy(p);
    REQUIRE(unlink(path_of("0.tar")) == 0);
    p = START(SPDL_FILES(files), SPDL_TAR(NULL), SPDL_SINK(3));
    result = SPDL_NEXT(p, &record, SPDL_FOREVER);
    ends(p, result, SPDL_E_IO, "item 0: */0.tar: No such file");
    spdl_files_close(files);
}

/* --- whole files --- */

static void files_are_read_whole(void) {
    static const char *const texts[] = { "", "a", "one\r\ntwo\n" };
    spdl_files *files;
    spdl_pipeline *p;
    spdl_record *record = NULL;
    spdl_result result;
    char long_text[70000];
    int count = 0;
    memset(long_text, 'x', sizeof long_text);
    put_text("whole0", texts[0]);
    put_text("whole1", texts[1]);
    put_text("whole2", texts[2]);
    put_file("whole3", long_text, sizeof long_text);
    files = files_of(path_of("whole*"));
    p = START(SPDL_FILES(files), SPDL_READ(.concurrency = 2), SPDL_SINK(3));
    for (; (result = SPDL_NEXT(p, &record, SPDL_FOREVER)) == SPDL_OK; ++count) {
        const char *wanted = count < 3 ? texts[count] : long_text;
        const size_t bytes = count < 3 ? strlen(wanted) : sizeof long_text;
        CHECK_STR(record->name, spdl_files_path(files, (uint64_t)count));
        CHECK_EQ(record->bytes, bytes);
        CHECK(memcmp(record->data, wanted, bytes) == 0 && record->data[bytes] == 0);
        CHECK_EQ((uintptr_t)record->data % 64, 0);
        spdl_record_free(record);
    }
    CHECK_EQ(result, SPDL_END);
    CHECK_EQ(count, 4);
    spdl_pipeline_destroy(p);
    REQUIRE(unlink(path_of("whole0")) == 0);
    p = START(SPDL_FILES(files), SPDL_READ(), SPDL_SINK(3));
    result = SPDL_NEXT(p, &record, SPDL_FOREVER);
    ends(p, result, SPDL_E_IO, "stage 1 'read', item 0: */whole0: No such file");
    REQUIRE(truncate(path_of("whole1"), ((off_t)1 << 30) + 1) == 0);
    p = START(SPDL_FILES(files), SPDL_READ(.max_failures = 1), SPDL_SINK(3));
    result = SPDL_NEXT(p, &record, SPDL_FOREVER);
    ends(p, result, SPDL_E_LIMIT, "stage 1 'read', item 1: */whole1: at byte 1073741824: more");
    spdl_files_close(files);
}

/* --- lines --- */

/* The lines of a text by looking at each byte: their lengths and beginnings. */
static size_t split(const char *text, size_t bytes, size_t *begin, size_t *length) {
    size_t count = 0, start = 0, i;
    for (i = 0; i < bytes; ++i) {
        if (text[i] != '\n') continue;
        begin[count] = start;
        length[count++] = i - start - (i > start && text[i - 1] == '\r');
        start = i + 1;
    }
    if (start < bytes) begin[count] = start, length[count++] = bytes - start;
    return count;
}

static void line_is(const spdl_record *line, const char *text, size_t begin, size_t length) {
    CHECK_EQ(line->bytes, length);
    CHECK_EQ(line->offset, begin);
    CHECK(memcmp(line->data, text + begin, length) == 0 && line->data[length] == 0);
}

static void lines_are(const char *text, size_t bytes) {
    static size_t begin[300000], length[300000];
    const size_t count = split(text, bytes, begin, length);
    spdl__records *records = records_of(put_file("1.txt", text, bytes), SPDL__RECORDS_LINES,
                                        (spdl_records_desc){ .group = false });
    spdl_record *line = NULL;
    for (size_t i = 0; i < count; ++i) {
        REQUIRE(spdl__records_next(records, &line, &error) == SPDL_OK);
        line_is(line, text, begin[i], length[i]);
        CHECK(strstr(line->name, "/1.txt") != NULL);
        spdl_record_free(line);
    }
    CHECK_EQ(spdl__records_next(records, &line, &error), SPDL_END);
    spdl__records_close(records);
}

static void lines_of_all_kinds(void) {
    static const char *const texts[] = { "", "\n", "\r\n", "a", "a\n", "a\r\n", "a\r", "\r",
                                         "\r\r\n", "\n\n", "a\nb", "a\n\nb\n", "a\r\nb\r\n\r\nc",
                                         "\nx" };
    static char text[300000];
    uint64_t random = test_seed();
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; ++i)
        lines_are(texts[i], strlen(texts[i]));
    lines_are("a\0b\nc", 5);
    for (int round = 0; round < 12; ++round) { /* around the ends of windows */
        const size_t bytes = (size_t)(test_random(&random) % sizeof text);
        const uint64_t share = round % 3 == 0 ? 5 : round % 3 == 1 ? 500 : 40000;
        for (size_t i = 0; i < bytes; ++i) {
            const uint64_t r = test_random(&random) % share;
            text[i] = r == 0 ? '\n' : r < 3 && i + 1 < bytes ? '\r' : (char)(r % 26 + 'a');
            if (text[i] == '\r' && r == 2) text[++i] = '\n';
        }
        lines_are(text, bytes);
    }
    for (size_t at = 65530; at < 65540; ++at) {
        memset(text, 'x', 140000);
        text[at] = '\r';
        text[at + 1] = '\n';
        lines_are(text, at + 2 + at % 2 * 70000);
    }
}

static void bad_lines(void) {
    const spdl_records_desc desc = { .max_bytes = 5, .error = &error };
    const spdl_records_desc none = { .error = &error };
    static char text[200000];
    spdl_result result;
    spdl__records *records;
    spdl_record *line = NULL;
    FILE *file;
    const char *path = put_text("x.txt", "12345\r\n12345\n123456\n1\n");
    read_records(path, SPDL__RECORDS_LINES, desc, &result);
    CHECK_EQ(result, SPDL_E_LIMIT);
    told("x.txt: at byte 13: a line of more than max_bytes, which is 5");
    memset(text, 'x', sizeof text);
    put_file("x.txt", text, sizeof text);
    read_records(path, SPDL__RECORDS_LINES, desc, &result);
    CHECK_EQ(result, SPDL_E_LIMIT);
    CHECK_EQ(spdl__records_open(&records, NULL, SPDL__RECORDS_LINES, &none), SPDL_E_INVALID);
    CHECK_EQ(spdl__records_open(&records, folder, SPDL__RECORDS_LINES, &none), SPDL_E_IO);
    told("a directory");
    for (size_t i = 999; i < sizeof text; i += 1000) text[i] = '\n';
    put_file("x.txt", text, sizeof text);
    records = records_of(path, SPDL__RECORDS_LINES, none); /* and the file shrinks */
    REQUIRE(spdl__records_next(records, &line, &error) == SPDL_OK);
    spdl_record_free(line);
    file = fopen(path, "r+b");
    REQUIRE(file != NULL && ftruncate(fileno(file), 100100) == 0);
    fclose(file);
    while ((result = spdl__records_next(records, &line, &error)) == SPDL_OK) spdl_record_free(line);
    CHECK_EQ(result, SPDL_E_IO);
    told("x.txt: at byte 100100: it ended");
    spdl__records_close(records);
}

/* More than was there at open is missing, also where the last line is whole. */
static void lines_grow(void) {
    static const char *const texts[] = { "", "1\n", "1\n2" };
    for (size_t i = 0; i < 3; ++i) {
        const char *path = put_text("x.txt", texts[i]);
        spdl__records *records = records_of(path, SPDL__RECORDS_LINES,
                                            (spdl_records_desc){ .group = false });
        FILE *file = fopen(path, "ab");
        spdl_record *line = NULL;
        spdl_result result;
        REQUIRE(file != NULL && fputs("3\n", file) >= 0);
        fclose(file);
        while ((result = spdl__records_next(records, &line, &error)) == SPDL_OK) {
            CHECK_STR((const char *)line->data, "1");
            spdl_record_free(line);
        }
        CHECK_EQ(result, SPDL_E_IO);
        told(i == 0 ? "x.txt: at byte 0: its size is 0, but there is more" : "x.txt: at byte ");
        if (i > 0) told(": it grew while it was read");
        spdl__records_close(records);
    }
}

SPDL_FN(no_path, void, char) {
    static char empty[] = "";
    *out = empty;
    return SPDL_OK;
}

static void empty_paths(void) {
    spdl_record *record;
    spdl_pipeline *p = START(SPDL_SOURCE(no_path), SPDL_READ(), SPDL_SINK(3));
    const spdl_result result = SPDL_NEXT(p, &record, SPDL_FOREVER);
    ends(p, result, SPDL_E_IO, "stage 1 'read', item 0: (an empty path): No such file");
}

SPDL_FN(null_path, void, char) { return SPDL_OK; }

static void null_paths(void) {
    static const char *const words[] = { "stage 1 'read', item 0: NULL, not a path",
                                         "stage 1 'tar', item 0: records: path is NULL",
                                         "stage 1 'lines', item 0: records: path is NULL",
                                         "stage 1 'spdl_npz_load', item 0: npz: an argument is" };
    for (int i = 0; i < 4; ++i) {
        void *item;
        spdl_pipeline *p = i == 0   ? START(SPDL_SOURCE(null_path), SPDL_READ(), SPDL_SINK(3))
                           : i == 1 ? START(SPDL_SOURCE(null_path), SPDL_TAR(NULL), SPDL_SINK(3))
                           : i == 2 ? START(SPDL_SOURCE(null_path), SPDL_LINES(NULL), SPDL_SINK(3))
                                    : START(SPDL_SOURCE(null_path), SPDL_NPZ(NULL), SPDL_SINK(3));
        const spdl_result result = spdl_pipeline_next(p, &item, SPDL_FOREVER);
        ends(p, result, i == 0 ? SPDL_E_STAGE : SPDL_E_INVALID, words[i]);
    }
}

/* A file that has bytes, and says 0. */
static void files_without_a_size(void) {
    static const char told_of[] = "/proc/version: at byte 0: its size is 0, but there is more";
    spdl_files *files;
    spdl_record *record = NULL;
    spdl_pipeline *p;
    spdl_result result;
    if (!TEST_LINUX) TEST_SKIP("needs /proc");
    files = files_of("/proc/version");
    p = START(SPDL_FILES(files), SPDL_READ(), SPDL_SINK(3));
    result = SPDL_NEXT(p, &record, SPDL_FOREVER);
    ends(p, result, SPDL_E_IO, told_of);
    p = START(SPDL_FILES(files), SPDL_LINES(NULL), SPDL_SINK(3));
    result = SPDL_NEXT(p, &record, SPDL_FOREVER);
    ends(p, result, SPDL_E_IO, told_of);
    spdl_files_close(files);
}

/* A file of another kind than its row reads is refused by name. A byte order mark is no text. */
static void files_of_another_kind(void) {
    static const struct {
        const char *bytes;
        size_t count;
        const char *what;
    } kinds[] = {
        { "\x1f\x8b\x08", 3, "at byte 0: packed by gzip: gzip -d first" },
        { "\x28\xb5\x2f\xfd$", 5, "packed by zstd: zstd -d first" },
        { "\xfd\x37zXZ\0", 6, "packed by xz: xz -d first" },
        { "BZh91AY&SY", 10, "packed by bzip2: bzip2 -d first" },
        { "\x04\x22\x4d\x18", 4, "packed by lz4: lz4 -d first" },
        { "PK\3\4", 4, "a ZIP archive: unzip first" },
        { "\x93NUMPY\1\0", 8, "an array of NumPy: SPDL_NPZ reads it" },
        { "\xff\xfe{\0\n\0", 6, "UTF-16: iconv -f UTF-16 -t UTF-8 first" },
        { "\xfe\xff\0{\0\n", 6, "UTF-16: iconv -f UTF-16 -t UTF-8 first" },
        { "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n", 63,
          "a pointer of Git LFS, not the data: git lfs pull" },
    };
    static const char *const texts[] = { "BZh91 lines", "version https://", "PK\n", "\x1f\n" };
    const spdl_records_desc desc = { .max_bytes = 0 };
    spdl__records *records;
    spdl_record *record;
    spdl_result result;
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; ++i)
        for (int kind = 0; kind < 3; ++kind) {
            spdl_files *files = files_of(put_file("x.bin", kinds[i].bytes, kinds[i].count));
            const spdl_stage rows[3][3] = {
                { SPDL_FILES(files), SPDL_LINES(NULL), SPDL_SINK(1) },
                { SPDL_FILES(files), SPDL_TAR(NULL), SPDL_SINK(1) },
                { SPDL_FILES(files), SPDL_READ(), SPDL_SINK(1) } };
            spdl_pipeline *p = start_rows(SPDL_TABLE(rows[kind]));
            const bool refused = kind < 2 || strstr(kinds[i].what, "LFS") != NULL;
            result = SPDL_NEXT(p, &record, SPDL_FOREVER);
            if (!refused) {
                CHECK_EQ(result, SPDL_OK);
                CHECK_EQ(record->bytes, kinds[i].count); /* SPDL_READ takes any bytes */
                spdl_record_free(record);
                spdl_pipeline_destroy(p);
            } else {
                ends(p, result, SPDL_E_FORMAT, kinds[i].what);
            }
            spdl_files_close(files);
        }
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; ++i) {
        const size_t bytes = strlen(texts[i]);
        lines_are(texts[i], bytes);
    }
    put_text("x.txt", "\xef\xbb\xbf" "ab\nc\n");
    records = records_of(path_of("x.txt"), SPDL__RECORDS_LINES, desc);
    REQUIRE(spdl__records_next(records, &record, &error) == SPDL_OK);
    CHECK_STR((const char *)record->data, "ab");
    CHECK_EQ(record->offset, 3);
    spdl_record_free(record);
    spdl__records_close(records);
    put_text("x.txt", "\xef\xbb\xbf");
    CHECK_STR(read_records(path_of("x.txt"), SPDL__RECORDS_LINES, desc, &result), "");
    CHECK_EQ(result, SPDL_END);
}

SPDL_FN(key_of, spdl_record, void) {
    (void)in;
    *out = (void *)(uintptr_t)(spdl_item_key(task) | 1);
    return SPDL_OK;
}

/* Lines of one file, and members of one archive: an augmentation draws a number for each. */
static void records_have_keys_of_their_own(void) {
    static char lines[200];
    static blob tar;
    for (int i = 0; i < 99; ++i) memcpy(lines + 2 * i, "x\n", 2);
    put_text("a.txt", lines);
    tar.count = 0;
    for (int i = 0; i < 99; ++i) ADD(&tar, .name = "x", .size = 1);
    tar_end(&tar);
    put_bytes("b.tar", &tar);
    for (int i = 0; i < 2; ++i) {
        const spdl_stage rows[] = { SPDL_LINES(NULL), SPDL_TAR(NULL) };
        spdl_files *files = files_of(path_of(i == 0 ? "a.txt" : "b.tar"));
        spdl_pipeline *p = START(SPDL_FILES(files), rows[i], SPDL_PIPE(key_of), SPDL_SINK(3));
        void *keys[100];
        int count = 0, flips = 0;
        while (count < 100 && spdl_pipeline_next(p, &keys[count], SPDL_FOREVER) == SPDL_OK) {
            for (int k = 0; k < count; ++k) CHECK(keys[k] != keys[count]);
            flips += (int)((uintptr_t)keys[count++] >> 7 & 1);
        }
        CHECK_EQ(count, 99);
        CHECK(flips > 25 && flips < 75);
        spdl_pipeline_destroy(p);
        spdl_files_close(files);
    }
}

static void rows_of_lines(void) {
    spdl_files *files;
    spdl_pipeline *p;
    spdl_record *line;
    char digit[2] = "0";
    put_text("a.txt", "0\n1\n2");
    put_text("b.txt", "");
    put_text("c.txt", "3\r\n4\n5\n6\n7\n8\n");
    files = files_of(path_of(""));
    p = START(SPDL_FILES(files), SPDL_LINES(NULL), SPDL_SINK(3));
    for (; digit[0] <= '8'; ++digit[0]) {
        REQUIRE(SPDL_NEXT(p, &line, SPDL_FOREVER) == SPDL_OK);
        CHECK_STR((const char *)line->data, digit);
        spdl_record_free(line);
    }
    CHECK_EQ(SPDL_NEXT(p, &line, SPDL_FOREVER), SPDL_END);
    spdl_pipeline_destroy(p);
    spdl_files_close(files);
}

/* Leaves out what begins with '-', and fails at the last member and at what begins with 'x'. */
SPDL_FN(leave_out, spdl_record, spdl_record) {
    (void)task;
    *out = in;
    return in == NULL || in->data[0] == '-' ? SPDL_SKIP : SPDL_OK;
}

SPDL_FN(parse, const spdl_record, void) {
    *out = NULL;
    if (in->data[0] == 'x' || strstr(in->name, "last") != NULL) return spdl_fail(task, "bad");
    return SPDL_OK;
}

/* A failure names the record, and its number if that is known. */
static void records_in_messages(void) {
    static blob tar;
    put_text("a.txt", "1\n-\n\nx\n5");
    put_text("x.txt", "xyz");
    tar.count = 0;
    ADD(&tar, .name = "d/1", .size = 5);
    ADD(&tar, .name = "d/last\n", .size = 5);
    tar_end(&tar);
    put_bytes("b.tar", &tar);
    for (int i = 0; i < 5; ++i) {
        static const struct { const char *file, *words; uint64_t number; } kinds[] = {
            { "a.txt", "stage 3 'parse', item 0, result 4 (*a.txt:4): bad", 4 },
            { "b.tar", "stage 3 'parse', item 0, result 2 (d/last?): bad", 2 },
            { "x.txt", "stage 3 'parse', item 0 (*x.txt): bad", 0 },
            { "a.txt", "stage 4 'parse', item 1, result 2 (*a.txt): bad", 2 },
            { "a.txt", "stage 3 'parse', item 0 (*a.txt): bad", 0 } };
        const spdl_stage some = SPDL_PIPE(leave_out, .flush = i == 4);
        spdl_files *files = files_of(path_of(kinds[i].file));
        const spdl_stage source = SPDL_FILES(files), parses = SPDL_PIPE(parse);
        const spdl_stage lines = SPDL_LINES(NULL), tars = SPDL_TAR(NULL), whole = SPDL_READ();
        const spdl_stage reads = i == 1 ? tars : i == 2 ? whole : lines;
        void *none;
        spdl_result result;
        spdl_pipeline *p = i == 3 ? START(source, lines, SPDL_BATCH(2), SPDL_UNBATCH(), parses,
                                          SPDL_SINK(1))
                                  : START(source, reads, some, parses, SPDL_SINK(1));
        while ((result = spdl_pipeline_next(p, &none, SPDL_FOREVER)) == SPDL_OK) {}
        CHECK_EQ(spdl_pipeline_error(p)->result_number, kinds[i].number);
        ends(p, result, SPDL_E_STAGE, kinds[i].words);
        spdl_files_close(files);
    }
}

/* NULL, one without a name, and one that the call takes and frees. */
SPDL_FN(make_record, void, spdl_record) {
    const int *kind = (const int *)spdl_ctx(task);
    if (*kind == 0) return SPDL_OK;
    *out = (spdl_record *)calloc(1, sizeof **out);
    if (*out != NULL && *kind == 2) (*out)->name = "freed";
    return *out != NULL ? SPDL_OK : SPDL_E_NOMEM;
}

SPDL_FN(refuse, spdl_record, void) {
    *out = NULL;
    if (in == NULL || in->name == NULL) return spdl_fail(task, "bad");
    spdl_take(task);
    free(in);
    return spdl_fail(task, "bad");
}

static void records_without_names(void) {
    for (int kind = 0; kind < 3; ++kind) {
        void *none;
        spdl_pipeline *p = START(SPDL_SOURCE(make_record, .ctx = &kind, .free_item = free),
                                 SPDL_PIPE(refuse), SPDL_SINK(1));
        const spdl_result result = spdl_pipeline_next(p, &none, SPDL_FOREVER);
        ends(p, result, SPDL_E_STAGE, "stage 1 'refuse', item 0: bad");
    }
}

/* --- lists in use --- */

static long list_blocks;

static void *list_alloc(size_t bytes, size_t align, void *user) {
    (void)user;
    ++list_blocks;
    return test_memory(align, bytes);
}

static void list_free(void *memory, size_t bytes, void *user) {
    (void)bytes, (void)user;
    --list_blocks;
    test_memory_free(memory);
}

/* Two pipelines share a list. A create that fails has no part in it. */
static void a_list_in_use_is_not_closed(void) {
    const spdl_files_desc by = { .allocator = { list_alloc, list_free, NULL }, .error = &error };
    spdl_sampler *order = NULL;
    spdl_files *files = NULL;
    spdl_pipeline *one, *two, *none;
    long blocks_of_list;
    REQUIRE(spdl_sampler_create(&order, &(spdl_sampler_desc){ .count = 1 }) == SPDL_OK);
    put_text("a.txt", "a");
    REQUIRE(spdl_files_open(&files, path_of("a.txt"), &by) == SPDL_OK);
    blocks_of_list = list_blocks;
    one = START(SPDL_FILES(files), SPDL_SINK(3));
    two = START(SPDL_INDEX(order), SPDL_FILES_AT(files), SPDL_SINK(3));
    CHECK_EQ(spdl_pipeline_create(&none, &(spdl_pipeline_desc){ .error = &error }, SPDL_STAGES(
                 SPDL_INDEX(order), SPDL_FILES_AT(files), SPDL_SINK(3))), SPDL_E_INVALID);
    told("another pipeline or a mixture uses this sampler");
    for (int left_over = 2; left_over > 0; --left_over) {
        char *path;
        spdl_files_close(files);
        CHECK_EQ(list_blocks, blocks_of_list);
        REQUIRE(SPDL_NEXT(left_over == 2 ? one : two, &path, SPDL_FOREVER) == SPDL_OK);
        CHECK_STR(path, spdl_files_path(files, 0));
        spdl_pipeline_destroy(left_over == 2 ? one : two);
    }
    spdl_files_close(files);
    spdl_sampler_destroy(order);
    CHECK_EQ(list_blocks, 0);
}

/* --- memory --- */

/* All of it with memory for so many allocations only: what fails says so, and nothing is lost. */
static bool with_memory(int allocations) {
    spdl_files_desc by = { .allocator = { counted_alloc, counted_free, NULL }, .error = &error };
    spdl_records_desc read = { .group = true, .allocator = by.allocator, .error = &error };
    char list[300];
    spdl_files *tar = NULL, *text = NULL, *all = NULL;
    spdl__records *records = NULL;
    spdl_record *record = NULL;
    spdl_result result;
    left = allocations;
    snprintf(list, sizeof list, "@%s", path_of("list"));
    result = spdl_files_open(&tar, path_of("x.tar"), &by);
    if (result == SPDL_OK) result = spdl_files_open(&text, list, &by);
    if (result == SPDL_OK) result = spdl_files_open(&all, path_of("*.tar"), &by);
    if (result == SPDL_OK)
        result = spdl__records_open(&records, path_of("x.tar"), SPDL__RECORDS_TAR, &read);
    while (result == SPDL_OK) {
        result = spdl__records_next(records, &record, &error);
        if (result == SPDL_OK) spdl_record_free(record);
    }
    CHECK(result == SPDL_END || result == SPDL_E_NOMEM);
    if (result != SPDL_END) told("memory");
    spdl__records_close(records);
    spdl_files_close(tar);
    spdl_files_close(text);
    spdl_files_close(all);
    CHECK(blocks == 0 && block_bytes == 0);
    return result == SPDL_END;
}

/* Takes all there is with memory for so many allocations, and keeps it until then. */
static bool row_with_memory(spdl_pipeline *p, int allocations) {
    void *items[41];
    int count = 0;
    spdl_result result = SPDL_OK;
    left = allocations;
    while (result == SPDL_OK) {
        REQUIRE(count <= 40);
        result = spdl_pipeline_next(p, &items[count], SPDL_FOREVER);
        count += result == SPDL_OK;
    }
    CHECK(result == SPDL_END || result == SPDL_E_NOMEM);
    if (result == SPDL_E_NOMEM) CHECK(strstr(spdl_pipeline_error(p)->text, "memory") != NULL);
    while (count > 0) spdl_buffer_free(items[--count]);
    spdl_pipeline_destroy(p);
    CHECK(blocks == 0 && block_bytes == 0);
    return result == SPDL_END;
}

static void say_nothing(spdl_log_level level, const char *text, void *user) {
    (void)level, (void)text, (void)user;
}

/* Rows that make their items in memory of the pipeline. */
static void rows_without_memory(void) {
    const spdl_pipeline_desc desc = { .workers = SPDL_INLINE, .logger = { say_nothing, NULL },
                                      .allocator = { counted_alloc, counted_free, NULL } };
    spdl_sampler *order = NULL;
    REQUIRE(spdl_sampler_create(&order, &(spdl_sampler_desc){ .count = 40 }) == SPDL_OK);
    for (int kind = 0; kind < 2; ++kind) {
        bool all = false;
        for (int enough = 0; !all; ++enough) {
            spdl_pipeline *p = NULL;
            spdl_result result;
            left = 1 << 30;
            result = kind == 0 ? spdl_pipeline_create(&p, &desc, SPDL_STAGES(
                                     SPDL_COUNT(40), SPDL_SINK(2)))
                               : spdl_pipeline_create(&p, &desc, SPDL_STAGES(
                                     SPDL_INDEX(order), SPDL_SINK(2)));
            REQUIRE(result == SPDL_OK);
            all = row_with_memory(p, enough);
            if (enough == 0) CHECK(!all);
            REQUIRE(enough < 100);
        }
    }
    spdl_sampler_destroy(order);
}

static void no_memory(void) {
    static blob tar;
    static char text[5000];
    int enough = 0;
    tar.count = 0;
    ADD(&tar, .name = "a.1", .size = 10);
    ADD(&tar, .name = "a.2", .size = 10);
    ADD(&tar, .name = "b.1", .size = 10);
    tar_end(&tar);
    put_bytes("x.tar", &tar);
    memset(text, '\n', sizeof text);
    put_file("text", text, sizeof text);
    put_text("list", "text\ntext\n");
    while (enough < 200 && !with_memory(enough)) ++enough;
    CHECK(enough > 15 && enough < 200);
    for (int half = 0; half < 2; ++half) { /* an allocator with one function */
        const spdl_files_desc by = { .allocator = { counted_alloc, NULL, NULL }, .error = &error };
        const spdl_records_desc read = { .allocator = by.allocator, .error = &error };
        spdl_files *files;
        spdl__records *records;
        CHECK_EQ(half == 0 ? spdl_files_open(&files, path_of("x.tar"), &by)
                           : spdl__records_open(&records, path_of("x.tar"), SPDL__RECORDS_TAR,
                                                &read), SPDL_E_INVALID);
        told("both functions of the allocator");
    }
}

TEST_TABLE(files) {
    TEST_CASE(records_in_messages), TEST_CASE(records_without_names),
    TEST_CASE(numbers_in_order), TEST_CASE(archives_in_a_row),
    TEST_CASE(folders_and_patterns), TEST_CASE(middle_parts), TEST_CASE(nothing_to_list),
    TEST_CASE(lists_of_paths), TEST_CASE(hash_of_the_manifest),
    TEST_CASE(hash_behind_backslashes), TEST_CASE(rows_of_files),
    TEST_CASE(a_dangling_link_is_one_failure), TEST_CASE(links_are_missing_data),
    TEST_CASE(files_of_another_kind), TEST_CASE(a_position_is_of_its_files),
    TEST_CASE(lists_of_another_kind), TEST_CASE(a_position_is_of_its_rows),
    TEST_CASE(records_have_keys_of_their_own),
    TEST_CASE(tar_of_all_kinds), TEST_CASE(bad_pax_headers), TEST_CASE(bad_tars),
    TEST_CASE(tar_over_4_gib), TEST_CASE(samples), TEST_CASE(tar_in_bounded_memory),
    TEST_CASE(rows_of_tar), TEST_CASE(files_are_read_whole),
    TEST_CASE(lines_of_all_kinds), TEST_CASE(bad_lines), TEST_CASE(lines_grow),
    TEST_CASE(empty_paths), TEST_CASE(null_paths), TEST_CASE(files_without_a_size),
    TEST_CASE(rows_of_lines), TEST_CASE(a_list_in_use_is_not_closed),
    TEST_CASE(rows_without_memory), TEST_CASE(no_memory), TEST_END
};
