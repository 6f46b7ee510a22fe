/* Streaming one to many: stages that return SPDL_AGAIN. */
#include "flow.h"

static int states; /* alive */

typedef struct state {
    long next;
} state;

static void state_free(void *what) {
    __atomic_sub_fetch(&states, 1, __ATOMIC_RELAXED);
    test_memory_free(what);
}

/* What a stage that streams does. */
typedef struct tape {
    long modulo, plus;  /* an input becomes value % modulo + plus items */
    bool last;          /* the last one comes with SPDL_OK, not before SPDL_SKIP */
    bool input;         /* and the input after them, with SPDL_OK */
    bool takes;         /* the first call takes its input and frees it */
    long fail_at, at;   /* value fail_at fails instead of its item number `at` */
    int slow_us;
    int inside, most;   /* calls at once */
} tape;

static spdl_result tape_next(spdl_task *task, tape *t, item *in, item **out) {
    state **s = (state **)spdl_call_state(task);
    long count, at;
    if (*s == NULL) {
        *s = (state *)memset(test_memory(sizeof(void *), sizeof **s), 0, sizeof **s);
        __atomic_add_fetch(&states, 1, __ATOMIC_RELAXED);
    }
    count = (t->modulo ? in->value % t->modulo : 0) + t->plus;
    at = (*s)->next;
    if (t->slow_us && in->value % 2 == 0) sleep_us(t->slow_us);
    if (t->fail_at && in->value == t->fail_at && at == t->at)
        return spdl_fail(task, "no item %ld in %ld", at, in->value);
    if (at >= count && t->input) {
        *out = in;
        return SPDL_OK;
    }
    if (at >= count) return SPDL_SKIP;
    *out = item_make(in->value * 100 + at);
    (*s)->next = at + 1;
    return t->last && at + 1 == count ? SPDL_OK : SPDL_AGAIN;
}

SPDL_FN(unroll, item, item) {
    tape *t = (tape *)spdl_ctx(task);
    const int inside = __atomic_add_fetch(&t->inside, 1, __ATOMIC_RELAXED);
    int most = __atomic_load_n(&t->most, __ATOMIC_RELAXED);
    const spdl_result result = tape_next(task, t, in, out);
    while (inside > most && !__atomic_compare_exchange_n(&t->most, &most, inside, false,
                                                         __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    __atomic_sub_fetch(&t->inside, 1, __ATOMIC_RELAXED);
    return result;
}

#define TAPE(...) .ctx = &(tape){ __VA_ARGS__ }
#define UNROLL(...)                                                                                \
    SPDL_PIPE(unroll, .again = true, .free_item = item_free, .free_state = state_free, __VA_ARGS__)

/* Several calls at a time have no order among their inputs. */
typedef struct mode {
    int concurrency;
    spdl_order order;
} mode;

static const mode modes[] = {
    { 1, SPDL_ORDER_INPUT }, { 1, SPDL_ORDER_COMPLETION }, { 4, SPDL_ORDER_COMPLETION }
};
enum { MODES = 3 };

#define MODE(m) .concurrency = (m).concurrency, .output_order = (m).order

/* In all modes, with the smallest buffers. */
static void an_input_becomes_many(void) {
    static const char text[] = "100 200 201 300 301 302 500 600 601";
    chaos_on();
    for (int i = 0; i < MODES * 4 * CROWDS; ++i) {
        const mode m = modes[i % MODES];
        spdl_pipeline *p =
            START(crowds[i / MODES / 4],
                  SPDL_SOURCE(count_up, SCRIPT(.count = 7), .buffer_size = 1,
                              .free_item = item_free),
                  UNROLL(TAPE(.modulo = 4, .last = i / MODES % 2), MODE(m),
                         .buffer_size = 1 + i / MODES / 2 % 2),
                  FOLLOW(.plus = 0), SPDL_SINK(1));
        if (m.concurrency == 1) RUN(p, text, SPDL_END);
        else RUN_SORTED(p, text, SPDL_END);
        CHECK_EQ(states, 0);
    }
}

/* The last row: the trainer takes what is handed on. */
static void the_trainer_may_be_next(void) {
    chaos_on();
    for (int i = 0; i < MODES * CROWDS; ++i) {
        static long values[1000];
        const mode m = modes[i % MODES];
        spdl_pipeline *p =
            START(crowds[i / MODES], COUNT_TO(40),
                  UNROLL(TAPE(.modulo = 13, .plus = 3, .slow_us = 100), MODE(m)),
                  SPDL_SINK(i % 3 + 1));
        const size_t count = take_values(p, values, 1000, SPDL_END);
        size_t expected = 0, k = 0;
        if (m.concurrency > 1) qsort(values, count, sizeof values[0], by_value_of);
        for (long v = 0; v < 40; ++v)
            for (long n = 0; n < v % 13 + 3; ++n, ++expected, ++k)
                if (k < count) CHECK_EQ(values[k], v * 100 + n);
        CHECK_EQ(count, expected);
        DONE(p);
        CHECK_EQ(states, 0);
    }
}

/* A call that waits for room is taken up by any worker, but by one: in the smallest rings no
   result is put over another. */
static void calls_that_wait_are_taken_up_once(void) {
    chaos_on();
    for (int i = 0; i < (TEST_SANITIZED ? 60 : 200); ++i) {
        spdl_pipeline *p = START(2 + i % 2 * 6, COUNT_TO(40),
                                 UNROLL(TAPE(.modulo = 13, .plus = 3, .slow_us = 100),
                                        MODE(modes[i / 2 % MODES])),
                                 SPDL_SINK(1 + i / 6 % 3));
        CHECK_EQ(take_from_any(p), 354);
        DONE(p);
    }
}

/* Thousands of items of one input: never are more alive than there are places. */
static void memory_is_bounded(void) {
    for (int i = 0; i < MODES * CROWDS; ++i) {
        int has = 0;
        tape t = { .plus = 2000 };
        spdl_pipeline *p = START(crowds[i / MODES], COUNT_TO(2),
                                 UNROLL(.ctx = &t, MODE(modes[i % MODES])), SPDL_SINK(1));
        spdl_result result;
        item *it = NULL;
        long most = 0;
        while ((result = SPDL_NEXT(p, &it, SPDL_SECONDS(15))) == SPDL_OK) {
            const long alive = items_alive();
            if (alive > most) most = alive;
            ++has;
            item_free(it);
        }
        CHECK_EQ(result, SPDL_END);
        CHECK_EQ(has, 4000);
        CHECK(most <= 16);
        DONE(p);
        CHECK_EQ(states, 0);
    }
}

/* Item 0 is with the trainer while item 1 is not yet made: the stage waits for that. */
SPDL_FN(waits_for_the_trainer, item, item) {
    int *taken = (int *)spdl_ctx(task);
    uintptr_t *at = (uintptr_t *)spdl_call_state(task);
    while (__atomic_load_n(taken, __ATOMIC_ACQUIRE) < (int)*at && !spdl_stopping(task))
        test_yield();
    if (*at == 5) return SPDL_SKIP;
    *out = item_make((long)(*at)++);
    return SPDL_AGAIN;
}

static void an_item_goes_on_at_once(void) {
    for (int i = 1; i < CROWDS; ++i) {
        int taken = 0;
        spdl_pipeline *p = START(crowds[i], COUNT_TO(1),
                                 SPDL_PIPE(waits_for_the_trainer, .ctx = &taken, .again = true,
                                           MODE(modes[i - 1]), .free_item = item_free),
                                 SPDL_SINK(4));
        item *it = NULL;
        while (SPDL_NEXT(p, &it, SPDL_SECONDS(10)) == SPDL_OK) {
            CHECK_EQ(it->value, taken);
            item_free(it);
            __atomic_add_fetch(&taken, 1, __ATOMIC_RELEASE);
        }
        CHECK_EQ(taken, 5);
        DONE(p);
    }
}

/* Calls for several inputs run at once, up to the concurrency and not beyond. */
static void calls_run_at_once(void) {
    for (int i = 0; i < MODES; ++i) {
        tape t = { .plus = 20, .slow_us = 200 };
        spdl_pipeline *p = START(8, COUNT_TO(24), UNROLL(.ctx = &t, MODE(modes[i])), SPDL_SINK(2));
        CHECK_EQ(take_from_any(p), 480);
        CHECK(t.most <= modes[i].concurrency);
        DONE(p);
    }
}

static void the_input_may_be_the_last(void) {
    for (int i = 0; i < 2 * CROWDS; ++i)
        RUN(START(crowds[i / 2], COUNT_TO(3),
                  UNROLL(TAPE(.modulo = 3, .input = true), MODE(modes[i % 2])),
                  SPDL_SINK(1)),
            "0 100 1 200 201 2", SPDL_END);
}

/* What came before the failure is delivered, up to its items of the same input. */
static void a_call_may_fail_midway(void) {
    chaos_on();
    for (int i = 0; i < 4 * CROWDS; ++i) {
        const bool tolerated = i / 2 % 2;
        spdl_pipeline *p = START(crowds[i / 4], COUNT_TO(4),
                                 UNROLL(TAPE(.plus = 3, .fail_at = 2, .at = 2), MODE(modes[i % 2]),
                                        .max_failures = tolerated),
                                 SPDL_SINK(1));
        notes n = { .length = 0 };
        const spdl_result result = take(p, &n, 1000, " ", note_item);
        CHECK_STR(n.text, tolerated ? "0 1 2 100 101 102 200 201 300 301 302"
                                    : "0 1 2 100 101 102 200 201");
        CHECK_EQ(result, tolerated ? SPDL_END : SPDL_E_STAGE);
        if (!tolerated)
            failed_with(p, 1, "stage 1 'unroll', item 2: no item 2 in 2");
        DONE(p);
        CHECK_EQ(states, 0);
    }
}

/* The call for 3 hands on one item, then fails, while that for 4 is inside, which ends only
   when the pipeline has failed: it comes behind the failure. */
typedef struct torn {
    spdl_pipeline *p;
    int inside, begun;
    bool waits; /* until the next row is in a call */
} torn;

SPDL_FN(tear, item, item) {
    torn *t = (torn *)spdl_ctx(task);
    void **mine = spdl_call_state(task);
    const bool first = *mine == NULL;
    *mine = t;
    if (in->value == 3 && !first) {
        await(&t->inside, 1);
        if (t->waits) await(&t->begun, 1);
        return spdl_fail(task, "archive 3 is torn");
    }
    if (in->value > 3) {
        const uint64_t since = spdl_time_ns();
        __atomic_store_n(&t->inside, 1, __ATOMIC_RELEASE);
        while (!spdl_pipeline_failed(t->p) && spdl_time_ns() - since < 10000000000u) sleep_us(50);
    }
    *out = item_make(in->value * 100);
    *mine = in->value == 3 ? t : NULL;
    return in->value == 3 ? SPDL_AGAIN : SPDL_OK;
}

/* The item before the failure is still in a call of the next row when that is put. */
SPDL_FN(holds_300, item, item) {
    torn *t = (torn *)spdl_ctx(task);
    if (in->value == 300) __atomic_store_n(&t->begun, 1, __ATOMIC_RELEASE);
    if (in->value == 300) sleep_us(20000);
    *out = in;
    return SPDL_OK;
}

static void nothing_comes_after_a_failure(void) {
    for (int i = 0; i < 40; ++i) {
        torn t = { .waits = i % 2 };
        const spdl_stage last = SPDL_SINK(4), row = SPDL_PIPE(holds_300, .ctx = &t);
        int gate = 0;
        const spdl_stage rows[] = {
            SPDL_SOURCE(count_up, SCRIPT(.count = 12, .gate = &gate), .free_item = item_free),
            SPDL_PIPE(tear, .ctx = &t, .again = true, .concurrency = 2, .free_item = item_free,
                      .output_order = SPDL_ORDER_COMPLETION),
            i % 2 ? row : last, last
        };
        notes n = { .length = 0 };
        t.p = start(3 + i % 3, NULL, rows, i % 2 ? 4 : 3);
        open_gate(&gate);
        CHECK_EQ(take(t.p, &n, 1000, " ", note_item), SPDL_E_STAGE);
        for (char *at = strtok(n.text, " "); at != NULL; at = strtok(NULL, " "))
            CHECK(atoi(at) <= 300);
        CHECK_EQ(n.taken, 4);
        failed_with(t.p, 1, "stage 1 'tear', item 3: archive 3 is torn");
        DONE(t.p);
    }
}

/* A later row fails: streams above it end, wherever they are. */
static void a_later_failure_ends_streams(void) {
    chaos_on();
    for (int i = 0; i < MODES * CROWDS; ++i) {
        spdl_pipeline *p = START(crowds[i / MODES], COUNT_TO(-1),
                                 UNROLL(TAPE(.plus = 1000000), MODE(modes[i % MODES])),
                                 FOLLOW(.every = 1000, .rest = 7, .result = SPDL_E_IO),
                                 SPDL_SINK(2));
        static long values[1000];
        (void)take_values(p, values, 1000, SPDL_E_IO);
        CHECK_EQ(spdl_pipeline_error(p)->stage, 2);
        DONE(p);
        CHECK_EQ(states, 0);
    }
}

/* Stopped after every number of items; stopped by a stage; left. */
static void streams_end_at_a_stop(void) {
    chaos_on();
    for (int i = 0; i < 60; ++i) {
        spdl_pipeline *p = START(crowds[i % 4], COUNT_TO(-1),
                                 UNROLL(TAPE(.plus = 7), MODE(modes[i / 4 % MODES])),
                                 UNROLL(TAPE(.plus = 3), MODE(modes[i / 5 % MODES])),
                                 SPDL_SINK(2));
        item *it = NULL;
        for (int k = 0; k < i; ++k) {
            if (!CHECK_EQ(SPDL_NEXT(p, &it, SPDL_SECONDS(15)), SPDL_OK)) break;
            item_free(it);
        }
        if (i % 3 != 0) {
            CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
            while (SPDL_NEXT(p, &it, 0) == SPDL_OK) item_free(it);
            CHECK_EQ(states, 0);
        }
        DONE(p);
        CHECK_EQ(states, 0);
        CHECK_EQ(items_alive(), 0);
    }
}

static void epochs_keep_streams_apart(void) {
    for (int i = 0; i < 2 * CROWDS; ++i) {
        spdl_pipeline *p = START(crowds[i / 2], CONTINUOUS(.count = 3),
                                 UNROLL(TAPE(.modulo = 3), MODE(modes[i % 2])),
                                 SPDL_BATCH(2), SPDL_SINK(1));
        for (int k = 0; k < 3; ++k) TAKE_EPOCH_OF_BATCHES(p, "100 200|201");
        DONE(p);
        CHECK_EQ(states, 0);
    }
}

/* At the end of its input a stage may stream what is left. */
typedef struct heap {
    long held[8];
    uint64_t count;
} heap;

SPDL_FN(pile, item, item) {
    heap *h = (heap *)spdl_ctx(task);
    if (!spdl_flushing(task)) {
        h->held[h->count++] = in->value;
        return SPDL_SKIP;
    }
    if (h->count == 0) return SPDL_SKIP;
    *out = item_make(h->held[--h->count]);
    return SPDL_AGAIN;
}

static void a_flush_may_stream(void) {
    for (int i = 0; i < CROWDS; ++i)
        RUN(START(crowds[i], COUNT_TO(5),
                  SPDL_PIPE(pile, .ctx = &(heap){ .count = 0 }, .again = true, .flush = true,
                            .free_item = item_free),
                  SPDL_SINK(1)),
            "4 3 2 1 0", SPDL_END);
}

/* In the paths of a branch, merged as they come. */
static void paths_may_stream(void) {
    chaos_on();
    for (int i = 0; i < MODES * CROWDS; ++i)
        RUN_SORTED(START(crowds[i / MODES], COUNT_TO(6), SPDL_BRANCH(pass_on), SPDL_PATH("a"),
                         UNROLL(TAPE(.modulo = 3), MODE(modes[i % MODES])), SPDL_PATH("b"),
                         SPDL_MERGE(.output_order = SPDL_ORDER_COMPLETION),
                         UNROLL(TAPE(.plus = 1), MODE(modes[i % MODES])), SPDL_SINK(1)),
                   "10000 20000 20100 40000 50000 50100", SPDL_END);
}

SPDL_FN(again_for_ever, item, item) { return SPDL_AGAIN; }

SPDL_FN(again_with_its_input, item, item) {
    *out = in;
    return SPDL_AGAIN;
}

SPDL_FN(routes_and_again, item, item) {
    CHECK(spdl_route(task, 0) != SPDL_OK);
    *out = in;
    return SPDL_AGAIN;
}

SPDL_FN(state_without, item, item) {
    CHECK(spdl_call_state(task) != NULL);
    *out = in;
    return SPDL_OK;
}

/* An item that nobody can hand on. */
SPDL_FN(again_unasked, item, item) {
    *out = item_make(in->value);
    return SPDL_AGAIN;
}

/* Nothing comes out, and it is known why. */
#define ENDS(p, result, why)                                                                       \
    do {                                                                                           \
        item *it_ = NULL;                                                                          \
        CHECK_EQ(SPDL_NEXT((p), &it_, SPDL_SECONDS(15)), (result));                                \
        why;                                                                                       \
        DONE(p);                                                                                   \
    } while (0)

/* An item that is NULL. */
SPDL_FN(nothing_first, item, item) {
    void **kept = spdl_call_state(task);
    if (*kept == NULL) {
        *kept = in;
        return SPDL_AGAIN;
    }
    *out = in;
    return SPDL_OK;
}

static void an_item_may_be_null(void) {
    for (int i = 0; i < CROWDS; ++i) {
        item *it = NULL;
        spdl_pipeline *p = START(crowds[i], COUNT_TO(3), SPDL_PIPE(nothing_first, .again = true),
                                 SPDL_SINK(1));
        for (int k = 0; k < 6; ++k) {
            if (!CHECK_EQ(SPDL_NEXT(p, &it, SPDL_SECONDS(15)), SPDL_OK)) break;
            CHECK(k % 2 ? it != NULL && it->value == k / 2 : it == NULL);
            if (it != NULL) item_free(it);
        }
        ENDS(p, SPDL_END, (void)0);
    }
}

/* As a first call that frees its input, and gets the same address from malloc. */
SPDL_FN(takes_and_makes_two, item, item) {
    void **second = spdl_call_state(task);
    if (*second != NULL) *out = item_make(7);
    if (*second != NULL) return SPDL_OK;
    spdl_take(task);
    *second = task;
    *out = in;
    return SPDL_AGAIN;
}

static void a_result_at_the_address_of_a_taken_input(void) {
    for (int i = 0; i < CROWDS; ++i)
        RUN(START(crowds[i], COUNT_TO(3),
                  SPDL_PIPE(takes_and_makes_two, .again = true, .free_item = item_free),
                  SPDL_SINK(1)),
            "0 7 1 7 2 7", SPDL_END);
}

SPDL_FN(takes_and_again, item, item) {
    spdl_take(task);
    *out = in;
    return SPDL_AGAIN;
}

static void misuse_is_a_failure(void) {
    for (int i = 0; i < CROWDS; ++i) {
        spdl_pipeline *p = START(crowds[i], COUNT_TO(2),
                                 SPDL_PIPE(again_for_ever, .free_item = item_free), SPDL_SINK(1));
        ENDS(p, SPDL_E_STAGE, failed_with(p, 1, "stage 1 'again_for_ever', item 0: "
                                                       "returned SPDL_AGAIN without .again in its "
                                                       "row"));
        p = START(crowds[i], COUNT_TO(2), SPDL_PIPE(again_unasked, .free_item = item_free),
                  SPDL_SINK(1)); /* and what it made is freed */
        ENDS(p, SPDL_E_STAGE, (void)0);
        p = START(crowds[i], COUNT_TO(2), SPDL_PIPE(takes_and_again, .free_item = item_free),
                  SPDL_SINK(1)); /* and at its address was an input */
        ENDS(p, SPDL_E_STAGE, (void)0);
        p = START(crowds[i], COUNT_TO(2), SPDL_PIPE(again_with_its_input, .again = true),
                  SPDL_SINK(1));
        ENDS(p, SPDL_E_STAGE, failed_with(p, 1, "stage 1 'again_with_its_input', item "
                                                       "0: returned SPDL_AGAIN with its input in "
                                                       "*out"));
        p = START(crowds[i], COUNT_TO(2), SPDL_PIPE(routes_and_again, .again = true), SPDL_SINK(1));
        ENDS(p, SPDL_E_INVALID, failed_with(p, 1, "stage 1 'routes_and_again', item 0: "
                                                  "spdl_route in a stage that is no "
                                                  "SPDL_BRANCH"));
        p = START(crowds[i], COUNT_TO(2), SPDL_PIPE(state_without), SPDL_SINK(1));
        ENDS(p, SPDL_E_INVALID, failed_with(p, 1, "stage 1 'state_without', item 0: "
                                                  "spdl_call_state in a stage without "
                                                  ".again in its row"));
    }
}

/* Results of a row that has not .again, or that asked for what it may not. */
typedef struct unasked {
    spdl_result result;
    int out;     /* 0: NULL, 1: its input, 2: another item, 3: its buffer */
    bool routes; /* in vain */
} unasked;

SPDL_FN(returns_unasked, item, item) {
    const unasked *u = (const unasked *)spdl_ctx(task);
    item *buffer = (item *)spdl_buffer(task);
    *out = u->out == 1 ? in : u->out == 2 ? item_make(7) : u->out == 3 ? buffer : NULL;
    if (u->routes) CHECK_EQ(spdl_route(task, 0), SPDL_E_INVALID);
    return u->result;
}

static void says_what(const spdl_pipeline *p, const unasked *u) {
    const char *text = spdl_pipeline_error(p)->text;
    CHECK(strstr(text, u->routes                  ? "spdl_route in a stage that is no SPDL_BRANCH"
                       : u->result == SPDL_AGAIN ? "returned SPDL_AGAIN without .again in its row"
                                                 : "returned SPDL_PENDING without .deferred") !=
          NULL);
}

/* Nothing is lost, nothing is freed twice. */
static void what_nobody_asked_for_is_freed(void) {
    for (int i = 0; i < 4 * 2 * CROWDS; ++i) {
        unasked u = { .result = SPDL_AGAIN, .out = i % 4, .routes = i / 4 % 2 };
        const spdl_stage row = SPDL_PIPE(returns_unasked, .ctx = &u, .item_bytes = sizeof(item),
                                         .free_item = item_free);
        spdl_pipeline *p = START(crowds[i / 8], COUNT_TO(2), row, SPDL_SINK(1));
        ENDS(p, SPDL_E_STAGE, says_what(p, &u));
        if (u.out == 2) continue; /* only AGAIN and OK have an item that is theirs */
        u.result = SPDL_PENDING;
        p = START(crowds[i / 8], COUNT_TO(2), row, SPDL_SINK(1));
        ENDS(p, SPDL_E_STAGE, says_what(p, &u));
    }
}

/* A buffer that a call has not returned is not its next result. */
SPDL_FN(leaves_its_buffer, item, item) {
    long **at = (long **)spdl_call_state(task);
    item *buffer = (item *)spdl_buffer(task);
    if (*at == NULL) *at = (long *)calloc(1, sizeof **at);
    REQUIRE(buffer != NULL);
    if ((*at)[0] == 2) return SPDL_SKIP;
    *out = item_make(10 * in->value + (*at)[0]++);
    return SPDL_AGAIN;
}

static void a_buffer_may_be_left(void) {
    for (int i = 0; i < CROWDS; ++i)
        RUN(START(crowds[i], COUNT_TO(4),
                  SPDL_PIPE(leaves_its_buffer, .again = true, .item_bytes = sizeof(item),
                            .free_item = item_free, .free_state = free), SPDL_SINK(1)),
            "0 1 10 11 20 21 30 31", SPDL_END);
}

/* Two calls wait for room. What the trainer takes makes room for both and wakes one worker, which
   goes on with one of them; that wakes the other worker before it calls, as both calls wait for
   each other from then on. The trainer does nothing more. */
typedef struct couple {
    int armed, inside, met;
} couple;

SPDL_FN(meets, item, item) {
    couple *c = (couple *)spdl_ctx(task);
    const uint64_t start = spdl_time_ns();
    if (!__atomic_load_n(&c->armed, __ATOMIC_ACQUIRE)) {
        *out = item_make(in->value);
        return SPDL_AGAIN;
    }
    __atomic_add_fetch(&c->inside, 1, __ATOMIC_ACQ_REL);
    while (__atomic_load_n(&c->inside, __ATOMIC_ACQUIRE) < 2 && !spdl_stopping(task) &&
           spdl_time_ns() - start < 5000000000u)
        sleep_us(100);
    __atomic_add_fetch(&c->met, __atomic_load_n(&c->inside, __ATOMIC_ACQUIRE) == 2,
                       __ATOMIC_ACQ_REL);
    return SPDL_SKIP;
}

static void a_call_that_goes_on_wakes_for_the_next(void) {
    for (int i = 0; i < 5; ++i) {
        couple c = { .armed = 0 };
        spdl_pipeline *p = START(2, COUNT_TO(2),
                                 SPDL_PIPE(meets, .ctx = &c, .again = true, .concurrency = 2,
                                           .output_order = SPDL_ORDER_COMPLETION,
                                           .free_item = item_free),
                                 SPDL_SINK(8));
        item *it = NULL;
        int k;
        sleep_us(30000); /* both calls wait, and both workers sleep */
        __atomic_store_n(&c.armed, 1, __ATOMIC_RELEASE);
        for (k = 0; k < 8 && __atomic_load_n(&c.inside, __ATOMIC_ACQUIRE) == 0; ++k) {
            CHECK_EQ(SPDL_NEXT(p, &it, SPDL_SECONDS(15)), SPDL_OK);
            item_free(it);
            sleep_us(20000);
        }
        await(&c.met, 2);
        DONE(p);
    }
}

TEST_TABLE(again) {
    TEST_CASE(an_input_becomes_many),
    TEST_CASE(the_trainer_may_be_next),
    TEST_CASE(calls_that_wait_are_taken_up_once),
    TEST_CASE(memory_is_bounded),
    TEST_CASE(an_item_goes_on_at_once),
    TEST_CASE(calls_run_at_once),
    TEST_CASE(the_input_may_be_the_last),
    TEST_CASE(a_call_may_fail_midway),
    TEST_CASE(nothing_comes_after_a_failure),
    TEST_CASE(a_later_failure_ends_streams),
    TEST_CASE(streams_end_at_a_stop),
    TEST_CASE(epochs_keep_streams_apart),
    TEST_CASE(a_flush_may_stream),
    TEST_CASE(paths_may_stream),
    TEST_CASE(an_item_may_be_null),
    TEST_CASE(a_result_at_the_address_of_a_taken_input),
    TEST_CASE(misuse_is_a_failure),
    TEST_CASE(what_nobody_asked_for_is_freed),
    TEST_CASE(a_buffer_may_be_left),
    TEST_CASE(a_call_that_goes_on_wakes_for_the_next),
    TEST_END,
};
