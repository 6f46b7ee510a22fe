/* flow.h - what the tests of a pipeline's flow share: stages that make many of one, gather and
   pass on, and trainers that do not know the order, or take epoch by epoch. Included once in a
   test file, in place of the header itself. */
#ifndef FLOW_H_INCLUDED
#define FLOW_H_INCLUDED

#include "items.h"


#define FOLLOW(...) SPDL_PIPE(follow, SCRIPT(__VA_ARGS__), .free_item = item_free)

/* Workers that everything is tried with. */
static const int crowds[] = { 0, 1, 2, 8 };
enum { CROWDS = 4 };

static inline int by_value_of(const void *a, const void *b) {
    const long x = *(const long *)a, y = *(const long *)b;
    return (x > y) - (x < y);
}

/* Takes all items: their values as they came, and how many. */
static inline size_t take_values(spdl_pipeline *p, long *values, size_t most, spdl_result end) {
    spdl_result result = SPDL_OK;
    size_t count = 0;
    for (; count < most; ++count) {
        item *it = NULL;
        result = SPDL_NEXT(p, &it, SPDL_SECONDS(15));
        if (result != SPDL_OK) break;
        values[count] = it->value;
        item_free(it);
    }
    CHECK_STR(spdl_result_text(result), spdl_result_text(end));
    return count;
}

/* As RUN where the order is not known: the values in order of size. */
static inline void run_sorted(spdl_pipeline *p, const char *text, spdl_result end,
                              const char *file, int line) {
    static long values[1000];
    const size_t count = take_values(p, values, 1000, end);
    notes n = { .length = 0 };
    qsort(values, count, sizeof values[0], by_value_of);
    for (size_t i = 0; i < count; ++i) note(&n, i ? " %ld" : "%ld", values[i]);
    test_check_str(n.text, text, file, line, "what was taken, sorted");
    done(p, file, line);
}

#define RUN_SORTED(p, text, end) run_sorted((p), (text), (end), __FILE__, __LINE__)

/* How the pipeline failed: its row, and what the text says behind stage and item. */
static inline void failed_with(const spdl_pipeline *p, int stage, const char *text) {
    CHECK(spdl_pipeline_failed(p));
    CHECK_EQ(spdl_pipeline_error(p)->stage, stage);
    CHECK_STR(spdl_pipeline_error(p)->text, text);
}

/* Takes all items, whatever they are, up to the end: how many there were. */
static inline long take_from_any(spdl_pipeline *p) {
    static long values[1000];
    return (long)take_values(p, values, 1000, SPDL_END);
}

/* Waits up to 10 seconds for the process to end, and for it to end well. */
static inline void ends_well(pid_t child) {
    int status = 0;
    pid_t ended = 0;
    for (int i = 0; i < 1000 && ended == 0; ++i) {
        ended = waitpid(child, &status, WNOHANG);
        if (ended == 0) sleep_us(10000);
    }
    if (ended == 0) kill(child, SIGKILL);
    CHECK_EQ(ended, child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static inline void open_gate(int *gate) { __atomic_store_n(gate, 1, __ATOMIC_RELEASE); }

/* --- stages --- */

SPDL_FN(pass_on, item, item) {
    *out = in;
    return SPDL_OK;
}

SPDL_FN(pass_batch, spdl_batch, spdl_batch) {
    *out = in;
    return SPDL_OK;
}

typedef struct burst {
    long modulo, plus;  /* an input becomes value % modulo + plus items */
    bool input;         /* and the input itself behind them */
    long fail_at;       /* then fails if value % 5 is this, unless 0 */
    int slow;           /* the first call for an even value sleeps so many us */
} burst;

/* 3 becomes 300 301 302, and 3 itself when told so. */
SPDL_FN(scatter, item, item) {
    const burst *b = (const burst *)spdl_ctx(task);
    void **state = spdl_call_state(task);
    const long at = (long)(intptr_t)*state;
    const long count = (b->modulo ? in->value % b->modulo : 0) + b->plus;
    if (at == 0 && in->value % 2 == 0) sleep_us(b->slow);
    if (at < count) {
        *out = item_make(in->value * 100 + at);
        *state = (void *)(intptr_t)(at + 1);
        return SPDL_AGAIN;
    }
    if (b->fail_at && in->value % 5 == b->fail_at)
        return spdl_fail(task, "no more of %ld", in->value);
    *out = in;
    return b->input ? SPDL_OK : SPDL_SKIP;
}

#define BURST(...) .ctx = &(burst){ __VA_ARGS__ }
#define SCATTER(...) SPDL_PIPE(scatter, __VA_ARGS__, .again = true, .free_item = item_free)

/* Adds up values, and hands on a sum that is heavy enough. */
typedef struct scale {
    long limit, sum;
    bool flushed_bad; /* the flush fails */
    int flushes;
} scale;

SPDL_FN(weigh, item, item) {
    scale *s = (scale *)spdl_ctx(task);
    const bool flush = spdl_flushing(task);
    CHECK_EQ(in == NULL, flush);
    if (!flush) s->sum += in->value;
    else ++s->flushes;
    if (flush) spdl_take(task); /* of nothing */
    if (flush && s->flushed_bad) return spdl_fail(task, "%ld is left", s->sum);
    if (flush ? s->sum == 0 : s->sum < s->limit) return SPDL_SKIP;
    *out = item_make(s->sum);
    s->sum = 0;
    return SPDL_OK;
}

/* The scale, and more fields. */
#define WEIGH(...) SPDL_PIPE(weigh, .flush = true, .free_item = item_free, .ctx = __VA_ARGS__)

/* --- epochs --- */

#define CONTINUOUS(...)                                                                            \
    SPDL_SOURCE(count_up, SCRIPT(__VA_ARGS__), .continuous = true, .free_item = item_free)

/* Takes one epoch. */
static inline void take_epoch(spdl_pipeline *p, const char *text, bool batches, const char *file,
                       int line) {
    notes n = { .length = 0 };
    const spdl_result result = batches ? take(p, &n, 1000, "|", note_batch)
                                       : take(p, &n, 1000, " ", note_item);
    test_check_str(n.text, text, file, line, "an epoch");
    test_check_str(spdl_result_text(result), spdl_result_text(SPDL_END), file, line, "its end");
}

#define TAKE_EPOCH(p, text) take_epoch((p), (text), false, __FILE__, __LINE__)
#define TAKE_EPOCH_OF_BATCHES(p, text) take_epoch((p), (text), true, __FILE__, __LINE__)

#endif /* FLOW_H_INCLUDED */
