/* The tests of rings on the waits of systems without futexes: a mutex and a condition variable. */
#ifdef _WIN32
typedef int windows_has_no_other_waits;
#else
#define SPDL_OS_POSIX
#include "test_ring.c"
#endif
