/* Two translation units share one copy of the library: this one, in C, holds the implementation,
   and b.cpp, in C++, only includes the header.
   cc -O2 -I. -c examples/two_units/a.c -o a.o
   c++ -O2 -I. -c examples/two_units/b.cpp -o b.o
   c++ a.o b.o -o two_units -lpthread */

#define SPDL_IMPLEMENTATION
#include "spdl.h"
#include <stdio.h>

#include "b.h"

static int numbers[100];

SPDL_FN(count, void, int) {
    const uint64_t i = spdl_sequence(task);
    if (i == 100) return SPDL_END;
    numbers[i] = (int)i;
    *out = &numbers[i];
    return SPDL_OK;
}

int main(void) {
    spdl_pipeline *p;
    long sum;
    if (spdl_pipeline_create(&p, &(spdl_pipeline_desc){ .workers = 2 },
                             SPDL_STAGES(SPDL_SOURCE(count), SPDL_SINK(3))) != SPDL_OK)
        return 1;
    sum = sum_of_ints(p);
    spdl_pipeline_destroy(p);
    printf("sum: %ld, version %s\n", sum, spdl_version());
    return sum == 4950 ? 0 : 1;
}
