/* items.h - what the tests of pipelines share: items that are counted, stages that follow a script,
   and a trainer that writes down what it gets.

       spdl_pipeline *p = START(workers, COUNT_TO(10),
                                SPDL_PIPE(follow, SCRIPT(.every = 3, .result = SPDL_SKIP)),
                                SPDL_SINK(3));
       RUN(p, "1 2 4 5 7 8", SPDL_END);      takes everything, destroys, and counts the items

   Included once in a test file, in place of the header itself. The library is compiled once, in
   tests/library.c; a test file that uses private names defines ITEMS_PRIVATE, and has its own. */
#ifndef ITEMS_H_INCLUDED
#define ITEMS_H_INCLUDED

#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>

void timing_point(const char *id);
bool thread_refused(void);
#if defined(ITEMS_PRIVATE) || defined(ITEMS_LIBRARY)
#define SPDL_TEST_POINT(id) timing_point(id)
#define SPDL_CREATE_THREAD(...) (thread_refused() ? NULL : CreateThread(__VA_ARGS__))
#define SPDL_PTHREAD_CREATE(...) (thread_refused() ? EAGAIN : pthread_create(__VA_ARGS__))
#define SPDL_IMPLEMENTATION
#endif
#ifdef ITEMS_PRIVATE
#define SPDL_STATIC
#endif
#include "../spdl.h"
#include "test.h"

static inline void sleep_us(int64_t us) { test_sleep_us(us); }

/* --- yields where timing decides, or no step further; threads that cannot be had --- */

extern uint64_t chaos;   /* 0: none; else the seed of every thread's yields */
extern int frozen;       /* calls that reached the frozen point since the last freeze_some */
extern int threads_left; /* threads of the library fail from then on; -1: never */

/* The first `most` that come to this point stay there until the next call; the others pass. */
void freeze_some(const char *at, int most);

static inline void freeze(const char *at) { freeze_some(at, INT_MAX); }
static inline void thaw(void) { freeze_some(NULL, 0); }

static inline void chaos_on(void) {
    __atomic_store_n(&chaos, test_seed() | 1, __ATOMIC_RELAXED);
}

/* What tests look at inside of the library. */
int task_worker(const spdl_task *task);
const spdl_pipeline *task_pipeline(const spdl_task *task);
int row_named(const spdl_pipeline *p, const char *name); /* or -1 */
bool row_has_times(const spdl_pipeline *p, int row);
uint32_t rows_failed(const spdl_pipeline *p); /* a bit for each row */
bool rows_are_shut(const spdl_pipeline *p);   /* nobody can enter one */
const int *consumer_inside(const spdl_pipeline *p); /* 1: it is in next */
const int *producer_inside(const spdl_pipeline *p); /* 1: it is in push */

static inline test_thread thread_of(void *(*entry)(void *), void *arg) {
    test_thread thread;
    REQUIRE(test_thread_start(&thread, entry, arg));
    return thread;
}

/* Until *word is at least `value`; leaves the test when that takes too long. */
static inline void await(const int *word, int value) {
    const uint64_t start = spdl_time_ns();
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) < value) {
        REQUIRE(spdl_time_ns() - start < 15000000000u);
        sleep_us(200);
    }
}

/* --- items --- */

typedef struct item {
    uint32_t magic;
    long value;
} item;

enum { ALIVE = 0x17e40001, DEAD = 0x17e4dead };

static long items_live;

static inline item *item_make(long value) {
    item *made = (item *)test_memory(sizeof(void *), sizeof *made);
    REQUIRE(made != NULL);
    made->magic = ALIVE;
    made->value = value;
    __atomic_add_fetch(&items_live, 1, __ATOMIC_RELAXED);
    return made;
}

/* The next item that is made has its address. */
static inline void item_free(void *memory) {
    item *dead = (item *)memory;
    CHECK_EQ(__atomic_exchange_n(&dead->magic, DEAD, __ATOMIC_RELAXED), ALIVE);
    __atomic_sub_fetch(&items_live, 1, __ATOMIC_RELAXED);
    test_memory_free(memory);
}

static inline long items_alive(void) { return __atomic_load_n(&items_live, __ATOMIC_RELAXED); }

/* --- stages that do as they are told --- */

typedef struct script {
    long count;         /* source: so many items; -1: without end */
    spdl_result last;   /* source: told in place of SPDL_END */
    int every, rest;    /* items whose value % every is rest ... */
    spdl_result result; /* ... meet with this */
    long times, plus;   /* the value is multiplied, if not by 0, and added to */
    bool fresh;         /* hands on a new item in place of its input; it has freed an odd one */
    long sleep_us;      /* in each call */
    const int *gate;    /* the call with gate_at waits until this is not 0 */
    long gate_at;
    long stop_at;       /* calls spdl_stop at this value, unless 0 */
    /* written by the calls, atomically */
    int calls, inside, most;
} script;

#define SCRIPT(...) .ctx = &(script){ __VA_ARGS__ }
#define SOURCE(...) SPDL_SOURCE(count_up, SCRIPT(__VA_ARGS__), .free_item = item_free)
#define COUNT_TO(n) SOURCE(.count = (n))

static inline void script_enter(script *s) {
    const int inside = __atomic_add_fetch(&s->inside, 1, __ATOMIC_SEQ_CST);
    int most = __atomic_load_n(&s->most, __ATOMIC_RELAXED);
    while (inside > most && !__atomic_compare_exchange_n(&s->most, &most, inside, false,
                                                         __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    __atomic_add_fetch(&s->calls, 1, __ATOMIC_RELEASE);
}

static inline void script_leave(script *s) { __atomic_sub_fetch(&s->inside, 1, __ATOMIC_SEQ_CST); }

static inline spdl_result script_act(const script *s, spdl_task *task, long value) {
    sleep_us(s->sleep_us);
    if (s->gate != NULL && value == s->gate_at) await(s->gate, 1);
    if (s->stop_at != 0 && value == s->stop_at) spdl_stop(task);
    if (s->every == 0 || value % s->every != s->rest) return SPDL_OK;
    if (s->result == SPDL_E_STAGE) return spdl_fail(task, "value %ld is bad", value);
    return s->result;
}

/* The source: values are the numbers of the items; `every` looks at the number of the call. Without
   a script it has none. */
SPDL_FN(count_up, void, item) {
    script *s = (script *)spdl_ctx(task);
    const long value = (long)spdl_sequence(task);
    spdl_result result;
    if (s == NULL) return SPDL_END;
    if (s->count >= 0 && value >= s->count) return s->last ? s->last : SPDL_END;
    script_enter(s);
    result = script_act(s, task, s->every ? s->calls - 1 : value);
    if (result == SPDL_OK) *out = item_make(value);
    script_leave(s);
    return result;
}

SPDL_FN(follow, item, item) {
    script *s = (script *)spdl_ctx(task);
    const long value = in->value * (s->times ? s->times : 1) + s->plus;
    spdl_result result;
    script_enter(s);
    CHECK_EQ(in->magic, ALIVE);
    result = script_act(s, task, value);
    if (result == SPDL_OK && s->fresh && value % 2 != 0) {
        spdl_take(task);
        item_free(in); /* the result gets its address */
    }
    if (result == SPDL_OK) {
        *out = s->fresh ? item_make(value) : in;
        (*out)->value = value;
    }
    script_leave(s);
    return result;
}

/* --- making one --- */

static inline void log_nothing(spdl_log_level level, const char *text, void *user) {
    (void)level;
    (void)text;
    (void)user;
}

static inline spdl_pipeline *start(int workers, spdl_pool *pool, const spdl_stage *rows,
                                   size_t count) {
    spdl_pipeline_desc desc = { 0 };
    spdl_pipeline *p = NULL;
    spdl_error error = { 0 };
    desc.workers = pool != NULL ? 0 : TEST_WORKERS(workers);
    desc.pool = pool;
    desc.error = &error;
    desc.logger.log_fn = log_nothing; /* failures and odd rows are what is tried */
    if (spdl_pipeline_create(&p, &desc, rows, count) != SPDL_OK) CHECK_STR(error.text, "");
    REQUIRE(p != NULL);
    return p;
}

#define START(workers, ...) start((workers), NULL, SPDL_STAGES(__VA_ARGS__))
#define START_ON(pool, ...) start(0, (pool), SPDL_STAGES(__VA_ARGS__))

static inline spdl_pool *pool_of(int workers) {
    spdl_pool_desc desc = { 0 };
    spdl_pool *pool = NULL;
    desc.workers = workers;
    REQUIRE(spdl_pool_create(&pool, &desc) == SPDL_OK);
    return pool;
}

/* --- the trainer --- */

typedef struct notes {
    char text[8192];
    size_t length;
    long taken;
} notes;

__attribute__((format(printf, 2, 3))) static inline void note(notes *n, const char *format, ...) {
    va_list args;
    if (n->length >= sizeof n->text) return;
    va_start(args, format);
    n->length += (size_t)vsnprintf(n->text + n->length, sizeof n->text - n->length, format, args);
    va_end(args);
}

static inline void note_item(notes *n, void *taken) {
    item *it = (item *)taken;
    if (it == NULL) note(n, "-");
    else note(n, "%ld", it->value);
    if (it != NULL) item_free(it);
}

/* Batches are written as "0 1 2|3 4 5|6". */
static inline void note_batch(notes *n, void *taken) {
    spdl_batch *batch = (spdl_batch *)taken;
    CHECK_EQ(batch->sequence, n->taken);
    for (size_t i = 0; i < batch->count; ++i) {
        const item *it = (const item *)batch->items[i];
        note(n, i ? " " : "");
        if (it == NULL) note(n, "-");
        else note(n, "%ld", it->value);
    }
    spdl_batch_free(batch);
}

/* Takes up to `most` items. How it ended, SPDL_OK when it is not over. */
static inline spdl_result take(spdl_pipeline *p, notes *n, long most, const char *separator,
                               void (*write)(notes *n, void *taken)) {
    spdl_result result = SPDL_OK;
    for (; most > 0; --most, ++n->taken) {
        void *taken;
        result = spdl_pipeline_next(p, &taken, SPDL_SECONDS(15));
        if (result != SPDL_OK) break;
        if (n->taken > 0) note(n, "%s", separator);
        write(n, taken);
    }
    return result;
}

static inline void took(spdl_pipeline *p, long most, bool batches, const char *text,
                        spdl_result end, const char *file, int line) {
    notes n = { .length = 0 };
    const spdl_result result = batches ? take(p, &n, most, "|", note_batch)
                                       : take(p, &n, most, " ", note_item);
    test_check_str(n.text, text, file, line, "what was taken");
    test_check_str(spdl_result_text(result), spdl_result_text(end), file, line, "the end");
    if (result == SPDL_OK || result == SPDL_TIMEOUT) return;
    for (int again = 0; again < 3; ++again) { /* the end is told by every call */
        void *untouched = &n;
        CHECK_EQ(spdl_pipeline_next(p, &untouched, again ? SPDL_FOREVER : 0), result);
        CHECK(untouched == &n);
    }
}

static inline void done(spdl_pipeline *p, const char *file, int line) {
    spdl_pipeline_destroy(p);
    test_check_eq(items_alive(), 0, file, line, "items that are left");
}

static inline void run(spdl_pipeline *p, bool batches, const char *text, spdl_result end,
                       const char *file, int line) {
    took(p, 1000000, batches, text, end, file, line);
    done(p, file, line);
}

#define TAKE(p, most, text) took((p), (most), false, (text), SPDL_OK, __FILE__, __LINE__)
#define TAKE_ALL(p, text, end) took((p), 1000000, false, (text), (end), __FILE__, __LINE__)
#define TAKE_BATCHES(p, text, end) took((p), 1000000, true, (text), (end), __FILE__, __LINE__)
#define DONE(p) done((p), __FILE__, __LINE__)
#define RUN(p, text, end) run((p), false, (text), (end), __FILE__, __LINE__)
#define RUN_BATCHES(p, text, end) run((p), true, (text), (end), __FILE__, __LINE__)

/* Takes up to `most` items, which are to be first, first + 1 and so on; how many there were. */
static inline long take_from(spdl_pipeline *p, long first, long most, spdl_result end) {
    spdl_result result = SPDL_OK;
    long count = 0;
    for (; count < most; ++count) {
        item *it = NULL;
        result = SPDL_NEXT(p, &it, SPDL_SECONDS(15));
        if (result != SPDL_OK) break;
        CHECK_EQ(it->value, first + count);
        item_free(it);
    }
    CHECK_STR(spdl_result_text(result), spdl_result_text(end));
    return count;
}

static inline spdl_stage_stats stats_of(const spdl_pipeline *p, int row) {
    static spdl_stats stats;
    spdl_pipeline_stats(p, &stats);
    return stats.stage[row];
}

#endif /* ITEMS_H_INCLUDED */
