/* What explore.c runs: pipelines of spdl.h, as users make them, each with its pool of threads. The
   header is not changed: its Linux layer (or with SPDL_OS_POSIX that of other systems) runs on the
   threads, the clock and the memory of the explorer. It is compiled as for a processor whose
   read-modify-writes are no full barriers.

   A scenario is a row of `plans`: a table of stages, what the consumer does, and which threads run
   beside it. Checked are: each item once, in order, with the work of each row; its memory and that
   of the library freed, and not used afterwards; calls up to the concurrency; the end; and what
   explore.c checks.

   Not modelled are doctors, traces and reports (SPDL_NO_REPORT), and files (SPDL_NO_NPZ). */
#include "explore.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int get_time(struct timespec *at) {
    const uint64_t now = explore_clock();
    at->tv_sec = (time_t)(now / 1000000000u);
    at->tv_nsec = (long)(now % 1000000000u);
    return 0;
}

static bool refuse_thread(void);

static int no_file(const char *path, int how, ...) {
    (void)path, (void)how;
    return -1;
}

#define syscall explore_syscall
#define memcpy explore_copy
#define memset explore_set
#define snprintf explore_print
#define vsnprintf explore_vprint
#define clock_gettime(clock, at) ((void)(clock), get_time(at))
#define pthread_self() ((pthread_t)(explore_self() + 1))
#define pthread_join(thread, result) (explore_join((int)(thread)), 0)
#define pthread_detach(thread) ((void)(thread), 0)
#define pthread_sigmask(how, set, old) ((void)(set), (void)(old), 0)
#define pthread_mutex_lock(mutex) explore_lock(mutex)
#define pthread_mutex_unlock(mutex) explore_unlock(mutex)
#define pthread_cond_wait(condition, mutex) \
    (explore_cond_wait(condition, mutex, false) ? 0 : ETIMEDOUT)
#define pthread_cond_timedwait(condition, mutex, at) \
    ((void)(at), explore_cond_wait(condition, mutex, true) ? 0 : ETIMEDOUT)
#define pthread_cond_signal(condition) explore_cond_wake(condition, false)
#define pthread_cond_broadcast(condition) explore_cond_wake(condition, true)
#define SPDL_PTHREAD_CREATE(thread, attributes, entry, arg) \
    (refuse_thread() ? EAGAIN : (*(thread) = (pthread_t)explore_spawn(entry, arg), 0))
#define sched_yield() (explore_yield(), 0)
#define getpid() 1
#define getrusage(who, usage) (-1)
#define sysconf(name) 1L
#define open no_file
#undef __x86_64__ /* its read-modify-writes are full barriers, and spdl.h knows */

/* Every worker wakes two if there is work for two. */
#define SPDL__WIDE_NS 0
/* Each look at a row that may grow ends a window, and each window begins or judges a trial. */
#define SPDL__MAX_CALLS 4
#define SPDL__GROWTH_NS 0
#define SPDL__GROWTH_CALLS 0
#define SPDL__GROWTH_EACH 0
#define SPDL__GROWTH_MEAN 0
#define SPDL__GROWTH_ASLEEP (-1)
#define SPDL__GROWTH_MOST 1
#define SPDL__GROWTH_GAIN 1.2
#define SPDL__GROWTH_HOLD 0

#define SPDL_CACHE_LINE 16
#define SPDL_SPINS 0
#define SPDL_YIELDS 0
#define SPDL__WARN_NS (-1) /* a deadline would hide a lost wake */
#define SPDL_NO_REPORT
#define SPDL_NO_NPZ
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../../spdl.h"

#define OTHERS 3 /* threads beside the consumer and the workers, at most */
#define ITEM(number) (1 << (number))

typedef enum ending { TAKES_ALL, STOPS, REWINDS, DESTROYS, LEAVES } ending;
typedef enum deed { PASSES, SKIPS, FAILS, STOPS_ALL, MEETS } deed;

/* Zero is the default. */
typedef struct plan {
    const char *name;
    void (*create)(spdl_pipeline_desc *desc); /* its stages */
    int workers;       /* default 2 */
    int64_t works_ns;  /* next_works_ns */
    int items;         /* of the source in an epoch, default 4 */
    int concurrency;   /* of row 1, default 2 */
    bool grows;        /* workers is 0, and the rows have SPDL_ALL: up to SPDL__MAX_CALLS */
    int buffer;        /* buffer_size of the source and of row 1 */
    bool completion;   /* order */
    bool own_thread;   /* of the source */
    bool inits;        /* row 1 has .init and .fini */
    bool ready;        /* consumer and producer poll, and wait for ready_fn */
    bool loops;        /* with ready: the consumer pushes, too */
    bool counts;       /* the consumer compares the statistics at the end */
    bool delivers;     /* .deliver_failures */
    bool asks;         /* the consumer reads the error as soon as there is one */
    bool drops;        /* the feed has .drop_oldest */
    int64_t push_ns;   /* longest wait of a push; 0: for ever */
    deed does;         /* what row 1 does with the items `at`. MEETS: their calls wait until all of
                          them are inside */
    int at;            /* bits: ITEM(1) | ITEM(2) */
    bool awaits;       /* .again: a second call waits until its first result is taken */
    int budget;        /* .max_failures of row 1 */
    int ahead;         /* the consumer waits until the source has made so many more than it took */
    bool gated;        /* it waits for them first; then what a stop or a rewind frees waits for
                          second_stopper, one of `others` */
    int epochs;        /* ends that it takes, default 1 */
    ending then;       /* what the consumer does ... */
    int after;         /* ... after so many items */
    int pipelines;     /* on one pool with this one; 0: it has a pool of its own */
    int guests;        /* of that pool */
    bool refuses;      /* the system starts no thread after those of create */
    void *(*others[OTHERS])(void *arg); /* threads that run at the same time */
} plan;

static const plan *now; /* the scenario that is run */
static int workers, items, concurrency;
static spdl_pipeline *pipeline;
static spdl_pipeline *more[2]; /* others on its pool, or the one that it takes from */
static spdl_pool *pool;
static spdl_sampler *sampler;
static uint64_t *spot; /* a modelled word, where threads may change places */

/* Not modelled: one thread at a time is here. */
static struct {
    int live;         /* items */
    int most;         /* of these; 0: any number */
    int blocks;       /* of the library */
    int locals;       /* of workers, by .init */
    int inside[3];    /* calls of row 1 and of the two after it */
    int taken;        /* items in this epoch */
    uint64_t value;   /* of each item at the end of the pipeline */
    int count;        /* of items there, in an epoch */
    bool batches;     /* they come in batches */
    bool stops;       /* the flow may end early */
    bool may_log;     /* an error */
    int completer;    /* a thread, or -1 */
    int pushed;       /* the next item of the producers */
    int producers;    /* that have not ended */
    struct item *held; /* by an event loop whose push was refused */
    bool ended;       /* its input */
    uint64_t failed;  /* item of the error that the consumer has read */
} seen;

static bool refuse_thread(void) { return now->refuses && pipeline != NULL; }

static int calls(void) { return now->grows ? SPDL_ALL : concurrency; }

static void change_places(void) { (void)spdl__load(spot); }

/* --- a box under a mutex --- */

static struct box {
    int made;       /* items of the source */
    bool ready;     /* ready_fn was called */
    bool room;      /* the same, for a producer */
    bool quits;     /* no deferred call is yet to come, and a source may return */
    bool waits;     /* a source waits for that */
    bool frees;     /* a stop or a rewind is inside of free_item */
    bool opened;    /* it goes on */
    int met;        /* calls that have met */
    int firsts;     /* first results of .again that the consumer took, as bits */
    int deferred;
    spdl_deferred call[8];
    struct item *input[8];
} *box;

static void box_lock(void) { explore_lock(box); }
static void box_wait(void) { (void)explore_cond_wait(&box->made, box, false); }
static void box_changed(void) {
    explore_unlock(box);
    explore_cond_wake(&box->made, true);
}

/* --- memory --- */

typedef struct item {
    uint64_t number, part, value;
} item;

static item *item_make(uint64_t number, uint64_t part, uint64_t value) {
    item *made = (item *)explore_alloc(sizeof(*made));
    made->number = number;
    made->part = part;
    made->value = value;
    if (++seen.live > seen.most && seen.most > 0) explore_fail("%d items at a time", seen.live);
    return made;
}

static void item_free(void *of) {
    if (of == NULL) explore_fail("free of NULL");
    ((item *)of)->value = 0;
    explore_free(of);
    seen.live--;
}

/* Of the source. */
static void free_unused(void *of) {
    if (now->gated) {
        box_lock();
        box->frees = true;
        box_changed();
        box_lock();
        while (!box->opened) box_wait();
        explore_unlock(box);
        if (spdl_pipeline_stop(pipeline, -1) != (now->then == STOPS ? SPDL_OK : SPDL_TIMEOUT))
            explore_fail("a stop by the thread that frees");
    }
    item_free(of);
}

static void *block_alloc(size_t bytes, size_t align, void *user) {
    (void)user;
    seen.blocks++;
    return explore_alloc_at(bytes, align > 64 ? 64 : align);
}

static void block_free(void *memory, size_t bytes, void *user) {
    (void)bytes, (void)user;
    if (memory != NULL) seen.blocks--;
    explore_free(memory);
}

static const spdl_allocator allocator = { .alloc_fn = block_alloc, .free_fn = block_free };

static void log_line(spdl_log_level level, const char *text, void *user) {
    (void)user;
    if (level <= SPDL_LOG_ERROR && !seen.may_log) explore_fail("log: %s", text);
}

static const spdl_logger logger = { .log_fn = log_line };

/* --- stages --- */

SPDL_FN(count, void, item) {
    uint64_t *calls = (uint64_t *)spdl_ctx(task);
    ++*calls; /* plain: one call at a time */
    change_places();
    if (spdl_sequence(task) >= (uint64_t)items) return SPDL_END;
    *out = item_make(spdl_sequence(task), 0, 1);
    if (now->ahead == 0) return SPDL_OK;
    box_lock();
    box->made++;
    box_changed();
    return SPDL_OK;
}

static spdl_result init_local(void *ctx, int worker, void **local) {
    uint64_t *made = (uint64_t *)explore_alloc(sizeof(*made));
    (void)ctx;
    *made = (uint64_t)worker;
    *local = made;
    seen.locals++;
    return SPDL_OK;
}

static void fini_local(void *ctx, int worker, void *local) {
    (void)ctx;
    if (*(uint64_t *)local != (uint64_t)worker) explore_fail("fini of another worker");
    explore_free(local);
    seen.locals--;
}

static bool has_deed(uint64_t number) { return (now->at >> number & 1) != 0; }

static void meet(void) {
    box_lock();
    box->met++;
    box_changed();
    box_lock();
    while (box->met < __builtin_popcount((unsigned)now->at)) box_wait();
    explore_unlock(box);
}

/* The work of a call: other threads may run meanwhile. */
static void work(spdl_task *task, item *in) {
    int *inside = (int *)spdl_ctx(task);
    const uint64_t *local = (const uint64_t *)spdl_local(task);
    if (++*inside > concurrency) explore_fail("%d calls at the same time", *inside);
    if (local != NULL && *local > (uint64_t)workers) explore_fail("worker %d", (int)*local);
    change_places();
    if (now->does == MEETS && has_deed(in->number)) meet();
    in->value++;
    --*inside;
}

static spdl_result do_deed(spdl_task *task, const item *in) {
    if (!has_deed(in->number)) return SPDL_OK;
    if (now->does == SKIPS) return SPDL_SKIP;
    if (now->does == FAILS) return spdl_fail(task, "no %d", (int)in->number);
    if (now->does == STOPS_ALL) spdl_stop(task);
    return SPDL_OK;
}

/* The input goes on. */
SPDL_FN(pass, item, item) {
    work(task, in);
    *out = in;
    return do_deed(task, in);
}

/* Another item goes on. */
SPDL_FN(renew, item, item) {
    work(task, in);
    *out = item_make(in->number, in->part, in->value);
    return SPDL_OK;
}

/* Each input makes two results. */
SPDL_FN(twice, item, item) {
    void **state = spdl_call_state(task);
    const bool second = *state != NULL;
    if (!second) work(task, in);
    if (second && now->awaits) {
        box_lock();
        while ((box->firsts >> in->number & 1) == 0) box_wait();
        explore_unlock(box);
    }
    *out = item_make(in->number, second, in->value);
    if (second) return SPDL_OK;
    *state = explore_alloc(sizeof(uint64_t));
    *(uint64_t *)*state = 0;
    return SPDL_AGAIN;
}

/* Adds numbers up, and gives the sum at the end of the epoch. */
SPDL_FN(gather, item, item) {
    uint64_t *sum = (uint64_t *)spdl_ctx(task);
    change_places();
    if (!spdl_flushing(task)) {
        *sum += in->number;
        return SPDL_SKIP;
    }
    *out = item_make(0, 0, *sum);
    *sum = 0;
    return SPDL_OK;
}

/* Keeps all items, and passes them one by one at the end of the epoch. */
struct pile {
    item *kept[8];
    int count;
};

SPDL_FN(pile_up, item, item) {
    struct pile *pile = (struct pile *)spdl_ctx(task);
    change_places();
    if (!spdl_flushing(task)) {
        spdl_take(task);
        pile->kept[pile->count++] = in;
        return SPDL_SKIP;
    }
    if (pile->count == 0) return SPDL_SKIP;
    *out = pile->kept[--pile->count];
    (*out)->value = 2;
    return SPDL_AGAIN;
}

SPDL_FN(in_place, item, item) {
    work(task, in);
    *out = (item *)spdl_buffer(task);
    if (*out == NULL) explore_fail("no buffer");
    **out = *in;
    return do_deed(task, in);
}

SPDL_FN(route, item, item) {
    *out = in;
    return spdl_route(task, (int)(in->number & 1));
}

SPDL_FN(from_index, spdl_index, item) {
    *out = item_make(in->index, 0, 1);
    return SPDL_OK;
}

/* Another thread completes the call. */
SPDL_FN(later, item, item) {
    spdl_deferred call;
    (void)out;
    work(task, in);
    call = spdl_defer(task);
    box_lock();
    box->call[box->deferred] = call;
    box->input[box->deferred++] = in;
    box_changed();
    change_places();
    return SPDL_PENDING;
}

static void *completer(void *arg) {
    int done = 0;
    for (;;) {
        spdl_deferred call;
        item *in;
        bool fails;
        box_lock();
        while (box->deferred == done && !box->quits) box_wait();
        if (box->deferred == done) {
            explore_unlock(box);
            return arg;
        }
        call = box->call[done];
        in = box->input[done++];
        explore_unlock(box);
        fails = now->does == FAILS && has_deed(in->number);
        if ((fails ? spdl_complete_fail(call, "no %d", (int)in->number)
                   : spdl_complete(call, SPDL_OK, in)) != SPDL_OK)
            explore_fail("complete");
    }
}

/* A source that returns only when the pipeline has left it in its call. */
SPDL_FN(hang, void, item) {
    box_lock();
    box->waits = true;
    box_changed();
    box_lock();
    while (!box->quits) box_wait();
    explore_unlock(box);
    *out = item_make(spdl_sequence(task), 0, 1);
    return SPDL_OK;
}

/* --- tables --- */

static uint64_t *zero_new(void) {
    uint64_t *made = (uint64_t *)explore_alloc(sizeof(*made));
    *made = 0;
    return made;
}

/* A load of an item comes before the head moves on. (Others load the origin as a hint.) */
static void watch_slots(const spdl_pipeline *p) {
    int i;
    for (i = 0; i < p->count; i++) {
        spdl__slot *slot = p->node[i].out.slot;
        for (; slot <= p->node[i].out.slot + p->node[i].out.mask; slot++)
            explore_watch(&slot->item);
    }
}

static void create(spdl_pipeline **p, const spdl_pipeline_desc *desc, const spdl_stage *rows,
                   size_t n) {
    if (spdl_pipeline_create(p, desc, rows, n) != SPDL_OK) explore_fail("create");
    watch_slots(*p);
}

#define IN_ORDER .output_order = SPDL_ORDER_INPUT
#define ORDER .output_order = now->completion ? SPDL_ORDER_COMPLETION : SPDL_ORDER_INPUT
#define COUNT \
    SPDL_SOURCE(count, .ctx = zero_new(), .threads = now->own_thread, .buffer_size = now->buffer, \
                .continuous = now->epochs > 1, .free_item = free_unused)
#define ROW_1(fn, ...) \
    SPDL_PIPE(fn, .ctx = &seen.inside[0], .concurrency = calls(), .max_failures = now->budget, \
              .init = now->inits ? init_local : NULL, .fini = now->inits ? fini_local : NULL, \
              __VA_ARGS__)
#define ROW_2(fn, ...) \
    SPDL_PIPE(fn, .ctx = &seen.inside[1], .concurrency = calls(), __VA_ARGS__)

/* Items are in the call of the source, behind it, in calls of the row, in the sink, and with a
   consumer. */
static void row(spdl_pipeline_desc *desc) {
    if (now->pipelines < 2)
        seen.most = 1 + (now->buffer != 0 ? now->buffer : 2) + concurrency + 1 + 1;
    create(&pipeline, desc, SPDL_STAGES(COUNT, ROW_1(pass, ORDER), SPDL_SINK(1)));
}

static void two_rows(spdl_pipeline_desc *desc) {
    seen.value = 3;
    create(&pipeline, desc,
           SPDL_STAGES(COUNT, ROW_1(pass, ORDER, .buffer_size = now->buffer),
                       ROW_2(renew, ORDER, .free_item = item_free), SPDL_SINK(2)));
}

static void feed(spdl_pipeline_desc *desc) {
    create(&pipeline, desc,
           SPDL_STAGES(SPDL_FEED(item, .buffer_size = 1, .free_item = item_free,
                                 .drop_oldest = now->drops),
                       ROW_1(pass, ORDER), SPDL_SINK(1)));
}

static void deferred(spdl_pipeline_desc *desc) {
    create(&pipeline, desc,
           SPDL_STAGES(COUNT, ROW_1(later, ORDER, .deferred = true), SPDL_SINK(1)));
    seen.completer = explore_spawn(completer, NULL);
}

static void branch(spdl_pipeline_desc *desc) {
    create(&pipeline, desc,
           SPDL_STAGES(COUNT, SPDL_BRANCH(route, .buffer_size = 1),
                       SPDL_PATH("even", .buffer_size = 1), ROW_1(pass, .buffer_size = 1),
                       SPDL_PATH("odd", .buffer_size = 1), ROW_2(pass, .buffer_size = 1),
                       SPDL_MERGE(ORDER), SPDL_SINK(1)));
}

static void batch(spdl_pipeline_desc *desc) {
    seen.batches = true;
    create(&pipeline, desc, SPDL_STAGES(COUNT, ROW_1(pass, IN_ORDER), SPDL_BATCH(2), SPDL_SINK(1)));
}

static void batch_in_place(spdl_pipeline_desc *desc) {
    seen.batches = true;
    create(&pipeline, desc,
           SPDL_STAGES(COUNT, ROW_1(in_place, IN_ORDER), SPDL_BATCH_OF(item, 2), SPDL_SINK(1)));
}

static void again(spdl_pipeline_desc *desc) {
    seen.value = 4;
    seen.count = 2 * items;
    create(&pipeline, desc,
           SPDL_STAGES(COUNT,
                       ROW_1(twice, ORDER, .again = true, .buffer_size = 1, .free_item = item_free,
                             .free_state = explore_free),
                       ROW_2(pass, IN_ORDER), SPDL_PIPE(pass, .ctx = &seen.inside[2]),
                       SPDL_SINK(1)));
}

static void flush(spdl_pipeline_desc *desc) {
    seen.value = (uint64_t)(items * (items - 1) / 2);
    seen.count = 1;
    create(&pipeline, desc,
           SPDL_STAGES(COUNT, ROW_1(pass, IN_ORDER),
                       SPDL_PIPE(gather, .ctx = zero_new(), .flush = true, .free_item = item_free),
                       SPDL_SINK(1)));
}

static void series(spdl_pipeline_desc *desc) {
    struct pile *pile = (struct pile *)explore_alloc(sizeof(*pile));
    memset(pile, 0, sizeof(*pile));
    create(&pipeline, desc,
           SPDL_STAGES(COUNT, SPDL_PIPE(pile_up, .ctx = pile, .flush = true, .again = true,
                                        .free_item = item_free),
                       SPDL_SINK(1)));
}

/* Without its rows. */
static void short_pipeline(spdl_pipeline **p, const spdl_pipeline_desc *desc) {
    create(p, desc,
           SPDL_STAGES(SPDL_SOURCE(count, .ctx = zero_new(), .free_item = item_free),
                       SPDL_SINK(1)));
}

static void from_other(spdl_pipeline_desc *desc) {
    spdl_pipeline_desc inner = *desc;
    inner.workers = 1;
    short_pipeline(&more[0], &inner);
    create(&pipeline, desc,
           SPDL_STAGES(SPDL_FROM(item, spdl_pipeline_next, more[0], .free_item = item_free),
                       ROW_1(pass, ORDER), SPDL_SINK(1)));
}

static void sampled(spdl_pipeline_desc *desc) {
    const spdl_sampler_desc order = { .count = (uint64_t)items, .allocator = allocator };
    if (spdl_sampler_create(&sampler, &order) != SPDL_OK) explore_fail("sampler");
    create(&pipeline, desc,
           SPDL_STAGES(SPDL_INDEX(sampler, .continuous = now->epochs > 1),
                       SPDL_PIPE(from_index, .free_item = item_free), ROW_1(pass, ORDER),
                       SPDL_SINK(1)));
}

static void hanging(spdl_pipeline_desc *desc) {
    create(&pipeline, desc,
           SPDL_STAGES(SPDL_SOURCE(hang, .threads = 1, .free_item = item_free),
                       ROW_1(pass, IN_ORDER), SPDL_SINK(1)));
}

/* --- the consumer --- */

/* The first item with the deed of row 1. */
static int first_deed(void) { return __builtin_ctz((unsigned)now->at); }

/* The numbers of the items of one consumer grow. */
static void check_item(const item *it, uint64_t *next) {
    const uint64_t key = 2 * it->number + it->part;
    if (it->value != seen.value) explore_fail("value %d", (int)it->value);
    if (!now->completion && key < *next) explore_fail("out of order");
    if (now->does == FAILS && now->budget == 0 && !now->completion && !now->delivers &&
        it->number > (uint64_t)first_deed())
        explore_fail("an item behind the failure");
    *next = key + 1;
    seen.taken++;
    if (!now->awaits || it->part != 0) return;
    box_lock();
    box->firsts |= ITEM(it->number);
    box_changed();
}

static void ready(void *user) {
    (void)user;
    box_lock();
    box->ready = box->room = true;
    box_changed();
}

static void clear_event(bool *event) {
    box_lock();
    *event = false;
    explore_unlock(box);
}

static void await_event(const bool *event) {
    box_lock();
    while (!*event) box_wait();
    explore_unlock(box);
}

/* An event loop pushes until the feed is full. */
static void push_some(void) {
    spdl_result result = SPDL_OK;
    while (!seen.ended && result != SPDL_FULL) {
        if (result == SPDL_CLOSED || seen.pushed == items) {
            if (seen.held != NULL) item_free(seen.held);
            seen.held = NULL;
            seen.ended = true;
            if (spdl_pipeline_push_end(pipeline) != SPDL_OK) explore_fail("push end");
            return;
        }
        if (seen.held == NULL) seen.held = item_make((uint64_t)seen.pushed, 0, 1);
        result = spdl_pipeline_push(pipeline, seen.held, 0);
        if (result < 0) explore_fail("push %d", (int)result);
        if (result != SPDL_OK) continue;
        seen.held = NULL;
        seen.pushed++;
    }
}

/* Waits for the next item, in next or for ready_fn. */
static spdl_result next_item(void **got) {
    spdl_result result;
    if (!now->ready) return spdl_pipeline_next(pipeline, got, -1);
    for (;;) {
        clear_event(&box->ready);
        if (now->loops) push_some();
        result = spdl_pipeline_next(pipeline, got, 0);
        if (result != SPDL_TIMEOUT) return result;
        await_event(&box->ready);
    }
}

static void take_batch(spdl_batch *got, uint64_t *next) {
    size_t i;
    for (i = 0; i < got->count; i++) check_item((const item *)got->items[i], next);
    spdl_batch_free(got);
}

/* A request that failed: its input comes back. */
static void take_failed(item *got) {
    const spdl_error *error = spdl_pipeline_error(pipeline);
    if (error->result != SPDL_E_STAGE || error->stage != 1 || error->item != got->number ||
        !has_deed(got->number))
        explore_fail("error of item %d", (int)error->item);
    seen.taken++;
    item_free(got);
}

static void await_source(void) {
    if (now->ahead == 0) return;
    box_lock();
    while (box->made < items && box->made < seen.taken + now->ahead) box_wait();
    explore_unlock(box);
}

/* Takes up to `most` items, or until something else comes. Returns that. */
static spdl_result take(int most) {
    spdl_result result = SPDL_OK;
    uint64_t next = 0;
    void *got;
    for (; most > 0; most--) {
        await_source();
        while ((result = next_item(&got)) == SPDL_E_INVALID) explore_yield(); /* one is inside */
        if (result == SPDL_E_STAGE && now->delivers) {
            take_failed((item *)got);
        } else if (result != SPDL_OK) {
            return result;
        } else if (seen.batches) {
            take_batch((spdl_batch *)got, &next);
        } else {
            check_item((const item *)got, &next);
            item_free(got);
        }
    }
    return result;
}

static int fails(void) {
    return now->does == FAILS && !now->delivers ? __builtin_popcount((unsigned)now->at) : 0;
}

/* How the flow ended. */
static void check_end(spdl_result result) {
    const int dropped = now->does == SKIPS ? __builtin_popcount((unsigned)now->at) : fails();
    const spdl_error *error;
    if (fails() > now->budget && result == SPDL_E_STAGE) {
        error = spdl_pipeline_error(pipeline);
        if (!spdl_pipeline_failed(pipeline) || error->result != SPDL_E_STAGE || error->stage != 1)
            explore_fail("another error");
        if (now->asks ? error->item != seen.failed
                      : !now->completion && now->budget == 0 &&
                            error->item != (uint64_t)first_deed())
            explore_fail("the error of item %d", (int)error->item);
        return;
    }
    if (result == SPDL_CLOSED && seen.stops) {
        if (now->does == STOPS_ALL && concurrency == 1 && seen.taken < first_deed())
            explore_fail("an item before the stop is missing");
        return;
    }
    if (result != SPDL_END || fails() > now->budget) explore_fail("result %d", (int)result);
    if (seen.taken > seen.count - dropped ||
        (seen.taken < seen.count - dropped && !now->drops && now->push_ns == 0))
        explore_fail("%d items", seen.taken);
}

static void ask(void) {
    const spdl_error *error;
    while (!spdl_pipeline_failed(pipeline)) explore_yield();
    error = spdl_pipeline_error(pipeline);
    seen.failed = error->item;
    if (error->result != SPDL_E_STAGE || !has_deed(error->item)) explore_fail("an early error");
    change_places();
    if (error->item != seen.failed) explore_fail("the error has changed");
}

/* What the consumer waited for. */
static uint64_t exposed(const spdl_stats *stats) {
    uint64_t sum = 0;
    int i;
    for (i = 0; i < stats->stage_count; i++)
        sum += stats->stage[i].exposed_ns + stats->stage[i].exposed_idle_ns;
    return sum;
}

static void check_counts(void) {
    static spdl_stats stats;
    const uint64_t n = (uint64_t)seen.taken;
    spdl_pipeline_stats(pipeline, &stats);
    if (exposed(&stats) > pipeline->wait_ns) /* of the statistics, the part before the end */
        explore_fail("%d ns for stages, of %d", (int)exposed(&stats), (int)pipeline->wait_ns);
    /* an edge lacks one until the row that has passed the end moves its head */
    if (stats.delivered != n || stats.stage[1].tasks != n || stats.edge[0].items > n ||
        stats.edge[0].items + 1 < n || stats.edge[1].items != n)
        explore_fail("counts: %d delivered, %d tasks, on edges %d, %d", (int)stats.delivered,
                     (int)stats.stage[1].tasks, (int)stats.edge[0].items,
                     (int)stats.edge[1].items);
}

/* The changer's last limit stays, even if the row grew at the same time. */
static void check_limit(void) {
    static spdl_stats stats;
    spdl_pipeline_stats(pipeline, &stats);
    if (stats.stage[1].concurrency != 2) explore_fail("limit %d", stats.stage[1].concurrency);
}

/* Leaves a source in its call. */
static void leave(void) {
    box_lock();
    while (!box->waits) box_wait();
    explore_unlock(box);
    if (spdl_pipeline_stop(pipeline, 1000) != SPDL_TIMEOUT) explore_fail("a stop that is in time");
}

static void rewind_all(void) {
    if (more[0] != NULL && pool == NULL) { /* what it takes from */
        if (spdl_pipeline_stop(pipeline, -1) != SPDL_OK) explore_fail("stop");
        if (spdl_pipeline_rewind(more[0], 0, -1) != SPDL_OK) explore_fail("rewind");
    }
    if (spdl_pipeline_rewind(pipeline, 0, -1) != SPDL_OK) explore_fail("rewind");
    seen.taken = 0;
    if (seen.held != NULL) item_free(seen.held);
    seen.held = NULL;
    seen.pushed = 0;
    seen.ended = false;
}

/* --- other threads --- */

static void *consumer(void *arg) {
    (void)take(99);
    return arg;
}

static void *stopper(void *arg) {
    if (spdl_pipeline_stop(pipeline, -1) != SPDL_OK) explore_fail("stop");
    if (now->then != REWINDS && !now->delivers && spdl_pipeline_error(pipeline)->result > 0)
        explore_fail("error");
    return arg;
}

static void *brief_stopper(void *arg) {
    if (spdl_pipeline_stop(pipeline, 0) < 0) explore_fail("stop");
    return arg;
}

static void *timed_stopper(void *arg) {
    if (spdl_pipeline_stop(pipeline, 1000) < 0) explore_fail("stop");
    return arg;
}

/* A stop while another stop or a rewind is inside of a free_item. */
static void *second_stopper(void *arg) {
    box_lock();
    while (!box->frees) box_wait();
    explore_unlock(box);
    if (spdl_pipeline_stop(pipeline, 0) != SPDL_TIMEOUT ||
        spdl_pipeline_stop(pipeline, 1000) != SPDL_TIMEOUT)
        explore_fail("a stop that did not wait");
    box_lock();
    box->opened = true;
    box_changed();
    if (spdl_pipeline_stop(pipeline, -1) != SPDL_OK) explore_fail("stop");
    if (seen.live > 2) /* in the sink, and with the consumer */
        explore_fail("%d items behind a stop", seen.live);
    return arg;
}

/* Waits for room, in push or for ready_fn. */
static spdl_result push_item(item *made) {
    spdl_result result;
    const int64_t timeout = now->ready ? 0 : now->push_ns != 0 ? now->push_ns : -1;
    for (;;) {
        if (now->ready) clear_event(&box->room);
        result = spdl_pipeline_push(pipeline, made, timeout);
        if (!now->ready || result != SPDL_FULL) return result;
        await_event(&box->room);
    }
}

/* Several of them push in turn, without order between them. The last one ends the input. */
static void *producer(void *arg) {
    spdl_result result = SPDL_OK;
    while (seen.pushed < items && result != SPDL_CLOSED) {
        item *made = item_make((uint64_t)seen.pushed++, 0, 1);
        while ((result = push_item(made)) == SPDL_E_INVALID) explore_yield(); /* one is inside */
        if (result == SPDL_OK) continue;
        item_free(made);
        if (!((seen.stops || now->does == FAILS) && result == SPDL_CLOSED) &&
            !(now->drops && result == SPDL_FULL) &&
            !(now->push_ns != 0 && result == SPDL_TIMEOUT))
            explore_fail("push %d", (int)result);
    }
    if (--seen.producers > 0) return arg;
    if (spdl_pipeline_push_end(pipeline) != SPDL_OK) explore_fail("push end");
    return arg;
}

static void *watcher(void *arg) {
    spdl_stats stats;
    uint64_t before = 0, waited = 0;
    int i;
    for (i = 0; i < 2; i++) {
        spdl_pipeline_stats(pipeline, &stats);
        if (stats.delivered < before || stats.delivered > (uint64_t)items)
            explore_fail("%d delivered", (int)stats.delivered);
        if (exposed(&stats) < waited) explore_fail("waits that shrink");
        before = stats.delivered;
        waited = exposed(&stats);
        change_places();
    }
    return arg;
}

static void *changer(void *arg) {
    if (spdl_pipeline_set_concurrency(pipeline, 1, 1) != SPDL_OK) explore_fail("concurrency");
    change_places();
    if (spdl_pipeline_set_concurrency(pipeline, 1, 2) != SPDL_OK) explore_fail("concurrency");
    return arg;
}

static void take_other(spdl_pipeline *p) {
    spdl_result result;
    void *got;
    int n = 0;
    for (; (result = spdl_pipeline_next(p, &got, -1)) == SPDL_OK; n++) item_free(got);
    if (result != SPDL_END || n != items) explore_fail("%d other items, %d", n, (int)result);
}

static void *consumer_of_second(void *arg) {
    take_other(more[0]);
    return arg;
}

static void *consumer_of_third(void *arg) {
    take_other(more[1]);
    return arg;
}

static void job(void *arg, int worker, void *local) {
    (void)worker, (void)local;
    (void)spdl__add((uint64_t *)arg, 1);
}

static void *submitter(void *arg) {
    uint64_t *done = zero_new();
    int i;
    for (i = 0; i < 2; i++)
        if (spdl_pool_submit(pool, job, done, -1) != SPDL_OK) explore_fail("submit");
    if (spdl_pool_drain(pool, -1) != SPDL_OK) explore_fail("drain");
    if (*done != 2) explore_fail("%d jobs", (int)*done);
    return arg;
}

static void *guest(void *arg) {
    int i;
    for (i = 0; i < 3; i++) {
        const spdl_result result = spdl_pool_run(pool, 1000);
        if (result < 0) explore_fail("guest %d", (int)result);
        explore_yield();
    }
    return arg;
}

/* --- scenarios --- */

static int count_of(void *(*other)(void *arg)) {
    int i, n = 0;
    for (i = 0; i < OTHERS; i++) n += now->others[i] == other;
    return n;
}

static const plan plans[] = {
    { "row", row, .workers = 2 },
    { "row alone", row, .workers = 1, .concurrency = 1, .buffer = 1 },
    { "row unordered", row, .completion = true, .buffer = 1 },
    { "rows", two_rows, .workers = 2 },
    { "rows unordered", two_rows, .completion = true },
    { "next works", row, .workers = 1, .works_ns = -1, .buffer = 1 },
    { "next works, two", row, .works_ns = -1, .items = 3 },
    { "next works unordered", two_rows, .workers = 1, .works_ns = -1, .completion = true },
    { "next works short calls", row, .workers = 1, .works_ns = 500 },
    { "skip", row, .does = SKIPS, .at = ITEM(0) | ITEM(2), .buffer = 1 },
    { "skip unordered", two_rows, .does = SKIPS, .at = ITEM(1) | ITEM(2), .completion = true },
    { "stop", row, .items = 3, .others = { stopper } },
    { "stop next works", row, .workers = 1, .works_ns = -1, .items = 3, .others = { stopper } },
    { "stop unordered", row, .items = 3, .completion = true, .others = { stopper } },
    { "stop without waiting", row, .items = 3, .others = { brief_stopper } },
    { "stop with a timeout", row, .items = 3, .others = { timed_stopper } },
    { "stop by two", row, .items = 3, .others = { timed_stopper, stopper } },
    { "stop by two, the first frees", row, .workers = 1, .concurrency = 1, .ahead = 4,
      .gated = true, .then = STOPS, .others = { second_stopper } },
    { "stop by the consumer", row, .then = STOPS, .after = 1 },
    { "stop by a call", row, .does = STOPS_ALL, .at = ITEM(1) },
    { "stop by a call next works", row, .workers = 1, .works_ns = -1, .does = STOPS_ALL,
      .at = ITEM(1) },
    { "stop by a call, one at a time", row, .concurrency = 1, .does = STOPS_ALL, .at = ITEM(2) },
    { "destroy at once", row, .then = DESTROYS },
    { "destroy", row, .then = DESTROYS, .after = 1 },
    { "destroy next works", row, .workers = 1, .works_ns = -1, .then = DESTROYS, .after = 1 },
    { "rewind", row, .items = 3, .then = REWINDS, .after = 1 },
    { "rewind unordered", row, .items = 3, .completion = true, .then = REWINDS, .after = 2 },
    { "rewind next works", row, .workers = 1, .works_ns = -1, .items = 3, .then = REWINDS,
      .after = 1 },
    { "rewind at the end", row, .workers = 1, .concurrency = 1, .items = 2, .then = REWINDS,
      .after = 9 },
    { "rewind and stop", row, .workers = 1, .items = 2, .then = REWINDS, .after = 1,
      .others = { stopper } },
    { "rewind at once and stop", row, .workers = 1, .concurrency = 1, .items = 1, .then = REWINDS,
      .others = { stopper, brief_stopper } },
    { "rewind and stop, two", row, .items = 2, .then = REWINDS, .after = 1,
      .others = { stopper, timed_stopper } },
    { "rewind and stop, three", row, .workers = 1, .items = 2, .then = REWINDS, .after = 1,
      .others = { stopper, stopper, brief_stopper } },
    { "rewind and stop, it frees", row, .workers = 1, .concurrency = 1, .ahead = 4, .gated = true,
      .then = REWINDS, .others = { second_stopper } },
    { "feed", feed, .workers = 1, .concurrency = 1, .items = 3, .others = { producer } },
    { "feed, two", feed, .items = 3, .others = { producer } },
    { "feed next works", feed, .workers = 1, .works_ns = -1, .items = 3, .others = { producer } },
    { "feed with timeouts", feed, .workers = 1, .concurrency = 1, .items = 3, .push_ns = 1000,
      .others = { producer } },
    { "feed drops", feed, .workers = 1, .drops = true, .completion = true, .others = { producer } },
    { "feed drops, one call", feed, .drops = true, .concurrency = 1, .others = { producer } },
    { "feed, two producers", feed, .completion = true, .others = { producer, producer } },
    { "feed stopped", feed, .workers = 1, .items = 3, .others = { producer, stopper } },
    { "feed ready", feed, .workers = 1, .concurrency = 1, .ready = true, .others = { producer } },
    { "feed ready, two", feed, .ready = true, .others = { producer } },
    { "feed ready alone", feed, .workers = SPDL_INLINE, .ready = true, .others = { producer } },
    { "feed ready drops", feed, .workers = 1, .drops = true, .completion = true, .ready = true,
      .others = { producer } },
    { "feed ready stopped", feed, .workers = 1, .concurrency = 1, .ready = true,
      .others = { producer, stopper } },
    { "feed ready fails", feed, .ready = true, .does = FAILS, .at = ITEM(1),
      .others = { producer } },
    { "event loop", feed, .workers = 1, .ready = true, .loops = true },
    { "event loop skips", feed, .workers = 1, .ready = true, .loops = true, .does = SKIPS,
      .at = ITEM(0) | ITEM(1) | ITEM(2) },
    { "event loop skips, two", feed, .items = 5, .ready = true, .loops = true, .does = SKIPS,
      .at = ITEM(0) | ITEM(1) | ITEM(2) | ITEM(3) },
    { "event loop alone", feed, .workers = SPDL_INLINE, .ready = true, .loops = true,
      .does = SKIPS, .at = ITEM(0) | ITEM(1) },
    { "event loop on a pool", feed, .workers = 1, .ready = true, .loops = true, .pipelines = 2,
      .others = { consumer_of_second } },
    { "event loop stopped", feed, .workers = 1, .ready = true, .loops = true,
      .others = { stopper } },
    { "event loop fails", feed, .workers = 1, .ready = true, .loops = true, .does = FAILS,
      .at = ITEM(1) },
    { "event loop rewound", feed, .workers = 1, .ready = true, .loops = true, .then = REWINDS,
      .after = 1 },
    { "event loop destroyed", feed, .workers = 1, .ready = true, .loops = true, .then = DESTROYS,
      .after = 1 },
    { "deferred", deferred, .workers = 1, .items = 3 },
    { "deferred unordered", deferred, .workers = 1, .items = 3, .completion = true },
    { "deferred next works", deferred, .workers = 1, .works_ns = -1, .items = 3 },
    { "deferred one fails", deferred, .items = 3, .does = FAILS, .at = ITEM(1), .budget = 1,
      .completion = true },
    { "deferred stopped", deferred, .workers = 1, .items = 3, .others = { stopper } },
    { "deferred stopped with a timeout", deferred, .workers = 1, .items = 3,
      .others = { timed_stopper } },
    { "deferred rewound", deferred, .workers = 1, .items = 3, .then = REWINDS, .after = 1 },
    { "branch", branch, .workers = 2 },
    { "branch skips", branch, .does = SKIPS, .at = ITEM(2) },
    { "branch unordered", branch, .completion = true },
    { "branch next works", branch, .workers = 1, .works_ns = -1 },
    { "branch stopped", branch, .items = 3, .others = { stopper } },
    { "batch", batch, .workers = 2 },
    { "batch in place", batch_in_place, .workers = 2 },
    { "batch in place skips", batch_in_place, .items = 5, .does = SKIPS, .at = ITEM(1) },
    { "batch in place next works", batch_in_place, .workers = 1, .works_ns = -1 },
    { "batch in place stopped", batch_in_place, .others = { stopper } },
    { "batch in place rewound", batch_in_place, .then = REWINDS, .after = 1 },
    { "fail", row, .does = FAILS, .at = ITEM(2) },
    { "fail twice", row, .does = FAILS, .at = ITEM(1) | ITEM(2) },
    { "fail twice unordered", row, .does = FAILS, .at = ITEM(1) | ITEM(2), .completion = true },
    { "fail twice, read early", row, .does = FAILS, .at = ITEM(1) | ITEM(2), .asks = true },
    { "fail within the budget", row, .does = FAILS, .at = ITEM(1) | ITEM(2), .budget = 2 },
    { "fail above the budget", row, .does = FAILS, .at = ITEM(1) | ITEM(2), .budget = 1 },
    { "fail next works", row, .workers = 1, .works_ns = -1, .does = FAILS,
      .at = ITEM(1) | ITEM(2) },
    { "fail and rewind", row, .does = FAILS, .at = ITEM(1) | ITEM(2), .then = REWINDS, .after = 9 },
    { "fail and stop", row, .items = 3, .does = FAILS, .at = ITEM(1), .others = { stopper } },
    { "failed requests", feed, .delivers = true, .does = FAILS, .at = ITEM(1) | ITEM(2),
      .others = { producer } },
    { "failed requests unordered", feed, .delivers = true, .does = FAILS,
      .at = ITEM(0) | ITEM(2), .completion = true, .others = { producer } },
    { "failed requests stopped", feed, .delivers = true, .items = 3, .does = FAILS, .at = ITEM(1),
      .others = { producer, stopper } },
    { "ahead", row, .workers = 1, .concurrency = 1, .items = 7, .buffer = 1, .ahead = 4 },
    { "ahead, two", row, .items = 7, .buffer = 1, .ahead = 5 },
    { "ahead unordered", row, .items = 7, .buffer = 1, .ahead = 5, .completion = true },
    { "ahead long", two_rows, .concurrency = 1, .items = 8, .buffer = 1, .ahead = 7 },
    { "ahead with skips", row, .items = 8, .buffer = 1, .ahead = 4, .does = SKIPS,
      .at = ITEM(1) | ITEM(2) | ITEM(5) },
    { "ahead with skips unordered", row, .items = 8, .buffer = 1, .ahead = 4, .does = SKIPS,
      .at = ITEM(1) | ITEM(2) | ITEM(5), .completion = true },
    { "calls that meet", row, .items = 3, .does = MEETS, .at = ITEM(0) | ITEM(1) },
    { "calls that meet later", row, .items = 5, .does = MEETS, .at = ITEM(3) | ITEM(4) },
    { "calls that meet unordered", two_rows, .items = 3, .completion = true, .does = MEETS,
      .at = ITEM(1) | ITEM(2) },
    { "calls that meet, three", row, .workers = 3, .concurrency = 3, .does = MEETS,
      .at = ITEM(0) | ITEM(1) | ITEM(2) },
    { "calls that meet, four after others", row, .workers = 4, .concurrency = 4, .items = 7,
      .buffer = 4, .does = MEETS, .at = ITEM(3) | ITEM(4) | ITEM(5) | ITEM(6) },
    { "calls that meet after a pause", row, .workers = 4, .concurrency = 4, .items = 12,
      .buffer = 4, .ahead = 6, .does = MEETS, .at = ITEM(8) | ITEM(9) | ITEM(10) | ITEM(11) },
    { "calls that meet from a feed", feed, .items = 3, .does = MEETS, .at = ITEM(1) | ITEM(2),
      .others = { producer } },
    { "calls that meet on a pool", row, .items = 3, .pipelines = 2, .does = MEETS,
      .at = ITEM(1) | ITEM(2), .others = { consumer_of_second } },
    { "statistics", row, .items = 3, .counts = true, .others = { watcher } },
    { "statistics of many waits", row, .workers = 3, .concurrency = 3, .items = 6, .counts = true,
      .others = { watcher, watcher } },
    { "statistics next works", row, .workers = 1, .works_ns = -1, .items = 3, .counts = true,
      .others = { watcher } },
    { "again", again, .items = 2, .concurrency = 1 },
    { "again unordered", again, .items = 3, .completion = true },
    { "again waits for the consumer", again, .items = 8, .concurrency = 1, .completion = true,
      .awaits = true },
    { "again stopped", again, .items = 3, .completion = true, .others = { stopper } },
    { "epochs", row, .items = 2, .epochs = 2 },
    { "flush", flush, .items = 2, .epochs = 2 },
    { "flush, a call before it fails", flush, .items = 3, .does = FAILS, .at = ITEM(2) },
    { "flush next works", flush, .workers = 1, .works_ns = -1, .items = 2, .epochs = 2 },
    { "flush series", series, .items = 3, .epochs = 2, .completion = true },
    { "flush series stopped", series, .items = 4, .completion = true, .others = { stopper } },
    { "flush series rewound", series, .items = 3, .completion = true, .then = REWINDS, .after = 1 },
    { "flush series left", series, .items = 3, .completion = true, .then = STOPS, .after = 1 },
    { "init and fini", row, .inits = true },
    { "init and fini next works", row, .inits = true, .works_ns = -1, .workers = 1 },
    { "init and fini on a pool", row, .inits = true, .items = 3, .pipelines = 2,
      .others = { consumer_of_second } },
    { "two consumers", row, .items = 5, .others = { consumer } },
    { "ready_fn", row, .items = 3, .ready = true },
    { "change of concurrency", row, .others = { changer } },
    { "grow", row, .grows = true },
    { "grow long", two_rows, .grows = true, .items = 8 },
    { "grow unordered", row, .grows = true, .items = 6, .completion = true },
    { "grow stopped", row, .grows = true, .others = { stopper } },
    { "grow stopped with a timeout", row, .grows = true, .others = { timed_stopper } },
    { "grow stopped by a call", row, .grows = true, .does = STOPS_ALL, .at = ITEM(2) },
    { "grow destroyed at once", row, .grows = true, .then = DESTROYS },
    { "grow destroyed", row, .grows = true, .then = DESTROYS, .after = 2 },
    { "grow rewound", row, .grows = true, .then = REWINDS, .after = 2 },
    { "grow rewound and stopped", row, .grows = true, .then = REWINDS, .after = 2,
      .others = { stopper } },
    { "grow with a change of concurrency", row, .grows = true, .others = { changer } },
    { "grow with statistics", row, .grows = true, .counts = true, .others = { watcher } },
    { "grow from a feed", feed, .grows = true, .items = 5, .others = { producer } },
    { "grow and fail", row, .grows = true, .does = FAILS, .at = ITEM(2) },
    { "grow, next alone gets threads", row, .grows = true, .refuses = true },
    { "source with a thread", row, .workers = 1, .items = 3, .buffer = 1, .own_thread = true },
    { "source with a thread stopped", row, .workers = 1, .items = 3, .own_thread = true,
      .others = { stopper } },
    { "source with a thread rewound", row, .workers = 1, .items = 3, .own_thread = true,
      .then = REWINDS, .after = 1 },
    { "source left in its call", hanging, .workers = 1, .then = LEAVES },
    { "from another pipeline", from_other, .workers = 1, .items = 3 },
    { "from another pipeline stopped", from_other, .workers = 1, .items = 3,
      .others = { stopper } },
    { "from another pipeline rewound", from_other, .workers = 1, .items = 3, .then = REWINDS,
      .after = 1 },
    { "sampler", sampled, .epochs = 2, .items = 3 },
    { "sampler rewound", sampled, .items = 3, .then = REWINDS, .after = 1 },
    { "pool of two pipelines", row, .items = 3, .pipelines = 2,
      .others = { consumer_of_second, submitter } },
    { "pool of two pipelines, ahead", row, .workers = 1, .items = 7, .buffer = 1, .ahead = 4,
      .pipelines = 2 },
    { "pool of three pipelines, ahead", row, .items = 7, .buffer = 1, .ahead = 5, .pipelines = 3 },
    { "pool of three pipelines", row, .items = 2, .pipelines = 3,
      .others = { consumer_of_second, consumer_of_third } },
    { "jobs of two threads", row, .items = 2, .pipelines = 1, .others = { submitter, submitter } },
    { "jobs for one worker", row, .workers = 1, .items = 1, .pipelines = 1,
      .others = { submitter, submitter } },
    { "pool with guests in turn", row, .workers = 1, .works_ns = -1, .items = 3, .pipelines = 2,
      .guests = 1, .others = { guest, guest } },
    { "pool with a guest", row, .workers = 1, .works_ns = -1, .items = 3, .pipelines = 2,
      .guests = 1, .others = { submitter } },
};

/* A pool, and the other pipelines on it. */
static void create_shared(spdl_pipeline_desc *desc) {
    const spdl_pool_desc pool_desc = { .workers = workers, .guests = now->guests,
                                       .queue_size = 2, .allocator = allocator,
                                       .logger = logger };
    int i;
    if (spdl_pool_create(&pool, &pool_desc) != SPDL_OK) explore_fail("pool");
    desc->workers = 0;
    desc->pool = pool;
    for (i = 1; i < now->pipelines; i++) short_pipeline(&more[i - 1], desc);
}

void explore_begin(const void *of) {
    now = (const plan *)of;
    workers = now->workers != 0 ? now->workers : 2;
    items = now->items != 0 ? now->items : 4;
    concurrency = now->grows ? SPDL__MAX_CALLS : now->concurrency != 0 ? now->concurrency : 2;
    memset(&seen, 0, sizeof(seen));
    seen.value = 2;
    seen.count = items;
    seen.completer = -1;
    seen.stops = now->then == STOPS || now->does == STOPS_ALL || count_of(stopper) > 0 ||
                 count_of(brief_stopper) > 0 || count_of(timed_stopper) > 0 || now->gated;
    seen.producers = count_of(producer);
    seen.may_log = now->does == FAILS || count_of(consumer) > 0 || seen.producers > 1;
    pipeline = NULL;
    pool = NULL;
    sampler = NULL;
    more[0] = more[1] = NULL;
    spot = zero_new();
    box = (struct box *)explore_alloc(sizeof(*box));
    memset(box, 0, sizeof(*box));
}

static void end(void) {
    int i;
    spdl_pipeline_destroy(pipeline);
    if (seen.held != NULL) item_free(seen.held);
    for (i = 0; i < 2; i++) spdl_pipeline_destroy(more[i]);
    spdl_pool_destroy(pool);
    spdl_sampler_destroy(sampler);
    box_lock();
    box->quits = true;
    box_changed();
    if (seen.completer >= 0) explore_join(seen.completer);
}

/* The consumer; the threads beside it join before the end. */
void explore_thread(const void *of, int thread) {
    spdl_pipeline_desc desc = { .workers = now->grows ? 0 : workers, .next_works_ns = now->works_ns,
                                .ready_fn = now->ready ? ready : NULL,
                                .deliver_failures = now->delivers, .allocator = allocator,
                                .logger = logger };
    int others[OTHERS], i, epoch = 0;
    (void)of, (void)thread;
    if (now->pipelines > 0) create_shared(&desc);
    now->create(&desc);
    for (i = 0; i < OTHERS; i++)
        others[i] = now->others[i] != NULL ? explore_spawn(now->others[i], NULL) : -1;
    if (now->asks) ask();
    if (now->gated) await_source();
    if (now->after > 0) (void)take(now->after);
    if (now->then == STOPS && spdl_pipeline_stop(pipeline, -1) != SPDL_OK) explore_fail("stop");
    if (now->then == REWINDS) rewind_all();
    if (now->then == LEAVES) leave();
    for (; now->then < DESTROYS && epoch < (now->epochs != 0 ? now->epochs : 1); epoch++) {
        check_end(take(99));
        if (now->counts) check_counts();
        seen.taken = 0;
    }
    for (i = 0; i < OTHERS; i++)
        if (others[i] >= 0) explore_join(others[i]);
    if (count_of(changer) > 0) check_limit();
    end();
}

/* All threads are done. */
void explore_end(const void *of) {
    (void)of;
    if (seen.live != 0) explore_fail("%d items are left", seen.live);
    if (seen.blocks != 0) explore_fail("%d blocks of memory are left", seen.blocks);
    if (seen.locals != 0) explore_fail("%d workers did not end", seen.locals);
}

/* Those with jobs are run with the membarrier, too: the queue of jobs has it. */
int explore_scenarios(const explore_scenario **list) {
    static explore_scenario made[2 * sizeof(plans) / sizeof(plans[0])];
    const int plan_count = (int)(sizeof(plans) / sizeof(plans[0]));
    int i, n = 0, barrier;
    for (i = 0; i < plan_count; i++)
        for (barrier = 0; barrier <= (SPDL__OS_BARRIER && plans[i].pipelines > 0); barrier++) {
            explore_scenario *s = &made[n++];
            snprintf(s->name, sizeof(s->name), "%s%s", plans[i].name,
                     barrier ? ", membarrier" : "");
            s->plan = &plans[i];
            s->threads = 1;
            s->membarrier = barrier;
            s->is_long = true;
        }
    *list = made;
    return n;
}
