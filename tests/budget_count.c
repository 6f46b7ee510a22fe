/* Counts atomic writes and clock reads for tests/check_budget.sh, which compiles budget_writes.c
   with -fsanitize=thread: the compiler then calls a function at each atomic access. These functions
   take the place of the sanitizer's.

   A write is a read-modify-write, also a swap that fails, or a full barrier. A store counts where
   another thread has written to the line since: that takes the line from its processor. */
#include "budget_count.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <time.h>

enum { SITES = 4096, LINES = 1 << 16, LINE_BYTES = 64 };

/* A place in the program that writes. */
typedef struct site {
    uintptr_t address; /* 0: free */
    uint64_t writes, stores, clocks;
} site;

static site sites[SITES];
static uint32_t last_writer[LINES]; /* by a hash of the address; 0: nobody yet */
static uint32_t threads;
static __thread uint32_t self; /* 1 and up */
static int counting;

static site *site_of(uintptr_t address) {
    size_t at = address % SITES;
    for (;; at = (at + 1) % SITES) {
        uintptr_t there = 0;
        if (__atomic_compare_exchange_n(&sites[at].address, &there, address, false,
                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED) ||
            there == address)
            return &sites[at];
    }
}

/* Returns true if no other thread has written to the line since this one did. */
static bool owns_line(const volatile void *p) {
    const size_t line = (uintptr_t)p / LINE_BYTES % LINES;
    if (self == 0) self = __atomic_add_fetch(&threads, 1, __ATOMIC_RELAXED);
    return __atomic_exchange_n(&last_writer[line], self, __ATOMIC_RELAXED) == self;
}

static void count_write(uintptr_t address) {
    if (__atomic_load_n(&counting, __ATOMIC_RELAXED))
        __atomic_fetch_add(&site_of(address)->writes, 1, __ATOMIC_RELAXED);
}

static void count_store(uintptr_t address) {
    if (__atomic_load_n(&counting, __ATOMIC_RELAXED))
        __atomic_fetch_add(&site_of(address)->stores, 1, __ATOMIC_RELAXED);
}

static void count_clock(uintptr_t address) {
    if (__atomic_load_n(&counting, __ATOMIC_RELAXED))
        __atomic_fetch_add(&site_of(address)->clocks, 1, __ATOMIC_RELAXED);
}

void count_begin(void) { __atomic_store_n(&counting, 1, __ATOMIC_RELAXED); }

void count_end(uint64_t items) {
    int i;
    __atomic_store_n(&counting, 0, __ATOMIC_RELAXED);
    for (i = 0; i < SITES; i++)
        if (sites[i].address != 0)
            printf("0x%016llx %.4f %.4f %.4f\n", (unsigned long long)sites[i].address,
                   (double)sites[i].writes / (double)items,
                   (double)sites[i].stores / (double)items,
                   (double)sites[i].clocks / (double)items);
}

/* ---- what the compiler calls ---- */

/* The call itself: it returns to the line behind it. */
#define CALLER ((uintptr_t)__builtin_return_address(0) - 1)

#define CHANGE(bits, name, builtin)                                                                \
    uint##bits##_t __tsan_atomic##bits##_##name(uint##bits##_t *p, uint##bits##_t value,           \
                                                int order);                                        \
    uint##bits##_t __tsan_atomic##bits##_##name(uint##bits##_t *p, uint##bits##_t value,           \
                                                int order) {                                       \
        (void)order;                                                                               \
        (void)owns_line(p);                                                                        \
        count_write(CALLER);                                                                       \
        return builtin(p, value, __ATOMIC_SEQ_CST);                                                \
    }
#define ATOMICS(bits)                                                                              \
    uint##bits##_t __tsan_atomic##bits##_load(const uint##bits##_t *p, int order);                 \
    uint##bits##_t __tsan_atomic##bits##_load(const uint##bits##_t *p, int order) {                \
        (void)order;                                                                               \
        return __atomic_load_n(p, __ATOMIC_ACQUIRE);                                               \
    }                                                                                              \
    void __tsan_atomic##bits##_store(uint##bits##_t *p, uint##bits##_t value, int order);          \
    void __tsan_atomic##bits##_store(uint##bits##_t *p, uint##bits##_t value, int order) {         \
        (void)order;                                                                               \
        if (!owns_line(p)) count_store(CALLER);                                                    \
        __atomic_store_n(p, value, __ATOMIC_RELEASE);                                              \
    }                                                                                              \
    int __tsan_atomic##bits##_compare_exchange_strong(uint##bits##_t *p, uint##bits##_t *expected, \
                                                      uint##bits##_t value, int order,             \
                                                      int failed);                                 \
    int __tsan_atomic##bits##_compare_exchange_strong(uint##bits##_t *p, uint##bits##_t *expected, \
                                                      uint##bits##_t value, int order,             \
                                                      int failed) {                                \
        (void)order;                                                                               \
        (void)failed;                                                                              \
        (void)owns_line(p);                                                                        \
        count_write(CALLER);                                                                       \
        return __atomic_compare_exchange_n(p, expected, value, false, __ATOMIC_SEQ_CST,            \
                                           __ATOMIC_SEQ_CST);                                      \
    }                                                                                              \
    CHANGE(bits, exchange, __atomic_exchange_n)                                                    \
    CHANGE(bits, fetch_add, __atomic_fetch_add)                                                    \
    CHANGE(bits, fetch_sub, __atomic_fetch_sub)                                                    \
    CHANGE(bits, fetch_or, __atomic_fetch_or)
ATOMICS(32)
ATOMICS(64)

void __tsan_atomic_thread_fence(int order);
void __tsan_atomic_thread_fence(int order) {
    (void)order;
    count_write(CALLER);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
void __tsan_atomic_signal_fence(int order);
void __tsan_atomic_signal_fence(int order) { (void)order; }

/* The linker gives calls of clock_gettime to __wrap_clock_gettime. */
int __real_clock_gettime(clockid_t clock, struct timespec *now);
int __wrap_clock_gettime(clockid_t clock, struct timespec *now);
int __wrap_clock_gettime(clockid_t clock, struct timespec *now) {
    if (clock == CLOCK_MONOTONIC) count_clock(CALLER);
    return __real_clock_gettime(clock, now);
}

/* Nothing else is of interest. */
#define PLAIN(name)                                                                                \
    void __tsan_##name(void *p);                                                                   \
    void __tsan_##name(void *p) { (void)p; }
PLAIN(read1)
PLAIN(read2)
PLAIN(read4)
PLAIN(read8)
PLAIN(read16)
PLAIN(write1)
PLAIN(write2)
PLAIN(write4)
PLAIN(write8)
PLAIN(write16)
PLAIN(func_entry)
void __tsan_init(void);
void __tsan_init(void) {}
void __tsan_func_exit(void);
void __tsan_func_exit(void) {}
void __tsan_read_range(void *p, size_t bytes);
void __tsan_read_range(void *p, size_t bytes) { (void)p, (void)bytes; }
void __tsan_write_range(void *p, size_t bytes);
void __tsan_write_range(void *p, size_t bytes) { (void)p, (void)bytes; }
