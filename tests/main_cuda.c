/* The tests of spdl_cuda.h in one program, linked with the CUDA runtime or the stand-in for it,
   which is the driver as well; built and run by tests/check_cuda.sh. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdlib.h>
#define TEST_MAIN
#include "test.h"

#ifdef CUDA_REAL /* on a device: without the stand-in, what needs its strings is left out */
#define MODULES(X) X(cuda) X(cuda_back)
#else
#define MODULES(X) X(cuda_sim) X(cuda) X(cuda_back) X(cuda_fault)
#endif

#define DECLARE(module) extern const test_case test_table_##module[] __attribute__((weak));
#define ROW(module) { #module, test_table_##module },

MODULES(DECLARE)

int main(int argc, char **argv) {
    const test_module modules[] = { MODULES(ROW) };
#ifndef CUDA_REAL
    setenv("SPDL_LIBCUDA", "libcudart_sim.so", 0); /* the one that is loaded */
#endif
    return test_main(argc, argv, modules, sizeof modules / sizeof modules[0], NULL);
}
