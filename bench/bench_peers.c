/* bench_peers.c - what readers use today, beside us, in one run.

       make bench-peers ARGS="[--json] [--quick] [--list] [TEXT]"

   Every side calls the same C functions (peer_work.c). Sides in Python call them by ctypes, without
   Python's lock. The consumer gets the items in order, in batches in place, and adds them up. A
   side with another sum ends the bench. All have the same window of items in flight, and as
   many threads or processes as there are processors, if the row does not say how many. A round runs
   all sides in turns, each of C in a process of its own. A side whose run had other programs on
   more than 6 % of the processors is run again, up to twice; what is left is marked.

   io_default, io_best  calls that sleep 10 ms and then compute 0.2 ms, items of 4 KB, batches of
                   32, steps of 5 ms: see below
   jpeg            a folder of JPEGs of 500 x 375: read, decode, resize to 224 x 224, batches of 32;
                   the consumer computes 5 ms for each
   files           64,000 files of 4 KB, batches of 32; the consumer only takes
   tokens_cached   batches of 4 windows of 1,024 tokens of a shard in memory, a read each
   tokens_late     the same where each read comes 5 ms late, before steps of 5 ms; 4 threads
   http_64, _256   pages of 8 KB over HTTP, 5 ms late, so many in flight
   neighbour_one, _all  steps of 20 ms that compute on one, or on all processors, during the loading
                   of 8 JPEGs: steps a second. "alone": of those without loading
   tail            1 % of the items take 50 times as long, in order, batches of 32
   npz_stored, npz_deflated  arrays of 1.5 MB out of .npz files; each side by the reader it has
   `make bench-peers` also runs the rows frames_missed_default of bench_frames.c.

   io_default: each side with its own default. Ours: nothing written but .concurrency = SPDL_ALL
   and SPDL_SINK(3). Pool by hand, oneTBB, OpenMP: a thread for each processor. std::async: a thread
   for each item, 64 in flight. PyTorch: num_workers=0, no process. SPDL: concurrency=1, sink of 3;
   build has no default of num_threads, here a thread for each processor. Grain: ReadOptions(), 16
   threads. io_best: 64 threads or processes for every side, ours with 64 and 64 written, and once
   more with nothing written. In both rows a std::async is an item, Grain reads items and makes
   batches of them, and the first third of a run, in which ours gets its threads, is not timed.

   A rate is that between two batches, a window behind the first and a window before the last: then
   all have as much ready as they will. ratio: how many times as fast as this side the fastest of
   ours is. CPU us: of an item, without the steps of the consumer. MB: the most memory of the
   process, of PyTorch with its worker processes. first ms: from the start to the first batch; of a
   side in Python without the import. again: runs that were repeated. "a batch a call": the
   function of a row makes a whole batch. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define SPDL_IMPLEMENTATION
#include "../spdl.h"

#include "bench.h"
#include "peer_http.h"
#include "peer_python.h"
#include "peer_work.h"
#include "pipe.h"

#include <dlfcn.h>
#include <sys/stat.h>

#define FOLDER "build/bench/peers_data"
enum { MAX_SIDES = 20, LEAST_BATCHES = 16, MAX_SLOTS = 64, ROUNDS = 11, QUICK_ROUNDS = 7 };
#define DISTURBED 0.06

/* Of the sides: which rows they take part in. */
enum { C_SIDES = 1, PYTHON = 2, SLOW = 4, HTTP = 8, SOLE = 16, POLITE = 32, ONE_CALL = 64 };
enum { BARE = 128 }; /* nothing written */
enum { OWN = -1 };   /* workers: the default of each side */

typedef struct job {
    const char *name, *unit;
    peer_kind kind;
    int batch, window, late_us, workers; /* workers 0: as many as processors */
    double step_ms;
    int step_threads; /* -1: on all processors */
    bool long_window; /* ours: all of the window in front of the batches */
    unsigned most;    /* items */
    unsigned sides;   /* parts */
} job;

#define NPZ_SIDES (C_SIDES | PYTHON | SOLE)
static const job jobs[] = {
    { "io_default", "item/s", PEER_IO, 32, 64, 10000, OWN, 5, 1, false, 32768, C_SIDES | PYTHON },
    { "io_best", "item/s", PEER_IO, 32, 128, 10000, 64, 5, 1, false, 32768,
      C_SIDES | PYTHON | BARE },
    { "jpeg", "img/s", PEER_JPEG, 32, 128, 0, 0, 5, 1, false, 4096,
      C_SIDES | PYTHON | SOLE | ONE_CALL },
    { "files", "files/s", PEER_FILE, 32, 128, 0, 0, 0, 0, false, PEER_FILES,
      C_SIDES | PYTHON | SOLE | ONE_CALL },
    { "tokens_cached", "batch/s", PEER_TOKENS, 1, 4, 0, 0, 0, 0, false, 65536,
      C_SIDES | PYTHON | SOLE },
    { "tokens_late", "step/s", PEER_TOKENS, 1, 4, 5000, 4, 5, 1, false, 4096,
      C_SIDES | PYTHON | SOLE },
    { "http_64", "page/s", PEER_HTTP, 32, 128, 0, 64, 0, 0, false, 32768, C_SIDES | HTTP | SLOW },
    { "http_256", "page/s", PEER_HTTP, 32, 512, 0, 256, 0, 0, false, 32768, C_SIDES | HTTP | SLOW },
    { "neighbour_one", "step/s", PEER_JPEG, 8, 32, 0, 0, 20, 1, false, 4096,
      C_SIDES | PYTHON | POLITE },
    { "neighbour_all", "step/s", PEER_JPEG, 8, 32, 0, 0, 20, -1, false, 4096,
      C_SIDES | PYTHON | POLITE },
    { "tail", "item/s", PEER_TAIL, 32, 128, 0, 0, 0, 0, true, 65536, C_SIDES | PYTHON | ONE_CALL },
    { "npz_stored", "file/s", PEER_STORED, 1, 8, 0, 0, 0, 0, false, 16384, NPZ_SIDES },
    { "npz_deflated", "file/s", PEER_DEFLATED, 1, 8, 0, 0, 0, 0, false, 16384, NPZ_SIDES },
};

typedef struct outcome {
    double rate;   /* items a second; of rows of steps: batches */
    double cpu_us; /* of an item */
    double peak_mb;
    double first_ms;
    double others;   /* share of the processors that other programs had */
    double extra_ns; /* CPU time that is the bench's, but not this process's or its children's */
} outcome;

typedef struct side side;
typedef void (*side_fn)(const side *s, const job *j, uint64_t items);

struct side {
    const char *name;
    unsigned parts; /* takes part where the row has all of these */
    side_fn run;    /* NULL: Python's */
    const pipe_peer *peer;
    int python;   /* which */
    bool variant; /* polite; blocking; a batch in one call; nothing written */
    uint64_t items;
    double values[BENCH_MAX_ROUNDS];
    outcome got[BENCH_MAX_ROUNDS];
    int again;
    bool out; /* it could not do the row */
};

/* What the consumer of a run got, in the process of that run. */
static struct {
    const job *job;
    uint64_t from, to; /* the batches between which it is timed */
    uint64_t begun, first, from_ns, to_ns, sum, batches;
} got;

static http_server server;

static int cores(void) {
    cpu_set_t may;
    return bench_allowed(&may);
}

static int workers_of(const job *j) {
    const int n = cores();
    return j->workers > 0 ? j->workers : n < 2 ? 2 : n;
}

static int step_threads(const job *j) { return j->step_threads < 0 ? cores() : j->step_threads; }

static uint64_t items_of_batch(const job *j) { return (uint64_t)j->batch; }
static uint64_t slots_of(const job *j) { return (uint64_t)(j->window / j->batch); }

/* The first batch that is timed, of so many. */
static uint64_t timed_from(const job *j, uint64_t batches) {
    const uint64_t slots = slots_of(j);
    return slots + (j->kind == PEER_IO ? (batches - 2 * slots) / 3 : 0);
}

static void make(uint64_t number, void *item) {
    if (!peer_make(number, item)) bench_fail("item %llu was not made", (unsigned long long)number);
}

/* The consumer: a batch has come. */
static void take(const void *data, size_t bytes) {
    const uint64_t now = bench_ns();
    if (got.batches == 0) got.first = now;
    if (got.batches == got.from) got.from_ns = now;
    if (got.batches++ == got.to) got.to_ns = now;
    got.sum = peer_take(got.sum, data, bytes);
    peer_step(got.job->step_ms, step_threads(got.job));
}

/* ---- ours ---- */

static size_t item_size; /* of the row */

SPDL_FN(make_item, spdl_index, void) {
    if ((*out = spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    if (!peer_make(in->index, *out)) return spdl_fail(task, "the item was not made");
    return SPDL_OK;
}

/* `bytes` of each item that comes; 0: they are batches in place. */
static void run_rows(spdl_pipeline *p, size_t bytes) {
    spdl_result result;
    void *item;
    while ((result = spdl_pipeline_next(p, &item, SPDL_FOREVER)) == SPDL_OK) {
        if (bytes == 0) take(((spdl_batch *)item)->data, ((spdl_batch *)item)->count * item_size);
        else take(item, bytes);
        if (bytes == 0) spdl_batch_free((spdl_batch *)item);
        else spdl_buffer_free(item);
    }
    if (result != SPDL_END) bench_fail("%s", spdl_pipeline_error(p)->text);
    spdl_pipeline_destroy(p);
}

static void run_ours(const side *s, const job *j, uint64_t items) {
    const bool bare = j->workers == OWN || (s->variant && (j->sides & BARE) != 0);
    const int sink = bare ? 3 : j->long_window ? 1 : (j->window - j->batch) / j->batch;
    spdl_stage pipe = SPDL_PIPE(make_item, .concurrency = SPDL_ALL, .item_bytes = item_size);
    spdl_pipeline_desc desc = { .workers = bare ? 0 : j->workers };
    spdl_pipeline *p;
    desc.policy.polite = s->variant && (j->sides & POLITE) != 0;
    if (desc.workers > 0) pipe.concurrency = desc.workers;
    if (j->long_window) pipe.buffer_size = j->window;
    if (j->batch == 1) {
        BENCH_CHECK(spdl_pipeline_create(&p, &desc,
                                         SPDL_STAGES(SPDL_COUNT(items), pipe, SPDL_SINK(sink))) ==
                    SPDL_OK);
    } else {
        pipe.item_bytes = 0;
        BENCH_CHECK(spdl_pipeline_create(&p, &desc,
                                         SPDL_STAGES(SPDL_COUNT(items), pipe,
                                                     SPDL_BATCH(j->batch, .item_bytes = item_size),
                                                     SPDL_SINK(sink))) == SPDL_OK);
    }
    run_rows(p, j->batch > 1 ? 0 : item_size);
}

/* As the header advises for small items: one call fills a batch. */
SPDL_FN(make_batch, spdl_batch, void) {
    if ((*out = spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    for (size_t i = 0; i < in->count; ++i) {
        const spdl_index *at = (const spdl_index *)in->items[i];
        if (!peer_make(at->index, (char *)*out + i * item_size))
            return spdl_fail(task, "the item was not made");
    }
    return SPDL_OK;
}

static void run_ours_batches(const side *s, const job *j, uint64_t items) {
    const size_t bytes = items_of_batch(j) * item_size;
    spdl_pipeline *p;
    (void)s;
    BENCH_CHECK(spdl_pipeline_create(
                    &p, NULL,
                    SPDL_STAGES(SPDL_COUNT(items), SPDL_BATCH(j->batch),
                                SPDL_PIPE(make_batch, .concurrency = SPDL_ALL, .item_bytes = bytes),
                                SPDL_SINK(j->window / j->batch - 1))) == SPDL_OK);
    run_rows(p, bytes);
}

SPDL_FN(path_of, spdl_index, char) {
    *out = ((char(*)[128])spdl_ctx(task))[in->index % PEER_SHARDS];
    return SPDL_OK;
}

static void run_ours_npz(const side *s, const job *j, uint64_t items) {
    static char paths[PEER_SHARDS][128];
    spdl_npz_bundle *bundle;
    spdl_pipeline *p;
    (void)s;
    for (int i = 0; i < PEER_SHARDS; ++i) {
        snprintf(paths[i], sizeof paths[i], "%s/npz/%s_%02d.npz", FOLDER,
                 j->kind == PEER_STORED ? "stored" : "deflated", i);
    }
    BENCH_CHECK(
        spdl_pipeline_create(&p, NULL,
                             SPDL_STAGES(SPDL_COUNT(items), SPDL_PIPE(path_of, .ctx = paths),
                                         SPDL_NPZ(NULL, .concurrency = SPDL_ALL),
                                         SPDL_SINK(j->window - 1))) == SPDL_OK);
    while (SPDL_NEXT(p, &bundle, SPDL_FOREVER) == SPDL_OK) {
        take(spdl_npz_bundle_find(bundle, "images")->data, item_size);
        spdl_npz_bundle_free(bundle);
    }
    if (spdl_pipeline_failed(p)) bench_fail("%s", spdl_pipeline_error(p)->text);
    spdl_pipeline_destroy(p);
}

static void run_ours_of(const side *s, const job *j, uint64_t items) {
    if (j->kind == PEER_STORED || j->kind == PEER_DEFLATED) run_ours_npz(s, j, items);
    else run_ours(s, j, items);
}

#if PEER_CURL
static http_page pages[2 * HTTP_MOST];

typedef struct client {
    http_client http;
    spdl_ring *asked;
} client;

/* A stage that hands a request to the thread of the client, as examples/http_fetch.c does. */
SPDL_FN(get_page, spdl_index, void) {
    client *c = (client *)spdl_ctx(task);
    http_page *page = &pages[in->index % (2 * HTTP_MOST)];
    page->number = in->index;
    if ((page->data = (char *)spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    page->call = spdl_defer(task);
    if (spdl_ring_try_push(c->asked, &page) != SPDL_OK) return spdl_fail(task, "no client");
    curl_multi_wakeup(c->http.multi);
    return SPDL_PENDING;
}

static void complete_page(void *ctx, http_page *page) {
    (void)ctx;
    spdl_complete(page->call, SPDL_OK, page->data);
}

static void *client_main(void *arg) {
    client *c = (client *)arg;
    spdl_result result;
    http_page *page;
    for (;;) {
        while ((result = spdl_ring_try_pop(c->asked, &page)) == SPDL_OK) http_get(&c->http, page);
        http_run(&c->http);
        if (result == SPDL_CLOSED && c->http.in_flight == 0) return NULL;
        curl_multi_poll(c->http.multi, NULL, 0, 1000, NULL);
    }
}

static void run_ours_deferred(const side *s, const job *j, uint64_t items) {
    const spdl_ring_desc ring = { .capacity = HTTP_MOST };
    const spdl_pipeline_desc desc = { .workers = 1 };
    pthread_t thread;
    spdl_pipeline *p;
    client c;
    (void)s;
    http_client_open(&c.http, server.port);
    c.http.end = complete_page;
    BENCH_CHECK(spdl_ring_create(&c.asked, &ring) == SPDL_OK);
    peer_thread(&thread, client_main, &c);
    BENCH_CHECK(spdl_pipeline_create(
                    &p, &desc,
                    SPDL_STAGES(SPDL_COUNT(items),
                                SPDL_PIPE(get_page, .ctx = &c, .concurrency = j->workers,
                                          .deferred = true, .buffer_size = j->workers),
                                SPDL_BATCH(j->batch, .item_bytes = item_size),
                                SPDL_SINK((j->window - j->workers) / j->batch))) == SPDL_OK);
    run_rows(p, 0);
    spdl_ring_close(c.asked);
    curl_multi_wakeup(c.http.multi);
    pthread_join(thread, NULL);
    http_client_close(&c.http);
    spdl_ring_destroy(c.asked, NULL, NULL);
}

/* curl on the thread of the consumer: no hand-off at all. */
static void count_page(void *ctx, http_page *page) {
    ++((int *)ctx)[page->number / items_of_batch(got.job) % MAX_SLOTS];
}

static void run_multi(const side *s, const job *j, uint64_t items) {
    const uint64_t batch = items_of_batch(j), slots = slots_of(j);
    char *data = (char *)peer_alloc(slots * batch * item_size);
    int done[MAX_SLOTS] = { 0 };
    uint64_t next = 0, taken = 0;
    http_client c;
    (void)s;
    http_client_open(&c, server.port);
    c.end = count_page;
    c.ctx = done;
    while (taken * batch < items) {
        for (; next < items && next < (taken + slots) * batch && c.in_flight < j->workers; ++next) {
            http_page *page = &pages[next % (2 * HTTP_MOST)];
            page->number = next;
            page->data = data + next % (slots * batch) * item_size;
            http_get(&c, page);
        }
        http_run(&c);
        while (done[taken % MAX_SLOTS] == j->batch) {
            take(data + taken % slots * batch * item_size, batch * item_size);
            done[taken++ % MAX_SLOTS] = 0;
        }
        if (taken * batch < items) curl_multi_poll(c.multi, NULL, 0, 1000, NULL);
    }
    http_client_close(&c);
    free(data);
}
#endif

/* ---- by hand ---- */

static void run_single(const side *s, const job *j, uint64_t items) {
    const uint64_t batch = items_of_batch(j);
    char *data = (char *)peer_alloc(batch * item_size);
    (void)s;
    for (uint64_t i = 0; i < items; ++i) {
        make(i, data + i % batch * item_size);
        if (i % batch == batch - 1) take(data, batch * item_size);
    }
    free(data);
}

/* Steps without any loading. */
static void run_alone(const side *s, const job *j, uint64_t items) {
    static const char nothing[64];
    (void)s;
    for (uint64_t i = 0; i < items / items_of_batch(j); ++i) take(nothing, sizeof nothing);
}

/* A pool of 20 lines: threads take numbers, a batch is there when its count is full. */
typedef struct hand {
    uint64_t batch, slots, items, next, taken;
    char *data;
    int done[MAX_SLOTS];
    pthread_mutex_t mutex;
    pthread_cond_t room, ready;
} hand;

static void *hand_main(void *arg) {
    hand *h = (hand *)arg;
    pthread_mutex_lock(&h->mutex);
    for (;;) {
        uint64_t i;
        while (h->next < h->items && h->next >= (h->taken + h->slots) * h->batch) {
            pthread_cond_wait(&h->room, &h->mutex);
        }
        if (h->next >= h->items) break;
        i = h->next++;
        pthread_mutex_unlock(&h->mutex);
        make(i, h->data + i % (h->slots * h->batch) * item_size);
        pthread_mutex_lock(&h->mutex);
        if (++h->done[i / h->batch % h->slots] == (int)h->batch) pthread_cond_signal(&h->ready);
    }
    pthread_mutex_unlock(&h->mutex);
    return NULL;
}

static void run_hand(const side *s, const job *j, uint64_t items) {
    hand h = { .batch = items_of_batch(j), .items = items };
    const int count = workers_of(j);
    pthread_t threads[PEER_MAX_THREADS];
    (void)s;
    h.slots = slots_of(j);
    h.data = (char *)peer_alloc(h.slots * h.batch * item_size);
    peer_mutex_init(&h.mutex);
    pthread_cond_init(&h.room, NULL);
    pthread_cond_init(&h.ready, NULL);
    for (int i = 0; i < count; ++i) peer_thread(&threads[i], hand_main, &h);
    while (h.taken * h.batch < items) {
        const uint64_t slot = h.taken % h.slots;
        pthread_mutex_lock(&h.mutex);
        while (h.done[slot] < (int)h.batch) pthread_cond_wait(&h.ready, &h.mutex);
        h.done[slot] = 0;
        pthread_mutex_unlock(&h.mutex);
        take(h.data + slot * h.batch * item_size, h.batch * item_size);
        pthread_mutex_lock(&h.mutex);
        ++h.taken;
        pthread_cond_broadcast(&h.room);
        pthread_mutex_unlock(&h.mutex);
    }
    for (int i = 0; i < count; ++i) pthread_join(threads[i], NULL);
    free(h.data);
}

/* ---- of other libraries, by pipe.h ---- */

typedef struct place {
    uint64_t number;
    void *item;
} place;

typedef struct flow {
    uint64_t items, ring; /* places */
    char *data;
    place places[PIPE_MAX_LIVE];
} flow;

static bool flow_feed(void *ctx, uint64_t number, void **item) {
    flow *f = (flow *)ctx;
    place *at = &f->places[number % f->ring];
    if (number >= f->items) return false;
    at->number = number;
    at->item = f->data + number % f->ring * item_size;
    *item = at;
    return true;
}

static void *flow_work(void *ctx, void *item) {
    (void)ctx;
    make(((place *)item)->number, ((place *)item)->item);
    return item;
}

static void run_peer(const side *s, const job *j, uint64_t items) {
    const uint64_t batch = items_of_batch(j);
    static flow f;
    pipe_spec spec = { .pipes = 1,
                       .concurrency = workers_of(j),
                       .workers = workers_of(j),
                       .buffer_size = j->window / 2,
                       .live = j->window,
                       .batch = j->kind == PEER_IO ? 1 : j->batch,
                       .pulled = true,
                       .ctx = &f,
                       .feed = flow_feed,
                       .work = flow_work };
    pipe_outlet *o;
    void *item;
    f.items = items;
    f.ring = (uint64_t)j->window + 2 * batch;
    f.ring += (batch - f.ring % batch) % batch;
    f.data = (char *)peer_alloc(f.ring * item_size);
    o = pipe_open(s->peer, &spec);
    for (uint64_t i = 0; pipe_next(o, &item); ++i) {
        if (i % batch < batch - 1) continue;
        take((char *)((place *)item)->item - (batch - 1) * item_size, batch * item_size);
    }
    pipe_close(o);
    free(f.data);
}

/* ---- the sides ---- */

static side sides[MAX_SIDES] = {
    { .name = "spdl.h", .parts = 0, .run = run_ours_of },
    { .name = "spdl.h, nothing written", .parts = BARE, .run = run_ours_of, .variant = true },
    { .name = "spdl.h, polite", .parts = POLITE, .run = run_ours_of, .variant = true },
    { .name = "spdl.h, a batch a call", .parts = ONE_CALL, .run = run_ours_batches },
#if PEER_CURL
    { .name = "spdl.h, a thread each", .parts = HTTP, .run = run_ours },
    { .name = "curl on the consumer", .parts = HTTP, .run = run_multi },
#endif
    { .name = "pool by hand", .parts = C_SIDES, .run = run_hand },
    { .name = "one thread", .parts = SOLE, .run = run_single },
    { .name = "alone", .parts = POLITE, .run = run_alone },
};
static int side_count;

static const char *const packages[][2] = {
    { "pipe_tbb.so", "oneTBB pipeline" },
    { "pipe_omp.so", "OpenMP tasks" },
    { "pipe_async.so", "std::async" },
};

static const char *const libraries[] = { "torch", "spdl", "grain" };
#define LIBRARIES ((int)(sizeof libraries / sizeof libraries[0]))
static peer_python python[LIBRARIES];

static void add_side(const side *s) {
    BENCH_CHECK(side_count < MAX_SIDES);
    sides[side_count++] = *s;
}

static void add_package(const char *folder, const char *const package[2]) {
    const pipe_peer *table = NULL;
    pipe_plugin_fn plugin;
    char path[1100];
    void *library, *found;
    int count;
    snprintf(path, sizeof path, "%s/%s", folder, package[0]);
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    found = library != NULL ? dlsym(library, "pipe_plugin") : NULL;
    if (found == NULL) {
        fprintf(stderr, "left out: %s (see %s.log)\n", package[1], path);
        return;
    }
    memcpy(&plugin, &found, sizeof plugin);
    for (count = plugin(&table); count > 0; --count, ++table) {
        const side s = { .name = table->name, .parts = C_SIDES, .run = run_peer, .peer = table };
        if (strcmp(table->name, package[1]) == 0) add_side(&s);
    }
}

static void add_python(const char *program, int which) {
    static const struct {
        int of;
        const char *name;
        unsigned parts;
        bool variant;
    } all[] = {
        { 0, "PyTorch", PYTHON, false },
        { 0, "PyTorch, a batch a call", ONE_CALL, true },
        { 1, "SPDL", PYTHON, false },
        { 1, "SPDL, a batch a call", ONE_CALL, true },
        { 1, "SPDL, a thread each", SLOW, false },
        { 2, "Grain", PYTHON, false },
    };
    char script[64];
    snprintf(script, sizeof script, "bench/peer_rows.py");
    setenv("PEER_LIBRARY", libraries[which], 1);
    if (program != NULL) peer_python_begin(&python[which], program, script);
    if (python[which].versions[0] == '\0' || python[which].versions[0] == '-') {
        fprintf(stderr, "left out: %s (not in the Python of the bench)\n", libraries[which]);
        return;
    }
    fprintf(bench_opt.json ? stderr : stdout, "%s\n", python[which].versions);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) {
        const side s = {
            .name = all[i].name, .parts = all[i].parts, .python = which, .variant = all[i].variant
        };
        if (all[i].of == which) add_side(&s);
    }
}

/* The .npz files are NumPy's: any of the libraries has it. */
static void make_arrays(void) {
    char answer[512];
    for (int i = 0; i < LIBRARIES; ++i) {
        if (python[i].versions[0] == '\0' || python[i].versions[0] == '-') continue;
        peer_python_ask(&python[i], "npz", 0, "npz:" FOLDER, answer, sizeof answer);
        return;
    }
}

/* ---- a run ---- */

static double peak_mb(void) {
    char line[256];
    double kib = 0;
    FILE *file = fopen("/proc/self/status", "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (strncmp(line, "VmHWM:", 6) == 0) kib = atof(line + 6);
    }
    if (file != NULL) fclose(file);
    return kib / 1024;
}

typedef struct run_figures { /* by the process of a run */
    double first_ns, span_ns, cpu_ns, mb, extra_ns;
    uint64_t sum;
} run_figures;

static run_figures run_here(const side *s, const job *j, uint64_t items) {
    const double cpu = bench_cpu_ns();
    run_figures t = { 0 };
    memset(&got, 0, sizeof got);
    got.job = j;
    got.from = timed_from(j, items / items_of_batch(j));
    got.to = items / items_of_batch(j) - 1 - slots_of(j);
    got.begun = bench_ns();
    s->run(s, j, items);
    t.cpu_ns = bench_cpu_ns() - cpu;
    t.first_ns = (double)(got.first - got.begun);
    t.span_ns = (double)(got.to_ns - got.from_ns);
    t.mb = peak_mb();
    t.sum = got.sum;
    return t;
}

static run_figures run_child(const side *s, const job *j, uint64_t items) {
    run_figures t;
    int ends[2];
    pid_t child;
    ssize_t bytes;
    fflush(NULL);
    BENCH_CHECK(pipe(ends) == 0);
    child = fork();
    BENCH_CHECK(child >= 0);
    if (child == 0) {
        alarm(BENCH_HANG_SECONDS - 5);
        t = run_here(s, j, items);
        _exit(write(ends[1], &t, sizeof t) == (ssize_t)sizeof t ? 0 : 1);
    }
    close(ends[1]);
    bytes = read(ends[0], &t, sizeof t);
    close(ends[0]);
    waitpid(child, NULL, 0);
    if (bytes != (ssize_t)sizeof t) bench_fail("%s came to no result", s->name);
    return t;
}

/* False: it cannot do that row. */
static bool run_python(side *s, const job *j, uint64_t items, run_figures *t) {
    char what[700], answer[512];
    unsigned long long sum;
    snprintf(what, sizeof what, "%d:%d:%d:%d:%d:%d:%g:%d:%d:%s", j->kind, j->late_us, server.port,
             j->batch, j->workers == OWN ? 0 : workers_of(j), j->window, j->step_ms,
             step_threads(j), s->variant, FOLDER);
    memset(t, 0, sizeof *t);
    if (!peer_python_ask(&python[s->python], libraries[s->python], (int)items, what, answer,
                         sizeof answer)) {
        return false;
    }
    BENCH_CHECK(sscanf(answer, "%lf %lf %lf %lf %lf %llu", &t->first_ns, &t->span_ns, &t->cpu_ns,
                       &t->mb, &t->extra_ns, &sum) == 6);
    t->sum = sum;
    return true;
}

static uint64_t *sums; /* behind each batch of the row */
static uint64_t sums_known;

static void sum_batches(const job *j, uint64_t batches) {
    const uint64_t batch = items_of_batch(j);
    char *data = (char *)peer_alloc(batch * item_size);
    if (sums == NULL) sums = (uint64_t *)peer_alloc((1 << 20) * sizeof *sums);
    for (; sums_known < batches; ++sums_known) {
        for (uint64_t i = 0; i < batch; ++i) {
            BENCH_CHECK(peer_remake(sums_known * batch + i, data + i * item_size));
        }
        sums[sums_known] =
            peer_take(sums_known > 0 ? sums[sums_known - 1] : 0, data, batch * item_size);
    }
    free(data);
}

static bool run_side(side *s, const job *j, outcome *o) {
    const uint64_t items = s->items, batches = items / items_of_batch(j);
    const double server_ns = http_cpu_ns(&server), all = cores();
    const bool steps = (j->sides & POLITE) != 0;
    bench_moment since;
    run_figures t;
    bench_now_with(s->name);
    if (s->run != run_alone) sum_batches(j, batches);
    bench_now_with(s->name);
    since = bench_moment_now();
    if (s->run != NULL) t = run_child(s, j, items);
    else if (!run_python(s, j, items, &t)) return false;
    t.extra_ns += http_cpu_ns(&server) - server_ns;
    o->others = bench_others(&since) - t.extra_ns / ((double)(bench_ns() - since.ns) * all);
    if (o->others < 0) o->others = 0;
    if (s->run != run_alone && t.sum != sums[batches - 1]) bench_fail("%s: wrong items", s->name);
    o->rate = (double)(batches - 1 - slots_of(j) - timed_from(j, batches)) *
              (steps ? 1 : j->batch) * 1e9 / t.span_ns;
    o->cpu_us =
        (t.cpu_ns - (double)batches * j->step_ms * 1e6 * step_threads(j)) * 1e-3 / (double)items;
    o->peak_mb = t.mb;
    o->first_ms = t.first_ns * 1e-6;
    return true;
}

/* How many items a run needs. */
static void calibrate(side *s, const job *j) {
    const double run_ns = (bench_opt.quick ? 350e6 : 1000e6) * (j->kind == PEER_IO ? 3 : 1);
    const uint64_t batch = items_of_batch(j), most = j->most / batch;
    const uint64_t slots = slots_of(j);
    uint64_t least = 2 * slots + (3 * slots > LEAST_BATCHES ? 3 * slots : LEAST_BATCHES);
    uint64_t batches;
    outcome o;
    if (j->workers == OWN) least = 4 * slots; /* some make 95 items a second */
    batches = least;
    for (;;) {
        s->items = batches * batch;
        if (!run_side(s, j, &o)) {
            s->out = true;
            return;
        }
        const double took =
            (double)batches * 1e9 / o.rate * ((j->sides & POLITE) != 0 ? 1 : j->batch);
        if (took >= run_ns / 8 || batches >= most) {
            batches = (uint64_t)((double)batches * run_ns / took);
            break;
        }
        batches *= 4;
    }
    if (batches < least) batches = least;
    s->items = (batches < most ? batches : most) * batch;
}

/* ---- rows ---- */

static bool takes_part(const side *s, const job *j) {
    return (s->parts & ~j->sides) == 0 && !s->out;
}

/* Disturbed runs are repeated. */
static void run_round(side *s, const job *j, int round, int most_again) {
    outcome o, best = { .others = 2 };
    for (int try = 0; try < 3; ++try) {
        if (try > 0 && s->again >= most_again) break;
        s->again += try > 0;
        if (!run_side(s, j, &o)) bench_fail("%s fails now", s->name);
        if (o.others < best.others) best = o;
        if (best.others <= DISTURBED) break;
    }
    s->got[round] = best;
    s->values[round] = best.rate;
}

static double median_of(const side *s, int rounds, size_t offset) {
    double values[BENCH_MAX_ROUNDS];
    for (int i = 0; i < rounds; ++i) {
        memcpy(&values[i], (const char *)&s->got[i] + offset, sizeof values[i]);
    }
    return bench_quantile(values, (size_t)rounds, 0.5);
}
#define MEDIAN(s, rounds, field) median_of(s, rounds, offsetof(outcome, field))

static double most_others(const side *s, int rounds) {
    double most = 0;
    for (int i = 0; i < rounds; ++i) {
        if (s->got[i].others > most) most = s->got[i].others;
    }
    return most;
}

/* The fastest of ours. */
static const side *best_of_ours(const job *j, int rounds) {
    const side *best = &sides[0];
    for (int i = 1; i < side_count; ++i) {
        const side *s = &sides[i];
        if (!takes_part(s, j) || strncmp(s->name, "spdl.h", 6) != 0) continue;
        if (bench_median(s->values, rounds) > bench_median(best->values, rounds)) best = s;
    }
    return best;
}

static void print_side(const side *s, const side *us, const job *j, int rounds) {
    bench_row row = { j->name, j->unit, NULL, true, 0, false, 0 };
    const bench_sides own = { s->values, NULL, rounds, 1 };
    const bench_sides both = { us->values, s->values, rounds, 1 };
    const spdl_interval value = bench_interval(&row, &own);
    const double median = bench_median(s->values, rounds);
    const double others = most_others(s, rounds);
    spdl_interval ratio;
    row.peer_name = s->name;
    ratio = bench_interval(&row, &both);
    if (bench_opt.json) {
        printf("{\"bench\":\"peers\",\"case\":\"%s\",\"side\":\"%s\",\"value\":%.6g,"
               "\"unit\":\"%s\",\"low\":%.6g,\"high\":%.6g,"
               "\"ratio\":%.3f,\"ratio_low\":%.3f,\"ratio_high\":%.3f,"
               "\"cpu_us\":%.4g,\"peak_mb\":%.1f,\"first_ms\":%.3g,\"rounds\":%d,\"again\":%d,"
               "\"others\":%.3f}\n",
               j->name, s->name, median, j->unit, value.low, value.high, ratio.value, ratio.low,
               ratio.high, MEDIAN(s, rounds, cpu_us), MEDIAN(s, rounds, peak_mb),
               MEDIAN(s, rounds, first_ms), rounds, s->again, others);
    } else {
        printf("  %-24s %9.0f (%.0f to %.0f) %6.2f (%.2f to %.2f) %9.1f %7.0f %8.1f %3d%s\n",
               s->name, median, value.low, value.high, ratio.value, ratio.low, ratio.high,
               MEDIAN(s, rounds, cpu_us), MEDIAN(s, rounds, peak_mb), MEDIAN(s, rounds, first_ms),
               s->again, others > DISTURBED ? " DISTURBED" : "");
    }
    fflush(stdout);
}

static bool row_open(const job *j) {
    char path[600];
    if (!bench_wanted(j->name)) return false;
    snprintf(path, sizeof path, "%s/npz/deflated_15.npz", FOLDER);
    if (peer_lacks((int)j->kind) ||
        ((j->sides & SOLE) != 0 && j->kind >= PEER_STORED && access(path, R_OK) != 0)) {
        fprintf(stderr, "left out: row %s (a library or its files are not here)\n", j->name);
        return false;
    }
    if (j->kind == PEER_HTTP && server.pid == 0) server = http_begin();
    peer_open(FOLDER, (int)j->kind, j->late_us, server.port);
    item_size = peer_item_bytes();
    sums_known = 0;
    return true;
}

static void row_run(const job *j) {
    const int rounds = bench_opt.quick ? QUICK_ROUNDS : ROUNDS;
    if (!row_open(j)) return;
#if PEER_CURL
    sides[0].run = j->kind == PEER_HTTP ? run_ours_deferred : run_ours_of;
#endif
    for (int i = 0; i < side_count; ++i) {
        sides[i].again = 0;
        sides[i].out = false;
        if (takes_part(&sides[i], j)) calibrate(&sides[i], j);
    }
    for (int round = 0; round < rounds; ++round) {
        for (int k = 0; k < side_count; ++k) {
            side *s = &sides[round % 2 == 0 ? k : side_count - 1 - k];
            if (takes_part(s, j)) run_round(s, j, round, rounds / 2);
        }
    }
    if (!bench_opt.json) {
        printf("%-26s %9s %22s %20s %9s %7s %8s %s\n", j->name, j->unit, "95 % between",
               "ratio, between", "CPU us", "MB", "first ms", "again");
    }
    for (int i = 0; i < side_count; ++i) {
        if (takes_part(&sides[i], j)) print_side(&sides[i], best_of_ours(j, rounds), j, rounds);
    }
}

/* For who draws from the lines of JSON. */
static void print_machine(void) {
    const time_t now = time(NULL);
    char cpu[128], date[32];
    if (!bench_opt.json) return;
    bench_cpu_name(cpu, sizeof cpu);
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
    printf("{\"bench\":\"peers\",\"case\":\"machine\",\"text\":\"%d cores of %s; "
           "gcc %d.%d %s; no GPU; %s; %d rounds\"}\n",
           cores(), cpu, __GNUC__, __GNUC_MINOR__, BENCH_FLAGS, date,
           bench_opt.quick ? QUICK_ROUNDS : ROUNDS);
}

int main(int argc, char **argv) {
    const char *program = getenv("BENCH_PEERS_PYTHON"), *slash = strrchr(argv[0], '/');
    char folder[1024];
    bench_start("peers", argc, argv);
    while (side_count < MAX_SIDES && sides[side_count].name != NULL) ++side_count;
    if (!bench_opt.list) {
        print_machine();
        bench_now_with("(making files)");
        alarm(0);
        BENCH_CHECK(peer_files(FOLDER) == 0);
        snprintf(folder, sizeof folder, "%.*s/peers", slash != NULL ? (int)(slash - argv[0]) : 1,
                 slash != NULL ? argv[0] : ".");
        for (size_t i = 0; i < sizeof packages / sizeof packages[0]; ++i) {
            add_package(folder, packages[i]);
        }
        for (int i = 0; i < LIBRARIES; ++i) add_python(program, i);
        make_arrays();
    }
    for (size_t i = 0; i < sizeof jobs / sizeof jobs[0]; ++i) row_run(&jobs[i]);
    http_end(&server);
    return 0;
}
