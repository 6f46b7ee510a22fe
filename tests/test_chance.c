/* Pipelines drawn by chance, run with everything that can happen to a pipeline at once: a producer,
   somebody who completes deferred calls, somebody who changes the concurrency, somebody who stops,
   and a trainer that rewinds.

   Each has a number. One that breaks a promise says its number and its rows, and
       CHANCE=number [CHANCE_ROUNDS=n] build/cc/runner chance
   runs it alone, n times; with CHANCE_WITHOUT=3,5 it has not those rows of calls, and
       tests/chance_rows.sh build/cc/runner number
   finds out which it needs. --seed repeats a whole run. Without CHANCE, CHANCE_ROUNDS is how many
   are drawn, and CHANCE_TELL=1 shows them. */
#ifndef WILD_FAULTS /* there the library's calls of the system fail: see torture_faults.py */
#define SPDL__WINDOW_NS 300000 /* of the doctor: else a pipeline is over before it tries anything */
#define ITEMS_PRIVATE
#endif
#include "wild_model.h"

#include <limits.h>

/* --- who is to blame --- */

static const char *wild_way_text(wild_way way) {
    static const char *const texts[] = { "",        " asked",  " spreads", " gathers", " sums",
                                         " defers", " opens", " plucks",  " routes",  " deals" };
    return texts[way];
}

/* A row as a program writes it, with what its stage does. */
static void wild_tell_row(const wild *w, size_t i) {
    static const char *const macros[] = { "?", "SOURCE(source", "PIPE(stage", "BATCH(", "SINK(",
                                          "FEED(thing", "BRANCH(stage", "PATH(\"path\"", "MERGE(",
                                          "UNBATCH(" };
    const spdl_stage *row = &w->rows[i];
    const dice *d = &w->dice[i];
    const bool from = row->next != NULL;
    fprintf(stderr, "    SPDL_%s", from ? "FROM(thing, next, ctx" : macros[row->kind]);
    if (row->size > 0) fprintf(stderr, "%d", row->size);
    if (row->kind == SPDL_KIND_SINK) fprintf(stderr, "%d", row->buffer_size);
    else if (row->buffer_size > 0) fprintf(stderr, ", .buffer_size = %d", row->buffer_size);
    if (row->concurrency > 0) fprintf(stderr, ", .concurrency = %d", row->concurrency);
    if (row->max_failures != 0) fprintf(stderr, ", .max_failures = %d", row->max_failures);
    fprintf(stderr, "%s%s%s%s%s%s%s%s%s),",
            row->output_order ? ", .output_order = SPDL_ORDER_COMPLETION" : "",
            row->threads ? ", .threads = 1" : "", row->continuous ? ", .continuous = true" : "",
            row->drop_oldest ? ", .drop_oldest = true" : "",
            row->drop_last ? ", .drop_last = true" : "",
            row->flush ? ", .flush = true" : "", row->again ? ", .again = true" : "",
            row->deferred ? ", .deferred = true" : "",
            row->item_bytes ? ", .item_bytes = sizeof(thing)" : "");
    fprintf(stderr, " /* %zu:%s%s%s%s%s", i, wild_way_text(d->way), d->fresh ? " fresh" : "",
            d->anew ? " anew" : "", d->slow ? " slow" : "", d->buffers ? " in buffers" : "");
    if (d->skips + d->fails > 0) fprintf(stderr, " skips %u %% fails %u %%", d->skips, d->fails);
    if (d->hold > 0) fprintf(stderr, " holds %d", d->hold);
    if (d->stop_at >= 0) fprintf(stderr, " stops at %ld", d->stop_at);
    if (d->count > 0) fprintf(stderr, " up to %ld items", d->count);
    fprintf(stderr, " */\n");
}

static void wild_tell_rows(const wild *w) {
    fprintf(stderr, "chance: pipeline %llu (CHANCE=%llu runs it alone): workers %d%s%s%s, end %d "
            "after %ld, rewind after %ld to %llu%s, epochs %ld of %llu%s%s%s\n",
            (unsigned long long)w->seed, (unsigned long long)w->seed, w->desc.workers,
            w->desc.pool ? ", shared pool" : "", w->meddler ? ", meddler" : "",
            w->desc.next_works_ns ? ", next works" : "", (int)w->end, w->leave_after,
            w->rewind_after, (unsigned long long)w->begins, w->rewound ? " (done)" : "", w->epochs,
            (unsigned long long)w->epoch, w->ordered ? ", ordered" : "", w->known ? ", known" : "",
            w->plain ? ", plain" : "");
    fprintf(stderr, "  with%s%s%s%s%s%s%s%s\n", w->saves ? " a position," : "",
            w->mended ? " a failure mended," : "",
            w->answers ? " answers," : "", w->inner ? " another pipeline," : "",
            w->desc.doctor ? " a doctor," : "", w->desc.report ? " reports," : "",
            w->trace[0] ? " a trace," : "", w->desc.allocator.alloc_fn ? " a heap," : "");
    fprintf(stderr, "  const spdl_stage rows[] = {\n");
    for (size_t i = 0; i < w->count; ++i) wild_tell_row(w, i);
    fprintf(stderr, "  };\n");
}

/* Other threads may write what wild_tell reads. ThreadSanitizer would report that race. If it runs
   this as its death callback, it holds its report lock and would wait for ever. */
#if TEST_TSAN
void AnnotateIgnoreReadsBegin(const char *file, int line);
void AnnotateIgnoreReadsEnd(const char *file, int line);
#else
#define AnnotateIgnoreReadsBegin(file, line) ((void)0)
#define AnnotateIgnoreReadsEnd(file, line) ((void)0)
#endif

static void wild_tell(const wild *w) {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    if (w->count > 0) wild_tell_rows(w);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
}

static void wild_broke(wild *w) {
    if (!__atomic_exchange_n(&w->broken, true, __ATOMIC_RELAXED)) wild_tell(w);
}

/* The last words of a process that hangs or dies. */
static void wild_last_words(void) {
    for (int i = 0; i < 2; ++i) wild_tell(&wilds[i]);
}

static void wild_signal(int number) {
    signal(number, SIG_DFL);
    wild_last_words();
    raise(number);
}

void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

static void wild_watch(void) {
#ifdef SIGALRM
    signal(SIGALRM, wild_signal);
#endif
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
        test_lock(&w->lock);
        if (w->order_count > 0) {
            const size_t at = (size_t)(luck >> 8) % (size_t)w->order_count;
            o = w->orders[at];
            w->orders[at] = w->orders[--w->order_count];
        }
        test_unlock(&w->lock);
        if (o.d != NULL) order_complete(&o);
        else if (quit) return NULL;
        else if (luck % 4) test_yield();
        else sleep_us(50);
    }
}

/* A push that was refused can succeed after a call of ready_fn. */
static void wild_await_room(wild *w, long rings) {
    const uint64_t until = spdl_time_ns() + 20000000000u;
    while (__atomic_load_n(&w->rings, __ATOMIC_ACQUIRE) == rings &&
           !__atomic_load_n(&w->quit, __ATOMIC_ACQUIRE) && spdl_time_ns() < until)
        sleep_us(20);
    HOLDS(w, spdl_time_ns() < until); /* else a wake was lost */
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
        const long rings = __atomic_load_n(&w->rings, __ATOMIC_ACQUIRE);
        if (quit) break;
        if (it == NULL) it = thing_make(&w->dice[0], wild_first(&w->dice[0], 0, value), 0);
        if (luck == 15) sleep_us(30);
        result = spdl_pipeline_push(w->pipeline, it, timeout == SPDL_FOREVER ? 200000 : timeout);
        HOLDS(w, result == SPDL_OK || result == SPDL_CLOSED || result == SPDL_TIMEOUT ||
                     (result == SPDL_FULL && (timeout == 0 || w->lossy_feed)));
        if (result == SPDL_FULL && w->desc.ready_fn != NULL) wild_await_room(w, rings);
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
        if (w->rows[row].kind == SPDL_KIND_PIPE || w->rows[row].kind == SPDL_KIND_UNBATCH)
            EQUAL(w, result, to <= w->dice[row].most ? SPDL_OK : SPDL_E_LIMIT);
        else
            EQUAL(w, result, SPDL_E_INVALID);
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

/* A guest of the pool, who comes and goes. */
typedef struct wild_guest {
    spdl_pool *pool;
    uint64_t state;
    int quit;
} wild_guest;

static void *wild_visits(void *arg) {
    wild_guest *g = (wild_guest *)arg;
    while (!__atomic_load_n(&g->quit, __ATOMIC_ACQUIRE)) {
        const unsigned luck = (unsigned)(test_random(&g->state) % 8);
        const spdl_result result = spdl_pool_run(g->pool, luck % 2 ? 0 : 100000);
        CHECK(result == SPDL_OK || result == SPDL_EMPTY || result == SPDL_FULL);
        if (luck == 7) sleep_us(100);
        else test_yield();
    }
    return NULL;
}

/* --- the trainer --- */

/* A failure names its row and its item, and why. */
static void wild_judge_error(wild *w, const spdl_error *error) {
    const char *const why = strstr(error->text, ", item ");
    char row[32];
    snprintf(row, sizeof row, "stage %d '", error->stage);
    if (wild_faulty) return;
    HOLDS(w, strncmp(error->text, row, strlen(row)) == 0);
    HOLDS(w, why != NULL && (strstr(why, spdl_result_text(SPDL_E_FORMAT)) != NULL ||
                             strstr(why, "drawn by chance") != NULL));
    HOLDS(w, w->dice[error->stage].fails > 0);
}

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
    for (size_t i = 0; i < batch->count; ++i)
        if (batch->items[i] != NULL) wild_see(w, batch->items[i], depth - 1);
    stream_add(&w->seen, WILD_CLOSE);
}

/* A request has failed, and is delivered. */
static void wild_answer(wild *w, thing *in) {
    const spdl_error *error = spdl_pipeline_error(w->pipeline);
    HOLDS(w, in != NULL && in->magic == ALIVE && in->fate == FAILED);
    HOLDS(w, !spdl_pipeline_failed(w->pipeline));
    stream_add(&w->seen, in->number | WILD_ANSWER);
    wild_judge_error(w, error);
    thing_free(in);
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
        } else if (result == SPDL_E_STAGE && w->answers) {
            wild_answer(w, (thing *)taken);
            result = SPDL_OK;
            --most;
        } else if (result == SPDL_OK) {
            wild_see(w, taken, w->depth);
            if (w->depth) spdl_batch_free(taken);
            else thing_free(taken);
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

/* The sequence is known: compares what was delivered with what the model says, the failure that
   ended it included. */
static void wild_judge_sequence(wild *w, spdl_result result, const wild_stream *all) {
    const bool whole = result == SPDL_END || (result < 0 && !w->vague);
    if (result < 0 && !w->vague)
        stream_add(&w->seen, WILD_FAIL + (uint64_t)spdl_pipeline_error(w->pipeline)->stage);
    if (w->vague && !w->plain && spdl_pipeline_failed(w->pipeline))
        return; /* the failure may shorten the last batch, even if a stop was reported first */
    HOLDS(w, stream_begins(all, &w->seen, whole));
}

/* Only what was delivered is known, in no order. */
static void wild_judge_set(wild *w, spdl_result result, const wild_stream *all) {
    wild_stream sorted = stream_sorted(all), seen = stream_sorted(&w->seen);
    HOLDS(w, stream_within(&sorted, &seen, result == SPDL_END));
    stream_free(&sorted);
    stream_free(&seen);
}

/* The pipeline has stopped. */
static void wild_judge_items(wild *w, spdl_result result) {
    const bool whole = result == SPDL_END && w->epochs > 0;
    wild_stream all;
    if (!w->known && !w->ordered) return;
    if (!w->ordered && !w->plain && spdl_pipeline_failed(w->pipeline)) return;
    all = model_all(w, w->epochs ? w->epoch + !whole : 1);
    if (result == SPDL_END) HOLDS(w, !w->fails);
    if (w->ordered) wild_judge_sequence(w, result, &all);
    else wild_judge_set(w, result, &all);
    stream_free(&all);
}

static void wild_judge_end(wild *w, spdl_result result) {
    const spdl_error *error = spdl_pipeline_error(w->pipeline);
    if (result == SPDL_CLOSED) HOLDS(w, w->end != TO_THE_END && w->end != DESTROY);
    if (result >= 0) return;
    HOLDS(w, spdl_pipeline_failed(w->pipeline) && error->result == result);
    if (wild_faulty && result != SPDL_E_FORMAT) return;
    HOLDS(w, result == SPDL_E_FORMAT || result == SPDL_E_STAGE);
    wild_judge_error(w, error);
    /* other calls of the row may still run */
    const uint64_t failed = __atomic_load_n(&w->dice[error->stage].failed, __ATOMIC_RELAXED);
    HOLDS(w, failed > (uint64_t)w->rows[error->stage].max_failures);
}

/* What the calls have counted is what the library says; of calls that go on later a stop may drop
   some. */
static void wild_judge_row(wild *w, size_t i, const spdl_stage_stats *row) {
    const dice *d = &w->dice[i];
    EQUAL(w, row->in_flight, 0);
    if (w->rows[i].fn == NULL) return;
    if (w->rows[i].deferred) {
        HOLDS(w, row->tasks <= d->calls && row->skips <= d->skipped && row->failures <= d->failed);
        HOLDS(w, row->failures == d->drops);
        return;
    }
    EQUAL(w, row->tasks, d->calls);
    EQUAL(w, row->skips, d->skipped);
    EQUAL(w, row->failures, d->failed);
    EQUAL(w, row->failures, d->drops);
    if (w->rows[i].max_failures >= 0 && !w->rewound && !w->loaded && !w->answers &&
        !spdl_pipeline_failed(w->pipeline))
        HOLDS(w, row->failures <= (uint64_t)w->rows[i].max_failures);
}

static void wild_judge_stats(wild *w) {
    static __thread spdl_stats stats;
    uint64_t freed = 0;
    bool batches = false, exact = true;
    spdl_pipeline_stats(w->pipeline, &stats);
    for (size_t i = 0; i + 1 < w->count; ++i) {
        freed += stats.stage[i].freed;
        if (i == 0 && w->lossy_feed) freed += stats.stage[i].skips;
        if (w->rows[i].kind == SPDL_KIND_BATCH) batches = true;
        if (w->rows[i].deferred || w->rows[i].again || w->dice[i].buffers) exact = false;
        wild_judge_row(w, i, &stats.stage[i]);
    }
    if (w->inner != NULL) return; /* it has freed some itself */
    if (!batches) HOLDS(w, (uint64_t)w->fates[OTHERWISE] <= freed);
    if (!batches && exact) EQUAL(w, w->fates[OTHERWISE], freed);
}

/* Frees what stages have kept for themselves, and accounts for everything. */
static void wild_account(wild *w) {
    long sum = 0;
    wild_forget(w);
    for (size_t i = 0; i < w->count; ++i) {
        EQUAL(w, w->dice[i].inits, w->dice[i].finis);
        EQUAL(w, w->dice[i].inside, 0);
    }
    for (int i = 0; i < FATES; ++i) sum += w->fates[i];
    EQUAL(w, w->made, sum);
    EQUAL(w, w->order_count, 0);
    EQUAL(w, w->blocks, 0);
    EQUAL(w, w->heap, 0);
    if (w->desc.report != NULL) HOLDS(w, w->reports > 0 || w->refused || wild_faulty);
    if (w->trace[0] != '\0') HOLDS(w, remove(w->trace) == 0 || w->refused || wild_faulty);
}

/* --- one pipeline --- */

/* CHANCE_SEEN=1 prints a number for what each pipeline has delivered. */
static void wild_say(const wild *w, spdl_result result) {
    uint64_t sum = (uint64_t)w->rewound;
    if (getenv("CHANCE_SEEN") == NULL || !w->ordered || w->feed || result != SPDL_END) return;
    for (size_t i = 0; i < w->seen.count; ++i) sum = mix(sum, w->seen.token[i]);
    printf("seen %llu %s %zu %llx\n", (unsigned long long)w->seed, w->plain ? "plain" : "",
           w->seen.count, (unsigned long long)sum);
}

/* Prints why a pipeline failed, if it broke a promise or CHANCE_TELL is set. Only the consumer may
   call spdl_pipeline_error. */
static void wild_say_failure(const wild *w) {
    const bool broken = __atomic_load_n(&w->broken, __ATOMIC_RELAXED);
    if (!broken && getenv("CHANCE_TELL") == NULL) return;
    if (spdl_pipeline_failed(w->pipeline))
        fprintf(stderr, "  failed: %s\n", spdl_pipeline_error(w->pipeline)->text);
}

/* The pipeline that the source is. */
static bool wild_start_inner(wild *w) {
    spdl_pipeline_desc desc = { .workers = TEST_WORKERS((int)(w->seed % 3)) };
    desc.logger.log_fn = log_nothing;
    if (w->inner_rows[0].fn == NULL) return true;
    if (spdl_pipeline_create(&w->inner, &desc, w->inner_rows, 2) != SPDL_OK) return false;
    w->rows[0].next = spdl_pipeline_next;
    w->rows[0].ctx = w->inner;
    return true;
}

/* False: the system has refused something. */
static bool wild_start(wild *w) {
    spdl_error error;
    w->desc.error = &error;
    if (!wild_start_inner(w)) return !CHECK(wild_faulty);
    while (w->left >= 0) { /* without memory it is refused, and leaves nothing */
        spdl_result result;
        wild_creates = true;
        result = spdl_pipeline_create(&w->pipeline, &w->desc, w->rows, w->count);
        wild_creates = false;
        if (result == SPDL_OK) w->left = -1;
        if (result == SPDL_OK) return true;
        if (wild_faulty) break;
        EQUAL(w, result, SPDL_E_NOMEM);
        EQUAL(w, w->heap, 0);
        HOLDS(w, w->pipeline == NULL && error.text[0] != '\0');
        w->left = -1;
    }
    w->left = -1;
    if (spdl_pipeline_create(&w->pipeline, &w->desc, w->rows, w->count) == SPDL_OK) return true;
    if (wild_faulty) return !CHECK(error.text[0] != '\0');
    CHECK_STR(error.text, "");
    wild_broke(w);
    REQUIRE(w->pipeline != NULL);
    return true;
}

/* Starts again. What keeps something from call to call is made to forget it while all is quiet. */
static void wild_rewind(wild *w) {
    const bool stops = w->stateful || chance(w, 2);
    if (stops) EQUAL(w, spdl_pipeline_stop(w->pipeline, SPDL_FOREVER), SPDL_OK);
    w->rewound = true;
    if (stops) wild_forget(w);
    w->epoch = 0;
    w->seen.count = 0;
    EQUAL(w, spdl_pipeline_rewind(w->pipeline, w->begins, SPDL_FOREVER), SPDL_OK);
}

/* Goes back to a position. */
static void wild_go_back(wild *w, const char *text) {
    spdl_error error;
    if (w->stateful || w->mends) {
        EQUAL(w, spdl_pipeline_stop(w->pipeline, SPDL_FOREVER), SPDL_OK);
        wild_forget(w);
    }
    for (size_t i = 0; w->mended && i < w->count; ++i) w->dice[i].mended = true; /* it is quiet */
    w->loaded = true;
    EQUAL(w, spdl_state_load(w->pipeline, &text, 1, SPDL_FOREVER, &error), SPDL_OK);
}

/* What failed is dropped from now on. What was delivered before is the same without a failure. */
static spdl_result wild_mend(wild *w) {
    char text[SPDL_STATE_BYTES];
    HOLDS(w, spdl_state_save(w->pipeline, text, sizeof text) > 0);
    w->mended = true;
    wild_go_back(w, text);
    return wild_take(w, LONG_MAX);
}

/* Saves a position, goes on for a while, also to the beginning, and goes back to it: rows with
   .flush have gathered something, or are in the middle of their series. */
static void wild_load(wild *w) {
    char text[SPDL_STATE_BYTES];
    const size_t seen = w->seen.count;
    const uint64_t epoch = w->epoch;
    if (w->epochs > 0 && (long)epoch == w->epochs) {
        wild_rewind(w);
        return;
    }
    HOLDS(w, spdl_state_save(w->pipeline, text, sizeof text) > 0);
    (void)wild_take(w, (long)draw(w, 40));
    if (chance(w, 3)) EQUAL(w, spdl_pipeline_rewind(w->pipeline, 0, SPDL_FOREVER), SPDL_OK);
    wild_go_back(w, text);
    w->seen.count = seen;
    w->epoch = epoch;
}

/* Items are pushed, some are taken, and the rest is not delivered after the rewind. */
static void wild_rewind_feed(wild *w) {
    const long some = w->rewind_after % 8;
    for (long i = 0; i < some; ++i) {
        thing *it = thing_make(&w->dice[0], mix(w->seed, (uint64_t)i), 0);
        const spdl_result result = spdl_pipeline_push(w->pipeline, it, 0);
        HOLDS(w, result == SPDL_OK || result == SPDL_FULL || result == SPDL_CLOSED);
        if (result == SPDL_OK) continue;
        doom(it, 0, KEPT);
        thing_free(it);
    }
    for (long i = 0; i < some / 2; ++i) {
        void *taken = NULL;
        const spdl_result result = spdl_pipeline_next(w->pipeline, &taken, 100000);
        if (result == SPDL_E_STAGE && w->answers) wild_answer(w, (thing *)taken);
        if (result != SPDL_OK) continue;
        wild_see(w, taken, w->depth);
        if (w->depth) spdl_batch_free(taken);
        else thing_free(taken);
    }
    wild_rewind(w);
}

/* Takes what there is to take, and stops in the way that was drawn. How it ended. */
static spdl_result wild_flow(wild *w) {
    void *none = NULL;
    spdl_result result;
    if (w->rewind_after >= 0 && !w->feed) {
        (void)wild_take(w, w->rewind_after);
        if (w->saves) wild_load(w);
        else wild_rewind(w);
    }
    if (w->end == STOP || w->end == DESTROY) result = wild_take(w, w->leave_after);
    if (w->end == STOP) EQUAL(w, spdl_pipeline_stop(w->pipeline, SPDL_FOREVER), SPDL_OK);
    if (w->end == DESTROY) return SPDL_TIMEOUT;
    result = wild_take(w, LONG_MAX);
    wild_judge_end(w, result);
    if (result < 0 && w->mends && !wild_faulty) result = wild_mend(w);
    if (result != SPDL_END || w->epochs == 0)
        EQUAL(w, spdl_pipeline_next(w->pipeline, &none, SPDL_FOREVER), result);
    return result;
}

static void wild_run(wild *w) {
    test_thread clerk = 0, producer = clerk, meddler = clerk, stopper = clerk;
    spdl_result result;
    if (!wild_start(w)) {
        spdl_pipeline_destroy(w->inner);
        EQUAL(w, w->heap, 0);
        return;
    }
    if (w->deferred) clerk = thread_of(wild_clerk, w);
    if (w->feed && w->rewind_after >= 0) wild_rewind_feed(w);
    if (w->feed) producer = thread_of(wild_producer, w);
    if (w->meddler) meddler = thread_of(wild_meddler, w);
    if (w->end == STOP_BY_THREAD) stopper = thread_of(wild_stopper, w);
    result = wild_flow(w);
    if (w->end == STOP_BY_THREAD) test_join(stopper);
    __atomic_store_n(&w->quit, true, __ATOMIC_RELEASE);
    if (w->feed) test_join(producer);
    if (w->meddler) test_join(meddler);
    if (w->end != DESTROY || chance(w, 2)) {
        EQUAL(w, spdl_pipeline_stop(w->pipeline, SPDL_FOREVER), SPDL_OK);
        wild_judge_stats(w);
        if (w->end != DESTROY) wild_judge_items(w, result);
    }
    wild_say(w, result);
    if (getenv("CHANCE_TELL") != NULL) wild_tell(w);
    wild_say_failure(w);
    spdl_pipeline_destroy(w->pipeline);
    spdl_pipeline_destroy(w->inner);
    __atomic_store_n(&w->destroyed, true, __ATOMIC_RELEASE);
    if (w->deferred) test_join(clerk);
    wild_account(w);
    stream_free(&w->seen);
    stream_free(&w->pushed);
}

static void *wild_other(void *arg) {
    wild_run((wild *)arg);
    return NULL;
}

/* One in two lends places to trainers and a guest, some have no worker of their own. */
static spdl_pool *wild_pool(uint64_t seed) {
    spdl_pool_desc desc = { 0 };
    spdl_pool *pool = NULL;
    desc.guests = wild_guests = (int)(seed / 32 % 2) * 2;
    desc.workers = desc.guests ? (int)(seed / 8 % 4) : 1 + (int)(seed / 8 % 4);
    if (spdl_pool_create(&pool, &desc) != SPDL_OK) REQUIRE(wild_faulty);
    return pool;
}

/* Pipeline number `seed`; one in eight shares a pool with another. */
static void wild_round(uint64_t seed) {
    const bool shared = seed % 8 == 0;
    spdl_pool *pool = shared ? wild_pool(seed) : NULL;
    const bool guests = pool != NULL && seed / 32 % 2;
    test_thread other = 0, guest = 0;
    wild_guest visitor = { pool, seed, 0 };
    wilds[1].count = 0;
    for (int i = 0; i < 1 + shared; ++i) {
        wild_make(&wilds[i], seed + 0x100000000u * (uint64_t)i, pool);
        wilds[i].seed = seed;
    }
    if (guests) guest = thread_of(wild_visits, &visitor);
    if (shared) other = thread_of(wild_other, &wilds[1]);
    wild_run(&wilds[0]);
    if (shared) test_join(other);
    __atomic_store_n(&visitor.quit, 1, __ATOMIC_RELEASE);
    if (guests) test_join(guest);
    EQUAL(&wilds[0], items_alive(), 0);
    EQUAL(&wilds[0], __atomic_load_n(&spreads, __ATOMIC_RELAXED), 0);
    spdl_pool_destroy(pool);
}

static void pipelines_keep_their_promises(void) {
    const char *only = getenv("CHANCE"), *wanted = getenv("CHANCE_ROUNDS");
    const long usual = TEST_SANITIZED ? 500 : 5000;
    const long rounds = wanted ? atol(wanted) : only ? 1 : usual;
    const uint64_t first = only ? strtoull(only, NULL, 0) : test_seed() >> 1;
    const uint64_t start = spdl_time_ns();
    long ran;
    wild_faulty = getenv("FAULT") != NULL;
    test_folder(wild_folder, sizeof wild_folder);
    wild_watch();
    chaos_on();
    for (ran = 0; ran < rounds && !wilds[0].broken && !wilds[1].broken; ++ran) {
        /* on a machine that does much else, so many as leave a hang time to be noticed */
        if (rounds == usual && spdl_time_ns() - start > 25000000000u) break;
        wild_round(only ? first : first + (uint64_t)ran);
    }
    fprintf(stderr, "chance: %ld programs\n", ran);
    test_folder_remove(wild_folder);
}

TEST_TABLE(chance) {
    TEST_CASE(pipelines_keep_their_promises),
    TEST_END,
};
