/* A run that was interrupted at any point goes on from a saved position and delivers, line by line,
   what it would have delivered: in a new pipeline or in the one that runs, at other numbers of
   workers, calls and places, and with a process of its own or without. */
#define ITEMS_PRIVATE
#include "flow.h"

#if defined(__linux__) && !defined(SPDL_OS_POSIX)
#define HAS_LOADERS 1
#else
#define HAS_LOADERS 0
#endif

/* --- what is delivered --- */

/* What the trainer got, one line for each item, batch, or end of an epoch. */
enum { EVENTS = 160, EPOCHS = 3, LINE = 128 };

typedef struct told_line {
    char text[LINE];
} told_line;

typedef struct story {
    told_line line[EVENTS];
    size_t count;
    spdl_result ended; /* SPDL_OK: it goes on */
} story;

static long value_of(const void *it) { return it != NULL ? ((const item *)it)->value : -1; }

static size_t tell_batch(char *line, const spdl_batch *batch) {
    size_t at = (size_t)snprintf(line, LINE, "%llu:", (unsigned long long)batch->sequence);
    for (size_t i = 0; i < batch->count; ++i)
        at += (size_t)snprintf(line + at, LINE - at, " %ld", value_of(batch->items[i]));
    return at;
}

typedef enum yields { ITEMS, BATCHES, BATCHES_OF_BATCHES } yields;

static void note_take(char *line, const void *taken, yields what) {
    const spdl_batch *all = (const spdl_batch *)taken;
    size_t at;
    if (what == ITEMS) {
        (void)snprintf(line, LINE, "%ld", value_of(taken));
    } else if (what == BATCHES) {
        (void)tell_batch(line, all);
    } else {
        at = (size_t)snprintf(line, LINE, "%llu{", (unsigned long long)all->sequence);
        for (size_t i = 0; i < all->count; ++i) {
            char part[LINE];
            (void)tell_batch(part, (const spdl_batch *)all->items[i]);
            at += (size_t)snprintf(line + at, LINE - at, "%s;", part);
        }
    }
}

/* The last row of a table that may run in a process: it writes the line. */
#define TOLD(name, In, what)                                                                       \
    SPDL_FN(name, In, told_line) {                                                                 \
        if ((*out = (told_line *)spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;                  \
        memset(*out, 0, sizeof **out);                                                             \
        note_take((*out)->text, in, what);                                                         \
        return SPDL_OK;                                                                            \
    }
TOLD(told_item, item, ITEMS)
TOLD(told_batch, spdl_batch, BATCHES)
TOLD(told_batches, spdl_batch, BATCHES_OF_BATCHES)

/* --- stages whose results are a function of their inputs --- */

static long many_epochs; /* 1: sources are continuous */
static int width = 3;    /* .concurrency of rows that have it */
static int places;       /* .buffer_size of some; 0: the default */

static uint64_t skipped; /* by the source */

/* An epoch has `length` items and one more for each epoch before; none in epoch 1 if it is 1. */
SPDL_FN(numbers, void, item) {
    const long length = (long)(uintptr_t)spdl_ctx(task);
    const uint64_t k = spdl_sequence(task), epoch = spdl_epoch(task);
    if (k >= (uint64_t)length + (length == 1 ? 0 : epoch) || (length == 1 && epoch == 1))
        return SPDL_END;
    if (length == 9 && k % 4 == 2 && skipped != epoch * 1000 + k) { /* which takes no number */
        skipped = epoch * 1000 + k;
        return SPDL_SKIP;
    }
    *out = item_make((long)(epoch * 1000 + k));
    return SPDL_OK;
}

/* Changes with epoch and number: what a resumed run has to restore. */
SPDL_FN(shake, item, item) {
    in->value = in->value * 100 + (long)((spdl_sequence(task) * 7 + spdl_epoch(task)) % 97);
    *out = in;
    return SPDL_OK;
}

SPDL_FN(keyed_shake, item, item) {
    in->value = in->value * 100 + (long)(spdl_item_key(task) % 97);
    *out = in;
    return SPDL_OK;
}

SPDL_FN(slow_shake, item, item) {
    sleep_us(in->value % 3 == 0 ? 100 : 0);
    return shake(task, in, out);
}

/* The same, completed before or after the call has returned. */
SPDL_FN(later_shake, item, item) {
    const spdl_deferred later = spdl_defer(task);
    item *made = item_make(in->value * 100 + (long)(spdl_sequence(task) % 7));
    CHECK_EQ(spdl_complete(later, SPDL_OK, made), SPDL_OK);
    (void)out;
    return SPDL_PENDING;
}

SPDL_FN(most_of_them, item, item) {
    *out = in;
    return in->value % 10 % 3 == 1 ? SPDL_SKIP : SPDL_OK;
}

SPDL_FN(fails_at_times, item, item) {
    *out = in;
    return in->value % 10 % 4 == 2 ? spdl_fail(task, "no %ld", in->value) : SPDL_OK;
}

SPDL_FN(fails_in_the_end, item, item) {
    *out = in;
    return in->value % 1000 >= 9 ? spdl_fail(task, "no more") : SPDL_OK;
}

enum { NO_FAULT = -1, NO_ROW = -2 };
static long fault = NO_ROW; /* value that fails in the row behind the source */
static int faults_allowed;

SPDL_FN(fails_at_the_fault, item, item) {
    *out = in;
    return in->value == fault ? spdl_fail(task, "%ld is damaged", fault) : SPDL_OK;
}

/* One to three of each; `none`: or none at all, and the last call has no result. */
static spdl_result one_of(spdl_task *task, long value, bool none, long *made) {
    long **at = (long **)spdl_call_state(task);
    if (*at == NULL) *at = (long *)calloc(1, sizeof **at);
    *made = value * 10 + **at;
    if (none) return (*at)[0]++ == value % 4 ? SPDL_SKIP : SPDL_AGAIN;
    return (*at)[0]++ == value % 3 ? SPDL_OK : SPDL_AGAIN;
}

SPDL_FN(one_by_one, item, item) {
    long made;
    const spdl_result result = one_of(task, in->value, false, &made);
    *out = item_make(made);
    return result;
}

SPDL_FN(some_of_each, item, item) {
    long made;
    const spdl_result result = one_of(task, in->value, true, &made);
    if (result == SPDL_AGAIN) *out = item_make(made);
    return result;
}

/* Packs: sums of values up to a limit, whole ones. */
typedef struct pack {
    long sum, limit;
} pack;

SPDL_FN(packs, item, item) {
    pack *held = (pack *)spdl_ctx(task);
    const long sum = held->sum, value = in ? in->value % 100 + 1 : 0;
    held->sum += value;
    if (!spdl_flushing(task) && held->sum <= held->limit) return SPDL_SKIP;
    held->sum = value;
    if (sum == 0) return SPDL_SKIP;
    *out = item_make(sum);
    return SPDL_OK;
}

SPDL_FN(by_three, item, item) {
    *out = in;
    return in->value % 10 == 7 ? SPDL_SKIP : spdl_route(task, (int)(in->value % 3));
}

SPDL_FN(by_two, item, item) {
    *out = in;
    return spdl_route(task, (int)(in->value / 2 % 2));
}

SPDL_FN(batches_by_two, spdl_batch, spdl_batch) {
    *out = in;
    return spdl_route(task, (int)(spdl_sequence(task) / 2 % 2));
}

/* A batch becomes another one, or none. */
SPDL_FN(most_batches, spdl_batch, spdl_batch) {
    *out = in;
    return spdl_sequence(task) % 3 == 1 ? SPDL_SKIP : SPDL_OK;
}

SPDL_FN(sums, spdl_batch, item) {
    *out = item_make((long)spdl_sequence(task) * 100000);
    for (size_t i = 0; i < in->count; ++i)
        (*out)->value += in->items[i] ? ((item *)in->items[i])->value : 0;
    return SPDL_OK;
}

SPDL_FN(sums_twice, spdl_batch, item) {
    long made = (long)in->count;
    const spdl_result result = one_of(task, (long)spdl_sequence(task), in->count == 1, &made);
    if (result != SPDL_SKIP) *out = item_make(made * 100 + value_of(in->items[0]) % 100);
    return result;
}

static item *part(spdl_task *task, long value) {
    item *it = (item *)spdl_buffer(task);
    if (it == NULL) return NULL;
    it->magic = ALIVE;
    it->value = value;
    return it;
}

SPDL_FN(in_place, void, item) {
    const uint64_t k = spdl_sequence(task), epoch = spdl_epoch(task);
    if (k >= 10 + epoch) return SPDL_END;
    *out = part(task, (long)(epoch * 1000 + k));
    return *out != NULL ? SPDL_OK : SPDL_E_NOMEM;
}

SPDL_FN(in_place_from, item, item) {
    *out = part(task, in->value * 100 + (long)spdl_epoch(task));
    if (*out == NULL) return SPDL_E_NOMEM;
    return in->value % 5 == 3 ? SPDL_SKIP : SPDL_OK;
}

SPDL_FN(the_same_for_ever, item, item) {
    static item same;
    *out = &same;
    return SPDL_AGAIN;
}

/* --- tables --- */

static pack held, held_too;

#define FROM(n)                                                                                    \
    SPDL_SOURCE(numbers, .ctx = (void *)(uintptr_t)(n), .continuous = many_epochs,                 \
                .free_item = item_free)
#define WIDE(...) SPDL_PIPE(__VA_ARGS__, .concurrency = width, .buffer_size = places)
#define FRESH(...) SPDL_PIPE(__VA_ARGS__, .free_item = item_free)
#define SOME FRESH(some_of_each, .again = true, .free_state = free)
#define AGAIN FRESH(one_by_one, .again = true, .buffer_size = places, .free_state = free)
#define PACKS(held) FRESH(packs, .flush = true, .ctx = &(held))
#define IN_PLACE(...) SPDL_BATCH(__VA_ARGS__, .item_bytes = sizeof(item))
#define BATCHED(...) what = BATCHES; ROWS(__VA_ARGS__)
#define ROWS(...)                                                                                  \
    const spdl_stage all[] = { __VA_ARGS__ };                                                      \
    memcpy(t->rows, all, sizeof all);                                                              \
    t->count = sizeof all / sizeof all[0];                                                         \
    break

enum { TABLES = 40 };

typedef struct table {
    spdl_stage rows[SPDL_MAX_STAGES];
    size_t count;
    yields what;
} table;

/* Without the last row and the sink. */
static void table_rows(table *t, int number) {
    yields what = ITEMS;
    switch (number) {
    case 0: { ROWS(FROM(10)); }
    case 1: { ROWS(FROM(10), WIDE(slow_shake)); }
    case 2: {
        ROWS(FROM(10), WIDE(most_of_them), WIDE(fails_at_times, .max_failures = -1),
             SPDL_PIPE(shake));
    }
    case 3: { ROWS(FROM(6), SOME); }
    case 4: { ROWS(FROM(6), AGAIN, WIDE(most_of_them)); }
    case 5: { ROWS(FROM(5), AGAIN, SOME, WIDE(keyed_shake)); }
    case 6: { ROWS(FROM(12), PACKS(held)); }
    case 7: { ROWS(FROM(12), WIDE(slow_shake), PACKS(held), WIDE(shake)); }
    case 8: { BATCHED(FROM(10), WIDE(slow_shake), SPDL_BATCH(3)); }
    case 9: {
        BATCHED(FROM(10), WIDE(most_of_them), SPDL_BATCH(3, .drop_last = true), WIDE(pass_batch));
    }
    case 10: { BATCHED(FROM(7), SOME, SPDL_BATCH(4)); }
    case 11: { BATCHED(FROM(7), AGAIN, SPDL_BATCH(2), WIDE(most_batches)); }
    case 12: { BATCHED(FROM(12), PACKS(held), SPDL_BATCH(2)); }
    case 13: { ROWS(FROM(11), SPDL_BATCH(3), WIDE(sums, .free_item = item_free)); }
    case 14: { BATCHED(SPDL_SOURCE(in_place, .continuous = many_epochs), IN_PLACE(4)); }
    case 15: { BATCHED(FROM(11), WIDE(in_place_from), IN_PLACE(4)); }
    case 16: { BATCHED(FROM(7), SOME, WIDE(in_place_from), IN_PLACE(3, .drop_last = true)); }
    case 17: {
        BATCHED(FROM(12), SPDL_BATCH(2), SPDL_BRANCH(batches_by_two), SPDL_PATH("odd"),
                WIDE(pass_batch), SPDL_PATH("even"), SPDL_MERGE());
    }
    case 18: {
        ROWS(FROM(12), SPDL_BRANCH(by_three), SPDL_PATH("a"), SPDL_PATH("b"), SPDL_PIPE(shake),
             SPDL_PATH("c"), SPDL_MERGE());
    }
    case 19: { ROWS(FROM(11), SPDL_BATCH(4), SPDL_UNBATCH(), WIDE(shake)); }
    case 20: {
        ROWS(FROM(11), SPDL_PIPE(most_of_them), SPDL_BATCH(2),
             FRESH(sums_twice, .again = true, .free_state = free));
    }
    case 21: {
        what = BATCHES_OF_BATCHES;
        ROWS(FROM(13), SPDL_BATCH(3), SPDL_BATCH(2));
    }
    case 22: {
        ROWS(FROM(12), SPDL_BRANCH(by_three), SPDL_PATH("a"), WIDE(most_of_them), SPDL_PATH("b"),
             WIDE(fails_at_times, .max_failures = -1), SPDL_PATH("c"), WIDE(slow_shake),
             SPDL_MERGE(), AGAIN);
    }
    case 23: {
        BATCHED(FROM(12), SPDL_BRANCH(by_two), SPDL_PATH("a"), SPDL_BRANCH(by_three),
                SPDL_PATH("aa"), SPDL_PATH("ab"), WIDE(most_of_them), SPDL_PATH("ac"),
                WIDE(slow_shake), SPDL_MERGE(), SPDL_PATH("b"), SPDL_PIPE(shake), SPDL_MERGE(),
                SPDL_BATCH(3));
    }
    case 24: {
        ROWS(FROM(12), SPDL_BATCH(2), WIDE(sums, .free_item = item_free), PACKS(held_too));
    }
    case 25: { ROWS(FROM(1), PACKS(held)); }
    case 26: { ROWS(FROM(12), PACKS(held), SOME, PACKS(held_too)); }
    case 27: { ROWS(FROM(12), SOME, PACKS(held), SPDL_PIPE(most_of_them)); }
    case 28: { BATCHED(FROM(1), SPDL_BATCH(2), SPDL_PIPE(pass_batch)); }
    case 29: {
        ROWS(FROM(9), AGAIN, SPDL_BRANCH(by_three), SPDL_PATH("a"), WIDE(most_of_them),
             SPDL_PATH("b"), WIDE(slow_shake), SPDL_PATH("c"), SPDL_MERGE(), SPDL_BATCH(3),
             SPDL_UNBATCH(), WIDE(most_of_them), SPDL_PIPE(shake));
    }
    case 30: { BATCHED(FROM(9), SPDL_BATCH(4), SPDL_UNBATCH(), SPDL_BATCH(3)); }
    case 31: {
        ROWS(FROM(13), WIDE(shake), SPDL_BATCH(3, .drop_last = true), SPDL_BRANCH(batches_by_two),
             SPDL_PATH("a"), WIDE(most_batches), SPDL_PATH("b"), SPDL_MERGE(), SPDL_UNBATCH(),
             WIDE(most_of_them));
    }
    case 32: { BATCHED(FROM(14), WIDE(fails_in_the_end), SPDL_BATCH(2)); }
    case 33: {
        ROWS(FROM(14), SPDL_BRANCH(by_three), SPDL_PATH("a"), WIDE(slow_shake), SPDL_PATH("b"),
             WIDE(fails_in_the_end), SPDL_PATH("c"), SPDL_MERGE(), SOME);
    }
    case 34: { BATCHED(FROM(8), AGAIN, IN_PLACE(3)); }
    case 35: {
        ROWS(FROM(6), SOME, AGAIN, SPDL_BATCH(2, .drop_last = true),
             FRESH(sums_twice, .again = true, .free_state = free), WIDE(most_of_them), AGAIN);
    }
    case 36: {
        const spdl_stage from = FROM(9);
        BATCHED(SPDL_SOURCE(numbers, .ctx = from.ctx, .threads = 1, .continuous = many_epochs,
                            .free_item = item_free), WIDE(slow_shake), SPDL_BATCH(2));
    }
    case 37: {
        BATCHED(FROM(9), WIDE(later_shake, .deferred = true, .free_item = item_free),
                WIDE(most_of_them), SPDL_BATCH(2));
    }
    case 38: {
        ROWS(FROM(9), SOME,
             SPDL_BRANCH(by_two), SPDL_PATH("a"), WIDE(keyed_shake), SPDL_PATH("b"), SPDL_MERGE());
    }
    default: {
        BATCHED(FROM(9), WIDE(in_place_from), IN_PLACE(2), WIDE(most_batches),
                SPDL_BRANCH(batches_by_two), SPDL_PATH("a"), WIDE(pass_batch), SPDL_PATH("b"),
                SPDL_MERGE());
    }
    }
    t->what = what;
}

#define ADD(...)                                                                                   \
    do {                                                                                           \
        const spdl_stage more[] = { __VA_ARGS__ };                                                 \
        memcpy(&t->rows[t->count], more, sizeof more);                                             \
        t->count += sizeof more / sizeof more[0];                                                  \
    } while (0)

/* Up to five things, one after the other, of which two at most make several of one. */
static void random_rows(table *t, int number) {
    uint64_t state = (uint64_t)number;
    int most = 1 + (int)(test_random(&state) % 5), many = 0, packed = 0;
    ADD(FROM(5 + test_random(&state) % 9));
    t->what = ITEMS;
    while (most-- > 0) {
        const int size = 1 + (int)(test_random(&state) % 4);
        switch (test_random(&state) % 12) {
        case 0: ADD(WIDE(keyed_shake)); break;
        case 1: ADD(WIDE(slow_shake)); break;
        case 2: ADD(WIDE(most_of_them)); break;
        case 3: ADD(WIDE(fails_at_times, .max_failures = -1)); break;
        case 4: ADD(WIDE(later_shake, .deferred = true, .free_item = item_free)); break;
        case 5: if (many++ < 2) ADD(SOME); break;
        case 6: if (many++ < 2) ADD(AGAIN); break;
        case 7: if (packed == 0) ADD(PACKS(held)); packed = 1; break;
        case 8: ADD(SPDL_BATCH(size, .drop_last = size == 3), SPDL_UNBATCH()); break;
        case 9: ADD(SPDL_BATCH(size), WIDE(sums, .free_item = item_free)); break;
        case 10:
            ADD(SPDL_BRANCH(by_two), SPDL_PATH("a"), WIDE(most_of_them), SPDL_PATH("b"),
                WIDE(slow_shake), SPDL_MERGE());
            break;
        default:
            ADD(SPDL_BATCH(size), SPDL_BRANCH(batches_by_two), SPDL_PATH("a"), WIDE(most_batches),
                SPDL_PATH("b"), SPDL_MERGE(), SPDL_UNBATCH());
        }
    }
    if (test_random(&state) % 2) return;
    ADD(SPDL_BATCH(3, .drop_last = number % 3 == 0));
    t->what = BATCHES;
}

/* `lines`: the last row writes the lines. */
static void table_fill(table *t, int number, bool lines) {
    memset(&held, 0, sizeof held);
    memset(&held_too, 0, sizeof held_too);
    held.limit = 9;
    held_too.limit = 25;
    memset(t, 0, sizeof *t);
    if (number < TABLES) table_rows(t, number);
    else random_rows(t, number);
    if (fault != NO_ROW) {
        const spdl_stage row = SPDL_PIPE(fails_at_the_fault, .max_failures = faults_allowed);
        memmove(&t->rows[2], &t->rows[1], (t->count++ - 1) * sizeof row);
        t->rows[1] = row;
    }
    if (lines) {
        const spdl_stage last[] = {
            WIDE(told_item, .item_bytes = sizeof(told_line)),
            WIDE(told_batch, .item_bytes = sizeof(told_line)),
            WIDE(told_batches, .item_bytes = sizeof(told_line)),
        };
        t->rows[t->count++] = last[t->what];
    }
    t->rows[t->count - 1].buffer_size = 0; /* the sink's */
    t->rows[t->count++] = (spdl_stage)SPDL_SINK(2);
}

/* --- a run --- */

typedef struct run_of {
    int number, workers;
    bool lines, apart; /* apart: in a process */
    int64_t next_works_ns;
    yields what;
    spdl_pipeline *p;
    spdl_loader *loader;
} run_of;

static void run_open(run_of *r) {
    spdl_error error = { .text = "" };
    spdl_result result;
    spdl_loader_desc desc;
    table t;
    memset(&desc, 0, sizeof desc);
    table_fill(&t, r->number, r->lines || r->apart);
    r->what = t.what;
    r->p = NULL;
    r->loader = NULL;
    desc.pipeline.workers = TEST_WORKERS(r->workers);
    desc.pipeline.next_works_ns = r->next_works_ns;
    desc.pipeline.logger.log_fn = desc.logger.log_fn = log_nothing;
    desc.fork_with_threads = true; /* a sanitizer may have one */
    desc.max_restarts = 9;
    desc.pipeline.error = desc.error = &error;
    result = r->apart ? spdl_loader_open(&r->loader, &desc, t.rows, t.count)
                      : spdl_pipeline_create(&r->p, &desc.pipeline, t.rows, t.count);
    if (result != SPDL_OK) (void)printf("    table %d: %s\n", r->number, error.text);
    REQUIRE(result == SPDL_OK);
}

static void run_close(run_of *r) {
    spdl_loader_close(r->loader);
    if (r->p != NULL) DONE(r->p);
}

static spdl_result run_next(run_of *r, char *line) {
    spdl_loader_batch batch;
    void *taken = NULL;
    spdl_result result;
    memset(&batch, 0, sizeof batch);
    if (r->loader != NULL) {
        result = spdl_loader_next(r->loader, &batch, SPDL_SECONDS(15));
        if (result != SPDL_OK) return result;
        memcpy(line, ((told_line *)batch.data)->text, LINE);
        return spdl_loader_done(r->loader, &batch);
    }
    result = spdl_pipeline_next(r->p, &taken, SPDL_SECONDS(15));
    if (result != SPDL_OK) return result;
    if (r->lines) {
        memcpy(line, ((told_line *)taken)->text, LINE);
        spdl_buffer_free(taken);
        return SPDL_OK;
    }
    note_take(line, taken, r->what);
    if (r->what == ITEMS) item_free(taken);
    else spdl_batch_free(taken);
    return SPDL_OK;
}

/* Takes `most` lines more, up to the end of all, or of EPOCHS of them. */
static void listen(run_of *r, story *s, size_t most) {
    size_t ends = 0;
    for (size_t i = 0; i < s->count; ++i) ends += s->line[i].text[0] == 'E';
    while (most-- > 0 && s->ended == SPDL_OK && s->count < EVENTS) {
        char *line = s->line[s->count].text;
        const spdl_result result = run_next(r, line);
        if (result != SPDL_OK) {
            (void)snprintf(line, LINE, "END %s", spdl_result_text(result));
            if (!many_epochs || result != SPDL_END || ++ends == EPOCHS) s->ended = result;
        }
        ++s->count;
    }
}

static void whole_story(story *s, int number) {
    run_of r = { .number = number };
    memset(s, 0, sizeof *s);
    run_open(&r);
    listen(&r, s, EVENTS);
    run_close(&r);
}

/* --- the same as if it had not been interrupted --- */

static void told_of(const char *what, const run_of *r, size_t from) {
    (void)printf("    %s: table %d, %d workers%s%s%s, width %d, places %d, epochs %ld, left after "
                 "%zu\n", what, r->number, r->workers, r->apart ? ", apart" : "",
                 r->lines ? ", lines" : "", r->next_works_ns ? ", next works" : "", width, places,
                 many_epochs, from);
}

static void same_from(const story *whole, const story *part, size_t from, const run_of *r) {
    for (size_t i = 0; i < part->count && from + i < whole->count; ++i)
        if (!CHECK_STR(part->line[i].text, whole->line[from + i].text)) {
            told_of("another line", r, from);
            return;
        }
    if (!CHECK_EQ(from + part->count, whole->count)) told_of("other lengths", r, from);
}

/* The line; a second one is the same. */
static void save(const spdl_pipeline *p, char *text) {
    char again[SPDL_STATE_BYTES];
    const int length = spdl_state_save(p, text, SPDL_STATE_BYTES);
    if (!CHECK(length > 0)) (void)printf("    %s\n", text);
    CHECK_EQ(length, strlen(text));
    CHECK(spdl_state_save(p, again, sizeof again) > 0);
    CHECK_STR(again, text);
}

/* And what is saved again before anything was taken. */
static void load(spdl_pipeline *p, const char *text) {
    char again[SPDL_STATE_BYTES];
    spdl_error error = { .text = "" };
    CHECK_EQ(spdl_state_load(p, &text, 1, SPDL_SECONDS(15), &error), SPDL_OK);
    CHECK_STR(error.text, "");
    save(p, again);
    CHECK_STR(again, text);
}

static void run_save(run_of *r, char *text) {
    int length;
    if (r->p != NULL) {
        save(r->p, text);
        return;
    }
    length = spdl_loader_state_save(r->loader, text, SPDL_STATE_BYTES);
    CHECK_EQ(length, strlen(text));
    if (!CHECK(length > 0)) (void)printf("    %s\n", text);
}

static void run_load(run_of *r, const char *text) {
    char again[SPDL_STATE_BYTES];
    spdl_error error = { .text = "" };
    if (r->p != NULL) {
        load(r->p, text);
        return;
    }
    CHECK_EQ(spdl_loader_state_load(r->loader, &text, 1, SPDL_SECONDS(15), &error), SPDL_OK);
    CHECK_STR(error.text, "");
    run_save(r, again);
    CHECK_STR(again, text);
}

/* Left after `k` lines, and gone on with in another run, or in this one when it has run on. */
static void it_goes_on_from(const story *whole, size_t k, run_of *from, run_of *to, bool here) {
    static story before, after;
    char text[SPDL_STATE_BYTES];
    size_t epochs = 0;
    memset(&before, 0, sizeof before);
    memset(&after, 0, sizeof after);
    run_open(from);
    listen(from, &before, k);
    for (size_t i = 0; i < k; ++i) /* epochs that are over */
        if (before.line[i].text[0] == 'E') after.line[epochs++].text[0] = 'E';
    run_save(from, text);
    if (here) {
        listen(from, &before, k % 7);
    } else {
        run_close(from);
        width = 1 + (width + 2) % 5; /* any number of calls, and of places */
        places = (int)(k % 3);
        run_open(to);
    }
    run_load(here ? from : to, text);
    after.count = epochs;
    listen(here ? from : to, &after, EVENTS);
    run_close(here ? from : to);
    memmove(&after.line[0], &after.line[epochs], (after.count - epochs) * sizeof after.line[0]);
    after.count -= epochs;
    same_from(whole, &after, k, here ? from : to);
}

static const int64_t works[] = { 0, SPDL_FOREVER, 20000 };

/* Every point of every table. Without epochs the end is what is new. */
static void goes_on_at_every_point(bool lines, bool apart) {
    static story whole;
    for (many_epochs = 0; many_epochs < 2; ++many_epochs)
        for (int number = 0; number < TABLES; ++number) {
            const size_t step = apart && TEST_SANITIZED ? 7 : 1;
            whole_story(&whole, number);
            REQUIRE(whole.count > 1 && whole.count < EVENTS);
            for (size_t k = many_epochs ? 0 : whole.count - 2; k + 1 <= whole.count; k += step) {
                const size_t other = (k + (size_t)number) / 3;
                run_of from = { .number = number, .workers = crowds[k % 4], .lines = lines,
                                .apart = apart && k % 2, .next_works_ns = works[k % 3] };
                run_of to = { .number = number, .workers = crowds[other % 4], .lines = lines,
                              .apart = apart && !from.apart, .next_works_ns = works[other % 3] };
                if (from.workers == 0 && from.apart) from.workers = 3;
                if (apart && k % 4 == 3) to.apart = true; /* from a process to one */
                it_goes_on_from(&whole, k, &from, &to, k % 3 == 2);
            }
        }
}

static void ordered_tables_go_on(void) { goes_on_at_every_point(false, false); }

/* Half of the runs are in a process: from there to here, the other way, and in the same one. */
static void with_a_process_or_without(void) {
    TEST_NEEDS_FORKS();
    if (HAS_LOADERS) goes_on_at_every_point(true, true);
}

/* The process of a run ends, sometimes; the next one goes on. */
static void run_kill(const run_of *r, uint64_t dice) {
    spdl_loader_status status;
    if (r->loader == NULL || dice % 3 != 0) return;
    spdl_loader_get_status(r->loader, &status);
    if (status.pid > 0) (void)kill((pid_t)status.pid, SIGKILL);
}

/* Random tables, at random points, again and again: each run takes some lines, and is gone on from
   at its last checkpoint, which may be some lines before. Processes are killed between all that,
   and started again. STATE_POINTS says how many kills
   (1,000 in `make torture`). */
static void random_kills_change_nothing(void) {
    static story all, part;
    const char *wanted = getenv("STATE_POINTS");
    const long points = wanted != NULL ? atol(wanted) : TEST_SANITIZED ? 30 : 120;
    uint64_t state = test_seed();
    chaos_on();
    many_epochs = 1;
    for (long i = 0; i < points;) {
        const uint64_t dice = test_random(&state) >> 34;
        const int number = (int)(dice % 4 == 0 ? dice / 4 % TABLES : TABLES + dice);
        char text[SPDL_STATE_BYTES] = "";
        size_t saved = 0;
        whole_story(&all, number);
        memset(&part, 0, sizeof part);
        const bool lines = HAS_LOADERS && test_random(&state) % 2;
        while (part.count < all.count && part.ended == SPDL_OK) {
            run_of r = { .number = number, .workers = (int)(test_random(&state) % 17),
                         .lines = lines, .apart = lines && test_random(&state) % 2,
                         .next_works_ns = works[test_random(&state) % 3] };
            width = 1 + (int)(test_random(&state) % 6);
            places = (int)(test_random(&state) % 4);
            run_open(&r);
            run_kill(&r, test_random(&state));
            if (text[0] != '\0') run_load(&r, text);
            run_kill(&r, test_random(&state));
            part.count = saved;
            listen(&r, &part, test_random(&state) % 23);
            if (part.ended == SPDL_OK && test_random(&state) % 2) {
                run_kill(&r, test_random(&state));
                run_save(&r, text);
                saved = part.count;
                listen(&r, &part, test_random(&state) % 5);
            }
            run_close(&r);
            ++i;
        }
        same_from(&all, &part, 0, &(run_of){ .number = number });
    }
}

#define COMPLETION .output_order = SPDL_ORDER_COMPLETION

static uint64_t number_in(const char *text, const char *name) {
    const char *at = strstr(text, name);
    return at != NULL ? strtoull(at + strlen(name), NULL, 10) : UINT64_MAX;
}

/* Only what has to be made again is: the item at hand, or the batch; the epoch with .flush. */
static void little_is_made_again(void) {
    static const struct {
        int number;
        size_t taken;
        uint64_t item;
    } cases[] = { { 0, 7, 7 }, { 3, 4, 3 }, { 8, 2, 6 }, { 10, 1, 3 }, { 19, 6, 4 }, { 6, 2, 0 } };
    many_epochs = 0;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        static story s;
        char text[SPDL_STATE_BYTES];
        run_of r = { .number = cases[i].number, .workers = 2 };
        memset(&s, 0, sizeof s);
        run_open(&r);
        listen(&r, &s, cases[i].taken);
        save(r.p, text);
        if (!CHECK_EQ(number_in(text, " item="), cases[i].item)) (void)printf("    %s\n", text);
        run_close(&r);
    }
}

/* Of one row with another concurrency, in input order. */
static void concurrency_may_change(void) {
    for (int from = 1; from <= 4; from += 3)
        for (int to = 1; to <= 4; to += 3) {
            char text[SPDL_STATE_BYTES];
            spdl_pipeline *p = START(4, FROM(10), SPDL_PIPE(slow_shake, .concurrency = from),
                                     SPDL_SINK(3));
            many_epochs = 0;
            TAKE(p, 3, "0 107 214");
            save(p, text);
            DONE(p);
            p = START(from, FROM(10), SPDL_PIPE(slow_shake, .concurrency = to), SPDL_SINK(1));
            load(p, text);
            TAKE(p, 2, "321 428");
            DONE(p);
        }
}

/* --- ranks --- */

enum { SHAPES = 6, ALL_OF_THEM = 61, RANKS = 16 };

SPDL_FN(of_index, spdl_index, item) {
    *out = item_make((long)in->position);
    (void)task;
    return SPDL_OK;
}

SPDL_FN(index_and_key, spdl_index, item) {
    *out = (item *)malloc(sizeof **out);
    REQUIRE(*out != NULL);
    (*out)->magic = (uint32_t)in->position;
    (*out)->value = (long)spdl_item_key(task);
    return SPDL_OK;
}

typedef struct rank_run {
    spdl_sampler *sampler, *part[2]; /* parts: of a mixture */
    spdl_pipeline *p;
    char text[SPDL_STATE_BYTES];
    int ended; /* epochs */
} rank_run;

#define INDEX(s) SPDL_INDEX(s, .continuous = true)
#define OF_INDEX(...) SPDL_PIPE(of_index, .free_item = item_free, __VA_ARGS__)

static bool shape_of_batches(int shape) { return shape % 5 == 1 || shape == 3 || shape == 4; }

static void rank_open(rank_run *r, int shape, int rank, int world, uint64_t seed) {
    spdl_sampler_desc desc = { .count = ALL_OF_THEM, .order = SPDL_SAMPLE_SHUFFLED, .seed = 5 };
    const int workers = (int)(seed % 3);
    desc.ranks.rank = rank;
    desc.ranks.world = world;
    memset(r, 0, sizeof *r);
    if (shape == 4 || shape == 6) {
        const uint64_t lengths[] = { 20, ALL_OF_THEM - 20 };
        static const double weights[] = { 1, 2 };
        for (int i = 0; i < 2; ++i) {
            const spdl_sampler_desc part = { .count = lengths[i], .order = SPDL_SAMPLE_SHUFFLED };
            REQUIRE(spdl_sampler_create(&r->part[i], &part) == SPDL_OK);
        }
        desc.count = 0;
        desc.draws = ALL_OF_THEM;
        desc.order = SPDL_SAMPLE_MIXTURE;
        desc.sources = 2;
        desc.weights = weights;
        desc.samplers = r->part;
    }
    REQUIRE(spdl_sampler_create(&r->sampler, &desc) == SPDL_OK);
    switch (shape) {
    case 0:
        r->p = START(workers, INDEX(r->sampler), OF_INDEX(.concurrency = 2), SPDL_SINK(2));
        break;
    case 1:
        r->p = START(workers, INDEX(r->sampler), OF_INDEX(.concurrency = 2),
                     SPDL_PIPE(most_of_them, .concurrency = 2), SPDL_BATCH(3), SPDL_SINK(2));
        break;
    case 2:
        r->p = START(workers, INDEX(r->sampler), OF_INDEX(.concurrency = 2),
                     SOME, SPDL_SINK(3));
        break;
    case 3:
        r->p = START(workers, INDEX(r->sampler), OF_INDEX(.concurrency = 2),
                     SOME, SPDL_BATCH(4), SPDL_SINK(3));
        break;
    case 4:
        r->p = START(workers, INDEX(r->sampler), OF_INDEX(.concurrency = 2),
                     AGAIN, SPDL_PIPE(most_of_them), SPDL_BATCH(2),
                     SPDL_SINK(2));
        break;
    case 6:
        r->p = START(workers, INDEX(r->sampler), OF_INDEX(.concurrency = 2), SPDL_BATCH(2),
                     SPDL_SINK(2));
        break;
    default:
        r->p = START(workers, INDEX(r->sampler),
                     OF_INDEX(.concurrency = 2), SPDL_BATCH(4), SPDL_UNBATCH(), SPDL_SINK(2));
    }
}

static void rank_close(rank_run *r) {
    spdl_pipeline_destroy(r->p);
    spdl_sampler_destroy(r->sampler);
    for (int i = 0; i < 2; ++i) spdl_sampler_destroy(r->part[i]);
}

/* Takes up to `most` items or batches, to the end of the epoch. */
static size_t rank_take(rank_run *r, int shape, long *values, long most) {
    size_t count = 0;
    while (most-- > 0 && r->ended == 0) {
        void *taken = NULL;
        const spdl_result result = spdl_pipeline_next(r->p, &taken, SPDL_SECONDS(15));
        if (result != SPDL_OK) {
            CHECK_EQ(result, SPDL_END);
            ++r->ended;
        } else if (shape_of_batches(shape)) {
            for (size_t i = 0; i < ((spdl_batch *)taken)->count; ++i)
                values[count++] = ((item *)((spdl_batch *)taken)->items[i])->value;
            spdl_batch_free(taken);
        } else {
            values[count++] = ((item *)taken)->value;
            item_free(taken);
        }
    }
    return count;
}

/* All ranks of this world; when there was one before they go on from its texts. */
static void world_open(rank_run *ranks, int shape, int world, rank_run *before, int before_world,
                       uint64_t *state) {
    const char *texts[RANKS];
    for (int i = 0; i < before_world; ++i) texts[before_world - 1 - i] = before[i].text;
    for (int i = 0; i < world; ++i) {
        spdl_error error = { .text = "" };
        char again[SPDL_STATE_BYTES];
        rank_open(&ranks[i], shape, i, world, test_random(state));
        if (before_world == 0) continue;
        CHECK_EQ(spdl_state_load(ranks[i].p, texts, before_world, SPDL_FOREVER, &error), SPDL_OK);
        CHECK_STR(error.text, "");
        save(ranks[i].p, again);
    }
}

/* The seed of an item is the same on any rank. */
static void keys_are_the_same_on_any_rank(void) {
    static uint64_t keys[2][2 * ALL_OF_THEM], found;
    for (int world = 1; world <= 3; world += 2) {
        for (int rank = 0; rank < world; ++rank) {
            spdl_sampler_desc desc = { .count = ALL_OF_THEM, .seed = 5,
                                       .ranks = { .rank = rank, .world = world } };
            spdl_sampler *s = NULL;
            spdl_pipeline *p;
            REQUIRE(spdl_sampler_create(&s, &desc) == SPDL_OK);
            p = START(2, INDEX(s), SPDL_PIPE(index_and_key, .free_item = free,
                                             .concurrency = 2), SPDL_SINK(2));
            for (int epoch = 0; epoch < 2;) {
                item *it = NULL;
                if (SPDL_NEXT(p, &it, SPDL_SECONDS(15)) == SPDL_END) ++epoch;
                else keys[world / 2][epoch * ALL_OF_THEM + (int)it->magic] = (uint64_t)it->value;
                if (it != NULL) free(it);
            }
            spdl_pipeline_destroy(p);
            spdl_sampler_destroy(s);
        }
    }
    for (int i = 0; i < 2 * ALL_OF_THEM; ++i) {
        CHECK_EQ(keys[0][i], keys[1][i]);
        for (int k = 0; k < i; ++k) found += keys[0][i] == keys[0][k];
    }
    CHECK_EQ(found, 0);
}

static void refused_of(spdl_pipeline *p, const char *const *texts, int count, spdl_result result,
                       const char *why) {
    spdl_error error = { .text = "" };
    CHECK_EQ(spdl_state_load(p, texts, count, SPDL_SECONDS(15), &error), result);
    CHECK_STR(error.text, why);
}

static void texts_of_other_ranks_are_refused(void) {
    static rank_run r[3], other;
    const char *texts[] = { r[0].text, r[1].text, r[2].text };
    const char *twice[] = { r[0].text, r[1].text, r[1].text };
    spdl_sampler_desc desc = { .count = 62, .order = SPDL_SAMPLE_SHUFFLED, .seed = 5 };
    spdl_sampler *s = NULL;
    spdl_pipeline *p;
    long value;
    for (int shape = 0; shape < 6; shape += 5) {
        for (int i = 0; i < 3; ++i) {
            rank_open(&r[i], shape, i, 3, 1);
            (void)rank_take(&r[i], shape, &value, 1);
            save(r[i].p, r[i].text);
        }
        rank_open(&other, shape, 0, 2, 1);
        if (shape == 5) {
            refused_of(other.p, texts, 3, SPDL_E_UNSUPPORTED,
                       "spdl_state_load: text 0 and the others are of 3 ranks that had not "
                       "taken the same number of whole items. Save where all ranks have, or at the "
                       "end of an epoch");
            load(r[1].p, r[1].text); /* the same number can */
        } else {
            refused_of(other.p, texts, 1, SPDL_E_INVALID,
                       "spdl_state_load: text 0 is of rank 0 of 3, this is rank 0 of 2: pass "
                       "the texts of all 3, not of 1");
            refused_of(r[1].p, texts, 1, SPDL_E_INVALID,
                       "spdl_state_load: text 0 is of rank 0 of 3, this is rank 1 of 3: pass "
                       "the texts of all 3, not of 1");
            refused_of(other.p, twice, 3, SPDL_E_INVALID,
                       "spdl_state_load: text 2 is the second one of rank 1");
            CHECK_EQ(spdl_state_load(r[1].p, texts, 3, SPDL_FOREVER, NULL), SPDL_OK);
            CHECK_EQ(rank_take(&r[1], 0, &value, 1), 1);
            CHECK_EQ(value, 4); /* its own */
            for (int k = 0; k < 2; ++k) (void)rank_take(&r[2], 0, &value, 1); /* it goes ahead */
            save(r[2].p, r[2].text);
            refused_of(r[1].p, texts, 3, SPDL_E_INVALID,
                       "spdl_state_load: text 2 is of epoch 0 after 3 items, and the text of this "
                       "rank of epoch 0 after 1: they are not of the same step. To load it anyway "
                       "pass the text of this rank alone");
            load(r[1].p, r[1].text);
            CHECK_EQ(rank_take(&r[1], 0, &value, 1), 1);
            CHECK_EQ(value, 4);
            while (r[2].ended == 0) (void)rank_take(&r[2], 0, &value, 1);
            save(r[2].p, r[2].text);
            refused_of(other.p, texts, 3, SPDL_E_INVALID,
                       "spdl_state_load: text 2 was not saved in the same epoch as text 0, "
                       "or not by the same run");
            REQUIRE(spdl_sampler_create(&s, &desc) == SPDL_OK);
            p = START(1, INDEX(s), OF_INDEX(.concurrency = 2), SPDL_SINK(2));
            refused_of(p, texts, 3, SPDL_E_INVALID,
                       "spdl_state_load: text 0 does not fit: the sampler's count is 62, "
                       "in the saved run it was 61; to load it anyway, correct it and end it with "
                       "sum=none");
            spdl_pipeline_destroy(p);
            spdl_sampler_destroy(s);
        }
        for (int i = 0; i < 3; ++i) rank_close(&r[i]);
        rank_close(&other);
    }
}

/* When all ranks are level the items come in the order that one rank has them in. */
static void level_ranks_keep_the_order(void) {
    static rank_run now[RANKS], then[RANKS];
    uint64_t state = test_seed();
    for (int from = 1; from <= RANKS; ++from)
        for (int to = 1; to <= RANKS; to += TEST_SANITIZED ? 5 : 1) {
            long value, at = 0;
            world_open(then, 0, from, NULL, 0, &state);
            for (int step = 0; step < 2; ++step)
                for (int i = 0; i < from; ++i) {
                    CHECK_EQ(rank_take(&then[i], 0, &value, 1), 1);
                    CHECK_EQ(value, at++);
                }
            for (int i = 0; i < from; ++i) save(then[i].p, then[i].text);
            for (int i = 0; i < from; ++i) rank_close(&then[i]);
            world_open(now, 0, to, then, from, &state);
            for (; at + to <= ALL_OF_THEM;)
                for (int i = 0; i < to; ++i) {
                    CHECK_EQ(rank_take(&now[i], 0, &value, 1), 1);
                    CHECK_EQ(value, at++);
                }
            for (int i = 0; i < to; ++i) { /* back to all items */
                CHECK_EQ(spdl_pipeline_rewind(now[i].p, 0, SPDL_SECONDS(15)), SPDL_OK);
                CHECK_EQ(rank_take(&now[i], 0, &value, 1), 1);
                CHECK_EQ(value, i);
                rank_close(&now[i]);
            }
        }
}

/* --- what is refused --- */

static void refused(spdl_pipeline *p, const char *text, spdl_result result, const char *why) {
    spdl_error error = { .text = "" };
    char whole[SPDL_TEXT_BYTES];
    (void)snprintf(whole, sizeof whole, "spdl_state_load: %s", why);
    CHECK_EQ(spdl_state_load(p, &text, 1, SPDL_SECONDS(15), &error), result);
    CHECK_STR(error.text, whole);
    CHECK_EQ(spdl_state_load(p, &text, 1, SPDL_SECONDS(15), NULL), result);
}

/* `from` becomes `to`, and the sum is right, or as said. */
static void edited(char *edit, const char *text, const char *from, const char *to,
                   const char *sum) {
    const char *at = strstr(text, from);
    size_t length;
    if (!CHECK(at != NULL)) return;
    (void)snprintf(edit, SPDL_STATE_BYTES, "%.*s%s%s", (int)(at - text), text, to,
                   at + strlen(from));
    at = strstr(edit, " sum=");
    if (at == NULL) return;
    length = (size_t)(at - edit);
    if (sum == NULL)
        (void)snprintf(edit + length, SPDL_STATE_BYTES - length, " sum=%08x",
                       (unsigned)spdl__state_sum(edit, length));
    else if (sum[0] != '\0')
        (void)snprintf(edit + length, SPDL_STATE_BYTES - length, " sum=%s", sum);
}
/* The text with one more field, or another value of one; by hand, so without a sum. */
static const char *by_hand(const char *text, const char *from, const char *to) {
    static char edit[8][SPDL_STATE_BYTES];
    static int turn;
    edited(edit[++turn % 8], text, from, to, "none");
    return edit[turn % 8];
}

/* Joins texts of three ranks, of which one was written by hand. */
static void texts_that_do_not_join(void) {
    static const struct {
        int changed; /* this text */
        const char *from, *to;
        spdl_result result;
        const char *told;
    } cases[] = {
        { 1, " sum=", " from=0:3 sum=", SPDL_E_INVALID, "text 1 was not saved in the same epoch" },
        { 1, " sum=", " from=1:0 sum=", SPDL_E_INVALID, "text 1 was not saved in the same epoch" },
        { 0, " sum=", " from=0:3 sum=", SPDL_E_INVALID, "text 1 was not saved in the same epoch" },
        { 1, "item=1", "item=2", SPDL_E_UNSUPPORTED, "text 0 and the others are of 3 ranks" },
        { 0, "results=0", "results=1", SPDL_E_UNSUPPORTED, "text 0 and the others are of 3" },
        { 2, "drops=0", "drops=1", SPDL_E_UNSUPPORTED, "text 0 and the others are of 3 ranks" },
        { 0, "item=1", "item=60", SPDL_E_UNSUPPORTED, "text 0 and the others are of 3 ranks" },
        { 0, "item=1 results=0", "item=60 results=1", SPDL_E_UNSUPPORTED, "text 0 and the others" },
        { 1, " sum=", " sun=", SPDL_E_FORMAT, "text 1 has no 'sum='" },
        { 0, "item=1", "item=68719476736", SPDL_E_FORMAT, "text 0 has an invalid 'item='" },
        { 2, "data=0", "data=x", SPDL_E_INVALID, "text 2 is of another data set: data=x" },
        { 2, "rank=2/3", "rank=2/4294967299", SPDL_E_FORMAT, "text 2 has no valid 'rank='" },
        { 2, "rank=2/3", "rank=3/3", SPDL_E_FORMAT, "text 2 has no valid 'rank='" },
        { 2, "rank=2/3", "rank=2", SPDL_E_FORMAT, "text 2 has no valid 'rank='" },
        { 2, "rank=2/3", "rack=2/3", SPDL_E_FORMAT, "text 2 has no valid 'rank='" },
        { 2, "batch=", "bad=", SPDL_E_FORMAT, "text 2 has no 'batch='" },
    };
    static rank_run r[3], other;
    const char *texts[3];
    long value;
    for (int i = 0; i < 3; ++i) {
        rank_open(&r[i], 0, i, 3, 1);
        CHECK_EQ(rank_take(&r[i], 0, &value, 1), 1);
        save(r[i].p, r[i].text);
    }
    rank_open(&other, 0, 0, 2, 1);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        spdl_error error = { .text = "" };
        for (int k = 0; k < 3; ++k) texts[k] = r[k].text;
        texts[cases[i].changed] = by_hand(r[cases[i].changed].text, cases[i].from, cases[i].to);
        CHECK_EQ(spdl_state_load(other.p, texts, 3, SPDL_FOREVER, &error), cases[i].result);
        if (!CHECK(strstr(error.text, cases[i].told) != NULL))
            fprintf(stderr, "  %zu: %s\n", i, error.text);
    }
    for (int at = 20; at < 23; ++at) { /* the last whole row, the last item, and behind it */
        char to[20];
        (void)snprintf(to, sizeof to, "item=%d", at);
        for (int k = 0; k < 3; ++k) texts[k] = by_hand(r[k].text, "item=1", to);
        CHECK_EQ(spdl_state_load(other.p, texts, 3, SPDL_FOREVER, NULL), SPDL_OK);
        other.ended = 0;
        CHECK_EQ(rank_take(&other, 0, &value, 1), at == 20);
        if (at == 20) CHECK_EQ(value, 60);
    }
    texts[1] = by_hand(r[1].text, "item=1", "item=40"); /* and not the same, but all at the end */
    texts[2] = by_hand(r[2].text, "item=1", "item=20");
    CHECK_EQ(spdl_state_load(other.p, texts, 3, SPDL_FOREVER, NULL), SPDL_OK);
    other.ended = 0;
    CHECK_EQ(rank_take(&other, 0, &value, 1), 0);
    for (int i = 0; i < 3; ++i) rank_close(&r[i]);
    rank_close(&other);
}

/* Ends of lines and where a run of other ranks began. */
static void texts_that_were_edited(void) {
    static const char *const ends[] = { "\n", "\r\n", "  \r\n", " " };
    static const char *const froms[] = { "7", "0:", ":3", "0:x", "0:62", "7:62" };
    static rank_run r;
    char text[SPDL_STATE_BYTES];
    const char *texts[] = { text, NULL };
    long value;
    rank_open(&r, 0, 0, 1, 1);
    save(r.p, r.text);
    for (int i = 0; i < 8; ++i) {
        const char *line = i % 2 ? by_hand(r.text, "item=0", "item=2") : r.text;
        (void)snprintf(text, sizeof text, "%s%s", line, ends[i / 2]);
        CHECK_EQ(spdl_state_load(r.p, texts, 1, SPDL_FOREVER, NULL), SPDL_OK);
        CHECK_EQ(rank_take(&r, 0, &value, 1), 1);
        CHECK_EQ(value, i % 2 ? 2 : 0);
    }
    for (size_t i = 0; i < sizeof froms / sizeof froms[0]; ++i) {
        char field[30];
        (void)snprintf(field, sizeof field, " from=%s sum=", froms[i]);
        refused_of(r.p, (const char *[]){ by_hand(r.text, " sum=", field) }, 1, SPDL_E_FORMAT,
                   "spdl_state_load: text 0 has no EPOCH:POSITION in 'from='");
    }
    edited(text, r.text, " sum=", " from=0:61 sum=", NULL); /* all were had before */
    load(r.p, text);
    CHECK_EQ(rank_take(&r, 0, &value, 1), 0);
    refused_of(r.p, texts, 2, SPDL_E_INVALID,
               "spdl_state_load: no pipeline, or text 1 is not there");
    refused_of(r.p, texts, 0, SPDL_E_INVALID,
               "spdl_state_load: no pipeline, or text 0 is not there");
    CHECK_EQ(spdl_state_save(NULL, text, sizeof text), SPDL_E_INVALID);
    CHECK_EQ(spdl_state_save(r.p, NULL, sizeof text), SPDL_E_INVALID);
    CHECK_EQ(spdl_state_save(r.p, text, 0), SPDL_E_INVALID);
    rank_close(&r);
}

static uint64_t last_index(void *ctx, uint64_t epoch, uint64_t position) {
    (void)ctx, (void)epoch;
    return position;
}

/* The largest numbers there are make a text that fits by far. */
static void the_longest_text(void) {
    const spdl_sampler_desc order = { .count = (uint64_t)1 << 63, .draws = (uint64_t)1 << 63,
                                      .order = SPDL_SAMPLE_FUNCTION, .seed = UINT64_MAX,
                                      .index_fn = last_index,
                                      .ranks = { INT32_MAX - 1, INT32_MAX } };
    const spdl_pipeline_desc desc = { .workers = 1, .seed = UINT64_MAX, .data_hash = UINT64_MAX };
    char text[SPDL_STATE_BYTES];
    spdl_sampler *s = NULL;
    spdl_pipeline *p = NULL;
    REQUIRE(spdl_sampler_create(&s, &order) == SPDL_OK);
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(INDEX(s), SPDL_SINK(1))) == SPDL_OK);
    s->from = (uint64_t)1 << 63;
    s->from_epoch = UINT64_MAX;
    CHECK(spdl_state_save(p, text, sizeof text) > 300);
    /* of nine numbers most have one digit here, and may have 20 */
    CHECK(strlen(text) + 6 * 19 < 500);
    spdl_pipeline_destroy(p);
    spdl_sampler_destroy(s);
}

static bool no_more; /* memory */

static void *some_memory(size_t bytes, size_t align, void *user) {
    (void)user;
    return no_more ? NULL : test_memory(align, bytes);
}

static void give_back(void *memory, size_t bytes, void *user) {
    (void)bytes, (void)user;
    test_memory_free(memory);
}

static int gate, inside;

SPDL_FN(waits_at_the_gate, item, item) {
    __atomic_store_n(&inside, 1, __ATOMIC_RELEASE);
    await(&gate, 1);
    *out = in;
    return SPDL_OK;
}

/* Without memory, while a call runs, and after a fork. */
static void loads_that_fail(void) {
    const spdl_sampler_desc order = { .count = 5 };
    const spdl_pipeline_desc desc = { .workers = 1, .allocator = { some_memory, give_back, NULL } };
    spdl_error error = { .text = "" };
    char text[SPDL_STATE_BYTES];
    const char *texts[] = { text };
    spdl_sampler *s = NULL;
    spdl_pipeline *p = NULL;
    REQUIRE(spdl_sampler_create(&s, &order) == SPDL_OK);
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(INDEX(s), SPDL_SINK(1))) == SPDL_OK);
    save(p, text);
    no_more = true;
    refused_of(p, texts, 1, SPDL_E_NOMEM, "spdl_state_load: no memory");
    no_more = false;
    load(p, text);
    spdl_pipeline_destroy(p);
    spdl_sampler_destroy(s);
    p = START(2, FROM(9), SPDL_PIPE(waits_at_the_gate), SPDL_SINK(3));
    save(p, text);
    await(&inside, 1);
    CHECK_EQ(spdl_state_load(p, texts, 1, 1, &error), SPDL_TIMEOUT);
    CHECK_STR(error.text, "spdl_state_load: calls still run: the pipeline is stopped");
    open_gate(&gate);
    load(p, text);
    TAKE(p, 2, "0 1");
    DONE(p);
}


static void a_text_that_does_not_fit_is_refused(void) {
    char text[SPDL_STATE_BYTES], edit[SPDL_STATE_BYTES];
    spdl_pipeline *p, *other;
    many_epochs = 0;
    p = START(2, FROM(10), SPDL_PIPE(slow_shake, .concurrency = 4), SPDL_SINK(3));
    other = START(2, FROM(6), SOME, SPDL_SINK(3));
    save(p, text);
    refused(p, "", SPDL_E_FORMAT, "text 0 is not what spdl_state_save has written");
    refused(p, "{ 'epoch': 3 }", SPDL_E_FORMAT, "text 0 is not what spdl_state_save has written");
    edited(edit, text, "state.1", "state.22", NULL);
    refused(p, edit, SPDL_E_FORMAT, "text 0 is of version 22, this is version 1");
    edited(edit, text, "epoch=0", "epoch=1", "");
    refused(p, edit, SPDL_E_CHECKSUM, "text 0 was changed: its sum is wrong; to load it "
                                      "anyway, end it with sum=none");
    edited(edit, text, "epoch=0", "", NULL);
    refused(p, edit, SPDL_E_FORMAT, "text 0 has no 'epoch='");
    edited(edit, text, "item=0", "item=99999999999999999999", NULL);
    refused(p, edit, SPDL_E_FORMAT, "text 0 has an invalid 'item='");
    edited(edit, text, "item=0", "item=-1", "none");
    refused(p, edit, SPDL_E_FORMAT, "text 0 has an invalid 'item='");
    edited(edit, text, " data=0", " data=7", NULL);
    refused(p, edit, SPDL_E_INVALID,
            "text 0 is of another data set: data=7, here data=0; to load it anyway, delete this "
            "field and end it with sum=none");
    edited(edit, text, "seed=0", "seed=8", NULL);
    refused(p, edit, SPDL_E_INVALID,
            "text 0 is of a run with another seed: item_seed=8, here item_seed=0; to load it "
            "anyway, delete this field and end it with sum=none");
    (void)spdl_state_save(other, edit, sizeof edit);
    CHECK(spdl_state_load(p, (const char *[]){ edit }, 1, 0, NULL) == SPDL_E_INVALID);
    spdl_pipeline_destroy(other);
    TAKE(p, 3, "0 107 214"); /* it goes on as if nothing had been asked */
    edited(edit, text, "item_seed=0 ", "", "none"); /* all the same */
    CHECK_EQ(spdl_state_load(p, (const char *[]){ edit }, 1, SPDL_FOREVER, NULL), SPDL_OK);
    TAKE(p, 2, "0 107");
    CHECK_EQ(spdl_state_load(p, NULL, 1, 0, NULL), SPDL_E_INVALID);
    CHECK_EQ(spdl_state_load(p, (const char *[]){ text, text }, 2, 0, NULL), SPDL_E_INVALID);
    CHECK_EQ(spdl_state_load(NULL, (const char *[]){ text }, 1, 0, NULL), SPDL_E_INVALID);
    DONE(p);
}

/* Any byte changed, any end cut off: refused, and never worse. */
static void a_damaged_text_is_refused(void) {
    char text[SPDL_STATE_BYTES], edit[SPDL_STATE_BYTES];
    const char *texts[] = { edit };
    uint64_t state = test_seed();
    size_t length;
    spdl_pipeline *p;
    int loaded = 0;
    many_epochs = 1;
    p = START(1, FROM(7), SOME, SPDL_BATCH(4), SPDL_SINK(2));
    for (int i = 0; i < 3; ++i) {
        spdl_batch *batch = NULL;
        REQUIRE(SPDL_NEXT(p, &batch, SPDL_SECONDS(15)) == SPDL_OK);
        spdl_batch_free(batch);
    }
    save(p, text);
    length = strlen(text);
    for (size_t i = 0; i < length; ++i) {
        memcpy(edit, text, sizeof edit);
        edit[i] = (char)(edit[i] ^ 1 << test_random(&state) % 7);
        CHECK(spdl_state_load(p, texts, 1, 0, NULL) < 0);
        memcpy(edit, text, sizeof edit);
        edit[i] = '\0';
        CHECK(spdl_state_load(p, texts, 1, 0, NULL) < 0);
    }
    for (int i = 0; i < 2000; ++i) { /* and what nobody checks is some position, or refused */
        edited(edit, text, " item_seed", " item_seed", "none");
        for (int k = 0; k < 9; ++k) { /* mostly digits become others */
            char *at = &edit[14 + test_random(&state) % (length - 30)];
            if (*at >= '0' && *at <= '9') *at = (char)('0' + (int)(test_random(&state) % 10));
        }
        loaded += spdl_state_load(p, texts, 1, SPDL_SECONDS(15), NULL) == SPDL_OK;
    }
    CHECK(loaded > 0);
    edited(edit, text, " item_seed", " item_seed", "none");
    load(p, text);
    texts[0] = (char *)memset(malloc(SPDL_STATE_BYTES), ',', SPDL_STATE_BYTES); /* without end */
    CHECK_EQ(spdl_state_load(p, texts, 1, 0, NULL), SPDL_E_FORMAT);
    free((void *)(uintptr_t)texts[0]);
    DONE(p);
}

static void unsaved(spdl_pipeline *p, const char *why) {
    char text[SPDL_STATE_BYTES], whole[SPDL_STATE_BYTES];
    const char *texts[] = { text };
    spdl_error error;
    (void)snprintf(whole, sizeof whole, "the position of this pipeline cannot be saved: %s",
                   why);
    CHECK_EQ(spdl_state_save(p, text, sizeof text), SPDL_E_UNSUPPORTED);
    CHECK_STR(text, whole);
    CHECK_EQ(spdl_state_load(p, texts, 1, 0, &error), SPDL_E_UNSUPPORTED);
    DONE(p);
}

static spdl_result none_to_come(void *source, void **out, int64_t timeout_ns) {
    (void)source, (void)out, (void)timeout_ns;
    return SPDL_END;
}

static void some_tables_have_no_position(void) {
    const char *why = "its order is not always the same: a row has completion order, or a merge "
                      "takes what is ready";
    many_epochs = 0;
    unsaved(START(1, SPDL_FEED(item, .free_item = item_free), SPDL_PIPE(pass_on), SPDL_SINK(1)),
            "its items are pushed (SPDL_FEED)");
    unsaved(START(1, SPDL_FROM(item, none_to_come, NULL), SPDL_SINK(1)),
            "SPDL_FROM cannot start at a later item");
    unsaved(START(1, FROM(9), SPDL_PIPE(pass_on, .concurrency = 2, COMPLETION), SPDL_SINK(1)),
            why); /* and the source skips */
    unsaved(START(1, FROM(5), SPDL_PIPE(pass_on, .concurrency = 2, COMPLETION), SPDL_BATCH(2),
                  SPDL_SINK(1)), why);
    unsaved(START(1, FROM(5), SPDL_BRANCH(by_three), SPDL_PATH("a"), SPDL_PATH("b"),
                  SPDL_PATH("c"), SPDL_MERGE(COMPLETION), SPDL_SINK(1)), why);
}

/* One item of a file of many lines: the results of an item are counted up to a limit. */
static void an_item_may_have_many_results(void) {
    const char *why = "the position of this pipeline cannot be saved: one item has more than "
                      "268435454 results";
    for (int many = 0; many < 2; ++many) {
        spdl_pipeline *p = START(0, FROM(1), SPDL_PIPE(the_same_for_ever, .again = true),
                                 SPDL_BATCH(4), SPDL_SINK(1));
        char text[SPDL_STATE_BYTES];
        for (int i = 0; i < 6; ++i) {
            spdl_batch *batch = NULL;
            REQUIRE(spdl_pipeline_next(p, (void **)&batch, SPDL_SECONDS(15)) == SPDL_OK);
            spdl_batch_free(batch);
            if (i == 0) p->counting->tally.results = many ? (1u << 28) - 10 : 1u << 24;
        }
        CHECK_EQ(spdl_state_save(p, text, sizeof text) > 0, !many);
        if (many) CHECK_STR(text, why);
        else CHECK(atoi(strstr(text, " results=") + 9) > 1 << 24);
        spdl_pipeline_destroy(p);
    }
}

/* Numbers of items end somewhere: no text of a position is wrong. */
static void an_epoch_may_have_very_many_items(void) {
    const uint64_t most = (uint64_t)1 << 36;
    spdl_pipeline *p = START(0, SPDL_SOURCE(count_up, SCRIPT(.count = -1), .free_item = item_free),
                             SPDL_SINK(1));
    char text[SPDL_STATE_BYTES];
    int length = 1;
    many_epochs = 0;
    CHECK_EQ(spdl_pipeline_rewind(p, most, SPDL_FOREVER), SPDL_E_INVALID);
    CHECK_EQ(spdl_pipeline_rewind(p, most - 9, SPDL_FOREVER), SPDL_OK);
    save(p, text);
    for (long i = 0; i < 12 && length > 0; ++i) {
        item *it = NULL;
        REQUIRE(SPDL_NEXT(p, &it, SPDL_SECONDS(15)) == SPDL_OK);
        CHECK_EQ(it->value, (long)most - 9 + i);
        item_free(it);
        length = spdl_state_save(p, text, sizeof text);
        CHECK(length > 0 || i >= 4);
    }
    CHECK_EQ(length, SPDL_E_UNSUPPORTED);
    CHECK_STR(text, "the position of this pipeline cannot be saved: an epoch has more than 2^36 "
                    "items");
    DONE(p);
}

/* A row that gathers: each fifth call has a result. A flush has all that it holds, one in each call
   with .again, in buffers or not. */
typedef struct stack {
    item *held[100];
    int count, flushes;
    bool again, buffers, fails, keeps; /* `keeps`: its states need no free */
    spdl_result more; /* after a result of a flush */
} stack;

static int stack_states;

static void stack_state_free(void *state) {
    --stack_states;
    free(state);
}

static item *stack_result(spdl_task *task, const stack *s, item *it) {
    item *made = s->buffers ? part(task, it->value) : item_make(it->value);
    REQUIRE(made != NULL);
    return made;
}

SPDL_FN(stacks, item, item) {
    stack *s = (stack *)spdl_ctx(task);
    void **state = s->again ? spdl_call_state(task) : NULL;
    if (state != NULL && *state == NULL) {
        *state = s->keeps ? s : malloc(1);
        stack_states += !s->keeps;
    }
    if (!spdl_flushing(task)) {
        spdl_take(task);
        s->held[s->count++] = in;
        if (s->count % 5 != 0) return SPDL_SKIP;
        *out = stack_result(task, s, in);
        return SPDL_OK;
    }
    ++s->flushes;
    if (s->count == 0) return SPDL_SKIP;
    if (!s->fails || s->count > 2) *out = stack_result(task, s, s->held[s->count - 1]);
    do item_free(s->held[--s->count]);
    while (s->count > 0 && (!s->again || *out == NULL));
    if (*out == NULL) return spdl_fail(task, "no more"); /* of what a load drops */
    return s->more;
}

/* A load frees what a row has gathered, by its own call. */
static void what_was_gathered_is_dropped_by_a_load(void) {
    many_epochs = 0;
    for (int how = 0; how < 8; ++how)
        for (int i = 0; i < CROWDS; ++i) {
            stack s = { .again = how % 2, .buffers = how / 2 == 1, .fails = how == 5,
                        .keeps = how == 7, .more = how % 2 || how == 6 ? SPDL_AGAIN : SPDL_OK };
            const spdl_stage rows[] = {
                SPDL_SOURCE(count_up, SCRIPT(.count = -1), .free_item = item_free),
                SPDL_PIPE(stacks, .ctx = &s, .flush = true, .again = s.again,
                          .item_bytes = s.buffers ? sizeof(item) : 0,
                          .free_item = s.buffers ? spdl_buffer_free : item_free,
                          .free_state = s.again && !s.keeps ? stack_state_free : NULL),
                SPDL_SINK(2),
            };
            spdl_pipeline *p = start(crowds[i], NULL, SPDL_TABLE(rows));
            char text[SPDL_STATE_BYTES];
            item *it = NULL;
            save(p, text);
            for (int loads = 0; loads < 3; ++loads) {
                for (int k = 0; k < 3; ++k) {
                    REQUIRE(SPDL_NEXT(p, &it, SPDL_SECONDS(15)) == SPDL_OK);
                    CHECK_EQ(it->value, 5 * k + 4);
                    if (s.buffers) spdl_buffer_free(it);
                    else item_free(it);
                }
                load(p, text);
            }
            CHECK(s.flushes > 0);
            spdl_pipeline_destroy(p);
            while (s.count > 0) item_free(s.held[--s.count]);
            CHECK_EQ(items_alive(), 0);
            CHECK_EQ(stack_states, 0);
        }
}

/* A run that failed is gone on with, when its data is mended or with a budget for failures. What it
   delivered and what follows is what a run without the failure delivers. */
static void goes_on_behind_a_fault(const story *whole, run_of *r, long at, bool mended) {
    static story before, after;
    char text[SPDL_STATE_BYTES];
    size_t epochs = 0;
    memset(&before, 0, sizeof before);
    memset(&after, 0, sizeof after);
    fault = at;
    faults_allowed = 0;
    run_open(r);
    listen(r, &before, EVENTS);
    run_save(r, text);
    run_close(r);
    if (before.ended == SPDL_END) return; /* `at` is no item */
    --before.count;
    for (size_t i = 0; i < before.count; ++i)
        if (before.line[i].text[0] == 'E') after.line[epochs++].text[0] = 'E';
    if (mended) fault = NO_FAULT;
    else faults_allowed = -1;
    for (size_t i = 0; i < before.count; ++i)
        if (!CHECK_STR(before.line[i].text, whole->line[i].text)) told_of("cut", r, i);
    run_open(r);
    run_load(r, text);
    after.count = epochs;
    listen(r, &after, EVENTS);
    run_close(r);
    memmove(&after.line[0], &after.line[epochs], (after.count - epochs) * sizeof after.line[0]);
    after.count -= epochs;
    same_from(whole, &after, before.count, r);
}

static void a_run_that_failed_goes_on_exactly(void) {
    static story whole;
    for (many_epochs = 0; many_epochs < 2; ++many_epochs)
        for (int number = 0; number < TABLES + (TEST_SANITIZED ? 10 : 60); ++number)
            for (int how = 0; how < 6; ++how) {
                const long at = 1 + (number + how) % 8 + 1000 * (many_epochs && how % 3 == 2);
                run_of r = { .number = number, .workers = crowds[how % 4],
                             .next_works_ns = works[how % 3] };
                if (number == 14) continue; /* its source makes items in places */
                fault = how % 2 ? NO_FAULT : at;
                faults_allowed = how % 2 ? 0 : -1;
                whole_story(&whole, number);
                if (whole.count < EVENTS) goes_on_behind_a_fault(&whole, &r, at, how % 2);
            }
    fault = NO_ROW;
}

SPDL_FN(fails_at_3_and_8, item, item) {
    *out = in;
    return in->value % 5 == 3 ? spdl_fail(task, "no %ld", in->value) : SPDL_OK;
}

static void a_load_counts_failures_from_0(void) {
    for (int i = 0; i < CROWDS; ++i) {
        const spdl_stage rows[] = {
            SPDL_SOURCE(count_up, SCRIPT(.count = 12), .free_item = item_free),
            SPDL_PIPE(fails_at_3_and_8, .max_failures = 1), SPDL_SINK(2),
        };
        spdl_pipeline *p = start(crowds[i], NULL, SPDL_TABLE(rows));
        char text[SPDL_STATE_BYTES];
        notes n = { .length = 0 };
        CHECK_EQ(take(p, &n, 5, " ", note_item), SPDL_OK);
        CHECK_STR(n.text, "0 1 2 4 5");
        save(p, text);
        TAKE_ALL(p, "6 7", SPDL_E_STAGE);
        load(p, text);
        TAKE_ALL(p, "6 7 9 10 11", SPDL_END);
        DONE(p);
    }
}

SPDL_FN(pass_on_as_others, item, told_line) {
    *out = (told_line *)in;
    return SPDL_OK;
}
SPDL_FN(pass_on_too, const item, item) {
    *out = (item *)(uintptr_t)in;
    return SPDL_OK;
}

/* A function of other types is another row; one of the same types is not seen. */
static void types_are_of_the_table(void) {
    for (int other = 0; other < 2; ++other) {
        spdl_pipeline *p = START(1, FROM(9), SPDL_PIPE(pass_on), SPDL_SINK(1));
        char text[SPDL_STATE_BYTES];
        const char *texts[] = { text };
        spdl_error error;
        save(p, text);
        DONE(p);
        p = other ? START(1, FROM(9), SPDL_PIPE(pass_on_as_others), SPDL_SINK(1))
                  : START(1, FROM(9), SPDL_PIPE(pass_on_too), SPDL_SINK(1));
        CHECK_EQ(spdl_state_load(p, texts, 1, SPDL_SECONDS(15), &error),
                 other ? SPDL_E_INVALID : SPDL_OK);
        if (other) CHECK(strstr(error.text, "is of a pipeline with other rows") != NULL);
        DONE(p);
    }
}

/* Another number of ranks goes on from where all had taken the same, again and again: the items
   come in the order that one rank has them in; and all of the next epoch comes. */
static void level_ranks_may_change(void) {
    static rank_run now[RANKS], then[RANKS];
    static long values[2 * ALL_OF_THEM];
    uint64_t state = test_seed();
    for (int round = 0; round < (TEST_SANITIZED ? 20 : 100); ++round) {
        const int shape = round % 2 ? 6 : 0;
        int world = 0;
        size_t count = 0;
        for (int turn = 0; turn < 4; ++turn) {
            const int next = (int)(test_random(&state) % RANKS) + 1;
            const int most = (ALL_OF_THEM - (int)count) / next / (shape == 6 ? 2 : 1);
            const long some = (long)(test_random(&state) % (uint64_t)(most > 3 ? 4 : most + 1));
            memcpy(then, now, sizeof then);
            world_open(now, shape, next, then, turn ? world : 0, &state);
            world = next;
            for (int i = 0; i < world; ++i) {
                count += rank_take(&now[i], shape, values + count, turn == 3 ? 1000 : some);
                save(now[i].p, now[i].text);
            }
            for (int i = 0; i < world && turn == 3; ++i) {
                now[i].ended = 0;
                count += rank_take(&now[i], shape, values + count, 1000);
            }
            for (int i = 0; i < world; ++i) rank_close(&now[i]);
        }
        CHECK_EQ(items_alive(), 0);
        qsort(values, count, sizeof values[0], by_value_of);
        CHECK_EQ(count, 2 * ALL_OF_THEM);
        for (size_t i = 0; i < count; ++i) CHECK_EQ(values[i], i / 2);
    }
}

/* At the end of an epoch the ranks of any table may change, saved before it or after it. */
static void any_ranks_change_at_the_end_of_an_epoch(void) {
    static rank_run now[RANKS], then[RANKS];
    static long whole[1000], values[2000];
    uint64_t state = test_seed();
    for (int round = 0; round < (TEST_SANITIZED ? 24 : 96); ++round) {
        const int shape = round % (SHAPES - 1), from = (int)(test_random(&state) % RANKS) + 1,
                  to = (int)(test_random(&state) % RANKS) + 1;
        size_t count = 0, all;
        world_open(now, shape, 1, NULL, 0, &state);
        all = rank_take(&now[0], shape, whole, 1000);
        rank_close(&now[0]);
        qsort(whole, all, sizeof whole[0], by_value_of);
        world_open(then, shape, from, NULL, 0, &state);
        for (int i = 0; i < from; ++i) count += rank_take(&then[i], shape, values + count, 1000);
        CHECK_EQ(count, all);
        for (int i = 0; i < from; ++i) save(then[i].p, then[i].text);
        world_open(now, shape, to, then, from, &state);
        for (int i = 0; i < to; ++i) count += rank_take(&now[i], shape, values + count, 1000);
        for (int i = 0; i < from; ++i) rank_close(&then[i]);
        for (int i = 0; i < to; ++i) rank_close(&now[i]);
        qsort(values, count, sizeof values[0], by_value_of);
        if (!CHECK_EQ(count, 2 * all)) (void)printf("    shape %d\n", shape);
        for (size_t i = 0; i < count && i / 2 < all; ++i) CHECK_EQ(values[i], whole[i / 2]);
    }
}

/* A larger item= jumps over a loss spike. */
static void a_loss_spike_is_jumped_over(void) {
    char edit[SPDL_STATE_BYTES];
    long values[ALL_OF_THEM];
    rank_run r;
    size_t count;
    rank_open(&r, 0, 0, 1, 1);
    CHECK_EQ(rank_take(&r, 0, values, 4), 4);
    save(r.p, r.text);
    edited(edit, r.text, " item=4", " item=40", "none");
    CHECK_EQ(spdl_state_load(r.p, (const char *[]){ edit }, 1, SPDL_FOREVER, NULL), SPDL_OK);
    count = rank_take(&r, 0, values, 1000);
    CHECK_EQ(count, ALL_OF_THEM - 40);
    for (size_t i = 0; i < count; ++i) CHECK_EQ(values[i], 40 + i);
    rank_close(&r);
}

/* --- seeds --- */

SPDL_FN(keyed, item, item) {
    in->value = (long)(spdl_item_key(task) >> 1);
    *out = in;
    return SPDL_OK;
}

SPDL_FN(keyed_batch, spdl_batch, item) {
    (void)in;
    *out = item_make((long)(spdl_item_key(task) >> 1));
    return SPDL_OK;
}

/* The same for any workers and each its own: of 3 epochs, 2 seeds, items and batches. */
static void keys_are_those_of_the_items(void) {
    enum { ALL = 2 * 2 * 3 * 50 };
    static long keys[CROWDS][ALL];
    many_epochs = 1;
    for (int crowd = 0; crowd < CROWDS; ++crowd) {
        size_t count = 0;
        for (int kind = 0; kind < 4; ++kind) {
            spdl_pipeline_desc desc = { .seed = (uint64_t)kind % 2 };
            spdl_pipeline *p = NULL;
            desc.workers = TEST_WORKERS(crowds[crowd]);
            desc.logger.log_fn = log_nothing;
            REQUIRE((kind < 2 ? spdl_pipeline_create(&p, &desc, SPDL_STAGES(FROM(40),
                                    SPDL_PIPE(keyed, .concurrency = 3), SPDL_SINK(2)))
                              : spdl_pipeline_create(&p, &desc, SPDL_STAGES(FROM(40), SPDL_BATCH(1),
                                    SPDL_PIPE(keyed_batch, .concurrency = 3,
                                              .free_item = item_free),
                                    SPDL_SINK(2)))) == SPDL_OK);
            for (int epoch = 0; epoch < 3; ++epoch) {
                item *it = NULL;
                while (SPDL_NEXT(p, &it, SPDL_SECONDS(15)) == SPDL_OK) {
                    keys[crowd][count++] = it->value;
                    item_free(it);
                }
            }
            DONE(p);
        }
        CHECK_EQ(count, 4 * (40 + 41 + 42));
        CHECK(memcmp(keys[0], keys[crowd], sizeof keys[0]) == 0);
    }
    qsort(keys[0], 4 * 123, sizeof keys[0][0], by_value_of);
    for (int i = 1; i < 4 * 123; ++i) CHECK(keys[0][i] != keys[0][i - 1]);
}

/* Seven results of each item; of those that are told to, each has the key of its call. */
SPDL_FN(seven, item, item) {
    intptr_t *made = (intptr_t *)(void *)spdl_call_state(task);
    *out = item_make(in->value < 0 ? (long)(spdl_item_key(task) >> 1)
                                   : in->value * 7 + (long)*made);
    return ++*made < 7 ? SPDL_AGAIN : SPDL_OK;
}
SPDL_FN(drops_thirds, item, item) {
    *out = in;
    return in->value % 3 == 0 ? SPDL_SKIP : SPDL_OK;
}
SPDL_FN(negated, item, item) {
    in->value = -1 - in->value;
    *out = in;
    return SPDL_OK;
}
/* Passes all in reverse at the end, each with the key of its call. */
typedef struct pile {
    item *kept[200];
    int count;
} pile;
SPDL_FN(piles_up, item, item) {
    pile *p = (pile *)spdl_ctx(task);
    if (!spdl_flushing(task)) {
        spdl_take(task);
        p->kept[p->count++] = in;
        return SPDL_SKIP;
    }
    if (p->count == 0) return SPDL_SKIP;
    *out = p->kept[--p->count];
    (*out)->value = (long)(spdl_item_key(task) >> 1);
    return SPDL_AGAIN;
}

#define SEVEN SPDL_PIPE(seven, .again = true, .free_item = item_free)
#define SEVENS_KEYED SPDL_PIPE(keyed, .concurrency = 3)

static spdl_pipeline *keys_of_results(int shape, int workers, pile *p) {
    p->count = 0;
    switch (shape) {
    case 0: return START(workers, FROM(12), SEVEN, SEVENS_KEYED, SPDL_SINK(2));
    case 1: return START(workers, FROM(4), SEVEN, SEVEN, SEVENS_KEYED, SPDL_SINK(2));
    case 2: return START(workers, FROM(40), SPDL_BATCH(4), SPDL_UNBATCH(), SEVENS_KEYED,
                         SPDL_SINK(2));
    case 3: return START(workers, FROM(12), SEVEN, SPDL_BATCH(3),
                         SPDL_PIPE(keyed_batch, .concurrency = 3, .free_item = item_free),
                         SPDL_SINK(2));
    case 4: return START(workers, FROM(12), SEVEN, SPDL_BATCH(3), SPDL_UNBATCH(), SEVENS_KEYED,
                         SPDL_SINK(2));
    case 5: return START(workers, FROM(12), SPDL_PIPE(negated), SEVEN, SPDL_SINK(2));
    case 6: return START(workers, FROM(12), SEVEN,
                         SPDL_PIPE(piles_up, .ctx = p, .flush = true, .again = true,
                                   .free_item = item_free), SPDL_SINK(2));
    default: return START(workers, FROM(12), SEVEN,
                          SPDL_PIPE(drops_thirds), SEVENS_KEYED, SPDL_SINK(2));
    }
}

static size_t keys_take(spdl_pipeline *p, long *keys, size_t most) {
    item *it = NULL;
    size_t count = 0;
    while (count < most && SPDL_NEXT(p, &it, SPDL_SECONDS(15)) == SPDL_OK) {
        keys[count++] = it->value;
        item_free(it);
    }
    return count;
}

/* Each result of one item has a key of its own, the same with any workers and after a load. */
static void results_of_one_item_have_keys_of_their_own(void) {
    static const size_t counts[] = { 84, 196, 40, 28, 84, 84, 84, 56 };
    static long keys[2][200], sorted[200];
    static pile p;
    many_epochs = 0;
    for (int shape = 0; shape < 8; ++shape)
        for (int crowd = 0; crowd < CROWDS; ++crowd) {
            spdl_pipeline *run = keys_of_results(shape, crowds[crowd], &p);
            const size_t count = keys_take(run, keys[crowd > 0], 200);
            DONE(run);
            CHECK_EQ(count, counts[shape]);
            CHECK(memcmp(keys[0], keys[crowd > 0], count * sizeof keys[0][0]) == 0);
            memcpy(sorted, keys[0], sizeof sorted);
            qsort(sorted, count, sizeof sorted[0], by_value_of);
            for (size_t i = 1; i < count; ++i)
                CHECK(sorted[i] != sorted[i - 1]);
            for (size_t at = 0; at < count && shape != 6; at += 5) {
                char text[SPDL_STATE_BYTES];
                run = keys_of_results(shape, crowds[crowd], &p);
                CHECK_EQ(keys_take(run, keys[1], at), at);
                save(run, text);
                load(run, text);
                CHECK_EQ(keys_take(run, keys[1], 200), count - at);
                CHECK(memcmp(keys[0] + at, keys[1], (count - at) * sizeof keys[0][0]) == 0);
                DONE(run);
            }
        }
}

/* What is wrong is told, not how the pipeline failed before. */
static void a_failed_pipeline_after_a_fork(void) {
    char text[SPDL_STATE_BYTES];
    const char *texts[] = { text };
    item *it = NULL;
    spdl_pipeline *p;
    pid_t child;
    TEST_NEEDS_FORKS();
    many_epochs = 0;
    p = START(1, FROM(14), SPDL_PIPE(fails_in_the_end, .free_item = item_free), SPDL_SINK(1));
    save(p, text);
    while (SPDL_NEXT(p, &it, SPDL_SECONDS(15)) == SPDL_OK) item_free(it);
    CHECK(spdl_pipeline_failed(p));
    child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        spdl_error error;
        const spdl_result result = spdl_state_load(p, texts, 1, SPDL_FOREVER, &error);
        _exit(result != SPDL_E_INVALID ||
              strcmp(error.text, "spdl_state_load: not in a stage, during next or push, or after a "
                                 "fork") != 0);
    }
    ends_well(child);
    load(p, text);
    TAKE(p, 2, "0 1");
    DONE(p);
}

/* Behind a batch the keys are other ones on each rank, also of the last call, without input. */
static void keys_behind_batches(void) {
    static uint64_t keys[2][100];
    size_t count = 0;
    for (int turn = 0; turn < 2; ++turn) {
        count = 0;
        for (int rank = 0; rank < 3; ++rank) {
            const spdl_sampler_desc desc = { .count = ALL_OF_THEM, .seed = 5,
                                             .ranks = { .rank = rank, .world = 3 } };
            spdl_sampler *s = NULL;
            spdl_pipeline *p;
            REQUIRE(spdl_sampler_create(&s, &desc) == SPDL_OK);
            p = START(turn * 2, INDEX(s), OF_INDEX(.concurrency = 2), SPDL_BATCH(4),
                      SPDL_PIPE(keyed_batch, .flush = true, .free_item = item_free), SPDL_SINK(2));
            for (int epoch = 0; epoch < 2;) {
                item *it = NULL;
                if (SPDL_NEXT(p, &it, SPDL_SECONDS(15)) == SPDL_END) ++epoch;
                else keys[turn][count++] = (uint64_t)it->value;
                if (it != NULL) item_free(it);
            }
            spdl_pipeline_destroy(p);
            spdl_sampler_destroy(s);
        }
    }
    CHECK_EQ(count, 2 * (7 + 6 + 6)); /* of each epoch: batches, and the last call */
    CHECK(memcmp(keys[0], keys[1], sizeof keys[0]) == 0);
    for (size_t i = 0; i < count; ++i)
        for (size_t k = 0; k < i; ++k) CHECK(keys[0][i] != keys[0][k]);
}

TEST_TABLE(state) {
    TEST_CASE(an_item_may_have_many_results), TEST_CASE(an_epoch_may_have_very_many_items),
    TEST_CASE(what_was_gathered_is_dropped_by_a_load), TEST_CASE(types_are_of_the_table),
    TEST_CASE(a_run_that_failed_goes_on_exactly), TEST_CASE(a_load_counts_failures_from_0),
    TEST_CASE(ordered_tables_go_on),
    TEST_CASE(with_a_process_or_without),
    TEST_CASE(random_kills_change_nothing),
    TEST_CASE(little_is_made_again),
    TEST_CASE(concurrency_may_change),
    TEST_CASE(level_ranks_keep_the_order),
    TEST_CASE(level_ranks_may_change),
    TEST_CASE(any_ranks_change_at_the_end_of_an_epoch),
    TEST_CASE(a_loss_spike_is_jumped_over),
    TEST_CASE(keys_are_the_same_on_any_rank),
    TEST_CASE(texts_of_other_ranks_are_refused), TEST_CASE(texts_that_do_not_join),
    TEST_CASE(texts_that_were_edited), TEST_CASE(the_longest_text), TEST_CASE(loads_that_fail),
    TEST_CASE(a_failed_pipeline_after_a_fork), TEST_CASE(keys_behind_batches),
    TEST_CASE(a_text_that_does_not_fit_is_refused),
    TEST_CASE(a_damaged_text_is_refused),
    TEST_CASE(some_tables_have_no_position),
    TEST_CASE(keys_are_those_of_the_items),
    TEST_CASE(results_of_one_item_have_keys_of_their_own),
    TEST_END
};
