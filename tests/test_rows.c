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
    CHECK_STR(logged, text);
}

static const spdl_pipeline_desc plain;

/* The row'th row is refused, with its place, its name and this reason. */
static void row_refused(const spdl_stage *rows, size_t count, int row, const char *name,
                        const char *why) {
    char text[SPDL_TEXT_BYTES];
    spdl_error error;
    spdl_pipeline *p = NULL;
    spdl_pipeline_desc desc = plain;
    const spdl_stage *at = &rows[row];
    snprintf(text, sizeof text, "spdl: %s:%d: stage %d '%s': %s", at->file ? at->file : __FILE__,
             at->line, row, name, why);
    refused(plain, rows, count, SPDL_E_INVALID, text);
    desc.error = &error;
    desc.logger.log_fn = log_keeps;
    CHECK_EQ(spdl_pipeline_create(&p, &desc, rows, count), SPDL_E_INVALID);
    CHECK_EQ(error.stage, row);
    CHECK_STR(error.stage_name, name);
}

#define ROW_REFUSED(row, name, why, ...) row_refused(SPDL_STAGES(__VA_ARGS__), (row), (name), (why))

static void rows_stand_in_order(void) {
    const spdl_stage pipe = SPDL_PIPE(follow);
    const spdl_stage source = SPDL_SOURCE(count_up), sink = SPDL_SINK(3);
    ROW_REFUSED(0, "follow", "the first row must be SPDL_SOURCE or SPDL_FEED", pipe, sink);
    ROW_REFUSED(0, "sink", "the first row must be SPDL_SOURCE or SPDL_FEED", sink, source);
    ROW_REFUSED(1, "count_up", "only the first row may be SPDL_SOURCE", source, source, sink);
    ROW_REFUSED(1, "follow", "the last row must be SPDL_SINK", source, pipe);
    ROW_REFUSED(1, "sink", "only the last row may be SPDL_SINK", source, sink, sink);
    ROW_REFUSED(1, "sink", "only the last row may be SPDL_SINK", source, sink, pipe, sink);
}

static void the_number_of_rows_has_limits(void) {
    spdl_stage rows[SPDL_MAX_STAGES + 2] = { SPDL_SOURCE(count_up) };
    for (int i = 1; i < SPDL_MAX_STAGES + 1; ++i) rows[i] = (spdl_stage)SPDL_PIPE(follow);
    rows[SPDL_MAX_STAGES + 1] = (spdl_stage)SPDL_SINK(3);
    refused(plain, SPDL_TABLE(rows), SPDL_E_INVALID,
            "spdl: pipeline: too many stages: 34 rows, at most 32 and a sink");
    refused(plain, rows, SIZE_MAX, SPDL_E_INVALID,
            "spdl: pipeline: too many stages: 32767 rows, at most 32 and a sink");
    row_refused(rows, 1, 0, "count_up", "the only row; a source and a sink are the least");
    refused(plain, rows, 0, SPDL_E_INVALID,
            "spdl: pipeline: no rows; a source and a sink are the least");
    refused(plain, NULL, 5, SPDL_E_INVALID,
            "spdl: pipeline: no rows; a source and a sink are the least");
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
    PIPE_REFUSED("concurrency is -1, must be 1 to 4096", .concurrency = -1);
    PIPE_REFUSED("concurrency is 4097, must be 1 to 4096", .concurrency = 4097);
    PIPE_REFUSED("buffer_size is -1, must be 1 to 1048576", .buffer_size = -1);
    PIPE_REFUSED("buffer_size is 1048577, must be 1 to 1048576", .buffer_size = 1048577);
    PIPE_REFUSED("max_failures is -2, must be at least -1", .max_failures = -2);
    PIPE_REFUSED("max_failure_rate is -0.1, must be in (0, 1]", .max_failure_rate = -0.1);
    PIPE_REFUSED("max_failure_rate is 1.5, must be in (0, 1]", .max_failure_rate = 1.5);
    PIPE_REFUSED("size is set, but has no meaning on this kind of row", .size = 3);
    PIPE_REFUSED("drop_last is set, but has no meaning on this kind of row", .drop_last = true);
    PIPE_REFUSED("max_failures and max_failure_rate are both set", .max_failures = 1,
                 .max_failure_rate = 0.5);
    PIPE_REFUSED("output_order is 2, which is no order", .output_order = (spdl_order)2);
    BATCH_REFUSED("size is 0, must be at least 1", 0);
    BATCH_REFUSED("size is -3, must be at least 1", -3);
    BATCH_REFUSED("size is 16777217, must be at most 16777216", (1 << 24) + 1);
    BATCH_REFUSED("concurrency is 2, but only SPDL_PIPE rows have one", 3, .concurrency = 2);
    BATCH_REFUSED("max_failures is set, but has no meaning on this kind of row", 3,
                  .max_failures = 1);
    BATCH_REFUSED("output_order is set, but has no meaning on this kind of row", 3,
                  .output_order = SPDL_ORDER_COMPLETION);
}

static void a_rate_that_is_no_number_is_refused(void) {
    const spdl_stage rows[] = {
        SPDL_SOURCE(count_up),
        SPDL_PIPE(follow, .max_failure_rate = strtod("nan", NULL)),
        SPDL_SINK(3),
    };
    spdl_pipeline_desc desc = { 0 };
    spdl_pipeline *p = NULL;
    desc.logger.log_fn = log_keeps;
    CHECK_EQ(spdl_pipeline_create(&p, &desc, SPDL_TABLE(rows)), SPDL_E_INVALID);
    CHECK(strstr(logged, "max_failure_rate") != NULL);
}

static void functions_have_to_fit_their_row(void) {
    static const spdl_function empty = { NULL, "follow", "item", "item" };
    spdl_stage row = SPDL_PIPE(follow);
    row.fn = &empty;
    field_refused(row, "fn is NULL");
    row.fn = NULL;
    field_refused(row, "fn is NULL");
    row = (spdl_stage)SPDL_BATCH(3, .name = "batch");
    row.fn = &empty;
    field_refused(row, "fn is set, but this kind of row calls nothing");
    PIPE_REFUSED("fini is set without init", .fini = fini_nothing);
    BATCH_REFUSED("free_item is set, but a batch frees itself and its items", 3,
                  .free_item = item_free);
    BATCH_REFUSED("init and fini are for rows that call a function", 3, .init = init_nothing);
    row = (spdl_stage)SPDL_PIPE(follow);
    row.kind = (spdl_kind)9;
    field_refused(row, "kind is 9, which is no kind of row");
    row.kind = SPDL_KIND_NONE;
    field_refused(row, "kind is 0, which is no kind of row");
}

/* The edge behind the last stage is the sink's. */
static void the_sink_has_its_own_buffer_size(void) {
    ROW_REFUSED(1, "follow",
                "buffer_size is set, but SPDL_SINK sets that of the edge behind the last stage",
                SPDL_SOURCE(count_up), SPDL_PIPE(follow, .buffer_size = 3), SPDL_SINK(3));
    ROW_REFUSED(1, "sink", "buffer_size is -1, must be 1 to 1048576", SPDL_SOURCE(count_up),
                SPDL_SINK(-1));
}

static void the_desc_is_checked(void) {
    const spdl_stage rows[] = { SPDL_SOURCE(count_up), SPDL_SINK(3) };
    spdl_pipeline_desc desc = { .workers = -1 };
    spdl_pipeline *p = NULL;
    refused(desc, SPDL_TABLE(rows), SPDL_E_INVALID,
            "spdl: pipeline: workers is -1, must be 0 to 256");
    desc.workers = 257;
    refused(desc, SPDL_TABLE(rows), SPDL_E_INVALID,
            "spdl: pipeline: workers is 257, must be 0 to 256");
    desc.workers = 1;
    desc.pool = pool_of(1);
    refused(desc, SPDL_TABLE(rows), SPDL_E_INVALID,
            "spdl: pipeline: workers is 1, but pool is set: leave it 0");
    spdl_pool_destroy(desc.pool);
    desc = plain;
    desc.allocator.free_fn = free_nothing;
    refused(desc, SPDL_TABLE(rows), SPDL_E_INVALID,
            "spdl: pipeline: set both functions of the allocator or none");
    CHECK_EQ(spdl_pipeline_create(NULL, &plain, SPDL_TABLE(rows)), SPDL_E_INVALID);
    REQUIRE(spdl_pipeline_create(&p, NULL, SPDL_TABLE(rows)) == SPDL_OK);
    DONE(p);
}

/* --- types --- */

typedef struct photo photo;

SPDL_FN(to_photo, item, photo) { return SPDL_SKIP; }
SPDL_FN(count_photos, photo, void) { return SPDL_SKIP; }
SPDL_FN(from_any, void, item) { return SPDL_SKIP; }

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
             "spdl: %s:%d: stage 2 'follow' takes 'item *' but stage 1 'decode' (%s:%d) yields "
             "'photo *'",
             __FILE__, line, __FILE__, line - 1);
    refused(plain, SPDL_TABLE(rows), SPDL_E_TYPE, text);
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
             "spdl: %s:%d: stage 2 'follow' takes 'item *' but stage 1 'batch' (%s:%d) yields "
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
    TEST_CASE(a_rate_that_is_no_number_is_refused),
    TEST_CASE(functions_have_to_fit_their_row),
    TEST_CASE(the_sink_has_its_own_buffer_size),
    TEST_CASE(the_desc_is_checked),
    TEST_CASE(types_have_to_fit),
    TEST_CASE(rows_in_place_have_lines_too),
    TEST_CASE(a_stage_may_promise_not_to_change_its_input),
    TEST_CASE(void_fits_anything),
    TEST_END,
};
