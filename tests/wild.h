/* wild.h - pipelines drawn by chance: what their stages do, and which rows they have.

   Everything a stage does with an item is drawn from the item's number, so what a pipeline must
   deliver can be worked out without it (tests/wild_model.h). Every item knows what became of it and
   which row frees it, so each of them can be accounted for. Included by tests/test_chance.c. */
#ifndef WILD_H_INCLUDED
#define WILD_H_INCLUDED

#include "items.h"

enum {
    WILD_ROWS = 32,
    WILD_ITEMS = 120,
    WILD_HELD = 4,
    WILD_DEEP = 2,
    WILD_ORDERS = 256,
    WILD_MAKERS = 4 /* rows next to each other have different functions that free */
};

/* What becomes of an item. OTHERWISE: nobody has said so, but the library has freed it. */
typedef enum wild_fate { OTHERWISE, TAKEN_IN, SKIPPED, FAILED, DELIVERED, KEPT, FATES } wild_fate;

typedef enum wild_way {
    PLAIN,
    ASKED,   /* a source of SPDL_FROM */
    SPREADS, /* .again: none or some children of an item */
    GATHERS, /* .flush and .again: hands on what it took, some items at a time */
    SUMS,    /* .flush: one item at the end */
    DEFERS,
    OPENS,   /* .again: hands on the items of a batch */
    PLUCKS,  /* takes an item out of a batch */
    ROUTES,  /* a branch, by the number of the item */
    DEALS    /* a branch, each path in turn */
} wild_way;

typedef struct wild wild;

typedef struct thing {
    uint32_t magic;
    wild_fate fate;
    wild *w;
    uint64_t number, epoch;
    bool buffered; /* it lies in a buffer of the library */
    int maker;     /* of the row whose result it is, which frees it */
} thing;

/* What one row draws its results from. */
typedef struct dice {
    wild *w;
    uint64_t seed;
    wild_way way;
    unsigned skips, fails; /* percent */
    bool fresh, slow;
    bool anew; /* takes its input; what it makes gets the address of the freed input */
    bool buffers; /* makes some of its things in buffers */
    bool in_place; /* batch: of bytes */
    int maker;    /* the function that frees its results: wild_frees[maker] */
    int depth;    /* of its input: 0 an item, 1 a batch, 2 a batch of batches */
    int paths;
    int most;     /* calls at the same time */
    int hold;     /* gathers so many */
    bool mended;  /* what failed is dropped */
    long stop_at; /* the number at which the stage stops the pipeline, or -1 */
    long count;   /* source and feed: items in an epoch, at most */
    /* written by calls, atomically where there can be several */
    int inside;
    uint64_t calls, skipped, failed, drops;
    int inits, finis;
    /* of one run, by calls of which there is one at a time; also used by the model */
    uint64_t turn, epoch; /* branch: items dealt so far in this epoch; source: tries, of `value` */
    uint64_t value;
    void *held[WILD_HELD];
    int held_count;
    uint64_t sum;
    uint64_t failures; /* the model's */
} dice;

/* A deferred call that somebody has to complete. */
typedef struct wild_order {
    spdl_deferred call;
    spdl_result result;
    void *item;
    dice *d;
} wild_order;

typedef enum wild_end { TO_THE_END, STOP, DESTROY, STOP_INSIDE, STOP_BY_THREAD } wild_end;

typedef struct wild_stream {
    uint64_t *token; /* numbers of items, and the marks below */
    size_t count, space;
} wild_stream;

#define WILD_OPEN (UINT64_MAX - 0)  /* a batch begins */
#define WILD_CLOSE (UINT64_MAX - 1) /* and ends */
#define WILD_EPOCH (UINT64_MAX - 2) /* the end of an epoch */
#define WILD_FAIL (UINT64_MAX - 40) /* + row: that of the failure that ended it */
#define WILD_ANSWER ((uint64_t)1 << 63) /* + number: the input of a request that failed */
#define WILD_MARKS WILD_FAIL        /* what is not less is a mark */

struct wild {
    uint64_t seed, state;
    spdl_pipeline_desc desc;
    spdl_pipeline *pipeline;
    dice dice[WILD_ROWS];
    spdl_stage rows[WILD_ROWS];
    size_t count;
    int depth;        /* of what is delivered */
    int deferred;
    int owed;         /* rows that must still come: paths and merges */
    bool ordered;     /* the very sequence is known */
    bool known;       /* which items are delivered is known */
    bool plain;       /* neither batches nor branches nor flush */
    bool placed;      /* the innermost batches are bytes: their items cannot leave */
    bool vague;       /* the model: some row has a budget, and fails more often in some order */
    bool fails;       /* the model: some row fails for good */
    bool stateful;    /* some row keeps something that a rewind does not forget */
    long epochs;      /* that the trainer wants to see; 0: the source is not continuous */
    bool feed, lossy_feed, meddler;
    wild_end end;
    long leave_after;
    long rewind_after; /* items; or -1 */
    uint64_t begins;   /* the source, after the rewind */
    bool rewound, loaded, mended;
    bool saves;        /* in place of the rewind, a position is saved and loaded */
    bool mends;        /* a failure is mended, and the position behind it loaded */
    bool answers;      /* a failed request is delivered */
    spdl_pipeline *inner; /* the source is another pipeline, with the first of the dice */
    spdl_stage inner_rows[2];
    spdl_report_desc report;
    spdl_doctor_desc doctor;
    char trace[100];   /* or "" */
    spdl_allocator allocator; /* of some blocks; with a count */
    int left;          /* blocks that the pipeline's allocator has left; -1: all */
    bool refused;      /* one was not had: there may be no trace and no reports */
    long heap;         /* its blocks; atomic */
    /* what the trainer and the producer saw */
    wild_stream seen;
    uint64_t epoch;
    wild_stream pushed;
    bool broken;
    /* atomic */
    long made, fates[FATES], blocks, reports;
    long rings;       /* calls of ready_fn, which some producers wait for */
    bool quit;        /* the helpers are to come home */
    bool destroyed;   /* and the clerk */
    /* the clerk, who completes deferred calls */
    test_mutex lock;
    wild_order orders[WILD_ORDERS];
    int order_count;
};

static wild wilds[2]; /* two when they share a pool */
static void wild_broke(wild *w);
static char wild_folder[64]; /* for traces */
static int wild_guests;      /* places that the shared pool has for them */
static bool wild_faulty;     /* calls of the system may fail at any time */

#define HOLDS(w, ...) ((void)(CHECK(__VA_ARGS__) || (wild_broke(w), true)))
#define EQUAL(w, a, b) ((void)(CHECK_EQ(a, b) || (wild_broke(w), true)))

static unsigned draw(wild *w, unsigned below) {
    return (unsigned)(test_random(&w->state) % below);
}

static bool chance(wild *w, unsigned one_of) { return draw(w, one_of) == 0; }

static uint64_t mix(uint64_t a, uint64_t b) {
    uint64_t state = a * 0x9e3779b97f4a7c15u + b;
    return test_random(&state) >> 1; /* never one of the marks */
}

/* --- streams --- */

static void stream_add(wild_stream *s, uint64_t token) {
    if (s->count == s->space) {
        s->space = s->space ? 2 * s->space : 256;
        s->token = (uint64_t *)realloc(s->token, s->space * sizeof *s->token);
        REQUIRE(s->token != NULL);
    }
    s->token[s->count++] = token;
}

static void stream_free(wild_stream *s) {
    free(s->token);
    memset(s, 0, sizeof *s);
}

/* --- things --- */

static thing *thing_fill(void *memory, const dice *d, uint64_t number, uint64_t epoch) {
    thing *made = (thing *)memory;
    memset(made, 0, sizeof *made);
    made->magic = ALIVE;
    made->w = d->w;
    made->number = number;
    made->epoch = epoch;
    made->maker = d->maker;
    return made;
}

static thing *thing_make(const dice *d, uint64_t number, uint64_t epoch) {
    void *memory = test_memory(sizeof(void *), sizeof(thing));
    REQUIRE(memory != NULL);
    __atomic_add_fetch(&items_live, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&d->w->made, 1, __ATOMIC_RELAXED);
    return thing_fill(memory, d, number, epoch);
}

static void thing_free(void *memory) {
    thing *dead = (thing *)memory;
    wild *w = __atomic_load_n(&dead->magic, __ATOMIC_RELAXED) == ALIVE ? dead->w : &wilds[0];
    if (dead->magic == ALIVE && dead->buffered) {
        spdl_buffer_free(dead);
        return;
    }
    if (__atomic_exchange_n(&dead->magic, DEAD, __ATOMIC_RELAXED) != ALIVE) { /* freed twice */
        HOLDS(w, false);
        return;
    }
    __atomic_sub_fetch(&items_live, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&w->fates[dead->fate], 1, __ATOMIC_RELAXED);
    test_memory_free(dead);
}

/* What the library frees, by the function of one row in four. */
static void thing_free_as(void *memory, int maker) {
    const thing *dead = (const thing *)memory;
    if (dead->magic == ALIVE) EQUAL(dead->w, dead->maker, maker);
    thing_free(memory);
}

static void thing_free_0(void *memory) { thing_free_as(memory, 0); }
static void thing_free_1(void *memory) { thing_free_as(memory, 1); }
static void thing_free_2(void *memory) { thing_free_as(memory, 2); }
static void thing_free_3(void *memory) { thing_free_as(memory, 3); }

static const spdl_free_fn wild_frees[WILD_MAKERS] = { thing_free_0, thing_free_1, thing_free_2,
                                                      thing_free_3 };

/* Calls `each` for every thing in an item, which may be a batch. */
static void things_each(void *taken, int depth, void (*each)(thing *it, void *arg), void *arg) {
    const spdl_batch *batch = (const spdl_batch *)taken;
    if (depth == 0) each((thing *)taken, arg);
    for (size_t i = 0; depth > 0 && i < batch->count; ++i)
        if (batch->items[i] != NULL) things_each(batch->items[i], depth - 1, each, arg);
}

static void thing_doom(thing *it, void *fate) { it->fate = *(const wild_fate *)fate; }

static void doom(void *taken, int depth, wild_fate fate) {
    things_each(taken, depth, thing_doom, &fate);
}

static void number_add(thing *it, void *sum) {
    *(uint64_t *)sum = mix(*(uint64_t *)sum, it->number);
}

/* The number of a batch is that of all its things. */
static uint64_t number_of(void *taken, int depth) {
    uint64_t sum = 0;
    if (depth == 0) return ((const thing *)taken)->number;
    things_each(taken, depth, number_add, &sum);
    return sum;
}

/* --- what a call does --- */

static spdl_result dice_result(const dice *d, uint64_t number, uint64_t tries) {
    const unsigned percent = (unsigned)(mix(d->seed + tries, number) % 100);
    if (percent < d->skips + (d->mended ? d->fails : 0)) return SPDL_SKIP;
    return percent < d->skips + d->fails ? SPDL_E_FORMAT : SPDL_OK;
}

static wild_fate fate_of(spdl_result result) {
    return result == SPDL_OK ? TAKEN_IN : result == SPDL_SKIP ? SKIPPED : FAILED;
}

static void dawdle(const dice *d, uint64_t number) {
    if (d->slow && number % 16 == 0) sleep_us((long)(number % 128));
    else if (number % 32 == 1) test_yield();
}

static void dice_enter(dice *d, spdl_task *task, uint64_t number) {
    const int inside = __atomic_add_fetch(&d->inside, 1, __ATOMIC_SEQ_CST);
    HOLDS(d->w, inside <= d->most);
    __atomic_add_fetch(&d->calls, 1, __ATOMIC_RELAXED);
    if (d->stop_at >= 0 && d->stop_at == (long)spdl_sequence(task)) spdl_stop(task);
    dawdle(d, number);
}

/* The call is over; `in` is NULL for a source. */
static spdl_result dice_leave(dice *d, void *in, spdl_result result, wild_fate fate) {
    if (in != NULL) doom(in, d->depth, fate);
    if (result == SPDL_SKIP) __atomic_add_fetch(&d->skipped, 1, __ATOMIC_RELAXED);
    if (result < 0) __atomic_add_fetch(&d->failed, 1, __ATOMIC_RELAXED);
    __atomic_sub_fetch(&d->inside, 1, __ATOMIC_SEQ_CST);
    return result;
}

/* The same of a row with .again: what is nothing counts as a skip if nothing came before. */
static spdl_result dice_leave_again(dice *d, void *in, spdl_result result, wild_fate fate,
                                    bool handed_on) {
    if (result == SPDL_SKIP && handed_on) __atomic_sub_fetch(&d->skipped, 1, __ATOMIC_RELAXED);
    return dice_leave(d, in, result, fate);
}

static void thing_check(thing *it, void *arg) {
    const spdl_task *task = (const spdl_task *)arg;
    HOLDS(((dice *)spdl_ctx(task))->w, it->magic == ALIVE && it->epoch == spdl_epoch(task));
    it->fate = OTHERWISE;
}

/* The call takes its input, which becomes a result of this row. */
static void dice_take(const dice *d, spdl_task *task, void *in) {
    spdl_take(task);
    if (d->depth == 0) ((thing *)in)->maker = d->maker;
}

/* The call takes its input and frees it. */
static void dice_free(const dice *d, spdl_task *task, void *in, wild_fate fate) {
    spdl_take(task);
    doom(in, d->depth, fate);
    if (d->depth > 0) spdl_batch_free(in);
    else thing_free(in);
}

/* The children of an item; of a call that fails half of them come before that, or none. */
static uint64_t spread_count(const dice *d, uint64_t number, spdl_result result) {
    const uint64_t count = mix(d->seed, number) % 6;
    if (result == SPDL_OK) return count;
    return number % 2 ? count / 2 : 0;
}

static uint64_t spread_child(const dice *d, uint64_t number, uint64_t i) {
    return mix(mix(number, d->seed), i + 1);
}

/* What the calls for one input share. */
typedef struct spread {
    uint64_t number, epoch, done; /* of the input; children so far */
} spread;

static long spreads; /* atomic */

static void spread_free(void *state) {
    __atomic_sub_fetch(&spreads, 1, __ATOMIC_RELAXED);
    test_memory_free(state);
}

static spread *spread_begin(spdl_task *task, const thing *in) {
    spread *s = (spread *)test_memory(sizeof(void *), sizeof *s);
    REQUIRE(s != NULL);
    *s = (spread){ in->number, in->epoch, 0 };
    __atomic_add_fetch(&spreads, 1, __ATOMIC_RELAXED);
    *spdl_call_state(task) = s;
    return s;
}

/* `in` is NULL if an earlier call has freed it. */
static spdl_result call_spreads(dice *d, spdl_task *task, thing *in, void **out) {
    spread *s = (spread *)*spdl_call_state(task);
    const bool first = s == NULL;
    if (first) s = spread_begin(task, in);
    const spdl_result last = dice_result(d, s->number, 0);
    const uint64_t count = spread_count(d, s->number, last), done = s->done++;
    spdl_result result = last == SPDL_OK ? SPDL_SKIP : last;
    if (first && d->anew) dice_free(d, task, in, fate_of(last));
    if (d->anew) in = NULL;
    if (done < count) {
        *out = thing_make(d, spread_child(d, s->number, done), s->epoch);
        result = last == SPDL_OK && done + 1 == count && s->number % 3 ? SPDL_OK : SPDL_AGAIN;
    }
    return dice_leave_again(d, in, result, fate_of(last), done > 0);
}

/* A thing in place of another, at its address. */
static thing *thing_anew(const dice *d, thing *it) {
    const uint64_t number = it->number, epoch = it->epoch;
    it->fate = TAKEN_IN;
    thing_free(it);
    return thing_make(d, number, epoch);
}

/* What spdl_call_state holds is 1 + the number of the next item. */
static spdl_result call_opens(dice *d, spdl_task *task, spdl_batch *in, uint64_t number,
                              void **out) {
    uintptr_t *next = (uintptr_t *)spdl_call_state(task), i = *next;
    if (i == 0) {
        const spdl_result result = dice_result(d, number, 0);
        doom(in, d->depth, result == SPDL_OK ? OTHERWISE : fate_of(result));
        if (result != SPDL_OK) return dice_leave(d, NULL, result, OTHERWISE);
        *next = i = 1;
    }
    while (i <= in->count && in->items[i - 1] == NULL) ++i;
    if (i > in->count) return dice_leave_again(d, NULL, SPDL_SKIP, OTHERWISE, *next > 1);
    *out = in->items[i - 1];
    if (d->depth == 1) ((thing *)*out)->maker = d->maker;
    if (d->depth == 1 && d->anew) *out = thing_anew(d, (thing *)*out);
    in->items[i - 1] = NULL;
    *next = i + 1;
    return dice_leave(d, NULL, SPDL_AGAIN, OTHERWISE);
}

/* What spdl_call_state holds is how many items of those held were handed on. */
static spdl_result call_gathers(dice *d, spdl_task *task, void *in, uint64_t number, void **out) {
    uintptr_t *next = (uintptr_t *)spdl_call_state(task);
    if (*next == 0 && in != NULL) {
        const spdl_result result = dice_result(d, number, 0);
        if (result != SPDL_OK) return dice_leave(d, in, result, fate_of(result));
        dice_take(d, task, in);
        d->held[d->held_count++] = in;
    }
    HOLDS(d->w, spdl_flushing(task) ? in == NULL : in != NULL || *next > 0);
    if (spdl_flushing(task)) /* a stop can have ended a series: the rest is asked for again */
        while ((int)*next < d->held_count && d->held[*next] == NULL) ++*next;
    if (!spdl_flushing(task) && *next == 0 && d->held_count < d->hold)
        return dice_leave(d, NULL, SPDL_SKIP, OTHERWISE);
    if ((int)*next == d->held_count) return dice_leave(d, NULL, SPDL_SKIP, OTHERWISE);
    *out = d->held[*next];
    d->held[(*next)++] = NULL; /* a stop may come before the next */
    things_each(*out, d->depth, thing_check, task);
    if (d->anew && d->depth == 0) *out = thing_anew(d, (thing *)*out);
    if ((int)*next < d->held_count) return dice_leave(d, NULL, SPDL_AGAIN, OTHERWISE);
    d->held_count = 0;
    return dice_leave(d, NULL, SPDL_OK, OTHERWISE);
}

static spdl_result call_sums(dice *d, spdl_task *task, void *in, uint64_t number, void **out) {
    spdl_result result = SPDL_SKIP;
    if (in != NULL) {
        result = dice_result(d, number, 0);
        if (result == SPDL_OK) d->sum += number + 1;
        if (result == SPDL_OK) result = SPDL_SKIP;
        if (d->anew) dice_free(d, task, in, fate_of(result));
        return dice_leave(d, d->anew ? NULL : in, result, fate_of(result));
    }
    HOLDS(d->w, spdl_flushing(task));
    if (d->sum != 0) *out = thing_make(d, mix(d->sum, d->seed), spdl_epoch(task));
    if (d->sum != 0) result = SPDL_OK;
    d->sum = 0;
    return dice_leave(d, NULL, result, OTHERWISE);
}

/* What a stage makes of its input: a new thing, or the input itself. *in is NULL afterwards if the
   call has freed it, or returns it. */
static void *dice_make(const dice *d, spdl_task *task, void **in, uint64_t number,
                       spdl_result result) {
    const uint64_t child = mix(number, d->seed), epoch = spdl_epoch(task);
    const bool buffer = d->buffers && number % 4 != 0;
    void *input = *in;
    thing *made = NULL;
    if (d->anew && d->fresh && d->depth == 0 && result == SPDL_OK) {
        dice_free(d, task, input, TAKEN_IN);
        *in = NULL;
    }
    if (buffer && d->depth == 0 && d->fresh) { /* what is not handed on goes back */
        made = (thing *)spdl_buffer(task);
        HOLDS(d->w, made != NULL && made == spdl_buffer(task));
    }
    if (result != SPDL_OK) return NULL;
    if (!d->fresh || d->depth > 0) {
        if (d->anew) dice_take(d, task, input);
        *in = NULL;
        return input;
    }
    if (made == NULL) return thing_make(d, child, epoch);
    (void)thing_fill(made, d, child, epoch);
    made->buffered = true;
    return made;
}

static spdl_result call_plain(dice *d, spdl_task *task, void *in, uint64_t number, void **out) {
    const spdl_result result = dice_result(d, number, 0);
    *out = dice_make(d, task, &in, number, result);
    return dice_leave(d, in, result, fate_of(result));
}

/* Which item of a batch is taken out. */
static size_t pluck_at(const dice *d, uint64_t number, size_t count) {
    return (size_t)(mix(number, d->seed + 1) % count);
}

/* What it takes out it frees itself. */
static spdl_result call_plucks(dice *d, spdl_batch *in, uint64_t number, void **out) {
    const spdl_result result = dice_result(d, number, 0);
    size_t at = 0, left = 0;
    for (size_t i = 0; i < in->count; ++i) left += in->items[i] != NULL;
    left = result == SPDL_OK && left > 0 ? pluck_at(d, number, left) : SIZE_MAX;
    for (; left != SIZE_MAX; ++at) {
        if (in->items[at] == NULL) continue;
        if (left-- > 0) continue;
        doom(in->items[at], d->depth - 1, KEPT);
        if (d->depth > 1) spdl_batch_free(in->items[at]);
        else thing_free(in->items[at]);
        in->items[at] = NULL;
    }
    *out = result == SPDL_OK ? in : NULL;
    return dice_leave(d, in, result, result == SPDL_OK ? OTHERWISE : fate_of(result));
}

static void order_complete(const wild_order *o) {
    if (o->result == SPDL_E_FORMAT)
        HOLDS(o->d->w, spdl_complete_fail(o->call, "drawn by chance") == SPDL_OK);
    else
        HOLDS(o->d->w, spdl_complete(o->call, o->result, o->item) == SPDL_OK);
}

static void order_place(wild *w, wild_order o) {
    test_lock(&w->lock);
    REQUIRE(w->order_count < WILD_ORDERS);
    w->orders[w->order_count++] = o;
    test_unlock(&w->lock);
}

/* Some calls end at once, some are completed before the function returns, by it or by the clerk. */
static spdl_result call_defers(dice *d, spdl_task *task, void *in, uint64_t number, void **out) {
    const uint64_t how = mix(number, d->seed + 7) % 8;
    const spdl_result result = dice_result(d, number, 0);
    wild_order o = { { NULL, 0 }, result, dice_make(d, task, &in, number, result), d };
    if (how == 0) {
        *out = o.item;
        return dice_leave(d, in, result, fate_of(result));
    }
    o.call = spdl_defer(task);
    HOLDS(d->w, o.call.pipeline != NULL);
    (void)dice_leave(d, in, result, fate_of(result));
    if (how == 1 && result < 0) return result; /* the handle is dead then */
    if (how <= 2) {
        order_complete(&o);
        if (how == 2) HOLDS(d->w, spdl_complete(o.call, SPDL_OK, NULL) == SPDL_E_INVALID);
    } else {
        order_place(d->w, o);
        if (how == 3) sleep_us(60);
        if (how == 4) test_yield();
    }
    return SPDL_PENDING;
}

/* The path of an item; of a branch that deals, in turn. */
static int dice_path(dice *d, uint64_t number) {
    const uint64_t to = d->way == DEALS ? d->turn++ : mix(number, d->seed);
    return (int)(to % (uint64_t)d->paths);
}

static spdl_result call_branch(dice *d, spdl_task *task, void *in, uint64_t number, void **out) {
    const spdl_result result = dice_result(d, number, 0);
    *out = dice_make(d, task, &in, number, result);
    if (d->epoch != spdl_epoch(task)) d->turn = 0;
    d->epoch = spdl_epoch(task);
    if (result == SPDL_OK) HOLDS(d->w, spdl_route(task, dice_path(d, number)) == SPDL_OK);
    return dice_leave(d, in, result, fate_of(result));
}

static spdl_result wild_call(spdl_task *task, void *in, void **out) {
    dice *d = (dice *)spdl_ctx(task);
    const uint64_t number = in ? number_of(in, d->depth) : 0;
    dice_enter(d, task, number);
    if (in != NULL) things_each(in, d->depth, thing_check, task);
    switch (d->way) {
    case SPREADS: return call_spreads(d, task, (thing *)in, out);
    case OPENS: return call_opens(d, task, (spdl_batch *)in, number, out);
    case PLUCKS: return call_plucks(d, (spdl_batch *)in, number, out);
    case GATHERS: return call_gathers(d, task, in, number, out);
    case SUMS: return call_sums(d, task, in, number, out);
    case DEFERS: return call_defers(d, task, in, number, out);
    case ROUTES:
    case DEALS: return call_branch(d, task, in, number, out);
    default: return call_plain(d, task, in, number, out);
    }
}

/* clang-format off */
#define WILD_FN(name, In, Out)                                                                     \
    SPDL_FN(name, In, Out) {                                                                       \
        void *made = NULL;                                                                         \
        const spdl_result result = wild_call(task, in, &made);                                     \
        *out = (Out *)made;                                                                        \
        return result;                                                                             \
    }
/* clang-format on */
WILD_FN(wild_stage, thing, thing)
WILD_FN(wild_batch_stage, spdl_batch, spdl_batch)
WILD_FN(wild_open, spdl_batch, thing)

/* How many items an epoch has. */
static long wild_length(const dice *d, uint64_t epoch) {
    return (long)(mix(d->seed + 3, epoch) % (uint64_t)(d->count + 1));
}

static uint64_t wild_first(const dice *d, uint64_t epoch, uint64_t value) {
    return mix(d->seed + epoch, value);
}

/* A source is called again with the number of an item that it has dropped. */
static spdl_result first_result(dice *d, uint64_t value) {
    d->turn = d->value == value ? d->turn + 1 : 0;
    d->value = value;
    return dice_result(d, value, d->turn);
}

SPDL_FN(wild_source, void, thing) {
    dice *d = (dice *)spdl_ctx(task);
    const uint64_t value = spdl_sequence(task), epoch = spdl_epoch(task);
    const uint64_t number = wild_first(d, epoch, value);
    spdl_result result;
    if (epoch != d->epoch) d->value = UINT64_MAX;
    d->epoch = epoch;
    if ((long)value >= wild_length(d, epoch)) return SPDL_END;
    result = first_result(d, value);
    dice_enter(d, task, number);
    if (result == SPDL_OK) *out = thing_make(d, number, epoch);
    return dice_leave(d, NULL, result, OTHERWISE);
}

/* Another source that is asked: it counts itself, and is not always ready. */
static spdl_result wild_next(void *source, void **next, int64_t timeout_ns) {
    dice *d = (dice *)source;
    const uint64_t number = wild_first(d, d->epoch, d->value);
    HOLDS(d->w, timeout_ns >= 0);
    if (mix(number, d->calls++) % 4 == 0) return SPDL_TIMEOUT;
    dawdle(d, number);
    if ((long)d->value >= wild_length(d, d->epoch)) {
        ++d->epoch;
        d->value = 0;
        return SPDL_END;
    }
    ++d->value;
    *next = thing_make(d, number, d->epoch);
    return SPDL_OK;
}

static void wild_drop(void *ctx, void *dropped, const spdl_error *error) {
    dice *d = (dice *)ctx;
    HOLDS(d->w, error->result < 0 && &d->w->dice[error->stage] == d);
    if (dropped != NULL && d->depth == 0) HOLDS(d->w, ((thing *)dropped)->magic == ALIVE);
    __atomic_add_fetch(&d->drops, 1, __ATOMIC_RELAXED);
}

/* Memory of batches and buffers. */
static void *wild_alloc(size_t bytes, size_t align, void *user) {
    wild *w = (wild *)user;
    void *memory = test_memory(align, bytes);
    if (memory == NULL) return NULL;
    __atomic_add_fetch(&w->blocks, 1, __ATOMIC_RELAXED);
    return memory;
}

static void wild_release(void *memory, size_t bytes, void *user) {
    wild *w = (wild *)user;
    (void)bytes;
    __atomic_sub_fetch(&w->blocks, 1, __ATOMIC_RELAXED);
    test_memory_free(memory);
}

static _Thread_local bool wild_creates; /* this thread is in create */

/* Memory of the pipeline. While it is created some block may not be had. */
static void *wild_heap_alloc(size_t bytes, size_t align, void *user) {
    wild *w = (wild *)user;
    const bool refuses = wild_creates && w->left == 0;
    void *memory = refuses ? NULL : test_memory(align, bytes);
    if (refuses) w->refused = true;
    if (memory == NULL) return NULL;
    if (wild_creates && w->left > 0) --w->left;
    __atomic_add_fetch(&w->heap, 1, __ATOMIC_RELAXED);
    return memory;
}

static void wild_heap_free(void *memory, size_t bytes, void *user) {
    (void)bytes;
    __atomic_sub_fetch(&((wild *)user)->heap, 1, __ATOMIC_RELAXED);
    test_memory_free(memory);
}

static void wild_report(const spdl_stats *interval, const spdl_stats *total, void *user) {
    wild *w = (wild *)user;
    HOLDS(w, interval->delivered <= total->delivered);
    __atomic_add_fetch(&w->reports, 1, __ATOMIC_RELAXED);
}

static void wild_ring(void *user) {
    __atomic_add_fetch(&((wild *)user)->rings, 1, __ATOMIC_RELEASE);
}

static spdl_result wild_init(void *ctx, int worker, void **local) {
    dice *d = (dice *)ctx;
    (void)worker;
    __atomic_add_fetch(&d->inits, 1, __ATOMIC_RELAXED);
    *local = d;
    return SPDL_OK;
}

static void wild_fini(void *ctx, int worker, void *local) {
    dice *d = (dice *)ctx;
    (void)worker;
    HOLDS(d->w, local == ctx);
    __atomic_add_fetch(&d->finis, 1, __ATOMIC_RELAXED);
}

#endif /* WILD_H_INCLUDED */
