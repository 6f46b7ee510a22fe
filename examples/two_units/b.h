/* What b.cpp offers to a.c, and rows that both compile: SPDL_SET is for C and every C++. */

#ifndef B_H
#define B_H

#include "spdl.h"

static int numbers[100]; /* each file has its own */

SPDL_FN(count, void, int) {
    const uint64_t i = spdl_sequence(task);
    if (i == 100) return SPDL_END;
    numbers[i] = (int)i;
    *out = &numbers[i];
    return SPDL_OK;
}
SPDL_FN(scale, int, int) {
    *in *= *(const int *)spdl_ctx(task);
    *out = in;
    return SPDL_OK;
}

/* `factor` must outlive the pipeline. */
static inline spdl_result numbers_create(spdl_pipeline **p, int *factor) {
    return spdl_pipeline_create(p, NULL, SPDL_STAGES(
        SPDL_SOURCE(count),
        SPDL_PIPE(scale, SPDL_SET(ctx, factor), SPDL_SET(concurrency, 2)),
        SPDL_SINK(3)));
}

#ifdef __cplusplus
extern "C" {
#endif

/* Takes every int out of the pipeline and adds them up; -1 if the pipeline failed. */
long sum_of_ints(spdl_pipeline *p);

/* The sum of a pipeline that b.cpp makes of the same rows; -1 without one. */
long sum_in_cpp(int factor);

#ifdef __cplusplus
}
#endif

#endif
