/* game_thread.c - a game asks for paths and never waits for one. Each frame its thread pushes what
   it wants found and takes what has been found; both calls return at once, whatever the workers are
   doing. There are more requests than two workers can answer: the oldest make way.

   Build:  cc -O2 -I. examples/game_thread.c -o game_thread -lpthread
   Run:    ./game_thread */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>

enum { FRAMES = 200, FRAME_MS = 4, ASKED = 5, BUDGET_US = 500 };

typedef struct Request {
    int frame, steps;
} Request;

/* Stands for 2 ms of search. */
SPDL_FN(find_path, Request, Request) {
    const uint64_t end = spdl_time_ns() + 2000000;
    while (spdl_time_ns() < end) in->steps++;
    *out = in;
    return SPDL_OK;
}

/* How long the calls of one kind have taken. */
typedef struct Timing {
    uint64_t calls, sum_ns, max_ns, over_budget;
} Timing;

static void timing_add(Timing *timing, uint64_t since) {
    const uint64_t ns = spdl_time_ns() - since;
    timing->calls++;
    timing->sum_ns += ns;
    if (ns > timing->max_ns) timing->max_ns = ns;
    timing->over_budget += ns > BUDGET_US * 1000;
}

static void timing_print(const Timing *timing, const char *name) {
    printf("%s  %5" PRIu64 " calls, mean %6.2f us, longest %7.2f us, %" PRIu64
           " over the budget of %d us\n", name, timing->calls,
           (double)timing->sum_ns * 1e-3 / (double)timing->calls, (double)timing->max_ns * 1e-3,
           timing->over_budget, BUDGET_US);
}

static uint64_t ask(spdl_pipeline *p, int frame, Timing *push) {
    Request *request = (Request *)calloc(1, sizeof *request);
    if (!request) return 0;
    request->frame = frame;
    const uint64_t since = spdl_time_ns();
    const spdl_result result = spdl_pipeline_push(p, request, 0);
    timing_add(push, since);
    if (result != SPDL_OK) free(request); /* not taken: still ours */
    return result == SPDL_OK;
}

/* Takes what is there. */
static uint64_t collect(spdl_pipeline *p, int frame, Timing *take, int *oldest) {
    uint64_t found = 0;
    for (;;) {
        Request *answer;
        const uint64_t since = spdl_time_ns();
        const spdl_result result = SPDL_NEXT(p, &answer, 0);
        timing_add(take, since);
        if (result != SPDL_OK) return found;
        if (frame - answer->frame > *oldest) *oldest = frame - answer->frame;
        free(answer);
        found++;
    }
}

int main(void) {
    static spdl_stats stats;
    const spdl_pipeline_desc desc = { .workers = 2, .policy = { .polite = true } };
    Timing push = { 0 }, take = { 0 };
    uint64_t asked = 0, found = 0;
    int oldest = 0;
    spdl_pipeline *p;
    Request *late;
    if (spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_FEED(Request, .drop_oldest = true, .buffer_size = 8, .free_item = free),
            SPDL_PIPE(find_path, .concurrency = 2),
            SPDL_SINK(16))) != SPDL_OK) return 1;
    for (int frame = 0; frame < FRAMES; frame++) {
        for (int i = 0; i < ASKED; i++) asked += ask(p, frame, &push);
        found += collect(p, frame, &take, &oldest);
        poll(NULL, 0, FRAME_MS); /* the rest of the frame: physics, drawing, the display */
    }
    spdl_pipeline_push_end(p);
    while (SPDL_NEXT(p, &late, SPDL_FOREVER) == SPDL_OK) {
        found++;
        free(late);
    }
    spdl_pipeline_stats(p, &stats);
    spdl_pipeline_destroy(p);
    timing_print(&push, "push");
    timing_print(&take, "poll");
    printf("%" PRIu64 " asked = %" PRIu64 " found + %" PRIu64 " made way; the oldest answer was %d "
           "frames late\n", asked, found, stats.stage[0].skips, oldest);
    return found > 0 && asked == found + stats.stage[0].skips ? 0 : 1;
}
