/* wild_model.h - pipelines drawn by chance: how their rows are drawn, and what they must deliver.

   The model runs the same rows one after the other on lists of numbers, up to the first failure
   that no budget allows. What it cannot know, because it hangs on who is quicker, is noted while
   the rows are drawn: w->ordered says that the sequence is known, w->known that the set is. */
#ifndef WILD_MODEL_H_INCLUDED
#define WILD_MODEL_H_INCLUDED

#include "wild.h"

/* Where a row is. */
typedef struct wild_place {
    bool inorder; /* in a path whose merge is in input order: one result for each item, or none */
    bool level;   /* in a path: items come out as deep in batches as they went in */
    int nest;
} wild_place;

static dice *wild_add(wild *w, spdl_stage row, wild_way way) {
    dice *d = &w->dice[w->count];
    REQUIRE(w->count < WILD_ROWS);
    memset(d, 0, sizeof *d);
    d->w = w;
    d->maker = (int)(w->count % WILD_MAKERS);
    if (row.free_item == thing_free) row.free_item = wild_frees[d->maker];
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

/* Results other than SPDL_OK, and what comes with them. */
static void wild_losses(wild *w, dice *d) {
    static const int budgets[] = { -1, -1, 0, 3, 20 };
    spdl_stage *row = wild_last(w);
    d->slow = chance(w, 8);
    if (w->end == STOP_INSIDE && chance(w, 2)) d->stop_at = (long)draw(w, WILD_ITEMS);
    if (d->way == ASKED) return;
    row->max_failures = budgets[draw(w, 5)];
    row->on_drop = wild_drop;
    if (chance(w, 2)) d->skips = draw(w, 30);
    if (chance(w, 3)) d->fails = draw(w, 10);
    if (w->answers) row->max_failures = 0;
    if (!w->ordered && d->depth > 0 && d->skips + d->fails > 0) w->known = false;
}

static wild_way wild_draw_way(wild *w, wild_place place) {
    const unsigned which = draw(w, 14);
    if (which == 0 && w->deferred < 2) return DEFERS;
    if (w->answers) return PLAIN;
    if (w->depth > 0 && which == 1 && !(w->placed && w->depth == 1)) return PLUCKS;
    if (place.inorder || which > 6) return PLAIN;
    if (which == 2) return GATHERS;
    if (w->depth > 0)
        return which < 5 && !place.level && !(w->placed && w->depth == 1) ? OPENS : PLAIN;
    return which == 3 ? SUMS : which < 6 ? SPREADS : PLAIN;
}

static void wild_many(wild *w, dice *d, wild_place place) {
    spdl_stage *row = wild_last(w);
    if (!place.inorder && !row->flush && chance(w, 4)) row->output_order = SPDL_ORDER_COMPLETION;
    if (!row->flush && (!row->again || row->output_order)) row->concurrency = (int)draw(w, 8);
    if (w->lossy_feed && w->count == 2 && row->output_order == SPDL_ORDER_INPUT)
        row->concurrency = 1; /* create refuses more */
    if (row->concurrency > 0) d->most = row->concurrency;
    if (row->output_order == SPDL_ORDER_COMPLETION && d->most > 1) w->ordered = false;
}

static void wild_pipe(wild *w, wild_place place) {
    const spdl_stage items = SPDL_PIPE(wild_stage, .free_item = thing_free);
    const spdl_stage batches = SPDL_PIPE(wild_batch_stage, .free_item = spdl_batch_free);
    const spdl_stage opened = SPDL_PIPE(wild_open, .free_item = thing_free);
    const wild_way way = wild_draw_way(w, place);
    const bool opens = way == OPENS && w->depth == 1;
    dice *d = wild_add(w, opens ? opened : w->depth ? batches : items, way);
    spdl_stage *row = wild_last(w);
    row->flush = way == GATHERS || way == SUMS;
    row->again = way == GATHERS || way == SPREADS || way == OPENS;
    row->deferred = way == DEFERS;
    w->deferred += way == DEFERS;
    d->fresh = chance(w, 2);
    d->anew = !w->answers && chance(w, 3);
    if (way == SPREADS) row->free_state = spread_free;
    d->hold = (int)draw(w, WILD_HELD) + 1;
    d->buffers = d->fresh && d->depth == 0 && (way == PLAIN || way == DEFERS) && chance(w, 3);
    if (d->buffers) row->item_bytes = sizeof(thing);
    if (d->buffers && chance(w, 3)) row->allocator = &w->allocator;
    if (row->flush || row->again || way == PLUCKS) w->plain = false;
    if (way == OPENS) --w->depth;
    wild_many(w, d, place);
    wild_losses(w, d);
    if (!w->ordered && way == PLUCKS) w->known = false;
}

static void wild_unbatch(wild *w) {
    wild_add(w, (spdl_stage)SPDL_UNBATCH(), OPENS);
    wild_last(w)->ctx = NULL;
    w->plain = false;
    --w->depth;
}

static void wild_batch(wild *w) {
    spdl_stage *before = wild_last(w);
    const dice *maker = &w->dice[w->count - 1];
    const bool bytes = w->depth == 0 && chance(w, 3);
    dice *d;
    if (bytes && maker->buffers && chance(w, 2)) { /* in its place */
        before->item_bytes = 0;
        before->allocator = NULL;
    }
    d = wild_add(w, (spdl_stage)SPDL_BATCH((int)draw(w, 5) + 1, .drop_last = chance(w, 3)), PLAIN);
    wild_last(w)->ctx = NULL;
    if (wild_last(w)->drop_last && !w->ordered) w->known = false;
    if (w->depth == 0) w->placed = d->in_place = bytes;
    if (bytes) wild_last(w)->item_bytes = sizeof(thing);
    if (bytes && chance(w, 3)) wild_last(w)->allocator = &w->allocator;
    w->plain = false;
    ++w->depth;
}

static void wild_line(wild *w, unsigned rows, wild_place place);

static void wild_paths(wild *w, int paths, wild_place place, bool tails) {
    const int depth = w->depth;
    const bool was_ordered = w->ordered, was_placed = w->placed;
    bool ordered = was_ordered, placed = false;
    for (int i = 0; i < paths; ++i) {
        w->ordered = was_ordered;
        w->placed = was_placed;
        --w->owed;
        wild_add(w, (spdl_stage)SPDL_PATH("path"), PLAIN);
        wild_last(w)->ctx = NULL;
        wild_line(w, draw(w, 3), place);
        w->owed -= tails;
        if (tails) wild_batch(w);
        ordered = ordered && w->ordered;
        placed = placed || w->placed;
        if (i + 1 < paths) w->depth = depth;
    }
    w->ordered = ordered;
    w->placed = placed;
}

static void wild_branch(wild *w, wild_place place) {
    const spdl_stage items = SPDL_BRANCH(wild_stage, .free_item = thing_free);
    const spdl_stage batches = SPDL_BRANCH(wild_batch_stage, .free_item = spdl_batch_free);
    const bool ready = !place.inorder && chance(w, 3);
    const bool tails = ready && !place.level && w->depth < 2 && chance(w, 4);
    const wild_place inside = { !ready, true, place.nest + 1 };
    const wild_way way = chance(w, 2) ? DEALS : ROUTES;
    dice *d = wild_add(w, w->depth ? batches : items, way);
    d->fresh = chance(w, 2);
    d->anew = chance(w, 3);
    d->paths = 2 + (int)draw(w, 3);
    w->owed += d->paths * (1 + tails) + 1;
    w->plain = false;
    w->stateful = w->stateful || way == DEALS;
    if ((way == DEALS || d->depth > 0) && !w->ordered) w->known = false;
    wild_losses(w, d);
    wild_paths(w, d->paths, inside, tails);
    if (ready) w->ordered = false;
    --w->owed;
    wild_add(w, (spdl_stage)SPDL_MERGE(), PLAIN);
    wild_last(w)->ctx = NULL;
    if (ready) wild_last(w)->output_order = SPDL_ORDER_COMPLETION;
}

static void wild_line(wild *w, unsigned rows, wild_place place) {
    for (; rows > 0; --rows) {
        const int room = WILD_ROWS - 2 - (int)w->count - w->owed;
        const bool deeper = place.nest < WILD_DEEP && room > 10, depth = !place.level && room > 0;
        if (w->answers) wild_pipe(w, place);
        else if (deeper && chance(w, 4)) wild_branch(w, place);
        else if (depth && w->depth < 2 && chance(w, 6)) wild_batch(w);
        else if (depth && w->depth > 0 && !(w->placed && w->depth == 1) && chance(w, 8))
            wild_unbatch(w);
        else if (room > 0) wild_pipe(w, place);
    }
}

static void wild_begin(wild *w) {
    const spdl_stage source = SPDL_SOURCE(wild_source, .free_item = thing_free);
    const spdl_stage feed = SPDL_FEED(thing, .free_item = thing_free);
    const spdl_stage from = SPDL_FROM(thing, wild_next, NULL, .free_item = thing_free);
    const unsigned which = draw(w, 11);
    dice *d;
    w->feed = which < 2;
    if (which == 10) { /* another pipeline makes the items */
        w->inner_rows[0] = source;
        w->inner_rows[1] = (spdl_stage)SPDL_SINK(1 + (int)draw(w, 3));
        d = wild_add(w, from, PLAIN);
        w->inner_rows[0].ctx = d;
        w->inner_rows[0].free_item = wild_frees[d->maker];
        d->count = (long)draw(w, WILD_ITEMS);
        d->slow = chance(w, 8);
        w->rewind_after = -1;
        return;
    }
    d = wild_add(w, w->feed ? feed : which == 2 ? from : source, which == 2 ? ASKED : PLAIN);
    d->count = (long)draw(w, WILD_ITEMS);
    if (w->feed) {
        wild_last(w)->drop_oldest = chance(w, 3);
        w->lossy_feed = wild_last(w)->drop_oldest;
        w->answers = chance(w, 3);
        return;
    }
    wild_last(w)->continuous = chance(w, 3);
    if (wild_last(w)->continuous) w->epochs = 1 + (long)draw(w, 4);
    if (which == 3) wild_last(w)->threads = 1;
    wild_losses(w, d);
    w->stateful = d->way == ASKED || d->skips + d->fails > 0;
}

/* Whether the calls of all rows depend on their input alone, or on what .flush rows gather, so that
   a position can be loaded. */
static bool wild_has_position(const wild *w) {
    bool has = w->ordered && !w->feed && w->dice[0].way != ASKED && w->inner_rows[0].fn == NULL;
    for (size_t i = 0; i < w->count; ++i) has = has && w->dice[i].way != DEALS;
    return has;
}

static bool wild_counts_failures(const wild *w) {
    for (size_t i = 0; i < w->count; ++i)
        if (w->dice[i].fails > 0 && w->rows[i].max_failures >= 0) return true;
    return false;
}

/* What changes nothing of what is delivered: reports, a trace, a doctor, memory that is not there
   at first; and a position in place of a rewind. */
static void wild_extras(wild *w) {
    w->left = -1;
    if (chance(w, 4)) {
        w->desc.allocator.alloc_fn = wild_heap_alloc;
        w->desc.allocator.free_fn = wild_heap_free;
        w->desc.allocator.user = w;
        w->left = draw(w, 2) ? (int)draw(w, 80) : -1;
    }
    if (w->feed && mix(w->seed, 57) % 2) { /* drawn aside: old seeds give the same pipelines */
        w->desc.ready_fn = wild_ring;
        w->desc.ready_user = w;
    }
    if (chance(w, 12)) {
        w->report.every = 0.01;
        w->report.report_fn = wild_report;
        w->report.user = w;
        w->desc.report = &w->report;
    }
    if (chance(w, 20)) {
        snprintf(w->trace, sizeof w->trace, "%s/%llx.json", wild_folder,
                 (unsigned long long)w->state);
        w->desc.trace = w->trace;
        w->desc.trace_events = 1 << (8 + draw(w, 4));
    }
    if (chance(w, 8)) {
        w->doctor.seconds = 1e9;
        w->doctor.quiet = true;
        w->desc.doctor = &w->doctor;
    }
    w->desc.deliver_failures = w->answers;
    w->saves = w->rewind_after >= 0 && draw(w, 4) && wild_has_position(w) &&
               !wild_counts_failures(w);
    w->mends = w->end == TO_THE_END && draw(w, 4) && wild_has_position(w);
}

/* With a pool, or with one of its own. */
static void wild_make_desc(wild *w, spdl_pool *pool) {
    static const int workers[] = { SPDL_INLINE, 0, 1, 1, 2, 2, 3, 4, 8, 16 };
    static const int64_t works[] = { 0, 0, SPDL_FOREVER, 1000 };
    w->desc.workers = workers[draw(w, 10)];
    w->desc.pool = pool;
    if (pool != NULL) w->desc.workers = 0;
    w->desc.next_works_ns = works[draw(w, 4)];
    if (pool != NULL && wild_guests == 0) w->desc.next_works_ns = 0;
    w->desc.logger.log_fn = log_nothing;
    w->allocator.alloc_fn = wild_alloc;
    w->allocator.free_fn = wild_release;
    w->allocator.user = w;
}

/* What it remembers of a run is forgotten. Rows with .flush have nothing left of what they
   gathered: a stop that waited, a rewind, a load and destroy call them until then. */
static void wild_forget(wild *w) {
    for (size_t i = 0; i < w->count; ++i) {
        dice *d = &w->dice[i];
        for (; d->held_count > 0; --d->held_count) HOLDS(w, d->held[d->held_count - 1] == NULL);
        HOLDS(w, d->sum == 0);
        d->turn = d->epoch = 0;
        d->value = d->way == ASKED ? w->rewound * w->begins : UINT64_MAX;
    }
}

/* CHANCE_WITHOUT: rows of calls that the pipeline does not have, by their numbers. */
static void wild_leave_out(wild *w) {
    const char *at = getenv("CHANCE_WITHOUT");
    size_t gone = 0;
    for (char *end; at != NULL && *at != '\0'; at = *end == ',' ? end + 1 : end) {
        const size_t row = strtoul(at, &end, 10) - gone;
        if (end == at) return;
        if (row == 0 || row + 1 >= w->count || w->count < 4 || w->dice[row].way == OPENS ||
            w->rows[row].kind != SPDL_KIND_PIPE)
            continue;
        memmove(&w->rows[row], &w->rows[row + 1], (w->count - row - 1) * sizeof w->rows[0]);
        memmove(&w->dice[row], &w->dice[row + 1], (w->count - row - 1) * sizeof w->dice[0]);
        for (size_t i = row; i < w->count; ++i)
            if (w->rows[i].ctx != NULL) w->rows[i].ctx = &w->dice[i];
        --w->count;
        ++gone;
    }
    w->rows[w->count - 2].buffer_size = 0;
}

static void wild_make(wild *w, uint64_t seed, spdl_pool *pool) {
    const wild_place first = { false, false, 0 };
    memset(w, 0, sizeof *w);
    w->seed = w->state = seed;
    w->lock = (test_mutex)TEST_MUTEX;
    w->ordered = w->known = w->plain = true;
    w->end = (wild_end)(chance(w, 2) ? TO_THE_END : (wild_end)draw(w, 5));
    w->leave_after = (long)draw(w, 60);
    w->meddler = chance(w, 5);
    w->rewind_after = chance(w, 4) ? (long)draw(w, 80) : -1;
    w->begins = draw(w, 3) ? 0 : draw(w, 20);
    wild_make_desc(w, pool);
    wild_begin(w);
    wild_line(w, w->feed + draw(w, 5), first);
    if (w->count < 2 || (w->feed && w->count == 2)) wild_pipe(w, first);
    wild_last(w)->buffer_size = 0;
    w->rows[w->count++] = (spdl_stage)SPDL_SINK(1 + (int)draw(w, 4));
    if (chance(w, 10))
        for (size_t i = 0; i < w->count; ++i)
            if (w->rows[i].fn != NULL) {
                w->rows[i].init = wild_init;
                w->rows[i].fini = wild_fini;
            }
    wild_leave_out(w);
    if (w->lossy_feed) w->ordered = w->known = false;
    wild_extras(w);
    wild_forget(w);
}

/* --- the model --- */

static bool is_mark(uint64_t token) { return token >= WILD_MARKS; }

static bool is_fail(uint64_t token) { return token >= WILD_FAIL && token < WILD_FAIL + WILD_ROWS; }

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

static bool stream_failed(const wild_stream *s) {
    return s->count > 0 && is_fail(s->token[s->count - 1]);
}

/* A call has failed: whether that ends the pipeline, here. Where calls run side by side a budget is
   used up by who fails first in time. */
static bool model_ends(wild *w, size_t at) {
    dice *d = &w->dice[at];
    const int budget = w->rows[at].max_failures;
    if (budget < 0 || ++d->failures <= (uint64_t)budget) return false;
    w->fails = true;
    if (budget > 0 && d->most > 1) w->vague = true;
    return w->ordered && !w->vague;
}

static void model_pluck(const dice *d, const wild_stream *in, size_t from, size_t end,
                        uint64_t number, wild_stream *out) {
    size_t count = 0, i, next, at;
    for (i = from + 1; i + 1 < end; i = stream_next(in, i)) ++count;
    at = count > 0 ? pluck_at(d, number, count) : 0;
    stream_add(out, WILD_OPEN);
    for (i = from + 1; i + 1 < end; i = next, --at) {
        next = stream_next(in, i);
        if (at != 0) stream_copy(out, in, i, next);
    }
    stream_add(out, WILD_CLOSE);
}

static wild_stream model_pipe(wild *w, size_t at, const wild_stream *in) {
    dice *d = &w->dice[at];
    wild_stream out = { NULL, 0, 0 };
    uint64_t sum = 0, fail = 0;
    for (size_t i = 0, end; i < in->count && !fail; i = end) {
        const uint64_t number = stream_number(in, i, end = stream_next(in, i), d->depth);
        const spdl_result result = is_fail(in->token[i]) ? SPDL_OK : dice_result(d, number, 0);
        if (is_fail(in->token[i])) {
            fail = in->token[i];
            break;
        }
        if (w->answers && (in->token[i] & WILD_ANSWER || result < 0)) {
            stream_add(&out, in->token[i] | WILD_ANSWER);
            continue;
        }
        for (uint64_t k = 0; d->way == SPREADS && k < spread_count(d, number, result); ++k)
            stream_add(&out, spread_child(d, number, k));
        if (result < 0 && model_ends(w, at)) fail = WILD_FAIL + at;
        if (result != SPDL_OK || d->way == SPREADS) continue;
        if (d->way == OPENS) stream_copy(&out, in, i + 1, end - 1);
        else if (d->way == SUMS) sum += number + 1;
        else if (d->way == PLUCKS) model_pluck(d, in, i, end, number, &out);
        else if (d->fresh && d->depth == 0 && d->way != GATHERS)
            stream_add(&out, mix(number, d->seed));
        else stream_copy(&out, in, i, end);
    }
    /* no call of .flush follows a failure */
    if (d->way == SUMS && sum != 0 && !fail) stream_add(&out, mix(sum, d->seed));
    if (fail) stream_add(&out, fail);
    return out;
}

/* What a row with .flush and .again held at a failure is not handed on. */
static wild_stream model_gathers(wild *w, size_t at, const wild_stream *in) {
    const dice *d = &w->dice[at];
    wild_stream out = model_pipe(w, at, in);
    size_t ends[WILD_ITEMS * 8], count = 0;
    const uint64_t fail = stream_failed(&out) ? out.token[out.count - 1] : 0;
    if (!fail) return out;
    --out.count;
    for (size_t i = 0; i < out.count && count < WILD_ITEMS * 8; ++count)
        ends[count] = i = stream_next(&out, i);
    count -= count % (size_t)d->hold;
    out.count = count > 0 ? ends[count - 1] : 0;
    stream_add(&out, fail);
    return out;
}

static wild_stream model_unbatch(const wild_stream *in) {
    wild_stream out = { NULL, 0, 0 };
    for (size_t i = 0, end; i < in->count; i = end) {
        end = stream_next(in, i);
        if (is_fail(in->token[i])) stream_add(&out, in->token[i]);
        else stream_copy(&out, in, i + 1, end - 1);
    }
    return out;
}

static wild_stream model_batch(const spdl_stage *row, const wild_stream *in) {
    wild_stream out = { NULL, 0, 0 };
    size_t i = 0;
    while (i < in->count && !is_fail(in->token[i])) {
        size_t end = i;
        int items = 0;
        for (; items < row->size && end < in->count && !is_fail(in->token[end]); ++items)
            end = stream_next(in, end);
        if (items == row->size || (!row->drop_last && end == in->count)) {
            stream_add(&out, WILD_OPEN);
            stream_copy(&out, in, i, end);
            stream_add(&out, WILD_CLOSE);
        }
        i = end;
    }
    if (i < in->count) stream_add(&out, in->token[i]);
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

/* What a branch sends down a path is one element, or with completion order all that goes there. */
static wild_stream model_branch(wild *w, size_t *at, const wild_stream *in) {
    const size_t branch = *at;
    dice *d = &w->dice[branch];
    wild_stream paths[8] = { { NULL, 0, 0 } }, out = { NULL, 0, 0 };
    size_t rows[9];
    bool turns;
    model_rows(w, branch, rows);
    *at = rows[d->paths];
    turns = w->rows[*at].output_order == SPDL_ORDER_INPUT;
    for (size_t i = 0, end; i < in->count && !stream_failed(&out); i = end) {
        const bool over = is_fail(in->token[i]);
        const uint64_t number = stream_number(in, i, end = stream_next(in, i), d->depth);
        const spdl_result result = over ? SPDL_OK : dice_result(d, number, 0);
        wild_stream *path;
        int to;
        if (over || (result < 0 && model_ends(w, branch))) {
            stream_add(&out, over ? in->token[i] : WILD_FAIL + branch);
            break;
        }
        if (result != SPDL_OK) continue;
        to = dice_path(d, number);
        path = &paths[to];
        if (d->fresh && d->depth == 0) stream_add(path, mix(number, d->seed));
        else stream_copy(path, in, i, end);
        if (!turns) continue;
        *path = model_run(w, rows[to] + 1, rows[to + 1], *path);
        stream_copy(&out, path, 0, path->count);
        stream_free(path);
    }
    for (int i = 0; i < d->paths; ++i) {
        if (!turns) paths[i] = model_run(w, rows[i] + 1, rows[i + 1], paths[i]);
        stream_copy(&out, &paths[i], 0, paths[i].count);
        stream_free(&paths[i]);
    }
    return out;
}

static wild_stream model_run(wild *w, size_t from, size_t to, wild_stream in) {
    for (; from < to; ++from) {
        const spdl_kind kind = w->rows[from].kind;
        wild_stream out = kind == SPDL_KIND_BATCH     ? model_batch(&w->rows[from], &in)
                          : kind == SPDL_KIND_UNBATCH ? model_unbatch(&in)
                          : kind == SPDL_KIND_BRANCH  ? model_branch(w, &from, &in)
                          : w->dice[from].way == GATHERS ? model_gathers(w, from, &in)
                                                         : model_pipe(w, from, &in);
        stream_free(&in);
        in = out;
    }
    return in;
}

/* What the source makes in one epoch, from item `value` on. */
static wild_stream model_source(wild *w, uint64_t epoch, uint64_t value) {
    const dice *d = &w->dice[0];
    wild_stream out = { NULL, 0, 0 };
    uint64_t tries = 0;
    while ((long)value < wild_length(d, epoch)) {
        const spdl_result result = dice_result(d, value, tries++);
        if (result < 0 && model_ends(w, 0)) {
            stream_add(&out, WILD_FAIL);
            break;
        }
        if (result != SPDL_OK) continue; /* dropped: called again */
        stream_add(&out, wild_first(d, epoch, value++));
        tries = 0;
    }
    return out;
}

/* All that would be delivered in `epochs` epochs if nothing stopped it. */
static wild_stream model_all(wild *w, uint64_t epochs) {
    wild_stream all = { NULL, 0, 0 };
    w->fails = w->vague = false;
    for (size_t i = 0; i < w->count; ++i) w->dice[i].failures = 0;
    for (uint64_t epoch = 0; epoch < epochs && !stream_failed(&all); ++epoch) {
        wild_stream out = { NULL, 0, 0 };
        for (size_t i = 1; i < w->count; ++i) w->dice[i].turn = 0;
        if (w->feed) stream_copy(&out, &w->pushed, 0, w->pushed.count);
        else out = model_source(w, epoch, epoch == 0 && w->rewound ? w->begins : 0);
        out = model_run(w, 1, w->count - 1, out);
        stream_copy(&all, &out, 0, out.count);
        stream_free(&out);
        if (w->epochs > 0 && !stream_failed(&all)) stream_add(&all, WILD_EPOCH);
    }
    return all;
}

#endif /* WILD_MODEL_H_INCLUDED */
