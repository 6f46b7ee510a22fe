/* bench_frames.c - a game at 60 Hz while assets are loaded: how many frames come too late.

       make bench-frames ARGS="[--json] [--quick] [--list] [TEXT]"

   A frame is 6 ms of computing on the game's thread, and 4 ms of physics on another one. At its
   start the game asks for up to 16 of 500 assets, each 2 ms of decoding; then it takes all that are
   ready. It never waits for one. A frame is missed if it is not over at its 16.7 ms. All threads
   share two processors. A value is the share of the frames in which there was loading, in percent.

   frames_missed          ours, `polite`, with the default number of workers, against two peers:
                          the pool by hand, with two threads; or polling as sokol_fetch does it:
                          threads read, and the game's thread decodes what they have read
   frames_missed_greedy   ours with two workers that are not polite
   frames_missed_default  ours with a desc of zeros: the default, not polite
   loaded_s               until all assets are there, ours and peers as in frames_missed
   ..._foreign            the same beside a program that always computes */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"

#include "bench.h"
#include "peer_mutex.h"

#include <sched.h>
#include <sys/wait.h>

enum { ASSETS = 500, ASKED = 16, FRAME_NS = 16666667, MOST_FRAMES = 600, WAITING = 64 };

typedef enum side { OURS, GREEDY, DEFAULT, POOL, POLLING } side;

typedef struct game {
    side side;
    bool foreign, time; /* how long the loading took, instead of the frames */
} game;

static void burn_ms(double ms) {
    volatile uint64_t x = 1;
    struct timespec begun, now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begun);
    do {
        for (int i = 0; i < 2000; ++i) x = x * 3 + 1;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    } while ((double)(now.tv_sec - begun.tv_sec) * 1e3 +
             (double)(now.tv_nsec - begun.tv_nsec) * 1e-6 < ms);
}

static int asset[ASSETS];

SPDL_FN(decode, int, int) {
    burn_ms(2);
    *out = in;
    return SPDL_OK;
}

/* --- the peers --- */

static uint32_t decoded, read_only; /* assets */

static void decode_job(void *arg, int worker) {
    (void)arg, (void)worker;
    burn_ms(2);
    __atomic_add_fetch(&decoded, 1, __ATOMIC_RELEASE);
}

static void read_job(void *arg, int worker) {
    (void)arg, (void)worker;
    __atomic_add_fetch(&read_only, 1, __ATOMIC_RELEASE);
}

/* --- a game --- */

typedef struct loading {
    side side;
    spdl_pipeline *p;
    peer_pool *pool;
    int asked, taken;
} loading;

static void loading_open(loading *l, side which) {
    spdl_pipeline_desc desc = { 0 };
    memset(l, 0, sizeof *l);
    l->side = which;
    decoded = read_only = 0;
    if (which == POOL || which == POLLING) {
        l->pool = peer_pool_create(2, ASSETS);
        return;
    }
    desc.workers = which == GREEDY ? 2 : 0;
    desc.policy.polite = which == OURS;
    BENCH_CHECK(spdl_pipeline_create(&l->p, &desc, SPDL_STAGES(
        SPDL_FEED(int, .buffer_size = WAITING), SPDL_PIPE(decode, .concurrency = SPDL_ALL),
        SPDL_SINK(WAITING))) == SPDL_OK);
}

static void loading_ask(loading *l) {
    for (int i = 0; i < ASKED && l->asked < ASSETS; ++i) {
        if (l->p == NULL && l->asked - l->taken >= WAITING) return;
        if (l->p != NULL && spdl_pipeline_push(l->p, &asset[l->asked], 0) != SPDL_OK) return;
        if (l->pool != NULL)
            peer_pool_submit(l->pool, l->side == POOL ? decode_job : read_job, &asset[l->asked]);
        ++l->asked;
    }
}

static void loading_take(loading *l) {
    int *one;
    if (l->side == POOL) l->taken = (int)__atomic_load_n(&decoded, __ATOMIC_ACQUIRE);
    while (l->side == POLLING && l->taken < (int)__atomic_load_n(&read_only, __ATOMIC_ACQUIRE)) {
        burn_ms(2); /* in its callback, which its dowork calls */
        ++l->taken;
    }
    while (l->p != NULL && SPDL_NEXT(l->p, &one, 0) == SPDL_OK) ++l->taken;
}

static void loading_close(loading *l) {
    spdl_pipeline_destroy(l->p);
    if (l->pool != NULL) peer_pool_destroy(l->pool);
}

static uint32_t frame_now, over;

static void *physics(void *arg) {
    uint32_t done = 0;
    (void)arg;
    while (!__atomic_load_n(&over, __ATOMIC_ACQUIRE)) {
        const uint32_t now = __atomic_load_n(&frame_now, __ATOMIC_ACQUIRE);
        if (now != done) burn_ms(4);
        else bench_sleep_until(bench_ns() + 500000);
        done = now;
    }
    return NULL;
}

/* Frames until all assets are there. */
static double played(const game *g) {
    const uint64_t begun = bench_ns();
    uint64_t deadline = begun + FRAME_NS;
    int frames = 0, missed = 0;
    pthread_t thread;
    loading l;
    frame_now = over = 0;
    loading_open(&l, g->side);
    peer_thread(&thread, physics, NULL);
    for (; l.taken < ASSETS && frames < MOST_FRAMES; ++frames, deadline += FRAME_NS) {
        __atomic_add_fetch(&frame_now, 1, __ATOMIC_RELEASE);
        loading_ask(&l);
        burn_ms(6);
        loading_take(&l);
        missed += bench_ns() > deadline;
        while (bench_ns() > deadline) deadline += FRAME_NS;
        bench_sleep_until(deadline);
    }
    __atomic_store_n(&over, 1, __ATOMIC_RELEASE);
    pthread_join(thread, NULL);
    loading_close(&l);
    return g->time ? (double)(bench_ns() - begun) / 1e9 : 100.0 * missed / frames;
}

static double play(const void *arg) {
    const game *g = (const game *)arg;
    const pid_t foreign = g->foreign ? fork() : -1;
    double value;
    if (foreign == 0)
        for (;;) burn_ms(1000);
    value = played(g);
    if (foreign > 0) {
        kill(foreign, SIGKILL);
        (void)waitpid(foreign, NULL, 0);
    }
    return value;
}

/* Against both peers. */
static void compare(const char *name, const char *unit, side ours, bool foreign, bool time) {
    const game us = { ours, foreign, time };
    const game pool = { POOL, foreign, time }, polling = { POLLING, foreign, time };
    char full[64];
    bench_row row = { full, unit, "pool by hand", false, 0, false, 0 };
    snprintf(full, sizeof full, "%s%s", name, foreign ? "_foreign" : "");
    if (!bench_wanted(full)) return;
    bench_compare_sides(&row, 7, play, &us, play, &pool);
    row.peer_name = "polling as sokol_fetch";
    bench_compare_sides(&row, 7, play, &us, play, &polling);
}

int main(int argc, char **argv) {
    cpu_set_t all, two;
    size_t cpu;
    int kept = 0;
    bench_start("frames", argc, argv);
    CPU_ZERO(&two);
    BENCH_CHECK(sched_getaffinity(0, sizeof all, &all) == 0);
    for (cpu = 0; cpu < CPU_SETSIZE && kept < 2; ++cpu)
        if (CPU_ISSET(cpu, &all)) ++kept, CPU_SET(cpu, &two);
    BENCH_CHECK(sched_setaffinity(0, sizeof two, &two) == 0);
    for (int foreign = 0; foreign < 2; ++foreign) {
        compare("frames_missed", "%", OURS, foreign, false);
        compare("frames_missed_greedy", "%", GREEDY, foreign, false);
        compare("frames_missed_default", "%", DEFAULT, foreign, false);
        compare("loaded_s", "s", OURS, foreign, true);
    }
    return 0;
}
