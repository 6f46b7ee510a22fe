/* .ready_fn: a consumer that must not block is told when another call of next can return something,
   a producer when a push that was refused can succeed. And a stop in a signal handler, which may
   interrupt the consumer anywhere. */
#define ITEMS_PRIVATE /* its events */
#include "flow.h"

/* What an event loop waits for. */
typedef struct bell {
    spdl__os_event rung;
    uint32_t rings;    /* calls of ready_fn */
    uint64_t thread;   /* of the latest one */
} bell;

static void bell_make(bell *b) {
    memset(b, 0, sizeof *b);
    REQUIRE(spdl__os_event_init(&b->rung));
}

static void ring(void *user) {
    bell *b = (bell *)user;
    __atomic_store_n(&b->thread, test_thread_id(), __ATOMIC_RELAXED);
    __atomic_add_fetch(&b->rings, 1, __ATOMIC_ACQ_REL);
    spdl__os_event_wake(&b->rung, 1);
}

static spdl_pipeline *start_ready(bell *b, int workers, spdl_pool *pool, const spdl_stage *rows,
                                  size_t count) {
    spdl_pipeline_desc desc = { .pool = pool, .ready_fn = ring, .ready_user = b };
    spdl_pipeline *p = NULL;
    spdl_error error = { 0 };
    if (pool == NULL) desc.workers = workers < 0 ? 0 : TEST_WORKERS(workers);
    desc.error = &error;
    desc.logger.log_fn = log_nothing;
    if (spdl_pipeline_create(&p, &desc, rows, count) != SPDL_OK) CHECK_STR(error.text, "");
    REQUIRE(p != NULL);
    return p;
}

#define READY(b, workers, ...) start_ready((b), (workers), NULL, SPDL_STAGES(__VA_ARGS__))
#define READY_ON(b, pool, ...) start_ready((b), 0, (pool), SPDL_STAGES(__VA_ARGS__))
#define ALL_PROCESSORS (-1)

/* A turn of the loop: asks until there is nothing, then waits for the bell. What next returned that
   is no item; `asked` counts the calls of next. */
typedef struct loop {
    bell *bell;
    long value, taken, asked;
    bool polls; /* sometimes asks again by itself, or waits in next */
    uint32_t word; /* of the bell, when the turn began */
    uint64_t random;
} loop;

static spdl_result turn(loop *l, spdl_pipeline *p) {
    spdl_result result = SPDL_TIMEOUT;
    item *it;
    while (++l->asked && (result = SPDL_NEXT(p, &it, 0)) == SPDL_OK) {
        CHECK(l->value < 0 || it->value > l->value); /* in order */
        l->value = it->value;
        ++l->taken;
        item_free(it);
    }
    if (result != SPDL_TIMEOUT) return result;
    if (l->polls && test_random(&l->random) % 4 == 0) return result;
    if (l->polls && test_random(&l->random) % 8 == 0) {
        ++l->asked;
        result = SPDL_NEXT(p, &it, 50000);
        if (result != SPDL_OK) return result;
        l->value = it->value;
        ++l->taken;
        item_free(it);
        return SPDL_TIMEOUT;
    }
    if (spdl__os_event_sleep(&l->bell->rung, l->word, spdl__deadline(SPDL_SECONDS(20))) ==
        SPDL_TIMEOUT) {
        CHECK_STR("a wake was lost", "");
        return SPDL_E_STAGE;
    }
    return SPDL_TIMEOUT;
}

static spdl_result turns(loop *l, spdl_pipeline *p) {
    spdl_result result;
    l->value = -1;
    do {
        l->word = spdl__load32(&l->bell->rung.word);
        result = turn(l, p);
    } while (result == SPDL_TIMEOUT);
    return result;
}

/* Quick and slow, and some are dropped. */
SPDL_FN(unsteady, item, item) {
    const uint64_t key = spdl_item_key(task);
    if (key % 7 == 0) sleep_us((long)(key / 7 % 200));
    if (key % 5 == 0) return SPDL_SKIP;
    *out = in;
    return SPDL_OK;
}

/* Nothing was pushed: it is not told to come at once, which would be for ever. */
static void a_feed_without_workers_rings_at_a_push(void) {
    bell b;
    item *it;
    spdl_pipeline *p;
    bell_make(&b);
    p = READY(&b, 0, SPDL_FEED(item, .free_item = item_free), SPDL_PIPE(pass_on), SPDL_SINK(1));
    CHECK_EQ(SPDL_NEXT(p, &it, 0), SPDL_TIMEOUT);
    CHECK_EQ(b.rings, 0);
    CHECK_EQ(spdl_pipeline_push(p, item_make(1), 0), SPDL_OK);
    CHECK_EQ(b.rings, 1);
    CHECK_EQ(SPDL_NEXT(p, &it, 0), SPDL_OK);
    item_free(it);
    CHECK_EQ(spdl_pipeline_push_end(p), SPDL_OK);
    CHECK_EQ(SPDL_NEXT(p, &it, 0), SPDL_END);
    DONE(p);
    spdl__os_event_fini(&b.rung);
}

static void no_wake_is_lost(void) {
    static const int many[] = { 0, 1, 2, 4, ALL_PROCESSORS };
    for (int i = 0; i < 10; ++i) {
        bell b;
        loop l = { .bell = &b, .polls = i >= 5, .random = test_seed() + (uint64_t)i };
        spdl_pipeline *p;
        bell_make(&b);
        p = READY(&b, many[i % 5], COUNT_TO(2000),
                  SPDL_PIPE(unsteady, .concurrency = 2), SPDL_PIPE(pass_on), SPDL_SINK(3));
        CHECK_STR(spdl_result_text(turns(&l, p)), spdl_result_text(SPDL_END));
        CHECK(l.taken > 1500 && l.taken < 1700);
        CHECK(b.rings <= (uint32_t)l.asked); /* once for each call at most */
        DONE(p);
        spdl__os_event_fini(&b.rung);
    }
}

/* Epochs, rewinds while it waits, and an end. */
static void ends_ring_too(void) {
    bell b;
    loop l = { .bell = &b };
    int gate = 0;
    script slow = { .gate = &gate, .gate_at = 5 };
    bell_make(&b);
    spdl_pipeline *p = READY(&b, 2, SOURCE(.count = 10, .sleep_us = 200), SPDL_PIPE(pass_on),
                             SPDL_SINK(2));
    for (int round = 0; round < 20; ++round) {
        item *it;
        CHECK_EQ(turns(&l, p), SPDL_END);
        CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_FOREVER), SPDL_OK);
        while (SPDL_NEXT(p, &it, 0) == SPDL_OK) item_free(it);
        if (round % 2) CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_FOREVER), SPDL_OK);
    }
    DONE(p);
    p = READY(&b, 1, COUNT_TO(10), FOLLOW(.every = 4, .rest = 3, .result = SPDL_E_STAGE,
                                          .sleep_us = 1000), SPDL_SINK(2));
    CHECK_EQ(turns(&l, p), SPDL_E_STAGE);
    DONE(p);
    p = READY(&b, 1, COUNT_TO(10), SPDL_PIPE(follow, .ctx = &slow), SPDL_SINK(8));
    for (int i = 0; i < 5; ++i) {
        item *it;
        REQUIRE(SPDL_NEXT(p, &it, SPDL_FOREVER) == SPDL_OK);
        item_free(it);
    }
    CHECK_EQ(SPDL_NEXT(p, &(item *){ NULL }, 0), SPDL_TIMEOUT);
    b.rings = 0;
    (void)spdl_pipeline_stop(p, 0);
    CHECK_EQ(b.rings, 1);
    CHECK_EQ(b.thread, test_thread_id());
    CHECK_EQ(turns(&l, p), SPDL_CLOSED);
    open_gate(&gate);
    DONE(p);
    spdl__os_event_fini(&b.rung);
}

/* Nobody is called without a timeout of next, or twice for one, or after destroy. */
static void it_rings_once(void) {
    bell b;
    item *it;
    int gate = 0;
    script slow = { .gate = &gate, .gate_at = 0 };
    bell_make(&b);
    spdl_pool *pool = pool_of(1);
    spdl_pipeline *p = READY_ON(&b, pool, COUNT_TO(50), SPDL_PIPE(follow, .ctx = &slow),
                                SPDL_SINK(4));
    sleep_us(2000);
    CHECK_EQ(b.rings, 0);
    for (int i = 0; i < 3; ++i) CHECK_EQ(SPDL_NEXT(p, &it, 0), SPDL_TIMEOUT);
    open_gate(&gate);
    await((int *)&b.rings, 1);
    sleep_us(2000); /* the sink fills: no second call */
    CHECK_EQ(b.rings, 1);
    REQUIRE(SPDL_NEXT(p, &it, 0) == SPDL_OK);
    item_free(it);
    while (SPDL_NEXT(p, &it, 0) == SPDL_OK) item_free(it);
    spdl_pipeline_destroy(p); /* while it may be armed: nobody counts as a sleeper any more */
    b.rings = 0;
    CHECK_EQ(spdl__load32(&pool->beacon.sleepers) / SPDL__WAITER, 0);
    sleep_us(1000);
    CHECK_EQ(b.rings, 0);
    spdl_pool_destroy(pool);
    spdl__os_event_fini(&b.rung);
}

static void *comes_by(void *arg) {
    loop *l = (loop *)arg;
    while (__atomic_load_n(&l->taken, __ATOMIC_RELAXED) < 0)
        (void)spdl_pool_run((spdl_pool *)(uintptr_t)l->random, 1000000);
    return NULL;
}

/* The threads of a pool that has only guests tell it, too. */
static void guests_ring(void) {
    bell b;
    loop l = { .bell = &b };
    const spdl_pool_desc desc = { .guests = 1 };
    spdl_pool *pool;
    bell_make(&b);
    REQUIRE(spdl_pool_create(&pool, &desc) == SPDL_OK);
    loop guest = { .taken = -1, .random = (uint64_t)(uintptr_t)pool };
    test_thread thread;
    spdl_pipeline *p = READY_ON(&b, pool, COUNT_TO(300), SPDL_PIPE(unsteady), SPDL_SINK(2));
    REQUIRE(test_thread_start(&thread, comes_by, &guest));
    CHECK_EQ(turns(&l, p), SPDL_END);
    DONE(p);
    __atomic_store_n(&guest.taken, 0, __ATOMIC_RELAXED);
    test_join(thread);
    spdl_pool_destroy(pool);
    spdl__os_event_fini(&b.rung);
}

/* --- room for a push --- */

/* A push that is refused leaves the item to us. */
static spdl_result push(spdl_pipeline *p, long value, int64_t timeout_ns) {
    item *it = item_make(value);
    const spdl_result result = spdl_pipeline_push(p, it, timeout_ns);
    if (result != SPDL_OK) item_free(it);
    return result;
}

static uint32_t counted(const spdl_pool *pool) {
    return spdl__load32(&pool->beacon.sleepers) / SPDL__WAITER;
}

#define FEED(...) SPDL_FEED(item, .free_item = item_free, .buffer_size = __VA_ARGS__)

/* No worker takes anything. Returns a pipeline whose push was refused. */
static spdl_pipeline *full_feed(bell *b, spdl_pool *pool, script *slow, int *gate) {
    *gate = 0;
    *slow = (script){ .gate = gate, .gate_at = 0 };
    b->rings = 0;
    spdl_pipeline *p = READY_ON(b, pool, FEED(2), SPDL_PIPE(follow, .ctx = slow), SPDL_SINK(9));
    CHECK_EQ(push(p, 0, 0), SPDL_OK);
    await(&slow->calls, 1);
    CHECK_EQ(push(p, 1, 0), SPDL_OK);
    CHECK_EQ(push(p, 2, 0), SPDL_OK);
    CHECK_EQ(push(p, 3, 0), SPDL_FULL);
    CHECK_EQ(counted(pool), 1);
    CHECK_EQ(b->rings, 0);
    return p;
}

/* Once for each refused push, and whoever rings takes it out of the sleepers. */
static void room_rings_once(void) {
    bell b;
    script slow;
    int gate;
    bell_make(&b);
    spdl_pool *pool = pool_of(1);
    spdl_pipeline *p = full_feed(&b, pool, &slow, &gate);
    for (int i = 0; i < 3; ++i) CHECK_EQ(push(p, 3, 0), SPDL_FULL);
    CHECK_EQ(counted(pool), 1);
    open_gate(&gate);
    await((int *)&b.rings, 1);
    await(&slow.calls, 3); /* more room: no second call */
    CHECK_EQ(counted(pool), 0);
    CHECK_EQ(push(p, 3, 0), SPDL_OK);
    CHECK_EQ(spdl_pipeline_push_end(p), SPDL_OK);
    TAKE_ALL(p, "0 1 2 3", SPDL_END);
    CHECK_EQ(b.rings, 1);
    DONE(p);
    spdl_pool_destroy(pool);
    spdl__os_event_fini(&b.rung);
}

/* Nobody is called then, or is counted as a sleeper any more. */
static void what_else_ends_a_wait_for_room(void) {
    bell b;
    script slow;
    int gate;
    bell_make(&b);
    spdl_pool *pool = pool_of(1);
    for (int way = 0; way < 4; ++way) {
        spdl_pipeline *p = full_feed(&b, pool, &slow, &gate);
        if (way == 0) CHECK_EQ(push(p, 3, 1000), SPDL_TIMEOUT);
        if (way == 1) CHECK_EQ(spdl_pipeline_push_end(p), SPDL_OK);
        if (way == 2) CHECK_EQ(spdl_pipeline_stop(p, 0), SPDL_TIMEOUT); /* which rings */
        CHECK_EQ(b.rings, way == 2);
        if (way < 3) CHECK_EQ(counted(pool), 0);
        if (way == 2) CHECK_EQ(push(p, 3, 0), SPDL_CLOSED);
        open_gate(&gate);
        if (way == 3) await((int *)&b.rings, 1);
        if (way == 3) await(&slow.calls, 3);
        if (way == 3) CHECK_EQ(push(p, 3, 0), SPDL_OK);
        DONE(p);
        CHECK_EQ(b.rings, way >= 2);
        CHECK_EQ(counted(pool), 0);
    }
    spdl_pipeline *p = full_feed(&b, pool, &slow, &gate);
    open_gate(&gate); /* destroy may be first, or the room */
    DONE(p);
    const uint32_t rings = b.rings;
    CHECK_EQ(counted(pool), 0);
    sleep_us(1000);
    CHECK_EQ(b.rings, rings);
    spdl_pool_destroy(pool);
    spdl__os_event_fini(&b.rung);
}

/* It rings at the end of the rewind, where a push is not refused as one of two. */
typedef struct pushes_inside {
    spdl_pipeline *p;
    int called;
} pushes_inside;

static void looks_at_the_door(void *user) {
    pushes_inside *i = (pushes_inside *)user;
    ++i->called;
    CHECK_EQ(spdl__load32(&i->p->producer_inside), 0);
    CHECK_EQ(spdl__load32(&i->p->stopping), 0);
}

static void a_rewind_rings_at_its_end(void) {
    pushes_inside inside = { 0 };
    spdl_pipeline_desc desc = { .workers = SPDL_INLINE, .ready_fn = looks_at_the_door,
                                .ready_user = &inside };
    REQUIRE(spdl_pipeline_create(&inside.p, &desc, SPDL_STAGES(FEED(1), SPDL_PIPE(pass_on),
                                                               SPDL_SINK(2))) == SPDL_OK);
    for (int i = 0; i < 2; ++i) {
        CHECK_EQ(push(inside.p, 1, 0), SPDL_OK);
        CHECK_EQ(push(inside.p, 2, 0), SPDL_FULL);
        CHECK_EQ(spdl_pipeline_rewind(inside.p, 0, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(inside.called, i + 1);
    }
    CHECK_EQ(spdl_pipeline_rewind(inside.p, 0, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(inside.called, 2);
    DONE(inside.p);
}

/* A loop that pushes and takes. Most items give it nothing to take: room alone wakes it. */
SPDL_FN(answers_few, item, item) {
    const uint64_t key = spdl_item_key(task);
    if (key % 7 == 0) sleep_us((long)(key / 7 % 100));
    if (in->value % 50 != 49) return SPDL_SKIP;
    *out = in;
    return SPDL_OK;
}

static void a_loop_that_pushes_is_never_left_alone(void) {
    static const int many[] = { 1, 2, 4, 0, SPDL_INLINE, ALL_PROCESSORS };
    for (int i = 0; i < 12; ++i) {
        const long count = 1000;
        bell b;
        loop l = { .bell = &b, .polls = i >= 6, .random = test_seed() + (uint64_t)i, .value = -1 };
        long pushed = 0, refused = 0;
        spdl_result result;
        bell_make(&b);
        spdl_pipeline_desc desc = { .ready_fn = ring, .ready_user = &b };
        spdl_pipeline *p;
        desc.workers = many[i % 6] == ALL_PROCESSORS ? 0 : many[i % 6];
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            FEED(1 + i % 3), SPDL_PIPE(answers_few, .concurrency = 1 + i % 2),
            SPDL_PIPE(pass_on), SPDL_SINK(2))) == SPDL_OK);
        do {
            l.word = spdl__load32(&b.rung.word);
            while (pushed < count && push(p, pushed, 0) == SPDL_OK)
                if (++pushed == count) CHECK_EQ(spdl_pipeline_push_end(p), SPDL_OK);
            refused += pushed < count;
            result = turn(&l, p);
        } while (result == SPDL_TIMEOUT);
        CHECK_STR(spdl_result_text(result), spdl_result_text(SPDL_END));
        CHECK_EQ(pushed, count);
        CHECK_EQ(l.taken, count / 50);
        CHECK(b.rings <= (uint32_t)(l.asked + refused));
        DONE(p);
        spdl__os_event_fini(&b.rung);
    }
}

/* A producer with an event of its own; it gives up when the pipeline is closed. */
typedef struct pusher {
    bell room, items;
    spdl_pipeline *p;
    long count, pushed;
    spdl_result last;
} pusher;

static void ring_both(void *user) {
    pusher *one = (pusher *)user;
    ring(&one->room);
    ring(&one->items);
}

static void *pushes(void *arg) {
    pusher *one = (pusher *)arg;
    while (one->pushed < one->count && one->last != SPDL_CLOSED) {
        const uint32_t word = spdl__load32(&one->room.rung.word);
        one->last = push(one->p, one->pushed, 0);
        one->pushed += one->last == SPDL_OK;
        if (one->last == SPDL_FULL &&
            spdl__os_event_sleep(&one->room.rung, word, spdl__deadline(SPDL_SECONDS(20))) ==
                SPDL_TIMEOUT) {
            CHECK_STR("a wake was lost", "");
            return NULL;
        }
    }
    if (one->last != SPDL_CLOSED) CHECK_EQ(spdl_pipeline_push_end(one->p), SPDL_OK);
    return NULL;
}

/* To the end, to a failure, or to a stop. */
static void a_producer_has_its_own_thread(void) {
    static const int many[] = { 1, 2, 4, SPDL_INLINE };
    for (int i = 0; i < 12; ++i) {
        pusher one = { .count = 2000 };
        loop l = { .bell = &one.items };
        spdl_pipeline_desc desc = { .workers = many[i % 4], .ready_fn = ring_both,
                                    .ready_user = &one };
        script s = { .every = i / 4 == 1 ? 700 : 0, .rest = 699, .result = SPDL_E_STAGE };
        test_thread thread;
        desc.logger.log_fn = log_nothing;
        bell_make(&one.room);
        bell_make(&one.items);
        REQUIRE(spdl_pipeline_create(&one.p, &desc, SPDL_STAGES(
            FEED(1 + i % 3), SPDL_PIPE(follow, .ctx = &s), SPDL_PIPE(unsteady), SPDL_SINK(2))) ==
            SPDL_OK);
        REQUIRE(test_thread_start(&thread, pushes, &one));
        if (i / 4 == 2) {
            l.value = -1;
            while (l.taken < 100) {
                l.word = spdl__load32(&one.items.rung.word);
                REQUIRE(turn(&l, one.p) == SPDL_TIMEOUT);
            }
            (void)spdl_pipeline_stop(one.p, 0);
        }
        CHECK_EQ(turns(&l, one.p), i / 4 == 0 ? SPDL_END : i / 4 == 1 ? SPDL_E_STAGE : SPDL_CLOSED);
        test_join(thread);
        if (i / 4 == 0) CHECK_EQ(one.pushed, one.count);
        else CHECK_EQ(one.last, SPDL_CLOSED);
        DONE(one.p);
        spdl__os_event_fini(&one.room.rung);
        spdl__os_event_fini(&one.items.rung);
    }
}

/* --- a stop in a signal handler --- */

#if TEST_POSIX
static spdl_pipeline *volatile stopped;
static volatile sig_atomic_t in_free, freed_in_stop, came, in_rewind;

static void stops_there(int number) {
    const int kept = errno;
    (void)number;
    if (stopped != NULL) {
        came = 1;
        in_rewind = (spdl__load32(&stopped->stopping) & SPDL__REWIND) != 0;
        (void)spdl_pipeline_stop(stopped, 0);
    }
    errno = kept;
}

/* As free of a C library, whose lock the interrupted call has. */
static void frees_alone(void *it) {
    if (in_free) freed_in_stop = 1;
    in_free = 1;
    item_free((item *)it);
    in_free = 0;
}

static void handle(int number) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = stops_there;
    REQUIRE(sigaction(number, &action, NULL) == 0);
}

/* The consumer is interrupted inside of its free; the items that wait are not freed there. */
static void a_stop_in_a_handler_frees_nothing(void) {
    handle(SIGUSR1);
    for (int workers = 0; workers < 3; ++workers) {
        item *it;
        script all = { .count = 100 };
        spdl_pipeline *p = START(workers, SPDL_SOURCE(count_up, .ctx = &all,
                                                      .free_item = frees_alone),
                                 SPDL_PIPE(pass_on, .free_item = frees_alone), SPDL_SINK(8));
        REQUIRE(SPDL_NEXT(p, &it, SPDL_FOREVER) == SPDL_OK);
        sleep_us(2000); /* items wait on all edges */
        stopped = p;
        in_free = 1;
        raise(SIGUSR1);
        in_free = 0;
        stopped = NULL;
        CHECK(!freed_in_stop);
        item_free(it);
        while (SPDL_NEXT(p, &it, SPDL_FOREVER) == SPDL_OK) item_free(it);
        CHECK_EQ(SPDL_NEXT(p, &it, SPDL_FOREVER), SPDL_CLOSED);
        DONE(p); /* which finds that all items were freed */
    }
}

/* ready_fn runs in the handler, where write is safe and a lock is not. */
static volatile sig_atomic_t in_handler, rang_in_handler;
static int wakes[2];

static void wakes_the_loop(void *user) {
    (void)user;
    if (in_handler) rang_in_handler = 1;
    if (write(wakes[1], "", 1) != 1) rang_in_handler = -1;
}

static void stops_and_says_so(int number) {
    in_handler = 1;
    stops_there(number);
    in_handler = 0;
}

static void a_stop_in_a_handler_rings(void) {
    struct sigaction action;
    TEST_NEEDS_LINUX();
    memset(&action, 0, sizeof action);
    action.sa_handler = stops_and_says_so;
    REQUIRE(sigaction(SIGUSR1, &action, NULL) == 0 && pipe(wakes) == 0);
    for (int workers = 0; workers < 3; ++workers) {
        spdl_pipeline_desc desc = { .workers = TEST_WORKERS(workers), .ready_fn = wakes_the_loop };
        spdl_pipeline *p;
        item *it;
        char byte;
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(SPDL_FEED(item), SPDL_PIPE(pass_on),
                                                            SPDL_SINK(2))) == SPDL_OK);
        CHECK_EQ(SPDL_NEXT(p, &it, 0), SPDL_TIMEOUT);
        rang_in_handler = 0;
        stopped = p;
        raise(SIGUSR1);
        stopped = NULL;
        CHECK_EQ(rang_in_handler, 1);
        CHECK_EQ(read(wakes[0], &byte, 1), 1);
        CHECK_EQ(SPDL_NEXT(p, &it, 0), SPDL_CLOSED);
        DONE(p);
    }
}

SPDL_FN(allocates, void, char) {
    *out = (char *)malloc(100 + spdl_sequence(task) % 900);
    return *out != NULL ? SPDL_OK : SPDL_E_NOMEM;
}

SPDL_FN(allocates_more, char, char) {
    *out = (char *)malloc(200);
    return *out != NULL ? SPDL_OK : SPDL_E_NOMEM;
}

typedef struct bother {
    pthread_t consumer;
    long us;
} bother;

static void *bothers(void *arg) {
    const bother *b = (const bother *)arg;
    sleep_us(b->us);
    pthread_kill(b->consumer, SIGUSR1);
    return NULL;
}

/* It comes at any moment: in malloc, in next, in a rewind, in a stage that the consumer runs. */
static void a_stop_in_a_handler_comes_at_any_moment(void) {
#if defined(__SANITIZE_THREAD__)
    TEST_SKIP("the sanitizer delays signals");
#endif
    TEST_NEEDS_LINUX(); /* elsewhere an event may be a lock */
    const int rounds = TEST_SANITIZED ? 100 : 600;
    handle(SIGUSR1);
    for (int i = 0; i < rounds; ++i) {
        bother b = { pthread_self(), 50 + i * 7 % 900 };
        test_thread thread;
        spdl_pipeline_desc desc = { .workers = i % 3 == 2 ? SPDL_INLINE : i % 3 };
        desc.logger.log_fn = log_nothing;
        spdl_pipeline *p;
        char *text;
        int n = 0;
        came = in_rewind = 0;
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_SOURCE(allocates, .free_item = free),
            SPDL_PIPE(allocates_more, .concurrency = 2, .free_item = free),
            SPDL_SINK(8))) == SPDL_OK);
        stopped = p;
        REQUIRE(test_thread_start(&thread, bothers, &b));
        while (SPDL_NEXT(p, &text, SPDL_FOREVER) == SPDL_OK) {
            free(text);
            free(malloc(64));
            if (came || i % 4 != 3 || ++n % 8 != 0) continue;
            REQUIRE(spdl_pipeline_rewind(p, 0, SPDL_FOREVER) == SPDL_OK);
            if (came && !in_rewind) break; /* a rewind forgets a stop that came before it */
        }
        test_join(thread);
        stopped = NULL;
        spdl_pipeline_destroy(p);
    }
}
#else
static void a_stop_in_a_handler_frees_nothing(void) { TEST_SKIP("needs signals"); }
static void a_stop_in_a_handler_rings(void) { TEST_SKIP("needs signals"); }
static void a_stop_in_a_handler_comes_at_any_moment(void) { TEST_SKIP("needs signals"); }
#endif

TEST_TABLE(ready) {
    TEST_CASE(no_wake_is_lost),
    TEST_CASE(a_feed_without_workers_rings_at_a_push),
    TEST_CASE(ends_ring_too),
    TEST_CASE(it_rings_once),
    TEST_CASE(guests_ring),
    TEST_CASE(room_rings_once),
    TEST_CASE(what_else_ends_a_wait_for_room),
    TEST_CASE(a_rewind_rings_at_its_end),
    TEST_CASE(a_loop_that_pushes_is_never_left_alone),
    TEST_CASE(a_producer_has_its_own_thread),
    TEST_CASE(a_stop_in_a_handler_frees_nothing),
    TEST_CASE(a_stop_in_a_handler_rings),
    TEST_CASE(a_stop_in_a_handler_comes_at_any_moment),
    TEST_END,
};
