/* Sends items through rows that do nothing, on one thread, for tests/check_budget.sh, which counts
   instructions.

       budget_pipeline ROWS COUNT

   The clock stands almost still, or calls were timed one by one under a tool that makes them slow.
   What one row costs is the difference of two runs with different rows. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"

#include <stdlib.h>
#include <time.h>

enum { MOST = 8 };

static uint64_t items;

int clock_gettime(clockid_t clock, struct timespec *now) {
    static long ns;
    (void)clock;
    now->tv_sec = 1;
    now->tv_nsec = ++ns % 1000000000;
    return 0;
}

SPDL_FN(number, void, uint64_t) {
    if (spdl_sequence(task) == items) return SPDL_END;
    *out = &items;
    return SPDL_OK;
}

SPDL_FN(same, uint64_t, uint64_t) {
    *out = in;
    return SPDL_OK;
}

int main(int argc, char **argv) {
    const spdl_stage source = SPDL_SOURCE(number, .buffer_size = 16);
    const spdl_stage pipe = SPDL_PIPE(same, .buffer_size = 16), sink = SPDL_SINK(16);
    spdl_pipeline_desc desc = { .workers = SPDL_INLINE }; /* one thread: always the same count */
    spdl_stage rows[MOST + 2];
    spdl_pipeline *pipeline;
    uint64_t *item, count = 0;
    int i, pipes = argc == 3 ? atoi(argv[1]) : 0;
    if (pipes < 1 || pipes > MOST) return 2;
    items = strtoull(argv[2], NULL, 10);
    rows[0] = source;
    for (i = 1; i <= pipes; i++) rows[i] = pipe;
    rows[pipes].buffer_size = 0; /* the sink's */
    rows[pipes + 1] = sink;
    if (spdl_pipeline_create(&pipeline, &desc, rows, pipes + 2) != SPDL_OK) return 2;
    while (SPDL_NEXT(pipeline, &item, SPDL_FOREVER) == SPDL_OK) count++;
    spdl_pipeline_destroy(pipeline);
    return count != items;
}
