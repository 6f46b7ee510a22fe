/* spdl_pipeline_rewind: after any number of items, an end, a failure or a stop the pipeline starts
   again where it is said. */
#include "flow.h"

#define STREAM(...)                                                                                \
    SPDL_PIPE(twice, .again = true, .free_item = item_free, .free_state = free, __VA_ARGS__)

/* One becomes two, by SPDL_AGAIN. */
SPDL_FN(twice, item, item) {
    long **at = (long **)spdl_call_state(task);
    if (*at == NULL) *at = (long *)calloc(1, sizeof **at);
    *out = item_make(in->value);
    return (*at)[0]++ == 0 ? SPDL_AGAIN : SPDL_OK;
}

SPDL_FN(by_two, item, item) {
    *out = in;
    return spdl_route(task, (int)(in->value % 2));
}

static script source, plain, more, fresh;
static burst pair = { .plus = 2 };

/* Pipelines that hand on 0, 1, 2, ... or each number twice. */
static spdl_pipeline *shape(int number, int workers, long count) {
    const spdl_stage from = SPDL_SOURCE(count_up, .ctx = &source, .free_item = item_free);
    const spdl_stage step = SPDL_PIPE(follow, .ctx = &plain);
    const spdl_stage next = SPDL_PIPE(follow, .ctx = &more);
    memset(&source, 0, sizeof source);
    source.count = count;
    fresh.fresh = true;
    switch (number) {
    case 0: return START(workers, from, SPDL_SINK(3));
    case 1: return START(workers, from, step, next, SPDL_SINK(1));
    case 2:
        return START(workers, from,
                     SPDL_PIPE(follow, .ctx = &fresh, .concurrency = 4, .free_item = item_free),
                     SPDL_SINK(3));
    case 3:
        return START(workers, from, SPDL_BRANCH(by_two), SPDL_PATH("a"), step, SPDL_PATH("b"),
                     SPDL_MERGE(), SPDL_SINK(2));
    case 4:
        return START(workers, from,
                     SPDL_PIPE(follow, .ctx = &plain, .concurrency = 3),
                     SPDL_SINK(9));
    case 5: return START(workers, from, STREAM(.concurrency = 1), SPDL_SINK(2));
    case 6: return START(workers, from, step, STREAM(.buffer_size = 1), next, SPDL_SINK(2));
    default:
        return START(workers, from,
                     SCATTER(.ctx = &pair),
                     step, SPDL_SINK(2));
    }
}

enum { SHAPES = 8 };

static long value_at(int number, long first, long k) {
    if (number < 5) return first + k;
    return number == 7 ? (first + k / 2) * 100 + k % 2 : first + k / 2;
}

/* Rewound after any number of items, to any number. */
static void it_starts_again_where_it_is_told(void) {
    chaos_on();
    for (int number = 0; number < SHAPES; ++number)
        for (int i = 0; i < CROWDS; ++i) {
            spdl_pipeline *p = shape(number, crowds[i], -1);
            for (long round = 0; round < 40; ++round) {
                const long first = round ? round % 7 * 3 % 4 * 2 : 0, most = round * 5 % 12;
                for (long k = 0; k < most; ++k) {
                    item *it = NULL;
                    if (!CHECK_EQ(SPDL_NEXT(p, &it, SPDL_SECONDS(15)), SPDL_OK))
                        break;
                    CHECK_EQ(it->value, value_at(number, first, k));
                    item_free(it);
                }
                CHECK_EQ(spdl_pipeline_rewind(
                             p, (uint64_t)((round + 1) % 7 * 3 % 4 * 2), SPDL_FOREVER),
                         SPDL_OK);
            }
            DONE(p);
        }
}

/* In each round a stop leaves nothing but what lies in the sink. */
static void a_stop_in_between_frees_the_rest(void) {
    uint64_t state = test_seed();
    chaos_on();
    for (int number = 0; number < SHAPES; ++number)
        for (int i = 0; i < CROWDS; ++i) {
            spdl_pipeline *p = shape(number, crowds[i], -1);
            item *it = NULL;
            for (int round = 0; round < (TEST_SANITIZED ? 40 : 200); ++round) {
                const long most = (long)(test_random(&state) % 12);
                for (long k = 0; k < most; ++k) {
                    REQUIRE(SPDL_NEXT(p, &it, SPDL_SECONDS(15)) == SPDL_OK);
                    CHECK_EQ(it->value, value_at(number, 0, k));
                    item_free(it);
                }
                REQUIRE(spdl_pipeline_stop(p, SPDL_SECONDS(15)) == SPDL_OK);
                while (SPDL_NEXT(p, &it, 0) == SPDL_OK) item_free(it);
                CHECK_EQ(items_alive(), 0);
                REQUIRE(spdl_pipeline_rewind(p, 0, SPDL_SECONDS(15)) == SPDL_OK);
            }
            DONE(p);
        }
}

/* An end is forgotten, with what was on its way. */
static void an_end_is_forgotten(void) {
    for (int number = 0; number < 4; ++number)
        for (int i = 0; i < CROWDS; ++i) {
            spdl_pipeline *p = shape(number, crowds[i], 5);
            for (int round = 0; round < 6; ++round) {
                notes n = { .length = 0 };
                CHECK_EQ(take(p, &n, round == 3 ? 2 : 1000, " ", note_item),
                         round == 3 ? SPDL_OK : SPDL_END);
                CHECK_STR(n.text, round == 3       ? "0 1"
                                  : round % 2 != 0 ? "2 3 4"
                                                   : "0 1 2 3 4");
                CHECK_EQ(spdl_pipeline_rewind(p, round % 2 || round == 2 ? 0 : 2, SPDL_FOREVER),
                         SPDL_OK);
            }
            DONE(p);
        }
}

static void a_failure_is_forgotten(void) {
    for (int i = 0; i < 3 * CROWDS; ++i) {
        spdl_pipeline *p =
            START(crowds[i / 3], COUNT_TO(-1),
                  SPDL_PIPE(follow, SCRIPT(.every = 5, .rest = 4, .result = SPDL_E_IO),
                            .concurrency = i % 3 + 1, .max_failures = i % 2),
                  SPDL_SINK(2));
        for (int round = 0; round < 4; ++round) {
            notes n = { .length = 0 };
            CHECK_EQ(take(p, &n, 1000, " ", note_item), SPDL_E_IO);
            CHECK_STR(n.text, i % 2 ? "0 1 2 3 5 6 7 8" : "0 1 2 3");
            CHECK(spdl_pipeline_failed(p));
            CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_FOREVER), SPDL_OK);
            if (crowds[i / 3] > 0) continue; /* it may have failed again by now */
            CHECK(!spdl_pipeline_failed(p));
            CHECK_EQ(spdl_pipeline_error(p)->result, SPDL_OK);
        }
        DONE(p);
    }
}

/* Stopped by a call of spdl_pipeline_stop or from inside. */
static void a_stop_is_forgotten(void) {
    for (int i = 0; i < 2 * CROWDS; ++i) {
        script s = { .stop_at = i % 2 ? 4 : 0 };
        spdl_pipeline *p = START(crowds[i / 2], COUNT_TO(-1),
                                 SPDL_PIPE(follow, .ctx = &s, .concurrency = 2), SPDL_SINK(2));
        item *it = NULL;
        notes n = { .length = 0 };
        for (int round = 0; round < 3; ++round) {
            if (i % 2 == 0) CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
            while (SPDL_NEXT(p, &it, SPDL_SECONDS(15)) == SPDL_OK) item_free(it);
            CHECK_EQ(SPDL_NEXT(p, &it, 0), SPDL_CLOSED);
            CHECK_EQ(spdl_pipeline_rewind(p, round == 2 ? 5 : 0, SPDL_FOREVER), SPDL_OK);
        }
        CHECK_EQ(take(p, &n, 3, " ", note_item), SPDL_OK);
        CHECK_STR(n.text, "5 6 7");
        DONE(p);
    }
}

/* Batches begin anew, epochs are counted from 0 again. */
SPDL_FN(knows_its_epoch, item, item) {
    in->value += 10 * (long)spdl_epoch(task);
    *out = in;
    return SPDL_OK;
}

static void batches_and_epochs_begin_anew(void) {
    for (int i = 0; i < CROWDS; ++i) {
        spdl_pipeline *p = START(crowds[i], CONTINUOUS(.count = 5), SPDL_PIPE(knows_its_epoch),
                                 SPDL_BATCH(2), SPDL_SINK(1));
        for (int round = 0; round < 4; ++round) {
            notes n = { .length = 0 };
            TAKE_EPOCH_OF_BATCHES(p, "0 1|2 3|4");
            TAKE_EPOCH_OF_BATCHES(p, "10 11|12 13|14");
            CHECK_EQ(take(p, &n, 1, "|", note_batch), SPDL_OK);
            CHECK_STR(n.text, "20 21");
            CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_FOREVER), SPDL_OK);
        }
        DONE(p);
    }
}

static void what_was_pushed_is_dropped(void) {
    for (int i = 0; i < 2 * CROWDS; ++i) {
        spdl_pipeline *p = START(crowds[i / 2], SPDL_FEED(item, .free_item = item_free,
                                                          .buffer_size = 3),
                                 FOLLOW(.plus = 0), SPDL_SINK(2));
        for (long round = 0; round < 5; ++round) {
            notes n = { .length = 0 };
            for (long k = 0; k < 3; ++k)
                CHECK_EQ(spdl_pipeline_push(p, item_make(round * 10 + k), SPDL_SECONDS(15)),
                         SPDL_OK);
            if (i % 2) {
                CHECK_EQ(spdl_pipeline_push_end(p), SPDL_OK);
                CHECK_EQ(take(p, &n, 1000, " ", note_item), SPDL_END);
            } else {
                CHECK_EQ(take(p, &n, 1, " ", note_item), SPDL_OK);
            }
            CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_FOREVER), SPDL_OK);
        }
        DONE(p);
    }
}

/* A call that does not return: the time is over, and it can be asked again. */
static void a_call_that_runs_is_waited_for(void) {
    for (int deferred = 0; deferred < 2; ++deferred) {
        int gate = 0;
        script held = { .gate = &gate, .gate_at = 1 };
        spdl_pipeline *p = START(2, COUNT_TO(3), SPDL_PIPE(follow, .ctx = &held), SPDL_SINK(1));
        item *it = NULL;
        CHECK_EQ(SPDL_NEXT(p, &it, SPDL_SECONDS(15)), SPDL_OK);
        item_free(it);
        await(&held.calls, 2);
        CHECK_EQ(spdl_pipeline_rewind(p, 0, 1000000), SPDL_TIMEOUT);
        CHECK_EQ(SPDL_NEXT(p, &it, 0), SPDL_CLOSED);
        open_gate(&gate);
        if (deferred == 0) CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_SECONDS(15)), SPDL_OK);
        if (deferred == 0) RUN(p, "0 1 2", SPDL_END);
        else DONE(p);
    }
}

SPDL_FN(rewinds, item, item) {
    CHECK_EQ(spdl_pipeline_rewind(*(spdl_pipeline **)spdl_ctx(task), 0, 0), SPDL_E_INVALID);
    *out = in;
    return SPDL_OK;
}

static spdl_result no_init(void *ctx, int worker, void **local) {
    (void)ctx, (void)worker, (void)local;
    return SPDL_E_IO;
}

static void misuse_is_refused(void) {
    const spdl_stage rows[] = { COUNT_TO(3), SPDL_PIPE(pass_on, .init = no_init), SPDL_SINK(1) };
    CHECK_EQ(spdl_pipeline_rewind(NULL, 0, 0), SPDL_E_INVALID);
    for (int i = 0; i < CROWDS; ++i) {
        spdl_pipeline_desc desc = { .workers = TEST_WORKERS(crowds[i]) };
        spdl_pipeline *p = NULL;
        item *it = NULL;
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(COUNT_TO(3),
                                     SPDL_PIPE(rewinds, .ctx = &p), SPDL_SINK(1))) == SPDL_OK);
        RUN(p, "0 1 2", SPDL_END);
        p = start(crowds[i], NULL, rows, 3);
        CHECK_EQ(SPDL_NEXT(p, &it, SPDL_SECONDS(15)), SPDL_E_IO);
        CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(SPDL_NEXT(p, &it, SPDL_SECONDS(15)), SPDL_E_IO); /* it is tried again */
        DONE(p);
    }
}

static void *rewinds_it(void *arg);

static void *stops_for_ever(void *arg) {
    CHECK_EQ(spdl_pipeline_stop((spdl_pipeline *)arg, SPDL_FOREVER), SPDL_OK);
    return NULL;
}

static void *takes_one(void *arg) {
    TAKE((spdl_pipeline *)arg, 1, "0");
    return NULL;
}

static int pushed;

/* One is in a call, one in the buffer, the third waits. */
static void *pushes_three(void *arg) {
    for (long i = 0; i < 3; ++i) {
        CHECK_EQ(spdl_pipeline_push((spdl_pipeline *)arg, item_make(i), SPDL_FOREVER), SPDL_OK);
        __atomic_store_n(&pushed, (int)i + 1, __ATOMIC_RELEASE);
    }
    return NULL;
}

/* Another thread is in next, in push, in a rewind or in a stop, and waits for a call. */
static void it_is_refused_while_others_are_inside(void) {
    for (int what = 0; what < 4; ++what) {
        static void *(*const others[])(void *) = { takes_one, pushes_three, rewinds_it,
                                                   stops_for_ever };
        int gate = 0;
        const spdl_stage feed = SPDL_FEED(item, .buffer_size = 1, .free_item = item_free);
        const spdl_stage one = COUNT_TO(1);
        script slow = { .gate = &gate };
        spdl_pipeline *p = START(1, what == 1 ? feed : one, SPDL_PIPE(follow, .ctx = &slow),
                                 SPDL_SINK(3));
        test_thread other;
        if (what >= 2) await(&slow.calls, 1);
        other = thread_of(others[what], p);
        await(&slow.calls, 1);
        if (what == 0) await(consumer_inside(p), 1);
        if (what == 1) await(&pushed, 2);
        if (what == 1) await(producer_inside(p), 1);
        while (what >= 2 && !rows_are_shut(p)) sleep_us(100);
        CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_SECONDS(1) / 100),
                 what == 3 ? SPDL_TIMEOUT : SPDL_E_INVALID);
        open_gate(&gate);
        test_join(other);
        CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_FOREVER), SPDL_OK);
        DONE(p);
    }
}

/* Another thread stops it again and again: each of both waits for the other. */
typedef struct stopper {
    spdl_pipeline *p;
    int over;
} stopper;

static void *stops_it(void *arg) {
    stopper *s = (stopper *)arg;
    uint64_t state = 1;
    while (!__atomic_load_n(&s->over, __ATOMIC_ACQUIRE)) {
        const spdl_result result =
            spdl_pipeline_stop(s->p, (int64_t)(test_random(&state) % 3) * 100000);
        CHECK(result == SPDL_OK || result == SPDL_TIMEOUT);
        sleep_us((long)(test_random(&state) % 200));
    }
    return NULL;
}

static void others_may_stop_it(void) {
    chaos_on();
    for (int number = 0; number < SHAPES; ++number)
        for (int i = 1; i < CROWDS; ++i) {
            stopper s = { .p = shape(number, crowds[i], -1) };
            const test_thread other = thread_of(stops_it, &s);
            item *it = NULL;
            for (int round = 0; round < 200; ++round) {
                CHECK_EQ(spdl_pipeline_rewind(s.p, 0, SPDL_FOREVER), SPDL_OK);
                for (int k = 0; k < round % 5; ++k)
                    if (SPDL_NEXT(s.p, &it, SPDL_SECONDS(15)) == SPDL_OK) item_free(it);
            }
            __atomic_store_n(&s.over, 1, __ATOMIC_RELEASE);
            test_join(other);
            CHECK_EQ(spdl_pipeline_rewind(s.p, 0, SPDL_FOREVER), SPDL_OK);
            CHECK_EQ(SPDL_NEXT(s.p, &it, SPDL_SECONDS(15)), SPDL_OK);
            item_free(it);
            DONE(s.p);
        }
}

/* A call of another pipeline on the same pool stops it: that waits for nobody. */
typedef struct stranger {
    spdl_pipeline *p;
    int go, stops, over;
} stranger;

SPDL_FN(stops_another, void, void) {
    stranger *s = (stranger *)spdl_ctx(task);
    (void)out;
    while (__atomic_load_n(&s->go, __ATOMIC_ACQUIRE) == s->stops) {
        if (__atomic_load_n(&s->over, __ATOMIC_ACQUIRE)) return SPDL_END;
        sleep_us(50);
    }
    CHECK_EQ(spdl_pipeline_stop(s->p, 0), SPDL_OK);
    __atomic_add_fetch(&s->stops, 1, __ATOMIC_RELEASE);
    return SPDL_SKIP;
}

static void *rewinds_it(void *arg) {
    CHECK_EQ(spdl_pipeline_rewind((spdl_pipeline *)arg, 0, SPDL_FOREVER), SPDL_OK);
    return NULL;
}

/* While the rows open again: nobody enters one. */
static void a_stop_during_a_rewind_stays(void) {
    spdl_pool *pool = pool_of(2);
    stranger s = { .p = NULL };
    script from = { .count = 3 };
    spdl_pipeline *other;
    test_thread rewinder;
    item *it = NULL;
    s.p = START_ON(pool, SPDL_SOURCE(count_up, .ctx = &from, .free_item = item_free),
                   FOLLOW(.plus = 0), SPDL_SINK(1));
    other = START_ON(pool, SPDL_SOURCE(stops_another, .ctx = &s), SPDL_SINK(1));
    for (int round = 1; round <= 3; ++round) {
        freeze("rewind opens");
        rewinder = thread_of(rewinds_it, s.p);
        await(&frozen, 1);
        __atomic_store_n(&s.go, round, __ATOMIC_RELEASE);
        await(&s.stops, round);
        thaw();
        test_join(rewinder);
        CHECK(rows_are_shut(s.p));
        CHECK_EQ(SPDL_NEXT(s.p, &it, SPDL_SECONDS(15)), SPDL_CLOSED);
        CHECK_EQ(spdl_pipeline_rewind(s.p, 0, SPDL_FOREVER), SPDL_OK);
        TAKE(s.p, 2, "0 1");
    }
    __atomic_store_n(&s.over, 1, __ATOMIC_RELEASE);
    spdl_pipeline_destroy(other);
    DONE(s.p);
    spdl_pool_destroy(pool);
}

/* A stop on a worker is in the middle when a whole rewind passes: it stops what was begun. */
static void a_stop_goes_on_behind_a_rewind(void) {
    spdl_pool *pool = pool_of(2);
    stranger s = { .p = NULL };
    script from = { .count = -1 };
    spdl_pipeline *other;
    spdl_result result;
    item *it = NULL;
    s.p = START_ON(pool, SPDL_SOURCE(count_up, .ctx = &from, .free_item = item_free),
                   FOLLOW(.plus = 0), SPDL_SINK(1));
    other = START_ON(pool, SPDL_SOURCE(stops_another, .ctx = &s), SPDL_SINK(1));
    freeze_some("stop shuts", 1);
    __atomic_store_n(&s.go, 1, __ATOMIC_RELEASE);
    await(&frozen, 1);
    CHECK_EQ(spdl_pipeline_rewind(s.p, 0, SPDL_SECONDS(15)), SPDL_OK);
    thaw();
    await(&s.stops, 1);
    while ((result = SPDL_NEXT(s.p, &it, SPDL_SECONDS(5))) == SPDL_OK) item_free(it);
    CHECK_EQ(result, SPDL_CLOSED);
    __atomic_store_n(&s.over, 1, __ATOMIC_RELEASE);
    spdl_pipeline_destroy(other);
    DONE(s.p);
    spdl_pool_destroy(pool);
}

/* In a free_item that the rewind calls: the rows stay shut, and the next rewind opens them. */
static spdl_pipeline *stopped_by_free;
static int stops_by_free;

static void free_stops(void *memory) {
    item_free(memory);
    if (stopped_by_free == NULL) return;
    ++stops_by_free;
    CHECK_EQ(spdl_pipeline_stop(stopped_by_free, SPDL_FOREVER), SPDL_TIMEOUT);
}

static void a_stop_in_free_item_stays(void) {
    int all_stops = 0;
    for (int i = 0; i < CROWDS; ++i) {
        script from = { .count = 9 };
        spdl_pipeline *p = START(crowds[i],
                                 SPDL_SOURCE(count_up, .ctx = &from, .free_item = free_stops),
                                 SPDL_SINK(3));
        item *it = NULL;
        for (int round = 0; round < 3; ++round) {
            TAKE(p, 1, "0");
            CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK); /* some are in the sink */
            stops_by_free = 0;
            stopped_by_free = p;
            CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_FOREVER), SPDL_OK);
            stopped_by_free = NULL;
            if (stops_by_free == 0) continue; /* without workers none are */
            all_stops += stops_by_free;
            CHECK(rows_are_shut(p));
            CHECK_EQ(SPDL_NEXT(p, &it, SPDL_SECONDS(15)), SPDL_CLOSED);
            CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
            CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_FOREVER), SPDL_OK);
        }
        RUN(p, "0 1 2 3 4 5 6 7 8", SPDL_END);
    }
    CHECK(all_stops > 0);
}

/* At any moment of it: afterwards the pipeline runs, or is closed and stays so. */
static void a_stop_at_any_moment_of_a_rewind(void) {
    spdl_pool *pool = pool_of(2);
    stranger s = { .p = NULL };
    script from = { .count = -1 };
    spdl_pipeline *other;
    uint64_t state = test_seed();
    item *it = NULL;
    long closed = 0;
    chaos_on();
    s.p = START_ON(pool, SPDL_SOURCE(count_up, .ctx = &from, .free_item = item_free),
                   FOLLOW(.plus = 0), SPDL_SINK(1));
    other = START_ON(pool, SPDL_SOURCE(stops_another, .ctx = &s), SPDL_SINK(1));
    for (int round = 1; round <= (TEST_SANITIZED ? 300 : 1000); ++round) {
        __atomic_store_n(&s.go, round, __ATOMIC_RELEASE);
        sleep_us((long)(test_random(&state) % 120));
        CHECK_EQ(spdl_pipeline_rewind(s.p, 0, SPDL_FOREVER), SPDL_OK);
        await(&s.stops, round);
        for (int k = 0; k < 4; ++k) {
            const spdl_result result = SPDL_NEXT(s.p, &it, SPDL_SECONDS(15));
            if (result == SPDL_OK) item_free(it);
            else if (!CHECK_EQ(result, SPDL_CLOSED)) break;
            else k = 4, ++closed;
        }
    }
    __atomic_store_n(&s.over, 1, __ATOMIC_RELEASE);
    CHECK(closed > 0);
    spdl_pipeline_destroy(other);
    DONE(s.p);
    spdl_pool_destroy(pool);
}

/* A rewind waits for no init: one that fails is the failure of the first call. */
static spdl_result slow_init(void *ctx, int worker, void **local) {
    (void)worker, (void)local;
    sleep_us(3000);
    return ctx != NULL ? SPDL_E_IO : SPDL_OK;
}

static void a_rewind_does_not_wait_for_init(void) {
    for (int i = 0; i < 2 * CROWDS; ++i) {
        static int fails;
        const spdl_stage rows[] = {
            COUNT_TO(7), SPDL_PIPE(pass_on, .init = slow_init, .ctx = i % 2 ? &fails : NULL),
            SPDL_SINK(1)
        };
        spdl_pipeline *p = start(crowds[i / 2], NULL, rows, 3);
        item *it = NULL;
        CHECK_EQ(spdl_pipeline_rewind(p, 5, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(SPDL_NEXT(p, &it, SPDL_SECONDS(15)), i % 2 ? SPDL_E_IO : SPDL_OK);
        if (it != NULL) CHECK_EQ(it->value, 5);
        if (it != NULL) item_free(it);
        CHECK_EQ(spdl_pipeline_rewind(p, (uint64_t)1 << 40, 0), SPDL_E_INVALID);
        DONE(p);
    }
}

/* What was made was delivered or freed; statistics go on. */
static void statistics_go_on(void) {
    for (int i = 0; i < CROWDS; ++i) {
        static spdl_stats stats;
        spdl_pipeline *p = shape(2, crowds[i], -1);
        uint64_t taken = 0, before = 0;
        for (int round = 0; round < 30; ++round) {
            for (int k = 0; k < round % 4; ++k, ++taken) {
                item *it = NULL;
                CHECK_EQ(SPDL_NEXT(p, &it, SPDL_SECONDS(15)), SPDL_OK);
                item_free(it);
            }
            CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_FOREVER), SPDL_OK);
            spdl_pipeline_stats(p, &stats);
            CHECK(stats.stage[0].tasks >= before);
            before = stats.stage[0].tasks;
        }
        CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
        for (item *it = NULL; SPDL_NEXT(p, &it, 0) == SPDL_OK; ++taken)
            item_free(it);
        spdl_pipeline_stats(p, &stats);
        CHECK_EQ(stats.edge[1].items, taken);
        CHECK_EQ(stats.edge[0].items, stats.stage[1].tasks);
        CHECK_EQ(stats.stage[0].tasks, stats.stage[1].tasks + stats.stage[0].freed);
        DONE(p);
    }
}

TEST_TABLE(rewind) {
    TEST_CASE(it_starts_again_where_it_is_told),
    TEST_CASE(a_stop_in_between_frees_the_rest),
    TEST_CASE(an_end_is_forgotten),
    TEST_CASE(a_failure_is_forgotten),
    TEST_CASE(a_stop_is_forgotten),
    TEST_CASE(batches_and_epochs_begin_anew),
    TEST_CASE(what_was_pushed_is_dropped),
    TEST_CASE(a_call_that_runs_is_waited_for),
    TEST_CASE(misuse_is_refused),
    TEST_CASE(it_is_refused_while_others_are_inside),
    TEST_CASE(others_may_stop_it),
    TEST_CASE(a_stop_during_a_rewind_stays),
    TEST_CASE(a_stop_goes_on_behind_a_rewind),
    TEST_CASE(a_stop_in_free_item_stays),
    TEST_CASE(a_stop_at_any_moment_of_a_rewind),
    TEST_CASE(a_rewind_does_not_wait_for_init),
    TEST_CASE(statistics_go_on),
    TEST_END,
};
