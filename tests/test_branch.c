/* Pipelines with branches: paths, merges in the order of the branch and in that of completion, and
   epochs, failures, stops and rewinds in all of them. */
#include "flow.h"

#include <limits.h>

/* A merge that takes what is ready. */
#define MERGE_READY SPDL_MERGE(.output_order = SPDL_ORDER_COMPLETION)

/* --- branches --- */

SPDL_FN(by_value, item, item) {
    *out = in;
    return spdl_route(task, (int)in->value % *(const int *)spdl_ctx(task));
}

#define BY_VALUE(paths) BY_VALUE_OF(paths, 0)
#define BY_VALUE_OF(paths, room)                                                                   \
    SPDL_BRANCH(by_value, .ctx = &(int){ (paths) }, .buffer_size = (room))

static void items_go_down_their_path(void) {
    for (int i = 0; i < 2 * CROWDS; ++i)
        RUN(START(crowds[i / 2],
                  SPDL_SOURCE(count_up, SCRIPT(.count = 10), .free_item = item_free,
                                     .buffer_size = 1),
                         BY_VALUE(2), SPDL_PATH("even", .buffer_size = 1 + i % 2),
                         FOLLOW(.plus = 100), SPDL_PATH("odd", .buffer_size = 1 + i % 2),
                         FOLLOW(.times = 10, .fresh = true), SPDL_MERGE(), SPDL_SINK(1)),
                   "100 10 102 30 104 50 106 70 108 90", SPDL_END);
}

SPDL_FN(to_path, item, item) {
    *out = in;
    return spdl_route(task, in->value < 2 ? (int)in->value : *(const int *)spdl_ctx(task));
}

/* Does not look at the answer. */
SPDL_FN(to_path_regardless, item, item) {
    (void)to_path(task, in, out);
    return SPDL_OK;
}

static void a_path_that_is_no_path_is_a_failure(void) {
    static const int wrong[] = { 2, 31, -1, INT_MAX, INT_MIN };
    for (int i = 0; i < 10 * CROWDS; ++i) {
        const int path = wrong[i % 5];
        char text[100];
        const spdl_stage looks = SPDL_BRANCH(to_path, .ctx = &(int){ path });
        const spdl_stage does_not = SPDL_BRANCH(to_path_regardless, .name = "to_path",
                                                .ctx = &(int){ path });
        spdl_pipeline *p = START(crowds[i / 10], COUNT_TO(9),
                                 i % 10 < 5 ? looks : does_not, SPDL_PATH("a"),
                                 FOLLOW(.plus = 0), SPDL_PATH("b"), SPDL_MERGE(), SPDL_SINK(1));
        TAKE_ALL(p, "0 1", SPDL_E_INVALID);
        snprintf(text, sizeof text,
                 "stage 1 'to_path', item 2: path %d, but there are 2 paths", path);
        failed_with(p, 1, text);
        DONE(p);
    }
}

/* Nobody said where to: the first path. */
static void the_first_path_is_the_default(void) {
    for (int i = 0; i < CROWDS; ++i)
        RUN(START(crowds[i], COUNT_TO(6), SPDL_BRANCH(pass_on), SPDL_PATH("a"),
                  FOLLOW(.plus = 10), SPDL_PATH("b"), FOLLOW(.plus = 20), SPDL_MERGE(),
                  SPDL_SINK(1)),
            "10 11 12 13 14 15", SPDL_END);
}

static void paths_may_be_empty(void) {
    for (int i = 0; i < CROWDS; ++i) {
        RUN(START(crowds[i], COUNT_TO(9), BY_VALUE(3), SPDL_PATH("a"), SPDL_PATH("b"),
                         FOLLOW(.plus = 100), SPDL_PATH("c"), SPDL_MERGE(), SPDL_SINK(1)),
                   "0 101 2 3 104 5 6 107 8", SPDL_END);
        RUN(START(crowds[i], COUNT_TO(4), BY_VALUE(2), SPDL_PATH("a"), SPDL_PATH("b"),
                         SPDL_MERGE(), FOLLOW(.plus = 1), SPDL_SINK(1)),
                   "1 2 3 4", SPDL_END);
    }
}

static void branches_may_hold_branches(void) {
    for (int i = 0; i < CROWDS; ++i)
        RUN(START(crowds[i], COUNT_TO(12), BY_VALUE(2), SPDL_PATH("even"),
                         BY_VALUE(3), SPDL_PATH("0 6"), FOLLOW(.plus = 100), SPDL_PATH("4 10"),
                         SPDL_PATH("2 8"), FOLLOW(.plus = 300), SPDL_MERGE(), FOLLOW(.plus = 1000),
                         SPDL_PATH("odd"), BY_VALUE(4), SPDL_PATH("none"), SPDL_PATH("1 5 9"),
                         FOLLOW(.plus = 500), SPDL_PATH("none either"), SPDL_PATH("3 7 11"),
                         SPDL_MERGE(), SPDL_MERGE(), FOLLOW(.fresh = true), SPDL_SINK(1)),
                   "1100 501 1302 3 1004 505 1106 7 1308 509 1010 11", SPDL_END);
}

/* Filters, calls at the same time, another order, and items that become several. */
static void paths_may_hold_any_rows(void) {
    for (int i = 0; i < CROWDS; ++i)
        RUN_SORTED(
            START(crowds[i], COUNT_TO(24), BY_VALUE(4), SPDL_PATH("filter"),
                  SPDL_PIPE(follow, SCRIPT(.every = 8, .result = SPDL_SKIP), .concurrency = 3),
                  SPDL_PATH("completion"),
                  SPDL_PIPE(follow, SCRIPT(.fresh = true, .sleep_us = 100), .concurrency = 4,
                            .output_order = SPDL_ORDER_COMPLETION, .free_item = item_free),
                  SPDL_PATH("one to many"), SCATTER(BURST(.plus = 2)),
                  SPDL_PATH("flush"), WEIGH(&(scale){ .limit = 20 }), MERGE_READY, SPDL_SINK(1)),
            "1 4 5 9 12 13 17 20 21 21 23 34 200 201 600 601 1000 1001 1400 1401 1800 1801 2200 "
            "2201",
            SPDL_END);
}

SPDL_FN(sum_up, spdl_batch, item) {
    long sum = 0;
    for (size_t i = 0; i < in->count; ++i) sum += ((const item *)in->items[i])->value;
    *out = item_make(sum);
    return SPDL_OK;
}

static void paths_may_hold_batches(void) {
    for (int i = 0; i < CROWDS; ++i)
        RUN_SORTED(START(crowds[i], COUNT_TO(20), BY_VALUE(2), SPDL_PATH("even"), SPDL_BATCH(4),
                         SPDL_PIPE(sum_up, .free_item = item_free), SPDL_PATH("odd"),
                         SPDL_BATCH(3, .drop_last = true),
                         SPDL_PIPE(sum_up, .free_item = item_free, .concurrency = 2),
                         MERGE_READY, SPDL_SINK(1)),
                   "9 12 27 34 44 45", SPDL_END);
}

/* A path is a row: 29 of them, and a source, a branch and a merge. */
static void as_many_paths_as_there_may_be(void) {
    static char names[30][16];
    spdl_stage rows[SPDL_MAX_STAGES + 2] = { COUNT_TO(100), BY_VALUE(29) };
    spdl_error error;
    const spdl_pipeline_desc desc = { .error = &error, .logger = { log_nothing, NULL } };
    spdl_pipeline *none;
    for (int i = 0; i < 30; ++i) {
        snprintf(names[i], sizeof names[i], "%d", i);
        rows[2 + i] = (spdl_stage)SPDL_PATH(names[i]);
    }
    rows[31] = (spdl_stage)SPDL_MERGE();
    rows[32] = (spdl_stage)SPDL_SINK(1);
    for (int i = 0; i < 2 * CROWDS; ++i) {
        static long values[200];
        spdl_pipeline *p;
        if (i % 2) rows[31] = (spdl_stage)MERGE_READY;
        p = start(crowds[i / 2], NULL, rows, 33);
        CHECK_EQ(take_values(p, values, 200, SPDL_END), 100);
        if (i % 2) qsort(values, 100, sizeof values[0], by_value_of);
        for (int k = 0; k < 100; ++k) CHECK_EQ(values[k], k);
        CHECK_EQ(row_named(p, "28"), 30);
        rows[31] = (spdl_stage)SPDL_MERGE();
        DONE(p);
    }
    rows[31] = (spdl_stage)SPDL_PATH(names[29]);
    rows[32] = (spdl_stage)SPDL_MERGE();
    rows[33] = (spdl_stage)SPDL_SINK(1);
    CHECK_EQ(spdl_pipeline_create(&none, &desc, rows, 34), SPDL_E_INVALID);
    CHECK(strstr(error.text, "too many stages") != NULL);
}

/* --- a path that is full --- */

/* Values below *ctx go down path 0, the others down path 1. */
SPDL_FN(below, item, item) {
    *out = in;
    return spdl_route(task, in->value >= *(const long *)spdl_ctx(task));
}

#define BELOW(first, room) SPDL_BRANCH(below, .ctx = &(first), .buffer_size = (room))

/* The first call with value 0 is under way until it is let go; no worker waits in it. */
typedef struct hold {
    spdl_deferred deferred;
    item *it;
    int there;
} hold;

SPDL_FN(hold_first, item, item) {
    hold *h = (hold *)spdl_ctx(task);
    *out = in;
    if (in->value != 0 || __atomic_load_n(&h->there, __ATOMIC_ACQUIRE)) return SPDL_OK;
    h->it = in;
    h->deferred = spdl_defer(task);
    __atomic_store_n(&h->there, 1, __ATOMIC_RELEASE);
    return SPDL_PENDING;
}

static void let_go(hold *h, spdl_result result) {
    await(&h->there, 1);
    CHECK_EQ(spdl_complete(h->deferred, result, result == SPDL_OK ? h->it : NULL), SPDL_OK);
}

#define HELD(h) SPDL_PIPE(hold_first, .ctx = &(h), .deferred = true, .free_item = item_free)

/* Until so many calls of a row have ended; nothing is delivered meanwhile, nor after it. */
static void calls_are(spdl_pipeline *p, int row, long calls) {
    const uint64_t since = spdl_time_ns();
    void *it = NULL;
    do {
        CHECK_EQ(spdl_pipeline_next(p, &it, 1000000), SPDL_TIMEOUT);
        REQUIRE(spdl_time_ns() - since < 15000000000u);
    } while ((long)stats_of(p, row).tasks < calls);
    CHECK_EQ(spdl_pipeline_next(p, &it, 5000000), SPDL_TIMEOUT);
    CHECK_EQ(stats_of(p, row).tasks, calls);
}

/* Takes what comes from 0 and from `first` on, each in its order: how many of both. */
static long take_both(spdl_pipeline *p, long first, spdl_result end) {
    long next[2] = { 0, first };
    spdl_result result;
    void *taken = NULL;
    while ((result = spdl_pipeline_next(p, &taken, SPDL_SECONDS(15))) == SPDL_OK) {
        const long value = ((item *)taken)->value;
        CHECK_EQ(value, next[value >= first]++);
        item_free(taken);
    }
    CHECK_STR(spdl_result_text(result), spdl_result_text(end));
    return next[0] + next[1] - first;
}

static int depth_of(const spdl_pipeline *p, int edge) {
    static spdl_stats stats;
    spdl_pipeline_stats(p, &stats);
    return stats.edge[edge].depth;
}

/* One item is in the call that waits, `buffer` in the path, and room - buffer wait: with one more
   in that path the branch has as many as may wait, and nothing passes. */
static void a_path_that_is_full_does_not_stop_the_others(void) {
    static const int rooms[] = { 0, 1, 5 };
    for (int i = 0; i < 12 * CROWDS; ++i) {
        const int may = rooms[i % 3], buffer = 1 + i / 3 % 2 * 2, more = i / 6 % 2;
        const long room = buffer + (may ? may : 32);
        long first = room + more;
        hold h = { .there = 0 };
        spdl_pipeline *p =
            START(crowds[i / 12], COUNT_TO(first + 60), BELOW(first, may),
                  SPDL_PATH("full", .buffer_size = buffer), HELD(h),
                  SPDL_PATH("free"), FOLLOW(.plus = 0), MERGE_READY, SPDL_SINK(1));
        if (more) calls_are(p, 1, room + 1);
        else CHECK_EQ(take_from(p, first, 60, SPDL_OK), 60);
        CHECK_EQ(depth_of(p, 2), room - 1 + more);
        let_go(&h, SPDL_OK);
        if (more) CHECK_EQ(take_both(p, first, SPDL_END), first + 60);
        else CHECK_EQ(take_from(p, 0, 1000, SPDL_END), first);
        DONE(p);
    }
}

static void an_inner_path_that_is_full_stops_only_its_branch(void) {
    for (int i = 0; i < 2 * CROWDS; ++i) {
        long first = 7 + i % 2, all = 1000; /* 1 in the call, 1 + 2 inside, 1 + 2 outside */
        hold h = { .there = 0 };
        spdl_pipeline *p =
            START(crowds[i / 2], COUNT_TO(first + 60), BELOW(first, 3),
                  SPDL_PATH("deep", .buffer_size = 1), BELOW(all, 2),
                  SPDL_PATH("full", .buffer_size = 1), HELD(h), SPDL_PATH("none"),
                  SPDL_MERGE(), SPDL_PATH("free"), MERGE_READY, SPDL_SINK(1));
        if (i % 2) calls_are(p, 1, 8);
        else CHECK_EQ(take_from(p, first, 60, SPDL_OK), 60);
        let_go(&h, SPDL_OK);
        CHECK_EQ(take_both(p, i % 2 ? first : 0, SPDL_END), i % 2 ? first + 60 : first);
        DONE(p);
    }
}

/* Nothing of an epoch comes after its end, also of what waited. */
static void what_waits_comes_before_the_end_of_its_epoch(void) {
    chaos_on();
    for (int i = 0; i < 3 * CROWDS; ++i) {
        long first = 8;
        hold h = { .there = 0 };
        spdl_pipeline *p =
            START(crowds[i / 3], CONTINUOUS(.count = first + 20), BELOW(first, 7),
                  SPDL_PATH("full", .buffer_size = 1), HELD(h), SPDL_PATH("free"),
                  FOLLOW(.plus = 0), MERGE_READY, SPDL_SINK(1));
        CHECK_EQ(take_from(p, first, 20, SPDL_OK), 20);
        let_go(&h, SPDL_OK);
        CHECK_EQ(take_from(p, 0, 1000, SPDL_END), first);
        for (int epoch = 0; epoch < i % 3; ++epoch)
            CHECK_EQ(take_both(p, first, SPDL_END), first + 20);
        DONE(p);
    }
}

/* What was routed before a failure on another path is delivered, also what waited. In the order of
   completion a failure waits for no call. */
static void a_path_that_fails_leaves_what_waits_for_others(void) {
    for (int i = 0; i < 2 * CROWDS; ++i) {
        const spdl_stage merge = SPDL_MERGE(), ready = MERGE_READY;
        long first = 10;
        hold h = { .there = 0 };
        void *it = NULL;
        spdl_pipeline *p =
            START(crowds[i / 2], COUNT_TO(-1), BELOW(first, 9), SPDL_PATH("full", .buffer_size = 1),
                  HELD(h), SPDL_PATH("fails"),
                  FOLLOW(.every = 100, .rest = 12, .result = SPDL_E_IO), i % 2 ? ready : merge,
                  SPDL_SINK(1));
        if (i % 2) CHECK_EQ(take_from(p, first, 100, SPDL_E_IO), 2);
        while (!spdl_pipeline_failed(p))
            REQUIRE(spdl_pipeline_next(p, &it, 1000000) == SPDL_TIMEOUT);
        let_go(&h, SPDL_OK);
        CHECK_EQ(take_from(p, 0, 1000, SPDL_E_IO), i % 2 ? 0 : 12);
        failed_with(p, 5, "stage 5 'follow', item 12: input or output error");
        DONE(p);
    }
}

/* And what waits for a path that fails is freed. */
static void what_waits_for_a_path_that_fails_is_freed(void) {
    for (int i = 0; i < CROWDS; ++i) {
        long first = 10;
        hold h = { .there = 0 };
        spdl_pipeline *p =
            START(crowds[i], COUNT_TO(first + 40), BELOW(first, 9),
                  SPDL_PATH("fails", .buffer_size = 1), HELD(h), SPDL_PATH("free"),
                  FOLLOW(.plus = 0), MERGE_READY, SPDL_SINK(1));
        CHECK_EQ(take_from(p, first, 40, SPDL_OK), 40);
        let_go(&h, SPDL_E_IO);
        CHECK_EQ(take_from(p, 0, 1000, SPDL_E_IO), 0);
        failed_with(p, 3, "stage 3 'hold_first', item 0: input or output error");
        DONE(p);
    }
}

/* Lets it go as soon as somebody waits for it. */
typedef struct keeper {
    hold h;
    int wanted, over; /* atomic */
} keeper;

static void *keeps(void *arg) {
    keeper *k = (keeper *)arg;
    bool held = true;
    while (!__atomic_load_n(&k->over, __ATOMIC_ACQUIRE)) {
        sleep_us(100);
        if (!held || !__atomic_load_n(&k->wanted, __ATOMIC_ACQUIRE) ||
            !__atomic_load_n(&k->h.there, __ATOMIC_ACQUIRE))
            continue;
        let_go(&k->h, SPDL_OK);
        held = false;
    }
    return NULL;
}

/* Even ones fill their path: 8 of them, so 7 odd ones come. */
static void what_waits_can_be_left_at_any_point(void) {
    chaos_on();
    for (int i = 0; i < 24 * CROWDS; ++i) {
        static long values[10];
        keeper k = { .wanted = 0 };
        spdl_pipeline *p =
            START(crowds[i / 24], COUNT_TO(-1), BY_VALUE_OF(2, 5),
                  SPDL_PATH("full", .buffer_size = 2), HELD(k.h), SPDL_PATH("free"),
                  FOLLOW(.fresh = true), MERGE_READY, SPDL_SINK(1));
        const test_thread thread = thread_of(keeps, &k);
        take_values(p, values, (size_t)(i % 8), SPDL_OK);
        for (long n = 0; n < i % 8; ++n) CHECK_EQ(values[n], 2 * n + 1);
        __atomic_store_n(&k.wanted, 1, __ATOMIC_RELEASE);
        if (i / 8 % 3 == 1) CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        if (i / 8 % 3 == 2) { /* or all of it starts again */
            CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_FOREVER), SPDL_OK);
            take_values(p, values, 7, SPDL_OK);
        }
        spdl_pipeline_destroy(p);
        __atomic_store_n(&k.over, 1, __ATOMIC_RELEASE);
        test_join(thread);
        CHECK_EQ(items_alive(), 0);
    }
}

/* --- merges in the order of the branch --- */

/* A random table with branches in branches, and what a sequential run makes of it. The lower bits
   of a value are the number of the item, counted through all epochs; the upper ones say which rows
   it has passed. */
enum { ID_BITS = 20, SHAPE_ROWS = 30, NOBODY = -1 };

typedef enum step_kind { STEP, BRANCH, PATH, MERGE } step_kind;

typedef struct shape shape;

typedef struct step {
    const shape *of;
    step_kind kind;
    uint64_t salt;
    uint64_t drops;   /* so many of 256 are skipped */
    uint64_t breaks;  /* so many fail, which is tolerated */
    long fatal;       /* and this one fails for good */
    int paths;        /* branch */
    bool deferred, in_turn;
} step;

struct shape {
    uint64_t chance;
    long per_epoch, epochs;
    int count;
    step row[SPDL_MAX_STAGES + 1];
    spdl_stage table[SPDL_MAX_STAGES + 2];
};

static uint64_t salted(uint64_t salt, long id) {
    uint64_t state = salt * 0x9e3779b97f4a7c15u + (uint64_t)id;
    return test_random(&state);
}

static long id_of(long value) { return value & ((1 << ID_BITS) - 1); }

static long marked(const step *s, long value) {
    const uint64_t passed = ((uint64_t)value >> ID_BITS) * 31 + s->salt % 1000;
    return (long)((passed & (UINT64_MAX >> (ID_BITS + 1))) << ID_BITS | (uint64_t)id_of(value));
}

/* What a row does with an item. */
static spdl_result step_result(const step *s, long id) {
    const uint64_t lot = salted(s->salt, id) >> 8 & 255;
    if (id == s->fatal) return SPDL_E_FORMAT;
    if (lot < s->drops) return SPDL_SKIP;
    return lot < s->drops + s->breaks ? SPDL_E_IO : SPDL_OK;
}

static int step_path(const step *s, long id) {
    const uint64_t lot = salted(s->salt, id);
    return (int)(lot >> 20 & 3 ? (lot >> 32) % (uint64_t)s->paths : 0);
}

SPDL_FN(shape_source, void, item) {
    const shape *of = (const shape *)spdl_ctx(task);
    const long sequence = (long)spdl_sequence(task), epoch = (long)spdl_epoch(task);
    if (sequence == of->per_epoch) return SPDL_END;
    *out = item_make(epoch * of->per_epoch + sequence);
    return SPDL_OK;
}

SPDL_FN(shape_step, item, item) {
    const step *s = (const step *)spdl_ctx(task);
    const long id = id_of(in->value);
    const spdl_result result = step_result(s, id);
    CHECK_EQ(spdl_sequence(task), id % s->of->per_epoch);
    CHECK_EQ(spdl_epoch(task), id / s->of->per_epoch);
    if (salted(s->salt, id) % 128 == 0) sleep_us(100);
    if (s->kind == BRANCH && result == SPDL_OK)
        CHECK_EQ(spdl_route(task, step_path(s, id)), SPDL_OK);
    if (result == SPDL_OK) in->value = marked(s, in->value);
    *out = in;
    if (!s->deferred || id % 2) return result;
    CHECK_EQ(spdl_complete(spdl_defer(task), result, in), SPDL_OK);
    return SPDL_PENDING;
}

/* What becomes of an item: SPDL_OK and its value, or how it ended, and where. */
static spdl_result shape_model(const shape *of, long id, long *value, int *where) {
    int i = 1;
    *value = id;
    while (i < of->count) {
        const step *s = &of->row[i];
        *where = i;
        if (s->kind == STEP || s->kind == BRANCH) {
            const spdl_result result = step_result(s, id);
            if (result != SPDL_OK) return result;
            *value = marked(s, *value);
        }
        if (s->kind == BRANCH) { /* to its path */
            int depth = 0, path = step_path(s, id);
            for (++i;; ++i) {
                depth += (of->row[i].kind == BRANCH) - (of->row[i].kind == MERGE);
                if (depth == 0 && of->row[i].kind == PATH && path-- == 0) break;
            }
        } else if (i + 1 < of->count && of->row[i + 1].kind == PATH) { /* to the merge */
            int depth = 0;
            for (++i; of->row[i].kind != MERGE || depth != 0; ++i)
                depth += (of->row[i].kind == BRANCH) - (of->row[i].kind == MERGE);
        } else {
            ++i;
        }
    }
    return SPDL_OK;
}

static uint64_t lot_of(shape *of, uint64_t most) { return test_random(&of->chance) % most; }

static step *shape_add(shape *of, step_kind kind) {
    step *s = &of->row[of->count++];
    memset(s, 0, sizeof *s);
    s->of = of;
    s->kind = kind;
    s->salt = test_random(&of->chance);
    s->fatal = NOBODY;
    return s;
}

static void shape_pipe(shape *of, bool in_turn) {
    step *s = shape_add(of, STEP);
    spdl_stage row = SPDL_PIPE(shape_step, .ctx = s, .max_failures = -1);
    const bool any = lot_of(of, 4) == 0;
    s->drops = any ? 40 + lot_of(of, 217) : 0;
    s->breaks = lot_of(of, 4) == 0 ? 30 : 0;
    s->deferred = row.deferred = lot_of(of, 4) == 0;
    row.concurrency = 1 + (int)lot_of(of, 4);
    row.buffer_size = 1 + (int)lot_of(of, 4);
    if (!in_turn && lot_of(of, 2)) row.output_order = SPDL_ORDER_COMPLETION;
    of->table[of->count - 1] = row;
}

/* Some rows, and branches with rows in their paths, which leave room for `rest` rows after them.
   `ready`: merges may take what is ready. */
static void shape_rows(shape *of, int rest, int depth, bool in_turn, bool ready) {
    for (uint64_t more = lot_of(of, 3 - (uint64_t)depth / 2); more > 0; --more)
        if (of->count + rest < SHAPE_ROWS) shape_pipe(of, in_turn);
    if (depth == 3 || of->count + rest + 5 > SHAPE_ROWS || (depth > 0 && lot_of(of, 2))) return;
    step *branch = shape_add(of, BRANCH);
    const bool turns = in_turn || !ready || lot_of(of, 2);
    const int paths = 2 + (int)lot_of(of, 2), at = of->count - 1;
    of->table[at] = (spdl_stage)SPDL_BRANCH(shape_step, .ctx = branch, .max_failures = -1,
                                            .buffer_size = 1 + (int)lot_of(of, 8));
    branch->drops = lot_of(of, 3) == 0 ? 30 : 0;
    for (int i = 0; i < paths; ++i) {
        if (of->count + rest + 1 + paths - i > SHAPE_ROWS) break;
        (void)shape_add(of, PATH);
        of->table[of->count - 1] =
            (spdl_stage)SPDL_PATH("path", .buffer_size = 1 + (int)lot_of(of, 4));
        ++branch->paths;
        shape_rows(of, rest + 1 + paths - i, depth + 1, turns, ready);
    }
    (void)shape_add(of, MERGE);
    of->table[of->count - 1] = (spdl_stage)SPDL_MERGE(
            .output_order = turns ? SPDL_ORDER_INPUT : SPDL_ORDER_COMPLETION,
            .buffer_size = 1 + (int)lot_of(of, 3));
    if (of->count + rest < SHAPE_ROWS && lot_of(of, 2)) shape_pipe(of, in_turn);
}

static void shape_make(shape *of, uint64_t chance, bool ready) {
    memset(of, 0, sizeof *of);
    of->chance = chance;
    of->per_epoch = TEST_SANITIZED ? 100 : 300;
    of->epochs = 3;
    (void)shape_add(of, STEP);
    of->table[0] = (spdl_stage)SPDL_SOURCE(shape_source, .ctx = of, .continuous = true,
                                           .free_item = item_free,
                                           .buffer_size = 1 + (int)lot_of(of, 4));
    shape_rows(of, 1, 0, !ready, ready);
    of->table[of->count - 1].buffer_size = 0;
    of->table[of->count] = (spdl_stage)SPDL_SINK(1 + (int)lot_of(of, 12));
}

/* A row that fails for good at this item, if it comes there; tolerance ends that row's. */
static void shape_breaks(shape *of, int row, long id) {
    of->row[row].fatal = id;
    of->row[row].breaks = 0;
    of->table[row].max_failures = 0;
}

static spdl_pipeline *shape_start(const shape *of, int workers) {
    return start(workers, NULL, of->table, (size_t)of->count + 1);
}

/* Where the consumer is in a sequential run: the items before `id` were taken, or ended. */
typedef struct cursor {
    long epoch, id;
} cursor;

/* Takes an item, or an end, and compares. Whether it goes on. */
static bool shape_take(const shape *of, spdl_pipeline *p, cursor *c) {
    const long end = (c->epoch + 1) * of->per_epoch;
    spdl_result expected = SPDL_SKIP, result;
    long value = 0;
    int where = 0;
    item *it = NULL;
    for (; c->id < end; ++c->id) {
        expected = shape_model(of, c->id, &value, &where);
        if (expected == SPDL_OK || expected == SPDL_E_FORMAT) break;
    }
    if (c->id == end) expected = SPDL_END;
    result = SPDL_NEXT(p, &it, SPDL_SECONDS(15));
    if (!CHECK_STR(spdl_result_text(result), spdl_result_text(expected))) return false;
    if (result == SPDL_OK) {
        const bool same = CHECK_EQ(it->value, value);
        item_free(it);
        ++c->id;
        return same;
    }
    if (result == SPDL_END) return ++c->epoch < of->epochs;
    CHECK_EQ(spdl_pipeline_error(p)->stage, where);
    CHECK_EQ(spdl_pipeline_error(p)->item, c->id % of->per_epoch);
    CHECK_EQ(SPDL_NEXT(p, &it, 0), SPDL_E_FORMAT); /* again */
    return false;
}

static const int many[] = { 0, 1, 2, 4, 16 };

enum { ROUNDS = TEST_SANITIZED ? 4 : 12 };

/* The order, and all that is in it, is that of a sequential run: any table, any number of
   workers. */
static void any_table_is_as_a_sequential_run(void) {
    chaos_on();
    for (uint64_t round = 0; round < ROUNDS; ++round) {
        static shape of;
        shape_make(&of, test_seed() + round, false);
        for (int i = 0; i < 5; ++i) {
            spdl_pipeline *p = shape_start(&of, many[i]);
            cursor c = { .id = 0 };
            while (shape_take(&of, p, &c)) {}
            DONE(p);
        }
    }
}

/* Failures anywhere: in a path, in several, in branches, above and below. The first in order is
   told, after all that comes before it. */
static void any_table_fails_as_a_sequential_run(void) {
    chaos_on();
    for (uint64_t round = 0; round < 2 * ROUNDS; ++round) {
        static shape of;
        shape_make(&of, test_seed() + round, false);
        for (uint64_t more = 1 + round % 3; more > 0; --more) {
            const int row = 1 + (int)lot_of(&of, (uint64_t)of.count - 1);
            long value, id;
            int where;
            if (of.row[row].kind == PATH || of.row[row].kind == MERGE) continue;
            for (int tries = 0; tries < 100; ++tries) { /* one that comes there */
                id = (long)lot_of(&of, (uint64_t)(of.per_epoch * 2));
                of.row[row].fatal = id;
                if (shape_model(&of, id, &value, &where) == SPDL_E_FORMAT && where == row) break;
            }
            shape_breaks(&of, row, id);
        }
        for (int i = 0; i < 5; ++i) {
            spdl_pipeline *p = shape_start(&of, many[i]);
            cursor c = { .id = 0 };
            while (shape_take(&of, p, &c)) {}
            DONE(p);
        }
    }
}

/* Stops after any number of items, from this thread or from inside, and starts again. */
static void any_table_can_be_left_and_rewound(void) {
    chaos_on();
    for (uint64_t round = 0; round < 2 * ROUNDS; ++round) {
        static shape of;
        spdl_pipeline *p;
        shape_make(&of, test_seed() + round, false);
        p = shape_start(&of, many[round % 5]);
        for (int again = 0; again < 6; ++again) {
            const uint64_t how = lot_of(&of, 3);
            const long first = (long)lot_of(&of, (uint64_t)of.per_epoch);
            cursor c = { .id = again ? first : 0 };
            long most = (long)(lot_of(&of, 2) ? lot_of(&of, 20) : lot_of(&of, 400));
            if (again) CHECK_EQ(spdl_pipeline_rewind(p, (uint64_t)first, SPDL_FOREVER), SPDL_OK);
            while (most-- > 0 && shape_take(&of, p, &c)) {}
            if (how == 1) CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
            if (how == 2) (void)spdl_pipeline_stop(p, 0);
        }
        DONE(p);
    }
}

/* Merges that take what is ready, rows in the order of completion: the same items in each epoch. */
static void any_order_of_completion_has_the_same_items(void) {
    chaos_on();
    for (uint64_t round = 0; round < ROUNDS; ++round) {
        static shape of;
        static long values[1000], expected[1000];
        shape_make(&of, test_seed() + round, true);
        for (int i = 0; i < 5; ++i) {
            spdl_pipeline *p = shape_start(&of, many[i]);
            for (long epoch = 0; epoch < of.epochs; ++epoch) {
                size_t count = 0;
                int where;
                for (long id = epoch * of.per_epoch; id < (epoch + 1) * of.per_epoch; ++id)
                    if (shape_model(&of, id, &expected[count], &where) == SPDL_OK) ++count;
                qsort(expected, count, sizeof expected[0], by_value_of);
                CHECK_EQ(take_values(p, values, 1000, SPDL_END), count);
                qsort(values, count, sizeof values[0], by_value_of);
                CHECK(memcmp(values, expected, count * sizeof values[0]) == 0);
            }
            DONE(p);
        }
    }
}

/* One path is slow, and the order is that of the branch all the same; a path that gets nothing, or
   drops all, holds up nobody. */
static void a_merge_keeps_the_order_of_its_branch(void) {
    for (int i = 0; i < 2 * CROWDS; ++i)
        RUN(START(crowds[i / 2], COUNT_TO(10), BY_VALUE(2), SPDL_PATH("even"),
                  FOLLOW(.plus = 100, .sleep_us = i % 2 * 500), SPDL_PATH("odd"), FOLLOW(.plus = 0),
                  SPDL_PATH("none"), FOLLOW(.plus = 0), SPDL_MERGE(), SPDL_SINK(1)),
            "100 1 102 3 104 5 106 7 108 9", SPDL_END);
    for (int i = 0; i < CROWDS; ++i) {
        spdl_pipeline *p =
            START(crowds[i], COUNT_TO(3000), BY_VALUE_OF(2, 1), SPDL_PATH("all", .buffer_size = 1),
                  SPDL_PIPE(follow, SCRIPT(.every = 1, .result = SPDL_SKIP), .concurrency = 3,
                            .buffer_size = 1),
                  SPDL_PATH("odd", .buffer_size = 1), SPDL_MERGE(), SPDL_SINK(1));
        long value = 1;
        for (item *it = NULL; SPDL_NEXT(p, &it, SPDL_SECONDS(15)) == SPDL_OK; value += 2) {
            CHECK_EQ(it->value, value);
            item_free(it);
        }
        CHECK_EQ(value, 3001);
        DONE(p);
    }
}

SPDL_FN(drops_but_first, item, item) {
    *out = in;
    return in->value == 0 ? SPDL_OK : SPDL_SKIP;
}

/* An inner branch gets thousands of dropped items while its first path stands still. */
static void dropped_items_fill_no_path(void) {
    for (int i = 0; i < CROWDS; ++i) {
        hold h = { .there = 0 };
        long value = 1;
        item *it = NULL;
        spdl_pipeline *p =
            START(crowds[i], COUNT_TO(4000), BY_VALUE_OF(2, 900), SPDL_PATH("even"),
                  FOLLOW(.plus = 0), SPDL_PIPE(drops_but_first),
                  SPDL_BRANCH(pass_on, .buffer_size = 3),
                  SPDL_PATH("stands", .buffer_size = 1), HELD(h), SPDL_PATH("free"), SPDL_MERGE(),
                  SPDL_PATH("odd", .buffer_size = 900), SPDL_MERGE(), SPDL_SINK(1));
        for (int looks = 0; looks < 30; ++looks)
            REQUIRE(spdl_pipeline_next(p, (void **)&it, 1000000) == SPDL_TIMEOUT);
        let_go(&h, SPDL_OK);
        CHECK_EQ(take_from(p, 0, 1, SPDL_OK), 1);
        for (; SPDL_NEXT(p, &it, SPDL_SECONDS(15)) == SPDL_OK; value += 2) {
            CHECK_EQ(it->value, value);
            item_free(it);
        }
        CHECK_EQ(value, 4001);
        CHECK_EQ(SPDL_NEXT(p, &it, 0), SPDL_END);
        DONE(p);
    }
}

/* A budget of failures in a path; what failed leaves no gap. */
static void a_path_may_have_a_budget_of_failures(void) {
    for (int i = 0; i < 3 * CROWDS; ++i) {
        const int budget = i % 3 - 1; /* any number, none, one */
        const spdl_stage rows[] = {
            COUNT_TO(16), BY_VALUE(2), SPDL_PATH("even"),
            SPDL_PIPE(follow, SCRIPT(.every = 4, .rest = 2, .result = SPDL_E_IO), .name = "breaks",
                      .max_failures = budget),
            SPDL_PATH("odd", .buffer_size = 9), FOLLOW(.fresh = true), SPDL_MERGE(), SPDL_SINK(1),
        };
        spdl_pipeline *p = start(crowds[i / 3], NULL, SPDL_TABLE(rows));
        if (budget < 0) TAKE_ALL(p, "0 1 3 4 5 7 8 9 11 12 13 15", SPDL_END);
        else TAKE_ALL(p, budget == 0 ? "0 1" : "0 1 3 4 5", SPDL_E_IO);
        if (budget >= 0)
            failed_with(p, 3, budget == 0 ? "stage 3 'breaks', item 2: input or output error"
                                          : "stage 3 'breaks', item 6: input or output error "
                                            "(one more than max_failures)");
        DONE(p);
    }
}

/* An epoch that has failed never ends: the consumer gets what came before, then the error. */
SPDL_FN(four_an_epoch, void, void) {
    if (spdl_sequence(task) == 4) return SPDL_END;
    *out = (void *)(uintptr_t)(spdl_sequence(task) + 1);
    return SPDL_OK;
}

SPDL_FN(by_number, void, void) {
    *out = in;
    return spdl_route(task, (int)(spdl_sequence(task) & 1));
}

SPDL_FN(fails_in_epoch_1, void, void) {
    *out = in;
    if (spdl_epoch(task) != 1 || (uintptr_t)in != 3) return SPDL_OK;
    sleep_us(300);
    return spdl_fail(task, "no good");
}

static void an_epoch_that_fails_never_ends(void) {
    chaos_on();
    for (int i = 0; i < (TEST_SANITIZED ? 80 : 400); ++i) {
        const spdl_stage merge = SPDL_MERGE(), ready = MERGE_READY;
        spdl_pipeline *p =
            START(i % 4, SPDL_SOURCE(four_an_epoch, .continuous = true), SPDL_BRANCH(by_number),
                  SPDL_PATH("a"), SPDL_PIPE(fails_in_epoch_1), SPDL_PATH("b"),
                  i % 8 < 4 ? merge : ready, SPDL_BATCH(3), SPDL_SINK(3));
        size_t items = 0, before = 0;
        spdl_result result;
        int ends = 0;
        spdl_batch *batch;
        while ((result = SPDL_NEXT(p, &batch, SPDL_SECONDS(15))) == SPDL_OK || result == SPDL_END) {
            if (result == SPDL_END) ++ends;
            if (result == SPDL_END) before = items;
            if (result == SPDL_OK) items += batch->count;
            if (result == SPDL_OK) spdl_batch_free(batch);
            REQUIRE(ends < 3);
        }
        CHECK_STR(spdl_result_text(result), spdl_result_text(SPDL_E_STAGE));
        CHECK_EQ(ends, 1);
        CHECK_EQ(before, 4);
        CHECK(items == 4 || (i % 8 >= 4 && items == 7)); /* whole batches */
        failed_with(p, 3, "stage 3 'fails_in_epoch_1', item 2, epoch 1: no good");
        DONE(p);
    }
}

/* --- what create refuses in paths --- */

static void refused(const char *text, const spdl_stage row, const spdl_stage merge) {
    spdl_error error;
    const spdl_pipeline_desc desc = { .error = &error, .logger = { log_nothing, NULL } };
    spdl_pipeline *p = NULL;
    const spdl_result result = spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        COUNT_TO(1), SPDL_BATCH(1), SPDL_BRANCH(pass_batch), SPDL_PATH("a"),
        SPDL_BRANCH(pass_batch), SPDL_PATH("c"), row, SPDL_PATH("d"), merge, SPDL_PATH("b"),
        SPDL_MERGE(), SPDL_SINK(1)));
    CHECK_EQ(result, SPDL_E_INVALID);
    CHECK_EQ(error.stage, 6);
    if (!CHECK(strstr(error.text, text) != NULL)) fprintf(stderr, "%s\n", error.text);
    CHECK(strstr(error.text, "in a path whose merge is in input order") != NULL);
}

SPDL_FN(any_row, void, void) {
    *out = in;
    return SPDL_OK;
}

/* Each item of a path has to make one result or none, in order; else the merge takes what is
   ready. */
static void rows_that_have_no_order_are_refused_in_paths(void) {
    const spdl_stage merge = SPDL_MERGE(), ready = MERGE_READY;
    const struct {
        const char *text;
        spdl_stage row;
    } rows[] = {
        { "SPDL_BATCH in", SPDL_BATCH(2) },
        { "SPDL_UNBATCH in", SPDL_UNBATCH() },
        { "flush in", SPDL_PIPE(any_row, .flush = true) },
        { "again in", SPDL_PIPE(any_row, .again = true) },
        { "completion order in", SPDL_PIPE(any_row, .output_order = SPDL_ORDER_COMPLETION) },
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) {
        spdl_pipeline *p;
        refused(rows[i].text, rows[i].row, merge);
        refused(rows[i].text, rows[i].row, ready);
        p = START(1, COUNT_TO(-1), SPDL_BATCH(1), SPDL_BRANCH(pass_batch), SPDL_PATH("a"),
                  SPDL_BRANCH(pass_batch), SPDL_PATH("c"), rows[i].row, SPDL_PATH("d"), ready,
                  SPDL_PATH("b"), ready, SPDL_SINK(1)); /* all are ready: it may */
        DONE(p);
    }
}

static void an_inner_merge_of_what_is_ready_is_refused(void) {
    spdl_error error;
    const spdl_pipeline_desc desc = { .error = &error, .logger = { log_nothing, NULL } };
    spdl_pipeline *p = NULL;
    CHECK_EQ(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
                 COUNT_TO(1), BY_VALUE(2), SPDL_PATH("a"), BY_VALUE(2), SPDL_PATH("c"),
                 SPDL_PATH("d"), MERGE_READY, SPDL_PATH("b"), SPDL_MERGE(), SPDL_SINK(1))),
             SPDL_E_INVALID);
    CHECK_EQ(error.stage, 6);
    CHECK(strstr(error.text, "completion order in a path whose merge is in input order") != NULL);
}

/* While a merge waits for one path and the other has items, nobody is busy. */
static void a_merge_that_waits_burns_nothing(void) {
    for (int i = 0; i < CROWDS; ++i) {
        uint64_t used = UINT64_MAX, wall = 0;
        for (int again = 0; again < 5 && used > wall / 2; ++again) {
            const uint64_t since = spdl_time_ns();
            uint64_t from;
            spdl_pipeline *p = START(crowds[i], COUNT_TO(8), BY_VALUE(2), SPDL_PATH("even"),
                                     FOLLOW(.sleep_us = 20000), SPDL_PATH("odd"), SPDL_MERGE(),
                                     SPDL_SINK(4));
            from = test_cpu_ns();
            CHECK_EQ(take_from_any(p), 8);
            used = test_cpu_ns() - from;
            wall = spdl_time_ns() - since;
            DONE(p);
        }
        CHECK(used <= wall / 2);
    }
}

/* --- epochs --- */

/* Items that know their epoch: each stage looks whether it is the one it is in. */
SPDL_FN(dated, void, item) {
    const script *s = (const script *)spdl_ctx(task);
    const long number = (long)spdl_sequence(task), epoch = (long)spdl_epoch(task);
    if (number == s->count) return SPDL_END;
    *out = item_make(epoch * 1000 + number);
    return SPDL_OK;
}

SPDL_FN(in_its_epoch, item, item) {
    script *s = (script *)spdl_ctx(task);
    script_enter(s);
    if (s->sleep_us) sleep_us(in->value * 7 % 5 * s->sleep_us);
    CHECK_EQ(spdl_epoch(task), in->value / 1000);
    CHECK_EQ(spdl_sequence(task), in->value % 1000);
    *out = in;
    script_leave(s);
    return SPDL_OK;
}

/* One epoch of dated items: `count` of them, none of another epoch. */
static void take_dated(spdl_pipeline *p, long epoch, size_t count) {
    static long values[1000];
    CHECK_EQ(take_values(p, values, 1000, SPDL_END), count);
    qsort(values, count, sizeof values[0], by_value_of);
    for (size_t i = 0; i < count; ++i) CHECK_EQ(values[i], epoch * 1000 + (long)i);
}

static void no_item_crosses_an_epoch(void) {
    chaos_on();
    for (int i = 0; i < 4 * CROWDS; ++i) {
        const spdl_order order = i % 2 ? SPDL_ORDER_INPUT : SPDL_ORDER_COMPLETION;
        const long slow = i / 2 % 2 ? 100 : 0;
        spdl_pipeline *p =
            START(crowds[i / 4], SPDL_SOURCE(dated, SCRIPT(.count = 21), .continuous = true,
                                             .buffer_size = 8, .free_item = item_free),
                  SPDL_PIPE(in_its_epoch, SCRIPT(.sleep_us = slow), .concurrency = 4,
                            .output_order = SPDL_ORDER_COMPLETION),
                  BY_VALUE(2), SPDL_PATH("slow"),
                  SPDL_PIPE(in_its_epoch, SCRIPT(.sleep_us = slow), .concurrency = 2),
                  SPDL_PATH("fast"),
                  SPDL_PIPE(in_its_epoch, SCRIPT(.count = 0), .concurrency = 3,
                            .output_order = order),
                  SPDL_MERGE(.output_order = order),
                  SPDL_PIPE(in_its_epoch, SCRIPT(.count = 0)), SPDL_SINK(1));
        for (long epoch = 0; epoch < 4; ++epoch) take_dated(p, epoch, 21);
        DONE(p);
    }
}

static void an_epoch_can_be_left(void) {
    chaos_on();
    for (int i = 0; i < 10 * CROWDS; ++i) {
        static long values[100];
        spdl_pipeline *p =
            START(crowds[i / 10], CONTINUOUS(.count = 7), FOLLOW(.fresh = true), BY_VALUE(2),
                  SPDL_PATH("a"), FOLLOW(.plus = 0), SPDL_PATH("b"), SPDL_MERGE(), SPDL_SINK(3));
        if (i % 10 > 6) take_values(p, values, 100, SPDL_END);
        take_values(p, values, (size_t)(i % 10) % 7, SPDL_OK);
        if (i % 2) {
            spdl_result result = SPDL_OK;
            CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
            for (int most = 100; most > 0 && (result == SPDL_OK || result == SPDL_END); --most) {
                void *taken = NULL;
                result = spdl_pipeline_next(p, &taken, SPDL_FOREVER);
                if (result == SPDL_OK) item_free(taken);
            }
            CHECK_EQ(result, SPDL_CLOSED);
        }
        DONE(p);
    }
}

TEST_TABLE(branch) {
    TEST_CASE(items_go_down_their_path),
    TEST_CASE(a_path_that_is_no_path_is_a_failure),
    TEST_CASE(the_first_path_is_the_default),
    TEST_CASE(paths_may_be_empty),
    TEST_CASE(branches_may_hold_branches),
    TEST_CASE(paths_may_hold_any_rows),
    TEST_CASE(paths_may_hold_batches),
    TEST_CASE(as_many_paths_as_there_may_be),
    TEST_CASE(a_path_that_is_full_does_not_stop_the_others),
    TEST_CASE(an_inner_path_that_is_full_stops_only_its_branch),
    TEST_CASE(what_waits_comes_before_the_end_of_its_epoch),
    TEST_CASE(a_path_that_fails_leaves_what_waits_for_others),
    TEST_CASE(what_waits_for_a_path_that_fails_is_freed),
    TEST_CASE(what_waits_can_be_left_at_any_point),
    TEST_CASE(any_table_is_as_a_sequential_run),
    TEST_CASE(any_table_fails_as_a_sequential_run),
    TEST_CASE(any_table_can_be_left_and_rewound),
    TEST_CASE(any_order_of_completion_has_the_same_items),
    TEST_CASE(a_merge_keeps_the_order_of_its_branch),
    TEST_CASE(dropped_items_fill_no_path),
    TEST_CASE(a_path_may_have_a_budget_of_failures),
    TEST_CASE(an_epoch_that_fails_never_ends),
    TEST_CASE(rows_that_have_no_order_are_refused_in_paths),
    TEST_CASE(an_inner_merge_of_what_is_ready_is_refused),
    TEST_CASE(a_merge_that_waits_burns_nothing),
    TEST_CASE(no_item_crosses_an_epoch),
    TEST_CASE(an_epoch_can_be_left),
    TEST_END,
};
