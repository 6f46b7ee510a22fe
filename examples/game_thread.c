/* game_thread.c - a game asks for paths and never waits for one: push and poll return at once. The
   oldest requests are dropped if there are too many. A flag of the game cancels a request, which
   comes back as one that has failed (.deliver_failures).

   Polite workers search: they leave the processors to the game's own threads, also beside other
   programs. With `lend` the three threads of the game's job system search, each for 1.5 ms a frame.

   Build:  cc -O2 -I. examples/game_thread.c -o game_thread -lpthread
   Windows: gcc -O2 -I. examples/game_thread.c -o game_thread.exe
        or: cl /O2 /std:c11 /experimental:c11atomics /I. examples\game_thread.c
   Run:    ./game_thread [lend] */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#include "thread.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FRAMES = 200, FRAME_NS = 6000000, ASKED = 8, THREADS = 3, LENT_NS = 1500000 };

typedef struct Unit { atomic_bool gone; } Unit; /* who wants the path */
typedef struct Request { int frame; const Unit *unit; } Request;

static void spin(uint64_t ns) {
    const uint64_t end = spdl_time_ns() + ns;
    while (spdl_time_ns() < end) {}
}

/* Stands for 0.5 ms of search. */
SPDL_FN(find_path, Request, Request) {
    if (atomic_load(&in->unit->gone)) return spdl_fail(task, "nobody wants it");
    spin(500000);
    *out = in;
    return SPDL_OK;
}

/* --- the game's job system --- */

typedef struct Job { void (*run)(void *arg), *arg; } Job;

static void *job_thread(void *jobs) {
    Job job;
    while (spdl_ring_pop((spdl_ring *)jobs, &job, SPDL_FOREVER) == SPDL_OK) job.run(job.arg);
    return NULL;
}

static void physics(void *arg) {
    (void)arg;
    spin(300000);
}

static void lend(void *pool) { (void)spdl_pool_run((spdl_pool *)pool, LENT_NS); }

/* --- the game's thread --- */

static Unit units[ASKED];
static uint64_t found, cancelled, calls, sum_ns; /* of push and next */
static void timed(uint64_t since) {
    sum_ns += spdl_time_ns() - since;
    calls++;
}

static uint64_t ask(spdl_pipeline *p, int frame, const Unit *unit) {
    Request *request = (Request *)malloc(sizeof *request);
    if (!request) return 0;
    *request = (Request){ frame, unit };
    const uint64_t since = spdl_time_ns();
    const spdl_result result = spdl_pipeline_push(p, request, 0);
    timed(since);
    if (result != SPDL_OK) free(request); /* not taken: still ours */
    return result == SPDL_OK;
}

/* Takes what is there; the last result is why there is no more. */
static spdl_result collect(spdl_pipeline *p, int frame, int *oldest) {
    for (;;) {
        Request *answer;
        const uint64_t since = spdl_time_ns();
        const spdl_result result = SPDL_NEXT(p, &answer, 0);
        timed(since);
        if (result != SPDL_OK && result != SPDL_E_STAGE) return result;
        if (frame - answer->frame > *oldest) *oldest = frame - answer->frame;
        free(answer);
        ++*(result == SPDL_OK ? &found : &cancelled);
    }
}

int main(int argc, char **argv) {
    static spdl_stats stats;
    const bool lends = argc > 1 && strcmp(argv[1], "lend") == 0;
    const spdl_ring_desc jobs_desc = { .capacity = 64, .item_bytes = sizeof(Job) };
    const spdl_pool_desc pool_desc = { .guests = THREADS + 1 }; /* and no workers of its own */
    spdl_pipeline_desc desc = { 0 };
    uint64_t asked = 0;
    int oldest = 0, missed = 0;
    thread own[THREADS];
    spdl_pipeline *p;
    spdl_ring *jobs;
    desc.deliver_failures = true;
    desc.policy.polite = !lends;
    if (spdl_ring_create(&jobs, &jobs_desc) != SPDL_OK ||
        (lends && spdl_pool_create(&desc.pool, &pool_desc) != SPDL_OK))
        return puts("no memory, or no threads"), 1;
    if (spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_FEED(Request, .drop_oldest = true, .buffer_size = 16, .free_item = free),
            SPDL_PIPE(find_path, .concurrency = SPDL_ALL,
                      .output_order = SPDL_ORDER_COMPLETION), /* as drop_oldest wants it */
            SPDL_SINK(16))) != SPDL_OK) return 1;
    for (int i = 0; i < THREADS; i++) thread_start(&own[i], job_thread, jobs);
    for (int frame = 0; frame < FRAMES; frame++) {
        const Job work = { physics, NULL }, help = { lend, desc.pool };
        const uint64_t deadline = spdl_time_ns() + FRAME_NS;
        for (int i = 0; i < THREADS; i++) (void)spdl_ring_push(jobs, &work, 0);
        for (int i = 0; i < ASKED; i++) asked += ask(p, frame, &units[i]);
        atomic_store(&units[frame % ASKED].gone, frame % 3 == 0); /* some are shot, others return */
        for (int i = 0; lends && i < THREADS; i++) (void)spdl_ring_push(jobs, &help, 0);
        spin(FRAME_NS / 3); /* the game itself */
        (void)collect(p, frame, &oldest);
        missed += spdl_time_ns() > deadline;
        while (spdl_time_ns() < deadline) thread_sleep_ms(1); /* the display */
    }
    spdl_ring_close(jobs);
    for (int i = 0; i < THREADS; i++) thread_join(&own[i]);
    spdl_pipeline_push_end(p);
    while (collect(p, FRAMES, &oldest) == SPDL_TIMEOUT)
        if (lends) lend(desc.pool); /* only us now */
        else thread_sleep_ms(1);
    spdl_pipeline_stats(p, &stats);
    spdl_pipeline_destroy(p);
    spdl_pool_destroy(desc.pool);
    spdl_ring_destroy(jobs, NULL, NULL);
    printf("%" PRIu64 " asked = %" PRIu64 " found + %" PRIu64 " cancelled + %" PRIu64 " made way; "
           "the oldest answer was %d frames late; a push or poll took %.2f us\n", asked, found,
           cancelled, stats.stage[0].skips, oldest, (double)sum_ns * 1e-3 / (double)calls);
    printf("%d of %d frames missed\n", missed, FRAMES);
    return found > 0 && asked == found + cancelled + stats.stage[0].skips ? 0 : 1;
}
