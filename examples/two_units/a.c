/* Two translation units share one copy of the library: this one, in C, holds the implementation,
   and b.cpp, in C++, only includes the header.
   cc -O2 -I. -c examples/two_units/a.c -o a.o
   c++ -O2 -I. -c examples/two_units/b.cpp -o b.o
   c++ a.o b.o -o two_units -lpthread */

#define SPDL_IMPLEMENTATION
#include "spdl.h"
#include <stdio.h>

#include "b.h"

int main(void) {
    spdl_pipeline *p;
    int factor = 2;
    long sum;
    if (numbers_create(&p, &factor) != SPDL_OK) return 1; /* the log says why */
    sum = sum_of_ints(p);
    spdl_pipeline_destroy(p);
    printf("sum: %ld, in C++ %ld, version %s\n", sum, sum_in_cpp(3), spdl_version());
    return sum == 9900 ? 0 : 1;
}
