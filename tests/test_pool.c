/* Pools: jobs, drain and stop, init and fini, failures at the start, and what the threads are. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdbool.h>
#include <stddef.h>

/* Fails the thread with the number in `thread_to_fail`, counted from 0; -1: none. */
static int thread_to_fail = -1, threads_made;
static bool thread_refused(void);
static void pool_point(const char *id);

#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#define SPDL_TEST_POINT(id) pool_point(id)
#define SPDL_CREATE_THREAD(...) (thread_refused() ? NULL : CreateThread(__VA_ARGS__))
#define SPDL_PTHREAD_CREATE(...) (thread_refused() ? EAGAIN : pthread_create(__VA_ARGS__))
#include "../spdl.h"
#include "test.h"
#if defined(__linux__)
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif

static bool thread_refused(void) { return threads_made++ == thread_to_fail; }

static __thread uint64_t chaos; /* 0: none, else a random state */
static uint64_t chaos_seed;     /* the start of it on threads that have none */

static int drain_sleeps;

static void pool_point(const char *id) {
    if (strcmp(id, "pool drain sleeps") == 0)
        __atomic_add_fetch(&drain_sleeps, 1, __ATOMIC_RELEASE);
    if (chaos_seed == 0) return;
    if (chaos == 0) chaos = (chaos_seed ^ (uint64_t)(uintptr_t)&chaos) | 1;
    switch (test_random(&chaos) % 16) {
    case 0: test_sleep_us(30); break;
    case 1: case 2: case 3: test_yield(); break;
    default: break;
    }
}

/* --- helpers --- */

static spdl_pool *pool_of(int workers, int queue_size) {
    spdl_pool_desc desc = { 0 };
    spdl_pool *pool;
    desc.workers = workers;
    desc.queue_size = queue_size;
    REQUIRE(spdl_pool_create(&pool, &desc) == SPDL_OK);
    return pool;
}

static int64_t ms(double n) { return (int64_t)(n * 1e6); }

static int get(const int *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static void set(int *p, int value) { __atomic_store_n(p, value, __ATOMIC_RELEASE); }
static int add(int *p, int more) { return __atomic_fetch_add(p, more, __ATOMIC_ACQ_REL); }

static void await(const int *p, int value) {
    const uint64_t start = spdl_time_ns();
    while (get(p) != value) {
        REQUIRE(spdl_time_ns() - start < 10000000000u);
        test_sleep_us(100);
    }
}

static void count_job(void *arg, int worker, void *local) {
    (void)worker;
    (void)local;
    add((int *)arg, 1);
}

/* A job that says it runs and then waits to be let go. */
typedef struct hold {
    int running, go;
} hold;

static void hold_job(void *arg, int worker, void *local) {
    hold *h = (hold *)arg;
    (void)worker;
    (void)local;
    add(&h->running, 1);
    while (!get(&h->go)) test_sleep_us(100);
}

#if defined(__linux__)
/* The threads of this process, and how many of them carry a name. */
static int threads_named(const char *name) {
    DIR *tasks = opendir("/proc/self/task");
    struct dirent *entry;
    int count = 0;
    REQUIRE(tasks != NULL);
    while ((entry = readdir(tasks)) != NULL) {
        char path[300], comm[64] = "";
        FILE *file;
        snprintf(path, sizeof path, "/proc/self/task/%.200s/comm", entry->d_name);
        if (entry->d_name[0] == '.' || (file = fopen(path, "r")) == NULL) continue;
        if (fgets(comm, sizeof comm, file) != NULL) comm[strcspn(comm, "\n")] = '\0';
        fclose(file);
        count += name == NULL || strcmp(comm, name) == 0;
    }
    closedir(tasks);
    return count;
}

/* Whether so many threads come to carry the name. A worker gives itself its name; one that was
   joined may stay listed for a moment, as the kernel wakes who joins first. */
static bool named(const char *name, int count) {
    for (int tries = 0; tries < 5000 && threads_named(name) != count; ++tries) test_sleep_us(1000);
    return threads_named(name) == count;
}
#else
static bool named(const char *name, int count) {
    (void)name, (void)count;
    return true; /* it cannot be seen */
}
#endif

/* --- jobs --- */

static void jobs_run_once_each(void) {
    static const int workers[] = { 1, 2, 4, 64 };
    enum { JOBS = 3000 };
    for (size_t w = 0; w < 4; ++w) {
        spdl_pool *pool = pool_of(workers[w], 16);
        int *runs = (int *)calloc(JOBS, sizeof *runs);
        CHECK_EQ(pool->desc.workers, workers[w]);
        for (int i = 0; i < JOBS; ++i)
            CHECK_EQ(spdl_pool_submit(pool, count_job, &runs[i], SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(spdl_pool_drain(pool, SPDL_FOREVER), SPDL_OK);
        for (int i = 0; i < JOBS; ++i)
            if (!CHECK_EQ(runs[i], 1)) break;
        spdl_pool_destroy(pool);
        free(runs);
    }
}

typedef struct ordered_job {
    int number;
    int *next;
} ordered_job;

static void in_order(void *arg, int worker, void *local) {
    const ordered_job *job = (const ordered_job *)arg;
    (void)local;
    CHECK_EQ(worker, 0);
    CHECK_EQ(add(job->next, 1), job->number);
}

static void jobs_start_in_order(void) {
    enum { JOBS = 2000 };
    spdl_pool *pool = pool_of(1, 8);
    ordered_job *jobs = (ordered_job *)calloc(JOBS, sizeof *jobs);
    int next = 0;
    for (int i = 0; i < JOBS; ++i) {
        jobs[i].number = i;
        jobs[i].next = &next;
        CHECK_EQ(spdl_pool_submit(pool, in_order, &jobs[i], SPDL_FOREVER), SPDL_OK);
    }
    spdl_pool_destroy(pool);
    CHECK_EQ(next, JOBS);
    free(jobs);
}

static void full_queue_is_a_timeout(void) {
    spdl_pool *pool = pool_of(1, 2);
    hold h = { 0, 0 };
    int ran = 0;
    uint64_t start;
    CHECK_EQ(spdl_pool_submit(pool, hold_job, &h, 0), SPDL_OK);
    await(&h.running, 1);
    CHECK_EQ(spdl_pool_submit(pool, count_job, &ran, 0), SPDL_OK);
    CHECK_EQ(spdl_pool_submit(pool, count_job, &ran, 0), SPDL_OK);
    CHECK_EQ(spdl_pool_submit(pool, count_job, &ran, 0), SPDL_TIMEOUT);
    start = spdl_time_ns();
    CHECK_EQ(spdl_pool_submit(pool, count_job, &ran, ms(10)), SPDL_TIMEOUT);
    CHECK(spdl_time_ns() - start >= (uint64_t)ms(10));
    CHECK_EQ(spdl_pool_submit(pool, NULL, &ran, 0), SPDL_E_INVALID);
    set(&h.go, 1);
    CHECK_EQ(spdl_pool_drain(pool, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(ran, 2); /* what was not accepted never runs */
    spdl_pool_destroy(pool);
}

typedef struct submitter {
    spdl_pool *pool;
    int *ran;
    int accepted;
    spdl_result last;
    int jobs;
} submitter;

static void *submit_many(void *arg) {
    submitter *s = (submitter *)arg;
    for (int i = 0; i < s->jobs; ++i) {
        s->last = spdl_pool_submit(s->pool, count_job, s->ran, SPDL_FOREVER);
        if (s->last != SPDL_OK) break;
        s->accepted++;
    }
    return NULL;
}

static void many_threads_submit(void) {
    spdl_pool *pool;
    submitter s[4];
    test_thread threads[4];
    int ran = 0;
    chaos_seed = test_seed() | 1;
    pool = pool_of(3, 3);
    for (int i = 0; i < 4; ++i) {
        const submitter one = { pool, &ran, 0, SPDL_OK, TEST_SANITIZED ? 300 : 1000 };
        s[i] = one;
        REQUIRE(test_thread_start(&threads[i], submit_many, &s[i]));
    }
    for (int i = 0; i < 4; ++i) test_join(threads[i]);
    CHECK_EQ(spdl_pool_drain(pool, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(ran, 4 * s[0].jobs);
    spdl_pool_destroy(pool);
}

/* A job that submits two more, down to a depth. */
typedef struct tree {
    spdl_pool *pool;
    int ran;
    struct {
        struct tree *tree;
        int depth;
    } level[9];
} tree;

static void tree_job(void *arg, int worker, void *local) {
    tree *t = *(tree **)arg; /* the first member of the level */
    const int depth = (int)(((char *)arg - (char *)t->level) / (ptrdiff_t)sizeof t->level[0]);
    (void)worker;
    (void)local;
    for (int i = 0; i < 2 && depth < 8; ++i)
        CHECK_EQ(spdl_pool_submit(t->pool, tree_job, &t->level[depth + 1], 0), SPDL_OK);
    test_sleep_us(10);
    add(&t->ran, 1);
}

static void jobs_submit_jobs(void) {
    for (int workers = 1; workers <= 4; workers += 3) {
        tree t = { 0 };
        t.pool = pool_of(workers, 1024);
        for (int i = 0; i < 9; ++i) t.level[i].tree = &t;
        CHECK_EQ(spdl_pool_submit(t.pool, tree_job, &t.level[0], 0), SPDL_OK);
        CHECK_EQ(spdl_pool_drain(t.pool, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(t.ran, 511); /* drain waited for the jobs of jobs as well */
        spdl_pool_destroy(t.pool);
    }
}

/* One job at a time: each has to wake a worker that sleeps or is about to. */
static void jobs_wake_workers(void) {
    const int rounds = TEST_SANITIZED ? 500 : 3000;
    spdl_pool *pool;
    uint64_t state = test_seed();
    int ran = 0;
    chaos_seed = test_seed() | 1;
    pool = pool_of(3, 1);
    for (int i = 0; i < rounds; ++i) {
        REQUIRE(spdl_pool_submit(pool, count_job, &ran, SPDL_SECONDS(5)) == SPDL_OK);
        if (i % 2) REQUIRE(spdl_pool_drain(pool, SPDL_SECONDS(5)) == SPDL_OK);
        if (test_random(&state) % 16 == 0) test_sleep_us(100);
    }
    spdl_pool_destroy(pool);
    CHECK_EQ(ran, rounds);
}

/* Jobs that end only when all of them run: none may wait in the queue while a worker sleeps. */
enum { TOGETHER = 4 };

static void together_job(void *arg, int worker, void *local) {
    int *running = (int *)arg;
    const uint64_t start = spdl_time_ns();
    (void)worker;
    (void)local;
    add(running, 1);
    while (get(running) < TOGETHER) {
        REQUIRE(spdl_time_ns() - start < 5000000000u);
        test_yield();
    }
}

static void jobs_run_at_the_same_time(void) {
    const int rounds = TEST_SANITIZED ? 100 : 400;
    spdl_pool *pool;
    chaos_seed = test_seed() | 1;
    pool = pool_of(TOGETHER, TOGETHER);
    for (int round = 0; round < rounds; ++round) {
        int running = 0;
        for (int i = 0; i < TOGETHER; ++i)
            CHECK_EQ(spdl_pool_submit(pool, together_job, &running, SPDL_FOREVER), SPDL_OK);
        REQUIRE(spdl_pool_drain(pool, SPDL_FOREVER) == SPDL_OK);
        if (round % 4 == 0) test_sleep_us(300); /* until the workers sleep */
    }
    spdl_pool_destroy(pool);
}

/* --- drain, stop, destroy --- */

static void drain_waits(void) {
    spdl_pool *pool = pool_of(2, 0);
    hold h = { 0, 0 };
    uint64_t start;
    CHECK_EQ(spdl_pool_drain(pool, 0), SPDL_OK);
    CHECK_EQ(spdl_pool_drain(pool, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(spdl_pool_submit(pool, hold_job, &h, 0), SPDL_OK);
    CHECK_EQ(spdl_pool_drain(pool, 0), SPDL_TIMEOUT);
    start = spdl_time_ns();
    CHECK_EQ(spdl_pool_drain(pool, ms(10)), SPDL_TIMEOUT);
    CHECK(spdl_time_ns() - start >= (uint64_t)ms(10));
    set(&h.go, 1);
    CHECK_EQ(spdl_pool_drain(pool, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(h.running, 1);
    CHECK_EQ(spdl_pool_submit(pool, hold_job, &h, 0), SPDL_OK); /* a drain closes nothing */
    CHECK_EQ(spdl_pool_drain(pool, SPDL_FOREVER), SPDL_OK);
    spdl_pool_destroy(pool);
}

static void stop_refuses_later_jobs(void) {
    spdl_pool *pool = pool_of(1, 8);
    hold h = { 0, 0 };
    int ran = 0;
    CHECK_EQ(spdl_pool_submit(pool, hold_job, &h, 0), SPDL_OK);
    for (int i = 0; i < 5; ++i)
        CHECK_EQ(spdl_pool_submit(pool, count_job, &ran, 0), SPDL_OK);
    CHECK_EQ(spdl_pool_stop(pool, ms(5)), SPDL_TIMEOUT);
    CHECK_EQ(spdl_pool_submit(pool, count_job, &ran, 0), SPDL_CLOSED);
    set(&h.go, 1);
    CHECK_EQ(spdl_pool_stop(pool, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(ran, 5);
    CHECK_EQ(spdl_pool_submit(pool, count_job, &ran, SPDL_FOREVER), SPDL_CLOSED);
    CHECK_EQ(spdl_pool_stop(pool, 0), SPDL_OK);
    CHECK_EQ(spdl_pool_drain(pool, 0), SPDL_OK);
    spdl_pool_destroy(pool);
    CHECK_EQ(ran, 5);
}

static void no_pool_is_refused(void) {
    spdl_pool *pool = pool_of(1, 0);
    CHECK_EQ(spdl_pool_submit(NULL, NULL, NULL, 0), SPDL_E_INVALID);
    CHECK_EQ(spdl_pool_submit(pool, NULL, NULL, 0), SPDL_E_INVALID);
    CHECK_EQ(spdl_pool_run(NULL, 0), SPDL_E_INVALID);
    CHECK_EQ(spdl_pool_run(pool, 0), SPDL_E_INVALID); /* it has no place for guests */
    CHECK_EQ(spdl_pool_drain(NULL, 0), SPDL_E_INVALID);
    CHECK_EQ(spdl_pool_stop(NULL, 0), SPDL_E_INVALID);
    spdl_pool_destroy(pool);
}

static void *run_as_guest(void *pool) {
    CHECK(spdl_pool_run((spdl_pool *)pool, SPDL_FOREVER) == SPDL_EMPTY);
    return NULL;
}

/* Without workers a drain runs the jobs itself, unless all places have their guests. */
static void drain_waits_for_guests(void) {
    spdl_pool_desc desc = { 0 };
    spdl_pool *pool;
    hold h = { 0, 0 };
    test_thread guest;
    int ran = 0;
    desc.guests = 1;
    REQUIRE(spdl_pool_create(&pool, &desc) == SPDL_OK);
    CHECK_EQ(spdl_pool_submit(pool, hold_job, &h, 0), SPDL_OK);
    REQUIRE(test_thread_start(&guest, run_as_guest, pool));
    await(&h.running, 1);
    CHECK_EQ(spdl_pool_submit(pool, count_job, &ran, 0), SPDL_OK);
    CHECK_EQ(spdl_pool_drain(pool, 0), SPDL_TIMEOUT);
    CHECK_EQ(spdl_pool_drain(pool, ms(1)), SPDL_TIMEOUT);
    CHECK_EQ(ran, 0);
    set(&h.go, 1);
    CHECK_EQ(spdl_pool_drain(pool, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(ran, 1);
    test_join(guest);
    spdl_pool_destroy(pool);
}

/* It ends after two sleeps of the drain. */
static void until_the_drain_sleeps(void *arg, int worker, void *local) {
    (void)worker;
    (void)local;
    set((int *)arg, 1);
    for (int tries = 0; tries < 10000 && get(&drain_sleeps) < 2; ++tries) test_sleep_us(1000);
}

/* The only place is taken, and a job waits: the drain has nothing to do, and sleeps. */
static void a_drain_that_cannot_help_sleeps(void) {
    spdl_pool_desc desc = { 0 };
    spdl_pool *pool;
    test_thread guest;
    int running = 0, ran = 0;
    desc.guests = 1;
    REQUIRE(spdl_pool_create(&pool, &desc) == SPDL_OK);
    CHECK_EQ(spdl_pool_submit(pool, until_the_drain_sleeps, &running, 0), SPDL_OK);
    REQUIRE(test_thread_start(&guest, run_as_guest, pool));
    await(&running, 1);
    CHECK_EQ(spdl_pool_submit(pool, count_job, &ran, 0), SPDL_OK);
    CHECK_EQ(spdl_pool_drain(pool, SPDL_FOREVER), SPDL_OK);
    CHECK(drain_sleeps >= 2);
    CHECK_EQ(ran, 1);
    test_join(guest);
    spdl_pool_destroy(pool);
}

static void stop_wakes_who_submits(void) {
    spdl_pool *pool = pool_of(1, 1);
    hold h = { 0, 0 };
    submitter s[3];
    test_thread threads[3];
    int ran = 0, accepted = 0;
    CHECK_EQ(spdl_pool_submit(pool, hold_job, &h, 0), SPDL_OK);
    await(&h.running, 1);
    for (int i = 0; i < 3; ++i) {
        const submitter one = { pool, &ran, 0, SPDL_OK, 10 };
        s[i] = one;
        REQUIRE(test_thread_start(&threads[i], submit_many, &s[i]));
    }
    while (spdl_ring_count(pool->jobs) < 1) test_sleep_us(100);
    test_sleep_us(20000); /* one job is in the queue, the rest wait for room */
    CHECK_EQ(spdl_pool_stop(pool, 0), SPDL_TIMEOUT);
    for (int i = 0; i < 3; ++i) {
        test_join(threads[i]);
        CHECK_EQ(s[i].last, SPDL_CLOSED);
        accepted += s[i].accepted;
    }
    CHECK_EQ(accepted, 1);
    set(&h.go, 1);
    CHECK_EQ(spdl_pool_stop(pool, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(ran, accepted);
    spdl_pool_destroy(pool);
}

static void destroy_runs_what_was_accepted(void) {
    for (int round = 0; round < 20; ++round) {
        spdl_pool *pool = pool_of(1 + round % 4, 200);
        int ran = 0;
        for (int i = 0; i < 200; ++i)
            CHECK_EQ(spdl_pool_submit(pool, count_job, &ran, 0), SPDL_OK);
        spdl_pool_destroy(pool);
        CHECK_EQ(ran, 200);
    }
    spdl_pool_destroy(NULL);
}

SPDL_FN(endless, void, int) {
    *out = NULL;
    return SPDL_OK;
}

static void keep_text(spdl_log_level level, const char *text, void *user) {
    CHECK_EQ(level, SPDL_LOG_ERROR);
    snprintf((char *)user, 200, "%s", text);
}

typedef struct inside {
    spdl_pool *pool;
    spdl_result drained, stopped;
} inside;

static void waits_for_itself(void *arg, int worker, void *local) {
    inside *in = (inside *)arg;
    (void)worker;
    (void)local;
    in->drained = spdl_pool_drain(in->pool, SPDL_FOREVER);
    in->stopped = spdl_pool_stop(in->pool, SPDL_FOREVER);
    spdl_pool_destroy(in->pool);
}

static void a_worker_does_not_wait_for_itself(void) {
    spdl_pool_desc desc = { 0 };
    char text[200] = "";
    inside in = { NULL, SPDL_OK, SPDL_OK };
    desc.workers = 2;
    desc.logger.log_fn = keep_text;
    desc.logger.user = text;
    REQUIRE(spdl_pool_create(&in.pool, &desc) == SPDL_OK);
    CHECK_EQ(spdl_pool_submit(in.pool, waits_for_itself, &in, 0), SPDL_OK);
    CHECK_EQ(spdl_pool_drain(in.pool, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(in.drained, SPDL_E_INVALID);
    CHECK_EQ(in.stopped, SPDL_E_INVALID);
    CHECK(strstr(text, "spdl_pool_destroy") != NULL);
    spdl_pool_destroy(in.pool);
}

static void destroy_leaves_a_pool_that_is_in_use(void) {
    spdl_pool_desc desc = { 0 };
    spdl_pipeline_desc on = { 0 };
    spdl_pipeline *pipeline;
    char text[200] = "";
    int ran = 0;
    desc.workers = 2;
    desc.logger.log_fn = keep_text;
    desc.logger.user = text;
    REQUIRE(spdl_pool_create(&on.pool, &desc) == SPDL_OK);
    REQUIRE(spdl_pipeline_create(&pipeline, &on, SPDL_STAGES(SPDL_SOURCE(endless), SPDL_SINK(2))) ==
            SPDL_OK);
    spdl_pool_destroy(on.pool);
    CHECK(strstr(text, "pipeline") != NULL);
    CHECK_EQ(spdl_pool_submit(on.pool, count_job, &ran, 0), SPDL_OK);
    CHECK_EQ(spdl_pool_drain(on.pool, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(ran, 1);
    spdl_pipeline_destroy(pipeline);
    spdl_pool_destroy(on.pool);
}

/* --- init and fini --- */

typedef struct hooks {
    int inits, finis, fail_at; /* fail_at: the worker whose init fails, or -1 */
    uint64_t thread[64];
    int initialised[64], finished[64], local[64];
} hooks;

static spdl_result hooks_init(void *ctx, int worker, void **local) {
    hooks *h = (hooks *)ctx;
    if (worker == h->fail_at) return SPDL_E_IO;
    if (h->fail_at >= 0) test_sleep_us(2000); /* the failure comes first */
    h->thread[worker] = test_thread_id();
    h->local[worker] = 100 + worker;
    *local = &h->local[worker];
    h->initialised[worker]++;
    add(&h->inits, 1);
    return SPDL_OK;
}

static void hooks_fini(void *ctx, int worker, void *local) {
    hooks *h = (hooks *)ctx;
    CHECK(local == &h->local[worker]);
    CHECK(h->thread[worker] == test_thread_id());
    h->finished[worker]++;
    add(&h->finis, 1);
}

static void hooks_job(void *arg, int worker, void *local) {
    hooks *h = (hooks *)arg;
    CHECK_EQ(h->initialised[worker], 1);
    CHECK_EQ(h->finished[worker], 0);
    CHECK(h->thread[worker] == test_thread_id());
    CHECK(local == &h->local[worker] && *(int *)local == 100 + worker);
}

static void hooks_run_once_on_each_worker(void) {
    static const int workers[] = { 1, 5, 64 };
    for (int w = 0; w < 3; ++w) {
        hooks h = { .fail_at = -1 };
        spdl_pool_desc desc = { 0 };
        spdl_pool *pool;
        desc.workers = workers[w];
        desc.init = hooks_init;
        desc.fini = hooks_fini;
        desc.ctx = &h;
        REQUIRE(spdl_pool_create(&pool, &desc) == SPDL_OK);
        CHECK_EQ(h.inits, workers[w]); /* all of them, before create returned */
        for (int i = 0; i < 200; ++i)
            CHECK_EQ(spdl_pool_submit(pool, hooks_job, &h, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(spdl_pool_drain(pool, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(get(&h.finis), 0);
        spdl_pool_destroy(pool);
        CHECK_EQ(h.finis, workers[w]);
        for (int i = 0; i < workers[w]; ++i) {
            CHECK_EQ(h.initialised[i], 1);
            CHECK_EQ(h.finished[i], 1);
        }
    }
}

static void init_that_fails_ends_all_workers(void) {
    for (int at = 0; at < 5; ++at) {
        hooks h = { .fail_at = at };
        spdl_pool_desc desc = { 0 };
        spdl_error error;
        spdl_pool *pool = (spdl_pool *)&h;
        desc.workers = 5;
        desc.name = "loader";
        desc.init = hooks_init;
        desc.fini = hooks_fini;
        desc.ctx = &h;
        desc.error = &error;
        CHECK_EQ(spdl_pool_create(&pool, &desc), SPDL_E_IO);
        CHECK(pool == NULL);
        CHECK_EQ(error.result, SPDL_E_IO);
        CHECK_EQ(error.stage, -1);
        CHECK(strstr(error.text, "loader") != NULL && strstr(error.text, "init") != NULL);
        CHECK_EQ(h.inits, 4);
        for (int i = 0; i < 5; ++i) CHECK_EQ(h.finished[i], i != at);
        CHECK(named("loader-0", 0) && named("loader-4", 0));
    }
}

static void thread_that_fails_ends_all_workers(void) {
    for (int at = 0; at < 5; ++at) {
        hooks h = { .fail_at = -1 };
        spdl_pool_desc desc = { 0 };
        spdl_error error;
        spdl_pool *pool = (spdl_pool *)&h;
        char number[32];
        desc.workers = 5;
        desc.name = "loader";
        desc.init = hooks_init;
        desc.fini = hooks_fini;
        desc.ctx = &h;
        desc.error = &error;
        threads_made = 0;
        thread_to_fail = at;
        CHECK_EQ(spdl_pool_create(&pool, &desc), SPDL_E_THREAD);
        CHECK(pool == NULL);
        CHECK_EQ(error.result, SPDL_E_THREAD);
        snprintf(number, sizeof number, "thread %d of 5", at);
        CHECK(strstr(error.text, number) != NULL && strstr(error.text, "loader") != NULL);
        CHECK_EQ(h.inits, at);
        CHECK_EQ(h.finis, at);
        for (int i = 0; i < 5; ++i) CHECK_EQ(h.finished[i], i < at);
        CHECK(named("loader-0", 0) && named("loader-3", 0));
    }
    thread_to_fail = -1;
}

/* --- desc --- */

static void desc_is_checked(void) {
    static const int cpus[] = { 0 };
    spdl_pool_desc good = { 0 }, desc;
    spdl_error error;
    spdl_pool *pool;
    good.workers = 1;
    good.error = &error;
    CHECK_EQ(spdl_pool_create(NULL, &good), SPDL_E_INVALID);
    pool = (spdl_pool *)&good;
    CHECK_EQ(spdl_pool_create(&pool, NULL), SPDL_E_INVALID);
    CHECK(pool == NULL);
#define REFUSED(change, expected, word)                                                            \
    desc = good;                                                                                   \
    change;                                                                                        \
    pool = (spdl_pool *)&good;                                                                     \
    CHECK_EQ(spdl_pool_create(&pool, &desc), expected);                                            \
    CHECK(pool == NULL);                                                                           \
    CHECK_EQ(error.result, expected);                                                              \
    CHECK_EQ(error.stage, -1);                                                                     \
    CHECK(strstr(error.text, word) != NULL);                                                       \
    desc.error = NULL; /* a place for the text is optional */                                      \
    CHECK_EQ(spdl_pool_create(&pool, &desc), expected)
    REFUSED(desc.workers = 0, SPDL_E_INVALID, "workers is 0");
    REFUSED(desc.workers = -1, SPDL_E_INVALID, "workers is -1");
    REFUSED(desc.workers = 257, SPDL_E_INVALID, "workers is 257");
    REFUSED(desc.queue_size = -1, SPDL_E_INVALID, "queue_size is -1");
    REFUSED(desc.queue_size = INT32_MAX, SPDL_E_INVALID, "queue_size is 2147483647");
    REFUSED(desc.allocator.alloc_fn = (void *(*)(size_t, size_t, void *))(uintptr_t)1,
            SPDL_E_INVALID, "allocator");
    REFUSED(desc.allocator.free_fn = (void (*)(void *, size_t, void *))(uintptr_t)1,
            SPDL_E_INVALID, "allocator");
    REFUSED(desc.policy.nice = 20, SPDL_E_INVALID, "pool: policy.nice is 20, must be -20 to 19");
    REFUSED(desc.policy.sched = (spdl_sched)-1, SPDL_E_INVALID, "policy.sched is -1, which is no");
    REFUSED(desc.policy.sched = (spdl_sched)3, SPDL_E_INVALID, "policy.sched is 3, which is no");
    REFUSED(desc.policy.cpu_count = 1, SPDL_E_INVALID, "cpu_count is 1, but policy.cpus is NULL");
    REFUSED((desc.policy.cpu_count = -1, desc.policy.cpus = cpus), SPDL_E_INVALID,
            "policy.cpu_count is -1");
    if (TEST_POSIX) { /* less than a thread needs; Windows makes more of it */
        REFUSED(desc.stack_bytes = 1, SPDL_E_THREAD, "thread 0 of 1");
    }
#undef REFUSED
    desc = good;
    error.result = SPDL_E_IO;
    REQUIRE(spdl_pool_create(&pool, &desc) == SPDL_OK);
    CHECK_EQ(error.result, SPDL_OK); /* an old error does not stay */
    spdl_pool_destroy(pool);
}

/* The caller's error may be gone once create has returned. */
static void error_is_used_by_create_only(void) {
    spdl_pool_desc desc = { 0 };
    spdl_error *error = (spdl_error *)calloc(1, sizeof *error);
    spdl_pool *pool;
    int ran = 0;
    desc.workers = 2;
    desc.error = error;
    REQUIRE(spdl_pool_create(&pool, &desc) == SPDL_OK);
    free(error);
    CHECK_EQ(spdl_pool_submit(pool, count_job, &ran, 0), SPDL_OK);
    spdl_pool_destroy(pool);
    CHECK_EQ(ran, 1);
}

/* --- threads --- */

static void threads_are_named(void) {
    TEST_NEEDS_LINUX();
    static const struct {
        const char *name, *first, *third;
    } rows[] = {
        { NULL, "spdl-0", "spdl-2" },
        { "decode", "decode-0", "decode-2" },
        { "a_name_that_is_far_too_long_for_a_thread_or_a_pool", "a_name_that-0", "a_name_that-2" },
    };
    for (size_t i = 0; i < 3; ++i) {
        spdl_pool_desc desc = { 0 };
        spdl_pool *pool;
        char name[80];
        desc.workers = 3;
        if (rows[i].name != NULL) {
            snprintf(name, sizeof name, "%s", rows[i].name);
            desc.name = name;
        }
        REQUIRE(spdl_pool_create(&pool, &desc) == SPDL_OK);
        memset(name, 'x', sizeof name - 1); /* the name was copied */
        CHECK(named(rows[i].first, 1));
        CHECK(named(rows[i].third, 1));
        spdl_pool_destroy(pool);
        CHECK(named(rows[i].first, 0));
    }
}

#if defined(__linux__)
static void stack_job(void *arg, int worker, void *local) {
    pthread_attr_t attributes;
    (void)worker;
    (void)local;
    if (!CHECK(pthread_getattr_np(pthread_self(), &attributes) == 0)) return;
    CHECK(pthread_attr_getstacksize(&attributes, (size_t *)arg) == 0);
    pthread_attr_destroy(&attributes);
}

static void stack_size_is_as_asked(void) {
    spdl_pool_desc desc = { 0 };
    spdl_pool *pool;
    size_t bytes = 0;
    desc.workers = 1;
    desc.stack_bytes = (size_t)20 << 20; /* more than those that glibc has kept of other threads */
    REQUIRE(spdl_pool_create(&pool, &desc) == SPDL_OK);
    CHECK_EQ(spdl_pool_submit(pool, stack_job, &bytes, 0), SPDL_OK);
    spdl_pool_destroy(pool);
    CHECK(bytes >= (size_t)20 << 20 && bytes < (size_t)21 << 20);
}
#else
static void stack_size_is_as_asked(void) { TEST_SKIP("needs pthread_getattr_np"); }
#endif

static test_thread signal_owner;
static int signals_seen, signals_elsewhere;

static void on_signal(int number) {
    (void)number;
    __atomic_fetch_add(&signals_seen, 1, __ATOMIC_RELAXED);
    if (!pthread_equal(pthread_self(), signal_owner))
        __atomic_fetch_add(&signals_elsewhere, 1, __ATOMIC_RELAXED);
}

static void mask_job(void *arg, int worker, void *local) {
    static const int blocked[] = { SIGHUP,  SIGINT,  SIGQUIT, SIGUSR1, SIGUSR2, SIGPIPE,
                                   SIGALRM, SIGTERM, SIGCHLD, SIGWINCH };
    static const int open[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGPROF };
    sigset_t mask;
    (void)arg;
    (void)worker;
    (void)local;
    sigemptyset(&mask);
    CHECK(pthread_sigmask(SIG_BLOCK, NULL, &mask) == 0);
    for (size_t i = 0; i < sizeof blocked / sizeof blocked[0]; ++i)
        CHECK_EQ(sigismember(&mask, blocked[i]), 1);
    for (size_t i = 0; i < sizeof open / sizeof open[0]; ++i)
        CHECK_EQ(sigismember(&mask, open[i]), 0);
}

static void signals_go_to_the_programs_threads(void) {
    struct sigaction action;
    sigset_t usr1, before, after;
    spdl_pool *pool;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    REQUIRE(sigaction(SIGUSR1, &action, NULL) == 0);
    signal_owner = pthread_self();
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    sigemptyset(&before);
    sigemptyset(&after);
    pthread_sigmask(SIG_BLOCK, NULL, &before);
    pool = pool_of(4, 0);
    pthread_sigmask(SIG_BLOCK, NULL, &after); /* create restored the mask of its caller */
    for (int number = 1; number < 32; ++number)
        CHECK_EQ(sigismember(&before, number), sigismember(&after, number));
    for (int i = 0; i < 16; ++i)
        CHECK_EQ(spdl_pool_submit(pool, mask_job, NULL, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(spdl_pool_drain(pool, SPDL_FOREVER), SPDL_OK);
    /* while the only thread of the program blocks it, nobody takes the signal */
    pthread_sigmask(SIG_BLOCK, &usr1, NULL);
    kill(getpid(), SIGUSR1);
    test_sleep_us(10000);
    CHECK_EQ(__atomic_load_n(&signals_seen, __ATOMIC_RELAXED), 0);
    pthread_sigmask(SIG_UNBLOCK, &usr1, NULL);
    for (int i = 0; i < 50; ++i) {
        kill(getpid(), SIGUSR1);
        test_sleep_us(50);
    }
    spdl_pool_destroy(pool);
    CHECK(__atomic_load_n(&signals_seen, __ATOMIC_RELAXED) > 1);
    CHECK_EQ(__atomic_load_n(&signals_elsewhere, __ATOMIC_RELAXED), 0);
}

static void as_many_workers_as_allowed(void) {
    spdl_pool *pool = pool_of(256, 0);
    int ran = 0;
    CHECK_EQ(pool->desc.workers, 256);
    CHECK(!TEST_LINUX || named("spdl-255", 1));
    for (int i = 0; i < 500; ++i)
        CHECK_EQ(spdl_pool_submit(pool, count_job, &ran, SPDL_FOREVER), SPDL_OK);
    spdl_pool_destroy(pool);
    CHECK_EQ(ran, 500);
}

/* --- idle --- */

static double cpu_ms(void) { return (double)test_cpu_ns() * 1e-6; }

static void *drain_thread(void *arg) {
    CHECK_EQ(spdl_pool_drain((spdl_pool *)arg, SPDL_FOREVER), SPDL_OK);
    return NULL;
}

static void *take_thread(void *arg) {
    void *item;
    CHECK_EQ(spdl_pipeline_next((spdl_pipeline *)arg, &item, SPDL_FOREVER), SPDL_CLOSED);
    return NULL;
}

SPDL_FN(never, void, int) {
    while (!spdl_stopping(task)) test_sleep_us(100000);
    return SPDL_SKIP;
}

/* Everybody sleeps: workers of a pool, a drain, a pipeline whose sink is full, a trainer. */
static void idle_burns_nothing(void) {
    const double allowed = TEST_SANITIZED ? 20 : 2;
    spdl_pool *pool = pool_of(8, 0);
    spdl_pipeline_desc desc = { 0 };
    spdl_pipeline *full, *empty;
    test_thread drainer, trainer;
    hold h = { 0, 0 };
    double start, used;
    desc.workers = 4;
    REQUIRE(spdl_pipeline_create(&full, &desc, SPDL_STAGES(SPDL_SOURCE(endless), SPDL_SINK(2))) ==
            SPDL_OK);
    REQUIRE(spdl_pipeline_create(&empty, &desc, SPDL_STAGES(SPDL_SOURCE(never), SPDL_SINK(2))) ==
            SPDL_OK);
    REQUIRE(test_thread_start(&trainer, take_thread, empty));
    spdl__add(&pool->pending, 1); /* as if a job ran, so that a drain has to wait */
    REQUIRE(test_thread_start(&drainer, drain_thread, pool));
    test_sleep_us(100000);
    start = cpu_ms();
    test_sleep_us(200000);
    used = cpu_ms() - start;
    if (!CHECK(used < allowed)) fprintf(stderr, "    %.2f ms of CPU time in 200 ms\n", used);
    CHECK_EQ(spdl_pool_submit(pool, hold_job, &h, 0), SPDL_OK); /* and all of them wake again */
    await(&h.running, 1);
    set(&h.go, 1);
    spdl__sub(&pool->pending, 1);
    CHECK_EQ(spdl_pool_drain(pool, SPDL_SECONDS(5)), SPDL_OK);
    spdl__os_event_wake(&pool->idle, SPDL__ALL);
    test_join(drainer);
    CHECK_EQ(spdl_pipeline_stop(empty, SPDL_FOREVER), SPDL_OK);
    test_join(trainer);
    spdl_pipeline_destroy(full);
    spdl_pipeline_destroy(empty);
    spdl_pool_destroy(pool);
}

#if defined(__linux__)
/* --- a sandbox as that of Chromium or Android: a system call is trapped, a handler answers --- */

static int traps_handled;

static void on_trap(int number) {
    (void)number;
    __atomic_fetch_add(&traps_handled, 1, __ATOMIC_RELAXED);
}

/* getsid is trapped from here on, for the whole process. */
static bool sandbox_begins(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getsid, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog program = { sizeof filter / sizeof filter[0], filter };
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_trap;
    return sigaction(SIGSYS, &action, NULL) == 0 &&
           prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

static void trapped_job(void *arg, int worker, void *local) {
    (void)arg, (void)worker, (void)local;
    (void)syscall(SYS_getsid, 0);
}

static void workers_may_be_trapped_by_a_sandbox(void) {
    spdl_pool *pool;
    if (!sandbox_begins()) TEST_SKIP("needs seccomp");
    pool = pool_of(2, 0);
    for (int i = 0; i < 4; ++i)
        CHECK_EQ(spdl_pool_submit(pool, trapped_job, NULL, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(spdl_pool_drain(pool, SPDL_SECONDS(5)), SPDL_OK);
    CHECK_EQ(get(&traps_handled), 4);
    spdl_pool_destroy(pool);
}
#else
static void workers_may_be_trapped_by_a_sandbox(void) { TEST_SKIP("needs Linux"); }
#endif
/* --- pipelines that have nothing to do --- */

/* A client that has so many steps to do, and counts who looks. */
typedef struct idler {
    spdl__client client;
    spdl__client_slot *slot;
    uint64_t bit;
    int left;              /* atomic; -1: without end */
    uint64_t steps, looks; /* atomic */
    int passed_on;         /* atomic */
} idler;

static bool idler_step(void *self, int worker, bool again) {
    idler *i = (idler *)self;
    (void)worker;
    (void)again;
    __atomic_fetch_add(&i->steps, 1, __ATOMIC_ACQ_REL);
    for (int left = get(&i->left); left != 0;)
        if (left < 0 || __atomic_compare_exchange_n(&i->left, &left, left - 1, false,
                                                    __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            return true;
    return false;
}

static bool idler_runnable(void *self, int worker) {
    idler *i = (idler *)self;
    (void)worker;
    __atomic_fetch_add(&i->looks, 1, __ATOMIC_RELAXED);
    return get(&i->left) != 0;
}

static void idler_pass_on(void *self) { add(&((idler *)self)->passed_on, 1); }

static bool idler_watch(void *self) { return self == NULL; }

static void idler_attach(idler *i, spdl_pool *pool, int steps) {
    memset(i, 0, sizeof *i);
    i->left = steps;
    i->client.step = idler_step;
    i->client.runnable = idler_runnable;
    i->client.pass_on = idler_pass_on;
    i->client.watch = idler_watch;
    i->client.self = i;
    i->slot = spdl__pool_attach(pool, &i->client, &i->bit);
    REQUIRE(i->slot != NULL);
}

static uint64_t visits_of(const idler *i) {
    return __atomic_load_n(&i->steps, __ATOMIC_ACQUIRE) +
           __atomic_load_n(&i->looks, __ATOMIC_ACQUIRE);
}

static void steps_more(const idler *i, uint64_t steps) {
    const uint64_t until = __atomic_load_n(&i->steps, __ATOMIC_ACQUIRE) + steps;
    const uint64_t start = spdl_time_ns();
    while (__atomic_load_n(&i->steps, __ATOMIC_ACQUIRE) < until) {
        REQUIRE(spdl_time_ns() - start < 15000000000u);
        test_sleep_us(100);
    }
}

/* How long the workers have worked for this client while there were turns: only then it is
   timed. */
static uint64_t timed_of(const idler *i, const spdl_pool *pool) {
    uint64_t ns = 0;
    for (int k = 0; k < pool->desc.workers; ++k)
        ns += __atomic_load_n(&pool->worker[k].worked_ns[i->slot - pool->slot], __ATOMIC_ACQUIRE);
    return ns;
}

/* A worker may be in the middle of a turn: then once more. */
static void is_alone(const idler *i, const spdl_pool *pool) {
    uint64_t timed, before;
    int tries = 0;
    if (TEST_SANITIZED) return; /* these are the workers' own */
    do {
        before = timed_of(i, pool);
        steps_more(i, 100000);
        timed = timed_of(i, pool) - before;
    } while (timed != 0 && ++tries < 20);
    CHECK_EQ(timed, 0);
}

/* Beside a busy client nobody looks at those that are idle, nor at the clock; one that gets
   something to do is visited. */
static void idle_clients_are_not_visited(void) {
    enum { IDLERS = 12 };
    static idler busy, idle[IDLERS];
    for (int workers = 1; workers <= 3; ++workers) {
        spdl_pool *pool = pool_of(workers, 1);
        uint64_t visits[IDLERS];
        for (int i = 0; i < IDLERS / 2; ++i) idler_attach(&idle[i], pool, 0);
        idler_attach(&busy, pool, -1);
        for (int i = IDLERS / 2; i < IDLERS; ++i) idler_attach(&idle[i], pool, 0);
        while (__atomic_load_n(&pool->beacon.quiet, __ATOMIC_ACQUIRE) != ~busy.bit)
            test_sleep_us(100);
        is_alone(&busy, pool);
        for (int i = 0; i < IDLERS; ++i) visits[i] = visits_of(&idle[i]);
        steps_more(&busy, 100000);
        for (int i = 0; i < IDLERS; ++i) CHECK_EQ(visits_of(&idle[i]), visits[i]);
        for (int i = 0; i < IDLERS; ++i) {
            set(&idle[i].left, 3);
            spdl__full_barrier();
            spdl__client_stir(&pool->beacon, idle[i].bit);
            await(&idle[i].left, 0);
        }
        while (__atomic_load_n(&pool->beacon.quiet, __ATOMIC_ACQUIRE) != ~busy.bit)
            test_sleep_us(100);
        for (int i = 0; i < IDLERS; ++i) spdl__pool_detach(pool, idle[i].slot);
        set(&busy.left, 0);
        spdl__pool_detach(pool, busy.slot);
        spdl_pool_destroy(pool);
    }
}

/* What was on a pool once costs those that come later nothing: no turns, no slots to look at. */
static void what_was_on_a_pool_leaves_nothing(void) {
    static idler some[SPDL__MAX_CLIENTS], last;
    spdl_pool *pool = pool_of(2, 1);
    for (int round = 0; round < 3; ++round) {
        for (int i = 0; i < SPDL__MAX_CLIENTS; ++i) idler_attach(&some[i], pool, i % 2 * 10);
        for (int i = 0; i < SPDL__MAX_CLIENTS; ++i) await(&some[i].left, 0);
        for (int i = 0; i < SPDL__MAX_CLIENTS; ++i)
            spdl__pool_detach(pool, some[(i + round * 7) % SPDL__MAX_CLIENTS].slot);
        CHECK_EQ(pool->slots_used, 0);
        CHECK(pool->beacon.quiet == UINT64_MAX);
    }
    idler_attach(&last, pool, -1);
    CHECK_EQ(last.slot - pool->slot, 0);
    is_alone(&last, pool);
    CHECK_EQ(pool->slots_used, 1);
    set(&last.left, 0);
    spdl__pool_detach(pool, last.slot);
    spdl_pool_destroy(pool);
}

/* While no worker sleeps and a consumer does, a worker that begins a job leaves what there is to
   the clients' consumers. */
static void what_a_worker_leaves_is_passed_on(void) {
    static idler some[3];
    spdl_pool *pool = pool_of(1, 4);
    hold h = { 0, 0 };
    int jobs = 0;
    REQUIRE(spdl_pool_submit(pool, hold_job, &h, 0) == SPDL_OK);
    await(&h.running, 1);
    for (int i = 0; i < 3; ++i) idler_attach(&some[i], pool, 0);
    spdl__pool_detach(pool, some[1].slot);
    spdl__add32(&pool->beacon.sleepers, SPDL__WAITER);
    REQUIRE(spdl_pool_submit(pool, count_job, &jobs, 0) == SPDL_OK);
    set(&h.go, 1);
    await(&jobs, 1);
    for (int i = 0; i < 3; ++i) CHECK((get(&some[i].passed_on) > 0) == (i != 1));
    spdl__sub32(&pool->beacon.sleepers, SPDL__WAITER);
    spdl__pool_detach(pool, some[0].slot);
    spdl__pool_detach(pool, some[2].slot);
    spdl_pool_destroy(pool);
}

SPDL_FN(never_ends, void, char) {
    *out = (char *)(uintptr_t)1;
    return SPDL_OK;
}

SPDL_FN(drop_it, char, char) { return SPDL_SKIP; }

SPDL_FN(pass_it, char, char) {
    *out = in;
    return SPDL_OK;
}

/* One worker, and a pipeline that always has something to do: another one is served all the same,
   and so is a job. */
static void a_busy_pipeline_starves_nobody(void) {
    spdl_pipeline_desc desc = { .pool = pool_of(1, 4) };
    spdl_pipeline *busy, *other;
    uint64_t state = test_seed();
    int jobs = 0;
    REQUIRE(spdl_pipeline_create(&busy, &desc, SPDL_STAGES(
        SPDL_SOURCE(never_ends), SPDL_PIPE(drop_it), SPDL_SINK(1))) == SPDL_OK);
    REQUIRE(spdl_pipeline_create(&other, &desc, SPDL_STAGES(
        SPDL_FEED(char, .buffer_size = 2), SPDL_PIPE(pass_it), SPDL_SINK(1))) == SPDL_OK);
    for (int i = 1; i <= (TEST_SANITIZED ? 200 : 1000); ++i) {
        char *it = NULL;
        for (volatile uint64_t k = test_random(&state) % 3000; k > 0; --k) {}
        REQUIRE(spdl_pipeline_push(other, (void *)(uintptr_t)i, 0) == SPDL_OK);
        REQUIRE(SPDL_NEXT(other, &it, SPDL_SECONDS(15)) == SPDL_OK);
        CHECK_EQ((uintptr_t)it, i);
        if (i % 8 == 0) {
            REQUIRE(spdl_pool_submit(desc.pool, count_job, &jobs, 0) == SPDL_OK);
            await(&jobs, i / 8);
        }
    }
    spdl_pipeline_destroy(busy);
    spdl_pipeline_destroy(other);
    spdl_pool_destroy(desc.pool);
}

/* --- an idle pipeline is woken by whatever changes it --- */

enum { RESTS = 5, ACTORS = 3 };

/* A pipeline that rests most of the time, and what it has under way. */
typedef struct rest {
    spdl_pipeline *p;
    spdl_deferred deferred; /* of the call at hand, when `there` is its item */
    uintptr_t there;        /* atomic */
    int inits, finis;       /* atomic */
    uintptr_t pushed, taken;
} rest;

typedef struct actor {
    spdl_pool *pool;
    uint64_t state;
    rest own[RESTS];
} actor;

/* Every third one is completed by the actor. */
SPDL_FN(leaves_it, char, char) {
    rest *r = (rest *)spdl_ctx(task);
    const uintptr_t value = (uintptr_t)in;
    *out = in;
    if (value % 3 != 0) return SPDL_OK;
    r->deferred = spdl_defer(task);
    __atomic_store_n(&r->there, value, __ATOMIC_RELEASE);
    return SPDL_PENDING;
}

static spdl_result rest_init(void *ctx, int worker, void **local) {
    (void)worker;
    (void)local;
    add(&((rest *)ctx)->inits, 1);
    return SPDL_OK;
}

static void rest_fini(void *ctx, int worker, void *local) {
    (void)worker;
    (void)local;
    add(&((rest *)ctx)->finis, 1);
}

static void say_nothing(spdl_log_level level, const char *text, void *user) {
    (void)level;
    (void)text;
    (void)user;
}

static void rest_open(actor *a, rest *r) {
    spdl_pipeline_desc desc = { .pool = a->pool, .logger = { say_nothing, NULL } };
    memset(r, 0, sizeof *r);
    REQUIRE(spdl_pipeline_create(&r->p, &desc, SPDL_STAGES(
        SPDL_FEED(char, .buffer_size = 4), SPDL_PIPE(pass_it, .concurrency = 2),
        SPDL_PIPE(leaves_it, .ctx = r, .deferred = true, .buffer_size = 1),
        SPDL_PIPE(pass_it, .ctx = r, .init = rest_init, .fini = rest_fini),
        SPDL_SINK(1))) == SPDL_OK);
}

static void rest_close(rest *r) {
    spdl_pipeline_destroy(r->p);
    CHECK_EQ(get(&r->inits), get(&r->finis));
}

static void actor_pause(actor *a) {
    const uint64_t lot = test_random(&a->state) % 8;
    if (lot == 0) test_sleep_us((int64_t)(test_random(&a->state) % 300));
    else for (volatile uint64_t k = test_random(&a->state) % 2000; lot < 4 && k > 0; --k) {}
}

/* Takes all that was pushed, in order. */
static void rest_take(actor *a, rest *r) {
    while (r->taken < r->pushed) {
        const uintptr_t value = r->taken + 1;
        const uint64_t start = spdl_time_ns();
        char *it = NULL;
        while (value % 3 == 0 && __atomic_load_n(&r->there, __ATOMIC_ACQUIRE) != value) {
            REQUIRE(spdl_time_ns() - start < 15000000000u);
            test_yield();
        }
        if (value % 3 == 0) {
            actor_pause(a);
            CHECK_EQ(spdl_complete(r->deferred, SPDL_OK, (void *)value), SPDL_OK);
        }
        actor_pause(a);
        REQUIRE(SPDL_NEXT(r->p, &it, SPDL_SECONDS(15)) == SPDL_OK);
        CHECK_EQ((uintptr_t)it, value);
        ++r->taken;
    }
}

static void rest_act(actor *a, rest *r) {
    char *it = NULL;
    for (uint64_t more = 1 + test_random(&a->state) % 4; more > 0; --more) {
        REQUIRE(spdl_pipeline_push(r->p, (void *)++r->pushed, SPDL_SECONDS(15)) == SPDL_OK);
        if (more % 2) actor_pause(a);
    }
    switch (test_random(&a->state) % 12) {
    case 0:
        CHECK_EQ(spdl_pipeline_push_end(r->p), SPDL_OK);
        rest_take(a, r);
        CHECK_EQ(SPDL_NEXT(r->p, &it, SPDL_SECONDS(15)), SPDL_END);
        actor_pause(a);
        REQUIRE(spdl_pipeline_rewind(r->p, 0, SPDL_SECONDS(15)) == SPDL_OK);
        return;
    case 1:
        rest_take(a, r);
        actor_pause(a);
        REQUIRE(spdl_pipeline_stop(r->p, SPDL_SECONDS(15)) == SPDL_OK);
        CHECK_EQ(SPDL_NEXT(r->p, &it, SPDL_SECONDS(15)), SPDL_CLOSED);
        REQUIRE(spdl_pipeline_rewind(r->p, 0, SPDL_SECONDS(15)) == SPDL_OK);
        return;
    case 2:
        rest_take(a, r);
        actor_pause(a);
        rest_close(r);
        rest_open(a, r);
        return;
    case 3:
        CHECK_EQ(spdl_pipeline_set_concurrency(r->p, 1, 1 + (int)(r->pushed % 2)), SPDL_OK);
        break;
    default: break;
    }
    rest_take(a, r);
}

static void *acts(void *arg) {
    actor *a = (actor *)arg;
    for (int i = 0; i < (TEST_SANITIZED ? 400 : 2000); ++i) {
        rest_act(a, &a->own[test_random(&a->state) % RESTS]);
        actor_pause(a);
    }
    return NULL;
}

/* Each worker that ran an init is found for its fini, however it was about to sleep. */
static void every_worker_comes_to_its_fini(void) {
    actor a = { .state = test_seed() };
    rest *r = &a.own[0], *idle = &a.own[1];
    chaos_seed = test_seed();
    a.pool = pool_of(3, 1);
    rest_open(&a, idle); /* so that there are several */
    for (int i = 0; i < (TEST_SANITIZED ? 300 : 3000); ++i) {
        rest_open(&a, r);
        for (int k = 0; k < i % 3 + 1; ++k) rest_act(&a, r);
        actor_pause(&a);
        rest_close(r);
    }
    rest_close(idle);
    spdl_pool_destroy(a.pool);
    chaos_seed = 0;
}

static void an_idle_pipeline_is_woken(void) {
    static actor some[ACTORS];
    chaos_seed = test_seed();
    for (int workers = 1; workers <= 3; ++workers) {
        spdl_pool *pool = pool_of(workers, 1);
        spdl_pipeline_desc desc = { .pool = pool };
        spdl_pipeline *busy = NULL;
        test_thread thread[ACTORS];
        if (workers == 2)
            REQUIRE(spdl_pipeline_create(&busy, &desc, SPDL_STAGES(
                SPDL_SOURCE(never_ends), SPDL_PIPE(drop_it), SPDL_SINK(1))) == SPDL_OK);
        for (int i = 0; i < ACTORS; ++i) {
            some[i].pool = pool;
            some[i].state = test_seed() + (uint64_t)(workers * ACTORS + i);
            for (int k = 0; k < RESTS; ++k) rest_open(&some[i], &some[i].own[k]);
            REQUIRE(test_thread_start(&thread[i], acts, &some[i]));
        }
        for (int i = 0; i < ACTORS; ++i) test_join(thread[i]);
        for (int i = 0; i < ACTORS; ++i)
            for (int k = 0; k < RESTS; ++k) rest_close(&some[i].own[k]);
        spdl_pipeline_destroy(busy);
        CHECK_EQ(pool->slots_used, 0);
        CHECK(pool->beacon.quiet == UINT64_MAX);
        spdl_pool_destroy(pool);
    }
    chaos_seed = 0;
}

/* --- a sink with a low watermark, of a pipeline that was quiet --- */

/* Number 1 waits until number 16 is called, for which the trainer has to take number 0. */
typedef struct waits_for_16 {
    int called, done; /* atomic */
} waits_for_16;

SPDL_FN(counts_to_32, void, char) {
    if (spdl_sequence(task) == 32) return SPDL_END;
    *out = (char *)(uintptr_t)(spdl_sequence(task) + 1);
    return SPDL_OK;
}

SPDL_FN(one_waits, char, char) {
    waits_for_16 *w = (waits_for_16 *)spdl_ctx(task);
    if (spdl_sequence(task) == 16) set(&w->called, 1);
    if (spdl_sequence(task) == 1) await(&w->called, 1);
    else add(&w->done, 1);
    *out = in;
    return SPDL_OK;
}

static void what_the_watermark_passed_over_is_not_quiet(void) {
    for (int i = 0; i < 3; ++i) {
        static idler beside; /* so that there is quiet and not quiet */
        waits_for_16 w = { 0, 0 };
        spdl_pipeline_desc desc = { .pool = pool_of(9, 1) };
        spdl_pipeline *p;
        char *it = NULL;
        idler_attach(&beside, desc.pool, 0);
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_SOURCE(counts_to_32), SPDL_PIPE(one_waits, .ctx = &w, .concurrency = 8),
            SPDL_SINK(8))) == SPDL_OK);
        await(&w.done, 15);
        while (__atomic_load_n(&desc.pool->beacon.quiet, __ATOMIC_ACQUIRE) != UINT64_MAX)
            test_sleep_us(100);
        for (uintptr_t k = 1; k <= 32; ++k) {
            spdl_result result = SPDL_TIMEOUT;
            while (i == 1 && k == 2 && result == SPDL_TIMEOUT) /* next that never waits */
                result = SPDL_NEXT(p, &it, 0);
            if (i == 2 && k == 2) { /* and the statistics */
                static spdl_stats stats;
                spdl_pipeline_stats(p, &stats);
                await(&w.called, 1);
            }
            if (result == SPDL_TIMEOUT) result = SPDL_NEXT(p, &it, SPDL_SECONDS(15));
            REQUIRE(result == SPDL_OK);
            CHECK_EQ((uintptr_t)it, k);
        }
        spdl_pipeline_destroy(p);
        spdl__pool_detach(desc.pool, beside.slot);
        spdl_pool_destroy(desc.pool);
    }
}

TEST_TABLE(pool) {
    TEST_CASE(jobs_run_once_each),
    TEST_CASE(jobs_start_in_order),
    TEST_CASE(full_queue_is_a_timeout),
    TEST_CASE(many_threads_submit),
    TEST_CASE(jobs_submit_jobs),
    TEST_CASE(jobs_wake_workers),
    TEST_CASE(jobs_run_at_the_same_time),
    TEST_CASE(drain_waits),
    TEST_CASE(stop_refuses_later_jobs),
    TEST_CASE(no_pool_is_refused),
    TEST_CASE(drain_waits_for_guests),
    TEST_CASE(a_drain_that_cannot_help_sleeps),
    TEST_CASE(stop_wakes_who_submits),
    TEST_CASE(destroy_runs_what_was_accepted),
    TEST_CASE(destroy_leaves_a_pool_that_is_in_use),
    TEST_CASE(a_worker_does_not_wait_for_itself),
    TEST_CASE(hooks_run_once_on_each_worker),
    TEST_CASE(init_that_fails_ends_all_workers),
    TEST_CASE(thread_that_fails_ends_all_workers),
    TEST_CASE(desc_is_checked),
    TEST_CASE(error_is_used_by_create_only),
    TEST_CASE(threads_are_named),
    TEST_CASE(stack_size_is_as_asked),
    TEST_CASE(signals_go_to_the_programs_threads),
    TEST_CASE(workers_may_be_trapped_by_a_sandbox),
    TEST_CASE(as_many_workers_as_allowed),
    TEST_CASE(idle_burns_nothing),
    TEST_CASE(idle_clients_are_not_visited),
    TEST_CASE(what_was_on_a_pool_leaves_nothing),
    TEST_CASE(what_a_worker_leaves_is_passed_on),
    TEST_CASE(a_busy_pipeline_starves_nobody),
    TEST_CASE(every_worker_comes_to_its_fini),
    TEST_CASE(an_idle_pipeline_is_woken),
    TEST_CASE(what_the_watermark_passed_over_is_not_quiet),
    TEST_END,
};
