/* The doctor's hand in the rows, and what a trainer gets with it: every item once, in order and
   with its number, whatever is different at the moment, and kept ones in between where it is asked
   to replay. What is different is drawn after every few items, so nothing here hangs on time; and
   with windows this short a whole examination is over soon. CHANCE_ROUNDS is how often all shapes
   are tried. */
#define SPDL__WINDOW_NS 300000
#define ITEMS_PRIVATE
#include "flow.h"

#include <limits.h>
#include <math.h>

/* Marks in the value of an item: it was an input already; it is a copy, or was made of one. */
#define SEEN (1L << 40)
#define KEPT (1L << 41)
#define NUMBER (SEEN - 1)

static long mark_seen(item *it) { return __atomic_fetch_or(&it->value, SEEN, __ATOMIC_RELAXED); }

static long value_of(const item *it) { return __atomic_load_n(&it->value, __ATOMIC_RELAXED); }

/* --- memory that is counted --- */

static long bytes_live;

static int memory_is_out;

static void *counted_alloc(size_t bytes, size_t align, void *user) {
    void *memory =
        __atomic_load_n(&memory_is_out, __ATOMIC_RELAXED) ? NULL : test_memory(align, bytes);
    (void)user;
    if (memory == NULL) return NULL;
    __atomic_add_fetch(&bytes_live, (long)bytes, __ATOMIC_RELAXED);
    return memory;
}

static void counted_free(void *memory, size_t bytes, void *user) {
    (void)user;
    __atomic_sub_fetch(&bytes_live, (long)bytes, __ATOMIC_RELAXED);
    test_memory_free(memory);
}

/* --- a pipeline with a doctor --- */

static const spdl_doctor_desc watches = { .seconds = 1e9, .quiet = true }; /* does nothing itself */
static const spdl_doctor_desc replays = { .seconds = 1e9, .quiet = true, .replay = true };

static spdl_pipeline *examine(const spdl_doctor_desc *doctor, int workers, const spdl_stage *rows,
                              size_t count) {
    spdl_pipeline_desc desc = { 0 };
    spdl_pipeline *p = NULL;
    spdl_error error = { 0 };
    desc.workers = TEST_WORKERS(workers);
    desc.doctor = doctor;
    desc.error = &error;
    desc.logger.log_fn = log_nothing;
    desc.allocator.alloc_fn = counted_alloc;
    desc.allocator.free_fn = counted_free;
    if (spdl_pipeline_create(&p, &desc, rows, count) != SPDL_OK) CHECK_STR(error.text, "");
    REQUIRE(p != NULL);
    return p;
}

#define EXAMINE(doctor, workers, ...) examine((doctor), (workers), SPDL_STAGES(__VA_ARGS__))

static void gone(spdl_pipeline *p) {
    DONE(p);
    CHECK_EQ(__atomic_load_n(&bytes_live, __ATOMIC_RELAXED), 0);
}

static unsigned draw(uint64_t *state, unsigned below) {
    return (unsigned)(test_random(state) % below);
}

/* Something is different from here on. */
static void differ(spdl_pipeline *p, uint64_t *state) {
    spdl__doctor *d = p->doctor;
    spdl__arm arm = { (spdl__arm_kind)draw(state, SPDL__ARM_SETTINGS + 1), -1, 0, NULL };
    const int row = (int)draw(state, (unsigned)p->count);
    const spdl__probe *probe = &p->hand->probe[row];
    const bool replay = probe->count > 1 && probe->replays;
    d->window_ns = SPDL_SECONDS(1); /* a cut lasts for 20 of them */
    if (arm.kind == SPDL__ARM_KEPT || (arm.kind == SPDL__ARM_CUT && !replay))
        arm.kind = SPDL__ARM_SLEEP;
    if (draw(state, 2) && replay) arm.kind = SPDL__ARM_CUT;
    if (arm.kind != SPDL__ARM_BASE) arm.row = row;
    arm.value = draw(state, 60000);
    if (arm.kind == SPDL__ARM_SETTINGS) { /* of any finding */
        d->found.is.stage = row;
        d->found.is.concurrency[row] = 1 + (int)draw(state, (unsigned)p->node[row].most);
        d->found.is.workers = d->report.workers + (int)draw(state, 1 + (unsigned)p->spare);
    }
    spdl__doctor_set(d, &arm);
}

/* Looks for the items that must come, in order or not; copies come in between. */
typedef struct audit {
    uint64_t state;
    long first, next, kept, each; /* every number comes so many times */
    bool ordered, drops; /* some may be missing */
    long sum;
} audit;

static void audit_item(audit *a, item *it) {
    const long value = value_of(it);
    CHECK_EQ(it->magic, ALIVE);
    if (value & KEPT) {
        ++a->kept;
        return;
    }
    if (a->ordered && a->drops) {
        CHECK((value & NUMBER) >= a->first + a->next);
    } else if (a->ordered) {
        CHECK_EQ(value & NUMBER, a->first + a->next / a->each);
    }
    a->sum += value & NUMBER;
    ++a->next;
}

static void audit_taken(audit *a, void *taken, bool batches) {
    spdl_batch *batch = (spdl_batch *)taken;
    if (batches) {
        for (size_t i = 0; i < batch->count; ++i) audit_item(a, (item *)batch->items[i]);
        spdl_batch_free(batch);
    } else {
        audit_item(a, (item *)taken);
        item_free(taken);
    }
}

/* Takes up to `most`, what is different changing now and then. */
static spdl_result audit_take(audit *a, spdl_pipeline *p, long most, bool batches) {
    spdl_result result = SPDL_OK;
    while (most-- > 0) {
        void *taken;
        result = spdl_pipeline_next(p, &taken, SPDL_SECONDS(15));
        if (result == SPDL_TIMEOUT) CHECK_STR("an item", "none for 15 s");
        if (result != SPDL_OK) break;
        audit_taken(a, taken, batches);
        if (draw(&a->state, 4) == 0) differ(p, &a->state);
        if (draw(&a->state, 64) == 0) sleep_us(500); /* buffers fill up */
    }
    return result;
}

/* --- stages that can be replayed --- */

static int copies_fail;

static void *item_copy(const void *from) {
    const item *it = (const item *)from;
    CHECK_EQ(it->magic, ALIVE);
    if (__atomic_load_n(&copies_fail, __ATOMIC_RELAXED)) return NULL;
    return item_make((value_of(it) & NUMBER) | KEPT);
}

typedef struct glance {
    int fails;   /* percent of the calls that fail, and drop their item */
    long lost, lost_sum; /* what was dropped so */
    bool counts; /* numbers of items are those of the source's calls */
    long expected; /* spill_all: the next number */
    uint64_t calls;
} glance;

static spdl_result glance_at(glance *g, spdl_task *task, item *in, item **out) {
    const long before = mark_seen(in);
    const bool kept = (before & (SEEN | KEPT)) != 0;
    uint64_t luck = __atomic_add_fetch(&g->calls, 1, __ATOMIC_RELAXED);
    CHECK_EQ(in->magic, ALIVE);
    if (g->counts && !kept) CHECK_EQ(spdl_sequence(task), (before & NUMBER));
    if ((int)(test_random(&luck) % 100) < g->fails) return SPDL_E_IO;
    *out = item_make((before & NUMBER) | (kept ? KEPT : 0));
    return SPDL_OK;
}

/* As spdl_drop_fn. */
static void note_lost(void *ctx, void *dropped, const spdl_error *error) {
    glance *g = (glance *)ctx;
    const long value = value_of((const item *)dropped);
    CHECK_EQ(error->result, SPDL_E_IO);
    if (value & KEPT) return;
    __atomic_add_fetch(&g->lost, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&g->lost_sum, value & NUMBER, __ATOMIC_RELAXED);
}

/* Looks at its input and makes another item. */
SPDL_FN(look, item, item) {
    return glance_at((glance *)spdl_ctx(task), task, in, out);
}

/* Which item of the batch this call is for; counts on. */
static size_t item_of_call(spdl_task *task) {
    void **state = spdl_call_state(task);
    const size_t at = (size_t)(uintptr_t)*state;
    *state = (void *)(uintptr_t)(at + 1);
    return at;
}

/* The same of a batch, whose items it looks at, one in each call. */
SPDL_FN(look_in, spdl_batch, item) {
    const size_t at = item_of_call(task);
    const spdl_result result =
        glance_at((glance *)spdl_ctx(task), task, (item *)in->items[at], out);
    return result == SPDL_OK && at + 1 < in->count ? SPDL_AGAIN : result;
}

/* Checks the number of a real item, and hands it on. */
SPDL_FN(numbered, item, item) {
    if (!(value_of(in) & KEPT)) CHECK_EQ(spdl_sequence(task), (value_of(in) & NUMBER));
    *out = in;
    return SPDL_OK;
}

SPDL_FN(renew, item, item) {
    *out = item_make(value_of(in));
    return SPDL_OK;
}

SPDL_FN(twice, item, item) {
    long **at = (long **)spdl_call_state(task);
    if (*at == NULL) *at = (long *)calloc(1, sizeof **at);
    *out = item_make(value_of(in));
    return (*at)[0]++ == 0 ? SPDL_AGAIN : SPDL_OK;
}

SPDL_FN(in_time, item, item) {
    const spdl_deferred call = spdl_defer(task);
    (void)out;
    CHECK_EQ(spdl_complete(call, SPDL_OK, in), SPDL_OK);
    return SPDL_PENDING;
}

/* Hands on all it gets; is called once more at the end. */
SPDL_FN(to_the_end, item, item) {
    *out = in;
    return in == NULL ? SPDL_SKIP : SPDL_OK;
}

/* A buffer with the number, and what reads one. Copies of bytes look like what they were made of:
   their numbers go down. */
enum { BYTES = 24 };

SPDL_FN(fill, item, void) {
    long *buffer = (long *)spdl_buffer(task);
    REQUIRE(buffer != NULL);
    buffer[0] = buffer[2] = value_of(in);
    buffer[1] = (long)spdl_sequence(task);
    *out = buffer;
    return SPDL_OK;
}

static long read_bytes(const long *bytes, uint64_t sequence) {
    CHECK_EQ(bytes[0], bytes[2]);
    return bytes[0] | (bytes[1] == (long)sequence ? 0 : KEPT);
}

SPDL_FN(spill, void, item) {
    *out = item_make(read_bytes((const long *)in, spdl_sequence(task)));
    return SPDL_OK;
}

/* --- shapes --- */

static script source;
static glance glances;
static long source_sleeps; /* us, each call */

#define NOTHING .max_failures = 0 /* else */
#define COPIED .copy_item = item_copy, .free_item = item_free
#define FROM(...) SPDL_SOURCE(count_up, .ctx = &source, .free_item = item_free, __VA_ARGS__)
#define LOOK(...)                                                                                  \
    SPDL_PIPE(look, .ctx = &glances, .free_item = item_free, __VA_ARGS__)
#define TWICE(...)                                                                                 \
    SPDL_PIPE(twice, .again = true, .free_state = free, .free_item = item_free, __VA_ARGS__)

static bool goes_back; /* it is rewound: copies may have any number */

/* A batch in place becomes items again. Copies look like items that came before. */
SPDL_FN(spill_all, spdl_batch, item) {
    glance *g = (glance *)spdl_ctx(task);
    const size_t at = item_of_call(task);
    long bytes[3], number;
    memcpy(bytes, (const char *)in->data + at * BYTES, sizeof bytes);
    number = bytes[0] & NUMBER;
    CHECK_EQ(bytes[0], bytes[2]);
    CHECK(number <= g->expected || goes_back);
    if (number < g->expected) bytes[0] |= KEPT;
    else if (!(bytes[0] & KEPT)) ++g->expected;
    *out = item_make(bytes[0]);
    return at + 1 < in->count ? SPDL_AGAIN : SPDL_OK;
}

enum { SHAPES = 16 };

static spdl_pipeline *shape(int number, const spdl_doctor_desc *doctor, int workers, long count,
                            int buffer) {
    const spdl_stage sink = SPDL_SINK(buffer);
    memset(&source, 0, sizeof source);
    memset(&glances, 0, sizeof glances);
    source.count = count;
    source.sleep_us = source_sleeps;
    glances.counts = number == 1 || number == 2 || number == 10;
    switch (number) {
    case 0: return EXAMINE(doctor, workers, FROM(.copy_item = item_copy), sink);
    case 1: return EXAMINE(doctor, workers, FROM(NOTHING), LOOK(NOTHING), sink);
    case 2:
        return EXAMINE(doctor, workers, FROM(.copy_item = item_copy),
                       SPDL_PIPE(renew, .concurrency = 4, COPIED), SPDL_PIPE(numbered),
                       LOOK(.concurrency = 2), sink);
    case 3:
        glances.fails = 30;
        return EXAMINE(doctor, workers, FROM(NOTHING), SPDL_PIPE(numbered, .concurrency = 3),
                       LOOK(.concurrency = 2, .max_failures = -1, .on_drop = note_lost), sink);
    case 4:
        return EXAMINE(doctor, workers, FROM(.copy_item = item_copy), SPDL_BATCH(3),
                       SPDL_UNBATCH(), sink);
    case 5:
        return EXAMINE(doctor, workers, FROM(.buffer_size = 20), SPDL_BATCH(3, .buffer_size = 1),
                       SPDL_PIPE(look_in, .ctx = &glances, .again = true,
                                 .free_item = item_free), sink);
    case 6:
        return EXAMINE(doctor, workers, FROM(.copy_item = item_copy),
                       SPDL_PIPE(fill, .item_bytes = BYTES, .concurrency = 2),
                       SPDL_PIPE(spill, .free_item = item_free), sink);
    case 7:
        return EXAMINE(doctor, workers, FROM(NOTHING), TWICE(NOTHING), LOOK(NOTHING),
                       SPDL_BATCH(4), SPDL_UNBATCH(), sink);
    case 8:
        return EXAMINE(doctor, workers, FROM(NOTHING), TWICE(NOTHING), LOOK(.concurrency = 2),
                       sink);
    case 9:
        return EXAMINE(doctor, workers, FROM(NOTHING),
                       SPDL_PIPE(in_time, .deferred = true, .concurrency = 2),
                       SPDL_PIPE(renew, COPIED, .concurrency = 2), LOOK(NOTHING), sink);
    case 10:
        return EXAMINE(doctor, workers, FROM(NOTHING), SPDL_PIPE(to_the_end, .flush = true),
                       LOOK(NOTHING), SPDL_PIPE(numbered), sink);
    case 11:
        return EXAMINE(doctor, workers, FROM(.threads = 1),
                       SPDL_PIPE(renew, COPIED, .concurrency = 2), LOOK(.concurrency = 1), sink);
    case 12: /* the order is not known */
        return EXAMINE(doctor, workers, FROM(NOTHING),
                       SPDL_PIPE(renew, COPIED, .concurrency = 3,
                                 .output_order = SPDL_ORDER_COMPLETION),
                       LOOK(.concurrency = 3, .output_order = SPDL_ORDER_COMPLETION), sink);
    case 13:
        return EXAMINE(doctor, workers, FROM(NOTHING), SPDL_PIPE(fill, .concurrency = 3),
                       SPDL_BATCH(4, .item_bytes = BYTES),
                       SPDL_PIPE(spill_all, .ctx = &glances, .again = true,
                                 .free_item = item_free),
                       sink);
    case 14: /* streams into the sink, whose buffer may be another */
        return EXAMINE(doctor, workers, FROM(NOTHING), LOOK(NOTHING),
                       TWICE(.concurrency = 3, .output_order = SPDL_ORDER_COMPLETION), sink);
    default: /* nothing to replay: a branch */
        return EXAMINE(doctor, workers, FROM(.copy_item = item_copy), SPDL_BRANCH(pass_on),
                       SPDL_PATH("a"), LOOK(NOTHING), SPDL_PATH("b"),
                       SPDL_MERGE(.output_order = SPDL_ORDER_COMPLETION), sink);
    }
}

/* Whether a row of it can be replayed. */
static bool shape_replays(int number) {
    return number == 0 || number == 2 || number == 4 || number == 6 || number == 9 ||
           (number >= 11 && number <= 13);
}

static audit audit_of(int number, uint64_t state) {
    audit a = { .each = number == 7 || number == 8 || number == 14 ? 2 : 1,
                .ordered = number != 12 && number != 14, .drops = number == 3 };
    a.state = state;
    return a;
}

static const int many[] = { 0, 1, 4, 64 };

/* Keeps a sample of the first `count` items. */
static spdl_result keep(audit *a, spdl_pipeline *p, long count) {
    spdl_result result;
    spdl__store32(&p->hand->keeps, 1);
    result = audit_take(a, p, count, false);
    spdl__kept_close(p->hand);
    return result;
}

/* Whether there is one more round: all shapes with all crowds, so many times. On a machine that
   does much else fewer will do. */
static bool goes_on(long round, long each, uint64_t since) {
    const char *wanted = getenv("CHANCE_ROUNDS");
    if (wanted != NULL) return round < each * 4 * atol(wanted);
    return round < each * 4 * (TEST_SANITIZED ? 1 : 3) &&
           (round < each || spdl_time_ns() - since < 4000000000u);
}

/* --- without replay --- */

static void delays_change_no_item(void) {
    const uint64_t since = spdl_time_ns();
    chaos_on();
    for (long round = 0; goes_on(round, SHAPES, since); ++round) {
        const int number = (int)(round % SHAPES);
        audit a = audit_of(number, test_seed() + (uint64_t)round);
        spdl_doctor_desc doctor = watches;
        spdl_pipeline *p;
        doctor.raise = draw(&a.state, 2) != 0;
        p = shape(number, &doctor, many[round / SHAPES % 4], 90, 1 + (int)draw(&a.state, 3));
        CHECK_EQ(audit_take(&a, p, 1000000, false), SPDL_END);
        CHECK_EQ(a.next + glances.lost, 90 * a.each);
        CHECK_EQ(a.sum + glances.lost_sum, 89 * 90 / 2 * a.each);
        CHECK_EQ(a.kept, 0);
        gone(p);
    }
}

static void nothing_is_replayed_where_there_are_several_ways(void) {
    spdl_pipeline *p = shape(SHAPES - 1, &replays, 2, 10, 2);
    for (int i = 0; i < p->count; ++i) CHECK_EQ(p->hand->probe[i].replays, 0);
    CHECK_EQ(take_from(p, 0, 1000, SPDL_END), 10);
    gone(p);
}

/* Nor is there a worker more. */
static void there_is_none_where_items_are_pushed(void) {
    static spdl_stats stats;
    const spdl_doctor_desc doctor = { .raise = true };
    spdl_pipeline *p = EXAMINE(&doctor, 1, SPDL_FEED(item, .free_item = item_free), LOOK(NOTHING),
                               SPDL_SINK(2));
    CHECK(p->doctor == NULL);
    spdl_pipeline_stats(p, &stats);
    CHECK_EQ(stats.workers, 1);
    for (long i = 0; i < 2; ++i) CHECK_EQ(spdl_pipeline_push(p, item_make(i), 0), SPDL_OK);
    CHECK_EQ(spdl_pipeline_push_end(p), SPDL_OK);
    CHECK_EQ(take_from(p, 0, 1000, SPDL_END), 2);
    gone(p);
}

/* --- with replay --- */

static void all_come_once_among_those_that_were_kept(void) {
    const uint64_t since = spdl_time_ns();
    long kept = 0;
    chaos_on();
    for (long round = 0; goes_on(round, SHAPES, since); ++round) {
        const int number = (int)(round % SHAPES);
        audit a = audit_of(number, test_seed() + (uint64_t)round);
        spdl_pipeline *p = shape(number, &replays, many[round / SHAPES % 4], 120,
                                 1 + (int)draw(&a.state, 3));
        CHECK_EQ(keep(&a, p, 20 + (long)draw(&a.state, 40)), SPDL_OK);
        CHECK_EQ(audit_take(&a, p, 1000000, false), SPDL_END);
        CHECK_EQ(a.next + glances.lost, 120 * a.each);
        CHECK_EQ(a.sum + glances.lost_sum, 119 * 120 / 2 * a.each);
        kept += a.kept;
        if (number == SHAPES - 1) CHECK_EQ(a.kept, 0);
        if (number == SHAPES - 1 || round >= SHAPES) {
            gone(p);
            continue;
        }
        for (int i = 0; i < p->count; ++i) /* and what was meant to be replayed was */
            kept += p->hand->probe[i].replays != 0;
        CHECK(kept > 0 || !shape_replays(number));
        kept = 0;
        gone(p);
    }
}

static void epochs_keep_their_items(void) {
    const uint64_t since = spdl_time_ns();
    for (long round = 0; goes_on(round, 3, since); ++round) {
        audit a = audit_of(0, test_seed() + (uint64_t)round);
        spdl_pipeline *p;
        long kept = 0;
        memset(&source, 0, sizeof source);
        memset(&glances, 0, sizeof glances);
        source.count = 31;
        p = round % 3 == 0   ? EXAMINE(&replays, many[round / 3 % 4],
                                       FROM(.continuous = true, .copy_item = item_copy),
                                       LOOK(.concurrency = 2), SPDL_SINK(2))
            : round % 3 == 1 ? EXAMINE(&replays, many[round / 3 % 4], FROM(.continuous = true),
                                       SPDL_BATCH(4),
                                       SPDL_PIPE(look_in, .ctx = &glances,
                                                 .again = true, .free_item = item_free),
                                       SPDL_SINK(2))
                             : EXAMINE(&replays, many[round / 3 % 4], FROM(.continuous = true),
                                       SPDL_PIPE(renew, .concurrency = 3, COPIED), SPDL_BATCH(7),
                                       SPDL_UNBATCH(), SPDL_SINK(2));
        spdl__store32(&p->hand->keeps, 1);
        for (int epoch = 0; epoch < 6; ++epoch) {
            CHECK_EQ(audit_take(&a, p, 1000000, false), SPDL_END);
            CHECK_EQ(a.next, 31);
            CHECK_EQ(a.sum, 30 * 31 / 2);
            a.next = a.sum = 0;
            kept += a.kept;
            if (epoch == 1) spdl__kept_close(p->hand);
        }
        gone(p);
        (void)kept;
    }
}

/* Left, stopped or rewound at any point, some of it by another thread. */
static void *stop_it(void *pipeline) {
    CHECK_EQ(spdl_pipeline_stop((spdl_pipeline *)pipeline, SPDL_FOREVER), SPDL_OK);
    return NULL;
}

static void it_is_left_at_any_point(void) {
    const uint64_t since = spdl_time_ns();
    chaos_on();
    goes_back = true;
    for (long round = 0; goes_on(round, SHAPES, since); ++round) {
        const int number = (int)(round % SHAPES);
        audit a = audit_of(number, test_seed() + (uint64_t)round);
        spdl_pipeline *p = shape(number, &replays, many[round / SHAPES % 4], -1,
                                 1 + (int)draw(&a.state, 3));
        a.ordered = a.ordered && number != 6 && number != 13; /* bytes of numbers to come */
        for (int again = 0; again < 4; ++again) {
            const bool keeps = again == 1;
            spdl_result result;
            test_thread stopper;
            if (keeps) spdl__store32(&p->hand->keeps, 1);
            if (again == 2) spdl__kept_close(p->hand);
            CHECK_EQ(audit_take(&a, p, (long)draw(&a.state, 50), false), SPDL_OK);
            if (again == 3) break;
            if (draw(&a.state, 2)) {
                stopper = thread_of(stop_it, p);
                result = audit_take(&a, p, 1000000, false);
                CHECK(result == SPDL_CLOSED);
                test_join(stopper);
            }
            a.first = (long)draw(&a.state, 4) * 5;
            a.next = 0;
            CHECK_EQ(spdl_pipeline_rewind(p, (uint64_t)a.first, SPDL_FOREVER), SPDL_OK);
        }
        gone(p);
    }
}

SPDL_FN(breaks, item, item) {
    *out = in;
    return in->value == 99 ? spdl_fail(task, "at %ld", in->value) : SPDL_OK;
}

static void errors_come_as_they_would(void) {
    for (long round = 0; round < 16; ++round) {
        audit a = audit_of(0, test_seed() + (uint64_t)round);
        spdl_pipeline *p;
        memset(&source, 0, sizeof source);
        memset(&glances, 0, sizeof glances);
        source.count = -1;
        p = EXAMINE(&replays, many[round % 4], FROM(.copy_item = item_copy),
                    SPDL_PIPE(breaks, .concurrency = 2),
                    LOOK(NOTHING), SPDL_SINK(2));
        CHECK_EQ(keep(&a, p, 40), SPDL_OK);
        CHECK_EQ(audit_take(&a, p, 1000000, false), SPDL_E_STAGE);
        CHECK_EQ(a.next, 99);
        CHECK_EQ(spdl_pipeline_error(p)->stage, 1);
        CHECK_EQ(spdl_pipeline_error(p)->item, 99);
        gone(p);
    }
}

/* Cut after `row` from now on. */
static void cut_after(spdl_pipeline *p, int row, uint64_t window_ns) {
    const spdl__arm arm = { SPDL__ARM_CUT, row, 0, NULL };
    p->doctor->window_ns = window_ns;
    spdl__doctor_set(p->doctor, &arm);
}

/* Samples that are too small are freed, too. */
static void one_item_is_no_sample(void) {
    for (int i = 0; i < 2 * SHAPES; ++i) {
        audit a = audit_of(i % SHAPES, test_seed());
        spdl_pipeline *p = shape(i % SHAPES, &replays, many[i % 4], 1, 1);
        spdl__store32(&p->hand->keeps, 1);
        CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(audit_take(&a, p, 1000, false), SPDL_END);
        spdl__kept_close(p->hand);
        if (a.each == 1)
            for (int k = 0; k < p->count; ++k) CHECK(p->hand->probe[k].count <= 2);
        gone(p);
    }
}

/* Tokens take no place in a batch: not more and more of them are begun. */
static int batches_begun(spdl__node *node) {
    int count = 0;
    spdl__lock(&node->place_lock, node->locks);
    for (const spdl__batch *batch = node->place; batch != NULL; batch = batch->next) ++count;
    spdl__unlock(&node->place_lock, node->locks);
    return count;
}

static void tokens_take_no_place(void) {
    for (int i = 0; i < 4; ++i) {
        audit a = audit_of(13, test_seed());
        spdl_pipeline *p = shape(13, &replays, many[i], -1, 2);
        CHECK_EQ(keep(&a, p, 40), SPDL_OK);
        for (int k = 0; k < 400; ++k) {
            const spdl__arm as_it_is = { SPDL__ARM_BASE, -1, 0, NULL };
            void *taken;
            if (k % 10 == 0) cut_after(p, 1, SPDL_SECONDS(1));
            if (k % 10 == 5) spdl__doctor_set(p->doctor, &as_it_is);
            REQUIRE(spdl_pipeline_next(p, &taken, SPDL_SECONDS(15)) == SPDL_OK);
            audit_taken(&a, taken, false);
        }
        CHECK(a.kept > 0);
        CHECK(batches_begun(&p->node[2]) < 16);
        gone(p);
    }
}

/* A batch row makes one token of as many as it is large; real batches lose nothing by it. */
SPDL_FN(first_of, spdl_batch, item) {
    const long value = value_of((const item *)in->items[0]);
    CHECK_EQ(in->count, 3);
    CHECK_EQ(value, 3 * (long)in->sequence);
    *out = item_make(value / 3);
    return SPDL_OK;
}

static void tokens_pass_a_batch(void) {
    for (int i = 0; i < 4; ++i) {
        audit a = { .each = 1, .ordered = true, .state = test_seed() };
        spdl_pipeline *p;
        memset(&source, 0, sizeof source);
        source.count = -1;
        p = EXAMINE(&replays, many[i], FROM(NOTHING), SPDL_BATCH(3), SPDL_PIPE(first_of, COPIED),
                    SPDL_SINK(2));
        CHECK_EQ(keep(&a, p, 40), SPDL_OK);
        for (int k = 0; k < 200; ++k) {
            const spdl__arm as_it_is = { SPDL__ARM_BASE, -1, 0, NULL };
            void *taken;
            if (k % 10 == 0) cut_after(p, 2, SPDL_SECONDS(1));
            if (k % 10 == 5) spdl__doctor_set(p->doctor, &as_it_is);
            REQUIRE(spdl_pipeline_next(p, &taken, SPDL_SECONDS(15)) == SPDL_OK);
            audit_taken(&a, taken, false);
        }
        CHECK(a.kept > 0 && a.next > 40);
        gone(p);
    }
}

/* Nothing can be kept: results are NULL, or no copy can be made. */
SPDL_FN(makes_nothing, void, item) { return spdl_sequence(task) == 99 ? SPDL_END : SPDL_OK; }

static void what_cannot_be_kept_is_not_replayed(void) {
    for (int i = 0; i < 8; ++i) {
        void *taken;
        int count = 0;
        spdl_pipeline *p = i < 4 ? EXAMINE(&replays, many[i], SPDL_SOURCE(makes_nothing, COPIED),
                                           SPDL_SINK(2))
                                 : shape(0, &replays, many[i % 4], 99, 2);
        __atomic_store_n(&copies_fail, 1, __ATOMIC_RELAXED);
        spdl__store32(&p->hand->keeps, 1);
        CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_FOREVER), SPDL_OK); /* all of them are seen */
        for (; spdl_pipeline_next(p, &taken, SPDL_SECONDS(15)) == SPDL_OK; ++count) {
            CHECK_EQ(taken == NULL, i < 4);
            if (taken != NULL) item_free(taken);
        }
        CHECK_EQ(count, 99);
        spdl__kept_close(p->hand);
        CHECK_EQ(p->hand->probe[0].count, 0);
        CHECK_EQ(p->hand->probe[0].replays, 0);
        __atomic_store_n(&copies_fail, 0, __ATOMIC_RELAXED);
        gone(p);
    }
}

/* Nor can an input of unknown size that is passed on, or the result of a call that fails. */
SPDL_FN(passes_then_errs, item, item) {
    if (value_of(in) == 5) CHECK(spdl_route(task, 0) != SPDL_OK);
    *out = in;
    return SPDL_OK;
}

static void inputs_and_failures_are_not_kept(void) {
    spdl_pipeline *p;
    item *it = NULL;
    spdl_result result;
    int count = 0;
    memset(&source, 0, sizeof source);
    source.count = -1;
    p = EXAMINE(&replays, 0, FROM(NOTHING), SPDL_PIPE(passes_then_errs, .item_bytes = sizeof(item)),
                SPDL_SINK(2));
    CHECK_EQ(p->hand->probe[1].replays, 1);
    spdl__store32(&p->hand->keeps, 1);
    for (; (result = SPDL_NEXT(p, &it, SPDL_SECONDS(15))) == SPDL_OK; ++count) item_free(it);
    CHECK_EQ(result, SPDL_E_INVALID);
    CHECK_EQ(count, 5);
    CHECK_EQ(p->hand->probe[1].seen, 5); /* the failed call is not looked at */
    spdl__kept_close(p->hand);
    CHECK_EQ(p->hand->probe[1].count, 0);
    gone(p);
}

/* The consumer has all buffers, and there is no memory for more: tokens become nothing. */
SPDL_FN(fills_if_it_can, void, void) {
    long *buffer = (long *)spdl_buffer(task);
    *out = buffer;
    if (buffer == NULL) return SPDL_SKIP;
    buffer[0] = buffer[2] = 0;
    return SPDL_OK;
}

static void tokens_without_memory_are_nothing(void) {
    static void *taken[400];
    for (int i = 0; i < 4; ++i) {
        spdl_pipeline *p = EXAMINE(&replays, many[i],
                                   SPDL_SOURCE(fills_if_it_can, .item_bytes = BYTES), SPDL_SINK(2));
        int count = 0;
        spdl__store32(&p->hand->keeps, 1);
        for (int k = 0; k < 20; ++k) {
            REQUIRE(spdl_pipeline_next(p, taken, SPDL_SECONDS(15)) == SPDL_OK);
            spdl_buffer_free(taken[0]);
        }
        spdl__kept_close(p->hand);
        CHECK_EQ(p->hand->probe[0].replays, 1);
        __atomic_store_n(&memory_is_out, 1, __ATOMIC_RELAXED);
        cut_after(p, 0, SPDL_SECONDS(1));
        while (spdl_pipeline_next(p, &taken[count], 2000000) == SPDL_OK) REQUIRE(++count < 400);
        while (count > 0) spdl_buffer_free(taken[--count]);
        CHECK_EQ(spdl_pipeline_next(p, &taken[0], SPDL_SECONDS(15)), SPDL_OK);
        spdl_buffer_free(taken[0]);
        __atomic_store_n(&memory_is_out, 0, __ATOMIC_RELAXED);
        gone(p);
    }
}

/* No copy can be made: nothing comes of the tokens, the cut is over after a time, and all items are
   there. */
static void copies_that_fail_are_nothing(void) {
    for (int round = 0; round < 8; ++round) {
        const int row = round / 4;
        audit a = audit_of(0, test_seed());
        spdl_pipeline *p = shape(2, &replays, many[round % 4], 200, 2);
        CHECK_EQ(keep(&a, p, 60), SPDL_OK);
        CHECK_EQ(p->hand->probe[row].replays, 1);
        __atomic_store_n(&copies_fail, 1, __ATOMIC_RELAXED);
        cut_after(p, row, 500000);
        for (spdl_result result = SPDL_OK; result == SPDL_OK;) {
            void *taken;
            result = spdl_pipeline_next(p, &taken, SPDL_SECONDS(15));
            if (result == SPDL_OK) audit_taken(&a, taken, false);
            else CHECK_EQ(result, SPDL_END);
        }
        CHECK_EQ(a.next, 200);
        __atomic_store_n(&copies_fail, 0, __ATOMIC_RELAXED);
        gone(p);
    }
}

/* Copies of a row that passes its input on belong to the row that made it; those of a row that took
   it are its own. */
static long pictures;

static void picture_free(void *picture) {
    __atomic_sub_fetch(&pictures, 1, __ATOMIC_RELAXED);
    test_memory_free(picture);
}

static void *picture_copy(const void *picture) {
    int *copy = (int *)test_memory(sizeof(void *), sizeof *copy);
    REQUIRE(copy != NULL);
    *copy = *(const int *)picture;
    __atomic_add_fetch(&pictures, 1, __ATOMIC_RELAXED);
    return copy;
}

SPDL_FN(picture, void, int) {
    const int one = 1;
    if (spdl_sequence(task) == 4000) return SPDL_END;
    *out = (int *)picture_copy(&one);
    return SPDL_OK;
}

SPDL_FN(flip, int, int) {
    *in = -*in;
    *out = in;
    return SPDL_OK;
}

static void unflipped_free(void *picture) {
    CHECK(*(const int *)picture > 0);
    picture_free(picture);
}

static void flipped_free(void *picture) {
    CHECK(*(const int *)picture < 0);
    picture_free(picture);
}

/* It frees its input, and what it makes has that address. */
SPDL_FN(flip_anew, int, int) {
    const int flipped = -*in;
    spdl_take(task);
    picture_free(in);
    *out = (int *)picture_copy(&flipped);
    return SPDL_OK;
}

SPDL_FN(look_at, int, void) {
    static char seen;
    (void)in;
    *out = &seen;
    return SPDL_OK;
}

static void copies_are_freed_by_the_row_that_made_them(void) {
    for (int way = 0; way < 4; ++way) {
        const bool batches = way % 2;
        const spdl_stage passes = SPDL_PIPE(flip, .copy_item = picture_copy);
        const spdl_stage anew = SPDL_PIPE(flip_anew, .copy_item = picture_copy,
                                          .free_item = flipped_free);
        const spdl_stage looks = SPDL_PIPE(look_at), group = SPDL_BATCH(4);
        const spdl_free_fn frees = way < 2 ? picture_free : unflipped_free;
        void *taken;
        spdl_result result;
        spdl_pipeline *p = EXAMINE(&replays, 2, SPDL_SOURCE(picture, .free_item = frees),
                                   way < 2 ? passes : anew, batches ? group : looks, SPDL_SINK(3));
        __atomic_store_n(&p->hand->keeps, 1, __ATOMIC_RELAXED);
        for (int i = 0; (result = spdl_pipeline_next(p, &taken, SPDL_SECONDS(15))) == SPDL_OK;
             ++i) {
            if (batches) spdl_batch_free(taken);
            if (i == 100) spdl__kept_close(p->hand);
            if (i == 100) CHECK(p->hand->probe[1].count > 1);
            if (i == 200)
                __atomic_store_n(&p->hand->cut_until, spdl_time_ns() + 1000000000u,
                                 __ATOMIC_RELAXED);
            if (i == 200) __atomic_store_n(&p->hand->cut, 2, __ATOMIC_RELEASE);
            if (i == 600) __atomic_store_n(&p->hand->cut, 0, __ATOMIC_RELEASE);
        }
        CHECK_EQ(result, SPDL_END);
        gone(p);
        CHECK_EQ(pictures, 0);
    }
}

/* A pipeline whose only result comes with the end of the source is not cut for ever. */
static void a_cut_ends_by_itself(void) {
    for (int i = 0; i < 4; ++i) {
        scale s = { .limit = LONG_MAX };
        spdl_pipeline *p = EXAMINE(&replays, many[i],
                                   SPDL_SOURCE(count_up, SCRIPT(.count = 50), .continuous = true,
                                               COPIED),
                                   WEIGH(&s), SPDL_SINK(1));
        item *it = NULL;
        spdl__store32(&p->hand->keeps, 1);
        for (int epoch = 0; epoch < 14; ++epoch) {
            CHECK_EQ(SPDL_NEXT(p, &it, SPDL_SECONDS(15)), SPDL_OK);
            if (epoch < 8) CHECK_EQ(it->value, 49 * 25);
            item_free(it);
            CHECK_EQ(SPDL_NEXT(p, &it, SPDL_SECONDS(15)), SPDL_END);
            if (epoch < 8) continue; /* the source was some ahead when keeping began */
            if (epoch == 8) spdl__kept_close(p->hand);
            REQUIRE(p->hand->probe[0].replays);
            cut_after(p, 0, 500000);
        }
        gone(p);
    }
}

/* --- a whole examination --- */

/* Every number of a report is one, whatever came of it. */
static void check_interval(const spdl_interval *i) {
    CHECK(i->rounds >= 0 && isfinite(i->value) && i->value >= 0);
    CHECK(!i->known || (i->low <= i->value && i->value <= i->high));
}

static void check_number(double number) { CHECK(isfinite(number) && number >= 0); }

static void check_report(const spdl_pipeline *p, const spdl__doctor_report *r, bool ended) {
    CHECK_EQ(r->verdict[0] != '\0', ended);
    CHECK_EQ(r->row_count, p->count);
    CHECK(r->finding.stage >= -1 && r->finding.stage < p->count);
    CHECK(r->finding.limit <= SPDL_LIMIT_FOREIGN);
    CHECK(r->dropped >= 0 && r->dropped <= r->rounds);
    check_number(r->seconds), check_number(r->cores), check_number(r->cores_used);
    check_number(r->others_used), check_number(r->step_ns), check_number(r->today);
    check_number(r->ceiling), check_number(r->waiting);
    CHECK(!r->kept || (r->tried && r->measured.low > 1));
    check_interval(&r->same), check_interval(&r->cached), check_interval(&r->measured);
    for (int i = 0; i < r->row_count; ++i) {
        const spdl__doctor_row *row = &r->row[i];
        if (ended && r->rounds > 0) CHECK_EQ(row->kind, p->node[i].row.kind);
        if (ended && r->rounds > 0) CHECK(row->concurrency > 0 && row->name[0] != '\0');
        check_number(row->mean_ns), check_number(row->cpu_ns), check_number(row->runnable_ns);
        check_number(row->load), check_number(row->blocked_ns), check_number(row->delay_ns);
        check_interval(&row->replayed), check_interval(&row->asleep);
    }
}

/* Takes items until the doctor is done, or they end. */
static spdl_result examined(spdl_pipeline *p, audit *a) {
    spdl_result result = SPDL_OK;
    const uint64_t start = spdl_time_ns();
    while (result == SPDL_OK && p->doctor->phase != SPDL__DOCTOR_DONE) {
        void *taken;
        result = spdl_pipeline_next(p, &taken, SPDL_SECONDS(15));
        if (result == SPDL_OK) audit_taken(a, taken, false);
        if (!CHECK(spdl_time_ns() - start < 60000000000u)) break;
    }
    check_report(p, &p->doctor->report, result == SPDL_OK);
    return result;
}

/* With windows of all kinds as the doctor itself draws them. */
static void an_examination_changes_no_item(void) {
    source_sleeps = 20;
    for (int round = 0; round < 2 * SHAPES; ++round) {
        const int number = round % SHAPES;
        audit a = audit_of(number, test_seed());
        spdl_doctor_desc doctor = { .seconds = number == 2 ? 1.2 : 0.05, .quiet = true };
        spdl_pipeline *p;
        doctor.replay = round < SHAPES;
        doctor.raise = round % 2;
        p = shape(number, &doctor, many[(number + round / SHAPES) % 4], -1, 2);
        CHECK_EQ(examined(p, &a), SPDL_OK);
        if (!doctor.replay) CHECK_EQ(a.kept, 0);
        gone(p);
    }
}

typedef struct lesson {
    long steps, sum;
    long wait_us;
} lesson;

static void learn(void *ctx, void *taken) {
    lesson *l = (lesson *)ctx;
    const item *it = (const item *)taken;
    CHECK_EQ(it->magic, ALIVE);
    ++l->steps;
    l->sum += value_of(it) & NUMBER;
    sleep_us(l->wait_us);
}

static spdl_result lead(spdl_pipeline *p, lesson *l, spdl__doctor_report *report) {
    const spdl_result result = spdl_doctor_run(p, learn, l);
    *report = p->doctor->report;
    return result;
}

/* spdl_doctor_run starts over when the items end, and frees what it takes. */
static void it_runs_a_loop(void) {
    static spdl__doctor_report report;
    goes_back = true;
    for (int round = 0; round < 8; ++round) {
        const spdl_doctor_desc doctor = { .seconds = 0.1, .quiet = true, .replay = round < 4 };
        lesson l = { .wait_us = 20 };
        spdl_pipeline *p = shape(round < 4 ? 2 : 13, &doctor, many[round % 4], 5, 2);
        CHECK_EQ(lead(p, &l, &report), SPDL_OK);
        CHECK(l.steps > 5);
        check_report(p, &report, true);
        CHECK_EQ(report.replays, round < 4);
        for (int i = 0; round >= 4 && i < p->count; ++i) { /* each row has its function again */
            const spdl__probe *probe = &p->hand->probe[i];
            if (probe->fn != NULL) CHECK(probe->call.call == probe->fn->call);
        }
        l.steps = 0;
        CHECK_EQ(spdl_doctor_run(p, learn, &l), SPDL_OK); /* it is done already */
        CHECK_EQ(l.steps, 0);
        gone(p);
    }
}

/* An epoch is no end. */
static void it_runs_over_epochs(void) {
    static spdl__doctor_report report;
    const spdl_doctor_desc doctor = { .seconds = 0.05, .quiet = true };
    lesson l = { .wait_us = 20 };
    spdl_pipeline *p = EXAMINE(&doctor, 2, CONTINUOUS(.count = 5), SPDL_SINK(2));
    CHECK_EQ(lead(p, &l, &report), SPDL_OK);
    CHECK(l.steps > 5 && report.verdict[0] != '\0');
    gone(p);
}

/* Arms for as many rows as there is place, the busiest first; deferred calls occupy no worker. */
static void a_ladder_has_sixteen_rungs(void) {
    spdl_stage rows[SPDL_MAX_STAGES];
    spdl_pipeline *p;
    spdl__doctor *d;
    const spdl_stage pipe = SPDL_PIPE(pass_on), later = SPDL_PIPE(in_time, .deferred = true);
    memset(&source, 0, sizeof source);
    rows[0] = (spdl_stage)FROM(NOTHING);
    for (int i = 1; i < 20; ++i) rows[i] = i == 19 ? later : pipe;
    rows[20] = (spdl_stage)SPDL_SINK(1);
    p = examine(&watches, 0, rows, 21);
    d = p->doctor;
    for (int i = 0; i < 20; ++i) d->report.row[i].load = 0.5 + i / 100.0;
    spdl__doctor_ladder(d);
    CHECK_EQ(d->rounds.arms, SPDL__ARMS);
    CHECK_EQ(d->report.row[19].method, SPDL__DOCTOR_NO_METHOD);
    CHECK_EQ(d->report.row[5].method, SPDL__DOCTOR_SLOWED);
    CHECK_EQ(d->report.row[4].method, SPDL__DOCTOR_NO_METHOD);
    for (int i = 0; i < 20; ++i) p->hand->probe[i].replays = 1;
    for (int i = 0; i < 20; ++i) d->report.row[i].method = SPDL__DOCTOR_NO_METHOD;
    spdl__doctor_ladder(d);
    CHECK_EQ(d->rounds.arms, SPDL__ARMS);
    CHECK_EQ(d->report.row[6].method, SPDL__DOCTOR_REPLAYED);
    CHECK_EQ(d->report.row[5].method, SPDL__DOCTOR_NO_METHOD);
    for (int i = 0; i < 20; ++i) p->hand->probe[i].replays = 0;
    d->rounds.round = SPDL__ROUNDS - 1; /* nor are there more rounds */
    d->phase_ns = d->most_ns = UINT64_MAX / 2;
    CHECK(!spdl__doctor_round_ends(d, spdl_time_ns()));
    d->rounds.arms = 0;
    gone(p);
}

/* Rows that nothing has passed yet, and calls that took no time. */
static void rows_without_calls_have_no_times(void) {
    spdl_pipeline *p = EXAMINE(&watches, 0, FROM(NOTHING), LOOK(NOTHING), SPDL_SINK(1));
    spdl__doctor *d = p->doctor;
    spdl__doctor_look(d);
    CHECK(d->report.row[1].mean_ns == 0 && d->settle_items > 0);
    d->seen.stage[1].tasks = 5;
    spdl__doctor_row_look(d, 1);
    CHECK(d->report.row[1].mean_ns == 0);
    d->seen.stage[1].busy_ns = 10;
    spdl__doctor_row_look(d, 1);
    CHECK(d->report.row[1].mean_ns == 2);
    gone(p);
}

static void a_loop_that_cannot_go_on_ends(void) {
    static spdl__doctor_report report;
    const spdl_doctor_desc doctor = { .seconds = 1e9, .quiet = true, .replay = true };
    lesson l = { 0 };
    for (int i = 0; i < 4; ++i) {
        spdl_pipeline *p = shape(2, &doctor, many[i], 0, 2); /* no item at all */
        spdl__store32(&p->hand->keeps, 1);
        CHECK_EQ(lead(p, &l, &report), SPDL_OK);
        CHECK(strstr(report.verdict, "Not known: the items ended") != NULL);
        check_report(p, &report, true);
        gone(p);
        p = EXAMINE(&doctor, many[i], SPDL_SOURCE(count_up, SCRIPT(.count = -1), COPIED),
                    SPDL_PIPE(breaks), SPDL_SINK(2));
        CHECK_EQ(lead(p, &l, &report), SPDL_E_STAGE);
        CHECK_EQ(l.steps, 99);
        check_report(p, &report, true);
        gone(p);
        l.steps = 0;
    }
    for (int i = 1; i < 4; ++i) { /* a source that blocks, and another thread that stops */
        int gate = 0;
        test_thread stopper;
        spdl_pipeline *p = EXAMINE(&doctor, many[i],
                                   SPDL_SOURCE(count_up, SCRIPT(.count = -1, .gate = &gate,
                                                                .gate_at = 5), COPIED),
                                   SPDL_SINK(1));
        stopper = thread_of(stop_it, p);
        sleep_us(1000);
        open_gate(&gate);
        CHECK_EQ(lead(p, &l, &report), SPDL_CLOSED);
        test_join(stopper);
        gone(p);
    }
}

static void it_is_asked_for_what_is_not_there(void) {
    spdl_pipeline *p = START(1, COUNT_TO(3), SPDL_SINK(2));
    CHECK_EQ(spdl_doctor_run(p, learn, NULL), SPDL_E_INVALID);
    CHECK_EQ(spdl_doctor_run(NULL, learn, NULL), SPDL_E_INVALID);
    RUN(p, "0 1 2", SPDL_END);
    p = shape(0, &watches, 1, 3, 2);
    CHECK_EQ(spdl_doctor_run(p, NULL, NULL), SPDL_E_INVALID);
    check_report(p, &p->doctor->report, false);
    CHECK_EQ(take_from(p, 0, 1000, SPDL_END), 3);
    gone(p);
}

/* The numbers of workers that an .init gets are those of the desc, also with `raise`: programs have
   a table of `workers` for them. */
static int inits, finis;

static spdl_result comes(void *ctx, int worker, void **local) {
    CHECK(worker >= 0 && worker < (*(const int *)ctx ? *(const int *)ctx : 1));
    *local = ctx;
    __atomic_add_fetch(&inits, 1, __ATOMIC_RELAXED);
    return SPDL_OK;
}

static void goes(void *ctx, int worker, void *local) {
    (void)worker;
    CHECK(local == ctx);
    __atomic_add_fetch(&finis, 1, __ATOMIC_RELAXED);
}

static void workers_come_and_go(void) {
    for (int i = 0; i < 8; ++i) {
        int workers = many[i % 4];
        spdl_doctor_desc doctor = watches;
        audit a = audit_of(0, test_seed());
        spdl_pipeline *p;
        spdl_stats *stats = (spdl_stats *)malloc(sizeof *stats);
        REQUIRE(stats != NULL);
        doctor.raise = i < 4;
        inits = finis = 0;
        memset(&source, 0, sizeof source);
        source.count = 300;
        p = EXAMINE(&doctor, workers, FROM(NOTHING),
                    SPDL_PIPE(pass_on, .ctx = &workers, .init = comes, .fini = goes),
                    SPDL_SINK(2));
        CHECK_EQ(audit_take(&a, p, i % 2 ? 1000 : 100, false), i % 2 ? SPDL_END : SPDL_OK);
        spdl_pipeline_stats(p, stats);
        CHECK_EQ(stats->workers, workers);
        free(stats);
        gone(p);
        CHECK(inits >= 1);
        CHECK(inits <= (workers ? workers : 1));
        CHECK_EQ(finis, inits);
    }
}

/* The most calls of `s` at the same time, while 50 items are taken. */
static int most_calls(spdl_pipeline *p, script *s) {
    __atomic_store_n(&s->most, 0, __ATOMIC_RELAXED);
    for (int i = 0; i < 50; ++i) {
        void *taken;
        REQUIRE(spdl_pipeline_next(p, &taken, SPDL_SECONDS(15)) == SPDL_OK);
        item_free(taken);
    }
    return __atomic_load_n(&s->most, __ATOMIC_RELAXED);
}

/* Settings are in force while they are tried: spare workers work then, and rest else. */
static void spare_workers_work_when_they_are_tried(void) {
    static const struct { int calls, workers, most; } tries[] = {
        { 4, 4, 4 }, { 4, 3, 3 }, { 4, 0, 2 }, { 3, 4, 3 }, { 4, 4, 4 }, { 0, 4, 2 }
    };
    const spdl_doctor_desc doctor = { .seconds = 1e9, .quiet = true, .raise = true };
    script slow = { .sleep_us = 200 };
    spdl_pipeline *p = EXAMINE(&doctor, 2, SPDL_SOURCE(count_up, SCRIPT(.count = -1), COPIED),
                               SPDL_PIPE(follow, .ctx = &slow, .concurrency = 2), SPDL_SINK(8));
    CHECK_EQ(p->spare, 2);
    CHECK(most_calls(p, &slow) <= 2);
    p->doctor->seen.workers = 2;
    for (size_t i = 0; i < sizeof tries / sizeof tries[0]; ++i) {
        const spdl__arm settings = { SPDL__ARM_SETTINGS, -1, 0, NULL };
        const uint64_t begun = spdl_time_ns();
        p->doctor->found.is.stage = 1;
        p->doctor->found.is.concurrency[1] = tries[i].calls;
        p->doctor->found.is.workers = tries[i].workers;
        spdl__doctor_set(p->doctor, &settings);
        while (most_calls(p, &slow) != tries[i].most) /* calls of before end; threads come late */
            REQUIRE(spdl_time_ns() - begun < 15000000000u);
    }
    gone(p);
}

/* A trial of 4 calls and 4 workers, in place of 2, has come to so many times as many items. */
static void trial_ends(spdl__doctor *d, double measured) {
    d->report.row[1].concurrency = d->seen.workers = 2;
    d->found.is.stage = 1;
    d->found.is.concurrency[1] = d->found.is.workers = 4;
    d->found.is.gain = 2;
    d->arm[2].result = &d->report.measured;
    d->rounds.arms = 3;
    d->rounds.round = SPDL__ROUNDS_LEAST;
    for (int i = 0; i < SPDL__ROUNDS_LEAST; ++i)
        for (int k = 0; k < 3; ++k) {
            d->rounds.ns[k][i] = 1e9;
            d->rounds.items[k][i] = k == 2 ? 100 * measured : 100;
        }
    d->phase = SPDL__DOCTOR_TRIAL;
    spdl__doctor_goes_on(d);
    CHECK_EQ(d->phase, SPDL__DOCTOR_DONE);
}

/* What the doctor has left is what the statistics count, and what they say of the row. */
static void statistics_know_how_it_ended(void) {
    const spdl_doctor_desc doctor = { .seconds = 1e9, .quiet = true, .raise = true };
    spdl_stats *stats = (spdl_stats *)malloc(sizeof *stats);
    REQUIRE(stats != NULL);
    for (int helps = 0; helps < 2; ++helps) {
        const int now = helps ? 4 : 2;
        script slow = { .sleep_us = 200 };
        spdl_pipeline *p =
            EXAMINE(&doctor, 2, SPDL_SOURCE(count_up, SCRIPT(.count = -1), COPIED),
                    SPDL_PIPE(follow, .ctx = &slow, .concurrency = 2), SPDL_SINK(8));
        const uint64_t begun = spdl_time_ns();
        trial_ends(p->doctor, helps ? 1.9 : 1);
        while (most_calls(p, &slow) != now) REQUIRE(spdl_time_ns() - begun < 15000000000u);
        spdl_pipeline_stats(p, stats);
        CHECK_EQ(stats->workers, now);
        CHECK_EQ(stats->stage[1].concurrency, now);
        CHECK_EQ(stats->stage[1].lock_found, !helps);
        CHECK_EQ(spdl_pipeline_set_concurrency(p, 1, 1), SPDL_OK); /* other settings */
        spdl_pipeline_stats(p, stats);
        CHECK(!stats->stage[1].lock_found);
        gone(p);
    }
    free(stats);
}

/* --- SPDL_DOCTOR --- */

static char logged[4096];
static int warnings;

static void note_log(spdl_log_level level, const char *text, void *user) {
    (void)user;
    if (level != SPDL_LOG_WARN) return;
    ++warnings;
    snprintf(logged, sizeof logged, "%s", text);
}

/* A pipeline whose desc has none; whether it got one. */
static bool asked(const char *value, spdl__doctor_plan *plan) {
    spdl_pipeline_desc desc = { 0 };
    spdl_pipeline *p = NULL;
    bool has;
    if (value != NULL) test_setenv("SPDL_DOCTOR", value);
    else test_setenv("SPDL_DOCTOR", NULL);
    warnings = 0;
    desc.workers = 1;
    desc.logger.log_fn = note_log;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(COUNT_TO(5), SPDL_SINK(2))) == SPDL_OK);
    has = p->doctor != NULL;
    if (has) p->doctor->plan.desc.quiet = true;
    if (has && plan != NULL) *plan = p->doctor->plan;
    CHECK_EQ(take_from(p, 0, 1000, SPDL_END), 5);
    DONE(p);
    test_setenv("SPDL_DOCTOR", NULL);
    return has;
}

static void the_environment_asks_for_it(void) {
    static spdl__doctor_plan plan;
    static const char *const wrong[] = { "yes", "-1", "1,2x", "1,", "1,steps=9",
                                         "1000000", "replay,,raise",
                                         "1,REPLAY", "1e3", "0,replay", "1,html",
                                         "1,cold" };
    CHECK(!asked(NULL, NULL));
    CHECK(!asked("", NULL) && !asked("0", NULL));
    CHECK_EQ(warnings, 0);
    CHECK(asked("1", &plan));
    CHECK(plan.desc.seconds == 30 && !plan.desc.replay && !plan.desc.raise);
    CHECK(asked("2.5", &plan));
    CHECK(plan.desc.seconds == 2.5);
    CHECK(asked("20,replay,raise", &plan));
    CHECK(plan.desc.seconds == 20 && plan.desc.replay && plan.desc.raise);
    CHECK(asked("replay", &plan));
    CHECK(plan.desc.seconds == 30 && plan.desc.replay);
    CHECK_EQ(warnings, 0);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; ++i) {
        if (!CHECK(!asked(wrong[i], NULL))) fprintf(stderr, "\"%s\"\n", wrong[i]);
        CHECK_EQ(warnings, 1);
        CHECK(strstr(logged, "SPDL_DOCTOR") != NULL && strstr(logged, "no doctor") != NULL);
    }
}

/* Whether the file is there and has the text. */
static bool file_has(const char *path, const char *text) {
    static char bytes[1 << 20];
    FILE *file = fopen(path, "rb");
    size_t count;
    if (file == NULL) return false;
    count = fread(bytes, 1, sizeof bytes - 1, file);
    bytes[count] = '\0';
    fclose(file);
    return strstr(bytes, text) != NULL;
}

/* SPDL_REPORT names the file: a line for each pipeline. */
static void reports_go_to_the_file(void) {
    char folder[64], path[128];
    test_folder(folder, sizeof folder);
    snprintf(path, sizeof path, "%s/d.jsonl", folder);
    test_setenv("SPDL_REPORT", path);
    for (int i = 0; i < 2; ++i) CHECK(asked("1", NULL));
    CHECK_EQ(warnings, 0);
    CHECK(file_has(path, "{\"schema\":\"spdl.doctor.1\",\"version\":\""));
    CHECK(file_has(path, "}\n{\"schema\":\"spdl.stats.1\"")); /* no byte too many */
    CHECK_EQ(remove(path), 0);
    CHECK_EQ(rmdir(folder), 0);
    CHECK(asked("1", NULL));
    CHECK(warnings >= 1 && strstr(logged, "d.jsonl") != NULL);
    test_setenv("SPDL_REPORT", NULL);
}

/* What a row says is a hard bound without `raise`, and where it is .serial or .again. */
static void bounds_are_kept(void) {
    static const int says[] = { 0, 1, 2, 3 }, raised[] = { 4, 4, 4, 6 };
    for (int i = 0; i < 12; ++i) {
        const bool serial = i > 7;
        spdl_doctor_desc doctor = watches;
        spdl_pipeline *p;
        memset(&source, 0, sizeof source);
        source.count = 3;
        doctor.raise = i > 3;
        p = EXAMINE(&doctor, 4, FROM(NOTHING),
                    LOOK(.concurrency = serial ? i % 2 : says[i % 4], .serial = serial),
                    TWICE(.concurrency = 3, .output_order = SPDL_ORDER_COMPLETION), SPDL_SINK(2));
        CHECK_EQ(p->node[1].most, serial         ? 1
                                  : doctor.raise ? raised[i % 4]
                                  : says[i % 4]  ? says[i % 4] : 1);
        CHECK_EQ(p->node[2].most, 3);
        CHECK_EQ(p->spare, doctor.raise ? 4 : 0);
        CHECK_EQ(spdl_pipeline_set_concurrency(p, 1, 4), SPDL_E_LIMIT); /* whoever else sets it */
        gone(p);
    }
}

/* It says what it does on stderr, and the log that it cannot. */
static void stderr_may_be_closed(void) {
    const spdl_doctor_desc doctor = { .seconds = 0.02 };
    spdl_pipeline_desc desc = { .workers = 1, .doctor = &doctor };
    const int before = dup(2);
    spdl_pipeline *p;
    desc.logger.log_fn = note_log;
    warnings = 0;
    memset(&source, 0, sizeof source);
    source.count = -1;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(FROM(NOTHING), SPDL_SINK(2))) == SPDL_OK);
    close(2);
    while (p->doctor->phase != SPDL__DOCTOR_DONE) {
        item *it = NULL;
        if (SPDL_NEXT(p, &it, SPDL_SECONDS(15)) != SPDL_OK) break;
        item_free(it);
    }
    dup2(before, 2);
    close(before);
    CHECK_EQ(warnings, 1);
    CHECK(strstr(logged, "doctor: no report in stderr: ") != NULL);
    DONE(p);
}

/* `raise` asks for no more than there may be, and leaves what is there. */
static void bounds_of_the_library_are_kept(void) {
    const spdl_doctor_desc doctor = { .seconds = 1e9, .quiet = true, .raise = true };
    spdl_pipeline_desc desc = { .workers = 129, .next_works_ns = -1, .doctor = &doctor };
    spdl_pipeline *p;
    memset(&source, 0, sizeof source);
    source.count = 3;
    p = EXAMINE(&doctor, 2, FROM(NOTHING), LOOK(.concurrency = 300), LOOK(.concurrency = 200),
                SPDL_SINK(2));
    CHECK_EQ(p->node[1].most, 300);
    CHECK_EQ(p->node[2].most, 256);
    gone(p);
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(FROM(NOTHING), SPDL_SINK(2))) == SPDL_OK);
    CHECK_EQ(p->spare, 126);
    DONE(p);
}

TEST_TABLE(doctor) {
    TEST_CASE(delays_change_no_item),
    TEST_CASE(nothing_is_replayed_where_there_are_several_ways),
    TEST_CASE(there_is_none_where_items_are_pushed),
    TEST_CASE(all_come_once_among_those_that_were_kept),
    TEST_CASE(epochs_keep_their_items),
    TEST_CASE(it_is_left_at_any_point),
    TEST_CASE(errors_come_as_they_would),
    TEST_CASE(one_item_is_no_sample),
    TEST_CASE(tokens_take_no_place),
    TEST_CASE(tokens_pass_a_batch),
    TEST_CASE(what_cannot_be_kept_is_not_replayed),
    TEST_CASE(inputs_and_failures_are_not_kept),
    TEST_CASE(tokens_without_memory_are_nothing),
    TEST_CASE(copies_that_fail_are_nothing),
    TEST_CASE(copies_are_freed_by_the_row_that_made_them),
    TEST_CASE(a_cut_ends_by_itself),
    TEST_CASE(an_examination_changes_no_item),
    TEST_CASE(it_runs_a_loop),
    TEST_CASE(it_runs_over_epochs),
    TEST_CASE(a_ladder_has_sixteen_rungs),
    TEST_CASE(rows_without_calls_have_no_times),
    TEST_CASE(a_loop_that_cannot_go_on_ends),
    TEST_CASE(it_is_asked_for_what_is_not_there),
    TEST_CASE(workers_come_and_go),
    TEST_CASE(spare_workers_work_when_they_are_tried),
    TEST_CASE(statistics_know_how_it_ended),
    TEST_CASE(the_environment_asks_for_it),
    TEST_CASE(reports_go_to_the_file),
    TEST_CASE(stderr_may_be_closed),
    TEST_CASE(bounds_are_kept),
    TEST_CASE(bounds_of_the_library_are_kept),
    TEST_END,
};
