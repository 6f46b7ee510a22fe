/* The library with SPDL_NO_THREADS: C alone, and one thread that does all the work. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#define SPDL_NO_THREADS
#include "../spdl.h"
#include "test.h"

/* What would wait for another thread times out at once. */
static void rings_without_threads(void) {
    static const spdl_ring_mode modes[] = { SPDL_RING_MPMC, SPDL_RING_SPSC };
    for (int i = 0; i < 2; ++i) {
        spdl_ring_desc desc = { .capacity = 3, .mode = modes[i] };
        spdl_ring *ring;
        REQUIRE(spdl_ring_create(&ring, &desc) == SPDL_OK);
        for (uintptr_t lap = 0; lap < 20; ++lap) {
            void *item = NULL;
            for (uintptr_t k = 0; k < 3; ++k) {
                item = (void *)(lap * 3 + k);
                CHECK_EQ(spdl_ring_push(ring, &item, SPDL_FOREVER), SPDL_OK);
            }
            CHECK_EQ(spdl_ring_try_push(ring, &item), SPDL_FULL);
            CHECK_EQ(spdl_ring_push(ring, &item, SPDL_FOREVER), SPDL_TIMEOUT);
            for (uintptr_t k = 0; k < 3; ++k) {
                CHECK_EQ(spdl_ring_pop(ring, &item, SPDL_FOREVER), SPDL_OK);
                CHECK_EQ((uintptr_t)item, lap * 3 + k);
            }
            CHECK_EQ(spdl_ring_pop(ring, &item, SPDL_SECONDS(1)), SPDL_TIMEOUT);
        }
        spdl_ring_destroy(ring, NULL, NULL);
    }
}

SPDL_FN(count_to_ten, void, int) {
    if (spdl_sequence(task) == 10) return SPDL_END;
    if ((*out = (int *)malloc(sizeof(int))) == NULL) return SPDL_E_NOMEM;
    **out = (int)spdl_sequence(task);
    return SPDL_OK;
}

SPDL_FN(twice, int, int) {
    *in *= 2;
    *out = in;
    return SPDL_OK;
}

static void pipelines_without_threads(void) {
    spdl_error error;
    spdl_pipeline_desc desc = { .error = &error };
    spdl_pipeline *p = NULL;
    for (desc.workers = 0; desc.workers < 2; ++desc.workers) {
        const spdl_result result = spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_SOURCE(count_to_ten, .free_item = free),
            SPDL_PIPE(twice, .free_item = free, .concurrency = 4),
            SPDL_BATCH(3), SPDL_SINK(2)));
        spdl_batch *batch;
        int at = 0;
        if (desc.workers > 0) {
            CHECK_EQ(result, SPDL_E_THREAD);
            CHECK(strstr(error.text, "thread 0 of 1 could not be created: there are none with "
                                     "SPDL_NO_THREADS") != NULL);
            break;
        }
        REQUIRE(result == SPDL_OK);
        while (SPDL_NEXT(p, &batch, SPDL_FOREVER) == SPDL_OK) {
            for (size_t i = 0; i < batch->count; ++i, at += 2)
                CHECK_EQ(*(int *)batch->items[i], at);
            spdl_batch_free(batch);
        }
        CHECK_EQ(at, 20);
        spdl_pipeline_destroy(p);
    }
}

/* A source with a thread of its own is refused by its name. */
static void rows_without_threads(void) {
    spdl_error error;
    const spdl_pipeline_desc desc = { .error = &error };
    spdl_pipeline *p;
    CHECK_EQ(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_SOURCE(count_to_ten, .free_item = free, .threads = 1), SPDL_SINK(2))), SPDL_E_THREAD);
    CHECK(strstr(error.text, "stage 0 'count_to_ten' could not be created: there are") != NULL);
}

/* A call that nobody completes: destroy does not wait for ever, and leaves what it may use. */
static char arena[1 << 21];
static size_t arena_used;

static void *arena_alloc(size_t bytes, size_t align, void *user) {
    const uintptr_t start = (uintptr_t)arena;
    const size_t at = (start + arena_used + align - 1) / align * align - start;
    (void)user;
    arena_used = at + bytes;
    return arena_used <= sizeof arena ? arena + at : NULL;
}

static void arena_free(void *memory, size_t bytes, void *user) {
    (void)user;
    if (memory != NULL) memset(memory, 0xdd, bytes);
}

static int waits_told;

static void arena_log(spdl_log_level level, const char *text, void *user) {
    (void)level, (void)user;
    waits_told += strstr(text, "waits for a call of stage 1 'never' to return and be comp") != NULL;
}

static spdl_deferred pending;
static int *pending_in;

SPDL_FN(never, int, int) {
    pending = spdl_defer(task);
    pending_in = in;
    (void)out;
    return SPDL_PENDING;
}

static void calls_that_nobody_completes(void) {
    spdl_error error = { .text = "" };
    spdl_pipeline_desc desc = { .error = &error, .logger = { arena_log, NULL },
                                .allocator = { arena_alloc, arena_free, NULL } };
    spdl_pipeline *p;
    int *item;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
                SPDL_SOURCE(count_to_ten, .free_item = free),
                SPDL_PIPE(never, .deferred = true), SPDL_SINK(1))) == SPDL_OK);
    CHECK_EQ(SPDL_NEXT(p, &item, SPDL_FOREVER), SPDL_TIMEOUT);
    spdl_pipeline_destroy(p);
    CHECK_EQ(waits_told, 1);
    CHECK_EQ(*pending_in, 0); /* it is still there, as is the call */
    CHECK_EQ(spdl_complete(pending, SPDL_SKIP, NULL), SPDL_OK);
    spdl_pipeline_destroy(p); /* now it can */
    CHECK_EQ(waits_told, 1);
}

static void count_job(void *arg, int worker, void *local) {
    (void)worker;
    (void)local;
    ++*(int *)arg;
}

/* The only thread is guest, producer and trainer; what would sleep is a timeout. */
static void pools_of_guests_alone(void) {
    const spdl_pool_desc pool_desc = { .guests = 1, .queue_size = 2 };
    spdl_pipeline_desc desc = { 0 };
    spdl_pipeline *p;
    spdl_stats stats;
    int ran = 0, *item;
    REQUIRE(spdl_pool_create(&desc.pool, &pool_desc) == SPDL_OK);
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_FEED(int, .buffer_size = 2), SPDL_PIPE(twice), SPDL_SINK(3))) == SPDL_OK);
    for (int i = 1; i < 100; ++i) {
        int number = i;
        CHECK_EQ(spdl_pool_submit(desc.pool, count_job, &ran, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(spdl_pipeline_push(p, &number, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(SPDL_NEXT(p, &item, SPDL_FOREVER), SPDL_TIMEOUT);
        CHECK_EQ(spdl_pool_run(desc.pool, SPDL_FOREVER), SPDL_EMPTY);
        CHECK_EQ(ran, i);
        CHECK_EQ(SPDL_NEXT(p, &item, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(number, 2 * i);
    }
    for (int i = 0; i < 3; ++i)
        CHECK_EQ(spdl_pool_submit(desc.pool, count_job, &ran, SPDL_FOREVER),
                 i < 2 ? SPDL_OK : SPDL_TIMEOUT);
    for (int i = 0; i < 3; ++i)
        CHECK_EQ(spdl_pipeline_push(p, &ran, SPDL_FOREVER), i < 2 ? SPDL_OK : SPDL_TIMEOUT);
    spdl_pipeline_stats(p, &stats);
    CHECK_EQ(stats.delivered, 99);
    CHECK_EQ(stats.stage[1].tasks, 99);
    spdl_pipeline_destroy(p);
    spdl_pool_destroy(desc.pool);
    CHECK_EQ(ran, 101);
}

/* A file of this process, in a folder that `name` is long enough for. */
static const char *scratch(char name[64], const char *what) {
    snprintf(name, 64, "/tmp/spdl-none-%d-%s", (int)getpid(), what);
    return name;
}

/* Items come from the pipeline, then from the cache; the trace is written all the same. */
static void caches_and_traces(void) {
    char path[64], head[64] = "";
    const spdl_pipeline_desc desc = { .trace = scratch(path, "trace.json") };
    spdl_cache_desc cached = { .num_caches = 5, .stop_after = 20, .free_item = free };
    spdl_cache *cache;
    spdl_pipeline *p;
    int *item, taken = 0;
    FILE *file;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_SOURCE(count_to_ten, .free_item = free), SPDL_SINK(2))) == SPDL_OK);
    cached.next = spdl_pipeline_next;
    cached.source = p;
    REQUIRE(spdl_cache_create(&cache, &cached) == SPDL_OK);
    while (spdl_cache_next(cache, (void **)&item, SPDL_FOREVER) == SPDL_OK)
        CHECK_EQ(*item, taken++ % 5);
    CHECK_EQ(taken, 20);
    spdl_cache_destroy(cache);
    spdl_pipeline_destroy(p);
    REQUIRE((file = fopen(path, "rb")) != NULL);
    CHECK(fread(head, 1, sizeof head - 1, file) == sizeof head - 1 && head[0] == '{');
    fclose(file);
    remove(path);
}

/* Twice, so that the second takes the place of the first. */
static void write_and_read_back(const spdl_npz_desc *desc) {
    static const int32_t numbers[4] = { 1, -2, 3, -4 };
    char path[64];
    for (uint64_t count = 3; count < 5; ++count) {
        spdl_npz_writer_desc write = { .error = desc->error };
        spdl_npz_writer *writer;
        int32_t back[4] = { 0 };
        spdl_npz *npz;
        REQUIRE(spdl_npz_writer_open(&writer, scratch(path, "a.npz"), &write) == SPDL_OK);
        CHECK_EQ(spdl_npz_writer_add(writer, "a", "i4", 1, &count, numbers, NULL), SPDL_OK);
        CHECK_EQ(spdl_npz_writer_finish(writer, NULL), SPDL_OK);
        spdl_npz_writer_close(writer);
        REQUIRE(spdl_npz_open(&npz, path, desc) == SPDL_OK);
        CHECK_EQ(spdl_npz_read(npz, 0, back, (size_t)count * sizeof *back, NULL), SPDL_OK);
        CHECK(memcmp(back, numbers, (size_t)count * sizeof *back) == 0);
        spdl_npz_close(npz);
    }
    remove(path);
}

/* From memory, and by way of a file. */
static void arrays_in_memory_and_files(void) {
    static const char head[] = "\x93NUMPY\1\0\x76\0{'descr': '|u1', 'fortran_order': False, "
                               "'shape': (3,), }";
    unsigned char bytes[128 + 3], data[3] = { 0 };
    spdl_error error;
    spdl_npz_desc desc = { .error = &error };
    spdl_npz *npz = NULL;
    memset(bytes, ' ', sizeof bytes);
    memcpy(bytes, head, sizeof head - 1);
    bytes[127] = '\n';
    memcpy(bytes + 128, "\1\2\3", 3);
    REQUIRE(spdl_npz_open_memory(&npz, bytes, sizeof bytes, "three", &desc) == SPDL_OK);
    CHECK_EQ(spdl_npz_read(npz, 0, data, sizeof data, NULL), SPDL_OK);
    CHECK(memcmp(data, "\1\2\3", 3) == 0);
    spdl_npz_close(npz);
    CHECK_EQ(spdl_npz_open(&npz, "/nowhere/three.npz", &desc), SPDL_E_IO);
    CHECK(strstr(error.text, "it could not be opened") != NULL);
    write_and_read_back(&desc);
}

/* Files are there by name, and by lists of names. */
static void files_without_folders(void) {
    char path[64], list[66] = "@";
    spdl_error error;
    const spdl_files_desc desc = { .error = &error };
    const spdl_pipeline_desc plain = { 0 };
    spdl_files *files;
    spdl_pipeline *p;
    spdl_record *line;
    int count = 0;
    FILE *file = fopen(scratch(path, "list"), "wb");
    REQUIRE(file != NULL);
    fprintf(file, "%s\n%s\n", path, path);
    fclose(file);
    strcat(list, path);
    REQUIRE(spdl_files_open(&files, list, &desc) == SPDL_OK);
    CHECK_EQ(spdl_files_count(files), 2);
    CHECK_EQ(files->at[1].bytes, 2 * (strlen(path) + 1));
    REQUIRE(spdl_pipeline_create(&p, &plain, SPDL_STAGES(
        SPDL_FILES(files), SPDL_LINES(NULL), SPDL_SINK(2))) == SPDL_OK);
    for (; SPDL_NEXT(p, &line, SPDL_FOREVER) == SPDL_OK; ++count) {
        CHECK_STR((const char *)line->data, path);
        spdl_record_free(line);
    }
    CHECK_EQ(count, 4);
    spdl_pipeline_destroy(p);
    spdl_files_close(files);
    remove(path);
    CHECK(spdl_files_open(&files, "/tmp", &desc) == SPDL_E_IO);
    CHECK_EQ(spdl_files_open(&files, "/tmp/*", &desc), SPDL_E_IO);
    CHECK_STR(error.text, "'/tmp/': there are no folders with SPDL_NO_THREADS");
}

SPDL_FN(ten_numbers, void, int) {
    if (spdl_sequence(task) >= 10) return SPDL_END;
    if ((*out = (int *)spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    **out = (int)spdl_sequence(task);
    return SPDL_OK;
}

/* No other thread changes a word. */
static void words_of_one_thread(void) {
    spdl__os_event event = { 7 };
    uint64_t word = 1, expected = 2;
    CHECK_EQ(spdl__os_event_sleep(&event, 7, SPDL__NEVER), SPDL_TIMEOUT);
    CHECK_EQ(spdl__os_event_sleep(&event, 6, SPDL__NEVER), SPDL_OK);
    CHECK(!spdl__cas(&word, &expected, 3));
    CHECK(word == 1 && expected == 1);
    CHECK(spdl__cas(&word, &expected, 3));
    CHECK_EQ(word, 3);
}

static void variables_without_a_value(void) {
    char room[SPDL__OS_VARIABLE];
    CHECK_EQ(unsetenv("SPDL_NONE"), 0);
    CHECK(spdl__os_environment("SPDL_NONE", room) == NULL);
    CHECK_EQ(setenv("SPDL_NONE", "", 1), 0);
    CHECK(spdl__os_environment("SPDL_NONE", room) == NULL);
    CHECK_EQ(setenv("SPDL_NONE", "x", 1), 0);
    CHECK_STR(spdl__os_environment("SPDL_NONE", room), "x");
}

/* What a file refuses is a reason, at whatever step. */
static void files_that_refuse(void) {
    char path[64], other[64], byte = 'x';
    uint64_t bytes;
    size_t have;
    spdl__os_file file;
    REQUIRE(spdl__os_file_open(&file, scratch(path, "new"), SPDL__OS_NEW, NULL) == NULL);
    CHECK_STR(spdl__os_file_open(&file, path, SPDL__OS_NEW, &bytes), "it is in use");
    CHECK_EQ(file, SPDL__NO_FILE);
    REQUIRE(spdl__os_file_open(&file, path, SPDL__OS_APPEND, &bytes) == NULL);
    CHECK_STR(spdl__os_file_read(file, &byte, 1, 0, &have), "it could not be read");
    CHECK_STR(spdl__os_file_read(file, &byte, 1, SPDL__NEVER - 1, &have), "it cannot seek there");
    CHECK_STR(spdl__os_file_write(file, &byte, 1, SPDL__NEVER - 1), "it cannot seek there");
    CHECK(spdl__os_file_close(file) == NULL);
    CHECK(spdl__os_file_close(SPDL__NO_FILE) == NULL);
    REQUIRE(spdl__os_file_open(&file, path, SPDL__OS_READ, &bytes) == NULL && bytes == 0);
    CHECK_STR(spdl__os_file_read(file, &byte, 1, 0, &have), "it ended while it was read");
    CHECK(spdl__os_file_close(file) == NULL);
    scratch(other, "none");
    REQUIRE(spdl__os_file_open(&file, path, SPDL__OS_REPLACE, NULL) == NULL);
    CHECK_STR(spdl__os_file_commit(file, other, path, true), "it could not be renamed");
    CHECK_STR(spdl__os_file_commit(file, other, path, true), "it could not be renamed");
    CHECK(spdl__os_file_close(file) == NULL);
    REQUIRE(spdl__os_file_open(&file, path, SPDL__OS_REPLACE, NULL) == NULL);
    REQUIRE(mkdir(other, 0700) == 0); /* rename refuses that name */
    CHECK(spdl__os_file_commit(file, path, other, true) == NULL);
    CHECK(spdl__os_file_close(file) == NULL);
    CHECK(remove(path) != 0 && remove(other) == 0);
}

static void devices_that_are_full(void) {
    spdl__os_file file;
    FILE *stream;
    if (access("/dev/full", W_OK) != 0) TEST_SKIP("needs /dev/full");
    REQUIRE(spdl__os_file_open(&file, "/dev/full", SPDL__OS_REPLACE, NULL) == NULL);
    CHECK_STR(spdl__os_file_write(file, "x", 1, SPDL__NEVER), "it could not be written");
    CHECK_EQ(fwrite("x", 1, 1, stream = (FILE *)file), 1);
    CHECK_STR(spdl__os_file_commit(file, "/nowhere/a", "/nowhere/b", false),
              "it could not be written");
    CHECK_EQ(fwrite("x", 1, 1, stream), 1);
    CHECK_STR(spdl__os_file_close(file), "it could not be written");
    REQUIRE(spdl__os_file_open(&file, "/dev/full", SPDL__OS_REPLACE, NULL) == NULL);
    REQUIRE(setvbuf((FILE *)file, NULL, _IONBF, 0) == 0);
    CHECK_STR(spdl__os_file_write(file, "x", 1, SPDL__NEVER), "it could not be written");
    (void)spdl__os_file_close(file);
}

/* A pipe is written as it is; a reader needs a length. */
static void pipes_have_no_length(void) {
    char path[64], got[3] = "";
    uint64_t bytes = 7;
    size_t have;
    spdl__os_file file;
    int ends[2], was;
    REQUIRE(pipe(ends) == 0);
    snprintf(path, sizeof path, "/dev/fd/%d", ends[1]);
    if (access(path, W_OK) != 0) TEST_SKIP("needs /dev/fd");
    CHECK(spdl__os_file_open(&file, path, SPDL__OS_APPEND, &bytes) == NULL);
    CHECK_EQ(bytes, 0);
    CHECK(spdl__os_file_write(file, "ab", 2, SPDL__NEVER) == NULL);
    CHECK_STR(spdl__os_file_write(file, "c", 1, 0), "it cannot seek there");
    CHECK_STR(spdl__os_file_read(file, got, 1, 0, &have), "it cannot seek there");
    CHECK(spdl__os_file_close(file) == NULL);
    snprintf(path, sizeof path, "/dev/fd/%d", ends[0]);
    CHECK(spdl__os_file_open(&file, path, SPDL__OS_READ, &bytes) != NULL);
    CHECK_EQ(read(ends[0], got, 2), 2);
    CHECK_STR(got, "ab");
    was = dup(STDERR_FILENO);
    REQUIRE(was >= 0 && dup2(ends[1], STDERR_FILENO) >= 0);
    CHECK(spdl__os_stderr_write("cd", 2, 0) == NULL && read(ends[0], got, 2) == 2);
    (void)close(STDERR_FILENO);
    CHECK_STR(spdl__os_stderr_write("e", 1, 0), "it accepts no more");
    clearerr(stderr);
    REQUIRE(dup2(was, STDERR_FILENO) >= 0);
    CHECK_STR(got, "cd");
}

/* Without processes there is no loader: it says what to do. */
static void a_loader_without_processes(void) {
    spdl_loader *l = (spdl_loader *)&l;
    spdl_error error;
    spdl_loader_desc desc = { .error = &error };
    CHECK_EQ(spdl_loader_open(&l, &desc, SPDL_STAGES(
                 SPDL_SOURCE(ten_numbers), SPDL_BATCH(2, .item_bytes = sizeof(int)),
                 SPDL_SINK(1))), SPDL_E_UNSUPPORTED);
    CHECK(l == NULL && strstr(error.text, "create a pipeline of the same rows") != NULL);
    CHECK_EQ(spdl_loader_open(NULL, &desc, SPDL_STAGES(SPDL_SINK(1))), SPDL_E_INVALID);
    CHECK_EQ(spdl_loader_open(&l, NULL, SPDL_STAGES(SPDL_SINK(1))), SPDL_E_UNSUPPORTED);
    spdl_loader_close(NULL);
    CHECK_EQ(spdl_loader_next(NULL, NULL, 0), SPDL_E_INVALID);
}

TEST_TABLE(os_none) {
    TEST_CASE(rings_without_threads),
    TEST_CASE(pipelines_without_threads),
    TEST_CASE(rows_without_threads),
    TEST_CASE(calls_that_nobody_completes),
    TEST_CASE(pools_of_guests_alone),
    TEST_CASE(caches_and_traces),
    TEST_CASE(arrays_in_memory_and_files),
    TEST_CASE(files_without_folders),
    TEST_CASE(words_of_one_thread),
    TEST_CASE(variables_without_a_value),
    TEST_CASE(files_that_refuse),
    TEST_CASE(devices_that_are_full),
    TEST_CASE(pipes_have_no_length),
    TEST_CASE(a_loader_without_processes),
    TEST_END,
};
