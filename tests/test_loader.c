/* spdl_loader: batches of other processes, whole and in order; every way in which a process can end
   is told, and nothing is left. (tests/torture_loader.c has the long forms.) */
#define _GNU_SOURCE
#include <unistd.h>
static int forks_left = -1; /* a fork that fails after so many; -1: none does */
__attribute__((unused)) static int fork_or_not(void);
#define SPDL_FORK fork_or_not
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "loader.h"
#include "test.h"

#include <dirent.h>
#include <sched.h>
#include <sys/prctl.h>

static int fork_or_not(void) {
    if (forks_left == 0) {
        errno = EAGAIN;
        return -1;
    }
    if (forks_left > 0) --forks_left;
    return fork();
}

#define TEST_NEEDS_PROCESSES()                                                                     \
    do {                                                                                           \
        if (!SPDL__OS_PROCESSES) TEST_SKIP("needs processes");                                     \
    } while (0)

/* --- in general --- */

/* All of `count` items, in order; numbers of batches, too. Ends with `end`. */
static void takes_all(spdl_loader *l, uint64_t count, uint64_t epoch, spdl_result end) {
    spdl_loader_batch batch;
    uint64_t next = 0, number = 0;
    spdl_result result;
    while ((result = spdl_loader_next(l, &batch, SPDL_SECONDS(15))) == SPDL_OK) {
        const record *items = (const record *)batch.data;
        CHECK_EQ(batch.number, number++);
        CHECK_EQ(batch.epoch, epoch);
        CHECK_EQ(batch.bytes, batch.count * sizeof(record));
        CHECK_EQ((uintptr_t)batch.data % 64, 0);
        for (size_t i = 0; i < batch.count; ++i, ++next)
            if (!CHECK(record_is(&items[i], next, epoch))) return;
        CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
    }
    CHECK_EQ(result, end);
    CHECK_EQ(next, count);
}

/* Nobody is left that this process has made. */
static void all_gone(void) {
    CHECK_EQ(waitpid(-1, NULL, WNOHANG), -1);
    CHECK_EQ(errno, ECHILD);
}

static void batches_come_whole_and_in_order(void) {
    static const spdl_loader_start starts[] = { SPDL_LOADER_IN_PROCESS, SPDL_LOADER_FORK };
    for (int k = 0; k < 24; ++k) {
        spdl_loader_desc desc = desc_of(k % 3);
        spdl_loader *l;
        desc.pipeline.logger.log_fn = log_nothing; /* concurrency is more than the workers */
        desc.start = starts[k & 1];
        desc.children = 1 + k / 2 % 3;
        desc.slots = 1 + k % 5;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(100),
                    SPDL_PIPE(copied, .concurrency = 2),
                    IN_BATCHES(7), SPDL_SINK(2))) == SPDL_OK);
        takes_all(l, 100, 0, SPDL_END);
        CHECK_EQ(spdl_loader_next(l, &(spdl_loader_batch){ 0 }, 0), SPDL_END);
        spdl_loader_close(l);
        all_gone();
    }
}

static void epochs_end_one_by_one(void) {
    for (int children = 1; children <= 3; ++children) {
        spdl_loader_desc desc = desc_of(2);
        spdl_loader *l;
        desc.children = children;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(40, .continuous = true),
                    IN_BATCHES(6), SPDL_SINK(2))) == SPDL_OK);
        for (uint64_t epoch = 0; epoch < 5; ++epoch) takes_all(l, 40, epoch, SPDL_END);
        spdl_loader_close(l);
        all_gone();
    }
}

/* Breaks off after any number of batches, and begins again: in the same process. */
static void it_is_rewound(void) {
    for (int children = 1; children <= 2; ++children) {
        spdl_loader_desc desc = desc_of(2);
        spdl_loader_batch held, batch;
        spdl_loader_status before, after;
        spdl_loader *l;
        desc.children = children;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(60),
                    IN_BATCHES(5), SPDL_SINK(2))) == SPDL_OK);
        REQUIRE(spdl_loader_next(l, &held, SPDL_SECONDS(15)) == SPDL_OK);
        spdl_loader_read(l, &before);
        for (int taken = 0; taken < 12; ++taken) {
            for (int k = 0; k < taken; ++k) {
                REQUIRE(spdl_loader_next(l, &batch, SPDL_SECONDS(15)) == SPDL_OK);
                CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
            }
            CHECK_EQ(spdl_loader_rewind(l, 0, SPDL_SECONDS(15)), SPDL_OK);
        }
        takes_all(l, 60, 0, SPDL_END);
        CHECK(record_is((const record *)held.data, 0, 0)); /* a view outlives that */
        CHECK_EQ(spdl_loader_done(l, &held), SPDL_OK);
        CHECK_EQ(spdl_loader_rewind(l, 30, SPDL_SECONDS(15)), SPDL_OK);
        REQUIRE(spdl_loader_next(l, &batch, SPDL_SECONDS(15)) == SPDL_OK);
        CHECK(record_is((const record *)batch.data, 30, 0));
        CHECK_EQ(spdl_loader_rewind(l, (uint64_t)1 << 40, 0), SPDL_E_INVALID);
        CHECK_EQ(spdl_loader_rewind(l, 5, SPDL_SECONDS(15)),
                 children > 1 ? SPDL_E_INVALID : SPDL_OK);
        spdl_loader_read(l, &after);
        for (int i = 0; i < children; ++i) CHECK_EQ(after.pid[i], before.pid[i]);
        spdl_loader_close(l);
        all_gone();
    }
}

/* --- slots --- */

static void a_held_slot_is_not_written(void) {
    spdl_loader_desc desc = desc_of(2);
    spdl_loader_batch held[3], batch;
    spdl_loader *l;
    char *base;
    size_t bytes, slot_bytes;
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(500),
                IN_BATCHES(5), SPDL_SINK(2))) == SPDL_OK);
    spdl_loader_arena(l, (void **)&base, &bytes, &slot_bytes);
    CHECK_EQ((uintptr_t)base % 4096, 0);
    for (int i = 0; i < 3; ++i)
        REQUIRE(spdl_loader_next(l, &held[i], SPDL_SECONDS(15)) == SPDL_OK);
    for (int k = 3; k < 100; ++k) {
        REQUIRE(spdl_loader_next(l, &batch, SPDL_SECONDS(15)) == SPDL_OK);
        CHECK(record_is((const record *)batch.data, (uint64_t)k * 5, 0));
        CHECK((char *)batch.data >= base && (char *)batch.data + batch.bytes <= base + bytes);
        CHECK_EQ(((size_t)((char *)batch.data - base) + batch.bytes - 1) / slot_bytes,
                 (size_t)((char *)batch.data - base) / slot_bytes);
        CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
        CHECK_EQ(spdl_loader_done(l, &batch), SPDL_E_INVALID); /* twice */
        for (int i = 0; i < 3; ++i)
            CHECK(record_is((const record *)held[i].data, (uint64_t)i * 5, 0));
    }
    CHECK_EQ(spdl_loader_done(l, &held[1]), SPDL_OK); /* in any order */
    CHECK_EQ(spdl_loader_done(l, &held[0]), SPDL_OK);
    CHECK_EQ(spdl_loader_next(l, &batch, SPDL_SECONDS(15)), SPDL_END);
    batch = held[2];
    batch.ticket += 1;
    CHECK_EQ(spdl_loader_done(l, &batch), SPDL_E_INVALID); /* stale */
    batch.slot = -1;
    CHECK_EQ(spdl_loader_done(l, &batch), SPDL_E_INVALID);
    spdl_loader_close(l);
    all_gone();
}

/* With all slots in its hands the trainer would wait for itself. */
static void all_slots_held_is_an_error(void) {
    for (int in_process = 0; in_process < 2; ++in_process) {
        spdl_loader_desc desc = desc_of(1);
        spdl_loader_batch held[2], batch;
        spdl_loader *l;
        desc.slots = 2;
        desc.start = in_process ? SPDL_LOADER_IN_PROCESS : SPDL_LOADER_FORK;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(50),
                    IN_BATCHES(5), SPDL_SINK(2))) == SPDL_OK);
        for (int i = 0; i < 2; ++i)
            REQUIRE(spdl_loader_next(l, &held[i], SPDL_SECONDS(15)) == SPDL_OK);
        CHECK_EQ(spdl_loader_next(l, &batch, SPDL_FOREVER), SPDL_E_LIMIT);
        CHECK(strstr(spdl_loader_error(l)->text, "holds all 2 slots of child 0") != NULL);
        CHECK_EQ(spdl_loader_done(l, &held[0]), SPDL_OK); /* and then goes on */
        CHECK_EQ(spdl_loader_next(l, &batch, SPDL_SECONDS(15)), SPDL_OK);
        CHECK(record_is((const record *)batch.data, 10, 0));
        spdl_loader_close(l);
    }
    all_gone();
}

SPDL_FN(arrays, record, record) {
    const uint64_t shape[] = { 3, 2, 5 }, n = in->number;
    uint8_t *images = (uint8_t *)spdl_slot_array(task, "images", "u1", 3, shape);
    float *labels = (float *)spdl_slot_array(task, "labels", "f4", 1, shape);
    int64_t *id = (int64_t *)spdl_slot_array(task, "id", "i8", 0, NULL);
    if (images == NULL || labels == NULL || id == NULL) return SPDL_E_NOMEM;
    memset(images, (int)n, 30);
    for (int i = 0; i < 3; ++i) labels[i] = (float)n + (float)i;
    *id = (int64_t)n;
    *out = (record *)spdl_buffer(task);
    return SPDL_OK;
}

static void arrays_have_names_and_shapes(void) {
    for (int in_process = 0; in_process < 2; ++in_process) {
        spdl_loader_desc desc = desc_of(2);
        spdl_loader_batch batch;
        spdl_loader *l;
        desc.start = in_process ? SPDL_LOADER_IN_PROCESS : SPDL_LOADER_FORK;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(40),
                    SPDL_PIPE(arrays, .item_bytes = 136, .concurrency = 2), SPDL_SINK(2))) ==
                SPDL_OK);
        for (int64_t n = 0; n < 40; ++n) {
            REQUIRE(spdl_loader_next(l, &batch, SPDL_SECONDS(15)) == SPDL_OK);
            CHECK_EQ(batch.count, 1);
            CHECK_EQ(batch.bytes, 136);
            REQUIRE(batch.array_count == 3);
            CHECK_STR(batch.array[0].name, "images");
            CHECK(batch.array[0].kind == 'u' && batch.array[0].itemsize == 1);
            CHECK(batch.array[0].ndim == 3 && batch.array[0].shape[2] == 5);
            CHECK(((uint8_t *)batch.array[0].data)[29] == n);
            CHECK_EQ((char *)batch.array[1].data - (char *)batch.data, 64);
            CHECK(((float *)batch.array[1].data)[2] == (float)n + 2);
            CHECK_EQ(batch.array[1].bytes, 12);
            CHECK(batch.array[2].ndim == 0 && *(int64_t *)batch.array[2].data == n);
            CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
        }
        CHECK_EQ(spdl_loader_next(l, &batch, SPDL_SECONDS(15)), SPDL_END);
        spdl_loader_close(l);
    }
    all_gone();
}

static const char *dtype_of = "f4";
static uint64_t dims_of = 1000;

SPDL_FN(wrong_array, record, record) {
    *out = (record *)spdl_slot_array(task, "images", dtype_of, 1, &dims_of);
    return *out != NULL || in->number == 0 ? SPDL_OK : SPDL_E_STAGE;
}

static void an_array_that_does_not_fit_is_an_error(void) {
    static const struct {
        const char *dtype;
        uint64_t dims;
        const char *text;
    } rows[] = {
        { "f4", 1000, "array 'images': it ends at byte 4000 of a slot of 128" },
        { "f4", UINT64_MAX / 2, "of a slot of 128" },
        { "q4", 1, "its dtype is not as \"f4\"" },
        { "f", 1, "its dtype is not as \"f4\"" },
        { "f4x", 1, "its dtype is not as \"f4\"" },
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) {
        spdl_loader_desc desc = desc_of(1);
        spdl_loader_batch batch;
        spdl_loader *l;
        dtype_of = rows[i].dtype;
        dims_of = rows[i].dims;
        desc.pipeline.logger.log_fn = log_nothing;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(40),
                    SPDL_PIPE(wrong_array, .item_bytes = 128), SPDL_SINK(2))) == SPDL_OK);
        CHECK_EQ(spdl_loader_next(l, &batch, SPDL_SECONDS(15)), SPDL_E_INVALID);
        CHECK_EQ(spdl_loader_error(l)->stage, 1);
        if (!CHECK(strstr(spdl_loader_error(l)->text, rows[i].text) != NULL))
            fprintf(stderr, "    %s\n", spdl_loader_error(l)->text);
        spdl_loader_close(l);
    }
    all_gone();
}

/* Drops, batches in place, and several children: blocks suffice, and no item is lost. */
static void blocks_suffice(void) {
    for (int k = 0; k < 12; ++k) {
        static bool seen[600];
        spdl_loader_desc desc = desc_of(1 + k % 4);
        spdl_loader_batch batch;
        spdl_loader *l;
        spdl_result result;
        size_t count = 0;
        memset(seen, 0, sizeof seen);
        desc.children = 1 + k % 2;
        desc.slots = 1 + k % 3;
        desc.pipeline.logger.log_fn = log_nothing;
        if (k % 3 == 2) desc.start = SPDL_LOADER_IN_PROCESS;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(600),
                    SPDL_PIPE(two_of_three, .concurrency = 3), IN_BATCHES(4),
                    SPDL_PIPE(batches_pass, .concurrency = 2), SPDL_SINK(1 + k % 4))) == SPDL_OK);
        while ((result = spdl_loader_next(l, &batch, SPDL_SECONDS(15))) == SPDL_OK) {
            for (size_t i = 0; i < batch.count; ++i) {
                const record *item = (const record *)batch.data + i;
                if (!CHECK(item->number < 600 && record_is(item, item->number, 0))) break;
                CHECK(!seen[item->number]);
                seen[item->number] = true;
                ++count;
            }
            CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
        }
        if (!CHECK_EQ(result, SPDL_END)) fprintf(stderr, "%s\n", spdl_loader_error(l)->text);
        CHECK_EQ(count, 400);
        spdl_loader_close(l);
    }
    all_gone();
}

/* --- what goes wrong in a stage --- */

static void failures_come_after_the_items_before_them(void) {
    spdl_loader_desc desc = desc_of(2);
    spdl_loader_batch batch;
    spdl_loader *l;
    spdl_result result;
    fate harm = { .at = 33, .how = FAIL };
    uint64_t next = 0;
    desc.pipeline.logger.log_fn = log_nothing;
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(100),
                SPDL_PIPE(meets_its_fate, .ctx = &harm), IN_BATCHES(1),
                SPDL_SINK(2))) == SPDL_OK);
    while ((result = spdl_loader_next(l, &batch, SPDL_SECONDS(15))) == SPDL_OK) {
        CHECK(record_is((const record *)batch.data, next++, 0));
        CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
    }
    CHECK_EQ(result, SPDL_E_STAGE);
    CHECK_EQ(next, 33);
    CHECK_EQ(spdl_loader_next(l, &batch, 0), SPDL_E_STAGE); /* again and again */
    CHECK_EQ(spdl_loader_error(l)->stage, 1);
    CHECK_EQ(spdl_loader_error(l)->item, 33);
    CHECK_STR(spdl_loader_error(l)->stage_name, "meets_its_fate");
    CHECK_STR(spdl_loader_error(l)->text, "spdl: stage 1 'meets_its_fate', item 33: as planned");
    CHECK_EQ(spdl_loader_rewind(l, 0, SPDL_SECONDS(15)), SPDL_OK);
    CHECK_EQ(spdl_loader_error(l)->result, SPDL_OK);
    CHECK_EQ(spdl_loader_next(l, &batch, SPDL_SECONDS(15)), SPDL_OK);
    CHECK(record_is((const record *)batch.data, 0, 0));
    spdl_loader_close(l);
    all_gone();
}

SPDL_FN(fails_at_once, void, record) {
    return spdl_sequence(task) == (uint64_t)(uintptr_t)spdl_ctx(task)
               ? spdl_fail(task, "no list")
               : records_spdl_call(task, in, (void **)out);
}

SPDL_FN(stops, record, record) {
    if (in->number == 20) spdl_stop(task);
    *out = in;
    return SPDL_OK;
}

static spdl_result refuses(void *ctx, int worker, void **local) {
    *local = ctx;
    return worker == 1 ? SPDL_E_IO : SPDL_OK;
}

static volatile int forever = 1;
static spdl_result never_ready(void *ctx, int worker, void **local) {
    *local = ctx;
    while (worker >= 0 && forever) pause();
    return SPDL_OK;
}

static spdl_result leaves(void *ctx, int worker, void **local) {
    *local = ctx;
    (void)worker;
    _exit(5);
}

/* A pipeline that cannot begin, or ends early, is told, too. */
static void beginnings_and_ends(void) {
    const spdl_stage rows[][4] = {
        { SPDL_SOURCE(fails_at_once, .ctx = NULL, .item_bytes = sizeof(record)), SPDL_SINK(2) },
        { RECORDS(40),
          SPDL_PIPE(stops, .name = "stops"), SPDL_SINK(2) },
        { RECORDS(40, .init = refuses),
          SPDL_SINK(2) },
        { RECORDS(40, .init = leaves),
          SPDL_SINK(2) },
        { RECORDS(40, .init = never_ready),
          SPDL_SINK(2) },
    };
    static const struct {
        size_t count;
        spdl_result result;
        const char *text;
    } says[] = {
        { 2, SPDL_E_STAGE, "spdl: stage 0 'fails_at_once', item 0: no list" },
        { 3, SPDL_CLOSED, "" },
        { 2, SPDL_E_IO, "init" },
        { 2, SPDL_E_PROCESS, "child 0 has ended with code 5, outside of calls of stages" },
        { 2, SPDL_E_PROCESS, "child 0 was killed, as it made nothing for hang_timeout" },
    };
    for (size_t i = 0; i < (SPDL__OS_PROCESSES ? 5 : 3); ++i) {
        spdl_loader_desc desc = desc_of(2);
        spdl_loader_batch batch;
        spdl_loader *l;
        spdl_result result;
        desc.hang_timeout = i == 4 ? 0.1 : 0;
        desc.pipeline.logger.log_fn = log_nothing;
        REQUIRE(spdl_loader_open(&l, &desc, rows[i], says[i].count) == SPDL_OK);
        while ((result = spdl_loader_next(l, &batch, SPDL_SECONDS(15))) == SPDL_OK)
            CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
        CHECK_EQ(result, says[i].result);
        if (!CHECK(strstr(spdl_loader_error(l)->text, says[i].text) != NULL))
            fprintf(stderr, "    row %d: %s\n", (int)i, spdl_loader_error(l)->text);
        spdl_loader_close(l);
    }
    all_gone();
}

/* --- how a process ends --- */

/* Opens a loader whose item 40 meets its fate. What has come before is there, in order: *taken
   items. How it ended. */
static spdl_result runs_into(fate *harm, spdl_loader_desc *desc, spdl_loader **loader,
                             uint64_t *taken) {
    spdl_loader_batch batch;
    spdl_result result;
    desc->pipeline.logger.log_fn = log_nothing;
    *taken = 0;
    REQUIRE(spdl_loader_open(loader, desc, SPDL_STAGES(RECORDS(100),
                SPDL_PIPE(meets_its_fate, .ctx = harm, .concurrency = 1),
                IN_BATCHES(2), SPDL_SINK(2))) == SPDL_OK);
    while ((result = spdl_loader_next(*loader, &batch, SPDL_SECONDS(15))) == SPDL_OK) {
        for (size_t i = 0; i < batch.count; ++i, ++*taken) {
            const record *item = (const record *)batch.data + i;
            if (item->number == harm->at + 1 && *taken == harm->at) ++*taken; /* was left out */
            if (!CHECK(record_is(item, *taken, 0))) return SPDL_E_CHECKSUM;
        }
        CHECK_EQ(spdl_loader_done(*loader, &batch), SPDL_OK);
    }
    return result;
}

static void every_end_is_told(void) {
    static const struct {
        fate_how how;
        const char *text;
    } rows[] = {
        { CRASH, "child 0 was killed by SIGSEGV, in stage 1 'meets_its_fate', item 40" },
        { ABORT, "child 0 was killed by SIGABRT, in stage 1 'meets_its_fate', item 40" },
        { KILL, "child 0 was killed by SIGKILL" },
        { EXIT_0, "child 0 has ended with code 0, but not its source" },
        { EXIT_17, "child 0 has ended with code 17" },
        { HANG, "child 0 was killed, as it made nothing for hang_timeout, in stage 1 "
                "'meets_its_fate', item 40" },
        { STOP, "child 0 was killed, as it made nothing for hang_timeout" },
        { GROW, "child 0 was killed, as it used more memory than child_rss_limit" },
    };
    TEST_NEEDS_PROCESSES();
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) {
        spdl_loader_desc desc = desc_of(2);
        fate harm = { .at = 40, .how = rows[i].how };
        spdl_loader_status status;
        spdl_loader_batch batch;
        spdl_loader *l;
        uint64_t taken;
        if (TEST_FAULTS_CAUGHT && (rows[i].how == CRASH || rows[i].how == ABORT)) continue;
        if (rows[i].how == HANG || rows[i].how == STOP) desc.hang_timeout = 0.1;
        if (rows[i].how == GROW) desc.child_rss_limit = TEST_SANITIZED_BYTES + (40 << 20);
        CHECK_EQ(runs_into(&harm, &desc, &l, &taken), SPDL_E_PROCESS);
        CHECK(taken <= 40);
        if (!CHECK(strstr(spdl_loader_error(l)->text, rows[i].text) != NULL))
            fprintf(stderr, "    %s\n", spdl_loader_error(l)->text);
        CHECK_EQ(spdl_loader_next(l, &batch, SPDL_FOREVER), SPDL_E_PROCESS);
        CHECK_EQ(spdl_loader_rewind(l, 0, SPDL_FOREVER), SPDL_E_PROCESS);
        spdl_loader_read(l, &status);
        CHECK_EQ(status.pid[0], 0);
        spdl_loader_close(l);
    }
    all_gone();
}

SPDL_FN(crashes_beside_another, record, record) {
    uint32_t *inside = (uint32_t *)spdl_ctx(task);
    *out = in;
    if (in->number != 4 && in->number != 5) return SPDL_OK;
    __atomic_add_fetch(inside, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(inside, __ATOMIC_SEQ_CST) < 2) usleep(100);
    if (in->number == 5) abort();
    for (;;) pause();
}

/* By the thread that raised the signal, of several calls that ran; of those that were ended from
   outside all are named. */
static void the_call_that_crashed_is_known(void) {
    spdl_loader_desc desc = desc_of(2);
    spdl_loader_batch batch;
    spdl_loader *l;
    TEST_NEEDS_PROCESSES();
    if (TEST_FAULTS_CAUGHT) TEST_SKIP("a sanitizer has them");
    desc.pipeline.logger.log_fn = log_nothing;
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(
                RECORDS(50), SPDL_PIPE(crashes_beside_another, .concurrency = 2,
                                       .ctx = shared_flag()), SPDL_SINK(2))) == SPDL_OK);
    while (spdl_loader_next(l, &batch, SPDL_SECONDS(15)) == SPDL_OK)
        CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
    CHECK_STR(spdl_loader_error(l)->text, "spdl: loader 'spdl': child 0 was killed by SIGABRT, in "
                                          "stage 1 'crashes_beside_another', item 5");
    CHECK_EQ(spdl_loader_error(l)->item, 5);
    spdl_loader_close(l);
    all_gone();
}

/* Started again at the very item; it is called again once, and left out after a second time. */
static void it_is_started_again(void) {
    TEST_NEEDS_PROCESSES();
    for (int children = 1; children <= 2; ++children) {
        for (int once = 0; once < 2; ++once) {
            spdl_loader_desc desc = desc_of(2);
            fate harm = { .at = 40, .how = EXIT_17 };
            spdl_loader_status status;
            spdl_loader *l;
            uint64_t taken;
            if (children > 1 && !once) continue; /* later batches of a child are then others */
            desc.max_restarts = 3;
            desc.children = children;
            if (once) harm.done = shared_flag();
            CHECK_EQ(runs_into(&harm, &desc, &l, &taken), SPDL_END);
            CHECK_EQ(taken, 100);
            spdl_loader_read(l, &status);
            CHECK_EQ(status.restarts, once ? 1 : 2);
            CHECK_EQ(status.quarantined, !once);
            if (!once) {
                CHECK_EQ(status.quarantine[0].stage, 1);
                CHECK_EQ(status.quarantine[0].item, 40);
            }
            spdl_loader_close(l);
        }
    }
    all_gone();
}

static int by_number(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Tables in which an item is not a result: what comes after a restart is what would have come, in
   some order where that is not always the same. */
static void it_goes_on_exactly(void) {
    TEST_NEEDS_PROCESSES();
    for (int k = 0; k < 12; ++k) {
        static uint64_t as_is[600], again[600];
        const spdl_order order = k < 9 ? SPDL_ORDER_INPUT : SPDL_ORDER_COMPLETION;
        size_t counted[2] = { 0, 0 };
        for (int run = 0; run < 2; ++run) {
            spdl_loader_desc desc = desc_of(1 + k % 3);
            fate harm = { .at = 30 + 6 * (uint64_t)k, .how = KILL };
            uint64_t *numbers = run ? again : as_is;
            spdl_loader_batch batch;
            spdl_loader_status status;
            spdl_loader *l;
            desc.max_restarts = 1;
            if (run == 0) harm.at = UINT64_MAX;
            harm.done = shared_flag();
            desc.pipeline.logger.log_fn = log_nothing;
            REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(120, .continuous = true),
                        SPDL_PIPE(two_of_three, .concurrency = 2),
                        SPDL_PIPE(one_to_three, .emits = 3 * (k < 9), .concurrency = 2,
                                  .item_bytes = sizeof(record), .output_order = order),
                        SPDL_PIPE(meets_its_fate, .ctx = &harm),
                        SPDL_BATCH(4, .item_bytes = sizeof(record), .drop_last = k % 2 && k < 9),
                        SPDL_SINK(2))) == SPDL_OK);
            for (int epoch = 0; epoch < 2; ++epoch) {
                while (spdl_loader_next(l, &batch, SPDL_SECONDS(15)) == SPDL_OK) {
                    for (size_t i = 0; i < batch.count && counted[run] < 600; ++i)
                        numbers[counted[run]++] = ((const record *)batch.data)[i].number;
                    CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
                }
            }
            CHECK_EQ(spdl_loader_error(l)->result, SPDL_OK);
            spdl_loader_read(l, &status);
            CHECK_EQ(status.restarts, run);
            spdl_loader_close(l);
        }
        CHECK(counted[0] > 150);
        CHECK_EQ(counted[0], counted[1]);
        if (order == SPDL_ORDER_COMPLETION) {
            qsort(as_is, counted[0], sizeof as_is[0], by_number);
            qsort(again, counted[1], sizeof again[0], by_number);
        }
        CHECK(memcmp(as_is, again, counted[0] * sizeof as_is[0]) == 0);
    }
    all_gone();
}

SPDL_FN(of_index, spdl_index, record) {
    if ((*out = (record *)spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    record_make(*out, in->index, in->epoch);
    return SPDL_OK;
}

/* A sampler gives the same sequence in and out, to any number of children, and after an end. */
static void samplers_give_the_same_sequence(void) {
    static uint64_t first[220], other[220];
    for (int k = 0; k < 5; ++k) {
        spdl_loader_desc desc = desc_of(1);
        spdl_sampler_desc order = { .count = 100, .order = SPDL_SAMPLE_SHUFFLED, .seed = 5 };
        fate harm = { .at = k == 4 ? 77 : UINT64_MAX, .how = KILL, .done = shared_flag() };
        spdl_loader_batch batch;
        spdl_sampler *sampler;
        spdl_loader *l;
        size_t count = 0;
        uint64_t *numbers = k ? other : first;
        if (k == 0) desc.start = SPDL_LOADER_IN_PROCESS;
        desc.children = k < 4 ? 1 + k : 2;
        desc.max_restarts = 1;
        REQUIRE(spdl_sampler_create(&sampler, &order) == SPDL_OK);
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(
                    SPDL_INDEX(sampler, .continuous = true),
                    SPDL_PIPE(of_index, .item_bytes = sizeof(record)),
                    SPDL_PIPE(meets_its_fate, .ctx = &harm), IN_BATCHES(4),
                    SPDL_SINK(2))) == SPDL_OK);
        for (int epoch = 0; epoch < 2; ++epoch) {
            while (spdl_loader_next(l, &batch, SPDL_SECONDS(15)) == SPDL_OK) {
                for (size_t i = 0; i < batch.count && count < 220; ++i)
                    numbers[count++] = ((const record *)batch.data)[i].number;
                CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
            }
            CHECK_STR(spdl_loader_error(l)->text, "");
            CHECK_EQ(count, 100 * (epoch + 1));
        }
        CHECK(memcmp(first, numbers, sizeof first) == 0);
        spdl_loader_close(l);
        spdl_sampler_destroy(sampler);
        if (!SPDL__OS_PROCESSES) break;
    }
    all_gone();
}

static void a_table_without_a_position_is_not_started_again(void) {
    spdl_loader_desc desc = desc_of(1);
    fate harm = { .at = 10, .how = EXIT_17 };
    counts some = { .items = 50 };
    spdl_loader_batch batch;
    spdl_loader *l;
    spdl_result result;
    TEST_NEEDS_PROCESSES();
    desc.max_restarts = 1;
    desc.pipeline.logger.log_fn = log_nothing;
    desc.start = SPDL_LOADER_FORK;
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(
                SPDL_FROM(record, record_after_record, &some),
                SPDL_PIPE(meets_its_fate, .ctx = &harm, .item_bytes = sizeof(record)),
                SPDL_PIPE(copied, .item_bytes = sizeof(record)), SPDL_SINK(2))) == SPDL_OK);
    while ((result = spdl_loader_next(l, &batch, SPDL_SECONDS(15))) == SPDL_OK)
        CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
    CHECK_EQ(result, SPDL_E_PROCESS);
    CHECK(strstr(spdl_loader_error(l)->text, "has no position to go on from") != NULL);
    spdl_loader_close(l);
    all_gone();
}

/* A trainer that is killed leaves nobody: who they were it says through a pipe. */
static void they_end_with_the_trainer(void) {
    TEST_NEEDS_PROCESSES();
    CHECK_EQ(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), 0);
    for (int how = 0; how < 3; ++how) {
        spdl_loader_status status;
        int pipes[2];
        pid_t trainer, other = 0;
        uint64_t since;
        REQUIRE(pipe(pipes) == 0);
        trainer = fork();
        if (trainer == 0) {
            spdl_loader_desc desc = desc_of(2);
            spdl_loader_batch batch;
            spdl_loader *l;
            desc.children = 3;
            if (spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(1000),
                    SPDL_SINK(2))) != SPDL_OK)
                _exit(1);
            if (spdl_loader_next(l, &batch, SPDL_SECONDS(15)) != SPDL_OK) _exit(1);
            spdl_loader_read(l, &status);
            if (write(pipes[1], &status, sizeof status) != (ssize_t)sizeof status) _exit(1);
            if (how == 1) _exit(0); /* without a close */
            if (how == 2) { /* another process has the line to the supervisor, too */
                other = fork();
                if (other == 0)
                    for (;;) pause();
                if (write(pipes[1], &other, sizeof other) != (ssize_t)sizeof other) _exit(1);
                kill(getpid(), SIGKILL);
            }
            for (;;) pause();
        }
        REQUIRE(read(pipes[0], &status, sizeof status) == (ssize_t)sizeof status);
        if (how == 2) REQUIRE(read(pipes[0], &other, sizeof other) == (ssize_t)sizeof other);
        if (how == 0) kill(trainer, SIGKILL);
        since = spdl_time_ns();
        CHECK_EQ(waitpid(trainer, NULL, 0), trainer);
        CHECK_EQ(waitpid((pid_t)status.supervisor, NULL, 0), status.supervisor);
        /* 100 ms on a machine that has time for us */
        CHECK(spdl_time_ns() - since < (TEST_SANITIZED ? 5u : 1u) * 1000000000u);
        for (int i = 0; i < 3; ++i) {
            CHECK(status.pid[i] > 0);
            CHECK_EQ(kill((pid_t)status.pid[i], 0), -1);
        }
        if (other > 0) {
            kill(other, SIGKILL);
            CHECK_EQ(waitpid(other, NULL, 0), other);
        }
        close(pipes[0]);
        close(pipes[1]);
        all_gone();
    }
}

static void the_end_of_the_supervisor_is_told(void) {
    spdl_loader_desc desc = desc_of(2);
    spdl_loader_status status;
    spdl_loader_batch batch;
    spdl_loader *l;
    spdl_result result = SPDL_OK;
    uint64_t since;
    TEST_NEEDS_PROCESSES();
    CHECK_EQ(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), 0);
    desc.children = 2;
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(100000), SPDL_SINK(2))) == SPDL_OK);
    spdl_loader_read(l, &status);
    kill((pid_t)status.supervisor, SIGKILL);
    since = spdl_time_ns();
    while (result == SPDL_OK) {
        result = spdl_loader_next(l, &batch, SPDL_SECONDS(15));
        if (result == SPDL_OK) CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
    }
    CHECK_EQ(result, SPDL_E_PROCESS);
    CHECK(spdl_time_ns() - since < 3000000000u);
    CHECK(strstr(spdl_loader_error(l)->text, "its supervisor") != NULL);
    spdl_loader_close(l);
    for (int i = 0; i < 2; ++i) /* it has waited for the supervisor: they are ours now */
        CHECK_EQ(waitpid((pid_t)status.pid[i], NULL, 0), status.pid[i]);
    all_gone();
}

/* What else a program may do with its children, and signals of a terminal, change nothing. */
static void it_minds_its_own_children(void) {
    TEST_NEEDS_PROCESSES();
    for (int how = 0; how < 2; ++how) {
        spdl_loader_desc desc = desc_of(1);
        spdl_loader_status status;
        spdl_loader_batch batch;
        spdl_loader *l;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(50), SPDL_SINK(2))) == SPDL_OK);
        spdl_loader_read(l, &status);
        if (how == 0) (void)signal(SIGCHLD, SIG_IGN);
        if (how == 1) {
            kill((pid_t)status.pid[0], SIGINT);
            kill((pid_t)status.pid[0], SIGTERM);
            kill((pid_t)status.supervisor, SIGINT);
            kill((pid_t)status.supervisor, SIGQUIT);
        }
        for (int n = 0; n < 50; ++n) {
            REQUIRE(spdl_loader_next(l, &batch, SPDL_SECONDS(15)) == SPDL_OK);
            CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
            CHECK_EQ(waitpid(-1, NULL, WNOHANG), 0); /* nobody ended */
        }
        if (how == 0) {
            int ended = 0;
            spdl_loader_close(l);
            CHECK_EQ(waitpid(-1, &ended, WNOHANG), -1);
            (void)signal(SIGCHLD, SIG_DFL);
            continue;
        }
        spdl_loader_close(l);
    }
    all_gone();
}

/* A fork of the trainer has no loader: it may not end ours. */
static void a_fork_has_no_loader(void) {
    spdl_loader_desc desc = desc_of(1);
    spdl_loader_batch held, more;
    spdl_loader *l;
    pid_t child;
    int status;
    TEST_NEEDS_PROCESSES();
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(50),
                IN_BATCHES(10), SPDL_SINK(2))) == SPDL_OK);
    REQUIRE(spdl_loader_next(l, &held, SPDL_SECONDS(15)) == SPDL_OK);
    while (spdl__load(&spdl__lane_entry(&l->lane[0], 1)->stamp) != 2) usleep(100); /* it is ready */
    child = fork();
    if (child == 0) {
        spdl_loader_batch batch;
        if (spdl_loader_next(l, &batch, SPDL_SECONDS(15)) != SPDL_E_INVALID) _exit(3);
        if (spdl_loader_done(l, &held) != SPDL_E_INVALID) _exit(4);
        if (spdl_loader_rewind(l, 0, 0) != SPDL_E_INVALID) _exit(2);
        spdl_loader_close(l);
        _exit(0);
    }
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK_EQ(spdl_loader_done(l, &held), SPDL_OK);
    for (uint64_t n = 10; n < 50; n += 10) {
        REQUIRE(spdl_loader_next(l, &more, SPDL_SECONDS(15)) == SPDL_OK);
        CHECK(record_is((const record *)more.data, n, 0));
        CHECK_EQ(spdl_loader_done(l, &more), SPDL_OK);
    }
    spdl_loader_close(l);
    all_gone();
}

static void *opens(void *arg) {
    spdl_loader_desc desc = desc_of(1);
    if (spdl_loader_open((spdl_loader **)arg, &desc, SPDL_STAGES(
            RECORDS(50), IN_BATCHES(5), SPDL_SINK(2))) != SPDL_OK)
        *(spdl_loader **)arg = NULL;
    return NULL;
}

/* The thread that has opened it may end; the process is what counts. */
static void it_outlives_the_thread_that_opened_it(void) {
    pthread_t thread;
    spdl_loader *l = NULL;
    TEST_NEEDS_PROCESSES();
    if (SPDL__TSAN) TEST_SKIP("no threads after a fork of a process that had others");
    REQUIRE(pthread_create(&thread, NULL, opens, &l) == 0);
    pthread_join(thread, NULL);
    REQUIRE(l != NULL);
    usleep(20000); /* the supervisor hears of it */
    takes_all(l, 50, 0, SPDL_END);
    spdl_loader_close(l);
    all_gone();
}

/* --- what is refused --- */

SPDL_FN(elsewhere, record, record) {
    static record there;
    there = *in;
    *out = &there;
    return SPDL_OK;
}

static void *sleeper(void *arg) {
    while (!__atomic_load_n((int *)arg, __ATOMIC_ACQUIRE)) usleep(1000);
    return NULL;
}

static void *half_an_allocator(size_t bytes, size_t align, void *user) {
    (void)align, (void)user;
    return malloc(bytes);
}

static void wrong_things_are_refused(void) {
    const spdl_stage good[] = { RECORDS(50),
                                SPDL_SINK(2) };
    const spdl_stage bare[] = { SPDL_SOURCE(records), SPDL_SINK(2) };
    const spdl_stage feed[] = { SPDL_FEED(record), SPDL_PIPE(copied, .item_bytes = 64),
                                SPDL_SINK(2) };
    const spdl_stage wrong[] = { SPDL_SOURCE(records, .item_bytes = 64), SPDL_PIPE(copied) };
    spdl_error error;
    spdl_loader_desc desc = desc_of(1);
    spdl_loader *l = (spdl_loader *)&desc;
    spdl_pool *pool = (spdl_pool *)&desc;
    pthread_t thread;
    int over = 0;
    desc.error = &error;
    desc.name = "wrong";
    desc.logger.log_fn = log_nothing;
    desc.pipeline.logger.log_fn = log_nothing;
#define REFUSES(change, rows, why, says)                                                        \
    do {                                                                                           \
        spdl_loader_desc as_it_was = desc;                                                         \
        change;                                                                                    \
        CHECK_EQ(spdl_loader_open(&l, &desc, SPDL_TABLE(rows)), why);                              \
        CHECK(l == NULL);                                                                          \
        CHECK_EQ(error.result, why);                                                               \
        if (!CHECK(strstr(error.text, says) != NULL)) fprintf(stderr, "    %s\n", error.text);     \
        desc = as_it_was;                                                                          \
    } while (0)
    REFUSES(desc.children = -1, good, SPDL_E_INVALID, "children is -1, must be 0 to 64");
    REFUSES(desc.slots = 1 << 20, good, SPDL_E_INVALID, "slots is 1048576");
    REFUSES(desc.hang_timeout = -1, good, SPDL_E_INVALID, "hang_timeout is -1");
    REFUSES(desc.pipeline.pool = pool, good, SPDL_E_INVALID, "pipeline.pool is set");
    REFUSES(desc.pipeline.allocator.alloc_fn = half_an_allocator, good, SPDL_E_INVALID,
            "set both functions of the allocator or none");
    REFUSES((void)0, bare, SPDL_E_INVALID, "loader 'wrong': no row says .item_bytes");
    REFUSES((void)0, feed, SPDL_E_UNSUPPORTED, "SPDL_FEED");
    REFUSES((void)0, wrong, SPDL_E_INVALID, "the last row must be SPDL_SINK");
    REFUSES((desc.start = SPDL_LOADER_IN_PROCESS, desc.trainers = 2), good, SPDL_E_UNSUPPORTED,
            "several trainers");
    if (SPDL__OS_PROCESSES) {
        REFUSES(desc.arena_bytes = 4096, good, SPDL_E_LIMIT, "MiB wanted (1 children, ");
        REFUSES(desc.arena_bytes = 4096, good, SPDL_E_LIMIT, "arena_bytes is 0.0 MiB");
        REFUSES(desc.child_rss_limit = (uint64_t)1 << 50, good, SPDL_E_LIMIT, "MiB of it are left");
        REQUIRE(pthread_create(&thread, NULL, sleeper, &over) == 0);
        REFUSES(desc.start = SPDL_LOADER_AUTO, good, SPDL_E_INVALID, "SPDL_LOADER_FORK");
        REFUSES(desc.start = SPDL_LOADER_AUTO, good, SPDL_E_INVALID, "SPDL_LOADER_EXEC");
        __atomic_store_n(&over, 1, __ATOMIC_RELEASE);
        pthread_join(thread, NULL);
        forks_left = 0;
        REFUSES((void)0, good, SPDL_E_PROCESS, "no process: Resource temporarily unavailable");
        forks_left = -1;
    }
#undef REFUSES
    all_gone();
}

/* Items that a stage made elsewhere are told, and where to make them. */
static void an_item_elsewhere_is_an_error(void) {
    for (int in_process = 0; in_process < 2; ++in_process) {
        spdl_loader_desc desc = desc_of(1);
        spdl_loader_batch batch;
        spdl_loader *l;
        if (in_process) desc.start = SPDL_LOADER_IN_PROCESS;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(50),
                    SPDL_PIPE(elsewhere), SPDL_SINK(2))) == SPDL_OK);
        CHECK_EQ(spdl_loader_next(l, &batch, SPDL_SECONDS(15)), SPDL_E_INVALID);
        CHECK(strstr(spdl_loader_error(l)->text, "does not lie in a slot") != NULL);
        spdl_loader_close(l);
    }
    all_gone();
}

/* A child that cannot be started, when the supervisor is there. */
static void a_child_that_is_refused_is_told(void) {
    spdl_loader_desc desc = desc_of(1);
    spdl_loader_batch batch;
    spdl_loader *l;
    TEST_NEEDS_PROCESSES();
    forks_left = 1;
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(50), SPDL_SINK(2))) == SPDL_OK);
    forks_left = -1;
    CHECK_EQ(spdl_loader_next(l, &batch, SPDL_SECONDS(15)), SPDL_E_PROCESS);
    CHECK(strstr(spdl_loader_error(l)->text, "could not be started: Resource temp") != NULL);
    spdl_loader_close(l);
    all_gone();
}

/* Under limits it is refused with a reason, or runs. */
static void limits_of_the_process(void) {
    TEST_NEEDS_PROCESSES();
    for (int files = 3; files < 24; ++files) {
        struct rlimit old, low;
        spdl_error error;
        spdl_loader_desc desc = desc_of(1);
        spdl_loader_batch batch;
        spdl_loader *l;
        spdl_result result;
        desc.error = &error;
        desc.logger.log_fn = desc.pipeline.logger.log_fn = log_nothing;
        REQUIRE(getrlimit(RLIMIT_NOFILE, &old) == 0);
        low = old;
        low.rlim_cur = (rlim_t)files;
        REQUIRE(setrlimit(RLIMIT_NOFILE, &low) == 0);
        result = spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(5), SPDL_SINK(2)));
        REQUIRE(setrlimit(RLIMIT_NOFILE, &old) == 0);
        if (result != SPDL_OK) {
            CHECK(strstr(error.text, "Too many open files") != NULL);
            continue;
        }
        CHECK_EQ(spdl_loader_next(l, &batch, SPDL_SECONDS(15)), SPDL_OK);
        spdl_loader_close(l);
    }
    all_gone();
}

SPDL__UNUSED static void file_at(const char *folder, const char *name, const char *text) {
    char path[256];
    FILE *file;
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    REQUIRE((file = fopen(path, "w")) != NULL);
    (void)fputs(text, file);
    (void)fclose(file);
}

/* Whatever is least counts: cgroups, limits of the process, the machine. */
static void room_is_the_least_of_all(void) {
#if SPDL__OS_PROCESSES
    char folder[] = "/tmp/spdl_loader_XXXXXX", self[256], command[256];
    spdl__os_room room;
    uint64_t kills = 0;
    REQUIRE(mkdtemp(folder) != NULL);
    file_at(folder, "memory.max", "200000000\n");
    file_at(folder, "memory.current", "150000000\n");
    file_at(folder, "self", "0::/\n");
    (void)snprintf(self, sizeof self, "%s/self", folder);
    room = spdl__os_room_in(folder, self);
    CHECK_STR(room.what, "memory.max of the cgroup");
    CHECK_EQ(room.limit, 200000000);
    CHECK_EQ(room.left, 50000000);
    file_at(folder, "memory.max", "max\n");
    room = spdl__os_room_in(folder, self);
    CHECK(strcmp(room.what, "memory.max of the cgroup") != 0);
    CHECK(room.left > 0 && room.left <= room.limit);
    file_at(folder, "memory.events", "low 0\noom 5\noom_kill 3\noom_group_kill 1\n");
    spdl__os_cgroups(folder, self, "memory", spdl__os_oom_at, &kills);
    CHECK(kills >= 3); /* the root is there twice */
    (void)snprintf(command, sizeof command, "rm -r %s", folder);
    CHECK_EQ(system(command), 0);
#endif
}

/* An allocator that gives nothing from a certain call on. */
static long gives;
static long balance;
static void *give(size_t bytes, size_t align, void *user) {
    void *memory = NULL;
    (void)user;
    if (__atomic_fetch_sub(&gives, 1, __ATOMIC_RELAXED) <= 0) return NULL;
    if (posix_memalign(&memory, align < 8 ? 8 : align, bytes) != 0) return NULL;
    __atomic_fetch_add(&balance, 1, __ATOMIC_RELAXED);
    return memory;
}
static void take_back(void *memory, size_t bytes, void *user) {
    (void)bytes, (void)user;
    __atomic_fetch_sub(&balance, 1, __ATOMIC_RELAXED);
    free(memory);
}

static void without_memory_it_is_refused(void) {
    for (int in_process = 0; in_process < 2; ++in_process) {
        bool opened = false;
        for (long k = 0; k < 200 && !opened; ++k) {
            spdl_loader_desc desc = desc_of(1);
            spdl_loader *l;
            spdl_result result;
            desc.start = in_process ? SPDL_LOADER_IN_PROCESS : SPDL_LOADER_FORK;
            desc.logger.log_fn = desc.pipeline.logger.log_fn = log_nothing;
            desc.pipeline.allocator.alloc_fn = give;
            desc.pipeline.allocator.free_fn = take_back;
            gives = k;
            result = spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(5), SPDL_SINK(2)));
            if (!CHECK(result == SPDL_OK || result == SPDL_E_NOMEM)) break;
            opened = result == SPDL_OK;
            if (opened && !in_process) { /* the child has the same allocator */
                spdl_loader_batch batch;
                result = spdl_loader_next(l, &batch, SPDL_SECONDS(15));
                CHECK(result == SPDL_E_NOMEM || result == SPDL_E_PROCESS || result == SPDL_OK);
            }
            spdl_loader_close(l);
            CHECK_EQ(balance, 0);
        }
        CHECK(opened);
    }
    all_gone();
}

/* --- several trainers --- */

/* A trainer in another process, up to so many ends: the numbers of its batches, added up. */
static uint64_t attached_takes(const char *name, int trainer, int ends) {
    spdl_loader_batch batch;
    spdl_loader *l;
    uint64_t sum = 0;
    if (spdl_loader_attach(&l, name, trainer, NULL) != SPDL_OK) return 1;
    while (ends > 0) {
        const spdl_result result = spdl_loader_next(l, &batch, SPDL_SECONDS(15));
        if (result == SPDL_END) {
            --ends;
            continue;
        }
        if (result != SPDL_OK) return 2;
        if (!record_is((const record *)batch.data, batch.number * 5, batch.epoch)) return 3;
        sum += 1000 + batch.number;
        if (spdl_loader_done(l, &batch) != SPDL_OK) return 4;
    }
    spdl_loader_close(l);
    return sum;
}

static void trainers_take_in_turn(void) {
    TEST_NEEDS_PROCESSES();
    for (int children = 1; children <= 2; ++children) {
        spdl_loader_desc desc = desc_of(2);
        spdl_loader_batch batch;
        spdl_loader *l;
        spdl_result result;
        uint64_t sums[3] = { 0, 0, 0 };
        int pipes[2], ends = 0;
        char name[32];
        (void)snprintf(name, sizeof name, "turn-%d", (int)getpid());
        desc.name = name;
        desc.trainers = 3;
        desc.children = children;
        REQUIRE(pipe(pipes) == 0);
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(100, .continuous = true),
                    IN_BATCHES(5), SPDL_SINK(2))) == SPDL_OK);
        for (int trainer = 1; trainer < 3; ++trainer) {
            if (fork() == 0) {
                const uint64_t sum = attached_takes(name, trainer, 2);
                _exit(write(pipes[1], &sum, sizeof sum) != (ssize_t)sizeof sum);
            }
        }
        while (ends < 2) {
            result = spdl_loader_next(l, &batch, SPDL_SECONDS(15));
            if (result == SPDL_END) {
                ++ends;
                continue;
            }
            REQUIRE(result == SPDL_OK);
            CHECK(record_is((const record *)batch.data, batch.number * 5, batch.epoch));
            CHECK_EQ(batch.number % 3, 0);
            sums[0] += 1000 + batch.number;
            CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
        }
        for (int trainer = 1; trainer < 3; ++trainer) {
            CHECK(read(pipes[0], &sums[trainer], sizeof sums[0]) == (ssize_t)sizeof sums[0]);
            CHECK(sums[trainer] > 1000);
        }
        CHECK_EQ(sums[0] + sums[1] + sums[2], 2 * (20 * 1000 + 190));
        while (waitpid(-1, NULL, WNOHANG) > 0) {}
        CHECK_EQ(spdl_loader_rewind(l, 0, 0), SPDL_E_UNSUPPORTED);
        spdl_loader_close(l);
        while (waitpid(-1, NULL, 0) > 0) {}
        close(pipes[0]);
        close(pipes[1]);
    }
    all_gone();
}

static void a_trainer_that_is_wrong_is_refused(void) {
#if SPDL__OS_PROCESSES
    spdl_error error;
    spdl_loader_desc desc = desc_of(1), other = desc_of(1);
    spdl_loader_batch batch;
    spdl_loader *l, *more;
    spdl_result result = SPDL_OK;
    char name[32];
    (void)snprintf(name, sizeof name, "wrong-%d", (int)getpid());
    other.error = &error;
    other.logger.log_fn = log_nothing;
    CHECK_EQ(spdl_loader_attach(&more, name, 1, &other), SPDL_E_NOT_FOUND);
    desc.name = name;
    desc.trainers = 2;
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(100000), SPDL_SINK(2))) == SPDL_OK);
    CHECK_EQ(spdl_loader_attach(&more, name, 2, &other), SPDL_E_INVALID);
    CHECK(strstr(error.text, "trainer is 2, must be 1 to 1") != NULL);
    CHECK_EQ(spdl_loader_attach(&more, name, 0, &other), SPDL_E_INVALID);
    /* another build */
    l->head->hash ^= 1;
    CHECK_EQ(spdl_loader_attach(&more, name, 1, &other), SPDL_E_UNSUPPORTED);
    CHECK(strstr(error.text, "was built with another spdl.h") != NULL);
    l->head->hash ^= 1;
    spdl_loader_close(l);
    for (int k = 0; k < 2; ++k) { /* numbers that others are divided by */
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(100), SPDL_SINK(2))) == SPDL_OK);
        if (k == 0) l->head->layout.trainers = 0;
        else l->head->layout.chunk = 0;
        CHECK_EQ(spdl_loader_attach(&more, name, 1, &other), SPDL_E_UNSUPPORTED);
        CHECK(strstr(error.text, "its memory makes no sense") != NULL);
        spdl_loader_close(l);
    }
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(100000), SPDL_SINK(2))) == SPDL_OK);
    CHECK_EQ(spdl_loader_attach(&more, name, 1, &other), SPDL_OK);
    CHECK_EQ(spdl_loader_next(more, &batch, SPDL_SECONDS(15)), SPDL_OK);
    CHECK_EQ(batch.number, 1);
    {
        spdl_loader *third;
        CHECK_EQ(spdl_loader_attach(&third, name, 1, &other), SPDL_E_INVALID);
        CHECK(strstr(error.text, "is there already") != NULL);
    }
    spdl_loader_close(more); /* it leaves: the rest would wait for it for ever */
    while (result == SPDL_OK) {
        result = spdl_loader_next(l, &batch, SPDL_SECONDS(15));
        if (result == SPDL_OK) CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
    }
    CHECK_EQ(result, SPDL_E_PROCESS);
    CHECK(strstr(spdl_loader_error(l)->text, "trainer 1 has gone") != NULL);
    spdl_loader_close(l);
    all_gone();
#endif
}

/* --- shared memory that makes no sense --- */

/* Whatever is written over what children share, the trainer gets errors or nothing. */
static void scribbles_are_survived(void) {
#if SPDL__OS_PROCESSES
    uint64_t dice = 88172645463325252u;
    for (int round = 0; round < 60; ++round) {
        spdl_loader_desc desc = desc_of(1);
        spdl_loader_batch batch;
        spdl_loader *l;
        char *part;
        desc.children = 1 + round % 2;
        desc.logger.log_fn = log_nothing;
        desc.pipeline.logger.log_fn = log_nothing;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(400),
                    SPDL_PIPE(copied, .item_bytes = sizeof(record)),
                    SPDL_SINK(2))) == SPDL_OK);
        for (int k = 0; k < 20; ++k) {
            const spdl_result result = spdl_loader_next(l, &batch, 2000000);
            if (result == SPDL_OK) (void)spdl_loader_done(l, &batch);
            else if (result != SPDL_TIMEOUT) break;
            part = (char *)l->lane[0].shared;
            for (int i = 0; i < 10; ++i) {
                dice ^= dice << 13, dice ^= dice >> 7, dice ^= dice << 17;
                memcpy(part + dice % (l->layout.child_bytes / 8) * 8, &dice, 1 + dice % 8);
            }
        }
        {
            spdl_loader_status status;
            spdl_stats stats;
            (void)spdl_loader_stats(l, -1, &stats);
            spdl_loader_read(l, &status);
        }
        spdl_loader_close(l);
        all_gone();
    }
#endif
}

/* Every number that is read is looked at. */
static void wrong_numbers_are_seen(void) {
#if SPDL__OS_PROCESSES
    for (int k = 0; k < 7; ++k) {
        spdl_loader_desc desc = desc_of(1);
        spdl_loader_batch batch;
        spdl_loader *l;
        spdl__shared_entry *entry;
        spdl__shared_arrays *all;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(
                    RECORDS(40), SPDL_PIPE(arrays, .item_bytes = 136), SPDL_SINK(2))) == SPDL_OK);
        entry = spdl__lane_entry(&l->lane[0], 0);
        while (spdl__load(&entry->stamp) != 1) usleep(100); /* nothing changes it any more */
        all = &l->lane[0].arrays[entry->slot];
        if (k == 0) entry->slot = (uint64_t)l->layout.slots;
        if (k == 1) entry->bytes = 137;
        if (k == 2) all->count = SPDL_LOADER_ARRAYS + 1;
        if (k == 3) all->array[1].ndim = SPDL_LOADER_DIMS + 1;
        if (k == 4) all->at[1] = (uint64_t)1 << 63;
        if (k == 5) all->array[1].shape[0] = (uint64_t)1 << 63;
        if (k == 6) entry->result = -5; /* no such failure is there */
        CHECK_EQ(spdl_loader_next(l, &batch, SPDL_SECONDS(15)), SPDL_E_PROCESS);
        CHECK(strstr(spdl_loader_error(l)->text, "makes no sense") != NULL);
        spdl_loader_close(l);
    }
    all_gone();
#endif
}

/* --- seeing inside --- */

static void stats_are_those_of_all_children(void) {
    for (int in_process = 0; in_process < 2; ++in_process) {
        static char text[8192];
        spdl_loader_desc desc = desc_of(1);
        spdl_stats one, all;
        spdl_loader *l;
        uint64_t tasks = 0, busy = 0;
        desc.children = 3;
        if (in_process) desc.start = SPDL_LOADER_IN_PROCESS;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(90),
                    SPDL_PIPE(copied), IN_BATCHES(5), SPDL_SINK(2))) == SPDL_OK);
        CHECK_EQ(spdl_loader_stats(l, 3, &one), SPDL_E_NOT_FOUND);
        CHECK_EQ(spdl_loader_stats(l, -2, &one), SPDL_E_NOT_FOUND);
        takes_all(l, 90, 0, SPDL_END);
        for (int tries = 0; tries < 1000; ++tries) { /* they are 50 ms old at most */
            CHECK_EQ(spdl_loader_stats(l, -1, &all), SPDL_OK);
            if (all.stage[1].tasks == 90 && all.delivered == 18) break;
            usleep(5000);
        }
        for (int i = 0; i < 3; ++i) {
            CHECK_EQ(spdl_loader_stats(l, i, &one), SPDL_OK);
            tasks += one.stage[1].tasks;
            busy += one.stage[1].mean_ns * one.stage[1].tasks;
            CHECK_STR(one.stage[1].name, "copied");
        }
        CHECK_EQ(tasks, 90);
        CHECK_EQ(all.stage[1].tasks, 90);
        CHECK(all.stage[1].mean_ns <= busy / 90 && all.stage[1].mean_ns + 3 >= busy / 90);
        CHECK_EQ(all.stage[2].tasks, 18);
        CHECK_EQ(all.delivered, 18);
        CHECK_EQ(all.stage_count, 3);
        CHECK_EQ(all.workers, 3);
        CHECK(spdl_stats_text(&all, text, sizeof text) > 100);
        CHECK(strstr(text, "copied") != NULL);
        spdl_loader_close(l);
    }
    all_gone();
}

/* How often a text is in a file. */
SPDL__UNUSED static int times_in(const char *path, const char *what) {
    FILE *file = fopen(path, "r");
    char *text = (char *)calloc(1, 1 << 22), *at = text;
    int times = 0;
    if (!CHECK(file != NULL && text != NULL)) return -1;
    CHECK(fread(text, 1, (1 << 22) - 1, file) > 0);
    (void)fclose(file);
    while ((at = strstr(at, what)) != NULL) ++times, at += strlen(what);
    free(text);
    return times;
}

static void one_trace_and_one_report(void) {
#if SPDL__OS_PROCESSES && !defined(SPDL_NO_REPORT)
    char folder[] = "/tmp/spdl_loader_XXXXXX", trace[64], json[64], command[160];
    spdl_report_desc report;
    spdl_loader_desc desc = desc_of(1);
    spdl_loader_status status;
    spdl_loader *l;
    REQUIRE(mkdtemp(folder) != NULL);
    (void)snprintf(trace, sizeof trace, "%s/t.json", folder);
    (void)snprintf(json, sizeof json, "%s/r.jsonl", folder);
    memset(&report, 0, sizeof report);
    report.json = json;
    report.every = 1e6;
    report.ignore_environment = true;
    desc.children = 2;
    desc.pipeline.trace = trace;
    desc.pipeline.trace_events = 1000;
    desc.pipeline.report = &report;
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(100),
                SPDL_PIPE(copied), IN_BATCHES(5), SPDL_SINK(2))) == SPDL_OK);
    spdl_loader_read(l, &status);
    takes_all(l, 100, 0, SPDL_END);
    usleep(120000); /* the second child has published all of its numbers */
    spdl_loader_close(l);
    CHECK_EQ(times_in(trace, "\"traceEvents\""), 1);
    CHECK_EQ(times_in(trace, "process_name"), 2);
    CHECK(times_in(trace, "\"name\":\"copied\"") == 100);
    for (int i = 0; i < 2; ++i) {
        char process[48];
        (void)snprintf(process, sizeof process, "\"pid\":%lld,", (long long)status.pid[i]);
        CHECK(times_in(trace, process) > 50);
    }
    CHECK_EQ(times_in(json, "\"schema\""), 1); /* of both, by the first */
    CHECK_EQ(times_in(json, "\"delivered\":20,"), 2); /* interval and total */
    (void)snprintf(command, sizeof command,
                   "python3 -c 'import json; json.load(open(\"%s\"))'", trace);
    CHECK_EQ(system("python3 -c 0 2>/dev/null") == 0 ? system(command) : 0, 0);
    (void)snprintf(command, sizeof command, "rm -r %s", folder);
    CHECK_EQ(system(command), 0);
    all_gone();
#endif
}

/* --- together with others --- */

static void a_step(void *ctx, void *item) {
    const spdl_loader_batch *batch = (const spdl_loader_batch *)item;
    *(uint64_t *)ctx += batch->count;
}

static void caches_and_headspace_take_from_it(void) {
    spdl_loader_desc desc = desc_of(1);
    spdl_headspace_desc headspace;
    spdl_headspace_report report;
    spdl_cache_desc cache_desc;
    spdl_cache *cache;
    spdl_loader *l;
    uint64_t items = 0;
    void *item;
    desc.slots = 40;
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(1000, .continuous = true),
                IN_BATCHES(5), SPDL_SINK(2))) == SPDL_OK);
    memset(&cache_desc, 0, sizeof cache_desc);
    cache_desc.next = spdl_loader_next_fn;
    cache_desc.source = l;
    cache_desc.num_caches = 3;
    cache_desc.free_item = spdl_loader_batch_free;
    REQUIRE(spdl_cache_create(&cache, &cache_desc) == SPDL_OK);
    for (uint64_t k = 0; k < 9; ++k) {
        REQUIRE(spdl_cache_next(cache, &item, SPDL_SECONDS(15)) == SPDL_OK);
        CHECK_EQ(((const spdl_loader_batch *)item)->number, k % 3);
    }
    spdl_cache_destroy(cache);
    memset(&headspace, 0, sizeof headspace);
    headspace.next = spdl_loader_next_fn;
    headspace.source = l;
    headspace.step = a_step;
    headspace.ctx = &items;
    headspace.free_item = spdl_loader_batch_free;
    headspace.seconds = 0.5;
    CHECK_EQ(spdl_headspace(&headspace, &report), SPDL_OK);
    CHECK(items > 100);
    spdl_loader_close(l);
    all_gone();
}

/* The supervisor is this program, run again: by a process of its own that runs this test alone. */
static void a_program_is_run_again(void) {
    TEST_NEEDS_PROCESSES();
    if (getenv("LOADER_RUNS_AGAIN") == NULL) {
        pid_t child = fork();
        int status = 0;
        if (child == 0) {
            (void)setenv("LOADER_RUNS_AGAIN", "1", 1);
            (void)execl("/proc/self/exe", "runner", "--no-fork", "loader.a_program_is_run_again",
                        (char *)NULL);
            _exit(1);
        }
        CHECK_EQ(waitpid(child, &status, 0), child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        return;
    }
    {
        spdl_loader_desc desc = desc_of(2);
        spdl_loader *l, *other;
        spdl_loader_batch batch;
        spdl_loader_status status;
        spdl_error error;
        desc.start = SPDL_LOADER_EXEC;
        desc.children = 2;
        desc.name = "first";
        desc.logger.log_fn = log_nothing;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(100),
                    IN_BATCHES(5), SPDL_SINK(2))) == SPDL_OK);
        desc.name = "second"; /* in its supervisor the first one does nothing */
        REQUIRE(spdl_loader_open(&other, &desc, SPDL_STAGES(RECORDS(50),
                    SPDL_SINK(2))) == SPDL_OK);
        spdl_loader_read(l, &status);
        CHECK_EQ(status.start, SPDL_LOADER_EXEC);
        takes_all(l, 100, 0, SPDL_END);
        CHECK_EQ(spdl_loader_rewind(l, 0, SPDL_SECONDS(15)), SPDL_OK);
        takes_all(l, 100, 0, SPDL_END);
        CHECK_EQ(spdl_loader_next(other, &batch, SPDL_SECONDS(15)), SPDL_OK);
        spdl_loader_close(l);
        spdl_loader_close(other);
        desc.error = &error; /* a name that the other one has, too: its main comes to that */
        CHECK_EQ(spdl_loader_open(&other, &desc, SPDL_STAGES(RECORDS(50, .name = "others"),
                    SPDL_SINK(2))), SPDL_E_PROCESS);
        CHECK(strstr(error.text, "its main came to other rows") != NULL);
        all_gone();
    }
}

/* A child that is told to begin again, and cannot, as a call does not return. */
static void a_rewind_ends_a_call_that_hangs(void) {
    TEST_NEEDS_PROCESSES();
    for (int held = 0; held < 2; ++held) {
        spdl_loader_desc desc = desc_of(2);
        fate harm = { .at = 2, .how = HANG, .done = shared_flag() };
        spdl_loader_batch batch;
        spdl_loader *l;
        desc.slots = 2;
        desc.hang_timeout = 0.2;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(100),
                    SPDL_PIPE(meets_its_fate, .ctx = &harm), IN_BATCHES(1),
                    SPDL_SINK(2))) == SPDL_OK);
        for (int i = 0; i < 2; ++i) {
            REQUIRE(spdl_loader_next(l, &batch, SPDL_SECONDS(15)) == SPDL_OK);
            if (!held) CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
        }
        while (!__atomic_load_n(harm.done, __ATOMIC_ACQUIRE)) usleep(1000);
        CHECK_EQ(spdl_loader_rewind(l, 0, SPDL_SECONDS(10)), SPDL_E_PROCESS);
        if (!CHECK(strstr(spdl_loader_error(l)->text, "hang_timeout, in stage 1 'meets_its_fate', "
                                                      "item 2") != NULL))
            fprintf(stderr, "    %s\n", spdl_loader_error(l)->text);
        spdl_loader_close(l);
    }
    all_gone();
}

/* A trainer that was told to give slots back, and then works for long, waits for nobody. */
static void only_a_trainer_that_waits_finds_a_hang(void) {
    spdl_loader_desc desc = desc_of(1);
    spdl_loader_batch held[2], batch;
    spdl_loader *l;
    TEST_NEEDS_PROCESSES();
    desc.slots = 2;
    desc.hang_timeout = 0.1;
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(2), IN_BATCHES(1),
                SPDL_SINK(2))) == SPDL_OK);
    for (int i = 0; i < 2; ++i)
        REQUIRE(spdl_loader_next(l, &held[i], SPDL_SECONDS(15)) == SPDL_OK);
    CHECK_EQ(spdl_loader_next(l, &batch, SPDL_FOREVER), SPDL_E_LIMIT);
    for (int i = 0; i < 2; ++i) CHECK_EQ(spdl_loader_done(l, &held[i]), SPDL_OK);
    usleep(500000);
    CHECK_EQ(spdl_loader_next(l, &batch, SPDL_SECONDS(15)), SPDL_END);
    CHECK_EQ(spdl_loader_rewind(l, 0, SPDL_SECONDS(15)), SPDL_OK);
    takes_all(l, 2, 0, SPDL_END);
    spdl_loader_close(l);
    all_gone();
}

/* Calls that time out are one wait. */
static void a_hang_is_found_between_short_waits(void) {
    spdl_loader_desc desc = desc_of(2);
    fate harm = { .at = 2, .how = HANG };
    spdl_loader_batch batch;
    spdl_loader *l;
    spdl_result result = SPDL_TIMEOUT;
    uint64_t since;
    TEST_NEEDS_PROCESSES();
    desc.hang_timeout = 0.2;
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(100),
                SPDL_PIPE(meets_its_fate, .ctx = &harm), SPDL_SINK(2))) == SPDL_OK);
    for (since = spdl_time_ns(); spdl_time_ns() - since < (uint64_t)SPDL_SECONDS(10);) {
        result = spdl_loader_next(l, &batch, 10000000);
        if (result == SPDL_OK) CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
        else if (result != SPDL_TIMEOUT) break;
    }
    CHECK_EQ(result, SPDL_E_PROCESS);
    spdl_loader_close(l);
    all_gone();
}

static int nothing_of;

SPDL_FN(array_of_nothing, record, record) {
    const uint64_t shape[] = { 3 };
    void *at = nothing_of == 0   ? spdl_slot_array(task, NULL, "f4", 1, shape)
               : nothing_of == 1 ? spdl_slot_array(task, "images", NULL, 1, shape)
                                 : spdl_slot_array(task, "images", "f4", 1, NULL);
    *out = (record *)at;
    return in != NULL ? SPDL_OK : SPDL_E_STAGE;
}

static void an_array_without_a_name_is_an_error(void) {
    static const char *const texts[] = { "name", "dtype", "shape" };
    for (nothing_of = 0; nothing_of < 3; ++nothing_of) {
        spdl_loader_desc desc = desc_of(1);
        spdl_loader_batch batch;
        spdl_loader *l;
        desc.pipeline.logger.log_fn = log_nothing;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(40),
                    SPDL_PIPE(array_of_nothing, .item_bytes = 128), SPDL_SINK(2))) == SPDL_OK);
        CHECK_EQ(spdl_loader_next(l, &batch, SPDL_SECONDS(15)), SPDL_E_INVALID);
        if (!CHECK(strstr(spdl_loader_error(l)->text, texts[nothing_of]) != NULL &&
                   strstr(spdl_loader_error(l)->text, "NULL") != NULL))
            fprintf(stderr, "    %s\n", spdl_loader_error(l)->text);
        spdl_loader_close(l);
    }
    all_gone();
}

/* How many items a batch has is looked at, too. */
static void a_wrong_count_is_seen(void) {
#if SPDL__OS_PROCESSES
    static const uint64_t counts_of[] = { 0, 4, 6, (uint64_t)1 << 62, UINT64_MAX };
    for (size_t k = 0; k < 2 * sizeof counts_of / sizeof counts_of[0]; ++k) {
        const bool batches = k % 2;
        spdl_loader_desc desc = desc_of(1);
        spdl_loader_batch batch;
        spdl_loader *l;
        spdl__shared_entry *entry;
        const spdl_stage one[] = { RECORDS(40), SPDL_SINK(2) };
        const spdl_stage five[] = { RECORDS(40), IN_BATCHES(5), SPDL_SINK(2) };
        REQUIRE(spdl_loader_open(&l, &desc, batches ? five : one, batches ? 3 : 2) == SPDL_OK);
        entry = spdl__lane_entry(&l->lane[0], 0);
        while (spdl__load(&entry->stamp) != 1) usleep(100);
        entry->count = counts_of[k / 2];
        CHECK_EQ(spdl_loader_next(l, &batch, SPDL_SECONDS(15)), SPDL_E_PROCESS);
        CHECK(strstr(spdl_loader_error(l)->text, "makes no sense") != NULL);
        spdl_loader_close(l);
    }
    all_gone();
#endif
}

/* What was there before a child began, and it has not written to, is not its own. */
static void inherited_memory_is_no_childs_own(void) {
    const size_t bytes = TEST_SANITIZED_BYTES + ((size_t)100 << 20);
    spdl_loader_desc desc = desc_of(1);
    volatile char *memory;
    spdl_loader *l;
    TEST_NEEDS_PROCESSES();
    memory = (volatile char *)malloc(bytes);
    REQUIRE(memory != NULL);
    for (size_t i = 0; i < bytes; i += 4096) memory[i] = 1;
    desc.child_rss_limit = TEST_SANITIZED_BYTES + (40 << 20);
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(100), IN_BATCHES(5),
                SPDL_SINK(2))) == SPDL_OK);
    usleep(400000);
    takes_all(l, 100, 0, SPDL_END);
    CHECK_EQ(spdl_loader_rewind(l, 0, SPDL_SECONDS(15)), SPDL_OK);
    spdl_loader_close(l);
    free((void *)(uintptr_t)memory);
    all_gone();
}

static uint32_t may_begin, waited_in_vain;

SPDL_FN(begins_when_it_may, void, record) {
    for (int i = 0; spdl_sequence(task) == 0 && !spdl__load32(&may_begin); ++i, usleep(10000))
        if (i == 300 && spdl__exchange32(&waited_in_vain, 1) == 0) break;
    return records_spdl_call(task, in, (void **)out);
}

/* In this process, too, a rewind does not wait for the first batch. */
static void a_rewind_does_not_wait_for_a_batch(void) {
    spdl_loader_desc desc = desc_of(1);
    spdl_loader *l;
    desc.start = SPDL_LOADER_IN_PROCESS;
    spdl__store32(&may_begin, 1);
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(
                SPDL_SOURCE(begins_when_it_may, .ctx = (void *)(uintptr_t)20,
                            .item_bytes = sizeof(record)), SPDL_SINK(2))) == SPDL_OK);
    takes_all(l, 20, 0, SPDL_END);
    spdl__store32(&may_begin, 0);
    CHECK_EQ(spdl_loader_rewind(l, 0, SPDL_FOREVER), SPDL_OK);
    spdl__store32(&may_begin, 1);
    takes_all(l, 20, 0, SPDL_END);
    CHECK_EQ(waited_in_vain, 0);
    spdl_loader_close(l);
}

TEST_TABLE(loader) {
    TEST_CASE(batches_come_whole_and_in_order),
    TEST_CASE(epochs_end_one_by_one),
    TEST_CASE(it_is_rewound),
    TEST_CASE(a_held_slot_is_not_written),
    TEST_CASE(all_slots_held_is_an_error),
    TEST_CASE(arrays_have_names_and_shapes),
    TEST_CASE(an_array_that_does_not_fit_is_an_error),
    TEST_CASE(blocks_suffice),
    TEST_CASE(failures_come_after_the_items_before_them),
    TEST_CASE(beginnings_and_ends),
    TEST_CASE(every_end_is_told),
    TEST_CASE(the_call_that_crashed_is_known),
    TEST_CASE(it_is_started_again),
    TEST_CASE(it_goes_on_exactly),
    TEST_CASE(samplers_give_the_same_sequence),
    TEST_CASE(a_table_without_a_position_is_not_started_again),
    TEST_CASE(they_end_with_the_trainer),
    TEST_CASE(the_end_of_the_supervisor_is_told),
    TEST_CASE(it_minds_its_own_children),
    TEST_CASE(a_fork_has_no_loader),
    TEST_CASE(it_outlives_the_thread_that_opened_it),
    TEST_CASE(wrong_things_are_refused),
    TEST_CASE(an_item_elsewhere_is_an_error),
    TEST_CASE(a_child_that_is_refused_is_told),
    TEST_CASE(limits_of_the_process),
    TEST_CASE(room_is_the_least_of_all),
    TEST_CASE(without_memory_it_is_refused),
    TEST_CASE(trainers_take_in_turn),
    TEST_CASE(a_trainer_that_is_wrong_is_refused),
    TEST_CASE(scribbles_are_survived),
    TEST_CASE(wrong_numbers_are_seen),
    TEST_CASE(stats_are_those_of_all_children),
    TEST_CASE(one_trace_and_one_report),
    TEST_CASE(caches_and_headspace_take_from_it),
    TEST_CASE(a_program_is_run_again),
    TEST_CASE(a_rewind_ends_a_call_that_hangs),
    TEST_CASE(only_a_trainer_that_waits_finds_a_hang),
    TEST_CASE(a_hang_is_found_between_short_waits),
    TEST_CASE(an_array_without_a_name_is_an_error),
    TEST_CASE(a_wrong_count_is_seen),
    TEST_CASE(inherited_memory_is_no_childs_own),
    TEST_CASE(a_rewind_does_not_wait_for_a_batch),
    TEST_END
};
