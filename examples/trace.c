/* trace.c - what every worker did when: a trace of a small loader, for Perfetto (ui.perfetto.dev)
   or chrome://tracing, with spans of its own inside of calls and of the trainer's steps, and where
   the time of each stage went. The stages do what their names say to numbers that stand for images;
   reading only waits.

   Build:  cc -O2 -g -fno-omit-frame-pointer -I. examples/trace.c -o trace -lpthread
   Run:    ./trace [file]

   Any program that uses spdl.h writes a trace without being changed: SPDL_TRACE=t.json ./program */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <poll.h>

enum { IMAGES = 640, PIXELS = 4096, BATCH = 16, WORKERS = 4 };

typedef struct image {
    uint32_t pixel[PIXELS];
} image;

typedef struct sums {
    uint64_t of[BATCH];
    size_t count;
} sums;

SPDL_FN(list_images, void, image) {
    if (spdl_sequence(task) == IMAGES) return SPDL_END;
    if ((*out = malloc(sizeof(image))) == NULL) return SPDL_E_NOMEM;
    (*out)->pixel[0] = (uint32_t)spdl_sequence(task);
    return SPDL_OK;
}

/* Stands for a read from a disk that answers after 1 ms. */
SPDL_FN(read_image, image, image) {
    poll(NULL, 0, 1);
    *out = in;
    return SPDL_OK;
}

/* Stands for a decoder: nothing but arithmetic, in two parts that the trace shows. */
SPDL_FN(decode_image, image, image) {
    spdl_trace_begin(task, "inflate");
    for (int round = 0; round < 60; ++round) {
        if (round == 40) {
            spdl_trace_end(task);
            spdl_trace_begin(task, "resize"); /* ends with the call */
        }
        for (int i = 1; i < PIXELS; ++i)
            in->pixel[i] = in->pixel[i - 1] * 1664525u + 1013904223u + (uint32_t)round;
    }
    *out = in;
    return SPDL_OK;
}

SPDL_FN(sum_images, spdl_batch, sums) {
    if ((*out = calloc(1, sizeof(sums))) == NULL) return SPDL_E_NOMEM;
    for (; (*out)->count < in->count; ++(*out)->count) {
        const image *from = (const image *)in->items[(*out)->count];
        for (int i = 0; i < PIXELS; ++i) (*out)->of[(*out)->count] += from->pixel[i];
    }
    return SPDL_OK;
}

static void print_split(const spdl_stats *stats) {
    printf("stage           calls      mean  on cpu  runnable  blocked\n");
    for (int i = 0; i < stats->stage_count; ++i) {
        const spdl_stage_stats *s = &stats->stage[i];
        const double busy = s->busy_ns > 0 ? (double)s->busy_ns / 100 : 1;
        if (s->split_calls == 0) continue; /* a batch is no call, and some systems have no clock */
        printf("%-14s %6d %6.0f us %6.0f%% %8.0f%% %7.0f%%\n", s->name, (int)s->tasks,
               (double)s->mean_ns / 1e3, (double)s->cpu_ns / busy, (double)s->runnable_ns / busy,
               (double)s->blocked_ns / busy);
    }
}

int main(int argc, char **argv) {
    const char *file = argc > 1 ? argv[1] : "trace.json";
    const spdl_pipeline_desc desc = { .workers = WORKERS, .name = "loader", .trace = file,
                                      .trace_events = 1 << 14 }; /* of each thread and edge */
    const spdl_stage rows[] = {
        SPDL_SOURCE(list_images, .free_item = free),
        SPDL_PIPE(read_image, .concurrency = 2),
        SPDL_PIPE(decode_image, .concurrency = 2),
        SPDL_BATCH(BATCH),
        SPDL_PIPE(sum_images, .free_item = free),
        SPDL_SINK(2),
    };
    spdl_pipeline *pipeline;
    spdl_stats stats;
    uint64_t images = 0;
    bool failed;
    sums *batch;
    if (spdl_pipeline_create(&pipeline, &desc, SPDL_TABLE(rows)) != SPDL_OK) return 1;
    while (SPDL_NEXT(pipeline, &batch, SPDL_FOREVER) == SPDL_OK) {
        spdl_pipeline_trace_begin(pipeline, "step");
        images += batch->count;
        free(batch);
        spdl_pipeline_trace_counter(pipeline, "images", (double)images);
        spdl_pipeline_trace_end(pipeline);
    }
    failed = spdl_pipeline_failed(pipeline);
    spdl_pipeline_stats(pipeline, &stats);
    spdl_pipeline_destroy(pipeline); /* writes the file */
    print_split(&stats);
    printf("%d images; open %s in ui.perfetto.dev\n", (int)images, file);
    return failed || images != IMAGES;
}
