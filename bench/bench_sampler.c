/* What an index costs: of each order, in mixtures, and as text; beside
   Grain's index_shuffle, called as we are, and the samplers of SPDL, in Python. See bench.h for the
   options; `make bench-sampler` gets the peers. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include "bench.h"
#include "peer_python.h"

#include <dlfcn.h>

#define ROUNDS 9
#define RUN_MS 20.0

typedef uint64_t (*grain_fn)(uint64_t index, uint64_t last, uint32_t seed, uint32_t rounds);

static peer_python python;
static grain_fn grain_shuffle;
static volatile uint64_t sink;

/* ---- samplers ---- */

static spdl_sampler *sampler_of(const spdl_sampler_desc *desc) {
    spdl_sampler *s = NULL;
    BENCH_CHECK(spdl_sampler_create(&s, desc) == SPDL_OK);
    return s;
}

typedef struct indices {
    spdl_sampler *s;
    const spdl__mixture *m;
    uint64_t count; /* of an epoch */
    uint64_t stride; /* 1: one after the other */
} indices;

/* Each run begins another epoch, as far as it is one: that is part of the price. */
static double items_run(const void *arg, uint64_t items) {
    const indices *x = (const indices *)arg;
    static uint64_t epoch;
    uint64_t i, at = 0, sum = 0;
    spdl_index item;
    const uint64_t start = bench_ns();
    ++epoch;
    for (i = 0; i < items; ++i) {
        BENCH_CHECK(spdl_sampler_item(x->s, epoch, at, &item) == SPDL_OK);
        sum += item.index;
        at += x->stride;
        if (at < x->count) continue;
        at -= x->count;
        ++epoch;
    }
    sink += sum;
    return (double)(bench_ns() - start);
}

static double mixture_run(const void *arg, uint64_t items) {
    const indices *x = (const indices *)arg;
    uint64_t i, sum = 0, index, at = 0;
    uint32_t source;
    const uint64_t start = bench_ns();
    for (i = 0; i < items; ++i, at += x->stride) {
        index = spdl__mixture_get(x->m, at, &source);
        sum += index + source;
    }
    sink += sum;
    return (double)(bench_ns() - start);
}

static double grain_run(const void *arg, uint64_t items) {
    const indices *x = (const indices *)arg;
    uint64_t i, sum = 0;
    const uint64_t start = bench_ns();
    for (i = 0; i < items; ++i) sum += grain_shuffle(i % x->count, x->count - 1, 7, 4);
    sink += sum;
    return (double)(bench_ns() - start);
}

static double each_ns(bench_run_fn run, const void *arg) {
    const uint64_t items = bench_calibrate(run, arg, 1000, RUN_MS);
    return run(arg, items) / (double)items;
}

static double items_ns(const void *arg) { return each_ns(items_run, arg); }
static double epoch_ns(const void *arg) { /* with what is made at its begin */
    const indices *x = (const indices *)arg;
    return items_run(arg, x->count) / (double)x->count;
}
static double mixture_ns(const void *arg) { return each_ns(mixture_run, arg); }
static double grain_ns(const void *arg) { return each_ns(grain_run, arg); }

/* ---- rows ---- */

static void order_row(const char *name, spdl_sampler_desc desc, uint64_t stride, double goal) {
    const bool shuffled = desc.order == SPDL_SAMPLE_SHUFFLED && grain_shuffle != NULL;
    const char *peer = shuffled ? "Grain, 4 rounds" : NULL;
    const bench_row row = { name, "ns", peer, false, goal, false, 0 };
    indices x = { NULL, NULL, desc.draws != 0 ? desc.draws : desc.count, stride };
    if (!bench_wanted(name)) return;
    x.s = sampler_of(&desc);
    bench_compare_sides(&row, ROUNDS, desc.count <= 1000000 ? epoch_ns : items_ns, &x,
                        shuffled ? grain_ns : NULL, &x);
    spdl_sampler_destroy(x.s);
}

static void orders(void) {
    spdl_sampler_desc desc = { .order = SPDL_SAMPLE_SHUFFLED };
    desc.count = 4096;
    order_row("shuffled.4096", desc, 1, 0);
    desc.count = 20000000;
    order_row("shuffled.2e7", desc, 1, 14);
    desc.count = (uint64_t)1 << 40;
    order_row("shuffled.2^40", desc, 1, 14);
    desc.count = 1000000;
    desc.order = SPDL_SAMPLE_SEQUENTIAL;
    order_row("sequential", desc, 1, 0);
    desc.order = SPDL_SAMPLE_BLOCKS;
    desc.block = 1000;
    order_row("blocks", desc, 1, 0);
}

static void mixture_row(const char *name, size_t sources, int kind, uint64_t stride) {
    static double weights[65536];
    const bench_row row = { name, "ns", NULL, false, 0, false, 0 };
    const spdl_sampler_desc desc = { .sources = sources, .weights = weights };
    spdl__mixture *m;
    indices x = { NULL, NULL, 0, stride };
    uint64_t random = 5;
    size_t i;
    if (!bench_wanted(name)) return;
    for (i = 0; i < sources; ++i)
        weights[i] = kind == 0 ? 1 : (double)(spdl__mix(random++) >> 40) + 1;
    m = spdl__mixture_make(&desc);
    BENCH_CHECK(m != NULL);
    x.m = m;
    bench_compare_sides(&row, ROUNDS, mixture_ns, &x, NULL, NULL);
    spdl__free(&desc.allocator, m, spdl__mixture_bytes(sources));
}

static double create_ms(const void *arg) {
    const spdl_sampler_desc *desc = (const spdl_sampler_desc *)arg;
    const uint64_t start = bench_ns();
    spdl__mixture *m = spdl__mixture_make(desc);
    BENCH_CHECK(m != NULL);
    spdl__free(&desc->allocator, m, spdl__mixture_bytes(desc->sources));
    return (double)(bench_ns() - start) * 1e-6;
}

static void mixtures(void) {
    static double weights[65536];
    const bench_row create = { "mixture.create.65536", "ms", NULL, false, 0, false, 0 };
    const spdl_sampler_desc desc = { .sources = 65536, .weights = weights };
    uint64_t random = 1;
    size_t i;
    for (i = 0; i < 65536; ++i) weights[i] = (double)(spdl__mix(random++) >> 20) + 1;
    mixture_row("mixture.2", 2, 1, 1);
    mixture_row("mixture.8", 8, 1, 1);
    mixture_row("mixture.8.random", 8, 1, 0x9e3779b97f);
    mixture_row("mixture.8.equal", 8, 0, 1);
    mixture_row("mixture.65536", 65536, 1, 1);
    if (bench_wanted(create.name))
        bench_compare_sides(&create, ROUNDS, create_ms, &desc, NULL, NULL);
}

static double describe_run(const void *arg, uint64_t items) {
    char text[SPDL_STATE_BYTES];
    uint64_t i, sum = 0;
    const uint64_t start = bench_ns();
    for (i = 0; i < items; ++i) {
        spdl__text t = spdl__text_start(text, sizeof(text));
        spdl__sampler_describe((const spdl_sampler *)arg, 0, &t);
        sum += t.length;
    }
    sink += sum;
    return (double)(bench_ns() - start);
}

static double describe_ns(const void *arg) { return each_ns(describe_run, arg); }

static void going_on(void) {
    const bench_row text = { "describe", "ns", NULL, false, 1000, false, 0 };
    if (bench_wanted(text.name)) {
        spdl_sampler_desc desc = { .order = SPDL_SAMPLE_SHUFFLED };
        spdl_sampler *s;
        desc.count = 20000000;
        s = sampler_of(&desc);
        bench_compare_sides(&text, ROUNDS, describe_ns, s, NULL, NULL);
        spdl_sampler_destroy(s);
    }
}

/* ---- SPDL: whole epochs ---- */

typedef struct whole {
    spdl_sampler_desc desc;
    const char *operation;
} whole;

static double whole_ms(const void *arg) {
    const whole *w = (const whole *)arg;
    static uint64_t epoch;
    spdl_sampler *s = sampler_of(&w->desc);
    uint64_t i = 0, sum = 0;
    spdl_index item;
    const uint64_t start = bench_ns();
    for (++epoch; spdl_sampler_item(s, epoch, i, &item) == SPDL_OK; ++i) sum += item.index;
    sink += sum;
    spdl_sampler_destroy(s);
    BENCH_CHECK(i == w->desc.count);
    return (double)(bench_ns() - start) * 1e-6;
}

static double spdl_ms(const void *arg) {
    const whole *w = (const whole *)arg;
    char count[32];
    snprintf(count, sizeof count, "%llu", (unsigned long long)w->desc.count);
    return peer_python_ns(&python, w->operation, 1, count) * 1e-6;
}

static size_t held;

static void *held_alloc(size_t bytes, size_t align, void *user) {
    void *memory = NULL;
    (void)user;
    if (posix_memalign(&memory, align < sizeof(void *) ? sizeof(void *) : align, bytes) != 0)
        return NULL;
    held += bytes;
    return memory;
}

static void held_free(void *memory, size_t bytes, void *user) {
    (void)user;
    held -= bytes;
    free(memory);
}

static double held_bytes(const void *arg) {
    spdl_sampler_desc desc = ((const whole *)arg)->desc;
    spdl_sampler *s;
    spdl_index item;
    double bytes;
    desc.allocator.alloc_fn = held_alloc;
    desc.allocator.free_fn = held_free;
    s = sampler_of(&desc);
    BENCH_CHECK(spdl_sampler_item(s, 1, 0, &item) == SPDL_OK);
    bytes = (double)held;
    spdl_sampler_destroy(s);
    return bytes;
}

static double spdl_bytes(const void *arg) { return spdl_ms(arg) * 1e6; }

static void whole_row(const char *name, const char *unit, const whole *w, bench_side_fn ours,
                      bench_side_fn peer) {
    const bool there = strstr(python.versions, "spdl") != NULL;
    const bench_row row = { name, unit, there ? "SPDL, Python" : NULL, false, 0, false, 0 };
    if (bench_wanted(name)) bench_compare_sides(&row, 6, ours, w, there ? peer : NULL, w);
}

static void epochs(void) {
    whole w = { { .order = SPDL_SAMPLE_SHUFFLED }, "shuffled" };
    w.desc.count = 1000000;
    whole_row("epoch.shuffled.1e6", "ms", &w, whole_ms, spdl_ms);
    w.desc.order = SPDL_SAMPLE_SEQUENTIAL;
    w.operation = "in_order";
    whole_row("epoch.in_order.1e6", "ms", &w, whole_ms, spdl_ms);
    w.desc.order = SPDL_SAMPLE_SHUFFLED;
    w.desc.count = 20000000;
    w.operation = "bytes";
    whole_row("memory.2e7", "bytes", &w, held_bytes, spdl_bytes);
}

/* Grain's function, from the library that Python's second line names. */
static void find_grain(void) {
    char line[512] = "-";
    void *library, *symbol = NULL;
    if (python.versions[0] != '\0' && fgets(line, sizeof line, python.from) == NULL) return;
    line[strcspn(line, "\n")] = '\0';
    library = line[0] == '-' ? NULL : dlopen(line, RTLD_NOW | RTLD_LOCAL);
    if (library != NULL) symbol = dlsym(library, "_ZN5grain6random13index_shuffleEmmjj");
    memcpy(&grain_shuffle, &symbol, sizeof grain_shuffle);
}

int main(int argc, char **argv) {
    const char *program = getenv("BENCH_SAMPLER_PYTHON");
    bench_start("sampler", argc, argv);
    signal(SIGPIPE, SIG_IGN);
    if (program != NULL && *program != '\0' && !bench_opt.list) {
        peer_python_begin(&python, program, "bench/sampler_peers.py");
        find_grain();
        fprintf(stderr, "peers: %s\n", python.versions);
    }
    orders();
    mixtures();
    going_on();
    epochs();
    return 0;
}
