/* A run that was interrupted at any point, and goes on from a saved position in a pipeline of its
   own, delivers what it would have delivered: item by item where the order is always the same, else
   nothing twice and nothing never. */
#include "flow.h"

/* --- what is delivered --- */

/* What the trainer got, one line for each item, batch, or end of an epoch. */
enum { EVENTS = 160, EPOCHS = 3 };

typedef struct story {
    char line[EVENTS][96];
    size_t count;
    spdl_result ended; /* SPDL_OK: it goes on */
} story;

static void tell_batch(char *line, size_t bytes, const spdl_batch *batch) {
    size_t at = (size_t)snprintf(line, bytes, "%llu:", (unsigned long long)batch->sequence);
    for (size_t i = 0; i < batch->count && at < bytes; ++i)
        at += (size_t)snprintf(line + at, bytes - at, " %ld",
                               batch->items[i] ? ((item *)batch->items[i])->value : -1);
}

typedef enum yields { ITEMS, BATCHES, BATCHES_OF_BATCHES } yields;

static void tell(char *line, size_t bytes, void *taken, yields what) {
    if (what == ITEMS) {
        (void)snprintf(line, bytes, "%ld", ((item *)taken)->value);
        item_free(taken);
    } else if (what == BATCHES) {
        tell_batch(line, bytes, (spdl_batch *)taken);
        spdl_batch_free(taken);
    } else {
        spdl_batch *all = (spdl_batch *)taken;
        size_t at = (size_t)snprintf(line, bytes, "%llu{", (unsigned long long)all->sequence);
        for (size_t i = 0; i < all->count; ++i) {
            tell_batch(line + at, bytes - at, (spdl_batch *)all->items[i]);
            at += strlen(line + at);
        }
        spdl_batch_free(taken);
    }
}

/* Takes `most` lines more, up to the end of all, or of EPOCHS of them. */
static void listen(spdl_pipeline *p, story *s, size_t most, yields what, bool continuous) {
    size_t ends = 0;
    for (size_t i = 0; i < s->count; ++i) ends += s->line[i][0] == 'E';
    while (most-- > 0 && s->ended == SPDL_OK && s->count < EVENTS) {
        void *taken = NULL;
        char *line = s->line[s->count];
        const spdl_result result = spdl_pipeline_next(p, &taken, SPDL_SECONDS(15));
        if (result == SPDL_OK) {
            tell(line, sizeof s->line[0], taken, what);
        } else {
            (void)snprintf(line, sizeof s->line[0], "END %s", spdl_result_text(result));
            if (!continuous || result != SPDL_END || ++ends == EPOCHS) s->ended = result;
        }
        ++s->count;
    }
}

/* --- stages whose results are a function of their inputs --- */

static long many_epochs; /* 1: sources are continuous */

/* An epoch has `length` items and one more for each epoch before; none in epoch 1 if it is 1. */
SPDL_FN(numbers, void, item) {
    const long length = (long)(uintptr_t)spdl_ctx(task);
    const uint64_t k = spdl_sequence(task), epoch = spdl_epoch(task);
    if (k >= (uint64_t)length + (length == 1 ? 0 : epoch) || (length == 1 && epoch == 1))
        return SPDL_END;
    *out = item_make((long)(epoch * 1000 + k));
    return SPDL_OK;
}

/* Changes with epoch and number: what a resumed run has to restore. */
SPDL_FN(shake, item, item) {
    in->value = in->value * 100 + (long)((spdl_sequence(task) * 7 + spdl_epoch(task)) % 97);
    *out = in;
    return SPDL_OK;
}

SPDL_FN(slow_shake, item, item) {
    sleep_us(in->value % 3 == 0 ? 100 : 0);
    return shake(task, in, out);
}

SPDL_FN(most_of_them, item, item) {
    *out = in;
    return in->value % 10 % 3 == 1 ? SPDL_SKIP : SPDL_OK;
}

SPDL_FN(fails_at_times, item, item) {
    *out = in;
    return in->value % 10 % 4 == 2 ? spdl_fail(task, "no %ld", in->value) : SPDL_OK;
}

/* None to three of each. */
SPDL_FN(some_of_each, item, item) {
    for (long k = 0; k < in->value % 4; ++k)
        CHECK_EQ(spdl_emit(task, item_make(in->value * 10 + k)), SPDL_OK);
    return SPDL_OK;
}

/* One to three of each, by SPDL_AGAIN. */
SPDL_FN(one_by_one, item, item) {
    long **at = (long **)spdl_state(task);
    if (*at == NULL) *at = (long *)calloc(1, sizeof **at);
    *out = item_make(in->value * 10 + **at);
    return (*at)[0]++ == in->value % 3 ? SPDL_OK : SPDL_AGAIN;
}

/* Packs: sums of values up to a limit, whole ones. */
typedef struct pack {
    long sum, limit;
    bool says; /* when it holds nothing of what came before */
    bool held; /* written when a call saw the first item of a run: for a fresh run it has to be */
} pack;

SPDL_FN(packs, item, item) {
    pack *held = (pack *)spdl_ctx(task);
    const long sum = held->sum, value = in ? in->value % 100 + 1 : 0;
    if (spdl_flushing(task)) {
        held->sum = 0;
        if (sum) *out = item_make(sum);
        return sum ? SPDL_OK : SPDL_SKIP;
    }
    held->sum += value;
    if (held->sum <= held->limit) {
        if (sum == 0 && held->says) spdl_gathered(task, true);
        return SPDL_SKIP;
    }
    held->sum = value;
    if (held->says) spdl_gathered(task, true);
    if (sum == 0) return SPDL_SKIP;
    *out = item_make(sum);
    return SPDL_OK;
}

SPDL_FN(by_three, item, item) {
    *out = in;
    return spdl_route(task, (int)(in->value % 3));
}

SPDL_FN(odd_and_even, spdl_batch, spdl_batch) {
    int path[16];
    for (size_t i = 0; i < in->count; ++i)
        path[i] = in->items[i] ? (int)(((item *)in->items[i])->value / 100 % 2) : 0;
    *out = in;
    return spdl_route_items(task, path);
}

/* A batch becomes another one, or none. */
SPDL_FN(most_batches, spdl_batch, spdl_batch) {
    *out = in;
    return spdl_sequence(task) % 3 == 1 ? SPDL_SKIP : SPDL_OK;
}

SPDL_FN(sums, spdl_batch, item) {
    *out = item_make((long)spdl_sequence(task) * 100000);
    for (size_t i = 0; i < in->count; ++i)
        (*out)->value += in->items[i] ? ((item *)in->items[i])->value : 0;
    return SPDL_OK;
}

SPDL_FN(sums_twice, spdl_batch, item) {
    for (long k = 0; k < 2; ++k) {
        item *sum = item_make((long)spdl_sequence(task) * 100000 + k);
        CHECK_EQ(spdl_emit(task, sum), SPDL_OK);
    }
    (void)in;
    return SPDL_OK;
}

SPDL_FN(in_place, void, item) {
    const uint64_t k = spdl_sequence(task), epoch = spdl_epoch(task);
    item *it;
    if (k >= 10 + epoch) return SPDL_END;
    if ((it = (item *)spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    it->magic = ALIVE;
    it->value = (long)(epoch * 1000 + k);
    *out = it;
    return SPDL_OK;
}

SPDL_FN(in_place_from, item, item) {
    item *it = (item *)spdl_buffer(task);
    if (it == NULL) return SPDL_E_NOMEM;
    it->magic = ALIVE;
    it->value = in->value * 100 + (long)spdl_epoch(task);
    *out = it;
    return in->value % 5 == 3 ? SPDL_SKIP : SPDL_OK;
}

/* --- tables --- */

static pack held, held_too;

#define FROM(n)                                                                                    \
    SPDL_SOURCE(numbers, .ctx = (void *)(uintptr_t)(n), .continuous = many_epochs,                \
                .free_item = item_free)
#define EMITS(...) SPDL_PIPE(some_of_each, .emits = 3, .free_item = item_free, __VA_ARGS__)
#define AGAIN(...)                                                                                 \
    SPDL_PIPE(one_by_one, .again = true, .free_item = item_free, .free_state = free,               \
              __VA_ARGS__)
#define PACKS(...) SPDL_PIPE(packs, .flush = true, .free_item = item_free, .ctx = __VA_ARGS__)

enum { TABLES = 29 };

static yields yields_of(int table) {
    switch (table) {
    case 8: case 9: case 10: case 11: case 12: case 14: case 15: case 16: case 17: case 27:
    case 28:
        return BATCHES;
    case 21: return BATCHES_OF_BATCHES;
    default: return ITEMS;
    }
}

static spdl_pipeline *open_table(int table, int workers) {
    memset(&held, 0, sizeof held);
    memset(&held_too, 0, sizeof held_too);
    held.limit = 9;
    held_too.limit = 25;
    held.says = table == 7 || table == 27;
    switch (table) {
    case 0: return START(workers, FROM(10), SPDL_SINK(3));
    case 1:
        return START(workers, FROM(10), SPDL_PIPE(slow_shake, .concurrency = 4), SPDL_SINK(3));
    case 2:
        return START(workers, FROM(10), SPDL_PIPE(most_of_them, .concurrency = 3),
                     SPDL_PIPE(fails_at_times, .max_failures = -1, .concurrency = 2),
                     SPDL_PIPE(shake), SPDL_SINK(3));
    case 3: return START(workers, FROM(6), EMITS(.concurrency = 3), SPDL_SINK(3));
    case 4:
        return START(workers, FROM(6), AGAIN(.concurrency = 3), SPDL_PIPE(most_of_them),
                     SPDL_SINK(2));
    case 5:
        return START(workers, FROM(5), AGAIN(.buffer_size = 1), EMITS(.concurrency = 1),
                     SPDL_SINK(4));
    case 6: return START(workers, FROM(12), PACKS(&held), SPDL_SINK(2));
    case 7: return START(workers, FROM(12), PACKS(&held), SPDL_PIPE(shake), SPDL_SINK(2));
    case 8:
        return START(workers, FROM(10), SPDL_PIPE(slow_shake, .concurrency = 4), SPDL_BATCH(3),
                     SPDL_SINK(2));
    case 9:
        return START(workers, FROM(10), SPDL_PIPE(most_of_them, .concurrency = 3),
                     SPDL_BATCH(3, .drop_last = true), SPDL_PIPE(pass_batch, .concurrency = 2),
                     SPDL_SINK(2));
    case 10: return START(workers, FROM(7), EMITS(.concurrency = 2), SPDL_BATCH(4), SPDL_SINK(2));
    case 11:
        return START(workers, FROM(7), AGAIN(.concurrency = 2), SPDL_BATCH(2),
                     SPDL_PIPE(most_batches, .concurrency = 2), SPDL_SINK(2));
    case 12: return START(workers, FROM(12), PACKS(&held), SPDL_BATCH(2), SPDL_SINK(2));
    case 13:
        return START(workers, FROM(11), SPDL_BATCH(3),
                     SPDL_PIPE(sums, .free_item = item_free, .concurrency = 3), SPDL_SINK(2));
    case 14:
        return START(workers,
                     SPDL_SOURCE(in_place, .continuous = many_epochs),
                     SPDL_BATCH(4, .item_bytes = sizeof(item)), SPDL_SINK(2));
    case 15:
        return START(workers, FROM(11), SPDL_PIPE(in_place_from, .concurrency = 3),
                     SPDL_BATCH(4, .item_bytes = sizeof(item)), SPDL_SINK(2));
    case 16:
        return START(workers, FROM(7), EMITS(.concurrency = 2),
                     SPDL_PIPE(in_place_from, .concurrency = 2),
                     SPDL_BATCH(3, .item_bytes = sizeof(item), .drop_last = true), SPDL_SINK(2));
    case 17:
        return START(workers, FROM(12), SPDL_BATCH(4), SPDL_BRANCH(odd_and_even), SPDL_PATH("odd"),
                     SPDL_PIPE(pass_batch, .concurrency = 2), SPDL_PATH("even"),
                     SPDL_MERGE(.merge_order = SPDL_MERGE_BATCHES), SPDL_SINK(2));
    case 18:
        return START(workers, FROM(12), SPDL_BRANCH(by_three), SPDL_PATH("a"), SPDL_PATH("b"),
                     SPDL_PIPE(shake), SPDL_PATH("c"),
                     SPDL_MERGE(.merge_order = SPDL_MERGE_ROBIN), SPDL_SINK(2));
    case 19:
        return START(workers, FROM(11), SPDL_BATCH(4), SPDL_UNBATCH(), SPDL_PIPE(shake),
                     SPDL_SINK(2));
    case 20:
        return START(workers, FROM(11), SPDL_PIPE(most_of_them), SPDL_BATCH(2),
                     SPDL_PIPE(sums_twice, .emits = 2, .free_item = item_free), SPDL_SINK(2));
    case 21:
        return START(workers, FROM(13), SPDL_BATCH(3), SPDL_BATCH(2), SPDL_SINK(2));
    case 22:
        return START(workers, SPDL_PATH("a"), FROM(8), SPDL_PATH("b"), FROM(4),
                     SPDL_MERGE(.merge_order = SPDL_MERGE_ROBIN), SPDL_PIPE(shake), SPDL_SINK(2));
    case 23:
        return START(workers, SPDL_PATH("a", .weight = 3), FROM(8), SPDL_PATH("b", .weight = 1),
                     FROM(4), SPDL_MERGE(.merge_order = SPDL_MERGE_WEIGHTED), SPDL_SINK(2));
    case 24:
        return START(workers, FROM(12), SPDL_BATCH(2),
                     SPDL_PIPE(sums, .free_item = item_free), PACKS(&held_too), SPDL_SINK(2));
    case 25: return START(workers, FROM(1), PACKS(&held), SPDL_SINK(2));
    case 26:
        return START(workers, FROM(12), PACKS(&held), EMITS(.concurrency = 1), PACKS(&held_too),
                     SPDL_SINK(2));
    case 27: return START(workers, FROM(14), PACKS(&held), SPDL_BATCH(2), SPDL_SINK(2));
    default:
        return START(workers, FROM(1), SPDL_BATCH(2), SPDL_PIPE(pass_batch), SPDL_SINK(2));
    }
}

/* --- the same as if it had not been interrupted --- */

static void same_from(const story *whole, const story *part, size_t from, int table, int workers) {
    for (size_t i = 0; i < part->count && from + i < whole->count; ++i)
        if (strcmp(whole->line[from + i], part->line[i]) != 0) {
            CHECK_STR(part->line[i], whole->line[from + i]);
            (void)printf("    table %d, %d workers, left after %zu, item %zu after it\n", table,
                         workers, from, i);
            return;
        }
    if (from + part->count != whole->count)
        (void)printf("    table %d, %d workers, left after %zu\n", table, workers, from);
    CHECK_EQ(from + part->count, whole->count);
}

/* The line; a second one is the same. */
static void save(const spdl_pipeline *p, char *text) {
    char again[SPDL_STATE_BYTES];
    const int length = spdl_state_save(p, text, SPDL_STATE_BYTES);
    if (!CHECK(length > 0)) (void)printf("    %s\n", text);
    CHECK_EQ(length, strlen(text));
    CHECK(spdl_state_save(p, again, sizeof again) > 0);
    CHECK_STR(again, text);
}

/* And what is saved again before anything was taken. */
static void load(spdl_pipeline *p, const char *text) {
    char again[SPDL_STATE_BYTES];
    spdl_error error = { .text = "" };
    CHECK_EQ(spdl_state_load(p, &text, 1, SPDL_SECONDS(15), &error), SPDL_OK);
    CHECK_STR(error.text, "");
    save(p, again);
    CHECK_STR(again, text);
}

/* Left after `k` lines, and gone on with in another pipeline, or in this one when it has run on. */
static void it_goes_on_from(int table, int from_workers, int workers, const story *whole, size_t k,
                            bool here) {
    static story before, after;
    char text[SPDL_STATE_BYTES];
    spdl_pipeline *p = open_table(table, from_workers);
    size_t epochs = 0;
    memset(&before, 0, sizeof before);
    memset(&after, 0, sizeof after);
    listen(p, &before, k, yields_of(table), many_epochs);
    for (size_t i = 0; i < k; ++i)
        if (before.line[i][0] == 'E') after.line[epochs++][0] = 'E'; /* epochs that are over */
    save(p, text);
    if (here) {
        listen(p, &before, k % 7, yields_of(table), many_epochs);
    } else {
        DONE(p);
        p = open_table(table, workers);
    }
    load(p, text);
    after.count = epochs;
    listen(p, &after, EVENTS, yields_of(table), many_epochs);
    DONE(p);
    memmove(after.line[0], after.line[epochs], (after.count - epochs) * sizeof after.line[0]);
    after.count -= epochs;
    same_from(whole, &after, k, table, workers);
}

static void ordered_tables_go_on(void) {
    static story whole;
    for (many_epochs = 0; many_epochs < 2; ++many_epochs)
        for (int table = 0; table < TABLES; ++table) {
            spdl_pipeline *p = open_table(table, 0);
            memset(&whole, 0, sizeof whole);
            listen(p, &whole, EVENTS, yields_of(table), many_epochs);
            DONE(p);
            /* without epochs the end is what is new */
            for (size_t k = many_epochs ? 0 : whole.count - 2; k + 1 <= whole.count; ++k)
                it_goes_on_from(table, crowds[k % 4], crowds[(k + (size_t)table) / 3 % 4], &whole,
                                k, k % 3 == 2);
        }
}

/* At random points, again and again: each run takes some lines, is killed and gone on from its last
   checkpoint, which may be some lines before. STATE_POINTS says how many kills (1,000 in `make
   torture`). */
static void random_kills_change_nothing(void) {
    static story whole[TABLES], part;
    static size_t known[TABLES];
    const char *wanted = getenv("STATE_POINTS");
    const long points = wanted != NULL ? atol(wanted) : TEST_SANITIZED ? 20 : 60;
    uint64_t state = test_seed();
    chaos_on();
    many_epochs = 1;
    for (long i = 0; i < points;) {
        const int table = (int)(test_random(&state) % TABLES);
        char text[SPDL_STATE_BYTES] = "";
        story *all = &whole[table];
        size_t saved = 0;
        if (known[table]++ == 0) {
            spdl_pipeline *p = open_table(table, 0);
            listen(p, all, EVENTS, yields_of(table), true);
            DONE(p);
        }
        memset(&part, 0, sizeof part);
        while (part.count < all->count) {
            spdl_pipeline *p = open_table(table, (int)(test_random(&state) % 17));
            if (text[0] != '\0') load(p, text);
            part.count = saved;
            part.ended = SPDL_OK;
            listen(p, &part, test_random(&state) % 23, yields_of(table), true);
            if (part.ended == SPDL_OK && test_random(&state) % 2) {
                save(p, text);
                saved = part.count;
                listen(p, &part, test_random(&state) % 5, yields_of(table), true);
            }
            DONE(p);
            ++i;
        }
        same_from(all, &part, 0, table, -1);
    }
}

SPDL_FN(late_ones, item, item) {
    sleep_us(in->value % 5 == 0 ? 150 : 0);
    *out = in;
    return SPDL_OK;
}

#define COMPLETION .output_order = SPDL_ORDER_COMPLETION

static uint64_t number_in(const char *text, const char *name) {
    const char *at = strstr(text, name);
    return at != NULL ? strtoull(at + strlen(name), NULL, 10) : UINT64_MAX;
}

/* A row with .flush that says when it holds nothing of what came before does not send the source
   back to the beginning. */
static void a_pack_is_all_that_is_made_again(void) {
    for (int says = 0; says < 2; ++says) {
        char text[SPDL_STATE_BYTES];
        spdl_pipeline *p;
        many_epochs = 0;
        memset(&held, 0, sizeof held);
        held.says = says;
        held.limit = 150;
        p = START(2, FROM(90), PACKS(&held), SPDL_BATCH(2), SPDL_SINK(2));
        listen(p, &(story){ .count = 0 }, 12, BATCHES, false);
        save(p, text);
        CHECK(says ? number_in(text, "item=") > 40 : number_in(text, "item=") == 0);
        CHECK_EQ(number_in(text, "results="), says ? 1 : 24);
        DONE(p);
    }
}

/* --- ranks --- */

enum { SHAPES = 6, ALL_OF_THEM = 61, RANKS = 16 };

SPDL_FN(of_index, spdl_index, item) {
    *out = item_make((long)in->position);
    (void)task;
    return SPDL_OK;
}

SPDL_FN(index_and_key, spdl_index, item) {
    *out = (item *)malloc(sizeof **out);
    REQUIRE(*out != NULL);
    (*out)->magic = (uint32_t)in->position;
    (*out)->value = (long)spdl_item_key(task);
    return SPDL_OK;
}

typedef struct rank_run {
    spdl_sampler *sampler, *part[2]; /* parts: of a mixture */
    spdl_mixture *mixture;
    spdl_pipeline *p;
    char text[SPDL_STATE_BYTES];
    int ended; /* epochs */
} rank_run;

#define INDEX(s) SPDL_INDEX(s, .continuous = true)
#define OF_INDEX(...) SPDL_PIPE(of_index, .free_item = item_free, __VA_ARGS__)

static bool shape_of_batches(int shape) { return shape % 5 == 1 || shape == 3 || shape == 4; }

static void rank_open(rank_run *r, int shape, int rank, int world, uint64_t seed) {
    spdl_sampler_desc desc = { .count = ALL_OF_THEM, .order = SPDL_SAMPLE_SHUFFLED, .seed = 5 };
    const int workers = (int)(seed % 3);
    desc.ranks.rank = rank;
    desc.ranks.world = world;
    memset(r, 0, sizeof *r);
    if (shape == 4 || shape == 6) {
        const uint64_t lengths[] = { 20, ALL_OF_THEM - 20 };
        const spdl_mixture_desc mixed = { .sources = 2, .weights = (const double[]){ 1, 2 },
                                          .lengths = lengths, .at_end = SPDL_MIXTURE_GO_ON };
        REQUIRE(spdl_mixture_create(&r->mixture, &mixed) == SPDL_OK);
        for (int i = 0; i < 2; ++i) {
            const spdl_sampler_desc part = { .count = lengths[i], .order = SPDL_SAMPLE_SHUFFLED };
            REQUIRE(spdl_sampler_create(&r->part[i], &part) == SPDL_OK);
        }
        desc.count = 0;
        desc.order = SPDL_SAMPLE_MIXTURE;
        desc.mixture = r->mixture;
        desc.samplers = r->part;
    }
    REQUIRE(spdl_sampler_create(&r->sampler, &desc) == SPDL_OK);
    switch (shape) {
    case 0:
        r->p = START(workers, INDEX(r->sampler), OF_INDEX(.concurrency = 2), SPDL_SINK(2));
        break;
    case 1:
        r->p = START(workers, INDEX(r->sampler), OF_INDEX(.concurrency = 2),
                     SPDL_PIPE(most_of_them, .concurrency = 2), SPDL_BATCH(3), SPDL_SINK(2));
        break;
    case 2:
        r->p = START(workers, INDEX(r->sampler), OF_INDEX(.concurrency = 2),
                     EMITS(.concurrency = 2), SPDL_SINK(3));
        break;
    case 3:
        r->p = START(workers, INDEX(r->sampler), OF_INDEX(.concurrency = 2),
                     EMITS(.concurrency = 2), SPDL_BATCH(4), SPDL_SINK(3));
        break;
    case 4:
        r->p = START(workers, INDEX(r->sampler), OF_INDEX(.concurrency = 2),
                     AGAIN(.concurrency = 2), SPDL_PIPE(most_of_them), SPDL_BATCH(2),
                     SPDL_SINK(2));
        break;
    case 6:
        r->p = START(workers, INDEX(r->sampler), OF_INDEX(.concurrency = 2), SPDL_BATCH(2),
                     SPDL_SINK(2));
        break;
    default:
        r->p = START(workers, INDEX(r->sampler),
                     OF_INDEX(.concurrency = 2), SPDL_BATCH(4), SPDL_UNBATCH(), SPDL_SINK(2));
    }
}

static void rank_close(rank_run *r) {
    spdl_pipeline_destroy(r->p);
    spdl_sampler_destroy(r->sampler);
    for (int i = 0; i < 2; ++i) spdl_sampler_destroy(r->part[i]);
    spdl_mixture_destroy(r->mixture);
}

/* Takes up to `most` items or batches, to the end of the epoch. */
static size_t rank_take(rank_run *r, int shape, long *values, long most) {
    size_t count = 0;
    while (most-- > 0 && r->ended == 0) {
        void *taken = NULL;
        const spdl_result result = spdl_pipeline_next(r->p, &taken, SPDL_SECONDS(15));
        if (result != SPDL_OK) {
            CHECK_EQ(result, SPDL_END);
            ++r->ended;
        } else if (shape_of_batches(shape)) {
            for (size_t i = 0; i < ((spdl_batch *)taken)->count; ++i)
                values[count++] = ((item *)((spdl_batch *)taken)->items[i])->value;
            spdl_batch_free(taken);
        } else {
            values[count++] = ((item *)taken)->value;
            item_free(taken);
        }
    }
    return count;
}

/* All ranks of this world; when there was one before they go on from its texts. */
static void world_open(rank_run *ranks, int shape, int world, rank_run *before, int before_world,
                       uint64_t *state) {
    const char *texts[RANKS];
    for (int i = 0; i < before_world; ++i) texts[before_world - 1 - i] = before[i].text;
    for (int i = 0; i < world; ++i) {
        spdl_error error = { .text = "" };
        char again[SPDL_STATE_BYTES];
        rank_open(&ranks[i], shape, i, world, test_random(state));
        if (before_world == 0) continue;
        CHECK_EQ(spdl_state_load(ranks[i].p, texts, before_world, SPDL_FOREVER, &error), SPDL_OK);
        CHECK_STR(error.text, "");
        save(ranks[i].p, again);
    }
}

/* The seed of an item is the same on any rank. */
static void keys_are_the_same_on_any_rank(void) {
    static uint64_t keys[2][2 * ALL_OF_THEM], found;
    for (int world = 1; world <= 3; world += 2) {
        for (int rank = 0; rank < world; ++rank) {
            spdl_sampler_desc desc = { .count = ALL_OF_THEM, .seed = 5,
                                       .ranks = { .rank = rank, .world = world } };
            spdl_sampler *s = NULL;
            spdl_pipeline *p;
            REQUIRE(spdl_sampler_create(&s, &desc) == SPDL_OK);
            p = START(2, INDEX(s), SPDL_PIPE(index_and_key, .free_item = free,
                                             .concurrency = 2), SPDL_SINK(2));
            for (int epoch = 0; epoch < 2;) {
                item *it = NULL;
                if (SPDL_NEXT(p, &it, SPDL_SECONDS(15)) == SPDL_END) ++epoch;
                else keys[world / 2][epoch * ALL_OF_THEM + (int)it->magic] = (uint64_t)it->value;
                if (it != NULL) free(it);
            }
            spdl_pipeline_destroy(p);
            spdl_sampler_destroy(s);
        }
    }
    for (int i = 0; i < 2 * ALL_OF_THEM; ++i) {
        CHECK_EQ(keys[0][i], keys[1][i]);
        for (int k = 0; k < i; ++k) found += keys[0][i] == keys[0][k];
    }
    CHECK_EQ(found, 0);
}

static void refused_of(spdl_pipeline *p, const char *const *texts, int count, spdl_result result,
                       const char *why) {
    spdl_error error = { .text = "" };
    CHECK_EQ(spdl_state_load(p, texts, count, SPDL_SECONDS(15), &error), result);
    CHECK_STR(error.text, why);
}

static void texts_of_other_ranks_are_refused(void) {
    static rank_run r[3], other;
    const char *texts[] = { r[0].text, r[1].text, r[2].text };
    const char *twice[] = { r[0].text, r[1].text, r[1].text };
    spdl_sampler_desc desc = { .count = 62, .order = SPDL_SAMPLE_SHUFFLED, .seed = 5 };
    spdl_sampler *s = NULL;
    spdl_pipeline *p;
    long value;
    for (int shape = 0; shape < 6; shape += 5) {
        for (int i = 0; i < 3; ++i) {
            rank_open(&r[i], shape, i, 3, 1);
            (void)rank_take(&r[i], shape, &value, 1);
            save(r[i].p, r[i].text);
        }
        rank_open(&other, shape, 0, 2, 1);
        if (shape == 5) {
            refused_of(other.p, texts, 3, SPDL_E_UNSUPPORTED,
                       "spdl: spdl_state_load: text 0 and the others are of 3 ranks that had not "
                       "taken the same number of whole items: another number of ranks goes on from "
                       "where they had, or from the end of an epoch");
            load(r[1].p, r[1].text); /* the same number can */
        } else {
            refused_of(other.p, texts, 1, SPDL_E_INVALID,
                       "spdl: spdl_state_load: text 0 is of rank 0 of 3, this is rank 0 of 2: that "
                       "takes the texts of all 3, not of 1");
            refused_of(r[1].p, texts, 1, SPDL_E_INVALID,
                       "spdl: spdl_state_load: text 0 is of rank 0 of 3, this is rank 1 of 3: that "
                       "takes the texts of all 3, not of 1");
            refused_of(other.p, twice, 3, SPDL_E_INVALID,
                       "spdl: spdl_state_load: text 2 is the second one of rank 1");
            CHECK_EQ(spdl_state_load(r[1].p, texts, 3, SPDL_FOREVER, NULL), SPDL_OK);
            CHECK_EQ(rank_take(&r[1], 0, &value, 1), 1);
            CHECK_EQ(value, 4); /* its own, whatever the others have */
            while (r[2].ended == 0) (void)rank_take(&r[2], 0, &value, 1);
            save(r[2].p, r[2].text);
            refused_of(other.p, texts, 3, SPDL_E_INVALID,
                       "spdl: spdl_state_load: text 2 was not saved in the same epoch as text 0, "
                       "or not by the same run");
            REQUIRE(spdl_sampler_create(&s, &desc) == SPDL_OK);
            p = START(1, INDEX(s), OF_INDEX(.concurrency = 2), SPDL_SINK(2));
            refused_of(p, texts, 3, SPDL_E_INVALID,
                       "spdl: spdl_state_load: text 0 does not fit: count of the sampler is 62, "
                       "that of the saved run was 61; to load it all the same write ours into it "
                       "and end it with sum=none");
            spdl_pipeline_destroy(p);
            spdl_sampler_destroy(s);
        }
        for (int i = 0; i < 3; ++i) rank_close(&r[i]);
        rank_close(&other);
    }
}

/* When all ranks are level the items come in the order that one rank has them in. */
static void level_ranks_keep_the_order(void) {
    static rank_run now[RANKS], then[RANKS];
    uint64_t state = test_seed();
    for (int from = 1; from <= RANKS; ++from)
        for (int to = 1; to <= RANKS; to += TEST_SANITIZED ? 5 : 1) {
            long value, at = 0;
            world_open(then, 0, from, NULL, 0, &state);
            for (int step = 0; step < 2; ++step)
                for (int i = 0; i < from; ++i) {
                    CHECK_EQ(rank_take(&then[i], 0, &value, 1), 1);
                    CHECK_EQ(value, at++);
                }
            for (int i = 0; i < from; ++i) save(then[i].p, then[i].text);
            for (int i = 0; i < from; ++i) rank_close(&then[i]);
            world_open(now, 0, to, then, from, &state);
            for (; at + to <= ALL_OF_THEM;)
                for (int i = 0; i < to; ++i) {
                    CHECK_EQ(rank_take(&now[i], 0, &value, 1), 1);
                    CHECK_EQ(value, at++);
                }
            for (int i = 0; i < to; ++i) rank_close(&now[i]);
        }
}

/* --- what is refused --- */

static void refused(spdl_pipeline *p, const char *text, spdl_result result, const char *why) {
    spdl_error error = { .text = "" };
    char whole[SPDL_TEXT_BYTES];
    (void)snprintf(whole, sizeof whole, "spdl: spdl_state_load: %s", why);
    CHECK_EQ(spdl_state_load(p, &text, 1, SPDL_SECONDS(15), &error), result);
    CHECK_STR(error.text, whole);
    CHECK_EQ(spdl_state_load(p, &text, 1, SPDL_SECONDS(15), NULL), result);
}

/* `from` becomes `to`, and the sum is right, or as said. */
static void edited(char *edit, const char *text, const char *from, const char *to,
                   const char *sum) {
    const char *at = strstr(text, from);
    size_t length;
    if (!CHECK(at != NULL)) return;
    (void)snprintf(edit, SPDL_STATE_BYTES, "%.*s%s%s", (int)(at - text), text, to,
                   at + strlen(from));
    at = strstr(edit, " sum=");
    if (at == NULL) return;
    length = (size_t)(at - edit);
    if (sum == NULL)
        (void)snprintf(edit + length, SPDL_STATE_BYTES - length, " sum=%08x",
                       (unsigned)spdl__state_sum(edit, length));
    else if (sum[0] != '\0')
        (void)snprintf(edit + length, SPDL_STATE_BYTES - length, " sum=%s", sum);
}

static void a_text_that_does_not_fit_is_refused(void) {
    char text[SPDL_STATE_BYTES], edit[SPDL_STATE_BYTES];
    spdl_pipeline *p, *other;
    many_epochs = 0;
    p = open_table(1, 2);
    other = open_table(3, 2);
    save(p, text);
    refused(p, "", SPDL_E_FORMAT, "text 0 is not what spdl_state_save has written");
    refused(p, "{ 'epoch': 3 }", SPDL_E_FORMAT, "text 0 is not what spdl_state_save has written");
    edited(edit, text, "state.1", "state.22", NULL);
    refused(p, edit, SPDL_E_FORMAT, "text 0 is of version 22, this is version 1");
    edited(edit, text, "epoch=0", "epoch=1", "");
    refused(p, edit, SPDL_E_CHECKSUM, "text 0 was changed: its sum does not fit; to load it all "
                                      "the same end it with sum=none");
    edited(edit, text, "epoch=0", "", NULL);
    refused(p, edit, SPDL_E_FORMAT, "text 0 has no 'epoch='");
    edited(edit, text, "item=0", "item=99999999999999999999", NULL);
    refused(p, edit, SPDL_E_FORMAT, "text 0 has a number that cannot be in 'item='");
    edited(edit, text, "item=0", "item=-1", "none");
    refused(p, edit, SPDL_E_FORMAT, "text 0 has a number that cannot be in 'item='");
    edited(edit, text, " data=0", " data=7", NULL);
    refused(p, edit, SPDL_E_INVALID,
            "text 0 is of another data set: data=7, here data=0; to load it all the same take that "
            "out of it and end it with sum=none");
    edited(edit, text, "seed=0", "seed=8", NULL);
    refused(p, edit, SPDL_E_INVALID,
            "text 0 is of a run with another seed: item_seed=8, here item_seed=0; to load it all "
            "the same take that out of it and end it with sum=none");
    (void)spdl_state_save(other, edit, sizeof edit);
    CHECK(spdl_state_load(p, (const char *[]){ edit }, 1, 0, NULL) == SPDL_E_INVALID);
    spdl_pipeline_destroy(other);
    TAKE(p, 3, "0 107 214"); /* it goes on as if nothing had been asked */
    edited(edit, text, "item_seed=0 ", "", "none"); /* all the same */
    CHECK_EQ(spdl_state_load(p, (const char *[]){ edit }, 1, SPDL_FOREVER, NULL), SPDL_OK);
    TAKE(p, 2, "0 107");
    CHECK_EQ(spdl_state_load(p, NULL, 1, 0, NULL), SPDL_E_INVALID);
    CHECK_EQ(spdl_state_load(p, (const char *[]){ text, text }, 2, 0, NULL), SPDL_E_INVALID);
    CHECK_EQ(spdl_state_load(NULL, (const char *[]){ text }, 1, 0, NULL), SPDL_E_INVALID);
    DONE(p);
}

/* Any byte changed, any end cut off: refused, and never worse. */
static void a_damaged_text_is_refused(void) {
    char text[SPDL_STATE_BYTES], edit[SPDL_STATE_BYTES];
    const char *texts[] = { edit };
    uint64_t state = test_seed();
    size_t length;
    spdl_pipeline *p;
    int loaded = 0;
    many_epochs = 1;
    p = open_table(10, 1);
    listen(p, &(story){ .count = 0 }, 3, BATCHES, true);
    save(p, text);
    length = strlen(text);
    for (size_t i = 0; i < length; ++i) {
        memcpy(edit, text, sizeof edit);
        edit[i] = (char)(edit[i] ^ 1 << test_random(&state) % 7);
        CHECK(spdl_state_load(p, texts, 1, 0, NULL) < 0);
        memcpy(edit, text, sizeof edit);
        edit[i] = '\0';
        CHECK(spdl_state_load(p, texts, 1, 0, NULL) < 0);
    }
    for (int i = 0; i < 2000; ++i) { /* and what nobody checks is some position, or refused */
        edited(edit, text, " item_seed", " item_seed", "none");
        for (int k = 0; k < 9; ++k) { /* mostly digits become others */
            char *at = &edit[14 + test_random(&state) % (length - 30)];
            if (*at >= '0' && *at <= '9') *at = (char)('0' + (int)(test_random(&state) % 10));
        }
        loaded += spdl_state_load(p, texts, 1, SPDL_SECONDS(15), NULL) == SPDL_OK;
    }
    CHECK(loaded > 0);
    edited(edit, text, " item_seed", " item_seed", "none");
    load(p, text);
    texts[0] = (char *)memset(malloc(SPDL_STATE_BYTES), ',', SPDL_STATE_BYTES); /* without end */
    CHECK_EQ(spdl_state_load(p, texts, 1, 0, NULL), SPDL_E_FORMAT);
    free((void *)(uintptr_t)texts[0]);
    DONE(p);
}

static void unsaved(spdl_pipeline *p, const char *why) {
    char text[SPDL_STATE_BYTES], whole[SPDL_STATE_BYTES];
    const char *texts[] = { text };
    spdl_error error;
    (void)snprintf(whole, sizeof whole, "spdl: the position of this pipeline cannot be saved: %s",
                   why);
    CHECK_EQ(spdl_state_save(p, text, sizeof text), SPDL_E_UNSUPPORTED);
    CHECK_STR(text, whole);
    CHECK_EQ(spdl_state_load(p, texts, 1, 0, &error), SPDL_E_UNSUPPORTED);
    DONE(p);
}

static spdl_result none_to_come(void *source, void **out, int64_t timeout_ns) {
    (void)source, (void)out, (void)timeout_ns;
    return SPDL_END;
}

static void some_tables_have_no_position(void) {
    const char *why = "its order is not always the same (SPDL_ORDER_COMPLETION, or a merge that "
                        "takes what is ready)";
    many_epochs = 0;
    unsaved(START(1, SPDL_FEED(item, .free_item = item_free), SPDL_PIPE(pass_on), SPDL_SINK(1)),
            "its items are pushed (SPDL_FEED)");
    unsaved(START(1, SPDL_FROM(item, none_to_come, NULL), SPDL_SINK(1)),
            "SPDL_FROM cannot be asked for one of its items");
    unsaved(START(1, FROM(5), SPDL_PIPE(late_ones, .concurrency = 2, COMPLETION), SPDL_SINK(1)),
            why);
    unsaved(START(1, FROM(5), SPDL_PIPE(late_ones, .concurrency = 2, COMPLETION), SPDL_BATCH(2),
                  SPDL_SINK(1)), why);
    unsaved(START(1, FROM(5), SPDL_BRANCH(by_three), SPDL_PATH("a"), SPDL_PATH("b"),
                  SPDL_PATH("c"), SPDL_MERGE(), SPDL_SINK(1)), why);
}

/* Another number of ranks goes on from where all had taken the same, again and again: the items
   come in the order that one rank has them in; and all of the next epoch comes. */
static void level_ranks_may_change(void) {
    static rank_run now[RANKS], then[RANKS];
    static long values[2 * ALL_OF_THEM];
    uint64_t state = test_seed();
    for (int round = 0; round < (TEST_SANITIZED ? 20 : 100); ++round) {
        const int shape = round % 2 ? 6 : 0;
        int world = 0;
        size_t count = 0;
        for (int turn = 0; turn < 4; ++turn) {
            const int next = (int)(test_random(&state) % RANKS) + 1;
            const int most = (ALL_OF_THEM - (int)count) / next / (shape == 6 ? 2 : 1);
            const long some = (long)(test_random(&state) % (uint64_t)(most > 3 ? 4 : most + 1));
            memcpy(then, now, sizeof then);
            world_open(now, shape, next, then, turn ? world : 0, &state);
            world = next;
            for (int i = 0; i < world; ++i) {
                count += rank_take(&now[i], shape, values + count, turn == 3 ? 1000 : some);
                save(now[i].p, now[i].text);
            }
            for (int i = 0; i < world && turn == 3; ++i) {
                now[i].ended = 0;
                count += rank_take(&now[i], shape, values + count, 1000);
            }
            for (int i = 0; i < world; ++i) rank_close(&now[i]);
        }
        CHECK_EQ(items_alive(), 0);
        qsort(values, count, sizeof values[0], by_value_of);
        CHECK_EQ(count, 2 * ALL_OF_THEM);
        for (size_t i = 0; i < count; ++i) CHECK_EQ(values[i], i / 2);
    }
}

/* At the end of an epoch the ranks of any table may change, saved before it or after it. */
static void any_ranks_change_at_the_end_of_an_epoch(void) {
    static rank_run now[RANKS], then[RANKS];
    static long whole[1000], values[2000];
    uint64_t state = test_seed();
    for (int round = 0; round < (TEST_SANITIZED ? 24 : 96); ++round) {
        const int shape = round % (SHAPES - 1), from = (int)(test_random(&state) % RANKS) + 1,
                  to = (int)(test_random(&state) % RANKS) + 1;
        size_t count = 0, all;
        world_open(now, shape, 1, NULL, 0, &state);
        all = rank_take(&now[0], shape, whole, 1000);
        rank_close(&now[0]);
        qsort(whole, all, sizeof whole[0], by_value_of);
        world_open(then, shape, from, NULL, 0, &state);
        for (int i = 0; i < from; ++i) count += rank_take(&then[i], shape, values + count, 1000);
        CHECK_EQ(count, all);
        for (int i = 0; i < from; ++i) save(then[i].p, then[i].text);
        world_open(now, shape, to, then, from, &state);
        for (int i = 0; i < to; ++i) count += rank_take(&now[i], shape, values + count, 1000);
        for (int i = 0; i < from; ++i) rank_close(&then[i]);
        for (int i = 0; i < to; ++i) rank_close(&now[i]);
        qsort(values, count, sizeof values[0], by_value_of);
        if (!CHECK_EQ(count, 2 * all)) (void)printf("    shape %d\n", shape);
        for (size_t i = 0; i < count && i / 2 < all; ++i) CHECK_EQ(values[i], whole[i / 2]);
    }
}

/* A larger item= jumps over a loss spike. */
static void a_loss_spike_is_jumped_over(void) {
    char edit[SPDL_STATE_BYTES];
    long values[ALL_OF_THEM];
    rank_run r;
    size_t count;
    rank_open(&r, 0, 0, 1, 1);
    CHECK_EQ(rank_take(&r, 0, values, 4), 4);
    save(r.p, r.text);
    edited(edit, r.text, " item=4", " item=40", "none");
    CHECK_EQ(spdl_state_load(r.p, (const char *[]){ edit }, 1, SPDL_FOREVER, NULL), SPDL_OK);
    count = rank_take(&r, 0, values, 1000);
    CHECK_EQ(count, ALL_OF_THEM - 40);
    for (size_t i = 0; i < count; ++i) CHECK_EQ(values[i], 40 + i);
    rank_close(&r);
}

/* --- seeds --- */

SPDL_FN(keyed, item, item) {
    in->value = (long)(spdl_item_key(task) >> 1);
    *out = in;
    return SPDL_OK;
}

SPDL_FN(keyed_batch, spdl_batch, item) {
    (void)in;
    *out = item_make((long)(spdl_item_key(task) >> 1));
    return SPDL_OK;
}

/* The same for any workers and each its own: of 3 epochs, 2 seeds, items and batches. */
static void keys_are_those_of_the_items(void) {
    enum { ALL = 2 * 2 * 3 * 50 };
    static long keys[CROWDS][ALL];
    many_epochs = 1;
    for (int crowd = 0; crowd < CROWDS; ++crowd) {
        size_t count = 0;
        for (int kind = 0; kind < 4; ++kind) {
            spdl_pipeline_desc desc = { .workers = crowds[crowd], .seed = (uint64_t)kind % 2 };
            spdl_pipeline *p = NULL;
            desc.logger.log_fn = log_nothing;
            REQUIRE((kind < 2 ? spdl_pipeline_create(&p, &desc, SPDL_STAGES(FROM(40),
                                    SPDL_PIPE(keyed, .concurrency = 3), SPDL_SINK(2)))
                              : spdl_pipeline_create(&p, &desc, SPDL_STAGES(FROM(40), SPDL_BATCH(1),
                                    SPDL_PIPE(keyed_batch, .concurrency = 3,
                                              .free_item = item_free),
                                    SPDL_SINK(2)))) == SPDL_OK);
            for (int epoch = 0; epoch < 3; ++epoch) {
                item *it = NULL;
                while (SPDL_NEXT(p, &it, SPDL_SECONDS(15)) == SPDL_OK) {
                    keys[crowd][count++] = it->value;
                    item_free(it);
                }
            }
            DONE(p);
        }
        CHECK_EQ(count, 4 * (40 + 41 + 42));
        CHECK(memcmp(keys[0], keys[crowd], sizeof keys[0]) == 0);
    }
    qsort(keys[0], 4 * 123, sizeof keys[0][0], by_value_of);
    for (int i = 1; i < 4 * 123; ++i) CHECK(keys[0][i] != keys[0][i - 1]);
}

TEST_TABLE(state) {
    TEST_CASE(ordered_tables_go_on),
    TEST_CASE(random_kills_change_nothing),
    TEST_CASE(a_pack_is_all_that_is_made_again),
    TEST_CASE(level_ranks_keep_the_order),
    TEST_CASE(level_ranks_may_change),
    TEST_CASE(any_ranks_change_at_the_end_of_an_epoch),
    TEST_CASE(a_loss_spike_is_jumped_over),
    TEST_CASE(keys_are_the_same_on_any_rank),
    TEST_CASE(texts_of_other_ranks_are_refused),
    TEST_CASE(a_text_that_does_not_fit_is_refused),
    TEST_CASE(a_damaged_text_is_refused),
    TEST_CASE(some_tables_have_no_position),
    TEST_CASE(keys_are_those_of_the_items),
    TEST_END
};
