/* bench_ring.c - the rings against the queues of other libraries and languages.

       make bench-ring ARGS="[--json] [--quick] [--all] [--list] [TEXT]"

   spsc_single_N       one producer, one consumer, one item of 8 bytes per call, capacity N; ours
                       by try calls, a peer by those or by its blocking calls, whatever is faster
   spsc_batch_N        the same in batches of N, capacity 1024
   spsc_block_vs_try   our blocking calls against our try calls, capacity 1024
   mpmc_block_PpCc_N   blocking calls, P producers and C consumers
   pingpong_*          one item there and back over two rings of 16, blocking calls; against two
                       bare words, which is the least the machine can do
   crowd_pingpong_*    the same beside a busy loop on each processor
   efficiency_N        P producers and C consumers that work for each item, over a ring of 16: items
                       per second over what the cores could do without a queue
   efficiency_N_cpu    of the same runs: CPU time over the time of the work
   idle_ms_per_s       CPU time of four consumers that wait on an empty ring
   wake_p50_us         from a push to a consumer that slept; an item every 300 us

   The peers are built from bench/peers, each where its package is there. What a row is compared
   with is the best peer that offers the same: in the rows of blocking calls that is a bounded queue
   that sleeps, of C or C++. Queues that spin while they wait (with pauses and yields, the better of
   some ways), that have no bound, or that belong to another language are told beside it.

   Each side is tried in the few ways it may be used in (tied to CPUs or not, pause or not) and goes
   with the fastest; peers far behind after that trial are not measured again unless --all is given.
   Then come the rounds, each of all sides in a new order. A row shows the round trip between two
   cores before and after it: where they differ, the machine was not the same all along, and the
   rounds are run once more. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define SPDL_IMPLEMENTATION
#include "../spdl.h"

#include "flow.h"
#include "peer_mutex.h"

#include <dlfcn.h>
#include <fcntl.h>

#define MAX_SIDES 40 /* of a row */
#define MAX_PEERS 64
#define RUN_MS 30.0
#define ROUNDS 9
#define IDLE_MS (bench_opt.quick ? 200 : 500)
#define UNSTEADY 1.15 /* between the round trips before and after */

/* ---- our rings ---- */

static void *ours_open(const flow_spec *spec) {
    spdl_ring *ring;
    spdl_ring_desc desc = { 0 };
    desc.capacity = spec->capacity;
    desc.mode = spec->spsc ? SPDL_RING_SPSC : SPDL_RING_MPMC;
    BENCH_CHECK(spdl_ring_create(&ring, &desc) == SPDL_OK);
    return ring;
}

static void ours_close(void *ring) { spdl_ring_destroy((spdl_ring *)ring, NULL, NULL); }

FLOW_INLINE bool ours_push(void *ring, void *local, uint64_t item) {
    (void)local;
    return spdl_ring_push((spdl_ring *)ring, &item, SPDL_FOREVER) == SPDL_OK;
}

FLOW_INLINE bool ours_pop(void *ring, void *local, uint64_t *item) {
    (void)local;
    return spdl_ring_pop((spdl_ring *)ring, item, SPDL_FOREVER) == SPDL_OK;
}

FLOW_INLINE bool ours_try_push(void *ring, void *local, uint64_t item) {
    (void)local;
    return spdl_ring_try_push((spdl_ring *)ring, &item) == SPDL_OK;
}

FLOW_INLINE bool ours_try_pop(void *ring, void *local, uint64_t *item) {
    (void)local;
    return spdl_ring_try_pop((spdl_ring *)ring, item) == SPDL_OK;
}

FLOW_INLINE size_t ours_push_n(void *ring, void *local, const uint64_t *items, size_t count) {
    uint64_t moved = 0;
    (void)local;
    spdl__ring_try((spdl_ring *)ring, true, SPDL__UNCONST(items), count, &moved);
    return (size_t)moved;
}

FLOW_INLINE size_t ours_pop_n(void *ring, void *local, uint64_t *items, size_t count) {
    uint64_t moved = 0;
    (void)local;
    spdl__ring_try((spdl_ring *)ring, false, items, count, &moved);
    return (size_t)moved;
}

FLOW_CALLS(ours_try, ours_try_push, ours_try_pop)
FLOW_CALLS(ours_block, ours_push, ours_pop)
FLOW_CALLS_N(ours_batch, ours_push_n, ours_pop_n)

static const flow_peer ours = { "spdl.h",   FLOW_SLEEPS, FLOW_SPSC | FLOW_MPMC,
                                ours_open,  ours_close,  NULL,
                                NULL,       { &ours_try, &ours_block, &ours_batch } };

/* ---- the peers that are always there ---- */

static void *mutex_open(const flow_spec *spec) {
    peer_queue *queue = (peer_queue *)peer_alloc(sizeof *queue);
    peer_queue_init(queue, spec->capacity);
    return queue;
}

static void mutex_close(void *queue) {
    peer_queue_destroy((peer_queue *)queue);
    free(queue);
}

FLOW_INLINE bool mutex_push(void *queue, void *local, uint64_t item) {
    (void)local;
    return peer_queue_push((peer_queue *)queue, (void *)(uintptr_t)item) == PEER_OK;
}

FLOW_INLINE bool mutex_pop(void *queue, void *local, uint64_t *item) {
    void *got = NULL;
    const bool ok = peer_queue_pop((peer_queue *)queue, &got) == PEER_OK;
    (void)local;
    *item = (uint64_t)(uintptr_t)got;
    return ok;
}

FLOW_INLINE bool mutex_try_push(void *queue, void *local, uint64_t item) {
    (void)local;
    return peer_queue_try_push((peer_queue *)queue, (void *)(uintptr_t)item) == PEER_OK;
}

FLOW_INLINE bool mutex_try_pop(void *queue, void *local, uint64_t *item) {
    void *got = NULL;
    const bool ok = peer_queue_try_pop((peer_queue *)queue, &got) == PEER_OK;
    (void)local;
    *item = (uint64_t)(uintptr_t)got;
    return ok;
}

FLOW_CALLS(mutex_try, mutex_try_push, mutex_try_pop)
FLOW_CALLS(mutex_block, mutex_push, mutex_pop)

static const flow_peer mutex_peer = { "mutex+condvar queue", FLOW_SLEEPS, FLOW_SPSC | FLOW_MPMC,
                                      mutex_open, mutex_close, NULL, NULL,
                                      { &mutex_try, &mutex_block, NULL } };

/* Not a queue: a word each way, written by one side and read by the other. Enough for ping-pong. */
typedef struct words {
    uint64_t word;
    char apart[128];
    uint64_t seen;
    char end[128];
} words;

static void *words_open(const flow_spec *spec) {
    void *memory = NULL;
    (void)spec;
    BENCH_CHECK(posix_memalign(&memory, 128, sizeof(words)) == 0);
    memset(memory, 0, sizeof(words));
    return memory;
}

FLOW_INLINE bool words_push(void *queue, void *local, uint64_t item) {
    (void)local;
    __atomic_store_n(&((words *)queue)->word, item, __ATOMIC_RELEASE);
    return true;
}

FLOW_INLINE bool words_pop(void *queue, void *local, uint64_t *item) {
    words *w = (words *)queue;
    (void)local;
    *item = __atomic_load_n(&w->word, __ATOMIC_ACQUIRE);
    if (*item == w->seen) return false;
    w->seen = *item;
    return true;
}

FLOW_CALLS(words_try, words_push, words_pop)

static const flow_peer two_words = { "two bare words", FLOW_SPINS, 0, words_open, free, NULL, NULL,
                                     { &words_try, NULL, NULL } };

/* ---- the peers of other languages: programs that run what they are told ---- */

typedef struct far_program {
    const char *file;
    FILE *to; /* NULL: not started */
    FILE *from;
} far_program;

typedef struct far_peer {
    flow_peer peer; /* first: a peer without an open is one of these */
    far_program *program;
    int which;
} far_peer;

static far_program go_program = { "go", NULL, NULL };
static far_program rust_program = { "rust", NULL, NULL };
static const flow_mains far_mains = { NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL };

static const far_peer far_peers[] = {
    { { "Go channel", FLOW_CHANNEL, FLOW_SPSC | FLOW_MPMC, NULL, NULL, NULL, NULL,
        { NULL, &far_mains, NULL } },
      &go_program, 0 },
    { { "Rust crossbeam", FLOW_CHANNEL, FLOW_SPSC | FLOW_MPMC, NULL, NULL, NULL, NULL,
        { NULL, &far_mains, NULL } },
      &rust_program, 0 },
    { { "Rust sync_channel", FLOW_CHANNEL, FLOW_SPSC, NULL, NULL, NULL, NULL,
        { NULL, &far_mains, NULL } },
      &rust_program, 1 },
};

#define FAR_COUNT ((int)(sizeof far_peers / sizeof far_peers[0]))

/* ---- the peers of other packages ---- */

typedef struct package {
    const char *file;
    const char *what;
    const char *debian;
} package;

static const package packages[] = {
    { "moody.so", "moody ConcurrentQueue", "libconcurrentqueue-dev" },
    { "moody_spsc.so", "readerwriterqueue", "libreaderwriterqueue-dev" },
    { "ck.so", "ck_ring", "libck-dev" },
    { "tbb.so", "TBB", "libtbb-dev" },
    { "boost.so", "boost.lockfree", "libboost-dev" },
    { "dpdk.so", "rte_ring", "libdpdk-dev pkg-config" },
    { "cds.so", "libcds", "libcds-dev" },
    { "glib.so", "GLib", "libglib2.0-dev pkg-config" },
    { "go", "Go channels", "golang-go" },
    { "rust", "Rust channels", "rustc librust-crossbeam-channel-dev" },
};

#define PACKAGE_COUNT ((int)(sizeof packages / sizeof packages[0]))

static const flow_peer *peers[MAX_PEERS];
static int peer_count;
static char peer_folder[1024]; /* where the built peers are: beside the program */

static bool plugin_load(const char *file) {
    char path[sizeof peer_folder + 64];
    const flow_peer *table = NULL;
    flow_plugin_fn get;
    void *library;
    void *symbol;
    int count;
    snprintf(path, sizeof path, "%s/%s", peer_folder, file);
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    symbol = library != NULL ? dlsym(library, "flow_plugin") : NULL;
    if (symbol == NULL) return false;
    memcpy(&get, &symbol, sizeof get); /* C has no cast from an object to a function */
    for (count = get(&table); count > 0; --count) {
        BENCH_CHECK(peer_count < MAX_PEERS);
        peers[peer_count++] = table++;
    }
    return true;
}

/* Whether the program is there; it starts when it is needed. */
static bool far_find(const char *file) {
    char path[sizeof peer_folder + 64];
    int i;
    snprintf(path, sizeof path, "%s/%s", peer_folder, file);
    if (access(path, X_OK) != 0) return false;
    for (i = 0; i < FAR_COUNT; ++i) {
        if (strcmp(far_peers[i].program->file, file) != 0) continue;
        BENCH_CHECK(peer_count < MAX_PEERS);
        peers[peer_count++] = &far_peers[i].peer;
    }
    return true;
}

static void far_start(far_program *program) {
    char path[sizeof peer_folder + 64];
    int to[2];
    int from[2];
    pid_t child;
    snprintf(path, sizeof path, "%s/%s", peer_folder, program->file);
    BENCH_CHECK(pipe(to) == 0 && pipe(from) == 0);
    child = fork();
    BENCH_CHECK(child >= 0);
    if (child == 0) {
        if (dup2(to[0], 0) < 0 || dup2(from[1], 1) < 0) _exit(1);
        close(to[1]); /* or the end of this program would not be its end */
        execl(path, path, (char *)NULL);
        _exit(1);
    }
    close(to[0]);
    close(from[1]);
    fcntl(to[1], F_SETFD, FD_CLOEXEC);
    program->to = fdopen(to[1], "w");
    program->from = fdopen(from[0], "r");
    BENCH_CHECK(program->to != NULL && program->from != NULL);
}

static void peers_load(const char *program) {
    FILE *to = bench_opt.json ? stderr : stdout;
    const char *slash = strrchr(program, '/');
    bool missing[PACKAGE_COUNT];
    int missing_count = 0;
    int i;
    snprintf(peer_folder, sizeof peer_folder, "%.*s/peers",
             slash != NULL ? (int)(slash - program) : 1, slash != NULL ? program : ".");
    peers[peer_count++] = &mutex_peer;
    for (i = 0; i < PACKAGE_COUNT; ++i) {
        const char *file = packages[i].file;
        missing[i] = strstr(file, ".so") != NULL ? !plugin_load(file) : !far_find(file);
        missing_count += missing[i];
    }
    if (missing_count == 0 || bench_opt.list) return;
    fprintf(to, "missing peers:");
    for (i = 0; i < PACKAGE_COUNT; ++i) {
        if (missing[i]) fprintf(to, " %s,", packages[i].what);
    }
    fprintf(to, " to get them: apt-get install");
    for (i = 0; i < PACKAGE_COUNT; ++i) {
        if (missing[i]) fprintf(to, " %s", packages[i].debian);
    }
    fprintf(to, " (else see %s/*.log)\n", peer_folder);
}

/* ---- one run ---- */

typedef struct run_result {
    double items; /* fewer than asked for, where a queue all but stopped */
    double ns;
    double cpu_ns;
    double p50_ns; /* of FLOW_WAKE */
} run_result;

static void flow_open(flow *f, const flow_peer *peer, const flow_spec *spec, uint64_t items) {
    memset(f, 0, sizeof *f);
    f->spec = spec;
    f->each = items / (uint64_t)spec->producers;
    f->items = items;
    f->deadline = bench_ns() + (uint64_t)(8 * RUN_MS * 1e6);
    f->producers_left = spec->producers;
    f->unordered = (peer->can & FLOW_UNORDERED) != 0;
    f->queue = peer->open(spec);
    if (spec->kind == FLOW_PINGPONG) f->back = peer->open(spec);
    pthread_barrier_init(&f->gate, NULL, (unsigned)(spec->producers + spec->consumers));
}

static void flow_close(flow *f, const flow_peer *peer) {
    peer->close(f->queue);
    if (f->back != NULL) peer->close(f->back);
    pthread_barrier_destroy(&f->gate);
}

static flow_main main_of(const flow_peer *peer, const flow_spec *spec, bool produces) {
    const flow_mains *mains = peer->mains[spec->call];
    switch (spec->kind) {
    case FLOW_PINGPONG: return produces ? mains->ping : mains->pong;
    case FLOW_WORK: return produces ? mains->work_produce : mains->work_consume;
    case FLOW_WAKE: return produces ? mains->wake_produce : mains->wake_consume;
    case FLOW_STREAM:
    case FLOW_IDLE: break;
    }
    return produces ? mains->produce : mains->consume;
}

static void thread_start(flow_thread *t, flow *f, const flow_peer *peer, int index) {
    const bool produces = index < f->spec->producers;
    memset(t, 0, sizeof *t);
    t->of = f;
    t->index = index;
    t->in_order = true;
    if (peer->enter != NULL) t->local = peer->enter(f->queue);
    if (peer->enter != NULL && f->back != NULL) t->local_back = peer->enter(f->back);
    if (f->spec->kind == FLOW_WAKE) t->samples = (double *)peer_alloc(f->items * sizeof(double));
    BENCH_CHECK(pthread_create(&t->thread, NULL, main_of(peer, f->spec, produces), t) == 0);
}

static void thread_end(flow_thread *t, const flow_peer *peer) {
    if (t->local != NULL) peer->leave(t->local);
    if (t->local_back != NULL) peer->leave(t->local_back);
    free(t->samples);
}

/* From the first thread through the gate to the last one done. */
static double flow_elapsed(const flow_thread *threads, int count) {
    uint64_t first = threads[0].started;
    uint64_t last = threads[0].ended;
    int i;
    for (i = 1; i < count; ++i) {
        if (threads[i].started < first) first = threads[i].started;
        if (threads[i].ended > last) last = threads[i].ended;
    }
    return (double)(last - first);
}

/* What came out is what went in, and in order. */
static void flow_check(const flow_peer *peer, const flow_thread *threads, const flow_spec *spec) {
    uint64_t count = 0; /* pushed less popped */
    uint64_t sum = 0;
    int i;
    for (i = 0; i < spec->producers + spec->consumers; ++i) {
        const bool produces = i < spec->producers;
        if (!threads[i].in_order) bench_fail("%s: items out of order", peer->name);
        count += produces ? threads[i].count : 0 - threads[i].count;
        sum += produces ? threads[i].sum : 0 - threads[i].sum;
    }
    if (count != 0 || sum != 0) bench_fail("%s: items are not those pushed", peer->name);
}

static uint64_t count_of(const flow *f, const flow_thread *threads) {
    uint64_t count = 0;
    int i;
    for (i = 0; i < f->spec->producers; ++i) count += threads[i].count;
    return count;
}

static run_result flow_run(const flow_peer *peer, const flow_spec *spec, uint64_t items) {
    flow_thread threads[2 * FLOW_MAX_SIDE];
    const int count = spec->producers + spec->consumers;
    run_result result = { 0, 0, 0, 0 };
    flow f;
    int i;
    flow_open(&f, peer, spec, items);
    result.cpu_ns = -bench_cpu_ns();
    for (i = 0; i < count; ++i) thread_start(&threads[i], &f, peer, i);
    for (i = 0; i < count; ++i) pthread_join(threads[i].thread, NULL);
    result.cpu_ns += bench_cpu_ns();
    result.ns = flow_elapsed(threads, count);
    result.items = (double)count_of(&f, threads);
    flow_check(peer, threads, spec);
    if (spec->kind == FLOW_WAKE) {
        result.p50_ns = bench_quantile(threads[count - 1].samples, threads[count - 1].count, 0.5);
    }
    for (i = 0; i < count; ++i) thread_end(&threads[i], peer);
    flow_close(&f, peer);
    return result;
}

/* CPU time of the consumers so far: of theirs alone, since to measure costs more than they do. */
static double consumers_cpu_ns(const flow_thread *consumers, int count) {
    double sum = 0;
    int i;
    for (i = 0; i < count; ++i) {
        struct timespec t;
        clockid_t clock;
        BENCH_CHECK(pthread_getcpuclockid(consumers[i].thread, &clock) == 0);
        BENCH_CHECK(clock_gettime(clock, &t) == 0);
        sum += (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
    }
    return sum;
}

/* The consumers alone, for a while; the producer comes to end it. */
static run_result idle_run(const flow_peer *peer, const flow_spec *spec) {
    flow_thread threads[2 * FLOW_MAX_SIDE];
    run_result result = { 0, 0, 0, 0 };
    flow f;
    int i;
    flow_open(&f, peer, spec, 0);
    pthread_barrier_destroy(&f.gate);
    pthread_barrier_init(&f.gate, NULL, (unsigned)spec->consumers);
    for (i = 1; i <= spec->consumers; ++i) thread_start(&threads[i], &f, peer, i);
    bench_sleep_ms(50);
    result.ns = -(double)bench_ns();
    result.cpu_ns = -consumers_cpu_ns(&threads[1], spec->consumers);
    bench_sleep_ms(IDLE_MS);
    result.ns += (double)bench_ns();
    result.cpu_ns += consumers_cpu_ns(&threads[1], spec->consumers);
    pthread_barrier_destroy(&f.gate);
    pthread_barrier_init(&f.gate, NULL, 1);
    thread_start(&threads[0], &f, peer, 0);
    for (i = 0; i <= spec->consumers; ++i) pthread_join(threads[i].thread, NULL);
    flow_check(peer, threads, spec);
    for (i = 0; i <= spec->consumers; ++i) thread_end(&threads[i], peer);
    flow_close(&f, peer);
    return result;
}

/* The other program does the same and checks the same; see bench/peers. */
static run_result far_run(const flow_peer *peer, const flow_spec *spec, uint64_t items) {
    const far_peer *far = (const far_peer *)(const void *)peer;
    run_result r = { 0, 0, 0, 0 };
    int well = 0;
    if (far->program->to == NULL) far_start(far->program);
    fprintf(far->program->to, "%d %d %d %d %d %u %llu %u %u %d\n", far->which, (int)spec->kind,
            spec->pinned, spec->producers, spec->consumers, (unsigned)spec->capacity,
            (unsigned long long)items, (unsigned)spec->produce_work, (unsigned)spec->consume_work,
            IDLE_MS);
    fflush(far->program->to);
    if (fscanf(far->program->from, "%lf %lf %lf %lf %d", &r.items, &r.ns, &r.cpu_ns, &r.p50_ns,
               &well) != 5) {
        bench_fail("%s: no answer", peer->name);
    }
    if (!well) bench_fail("%s: items are not those pushed", peer->name);
    return r;
}

static run_result side_run(const flow_peer *peer, const flow_spec *spec, uint64_t items) {
    bench_now_with(peer->name);
    if (peer->open == NULL) return far_run(peer, spec, items);
    return spec->kind == FLOW_IDLE ? idle_run(peer, spec) : flow_run(peer, spec, items);
}

/* The round trip between two cores, ns; 0 with a single one. */
static double round_trip(void) {
    const flow_spec spec = { FLOW_PINGPONG, FLOW_TRY, FLOW_HOT, true, true, 1, 1, 1, 0, 0, 0 };
    const uint64_t trips = 4000;
    double ns[5];
    int i;
    if (bench_cores() < 2) return 0;
    bench_now_with("round trip");
    for (i = 0; i < 5; ++i) ns[i] = flow_run(&two_words, &spec, trips).ns / (double)trips;
    return bench_quantile(ns, 5, 0.5);
}

static bool is_steady(double before, double after) {
    return before <= after * UNSTEADY && after <= before * UNSTEADY;
}

/* The same once the machine is as it mostly was in this run, or after a second. */
static double round_trip_settled(void) {
    static double seen[BENCH_MAX_ROUNDS];
    static size_t count;
    double sorted[BENCH_MAX_ROUNDS];
    size_t known;
    int i;
    for (i = 0;; ++i) {
        const double now = round_trip();
        seen[count++ % BENCH_MAX_ROUNDS] = now;
        known = count < BENCH_MAX_ROUNDS ? count : BENCH_MAX_ROUNDS;
        memcpy(sorted, seen, sizeof seen);
        if (i == 5 || is_steady(now, bench_quantile(sorted, known, 0.5))) return now;
        bench_sleep_ms(200);
    }
}

/* ---- what the work of an item takes ---- */

typedef struct worker {
    pthread_t thread;
    pthread_barrier_t *gate;
    int cpu;
    double ns; /* per turn */
} worker;

static void *worker_main(void *arg) {
    const uint32_t turns = 1000000;
    worker *w = (worker *)arg;
    uint64_t start;
    bench_pin(w->cpu);
    pthread_barrier_wait(w->gate);
    start = bench_ns();
    if (flow_work((uint64_t)w->cpu, turns) == 0) bench_fail("no work");
    w->ns = (double)(bench_ns() - start) / turns;
    return NULL;
}

/* Nanoseconds of a turn of flow_work with all cores at it, the mean of the cores. */
static double turn_ns(void) {
    worker workers[FLOW_MAX_SIDE];
    const int count = bench_cores() < FLOW_MAX_SIDE ? bench_cores() : FLOW_MAX_SIDE;
    pthread_barrier_t gate;
    double sum = 0;
    int i;
    pthread_barrier_init(&gate, NULL, (unsigned)count);
    for (i = 0; i < count; ++i) {
        workers[i].gate = &gate;
        workers[i].cpu = i;
        BENCH_CHECK(pthread_create(&workers[i].thread, NULL, worker_main, &workers[i]) == 0);
    }
    for (i = 0; i < count; ++i) {
        pthread_join(workers[i].thread, NULL);
        sum += workers[i].ns;
    }
    pthread_barrier_destroy(&gate);
    return sum / count;
}

/* ---- sides of a row ---- */

typedef struct side {
    const flow_peer *peer;
    const char *name;
    flow_spec spec;
    uint64_t items;
    double trial; /* more is better */
    bool dropped; /* after the trial */
    int rounds;
    double values[BENCH_MAX_ROUNDS];
    double cpu[BENCH_MAX_ROUNDS]; /* of FLOW_WORK: over the work */
    double median;
    double cpu_median;
} side;

/* A row: what is run, and which of the sides it is compared with. */
typedef struct row_case {
    bench_row row;
    flow_spec spec;
    unsigned rivals; /* bits of flow_class; 0: the second side */
    double keep;     /* a peer this much worse than the best in the trial is dropped */
    double run_ms;
    uint64_t items; /* 0: calibrated */
} row_case;

static bool is_pair(const flow_spec *spec) { return spec->producers == 1 && spec->consumers == 1; }

static double value_of(const row_case *c, run_result r) {
    switch (c->spec.kind) {
    case FLOW_STREAM: return r.items * 1e3 / r.ns; /* millions per second */
    case FLOW_PINGPONG: return r.ns / r.items;
    case FLOW_WAKE: return r.p50_ns / 1e3;
    case FLOW_IDLE: return r.cpu_ns / r.ns * 1e3;
    case FLOW_WORK: break;
    }
    return 0;
}

/* The least time an item can take: the cores work all the time, and so do the threads of a side. */
static double least_turns(const flow_spec *spec) {
    const double produce = spec->produce_work;
    const double consume = spec->consume_work;
    const double cores = bench_cores();
    double least = (produce + consume) / cores;
    if (least < produce / spec->producers) least = produce / spec->producers;
    if (least < consume / spec->consumers) least = consume / spec->consumers;
    return least;
}

static void side_measure(const row_case *c, side *s, double turn) {
    const run_result r = side_run(s->peer, &s->spec, s->items);
    double value = value_of(c, r);
    if (c->spec.kind == FLOW_WORK) {
        const double work = (double)(s->spec.produce_work + s->spec.consume_work);
        value = r.items * least_turns(&s->spec) * turn / r.ns;
        s->cpu[s->rounds] = r.cpu_ns / (r.items * work * turn);
    }
    s->values[s->rounds++] = value;
}

/* How many items a run needs to take its time; grows from a short run, so that a slow side costs no
   more than a fast one. */
static void side_calibrate(const row_case *c, side *s) {
    const double target = c->run_ms * 1e6 * (bench_opt.quick ? 0.5 : 1.0);
    uint64_t items = 400;
    run_result r;
    if (c->items > 0) {
        s->items = c->items;
        return;
    }
    r = side_run(s->peer, &s->spec, items);
    while (r.ns < target / 8) {
        items *= 4;
        r = side_run(s->peer, &s->spec, items);
    }
    s->trial = r.items / r.ns;
    s->items = (uint64_t)(s->trial * target) + 1;
}

static void side_try(const row_case *c, side *best, const flow_spec *spec) {
    side candidate = *best;
    candidate.spec = *spec;
    side_calibrate(c, &candidate);
    if (best->items == 0 || candidate.trial > best->trial) *best = candidate;
}

/* With a CPU for each thread to spin may be best; else only what lets others run. */
static void side_try_waits(const row_case *c, side *s, flow_spec spec) {
    static const flow_wait waits[2][3] = { { FLOW_HOT, FLOW_PAUSE, FLOW_YIELD },
                                           { FLOW_PAUSE_YIELD, FLOW_YIELD, FLOW_YIELD } };
    const bool pair = is_pair(&spec);
    int i;
    spec.pinned = pair;
    for (i = 0; i < (pair ? 3 : 2); ++i) {
        spec.wait = waits[pair ? 0 : 1][i];
        side_try(c, s, &spec);
    }
}

static void side_try_call(const row_case *c, side *s, flow_call call) {
    const bool may_float = s->peer != &ours && c->items == 0; /* ours: always tied, when a pair */
    flow_spec spec = c->spec;
    if (s->peer->mains[call] == NULL) return;
    spec.call = call;
    if (call != FLOW_BLOCK) {
        side_try_waits(c, s, spec);
        return;
    }
    spec.wait = FLOW_YIELD;
    spec.pinned = is_pair(&spec);
    side_try(c, s, &spec);
    spec.pinned = false;
    if (is_pair(&spec) && may_float) side_try(c, s, &spec);
}

/* A queue that has no call as the row wants it takes part with the other kind; not in batches, and
   not where to spin is no answer. */
static void side_choose(const row_case *c, side *s) {
    const bool has_block = s->peer->mains[FLOW_BLOCK] != NULL;
    const bool must_sleep = c->spec.kind == FLOW_IDLE || c->spec.kind == FLOW_WAKE;
    if (c->spec.call == FLOW_BATCH) {
        side_try_call(c, s, FLOW_BATCH);
    } else if (s->peer == &ours) {
        side_try_call(c, s, s->spec.call);
    } else if (c->spec.call == FLOW_TRY) {
        side_try_call(c, s, FLOW_TRY);
        side_try_call(c, s, FLOW_BLOCK);
    } else if (has_block || !must_sleep) {
        side_try_call(c, s, has_block ? FLOW_BLOCK : FLOW_TRY);
    }
}

static void side_add(const row_case *c, side *sides, int *count, const flow_peer *peer,
                     flow_call call) {
    side *s = &sides[*count];
    memset(s, 0, sizeof *s);
    s->peer = peer;
    s->name = peer->name;
    s->spec = c->spec;
    s->spec.call = call;
    BENCH_CHECK(*count < MAX_SIDES);
    side_choose(c, s);
    if (is_pair(&c->spec) && s->items > 0) side_choose(c, s); /* where most depends on the way */
    if (s->items > 0) ++*count;
}

static void add_peers(const row_case *c, side *sides, int *count) {
    const unsigned form = c->spec.spsc ? FLOW_SPSC : FLOW_MPMC;
    int i;
    for (i = 0; i < peer_count; ++i) {
        if ((peers[i]->can & form) != 0) side_add(c, sides, count, peers[i], c->spec.call);
    }
}

static bool is_rival(const row_case *c, const side *sides, int i) {
    if (c->rivals == 0) return i == 1;
    return i > 0 && (c->rivals >> sides[i].peer->in_class & 1) != 0;
}

/* Whether two sides are up for the same place of a row: rivals, or others of the same class. */
static bool same_place(const row_case *c, const side *sides, int i, int k) {
    const bool rival = is_rival(c, sides, i);
    if (rival != is_rival(c, sides, k)) return false;
    return rival || sides[i].peer->in_class == sides[k].peer->in_class;
}

/* The peers that come near the best of their place stay. */
static void drop_some(const row_case *c, side *sides, int count) {
    int i;
    int k;
    if (bench_opt.all || c->items > 0) return;
    for (i = 1; i < count; ++i) {
        for (k = 1; k < count; ++k) {
            const bool behind = sides[i].trial < c->keep * sides[k].trial;
            if (behind && same_place(c, sides, i, k)) sides[i].dropped = true;
        }
    }
}

static void measure_all(const row_case *c, side *sides, int count, int rounds) {
    static uint32_t seed = 1;
    int order[MAX_SIDES];
    int round;
    int i;
    for (i = 0; i < count; ++i) {
        order[i] = i;
        sides[i].rounds = 0;
    }
    for (round = 0; round < rounds; ++round) {
        const double turn = c->spec.kind == FLOW_WORK ? turn_ns() : 0;
        for (i = count - 1; i > 0; --i) {
            const int k = (int)((seed = seed * 1664525 + 1013904223) >> 8) % (i + 1);
            const int swap = order[i];
            order[i] = order[k];
            order[k] = swap;
        }
        for (i = 0; i < count; ++i) {
            if (!sides[order[i]].dropped) side_measure(c, &sides[order[i]], turn);
        }
    }
    for (i = 0; i < count; ++i) {
        if (sides[i].dropped) continue;
        sides[i].median = bench_median(sides[i].values, sides[i].rounds);
        sides[i].cpu_median = bench_median(sides[i].cpu, sides[i].rounds);
    }
}

/* ---- printing a row ---- */

typedef struct text {
    char chars[4096];
    size_t used;
} text;

static void text_add(text *t, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void text_add(text *t, const char *format, ...) {
    va_list args;
    int n;
    va_start(args, format);
    n = vsnprintf(t->chars + t->used, sizeof t->chars - t->used, format, args);
    va_end(args);
    if (n > 0 && t->used + (size_t)n < sizeof t->chars) t->used += (size_t)n;
}

static const char *class_name(flow_class in_class) {
    static const char *const names[] = { "sleeps", "spins", "unbounded", "channel" };
    return names[in_class];
}

static const char *wait_name(const flow_spec *spec) {
    static const char *const names[] = { "hot", "pause", "pause and yield", "yield" };
    return spec->call == FLOW_BLOCK ? "blocking calls" : names[spec->wait];
}

static bool is_better(const row_case *c, const side *a, const side *b) {
    return c->row.more_is_better ? a->median > b->median : a->median < b->median;
}

/* How many peers the best one is chosen among. */
static int rivals_of(const row_case *c, const side *sides, int count) {
    int rivals = 0;
    int i;
    for (i = 1; i < count; ++i) rivals += !sides[i].dropped && is_rival(c, sides, i);
    return rivals;
}

/* The best of the rivals, or of the others of a class; 0: none. */
static int best_of(const row_case *c, const side *sides, int count, bool rivals, int in_class) {
    int best = 0;
    int i;
    for (i = 1; i < count; ++i) {
        if (sides[i].dropped || is_rival(c, sides, i) != rivals) continue;
        if (!rivals && (int)sides[i].peer->in_class != in_class) continue;
        if (best == 0 || is_better(c, &sides[i], &sides[best])) best = i;
    }
    return best;
}

static void add_side(const row_case *c, text *t, const side *s, double mine) {
    char number[32];
    text_add(t, "%s %s (%s, %.2f)", s->name, bench_number(number, sizeof number, s->median),
             class_name(s->peer->in_class), bench_ratio(&c->row, mine, s->median));
}

static void tell_others(const row_case *c, text *t, const side *sides, int count) {
    int in_class;
    for (in_class = 0; in_class <= FLOW_CHANNEL; ++in_class) {
        const int best = best_of(c, sides, count, false, in_class);
        if (best == 0) continue;
        text_add(t, "%s", t->used == 0 ? "    beside it: " : "; ");
        add_side(c, t, &sides[best], sides[0].median);
    }
    if (t->used > 0) text_add(t, "\n");
}

static void tell_all(const row_case *c, text *t, const side *sides, int count) {
    int i;
    for (i = 0; i < count; ++i) {
        const side *s = &sides[i];
        char number[32];
        if (s->dropped) continue;
        text_add(t, "    %10s %-6s %-30s %6.2f  %s, %s%s\n",
                 bench_number(number, sizeof number, s->median), c->row.unit, s->name,
                 bench_ratio(&c->row, sides[0].median, s->median), class_name(s->peer->in_class),
                 wait_name(&s->spec), s->spec.pinned ? ", tied" : "");
    }
}

static void tell_json(const row_case *c, text *t, const side *sides, int count) {
    int i;
    text_add(t, ",\"peers\":{");
    for (i = 1; i < count; ++i) {
        if (sides[i].dropped) continue;
        text_add(t, "%s\"%s\":{\"value\":%.6g,\"class\":\"%s\"}",
                 t->chars[t->used - 1] == '{' ? "" : ",", sides[i].name, sides[i].median,
                 class_name(sides[i].peer->in_class));
    }
    text_add(t, "}");
    (void)c;
}

static void row_print(row_case *c, const side *sides, int count, const double rtt[2]) {
    const int rival = best_of(c, sides, count, true, 0);
    const bool steady = is_steady(rtt[0], rtt[1]);
    text trips = { { 0 }, 0 };
    text more = { { 0 }, 0 };
    text json = { { 0 }, 0 };
    const bench_note note = { trips.chars, more.chars, json.chars };
    const bench_sides rounds = { sides[0].values, rival > 0 ? sides[rival].values : NULL,
                                 sides[0].rounds, rivals_of(c, sides, count) };
    text_add(&trips, "rtt %.0f/%.0f ns%s", rtt[0], rtt[1], steady ? "" : " UNSTEADY");
    text_add(&json, ",\"rtt_before\":%.4g,\"rtt_after\":%.4g,\"steady\":%s", rtt[0], rtt[1],
             steady ? "true" : "false");
    tell_json(c, &json, sides, count);
    if (bench_opt.all) {
        tell_all(c, &more, sides, count);
    } else {
        tell_others(c, &more, sides, count);
    }
    c->row.peer_name = rival > 0 ? sides[rival].name : NULL;
    bench_print_sides(&c->row, &rounds, &note);
}

/* All of it once more where the machine was not the same before and after, whatever came out. */
static void row_run(const row_case *c, side *sides, int count, double rtt[2]) {
    int tries;
    drop_some(c, sides, count);
    for (tries = 0; tries < 2; ++tries) {
        rtt[0] = round_trip_settled();
        measure_all(c, sides, count, bench_rounds(ROUNDS));
        rtt[1] = round_trip();
        if (is_steady(rtt[0], rtt[1])) return;
    }
}

/* ---- rows ---- */

#define RIVAL(in_class) (1u << (in_class))
#define ANY_RIVAL (RIVAL(FLOW_SLEEPS) | RIVAL(FLOW_SPINS) | RIVAL(FLOW_CHANNEL))

static void row_of_peers(row_case *c) {
    static side sides[MAX_SIDES];
    double rtt[2];
    int count = 0;
    if (!bench_wanted(c->row.name)) return;
    side_add(c, sides, &count, &ours, c->spec.call);
    add_peers(c, sides, &count);
    row_run(c, sides, count, rtt);
    row_print(c, sides, count, rtt);
}

static void row_spsc_single(uint32_t capacity, double goal) {
    char name[32];
    row_case c = { { name, "M/s", NULL, true, 0, false, goal },
                   { FLOW_STREAM, FLOW_TRY, FLOW_HOT, true, true, 1, 1, capacity, 0, 0, 0 },
                   ANY_RIVAL, 0.6, RUN_MS, 0 };
    snprintf(name, sizeof name, "spsc_single_%u", (unsigned)capacity);
    row_of_peers(&c);
}

static void row_spsc_batch(uint32_t batch, double goal) {
    char name[32];
    row_case c = { { name, "M/s", NULL, true, 0, false, goal },
                   { FLOW_STREAM, FLOW_BATCH, FLOW_HOT, true, true, 1, 1, 1024, batch, 0, 0 },
                   ANY_RIVAL, 0.6, RUN_MS, 0 };
    snprintf(name, sizeof name, "spsc_batch_%u", (unsigned)batch);
    row_of_peers(&c);
}

static void row_spsc_block_vs_try(void) {
    static side sides[MAX_SIDES];
    row_case c = { { "spsc_block_vs_try", "M/s", NULL, true, 0, false, 0.95 },
                   { FLOW_STREAM, FLOW_BLOCK, FLOW_HOT, true, true, 1, 1, 1024, 0, 0, 0 },
                   0, 0.6, RUN_MS, 0 };
    double rtt[2];
    int count = 0;
    int i;
    if (!bench_wanted(c.row.name)) return;
    side_add(&c, sides, &count, &ours, FLOW_BLOCK);
    side_add(&c, sides, &count, &ours, FLOW_TRY);
    sides[1].name = "own try calls";
    for (i = 0; i < peer_count; ++i) {
        const bool sleeps = peers[i]->mains[FLOW_BLOCK] != NULL;
        if (!sleeps || !(peers[i]->can & FLOW_SPSC)) continue;
        side_add(&c, sides, &count, peers[i], FLOW_BLOCK);
    }
    row_run(&c, sides, count, rtt);
    row_print(&c, sides, count, rtt);
}

static void row_mpmc_block(int producers, int consumers, uint32_t capacity, double goal) {
    char name[32];
    row_case c = { { name, "M/s", NULL, true, 0, false, goal },
                   { FLOW_STREAM, FLOW_BLOCK, FLOW_HOT, false, false, producers, consumers,
                     capacity, 0, 0, 0 },
                   RIVAL(FLOW_SLEEPS), 0.5, RUN_MS, 0 };
    snprintf(name, sizeof name, "mpmc_block_%dp%dc_%u", producers, consumers, (unsigned)capacity);
    row_of_peers(&c);
}

static void row_pingpong(const char *name, bool spsc, double goal) {
    static side sides[MAX_SIDES];
    row_case c = { { name, "ns", NULL, false, 0, false, goal },
                   { FLOW_PINGPONG, FLOW_BLOCK, FLOW_HOT, spsc, true, 1, 1, 16, 0, 0, 0 },
                   0, 0.6, RUN_MS, 0 };
    double rtt[2];
    int count = 0;
    if (!bench_wanted(name)) return;
    side_add(&c, sides, &count, &ours, FLOW_BLOCK);
    side_add(&c, sides, &count, &two_words, FLOW_TRY);
    add_peers(&c, sides, &count);
    row_run(&c, sides, count, rtt);
    row_print(&c, sides, count, rtt);
}

static void row_pingpong_crowd(const char *name, bool spsc) {
    bench_crowd crowd;
    bench_crowd_come(&crowd, name);
    row_pingpong(name, spsc, 0);
    bench_crowd_go(&crowd);
}

/* Two rows of the same runs. */
static void row_efficiency(const char *name, int producers, double produce_us, int consumers,
                           double consume_us) {
    static side sides[MAX_SIDES];
    char cpu_name[32];
    row_case c = { { name, "share", NULL, true, 0.93, false, 0 },
                   { FLOW_WORK, FLOW_BLOCK, FLOW_HOT, false, false, producers, consumers, 16, 0, 0,
                     0 },
                   RIVAL(FLOW_SLEEPS), 0.8, 80, 0 };
    const double turn = turn_ns();
    double rtt[2];
    int count = 0;
    int i;
    snprintf(cpu_name, sizeof cpu_name, "%s_cpu", name);
    if (bench_opt.list) bench_wanted(name);
    if (!bench_wanted(cpu_name)) return;
    c.spec.produce_work = (uint32_t)(produce_us * 1e3 / turn);
    c.spec.consume_work = (uint32_t)(consume_us * 1e3 / turn);
    side_add(&c, sides, &count, &ours, FLOW_BLOCK);
    add_peers(&c, sides, &count);
    row_run(&c, sides, count, rtt);
    row_print(&c, sides, count, rtt);
    for (i = 0; i < count; ++i) sides[i].median = sides[i].cpu_median;
    c.row = (bench_row){ cpu_name, "x", NULL, false, 1.30, false, 0 };
    row_print(&c, sides, count, rtt);
}

static void row_idle(void) {
    row_case c = { { "idle_ms_per_s", "ms/s", NULL, false, 0.05, false, 0 },
                   { FLOW_IDLE, FLOW_BLOCK, FLOW_HOT, false, false, 1, 4, 16, 0, 0, 0 },
                   RIVAL(FLOW_SLEEPS), 0, 0, 1 };
    row_of_peers(&c);
}

static void row_wake(void) {
    row_case c = { { "wake_p50_us", "us", NULL, false, 0, false, 0.91 },
                   { FLOW_WAKE, FLOW_BLOCK, FLOW_HOT, true, true, 1, 1, 16, 0, 0, 0 },
                   RIVAL(FLOW_SLEEPS), 0, 0, 100 };
    row_of_peers(&c);
}

static void rows_spsc(void) {
    row_spsc_single(16, 1.1);
    row_spsc_single(64, 1.0);
    row_spsc_single(256, 1.7);
    row_spsc_single(1024, 1.3);
    row_spsc_single(8192, 1.0);
    row_spsc_batch(8, 2.5);
    row_spsc_batch(32, 2.5);
    row_spsc_batch(128, 1.7);
    row_spsc_block_vs_try();
}

static void rows_mpmc(void) {
    static const int shape[][2] = { { 1, 1 }, { 4, 1 }, { 1, 4 }, { 4, 4 } };
    static const double goal[][3] = { { 4, 0, 0 }, { 20, 10, 2 }, { 0, 10, 0 }, { 10, 10, 2 } };
    static const uint32_t depth[] = { 2, 16, 1024 };
    int i;
    int k;
    for (i = 0; i < 4; ++i) {
        for (k = 0; k < 3; ++k) row_mpmc_block(shape[i][0], shape[i][1], depth[k], goal[i][k]);
    }
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN); /* a peer that ends is told by its name */
    bench_start("ring", argc, argv);
    peers_load(argv[0]);
    rows_spsc();
    rows_mpmc();
    row_pingpong("pingpong_spsc", true, 0.59);
    row_pingpong("pingpong_mpmc", false, 0.87);
    row_pingpong_crowd("crowd_pingpong_spsc", true);
    row_pingpong_crowd("crowd_pingpong_mpmc", false);
    row_efficiency("efficiency_1", 4, 20, 1, 1);
    row_efficiency("efficiency_2", 4, 5, 1, 20);
    row_efficiency("efficiency_3", 8, 100, 1, 2);
    row_efficiency("efficiency_4", 4, 10, 4, 10);
    row_idle();
    row_wake();
    return 0;
}
