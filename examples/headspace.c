/* headspace.c - how much of a training step does loading cost? One call per loop measures it: here
   of a plain loop that reads an item and then trains on it, and of a pipeline that reads them
   ahead. The loops stay as they are; what it needs is a next function, and the step.

   Build:  cc -O2 -I. examples/headspace.c -o headspace -lpthread
   Run:    ./headspace */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>

enum { STEPS = 10000000, LOADERS = 4 };

/* --- a loop without a library: while ((item = reader_next(&r)) != NULL) train_step(item); --- */

typedef struct reader {
    int next;
} reader;

/* Stands for a read that takes 3 ms. */
static int *reader_next(reader *r) {
    int *item = (int *)malloc(sizeof *item);
    poll(NULL, 0, 3);
    if (item) *item = r->next++;
    return item;
}

/* Stands for a training step of 1 ms. */
static void train_step(const int *item) {
    const uint64_t end = spdl_time_ns() + 1000000;
    while (spdl_time_ns() < end) (void)*(const volatile int *)item;
}

/* What the measurement needs: the loop's reading and its step, each as one function. */
static spdl_result next_item(void *source, void **item, int64_t timeout_ns) {
    (void)timeout_ns;
    *item = reader_next((reader *)source);
    return *item ? SPDL_OK : SPDL_END;
}

static void step(void *ctx, void *item) {
    (void)ctx;
    train_step((const int *)item);
}

/* --- the same with the reads ahead, LOADERS at a time --- */

SPDL_FN(count, void, void) {
    *out = NULL;
    return spdl_sequence(task) < STEPS ? SPDL_OK : SPDL_END;
}

SPDL_FN(read_ahead, void, int) {
    reader r = { (int)spdl_sequence(task) };
    (void)in;
    *out = reader_next(&r);
    return *out ? SPDL_OK : SPDL_E_NOMEM;
}

static bool measure(const char *loop, spdl_next_fn next, void *source) {
    static spdl_headspace_report report;
    const spdl_headspace_desc desc = { .next = next, .source = source, .step = step,
                                       .free_item = free, .run_steps = STEPS, .seconds = 8 };
    const spdl_result result = spdl_headspace(&desc, &report);
    printf("%-10s %6.0f steps/s, %6.0f if loading cost nothing\n%10s %s\n", loop, report.today,
           report.ceiling, "", result == SPDL_OK ? report.text : spdl_result_text(result));
    return result == SPDL_OK;
}

int main(void) {
    reader r = { 0 };
    spdl_pipeline *pipeline;
    const spdl_pipeline_desc desc = { .workers = LOADERS };
    bool done = measure("loop", next_item, &r);
    if (spdl_pipeline_create(&pipeline, &desc, SPDL_STAGES(
            SPDL_SOURCE(count),
            SPDL_PIPE(read_ahead, .concurrency = LOADERS, .free_item = free),
            SPDL_SINK(4))) != SPDL_OK) return 1;
    done = measure("pipeline", spdl_pipeline_next, pipeline) && done;
    spdl_pipeline_destroy(pipeline);
    return done ? 0 : 1;
}
