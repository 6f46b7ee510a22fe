/* The tests of rings on the waits of systems without futexes: a mutex and a condition variable. */
#define SPDL_NO_FUTEX
#include "test_ring.c"
