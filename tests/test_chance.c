/* Pipelines drawn by chance, run with everything that can happen to a pipeline at once: a producer,
   somebody who completes deferred calls, somebody who changes the concurrency, somebody who stops.

   Each has a number. One that breaks a promise says its number, and
       CHANCE=number [CHANCE_ROUNDS=n] build/cc/runner chance
   runs it alone, n times; --seed repeats a whole run. Without CHANCE, CHANCE_ROUNDS is how many are
   drawn. */
#include "wild_model.h"

#include <limits.h>
#include <signal.h>

static wild wilds[2]; /* two when they share a pool */

/* --- who is to blame --- */

static const char *wild_way_text(wild_way way) {
    static const char *const texts[] = { "",       " emits", " gathers", " sums",  " defers",
                                         " opens", " routes", " deals",  " splits", " chooses" };
    return texts[way];
}

static void wild_tell_row(const wild *w, size_t i) {
    static const char *const kinds[] = { "?",    "source", "pipe", "batch", "sink",
                                         "feed", "branch", "path", "merge" };
    const spdl_stage *row = &w->rows[i];
    const dice *d = &w->dice[i];
    fprintf(stderr, "  %2zu %-6s%s buffer %d, concurrency %d of %d, threads %d, size %d%s", i,
            kinds[row->kind], wild_way_text(d->way), row->buffer_size, row->concurrency,
            row->max_concurrency, row->threads, row->size, row->drop_last ? " drop_last" : "");
    fprintf(stderr, "%s, window %d, merge %d%s%s, retries %d, failures %d or %g, skips %u fails %u",
            row->output_order ? ", completion" : "", row->reorder_window, (int)row->merge_order,
            row->continuous ? ", continuous" : "", row->drop_oldest ? ", drop_oldest" : "",
            row->retries, row->max_failures, row->max_failure_rate, d->skips, d->fails);
    fprintf(stderr, "%s%s%s stop_at %ld\n", d->fresh ? " fresh" : "", d->slow ? " slow" : "",
            d->streams ? " streams" : "", d->stop_at);
}

static void wild_tell(const wild *w) {
    fprintf(stderr, "chance: pipeline %llu (CHANCE=%llu runs it alone): workers %d%s%s%s, end %d "
            "after %ld, epochs %ld\n", (unsigned long long)w->seed, (unsigned long long)w->seed,
            w->desc.workers, w->desc.pool ? ", shared pool" : "", w->meddler ? ", meddler" : "",
            w->doctored ? ", doctor" : "", (int)w->end,
            w->leave_after, w->epochs);
    for (size_t i = 0; i < w->count; ++i) wild_tell_row(w, i);
    if (w->pipeline != NULL && spdl_pipeline_failed(w->pipeline))
        fprintf(stderr, "  failed: %s\n", spdl_pipeline_error(w->pipeline)->text);
}

static void wild_broke(wild *w) {
    if (!__atomic_exchange_n(&w->broken, true, __ATOMIC_RELAXED)) wild_tell(w);
}

/* The last words of a process that hangs or dies. */
static void wild_last_words(void) {
    for (int i = 0; i < 2; ++i)
        if (wilds[i].count > 0) wild_tell(&wilds[i]);
}

static void wild_signal(int number) {
    signal(number, SIG_DFL);
    wild_last_words();
    raise(number);
}

void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

static void wild_watch(void) {
    signal(SIGALRM, wild_signal);
    if (!TEST_SANITIZED) signal(SIGSEGV, wild_signal);
    signal(SIGABRT, wild_signal);
    if (__sanitizer_set_death_callback != NULL) __sanitizer_set_death_callback(wild_last_words);
}

/* --- the helpers --- */

/* Completes deferred calls in any order. */
static void *wild_clerk(void *arg) {
    wild *w = (wild *)arg;
    uint64_t state = w->seed + 1;
    for (;;) {
        const bool quit = __atomic_load_n(&w->destroyed, __ATOMIC_ACQUIRE);
        const uint64_t luck = test_random(&state);
        wild_order o = { { NULL, 0 }, SPDL_OK, NULL, NULL };
        pthread_mutex_lock(&w->lock);
        if (w->order_count > 0) {
            const size_t at = (size_t)(luck >> 8) % (size_t)w->order_count;
            o = w->orders[at];
            w->orders[at] = w->orders[--w->order_count];
        }
        pthread_mutex_unlock(&w->lock);
        if (o.d != NULL) order_complete(&o);
        else if (quit) return NULL;
        else if (luck % 4) sched_yield();
        else sleep_us(50);
    }
}

static void *wild_producer(void *arg) {
    static const int64_t timeouts[] = { 0, 0, 30000, SPDL_FOREVER };
    wild *w = (wild *)arg;
    const long count = w->dice[0].count;
    uint64_t state = w->seed + 2;
    thing *it = NULL;
    spdl_result result = SPDL_OK;
    for (uint64_t value = 0; (long)value < count && result != SPDL_CLOSED;) {
        const bool quit = __atomic_load_n(&w->quit, __ATOMIC_ACQUIRE);
        const unsigned luck = (unsigned)(test_random(&state) % 16);
        const int64_t timeout = quit ? 0 : timeouts[luck % 4];
        if (quit) break;
        if (it == NULL) it = thing_make(w, wild_first(&w->dice[0], 0, value), 0);
        if (luck == 15) sleep_us(30);
        result = spdl_pipeline_push(w->pipeline, it, timeout == SPDL_FOREVER ? 200000 : timeout);
        HOLDS(w, result == SPDL_OK || result == SPDL_CLOSED || result == SPDL_TIMEOUT ||
                     (result == SPDL_FULL && (timeout == 0 || w->lossy_feed)));
        if (result != SPDL_OK && result != SPDL_CLOSED && luck >= 2) continue;
        if (result == SPDL_OK) stream_add(&w->pushed, wild_first(&w->dice[0], 0, value));
        if (result == SPDL_OK) it = NULL;
        ++value; /* given up otherwise: the next one has another number */
        if (it != NULL) doom(it, 0, KEPT);
        if (it != NULL) thing_free(it);
        it = NULL;
    }
    if (it != NULL) doom(it, 0, KEPT);
    if (it != NULL) thing_free(it);
    EQUAL(w, spdl_pipeline_push_end(w->pipeline), SPDL_OK);
    return NULL;
}

/* Changes the concurrency of rows, and looks at the numbers. */
static void *wild_meddler(void *arg) {
    wild *w = (wild *)arg;
    uint64_t state = w->seed + 3;
    static __thread spdl_stats stats;
    while (!__atomic_load_n(&w->quit, __ATOMIC_ACQUIRE)) {
        const int row = (int)(test_random(&state) % w->count);
        const int to = 1 + (int)(test_random(&state) % 8);
        const spdl_result result = spdl_pipeline_set_concurrency(w->pipeline, row, to);
        if (row + 1 == (int)w->count || w->rows[row].kind != SPDL_KIND_PIPE)
            EQUAL(w, result, SPDL_E_INVALID);
        else
            HOLDS(w, result == SPDL_OK ? to <= w->dice[row].most : result == SPDL_E_LIMIT);
        if (state % 8 == 0) spdl_pipeline_stats(w->pipeline, &stats);
        sleep_us((long)(state % 64));
    }
    return NULL;
}

static void *wild_stopper(void *arg) {
    wild *w = (wild *)arg;
    sleep_us(w->leave_after * 10);
    (void)spdl_pipeline_stop(w->pipeline, 0);
    EQUAL(w, spdl_pipeline_stop(w->pipeline, SPDL_FOREVER), SPDL_OK);
    return NULL;
}

/* --- the trainer --- */

static void wild_see_thing(wild *w, thing *it) {
    HOLDS(w, it->magic == ALIVE);
    EQUAL(w, it->epoch, w->epoch);
    it->fate = DELIVERED;
    stream_add(&w->seen, it->number);
}

static void wild_see(wild *w, void *taken, int depth) {
    const spdl_batch *batch = (const spdl_batch *)taken;
    if (depth == 0) {
        wild_see_thing(w, (thing *)taken);
        return;
    }
    stream_add(&w->seen, WILD_OPEN);
    for (size_t i = 0; i < batch->count; ++i) wild_see(w, batch->items[i], depth - 1);
    stream_add(&w->seen, WILD_CLOSE);
}

/* The doctor: something else is different from here on. */
static void wild_differ(wild *w) {
    static const spdl__arm_kind kinds[] = { SPDL__ARM_BASE, SPDL__ARM_COMPUTE, SPDL__ARM_SLEEP,
                                            SPDL__ARM_SETTINGS };
    spdl_pipeline *p = w->pipeline;
    spdl__doctor *d = p->doctor;
    const spdl__arm arm = { kinds[draw(w, 4)], (int)draw(w, (unsigned)p->count), draw(w, 20000),
                            NULL };
    d->found.is.stage = arm.row;
    d->found.is.concurrency = 1 + (int)draw(w, (unsigned)p->node[arm.row].row.max_concurrency);
    d->found.is.workers = d->report.workers +
                          (int)draw(w, 1 + (unsigned)spdl__doctor_workers(d));
    spdl__doctor_set(d, &arm);
}

/* Takes up to `most` items, over the ends of epochs. */
static spdl_result wild_take(wild *w, long most) {
    static const int64_t timeouts[] = { 0, 20000, SPDL_FOREVER, SPDL_FOREVER, SPDL_FOREVER };
    spdl_result result = SPDL_OK;
    while (most > 0 && (result == SPDL_OK || result == SPDL_TIMEOUT)) {
        void *taken;
        result = spdl_pipeline_next(w->pipeline, &taken, timeouts[draw(w, 5)]);
        if (result == SPDL_END && w->epochs > 0) {
            stream_add(&w->seen, WILD_EPOCH);
            if ((long)++w->epoch == w->epochs) return result;
            result = SPDL_OK;
        } else if (result == SPDL_OK) {
            wild_see(w, taken, w->depth);
            if (w->depth) spdl_batch_free(taken);
            else thing_free(taken);
            if (w->doctored && chance(w, 4)) wild_differ(w);
            --most;
        }
    }
    return result;
}

/* --- what must have been --- */

static int by_number(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* What is delivered, without the marks and sorted. */
static wild_stream stream_sorted(const wild_stream *s) {
    wild_stream out = { NULL, 0, 0 };
    for (size_t i = 0; i < s->count; ++i)
        if (!is_mark(s->token[i])) stream_add(&out, s->token[i]);
    if (out.count > 0) qsort(out.token, out.count, sizeof *out.token, by_number);
    return out;
}

static bool stream_begins(const wild_stream *s, const wild_stream *with, bool whole) {
    return with->count <= s->count && (!whole || with->count == s->count) &&
           (with->count == 0 ||
            memcmp(s->token, with->token, with->count * sizeof *s->token) == 0);
}

/* Whether every item of `part` is in `all`; both are sorted. */
static bool stream_within(const wild_stream *all, const wild_stream *part, bool whole) {
    size_t i = 0;
    for (size_t k = 0; k < part->count; ++k, ++i) {
        while (i < all->count && all->token[i] < part->token[k]) ++i;
        if (i == all->count || all->token[i] != part->token[k]) return false;
    }
    return !whole || part->count == all->count;
}

/* No item was overtaken by more than w->window others. */
static void wild_judge_window(wild *w, const wild_stream *all) {
    size_t rank[WILD_ITEMS * 8], count = 0;
    if (w->seen.count > WILD_ITEMS * 8) return;
    for (size_t i = 0; i < w->seen.count; ++i)
        for (rank[count++] = 0; rank[i] < all->count; ++rank[i])
            if (all->token[rank[i]] == w->seen.token[i]) break;
    for (size_t i = 0; i < count; ++i) {
        int overtaken = 0;
        if (is_mark(w->seen.token[i])) continue;
        for (size_t k = 0; k < i; ++k)
            overtaken += rank[k] > rank[i] && !is_mark(w->seen.token[k]);
        HOLDS(w, overtaken <= w->window);
    }
}

/* The pipeline has stopped: compares what was delivered with what the model says. */
static void wild_judge_items(wild *w, spdl_result result) {
    const bool failed = spdl_pipeline_failed(w->pipeline);
    const bool whole = result == SPDL_END;
    const bool sequence = w->ordered && (!failed || w->plain);
    wild_stream all = { NULL, 0, 0 }, sorted, seen;
    if (!w->known || (failed && !w->plain)) return;
    all = model_all(w, w->epochs ? w->epoch + 1 : 1);
    if (w->epochs && whole) { /* the model has run one epoch more than was seen */
        stream_free(&all);
        all = model_all(w, w->epoch);
    }
    sorted = stream_sorted(&all);
    seen = stream_sorted(&w->seen);
    if (sequence) HOLDS(w, stream_begins(&all, &w->seen, whole));
    else HOLDS(w, stream_within(&sorted, &seen, whole));
    if (w->window >= 0) wild_judge_window(w, &all);
    stream_free(&all);
    stream_free(&sorted);
    stream_free(&seen);
}

static void wild_judge_end(wild *w, spdl_result result) {
    const spdl_error *error = spdl_pipeline_error(w->pipeline);
    if (result == SPDL_CLOSED) HOLDS(w, w->end != TO_THE_END && w->end != DESTROY);
    if (result >= 0) return;
    HOLDS(w, spdl_pipeline_failed(w->pipeline) && error->result == result);
    HOLDS(w, result == SPDL_E_FORMAT || result == SPDL_E_STAGE);
    HOLDS(w, w->dice[error->stage].fails > 0);
    if (w->rows[error->stage].max_failure_rate == 0)
        HOLDS(w, w->dice[error->stage].failed > (uint64_t)w->rows[error->stage].max_failures);
}

/* What the calls have counted is what the library says. */
static void wild_judge_stats(wild *w) {
    static __thread spdl_stats stats;
    uint64_t freed = 0;
    bool batches = false, repeats = false;
    spdl_pipeline_stats(w->pipeline, &stats);
    for (size_t i = 0; i + 1 < w->count; ++i) {
        const spdl_stage_stats *row = &stats.stage[i];
        const dice *d = &w->dice[i];
        freed += row->freed;
        if (i == 0 && w->lossy_feed) freed += row->skips;
        if (w->rows[i].kind == SPDL_KIND_BATCH) batches = true;
        if (w->rows[i].retries > 0) repeats = true; /* a stop may have come before the last try */
        EQUAL(w, row->in_flight, 0);
        if (w->rows[i].fn == NULL || w->rows[i].retries > 0) continue;
        EQUAL(w, row->tasks, d->calls);
        EQUAL(w, row->skips, d->skipped);
        EQUAL(w, row->failures, d->failed);
        if (w->rows[i].max_failures >= 0 && w->rows[i].max_failure_rate == 0 &&
            !spdl_pipeline_failed(w->pipeline))
            HOLDS(w, row->failures <= (uint64_t)w->rows[i].max_failures);
    }
    if (!batches) HOLDS(w, (uint64_t)w->fates[OTHERWISE] <= freed);
    if (!batches && !repeats) EQUAL(w, w->fates[OTHERWISE], freed);
}

/* Frees what stages have kept for themselves, and accounts for everything. */
static void wild_account(wild *w) {
    long sum = 0;
    for (size_t i = 0; i < w->count; ++i) {
        dice *d = &w->dice[i];
        for (; d->held_count > 0; --d->held_count) {
            doom(d->held[d->held_count - 1], d->depth, KEPT);
            if (d->depth) spdl_batch_free(d->held[d->held_count - 1]);
            else thing_free(d->held[d->held_count - 1]);
        }
        EQUAL(w, d->inits, d->finis);
        EQUAL(w, d->inside, 0);
    }
    for (int i = 0; i < FATES; ++i) sum += w->fates[i];
    EQUAL(w, w->made, sum);
    EQUAL(w, w->order_count, 0);
}

/* --- one pipeline --- */

static void wild_start(wild *w) {
    spdl_error error;
    w->desc.error = &error;
    if (spdl_pipeline_create(&w->pipeline, &w->desc, w->rows, w->count) == SPDL_OK) return;
    CHECK_STR(error.text, "");
    wild_broke(w);
    REQUIRE(w->pipeline != NULL);
}

/* Takes what there is to take, and stops in the way that was drawn. How it ended. */
static spdl_result wild_flow(wild *w) {
    spdl_result result;
    if (w->end == STOP || w->end == DESTROY) result = wild_take(w, w->leave_after);
    if (w->end == STOP) EQUAL(w, spdl_pipeline_stop(w->pipeline, SPDL_FOREVER), SPDL_OK);
    if (w->end == DESTROY) return SPDL_TIMEOUT;
    result = wild_take(w, LONG_MAX);
    wild_judge_end(w, result);
    return result;
}

static void wild_run(wild *w) {
    pthread_t clerk = pthread_self(), producer = clerk, meddler = clerk, stopper = clerk;
    spdl_result result;
    wild_start(w);
    if (w->deferred) clerk = thread_of(wild_clerk, w);
    if (w->feed) producer = thread_of(wild_producer, w);
    if (w->meddler) meddler = thread_of(wild_meddler, w);
    if (w->end == STOP_BY_THREAD) stopper = thread_of(wild_stopper, w);
    result = wild_flow(w);
    if (w->end == STOP_BY_THREAD) pthread_join(stopper, NULL);
    __atomic_store_n(&w->quit, true, __ATOMIC_RELEASE);
    if (w->feed) pthread_join(producer, NULL);
    if (w->meddler) pthread_join(meddler, NULL);
    if (w->end != DESTROY || chance(w, 2)) {
        EQUAL(w, spdl_pipeline_stop(w->pipeline, SPDL_FOREVER), SPDL_OK);
        wild_judge_stats(w);
        wild_judge_items(w, result);
    }
    spdl_pipeline_destroy(w->pipeline);
    __atomic_store_n(&w->destroyed, true, __ATOMIC_RELEASE);
    if (w->deferred) pthread_join(clerk, NULL);
    wild_account(w);
    stream_free(&w->seen);
    stream_free(&w->pushed);
}

static void *wild_other(void *arg) {
    wild_run((wild *)arg);
    return NULL;
}

/* Pipeline number `seed`; one in eight shares a pool with another. */
static void wild_round(uint64_t seed) {
    const bool shared = seed % 8 == 0;
    spdl_pool *pool = shared ? pool_of(1 + (int)(seed / 8 % 4)) : NULL;
    pthread_t other = pthread_self();
    wilds[1].count = 0;
    for (int i = 0; i < 1 + shared; ++i) {
        wild_make(&wilds[i], seed + 0x100000000u * (uint64_t)i, pool);
        wilds[i].seed = seed;
    }
    if (shared) other = thread_of(wild_other, &wilds[1]);
    wild_run(&wilds[0]);
    if (shared) pthread_join(other, NULL);
    for (int i = 0; i < 1 + shared; ++i) things_bury(&wilds[i]);
    EQUAL(&wilds[0], items_alive(), 0);
    spdl_pool_destroy(pool);
}

static void pipelines_keep_their_promises(void) {
    const char *only = getenv("CHANCE"), *wanted = getenv("CHANCE_ROUNDS");
    const long usual = SPDL__TSAN ? 200 : TEST_SANITIZED ? 600 : 3000;
    const long rounds = wanted ? atol(wanted) : only ? 1 : usual;
    const uint64_t first = only ? strtoull(only, NULL, 0) : test_seed() >> 1;
    const uint64_t start = spdl_time_ns();
    wild_watch();
    chaos_on();
    for (long i = 0; i < rounds && !wilds[0].broken && !wilds[1].broken; ++i) {
        /* on a machine that does much else, so many as leave a hang time to be noticed */
        if (rounds == usual && spdl_time_ns() - start > 12000000000u) break;
        wild_round(only ? first : first + (uint64_t)i);
    }
}

TEST_TABLE(chance) {
    TEST_CASE(pipelines_keep_their_promises),
    TEST_END,
};
