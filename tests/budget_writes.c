/* Runs many workers for tests/check_budget.sh, which counts the atomic writes of an item.

       budget_writes busy      16 workers, whose calls compute for 70 us
       budget_writes asleep    64 workers, whose calls sleep for 1 ms

   A source, a pipe and a sink. Without load of other programs the workers are what limits it, and
   the consumer waits for most items. The small sink of `asleep` blocks workers now and then. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"

#include "budget_count.h"

#include <time.h>

enum { WARM_UP = 1000, ITEMS = 10000, COMPUTES_NS = 70000, SLEEPS_NS = 1000000 };

static uint64_t last = WARM_UP + ITEMS + WARM_UP; /* the end is not counted */

SPDL_FN(number, void, uint64_t) {
    if (spdl_sequence(task) == last) return SPDL_END;
    *out = &last;
    return SPDL_OK;
}

/* Of this thread: other programs do not count. */
static uint64_t processor_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

SPDL_FN(work, uint64_t, uint64_t) {
    const bool *asleep = (const bool *)spdl_ctx(task);
    const struct timespec time = { .tv_nsec = SLEEPS_NS };
    const uint64_t until = processor_ns() + COMPUTES_NS;
    if (*asleep) nanosleep(&time, NULL);
    while (!*asleep && processor_ns() < until) {}
    *out = in;
    return SPDL_OK;
}

int main(int argc, char **argv) {
    bool asleep = argc == 2 && strcmp(argv[1], "asleep") == 0;
    const int workers = asleep ? 64 : 16;
    const spdl_stage rows[] = {
        SPDL_SOURCE(number, .buffer_size = workers),
        SPDL_PIPE(work, .ctx = &asleep, .concurrency = workers),
        SPDL_SINK(asleep ? 4 : 16),
    };
    const spdl_pipeline_desc desc = { .workers = workers };
    spdl_pipeline *pipeline;
    uint64_t *item, taken;
    if (spdl_pipeline_create(&pipeline, &desc, SPDL_TABLE(rows)) != SPDL_OK) return 2;
    for (taken = 0; SPDL_NEXT(pipeline, &item, SPDL_FOREVER) == SPDL_OK; taken++) {
        if (taken == WARM_UP) count_begin();
        if (taken == WARM_UP + ITEMS) count_end(ITEMS);
    }
    spdl_pipeline_destroy(pipeline);
    return taken != last;
}
