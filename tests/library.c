/* The library as most tests of pipelines link it: compiled once, with the points where timing
   decides (see items.h), and what those tests look at inside of it. */
#define ITEMS_LIBRARY
#include "items.h"

uint64_t chaos;
int frozen, threads_left = -1;

/* Guards the next three and `frozen`. What is also read without it is atomic. */
static test_mutex freezer = TEST_MUTEX;
static const char *frozen_at;
static int frozen_turn, frozen_most;

static void chaos_point(void) {
    static _Thread_local uint64_t state;
    const uint64_t seed = __atomic_load_n(&chaos, __ATOMIC_RELAXED);
    if (seed == 0) return;
    if (state == 0) state = seed ^ (uint64_t)(uintptr_t)&state;
    if (test_random(&state) % 8 == 0) test_yield();
}

void freeze_some(const char *at, int most) {
    test_lock(&freezer);
    __atomic_store_n(&frozen_at, at, __ATOMIC_RELEASE);
    __atomic_add_fetch(&frozen_turn, 1, __ATOMIC_RELEASE);
    __atomic_store_n(&frozen, 0, __ATOMIC_RELEASE);
    frozen_most = most;
    test_unlock(&freezer);
}

void timing_point(const char *id) {
    const char *at = __atomic_load_n(&frozen_at, __ATOMIC_ACQUIRE);
    bool stays = false;
    int turn;
    chaos_point();
    if (at == NULL || strcmp(at, id) != 0) return;
    test_lock(&freezer);
    turn = frozen_turn;
    if (frozen_at == at) stays = __atomic_add_fetch(&frozen, 1, __ATOMIC_ACQ_REL) <= frozen_most;
    test_unlock(&freezer);
    while (stays && __atomic_load_n(&frozen_turn, __ATOMIC_ACQUIRE) == turn) sleep_us(100);
}

bool thread_refused(void) {
    if (threads_left == 0) return true;
    if (threads_left > 0) --threads_left;
    return false;
}

int task_worker(const spdl_task *task) { return spdl__task_worker(task); }

const spdl_pipeline *task_pipeline(const spdl_task *task) { return task->pipeline; }

int row_named(const spdl_pipeline *p, const char *name) { return spdl__pipeline_find(p, name); }

bool row_has_times(const spdl_pipeline *p, int row) {
    static _Thread_local spdl__histogram histogram;
    spdl__row_times(p, row, &histogram);
    return histogram.count <= (uint64_t)1 << 32;
}

uint32_t rows_failed(const spdl_pipeline *p) { return spdl__load32(&p->failed); }

bool rows_are_shut(const spdl_pipeline *p) {
    bool shut = true;
    for (int i = 0; i < p->count; ++i)
        shut = shut && (spdl__load(p->node[i].word) & SPDL__SHUT) != 0;
    return shut;
}

const int *consumer_inside(const spdl_pipeline *p) { return (const int *)&p->consumer_inside; }

const int *producer_inside(const spdl_pipeline *p) { return (const int *)&p->producer_inside; }
