/* spdl_loader: batches of other processes, whole and in order; every way in which a process can end
   is told, and nothing is left. (tests/torture_loader.c has the long forms.) */
#define _GNU_SOURCE
/* Before functions have other names. */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* A fork that fails after so many, a map, and in a child a block; -1: none does. */
static int forks_left = -1, maps_left = -1, blocks_left = -1;
__attribute__((unused)) static int fork_or_not(void);
static void *map_or_not(void *at, size_t bytes, int may, int flags, int file, off_t offset);
static void *block_or_not(size_t bytes);
static int fallocate_or_not(int file, off_t from, off_t bytes);
static void loader_point(const char *id);
#define SPDL_FORK fork_or_not
#define SPDL_MALLOC(bytes) block_or_not(bytes)
#define SPDL_FREE(memory) free(memory)
#define SPDL_TEST_POINT(id) loader_point(id)
#define mmap map_or_not
#define posix_fallocate fallocate_or_not
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#undef mmap
#undef posix_fallocate
#include "loader.h"
#include "test.h"

#include <dirent.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <termios.h>

static int fork_or_not(void) {
    if (forks_left == 0) {
        errno = EAGAIN;
        return -1;
    }
    if (forks_left > 0) --forks_left;
    return fork();
}

static void *map_or_not(void *at, size_t bytes, int may, int flags, int file, off_t offset) {
    if (maps_left == 0) {
        maps_left = -1;
        errno = ENOMEM;
        return MAP_FAILED;
    }
    if (maps_left > 0) --maps_left;
    return mmap(at, bytes, may, flags, file, offset);
}

/* As on kernels where a signal, or a stop of the process, undoes what was reserved so far. */
static int reservations_undone, signals_held; /* signals_held: then SIGALRM was blocked */
static int fallocate_or_not(int file, off_t from, off_t bytes) {
    sigset_t blocked;
    (void)pthread_sigmask(SIG_BLOCK, NULL, &blocked);
    signals_held = sigismember(&blocked, SIGALRM);
    if (reservations_undone > 0) return --reservations_undone, EINTR;
    return posix_fallocate(file, from, bytes);
}

static pid_t opener;
static void *block_or_not(size_t bytes) {
    if (__atomic_load_n(&blocks_left, __ATOMIC_RELAXED) >= 0 && getpid() != opener &&
        __atomic_fetch_sub(&blocks_left, 1, __ATOMIC_RELAXED) == 0)
        return NULL;
    return malloc(bytes);
}

/* A function of the test is called at a point of the library, in each process that comes there. */
static void (*point_calls)(const char *id);
static void loader_point(const char *id) {
    if (point_calls != NULL) point_calls(id);
}

#define TEST_NEEDS_PROCESSES()                                                                     \
    do {                                                                                           \
        if (!SPDL__OS_PROCESSES) TEST_SKIP("needs processes");                                     \
    } while (0)

/* Seconds in which a child begins, and makes what comes before it hangs, on a machine with little
   time for us. */
#define PATIENCE (TEST_SANITIZED ? 1.0 : 0.3)

static const char *const nonsense = "spdl.state.1 table=0"; /* no position */

/* --- in general --- */

SPDL_FN(none_at_all, record, record) {
    *out = in;
    return SPDL_SKIP;
}

/* All of `count` items, in order; numbers of batches, too. Ends with `end`. */
static void takes_all(spdl_loader *l, uint64_t count, uint64_t epoch, spdl_result end) {
    spdl_loader_batch batch;
    uint64_t next = 0, number = 0;
    spdl_result result;
    while ((result = spdl_loader_next(l, &batch, SPDL_SECONDS(15))) == SPDL_OK) {
        const record *items = (const record *)batch.data;
        CHECK_EQ(batch.sequence, number++);
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
    TEST_NEEDS_PROCESSES();
    for (int k = 0; k < 15; ++k) {
        spdl_loader_desc desc = desc_of(k % 3);
        spdl_loader *l;
        desc.pipeline.logger.log_fn = log_nothing; /* concurrency is more than the workers */
        desc.slot_count = 1 + k % 5;
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
    spdl_loader_desc desc = desc_of(2);
    spdl_loader *l;
    TEST_NEEDS_PROCESSES();
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(40, .continuous = true),
                IN_BATCHES(6), SPDL_SINK(2))) == SPDL_OK);
    for (uint64_t epoch = 0; epoch < 5; ++epoch) takes_all(l, 40, epoch, SPDL_END);
    spdl_loader_close(l);
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(1, .continuous = true),
                SPDL_PIPE(two_of_three), SPDL_PIPE(none_at_all), IN_BATCHES(6),
                SPDL_SINK(2))) == SPDL_OK);
    for (uint64_t epoch = 0; epoch < 500; ++epoch) takes_all(l, 0, epoch, SPDL_END); /* empty */
    spdl_loader_close(l);
    all_gone();
}

/* Breaks off after any number of batches, and begins again: in the same process. */
static void it_is_rewound(void) {
    spdl_loader_desc desc = desc_of(2);
    spdl_loader_batch held, batch;
    spdl_loader_status before, after;
    spdl_loader *l;
    TEST_NEEDS_PROCESSES();
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(60),
                IN_BATCHES(5), SPDL_SINK(2))) == SPDL_OK);
    REQUIRE(spdl_loader_next(l, &held, SPDL_SECONDS(15)) == SPDL_OK);
    spdl_loader_get_status(l, &before);
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
    CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
    CHECK_EQ(spdl_loader_rewind(l, (uint64_t)1 << 40, SPDL_SECONDS(15)), SPDL_E_INVALID);
    REQUIRE(spdl_loader_next(l, &batch, SPDL_SECONDS(15)) == SPDL_OK); /* as if nothing was asked */
    CHECK(record_is((const record *)batch.data, 35, 0));
    spdl_loader_get_status(l, &after);
    CHECK_EQ(after.pid, before.pid);
    spdl_loader_close(l);
    all_gone();
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
    batch.ticket_ += 1;
    CHECK_EQ(spdl_loader_done(l, &batch), SPDL_E_INVALID); /* stale */
    batch.slot_ = -1;
    CHECK_EQ(spdl_loader_done(l, &batch), SPDL_E_INVALID);
    spdl_loader_close(l);
    all_gone();
}

/* `user`: the place of every loader. */
static void *block_alloc(size_t bytes, size_t align, void *user) {
    return bytes == sizeof(spdl_loader) ? user : test_memory(align, bytes);
}

static void block_free(void *block, size_t bytes, void *user) {
    (void)bytes;
    if (block != user) test_memory_free(block);
}

/* The second loader has the address of the first one, and its batch the slot of the first one's. */
static void a_batch_of_a_closed_loader_is_refused(void) {
    spdl_loader_desc desc = desc_of(1);
    spdl_loader_batch batch[2];
    spdl_loader *l, *closed = NULL;
    desc.pipeline.allocator.alloc_fn = block_alloc;
    desc.pipeline.allocator.free_fn = block_free;
    desc.pipeline.allocator.user = test_memory(SPDL_CACHE_LINE, sizeof(spdl_loader));
    for (int i = 0; i < 2; ++i) {
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(40), SPDL_SINK(2))) == SPDL_OK);
        REQUIRE(spdl_loader_next(l, &batch[i], SPDL_SECONDS(15)) == SPDL_OK);
        if (i == 0) spdl_loader_close(closed = l);
    }
    CHECK(l == closed && batch[0].slot_ == batch[1].slot_);
    CHECK_EQ(spdl_loader_done(l, &batch[0]), SPDL_E_INVALID);
    CHECK_EQ(spdl_loader_done(l, &batch[1]), SPDL_OK);
    spdl_loader_close(l);
    test_memory_free(desc.pipeline.allocator.user);
    all_gone();
}

/* With all slots in its hands the trainer would wait for itself. */
static void all_slots_held_is_an_error(void) {
    spdl_loader_desc desc = desc_of(1);
    spdl_loader_batch held[2], batch;
    spdl_loader *l;
    TEST_NEEDS_PROCESSES();
    desc.slot_count = 2;
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(50),
                IN_BATCHES(5), SPDL_SINK(2))) == SPDL_OK);
    for (int i = 0; i < 2; ++i)
        REQUIRE(spdl_loader_next(l, &held[i], SPDL_SECONDS(15)) == SPDL_OK);
    CHECK_EQ(spdl_loader_next(l, &batch, SPDL_FOREVER), SPDL_E_LIMIT);
    CHECK(strstr(spdl_loader_error(l)->text, "holds all 2 slots") != NULL);
    CHECK_EQ(spdl_loader_done(l, &held[0]), SPDL_OK); /* and then goes on */
    CHECK_EQ(spdl_loader_next(l, &batch, SPDL_SECONDS(15)), SPDL_OK);
    CHECK(record_is((const record *)batch.data, 10, 0));
    spdl_loader_close(l);
    all_gone();
}

/* Drops, and batches in place: blocks suffice, and no item is lost. */
static void blocks_suffice(void) {
    TEST_NEEDS_PROCESSES();
    for (int k = 0; k < 8; ++k) {
        static bool seen[600];
        spdl_loader_desc desc = desc_of(1 + k % 4);
        spdl_loader_batch batch;
        spdl_loader *l;
        spdl_result result;
        size_t count = 0;
        memset(seen, 0, sizeof seen);
        desc.slot_count = 1 + k % 3;
        desc.pipeline.logger.log_fn = log_nothing;
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
    CHECK_STR(spdl_loader_error(l)->text, "stage 1 'meets_its_fate', item 33: as planned");
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
    (void)worker;
    return SPDL_E_IO;
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

static spdl_result aborts(void *ctx, int worker, void **local) {
    *local = ctx;
    if (worker >= 0) abort();
    return SPDL_OK;
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
        { RECORDS(40, .init = aborts),
          SPDL_SINK(2) },
    };
    static const struct {
        size_t count;
        spdl_result result;
        const char *text;
    } says[] = {
        { 2, SPDL_E_STAGE, "stage 0 'fails_at_once', item 0: no list" },
        { 3, SPDL_CLOSED, "" },
        { 2, SPDL_E_IO, "init" },
        { 2, SPDL_E_PROCESS, "the child has ended with code 5, outside of calls of stages" },
        { 2, SPDL_E_PROCESS, "the child was killed, as it made nothing for hang_timeout" },
        { 2, SPDL_E_PROCESS, "the child was killed by SIGABRT, outside of calls of stages" },
    };
    for (size_t i = 0; i < (TEST_FAULTS_CAUGHT ? 5 : 6); ++i) {
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
        { CRASH, "the child was killed by SIGSEGV, in stage 1 'meets_its_fate', item 40" },
        { ABORT, "the child was killed by SIGABRT, in stage 1 'meets_its_fate', item 40" },
        { KILL, "the child was killed by SIGKILL" },
        { EXIT_0, "the child has ended with code 0, before the end of its source" },
        { EXIT_17, "the child has ended with code 17" },
        { HANG, "the child was killed, as it made nothing for hang_timeout, in stage 1 "
                "'meets_its_fate', item 40" },
        { STOP, "the child was killed, as it made nothing for hang_timeout" },
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
        if (rows[i].how == HANG || rows[i].how == STOP) desc.hang_timeout = PATIENCE;
        CHECK_EQ(runs_into(&harm, &desc, &l, &taken), SPDL_E_PROCESS);
        CHECK(taken <= 40);
        if (!CHECK(strstr(spdl_loader_error(l)->text, rows[i].text) != NULL))
            fprintf(stderr, "    %s\n", spdl_loader_error(l)->text);
        CHECK_EQ(spdl_loader_next(l, &batch, SPDL_FOREVER), SPDL_E_PROCESS);
        CHECK_EQ(spdl_loader_rewind(l, 0, SPDL_FOREVER), SPDL_E_PROCESS);
        spdl_loader_get_status(l, &status);
        CHECK_EQ(status.pid, 0);
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
    CHECK_STR(spdl_loader_error(l)->text,
              "loader 'spdl': the child was killed by SIGABRT, in stage 1 "
              "'crashes_beside_another', item 5");
    CHECK_EQ(spdl_loader_error(l)->item, 5);
    spdl_loader_close(l);
    all_gone();
}

/* Started again at the very item, which is called again; then it is gone for good. */
static void it_is_started_again(void) {
    TEST_NEEDS_PROCESSES();
    for (int once = 0; once < 2; ++once) {
        spdl_loader_desc desc = desc_of(2);
        fate harm = { .at = 40, .how = EXIT_17 };
        spdl_loader_status status;
        spdl_loader *l;
        uint64_t taken;
        desc.max_restarts = 3;
        if (once) harm.done = shared_flag();
        CHECK_EQ(runs_into(&harm, &desc, &l, &taken), once ? SPDL_END : SPDL_E_PROCESS);
        /* Three batches of two can wait before the row of batches, and some are on their way. */
        CHECK(once ? taken == 100 : taken > 24 && taken <= 40);
        spdl_loader_get_status(l, &status);
        CHECK_EQ(status.restarts, once ? 1 : 3);
        spdl_loader_close(l);
    }
    all_gone();
}

/* Tables in which an item is not a result: what comes after a restart is what would have come. */
static void it_goes_on_exactly(void) {
    TEST_NEEDS_PROCESSES();
    for (int k = 0; k < 9; ++k) {
        static uint64_t as_is[600], again[600];
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
                        SPDL_PIPE(meets_its_fate, .ctx = &harm),
                        SPDL_BATCH(4, .item_bytes = sizeof(record), .drop_last = k % 2),
                        SPDL_SINK(2))) == SPDL_OK);
            for (int epoch = 0; epoch < 2; ++epoch) {
                while (spdl_loader_next(l, &batch, SPDL_SECONDS(15)) == SPDL_OK) {
                    for (size_t i = 0; i < batch.count && counted[run] < 600; ++i)
                        numbers[counted[run]++] = ((const record *)batch.data)[i].number;
                    CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
                }
            }
            CHECK_EQ(spdl_loader_error(l)->result, SPDL_OK);
            spdl_loader_get_status(l, &status);
            CHECK_EQ(status.restarts, run);
            spdl_loader_close(l);
        }
        CHECK(counted[0] >= 158);
        CHECK_EQ(counted[0], counted[1]);
        CHECK(memcmp(as_is, again, counted[0] * sizeof as_is[0]) == 0);
    }
    all_gone();
}

/* --- runs that go on --- */

SPDL_FN(keyed, spdl_index, record) {
    if ((*out = (record *)spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    record_make(*out, in->index, spdl_item_key(task) % 251);
    return SPDL_OK;
}

/* A run of one rank, by a loader or a pipeline: of both the same rows. */
typedef struct run {
    spdl_sampler *sampler;
    spdl_loader *l;
    spdl_pipeline *p;
} run;

static void run_open(run *r, bool loader, int workers, int rank, int world) {
    spdl_sampler_desc order = { .count = 50, .order = SPDL_SAMPLE_SHUFFLED, .seed = 5,
                                .ranks = { rank, world } };
    spdl_loader_desc desc = desc_of(workers);
    spdl_stage rows[5] = {
        SPDL_INDEX(NULL, .continuous = true), SPDL_PIPE(keyed, .item_bytes = sizeof(record)),
        SPDL_PIPE(two_of_three, .concurrency = 1), IN_BATCHES(3), SPDL_SINK(2)
    };
    desc.pipeline.logger.log_fn = log_nothing;
    desc.pipeline.seed = 9;
    memset(r, 0, sizeof *r);
    REQUIRE(spdl_sampler_create(&r->sampler, &order) == SPDL_OK);
    rows[0].ctx = r->sampler;
    if (loader) REQUIRE(spdl_loader_open(&r->l, &desc, rows, 5) == SPDL_OK);
    else REQUIRE(spdl_pipeline_create(&r->p, &desc.pipeline, rows, 5) == SPDL_OK);
}

static void run_close(run *r) {
    spdl_loader_close(r->l);
    spdl_pipeline_destroy(r->p);
    spdl_sampler_destroy(r->sampler);
}

/* One batch, or an end, as text. */
static void run_take(run *r, char *line) {
    spdl_loader_batch batch = { .count = 0 };
    spdl_batch *own = NULL;
    const spdl_result result = r->l != NULL ? spdl_loader_next(r->l, &batch, SPDL_SECONDS(15))
                                            : SPDL_NEXT(r->p, &own, SPDL_SECONDS(15));
    const record *at = (const record *)(own != NULL ? own->data : batch.data);
    const size_t count = own != NULL ? own->count : batch.count;
    size_t length = (size_t)sprintf(line, "%d:", (int)result);
    for (size_t i = 0; result == SPDL_OK && i < count; ++i)
        length += (size_t)sprintf(line + length, " %llu.%llu", (unsigned long long)at[i].number,
                                  (unsigned long long)at[i].epoch);
    if (own != NULL) spdl_batch_free(own);
    else if (result == SPDL_OK) CHECK_EQ(spdl_loader_done(r->l, &batch), SPDL_OK);
}

static void run_save(run *r, char *text) {
    const int length = r->l != NULL ? spdl_loader_state_save(r->l, text, SPDL_STATE_BYTES)
                                    : spdl_state_save(r->p, text, SPDL_STATE_BYTES);
    if (!CHECK_EQ(length, strlen(text))) fprintf(stderr, "    %s\n", text);
}

static spdl_result run_load(run *r, const char *text) {
    const char *const texts[] = { text };
    spdl_error error;
    return r->l != NULL ? spdl_loader_state_load(r->l, texts, 1, SPDL_SECONDS(15), &error)
                        : spdl_state_load(r->p, texts, 1, SPDL_SECONDS(15), &error);
}

enum { LINES = 50 };

/* From any line on, with batches in flight, at other workers, with a loader and without. */
static void a_run_goes_on_with_a_loader_and_without(void) {
    static char whole[LINES][400], line[400], again[SPDL_STATE_BYTES];
    static char text[LINES][SPDL_STATE_BYTES];
    run r;
    TEST_NEEDS_PROCESSES();
    run_open(&r, false, 2, 0, 1);
    for (int i = 0; i < LINES; ++i) {
        run_save(&r, text[i]);
        run_take(&r, whole[i]);
    }
    run_close(&r);
    for (int loader = 0; loader < 2; ++loader)
        for (int from = 0; from < LINES - 8; from += TEST_SANITIZED ? 7 : 1) {
            run_open(&r, loader, from % 4, 0, 1);
            if (from % 3 == 0) run_take(&r, line);
            CHECK_EQ(run_load(&r, text[from]), SPDL_OK);
            for (int i = from; i < from + 8; ++i) {
                run_save(&r, again);
                CHECK_STR(again, text[i]);
                run_take(&r, line);
                CHECK_STR(line, whole[i]);
            }
            run_close(&r);
        }
    run_open(&r, true, 1, 0, 1); /* in one loader, to and fro; and a text that is refused */
    for (int k = 0; k < 20; ++k) {
        const int from = k * 17 % (LINES - 4);
        CHECK_EQ(run_load(&r, text[from]), SPDL_OK);
        run_take(&r, line);
        CHECK_STR(line, whole[from]);
        CHECK_EQ(run_load(&r, "spdl.state.1 table=0"), SPDL_E_FORMAT);
        CHECK_EQ(spdl_loader_error(r.l)->result, SPDL_OK);
        run_take(&r, line);
        CHECK_STR(line, whole[from + 1]);
    }
    run_close(&r);
    all_gone();
}

/* Other ranks go on from the texts of all, with loaders. */
static void ranks_change_with_loaders(void) {
    static char text[3][SPDL_STATE_BYTES], line[400];
    const char *const texts[] = { text[0], text[1], text[2] };
    int items[2] = { 0, 0 };
    spdl_error error;
    run r;
    TEST_NEEDS_PROCESSES();
    for (int rank = 0; rank < 3; ++rank) {
        run_open(&r, true, 1, rank, 3);
        do run_take(&r, line);
        while (line[0] == '0');
        run_save(&r, text[rank]);
        run_close(&r);
    }
    for (int rank = 0; rank < 2; ++rank) {
        run_open(&r, rank == 0, 1, rank, 2);
        CHECK_EQ(rank == 0 ? spdl_loader_state_load(r.l, texts, 3, SPDL_SECONDS(15), &error)
                           : spdl_state_load(r.p, texts, 3, SPDL_SECONDS(15), &error), SPDL_OK);
        for (run_take(&r, line); line[0] == '0'; run_take(&r, line))
            for (const char *at = line; *at != '\0'; ++at) items[rank] += *at == '.';
        run_close(&r);
    }
    CHECK_EQ(items[0] + items[1], 33); /* of 50 those that are not 1 modulo 3 */
    all_gone();
}

/* Before the first batch, for tables without a position, and in a fork. */
static void positions_that_are_not_there(void) {
    char text[SPDL_STATE_BYTES];
    const char *const texts[] = { text };
    spdl_loader_desc desc = desc_of(1);
    counts some = { .items = 50 };
    spdl_error error;
    spdl_loader *l;
    TEST_NEEDS_PROCESSES();
    desc.pipeline.logger.log_fn = log_nothing;
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(5), SPDL_SINK(2))) == SPDL_OK);
    CHECK(spdl_loader_state_save(l, text, sizeof text) > 0);
    CHECK(strstr(text, " item=0 ") != NULL);
    CHECK_EQ(spdl_loader_state_load(l, texts, 0, 0, &error), SPDL_E_INVALID);
    CHECK_EQ(spdl_loader_state_load(NULL, texts, 1, 0, &error), SPDL_E_INVALID);
    spdl_loader_close(l);
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(
                SPDL_FROM(record, record_after_record, &some),
                SPDL_PIPE(copied, .item_bytes = sizeof(record)), SPDL_SINK(2))) == SPDL_OK);
    CHECK_EQ(spdl_loader_state_save(l, text, sizeof text), SPDL_E_UNSUPPORTED);
    CHECK(strstr(text, "SPDL_FROM") != NULL);
    (void)snprintf(text, sizeof text, "spdl.state.1");
    CHECK_EQ(spdl_loader_state_load(l, texts, 1, SPDL_SECONDS(15), &error), SPDL_E_UNSUPPORTED);
    spdl_loader_close(l);
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(40, .init = refuses),
                SPDL_SINK(2))) == SPDL_OK);
    CHECK(spdl_loader_state_save(l, text, sizeof text) > 0);
    CHECK(strstr(text, " item=0 ") != NULL);
    spdl_loader_close(l);
    all_gone();
}

/* Memory of a child is there once *user is set. */
static void *memory_later(size_t bytes, size_t align, void *user) {
    const uint32_t *gate = (const uint32_t *)user;
    while (getpid() != (pid_t)gate[1] && __atomic_load_n(&gate[0], __ATOMIC_ACQUIRE) == 0)
        usleep(1000);
    return aligned_alloc(align, (bytes + align - 1) / align * align);
}

static void memory_back(void *block, size_t bytes, void *user) {
    (void)bytes, (void)user;
    free(block);
}

/* A load in time 0, before the child has begun: the error is none. */
static void a_load_that_is_too_early_has_no_error(void) {
    uint32_t *gate = shared_flag();
    spdl_loader_desc desc = desc_of(1);
    spdl_error error;
    spdl_loader *l;
    TEST_NEEDS_PROCESSES();
    REQUIRE(gate != NULL);
    gate[1] = (uint32_t)getpid();
    desc.pipeline.allocator = (spdl_allocator){ memory_later, memory_back, gate };
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(5), SPDL_SINK(2))) == SPDL_OK);
    memset(&error, 0xff, sizeof error);
    CHECK_EQ(spdl_loader_state_load(l, &nonsense, 1, 0, &error), SPDL_TIMEOUT);
    CHECK_EQ(error.result, SPDL_OK);
    CHECK_STR(error.text, "");
    CHECK_EQ(spdl_loader_state_load(l, &nonsense, 1, 0, &error), SPDL_E_PROCESS);
    CHECK(strstr(error.text, "timed out: close it") != NULL);
    __atomic_store_n(&gate[0], 1, __ATOMIC_RELEASE);
    spdl_loader_close(l);
    munmap(gate, 4096);
    all_gone();
}

/* Each life is watched: one that was started again hangs at the same item. */
static void a_hang_after_a_restart_is_found(void) {
    spdl_loader_desc desc = desc_of(2);
    fate harm = { .at = 40, .how = HANG };
    spdl_loader_status status;
    spdl_loader *l;
    uint64_t taken;
    TEST_NEEDS_PROCESSES();
    desc.max_restarts = 2;
    desc.hang_timeout = PATIENCE;
    CHECK_EQ(runs_into(&harm, &desc, &l, &taken), SPDL_E_PROCESS);
    CHECK(strstr(spdl_loader_error(l)->text, "made nothing for hang_timeout") != NULL);
    spdl_loader_get_status(l, &status);
    CHECK_EQ(status.restarts, 2);
    spdl_loader_close(l);
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
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(
                SPDL_FROM(record, record_after_record, &some),
                SPDL_PIPE(meets_its_fate, .ctx = &harm, .item_bytes = sizeof(record)),
                SPDL_PIPE(copied, .item_bytes = sizeof(record)), SPDL_SINK(2))) == SPDL_OK);
    while ((result = spdl_loader_next(l, &batch, SPDL_SECONDS(15))) == SPDL_OK)
        CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
    CHECK_EQ(result, SPDL_E_PROCESS);
    CHECK(strstr(spdl_loader_error(l)->text, "it is not started again: the position of this "
                                             "pipeline cannot be saved: SPDL_FROM") != NULL);
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
        pid_t trainer;
        uint64_t since;
        REQUIRE(pipe(pipes) == 0);
        trainer = fork();
        if (trainer == 0) {
            spdl_loader_desc desc = desc_of(2);
            fate harm = { .at = 500, .how = STOP };
            spdl_loader_batch batch;
            spdl_loader *l;
            if (spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(1000),
                    SPDL_PIPE(meets_its_fate, .ctx = &harm), SPDL_SINK(2))) != SPDL_OK)
                _exit(1);
            do {
                if (spdl_loader_next(l, &batch, SPDL_SECONDS(15)) != SPDL_OK) _exit(1);
                if (spdl_loader_done(l, &batch) != SPDL_OK) _exit(1);
            } while (how == 2 && batch.sequence < 490); /* then it stands still */
            spdl_loader_get_status(l, &status);
            if (write(pipes[1], &status, sizeof status) != (ssize_t)sizeof status) _exit(1);
            if (how == 1) _exit(0); /* without a close */
            for (;;) pause();
        }
        REQUIRE(read(pipes[0], &status, sizeof status) == (ssize_t)sizeof status);
        if (how != 1) kill(trainer, SIGKILL);
        since = spdl_time_ns();
        CHECK_EQ(waitpid(trainer, NULL, 0), trainer);
        CHECK_EQ(waitpid((pid_t)status.supervisor, NULL, 0), status.supervisor);
        /* 100 ms on a machine that has time for us */
        CHECK(spdl_time_ns() - since < (TEST_SANITIZED ? 5u : 1u) * 1000000000ull);
        CHECK(status.pid > 0);
        CHECK_EQ(kill((pid_t)status.pid, 0), -1);
        close(pipes[0]);
        close(pipes[1]);
        all_gone();
    }
}

/* What a stage has started ends with the child, however that ends; SIGTERM can end it before. */
SPDL_FN(starts_a_program, record, record) {
    int *pipes = (int *)spdl_ctx(task);
    *out = in;
    if (in->number == 3) {
        char command[200];
        (void)snprintf(command, sizeof command,
                       "(echo $$; grep -E 'SigBlk|SigIgn' /proc/self/status | tr -d '\\n'; echo) "
                       ">&%d; exec sleep 1000", pipes[1]);
        if (popen(command, "r") == NULL) return SPDL_E_IO;
    }
    if (in->number == 4)
        for (;;) pause();
    return SPDL_OK;
}

static void programs_end_with_the_child(void) {
    TEST_NEEDS_PROCESSES();
    CHECK_EQ(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), 0);
    for (int how = 0; how < 5; ++how) {
        spdl_loader_desc desc = desc_of(1);
        spdl_loader_batch batch;
        spdl_loader_status status;
        spdl_loader *l = NULL;
        char line[200] = "";
        int pipes[2];
        pid_t program, trainer = 0;
        FILE *from;
        REQUIRE(pipe(pipes) == 0);
        if (how == 1) desc.hang_timeout = 0.2;
        if (how == 3) trainer = fork();
        if (trainer == 0) {
            REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(100),
                        SPDL_PIPE(starts_a_program, .ctx = pipes), SPDL_SINK(2))) == SPDL_OK);
            spdl_loader_get_status(l, &status);
            if (how == 3)
                for (;;) pause();
        }
        REQUIRE((from = fdopen(pipes[0], "r")) != NULL);
        REQUIRE(fgets(line, sizeof line, from) != NULL);
        program = (pid_t)atoi(line);
        REQUIRE(program > 1 && fgets(line, sizeof line, from) != NULL);
        CHECK(strstr(line, "SigBlk:\t0000000000000000") != NULL || SPDL__TSAN);
        CHECK((strtoull(strstr(line, "SigIgn:") + 7, NULL, 16) >> (SIGTERM - 1) & 1) == 0);
        CHECK_EQ(kill(program, 0), 0);
        if (how == 4) kill((pid_t)status.supervisor, SIGKILL);
        if (how == 0 || how == 4) spdl_loader_close(l);
        if (how == 1)
            while (spdl_loader_next(l, &batch, SPDL_SECONDS(15)) == SPDL_OK)
                CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
        if (how == 2) {
            spdl_loader_get_status(l, &status);
            kill((pid_t)status.pid, SIGKILL);
            while (spdl_loader_next(l, &batch, SPDL_SECONDS(15)) == SPDL_OK)
                CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
        }
        if (how == 3) kill(trainer, SIGKILL);
        for (int i = 0; i < 500 && kill(program, 0) == 0; ++i) {
            while (waitpid(program, NULL, WNOHANG) > 0) {}
            usleep(10000);
        }
        CHECK_EQ(kill(program, 0), -1);
        if (how == 1 || how == 2) spdl_loader_close(l);
        fclose(from);
        close(pipes[1]);
        usleep(20000);
        while (waitpid(-1, NULL, WNOHANG) > 0) {}
    }
}

static int handlers_run;
static void an_exit_handler(void) { ++handlers_run; (void)!write(handlers_run, "handler\n", 8); }

SPDL_FN(exits, record, record) {
    *out = in;
    if (in->number == 7) exit(0);
    return SPDL_OK;
}

/* exit() in a stage runs nothing of the trainer's, and writes nothing of its files. */
static void an_exit_is_the_childs_own(void) {
    char path[] = "/tmp/spdl_loader_XXXXXX", text[100] = "";
    int file, status;
    TEST_NEEDS_PROCESSES();
    REQUIRE((file = mkstemp(path)) >= 0);
    if (fork() == 0) {
        spdl_loader_desc desc = desc_of(1);
        spdl_loader_batch batch;
        spdl_loader *l;
        FILE *log = fdopen(file, "w");
        handlers_run = file - 1;
        (void)atexit(an_exit_handler);
        (void)fprintf(log, "line\n");
        if (spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(100), SPDL_PIPE(exits),
                                                    SPDL_SINK(2))) != SPDL_OK) _exit(1);
        while (spdl_loader_next(l, &batch, SPDL_SECONDS(15)) == SPDL_OK)
            (void)spdl_loader_done(l, &batch);
        if (strstr(spdl_loader_error(l)->text, "has ended with code 0") == NULL) _exit(2);
        spdl_loader_close(l);
        exit(0);
    }
    CHECK(wait(&status) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(pread(file, text, sizeof text - 1, 0) > 0);
    if (TEST_SANITIZED && text[0] == 'h') /* beside a thread of its own open writes no FILE */
        CHECK_STR(text, "handler\nline\n");
    else CHECK_STR(text, "line\nhandler\n");
    close(file);
    unlink(path);
    all_gone();
}

/* One system call fails with ENOSYS from now on, here and in all that are forked: each, or those
   with this argument. */
static bool call_fails(unsigned number, int argument, unsigned is) {
    const unsigned at = (unsigned)offsetof(struct seccomp_data, args[0]);
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, at + 8 * (unsigned)(argument > 0 ? argument : 0)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, is, 0, argument >= 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog program = { sizeof code / sizeof code[0], code };
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

/* A child that cannot be waited for is not gone: it is killed, and none is started beside it. */
static void processes_that_cannot_be_waited_for(void) {
    TEST_NEEDS_PROCESSES();
    if (TEST_SANITIZED) TEST_SKIP("a sanitizer makes calls of its own");
    CHECK_EQ(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), 0);
    for (int how = 0; how < 2; ++how) {
        int status = 0;
        const pid_t trainer = fork();
        if (trainer == 0) {
            spdl_loader_desc desc = desc_of(1);
            spdl_loader_batch batch;
            spdl_loader *l;
            const char *says = how == 0 ? "could not be waited for" : "could not be started";
            if (!call_fails(how == 0 ? SYS_wait4 : SYS_prctl, how - 1, 1)) _exit(77);
            desc.max_restarts = 3;
            if (spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(100000), SPDL_SINK(2))) != SPDL_OK)
                _exit(1);
            while (spdl_loader_next(l, &batch, SPDL_SECONDS(15)) == SPDL_OK)
                (void)spdl_loader_done(l, &batch);
            if (strstr(spdl_loader_error(l)->text, says) == NULL) _exit(2);
            spdl_loader_close(l);
            _exit(0);
        }
        CHECK_EQ(waitpid(trainer, &status, 0), trainer);
        if (WIFEXITED(status) && WEXITSTATUS(status) == 77) TEST_SKIP("needs seccomp");
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        for (int i = 0; i < 100 && (waitpid(-1, NULL, WNOHANG) >= 0); ++i) usleep(10000);
        all_gone();
    }
}

/* A process that has ended may be left to one that waits for nobody. */
static char state_of(int64_t process) {
    char path[64], text[256] = "";
    const char *state;
    snprintf(path, sizeof path, "/proc/%lld/stat", (long long)process);
    const int file = open(path, O_RDONLY);
    if (file < 0) return 'X';
    const ssize_t bytes = read(file, text, sizeof text - 1);
    close(file);
    state = strrchr(text, ')');
    return bytes <= 0 || state == NULL ? 'X' : state[2];
}

static bool has_ended(int64_t process) {
    const char state = state_of(process);
    return state == 'Z' || state == 'X';
}

SPDL_FN(ends_its_process, void, record) {
    if (spdl_sequence(task) == 2) kill(getpid(), SIGKILL);
    return records_spdl_call(task, NULL, (void **)out);
}

/* The row that a child died in may be the first. */
static void an_end_in_a_source_is_told(void) {
    spdl_loader_desc desc = desc_of(1);
    spdl_loader_batch batch;
    spdl_loader *l;
    TEST_NEEDS_PROCESSES();
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(
                SPDL_SOURCE(ends_its_process, .ctx = (void *)(uintptr_t)10,
                            .item_bytes = sizeof(record)),
                SPDL_PIPE(two_of_three), SPDL_SINK(2))) == SPDL_OK);
    while (spdl_loader_next(l, &batch, SPDL_SECONDS(15)) == SPDL_OK)
        CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
    CHECK_EQ(spdl_loader_error(l)->result, SPDL_E_PROCESS);
    CHECK_EQ(spdl_loader_error(l)->stage, 0);
    CHECK(strstr(spdl_loader_error(l)->text, ", in stage 0 'ends_its_process', item 2") != NULL);
    spdl_loader_close(l);
    all_gone();
}

/* Whatever stands still, a close does not take long. */
static void a_close_is_short(void) {
    TEST_NEEDS_PROCESSES();
    for (int how = 0; how < 3; ++how) {
        spdl_loader_desc desc = desc_of(1);
        fate harm = { .at = 5, .how = how == 0 ? HANG : STOP };
        spdl_loader_status status;
        spdl_loader_batch batch;
        spdl_loader *l;
        uint64_t since;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(100),
                    SPDL_PIPE(meets_its_fate, .ctx = &harm), SPDL_SINK(2))) == SPDL_OK);
        while (spdl_loader_next(l, &batch, 300000000) == SPDL_OK)
            CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
        spdl_loader_get_status(l, &status);
        if (how == 2) kill((pid_t)status.supervisor, SIGSTOP);
        if (how == 0 && fork() == 0) { /* a signal is no end of the grace */
            usleep(100000);
            _exit(kill((pid_t)status.supervisor, SIGCHLD) != 0);
        }
        since = spdl_time_ns();
        spdl_loader_close(l);
        since = spdl_time_ns() - since;
        CHECK(how != 0 || since > 900000000u);
        if (!CHECK(since < (TEST_SANITIZED ? 9u : 3u) * 1000000000ull))
            fprintf(stderr, "    %d: %.2f s\n", how, (double)since / 1e9);
        for (int i = 0; i < 1000 && !has_ended(status.pid); ++i) usleep(10000);
        CHECK(has_ended(status.pid));
        while (waitpid(-1, NULL, WNOHANG) > 0) {}
    }
}

/* A supervisor that stands still does not keep a trainer waiting, either. */
static void a_hang_of_both_is_found(void) {
    spdl_loader_desc desc = desc_of(1);
    fate harm = { .at = 5, .how = STOP };
    spdl_loader_status status;
    spdl_loader_batch batch;
    spdl_loader *l;
    spdl_result result;
    TEST_NEEDS_PROCESSES();
    desc.hang_timeout = PATIENCE;
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(100),
                SPDL_PIPE(meets_its_fate, .ctx = &harm), SPDL_SINK(2))) == SPDL_OK);
    CHECK_EQ(spdl_loader_next(l, &batch, SPDL_SECONDS(15)), SPDL_OK);
    spdl_loader_get_status(l, &status);
    kill((pid_t)status.supervisor, SIGSTOP);
    do result = spdl_loader_next(l, &batch, SPDL_SECONDS(15));
    while (result == SPDL_OK && spdl_loader_done(l, &batch) == SPDL_OK);
    CHECK_EQ(result, SPDL_E_PROCESS);
    spdl_loader_close(l);
    usleep(20000);
    while (waitpid(-1, NULL, WNOHANG) > 0) {}
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
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(100000), SPDL_SINK(2))) == SPDL_OK);
    while (spdl_loader_get_status(l, &status), status.pid == 0) usleep(100);
    kill((pid_t)status.supervisor, SIGKILL);
    since = spdl_time_ns();
    while (result == SPDL_OK) {
        result = spdl_loader_next(l, &batch, SPDL_SECONDS(15));
        if (result == SPDL_OK) CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
    }
    CHECK_EQ(result, SPDL_E_PROCESS);
    CHECK(spdl_time_ns() - since < (TEST_SANITIZED ? 3000u : 100u) * 1000000ull);
    CHECK(strstr(spdl_loader_error(l)->text, "its supervisor") != NULL);
    spdl_loader_close(l);
    CHECK_EQ(waitpid((pid_t)status.pid, NULL, 0), status.pid); /* it is ours now */
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
        while (spdl_loader_get_status(l, &status), status.pid == 0) usleep(100);
        if (how == 0) (void)signal(SIGCHLD, SIG_IGN);
        for (int i = 0; how == 1 && i < 2; ++i) {
            kill((pid_t)status.pid, SIGINT);
            kill((pid_t)status.pid, SIGTERM);
            kill((pid_t)status.pid, SIGPIPE);
            kill((pid_t)status.supervisor, SIGINT);
            kill((pid_t)status.supervisor, SIGQUIT);
            usleep(20000); /* else two are one */
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
static void no_loader_in_a_fork(int maps) {
    spdl_loader_desc desc = desc_of(1);
    spdl_loader_batch held, more;
    spdl_loader *l;
    pid_t child;
    int status;
    maps_left = maps;
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(50),
                IN_BATCHES(10), SPDL_SINK(2))) == SPDL_OK);
    REQUIRE(spdl_loader_next(l, &held, SPDL_SECONDS(15)) == SPDL_OK);
    while (spdl__load(&spdl__loader_entry(l, 1)->stamp) != 2) usleep(100); /* it is ready */
    child = fork();
    if (child == 0) {
        spdl_loader_batch batch;
        spdl_loader_status seen;
        char text[SPDL_STATE_BYTES];
        if (spdl_loader_next(l, &batch, SPDL_SECONDS(15)) != SPDL_E_INVALID) _exit(3);
        if (spdl_loader_done(l, &held) != SPDL_E_INVALID) _exit(4);
        if (spdl_loader_rewind(l, 0, 0) != SPDL_E_INVALID) _exit(2);
        if (spdl_loader_state_save(l, text, sizeof text) != SPDL_E_INVALID) _exit(5);
        if (spdl_loader_state_load(l, &nonsense, 1, 0, NULL) != SPDL_E_INVALID) _exit(6);
        spdl_loader_get_status(l, &seen); /* only looks */
        if (seen.taken != 1 || spdl_loader_error(l)->result != SPDL_OK) _exit(7);
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

static void a_fork_has_no_loader(void) {
    TEST_NEEDS_PROCESSES();
    no_loader_in_a_fork(-1);
    no_loader_in_a_fork(2); /* without the page that a fork wipes */
    CHECK_EQ(maps_left, -1);
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

static void never_called(void *user) { (void)user; }

static void wrong_things_are_refused(void) {
    const spdl_stage good[] = { RECORDS(50),
                                SPDL_SINK(2) };
    const spdl_stage bare[] = { SPDL_SOURCE(records), SPDL_SINK(2) };
    const spdl_stage feed[] = { SPDL_FEED(record), SPDL_PIPE(copied, .item_bytes = 64),
                                SPDL_SINK(2) };
    const spdl_stage wrong[] = { SPDL_SOURCE(records, .item_bytes = 64), SPDL_PIPE(copied) };
    const spdl_stage large[] = { RECORDS(1), SPDL_BATCH(1000, .item_bytes = INT32_MAX),
                                 SPDL_SINK(2) };
    const spdl_stage vast[] = { RECORDS(1), SPDL_BATCH(1 << 15, .item_bytes = INT32_MAX),
                                SPDL_SINK(2) };
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
    REFUSES(desc.max_restarts = -1, good, SPDL_E_INVALID, "max_restarts is -1, must be 0 to 32767");
    REFUSES(desc.slot_count = 1 << 20, good, SPDL_E_INVALID, "slot_count is 1048576");
    REFUSES(desc.hang_timeout = -1, good, SPDL_E_INVALID, "hang_timeout is -1");
    REFUSES(desc.pipeline.pool = pool, good, SPDL_E_INVALID, "pipeline.pool is set");
    REFUSES(desc.pipeline.ready_fn = never_called, good, SPDL_E_INVALID,
            "pipeline.ready_fn is set, but it would be called in the child: set ready_fd");
    REFUSES(desc.pipeline.allocator.alloc_fn = half_an_allocator, good, SPDL_E_INVALID,
            "set both functions of the allocator or none");
    REFUSES((void)0, bare, SPDL_E_INVALID, "loader 'wrong': no row has .item_bytes");
    REFUSES((void)0, feed, SPDL_E_UNSUPPORTED, "SPDL_FEED");
    REFUSES((void)0, wrong, SPDL_E_INVALID, "the last row must be SPDL_SINK");
    if (SPDL__OS_PROCESSES) {
        REFUSES(desc.slot_count = 1 << 16, good, SPDL_E_LIMIT, "are more than there can be");
        REFUSES((void)0, vast, SPDL_E_LIMIT, "are more than there can be");
        REFUSES((void)0, large, SPDL_E_LIMIT, "MiB of it are left");
        REFUSES(maps_left = 0, good, SPDL_E_LIMIT, "left: Cannot allocate memory");
        REFUSES(maps_left = 1, good, SPDL_E_NOMEM, "loader 'wrong': out of memory");
        REFUSES(desc.arena_bytes = 4096, good, SPDL_E_LIMIT, "MiB wanted (");
        REFUSES(desc.arena_bytes = 4096, good, SPDL_E_LIMIT, "arena_bytes is 0.0 MiB");
        REQUIRE(pthread_create(&thread, NULL, sleeper, &over) == 0);
        REFUSES(desc.fork_with_threads = false, good, SPDL_E_INVALID, "set fork_with_threads");
        __atomic_store_n(&over, 1, __ATOMIC_RELEASE);
        pthread_join(thread, NULL);
        forks_left = 0;
        REFUSES((void)0, good, SPDL_E_PROCESS, "no process: Resource temporarily unavailable");
        forks_left = -1;
    }
#undef REFUSES
    all_gone();
}

SPDL_FN(inside_of_it, record, record) {
    (void)task;
    *out = (record *)(void *)&in->epoch;
    return SPDL_OK;
}

/* Items that a stage made elsewhere are told, and where to make them. */
static void an_item_elsewhere_is_an_error(void) {
    const spdl_stage rows[] = { SPDL_PIPE(elsewhere), SPDL_PIPE(inside_of_it) };
    TEST_NEEDS_PROCESSES();
    for (int i = 0; i < 2; ++i) {
        spdl_loader_desc desc = desc_of(1);
        spdl_loader_batch batch;
        spdl_loader *l;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(50), rows[i], SPDL_SINK(2))) ==
                SPDL_OK);
        CHECK_EQ(spdl_loader_next(l, &batch, SPDL_SECONDS(15)), SPDL_E_INVALID);
        CHECK(strstr(spdl_loader_error(l)->text, "is in no slot") != NULL);
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
    CHECK_EQ(spdl_loader_rewind(l, 0, SPDL_SECONDS(15)), SPDL_E_PROCESS); /* open's fails */
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

/* Calls of a thread for which there is no note are not noted. */
static void more_threads_than_notes(void) {
#if SPDL__OS_PROCESSES
    static spdl__shared_note notes[SPDL__LOADER_NOTES];
    static spdl_loader l;
    static spdl__child child;
    child.loader = &l;
    l.notes = notes;
    for (uint64_t i = 0; i < SPDL__LOADER_NOTES; ++i) notes[i].thread = 1;
    spdl__child_event(SPDL_EVENT_TASK_BEGIN, "decode", 7, &child);
    spdl__child_event(SPDL_EVENT_TASK_END, "decode", 7, &child);
    for (int i = 0; i < SPDL__LOADER_NOTES; ++i)
        CHECK(notes[i].thread == 1 && notes[i].item == 0 && notes[i].stage == 0);
#endif
}

/* Whatever is least counts: cgroups, limits of the process, the machine. */
static void room_is_the_least_of_all(void) {
#if SPDL__OS_PROCESSES
    char folder[] = "/tmp/spdl_loader_XXXXXX", self[256], command[256];
    spdl__os_room room;
    REQUIRE(mkdtemp(folder) != NULL);
    file_at(folder, "memory.max", "200000000\n");
    file_at(folder, "memory.current", "150000000\n");
    file_at(folder, "self", "no colon\n0::/\nnone\n");
    (void)snprintf(self, sizeof self, "%s/self", folder);
    room = spdl__os_room_in(folder, self);
    CHECK_STR(room.what, "memory.max of the cgroup");
    CHECK_EQ(room.limit, 200000000);
    CHECK_EQ(room.left, 50000000);
    file_at(folder, "memory.stat", "file 90\ninactive_anon 7\ninactive_file 30000000\nslab 5\n");
    CHECK_EQ(spdl__os_room_in(folder, self).left, 80000000); /* copies of files go */
    file_at(folder, "memory.stat", "inactive_file 7\ntotal_inactive_file 999999999\n");
    CHECK_EQ(spdl__os_room_in(folder, self).left, 200000000);
    file_at(folder, "memory.current", "200000001\n"); /* more than there may be */
    file_at(folder, "memory.stat", "inactive_file 0\n");
    CHECK_EQ(spdl__os_room_in(folder, self).left, 0);
    file_at(folder, "memory.current", "unknown\n");
    CHECK(strcmp(spdl__os_room_in(folder, self).what, "memory.max of the cgroup") != 0);
    file_at(folder, "memory.max", "max\n");
    room = spdl__os_room_in(folder, self);
    CHECK(strcmp(room.what, "memory.max of the cgroup") != 0);
    CHECK(room.left > 0 && room.left <= room.limit);
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
    bool opened = false;
    TEST_NEEDS_PROCESSES();
    for (long k = 0; k < 200 && !opened; ++k) {
        spdl_loader_desc desc = desc_of(1);
        spdl_loader *l;
        spdl_result result;
        desc.logger.log_fn = desc.pipeline.logger.log_fn = log_nothing;
        desc.pipeline.allocator.alloc_fn = give;
        desc.pipeline.allocator.free_fn = take_back;
        gives = k;
        result = spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(5), SPDL_SINK(2)));
        if (!CHECK(result == SPDL_OK || result == SPDL_E_NOMEM)) break;
        opened = result == SPDL_OK;
        if (opened) { /* the child has the same allocator */
            spdl_loader_batch batch;
            result = spdl_loader_next(l, &batch, SPDL_SECONDS(15));
            CHECK(result == SPDL_E_NOMEM || result == SPDL_E_PROCESS || result == SPDL_OK);
        }
        spdl_loader_close(l);
        CHECK_EQ(balance, 0);
    }
    CHECK(opened);
    all_gone();
}

/* --- shared memory that makes no sense --- */

static uint64_t scribble_seed;

/* Nothing that a sanitizer should look at. */
__attribute__((no_sanitize("thread")))
static void scribble(volatile char *at, uint64_t bytes, size_t count) {
    while (count-- > 0) at[count] = (char)(bytes >> 8 * count);
}

/* Of the memory that the child shares, all but the slots: some bytes of it, whatever they are. */
SPDL_FN(scribbles, record, record) {
    static char *shared;
    uint64_t dice = scribble_seed + in->number, bytes = *(const uint64_t *)spdl_ctx(task);
    *out = in;
    if (shared == NULL) {
        char line[400];
        FILE *maps = fopen("/proc/self/maps", "r");
        while (maps != NULL && fgets(line, sizeof line, maps) != NULL)
            if (strstr(line, "memfd:spdl") != NULL)
                shared = (char *)(uintptr_t)strtoull(line, NULL, 16);
        if (maps != NULL) fclose(maps);
    }
    if (in->number <= 10) return SPDL_OK;
    for (int i = 0; i < 20; ++i) {
        dice ^= dice << 13, dice ^= dice >> 7, dice ^= dice << 17;
        scribble(shared + dice % (bytes / 8) * 8, dice, 1 + dice % 8);
    }
    return SPDL_OK;
}

/* Whatever a stage writes over what it shares, the trainer gets errors or all there is: it does not
   hang, and no end comes early. */
static void scribbles_are_survived(void) {
    const uint64_t seeds = TEST_SANITIZED ? 10 : 40;
    TEST_NEEDS_PROCESSES();
    for (scribble_seed = 1; scribble_seed <= seeds * 7919; scribble_seed += 7919) {
        spdl__layout places = { .quota = 4, .slot_count = 1 };
        spdl_loader_desc desc = desc_of(1);
        spdl_loader_batch batch;
        spdl_loader_status status;
        spdl_loader *l;
        char text[SPDL_STATE_BYTES];
        uint64_t taken = 0, since = spdl_time_ns();
        spdl_result result;
        REQUIRE(spdl__layout_plan(&places));
        desc.hang_timeout = 0.1;
        desc.pipeline.logger.log_fn = log_nothing;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(400),
                    SPDL_PIPE(copied, .item_bytes = sizeof(record)),
                    SPDL_PIPE(scribbles, .ctx = &places.data), SPDL_SINK(2))) == SPDL_OK);
        while ((result = spdl_loader_next(l, &batch, SPDL_FOREVER)) == SPDL_OK) {
            ++taken;
            (void)spdl_loader_state_save(l, text, sizeof text);
            (void)spdl_loader_done(l, &batch);
        }
        CHECK(result == SPDL_END ? taken == 400 : result < 0);
        spdl_loader_get_status(l, &status);
        spdl_loader_close(l);
        CHECK(spdl_time_ns() - since < (TEST_SANITIZED ? 20u : 6u) * 1000000000ull);
        all_gone();
    }
}

/* Every number that is read is looked at. */
static void wrong_numbers_are_seen(void) {
#if SPDL__OS_PROCESSES
    for (int k = 0; k < 7; ++k) {
        spdl_loader_desc desc = desc_of(1);
        spdl_loader_batch batch;
        spdl_loader *l;
        spdl__shared_entry *entry;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(
                    RECORDS(40), SPDL_PIPE(copied, .item_bytes = 136), SPDL_SINK(2))) == SPDL_OK);
        entry = spdl__loader_entry(l, 0);
        while (spdl__load(&entry->stamp) != 1) usleep(100); /* nothing changes it any more */
        if (k == 0) entry->slot = (uint64_t)l->layout.slot_count;
        if (k == 1) entry->bytes = 137;
        if (k == 2) entry->result = SPDL_END; /* of 0 batches: so it is, but not of the second */
        if (k == 3) entry->result = -5; /* no such failure is there */
        if (k == 4 || k == 6) entry->number = 1;
        if (k == 6) entry->result = SPDL_CLOSED;
        if (k == 5) entry->epoch = 1;
        if (k == 2) {
            entry->result = SPDL_OK;
            CHECK_EQ(spdl_loader_next(l, &batch, SPDL_SECONDS(15)), SPDL_OK);
            entry = spdl__loader_entry(l, 1);
            while (spdl__load(&entry->stamp) != 2) usleep(100);
            entry->number = 0;
            entry->result = SPDL_END;
        }
        CHECK_EQ(spdl_loader_next(l, &batch, SPDL_SECONDS(15)), SPDL_E_PROCESS);
        CHECK(strstr(spdl_loader_error(l)->text, "impossible value") != NULL);
        spdl_loader_close(l);
    }
    all_gone();
#endif
}

/* A batch that is ready costs no system call: strace sees none between two marks. */
static void a_ready_batch_costs_no_call(void) {
    char command[300], line[300];
    char self[200];
    FILE *trace;
    bool inside = false;
    int seen = 0;
    TEST_NEEDS_PROCESSES();
    if (TEST_SANITIZED || system("strace -V >/dev/null 2>&1") != 0) TEST_SKIP("needs strace");
    if (getenv("LOADER_IS_TRACED") != NULL) {
        spdl_loader_desc desc = desc_of(1);
        spdl_loader_batch batch[20];
        spdl_loader *l;
        desc.slot_count = 21;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(1000), SPDL_SINK(21))) ==
                SPDL_OK);
        while (spdl__load(&spdl__loader_entry(l, 20)->stamp) != 21) usleep(100);
        usleep(20000); /* the child sleeps, as it has no room */
        (void)!write(-1, "begin", 5);
        for (int i = 0; i < 20; ++i)
            CHECK_EQ(spdl_loader_next(l, &batch[i], SPDL_FOREVER), SPDL_OK);
        (void)!write(-1, "end", 3);
        spdl_loader_close(l);
        return;
    }
    REQUIRE(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
    self[readlink("/proc/self/exe", self, sizeof self - 1)] = '\0';
    (void)snprintf(command, sizeof command, "LOADER_IS_TRACED=1 strace %s --no-fork "
                   "loader.a_ready_batch_costs_no_call 2>&1", self);
    REQUIRE((trace = popen(command, "r")) != NULL);
    while (fgets(line, sizeof line, trace) != NULL) {
        if (strstr(line, "\"end\"") != NULL) inside = false;
        if (inside) CHECK_STR(line, "");
        if (strstr(line, "\"begin\"") != NULL) inside = true, ++seen;
    }
    CHECK_EQ(pclose(trace), 0);
    CHECK_EQ(seen, 1);
}

/* --- seeing inside --- */

/* "%p" in the name of the file is the process that reports. */
static void a_child_reports_itself(void) {
    static char text[65536];
    char folder[64], path[128];
    spdl_loader_desc desc = desc_of(1);
    spdl_loader_status status;
    spdl_loader *l;
    FILE *file;
    TEST_NEEDS_PROCESSES();
    test_folder(folder, sizeof folder);
    (void)snprintf(path, sizeof path, "%s/loader-%%p.jsonl", folder);
    test_setenv("SPDL_REPORT", path);
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(90),
                SPDL_PIPE(copied), IN_BATCHES(5), SPDL_SINK(2))) == SPDL_OK);
    takes_all(l, 90, 0, SPDL_END);
    spdl_loader_get_status(l, &status);
    spdl_loader_close(l);
    test_setenv("SPDL_REPORT", NULL);
    (void)snprintf(path, sizeof path, "%s/loader-%lld.jsonl", folder, (long long)status.pid);
    REQUIRE((file = fopen(path, "r")) != NULL);
    text[fread(text, 1, sizeof text - 1, file)] = '\0';
    (void)fclose(file);
    CHECK(strstr(text, "\"name\":\"copied\"") != NULL);
    CHECK(strstr(text, "\"delivered\":18") != NULL);
    CHECK(strstr(text, "\"final\":true") != NULL);
    CHECK(test_folder_remove(folder));
    all_gone();
}

static uint32_t *events;
static void counts_events(spdl_event event, const char *name, uint64_t number, void *user) {
    (void)number, (void)user;
    if (event == SPDL_EVENT_TASK_BEGIN && strcmp(name, "copied") == 0)
        __atomic_add_fetch(events, 1, __ATOMIC_RELAXED);
}

/* A profiler of the user's is told, too. */
static void profilers_are_told(void) {
    spdl_loader_desc desc = desc_of(2);
    spdl_loader *l;
    TEST_NEEDS_PROCESSES();
    events = shared_flag();
    desc.pipeline.profiler.event_fn = counts_events;
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(90),
                SPDL_PIPE(copied), IN_BATCHES(5), SPDL_SINK(2))) == SPDL_OK);
    takes_all(l, 90, 0, SPDL_END);
    CHECK_EQ(*events, 90);
    spdl_loader_close(l);
    all_gone();
}

/* --- what a loader is made of --- */

static char own_blocks[1 << 16];
static size_t own_used;

static void *own_alloc(size_t bytes, size_t align, void *user) {
    char *at;
    (void)user;
    own_used = (own_used + align - 1) / align * align;
    at = own_blocks + own_used;
    own_used += bytes;
    return own_used <= sizeof own_blocks ? at : NULL;
}

static void own_free(void *memory, size_t bytes, void *user) {
    (void)memory, (void)bytes, (void)user;
}

/* Of one row: what its calls and batches write lies there. */
static void a_row_has_blocks_of_its_own(void) {
    const spdl_allocator own = { own_alloc, own_free, NULL };
    spdl_pipeline_desc desc = { .workers = 2 };
    spdl_pipeline *p = NULL;
    spdl_batch *batch = NULL;
    uint64_t next = 0;
    own_used = 0;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(RECORDS(100),
                SPDL_BATCH(5, .item_bytes = sizeof(record), .allocator = &own),
                SPDL_SINK(2))) == SPDL_OK);
    while (SPDL_NEXT(p, &batch, SPDL_SECONDS(15)) == SPDL_OK) {
        CHECK((char *)batch->data >= own_blocks &&
              (char *)batch->data < own_blocks + sizeof own_blocks);
        for (size_t i = 0; i < batch->count; ++i)
            CHECK(record_is((const record *)batch->data + i, next++, 0));
        spdl_batch_free(batch);
    }
    CHECK_EQ(next, 100);
    spdl_pipeline_destroy(p);
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
    desc.slot_count = 40;
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
        CHECK_EQ(((const spdl_loader_batch *)item)->sequence, k % 3);
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

static spdl_result take_from_loader(spdl_loader *l, uint64_t *next, char *text) {
    const spdl_pipeline_desc desc = { .logger = { log_nothing, NULL } };
    spdl_pipeline *p;
    spdl_result result;
    void *taken;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
                SPDL_FROM(spdl_loader_batch, spdl_loader_next_fn, l,
                          .free_item = spdl_loader_batch_free), SPDL_SINK(9))) == SPDL_OK);
    usleep(30000); /* the sink has all slots */
    while ((result = spdl_pipeline_next(p, &taken, SPDL_SECONDS(15))) == SPDL_OK) {
        CHECK(record_is((const record *)((spdl_loader_batch *)taken)->data, (*next)++, 0));
        spdl_loader_batch_free(taken);
    }
    snprintf(text, SPDL_TEXT_BYTES, "%s", spdl_pipeline_error(p)->text);
    spdl_pipeline_destroy(p);
    return result;
}

/* The pipeline gives them back; the loader has the text of a failure. */
static void a_pipeline_may_hold_all_slots(void) {
    for (int fails = 0; fails < 2; ++fails) {
        fate harm = { .at = fails ? 33 : 1000, .how = FAIL };
        spdl_loader_desc desc = desc_of(1);
        char text[SPDL_TEXT_BYTES];
        uint64_t next = 0;
        spdl_loader *l;
        desc.slot_count = 2;
        desc.pipeline.logger.log_fn = log_nothing;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(60),
                    SPDL_PIPE(meets_its_fate, .ctx = &harm), IN_BATCHES(1),
                    SPDL_SINK(2))) == SPDL_OK);
        CHECK_EQ(take_from_loader(l, &next, text), fails ? SPDL_E_STAGE : SPDL_END);
        CHECK_EQ(next, fails ? 33 : 60);
        CHECK_STR(text, fails ? "stage 0 'from', item 33: a stage function failed" : "");
        CHECK_STR(fails ? spdl_loader_error(l)->text : "",
                  fails ? "stage 1 'meets_its_fate', item 33: as planned" : "");
        spdl_loader_close(l);
    }
    all_gone();
}

/* A child that is told to begin again, and cannot, as a call does not return. */
static void a_rewind_ends_a_call_that_hangs(void) {
    TEST_NEEDS_PROCESSES();
    for (int held = 0; held < 2; ++held) {
        spdl_loader_desc desc = desc_of(2);
        fate harm = { .at = 2, .how = HANG, .done = shared_flag() };
        spdl_loader_batch batch;
        spdl_loader *l;
        desc.slot_count = 2;
        desc.hang_timeout = PATIENCE;
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
    desc.slot_count = 2;
    desc.hang_timeout = PATIENCE;
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(2), IN_BATCHES(1),
                SPDL_SINK(2))) == SPDL_OK);
    for (int i = 0; i < 2; ++i)
        REQUIRE(spdl_loader_next(l, &held[i], SPDL_SECONDS(15)) == SPDL_OK);
    CHECK_EQ(spdl_loader_next(l, &batch, SPDL_FOREVER), SPDL_E_LIMIT);
    for (int i = 0; i < 2; ++i) CHECK_EQ(spdl_loader_done(l, &held[i]), SPDL_OK);
    usleep((useconds_t)(1.5e6 * PATIENCE));
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
    desc.hang_timeout = PATIENCE;
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

/* An event loop: next with a timeout of 0, and poll on ready_fd after it found nothing. Every
   batch, the end and the death of the child arrive without a wait in next. */
static void an_event_loop_is_told(void) {
    static const fate_how hows[] = { KILL, EXIT_0 };
    TEST_NEEDS_PROCESSES();
    for (int round = 0; round < 3; ++round) {
        spdl_loader_desc desc = desc_of(1 + round % 2);
        fate harm = { .at = round < 2 ? 150 : UINT64_MAX, .how = hows[round % 2] };
        spdl_loader_batch batch;
        spdl_loader *l;
        spdl_result result;
        uint64_t next = 0, waits = 0;
        int ends[2];
        REQUIRE(pipe(ends) == 0);
        if (round == 2) { /* as in a daemon: the first descriptor is one as any other */
            REQUIRE(dup2(ends[1], 0) == 0 && close(ends[1]) == 0);
            ends[1] = 0;
        }
        desc.ready_fd = &ends[1];
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(200),
                    SPDL_PIPE(meets_its_fate, .ctx = &harm), IN_BATCHES(5),
                    SPDL_SINK(2))) == SPDL_OK);
        while ((result = spdl_loader_next(l, &batch, 0)) == SPDL_OK || result == SPDL_TIMEOUT) {
            struct pollfd at = { .fd = ends[0], .events = POLLIN };
            uint64_t one = 0;
            if (result == SPDL_OK) {
                CHECK(record_is((const record *)batch.data, next, 0));
                next += batch.count;
                CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
                continue;
            }
            ++waits;
            if (!CHECK_EQ(poll(&at, 1, 20000), 1)) break; /* an event was lost */
            CHECK_EQ(read(ends[0], &one, sizeof one), sizeof one);
            CHECK_EQ(one, 1);
        }
        CHECK_EQ(result, round < 2 ? SPDL_E_PROCESS : SPDL_END);
        CHECK(round < 2 ? next <= 150 : next == 200);
        CHECK(waits > 0); /* the child begins */
        spdl_loader_close(l);
        close(ends[0]);
        close(ends[1]);
        all_gone();
    }
}

/* How many items a batch has is looked at, too. */
static void a_wrong_count_is_seen(void) {
#if SPDL__OS_PROCESSES
    static const uint64_t counts_of[] = { 0, 4, 6, (uint64_t)1 << 62, UINT64_MAX, 5 };
    for (size_t k = 0; k < 2 * sizeof counts_of / sizeof counts_of[0]; ++k) {
        const bool batches = k % 2;
        spdl_loader_desc desc = desc_of(1);
        spdl_loader_batch batch;
        spdl_loader *l;
        spdl__shared_entry *entry;
        const spdl_stage one[] = { RECORDS(40), SPDL_SINK(2) };
        const spdl_stage five[] = { RECORDS(40), IN_BATCHES(5), SPDL_SINK(2) };
        REQUIRE(spdl_loader_open(&l, &desc, batches ? five : one, batches ? 3 : 2) == SPDL_OK);
        entry = spdl__loader_entry(l, 0);
        while (spdl__load(&entry->stamp) != 1) usleep(100);
        entry->count = counts_of[k / 2];
        if (entry->count == 5) --entry->bytes;
        CHECK_EQ(spdl_loader_next(l, &batch, SPDL_SECONDS(15)), SPDL_E_PROCESS);
        CHECK(strstr(spdl_loader_error(l)->text, "impossible value") != NULL);
        spdl_loader_close(l);
    }
    all_gone();
#endif
}

/* --- commands, and ends between them --- */

/* Batches of one record, from `next` on. */
static void takes(spdl_loader *l, uint64_t next, int count) {
    spdl_loader_batch batch;
    while (count-- > 0) {
        const spdl_result result = spdl_loader_next(l, &batch, SPDL_SECONDS(15));
        if (!CHECK_EQ(result, SPDL_OK)) {
            fprintf(stderr, "    %s\n", spdl_loader_error(l)->text);
            return;
        }
        CHECK(record_is((const record *)batch.data, next++, 0));
        CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
    }
}

static void child_signal(const spdl_loader *l, int number) {
    spdl_loader_status status;
    while (spdl_loader_get_status(l, &status), status.pid == 0) usleep(100);
    CHECK_EQ(kill((pid_t)status.pid, number), 0);
}

/* Pages of addresses that are mapped. */
static long mapped_pages(void) {
    FILE *sizes = fopen("/proc/self/statm", "r");
    long pages = 0;
    if (sizes == NULL || fscanf(sizes, "%ld", &pages) != 1) pages = 0;
    if (sizes != NULL) fclose(sizes);
    return pages;
}

/* A loader that is closed leaves no memory, and one that works has no error. */
static void nothing_stays_mapped(void) {
    long before = 0;
    TEST_NEEDS_PROCESSES();
    if (TEST_SANITIZED) TEST_SKIP("a sanitizer maps what it needs");
    for (int i = 0; i < 20; ++i) {
        spdl_loader_desc desc = desc_of(1);
        spdl_loader *l;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(60), SPDL_SINK(2))) == SPDL_OK);
        CHECK_EQ(spdl_loader_error(l)->result, SPDL_OK);
        CHECK_EQ(spdl_loader_error(l)->stage, -1);
        takes(l, 0, 1);
        spdl_loader_close(l);
        if (i == 3) before = mapped_pages();
    }
    CHECK(mapped_pages() < before + 8);
    all_gone();
}

/* A child that dies after a rewind goes on from there, also one that has published nothing. */
static void a_rewind_outlives_a_child(void) {
    TEST_NEEDS_PROCESSES();
    for (uint64_t start = 0; start < 3; ++start) {
        spdl_loader_desc desc = desc_of(1);
        spdl_loader *l;
        desc.max_restarts = 1;
        desc.pipeline.logger.log_fn = log_nothing;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(60), SPDL_SINK(2))) == SPDL_OK);
        CHECK_EQ(spdl_loader_rewind(l, start, SPDL_SECONDS(15)), SPDL_OK);
        child_signal(l, SIGKILL);
        takes(l, start, 3);
        spdl_loader_close(l);
    }
    all_gone();
}

/* A trainer that only looks, and never waits, learns of every end. */
static void who_only_looks_learns_of_ends(void) {
    TEST_NEEDS_PROCESSES();
    CHECK_EQ(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), 0);
    for (int how = 0; how < 4; ++how) {
        spdl_loader_desc desc = desc_of(1);
        fate harm = { .at = 3, .how = how == 0 ? KILL : HANG };
        spdl_loader_status status;
        spdl_loader_batch batch;
        spdl_loader *l;
        spdl_result result = SPDL_TIMEOUT;
        const uint64_t since = spdl_time_ns();
        if (how == 1 || how == 3) desc.hang_timeout = PATIENCE;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(100),
                    SPDL_PIPE(meets_its_fate, .ctx = &harm), SPDL_SINK(2))) == SPDL_OK);
        if (how > 0) takes(l, 0, 2);
        spdl_loader_get_status(l, &status);
        if (how == 2) kill((pid_t)status.supervisor, SIGKILL);
        if (how == 3) {
            kill((pid_t)status.pid, SIGSTOP);
            CHECK_EQ(spdl_loader_rewind(l, 0, 0), SPDL_TIMEOUT);
        }
        while (result >= 0 && spdl_time_ns() - since < (uint64_t)SPDL_SECONDS(10)) {
            result = spdl_loader_next(l, &batch, 0);
            if (result == SPDL_OK) CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
            usleep(500);
        }
        CHECK_EQ(result, SPDL_E_PROCESS);
        spdl_loader_close(l);
        while (waitpid(-1, NULL, 0) > 0) {}
    }
}

/* What was refused is no position: the next life goes on where the run is. */
static void a_refused_position_is_never_begun_at(void) {
    TEST_NEEDS_PROCESSES();
    for (int how = 0; how < 2; ++how) {
        spdl_loader_desc desc = desc_of(1);
        spdl_loader_batch held[2];
        spdl_loader_status status;
        spdl_error error;
        spdl_loader *l;
        desc.slot_count = 2;
        desc.max_restarts = 1;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(40), SPDL_SINK(2))) == SPDL_OK);
        if (how == 0) { /* all that was published is taken */
            for (int i = 0; i < 2; ++i)
                REQUIRE(spdl_loader_next(l, &held[i], SPDL_SECONDS(15)) == SPDL_OK);
            CHECK_EQ(spdl_loader_state_load(l, &nonsense, 1, SPDL_SECONDS(15), &error),
                     SPDL_E_FORMAT);
            child_signal(l, SIGKILL);
            for (int i = 0; i < 2; ++i) CHECK_EQ(spdl_loader_done(l, &held[i]), SPDL_OK);
            takes(l, 2, 38);
        } else { /* it ends before it answers */
            pid_t helper;
            CHECK_EQ(spdl_loader_rewind(l, 10, SPDL_SECONDS(15)), SPDL_OK);
            child_signal(l, SIGSTOP);
            if ((helper = fork()) == 0) {
                usleep(50000);
                child_signal(l, SIGKILL);
                _exit(0);
            }
            CHECK_EQ(spdl_loader_state_load(l, &nonsense, 1, SPDL_SECONDS(15), &error),
                     SPDL_E_FORMAT);
            CHECK_EQ(waitpid(helper, NULL, 0), helper);
            takes(l, 10, 30);
        }
        CHECK_EQ(spdl_loader_next(l, &held[0], SPDL_SECONDS(15)), SPDL_END);
        spdl_loader_get_status(l, &status);
        CHECK_EQ(status.restarts, 1);
        spdl_loader_close(l);
    }
    all_gone();
}

/* A failure that waits behind batches is what it was after a refusal. */
static void a_refusal_keeps_the_failure(void) {
    spdl_loader_desc desc = desc_of(1);
    fate harm = { .at = 2, .how = FAIL };
    spdl_loader_batch batch;
    spdl_error error;
    spdl_loader *l;
    TEST_NEEDS_PROCESSES();
    desc.pipeline.logger.log_fn = log_nothing;
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(40),
                SPDL_PIPE(meets_its_fate, .ctx = &harm), SPDL_SINK(2))) == SPDL_OK);
    while (spdl__load(&spdl__loader_entry(l, 2)->stamp) != 3) usleep(100);
    CHECK_EQ(spdl_loader_state_load(l, &nonsense, 1, SPDL_SECONDS(15), &error), SPDL_E_FORMAT);
    takes(l, 0, 2);
    for (int i = 0; i < 2; ++i) {
        CHECK_EQ(spdl_loader_next(l, &batch, SPDL_SECONDS(15)), SPDL_E_STAGE);
        CHECK(strstr(spdl_loader_error(l)->text, "as planned") != NULL);
        CHECK_EQ(spdl_loader_state_load(l, &nonsense, 1, SPDL_SECONDS(15), NULL), SPDL_E_FORMAT);
    }
    spdl_loader_close(l);
    all_gone();
}

/* After a command that has timed out there is only close. */
static void a_timeout_leaves_it_to_be_closed(void) {
    TEST_NEEDS_PROCESSES();
    for (int how = 0; how < 2; ++how) {
        spdl_loader_desc desc = desc_of(1);
        spdl_loader_batch held, batch;
        char text[SPDL_STATE_BYTES];
        spdl_error error;
        spdl_loader *l;
        desc.logger.log_fn = log_nothing;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(40), SPDL_SINK(2))) == SPDL_OK);
        takes(l, 0, 3);
        REQUIRE(spdl_loader_next(l, &held, SPDL_SECONDS(15)) == SPDL_OK);
        child_signal(l, SIGSTOP);
        CHECK_EQ(how == 0 ? spdl_loader_rewind(l, 5, SPDL_SECONDS(0.02))
                          : spdl_loader_state_load(l, &nonsense, 1, SPDL_SECONDS(0.02), &error),
                 SPDL_TIMEOUT);
        child_signal(l, SIGCONT);
        CHECK_EQ(spdl_loader_next(l, &batch, SPDL_SECONDS(15)), SPDL_E_PROCESS);
        CHECK_STR(spdl_loader_error(l)->text,
                  "loader 'spdl': a load or a rewind timed out: close it");
        CHECK_EQ(spdl_loader_rewind(l, 0, SPDL_SECONDS(15)), SPDL_E_PROCESS);
        CHECK_EQ(spdl_loader_state_save(l, text, sizeof text), SPDL_E_PROCESS);
        CHECK(record_is((const record *)held.data, 3, 0));
        CHECK_EQ(spdl_loader_done(l, &held), SPDL_OK);
        spdl_loader_close(l);
    }
    all_gone();
}

static pid_t trainer;
static void *waits_in_a_child(size_t bytes, size_t align, void *user) {
    void *memory = NULL;
    (void)user;
    while (getpid() != trainer) pause();
    return posix_memalign(&memory, align < 8 ? 8 : align, bytes) == 0 ? memory : NULL;
}
static void frees(void *memory, size_t bytes, void *user) { (void)bytes, (void)user; free(memory); }

/* Without a supervisor, before the child has begun: nobody is waited for. */
static void a_save_without_processes_returns(void) {
    spdl_loader_desc desc = desc_of(1);
    spdl_loader_status status;
    spdl_loader_batch batch;
    spdl_loader *l;
    char text[SPDL_STATE_BYTES];
    pid_t other;
    TEST_NEEDS_PROCESSES();
    CHECK_EQ(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), 0);
    trainer = getpid();
    desc.pipeline.allocator.alloc_fn = waits_in_a_child;
    desc.pipeline.allocator.free_fn = frees;
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(40), SPDL_SINK(2))) == SPDL_OK);
    while (spdl_loader_get_status(l, &status), status.pid == 0) usleep(100);
    kill((pid_t)status.supervisor, SIGKILL);
    CHECK_EQ(spdl_loader_next(l, &batch, SPDL_SECONDS(15)), SPDL_E_PROCESS);
    while (waitpid(-1, NULL, 0) > 0) {}
    if ((other = fork()) == 0) _exit(0);
    usleep(20000);
    CHECK_EQ(spdl_loader_state_save(l, text, sizeof text), SPDL_E_PROCESS);
    CHECK(strstr(text, "its supervisor") != NULL);
    CHECK_EQ(waitpid(other, NULL, 0), other);
    spdl_loader_close(l);
    all_gone();
}

/* The child stands still for so long that the trainer looks around. */
static pid_t stands_still(const spdl_loader *l) {
    pid_t helper;
    child_signal(l, SIGSTOP);
    if ((helper = fork()) != 0) return helper;
    usleep((useconds_t)(0.3e6 * PATIENCE));
    child_signal(l, SIGCONT);
    _exit(0);
}

/* A look long ago is no wait, if nothing was due since: neither with all slots held, nor before a
   rewind. */
static void an_old_look_is_no_wait(void) {
    TEST_NEEDS_PROCESSES();
    for (int rewinds = 0; rewinds < 2; ++rewinds) {
        spdl_loader_desc desc = desc_of(1);
        spdl_loader_batch held[2], batch;
        spdl_loader *l;
        pid_t helper;
        desc.slot_count = 2;
        desc.hang_timeout = PATIENCE;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(4), SPDL_SINK(1))) == SPDL_OK);
        for (int i = 0; i < 2; ++i)
            REQUIRE(spdl_loader_next(l, &held[i], SPDL_SECONDS(15)) == SPDL_OK);
        if (rewinds) {
            helper = stands_still(l);
            for (int i = 0; i < 2; ++i) CHECK_EQ(spdl_loader_done(l, &held[i]), SPDL_OK);
            CHECK_EQ(spdl_loader_next(l, &batch, 0), SPDL_TIMEOUT);
            CHECK_EQ(waitpid(helper, NULL, 0), helper);
        } else {
            CHECK_EQ(spdl_loader_next(l, &batch, 0), SPDL_TIMEOUT);
        }
        usleep((useconds_t)(1.5e6 * PATIENCE));
        helper = stands_still(l);
        if (rewinds) CHECK_EQ(spdl_loader_rewind(l, 2, SPDL_SECONDS(15)), SPDL_OK);
        else for (int i = 0; i < 2; ++i) CHECK_EQ(spdl_loader_done(l, &held[i]), SPDL_OK);
        takes(l, 2, 2);
        CHECK_EQ(waitpid(helper, NULL, 0), helper);
        spdl_loader_close(l);
    }
    all_gone();
}

static void *keeps_a_file(void *arg) {
    flockfile(stdin);
    __atomic_store_n((int *)arg, 1, __ATOMIC_RELEASE);
    while (forever) pause();
    return NULL;
}

static void *keeps_stdout(void *arg) {
    flockfile(stdout);
    __atomic_store_n((int *)arg, 1, __ATOMIC_RELEASE);
    while (forever) pause();
    return NULL;
}

SPDL_FN(exits_beside_a_lock, record, record) {
    static int locked;
    pthread_t thread;
    *out = in;
    if (in->number != 4 || pthread_create(&thread, NULL, keeps_a_file, &locked) != 0)
        return SPDL_OK;
    while (!__atomic_load_n(&locked, __ATOMIC_ACQUIRE)) usleep(100);
    locked = SPDL__TSAN; /* whose own exit wants stdout */
    if (!SPDL__TSAN && pthread_create(&thread, NULL, keeps_stdout, &locked) != 0)
        return SPDL_E_THREAD;
    while (!__atomic_load_n(&locked, __ATOMIC_ACQUIRE)) usleep(100);
    exit(9);
}

SPDL_FN(aborts_on_a_stack, record, record) {
    static char words[1 << 16];
    const stack_t stack = { .ss_sp = words, .ss_size = sizeof words };
    *out = in;
    if (in->number != 4) return SPDL_OK;
    memset(words, 0xff, 64);
    (void)sigaltstack(&stack, NULL);
    abort();
}

/* Deeper than any stack. */
static int descends(volatile const char *above, int depth) {
    volatile char here[4096];
    here[0] = above[0];
    return depth > 0 ? descends(here, depth - 1) + here[0] : here[0];
}

SPDL_FN(descends_for_ever, record, record) {
    char top = 0;
    *out = in;
    if (in->number == 4) return (spdl_result)descends(&top, 1 << 30);
    if (in->number > 4) usleep(100000); /* other calls run, too */
    return SPDL_OK;
}

/* The handler of faults has a stack of its own, and notes which of several calls it was. */
static void a_stack_that_overflows_is_named(void) {
    spdl_loader_desc desc = desc_of(3);
    spdl_loader_batch batch;
    spdl_result result;
    spdl_loader *l;
    TEST_NEEDS_PROCESSES();
    if (TEST_SANITIZED) TEST_SKIP("a sanitizer handles faults itself");
    desc.pipeline.logger.log_fn = log_nothing;
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(20),
                SPDL_PIPE(descends_for_ever, .concurrency = 3), SPDL_SINK(2))) == SPDL_OK);
    while ((result = spdl_loader_next(l, &batch, SPDL_SECONDS(15))) == SPDL_OK)
        CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
    CHECK_EQ(result, SPDL_E_PROCESS);
    CHECK(strstr(spdl_loader_error(l)->text, "was killed by SIGSEGV, in stage 1 "
                                             "'descends_for_ever', item 4") != NULL);
    spdl_loader_close(l);
    all_gone();
}

/* A thread that has a FILE for ever, or a stack of a library's: the end is what it was. */
static void ends_beside_what_others_hold(void) {
    const spdl_stage rows[] = { SPDL_PIPE(exits_beside_a_lock), SPDL_PIPE(aborts_on_a_stack) };
    const char *says[] = { "has ended with code 9", "was killed by SIGABRT, " };
    TEST_NEEDS_PROCESSES();
    for (int i = 0; i < (TEST_FAULTS_CAUGHT ? 1 : 2); ++i) {
        spdl_loader_desc desc = desc_of(1);
        spdl_loader_batch batch;
        spdl_loader *l;
        spdl_result result;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(40), rows[i], SPDL_SINK(2))) ==
                SPDL_OK);
        while ((result = spdl_loader_next(l, &batch, SPDL_SECONDS(5))) == SPDL_OK)
            CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
        CHECK_EQ(result, SPDL_E_PROCESS);
        if (!CHECK(strstr(spdl_loader_error(l)->text, says[i]) != NULL))
            fprintf(stderr, "    %s\n", spdl_loader_error(l)->text);
        spdl_loader_close(l);
    }
    all_gone();
}

SPDL_FN(stays, record, record) {
    *out = in;
    if (in->number < 4) return SPDL_OK;
    __atomic_add_fetch((uint32_t *)spdl_ctx(task), 1, __ATOMIC_SEQ_CST);
    for (;;) pause();
}

/* Of many calls the first are named. */
static void the_first_calls_are_named(void) {
    spdl_loader_desc desc = desc_of(12);
    uint32_t *inside = shared_flag();
    spdl_loader *l;
    spdl_loader_batch batch;
    TEST_NEEDS_PROCESSES();
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(100), SPDL_PIPE(stays,
                .concurrency = 11, .ctx = inside), SPDL_SINK(12))) == SPDL_OK);
    while (__atomic_load_n(inside, __ATOMIC_ACQUIRE) < 11) usleep(100);
    child_signal(l, SIGKILL);
    while (spdl_loader_next(l, &batch, SPDL_SECONDS(15)) == SPDL_OK)
        CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
    CHECK_EQ(spdl_loader_error(l)->item, 4);
    if (!CHECK(strstr(spdl_loader_error(l)->text, "; calls that ran: stage 1 'stays', item 4, "
                      "stage 1 'stays', item 5, stage 1 'stays', item 6") != NULL))
        fprintf(stderr, "    %s\n", spdl_loader_error(l)->text);
    spdl_loader_close(l);
    all_gone();
}

/* A stage runs a program that sets up the terminal of the process that opened the loader. */
SPDL_FN(sets_the_terminal, record, record) {
    struct termios now;
    pid_t program;
    int how = 0;
    *out = in;
    if (in->number != 3) return SPDL_OK;
    if ((program = fork()) == 0) _exit(tcgetattr(0, &now) || tcsetattr(0, TCSANOW, &now));
    return waitpid(program, &how, 0) == program && how == 0
               ? SPDL_OK : spdl_fail(task, "the program has ended with %d", how);
}

static void a_terminal_stops_no_program(void) {
    int master, how;
    pid_t host;
    TEST_NEEDS_PROCESSES();
    master = posix_openpt(O_RDWR | O_NOCTTY);
    if (master < 0 || grantpt(master) != 0 || unlockpt(master) != 0) TEST_SKIP("no terminals");
    if ((host = fork()) == 0) {
        spdl_loader_desc desc = desc_of(1);
        spdl_loader *l;
        int terminal;
        (void)setsid();
        terminal = open(ptsname(master), O_RDWR); /* now it is that of the session */
        if (terminal < 0 || dup2(terminal, 0) != 0) _exit(1);
        if (spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(20),
                SPDL_PIPE(sets_the_terminal), SPDL_SINK(2))) != SPDL_OK)
            _exit(2);
        takes_all(l, 20, 0, SPDL_END);
        spdl_loader_close(l);
        _exit(0);
    }
    CHECK_EQ(waitpid(host, &how, 0), host);
    CHECK_EQ(how, 0);
    close(master);
}

static int handled;
static void is_the_programs(int number) { (void)number, handled = 1; }

/* Signals at item 4, and the death of the child by them. */
SPDL_FN(raises, record, record) {
    const int number = (int)(intptr_t)spdl_ctx(task);
    *out = in;
    if (in->number == 4) {
        (void)raise(number);
        if (handled) return spdl_fail(task, "a handler of the program ran");
    }
    return SPDL_OK;
}

static void signals_of_the_program_are_not_the_childs(void) {
    const int number[] = { SIGUSR1, SIGUSR2, SIGALRM, SIGRTMIN + 3 };
    char says[2][80] = { "was killed by SIGALRM, in stage 1 'raises', item 4", "" };
    TEST_NEEDS_PROCESSES();
    (void)snprintf(says[1], sizeof says[1], "was killed by signal %d, in stage 1", SIGRTMIN + 3);
    for (int i = 0; i < 4; ++i) {
        spdl_loader_desc desc = desc_of(1);
        spdl_loader_batch batch;
        spdl_loader *l;
        (void)signal(number[i], is_the_programs);
        desc.logger.log_fn = desc.pipeline.logger.log_fn = log_nothing;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(20),
                    SPDL_PIPE(raises, .ctx = (void *)(intptr_t)number[i]),
                    SPDL_SINK(2))) == SPDL_OK);
        if (i < 2) {
            spdl_loader_status status;
            takes(l, 0, 2);
            spdl_loader_get_status(l, &status);
            kill((pid_t)status.pid, number[i]);
            kill((pid_t)status.supervisor, number[i]);
            takes(l, 2, 18);
        } else {
            while (spdl_loader_next(l, &batch, SPDL_SECONDS(15)) == SPDL_OK)
                CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
            if (!CHECK(strstr(spdl_loader_error(l)->text, says[i - 2]) != NULL))
                fprintf(stderr, "    %s\n", spdl_loader_error(l)->text);
        }
        spdl_loader_close(l);
        CHECK_EQ(handled, 0);
    }
    all_gone();
}

/* What the program ignores the child does, too, and a fault is the program's if it handles it. */
static void signals_that_are_the_childs(void) {
    const int number[] = { SIGALRM, SIGBUS };
    TEST_NEEDS_PROCESSES();
    for (int i = 0; i < 2; ++i) {
        spdl_loader_desc desc = desc_of(1);
        spdl_loader_batch batch;
        spdl_loader *l;
        (void)signal(number[i], i == 0 ? SIG_IGN : is_the_programs);
        desc.pipeline.logger.log_fn = log_nothing;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(20),
                    SPDL_PIPE(raises, .ctx = (void *)(intptr_t)number[i]),
                    SPDL_SINK(2))) == SPDL_OK);
        takes(l, 0, i == 0 ? 20 : 4);
        CHECK_EQ(spdl_loader_next(l, &batch, SPDL_SECONDS(15)), i == 0 ? SPDL_END : SPDL_E_STAGE);
        if (i == 1)
            CHECK_STR(spdl_loader_error(l)->text,
                      "stage 1 'raises', item 4: a handler of the program ran");
        spdl_loader_close(l);
        (void)signal(number[i], SIG_DFL);
    }
    all_gone();
}

/* Another thread has a FILE for as long as it waits for input: open and close wait for no FILE. */
static void files_of_other_threads_are_theirs(void) {
    spdl_loader_desc desc = desc_of(1);
    uint64_t since;
    spdl_loader *l;
    pthread_t thread;
    int locked = 0, pipes[2];
    char word[64] = "";
    FILE *written = NULL;
    TEST_NEEDS_PROCESSES();
    if (TEST_SANITIZED) TEST_SKIP("a sanitizer starts no threads behind a fork of several");
    REQUIRE(pipe(pipes) == 0 && (written = fdopen(pipes[1], "w")) != NULL);
    (void)fputs("once", written); /* not twice, by the child */
    REQUIRE(pthread_create(&thread, NULL, keeps_a_file, &locked) == 0);
    while (!__atomic_load_n(&locked, __ATOMIC_ACQUIRE)) usleep(100);
    desc.fork_with_threads = true;
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(20), SPDL_SINK(2))) == SPDL_OK);
    takes_all(l, 20, 0, SPDL_END);
    since = spdl_time_ns();
    spdl_loader_close(l);
    CHECK(spdl_time_ns() - since < 900000000u); /* the child was not killed */
    CHECK_EQ(fclose(written), 0);
    CHECK_EQ(read(pipes[0], word, sizeof word), 4);
    close(pipes[0]);
    all_gone();
}

/* --- arguments --- */

/* What is written to stderr goes to a file. */
static int stderr_was = -1;
static void stderr_to(int file) {
    stderr_was = dup(STDERR_FILENO);
    REQUIRE(stderr_was >= 0 && dup2(file, STDERR_FILENO) >= 0);
}
static void stderr_back(void) {
    REQUIRE(dup2(stderr_was, STDERR_FILENO) >= 0 && close(stderr_was) == 0);
}

/* Texts that are not there or too many, batches that are not its own: every function refuses them,
   and goes on. */
static void arguments_are_checked(void) {
    static char text[SPDL_STATE_BYTES], long_text[30000];
    static const char *many[2000];
    const char *const texts[] = { nonsense, NULL }, *const long_texts[] = { long_text, long_text,
                                                                            long_text, "" };
    const spdl_stage rows[] = { RECORDS(40), SPDL_SINK(2) };
    spdl_loader_desc desc = desc_of(1);
    spdl_loader_batch batch = { .count = 0 }, others, changed;
    spdl_loader *l, *other, *none = (spdl_loader *)text;
    spdl_error error;
    TEST_NEEDS_PROCESSES();
    memset(long_text, 'x', sizeof long_text - 1);
    for (int i = 0; i < 2000; ++i) many[i] = "x";
    desc.arena_bytes = 1u << 30;
    CHECK_EQ(spdl_loader_open(NULL, &desc, rows, 2), SPDL_E_INVALID);
    desc.error = &error;
    CHECK_EQ(spdl_loader_open(&none, &desc, rows, 100000), SPDL_E_INVALID);
    CHECK(none == NULL && strstr(error.text, "too many stages") != NULL);
    REQUIRE(spdl_loader_open(&l, &desc, rows, 2) == SPDL_OK);
    REQUIRE(spdl_loader_open(&other, &desc, rows, 2) == SPDL_OK);
    REQUIRE(spdl_loader_next(l, &batch, SPDL_SECONDS(15)) == SPDL_OK);
    REQUIRE(spdl_loader_next(other, &others, SPDL_SECONDS(15)) == SPDL_OK);
    CHECK_EQ(spdl_loader_next(NULL, &changed, 0), SPDL_E_INVALID);
    CHECK_EQ(spdl_loader_next(l, NULL, 0), SPDL_E_INVALID);
    CHECK_EQ(spdl_loader_done(NULL, &batch), SPDL_E_INVALID);
    CHECK_EQ(spdl_loader_done(l, NULL), SPDL_E_INVALID);
    CHECK_EQ(spdl_loader_done(l, &others), SPDL_E_INVALID);
    changed = batch;
    changed.slot_ = 1 << 20;
    CHECK_EQ(spdl_loader_done(l, &changed), SPDL_E_INVALID);
    changed = batch;
    changed.ticket_ = 0;
    CHECK_EQ(spdl_loader_done(l, &changed), SPDL_E_INVALID);
    CHECK_EQ(spdl_loader_rewind(NULL, 0, 0), SPDL_E_INVALID);
    CHECK_EQ(spdl_loader_state_save(NULL, text, sizeof text), SPDL_E_INVALID);
    CHECK_EQ(spdl_loader_state_save(l, NULL, sizeof text), SPDL_E_INVALID);
    CHECK_EQ(spdl_loader_state_save(l, text, 0), SPDL_E_INVALID);
    CHECK_EQ(spdl_loader_state_load(l, NULL, 1, 0, &error), SPDL_E_INVALID);
    CHECK_EQ(spdl_loader_state_load(l, texts, 2, 0, &error), SPDL_E_INVALID);
    CHECK(strstr(error.text, "text 1 is not there") != NULL);
    CHECK_EQ(spdl_loader_state_load(l, long_texts, 4, 0, &error), SPDL_E_LIMIT);
    CHECK(strstr(error.text, "4 texts are more than a loader takes") != NULL);
    CHECK_EQ(spdl_loader_state_load(l, many, 2000, 0, &error), SPDL_E_LIMIT);
    spdl_loader_arena(l, NULL, NULL, NULL);
    spdl_loader_batch_free(NULL);
    spdl_loader_batch_free(&batch);
    takes(l, 1, 39);
    spdl_loader_close(l);
    spdl_loader_close(other);
    all_gone();
}

/* Without a desc, and with rows of another header. */
static void a_loader_of_defaults(void) {
#if SPDL__OS_PROCESSES
    spdl_stage rows[] = { RECORDS(20), SPDL_SINK(2) };
    spdl_loader *l;
    char said[200] = "";
    FILE *file = tmpfile();
    if (spdl__os_threads() == 1) {
        REQUIRE(spdl_loader_open(&l, NULL, rows, 2) == SPDL_OK);
        takes(l, 0, 20);
        spdl_loader_close(l);
    }
    rows[0].layout_ = 1;
    REQUIRE(file != NULL);
    stderr_to(fileno(file));
    CHECK_EQ(spdl_loader_open(&l, NULL, rows, 2), SPDL_E_INVALID);
    stderr_back();
    CHECK(l == NULL && pread(fileno(file), said, sizeof said - 1, 0) > 0);
    CHECK(strstr(said, "these rows were compiled with an older spdl.h") != NULL);
    fclose(file);
    all_gone();
#endif
}

SPDL_FN(goes_through, record, record) {
    (void)task;
    *out = in;
    return SPDL_OK;
}

/* There are slots for as many calls as the child makes, which by default has all processors. */
static void slots_are_for_the_childs_workers(void) {
    int slots[2];
    TEST_NEEDS_PROCESSES();
    for (int given = 0; given < 2; ++given) {
        spdl_loader_desc desc = desc_of(spdl_cores());
        spdl_loader_status status;
        spdl_loader *l;
        if (!given) desc.pipeline.workers = 0;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(20),
                    SPDL_PIPE(goes_through, .concurrency = SPDL_ALL), SPDL_SINK(2))) == SPDL_OK);
        spdl_loader_get_status(l, &status);
        slots[given] = status.slot_count;
        takes(l, 0, 20);
        spdl_loader_close(l);
    }
    CHECK(slots[0] == slots[1] || spdl_cores() == 1);
    all_gone();
}

SPDL_FN(sees_its_place, record, record) {
    char name[16] = "";
    *out = in;
    if (getenv("SPDL_DOCTOR") != NULL) return spdl_fail(task, "the child has SPDL_DOCTOR");
    (void)prctl(PR_GET_NAME, name);
    return strcmp(name, (const char *)spdl_ctx(task)) == 0 ? SPDL_OK : spdl_fail(task, "%s", name);
}

static int doctors_refused;
static void counts_doctors(spdl_log_level level, const char *text, void *user) {
    (void)user;
    doctors_refused += level == SPDL_LOG_WARN && strstr(text, "no doctor in another") != NULL;
}

/* A doctor is refused in words, and not started in the child; an environment may be empty. */
static void a_child_has_no_doctor(void) {
    static const spdl_doctor_desc doctor = { .seconds = 1 };
    static char loads[] = "loads-0", its_own[] = "its own-0";
    TEST_NEEDS_PROCESSES();
    CHECK_EQ(setenv("SPDL_DOCTORS", "1", 1), 0);
    for (int how = 0; how < 3; ++how) {
        spdl_loader_desc desc = desc_of(1);
        spdl_loader *l;
        desc.logger.log_fn = counts_doctors;
        desc.name = "loads";
        if (how == 0) desc.pipeline.doctor = &doctor;
        if (how == 1) CHECK_EQ(setenv("SPDL_DOCTOR", "1", 1), 0);
        if (how == 2) CHECK_EQ(clearenv(), 0);
        if (how == 2) desc.pipeline.name = "its own";
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(20),
                    SPDL_PIPE(sees_its_place, .ctx = how == 2 ? its_own : loads),
                    SPDL_SINK(2))) == SPDL_OK);
        takes(l, 0, 20);
        CHECK_EQ(doctors_refused, how < 2 ? how + 1 : 2);
        spdl_loader_close(l);
    }
    all_gone();
}

/* Warnings of the child are lines of the loader; what is less is not there. */
static void a_child_warns_on_stderr(void) {
    fate harm = { .at = 3, .how = FAIL };
    spdl_loader_desc desc = desc_of(1);
    char said[500] = "";
    FILE *file = tmpfile();
    spdl_loader_batch batch;
    spdl_loader *l;
    TEST_NEEDS_PROCESSES();
    REQUIRE(file != NULL);
    desc.pipeline.trace = "/nowhere/trace.json";
    stderr_to(fileno(file));
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(20),
                SPDL_PIPE(meets_its_fate, .ctx = &harm, .max_failures = 1),
                SPDL_SINK(2))) == SPDL_OK);
    while (spdl_loader_next(l, &batch, SPDL_SECONDS(15)) == SPDL_OK)
        CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
    spdl_loader_close(l);
    stderr_back();
    CHECK(pread(fileno(file), said, sizeof said - 1, 0) > 0);
    if (!CHECK(strncmp(said, "spdl: loader 'spdl': ", 21) == 0 && strstr(said, "trace") != NULL))
        fprintf(stderr, "    %s\n", said);
    CHECK(strstr(said, "as planned") != NULL && strstr(said, "(tolerated)") == NULL);
    fclose(file);
    all_gone();
}

/* --- memory and calls of the system that are not there --- */

/* Each block of a child is refused once: it ends with a reason, or has all. */
static void memory_of_a_child_may_end(void) {
    bool whole = false;
    TEST_NEEDS_PROCESSES();
    opener = getpid();
    for (int k = 0; k < 60 && !whole; ++k) {
        spdl_loader_desc desc = desc_of(1);
        char said[200] = "";
        FILE *file = tmpfile();
        spdl_loader_batch batch;
        spdl_loader *l;
        spdl_result result;
        uint64_t taken = 0;
        REQUIRE(file != NULL);
        desc.pipeline.logger.log_fn = log_nothing;
        blocks_left = k;
        stderr_to(fileno(file));
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(5), SPDL_SINK(2))) == SPDL_OK);
        blocks_left = -1;
        while ((result = spdl_loader_next(l, &batch, SPDL_SECONDS(15))) == SPDL_OK) {
            CHECK(record_is((const record *)batch.data, taken++, 0));
            CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
        }
        stderr_back();
        whole = result == SPDL_END;
        CHECK(whole ? taken == 5 : result == (k == 0 ? SPDL_E_PROCESS : SPDL_E_NOMEM));
        (void)!pread(fileno(file), said, sizeof said - 1, 0);
        if (k == 0)
            CHECK_STR(said, "spdl: loader 'spdl': the child cannot begin: out of memory\n");
        if (k == 1) CHECK_STR(spdl_loader_error(l)->text, "loader: out of memory");
        spdl_loader_close(l);
        fclose(file);
    }
    CHECK(whole);
    all_gone();
}

/* The system answers in the ways that no file and no limit of a test shows. */
static void answers_of_the_system(void) {
#if SPDL__OS_PROCESSES
    const int cpus[] = { SPDL__CPUS_MAX };
    const spdl_policy policy = { .cpus = cpus, .cpu_count = 1 };
    void *memory = &memory;
    int file = dup(STDIN_FILENO), status;
    pid_t orphan;
    CHECK(spdl__os_clock_read(9999) == SPDL__NEVER);
    REQUIRE(file >= 0 && close(file) == 0);
    CHECK_STR(spdl__os_file_close(file), strerror(EBADF));
    CHECK(spdl__os_file_map(STDIN_FILENO, 0, false) == NULL);
    CHECK(!spdl__os_thread_set_policy(&policy));
    CHECK_STR(spdl__os_shared_make(&memory, (uint64_t)1 << 63), strerror(EINVAL));
    CHECK(memory == NULL);
    maps_left = 0;
    CHECK_STR(spdl__os_shared_make(&memory, 4096), strerror(ENOMEM));
    CHECK(memory == NULL);
    maps_left = 0;
    CHECK(spdl__os_page(true) == NULL);
    if ((orphan = fork()) == 0) {
        spdl__os_signals set;
        const char *reason = spdl__os_process_begins(1 << 30, "orphan", true, &set);
        _exit(reason == NULL || strcmp(reason, "its parent has ended") != 0);
    }
    CHECK(waitpid(orphan, &status, 0) == orphan && status == 0);
#endif
}

/* A pipe that is full, and signals, keep no thread that writes to stderr. */
static void stderr_is_not_waited_for(void) {
#if SPDL__OS_PROCESSES
    static char text[5000], got[5000];
    struct rlimit old, low;
    int ends[2], full;
    const char *reason;
    pid_t helper;
    const pid_t self = getpid();
    REQUIRE(pipe(ends) == 0);
    memset(text, 'x', sizeof text);
    stderr_to(ends[1]); /* more than one piece */
    reason = spdl__os_stderr_write(text, sizeof text, SPDL_SECONDS(5));
    stderr_back();
    CHECK(reason == NULL && read(ends[0], got, sizeof got) == (ssize_t)sizeof got);
    CHECK(memcmp(text, got, sizeof got) == 0);
    REQUIRE(fcntl(ends[1], F_SETFL, O_NONBLOCK) == 0);
    while (write(ends[1], text, sizeof text) > 0 || write(ends[1], text, 1) > 0) {}
    REQUIRE(fcntl(ends[1], F_SETFL, 0) == 0);
    (void)signal(SIGUSR1, is_the_programs);
    if ((helper = fork()) == 0) {
        while (getppid() == self && kill(self, SIGUSR1) == 0) usleep(1000);
        _exit(0);
    }
    while (!*(volatile int *)&handled) usleep(100);
    stderr_to(ends[1]);
    reason = spdl__os_stderr_write(text, 1, 20000000);
    stderr_back();
    kill(helper, SIGKILL);
    CHECK(reason == NULL && waitpid(helper, NULL, 0) == helper);
    CHECK_EQ(read(ends[0], got, sizeof got), sizeof got);
    REQUIRE(getrlimit(RLIMIT_NOFILE, &old) == 0);
    low = old;
    low.rlim_cur = 0; /* poll cannot tell */
    stderr_to(ends[1]);
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
    reason = spdl__os_stderr_write(text, 1, SPDL_SECONDS(5));
    CHECK_EQ(fcntl(ends[1], F_SETFL, O_NONBLOCK), 0);
    while (write(ends[1], text, sizeof text) > 0 || write(ends[1], text, 1) > 0) {}
    CHECK(reason == NULL && spdl__os_stderr_write(text, 1, SPDL_SECONDS(5)) == NULL); /* EAGAIN */
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &old), 0);
    stderr_back();
    stderr_to(full = open("/dev/full", O_WRONLY));
    reason = spdl__os_stderr_write(text, 1, SPDL_SECONDS(5));
    (void)close(STDERR_FILENO);
    CHECK_STR(spdl__os_stderr_write(text, 1, SPDL_SECONDS(5)), strerror(EBADF));
    stderr_back();
    CHECK_STR(reason, strerror(ENOSPC));
    close(full);
    close(ends[0]);
    close(ends[1]);
#endif
}

/* A limit of the process on files bounds the arena. */
static void a_limit_of_files_is_a_limit_of_memory(void) {
#if SPDL__OS_PROCESSES
    spdl_loader_desc desc = desc_of(1);
    struct rlimit old, low;
    spdl_error error;
    spdl__os_room room;
    spdl_loader *l;
    spdl_result result;
    desc.error = &error;
    REQUIRE(getrlimit(RLIMIT_FSIZE, &old) == 0);
    low = old;
    low.rlim_cur = 65536;
    REQUIRE(setrlimit(RLIMIT_FSIZE, &low) == 0);
    room = spdl__os_memory_room();
    result = spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(5), SPDL_SINK(2)));
    REQUIRE(setrlimit(RLIMIT_FSIZE, &old) == 0);
    CHECK_STR(room.what, "RLIMIT_FSIZE of the process");
    CHECK(room.limit == 65536 && room.left == 65536);
    CHECK_EQ(result, SPDL_E_LIMIT);
    CHECK(strstr(error.text, "RLIMIT_FSIZE of the process is 0.1 MiB, 0.1 MiB of it are left") !=
          NULL);
    all_gone();
#endif
}

/* Below this root the machine has the memory of a file, if it has one. */
static void room_of_machines(void) {
#if SPDL__OS_PROCESSES
    static const struct {
        const char *text, *what;
        uint64_t limit, left;
    } rows[] = {
        { NULL, "no limit", UINT64_MAX, UINT64_MAX },
        { "MemTotal:     1000 kB\nMemFree: 5 kB\n", "no limit", UINT64_MAX, UINT64_MAX },
        { "MemTotal:     1000 kB\nMemAvailable:  400 kB\n", "memory of the machine", 1024000,
          409600 },
        { "MemAvailable:  400 kB\n", "no limit", UINT64_MAX, UINT64_MAX },
    };
    char folder[] = "/tmp/spdl_loader_XXXXXX", command[256], path[256];
    int status;
    pid_t inside;
    REQUIRE(mkdtemp(folder) != NULL);
    (void)snprintf(path, sizeof path, "%s/proc", folder);
    REQUIRE(mkdir(path, 0700) == 0);
    if ((inside = fork()) == 0) {
        if (chroot(folder) != 0 || chdir("/") != 0) _exit(77);
        if (spdl__os_threads() != 0 || spdl_cores() < 1) _exit(9); /* unknown, but no harm */
        for (int i = 0; i < 4; ++i) {
            spdl__os_room room;
            if (rows[i].text != NULL) file_at("/proc", "meminfo", rows[i].text);
            room = spdl__os_room_in("/", "/self");
            if (strcmp(room.what, rows[i].what) != 0 || room.limit != rows[i].limit ||
                room.left != rows[i].left)
                _exit(1 + i);
        }
        _exit(0);
    }
    CHECK_EQ(waitpid(inside, &status, 0), inside);
    (void)snprintf(command, sizeof command, "rm -r %s", folder);
    CHECK_EQ(system(command), 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77) TEST_SKIP("needs chroot");
    CHECK_EQ(status, 0);
#endif
}

/* What opens a loader on a system without one call: its exit code. */
static int opens_without(unsigned number, int argument, unsigned is, const char *says) {
    spdl_loader_desc desc = desc_of(1);
    fate harm = { .at = 10, .how = ABORT };
    spdl_error error;
    spdl_loader_batch batch;
    spdl_loader *l;
    spdl_result result;
    uint64_t taken = 0;
    if (!call_fails(number, argument, is)) return 77;
    desc.error = &error;
    if (spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(20), SPDL_PIPE(meets_its_fate,
                             .ctx = &harm), SPDL_SINK(2))) != SPDL_OK)
        return strstr(error.text, says) == NULL || strstr(error.text, "no room") == NULL;
    while ((result = spdl_loader_next(l, &batch, SPDL_SECONDS(15))) == SPDL_OK) {
        if (!record_is((const record *)batch.data, taken++, 0)) return 2;
        if (spdl_loader_done(l, &batch) != SPDL_OK) return 3;
    }
    if (result != SPDL_E_PROCESS || strstr(spdl_loader_error(l)->text, says) == NULL) return 4;
    spdl_loader_close(l);
    return 0;
}

/* A policy that the system refuses is no policy. */
static void policies_that_the_system_refuses(void) {
#if SPDL__OS_PROCESSES
    static const struct {
        unsigned number;
        spdl_policy policy;
    } rows[] = { { SYS_sched_setscheduler, { .sched = SPDL_SCHED_IDLE } },
                 { SYS_setpriority, { .nice = 5 } } };
    if (TEST_SANITIZED) TEST_SKIP("a sanitizer makes calls of its own");
    for (int i = 0; i < 2; ++i) {
        const pid_t refused = fork();
        int status = 0;
        if (refused == 0) {
            if (!spdl__os_thread_set_policy(&rows[i].policy)) _exit(1);
            if (!call_fails(rows[i].number, -1, 0)) _exit(77);
            _exit(spdl__os_thread_set_policy(&rows[i].policy));
        }
        CHECK_EQ(waitpid(refused, &status, 0), refused);
        if (WIFEXITED(status) && WEXITSTATUS(status) == 77) TEST_SKIP("needs seccomp");
        CHECK_EQ(status, 0);
    }
#endif
}

/* It does without them, or is refused for a reason. */
static void systems_that_lack_a_call(void) {
    static const struct {
        unsigned number;
        int argument;
        unsigned is;
        const char *says;
    } rows[] = {
        { SYS_madvise, 2, 14, "killed by SIGABRT, in stage 1" }, /* no huge pages */
        { SYS_madvise, 2, 23, "killed by SIGABRT, in stage 1" }, /* none is made beforehand */
        { SYS_madvise, 2, 18, "killed by SIGABRT, in stage 1" }, /* no page that a fork wipes */
        { SYS_fallocate, -1, 0, "Function not implemented" },
        { SYS_fcntl, 1, 1033, "Function not implemented" }, /* no seals */
        { SYS_sigaltstack, -1, 0, "killed by SIGABRT" },
        { SYS_rt_sigaction, -1, 0, "killed by SIGABRT" },
        { SYS_prctl, 1, SIGKILL, "has ended with code 1" }, /* nobody would end the child */
    };
    TEST_NEEDS_PROCESSES();
    if (TEST_SANITIZED) TEST_SKIP("a sanitizer makes calls of its own");
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) {
        const pid_t opens_it = fork();
        int status = 0;
        if (opens_it == 0)
            _exit(opens_without(rows[i].number, rows[i].argument, rows[i].is, rows[i].says));
        CHECK_EQ(waitpid(opens_it, &status, 0), opens_it);
        if (WIFEXITED(status) && WEXITSTATUS(status) == 77) TEST_SKIP("needs seccomp");
        if (!CHECK_EQ(status, 0)) fprintf(stderr, "    row %d\n", (int)i);
        all_gone();
    }
}

static void a_reservation_is_repeated(void) {
    spdl_loader_desc desc = desc_of(1);
    spdl_loader *l;
    TEST_NEEDS_PROCESSES();
    reservations_undone = 3;
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(20), SPDL_SINK(2))) == SPDL_OK);
    CHECK(reservations_undone == 0 && signals_held == 1);
    takes(l, 0, 20);
    spdl_loader_close(l);
    all_gone();
}

/* --- what is in the shared memory when it is read --- */

#if SPDL__OS_PROCESSES
static void stop_child(const spdl_loader *l) {
    child_signal(l, SIGSTOP);
    while (state_of(l->ledger->process) != 'T') usleep(100);
}

/* Batch n is there. */
static void await_entry(const spdl_loader *l, uint64_t n) {
    while (spdl__load(&spdl__loader_entry(l, n)->stamp) != n + 1) usleep(100);
}
#endif

/* Of failures, positions and slots that a stage has overwritten the consumer takes what can be. */
static void overwritten_entries_are_seen(void) {
#if SPDL__OS_PROCESSES
    for (int k = 0; k < 6; ++k) {
        char text[SPDL_STATE_BYTES];
        spdl_loader_desc desc = desc_of(1);
        spdl_loader_batch batch, held;
        spdl_loader *l;
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(40), SPDL_SINK(2))) == SPDL_OK);
        await_entry(l, 1);
        spdl__shared_entry *first = spdl__loader_entry(l, 0);
        if (k == 0) first->result = 7; /* no failure */
        if (k == 1 || k == 2) {
            first->result = SPDL_E_STAGE;
            l->shared->error.result = SPDL_E_STAGE;
            l->shared->error.stage = k == 1 ? 1000 : -7;
        }
        if (k == 3) memset(first->text, 'x', sizeof first->text);
        if (k == 4) spdl__loader_entry(l, 1)->slot = first->slot;
        CHECK_EQ(spdl_loader_next(l, &held, SPDL_SECONDS(15)),
                 k == 0 ? SPDL_E_PROCESS : k < 3 ? SPDL_E_STAGE : SPDL_OK);
        if (k == 1 || k == 2) CHECK_EQ(spdl_loader_error(l)->stage, -1);
        if (k == 3) {
            CHECK_EQ(spdl_loader_state_save(l, text, sizeof text), SPDL_E_CHECKSUM);
            CHECK(strstr(text, "makes no sense") != NULL);
        }
        if (k == 4) {
            CHECK_EQ(spdl_loader_next(l, &batch, SPDL_SECONDS(15)), SPDL_E_PROCESS);
            CHECK(strstr(spdl_loader_error(l)->text, "a batch in a slot that we have") != NULL);
        }
        if (k == 5) { /* no call has this number */
            stop_child(l);
            l->shared->fault = 1000;
            child_signal(l, SIGKILL);
            while (spdl_loader_next(l, &batch, SPDL_SECONDS(15)) == SPDL_OK)
                CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
            CHECK(strstr(spdl_loader_error(l)->text, "was killed by SIGKILL, outside") != NULL);
        }
        spdl_loader_close(l);
    }
    all_gone();
#endif
}

/* A command that a stage has overwritten is refused, and all goes on; a refusal that is overwritten
   is the end. */
static void overwritten_commands_are_refused(void) {
#if SPDL__OS_PROCESSES
    spdl_loader_desc desc = desc_of(1);
    spdl_error error;
    spdl_loader *l;
    spdl__shared *s;
    spdl_result result;
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(100), SPDL_SINK(2))) == SPDL_OK);
    s = l->shared;
    takes(l, 0, 20);
    for (int k = 0; k < 3; ++k) {
        await_entry(l, l->at);
        stop_child(l);
        spdl__loader_send(l, &nonsense, 1, 0);
        if (k < 2) s->texts = UINT64_MAX;
        if (k == 1) memset(s->text, 'x', sizeof s->text);
        child_signal(l, SIGCONT);
        while (k == 2 && spdl__load32(&s->ack) != l->command) usleep(100);
        if (k == 2) s->refusal.result = SPDL_OK;
        result = spdl__loader_obeyed(l, spdl__deadline(SPDL_SECONDS(15)), &error);
        CHECK(result < 0 && (result == SPDL_E_PROCESS) == (k == 2));
        if (k < 2) takes(l, 20 + 2 * (uint64_t)k, 2);
    }
    CHECK(strstr(error.text, "impossible value: a failure") != NULL);
    CHECK_EQ(spdl_loader_next(l, &(spdl_loader_batch){ 0 }, 0), SPDL_E_PROCESS);
    spdl_loader_close(l);
    all_gone();
#endif
}

/* Entries that are taken back may be overwritten, and their slots lost: the rest goes on. */
static void overwritten_entries_are_taken_back(void) {
#if SPDL__OS_PROCESSES
    spdl_loader_desc desc = desc_of(1);
    spdl_loader_batch batch;
    spdl_error error;
    spdl_loader *l;
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(40), SPDL_SINK(2))) == SPDL_OK);
    takes(l, 0, 20);
    await_entry(l, l->at + 2);
    stop_child(l);
    spdl__loader_entry(l, l->at)->slot = 1u << 20;
    l->words[spdl__loader_entry(l, l->at + 1)->slot] = 0;
    child_signal(l, SIGCONT);
    CHECK_EQ(spdl_loader_rewind(l, 5, SPDL_SECONDS(15)), SPDL_OK);
    takes(l, 5, 35);
    CHECK_EQ(spdl_loader_rewind(l, 20, SPDL_SECONDS(15)), SPDL_OK);
    takes(l, 20, 1);
    await_entry(l, l->at);
    stop_child(l);
    spdl__loader_send(l, NULL, 0, 10);
    spdl__store_relaxed(&l->shared->start_at, 1); /* none of those is taken back */
    child_signal(l, SIGCONT);
    CHECK_EQ(spdl__loader_obeyed(l, spdl__deadline(SPDL_SECONDS(15)), &error), SPDL_OK);
    CHECK_EQ(spdl_loader_next(l, &batch, SPDL_SECONDS(15)), SPDL_E_PROCESS);
    spdl_loader_close(l);
    all_gone();
#endif
}

/* --- races of the processes --- */

#if SPDL__OS_PROCESSES
/* A gate in shared memory, for processes that come to a point: [0] how many came, [1] how many may
   pass. */
static const char *gate_point;
static uint32_t *gate;
static void waits_at_the_gate(const char *id) {
    uint32_t number;
    if (strcmp(id, gate_point) != 0) return;
    number = __atomic_add_fetch(&gate[0], 1, __ATOMIC_ACQ_REL);
    while (__atomic_load_n(&gate[1], __ATOMIC_ACQUIRE) < number) usleep(100);
}
static void dies_at_the_gate(const char *id) {
    if (strcmp(id, gate_point) == 0 &&
        __atomic_add_fetch(&gate[0], 1, __ATOMIC_ACQ_REL) == gate[1] + 1)
        kill(getpid(), SIGKILL);
}
static void await_gate(uint32_t number) {
    while (__atomic_load_n(&gate[0], __ATOMIC_ACQUIRE) < number) usleep(100);
}
static void open_the_gate(uint32_t passes) { __atomic_store_n(&gate[1], passes, __ATOMIC_RELEASE); }
static void gate_at(const char *point, void (*calls)(const char *id), uint32_t passes) {
    REQUIRE((gate = shared_flag()) != NULL);
    gate[1] = passes;
    gate_point = point;
    point_calls = calls;
}
#endif

/* A life that ends between two steps of a batch or of a rewind: each item is there once, and no
   slot is lost. */
static void lives_end_between_two_steps(void) {
#if SPDL__OS_PROCESSES
    static const char *const points[] = { "loader publishes", "loader stamped", "loader published",
                                          "loader takes back", "loader obeys" };
    for (int k = 0; k < 5; ++k) {
        spdl_loader_desc desc = desc_of(1);
        spdl_loader_status status;
        spdl_loader *l;
        desc.slot_count = 2;
        desc.max_restarts = 1;
        gate_at(points[k], dies_at_the_gate, k < 3 ? 8 : k == 3 ? 0 : 1);
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(40), SPDL_SINK(2))) == SPDL_OK);
        takes(l, 0, 6);
        for (int i = 0; i < 3; ++i) { /* with batches that are taken back each time */
            await_entry(l, l->at + 1);
            CHECK_EQ(spdl_loader_rewind(l, 2, SPDL_SECONDS(15)), SPDL_OK);
            takes(l, 2, 3);
        }
        takes(l, 5, 35);
        CHECK_EQ(spdl_loader_next(l, &(spdl_loader_batch){ 0 }, SPDL_SECONDS(15)), SPDL_END);
        spdl_loader_get_status(l, &status);
        CHECK_EQ(status.restarts, 1);
        spdl_loader_close(l);
        all_gone();
    }
#endif
}

/* Slots that the consumer holds are lent by the next life, too, until it gives them back. */
static void slots_that_are_held_outlive_a_life(void) {
#if SPDL__OS_PROCESSES
    enum { HELD = 8 };
    spdl_loader_desc desc = desc_of(1);
    spdl_loader_batch held[HELD];
    spdl_loader *l;
    uint64_t *last;
    desc.slot_count = HELD;
    desc.max_restarts = 1;
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(40), SPDL_SINK(2))) == SPDL_OK);
    for (int i = 0; i < HELD; ++i)
        REQUIRE(spdl_loader_next(l, &held[i], SPDL_SECONDS(15)) == SPDL_OK);
    stop_child(l);
    last = &l->words[l->layout.slot_count - 1];
    spdl__store(last, 1000); /* as if it was to be published */
    spdl__store32(&l->shared->emptied.waiters, 0);
    child_signal(l, SIGKILL);
    while (spdl__load32(&l->shared->emptied.waiters) == 0) usleep(100); /* it has begun */
    CHECK(spdl__load(last) != 1000);
    for (uint64_t i = 0; i < 2 * HELD; ++i) {
        CHECK(record_is((const record *)held[i % HELD].data, i, 0));
        CHECK_EQ(spdl_loader_done(l, &held[i % HELD]), SPDL_OK);
        for (int k = 0; i == HELD - 1 && k < HELD; ++k) /* as many others are lent */
            REQUIRE(spdl_loader_next(l, &held[k], SPDL_SECONDS(15)) == SPDL_OK);
    }
    takes(l, 2 * HELD, 40 - 2 * HELD);
    CHECK_EQ(spdl_loader_next(l, &held[0], SPDL_SECONDS(15)), SPDL_END);
    spdl_loader_close(l);
    all_gone();
#endif
}

/* A life ends by itself after the consumer has asked to kill it, and before the supervisor hears of
   that: the next one is not meant, and begins a wait of its own. */
static void a_hang_is_of_one_life(void) {
#if SPDL__OS_PROCESSES
    spdl_loader_desc desc = desc_of(1);
    fate harm = { .at = 3, .how = HANG, .done = shared_flag() };
    spdl_loader_status status;
    spdl_loader_batch batch;
    spdl_loader *l;
    desc.hang_timeout = 0.02;
    desc.max_restarts = 5;
    gate_at("loader child begins", waits_at_the_gate, 1);
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(40),
                SPDL_PIPE(meets_its_fate, .ctx = &harm), SPDL_SINK(1))) == SPDL_OK);
    l->desc.hang_timeout = 0; /* not yet */
    takes(l, 0, 3);
    while (__atomic_load_n(harm.done, __ATOMIC_ACQUIRE) == 0) usleep(100);
    spdl_loader_get_status(l, &status);
    kill((pid_t)status.supervisor, SIGSTOP);
    l->desc.hang_timeout = 0.02;
    while (l->ledger->hangs == 0)
        CHECK_EQ(spdl_loader_next(l, &batch, 5000000), SPDL_TIMEOUT);
    CHECK(l->asked_ns != 0 && l->since != 0);
    kill((pid_t)status.pid, SIGKILL);
    kill((pid_t)status.supervisor, SIGCONT);
    while (spdl__load32(&l->ledger->restarts) == 0) usleep(100);
    l->asked_ns -= (uint64_t)SPDL_SECONDS(60); /* as if that was long ago */
    l->since -= (uint64_t)SPDL_SECONDS(60);
    l->desc.hang_timeout = 30;
    for (int i = 0; i < 3; ++i) CHECK_EQ(spdl_loader_next(l, &batch, 15000000), SPDL_TIMEOUT);
    open_the_gate(100);
    takes(l, 3, 37);
    spdl_loader_get_status(l, &status);
    CHECK_EQ(status.restarts, 1);
    spdl_loader_close(l);
    all_gone();
#endif
}

#if SPDL__OS_PROCESSES
static const spdl_loader *looked_at;
static int looks;

/* The child publishes its ninth batch, and ends, while the consumer looks for it. */
static const char *look_point;
static void ends_while_looked_for(const char *id) {
    if (strcmp(id, "loader published") == 0 && gate[0] == 9) kill(getpid(), SIGKILL);
    waits_at_the_gate(id);
    if (strcmp(id, look_point) != 0 || looked_at == NULL || looked_at->at != 8) return;
    open_the_gate(100);
    while (spdl__load32(&looked_at->ledger->gone) == 0) usleep(100);
}

/* The first batch is published after the consumer has looked for it, and before it wants to be
   told. */
static void comes_before_the_request(const char *id) {
    waits_at_the_gate(id);
    if (strcmp(id, "loader consumer about to sleep") != 0 || looks++ > 0) return;
    open_the_gate(1);
    await_gate(2);
}
#endif

/* What is published last is there before the end, however they meet. */
static void the_last_batch_comes_before_the_end(void) {
#if SPDL__OS_PROCESSES
    static const char *const points[] = { "loader consumer before the stamp",
                                          "loader consumer about to sleep" };
    for (int k = 0; k < 2; ++k) {
        spdl_loader_desc desc = desc_of(1);
        spdl_loader *l;
        look_point = points[k];
        looked_at = NULL;
        gate_at("loader publishes", ends_while_looked_for, 8);
        REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(40), SPDL_SINK(2))) == SPDL_OK);
        looked_at = l;
        takes(l, 0, 9);
        CHECK_EQ(spdl_loader_next(l, &(spdl_loader_batch){ 0 }, SPDL_SECONDS(15)), SPDL_E_PROCESS);
        CHECK(strstr(spdl_loader_error(l)->text, "killed by SIGKILL") != NULL);
        spdl_loader_close(l);
        all_gone();
    }
#endif
}

/* Nobody would tell of it later. */
static void a_batch_before_the_request_is_found(void) {
#if SPDL__OS_PROCESSES
    spdl_loader_desc desc = desc_of(1);
    spdl_loader_batch batch;
    spdl_loader *l;
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    desc.ready_fd = &ends[1];
    gate_at("loader publishes", comes_before_the_request, 0);
    REQUIRE(spdl_loader_open(&l, &desc, SPDL_STAGES(RECORDS(40), SPDL_SINK(2))) == SPDL_OK);
    await_gate(1);
    CHECK_EQ(spdl_loader_next(l, &batch, 0), SPDL_OK);
    CHECK(looks > 0 && record_is((const record *)batch.data, 0, 0));
    CHECK_EQ(spdl_loader_done(l, &batch), SPDL_OK);
    open_the_gate(100);
    takes(l, 1, 39);
    spdl_loader_close(l);
    close(ends[0]);
    close(ends[1]);
    all_gone();
#endif
}

TEST_TABLE(loader) {
    TEST_CASE(the_last_batch_comes_before_the_end),
    TEST_CASE(a_batch_before_the_request_is_found),
    TEST_CASE(overwritten_entries_are_seen),
    TEST_CASE(overwritten_commands_are_refused),
    TEST_CASE(overwritten_entries_are_taken_back),
    TEST_CASE(lives_end_between_two_steps),
    TEST_CASE(slots_that_are_held_outlive_a_life),
    TEST_CASE(a_hang_is_of_one_life),
    TEST_CASE(answers_of_the_system),
    TEST_CASE(stderr_is_not_waited_for),
    TEST_CASE(a_limit_of_files_is_a_limit_of_memory),
    TEST_CASE(room_of_machines),
    TEST_CASE(arguments_are_checked),
    TEST_CASE(a_loader_of_defaults),
    TEST_CASE(slots_are_for_the_childs_workers),
    TEST_CASE(a_child_has_no_doctor),
    TEST_CASE(a_child_warns_on_stderr),
    TEST_CASE(memory_of_a_child_may_end),
    TEST_CASE(systems_that_lack_a_call),
    TEST_CASE(a_reservation_is_repeated),
    TEST_CASE(policies_that_the_system_refuses),
    TEST_CASE(signals_that_are_the_childs),
    TEST_CASE(a_terminal_stops_no_program),
    TEST_CASE(signals_of_the_program_are_not_the_childs),
    TEST_CASE(files_of_other_threads_are_theirs),
    TEST_CASE(batches_come_whole_and_in_order),
    TEST_CASE(epochs_end_one_by_one),
    TEST_CASE(it_is_rewound),
    TEST_CASE(all_slots_held_is_an_error),
    TEST_CASE(blocks_suffice),
    TEST_CASE(it_is_started_again),
    TEST_CASE(a_hang_after_a_restart_is_found),
    TEST_CASE(a_rewind_outlives_a_child),
    TEST_CASE(nothing_stays_mapped),
    TEST_CASE(it_goes_on_exactly),
    TEST_CASE(a_run_goes_on_with_a_loader_and_without),
    TEST_CASE(ranks_change_with_loaders),
    TEST_CASE(positions_that_are_not_there),
    TEST_CASE(a_load_that_is_too_early_has_no_error),
    TEST_CASE(they_end_with_the_trainer),
    TEST_CASE(programs_end_with_the_child),
    TEST_CASE(an_exit_is_the_childs_own),
    TEST_CASE(an_end_in_a_source_is_told),
    TEST_CASE(a_close_is_short),
    TEST_CASE(processes_that_cannot_be_waited_for),
    TEST_CASE(a_hang_of_both_is_found),
    TEST_CASE(an_item_elsewhere_is_an_error),
    TEST_CASE(scribbles_are_survived),
    TEST_CASE(wrong_numbers_are_seen),
    TEST_CASE(a_ready_batch_costs_no_call),
    TEST_CASE(a_child_reports_itself),
    TEST_CASE(profilers_are_told),
    TEST_CASE(a_row_has_blocks_of_its_own),
    TEST_CASE(a_held_slot_is_not_written), TEST_CASE(a_batch_of_a_closed_loader_is_refused),
    TEST_CASE(failures_come_after_the_items_before_them),
    TEST_CASE(beginnings_and_ends),
    TEST_CASE(every_end_is_told),
    TEST_CASE(the_call_that_crashed_is_known),
    TEST_CASE(a_table_without_a_position_is_not_started_again),
    TEST_CASE(the_end_of_the_supervisor_is_told),
    TEST_CASE(it_minds_its_own_children),
    TEST_CASE(a_fork_has_no_loader),
    TEST_CASE(it_outlives_the_thread_that_opened_it),
    TEST_CASE(wrong_things_are_refused),
    TEST_CASE(a_child_that_is_refused_is_told),
    TEST_CASE(limits_of_the_process),
    TEST_CASE(more_threads_than_notes),
    TEST_CASE(room_is_the_least_of_all),
    TEST_CASE(without_memory_it_is_refused),
    TEST_CASE(caches_and_headspace_take_from_it),
    TEST_CASE(a_rewind_ends_a_call_that_hangs),
    TEST_CASE(only_a_trainer_that_waits_finds_a_hang),
    TEST_CASE(a_hang_is_found_between_short_waits),
    TEST_CASE(a_wrong_count_is_seen),
    TEST_CASE(an_event_loop_is_told),
    TEST_CASE(who_only_looks_learns_of_ends),
    TEST_CASE(a_refused_position_is_never_begun_at),
    TEST_CASE(a_refusal_keeps_the_failure),
    TEST_CASE(a_timeout_leaves_it_to_be_closed),
    TEST_CASE(a_save_without_processes_returns),
    TEST_CASE(an_old_look_is_no_wait),
    TEST_CASE(a_stack_that_overflows_is_named),
    TEST_CASE(ends_beside_what_others_hold),
    TEST_CASE(the_first_calls_are_named),
    TEST_CASE(a_pipeline_may_hold_all_slots),
    TEST_END
};
