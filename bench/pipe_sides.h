/* pipe_sides.h - the flows of bench_pipeline, and three pipelines for them: ours, and two by hand
   on mutexes and condition variables. Peers that need packages are in bench/peers/pipe_*.cpp.

   The functions are the same for all: feed_item, the work of a stage, sink_item. Ours calls them
   from its stage functions, a peer through pipe_spec. */
#ifndef PIPE_SIDES_H_INCLUDED
#define PIPE_SIDES_H_INCLUDED

#include "bench.h"
#include "pipe.h"

#define MAX_PIPES 3
#define SLOTS 4096 /* more than are ever alive */
#define TABLE 64
#define TAIL_TABLE 100
#define FOREVER UINT64_MAX

typedef enum feed_kind { FEED_FAST, FEED_SPARSE, FEED_STARVED, FEED_WORK } feed_kind;
typedef enum work_kind {
    WORK_NONE,
    WORK_EVEN,
    WORK_SKEWED,
    WORK_TAIL,
    WORK_STEP, /* as even, and counted */
    WORK_NAP,
    WORK_IO, /* sleeps 10 ms, then computes */
    WORK_JPEG
} work_kind;

/* The shape of a pipeline and what its functions do. */
typedef struct shape {
    int pipes;
    int concurrency;
    int workers; /* 0: in line */
    int buffer_size;
    int live; /* items in flight of peers that have one bound; 0: what all the edges hold */
    bool unordered;
    bool pulled;        /* by a trainer; else the last stage is a sink */
    bool next_works;    /* ours: a worker less, and next runs stages while it waits */
    int batch;          /* the trainer takes as many at once; 0: items */
    work_kind work;
    double work_us;    /* of a call, on average */
    double trainer_us; /* of the trainer, per item */
    feed_kind feed;
    double feed_us; /* before each item: FEED_SPARSE sleeps, FEED_WORK computes */
    uint64_t items; /* of one run */
    uint64_t steps; /* of the trainer, where he works */
} shape;

typedef struct slot {
    uint64_t index;
    uint64_t stamp; /* when the source returned it */
    const pipe_jpeg *jpeg;
} slot;

typedef struct image {
    uint64_t index; /* of its slot */
    unsigned char pixels[PIPE_JPEG_PIXELS];
} image;

/* What came out: by the sink or the trainer. */
typedef struct tally {
    uint64_t count;
    uint64_t sum;
    uint64_t first_ns;
    uint64_t last_ns;
    bool disorder;
    double *times; /* us: latencies, or lengths of a step; NULL: not wanted */
} tally;

/* What one run shares with its functions. */
typedef struct flow {
    shape is;
    pipe_spec spec;
    uint64_t turns[TAIL_TABLE]; /* of the loop, for item n % table */
    uint64_t table;
    uint64_t trainer_turns;
    uint64_t feed_turns;
    spdl_pool *pool; /* of ours; NULL: one of its own */
    pthread_mutex_t mutex;
    pthread_cond_t released;
    bool release;        /* a starved source may end */
    uint64_t shared_out; /* items of bare_main */
    char apart[128];
    uint64_t calls; /* of WORK_STEP that have begun */
    char apart_too[128];
    tally out;
} flow;

static slot slots[SLOTS];
static const pipe_jpeg_calls *jpeg_calls; /* NULL: the plugin is not there */
static pipe_jpeg jpegs[TABLE];

/* ---- work ---- */

/* A chain of multiplications in a register, in one place: as long wherever it is called from. */
static __attribute__((noinline)) void work_turns(uint64_t turns) {
    uint64_t x = turns;
    while (turns-- > 0) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        __asm__ __volatile__("" : "+r"(x));
    }
}

/* Turns in a microsecond, by the best of several short runs: the others were interrupted. */
static double work_rate(void) {
    const uint64_t turns = 50000;
    double best = 0;
    int i;
    for (i = 0; i < 15; ++i) {
        const uint64_t start = bench_ns();
        double rate;
        work_turns(turns);
        rate = (double)turns * 1e3 / (double)(bench_ns() - start + 1);
        if (rate > best) best = rate;
    }
    return best;
}

/* Exponential with mean 1, cut at the 64 middles of equal shares, in a fixed shuffled order. */
/* clang-format off */
static const double skew_table[TABLE] = {
    0.180, 0.388, 0.218, 0.681, 1.565, 2.030, 0.365, 2.156, 1.145, 1.248, 0.008, 0.412,
    0.024, 0.300, 0.143, 0.436, 0.199, 1.918, 1.817, 1.097, 0.485, 0.621, 0.343, 0.745,
    0.651, 0.593, 1.493, 3.260, 1.195, 1.007, 0.321, 1.426, 0.925, 2.669, 3.774, 0.965,
    0.258, 0.125, 0.849, 1.642, 1.304, 0.813, 1.363, 0.279, 2.300, 0.537, 0.565, 0.090,
    0.040, 0.238, 0.713, 2.467, 0.887, 0.460, 0.108, 0.779, 1.726, 0.073, 0.057, 4.878,
    0.511, 0.162, 2.922, 1.051
};
/* clang-format on */

/* One in a hundred takes 50 times as long as the others; with mean 1. */
static double tail_share(uint64_t item) { return (item == 37 ? 50 : 1) / 1.49; }

static double work_share(const shape *is, uint64_t item) {
    if (is->work == WORK_SKEWED) return skew_table[item];
    return is->work == WORK_TAIL ? tail_share(item) : 1;
}

static void flow_set_turns(flow *f) {
    const bool works = (f->is.work != WORK_NAP && f->is.work_us + f->is.trainer_us > 0) ||
                       f->is.feed == FEED_WORK;
    const double rate = works ? work_rate() : 0;
    uint64_t i;
    f->table = f->is.work == WORK_TAIL ? TAIL_TABLE : TABLE;
    f->trainer_turns = (uint64_t)(f->is.trainer_us * rate);
    f->feed_turns = (uint64_t)(f->is.feed_us * rate);
    for (i = 0; i < f->table; ++i) {
        f->turns[i] = (uint64_t)(f->is.work_us * rate * work_share(&f->is, i));
    }
}

/* ---- the functions ---- */

static void flow_release(flow *f) {
    pthread_mutex_lock(&f->mutex);
    f->release = true;
    pthread_mutex_unlock(&f->mutex);
    pthread_cond_broadcast(&f->released);
}

static void flow_starve(flow *f) {
    pthread_mutex_lock(&f->mutex);
    while (!f->release) pthread_cond_wait(&f->released, &f->mutex);
    pthread_mutex_unlock(&f->mutex);
}

static bool feed_item(void *ctx, uint64_t number, void **out) {
    flow *f = (flow *)ctx;
    slot *item = &slots[number % SLOTS];
    if (f->is.feed == FEED_STARVED) flow_starve(f);
    if (number == f->is.items || f->release) return false;
    if (f->is.feed == FEED_SPARSE) {
        bench_sleep_until(bench_ns() + (uint64_t)(f->is.feed_us * 1e3));
        item->stamp = bench_ns();
    }
    if (f->is.feed == FEED_WORK) work_turns(f->feed_turns);
    *out = item;
    return true;
}

static void *work_none(void *ctx, void *item) {
    (void)ctx;
    return item;
}

/* SLOTS is no multiple of TAIL_TABLE: one lap has 41 slow items of 4096, near enough. */
static void *work_loop(void *ctx, void *item) {
    const flow *f = (const flow *)ctx;
    work_turns(f->turns[((const slot *)item)->index % f->table]);
    return item;
}

static void *work_step(void *ctx, void *item) {
    __atomic_add_fetch(&((flow *)ctx)->calls, 1, __ATOMIC_RELAXED);
    return work_loop(ctx, item);
}

static void *work_nap(void *ctx, void *item) {
    bench_sleep_until(bench_ns() + (uint64_t)(((const flow *)ctx)->is.work_us * 1e3));
    return item;
}

static void *work_io(void *ctx, void *item) {
    bench_sleep_ms(10);
    return work_loop(ctx, item);
}

static void *work_jpeg(void *ctx, void *item) {
    const slot *in = (const slot *)item;
    image *out = (image *)malloc(sizeof *out);
    (void)ctx;
    if (out == NULL ||
        !jpeg_calls->decode(in->jpeg, PIPE_JPEG_SIDE, PIPE_JPEG_SIDE, out->pixels)) {
        bench_fail("not decoded");
    }
    out->index = in->index;
    return out;
}

static void tally_item(flow *f, const void *item) {
    const uint64_t index = ((const slot *)item)->index; /* that of an image is in the same place */
    tally *t = &f->out;
    t->disorder = t->disorder || index != t->count % SLOTS;
    t->sum += index;
    if (t->count++ == 0) t->first_ns = bench_ns();
    if (t->count == f->is.items) t->last_ns = bench_ns();
    if (t->times != NULL && f->is.feed == FEED_SPARSE) {
        t->times[t->count - 1] = (double)(bench_ns() - ((const slot *)item)->stamp) / 1e3;
    }
}

static void sink_item(void *ctx, void *item) {
    tally_item((flow *)ctx, item);
    if (((flow *)ctx)->is.work == WORK_JPEG) free(item);
}

/* ---- a flow ---- */

static void flow_open(flow *f, const shape *is) {
    static void *(*const works[])(void *, void *) = { work_none, work_loop, work_loop, work_loop,
                                                      work_step, work_nap,  work_io,
                                                      work_jpeg };
    pipe_spec *spec = &f->spec;
    uint64_t i;
    memset(f, 0, sizeof *f);
    f->is = *is;
    spec->pipes = is->pipes;
    spec->concurrency = is->concurrency;
    spec->workers = is->workers;
    spec->buffer_size = is->buffer_size;
    spec->live = is->live > 0 ? is->live : is->buffer_size * (is->pipes + 1);
    spec->unordered = is->unordered;
    spec->pulled = is->pulled;
    spec->ctx = f;
    spec->feed = feed_item;
    spec->work = works[is->work];
    spec->sink = sink_item;
    for (i = 0; i < SLOTS; ++i) slots[i].index = i;
    for (i = 0; i < SLOTS; ++i) slots[i].jpeg = &jpegs[i % TABLE];
    flow_set_turns(f);
    pthread_mutex_init(&f->mutex, NULL);
    pthread_cond_init(&f->released, NULL);
}

static void flow_close(flow *f) {
    pthread_cond_destroy(&f->released);
    pthread_mutex_destroy(&f->mutex);
}

/* ---- ours ---- */

SPDL_FN(feed, void, void) {
    if (!feed_item(spdl_ctx(task), spdl_sequence(task), out)) return SPDL_END;
    return SPDL_OK;
}

SPDL_FN(noop, void, void) {
    *out = in;
    return SPDL_OK;
}

SPDL_FN(work, void, void) {
    flow *f = (flow *)spdl_ctx(task);
    *out = f->spec.work(f, in);
    return SPDL_OK;
}

/* Images are the library's to free. */
SPDL_FN(sink, void, void) {
    tally_item((flow *)spdl_ctx(task), in);
    return SPDL_SKIP;
}

static spdl_stage ours_pipe(flow *f) {
    spdl_stage idle = SPDL_PIPE(noop, .ctx = f);
    spdl_stage busy = SPDL_PIPE(work, .ctx = f);
    spdl_stage pipe = f->is.work == WORK_NONE ? idle : busy;
    pipe.concurrency = f->is.concurrency;
    pipe.buffer_size = f->is.buffer_size;
    pipe.output_order = f->is.unordered ? SPDL_ORDER_COMPLETION : SPDL_ORDER_INPUT;
    if (f->is.work == WORK_JPEG) pipe.free_item = free;
    return pipe;
}

/* The edge behind the last stage of a trainer has the size that the sink says. */
static size_t ours_rows(flow *f, spdl_stage *rows) {
    const spdl_stage source = SPDL_SOURCE(feed, .ctx = f, .buffer_size = f->is.buffer_size);
    const spdl_stage end = SPDL_PIPE(sink, .ctx = f, .output_order = SPDL_ORDER_COMPLETION);
    const spdl_stage batch = SPDL_BATCH(f->is.batch);
    const spdl_stage pulled = SPDL_SINK(f->is.batch > 0 ? 3 : f->is.buffer_size);
    const spdl_stage ended = SPDL_SINK(1);
    size_t count = 0;
    int i;
    rows[count++] = source;
    for (i = 0; i < f->is.pipes; ++i) rows[count++] = ours_pipe(f);
    if (!f->is.pulled) {
        rows[count++] = end;
    } else if (f->is.batch > 0) {
        rows[count++] = batch;
    } else {
        rows[count - 1].buffer_size = 0;
    }
    rows[count++] = f->is.pulled ? pulled : ended;
    return count;
}

static spdl_pipeline *ours_open_with(flow *f, const spdl_allocator *allocator) {
    spdl_stage rows[MAX_PIPES + 3];
    spdl_pipeline_desc desc;
    spdl_pipeline *made;
    spdl_error error;
    memset(&desc, 0, sizeof desc);
    desc.workers = SPDL_INLINE;
    if (f->pool != NULL) desc.workers = 0;
    else if (f->is.workers > 0) desc.workers = f->is.workers - f->is.next_works;
    desc.next_works_ns = f->is.next_works ? SPDL_FOREVER : 0;
    desc.pool = f->pool;
    desc.error = &error;
    if (allocator != NULL) desc.allocator = *allocator;
    if (spdl_pipeline_create(&made, &desc, rows, ours_rows(f, rows)) != SPDL_OK) {
        bench_fail("%s", error.text);
    }
    return made;
}

static void *ours_open(const pipe_spec *spec) { return ours_open_with((flow *)spec->ctx, NULL); }

static bool ours_next(void *pipeline, void **item) {
    spdl_pipeline *p = (spdl_pipeline *)pipeline;
    const spdl_result result = spdl_pipeline_next(p, item, SPDL_FOREVER);
    if (result < 0) bench_fail("%s", spdl_pipeline_error(p)->text);
    return result == SPDL_OK;
}

static void ours_wait(void *pipeline) {
    void *item;
    if (ours_next(pipeline, &item)) bench_fail("an item after the sink");
}

static void ours_close(void *pipeline) {
    spdl_pipeline_stop((spdl_pipeline *)pipeline, SPDL_FOREVER);
    spdl_pipeline_destroy((spdl_pipeline *)pipeline);
}

static const pipe_peer ours = { "spdl.h", NULL, ours_open, ours_next, ours_wait, ours_close };

/* ---- by hand: threads for each stage, between queues ---- */

typedef struct staged {
    const pipe_spec *spec;
    peer_pipeline *pipeline;
} staged;

static bool staged_feed(void *ctx, uint64_t number, void *in, void **out) {
    (void)in;
    return feed_item(ctx, number, out);
}

static bool staged_work(void *ctx, uint64_t number, void *in, void **out) {
    (void)number;
    *out = ((flow *)ctx)->spec.work(ctx, in);
    return true;
}

static void *staged_open(const pipe_spec *spec) {
    staged *s = (staged *)peer_alloc(sizeof *s);
    peer_stage stages[MAX_PIPES + 1];
    int i;
    for (i = 0; i <= spec->pipes; ++i) {
        stages[i].fn = i == 0 ? staged_feed : staged_work;
        stages[i].ctx = spec->ctx;
        stages[i].threads = i == 0 ? 1 : spec->concurrency;
    }
    s->spec = spec;
    s->pipeline = peer_pipeline_create(stages, i, (uint32_t)spec->buffer_size, !spec->unordered);
    return s;
}

static bool staged_next(void *pipeline, void **item) {
    return peer_pipeline_next(((staged *)pipeline)->pipeline, item);
}

/* The thread that waits is that of the sink: one less to wake. */
static void staged_wait(void *pipeline) {
    const pipe_spec *spec = ((staged *)pipeline)->spec;
    void *item;
    while (staged_next(pipeline, &item)) spec->sink(spec->ctx, item);
}

static void staged_close(void *pipeline) {
    peer_pipeline_destroy(((staged *)pipeline)->pipeline);
    free(pipeline);
}

/* ---- by hand: a pool, where each thread takes an item through all the stages ---- */

typedef struct hand_pool {
    pipe_outlet *outlet;
    pthread_mutex_t mutex; /* of the source */
    uint64_t fed;
    bool ended;
} hand_pool;

static bool hand_feed(hand_pool *pool, uint64_t *number, void **item) {
    bool more;
    pthread_mutex_lock(&pool->mutex);
    *number = pool->fed;
    more = !pool->ended && pipe_feed(pool->outlet, *number, item);
    pool->fed += more;
    pool->ended = !more;
    pthread_mutex_unlock(&pool->mutex);
    return more;
}

static void *hand_main(void *arg) {
    hand_pool *pool = (hand_pool *)arg;
    uint64_t number;
    void *item = NULL;
    while (hand_feed(pool, &number, &item)) {
        pipe_put(pool->outlet, number, pipe_work(pool->outlet->spec, item));
    }
    return NULL;
}

static void hand_run(pipe_outlet *o) {
    pthread_t threads[PEER_MAX_THREADS];
    hand_pool pool = { o, PTHREAD_MUTEX_INITIALIZER, 0, false };
    int count = pipe_threads(o->spec);
    int i;
    peer_mutex_init(&pool.mutex);
    for (i = 0; i < count; ++i) peer_thread(&threads[i], hand_main, &pool);
    for (i = 0; i < count; ++i) pthread_join(threads[i], NULL);
    pthread_mutex_destroy(&pool.mutex);
}

static const pipe_peer by_hand[] = {
    { "mutex+condvar threads", NULL, staged_open, staged_next, staged_wait, staged_close },
    { "mutex+condvar pool", hand_run, NULL, NULL, NULL, NULL },
};

/* ---- none: what the machine does by itself ---- */

/* Where there is something to compare with: a thread for each core, which take items by a counter
   and do the work; or one thread that makes the items and takes them. */
static bool bare_can(const shape *is) {
    if ((is->items == FOREVER && is->steps == 0) || is->workers == 0) return false;
    if (is->pulled) return is->trainer_us > 0 || is->feed == FEED_SPARSE;
    return is->feed == FEED_SPARSE || is->work == WORK_EVEN || is->work == WORK_SKEWED;
}

static void *bare_open(const pipe_spec *spec) { return spec->ctx; }

static bool bare_next(void *ctx, void **item) {
    flow *f = (flow *)ctx;
    return feed_item(f, f->out.count, item);
}

static void *bare_main(void *arg) {
    flow *f = (flow *)arg;
    const uint64_t some = f->is.work_us < 10 ? 16 : 1;
    for (;;) {
        const uint64_t from = __atomic_fetch_add(&f->shared_out, some, __ATOMIC_RELAXED);
        uint64_t i;
        for (i = from; i < from + some && i < f->is.items; ++i) work_loop(f, &slots[i % SLOTS]);
        if (i >= f->is.items) return NULL;
    }
}

static void bare_wait(void *ctx) {
    flow *f = (flow *)ctx;
    pthread_t threads[PEER_MAX_THREADS];
    const int count = bench_cores() < f->is.workers ? bench_cores() : f->is.workers;
    void *item;
    int i;
    for (i = 0; i < count && f->is.work != WORK_NONE; ++i) peer_thread(&threads[i], bare_main, f);
    while (i > 0) pthread_join(threads[--i], NULL);
    while (bare_next(ctx, &item)) sink_item(ctx, item);
}

static void bare_close(void *ctx) { (void)ctx; }

static const pipe_peer bare = { "(none)", NULL, bare_open, bare_next, bare_wait, bare_close };

/* ---- any of them ---- */

static void *line_open(const pipe_peer *peer, const pipe_spec *spec) {
    return peer->run != NULL ? pipe_open(peer, spec) : peer->open(spec);
}

static bool line_next(const pipe_peer *peer, void *line, void **item) {
    return peer->run != NULL ? pipe_next((pipe_outlet *)line, item) : peer->next(line, item);
}

static void line_wait(const pipe_peer *peer, void *line) {
    if (peer->run != NULL) {
        ((pipe_outlet *)line)->run((pipe_outlet *)line);
    } else {
        peer->wait(line);
    }
}

static void line_close(const pipe_peer *peer, void *line) {
    if (peer->run != NULL) {
        pipe_close((pipe_outlet *)line);
    } else {
        peer->close(line);
    }
}

#endif /* PIPE_SIDES_H_INCLUDED */
