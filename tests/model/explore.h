/* Between the explorer (explore.c) and what it explores (explore_ring.c, explore_pipeline.c). */
#ifndef EXPLORE_H
#define EXPLORE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPLORE_THREADS 8

typedef struct explore_scenario {
    char name[96];
    const void *plan; /* for the three below */
    int threads;      /* from the start */
    bool exhaustive;  /* small enough for all schedules with few preemptions */
    bool membarrier;  /* what the kernel says when it is asked */
    bool is_long;     /* hundreds of steps or more */
} explore_scenario;

/* Of what is explored. */
int explore_scenarios(const explore_scenario **list);
void explore_begin(const void *plan);
void explore_thread(const void *plan, int thread);
void explore_end(const void *plan);

/* Of explore.c. Memory that is modelled comes from explore_alloc and is gone with the run. It is
   never given twice in a run. */
void *explore_alloc(size_t bytes);
void *explore_alloc_at(size_t bytes, size_t align);
void explore_free(void *memory);
void explore_name(const void *address, const char *name);
void explore_watch(const void *word);
void explore_fail(const char *format, ...);

/* In place of functions of the system. */
long explore_syscall(long number, ...);
void *explore_copy(void *to, const void *from, size_t bytes);
void *explore_set(void *to, int value, size_t bytes);
int explore_print(char *to, size_t bytes, const char *format, ...);
int explore_vprint(char *to, size_t bytes, const char *format, va_list args);

/* For a program that starts threads. Mutexes and conditions are known by their addresses. */
int explore_spawn(void *(*entry)(void *arg), void *arg);
void explore_join(int which);
int explore_self(void);
void explore_yield(void);
uint64_t explore_clock(void);
void explore_lock(const void *mutex);
void explore_unlock(const void *mutex);
bool explore_cond_wait(const void *condition, const void *mutex, bool may_time_out);
void explore_cond_wake(const void *condition, bool all);

#endif
