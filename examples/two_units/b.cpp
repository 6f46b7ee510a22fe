/* The C++ half of two_units: see a.c. */

#include "b.h"

long sum_of_ints(spdl_pipeline *p) {
    void *item = nullptr;
    long sum = 0;
    while (spdl_pipeline_next(p, &item, SPDL_FOREVER) == SPDL_OK) sum += *static_cast<int *>(item);
    return spdl_pipeline_failed(p) ? -1 : sum;
}

long sum_in_cpp(int factor) {
    spdl_pipeline *p;
    if (numbers_create(&p, &factor) != SPDL_OK) return -1;
    const long sum = sum_of_ints(p);
    spdl_pipeline_destroy(p);
    return sum;
}
