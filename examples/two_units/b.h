/* What b.cpp offers to a.c. */

#ifndef B_H
#define B_H

#include "spdl.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Takes every int out of the pipeline and adds them up; -1 if the pipeline failed. */
long sum_of_ints(spdl_pipeline *p);

#ifdef __cplusplus
}
#endif

#endif
