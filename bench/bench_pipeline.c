/* bench_pipeline.c - the pipeline against those of other libraries and against threads by hand.

       make bench-pipeline ARGS="[--json] [--quick] [--all] [--list] [TEXT]"

   A row runs all sides in turns, each time in a process of its own, and compares us with the best
   peer. Below stand our lowest and our highest round, and all the peers. Where it means something,
   so does "(none)", what this machine does without a pipeline: the trainer, the source or the work
   alone; a goal may be out of its reach, and "0.97 of (none)" is what counts then. A peer three
   times slower than the best is run once, unless --all is given. Items are pointers that were made
   before. Everybody has as many workers as there are processors this process may use, at least 2
   and at most 64, if the row does not say how many; the concurrency of a stage is that of the
   workers. There is a buffer_size of 16 on every edge, which for peers that have one bound for all
   is 16 times the edges. Peers: oneTBB (parallel_pipeline, flow graph), the thread pool of GLib,
   OpenMP tasks, a thread for each call that may run at once between queues of mutexes and condition
   variables, and a pool by hand whose threads take an item through all the stages. See pipe.h. The
   pool by hand and those of GLib and OpenMP call the stages of an item one after the other, so to
   them a pipeline is one call.

   To a trainer who works, the main thread: STEP of 100us, 1ms, 10ms or 100ms of computing for each
   item, one stage of 0.6 of that with a concurrency of 2, N = 3 or 16 finished items in front of
   him (TEXT user_1ms_b3 runs the three rows of a case). Against threads by hand and oneTBB's
   parallel_pipeline:
   user_STEP_bN_step  mean length of a step, beginning with three quarters of a full buffer
   user_STEP_bN_p99   of one in a hundred; of fewer steps the longest
   user_STEP_bN_cpu   CPU of the process for a step and a call
   next_*             these and other rows again: ours with a worker less, and .next_works_ns

   To a sink: source, stages, and a last stage with a concurrency of 1 that runs on the workers.
   Times run from the first item in the sink to the last; shares of the cores from the start.
   noop3_ordered      three stages that do nothing, in input order: ns per item
   noop3_cpu_ns       of the same runs: CPU per item
   noop3_unordered    as items are done
   noop3_*_vs_tbb     of the same runs, against the better of the two of oneTBB alone
   noop3_16live       in order with 4 items on each of four edges
   workNus            one stage of N us: share of the cores it can use that did its work
   skew20us_*         one stage of 20 us on average, exponentially spread
   convoy_Ww          the source sleeps 2 ms for an item, one stage of 1.9 ms with a concurrency of
                      W - 1, W workers: items a second, against the pool by hand; 500 would be ideal
   turns_*            two pipelines on one pool, one stage each, one of 1 us and one of 1 ms: items
                      a second of each, against the same on two pools at the same time
   sparse_p50_us      three stages that do nothing and an item every 300 us: from the return of the
                      source to the call of the sink
   sparse_cpu_us      of the same runs: CPU per item
   calm_*, crowd_*    2 workers, 3 items in front of a trainer who only takes: us an item, as it is
                      and beside a busy loop on each processor. work: a source and a stage of 12 us;
                      nap: that sleep 300 us; one: 1 worker, a source of 12 us
   scale_Nus_Ww       one stage of N us in order, W workers and a concurrency of W (with --all)
   jpeg_rate          one stage that decodes a JPEG of 256 x 256, in order: images a second, against
                      threads by hand and oneTBB
   jpeg_cpu           of the same runs, against the same: CPU per image
   jpeg_mem           against the pool by hand: peak memory that the run added to the process

   To a trainer who only takes items (spdl_pipeline_next); peers without such a call get a window of
   places with a mutex. Times run from the first item he gets to the last.
   pull               one stage that does nothing: ns per item
   pull3_*            three such stages
   sparse_pull_p50_us, sparse_pull_cpu_us  as sparse above, to the return of next
   tail_1pct_50x      one stage of 100 us on average, 1 % of the items take 50 times as long as the
                      others, batches of 32: share of what the cores could do; as items are done,
                      buffer_size 16; _unordered: the same with 256; _ordered: in input order, 256
   niced_stall_us     a trainer with a core of its own takes an item every millisecond; the workers,
                      nice 19, share the other core with a loop that never ends, so that they are
                      stopped in the middle of what they do: the longest call of next
   io_*               a stage that sleeps 10 ms and then computes 0.2 ms, batches of 32, steps of
                      5 ms that compute: items a second. The first third of a run, in which ours
                      starts threads, is not timed
   io_default         nothing written but SPDL_ALL, against 64 and 64 (.concurrency and .workers)
   io_one_number      .concurrency = 64 alone, against 64 and 64
   io_best            64 and 64, against the pool by hand and oneTBB with 64 threads
   io_computes        a stage of 100 us that does not sleep, no steps: nothing written but SPDL_ALL,
                      against workers = cores
   vs_spdl_noop3      pull3_ordered against SPDL of PyPI, with the same workers and concurrency
   vs_torch_noop      the same against a DataLoader of PyTorch with as many worker processes
   inline_ns          three stages with SPDL_INLINE: per item and call (a source and three stages)
   startup_us         three stages: from create to the first item
   rewind_us          three stages, after five items: from the call of rewind to the first item
   stop_idle_ms       three stages with every edge full: stop and destroy
   stop_busy_ms       the same while calls of one stage sleep 2 ms
   idle_cpu_pct       three stages with every edge full and nobody taking: CPU, in percent of a core
   idle_cpu_pct_starved  the source waits on a condition variable, the trainer in next
   allocs_steady      allocations while 100,000 items pass
   bytes_per_item     three stages: memory of a buffer_size of 4096 less that of one of 256, for
                      each item that fits in addition
   tokens_us          a source that writes windows of 1,024 tokens, as inputs and targets of int32,
                      into batches in place: per batch of 32, with one worker, against a thread
                      that fills 8 blocks in turn
   tokens_batch_us    SPDL_INDEX, SPDL_BATCH(32) and a stage that reads the windows of a batch from
                      a file of uint16, as examples/tokens.c does: per batch, with one worker,
                      against the same thread and blocks
   pool_submit_ns     the pool alone: a job that does nothing

   Work is a loop that was timed before each run, not a wait for the clock: a thread that does not
   run does not get its work done. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define SPDL_IMPLEMENTATION
#include "../spdl.h"

#include "../examples/tokens.h"
#include "peer_python.h"
#include "pipe_sides.h"

#include <dlfcn.h>
#include <sched.h>
#include <semaphore.h>
#include <sys/resource.h>
#include <sys/wait.h>

#define MAX_WORKERS 64 /* a peer has a thread for each call of three stages */
#define MAX_PEERS 16
#define MAX_VIEWS 4
#define RUN_MS 80.0
#define SLOW_RUN_MS 200.0
#define REPEATS 15 /* of a short measurement in one round */

/* Processors this process may use. */
static int cores(void) {
    cpu_set_t may;
    if (sched_getaffinity(0, sizeof may, &may) != 0) return bench_cores();
    return CPU_COUNT(&may);
}

/* Of every pipeline and peer, where the row does not say how many. */
static int all_workers(void) {
    const int n = cores();
    return n < 2 ? 2 : n > MAX_WORKERS ? MAX_WORKERS : n;
}

static void head_print(void) {
    if (bench_opt.list) return;
    fprintf(bench_opt.json ? stderr : stdout, "workers: %d; processors this process may use: %d\n",
            all_workers(), cores());
}

/* ---- the peers of other packages ---- */

typedef struct package {
    const char *file;
    const char *what;
    const char *debian;
} package;

static const package packages[] = {
    { "pipe_tbb.so", "oneTBB", "libtbb-dev" },
    { "pipe_glib.so", "GLib thread pool", "libglib2.0-dev pkg-config" },
    { "pipe_omp.so", "OpenMP tasks", "g++" },
    { "pipe_jpeg.so", "the rows of JPEG", "libjpeg62-turbo-dev" },
};

#define PACKAGE_COUNT ((int)(sizeof packages / sizeof packages[0]))

static const pipe_peer *peers[MAX_PEERS];
static int peer_count;

static void peers_add(const pipe_peer *table, int count) {
    BENCH_CHECK(peer_count + count <= MAX_PEERS);
    while (count-- > 0) peers[peer_count++] = table++;
}

/* What `symbol` of the library is, or false when there is no such library. */
static bool plugin_find(const char *folder, const char *file, const char *symbol, void *fn) {
    char path[1100];
    void *library;
    void *found;
    snprintf(path, sizeof path, "%s/%s", folder, file);
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    found = library != NULL ? dlsym(library, symbol) : NULL;
    if (found != NULL) memcpy(fn, &found, sizeof found); /* C has no cast from an object to that */
    return found != NULL;
}

static bool plugin_load(const char *folder, const char *file) {
    const pipe_peer *table = NULL;
    pipe_plugin_fn plugin;
    pipe_jpeg_fn jpeg;
    unsigned i;
    if (plugin_find(folder, file, "pipe_plugin", &plugin)) {
        peers_add(table, plugin(&table));
        return true;
    }
    if (!plugin_find(folder, file, "pipe_jpeg_plugin", &jpeg)) return false;
    jpeg_calls = jpeg();
    for (i = 0; i < TABLE; ++i) {
        jpeg_calls->make(i, PIPE_JPEG_SIDE, PIPE_JPEG_SIDE, &jpegs[i]);
    }
    return true;
}

static void peers_load(const char *program) {
    FILE *to = bench_opt.json ? stderr : stdout;
    const char *slash = strrchr(program, '/');
    char missing[256] = "";
    char debian[256] = "";
    char folder[1024];
    int i;
    snprintf(folder, sizeof folder, "%.*s/peers", slash != NULL ? (int)(slash - program) : 1,
             slash != NULL ? program : ".");
    peers_add(by_hand, (int)(sizeof by_hand / sizeof by_hand[0]));
    for (i = 0; i < PACKAGE_COUNT; ++i) {
        if (plugin_load(folder, packages[i].file)) continue;
        strncat(missing, packages[i].what, 60);
        strncat(missing, ", ", 3);
        strncat(debian, " ", 2);
        strncat(debian, packages[i].debian, 60);
    }
    if (missing[0] == '\0' || bench_opt.list) return;
    fprintf(to, "missing: %sto get them: apt-get install%s (else see %s/*.log)\n", missing, debian,
            folder);
}

/* ---- one run ---- */

typedef struct outcome {
    double ns;       /* per item, or what is measured when that is one number */
    double whole_ns; /* the same from the start, not from the first item: by then others are done */
    double cpu_ns;
    double p50_us;   /* of FEED_SPARSE: latency */
    double p99_us;   /* of a step of the trainer */
    double peak_kib; /* that the run added */
} outcome;

static const outcome nothing = { 0, 0, 0, 0, 0, 0 };

typedef outcome (*measure_fn)(const pipe_peer *peer, const shape *is);

/* In a process of its own: with it goes what a side leaves behind, threads that spin and memory. */
static outcome measure(measure_fn fn, const pipe_peer *peer, const shape *is) {
    outcome got;
    int ends[2];
    pid_t child;
    ssize_t bytes;
    bench_now_with(peer->name);
    fflush(NULL);
    BENCH_CHECK(pipe(ends) == 0);
    child = fork();
    BENCH_CHECK(child >= 0);
    if (child == 0) {
        alarm(BENCH_HANG_SECONDS - 5);
        got = fn(peer, is);
        _exit(write(ends[1], &got, sizeof got) == (ssize_t)sizeof got ? 0 : 1);
    }
    close(ends[1]);
    bytes = read(ends[0], &got, sizeof got);
    close(ends[0]);
    waitpid(child, NULL, 0);
    if (bytes != (ssize_t)sizeof got) bench_fail("%s came to no result", peer->name);
    return got;
}

static double memory_kib(const char *what) {
    char line[256];
    double kib = 0;
    FILE *file = fopen("/proc/self/status", "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (strncmp(line, what, strlen(what)) == 0) kib = atof(line + strlen(what));
    }
    if (file != NULL) fclose(file);
    return kib;
}

/* What came out is what went in, and in order where that was asked for. */
static void flow_check(const flow *f) {
    const uint64_t items = f->is.items;
    const uint64_t rest = items % SLOTS;
    uint64_t expected = items / SLOTS * (SLOTS * (uint64_t)(SLOTS - 1) / 2);
    if (rest > 0) expected += rest * (rest - 1) / 2;
    BENCH_CHECK(f->out.count == items);
    BENCH_CHECK(f->out.sum == expected);
    BENCH_CHECK(!f->out.disorder || f->is.unordered);
}

static void trainer_takes_batch(flow *f, spdl_batch *batch) {
    size_t i;
    for (i = 0; i < batch->count; ++i) tally_item(f, batch->items[i]);
    spdl_batch_free(batch);
}

static void drain(flow *f, const pipe_peer *peer, void *line) {
    void *item;
    while (line_next(peer, line, &item)) {
        if (peer == &ours && f->is.batch > 0) {
            trainer_takes_batch(f, (spdl_batch *)item);
        } else {
            tally_item(f, item);
        }
    }
}

static outcome flow_outcome(flow *f, uint64_t start, double cpu_ns) {
    const double items = (double)f->is.items;
    outcome got = nothing;
    got.ns = (double)(f->out.last_ns - f->out.first_ns) / items;
    got.whole_ns = (double)(f->out.last_ns - start) / items;
    got.cpu_ns = cpu_ns / items;
    if (f->out.times == NULL || f->is.items < 2) return got;
    got.p50_us = bench_quantile(f->out.times + 1, f->is.items - 1, 0.5);
    return got;
}

static outcome run_flow(const pipe_peer *peer, const shape *is) {
    const double rss = is->work == WORK_JPEG ? memory_kib("VmRSS:") : 0;
    uint64_t start;
    outcome got;
    double cpu;
    flow f;
    void *line;
    flow_open(&f, is);
    if (is->feed == FEED_SPARSE) f.out.times = (double *)peer_alloc(is->items * sizeof(double));
    cpu = bench_cpu_ns();
    start = bench_ns();
    line = line_open(peer, &f.spec);
    if (is->pulled) {
        drain(&f, peer, line);
    } else {
        line_wait(peer, line);
    }
    cpu = bench_cpu_ns() - cpu;
    line_close(peer, line);
    flow_check(&f);
    got = flow_outcome(&f, start, cpu);
    if (rss > 0) got.peak_kib = memory_kib("VmHWM:") - rss;
    free(f.out.times);
    flow_close(&f);
    return got;
}

/* ---- rows ---- */

typedef struct view {
    bench_row row;
    double (*value)(const outcome *got, const shape *is);
    const char *against[2]; /* only peers with one of these in their name; none: all */
} view;

typedef struct side {
    const pipe_peer *peer;
    shape is;
    double trial; /* ns per item */
    bool behind;  /* far: takes part in the first round only */
    int rounds;
    outcome got[BENCH_MAX_ROUNDS];
} side;

static double as_is(const outcome *got, const shape *is) {
    (void)is;
    return got->ns;
}

static double as_us(const outcome *got, const shape *is) { return as_is(got, is) / 1e3; }
static double as_ms(const outcome *got, const shape *is) { return as_is(got, is) / 1e6; }
static double as_rate(const outcome *got, const shape *is) { return 1e9 / as_is(got, is); }

static double as_cpu_ns(const outcome *got, const shape *is) {
    (void)is;
    return got->cpu_ns;
}

static double as_cpu_us(const outcome *got, const shape *is) { return as_cpu_ns(got, is) / 1e3; }

static double as_p50(const outcome *got, const shape *is) {
    (void)is;
    return got->p50_us;
}

static double as_p99(const outcome *got, const shape *is) {
    (void)is;
    return got->p99_us;
}

static double as_peak(const outcome *got, const shape *is) {
    (void)is;
    return got->peak_kib;
}

/* Percent of the cores a stage with this concurrency can use. */
static double as_share(const outcome *got, const shape *is) {
    const int usable = cores() < is->concurrency ? cores() : is->concurrency;
    return 100.0 * is->work_us * 1e3 / (got->whole_ns * usable);
}

static double side_quantile(const side *s, const view *v, double q) {
    double values[BENCH_MAX_ROUNDS];
    int i;
    for (i = 0; i < s->rounds; ++i) values[i] = v->value(&s->got[i], &s->is);
    return bench_quantile(values, (size_t)s->rounds, q);
}

static double side_value(const side *s, const view *v) { return side_quantile(s, v, 0.5); }

/* So that work that is spread has the mean it should have. */
static uint64_t whole_tables(const shape *is, uint64_t items) {
    const uint64_t table = is->work == WORK_TAIL ? SLOTS : TABLE;
    return (items + table - 1) / table * table;
}

/* How many items a run needs to take run_ms. */
static void side_calibrate(side *s, double run_ms) {
    const double target = run_ms * 1e6 * (bench_opt.quick ? 0.5 : 1.0);
    s->is.items = 512;
    for (;;) {
        const double items = (double)s->is.items;
        s->trial = measure(run_flow, s->peer, &s->is).whole_ns;
        if (s->trial * items >= target / 8) break;
        s->is.items *= 4;
    }
    s->is.items = (uint64_t)(target / s->trial);
    s->is.items = whole_tables(&s->is, s->is.items < 512 ? 512 : s->is.items);
}

static void side_open(side *s, const pipe_peer *peer, const shape *is, double run_ms) {
    memset(s, 0, sizeof *s);
    s->peer = peer;
    s->is = *is;
    if (run_ms > 0) side_calibrate(s, run_ms);
}

static bool is_rival(const view *v, const pipe_peer *peer) {
    int i;
    if (peer == &bare) return false;
    for (i = 0; i < 2 && v->against[i] != NULL; ++i) {
        if (strstr(peer->name, v->against[i]) != NULL) return true;
    }
    return v->against[0] == NULL;
}

static bool is_rival_of_any(const view *views, int count, const pipe_peer *peer) {
    while (count-- > 0) {
        if (is_rival(&views[count], peer)) return true;
    }
    return false;
}

/* Ours is the first, then come the peers of the views, then perhaps what there is without a
   pipeline. Without a run_ms the shape says how many items a run has. */
static int sides_open(side *sides, const view *views, int view_count, const shape *is,
                      double run_ms) {
    double best = 0;
    int count = 1;
    int i;
    side_open(&sides[0], &ours, is, run_ms);
    for (i = 0; i < peer_count; ++i) {
        if (!is_rival_of_any(views, view_count, peers[i])) continue;
        side_open(&sides[count], peers[i], is, run_ms);
        if (count == 1 || sides[count].trial < best) best = sides[count].trial;
        ++count;
    }
    for (i = 1; i < count; ++i) sides[i].behind = !bench_opt.all && sides[i].trial > 3 * best;
    if (bare_can(is)) side_open(&sides[count++], &bare, is, run_ms);
    return count;
}

static void sides_run(side *sides, int count, measure_fn fn, int rounds) {
    int round;
    int i;
    for (round = 0; round < rounds; ++round) {
        for (i = 0; i < count; ++i) {
            side *s = &sides[(i + round) % count];
            if (s->behind && round > 0) continue;
            s->got[s->rounds++] = measure(fn, s->peer, &s->is);
        }
    }
}

static bool is_better(const bench_row *row, double a, double b) {
    return row->more_is_better ? a > b : a < b;
}

static const side *best_rival(const view *v, const side *sides, int count) {
    const side *best = NULL;
    int i;
    for (i = 1; i < count; ++i) {
        if (!is_rival(v, sides[i].peer)) continue;
        if (best != NULL && !is_better(&v->row, side_value(&sides[i], v), side_value(best, v))) {
            continue;
        }
        best = &sides[i];
    }
    return best;
}

/* Our rounds from the lowest to the highest, and each of the peers: as a line of the table and as
   members of the object. */
static void peers_text(const view *v, const side *sides, int count, char *more, char *json,
                       size_t bytes) {
    const double low = side_quantile(&sides[0], v, 0);
    const double high = side_quantile(&sides[0], v, 1);
    char number[32];
    char upper[32];
    int i;
    snprintf(more, bytes, "    %s to %s;", bench_number(number, sizeof number, low),
             bench_number(upper, sizeof upper, high));
    snprintf(json, bytes, ",\"low\":%.6g,\"high\":%.6g,\"peers\":{", low, high);
    for (i = 1; i < count; ++i) {
        const char *name = sides[i].peer->name;
        const double value = side_value(&sides[i], v);
        const bool last = i + 1 == count;
        size_t at = strlen(more);
        snprintf(more + at, bytes - at, " %s %s%s", name,
                 bench_number(number, sizeof number, value), last ? "\n" : ",");
        at = strlen(json);
        snprintf(json + at, bytes - at, "\"%s\":%.6g%s", name, value, last ? "}" : ",");
    }
}

/* What the ratio to the best peer is made of. */
static bench_sides view_rounds(const view *v, const side *sides, int count, const side *best,
                               double values[2][BENCH_MAX_ROUNDS]) {
    bench_sides rounds = { values[0], best != NULL ? values[1] : NULL, sides[0].rounds, 0 };
    int i;
    for (i = 1; i < count; ++i) rounds.peers += is_rival(v, sides[i].peer) && !sides[i].behind;
    if (best != NULL && best->rounds < rounds.rounds) rounds.rounds = 0; /* it fell behind */
    for (i = 0; i < rounds.rounds; ++i) {
        values[0][i] = v->value(&sides[0].got[i], &sides[0].is);
        if (best != NULL) values[1][i] = v->value(&best->got[i], &best->is);
    }
    return rounds;
}

static void view_print(const view *v, const side *sides, int count) {
    const side *best = best_rival(v, sides, count);
    const side *last = &sides[count - 1];
    const double value = side_value(&sides[0], v);
    bench_row row = v->row;
    bench_note note = { NULL, NULL, NULL };
    char text[32];
    char more[1024];
    char json[1024];
    double values[2][BENCH_MAX_ROUNDS];
    const bench_sides rounds = view_rounds(v, sides, count, best, values);
    peers_text(v, sides, count, more, json, sizeof more);
    row.peer_name = best != NULL ? best->peer->name : NULL;
    if (best == NULL) row.goal_ratio = 0; /* to what? */
    note.more = more;
    note.json = json;
    if (last->peer == &bare) {
        snprintf(text, sizeof text, "%.3f of (none)",
                 bench_ratio(&row, value, side_value(last, v)));
        note.text = text;
    }
    bench_print_noted(&row, value, best != NULL ? side_value(best, v) : 0, &rounds, &note);
}

/* Whether any of the views is wanted, and which. */
static bool views_wanted(const view *views, int count, bool *wanted) {
    bool any = false;
    int i;
    for (i = 0; i < count; ++i) {
        wanted[i] = bench_wanted(views[i].row.name);
        any = any || wanted[i];
    }
    return any;
}

/* Runs all sides, once for all the views. */
static void rows_run(const view *views, int view_count, const shape *is, measure_fn fn, int rounds,
                     double run_ms) {
    static side sides[MAX_PEERS + 2];
    bool wanted[MAX_VIEWS];
    int count;
    int i;
    if (!views_wanted(views, view_count, wanted)) return;
    count = sides_open(sides, views, view_count, is, run_ms);
    sides_run(sides, count, fn, bench_rounds(rounds));
    for (i = 0; i < view_count; ++i) {
        if (wanted[i]) view_print(&views[i], sides, count);
    }
}

/* ---- one side alone ---- */

static void row_alone(const bench_row *row, int rounds, const shape *is, measure_fn fn) {
    const view v = { *row, as_is, { NULL } };
    double values[2][BENCH_MAX_ROUNDS];
    bench_sides alone;
    side s;
    if (!bench_wanted(row->name)) return;
    side_open(&s, &ours, is, 0);
    sides_run(&s, 1, fn, bench_rounds(rounds));
    alone = view_rounds(&v, &s, 1, NULL, values);
    bench_print_sides(row, &alone, NULL);
}

#define COUNT(views) ((int)(sizeof(views) / sizeof(views)[0]))

/* ---- the flow of items ---- */

/* Whether rows are those of next_*, and their names. */
static bool next_works;

static const char *row_name(char *buffer, size_t bytes, const char *name) {
    snprintf(buffer, bytes, "%s%s", next_works ? "next_" : "", name);
    return buffer;
}

static shape to_sink(int pipes, int buffer_size, bool unordered) {
    shape is;
    memset(&is, 0, sizeof is);
    is.pipes = pipes;
    is.workers = all_workers();
    is.concurrency = is.workers;
    is.buffer_size = buffer_size;
    is.unordered = unordered;
    is.next_works = next_works;
    return is;
}

static shape to_trainer(int pipes, int buffer_size, bool unordered) {
    shape is = to_sink(pipes, buffer_size, unordered);
    is.pulled = true;
    return is;
}

/* ---- a trainer who works ---- */

/* Until the process rests, that is, until the pipeline is full. */
static void wait_full(double call_us) {
    const double slice = (call_us < 1000 ? 1000 : call_us) * 1e3;
    double cpu;
    do {
        cpu = bench_cpu_ns();
        bench_sleep_until(bench_ns() + (uint64_t)slice);
    } while (bench_cpu_ns() - cpu > slice / 20);
}

static void trainer_takes(flow *f, const pipe_peer *peer, void *line) {
    void *item;
    BENCH_CHECK(line_next(peer, line, &item));
    tally_item(f, item);
}

/* A step: from one item to the next. */
static void trainer_works(flow *f, const pipe_peer *peer, void *line, double *steps) {
    uint64_t before = bench_ns();
    uint64_t i;
    for (i = 0; i < f->is.steps; ++i) {
        const uint64_t from = before;
        trainer_takes(f, peer, line);
        work_turns(f->trainer_turns);
        before = bench_ns();
        steps[i] = (double)(before - from) / 1e3;
    }
}

/* Begins with three quarters of a full buffer: who waits until half of it can be made anew then
   does so as often as he does in the long run, even if there are few steps. How often a side has
   called still differs, so CPU is told for one step and one call. */
static outcome run_user(const pipe_peer *peer, const shape *is) {
    const double step_us = is->trainer_us + is->work_us;
    outcome got = nothing;
    double *steps = (double *)peer_alloc(is->steps * sizeof *steps);
    double cpu, done_us;
    uint64_t calls, i;
    void *line;
    flow f;
    flow_open(&f, is);
    line = line_open(peer, &f.spec);
    trainer_takes(&f, peer, line);
    if (peer != &bare) wait_full(is->work_us);
    cpu = bench_cpu_ns();
    calls = __atomic_load_n(&f.calls, __ATOMIC_RELAXED);
    for (i = 0; i < (uint64_t)is->live / 4; ++i) trainer_takes(&f, peer, line);
    trainer_works(&f, peer, line, steps);
    line_close(peer, line);
    BENCH_CHECK(!f.out.disorder);
    calls = __atomic_load_n(&f.calls, __ATOMIC_RELAXED) - calls;
    done_us = (double)is->steps * is->trainer_us + (double)calls * is->work_us;
    got.cpu_ns = (bench_cpu_ns() - cpu) * step_us / done_us;
    for (i = 0; i < is->steps; ++i) got.ns += steps[i] * 1e3 / (double)is->steps;
    got.p99_us = bench_quantile(steps, is->steps, 0.99);
    flow_close(&f);
    free(steps);
    return got;
}

/* Of a run: 0.6 s, and at least those in which the whole buffer is made anew. */
static uint64_t user_steps(double step_us, int buffer_size) {
    const uint64_t buffer = (uint64_t)buffer_size + 2;
    const uint64_t steps = (uint64_t)(6e5 / step_us);
    return steps < buffer ? buffer : steps;
}

/* Everybody has buffer_size finished items and two calls, whatever his own bounds are. */
static void rows_user(const char *step, double step_us, int buffer_size) {
    static const char *const ends[] = { "step", "p99", "cpu" };
    char names[3][64];
    const view views[] = {
        { { names[0], "us", "", false, 0, false, 1 / 1.02 },
          as_us,
          { "condvar", "oneTBB pipeline" } },
        { { names[1], "us", "", false, 0, false, 0 }, as_p99, { "condvar", "oneTBB pipeline" } },
        { { names[2], "us", "", false, 0, false, 1 / 1.03 },
          as_cpu_us,
          { "condvar", "oneTBB pipeline" } },
    };
    shape is = to_trainer(1, buffer_size, false);
    int i;
    for (i = 0; i < COUNT(views); ++i) {
        snprintf(names[i], sizeof names[i], "%suser_%s_b%d_%s", next_works ? "next_" : "", step,
                 buffer_size, ends[i]);
    }
    is.concurrency = 2;
    is.live = buffer_size + is.concurrency;
    is.work = WORK_STEP;
    is.work_us = 0.6 * step_us;
    is.trainer_us = step_us;
    is.items = FOREVER;
    is.steps = user_steps(step_us, buffer_size) / (bench_opt.quick ? 2 : 1);
    rows_run(views, COUNT(views), &is, run_user, 8, 0);
}

static void rows_users(void) {
    static const struct {
        const char *name;
        double us;
    } steps[] = { { "100us", 100 }, { "1ms", 1e3 }, { "10ms", 1e4 }, { "100ms", 1e5 } };
    int i;
    for (i = 0; i < COUNT(steps); ++i) {
        rows_user(steps[i].name, steps[i].us, 3);
        rows_user(steps[i].name, steps[i].us, 16);
    }
}

/* ---- the flow of items ---- */

static void row_noop(const char *name, shape is, double goal_ratio) {
    char buffer[64];
    const view v = {
        { row_name(buffer, sizeof buffer, name), "ns", "", false, 0, false, goal_ratio },
        as_is,
        { NULL }
    };
    rows_run(&v, 1, &is, run_flow, 9, RUN_MS);
}

static void rows_noop(void) {
    const view ordered[] = {
        { { "noop3_ordered", "ns", "", false, 0, false, 0 }, as_is, { NULL } },
        { { "noop3_ordered_vs_tbb", "ns", "", false, 0, false, 1.4 }, as_is, { "oneTBB" } },
        { { "noop3_cpu_ns", "ns", "", false, 0, false, 0 }, as_cpu_ns, { NULL } },
    };
    const view unordered[] = {
        { { "noop3_unordered", "ns", "", false, 0, false, 0 }, as_is, { NULL } },
        { { "noop3_unordered_vs_tbb", "ns", "", false, 0, false, 1.4 }, as_is, { "oneTBB" } },
    };
    shape is = to_sink(3, 16, false);
    rows_run(ordered, COUNT(ordered), &is, run_flow, 9, RUN_MS);
    is.unordered = true;
    rows_run(unordered, COUNT(unordered), &is, run_flow, 9, RUN_MS);
    row_noop("noop3_16live", to_sink(3, 4, false), 0);
}

static void rows_pull(void) {
    row_noop("pull", to_trainer(1, 16, false), 10);
    row_noop("pull3_ordered", to_trainer(3, 16, false), 0);
    row_noop("pull3_unordered", to_trainer(3, 16, true), 0);
}

/* A place for each worker's call, and for what it did before. */
static int work_buffer(int workers) { return workers > 16 ? workers : 16; }

static void row_work(const char *name, double work_us, work_kind work, bool unordered,
                     double goal_ratio) {
    char buffer[64];
    const view v = {
        { row_name(buffer, sizeof buffer, name), "%", "", true, 0, false, goal_ratio },
        as_share,
        { NULL }
    };
    shape is = to_sink(1, work_buffer(all_workers()), unordered);
    is.work = work;
    is.work_us = work_us;
    rows_run(&v, 1, &is, run_flow, 8, SLOW_RUN_MS);
}

static void rows_work(void) {
    row_work("work1us", 1, WORK_EVEN, false, 0);
    row_work("work10us", 10, WORK_EVEN, false, 0.98);
    row_work("work100us", 100, WORK_EVEN, false, 0.99);
    row_work("skew20us_ordered", 20, WORK_SKEWED, false, 0.98);
    row_work("skew20us_unordered", 20, WORK_SKEWED, true, 0.98);
}

static void row_scale(double work_us, int workers) {
    char name[64];
    const view v = { { name, "%", "", true, 0, false, 0 }, as_share, { NULL } };
    shape is = to_sink(1, work_buffer(workers), false);
    snprintf(name, sizeof name, "scale_%gus_%dw", work_us, workers);
    is.work = WORK_EVEN;
    is.work_us = work_us;
    is.workers = workers;
    is.concurrency = workers;
    rows_run(&v, 1, &is, run_flow, 8, SLOW_RUN_MS);
}

static void rows_scale(void) {
    double work_us;
    int workers;
    for (work_us = 1; work_us <= 1000; work_us *= 10) {
        for (workers = 1; workers <= all_workers(); workers *= 2) row_scale(work_us, workers);
    }
}

/* What is wanted is a share of the samples' mean cost, however they are spread. A place for the
   order between the two: add a line. */
static void rows_tail(void) {
    static const struct {
        const char *name;
        bool unordered;
        int buffer_size;
    } orders[] = {
        { "tail_1pct_50x", true, 16 },
        { "tail_1pct_50x_unordered", true, 256 },
        { "tail_1pct_50x_ordered", false, 256 },
    };
    int i;
    for (i = 0; i < COUNT(orders); ++i) {
        char buffer[64];
        const view v = { { row_name(buffer, sizeof buffer, orders[i].name), "%", "", true, 0, false,
                           0 },
                         as_share,
                         { NULL } };
        shape is = to_trainer(1, orders[i].buffer_size, orders[i].unordered);
        is.work = WORK_TAIL;
        is.work_us = 100;
        is.batch = 32;
        rows_run(&v, 1, &is, run_flow, 8, SLOW_RUN_MS);
    }
}

static void rows_sparse(void) {
    const view to_the_sink[] = {
        { { "sparse_p50_us", "us", "", false, 0, false, 0 }, as_p50, { NULL } },
        { { "sparse_cpu_us", "us", "", false, 0, false, 1 / 1.3 }, as_cpu_us, { NULL } },
    };
    const view to_the_trainer[] = {
        { { "sparse_pull_p50_us", "us", "", false, 0, false, 0 }, as_p50, { NULL } },
        { { "sparse_pull_cpu_us", "us", "", false, 0, false, 1 / 1.3 }, as_cpu_us, { NULL } },
    };
    shape is = to_sink(3, 16, false);
    is.feed = FEED_SPARSE;
    is.feed_us = 300;
    is.items = bench_opt.quick ? 300 : 800;
    rows_run(to_the_sink, COUNT(to_the_sink), &is, run_flow, 8, 0);
    is.pulled = true;
    rows_run(to_the_trainer, COUNT(to_the_trainer), &is, run_flow, 8, 0);
}

/* Who has the item from the source must not keep the source waiting. */
static void row_convoy(const char *name, int workers) {
    const view v = { { name, "item/s", "", true, 0, false, 0 }, as_rate, { "condvar pool" } };
    shape is = to_sink(1, 16, false);
    is.workers = workers;
    is.concurrency = workers - 1;
    is.feed = FEED_SPARSE;
    is.feed_us = 2000;
    is.work = WORK_EVEN;
    is.work_us = 1900;
    is.items = bench_opt.quick ? 100 : 250;
    rows_run(&v, 1, &is, run_flow, 8, 0);
}

static void rows_convoy(void) {
    row_convoy("convoy_2w", 2);
    row_convoy("convoy_3w", 3);
    row_convoy("convoy_6w", 6);
}

static void rows_jpeg(void) {
    char names[3][64];
    const view views[] = {
        { { row_name(names[0], sizeof names[0], "jpeg_rate"), "img/s", "", true, 0, false, 1 },
          as_rate,
          { "oneTBB", "condvar" } },
        { { row_name(names[1], sizeof names[1], "jpeg_cpu"), "us", "", false, 0, false, 1 },
          as_cpu_us,
          { "oneTBB", "condvar" } },
        { { row_name(names[2], sizeof names[2], "jpeg_mem"), "KiB", "", false, 0, false, 0 },
          as_peak,
          { "condvar pool" } },
    };
    shape is = to_sink(1, work_buffer(all_workers()), false);
    is.work = WORK_JPEG;
    if (jpeg_calls != NULL) rows_run(views, COUNT(views), &is, run_flow, 8, SLOW_RUN_MS * 2);
}

/* ---- beside other programs ---- */

static void row_beside(const char *name, const shape *is) {
    const view v = { { name, "us", "", false, 0, false, 1 },
                     as_us,
                     { "condvar pool", "oneTBB pipeline" } };
    rows_run(&v, 1, is, run_flow, 8, 0);
}

/* Beside one busy loop on each processor, or calm. */
static void rows_beside(bool crowded) {
    static const struct {
        const char *name;
        int workers;
        feed_kind feed;
        work_kind work;
        double us;
        uint64_t items;
    } cases[] = { { "work", 2, FEED_WORK, WORK_EVEN, 12, 3000 },
                  { "nap", 2, FEED_SPARSE, WORK_NAP, 300, 400 },
                  { "one", 1, FEED_WORK, WORK_NONE, 12, 1500 } };
    bench_crowd crowd = { { 0 }, 0 };
    char name[64];
    int i;
    for (i = 0; i < COUNT(cases); ++i) {
        shape is = to_trainer(1, 3, false);
        snprintf(name, sizeof name, "%s_%s", crowded ? "crowd" : "calm", cases[i].name);
        is.workers = cases[i].workers;
        is.concurrency = is.workers;
        is.feed = cases[i].feed;
        is.feed_us = cases[i].us;
        is.work = cases[i].work;
        is.work_us = is.work == WORK_NONE ? 0 : cases[i].us;
        is.items = cases[i].items / (bench_opt.quick ? 2 : 1);
        if (crowded) bench_crowd_come(&crowd, name);
        row_beside(name, &is);
        bench_crowd_go(&crowd);
    }
}

/* ---- calls that sleep ---- */

enum { IO_BATCH = 32, IO_CALLS = 64 };

/* What is written: ours, by io_open. */
static const pipe_peer io_nothing = { "nothing", NULL, NULL, NULL, NULL, NULL };
static const pipe_peer io_one = { "one number", NULL, NULL, NULL, NULL, NULL };
static const pipe_peer io_both = { "64 and 64", NULL, NULL, NULL, NULL, NULL };
static const pipe_peer io_cores = { "workers = cores", NULL, NULL, NULL, NULL, NULL };

static void *io_open(const pipe_peer *what, flow *f) {
    spdl_stage pipe = SPDL_PIPE(work, .ctx = f, .concurrency = SPDL_ALL);
    spdl_pipeline_desc desc = { .workers = 0 };
    spdl_pipeline *p;
    if (what == &io_one || what == &io_both) pipe.concurrency = IO_CALLS;
    if (what == &io_both) desc.workers = IO_CALLS;
    if (what == &io_cores) desc.workers = all_workers();
    BENCH_CHECK(spdl_pipeline_create(&p, &desc,
                                     SPDL_STAGES(SPDL_SOURCE(feed, .ctx = f), pipe,
                                                 SPDL_BATCH(IO_BATCH), SPDL_SINK(3))) == SPDL_OK);
    return p;
}

static outcome run_io(const pipe_peer *peer, const shape *is) {
    const bool theirs = peer->run != NULL;
    const uint64_t batches = is->items / IO_BATCH, from = batches / 3;
    outcome got = nothing;
    uint64_t start = 0, i, k;
    void *line, *item;
    flow f;
    flow_open(&f, is);
    line = theirs ? line_open(peer, &f.spec) : io_open(peer, &f);
    for (i = 0; i < batches; ++i) {
        for (k = 0; theirs && k < IO_BATCH; ++k) trainer_takes(&f, peer, line);
        if (!theirs) {
            BENCH_CHECK(ours_next(line, &item));
            trainer_takes_batch(&f, (spdl_batch *)item);
        }
        if (i == from) start = bench_ns();
        work_turns(f.trainer_turns);
    }
    got.ns = (double)(bench_ns() - start) / (double)((batches - from) * IO_BATCH);
    if (theirs) line_close(peer, line);
    else ours_close(line);
    flow_check(&f);
    flow_close(&f);
    return got;
}

/* `rival` NULL: the peers. */
static void row_io(const char *name, const pipe_peer *us, const pipe_peer *rival, const shape *is,
                   double goal_ratio) {
    const view v = { { name, "item/s", "", true, 0, false, goal_ratio },
                     as_rate,
                     { rival != NULL ? rival->name : "condvar pool", "oneTBB pipeline" } };
    static side sides[MAX_PEERS + 1];
    int count = 0, i;
    if (!bench_wanted(name)) return;
    side_open(&sides[count++], us, is, 0);
    if (rival != NULL) side_open(&sides[count++], rival, is, 0);
    for (i = 0; rival == NULL && i < peer_count; ++i)
        if (is_rival(&v, peers[i])) side_open(&sides[count++], peers[i], is, 0);
    sides_run(sides, count, run_io, bench_rounds(8));
    view_print(&v, sides, count);
}

static void rows_io(void) {
    shape is = to_trainer(1, IO_CALLS, false);
    is.workers = IO_CALLS;
    is.concurrency = IO_CALLS;
    is.live = 4 * IO_CALLS;
    is.work = WORK_IO;
    is.work_us = 200;
    is.trainer_us = 5000;
    is.items = bench_opt.quick ? 4096 : 8192;
    row_io("io_default", &io_nothing, &io_both, &is, 0.9);
    row_io("io_one_number", &io_one, &io_both, &is, 0.97);
    row_io("io_best", &io_both, NULL, &is, 0);
    is.work = WORK_EVEN;
    is.work_us = 100;
    is.trainer_us = 0;
    row_io("io_computes", &io_nothing, &io_cores, &is, 0.98);
}

/* ---- two pipelines ---- */

/* The sides: names alone, run_turns does what they say. */
static const pipe_peer one_pool = { "one pool", NULL, NULL, NULL, NULL, NULL };
static const pipe_peer own_pools = { "a pool each", NULL, NULL, NULL, NULL, NULL };
static const pipe_peer alone = { "alone", NULL, NULL, NULL, NULL, NULL };

static double as_slow_rate(const outcome *got, const shape *is) {
    (void)is;
    return 1e9 / got->whole_ns;
}

/* Opens `count` flows and tells in ns how long each needs for an item. The sinks go on counting. */
static void turns_time(const shape *shapes, int count, spdl_pool *pool, double *ns) {
    static flow flows[2];
    spdl_pipeline *lines[2];
    uint64_t from[2];
    uint64_t start;
    int i;
    for (i = 0; i < count; ++i) flow_open(&flows[i], &shapes[i]);
    for (i = 0; i < count; ++i) flows[i].pool = pool;
    for (i = 0; i < count; ++i) lines[i] = ours_open_with(&flows[i], NULL);
    bench_sleep_ms(50);
    start = bench_ns();
    for (i = 0; i < count; ++i) from[i] = __atomic_load_n(&flows[i].out.count, __ATOMIC_RELAXED);
    bench_sleep_ms(bench_opt.quick ? 200 : 400);
    for (i = 0; i < count; ++i) {
        const uint64_t to = __atomic_load_n(&flows[i].out.count, __ATOMIC_RELAXED);
        BENCH_CHECK(to > from[i]);
        ns[i] = (double)(bench_ns() - start) / (double)(to - from[i]);
    }
    for (i = 0; i < count; ++i) ours_close(lines[i]);
    for (i = 0; i < count; ++i) BENCH_CHECK(!flows[i].out.disorder);
    for (i = 0; i < count; ++i) flow_close(&flows[i]);
}

static outcome run_turns(const pipe_peer *peer, const shape *is) {
    shape shapes[] = { *is, *is };
    outcome got = nothing;
    double ns[2];
    spdl_pool_desc desc;
    spdl_pool *pool = NULL;
    shapes[1].work_us = 1000;
    memset(&desc, 0, sizeof desc);
    desc.workers = is->workers;
    if (peer == &one_pool) BENCH_CHECK(spdl_pool_create(&pool, &desc) == SPDL_OK);
    if (peer == &alone) {
        turns_time(&shapes[0], 1, NULL, &ns[0]);
        turns_time(&shapes[1], 1, NULL, &ns[1]);
    } else {
        turns_time(shapes, 2, pool, ns);
    }
    spdl_pool_destroy(pool);
    got.ns = ns[0];
    got.whole_ns = ns[1];
    return got;
}

static void rows_turns(void) {
    const view views[] = {
        { { "turns_1us", "item/s", "", true, 0, false, 0.45 }, as_rate, { "a pool each" } },
        { { "turns_1ms", "item/s", "", true, 0, false, 0.45 }, as_slow_rate, { "a pool each" } },
    };
    const pipe_peer *const runs[] = { &one_pool, &own_pools, &alone };
    static side sides[COUNT(runs)];
    bool wanted[COUNT(views)];
    shape is = to_sink(1, 16, false);
    int i;
    if (!views_wanted(views, COUNT(views), wanted)) return;
    is.work = WORK_EVEN;
    is.work_us = 1;
    is.items = FOREVER;
    for (i = 0; i < COUNT(runs); ++i) side_open(&sides[i], runs[i], &is, 0);
    sides_run(sides, COUNT(runs), run_turns, bench_rounds(5));
    for (i = 0; i < COUNT(views); ++i) {
        if (wanted[i]) view_print(&views[i], sides, COUNT(runs));
    }
}

static outcome run_inline(const pipe_peer *peer, const shape *is) {
    outcome got = run_flow(peer, is);
    got.ns /= is->pipes + 1;
    return got;
}

static void row_inline(void) {
    const bench_row row = { "inline_ns", "ns", NULL, false, 0, false, 0 };
    shape is = to_trainer(3, 16, false);
    is.workers = 0;
    is.items = bench_opt.quick ? 200000 : 1000000;
    row_alone(&row, 9, &is, run_inline);
}

typedef struct counts {
    uint64_t taken;
    uint64_t given_back;
    uint64_t bytes; /* that are out now */
} counts;

static void *counted_alloc(size_t bytes, size_t align, void *user) {
    const size_t whole = (bytes + align - 1) / align * align;
    __atomic_add_fetch(&((counts *)user)->taken, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&((counts *)user)->bytes, bytes, __ATOMIC_RELAXED);
    return aligned_alloc(align < sizeof(void *) ? sizeof(void *) : align, whole);
}

static void counted_free(void *memory, size_t bytes, void *user) {
    __atomic_add_fetch(&((counts *)user)->given_back, 1, __ATOMIC_RELAXED);
    __atomic_sub_fetch(&((counts *)user)->bytes, bytes, __ATOMIC_RELAXED);
    free(memory);
}

/* The allocations of a run, and in cpu_ns the bytes of the pipeline. */
static outcome run_counted(const pipe_peer *peer, const shape *is) {
    counts n = { 0, 0, 0 };
    const spdl_allocator allocator = { counted_alloc, counted_free, &n };
    outcome got = nothing;
    flow f;
    void *line;
    flow_open(&f, is);
    line = ours_open_with(&f, &allocator);
    got.cpu_ns = (double)__atomic_load_n(&n.bytes, __ATOMIC_RELAXED);
    got.ns = -(double)__atomic_load_n(&n.taken, __ATOMIC_RELAXED);
    BENCH_CHECK(got.ns < 0);
    drain(&f, peer, line);
    got.ns += (double)__atomic_load_n(&n.taken, __ATOMIC_RELAXED);
    line_close(peer, line);
    flow_check(&f);
    flow_close(&f);
    BENCH_CHECK(n.taken == n.given_back && n.bytes == 0);
    return got;
}

static void row_allocs(void) {
    const bench_row row = { "allocs_steady", "calls", NULL, false, 0, true, 0 };
    shape is = to_trainer(3, 16, false);
    is.items = 100000;
    row_alone(&row, 3, &is, run_counted);
}

static void row_bytes(void) {
    const bench_row row = { "bytes_per_item", "bytes", NULL, false, 0, false, 0 };
    shape small = to_trainer(3, 256, false);
    shape large = to_trainer(3, 4096, false);
    double bytes;
    small.items = 1000;
    large.items = 1000;
    if (!bench_wanted(row.name)) return;
    bytes = measure(run_counted, &ours, &large).cpu_ns - measure(run_counted, &ours, &small).cpu_ns;
    bench_print(&row, bytes / ((large.buffer_size - small.buffer_size) * (small.pipes + 1)), 0);
}

/* ---- start, stop ---- */

/* Opens it and takes the first item. */
static void *line_begin(const pipe_peer *peer, flow *f) {
    void *line = line_open(peer, &f->spec);
    void *item;
    BENCH_CHECK(line_next(peer, line, &item) && ((const slot *)item)->index == 0);
    return line;
}

static outcome run_start(const pipe_peer *peer, const shape *is) {
    double took[REPEATS];
    outcome got = nothing;
    flow f;
    int i;
    for (i = 0; i < REPEATS; ++i) {
        uint64_t start;
        void *line;
        flow_open(&f, is);
        start = bench_ns();
        line = line_begin(peer, &f);
        took[i] = (double)(bench_ns() - start);
        line_close(peer, line);
        flow_close(&f);
    }
    got.ns = bench_quantile(took, REPEATS, 0.5);
    return got;
}

/* What a validation loader does every few steps. */
static outcome run_rewind(const pipe_peer *peer, const shape *is) {
    double took[100];
    outcome got = nothing;
    spdl_pipeline *p;
    void *item;
    flow f;
    int i, k;
    (void)peer;
    flow_open(&f, is);
    p = ours_open_with(&f, NULL);
    for (i = 0; i < COUNT(took); ++i) {
        uint64_t start;
        for (k = 0; k < 5; ++k) BENCH_CHECK(spdl_pipeline_next(p, &item, SPDL_FOREVER) == SPDL_OK);
        start = bench_ns();
        BENCH_CHECK(spdl_pipeline_rewind(p, 0, SPDL_FOREVER) == SPDL_OK);
        BENCH_CHECK(spdl_pipeline_next(p, &item, SPDL_FOREVER) == SPDL_OK);
        took[i] = (double)(bench_ns() - start);
        BENCH_CHECK(((const slot *)item)->index == 0);
    }
    spdl_pipeline_destroy(p);
    flow_close(&f);
    got.ns = bench_quantile(took, COUNT(took), 0.5) / 1e3;
    return got;
}

static outcome run_stop(const pipe_peer *peer, const shape *is) {
    double took[REPEATS];
    outcome got = nothing;
    flow f;
    int i;
    for (i = 0; i < REPEATS; ++i) {
        uint64_t start;
        void *line;
        flow_open(&f, is);
        line = line_begin(peer, &f);
        if (is->work == WORK_NONE) bench_sleep_ms(5); /* the edges fill, and everyone sleeps */
        start = bench_ns();
        line_close(peer, line);
        took[i] = (double)(bench_ns() - start);
        flow_close(&f);
    }
    got.ns = bench_quantile(took, REPEATS, 0.5);
    return got;
}

static void rows_start_and_stop(void) {
    const view start = { { "startup_us", "us", "", false, 0, false, 0 }, as_us, { NULL } };
    const bench_row again = { "rewind_us", "us", NULL, false, 20, false, 0 };
    const view idle = { { "stop_idle_ms", "ms", "", false, 1, false, 0 }, as_ms, { NULL } };
    const view busy = { { "stop_busy_ms", "ms", "", false, 3, false, 0 }, as_ms, { NULL } };
    shape is = to_trainer(3, 16, false);
    is.items = FOREVER;
    rows_run(&start, 1, &is, run_start, 9, 0);
    row_alone(&again, 9, &is, run_rewind);
    rows_run(&idle, 1, &is, run_stop, 9, 0);
    is.pipes = 1;
    is.work = WORK_NAP;
    is.work_us = 2000;
    rows_run(&busy, 1, &is, run_stop, 9, 0);
}

/* ---- workers that get little of a core ---- */

typedef struct niced {
    const pipe_peer *peer;
    const pipe_spec *spec;
    void *line;
    bool over;
} niced;

/* The calling thread, and those it makes, on one of the first two cores this process may use. */
static void thread_to_core(int which) {
    cpu_set_t may, one;
    size_t core = 0;
    BENCH_CHECK(sched_getaffinity(0, sizeof may, &may) == 0);
    for (;; ++core) {
        if (CPU_ISSET(core, &may) && which-- == 0) break;
    }
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    BENCH_CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
}

static void *niced_open(void *arg) {
    niced *n = (niced *)arg;
    thread_to_core(0);
    BENCH_CHECK(setpriority(PRIO_PROCESS, 0, 19) == 0); /* of this thread, on Linux */
    n->line = line_open(n->peer, n->spec);
    return NULL;
}

static void *niced_rival(void *arg) {
    thread_to_core(0);
    while (!__atomic_load_n(&((niced *)arg)->over, __ATOMIC_RELAXED)) {
    }
    return NULL;
}

static outcome run_niced(const pipe_peer *peer, const shape *is) {
    const int takes = bench_opt.quick ? 300 : 1500;
    outcome got = nothing;
    pthread_t opener, rival;
    niced n;
    flow f;
    int i;
    flow_open(&f, is);
    memset(&n, 0, sizeof n);
    n.peer = peer;
    n.spec = &f.spec;
    peer_thread(&opener, niced_open, &n);
    pthread_join(opener, NULL);
    peer_thread(&rival, niced_rival, &n);
    thread_to_core(1);
    bench_sleep_ms(300); /* the edges fill */
    for (i = 0; i < takes; ++i) {
        const uint64_t start = bench_ns();
        void *item;
        BENCH_CHECK(line_next(peer, n.line, &item));
        if (i > 0 && (double)(bench_ns() - start) > got.ns) got.ns = (double)(bench_ns() - start);
        bench_sleep_until(bench_ns() + 1000000);
    }
    __atomic_store_n(&n.over, true, __ATOMIC_RELAXED);
    pthread_join(rival, NULL);
    line_close(peer, n.line);
    flow_close(&f);
    return got;
}

static void row_niced(void) {
    const view v = { { "niced_stall_us", "us", "", false, 0, false, 0 }, as_us, { NULL } };
    shape is = to_trainer(1, 512, false);
    is.items = FOREVER;
    if (cores() > 1) rows_run(&v, 1, &is, run_niced, 8, 0);
}

/* ---- idle ---- */

static outcome run_parked(const pipe_peer *peer, const shape *is) {
    outcome got = nothing;
    flow f;
    void *line;
    flow_open(&f, is);
    line = line_begin(peer, &f);
    bench_sleep_ms(50);
    got.ns = 100 * bench_idle_cores();
    line_close(peer, line);
    flow_close(&f);
    return got;
}

typedef struct trainer {
    const pipe_peer *peer;
    void *line;
} trainer;

static void *starved_trainer(void *arg) {
    const trainer *t = (const trainer *)arg;
    void *item;
    return line_next(t->peer, t->line, &item) ? arg : NULL;
}

static outcome run_starved(const pipe_peer *peer, const shape *is) {
    outcome got = nothing;
    trainer t = { peer, NULL };
    pthread_t thread;
    void *item = NULL;
    flow f;
    flow_open(&f, is);
    t.line = line_open(peer, &f.spec);
    peer_thread(&thread, starved_trainer, &t);
    bench_sleep_ms(50);
    got.ns = 100 * bench_idle_cores();
    flow_release(&f);
    pthread_join(thread, &item);
    BENCH_CHECK(item == NULL); /* the end, not an item */
    line_close(peer, t.line);
    flow_close(&f);
    return got;
}

static void rows_idle(void) {
    const view parked = { { "idle_cpu_pct", "%", "", false, 0.02, false, 0 }, as_is, { NULL } };
    const view starved = { { "idle_cpu_pct_starved", "%", "", false, 0.02, false, 0 },
                           as_is,
                           { NULL } };
    shape is = to_trainer(3, 16, false);
    is.items = FOREVER;
    rows_run(&parked, 1, &is, run_parked, 3, 0);
    is.feed = FEED_STARVED;
    rows_run(&starved, 1, &is, run_starved, 3, 0);
}

/* ---- Python ---- */

typedef struct python_case {
    const char *operation;
    int items;
    shape is; /* of ours */
} python_case;

static peer_python python;

static double python_rate(const void *arg) {
    const python_case *c = (const python_case *)arg;
    const double ns = peer_python_ns(&python, c->operation, c->items, "-");
    return ns > 0 ? 1e9 / ns : 0;
}

static double ours_rate(const void *arg) {
    const python_case *c = (const python_case *)arg;
    return 1e9 / measure(run_flow, &ours, &c->is).ns;
}

static void python_start(void) {
    const char *program = getenv("BENCH_PIPELINE_PYTHON");
    const bool set = program != NULL && program[0] != '\0';
    if (python.from == NULL) {
        peer_python_begin(&python, set ? program : "python3", "bench/pipe_peers.py");
    }
}

static void row_python(bench_row row, const char *needs, const char *operation, int items) {
    python_case c;
    bool there;
    if (!bench_wanted(row.name)) return;
    python_start();
    there = strstr(python.versions, needs) != NULL;
    if (!there) fprintf(stderr, "missing: %s; to get it: pip install %s\n", row.peer_name, needs);
    if (!there) row.peer_name = NULL;
    if (!there) row.goal_ratio = 0;
    c.operation = operation;
    c.items = items / (bench_opt.quick ? 3 : 1);
    c.is = to_trainer(3, 16, false);
    c.is.items = bench_opt.quick ? 300000 : 1000000;
    bench_compare_sides(&row, 7, ours_rate, &c, there ? python_rate : NULL, &c);
}

static void rows_python(void) {
    const bench_row spdl = { "vs_spdl_noop3", "items/s", "SPDL (PyPI)", true, 0, false, 1000 };
    const bench_row torch = { "vs_torch_noop", "items/s", "torch DataLoader", true, 0, false, 0 };
    row_python(spdl, "spdl", "spdl_noop3", 3000);
    row_python(torch, "torch", "torch_noop3", 20000);
}

/* ---- the pool alone ---- */

typedef struct job_count {
    uint64_t jobs;
    char pad[120];
} job_count;

static job_count job_counts[MAX_WORKERS];

static void ours_job(void *arg, int worker, void *local) {
    (void)local;
    ++((job_count *)arg)[worker].jobs;
}

static void peer_job_fn(void *arg, int worker) { ++((job_count *)arg)[worker].jobs; }

static void jobs_check(uint64_t jobs) {
    uint64_t done = 0;
    int i;
    for (i = 0; i < all_workers(); ++i) done += job_counts[i].jobs;
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
    desc.workers = all_workers();
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
    peer_pool *pool = peer_pool_create(all_workers(), 256);
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

static double ours_submit_ns(const void *arg) {
    const uint64_t jobs = ((const shape *)arg)->items;
    return ours_pool_run(NULL, jobs) / (double)jobs;
}

static double peer_submit_ns(const void *arg) {
    const uint64_t jobs = ((const shape *)arg)->items;
    return peer_pool_run(NULL, jobs) / (double)jobs;
}

static void row_pool(void) {
    const bench_row row = { "pool_submit_ns", "ns", "mutex+condvar pool", false, 0, false, 0 };
    shape our_jobs;
    shape their_jobs;
    if (!bench_wanted(row.name)) return;
    our_jobs.items = bench_calibrate(ours_pool_run, NULL, 2000, RUN_MS);
    their_jobs.items = bench_calibrate(peer_pool_run, NULL, 2000, RUN_MS);
    bench_compare_sides(&row, 9, ours_submit_ns, &our_jobs, peer_submit_ns, &their_jobs);
}

/* ---- batches in place ---- */

enum { TOKENS = 1024, WINDOWS = 32, SHARD_WINDOWS = 4096, WINDOW_BYTES = 2 * TOKENS * 4 };

static uint16_t token_shard[SHARD_WINDOWS * TOKENS + 1];

static void window_write(int32_t *to, uint64_t number) {
    const uint16_t *from = token_shard + number % SHARD_WINDOWS * TOKENS;
    int i;
    for (i = 0; i < TOKENS; ++i) {
        to[i] = from[i];
        to[TOKENS + i] = from[i + 1];
    }
}

SPDL_FN(read_window, void, int32_t) {
    const uint64_t number = spdl_sequence(task);
    if (number == *(const uint64_t *)spdl_ctx(task)) return SPDL_END;
    if ((*out = (int32_t *)spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    window_write(*out, number);
    return SPDL_OK;
}

static int32_t tokens_seen;

static double ours_tokens_run(const void *arg, uint64_t batches) {
    uint64_t windows = (batches + 16) * WINDOWS, start = 0, count;
    spdl_stage rows[] = { SPDL_SOURCE(read_window), SPDL_BATCH(WINDOWS, .item_bytes = WINDOW_BYTES),
                          SPDL_SINK(3) };
    spdl_pipeline_desc desc;
    spdl_pipeline *p;
    double elapsed;
    (void)arg;
    memset(&desc, 0, sizeof desc);
    desc.workers = 1;
    rows[0].ctx = &windows;
    BENCH_CHECK(spdl_pipeline_create(&p, &desc, SPDL_TABLE(rows)) == SPDL_OK);
    for (count = 0; count < batches + 16; ++count) {
        spdl_batch *batch;
        if (count == 16) start = bench_ns(); /* every block was written once */
        BENCH_CHECK(SPDL_NEXT(p, &batch, SPDL_FOREVER) == SPDL_OK);
        tokens_seen += *(const int32_t *)batch->items[count % WINDOWS];
        spdl_batch_free(batch);
    }
    elapsed = (double)(bench_ns() - start);
    spdl_pipeline_destroy(p);
    return elapsed;
}

/* By hand: a thread that fills 8 blocks in turn, and two semaphores. */
enum { HAND_BLOCKS = 8 };

typedef struct hand_loop {
    int32_t block[HAND_BLOCKS][WINDOWS * 2 * TOKENS];
    void (*fill)(int32_t *to, uint64_t window);
    uint64_t batches;
    size_t stride; /* of a window, in words */
    sem_t full, empty;
} hand_loop;

static void *hand_thread(void *arg) {
    hand_loop *hand = (hand_loop *)arg;
    uint64_t count, i;
    for (count = 0; count < hand->batches; ++count) {
        while (sem_wait(&hand->empty) != 0) {}
        for (i = 0; i < WINDOWS; ++i)
            hand->fill(hand->block[count % HAND_BLOCKS] + i * hand->stride, count * WINDOWS + i);
        BENCH_CHECK(sem_post(&hand->full) == 0);
    }
    return NULL;
}

static double blocks_run(hand_loop *hand, uint64_t batches) {
    pthread_t thread;
    uint64_t start = 0, count;
    hand->batches = batches + 16;
    BENCH_CHECK(sem_init(&hand->full, 0, 0) == 0 && sem_init(&hand->empty, 0, HAND_BLOCKS) == 0);
    BENCH_CHECK(pthread_create(&thread, NULL, hand_thread, hand) == 0);
    for (count = 0; count < batches + 16; ++count) {
        if (count == 16) start = bench_ns();
        while (sem_wait(&hand->full) != 0) {}
        tokens_seen += hand->block[count % HAND_BLOCKS][count % WINDOWS * hand->stride];
        BENCH_CHECK(sem_post(&hand->empty) == 0);
    }
    start = bench_ns() - start;
    BENCH_CHECK(pthread_join(thread, NULL) == 0);
    return (double)start;
}

static double hand_tokens_run(const void *arg, uint64_t batches) {
    static hand_loop hand;
    (void)arg;
    hand.fill = window_write;
    hand.stride = 2 * TOKENS;
    return blocks_run(&hand, batches);
}

static double ours_tokens_us(const void *arg) {
    const uint64_t batches = ((const shape *)arg)->items;
    return ours_tokens_run(NULL, batches) / 1e3 / (double)batches;
}

static double hand_tokens_us(const void *arg) {
    const uint64_t batches = ((const shape *)arg)->items;
    return hand_tokens_run(NULL, batches) / 1e3 / (double)batches;
}

/* ---- windows of tokens out of a file, as examples/tokens.c reads them ---- */

enum { FILE_WINDOWS = 4096 };

static struct {
    Tokens tokens;
    int fd;
} token_file;

typedef struct token_block {
    uint32_t window[WINDOWS][TOKENS + 1];
} token_block;

SPDL_FN(read_windows, spdl_batch, token_block) {
    spdl_error error;
    size_t i;
    if ((*out = (token_block *)spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    for (i = 0; i < in->count; ++i)
        BENCH_CHECK(tokens_read(&token_file.tokens,
                                ((const spdl_index *)in->items[i])->index * TOKENS, TOKENS + 1,
                                (*out)->window[i], &error) == SPDL_OK);
    return SPDL_OK;
}

/* Batches of windows out of the file, in an order that is shuffled. */
static double file_batches_run(uint64_t batches) {
    spdl_sampler_desc order = { .order = SPDL_SAMPLE_SHUFFLED, .count = FILE_WINDOWS };
    spdl_pipeline_desc desc = { .workers = 1 };
    uint64_t start = 0, count;
    spdl_sampler *s;
    spdl_pipeline *p;
    BENCH_CHECK(spdl_sampler_create(&s, &order) == SPDL_OK);
    BENCH_CHECK(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_INDEX(s, .continuous = true), SPDL_BATCH(WINDOWS),
        SPDL_PIPE(read_windows, .item_bytes = sizeof(token_block),
                  .free_item = spdl_buffer_free),
        SPDL_SINK(3))) == SPDL_OK);
    for (count = 0; count < batches + 16;) {
        token_block *block;
        if (SPDL_NEXT(p, &block, SPDL_FOREVER) == SPDL_END) continue;
        if (count == 16) start = bench_ns();
        tokens_seen += (int32_t)block->window[count++ % WINDOWS][0];
        spdl_buffer_free(block);
    }
    start = bench_ns() - start;
    spdl_pipeline_destroy(p);
    spdl_sampler_destroy(s);
    return (double)start;
}

static void hand_read(int32_t *to, uint64_t window) {
    uint16_t piece[TOKENS + 1];
    uint64_t i;
    window = window * 2654435761u % FILE_WINDOWS;
    BENCH_CHECK(pread(token_file.fd, piece, sizeof piece, (off_t)(window * TOKENS * 2)) ==
                (ssize_t)sizeof piece);
    for (i = 0; i <= TOKENS; ++i) to[i] = piece[i];
}

static double file_batches_us(const void *arg) {
    (void)arg;
    return file_batches_run(600) / 600e3;
}

static double hand_batches_us(const void *arg) {
    static hand_loop hand;
    (void)arg;
    hand.fill = hand_read;
    hand.stride = TOKENS + 1;
    return blocks_run(&hand, 600) / 600e3;
}

static void row_token_file(void) {
    const bench_row row = { "tokens_batch_us", "us", "by hand", false, 0, false, 0.95 };
    static uint16_t data[TOKENS];
    char path[] = "/tmp/bench_tokens_XXXXXX";
    spdl_files *files = NULL;
    spdl_error error;
    int i;
    if (!bench_wanted(row.name)) return;
    BENCH_CHECK((token_file.fd = mkstemp(path)) >= 0);
    for (i = 0; i <= FILE_WINDOWS; ++i)
        BENCH_CHECK(write(token_file.fd, data, sizeof data) == (ssize_t)sizeof data);
    BENCH_CHECK(spdl_files_open(&files, path, NULL) == SPDL_OK);
    BENCH_CHECK(tokens_open(&token_file.tokens, files, 2, &error) == SPDL_OK);
    bench_compare_sides(&row, 15, file_batches_us, NULL, hand_batches_us, NULL);
    tokens_close(&token_file.tokens);
    spdl_files_close(files);
    close(token_file.fd);
    unlink(path);
}

static void row_tokens(void) {
    const bench_row row = { "tokens_us", "us", "by hand", false, 0, false, 1 / 1.1 };
    shape batches;
    int i;
    if (!bench_wanted(row.name)) return;
    for (i = 0; i < COUNT(token_shard); ++i) token_shard[i] = (uint16_t)(i * 40503);
    batches.items = bench_calibrate(hand_tokens_run, NULL, 200, RUN_MS);
    bench_compare_sides(&row, 9, ours_tokens_us, &batches, hand_tokens_us, &batches);
}

int main(int argc, char **argv) {
    bench_start("pipeline", argc, argv);
    head_print();
    peers_load(argv[0]);
    rows_io();
    rows_users();
    rows_noop();
    rows_pull();
    rows_work();
    next_works = true;
    rows_users();
    rows_pull();
    rows_work();
    rows_tail();
    rows_jpeg();
    next_works = false;
    rows_beside(false);
    rows_beside(true);
    rows_convoy();
    rows_turns();
    rows_sparse();
    rows_tail();
    rows_jpeg();
    rows_python();
    row_inline();
    rows_start_and_stop();
    row_niced();
    rows_idle();
    row_allocs();
    row_bytes();
    row_tokens();
    row_token_file();
    row_pool();
    if (bench_opt.all) rows_scale();
    return 0;
}
