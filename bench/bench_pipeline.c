/* bench_pipeline.c - the pipeline against one of threads, mutexes and condition variables.

       cc -O2 -g bench/bench_pipeline.c -o build/bench_pipeline -lpthread
       build/bench_pipeline [--json] [--quick] [--list] [TEXT]

   Both sides have the same shape: a source, stages with a concurrency of 4, a buffer_size of 16 on
   every edge, and a trainer, which is the main thread and takes every item (spdl_pipeline_next). We
   have 4 workers; the peer has a thread for each call that may run at once. Items are pointers that
   were made before. Times run from the first item the trainer gets to the last.

   noop3_*            three stages that do nothing: ns per item
   noop3_depth256     the same in input order, buffer_size 64: 256 items on four edges
   pull               one stage that does nothing
   workNus            one stage of N us: share of the cores it can use that did its work
   skew20us_*         one stage of 20 us on average, exponentially spread
   sparse_p50_us      three stages that do nothing and an item every 300 us: from the return of the
                      source to the return of next
   train_step_us      the trainer works 100 us per item, one stage of 60 us with a concurrency of 2:
                      mean length of a step
   inline_ns          noop3 with workers = 0: per item and call (a source and three stages)
   startup_us         noop3: from create to the first item
   stop_idle_ms       noop3 with every edge full: stop and destroy
   idle_cpu_pct       noop3 with every edge full and nobody taking: CPU, in percent of a core
   idle_cpu_pct_starved  the source waits on a condition variable, the trainer in next
   allocs_steady      allocations while 100,000 items pass
   pool_submit_ns     the pool alone: a job that does nothing, 4 workers

   Work is a loop that was timed before each run, not a wait for the clock: a thread that does not
   run does not get its work done. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define SPDL_IMPLEMENTATION
#include "../spdl.h"

#include "bench.h"
#include "peer_mutex.h"

#define WORKERS 4
#define MAX_PIPES 3
#define SLOTS 4096 /* more than are ever alive */
#define TABLE 64
#define RUN_MS 80.0
#define SLOW_RUN_MS 200.0
#define FOREVER UINT64_MAX

typedef enum feed_kind { FEED_FAST, FEED_SPARSE, FEED_STARVED } feed_kind;

/* The shape of a pipeline and what its functions do. */
typedef struct shape {
    int pipes;
    int concurrency;
    int buffer_size;
    bool unordered;
    bool in_line;   /* workers = 0 */
    double work_us; /* of a call, on average; 0: nothing */
    bool skewed;
    double trainer_us; /* of the trainer, per item */
    feed_kind feed;
    uint64_t items; /* of one run */
} shape;

/* What one run shares with its functions. */
typedef struct flow {
    const shape *is;
    uint64_t items;
    uint64_t turns[TABLE]; /* of the loop, for item n % TABLE */
    uint64_t trainer_turns;
    pthread_mutex_t mutex;
    pthread_cond_t released;
    bool release; /* a starved source may end */
} flow;

typedef struct slot {
    uint64_t index;
    uint64_t stamp; /* when the source returned it */
} slot;

static slot slots[SLOTS];

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

static void flow_open(flow *f, const shape *is, uint64_t items) {
    const bool works = is->work_us > 0 || is->trainer_us > 0;
    const double rate = works ? work_rate() : 0;
    size_t i;
    memset(f, 0, sizeof *f);
    f->is = is;
    f->items = items;
    f->trainer_turns = (uint64_t)(is->trainer_us * rate);
    for (i = 0; i < TABLE; ++i) {
        f->turns[i] = (uint64_t)(is->work_us * rate * (is->skewed ? skew_table[i] : 1.0));
    }
    for (i = 0; i < SLOTS; ++i) slots[i].index = i;
    pthread_mutex_init(&f->mutex, NULL);
    pthread_cond_init(&f->released, NULL);
}

static void flow_close(flow *f) {
    pthread_cond_destroy(&f->released);
    pthread_mutex_destroy(&f->mutex);
}

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

/* ---- the functions, as both sides call them ---- */

static bool feed_item(flow *f, uint64_t number, void **out) {
    slot *item = &slots[number % SLOTS];
    if (f->is->feed == FEED_STARVED) flow_starve(f);
    if (number == f->items || f->release) return false;
    if (f->is->feed == FEED_SPARSE) {
        bench_sleep_until(bench_ns() + 300000);
        item->stamp = bench_ns();
    }
    *out = item;
    return true;
}

static void work_item(const flow *f, const slot *item) {
    work_turns(f->turns[item->index % TABLE]);
}

SPDL_FN(feed, void, slot) {
    void *item = NULL;
    if (!feed_item((flow *)spdl_ctx(task), spdl_sequence(task), &item)) return SPDL_END;
    *out = (slot *)item;
    return SPDL_OK;
}

SPDL_FN(noop, slot, slot) {
    *out = in;
    return SPDL_OK;
}

SPDL_FN(work, slot, slot) {
    work_item((const flow *)spdl_ctx(task), in);
    *out = in;
    return SPDL_OK;
}

static bool peer_feed(void *ctx, uint64_t number, void *in, void **out) {
    (void)in;
    return feed_item((flow *)ctx, number, out);
}

static bool peer_noop(void *ctx, uint64_t number, void *in, void **out) {
    (void)ctx;
    (void)number;
    *out = in;
    return true;
}

static bool peer_work(void *ctx, uint64_t number, void *in, void **out) {
    (void)number;
    work_item((const flow *)ctx, (const slot *)in);
    *out = in;
    return true;
}

/* ---- making one ---- */

/* One of the two is set. */
typedef struct line {
    spdl_pipeline *ours;
    peer_pipeline *peer;
} line;

typedef line (*open_fn)(flow *f);

static spdl_stage ours_pipe(flow *f) {
    const spdl_order order = f->is->unordered ? SPDL_ORDER_COMPLETION : SPDL_ORDER_INPUT;
    spdl_stage idle = SPDL_PIPE(noop, .ctx = f);
    spdl_stage busy = SPDL_PIPE(work, .ctx = f);
    spdl_stage pipe = f->is->work_us > 0 ? busy : idle;
    pipe.concurrency = f->is->concurrency;
    pipe.buffer_size = f->is->buffer_size;
    pipe.output_order = order;
    return pipe;
}

static line ours_open_with(flow *f, const spdl_allocator *allocator) {
    const spdl_stage source = SPDL_SOURCE(feed, .ctx = f, .buffer_size = f->is->buffer_size);
    const spdl_stage sink = SPDL_SINK(f->is->buffer_size);
    spdl_stage rows[MAX_PIPES + 2];
    spdl_pipeline_desc desc;
    spdl_error error;
    line made = { NULL, NULL };
    int i;
    memset(&desc, 0, sizeof desc);
    desc.workers = f->is->in_line ? 0 : WORKERS;
    desc.error = &error;
    if (allocator != NULL) desc.allocator = *allocator;
    rows[0] = source;
    for (i = 1; i <= f->is->pipes; ++i) rows[i] = ours_pipe(f);
    rows[i - 1].buffer_size = 0; /* the sink says it */
    rows[i] = sink;
    if (spdl_pipeline_create(&made.ours, &desc, rows, (size_t)i + 1) != SPDL_OK) {
        bench_fail("%s", error.text);
    }
    return made;
}

static line ours_open(flow *f) { return ours_open_with(f, NULL); }

static line peer_open(flow *f) {
    peer_stage stages[MAX_PIPES + 1];
    line made = { NULL, NULL };
    int i;
    stages[0].fn = peer_feed;
    stages[0].ctx = f;
    stages[0].threads = 1;
    for (i = 1; i <= f->is->pipes; ++i) {
        stages[i].fn = f->is->work_us > 0 ? peer_work : peer_noop;
        stages[i].ctx = f;
        stages[i].threads = f->is->concurrency;
    }
    made.peer = peer_pipeline_create(stages, i, (uint32_t)f->is->buffer_size, !f->is->unordered);
    return made;
}

static bool line_next(line l, slot **item) {
    void *got = NULL;
    bool ok;
    if (l.ours != NULL) {
        const spdl_result result = spdl_pipeline_next(l.ours, &got, SPDL_FOREVER);
        if (result < 0) bench_fail("%s", spdl_pipeline_error(l.ours)->text);
        ok = result == SPDL_OK;
    } else {
        ok = peer_pipeline_next(l.peer, &got);
    }
    *item = (slot *)got;
    return ok;
}

static void line_close(line l) {
    if (l.ours != NULL) {
        spdl_pipeline_stop(l.ours, SPDL_FOREVER);
        spdl_pipeline_destroy(l.ours);
    } else {
        peer_pipeline_destroy(l.peer);
    }
}

/* ---- runs that time the flow of items ---- */

/* Takes every item and checks number and order; nanoseconds from the first to the last. */
static double line_drain(line l, const flow *f) {
    uint64_t count = 0;
    uint64_t sum = 0;
    uint64_t expected = 0;
    uint64_t first = 0;
    uint64_t last;
    bool in_order = true;
    slot *item;
    while (line_next(l, &item)) {
        if (count++ == 0) first = bench_ns();
        in_order = in_order && item == &slots[(count - 1) % SLOTS];
        sum += item->index;
        if (f->trainer_turns > 0) work_turns(f->trainer_turns);
    }
    last = bench_ns();
    BENCH_CHECK(count == f->items);
    BENCH_CHECK(in_order || f->is->unordered);
    expected = f->items / SLOTS * (SLOTS * (uint64_t)(SLOTS - 1) / 2);
    expected += f->items % SLOTS * (f->items % SLOTS - 1) / 2;
    BENCH_CHECK(sum == expected);
    return (double)(last - first);
}

static double drain_run(const shape *is, uint64_t items, open_fn open) {
    flow f;
    line l;
    double elapsed;
    flow_open(&f, is, items);
    l = open(&f);
    elapsed = line_drain(l, &f);
    line_close(l);
    flow_close(&f);
    return elapsed;
}

static double ours_run(const void *arg, uint64_t items) {
    return drain_run((const shape *)arg, items, ours_open);
}

static double peer_run(const void *arg, uint64_t items) {
    return drain_run((const shape *)arg, items, peer_open);
}

static double per_item(const void *arg, bench_run_fn run) {
    const shape *is = (const shape *)arg;
    return run(is, is->items) / (double)is->items;
}

static double ours_ns(const void *arg) { return per_item(arg, ours_run); }
static double peer_ns(const void *arg) { return per_item(arg, peer_run); }
static double ours_us(const void *arg) { return per_item(arg, ours_run) / 1e3; }
static double peer_us(const void *arg) { return per_item(arg, peer_run) / 1e3; }

/* Percent of the cores a stage with this concurrency can use. */
static double share(const void *arg, double ns) {
    const shape *is = (const shape *)arg;
    const int cores = bench_cores() < is->concurrency ? bench_cores() : is->concurrency;
    return 100.0 * is->work_us * 1e3 / (ns * cores);
}

static double ours_share(const void *arg) { return share(arg, ours_ns(arg)); }
static double peer_share(const void *arg) { return share(arg, peer_ns(arg)); }

static const char threads_name[] = "mutex+condvar threads";

/* So that skewed work has the mean it should have. */
static uint64_t whole_tables(uint64_t items) { return (items + TABLE - 1) / TABLE * TABLE; }

static void row_drain(const bench_row *row, shape is, int rounds, double run_ms, bench_side_fn ours,
                      bench_side_fn peer) {
    shape theirs = is;
    if (!bench_wanted(row->name)) return;
    is.items = whole_tables(bench_calibrate(ours_run, &is, 512, run_ms));
    theirs.items = whole_tables(bench_calibrate(peer_run, &theirs, 512, run_ms));
    bench_compare_sides(row, rounds, ours, &is, peer, &theirs);
}

static shape noop_shape(int pipes, int buffer_size, bool unordered) {
    shape is;
    memset(&is, 0, sizeof is);
    is.pipes = pipes;
    is.concurrency = 4;
    is.buffer_size = buffer_size;
    is.unordered = unordered;
    return is;
}

static void rows_noop(void) {
    const bench_row ordered = { "noop3_ordered", "ns", threads_name, false, 100, false, 10 };
    const bench_row unordered = { "noop3_unordered", "ns", threads_name, false, 0, false, 0 };
    const bench_row depth = { "noop3_depth256", "ns", threads_name, false, 0, false, 0 };
    const bench_row pull = { "pull", "ns", threads_name, false, 0, false, 0 };
    row_drain(&ordered, noop_shape(3, 16, false), 9, RUN_MS, ours_ns, peer_ns);
    row_drain(&unordered, noop_shape(3, 16, true), 9, RUN_MS, ours_ns, peer_ns);
    row_drain(&depth, noop_shape(3, 64, false), 9, RUN_MS, ours_ns, peer_ns);
    row_drain(&pull, noop_shape(1, 16, false), 9, RUN_MS, ours_ns, peer_ns);
}

static void row_work(const char *name, double work_us, bool skewed, bool unordered) {
    const bench_row row = { name, "%", threads_name, true, 0, false, 0 };
    shape is = noop_shape(1, 16, unordered);
    is.work_us = work_us;
    is.skewed = skewed;
    row_drain(&row, is, 5, SLOW_RUN_MS, ours_share, peer_share);
}

static void row_train_step(void) {
    const bench_row row = { "train_step_us", "us", threads_name, false, 0, false, 0 };
    shape is = noop_shape(1, 16, false);
    is.concurrency = 2;
    is.work_us = 60;
    is.trainer_us = 100;
    row_drain(&row, is, 5, SLOW_RUN_MS, ours_us, peer_us);
}

static double inline_ns(const void *arg) {
    const shape *is = (const shape *)arg;
    return ours_ns(is) / (is->pipes + 1);
}

static void row_inline(void) {
    const bench_row row = { "inline_ns", "ns", NULL, false, 0, false, 0 };
    shape is = noop_shape(3, 16, false);
    is.in_line = true;
    if (!bench_wanted(row.name)) return;
    is.items = bench_calibrate(ours_run, &is, 500, RUN_MS);
    bench_compare_sides(&row, 9, inline_ns, &is, NULL, NULL);
}

/* ---- latencies ---- */

static double sparse_run(const shape *is, open_fn open) {
    double *latency = (double *)peer_alloc(is->items * sizeof *latency);
    uint64_t count = 0;
    double median;
    flow f;
    slot *item;
    line l;
    flow_open(&f, is, is->items);
    l = open(&f);
    while (line_next(l, &item)) {
        BENCH_CHECK(item == &slots[count % SLOTS] && count < is->items);
        latency[count++] = (double)(bench_ns() - item->stamp) / 1e3;
    }
    BENCH_CHECK(count == is->items);
    median = bench_quantile(latency, count, 0.5);
    line_close(l);
    flow_close(&f);
    free(latency);
    return median;
}

static double ours_sparse(const void *arg) { return sparse_run((const shape *)arg, ours_open); }
static double peer_sparse(const void *arg) { return sparse_run((const shape *)arg, peer_open); }

static void row_sparse(void) {
    const bench_row row = { "sparse_p50_us", "us", threads_name, false, 0, false, 0 };
    shape is = noop_shape(3, 16, false);
    is.feed = FEED_SPARSE;
    is.items = bench_opt.quick ? 300 : 800;
    if (!bench_wanted(row.name)) return;
    bench_compare_sides(&row, 5, ours_sparse, &is, peer_sparse, &is);
}

#define REPEATS 15 /* of a short measurement in one round */

static double startup_run(const shape *is, open_fn open) {
    double took[REPEATS];
    flow f;
    int i;
    for (i = 0; i < REPEATS; ++i) {
        slot *item;
        uint64_t start;
        line l;
        flow_open(&f, is, FOREVER);
        start = bench_ns();
        l = open(&f);
        BENCH_CHECK(line_next(l, &item) && item == &slots[0]);
        took[i] = (double)(bench_ns() - start) / 1e3;
        line_close(l);
        flow_close(&f);
    }
    return bench_quantile(took, REPEATS, 0.5);
}

static double ours_startup(const void *arg) { return startup_run((const shape *)arg, ours_open); }
static double peer_startup(const void *arg) { return startup_run((const shape *)arg, peer_open); }

static double stop_run(const shape *is, open_fn open) {
    double took[REPEATS];
    flow f;
    int i;
    for (i = 0; i < REPEATS; ++i) {
        slot *item;
        uint64_t start;
        line l;
        flow_open(&f, is, FOREVER);
        l = open(&f);
        BENCH_CHECK(line_next(l, &item) && item == &slots[0]);
        bench_sleep_ms(5); /* the edges fill, and everyone goes to sleep */
        start = bench_ns();
        line_close(l);
        took[i] = (double)(bench_ns() - start) / 1e6;
        flow_close(&f);
    }
    return bench_quantile(took, REPEATS, 0.5);
}

static double ours_stop(const void *arg) { return stop_run((const shape *)arg, ours_open); }
static double peer_stop(const void *arg) { return stop_run((const shape *)arg, peer_open); }

static void rows_start_and_stop(void) {
    const bench_row start = { "startup_us", "us", threads_name, false, 0, false, 0 };
    const bench_row stop = { "stop_idle_ms", "ms", threads_name, false, 1, false, 0 };
    const shape is = noop_shape(3, 16, false);
    if (bench_wanted(start.name)) {
        bench_compare_sides(&start, 9, ours_startup, &is, peer_startup, &is);
    }
    if (bench_wanted(stop.name)) bench_compare_sides(&stop, 9, ours_stop, &is, peer_stop, &is);
}

/* ---- idle ---- */

static double parked_run(const shape *is, open_fn open) {
    double cores;
    flow f;
    slot *item;
    line l;
    flow_open(&f, is, FOREVER);
    l = open(&f);
    BENCH_CHECK(line_next(l, &item));
    bench_sleep_ms(50);
    cores = bench_idle_cores();
    line_close(l);
    flow_close(&f);
    return cores * 100;
}

static void *starved_trainer(void *arg) {
    slot *item;
    return line_next(*(const line *)arg, &item) ? arg : NULL;
}

static double starved_run(const shape *is, open_fn open) {
    pthread_t trainer;
    void *got = NULL;
    double cores;
    flow f;
    line l;
    flow_open(&f, is, FOREVER);
    l = open(&f);
    BENCH_CHECK(pthread_create(&trainer, NULL, starved_trainer, &l) == 0);
    bench_sleep_ms(50);
    cores = bench_idle_cores();
    flow_release(&f);
    pthread_join(trainer, &got);
    BENCH_CHECK(got == NULL); /* the end, not an item */
    line_close(l);
    flow_close(&f);
    return cores * 100;
}

static double ours_parked(const void *arg) { return parked_run((const shape *)arg, ours_open); }
static double peer_parked(const void *arg) { return parked_run((const shape *)arg, peer_open); }
static double ours_starved(const void *arg) { return starved_run((const shape *)arg, ours_open); }
static double peer_starved(const void *arg) { return starved_run((const shape *)arg, peer_open); }

static void rows_idle(void) {
    const bench_row parked = { "idle_cpu_pct", "%", threads_name, false, 0.1, false, 0 };
    const bench_row starved = { "idle_cpu_pct_starved", "%", threads_name, false, 0.1, false, 0 };
    shape is = noop_shape(3, 16, false);
    if (bench_wanted(parked.name)) {
        bench_compare_sides(&parked, 5, ours_parked, &is, peer_parked, &is);
    }
    is.feed = FEED_STARVED;
    if (bench_wanted(starved.name)) {
        bench_compare_sides(&starved, 5, ours_starved, &is, peer_starved, &is);
    }
}

/* ---- allocations ---- */

typedef struct counts {
    uint64_t taken;
    uint64_t given_back;
} counts;

static void *counted_alloc(size_t bytes, size_t align, void *user) {
    const size_t whole = (bytes + align - 1) / align * align;
    __atomic_add_fetch(&((counts *)user)->taken, 1, __ATOMIC_RELAXED);
    return aligned_alloc(align < sizeof(void *) ? sizeof(void *) : align, whole);
}

static void counted_free(void *memory, size_t bytes, void *user) {
    (void)bytes;
    __atomic_add_fetch(&((counts *)user)->given_back, 1, __ATOMIC_RELAXED);
    free(memory);
}

static double allocs_run(const void *arg) {
    const shape *is = (const shape *)arg;
    counts n = { 0, 0 };
    const spdl_allocator allocator = { counted_alloc, counted_free, &n };
    uint64_t before;
    uint64_t after;
    flow f;
    line l;
    flow_open(&f, is, is->items);
    l = ours_open_with(&f, &allocator);
    before = __atomic_load_n(&n.taken, __ATOMIC_RELAXED);
    line_drain(l, &f);
    after = __atomic_load_n(&n.taken, __ATOMIC_RELAXED);
    line_close(l);
    flow_close(&f);
    BENCH_CHECK(before > 0 && n.taken == n.given_back);
    return (double)(after - before);
}

static void row_allocs(void) {
    const bench_row row = { "allocs_steady", "calls", NULL, false, 0, true, 0 };
    shape is = noop_shape(3, 16, false);
    is.items = 100000;
    if (!bench_wanted(row.name)) return;
    bench_compare_sides(&row, 3, allocs_run, &is, NULL, NULL);
}

/* ---- the pool alone ---- */

typedef struct job_count {
    uint64_t jobs;
    char pad[120];
} job_count;

static job_count job_counts[WORKERS];

static void ours_job(void *arg, int worker, void *local) {
    (void)local;
    ++((job_count *)arg)[worker].jobs;
}

static void peer_job_fn(void *arg, int worker) { ++((job_count *)arg)[worker].jobs; }

static void jobs_check(uint64_t jobs) {
    uint64_t done = 0;
    int i;
    for (i = 0; i < WORKERS; ++i) done += job_counts[i].jobs;
    BENCH_CHECK(done == jobs);
}

static double ours_pool_run(const void *arg, uint64_t jobs) {
    spdl_pool_desc desc;
    spdl_pool *pool;
    uint64_t start;
    double elapsed;
    uint64_t i;
    (void)arg;
    memset(&desc, 0, sizeof desc);
    memset(job_counts, 0, sizeof job_counts);
    desc.workers = WORKERS;
    BENCH_CHECK(spdl_pool_create(&pool, &desc) == SPDL_OK);
    start = bench_ns();
    for (i = 0; i < jobs; ++i) {
        BENCH_CHECK(spdl_pool_submit(pool, ours_job, job_counts, SPDL_FOREVER) == SPDL_OK);
    }
    BENCH_CHECK(spdl_pool_drain(pool, SPDL_FOREVER) == SPDL_OK);
    elapsed = (double)(bench_ns() - start);
    spdl_pool_destroy(pool);
    jobs_check(jobs);
    return elapsed;
}

static double peer_pool_run(const void *arg, uint64_t jobs) {
    peer_pool *pool = peer_pool_create(WORKERS, 256);
    const uint64_t start = bench_ns();
    double elapsed;
    uint64_t i;
    (void)arg;
    memset(job_counts, 0, sizeof job_counts);
    for (i = 0; i < jobs; ++i) peer_pool_submit(pool, peer_job_fn, job_counts);
    peer_pool_drain(pool);
    elapsed = (double)(bench_ns() - start);
    peer_pool_destroy(pool);
    jobs_check(jobs);
    return elapsed;
}

static double ours_submit_ns(const void *arg) { return per_item(arg, ours_pool_run); }
static double peer_submit_ns(const void *arg) { return per_item(arg, peer_pool_run); }

static void row_pool(void) {
    const bench_row row = { "pool_submit_ns", "ns", "mutex+condvar pool", false, 0, false, 0 };
    shape ours = noop_shape(0, 0, false);
    shape peer = ours;
    if (!bench_wanted(row.name)) return;
    ours.items = bench_calibrate(ours_pool_run, &ours, 2000, RUN_MS);
    peer.items = bench_calibrate(peer_pool_run, &peer, 2000, RUN_MS);
    bench_compare_sides(&row, 9, ours_submit_ns, &ours, peer_submit_ns, &peer);
}

int main(int argc, char **argv) {
    bench_start("pipeline", argc, argv);
    rows_noop();
    row_work("work1us", 1, false, false);
    row_work("work10us", 10, false, false);
    row_work("work100us", 100, false, false);
    row_work("skew20us_ordered", 20, true, false);
    row_work("skew20us_unordered", 20, true, true);
    row_sparse();
    row_train_step();
    row_inline();
    rows_start_and_stop();
    rows_idle();
    row_allocs();
    row_pool();
    return 0;
}
