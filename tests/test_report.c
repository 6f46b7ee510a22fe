/* Reports: intervals, JSON lines, the table on stderr, switches of the environment, and everything
   that can be wrong with them. tests/check_report.sh has the page and a browser. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "test.h"

#include <locale.h>
#include <math.h>

static void sleep_ms(double ms) { test_sleep_us((int64_t)(ms * 1e3)); }

/* --- a place for files, and what stderr and the logger got --- */

typedef struct world {
    char folder[64], file[128], captured[128];
    int stderr_before;
    char warned[2000]; /* every warning, each with a newline */
    int warnings;
    test_mutex lock;
} world;

static void world_log(spdl_log_level level, const char *text, void *user) {
    world *w = (world *)user;
    if (level != SPDL_LOG_WARN) return;
    test_lock(&w->lock); /* any thread */
    snprintf(w->warned + strlen(w->warned), sizeof w->warned - strlen(w->warned), "%s\n", text);
    ++w->warnings;
    test_unlock(&w->lock);
}

static void world_open(world *w) {
    memset(w, 0, sizeof *w);
    w->lock = (test_mutex)TEST_MUTEX;
    test_folder(w->folder, sizeof w->folder);
    snprintf(w->captured, sizeof w->captured, "%s/stderr", w->folder);
    w->stderr_before = dup(2);
    test_setenv("SPDL_STATS", NULL);
    test_setenv("SPDL_REPORT", NULL);
}

/* stderr goes to a file, or to `path`. */
static void world_capture(world *w, const char *path) {
    const int file = open(path ? path : w->captured, O_WRONLY | O_CREAT | O_APPEND, 0666);
    REQUIRE(file >= 0);
    dup2(file, 2);
    close(file);
}

static const char *world_path(world *w, const char *name) {
    snprintf(w->file, sizeof w->file, "%s/%s", w->folder, name);
    return w->file;
}

/* What is in a file; to be freed. Empty when there is none. */
static char *read_all(const char *path) {
    FILE *file = fopen(path, "rb");
    char *text = (char *)calloc(1, 1 << 22);
    REQUIRE(text != NULL);
    if (file != NULL && fread(text, 1, (1 << 22) - 1, file) == 0) text[0] = '\0';
    if (file != NULL) fclose(file);
    return text;
}

static void world_close(world *w) {
    dup2(w->stderr_before, 2);
    close(w->stderr_before);
    if (!test_folder_remove(w->folder)) fprintf(stderr, "    %s is left\n", w->folder);
}

static bool says(const char *text, const char *words) { return strstr(text, words) != NULL; }

static int count_of(const char *text, const char *words) {
    int count = 0;
    for (const char *at = strstr(text, words); at; at = strstr(at + 1, words)) ++count;
    return count;
}

/* --- a pipeline --- */

SPDL_FN(endless, void, void) {
    *out = (void *)(uintptr_t)(spdl_sequence(task) + 1);
    return SPDL_OK;
}

SPDL_FN(some, void, void) {
    if (spdl_sequence(task) == *(const uint64_t *)spdl_ctx(task)) return SPDL_END;
    *out = (void *)(uintptr_t)(spdl_sequence(task) + 1);
    return SPDL_OK;
}

SPDL_FN(work, void, void) {
    sleep_ms(0.5);
    *out = in;
    return SPDL_OK;
}

static spdl_pipeline *pipeline_named(world *w, const spdl_report_desc *report, const char *stage) {
    spdl_pipeline_desc desc = { 0 };
    spdl_pipeline *p;
    desc.workers = 2;
    desc.logger.log_fn = world_log;
    desc.logger.user = w;
    desc.report = report;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(SPDL_SOURCE(endless),
                                                        SPDL_PIPE(work, .name = stage),
                                                        SPDL_SINK(3))) == SPDL_OK);
    return p;
}

static spdl_pipeline *pipeline_of(world *w, const spdl_report_desc *report) {
    return pipeline_named(w, report, "decode");
}

static void take(spdl_pipeline *p, int items) {
    void *item;
    while (items-- > 0) CHECK_EQ(spdl_pipeline_next(p, &item, SPDL_FOREVER), SPDL_OK);
}

/* Takes items for so long; returns how many. */
static int take_for(spdl_pipeline *p, double ms) {
    const uint64_t end = spdl_time_ns() + (uint64_t)(ms * 1e6);
    int items = 0;
    for (; spdl_time_ns() < end; ++items) take(p, 1);
    return items;
}

/* Takes items until so many lines are in a file, for 10 s at most. */
static void take_until(spdl_pipeline *p, const char *path, int lines) {
    for (int tries = 0, found = 0; tries < 500 && found < lines; ++tries) {
        char *text;
        take_for(p, 20);
        text = read_all(path);
        found = count_of(text, "\n");
        free(text);
    }
}

/* --- a reader of JSON, strict, so that what we write can be relied on --- */

static const char *json_skip(const char *at);

static const char *json_string(const char *at) {
    if (at == NULL || *at++ != '"') return NULL;
    while (*at != '"') {
        const int length = spdl__utf8(at);
        if (length == 0 || (unsigned char)*at < 0x20) return NULL;
        if (*at == '\\' && at[1] != 'u') return NULL; /* the only one that we write */
        at += *at == '\\' ? 2 : length;
    }
    return at + 1;
}

static const char *json_list(const char *at, bool object) {
    const char end = object ? '}' : ']';
    if (*++at == end) return at + 1;
    for (;; ++at) {
        if (object) {
            at = json_string(at);
            if (at == NULL || *at++ != ':') return NULL;
        }
        at = json_skip(at);
        if (at == NULL) return NULL;
        if (*at == end) return at + 1;
        if (*at != ',') return NULL;
        if (at[1] == '\n') ++at;
    }
}

/* Behind the value at `at`; NULL when it is none. */
static const char *json_skip(const char *at) {
    static const char *const words[] = { "true", "false", "null" };
    char *end;
    while (*at == '\n') ++at;
    if (*at == '"') return json_string(at);
    if (*at == '{' || *at == '[') return json_list(at, *at == '{');
    for (int i = 0; i < 3; ++i)
        if (strncmp(at, words[i], strlen(words[i])) == 0) return at + strlen(words[i]);
    (void)strtod(at, &end);
    return end != at && (*at == '-' || (*at >= '0' && *at <= '9')) ? end : NULL;
}

/* The number behind the first `"key":` after `place`, a part of the text. */
static double json_number(const char *text, const char *place, const char *key) {
    char quoted[64];
    const char *at = strstr(text, place);
    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    if (at != NULL) at = strstr(at, quoted);
    if (!CHECK(at != NULL)) return -1;
    return strtod(at + strlen(quoted), NULL);
}

/* --- intervals --- */

enum { CALLS = 200 };

typedef struct seen {
    int calls;
    spdl_stats interval[CALLS], total[CALLS];
} seen;

static void on_report(const spdl_stats *interval, const spdl_stats *total, void *user) {
    seen *s = (seen *)user;
    if (s->calls == CALLS) return;
    s->interval[s->calls] = *interval;
    s->total[s->calls++] = *total;
}

/* The intervals add up to the whole, count by count, and the last one is told by destroy. */
static void intervals_add_up(void) {
    seen *s = (seen *)calloc(1, sizeof *s);
    spdl_report_desc report = { 0 };
    uint64_t delivered = 0, tasks = 0, busy = 0, wait = 0, step = 0, elapsed = 0, first = 0;
    spdl_pipeline *p;
    world w;
    int taken;
    REQUIRE(s != NULL);
    world_open(&w);
    report.every = 0.02;
    report.report_fn = on_report;
    report.user = s;
    p = pipeline_of(&w, &report);
    taken = take_for(p, 200);
    spdl_pipeline_destroy(p);
    REQUIRE(s->calls >= 3);
    for (int i = 0; i < s->calls; ++i) {
        const spdl_stats *now = &s->interval[i];
        delivered += now->delivered;
        tasks += now->stage[1].tasks;
        busy += now->stage[1].busy_ns;
        wait += now->wait_ns;
        step += now->step_ns;
        elapsed += now->elapsed_ns;
        first += now->first_item_ns;
        CHECK(now->edge[1].readiness >= 0 && now->edge[1].readiness <= 1);
        /* a call is counted before its time is */
        if (now->stage[1].tasks > (uint64_t)now->stage[1].concurrency)
            CHECK(now->stage[1].max_ns >= 400000);
        CHECK_EQ(s->total[i].delivered, delivered);
    }
    CHECK_EQ(delivered, taken);
    CHECK_EQ(tasks, s->total[s->calls - 1].stage[1].tasks);
    CHECK_EQ(busy, s->total[s->calls - 1].stage[1].busy_ns);
    CHECK_EQ(wait, s->total[s->calls - 1].wait_ns);
    CHECK_EQ(elapsed, s->total[s->calls - 1].elapsed_ns);
    CHECK_EQ(first, s->total[0].first_item_ns);
    CHECK(step >= s->total[s->calls - 1].step_ns);
    CHECK_EQ(w.warnings, 0);
    free(s);
    world_close(&w);
}

/* A limit that has changed: the last text says which most intervals had, and gives no settings. */
static void intervals_with_several_limits(void) {
    static spdl__reporter r;
    static char text[4000];
    spdl_stats *s = &r.interval;
    spdl__text out;
    memset(&r, 0, sizeof r);
    s->elapsed_ns = 1000000000;
    s->wait_ns = 900000000;
    s->delivered = 100;
    s->workers = 8;
    s->stage_count = 2;
    for (int i = 0; i < 2; ++i) {
        snprintf(s->stage[i].name, sizeof s->stage[i].name, i ? "b" : "a");
        s->stage[i].kind = SPDL_KIND_PIPE;
        s->stage[i].concurrency = 1;
    }
    s->stage[0].tasks = s->stage[1].tasks = 100;
    s->stage[0].mean_ns = s->stage[1].mean_ns = 9000000;
    r.now = *s;
    for (int i = 0; i < 10; ++i) {
        s->stage[0].busy_ns = i < 7 ? 950000000 : 1000000;
        s->stage[1].busy_ns = i < 7 ? 1000000 : 950000000;
        spdl__report_limit(&r);
        CHECK_EQ(spdl__report_change(&r) != NULL, i > 6);
    }
    CHECK_STR(r.change.text, "The limit changed: in 7 of 10 intervals it was too few calls at a "
                             "time of stage 0 'a'.");
    for (int json = 0; json < 2; ++json) { /* the table and the page have the same last word */
        out = spdl__text_start(text, sizeof text);
        if (json) spdl__json_verdict(&out, s, spdl__report_change(&r));
        else spdl__stats_write(&out, s, spdl__report_change(&r));
        CHECK(says(text, "was busy 95 %") && says(text, "The limit changed: in 7 of 10"));
        CHECK(!says(text, "Write "));
    }
    out = spdl__text_start(text, sizeof text);
    spdl__stats_write(&out, s, NULL);
    CHECK(says(text, "Write .concurrency = 2"));
    memset(r.often, 0, sizeof r.often); /* and a limit that is no row */
    for (int i = 0; i < 10; ++i) {
        s->wait_ns = i < 7 ? 0 : 900000000;
        s->step_ns = 1000000000 - s->wait_ns;
        spdl__report_limit(&r);
    }
    CHECK_STR(r.change.text, "The limit changed: in 7 of 10 intervals it was the consumer.");
    out = spdl__text_start(text, sizeof text); /* the others agree on what to write */
    spdl__stats_write(&out, s, spdl__report_change(&r));
    CHECK(says(text, "Write .concurrency = 2") && says(text, "it was the consumer."));
}

/* Percentiles of an interval are those of its own calls. */
SPDL_FN(slower, void, void) {
    sleep_ms(*(const double *)spdl_ctx(task));
    *out = in;
    return SPDL_OK;
}

static void intervals_have_their_own_percentiles(void) {
    spdl__since *since = (spdl__since *)calloc(1, sizeof *since);
    static spdl_stats now, part;
    double ms = 0.3;
    spdl_pipeline_desc desc = { 0 };
    spdl_pipeline *p;
    REQUIRE(since != NULL);
    desc.workers = SPDL_INLINE; /* all runs inside of next */
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(SPDL_SOURCE(endless),
                                                        SPDL_PIPE(slower, .ctx = &ms),
                                                        SPDL_SINK(1))) == SPDL_OK);
    take(p, 20);
    spdl_pipeline_stats(p, &now);
    spdl__since_take(p, since, &now, &part);
    CHECK(part.stage[1].p50_ns >= 280000 && part.stage[1].p50_ns < 5000000);
    ms = 8;
    take(p, 10);
    spdl_pipeline_stats(p, &now);
    spdl__since_take(p, since, &now, &part);
    CHECK(part.stage[1].p50_ns >= 7500000);
    CHECK(part.stage[1].max_ns >= part.stage[1].p99_ns);
    CHECK(part.stage[1].max_ns <= now.stage[1].max_ns);
    ms = 0.3; /* the longest of an interval is not that of the run */
    take(p, 5);
    spdl_pipeline_stats(p, &now);
    spdl__since_take(p, since, &now, &part);
    CHECK(part.stage[1].max_ns >= part.stage[1].p99_ns);
    CHECK(part.stage[1].max_ns < 7500000);
    CHECK(now.stage[1].p50_ns < 7500000);
    spdl_pipeline_stats(p, &now);
    spdl__since_take(p, since, &now, &part); /* nothing came: nothing is told of what was before */
    CHECK_EQ(part.stage[1].tasks, 0);
    CHECK_EQ(part.stage[1].p99_ns, 0);
    CHECK_EQ(part.stage[1].max_ns, 0);
    CHECK_EQ(part.stage[1].cpu_ns + part.stage[1].blocked_ns, 0);
    CHECK_EQ(part.stage[1].split_calls, 0);
    spdl_pipeline_destroy(p);
    free(since);
}

/* Any program can subtract: counters are those since then, and shares of them, too. */
static void numbers_since_a_moment(void) {
    static spdl_stats before, now, all;
    double ms = 2;
    spdl_pipeline_desc desc = { .workers = SPDL_INLINE };
    spdl_pipeline *p;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(SPDL_SOURCE(endless),
                                                        SPDL_PIPE(slower, .ctx = &ms),
                                                        SPDL_SINK(1))) == SPDL_OK);
    spdl_pipeline_stats(p, &before);
    for (int i = 0; i < 3; ++i) {
        take(p, 4 + i);
        spdl_pipeline_stats(p, &now);
        all = now;
        spdl_stats_since(&now, &before);
        CHECK_EQ(now.delivered, 4 + i);
        CHECK_EQ(now.stage[1].tasks, all.stage[1].tasks - before.stage[1].tasks);
        CHECK_EQ(now.edge[1].items, all.edge[1].items - before.edge[1].items);
        CHECK_EQ(now.elapsed_ns, all.elapsed_ns - before.elapsed_ns);
        CHECK_EQ(now.first_item_ns == 0, i > 0);
        CHECK_EQ(now.step_mean_ns, now.step_ns / now.delivered);
        CHECK_EQ(now.stage[1].p50_ns, all.stage[1].p50_ns);
        CHECK_EQ(now.step_max_ns, all.step_max_ns);
        before = all;
    }
    spdl_pipeline_destroy(p);
}

/* An edge that is empty for a whole interval reads 0, and the wait that still runs is counted. */
SPDL_FN(nothing_yet, void, void) {
    while (!spdl_stopping(task)) sleep_ms(0.3);
    return SPDL_END;
}

static void *wait_for_one(void *pipeline) {
    void *item;
    CHECK_EQ(spdl_pipeline_next((spdl_pipeline *)pipeline, &item, SPDL_FOREVER), SPDL_CLOSED);
    return NULL;
}

static void intervals_without_an_item(void) {
    seen *s = (seen *)calloc(1, sizeof *s);
    spdl_report_desc report = { 0 };
    spdl_pipeline_desc desc = { 0 };
    spdl_pipeline *p;
    test_thread trainer;
    REQUIRE(s != NULL);
    report.every = 0.03;
    report.report_fn = on_report;
    report.user = s;
    desc.workers = 2;
    desc.report = &report;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(SPDL_SOURCE(nothing_yet), SPDL_PIPE(work),
                                                        SPDL_SINK(3))) == SPDL_OK);
    REQUIRE(test_thread_start(&trainer, wait_for_one, p));
    sleep_ms(160);
    spdl_pipeline_stop(p, SPDL_FOREVER);
    test_join(trainer);
    spdl_pipeline_destroy(p);
    REQUIRE(s->calls >= 3);
    for (int i = 1; i < s->calls - 1; ++i) { /* whole intervals */
        const spdl_stats *now = &s->interval[i];
        for (int k = 0; k < 2; ++k) {
            CHECK(now->edge[k].readiness <= 0);
            CHECK_EQ(now->edge[k].empty_ns, now->edge[k].elapsed_ns);
            CHECK_EQ(now->edge[k].get_wait_ns, now->edge[k].elapsed_ns);
        }
        CHECK(now->elapsed_ns > 0); /* how long, is up to the machine */
        CHECK_EQ(now->wait_ns, now->elapsed_ns);
        CHECK_EQ(now->delivered, 0);
    }
    free(s);
}

/* --- JSON --- */

static void json_lines_are_what_the_schema_says(void) {
    spdl_report_desc report = { 0 };
    spdl_pipeline *p;
    world w;
    char *text, *line;
    int lines = 0, taken;
    world_open(&w);
    report.every = 0.05;
    report.json = world_path(&w, "run.jsonl");
    p = pipeline_named(&w, &report, "a \"quoted\" <name>\n\xff\xc3\xa9");
    taken = take_for(p, 180);
    spdl_pipeline_destroy(p);
    text = read_all(w.file);
    for (line = strtok(text, "\n"); line != NULL; line = strtok(NULL, "\n")) {
        const char *end = json_skip(line);
        ++lines;
        if (!CHECK(end != NULL && *end == '\0')) break;
        CHECK(strstr(line, "{\"schema\":\"spdl.stats.1\",\"version\":\"") == line);
        CHECK(says(line, ",\"pipeline\":\"spdl\",\"pid\":"));
        CHECK_EQ(json_number(line, "{", "pid"), getpid());
        CHECK(says(line, "\"name\":\"a \\u0022quoted\\u0022 \\u003cname\\u003e\\u000a\\ufffd"
                         "\xc3\xa9\""));
        CHECK(json_number(line, "\"total\"", "elapsed_ns") > 0);
        CHECK_EQ(count_of(line, "\"elapsed_ns\""), 1); /* the numbers are there once */
        CHECK(json_number(line, "\"stages\"", "load") >= 0);
        CHECK(json_number(line, "\"total\"", "split_calls") >= 0);
        CHECK(says(line, "\"runnable_ns\":") && says(line, "\"finding\":{\"limit\":\""));
        CHECK(json_number(line, "\"process\"", "cores_allowed") > 0);
        CHECK(json_number(line, "\"process\"", "resident_bytes") >= TEST_LINUX * 100000);
        if (says(line, "\"final\":true"))
            CHECK_EQ(json_number(line, "\"total\"", "delivered"), taken);
    }
    CHECK(lines >= 3);
    free(text);
    text = read_all(w.file);
    CHECK_EQ(count_of(text, "\"final\":true"), 1);
    CHECK_EQ(w.warnings, 0);
    free(text);
    world_close(&w);
}

/* Two pipelines at the same time, one after them: all lines are there, none is torn. */
static void json_lines_of_several_pipelines(void) {
    spdl_report_desc report = { 0 };
    spdl_pipeline *p[3];
    world w;
    char *text, *line;
    int lines = 0;
    world_open(&w);
    report.every = 0.01;
    report.json = world_path(&w, "run.jsonl");
    p[0] = pipeline_of(&w, &report);
    p[1] = pipeline_of(&w, &report);
    for (int i = 0; i < 40; ++i) take(p[i % 2], 3);
    spdl_pipeline_destroy(p[0]);
    spdl_pipeline_destroy(p[1]);
    p[2] = pipeline_of(&w, &report);
    spdl_pipeline_destroy(p[2]);
    text = read_all(w.file);
    CHECK_EQ(count_of(text, "\"final\":true"), 3);
    for (line = strtok(text, "\n"); line != NULL; line = strtok(NULL, "\n"), ++lines) {
        const char *end = json_skip(line);
        CHECK(end != NULL && *end == '\0');
    }
    CHECK(lines >= 3);
    free(text);
    world_close(&w);
}

/* Numbers and names as large as they get fit, and stay JSON. */
static void json_of_the_largest_pipeline(void) {
    const size_t bytes = 2 * (8192 + 3072 * (size_t)SPDL_MAX_STAGES);
    char *text = (char *)malloc(bytes);
    spdl_stats stats;
    spdl__text twice = spdl__text_start(text, bytes);
    REQUIRE(text != NULL);
    memset(&stats, 0xff, sizeof stats);
    stats.stage_count = SPDL_MAX_STAGES;
    stats.next_works = stats.shared_pool = stats.may_doctor = false;
    for (int i = 0; i < SPDL_MAX_STAGES; ++i) {
        memset(stats.stage[i].name, 1, SPDL_NAME_BYTES); /* each takes six bytes */
        stats.stage[i].deferred = stats.stage[i].runnable_known = false;
        stats.stage[i].alone = stats.stage[i].in_order = stats.stage[i].lock_found = false;
        stats.stage[i].from = false;
        stats.stage[i].name[SPDL_NAME_BYTES - 1] = '\0';
        stats.edge[i].readiness = 1;
    }
    spdl__json_stats(&twice, &stats, NULL);
    spdl__json_stats(&twice, &stats, NULL);
    CHECK(twice.length + 2048 < bytes);
    CHECK(json_skip(text) == text + twice.length / 2);
    free(text);
}

/* --- stderr --- */

static void table_on_stderr(void) {
    spdl_report_desc report = { 0 };
    spdl_pipeline *p;
    world w;
    char *text;
    world_open(&w);
    world_capture(&w, NULL);
    report.every = 0.05;
    report.table = true;
    p = pipeline_of(&w, &report);
    take_for(p, 130);
    spdl_pipeline_destroy(p);
    dup2(w.stderr_before, 2);
    text = read_all(w.captured);
    CHECK(strncmp(text, "spdl  at ", 9) == 0);
    CHECK(says(text, " items\n") && says(text, ", the first after "));
    CHECK_EQ(count_of(text, "spdl  ended after "), 1);
    CHECK(says(text, "> decode") && says(text, " p99 ") && says(text, "cores used"));
    CHECK_EQ(count_of(text, " decode "), count_of(text, "cores used"));
    free(text);
    world_close(&w);
}

/* A run below 10 ms: its numbers are those of a start. */
static void ends_that_come_too_soon(void) {
    bool found = false;
    for (int tries = 0; tries < 50 && !found; ++tries) {
        spdl_report_desc report = { 0 };
        spdl_pipeline *p;
        double time = 0;
        char unit[3] = "", *text;
        const char *after;
        world w;
        world_open(&w);
        world_capture(&w, NULL);
        report.table = true;
        p = pipeline_of(&w, &report);
        take(p, 1);
        spdl_pipeline_destroy(p);
        dup2(w.stderr_before, 2);
        text = read_all(w.captured);
        after = strstr(text, "after ");
        CHECK(after != NULL && sscanf(after, "after %lf %2s", &time, unit) == 2);
        found = says(text, "spdl  ended too soon for a sure verdict, after ");
        CHECK_EQ(found, unit[0] != 's' && (unit[0] != 'm' || time < 10));
        free(text);
        world_close(&w);
    }
    CHECK(found);
}

/* The first 100 items are slow to read, the others to decode. */
SPDL_FN(reads, void, void) {
    if ((uintptr_t)in <= 100) sleep_ms(5);
    *out = in;
    return SPDL_OK;
}

SPDL_FN(decodes, void, void) {
    if ((uintptr_t)in > 100) sleep_ms(5);
    *out = in;
    return SPDL_OK;
}

/* The last table says that no row was the limit all the time. */
static void table_at_the_end_of_two_limits(void) {
    const spdl_report_desc report = { .every = 0.05, .table = true };
    const spdl_pipeline_desc desc = { .workers = 2, .report = &report };
    static const spdl_stage rows[] = { SPDL_SOURCE(endless), SPDL_PIPE(reads), SPDL_PIPE(decodes),
                                       SPDL_SINK(3) };
    spdl_pipeline *p;
    world w;
    char *text;
    world_open(&w);
    world_capture(&w, NULL);
    REQUIRE(spdl_pipeline_create(&p, &desc, rows, 4) == SPDL_OK);
    take(p, 200);
    spdl_pipeline_destroy(p);
    dup2(w.stderr_before, 2);
    text = read_all(w.captured);
    CHECK(says(text, "The limit changed: in ") &&
          says(text, "it was too few calls at a time of stage "));
    free(text);
    world_close(&w);
}

/* Waits until the file has the text; a loaded machine makes a report late. */
static void await_text(const char *path, const char *wanted) {
    bool there = false;
    for (int i = 0; i < 1000 && !there; ++i) {
        char *text;
        sleep_ms(10);
        text = read_all(path);
        there = says(text, wanted);
        free(text);
    }
    CHECK(there);
}

/* Requests: how long the answers of an interval took, and that there were none. */
static void reports_speak_of_requests(void) {
    spdl_report_desc report = { .every = 0.03, .table = true };
    spdl_pipeline_desc desc = { .workers = 1, .report = &report };
    int asked[4];
    spdl_pipeline *p;
    world w;
    char *text;
    world_open(&w);
    world_capture(&w, NULL);
    report.json = world_path(&w, "run.jsonl");
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(SPDL_FEED(void), SPDL_PIPE(work),
                                                        SPDL_SINK(9))) == SPDL_OK);
    for (int i = 0; i < 3; ++i)
        CHECK_EQ(spdl_pipeline_push(p, &asked[i], SPDL_FOREVER), SPDL_OK);
    take(p, 3);
    await_text(w.captured, "\nNothing was pushed.\n");
    CHECK_EQ(spdl_pipeline_push(p, &asked[3], SPDL_FOREVER), SPDL_OK);
    await_text(w.captured, "\nNothing was taken, though answers are ready.\n");
    spdl_pipeline_destroy(p);
    dup2(w.stderr_before, 2);
    text = read_all(w.captured);
    CHECK(says(text, " requests, ") && says(text, "\nAnswers took "));
    CHECK_EQ(w.warnings, 0);
    free(text);
    text = read_all(w.file);
    CHECK(says(text, "\"kind\":\"feed\"") && says(text, "\"answer_wait_ns\":"));
    free(text);
    world_close(&w);
}

/* --- the environment --- */

static void environment_asks_for_everything(void) {
    spdl_pipeline *p;
    char *text;
    world w;
    world_open(&w);
    world_capture(&w, NULL);
    test_setenv("SPDL_STATS", "0.05");
    test_setenv("SPDL_REPORT", world_path(&w, "run.jsonl"));
    p = pipeline_of(&w, NULL);
    take_for(p, 120);
    spdl_pipeline_destroy(p);
    dup2(w.stderr_before, 2);
    text = read_all(w.captured);
    CHECK(count_of(text, "decode") >= 2 && says(text, "ended after"));
    free(text);
    text = read_all(w.file);
    CHECK(count_of(text, "spdl.stats.1") >= 2);
    free(text);
    CHECK_EQ(w.warnings, 0);
    world_close(&w);
}

/* A file alone is quiet. */
static void environment_can_be_quiet(void) {
    spdl_pipeline *p;
    char *text;
    world w;
    world_open(&w);
    world_capture(&w, NULL);
    test_setenv("SPDL_REPORT", world_path(&w, "run.jsonl"));
    p = pipeline_of(&w, NULL);
    take(p, 5);
    spdl_pipeline_destroy(p);
    dup2(w.stderr_before, 2);
    text = read_all(w.captured);
    CHECK_STR(text, "");
    free(text);
    text = read_all(w.file);
    CHECK(says(text, "\"final\":true"));
    free(text);
    world_close(&w);
}

static void environment_that_is_off(void) {
    static const char *const off[] = { NULL, "", "0" };
    for (int i = 0; i < 3; ++i) {
        spdl_pipeline *p;
        world w;
        world_open(&w);
        if (off[i] != NULL) test_setenv("SPDL_STATS", off[i]);
        if (i == 1) test_setenv("SPDL_REPORT", "");
        p = pipeline_of(&w, NULL);
        CHECK(p->reporter == NULL); /* no thread either */
        spdl_pipeline_destroy(p);
        CHECK_EQ(w.warnings, 0);
        world_close(&w);
    }
}

/* One warning that names variable and word, and the pipeline goes on without reports. */
static void environment_that_makes_no_sense(void) {
    static const char *const words[] = { "five", "-5", "5x", "nan", "inf", "1e3", "0.001", "5,",
                                         "live", "5;live", "\xff\x1b[2J" };
    const size_t count = sizeof words / sizeof words[0];
    for (size_t i = 0; i < count; ++i) {
        spdl_pipeline *p;
        world w;
        world_open(&w);
        test_setenv("SPDL_STATS", words[i]);
        p = pipeline_of(&w, NULL);
        CHECK(p->reporter == NULL);
        take(p, 2);
        spdl_pipeline_destroy(p);
        CHECK(says(w.warned, "SPDL_STATS is \""));
        CHECK(says(w.warned, i + 1 < count ? words[i] : "\xff?[2J")); /* no terminal is steered */
        CHECK_EQ(w.warnings, 1);
        world_close(&w);
    }
}

/* A wrong SPDL_STATS changes nothing of the reports that the program wants. */
static void environment_does_not_spoil_a_desc(void) {
    static const char *const words[] = { "0.0000000001", "0.001", "100000000000", "five" };
    for (size_t i = 0; i < sizeof words / sizeof words[0]; ++i) {
        spdl_report_desc report = { .every = 3, .table = true };
        spdl_pipeline *p;
        world w;
        world_open(&w);
        world_capture(&w, NULL);
        test_setenv("SPDL_STATS", words[i]);
        p = pipeline_of(&w, &report);
        take(p, 2);
        CHECK(fabs(p->reporter->plan.desc.every - 3) < 1e-9);
        spdl_pipeline_destroy(p);
        dup2(w.stderr_before, 2);
        CHECK(says(w.warned, "SPDL_STATS is \""));
        CHECK_EQ(w.warnings, 1);
        world_close(&w);
    }
}

static void intervals_of_reports(void) {
    static const struct {
        double every, taken;
    } rows[] = { { 0, 5 }, { 0.01, 0.01 }, { 1e7, 1e7 }, { 2, 2 } };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) {
        spdl_report_desc report = { 0 };
        spdl_pipeline *p;
        world w;
        world_open(&w);
        report.every = rows[i].every;
        report.json = world_path(&w, "run.jsonl");
        p = pipeline_of(&w, &report);
        take(p, 2);
        CHECK(fabs(p->reporter->plan.desc.every - rows[i].taken) < 1e-9);
        spdl_pipeline_destroy(p);
        world_close(&w);
    }
}

/* A comma for a point: JSON and switches do not care. */
static void locales_do_not_matter(void) {
    spdl_report_desc report = { 0 };
    spdl_pipeline *p;
    char *text, shown[400];
    world w;
    world_open(&w);
    snprintf(shown, sizeof shown, "localedef -c -i de_DE -f UTF-8 %s/de_DE.UTF-8 >%s 2>&1",
             w.folder, w.captured);
    if (system(shown) == 0) test_setenv("LOCPATH", w.folder);
    (void)setlocale(LC_ALL, "de_DE.UTF-8");
    snprintf(shown, sizeof shown, "%.1f", 0.5);
    if (shown[1] != ',') {
        world_close(&w);
        TEST_SKIP("no locale with a comma");
    }
    test_setenv("SPDL_STATS", "0.02");
    world_capture(&w, NULL);
    report.json = world_path(&w, "run.jsonl");
    p = pipeline_of(&w, &report);
    CHECK(fabs(p->reporter->plan.desc.every - 0.02) < 1e-9);
    take_for(p, 60);
    spdl_pipeline_destroy(p);
    dup2(w.stderr_before, 2);
    text = read_all(w.file);
    for (char *line = strtok(text, "\n"); line != NULL; line = strtok(NULL, "\n")) {
        const char *end;
        setlocale(LC_ALL, "C"); /* for the reader */
        end = json_skip(line);
        CHECK(end != NULL && *end == '\0');
    }
    free(text);
    CHECK_EQ(w.warnings, 0);
    world_close(&w);
}

static void environment_with_long_names(void) {
    char value[3000];
    spdl_pipeline *p;
    world w;
    world_open(&w);
    memset(value, 'x', sizeof value);
    value[sizeof value - 1] = '\0';
    test_setenv("SPDL_REPORT", value);
    p = pipeline_of(&w, NULL);
    take(p, 2);
    spdl_pipeline_destroy(p);
    CHECK_EQ(w.warnings, 1);
    CHECK(strlen(w.warned) < 800);
    world_close(&w);
}

/* --- what cannot be written --- */

/* The pipeline runs and ends, and one warning says what is wrong. */
static void output_fails(const char *json, const char *why) {
    spdl_report_desc report = { 0 };
    spdl_pipeline *p;
    world w;
    world_open(&w);
    report.every = 0.01;
    report.json = json;
    p = pipeline_of(&w, &report);
    take_for(p, 60);
    spdl_pipeline_destroy(p);
    CHECK_EQ(w.warnings, 1);
    if (!CHECK(says(w.warned, why) && says(w.warned, json)))
        fprintf(stderr, "    %s", w.warned);
    world_close(&w);
}

static void files_that_cannot_be_written(void) {
    char link[160];
    world w;
    world_open(&w);
    world_path(&w, "other");
    snprintf(link, sizeof link, "%s/link.jsonl", w.folder);
    CHECK_EQ(symlink(w.file, link), 0);
    output_fails(link, "it is a symbolic link");
    CHECK(access(w.file, F_OK) != 0);
    world_close(&w);
    output_fails("/nowhere/at/all/run.jsonl", "No such file");
    output_fails("/tmp", "directory");
    if (access("/dev/full", W_OK) != 0) TEST_SKIP("no /dev/full");
    output_fails("/dev/full", "No space left");
}

/* A pipe that nobody reads: opening it does not wait, nor does writing when it is full. */
static void pipes_do_not_hold_anything_up(void) {
    world w;
    world_open(&w);
    REQUIRE(mkfifo(world_path(&w, "pipe"), 0666) == 0);
    output_fails(w.file, "No such device");
    const int reader = open(w.file, O_RDONLY | O_NONBLOCK);
    REQUIRE(reader >= 0);
    {
        spdl_report_desc report = { 0 };
        const uint64_t start = spdl_time_ns();
        spdl_pipeline *p;
        report.every = 0.01;
        report.json = w.file;
        p = pipeline_of(&w, &report);
        take_for(p, 600); /* more lines than fit */
        spdl_pipeline_destroy(p);
        CHECK_EQ(w.warnings, 1);
        CHECK(spdl_time_ns() - start < 5000000000u);
    }
    close(reader);
    world_close(&w);
}

static void stderr_that_is_closed(void) {
    spdl_report_desc report = { 0 };
    spdl_pipeline *p;
    world w;
    char *text;
    world_open(&w);
    close(2);
    report.every = 0.01;
    report.table = true;
    report.json = world_path(&w, "run.jsonl");
    p = pipeline_of(&w, &report);
    CHECK(p->reporter->json_file > 2);
    take_until(p, w.file, 2);
    spdl_pipeline_destroy(p);
    dup2(w.stderr_before, 2);
    CHECK_EQ(w.warnings, 1);
    CHECK(says(w.warned, "stderr"));
    text = read_all(w.file); /* no table in it */
    CHECK(count_of(text, "spdl.stats.1") >= 2 && !says(text, "ended after"));
    free(text);
    world_close(&w);
}

static void stderr_that_fails(void) {
    spdl_report_desc report = { 0 };
    spdl_pipeline *p;
    world w;
    if (access("/dev/full", W_OK) != 0) TEST_SKIP("no /dev/full");
    world_open(&w);
    world_capture(&w, "/dev/full");
    report.every = 0.01;
    report.table = true;
    p = pipeline_of(&w, &report);
    take_for(p, 60);
    spdl_pipeline_destroy(p);
    dup2(w.stderr_before, 2);
    CHECK_EQ(w.warnings, 1);
    CHECK(says(w.warned, "stderr") && says(w.warned, "No space left"));
    world_close(&w);
}

/* A reader that went away: no signal ends the process. */
static void stderr_that_nobody_reads(void) {
    for (int gone = 0; gone < 2; ++gone) {
        spdl_report_desc report = { 0 };
        const uint64_t start = spdl_time_ns();
        spdl_pipeline *p;
        int ends[2];
        world w;
        world_open(&w);
        REQUIRE(pipe(ends) == 0);
        dup2(ends[1], 2);
        close(ends[1]);
        if (gone) close(ends[0]);
        report.every = 0.01;
        report.table = true;
        p = pipeline_of(&w, &report);
        take_for(p, 1200); /* more tables than a pipe holds */
        spdl_pipeline_destroy(p);
        dup2(w.stderr_before, 2);
        CHECK(spdl_time_ns() - start < 6000000000u);
        CHECK_EQ(w.warnings, gone);
        if (!gone) close(ends[0]);
        world_close(&w);
    }
}

/* No thread or memory for reports: a warning, and the pipeline runs. */
static size_t allocations_left;

static void *allocate(size_t bytes, size_t align, void *user) {
    (void)user;
    if (allocations_left == 0) return NULL;
    --allocations_left;
    return test_memory(align, bytes);
}

static void release(void *memory, size_t bytes, void *user) {
    (void)bytes;
    (void)user;
    test_memory_free(memory);
}

static void reports_without_memory(void) {
    spdl_report_desc report = { 0 };
    int warned = 0, whole = 0;
    world w;
    world_open(&w);
    report.report_fn = on_report;
    report.user = calloc(1, sizeof(seen));
    REQUIRE(report.user != NULL);
    for (size_t memory = 5; memory < 40 && whole < 2; ++memory) {
        spdl_pipeline_desc desc = { 0 };
        spdl_pipeline *p;
        spdl_result result;
        w.warnings = 0;
        desc.logger.log_fn = world_log;
        desc.logger.user = &w;
        desc.allocator.alloc_fn = allocate;
        desc.allocator.free_fn = release;
        desc.report = &report;
        allocations_left = memory;
        result = spdl_pipeline_create(&p, &desc, SPDL_STAGES(SPDL_SOURCE(endless), SPDL_PIPE(work),
                                                             SPDL_SINK(3)));
        if (result != SPDL_OK) continue;
        warned += w.warnings;
        whole += w.warnings == 0;
        take(p, 3);
        spdl_pipeline_destroy(p);
    }
    CHECK_EQ(warned, 1); /* reports are one allocation */
    CHECK_EQ(whole, 2);
    free(report.user);
    world_close(&w);
}

/* --- the end --- */

/* A long interval does not hold destroy up. */
static void end_is_prompt(void) {
    double best = 1e9;
    for (int i = 0; i < 5; ++i) {
        spdl_report_desc report = { 0 };
        spdl_pipeline *p;
        uint64_t start;
        world w;
        world_open(&w);
        report.every = 3600;
        report.json = world_path(&w, "run.jsonl");
        p = pipeline_of(&w, &report);
        take(p, 3);
        sleep_ms(20);
        start = spdl_time_ns();
        spdl_pipeline_destroy(p);
        best = fmin(best, (double)(spdl_time_ns() - start) * 1e-6);
        world_close(&w);
    }
    CHECK(best < 500);
}

/* A pipeline that ends, with lines in w->file. */
static spdl_pipeline *reported(world *w, uint64_t *items, double every) {
    spdl_pipeline_desc desc = { 0 };
    spdl_report_desc report = { 0 };
    spdl_pipeline *p;
    world_open(w);
    report.every = every;
    report.json = world_path(w, "run.jsonl");
    desc.workers = 2;
    desc.report = &report;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(SPDL_SOURCE(some, .ctx = items),
                                                        SPDL_SINK(3))) == SPDL_OK);
    return p;
}

/* Waits until the file has `count` final reports, 5 s at most. */
static void await_finals(const world *w, int count) {
    int found = 0;
    for (int tries = 0; tries < 1000 && found < count; ++tries) {
        char *text;
        sleep_ms(5);
        text = read_all(w->file);
        found = count_of(text, "\"final\":true");
        free(text);
    }
}

/* The final report of an end is made once, at the next interval, and not again by destroy. */
static void end_is_told_once(void) {
    uint64_t items = 20;
    world w;
    spdl_pipeline *p = reported(&w, &items, 0.03);
    void *item;
    char *text;
    while (spdl_pipeline_next(p, &item, SPDL_FOREVER) == SPDL_OK) {}
    await_finals(&w, 1);
    sleep_ms(100); /* some intervals */
    text = read_all(w.file);
    CHECK_EQ(count_of(text, "\"final\":true"), 1);
    free(text);
    spdl_pipeline_destroy(p);
    text = read_all(w.file);
    CHECK_EQ(count_of(text, "\"final\":true"), 1);
    CHECK_EQ(json_number(strstr(text, "\"final\":true"), "\"total\":", "delivered"), 20);
    free(text);
    world_close(&w);
}

/* Items after an end have a final report of their own, also without an interval between them and
   the next end, or destroy. */
static void each_end_is_told(void) {
    uint64_t items = 20;
    world w;
    spdl_pipeline *p = reported(&w, &items, 0.02);
    void *item;
    char *text;
    for (int ends = 1; ends < 4; ++ends) {
        while (spdl_pipeline_next(p, &item, SPDL_FOREVER) == SPDL_OK) {}
        await_finals(&w, ends);
        CHECK_EQ(spdl_pipeline_rewind(p, 0, SPDL_FOREVER), SPDL_OK);
    }
    take(p, 3);
    spdl_pipeline_destroy(p);
    text = read_all(w.file);
    CHECK_EQ(count_of(text, "\"final\":true"), 4);
    CHECK(says(text, "\"delivered\":63,"));
    free(text);
    world_close(&w);
}

/* Rows of a file with another header: nothing else can be read, so stderr is told. */
static void rows_of_another_header_are_refused(void) {
    static const struct { unsigned layout; const char *text; } others[] = {
        { (unsigned)(SPDL_VERSION - 1) << 14 | 99, "spdl: these rows were compiled with "
                                                   "spdl.h " },
        { 99, "compiled with an older spdl.h, but linked to " },
        { SPDL__LAYOUT ^ 8, ", or after a macro that changes it: its structs have " },
    };
    spdl_stage rows[] = { SPDL_SOURCE(some), SPDL_SINK(1) };
    for (size_t i = 0; i < 3; ++i) {
        spdl_pipeline *p = (spdl_pipeline *)(uintptr_t)1;
        spdl_result result;
        char *text;
        world w;
        world_open(&w);
        world_capture(&w, NULL);
        rows[0].layout_ = others[i].layout;
        result = spdl_pipeline_create(&p, NULL, SPDL_TABLE(rows));
        dup2(w.stderr_before, 2);
        CHECK_EQ(result, SPDL_E_INVALID);
        CHECK(p == NULL);
        text = read_all(w.captured);
        if (!CHECK(says(text, others[i].text))) printf("%s\n", text);
        CHECK_EQ(count_of(text, "\n"), 1);
        free(text);
        world_close(&w);
    }
}

/* --- words --- */

/* Bytes that are no UTF-8 (RFC 3629): too long for what they are, halves of a pair, too large. */
static void names_that_are_no_utf8(void) {
    static const struct { const char *name, *shown; } names[] = {
        { "\xe0\xa0\x80|", "\xe0\xa0\x80|" }, { "\xe0\x9f\xbf", "???" },
        { "\xed\x9f\xbf|", "\xed\x9f\xbf|" }, { "\xed\xa0\x80", "???" },
        { "\xf0\x90\x80\x80", "\xf0\x90\x80\x80" }, { "\xf0\x8f\xbf\xbf", "????" },
        { "\xf4\x8f\xbf\xbf", "\xf4\x8f\xbf\xbf" }, { "\xf4\x90\x80\x80", "????" },
        { "\xf5\x80\x80\x80", "????" }, { "\xc1\xbf", "??" }, { "\x7f\xc2\x9f", "??" },
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; ++i) {
        char shown[40];
        spdl__text t = spdl__text_start(shown, sizeof shown);
        spdl__text_name(&t, names[i].name, -1);
        CHECK_STR(shown, names[i].shown);
    }
}

/* JSON has none but these. */
static void numbers_of_json(void) {
    static const struct { double number; const char *text; } numbers[] = {
        { 0, "0" }, { -1.5, "-1.5" }, { 1e300, "1e+300" }, { HUGE_VAL, "null" },
        { -HUGE_VAL, "null" }, { NAN, "null" },
    };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; ++i) {
        spdl__text t = spdl__text_start(NULL, 0);
        CHECK_STR(spdl__json_double(&t, numbers[i].number), numbers[i].text);
    }
}

TEST_TABLE(report) {
    TEST_CASE(intervals_add_up),
    TEST_CASE(intervals_with_several_limits),
    TEST_CASE(intervals_have_their_own_percentiles),
    TEST_CASE(numbers_since_a_moment),
    TEST_CASE(intervals_without_an_item),
    TEST_CASE(json_lines_are_what_the_schema_says),
    TEST_CASE(json_lines_of_several_pipelines),
    TEST_CASE(json_of_the_largest_pipeline),
    TEST_CASE(table_on_stderr),
    TEST_CASE(ends_that_come_too_soon),
    TEST_CASE(table_at_the_end_of_two_limits),
    TEST_CASE(reports_speak_of_requests),
    TEST_CASE(environment_asks_for_everything),
    TEST_CASE(environment_can_be_quiet),
    TEST_CASE(environment_that_is_off),
    TEST_CASE(environment_that_makes_no_sense),
    TEST_CASE(environment_with_long_names),
    TEST_CASE(environment_does_not_spoil_a_desc),
    TEST_CASE(intervals_of_reports),
    TEST_CASE(locales_do_not_matter),
    TEST_CASE(files_that_cannot_be_written),
    TEST_CASE(pipes_do_not_hold_anything_up),
    TEST_CASE(stderr_that_is_closed),
    TEST_CASE(stderr_that_fails),
    TEST_CASE(stderr_that_nobody_reads),
    TEST_CASE(reports_without_memory),
    TEST_CASE(end_is_prompt),
    TEST_CASE(end_is_told_once),
    TEST_CASE(each_end_is_told),
    TEST_CASE(rows_of_another_header_are_refused),
    TEST_CASE(names_that_are_no_utf8),
    TEST_CASE(numbers_of_json),
    TEST_END,
};
