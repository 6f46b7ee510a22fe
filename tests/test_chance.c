/* Pipelines drawn by chance: rows, orders, budgets, workers, and how they end. What a stage
   does with an item is drawn from its number, so what must be delivered is known in advance. */
#include "items.h"

enum { WILD_ITEMS = 200, WILD_STAGES = 6 };

typedef struct dice {
    uint64_t seed;
    unsigned skips, fails; /* percent */
    bool fresh;
    long stop_at; /* the number at which the stage stops the pipeline, or -1 */
    long calls, count;
} dice;

typedef enum wild_end { TO_THE_END, STOP, DESTROY, STOP_INSIDE, STOP_BY_THREAD } wild_end;

typedef struct wild {
    uint64_t state;
    dice dice[WILD_STAGES];
    spdl_stage rows[WILD_STAGES + 1];
    size_t count;
    int batches; /* rows of batches, and the row of the first of them */
    bool ordered, lossy; /* lossy: items may get lost behind a batch */
    wild_end end;
    long leave_after;
    /* what the trainer saw */
    bool seen[WILD_ITEMS];
    long last, delivered;
} wild;

static unsigned draw(wild *w, unsigned below) {
    return (unsigned)(test_random(&w->state) % below);
}

static spdl_result dice_result(const dice *d, uint64_t number) {
    uint64_t state = d->seed ^ number;
    const unsigned percent = (unsigned)(test_random(&state) % 100);
    if (percent < d->skips) return SPDL_SKIP;
    return percent < d->skips + d->fails ? SPDL_E_FORMAT : SPDL_OK;
}

static spdl_result dice_act(const dice *d, spdl_task *task) {
    if (d->stop_at == (long)spdl_sequence(task)) spdl_stop(task);
    return dice_result(d, spdl_sequence(task));
}

SPDL_FN(wild_source, void, item) {
    dice *d = (dice *)spdl_ctx(task);
    const long value = (long)spdl_sequence(task);
    spdl_result result;
    if (value >= d->count) return SPDL_END;
    result = dice_result(d, (uint64_t)d->calls++);
    if (result == SPDL_OK) *out = item_make(value);
    return result;
}

SPDL_FN(wild_stage, item, item) {
    const dice *d = (const dice *)spdl_ctx(task);
    const spdl_result result = dice_act(d, task);
    CHECK_EQ(in->magic, ALIVE);
    CHECK_EQ(in->value, spdl_sequence(task));
    if (result == SPDL_OK) *out = d->fresh ? item_make(in->value) : in;
    return result;
}

SPDL_FN(wild_batch_stage, spdl_batch, spdl_batch) {
    CHECK_EQ(in->sequence, spdl_sequence(task));
    *out = in;
    return dice_act((const dice *)spdl_ctx(task), task);
}

static void wild_budget(wild *w, spdl_stage *row) {
    static const int budgets[] = { -1, -1, 0, 3, 20 };
    if (draw(w, 6) == 0) row->max_failure_rate = draw(w, 2) ? 1 : 0.2;
    else row->max_failures = budgets[draw(w, 5)];
}

static void wild_pipe(wild *w, spdl_stage *row, dice *d) {
    const spdl_stage items = SPDL_PIPE(wild_stage, .free_item = item_free);
    const spdl_stage batches = SPDL_PIPE(wild_batch_stage);
    *row = w->batches ? batches : items;
    *d = (dice){ .seed = test_random(&w->state), .stop_at = -1 };
    d->fresh = draw(w, 2);
    if (draw(w, 2)) d->skips = draw(w, 30);
    if (draw(w, 3) == 0) d->fails = draw(w, 10);
    if (w->batches && d->skips + d->fails > 0) w->lossy = true;
    row->ctx = d;
    row->concurrency = (int)draw(w, 6);
    row->output_order = draw(w, 4) ? SPDL_ORDER_INPUT : SPDL_ORDER_COMPLETION;
    w->ordered = w->ordered && row->output_order == SPDL_ORDER_INPUT;
    if (w->end == STOP_INSIDE && draw(w, 2)) d->stop_at = (long)draw(w, WILD_ITEMS);
    wild_budget(w, row);
}

static void wild_row(wild *w, spdl_stage *row, dice *d) {
    if (draw(w, 6) != 0) {
        wild_pipe(w, row, d);
    } else {
        *row = (spdl_stage)SPDL_BATCH((int)draw(w, 5) + 1, .drop_last = draw(w, 3) == 0);
        w->lossy = w->lossy || row->drop_last;
        ++w->batches;
    }
}

static void wild_make(wild *w, uint64_t seed) {
    spdl_stage *row = w->rows;
    unsigned stages;
    memset(w, 0, sizeof *w);
    w->state = seed;
    stages = draw(w, WILD_STAGES);
    w->ordered = true;
    w->last = -1;
    w->end = (wild_end)(draw(w, 3) ? TO_THE_END : draw(w, 5));
    w->leave_after = (long)draw(w, 60);
    *row = (spdl_stage)SPDL_SOURCE(wild_source, .ctx = &w->dice[0], .free_item = item_free);
    w->dice[0] = (dice){ .seed = seed, .count = (long)draw(w, WILD_ITEMS) };
    if (draw(w, 4) == 0) w->dice[0].skips = draw(w, 30);
    if (draw(w, 8) == 0) w->dice[0].fails = draw(w, 4);
    wild_budget(w, row);
    for (unsigned i = 1; i <= stages; ++i) {
        row->buffer_size = (int)draw(w, 6);
        wild_row(w, ++row, &w->dice[i]);
    }
    *++row = (spdl_stage)SPDL_SINK((int)draw(w, 5));
    w->count = (size_t)(row - w->rows) + 1;
}

/* Whether every stage before a batch lets this one through. */
static bool wild_survives(const wild *w, long value) {
    for (size_t i = 1; i + 1 < w->count && w->rows[i].kind == SPDL_KIND_PIPE; ++i)
        if (dice_result(&w->dice[i], (uint64_t)value) != SPDL_OK) return false;
    return true;
}

static void wild_see(wild *w, void *taken, int depth) {
    if (depth > 0) {
        const spdl_batch *batch = (const spdl_batch *)taken;
        CHECK(batch->count > 0);
        for (size_t i = 0; i < batch->count; ++i) wild_see(w, batch->items[i], depth - 1);
    } else {
        const item *it = (const item *)taken;
        CHECK_EQ(it->magic, ALIVE);
        CHECK(!w->seen[it->value] && wild_survives(w, it->value));
        CHECK(!w->ordered || it->value > w->last);
        w->seen[it->value] = true;
        w->last = it->value;
        ++w->delivered;
    }
}

static spdl_result wild_take(wild *w, spdl_pipeline *p, long most) {
    static const int64_t timeouts[] = { 0, 20000, SPDL_FOREVER, SPDL_FOREVER };
    spdl_result result = SPDL_OK;
    while (most > 0 && (result == SPDL_OK || result == SPDL_TIMEOUT)) {
        void *taken;
        result = spdl_pipeline_next(p, &taken, timeouts[draw(w, 4)]);
        if (result != SPDL_OK) continue;
        wild_see(w, taken, w->batches);
        if (w->batches) spdl_batch_free(taken);
        else item_free(taken);
        --most;
    }
    return result;
}

static void *stop_soon(void *arg) {
    sleep_us(100);
    CHECK_EQ(spdl_pipeline_stop((spdl_pipeline *)arg, SPDL_SECONDS(15)), SPDL_OK);
    return NULL;
}

static long wild_survivors(const wild *w, long below) {
    long count = 0;
    for (long i = 0; i < below; ++i) count += wild_survives(w, i);
    return count;
}

/* How it ended tells exactly what must have been delivered. */
static void wild_judge(const wild *w, const spdl_pipeline *p, spdl_result result) {
    const spdl_error *error = spdl_pipeline_error(p);
    if (result == SPDL_CLOSED) {
        CHECK(w->end != TO_THE_END);
    } else if (result == SPDL_END) {
        if (w->batches == 0 || !w->lossy)
            CHECK_EQ(w->delivered, wild_survivors(w, w->dice[0].count));
    } else {
        CHECK(spdl_pipeline_failed(p) && error->result == result && result == SPDL_E_FORMAT);
        if (w->batches == 0 && w->ordered)
            CHECK_EQ(w->delivered, wild_survivors(w, (long)error->item));
    }
}

/* The pipeline is at rest: what the source made is delivered, skipped, failed, freed or inside. */
static void wild_balance(const wild *w, const spdl_pipeline *p) {
    static spdl_stats stats;
    uint64_t gone;
    if (w->batches > 0) return;
    spdl_pipeline_stats(p, &stats);
    gone = stats.delivered + stats.stage[0].freed;
    for (int i = 1; i < stats.stage_count; ++i)
        gone += stats.stage[i].skips + stats.stage[i].failures + stats.stage[i].freed;
    CHECK_EQ(stats.delivered, w->delivered);
    CHECK_EQ(stats.stage[0].tasks - stats.stage[0].skips - stats.stage[0].failures,
             gone + (uint64_t)items_alive());
}

static void wild_run(wild *w, spdl_pipeline *p) {
    pthread_t stopper = pthread_self();
    spdl_result result = SPDL_OK;
    if (w->end == STOP_BY_THREAD) stopper = thread_of(stop_soon, p);
    if (w->end == STOP || w->end == DESTROY) result = wild_take(w, p, w->leave_after);
    if (w->end == STOP) CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
    if (w->end != DESTROY) result = wild_take(w, p, WILD_ITEMS + 1);
    if (w->end == STOP_BY_THREAD) pthread_join(stopper, NULL);
    if (w->end != DESTROY) wild_judge(w, p, result);
    if (w->end != DESTROY || draw(w, 2)) {
        CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        wild_balance(w, p);
    }
    spdl_pipeline_destroy(p);
    CHECK_EQ(items_alive(), 0);
}

static void pipelines_keep_their_promises(void) {
    const int rounds = SPDL__TSAN ? 150 : TEST_SANITIZED ? 500 : 3000;
    spdl_pool *pool = pool_of(3);
    uint64_t seed = test_seed();
    static wild w;
    chaos_on();
    for (int i = 0; i < rounds; ++i) {
        const uint64_t this_one = test_random(&seed);
        const long before = items_alive();
        const bool shared = this_one % 4 == 0;
        wild_make(&w, this_one);
        wild_run(&w, start(shared ? 0 : (int)(this_one >> 8) & 7, shared ? pool : NULL, w.rows,
                           w.count));
        if (items_alive() != before) break;
    }
    spdl_pool_destroy(pool);
}

TEST_TABLE(chance) {
    TEST_CASE(pipelines_keep_their_promises),
    TEST_END,
};
