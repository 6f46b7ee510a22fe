/* Batches in place, buffers that are used again, and batches that are taken apart. */
#include "flow.h"

/* --- items that lie in a buffer or a batch --- */

typedef struct part {
    const void *written_at;
    long value;
    char rest[104];
} part;

enum { PART = sizeof(part) };

static void part_write(part *to, long value) {
    to->written_at = to;
    to->value = value;
    memset(to->rest, (int)(value & 0x7f), sizeof to->rest);
}

static void part_check(const part *p, long value) {
    CHECK_EQ(p->value, value);
    for (size_t i = 0; i < sizeof p->rest; ++i) REQUIRE(p->rest[i] == (char)(value & 0x7f));
}

/* A stage that writes parts: what it does with which values. */
typedef struct pen {
    long count;                /* source: so many items in an epoch */
    int every, rest;           /* values that are skipped, after the buffer was asked for */
    spdl_result result;        /* or end so, unless 0 */
    int malloced;              /* every so many are malloc's, not of the library */
    int nulls;                 /* every so many are NULL */
    int sleeps;                /* every so many take a while */
} pen;

static spdl_result pen_write(spdl_task *task, const pen *with, long value, part **out) {
    if (with->sleeps && value % with->sleeps == 0) sleep_us(300);
    if (with->nulls && value % with->nulls == 0) return SPDL_OK;
    if (with->malloced && value % with->malloced == 0) {
        *out = (part *)malloc(PART);
        REQUIRE(*out != NULL);
    } else {
        *out = (part *)spdl_buffer(task);
        REQUIRE(*out != NULL);
        CHECK(spdl_buffer(task) == *out);
    }
    part_write(*out, value);
    return SPDL_OK;
}

SPDL_FN(write_down, void, part) {
    const pen *with = (const pen *)spdl_ctx(task);
    const long value = (long)spdl_sequence(task);
    return value >= with->count ? SPDL_END : pen_write(task, with, value, out);
}

SPDL_FN(copy_out, item, part) {
    pen *with = (pen *)spdl_ctx(task);
    const long value = in->value;
    if (with->every && value % with->every == with->rest) {
        if (value % 2) part_write((part *)spdl_buffer(task), -1);
        return with->result ? with->result : SPDL_SKIP;
    }
    return pen_write(task, with, value, out);
}

#define WITH(...) .ctx = &(pen){ __VA_ARGS__ }

/* Takes a batch apart: its values are those of `next` and on, without the dropped ones. How many
   parts lie where they were written. */
static size_t batch_read(spdl_batch *batch, long *next, const pen *with, bool any_order) {
    size_t in_place = 0;
    CHECK_EQ((uintptr_t)batch->data % 64, 0);
    for (size_t i = 0; i < batch->count; ++i, ++*next) {
        const part *p = (const part *)batch->items[i];
        while (with->every && *next % with->every == with->rest) ++*next;
        REQUIRE((const char *)p == (const char *)batch->data + i * PART);
        if (with->nulls && *next % with->nulls == 0) {
            CHECK_EQ(p->value, 0);
            continue;
        }
        part_check(p, any_order ? p->value : *next);
        in_place += p->written_at == p;
    }
    return in_place;
}

static uint64_t parts_epoch; /* of the batches that are taken apart */

/* Takes one epoch of batches of `size`, up to the end; how many items lay in place. */
static size_t take_parts(spdl_pipeline *p, size_t size, const pen *with, bool any_order,
                         bool last_too) {
    size_t in_place = 0, count = 0, batches = 0, whole = 0;
    spdl_result result;
    spdl_batch *batch;
    long next = 0;
    while ((result = SPDL_NEXT(p, &batch, SPDL_SECONDS(15))) == SPDL_OK) {
        CHECK_EQ(batch->sequence, batches++);
        CHECK_EQ(batch->epoch, parts_epoch);
        CHECK_EQ(batch->bytes, batch->count * PART);
        whole += batch->count == size;
        count += batch->count;
        in_place += batch_read(batch, &next, with, any_order);
        spdl_batch_free(batch);
    }
    CHECK_STR(spdl_result_text(result), spdl_result_text(SPDL_END));
    CHECK_EQ(whole, batches - (last_too && count % size != 0));
    for (next = 0; next < with->count; ++next)
        count += with->every && next % with->every == with->rest;
    CHECK_EQ(last_too ? count : count + (size_t)(with->count - (long)count) % size, with->count);
    return in_place;
}

static void a_source_writes_into_batches(void) {
    pen with = { .count = 500 };
    for (int i = 0; i < CROWDS; ++i) {
        spdl_pipeline *p = START(crowds[i], SPDL_SOURCE(write_down, .ctx = &with),
                                 SPDL_BATCH(7, .item_bytes = PART), SPDL_SINK(3));
        CHECK_EQ(take_parts(p, 7, &with, false, true), 500);
        spdl_pipeline_destroy(p);
    }
}

static void calls_write_into_batches_at_the_same_time(void) {
    pen with = { .count = 400, .sleeps = 23 };
    chaos_on();
    for (int i = 0; i < CROWDS; ++i) {
        for (int size = 1; size < 70; size = 3 * size + 1) {
            spdl_pipeline *p = START(crowds[i], COUNT_TO(400),
                                     SPDL_PIPE(copy_out, .ctx = &with, .concurrency = 4),
                                     SPDL_BATCH(size, .item_bytes = PART), SPDL_SINK(3));
            CHECK_EQ(take_parts(p, (size_t)size, &with, false, true), 400);
            spdl_pipeline_destroy(p);
            CHECK_EQ(items_alive(), 0);
        }
    }
}

/* Whatever was dropped, the parts follow each other. */
static void dropped_parts_leave_no_gap(void) {
    chaos_on();
    for (int i = 0; i < CROWDS; ++i) {
        for (int every = 2; every < 12; every += 3) {
            for (int order = 0; order < 3; ++order) {
                pen with = { .count = 200, .every = every, .rest = 1, .sleeps = 17,
                             .result = every % 2 ? SPDL_E_IO : SPDL_OK };
                spdl_pipeline *p =
                    START(crowds[i], COUNT_TO(200),
                          SPDL_PIPE(copy_out, .ctx = &with, .concurrency = order ? 4 : 1,
                                    .output_order = order == 2 ? SPDL_ORDER_COMPLETION : 0,
                                    .max_failures = -1),
                          SPDL_BATCH(6, .item_bytes = PART), SPDL_SINK(2));
                const size_t in_place = take_parts(p, 6, &with, order == 2, true);
                if (order == 0) CHECK_EQ(in_place, 200 - (200 + every - 2) / every);
                spdl_pipeline_destroy(p);
                CHECK_EQ(items_alive(), 0);
            }
        }
    }
}

static void epochs_do_not_share_a_batch(void) {
    chaos_on();
    for (int i = 0; i < CROWDS; ++i) {
        for (int count = 0; count < 20; count += 1 + count / 4) {
            for (int what = 0; what < 8; ++what) {
                const bool drop_last = what & 1, piped = what & 2;
                pen with = { .count = count, .every = piped && what & 4 ? 3 : 0, .rest = 2 };
                const spdl_stage direct[] = {
                    SPDL_SOURCE(write_down, .ctx = &with, .continuous = true),
                    SPDL_BATCH(4, .item_bytes = PART, .drop_last = drop_last), SPDL_SINK(2)
                };
                const spdl_stage through[] = {
                    CONTINUOUS(.count = count),
                    SPDL_PIPE(copy_out, .ctx = &with, .concurrency = 1 + what),
                    SPDL_BATCH(4, .item_bytes = PART, .drop_last = drop_last), SPDL_SINK(2)
                };
                spdl_pipeline *p = piped ? start(crowds[i], NULL, SPDL_TABLE(through))
                                         : start(crowds[i], NULL, SPDL_TABLE(direct));
                for (parts_epoch = 0; parts_epoch < 20; ++parts_epoch) {
                    const size_t in_place = take_parts(p, 4, &with, false, !drop_last);
                    if (!with.every) CHECK_EQ(in_place, drop_last ? count / 4 * 4 : count);
                }
                parts_epoch = 0;
                spdl_pipeline_destroy(p);
                CHECK_EQ(items_alive(), 0);
            }
        }
    }
}

/* In place and by pointer; the consumer is told, too, also where a load has gone to. */
static void batches_know_their_epoch(void) {
    for (int i = 0; i < 2 * CROWDS; ++i) {
        const spdl_stage rows[] = { CONTINUOUS(.count = 5),
                                    SPDL_PIPE(copy_out, .ctx = &(pen){ .count = 5 }),
                                    SPDL_BATCH(2, .item_bytes = i % 2 ? PART : 0), SPDL_SINK(2) };
        const spdl_stage plain[] = { rows[0], SPDL_BATCH(2), SPDL_SINK(2) };
        spdl_pipeline *p = i % 2 ? start(crowds[i / 2], NULL, SPDL_TABLE(rows))
                                 : start(crowds[i / 2], NULL, SPDL_TABLE(plain));
        char text[SPDL_STATE_BYTES];
        const char *const texts[] = { text };
        spdl_batch *batch;
        CHECK_EQ(spdl_pipeline_epoch(p), 0);
        for (uint64_t epoch = 0; epoch < 4; ++epoch) {
            for (uint64_t at = 0; at < 3; ++at) {
                REQUIRE(SPDL_NEXT(p, &batch, SPDL_FOREVER) == SPDL_OK);
                CHECK(batch->epoch == epoch && batch->sequence == at);
                CHECK_EQ(spdl_pipeline_epoch(p), epoch);
                if (epoch == 1 && at == 1) CHECK(spdl_state_save(p, text, sizeof text) > 0);
                spdl_batch_free(batch);
            }
            CHECK_EQ(SPDL_NEXT(p, &batch, SPDL_FOREVER), SPDL_END);
            CHECK_EQ(spdl_pipeline_epoch(p), epoch + 1);
        }
        CHECK_EQ(spdl_state_load(p, texts, 1, SPDL_FOREVER, NULL), SPDL_OK);
        CHECK_EQ(spdl_pipeline_epoch(p), 1);
        REQUIRE(SPDL_NEXT(p, &batch, SPDL_FOREVER) == SPDL_OK);
        CHECK(batch->epoch == 1 && batch->sequence == 2 && batch->count == 1);
        spdl_batch_free(batch);
        CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(spdl_pipeline_epoch(p), 0);
        spdl_pipeline_destroy(p);
        CHECK_EQ(items_alive(), 0);
    }
}

/* --- items from elsewhere --- */

SPDL_FN(finish_part, part, part) {
    *out = in;
    return SPDL_OK;
}

SPDL_FN(choose, part, part) {
    *out = in;
    return spdl_route(task, (int)(in->value % 2));
}

static int parts_freed;

static void part_free(void *p) {
    __atomic_add_fetch(&parts_freed, 1, __ATOMIC_RELAXED);
    free(p);
}

static void other_items_are_copied(void) {
    for (int i = 0; i < CROWDS; ++i) {
        pen with = { .count = 300, .malloced = 3, .nulls = 7 };
        spdl_pipeline *p;
        parts_freed = 0;
        p = START(crowds[i], COUNT_TO(300),
                  SPDL_PIPE(copy_out, .ctx = &with, .concurrency = 3, .free_item = part_free),
                  SPDL_BATCH(8, .item_bytes = PART), SPDL_SINK(2));
        take_parts(p, 8, &with, false, true);
        spdl_pipeline_destroy(p);
        CHECK_EQ(parts_freed, 100 - 15); /* the others of the hundred are NULL */
    }
}

/* What comes through further stages, or a branch, is copied, and its buffers come back. */
static void buffers_are_copied_into_batches(void) {
    for (int i = 0; i < CROWDS; ++i) {
        pen with = { .count = 300, .malloced = 5 };
        spdl_pipeline *p = START(
            crowds[i], SPDL_SOURCE(write_down, .ctx = &with, .item_bytes = PART, .free_item = free),
            SPDL_PIPE(finish_part, .concurrency = 3), SPDL_BRANCH(choose), SPDL_PATH("even"),
            SPDL_PATH("odd"), SPDL_MERGE(),
            SPDL_BATCH(8, .item_bytes = PART), SPDL_SINK(2));
        CHECK_EQ(take_parts(p, 8, &with, false, true), 0);
        spdl_pipeline_destroy(p);
    }
}

SPDL_FN(three_parts, item, part) {
    void **state = spdl_call_state(task);
    const long k = (long)(intptr_t)*state;
    part *p = (part *)spdl_buffer(task);
    REQUIRE(p != NULL);
    if (k == 3) return SPDL_SKIP; /* the buffer is not handed on */
    part_write(p, 3 * in->value + k);
    *out = p;
    *state = (void *)(intptr_t)(k + 1);
    return SPDL_AGAIN;
}

static void buffers_of_one_to_many_are_copied_into_batches(void) {
    for (int i = 0; i < CROWDS; ++i) {
        const pen with = { .count = 300 };
        spdl_pipeline *p = START(crowds[i], COUNT_TO(100),
                                 SPDL_PIPE(three_parts, .again = true, .item_bytes = PART),
                                 SPDL_BATCH(8, .item_bytes = PART), SPDL_SINK(2));
        CHECK_EQ(take_parts(p, 8, &with, false, true), 0);
        spdl_pipeline_destroy(p);
        CHECK_EQ(items_alive(), 0);
    }
}

typedef struct strokes {
    long made;
} strokes;

/* Three of each, one by one; the last of them is the call's own. */
SPDL_FN(write_again, item, part) {
    strokes **s = (strokes **)spdl_call_state(task);
    if (*s == NULL) *s = (strokes *)calloc(1, sizeof **s);
    REQUIRE(*s != NULL);
    *out = (part *)spdl_buffer(task);
    REQUIRE(*out != NULL);
    part_write(*out, 3 * in->value + (*s)->made++);
    return (*s)->made < 3 ? SPDL_AGAIN : SPDL_OK;
}

static void calls_made_again_have_new_buffers(void) {
    for (int i = 0; i < CROWDS; ++i) {
        const pen with = { .count = 150 };
        spdl_pipeline *p = START(crowds[i], COUNT_TO(50),
                                 SPDL_PIPE(write_again, .again = true, .free_state = free),
                                 SPDL_BATCH(8, .item_bytes = PART), SPDL_SINK(2));
        CHECK_EQ(take_parts(p, 8, &with, false, true), 0);
        spdl_pipeline_destroy(p);
        for (int concurrency = 1; concurrency < 4; ++concurrency) { /* whole at the end */
            long sum = 0;
            p = START(crowds[i], COUNT_TO(50),
                      SPDL_PIPE(write_again, .again = true, .free_state = free,
                                .concurrency = concurrency, .item_bytes = PART,
                                .output_order = SPDL_ORDER_COMPLETION),
                      SPDL_SINK(2));
            for (int k = 0; k < 150; ++k) {
                part *got;
                REQUIRE(SPDL_NEXT(p, &got, SPDL_SECONDS(15)) == SPDL_OK);
                part_check(got, got->value);
                sum += got->value;
                spdl_buffer_free(got);
                if (concurrency == 2 && k == 5) break;
            }
            CHECK(concurrency == 2 || sum == 149 * 150 / 2);
            spdl_pipeline_destroy(p);
            CHECK_EQ(items_alive(), 0);
        }
    }
}

/* --- deferred calls --- */

typedef struct late {
    spdl_deferred deferred;
    part *at;
    long value;
} late;

static void *complete_later(void *arg) {
    late *l = (late *)arg;
    sleep_us(l->value % 5 * 100);
    if (l->at != NULL) part_write(l->at, l->value);
    if (l->value % 10 == 9) CHECK_EQ(spdl_complete(l->deferred, SPDL_SKIP, l->at), SPDL_OK);
    else CHECK_EQ(spdl_complete(l->deferred, SPDL_OK, l->at), SPDL_OK);
    free(l);
    return NULL;
}

SPDL_FN(write_later, item, part) {
    late *l = (late *)malloc(sizeof *l);
    test_thread thread;
    (void)out;
    REQUIRE(l != NULL);
    l->at = (part *)spdl_buffer(task);
    l->deferred = spdl_defer(task);
    l->value = in->value;
    thread = thread_of(complete_later, l);
    test_detach(thread);
    if (in->value % 3 == 0) sleep_us(200);
    return SPDL_PENDING;
}

static void deferred_calls_write_into_batches(void) {
    for (int order = 0; order < 2; ++order) {
        const pen with = { .count = 100, .every = 10, .rest = 9 };
        spdl_pipeline *p = START(
            2, COUNT_TO(100),
            SPDL_PIPE(write_later, .deferred = true, .concurrency = 5,
                      .output_order = order ? SPDL_ORDER_COMPLETION : SPDL_ORDER_INPUT),
            SPDL_BATCH(8, .item_bytes = PART), SPDL_SINK(2));
        take_parts(p, 8, &with, order == 1, true);
        spdl_pipeline_destroy(p);
        CHECK_EQ(items_alive(), 0);
    }
}

/* --- the end --- */

static void batches_in_place_can_be_left(void) {
    chaos_on();
    for (int i = 0; i < CROWDS; ++i) {
        for (int taken = 0; taken < 30; ++taken) {
            pen with = { .count = 200, .every = 7, .rest = 3, .malloced = 11, .sleeps = 50 };
            spdl_batch *batch, *kept = NULL;
            spdl_pipeline *p = START(
                crowds[i], COUNT_TO(taken % 3 ? 200 : 75),
                SPDL_PIPE(copy_out, .ctx = &with, .concurrency = 4, .free_item = part_free,
                          .output_order = taken % 2 ? SPDL_ORDER_COMPLETION : SPDL_ORDER_INPUT),
                SPDL_BATCH(3, .item_bytes = PART), SPDL_SINK(2));
            for (int k = 0; k < taken; ++k) {
                if (SPDL_NEXT(p, &batch, SPDL_SECONDS(15)) != SPDL_OK) break;
                spdl_batch_free(kept);
                kept = batch;
            }
            spdl_pipeline_destroy(p);
            CHECK_EQ(items_alive(), 0);
            for (size_t k = 0; kept != NULL && k < kept->count; ++k) /* lives on */
                part_check((const part *)kept->items[k], ((const part *)kept->items[k])->value);
            spdl_batch_free(kept);
        }
    }
}

static void a_rewind_begins_a_new_batch(void) {
    chaos_on();
    for (int i = 0; i < CROWDS; ++i) {
        for (int concurrency = 1; concurrency < 6; concurrency += 2) {
            pen with = { .count = 60, .every = concurrency == 5 ? 7 : 0 };
            spdl_pipeline *p =
                START(crowds[i], COUNT_TO(60),
                      SPDL_PIPE(copy_out, .ctx = &with, .concurrency = concurrency),
                      SPDL_BATCH(8, .item_bytes = PART), SPDL_SINK(2));
            for (int taken = 0; taken < 12; ++taken) {
                spdl_batch *batch;
                for (int k = 0; k < taken; ++k)
                    if (SPDL_NEXT(p, &batch, SPDL_SECONDS(15)) == SPDL_OK)
                        spdl_batch_free(batch);
                REQUIRE(spdl_pipeline_rewind(p, 0, SPDL_SECONDS(15)) == SPDL_OK);
                if (taken % 3 == 0) {
                    const size_t in_place = take_parts(p, 8, &with, false, true);
                    if (!with.every) CHECK_EQ(in_place, 60);
                    REQUIRE(spdl_pipeline_rewind(p, 0, SPDL_SECONDS(15)) == SPDL_OK);
                }
            }
            spdl_pipeline_destroy(p);
            CHECK_EQ(items_alive(), 0);
        }
    }
}

SPDL_FN(breaks, spdl_batch, spdl_batch) {
    *out = in;
    return in->sequence == *(const uint64_t *)spdl_ctx(task) ? SPDL_E_IO : SPDL_OK;
}

/* A later stage ends the pipeline while calls write into the batches that come next. */
static void a_failure_after_the_batch_waits_for_those_who_write(void) {
    chaos_on();
    for (int i = 0; i < CROWDS; ++i) {
        for (uint64_t at = 0; at < 12; ++at) {
            pen with = { .count = 200, .sleeps = 9 };
            spdl_result result;
            spdl_batch *batch;
            uint64_t taken = 0;
            spdl_pipeline *p = START(crowds[i], COUNT_TO(200),
                                     SPDL_PIPE(copy_out, .ctx = &with, .concurrency = 4),
                                     SPDL_BATCH(5, .item_bytes = PART),
                                     SPDL_PIPE(breaks, .ctx = &at), SPDL_SINK(2));
            while ((result = SPDL_NEXT(p, &batch, SPDL_SECONDS(15))) == SPDL_OK) {
                ++taken;
                spdl_batch_free(batch);
            }
            CHECK_EQ(result, SPDL_E_IO);
            CHECK_EQ(taken, at);
            spdl_pipeline_destroy(p);
            CHECK_EQ(items_alive(), 0);
        }
    }
}

static void a_failure_before_the_batch_delivers_what_was_whole(void) {
    for (int i = 0; i < CROWDS; ++i) {
        pen with = { .count = 99, .every = 99, .rest = 42, .result = SPDL_E_IO, .sleeps = 11 };
        spdl_batch *batch;
        long next = 0;
        spdl_pipeline *p = START(crowds[i], COUNT_TO(99),
                                 SPDL_PIPE(copy_out, .ctx = &with, .concurrency = 4),
                                 SPDL_BATCH(5, .item_bytes = PART), SPDL_SINK(2));
        while (SPDL_NEXT(p, &batch, SPDL_SECONDS(15)) == SPDL_OK) {
            batch_read(batch, &next, &with, false);
            spdl_batch_free(batch);
        }
        CHECK_EQ(next, 40); /* what is left is freed */
        CHECK(spdl_pipeline_failed(p));
        spdl_pipeline_destroy(p);
        CHECK_EQ(items_alive(), 0);
    }
}

/* --- buffers --- */

static void buffers_come_back(void) {
    for (int i = 0; i < CROWDS; ++i) {
        pen with = { .every = 4, .rest = 1 };
        const void *seen[64];
        size_t different = 0;
        part *got, *last = NULL;
        long next = 0;
        spdl_pipeline *p =
            START(crowds[i], COUNT_TO(1000),
                  SPDL_PIPE(copy_out, .ctx = &with, .concurrency = 2, .item_bytes = PART),
                  SPDL_PIPE(finish_part), SPDL_SINK(2));
        while (SPDL_NEXT(p, &got, SPDL_SECONDS(15)) == SPDL_OK) {
            size_t k = 0;
            if (next % 4 == 1) ++next;
            part_check(got, next++);
            CHECK_EQ((uintptr_t)got % 64, 0);
            while (k < different && seen[k] != got) ++k;
            REQUIRE(k < 64);
            if (k == different) seen[different++] = got;
            spdl_buffer_free(last);
            last = got;
        }
        CHECK_EQ(next, 1000);
        spdl_pipeline_destroy(p);
        part_check(last, 999);
        spdl_buffer_free(last);
        spdl_buffer_free(NULL);
        CHECK_EQ(items_alive(), 0);
    }
}

static void buffers_in_a_batch_come_back(void) {
    for (int i = 0; i < CROWDS; ++i) {
        pen with = { .count = 90, .malloced = 4 };
        spdl_batch *batch;
        part *mine = NULL;
        long next = 0;
        spdl_pipeline *p = START(
            crowds[i], SPDL_SOURCE(write_down, .ctx = &with, .item_bytes = PART, .free_item = free),
            SPDL_BATCH(9), SPDL_SINK(2));
        while (SPDL_NEXT(p, &batch, SPDL_SECONDS(15)) == SPDL_OK) {
            CHECK(batch->data == NULL && batch->bytes == 0);
            for (size_t k = 0; k < batch->count; ++k)
                part_check((const part *)batch->items[k], next++);
            spdl_buffer_free(mine);
            mine = (part *)batch->items[3];
            if (mine->value % 4 == 0) mine = NULL;
            else batch->items[3] = NULL;
            spdl_batch_free(batch);
        }
        CHECK_EQ(next, 90);
        spdl_pipeline_destroy(p);
        spdl_buffer_free(mine);
    }
}

/* --- batches that are taken apart --- */

SPDL_FN(pick_out, spdl_batch, spdl_batch) {
    (void)spdl_ctx(task);
    for (size_t i = 0; i < in->count; ++i) {
        item *it = (item *)in->items[i];
        if (it->value % 4 != 0) continue;
        item_free(it);
        in->items[i] = NULL;
    }
    *out = in;
    return in->sequence == 2 ? SPDL_SKIP : SPDL_OK;
}

/* The even items after the odd ones. */
SPDL_FN(deal_out, spdl_batch, spdl_batch) {
    *out = in;
    return spdl_route(task, (int)(spdl_sequence(task) % 2));
}

static void batches_are_taken_apart(void) {
    for (int i = 0; i < CROWDS; ++i) {
        RUN(START(crowds[i], COUNT_TO(11), SPDL_BATCH(4), SPDL_UNBATCH(), SPDL_SINK(3)),
            "0 1 2 3 4 5 6 7 8 9 10", SPDL_END);
        RUN(START(crowds[i], COUNT_TO(16), SPDL_BATCH(3), SPDL_PIPE(pick_out, .concurrency = 2),
                  SPDL_UNBATCH(.name = "apart", .buffer_size = 5), FOLLOW(.times = 10),
                  SPDL_SINK(3)),
            "10 20 30 50 90 100 110 130 140 150", SPDL_END);
        RUN_BATCHES(START(crowds[i], COUNT_TO(8), SPDL_BATCH(2), SPDL_BATCH(2), SPDL_UNBATCH(),
                          SPDL_UNBATCH(), SPDL_BATCH(3), SPDL_SINK(3)),
                    "0 1 2|3 4 5|6 7", SPDL_END);
        RUN(START(crowds[i], COUNT_TO(5), SPDL_BATCH(2), SPDL_BATCH(2), SPDL_PIPE(pass_batch),
                  SPDL_UNBATCH(), SPDL_BRANCH(deal_out), SPDL_PATH("a"), SPDL_PATH("b"),
                  SPDL_MERGE(), SPDL_UNBATCH(), SPDL_SINK(3)),
            "0 1 2 3 4", SPDL_END);
    }
}

static void batches_are_taken_apart_in_each_epoch(void) {
    for (int i = 0; i < CROWDS; ++i) {
        spdl_pipeline *p = START(crowds[i], CONTINUOUS(.count = 5), SPDL_BATCH(2), SPDL_UNBATCH(),
                                 SPDL_SINK(2));
        for (int epoch = 0; epoch < 5; ++epoch) TAKE_EPOCH(p, "0 1 2 3 4");
        DONE(p);
        for (int taken = 0; taken < 12; ++taken) {
            p = START(crowds[i], CONTINUOUS(.count = 50), SPDL_BATCH(6), SPDL_UNBATCH(),
                      SPDL_SINK(2));
            CHECK_EQ(take_from(p, 0, taken, SPDL_OK), taken);
            DONE(p);
        }
    }
}

/* Some items, or all, were taken out, or the batch itself. */
SPDL_FN(thin_out, spdl_batch, spdl_batch) {
    for (size_t i = 0; i < in->count; ++i) {
        const bool stays = in->sequence == 0 ? i != 0 : in->sequence == 1 ? false : i != 2;
        if (stays) continue;
        item_free(in->items[i]);
        in->items[i] = NULL;
    }
    *out = in->sequence == 3 ? NULL : in;
    return SPDL_OK;
}

static void what_was_taken_out_is_not_there(void) {
    for (int i = 0; i < CROWDS; ++i)
        RUN(START(crowds[i], COUNT_TO(15), SPDL_BATCH(3), SPDL_PIPE(thin_out), SPDL_UNBATCH(),
                  SPDL_SINK(3)),
            "1 2 6 7 12 13", SPDL_END);
}

/* --- what is refused --- */

SPDL_FN(asks_in_vain, item, item) {
    CHECK(spdl_buffer(task) == NULL);
    *out = in;
    return SPDL_OK;
}

static void runs_into(spdl_pipeline *p, const char *text) {
    void *taken;
    spdl_result result;
    while ((result = spdl_pipeline_next(p, &taken, SPDL_SECONDS(15))) == SPDL_OK) item_free(taken);
    CHECK(result < 0);
    CHECK(strstr(spdl_pipeline_error(p)->text, text) != NULL);
    spdl_pipeline_destroy(p);
    CHECK_EQ(items_alive(), 0);
}

static spdl_pipeline *quiet(int workers, const spdl_stage *rows, size_t count) {
    spdl_pipeline_desc desc = { .workers = TEST_WORKERS(workers), .logger = { log_nothing, NULL } };
    spdl_pipeline *p = NULL;
    REQUIRE(spdl_pipeline_create(&p, &desc, rows, count) == SPDL_OK);
    return p;
}

#define QUIET(workers, ...) quiet((workers), SPDL_STAGES(__VA_ARGS__))

static void wrong_use_is_a_failure(void) {
    for (int i = 0; i < CROWDS; ++i) {
        pen with = { .count = 8 };
        runs_into(QUIET(crowds[i], COUNT_TO(8), SPDL_PIPE(asks_in_vain), SPDL_SINK(2)),
                  "spdl_buffer in a stage without .item_bytes");
        runs_into(QUIET(crowds[i], SPDL_SOURCE(write_down, .ctx = &with),
                        SPDL_BATCH(4, .item_bytes = PART), SPDL_UNBATCH(), SPDL_SINK(2)),
                  "batch in place (.item_bytes) cannot leave it");
    }
}

/* Create names the field. */
static void refused(const char *text, const spdl_stage *rows, size_t count) {
    spdl_error error;
    spdl_pipeline_desc desc = { .error = &error, .logger = { log_nothing, NULL } };
    spdl_pipeline *p;
    CHECK(spdl_pipeline_create(&p, &desc, rows, count) < 0);
    if (!CHECK(strstr(error.text, text) != NULL)) printf("%s\n", error.text);
}

static void rows_are_checked(void) {
    char text[80];
    snprintf(text, sizeof text, "item_bytes is %llu, must be at most 2147483647",
             (unsigned long long)SIZE_MAX);
    refused(text, SPDL_STAGES(SPDL_SOURCE(count_up, .item_bytes = SIZE_MAX), SPDL_SINK(1)));
    refused("item_bytes is 2147483648, must be at most",
            SPDL_STAGES(SPDL_SOURCE(count_up, .item_bytes = (size_t)1 << 31), SPDL_SINK(1)));
    refused("item_bytes is set, but only source, pipe and batch rows have it",
            SPDL_STAGES(COUNT_TO(1), SPDL_BATCH(4), SPDL_UNBATCH(.item_bytes = 4), SPDL_SINK(1)));
    refused("concurrency is set, but only pipe rows",
            SPDL_STAGES(COUNT_TO(1), SPDL_BATCH(4), SPDL_UNBATCH(.concurrency = 4), SPDL_SINK(1)));
    refused("takes 'spdl_batch *' but stage 0 'count_up'",
            SPDL_STAGES(COUNT_TO(1), SPDL_UNBATCH(), SPDL_SINK(1)));
    refused("takes 'part *' but stage 2 'unbatch'",
            SPDL_STAGES(COUNT_TO(1), SPDL_BATCH(2), SPDL_UNBATCH(), SPDL_PIPE(finish_part),
                        SPDL_SINK(1)));
    refused("SPDL_UNBATCH in a path whose merge is in input order",
            SPDL_STAGES(COUNT_TO(1), SPDL_BATCH(2), SPDL_BRANCH(pass_batch), SPDL_PATH("a"),
                        SPDL_UNBATCH(), SPDL_PATH("b"), SPDL_MERGE(), SPDL_SINK(1)));
}

/* --- memory --- */

static int allocations;  /* atomic */
static int allocations_left = -1;

static void *count_alloc(size_t bytes, size_t align, void *user) {
    (void)user;
    if (__atomic_load_n(&allocations_left, __ATOMIC_RELAXED) == 0) return NULL;
    if (allocations_left > 0) --allocations_left;
    __atomic_add_fetch(&allocations, 1, __ATOMIC_RELAXED);
    return test_memory(align, bytes);
}

static void count_free(void *memory, size_t bytes, void *user) {
    (void)bytes;
    (void)user;
    if (memory != NULL) __atomic_sub_fetch(&allocations, 1, __ATOMIC_RELAXED);
    test_memory_free(memory);
}

SPDL_FN(copy_part, part, part) {
    if ((*out = (part *)spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    part_check(in, (long)spdl_sequence(task));
    part_write(*out, in->value);
    return SPDL_OK;
}

static spdl_result memory_try(spdl_pipeline **p, int workers, const pen *with, spdl_error *error) {
    spdl_pipeline_desc desc = { .workers = TEST_WORKERS(workers), .error = error };
    desc.allocator.alloc_fn = count_alloc;
    desc.allocator.free_fn = count_free;
    desc.logger.log_fn = log_nothing;
    return spdl_pipeline_create(
        p, &desc,
        SPDL_STAGES(SPDL_SOURCE(write_down, .ctx = (void *)(uintptr_t)with, .item_bytes = PART),
                    SPDL_PIPE(copy_part, .concurrency = 2),
                    SPDL_BATCH(16, .item_bytes = PART), SPDL_PIPE(pass_batch), SPDL_SINK(3)));
}

static void running_in_place_allocates_nothing(void) {
    for (int i = 0; i < CROWDS; ++i) {
        const pen with = { .count = 3000 };
        spdl_pipeline *p;
        int made;
        REQUIRE(memory_try(&p, crowds[i], &with, NULL) == SPDL_OK);
        made = allocations;
        CHECK_EQ(take_parts(p, 16, &with, false, true), 3000);
        CHECK_EQ(allocations, made);
        spdl_pipeline_destroy(p);
        CHECK_EQ(allocations, 0);
    }
}

static void any_allocation_may_fail(void) {
    const pen with = { .count = 40 };
    for (int left = 0;; ++left) {
        spdl_error error;
        spdl_pipeline *p;
        allocations_left = left;
        if (memory_try(&p, 0, &with, &error) == SPDL_OK) {
            allocations_left = -1;
            spdl_pipeline_destroy(p);
            break;
        }
        CHECK_EQ(error.result, SPDL_E_NOMEM);
        CHECK_EQ(allocations, 0);
    }
    CHECK_EQ(allocations, 0);
}

/* The trainer keeps more than were made ahead, and there is no memory for more. */
static void batches_in_place_may_run_out(void) {
    for (int i = 0; i < CROWDS; ++i) {
        const pen with = { .count = 3000 };
        static spdl_batch *kept[200];
        spdl_result result = SPDL_OK;
        size_t count = 0;
        spdl_pipeline *p;
        REQUIRE(memory_try(&p, crowds[i], &with, NULL) == SPDL_OK);
        allocations_left = 0;
        while (count < 200) {
            result = SPDL_NEXT(p, &kept[count], SPDL_SECONDS(15));
            if (result != SPDL_OK) break;
            ++count;
        }
        CHECK_EQ(result, SPDL_E_NOMEM);
        spdl_pipeline_destroy(p);
        while (count > 0) spdl_batch_free(kept[--count]);
        allocations_left = -1;
        CHECK_EQ(allocations, 0);
    }
}

/* Items of the first epoch are from elsewhere: the batch row, which waits for the consumer, has no
   batch of it yet when the next epoch has some. */
typedef struct two_epochs {
    int calls; /* atomic */
} two_epochs;

SPDL_FN(elsewhere_at_first, item, part) {
    two_epochs *t = (two_epochs *)spdl_ctx(task);
    const int call = __atomic_fetch_add(&t->calls, 1, __ATOMIC_RELEASE);
    *out = (part *)(call < 6 ? malloc(PART) : spdl_buffer(task));
    REQUIRE(*out != NULL);
    part_write(*out, in->value);
    return SPDL_OK;
}

static void an_epoch_may_lag_behind(void) {
    for (int i = 1; i < CROWDS; ++i) {
        const pen with = { .count = 6 };
        two_epochs t = { 0 };
        spdl_pipeline *p = START(crowds[i], CONTINUOUS(.count = 6),
                                 SPDL_PIPE(elsewhere_at_first, .ctx = &t, .buffer_size = 30,
                                           .free_item = free),
                                 SPDL_BATCH(2, .item_bytes = PART), SPDL_SINK(1));
        await(&t.calls, 11);
        for (parts_epoch = 0; parts_epoch < 4; ++parts_epoch)
            CHECK_EQ(take_parts(p, 2, &with, false, true), parts_epoch == 0 ? 0 : 6);
        parts_epoch = 0;
        spdl_pipeline_destroy(p);
        CHECK_EQ(items_alive(), 0);
    }
}

/* A call fails, and there is no memory for a copy of the batch that others may write into. */
SPDL_FN(fails_without_memory, item, part) {
    if (in->value == 3) allocations_left = 0;
    if (in->value == 3) return SPDL_E_IO;
    *out = (part *)spdl_buffer(task);
    part_write(*out, in->value);
    return SPDL_OK;
}

static void a_batch_that_cannot_be_copied_is_left(void) {
    for (int workers = 0; workers < 2; ++workers) {
        spdl_pipeline_desc desc = { .workers = TEST_WORKERS(workers) };
        spdl_batch *kept[9];
        int count = 0;
        spdl_pipeline *p;
        desc.allocator.alloc_fn = count_alloc;
        desc.allocator.free_fn = count_free;
        desc.logger.log_fn = log_nothing;
        /* so large that none is made ahead */
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
                    COUNT_TO(9), SPDL_PIPE(fails_without_memory),
                    SPDL_BATCH(2, .item_bytes = 136 << 20), SPDL_SINK(1))) == SPDL_OK);
        while (SPDL_NEXT(p, &kept[count], SPDL_SECONDS(15)) == SPDL_OK) ++count;
        CHECK_EQ(count, 1);
        CHECK_EQ(spdl_pipeline_error(p)->result, SPDL_E_IO);
        spdl_pipeline_destroy(p);
        while (count > 0) spdl_batch_free(kept[--count]);
        allocations_left = -1;
        CHECK_EQ(allocations, 0);
        CHECK_EQ(items_alive(), 0);
    }
}

/* While the allocator makes one more batch, another call gets its part of one: no lock is held. */
typedef struct slow_allocator {
    bool armed;
    int in_alloc, asked, got;
} slow_allocator;

static void *slow_alloc(size_t bytes, size_t align, void *user) {
    slow_allocator *a = (slow_allocator *)user;
    if (__atomic_load_n(&a->armed, __ATOMIC_ACQUIRE) &&
        !__atomic_exchange_n(&a->in_alloc, 1, __ATOMIC_ACQ_REL)) {
        const int was = __atomic_load_n(&a->got, __ATOMIC_ACQUIRE);
        for (int i = 0; i < 5000 && __atomic_load_n(&a->got, __ATOMIC_ACQUIRE) == was; ++i)
            sleep_us(1000);
        CHECK(__atomic_load_n(&a->got, __ATOMIC_ACQUIRE) > was);
    }
    return test_memory(align, bytes);
}

static void slow_free(void *memory, size_t bytes, void *user) {
    (void)bytes, (void)user;
    test_memory_free(memory);
}

SPDL_FN(asks_for_a_part, item, char) {
    slow_allocator *a = (slow_allocator *)spdl_ctx(task);
    (void)in;
    *out = (char *)spdl_buffer(task);
    __atomic_add_fetch(&a->got, 1, __ATOMIC_ACQ_REL);
    sleep_us(100);
    return *out != NULL ? SPDL_OK : SPDL_E_NOMEM;
}

/* The consumer keeps its batches, so that more must be made. The first call that makes one waits
   for the next call: batches of one part each. */
static void alloc_under_lock(void) {
    static spdl_batch *kept[400];
    slow_allocator a = { .armed = false };
    spdl_pipeline_desc desc = { .workers = 2, .allocator = { slow_alloc, slow_free, &a } };
    spdl_pipeline *p;
    size_t count = 0;
    REQUIRE(spdl_pipeline_create(
                &p, &desc,
                SPDL_STAGES(COUNT_TO(400), SPDL_PIPE(asks_for_a_part, .ctx = &a, .concurrency = 2),
                            SPDL_BATCH(2, .item_bytes = 64), SPDL_SINK(2))) == SPDL_OK);
    __atomic_store_n(&a.armed, true, __ATOMIC_RELEASE);
    while (SPDL_NEXT(p, &kept[count], SPDL_SECONDS(15)) == SPDL_OK) ++count;
    CHECK_EQ(count, 200);
    CHECK_EQ(a.in_alloc, 1);
    while (count > 0) spdl_batch_free(kept[--count]);
    DONE(p);
}

SPDL_FN(gives_parts, void, char) {
    *out = (char *)spdl_buffer(task);
    return *out != NULL ? SPDL_OK : SPDL_E_NOMEM;
}

/* Three batches can wait in front of a row of batches, in place or not. */
static void three_batches_may_wait(void) {
    static const int sizes[] = { 1, 2, 32, 300, 1024, 5000 };
    for (int i = 0; i < 12; ++i) {
        const int size = sizes[i / 2];
        spdl_pipeline *p = START(1, SPDL_SOURCE(gives_parts, .item_bytes = i % 2 ? 0 : 8),
                                 SPDL_BATCH(size, .item_bytes = i % 2 ? 8 : 0), SPDL_SINK(1));
        spdl_stats stats;
        spdl_pipeline_stats(p, &stats);
        CHECK_EQ(stats.edge[0].buffer_size, size < 300 ? 3 * size : size == 300 ? 900 : 1024);
        spdl_pipeline_destroy(p);
    }
}

/* Nanoseconds a batch of one part, while the source is `ahead` batches ahead; the best of some. */
static double batch_ns(int ahead) {
    double best = 1e9;
    for (int i = 0; i < 5; ++i) {
        const int most = 2000;
        spdl_pipeline *p = START(1, SPDL_SOURCE(gives_parts, .buffer_size = ahead),
                                 SPDL_BATCH(1, .item_bytes = 8), SPDL_SINK(1));
        spdl_batch *batch;
        uint64_t since;
        double ns;
        while (stats_of(p, 0).tasks < (uint64_t)ahead) sleep_us(100);
        since = spdl_time_ns();
        for (int n = 0; n < most; ++n) {
            REQUIRE(SPDL_NEXT(p, &batch, SPDL_SECONDS(15)) == SPDL_OK);
            spdl_batch_free(batch);
        }
        ns = (double)(spdl_time_ns() - since) / most;
        best = ns < best ? ns : best;
        spdl_pipeline_destroy(p);
    }
    return best;
}

/* What a batch in place costs does not grow with those that are open. */
static void open_batches_linear(void) {
    const double few = batch_ns(64), many = batch_ns(16384);
    CHECK(many < 20 * few); /* 500, when a list was walked */
}

TEST_TABLE(batch){ TEST_CASE(a_source_writes_into_batches),
                   TEST_CASE(calls_write_into_batches_at_the_same_time),
                   TEST_CASE(dropped_parts_leave_no_gap),
                   TEST_CASE(epochs_do_not_share_a_batch),
                   TEST_CASE(batches_know_their_epoch),
                   TEST_CASE(other_items_are_copied),
                   TEST_CASE(buffers_are_copied_into_batches),
                   TEST_CASE(buffers_of_one_to_many_are_copied_into_batches),
                   TEST_CASE(calls_made_again_have_new_buffers),
                   TEST_CASE(deferred_calls_write_into_batches),
                   TEST_CASE(batches_in_place_can_be_left),
                   TEST_CASE(a_rewind_begins_a_new_batch),
                   TEST_CASE(a_failure_after_the_batch_waits_for_those_who_write),
                   TEST_CASE(a_failure_before_the_batch_delivers_what_was_whole),
                   TEST_CASE(buffers_come_back),
                   TEST_CASE(buffers_in_a_batch_come_back),
                   TEST_CASE(batches_are_taken_apart),
                   TEST_CASE(batches_are_taken_apart_in_each_epoch),
    TEST_CASE(what_was_taken_out_is_not_there),
                   TEST_CASE(wrong_use_is_a_failure),
                   TEST_CASE(rows_are_checked),
                   TEST_CASE(running_in_place_allocates_nothing),
                   TEST_CASE(any_allocation_may_fail),
                   TEST_CASE(batches_in_place_may_run_out),
    TEST_CASE(an_epoch_may_lag_behind),
    TEST_CASE(a_batch_that_cannot_be_copied_is_left),
                   TEST_CASE(alloc_under_lock),
                   TEST_CASE(open_batches_linear),
    TEST_CASE(three_batches_may_wait),
                   TEST_END };
