/* The tests of rings on the waits of systems without futexes: a mutex and a condition variable. */
#define SPDL_OS_POSIX
#include "test_ring.c"
