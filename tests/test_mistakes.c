/* What a wrong program is told: the list of mistakes that newcomers make, each with its sentence.
   With SPDL_DEBUG, as the quickstart says. What does not compile is in tests/check_headers.sh, what
   C++ checks in tests/cpp.cpp. */
#define SPDL_DEBUG
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"

#include "test.h"

#include <math.h>

typedef struct A { int64_t a[3]; } A;
typedef struct B { int64_t b; } B;

/* --- what the log says --- */

typedef struct lines {
    int count; /* atomic */
    char text[8][SPDL_TEXT_BYTES + 1024];
} lines;

static lines said;

static void log_lines(spdl_log_level level, const char *text, void *user) {
    const int i = level == SPDL_LOG_INFO ? 8 : __atomic_fetch_add(&said.count, 1, __ATOMIC_RELAXED);
    (void)user;
    if (i < 8) snprintf(said.text[i], sizeof said.text[i], "%s", text);
    CHECK(strstr(text, "spdl: ") != text); /* that is added on stderr alone */
}

static void says(const char *text, const char *wanted) {
    if (!CHECK(strstr(text, wanted) != NULL))
        fprintf(stderr, "  '%s' lacks '%s'\n", text, wanted);
}

static size_t extra;

/* --- stages --- */

SPDL_FN(makes_a, void, A) {
    if (spdl_sequence(task) == 200) return SPDL_END;
    *out = (A *)calloc(1, sizeof **out);
    return SPDL_OK;
}
SPDL_FN(passes_a, A, A) {
    *out = in;
    return SPDL_OK;
}
SPDL_FN(passes_b, B, B) {
    *out = in;
    return SPDL_OK;
}
SPDL_FN(forgets, A, A) { return SPDL_OK; }
static A kept[8];
SPDL_FN(lists_a, void, A) {
    if (spdl_sequence(task) == 8) return SPDL_END;
    *out = &kept[spdl_sequence(task)];
    return SPDL_OK;
}
SPDL_FN(makes_index, void, spdl_index) { return SPDL_END; }
SPDL_FN(makes_path, void, char) { return SPDL_END; }
SPDL_FN(ends, A, A) { return SPDL_END; }
SPDL_FN(pends, A, A) { return SPDL_PENDING; }
static int own_number;
SPDL_FN(returns_a_number, A, A) { return (spdl_result)own_number; }
SPDL_FN(returns_true_at_once, void, A) { return (spdl_result)true; }
SPDL_FN(forgets_return, A, A) {
    const spdl_result ignored = spdl_fail(task, "value %d is odd", 7);
    (void)ignored;
    *out = in;
    return SPDL_OK;
}
static spdl_task *of_the_call;
SPDL_FN(keeps_the_task, A, A) {
    of_the_call = task;
    *out = in;
    return SPDL_OK;
}
SPDL_FN(fails, A, A) { return spdl_fail(task, "no good"); }
SPDL_FN(asks_for_a_buffer, A, A) {
    *out = (A *)spdl_buffer(task);
    return SPDL_OK;
}

static spdl_result created(spdl_pipeline **p, spdl_error *error, const spdl_pipeline_desc *as,
                           const spdl_stage *rows, size_t count) {
    spdl_pipeline_desc desc = *as;
    desc.logger.log_fn = log_lines;
    desc.error = error;
    said.count = 0;
    return spdl_pipeline_create(p, &desc, rows, count);
}

/* Create says it: in the error, or else in the log, once. */
static void refused(const spdl_pipeline_desc *as, const spdl_stage *rows, size_t count,
                    spdl_result result, const char *text) {
    spdl_pipeline *p;
    spdl_error error;
    CHECK_EQ(created(&p, &error, as, rows, count), result);
    says(error.text, text);
    CHECK_EQ(said.count, 0);
    CHECK_EQ(created(&p, NULL, as, rows, count), result);
    CHECK_STR(said.text[0], error.text);
    CHECK_EQ(said.count, 1);
}

#define WORKERS(n) (&(spdl_pipeline_desc){ .workers = (n) })
#define REFUSED(text, ...) refused(WORKERS(1), SPDL_STAGES(__VA_ARGS__), SPDL_E_INVALID, (text))

/* It runs, takes all, and is destroyed: how it ended. */
static spdl_result ran(char *text, const spdl_stage *rows, size_t count) {
    spdl_pipeline *p;
    spdl_result result;
    void *item;
    REQUIRE(created(&p, NULL, WORKERS(1), rows, count) == SPDL_OK);
    while ((result = spdl_pipeline_next(p, &item, SPDL_SECONDS(15))) == SPDL_OK) free(item);
    snprintf(text, SPDL_TEXT_BYTES, "%s", spdl_pipeline_error(p)->text);
    spdl_pipeline_destroy(p);
    return result;
}

/* A call fails with these words, in the error and the log. */
#define FAILS(result, words, ...)                                                                  \
    do {                                                                                           \
        char text_[SPDL_TEXT_BYTES];                                                               \
        CHECK_EQ(ran(text_, SPDL_STAGES(__VA_ARGS__)), (result));                                  \
        says(text_, (words));                                                                      \
        says(said.text[0], (words));                                                               \
    } while (0)

#define SOURCE SPDL_SOURCE(makes_a, .free_item = free)

/* --- what create refuses --- */

static void types_that_do_not_fit(void) {
    refused(WORKERS(1), SPDL_STAGES(SOURCE, SPDL_PIPE(passes_b), SPDL_SINK(1)), SPDL_E_TYPE,
            "takes 'B *' but stage 0 'makes_a'");
    refused(WORKERS(1), SPDL_STAGES(SOURCE, SPDL_BATCH_OF(B, 4), SPDL_SINK(1)), SPDL_E_TYPE,
            "stage 1 'batch' takes 'B *' but stage 0 'makes_a'");
    refused(WORKERS(1), SPDL_STAGES(SOURCE, SPDL_BATCH_OF(B, 4), SPDL_SINK(1)), SPDL_E_TYPE,
            "yields 'A *'");
}

struct tagged { int number; };
typedef struct tagged tagged;
SPDL_FN(makes_tagged, void, struct tagged) { return SPDL_END; }
SPDL_FN(takes_tagged, const tagged, void) { return SPDL_SKIP; }

/* "struct tagged" and "tagged" are one type. */
static void types_with_a_tag(void) {
    char text[SPDL_TEXT_BYTES];
    CHECK_EQ(ran(text, SPDL_STAGES(SPDL_SOURCE(makes_tagged), SPDL_PIPE(takes_tagged),
                                   SPDL_SINK(1))), SPDL_END);
    refused(WORKERS(1), SPDL_STAGES(SPDL_SOURCE(makes_tagged), SPDL_PIPE(passes_a), SPDL_SINK(1)),
            SPDL_E_TYPE, "takes 'A *' but stage 0 'makes_tagged'");
}

/* Items of another pipeline. */
static void types_of_another_pipeline(void) {
    spdl_pipeline *inner;
    spdl_error error;
    REQUIRE(created(&inner, &error, WORKERS(1), SPDL_STAGES(SOURCE, SPDL_BATCH(4), SPDL_SINK(1))) ==
            SPDL_OK);
    refused(WORKERS(1), SPDL_STAGES(SPDL_FROM(A, spdl_pipeline_next, inner), SPDL_SINK(1)),
            SPDL_E_TYPE, "stage 0 'from' is SPDL_FROM of 'A *', but that pipeline yields "
                         "'spdl_batch *'");
    spdl_pipeline_destroy(inner);
}

static void numbers_out_of_range(void) {
    spdl_pool_desc small = { .workers = 1 };
    spdl_pool *pool;
    REQUIRE(spdl_pool_create(&pool, &small) == SPDL_OK);
    REFUSED("concurrency is -2, must be 1 to", SOURCE, SPDL_PIPE(passes_a, .concurrency = -2),
            SPDL_SINK(1));
    REFUSED("flush is set, but concurrency is more than 1", SOURCE,
            SPDL_PIPE(passes_a, .concurrency = SPDL_ALL, .flush = true), SPDL_SINK(1));
    REFUSED("concurrency is set, but only pipe rows have it", SOURCE,
            SPDL_BATCH(2, .concurrency = SPDL_ALL), SPDL_SINK(1));
    REFUSED("size is 0, must be at least 1", SOURCE, SPDL_BATCH(0), SPDL_SINK(1));
    REFUSED("fn is NULL", SOURCE, { .kind = SPDL_KIND_PIPE }, SPDL_SINK(1));
    refused(WORKERS(1000), SPDL_STAGES(SOURCE, SPDL_SINK(1)), SPDL_E_INVALID,
            "workers is 1000, must be SPDL_INLINE or 0 to 256");
    refused(&(spdl_pipeline_desc){ .workers = 1, .pool = pool },
            SPDL_STAGES(SOURCE, SPDL_SINK(1)), SPDL_E_INVALID,
            "workers is 1, but pool is set: leave it 0");
    spdl_pool_destroy(pool);
}

#ifndef SPDL_NO_REPORT
static void seconds_out_of_range(void) {
    static const double every[] = { -3, NAN, 1e-9, INFINITY }, seconds[] = { -1, NAN, 2e9 };
    size_t i;
    for (i = 0; i < sizeof every / sizeof every[0]; ++i) {
        const spdl_report_desc report = { .every = every[i], .table = true };
        refused(&(spdl_pipeline_desc){ .workers = 1, .report = &report },
                SPDL_STAGES(SOURCE, SPDL_SINK(1)), SPDL_E_INVALID, ", must be 0.01 to 1e+07");
    }
    for (i = 0; i < sizeof seconds / sizeof seconds[0]; ++i) {
        const spdl_doctor_desc doctor = { .seconds = seconds[i], .quiet = true };
        refused(&(spdl_pipeline_desc){ .workers = 1, .doctor = &doctor },
                SPDL_STAGES(SOURCE, SPDL_SINK(1)), SPDL_E_INVALID, ", must be 0 to 1e9");
    }
}
#endif

static void rows_in_the_wrong_place(void) {
    REFUSED("the last row must be SPDL_SINK", SOURCE, SPDL_PIPE(passes_a));
    REFUSED("the first row must be SPDL_SOURCE", SPDL_PIPE(passes_a), SPDL_SINK(1));
    REFUSED("only the last row may be SPDL_SINK", SOURCE, SPDL_SINK(1), SPDL_PIPE(passes_a));
    REFUSED("SPDL_SINK(0): write how many results can wait, such as SPDL_SINK(3)", SOURCE,
            SPDL_SINK(0));
}

static void fields_in_the_wrong_place(void) {
    REFUSED("size is set, but only batch rows have it", SOURCE,
            { .kind = SPDL_KIND_PIPE, .fn = &passes_a_is_no_SPDL_FN, .size = 4 }, SPDL_SINK(1));
    REFUSED("SPDL_SINK has the buffer_size of the last stage: write SPDL_SINK(8)", SOURCE,
            SPDL_PIPE(passes_a, .buffer_size = 8), SPDL_SINK(1));
    refused(&(spdl_pipeline_desc){ .deliver_failures = true },
            SPDL_STAGES(SOURCE, SPDL_SINK(1)), SPDL_E_INVALID,
            "deliver_failures of the desc is for pipelines that begin with SPDL_FEED");
}

/* The compiler warns of it, too: an integer is where a pointer to spdl__write_dot_... should be. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wint-conversion"
static void values_without_a_field(void) {
    static const char words[] = "a value has no field: write .concurrency = 4";
    spdl_files *files = (spdl_files *)&extra;
    REFUSED(words, SOURCE, SPDL_PIPE(passes_a, 4), SPDL_SINK(1));
    REFUSED(words, SOURCE, SPDL_BATCH(4, 8), SPDL_SINK(1));
    REFUSED(words, SOURCE, SPDL_BATCH_OF(A, 4, 8), SPDL_SINK(1));
    REFUSED(words, SPDL_FILES(files, 8), SPDL_SINK(1));
    REFUSED(words, SPDL_INDEX(files, 8), SPDL_SINK(1));
    REFUSED(words, SPDL_SOURCE(makes_path), SPDL_READ(8), SPDL_SINK(1));
}
#pragma GCC diagnostic pop

static void rows_that_read_from_nothing(void) {
    static const char words[] = "its first argument is NULL";
    REFUSED(words, SPDL_FILES(NULL), SPDL_SINK(1));
    REFUSED(words, SPDL_INDEX(NULL), SPDL_SINK(1));
    REFUSED(words, SPDL_SOURCE(makes_index), SPDL_FILES_AT(NULL), SPDL_SINK(1));
    REFUSED("next is NULL", SPDL_FROM(A, NULL, &extra), SPDL_SINK(1));
}

static void a_count_below_zero(void) {
    REFUSED("SPDL_COUNT of a negative number", SPDL_COUNT(-1), SPDL_SINK(1));
    REFUSED("SPDL_COUNT of a negative number", SPDL_COUNT(SIZE_MAX / 2 + 1), SPDL_SINK(1));
}

/* A record in a batch in place would have lost its data. */
static void records_in_place(void) {
    REFUSED("item_bytes is set, but a spdl_record of stage 1 'read' only points to its data",
            SPDL_SOURCE(makes_path), SPDL_READ(), SPDL_BATCH(4, .item_bytes = sizeof(spdl_record)),
            SPDL_SINK(1));
}

static void a_sampler_of_nothing(void) {
    spdl_error error;
    spdl_sampler_desc desc = { .seed = 1, .error = &error };
    spdl_sampler *sampler;
    CHECK_EQ(spdl_sampler_create(&sampler, &desc), SPDL_E_INVALID);
    says(error.text, "count is 0, must be the number of items");
}

/* --- what is said while it runs --- */

static void results_that_are_none(void) {
    FAILS(SPDL_E_STAGE, "item 0: returned SPDL_END, which only a source may", SOURCE,
          SPDL_PIPE(ends), SPDL_SINK(1));
    FAILS(SPDL_E_STAGE, "returned SPDL_PENDING without .deferred in its row", SOURCE,
          SPDL_PIPE(pends), SPDL_SINK(1));
    /* also those of `return errno`, `return true` and `return -1` */
    for (own_number = -3; own_number < 134; own_number += own_number == -1 ? 2 : 1) {
        char words[80];
        snprintf(words, sizeof words, "returned %d, which is not a result of a stage function",
                 own_number);
        FAILS(own_number < 0 ? (spdl_result)own_number : SPDL_E_STAGE, words, SOURCE,
              SPDL_PIPE(returns_a_number), SPDL_SINK(1));
    }
    FAILS(SPDL_E_STAGE, "returned 1, which is not a result of a stage function",
          SPDL_SOURCE(returns_true_at_once), SPDL_SINK(1));
}

/* With SPDL_DEBUG: `return` is missing before spdl_fail. */
static void a_reason_without_a_failure(void) {
    FAILS(SPDL_E_INVALID, "item 0: recorded a reason and returned SPDL_OK: value 7 is odd", SOURCE,
          SPDL_PIPE(forgets_return), SPDL_SINK(1));
}

static void a_source_without_items(void) {
    char text[SPDL_TEXT_BYTES];
    CHECK_EQ(ran(text, SPDL_STAGES(SPDL_SOURCE(makes_index), SPDL_SINK(1))), SPDL_END);
    CHECK_EQ(said.count, 1);
    says(said.text[0], "stage 0 'makes_index' ended without an item, in epoch 0");
}

/* Every function of a task says that its call is over. */
static void a_task_after_its_call(void) {
    static const char *const names[] = { "spdl_ctx", "spdl_local", "spdl_sequence", "spdl_epoch",
                                         "spdl_stopping", "spdl_flushing", "spdl_item_key",
                                         "spdl_stop" };
    spdl_pipeline *p;
    spdl_error error;
    A *a;
    REQUIRE(created(&p, &error, WORKERS(1),
                    SPDL_STAGES(SPDL_SOURCE(lists_a), SPDL_PIPE(keeps_the_task), SPDL_SINK(8))) ==
            SPDL_OK);
    while (SPDL_NEXT(p, &a, SPDL_SECONDS(15)) == SPDL_OK) {}
    CHECK_EQ(said.count, 0);
    (void)spdl_ctx(of_the_call);
    (void)spdl_local(of_the_call);
    (void)spdl_sequence(of_the_call);
    (void)spdl_epoch(of_the_call);
    (void)spdl_stopping(of_the_call);
    (void)spdl_flushing(of_the_call);
    (void)spdl_item_key(of_the_call);
    spdl_stop(of_the_call);
    for (int i = 0; i < 8; ++i) {
        char words[80];
        snprintf(words, sizeof words, "%s: not inside of a call of this stage", names[i]);
        says(said.text[i], words);
    }
    spdl_pipeline_destroy(p);
}

/* Also when nobody asks spdl_pipeline_failed. */
static void a_failure_is_in_the_log(void) {
    FAILS(SPDL_E_STAGE, "stage 1 'fails', item 0: no good", SOURCE, SPDL_PIPE(fails),
          SPDL_SINK(1));
    CHECK_EQ(said.count, 1);
}

static void what_was_forgotten(void) {
    char text[SPDL_TEXT_BYTES];
    CHECK_EQ(ran(text, SPDL_STAGES(SOURCE, SPDL_PIPE(forgets), SPDL_SINK(1))), SPDL_END);
    CHECK_EQ(said.count, 1);
    says(said.text[0], "stage 1 'forgets' has returned only NULL (100 times): is *out set?");
    CHECK_EQ(ran(text, SPDL_STAGES(SOURCE, SPDL_PIPE(forgets, .free_item = free), SPDL_SINK(1))),
             SPDL_END);
    CHECK_EQ(said.count, 1);
    says(said.text[0], "stage 1 'forgets' has returned only NULL (1 times): is *out set?");
    FAILS(SPDL_E_INVALID, "spdl_buffer in a stage without .item_bytes", SOURCE,
          SPDL_PIPE(asks_for_a_buffer), SPDL_SINK(1));
}

/* The reservoir of HOWTO.md: what it holds is freed, and is no leak, at a stop, a rewind and at
   destroy in mid-epoch, also in the middle of its series. */
typedef struct reservoir {
    A *kept[32];
    int count;
} reservoir;

static int made, freed; /* atomic */
static void counted_free(void *a) {
    __atomic_add_fetch(&freed, 1, __ATOMIC_RELAXED);
    free(a);
}
SPDL_FN(makes_counted, void, A) {
    if (spdl_sequence(task) == 100) return SPDL_END;
    *out = (A *)calloc(1, sizeof **out);
    (*out)->a[0] = (int64_t)spdl_sequence(task);
    __atomic_add_fetch(&made, 1, __ATOMIC_RELAXED);
    return SPDL_OK;
}
SPDL_FN(shuffles_a, A, A) {
    reservoir *r = (reservoir *)spdl_ctx(task);
    const bool last = spdl_flushing(task);
    if (!last) spdl_take(task);
    if (!last && r->count < 32) {
        r->kept[r->count++] = in;
        return SPDL_SKIP;
    }
    if (r->count == 0) return SPDL_SKIP;
    const uint64_t k = spdl_item_key(task) % (uint64_t)r->count;
    *out = r->kept[k];
    r->kept[k] = last ? r->kept[--r->count] : in;
    return last ? SPDL_AGAIN : SPDL_OK;
}

static void what_a_reservoir_holds_is_no_leak(void) {
    for (int i = 0; i < 12; ++i) {
        const int way = i % 3, taken = i / 3 % 2 ? 20 : 80, workers = i < 6 ? 0 : 2;
        reservoir r = { .count = 0 };
        spdl_pipeline *p;
        spdl_error error;
        A *a;
        made = freed = 0;
        REQUIRE(created(&p, &error, WORKERS(TEST_WORKERS(workers)),
                        SPDL_STAGES(SPDL_SOURCE(makes_counted, .free_item = counted_free),
                                    SPDL_PIPE(shuffles_a, .ctx = &r, .flush = true, .again = true,
                                              .free_item = counted_free), SPDL_SINK(3))) ==
                SPDL_OK);
        for (int k = 0; k < taken; ++k) {
            REQUIRE(SPDL_NEXT(p, &a, SPDL_SECONDS(15)) == SPDL_OK);
            counted_free(a);
        }
        if (way == 1) CHECK_EQ(spdl_pipeline_stop(p, SPDL_SECONDS(15)), SPDL_OK);
        if (way == 2) {
            int left = 0, seen[100] = { 0 };
            CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_SECONDS(15)), SPDL_OK);
            for (; SPDL_NEXT(p, &a, SPDL_SECONDS(15)) == SPDL_OK; ++left) {
                ++seen[a->a[0]];
                counted_free(a);
            }
            CHECK_EQ(left, 100);
            for (int k = 0; k < 100; ++k) CHECK_EQ(seen[k], 1);
        }
        spdl_pipeline_destroy(p);
        CHECK_EQ(made, freed);
        CHECK_EQ(said.count, 0);
    }
}

SPDL_FN(drops_all, A, A) { return SPDL_SKIP; }

SPDL_FN(drops_batches, spdl_batch, void) { return SPDL_SKIP; }


static void a_free_item_that_is_not_there(void) {
    char text[SPDL_TEXT_BYTES];
    CHECK_EQ(ran(text, SPDL_STAGES(SPDL_SOURCE(lists_a), SPDL_PIPE(drops_all), SPDL_SINK(1))),
             SPDL_END);
    says(said.text[0], "stage 0 'lists_a' leaked 8 items: write .free_item in its row");
    CHECK_EQ(ran(text, SPDL_STAGES(SPDL_SOURCE(lists_a), SPDL_PIPE(forgets), SPDL_SINK(1))),
             SPDL_END); /* also when it ends before the hundredth */
    says(said.text[1], "stage 1 'forgets' has returned only NULL (8 times): is *out set?");
}

SPDL_FN(drops_paths, char, void) { return SPDL_SKIP; }

/* Paths belong to the list. */
static void items_that_need_no_free(void) {
    char text[SPDL_TEXT_BYTES], folder[256], path[300];
    spdl_files *files;
    FILE *file;
    test_folder(folder, sizeof folder);
    snprintf(path, sizeof path, "%s/a", folder);
    REQUIRE((file = fopen(path, "wb")) != NULL);
    fclose(file);
    REQUIRE(spdl_files_open(&files, folder, NULL) == SPDL_OK);
    CHECK_EQ(ran(text, SPDL_STAGES(SPDL_FILES(files), SPDL_PIPE(drops_paths), SPDL_SINK(1))),
             SPDL_END);
    CHECK_EQ(said.count, 0);
    spdl_files_close(files);
    test_folder_remove(folder);
}

SPDL_FN(writes_too_much, void, A) {
    if (spdl_sequence(task) == 8) return SPDL_END;
    *out = (A *)spdl_buffer(task);
    memset((void *)*out, 7, sizeof(A) + (spdl_sequence(task) == 5 ? extra : 0));
    return SPDL_OK;
}

/* In a buffer of one's own, and in a batch in place: the row and the item are named. */
static void an_item_larger_than_its_place(void) {
    char text[SPDL_TEXT_BYTES];
    for (extra = 0; extra < 3; ++extra) {
        static const char *const words = "item 5: wrote more than the 24 bytes that spdl_buffer "
                                         "gave: .item_bytes is too small";
        const spdl_stage own[] = {
            SPDL_SOURCE(writes_too_much, .item_bytes = sizeof(A)), SPDL_PIPE(drops_all),
            SPDL_SINK(1),
        };
        const spdl_stage batch[] = {
            SPDL_SOURCE(writes_too_much), SPDL_BATCH_OF(A, 4), SPDL_PIPE(drops_batches),
            SPDL_SINK(1),
        };
        CHECK_EQ(ran(text, SPDL_TABLE(own)), extra == 0 ? SPDL_END : SPDL_E_INVALID);
        says(text, extra == 0 ? "" : words);
        CHECK_EQ(ran(text, SPDL_TABLE(batch)), extra == 0 ? SPDL_END : SPDL_E_INVALID);
        says(text, extra == 0 ? "" : "stage 0 'writes_too_much', item 5: wrote more than");
    }
}

static void items_of_a_batch_in_place_stay(void) {
    FAILS(SPDL_E_INVALID, "the items of a batch in place (.item_bytes) cannot leave it", SOURCE,
          SPDL_BATCH_OF(A, 4), SPDL_UNBATCH(), SPDL_SINK(1));
}

/* --- threads --- */

static spdl_pipeline *shared;

SPDL_FN(destroys, A, A) {
    spdl_pipeline_destroy(shared);
    *out = in;
    return SPDL_OK;
}

static void destroy_in_a_stage(void) {
    void *item;
    REQUIRE(created(&shared, NULL, WORKERS(1), SPDL_STAGES(SOURCE, SPDL_PIPE(destroys),
                                                           SPDL_SINK(1))) == SPDL_OK);
    REQUIRE(spdl_pipeline_next(shared, &item, SPDL_SECONDS(15)) == SPDL_OK);
    free(item);
    spdl_pipeline_destroy(shared);
    says(said.text[0], "spdl_pipeline_destroy: called on a worker of its pool, nothing was done");
}

static void *waits_in_next(void *arg) {
    void *item;
    CHECK_EQ(spdl_pipeline_next((spdl_pipeline *)arg, &item, SPDL_FOREVER), SPDL_CLOSED);
    return NULL;
}

static void *waits_in_push(void *arg) {
    CHECK_EQ(spdl_pipeline_push((spdl_pipeline *)arg, kept, SPDL_FOREVER), SPDL_CLOSED);
    return NULL;
}

/* A second consumer, and a second producer: their loops end, and the log says why, once. */
static void two_threads_at_one_end(void) {
    for (int push = 0; push < 2; ++push) {
        static const char *const name[] = { "spdl_pipeline_next", "spdl_pipeline_push" };
        spdl_result result = SPDL_OK;
        spdl_pipeline *p;
        test_thread thread;
        void *item;
        char text[64];
        REQUIRE(created(&p, NULL, WORKERS(push ? SPDL_INLINE : 1),
                        SPDL_STAGES(SPDL_FEED(A, .buffer_size = 1), SPDL_PIPE(passes_a),
                                    SPDL_SINK(1))) == SPDL_OK);
        if (push) CHECK_EQ(spdl_pipeline_push(p, kept, 0), SPDL_OK); /* it is full */
        REQUIRE(test_thread_start(&thread, push ? waits_in_push : waits_in_next, p));
        while (result != SPDL_E_INVALID) {
            test_sleep_us(1000);
            result = push ? spdl_pipeline_push(p, kept, 0) : spdl_pipeline_next(p, &item, 0);
        }
        snprintf(text, sizeof text, "%s: another thread is inside", name[push]);
        CHECK_STR(said.text[0], text);
        CHECK_EQ(said.count, 1);
        for (int i = 0; i < 100; ++i) /* no line for each */
            CHECK_EQ(push ? spdl_pipeline_push(p, kept, 0) : spdl_pipeline_next(p, &item, 0),
                     SPDL_E_INVALID);
        CHECK_EQ(said.count, 1);
        CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        test_join(thread);
        spdl_pipeline_destroy(p);
        says(said.text[said.count - 1], "100 more calls were refused for the reasons above");
    }
}

/* On the thread of the consumer, and on a worker while the consumer is outside. */
static spdl_pipeline *of_the_stage;

SPDL_FN(peek, A, A) {
    A *other;
    CHECK_EQ(SPDL_NEXT(of_the_stage, &other, SPDL_SECONDS(15)), SPDL_E_INVALID);
    *out = in;
    return SPDL_OK;
}

static void next_in_a_stage_of_its_own(void) {
    for (int workers = 0; workers < 3; ++workers) {
        A *a;
        REQUIRE(created(&of_the_stage, NULL, WORKERS(TEST_WORKERS(workers)),
                        SPDL_STAGES(SPDL_FEED(A), SPDL_PIPE(peek), SPDL_SINK(1))) == SPDL_OK);
        CHECK_EQ(spdl_pipeline_push(of_the_stage, kept, 0), SPDL_OK);
        while (workers > 0 && __atomic_load_n(&said.count, __ATOMIC_ACQUIRE) == 0)
            test_sleep_us(100);
        CHECK_EQ(SPDL_NEXT(of_the_stage, &a, SPDL_SECONDS(15)), SPDL_OK);
        CHECK_STR(said.text[0], "spdl_pipeline_next: called in stage 1 'peek' of its own pipeline");
        CHECK_EQ(said.count, 1);
        spdl_pipeline_destroy(of_the_stage);
    }
}

/* Milliseconds for nanoseconds. A program that polls is right. */
static void timeouts_in_a_row(void) {
    for (int64_t timeout_ns = 0; timeout_ns < 2; ++timeout_ns) {
        spdl_pipeline *p;
        void *item;
        REQUIRE(created(&p, NULL, WORKERS(1), SPDL_STAGES(SPDL_FEED(A), SPDL_PIPE(passes_a),
                                                          SPDL_SINK(1))) == SPDL_OK);
        for (int i = 0; i < 99; ++i)
            CHECK_EQ(spdl_pipeline_next(p, &item, timeout_ns), SPDL_TIMEOUT);
        CHECK_EQ(said.count, 0);
        for (int i = 0; i < 300; ++i)
            CHECK_EQ(spdl_pipeline_next(p, &item, timeout_ns), SPDL_TIMEOUT);
        CHECK_EQ(said.count, timeout_ns);
        if (timeout_ns > 0)
            CHECK_STR(said.text[0], "spdl_pipeline_next has returned SPDL_TIMEOUT 100 times in a "
                                    "row. Timeouts are nanoseconds: write SPDL_SECONDS(0.1)");
        spdl_pipeline_destroy(p);
    }
}

static void a_push_without_a_feed(void) {
    spdl_pipeline *p;
    REQUIRE(created(&p, NULL, WORKERS(1), SPDL_STAGES(SOURCE, SPDL_SINK(1))) == SPDL_OK);
    for (int i = 0; i < 3; ++i) CHECK_EQ(spdl_pipeline_push(p, kept, 0), SPDL_E_INVALID);
    CHECK_EQ(spdl_pipeline_push_end(p), SPDL_E_INVALID);
    CHECK_EQ(said.count, 2);
    CHECK_STR(said.text[0], "spdl_pipeline_push: the first row is no SPDL_FEED");
    CHECK_STR(said.text[1], "spdl_pipeline_push_end: the first row is no SPDL_FEED");
    spdl_pipeline_destroy(p);
}

/* In the child of a fork next and push end with a line where they would wait. */
static void next_in_a_forked_child(int64_t works_ns) {
    const spdl_pipeline_desc desc = { .workers = 1, .next_works_ns = works_ns };
    spdl_pipeline *p;
    REQUIRE(created(&p, NULL, &desc, SPDL_STAGES(SPDL_FEED(A, .buffer_size = 1),
                                                 SPDL_PIPE(passes_a), SPDL_SINK(1))) == SPDL_OK);
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        void *item;
        bool right = spdl_pipeline_next(p, &item, SPDL_FOREVER) == SPDL_E_INVALID &&
                     spdl_pipeline_next(p, &item, SPDL_FOREVER) == SPDL_E_INVALID;
        right = right && said.count == 1 &&
                strcmp(said.text[0], "spdl_pipeline_next: called in the child of a fork, which has "
                                     "no workers") == 0;
        _exit(right ? 0 : 1);
    }
    int status = 0;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    spdl_pipeline_destroy(p);
}

static void a_pipeline_in_a_forked_child(void) {
    TEST_NEEDS_FORKS();
    next_in_a_forked_child(0);
    next_in_a_forked_child(SPDL_FOREVER); /* in which next does not work either */
}

/* A stage that runs another pipeline on the pool that runs it. */
static spdl_pool *shared_pool;

SPDL_FN(nested, A, A) {
    const spdl_pipeline_desc desc = { .pool = shared_pool, .logger = { log_lines, NULL } };
    spdl_pipeline *inner;
    A *a;
    spdl_result result;
    int count = 0;
    REQUIRE(spdl_pipeline_create(&inner, &desc, SPDL_STAGES(SPDL_SOURCE(makes_a, .free_item = free),
                                                            SPDL_SINK(1))) == SPDL_OK);
    for (; (result = SPDL_NEXT(inner, &a, SPDL_FOREVER)) == SPDL_OK; ++count) free(a);
    /* it may not destroy on a worker of its pool: the test does */
    *(spdl_pipeline **)spdl_ctx(task) = inner;
    if (result != SPDL_END || count != 200) return spdl_fail(task, "%d of the inner", count);
    *out = in;
    return SPDL_OK;
}

SPDL_FN(one_a, void, A) {
    static A a;
    *out = &a;
    return spdl_sequence(task) == 1 ? SPDL_END : SPDL_OK;
}

static void next_on_a_worker_of_its_pool(void) {
    for (int workers = 1; workers < 3; ++workers) {
        const spdl_pool_desc pool_desc = { .workers = workers };
        spdl_pipeline *p, *inner = NULL;
        void *item;
        REQUIRE(spdl_pool_create(&shared_pool, &pool_desc) == SPDL_OK);
        REQUIRE(created(&p, NULL, &(spdl_pipeline_desc){ .pool = shared_pool },
                        SPDL_STAGES(SPDL_SOURCE(one_a), SPDL_PIPE(nested, .ctx = &inner),
                                    SPDL_SINK(1))) == SPDL_OK);
        CHECK_EQ(spdl_pipeline_next(p, &item, SPDL_FOREVER),
                 workers == 1 ? SPDL_E_STAGE : SPDL_OK);
        if (workers == 1)
            CHECK_STR(said.text[0], "spdl_pipeline_next: called on the last free worker of the "
                                    "pipeline's own pool, where it would wait for ever");
        else
            CHECK_EQ(said.count, 0);
        spdl_pipeline_destroy(p);
        spdl_pipeline_destroy(inner);
        spdl_pool_destroy(shared_pool);
    }
}

/* Takes from another pipeline on the pool that runs it. */
SPDL_FN(takes_inner, A, A) {
    spdl_pipeline *inner = (spdl_pipeline *)spdl_ctx(task);
    void *item;
    CHECK_EQ(spdl_pipeline_next(inner, &item, SPDL_SECONDS(5)), SPDL_E_INVALID);
    *out = in;
    return SPDL_OK;
}

/* The thread waits in next, and later is a guest whose call does. */
static void next_of_a_guest_that_was_none(void) {
    const spdl_pool_desc pool_desc = { .guests = 1 };
    spdl_pipeline *p, *inner;
    void *item;
    REQUIRE(spdl_pool_create(&shared_pool, &pool_desc) == SPDL_OK);
    const spdl_pipeline_desc desc = { .pool = shared_pool, .logger = { log_lines, NULL } };
    REQUIRE(created(&inner, NULL, &desc,
                    SPDL_STAGES(SPDL_FEED(A), SPDL_PIPE(passes_a), SPDL_SINK(1))) == SPDL_OK);
    CHECK_EQ(spdl_pipeline_next(inner, &item, 1000), SPDL_TIMEOUT);
    REQUIRE(created(&p, NULL, &desc,
                    SPDL_STAGES(SPDL_SOURCE(one_a), SPDL_PIPE(takes_inner, .ctx = inner),
                                SPDL_SINK(1))) == SPDL_OK);
    said.count = 0;
    CHECK_EQ(spdl_pool_run(shared_pool, SPDL_FOREVER), SPDL_EMPTY);
    CHECK_EQ(said.count, 1);
    CHECK_STR(said.text[0], "spdl_pipeline_next: called on the last free worker of the pipeline's "
                            "own pool, where it would wait for ever");
    spdl_pipeline_destroy(p);
    spdl_pipeline_destroy(inner);
    spdl_pool_destroy(shared_pool);
}

/* --- types --- */

SPDL_FN(makes_int, void, int) {
    if (spdl_sequence(task) == 4 || (*out = (int *)calloc(1, sizeof **out)) == NULL)
        return SPDL_END;
    return SPDL_OK;
}
SPDL_FN(makes_const, void, const int) {
    static const int seven = 7;
    *out = &seven;
    return spdl_sequence(task) == 4 ? SPDL_END : SPDL_OK;
}

static spdl_pipeline *makes_ints(bool batches) {
    const spdl_pipeline_desc desc = { .logger = { log_lines, NULL } };
    spdl_pipeline *p = NULL;
    said.count = 0;
    if (batches)
        CHECK(spdl_pipeline_create(&p, &desc, SPDL_STAGES(SPDL_SOURCE(makes_int,
                                      .free_item = free), SPDL_BATCH(2), SPDL_SINK(2))) == SPDL_OK);
    else
        CHECK(spdl_pipeline_create(&p, &desc, SPDL_STAGES(SPDL_SOURCE(makes_int,
                                      .free_item = free), SPDL_SINK(2))) == SPDL_OK);
    return p;
}

/* SPDL_NEXT in C refuses a pair of types that no typedef can make equal, and loses no item. */
static void next_into_another_type(void) {
    spdl_pipeline *p = makes_ints(true);
    A *a = NULL;
    int *n = NULL;
    const spdl_batch *batch = NULL;
    CHECK_EQ(SPDL_NEXT(NULL, &a, 0), SPDL_E_INVALID);
    CHECK_EQ(SPDL_NEXT(p, &a, 0), SPDL_E_TYPE);
    says(said.text[0], "SPDL_NEXT into a pointer of another type, but stage 1 'batch' yields "
                       "'spdl_batch *'");
    says(spdl_pipeline_error(p)->text, "another type");
    CHECK_EQ(SPDL_NEXT(p, &n, 0), SPDL_E_TYPE);
    says(said.text[1], "SPDL_NEXT into a 'int *', but stage 1 'batch' yields 'spdl_batch *'");
    CHECK(SPDL_NEXT(p, &batch, SPDL_FOREVER) == SPDL_OK);
    CHECK(batch->count == 2 && batch->sequence == 0);
    spdl_batch_free((spdl_batch *)(uintptr_t)batch);
    spdl_pipeline_destroy(p);
    p = makes_ints(false);
    {
        spdl_batch *wrong = NULL;
        double *other = NULL;
        void *item = NULL;
        CHECK_EQ(SPDL_NEXT(p, &wrong, 0), SPDL_E_TYPE);
        says(said.text[0], "SPDL_NEXT into a 'spdl_batch *', but stage 0 'makes_int' yields "
                           "'int *'");
        CHECK_EQ(SPDL_NEXT(p, &other, 0), SPDL_E_TYPE);
        CHECK(SPDL_NEXT(p, &item, SPDL_FOREVER) == SPDL_OK);
        free(item);
        CHECK(SPDL_NEXT(p, &n, SPDL_FOREVER) == SPDL_OK);
        free(n);
    }
    spdl_pipeline_destroy(p);
}

/* With .deliver_failures the input of each row may be returned, too. */
SPDL_FN(halves, int, double) { return SPDL_SKIP; }
static void next_into_the_type_of_no_failure(void) {
    const spdl_pipeline_desc desc = { .deliver_failures = true, .logger = { log_lines, NULL } };
    spdl_pipeline *p = NULL;
    double *half = NULL;
    void *any = NULL;
    said.count = 0;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(SPDL_FEED(int, .buffer_size = 2),
                                     SPDL_PIPE(halves, .free_item = free), SPDL_SINK(2))) ==
            SPDL_OK);
    CHECK_EQ(SPDL_NEXT(p, &half, 0), SPDL_E_TYPE);
    says(said.text[0], "SPDL_NEXT into a 'double *', but stage 1 'halves' may fail, and next "
                       "then returns its input: 'int *'");
    CHECK_EQ(SPDL_NEXT(p, &any, 0), SPDL_TIMEOUT);
    spdl_pipeline_destroy(p);
}

/* Rows without functions, and functions without types, give no input. */
SPDL_FN(by_sign, int, int) {
    *out = in;
    return spdl_route(task, *in < 0);
}
static void next_with_rows_of_no_type(void) {
    static const spdl_function untyped = { passes_a_spdl_call, "untyped", NULL, NULL, 0, 0 };
    const spdl_pipeline_desc desc = { .deliver_failures = true, .logger = { log_lines, NULL } };
    spdl_stage rows[] = { SPDL_FEED(int), SPDL_BRANCH(by_sign), SPDL_PATH("a"),
                          SPDL_PIPE(passes_a), SPDL_PATH("b"), SPDL_MERGE(), SPDL_SINK(2) };
    spdl_pipeline *p = NULL;
    double *number = NULL;
    int *n = NULL;
    rows[3].fn = &untyped;
    said.count = 0;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_TABLE(rows)) == SPDL_OK);
    CHECK_EQ(SPDL_NEXT(p, &n, 0), SPDL_TIMEOUT);
    CHECK_EQ(said.count, 0);
    CHECK_EQ(SPDL_NEXT(p, &number, 0), SPDL_E_TYPE);
    says(said.text[0], "but stage 5 'merge' yields 'int *'");
    spdl_pipeline_destroy(p);
}

/* Types of C may be typedefs of others; those of rows of C++ have brackets. */
static void next_of_other_languages(void) {
    static const struct { const char *asked, *yields; bool fits; } pairs[] = {
        { "int", "[T = int]", true }, { "[T = int]", "[T = int]", true },
        { "[T = int]", "[with T = double]", false }, { "double", "[T = int]", false },
        { "double", "Sample", true }, { "Sample", "double", true }, { "int", "const int", true },
        { "double", "const int", false }, { "spdl_batch", "Sample", false },
        { "Sample", "spdl_batch", false }, { "const Sample", "Sample", true },
    };
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; ++i)
        if (!CHECK(spdl__next_differs(pairs[i].asked, pairs[i].yields) != pairs[i].fits))
            fprintf(stderr, "  %s and %s\n", pairs[i].asked, pairs[i].yields);
}

/* .item_bytes = sizeof(pointer) is named where the items can be larger, and only there. */
SPDL_FN(makes_double, void, double) { return SPDL_END; }
static void the_size_of_a_pointer(void) {
    const spdl_pipeline_desc desc = { .logger = { log_lines, NULL } };
    const spdl_stage source = SPDL_SOURCE(makes_a);
    const spdl_function *const plain = source.fn;
    spdl_function sized = *plain;
    spdl_stage rows[3];
    spdl_pipeline *p = NULL;
    const A *pointer = NULL;
    char words[128];
    (void)pointer;
    said.count = 0;
    CHECK(spdl_pipeline_create(&p, &desc, SPDL_STAGES(SPDL_SOURCE(makes_a, .free_item = free),
          SPDL_BATCH(10, .item_bytes = sizeof(pointer)), SPDL_SINK(2))) == SPDL_OK);
    spdl_pipeline_destroy(p);
    CHECK_EQ(said.count, 1);
    snprintf(words, sizeof words,
             "stage 1 'batch': item_bytes is %d, the size of a pointer. If 'A' is larger, write "
             "SPDL_BATCH_OF(A, 10)", (int)sizeof pointer);
    says(said.text[0], words);
    said.count = 0;
    CHECK(spdl_pipeline_create(&p, &desc, SPDL_STAGES(SPDL_SOURCE(makes_double),
          SPDL_BATCH(10, .item_bytes = sizeof(double)), SPDL_SINK(2))) == SPDL_OK);
    spdl_pipeline_destroy(p);
    CHECK(spdl_pipeline_create(&p, &desc, SPDL_STAGES(SPDL_SOURCE(makes_a, .free_item = free),
          SPDL_BATCH_OF(A, 10), SPDL_SINK(2))) == SPDL_OK);
    spdl_pipeline_destroy(p);
    sized.out_bytes = sizeof(pointer);
    rows[0] = (spdl_stage)SPDL_SOURCE(makes_a, .free_item = free);
    rows[0].fn = &sized; /* as from C++, where the size is known */
    rows[1] = (spdl_stage)SPDL_BATCH(10, .item_bytes = sizeof(pointer));
    rows[2] = (spdl_stage)SPDL_SINK(2);
    CHECK(spdl_pipeline_create(&p, &desc, rows, 3) == SPDL_OK);
    spdl_pipeline_destroy(p);
    sized.out_bytes = 0;
    sized.out_type = "void"; /* anything */
    CHECK(spdl_pipeline_create(&p, &desc, rows, 3) == SPDL_OK);
    spdl_pipeline_destroy(p);
    rows[0].fn = plain;
    rows[1].type = "A"; /* it was said */
    CHECK(spdl_pipeline_create(&p, &desc, rows, 3) == SPDL_OK);
    spdl_pipeline_destroy(p);
    rows[0] = (spdl_stage)SPDL_FEED(A, .free_item = free); /* no function */
    rows[1].type = NULL;
    CHECK(spdl_pipeline_create(&p, &desc, rows, 3) == SPDL_OK);
    spdl_pipeline_destroy(p);
    CHECK_EQ(said.count, 0);
}

/* Names that a typedef may stand for are not compared, nor is const. */
static void next_into_a_type_that_may_fit(void) {
    const spdl_pipeline_desc desc = { .logger = { log_lines, NULL } };
    spdl_pipeline *p = NULL;
    A *a = NULL;
    B *b = NULL;
    const int *n = NULL;
    int *plain = NULL;
    CHECK(spdl_pipeline_create(&p, &desc, SPDL_STAGES(SPDL_SOURCE(makes_a, .free_item = free),
                                                         SPDL_SINK(2))) == SPDL_OK);
    CHECK(SPDL_NEXT(p, &a, SPDL_FOREVER) == SPDL_OK);
    free(a);
    CHECK(SPDL_NEXT(p, &b, SPDL_FOREVER) == SPDL_OK);
    free(b);
    spdl_pipeline_destroy(p);
    CHECK(spdl_pipeline_create(&p, &desc, SPDL_STAGES(SPDL_SOURCE(makes_const), SPDL_SINK(2))) ==
          SPDL_OK);
    CHECK(SPDL_NEXT(p, &n, SPDL_FOREVER) == SPDL_OK);
    CHECK(SPDL_NEXT(p, &plain, SPDL_FOREVER) == SPDL_OK);
    CHECK(*n == 7 && *plain == 7);
    spdl_pipeline_destroy(p);
}

/* --- texts --- */

/* No prefix in any text, whichever part of the library wrote it. */
static void texts_have_one_style(void) {
    spdl_error error[6];
    spdl_ring *ring;
    spdl_pool *pool;
    spdl_npz *npz;
    spdl_files *files;
    spdl_cache *cache;
    CHECK(spdl_ring_create(&ring, &(spdl_ring_desc){ .error = &error[0] }) < 0);
    CHECK(spdl_pool_create(&pool, &(spdl_pool_desc){ .workers = -1, .error = &error[1] }) < 0);
    CHECK(spdl_npz_open(&npz, "/nowhere.npz", &(spdl_npz_desc){ .error = &error[2] }) < 0);
    CHECK(spdl_files_open(&files, "/nowhere/*", &(spdl_files_desc){ .error = &error[3] }) < 0);
    CHECK(spdl_cache_create(&cache, &(spdl_cache_desc){ .error = &error[4] }) < 0);
    (void)spdl_state_load(NULL, NULL, 0, 0, &error[5]);
    for (int i = 0; i < 6; ++i) {
        CHECK(error[i].result < 0 && error[i].text[0] != 0);
        CHECK(strstr(error[i].text, "spdl: ") == NULL);
    }
}

TEST_TABLE(mistakes) {
    TEST_CASE(types_that_do_not_fit),
    TEST_CASE(types_with_a_tag),
    TEST_CASE(types_of_another_pipeline),
    TEST_CASE(a_reason_without_a_failure),
    TEST_CASE(a_source_without_items),
    TEST_CASE(a_task_after_its_call),
    TEST_CASE(numbers_out_of_range),
#ifndef SPDL_NO_REPORT
    TEST_CASE(seconds_out_of_range),
#endif
    TEST_CASE(rows_in_the_wrong_place),
    TEST_CASE(fields_in_the_wrong_place),
    TEST_CASE(values_without_a_field),
    TEST_CASE(rows_that_read_from_nothing),
    TEST_CASE(a_count_below_zero),
    TEST_CASE(records_in_place),
    TEST_CASE(a_sampler_of_nothing),
    TEST_CASE(results_that_are_none),
    TEST_CASE(a_failure_is_in_the_log),
    TEST_CASE(what_was_forgotten),
    TEST_CASE(what_a_reservoir_holds_is_no_leak),
    TEST_CASE(a_free_item_that_is_not_there),
    TEST_CASE(items_that_need_no_free),
    TEST_CASE(an_item_larger_than_its_place),
    TEST_CASE(items_of_a_batch_in_place_stay),
    TEST_CASE(destroy_in_a_stage),
    TEST_CASE(two_threads_at_one_end),
    TEST_CASE(next_in_a_stage_of_its_own),
    TEST_CASE(timeouts_in_a_row),
    TEST_CASE(a_push_without_a_feed),
    TEST_CASE(a_pipeline_in_a_forked_child),
    TEST_CASE(next_on_a_worker_of_its_pool),
    TEST_CASE(next_of_a_guest_that_was_none),
    TEST_CASE(next_into_another_type),
    TEST_CASE(next_into_the_type_of_no_failure),
    TEST_CASE(next_into_a_type_that_may_fit),
    TEST_CASE(the_size_of_a_pointer),
    TEST_CASE(next_with_rows_of_no_type),
    TEST_CASE(next_of_other_languages),
    TEST_CASE(texts_have_one_style),
    TEST_END,
};
