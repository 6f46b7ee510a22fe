/* report_page.c - writes what tests/check_report.sh draws in a browser.
   usage: report_page FOLDER: slow.jsonl has a stage that limits and the doctor's line,
   hostile.jsonl names that would like to be markup, one.jsonl a single line, feed.jsonl a feed,
   cut.jsonl a last line that is not whole, branch.jsonl two paths, deferred.jsonl more calls than
   workers, hours.jsonl a day, two.jsonl two runs. */
#define SPDL__WINDOW_NS 20000000
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"

static void nap(double ms) {
    const struct timespec t = { 0, (long)(ms * 1e6) };
    nanosleep(&t, NULL);
}

SPDL_FN(count_up, void, void) {
    *out = (void *)(uintptr_t)(spdl_sequence(task) + 1);
    return SPDL_OK;
}

SPDL_FN(work, void, void) {
    nap(*(const double *)spdl_ctx(task));
    *out = in;
    return SPDL_OK;
}

static int make(const char *folder, const char *file, const char *const names[3], bool long_run) {
    static const double ms[] = { 0.4, 3, 0.2 };
    char path[1000];
    spdl_pipeline_desc desc = { 0 };
    spdl_report_desc report = { 0 };
    spdl_doctor_desc doctor = { 0 };
    spdl_pipeline *p;
    int i;
    snprintf(path, sizeof path, "%s/%s", folder, file);
    (void)remove(path);
    report.json = doctor.json = path;
    report.every = long_run ? 0.1 : 1000;
    doctor.seconds = 5;
    doctor.quiet = true;
    desc.workers = 4;
    desc.name = names[0];
    desc.report = &report;
    if (long_run) desc.doctor = &doctor;
    if (spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_SOURCE(count_up, .name = "list"),
            SPDL_PIPE(work, .name = names[1], .ctx = (void *)(uintptr_t)&ms[0]),
            SPDL_PIPE(work, .name = names[2], .ctx = (void *)(uintptr_t)&ms[1]),
            SPDL_BATCH(4),
            SPDL_PIPE(work, .name = "collate", .ctx = (void *)(uintptr_t)&ms[2]),
            SPDL_SINK(3))) != SPDL_OK)
        return 1;
    for (i = 0; i < (long_run ? 480 : 3); ++i) {
        void *batch;
        if (spdl_pipeline_next(p, &batch, SPDL_FOREVER) != SPDL_OK) return 1;
        nap(1);
        spdl_batch_free(batch);
    }
    spdl_pipeline_destroy(p);
    return 0;
}

static int make_feed(const char *folder) {
    static const double ms = 2;
    char path[1000];
    spdl_pipeline_desc desc = { 0 };
    spdl_report_desc report = { 0 };
    spdl_pipeline *p;
    void *item;
    int i;
    snprintf(path, sizeof path, "%s/feed.jsonl", folder);
    (void)remove(path);
    report.json = path;
    report.every = 0.1;
    desc.workers = 1;
    desc.report = &report;
    if (spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_FEED(void, .buffer_size = 2, .drop_oldest = true),
            SPDL_PIPE(work, .ctx = (void *)(uintptr_t)&ms), SPDL_SINK(3))) != SPDL_OK)
        return 1;
    for (i = 0; i < 600; ++i) {
        if (spdl_pipeline_push(p, p, SPDL_FOREVER) != SPDL_OK) return 1;
        while (spdl_pipeline_next(p, &item, 0) == SPDL_OK) {}
        nap(1);
    }
    spdl_pipeline_destroy(p);
    return 0;
}

SPDL_FN(either_way, void, void) {
    nap(0.1);
    *out = in;
    return spdl_route(task, (int)(spdl_sequence(task) & 1));
}

SPDL_FN(waits, void, void) {
    nap(0.01);
    (void)spdl_complete(spdl_defer(task), SPDL_OK, in);
    return SPDL_PENDING;
}

static int make_rows(const char *folder, const char *file, const spdl_stage *rows, size_t count) {
    char path[1000];
    spdl_pipeline_desc desc = { 0 };
    spdl_report_desc report = { 0 };
    spdl_pipeline *p;
    void *item;
    int i;
    snprintf(path, sizeof path, "%s/%s", folder, file);
    (void)remove(path);
    report.json = path;
    report.every = 0.05;
    desc.workers = 2;
    desc.report = &report;
    if (spdl_pipeline_create(&p, &desc, rows, count) != SPDL_OK) return 1;
    for (i = 0; i < 300; ++i) {
        if (spdl_pipeline_next(p, &item, SPDL_FOREVER) != SPDL_OK) return 1;
        nap(1);
    }
    spdl_pipeline_destroy(p);
    return 0;
}

/* The lines of one file in another: `times` of them, without the last `cut` bytes, each `stretch`
   times as late. */
static int make_of(const char *folder, const char *from, const char *to, int times, long cut) {
    static char text[1 << 20];
    char path[1000];
    FILE *file;
    size_t bytes;
    int i;
    snprintf(path, sizeof path, "%s/%s", folder, from);
    if ((file = fopen(path, "rb")) == NULL) return 1;
    bytes = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[bytes] = '\0';
    snprintf(path, sizeof path, "%s/%s", folder, to);
    if ((file = fopen(path, "wb")) == NULL) return 1;
    for (i = 0; i < times; ++i) {
        char *run;
        fwrite(text, 1, bytes - (size_t)cut, file);
        for (run = text; (run = strstr(run, "\"run\":1")) != NULL; ++run) run[6] = '2';
    }
    return fclose(file);
}

/* A day of lines, made up of the last one of another file. */
static int make_day(const char *folder) {
    static char text[1 << 20];
    char path[1000], *line, *at;
    FILE *file;
    int i;
    snprintf(path, sizeof path, "%s/slow.jsonl", folder);
    if ((file = fopen(path, "rb")) == NULL) return 1;
    text[fread(text, 1, sizeof text - 1, file)] = '\0';
    fclose(file);
    line = strstr(text, "{\"schema\":\"spdl.stats.1\"");
    if (line == NULL || (at = strstr(line, "\"elapsed_ns\":")) == NULL) return 1;
    *strchr(line, '\n') = '\0';
    at += strlen("\"elapsed_ns\":");
    snprintf(path, sizeof path, "%s/hours.jsonl", folder);
    if ((file = fopen(path, "wb")) == NULL) return 1;
    for (i = 1; i <= 24; ++i)
        fprintf(file, "%.*s%d00000000000%s\n", (int)(at - line), line, 36 * i,
                at + strspn(at, "0123456789"));
    return fclose(file);
}

int main(int argc, char **argv) {
    static const double ms[] = { 0.5, 2 };
    static const char *const plain[] = { "pictures", "read", "decode" };
    static const char *const bad[] = { "</script><img id=bad>", "<img id=bad>&amp;",
                                       "a\tb\xff\xe2\x82\xac" };
    if (argc != 2) return 2;
    return make(argv[1], "slow.jsonl", plain, true) || make(argv[1], "hostile.jsonl", bad, true) ||
           make(argv[1], "one.jsonl", plain, false) || make_feed(argv[1]) ||
           make_rows(argv[1], "branch.jsonl", SPDL_STAGES(
               SPDL_SOURCE(count_up), SPDL_BRANCH(either_way), SPDL_PATH("small"),
               SPDL_PIPE(work, .name = "shrink", .ctx = (void *)(uintptr_t)&ms[0]),
               SPDL_PATH("large"),
               SPDL_PIPE(work, .name = "crop", .ctx = (void *)(uintptr_t)&ms[1]), SPDL_MERGE(),
               SPDL_SINK(3))) ||
           make_rows(argv[1], "deferred.jsonl", SPDL_STAGES(
               SPDL_SOURCE(count_up), SPDL_PIPE(waits, .concurrency = 8, .deferred = true),
               SPDL_SINK(3))) ||
           make_of(argv[1], "branch.jsonl", "cut.jsonl", 1, 20) ||
           make_of(argv[1], "branch.jsonl", "two.jsonl", 2, 0) || make_day(argv[1]);
}
