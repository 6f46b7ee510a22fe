/* What the engine promises, and nothing of how it does it: who is called while others wait, which
   calls may wait for each other, for later stages, the trainer or the producer, and that a trainer
   may wait for a full buffer. By the public functions only. Each runs plain, traced and with yields
   at random. */
#define _GNU_SOURCE /* RUSAGE_THREAD */
#include "flow.h"

/* --- ways to run a test --- */

typedef enum way { PLAIN, TRACED, YIELDING } way;

static way how;

#define WAYS(test)                                                                                 \
    static void test##_plain(void) { test(); }                                                     \
    static void test##_traced(void) {                                                              \
        how = TRACED;                                                                              \
        test();                                                                                    \
    }                                                                                              \
    static void test##_with_yields(void) {                                                         \
        how = YIELDING;                                                                            \
        chaos_on();                                                                                \
        test();                                                                                    \
    }
#define CASES(test)                                                                                \
    TEST_CASE(test##_plain), TEST_CASE(test##_traced), TEST_CASE(test##_with_yields)

/* How often something is to be done: less under a sanitizer, and when it is done again. */
static long times(long plain) {
    const long some = how == PLAIN ? plain : plain / 3;
    const long few = TEST_SANITIZED ? some / 8 : some;
    return few > 0 ? few : 1;
}

static spdl_pipeline *begin_with(spdl_pipeline_desc desc, const spdl_stage *rows, size_t count) {
    spdl_pipeline *p = NULL;
    desc.trace = "";
    if (how == TRACED) desc.trace_events = 500;
    REQUIRE(spdl_pipeline_create(&p, &desc, rows, count) == SPDL_OK);
    return p;
}

static spdl_pipeline *begin_rows(int workers, spdl_pool *pool, const spdl_stage *rows,
                                 size_t count) {
    spdl_pipeline_desc desc = { 0 };
    desc.workers = pool != NULL ? 0 : TEST_WORKERS(workers);
    desc.pool = pool;
    return begin_with(desc, rows, count);
}

#define BEGIN(workers, ...) begin_rows((workers), NULL, SPDL_STAGES(__VA_ARGS__))
#define BEGIN_ON(pool, ...) begin_rows(0, (pool), SPDL_STAGES(__VA_ARGS__))

/* --- waits that come to an end: a hang is a failure --- */

#define PATIENCE 10 /* seconds */

typedef struct place {
    test_mutex lock;
    test_event changed;
} place;

#define PLACE { TEST_MUTEX, TEST_EVENT }

static void place_enter(place *at) { test_lock(&at->lock); }

static void place_leave(place *at) { test_unlock(&at->lock); }

/* Until somebody has changed something; false when that takes too long. */
static bool place_wait(place *at) {
    return test_wait_event(&at->changed, &at->lock, PATIENCE * 1000000);
}

static bool too_late(uint64_t since) { return spdl_time_ns() - since > PATIENCE * 1000000000ull; }

static int told_by(const int *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

/* --- what calls do with their time --- */

static uint64_t *luck(void) {
    static _Thread_local uint64_t state;
    if (state == 0) state = test_seed() ^ (uint64_t)(uintptr_t)&state;
    return &state;
}

static long below(long n) { return (long)(test_random(luck()) % (uint64_t)n); }

static void spin(uint64_t ns) {
    const uint64_t until = spdl_time_ns() + ns;
    while (spdl_time_ns() < until) {}
}

/* Mostly nothing. */
static void be_quick(void) {
    const long chance = below(64);
    if (chance == 0) test_yield();
    else if (chance == 1) spin((uint64_t)below(20000));
}

static spdl_order order_of(bool input) {
    return input ? SPDL_ORDER_INPUT : SPDL_ORDER_COMPLETION;
}

/* Items are numbers from 1; nothing has to be freed. */
static void *item_of(long value) { return (void *)(uintptr_t)(value + 1); }

static long value_of(const void *it) { return (long)(uintptr_t)it - 1; }

SPDL_FN(counts, void, void) {
    const long value = (long)spdl_sequence(task);
    if (value >= *(const long *)spdl_ctx(task)) return SPDL_END;
    *out = item_of(value);
    return SPDL_OK;
}

SPDL_FN(passes, void, void) {
    *out = in;
    return SPDL_OK;
}

SPDL_FN(passes_quickly, void, void) {
    be_quick();
    *out = in;
    return SPDL_OK;
}

/* Takes all that is left: so many, in order or not, and each once. */
static void takes_numbers(spdl_pipeline *p, long first, long end, bool ordered) {
    const long base = first;
    uint64_t sum = 0;
    void *it = NULL;
    spdl_result result;
    while ((result = spdl_pipeline_next(p, &it, SPDL_SECONDS(2 * PATIENCE))) == SPDL_OK) {
        if (ordered) REQUIRE(CHECK_EQ(value_of(it), first));
        sum += (uint64_t)value_of(it);
        ++first;
    }
    CHECK_STR(spdl_result_text(result), spdl_result_text(SPDL_END));
    CHECK_EQ(first, end);
    CHECK_EQ(sum, ((int64_t)end * (end - 1) - (int64_t)base * (base - 1)) / 2);
}

/* --- everything that can be called is called --- */

/* A pipeline drawn by chance. Some calls hang until all others that can be made have been made: how
   many those are is worked out from the rows. */
enum { MOST_ROWS = 6, MOST_ITEMS = 300 };

typedef enum role { MAKES, PASSES, DROPS, GROUPS } role;

typedef struct plan plan;

typedef struct wild_row {
    plan *of;
    role does;
    int limit, buffer, size; /* size: of a batch */
    long every;              /* drops: one of so many */
    bool ordered;
    bool batches;  /* its items are some */
    bool by_key;   /* calls are known by spdl_sequence: their order is; else by their number */
    long hangs_at; /* such a call; -1: none */
    /* what is known of it: inputs that come, in all, and the call that hangs among them */
    long inputs, hangs;
    long key[MOST_ITEMS + 1];
    long made[MOST_ITEMS + 1]; /* of its first n inputs */
    /* what can be reached */
    long begun, flushed;
    bool over;
    int calls; /* that were made; atomic */
} wild_row;

struct plan {
    int workers, rows, hung;
    long length, takes; /* the trainer, before it pauses */
    bool ordered, grouped;
    wild_row row[MOST_ROWS];
    int gate;
    int seen[MOST_ITEMS]; /* atomic */
};

static bool wild_drops(const wild_row *r, long key) {
    return r->does == DROPS && (key * 5 + 3) % r->every == 0;
}

static void wild_see(plan *w, bool batches, void *it) {
    const spdl_batch *batch = (const spdl_batch *)it;
    for (size_t i = 0; i < (batches ? batch->count : 1); ++i)
        __atomic_add_fetch(&w->seen[value_of(batches ? batch->items[i] : it)], 1, __ATOMIC_RELAXED);
}

/* The number of this call, or of its item; who is to hang does so. */
static long wild_enter(wild_row *r, spdl_task *task) {
    const long number = __atomic_fetch_add(&r->calls, 1, __ATOMIC_ACQ_REL);
    const long key = r->by_key ? (long)spdl_sequence(task) : number;
    if (key == r->hangs_at) await(&r->of->gate, 1);
    else if (below(8) == 0) be_quick();
    return key;
}

SPDL_FN(wild_source, void, void) {
    wild_row *r = (wild_row *)spdl_ctx(task);
    const long value = (long)spdl_sequence(task);
    if (value >= r->of->length) return SPDL_END;
    wild_enter(r, task);
    *out = item_of(value);
    return SPDL_OK;
}

SPDL_FN(wild_stage, void, void) {
    wild_row *r = (wild_row *)spdl_ctx(task);
    const long key = wild_enter(r, task);
    *out = in;
    if (!wild_drops(r, key)) return SPDL_OK;
    wild_see(r->of, r->batches, in);
    return SPDL_SKIP;
}

/* How many results the first n inputs of a row become. */
static void wild_count(wild_row *r) {
    r->made[0] = 0;
    for (long n = 0; n < r->inputs; ++n)
        r->made[n + 1] = r->does == GROUPS ? (n + 1) / r->size
                                           : r->made[n] + !wild_drops(r, r->key[n]);
}

/* What comes out of `r` is what comes into `next`. */
static void wild_join(const wild_row *r, wild_row *next) {
    next->by_key = r->by_key && (r->ordered || r->limit == 1);
    next->batches = r->batches || r->does == GROUPS;
    next->inputs = 0;
    for (long n = 0; n < r->inputs; ++n) {
        const long made = next->inputs;
        if (r->does == GROUPS ? n % r->size > 0 : r->made[n + 1] == r->made[n]) continue;
        next->key[made] = next->by_key && r->does != GROUPS ? r->key[n] : made;
        ++next->inputs;
    }
}

/* One call of this row hangs, which is one that hands on its item. */
static void wild_hang(plan *w, wild_row *r) {
    long n = r->inputs ? below(r->inputs) : 0;
    while (n < r->inputs && r->made[n + 1] == r->made[n]) ++n;
    if (r->does == GROUPS || r->hangs >= 0 || n >= r->inputs) return;
    if (!r->by_key && r->limit > 1) r->ordered = false; /* else those behind it were not known */
    r->hangs = n;
    r->hangs_at = r->key[n];
    ++w->hung;
}

/* What the reader of a row can take. */
static long wild_ready(const wild_row *r) {
    if (r->hangs < 0 || r->begun <= r->hangs) return r->made[r->begun] + r->flushed;
    return r->ordered || r->limit == 1 ? r->made[r->hangs] : r->made[r->begun] - 1;
}

/* Whether there is room, and the row can go a step on. */
static bool wild_step(plan *w, int i) {
    wild_row *r = &w->row[i];
    const long taken = i + 1 < w->rows ? w->row[i + 1].begun : w->takes;
    const long ready = i ? wild_ready(&w->row[i - 1]) : r->inputs;
    const bool hangs = r->hangs >= 0 && r->begun > r->hangs;
    if (r->over || r->made[r->begun] + r->flushed - taken >= r->buffer + r->limit) return false;
    if (r->begun < ready) {
        if (hangs && r->limit == 1) return false;
        ++r->begun;
        return true;
    }
    if (hangs || (i && !w->row[i - 1].over)) return false;
    if (r->does == GROUPS) r->flushed = r->begun % r->size > 0;
    r->over = true;
    return true;
}

/* Until nothing goes on. How much the trainer can take then, more than it took. */
static long wild_reach(plan *w, long takes) {
    wild_row *last = &w->row[w->rows - 1];
    bool moved = true;
    for (int i = 0; i < w->rows; ++i) {
        w->row[i].begun = w->row[i].flushed = 0;
        w->row[i].over = false;
    }
    for (w->takes = 0; moved;) {
        moved = false;
        for (int i = w->rows - 1; i >= 0; --i) moved = wild_step(w, i) || moved;
        if (w->takes < takes && w->takes < wild_ready(last)) ++w->takes, moved = true;
    }
    return w->takes;
}

static void wild_draw(plan *w) {
    memset(w, 0, sizeof *w);
    w->workers = 2 + (int)below(3);
    w->rows = 2 + (int)below(5);
    w->length = 1 + below(MOST_ITEMS);
    for (int i = 0, places = 1; i < w->rows; ++i) {
        wild_row *r = &w->row[i];
        const long dice = below(8);
        *r = (wild_row){ .of = w, .hangs_at = -1, .hangs = -1, .limit = 1, .ordered = true };
        r->does = i == 0 ? MAKES : dice < 2 && places < 8 ? DROPS
                  : dice < 3 && dice > 1 && !w->grouped   ? GROUPS
                                                          : PASSES;
        r->buffer = 1 + (int)below(19);
        r->every = 2 + below(4);
        r->size = 1 + (int)below(5);
        if (r->does == GROUPS) w->grouped = true;
        if (r->does == PASSES || r->does == DROPS) r->limit = 1 + (int)below(4);
        if (r->limit > 1) r->ordered = below(2);
        /* in input order a dropped item has a place, from row to row, and there are 64 at least */
        places = !r->ordered || r->limit == 1 ? 1 : r->does == DROPS ? 2 * places : places;
        if (places > 1 && (r->buffer + r->limit + 1) * places > 64)
            r->buffer = 64 / places - r->limit - 1;
    }
    for (int hang = 1 + (int)below(w->workers - 1); hang > 0; --hang) {
        for (int i = 0; i < w->rows; ++i) {
            wild_row *r = &w->row[i];
            if (i == 0) r->inputs = w->length, r->by_key = true;
            for (long n = 0; i == 0 && n < r->inputs; ++n) r->key[n] = n;
            if (i > 0) wild_join(&w->row[i - 1], r);
            wild_count(r);
        }
        wild_hang(w, &w->row[below(w->rows)]);
    }
    w->ordered = true;
    for (int i = 0; i < w->rows; ++i) w->ordered = w->ordered && w->row[i].ordered;
}

static void wild_tell(const plan *w) {
    fprintf(stderr, "    %d workers, %ld items, %ld taken\n", w->workers, w->length, w->takes);
    for (int i = 0; i < w->rows; ++i) {
        const wild_row *r = &w->row[i];
        const char *const does = r->does == GROUPS ? "batches" : r->does == DROPS ? "filter"
                                                                                  : "stage";
        fprintf(stderr, "    %s of %d, %s order, buffer %d, hangs at %ld: %d calls, can be %ld\n",
                does, r->does == GROUPS ? r->size : r->limit, r->ordered ? "input" : "any",
                r->buffer, r->hangs_at, told_by(&r->calls), r->begun);
    }
}

static bool wild_reached(const plan *w) {
    for (int i = 0; i < w->rows; ++i)
        if (w->row[i].does != GROUPS && told_by(&w->row[i].calls) < w->row[i].begun) return false;
    return true;
}

static spdl_pipeline *wild_begin(plan *w) {
    spdl_stage rows[MOST_ROWS + 1];
    for (int i = 0; i < w->rows; ++i) {
        wild_row *r = &w->row[i];
        const spdl_stage source = SPDL_SOURCE(wild_source, .ctx = r), batch = SPDL_BATCH(r->size);
        const spdl_stage stage = SPDL_PIPE(wild_stage, .ctx = r, .concurrency = r->limit,
                                           .output_order = order_of(r->ordered));
        rows[i] = r->does == MAKES ? source : r->does == GROUPS ? batch : stage;
        rows[i].buffer_size = i + 1 < w->rows ? r->buffer : 0;
    }
    rows[w->rows] = (spdl_stage)SPDL_SINK(w->row[w->rows - 1].buffer);
    return begin_rows(w->workers, NULL, rows, (size_t)w->rows + 1);
}

static spdl_result wild_take(plan *w, spdl_pipeline *p, long *last) {
    void *it = NULL;
    const spdl_result result = spdl_pipeline_next(p, &it, SPDL_SECONDS(PATIENCE));
    const bool batches = w->row[w->rows - 1].batches || w->row[w->rows - 1].does == GROUPS;
    const spdl_batch *batch = (const spdl_batch *)it;
    if (result != SPDL_OK) return result;
    wild_see(w, batches, it);
    for (size_t i = 0; i < (batches ? batch->count : 1); ++i) {
        const long value = value_of(batches ? batch->items[i] : it);
        if (w->ordered) CHECK(value > *last);
        *last = value;
    }
    if (batches) spdl_batch_free(it);
    return SPDL_OK;
}

static void wild_fail(const plan *w) {
    wild_tell(w);
    test_leave();
}

/* The trainer takes until it has `takes`, and asks whether its buffer is full. Then all calls are
   made that can be, and no others: there is no room. */
static void wild_pause(plan *w, spdl_pipeline *p, long takes, long *last) {
    static spdl_stats stats;
    const uint64_t since = spdl_time_ns();
    for (long n = w->takes; n < takes; ++n)
        if (!CHECK_EQ(wild_take(w, p, last), SPDL_OK)) wild_fail(w);
    wild_reach(w, takes);
    if (takes > 0) spdl_pipeline_stats(p, &stats);
    while (!wild_reached(w) && !too_late(since)) sleep_us(50);
    if (!CHECK(wild_reached(w))) wild_fail(w);
    if (below(2)) sleep_us(below(1000)); /* the workers sleep */
    for (int i = 0; i < w->rows && !w->grouped; ++i)
        if (!CHECK_EQ(told_by(&w->row[i].calls), w->row[i].begun)) wild_fail(w);
}

static void wild_run(plan *w) {
    const long most = wild_reach(w, MOST_ITEMS);
    spdl_pipeline *p = wild_begin(w);
    spdl_result result;
    long last = -1, takes = 0;
    wild_reach(w, 0);
    if (below(3) > 0) wild_pause(w, p, 0, &last);
    for (long pauses = below(4); pauses > 0; --pauses) {
        takes += below(most - takes + 1) / pauses;
        wild_pause(w, p, takes, &last);
    }
    wild_pause(w, p, most, &last);
    open_gate(&w->gate);
    while ((result = wild_take(w, p, &last)) == SPDL_OK) {}
    CHECK_STR(spdl_result_text(result), spdl_result_text(SPDL_END));
    for (long n = 0; n < w->length; ++n) CHECK_EQ(w->seen[n], 1);
    spdl_pipeline_destroy(p);
}

static void all_that_can_be_called_is(void) {
    static plan w;
    long hung = 0;
    for (long i = times(600); i > 0; --i) {
        wild_draw(&w);
        wild_run(&w);
        hung += w.hung;
    }
    CHECK(hung > 0);
}

WAYS(all_that_can_be_called_is)

/* --- calls that wait for each other --- */

typedef struct party {
    place at;
    int size, inside;
    long turn;
    long from, stride; /* one of `stride` items from there on waits for others */
    long length;
    int late;
} party;

static void party_meet(party *y) {
    place_enter(&y->at);
    const long turn = y->turn;
    if (++y->inside == y->size) {
        y->inside = 0;
        ++y->turn;
        test_notify(&y->at.changed);
    }
    while (y->turn == turn && y->late == 0)
        if (!place_wait(&y->at)) y->late = 1 + y->inside;
    place_leave(&y->at);
    REQUIRE(CHECK_EQ(y->late, 0)); /* else 1 more than those that came */
}

SPDL_FN(meets, void, void) {
    party *y = (party *)spdl_ctx(task);
    const long behind = value_of(in) - y->from;
    *out = in;
    if (behind >= 0 && behind % y->stride == 0) party_meet(y);
    return SPDL_OK;
}

/* `size` calls meet so many times, after others that are quick. With input order those of a
   meeting lie as far apart as the buffer lets them. */
static void parties(int workers, int size, long from, long rounds, int buffer, bool ordered,
                    bool far) {
    party y = { .at = PLACE, .size = size, .from = from, .stride = 1 };
    const bool before = below(2), behind = below(2);
    spdl_pipeline *p;
    if (far && size > 1) y.stride = 1 + below((buffer + size - 1) / (size - 1));
    y.length = from + rounds * size * y.stride;
    const spdl_stage source = SPDL_SOURCE(counts, .ctx = &y.length, .buffer_size = buffer);
    const spdl_stage quick = SPDL_PIPE(passes_quickly, .concurrency = 1 + (int)below(4),
                                       .buffer_size = buffer);
    const spdl_stage row = SPDL_PIPE(meets, .ctx = &y, .concurrency = size, .buffer_size = buffer,
                                     .output_order = order_of(ordered));
    spdl_stage rows[5];
    size_t count = 0;
    rows[count++] = source;
    if (before) rows[count++] = quick;
    rows[count++] = row;
    if (!behind) rows[count - 1].buffer_size = 0;
    if (behind) rows[count++] = quick;
    if (behind) rows[count - 1].buffer_size = 0;
    rows[count++] = (spdl_stage)SPDL_SINK(buffer);
    p = begin_rows(workers, NULL, rows, count);
    takes_numbers(p, 0, y.length, ordered);
    spdl_pipeline_destroy(p);
}

static void calls_may_wait_for_each_other(void) {
    for (long i = 0; i < times(12); ++i) /* once after many quick ones */
        parties(4 + (int)(i % 3), 4, 10000, 1 + i % 3, 16, i & 1, false);
    for (long i = 0; i < times(150); ++i) /* in the last items of a source of any length */
        parties(4 + (int)(i % 3), 2 + (int)below(3), below(297), 1, 1 + (int)below(19), i & 1,
                false);
    for (long i = 0; i < times(150); ++i) { /* again and again */
        const int size = 2 + (int)(i % 3);
        parties(size + (int)below(3), size, below(60), 1 + below(20), 1 + (int)below(8), i & 1,
                true);
    }
}

WAYS(calls_may_wait_for_each_other)

/* --- calls that wait for what others do later --- */

typedef struct purse {
    place at;
    long tokens;
    bool late;
} purse;

static void purse_take(purse *u) {
    place_enter(&u->at);
    while (u->tokens == 0 && !u->late)
        if (!place_wait(&u->at)) u->late = true;
    --u->tokens;
    place_leave(&u->at);
    REQUIRE(CHECK(!u->late));
}

static void purse_give(purse *u) {
    place_enter(&u->at);
    ++u->tokens;
    test_notify(&u->at.changed);
    place_leave(&u->at);
}

SPDL_FN(takes_token, void, void) {
    purse_take((purse *)spdl_ctx(task));
    *out = in;
    return SPDL_OK;
}

SPDL_FN(gives_token, void, void) {
    purse_give((purse *)spdl_ctx(task));
    *out = in;
    return SPDL_OK;
}

/* `concurrency` calls take tokens: with more than one of them in any order only, as order makes a
   call wait for those before it. */
static void tokens_go_round(int workers, int concurrency, long length, bool ordered, bool trainer,
                            int buffer) {
    purse u = { .at = PLACE, .tokens = 4 };
    void *it = NULL;
    long taken = 0;
    const spdl_order order = order_of(ordered);
    const spdl_stage rows[] = {
        SPDL_SOURCE(counts, .ctx = &length, .buffer_size = buffer),
        SPDL_PIPE(takes_token, .ctx = &u, .concurrency = concurrency, .output_order = order,
                  .buffer_size = buffer),
        SPDL_PIPE(passes, .concurrency = 2, .output_order = order, .buffer_size = buffer),
        trainer ? (spdl_stage)SPDL_PIPE(passes_quickly, .concurrency = 2, .output_order = order)
                : (spdl_stage)SPDL_PIPE(gives_token, .ctx = &u, .concurrency = 2,
                                        .output_order = order),
        SPDL_SINK(buffer),
    };
    spdl_pipeline *p = begin_rows(workers, NULL, SPDL_TABLE(rows));
    for (; trainer && taken < length; ++taken) {
        REQUIRE(CHECK_EQ(spdl_pipeline_next(p, &it, SPDL_SECONDS(2 * PATIENCE)), SPDL_OK));
        if (ordered) CHECK_EQ(value_of(it), taken);
        purse_give(&u);
    }
    takes_numbers(p, taken, length, ordered);
    CHECK_EQ(u.tokens, 4);
    spdl_pipeline_destroy(p);
}

static void calls_may_wait_for_later_stages(void) {
    tokens_go_round(2, 1, times(100000), true, false, 16);
    tokens_go_round(2, 1, times(100000), false, false, 16);
    tokens_go_round(3, 2, times(100000), false, false, 16);
    for (long i = 0; i < times(100); ++i) {
        const int concurrency = 1 + (int)(i % 2);
        tokens_go_round(1 + concurrency + (int)below(3), concurrency, 200 + below(600),
                        concurrency == 1 && below(2), false, 1 + (int)below(19));
    }
}

WAYS(calls_may_wait_for_later_stages)

/* With one worker more than calls that wait, and no more. */
static void token_behind(void) {
    tokens_go_round(2, 1, times(2000), false, false, 16);
    tokens_go_round(3, 2, times(2000), false, false, 16);
}

static void calls_may_wait_for_the_trainer(void) {
    tokens_go_round(2, 1, times(100000), true, true, 16);
    tokens_go_round(3, 2, times(50000), false, true, 16);
    for (long i = 0; i < times(100); ++i) {
        const int concurrency = 1 + (int)(i % 2);
        tokens_go_round(1 + concurrency + (int)below(3), concurrency, 200 + below(600),
                        concurrency == 1 && below(2), true, 1 + (int)below(19));
    }
}

WAYS(calls_may_wait_for_the_trainer)

/* --- calls that wait for the producer --- */

typedef struct hose {
    place at;
    long pushed, wanted; /* a call for item n waits until n + `wanted` are pushed */
    long length;
    bool late;
    spdl_pipeline *p;
} hose;

SPDL_FN(waits_for_more, void, void) {
    hose *h = (hose *)spdl_ctx(task);
    const long last = value_of(in) + h->wanted;
    place_enter(&h->at);
    while (h->pushed < (last < h->length ? last : h->length) && !h->late)
        if (!place_wait(&h->at)) h->late = true;
    place_leave(&h->at);
    REQUIRE(CHECK(!h->late));
    *out = in;
    return SPDL_OK;
}

static void hose_push(hose *h, long value) {
    REQUIRE(CHECK_EQ(spdl_pipeline_push(h->p, item_of(value), SPDL_SECONDS(2 * PATIENCE)),
                     SPDL_OK));
    place_enter(&h->at);
    h->pushed = value + 1;
    test_notify(&h->at.changed);
    place_leave(&h->at);
}

static void *hose_on(void *arg) {
    hose *h = (hose *)arg;
    for (long value = 0; value < h->length; ++value) hose_push(h, value);
    CHECK_EQ(spdl_pipeline_push_end(h->p), SPDL_OK);
    return NULL;
}

/* A producer of its own runs ahead as far as there is room. */
static void hose_runs(int workers, int row, long length, int buffer) {
    hose h = { .at = PLACE, .length = length, .wanted = 2 + below(buffer) };
    test_thread thread;
    const spdl_stage waits = SPDL_PIPE(waits_for_more, .ctx = &h), quick = SPDL_PIPE(passes);
    h.p = BEGIN(workers, SPDL_FEED(void, .buffer_size = buffer), row == 0 ? waits : quick,
                row == 1 ? waits : quick, row == 2 ? waits : quick, SPDL_SINK(buffer));
    thread = thread_of(hose_on, &h);
    takes_numbers(h.p, 0, length, true);
    test_join(thread);
    spdl_pipeline_destroy(h.p);
}

/* The trainer is the producer, and pushes an item only when the last but one has come out: so that
   goes on to it while a call waits for the next. */
static void hose_answers(int workers, int row, long length) {
    hose h = { .at = PLACE, .length = length, .wanted = 2 };
    const spdl_stage waits = SPDL_PIPE(waits_for_more, .ctx = &h), quick = SPDL_PIPE(passes);
    h.p = BEGIN(workers, SPDL_FEED(void, .buffer_size = 4), row == 0 ? waits : quick,
                row == 1 ? waits : quick, quick, SPDL_SINK(3));
    hose_push(&h, 0);
    for (long value = 1; value < length; ++value) {
        void *it = NULL;
        hose_push(&h, value);
        REQUIRE(CHECK_EQ(spdl_pipeline_next(h.p, &it, SPDL_SECONDS(2 * PATIENCE)), SPDL_OK));
        CHECK_EQ(value_of(it), value - 1);
    }
    CHECK_EQ(spdl_pipeline_push_end(h.p), SPDL_OK);
    takes_numbers(h.p, length - 1, length, true);
    spdl_pipeline_destroy(h.p);
}

static void calls_may_wait_for_the_producer(void) {
    for (int i = 0; i < 9; ++i) hose_runs(1 + i % 3, i / 3, times(10000), 1 + (int)below(19));
    for (int i = 0; i < 4; ++i) hose_answers(2 + i % 2, i / 2, times(3000));
}

WAYS(calls_may_wait_for_the_producer)

/* --- a trainer that waits until its buffer is full --- */

static int sink_depth(const spdl_pipeline *p) {
    static spdl_stats stats;
    spdl_pipeline_stats(p, &stats);
    return stats.edge[stats.stage_count - 1].depth;
}

static void fills_up(const spdl_pipeline *p, int buffer) {
    const uint64_t since = spdl_time_ns();
    while (sink_depth(p) < buffer) {
        REQUIRE(CHECK(!too_late(since)));
        sleep_us(50);
    }
}

static double cpu_ms(void) { return (double)test_cpu_ns() * 1e-6; }

/* CPU time in 100 ms in which nobody has anything to do; of three, as the last calls may go on. */
static double rests(void) {
    double least = 1e9;
    for (int i = 0; i < 3 && least > 2; ++i) {
        double used;
        sleep_us(5000);
        used = cpu_ms();
        sleep_us(100000);
        used = cpu_ms() - used;
        if (used < least) least = used;
    }
    return least;
}

SPDL_FN(works, void, void) {
    spin(*(const uint64_t *)spdl_ctx(task));
    *out = in;
    return SPDL_OK;
}

static void waits_for_full(int workers, int buffer, uint64_t ns, long rounds) {
    long length = 1000 + rounds * (buffer + 3), taken = 0;
    spdl_pipeline *p = BEGIN(workers, SPDL_SOURCE(counts, .ctx = &length, .buffer_size = 3),
                             SPDL_PIPE(works, .ctx = &ns, .concurrency = 2),
                             SPDL_PIPE(passes_quickly), SPDL_SINK(buffer));
    double most = 0;
    for (long round = 0; round < rounds; ++round) {
        for (long take = 1 + below(buffer + 2); take > 0; --take, ++taken) {
            void *it = NULL;
            REQUIRE(CHECK_EQ(spdl_pipeline_next(p, &it, SPDL_SECONDS(PATIENCE)), SPDL_OK));
            REQUIRE(CHECK_EQ(value_of(it), taken));
        }
        fills_up(p, buffer);
        if (round == rounds / 2) most = rests();
    }
    if (!CHECK(most < 20)) fprintf(stderr, "    %.1f ms of CPU in 100 ms of rest\n", most);
    takes_numbers(p, taken, length, true);
    spdl_pipeline_destroy(p);
}

static void a_trainer_may_wait_for_a_full_buffer(void) {
    static const int buffers[] = { 1, 3, 16 };
    for (int i = 0; i < 6; ++i) {
        const uint64_t ns = i % 2 ? 30000 : 0;
        waits_for_full(1 + i % 4, buffers[i % 3], ns, times(400));
    }
}

WAYS(a_trainer_may_wait_for_a_full_buffer)

/* --- nothing of the user's runs under a lock --- */

/* Where a call for one item, or what it leads to, hangs. */
typedef enum spot { IN_FIRST, IN_DEFERRED, IN_LAST, IN_FREE, IN_COMPLETE, IN_LOG, SPOTS,
                    IN_PUSH } spot;

typedef struct house {
    spot where;
    long hanging; /* the item */
    int gate, first_gate, stuck, done; /* atomic */
    spdl_pipeline *p;
    long pushed, taken;
    place at;
    spdl_deferred letter[64]; /* deferred calls that nobody has completed yet */
    item *of[64];
    int letters;
} house;

static house *the_house;

static void hangs_here(spot where) {
    house *h = the_house;
    if (h->where != where) return;
    __atomic_store_n(&h->stuck, 1, __ATOMIC_RELEASE);
    await(&h->gate, 1);
}

/* Of what is dropped in the last row, by a call that was completed so, or to make way. */
static void frees(void *it) {
    if (((item *)it)->value == the_house->hanging) {
        hangs_here(IN_FREE);
        hangs_here(IN_COMPLETE);
        hangs_here(IN_PUSH);
    }
    item_free(it);
}

SPDL_FN(first, item, item) {
    if (in->value == the_house->hanging) hangs_here(IN_FIRST);
    if (the_house->where == IN_PUSH) await(&the_house->first_gate, 1);
    *out = in;
    return SPDL_OK;
}

SPDL_FN(hands_in, item, item) {
    house *h = the_house;
    const spdl_deferred call = spdl_defer(task);
    if (in->value == h->hanging) hangs_here(IN_DEFERRED);
    place_enter(&h->at);
    h->of[h->letters] = in;
    h->letter[h->letters++] = call;
    place_leave(&h->at);
    return SPDL_PENDING;
}

SPDL_FN(last, item, item) {
    const spot where = the_house->where;
    *out = in;
    if (in->value != the_house->hanging) return SPDL_OK;
    hangs_here(IN_LAST);
    if (where == IN_LOG) return spdl_fail(task, "the log hears of it");
    return where == IN_FREE ? SPDL_SKIP : SPDL_OK;
}

static void hears(spdl_log_level level, const char *text, void *user) {
    (void)level, (void)user;
    if (strstr(text, "the log hears of it") != NULL) hangs_here(IN_LOG);
}

static int house_letters(house *h) {
    place_enter(&h->at);
    const int letters = h->letters;
    place_leave(&h->at);
    return letters;
}

/* Completes all calls that are there. */
static void *house_clear(void *arg) {
    house *h = (house *)arg;
    for (;;) {
        spdl_deferred call = { 0 };
        item *it = NULL;
        place_enter(&h->at);
        if (h->letters > 0) {
            it = h->of[--h->letters];
            call = h->letter[h->letters];
        }
        place_leave(&h->at);
        if (it == NULL) return NULL;
        if (h->where == IN_COMPLETE && it->value == h->hanging)
            CHECK_EQ(spdl_complete(call, SPDL_SKIP, NULL), SPDL_OK);
        else CHECK_EQ(spdl_complete(call, SPDL_OK, it), SPDL_OK);
    }
}

static spdl_result house_take(house *h) {
    item *it = NULL;
    spdl_result result;
    while ((result = SPDL_NEXT(h->p, &it, 0)) == SPDL_OK) {
        ++h->taken;
        item_free(it);
    }
    return result;
}

static void *house_push(void *arg) {
    house *h = (house *)arg;
    CHECK_EQ(spdl_pipeline_push(h->p, item_make(h->pushed++), 0), SPDL_OK);
    return NULL;
}

static void house_ask(house *h, int concurrency) {
    static spdl_stats stats;
    spdl_pipeline_stats(h->p, &stats);
    for (int row = 1; row < stats.stage_count; ++row) {
        CHECK(row_has_times(h->p, row));
        CHECK_EQ(spdl_pipeline_set_concurrency(h->p, row, concurrency), SPDL_OK);
    }
    CHECK_EQ(row_named(h->p, "first"), 1);
    CHECK(!spdl_pipeline_failed(h->p));
}

/* Every function returns, and items get past what hangs. */
static void *house_goes_on(void *arg) {
    house *h = (house *)arg;
    for (int i = 0; i < 100; ++i) {
        house_ask(h, 2 + i % 3);
        (void)house_push(h);
        while (h->taken < h->pushed - 1) {
            (void)house_clear(h);
            CHECK_EQ(house_take(h), SPDL_TIMEOUT);
            sleep_us(20);
        }
    }
    __atomic_store_n(&h->done, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* Until the call is made that hangs; who completes may be another thread. */
static bool house_gets_stuck(house *h, test_thread *helper) {
    const uint64_t since = spdl_time_ns();
    bool helped = false;
    while (h->pushed <= h->hanging) (void)house_push(h);
    while (told_by(&h->stuck) == 0) {
        REQUIRE(CHECK(!too_late(since)));
        if (h->where != IN_COMPLETE) {
            (void)house_clear(h);
        } else if (!helped && house_letters(h) == h->pushed) {
            *helper = thread_of(house_clear, h);
            helped = true;
        }
        (void)house_take(h);
        sleep_us(50);
    }
    return helped;
}

static void house_ends(house *h, long count) {
    const uint64_t since = spdl_time_ns();
    CHECK_EQ(spdl_pipeline_push_end(h->p), SPDL_OK);
    for (spdl_result result = SPDL_OK; result != SPDL_END; sleep_us(50)) {
        REQUIRE(CHECK(!too_late(since)));
        (void)house_clear(h);
        result = house_take(h);
    }
    CHECK_EQ(h->taken, count);
    spdl_pipeline_destroy(h->p);
    CHECK_EQ(items_alive(), 0);
}

static void one_call_hangs(spot where) {
    house h = { .where = where, .hanging = 5, .at = PLACE };
    spdl_pipeline_desc desc = { .workers = 3 };
    test_thread helper, beside;
    bool helped;
    the_house = &h;
    desc.logger.log_fn = hears;
#define OPEN .concurrency = 4, .output_order = SPDL_ORDER_COMPLETION
    h.p = begin_with(desc, SPDL_STAGES(SPDL_FEED(item, .free_item = frees, .buffer_size = 8),
                                       SPDL_PIPE(first, OPEN),
                                       SPDL_PIPE(hands_in, .deferred = true, .concurrency = 6,
                                                 .buffer_size = 8,
                                                 .output_order = SPDL_ORDER_COMPLETION),
                                       SPDL_PIPE(last, OPEN, .max_failures = -1), SPDL_SINK(8)));
    helped = house_gets_stuck(&h, &helper);
    if (helped) test_join(helper); /* spdl_complete frees nothing itself */
    beside = thread_of(house_goes_on, &h);
    await(&h.done, 1);
    open_gate(&h.gate);
    test_join(beside);
    house_ends(&h, h.pushed - (where == IN_FREE || where == IN_COMPLETE || where == IN_LOG));
}

/* The item that makes way for the newest is freed by the producer. */
static void one_push_hangs(void) {
    house h = { .where = IN_PUSH, .hanging = 1, .at = PLACE };
    const uint64_t since = spdl_time_ns();
    item *refused = item_make(7);
    test_thread producer;
    the_house = &h;
    h.p = BEGIN(2, SPDL_FEED(item, .free_item = frees, .buffer_size = 4, .drop_oldest = true),
                SPDL_PIPE(first, .concurrency = 4, .output_order = SPDL_ORDER_COMPLETION),
                SPDL_PIPE(last, OPEN), SPDL_SINK(8));
#undef OPEN
    CHECK_EQ(spdl_pipeline_set_concurrency(h.p, 1, 1), SPDL_OK);
    (void)house_push(&h);
    while (stats_of(h.p, 1).in_flight == 0) sleep_us(50);
    while (h.pushed < 5) (void)house_push(&h);
    producer = thread_of(house_push, &h);
    await(&h.stuck, 1);
    house_ask(&h, 1);
    CHECK_EQ(spdl_pipeline_push(h.p, refused, 0), SPDL_E_INVALID);
    CHECK_EQ(house_take(&h), SPDL_TIMEOUT);
    open_gate(&h.first_gate);
    while (h.taken < 4) {
        REQUIRE(CHECK(!too_late(since)));
        (void)house_take(&h);
        sleep_us(50);
    }
    open_gate(&h.gate);
    test_join(producer);
    item_free(refused);
    house_ends(&h, 5);
}

static void one_that_hangs_holds_no_lock(void) {
    for (long i = 0; i < times(6); ++i)
        for (int where = IN_FIRST; where < SPOTS; ++where) one_call_hangs((spot)where);
    for (long i = 0; i < times(6); ++i) one_push_hangs();
}

WAYS(one_that_hangs_holds_no_lock)

/* --- the pipeline is known before anything is called --- */

typedef struct newborn {
    spdl_pipeline *p; /* atomic, once it is created */
    int unknown;      /* atomic: calls that saw none */
} newborn;

SPDL_FN(looks_at_it, void, void) {
    newborn *n = (newborn *)spdl_ctx(task);
    if (__atomic_load_n(&n->p, __ATOMIC_ACQUIRE) == NULL)
        __atomic_add_fetch(&n->unknown, 1, __ATOMIC_RELAXED);
    if (spdl_sequence(task) > 0) return SPDL_END;
    *out = item_of(0);
    return SPDL_OK;
}

static void the_pipeline_is_stored_first(void) {
    spdl_pool *pool = pool_of(2);
    int unknown = 0;
    for (long i = times(2000); i > 0; --i) {
        newborn n = { 0 };
        spdl_pipeline_desc desc = { .workers = i % 2 ? 0 : 2, .trace = "" };
        if (i % 2) desc.pool = pool;
        if (how == TRACED) desc.trace_events = 100;
        REQUIRE(spdl_pipeline_create(&n.p, &desc, SPDL_STAGES(
            SPDL_SOURCE(looks_at_it, .ctx = &n), SPDL_PIPE(passes), SPDL_SINK(2))) == SPDL_OK);
        takes_numbers(n.p, 0, 1, true);
        spdl_pipeline_destroy(n.p);
        unknown += n.unknown;
    }
    CHECK_EQ(unknown, 0);
    spdl_pool_destroy(pool);
}

WAYS(the_pipeline_is_stored_first)

/* --- turns by time --- */

typedef struct clockwork {
    uint64_t ns;
    int calls, over; /* atomic */
} clockwork;

SPDL_FN(goes_on, void, void) {
    if (told_by(&((const clockwork *)spdl_ctx(task))->over)) return SPDL_END;
    *out = item_of(0);
    return SPDL_OK;
}

SPDL_FN(ticks, void, void) {
    clockwork *c = (clockwork *)spdl_ctx(task);
    spin(c->ns);
    __atomic_add_fetch(&c->calls, 1, __ATOMIC_RELAXED);
    return SPDL_SKIP;
}

/* Calls of both in half a second, each on its pool, which may be the same. */
static void ticking(spdl_pool *const pool[2], double rate[2]) {
    clockwork c[2] = { { .ns = 1000 }, { .ns = 1000000 } };
    spdl_pipeline *p[2];
    int before[2];
    uint64_t since;
    for (int i = 0; i < 2; ++i)
        p[i] = BEGIN_ON(pool[i], SPDL_SOURCE(goes_on, .ctx = &c[i], .buffer_size = 16),
                        SPDL_PIPE(ticks, .ctx = &c[i], .concurrency = 2,
                                  .output_order = SPDL_ORDER_COMPLETION), /* nobody takes holes */
                        SPDL_SINK(16));
    sleep_us(50000);
    since = spdl_time_ns();
    for (int i = 0; i < 2; ++i) before[i] = told_by(&c[i].calls);
    sleep_us(500000);
    for (int i = 0; i < 2; ++i)
        rate[i] = (told_by(&c[i].calls) - before[i]) / ((double)(spdl_time_ns() - since) * 1e-9);
    for (int i = 0; i < 2; ++i) {
        __atomic_store_n(&c[i].over, 1, __ATOMIC_RELEASE);
        takes_numbers(p[i], 0, 0, true);
        spdl_pipeline_destroy(p[i]);
    }
}

/* Half as much as beside each other on two pools would be fair: noise gets the rest. */
static bool shared_fairly(void) {
    spdl_pool *const two[2] = { pool_of(2), pool_of(2) }, *const one[2] = { two[0], two[0] };
    double apart[2], together[2];
    bool fair = true;
    ticking(two, apart);
    ticking(one, together);
    for (int i = 0; i < 2; ++i) {
        const double share = together[i] / apart[i];
        if (share < 0.45) printf("    calls of %s: %.2f of what they get on a pool of their own\n",
                                 i ? "1 ms" : "1 us", share);
        fair = fair && share >= 0.25;
        spdl_pool_destroy(two[i]);
    }
    return fair;
}

static void pipelines_on_a_pool_get_turns_by_time(void) {
    CHECK(shared_fairly() || shared_fairly() || shared_fairly());
}

WAYS(pipelines_on_a_pool_get_turns_by_time)

/* --- what real programs have found --- */

static uint64_t churned;

/* Pure arithmetic: no system call, in which the kernel might look who else wants the processor. */
static void churn(long rounds) {
    uint64_t state = __atomic_load_n(&churned, __ATOMIC_RELAXED);
    for (long i = 0; i < rounds; ++i) state = state * 6364136223846793005u + 1442695040888963407u;
    __atomic_store_n(&churned, state, __ATOMIC_RELAXED);
}

static long rounds_in_a_us(void) {
    uint64_t least = UINT64_MAX;
    for (int i = 0; i < 20; ++i) {
        const uint64_t since = spdl_time_ns();
        uint64_t took;
        churn(100000);
        took = spdl_time_ns() - since;
        if (took < least) least = took;
    }
    return 1 + (long)(100000000 / (least + 1));
}

typedef struct mill {
    long length, rounds_us, us;
    uint64_t measured; /* what the source itself has measured */
} mill;

SPDL_FN(makes_measured, void, void) {
    mill *m = (mill *)spdl_ctx(task);
    const uint64_t since = spdl_time_ns();
    if ((long)spdl_sequence(task) >= m->length) return SPDL_END;
    churn(m->rounds_us);
    *out = item_of((long)spdl_sequence(task));
    m->measured += spdl_time_ns() - since;
    return SPDL_OK;
}

SPDL_FN(mills, void, void) {
    const mill *m = (const mill *)spdl_ctx(task);
    churn(m->us * m->rounds_us);
    *out = in;
    return SPDL_OK;
}

/* A source of 1 us before a stage of 3 ms, while a trainer computes beside them. Whether its time
   was what its calls took; that another program has interrupted it once is no fault. */
static bool books_on_its_stage(void) {
    enum { BATCH = 8 };
    mill m = { .length = BATCH * times(60), .us = 3000 };
    void *batch = NULL;
    spdl_pipeline *p;
    uint64_t busy_ns;
    m.rounds_us = rounds_in_a_us();
    p = BEGIN(2, SPDL_SOURCE(makes_measured, .ctx = &m),
              SPDL_PIPE(mills, .ctx = &m, .concurrency = 2), SPDL_BATCH(BATCH), SPDL_SINK(3));
    while (spdl_pipeline_next(p, &batch, SPDL_SECONDS(PATIENCE)) == SPDL_OK) {
        spdl_batch_free(batch);
        churn(20000 * m.rounds_us);
    }
    busy_ns = stats_of(p, 0).busy_ns;
    CHECK(stats_of(p, 1).busy_ns > (uint64_t)m.length * 1000000);
    spdl_pipeline_destroy(p);
    if (busy_ns < 10 * m.measured + 1000000) return true;
    fprintf(stderr, "    %.1f ms, really %.1f\n", (double)busy_ns * 1e-6,
            (double)m.measured * 1e-6);
    return false;
}

static void time_is_booked_on_its_stage(void) {
    CHECK(books_on_its_stage() || books_on_its_stage() || books_on_its_stage());
}

static void time_is_booked_on_its_stage_plain(void) { time_is_booked_on_its_stage(); }

static void time_is_booked_on_its_stage_traced(void) {
    how = TRACED;
    time_is_booked_on_its_stage();
}

static void *is_busy(void *arg) {
    const mill *m = (const mill *)arg;
    while (told_by((const int *)&m->measured) == 0) churn(1000 * m->rounds_us);
    return NULL;
}

/* How often this thread, or all of this process, has slept of its own accord. One that the system
   interrupts, for a worker that it has just woken or for another program, has not. */
static long sleeps(bool of_all) {
#ifdef RUSAGE_THREAD
    struct rusage use;
    REQUIRE(getrusage(of_all ? RUSAGE_SELF : RUSAGE_THREAD, &use) == 0);
    return use.ru_nvcsw;
#else
    (void)of_all;
    return 0;
#endif
}

/* Lets this thread, and those that it starts, use two processors only, or again all. */
static void keep_to_two_processors(bool two) {
#ifdef RUSAGE_THREAD
    static cpu_set_t all;
    cpu_set_t these;
    if (two) REQUIRE(sched_getaffinity(0, sizeof all, &all) == 0);
    these = all;
    for (size_t i = CPU_SETSIZE; i-- > 0 && two && CPU_COUNT(&these) > 2;) CPU_CLR(i, &these);
    REQUIRE(sched_setaffinity(0, sizeof these, &these) == 0);
#else
    (void)two;
#endif
}

/* An item that is ready is taken at once, also where others want the processors. next does not
   wait, and seldom wakes a worker, which could take the processor of the consumer: workers that are
   ahead do not sleep for each item. How many items come late is told. Returns false if the workers
   slept often. */
static bool takes_ready_items(void) {
    mill m = { .length = 1 + times(400), .us = 1000 };
    uint64_t longest = 0;
    test_thread busy[2];
    long ready = 0, late = 0, slept = 0, taken = 0, of_workers;
    spdl_pipeline *p;
    m.rounds_us = rounds_in_a_us();
    keep_to_two_processors(true);
    for (int i = 0; i < 2; ++i) busy[i] = thread_of(is_busy, &m);
    p = BEGIN(2, SPDL_SOURCE(counts, .ctx = &m.length),
              SPDL_PIPE(mills, .ctx = &m, .concurrency = 2), SPDL_SINK(3));
    of_workers = sleeps(true) - sleeps(false);
    for (; taken + 1 < m.length; ++taken) {
        void *it = NULL;
        const long before = sleeps(false);
        const uint64_t since = spdl_time_ns();
        const spdl_result result = spdl_pipeline_next(p, &it, 0);
        const uint64_t took = spdl_time_ns() - since;
        ready += result == SPDL_OK;
        late += result == SPDL_OK && took > 200000;
        slept += result == SPDL_OK && sleeps(false) > before;
        if (result == SPDL_OK && took > longest) longest = took;
        if (result != SPDL_OK)
            REQUIRE(CHECK_EQ(spdl_pipeline_next(p, &it, SPDL_SECONDS(PATIENCE)), SPDL_OK));
        churn(1000 * m.rounds_us);
    }
    of_workers = sleeps(true) - sleeps(false) - of_workers;
    printf("    %ld of %ld items that were ready came later than 0.2 ms, one after %.1f ms; in %ld "
           "next slept; workers slept %ld times\n",
           late, ready, (double)longest * 1e-6, slept, of_workers);
    CHECK(50 * slept <= ready); /* a lock of the system, held by a thread without a processor */
    takes_numbers(p, taken, m.length, true);
    __atomic_store_n((int *)&m.measured, 1, __ATOMIC_RELEASE);
    for (int i = 0; i < 2; ++i) test_join(busy[i]);
    spdl_pipeline_destroy(p);
    keep_to_two_processors(false);
    return 2 * of_workers <= ready;
}

/* On a machine that is busier still the consumer waits, and workers sleep: once is no fault. */
static void ready_items_come_at_once(void) {
    CHECK(takes_ready_items() || takes_ready_items() || takes_ready_items());
}

TEST_TABLE(contract){
    CASES(all_that_can_be_called_is),
    CASES(calls_may_wait_for_each_other),
    CASES(calls_may_wait_for_later_stages),
    TEST_CASE(token_behind),
    CASES(calls_may_wait_for_the_trainer),
    CASES(calls_may_wait_for_the_producer),
    CASES(a_trainer_may_wait_for_a_full_buffer),
    CASES(one_that_hangs_holds_no_lock),
    CASES(the_pipeline_is_stored_first),
    CASES(pipelines_on_a_pool_get_turns_by_time),
    TEST_CASE(time_is_booked_on_its_stage_plain),
    TEST_CASE(time_is_booked_on_its_stage_traced),
    TEST_CASE(ready_items_come_at_once),
    TEST_END,
};
