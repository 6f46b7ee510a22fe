/* wild_model.h - pipelines drawn by chance: how their rows are drawn, and what they must deliver.

   The model runs the same rows one after the other on lists of numbers. What it cannot know,
   because it hangs on who is quicker, is noted while the rows are drawn: w->ordered says that the
   sequence is known, w->known that the set is. */
#ifndef WILD_MODEL_H_INCLUDED
#define WILD_MODEL_H_INCLUDED

#include "wild.h"

/* What the rows of a path must keep to, for the sake of the merge behind it. */
typedef struct wild_rule {
    bool lossless; /* one item out for one in: else a merge might starve */
    bool joined;   /* but a stage may drop a batch: it goes on without its items */
    bool inorder;
    bool level;    /* items come out as deep in batches as they went in */
    int nest;
} wild_rule;

static dice *wild_add(wild *w, spdl_stage row, wild_way way) {
    dice *d = &w->dice[w->count];
    REQUIRE(w->count < WILD_ROWS);
    memset(d, 0, sizeof *d);
    d->w = w;
    d->seed = test_random(&w->state) >> 1;
    d->way = way;
    d->depth = w->depth;
    d->stop_at = -1;
    d->most = 1;
    row.ctx = d;
    row.buffer_size = (int)draw(w, 6);
    w->rows[w->count++] = row;
    return d;
}

static spdl_stage *wild_last(wild *w) { return &w->rows[w->count - 1]; }

static void wild_budget(wild *w, spdl_stage *row) {
    static const int budgets[] = { -1, -1, 0, 3, 20 };
    if (chance(w, 6)) row->max_failure_rate = chance(w, 2) ? 1 : 0.2;
    else row->max_failures = budgets[draw(w, 5)];
}

/* Results other than SPDL_OK, and what comes with them. */
static void wild_losses(wild *w, dice *d, wild_rule rule) {
    spdl_stage *row = wild_last(w);
    d->slow = chance(w, 8);
    if (w->end == STOP_INSIDE && chance(w, 2)) d->stop_at = (long)draw(w, WILD_ITEMS);
    if (rule.lossless && !rule.joined) return; /* a merge in turn refuses even a budget there */
    wild_budget(w, row);
    if (rule.joined && row->kind != SPDL_KIND_PIPE) return;
    if (chance(w, 2)) d->skips = draw(w, 30);
    if (chance(w, 3)) d->fails = draw(w, 10);
    if (chance(w, 3) && d->way != DEFERS) row->retries = (int)draw(w, 3) + 1;
    if (!w->ordered && d->depth > 0 && d->skips + d->fails > 0) w->known = false;
}

static wild_way wild_draw_way(wild *w, wild_rule rule) {
    const unsigned which = draw(w, 14);
    if (which == 0 && w->deferred < 2) return DEFERS;
    if (rule.lossless || which > 5) return PLAIN;
    if (which == 1) return GATHERS;
    if (w->depth > 0) return which < 4 && !rule.level ? OPENS : PLAIN;
    if (which == 2) return SUMS;
    return which == 3 && w->emitters < 2 ? EMITS : PLAIN;
}

static int wild_workers(const wild *w) {
    if (w->desc.pool != NULL) return spdl_pool_workers(w->desc.pool);
    return w->desc.workers ? w->desc.workers : 1;
}

static void wild_many(wild *w, dice *d, wild_rule rule) {
    spdl_stage *row = wild_last(w);
    if (chance(w, 10) && w->own_threads < 2) {
        row->threads = (int)draw(w, 3) + 1;
        ++w->own_threads;
    }
    if (!row->flush) row->concurrency = (int)draw(w, 6);
    d->most = row->concurrency ? row->concurrency : row->threads && !row->flush ? row->threads : 1;
    if (!row->flush && chance(w, 3)) row->max_concurrency = d->most += (int)draw(w, 4);
    if (w->doctored && w->doctor.raise && !row->flush && row->max_concurrency == 0) d->most *= 2;
    if (!rule.inorder && chance(w, 4)) row->output_order = SPDL_ORDER_COMPLETION;
    if (chance(w, 3)) row->reorder_window = (int)draw(w, 8);
    if (row->output_order == SPDL_ORDER_COMPLETION && d->most > 1) {
        const bool first = w->ordered && w->plain && row->reorder_window > 0;
        w->window = first && (d->way == PLAIN || d->way == DEFERS) ? row->reorder_window : -1;
        w->ordered = false;
    }
}

static void wild_pipe(wild *w, wild_rule rule) {
    const spdl_stage items = SPDL_PIPE(wild_stage, .free_item = thing_free);
    const spdl_stage batches = SPDL_PIPE(wild_batch_stage, .free_item = spdl_batch_free);
    const spdl_stage opened = SPDL_PIPE(wild_open, .free_item = thing_free);
    const spdl_stage deeper = SPDL_PIPE(wild_batch_stage, .free_item = spdl_batch_free);
    const wild_way way = wild_draw_way(w, rule);
    dice *d = wild_add(w, way == OPENS ? (w->depth > 1 ? deeper : opened)
                                       : w->depth ? batches : items, way);
    spdl_stage *row = wild_last(w);
    d->streams = row->again = way == OPENS && chance(w, 2);
    row->emits = way == EMITS || (way == OPENS && !row->again) || way == GATHERS ? 1000 : 0;
    row->flush = way == GATHERS || way == SUMS;
    row->deferred = way == DEFERS;
    if (way != PLAIN && way != DEFERS) w->window = -1;
    w->emitters += way == EMITS;
    w->deferred += way == DEFERS;
    d->fresh = chance(w, 2);
    d->hold = (int)draw(w, WILD_HELD) + 1;
    if (row->flush || way == OPENS) w->plain = false;
    if (way == OPENS) --w->depth;
    wild_many(w, d, rule);
    wild_losses(w, d, rule);
}

static void wild_batch(wild *w) {
    wild_add(w, (spdl_stage)SPDL_BATCH((int)draw(w, 5) + 1, .drop_last = chance(w, 3)), PLAIN);
    if (wild_last(w)->drop_last && !w->ordered) w->known = false;
    w->plain = false;
    w->window = -1;
    ++w->depth;
}

static void wild_line(wild *w, unsigned rows, wild_rule rule);

static wild_way wild_draw_branch(wild *w, wild_rule rule) {
    if (rule.joined && w->depth > 0 && chance(w, 2)) return SPLITS;
    if (rule.inorder) return DEALS;
    if (w->depth > 0 && !rule.lossless && chance(w, 2)) return SPLITS;
    return chance(w, 2) ? DEALS : ROUTES;
}

/* A merge that is certain not to wait for what its branch does not send. */
static spdl_stage wild_draw_merge(wild *w, wild_way way, wild_rule rule, bool tails) {
    const spdl_stage ready = SPDL_MERGE(), robin = SPDL_MERGE(.merge_order = SPDL_MERGE_ROBIN);
    const spdl_stage batches = SPDL_MERGE(.merge_order = SPDL_MERGE_BATCHES);
    const spdl_stage choice =
        SPDL_MERGE(.merge_order = SPDL_MERGE_CHOICE, .merge_fn = wild_choose);
    if (way == SPLITS && (rule.joined || (!tails && !rule.lossless && !chance(w, 4))))
        return batches;
    if (way == DEALS && !tails && (rule.inorder || !chance(w, 3)))
        return chance(w, 2) ? robin : choice;
    return chance(w, 2) ? ready : choice;
}

static void wild_paths(wild *w, int paths, wild_rule rule, bool tails) {
    const int depth = w->depth;
    const bool was_ordered = w->ordered;
    bool ordered = was_ordered;
    for (int i = 0; i < paths; ++i) {
        w->ordered = was_ordered;
        --w->owed;
        wild_add(w, (spdl_stage)SPDL_PATH("path"), PLAIN);
        wild_line(w, draw(w, 3), rule);
        w->owed -= tails;
        if (tails) wild_batch(w);
        ordered = ordered && w->ordered;
        if (i + 1 < paths) w->depth = depth;
    }
    w->ordered = ordered;
}

static void wild_branch(wild *w, wild_rule rule) {
    const spdl_stage items = SPDL_BRANCH(wild_stage, .free_item = thing_free);
    const spdl_stage batches = SPDL_BRANCH(wild_batch_stage);
    const wild_way way = wild_draw_branch(w, rule);
    const bool tails = !rule.level && !rule.lossless && w->depth < 2 && chance(w, 4);
    const spdl_stage merge = wild_draw_merge(w, way, rule, tails);
    const bool dealt = way == DEALS && (merge.merge_order == SPDL_MERGE_ROBIN ||
                                        merge.merge_order == SPDL_MERGE_CHOICE) && !tails;
    const bool joined = merge.merge_order == SPDL_MERGE_BATCHES;
    wild_rule inside = { rule.lossless || dealt || joined, joined, rule.inorder || joined, true,
                         rule.nest + 1 };
    dice *d = wild_add(w, w->depth ? batches : items, way);
    d->fresh = chance(w, 2);
    d->paths = 2 + (int)draw(w, 3);
    w->owed += d->paths * (1 + tails) + 1;
    w->plain = false;
    w->window = -1;
    if (way == DEALS && !w->ordered) w->known = false;
    wild_losses(w, d, rule);
    wild_paths(w, d->paths, inside, tails);
    if (!(dealt || joined)) w->ordered = false;
    --w->owed;
    wild_add(w, merge, dealt && merge.merge_order == SPDL_MERGE_CHOICE ? DEALS : CHOOSES);
    if (merge.merge_order != SPDL_MERGE_CHOICE) wild_last(w)->ctx = NULL;
    d->hold = dealt && merge.merge_order == SPDL_MERGE_CHOICE; /* neither starts over */
}

static void wild_line(wild *w, unsigned rows, wild_rule rule) {
    for (; rows > 0; --rows) {
        const int room = WILD_ROWS - 2 - (int)w->count - w->owed;
        const bool deeper = rule.nest < WILD_DEEP && !rule.inorder && room > 10;
        if (deeper && chance(w, 4)) wild_branch(w, rule);
        else if (!rule.level && w->depth < 2 && room > 0 && chance(w, 6)) wild_batch(w);
        else if (room > 0) wild_pipe(w, rule);
    }
}

static void wild_begin(wild *w) {
    const spdl_stage source = SPDL_SOURCE(wild_source, .free_item = thing_free);
    const spdl_stage feed = SPDL_FEED(thing, .free_item = thing_free);
    const wild_rule free_rule = { false, false, false, false, 0 };
    dice *d;
    w->feed = chance(w, 5);
    d = wild_add(w, w->feed ? feed : source, PLAIN);
    d->count = (long)draw(w, WILD_ITEMS);
    if (w->feed) {
        wild_last(w)->drop_oldest = chance(w, 3);
        w->lossy_feed = wild_last(w)->drop_oldest;
        return;
    }
    wild_last(w)->continuous = chance(w, 3);
    if (wild_last(w)->continuous) w->epochs = 1 + (long)draw(w, 4);
    if (chance(w, 6)) d->way = EMITS;
    wild_last(w)->emits = d->way == EMITS ? 1000 : 0;
    w->emitters += d->way == EMITS;
    wild_losses(w, d, free_rule);
}

/* With a pool, or with one of its own. */
static void wild_make(wild *w, uint64_t seed, spdl_pool *pool) {
    static const int workers[] = { 0, 1, 1, 2, 2, 3, 4, 6, 8, 16 };
    const wild_rule free_rule = { false, false, false, false, 0 };
    memset(w, 0, sizeof *w);
    w->seed = w->state = seed;
    pthread_mutex_init(&w->lock, NULL);
    w->ordered = w->known = w->plain = true;
    w->window = -1;
    w->end = (wild_end)(chance(w, 2) ? TO_THE_END : (wild_end)draw(w, 5));
    w->leave_after = (long)draw(w, 60);
    w->meddler = chance(w, 5);
    w->desc.workers = workers[draw(w, 10)];
    w->desc.pool = pool;
    if (pool != NULL) w->desc.workers = 0;
    w->desc.logger.log_fn = log_nothing;
    w->doctor.seconds = 1e9; /* what is different the trainer draws, see wild_differ */
    w->doctor.quiet = true;
    w->doctor.raise = chance(w, 2);
    if (chance(w, 6)) w->desc.doctor = &w->doctor;
    wild_begin(w);
    w->doctored = w->desc.doctor != NULL && !w->feed;
    wild_line(w, w->feed + draw(w, 5), free_rule);
    if (w->count < 2 || (w->feed && w->count == 2)) wild_pipe(w, free_rule);
    wild_last(w)->buffer_size = 0;
    w->rows[w->count++] = (spdl_stage)SPDL_SINK((int)draw(w, 5));
    if (chance(w, 10))
        for (size_t i = 0; i < w->count; ++i)
            if (w->rows[i].fn != NULL) {
                w->rows[i].init = wild_init;
                w->rows[i].fini = wild_fini;
            }
    if (w->lossy_feed) w->ordered = w->known = false;
}

/* --- the model --- */

/* Where the element ends that begins at `i`. */
static size_t stream_next(const wild_stream *s, size_t i) {
    int depth = 0;
    do {
        if (s->token[i] == WILD_OPEN) ++depth;
        if (s->token[i] == WILD_CLOSE) --depth;
        ++i;
    } while (depth > 0);
    return i;
}

static bool is_mark(uint64_t token) { return token >= WILD_EPOCH; }

static uint64_t stream_number(const wild_stream *s, size_t from, size_t to, int depth) {
    uint64_t sum = 0;
    if (depth == 0) return s->token[from];
    for (; from < to; ++from)
        if (!is_mark(s->token[from])) sum = mix(sum, s->token[from]);
    return sum;
}

static void stream_copy(wild_stream *to, const wild_stream *s, size_t from, size_t end) {
    for (; from < end; ++from) stream_add(to, s->token[from]);
}

/* The result of all tries. */
static spdl_result model_result(const dice *d, const spdl_stage *row, uint64_t number) {
    spdl_result result = SPDL_E_FORMAT;
    for (int i = 0; i <= row->retries && result < 0; ++i)
        result = dice_result(d, number, d->depth ? 0 : i);
    return result;
}

static void model_emit(const dice *d, wild_stream *out, uint64_t number, bool has_input) {
    const uint64_t family = mix(number, d->seed);
    const uint64_t count = mix(d->seed, number) % 6, own = family % 12;
    for (uint64_t i = 0; i < count; ++i)
        stream_add(out, has_input && i == own ? number : mix(family, i + 1));
}

/* Whether a stage hands a batch it drops on without its items: see rule.joined. */
static bool model_keeps(const wild *w, size_t at) {
    int depth = 0;
    for (; depth > 0 || w->rows[at].kind != SPDL_KIND_MERGE; ++at) {
        if (w->rows[at].kind == SPDL_KIND_SINK) return false;
        depth += (w->rows[at].kind == SPDL_KIND_BRANCH) - (w->rows[at].kind == SPDL_KIND_MERGE);
    }
    return w->rows[at].merge_order == SPDL_MERGE_BATCHES;
}

static wild_stream model_pipe(wild *w, size_t at, const wild_stream *in) {
    const dice *d = &w->dice[at];
    wild_stream out = { NULL, 0, 0 };
    uint64_t sum = 0;
    for (size_t i = 0, end; i < in->count; i = end) {
        const uint64_t number = stream_number(in, i, end = stream_next(in, i), d->depth);
        if (model_result(d, &w->rows[at], number) != SPDL_OK) {
            if (model_keeps(w, at)) stream_add(&out, WILD_OPEN);
            if (model_keeps(w, at)) stream_add(&out, WILD_CLOSE);
            continue;
        }
        if (d->way == EMITS) model_emit(d, &out, number, true);
        else if (d->way == OPENS) stream_copy(&out, in, i + 1, end - 1);
        else if (d->way == SUMS) sum += number + 1;
        else if (d->fresh && d->depth == 0 && d->way != GATHERS)
            stream_add(&out, mix(number, d->seed));
        else stream_copy(&out, in, i, end);
    }
    if (d->way == SUMS && sum != 0) stream_add(&out, mix(sum, d->seed));
    return out;
}

static wild_stream model_batch(const spdl_stage *row, const wild_stream *in) {
    wild_stream out = { NULL, 0, 0 };
    size_t i = 0;
    while (i < in->count) {
        size_t end = i;
        int items = 0;
        for (; items < row->size && end < in->count; ++items) end = stream_next(in, end);
        if (items == row->size || !row->drop_last) {
            stream_add(&out, WILD_OPEN);
            stream_copy(&out, in, i, end);
            stream_add(&out, WILD_CLOSE);
        }
        i = end;
    }
    return out;
}

/* The items of one batch, one part for each path. */
static void model_split(const dice *d, const wild_stream *in, size_t from, size_t to,
                        wild_stream *paths) {
    for (int p = 0; p < d->paths; ++p) stream_add(&paths[p], WILD_OPEN);
    for (size_t i = from + 1, end; i + 1 < to; i = end) {
        const uint64_t number = stream_number(in, i, end = stream_next(in, i), d->depth - 1);
        stream_copy(&paths[mix(number, d->seed) % (uint64_t)d->paths], in, i, end);
    }
    for (int p = 0; p < d->paths; ++p) stream_add(&paths[p], WILD_CLOSE);
}

/* d->hold: the branch deals on where it was in the epoch before; `sum` remembers. */
static void model_route(dice *d, const spdl_stage *row, const wild_stream *in, wild_stream *paths) {
    uint64_t turn = d->hold ? d->sum : 0;
    for (size_t i = 0, end; i < in->count; i = end) {
        const uint64_t number = stream_number(in, i, end = stream_next(in, i), d->depth);
        uint64_t to = mix(number, d->seed);
        if (model_result(d, row, number) != SPDL_OK) continue;
        if (d->way == DEALS) to = turn++;
        if (d->way == SPLITS) model_split(d, in, i, end, paths);
        else if (d->fresh && d->depth == 0)
            stream_add(&paths[to % (uint64_t)d->paths], mix(number, d->seed));
        else stream_copy(&paths[to % (uint64_t)d->paths], in, i, end);
    }
    d->sum = turn;
}

/* One element of each path in turn, beginning with path `turn`. */
static wild_stream model_deal(const wild_stream *paths, uint64_t count, uint64_t turn) {
    wild_stream out = { NULL, 0, 0 };
    size_t at[8] = { 0 };
    for (;; ++turn) {
        const uint64_t p = turn % count;
        const size_t from = at[p];
        if (from >= paths[p].count) return out;
        at[p] = stream_next(&paths[p], from);
        stream_copy(&out, &paths[p], from, at[p]);
    }
}

/* One batch of each path, without their ends; those that are empty are dropped, or kept. */
static wild_stream model_join(const wild_stream *paths, int count, bool keep) {
    wild_stream out = { NULL, 0, 0 };
    size_t at[8] = { 0 };
    while (at[0] < paths[0].count) {
        stream_add(&out, WILD_OPEN);
        for (int p = 0; p < count; ++p) {
            const size_t from = at[p];
            at[p] = stream_next(&paths[p], from);
            stream_copy(&out, &paths[p], from + 1, at[p] - 1);
        }
        if (out.token[out.count - 1] == WILD_OPEN && !keep) --out.count;
        else stream_add(&out, WILD_CLOSE);
    }
    return out;
}

/* The rows of the paths of a branch: those of path i from from[i] to from[i + 1], which is the next
   path or the merge. */
static void model_rows(const wild *w, size_t branch, size_t *from) {
    int depth = 0;
    for (size_t i = branch + 1;; ++i) {
        const spdl_kind kind = w->rows[i].kind;
        if (depth == 0 && (kind == SPDL_KIND_PATH || kind == SPDL_KIND_MERGE)) *from++ = i;
        if (depth == 0 && kind == SPDL_KIND_MERGE) return;
        depth += (kind == SPDL_KIND_BRANCH) - (kind == SPDL_KIND_MERGE);
    }
}

static wild_stream model_run(wild *w, size_t from, size_t to, wild_stream in);

/* What a branch, its paths and its merge, in row *at afterwards, make of their input. */
static wild_stream model_branch(wild *w, size_t *at, const wild_stream *in) {
    dice *d = &w->dice[*at];
    const uint64_t turn = d->hold ? d->sum : 0;
    wild_stream paths[8] = { { NULL, 0, 0 } }, out = { NULL, 0, 0 };
    size_t rows[9];
    const spdl_stage *merge;
    model_rows(w, *at, rows);
    model_route(d, &w->rows[*at], in, paths);
    for (int i = 0; i < d->paths; ++i)
        paths[i] = model_run(w, rows[i] + 1, rows[i + 1], paths[i]);
    *at = rows[d->paths];
    merge = &w->rows[*at];
    if (merge->merge_order == SPDL_MERGE_BATCHES)
        out = model_join(paths, d->paths, model_keeps(w, *at + 1));
    else if (merge->merge_order == SPDL_MERGE_ROBIN || d->hold)
        out = model_deal(paths, (uint64_t)d->paths, turn);
    else for (int i = 0; i < d->paths; ++i) stream_copy(&out, &paths[i], 0, paths[i].count);
    for (int i = 0; i < d->paths; ++i) stream_free(&paths[i]);
    return out;
}

static wild_stream model_run(wild *w, size_t from, size_t to, wild_stream in) {
    for (; from < to; ++from) {
        const spdl_kind kind = w->rows[from].kind;
        wild_stream out = kind == SPDL_KIND_PIPE ? model_pipe(w, from, &in)
                          : kind == SPDL_KIND_BATCH ? model_batch(&w->rows[from], &in)
                                                    : model_branch(w, &from, &in);
        stream_free(&in);
        in = out;
    }
    return in;
}

/* What the source makes in one epoch; *calls goes on from epoch to epoch. */
static wild_stream model_source(const wild *w, uint64_t epoch, uint64_t *calls) {
    const dice *d = &w->dice[0];
    wild_stream out = { NULL, 0, 0 };
    uint64_t value = 0;
    while (value < (uint64_t)wild_length(d, epoch)) {
        const uint64_t number = wild_first(d, epoch, value);
        if (dice_result(d, (*calls)++, 1) != SPDL_OK) continue; /* dropped, or called again */
        if (d->way == EMITS) model_emit(d, &out, number, false);
        else stream_add(&out, number);
        ++value;
    }
    return out;
}

/* All that would be delivered in `epochs` epochs if nothing stopped it. */
static wild_stream model_all(wild *w, uint64_t epochs) {
    wild_stream all = { NULL, 0, 0 };
    uint64_t calls = 0;
    for (size_t i = 0; i < w->count; ++i) w->dice[i].sum = 0;
    for (uint64_t epoch = 0; epoch < epochs; ++epoch) {
        wild_stream out = { NULL, 0, 0 };
        if (w->feed) stream_copy(&out, &w->pushed, 0, w->pushed.count);
        else out = model_source(w, epoch, &calls);
        out = model_run(w, 1, w->count - 1, out);
        stream_copy(&all, &out, 0, out.count);
        stream_free(&out);
        if (w->epochs > 0) stream_add(&all, WILD_EPOCH);
    }
    return all;
}

#endif /* WILD_MODEL_H_INCLUDED */
