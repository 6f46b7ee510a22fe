/* Pipelines with branches: paths, merges, batches that are split and joined, and epochs in all of
   them. */
#include "flow.h"

#include <limits.h>

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
        RUN_SORTED(START(crowds[i / 2],
                         SPDL_SOURCE(count_up, SCRIPT(.count = 10), .free_item = item_free,
                                     .buffer_size = 1),
                         BY_VALUE(2), SPDL_PATH("even", .buffer_size = 1 + i % 2),
                         FOLLOW(.plus = 100), SPDL_PATH("odd", .buffer_size = 1 + i % 2),
                         FOLLOW(.times = 10, .fresh = true), SPDL_MERGE(), SPDL_SINK(1)),
                   "10 30 50 70 90 100 102 104 106 108", SPDL_END);
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
                                 FOLLOW(.plus = 0), SPDL_PATH("b"),
                                 SPDL_MERGE(.merge_order = SPDL_MERGE_ROBIN), SPDL_SINK(1));
        TAKE_ALL(p, "0 1", SPDL_E_INVALID);
        snprintf(text, sizeof text,
                 "spdl: stage 1 'to_path', item 2: path %d, but there are 2 paths", path);
        failed_with(p, 1, text);
        DONE(p);
    }
}

/* The row of a branch has no .emits: it never could, so no budget is for that. */
SPDL_FN(emits_at_a_branch, item, item) {
    CHECK_EQ(spdl_emit(task, in), SPDL_E_INVALID);
    *out = in;
    return SPDL_OK;
}

static void a_branch_does_not_emit(void) {
    for (int i = 0; i < CROWDS; ++i) {
        spdl_pipeline *p = START(crowds[i], COUNT_TO(9),
                                 SPDL_BRANCH(emits_at_a_branch, .max_failures = -1),
                                 SPDL_PATH("a"), SPDL_PATH("b"), SPDL_MERGE(), SPDL_SINK(1));
        TAKE_ALL(p, "", SPDL_E_INVALID);
        failed_with(p, 1, "spdl: stage 1 'emits_at_a_branch', item 0: spdl_emit in a stage whose "
                          "row does not say .emits");
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
        RUN_SORTED(START(crowds[i], COUNT_TO(9), BY_VALUE(3), SPDL_PATH("a"), SPDL_PATH("b"),
                         FOLLOW(.plus = 100), SPDL_PATH("c"), SPDL_MERGE(), SPDL_SINK(1)),
                   "0 2 3 5 6 8 101 104 107", SPDL_END);
        RUN_SORTED(START(crowds[i], COUNT_TO(4), BY_VALUE(2), SPDL_PATH("a"), SPDL_PATH("b"),
                         SPDL_MERGE(), FOLLOW(.plus = 1), SPDL_SINK(1)),
                   "1 2 3 4", SPDL_END);
    }
}

static void branches_may_hold_branches(void) {
    for (int i = 0; i < CROWDS; ++i)
        RUN_SORTED(START(crowds[i], COUNT_TO(12), BY_VALUE(2), SPDL_PATH("even"),
                         BY_VALUE(3), SPDL_PATH("0 6"), FOLLOW(.plus = 100), SPDL_PATH("4 10"),
                         SPDL_PATH("2 8"), FOLLOW(.plus = 300), SPDL_MERGE(), FOLLOW(.plus = 1000),
                         SPDL_PATH("odd"), BY_VALUE(4), SPDL_PATH("none"), SPDL_PATH("1 5 9"),
                         FOLLOW(.plus = 500), SPDL_PATH("none either"), SPDL_PATH("3 7 11"),
                         SPDL_MERGE(), SPDL_MERGE(), FOLLOW(.fresh = true), SPDL_SINK(1)),
                   "3 7 11 501 505 509 1004 1010 1100 1106 1302 1308", SPDL_END);
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
                  SPDL_PATH("emits"), SCATTER(BURST(.plus = 2), .concurrency = 2),
                  SPDL_PATH("flush"), WEIGH(&(scale){ .limit = 20 }), SPDL_MERGE(), SPDL_SINK(1)),
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
                         SPDL_MERGE(), SPDL_SINK(1)),
                   "9 12 27 34 44 45", SPDL_END);
}

static void as_many_rows_as_there_may_be(void) {
    static char names[28][16];
    spdl_stage rows[SPDL_MAX_STAGES + 1] = { COUNT_TO(100), BY_VALUE(28) };
    for (int i = 0; i < 28; ++i) {
        snprintf(names[i], sizeof names[i], "%d", i);
        rows[2 + i] = (spdl_stage)SPDL_PATH(names[i]);
    }
    rows[30] = (spdl_stage)SPDL_MERGE();
    rows[31] = (spdl_stage)FOLLOW(.fresh = true);
    rows[32] = (spdl_stage)SPDL_SINK(1);
    for (int i = 0; i < CROWDS; ++i) {
        static long values[200];
        spdl_pipeline *p = start(crowds[i], NULL, SPDL_TABLE(rows));
        CHECK_EQ(take_values(p, values, 200, SPDL_END), 100);
        qsort(values, 100, sizeof values[0], by_value_of);
        for (int k = 0; k < 100; ++k) CHECK_EQ(values[k], k);
        CHECK_EQ(spdl_pipeline_find(p, "27"), 29);
        DONE(p);
    }
}

/* --- a path that is full --- */

/* Values below *ctx go down path 0, the others down path 1. */
SPDL_FN(below, item, item) {
    *out = in;
    return spdl_route(task, in->value >= *(const long *)spdl_ctx(task));
}

#define BELOW(first, room) SPDL_BRANCH(below, .ctx = &(first), .buffer_size = (room))
/* The call with value 0 waits for `gate`, on a thread that nobody else needs. */
#define GATED(gate, ...)                                                                           \
    SPDL_PIPE(follow, SCRIPT(.gate = &(gate), __VA_ARGS__), .free_item = item_free, .threads = 1)

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
        int gate = 0;
        spdl_pipeline *p =
            START(crowds[i / 12], COUNT_TO(first + 60), BELOW(first, may),
                  SPDL_PATH("full", .buffer_size = buffer), GATED(gate, .plus = 0),
                  SPDL_PATH("free"), FOLLOW(.plus = 0), SPDL_MERGE(), SPDL_SINK(1));
        if (more) calls_are(p, 1, room + 1);
        else CHECK_EQ(take_from(p, first, 60, SPDL_OK), 60);
        CHECK_EQ(depth_of(p, 2), room - 1 + more);
        open_gate(&gate);
        if (more) CHECK_EQ(take_both(p, first, SPDL_END), first + 60);
        else CHECK_EQ(take_from(p, 0, 1000, SPDL_END), first);
        DONE(p);
    }
}

static void an_inner_path_that_is_full_stops_only_its_branch(void) {
    for (int i = 0; i < 2 * CROWDS; ++i) {
        long first = 7 + i % 2, all = 1000; /* 1 in the call, 1 + 2 inside, 1 + 2 outside */
        int gate = 0;
        spdl_pipeline *p =
            START(crowds[i / 2], COUNT_TO(first + 60), BELOW(first, 3),
                  SPDL_PATH("deep", .buffer_size = 1), BELOW(all, 2),
                  SPDL_PATH("full", .buffer_size = 1), GATED(gate, .plus = 0), SPDL_PATH("none"),
                  SPDL_MERGE(), SPDL_PATH("free"), SPDL_MERGE(), SPDL_SINK(1));
        if (i % 2) calls_are(p, 1, 8);
        else CHECK_EQ(take_from(p, first, 60, SPDL_OK), 60);
        open_gate(&gate);
        CHECK_EQ(take_both(p, i % 2 ? first : 0, SPDL_END), i % 2 ? first + 60 : first);
        DONE(p);
    }
}

/* Nothing of an epoch comes after its end, also of what waited. */
static void what_waits_comes_before_the_end_of_its_epoch(void) {
    chaos_on();
    for (int i = 0; i < 3 * CROWDS; ++i) {
        long first = 8;
        int gate = 0;
        spdl_pipeline *p =
            START(crowds[i / 3], CONTINUOUS(.count = first + 20), BELOW(first, 7),
                  SPDL_PATH("full", .buffer_size = 1), GATED(gate, .plus = 0), SPDL_PATH("free"),
                  FOLLOW(.plus = 0), SPDL_MERGE(), SPDL_SINK(1));
        CHECK_EQ(take_from(p, first, 20, SPDL_OK), 20);
        open_gate(&gate);
        CHECK_EQ(take_from(p, 0, 1000, SPDL_END), first);
        for (int epoch = 0; epoch < i % 3; ++epoch)
            CHECK_EQ(take_both(p, first, SPDL_END), first + 20);
        DONE(p);
    }
}

/* What was routed before a failure on another path is delivered, also what waited. */
static void a_path_that_fails_leaves_what_waits_for_others(void) {
    for (int i = 0; i < CROWDS; ++i) {
        long first = 10;
        int gate = 0;
        void *it = NULL;
        spdl_pipeline *p =
            START(crowds[i], COUNT_TO(-1), BELOW(first, 9), SPDL_PATH("full", .buffer_size = 1),
                  GATED(gate, .plus = 0), SPDL_PATH("fails"),
                  FOLLOW(.every = 100, .rest = 12, .result = SPDL_E_IO), SPDL_MERGE(),
                  SPDL_SINK(1));
        CHECK_EQ(take_from(p, first, 2, SPDL_OK), 2);
        while (!spdl_pipeline_failed(p))
            REQUIRE(spdl_pipeline_next(p, &it, 1000000) == SPDL_TIMEOUT);
        open_gate(&gate);
        CHECK_EQ(take_from(p, 0, 1000, SPDL_E_IO), first);
        failed_with(p, 5, "spdl: stage 5 'follow#2', item 12: input or output error");
        DONE(p);
    }
}

/* And what waits for a path that fails is freed. */
static void what_waits_for_a_path_that_fails_is_freed(void) {
    for (int i = 0; i < CROWDS; ++i) {
        long first = 10;
        int gate = 0;
        spdl_pipeline *p =
            START(crowds[i], COUNT_TO(first + 40), BELOW(first, 9),
                  SPDL_PATH("fails", .buffer_size = 1),
                  GATED(gate, .every = 100, .result = SPDL_E_IO), SPDL_PATH("free"),
                  FOLLOW(.plus = 0), SPDL_MERGE(), SPDL_SINK(1));
        CHECK_EQ(take_from(p, first, 40, SPDL_OK), 40);
        open_gate(&gate);
        CHECK_EQ(take_from(p, 0, 1000, SPDL_E_IO), 0);
        failed_with(p, 3, "spdl: stage 3 'follow', item 0: input or output error");
        DONE(p);
    }
}

SPDL_FN(until_stopped, item, item) {
    while (!spdl_stopping(task)) sleep_us(50);
    *out = in;
    return SPDL_OK;
}

/* Even ones fill their path: 8 of them, so 7 odd ones come. */
static void what_waits_can_be_left_at_any_point(void) {
    chaos_on();
    for (int i = 0; i < 24 * CROWDS; ++i) {
        static long values[10];
        spdl_pipeline *p =
            START(crowds[i / 24], COUNT_TO(-1), BY_VALUE_OF(2, 5),
                  SPDL_PATH("full", .buffer_size = 2), SPDL_PIPE(until_stopped, .threads = 1),
                  SPDL_PATH("free"), FOLLOW(.fresh = true), SPDL_MERGE(), SPDL_SINK(1));
        take_values(p, values, (size_t)(i % 8), SPDL_OK);
        if (i / 8 % 3 == 1) CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        if (i / 8 % 3 == 2) { /* or all of it starts again */
            CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_FOREVER), SPDL_OK);
            CHECK_EQ(take_values(p, values, 7, SPDL_OK), 7);
            for (long k = 0; k < 7; ++k) CHECK_EQ(values[k], 2 * k + 1);
        }
        DONE(p);
    }
}

/* --- merges --- */

/* Turn by turn, whatever is slower. */
static void a_merge_may_go_round(void) {
    for (int i = 0; i < 2 * CROWDS; ++i)
        RUN(START(crowds[i / 2], COUNT_TO(10), BY_VALUE(2), SPDL_PATH("even"),
                  FOLLOW(.plus = 100, .sleep_us = i % 2 * 500), SPDL_PATH("odd"), FOLLOW(.plus = 0),
                  SPDL_MERGE(.merge_order = SPDL_MERGE_ROBIN), SPDL_SINK(1)),
            "100 1 102 3 104 5 106 7 108 9", SPDL_END);
}

/* A path that has ended is left out; one that got nothing has ended, too, but only at the end. */
static void a_round_leaves_out_what_has_ended(void) {
    for (int i = 0; i < CROWDS; ++i) {
        RUN(START(crowds[i], COUNT_TO(7), BY_VALUE(3), SPDL_PATH("a", .buffer_size = 8),
                  SPDL_PATH("b", .buffer_size = 8),
                  FOLLOW(.every = 1, .result = SPDL_SKIP), SPDL_PATH("c", .buffer_size = 8),
                  SPDL_MERGE(.merge_order = SPDL_MERGE_ROBIN), SPDL_SINK(1)),
            "0 2 3 5 6", SPDL_END);
        RUN(START(crowds[i], COUNT_TO(7), SPDL_BRANCH(pass_on), SPDL_PATH("a", .buffer_size = 8),
                  SPDL_PATH("never", .buffer_size = 8),
                  SPDL_MERGE(.merge_order = SPDL_MERGE_ROBIN), SPDL_SINK(1)),
            "0 1 2 3 4 5 6", SPDL_END);
    }
}

/* A trainer that polls, or waits for a while, is told as well as one that waits for ever. */
static void starves(spdl_pipeline *p, int64_t timeout_ns, const char *taken, int row,
                    const char *path) {
    char text[SPDL_TEXT_BYTES];
    notes n = { .length = 0 };
    spdl_result result;
    void *it = NULL;
    while ((result = spdl_pipeline_next(p, &it, timeout_ns)) == SPDL_OK ||
           result == SPDL_TIMEOUT) {
        if (result == SPDL_TIMEOUT) sched_yield();
        else note(&n, n.length ? " %ld" : "%ld", ((item *)it)->value);
        if (result == SPDL_OK) item_free(it);
    }
    CHECK_EQ(result, SPDL_E_INVALID);
    CHECK(strncmp(n.text, taken, strlen(taken)) == 0); /* other paths deliver what they have */
    snprintf(text, sizeof text, "starved: it waits for path %s, which gets nothing while another "
                                "is full (see .buffer_size of SPDL_BRANCH)", path);
    CHECK_EQ(spdl_pipeline_error(p)->stage, row);
    CHECK(strstr(spdl_pipeline_error(p)->text, text) != NULL);
    DONE(p);
}

/* A path gets nothing, or drops all it gets, and the others are full: a failure, after what came
   before it. The merge that is named waits for its own branch. */
static void a_merge_that_starves_is_a_failure(void) {
    static const int64_t timeouts[] = { SPDL_FOREVER, 0, 1000000 };
    chaos_on();
    for (int i = 0; i < 6 * CROWDS; ++i) {
        const int w = crowds[i / 6], threads = i % 2, room = i / 3 % 2 * 8;
        const int64_t timeout_ns = timeouts[i % 3];
        const spdl_stage robin = SPDL_MERGE(.merge_order = SPDL_MERGE_ROBIN);
        const spdl_stage slow = SPDL_PIPE(follow, SCRIPT(.sleep_us = 50), .concurrency = 2,
                                          .threads = threads, .buffer_size = 1);
        const spdl_stage all_to_one = SPDL_BRANCH(pass_on, .buffer_size = room);
        starves(START(w, COUNT_TO(300), all_to_one, SPDL_PATH("all", .buffer_size = 1), slow,
                      SPDL_PATH("none"), FOLLOW(.plus = 0), SPDL_PATH("none either"), robin,
                      SPDL_SINK(1)),
                timeout_ns, "0", 7, "1 'none'");
        starves(START(w, COUNT_TO(300), BY_VALUE_OF(2, room), SPDL_PATH("even"),
                      FOLLOW(.every = 1, .result = SPDL_SKIP), SPDL_PATH("odd"),
                      BY_VALUE_OF(3, room), SPDL_PATH("a"), SPDL_PATH("b"), SPDL_PATH("c"), robin,
                      robin, SPDL_SINK(1)),
                timeout_ns, "", 10, "0 'even'");
        starves(START(w, COUNT_TO(300), BY_VALUE_OF(2, room), SPDL_PATH("even"),
                      BY_VALUE_OF(4, room), SPDL_PATH("a"), SPDL_PATH("b"), SPDL_PATH("c"),
                      SPDL_PATH("d"), robin, SPDL_PATH("odd"), slow, robin, FOLLOW(.plus = 0),
                      SPDL_SINK(1)),
                timeout_ns, "0 1", 8, "1 'b'");
        starves(START(w, COUNT_TO(300), all_to_one, SPDL_PATH("a"), SPDL_PATH("b"), robin,
                      BY_VALUE_OF(2, room), SPDL_PATH("c", .buffer_size = 9), slow,
                      SPDL_PATH("d", .buffer_size = 9), robin, SPDL_SINK(1)),
                timeout_ns, "0", 4, "1 'b'");
    }
}

/* By its own buffer and what may wait for the branch's: not by one more. */
static void a_path_is_ahead_by_what_may_wait(void) {
    static const int rooms[] = { 0, 1, 4 };
    for (int i = 0; i < 6 * CROWDS; ++i) {
        const int may = rooms[i % 3], buffer = 1 + i / 3 % 2 * 3;
        long room = buffer + (may ? may : 32), one_more = room + 1;
        const spdl_stage robin = SPDL_MERGE(.merge_order = SPDL_MERGE_ROBIN);
        const spdl_stage a = SPDL_PATH("a", .buffer_size = buffer);
        spdl_pipeline *p = START(crowds[i / 6], COUNT_TO(2 * room), BELOW(room, may), a,
                                 SPDL_PATH("b"), robin, SPDL_SINK(1));
        for (long k = 0; k < room; ++k) {
            CHECK_EQ(take_from(p, k, 1, SPDL_OK), 1);
            CHECK_EQ(take_from(p, room + k, 1, SPDL_OK), 1);
        }
        CHECK_EQ(take_from(p, 0, 1, SPDL_END), 0);
        DONE(p);
        starves(START(crowds[i / 6], COUNT_TO(2 * one_more), BELOW(one_more, may), a,
                      SPDL_PATH("b"), robin, SPDL_SINK(1)),
                SPDL_FOREVER, "0", 4, "1 'b'");
    }
}

SPDL_FN(ends_late, void, item) {
    if (spdl_sequence(task) < 3) *out = item_make((long)spdl_sequence(task));
    else sleep_us(60000);
    return *out != NULL ? SPDL_OK : SPDL_END;
}

/* Something may still come: from a slow call, or the end from a slow source. */
static void a_merge_that_waits_for_long_does_not_starve(void) {
    for (int i = 0; i < CROWDS; ++i) {
        const spdl_stage robin = SPDL_MERGE(.merge_order = SPDL_MERGE_ROBIN);
        RUN(START(crowds[i], SPDL_SOURCE(ends_late, .free_item = item_free), SPDL_BRANCH(pass_on),
                  SPDL_PATH("all", .buffer_size = 1), SPDL_PATH("none"), robin, SPDL_SINK(1)),
            "0 1 2", SPDL_END);
        RUN(START(crowds[i], COUNT_TO(8), BY_VALUE(2), SPDL_PATH("even"),
                  FOLLOW(.sleep_us = 30000), SPDL_PATH("odd"), robin, SPDL_SINK(1)),
            "0 1 2 3 4 5 6 7", SPDL_END);
    }
}

/* Two of path 0, one of path 1, ..., as long as they have some. */
typedef struct rhythm {
    int calls, at;
    int answer; /* what is said from call 3 on, unless 0 */
} rhythm;

static int two_to_one(void *ctx, const signed char *ready, int paths) {
    rhythm *r = (rhythm *)ctx;
    int path = r->at % 3 == 2;
    CHECK_EQ(paths, 2);
    if (r->answer != 0 && ++r->calls > 3) return r->answer;
    if (ready[path] < 0) path = !path;
    if (ready[path] == 1) ++r->at;
    return path;
}

/* Path 0 and path 1 in turn; a third one is ignored. */
static int in_turn(void *ctx, const signed char *ready, int paths) {
    rhythm *r = (rhythm *)ctx;
    int path = r->at % 2;
    CHECK_EQ(paths, 3);
    if (ready[path] < 0) path = !path;
    if (ready[path] == 1) ++r->at;
    return path;
}

static void a_function_may_choose(void) {
    for (int i = 0; i < 2 * CROWDS; ++i)
        RUN(START(crowds[i / 2], COUNT_TO(9), BY_VALUE(3), SPDL_PATH("0 3 6"),
                  FOLLOW(.sleep_us = i % 2 * 300), SPDL_PATH("1 4 7"),
                  FOLLOW(.sleep_us = !(i % 2) * 300), SPDL_PATH("drops"),
                  FOLLOW(.every = 1, .result = SPDL_SKIP),
                  SPDL_MERGE(.merge_order = SPDL_MERGE_CHOICE, .merge_fn = in_turn,
                             .ctx = &(rhythm){ .at = 0 }),
                  SPDL_SINK(1)),
            "0 1 3 4 6 7", SPDL_END);
}

static void a_function_may_choose_any_rhythm(void) {
    for (int i = 0; i < CROWDS; ++i)
        RUN(START(crowds[i], COUNT_TO(8), BY_VALUE(2), SPDL_PATH("even", .buffer_size = 4),
                  SPDL_PATH("odd", .buffer_size = 4),
                  SPDL_MERGE(.merge_order = SPDL_MERGE_CHOICE, .merge_fn = two_to_one,
                             .ctx = &(rhythm){ .at = 0 }),
                  SPDL_SINK(1)),
            "0 2 1 4 6 3 5 7", SPDL_END);
}

/* An answer that is none ends it: 7 is no path, and who waits with an item on each path would wait
   for ever. */
static void a_choice_that_cannot_be_is_a_failure(void) {
    for (int i = 0; i < 2 * CROWDS; ++i) {
        static long values[100];
        spdl_pipeline *p =
            START(crowds[i / 2], COUNT_TO(-1), BY_VALUE(2), SPDL_PATH("even"), SPDL_PATH("odd"),
                  SPDL_MERGE(.merge_order = SPDL_MERGE_CHOICE, .merge_fn = two_to_one,
                             .ctx = &(rhythm){ .answer = i % 2 ? 7 : -1 }, .name = "join"),
                  SPDL_SINK(1));
        CHECK(take_values(p, values, 100, SPDL_E_INVALID) <= 3);
        CHECK_EQ(spdl_pipeline_error(p)->stage, 4);
        CHECK_STR(spdl_pipeline_error(p)->stage_name, "join");
        CHECK(strstr(spdl_pipeline_error(p)->text,
                     i % 2 ? "merge_fn returned 7, but there are 2 paths"
                           : "merge_fn waits, but nothing comes before something is taken") !=
              NULL);
        DONE(p);
        p = START(crowds[i / 2], COUNT_TO(-1), SPDL_BRANCH(pass_on), SPDL_PATH("all"),
                  FOLLOW(.plus = 0), SPDL_PATH("none"),
                  SPDL_MERGE(.merge_order = SPDL_MERGE_CHOICE, .merge_fn = two_to_one,
                             .ctx = &(rhythm){ .at = 0 }),
                  SPDL_SINK(1));
        TAKE_ALL(p, "0 1", SPDL_E_INVALID); /* the third is to come from where nothing is sent */
        DONE(p);
    }
}

/* What comes after a merge is slower than what comes before it, and the trainer looks all the time
   whether it starves: room appears while it looks. */
static void a_merge_that_is_full_does_not_starve(void) {
    chaos_on();
    for (int i = 0; i < CROWDS; ++i) {
        spdl_pipeline *p = START(crowds[i], COUNT_TO(3000), BY_VALUE(2), SPDL_PATH("even"),
                                 SPDL_PATH("odd"), SPDL_MERGE(.merge_order = SPDL_MERGE_ROBIN),
                                 FOLLOW(.plus = 0), SPDL_SINK(1));
        spdl_result result;
        void *it = NULL;
        long taken = 0;
        while ((result = spdl_pipeline_next(p, &it, 0)) == SPDL_OK || result == SPDL_TIMEOUT)
            if (result == SPDL_OK) {
                ++taken;
                item_free(it);
            }
        CHECK_EQ(result, SPDL_END);
        CHECK_EQ(taken, 3000);
        DONE(p);
    }
}

/* While a merge waits for one path and the other has items, nobody is busy. */
static void a_merge_that_waits_burns_nothing(void) {
    static const spdl_merge_order orders[] = { SPDL_MERGE_ROBIN, SPDL_MERGE_CHOICE };
    for (int i = 0; i < 2 * CROWDS; ++i) {
        uint64_t used = UINT64_MAX, wall = 0;
        for (int again = 0; again < 5 && used > wall / 2; ++again) {
            const bool choice = orders[i % 2] == SPDL_MERGE_CHOICE;
            const uint64_t since = spdl_time_ns();
            struct timespec from, to;
            spdl_pipeline *p = START(
                crowds[i / 2], COUNT_TO(8), BY_VALUE(2), SPDL_PATH("even"),
                SPDL_PIPE(follow, SCRIPT(.sleep_us = 20000), .threads = i / 2 % 2),
                SPDL_PATH("odd"),
                SPDL_MERGE(.merge_order = orders[i % 2], .merge_fn = choice ? two_to_one : NULL,
                           .ctx = &(rhythm){ .at = 0 }),
                SPDL_SINK(4));
            clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &from);
            CHECK_EQ(take_from_any(p), 8);
            clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &to);
            wall = spdl_time_ns() - since;
            used = (uint64_t)(to.tv_sec - from.tv_sec) * 1000000000u + (uint64_t)to.tv_nsec -
                   (uint64_t)from.tv_nsec;
            DONE(p);
        }
        CHECK(used <= wall / 2);
    }
}

/* A failure in one path: it is named, the others' items are delivered, nothing is lost. */
static void a_path_may_fail(void) {
    for (int i = 0; i < 3 * CROWDS; ++i) {
        const spdl_stage rows[] = {
            COUNT_TO(20), BY_VALUE(2), SPDL_PATH("even"),
            SPDL_PIPE(follow, SCRIPT(.every = 4, .result = i % 3 == 1 ? SPDL_SKIP : SPDL_E_IO),
                      .name = "breaks", .max_failures = i % 3 ? 0 : -1),
            SPDL_PATH("odd", .buffer_size = 9), FOLLOW(.fresh = true),
            SPDL_MERGE(.merge_order = i % 3 == 1 ? SPDL_MERGE_ROBIN : SPDL_MERGE_READY),
            SPDL_SINK(1),
        };
        spdl_pipeline *p = start(crowds[i / 3], NULL, SPDL_TABLE(rows));
        static long values[100];
        if (i % 3 == 2) {
            const size_t count = take_values(p, values, 100, SPDL_E_IO);
            failed_with(p, 3, "spdl: stage 3 'breaks', item 0: input or output error");
            for (size_t k = 0; k < count; ++k) CHECK_EQ(values[k], 2 * (long)k + 1);
            DONE(p);
        } else if (i % 3 == 1) { /* in turn, as long as there are any */
            RUN(p, "2 1 6 3 10 5 14 7 18 9 11 13 15 17 19", SPDL_END);
        } else {
            RUN_SORTED(p, "1 2 3 5 6 7 9 10 11 13 14 15 17 18 19", SPDL_END);
        }
    }
}

static void branches_can_be_stopped(void) {
    static const spdl_merge_order orders[] = { SPDL_MERGE_READY, SPDL_MERGE_ROBIN };
    chaos_on();
    for (int i = 0; i < 6 * CROWDS; ++i) {
        static long values[100];
        spdl_pipeline *p = START(crowds[i / 6], COUNT_TO(-1), BY_VALUE(3), SPDL_PATH("a"),
                                 FOLLOW(.fresh = true), SPDL_PATH("b"),
                                 SPDL_PIPE(follow, SCRIPT(.fresh = true), .concurrency = 3,
                                           .free_item = item_free),
                                 SPDL_PATH("c"), BY_VALUE(2), SPDL_PATH("c0"), SPDL_PATH("c1"),
                                 FOLLOW(.plus = 0), SPDL_MERGE(),
                                 SPDL_MERGE(.merge_order = orders[i % 2]), SPDL_SINK(1));
        take_values(p, values, (size_t)(i % 6 * 7), SPDL_OK);
        if (i % 3) CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        DONE(p);
    }
}

/* --- branches of batches --- */

typedef struct sorting {
    long modulo; /* the path of an item is its value % modulo, */
    int except;  /* but every item of the batch with this number goes down path 1 */
} sorting;

SPDL_FN(sort_batch, spdl_batch, spdl_batch) {
    const sorting *s = (const sorting *)spdl_ctx(task);
    int path[16];
    for (size_t i = 0; i < in->count; ++i)
        path[i] = (int)spdl_sequence(task) == s->except
                      ? 1
                      : (int)(((const item *)in->items[i])->value % s->modulo);
    *out = in;
    return spdl_route_items(task, path);
}

SPDL_FN(sort_twice, spdl_batch, spdl_batch) {
    static const int path[16];
    (void)sort_batch(task, in, out);
    CHECK_EQ(spdl_route_items(task, path), SPDL_E_INVALID);
    return SPDL_OK;
}

/* 0 and 1: its input, which it hands on all the same; 1 and 3: splits it; 3: hands on nothing. */
SPDL_FN(takes_and_sorts, spdl_batch, spdl_batch) {
    const int how = *(const int *)spdl_ctx(task);
    static const int path[16];
    if (how < 2) spdl_take(task);
    if (how % 2) CHECK_EQ(spdl_route_items(task, path), SPDL_OK);
    *out = how < 2 ? in : NULL;
    return SPDL_OK;
}

#define SORT(...) SPDL_BRANCH(sort_batch, .ctx = &(sorting){ __VA_ARGS__ })

typedef struct treatment {
    long plus;
    int skip;      /* drops batches whose number % 3 is this, unless 0 */
    bool empties;  /* takes out items with an even value */
    long sleep_us;
} treatment;

SPDL_FN(treat, spdl_batch, spdl_batch) {
    const treatment *t = (const treatment *)spdl_ctx(task);
    sleep_us(t->sleep_us);
    for (size_t i = 0; i < in->count; ++i) {
        item *it = (item *)in->items[i];
        if (t->empties && it->value % 2 == 0) {
            item_free(it);
            in->items[i] = NULL;
        } else {
            it->value += t->plus;
        }
    }
    *out = in;
    return t->skip && (int)spdl_sequence(task) % 3 == t->skip ? SPDL_SKIP : SPDL_OK;
}

#define TREAT(...) SPDL_PIPE(treat, .ctx = &(treatment){ __VA_ARGS__ }, .concurrency = 2)
#define JOIN_BATCHES SPDL_MERGE(.merge_order = SPDL_MERGE_BATCHES)

static void note_batch_anyhow(notes *n, void *taken) {
    spdl_batch *batch = (spdl_batch *)taken;
    for (size_t i = 0; i < batch->count; ++i) {
        const item *it = (const item *)batch->items[i];
        note(n, i ? " " : "");
        if (it == NULL) note(n, "-");
        else note(n, "%ld", it->value);
    }
    spdl_batch_free(batch);
}

SPDL_FN(drop_batch, spdl_batch, spdl_batch) { return SPDL_SKIP; }

/* As RUN_BATCHES, where the numbers of the batches have gaps. */
static void run_batches(spdl_pipeline *p, const char *text, spdl_result end, const char *file,
                        int line) {
    notes n = { .length = 0 };
    const spdl_result result = take(p, &n, 1000, "|", note_batch_anyhow);
    test_check_str(n.text, text, file, line, "what was taken");
    test_check_str(spdl_result_text(result), spdl_result_text(end), file, line, "the end");
    done(p, file, line);
}

#define RUN_SOME_BATCHES(p, text, end) run_batches((p), (text), (end), __FILE__, __LINE__)

static void batches_are_split_and_joined(void) {
    for (int i = 0; i < 2 * CROWDS; ++i)
        RUN_BATCHES(START(crowds[i / 2], COUNT_TO(13), SPDL_BATCH(4, .buffer_size = 1),
                          SORT(2, -1), SPDL_PATH("even", .buffer_size = 1),
                          TREAT(.plus = 100, .sleep_us = i % 2 * 500), SPDL_PATH("odd"),
                          TREAT(.plus = 0), JOIN_BATCHES, SPDL_SINK(1)),
                    "100 102 1 3|104 106 5 7|108 110 9 11|112", SPDL_END);
}

static void parts_of_batches_may_be_empty(void) {
    for (int i = 0; i < CROWDS; ++i) {
        RUN_BATCHES(START(crowds[i], COUNT_TO(12), SPDL_BATCH(4), SORT(2, 1), SPDL_PATH("even"),
                          TREAT(.plus = 100), SPDL_PATH("odd"), SPDL_PATH("nothing"),
                          TREAT(.plus = 200), JOIN_BATCHES, SPDL_SINK(1)),
                    "100 102 1 3|4 5 6 7|108 110 9 11", SPDL_END);
    }
}

static void a_path_may_drop_parts(void) {
    for (int i = 0; i < CROWDS; ++i) {
        RUN_BATCHES(START(crowds[i], COUNT_TO(17), SPDL_BATCH(4), SORT(2, -1), SPDL_PATH("even"),
                          TREAT(.skip = 1), SPDL_PATH("odd"), TREAT(.plus = 0), JOIN_BATCHES,
                          SPDL_SINK(1)),
                    "0 2 1 3|5 7|8 10 9 11|12 14 13 15", SPDL_END);
        /* dropped by all: it is gone */
        RUN_SOME_BATCHES(START(crowds[i], COUNT_TO(17), SPDL_BATCH(4), SORT(2, -1),
                               SPDL_PATH("even"), TREAT(.skip = 1), SPDL_PATH("odd"),
                               TREAT(.skip = 1), JOIN_BATCHES, SPDL_SINK(1)),
                         "0 2 1 3|8 10 9 11|12 14 13 15", SPDL_END);
    }
}

/* Every part of one path is dropped, and many more batches come than there is room for. */
static void a_path_may_drop_all_parts(void) {
    chaos_on();
    for (int i = 0; i < 2 * CROWDS; ++i) {
        notes n = { .length = 0 };
        spdl_pipeline *p =
            START(crowds[i / 2], COUNT_TO(160), SPDL_BATCH(4), SORT(2, -1), SPDL_PATH("even"),
                  SPDL_PIPE(drop_batch, .concurrency = 1 + i % 2), SPDL_PATH("odd"),
                  TREAT(.plus = 0), JOIN_BATCHES, SPDL_SINK(1));
        CHECK_EQ(take(p, &n, 100, "|", note_batch), SPDL_END);
        CHECK_EQ(n.taken, 40);
        CHECK(strncmp(n.text, "1 3|5 7|9 11|", 13) == 0);
        DONE(p);
    }
}

static void a_path_may_take_items_out(void) {
    for (int i = 0; i < CROWDS; ++i)
        RUN_BATCHES(START(crowds[i], COUNT_TO(8), SPDL_BATCH(4), SORT(2, -1), SPDL_PATH("even"),
                          TREAT(.empties = true), SPDL_PATH("odd"), JOIN_BATCHES, SPDL_SINK(1)),
                    "- - 1 3|- - 5 7", SPDL_END);
}

SPDL_FN(batch_by_number, spdl_batch, spdl_batch) {
    *out = in;
    return spdl_route(task, (int)spdl_sequence(task) % 2);
}

/* Each part on its own, whichever is ready. */
static void parts_may_be_delivered_as_they_are(void) {
    for (int i = 0; i < CROWDS; ++i)
        RUN_SOME_BATCHES(START(crowds[i], COUNT_TO(10), SPDL_BATCH(4), SORT(2, 1),
                               SPDL_PATH("even"), SPDL_PATH("odd"),
                               SPDL_MERGE(.merge_order = SPDL_MERGE_ROBIN), SPDL_SINK(1)),
                         "0 2|1 3||4 5 6 7|8|9", SPDL_END);
}

/* A function that says nothing about the items, or sends the batch down one path. */
static void whole_batches_may_be_joined(void) {
    for (int i = 0; i < CROWDS; ++i) {
        RUN_BATCHES(START(crowds[i], COUNT_TO(40), SPDL_BATCH(4), SPDL_BRANCH(pass_batch),
                          SPDL_PATH("a"), TREAT(.plus = 100), SPDL_PATH("b"), JOIN_BATCHES,
                          SPDL_SINK(1)),
                    "100 101 102 103|104 105 106 107|108 109 110 111|112 113 114 115|"
                    "116 117 118 119|120 121 122 123|124 125 126 127|128 129 130 131|"
                    "132 133 134 135|136 137 138 139", SPDL_END);
        RUN_BATCHES(START(crowds[i], COUNT_TO(20), SPDL_BATCH(4), SPDL_BRANCH(batch_by_number),
                          SPDL_PATH("a"), TREAT(.plus = 100), SPDL_PATH("b"), JOIN_BATCHES,
                          SPDL_SINK(1)),
                    "100 101 102 103|4 5 6 7|108 109 110 111|12 13 14 15|116 117 118 119",
                    SPDL_END);
    }
}

/* Waits for a gate, or without one until it is stopped. */
SPDL_FN(hold_batch, spdl_batch, spdl_batch) {
    const int *gate = (const int *)spdl_ctx(task);
    if (gate != NULL) await(gate, 1);
    while (gate == NULL && !spdl_stopping(task)) sleep_us(50);
    *out = in;
    return SPDL_OK;
}

#define START_PARTS(workers, room, gate)                                                           \
    START((workers), COUNT_TO(40), SPDL_BATCH(2),                                                  \
          SPDL_BRANCH(sort_batch, .ctx = &(sorting){ 2, -1 }, .buffer_size = (room)),              \
          SPDL_PATH("full", .buffer_size = 1),                                                     \
          SPDL_PIPE(hold_batch, .ctx = (gate), .threads = 1), SPDL_PATH("free"),                   \
          SPDL_PIPE(treat, .ctx = &(treatment){ .plus = 0 }, .buffer_size = 100), JOIN_BATCHES,    \
          SPDL_SINK(1))

/* One part is in the call, one in the path, and `may` wait: the other path gets on as far. */
static void parts_of_batches_may_wait(void) {
    static const int rooms[] = { 0, 1, 6 };
    for (int i = 0; i < 3 * CROWDS; ++i) {
        const int room = rooms[i % 3], may = room ? room : 2;
        int gate = 0;
        spdl_pipeline *p = START_PARTS(crowds[i / 3], room, &gate);
        calls_are(p, 2, 2 + may);
        CHECK_EQ(stats_of(p, 6).tasks, 2 + may);
        open_gate(&gate);
        for (long k = 0; k < 20; ++k) {
            spdl_batch *batch = NULL;
            REQUIRE(spdl_pipeline_next(p, (void **)&batch, SPDL_SECONDS(15)) == SPDL_OK);
            CHECK(batch->count == 2 && ((item *)batch->items[0])->value == 2 * k &&
                  ((item *)batch->items[1])->value == 2 * k + 1);
            spdl_batch_free(batch);
        }
        CHECK_EQ(take_from(p, 0, 1, SPDL_END), 0);
        DONE(p);
    }
}

static void parts_that_wait_can_be_left(void) {
    chaos_on();
    for (int i = 0; i < 10 * CROWDS; ++i) {
        void *it = NULL;
        spdl_pipeline *p = START_PARTS(crowds[i / 10], 6, NULL);
        while ((int)stats_of(p, 2).tasks < i % 10 && i % 10 < 9)
            REQUIRE(spdl_pipeline_next(p, &it, 100000) == SPDL_TIMEOUT);
        if (i % 2) CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        DONE(p);
    }
}

/* An item that is to go where no path is. */
static void an_item_without_a_path_is_a_failure(void) {
    for (int i = 0; i < CROWDS; ++i) {
        spdl_pipeline *p = START(crowds[i], COUNT_TO(20), SPDL_BATCH(4), SORT(3, 0),
                                 SPDL_PATH("a"), SPDL_PATH("b"), JOIN_BATCHES, SPDL_SINK(1));
        TAKE_BATCHES(p, "0 1 2 3", SPDL_E_INVALID);
        failed_with(p, 2, "spdl: stage 2 'sort_batch', item 1: path 2, but there are 2 paths");
        DONE(p);
    }
}

static void branches_of_batches_can_be_left(void) {
    chaos_on();
    for (int i = 0; i < 4 * CROWDS; ++i) {
        notes n = { .length = 0 };
        spdl_pipeline *p = START(crowds[i / 4], COUNT_TO(-1), SPDL_BATCH(4), SORT(2, -1),
                                 SPDL_PATH("even"), TREAT(.plus = 2), SPDL_PATH("odd"),
                                 TREAT(.plus = 0), JOIN_BATCHES, SPDL_SINK(1));
        CHECK_EQ(take(p, &n, i % 4, "|", note_batch), SPDL_OK);
        if (i % 2) CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        DONE(p);
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
        const spdl_merge_order order = i % 2 ? SPDL_MERGE_ROBIN : SPDL_MERGE_READY;
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
                            .output_order = SPDL_ORDER_COMPLETION, .reorder_window = 4),
                  SPDL_MERGE(.merge_order = order),
                  SPDL_PIPE(in_its_epoch, SCRIPT(.count = 0)), SPDL_SINK(1));
        for (long epoch = 0; epoch < 4; ++epoch) take_dated(p, epoch, 21);
        DONE(p);
    }
}

static void batches_are_joined_in_each_epoch(void) {
    for (int i = 0; i < CROWDS; ++i) {
        spdl_pipeline *p = START(crowds[i], CONTINUOUS(.count = 9), SPDL_BATCH(4), SORT(2, -1),
                                 SPDL_PATH("even"), TREAT(.plus = 10, .skip = 2), SPDL_PATH("odd"),
                                 JOIN_BATCHES, SPDL_SINK(1));
        for (int epoch = 0; epoch < 3; ++epoch) TAKE_EPOCH_OF_BATCHES(p, "10 12 1 3|14 16 5 7");
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

/* --- what a merge in turn takes does not depend on when it looks, until it starves, too --- */

SPDL_FN(tiny_source, void, char) {
    *out = (char *)(uintptr_t)(spdl_sequence(task) + 1);
    return spdl_sequence(task) < *(const uint64_t *)spdl_ctx(task) ? SPDL_OK : SPDL_END;
}

SPDL_FN(tiny_branch, char, char) {
    *out = in;
    return spdl_route(task, (uintptr_t)in % 7 >= 4);
}

SPDL_FN(tiny_pass, char, char) {
    *out = in;
    return SPDL_OK;
}

/* Long rows of items that pass, and as long ones that are dropped: often one path has nothing. */
SPDL_FN(tiny_filter, char, char) {
    *out = in;
    return (uintptr_t)in / 24 % 2 ? SPDL_SKIP : SPDL_OK;
}

static uint64_t order_of(int workers, uint64_t items, int room) {
    uint64_t digest = 0;
    char *it;
    spdl_pipeline *p = START(workers, SPDL_SOURCE(tiny_source, .ctx = &items),
                             SPDL_BRANCH(tiny_branch), SPDL_PATH("a", .buffer_size = room),
                             SPDL_PIPE(tiny_pass, .buffer_size = 4),
                             SPDL_PIPE(tiny_filter, .buffer_size = 1),
                             SPDL_PATH("b", .buffer_size = room),
                             SPDL_MERGE(.merge_order = SPDL_MERGE_ROBIN), SPDL_SINK(4));
    spdl_result result;
    while ((result = SPDL_NEXT(p, &it, SPDL_SECONDS(15))) == SPDL_OK)
        digest = digest * 0x100000001b3u ^ (uintptr_t)it;
    CHECK_EQ(result, room < 40 ? SPDL_E_INVALID : SPDL_END);
    DONE(p);
    return digest;
}

static void turns_are_the_same_at_any_number_of_workers(void) {
    const uint64_t items = TEST_SANITIZED ? 5000 : 50000;
    static const int rooms[] = { 4, 1 << 14 };
    for (int i = 0; i < 12; ++i) {
        static uint64_t order;
        if (i % 6 == 0) order = order_of(0, items, rooms[i / 6]);
        CHECK_EQ(order_of(2 + i % 3, items, rooms[i / 6]), order);
    }
}

static void a_batch_is_split_once(void) {
    for (int i = 0; i < CROWDS; ++i) {
        spdl_pipeline *p = START(crowds[i], COUNT_TO(9), SPDL_BATCH(3),
                                 SPDL_BRANCH(sort_twice, .ctx = &(sorting){ 2, -1 }),
                                 SPDL_PATH("a"), SPDL_PATH("b"),
                                 SPDL_MERGE(.merge_order = SPDL_MERGE_BATCHES), SPDL_SINK(1));
        void *taken = NULL;
        CHECK_EQ(spdl_pipeline_next(p, &taken, SPDL_FOREVER), SPDL_E_INVALID);
        failed_with(p, 2, "spdl: stage 2 'sort_twice', item 0: spdl_route_items twice in one call");
        DONE(p);
    }
}

/* Taken, and handed on all the same: nothing is lost (a leak under ASan). */
static void a_batch_that_is_taken_is_split(void) {
    int how[] = { 0, 1, 3 };
    for (int i = 0; i < 3 * CROWDS; ++i) {
        const int w = crowds[i / 3];
        spdl_pipeline *p = START(w, COUNT_TO(9), SPDL_BATCH(3),
                                 SPDL_BRANCH(takes_and_sorts, .ctx = &how[i % 3]),
                                 SPDL_PATH("a"), SPDL_PATH("b"),
                                 SPDL_MERGE(.merge_order = SPDL_MERGE_BATCHES), SPDL_SINK(1));
        spdl_batch *batch = NULL;
        for (int k = 0; k < 3; ++k) {
            REQUIRE(SPDL_NEXT(p, &batch, SPDL_FOREVER) == SPDL_OK);
            CHECK_EQ(batch->count, 3);
            spdl_batch_free(batch);
        }
        CHECK_EQ(SPDL_NEXT(p, &batch, SPDL_FOREVER), SPDL_END);
        DONE(p);
    }
}

TEST_TABLE(branch) {
    TEST_CASE(a_batch_that_is_taken_is_split),
    TEST_CASE(a_batch_is_split_once),
    TEST_CASE(a_branch_does_not_emit),
    TEST_CASE(items_go_down_their_path),
    TEST_CASE(a_path_that_is_no_path_is_a_failure),
    TEST_CASE(the_first_path_is_the_default),
    TEST_CASE(paths_may_be_empty),
    TEST_CASE(branches_may_hold_branches),
    TEST_CASE(paths_may_hold_any_rows),
    TEST_CASE(paths_may_hold_batches),
    TEST_CASE(as_many_rows_as_there_may_be),
    TEST_CASE(a_path_that_is_full_does_not_stop_the_others),
    TEST_CASE(an_inner_path_that_is_full_stops_only_its_branch),
    TEST_CASE(what_waits_comes_before_the_end_of_its_epoch),
    TEST_CASE(a_path_that_fails_leaves_what_waits_for_others),
    TEST_CASE(what_waits_for_a_path_that_fails_is_freed),
    TEST_CASE(what_waits_can_be_left_at_any_point),
    TEST_CASE(a_merge_may_go_round),
    TEST_CASE(a_round_leaves_out_what_has_ended),
    TEST_CASE(a_merge_that_starves_is_a_failure),
    TEST_CASE(a_path_is_ahead_by_what_may_wait),
    TEST_CASE(a_merge_that_waits_for_long_does_not_starve),
    TEST_CASE(a_function_may_choose),
    TEST_CASE(a_function_may_choose_any_rhythm),
    TEST_CASE(a_choice_that_cannot_be_is_a_failure),
    TEST_CASE(a_merge_that_is_full_does_not_starve),
    TEST_CASE(a_merge_that_waits_burns_nothing),
    TEST_CASE(a_path_may_fail),
    TEST_CASE(branches_can_be_stopped),
    TEST_CASE(batches_are_split_and_joined),
    TEST_CASE(parts_of_batches_may_be_empty),
    TEST_CASE(a_path_may_drop_parts),
    TEST_CASE(a_path_may_drop_all_parts),
    TEST_CASE(a_path_may_take_items_out),
    TEST_CASE(parts_may_be_delivered_as_they_are),
    TEST_CASE(whole_batches_may_be_joined),
    TEST_CASE(parts_of_batches_may_wait),
    TEST_CASE(parts_that_wait_can_be_left),
    TEST_CASE(an_item_without_a_path_is_a_failure),
    TEST_CASE(branches_of_batches_can_be_left),
    TEST_CASE(turns_are_the_same_at_any_number_of_workers),
    TEST_CASE(no_item_crosses_an_epoch),
    TEST_CASE(batches_are_joined_in_each_epoch),
    TEST_CASE(an_epoch_can_be_left),
    TEST_END,
};
