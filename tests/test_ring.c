/* Rings: contents and order under contention, results, timeouts, close and destroy.

   tests/test_ring_condvar.c compiles this file once more with SPDL_OS_POSIX, so that the same tests
   run on the waits of other systems; its tests are the rows condvar_... of the table below. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
static void ring_point(const char *id);
#define SPDL_TEST_POINT(id) ring_point(id)
#ifdef SPDL_OS_POSIX
/* What an event is made of can be refused there. */
#include <errno.h>
#include <pthread.h>
static int parts_left = -1, parts_refused, parts_alive; /* -1: all can be had */
static int part_refused(void) {
    ++parts_refused;
    return ENOMEM;
}
static int part_made(int error) {
    __atomic_fetch_add(&parts_alive, error == 0, __ATOMIC_RELAXED);
    return error;
}
static int part_gone(int error) {
    __atomic_fetch_sub(&parts_alive, 1, __ATOMIC_RELAXED);
    return error;
}
#define PART(call) \
    (parts_left == 0 ? part_refused() : (parts_left -= parts_left > 0, part_made(call)))
#define pthread_condattr_init(...) PART(pthread_condattr_init(__VA_ARGS__))
#define pthread_cond_init(...) PART(pthread_cond_init(__VA_ARGS__))
#define pthread_mutex_init(...) PART(pthread_mutex_init(__VA_ARGS__))
#define pthread_condattr_destroy(...) part_gone(pthread_condattr_destroy(__VA_ARGS__))
#define pthread_cond_destroy(...) part_gone(pthread_cond_destroy(__VA_ARGS__))
#define pthread_mutex_destroy(...) part_gone(pthread_mutex_destroy(__VA_ARGS__))
#endif
#include "../spdl.h"
#include "test.h"

/* --- yields at the places where timing decides --- */

static __thread uint64_t chaos;       /* 0: none, else a random state */
static __thread const uint32_t *gate; /* a push of this thread waits here until it is set */

static void ring_point(const char *id) {
    if (gate != NULL && strcmp(id, "ring claimed for push") == 0)
        while (!__atomic_load_n(gate, __ATOMIC_ACQUIRE)) test_sleep_us(100);
    if (chaos == 0) return;
    switch (test_random(&chaos) % 64) {
    case 0: test_sleep_us(20); break;
    case 1: case 2: case 3: case 4: test_yield(); break;
    default: break;
    }
}

/* --- small helpers --- */

static spdl_ring *ring_of(uint64_t capacity, size_t item_bytes, spdl_ring_mode mode) {
    spdl_ring_desc desc = { 0 };
    spdl_ring *ring;
    desc.capacity = capacity;
    desc.item_bytes = item_bytes;
    desc.mode = mode;
    REQUIRE(spdl_ring_create(&ring, &desc) == SPDL_OK);
    return ring;
}

static test_thread thread_of(void *(*entry)(void *), void *arg) {
    test_thread thread;
    REQUIRE(test_thread_start(&thread, entry, arg));
    return thread;
}

static int64_t ms(double n) { return (int64_t)(n * 1e6); }

/* Seconds until a wait gives up that ought to be ended by another thread, and what is too late for
   that: half of it, as threads of a busy machine may have to wait for a processor. */
enum { LONG_S = 20 };
#define LATE_NS ((uint64_t)SPDL_SECONDS(LONG_S) / 2)

/* Makes a new ring one of a system without membarrier: full barriers, and no quick paths. */
static void without_membarrier(spdl_ring *ring) {
    ring->core.asymmetric = ring->core.quick = false;
    spdl__ring_core_start(&ring->core);
}

/* Until `count` threads have announced that they are going to sleep, and had time to do it. */
static void await_sleepers(const uint32_t *waiting, uint32_t count) {
    const uint64_t start = spdl_time_ns();
    while ((__atomic_load_n(waiting, __ATOMIC_ACQUIRE) & SPDL__RING_WAITING) != count) {
        REQUIRE(spdl_time_ns() - start < LATE_NS);
        test_sleep_us(200);
    }
    test_sleep_us(5000);
}

enum { MODES = 2 };
static const spdl_ring_mode modes[MODES] = { SPDL_RING_MPMC, SPDL_RING_SPSC };

/* How many threads a test may put on a side: `most`, or one. */
static int threads_of(spdl_ring_mode mode, int most) { return mode == SPDL_RING_SPSC ? 1 : most; }

/* --- flows: producers and consumers, every item accounted for --- */

typedef enum flow_how { FLOW_TRY, FLOW_BLOCKING, FLOW_TIMED } flow_how;

enum { FLOW_THREADS = 4, FLOW_ITEM_BYTES = 4096 };

typedef struct flow {
    spdl_ring *ring;
    flow_how how;
    int producers, consumers;
    uint64_t items;      /* of each producer */
    uint32_t *arrivals;  /* [producer * items + number] */
    uint32_t next_index; /* hands out the numbers of the threads */
    uint64_t seed;
    bool calm;           /* no extra yields */
} flow;

typedef struct flow_thread {
    flow *flow;
    int index;
    uint64_t last[FLOW_THREADS]; /* consumer: 1 + the last number seen of each producer */
    uint64_t timeouts;
} flow_thread;

/* An item is its producer and number, repeated over all its bytes; one byte holds only the low bits
   of the number. */
static void item_write(unsigned char *item, size_t bytes, uint64_t producer, uint64_t number) {
    const uint64_t value = producer << 56 | number;
    if (bytes < sizeof value) {
        memset(item, (int)(number & 0xff), bytes);
        return;
    }
    for (size_t at = 0; at + sizeof value <= bytes; at += sizeof value)
        memcpy(item + at, &value, sizeof value);
}

static uint64_t item_read(const unsigned char *item, size_t bytes) {
    uint64_t value, other;
    if (bytes < sizeof value) return item[0];
    memcpy(&value, item, sizeof value);
    memcpy(&other, item + (bytes / sizeof value - 1) * sizeof value, sizeof other);
    CHECK(value == other);
    return value;
}

static int64_t flow_timeout(const flow *f) {
    return f->how == FLOW_TRY ? 0 : f->how == FLOW_TIMED ? 50000 : SPDL_FOREVER;
}

static spdl_result flow_push(flow_thread *self, const void *item) {
    for (;;) {
        const spdl_result result = self->flow->how == FLOW_TRY
                                       ? spdl_ring_try_push(self->flow->ring, item)
                                       : spdl_ring_push(self->flow->ring, item,
                                                        flow_timeout(self->flow));
        if (result == SPDL_OK || result == SPDL_CLOSED) return result;
        CHECK_EQ(result, self->flow->how == FLOW_TRY ? SPDL_FULL : SPDL_TIMEOUT);
        CHECK(self->flow->how != FLOW_BLOCKING);
        if (self->flow->how == FLOW_TRY) test_yield();
        self->timeouts++;
    }
}

static spdl_result flow_pop(flow_thread *self, void *item) {
    for (;;) {
        const spdl_result result = self->flow->how == FLOW_TRY
                                       ? spdl_ring_try_pop(self->flow->ring, item)
                                       : spdl_ring_pop(self->flow->ring, item,
                                                       flow_timeout(self->flow));
        if (result == SPDL_OK || result == SPDL_CLOSED) return result;
        CHECK_EQ(result, self->flow->how == FLOW_TRY ? SPDL_EMPTY : SPDL_TIMEOUT);
        CHECK(self->flow->how != FLOW_BLOCKING);
        if (self->flow->how == FLOW_TRY) test_yield();
        self->timeouts++;
    }
}

static void *flow_produce(void *arg) {
    flow_thread *self = (flow_thread *)arg;
    unsigned char item[FLOW_ITEM_BYTES];
    chaos = self->flow->calm ? 0 : self->flow->seed + (uint64_t)self->index + 1;
    for (uint64_t i = 0; i < self->flow->items; ++i) {
        item_write(item, self->flow->ring->core.item_bytes, (uint64_t)self->index, i);
        CHECK_EQ(flow_push(self, item), SPDL_OK);
    }
    return NULL;
}

static void *flow_consume(void *arg) {
    flow_thread *self = (flow_thread *)arg;
    flow *f = self->flow;
    const size_t bytes = f->ring->core.item_bytes;
    unsigned char item[FLOW_ITEM_BYTES];
    chaos = f->calm ? 0 : f->seed + 100 + (uint64_t)self->index;
    while (flow_pop(self, item) == SPDL_OK) {
        const uint64_t value = item_read(item, bytes);
        const uint64_t producer = bytes < sizeof value ? 0 : value >> 56;
        uint64_t number = value & (((uint64_t)1 << 56) - 1);
        if (bytes < sizeof value) { /* one producer and one consumer: the number is known */
            CHECK_EQ(number, self->last[0] & 0xff);
            number = self->last[0];
        }
        if (!CHECK(producer < (uint64_t)f->producers && number < f->items)) return NULL;
        CHECK(number >= self->last[producer]); /* first in, first out for each producer */
        self->last[producer] = number + 1;
        __atomic_fetch_add(&f->arrivals[producer * f->items + number], 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

static void flow_run(flow *f) {
    flow_thread thread[2 * FLOW_THREADS];
    test_thread id[2 * FLOW_THREADS];
    const int threads = f->producers + f->consumers;
    const uint64_t items = f->items * (uint64_t)f->producers;
    memset(thread, 0, sizeof thread);
    f->arrivals = (uint32_t *)calloc(items, sizeof(uint32_t));
    if (f->seed & 1) without_membarrier(f->ring);
    for (int i = threads - 1; i >= 0; --i) {
        const bool producer = i < f->producers;
        thread[i].flow = f;
        thread[i].index = producer ? i : i - f->producers;
        id[i] = thread_of(producer ? flow_produce : flow_consume, &thread[i]);
    }
    for (int i = 0; i < f->producers; ++i) test_join(id[i]);
    CHECK(spdl_ring_count(f->ring) <= f->ring->core.capacity);
    spdl_ring_close(f->ring);
    for (int i = f->producers; i < threads; ++i) test_join(id[i]);
    CHECK_EQ(spdl_ring_count(f->ring), 0);
    for (uint64_t i = 0; i < items; ++i)
        if (!CHECK_EQ(f->arrivals[i], 1)) break;
    free(f->arrivals);
}

static void flow_with(spdl_ring_mode mode, uint64_t capacity, size_t item_bytes, int producers,
                      int consumers, flow_how how, uint64_t items) {
    static uint64_t run;
    flow f = { 0 };
    f.ring = ring_of(capacity, item_bytes, mode);
    f.how = how;
    f.producers = producers;
    f.consumers = consumers;
    f.items = items;
    f.seed = test_seed() + run++;
    f.calm = capacity < 4 && items > 4000;
    flow_run(&f);
    spdl_ring_destroy(f.ring, NULL, NULL);
}

static void flows(spdl_ring_mode mode, flow_how how) {
    static const uint64_t capacities[] = { 1, 2, 3, 16, 1024 };
    static const int shapes[][2] = { { 1, 1 }, { 4, 1 }, { 1, 4 }, { 4, 4 } };
    const uint64_t items = TEST_SANITIZED ? 800 : 2000;
    for (size_t c = 0; c < 5; ++c)
        for (size_t s = 0; s < 4; ++s)
            if (shapes[s][0] <= threads_of(mode, 4) && shapes[s][1] <= threads_of(mode, 4))
                flow_with(mode, capacities[c], sizeof(uint64_t), shapes[s][0], shapes[s][1], how,
                          items / (uint64_t)shapes[s][0]);
}

static void flow_spsc_try(void) { flows(SPDL_RING_SPSC, FLOW_TRY); }
static void flow_spsc_blocking(void) { flows(SPDL_RING_SPSC, FLOW_BLOCKING); }
static void flow_spsc_timed(void) { flows(SPDL_RING_SPSC, FLOW_TIMED); }
static void flow_mpmc_try(void) { flows(SPDL_RING_MPMC, FLOW_TRY); }
static void flow_mpmc_blocking(void) { flows(SPDL_RING_MPMC, FLOW_BLOCKING); }
static void flow_mpmc_timed(void) { flows(SPDL_RING_MPMC, FLOW_TIMED); }

static void flow_of_every_item_size(void) {
    static const size_t sizes[] = { 1, 8, 16, 56, 4096 };
    const uint64_t items = TEST_SANITIZED ? 400 : 2000;
    for (size_t i = 0; i < 5; ++i) {
        for (size_t m = 0; m < MODES; ++m)
            flow_with(modes[m], 3, sizes[i], 1, 1, FLOW_BLOCKING, items);
        if (sizes[i] >= 8) flow_with(SPDL_RING_MPMC, 5, sizes[i], 4, 4, FLOW_BLOCKING, items / 4);
    }
}

/* Laps: two threads and the smallest rings. */
static void flow_of_many_laps(void) {
    const uint64_t items = TEST_SANITIZED ? 4500 : 8000;
    for (uint64_t capacity = 1; capacity <= 3; ++capacity) {
        for (size_t m = 0; m < MODES; ++m)
            flow_with(modes[m], capacity, 8, 1, 1, FLOW_BLOCKING, items);
    }
}

/* Larger than what is fetched ahead: full and empty, more than once around. */
static void large_rings_keep_the_order(void) {
    enum { LARGE = SPDL__RING_FETCHED / 8 + 100 };
    for (size_t m = 0; m < MODES; ++m) {
        spdl_ring *ring = ring_of(LARGE, 8, modes[m]);
        uint64_t in = 0, out = 0, item, moved;
        for (int lap = 0; lap < 2; ++lap) {
            while (spdl_ring_try_push(ring, &in) == SPDL_OK) ++in;
            CHECK_EQ(in - out, LARGE);
            for (int k = 0; k < LARGE / 2; ++k, ++out)
                REQUIRE(spdl_ring_try_pop(ring, &item) == SPDL_OK && item == out);
        }
        CHECK_EQ(spdl_ring_push_n(ring, &in, 1, &moved, 0), SPDL_OK);
        spdl_ring_destroy(ring, NULL, NULL);
    }
}

/* More than two million items by one thread, where every result is known: all fill levels. */
static void laps_keep_the_order(void) {
    const uint64_t items = TEST_SANITIZED ? 30000 : 400000;
    for (size_t m = 0; m < MODES; ++m) {
        for (uint64_t capacity = 1; capacity <= 3; ++capacity) {
            spdl_ring *ring = ring_of(capacity, 8, modes[m]);
            uint64_t in = 0, out = 0, item, state = test_seed();
            bool held = true;
            while (out < items && held) {
                const uint64_t level = test_random(&state) % (capacity + 1);
                while (in - out < level && held) {
                    held = spdl_ring_try_push(ring, &in) == SPDL_OK;
                    ++in;
                }
                if (level == capacity) held = held && spdl_ring_try_push(ring, &in) == SPDL_FULL;
                held = held && spdl_ring_count(ring) == in - out;
                for (; in > out && held; ++out)
                    held = spdl_ring_try_pop(ring, &item) == SPDL_OK && item == out;
                held = held && spdl_ring_try_pop(ring, &item) == SPDL_EMPTY;
            }
            CHECK(held);
            spdl_ring_destroy(ring, NULL, NULL);
        }
    }
}

/* --- results --- */

static void capacity_is_exact(void) {
    static const uint64_t capacities[] = { 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 1000, 1023, 1024,
                                           1025 };
    for (size_t m = 0; m < MODES; ++m) {
        for (size_t c = 0; c < sizeof capacities / sizeof capacities[0]; ++c) {
            const uint64_t capacity = capacities[c];
            spdl_ring *ring = ring_of(capacity, 8, modes[m]);
            uint64_t item = 0, value = 0;
            CHECK_EQ(ring->core.capacity, capacity);
            for (uint64_t lap = 0; lap < 3; ++lap) { /* from another slot each time */
                for (uint64_t i = 0; i < capacity; ++i) {
                    CHECK_EQ(spdl_ring_count(ring), i);
                    item = lap * 10000 + i;
                    CHECK_EQ(spdl_ring_try_push(ring, &item), SPDL_OK);
                }
                CHECK_EQ(spdl_ring_try_push(ring, &item), SPDL_FULL);
                CHECK_EQ(spdl_ring_push(ring, &item, 0), SPDL_TIMEOUT);
                CHECK_EQ(spdl_ring_count(ring), capacity);
                for (uint64_t i = 0; i < capacity; ++i) {
                    CHECK_EQ(spdl_ring_try_pop(ring, &value), SPDL_OK);
                    CHECK_EQ(value, lap * 10000 + i);
                }
                CHECK_EQ(spdl_ring_count(ring), 0);
                CHECK_EQ(spdl_ring_try_pop(ring, &value), SPDL_EMPTY);
                CHECK_EQ(spdl_ring_pop(ring, &value, 0), SPDL_TIMEOUT);
                CHECK_EQ(spdl_ring_try_push(ring, &item), SPDL_OK); /* moves the start by one */
                CHECK_EQ(spdl_ring_try_pop(ring, &value), SPDL_OK);
            }
            spdl_ring_destroy(ring, NULL, NULL);
        }
    }
}

static void items_are_pointers_by_default(void) {
    int number = 7;
    int *in = &number, *out = NULL;
    for (size_t m = 0; m < MODES; ++m) {
        spdl_ring *ring = ring_of(2, 0, modes[m]);
        CHECK_EQ(spdl_ring_try_push(ring, &in), SPDL_OK);
        CHECK_EQ(spdl_ring_try_pop(ring, &out), SPDL_OK);
        CHECK(out == &number);
        spdl_ring_destroy(ring, NULL, NULL);
    }
}

/* A pop writes its item and nothing behind it; one that fails writes nothing. */
static void pop_writes_the_item_only(void) {
    static const size_t sizes[] = { 1, 3, 8, 13, 16, 56, 4096 };
    for (size_t m = 0; m < MODES; ++m) {
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; ++i) {
            spdl_ring *ring = ring_of(3, sizes[i], modes[m]);
            unsigned char in[4100], out[4100];
            memset(in, 0x5a, sizeof in);
            memset(out, 0x11, sizeof out);
            CHECK_EQ(spdl_ring_try_pop(ring, out), SPDL_EMPTY);
            CHECK_EQ(spdl_ring_pop(ring, out, 1000), SPDL_TIMEOUT);
            CHECK_EQ(out[0], 0x11);
            for (int k = 0; k < 5; ++k) {
                CHECK_EQ(spdl_ring_try_push(ring, in), SPDL_OK);
                CHECK_EQ(spdl_ring_try_pop(ring, out), SPDL_OK);
            }
            CHECK(memcmp(in, out, sizes[i]) == 0);
            CHECK_EQ(out[sizes[i]], 0x11);
            spdl_ring_destroy(ring, NULL, NULL);
        }
    }
}

static void desc_is_checked(void) {
    spdl_ring_desc good = { 0 }, desc;
    spdl_ring *ring = (spdl_ring *)&good;
    spdl_error error;
    void *item = NULL;
    good.capacity = 4;
    CHECK_EQ(spdl_ring_create(NULL, &good), SPDL_E_INVALID);
#define REFUSED(change)                                                                            \
    desc = good;                                                                                   \
    change;                                                                                        \
    ring = (spdl_ring *)&good;                                                                     \
    desc.error = &error;                                                                           \
    CHECK_EQ(spdl_ring_create(&ring, &desc), SPDL_E_INVALID);                                      \
    CHECK_EQ(error.result, SPDL_E_INVALID);                                                        \
    CHECK(ring == NULL)
    REFUSED(desc.item_bytes = 4097);
    CHECK_STR(error.text, "ring: item_bytes is 4097, must be at most 4096");
    REFUSED(desc.capacity = 0);
    CHECK_STR(error.text, "ring: capacity is 0, must be 1 to 1073741824");
    REFUSED(desc.capacity = ((uint64_t)1 << 30) + 1);
    REFUSED(desc.capacity = UINT64_MAX);
    REFUSED(desc.item_bytes = SIZE_MAX);
    REFUSED(desc.mode = (spdl_ring_mode)9);
    CHECK_STR(error.text, "ring: mode is 9, must be SPDL_RING_MPMC or SPDL_RING_SPSC");
    REFUSED(desc.mode = (spdl_ring_mode)2);
    REFUSED(desc.mode = (spdl_ring_mode)-1);
    REFUSED(desc.allocator.alloc_fn = (void *(*)(size_t, size_t, void *))(uintptr_t)1);
    REFUSED(desc.allocator.free_fn = (void (*)(void *, size_t, void *))(uintptr_t)1);
#undef REFUSED
    ring = (spdl_ring *)&good;
    CHECK_EQ(spdl_ring_create(&ring, NULL), SPDL_E_INVALID);
    CHECK(ring == NULL);
    REQUIRE(spdl_ring_create(&ring, &good) == SPDL_OK);
    CHECK_EQ(spdl_ring_push(ring, NULL, 0), SPDL_E_INVALID);
    CHECK_EQ(spdl_ring_pop(ring, NULL, 0), SPDL_E_INVALID);
    CHECK_EQ(spdl_ring_push(NULL, &item, 0), SPDL_E_INVALID);
    CHECK_EQ(spdl_ring_pop(NULL, &item, 0), SPDL_E_INVALID);
    spdl_ring_destroy(ring, NULL, NULL);
    spdl_ring_destroy(NULL, NULL, NULL);
}

/* --- timeouts --- */

static void timeouts_are_not_early(void) {
    for (size_t m = 0; m < MODES; ++m) {
        spdl_ring *ring = ring_of(1, 8, modes[m]);
        static const double waits[] = { 0.05, 1, 7, 20 };
        uint64_t item = 1, start;
        for (size_t i = 0; i < 4; ++i) {
            start = spdl_time_ns();
            CHECK_EQ(spdl_ring_pop(ring, &item, ms(waits[i])), SPDL_TIMEOUT);
            CHECK(spdl_time_ns() - start >= (uint64_t)ms(waits[i]));
        }
        CHECK_EQ(spdl_ring_push(ring, &item, ms(10)), SPDL_OK);
        for (size_t i = 0; i < 4; ++i) {
            start = spdl_time_ns();
            CHECK_EQ(spdl_ring_push(ring, &item, ms(waits[i])), SPDL_TIMEOUT);
            CHECK(spdl_time_ns() - start >= (uint64_t)ms(waits[i]));
        }
        CHECK_EQ((ring->core.pops_waiting & SPDL__RING_WAITING) + ring->core.pushes_waiting, 0);
        spdl_ring_destroy(ring, NULL, NULL);
    }
}

enum { SLOW_ITEMS = 12 };

static void *push_slowly(void *arg) {
    for (uint64_t i = 0; i < SLOW_ITEMS; ++i) {
        test_sleep_us(4000);
        CHECK_EQ(spdl_ring_push((spdl_ring *)arg, &i, SPDL_FOREVER), SPDL_OK);
    }
    return NULL;
}

static void timeout_of_a_pop_takes_nothing(void) {
    for (size_t m = 0; m < MODES; ++m) {
        spdl_ring *ring = ring_of(2, 8, modes[m]);
        test_thread producer = thread_of(push_slowly, ring);
        uint64_t item = 99;
        int timeouts = 0;
        for (uint64_t i = 0; i < SLOW_ITEMS;) {
            const spdl_result result = spdl_ring_pop(ring, &item, ms(1.5));
            if (result == SPDL_OK) CHECK_EQ(item, i++);
            else timeouts += CHECK_EQ(result, SPDL_TIMEOUT);
        }
        CHECK(timeouts > 0);
        test_join(producer);
        CHECK_EQ(spdl_ring_count(ring), 0);
        spdl_ring_destroy(ring, NULL, NULL);
    }
}

static void *pop_slowly(void *arg) {
    uint64_t item;
    for (uint64_t i = 0; i < SLOW_ITEMS; ++i) {
        test_sleep_us(4000);
        CHECK_EQ(spdl_ring_pop((spdl_ring *)arg, &item, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(item, i);
    }
    return NULL;
}

static void timeout_of_a_push_leaves_nothing(void) {
    for (size_t m = 0; m < MODES; ++m) {
        spdl_ring *ring = ring_of(1, 8, modes[m]);
        test_thread consumer = thread_of(pop_slowly, ring);
        int timeouts = 0;
        for (uint64_t i = 0; i < SLOW_ITEMS;) {
            const spdl_result result = spdl_ring_push(ring, &i, ms(1.5));
            if (result == SPDL_OK) ++i;
            else timeouts += CHECK_EQ(result, SPDL_TIMEOUT);
        }
        CHECK(timeouts > 0);
        test_join(consumer);
        CHECK_EQ(spdl_ring_count(ring), 0);
        spdl_ring_destroy(ring, NULL, NULL);
    }
}

/* The largest timeout is no timeout that has passed. */
static void *push_after_a_while(void *arg) {
    const uint64_t item = 5;
    test_sleep_us(10000);
    CHECK_EQ(spdl_ring_push((spdl_ring *)arg, &item, INT64_MAX), SPDL_OK);
    return NULL;
}

static void timeout_may_be_huge(void) {
    spdl_ring *ring = ring_of(1, 8, SPDL_RING_MPMC);
    test_thread producer = thread_of(push_after_a_while, ring);
    uint64_t item = 0;
    CHECK_EQ(spdl_ring_pop(ring, &item, INT64_MAX), SPDL_OK);
    CHECK_EQ(item, 5);
    test_join(producer);
    spdl_ring_destroy(ring, NULL, NULL);
}

/* --- close --- */

static void close_drains_then_tells(void) {
    for (size_t m = 0; m < MODES; ++m) {
        for (uint64_t inside = 0; inside <= 3; ++inside) {
            spdl_ring *ring = ring_of(3, 8, modes[m]);
            uint64_t item;
            for (item = 0; item < inside; ++item)
                CHECK_EQ(spdl_ring_try_push(ring, &item), SPDL_OK);
            spdl_ring_close(ring);
            spdl_ring_close(ring);
            CHECK_EQ(spdl_ring_try_push(ring, &item), SPDL_CLOSED); /* also when it is full */
            CHECK_EQ(spdl_ring_push(ring, &item, SPDL_FOREVER), SPDL_CLOSED);
            CHECK_EQ(spdl_ring_count(ring), inside);
            for (uint64_t i = 0; i < inside; ++i) {
                CHECK_EQ(i % 2 ? spdl_ring_pop(ring, &item, SPDL_FOREVER)
                               : spdl_ring_try_pop(ring, &item), SPDL_OK);
                CHECK_EQ(item, i);
            }
            CHECK_EQ(spdl_ring_try_pop(ring, &item), SPDL_CLOSED);
            CHECK_EQ(spdl_ring_pop(ring, &item, SPDL_FOREVER), SPDL_CLOSED);
            CHECK_EQ(spdl_ring_pop(ring, &item, 0), SPDL_CLOSED);
            CHECK_EQ(spdl_ring_push(ring, &item, 0), SPDL_CLOSED);
            CHECK_EQ(spdl_ring_count(ring), 0);
            spdl_ring_destroy(ring, NULL, NULL);
        }
    }
}

/* One blocking call on a thread, and its result. */
typedef struct call {
    spdl_ring *ring;
    bool push;
    const uint32_t *gate;
    uint64_t item;
    int64_t timeout;
    spdl_result result;
} call;

static void *call_once(void *arg) {
    call *c = (call *)arg;
    gate = c->gate;
    c->result = c->push ? spdl_ring_push(c->ring, &c->item, c->timeout)
                        : spdl_ring_pop(c->ring, &c->item, c->timeout);
    return NULL;
}

static void close_wakes_sleepers(void) {
    for (size_t m = 0; m < MODES; ++m) {
        for (int push = 0; push <= (modes[m] == SPDL_RING_MPMC); ++push) {
            const uint32_t sleepers = (uint32_t)threads_of(modes[m], 4);
            spdl_ring *ring = ring_of(1, 8, modes[m]);
            call calls[4];
            test_thread threads[4];
            const uint64_t item = 77;
            uint64_t left;
            if (push) CHECK_EQ(spdl_ring_try_push(ring, &item), SPDL_OK);
            for (uint32_t i = 0; i < sleepers; ++i) {
                const call c = { ring, push != 0, NULL, i, SPDL_SECONDS(LONG_S), SPDL_OK };
                calls[i] = c;
                threads[i] = thread_of(call_once, &calls[i]);
            }
            await_sleepers(push ? &ring->core.pushes_waiting : &ring->core.pops_waiting, sleepers);
            spdl_ring_close(ring);
            for (uint32_t i = 0; i < sleepers; ++i) {
                test_join(threads[i]);
                CHECK_EQ(calls[i].result, SPDL_CLOSED);
            }
            if (push) CHECK_EQ(spdl_ring_try_pop(ring, &left), SPDL_OK && left == item);
            CHECK_EQ(spdl_ring_try_pop(ring, &left), SPDL_CLOSED);
            spdl_ring_destroy(ring, NULL, NULL);
        }
    }
}

/* A push has claimed its slot but not filled it when the ring is closed. It was accepted: one of
   the sleepers gets its item, all others learn that the ring is closed. */
static void close_wakes_sleepers_behind_a_slow_push(void) {
    spdl_ring *ring = ring_of(4, 8, SPDL_RING_MPMC);
    uint32_t open = 0;
    call slow = { ring, true, &open, 42, SPDL_SECONDS(LONG_S), SPDL_TIMEOUT };
    call calls[3];
    test_thread producer = thread_of(call_once, &slow), threads[3];
    uint64_t start;
    int items = 0, closed = 0;
    for (int i = 0; i < 3; ++i) {
        const call c = { ring, false, NULL, 0, SPDL_SECONDS(LONG_S), SPDL_OK };
        calls[i] = c;
        threads[i] = thread_of(call_once, &calls[i]);
    }
    while (spdl_ring_count(ring) == 0) test_sleep_us(100); /* the slot is claimed */
    await_sleepers(&ring->core.pops_waiting, 3);
    spdl_ring_close(ring);
    test_sleep_us(20000);
    start = spdl_time_ns();
    __atomic_store_n(&open, 1, __ATOMIC_RELEASE);
    test_join(producer);
    CHECK_EQ(slow.result, SPDL_OK);
    for (int i = 0; i < 3; ++i) {
        test_join(threads[i]);
        items += calls[i].result == SPDL_OK && calls[i].item == 42;
        closed += calls[i].result == SPDL_CLOSED;
    }
    CHECK(spdl_time_ns() - start < LATE_NS); /* woken, not helped by their timeouts */
    CHECK_EQ(items, 1);
    CHECK_EQ(closed, 2);
    spdl_ring_destroy(ring, NULL, NULL);
}

/* A push is finished while an earlier one is not: its wake-up finds nothing to take. When the
   earlier one is finished too, there are two items, and both sleepers get one. */
static void wake_ups_pass_a_slow_push(void) {
    spdl_ring *ring = ring_of(4, 8, SPDL_RING_MPMC);
    uint32_t open = 0;
    call slow = { ring, true, &open, 0, SPDL_SECONDS(LONG_S), SPDL_TIMEOUT };
    call calls[2];
    test_thread producer = thread_of(call_once, &slow), threads[2];
    uint64_t second = 1, start;
    for (int i = 0; i < 2; ++i) {
        const call c = { ring, false, NULL, 9, SPDL_SECONDS(LONG_S), SPDL_OK };
        calls[i] = c;
        threads[i] = thread_of(call_once, &calls[i]);
    }
    while (spdl_ring_count(ring) == 0) test_sleep_us(100); /* the first slot is claimed */
    await_sleepers(&ring->core.pops_waiting, 2);
    CHECK_EQ(spdl_ring_try_push(ring, &second), SPDL_OK);
    test_sleep_us(20000);
    start = spdl_time_ns();
    __atomic_store_n(&open, 1, __ATOMIC_RELEASE);
    test_join(producer);
    for (int i = 0; i < 2; ++i) {
        test_join(threads[i]);
        CHECK_EQ(calls[i].result, SPDL_OK);
    }
    CHECK(spdl_time_ns() - start < LATE_NS); /* woken, not helped by their timeouts */
    CHECK_EQ(calls[0].item + calls[1].item, 1);
    CHECK_EQ(spdl_ring_count(ring), 0);
    spdl_ring_destroy(ring, NULL, NULL);
}

/* Closing in the middle of a flow: nothing is accepted afterwards, all accepted before arrives. */
typedef struct race {
    spdl_ring *ring;
    uint32_t closed; /* set once close has returned */
    uint64_t accepted, arrived;
    uint64_t seed;
} race;

static void *race_produce(void *arg) {
    race *r = (race *)arg;
    spdl_result result = SPDL_OK;
    chaos = r->seed;
    while (result != SPDL_CLOSED) {
        const bool late = __atomic_load_n(&r->closed, __ATOMIC_ACQUIRE) != 0;
        const uint64_t item = 1;
        result = spdl_ring_push(r->ring, &item, SPDL_SECONDS(LONG_S));
        CHECK(result == SPDL_CLOSED || (result == SPDL_OK && !late));
        if (result == SPDL_OK) __atomic_fetch_add(&r->accepted, 1, __ATOMIC_RELAXED);
        if (result == SPDL_TIMEOUT) break;
    }
    return NULL;
}

static void *race_consume(void *arg) {
    race *r = (race *)arg;
    spdl_result result = SPDL_OK;
    uint64_t item;
    chaos = r->seed + 1;
    while (result == SPDL_OK) {
        result = spdl_ring_pop(r->ring, &item, SPDL_SECONDS(LONG_S));
        if (result == SPDL_OK) __atomic_fetch_add(&r->arrived, 1, __ATOMIC_RELAXED);
    }
    CHECK_EQ(result, SPDL_CLOSED);
    return NULL;
}

static void close_in_the_middle_loses_nothing(void) {
    const int rounds = TEST_SANITIZED ? 40 : 150;
    uint64_t state = test_seed();
    for (int round = 0; round < rounds; ++round) {
        race r = { 0 };
        test_thread threads[6];
        uint64_t start;
        r.ring = ring_of(1 + (uint64_t)round % 3, 8, SPDL_RING_MPMC);
        r.seed = test_random(&state) | 1;
        if (round & 1) without_membarrier(r.ring);
        for (int i = 0; i < 6; ++i)
            threads[i] = thread_of(i < 3 ? race_produce : race_consume, &r);
        test_sleep_us((int64_t)(test_random(&state) % 500));
        spdl_ring_close(r.ring);
        __atomic_store_n(&r.closed, 1, __ATOMIC_RELEASE);
        start = spdl_time_ns();
        for (int i = 0; i < 6; ++i) test_join(threads[i]);
        REQUIRE(spdl_time_ns() - start < LATE_NS); /* nobody was left asleep */
        CHECK_EQ(r.accepted, r.arrived);
        CHECK_EQ(spdl_ring_count(r.ring), 0);
        spdl_ring_destroy(r.ring, NULL, NULL);
    }
}

/* The producer of a ring for one closes it, at once after a push. */
static void *race_produce_and_close(void *arg) {
    race *r = (race *)arg;
    uint64_t state = r->seed, left = test_random(&state) % 40, item = 0;
    chaos = r->seed;
    for (; left > 0; --left, ++item)
        if (CHECK_EQ(spdl_ring_push(r->ring, &item, SPDL_SECONDS(LONG_S)), SPDL_OK)) ++r->accepted;
    spdl_ring_close(r->ring);
    CHECK_EQ(spdl_ring_push(r->ring, &item, SPDL_FOREVER), SPDL_CLOSED);
    CHECK_EQ(spdl_ring_try_push(r->ring, &item), SPDL_CLOSED);
    return NULL;
}

static void close_of_a_ring_for_one_loses_nothing(void) {
    const int rounds = TEST_SANITIZED ? 60 : 300;
    uint64_t state = test_seed();
    for (int round = 0; round < rounds; ++round) {
        race r = { 0 };
        test_thread producer, consumer;
        uint64_t start;
        r.ring = ring_of(1 + (uint64_t)round % 3, 8, SPDL_RING_SPSC);
        if (round & 4) without_membarrier(r.ring);
        r.seed = test_random(&state) | 1;
        producer = thread_of(race_produce_and_close, &r);
        consumer = thread_of(race_consume, &r);
        start = spdl_time_ns();
        test_join(producer);
        test_join(consumer);
        REQUIRE(spdl_time_ns() - start < LATE_NS); /* the consumer was not left asleep */
        CHECK_EQ(spdl_ring_count(r.ring), 0);
        CHECK_EQ(r.accepted, r.arrived);
        spdl_ring_destroy(r.ring, NULL, NULL);
    }
}

/* --- batches --- */

/* Random batches by one thread, where every result is known. */
static void batches_of_every_size(void) {
    const int rounds = TEST_SANITIZED ? 400 : 4000;
    for (size_t m = 0; m < MODES; ++m) {
        for (uint64_t capacity = 1; capacity <= 9; ++capacity) {
            spdl_ring *ring = ring_of(capacity, 8, modes[m]);
            uint64_t in = 0, out = 0, state = test_seed(), moved, items[12];
            for (int round = 0; round < rounds; ++round) {
                const uint64_t push = test_random(&state) % 12, pop = test_random(&state) % 12;
                const uint64_t room = capacity - (in - out);
                spdl_result result;
                for (uint64_t i = 0; i < push; ++i) items[i] = in + i;
                result = spdl__ring_try(ring, true, items, push, &moved);
                CHECK_EQ(result, push > 0 && room == 0 ? SPDL_FULL : SPDL_OK);
                CHECK_EQ(moved, push < room ? push : room);
                in += moved;
                if (push == 1 && in - out < capacity) /* and now and then the quick path */
                    CHECK_EQ(spdl_ring_try_push(ring, &in), SPDL_OK), ++in;
                CHECK_EQ(spdl_ring_count(ring), in - out);
                result = spdl__ring_try(ring, false, items, pop, &moved);
                CHECK_EQ(result, pop > 0 && in == out ? SPDL_EMPTY : SPDL_OK);
                REQUIRE(moved == (pop < in - out ? pop : in - out));
                for (uint64_t i = 0; i < moved; ++i) CHECK_EQ(items[i], out++);
            }
            spdl_ring_destroy(ring, NULL, NULL);
        }
    }
}

static void batches_stop_at_what_there_is(void) {
    for (size_t m = 0; m < MODES; ++m) {
        spdl_ring *ring = ring_of(3, 4, modes[m]);
        const uint32_t in[5] = { 1, 2, 3, 4, 5 };
        uint32_t out[5] = { 0, 0, 0, 77, 77 };
        uint64_t moved = 9;
        CHECK_EQ(spdl_ring_push_n(ring, in, 5, &moved, ms(2)), SPDL_TIMEOUT);
        CHECK_EQ(moved, 3);
        CHECK_EQ(spdl_ring_pop_n(ring, out, 5, &moved, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(moved, 3);
        CHECK(memcmp(in, out, 3 * sizeof in[0]) == 0 && out[3] == 77);
        CHECK_EQ(spdl_ring_pop_n(ring, out, 5, &moved, ms(2)), SPDL_TIMEOUT);
        CHECK_EQ(moved, 0);
        CHECK_EQ(spdl_ring_push_n(ring, NULL, 0, &moved, 0), SPDL_OK);
        CHECK_EQ(spdl_ring_pop_n(ring, NULL, 0, &moved, 0), SPDL_OK);
        CHECK_EQ(spdl_ring_push_n(ring, NULL, 1, &moved, 0), SPDL_E_INVALID);
        CHECK_EQ(spdl_ring_pop_n(ring, out, 1, NULL, 0), SPDL_E_INVALID);
        CHECK_EQ(spdl_ring_push_n(NULL, in, 1, &moved, 0), SPDL_E_INVALID);
        CHECK_EQ(spdl__ring_try(ring, true, SPDL__UNCONST(in), 2, &moved), SPDL_OK);
        spdl_ring_close(ring);
        CHECK_EQ(spdl_ring_push_n(ring, in, 2, &moved, SPDL_FOREVER), SPDL_CLOSED);
        CHECK_EQ(moved, 0);
        CHECK_EQ(spdl__ring_try(ring, true, SPDL__UNCONST(in), 1, &moved), SPDL_CLOSED);
        CHECK_EQ(spdl_ring_pop_n(ring, out, 5, &moved, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(moved, 2);
        CHECK_EQ(spdl_ring_pop_n(ring, out, 5, &moved, SPDL_FOREVER), SPDL_CLOSED);
        CHECK_EQ(moved, 0);
        spdl_ring_destroy(ring, NULL, NULL);
    }
}

/* A consumer that is always there: the producer never sleeps, yet its time runs out. */
static void *pop_until_closed(void *arg) {
    uint64_t item;
    while (spdl_ring_pop((spdl_ring *)arg, &item, SPDL_FOREVER) == SPDL_OK) {
    }
    return NULL;
}

static void batches_end_in_time_though_they_move(void) {
    enum { MANY = 4000000 };
    uint64_t *items = (uint64_t *)calloc(MANY, sizeof *items);
    REQUIRE(items != NULL);
    for (size_t m = 0; m < MODES; ++m) {
        spdl_ring *ring = ring_of(1, 8, modes[m]);
        test_thread consumer = thread_of(pop_until_closed, ring);
        uint64_t moved = MANY;
        CHECK_EQ(spdl_ring_push_n(ring, items, MANY, &moved, ms(2)), SPDL_TIMEOUT);
        CHECK(moved < MANY);
        spdl_ring_close(ring);
        test_join(consumer);
        spdl_ring_destroy(ring, NULL, NULL);
    }
    free(items);
}

enum { BATCH_ITEMS = 3000 };

typedef struct batch_side {
    spdl_ring *ring;
    uint64_t seed;
    uint64_t index;
    uint64_t sum, count;
} batch_side;

static void *batch_produce(void *arg) {
    batch_side *b = (batch_side *)arg;
    uint64_t items[16], moved, state = b->seed;
    for (uint64_t done = 0; done < BATCH_ITEMS; done += moved) {
        uint64_t n = 1 + test_random(&state) % 16;
        if (n > BATCH_ITEMS - done) n = BATCH_ITEMS - done;
        for (uint64_t i = 0; i < n; ++i) items[i] = b->index << 32 | (done + i);
        CHECK_EQ(spdl_ring_push_n(b->ring, items, n, &moved, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(moved, n);
    }
    return NULL;
}

static void *batch_consume(void *arg) {
    batch_side *b = (batch_side *)arg;
    uint64_t items[16], last[4] = { 0 }, moved, state = b->seed;
    while (spdl_ring_pop_n(b->ring, items, 1 + test_random(&state) % 16, &moved, SPDL_FOREVER) ==
           SPDL_OK) {
        for (uint64_t i = 0; i < moved; ++i) {
            const uint64_t producer = items[i] >> 32, number = items[i] & 0xffffffff;
            REQUIRE(producer < 4 && number >= last[producer]);
            last[producer] = number + 1;
            b->sum += number;
        }
        b->count += moved;
    }
    return NULL;
}

static void batch_flow(spdl_ring_mode mode, uint64_t capacity) {
    batch_side sides[8];
    test_thread threads[8];
    const int producers = threads_of(mode, 4), consumers = threads_of(mode, 4);
    uint64_t sum = 0, count = 0;
    spdl_ring *ring = ring_of(capacity, 8, mode);
    memset(sides, 0, sizeof sides);
    for (int i = 0; i < producers + consumers; ++i) {
        sides[i].ring = ring;
        sides[i].seed = test_seed() + (uint64_t)i;
        sides[i].index = (uint64_t)i;
        threads[i] = thread_of(i < producers ? batch_produce : batch_consume, &sides[i]);
    }
    for (int i = 0; i < producers; ++i) test_join(threads[i]);
    spdl_ring_close(ring);
    for (int i = producers; i < producers + consumers; ++i) {
        test_join(threads[i]);
        sum += sides[i].sum;
        count += sides[i].count;
    }
    CHECK_EQ(count, (uint64_t)producers * BATCH_ITEMS);
    CHECK_EQ(sum, (uint64_t)producers * BATCH_ITEMS * (BATCH_ITEMS - 1) / 2);
    spdl_ring_destroy(ring, NULL, NULL);
}

static void batches_of_many_threads(void) {
    static const uint64_t capacities[] = { 1, 2, 3, 16, 100 };
    for (size_t m = 0; m < MODES; ++m)
        for (size_t c = 0; c < 5; ++c) batch_flow(modes[m], capacities[c]);
}

/* A batch that comes for several sleepers wakes as many as it has items for. */
static void batches_wait(void) {
    spdl_ring *ring = ring_of(8, 8, SPDL_RING_MPMC);
    const uint64_t items[4] = { 0, 1, 2, 3 };
    uint64_t moved, seen = 0;
    call calls[4];
    test_thread threads[4];
    for (int i = 0; i < 4; ++i) {
        const call c = { ring, false, NULL, 0, SPDL_SECONDS(LONG_S), SPDL_OK };
        calls[i] = c;
        threads[i] = thread_of(call_once, &calls[i]);
    }
    await_sleepers(&ring->core.pops_waiting, 4);
    CHECK_EQ(spdl__ring_try(ring, true, SPDL__UNCONST(items), 4, &moved), SPDL_OK);
    CHECK_EQ(moved, 4);
    for (int i = 0; i < 4; ++i) {
        test_join(threads[i]);
        CHECK_EQ(calls[i].result, SPDL_OK);
        seen |= (uint64_t)1 << calls[i].item;
    }
    CHECK_EQ(seen, 15);
    spdl_ring_destroy(ring, NULL, NULL);
}

/* --- destroy --- */

typedef struct left_items {
    uint64_t next;
    int calls;
} left_items;

static void left_item(void *item, void *user) {
    left_items *left = (left_items *)user;
    uint64_t value;
    memcpy(&value, item, sizeof value);
    CHECK_EQ(value, left->next++);
    ++left->calls;
}

static void destroy_frees_what_is_left_in_order(void) {
    for (size_t m = 0; m < MODES; ++m) {
        for (uint64_t capacity = 1; capacity <= 5; ++capacity) {
            for (uint64_t shift = 0; shift < 2 * capacity + 1; ++shift) {
                for (uint64_t inside = 0; inside <= capacity; ++inside) {
                    spdl_ring *ring = ring_of(capacity, 8, modes[m]);
                    left_items left = { 1000, 0 };
                    uint64_t item = 0;
                    for (uint64_t i = 0; i < shift; ++i) {
                        CHECK_EQ(spdl_ring_try_push(ring, &i), SPDL_OK);
                        CHECK_EQ(spdl_ring_try_pop(ring, &item), SPDL_OK);
                    }
                    for (item = 1000; item < 1000 + inside; ++item)
                        CHECK_EQ(spdl_ring_try_push(ring, &item), SPDL_OK);
                    if (shift & 1) spdl_ring_close(ring);
                    spdl_ring_destroy(ring, left_item, &left);
                    CHECK_EQ(left.calls, inside);
                }
            }
        }
    }
}

/* --- count --- */

typedef struct watch {
    spdl_ring *ring;
    uint32_t done;
} watch;

static void *watch_count(void *arg) {
    watch *w = (watch *)arg;
    while (!__atomic_load_n(&w->done, __ATOMIC_ACQUIRE)) {
        if (!CHECK(spdl_ring_count(w->ring) <= w->ring->core.capacity)) break;
        test_yield();
    }
    return NULL;
}

static void count_stays_in_bounds_under_contention(void) {
    for (size_t m = 0; m < MODES; ++m) {
        flow f = { 0 };
        watch w = { 0 };
        test_thread watcher;
        f.ring = w.ring = ring_of(3, 8, modes[m]);
        f.how = FLOW_BLOCKING;
        f.producers = f.consumers = threads_of(modes[m], 3);
        f.items = TEST_SANITIZED ? 500 : 4000;
        watcher = thread_of(watch_count, &w);
        flow_run(&f);
        __atomic_store_n(&w.done, 1, __ATOMIC_RELEASE);
        test_join(watcher);
        spdl_ring_destroy(f.ring, NULL, NULL);
    }
}

/* --- signals. SIGALRM is the alarm of the test runner, so another one interrupts the waits; it is
   sent to the very threads that sleep. --- */

static int signals_seen;

static void on_signal(int number) {
    (void)number;
    __atomic_fetch_add(&signals_seen, 1, __ATOMIC_RELAXED);
}

typedef struct storm {
    test_thread target[2];
    int targets;
    uint32_t done;
} storm;

static void *storm_run(void *arg) {
    storm *s = (storm *)arg;
    while (!__atomic_load_n(&s->done, __ATOMIC_ACQUIRE)) {
        for (int i = 0; i < s->targets; ++i) pthread_kill(s->target[i], SIGUSR1);
        test_sleep_us(50);
    }
    return NULL;
}

static void signals_are_handled(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal; /* no SA_RESTART: system calls end with EINTR */
    REQUIRE(sigaction(SIGUSR1, &action, NULL) == 0);
}

static void signals_do_not_shorten_waits(void) {
    for (size_t m = 0; m < MODES; ++m) {
        spdl_ring *ring = ring_of(1, 8, modes[m]);
        storm s = { 0 };
        test_thread thread;
        uint64_t item = 1, start;
        int waits = 0;
        signals_are_handled();
        s.target[s.targets++] = pthread_self();
        thread = thread_of(storm_run, &s);
        __atomic_store_n(&signals_seen, 0, __ATOMIC_RELAXED);
        do {
            start = spdl_time_ns();
            CHECK_EQ(spdl_ring_pop(ring, &item, ms(60)), SPDL_TIMEOUT);
            CHECK(spdl_time_ns() - start >= (uint64_t)ms(60));
        } while (__atomic_load_n(&signals_seen, __ATOMIC_RELAXED) <= 10 && ++waits < 50);
        CHECK_EQ(spdl_ring_try_push(ring, &item), SPDL_OK);
        start = spdl_time_ns();
        CHECK_EQ(spdl_ring_push(ring, &item, ms(60)), SPDL_TIMEOUT);
        CHECK(spdl_time_ns() - start >= (uint64_t)ms(60));
        __atomic_store_n(&s.done, 1, __ATOMIC_RELEASE);
        test_join(thread);
        CHECK(__atomic_load_n(&signals_seen, __ATOMIC_RELAXED) > 10);
        spdl_ring_destroy(ring, NULL, NULL);
    }
}

static void signals_lose_no_item(void) {
    for (size_t m = 0; m < MODES; ++m) {
        flow f = { 0 };
        flow_thread ends[2];
        storm s = { 0 };
        test_thread thread;
        memset(ends, 0, sizeof ends);
        signals_are_handled();
        f.ring = ring_of(1, 8, modes[m]);
        f.how = FLOW_BLOCKING;
        f.producers = f.consumers = 1;
        f.items = TEST_SANITIZED ? 1000 : 5000;
        f.seed = test_seed() | 1;
        f.arrivals = (uint32_t *)calloc(f.items, sizeof(uint32_t));
        ends[0].flow = ends[1].flow = &f;
        s.target[0] = thread_of(flow_produce, &ends[0]);
        s.target[1] = thread_of(flow_consume, &ends[1]);
        s.targets = 2;
        thread = thread_of(storm_run, &s);
        test_sleep_us(50000);
        __atomic_store_n(&s.done, 1, __ATOMIC_RELEASE);
        test_join(thread); /* before its targets are gone */
        test_join(s.target[0]);
        spdl_ring_close(f.ring);
        test_join(s.target[1]);
        for (uint64_t i = 0; i < f.items; ++i)
            if (!CHECK_EQ(f.arrivals[i], 1)) break;
        free(f.arrivals);
        spdl_ring_destroy(f.ring, NULL, NULL);
    }
}

/* --- sleeping --- */

static double cpu_time_ms(void) { return (double)test_cpu_ns() * 1e-6; }

static void sleepers_burn_nothing(void) {
    const double most = TEST_SANITIZED ? 10 : 1;
    spdl_ring *ring = ring_of(1, 8, SPDL_RING_MPMC);
    call calls[4];
    test_thread threads[4];
    double cpu_ms = most;
    for (int i = 0; i < 4; ++i) {
        const call c = { ring, false, NULL, 0, SPDL_FOREVER, SPDL_OK };
        calls[i] = c;
        threads[i] = thread_of(call_once, &calls[i]);
    }
    await_sleepers(&ring->core.pops_waiting, 4);
    for (int i = 0; i < 5 && cpu_ms >= most; ++i) { /* a thread may still be about to sleep */
        const double before = cpu_time_ms();
        test_sleep_us(100000);
        cpu_ms = cpu_time_ms() - before;
    }
    CHECK(cpu_ms < most);
    spdl_ring_close(ring);
    for (int i = 0; i < 4; ++i) test_join(threads[i]);
    spdl_ring_destroy(ring, NULL, NULL);
}

#ifdef SPDL_OS_POSIX
/* --- events that cannot be had --- */

SPDL_FN(none_at_all, void, void) { return SPDL_END; }

static int warnings; /* of the reporter, which can be done without */

static void count_warnings(spdl_log_level level, const char *text, void *user) {
    (void)user;
    if (level != SPDL_LOG_WARN) return;
    CHECK_STR(text, "no memory or thread for reports: there are none");
    ++warnings;
}

static void no_report(const spdl_stats *interval, const spdl_stats *total, void *user) {
    (void)interval, (void)total, (void)user;
}

static spdl_result make_and_drop(int what) {
    const spdl_ring_desc ring = { .capacity = 3 };
    const spdl_pool_desc pool = { .workers = 2, .guests = 1 };
    const spdl_report_desc report = { .every = 3600, .report_fn = no_report };
    const spdl_doctor_desc doctor = { .seconds = 1e9, .quiet = true };
    const spdl_pipeline_desc pipeline = { .workers = 2, .report = &report, .doctor = &doctor,
                                          .logger.log_fn = count_warnings };
    spdl_ring *r;
    spdl_pool *w;
    spdl_pipeline *p;
    spdl_result result = what == 0   ? spdl_ring_create(&r, &ring)
                         : what == 1 ? spdl_pool_create(&w, &pool)
                                     : spdl_pipeline_create(&p, &pipeline, SPDL_STAGES(
                                           SPDL_SOURCE(none_at_all, .item_bytes = 8),
                                           SPDL_BATCH(2), SPDL_SINK(1)));
    if (result != SPDL_OK) return result;
    if (what == 0) spdl_ring_destroy(r, NULL, NULL);
    if (what == 1) spdl_pool_destroy(w);
    if (what == 2) spdl_pipeline_destroy(p);
    return result;
}

/* One after the other, each of the three parts of an event: all is given back. */
void condvar_events_that_cannot_be_had(void);
void condvar_events_that_cannot_be_had(void) {
    for (int what = 0; what < 3; ++what)
        for (int left = 0, last = 0; !last; ++left) {
            spdl_result result;
            parts_left = left;
            parts_refused = warnings = 0;
            result = make_and_drop(what);
            parts_left = -1;
            last = parts_refused == 0;
            CHECK_EQ(parts_alive, 0);
            CHECK_EQ(result, last || warnings > 0 ? SPDL_OK : SPDL_E_NOMEM);
        }
}
#endif

/* --- the table, twice --- */

#define RING_TESTS(X)                                                                              \
    X(flow_spsc_try)                                                                               \
    X(flow_spsc_blocking)                                                                          \
    X(flow_spsc_timed)                                                                             \
    X(flow_mpmc_try)                                                                               \
    X(flow_mpmc_blocking)                                                                          \
    X(flow_mpmc_timed)                                                                             \
    X(flow_of_every_item_size)                                                                     \
    X(flow_of_many_laps)                                                                           \
    X(laps_keep_the_order)                                                                         \
    X(large_rings_keep_the_order)                                                                  \
    X(capacity_is_exact)                                                                           \
    X(items_are_pointers_by_default)                                                               \
    X(pop_writes_the_item_only)                                                                    \
    X(desc_is_checked)                                                                             \
    X(timeouts_are_not_early)                                                                      \
    X(timeout_of_a_pop_takes_nothing)                                                              \
    X(timeout_of_a_push_leaves_nothing)                                                            \
    X(timeout_may_be_huge)                                                                         \
    X(close_drains_then_tells)                                                                     \
    X(close_wakes_sleepers)                                                                        \
    X(close_wakes_sleepers_behind_a_slow_push)                                                     \
    X(wake_ups_pass_a_slow_push)                                                                   \
    X(close_in_the_middle_loses_nothing)                                                           \
    X(close_of_a_ring_for_one_loses_nothing)                                                       \
    X(batches_of_every_size)                                                                       \
    X(batches_stop_at_what_there_is)                                                               \
    X(batches_wait)                                                                                \
    X(batches_of_many_threads)                                                                     \
    X(batches_end_in_time_though_they_move)                                                        \
    X(destroy_frees_what_is_left_in_order)                                                         \
    X(count_stays_in_bounds_under_contention)                                                      \
    X(signals_do_not_shorten_waits)                                                                \
    X(signals_lose_no_item)                                                                        \
    X(sleepers_burn_nothing)

#define CONDVAR_DECLARE(test) void condvar_##test(void);
RING_TESTS(CONDVAR_DECLARE)

#ifdef SPDL_OS_POSIX
#define CONDVAR_DEFINE(test)                                                                       \
    void condvar_##test(void) { test(); }
RING_TESTS(CONDVAR_DEFINE)
#else
#define RING_ROW(test) TEST_CASE(test),
#ifdef _WIN32 /* has no other waits */
TEST_TABLE(ring) { RING_TESTS(RING_ROW) TEST_END };
#else
#define CONDVAR_ROW(test) TEST_CASE(condvar_##test),
void condvar_events_that_cannot_be_had(void);
TEST_TABLE(ring) { RING_TESTS(RING_ROW) RING_TESTS(CONDVAR_ROW)
                   TEST_CASE(condvar_events_that_cannot_be_had), TEST_END };
#endif
#endif
