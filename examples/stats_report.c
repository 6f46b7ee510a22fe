/* stats_report.c - which stage is slow, three ways: a table, JSON lines, which a page draws, and
   the numbers in a callback. Nothing of it is needed: SPDL_STATS=1 and SPDL_REPORT=run.jsonl do the
   same for any program that uses the library.

   Build:  cc -O2 -I. examples/stats_report.c -o stats_report -lpthread
   Run:    ./stats_report, then drop run.jsonl on examples/data/report.html in a browser.

   The loader of a training: files are read, decoded and scaled, eight make a batch. Halfway through
   the decoding gets slower, as with larger pictures: look for it in the plots. */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { FILES = 3200, BATCH = 8 };

typedef struct picture {
    int number;
    float pixels[64];
} picture;

static void nap(double ms) {
    const struct timespec t = { 0, (long)(ms * 1e6) };
    nanosleep(&t, NULL);
}

/* Something between 0.5 and 1.5, another one for each picture. */
static double vary(int number) {
    return 0.5 + (double)((unsigned)number * 2654435761u >> 16 & 255) / 256;
}

SPDL_FN(list_files, void, picture) {
    if (spdl_sequence(task) == FILES) return SPDL_END;
    *out = (picture *)calloc(1, sizeof(picture));
    if (*out == NULL) return SPDL_E_NOMEM;
    (*out)->number = (int)spdl_sequence(task);
    return SPDL_OK;
}

SPDL_FN(read_file, picture, picture) {
    nap(1.2 * vary(in->number));
    *out = in;
    return SPDL_OK;
}

SPDL_FN(decode, picture, picture) {
    nap((in->number < FILES / 2 ? 1.6 : 3.2) * vary(in->number + 7));
    if (in->number % 97 == 0) return spdl_fail(task, "picture %d is not a JPEG", in->number);
    *out = in;
    return SPDL_OK;
}

SPDL_FN(scale, picture, picture) {
    nap(0.3);
    *out = in;
    return SPDL_OK;
}

static void on_report(const spdl_stats *interval, const spdl_stats *total, void *user) {
    const spdl_stage_stats *stage = &interval->stage[2];
    (void)user;
    printf("callback: batch %llu, decode took %.2f ms (p90 %.2f ms)\n",
           (unsigned long long)total->delivered, (double)stage->mean_ns * 1e-6,
           (double)stage->p90_ns * 1e-6);
}

int main(void) {
    spdl_pipeline *p;
    spdl_pipeline_desc desc = { 0 };
    spdl_report_desc report = { 0 };
    spdl__histogram times;
    void *batch;

    report.every = 1;
    report.table = true;
    report.json = "run.jsonl";
    report.report_fn = on_report;
    desc.workers = 8;
    desc.name = "pictures";
    desc.report = &report;
    if (spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_SOURCE(list_files, .free_item = free, .buffer_size = 8),
            SPDL_PIPE(read_file, .concurrency = 2, .buffer_size = 8),
            SPDL_PIPE(decode, .concurrency = 3, .buffer_size = 8, .max_failures = -1),
            SPDL_PIPE(scale, .buffer_size = 8),
            SPDL_BATCH(BATCH),
            SPDL_SINK(3))) != SPDL_OK) return 1;
    while (spdl_pipeline_next(p, &batch, SPDL_FOREVER) == SPDL_OK) {
        nap(6); /* a step of the training */
        spdl_batch_free(batch);
    }
    if (spdl__pipeline_histogram(p, 2, &times) == SPDL_OK)
        printf("decode: %llu calls, p99.9 %.2f ms\n", (unsigned long long)times.count,
               (double)spdl__histogram_percentile(&times, 0.999) * 1e-6);
    const bool failed = spdl_pipeline_failed(p); /* the log says why */
    spdl_pipeline_destroy(p); /* the last reports are written now, and how many were no JPEG */
    puts("see run.html and run.jsonl");
    return failed;
}
