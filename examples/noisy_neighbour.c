/* noisy_neighbour.c - what loading costs the steps of a loop that needs a processor itself: alone,
   and beside a loader with as many threads as there are processors: of this process or of another
   one (spdl_loader_open), polite (policy.polite) or not.

   Build:  cc -O2 -I. examples/noisy_neighbour.c -o noisy_neighbour -lpthread
   Run:    ./noisy_neighbour [SECONDS]    (of each of the five, default 1) */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { BYTES = 4096, MOST = 100000 };
typedef struct { double steps, items, p99; } result;

static uint64_t turns_of_1_ms;

static void compute(uint64_t turns) {
    volatile uint64_t x = 1;
    for (uint64_t i = 0; i < turns; i++) x = x * 6364136223846793005u + i;
}

SPDL_FN(list, void, char) {
    *out = (char *)spdl_buffer(task);
    return *out ? SPDL_OK : SPDL_E_NOMEM; /* without end */
}

SPDL_FN(decode, char, char) {
    if (!(*out = (char *)spdl_buffer(task))) return SPDL_E_NOMEM;
    compute(turns_of_1_ms);
    (*out)[0] = in[0];
    return SPDL_OK;
}

static int by_length(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The loop: a step of 1 ms, then whatever is ready is taken, 8 at most. */
static result train(spdl_pipeline *p, spdl_loader *l, double seconds) {
    static double length[MOST];
    result r = { 0, 0, 0 };
    int steps = 0;
    spdl_loader_batch batch;
    const uint64_t warm = spdl_time_ns() + 200000000;
    uint64_t begin = 0, now = warm, since;
    while (steps < MOST && (begin == 0 || now < begin + (uint64_t)(seconds * 1e9))) {
        since = spdl_time_ns();
        compute(turns_of_1_ms);
        nanosleep(&(struct timespec){ 0, 100000 }, NULL); /* as a loop that waits for a device */
        for (int i = 0; i < 8; i++) {
            void *item;
            if (p && spdl_pipeline_next(p, &item, 0) == SPDL_OK) spdl_buffer_free(item);
            else if (l && spdl_loader_next(l, &batch, 0) == SPDL_OK) spdl_loader_done(l, &batch);
            else break;
            r.items += begin != 0;
        }
        now = spdl_time_ns();
        if (begin != 0) length[steps++] = (double)(now - since);
        else if (now > warm) begin = now;
    }
    qsort(length, (size_t)steps, sizeof *length, by_length);
    r.p99 = steps ? length[steps * 99 / 100] / 1e6 : 0;
    r.steps = steps / ((double)(now - begin) / 1e9);
    r.items /= (double)(now - begin) / 1e9;
    return r;
}

static result beside(bool process, bool polite, int workers, double seconds) {
    const spdl_stage rows[] = {
        SPDL_SOURCE(list, .item_bytes = 8, .free_item = spdl_buffer_free),
        SPDL_PIPE(decode, .concurrency = workers, .item_bytes = BYTES,
                  .free_item = spdl_buffer_free),
        SPDL_SINK(8)
    };
    spdl_loader_desc desc = { .slot_count = 8 };
    spdl_loader *l = NULL;
    spdl_pipeline *p = NULL;
    result r;
    desc.pipeline.workers = workers;
    desc.pipeline.policy.polite = polite;
    if ((process ? spdl_loader_open(&l, &desc, SPDL_TABLE(rows))
                 : spdl_pipeline_create(&p, &desc.pipeline, SPDL_TABLE(rows))) != SPDL_OK)
        exit(1); /* the log says why */
    r = train(p, l, seconds);
    spdl_loader_close(l);
    spdl_pipeline_destroy(p);
    return r;
}

int main(int argc, char **argv) {
    static const char *const names[] = { "threads", "polite threads", "a process",
                                         "a polite process" };
    const double seconds = argc > 1 ? atof(argv[1]) : 1;
    const int cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
    turns_of_1_ms = 100000;
    uint64_t best = UINT64_MAX;
    for (int i = 0; i < 20; i++) { /* how many turns take 1 ms */
        const uint64_t since = spdl_time_ns();
        compute(turns_of_1_ms);
        if (spdl_time_ns() - since < best) best = spdl_time_ns() - since;
    }
    turns_of_1_ms = (uint64_t)((double)turns_of_1_ms * 1e6 / (double)best);
    const result alone = train(NULL, NULL, seconds);
    printf("%-18s %9s %9s %9s\n", "beside", "steps", "p99", "loaded");
    printf("%-18s %7.0f/s %6.2f ms\n", "nothing", alone.steps, alone.p99);
    for (int i = 0; i < 4; i++) {
        const result r = beside(i >= 2, i % 2 == 1, cores < 2 ? 2 : cores, seconds);
        printf("%-18s %7.0f/s %6.2f ms %7.0f/s   %3.0f %% of the steps alone\n", names[i], r.steps,
               r.p99, r.items, 100 * r.steps / alone.steps);
    }
    return 0;
}
