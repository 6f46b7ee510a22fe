/* What spdl_pipeline_create refuses, and how it says where and why. */
#include "items.h"

/* --- rows and fields --- */

static char logged[SPDL_TEXT_BYTES];

static void log_keeps(spdl_log_level level, const char *text, void *user) {
    (void)user;
    CHECK_EQ(level, SPDL_LOG_ERROR);
    snprintf(logged, sizeof logged, "%s", text);
}

static void refused(spdl_pipeline_desc desc, const spdl_stage *rows, size_t count,
                    spdl_result result, const char *text) {
    spdl_error error;
    spdl_pipeline *p = (spdl_pipeline *)(uintptr_t)1;
    desc.error = &error;
    desc.logger.log_fn = log_keeps;
    CHECK_EQ(spdl_pipeline_create(&p, &desc, rows, count), result);
    CHECK(p == NULL);
    CHECK_EQ(error.result, result);
    CHECK_STR(error.text, text);
    CHECK_STR(logged, ""); /* once is enough */
    desc.error = NULL;
    CHECK_EQ(spdl_pipeline_create(&p, &desc, rows, count), result);
    CHECK_STR(logged, text);
    logged[0] = 0;
}

static const spdl_pipeline_desc plain;

typedef struct place {
    char text[200];
} place;

/* Where a row was written; that of one without fields is whole in its file. */
static place place_of(const spdl_stage *row) {
    place at;
    if (row->line == 0) snprintf(at.text, sizeof at.text, "%s", row->file);
    else snprintf(at.text, sizeof at.text, "%s:%d", row->file, row->line);
    return at;
}

/* The row'th row is refused, with its place, its name and this reason. */
static void row_refused(const spdl_stage *rows, size_t count, int row, const char *name,
                        const char *why) {
    char text[SPDL_TEXT_BYTES];
    spdl_error error;
    spdl_pipeline *p = NULL;
    spdl_pipeline_desc desc = plain;
    const spdl_stage *at = &rows[row];
    snprintf(text, sizeof text, "%s: stage %d '%s': %s", place_of(at).text, row, name, why);
    refused(plain, rows, count, SPDL_E_INVALID, text);
    desc.error = &error;
    desc.logger.log_fn = log_keeps;
    CHECK_EQ(spdl_pipeline_create(&p, &desc, rows, count), SPDL_E_INVALID);
    CHECK_EQ(error.stage, row);
    CHECK_STR(error.stage_name, name);
}

#define ROW_REFUSED(row, name, why, ...) row_refused(SPDL_STAGES(__VA_ARGS__), (row), (name), (why))

#define FIRST_ROW "the first row must be SPDL_SOURCE, SPDL_FROM or SPDL_FEED"
#define ONLY_FIRST "only the first row may be SPDL_SOURCE, SPDL_FROM or SPDL_FEED"

static void rows_stand_in_order(void) {
    const spdl_stage pipe = SPDL_PIPE(follow);
    const spdl_stage source = SPDL_SOURCE(count_up), sink = SPDL_SINK(3);
    ROW_REFUSED(0, "follow", FIRST_ROW, pipe, sink);
    ROW_REFUSED(0, "sink", FIRST_ROW, sink, source);
    ROW_REFUSED(1, "count_up", ONLY_FIRST, source, source, sink);
    ROW_REFUSED(1, "follow", "the last row must be SPDL_SINK", source, pipe);
    ROW_REFUSED(1, "sink", "only the last row may be SPDL_SINK", source, sink, sink);
    ROW_REFUSED(1, "sink", "only the last row may be SPDL_SINK", source, sink, pipe, sink);
}

static void the_number_of_rows_has_limits(void) {
    spdl_stage rows[SPDL_MAX_STAGES + 2] = { SPDL_SOURCE(count_up) };
    for (int i = 1; i < SPDL_MAX_STAGES + 1; ++i) rows[i] = (spdl_stage)SPDL_PIPE(follow);
    rows[SPDL_MAX_STAGES + 1] = (spdl_stage)SPDL_SINK(3);
    refused(plain, SPDL_TABLE(rows), SPDL_E_INVALID,
            "pipeline: too many stages: 34 rows, at most 32 and a sink");
    refused(plain, rows, SIZE_MAX, SPDL_E_INVALID,
            "pipeline: too many stages: 32767 rows, at most 32 and a sink");
    row_refused(rows, 1, 0, "count_up",
                "the only row; a pipeline needs at least a source and a sink");
    refused(plain, rows, 0, SPDL_E_INVALID,
            "pipeline: no rows; it needs at least a source and a sink");
    refused(plain, NULL, 5, SPDL_E_INVALID,
            "pipeline: no rows; it needs at least a source and a sink");
}

/* One field of one row, changed. */
static void field_refused(spdl_stage row, const char *why) {
    const spdl_stage rows[] = { SPDL_SOURCE(count_up), row, SPDL_PIPE(follow), SPDL_SINK(3) };
    const char *const name = row.kind == SPDL_KIND_BATCH ? "batch" : row.fn ? "follow" : "pipe";
    row_refused(SPDL_TABLE(rows), 1, name, why);
}

#define PIPE_REFUSED(why, ...) field_refused((spdl_stage)SPDL_PIPE(follow, __VA_ARGS__), why)
#define BATCH_REFUSED(why, ...) field_refused((spdl_stage)SPDL_BATCH(__VA_ARGS__), why)

static spdl_result init_nothing(void *ctx, int worker, void **local) {
    (void)ctx;
    (void)worker;
    (void)local;
    return SPDL_OK;
}

static void fini_nothing(void *ctx, int worker, void *local) {
    (void)ctx;
    (void)worker;
    (void)local;
}

static void free_nothing(void *memory, size_t bytes, void *user) {
    (void)memory;
    (void)bytes;
    (void)user;
}

static void numbers_have_limits(void) {
    PIPE_REFUSED("concurrency is -2, must be 1 to 4096", .concurrency = -2);
    PIPE_REFUSED("concurrency is 4097, must be 1 to 4096", .concurrency = 4097);
    PIPE_REFUSED("buffer_size is -1, must be 1 to 1048576", .buffer_size = -1);
    PIPE_REFUSED("buffer_size is 1048577, must be 1 to 1048576", .buffer_size = 1048577);
    PIPE_REFUSED("max_failures is -2, must be at least -1", .max_failures = -2);
    PIPE_REFUSED("size is set, but only batch rows have it", .size = 3);
    PIPE_REFUSED("drop_last is set, but only batch rows have it", .drop_last = true);
    PIPE_REFUSED("output_order is 2, must be 0 to 1", .output_order = (spdl_order)2);
    BATCH_REFUSED("size is 0, must be at least 1", 0);
    BATCH_REFUSED("size is -3, must be 1 to 16777216", -3);
    BATCH_REFUSED("size is 16777217, must be 1 to 16777216", (1 << 24) + 1);
    BATCH_REFUSED("concurrency is set, but only pipe rows have it", 3, .concurrency = 2);
    BATCH_REFUSED("max_failures is set, but only source, pipe and branch rows have it", 3,
                  .max_failures = 1);
    BATCH_REFUSED("output_order is set, but only pipe and merge rows have it", 3,
                  .output_order = SPDL_ORDER_COMPLETION);
}

static void *item_copy_nothing(const void *from) {
    (void)from;
    return NULL;
}

static void functions_have_to_fit_their_row(void) {
    static const spdl_function empty = { NULL, "follow", "item", "item", 0, 0 };
    spdl_stage row = SPDL_PIPE(follow);
    row.fn = &empty;
    field_refused(row, "fn is NULL");
    row.fn = NULL;
    field_refused(row, "fn is NULL");
    row = (spdl_stage)SPDL_BATCH(3, .name = "batch");
    row.fn = &empty;
    field_refused(row, "fn is set, but only source, pipe and branch rows have it");
    PIPE_REFUSED("fini is set without init", .fini = fini_nothing);
    BATCH_REFUSED("free_item is set, but only source, feed, pipe and branch rows have it", 3,
                  .free_item = item_free);
    BATCH_REFUSED("init is set, but only source, pipe and branch rows have it", 3,
                  .init = init_nothing);
    row = (spdl_stage)SPDL_BATCH(3);
    row.copy_item = item_copy_nothing;
    field_refused(row, "copy_item is set, but only source and pipe rows have it");
    row = (spdl_stage)SPDL_PIPE(follow);
    row.kind = (spdl_kind)99;
    field_refused(row, "kind is 99, which is no kind of row");
    row.kind = SPDL_KIND_NONE;
    field_refused(row, "kind is 0, which is no kind of row");
}

/* The edge after the last stage is the sink's. */
static void the_sink_has_its_own_buffer_size(void) {
    ROW_REFUSED(1, "follow",
                "SPDL_SINK has the buffer_size of the last stage: write SPDL_SINK(3)",
                SPDL_SOURCE(count_up), SPDL_PIPE(follow, .buffer_size = 3), SPDL_SINK(3));
    ROW_REFUSED(1, "sink", "buffer_size is -1, must be 1 to 1048576", SPDL_SOURCE(count_up),
                SPDL_SINK(-1));
    ROW_REFUSED(2, "follow", "the last row must be SPDL_SINK", SPDL_SOURCE(count_up),
                SPDL_PIPE(follow, .buffer_size = 3), SPDL_PIPE(follow));
}

static void the_desc_is_checked(void) {
    const spdl_stage rows[] = { SPDL_SOURCE(count_up), SPDL_SINK(3) };
    spdl_pipeline_desc desc = { .workers = -2 };
    spdl_pipeline *p = NULL;
    refused(desc, SPDL_TABLE(rows), SPDL_E_INVALID,
            "pipeline: workers is -2, must be SPDL_INLINE or 0 to 256");
    desc.workers = 257;
    refused(desc, SPDL_TABLE(rows), SPDL_E_INVALID,
            "pipeline: workers is 257, must be SPDL_INLINE or 0 to 256");
    desc.workers = 1;
    desc.pool = pool_of(1);
    refused(desc, SPDL_TABLE(rows), SPDL_E_INVALID,
            "pipeline: workers is 1, but pool is set: leave it 0");
    desc.workers = 0;
    desc.next_works_ns = 1;
    refused(desc, SPDL_TABLE(rows), SPDL_E_INVALID,
            "pipeline: next_works_ns is set, but its pool has no place for guests: set .guests of "
            "the pool");
    desc.next_works_ns = 0;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_TABLE(rows)) == SPDL_OK);
    DONE(p);
    spdl_pool_destroy(desc.pool);
    desc = plain;
    desc.workers = 256;
    desc.next_works_ns = SPDL_FOREVER;
    refused(desc, SPDL_TABLE(rows), SPDL_E_INVALID,
            "pipeline: workers is 256; with next_works_ns it is at most 255, as the thread in next "
            "counts as one");
    desc.next_works_ns = 0;
    threads_left = 0;
    refused(desc, SPDL_TABLE(rows), SPDL_E_THREAD,
            "pool 'spdl': thread 0 of 256 could not be created");
    threads_left = -1;
    desc = plain;
    desc.allocator.free_fn = free_nothing;
    refused(desc, SPDL_TABLE(rows), SPDL_E_INVALID,
            "pipeline: set both functions of the allocator or none");
    CHECK_EQ(spdl_pipeline_create(NULL, &plain, SPDL_TABLE(rows)), SPDL_E_INVALID);
    REQUIRE(spdl_pipeline_create(&p, NULL, SPDL_TABLE(rows)) == SPDL_OK);
    DONE(p);
}

SPDL_FN(pass_batch, spdl_batch, spdl_batch) {
    *out = in;
    return SPDL_OK;
}

/* Takes and yields what it is given. */
SPDL_FN(free_for_all, void, void) {
    *out = in;
    return SPDL_OK;
}

/* --- fields that belong to other kinds of rows --- */

static script empty; /* a source with a thread of its own is called at once */

static const spdl_stage all_kinds[] = {
    SPDL_SOURCE(count_up, .ctx = &empty, .name = "source"),
    SPDL_PIPE(follow, .name = "pipe"),
    SPDL_BATCH(3, .name = "batch"),
    SPDL_BRANCH(pass_batch, .name = "branch"),
    SPDL_PATH("path"),
    SPDL_PATH("other"),
    SPDL_MERGE(.name = "merge"),
    SPDL_PIPE(pass_batch, .name = "last"),
    SPDL_SINK(3),
};
enum { ALL_KINDS = sizeof all_kinds / sizeof all_kinds[0] };

#define KIND(name) (1u << SPDL_KIND_##name)
#define CALLS (KIND(SOURCE) | KIND(PIPE) | KIND(BRANCH))
#define MAKES (CALLS | KIND(FEED))

static void free_none(void *it) { (void)it; }

static void drop_nothing(void *ctx, void *it, const spdl_error *error) {
    (void)ctx, (void)it, (void)error;
}

/* Sets a field to something that is fine where it has a meaning; false: there are no more. */
static bool set_field(int field, spdl_stage *row, const char **name, unsigned *kinds) {
    /* clang-format off */
    switch (field) {
#define FIELD(number, field_, value, kinds_)                                                       \
    case number: row->field_ = value; *name = #field_; *kinds = kinds_; return true;
    FIELD(0, size, 4, KIND(BATCH))
    FIELD(1, threads, 1, KIND(SOURCE))
    FIELD(2, output_order, SPDL_ORDER_COMPLETION, KIND(PIPE) | KIND(MERGE))
    FIELD(3, drop_last, true, KIND(BATCH))
    FIELD(4, drop_oldest, true, KIND(FEED))
    FIELD(5, continuous, true, KIND(SOURCE))
    FIELD(6, flush, true, KIND(PIPE))
    FIELD(7, deferred, true, KIND(PIPE))
    FIELD(8, max_failures, 1, CALLS)
    FIELD(9, type, "item", KIND(FEED) | KIND(BATCH))
    FIELD(10, concurrency, 2, KIND(PIPE))
    FIELD(11, free_item, free_none, MAKES)
    FIELD(12, init, init_nothing, CALLS)
    FIELD(13, again, true, KIND(PIPE))
    FIELD(14, on_drop, drop_nothing, CALLS)
    FIELD(15, item_bytes, 8, KIND(SOURCE) | KIND(PIPE) | KIND(BATCH))
    FIELD(16, copy_item, item_copy_nothing, KIND(SOURCE) | KIND(PIPE))
#undef FIELD
    default: return false;
    }
    /* clang-format on */
}

/* As the declarations list them. */
static const char *kinds_text(unsigned kinds) {
    return kinds == CALLS                          ? "source, pipe and branch"
           : kinds == (KIND(SOURCE) | KIND(PIPE)) ? "source and pipe"
           : kinds == (KIND(PIPE) | KIND(MERGE))  ? "pipe and merge"
           : kinds == MAKES                        ? "source, feed, pipe and branch"
           : kinds == KIND(SOURCE)                 ? "source"
           : kinds == KIND(PIPE)                   ? "pipe"
           : kinds == KIND(BATCH)                  ? "batch"
           : kinds == KIND(FEED)                   ? "feed"
           : kinds == (KIND(FEED) | KIND(BATCH))   ? "feed and batch"
                                                   : "source, pipe and batch";
}

static void field_on_row(int field, int index, bool feed) {
    spdl_stage rows[ALL_KINDS];
    const char *name = NULL;
    unsigned kinds = 0;
    char why[120];
    memcpy(rows, all_kinds, sizeof rows);
    if (feed) rows[0] = (spdl_stage)SPDL_FEED(item, .name = "feed");
    (void)set_field(field, &rows[index], &name, &kinds);
    if (kinds >> rows[index].kind & 1 || (feed && strcmp(name, "type") == 0)) {
        DONE(start(0, NULL, SPDL_TABLE(rows))); /* and nothing is called */
        return;
    }
    snprintf(why, sizeof why, "%s is set, but only %s rows have it", name, kinds_text(kinds));
    row_refused(SPDL_TABLE(rows), index, index == ALL_KINDS - 1 ? "sink" : rows[index].name, why);
}

static void fields_belong_to_kinds_of_rows(void) {
    static const int rows[] = { 0, 1, 2, 3, 4, 6, ALL_KINDS - 1 };
    spdl_stage row;
    const char *name;
    unsigned kinds;
    for (int field = 0; set_field(field, &row, &name, &kinds); ++field) {
        for (int i = 0; i < 7; ++i) field_on_row(field, rows[i], false);
        field_on_row(field, 0, true);
    }
}

static void the_last_edge_is_that_of_the_sink(void) {
    ROW_REFUSED(4, "merge", "SPDL_SINK has the buffer_size of the last stage: write "
                            "SPDL_SINK(2)",
                SPDL_SOURCE(count_up), SPDL_BRANCH(follow), SPDL_PATH("a"), SPDL_PATH("b"),
                SPDL_MERGE(.buffer_size = 2), SPDL_SINK(1));
}

static void numbers_of_newer_fields_have_limits(void) {
    PIPE_REFUSED("threads is set, but only source rows have it", .threads = 1);
    PIPE_REFUSED("flush is set, but concurrency is more than 1", .flush = true, .concurrency = 2);
    PIPE_REFUSED("serial is set, but concurrency is SPDL_ALL or more than 1", .serial = true,
                 .concurrency = SPDL_ALL);
    PIPE_REFUSED("serial is set, but concurrency is SPDL_ALL or more than 1", .serial = true,
                 .concurrency = 2);
    PIPE_REFUSED("again and deferred are both set", .again = true, .deferred = true);
    PIPE_REFUSED("free_state is set without again", .free_state = free_none);
    PIPE_REFUSED("deferred and flush are both set", .deferred = true, .flush = true);
    PIPE_REFUSED("again is set, and concurrency is more than 1: write .output_order = "
                 "SPDL_ORDER_COMPLETION, or a stage before it that does the slow work",
                 .again = true, .concurrency = 2);
}

/* The line of a merge is told, too. */
static void merges_know_where_they_are(void) {
    const spdl_stage merge = SPDL_MERGE();
    char text[200];
    snprintf(text, sizeof text, "%s:%d", __FILE__, __LINE__ - 2);
    CHECK_STR(merge.file, text);
    ROW_REFUSED(1, "merge", "SPDL_MERGE without SPDL_BRANCH above", SPDL_SOURCE(count_up), merge,
                SPDL_SINK(1));
}

static void merges_have_an_order(void) {
    static const int orders[] = { -1, 2, 77 };
    for (int i = 0; i < 3; ++i) {
        char why[80];
        snprintf(why, sizeof why, "output_order is %d, must be 0 to 1", orders[i]);
        ROW_REFUSED(4, "merge", why, SPDL_SOURCE(count_up), SPDL_BRANCH(follow), SPDL_PATH("a"),
                    SPDL_PATH("b"), SPDL_MERGE(.output_order = (spdl_order)orders[i]),
                    SPDL_SINK(1));
    }
}

static void branches_have_paths_and_an_end(void) {
    const spdl_stage source = SPDL_SOURCE(count_up), branch = SPDL_BRANCH(follow, .name = "by");
    const spdl_stage a = SPDL_PATH("a"), b = SPDL_PATH("b"), merge = SPDL_MERGE();
    const spdl_stage pipe = SPDL_PIPE(follow), sink = SPDL_SINK(1);
    ROW_REFUSED(1, "a", "SPDL_PATH without SPDL_BRANCH above", source, a, b, merge, sink);
    ROW_REFUSED(2, "merge", "SPDL_MERGE without SPDL_BRANCH above", source, pipe, merge, sink);
    ROW_REFUSED(2, "follow", "after SPDL_BRANCH there must be SPDL_PATH", source, branch, pipe,
                sink);
    ROW_REFUSED(2, "sink", "after SPDL_BRANCH there must be SPDL_PATH", source, branch, sink);
    ROW_REFUSED(2, "merge", "after SPDL_BRANCH there must be SPDL_PATH", source, branch, merge,
                sink);
    ROW_REFUSED(2, "by", "after SPDL_BRANCH there must be SPDL_PATH", source, branch, branch, a, b,
                merge, merge, sink);
    ROW_REFUSED(4, "merge", "SPDL_MERGE of fewer than 2 paths", source, branch, a, pipe, merge,
                sink);
    ROW_REFUSED(1, "by", "SPDL_BRANCH without SPDL_MERGE below", source, branch, a, pipe, b, sink);
    ROW_REFUSED(1, "by", "SPDL_BRANCH without SPDL_MERGE below", source, branch, a, branch, a, b,
                merge, b, sink);
    ROW_REFUSED(5, "a", "SPDL_PATH without SPDL_BRANCH above", source, branch, a, b, merge, a,
                merge, sink);
    ROW_REFUSED(5, "merge", "SPDL_MERGE without SPDL_BRANCH above", source, branch, a, b, merge,
                merge, sink);
    ROW_REFUSED(0, "by", FIRST_ROW, branch, a, b, merge, sink);
}

/* Each item makes one result or none there. */
static void paths_of_a_merge_in_order_keep_the_count(void) {
    const spdl_stage source = SPDL_SOURCE(count_up), branch = SPDL_BRANCH(follow, .name = "by");
    const spdl_stage a = SPDL_PATH("a"), b = SPDL_PATH("b"), merge = SPDL_MERGE();
    const spdl_stage ready = SPDL_MERGE(.output_order = SPDL_ORDER_COMPLETION);
    const spdl_stage sink = SPDL_SINK(1), any = SPDL_PIPE(free_for_all);
    const struct {
        const char *name, *what;
        spdl_stage row;
    } refused[] = {
        { "follow", "flush", SPDL_PIPE(follow, .flush = true) },
        { "follow", "again", SPDL_PIPE(follow, .again = true) },
        { "follow", "completion order",
          SPDL_PIPE(follow, .concurrency = 2, .output_order = SPDL_ORDER_COMPLETION) },
        { "batch", "SPDL_BATCH", SPDL_BATCH(2) },
        { "unbatch", "SPDL_UNBATCH", SPDL_UNBATCH() },
    };
    for (int i = 0; i < 5; ++i) {
        const spdl_stage row = refused[i].row;
        const char *const name = refused[i].name;
        char why[200];
        snprintf(why, sizeof why, "%s in a path whose merge is in input order, where each item "
                                  "makes one result or none: write SPDL_MERGE(.output_order = "
                                  "SPDL_ORDER_COMPLETION)", refused[i].what);
        ROW_REFUSED(4, name, why, source, branch, a, any, row, any, b, merge, sink);
        ROW_REFUSED(8, name, why, source, branch, a, branch, a, b, merge, any, row, any, b, merge,
                    sink);
        ROW_REFUSED(6, name, why, source, branch, a, branch, a, any, row, any, b, merge, b, ready,
                    sink);
        DONE(start(0, NULL, SPDL_STAGES(source, any, row, any, branch, a, branch, a, any, row, any,
                                        b, ready, b, ready, any, row, any, sink)));
        DONE(start(0, NULL, SPDL_STAGES(source, branch, a, branch, a, b, merge, any, row, any, b,
                                        ready, sink)));
    }
    ROW_REFUSED(6, "merge", "completion order in a path whose merge is in input order, where each "
                            "item makes one result or none: write SPDL_MERGE(.output_order = "
                            "SPDL_ORDER_COMPLETION)",
                source, branch, a, branch, a, b, ready, b, merge, sink);
}

static void a_feed_comes_first_and_is_read(void) {
    const spdl_stage source = SPDL_SOURCE(count_up), feed = SPDL_FEED(item), sink = SPDL_SINK(1);
    const spdl_stage pipe = SPDL_PIPE(follow);
    ROW_REFUSED(1, "feed", ONLY_FIRST, source, feed, sink);
    ROW_REFUSED(1, "feed", ONLY_FIRST, feed, feed, pipe, sink);
    ROW_REFUSED(1, "sink", "after SPDL_FEED there must be a stage", feed, sink);
}

/* --- types --- */

typedef struct photo photo;

SPDL_FN(to_photo, item, photo) { return SPDL_SKIP; }
SPDL_FN(count_photos, photo, void) { return SPDL_SKIP; }
SPDL_FN(from_any, void, item) { return SPDL_SKIP; }
SPDL_FN(promises, const item, const item) {
    *out = in;
    return SPDL_OK;
}
SPDL_FN(to_const_photo, item, const photo) { return SPDL_SKIP; }

static void types_have_to_fit(void) {
    const spdl_stage rows[] = {
        SPDL_SOURCE(count_up),
        SPDL_PIPE(to_photo, .name = "decode"),
        SPDL_PIPE(follow),
        SPDL_SINK(3),
    };
    char text[SPDL_TEXT_BYTES];
    const int line = rows[2].line;
    CHECK_EQ(rows[1].line, line - 1);
    snprintf(text, sizeof text,
             "%s:%d: stage 2 'follow' takes 'item *' but stage 1 'decode' (%s:%d) yields "
             "'photo *'",
             __FILE__, line, __FILE__, line - 1);
    refused(plain, SPDL_TABLE(rows), SPDL_E_TYPE, text);
}

/* Row `row` is refused, because it takes what row `from` does not yield. */
static void pair_refused(const spdl_stage *rows, size_t count, int row, const char *takes, int from,
                         const char *yields) {
    char text[SPDL_TEXT_BYTES];
    const char *const name = rows[row].name ? rows[row].name : "merge";
    snprintf(text, sizeof text,
             "%s: stage %d '%s' takes '%s *' but stage %d '%s' (%s) yields '%s *'",
             place_of(&rows[row]).text, row, name, takes, from, rows[from].name,
             place_of(&rows[from]).text, yields);
    refused(plain, rows, count, SPDL_E_TYPE, text);
}

#define PAIR_REFUSED(row, takes, from, yields, ...)                                                \
    pair_refused(SPDL_STAGES(__VA_ARGS__), (row), (takes), (from), (yields))

/* Who takes a const item changes nothing; who yields one may have promised that. */
static void a_const_can_be_added(void) {
    RUN(START(1, COUNT_TO(3), SPDL_PIPE(promises), SPDL_PIPE(promises), SPDL_SINK(1)), "0 1 2",
        SPDL_END);
    PAIR_REFUSED(2, "item", 1, "const item", SPDL_SOURCE(count_up),
                 SPDL_PIPE(promises, .name = "a"), SPDL_PIPE(follow, .name = "b"), SPDL_SINK(1));
    PAIR_REFUSED(2, "const item", 1, "const photo", SPDL_SOURCE(count_up),
                 SPDL_PIPE(to_const_photo, .name = "a"), SPDL_PIPE(promises, .name = "b"),
                 SPDL_SINK(1));
}

static void a_source_takes_nothing(void) {
    const spdl_stage rows[] = { SPDL_SOURCE(follow), SPDL_SINK(1) };
    char text[SPDL_TEXT_BYTES];
    snprintf(text, sizeof text,
             "%s: stage 0 'follow' is a source, but takes 'item *': it must take 'void *'",
             place_of(&rows[0]).text);
    refused(plain, rows, 2, SPDL_E_TYPE, text);
}

/* Whoever takes what comes out could not tell one from the other. */
static void what_is_merged_is_of_one_type(void) {
    const spdl_stage rows[] = {
        SPDL_SOURCE(count_up), SPDL_BRANCH(follow), SPDL_PATH("a"), SPDL_PIPE(to_photo),
        SPDL_PATH("b"), SPDL_MERGE(), SPDL_SINK(1),
    };
    char text[SPDL_TEXT_BYTES];
    snprintf(text, sizeof text,
             "%s: stage 5 'merge' merges 'photo *' of stage 3 'to_photo' with 'item *' of "
             "stage 4 'b'",
             place_of(&rows[5]).text);
    refused(plain, rows, 7, SPDL_E_TYPE, text);
}

SPDL_FN(from_nothing, const void, item) { return SPDL_END; }
SPDL_FN(of_any_type, item, void) { return SPDL_SKIP; }

SPDL_FN(keep_it, item, const item) {
    *out = in;
    return SPDL_OK;
}

/* But `const`, and no type, fit any other. Sizes of the paths are checked, too. */
static void what_is_merged_may_be_const(void) {
    const spdl_stage source = SPDL_SOURCE(count_up), a = SPDL_PATH("a"), b = SPDL_PATH("b");
    const spdl_stage keeps = SPDL_PIPE(keep_it), merge = SPDL_MERGE(), sink = SPDL_SINK(1);
    const spdl_stage branch = SPDL_BRANCH(follow);
    static const spdl_function untyped = { follow_spdl_call, "untyped", NULL, NULL, 0, 0 };
    static const spdl_function large = { follow_spdl_call, "large", "item", "item", 24, 0 };
    spdl_stage other = branch;
    DONE(START(0, source, branch, a, keeps, b, merge, sink));
    DONE(START(0, source, branch, a, b, keeps, merge, sink));
    other.fn = &untyped;
    DONE(START(0, source, other, a, b, keeps, merge, sink));
    other = keeps;
    other.fn = &large;
    other.item_bytes = 16;
    ROW_REFUSED(3, "large", "item_bytes is 16, but 'item' of stage 3 'large' has 24 bytes",
                source, branch, a, other, b, merge, sink);
}

/* A row of the library where none may be, and functions without names and types. */
static void rows_made_by_hand(void) {
    static const spdl_function nameless = { count_up_spdl_call, NULL, NULL, NULL, 0, 0 };
    static const spdl_function typeless = { count_up_spdl_call, "count", NULL, NULL, 0, 0 };
    static const spdl_function named = { count_up_spdl_call, "spdl_index", NULL, "item", 0, 0 };
    static script none;
    spdl_stage rows[] = { SPDL_SOURCE(count_up, .ctx = &none), SPDL_PIPE(follow), SPDL_SINK(1) };
    const spdl_function *const made[] = { &nameless, &typeless, &named, &nameless };
    static const char *const names[] = { "given", "count", "spdl_index", "source" };
    char text[SPDL_TEXT_BYTES];
    for (int i = 0; i < 4; ++i) {
        spdl_pipeline *p;
        spdl_stats stats;
        rows[0].fn = made[i];
        rows[0].name = i ? NULL : "given";
        p = start(0, NULL, rows, 3);
        spdl_pipeline_stats(p, &stats);
        CHECK_STR(stats.stage[0].name, names[i]);
        RUN(p, "", SPDL_END);
    }
    rows[0] = (spdl_stage){ .kind = SPDL_KIND_FEED, .name = "feed" };
    DONE(start(0, NULL, rows, 3));
    rows[0] = (spdl_stage)SPDL_FILES_AT((const spdl_files *)&none, .name = "paths");
    rows[0].kind = SPDL_KIND_SOURCE;
    snprintf(text, sizeof text, "%s: stage 0 'paths' is a source, but takes 'spdl_index *': it "
                                "must take 'void *'", place_of(&rows[0]).text);
    refused(plain, rows, 3, SPDL_E_TYPE, text);
}

/* Also when one of its paths is a merge, and the first one there says nothing. */
static void a_merge_in_a_path_has_a_type(void) {
    const spdl_stage rows[] = {
        SPDL_SOURCE(count_up), SPDL_BRANCH(follow), SPDL_PATH("a"), SPDL_BRANCH(follow),
        SPDL_PATH("a0"), SPDL_PIPE(of_any_type), SPDL_PATH("a1"), SPDL_PIPE(to_photo),
        SPDL_MERGE(), SPDL_PATH("b"), SPDL_MERGE(), SPDL_SINK(1),
    };
    char text[SPDL_TEXT_BYTES];
    snprintf(text, sizeof text,
             "%s: stage 10 'merge' merges 'photo *' of stage 8 'merge' with 'item *' of "
             "stage 9 'b'",
             place_of(&rows[10]).text);
    refused(plain, rows, 12, SPDL_E_TYPE, text);
}

static void const_void_is_void(void) {
    spdl_pipeline *p;
    REQUIRE(spdl_pipeline_create(&p, &plain, SPDL_STAGES(
        SPDL_SOURCE(from_nothing), SPDL_BRANCH(follow), SPDL_PATH("a"), SPDL_PIPE(of_any_type),
        SPDL_PATH("b"), SPDL_MERGE(), SPDL_SINK(1))) == SPDL_OK);
    spdl_pipeline_destroy(p);
}

static void types_have_to_fit_through_branches(void) {
    const spdl_stage source = SPDL_SOURCE(count_up), branch = SPDL_BRANCH(follow, .name = "by");
    const spdl_stage a = SPDL_PATH("a"), b = SPDL_PATH("b"), merge = SPDL_MERGE();
    const spdl_stage make = SPDL_PIPE(to_photo, .name = "make"), sink = SPDL_SINK(1);
    const spdl_stage looks = SPDL_PIPE(count_photos, .name = "looks");
    const spdl_stage next = SPDL_PIPE(follow, .name = "next");
    const spdl_stage photos = SPDL_FEED(photo, .name = "photos");
    PAIR_REFUSED(4, "photo", 3, "item", source, branch, a, b, looks, merge, sink);
    PAIR_REFUSED(7, "item", 3, "photo", source, branch, a, make, b, make, merge, next, sink);
    PAIR_REFUSED(5, "photo", 2, "item", source, branch, a, b, merge, looks, sink);
    PAIR_REFUSED(1, "item", 0, "photo", photos, next, sink);
    DONE(start(0, NULL, SPDL_STAGES(photos, looks, sink)));
    DONE(start(0, NULL, SPDL_STAGES(source, branch, a, make, b, make, merge, looks, sink)));
}

static void rows_in_place_have_lines_too(void) {
    spdl_error error;
    spdl_pipeline_desc desc = { .error = &error };
    spdl_pipeline *p;
    char text[SPDL_TEXT_BYTES];
    const int line = __LINE__ + 4;
    desc.logger.log_fn = log_nothing;
    CHECK_EQ(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
                 SPDL_SOURCE(count_up),
                 SPDL_BATCH(3),
                 SPDL_PIPE(follow),
                 SPDL_SINK(3))), SPDL_E_TYPE);
    snprintf(text, sizeof text,
             "%s:%d: stage 2 'follow' takes 'item *' but stage 1 'batch' (%s:%d) yields "
             "'spdl_batch *'",
             __FILE__, line + 1, __FILE__, line);
    CHECK_STR(error.text, text);
    CHECK_EQ(error.stage, 2);
    CHECK_STR(error.stage_name, "follow");
}

SPDL_FN(only_looks, const item, item) { return in->value >= 0 ? SPDL_SKIP : SPDL_OK; }

static void a_stage_may_promise_not_to_change_its_input(void) {
    RUN(START(1, COUNT_TO(3), SPDL_PIPE(only_looks), SPDL_SINK(1)), "", SPDL_END);
}

static void void_fits_anything(void) {
    RUN(START(1, COUNT_TO(3), SPDL_PIPE(to_photo), SPDL_PIPE(count_photos), SPDL_PIPE(follow),
              SPDL_BATCH(2), SPDL_PIPE(from_any), SPDL_SINK(1)),
        "", SPDL_END);
}

TEST_TABLE(rows) {
    TEST_CASE(rows_stand_in_order),
    TEST_CASE(the_number_of_rows_has_limits),
    TEST_CASE(numbers_have_limits),
    TEST_CASE(functions_have_to_fit_their_row),
    TEST_CASE(the_sink_has_its_own_buffer_size),
    TEST_CASE(the_desc_is_checked),
    TEST_CASE(fields_belong_to_kinds_of_rows),
    TEST_CASE(the_last_edge_is_that_of_the_sink),
    TEST_CASE(numbers_of_newer_fields_have_limits),
    TEST_CASE(merges_know_where_they_are),
    TEST_CASE(merges_have_an_order),
    TEST_CASE(branches_have_paths_and_an_end),
    TEST_CASE(paths_of_a_merge_in_order_keep_the_count),
    TEST_CASE(a_feed_comes_first_and_is_read),
    TEST_CASE(types_have_to_fit),
    TEST_CASE(a_const_can_be_added),
    TEST_CASE(a_source_takes_nothing),
    TEST_CASE(what_is_merged_is_of_one_type),
    TEST_CASE(what_is_merged_may_be_const),
    TEST_CASE(rows_made_by_hand),
    TEST_CASE(a_merge_in_a_path_has_a_type),
    TEST_CASE(const_void_is_void),
    TEST_CASE(types_have_to_fit_through_branches),
    TEST_CASE(rows_in_place_have_lines_too),
    TEST_CASE(a_stage_may_promise_not_to_change_its_input),
    TEST_CASE(void_fits_anything),
    TEST_END,
};
