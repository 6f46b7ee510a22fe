/* Between the explorer (explore.c) and what it explores (explore_ring.c). */
#ifndef EXPLORE_H
#define EXPLORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPLORE_THREADS 6

typedef struct explore_scenario {
    char name[96];
    const void *plan;  /* for the three below */
    int threads;
    bool exhaustive;   /* small enough for all schedules with few preemptions */
    bool membarrier;   /* what the kernel says when it is asked */
} explore_scenario;

/* Of explore_ring.c. */
int explore_scenarios(const explore_scenario **list);
void explore_begin(const void *plan);
void explore_thread(const void *plan, int thread);
void explore_end(const void *plan);

/* Of explore.c. Memory that is modelled comes from explore_alloc and is gone with the run. */
void *explore_alloc(size_t bytes);
void explore_name(const void *address, const char *name);
void explore_fail(const char *format, ...);
long explore_syscall(long number, ...);
void *explore_copy(void *to, const void *from, size_t bytes);

#endif
