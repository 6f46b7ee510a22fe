/* What SPDL_DEBUG finds. The asserts are off, so that the results behind them can be seen. */
#define SPDL_DEBUG
#ifndef NDEBUG /* some compilers define it */
#define NDEBUG
#endif
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"

#include "test.h"

static spdl_ring *ring_of(spdl_ring_mode mode) {
    spdl_ring *ring = NULL;
    spdl_ring_desc desc = { 0 };
    desc.capacity = 4;
    desc.mode = mode;
    REQUIRE(spdl_ring_create(&ring, &desc) == SPDL_OK);
    return ring;
}

/* A second thread comes while one is inside: simulated by the mark that the first one leaves. */
static void two_threads_on_a_side_for_one(void) {
    for (int m = SPDL_RING_MPMC; m <= SPDL_RING_SPSC; ++m) {
        const bool spsc = m == SPDL_RING_SPSC;
        spdl_ring *ring = ring_of((spdl_ring_mode)m);
        uint64_t item = 7, moved = 9;
        ring->pushes.inside = ring->pops.inside = 1;
        CHECK_EQ(spdl_ring_push(ring, &item, 0), spsc ? SPDL_E_INVALID : SPDL_OK);
        CHECK_EQ(spdl_ring_count(ring), spsc ? 0 : 1);
        CHECK_EQ(spdl__ring_try(ring, true, &item, 1, &moved), spsc ? SPDL_E_INVALID : SPDL_OK);
        CHECK_EQ(moved, spsc ? 0 : 1);
        CHECK_EQ(spdl_ring_try_pop(ring, &item), spsc ? SPDL_E_INVALID : SPDL_OK);
        spdl_ring_close(ring); /* in SPSC that is the producer's, too */
        ring->pushes.inside = ring->pops.inside = 0;
        CHECK_EQ(spdl_ring_push(ring, &item, 0), spsc ? SPDL_OK : SPDL_CLOSED);
        spdl_ring_destroy(ring, NULL, NULL);
    }
}

static void one_thread_on_each_side_is_fine(void) {
    for (int m = SPDL_RING_MPMC; m <= SPDL_RING_SPSC; ++m) {
        spdl_ring *ring = ring_of((spdl_ring_mode)m);
        uint64_t item = 0;
        for (uint64_t i = 0; i < 100; ++i) {
            CHECK_EQ(spdl_ring_push(ring, &i, SPDL_FOREVER), SPDL_OK);
            CHECK_EQ(spdl_ring_pop(ring, &item, SPDL_FOREVER), SPDL_OK);
            CHECK_EQ(item, i);
        }
        spdl_ring_close(ring);
        CHECK_EQ(spdl_ring_pop(ring, &item, SPDL_FOREVER), SPDL_CLOSED);
        spdl_ring_destroy(ring, NULL, NULL);
    }
}

static void *push_one(void *arg) {
    const uint64_t item = 7;
    CHECK_EQ(spdl_ring_push((spdl_ring *)arg, &item, SPDL_FOREVER), SPDL_OK);
    return NULL;
}

static void *pop_one(void *arg) {
    uint64_t item;
    CHECK_EQ(spdl_ring_pop((spdl_ring *)arg, &item, SPDL_FOREVER), SPDL_OK);
    return NULL;
}

/* A side may change hands: that is no misuse. */
static void a_side_may_change_hands(void) {
    for (int mode = SPDL_RING_MPMC; mode <= SPDL_RING_SPSC; ++mode) {
        spdl_ring *ring = ring_of((spdl_ring_mode)mode);
        test_thread thread;
        for (int i = 0; i < 3; ++i) {
            REQUIRE(test_thread_start(&thread, push_one, ring));
            test_join(thread);
            push_one(ring);
            REQUIRE(test_thread_start(&thread, pop_one, ring));
            test_join(thread);
            pop_one(ring);
        }
        spdl_ring_destroy(ring, NULL, NULL);
    }
}

/* Every call on a ring that was closed with one item inside. */
static void use_after_close(void) {
    for (int mode = SPDL_RING_MPMC; mode <= SPDL_RING_SPSC; ++mode) {
        spdl_ring *ring = ring_of((spdl_ring_mode)mode);
        uint64_t item = 9, moved = 5;
        CHECK_EQ(spdl_ring_try_push(ring, &item), SPDL_OK);
        spdl_ring_close(ring);
        spdl_ring_close(ring);
        CHECK_EQ(spdl_ring_try_push(ring, &item), SPDL_CLOSED);
        CHECK_EQ(spdl_ring_push(ring, &item, SPDL_FOREVER), SPDL_CLOSED);
        CHECK_EQ(spdl__ring_try(ring, true, &item, 1, &moved), SPDL_CLOSED);
        CHECK_EQ(spdl_ring_push_n(ring, &item, 1, &moved, SPDL_FOREVER), SPDL_CLOSED);
        CHECK_EQ(moved, 0);
        CHECK_EQ(spdl_ring_count(ring), 1);
        CHECK_EQ(spdl_ring_try_pop(ring, &item), SPDL_OK);
        for (int i = 0; i < 2; ++i) {
            CHECK_EQ(spdl_ring_try_pop(ring, &item), SPDL_CLOSED);
            CHECK_EQ(spdl_ring_pop(ring, &item, SPDL_FOREVER), SPDL_CLOSED);
            CHECK_EQ(spdl__ring_try(ring, false, &item, 1, &moved), SPDL_CLOSED);
            CHECK_EQ(spdl_ring_pop_n(ring, &item, 1, &moved, SPDL_FOREVER), SPDL_CLOSED);
        }
        CHECK_EQ(spdl_ring_count(ring), 0);
        spdl_ring_destroy(ring, NULL, NULL);
    }
}

/* --- pipelines --- */

typedef struct warnings {
    int count; /* atomic */
    char text[4][SPDL_TEXT_BYTES + 1024];
} warnings;

static void log_warnings(spdl_log_level level, const char *text, void *user) {
    warnings *w = (warnings *)user;
    const int i = __atomic_fetch_add(&w->count, level == SPDL_LOG_WARN, __ATOMIC_RELAXED);
    if (level == SPDL_LOG_WARN && i < 4) snprintf(w->text[i], sizeof w->text[i], "%s", text);
}

static int numbers[400];

SPDL_FN(list, void, int) {
    if (spdl_sequence(task) == 400) return SPDL_END;
    *out = &numbers[spdl_sequence(task)];
    return SPDL_OK;
}
SPDL_FN(make, void, int) {
    if (spdl_sequence(task) == 400) return SPDL_END;
    *out = (int *)calloc(1, sizeof **out);
    return SPDL_OK;
}
SPDL_FN(forget, int, int) { return SPDL_OK; }
SPDL_FN(consume, int, void) { return SPDL_OK; }
SPDL_FN(forget_at_first, int, int) {
    if (spdl_sequence(task) >= 99) *out = in;
    return SPDL_OK;
}
SPDL_FN(renew, int, int) {
    *out = (int *)malloc(sizeof **out);
    return SPDL_OK;
}

SPDL_FN(fill, void, int) {
    if (spdl_sequence(task) == 7) return SPDL_END;
    *out = (int *)spdl_buffer(task);
    return *out != NULL ? SPDL_OK : SPDL_E_NOMEM;
}

/* Frees its buffer: the first call, and returns another item, none, or the buffer. */
SPDL_FN(frees_its_own, int, int) {
    const int how = *(const int *)spdl_ctx(task);
    int *mine = (int *)spdl_buffer(task);
    if (mine == NULL || spdl_sequence(task) != 3) return SPDL_SKIP;
    spdl_buffer_free(mine);
    if (how == 0) return SPDL_SKIP;
    *out = how == 1 ? in : mine;
    return SPDL_OK;
}

/* With an item after each `length` calls without one. */
static spdl_result one_in(const spdl_task *task, int length, int **out) {
    static int calls;
    if (spdl_sequence(task) == 20) return SPDL_END;
    if (++calls % length != 0) return SPDL_SKIP;
    *out = (int *)malloc(sizeof **out);
    return SPDL_OK;
}
/* A second goes by now and then. */
SPDL_FN(skips_slowly, void, int) {
    static int calls;
    if (++calls % 400 == 0) task->node->empty_since -= 2 * (uint64_t)SPDL__EMPTY_NS;
    return one_in(task, 2000, out);
}
SPDL_FN(spins, void, int) { return one_in(task, 2000, out); }
SPDL_FN(skips_some, void, int) { return one_in(task, 900, out); }

static void run_all(warnings *w, int workers, spdl_free_fn free_item, const spdl_stage *rows,
                    size_t count) {
    spdl_pipeline_desc desc = { .workers = TEST_WORKERS(workers) };
    spdl_pipeline *p;
    void *taken;
    memset(w, 0, sizeof *w);
    desc.logger.log_fn = log_warnings;
    desc.logger.user = w;
    REQUIRE(spdl_pipeline_create(&p, &desc, rows, count) == SPDL_OK);
    while (spdl_pipeline_next(p, &taken, SPDL_FOREVER) == SPDL_OK)
        if (free_item != NULL && taken != NULL) free_item(taken);
    spdl_pipeline_destroy(p);
}

#define RUN_ALL(free_item, ...) run_all(&w, workers, (free_item), SPDL_STAGES(__VA_ARGS__))

/* Once; not of what the stage says is nothing, nor of NULL that came in. */
static void a_stage_that_hands_on_nothing(void) {
    warnings w;
    for (int workers = 0; workers < 3; ++workers) {
        RUN_ALL(NULL, SPDL_SOURCE(make, .free_item = free), SPDL_PIPE(forget),
                SPDL_PIPE(forget, .name = "next"), SPDL_SINK(3));
        CHECK_EQ(w.count, 1);
        CHECK_STR(w.text[0], "stage 1 'forget' has returned only NULL (100 times): is *out set?");
        RUN_ALL(NULL, SPDL_SOURCE(make, .free_item = free), SPDL_PIPE(consume), SPDL_SINK(3));
        CHECK_EQ(w.count, 0);
        RUN_ALL(free, SPDL_SOURCE(make, .free_item = free), SPDL_PIPE(forget_at_first),
                SPDL_SINK(3));
        CHECK_EQ(w.count, 0);
    }
}

/* Inputs that a call has used up, those in a batch, and what a stop finds. */
static void items_that_nobody_frees(void) {
    warnings w;
    for (int workers = 0; workers < 3; ++workers) {
        RUN_ALL(free, SPDL_SOURCE(list), SPDL_PIPE(renew, .free_item = free), SPDL_SINK(3));
        CHECK_EQ(w.count, 1);
        CHECK_STR(w.text[0], "stage 0 'list' leaked 400 items: write .free_item in its row");
        RUN_ALL(spdl_batch_free, SPDL_SOURCE(list), SPDL_BATCH(30), SPDL_SINK(3));
        CHECK_EQ(w.count, 1);
        CHECK_STR(w.text[0], "stage 0 'list' leaked 400 items: write .free_item in its row");
        RUN_ALL(free, SPDL_SOURCE(make, .free_item = free), SPDL_PIPE(renew, .free_item = free),
                SPDL_SINK(3));
        CHECK_EQ(w.count, 0);
        RUN_ALL(NULL, SPDL_SOURCE(list), SPDL_SINK(3)); /* the trainer has them */
        CHECK_EQ(w.count, 0);
    }
}

/* As run_all, but frees the results after destroy. */
static void run_and_keep(warnings *w, int workers, spdl_free_fn free_item, const spdl_stage *rows,
                         size_t count) {
    spdl_pipeline_desc desc = { .workers = TEST_WORKERS(workers) };
    spdl_pipeline *p;
    void *kept[64];
    size_t taken = 0;
    memset(w, 0, sizeof *w);
    desc.logger.log_fn = log_warnings;
    desc.logger.user = w;
    REQUIRE(spdl_pipeline_create(&p, &desc, rows, count) == SPDL_OK);
    while (spdl_pipeline_next(p, &kept[taken], SPDL_FOREVER) == SPDL_OK) REQUIRE(++taken < 64);
    spdl_pipeline_destroy(p);
    while (taken > 0) free_item(kept[--taken]);
}

#define RUN_AND_KEEP(free_item, ...)                                                               \
    run_and_keep(&w, workers, (free_item), SPDL_STAGES(__VA_ARGS__))

/* Results that the consumer has at destroy. */
static void batches_and_buffers_that_are_out(void) {
    warnings w;
    for (int workers = 0; workers < 3; ++workers) {
        RUN_AND_KEEP(spdl_batch_free, SPDL_SOURCE(make, .free_item = free),
                     SPDL_BATCH(30, .item_bytes = 4), SPDL_SINK(3));
        CHECK_EQ(w.count, 1);
        CHECK(strstr(w.text[0], " results of stage 1 'batch' are not freed yet: call "
                                "spdl_batch_free for each, now or later") != NULL);
        RUN_ALL(spdl_batch_free, SPDL_SOURCE(make, .free_item = free),
                SPDL_BATCH(30, .item_bytes = 4), SPDL_SINK(3));
        CHECK_EQ(w.count, 0);
        RUN_AND_KEEP(spdl_buffer_free,
                     SPDL_SOURCE(fill, .item_bytes = 4, .free_item = spdl_buffer_free),
                     SPDL_SINK(3));
        CHECK_EQ(w.count, 1);
        CHECK_STR(w.text[0], "7 results of stage 0 'fill' are not freed yet: call "
                             "spdl_buffer_free for each, now or later");
    }
}

SPDL_FN(forgets_return, int, int) {
    *out = (int *)spdl_buffer(task);
    if (*out == NULL) return SPDL_E_NOMEM;
    return spdl_fail(task, "%d is odd", *in) == SPDL_OK ? SPDL_E_STAGE : SPDL_OK;
}

/* The library frees the buffer of a call that it fails. */
static void a_buffer_of_a_call_that_forgets_return(void) {
    warnings w;
    for (int workers = 0; workers < 3; ++workers) {
        RUN_AND_KEEP(spdl_buffer_free, SPDL_SOURCE(fill, .item_bytes = 4),
                     SPDL_PIPE(forgets_return, .item_bytes = 4), SPDL_SINK(3));
        for (int i = 0; i < w.count; ++i) CHECK(strstr(w.text[i], "not freed yet") == NULL);
    }
}

/* It is freed once, and the row named. */
static void a_call_that_frees_its_buffer(void) {
    for (int workers = 0; workers < 3; ++workers) {
        for (int how = 0; how < 3; ++how) {
            warnings w = { .count = 0 };
            spdl_pipeline_desc desc = { .workers = TEST_WORKERS(workers) };
            spdl_pipeline *p;
            int *taken;
            desc.logger.log_fn = log_warnings;
            desc.logger.user = &w;
            REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
                        SPDL_SOURCE(make, .free_item = free),
                        SPDL_PIPE(frees_its_own, .ctx = &how, .item_bytes = sizeof(int),
                                  .free_item = spdl_buffer_free),
                        SPDL_SINK(2))) == SPDL_OK);
            CHECK_EQ(SPDL_NEXT(p, &taken, SPDL_SECONDS(15)), SPDL_E_INVALID);
            CHECK_STR(spdl_pipeline_error(p)->text,
                      "stage 1 'frees_its_own', item 3: freed the buffer that spdl_buffer gave: "
                      "the library frees a buffer that is not returned");
            spdl_pipeline_destroy(p);
            CHECK_EQ(w.count, 0);
        }
    }
}

/* Buffers that are parts of a batch, and rows with an allocator, streams and functions without a
   type are looked at, too: nothing is wrong with them. */
SPDL_FN(fill_part, void, int) {
    const uint64_t number = spdl_sequence(task);
    char *part = (char *)spdl_buffer(task);
    if (number == 8) return SPDL_END;
    REQUIRE(part != NULL);
    memset(part, 0, *(const size_t *)spdl_ctx(task));
    *out = (int *)(void *)part;
    return SPDL_OK;
}

SPDL_FN(twice, int, int) {
    void **state = spdl_call_state(task);
    *out = (int *)malloc(sizeof **out);
    if (*state != NULL) return SPDL_OK;
    *state = in;
    return SPDL_AGAIN;
}

static int memory_left = 100;

static void *some_memory(size_t bytes, size_t align, void *user) {
    (void)user;
    return memory_left-- > 0 ? test_memory(align, bytes) : NULL;
}

static void some_memory_free(void *memory, size_t bytes, void *user) {
    (void)bytes, (void)user;
    test_memory_free(memory);
}

static void rows_of_other_kinds_are_fine(void) {
    static const spdl_function untyped = { consume_spdl_call, "untyped", NULL, NULL, 0, 0 };
    const spdl_allocator memory = { some_memory, some_memory_free, NULL };
    spdl_stage other = SPDL_PIPE(consume);
    size_t bytes = sizeof(int);
    warnings w;
    other.fn = &untyped;
    for (int workers = 0; workers < 3; ++workers) {
        RUN_ALL(spdl_batch_free, SPDL_SOURCE(fill_part, .ctx = &bytes),
                SPDL_BATCH(3, .item_bytes = 4), SPDL_SINK(3));
        CHECK_EQ(w.count, 0);
        RUN_ALL(free, SPDL_SOURCE(make, .free_item = free),
                SPDL_PIPE(twice, .again = true, .free_item = free), SPDL_SINK(3));
        CHECK_EQ(w.count, 0);
        RUN_ALL(spdl_buffer_free,
                SPDL_SOURCE(fill, .item_bytes = 4, .allocator = &memory,
                            .free_item = spdl_buffer_free), SPDL_SINK(3));
        CHECK_EQ(w.count, 0);
        RUN_ALL(NULL, SPDL_SOURCE(make, .free_item = free), other, SPDL_SINK(3));
        CHECK_EQ(w.count, 1); /* its results are of any type */
    }
}

SPDL_FN(no_number, void, int) { return spdl_sequence(task) == 400 ? SPDL_END : SPDL_OK; }

static void a_source_of_nothing(void) {
    warnings w;
    for (int workers = 0; workers < 3; ++workers) {
        RUN_ALL(NULL, SPDL_SOURCE(no_number), SPDL_SINK(3));
        CHECK_EQ(w.count, 1);
        CHECK_STR(w.text[0],
                  "stage 0 'no_number' has returned only NULL (100 times): is *out set?");
    }
}

/* It ends so. */
static void ends_with(spdl_pipeline *p, spdl_result result, const char *text) {
    void *taken;
    spdl_result last;
    while ((last = spdl_pipeline_next(p, &taken, SPDL_SECONDS(15))) == SPDL_OK)
        spdl_batch_free(taken);
    CHECK_STR(spdl_result_text(last), spdl_result_text(result));
    CHECK_STR(spdl_pipeline_error(p)->text, text);
    spdl_pipeline_destroy(p);
}

static spdl_pipeline *silent(int workers, const spdl_stage *rows, size_t count) {
    static warnings w;
    spdl_pipeline_desc desc = { .workers = TEST_WORKERS(workers) };
    spdl_pipeline *p;
    desc.logger.log_fn = log_warnings;
    desc.logger.user = &w;
    REQUIRE(spdl_pipeline_create(&p, &desc, rows, count) == SPDL_OK);
    return p;
}

#define SILENT(...) silent(workers, SPDL_STAGES(__VA_ARGS__))

typedef struct late_call {
    spdl_deferred call;
    void *buffer;
} late_call;

static void *completes_late(void *arg) {
    late_call *late = (late_call *)arg;
    spdl__node *node = &late->call.pipeline->node[1];
    for (bool pending = false; !pending; test_sleep_us(100)) {
        spdl__lock(&node->parked_lock, node->locks);
        pending = node->parked[0].state == SPDL__PARKED_PENDING;
        spdl__unlock(&node->parked_lock, node->locks);
    }
    memset(late->buffer, 0, 2 * sizeof(int));
    CHECK_EQ(spdl_complete(late->call, SPDL_OK, late->buffer), SPDL_OK);
    return NULL;
}

SPDL_FN(writes_late, int, int) {
    static late_call late;
    test_thread thread;
    late.buffer = spdl_buffer(task);
    late.call = spdl_defer(task);
    REQUIRE(late.buffer != NULL && test_thread_start(&thread, completes_late, &late));
    test_detach(thread);
    return SPDL_PENDING;
}

/* A part of a batch, and in a call that is completed later. */
static void calls_that_write_too_much(void) {
    const spdl_allocator memory = { some_memory, some_memory_free, NULL };
    size_t bytes = 2 * sizeof(int);
    for (int workers = 0; workers < 3; ++workers) {
        ends_with(SILENT(SPDL_SOURCE(fill_part, .ctx = &bytes), SPDL_BATCH(3, .item_bytes = 4),
                         SPDL_SINK(3)), SPDL_E_INVALID,
                  "stage 0 'fill_part', item 0: wrote more than the 4 bytes that spdl_buffer gave: "
                  ".item_bytes is too small");
        ends_with(SILENT(SPDL_SOURCE(make, .free_item = free),
                         SPDL_PIPE(writes_late, .deferred = true, .item_bytes = 4,
                                   .free_item = spdl_buffer_free),
                         SPDL_BATCH(2), SPDL_SINK(3)), SPDL_E_INVALID,
                  "stage 1 'writes_late', item 0: wrote more than the 4 bytes that spdl_buffer "
                  "gave: .item_bytes is too small");
        memory_left = 1; /* of the row, for none of its buffers */
        ends_with(SILENT(SPDL_SOURCE(fill, .item_bytes = (size_t)300 << 20, .allocator = &memory),
                         SPDL_SINK(1)), SPDL_E_NOMEM, "stage 0 'fill', item 0: out of memory");
        memory_left = 100;
    }
}

/* A doctor's tokens lie in no buffer. */
static void *int_copy(const void *from) {
    int *copy = (int *)malloc(sizeof *copy);
    if (copy != NULL) *copy = *(const int *)from;
    return copy;
}

SPDL_FN(makes_for_ever, void, int) {
    *out = (int *)calloc(1, sizeof **out);
    return SPDL_OK;
}

static void tokens_are_no_buffers(void) {
    for (int workers = 0; workers < 3; ++workers) {
        const spdl_doctor_desc doctor = { .seconds = 1e9, .quiet = true, .replay = true };
        spdl_pipeline_desc desc = { .workers = TEST_WORKERS(workers), .doctor = &doctor };
        spdl_pipeline *p;
        int *taken;
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
                    SPDL_SOURCE(makes_for_ever, .free_item = free),
                    SPDL_PIPE(renew, .copy_item = int_copy, .free_item = free),
                    SPDL_SINK(2))) == SPDL_OK);
        spdl__store32(&p->hand->keeps, 1);
        for (int i = 0; i < 100; ++i) {
            CHECK_EQ(SPDL_NEXT(p, &taken, SPDL_SECONDS(15)), SPDL_OK);
            free(taken);
            if (i == 20) spdl__kept_close(p->hand);
            if (i != 20) continue;
            __atomic_store_n(&p->hand->cut_until, spdl_time_ns() + 15000000000u,
                             __ATOMIC_RELAXED);
            __atomic_store_n(&p->hand->cut, 2, __ATOMIC_RELEASE);
        }
        spdl_pipeline_destroy(p);
    }
}

/* A source that waits by SPDL_SKIP, quickly or not. */
static void a_source_that_spins(void) {
    warnings w;
    for (int workers = 0; workers < 3; ++workers) {
        RUN_ALL(free, SPDL_SOURCE(spins, .free_item = free), SPDL_SINK(3));
        CHECK_EQ(w.count, 1);
        CHECK_STR(w.text[0], "stage 0 'spins' polls: it returned SPDL_SKIP 1000 times in a row. "
                             "Set .threads = 1 and wait in the function, or use SPDL_FEED. To "
                             "leave a number out return it, and skip in the next row");
        RUN_ALL(free, SPDL_SOURCE(skips_some, .free_item = free), SPDL_SINK(3));
        CHECK_EQ(w.count, 0);
        RUN_ALL(free, SPDL_SOURCE(skips_slowly, .free_item = free), SPDL_SINK(3));
        CHECK_EQ(w.count, 0);
    }
}

static int made_so_far;
SPDL_FN(counts_itself, void, int) {
    if (++made_so_far > 400) return SPDL_END;
    *out = (int *)calloc(1, sizeof **out);
    return SPDL_OK;
}
SPDL_FN(draws, void, int) {
    *out = (int *)calloc(1, sizeof **out);
    **out = (int)(spdl_item_key(task) % 100);
    return SPDL_OK;
}
SPDL_FN(none_of_odd_numbers, void, int) {
    if (spdl_sequence(task) % 2 == 0) *out = (int *)calloc(1, sizeof **out);
    return SPDL_OK;
}

static void go_to(warnings *w, int workers, spdl_stage source) {
    spdl_pipeline_desc desc = { .workers = workers };
    spdl_pipeline *p;
    memset(w, 0, sizeof *w);
    desc.logger.log_fn = log_warnings;
    desc.logger.user = w;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(source, SPDL_SINK(3))) == SPDL_OK);
    for (uint64_t to = 31; to > 0; to -= 10) {
        void *taken;
        CHECK_EQ(spdl_pipeline_rewind(p, to, SPDL_FOREVER), SPDL_OK);
        REQUIRE(spdl_pipeline_next(p, &taken, SPDL_FOREVER) == SPDL_OK);
        free(taken);
        if (to == 1) break;
    }
    spdl_pipeline_destroy(p);
}

/* Once; not of one that knows its number, nor of SPDL_COUNT. */
static void a_source_that_does_not_seek(void) {
    warnings w;
    for (int workers = -1; workers < 3; ++workers) {
        go_to(&w, workers, (spdl_stage)SPDL_SOURCE(counts_itself, .free_item = free));
        CHECK_EQ(w.count, 1);
        CHECK_STR(w.text[0], "stage 0 'counts_itself' returned an item after a rewind or load, and "
                             "has never called spdl_sequence: is it item 31 of epoch 0?");
        go_to(&w, workers, (spdl_stage)SPDL_SOURCE(make, .free_item = free));
        CHECK_EQ(w.count, 0);
        go_to(&w, workers, (spdl_stage)SPDL_SOURCE(draws, .free_item = free));
        CHECK_EQ(w.count, 0);
    }
}

static void a_first_result_of_null_after_a_rewind_is_fine(void) {
    warnings w;
    go_to(&w, SPDL_INLINE, (spdl_stage)SPDL_SOURCE(none_of_odd_numbers, .free_item = free));
    CHECK_EQ(w.count, 0);
}

TEST_TABLE(debug) {
    TEST_CASE(two_threads_on_a_side_for_one),
    TEST_CASE(one_thread_on_each_side_is_fine),
    TEST_CASE(a_side_may_change_hands),
    TEST_CASE(use_after_close),
    TEST_CASE(a_stage_that_hands_on_nothing),
    TEST_CASE(items_that_nobody_frees),
    TEST_CASE(batches_and_buffers_that_are_out),
    TEST_CASE(a_buffer_of_a_call_that_forgets_return),
    TEST_CASE(a_call_that_frees_its_buffer),
    TEST_CASE(rows_of_other_kinds_are_fine),
    TEST_CASE(a_source_of_nothing),
    TEST_CASE(calls_that_write_too_much),
    TEST_CASE(tokens_are_no_buffers),
    TEST_CASE(a_source_that_spins),
    TEST_CASE(a_source_that_does_not_seek),
    TEST_CASE(a_first_result_of_null_after_a_rewind_is_fine),
    TEST_END,
};
