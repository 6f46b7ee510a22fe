/* report_page.c - makes the pages that tests/check_report.sh opens in a browser.
   usage: report_page FOLDER: slow.html has a stage that limits, hostile.html names that would like
   to be markup, one.html no samples, feed.html a feed and no trainer; doctor.html is
   the doctor's. */
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

static int make(const char *folder, const char *file, const char *const names[3], bool sampled) {
    static const double ms[] = { 0.4, 3, 0.2 };
    char path[1000];
    spdl_pipeline_desc desc = { 0 };
    spdl_report_desc report = { 0 };
    spdl_pipeline *p;
    int i;
    snprintf(path, sizeof path, "%s/%s", folder, file);
    report.html = sampled ? path : NULL;
    desc.workers = 4;
    desc.name = names[0];
    desc.report = &report;
    if (spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_SOURCE(count_up, .name = "list"),
            SPDL_PIPE(work, .name = names[1], .ctx = (void *)(uintptr_t)&ms[0]),
            SPDL_PIPE(work, .name = names[2], .ctx = (void *)(uintptr_t)&ms[1]),
            SPDL_BATCH(4),
            SPDL_PIPE(work, .name = "collate", .ctx = (void *)(uintptr_t)&ms[2]),
            SPDL_SINK(3))) != SPDL_OK)
        return 1;
    for (i = 0; i < (sampled ? 120 : 3); ++i) {
        void *batch;
        if (spdl_pipeline_next(p, &batch, SPDL_FOREVER) != SPDL_OK) return 1;
        nap(1);
        spdl_batch_free(batch);
    }
    i = sampled ? 0 : spdl_report_html(p, path) != SPDL_OK;
    spdl_pipeline_destroy(p);
    return i;
}

static int make_feed(const char *folder) {
    static const double ms = 2;
    char path[1000];
    spdl_pipeline_desc desc = { 0 };
    spdl_report_desc report = { 0 };
    spdl_pipeline *p;
    void *item;
    uintptr_t i;
    snprintf(path, sizeof path, "%s/feed.html", folder);
    report.html = path;
    desc.workers = 1;
    desc.report = &report;
    if (spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_FEED(void, .drop_oldest = true, .buffer_size = 8),
            SPDL_PIPE(work, .name = "find_path", .ctx = (void *)(uintptr_t)&ms),
            SPDL_SINK(3))) != SPDL_OK)
        return 1;
    for (i = 1; i <= 600; ++i) {
        if (spdl_pipeline_push(p, (void *)i, 0) != SPDL_OK) return 1;
        while (spdl_pipeline_next(p, &item, 0) == SPDL_OK) {}
        nap(1);
    }
    spdl_pipeline_destroy(p);
    return 0;
}

/* Of a report with a row that is the limit. */
static int make_doctor(const char *folder) {
    static spdl_doctor_report report;
    static char page[100000];
    static const spdl_interval half = { 0.83, 0.81, 0.85, 12, true };
    char path[1000];
    FILE *file;
    int length;
    snprintf(path, sizeof path, "%s/doctor.html", folder);
    report.outcome = SPDL_DOCTOR_LIMIT;
    report.today = 239;
    report.ceiling = 484;
    report.row_count = report.trial_count = report.arm_count = 1;
    strcpy(report.row[0].name, "<img id=bad>");
    report.row[0].mean_ns = 4e6;
    report.row[0].computing = half;
    report.trial[0].predicted = report.trial[0].measured.value = 1.9;
    strcpy(report.arm[0].name, "</svg>");
    report.arm[0].rounds = 2;
    report.arm[0].rate[0] = report.arm[0].rate[1] = 239;
    strcpy(report.verdict, "'<img id=bad>' limits.");
    length = spdl_doctor_html(&report, page, sizeof page);
    file = fopen(path, "wb");
    if (file == NULL || length >= (int)sizeof page) return 1;
    length -= (int)fwrite(page, 1, (size_t)length, file);
    return fclose(file) != 0 || length != 0;
}

int main(int argc, char **argv) {
    static const char *const slow[] = { "pictures", "read", "decode" };
    static const char *const hostile[] = { "</script><h1>", "<img id=bad>&amp;'\"",
                                           "a\tb\xff\xe2\x82\xac" };
    if (argc != 2) return 2;
    return make(argv[1], "slow.html", slow, true) || make(argv[1], "hostile.html", hostile, true) ||
           make(argv[1], "one.html", slow, false) || make_feed(argv[1]) ||
           make_doctor(argv[1]);
}
