/* Rings under stress: both modes, every way to call, capacity and shape, closed at the end or in
   the middle of it all, with yields where timing decides and with signals that interrupt the waits.

   An SPSC ring is closed by its producer, an MPMC ring by any thread.

   What each round checks:
     - order: a consumer sees the numbers of a producer rise, a lone consumer sees each of them
     - no loss, no double: what was accepted is what was popped plus what destroy handed back, by
       count, by sum of hashes, and for each producer as a row without a hole
     - closed is closed: no push that begins after a close has returned is accepted, and once a pop
       said CLOSED there is nothing left inside
     - items are whole, and pointers are freed once (AddressSanitizer looks)

   The tests are rows of the runner: `make test T=stress` runs the short form, `make stress` the
   long one (STRESS=long), and STRESS=brief suits emulators. The seed shown with a failure replays
   the parameters of all rounds with --seed; the threads still race as they like. STRESS_CELL=TEXT
   runs only the cells that have the text in their line. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
static void stress_point(const char *id);
#define SPDL_TEST_POINT(id) stress_point(id)
#include "../spdl.h"
#include "test.h"

enum { MAX_THREADS = 4, MAX_WORDS = 7, MAX_BATCH = 40, MAX_WORKERS = 2 * MAX_THREADS };

/* --- yields and pauses --- */

static __thread uint64_t chaos;      /* a random state; 0: none */
static __thread uint64_t chaos_rare; /* about one point in this many does something */

static void stress_point(const char *id) {
    uint64_t dice;
    if (chaos == 0 || strncmp(id, "ring", 4) != 0) return;
    dice = test_random(&chaos);
    if (dice % chaos_rare != 0) return;
    if ((dice >> 32) % 8 == 0) test_sleep_us((int64_t)((dice >> 40) % 60));
    else test_yield();
}

/* --- what runs --- */

/* One setting; rounds of it run until enough items went through. */
typedef struct cell {
    spdl_ring_mode mode;
    const struct way *way;
    uint64_t capacity;
    int producers, consumers;
    bool early;        /* closed in the middle, not when the producers are done */
    bool storm;        /* signals all the time */
    size_t item_bytes; /* 0: pointers to allocated values */
    uint64_t rare;     /* of the yields; 0: none */
    uint64_t seed;
} cell;

typedef struct worker {
    struct trial *round;
    int index;
    uint64_t random;
    test_thread thread;
    uint64_t count; /* items that were accepted, or taken */
    uint64_t sum;   /* of their hashes */
    uint64_t enough;             /* a producer ends, a consumer leaves after so many */
    uint64_t close_at;           /* closes the ring after so many */
    bool alone;                  /* sees every item, in order */
    bool drained;                /* consumer: was told that the ring is closed and empty */
    uint64_t next[MAX_THREADS];  /* consumer: 1 + the last number seen of each producer */
    uint64_t taken[MAX_THREADS]; /* consumer: items of each producer */
    uint64_t items[MAX_BATCH * MAX_WORDS];
} worker;

typedef struct trial {
    const cell *cell;
    spdl_ring *ring;
    uint32_t closed;  /* a close has returned */
    uint32_t working; /* threads that are not done */
    worker workers[MAX_WORKERS]; /* producers first */
    worker reaper;               /* what destroy hands back */
} trial;

/* A way to call: moves up to n items from or to self->items. */
typedef struct way {
    const char *name;
    spdl_result (*push)(worker *self, uint64_t n, uint64_t *moved);
    spdl_result (*pop)(worker *self, uint64_t n, uint64_t *moved);
    uint64_t most; /* items of one call */
} way;

static const char *const mode_names[] = { "mpmc", "spsc" };
static char cell_line[160]; /* of the cell that runs, for who wants to know after a failure */

static bool here(bool held) {
    static uint32_t told;
    if (!held && __atomic_exchange_n(&told, 1, __ATOMIC_RELAXED) == 0) fputs(cell_line, stderr);
    return held;
}

static uint64_t roll(worker *self, uint64_t sides) { return test_random(&self->random) % sides; }

static int64_t short_wait(worker *self) { return (int64_t)roll(self, 100000); }

/* --- items: a producer and a number, over all words; or a pointer to one --- */

static size_t bytes_of(const cell *c) { return c->item_bytes ? c->item_bytes : sizeof(void *); }

static uint64_t hash_of(uint64_t value) { return test_random(&value); }

static void item_fill(const cell *c, void *item, uint64_t value) {
    uint64_t word = value;
    size_t at;
    if (c->item_bytes == 0) {
        uint64_t *owned = (uint64_t *)malloc(sizeof value);
        REQUIRE(owned != NULL);
        *owned = value;
        memcpy(item, &owned, sizeof owned);
        return;
    }
    for (at = 0; at < c->item_bytes; at += sizeof word, word = ~word + value)
        memcpy((char *)item + at, &word, sizeof word);
}

/* The value of an item that the caller owns, and ends the item. */
static uint64_t item_end(const cell *c, const void *item) {
    uint64_t value, word, *owned;
    size_t at;
    if (c->item_bytes == 0) {
        memcpy(&owned, item, sizeof owned);
        value = *owned;
        *owned = UINT64_MAX;
        free(owned);
        return value;
    }
    memcpy(&value, item, sizeof value);
    word = value;
    for (at = 0; at < c->item_bytes; at += sizeof word, word = ~word + value)
        if (!here(CHECK(memcmp((const char *)item + at, &word, sizeof word) == 0))) break;
    return value;
}

static void *item_at(worker *self, uint64_t i) {
    return (char *)self->items + i * bytes_of(self->round->cell);
}

/* --- the ways --- */

static spdl_result try_push(worker *self, uint64_t n, uint64_t *moved) {
    const spdl_result result = spdl_ring_try_push(self->round->ring, self->items);
    *moved = result == SPDL_OK ? n : 0;
    here(CHECK(result == SPDL_OK || result == SPDL_FULL || result == SPDL_CLOSED));
    return result;
}

static spdl_result try_pop(worker *self, uint64_t n, uint64_t *moved) {
    const spdl_result result = spdl_ring_try_pop(self->round->ring, self->items);
    *moved = result == SPDL_OK ? n : 0;
    here(CHECK(result == SPDL_OK || result == SPDL_EMPTY || result == SPDL_CLOSED));
    return result;
}

static spdl_result block_push(worker *self, uint64_t n, uint64_t *moved) {
    const spdl_result result = spdl_ring_push(self->round->ring, self->items, SPDL_FOREVER);
    *moved = result == SPDL_OK ? n : 0;
    here(CHECK(result == SPDL_OK || result == SPDL_CLOSED));
    return result;
}

static spdl_result block_pop(worker *self, uint64_t n, uint64_t *moved) {
    const spdl_result result = spdl_ring_pop(self->round->ring, self->items, SPDL_FOREVER);
    *moved = result == SPDL_OK ? n : 0;
    here(CHECK(result == SPDL_OK || result == SPDL_CLOSED));
    return result;
}

static spdl_result timed_push(worker *self, uint64_t n, uint64_t *moved) {
    const spdl_result result = spdl_ring_push(self->round->ring, self->items, short_wait(self));
    *moved = result == SPDL_OK ? n : 0;
    here(CHECK(result == SPDL_OK || result == SPDL_TIMEOUT || result == SPDL_CLOSED));
    return result;
}

static spdl_result timed_pop(worker *self, uint64_t n, uint64_t *moved) {
    const spdl_result result = spdl_ring_pop(self->round->ring, self->items, short_wait(self));
    *moved = result == SPDL_OK ? n : 0;
    here(CHECK(result == SPDL_OK || result == SPDL_TIMEOUT || result == SPDL_CLOSED));
    return result;
}

/* Either of the calls that move several, waiting or not. */
static spdl_result batch_push(worker *self, uint64_t n, uint64_t *moved) {
    spdl_ring *ring = self->round->ring;
    const uint64_t dice = roll(self, 3);
    spdl_result result;
    if (dice == 0) {
        result = spdl__ring_try(ring, true, self->items, n, moved);
        here(CHECK(result == SPDL_OK || result == SPDL_FULL || result == SPDL_CLOSED));
        return result;
    }
    result = spdl_ring_push_n(ring, self->items, n, moved,
                              dice == 1 ? short_wait(self) : SPDL_FOREVER);
    here(CHECK(result == SPDL_CLOSED || (result == SPDL_OK && *moved == n) ||
               (result == SPDL_TIMEOUT && *moved < n && dice == 1)));
    return result;
}

static spdl_result batch_pop(worker *self, uint64_t n, uint64_t *moved) {
    spdl_ring *ring = self->round->ring;
    const uint64_t dice = roll(self, 3);
    spdl_result result;
    if (dice == 0) {
        result = spdl__ring_try(ring, false, self->items, n, moved);
        here(CHECK(result == SPDL_OK || result == SPDL_EMPTY || result == SPDL_CLOSED));
        return result;
    }
    result = spdl_ring_pop_n(ring, self->items, n, moved,
                             dice == 1 ? short_wait(self) : SPDL_FOREVER);
    here(CHECK(result == SPDL_CLOSED || result == SPDL_OK ||
               (result == SPDL_TIMEOUT && dice == 1)));
    return result;
}

static const way way_try = { "try", try_push, try_pop, 1 };
static const way way_block = { "block", block_push, block_pop, 1 };
static const way way_timed = { "timed", timed_push, timed_pop, 1 };
static const way way_batch = { "batch", batch_push, batch_pop, MAX_BATCH };

/* --- producers and consumers --- */

static void close_now(trial *r) {
    spdl_ring_close(r->ring);
    __atomic_store_n(&r->closed, 1, __ATOMIC_RELEASE);
}

static bool was_closed(const trial *r) { return __atomic_load_n(&r->closed, __ATOMIC_ACQUIRE); }

static uint64_t some(worker *self) {
    const way *w = self->round->cell->way;
    const uint64_t left = self->enough - self->count;
    const uint64_t n = 1 + (w->most > 1 ? roll(self, w->most) : 0);
    return n < left ? n : left;
}

/* One call with up to n items; what was not accepted still belongs to the producer. */
static spdl_result produce_some(worker *self, uint64_t n) {
    const cell *c = self->round->cell;
    const bool closed = was_closed(self->round);
    const uint64_t first = (uint64_t)self->index << 48 | self->count;
    uint64_t moved = 0, i;
    spdl_result result;
    for (i = 0; i < n; ++i) item_fill(c, item_at(self, i), first + i);
    result = c->way->push(self, n, &moved);
    here(CHECK(moved <= n && (result != SPDL_OK || moved > 0)));
    if (closed) here(CHECK(result == SPDL_CLOSED && moved == 0));
    for (i = 0; i < moved; ++i) self->sum += hash_of(first + i);
    for (i = moved; i < n; ++i) here(CHECK(item_end(c, item_at(self, i)) == first + i));
    self->count += moved;
    return result;
}

static void rest_or_close(worker *self, spdl_result result) {
    if (result == SPDL_FULL || result == SPDL_EMPTY) test_yield();
    if (self->count >= self->close_at) {
        close_now(self->round);
        self->close_at = UINT64_MAX;
    }
    stress_point("ring between calls");
}

static void chaos_start(const worker *self) {
    const cell *c = self->round->cell;
    chaos = c->rare ? self->random | 1 : 0;
    chaos_rare = c->rare;
}

static void *produce(void *arg) {
    worker *self = (worker *)arg;
    spdl_result result = SPDL_OK;
    chaos_start(self);
    while (self->count < self->enough && result != SPDL_CLOSED) {
        result = produce_some(self, some(self));
        rest_or_close(self, result);
    }
    for (int i = 0; i < 3 && result == SPDL_CLOSED; ++i)
        here(CHECK_EQ(produce_some(self, 1), SPDL_CLOSED));
    __atomic_sub_fetch(&self->round->working, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void take(worker *self, const void *item) {
    const cell *c = self->round->cell;
    const uint64_t value = item_end(c, item);
    const uint64_t producer = value >> 48, number = value & (((uint64_t)1 << 48) - 1);
    if (!here(CHECK(producer < (uint64_t)c->producers))) return;
    here(CHECK(number >= self->next[producer]));
    if (self->alone) here(CHECK_EQ(number, self->taken[producer]));
    self->next[producer] = number + 1;
    self->taken[producer]++;
    self->count++;
    self->sum += hash_of(value);
}

static spdl_result consume_some(worker *self, uint64_t n) {
    uint64_t moved = 0, i;
    const spdl_result result = self->round->cell->way->pop(self, n, &moved);
    here(CHECK(moved <= n && (result == SPDL_OK ? moved > 0 : moved == 0)));
    for (i = 0; i < moved; ++i) take(self, item_at(self, i));
    return result;
}

static void *consume(void *arg) {
    worker *self = (worker *)arg;
    spdl_result result = SPDL_OK;
    chaos_start(self);
    while (self->count < self->enough && result != SPDL_CLOSED) {
        result = consume_some(self, some(self));
        rest_or_close(self, result);
    }
    for (int i = 0; i < 3 && result == SPDL_CLOSED; ++i)
        here(CHECK_EQ(consume_some(self, 1), SPDL_CLOSED));
    self->drained = result == SPDL_CLOSED;
    __atomic_sub_fetch(&self->round->working, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* --- signals. SIGALRM is the alarm of the runner, so another one interrupts. --- */

static void on_storm(int number) { (void)number; }

/* Interrupts all threads as long as more than `rest` of them work. Those that are done were not
   joined yet, so that they may be sent signals. */
static void storm(trial *r, uint32_t rest, uint64_t *random) {
    const int workers = r->cell->producers + r->cell->consumers;
    while (__atomic_load_n(&r->working, __ATOMIC_ACQUIRE) > rest) {
        for (int i = 0; i < workers; ++i) pthread_kill(r->workers[i].thread, SIGUSR1);
        test_sleep_us((int64_t)(test_random(random) % 200));
    }
}

/* A hang ends with the alarm of the runner: says in which cell. */
static void on_alarm(int number) {
    const ssize_t told = write(STDERR_FILENO, cell_line, strlen(cell_line));
    signal(number, SIG_DFL);
    if (told >= 0) raise(number);
}

static void signals_start(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_storm; /* no SA_RESTART: system calls end with EINTR */
    REQUIRE(sigaction(SIGUSR1, &action, NULL) == 0);
    action.sa_handler = on_alarm;
    REQUIRE(sigaction(SIGALRM, &action, NULL) == 0);
}

/* --- a round --- */

static bool any_closes(const cell *c) { return c->mode == SPDL_RING_MPMC; }

static void worker_start(trial *r, int i, uint64_t items, uint64_t *random) {
    const cell *c = r->cell;
    const bool producer = i < c->producers;
    worker *self = &r->workers[i];
    self->round = r;
    self->index = producer ? i : i - c->producers;
    self->random = test_random(random);
    self->alone = c->consumers == 1;
    self->enough = producer ? items : UINT64_MAX;
    self->close_at = UINT64_MAX;
    if (c->early && any_closes(c) && roll(self, 4) == 0) self->close_at = roll(self, items);
    if (c->early && !any_closes(c) && producer) self->close_at = roll(self, items);
    if (c->early && any_closes(c) && !producer && roll(self, 2) == 0)
        self->enough = roll(self, items);
    REQUIRE(test_thread_start(&self->thread, producer ? produce : consume, self));
}

/* Closes when it is time, and waits for the threads. */
static void round_watch(trial *r, uint64_t *random) {
    const cell *c = r->cell;
    const int workers = c->producers + c->consumers;
    const bool early = c->early && any_closes(c);
    if (early) {
        const uint64_t scale = (uint64_t)1 << test_random(random) % 12;
        test_sleep_us((int64_t)(test_random(random) % scale));
        here(CHECK(spdl_ring_count(r->ring) <= c->capacity));
    } else {
        if (c->storm) storm(r, (uint32_t)c->consumers, random);
        for (int i = 0; i < c->producers; ++i) test_join(r->workers[i].thread);
    }
    close_now(r);
    if (early && c->storm) storm(r, 0, random);
    for (int i = early ? 0 : c->producers; i < workers; ++i)
        test_join(r->workers[i].thread);
}

static void reap(void *item, void *user) { take((worker *)user, item); }

/* The reaper starts where the consumers have ended, so that it notices every hole. */
static void reaper_start(trial *r) {
    const cell *c = r->cell;
    worker *reaper = &r->reaper;
    reaper->round = r;
    reaper->alone = true;
    for (int i = 0; i < c->consumers; ++i) {
        const worker *consumer = &r->workers[c->producers + i];
        reaper->count += consumer->count;
        reaper->sum += consumer->sum;
        reaper->drained |= consumer->drained;
        for (int p = 0; p < c->producers; ++p) reaper->taken[p] += consumer->taken[p];
    }
    memcpy(reaper->next, reaper->taken, sizeof reaper->next);
}

static void round_check(trial *r) {
    const cell *c = r->cell;
    worker *reaper = &r->reaper;
    uint64_t accepted = 0, sum = 0, left;
    reaper_start(r);
    left = spdl_ring_count(r->ring);
    here(CHECK(left <= (reaper->drained ? 0 : c->capacity)));
    left += reaper->count;
    spdl_ring_destroy(r->ring, reap, reaper);
    here(CHECK_EQ(reaper->count, left));
    for (int p = 0; p < c->producers; ++p) {
        here(CHECK_EQ(reaper->taken[p], r->workers[p].count));
        accepted += r->workers[p].count;
        sum += r->workers[p].sum;
    }
    here(CHECK_EQ(reaper->count, accepted));
    here(CHECK(reaper->sum == sum));
}

/* Makes a new ring one of a system without membarrier: full barriers, and no quick paths. */
static void without_membarrier(spdl_ring *ring) {
    ring->core.asymmetric = ring->core.quick = false;
    spdl__ring_core_start(&ring->core);
}

/* Up to `items` items of each producer; returns how many went in. */
static uint64_t round_run(const cell *c, uint64_t items, uint64_t seed) {
    static trial r; /* too much for the stack of a thread */
    const int workers = c->producers + c->consumers;
    spdl_ring_desc desc = { 0 };
    memset(&r, 0, sizeof r);
    desc.mode = c->mode;
    desc.capacity = c->capacity;
    desc.item_bytes = c->item_bytes;
    r.cell = c;
    r.working = (uint32_t)workers;
    REQUIRE(spdl_ring_create(&r.ring, &desc) == SPDL_OK);
    if (seed % 4 == 0) without_membarrier(r.ring);
    for (int i = workers - 1; i >= 0; --i) worker_start(&r, i, items, &seed);
    round_watch(&r, &seed);
    round_check(&r);
    return r.reaper.count;
}

/* --- cells and tests --- */

enum { EARLY_ITEMS = 4000 }; /* of a producer, when the ring may be closed at any moment */

static bool asked_for(const char *length) {
    const char *how = getenv("STRESS");
    return how != NULL && strcmp(how, length) == 0;
}

static bool cell_wanted(const cell *c) {
    const char *filter = getenv("STRESS_CELL");
    snprintf(cell_line, sizeof cell_line,
             "stress: %s %s, capacity %llu, %d to %d, closed %s, %llu bytes, yields 1/%llu%s\n",
             mode_names[c->mode], c->way->name, (unsigned long long)c->capacity, c->producers,
             c->consumers, c->early ? "early" : "at the end", (unsigned long long)c->item_bytes,
             (unsigned long long)c->rare, c->storm ? ", signals" : "");
    return filter == NULL || strstr(cell_line, filter) != NULL;
}

/* Rounds until `items` items went in. */
static uint64_t cell_run(cell *c, uint64_t items, uint64_t seed) {
    static const size_t item_sizes[] = { 8, 8, 0, 24, 56 };
    static const uint64_t rare[] = { 0, 16, 64, 256 };
    const uint64_t scale = asked_for("long") ? 256 : 1; /* a yield costs as much as 100 items */
    uint64_t count = 0, each = items / (uint64_t)c->producers;
    c->item_bytes = item_sizes[test_random(&seed) % 5];
    c->rare = rare[test_random(&seed) % 4] * scale;
    c->storm = test_random(&seed) % 4 == 0;
    if (!cell_wanted(c)) return 0;
    if (c->early && each > EARLY_ITEMS) each = EARLY_ITEMS;
    while (count < items) count += round_run(c, each, test_random(&seed));
    return count;
}

typedef struct shape {
    int producers, consumers;
} shape;

static const shape shapes[] = { { 1, 1 }, { 4, 1 }, { 1, 4 }, { 4, 4 } };

static bool allows(spdl_ring_mode mode, shape s) {
    return mode == SPDL_RING_MPMC || s.producers + s.consumers == 2;
}

/* In the long form large rings get more of the items: small ones take longer for each. */
static const struct {
    uint64_t capacity, percent;
} sizes[] = { { 1, 5 }, { 2, 5 }, { 3, 5 }, { 16, 15 }, { 1024, 70 } };

/* Items of one cell; in the long form all cells share 1e9 (SPSC) or 1e8 (MPMC). */
static uint64_t items_of_cell(spdl_ring_mode mode, uint64_t percent) {
    const bool spsc = mode == SPDL_RING_SPSC; /* fewer cells, more of each */
    const uint64_t all = spsc ? 1000000000 : 100000000;
    const uint64_t ways = 4;
    const uint64_t few = (TEST_SANITIZED ? 600 : 2000) * (spsc ? 4 : 1);
    uint64_t cells = 0;
    for (size_t s = 0; s < 4; ++s) cells += allows(mode, shapes[s]) ? 2 * ways : 0;
    if (asked_for("long")) return all / 100 * percent / cells;
    return asked_for("brief") ? few / 4 : few;
}

static void stress(spdl_ring_mode mode, const way *w) {
    uint64_t count = 0, seed = test_seed();
    signals_start();
    for (size_t s = 0; s < 4; ++s) {
        for (size_t k = 0; k < 10 && allows(mode, shapes[s]); ++k) {
            cell c = { 0 };
            c.mode = mode;
            c.way = w;
            c.capacity = sizes[k / 2].capacity;
            c.early = k % 2 != 0;
            c.producers = shapes[s].producers;
            c.consumers = shapes[s].consumers;
            count += cell_run(&c, items_of_cell(mode, sizes[k / 2].percent), test_random(&seed));
        }
    }
    if (asked_for("long"))
        printf("     %s %s: %llu items\n", mode_names[mode], w->name, (unsigned long long)count);
}

/* Each mode with each way. */
#define MODES(X) X(spsc, SPSC) X(mpmc, MPMC)

#define DEFINE(mode, MODE)                                                                         \
    static void mode##_try(void) { stress(SPDL_RING_##MODE, &way_try); }                           \
    static void mode##_block(void) { stress(SPDL_RING_##MODE, &way_block); }                       \
    static void mode##_timed(void) { stress(SPDL_RING_##MODE, &way_timed); }                       \
    static void mode##_batch(void) { stress(SPDL_RING_##MODE, &way_batch); }
MODES(DEFINE)

#define ROWS(mode, MODE)                                                                           \
    TEST_CASE(mode##_try), TEST_CASE(mode##_block), TEST_CASE(mode##_timed),                       \
        TEST_CASE(mode##_batch),
TEST_TABLE(stress) { MODES(ROWS) TEST_END };
