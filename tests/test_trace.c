/* Traces, and where the time of stages went: files are read back by a parser of JSON that is here,
   and by Python's where there is one. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "test.h"

#include <limits.h>

/* --- a pipeline to look at --- */

static void sleep_us(long us) { test_sleep_us(us); }

static void spin_us(uint64_t us) {
    const uint64_t end = spdl_time_ns() + us * 1000;
    while (spdl_time_ns() < end) {}
}

SPDL_FN(numbers, void, void) {
    if (spdl_sequence(task) == *(const uintptr_t *)spdl_ctx(task)) return SPDL_END;
    *out = (void *)(uintptr_t)(spdl_sequence(task) + 1);
    return SPDL_OK;
}

SPDL_FN(pass, void, void) {
    *out = in;
    return SPDL_OK;
}

/* Of the items 0 to 9 number 3 is dropped and number 5 fails, and so on. */
SPDL_FN(choose, void, void) {
    const uint64_t n = spdl_sequence(task) % 10;
    if (n % 4 == 0) sleep_us(50);
    *out = in;
    return n == 3 ? SPDL_SKIP : n == 5 ? spdl_fail(task, "a five") : SPDL_OK;
}

SPDL_FN(nap, void, void) {
    sleep_us(*(const long *)spdl_ctx(task));
    *out = in;
    return SPDL_OK;
}

SPDL_FN(spin, void, void) {
    spin_us(*(const uint64_t *)spdl_ctx(task));
    *out = in;
    return SPDL_OK;
}

typedef struct messages {
    int warnings;
    int others;
    char text[600]; /* of the last warning */
} messages;

/* Any thread, also several at once; warnings come from the one that creates or destroys. */
static void keep_message(spdl_log_level level, const char *text, void *user) {
    messages *m = (messages *)user;
    if (strstr(text, "each runs one call at a time") != NULL) return; /* on one worker */
    if (level == SPDL_LOG_WARN) {
        ++m->warnings;
        snprintf(m->text, sizeof m->text, "%.599s", text);
    } else {
        __atomic_add_fetch(&m->others, 1, __ATOMIC_RELAXED);
    }
}

/* A folder for the files of a test; its name is short. */
static char folder[64];

static const char *file_named(const char *name) {
    static char path[8][128];
    static int turn;
    char *at = path[turn++ % 8];
    if (folder[0] == '\0') {
        test_folder(folder, sizeof folder);
    }
    snprintf(at, sizeof path[0], "%s/%s", folder, name);
    return at;
}

static void remove_files(void) {
    if (folder[0] != '\0') CHECK(test_folder_remove(folder));
    folder[0] = '\0';
}

static spdl_pipeline_desc desc_of(int workers, const char *file, messages *m) {
    spdl_pipeline_desc desc = { 0 };
    test_setenv("SPDL_TRACE", NULL);
    desc.workers = TEST_WORKERS(workers);
    desc.name = "loader";
    desc.trace = file;
    desc.logger.log_fn = keep_message;
    desc.logger.user = m;
    memset(m, 0, sizeof *m);
    return desc;
}

/* Takes everything, sees to it that it was everything, and leaves the statistics. */
static void run_to_the_end(spdl_pipeline *p, bool batches, spdl_stats *stats) {
    spdl_result result;
    void *item;
    while ((result = spdl_pipeline_next(p, &item, SPDL_FOREVER)) == SPDL_OK)
        if (batches) spdl_batch_free(item);
    CHECK_EQ(result, SPDL_END);
    spdl_pipeline_stats(p, stats);
}

static const uintptr_t thousand = 1000;

static spdl_pipeline *short_pipeline(const spdl_pipeline_desc *desc) {
    spdl_pipeline *p;
    REQUIRE(spdl_pipeline_create(&p, desc, SPDL_STAGES(
        SPDL_SOURCE(numbers, .ctx = (void *)(uintptr_t)&thousand),
        SPDL_PIPE(pass, .concurrency = 2), SPDL_SINK(3))) == SPDL_OK);
    return p;
}

/* Runs it and destroys it; the trace, if there is one, is complete then. */
static void run_short(const spdl_pipeline_desc *desc) {
    spdl_pipeline *p = short_pipeline(desc);
    spdl_stats stats;
    run_to_the_end(p, false, &stats);
    CHECK_EQ(stats.delivered, thousand);
    spdl_pipeline_destroy(p);
}

/* --- reading the file back --- */

static const char *json_value(const char *at, int depth);

static const char *json_space(const char *at) { return at + strspn(at, " \t\r\n"); }

static const char *json_string(const char *at) {
    if (*at++ != '"') return NULL;
    while (*at != '"') {
        const int length = spdl__utf8((const char *)at);
        if (length == 0 || (unsigned char)*at < 0x20) return NULL;
        if (*at == '\\') {
            ++at;
            if (*at == 'u' && strspn(at + 1, "0123456789abcdefABCDEF") < 4) return NULL;
            if (strchr("\"\\/bfnrtu", *at) == NULL) return NULL;
        }
        at += *at == 'u' || length == 1 ? 1 : length;
    }
    return at + 1;
}

static const char *json_number(const char *at) {
    if (*at == '-') ++at;
    if (*at == '0' && at[1] >= '0' && at[1] <= '9') return NULL;
    if (strspn(at, "0123456789") == 0) return NULL;
    at += strspn(at, "0123456789");
    if (*at == '.' && strspn(at + 1, "0123456789") == 0) return NULL;
    if (*at == '.') at += 1 + strspn(at + 1, "0123456789");
    if (*at != 'e') return at;
    if (*++at == '+' || *at == '-') ++at;
    return strspn(at, "0123456789") ? at + strspn(at, "0123456789") : NULL;
}

/* The members of an object, or the elements of an array, with the bracket at the end. */
static const char *json_members(const char *at, int depth, char end) {
    at = json_space(at + 1);
    if (*at == end) return at + 1;
    for (;;) {
        if (end == '}') {
            at = json_string(json_space(at));
            if (at == NULL || *(at = json_space(at)) != ':') return NULL;
            ++at;
        }
        at = json_value(json_space(at), depth + 1);
        if (at == NULL) return NULL;
        at = json_space(at);
        if (*at == end) return at + 1;
        if (*at++ != ',') return NULL;
    }
}

/* Behind the value, or NULL when it is none. Literals are not used by the file. */
static const char *json_value(const char *at, int depth) {
    if (depth > 5) return NULL;
    if (*at == '{') return json_members(at, depth, '}');
    if (*at == '[') return json_members(at, depth, ']');
    return *at == '"' ? json_string(at) : json_number(at);
}

static bool json_is(const char *text) {
    const char *end = json_value(json_space(text), 0);
    return end != NULL && *json_space(end) == '\0';
}

typedef struct event {
    char phase;
    int lane;
    int64_t begin, ns; /* in nanoseconds */
    char cat[16], name[100], result[40];
    long long item, items;
    double value; /* of a counter, else 0 */
    bool seen;
} event;

typedef struct trace {
    char *text;
    event *events;
    size_t count;
    long long kept, dropped;
} trace;

static long long number_of(const char *line, const char *key, long long otherwise) {
    const char *at = strstr(line, key);
    return at ? strtoll(at + strlen(key), NULL, 10) : otherwise;
}

/* A time is written as microseconds with three places. */
static int64_t time_of(const char *line, const char *key) {
    const char *at = strstr(line, key);
    char *dot;
    int64_t us;
    if (at == NULL) return 0;
    us = strtoll(at + strlen(key), &dot, 10);
    CHECK(*dot == '.');
    return us * 1000 + strtoll(dot + 1, NULL, 10);
}

static void text_of(const char *line, const char *key, char *to, size_t bytes) {
    const char *at = strstr(line, key);
    size_t length = 0;
    if (at != NULL) {
        at += strlen(key);
        while (at[length] != '"') ++length; /* inside of a string it is an escape */
    }
    snprintf(to, bytes, "%.*s", (int)length, length ? at : "");
}

static event event_of(const char *line) {
    event e = { 0 };
    char phase[4];
    text_of(line, "\"ph\":\"", phase, sizeof phase);
    e.phase = phase[0];
    e.lane = (int)number_of(line, "\"tid\":", -1) - 1;
    e.begin = time_of(line, "\"ts\":");
    e.ns = time_of(line, "\"dur\":");
    e.item = number_of(line, "\"item\":", -1);
    e.items = number_of(line, "\"items\":", -1);
    if (strstr(line, "\"value\":") != NULL) e.value = strtod(strstr(line, "\"value\":") + 8, NULL);
    text_of(line, "\"cat\":\"", e.cat, sizeof e.cat);
    text_of(line, "\"result\":\"", e.result, sizeof e.result);
    text_of(line, e.phase == 'M' ? "\"args\":{\"name\":\"" : "\"name\":\"", e.name, sizeof e.name);
    return e;
}

static char *text_in(const char *path) {
    FILE *file = fopen(path, "rb");
    const size_t most = 64 << 20;
    char *text = (char *)malloc(most);
    REQUIRE(file != NULL && text != NULL);
    text[fread(text, 1, most - 1, file)] = '\0';
    fclose(file);
    return text;
}

static trace trace_read(const char *path) {
    trace t = { 0 };
    char *line, *at;
    t.text = text_in(path);
    REQUIRE(json_is(t.text));
    t.kept = number_of(t.text, "\"events\":", -1);
    t.dropped = number_of(t.text, "\"dropped_events\":", -1);
    t.events = (event *)calloc(strlen(t.text) / 40 + 1, sizeof(event));
    REQUIRE(t.events != NULL);
    for (line = strtok_r(t.text, "\n", &at); line; line = strtok_r(NULL, "\n", &at))
        if (strncmp(line, "{\"ph\":", 6) == 0) t.events[t.count++] = event_of(line);
    return t;
}

static void trace_free(trace *t) {
    free(t->text);
    free(t->events);
}

static const event *trace_find(const trace *t, char phase, const char *cat, const char *name,
                               long long item) {
    for (size_t i = 0; i < t->count; ++i) {
        const event *e = &t->events[i];
        if (e->phase == phase && strcmp(e->cat, cat) == 0 && strcmp(e->name, name) == 0 &&
            (item < 0 || e->item == item))
            return e;
    }
    return NULL;
}

static size_t trace_count(const trace *t, char phase, const char *cat, const char *name) {
    size_t count = 0;
    for (size_t i = 0; i < t->count; ++i)
        count += t->events[i].phase == phase && strcmp(t->events[i].cat, cat) == 0 &&
                 (name == NULL || strcmp(t->events[i].name, name) == 0);
    return count;
}

static int by_place(const void *a, const void *b) {
    const event *x = (const event *)a, *y = (const event *)b;
    if (x->lane != y->lane) return x->lane < y->lane ? -1 : 1;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->ns > y->ns ? -1 : x->ns < y->ns;
}

static bool is_span(const event *e) { return strcmp(e->cat, "span") == 0; }

/* No two slices of a lane overlap, but for spans, which are inside of a slice or around one. Sorts
   the events. */
static void check_lanes(trace *t) {
    const event *around[40];
    int depth = 0;
    qsort(t->events, t->count, sizeof(event), by_place);
    for (size_t i = 0; i < t->count; ++i) {
        const event *e = &t->events[i];
        if (e->phase != 'X') continue;
        CHECK(e->ns >= 0 && e->lane >= 0);
        if (e->ns == 0) continue; /* at the border of another, before or after it */
        while (depth > 0 && (around[depth - 1]->lane != e->lane ||
                             around[depth - 1]->begin + around[depth - 1]->ns <= e->begin))
            --depth;
        if (depth > 0) {
            CHECK(is_span(e) || is_span(around[depth - 1]));
            CHECK(e->begin + e->ns <= around[depth - 1]->begin + around[depth - 1]->ns);
        }
        REQUIRE(depth < 40);
        around[depth++] = e;
    }
}

/* Each call of the run is there once, with its item and result. */
static void check_calls(trace *t, const spdl_stats *stats) {
    for (int stage = 0; stage < stats->stage_count; ++stage) {
        const spdl_stage_stats *s = &stats->stage[stage];
        const char *cat = s->kind == SPDL_KIND_BATCH ? "batch" : "task";
        uint64_t calls = 0, skips = 0, failures = 0;
        char *seen = (char *)calloc(1, (size_t)s->tasks + 1);
        for (size_t i = 0; i < t->count; ++i) {
            const event *e = &t->events[i];
            if (e->phase != 'X' || strcmp(e->cat, cat) != 0 || strcmp(e->name, s->name) != 0 ||
                strcmp(e->result, "end of data") == 0)
                continue;
            ++calls;
            skips += strcmp(e->result, "item skipped") == 0;
            failures += strcmp(e->result, "a stage function failed") == 0;
            if (CHECK(e->item >= 0 && e->item < (long long)s->tasks)) CHECK(!seen[e->item]++);
        }
        CHECK_EQ(calls, s->tasks);
        CHECK_EQ(failures, s->failures);
        if (s->kind != SPDL_KIND_BATCH) CHECK_EQ(skips, s->skips);
        free(seen);
    }
}

/* Depths are within what an edge can hold, and 0 in the end. */
static void check_depths(const trace *t, const spdl_stats *stats) {
    for (int edge = 0; edge < stats->stage_count; ++edge) {
        const spdl_edge_stats *e = &stats->edge[edge];
        char name[100];
        const event *last = NULL;
        size_t count = 0;
        snprintf(name, sizeof name, "edge %d depth, after %s", edge, stats->stage[edge].name);
        for (size_t i = 0; i < t->count; ++i) {
            if (t->events[i].phase != 'C' || strcmp(t->events[i].name, name) != 0) continue;
            last = &t->events[i];
            CHECK(last->items >= 0);
            CHECK(last->items <= e->buffer_size + stats->stage[edge].concurrency);
            ++count;
        }
        CHECK(count > 0 && count <= e->items); /* when the reader has moved on */
        if (last != NULL) CHECK_EQ(last->items, 0);
    }
}

/* --- traces --- */

enum { BATCH = 8 };

static void whole_run(int workers) {
    const char *path = file_named("t.json");
    static uintptr_t items = 800;
    messages m;
    const spdl_pipeline_desc desc = desc_of(workers, path, &m);
    spdl_pipeline *p;
    spdl_stats stats;
    trace t;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_SOURCE(numbers, .ctx = &items), SPDL_PIPE(pass, .concurrency = 2),
        SPDL_BATCH(BATCH), SPDL_PIPE(pass, .name = "look", .free_item = spdl_batch_free),
        SPDL_SINK(2))) == SPDL_OK);
    run_to_the_end(p, true, &stats);
    spdl_pipeline_destroy(p);
    t = trace_read(path);
    CHECK_EQ(t.dropped, 0);
    CHECK_EQ(m.warnings, 0);
    check_lanes(&t);
    check_calls(&t, &stats);
    check_depths(&t, &stats);
    CHECK(trace_find(&t, 'M', "", "consumer", -1) != NULL);
    CHECK(trace_find(&t, 'M', "", "loader-0", -1) != NULL);
    CHECK((stats.wait_ns > 0) == (trace_count(&t, 'X', "consumer", "next waits") > 0));
    trace_free(&t);
    remove_files();
}

/* Arrows of items: one begins at the source and goes on in each later call with that number. Time 0
   is told in Unix time. */
static void arrows_and_a_common_clock(void) {
    const char *path = file_named("t.json"), *at, *clock;
    messages m;
    const spdl_pipeline_desc desc = desc_of(2, path, &m);
    const uint64_t before = spdl__os_clock_ns(SPDL__OS_UNIX);
    char *text;
    int begins = 0, goes_on = 0;
    run_short(&desc);
    text = text_in(path);
    REQUIRE(text != NULL && json_is(text));
    for (at = text; (at = strstr(at, "{\"ph\":\"s\"")) != NULL; ++at) ++begins;
    for (at = text; (at = strstr(at, "{\"ph\":\"t\"")) != NULL; ++at) ++goes_on;
    CHECK_EQ(begins, thousand + 1); /* the call that says the end, too */
    CHECK_EQ(goes_on, thousand);
    CHECK(strstr(text, "\"cat\":\"item\",\"name\":\"item\",\"id\":\"0.999\"}") != NULL);
    clock = strstr(text, "\"unix_ns\":");
    REQUIRE(clock != NULL);
    CHECK(strtoull(clock + 10, NULL, 10) >= before - 50000000);
    CHECK(strtoull(clock + 10, NULL, 10) <= spdl__os_clock_ns(SPDL__OS_UNIX));
    free(text);
    remove_files();
}

static void whole_run_on_workers(void) { whole_run(3); }
static void whole_run_inline(void) { whole_run(0); }

/* A call that does not return until the gate is open, and what it writes into its track then. */
static int gate, inside_gate;

SPDL_FN(blocks, void, void) {
    static int one;
    (void)in;
    *out = &one;
    if (spdl_sequence(task) == 0) return SPDL_OK;
    __atomic_store_n(&inside_gate, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&gate, __ATOMIC_ACQUIRE)) sleep_us(1000);
    for (int i = 0; i < 100; ++i) {
        spdl_trace_begin(task, "late");
        spdl_trace_end(task);
    }
    __atomic_store_n(&inside_gate, 0, __ATOMIC_RELEASE);
    return SPDL_OK;
}

/* Its thread may write while destroy prints. */
static void a_source_that_is_left_is_not_printed(void) {
    const char *path = file_named("t.json");
    messages m;
    const spdl_pipeline_desc desc = desc_of(2, path, &m);
    spdl_pipeline *p;
    void *item;
    trace t;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_SOURCE(blocks, .threads = 1), SPDL_PIPE(pass), SPDL_SINK(2))) == SPDL_OK);
    CHECK_EQ(spdl_pipeline_next(p, &item, SPDL_FOREVER), SPDL_OK);
    while (!__atomic_load_n(&inside_gate, __ATOMIC_ACQUIRE)) sleep_us(1000);
    CHECK_EQ(spdl_pipeline_stop(p, 1), SPDL_TIMEOUT);
    spdl_pipeline_destroy(p);
    t = trace_read(path);
    CHECK(trace_find(&t, 'X', "task", "pass", -1) != NULL);
    CHECK(trace_find(&t, 'X', "task", "blocks", -1) == NULL);
    trace_free(&t);
    __atomic_store_n(&gate, 1, __ATOMIC_RELEASE);
    while (__atomic_load_n(&inside_gate, __ATOMIC_ACQUIRE)) sleep_us(1000);
    sleep_us(20000); /* it frees the pipeline */
    remove_files();
}

SPDL_FN(by_parity, void, void) {
    *out = in;
    return spdl_route(task, (int)((uintptr_t)in % 2));
}

static void forget(void *state) { (void)state; }

SPDL_FN(twice, void, void) {
    void **state = spdl_call_state(task);
    *out = (void *)((uintptr_t)in + 100 + (*state != NULL));
    if (*state != NULL) return SPDL_OK;
    *state = in;
    return SPDL_AGAIN;
}

/* Calls of both branches, of what they join to, and of what follows results of one item. */
static void branches_on_a_pool(void) {
    const spdl_pool_desc threads = { .workers = 2 };
    static uintptr_t items = 20;
    spdl_pool *pool = NULL;
    messages m;
    spdl_pipeline_desc desc = desc_of(0, file_named("t.json"), &m);
    spdl_pipeline *p;
    spdl_stats stats;
    trace t;
    REQUIRE(spdl_pool_create(&pool, &threads) == SPDL_OK);
    for (int turn = 0; turn < 2; ++turn) {
        desc.workers = turn ? SPDL_INLINE : 0;
        desc.pool = turn ? NULL : pool;
        desc.name = NULL;
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_SOURCE(numbers, .ctx = &items), SPDL_BRANCH(by_parity),
            SPDL_PATH("odd"), SPDL_PIPE(pass, .name = "left"),
            SPDL_PATH("even"), SPDL_PIPE(twice, .again = true, .free_state = forget),
            SPDL_MERGE(.output_order = SPDL_ORDER_COMPLETION),
            SPDL_PIPE(pass, .name = "below"), SPDL_SINK(2))) == SPDL_OK);
        run_to_the_end(p, false, &stats);
        CHECK_STR(m.text, "");
        CHECK_EQ(stats.delivered, 30);
        spdl_pipeline_destroy(p);
        t = trace_read(file_named("t.json"));
        CHECK_EQ(trace_count(&t, 'X', "task", "left"), 10);
        CHECK_EQ(trace_count(&t, 'X', "task", "twice"), 20);
        CHECK_EQ(trace_count(&t, 'X', "task", "below"), 30);
        trace_free(&t);
    }
    spdl_pool_destroy(pool);
    remove_files();
}

static void drops_failures_and_batches_of_batches(void) {
    const char *path = file_named("t.json");
    static uintptr_t items = 600;
    messages m;
    const spdl_pipeline_desc desc = desc_of(3, path, &m);
    spdl_pipeline *p;
    spdl_stats stats;
    trace t;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_SOURCE(numbers, .ctx = &items),
        SPDL_PIPE(choose, .concurrency = 3, .max_failures = -1,
                  .output_order = SPDL_ORDER_COMPLETION),
        SPDL_BATCH(4, .name = "inner"), SPDL_BATCH(3, .name = "outer", .drop_last = true),
        SPDL_SINK(2))) == SPDL_OK);
    run_to_the_end(p, true, &stats);
    spdl_pipeline_destroy(p);
    t = trace_read(path);
    check_lanes(&t);
    check_calls(&t, &stats);
    CHECK_EQ(stats.stage[2].tasks, items * 8 / 10 / 4);
    trace_free(&t);
    remove_files();
}

/* A result that is none, of any number, is a failed call. */
SPDL_FN(odd, void, void) {
    static const int results[] = { 40000, -40000, 32768 + SPDL_SKIP };
    (void)in;
    (void)out;
    return (spdl_result)results[spdl_sequence(task) % 3];
}

static void numbers_that_are_no_results_are_failures(void) {
    const char *path = file_named("t.json");
    static uintptr_t items = 3;
    messages m;
    const spdl_pipeline_desc desc = desc_of(0, path, &m);
    spdl_pipeline *p;
    spdl_stats stats;
    trace t;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_SOURCE(numbers, .ctx = &items), SPDL_PIPE(odd, .max_failures = -1), SPDL_SINK(2))) ==
            SPDL_OK);
    run_to_the_end(p, false, &stats);
    CHECK_EQ(stats.stage[1].failures, 3);
    spdl_pipeline_destroy(p);
    t = trace_read(path);
    for (int i = 0; i < 3; ++i) {
        const event *call = trace_find(&t, 'X', "task", "odd", i);
        if (CHECK(call != NULL)) CHECK_STR(call->result, spdl_result_text(SPDL_E_STAGE));
    }
    trace_free(&t);
    remove_files();
}

/* Times: a stage that sleeps is as long as that, and waits of the consumer are there. */
static void times_are_what_they_were(void) {
    const char *path = file_named("t.json");
    static uintptr_t items = 20;
    static long us = 5000;
    messages m;
    const spdl_pipeline_desc desc = desc_of(2, path, &m);
    double waited = 0;
    spdl_pipeline *p;
    spdl_stats stats;
    trace t;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_SOURCE(numbers, .ctx = &items), SPDL_PIPE(nap, .ctx = &us), SPDL_PIPE(pass),
        SPDL_SINK(2))) == SPDL_OK);
    run_to_the_end(p, false, &stats);
    spdl_pipeline_destroy(p);
    t = trace_read(path);
    check_lanes(&t);
    for (size_t i = 0; i < t.count; ++i) {
        const event *e = &t.events[i];
        if (e->phase != 'X') continue;
        if (strcmp(e->name, "nap") == 0) CHECK(e->ns >= us * 1000);
        if (strcmp(e->cat, "consumer") == 0) waited += (double)e->ns;
    }
    CHECK(waited > 0.9 * (double)stats.wait_ns && waited < 1.1 * (double)stats.wait_ns);
    trace_free(&t);
    remove_files();
}

static bool exists(const char *path) { return access(path, F_OK) == 0; }

static void environment_asks_for_a_trace(void) {
    const char *env = file_named("env.json"), *own = file_named("own.json");
    char value[200];
    messages m;
    spdl_pipeline_desc desc = desc_of(2, NULL, &m);
    trace t;
    run_short(&desc);
    CHECK(!exists(env));
    test_setenv("SPDL_TRACE", env);
    run_short(&desc);
    t = trace_read(env);
    CHECK_EQ(trace_count(&t, 'X', "task", "pass"), thousand);
    trace_free(&t);
    CHECK_EQ(unlink(env), 0);
    snprintf(value, sizeof value, "%s,events=64", env);
    test_setenv("SPDL_TRACE", value);
    run_short(&desc);
    t = trace_read(env);
    CHECK(t.kept > 64 && t.kept <= 64 * (3 + 2));
    trace_free(&t);
    CHECK_EQ(unlink(env), 0);
    desc.trace = own; /* the program knows better */
    run_short(&desc);
    CHECK(exists(own) && !exists(env));
    CHECK_EQ(unlink(own), 0);
    desc.trace = "";
    run_short(&desc);
    test_setenv("SPDL_TRACE", "");
    desc.trace = NULL;
    run_short(&desc);
    CHECK(!exists(own) && !exists(env));
    CHECK_EQ(m.warnings, 1); /* of the 64 events */
    remove_files();
}

static void latest_events_are_kept_and_the_rest_counted(void) {
    const char *path = file_named("t.json");
    messages m;
    spdl_pipeline_desc desc = desc_of(2, path, &m);
    trace t;
    long long last = 0;
    desc.trace_events = 33; /* 64, then */
    run_short(&desc);
    t = trace_read(path);
    check_lanes(&t);
    CHECK(t.kept <= 64 * (3 + 2));
    CHECK(t.dropped > 0);
    CHECK(t.kept + t.dropped >= 2 * (long long)thousand);
    CHECK(trace_count(&t, 'X', "task", NULL) <= 2 * 64);
    for (size_t i = 0; i < t.count; ++i)
        if (strcmp(t.events[i].cat, "task") == 0 && t.events[i].item > last)
            last = t.events[i].item;
    CHECK(last >= (long long)thousand - 1);
    CHECK_EQ(m.warnings, 1);
    CHECK(strstr(m.text, "dropped") != NULL && strstr(m.text, path) != NULL);
    trace_free(&t);
    remove_files();
}

/* "%p" is the process. A second pipeline at the same time has a file of its own. */
static void processes_have_their_own_files(void) {
    char name[200], path[300];
    messages m;
    spdl_pipeline_desc desc;
    spdl_pipeline *a, *b;
    for (int turn = 0; turn < 2; ++turn) { /* the second time both files are there */
        snprintf(path, sizeof path, "%s", file_named("t-%p.json"));
        desc = desc_of(1, path, &m);
        a = short_pipeline(&desc);
        CHECK_EQ(m.warnings, 0);
        b = short_pipeline(&desc);
        CHECK_EQ(m.warnings, 1);
        snprintf(name, sizeof name, "this one writes '%s/t-%d-2.json'", folder, (int)getpid());
        CHECK(strstr(m.text, name) != NULL);
        spdl_pipeline_destroy(turn == 0 ? b : a);
        spdl_pipeline_destroy(turn == 0 ? a : b);
        for (int copy = 1; copy < 3; ++copy) {
            trace t;
            snprintf(name, sizeof name, copy == 1 ? "t-%d.json" : "t-%d-2.json", (int)getpid());
            t = trace_read(file_named(name));
            trace_free(&t);
        }
    }
    desc = desc_of(1, path, &m); /* none runs any more */
    run_short(&desc);
    CHECK_EQ(m.warnings, 0);
    desc = desc_of(1, file_named("no.extension/t"), &m);
    CHECK_EQ(mkdir(file_named("no.extension"), 0700), 0);
    a = short_pipeline(&desc);
    run_short(&desc);
    CHECK_EQ(m.warnings, 1);
    CHECK(strstr(m.text, "no.extension/t-2'") != NULL);
    spdl_pipeline_destroy(a);
    CHECK_EQ(symlink(file_named("other.json"), file_named("link.json")), 0);
    desc = desc_of(1, file_named("link.json"), &m);
    run_short(&desc);
    CHECK_EQ(m.warnings, 1);
    CHECK(strstr(m.text, "it is a symbolic link") != NULL && !exists(file_named("other.json")));
    remove_files();
}

/* Whatever is wrong with the file: the pipeline runs, and says so once. */
static void bad_files_are_one_warning(void) {
    static char name[2000];
    const char *const paths[] = { "/nowhere/at/all/t.json", "/tmp", "/dev/full", name };
    messages m;
    spdl_pipeline_desc desc = desc_of(2, NULL, &m);
    memset(name, 'n', sizeof name - 1);
    for (size_t i = 0; i < sizeof paths / sizeof paths[0]; ++i) {
        desc = desc_of(2, paths[i], &m);
        run_short(&desc);
        CHECK_EQ(m.warnings, 1);
        CHECK_EQ(m.others, 0);
        desc = desc_of(2, NULL, &m);
        test_setenv("SPDL_TRACE", paths[i]);
        run_short(&desc);
        CHECK_EQ(m.warnings, 1);
        CHECK_EQ(m.others, 0);
    }
    for (size_t i = 0; i < 1020; ++i) name[i] = i % 2 ? '/' : '.';
    strcpy(name + 1020, "n%p"); /* too long with the process in it */
    desc = desc_of(2, name, &m);
    if (getpid() >= 100) run_short(&desc);
    CHECK_EQ(m.warnings, getpid() >= 100);
    desc = desc_of(2, "/dev/null", &m); /* nothing is wrong with that */
    run_short(&desc);
    CHECK_EQ(m.warnings, 0);
}

static void malformed_options_are_one_warning(void) {
    static const char *const options[] = { "", "0", "x", "-1", "12x", "16777217",
                                           "99999999999999999999" };
    const char *path = file_named("t.json");
    char value[200];
    messages m;
    for (size_t i = 0; i < sizeof options / sizeof options[0]; ++i) {
        const spdl_pipeline_desc desc = desc_of(2, NULL, &m);
        snprintf(value, sizeof value, "%s,events=%s", path, options[i]);
        test_setenv("SPDL_TRACE", value);
        run_short(&desc);
        CHECK_EQ(m.warnings, 1);
        CHECK(strstr(m.text, value + strlen(path) + 1) != NULL);
        CHECK_EQ(unlink(path), 0); /* there was one all the same */
    }
    remove_files();
}

static void options_without_a_file_are_one_warning(void) {
    messages m;
    const spdl_pipeline_desc desc = desc_of(2, NULL, &m);
    test_setenv("SPDL_TRACE", ",events=5");
    run_short(&desc);
    CHECK_EQ(m.warnings, 1);
    CHECK(strstr(m.text, "no file in front of ',events=5'") != NULL);
}

/* The disk gets full while the file is written. */
static void full_disk_is_one_warning(void) {
    const char *path = file_named("t.json");
    const struct rlimit limit = { 5000, RLIM_INFINITY };
    messages m;
    const spdl_pipeline_desc desc = desc_of(2, path, &m);
    spdl_pipeline *p = short_pipeline(&desc);
    spdl_stats stats;
    run_to_the_end(p, false, &stats);
    REQUIRE(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    spdl_pipeline_destroy(p); /* no SIGXFSZ ends the program */
    CHECK_EQ(m.warnings, 1);
    CHECK(strstr(m.text, "t.json") != NULL);
    remove_files();
}

static void names_are_escaped(void) {
    const char *path = file_named("t.json");
    static uintptr_t items = 3;
    messages m;
    spdl_pipeline_desc desc = desc_of(1, path, &m);
    spdl_pipeline *p;
    spdl_stats stats;
    char *text;
    desc.name = "a\"b";
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_SOURCE(numbers, .ctx = &items, .name = "\"quo\\tes\"\n\x01\x7f"),
        SPDL_PIPE(pass, .name = "\xc3\xa9t\xc3\xa9 \xff\xc0\x80 \xed\xa0\x80"),
        SPDL_PIPE(pass, .name = "123456789012345678901234567890\xc3\xa9"), /* is cut in the e */
        SPDL_SINK(2))) == SPDL_OK);
    run_to_the_end(p, false, &stats);
    spdl_pipeline_destroy(p);
    text = text_in(path);
    CHECK(json_is(text));
    CHECK(strstr(text, "\\u0022quo\\u005ctes\\u0022\\u000a\\u0001\\u007f") != NULL);
    CHECK(strstr(text, "\xc3\xa9t\xc3\xa9 \\ufffd\\ufffd\\ufffd \\ufffd\\ufffd\\ufffd\"") != NULL);
    CHECK(strstr(text, "123456789012345678901234567890\\ufffd\"") != NULL);
    CHECK(strstr(text, "a\\u0022b-0") != NULL);
    free(text);
    remove_files();
}

static void arguments_are_checked(void) {
    spdl_error error;
    messages m;
    spdl_pipeline_desc desc = desc_of(1, "", &m);
    spdl_pipeline *p;
    desc.error = &error;
    for (int i = 0; i < 2; ++i) {
        desc.trace_events = i ? -1 : (1 << 24) + 1;
        CHECK_EQ(spdl_pipeline_create(&p, &desc, SPDL_STAGES(SPDL_SOURCE(numbers), SPDL_SINK(1))),
                 SPDL_E_INVALID);
        CHECK(strstr(error.text, "trace_events") != NULL);
    }
}

/* --- spans and counters of users --- */

/* Each call has one span with two inside of it, and counts. */
SPDL_FN(in_parts, void, void) {
    spdl_trace_begin(task, "outer");
    for (int i = 0; i < 2; ++i) {
        spdl_trace_begin(task, i ? "second" : "first");
        spin_us(3);
        spdl_trace_end(task);
    }
    spdl_trace_end(task);
    *out = in;
    return SPDL_OK;
}

static bool inside(const event *e, const event *of) {
    return e->lane == of->lane && e->begin >= of->begin && e->begin + e->ns <= of->begin + of->ns;
}

/* How many slices of this category and name one of another lies in. */
static size_t around(const trace *t, const event *e, const char *cat, const char *name) {
    size_t count = 0;
    for (size_t i = 0; i < t->count; ++i)
        count += t->events[i].phase == 'X' && strcmp(t->events[i].cat, cat) == 0 &&
                 strcmp(t->events[i].name, name) == 0 && inside(e, &t->events[i]);
    return count;
}

static void spans_of_calls_and_steps(int workers) {
    const char *path = file_named("t.json");
    static uintptr_t items = 60;
    messages m;
    const spdl_pipeline_desc desc = desc_of(workers, path, &m);
    size_t waits = 0;
    spdl_pipeline *p;
    spdl_stats stats;
    void *item;
    trace t;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_SOURCE(numbers, .ctx = &items), SPDL_PIPE(in_parts, .concurrency = 2),
        SPDL_SINK(2))) == SPDL_OK);
    for (spdl_result result = SPDL_OK; result == SPDL_OK;) {
        spdl_pipeline_trace_begin(p, "step");
        result = spdl_pipeline_next(p, &item, SPDL_FOREVER);
        spdl_pipeline_trace_begin(p, "forward");
        spdl_pipeline_trace_end(p);
        spdl_pipeline_trace_counter(p, "loss", 0.5);
        spdl_pipeline_trace_end(p);
    }
    spdl_pipeline_stats(p, &stats);
    spdl_pipeline_destroy(p);
    t = trace_read(path);
    CHECK_EQ(t.dropped, 0);
    check_lanes(&t);
    check_calls(&t, &stats);
    CHECK_EQ(trace_count(&t, 'X', "span", "outer"), items);
    CHECK_EQ(trace_count(&t, 'X', "span", "first"), items);
    CHECK_EQ(trace_count(&t, 'X', "span", "second"), items);
    CHECK_EQ(trace_count(&t, 'X', "span", "step"), items + 1);
    CHECK_EQ(trace_count(&t, 'X', "span", "forward"), items + 1);
    CHECK_EQ(trace_count(&t, 'C', "", "loss"), items + 1);
    for (size_t i = 0; i < t.count; ++i) {
        const event *e = &t.events[i];
        if (strcmp(e->name, "outer") == 0) CHECK_EQ(around(&t, e, "task", "in_parts"), 1);
        if (strcmp(e->name, "first") == 0 || strcmp(e->name, "second") == 0) {
            CHECK_EQ(around(&t, e, "span", "outer"), 1);
            CHECK(e->ns >= 3000);
            if (strcmp(e->name, "second") == 0) CHECK_EQ(around(&t, e, "span", "first"), 0);
        }
        if (strcmp(e->name, "forward") == 0) CHECK_EQ(around(&t, e, "span", "step"), 1);
        if (strcmp(e->name, "next waits") == 0) {
            CHECK_EQ(around(&t, e, "span", "step"), 1);
            ++waits;
        }
        if (strcmp(e->name, "loss") == 0) CHECK(e->value == 0.5);
    }
    CHECK(waits > 0);
    CHECK_EQ(m.warnings, 0);
    trace_free(&t);
    remove_files();
}

static void spans_on_workers(void) { spans_of_calls_and_steps(3); }
static void spans_on_one_worker(void) { spans_of_calls_and_steps(1); }
static void spans_inline(void) { spans_of_calls_and_steps(0); }

/* Of spans that begin at the same time the longer one is first, as viewers want it. */
static void spans_that_begin_together(void) {
    messages m;
    const spdl_pipeline_desc desc = desc_of(1, file_named("t.json"), &m);
    spdl_pipeline *p = short_pipeline(&desc);
    spdl__track *consumer = &p->trace->track[p->workers];
    static const char *const order[] = { "before", "outer", "inner", "inner" };
    size_t found = 0;
    trace t;
    spdl_pipeline_trace_begin(p, "before");
    spdl_pipeline_trace_end(p);
    spdl_pipeline_trace_begin(p, "outer");
    for (int i = 0; i < 2; ++i) {
        spdl_pipeline_trace_begin(p, "inner");
        spdl_pipeline_trace_end(p);
    }
    spdl_pipeline_trace_end(p);
    REQUIRE(consumer->count == 4);
    consumer->records[3].end = consumer->records[2].end + 1;
    consumer->records[1].end = consumer->records[2].end;
    for (int i = 1; i < 3; ++i) consumer->records[i].begin = consumer->records[3].begin;
    spdl_pipeline_destroy(p);
    t = trace_read(file_named("t.json"));
    for (size_t i = 0; i < t.count; ++i)
        if (strcmp(t.events[i].cat, "span") == 0)
            if (CHECK(found < 4)) CHECK_STR(t.events[i].name, order[found++]);
    CHECK_EQ(found, 4);
    trace_free(&t);
    remove_files();
}

enum { TOO_DEEP = 40 };

/* What does not go together: ends too many and too few, too deep, in calls that fail. */
SPDL_FN(unbalanced, void, void) {
    const uint64_t n = spdl_sequence(task) % 4;
    *out = in;
    if (n == 0) {
        for (int i = 0; i < 3; ++i) spdl_trace_end(task);
        return SPDL_OK;
    }
    if (n == 1) {
        for (int i = 0; i < TOO_DEEP; ++i) spdl_trace_begin(task, "deep");
        for (int i = 0; i < TOO_DEEP; ++i) spdl_trace_end(task);
        return SPDL_OK;
    }
    spdl_trace_begin(task, "open");
    spdl_trace_begin(task, NULL);
    return n == 2 ? SPDL_OK : spdl_fail(task, "with open spans");
}

static void unbalanced_spans_end_with_their_call(void) {
    const char *path = file_named("t.json");
    static uintptr_t items = 40;
    for (int workers = 0; workers < 3; ++workers) {
        messages m;
        const spdl_pipeline_desc desc = desc_of(workers, path, &m);
        spdl_pipeline *p;
        spdl_stats stats;
        trace t;
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_SOURCE(numbers, .ctx = &items),
            SPDL_PIPE(unbalanced, .concurrency = 2, .max_failures = -1),
            SPDL_SINK(2))) == SPDL_OK);
        spdl_pipeline_trace_end(p);
        spdl_pipeline_trace_begin(p, "never ended");
        for (int i = 0; i < TOO_DEEP; ++i) spdl_pipeline_trace_begin(p, "nor this");
        run_to_the_end(p, false, &stats);
        CHECK_EQ(stats.stage[1].failures, items / 4);
        spdl_pipeline_destroy(p);
        t = trace_read(path);
        check_lanes(&t);
        CHECK_EQ(trace_count(&t, 'X', "span", "deep"), items / 4 * SPDL__SPANS);
        CHECK_EQ(trace_count(&t, 'X', "span", "open"), items / 4 * 2);
        CHECK_EQ(trace_count(&t, 'X', "span", ""), items / 4 * 2);
        CHECK_EQ(trace_count(&t, 'X', "span", "never ended"), 1);
        CHECK_EQ(trace_count(&t, 'X', "span", "nor this"), SPDL__SPANS - 1);
        for (size_t i = 0; i < t.count; ++i)
            if (strcmp(t.events[i].name, "open") == 0)
                CHECK_EQ(around(&t, &t.events[i], "task", "unbalanced"), 1);
        CHECK_EQ(m.warnings, 1); /* how many items were dropped */
        trace_free(&t);
        remove(path);
    }
    remove_files();
}

static void counters_and_names_are_json(void) {
    static const double values[] = { 0, -1.5, 1e-30, 123456789012345680.0, -2e300, 5e-324 };
    static char name[4000];
    const char *path = file_named("t.json");
    messages m;
    spdl_pipeline_desc desc = desc_of(1, path, &m);
    const volatile double zero = 0;
    spdl_pipeline *p = short_pipeline(&desc);
    size_t count = 0;
    trace t;
    memset(name, '"', sizeof name - 1);
    for (size_t i = 0; i < sizeof values / sizeof values[0]; ++i)
        spdl_pipeline_trace_counter(p, "of \"all\"\n\xff kinds", values[i]);
    spdl_pipeline_trace_counter(p, "no number", zero / zero);
    spdl_pipeline_trace_counter(p, "no number", 1 / zero);
    spdl_pipeline_trace_counter(p, "no number", -1 / zero);
    for (int i = 0; i < 100; ++i) {
        spdl_pipeline_trace_begin(p, name);
        spdl_pipeline_trace_counter(p, name, i);
        spdl_pipeline_trace_end(p);
    }
    spdl_pipeline_destroy(p);
    t = trace_read(path); /* as it is written: by time */
    for (size_t i = 0; i < t.count; ++i) {
        const event *e = &t.events[i];
        if (e->phase != 'C' || strncmp(e->name, "of ", 3) != 0) continue;
        CHECK_STR(e->name, "of \\u0022all\\u0022\\u000a\\ufffd kinds");
        if (CHECK(count < sizeof values / sizeof values[0])) {
            const double off = e->value - values[count];
            CHECK(off == 0 || (off < 0 ? -off : off) <= 1e-9 * (values[count] < 0 ? -1 : 1) *
                                                            values[count]);
        }
        ++count;
    }
    CHECK_EQ(count, sizeof values / sizeof values[0]);
    CHECK_EQ(trace_count(&t, 'C', "", "no number"), 0);
    CHECK_EQ(trace_count(&t, 'X', "span", NULL), 100);
    trace_free(&t);
    remove_files();
}

static spdl_task *kept_task;

SPDL_FN(keeps_task, void, void) {
    kept_task = task;
    *out = in;
    return SPDL_OK;
}

/* Without a trace they are nothing, wherever they are called; with one a task is good for its call
   only. */
static void spans_elsewhere_are_reported(void) {
    static uintptr_t items = 10;
    for (int on = 0; on < 2; ++on) {
        messages m;
        const spdl_pipeline_desc desc = desc_of(1, on ? file_named("t.json") : "", &m);
        spdl_pipeline *p;
        spdl_stats stats;
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_SOURCE(numbers, .ctx = &items), SPDL_PIPE(keeps_task), SPDL_SINK(2))) == SPDL_OK);
        run_to_the_end(p, false, &stats);
        m.others = 0;
        spdl_trace_begin(kept_task, "late");
        spdl_trace_end(kept_task);
        CHECK_EQ(m.others, on ? 2 : 0);
        spdl_pipeline_trace_begin(p, "step");
        spdl_pipeline_trace_counter(p, "loss", 1);
        spdl_pipeline_trace_end(p);
        CHECK_EQ(m.others, on ? 2 : 0);
        spdl_pipeline_destroy(p);
        if (on) {
            trace t = trace_read(file_named("t.json"));
            CHECK_EQ(trace_count(&t, 'X', "span", NULL), 1);
            trace_free(&t);
        }
    }
    remove_files();
}

/* --- memory --- */

typedef struct memory {
    int left; /* allocations that succeed */
    int alive;
} memory;

static void *memory_alloc(size_t bytes, size_t align, void *user) {
    memory *of = (memory *)user;
    void *block = of->left-- <= 0 ? NULL : test_memory(align, bytes);
    if (block == NULL) return NULL;
    ++of->alive;
    return block;
}

static void memory_free(void *block, size_t bytes, void *user) {
    memset(block, 0xdd, bytes);
    test_memory_free(block);
    --((memory *)user)->alive;
}

/* Without memory for a trace the pipeline runs without one. */
static void every_allocation_fails(void) {
    const char *path = file_named("t.json");
    bool traced = false;
    int untraced = 0;
    for (int limit = 0; limit < 100 && !traced; ++limit) {
        memory of = { limit, 0 };
        messages m;
        spdl_pipeline_desc desc = desc_of(0, path, &m);
        spdl_pipeline *p;
        spdl_stats stats;
        desc.allocator = (spdl_allocator){ memory_alloc, memory_free, &of };
        desc.trace_events = 100;
        if (spdl_pipeline_create(&p, &desc, SPDL_STAGES(
                SPDL_SOURCE(numbers, .ctx = (void *)(uintptr_t)&thousand), SPDL_PIPE(pass),
                SPDL_SINK(3))) == SPDL_OK) {
            run_to_the_end(p, false, &stats);
            CHECK_EQ(stats.delivered, thousand);
            spdl_pipeline_destroy(p);
            traced = of.left >= 0;
            untraced += !traced;
            CHECK(m.warnings == 1); /* why there is none, or that events were dropped */
        }
        CHECK_EQ(of.alive, 0);
    }
    CHECK(traced);
    CHECK_EQ(untraced, 1);
    remove_files();
}

/* --- where the time went --- */

typedef struct split {
    double cpu, runnable, blocked; /* shares of busy_ns */
    spdl_stage_stats stage;
    double used; /* processor time of the whole process meanwhile, as a share of busy_ns */
} split;

static uint64_t clock_ns(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

static split split_of(spdl_stage row, int workers, uintptr_t items) {
    const spdl_stage rows[] = { SPDL_SOURCE(numbers, .ctx = &items), row, SPDL_SINK(8) };
    messages m;
    const spdl_pipeline_desc desc = desc_of(workers, "", &m);
    uint64_t before;
    spdl_pipeline *p;
    spdl_stats stats;
    split s;
    REQUIRE(spdl_pipeline_create(&p, &desc, rows, 3) == SPDL_OK);
    before = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
    run_to_the_end(p, false, &stats);
    s.stage = stats.stage[1];
    s.used = (double)(clock_ns(CLOCK_PROCESS_CPUTIME_ID) - before) / (double)s.stage.busy_ns;
    s.cpu = (double)s.stage.cpu_ns / (double)s.stage.busy_ns;
    s.runnable = (double)s.stage.runnable_ns / (double)s.stage.busy_ns;
    s.blocked = (double)s.stage.blocked_ns / (double)s.stage.busy_ns;
    CHECK_EQ(s.stage.cpu_ns + s.stage.runnable_ns + s.stage.blocked_ns, s.stage.busy_ns);
    CHECK(s.stage.split_calls > 0 && s.stage.split_calls <= s.stage.tasks);
    spdl_pipeline_destroy(p);
    return s;
}

/* Whether it holds in one of some tries: other programs may take the processor away. */
#define HOLDS(made, condition)                                                                     \
    do {                                                                                           \
        bool held = false;                                                                         \
        split s = made;                                                                            \
        for (int tries = 0; tries < 12 && !(held = (condition)); ++tries) s = made;                \
        if (!CHECK(held))                                                                          \
            fprintf(stderr, "    %s: cpu %.2f, runnable %.2f, blocked %.2f, used %.2f\n", #made,   \
                    s.cpu, s.runnable, s.blocked, s.used);                                         \
    } while (0)

#define NEEDS_SCHEDSTAT()                                                                          \
    do {                                                                                           \
        if (!exists("/proc/thread-self/schedstat")) TEST_SKIP("no /proc/thread-self/schedstat");   \
    } while (0)

typedef struct watched {
    uint64_t us;
    uintptr_t items;
    uint64_t began, cpu_began;
    double had; /* share of the time from the first call to the last that its thread computed */
} watched;

SPDL_FN(spin_watched, void, void) {
    watched *w = (watched *)spdl_ctx(task);
    if (spdl_sequence(task) == 0) {
        w->cpu_began = clock_ns(CLOCK_THREAD_CPUTIME_ID);
        w->began = spdl_time_ns();
    }
    spin_us(w->us);
    if (spdl_sequence(task) == w->items - 1)
        w->had = (double)(clock_ns(CLOCK_THREAD_CPUTIME_ID) - w->cpu_began) /
                 (double)(spdl_time_ns() - w->began);
    *out = in;
    return SPDL_OK;
}

/* At least 90 % of what their thread has had of a processor: other programs take some, and so does
   the machine that a virtual one runs on, of which the system knows nothing. */
static void computing_stages_are_on_a_processor(void) {
    static watched w[] = { { 1, 40000, 0, 0, 0 }, { 10, 6000, 0, 0, 0 }, { 100, 800, 0, 0, 0 },
                           { 3000, 30, 0, 0, 0 } };
    NEEDS_SCHEDSTAT();
    for (int i = 0; i < 4; ++i) {
        const spdl_stage row = SPDL_PIPE(spin_watched, .ctx = &w[i]);
        HOLDS(split_of(row, 1, w[i].items), s.cpu >= 0.9 * w[i].had);
        CHECK(w[i].had > 0);
    }
}

static void sleeping_stages_are_blocked(void) {
    static long us[] = { 20, 500, 5000 };
    static const uintptr_t items[] = { 1000, 150, 15 };
    NEEDS_SCHEDSTAT();
    for (int i = 0; i < 3; ++i) {
        const spdl_stage row = SPDL_PIPE(nap, .ctx = &us[i], .concurrency = 2);
        /* of a nap of 20 us, which takes 75, the system itself works for about 5, on a loaded
           machine for 20 */
        const double least = i == 0 ? 0.6 : 0.9;
        HOLDS(split_of(row, 2, items[i]), s.blocked >= least * (1 - s.runnable) &&
                                          s.blocked > 0.05);
    }
}

/* Two that compute on one processor: each waits for half of the time. (In calls much shorter than
   a turn on the processor they hardly ever wait: the turn of the other passes between calls.) */
static void crowded_stages_are_runnable(void) {
    TEST_NEEDS_LINUX();
    static uint64_t us[] = { 20000, 1000 };
    static const uintptr_t items[] = { 16, 400 };
    cpu_set_t all, one;
    NEEDS_SCHEDSTAT();
    REQUIRE(sched_getaffinity(0, sizeof all, &all) == 0);
    CPU_ZERO(&one);
    for (size_t cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++cpu)
        if (CPU_ISSET(cpu, &all)) CPU_SET(cpu, &one);
    REQUIRE(sched_setaffinity(0, sizeof one, &one) == 0);
    for (int i = 0; i < 2; ++i) {
        const spdl_stage row = SPDL_PIPE(spin, .ctx = &us[i], .concurrency = 2);
        HOLDS(split_of(row, 2, items[i]), s.cpu > s.used - 0.15 && s.cpu < s.used + 0.1 &&
                                          s.blocked <= 0.1 && s.stage.runnable_known);
        if (i == 0) /* half; more where other programs take their part of that processor */
            HOLDS(split_of(row, 2, items[i]), s.runnable >= 0.4 && s.runnable <= 1.1 - s.used);
    }
}

static double share_of(uint64_t ns, const split *s) {
    return (double)ns / (double)s->stage.busy_ns;
}

/* What the calls of a row measure themselves. */
typedef struct spent {
    uint64_t cpu_ns, slept_ns;
} spent;

/* A cost that changes: one call in a hundred sleeps, the rest computes. */
SPDL_FN(miss, void, void) {
    spent *all = (spent *)spdl_ctx(task);
    const uint64_t start = spdl_time_ns(), cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    const bool sleeps = spdl_sequence(task) % 100 == 37;
    if (spdl_sequence(task) == 0) memset(all, 0, sizeof *all);
    if (sleeps) sleep_us(2000);
    else spin_us(20);
    all->cpu_ns += clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu;
    if (sleeps) all->slept_ns += spdl_time_ns() - start;
    *out = in;
    return SPDL_OK;
}

/* Half computes and half sleeps, in calls of very different length; as measured. Where others take
   the processor, less of the time is computed, and a sleep ends later. */
static void mixed_stages_are_split(void) {
    static spent all;
    const spdl_stage row = SPDL_PIPE(miss, .ctx = &all);
    HOLDS(split_of(row, 1, 4000),
          s.cpu > share_of(all.cpu_ns, &s) - 0.2 && s.cpu < share_of(all.cpu_ns, &s) + 0.2 &&
              s.blocked + s.runnable > share_of(all.slept_ns, &s) - 0.2 &&
              s.blocked < share_of(all.slept_ns, &s) + 0.2 && s.blocked > 0.05);
}

/* The processor time that was found is what the process has used. */
static void processor_time_adds_up(void) {
    static uint64_t us = 200;
    const spdl_stage row = SPDL_PIPE(spin, .ctx = &us, .concurrency = 2);
    /* the process has threads that wait, too, and a sanitizer's */
    const double least = TEST_SANITIZED ? 0.5 : 0.7;
    HOLDS(split_of(row, 2, 600), s.cpu > least * s.used && s.cpu < 1.2 * s.used);
}

/* With SPDL_INLINE the thread in next runs the stages, and it need not be the same each time. */
static void *take_one(void *arg) {
    void *item;
    CHECK_EQ(spdl_pipeline_next((spdl_pipeline *)arg, &item, SPDL_FOREVER), SPDL_OK);
    return NULL;
}

static void meters_follow_the_thread(void) {
    static uintptr_t items = 20;
    static long us = 13500; /* asleep, that is as much as SPDL__METER_NS: each is measured */
    messages m;
    const spdl_pipeline_desc desc = desc_of(0, "", &m);
    spdl_pipeline *p;
    spdl_stats stats;
    test_thread thread;
    NEEDS_SCHEDSTAT();
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_SOURCE(numbers, .ctx = &items), SPDL_PIPE(nap, .ctx = &us), SPDL_SINK(1))) == SPDL_OK);
    take_one(p);
    spdl_pipeline_stats(p, &stats);
    CHECK_EQ(stats.stage[1].split_calls, 0); /* somebody waits for the first */
    for (int i = 0; i < 9; ++i) {
        REQUIRE(test_thread_start(&thread, take_one, p));
        test_join(thread);
        take_one(p);
    }
    spdl_pipeline_stats(p, &stats);
    CHECK(stats.stage[1].split_calls >= 8); /* at first all of them, but where a thread was gone */
    CHECK((double)stats.stage[1].blocked_ns >
          0.7 * (double)(stats.stage[1].busy_ns - stats.stage[1].runnable_ns));
    spdl_pipeline_destroy(p);
}

/* --- other tools --- */

/* The lane of a worker has the name that top, perf and gdb show. */
SPDL_FN(look_at_name, void, void) {
    char is[32] = "", expected[32];
    FILE *file = fopen("/proc/thread-self/comm", "r");
    if (file != NULL && fgets(is, sizeof is, file) != NULL) {
        snprintf(expected, sizeof expected, "loader-%d\n", spdl__task_worker(task));
        CHECK_STR(is, expected);
    }
    if (file != NULL) fclose(file);
    *out = in;
    return SPDL_OK;
}

static void threads_have_names(void) {
    TEST_NEEDS_LINUX();
    static uintptr_t items = 50;
    messages m;
    const spdl_pipeline_desc desc = desc_of(2, "", &m);
    spdl_pipeline *p;
    spdl_stats stats;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_SOURCE(numbers, .ctx = &items), SPDL_PIPE(look_at_name, .concurrency = 2),
        SPDL_SINK(3))) == SPDL_OK);
    run_to_the_end(p, false, &stats);
    spdl_pipeline_destroy(p);
}

static void probes_are_in_the_program(void) {
#if SPDL__SDT
    static const char *const names[] = { "task_begin", "task_end", "next_wait_begin",
                                         "next_wait_end" };
    char self[PATH_MAX] = "", command[PATH_MAX + 100];
    CHECK(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
    if (system("readelf --version >/dev/null 2>&1") != 0) TEST_SKIP("needs readelf (binutils)");
    for (int i = 0; i < 4; ++i) {
        snprintf(command, sizeof command,
                 "readelf -n '%s' | grep -A1 'Provider: spdl$' | grep -q 'Name: %s$'", self,
                 names[i]);
        CHECK_EQ(system(command), 0);
    }
#else
    TEST_SKIP("needs <sys/sdt.h> (systemtap-sdt-dev)");
#endif
}

TEST_TABLE(trace) {
    TEST_CASE(arrows_and_a_common_clock),
    TEST_CASE(whole_run_on_workers),
    TEST_CASE(whole_run_inline),
    TEST_CASE(a_source_that_is_left_is_not_printed),
    TEST_CASE(branches_on_a_pool),
    TEST_CASE(drops_failures_and_batches_of_batches),
    TEST_CASE(numbers_that_are_no_results_are_failures),
    TEST_CASE(times_are_what_they_were),
    TEST_CASE(environment_asks_for_a_trace),
    TEST_CASE(latest_events_are_kept_and_the_rest_counted),
    TEST_CASE(processes_have_their_own_files),
    TEST_CASE(bad_files_are_one_warning),
    TEST_CASE(malformed_options_are_one_warning),
    TEST_CASE(options_without_a_file_are_one_warning),
    TEST_CASE(full_disk_is_one_warning),
    TEST_CASE(names_are_escaped),
    TEST_CASE(arguments_are_checked),
    TEST_CASE(spans_on_workers),
    TEST_CASE(spans_on_one_worker),
    TEST_CASE(spans_inline),
    TEST_CASE(spans_that_begin_together),
    TEST_CASE(unbalanced_spans_end_with_their_call),
    TEST_CASE(counters_and_names_are_json),
    TEST_CASE(spans_elsewhere_are_reported),
    TEST_CASE(every_allocation_fails),
    TEST_CASE(computing_stages_are_on_a_processor),
    TEST_CASE(sleeping_stages_are_blocked),
    TEST_CASE(crowded_stages_are_runnable),
    TEST_CASE(mixed_stages_are_split),
    TEST_CASE(processor_time_adds_up),
    TEST_CASE(meters_follow_the_thread),
    TEST_CASE(threads_have_names),
    TEST_CASE(probes_are_in_the_program),
    TEST_END
};
