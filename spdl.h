/* spdl.h - v0.1.0 - data loading pipelines in C, one file - SPDX-License-Identifier: MIT

   DO THIS: in exactly one C or C++ file of your program,

       #define SPDL_IMPLEMENTATION
       #include "spdl.h"

   and in every other file include it without the define. Link with -lpthread. There is nothing
   else to build. Define SPDL_STATIC as well to keep every function private to that one file.

   THE SMALLEST COMPLETE PROGRAM (in C; in C++ malloc needs a cast, and `= {}` zeroes a desc)

       #define SPDL_IMPLEMENTATION
       #include "spdl.h"
       #include <stdio.h>
       #include <stdlib.h>

       SPDL_FN(count, void, int) {
           if (spdl_sequence(task) == 10) return SPDL_END;
           if ((*out = malloc(sizeof(int))) == NULL) return SPDL_E_NOMEM;
           **out = (int)spdl_sequence(task);
           return SPDL_OK;
       }

       int main(void) {
           spdl_pipeline *p;
           spdl_pipeline_desc desc = { 0 };
           int *n, failed;
           desc.workers = 2;
           if (spdl_pipeline_create(&p, &desc, SPDL_STAGES(
                   SPDL_SOURCE(count, .free_item = free),
                   SPDL_SINK(3))) != SPDL_OK) return 1;
           while (SPDL_NEXT(p, &n, SPDL_FOREVER) == SPDL_OK) {
               printf("%d\n", *n);
               free(n);
           }
           failed = spdl_pipeline_failed(p);
           if (failed) puts(spdl_pipeline_error(p)->text);
           spdl_pipeline_destroy(p);
           return failed;
       }

   CONTENTS (search for the tag; `make toc` prints them with line numbers)
       >>config  >>version  >>time  >>result  >>error  >>alloc  >>log  >>ring  >>pool
       >>pipeline  >>stats  >>report  >>trace  >>cache  >>headspace  >>doctor  >>npz
       >>cpp                                                               declarations
       >>platform-impl  >>atomics-impl  >>os  >>os-none  >>os-posix        what all stand on
       >>core-impl  >>ring-core  >>ring-impl  >>pool-impl  >>trace-core
       >>edge-impl  >>flow-impl  >>claim-impl  >>call-impl  >>batch-impl    an item's way
       >>merge-impl  >>defer-impl  >>again-impl  >>step-impl  >>tune-impl  >>next-impl
       >>stop-impl  >>create-impl  >>stats-impl  >>report-impl               around it
       >>cache-impl  >>compare-impl  >>headspace-impl
       >>probe-impl  >>doctor-impl  >>doctor-text-impl
       >>crc-impl  >>inflate-impl  >>zip-impl  >>npy-impl  >>npz-impl  >>many-impl  >>write-impl
       >>trace-impl  >>license

   WORDS
       item          a void * that moves through the pipeline; NULL is an item like any other
       stage         a user function with a concurrency
       edge          the bounded ring between two stages
       worker        a thread of the pool
       task          one call of a stage function on one item
       batch         items grouped by SPDL_BATCH
       sink          the last edge, read by the trainer
       trainer       whoever calls spdl_pipeline_next
       buffer_size   how many finished items may wait on an edge
       readiness     the share of time an edge had something to take
       headspace     the gain if loading cost nothing

   THREADS
       Every doc block says who may call: "any" thread, the "owner" (one thread at a time), the
       "producer" or the "consumer" of a ring, or "a stage" (inside a stage function). Workers
       sleep in the kernel when there is nothing to do; nothing polls. There are two timers: that
       of reports that were asked for (>>report), and that of a trainer that waits in a pipeline of
       polite workers, or with a merge that may wait for one path, which looks every 20 ms whether
       the workers get a processor (>>pool), or a path starves (SPDL_MERGE_ROBIN). Workers block
       signal but those a fault raises. A process that forks may use the library in the child only
       for objects made there: the workers stay behind in the parent.

   MEMORY
       Allocation happens in create and open calls only, through spdl_allocator, except in these
       cases: batches and buffers that the trainer keeps, what a stage emits at once for the first
       time, spdl_report_html, reading and writing npz (see >>npz-impl), and a copy of what a trace
       has recorded while its file is written.
       A running pipeline allocates nothing. An item belongs to the library from the moment a stage
       hands it out until spdl_pipeline_next hands it to the trainer; see >>pipeline for the rules.

   ERRORS
       Zero is success, positive results are ordinary outcomes (end, timeout, full, empty, closed),
       negative ones are errors. Text for an error is in an spdl_error. Pointers must not be NULL
       unless a block says so. The library never aborts the program, never uses errno as an
       interface, and has no global state.

   LIMITS
       Linux on 64-bit processors. The code for other POSIX systems is there, but was only run on
       Linux; MIPS, SPARC, Alpha and Windows: not yet. SPDL_NO_THREADS takes C alone, also wasm32.
       32 stages in a pipeline, 64 pipelines on a pool, 256 workers and guests in a pool.

   License (MIT) at the end of the file. */

#ifndef SPDL_H_INCLUDED
#define SPDL_H_INCLUDED

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ============================================================================================= */
/* >>config */

#if defined(__GNUC__) || defined(__clang__)
#define SPDL__UNUSED __attribute__((unused))
#define SPDL__PRINTF(text, args) __attribute__((format(printf, text, args)))
#else
#define SPDL__UNUSED
#define SPDL__PRINTF(text, args)
#endif

/* In front of each public declaration. Yours has to begin with extern, too, as for hidden symbols
   extern __attribute__((visibility("hidden"))). */
#ifndef SPDL_API
#ifdef SPDL_STATIC
#define SPDL_API SPDL__UNUSED static
#else
#define SPDL_API extern
#endif
#endif

#ifdef __cplusplus
#define SPDL__CAST(type, value) static_cast<type>(value)
#define SPDL__UNCONST(pointer) const_cast<void *>(static_cast<const void *>(pointer))
#define SPDL__INT_ENUM : int /* as in C, where the negative values see to it */
#define SPDL__ZERO = {} /* so that C++20 rows, which leave fields out, compile without warnings */
extern "C" {
#else
#define SPDL__CAST(type, value) ((type)(value))
#define SPDL__UNCONST(pointer) ((void *)(uintptr_t)(pointer))
#define SPDL__INT_ENUM
#define SPDL__ZERO
#endif

/* SPDL_INFLATE(out, out_bytes, in, in_bytes) may be defined before the implementation, to have
   whole deflate streams (RFC 1951, without a frame) decoded by another library: an expression, true
   when the stream at `in` was decoded and made exactly out_bytes bytes at `out`. When it is false
   the decoder here takes its turn, and reports what is wrong. Any threads may be in it at once. */

/* What a program does not use can be left out, with its part of the time to compile:
       SPDL_NO_REPORT   >>report, >>trace and >>doctor. Counting and spdl_pipeline_stats stay; a
                        desc or a variable that asks for one of them is answered by a warning;
                        spans and counters (spdl_trace_begin) do nothing.
       SPDL_NO_NPZ      >>npz
       SPDL_NO_THREADS  threads, and whatever is not C: for wasm and boards. Only one thread calls,
                        and does all the work. There are rings, pipelines with workers = 0, pools of
                        guests alone, statistics, traces, cache and npz; workers, .threads and
                        SPDL_FROM are refused with SPDL_E_THREAD, reports with a warning. What
                        would sleep returns SPDL_TIMEOUT at once, whatever the timeout.
   Define them for the file with the implementation, where what is called all the same is missing
   when the program is linked; or for every file, where it is not declared then. Structs and all
   other functions are the same with and without. */

/* SPDL_DEBUG, defined before the implementation, has misuse found that costs time to look for:
       two threads on a side of a ring that is for one (an assert);
       a stage that hands on nothing but NULL, as it may have forgotten *out;
       items that the library had to free, but the row that made them has no .free_item (a line for
       each row when the pipeline is destroyed; nothing is wrong if they need none).
   The last two are warnings in the log. */

/* Limits that size plain structs. */
#define SPDL_MAX_STAGES 32
#define SPDL_NAME_BYTES 32
#define SPDL_TEXT_BYTES 512

/* ============================================================================================= */
/* >>version */

#define SPDL_VERSION_MAJOR 0
#define SPDL_VERSION_MINOR 1
#define SPDL_VERSION_PATCH 0
#define SPDL_VERSION (SPDL_VERSION_MAJOR * 10000 + SPDL_VERSION_MINOR * 100 + SPDL_VERSION_PATCH)

/* The version of the implementation that was linked, as "major.minor.patch".
   Returns: a string literal.
   Threads: any.
   Blocks:  never.
   Owns:    the library. */
SPDL_API const char *spdl_version(void);

/* ============================================================================================= */
/* >>time */

/* Timeouts are in nanoseconds on the monotonic clock: 0 tries once and never waits. */
#define SPDL_FOREVER SPDL__CAST(int64_t, -1)
#define SPDL_SECONDS(s) SPDL__CAST(int64_t, (s) * 1e9)

/* Nanoseconds on the monotonic clock that all timeouts and statistics use.
   Returns: a time that never goes backwards; the origin is arbitrary.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API uint64_t spdl_time_ns(void);

/* ============================================================================================= */
/* >>result */

#define SPDL_RESULT_LIST(X)                                                                        \
    X(SPDL_OK, 0, "ok")                                                                            \
    X(SPDL_END, 1, "end of data")                                                                  \
    X(SPDL_SKIP, 2, "item skipped")                                                                \
    X(SPDL_TIMEOUT, 3, "timed out")                                                                \
    X(SPDL_FULL, 4, "full")                                                                        \
    X(SPDL_EMPTY, 5, "empty")                                                                      \
    X(SPDL_CLOSED, 6, "closed")                                                                    \
    X(SPDL_PENDING, 7, "pending")                                                                  \
    X(SPDL_AGAIN, 8, "call again")                                                                 \
    X(SPDL_E_INVALID, -1, "invalid argument")                                                      \
    X(SPDL_E_NOMEM, -2, "out of memory")                                                           \
    X(SPDL_E_THREAD, -3, "a thread could not be created")                                          \
    X(SPDL_E_TYPE, -4, "the types of two stages do not fit")                                       \
    X(SPDL_E_STAGE, -5, "a stage function failed")                                                 \
    X(SPDL_E_IO, -6, "input or output error")                                                      \
    X(SPDL_E_FORMAT, -7, "malformed data")                                                         \
    X(SPDL_E_UNSUPPORTED, -8, "not supported")                                                     \
    X(SPDL_E_NOT_FOUND, -9, "not found")                                                           \
    X(SPDL_E_CHECKSUM, -10, "checksum mismatch")                                                   \
    X(SPDL_E_LIMIT, -11, "limit exceeded")                                                         \
    X(SPDL_E_CUDA, -12, "a CUDA call failed")                                                      \
    X(SPDL_E_CUDA_LOST, -13, "the CUDA device is lost to this process")                            \
    X(SPDL_E_CUDA_FORKED, -14, "CUDA was opened before a fork and used after it, in the child")

typedef enum spdl_result SPDL__INT_ENUM {
#define SPDL__ENUM(name, value, text) name = value,
    SPDL_RESULT_LIST(SPDL__ENUM)
#undef SPDL__ENUM
} spdl_result;

/* What a result means, in a few words.
   Returns: a string literal; "unknown result" for a value outside the list.
   Threads: any.
   Blocks:  never.
   Owns:    the library. */
SPDL_API const char *spdl_result_text(spdl_result result);

/* ============================================================================================= */
/* >>error */

/* What went wrong and where. `text` is a whole sentence that names the file, array, stage or
   argument. `stage` is the row of the stage from 0 (the source), or -1; `item` is the number of
   the item, counted by its source from 0, and means something only when stage >= 0. */
typedef struct spdl_error {
    spdl_result result;
    int stage;
    uint64_t item;
    char stage_name[SPDL_NAME_BYTES];
    char text[SPDL_TEXT_BYTES];
} spdl_error;

/* ============================================================================================= */
/* >>alloc */

/* Where memory comes from. Zero means malloc and free; otherwise set both functions. alloc_fn
   returns NULL when there is none; `align` is a power of two. free_fn gets the size that was asked
   for. Both may be called on any thread and at the same time: workers make batches when the trainer
   keeps many, spdl_batch_free and spdl_npz_read run where they are called. The allocator must
   outlive the last batch. */
typedef struct spdl_allocator {
    void *(*alloc_fn)(size_t bytes, size_t align, void *user);
    void (*free_fn)(void *memory, size_t bytes, void *user);
    void *user;
} spdl_allocator;

/* ============================================================================================= */
/* >>log */

typedef enum spdl_log_level { SPDL_LOG_ERROR, SPDL_LOG_WARN, SPDL_LOG_INFO } spdl_log_level;

/* Where messages go. Zero means stderr for errors and warnings, nothing for the rest. `text` is one
   line without a newline. Called from any thread, workers included. */
typedef struct spdl_logger {
    void (*log_fn)(spdl_log_level level, const char *text, void *user);
    void *user;
} spdl_logger;

/* ============================================================================================= */
/* >>ring
   A bounded queue of items of one size (a pointer by default) that holds exactly `capacity` of
   them. Order is first in, first out, in MPMC by claim: each consumer sees the items of one
   producer in order. Calls that wait spin, yield, and then sleep in the kernel. To a consumer
   SPDL_CLOSED means closed and drained. Items of 8 bytes are quickest.

   SPSC is quicker, and wait-free. MPMC's try calls never wait, but a thread that stops between
   claiming a slot and filling (or emptying) it holds up the slots after it: try_pop may return
   SPDL_EMPTY although later items are inside. A side of SPSC may pass to another thread when the
   program orders the two. Two threads on it at once corrupt the ring; with SPDL_DEBUG defined in
   the implementation file that is an assert and SPDL_E_INVALID from any call below, except between
   a reserve and its commit (a peek and its release). */

typedef enum spdl_ring_mode {
    SPDL_RING_MPMC, /* any number of producers and consumers */
    SPDL_RING_SPSC  /* one producer and one consumer */
} spdl_ring_mode;

typedef struct spdl_ring_desc {
    uint64_t capacity;        /* items, at least 1, at most 2^30 */
    size_t item_bytes;        /* 0: sizeof(void *); at most 4096 */
    spdl_ring_mode mode;      /* default MPMC */
    spdl_allocator allocator; /* default malloc */
    spdl_error *error;        /* optional: says why create failed */
} spdl_ring_desc;
typedef struct spdl_ring spdl_ring;

/* What a ring has seen since it was made. A wait is a call that outlasted the spinning; a sleep is
   a trip to the kernel, now and then several in a wait. */
typedef struct spdl_ring_counters {
    uint64_t pushed, popped, count; /* items: in, out, and inside now */
    uint64_t push_waits, pop_waits;
    uint64_t push_wait_ns, pop_wait_ns;
    uint64_t push_sleeps, pop_sleeps;
    uint64_t wakes; /* calls into the kernel to wake threads */
} spdl_ring_counters;

/* Makes a ring.
   Returns: SPDL_OK, SPDL_E_INVALID (a field out of range), SPDL_E_NOMEM.
   Threads: any.
   Blocks:  never.
   Owns:    the caller destroys *ring; on failure *ring is NULL. */
SPDL_API spdl_result spdl_ring_create(spdl_ring **ring, const spdl_ring_desc *desc);

/* Frees the ring and calls free_item (may be NULL) once with the address of each item left inside,
   aligned to 8 bytes at most.
   Returns: nothing; NULL is allowed.
   Threads: owner; no other call on the ring may be running, nor come later.
   Blocks:  never, except in free_item.
   Owns:    items left inside go to free_item. */
SPDL_API void spdl_ring_destroy(spdl_ring *ring, void (*free_item)(void *item, void *user),
                                void *user);

/* Copies one item of item_bytes from `item` to the tail.
   Returns: SPDL_OK, SPDL_FULL, SPDL_CLOSED.
   Threads: producers.
   Blocks:  never.
   Owns:    the ring has the item after SPDL_OK, the caller otherwise. */
SPDL_API spdl_result spdl_ring_try_push(spdl_ring *ring, const void *item);

/* Copies one item from the head to `item`.
   Returns: SPDL_OK, SPDL_EMPTY, SPDL_CLOSED.
   Threads: consumers.
   Blocks:  never.
   Owns:    the caller has the item after SPDL_OK. */
SPDL_API spdl_result spdl_ring_try_pop(spdl_ring *ring, void *item);

/* As spdl_ring_try_push, but waits for room.
   Returns: SPDL_OK, SPDL_TIMEOUT, SPDL_CLOSED, SPDL_E_INVALID (a NULL argument).
   Threads: producers.
   Blocks:  until there is room, the ring is closed, or timeout_ns has passed.
   Owns:    the ring has the item after SPDL_OK, the caller otherwise. */
SPDL_API spdl_result spdl_ring_push(spdl_ring *ring, const void *item, int64_t timeout_ns);

/* As spdl_ring_try_pop, but waits for an item. A timeout takes nothing.
   Returns: SPDL_OK, SPDL_TIMEOUT, SPDL_CLOSED, SPDL_E_INVALID (a NULL argument).
   Threads: consumers.
   Blocks:  until there is an item, the ring is closed, or timeout_ns has passed.
   Owns:    the caller has the item after SPDL_OK. */
SPDL_API spdl_result spdl_ring_pop(spdl_ring *ring, void *item, int64_t timeout_ns);

/* Pushes up to n items that lie one after the other; *moved says how many went in.
   Returns: SPDL_OK (at least one, or n is 0), SPDL_FULL, SPDL_CLOSED.
   Threads: producers.
   Blocks:  never.
   Owns:    the ring has the first *moved items, the caller the rest. */
SPDL_API spdl_result spdl_ring_try_push_n(spdl_ring *ring, const void *items, uint64_t n,
                                          uint64_t *moved);

/* Pops up to n items to `items`, one after the other; *moved says how many.
   Returns: SPDL_OK (at least one, or n is 0), SPDL_EMPTY, SPDL_CLOSED.
   Threads: consumers.
   Blocks:  never.
   Owns:    the caller has the *moved items. */
SPDL_API spdl_result spdl_ring_try_pop_n(spdl_ring *ring, void *items, uint64_t n,
                                         uint64_t *moved);

/* Pushes n items, waiting for room as often as it must; *moved says how many went in, whatever the
   result. Items of other producers may come in between.
   Returns: SPDL_OK (all n), SPDL_TIMEOUT, SPDL_CLOSED, SPDL_E_INVALID (a NULL argument).
   Threads: producers.
   Blocks:  until all are in, the ring is closed, or timeout_ns has passed.
   Owns:    the ring has the first *moved items, the caller the rest. */
SPDL_API spdl_result spdl_ring_push_n(spdl_ring *ring, const void *items, uint64_t n,
                                      uint64_t *moved, int64_t timeout_ns);

/* Waits for at least one item, then pops up to n that are there; *moved says how many.
   Returns: SPDL_OK (at least one, or n is 0), SPDL_TIMEOUT, SPDL_CLOSED, SPDL_E_INVALID (NULL).
   Threads: consumers.
   Blocks:  until there is an item, the ring is closed, or timeout_ns has passed.
   Owns:    the caller has the *moved items. */
SPDL_API spdl_result spdl_ring_pop_n(spdl_ring *ring, void *items, uint64_t n, uint64_t *moved,
                                     int64_t timeout_ns);

/* SPSC: gives the producer up to n free slots to write into, side by side, at *slots. *have says
   how many: at least one, fewer than n when less is free or the slots wrap around. Nothing is
   pushed before spdl_ring_commit; reserving again gives the same slots.
   Returns: SPDL_OK, SPDL_TIMEOUT, SPDL_CLOSED, SPDL_E_INVALID (MPMC, n is 0, a NULL argument).
   Threads: the producer.
   Blocks:  until there is room, the ring is closed, or timeout_ns has passed.
   Owns:    the slots stay the ring's; they are the producer's to write until commit. */
SPDL_API spdl_result spdl_ring_reserve(spdl_ring *ring, uint64_t n, void **slots, uint64_t *have,
                                       int64_t timeout_ns);

/* SPSC: pushes the first n of the reserved slots.
   Returns: SPDL_OK, SPDL_CLOSED (nothing was pushed), SPDL_E_INVALID (MPMC, or n is too many).
   Threads: the producer.
   Blocks:  never.
   Owns:    the ring has the items after SPDL_OK, the caller otherwise. */
SPDL_API spdl_result spdl_ring_commit(spdl_ring *ring, uint64_t n);

/* SPSC: gives the consumer up to n items to read in place, as spdl_ring_reserve gives slots.
   Nothing is popped before spdl_ring_release; peeking again gives the same items.
   Returns: SPDL_OK, SPDL_TIMEOUT, SPDL_CLOSED, SPDL_E_INVALID (MPMC, n is 0, a NULL argument).
   Threads: the consumer.
   Blocks:  until there is an item, the ring is closed, or timeout_ns has passed.
   Owns:    the items stay the ring's; they are the consumer's to use until release. */
SPDL_API spdl_result spdl_ring_peek(spdl_ring *ring, uint64_t n, void **items, uint64_t *have,
                                    int64_t timeout_ns);

/* SPSC: pops the first n of the peeked items, whose slots may be written again.
   Returns: SPDL_OK, SPDL_E_INVALID (MPMC, or more than were peeked).
   Threads: the consumer.
   Blocks:  never.
   Owns:    what the items own is the caller's. */
SPDL_API spdl_result spdl_ring_release(spdl_ring *ring, uint64_t n);

/* Ends the flow: a push that starts after close has returned is refused with SPDL_CLOSED, pops
   drain what was accepted and then return SPDL_CLOSED, and every waiter wakes. A push that runs at
   the same time is either refused or drained. Closing twice is fine.
   Returns: nothing.
   Threads: any.
   Blocks:  never.
   Owns:    nothing changes hands. */
SPDL_API void spdl_ring_close(spdl_ring *ring);

/* Items inside right now; exact when no other thread is pushing or popping.
   Returns: 0 to capacity.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API uint64_t spdl_ring_count(const spdl_ring *ring);

/* The capacity the ring was made with.
   Returns: at least 1.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API uint64_t spdl_ring_capacity(const spdl_ring *ring);

/* Fills *counters. They cost the quick calls nothing: only calls that wait count.
   Returns: nothing.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API void spdl_ring_stats(const spdl_ring *ring, spdl_ring_counters *counters);

/* ============================================================================================= */
/* >>pool
   A fixed set of worker threads. It runs jobs that are submitted to it, and the stages of the
   pipelines that are attached to it.

   Guests. A program with a job system of its own lends its threads: a pool with guests = n has
   places for n of them at a time, and any thread may take one by spdl_pool_run. A guest does what a
   worker does; statistics, traces, spdl_worker and the `worker` of a job count the places after
   the workers. Nobody wakes a thread that is outside: it should come when there may be something to
   do, as once a frame. With workers = 0 all work is that of guests: then next and push wait for
   them, and SPDL_FOREVER is for programs where they come. As any thread may take any place, what
   `init` stores for a place must not belong to a thread. */

/* Per-worker state: init stores it, fini gets it back. */
typedef spdl_result (*spdl_init_fn)(void *ctx, int worker, void **local);
typedef void (*spdl_fini_fn)(void *ctx, int worker, void *local);

typedef enum spdl_sched {
    SPDL_SCHED_DEFAULT, /* as the thread that creates the workers */
    SPDL_SCHED_BATCH,   /* yields to threads that have just woken */
    SPDL_SCHED_IDLE     /* runs when nobody else would: may starve on a busy machine */
} spdl_sched;

/* How the system schedules workers. Zero changes nothing. `polite` is the choice for a loader that
   shares its machine with a trainer: nice 19 and SCHED_BATCH on Linux, the utility class on macOS;
   on other systems nice. Beside other programs that is next to nothing: so a pipeline's own polite
   pool has as many threads again, of normal priority, which do its work for a minute when the
   trainer has waited for 20 ms while the polite ones were kept from running. nice is -20 to 19, per
   thread; less than now takes a privilege. */
typedef struct spdl_policy {
    bool polite;
    int nice;        /* 0: as it is */
    spdl_sched sched;
    const int *cpus; /* the processors the workers may use, by number; Linux only */
    int cpu_count;   /* 0: all that the process may use */
} spdl_policy;

/* What a profiler of yours (Tracy and the like) gets as it happens: a begin and its end come on the
   same thread. */
typedef enum spdl_event {
    SPDL_EVENT_THREAD_BEGIN, /* a worker, before its init; with the pool's name and its number */
    SPDL_EVENT_THREAD_END,
    SPDL_EVENT_TASK_BEGIN,   /* a call of a stage, with the name of its row and the number of its
                                item; a job, with the pool's name and the worker's number */
    SPDL_EVENT_TASK_END,
    SPDL_EVENT_WAIT_BEGIN,   /* a worker is about to sleep, with the pool's name and its number; the
                                trainer has to wait, with "next" and the number of the item */
    SPDL_EVENT_WAIT_END
} spdl_event;

/* Zero is none, and costs a branch. `name` is valid as long as the pool or the pipeline. event_fn
   runs on all threads at the same time, and must not call the library. */
typedef struct spdl_profiler {
    void (*event_fn)(spdl_event event, const char *name, uint64_t number, void *user);
    void *user;
} spdl_profiler;

typedef struct spdl_pool_desc {
    int workers;            /* 1 to 256; with guests from 0 */
    int guests;             /* places for threads in spdl_pool_run; with workers up to 256 */
    const char *name;       /* thread names are name-0, name-1, ... (default "spdl") */
    spdl_policy policy;
    size_t stack_bytes;     /* 0: the system's default */
    int queue_size;         /* jobs that may wait, default 256 */
    spdl_init_fn init;      /* on each worker, before any job; for guests create calls it */
    spdl_fini_fn fini;      /* on each worker that ran init; for guests destroy calls it */
    void *ctx;              /* handed to init and fini */
    spdl_allocator allocator;
    spdl_logger logger;
    spdl_profiler profiler; /* also of pipelines on the pool that have none */
    spdl_error *error;      /* optional: says why create failed */
} spdl_pool_desc;

typedef struct spdl_pool spdl_pool;

/* A job: `local` is what init stored for this worker. */
typedef void (*spdl_job_fn)(void *arg, int worker, void *local);

/* Starts the workers and waits until each has run `init`, if there is one. If one init or one
   thread fails, all are ended again; a policy the system refuses is a failure too.
   Returns: SPDL_OK, SPDL_E_INVALID, SPDL_E_NOMEM, SPDL_E_THREAD, or what init returned.
   Threads: any.
   Blocks:  until every init has returned and every worker has its policy.
   Owns:    the caller destroys *pool; on failure *pool is NULL. */
SPDL_API spdl_result spdl_pool_create(spdl_pool **pool, const spdl_pool_desc *desc);

/* Stops the pool, runs `fini` on every worker and joins them. Pipelines on the pool must have been
   destroyed before: else nothing happens but a logged error. Guests that are inside are waited for;
   no thread may come any more.
   Returns: nothing; NULL is allowed.
   Threads: owner; not a worker of this pool, nor a guest.
   Blocks:  until the jobs that were accepted have run; without workers it runs them.
   Owns:    the pool's memory is freed. */
SPDL_API void spdl_pool_destroy(spdl_pool *pool);

/* Queues fn(arg). Jobs start in the order of submission.
   Returns: SPDL_OK, SPDL_TIMEOUT (the queue stayed full), SPDL_CLOSED (after stop), SPDL_E_INVALID.
   Threads: any; a job that submits should use a timeout of 0, or it may wait for itself.
   Blocks:  while the queue is full, up to timeout_ns.
   Owns:    `arg` stays the caller's; a job that was accepted is run exactly once. */
SPDL_API spdl_result spdl_pool_submit(spdl_pool *pool, spdl_job_fn fn, void *arg,
                                      int64_t timeout_ns);

/* Waits until no job is queued or running; without workers it runs those that are queued. Jobs that
   others submit meanwhile count too: beside steady submitters it may never return.
   Returns: SPDL_OK, SPDL_TIMEOUT, SPDL_E_INVALID on a worker of this pool.
   Threads: any but a worker of this pool.
   Blocks:  until then, or up to timeout_ns.
   Owns:    nothing. */
SPDL_API spdl_result spdl_pool_drain(spdl_pool *pool, int64_t timeout_ns);

/* Accepts no more jobs and waits for those accepted. Pipelines on the pool go on.
   Returns: SPDL_OK, SPDL_TIMEOUT, SPDL_E_INVALID on a worker of this pool.
   Threads: any but a worker of this pool.
   Blocks:  until the jobs have run, or up to timeout_ns.
   Owns:    nothing. */
SPDL_API spdl_result spdl_pool_stop(spdl_pool *pool, int64_t timeout_ns);

/* The calling thread is a guest: it runs jobs and stages of all pipelines on the pool, as a worker
   would, until there is nothing to do or budget_ns is over. After that it begins no job or call;
   the one at hand is finished. So a job of a job system may come to
       if (spdl_pool_run(pool, 300000) == SPDL_OK) come_again();
   Returns: SPDL_OK: the budget is over, and there is more to do; SPDL_EMPTY: there is nothing to do
            now; SPDL_FULL: others are at all places; SPDL_E_INVALID: the pool has no guests, or the
            thread is a worker or inside already. With a budget of 0 it only looks.
   Threads: any, any number at the same time.
   Blocks:  in the functions it calls; SPDL_FOREVER: until there is nothing to do.
   Owns:    nothing. */
SPDL_API spdl_result spdl_pool_run(spdl_pool *pool, int64_t budget_ns);

/* How many workers the pool has, guests not counted.
   Returns: the number.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API int spdl_pool_workers(const spdl_pool *pool);

/* ============================================================================================= */
/* >>pipeline
   A source, stages and a sink, declared as rows of a table and run by a pool: any worker runs any
   stage, the one furthest downstream first. A stage is called only when it has an input, is under
   its concurrency and has room for its output, so no worker ever waits on a full edge.

   Stage functions. SPDL_FN(decode, Path, Image) { ... } defines
       spdl_result decode(spdl_task *task, Path *in, Image **out)
   and records the type names, so that a pipeline whose stages do not fit is refused when it is
   created; void fits anything. A source has void as its input type. The function returns
       SPDL_OK    with an item in *out (for a stage: *out may be `in`, changed in place)
       SPDL_SKIP  drops the item
       SPDL_END   from a source: there is no more, or with .continuous no more in this epoch
       SPDL_PENDING  with .deferred, after spdl_defer: spdl_complete gives the result later
       SPDL_AGAIN with .again: an item in *out, and there is more: see One to many below
       negative   this item failed; `return spdl_fail(task, "...")` records why
   *out counts only with SPDL_OK and SPDL_AGAIN; with any other result what it points to stays the
   function's. A task is good for its call: a worker has the same one for all its calls, of
   whatever stage.
   In C++ a stage function that throws has failed, with what() as the reason (where it is compiled
   with exceptions). Other functions of yours must not throw, and none may end its thread.

   Ownership. A stage borrows its input. After the call the library destroys it, exactly once, with
   the free_item of the stage that made it, unless the stage passed it on (*out == in) or took it
   with spdl_take. So stage functions never free their input, whatever happens. What
   spdl_pipeline_next hands out is the trainer's. NULL items are never passed to free_item.
   Invariant: items made by source and stages = delivered + taken in by stages, skipped, failed or
   freed at stop.

   One to many. A stage with .again may return SPDL_AGAIN: what is in *out goes on at once, and the
   stage is called again with the same input when there is room for the next result, until it
   returns SPDL_OK with the last one, SPDL_SKIP without one, or fails. So an archive of many files
   or a video flows in bounded memory. *spdl_state(task) is NULL when an input is new, and keeps
   what the calls for it share; free_state destroys that once, when the last of them has returned
   or the pipeline was stopped. With input order and a concurrency above 1 each call may have
   buffer_size results waiting, and those of one input come before those of the next.

   A stage with .emits = n hands on what it gives to spdl_emit, none or up to n items for each call
   (*out stays NULL); they wait in memory, whatever buffer_size says. A stage with
   .flush is called once more when its input ends (spdl_flushing(task) is true, there is no input):
   it may gather items by its own rules and hand on what is left.

   Memory that is used again. With .item_bytes = n on a source or pipe, spdl_buffer(task) gives its
   calls buffers of n bytes. One that is handed on comes back when the library destroys the item, or
   when the trainer calls spdl_buffer_free. SPDL_BATCH(count, .item_bytes = n) makes batches in
   place: `data` of a batch is one block of count * n bytes, and spdl_buffer gives a call of the row
   directly before (in input order, without .emits and .again) the part of it where its item will
   be. All other items must have n bytes, too: they are copied there, then destroyed. What comes
   after a dropped item in the same epoch may be copied as well. NULL becomes zeros. spdl_batch_free
   gives the block back. The items of a batch in place cannot leave it.
   Blocks and buffers begin at a multiple of 64, are not cleared, come from desc.allocator, and are
   made with the pipeline (up to 256 MiB for each row, the rest when it is needed).
   SPDL_UNBATCH() hands on the items of each batch one by one, except those that were taken out.
   They have the number of the batch.

   Failures. A failed call is made again as often as .retries says; then its item is dropped. While
   .max_failures or .max_failure_rate allows it, the flow goes on: each failure is logged as
   SPDL_LOG_INFO, and at the end (of all epochs, a stop, destroy) one line for each stage, as
   SPDL_LOG_WARN, says how many items were dropped. A failure beyond that ends the pipeline, and is
   logged as SPDL_LOG_ERROR. The trainer gets what was ready, then the failure; calls of the rows
   above, as of a source that blocks, are not waited for. If several stages fail, each is logged
   (see spdl_pipeline_failed_stages). So after the loop a program asks spdl_pipeline_failed.
   .on_drop of a row is called with the input of every call that failed.

   Order. With input order (the default) a stage hands on its results in the order of its inputs; a
   slow call holds back those after it, up to buffer_size of them. With completion order it hands
   them on as they are done; reorder_window = n then bounds the disorder: no item is overtaken by
   more than n others of its stage. With input order reorder_window is how many results may be under
   way or wait, the places of dropped items included (default: 64 or what fits the rest): give a
   filter that keeps one of a thousand a large one. An ordered pipeline without merges that take
   what is ready delivers the same items in the same order at any number of workers: with random
   numbers seeded by spdl_sequence, bit by bit.

   Branches. SPDL_BRANCH(fn), then two or more SPDL_PATH(name), each followed by its rows, then
   SPDL_MERGE(): `fn` is a stage that sends its result down one of the paths with spdl_route(task,
   path); paths may hold any rows except a source and a sink, none, or branches of their own. A path
   that is full or slow does not stop the others: what exceeds its buffer_size waits, in order, and
   `fn` is called while fewer than .buffer_size of SPDL_BRANCH results wait so, on all its paths
   together. (1: nothing passes the first one that finds its path full.) A branch of batches sends
   the items of a batch down several paths with spdl_route_items: every path then gets one batch,
   maybe an empty one, and SPDL_MERGE(.merge_order = SPDL_MERGE_BATCHES) joins them to one batch
   again (one that a stage drops counts as empty; one that spdl_route sends down one path has empty
   ones beside it). What a merge hands on is of one type: say void where it is not.

   Several sources. A table that begins with SPDL_PATH(name) has a source in each path: SPDL_PATH,
   SPDL_SOURCE or SPDL_FROM, any rows, and so on for two or more paths, then SPDL_MERGE and what
   follows. A path that ends leaves the merge; a path that fails ends it, with the pipeline, as soon
   as the items made before were handed on, whatever the others do. Items are numbered by their own
   source. Either every source has .continuous or none: an epoch ends when it has in every path.

   SPDL_FROM(Type, next_fn, source) is a source whose items are what next_fn(source, &item, timeout)
   yields: with spdl_pipeline_next_fn, another pipeline. It runs on a thread of its own and asks for
   at most 50 ms at a time, so next_fn has to keep to its timeout. SPDL_END ends it (or with
   .continuous an epoch), SPDL_TIMEOUT is asked again, anything else fails, with the text of the
   other pipeline's failure. `source` has to outlive the pipeline. To rewind both, stop this one,
   rewind the other one, and then this one.

   Epochs. A source with .continuous starts over after SPDL_END, its items numbered from 0 again;
   next returns SPDL_END once for each epoch. The end of an epoch is a barrier in every stage: no
   call of the next epoch begins before the calls of this one have ended, no batch spans two epochs,
   and stages further up work on the next epoch meanwhile. An error ends this epoch and all others.

   Who may wait for whom. While one worker is free, every row with an input, under its concurrency
   and with room for its result is called, whatever other calls wait for; calls of a row begin in
   the order of its inputs. Up to `concurrency` calls of a row may wait for each other, if there are
   as many threads (in input order: within buffer_size + concurrency items). A call may wait for
   what a later stage, the trainer or the producer does, if its row has a concurrency of 1 or
   completion order: else order itself makes calls wait for those before them. The trainer may wait
   until its buffer is full, or pause for as long as it likes at no cost. `*pipeline` is stored
   before the first call. Pipelines on one pool get turns by time, not by calls. No function of
   yours is called under a lock of the library, except merge_fn; alloc_fn and free_fn, when more
   batches are alive than were made ahead; and log_fn, when a row of batches or a merge fails.

   Fork. In the child of a fork a pipeline that has threads is dead: next, push and stop return
   SPDL_E_INVALID as soon as they would wait for another thread, and destroy does nothing. The
   parent does not notice. A pipeline that runs when the process exits is no problem. */

typedef struct spdl_task spdl_task;
typedef spdl_result (*spdl_fn)(spdl_task *task, void *in, void **out);

/* A stage function with what is known about it; made by SPDL_FN. */
typedef struct spdl_function {
    spdl_fn call;
    const char *name;
    const char *in_type;
    const char *out_type;
} spdl_function;

typedef void (*spdl_free_fn)(void *item); /* destroys an item; never gets NULL */
typedef void *(*spdl_copy_fn)(const void *item); /* NULL: out of memory */

/* Anything that yields items, such as spdl_pipeline_next_fn. */
typedef spdl_result (*spdl_next_fn)(void *source, void **item, int64_t timeout_ns);

/* A call has failed for good, retries included, whether that is tolerated or ends the pipeline: the
   place to note what was dropped. `item` is the input of the call, a batch where that is an
   spdl_batch: borrowed, it is freed afterwards. NULL: the call was a source's or that of .flush, or
   it has taken its input. Called on the thread of the call (or in spdl_complete), by as many at a
   time as the row has calls. Not called for SPDL_SKIP. */
typedef void (*spdl_drop_fn)(void *ctx, void *item, const spdl_error *error);

typedef enum spdl_kind {
    SPDL_KIND_NONE,
    SPDL_KIND_SOURCE,
    SPDL_KIND_PIPE,
    SPDL_KIND_BATCH,
    SPDL_KIND_SINK,
    SPDL_KIND_FEED,
    SPDL_KIND_BRANCH,
    SPDL_KIND_PATH,
    SPDL_KIND_MERGE,
    SPDL_KIND_UNBATCH
} spdl_kind;

/* The order in which a stage hands on its results. */
typedef enum spdl_order { SPDL_ORDER_INPUT, SPDL_ORDER_COMPLETION } spdl_order;

/* Which path a merge takes its next item from. */
typedef enum spdl_merge_order {
    SPDL_MERGE_READY,   /* whichever has one, in turn */
    SPDL_MERGE_ROBIN,   /* each in turn, waiting for it until it has ended, or its epoch has. In a
                           branch: if others are full meanwhile, and as many items wait as the
                           branch allows, the pipeline fails, with a text that says "starved":
                           .buffer_size of SPDL_PATH and of SPDL_BRANCH are by how many items a path
                           may be ahead. What makes that uncertain is refused in the paths: .emits,
                           .again, .flush, .max_failures, .max_failure_rate, SPDL_UNBATCH */
    SPDL_MERGE_BATCHES, /* one batch from each, joined in the order of the paths */
    SPDL_MERGE_CHOICE,  /* what merge_fn says */
    SPDL_MERGE_WEIGHTED /* of several sources: the path for which (items taken in this epoch + 1) /
                           .weight is smallest, the first of those that are equal, waiting for it
                           as SPDL_MERGE_ROBIN does. Exact, so always in the same order; when a
                           path ends the rest keep their ratios */
} spdl_merge_order;

/* Which of `paths` paths to take from: ready[i] is 1 when path i has an item, 0 when it may get
   one, -1 when it has none until the next epoch or for good. A path that is not ready is waited
   for; less than 0: wait for any. Asked when some path has an item, and again when `ready` has
   changed. It is an error to name a path that does not exist or can never become ready: no path is
   at 0, or other paths are full (see SPDL_MERGE_ROBIN). Called while nobody else may take from the
   paths: to be quick, and not to call the library. */
typedef int (*spdl_merge_fn)(void *ctx, const signed char *ready, int paths);

/* One row, made by the macros below; zero is the default. */
typedef struct spdl_stage {
    spdl_kind kind SPDL__ZERO;
    const spdl_function *fn SPDL__ZERO;
    const char *type SPDL__ZERO;        /* feed, SPDL_FROM: the type of its items */
    spdl_next_fn next SPDL__ZERO;       /* SPDL_FROM: what yields the items */
    void *source SPDL__ZERO;            /* its first argument */
    const char *file SPDL__ZERO;        /* with line: where the row was written */
    int size SPDL__ZERO;                /* batch: items in a batch */
    const char *name SPDL__ZERO;        /* default: the name of the function, "batch" or so; the
                                           second of a name is called "name#2" */
    void *ctx SPDL__ZERO;               /* spdl_ctx(task) */
    int concurrency SPDL__ZERO;         /* pipe: calls at the same time, a hard bound; default 1,
                                           with .threads as many (1 with .flush) */
    int max_concurrency SPDL__ZERO;     /* pipe: upper bound for autotune and set_concurrency;
                                           default: `concurrency`, with autotune as many as there
                                           are threads: set 1 if only one may be in the function */
    int threads SPDL__ZERO;             /* source, pipe: runs on so many threads of its own; 1 for a
                                           source that may block, see spdl_pipeline_destroy */
    int buffer_size SPDL__ZERO;         /* finished items that may wait; default 2, sink 3, branch
                                           (see Branches above) 32, or 2 where they are batches */
    spdl_order output_order SPDL__ZERO; /* pipe: default input order */
    int reorder_window SPDL__ZERO;      /* pipe: see Order above */
    size_t item_bytes SPDL__ZERO;       /* source, pipe: of spdl_buffer; batch: of an item, whose
                                           bytes lie in the batch: see Memory that is used again */
    bool drop_last SPDL__ZERO;          /* batch: drop the last one when it is not full */
    bool drop_oldest SPDL__ZERO;        /* feed: when full, an old item makes way for a new one */
    bool continuous SPDL__ZERO;         /* source: starts over after SPDL_END */
    int emits SPDL__ZERO;               /* source, pipe: a call may give so many to spdl_emit */
    bool flush SPDL__ZERO;              /* pipe: called once more at the end; concurrency 1 */
    bool deferred SPDL__ZERO;           /* pipe: may return SPDL_PENDING */
    bool again SPDL__ZERO;              /* pipe: may return SPDL_AGAIN */
    spdl_merge_order merge_order SPDL__ZERO;
    spdl_merge_fn merge_fn SPDL__ZERO;  /* merge: gets the row's ctx */
    double weight SPDL__ZERO;           /* path, with SPDL_MERGE_WEIGHTED: more than 0 */
    int retries SPDL__ZERO;             /* a call that fails is repeated so many times */
    int max_failures SPDL__ZERO;        /* 0: the first one is fatal; n: n are tolerated; -1: any
                                           number is. See Failures above */
    double max_failure_rate SPDL__ZERO; /* instead: a share in (0,1], judged from 100 calls on */
    spdl_drop_fn on_drop SPDL__ZERO;    /* sees the input of a failed call; gets the row's ctx */
    spdl_free_fn free_item SPDL__ZERO;  /* destroys what this stage makes; default: nothing to do */
    spdl_free_fn free_state SPDL__ZERO; /* again: destroys what spdl_state holds */
    spdl_copy_fn copy_item SPDL__ZERO;  /* source, pipe: another item like this one: see >>doctor */
    bool const_input SPDL__ZERO;        /* pipe: it does not change its input, take it or pass it
                                           on: it may be called with the same one again, even
                                           twice at a time. See >>doctor */
    spdl_init_fn init SPDL__ZERO;       /* on each worker, before any call of any stage; for guests
                                           of the pool create calls it */
    spdl_fini_fn fini SPDL__ZERO;       /* on each worker that ran init; for guests: in destroy */
    int line SPDL__ZERO;
#ifdef __cplusplus
    /* For C++ before C++20, which has no designated initialisers:
       SPDL_PIPE(decode).with_concurrency(4).with_free_item(image_free) */
#define SPDL__WITH(type, field)                                                                    \
    spdl_stage with_##field(type value) const {                                                    \
        spdl_stage copy = *this;                                                                   \
        copy.field = value;                                                                        \
        return copy;                                                                               \
    }
    SPDL__WITH(const char *, name)
    SPDL__WITH(void *, ctx)
    SPDL__WITH(int, concurrency)
    SPDL__WITH(int, max_concurrency)
    SPDL__WITH(int, threads)
    SPDL__WITH(int, buffer_size)
    SPDL__WITH(spdl_order, output_order)
    SPDL__WITH(int, reorder_window)
    SPDL__WITH(size_t, item_bytes)
    SPDL__WITH(bool, drop_last)
    SPDL__WITH(bool, drop_oldest)
    SPDL__WITH(bool, continuous)
    SPDL__WITH(int, emits)
    SPDL__WITH(bool, flush)
    SPDL__WITH(bool, deferred)
    SPDL__WITH(bool, again)
    SPDL__WITH(spdl_merge_order, merge_order)
    SPDL__WITH(spdl_merge_fn, merge_fn)
    SPDL__WITH(double, weight)
    SPDL__WITH(int, retries)
    SPDL__WITH(int, max_failures)
    SPDL__WITH(double, max_failure_rate)
    SPDL__WITH(spdl_drop_fn, on_drop)
    SPDL__WITH(spdl_free_fn, free_item)
    SPDL__WITH(spdl_free_fn, free_state)
    SPDL__WITH(spdl_copy_fn, copy_item)
    SPDL__WITH(bool, const_input)
    SPDL__WITH(spdl_init_fn, init)
    SPDL__WITH(spdl_fini_fn, fini)
#undef SPDL__WITH
#endif
} spdl_stage;

/* Items grouped by SPDL_BATCH; the input type of the next stage is spdl_batch. Set items[i] to NULL
   to take an item out of a batch you borrow; an item put in its place is destroyed with the same
   free_item. In a batch in place (.item_bytes) the items are parts of `data`: they stay there. */
typedef struct spdl_batch {
    void **items;
    size_t count;
    uint64_t sequence; /* number of the batch, from 0 */
    void *data;        /* in place: items one after the other, on a line of the cache; else NULL */
} spdl_batch;

typedef struct spdl_pipeline spdl_pipeline;

typedef struct spdl_pipeline_desc {
    int workers;              /* threads of its own pool; 0: the thread in next does all the work */
    spdl_pool *pool;          /* or a pool that is shared; then leave workers 0 */
    const char *name;         /* names the threads; default "spdl" */
    spdl_policy policy;       /* of its own threads */
    size_t stack_bytes;       /* of each of them; 0: the system's default */
    bool autotune;            /* concurrency is tuned while it runs, from 1 to max_concurrency, of
                                 all pipes without flush. What it does, and why it does nothing,
                                 is logged as SPDL_LOG_INFO; see >>tune-impl */
    double cpu_budget;        /* autotune: processors the stages may use; default: 40 % of them */
    double tune_seconds;      /* autotune: the least time between two decisions; default 0.5 */
    spdl_allocator allocator;
    spdl_logger logger;
    spdl_profiler profiler;   /* see >>pool; default: that of `pool` */
    spdl_error *error;        /* optional: says why create failed */
    const char *trace;        /* file of a trace; NULL: as SPDL_TRACE says; "": none; see >>trace */
    int trace_events;         /* kept of each thread and edge, of 32 bytes each; default 65536 */
    const struct spdl_report_desc *report; /* optional, is copied: see >>report */
    const struct spdl_doctor_desc *doctor; /* optional, is copied; NULL: as SPDL_DOCTOR says */
} spdl_pipeline_desc;

/* clang-format off */
#ifdef __cpp_exceptions
#define SPDL__TRY(result, call)                                                                    \
    try { result = call; } catch (...) { result = spdl__thrown<std::exception>(task, 0); }
#else
#define SPDL__TRY(result, call) result = call;
#endif
#define SPDL_FN(name, In, Out)                                                                     \
    static spdl_result name(spdl_task *task, In *in, Out **out);                                   \
    SPDL__UNUSED static spdl_result name##_spdl_call(spdl_task *task, void *in, void **out) {      \
        Out *spdl__made = NULL; /* no name that a program may have, too */                         \
        spdl_result spdl__result;                                                                  \
        SPDL__TRY(spdl__result, name(task, SPDL__CAST(In *, in), &spdl__made))                     \
        *out = SPDL__UNCONST(spdl__made);                                                          \
        return spdl__result;                                                                       \
    }                                                                                              \
    SPDL__UNUSED static const spdl_function name##_spdl = { name##_spdl_call, #name, #In, #Out };  \
    static spdl_result name(spdl_task *task SPDL__UNUSED, In *in SPDL__UNUSED,                     \
                            Out **out SPDL__UNUSED)

/* Rows, as data, the fields written as .concurrency = 4 and so on:
       SPDL_SOURCE(fn, fields...), or SPDL_FEED(Type, fields...) for spdl_pipeline_push, or
       SPDL_FROM(Type, next_fn, source, fields...) for what another function yields
       SPDL_PIPE(fn, fields...)
       SPDL_BATCH(size, fields...), and SPDL_UNBATCH(fields...) to take batches apart again
       SPDL_BRANCH(fn, fields...), for each path SPDL_PATH(name, fields...) and its rows, and
       SPDL_MERGE(fields...)
       SPDL_SINK(buffer_size) */
#define SPDL_SOURCE(...) SPDL__FN_ROW(SPDL_KIND_SOURCE, __VA_ARGS__, SPDL__LINE)
#define SPDL_FEED(...)   SPDL__FEED_ROW(__VA_ARGS__, SPDL__LINE)
#define SPDL_FROM(...)   SPDL__FROM_ROW(__VA_ARGS__, SPDL__LINE)
#define SPDL_PIPE(...)   SPDL__FN_ROW(SPDL_KIND_PIPE, __VA_ARGS__, SPDL__LINE)
#define SPDL_BATCH(...)  SPDL__BATCH_ROW(__VA_ARGS__, SPDL__LINE)
#define SPDL_UNBATCH(...) SPDL__BARE_ROW(SPDL_KIND_UNBATCH, __VA_ARGS__)
#define SPDL_BRANCH(...) SPDL__FN_ROW(SPDL_KIND_BRANCH, __VA_ARGS__, SPDL__LINE)
#define SPDL_PATH(...)   SPDL__PATH_ROW(__VA_ARGS__, SPDL__LINE)
#define SPDL_MERGE(...)  SPDL__BARE_ROW(SPDL_KIND_MERGE, __VA_ARGS__)

#define SPDL__STRING(x) #x
#define SPDL__EXPAND(x) SPDL__STRING(x)
#if !defined(__cplusplus) || __cplusplus >= 202002L
#define SPDL__LINE .line = __LINE__
#define SPDL__FN_ROW(kind_, fn_, ...)                                                              \
    SPDL__STAGE { .kind = kind_, .fn = &fn_##_spdl, .file = __FILE__, __VA_ARGS__ }
#define SPDL__BATCH_ROW(size_, ...)                                                                \
    SPDL__STAGE { .kind = SPDL_KIND_BATCH, .file = __FILE__, .size = size_, __VA_ARGS__ }
#define SPDL__FEED_ROW(type_, ...)                                                                 \
    SPDL__STAGE { .kind = SPDL_KIND_FEED, .type = #type_, .file = __FILE__, __VA_ARGS__ }
#define SPDL__FROM_ROW(type_, next_, source_, ...)                                                 \
    SPDL__STAGE { .kind = SPDL_KIND_SOURCE, .type = #type_, .next = next_, .source = source_,      \
                  .file = __FILE__, __VA_ARGS__ }
#define SPDL__PATH_ROW(name_, ...)                                                                 \
    SPDL__STAGE { .kind = SPDL_KIND_PATH, .file = __FILE__, .name = name_, __VA_ARGS__ }
/* It may have no fields, so its line cannot come last: it is part of the file's name. */
#define SPDL__BARE_ROW(kind_, ...)                                                                 \
    SPDL__STAGE { .kind = kind_, .file = __FILE__ ":" SPDL__EXPAND(__LINE__), __VA_ARGS__ }
#define SPDL_SINK(buffer_size_)                                                                    \
    SPDL__STAGE { .kind = SPDL_KIND_SINK, .file = __FILE__, .buffer_size = buffer_size_,           \
                  .line = __LINE__ }
#else
/* Before C++20 fields follow the row: SPDL_PIPE(decode).with_concurrency(4). Fields inside of the
   row make the text of its arguments longer, and do not compile, with a message that says so. */
#define SPDL__NO_FIELDS(none) spdl__no_fields<(none)>(__LINE__)
#define SPDL__ROW_LINE(rest) SPDL__NO_FIELDS(sizeof(rest) == sizeof("SPDL__LINE"))
#define SPDL__FN_ROW(kind_, fn_, ...)                                                              \
    spdl__row(kind_, &fn_##_spdl, __FILE__, SPDL__ROW_LINE(#__VA_ARGS__), 0, NULL)
#define SPDL__BATCH_ROW(size_, ...)                                                                \
    spdl__row(SPDL_KIND_BATCH, NULL, __FILE__, SPDL__ROW_LINE(#__VA_ARGS__), size_, NULL)
#define SPDL__FEED_ROW(type_, ...)                                                                 \
    spdl__row(SPDL_KIND_FEED, NULL, __FILE__, SPDL__ROW_LINE(#__VA_ARGS__), 0, #type_)
#define SPDL__FROM_ROW(type_, next_, source_, ...)                                                 \
    spdl__row(SPDL_KIND_SOURCE, NULL, __FILE__, SPDL__ROW_LINE(#__VA_ARGS__), 0, #type_, next_,    \
              source_)
#define SPDL__PATH_ROW(name_, ...)                                                                 \
    spdl__row(SPDL_KIND_PATH, NULL, __FILE__, SPDL__ROW_LINE(#__VA_ARGS__), 0, NULL)               \
        .with_name(name_)
#define SPDL__BARE_ROW(kind_, ...)                                                                 \
    spdl__row(kind_, NULL, __FILE__, SPDL__NO_FIELDS(sizeof(#__VA_ARGS__) == 1), 0, NULL)
#define SPDL_SINK(buffer_size_)                                                                    \
    spdl__row(SPDL_KIND_SINK, NULL, __FILE__, __LINE__, 0, NULL).with_buffer_size(buffer_size_)
#endif

/* The rows of a pipeline, written in place; SPDL_TABLE(rows) is for an array that has a name. Both
   stand for the last arguments of spdl_pipeline_create. */
#ifdef __cplusplus
#define SPDL__STAGE spdl_stage
#define SPDL_STAGES(...) { __VA_ARGS__ }
#else
#define SPDL__STAGE
#define SPDL_STAGES(...)                                                                           \
    (const spdl_stage[]){ __VA_ARGS__ },                                                           \
        sizeof((const spdl_stage[]){ __VA_ARGS__ }) / sizeof(spdl_stage)
#endif
#define SPDL_TABLE(rows) (rows), sizeof(rows) / sizeof((rows)[0])
/* clang-format on */

/* Checks the rows, allocates everything the pipeline will use, and starts it. The rows are copied;
   ctx pointers must outlive the pipeline. Whatever is wrong is reported in desc->error and the log,
   with file and line of the row, the row's number and the field. More concurrency than there are
   threads for is a warning in the log.
   Returns: SPDL_OK, SPDL_E_INVALID, SPDL_E_TYPE, SPDL_E_NOMEM, SPDL_E_THREAD, SPDL_E_LIMIT (the
            pool has 64 pipelines already).
   Threads: any.
   Blocks:  as spdl_pool_create, for its own pool.
   Owns:    the caller destroys *pipeline; on failure *pipeline is NULL. */
SPDL_API spdl_result spdl_pipeline_create(spdl_pipeline **pipeline, const spdl_pipeline_desc *desc,
                                          const spdl_stage *stages, size_t stage_count);

/* Stops the pipeline if it runs, waits for the calls in flight, and frees every item that was not
   handed out. Batches that were handed out stay valid. After 5 seconds the log says which stages it
   waits for.
   A source with .threads = 1 that is in a call is waited for 5 seconds, and not at all when a stop
   with a timeout has waited for it in vain. Its thread then frees what the call returns, runs fini
   and frees the rest when it does: its ctx (of SPDL_FROM: source), allocator and profiler have to
   be there until then.
   Returns: nothing; NULL is allowed.
   Threads: owner; no other call on the pipeline may be running; not on a worker of its pool.
   Blocks:  until the stage functions that are running have returned, except as above, and every
            deferred call was completed; with init rows on a shared pool also until each worker has
            been free once.
   Owns:    the pipeline and every item still inside are freed. */
SPDL_API void spdl_pipeline_destroy(spdl_pipeline *pipeline);

/* Takes the next item out of the sink. A timeout takes nothing and loses nothing. After the last
   item every call returns how it ended: SPDL_END, or the error that ended the pipeline early (items
   made before it are delivered first), or SPDL_CLOSED after a stop. With a continuous source
   SPDL_END is returned once for each epoch, and the next call goes on with the next one.
   Returns: SPDL_OK, SPDL_TIMEOUT, SPDL_END, SPDL_CLOSED, a negative result (see
            spdl_pipeline_error), SPDL_E_INVALID when another thread is inside, and in the child of
            a fork.
   Threads: one at a time (the trainer). Wait-free when an item is ready.
   Blocks:  until there is an item or the end, or up to timeout_ns. With workers = 0 the stages run
            inside this call, and the timeout is looked at between their calls.
   Owns:    the caller has *item after SPDL_OK; otherwise *item is untouched. */
SPDL_API spdl_result spdl_pipeline_next(spdl_pipeline *pipeline, void **item, int64_t timeout_ns);

/* The same without a cast: `out` is the address of a pointer to any type of object. */
#ifdef __cplusplus
#define SPDL_NEXT(pipeline, out, timeout_ns) spdl__next(pipeline, out, timeout_ns)
#else
#define SPDL_NEXT(pipeline, out, timeout_ns)                                                       \
    spdl__next(pipeline, ((void)sizeof(&**(out)), (out)), timeout_ns)
SPDL__UNUSED static inline spdl_result spdl__next(spdl_pipeline *pipeline, void *out,
                                                  int64_t timeout_ns) {
    return spdl_pipeline_next(pipeline, (void **)out, timeout_ns); /* which copies bytes */
}
#endif

/* Ends the flow early: no stage function is called again; those running are waited for. Items in
   the sink can still be taken, then next returns SPDL_CLOSED, also while a source blocks; others
   are freed, by a stop that has waited or else by destroy. Stopping twice, or after the end, is
   fine. On a worker of the pipeline's pool it does not wait, nor in a free_item or log_fn that
   spdl_complete calls.
   Returns: SPDL_OK, SPDL_TIMEOUT (stage functions are still running; the stop goes on),
            SPDL_E_INVALID in the child of a fork.
   Threads: any, also inside a stage.
   Blocks:  until the stage functions that are running have returned and every deferred call was
            completed, or up to timeout_ns; what free_item takes comes on top.
   Owns:    the library frees the items that are not in the sink. */
SPDL_API spdl_result spdl_pipeline_stop(spdl_pipeline *pipeline, int64_t timeout_ns);

/* Starts again, with the source at `sequence`: waits for the calls that run, frees all that is on
   its way, and forgets an end, a failure or a stop. spdl_sequence of the source's next call is
   `sequence` (of each, if there are several), its epoch 0; a source that reads in order sees by
   that that it has to seek. What a stage keeps in its ctx stays there, as what one with .flush has
   gathered. No thread is made; statistics go on. For a validation set that is read from its
   beginning every few steps, or a position to go on from.
   Returns: SPDL_OK; SPDL_TIMEOUT: calls still run, and the pipeline is stopped; SPDL_E_INVALID
            inside of a stage, while another thread is in next or push, in the child of a fork, or
            for a sequence of 2^40 or more; the error when an init has failed.
   Threads: the trainer. A push or push_end meanwhile returns SPDL_E_INVALID; a stop waits.
   Blocks:  until the calls at hand have returned, deferred ones and those of SPDL_FROM (50 ms) too,
            or up to the timeout; before the first call until every init has run.
   Owns:    nothing: what next has returned stays the trainer's. */
SPDL_API spdl_result spdl_pipeline_rewind(spdl_pipeline *pipeline, uint64_t sequence,
                                          int64_t timeout_ns);

/* Hands an item to a pipeline whose first row is SPDL_FEED. A timeout of 0 never blocks, whatever
   the rest of the pipeline does: for threads with deadlines, as of games and audio. With
   .drop_oldest the item that has waited longest makes way when there is no room (the stats count it
   as a skip of row 0); SPDL_FULL then means that the reader was at work just now.
   Returns: SPDL_OK; SPDL_FULL (timeout 0) or SPDL_TIMEOUT: no room; SPDL_CLOSED after the end, a
            stop or a failure; SPDL_E_INVALID without such a row, in the child of a fork, or when
            another thread is inside.
   Threads: one at a time (the producer).
   Blocks:  until there is room, or up to timeout_ns; never with drop_oldest.
   Owns:    the pipeline has the item after SPDL_OK; otherwise it stays the caller's. An item that
            made way is freed with free_item of the row. */
SPDL_API spdl_result spdl_pipeline_push(spdl_pipeline *pipeline, void *item, int64_t timeout_ns);

/* No more items will be pushed: the pipeline ends when those it has are done.
   Returns: SPDL_OK, SPDL_E_INVALID without a row SPDL_FEED, or when another thread pushes.
   Threads: the producer.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API spdl_result spdl_pipeline_push_end(spdl_pipeline *pipeline);

/* The row of a stage, by its name: what stats and errors call `stage`.
   Returns: the row from 0, or -1 when there is no such name.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API int spdl_pipeline_find(const spdl_pipeline *pipeline, const char *name);

/* Changes the concurrency of a stage while the pipeline runs. Calls that are running go on; fewer
   are begun from now on, or more.
   Returns: SPDL_OK, SPDL_E_INVALID when there is no such row or it is no pipe, SPDL_E_LIMIT when
            concurrency is less than 1 or more than the max_concurrency of the row.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API spdl_result spdl_pipeline_set_concurrency(spdl_pipeline *pipeline, int stage,
                                                   int concurrency);

/* Whether a stage has failed more often than it may.
   Returns: true once the pipeline has failed, until it is rewound.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API bool spdl_pipeline_failed(const spdl_pipeline *pipeline);

/* Which stages have: bit i is that of row i. More than one if others failed before they were ended;
   spdl_pipeline_error is about the one that ended what is delivered, the log has all.
   Returns: the bits; 0 while spdl_pipeline_failed is false.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API uint32_t spdl_pipeline_failed_stages(const spdl_pipeline *pipeline);

/* The failure that ended the pipeline: stage, item and text.
   Returns: never NULL; result is SPDL_OK when there was no failure.
   Threads: the trainer, after next has returned the failure; any, after a stop outside of stages
            that returned SPDL_OK.
   Blocks:  never.
   Owns:    the pipeline; valid until it is rewound or destroyed. */
SPDL_API const spdl_error *spdl_pipeline_error(const spdl_pipeline *pipeline);

/* Memory for the result of this call, to be its *out or given to spdl_emit; see Memory that is used
   again. What is not handed on goes back when the call ends.
   Returns: item_bytes bytes, the same ones until they are handed on; NULL: there is no memory, or
            (the pipeline fails) neither this row nor a SPDL_BATCH after it says .item_bytes;
            outside of the call, or on another thread, NULL and a line in the log.
   Threads: a stage.
   Blocks:  never.
   Owns:    the library; from SPDL_OK on as any item. */
SPDL_API void *spdl_buffer(spdl_task *task);

/* Gives back what spdl_buffer gave and the pipeline has handed out; nothing of a batch in place.
   Returns: nothing; NULL is allowed. Fits free_item.
   Threads: any.
   Blocks:  never.
   Owns:    the buffer is gone. May be called after the pipeline was destroyed. */
SPDL_API void spdl_buffer_free(void *buffer);

/* Frees a batch and the items in it that are not NULL, with the free_item of their stage.
   Returns: nothing; NULL is allowed. Fits free_item.
   Threads: any.
   Blocks:  never, except in free_item.
   Owns:    batch and items are gone. May be called after the pipeline was destroyed. */
SPDL_API void spdl_batch_free(void *batch);

/* Records why this call fails, as printf would write it. Outside of the call, or on another thread,
   the text goes to the log.
   Returns: SPDL_E_STAGE, to be returned by the stage function.
   Threads: a stage.
   Blocks:  never.
   Owns:    the text is copied, up to SPDL_TEXT_BYTES. */
SPDL_API spdl_result spdl_fail(spdl_task *task, const char *format, ...) SPDL__PRINTF(2, 3);

/* The ctx of this stage's row.
   Returns: what the row says.
   Threads: a stage.
   Blocks:  never.
   Owns:    the caller of create. */
SPDL_API void *spdl_ctx(const spdl_task *task);

/* What this stage's init stored for this worker.
   Returns: NULL when the row has no init.
   Threads: a stage.
   Blocks:  never.
   Owns:    the stage; fini frees it. */
SPDL_API void *spdl_local(const spdl_task *task);

/* The number of this item: in a source the number of items made so far, elsewhere the number its
   source gave it; after SPDL_BATCH the number of the batch. From 0.
   Returns: the number.
   Threads: a stage.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API uint64_t spdl_sequence(const spdl_task *task);

/* The worker that runs this call, from 0; 0 with workers = 0.
   Returns: less than workers and guests of the pool; with policy.polite less than twice that.
   Threads: a stage.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API int spdl_worker(const spdl_task *task);

/* Whether the pipeline is being stopped; a stage function that takes long should return early.
   Returns: true once it is.
   Threads: a stage.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API bool spdl_stopping(const spdl_task *task);

/* Takes the input away from the library: it will not be freed after this call. Outside of a call,
   or on another thread, nothing is taken, and a line in the log says so.
   Returns: nothing.
   Threads: a stage.
   Blocks:  never.
   Owns:    the caller has the input (a batch: free it with spdl_batch_free). */
SPDL_API void spdl_take(spdl_task *task);

/* Hands on one more result of this call, in a stage with .emits. Without .emits this is an error
   that ends the pipeline, and more than .emits items make the call fail. (In a call that returns
   SPDL_PENDING it is a line in the log.)
   Returns: SPDL_OK, SPDL_E_NOMEM, SPDL_E_INVALID when the row does not say .emits or says less;
            outside of the call, or on another thread, that and a line in the log.
   Threads: a stage.
   Blocks:  never.
   Owns:    the library has the item after SPDL_OK. The input may be handed on, too, once. */
SPDL_API spdl_result spdl_emit(spdl_task *task, void *item);

/* In a stage with .again: what the calls for one input share. NULL when the input is new; whatever
   is stored there is there in the next call, and destroyed with the row's free_state when the last
   one has returned, before its input is, or when the pipeline stops. The input stays the same too.
   Returns: where it is; never NULL.
   Threads: a stage.
   Blocks:  never.
   Owns:    the library, through free_state. */
SPDL_API void **spdl_state(spdl_task *task);

/* Sends the result of this call down a path, in an SPDL_BRANCH; without it path 0 is taken.
   Returns: SPDL_OK, so that it can be what the function returns; SPDL_E_INVALID when there is no
            such path: the call fails, and in a row that is no SPDL_BRANCH the pipeline. Outside of
            the call, on another thread, or in one that returns SPDL_PENDING: a line in the log.
   Threads: a stage.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API spdl_result spdl_route(spdl_task *task, int path);

/* Sends each item of the batch that is the result of this call down a path of its own: path[i] is
   that of items[i]. Every path gets a batch, those that get no item an empty one.
   Returns: as spdl_route, also when it is called twice; SPDL_E_NOMEM.
   Threads: a stage of type spdl_batch to spdl_batch; *out has to be `in`.
   Blocks:  never.
   Owns:    `path` is read in this call. */
SPDL_API spdl_result spdl_route_items(spdl_task *task, const int *path);

/* Whether this call is the last one of a stage with .flush in this epoch, which has no input.
   Returns: true then.
   Threads: a stage.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API bool spdl_flushing(const spdl_task *task);

/* The epoch this item belongs to, from 0.
   Returns: 0 when the source is not continuous.
   Threads: a stage.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API uint64_t spdl_epoch(const spdl_task *task);

/* Names one call that will be completed later. A value: copy it as you like. */
typedef struct spdl_deferred {
    spdl_pipeline *pipeline; /* NULL: there is no such call */
    uint64_t id;
} spdl_deferred;

/* Announces that this call, in a stage with .deferred, returns SPDL_PENDING and is completed later:
   the worker is free meanwhile, the call counts in the concurrency of its stage. `in` stays valid
   until then.
   Returns: what spdl_complete takes; its pipeline is NULL when the row does not say .deferred, and,
            with a line in the log, outside of the call or on another thread.
   Threads: a stage.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API spdl_deferred spdl_defer(spdl_task *task);

/* Completes a deferred call, as if its function returned `result` with `item` just now. It may come
   before the function has returned. A pipeline is destroyed only after all have been completed.
   Returns: SPDL_OK; SPDL_E_INVALID, with a line in the log, when there is no such call or it was
            completed before: nothing happens to `item` then.
   Threads: any, as long as the pipeline is there.
   Blocks:  never, except in free_item.
   Owns:    as for the result of a stage function. */
SPDL_API spdl_result spdl_complete(spdl_deferred deferred, spdl_result result, void *item);

/* Completes a deferred call as failed, and records why, as printf would write it.
   Returns: as spdl_complete.
   Threads: any, as long as the pipeline is there.
   Blocks:  never, except in free_item.
   Owns:    the text is copied, up to SPDL_TEXT_BYTES. */
SPDL_API spdl_result spdl_complete_fail(spdl_deferred deferred, const char *format, ...)
    SPDL__PRINTF(2, 3);

/* Ends the pipeline early from inside a stage, as spdl_pipeline_stop does, without waiting.
   Returns: nothing.
   Threads: a stage.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API void spdl_stop(spdl_task *task);

/* ============================================================================================= */
/* >>stats
   Numbers that say which stage is slow. Every struct is plain data of the caller's, without
   pointers: numbers of several processes can be sent as bytes, and histograms added up. >>report
   has these numbers in regular intervals. */

/* Durations in buckets: exact below 8 ns, then 8 to each power of two, so percentiles are within
   6.25 %; from 2^43 ns (2.4 h) all in the last. All zero is empty. The three below write it. */
#define SPDL_HISTOGRAM_BUCKETS 328

typedef struct spdl_histogram {
    uint64_t count, sum_ns, max_ns; /* exact */
    uint64_t bucket[SPDL_HISTOGRAM_BUCKETS];
} spdl_histogram;

/* Counts `times` durations of `ns` each.
   Returns: nothing.
   Threads: one at a time.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API void spdl_histogram_add(spdl_histogram *histogram, uint64_t ns, uint64_t times);

/* Counts everything that `more` has counted: the same to the last bit as one histogram of all.
   Returns: nothing.
   Threads: one at a time.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API void spdl_histogram_merge(spdl_histogram *histogram, const spdl_histogram *more);

/* The duration that `share` (0 to 1) of the durations did not exceed: the middle of its bucket, but
   never more than the maximum.
   Returns: nanoseconds; 0 for an empty histogram.
   Threads: any, while nothing is counted.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API uint64_t spdl_histogram_percentile(const spdl_histogram *histogram, double share);

/* These three are written by spdl_pipeline_stats. */
typedef struct spdl_stage_stats {
    char name[SPDL_NAME_BYTES];
    spdl_kind kind;
    int concurrency;   /* the bound */
    int threads;       /* of its own; 0: the workers are */
    int in_flight;     /* calls running now */
    uint64_t tasks;    /* calls that have ended; for a batch row: batches made; feed: pushes */
    uint64_t failures; /* of them, calls that failed; not in the times */
    uint64_t skips;    /* of them, calls that dropped their item; batch: items of drop_last; feed:
                          items that made way */
    uint64_t retries;  /* calls that were made again for an item that had failed */
    uint64_t freed;    /* items this stage had made or taken that a stop or failure freed */
    uint64_t busy_ns;  /* time spent in calls that did not fail, over all workers */
    bool deferred;     /* calls end when they are completed: busy_ns is no worker's time */
    bool alone;        /* its row says one call at a time: .max_concurrency = 1, .flush */
    bool in_order;     /* results leave in input order */
    /* Of the trainer's waits of more than a microsecond or so (not with workers = 0), the part in
       which the item it waited for was here: the sum over all stages is what it waited. */
    uint64_t exposed_ns;      /* in a call of this stage, or held back for order by one */
    uint64_t exposed_idle_ns; /* ready for it, but no worker took it */
    /* Of one call; below 1 us of up to 32. Of a feed: from the push of an item until the trainer
       has the answer, of a batch or the like from the oldest push, to 256 ns. */
    uint64_t mean_ns, p50_ns, p90_ns, p99_ns, max_ns;
    /* Where busy_ns went: the three add up to it. Estimates, scaled up from the calls measured (one
       in about 0.8 ms of each worker, not its first); they may go backwards a little. */
    uint64_t cpu_ns;       /* on a processor */
    uint64_t runnable_ns;  /* ready to run, but other threads had the processors */
    uint64_t blocked_ns;   /* asleep: input, locks, timers */
    uint64_t split_calls;  /* how many calls were measured; 0: the three are not known, and 0 */
    bool runnable_known;   /* false: no schedstat; what is runnable is in blocked_ns */
    uint64_t bytes_in, bytes_out; /* what the stage reported, see spdl_report_bytes */
} spdl_stage_stats;

typedef struct spdl_edge_stats {
    int buffer_size;
    int depth;              /* items that can be taken now: up to buffer_size + concurrency; of a
                               path up to buffer_size and that of its branch */
    uint64_t items;         /* items taken so far */
    uint64_t put_wait_ns;   /* time finished items waited for a place among the buffer_size */
    uint64_t get_wait_ns;   /* time the reader was idle for want of an item, open waits too */
    uint64_t empty_ns;      /* time the edge had nothing to take, the open gap too */
    uint64_t elapsed_ns;    /* from the start to now, or to the end of the edge */
    double readiness;       /* 1 - empty_ns / elapsed_ns; 0 before any time has passed */
} spdl_edge_stats;

/* What holds a trainer back. */
typedef enum spdl_limit {
    SPDL_LIMIT_NOT_KNOWN,
    SPDL_LIMIT_TRAINER,     /* nothing: loading is fast enough */
    SPDL_LIMIT_CONCURRENCY, /* a stage that computes: more calls at a time help */
    SPDL_LIMIT_IO,          /* a stage that sleeps: the same */
    SPDL_LIMIT_MACHINE,     /* the processors are used up */
    SPDL_LIMIT_LOCK,        /* calls of a stage wait for each other */
    SPDL_LIMIT_SERIAL,      /* a stage that may have one call at a time only */
    SPDL_LIMIT_ORDER,       /* rare slow calls hold back those after them */
    SPDL_LIMIT_BATCH,       /* items wait until a batch is full */
    SPDL_LIMIT_WORKERS,     /* all workers are in calls */
    SPDL_LIMIT_MEMORY,      /* page faults */
    SPDL_LIMIT_DEVICE,      /* copies to a device */
    SPDL_LIMIT_SOURCE,      /* the source */
    SPDL_LIMIT_HARM,        /* loading takes processor time from the trainer's steps */
    SPDL_LIMIT_FOREIGN,     /* other programs have the processors */
    SPDL_LIMIT_REQUESTS     /* of a feed: more is pushed than can be answered */
} spdl_limit;

typedef struct spdl_stats {
    uint64_t elapsed_ns;    /* from the start to now, or to the end */
    int workers;            /* and guests */
    int stage_count;        /* rows but the sink: stage[i] feeds edge[i], the last is the sink */
    uint64_t delivered;     /* items handed to the trainer */
    uint64_t first_item_ns; /* from the start to the first of them; 0 before */
    uint64_t wait_ns;       /* time the trainer waited in next, a running wait included */
    uint64_t ready_ns;      /* time it was in next though an item was ready: woken late, mostly */
    uint64_t workers_runnable_ns; /* time workers were ready to run outside of calls, but other
                               threads had the processors (Linux with schedstat; else 0) */
    uint64_t step_ns;       /* time since the first item that it did not: its own steps */
    uint64_t step_mean_ns;  /* of one step: from an item to the next call of next */
    uint64_t answer_wait_ns; /* with a feed: time answers lay in the sink until they were taken */
    uint64_t trainer_runnable_ns; /* since the first item: the trainer was ready to run, but other
                               threads had the processors (known to its own snapshots; else 0) */
    /* Waits for copies to a device (spdl_cuda.h): of spdl_cuda_next when its source is this
       pipeline, which are in step_ns; and of calls in front of SPDL_CUDA_TRANSFER. */
    uint64_t step_device_ns, calls_device_ns;
    /* The process since the start, read at most every 10 ms; 0: not known. */
    uint64_t process_ns;    /* from the start to that reading */
    uint64_t process_cpu_ns; /* CPU time of all its threads */
    uint64_t others_cpu_ns; /* and of other programs on the machine */
    uint64_t minor_faults;
    double cores_allowed;   /* see spdl_process_stats */
    int cores;
    spdl_stage_stats stage[SPDL_MAX_STAGES];
    spdl_edge_stats edge[SPDL_MAX_STAGES];
} spdl_stats;

/* Adds to the bytes_in and bytes_out of this stage's statistics.
   Returns: nothing.
   Threads: a stage.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API void spdl_report_bytes(spdl_task *task, uint64_t bytes_in, uint64_t bytes_out);

/* Copies the counters as they stand, while the pipeline runs on. Each is exact, and none goes
   backwards from one snapshot to the next; they are read one after the other, some microseconds for
   each stage, and every 10 ms what spdl_process_read knows. A worker is woken if the last stage can
   be called, so a trainer may wait until its buffer is full.
   Returns: nothing.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API void spdl_pipeline_stats(const spdl_pipeline *pipeline, spdl_stats *stats);

/* The durations of the calls of one stage so far, failed calls left out; of a feed those from push
   to answer.
   Returns: SPDL_OK, SPDL_E_NOT_FOUND (there is no such stage).
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API spdl_result spdl_pipeline_histogram(const spdl_pipeline *pipeline, int stage,
                                             spdl_histogram *histogram);

/* The process at one moment, by spdl_process_read. Between readings a and b it used (b.cpu_ns -
   a.cpu_ns) / (b.time_ns - a.time_ns) cores, others the same of others_ns. */
typedef struct spdl_process_stats {
    uint64_t time_ns;        /* spdl_time_ns of the reading */
    uint64_t cpu_ns;         /* CPU time of this process so far, all threads */
    uint64_t others_ns;      /* and of everything else on the machine (Linux; else 0) */
    int cores;               /* of the machine */
    double cores_allowed;    /* by affinity and cgroup quotas (elsewhere: the cores there are) */
    uint64_t resident_bytes; /* memory in use (Linux; else 0) */
    uint64_t minor_faults;   /* pages that were mapped or zeroed on first use */
    uint64_t major_faults;   /* pages that were read from a disk */
} spdl_process_stats;

/* Reads what the system knows about this process: a few files of /proc and of the cgroup, some 50
   to 200 microseconds. A pipeline reads it when it is created and in spdl_pipeline_stats.
   Returns: nothing; what cannot be had is 0.
   Threads: any.
   Blocks:  never, except for the system calls.
   Owns:    nothing. */
SPDL_API void spdl_process_read(spdl_process_stats *stats);

/* The class of what holds the trainer, or requests, back. *stage, unless it is NULL, is the row, or
   -1 when it is no row.
   Returns: SPDL_LIMIT_NOT_KNOWN when the numbers do not decide.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API spdl_limit spdl_stats_limit(const spdl_stats *stats, int *stage);

/* Two sentences: how long the trainer waited, for which stage and why; and what to write. The
   numbers in it are those at which the next limit is reached, as far as times of calls tell. With a
   feed: how many requests made way, how soon the others were answered, and where most of that time
   went. One more if more than 5 % of the calls of a stage fail.
   Returns: the length of all sentences, as snprintf does; buffer holds what fits.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API int spdl_stats_verdict(const spdl_stats *stats, char *buffer, size_t bytes);

/* The verdict, a line about the run, and a table of at most 100 columns, ">" at what limits:
       conc tasks rate  its concurrency; calls that have ended, so many a second
       p50 .. max       how long a call takes; of a feed, how long from push to answer
       busy             share of the time that as many calls ran as can
       cpu runq block   where that went: on a processor ("-": not measured); ready, but others had
                        the processors; asleep (these two where they are over 5 %)
       ready            share of the time the next stage, or the trainer, had a result to take
       waits            share of the trainer's waits in which its item was here, in a call or
                        waiting for a worker: they add up to 100 %
   Below, a line for each stage with calls that failed or were retried, items skipped or freed.
   Returns: the length of the whole text, as snprintf does; buffer holds what fits.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API int spdl_stats_text(const spdl_stats *stats, char *buffer, size_t bytes);

/* The rows of a table as a drawing, one a line, before a pipeline is made of them or after: number,
   kind, name, and of the fields sizes, concurrency, threads and order where the row sets them. The
   rows of a path are indented. Nothing is checked: it is for tables that create refuses, too. Call
   it as spdl_rows_text(SPDL_STAGES(...), text, sizeof(text)), or with SPDL_TABLE(rows).
   Returns: the length of the whole text, as snprintf does; buffer holds what fits.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API int spdl_rows_text(const spdl_stage *stages, size_t stage_count, char *buffer,
                            size_t bytes);

/* One line without a newline: items, rate, the time left (`length`: how many items there will be;
   0: not known), and the share of time the trainer waited; with a feed the p99 from push to
   answer.
   Returns: the length of the whole text, as snprintf does; buffer holds what fits.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API int spdl_stats_progress(const spdl_stats *stats, uint64_t length, char *buffer,
                                 size_t bytes);

/* The struct as a JSON object: its fields by their names, "stages" and "edges" being arrays, with
   the "verdict", its "class" ("concurrency", "io", ...: the names of spdl_limit), the index of the
   stage that is the "limit" (or -1), and the "load" of each stage, from 0 to 1. Strings are valid
   UTF-8 whatever the names are.
   Returns: the length of the whole text, as snprintf does; buffer holds what fits.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API int spdl_stats_json(const spdl_stats *stats, char *buffer, size_t bytes);

/* ============================================================================================= */
/* >>report
   Statistics in regular intervals, from a thread that a pipeline has only when it is asked for: by
   the field `report` of its desc, or, in any program that uses the library, by the environment:

       SPDL_STATS=5                  a table on stderr every 5 s, and at the end
       SPDL_STATS=5,json=run.jsonl   and a JSON line of each interval
       SPDL_STATS=5,json=F,quiet     only those lines
       SPDL_STATS=live               redraws in place on a terminal, else a line per second
       SPDL_STATS=1,live             the same, with the interval
       SPDL_REPORT=run.html          a page with plots, written every 10 s and at the end

   A file name has no comma. Colours are for terminals, unless NO_COLOR is set. What cannot be done
   (a wrong value, a file that cannot be written, a full disk, a closed stderr) is one warning in
   the log of the pipeline, which goes on. It never waits for its reports: a stderr that takes
   nothing for 100 ms loses one. spdl_pipeline_destroy waits until the last one is written.

   Several pipelines. Each JSON line is appended in one piece, so that pipelines and processes may
   share a file. A page is for one: another pipeline of the process, or a process that runs at the
   same time, takes run-2.html and so on, up to 99. One draws in place on a terminal, the others
   write lines.

   JSON lines, schema "spdl.stats.1": an object for each interval. Later versions of the library may
   add fields; none changes its meaning under this name.
       schema     "spdl.stats.1"
       pipeline   the name in its desc
       pid, run   the process; when the pipeline was created (Unix time in ms): together, which one
       time       when the line was written (Unix time in s)
       final      whether this is the last line of the pipeline
       interval   what spdl_stats_json writes, of the time since the line before: counts and times
                  are differences, percentiles are of the calls that ended in it, max_ns is the end
                  of the largest one's bucket
       total      the same since the start
       process    the fields of spdl_process_stats, with cores_used and others_cores over the
                  interval */

#ifndef SPDL_NO_REPORT
/* Runs on the thread of the reports, at the end once more; `interval` is since the last call. Must
   not destroy the pipeline, which waits for it. */
typedef void (*spdl_report_fn)(const spdl_stats *interval, const spdl_stats *total, void *user);

/* All zero: no reports but those of the environment. */
typedef struct spdl_report_desc {
    double every;           /* seconds between reports, 0.01 to 1e7; default 5, live 1 */
    spdl_report_fn report_fn; /* is called with the numbers */
    void *user;
    bool table;             /* the table, on stderr */
    bool live;              /* the view that redraws in place, on stderr */
    const char *json;       /* file that JSON lines are appended to */
    const char *html;       /* file that the page is written to */
    uint64_t length;        /* items there will be, for the time that is left */
    bool ignore_environment;
} spdl_report_desc;

/* Writes the page of a pipeline now, over a file that is there: it loads nothing from elsewhere. It
   plots what was sampled for desc.report.html or SPDL_REPORT; else it has the numbers alone.
   Returns: SPDL_OK, SPDL_E_INVALID, SPDL_E_NOMEM, SPDL_E_IO.
   Threads: any.
   Blocks:  while the file is written.
   Owns:    nothing. */
SPDL_API spdl_result spdl_report_html(const spdl_pipeline *pipeline, const char *path);
#endif

/* ============================================================================================= */
/* >>trace
   What happened when, as a file for a viewer: Perfetto (ui.perfetto.dev) or chrome://tracing. A
   lane for each worker with its calls (stage, number of the item, result) and the batches it put;
   one for the trainer's waits in next; one for each edge, with the times its reader wanted an item
   and there was none ("empty") and the times a finished item had no place ("full"); and how many
   items an edge has whenever some were taken.

   desc.trace names the file. Where it is NULL the environment does: SPDL_TRACE=t.json, or
   SPDL_TRACE=t.json,events=N to set trace_events as well. With desc.trace "" there is none. Create
   claims the file, as that of a page (t-2.json), and destroy writes it. What goes wrong with it is
   one warning in the log, and the pipeline runs as it would without.

   Memory: (workers + 2 + edges) * trace_events * 32 bytes, allocated by create. Of each thread and
   edge the latest events are kept; log and file say how many were dropped. With trace_events set
   and no file the pipeline only records, for spdl_trace_write.

   Spans and counters of your own, by the functions below: parts of a call on the worker's lane, or
   parts of a step on the trainer's. Spans nest, 16 deep; deeper ones are left out. One that is open
   when the call returns, or the trainer's when the pipeline is destroyed, ends then; an end without
   a begin is nothing. Only the pointer to a name is kept, so names are string literals, or live as
   long as the pipeline; the file has their first 100 bytes. Each function takes some 30 ns where a
   trace is recorded, and 1 where none is. Copies to a device: spdl_cuda_trace.

   Debuggers and profilers: the workers have names. Where the implementation is compiled with
   <sys/sdt.h>, it has probes for perf and bpftrace: spdl:task_begin and spdl:task_end (stage,
   item), spdl:next_wait_begin and spdl:next_wait_end (last stage, items delivered). */

/* Begins a span of this call, inside of those that are open.
   Returns: nothing.
   Threads: a stage; outside of the call, or on another thread, a line in the log.
   Blocks:  never.
   Owns:    `name` stays where it is until the pipeline is destroyed. */
SPDL_API void spdl_trace_begin(spdl_task *task, const char *name);

/* Ends the span of this call that was begun last.
   Returns: nothing.
   Threads: a stage, as spdl_trace_begin.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API void spdl_trace_end(spdl_task *task);

/* Records the value that a counter has now, for a plot over time; one that is not finite is left
   out. There is one counter of each name.
   Returns: nothing.
   Threads: a stage, as spdl_trace_begin.
   Blocks:  never.
   Owns:    as spdl_trace_begin. */
SPDL_API void spdl_trace_counter(spdl_task *task, const char *name, double value);

/* Begins a span of the trainer, around what it does, its calls of next included.
   Returns: nothing.
   Threads: the trainer.
   Blocks:  never.
   Owns:    as spdl_trace_begin. */
SPDL_API void spdl_pipeline_trace_begin(spdl_pipeline *pipeline, const char *name);

/* Ends the span of the trainer that was begun last.
   Returns: nothing.
   Threads: the trainer.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API void spdl_pipeline_trace_end(spdl_pipeline *pipeline);

/* As spdl_trace_counter: the loss, for one.
   Returns: nothing.
   Threads: the trainer.
   Blocks:  never.
   Owns:    as spdl_trace_begin. */
SPDL_API void spdl_pipeline_trace_counter(spdl_pipeline *pipeline, const char *name, double value);

#ifndef SPDL_NO_REPORT
/* Writes what is recorded now to a file, which is created or replaced, while the pipeline runs or
   not.
   Returns: SPDL_OK, SPDL_E_INVALID (nothing is recorded), SPDL_E_NOMEM, SPDL_E_IO. Why is logged.
   Threads: any; not while the pipeline is destroyed.
   Blocks:  while the file is written.
   Owns:    nothing is kept; memory for a copy of the events is taken and given back. */
SPDL_API spdl_result spdl_trace_write(const spdl_pipeline *pipeline, const char *path);
#endif

/* ============================================================================================= */
/* >>cache
   An iterator that stands before anything with a next function, such as a pipeline. It hands on the
   source's items, keeps the first num_caches of them, and after return_caches_after items forgets
   the source and hands out the kept ones, over and over. A trainer that runs on it runs as if
   loading cost nothing. (What it would gain >>headspace measures.) All of it runs in the owner's
   thread. */

typedef struct spdl_cache_desc {
    spdl_next_fn next;
    void *source;                 /* its first argument */
    uint64_t num_caches;          /* at least 1 */
    uint64_t return_caches_after; /* default num_caches, and at least that */
    uint64_t stop_after;          /* end after so many items in all; 0: never */
    void (*delete_source)(void *source); /* optional: called once, when the source is done with */
    spdl_free_fn free_item;       /* destroys an item of the source */
    spdl_copy_fn copy_item;       /* optional: see spdl_cache_next */
    spdl_allocator allocator;
    spdl_error *error; /* optional: says why create failed */
} spdl_cache_desc;

typedef struct spdl_cache spdl_cache;

/* Makes a caching iterator.
   Returns: SPDL_OK, SPDL_E_INVALID (no next function, num_caches 0, return_caches_after less than
            num_caches, stop_after set and less than return_caches_after), SPDL_E_NOMEM.
   Threads: any.
   Blocks:  never.
   Owns:    the caller destroys *cache, and keeps the source unless delete_source is set. */
SPDL_API spdl_result spdl_cache_create(spdl_cache **cache, const spdl_cache_desc *desc);

/* Frees the kept items, and calls delete_source unless it was called already.
   Returns: nothing; NULL is allowed.
   Threads: owner.
   Blocks:  as delete_source does.
   Owns:    everything the cache held is freed. */
SPDL_API void spdl_cache_destroy(spdl_cache *cache);

/* The next item. A source that ends before return_caches_after items is replaced by the cache at
   once; one that ends without an item ends the cache too.
   Returns: SPDL_OK, SPDL_END (stop_after reached, or an empty source), SPDL_E_NOMEM (copy_item), or
            what the source returned. After a timeout or an error the call can be repeated; nothing
            is lost.
   Threads: owner.
   Blocks:  as the source does; never once the cache is used.
   Owns:    without copy_item the item stays the cache's: valid until the next call if it was not
            kept, until destroy if it was, and must not be changed. With copy_item each item handed
            out is the caller's own. */
SPDL_API spdl_result spdl_cache_next(spdl_cache *cache, void **item, int64_t timeout_ns);

/* Whether items come from the cache now.
   Returns: true once the source is no longer used.
   Threads: owner.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API bool spdl_cache_warm(const spdl_cache *cache);

/* spdl_pipeline_next with the type of spdl_cache_desc.next; the source is the spdl_pipeline.
   Returns: as spdl_pipeline_next.
   Threads: one at a time.
   Blocks:  as spdl_pipeline_next.
   Owns:    as spdl_pipeline_next. */
SPDL_API spdl_result spdl_pipeline_next_fn(void *pipeline, void **item, int64_t timeout_ns);

/* spdl_cache_next with the same type, so that one training loop runs on either.
   Returns: as spdl_cache_next.
   Threads: owner.
   Blocks:  as spdl_cache_next.
   Owns:    as spdl_cache_next. */
SPDL_API spdl_result spdl_cache_next_fn(void *cache, void **item, int64_t timeout_ns);

/* ============================================================================================= */
/* >>headspace
   What loading costs a training loop, whatever loads: one call that runs the loop for some seconds
   and answers in a sentence. Windows of the loop as it is take turns with windows of the same steps
   on items that were kept, in which nothing is loaded: the source is not asked, its workers fill
   their buffers and rest. What a loop would gain is called headspace. It has two parts: the loop
   waits for items, and the step itself is slower beside those who load (harm), which no figure of
   the loader shows.

   The steps are real ones: a model is trained on items that come again and again, while others are
   taken and dropped, so the results of training are void: measure before a run, or on a copy.

   A loader that takes longer than a window to fill its buffers works on while the loop is on kept
   items: its harm is then understated. */

/* How many times as large one thing is as another, measured in rounds that each have both. low and
   high hold the true ratio in 95 of 100 such measurements, whatever the noise looks like; when
   several were made to choose among, all of them together do. An interval that holds 1 is no
   difference. With too few rounds (under 6; 8 for four comparisons, 10 for 18) it is from 0 to
   infinity. */
typedef struct spdl_interval {
    double value; /* the median of the rounds' ratios; 0 without a round */
    double low, high;
    int rounds;
    bool known; /* there were rounds enough */
} spdl_interval;

/* One step of a training loop; borrows the item. */
typedef void (*spdl_step_fn)(void *ctx, void *item);

typedef struct spdl_headspace_desc {
    spdl_next_fn next; /* after SPDL_END it is asked once more: there may be another epoch */
    void *source;      /* its first argument */
    spdl_step_fn step; /* returns when all is done, on a device, too */
    void *ctx;         /* its first argument */
    spdl_free_fn free_item; /* destroys an item of the source */
    uint64_t run_steps; /* steps of the whole run, for the hours it would save; 0: not known */
    double seconds;     /* how long to measure, 0.1 to 86400; default 10 */
    int kept;           /* items the steps without loading go around on; default 32 */
    spdl_logger logger; /* each round is an SPDL_LOG_INFO */
    spdl_allocator allocator;
    spdl_error *error;  /* optional: says why it failed */
} spdl_headspace_desc;

typedef enum spdl_headspace_kind {
    SPDL_HEADSPACE_GAIN,   /* loading costs something */
    SPDL_HEADSPACE_NONE,   /* no difference */
    SPDL_HEADSPACE_FEW,    /* too few rounds to say */
    SPDL_HEADSPACE_FOREIGN /* too few, as others used the processors in some */
} spdl_headspace_kind;

typedef struct spdl_headspace_round {
    double today, ceiling; /* steps per second as it is, and on kept items */
    double waiting;        /* share of the time in next, as it is */
    double queued;         /* share of the time the caller was ready to run while others had the
                              processors, as it is, less the same on kept items (Linux) */
    double others;         /* processors that other programs used, unless one was idle all the time
                              (Linux) */
    bool dropped;          /* more than 0.15: it does not count */
} spdl_headspace_round;

#define SPDL_HEADSPACE_ROUNDS 64

typedef struct spdl_headspace_report {
    spdl_headspace_kind kind;
    double today, ceiling; /* these and the next two are medians of the rounds that count */
    double waiting, queued;
    spdl_interval gain; /* ceiling / today: so many times as many steps if loading cost nothing */
    spdl_interval harm; /* a step takes so many times as long beside those who load */
    double more_seconds; /* FEW: what `seconds` would probably do; 0 if more would not help */
    uint64_t items;      /* taken from the source */
    bool ended;          /* the source has, before the time was over */
    int rounds, dropped; /* all rounds; those of them that do not count */
    spdl_headspace_round round[SPDL_HEADSPACE_ROUNDS];
    char text[SPDL_TEXT_BYTES]; /* such as "Loading costs 17 % of a step (15 to 19), 2.1 h of this
                                   12 h run: harm 16.7, waiting 0.3." */
} spdl_headspace_report;

/* Measures the headspace of a loop. A window is 300 ms (a 32nd of `seconds` if that is shorter, but
   50 at least) and 8 steps or more; a round has one of each kind, in random order. What was loaded
   while the source was not asked is taken and dropped before the loop goes on as it is. Six rounds
   of steps of 100 ms take some 15 s.
   Returns: SPDL_OK, with whatever there is to say in *report; SPDL_E_INVALID, SPDL_E_NOMEM; or what
            next returned, if that was neither SPDL_OK nor SPDL_END: *report has the rounds so far.
   Threads: owner of the source; step is called here.
   Blocks:  for about `seconds`, and as long as a call of next or step does.
   Owns:    the source stays the caller's; each item taken is given to free_item before it returns.
 */
SPDL_API spdl_result spdl_headspace(const spdl_headspace_desc *desc, spdl_headspace_report *report);

/* ============================================================================================= */
/* >>doctor
   Finds which stage holds a trainer back by experiments on the running pipeline, says what there is
   to gain and what to write. What it may change it tries, and takes back if it does not help.
   In any program, without a change to it, by the environment:

       SPDL_DOCTOR=1                 for 10 s from the first item on; the report goes to stderr
       SPDL_DOCTOR=20                for 20 s
       SPDL_DOCTOR=1,json=d.json     the report as JSON as well; html=d.html: as a page
       SPDL_DOCTOR=1,replay          also repeats items that were kept, see below: what the trainer
                                     learns in this run is void
       SPDL_DOCTOR=1,raise           may change the concurrency of every stage that does not say
                                     .max_concurrency = 1, and try one more worker: spdl_worker may
                                     be as large as desc.workers then. Without it only stages whose
                                     .max_concurrency says more than .concurrency are changed. With
                                     fewer calls at a time, calls that wait for each other hang
       SPDL_DOCTOR=30,cold           also how it is with files that are not in memory, see below
       SPDL_DOCTOR=1,steps=100000    the steps of the whole run: to say how many hours there are to
                                     gain

   What it does, in next, on the thread of the trainer. It observes for a tenth of the time. Then it
   runs short windows, in an order drawn by lot, in which one thing is different, and compares each
   with windows of the same round in which nothing is:
   - everything up to a row is replayed: its results are items that were kept, nothing above it is
     called. That needs .copy_item on the row (buffers of spdl_buffer are copied without), or
     .const_input on the row after it; and `replay`, as the trainer gets items more than once.
   - else each call of the row takes a known time longer, once computing, once asleep. How far
     throughput follows says how much the program hangs on the row, and on which resource.
   Then the changes that promise most are compared with things as they are, and the best is kept if
   it helps. Delays change no item: without `replay` a trainer gets what it would get
   without the doctor. Statistics of the run include what the experiments did. Meanwhile .autotune
   rests, and what spdl_pipeline_set_concurrency sets does not last.

   What it prints. Ratios are of throughput, with 95 % intervals that hold for all comparisons of a
   phase. A gain is claimed if the interval of its trial is above 1, or in fewer rounds if the model
   (service demands of the rows, processors, threads, the trainer's step) says the same; what the
   model gives stands beside it, where it fits what is measured. Else "not known", "too few rounds",
   "other programs had the processors" or "no difference" is the answer. Not known to it: what
   happens with other data.

   Nor, without `cold`, with files that are not in the page cache, where reading looks free: a first
   epoch, or data larger than memory. With it (Linux) the last windows begin with files taken out of
   that cache, and are compared with some just before: the files it saw open to be read, or mapped
   to be shared, while it observed, and those beside them with the same ending, as far as 0.2 s
   go. What the system has read from disks meanwhile says whether they were cold; if not, it is not
   known. They stay cold, so this comes last, and takes a third of the time or more.

   Every pipeline of the process has its doctor, and those that run at the same time disturb each
   other. What is kept for replay, up to 32 items of each row and 256 MiB of those whose size is
   known, is freed with the pipeline. A process that ends without spdl_pipeline_destroy before the
   time is over prints nothing. */

typedef enum spdl_doctor_outcome {
    SPDL_DOCTOR_RUNNING,   /* not done yet */
    SPDL_DOCTOR_LIMIT,     /* `limit` and `stage` say what holds the trainer back */
    SPDL_DOCTOR_NOTHING,   /* there is nothing to gain */
    SPDL_DOCTOR_FEW,       /* too few rounds: the items ended, or it needs more seconds */
    SPDL_DOCTOR_FOREIGN,   /* other programs had the processors in too many rounds */
    SPDL_DOCTOR_BURSTY,    /* windows differ too much by themselves */
    SPDL_DOCTOR_DISAGREE   /* two methods name different rows, or the model does not fit */
} spdl_doctor_outcome;

typedef enum spdl_doctor_method {
    SPDL_DOCTOR_NO_METHOD, /* it calls nothing, is hardly busy, deferred, or one row too many */
    SPDL_DOCTOR_REPLAYED,
    SPDL_DOCTOR_SLOWED
} spdl_doctor_method;

typedef enum spdl_doctor_change {
    SPDL_DOCTOR_CONCURRENCY,
    SPDL_DOCTOR_WORKERS,
    SPDL_DOCTOR_BUFFER, /* of SPDL_SINK */
    SPDL_DOCTOR_POLITE  /* .policy of the workers: 1 is .sched = SPDL_SCHED_BATCH, 2 .polite */
} spdl_doctor_change;

/* One row. Intervals are of throughput, compared with the rows as they are: 1.2 is 20 % more. */
typedef struct spdl_doctor_row {
    char name[SPDL_NAME_BYTES];
    spdl_kind kind;
    int concurrency;
    bool may_raise;        /* its concurrency may be raised: it is 2 or more, or the row says so */
    spdl_doctor_method method;
    double visits;         /* calls for each item of the trainer */
    double mean_ns, cpu_ns, runnable_ns, blocked_ns; /* of one call; the first is the sum */
    double load;           /* share of the time that as many calls ran as can */
    double most;           /* items/s that it allows, were nothing else a limit */
    double twice;          /* throughput if its calls took half as long; 0: not known, as the model
                              and the windows differ, or calls wait for each other */
    spdl_interval replayed; /* everything up to this row replayed */
    spdl_interval computing, asleep; /* each call took delay_ns longer */
    double delay_ns;
} spdl_doctor_row;

/* A change that was tried. */
typedef struct spdl_doctor_trial {
    spdl_doctor_change change;
    int stage;             /* the row, or -1 */
    int from, to;
    double predicted;      /* by the model; 0: it does not fit what is measured */
    spdl_interval measured;
    bool kept;
} spdl_doctor_trial;

#define SPDL_DOCTOR_ARMS 16
#define SPDL_DOCTOR_ROUNDS 64
#define SPDL_DOCTOR_TRIALS 4

/* A kind of window: what was different, and items/s in each round; 0: the round was dropped. */
typedef struct spdl_doctor_arm {
    char name[24];         /* "as it is", "same again", "after decode", "decode +20 %" ... */
    int stage;             /* or -1 */
    bool confirming;       /* of the second phase */
    int rounds;
    float rate[SPDL_DOCTOR_ROUNDS];
} spdl_doctor_arm;

/* Plain data without pointers. */
typedef struct spdl_doctor_report {
    char name[SPDL_NAME_BYTES]; /* of the pipeline */
    spdl_doctor_outcome outcome;
    spdl_limit limit;      /* the class, see spdl_stats_limit */
    int stage;             /* the row, or -1 */
    spdl_limit next_limit; /* what the model names when that is no limit any more, its row or -1, */
    int next_stage;        /* and the items/s that it allows */
    double next_rate;
    double seconds;        /* that it took */
    int workers;
    double cores, cores_used, others_used; /* processors: allowed, used by us, by others */
    double step_ns, step_cpu_ns; /* of the trainer, and the processor time in it */
    double today;          /* items/s as it is */
    double model;          /* items/s that the model gives for that */
    double ceiling;        /* items/s if loading cost nothing: of the trainer alone */
    double waiting;        /* share of the time that the trainer waited */
    double harm;           /* share of the step in which it waited for a processor */
    double hours, hours_less; /* of the whole run, and less if loading cost nothing; 0: not known */
    bool replays;          /* items were given out more than once */
    spdl_interval same;    /* nothing against nothing: as far off 1 as chance goes */
    double noise;          /* by how much two windows of a round differ that should not: median */
    spdl_interval cached;  /* spdl_doctor_run with replay: the trainer on items it has */
    spdl_interval trainer_asleep; /* each step 20 % longer, asleep */
    bool cools;            /* with `cold`: */
    int cold_files;        /* taken out of the page cache; 0: none was seen */
    double cold_bytes;     /* their sizes */
    spdl_interval cold;    /* throughput then */
    double from_cache, cold_from_cache; /* share of the bytes read that were in the page cache: as
                              it is, and then; -1: not known, or less than 1 MiB was read */
    int rounds, dropped;   /* rounds of windows; of them not used, as others had processors */
    int row_count, trial_count, arm_count;
    spdl_doctor_row row[SPDL_MAX_STAGES];
    spdl_doctor_trial trial[SPDL_DOCTOR_TRIALS];
    spdl_doctor_arm arm[2 * SPDL_DOCTOR_ARMS];
    char verdict[512];     /* what holds it back and why; what to write, with the figure measured */
} spdl_doctor_report;

/* What SPDL_DOCTOR says, as the field `doctor` of spdl_pipeline_desc. */
typedef struct spdl_doctor_desc {
    double seconds;        /* it takes; default 10 */
    bool replay, raise, cold;
    bool quiet;            /* nothing goes to stderr */
    uint64_t run_steps;    /* 0: not known */
    const char *json, *html; /* files, or NULL */
} spdl_doctor_desc;

#ifndef SPDL_NO_REPORT
/* The report of a pipeline that was created with a doctor.
   Returns: SPDL_OK; SPDL_TIMEOUT: it is not done yet, `report` is what is known; SPDL_E_NOT_FOUND:
            it has none.
   Threads: the trainer.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API spdl_result spdl_pipeline_doctor(const spdl_pipeline *pipeline,
                                          spdl_doctor_report *report);

/* Runs a training loop until the doctor is done: takes items, calls `step` with each, and frees
   them as the pipeline would. Starts over with spdl_pipeline_rewind when the items end.
   Returns: SPDL_OK; SPDL_E_INVALID when the pipeline has no doctor; how the pipeline ended, if not
            with SPDL_END.
   Threads: the trainer.
   Blocks:  for as long as the doctor takes.
   Owns:    `step` borrows the item. */
SPDL_API spdl_result spdl_doctor_run(spdl_pipeline *pipeline, spdl_step_fn step, void *ctx,
                                     spdl_doctor_report *report);

/* The report for a terminal of 80 columns.
   Returns: the length of the whole text, as snprintf does; buffer holds what fits.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API int spdl_doctor_text(const spdl_doctor_report *report, char *buffer, size_t bytes);

/* The report as a JSON object, "schema" being "spdl.doctor.1": the fields of the structs by their
   names, the raw rounds among them. What is not known, as the interval of too few rounds, is null.
   Returns: as spdl_doctor_text.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API int spdl_doctor_json(const spdl_doctor_report *report, char *buffer, size_t bytes);

/* The report as a page that loads nothing: the ladder, the changes that were tried, every round.
   Returns: as spdl_doctor_text.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API int spdl_doctor_html(const spdl_doctor_report *report, char *buffer, size_t bytes);
#endif

/* ============================================================================================= */
/* >>npz
   Arrays as NumPy writes them: .npy (1.0, 2.0, 3.0) and .npz (stored or deflated members, ZIP64),
   read and written. Every length is compared with the bytes that are there before it is used or
   allocated for, every product is checked. Several threads may read an archive at the same time. A
   .npy file is an archive of one array named "arr_0". Any `desc` and any `error` may be NULL.

   What a file costs. One of at most 256 KB is read when it is opened, and closed. Of a larger one
   only the directory is read; the file stays open, reading copies straight to the caller's memory,
   and the first view of a stored array maps the file. The library itself never touches the mapping:
   when a file is truncated meanwhile, reading fails with SPDL_E_IO, and only looking at bytes of a
   view that are gone raises SIGBUS. (What a program maps itself, it can read by
   spdl_npz_open_memory, which copies nothing.)

   CRC-32. Reading verifies it in the same pass; a view does not, so that it costs nothing. Either
   can be changed by desc.verify; spdl_npz_check verifies on demand, spdl_npz_stat reports what is
   known so far. A .npy file has none, and a range of rows is not verified. */

#ifndef SPDL_NO_NPZ

#define SPDL_NPY_MAX_DIMS 64

typedef struct spdl_npy_info {
    char kind;             /* as NumPy's dtype.kind: b i u f c S U V M m; 'V' if structured */
    char byte_order;       /* '<', '>', or '|' where it does not matter or is that of each field */
    bool fortran_order;    /* column-major: the first index varies fastest */
    bool structured;       /* the elements are structs, whose fields descr lists */
    int version;           /* of the header: 1, 2 or 3 */
    int ndim;              /* 0 to SPDL_NPY_MAX_DIMS */
    uint64_t itemsize;     /* bytes of one element */
    uint64_t shape[SPDL_NPY_MAX_DIMS];
    uint64_t count;        /* elements: the product of shape, 1 for ndim 0 */
    uint64_t bytes;        /* count * itemsize */
    uint64_t header_bytes; /* before the data */
    char descr[256];       /* as in the header, "<f4" or "[('x', '<f4'), ...]"; cut if longer */
} spdl_npy_info;

typedef enum spdl_npz_verify {
    SPDL_NPZ_VERIFY_READS, /* what is read as a whole */
    SPDL_NPZ_VERIFY_ALL,   /* views as well, when they are made */
    SPDL_NPZ_VERIFY_NONE
} spdl_npz_verify;

/* What reading changes, added up; spdl_npz_info reports the array as it is read. */
#define SPDL_NPZ_NATIVE_BYTES 1u /* the byte order of this machine; not in structured arrays */
#define SPDL_NPZ_C_ORDER 2u      /* row-major: the last index varies fastest */

typedef struct spdl_npz_desc {
    uint64_t max_bytes;        /* refuse an array, or what follows it, over this; default 2^40 */
    uint64_t max_members;      /* refuse an archive of more; default 2^20 */
    uint64_t max_header_bytes; /* refuse an array whose header is longer; default 65536 */
    uint64_t max_ratio;        /* refuse a member that grows more when inflated; default 1032 */
    spdl_npz_verify verify;
    unsigned convert;          /* SPDL_NPZ_NATIVE_BYTES and SPDL_NPZ_C_ORDER; default neither */
    spdl_allocator allocator;
    spdl_error *error;         /* optional: why open failed */
} spdl_npz_desc;

typedef struct spdl_npz spdl_npz;

/* Opens an .npz or .npy file and reads its directory.
   Returns: SPDL_OK, SPDL_E_INVALID, SPDL_E_IO, SPDL_E_FORMAT, SPDL_E_UNSUPPORTED, SPDL_E_LIMIT,
            SPDL_E_NOMEM; desc->error says which file, member and byte.
   Threads: any.
   Blocks:  on the file system.
   Owns:    the caller closes *npz; on failure *npz is NULL. */
SPDL_API spdl_result spdl_npz_open_file(spdl_npz **npz, const char *path,
                                        const spdl_npz_desc *desc);

/* The same for an open file, whose position is neither used nor moved. `name` is used in messages.
   Returns: as spdl_npz_open_file.
   Threads: any.
   Blocks:  on the file system.
   Owns:    the caller closes *npz, and `fd` when it likes: the archive has a duplicate. */
SPDL_API spdl_result spdl_npz_open_fd(spdl_npz **npz, int fd, const char *name,
                                      const spdl_npz_desc *desc);

/* The same from memory, which must stay unchanged until close. `name` is used in messages.
   Returns: as spdl_npz_open_file, but never SPDL_E_IO.
   Threads: any.
   Blocks:  never.
   Owns:    the caller closes *npz and keeps `data`. */
SPDL_API spdl_result spdl_npz_open_memory(spdl_npz **npz, const void *data, size_t bytes,
                                          const char *name, const spdl_npz_desc *desc);

/* Closes the archive. Views of it end.
   Returns: nothing; NULL is allowed.
   Threads: owner; no other call on it may be running.
   Blocks:  never.
   Owns:    the archive is freed. */
SPDL_API void spdl_npz_close(spdl_npz *npz);

/* How many arrays there are. Of several with one name only the last counts, as in NumPy.
   Returns: the number of arrays.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API size_t spdl_npz_count(const spdl_npz *npz);

/* The name of array `index`, without ".npy".
   Returns: a string, or NULL when there is no such array.
   Threads: any.
   Blocks:  never.
   Owns:    the archive; valid until close. */
SPDL_API const char *spdl_npz_name(const spdl_npz *npz, size_t index);

/* Finds an array by name, with or without ".npy". index may be NULL.
   Returns: SPDL_OK with *index, SPDL_E_NOT_FOUND.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API spdl_result spdl_npz_find(const spdl_npz *npz, const char *name, size_t *index);

/* What is known of a CRC-32. */
typedef enum spdl_npz_crc {
    SPDL_NPZ_CRC_NONE,      /* a .npy file has none */
    SPDL_NPZ_CRC_UNCHECKED, /* not read or checked so far */
    SPDL_NPZ_CRC_GOOD,
    SPDL_NPZ_CRC_BAD
} spdl_npz_crc;

/* What the directory says of a member. */
typedef struct spdl_npz_member {
    bool stored;            /* not deflated: spdl_npz_view can work */
    uint64_t bytes;         /* the array with its header, inflated */
    uint64_t file_bytes;    /* what it takes in the file */
    uint64_t file_offset;   /* of its local header; 0 for .npy */
    uint32_t crc;           /* 0 for .npy */
    spdl_npz_crc crc_state; /* from all reads and checks so far, on any thread */
    uint32_t duplicates;    /* members of the same name before it, which cannot be read */
} spdl_npz_member;

/* Describes the member of array `index` without looking at it.
   Returns: SPDL_OK, SPDL_E_NOT_FOUND.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API spdl_result spdl_npz_stat(const spdl_npz *npz, size_t index, spdl_npz_member *member);

/* Type, shape and order of array `index`; of a deflated member only the head is inflated.
   Returns: SPDL_OK, SPDL_E_NOT_FOUND, SPDL_E_IO, SPDL_E_FORMAT, SPDL_E_UNSUPPORTED, SPDL_E_LIMIT,
            SPDL_E_NOMEM, SPDL_E_INVALID (info is NULL).
   Threads: any.
   Blocks:  on the file system, when the file is over 256 KB.
   Owns:    nothing. */
SPDL_API spdl_result spdl_npz_info(const spdl_npz *npz, size_t index, spdl_npy_info *info,
                                   spdl_error *error);

/* Copies the data of array `index`, info.bytes of them, to `data` (`bytes` large), changed only as
   desc.convert says.
   Returns: as spdl_npz_info, SPDL_E_CHECKSUM, SPDL_E_INVALID (`bytes` too small, or data NULL).
   Threads: any.
   Blocks:  as spdl_npz_info.
   Owns:    the caller has `data`; after a failure its content is undefined. */
SPDL_API spdl_result spdl_npz_read(const spdl_npz *npz, size_t index, void *data, size_t bytes,
                                   spdl_error *error);

/* Copies the rows `first` to `first + count - 1` of a stored array: the elements with these first
   indices, each bytes / shape[0] large. Nothing else is read, so the CRC is not verified.
   Returns: as spdl_npz_read; SPDL_E_UNSUPPORTED for a deflated or a Fortran-ordered array,
            SPDL_E_INVALID for rows that are not there.
   Threads: any.
   Blocks:  as spdl_npz_info.
   Owns:    as spdl_npz_read. */
SPDL_API spdl_result spdl_npz_read_rows(const spdl_npz *npz, size_t index, uint64_t first,
                                        uint64_t count, void *data, size_t bytes,
                                        spdl_error *error);

/* One array of many to read. */
typedef struct spdl_npz_request {
    size_t index;
    void *data;         /* `bytes` large */
    size_t bytes;
    spdl_result result; /* written by spdl_npz_read_many: as spdl_npz_read */
} spdl_npz_request;

/* Reads many arrays, faster than one call for each: deflated ones are decoded two at a time, and
   with a pool its workers help. A worker that comes too late to help frees what was shared, perhaps
   after close: an allocator of the archive must outlive the pool, or spdl_pool_drain of it. pool
   may be NULL.
   Returns: SPDL_OK, or the result of the first request that failed, which `error` describes; the
            others are read all the same. SPDL_E_NOMEM, SPDL_E_INVALID.
   Threads: any, also a worker of the pool.
   Blocks:  until all are read.
   Owns:    as spdl_npz_read. Requests must not share memory. */
SPDL_API spdl_result spdl_npz_read_many(const spdl_npz *npz, spdl_npz_request *requests,
                                        size_t count, spdl_pool *pool, spdl_error *error);

/* The data of a stored array without a copy. NumPy's own files are not aligned in an .npz: look at
   *aligned (to 64 bytes) before using it as anything but bytes; spdl.h writes aligned ones.
   Returns: as spdl_npz_info; SPDL_E_UNSUPPORTED for a deflated array, and one that desc.convert
            would change; SPDL_E_CHECKSUM with SPDL_NPZ_VERIFY_ALL.
   Threads: any.
   Blocks:  as spdl_npz_info.
   Owns:    the archive; valid until close. A file over 256 KB is mapped, see above. */
SPDL_API spdl_result spdl_npz_view(const spdl_npz *npz, size_t index, const void **data,
                                   bool *aligned, spdl_error *error);

/* Verifies the CRC-32 of array `index` whatever desc.verify says. A .npy file has none.
   Returns: as spdl_npz_info, or SPDL_E_CHECKSUM.
   Threads: any.
   Blocks:  as spdl_npz_info.
   Owns:    nothing. */
SPDL_API spdl_result spdl_npz_check(const spdl_npz *npz, size_t index, spdl_error *error);

/* Reads the header of a .npy file in memory; allocates nothing.
   Returns: as spdl_npz_info.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. The data are at info->header_bytes. */
SPDL_API spdl_result spdl_npy_parse(const void *data, size_t bytes, spdl_npy_info *info,
                                    spdl_error *error);

/* Loading whole files: all arrays of one, in one allocation. */
typedef struct spdl_npz_array {
    const char *name;
    void *data; /* aligned to 64 bytes */
    spdl_npy_info info;
} spdl_npz_array;

typedef struct spdl_npz_bundle {
    spdl_npz_array *arrays;
    size_t count;
    size_t bytes; /* of the whole allocation */
    spdl_allocator allocator;
} spdl_npz_bundle;

/* Reads all arrays of a file. desc->max_bytes bounds their sum.
   Returns: as spdl_npz_open_file and spdl_npz_read.
   Threads: any.
   Blocks:  on the file system.
   Owns:    the caller frees *bundle; on failure it is NULL. */
SPDL_API spdl_result spdl_npz_load(spdl_npz_bundle **bundle, const char *path,
                                   const spdl_npz_desc *desc);

/* The array of this name, with or without ".npy".
   Returns: the array, or NULL.
   Threads: any.
   Blocks:  never.
   Owns:    the bundle. */
SPDL_API spdl_npz_array *spdl_npz_bundle_find(const spdl_npz_bundle *bundle, const char *name);

/* Frees a bundle with all its arrays.
   Returns: nothing; NULL is allowed. Fits free_item.
   Threads: any.
   Blocks:  never.
   Owns:    the bundle is gone. */
SPDL_API void spdl_npz_bundle_free(void *bundle);

/* A row of a pipeline that loads files: it takes a path (char, a C string) and makes a
   spdl_npz_bundle, as spdl_npz_load does; its free_item is spdl_npz_bundle_free.
       SPDL_NPZ(NULL, .concurrency = 4)
   The first argument may be the address of a spdl_npz_desc, which must outlive the pipeline, and
   whose error is not used. Before C++20: SPDL_NPZ(NULL).with_concurrency(4). */
/* clang-format off */
#define SPDL_NPZ(...) SPDL__NPZ_ROW(__VA_ARGS__, SPDL__LINE)
#if !defined(__cplusplus)
#define SPDL__NPZ_ROW(desc_, ...)                                                                  \
    { .kind = SPDL_KIND_PIPE, .fn = &spdl_npz_load_spdl, .file = __FILE__,                         \
      .ctx = SPDL__UNCONST((const spdl_npz_desc *)(desc_)), .free_item = spdl_npz_bundle_free,     \
      __VA_ARGS__ }
#elif __cplusplus >= 202002L
#define SPDL__NPZ_ROW(desc_, ...)                                                                  \
    spdl__npz_row(spdl_stage{ .kind = SPDL_KIND_PIPE, .fn = &spdl_npz_load_spdl,                   \
                              .file = __FILE__, __VA_ARGS__ }, desc_)
#else
#define SPDL__NPZ_ROW(desc_, ...)                                                                  \
    spdl__npz_row(spdl__row(SPDL_KIND_PIPE, &spdl_npz_load_spdl, __FILE__,                         \
                            SPDL__ROW_LINE(#__VA_ARGS__), 0, NULL), desc_)
#endif
/* clang-format on */

#if !defined(SPDL_STATIC)
SPDL_API const spdl_function spdl_npz_load_spdl;
#elif !defined(__cplusplus)
SPDL__UNUSED static const spdl_function spdl_npz_load_spdl;
#endif

/* Writing. The arrays go to a file beside `path`, which takes its place when everything is written:
   a program that opens `path` sees the old file or the whole new one. Members are stored, not
   compressed, and their data aligned, so that they can be viewed; NumPy reads them. Up to some ten
   thousand arrays cost the same each; more should have names that count up (see >>write-impl). */
typedef struct spdl_npz_write_desc {
    bool npy;          /* a .npy file, of exactly one array */
    bool sync;         /* have it on the disk before it takes its place */
    size_t align;      /* of the data in the file, a power of two up to 32768; default 64 */
    spdl_allocator allocator;
    spdl_error *error; /* optional: why create failed */
} spdl_npz_write_desc;

typedef struct spdl_npz_writer spdl_npz_writer;

/* Begins a file.
   Returns: SPDL_OK, SPDL_E_INVALID, SPDL_E_IO, SPDL_E_NOMEM.
   Threads: any.
   Blocks:  on the file system.
   Owns:    the caller closes *writer; on failure it is NULL. */
SPDL_API spdl_result spdl_npz_create(spdl_npz_writer **writer, const char *path,
                                     const spdl_npz_write_desc *desc);

/* Writes an array. Of info count: shape, ndim, fortran_order, and the type: descr, or if that is
   empty kind, itemsize and byte_order (0: this machine's). The name is given without ".npy".
   Returns: SPDL_OK, SPDL_E_INVALID (also for a name that was there), SPDL_E_UNSUPPORTED (objects),
            SPDL_E_LIMIT, SPDL_E_IO, SPDL_E_NOMEM; after the last two it can only be closed.
   Threads: owner.
   Blocks:  on the file system.
   Owns:    `data`, of info's bytes, stay the caller's. */
SPDL_API spdl_result spdl_npz_write(spdl_npz_writer *writer, const char *name,
                                    const spdl_npy_info *info, const void *data,
                                    spdl_error *error);

/* Begins an array whose data come in pieces, by spdl_npz_append; the next array or finish ends it.
   Returns: as spdl_npz_write.
   Threads: owner.
   Blocks:  on the file system.
   Owns:    nothing. */
SPDL_API spdl_result spdl_npz_begin(spdl_npz_writer *writer, const char *name,
                                    const spdl_npy_info *info, spdl_error *error);

/* Writes the next `bytes` bytes of the array that was begun.
   Returns: as spdl_npz_write; SPDL_E_INVALID when it gets more than its shape says.
   Threads: owner.
   Blocks:  on the file system.
   Owns:    `data` stay the caller's. */
SPDL_API spdl_result spdl_npz_append(spdl_npz_writer *writer, const void *data, size_t bytes,
                                     spdl_error *error);

/* Writes the directory and puts the file in its place.
   Returns: as spdl_npz_write; SPDL_E_INVALID when an array lacks data.
   Threads: owner.
   Blocks:  on the file system.
   Owns:    as before: the caller closes the writer. */
SPDL_API spdl_result spdl_npz_finish(spdl_npz_writer *writer, spdl_error *error);

/* Frees the writer. Without a finish that succeeded nothing of the file remains.
   Returns: nothing; NULL is allowed.
   Threads: owner.
   Blocks:  on the file system.
   Owns:    the writer is freed. */
SPDL_API void spdl_npz_writer_close(spdl_npz_writer *writer);

#endif /* SPDL_NO_NPZ */

#ifdef __cplusplus
} /* extern "C" */
#endif

/* ============================================================================================= */
/* >>cpp
   Thin C++ forms of what C does with compound literals, and rows of lambdas. Nothing here needs a
   header of the C++ library. */

#ifdef __cplusplus
template <bool none> inline int spdl__no_fields(int line) {
    static_assert(none, "before C++20 write SPDL_PIPE(fn).with_concurrency(4)");
    return line;
}

inline spdl_stage spdl__row(spdl_kind kind, const spdl_function *fn, const char *file, int line,
                            int size, const char *type, spdl_next_fn next = NULL,
                            void *source = NULL) {
    spdl_stage row = spdl_stage();
    row.kind = kind;
    row.fn = fn;
    row.file = file;
    row.line = line;
    row.size = size;
    row.type = type;
    row.next = next;
    row.source = source;
    return row;
}

#ifndef SPDL_NO_NPZ
#ifdef SPDL_STATIC
namespace {
extern SPDL__UNUSED const spdl_function spdl_npz_load_spdl;
}
#endif

/* What SPDL_NPZ stands for. */
inline spdl_stage spdl__npz_row(spdl_stage row, const spdl_npz_desc *desc) {
    row.ctx = SPDL__UNCONST(desc);
    if (row.free_item == NULL) row.free_item = spdl_npz_bundle_free;
    return row;
}
#endif

/* As the C function, with SPDL_STAGES(...) as the last argument. */
template <size_t count>
inline spdl_result spdl_pipeline_create(spdl_pipeline **pipeline, const spdl_pipeline_desc *desc,
                                        const spdl_stage (&stages)[count]) {
    return spdl_pipeline_create(pipeline, desc, stages, count);
}

template <size_t count>
inline int spdl_rows_text(const spdl_stage (&stages)[count], char *buffer, size_t bytes) {
    return spdl_rows_text(stages, count, buffer, bytes);
}

#ifdef __cpp_exceptions
namespace std {
class exception; /* what throws one has seen the rest of it */
}

/* The failure of a stage that threw, called where it was caught. The second stands for the first
   where a file defines stages before it has seen a header that knows std::exception. */
template <class Exception, size_t = sizeof(Exception)>
static spdl_result spdl__thrown(spdl_task *task, int) {
    try {
        throw;
    } catch (const Exception &thrown) {
        return spdl_fail(task, "%s", thrown.what());
    } catch (...) {
        return spdl_fail(task, "threw something that is no std::exception");
    }
}
template <class Exception> static spdl_result spdl__thrown(spdl_task *task, long) {
    return spdl_fail(task, "threw; to see what, include <exception> before the stage");
}
#endif

/* The name of a type, "[with T = Image]" or so. Those are compared with each other only: SPDL_FN
   has a type as it was written. */
template <class T> struct spdl__type {
    static const char *name() {
        const char *text = __PRETTY_FUNCTION__;
        while (*text != '[') ++text;
        return text;
    }
};
template <class T> struct spdl__type<const T> : spdl__type<T> {};
template <> struct spdl__type<void> {
    static const char *name() { return "void"; }
};
template <> struct spdl__type<spdl_batch> {
    static const char *name() { return "spdl_batch"; }
};

/* What SPDL_FN makes of a function, of anything that can be called; ctx of the row is its address.
   Task is spdl_task: a parameter, for std::exception to be looked up where the row is written. */
template <class In, class Out, class Call, class Task>
static spdl_result spdl__called(Task *task, void *in, void **out) {
    Out *made = NULL;
    spdl_result result;
    SPDL__TRY(result, (*reinterpret_cast<Call *>(spdl_ctx(task)))(task, static_cast<In *>(in),
                                                                  &made))
    *out = SPDL__UNCONST(made);
    return result;
}

template <class In, class Out, class Call>
static spdl_stage spdl__called_row(spdl_kind kind, const char *name, Call *call, const char *file,
                                   int line) {
    static const spdl_function function = { spdl__called<In, Out, Call, spdl_task>, "lambda",
                                            spdl__type<In>::name(), spdl__type<Out>::name() };
    return spdl__row(kind, &function, file, line, 0, NULL)
        .with_name(name)
        .with_ctx(const_cast<void *>(reinterpret_cast<const void *>(call)));
}

/* Rows of lambdas, with the arguments and the result of a stage function (a source takes void *):
       auto load = [&](spdl_task *task, Path *in, Image **out) { ...; return SPDL_OK; };
       spdl_pipe<Path, Image>("load", load).with_concurrency(4).with_free_item(spdl_delete<Image>)
   The row has the address of `load`, which must outlive the pipeline, in place of a ctx, and with a
   concurrency several threads call it at the same time. A lambda without captures, or a function,
   may be written in place. */
template <class In, class Out, class Call>
static spdl_stage spdl_pipe(const char *name, Call &call, const char *file = __builtin_FILE(),
                            int line = __builtin_LINE()) {
    return spdl__called_row<In, Out, Call>(SPDL_KIND_PIPE, name, &call, file, line);
}
template <class In, class Out>
static spdl_stage spdl_pipe(const char *name, spdl_result (*call)(spdl_task *, In *, Out **),
                            const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    return spdl__called_row<In, Out>(SPDL_KIND_PIPE, name, call, file, line);
}
template <class Out, class Call>
static spdl_stage spdl_source(const char *name, Call &call, const char *file = __builtin_FILE(),
                              int line = __builtin_LINE()) {
    return spdl__called_row<void, Out, Call>(SPDL_KIND_SOURCE, name, &call, file, line);
}
template <class Out>
static spdl_stage spdl_source(const char *name, spdl_result (*call)(spdl_task *, void *, Out **),
                              const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    return spdl__called_row<void, Out>(SPDL_KIND_SOURCE, name, call, file, line);
}

/* As free_item of what was made by `new T`. */
template <class T> inline void spdl_delete(void *item) { delete static_cast<T *>(item); }

/* spdl_pipeline_next into an owner, which is empty when there is no item; *result says why.
       while (auto image = spdl_next<std::unique_ptr<Image>>(p)) train(*image); */
template <class Owner>
static Owner spdl_next(spdl_pipeline *pipeline, int64_t timeout_ns = SPDL_FOREVER,
                       spdl_result *result = NULL) {
    void *item = NULL;
    const spdl_result got = spdl_pipeline_next(pipeline, &item, timeout_ns);
    if (result != NULL) *result = got;
    return Owner(static_cast<typename Owner::element_type *>(item));
}

template <class T>
static spdl_result spdl__next(spdl_pipeline *pipeline, T **out, int64_t timeout_ns) {
    void *item = NULL;
    const spdl_result result = spdl_pipeline_next(pipeline, &item, timeout_ns);
    if (result == SPDL_OK) *out = static_cast<T *>(item);
    return result;
}
#endif

#endif /* SPDL_H_INCLUDED */

/* ============================================================================================= */
/* IMPLEMENTATION                                                                                */
/* ============================================================================================= */

#if defined(SPDL_IMPLEMENTATION) && !defined(SPDL_IMPLEMENTATION_INCLUDED)
#define SPDL_IMPLEMENTATION_INCLUDED

/* ============================================================================================= */
/* >>platform-impl
   The compiler, the processor, and which system there is: of the sections only >>os-posix, and this
   one where it chooses, name one. Everything here may be defined before the include.
   SPDL_NO_THREADS takes >>os-none for >>os-posix: C alone, all on the caller's thread.
   SPDL_OS_POSIX leaves out what only Linux has; SPDL_OS_HEADER names a file that takes the place of
   both.
   SPDL_TEST_POINT(id) marks the places where timing decides, for tests that want to yield or fail
   there. SPDL_DEBUG turns on what finds misuse at run time. */

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__linux__) && !defined(SPDL_OS_POSIX) && !defined(SPDL_OS_HEADER) &&                   \
    !defined(SPDL_NO_THREADS)
#define SPDL__LINUX 1
#else
#define SPDL__LINUX 0
#endif

#if defined(__SANITIZE_THREAD__)
#define SPDL__TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define SPDL__TSAN 1
#endif
#endif
#ifndef SPDL__TSAN
#define SPDL__TSAN 0
#endif

#if defined(__has_include)
#if __has_include(<sys/sdt.h>)
#include <sys/sdt.h>
#define SPDL__SDT 1
#endif
#endif
#ifndef SPDL__SDT
#define SPDL__SDT 0
#endif

#ifndef SPDL_MALLOC
#define SPDL_MALLOC(bytes) malloc(bytes)
#define SPDL_FREE(memory) free(memory)
#endif
#ifndef SPDL_TEST_POINT
#define SPDL_TEST_POINT(id) ((void)0)
#endif
#ifndef SPDL__NO_STATS
#define SPDL__NO_STATS 0 /* 1: a pipeline that counts nothing; for the bench that tells the cost */
#endif

/* Two lines: the prefetcher of x86 fetches pairs, and arm64 has lines of 128 bytes. */
#ifndef SPDL_CACHE_LINE
#define SPDL_CACHE_LINE 128
#endif

#define SPDL__PRIVATE SPDL__UNUSED static
#define SPDL__NOINLINE __attribute__((noinline)) SPDL__PRIVATE
#define SPDL__COLD __attribute__((cold)) SPDL__PRIVATE /* runs rarely: made small, not quick */
#define SPDL__RARE __attribute__((noinline)) SPDL__COLD /* the same, beside what runs often */
#define SPDL__INLINE SPDL__UNUSED static inline __attribute__((always_inline))

/* Before the body of a public function that is inlined where the body is seen. It is there for
   other files all the same: C sees to it when the declaration does not say inline. */
#ifdef __cplusplus
#define SPDL__HOT inline __attribute__((used, always_inline))
#elif defined(__clang__) /* which warns of static functions in an inline one */
#define SPDL__HOT __attribute__((always_inline))
#else
#define SPDL__HOT inline __attribute__((always_inline))
#endif

#define SPDL__LIKELY(condition) __builtin_expect(!!(condition), 1)
#define SPDL__UNLIKELY(condition) __builtin_expect(!!(condition), 0)

/* Instructions that not every processor has stand in functions of their own, which say so, and are
   called where the processor has been asked. */
#define SPDL__TARGET(features) __attribute__((target(features)))
#if defined(__x86_64__)
#define SPDL__X86 1
#else
#define SPDL__X86 0
#endif
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#define SPDL__BIG_ENDIAN 1
#else
#define SPDL__BIG_ENDIAN 0
#endif

/* Whether an arm64 processor has products without carries. */
#if defined(__aarch64__) && SPDL__LINUX
#include <sys/auxv.h>
SPDL__PRIVATE bool spdl__arm_has_pmull(void) { return (getauxval(16) >> 4 & 1) != 0; } /* HWCAP */
#elif defined(__APPLE__)
SPDL__PRIVATE bool spdl__arm_has_pmull(void) { return true; }
#else
SPDL__PRIVATE bool spdl__arm_has_pmull(void) { return false; }
#endif

#ifdef SPDL_DEBUG
#include <assert.h>
#define SPDL__ASSERT(condition) assert(condition)
#define SPDL__DEBUGS 1
#else
#define SPDL__ASSERT(condition) ((void)0)
#define SPDL__DEBUGS 0
#endif

/* ============================================================================================= */
/* >>atomics-impl
   Plain integers behind these helpers: _Atomic does not compile in every C++, and a reader should
   see at each access what it orders. load = acquire, store = release, add, or, exchange and cas =
   acquire and release; relaxed ones say so. `32` is for uint32_t, the others are for uint64_t. What
   has a name with __atomic or __builtin in it comes first: another compiler is a twin of that
   part. */

#define SPDL__ATOMICS(type, suffix)                                                                \
    SPDL__INLINE type spdl__load##suffix(const type *p) {                                         \
        return __atomic_load_n(p, __ATOMIC_ACQUIRE);                                               \
    }                                                                                              \
    SPDL__INLINE type spdl__load_relaxed##suffix(const type *p) {                                 \
        return __atomic_load_n(p, __ATOMIC_RELAXED);                                               \
    }                                                                                              \
    SPDL__INLINE void spdl__store##suffix(type *p, type value) {                                  \
        __atomic_store_n(p, value, __ATOMIC_RELEASE);                                              \
    }                                                                                              \
    SPDL__INLINE void spdl__store_relaxed##suffix(type *p, type value) {                          \
        __atomic_store_n(p, value, __ATOMIC_RELAXED);                                              \
    }                                                                                              \
    SPDL__INLINE type spdl__exchange##suffix(type *p, type value) {                               \
        return __atomic_exchange_n(p, value, __ATOMIC_ACQ_REL);                                    \
    }                                                                                              \
    SPDL__INLINE type spdl__add##suffix(type *p, type value) {                                    \
        return __atomic_fetch_add(p, value, __ATOMIC_ACQ_REL);                                     \
    }                                                                                              \
    SPDL__INLINE type spdl__sub##suffix(type *p, type value) {                                    \
        return __atomic_fetch_sub(p, value, __ATOMIC_ACQ_REL);                                     \
    }                                                                                              \
    SPDL__INLINE type spdl__or##suffix(type *p, type bits) {                                      \
        return __atomic_fetch_or(p, bits, __ATOMIC_ACQ_REL);                                       \
    }                                                                                              \
    SPDL__INLINE bool spdl__cas##suffix(type *p, type *expected, type desired) {                  \
        return __atomic_compare_exchange_n(p, expected, desired, false, __ATOMIC_ACQ_REL,          \
                                           __ATOMIC_ACQUIRE);                                      \
    }
SPDL__ATOMICS(uint32_t, 32)
SPDL__ATOMICS(uint64_t, )
#undef SPDL__ATOMICS

/* For claims whose order is carried by something else. */
SPDL__INLINE bool spdl__cas_relaxed(uint64_t *p, uint64_t *expected, uint64_t desired) {
    return __atomic_compare_exchange_n(p, expected, desired, false, __ATOMIC_RELAXED,
                                       __ATOMIC_RELAXED);
}

/* A pointer, relaxed. */
SPDL__INLINE void *spdl__load_pointer(void *const *p) {
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}
SPDL__INLINE void spdl__store_pointer(void **p, void *value) {
    __atomic_store_n(p, value, __ATOMIC_RELAXED);
}
SPDL__INLINE spdl_fn spdl__load_fn(const spdl_fn *p) {
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}
SPDL__INLINE void spdl__store_fn(spdl_fn *p, spdl_fn value) {
    __atomic_store_n(p, value, __ATOMIC_RELAXED);
}

SPDL__INLINE void spdl__compiler_barrier(void) { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

/* Orders earlier stores before later loads. ThreadSanitizer does not model fences, so under it a
   read-modify-write does the same work (it is a full barrier on every target TSan runs on). */
SPDL__INLINE void spdl__full_barrier(void) {
#if SPDL__TSAN
    uint32_t word = 0;
    uint32_t *volatile escape = &word;
    (void)__atomic_fetch_add(escape, 1, __ATOMIC_SEQ_CST);
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

/* Asks for the line at p, to write to it. x86 compilers emit prefetchw only in functions that say
   there is one; every 64-bit x86 has it or ignores it. */
#if defined(__x86_64__)
#define SPDL__PREFETCHES SPDL__TARGET("prfchw")
#else
#define SPDL__PREFETCHES
#endif
SPDL__INLINE void spdl__prefetch_write(const void *p) { __builtin_prefetch(p, 1); }

SPDL__INLINE void spdl__pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

/* --- made of those --- */

/* A full barrier after a read-modify-write: on x86 that is one already. */
SPDL__INLINE void spdl__barrier_after_rmw(void) {
#if defined(__x86_64__) || defined(__i386__)
    spdl__compiler_barrier();
#else
    spdl__full_barrier();
#endif
}

/* What one thread writes, and others report: no read-modify-write is needed. */
SPDL__INLINE void spdl__count(uint64_t *counter, uint64_t more) {
    if (!SPDL__NO_STATS) spdl__store_relaxed(counter, spdl__load_relaxed(counter) + more);
}

/* Raises *word to `value`, if it is less. Returns what it is then, or more. */
SPDL__PRIVATE uint64_t spdl__atomic_max(uint64_t *word, uint64_t value) {
    uint64_t old = spdl__load_relaxed(word);
    while (old < value && !spdl__cas_relaxed(word, &old, value)) {}
    return old > value ? old : value;
}

/* ============================================================================================= */
/* >>os
   The operating system, as 30 functions: no other section calls one. The next section says what
   they do. Each kind of system is a twin of it with the same functions, and no other code has an
   #if for it. Any thread may call any of them at any time; pointers are not NULL unless it says so;
   times are nanoseconds. A text that is returned says why not, until the thread's next call; NULL
   is success. Nothing blocks except where it says so, and files for as long as a disk takes.

   A twin also defines struct spdl__os_event, with the words `word` and `waiters` in it, struct
   spdl__os_thread, with `refused` in it, SPDL__OS_BARRIER: 0 where spdl__os_barrier is always
   false, SPDL__OS_NO_THREAD: "", or what to say of a thread where there is never one, and
   SPDL__NO_SLEEP: 1 where every sleep ends at once. */

#define SPDL__NEVER UINT64_MAX /* as a deadline; as a time: unknown */
#define SPDL__ALL 0x7fffffff   /* sleepers */
#define SPDL__NO_FILE (-1)
typedef intptr_t spdl__os_file; /* a descriptor or a handle */
typedef struct spdl__os_event spdl__os_event;
typedef struct spdl__os_thread spdl__os_thread;
typedef enum spdl__os_clock { SPDL__OS_MONOTONIC, SPDL__OS_UNIX } spdl__os_clock;

typedef enum spdl__os_access {
    SPDL__OS_READ,    /* a plain file that is there: a pipe could make a reader wait */
    SPDL__OS_NEW,     /* to read and write; one that is there is in use */
    SPDL__OS_REPLACE, /* to write; what is there is emptied */
    SPDL__OS_APPEND,  /* to write at the end */
    SPDL__OS_CLAIM    /* to read and write; in use for other claims, of any process, until closed */
} spdl__os_access;

static const char spdl__os_in_use[] = "it is in use"; /* of NEW and CLAIM: this very pointer */

/* ============================================================================================= */
/* >>os-none
   What the functions do, and no system at all, only C: for SPDL_NO_THREADS, as in wasm without
   threads and on boards. There is no other thread that could end a sleep, so each times out at
   once. Files are those of <stdio.h>: as long as a long counts, not mapped, never in use by others,
   and one that is claimed is emptied at once. Another twin can begin with a copy of this. */

#if defined(SPDL_NO_THREADS) && !defined(SPDL_OS_HEADER)

#include <limits.h>
#include <time.h>

#define SPDL__OS_BARRIER 0
#define SPDL__OS_NO_THREAD ": there are none with SPDL_NO_THREADS"
#define SPDL__NO_SLEEP 1

struct spdl__os_event {
    uint32_t word;
    uint32_t waiters;
};

struct spdl__os_thread {
    bool refused;
};

/* A monotonic time with any origin, the same for all threads; or that since 1970. */
SPDL__PRIVATE uint64_t spdl__os_clock_ns(spdl__os_clock which) {
/* the best clock that is declared; the last one is that of the processor */
#if defined(CLOCK_MONOTONIC) && (!defined(__STRICT_ANSI__) || defined(_POSIX_C_SOURCE))
    struct timespec now;
    (void)clock_gettime(which == SPDL__OS_UNIX ? CLOCK_REALTIME : CLOCK_MONOTONIC, &now);
#elif defined(TIME_UTC)
    struct timespec now;
    (void)which;
    (void)timespec_get(&now, TIME_UTC);
#else
    struct {
        time_t tv_sec;
        double tv_nsec;
    } now = { 0, 0 };
    if (which == SPDL__OS_UNIX)
        now.tv_sec = time(NULL);
    else
        now.tv_nsec = (double)clock() * (1e9 / (double)CLOCKS_PER_SEC);
#endif
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* A full barrier in every thread of this process, some time before it returns: then all others need
   only keep their compiler from reordering. False, and nothing done, where there is no such thing:
   that never changes for a process. Some microseconds. */
SPDL__PRIVATE bool spdl__os_barrier(void) { return false; }

/* A word that threads wait for. False when there is no memory. fini: nobody sleeps on it. */
SPDL__PRIVATE bool spdl__os_event_init(spdl__os_event *event) {
    event->word = event->waiters = 0;
    return true;
}

SPDL__PRIVATE void spdl__os_event_fini(spdl__os_event *event) { (void)event; }

/* Blocks while event->word is `word`, until the deadline on the monotonic clock: SPDL_TIMEOUT then;
   SPDL_OK may be spurious. */
SPDL__PRIVATE spdl_result spdl__os_event_sleep(spdl__os_event *event, uint32_t word,
                                               uint64_t deadline) {
    (void)deadline;
    return event->word != word ? SPDL_OK : SPDL_TIMEOUT;
}

/* Adds 1 to event->word, with release, and wakes up to `count` sleepers. A thread that read the
   word before and sleeps afterwards does not miss it. */
SPDL__PRIVATE void spdl__os_event_wake(spdl__os_event *event, int count) {
    (void)count;
    ++event->word;
}

/* Runs entry(arg) in a new thread with a name (shown as far as the system does), a policy (or NULL;
   it has to stay until entry begins) and a stack (0: the usual one). It handles no signals but
   faults. Before entry thread->refused says whether the system refused the policy. *thread stays
   in place until join. False: no thread. */
SPDL__PRIVATE bool spdl__os_thread_start(spdl__os_thread *thread, const char *name,
                                         const spdl_policy *policy, size_t stack_bytes,
                                         void *(*entry)(void *), void *arg) {
    (void)thread, (void)name, (void)policy, (void)stack_bytes, (void)entry, (void)arg;
    return false;
}

SPDL__PRIVATE void spdl__os_thread_join(spdl__os_thread *thread) { (void)thread; }

/* Instead of join: nobody waits for the thread. It may free *thread before its entry returns. */
SPDL__PRIVATE void spdl__os_thread_detach(spdl__os_thread *thread) { (void)thread; }

/* A number for the calling thread that no other one has now; not 0. Some nanoseconds. */
SPDL__PRIVATE uint64_t spdl__os_thread_id(void) { return 1; }

/* The processor time of a thread that is not joined (NULL: of the caller) so far, and how long it
   was ready to run while others had the processors; what is unknown is SPDL__NEVER. Either pointer
   may be NULL. *file keeps what is open between calls for the same thread, SPDL__NO_FILE before
   the first; or NULL. Some microseconds. */
SPDL__PRIVATE void spdl__os_thread_times(const spdl__os_thread *thread, spdl__os_file *file,
                                         uint64_t *cpu_ns, uint64_t *queued_ns) {
    (void)thread, (void)file;
    if (cpu_ns != NULL) *cpu_ns = SPDL__NEVER;
    if (queued_ns != NULL) *queued_ns = SPDL__NEVER;
}

SPDL__PRIVATE void spdl__os_yield(void) {}

/* Its number; *started, unless NULL: when it was, or 0. No two processes have both the same. */
SPDL__PRIVATE uint64_t spdl__os_process_id(uint64_t *started) {
    if (started != NULL) *started = (uint64_t)time(NULL); /* roughly: it is written into files */
    return 1;
}

/* For how long nobody had the processors, all together; 0: not known. */
SPDL__PRIVATE uint64_t spdl__os_machine_idle(void) { return 0; }

/* Looks which plain files this process has open to read only, or mapped to be shared, and adds
   their names to the `used` bytes of `names`, each with a zero behind it, unless one of the same
   folder and ending is there. Returns the bytes used then; no more than there were where the system
   does not say. Some 100 us. */
SPDL__PRIVATE size_t spdl__os_files_seen(char *names, size_t used, size_t bytes) {
    (void)names, (void)bytes;
    return used;
}

/* Takes these files, and those beside them with the same ending, out of the page cache, until the
   deadline. *files and *bytes: how many, and their sizes; what others use may stay. */
SPDL__PRIVATE void spdl__os_files_forget(const char *names, size_t used, uint64_t deadline,
                                         uint64_t *files, uint64_t *bytes) {
    (void)names, (void)used, (void)deadline;
    *files = *bytes = 0;
}

/* What the process has read by calls so far, and what was read from disks for it; false: not
   known. */
SPDL__PRIVATE bool spdl__os_reads(uint64_t *asked, uint64_t *from_disk) {
    *asked = *from_disk = 0;
    return false;
}

/* An environment variable; NULL when it is empty, not there, or set by a user with fewer rights. */
SPDL__PRIVATE const char *spdl__os_environment(const char *name) {
    const char *value = getenv(name);
    return value != NULL && *value != '\0' ? value : NULL;
}

/* Whether stderr is a terminal. Unless `lock` is NULL the caller asks to be the one to draw on it:
   *lock is a file to close then, or SPDL__NO_FILE while another one is. */
SPDL__PRIVATE bool spdl__os_terminal(spdl__os_file *lock) {
    if (lock != NULL) *lock = SPDL__NO_FILE;
    return false;
}

/* Writes to stderr. Blocks up to patience_ns for each piece; if it is not taken by then it is left
   out with all that follows, which is no failure. */
SPDL__PRIVATE const char *spdl__os_stderr_write(const char *text, size_t bytes,
                                                int64_t patience_ns) {
    (void)patience_ns;
    return fwrite(text, 1, bytes, stderr) == bytes ? NULL : "it takes no more";
}

SPDL_API void spdl_process_read(spdl_process_stats *stats) {
    memset(stats, 0, sizeof(*stats));
    stats->time_ns = stats->cpu_ns = spdl_time_ns();
    stats->cores_allowed = stats->cores = 1;
}

/* --- files --- */

SPDL__PRIVATE FILE *spdl__os_file_stream(spdl__os_file file) { return (FILE *)file; }

/* What could not be written may be known only now. Does nothing with SPDL__NO_FILE. */
SPDL__PRIVATE const char *spdl__os_file_close(spdl__os_file file) {
    if (file == SPDL__NO_FILE || fclose(spdl__os_file_stream(file)) == 0) return NULL;
    return "it could not be written";
}

/* Opens a file; all but READ make it. The last three may also open a pipe or a device: it is not
   waited for, and never in use for a claim. The path is UTF-8 where the system has an opinion.
   *bytes: how long it is, 0 for a pipe or a device; or NULL. */
SPDL__PRIVATE const char *spdl__os_file_open(spdl__os_file *file, const char *path,
                                             spdl__os_access access, uint64_t *bytes) {
    static const char *const how[] = { "rb", "w+b", "w+b", "ab", "w+b" };
    FILE *stream = access == SPDL__OS_NEW ? fopen(path, "rb") : NULL;
    long length = 0;
    *file = SPDL__NO_FILE;
    if (stream != NULL) {
        (void)fclose(stream);
        return spdl__os_in_use;
    }
    stream = fopen(path, how[access]);
    if (stream == NULL) return "it could not be opened";
    if (fseek(stream, 0, SEEK_END) == 0) length = ftell(stream);
    if (length < 0 || length == LONG_MAX || fseek(stream, 0, SEEK_SET) != 0) {
        (void)fclose(stream);
        return "it has no length";
    }
    if (bytes != NULL) *bytes = (uint64_t)length;
    *file = (spdl__os_file)stream;
    return NULL;
}

/* The same for READ, of a file the program has open (by its number in C); that one stays open. */
SPDL__PRIVATE const char *spdl__os_file_duplicate(spdl__os_file *file, int from, uint64_t *bytes) {
    (void)from, (void)bytes;
    *file = SPDL__NO_FILE;
    return "files have no numbers with SPDL_NO_THREADS";
}

/* Reads `bytes` bytes at a place; *have: how many there were, all of them on success. */
SPDL__PRIVATE const char *spdl__os_file_read(spdl__os_file file, void *to, size_t bytes,
                                             uint64_t at, size_t *have) {
    FILE *stream = spdl__os_file_stream(file);
    *have = 0;
    if (at > (uint64_t)LONG_MAX || fseek(stream, (long)at, SEEK_SET) != 0)
        return "there is no such place";
    *have = fread(to, 1, bytes, stream);
    if (*have == bytes) return NULL;
    return ferror(stream) ? "it could not be read" : "it ended while it was read";
}

/* Writes at a place, or after what was written last: SPDL__NEVER. */
SPDL__PRIVATE const char *spdl__os_file_write(spdl__os_file file, const void *from, size_t bytes,
                                              uint64_t at) {
    FILE *stream = spdl__os_file_stream(file);
    if (at != SPDL__NEVER && (at > (uint64_t)LONG_MAX || fseek(stream, (long)at, SEEK_SET) != 0))
        return "there is no such place";
    if (fwrite(from, 1, bytes, stream) == bytes && fflush(stream) == 0) return NULL;
    return "it could not be written";
}

/* Makes an open file empty; writing begins at its start again. Nothing for a pipe or a device. */
SPDL__PRIVATE const char *spdl__os_file_truncate(spdl__os_file file) {
    /* nothing was written yet: what is written again and again are reports, by a thread */
    return fseek(spdl__os_file_stream(file), 0, SEEK_SET) == 0 ? NULL : "it has no start";
}

/* The file in memory, to read; NULL when that cannot be. It may be closed meanwhile. */
SPDL__PRIVATE const uint8_t *spdl__os_file_map(spdl__os_file file, uint64_t bytes) {
    (void)file, (void)bytes;
    return NULL;
}

SPDL__PRIVATE void spdl__os_file_unmap(const uint8_t *memory, uint64_t bytes) {
    (void)memory, (void)bytes;
}

/* The open file at `from` takes the place of `to`, in one step; with sync not before its bytes are
   safe. */
SPDL__PRIVATE const char *spdl__os_file_commit(spdl__os_file file, const char *from, const char *to,
                                               bool sync) {
    (void)sync;
    if (fflush(spdl__os_file_stream(file)) != 0) return "it could not be written";
    return rename(from, to) == 0 ? NULL : "it could not be renamed";
}
#endif

/* ============================================================================================= */
/* >>os-posix
   POSIX. One block has what Linux does in its own way: futexes, membarrier, priorities of threads,
   what /proc and the cgroups say. The next one takes its place on other systems. Where an
   SPDL_OS_HEADER was defined, that is the twin, included here. */

#if defined(SPDL_OS_HEADER)
#include SPDL_OS_HEADER
#elif defined(SPDL_NO_THREADS) /* the section before */
#elif !defined(__unix__) && !defined(__unix) && !defined(__APPLE__)
#error "spdl.h: not a POSIX system: SPDL_NO_THREADS, or SPDL_OS_HEADER, a file with what >>os says"
#else

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SPDL__OS_NO_THREAD ""
#define SPDL__NO_SLEEP 0
#ifndef SPDL_PTHREAD_CREATE
#define SPDL_PTHREAD_CREATE pthread_create
#endif

/* In strict modes the C library hides what is below; it is always there. glibc goes by what was
   defined before its first header, others by what is defined now. */
#if SPDL__LINUX
typedef int spdl__os_clock_id;
#define SPDL__CLOCK_UNIX 0
#define SPDL__CLOCK_MONOTONIC 1
#define SPDL__O_CLOEXEC 02000000
#define SPDL__F_DUPFD 1030 /* F_DUPFD_CLOEXEC */
#else
typedef clockid_t spdl__os_clock_id;
#define SPDL__CLOCK_UNIX CLOCK_REALTIME
#define SPDL__CLOCK_MONOTONIC CLOCK_MONOTONIC
#define SPDL__O_CLOEXEC O_CLOEXEC
#define SPDL__F_DUPFD F_DUPFD_CLOEXEC
#endif
#if SPDL__LINUX && !defined(__cplusplus)
#if defined(__GLIBC__) ? !defined(__USE_MISC) : !defined(_GNU_SOURCE) && !defined(_DEFAULT_SOURCE)
extern long syscall(long number, ...);
extern int clock_gettime(int clock, struct timespec *now);
extern ssize_t pread(int file, void *to, size_t bytes, off_t at);
extern ssize_t pwrite(int file, const void *from, size_t bytes, off_t at);
extern int fsync(int file);
extern int ftruncate(int file, off_t bytes);
extern ssize_t readlink(const char *path, char *to, size_t bytes);
extern int posix_fadvise(int file, off_t at, off_t bytes, int advice);
#endif
#endif

/* --- time and events --- */

SPDL__PRIVATE uint64_t spdl__os_clock_read(spdl__os_clock_id clock) {
    struct timespec now;
    if (clock_gettime(clock, &now) != 0) return SPDL__NEVER;
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

SPDL__PRIVATE uint64_t spdl__os_clock_ns(spdl__os_clock which) {
    return spdl__os_clock_read(which == SPDL__OS_UNIX ? SPDL__CLOCK_UNIX : SPDL__CLOCK_MONOTONIC);
}

struct spdl__os_thread {
    /* written by start */
    pthread_t handle;
    char name[SPDL_NAME_BYTES];
    const spdl_policy *policy;
    void *(*entry)(void *arg);
    void *arg;
    /* written by the thread */
    uint32_t number; /* that the system knows it by; 0 until it runs */
    bool refused;
};

#if SPDL__LINUX
#include <dirent.h>
#include <sys/syscall.h>

#if !defined(SPDL__OS_BARRIER)
#define SPDL__OS_BARRIER !SPDL__TSAN
#endif

SPDL__PRIVATE bool spdl__os_barrier(void) {
    const long expedited = 1 << 3, registration = 1 << 4;
    if (!SPDL__OS_BARRIER) return false;
    return syscall(SYS_membarrier, expedited, 0L, 0L) == 0 ||
           (syscall(SYS_membarrier, registration, 0L, 0L) == 0 &&
            syscall(SYS_membarrier, expedited, 0L, 0L) == 0);
}

struct spdl__os_event {
    uint32_t word;
    uint32_t waiters;
};

SPDL__PRIVATE bool spdl__os_event_init(spdl__os_event *event) {
    event->word = event->waiters = 0;
    return true;
}

SPDL__PRIVATE void spdl__os_event_fini(spdl__os_event *event) { (void)event; }

SPDL__PRIVATE spdl_result spdl__os_event_sleep(spdl__os_event *event, uint32_t word,
                                               uint64_t deadline) {
    const long wait_bitset_private = 9 | 128;
    struct {
        long seconds, nanoseconds; /* what this system call takes on every Linux */
    } at;
    at.seconds = (long)(deadline / 1000000000u);
    at.nanoseconds = (long)(deadline % 1000000000u);
    if (syscall(SYS_futex, &event->word, wait_bitset_private, (long)word,
                deadline == SPDL__NEVER ? NULL : &at, NULL, 0xffffffffL) == 0)
        return SPDL_OK;
    return errno == ETIMEDOUT ? SPDL_TIMEOUT : SPDL_OK;
}

SPDL__PRIVATE void spdl__os_event_wake(spdl__os_event *event, int count) {
    const long wake_private = 1 | 128;
    spdl__add32(&event->word, 1);
    (void)syscall(SYS_futex, &event->word, wake_private, (long)count, NULL, NULL, 0L);
}

typedef uint64_t spdl__os_signals; /* as the kernel has them */

SPDL__PRIVATE void spdl__os_signals_set(const spdl__os_signals *set, spdl__os_signals *old) {
    const long set_mask = 2;
    (void)syscall(SYS_rt_sigprocmask, set_mask, set, old, (long)sizeof(*set));
}

/* Blocks the signals that may be delivered to any thread, so that the program's handlers run on its
   own threads. Faults stay, and so do profilers and what libc keeps for itself (32 to 34). */
SPDL__PRIVATE void spdl__os_signals_block(spdl__os_signals *old) {
    /* all but ILL, TRAP, ABRT, BUS, FPE; SEGV; PROF; 32, 33 and 34 */
    const spdl__os_signals set = ~(0x1full << 3 | 1ull << 10 | 1ull << 26 | 7ull << 31);
    spdl__os_signals_set(&set, old);
}

#define SPDL__CPUS_MAX 8192

SPDL__PRIVATE bool spdl__os_thread_set_cpus(const int *cpus, int count) {
    uint64_t mask[SPDL__CPUS_MAX / 64] = { 0 };
    int i;
    for (i = 0; i < count; ++i) {
        if (cpus[i] < 0 || cpus[i] >= SPDL__CPUS_MAX) return false;
        mask[cpus[i] / 64] |= (uint64_t)1 << cpus[i] % 64;
    }
    return count == 0 || syscall(SYS_sched_setaffinity, 0L, (long)sizeof(mask), mask) == 0;
}

/* Priorities are per thread on Linux; 0 is the calling one. */
SPDL__PRIVATE bool spdl__os_thread_set_policy(const spdl_policy *policy) {
    const bool batch = policy->sched == SPDL_SCHED_BATCH || policy->polite;
    const int nice = policy->polite && policy->nice == 0 ? 19 : policy->nice, priority = 0;
    const long sched = policy->sched == SPDL_SCHED_IDLE ? 5 : batch ? 3 : 0;
    return spdl__os_thread_set_cpus(policy->cpus, policy->cpu_count) &&
           (sched == 0 || syscall(SYS_sched_setscheduler, 0L, sched, &priority) == 0) &&
           (nice == 0 || syscall(SYS_setpriority, 0L, 0L, (long)nice) == 0);
}

/* Shows 15 characters of the name. */
SPDL__PRIVATE void spdl__os_thread_begins(spdl__os_thread *thread) {
    const long pr_set_name = 15;
    (void)syscall(SYS_prctl, pr_set_name, thread->name, 0L, 0L, 0L);
    spdl__store32(&thread->number, (uint32_t)syscall(SYS_gettid));
}

/* The first bytes of a small file, with a zero at the end; returns how many. *file keeps it open
   for the next time, see spdl__os_thread_times. */
SPDL__PRIVATE size_t spdl__os_text(spdl__os_file *file, const char *path, char *text,
                                      size_t bytes) {
    spdl__os_file once = SPDL__NO_FILE;
    ssize_t length = -1;
    if (file == NULL) file = &once;
    if (*file == SPDL__NO_FILE) *file = open(path, O_RDONLY | SPDL__O_CLOEXEC);
    if (*file != SPDL__NO_FILE) length = pread((int)*file, text, bytes - 1, 0);
    if (once != SPDL__NO_FILE) (void)close((int)once);
    text[length > 0 ? length : 0] = '\0';
    return length > 0 ? (size_t)length : 0;
}

/* Runnable is the second number in a schedstat. (The first is no processor clock: it stands still
   between ticks.) */
SPDL__PRIVATE void spdl__os_thread_times(const spdl__os_thread *thread, spdl__os_file *file,
                                         uint64_t *cpu_ns, uint64_t *queued_ns) {
    const int number = thread != NULL ? (int)spdl__load32(&thread->number) : 0;
    const int clock = thread != NULL ? -8 * number - 2 : 3; /* as pthread_getcpuclockid has it */
    const bool known = thread == NULL || number != 0;
    char path[64] = "/proc/thread-self/schedstat", text[64], *at;
    if (cpu_ns != NULL) *cpu_ns = known ? spdl__os_clock_read(clock) : SPDL__NEVER;
    if (queued_ns == NULL) return;
    *queued_ns = SPDL__NEVER;
    if (thread != NULL) (void)snprintf(path, sizeof(path), "/proc/self/task/%d/schedstat", number);
    if (!known || spdl__os_text(file, path, text, sizeof(text)) == 0) return;
    (void)strtoull(text, &at, 10);
    *queued_ns = strtoull(at, NULL, 10);
}

/* The second one in the 22nd field; the second field is a name in brackets. */
SPDL__PRIVATE uint64_t spdl__os_process_start(void) {
    char stat[1024], *at;
    int field;
    (void)spdl__os_text(NULL, "/proc/self/stat", stat, sizeof(stat));
    at = strrchr(stat, ')');
    for (field = 2; at != NULL && field < 22; ++field) at = strchr(at + 1, ' ');
    return at != NULL ? strtoull(at, NULL, 10) : 0;
}

/* The cores that the quota of the cgroup in folder `at` allows, or `most`. Version 2 has "quota
   period" or "max period" in one file, version 1 two files, and -1 for no quota. */
SPDL__PRIVATE double spdl__os_quota_at(const char *at, double most) {
    static const char *const files[] = { "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us" };
    char path[640], text[192], *end;
    double quota, period;
    size_t i, length = 0;
    for (i = 0; i < 3; ++i) {
        (void)snprintf(path, sizeof(path), "%s/%s", at, files[i]);
        length += spdl__os_text(NULL, path, text + length, 64);
    }
    quota = strtod(text, &end);
    period = strtod(end, NULL); /* of "max" as well: no number is 0 */
    return quota > 0 && period > 0 && quota / period < most ? quota / period : most;
}

/* The same for those of the process and all above them: each may have a quota. `self` has lines
   "number:controllers:path", and no controllers in version 2. Inside of a container the path may be
   one of the host: the way up ends at the container's own root. */
SPDL__PRIVATE double spdl__os_quota(const char *root, const char *self, double most) {
    char text[2048], at[576], *line = text, *next;
    (void)spdl__os_text(NULL, self, text, sizeof(text));
    for (; *line != '\0'; line = next) {
        char *names = strchr(line, ':'), *path = names ? strchr(names + 1, ':') : NULL;
        const size_t length = strcspn(line, "\n");
        next = line + length + (line[length] == '\n');
        line[length] = '\0';
        if (path == NULL || path > line + length) continue;
        *path++ = '\0';
        if (*++names != '\0' && strncmp(names, "cpu", 3) != 0 && strstr(names, ",cpu") == NULL)
            continue;
        for (;;) {
            char *slash = strrchr(path, '/');
            (void)snprintf(at, sizeof(at), "%.200s%s%.100s%.250s", root, *names ? "/" : "", names,
                           path);
            most = spdl__os_quota_at(at, most);
            if (slash == NULL) break;
            *slash = '\0';
        }
    }
    return most;
}

/* What all cores have done so far: the sum of some columns of
   "cpu  user nice system idle iowait irq softirq steal ...". */
SPDL__PRIVATE uint64_t spdl__os_machine_ns(unsigned columns) {
    const long tick = sysconf(_SC_CLK_TCK);
    char text[256], *at = text + 4;
    uint64_t sum = 0;
    int column;
    (void)spdl__os_text(NULL, "/proc/stat", text, sizeof(text));
    if (strncmp(text, "cpu ", 4) != 0) return 0;
    for (column = 0; column < 8; ++column) {
        const uint64_t ticks = strtoull(at, &at, 10);
        if (columns >> column & 1) sum += ticks;
    }
    return sum * (1000000000u / (uint64_t)(tick > 0 ? tick : 100));
}

SPDL__PRIVATE uint64_t spdl__os_machine_idle(void) { return spdl__os_machine_ns(0x18); }

/* What POSIX does not know. */
SPDL__PRIVATE void spdl__os_process_more(spdl_process_stats *stats) {
    uint64_t mask[SPDL__CPUS_MAX / 64];
    const long bytes = syscall(SYS_sched_getaffinity, 0L, (long)sizeof(mask), mask);
    const uint64_t busy = spdl__os_machine_ns(0xe7);
    char statm[128], *resident;
    int cores = 0;
    long i;
    for (i = 0; i < bytes / 8; ++i)
        for (; mask[i] != 0; mask[i] &= mask[i] - 1) ++cores;
    stats->cores_allowed = spdl__os_quota("/sys/fs/cgroup", "/proc/self/cgroup",
                                          cores > 0 ? cores : stats->cores_allowed);
    stats->others_ns = busy > stats->cpu_ns ? busy - stats->cpu_ns : 0;
    if (spdl__os_text(NULL, "/proc/self/statm", statm, sizeof(statm)) == 0) return;
    (void)strtoull(statm, &resident, 10);
    stats->resident_bytes = strtoull(resident, NULL, 10) * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* From the last point of a name on. */
SPDL__PRIVATE const char *spdl__os_ending(const char *path) {
    const char *slash = strrchr(path, '/'), *point = strrchr(slash != NULL ? slash : path, '.');
    return point != NULL ? point : path + strlen(path);
}

SPDL__PRIVATE size_t spdl__os_name_add(char *names, size_t used, size_t bytes, const char *path) {
    static const char *const no_data[] = { "/usr/lib", "/lib", "/proc/", "/sys/", "/dev/" };
    const char *slash = strrchr(path, '/'), *at;
    const size_t length = strlen(path) + 1;
    size_t i;
    if (path[0] != '/' || length > bytes - used) return used;
    for (i = 0; i < sizeof(no_data) / sizeof(*no_data); ++i)
        if (strncmp(path, no_data[i], strlen(no_data[i])) == 0) return used;
    for (at = names; at < names + used; at += strlen(at) + 1)
        if (strrchr(at, '/') - at == slash - path &&
            strncmp(at, path, (size_t)(slash - path)) == 0 &&
            strcmp(spdl__os_ending(at), spdl__os_ending(path)) == 0)
            return used;
    memcpy(names + used, path, length);
    return used + length;
}

/* The names of what is mapped to be shared; or without `names` its pages leave the tables of this
   process, as a cache keeps what is in use. They come back by themselves. */
SPDL__PRIVATE size_t spdl__os_mappings(char *names, size_t used, size_t bytes) {
    const long forget_pages = 4; /* MADV_DONTNEED */
    FILE *maps = fopen("/proc/self/maps", "re");
    struct stat status;
    unsigned long from, to;
    char line[1024], path[768], how[5];
    while (maps != NULL && fgets(line, sizeof(line), maps) != NULL) {
        if (sscanf(line, "%lx-%lx %4s %*s %*s %*s %767[^\n]", &from, &to, how, path) != 4 ||
            how[0] != 'r' || how[3] != 's' || stat(path, &status) != 0 ||
            !S_ISREG(status.st_mode))
            continue;
        if (names != NULL)
            used = spdl__os_name_add(names, used, bytes, path);
        else
            (void)syscall(SYS_madvise, from, to - from, forget_pages);
    }
    if (maps != NULL) (void)fclose(maps);
    return used;
}

SPDL__PRIVATE size_t spdl__os_files_seen(char *names, size_t used, size_t bytes) {
    DIR *folder = opendir("/proc/self/fd");
    const struct dirent *entry;
    struct stat status;
    char path[1024], at[64];
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        const int file = (int)strtol(entry->d_name, NULL, 10), how = fcntl(file, F_GETFL, 0);
        ssize_t length;
        if (how < 0 || (how & O_ACCMODE) != O_RDONLY || fstat(file, &status) != 0 ||
            !S_ISREG(status.st_mode) || status.st_size == 0)
            continue;
        (void)snprintf(at, sizeof(at), "/proc/self/fd/%d", file);
        length = readlink(at, path, sizeof(path) - 1);
        if (length <= 0) continue;
        path[length] = '\0';
        used = spdl__os_name_add(names, used, bytes, path);
    }
    if (folder != NULL) (void)closedir(folder);
    return spdl__os_mappings(names, used, bytes);
}

/* False: it is no plain file, or stays. */
SPDL__PRIVATE bool spdl__os_file_forget(const char *path, uint64_t *bytes) {
    const int dont_need = 4; /* POSIX_FADV_DONTNEED */
    struct stat status;
    bool done;
    int file;
    if (stat(path, &status) != 0 || !S_ISREG(status.st_mode) || status.st_size == 0) return false;
    file = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | SPDL__O_CLOEXEC);
    if (file < 0) return false;
    done = posix_fadvise(file, 0, 0, dont_need) == 0;
    if (done) *bytes += (uint64_t)status.st_size;
    (void)close(file);
    return done;
}

SPDL__PRIVATE void spdl__os_files_forget(const char *names, size_t used, uint64_t deadline,
                                         uint64_t *files, uint64_t *bytes) {
    const char *name;
    char path[1024];
    *files = *bytes = 0;
    (void)spdl__os_mappings(NULL, 0, 0);
    for (name = names; name < names + used; name += strlen(name) + 1) {
        const int folder = (int)(strrchr(name, '/') - name) + 1;
        const struct dirent *entry;
        DIR *beside;
        (void)snprintf(path, sizeof(path), "%.*s", folder, name);
        beside = opendir(path);
        while (beside != NULL && (entry = readdir(beside)) != NULL &&
               spdl__os_clock_ns(SPDL__OS_MONOTONIC) < deadline) {
            if (strcmp(spdl__os_ending(entry->d_name), spdl__os_ending(name)) != 0) continue;
            (void)snprintf(path + folder, sizeof(path) - (size_t)folder, "%s", entry->d_name);
            *files += spdl__os_file_forget(path, bytes);
        }
        if (beside != NULL) (void)closedir(beside);
    }
}

SPDL__PRIVATE bool spdl__os_reads(uint64_t *asked, uint64_t *from_disk) {
    char text[256];
    const char *disk;
    *asked = *from_disk = 0;
    if (spdl__os_text(NULL, "/proc/self/io", text, sizeof(text)) == 0) return false;
    disk = strstr(text, "\nread_bytes: ");
    if (strncmp(text, "rchar: ", 7) != 0 || disk == NULL) return false;
    *asked = strtoull(text + 7, NULL, 10);
    *from_disk = strtoull(disk + 13, NULL, 10);
    return true;
}

#else /* not Linux */
#if defined(__APPLE__)
#include <pthread/qos.h>
#endif
#define SPDL__OS_BARRIER 0

SPDL__PRIVATE bool spdl__os_barrier(void) { return false; }

struct spdl__os_event {
    uint32_t word;
    uint32_t waiters;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
};

SPDL__PRIVATE bool spdl__os_event_init(spdl__os_event *event) {
    pthread_condattr_t attributes;
    bool made;
    event->word = event->waiters = 0;
    if (pthread_condattr_init(&attributes) != 0) return false;
#if !defined(__APPLE__)
    (void)pthread_condattr_setclock(&attributes, SPDL__CLOCK_MONOTONIC);
#endif
    made = pthread_cond_init(&event->changed, &attributes) == 0;
    pthread_condattr_destroy(&attributes);
    if (!made) return false;
    if (pthread_mutex_init(&event->mutex, NULL) == 0) return true;
    pthread_cond_destroy(&event->changed);
    return false;
}

SPDL__PRIVATE void spdl__os_event_fini(spdl__os_event *event) {
    pthread_cond_destroy(&event->changed);
    pthread_mutex_destroy(&event->mutex);
}

SPDL__PRIVATE int spdl__os_event_timedwait(spdl__os_event *event, uint64_t deadline) {
    struct timespec at;
#if defined(__APPLE__) /* no monotonic condition variables, but a relative wait */
    const uint64_t now = spdl__os_clock_ns(SPDL__OS_MONOTONIC);
    deadline = deadline > now ? deadline - now : 0;
#endif
    at.tv_sec = (time_t)(deadline / 1000000000u);
    at.tv_nsec = (long)(deadline % 1000000000u);
#if defined(__APPLE__)
    return pthread_cond_timedwait_relative_np(&event->changed, &event->mutex, &at);
#else
    return pthread_cond_timedwait(&event->changed, &event->mutex, &at);
#endif
}

SPDL__PRIVATE spdl_result spdl__os_event_sleep(spdl__os_event *event, uint32_t word,
                                               uint64_t deadline) {
    int error = 0;
    pthread_mutex_lock(&event->mutex);
    while (spdl__load_relaxed32(&event->word) == word && error == 0)
        error = deadline == SPDL__NEVER ? pthread_cond_wait(&event->changed, &event->mutex)
                                        : spdl__os_event_timedwait(event, deadline);
    if (spdl__load_relaxed32(&event->word) != word) error = 0; /* a wake-up is never lost */
    pthread_mutex_unlock(&event->mutex);
    return error == ETIMEDOUT ? SPDL_TIMEOUT : SPDL_OK;
}

SPDL__PRIVATE void spdl__os_event_wake(spdl__os_event *event, int count) {
    pthread_mutex_lock(&event->mutex);
    spdl__add32(&event->word, 1);
    pthread_mutex_unlock(&event->mutex);
    if (count == 1)
        pthread_cond_signal(&event->changed);
    else
        pthread_cond_broadcast(&event->changed);
}

typedef sigset_t spdl__os_signals;

SPDL__PRIVATE void spdl__os_signals_set(const spdl__os_signals *set, spdl__os_signals *old) {
    (void)pthread_sigmask(SIG_SETMASK, set, old);
}

SPDL__PRIVATE void spdl__os_signals_block(spdl__os_signals *old) {
    const int keep[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGPROF };
    spdl__os_signals set;
    size_t i;
    sigfillset(&set);
    for (i = 0; i < sizeof(keep) / sizeof(keep[0]); ++i) sigdelset(&set, keep[i]);
    spdl__os_signals_set(&set, old);
}

/* POSIX has no priorities of threads that need no privilege. */
SPDL__PRIVATE bool spdl__os_thread_set_policy(const spdl_policy *policy) {
#if defined(__APPLE__)
    qos_class_t qos = QOS_CLASS_DEFAULT;
    if (policy->polite || policy->nice > 0 || policy->sched == SPDL_SCHED_BATCH)
        qos = QOS_CLASS_UTILITY;
    if (policy->sched == SPDL_SCHED_IDLE) qos = QOS_CLASS_BACKGROUND;
    return qos == QOS_CLASS_DEFAULT || pthread_set_qos_class_self_np(qos, 0) == 0;
#else
    (void)policy;
    return true;
#endif
}

SPDL__PRIVATE void spdl__os_thread_begins(spdl__os_thread *thread) {
#if defined(__APPLE__)
    (void)pthread_setname_np(thread->name);
#endif
    (void)thread;
}

SPDL__PRIVATE void spdl__os_thread_times(const spdl__os_thread *thread, spdl__os_file *file,
                                         uint64_t *cpu_ns, uint64_t *queued_ns) {
    clockid_t clock = CLOCK_THREAD_CPUTIME_ID;
    bool known = true;
    (void)file;
    if (queued_ns != NULL) *queued_ns = SPDL__NEVER;
    if (cpu_ns == NULL) return;
#if defined(__APPLE__)
    known = thread == NULL;
#else
    if (thread != NULL) known = pthread_getcpuclockid(thread->handle, &clock) == 0;
#endif
    *cpu_ns = known ? spdl__os_clock_read(clock) : SPDL__NEVER;
}

SPDL__PRIVATE uint64_t spdl__os_process_start(void) { return 0; }

SPDL__PRIVATE void spdl__os_process_more(spdl_process_stats *stats) { (void)stats; }

SPDL__PRIVATE uint64_t spdl__os_machine_idle(void) { return 0; }

SPDL__PRIVATE size_t spdl__os_files_seen(char *names, size_t used, size_t bytes) {
    (void)names, (void)bytes;
    return used;
}

SPDL__PRIVATE void spdl__os_files_forget(const char *names, size_t used, uint64_t deadline,
                                         uint64_t *files, uint64_t *bytes) {
    (void)names, (void)used, (void)deadline;
    *files = *bytes = 0;
}

SPDL__PRIVATE bool spdl__os_reads(uint64_t *asked, uint64_t *from_disk) {
    *asked = *from_disk = 0;
    return false;
}
#endif

/* --- threads and the process --- */

SPDL__PRIVATE void *spdl__os_thread_main(void *arg) {
    spdl__os_thread *thread = (spdl__os_thread *)arg;
    spdl__os_thread_begins(thread);
    thread->refused = thread->policy != NULL && !spdl__os_thread_set_policy(thread->policy);
    return thread->entry(thread->arg);
}

SPDL__PRIVATE bool spdl__os_thread_start(spdl__os_thread *thread, const char *name,
                                         const spdl_policy *policy, size_t stack_bytes,
                                         void *(*entry)(void *), void *arg) {
    pthread_attr_t attributes;
    spdl__os_signals old;
    int error;
    thread->number = 0;
    (void)snprintf(thread->name, sizeof(thread->name), "%s", name);
    thread->policy = policy;
    thread->entry = entry;
    thread->arg = arg;
    if (pthread_attr_init(&attributes) != 0) return false;
    error = stack_bytes ? pthread_attr_setstacksize(&attributes, stack_bytes) : 0;
    if (error == 0) {
        spdl__os_signals_block(&old);
        error = SPDL_PTHREAD_CREATE(&thread->handle, &attributes, spdl__os_thread_main, thread);
        spdl__os_signals_set(&old, NULL);
    }
    pthread_attr_destroy(&attributes);
    return error == 0;
}

SPDL__PRIVATE void spdl__os_thread_join(spdl__os_thread *thread) {
    pthread_join(thread->handle, NULL);
}

SPDL__PRIVATE void spdl__os_thread_detach(spdl__os_thread *thread) {
    (void)pthread_detach(thread->handle);
}

/* An integer or a pointer on every POSIX system we know. */
SPDL__PRIVATE uint64_t spdl__os_thread_id(void) { return (uint64_t)(uintptr_t)pthread_self(); }

SPDL__PRIVATE void spdl__os_yield(void) { (void)sched_yield(); }

SPDL__PRIVATE uint64_t spdl__os_process_id(uint64_t *started) {
    if (started != NULL) *started = spdl__os_process_start();
    return (uint64_t)getpid();
}

SPDL__PRIVATE const char *spdl__os_environment(const char *name) {
    const char *value = getuid() == geteuid() && getgid() == getegid() ? getenv(name) : NULL;
    return value != NULL && *value != '\0' ? value : NULL;
}

SPDL_API void spdl_process_read(spdl_process_stats *stats) {
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    struct rusage used;
    memset(stats, 0, sizeof(*stats));
    if (getrusage(RUSAGE_SELF, &used) == 0) {
        stats->cpu_ns = (uint64_t)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1000000000u +
                        (uint64_t)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1000u;
        stats->minor_faults = (uint64_t)used.ru_minflt;
        stats->major_faults = (uint64_t)used.ru_majflt;
    }
    stats->cores = online > 0 ? (int)online : 1;
    stats->cores_allowed = stats->cores;
    spdl__os_process_more(stats);
    stats->time_ns = spdl_time_ns();
}

/* --- files --- */

/* Never one of the numbers 0 to 2, in case the program has closed one of these. */
SPDL__PRIVATE spdl__os_file spdl__os_file_own(int file) {
    const int low = file;
    if (low < 0 || low > STDERR_FILENO) return low;
    file = fcntl(low, SPDL__F_DUPFD, STDERR_FILENO + 1);
    (void)close(low);
    return file;
}

/* Of a plain file; a pipe or a device has no length that could be trusted. */
SPDL__PRIVATE const char *spdl__os_file_length(spdl__os_file file, uint64_t *bytes) {
    struct stat status;
    *bytes = 0;
    if (fstat((int)file, &status) != 0) return strerror(errno);
    if (S_ISDIR(status.st_mode)) return "a directory, not a file";
    if (!S_ISREG(status.st_mode)) return "a pipe or a device, not a file";
    *bytes = (uint64_t)status.st_size;
    return NULL;
}

SPDL__PRIVATE const char *spdl__os_file_close(spdl__os_file file) {
    return file == SPDL__NO_FILE || close((int)file) == 0 ? NULL : strerror(errno);
}

SPDL__PRIVATE const char *spdl__os_file_open(spdl__os_file *file, const char *path,
                                             spdl__os_access access, uint64_t *bytes) {
    static const int how[] = { O_RDONLY, O_RDWR | O_CREAT | O_EXCL, O_WRONLY | O_CREAT | O_TRUNC,
                               O_WRONLY | O_CREAT | O_APPEND, O_RDWR | O_CREAT };
    const char *reason;
    uint64_t length;
    if (bytes == NULL) bytes = &length;
    *file = spdl__os_file_own(
        open(path, how[access] | O_NONBLOCK | O_NOCTTY | SPDL__O_CLOEXEC, 0666));
    if (*file < 0) return errno == EEXIST ? spdl__os_in_use : strerror(errno);
    reason = spdl__os_file_length(*file, bytes);
    if (access == SPDL__OS_CLAIM && reason == NULL && flock((int)*file, LOCK_EX | LOCK_NB) != 0 &&
        errno == EWOULDBLOCK)
        reason = spdl__os_in_use;
    else if (access != SPDL__OS_READ)
        reason = NULL;
    if (reason == NULL) return NULL;
    (void)close((int)*file);
    *file = SPDL__NO_FILE;
    return reason;
}

SPDL__PRIVATE const char *spdl__os_file_duplicate(spdl__os_file *file, int from, uint64_t *bytes) {
    const char *reason = spdl__os_file_length(from, bytes);
    *file = reason == NULL ? fcntl(from, SPDL__F_DUPFD, STDERR_FILENO + 1) : SPDL__NO_FILE;
    return reason == NULL && *file < 0 ? strerror(errno) : reason;
}

SPDL__PRIVATE const char *spdl__os_file_read(spdl__os_file file, void *to, size_t bytes,
                                             uint64_t at, size_t *have) {
    for (*have = 0; *have < bytes;) {
        const ssize_t got = pread((int)file, (char *)to + *have, bytes - *have,
                                  (off_t)(at + *have));
        if (got == 0) return "it ended while it was read";
        if (got > 0)
            *have += (size_t)got;
        else if (errno != EINTR)
            return strerror(errno);
    }
    return NULL;
}

SPDL__PRIVATE const char *spdl__os_file_write(spdl__os_file file, const void *from, size_t bytes,
                                              uint64_t at) {
    size_t done = 0;
    while (done < bytes) {
        const char *next = (const char *)from + done;
        const ssize_t put = at == SPDL__NEVER
                                ? write((int)file, next, bytes - done)
                                : pwrite((int)file, next, bytes - done, (off_t)(at + done));
        if (put == 0) return "nothing more can be written";
        if (put > 0)
            done += (size_t)put;
        else if (errno != EINTR)
            return strerror(errno);
    }
    return NULL;
}

SPDL__PRIVATE const char *spdl__os_file_truncate(spdl__os_file file) {
    if (lseek((int)file, 0, SEEK_SET) != 0 || ftruncate((int)file, 0) == 0) return NULL;
    return errno == EINVAL ? NULL : strerror(errno);
}

SPDL__PRIVATE const uint8_t *spdl__os_file_map(spdl__os_file file, uint64_t bytes) {
    void *memory = MAP_FAILED;
    if (bytes > 0 && bytes <= SIZE_MAX)
        memory = mmap(NULL, (size_t)bytes, PROT_READ, MAP_SHARED, (int)file, 0);
    return memory != MAP_FAILED ? (const uint8_t *)memory : NULL;
}

SPDL__PRIVATE void spdl__os_file_unmap(const uint8_t *memory, uint64_t bytes) {
    if (memory != NULL) (void)munmap((void *)(uintptr_t)memory, (size_t)bytes);
}

SPDL__PRIVATE const char *spdl__os_file_commit(spdl__os_file file, const char *from, const char *to,
                                               bool sync) {
    if (sync && fsync((int)file) != 0) return strerror(errno);
    return rename(from, to) == 0 ? NULL : strerror(errno);
}

/* --- stderr --- */

/* To be locked, a terminal has to be opened anew: what is inherited shares its lock. */
SPDL__PRIVATE bool spdl__os_terminal(spdl__os_file *lock) {
    const bool terminal = isatty(STDERR_FILENO) != 0;
    if (lock == NULL) return terminal;
    *lock = SPDL__NO_FILE;
    if (!terminal) return false;
    *lock = open(SPDL__LINUX ? "/proc/self/fd/2" : "/dev/fd/2",
                 O_WRONLY | O_NOCTTY | SPDL__O_CLOEXEC);
    if (*lock < 0) {
        *lock = fcntl(STDERR_FILENO, SPDL__F_DUPFD, STDERR_FILENO + 1);
    } else if (flock((int)*lock, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        (void)close((int)*lock);
        *lock = SPDL__NO_FILE;
    }
    return true;
}

/* It belongs to the program, so it may block: only what poll says it takes is written, in pieces
   that a pipe takes whole. */
SPDL__PRIVATE const char *spdl__os_stderr_write(const char *text, size_t bytes,
                                                int64_t patience_ns) {
    struct pollfd ready = { STDERR_FILENO, POLLOUT, 0 };
    while (bytes > 0) {
        ssize_t put;
        if (poll(&ready, 1, (int)(patience_ns / 1000000)) == 0) return NULL;
        if ((ready.revents & POLLNVAL) != 0) return strerror(EBADF);
        put = write(STDERR_FILENO, text, bytes < 4096 ? bytes : 4096);
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) return errno == EAGAIN ? NULL : strerror(errno);
        text += put;
        bytes -= (size_t)put;
    }
    return NULL;
}
#endif

/* ============================================================================================= */
/* >>core-impl
   What all rooms share: results, time, memory, errors and messages, sleeping. No state of its
   own. */

typedef unsigned long long spdl__llu; /* what "%llu" takes */

SPDL_API const char *spdl_version(void) {
    return SPDL__EXPAND(SPDL_VERSION_MAJOR) "." SPDL__EXPAND(SPDL_VERSION_MINOR) "." SPDL__EXPAND(
        SPDL_VERSION_PATCH);
}

static const char spdl__unknown_result[] = "unknown result";

SPDL_API const char *spdl_result_text(spdl_result result) {
    switch ((int)result) {
#define SPDL__CASE(name, value, text)                                                              \
    case value: return text;
        SPDL_RESULT_LIST(SPDL__CASE)
#undef SPDL__CASE
    default: return spdl__unknown_result;
    }
}

SPDL__PRIVATE uint64_t spdl__min(uint64_t a, uint64_t b) { return a < b ? a : b; }
SPDL__PRIVATE uint64_t spdl__max(uint64_t a, uint64_t b) { return a > b ? a : b; }

SPDL_API uint64_t spdl_time_ns(void) { return spdl__os_clock_ns(SPDL__OS_MONOTONIC); }

/* When a wait that starts now has to end. */
SPDL__PRIVATE uint64_t spdl__deadline(int64_t timeout_ns) {
    return timeout_ns < 0 ? SPDL__NEVER : spdl_time_ns() + (uint64_t)timeout_ns;
}

SPDL__PRIVATE bool spdl__late(uint64_t deadline) {
    return deadline != SPDL__NEVER && spdl_time_ns() >= deadline;
}

/* Memory for `bytes`, at least as aligned as a pointer; NULL when there is none. malloc knows no
   alignment: the start of its block is kept in front of what is handed out. */
SPDL__PRIVATE void *spdl__alloc(const spdl_allocator *allocator, size_t bytes, size_t align) {
    char *block;
    uintptr_t at;
    if (align < sizeof(void *)) align = sizeof(void *);
    if (allocator->alloc_fn != NULL) return allocator->alloc_fn(bytes, align, allocator->user);
    if (bytes > SIZE_MAX - align - sizeof(void *)) return NULL;
    block = (char *)SPDL_MALLOC(bytes + align + sizeof(void *));
    if (block == NULL) return NULL;
    at = ((uintptr_t)block + sizeof(void *) + align - 1) & ~(uintptr_t)(align - 1);
    memcpy((void *)(at - sizeof(void *)), &block, sizeof(block));
    return (void *)at;
}

SPDL__PRIVATE void spdl__free(const spdl_allocator *allocator, void *memory, size_t bytes) {
    void *block;
    if (memory == NULL) return;
    if (allocator->free_fn != NULL) {
        allocator->free_fn(memory, bytes, allocator->user);
        return;
    }
    memcpy(&block, (char *)memory - sizeof(block), sizeof(block));
    SPDL_FREE(block);
}

/* `count` zeroed elements; NULL for no memory, and for a product that does not fit. */
SPDL__PRIVATE void *spdl__alloc_zeroed(const spdl_allocator *allocator, size_t count, size_t bytes,
                                       size_t align) {
    void *memory;
    if (bytes != 0 && count > SIZE_MAX / bytes) return NULL;
    memory = spdl__alloc(allocator, count * bytes, align);
    if (memory != NULL) memset(memory, 0, count * bytes);
    return memory;
}

SPDL__PRIVATE void spdl__error_clear(spdl_error *error) {
    if (error == NULL) return;
    memset(error, 0, sizeof(*error));
    error->stage = -1;
}

/* Fills in an error that belongs to no stage, and returns its result. error may be NULL. */
SPDL__PRINTF(3, 4)
SPDL__PRIVATE spdl_result spdl__error_set(spdl_error *error, spdl_result result, const char *format,
                                          ...) {
    va_list args;
    if (error == NULL) return result;
    spdl__error_clear(error);
    error->result = result;
    va_start(args, format);
    (void)vsnprintf(error->text, sizeof(error->text), format, args);
    va_end(args);
    return result;
}

SPDL__PRIVATE spdl_result spdl__allocator_check(const spdl_allocator *allocator, const char *what,
                                                spdl_error *error) {
    if ((allocator->alloc_fn == NULL) == (allocator->free_fn == NULL)) return SPDL_OK;
    return spdl__error_set(error, SPDL_E_INVALID,
                           "spdl: %s: set both functions of the allocator or none", what);
}

SPDL__PRIVATE void spdl__log(const spdl_logger *logger, spdl_log_level level, const char *text) {
    if (logger->log_fn != NULL)
        logger->log_fn(level, text, logger->user);
    else if (level <= SPDL_LOG_WARN)
        (void)fprintf(stderr, "%s\n", text);
}

/* The same, as printf would write it. */
SPDL__PRINTF(3, 4)
SPDL__PRIVATE void spdl__logf(const spdl_logger *logger, spdl_log_level level, const char *format,
                              ...) {
    char text[SPDL_TEXT_BYTES + 1024]; /* with the name of a file */
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    spdl__log(logger, level, text);
}

SPDL__INLINE void spdl__profile(const spdl_profiler *profiler, spdl_event event, const char *name,
                                uint64_t number) {
    if (SPDL__UNLIKELY(profiler->event_fn != NULL))
        profiler->event_fn(event, name, number, profiler->user);
}

SPDL__PRIVATE void spdl__name_copy(char name[SPDL_NAME_BYTES], const char *from) {
    size_t length = strlen(from);
    if (length >= SPDL_NAME_BYTES) length = SPDL_NAME_BYTES - 1;
    memcpy(name, from, length);
    name[length] = '\0';
}

SPDL__PRIVATE uint64_t spdl__grown(uint64_t from, uint64_t to) { return to > from ? to - from : 0; }

/* The smallest power of two that is at least `n`. */
SPDL__PRIVATE uint64_t spdl__pow2(uint64_t n) {
    uint64_t power = 1;
    while (power < n) power <<= 1;
    return power;
}

/* How long to look for work before sleeping: a little spinning, then turns for other threads. With
   more threads than cores the turns are what keeps things moving, and a sleep costs a wake-up. On 2
   cores 64 spins and 8 turns made rings 10 % slower; with 16 turns instead of 64 four producers of
   5 us beside a consumer of 20 us made 0.65 instead of all of what is possible. Workers and trainer
   give away fewer: see SPDL__IDLE_YIELDS. */
#ifndef SPDL_SPINS
#define SPDL_SPINS 16
#endif
#ifndef SPDL_YIELDS
#define SPDL_YIELDS 64
#endif

/* One breath of a wait loop that gives away `yields` turns; false when it is time to sleep. */
SPDL__PRIVATE bool spdl__backoff(int *round, int yields) {
    if (*round >= SPDL_SPINS + yields) return false;
    if ((*round)++ < SPDL_SPINS)
        spdl__pause();
    else
        spdl__os_yield();
    return true;
}

/* Asymmetric barriers. A thread that publishes does a light barrier and then looks whether
   another sleeps; a thread that is about to sleep says so, does a heavy barrier and then looks
   again: one of the two sees the other. Where spdl__os_barrier was true once (`asymmetric`) the
   light one costs nothing, and only sleepers pay. Otherwise both are full barriers. */
SPDL__INLINE void spdl__barrier_light(bool asymmetric) {
    if (asymmetric)
        spdl__compiler_barrier();
    else
        spdl__full_barrier();
}

SPDL__PRIVATE void spdl__barrier_heavy(bool asymmetric) {
    if (asymmetric)
        (void)spdl__os_barrier();
    else
        spdl__full_barrier();
}

/* The light barrier for code that does not ask which kind it is: where the system may have no heavy
   one, it is not run without it. */
SPDL__INLINE void spdl__barrier_quick(void) { spdl__barrier_light(SPDL__OS_BARRIER); }

/* The waiting side of an event count: prepare, look again, then commit or cancel. */
SPDL__PRIVATE uint32_t spdl__event_prepare(spdl__os_event *event, bool asymmetric) {
    const uint32_t word = spdl__load32(&event->word);
    spdl__add32(&event->waiters, 1);
    spdl__barrier_heavy(asymmetric);
    return word;
}

SPDL__PRIVATE void spdl__event_cancel(spdl__os_event *event) { spdl__sub32(&event->waiters, 1); }

SPDL__PRIVATE spdl_result spdl__event_commit(spdl__os_event *event, uint32_t word,
                                             uint64_t deadline) {
    const spdl_result result = spdl__os_event_sleep(event, word, deadline);
    spdl__event_cancel(event);
    return result;
}

/* The other side: call it after publishing what the waiters wait for. */
SPDL__PRIVATE void spdl__event_notify(spdl__os_event *event, bool asymmetric, int count) {
    spdl__barrier_light(asymmetric);
    if (spdl__load_relaxed32(&event->waiters) != 0) spdl__os_event_wake(event, count);
}

/* ============================================================================================= */
/* >>ring-core
   The lock-free part of the rings: positions, slots and the words that sleepers and closers leave
   for the other side. It never sleeps and calls no operating system, so that a model checker can
   take it alone, with memcpy, spdl__min, spdl__max and the helpers of >>atomics-impl.

   SPSC, an index ring: tail and head count items. Each side keeps what it last saw of the other
   side's index and looks again only when that runs out. Wait-free.

   MPMC, a ring with stamps: a position is an index into the slots (low bits) and a lap (the bits
   above). A push may fill the slot whose stamp equals tail, a pop may empty the slot whose stamp
   equals head + 1; they claim it by a compare-and-swap of tail or head. That is exact at any
   capacity, 1 included. With a capacity that is no power of two the index `capacity` has no slot:
   the position after the last slot is the first of the next lap. (Dmitry Vyukov's bounded queue
   with the laps of crossbeam's array channel.)

   Closing must refuse every push that starts later, and let pops drain every push that was accepted
   before one of them returns SPDL_CLOSED. The closer sets CLOSING and then CLOSED; a pop that finds
   nothing and sees CLOSED compares head with the end of the ring.
   - MPMC: tail gets a mark before both: every later claim fails, and tail is the end.
   - SPSC: the producer stores tail, so that a mark would be lost. It looks at CLOSING after the
     store and a light barrier, and the closer does a heavy one before CLOSED: either the producer
     sees CLOSING, or everyone who sees CLOSED sees its tail. A producer that sees CLOSING and a
     consumer that sees CLOSED and no item decide the end by one compare-and-swap of `end`. The push
     is before it, and drained, or after it, and refused.

   Threads: each field says who writes it. Slots are handed over by their stamp or by the index. */

#define SPDL__RING_OPEN UINT64_MAX
#define SPDL__RING_MARK ((uint64_t)1 << 63)
#define SPDL__RING_CLOSING 0x80000000u /* in pops_waiting, above the number of waiting pops */
#define SPDL__RING_CLOSED 0x40000000u
#define SPDL__RING_WAITING 0x3fffffffu
#define SPDL__RING_AHEAD 64 /* items of credit, and how far ahead lines are fetched */
#define SPDL__RING_FETCHED (256 * 1024)

/* A slot of an MPMC ring of 8-byte items. */
typedef struct spdl__ring_cell {
    uint64_t stamp;
    uint64_t item;
} spdl__ring_cell;

typedef struct spdl__ring_core {
    /* written by create */
    spdl_ring_mode mode;
    bool asymmetric;
    bool quick; /* items of 8 bytes and cheap barriers: the quick paths may be taken */
    uint64_t capacity;
    uint64_t index_mask; /* one lap of positions is index_mask + 1 */
    uint64_t cell_mask;  /* index_mask, or 0 when MPMC has no quick path */
    spdl__ring_cell *cells; /* the slots, or a cell that never fits */
    unsigned char *slots;
    uint64_t slot_count;
    size_t item_bytes;
    size_t stride;
    uint64_t line_items; /* how many begin in a line of 64 bytes, at least 1 */
    spdl__ring_cell no_cell;
    char pad0[SPDL_CACHE_LINE];
    /* written by producers */
    uint64_t tail;
    char pad1[SPDL_CACHE_LINE];
    /* SPSC, written by the producer */
    uint64_t limit;     /* it may push up to here unasked; close sets it to 0 */
    uint64_t head_seen; /* its copy of head */
    char pad2[SPDL_CACHE_LINE];
    /* written by consumers */
    uint64_t head;
    char pad3[SPDL_CACHE_LINE];
    /* SPSC, written by the consumer */
    uint64_t tail_seen; /* its copy of tail */
    bool quick_pops;    /* until it has decided the end */
    char pad4[SPDL_CACHE_LINE];
    /* written by threads about to sleep, by close, and `end` by either side of SPSC; read by all */
    uint32_t pops_waiting;
    uint32_t pushes_waiting;
    uint64_t end; /* SPDL__RING_OPEN until it is decided, and in MPMC */
    char pad5[SPDL_CACHE_LINE];
} spdl__ring_core;

SPDL__PRIVATE unsigned char *spdl__ring_slot(const spdl__ring_core *ring, uint64_t at) {
    return ring->slots + (size_t)(at & ring->index_mask) * ring->stride;
}

/* Relaxed: after a light barrier where it matters, elsewhere a hint. */
SPDL__PRIVATE bool spdl__ring_closing(const spdl__ring_core *ring) {
    return (spdl__load_relaxed32(&ring->pops_waiting) & SPDL__RING_CLOSING) != 0;
}

/* With acquire: pairs with the store of CLOSED in close, which comes after the mark. */
SPDL__PRIVATE bool spdl__ring_closed(const spdl__ring_core *ring) {
    return (spdl__load32(&ring->pops_waiting) & SPDL__RING_CLOSED) != 0;
}

/* ---- SPSC ---- */

/* How many of n items from `at` on lie side by side. */
SPDL__PRIVATE uint64_t spdl__spsc_run(const spdl__ring_core *ring, uint64_t at, uint64_t n) {
    return spdl__min(n, ring->index_mask + 1 - (at & ring->index_mask));
}

/* Producer. How many of `n` items there is room for. */
SPDL__PRIVATE uint64_t spdl__spsc_room(spdl__ring_core *ring, uint64_t tail, uint64_t n) {
    if (ring->head_seen + ring->capacity - tail < n)
        ring->head_seen = spdl__load(&ring->head); /* pairs with its stores in pops: the slot was
                                                      read before it is reused */
    return spdl__min(n, ring->head_seen + ring->capacity - tail);
}

/* Producer. CLOSING was seen after the store of tail + n: is the push inside the ring? If not, the
   consumer has found the end before it and never looks at tail again. Nothing is pushed later. */
SPDL__PRIVATE spdl_result spdl__spsc_settle(spdl__ring_core *ring, uint64_t tail, uint64_t n) {
    uint64_t end = SPDL__RING_OPEN;
    spdl__store_relaxed(&ring->limit, 0);
    SPDL_TEST_POINT("ring about to settle");
    /* pairs with the cas of end in spdl__spsc_look: if that one loses, the items are there */
    return spdl__cas(&ring->end, &end, tail + n) || end > tail ? SPDL_OK : SPDL_CLOSED;
}

/* Producer. Hands over n items that were written from tail on. */
SPDL__PRIVATE spdl_result spdl__spsc_publish(spdl__ring_core *ring, uint64_t tail, uint64_t n) {
    /* pairs with the load of tail in spdl__spsc_look: the items are there before their index */
    spdl__store(&ring->tail, tail + n);
    spdl__barrier_light(ring->asymmetric); /* pairs with the heavy one in close */
    return spdl__ring_closing(ring) ? spdl__spsc_settle(ring, tail, n) : SPDL_OK;
}

/* Producer. Fetches the lines of free slots for writing: they were last read by the other core.
   Rings that are larger than a cache near the core lose by it. */
SPDL__PREFETCHES
SPDL__NOINLINE void spdl__spsc_fetch(const spdl__ring_core *ring, uint64_t from, uint64_t to) {
    if (ring->index_mask * ring->stride > SPDL__RING_FETCHED) return;
    for (; from < to; from += ring->line_items) spdl__prefetch_write(spdl__ring_slot(ring, from));
}

/* Producer. After a push of one item the quick path may go on to `limit`: not beyond what is known
   to be free, nor beyond what was fetched. That comes before publish, whose look at CLOSING undoes
   it unless the closer's store of 0 is still to come. */
SPDL__PRIVATE spdl_result spdl__spsc_push_n(spdl__ring_core *ring, const void *items, uint64_t n,
                                            uint64_t *moved) {
    const uint64_t tail = spdl__load_relaxed(&ring->tail), ahead = SPDL__RING_AHEAD;
    const char *from = (const char *)items;
    uint64_t run, next;
    if (spdl__ring_closing(ring)) return SPDL_CLOSED;
    n = spdl__spsc_room(ring, tail, n);
    if (n == 0) return SPDL_FULL;
    *moved = n;
    run = spdl__spsc_run(ring, tail, n);
    memcpy(spdl__ring_slot(ring, tail), from, (size_t)run * ring->stride);
    if (run < n) memcpy(ring->slots, from + run * ring->stride, (size_t)(n - run) * ring->stride);
    next = tail + n;
    if (n > 1) {
        const uint64_t free_to = ring->head_seen + ring->capacity;
        spdl__spsc_fetch(ring, next + ahead, spdl__min(next + ahead + n, free_to));
    } else if (ring->quick) {
        const uint64_t room = spdl__spsc_room(ring, next, 2 * ahead);
        spdl__store_relaxed(&ring->limit, next + spdl__min(room, ahead));
        spdl__spsc_fetch(ring, next + ahead, next + room);
    }
    return spdl__spsc_publish(ring, tail, n);
}

/* Producer. Up to `want` free slots that lie side by side. */
SPDL__PRIVATE spdl_result spdl__spsc_reserve(spdl__ring_core *ring, uint64_t want, void **slots,
                                             uint64_t *have) {
    const uint64_t tail = spdl__load_relaxed(&ring->tail);
    if (spdl__ring_closing(ring)) return SPDL_CLOSED;
    *slots = spdl__ring_slot(ring, tail);
    *have = spdl__spsc_run(ring, tail, spdl__spsc_room(ring, tail, want));
    return *have > 0 ? SPDL_OK : SPDL_FULL;
}

SPDL__PRIVATE spdl_result spdl__spsc_commit(spdl__ring_core *ring, uint64_t n) {
    const uint64_t tail = spdl__load_relaxed(&ring->tail);
    if (spdl__ring_closing(ring)) return SPDL_CLOSED;
    if (n > spdl__spsc_room(ring, tail, n)) return SPDL_E_INVALID;
    return spdl__spsc_publish(ring, tail, n);
}

/* Consumer. Looks for items beyond what it has seen; the result says why when there are none. `end`
   comes before tail: once it is decided, tail may count a push that was refused. */
SPDL__PRIVATE spdl_result spdl__spsc_look(spdl__ring_core *ring, uint64_t head) {
    const bool closed = spdl__ring_closed(ring);
    uint64_t end = SPDL__RING_OPEN;
    if (closed && head >= spdl__load(&ring->end)) return SPDL_CLOSED;
    ring->tail_seen = spdl__load(&ring->tail); /* pairs with its store in spdl__spsc_publish */
    if (ring->tail_seen != head) return SPDL_OK;
    if (!closed) return SPDL_EMPTY;
    SPDL_TEST_POINT("ring about to end");
    ring->quick_pops = false; /* they look at tail only */
    /* pairs with the cas of end in spdl__spsc_settle: the one that loses takes the other's end */
    if (!spdl__cas(&ring->end, &end, head)) ring->tail_seen = end;
    return SPDL_CLOSED;
}

SPDL__PRIVATE spdl_result spdl__spsc_pop_n(spdl__ring_core *ring, void *items, uint64_t n,
                                           uint64_t *moved) {
    const uint64_t head = spdl__load_relaxed(&ring->head);
    char *to = (char *)items;
    spdl_result result = SPDL_OK;
    uint64_t run;
    if (ring->tail_seen - head < n) result = spdl__spsc_look(ring, head);
    n = spdl__min(n, ring->tail_seen - head);
    if (n == 0) return result;
    *moved = n;
    run = spdl__spsc_run(ring, head, n);
    memcpy(to, spdl__ring_slot(ring, head), (size_t)run * ring->stride);
    if (run < n) memcpy(to + run * ring->stride, ring->slots, (size_t)(n - run) * ring->stride);
    spdl__store(&ring->head, head + n); /* pairs with its load in spdl__spsc_room */
    return SPDL_OK;
}

/* Consumer. Up to `want` items that lie side by side. */
SPDL__PRIVATE spdl_result spdl__spsc_peek(spdl__ring_core *ring, uint64_t want, void **items,
                                          uint64_t *have) {
    const uint64_t head = spdl__load_relaxed(&ring->head);
    spdl_result result = SPDL_OK;
    if (ring->tail_seen - head < want) result = spdl__spsc_look(ring, head);
    *items = spdl__ring_slot(ring, head);
    *have = spdl__spsc_run(ring, head, spdl__min(want, ring->tail_seen - head));
    return *have > 0 ? SPDL_OK : result;
}

SPDL__PRIVATE spdl_result spdl__spsc_release(spdl__ring_core *ring, uint64_t n) {
    const uint64_t head = spdl__load_relaxed(&ring->head);
    if (n > ring->tail_seen - head) return SPDL_E_INVALID;
    spdl__store(&ring->head, head + n); /* pairs with its load in spdl__spsc_room */
    return SPDL_OK;
}

/* ---- MPMC ---- */

/* A position that may stand after the last slot is the first of the next lap. */
SPDL__PRIVATE uint64_t spdl__mpmc_at(const spdl__ring_core *ring, uint64_t at) {
    if ((at & ring->index_mask) < ring->capacity) return at;
    return (at | ring->index_mask) + 1;
}

SPDL__PRIVATE uint64_t *spdl__mpmc_stamp(const spdl__ring_core *ring, uint64_t at) {
    return (uint64_t *)(void *)spdl__ring_slot(ring, at);
}

/* Claims up to n slots whose stamps are their positions plus `full`, *at is the first: for a push
   with &tail and 0, for a pop with &head and 1. None: the slot at *at is not ready, or tail is
   marked. The claim is relaxed, as stamps carry the order. */
SPDL__PRIVATE uint64_t spdl__mpmc_claim(const spdl__ring_core *ring, uint64_t *index, uint64_t full,
                                        uint64_t n, uint64_t *at) {
    uint64_t raw = spdl__load_relaxed(index);
    while ((raw & SPDL__RING_MARK) == 0) {
        uint64_t next = spdl__mpmc_at(ring, raw), fit = 0, stamp = 0, seen;
        for (*at = next; fit < n; ++fit) {
            /* pairs with the stores of stamps: the old item was read, or the new one is there */
            stamp = spdl__load(spdl__mpmc_stamp(ring, next));
            if (stamp != next + full) break;
            next = spdl__mpmc_at(ring, next + 1);
        }
        if (fit > 0 && spdl__cas_relaxed(index, &raw, next)) return fit;
        if (fit > 0) continue;
        seen = spdl__load(index);
        /* the stamp is older: not ready, unless other threads have moved on */
        if ((int64_t)(stamp - *at - full) < 0 && seen == raw) return 0;
        raw = seen;
    }
    return 0;
}

SPDL__PRIVATE spdl_result spdl__mpmc_push_n(spdl__ring_core *ring, const void *items, uint64_t n,
                                            uint64_t *moved) {
    const char *from = (const char *)items;
    uint64_t at = 0;
    *moved = n = spdl__mpmc_claim(ring, &ring->tail, 0, n, &at);
    if (n == 0)
        return spdl__load_relaxed(&ring->tail) & SPDL__RING_MARK ? SPDL_CLOSED : SPDL_FULL;
    SPDL_TEST_POINT("ring claimed for push");
    for (; n > 0; --n) {
        uint64_t *stamp = spdl__mpmc_stamp(ring, at);
        memcpy(stamp + 1, from, ring->item_bytes);
        spdl__store(stamp, at + 1); /* pairs with its load in a pop: the item is there */
        at = spdl__mpmc_at(ring, at + 1);
        from += ring->item_bytes;
    }
    return SPDL_OK;
}

SPDL__PRIVATE spdl_result spdl__mpmc_pop_n(spdl__ring_core *ring, void *items, uint64_t n,
                                           uint64_t *moved) {
    char *to = (char *)items;
    uint64_t at = 0;
    *moved = n = spdl__mpmc_claim(ring, &ring->head, 1, n, &at);
    if (n == 0) {
        /* to look at the tail of an open ring would take it from the producers */
        if (!spdl__ring_closed(ring)) return SPDL_EMPTY;
        return at >= spdl__mpmc_at(ring, spdl__load(&ring->tail) & ~SPDL__RING_MARK) ? SPDL_CLOSED
                                                                                    : SPDL_EMPTY;
    }
    SPDL_TEST_POINT("ring claimed for pop");
    for (; n > 0; --n) {
        uint64_t *stamp = spdl__mpmc_stamp(ring, at);
        memcpy(to, stamp + 1, ring->item_bytes);
        /* pairs with its load in a push: the item was read; free in the next lap */
        spdl__store(stamp, at + ring->index_mask + 1);
        at = spdl__mpmc_at(ring, at + 1);
        to += ring->item_bytes;
    }
    return SPDL_OK;
}

/* ---- the quick paths: one item of 8 bytes, nothing unusual ---- */

/* False: take the long way. True: done, and *waiting is what stands in pops_waiting; when it is not
   0 there is a thread to wake or, in SPSC, a close to settle. An SPSC ring has a limit above tail,
   an MPMC ring has cells whose stamp may equal tail; neither has the other's. */
SPDL__INLINE bool spdl__ring_quick_push(spdl__ring_core *ring, const void *item,
                                         uint32_t *waiting) {
    uint64_t tail = spdl__load_relaxed(&ring->tail);
    if (__builtin_expect(tail < spdl__load_relaxed(&ring->limit), 1)) {
        memcpy(ring->slots + (tail & ring->index_mask) * sizeof(uint64_t), item, sizeof(uint64_t));
        SPDL_TEST_POINT("ring filled");
        spdl__store(&ring->tail, tail + 1); /* pairs with its load in spdl__spsc_look */
    } else {
        spdl__ring_cell *cell = ring->cells + (tail & ring->cell_mask);
        /* pairs with the store of the stamp in a pop: the old item was read */
        if (spdl__load(&cell->stamp) != tail) return false;
        if (!spdl__cas_relaxed(&ring->tail, &tail, tail + 1)) return false;
        SPDL_TEST_POINT("ring claimed for push");
        memcpy(&cell->item, item, sizeof(uint64_t));
        spdl__store(&cell->stamp, tail + 1); /* pairs with its load in a pop: the item is there */
    }
    spdl__barrier_quick(); /* pairs with the heavy ones of a sleeper and of close */
    *waiting = spdl__load_relaxed32(&ring->pops_waiting);
    return true;
}

SPDL__INLINE bool spdl__ring_quick_pop(spdl__ring_core *ring, void *item, uint32_t *waiting) {
    uint64_t head = spdl__load_relaxed(&ring->head);
    if (__builtin_expect(ring->quick_pops, 1)) {
        if (head == ring->tail_seen) {
            ring->tail_seen = spdl__load(&ring->tail); /* pairs with its store in a push */
            if (head == ring->tail_seen) return false;
        }
        memcpy(item, ring->slots + (head & ring->index_mask) * sizeof(uint64_t), sizeof(uint64_t));
        SPDL_TEST_POINT("ring emptied");
        spdl__store(&ring->head, head + 1); /* pairs with its load in spdl__spsc_room */
    } else {
        spdl__ring_cell *cell = ring->cells + (head & ring->cell_mask);
        /* pairs with the store of the stamp in a push: the item is there */
        if (spdl__load(&cell->stamp) != head + 1) return false;
        if (!spdl__cas_relaxed(&ring->head, &head, head + 1)) return false;
        SPDL_TEST_POINT("ring claimed for pop");
        memcpy(item, &cell->item, sizeof(uint64_t));
        /* pairs with its load in a push: the item was read */
        spdl__store(&cell->stamp, head + ring->index_mask + 1);
    }
    spdl__barrier_quick(); /* pairs with the heavy one of a sleeper */
    *waiting = spdl__load_relaxed32(&ring->pushes_waiting);
    return true;
}

/* ---- both modes ---- */

/* Sizes, of a ring that is all zeros; `quick` says whether spdl__barrier_quick is a barrier. Then
   `slots` must be set to slot_count slots of `stride` bytes, and the ring started. */
SPDL__PRIVATE void spdl__ring_core_shape(spdl__ring_core *ring, spdl_ring_mode mode,
                                         uint64_t capacity, size_t item_bytes, bool quick) {
    const bool spsc = mode == SPDL_RING_SPSC;
    uint64_t lap = spsc ? 1 : 2;
    while (lap < capacity) lap *= 2;
    ring->mode = mode;
    ring->capacity = capacity;
    ring->item_bytes = item_bytes;
    ring->stride = spsc ? item_bytes : sizeof(uint64_t) + ((item_bytes + 7) & ~(size_t)7);
    ring->line_items = 1 + 63 / ring->stride;
    ring->index_mask = lap - 1;
    ring->slot_count = spsc ? lap : capacity + (capacity < lap); /* and one that never fits */
    ring->end = SPDL__RING_OPEN;
    ring->quick = quick && item_bytes == sizeof(uint64_t);
}

/* First stamps, and which quick path there is. */
SPDL__PRIVATE void spdl__ring_core_start(spdl__ring_core *ring) {
    const bool stamped = ring->mode == SPDL_RING_MPMC, cells = stamped && ring->quick;
    uint64_t i;
    for (i = 0; stamped && i < ring->slot_count; ++i)
        *spdl__mpmc_stamp(ring, i) = i < ring->capacity ? i : UINT64_MAX;
    ring->no_cell.stamp = UINT64_MAX;
    ring->quick_pops = ring->quick && !stamped;
    ring->cells = cells ? (spdl__ring_cell *)(void *)ring->slots : &ring->no_cell;
    ring->cell_mask = cells ? ring->index_mask : 0;
}

/* Everything that close does except waking. Any thread, any number of times. */
SPDL__PRIVATE void spdl__ring_core_close(spdl__ring_core *ring) {
    const bool spsc = ring->mode == SPDL_RING_SPSC;
    if (!spsc) (void)spdl__or(&ring->tail, SPDL__RING_MARK);
    (void)spdl__or32(&ring->pops_waiting, SPDL__RING_CLOSING);
    SPDL_TEST_POINT("ring closing");
    spdl__barrier_heavy(ring->asymmetric); /* pairs with the light ones after tail is stored */
    if (spsc) spdl__store_relaxed(&ring->limit, 0);
    SPDL_TEST_POINT("ring about to be closed");
    (void)spdl__or32(&ring->pops_waiting, SPDL__RING_CLOSED); /* pairs with spdl__ring_closed */
}

/* Items that were pushed and popped so far. Claims are relaxed, so tail may be seen older than
   head: then nothing is counted as inside. Acquires keep the three looks in order. */
SPDL__PRIVATE void spdl__ring_totals(const spdl__ring_core *ring, uint64_t *pushed,
                                     uint64_t *popped) {
    const uint64_t lap = ring->index_mask + 1;
    uint64_t head, tail;
    do { /* a head that stood still around the tail */
        head = spdl__load(&ring->head);
        tail = spdl__load(&ring->tail) & ~SPDL__RING_MARK;
    } while (head != spdl__load(&ring->head));
    tail = spdl__min(tail, spdl__load(&ring->end)); /* tail may count a push that was refused */
    if (ring->mode == SPDL_RING_MPMC) {
        head = head / lap * ring->capacity + (head & ring->index_mask);
        tail = tail / lap * ring->capacity + (tail & ring->index_mask);
    }
    *popped = head;
    *pushed = spdl__min(spdl__max(tail, head), head + ring->capacity);
}

/* ============================================================================================= */
/* >>ring-impl
   What is around the core: making, waiting, waking, the calls. A thread that is about to sleep says
   so in pops_waiting or pushes_waiting, does a heavy barrier and tries once more; a thread that has
   pushed or popped does a light barrier and looks there. One of the two sees the other. */

#define SPDL__RING_MAX_CAPACITY ((uint64_t)1 << 30)
#define SPDL__RING_MAX_ITEM 4096

/* The threads that wait on one side. They write the sums, the threads that wake them the event. */
typedef struct spdl__ring_side {
    uint32_t *waiting; /* how many, in the core; written by create */
    spdl__os_event event;
    uint64_t waits, wait_ns, sleeps;
    uint32_t inside; /* SPDL_DEBUG: a thread is in a call; written by it */
} spdl__ring_side;

struct spdl_ring {
    spdl__ring_core core;
    spdl__ring_side pushes; /* wait for room */
    spdl__ring_side pops;   /* wait for items */
    uint64_t wakes;         /* written by threads that wake others */
    spdl_allocator allocator; /* written by create */
};

/* A side of SPSC notices a second thread on it, in debug builds. (The quick paths do not look.) */
SPDL__INLINE bool spdl__ring_enter(const spdl_ring *ring, spdl__ring_side *side) {
    const bool entered = !SPDL__DEBUGS || ring->core.mode != SPDL_RING_SPSC ||
                         spdl__exchange32(&side->inside, 1) == 0;
    SPDL__ASSERT(entered && "spdl: two threads on a side of a ring that is for one");
    return entered;
}

/* Wakes n of the threads that wait on a side. After a close the pops that sleep wait only for the
   pushes that were under way, and all of them for the last: then each of these wakes all. */
SPDL__NOINLINE void spdl__ring_wake(spdl_ring *ring, spdl__ring_side *side, uint64_t n) {
    const uint32_t waiting = spdl__load_relaxed32(side->waiting);
    n = spdl__min(n, waiting & SPDL__RING_WAITING);
    if (n == 0) return;
    spdl__add(&ring->wakes, 1);
    spdl__os_event_wake(&side->event, waiting & SPDL__RING_CLOSING ? SPDL__ALL : (int)n);
}

/* n items or slots are there for threads that wait on a side. The barrier pairs with the heavy one
   in spdl__ring_sleep. */
SPDL__INLINE void spdl__ring_hint(spdl_ring *ring, spdl__ring_side *side, uint64_t n) {
    spdl__barrier_light(ring->core.asymmetric);
    if (spdl__load_relaxed32(side->waiting) != 0) spdl__ring_wake(ring, side, n);
}

/* What a call does, without waiting. Odd ones are for consumers. */
enum {
    SPDL__RING_PUSH,
    SPDL__RING_POP,
    SPDL__RING_COMMIT,
    SPDL__RING_RELEASE,
    SPDL__RING_RESERVE, /* these two give the slots, in *items */
    SPDL__RING_PEEK
};

SPDL__PRIVATE spdl__ring_side *spdl__ring_side_of(spdl_ring *ring, int op) {
    return op % 2 == 0 ? &ring->pushes : &ring->pops;
}

/* Up to n items. Out of line, as all long ways are, so that the quick paths stay small. */
SPDL__NOINLINE spdl_result spdl__ring_try(spdl_ring *ring, int op, void **items, uint64_t n,
                                          uint64_t *moved) {
    spdl__ring_core *core = &ring->core;
    const bool spsc = core->mode == SPDL_RING_SPSC;
    spdl__ring_side *side = spdl__ring_side_of(ring, op);
    spdl_result result;
    *moved = 0;
    if (n == 0 && op <= SPDL__RING_POP) return SPDL_OK;
    if (!spdl__ring_enter(ring, side)) return SPDL_E_INVALID;
    if (op == SPDL__RING_PUSH)
        result = spsc ? spdl__spsc_push_n(core, *items, n, moved)
                      : spdl__mpmc_push_n(core, *items, n, moved);
    else if (op == SPDL__RING_POP)
        result = spsc ? spdl__spsc_pop_n(core, *items, n, moved)
                      : spdl__mpmc_pop_n(core, *items, n, moved);
    else if (op <= SPDL__RING_RELEASE)
        result = op == SPDL__RING_COMMIT ? spdl__spsc_commit(core, *moved = n)
                                         : spdl__spsc_release(core, *moved = n);
    else
        result = op == SPDL__RING_RESERVE ? spdl__spsc_reserve(core, n, items, moved)
                                          : spdl__spsc_peek(core, n, items, moved);
    if (result != SPDL_OK)
        *moved = 0; /* close may have been faster */
    else if (op <= SPDL__RING_RELEASE)
        spdl__ring_hint(ring, spdl__ring_side_of(ring, op + 1), *moved);
    if (SPDL__DEBUGS) spdl__store32(&side->inside, 0);
    return result;
}

SPDL_API spdl_result spdl_ring_try_push_n(spdl_ring *ring, const void *items, uint64_t n,
                                          uint64_t *moved) {
    void *from = SPDL__UNCONST(items);
    return spdl__ring_try(ring, SPDL__RING_PUSH, &from, n, moved);
}

SPDL_API spdl_result spdl_ring_try_pop_n(spdl_ring *ring, void *items, uint64_t n,
                                         uint64_t *moved) {
    return spdl__ring_try(ring, SPDL__RING_POP, &items, n, moved);
}

/* What is left to do after a quick push that found `waiting`. */
SPDL__NOINLINE spdl_result spdl__ring_quick_pushed(spdl_ring *ring, uint32_t waiting) {
    spdl__ring_core *core = &ring->core;
    spdl_result result = SPDL_OK;
    if ((waiting & SPDL__RING_CLOSING) != 0 && core->mode == SPDL_RING_SPSC)
        result = spdl__spsc_settle(core, spdl__load_relaxed(&core->tail) - 1, 1);
    if (result == SPDL_OK) spdl__ring_wake(ring, &ring->pops, 1);
    return result;
}

SPDL_API SPDL__HOT spdl_result spdl_ring_try_push(spdl_ring *ring, const void *item) {
    uint32_t waiting;
    uint64_t moved;
    if (!spdl__ring_quick_push(&ring->core, item, &waiting))
        return spdl_ring_try_push_n(ring, item, 1, &moved);
    return SPDL__LIKELY(waiting == 0) ? SPDL_OK : spdl__ring_quick_pushed(ring, waiting);
}

SPDL_API SPDL__HOT spdl_result spdl_ring_try_pop(spdl_ring *ring, void *item) {
    uint32_t waiting;
    uint64_t moved;
    if (!spdl__ring_quick_pop(&ring->core, item, &waiting))
        return spdl_ring_try_pop_n(ring, item, 1, &moved);
    if (SPDL__UNLIKELY(waiting != 0)) spdl__ring_wake(ring, &ring->pushes, 1);
    return SPDL_OK;
}

typedef struct spdl__ring_call {
    spdl_ring *ring;
    int op;
    void *items; /* that a push reads, or a pop writes; in place: the slots */
    uint64_t n;
    uint64_t moved; /* so far */
} spdl__ring_call;

/* Does what it can, and returns SPDL_FULL or SPDL_EMPTY while it has to go on. */
SPDL__PRIVATE spdl_result spdl__ring_attempt(spdl__ring_call *call) {
    spdl_result result;
    uint64_t moved;
    void *from;
    if (call->op != SPDL__RING_PUSH)
        return spdl__ring_try(call->ring, call->op, &call->items, call->n, &call->moved);
    from = (char *)call->items + call->moved * call->ring->core.item_bytes;
    result = spdl__ring_try(call->ring, call->op, &from, call->n - call->moved, &moved);
    call->moved += moved;
    return result == SPDL_OK && call->moved < call->n ? SPDL_FULL : result;
}

SPDL__PRIVATE bool spdl__ring_must_wait(spdl_result result) {
    return result == SPDL_FULL || result == SPDL_EMPTY;
}

/* A wake-up may have come too early: an earlier push (or pop) was still under way, the thread that
   was woken found nothing and slept again. So a thread that wakes and succeeds wakes the next if
   there is more. */
SPDL__PRIVATE void spdl__ring_pass_on(spdl_ring *ring, spdl__ring_side *side) {
    const uint64_t count = spdl_ring_count(ring);
    if (side == &ring->pops ? count > 0 : count < ring->core.capacity)
        spdl__ring_hint(ring, side, 1);
}

/* Sleeps until an attempt succeeds. A wake-up that comes with the deadline is still used: there is
   one more attempt before giving up. */
SPDL__PRIVATE spdl_result spdl__ring_sleep(spdl__ring_call *call, spdl__ring_side *side,
                                           uint64_t deadline) {
    spdl_result slept = SPDL_OK, result;
    while (slept != SPDL_TIMEOUT) {
        /* pairs with the add in spdl__os_event_wake */
        const uint32_t word = spdl__load32(&side->event.word);
        spdl__add32(side->waiting, 1);
        spdl__barrier_heavy(call->ring->core.asymmetric); /* pairs with light ones after a move */
        result = spdl__ring_attempt(call);
        if (!spdl__ring_must_wait(result)) {
            spdl__sub32(side->waiting, 1);
            return result;
        }
        SPDL_TEST_POINT("ring about to sleep");
        spdl__add(&side->sleeps, 1);
        slept = spdl__os_event_sleep(&side->event, word, deadline);
        spdl__sub32(side->waiting, 1);
        result = spdl__ring_attempt(call);
        if (result == SPDL_OK) spdl__ring_pass_on(call->ring, side);
        if (!spdl__ring_must_wait(result)) return result;
        if (spdl__late(deadline)) break;
    }
    return SPDL_TIMEOUT;
}

/* Spins, yields, then sleeps until an attempt succeeds. Yields may take long, and a call that makes
   progress never gets to the sleep, so both look at the deadline. */
SPDL__PRIVATE spdl_result spdl__ring_wait(spdl__ring_call *call, int64_t timeout_ns) {
    spdl__ring_side *side = spdl__ring_side_of(call->ring, call->op);
    spdl_result result = spdl__ring_attempt(call);
    uint64_t deadline, moved = call->moved, since = 0;
    int round = 0;
    if (!spdl__ring_must_wait(result)) return result;
    if (timeout_ns == 0) return SPDL_TIMEOUT;
    deadline = spdl__deadline(timeout_ns);
    while (spdl__ring_must_wait(result) && spdl__backoff(&round, SPDL_YIELDS)) {
        if (round >= SPDL_SPINS && since == 0) since = spdl_time_ns();
        result = spdl__ring_attempt(call);
        if (call->moved == moved && round < SPDL_SPINS) continue;
        if (spdl__ring_must_wait(result) && spdl__late(deadline)) result = SPDL_TIMEOUT;
        if (call->moved != moved) round = 0;
        moved = call->moved;
    }
    if (spdl__ring_must_wait(result)) result = spdl__ring_sleep(call, side, deadline);
    if (since != 0) {
        spdl__add(&side->waits, 1);
        spdl__add(&side->wait_ns, spdl_time_ns() - since);
    }
    return result;
}

SPDL__NOINLINE spdl_result spdl__ring_many(spdl_ring *ring, int op, void *items, uint64_t n,
                                           uint64_t *moved, int64_t timeout_ns) {
    spdl__ring_call call = { ring, op, items, n, 0 };
    spdl_result result;
    if (moved != NULL) *moved = 0;
    if (ring == NULL || moved == NULL || (items == NULL && n > 0)) return SPDL_E_INVALID;
    if (n == 0) return SPDL_OK;
    result = spdl__ring_wait(&call, timeout_ns);
    *moved = call.moved;
    return result;
}

SPDL_API spdl_result spdl_ring_push_n(spdl_ring *ring, const void *items, uint64_t n,
                                      uint64_t *moved, int64_t timeout_ns) {
    return spdl__ring_many(ring, SPDL__RING_PUSH, SPDL__UNCONST(items), n, moved, timeout_ns);
}

SPDL_API spdl_result spdl_ring_pop_n(spdl_ring *ring, void *items, uint64_t n, uint64_t *moved,
                                     int64_t timeout_ns) {
    return spdl__ring_many(ring, SPDL__RING_POP, items, n, moved, timeout_ns);
}

SPDL_API SPDL__HOT spdl_result spdl_ring_push(spdl_ring *ring, const void *item,
                                              int64_t timeout_ns) {
    uint32_t waiting;
    uint64_t moved;
    if (ring == NULL || item == NULL) return SPDL_E_INVALID;
    if (!spdl__ring_quick_push(&ring->core, item, &waiting))
        return spdl_ring_push_n(ring, item, 1, &moved, timeout_ns);
    return SPDL__LIKELY(waiting == 0) ? SPDL_OK : spdl__ring_quick_pushed(ring, waiting);
}

SPDL_API SPDL__HOT spdl_result spdl_ring_pop(spdl_ring *ring, void *item, int64_t timeout_ns) {
    uint32_t waiting;
    uint64_t moved;
    if (ring == NULL || item == NULL) return SPDL_E_INVALID;
    if (!spdl__ring_quick_pop(&ring->core, item, &waiting))
        return spdl_ring_pop_n(ring, item, 1, &moved, timeout_ns);
    if (SPDL__UNLIKELY(waiting != 0)) spdl__ring_wake(ring, &ring->pushes, 1);
    return SPDL_OK;
}

SPDL__PRIVATE spdl_result spdl__ring_in_place(spdl_ring *ring, int op, uint64_t n,
                                              void **slots, uint64_t *have, int64_t timeout_ns) {
    spdl__ring_call call = { ring, op, NULL, n, 0 };
    spdl_result result = SPDL_E_INVALID;
    if (slots != NULL) *slots = NULL;
    if (have != NULL) *have = 0;
    if (ring != NULL && slots != NULL && have != NULL && n > 0 && ring->core.mode == SPDL_RING_SPSC)
        result = spdl__ring_wait(&call, timeout_ns);
    if (result != SPDL_OK) return result;
    *slots = call.items;
    *have = call.moved;
    return SPDL_OK;
}

SPDL_API spdl_result spdl_ring_reserve(spdl_ring *ring, uint64_t n, void **slots, uint64_t *have,
                                       int64_t timeout_ns) {
    return spdl__ring_in_place(ring, SPDL__RING_RESERVE, n, slots, have, timeout_ns);
}

SPDL_API spdl_result spdl_ring_peek(spdl_ring *ring, uint64_t n, void **items, uint64_t *have,
                                    int64_t timeout_ns) {
    return spdl__ring_in_place(ring, SPDL__RING_PEEK, n, items, have, timeout_ns);
}

SPDL_API spdl_result spdl_ring_commit(spdl_ring *ring, uint64_t n) {
    if (ring == NULL || ring->core.mode != SPDL_RING_SPSC) return SPDL_E_INVALID;
    return spdl__ring_try(ring, SPDL__RING_COMMIT, NULL, n, &n);
}

SPDL_API spdl_result spdl_ring_release(spdl_ring *ring, uint64_t n) {
    if (ring == NULL || ring->core.mode != SPDL_RING_SPSC) return SPDL_E_INVALID;
    return spdl__ring_try(ring, SPDL__RING_RELEASE, NULL, n, &n);
}

SPDL_API void spdl_ring_close(spdl_ring *ring) {
    spdl__ring_core_close(&ring->core);
    spdl__ring_hint(ring, &ring->pops, SPDL__RING_WAITING);
    spdl__ring_hint(ring, &ring->pushes, SPDL__RING_WAITING);
}

SPDL_API uint64_t spdl_ring_count(const spdl_ring *ring) {
    uint64_t pushed, popped;
    spdl__ring_totals(&ring->core, &pushed, &popped);
    return pushed - popped;
}

SPDL_API uint64_t spdl_ring_capacity(const spdl_ring *ring) { return ring->core.capacity; }

SPDL_API void spdl_ring_stats(const spdl_ring *ring, spdl_ring_counters *counters) {
    spdl__ring_totals(&ring->core, &counters->pushed, &counters->popped);
    counters->count = counters->pushed - counters->popped;
    counters->push_waits = spdl__load_relaxed(&ring->pushes.waits);
    counters->pop_waits = spdl__load_relaxed(&ring->pops.waits);
    counters->push_wait_ns = spdl__load_relaxed(&ring->pushes.wait_ns);
    counters->pop_wait_ns = spdl__load_relaxed(&ring->pops.wait_ns);
    counters->push_sleeps = spdl__load_relaxed(&ring->pushes.sleeps);
    counters->pop_sleeps = spdl__load_relaxed(&ring->pops.sleeps);
    counters->wakes = spdl__load_relaxed(&ring->wakes);
}

SPDL__PRIVATE spdl_result spdl__ring_check(const spdl_ring_desc *desc) {
    if (desc->capacity < 1 || desc->capacity > SPDL__RING_MAX_CAPACITY)
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "spdl: ring: capacity is %llu, must be 1 to %llu",
                               (spdl__llu)desc->capacity, (spdl__llu)SPDL__RING_MAX_CAPACITY);
    if (desc->item_bytes > SPDL__RING_MAX_ITEM)
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "spdl: ring: item_bytes is %llu, must be at most %d",
                               (spdl__llu)desc->item_bytes, SPDL__RING_MAX_ITEM);
    if (desc->mode != SPDL_RING_MPMC && desc->mode != SPDL_RING_SPSC)
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "spdl: ring: mode is %d, must be SPDL_RING_MPMC or SPDL_RING_SPSC",
                               (int)desc->mode);
    return spdl__allocator_check(&desc->allocator, "ring", desc->error);
}

/* A ring is one block: itself, and its slots from the next cache line on. In strides. */
#define SPDL__RING_HEAD ((sizeof(spdl_ring) + SPDL_CACHE_LINE - 1) & ~(size_t)(SPDL_CACHE_LINE - 1))
SPDL__PRIVATE size_t spdl__ring_strides(const spdl__ring_core *core) {
    return (size_t)core->slot_count + SPDL__RING_HEAD / core->stride + 1;
}

SPDL_API spdl_result spdl_ring_create(spdl_ring **ring, const spdl_ring_desc *desc) {
    spdl__ring_core core;
    spdl_ring *made;
    spdl_result result;
    if (ring == NULL) return SPDL_E_INVALID;
    *ring = NULL;
    if (desc == NULL) return SPDL_E_INVALID;
    spdl__error_clear(desc->error);
    result = spdl__ring_check(desc);
    if (result != SPDL_OK) return result;
    memset(&core, 0, sizeof(core));
    core.asymmetric = spdl__os_barrier();
    spdl__ring_core_shape(&core, desc->mode, desc->capacity,
                          desc->item_bytes ? desc->item_bytes : sizeof(void *),
                          !SPDL__DEBUGS && (core.asymmetric || !SPDL__OS_BARRIER));
    made = (spdl_ring *)spdl__alloc_zeroed(&desc->allocator, spdl__ring_strides(&core), core.stride,
                                           SPDL_CACHE_LINE);
    if (made == NULL) goto no_ring;
    if (!spdl__os_event_init(&made->pushes.event)) goto no_event;
    if (!spdl__os_event_init(&made->pops.event)) goto no_second_event;
    made->core = core;
    made->core.slots = (unsigned char *)made + SPDL__RING_HEAD;
    made->allocator = desc->allocator;
    made->pushes.waiting = &made->core.pushes_waiting;
    made->pops.waiting = &made->core.pops_waiting;
    spdl__ring_core_start(&made->core);
    *ring = made;
    return SPDL_OK;
no_second_event:
    spdl__os_event_fini(&made->pushes.event);
no_event:
    spdl__free(&desc->allocator, made, spdl__ring_strides(&core) * core.stride);
no_ring:
    return spdl__error_set(desc->error, SPDL_E_NOMEM, "spdl: ring: out of memory");
}

SPDL_API void spdl_ring_destroy(spdl_ring *ring, void (*free_item)(void *item, void *user),
                                void *user) {
    spdl_allocator allocator;
    spdl__ring_core *core;
    uint64_t pushed, popped, at;
    if (ring == NULL) return;
    core = &ring->core;
    allocator = ring->allocator;
    spdl__ring_totals(core, &pushed, &popped);
    for (at = core->head; free_item != NULL && popped < pushed; ++popped, ++at) {
        if (core->mode == SPDL_RING_SPSC) {
            free_item(spdl__ring_slot(core, at), user);
        } else {
            at = spdl__mpmc_at(core, at);
            free_item(spdl__mpmc_stamp(core, at) + 1, user);
        }
    }
    spdl__os_event_fini(&ring->pops.event);
    spdl__os_event_fini(&ring->pushes.event);
    spdl__free(&allocator, ring, spdl__ring_strides(core) * core->stride);
}

/* ============================================================================================= */
/* >>pool-impl
   Workers look for something to do: a job, or a step of an attached pipeline ("client"). A worker
   that finds nothing looks again a few times, 16 pauses and 8 turns given away, and then sleeps on
   its bell.

   The wake rule. A worker that goes to sleep reads its bell, announces itself (`asleep`, then
   `sleepers`), clears `waking`, looks at everything once more, and sleeps. A thread that makes
   something runnable, and does not look for work itself next, publishes it, passes a full barrier
   and reads `sleepers`. So one of the two sees the other. If some worker sleeps, `waking` is clear
   and what the thread has changed can run, it sets `waking` and rings the bell of the first worker
   in the pool that is `asleep`. The first, not the one that has slept longest: two workers do what
   two can do, their caches stay warm, and the system has no threads to place that hardly run.
   At most one wake is under way at a time: every worker that is about to sleep or has stopped
   sleeping clears `waking`, always before a full barrier and a look at everything. So a thread that
   finds it set relies on a look that is still to come, and a worker that finds work looks at
   everything again before its first call, which passes the wake on. (tests/model/sit.pml checks
   this exhaustively.)

   The upper half of `sleepers` counts trainers and producers that wait: takes and puts read one
   word to know that nobody does.

   Turns. Of several pipelines each worker steps in the one it has worked least for, for up to
   SPDL__TURN_NS; one that had nothing to do saves up no more than two turns.

   Guests. A place of a guest is a worker without a thread: `taken` says that one is there. A guest
   never sleeps, so nobody wakes it, and `waking` is nothing to it: as a worker that leaves a client
   with work in it, it hints before it goes. Whoever destroys the pool waits for `taken`, the last
   word that a guest writes.

   Threads: workers run worker_main; clients come and go from any thread; `slot.users` counts the
   workers inside a client, and detach waits for it to be 0. The pool owns threads, queue and
   locals; jobs own their args. */

#define SPDL__MAX_WORKERS 256
#define SPDL__MAX_CLIENTS 64 /* bits of a word */
#define SPDL__MAX_QUEUE (1 << 24)
#define SPDL__IDLE_YIELDS 8   /* turns a worker or trainer gives away before it sleeps; 64 cost 18 %
                                 more processor time beside steps of a millisecond */
#define SPDL__TURN_NS 1000000 /* how long a worker stays with one client when there are others */

typedef struct spdl__client {
    /* written by its owner before it is attached */
    bool (*step)(void *self, int worker);     /* runs one piece of work; false: there is none */
    bool (*runnable)(void *self, int worker); /* whether step would find some; -1: any worker */
    void *self;
} spdl__client;

typedef struct spdl__client_slot {
    uint64_t client; /* a spdl__client *, or 0; written by attach and detach */
    uint32_t taken;  /* from attach until detach has returned; written by these */
    uint32_t users;  /* workers inside the client; written by them */
    char pad[SPDL_CACHE_LINE];
} spdl__client_slot;

typedef struct spdl__job { /* written by submit */
    spdl_job_fn fn;
    void *arg;
} spdl__job;

typedef struct spdl__worker {
    /* written by create */
    spdl_pool *pool;
    int index;
    spdl__os_thread thread;
    spdl__os_event bell;
    /* written by the worker */
    bool initialised;
    uint64_t id;
    uint32_t asleep; /* or about to be; cleared by the thread that rings, too */
    void *local;
    /* written by the guest whose place it is */
    uint32_t taken;
    uint64_t until; /* when it begins no call any more; create: SPDL__NEVER, for workers */
    /* written by the worker: turns, when there are several clients */
    uint64_t worked_ns[SPDL__MAX_CLIENTS];
    uint64_t least_ns; /* none of these counts as less */
} spdl__worker;

struct spdl_pool {
    /* written by create */
    spdl_pool_desc desc;
    char name[SPDL_NAME_BYTES];
    spdl__worker *worker;
    int places;         /* workers, and after them guests */
    int bells, threads; /* workers that have one */
    spdl_ring *jobs;
    /* written by workers at their start */
    uint32_t started;
    uint32_t init_result; /* the first result of init that was not SPDL_OK, as bits */
    uint32_t policy_refused;
    /* written by submit and by workers: jobs accepted and not ended */
    uint64_t pending;
    spdl__os_event idle; /* signalled when `pending` is 0, a worker has started or left a client */
    /* written by destroy */
    uint32_t quit;
    void (*leave)(void *ctx); /* by pool_abandon, before `quit` */
    void *leave_ctx;
    char pad0[SPDL_CACHE_LINE];
    /* written by threads that sleep and those that wake them; read by all */
    uint32_t sleepers; /* workers asleep; SPDL__WAITER for each trainer or producer that waits */
    uint32_t waking;   /* a worker was woken and has yet to look */
    char pad1[SPDL_CACHE_LINE];
    uint32_t slots_used; /* slots from here on were never taken; written by attach */
    spdl__client_slot slot[SPDL__MAX_CLIENTS];
};

#define SPDL__WAITER 0x10000u
#define SPDL__ASLEEP (SPDL__WAITER - 1)

/* --- clients --- */

SPDL__PRIVATE const spdl__client *spdl__slot_client(const spdl__client_slot *slot) {
    return (const spdl__client *)(uintptr_t)spdl__load(&slot->client);
}

SPDL__PRIVATE void spdl__client_leave(spdl_pool *pool, spdl__client_slot *slot) {
    spdl__sub32(&slot->users, 1);
    spdl__barrier_after_rmw(); /* pairs with that in detach */
    if (spdl__slot_client(slot) == NULL) spdl__os_event_wake(&pool->idle, SPDL__ALL);
}

/* A worker that enters counts itself first and reads the client then; detach clears the client
   first and reads the count then. Between the two each has a full barrier, so one of them sees the
   other. NULL: there is no client, and nothing to leave. */
SPDL__PRIVATE const spdl__client *spdl__client_enter(spdl_pool *pool, spdl__client_slot *slot) {
    const spdl__client *client;
    if (spdl__slot_client(slot) == NULL) return NULL;
    spdl__add32(&slot->users, 1);
    spdl__barrier_after_rmw(); /* pairs with that in detach */
    client = spdl__slot_client(slot);
    if (client == NULL) spdl__client_leave(pool, slot);
    return client;
}

/* --- who is woken --- */

/* Any thread. Whether a worker would find something now. `inside` is the client whose step is
   running on this thread, which need not be entered, or NULL. */
SPDL__PRIVATE bool spdl__pool_runnable(spdl_pool *pool, int worker, const void *inside) {
    const uint32_t used = spdl__load32(&pool->slots_used);
    uint32_t i;
    if (spdl_ring_count(pool->jobs) > 0) return true;
    for (i = 0; i < used; ++i) {
        const spdl__client *client = spdl__slot_client(&pool->slot[i]);
        const bool here = client != NULL && used == 1 && inside != NULL;
        bool found;
        if (!here) client = spdl__client_enter(pool, &pool->slot[i]);
        found = client != NULL && client->runnable(client->self, worker);
        if (client != NULL && !here) spdl__client_leave(pool, &pool->slot[i]);
        if (found) return true;
    }
    return false;
}

/* After a full barrier: whether it is worth looking for something to wake a worker for. */
SPDL__INLINE bool spdl__pool_has_sleepers(const spdl_pool *pool) {
    return (spdl__load_relaxed32(&pool->sleepers) & SPDL__ASLEEP) != 0 &&
           spdl__load_relaxed32(&pool->waking) == 0;
}

/* Whether it slept. */
SPDL__PRIVATE bool spdl__worker_wake(spdl__worker *worker) {
    uint32_t asleep = 1;
    if (spdl__load_relaxed32(&worker->asleep) == 0 || !spdl__cas32(&worker->asleep, &asleep, 0))
        return false;
    spdl__os_event_wake(&worker->bell, 1);
    return true;
}

/* If none is asleep any more, others have woken those counted in `sleepers`: they have yet to look,
   and will see what was published. */
SPDL__PRIVATE void spdl__pool_wake_one(spdl_pool *pool) {
    uint32_t none = 0;
    int i;
    if (!spdl__cas32(&pool->waking, &none, 1)) return;
    for (i = 0; i < pool->desc.workers; ++i)
        if (spdl__worker_wake(&pool->worker[i])) return;
    (void)spdl__exchange32(&pool->waking, 0);
}

SPDL__PRIVATE void spdl__pool_wake_all(spdl_pool *pool) {
    int i;
    for (i = 0; i < pool->desc.workers; ++i) (void)spdl__worker_wake(&pool->worker[i]);
}

/* Call after making something runnable, unless the same worker looks for work next. */
SPDL__PRIVATE void spdl__pool_hint(spdl_pool *pool) {
    spdl__full_barrier();
    if (spdl__pool_has_sleepers(pool) && spdl__pool_runnable(pool, -1, NULL))
        spdl__pool_wake_one(pool);
}

/* --- workers --- */

/* Sleeps, unless there is something to do after all. */
SPDL__PRIVATE void spdl__pool_park(spdl_pool *pool, spdl__worker *worker) {
    const uint32_t word = spdl__load32(&worker->bell.word);
    spdl__store32(&worker->asleep, 1);
    spdl__add32(&pool->sleepers, 1);
    SPDL_TEST_POINT("pool announced");
    (void)spdl__exchange32(&pool->waking, 0);
    spdl__barrier_after_rmw(); /* pairs with those after each publication */
    SPDL_TEST_POINT("pool about to sleep");
    if (!spdl__load32(&pool->quit) && !spdl__pool_runnable(pool, worker->index, NULL))
        (void)spdl__os_event_sleep(&worker->bell, word, SPDL__NEVER);
    /* before `asleep`: a worker that is counted can be woken, or was */
    spdl__sub32(&pool->sleepers, 1);
    spdl__store32(&worker->asleep, 0);
    (void)spdl__exchange32(&pool->waking, 0);
    spdl__barrier_after_rmw();
}

/* Works for one client until it has nothing to do, or others should have a turn. Whether it had
   something to do. */
SPDL__PRIVATE bool spdl__pool_visit(spdl_pool *pool, spdl__worker *worker, uint32_t at) {
    spdl__client_slot *slot = &pool->slot[at];
    const spdl__client *client = spdl__client_enter(pool, slot);
    const bool alone = spdl__load32(&pool->slots_used) == 1;
    const uint64_t since = alone ? 0 : spdl_time_ns();
    bool found = false, over = false;
    if (client == NULL) return false;
    while (!over && client->step(client->self, worker->index)) {
        found = true;
        over = (spdl__load_relaxed(&pool->pending) != 0 && spdl_ring_count(pool->jobs) > 0) ||
               spdl__load32(&pool->quit) || spdl__late(worker->until) ||
               (alone ? spdl__load_relaxed32(&pool->slots_used) != 1
                      : spdl_time_ns() - since > SPDL__TURN_NS);
    }
    spdl__client_leave(pool, slot);
    if (!alone && found) worker->worked_ns[at] += spdl_time_ns() - since;
    if (over) spdl__pool_hint(pool); /* it may have more, and we look elsewhere */
    return found;
}

/* A turn with a client that has something to do, the one first that this worker has worked least
   for. None is further behind than two turns: it is new, or had nothing to do. */
SPDL__PRIVATE bool spdl__pool_turn(spdl_pool *pool, spdl__worker *worker) {
    const uint32_t used = spdl__load32(&pool->slots_used);
    uint64_t *worked = worker->worked_ns, tried = 0, turn; /* a bit for each client */
    uint32_t i, left, least;
    for (left = used; left > 0; --left) {
        for (i = 0, least = used; i < used; ++i) {
            worked[i] = spdl__max(worked[i], worker->least_ns);
            if ((tried >> i & 1) == 0 && (least == used || worked[i] < worked[least])) least = i;
        }
        tried |= (uint64_t)1 << least;
        turn = worked[least];
        if (!spdl__pool_visit(pool, worker, least)) continue;
        if (turn > worker->least_ns + 2 * SPDL__TURN_NS)
            worker->least_ns = turn - 2 * SPDL__TURN_NS;
        return true;
    }
    return false;
}

SPDL__PRIVATE bool spdl__pool_job(spdl_pool *pool, spdl__worker *worker) {
    const spdl_profiler *profiler = &pool->desc.profiler;
    spdl__job job;
    if (spdl_ring_try_pop(pool->jobs, &job) != SPDL_OK) return false;
    spdl__pool_hint(pool);
    spdl__profile(profiler, SPDL_EVENT_TASK_BEGIN, pool->name, (uint64_t)worker->index);
    job.fn(job.arg, worker->index, worker->local);
    spdl__profile(profiler, SPDL_EVENT_TASK_END, pool->name, (uint64_t)worker->index);
    if (spdl__sub(&pool->pending, 1) == 1) spdl__os_event_wake(&pool->idle, SPDL__ALL);
    return true;
}

/* A job, and a turn with a client. Whether there was anything to do. */
SPDL__PRIVATE bool spdl__worker_turn(spdl_pool *pool, spdl__worker *worker) {
    const bool job = spdl__pool_job(pool, worker);
    return spdl__pool_turn(pool, worker) || job;
}

SPDL__PRIVATE void spdl__worker_run(spdl__worker *worker) {
    spdl_pool *pool = worker->pool;
    const spdl_profiler *profiler = &pool->desc.profiler;
    int round = 0;
    while (!spdl__load32(&pool->quit)) {
        if (spdl__worker_turn(pool, worker)) {
            round = 0;
        } else if (!spdl__backoff(&round, SPDL__IDLE_YIELDS)) {
            spdl__profile(profiler, SPDL_EVENT_WAIT_BEGIN, pool->name, (uint64_t)worker->index);
            spdl__pool_park(pool, worker);
            spdl__profile(profiler, SPDL_EVENT_WAIT_END, pool->name, (uint64_t)worker->index);
            round = 0;
        }
    }
}

SPDL__PRIVATE void spdl__worker_init(spdl__worker *worker) {
    spdl_pool *pool = worker->pool;
    const spdl_pool_desc *desc = &pool->desc;
    spdl_result result = SPDL_OK;
    uint32_t none = 0;
    if (desc->init != NULL) result = desc->init(desc->ctx, worker->index, &worker->local);
    worker->initialised = result == SPDL_OK;
    if (result != SPDL_OK)
        (void)spdl__cas32(&pool->init_result, &none, (uint32_t)(int)result);
}

SPDL__PRIVATE void *spdl__worker_main(void *arg) {
    spdl__worker *worker = (spdl__worker *)arg;
    spdl_pool *pool = worker->pool;
    const spdl_pool_desc *desc = &pool->desc;
    spdl__store(&worker->id, spdl__os_thread_id());
    spdl__profile(&desc->profiler, SPDL_EVENT_THREAD_BEGIN, pool->name, (uint64_t)worker->index);
    if (worker->thread.refused) spdl__store32(&pool->policy_refused, 1);
    spdl__worker_init(worker);
    spdl__add32(&pool->started, 1);
    spdl__os_event_wake(&pool->idle, SPDL__ALL);
    spdl__worker_run(worker);
    if (worker->initialised && desc->fini != NULL)
        desc->fini(desc->ctx, worker->index, worker->local);
    spdl__profile(&desc->profiler, SPDL_EVENT_THREAD_END, pool->name, (uint64_t)worker->index);
    if (pool->leave != NULL) pool->leave(pool->leave_ctx); /* the pool may be gone then */
    return NULL;
}

SPDL__PRIVATE void spdl__pool_await32(spdl_pool *pool, const uint32_t *word, uint32_t value) {
    for (;;) {
        const uint32_t ticket = spdl__load32(&pool->idle.word);
        if (spdl__load32(word) == value) return;
        (void)spdl__os_event_sleep(&pool->idle, ticket, SPDL__NEVER);
    }
}

/* Lets a client's steps be run by the workers. `client` stays the caller's. */
SPDL__PRIVATE spdl__client_slot *spdl__pool_attach(spdl_pool *pool, const spdl__client *client) {
    uint32_t i;
    for (i = 0; i < SPDL__MAX_CLIENTS; ++i) {
        spdl__client_slot *slot = &pool->slot[i];
        uint32_t no = 0;
        uint32_t used = spdl__load32(&pool->slots_used);
        if (!spdl__cas32(&slot->taken, &no, 1)) continue;
        while (used < i + 1 && !spdl__cas32(&pool->slots_used, &used, i + 1)) {}
        spdl__store(&slot->client, (uint64_t)(uintptr_t)client);
        spdl__full_barrier();
        spdl__pool_wake_all(pool); /* each worker has a look: there may be an init to run */
        return slot;
    }
    return NULL;
}

/* When it returns no worker is inside the client, nor will be. */
SPDL__PRIVATE void spdl__pool_detach(spdl_pool *pool, spdl__client_slot *slot) {
    spdl__store(&slot->client, 0);
    spdl__full_barrier();
    spdl__pool_await32(pool, &slot->users, 0);
    spdl__store32(&slot->taken, 0);
}

SPDL__PRIVATE bool spdl__pool_is_worker(const spdl_pool *pool) {
    int i;
    for (i = 0; i < pool->places; ++i)
        if (spdl__load(&pool->worker[i].id) == spdl__os_thread_id()) return true;
    return false;
}

/* --- guests --- */

/* NULL: there is no free place. */
SPDL__PRIVATE spdl__worker *spdl__guest_enter(spdl_pool *pool, uint64_t until) {
    int i;
    for (i = pool->desc.workers; i < pool->places; ++i) {
        spdl__worker *guest = &pool->worker[i];
        uint32_t no = 0;
        if (spdl__load_relaxed32(&guest->taken) || !spdl__cas32(&guest->taken, &no, 1)) continue;
        spdl__store(&guest->id, spdl__os_thread_id());
        guest->until = until;
        return guest;
    }
    return NULL;
}

/* Passes on what it leaves; with the last store it may be the pool's end. */
SPDL__PRIVATE void spdl__guest_leave(spdl__worker *guest) {
    spdl__pool_hint(guest->pool);
    spdl__store(&guest->id, 0);
    spdl__store32(&guest->taken, 0); /* pairs with the next guest's swap and the wait in release */
}

SPDL_API spdl_result spdl_pool_run(spdl_pool *pool, int64_t budget_ns) {
    const uint64_t until = spdl__deadline(budget_ns);
    spdl_result result = SPDL_EMPTY;
    spdl__worker *guest;
    bool found = true;
    if (pool == NULL || pool->desc.guests == 0 || spdl__pool_is_worker(pool)) return SPDL_E_INVALID;
    guest = spdl__guest_enter(pool, until);
    if (guest == NULL) return SPDL_FULL;
    while (found && !spdl__load32(&pool->quit) && !spdl__late(guest->until))
        found = spdl__worker_turn(pool, guest);
    if (spdl__late(guest->until) && spdl__pool_runnable(pool, -1, NULL)) result = SPDL_OK;
    spdl__guest_leave(guest);
    return result;
}

/* On a pool without workers: runs a job that waits, as a guest. */
SPDL__PRIVATE bool spdl__pool_help(spdl_pool *pool) {
    spdl__worker *guest;
    bool found;
    if (pool->desc.workers > 0 || spdl_ring_count(pool->jobs) == 0) return false;
    guest = spdl__guest_enter(pool, SPDL__NEVER);
    if (guest == NULL) {
        spdl__os_yield(); /* until a guest leaves, or has run the jobs */
        return true;
    }
    found = spdl__pool_job(pool, guest);
    spdl__guest_leave(guest);
    return found;
}

/* --- jobs --- */

SPDL_API int spdl_pool_workers(const spdl_pool *pool) { return pool->desc.workers; }

SPDL_API spdl_result spdl_pool_submit(spdl_pool *pool, spdl_job_fn fn, void *arg,
                                      int64_t timeout_ns) {
    spdl_result result;
    spdl__job job;
    if (pool == NULL || fn == NULL) return SPDL_E_INVALID;
    job.fn = fn;
    job.arg = arg;
    spdl__add(&pool->pending, 1);
    result = spdl_ring_push(pool->jobs, &job, timeout_ns);
    if (result == SPDL_OK)
        spdl__pool_hint(pool);
    else if (spdl__sub(&pool->pending, 1) == 1)
        spdl__os_event_wake(&pool->idle, SPDL__ALL);
    return result;
}

SPDL_API spdl_result spdl_pool_drain(spdl_pool *pool, int64_t timeout_ns) {
    const uint64_t deadline = spdl__deadline(timeout_ns);
    spdl_result slept = SPDL_OK;
    if (pool == NULL || spdl__pool_is_worker(pool)) return SPDL_E_INVALID; /* waits for itself */
    for (;;) {
        const uint32_t ticket = spdl__load32(&pool->idle.word);
        if (spdl__load(&pool->pending) == 0) return SPDL_OK;
        if (slept == SPDL_TIMEOUT) return SPDL_TIMEOUT;
        if (spdl__pool_help(pool))
            slept = spdl__late(deadline) ? SPDL_TIMEOUT : SPDL_OK;
        else slept = spdl__os_event_sleep(&pool->idle, ticket, deadline);
    }
}

SPDL_API spdl_result spdl_pool_stop(spdl_pool *pool, int64_t timeout_ns) {
    if (pool == NULL || spdl__pool_is_worker(pool)) return SPDL_E_INVALID;
    spdl_ring_close(pool->jobs);
    return spdl_pool_drain(pool, timeout_ns);
}

/* --- create and destroy --- */

SPDL__PRIVATE spdl_result spdl__pool_check(const spdl_pool_desc *desc) {
    const int threads = SPDL__MAX_WORKERS - (desc->guests > 0 ? desc->guests : 0);
    const struct {
        const char *name;
        int value, least, most;
    } number[] = { { "guests", desc->guests, 0, SPDL__MAX_WORKERS },
                   { "workers", desc->workers, desc->guests == 0, threads },
                   { "queue_size", desc->queue_size ? desc->queue_size : 1, 1, SPDL__MAX_QUEUE },
                   { "policy.nice", desc->policy.nice, -20, 19 } };
    int i;
    for (i = 0; i < 4; ++i)
        if (number[i].value < number[i].least || number[i].value > number[i].most)
            return spdl__error_set(desc->error, SPDL_E_INVALID,
                                   "spdl: pool: %s is %d, must be %d to %d", number[i].name,
                                   number[i].value, number[i].least, number[i].most);
    if (desc->policy.sched < SPDL_SCHED_DEFAULT || desc->policy.sched > SPDL_SCHED_IDLE)
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "spdl: pool: policy.sched is %d, which is no class",
                               (int)desc->policy.sched);
    if (desc->policy.cpu_count < 0 || (desc->policy.cpu_count > 0 && desc->policy.cpus == NULL))
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "spdl: pool: policy.cpu_count is %d%s", desc->policy.cpu_count,
                               desc->policy.cpus == NULL ? ", but policy.cpus is NULL" : "");
    return spdl__allocator_check(&desc->allocator, "pool", desc->error);
}

/* Ends and joins the workers that have a thread, and frees whatever create has made. */
SPDL__PRIVATE void spdl__pool_release(spdl_pool *pool) {
    const spdl_allocator allocator = pool->desc.allocator;
    int i;
    spdl__store32(&pool->quit, 1);
    spdl__full_barrier();
    for (i = 0; i < pool->threads; ++i) (void)spdl__worker_wake(&pool->worker[i]);
    for (i = 0; i < pool->threads; ++i) spdl__os_thread_join(&pool->worker[i].thread);
    for (i = pool->desc.workers; pool->worker != NULL && i < pool->places; ++i) {
        spdl__worker *guest = &pool->worker[i];
        while (spdl__load32(&guest->taken)) spdl__os_yield(); /* on its last steps */
        if (guest->initialised && pool->desc.fini != NULL)
            pool->desc.fini(pool->desc.ctx, i, guest->local);
    }
    for (i = 0; i < pool->bells; ++i) spdl__os_event_fini(&pool->worker[i].bell);
    spdl_ring_destroy(pool->jobs, NULL, NULL);
    spdl__free(&allocator, pool->worker, (size_t)pool->places * sizeof(*pool->worker));
    spdl__os_event_fini(&pool->idle);
    spdl__free(&allocator, pool, sizeof(*pool));
}

/* Of a pool with one worker and no jobs: nobody waits for that worker any more. When it has left
   what it does now, it calls leave(ctx), which may release the pool, and ends. */
SPDL__PRIVATE void spdl__pool_abandon(spdl_pool *pool, void (*leave)(void *ctx), void *ctx) {
    pool->leave = leave; /* read after `quit` */
    pool->leave_ctx = ctx;
    spdl__os_thread_detach(&pool->worker[0].thread);
    pool->threads = 0;
    spdl__store32(&pool->quit, 1);
    spdl__full_barrier();
    (void)spdl__worker_wake(&pool->worker[0]);
}

/* Everything but the threads. */
SPDL__PRIVATE spdl_result spdl__pool_build(spdl_pool *pool) {
    const spdl_pool_desc *desc = &pool->desc;
    spdl_ring_desc jobs;
    memset(&jobs, 0, sizeof(jobs));
    jobs.capacity = (uint64_t)(desc->queue_size ? desc->queue_size : 256);
    jobs.item_bytes = sizeof(spdl__job);
    jobs.allocator = desc->allocator;
    spdl__name_copy(pool->name, desc->name ? desc->name : "spdl");
    pool->places = desc->workers + desc->guests;
    pool->worker = (spdl__worker *)spdl__alloc_zeroed(&desc->allocator, (size_t)pool->places,
                                                      sizeof(*pool->worker), sizeof(void *));
    if (pool->worker == NULL) return SPDL_E_NOMEM;
    for (; pool->bells < pool->places; ++pool->bells) {
        spdl__worker *worker = &pool->worker[pool->bells];
        worker->pool = pool;
        worker->index = pool->bells;
        worker->until = SPDL__NEVER;
        if (!spdl__os_event_init(&worker->bell)) return SPDL_E_NOMEM;
    }
    return spdl_ring_create(&pool->jobs, &jobs);
}

/* Starts the workers, and waits for what may fail on them. */
SPDL__PRIVATE spdl_result spdl__pool_start(spdl_pool *pool) {
    const spdl_pool_desc *desc = &pool->desc;
    const spdl_policy *policy = &desc->policy;
    spdl_result result;
    int i;
    for (; pool->threads < desc->workers; ++pool->threads) {
        spdl__worker *worker = &pool->worker[pool->threads];
        char name[SPDL_NAME_BYTES];
        (void)snprintf(name, sizeof(name), "%.11s-%d", pool->name, worker->index);
        if (!spdl__os_thread_start(&worker->thread, name, policy, desc->stack_bytes,
                                   spdl__worker_main, worker))
            return spdl__error_set(desc->error, SPDL_E_THREAD,
                                   "spdl: pool '%s': thread %d of %d could not be created%s",
                                   pool->name, pool->threads, desc->workers, SPDL__OS_NO_THREAD);
    }
    for (i = desc->workers; i < pool->places && spdl__load32(&pool->init_result) == 0;
         ++i)
        spdl__worker_init(&pool->worker[i]);
    if (desc->init == NULL && !policy->polite && policy->nice == 0 &&
        policy->sched == SPDL_SCHED_DEFAULT && policy->cpu_count == 0)
        return SPDL_OK;
    spdl__pool_await32(pool, &pool->started, (uint32_t)desc->workers);
    result = (spdl_result)(int)spdl__load32(&pool->init_result);
    if (result != SPDL_OK)
        return spdl__error_set(desc->error, result, "spdl: pool '%s': init of a worker failed: %s",
                               pool->name, spdl_result_text(result));
    if (!spdl__load32(&pool->policy_refused)) return SPDL_OK;
    return spdl__error_set(desc->error, SPDL_E_THREAD,
                           "spdl: pool '%s': the system refuses the policy of its threads"
                           " (nice %d, sched %d, %d cpus)",
                           pool->name, policy->nice, (int)policy->sched, policy->cpu_count);
}

SPDL_API spdl_result spdl_pool_create(spdl_pool **pool, const spdl_pool_desc *desc) {
    spdl_result result;
    spdl_pool *made;
    if (pool == NULL) return SPDL_E_INVALID;
    *pool = NULL;
    if (desc == NULL) return SPDL_E_INVALID;
    spdl__error_clear(desc->error);
    result = spdl__pool_check(desc);
    if (result != SPDL_OK) return result;
    made = (spdl_pool *)spdl__alloc_zeroed(&desc->allocator, 1, sizeof(*made), SPDL_CACHE_LINE);
    if (made != NULL && !spdl__os_event_init(&made->idle)) {
        spdl__free(&desc->allocator, made, sizeof(*made));
        made = NULL;
    }
    if (made != NULL) made->desc = *desc;
    result = made != NULL ? spdl__pool_build(made) : SPDL_E_NOMEM;
    if (result != SPDL_OK)
        spdl__error_set(desc->error, result, "spdl: pool: out of memory");
    else
        result = spdl__pool_start(made);
    if (result == SPDL_OK) {
        made->desc.error = NULL; /* the caller's, for this call only */
        *pool = made;
    } else if (made != NULL) {
        spdl__pool_release(made);
    }
    return result;
}

SPDL_API void spdl_pool_destroy(spdl_pool *pool) {
    uint32_t i;
    const char *why = NULL;
    if (pool == NULL) return;
    if (spdl__pool_is_worker(pool)) why = "called on a worker of the pool";
    for (i = 0; i < SPDL__MAX_CLIENTS; ++i)
        if (spdl__load32(&pool->slot[i].taken)) why = "a pipeline is still on the pool";
    if (why != NULL) {
        spdl__logf(&pool->desc.logger, SPDL_LOG_ERROR,
                   "spdl: spdl_pool_destroy: %s, nothing was done", why);
        return;
    }
    spdl_pool_stop(pool, SPDL_FOREVER);
    spdl__pool_release(pool);
}

/* ============================================================================================= */
/* >>trace-core
   What the pipeline calls while it runs, so that a trace can be written and the time of stages be
   split; >>trace-impl has the rest. Off, each place costs a branch on a pointer.

   Events. A track is a ring of events that keeps the latest; there is one for each thread that runs
   stages, one for the trainer, one for each edge and one for copies to a device. Any thread may add
   to any track: it takes a number, marks the slot as in use, writes it and stamps it with the
   number. A reader takes a slot whose stamp is the same before and after it has copied it. (Two
   that add to one slot at the same time, a whole ring apart, may mix their words. So pointers to
   names stand only in tracks of threads, to which no other thread adds.)

   Where time goes. A meter reads the thread's processor clock, and the time it was runnable, before
   and after a sitting: four system calls, some microseconds. So about one sitting is measured for
   each SPDL__METER_NS that the worker spends in the stage; which one is drawn by lot, in sittings:
   by time it would always be the one after the longest.

   The pipeline owns the tracks, and a task its meter, which the thread that runs it uses. */

#define SPDL__TRACE_EVENTS 65536
#define SPDL__TRACE_EVENTS_MAX (1 << 24)
#define SPDL__SPANS 16 /* of a user that may be open inside each other */
#define SPDL__METER_NS 800000 /* time of a worker in a stage for each measurement, on average */
#define SPDL__PATH_BYTES 1024 /* the name of a file that is written: a trace, a report */

#ifdef SPDL__NO_TRACE /* for the bench, which compares with a build without any of it */
#define SPDL__TRACED(pointer) (false)
#define SPDL__METERED false
#else
#define SPDL__METERED true
#define SPDL__TRACED(pointer) SPDL__UNLIKELY((pointer) != NULL)
#endif

typedef enum spdl__record_kind {
    SPDL__RECORD_CALL,  /* a call of a stage; number: of the item */
    SPDL__RECORD_BATCH, /* a batch was put; number: its own */
    SPDL__RECORD_NEXT,  /* the trainer waited; number: of the item it got */
    SPDL__RECORD_EMPTY, /* the reader of an edge had to wait */
    SPDL__RECORD_FULL,  /* a finished item had to wait for its place */
    SPDL__RECORD_DEPTH, /* number: the items on an edge */
    SPDL__RECORD_SPAN,  /* a user's; number: the pointer to its name, result: spans around it */
    SPDL__RECORD_COPY,  /* to a device; number: bytes */
    SPDL__RECORD_VALUE  /* of a counter; number: the pointer to its name, end: the bits */
} spdl__record_kind;

/* 32 bytes, as is documented. Written by the thread that took its place in the track. */
typedef struct spdl__record {
    uint64_t begin;
    uint64_t end;
    uint64_t number;
    uint64_t stamp; /* low bits of its place in the track + 1, result 16, row 8, kind 8 bits */
} spdl__record;

typedef struct spdl__span {
    const char *name;
    uint64_t begin;
} spdl__span;

typedef struct spdl__track {
    /* written by create */
    spdl__record *records;
    uint64_t mask;
    /* written by any thread */
    uint64_t count; /* events so far, those that were overwritten too */
    uint64_t begun; /* an edge: the wait of its reader, or 0 */
    uint64_t ready; /* an edge: tickets below this were ready when its reader looked */
    /* written by the thread whose track it is */
    uint32_t spans; /* that are open, also those too deep to be kept */
    spdl__span span[SPDL__SPANS];
    char pad[SPDL_CACHE_LINE];
} spdl__track;

/* Written by create. */
typedef struct spdl__trace {
    size_t bytes;    /* of the block: this, the tracks, their records */
    int tracks;      /* of threads, then those of edges, then one of copies to a device */
    spdl__track *track;
    const spdl_function *fn[SPDL_MAX_STAGES]; /* the stages' own */
    spdl__os_file file; /* claimed for destroy to write, or SPDL__NO_FILE */
    char name[SPDL_NAME_BYTES]; /* of the threads */
    char path[SPDL__PATH_BYTES];
} spdl__trace;

/* Written by the worker whose task has it. */
typedef struct spdl__meter {
    uint64_t thread;          /* whose schedstat is open */
    uint64_t cpu_ns, wait_ns; /* at the start of the sitting that is measured, or SPDL__NEVER */
    spdl__os_file file;       /* or SPDL__NO_FILE */
    uint64_t lot;           /* decides which sitting is measured next */
    uint64_t last_wait_ns;  /* of the thread, when it was measured last, or SPDL__NEVER */
    uint64_t waited_ns;     /* since it was measured first; read by snapshots */
} spdl__meter;

/* One more reading of what the thread has waited for a processor, or SPDL__NEVER. */
SPDL__PRIVATE void spdl__meter_waited(spdl__meter *meter, uint64_t wait_ns) {
    if (wait_ns != SPDL__NEVER && meter->last_wait_ns != SPDL__NEVER)
        spdl__count(&meter->waited_ns, wait_ns - meter->last_wait_ns);
    meter->last_wait_ns = wait_ns;
}

SPDL__RARE void spdl__trace_add(spdl__track *track, spdl__record_kind kind, int row, int result,
                                uint64_t begin, uint64_t end, uint64_t number) {
    const uint64_t place = spdl__add(&track->count, 1);
    spdl__record *record = &track->records[place & track->mask];
    if (result > INT16_MAX || result < INT16_MIN) result = SPDL_E_STAGE;
    spdl__store_relaxed(&record->stamp, 0);
    /* release: pairs with trace_collect, which, having read one of them, sees the stamp gone */
    spdl__store(&record->begin, begin);
    spdl__store(&record->end, end);
    spdl__store(&record->number, number);
    /* pairs with the first load in trace_collect: the words are there */
    spdl__store(&record->stamp, (place + 1) << 32 | (uint64_t)(uint16_t)result << 16 |
                                    (uint64_t)(uint8_t)row << 8 | (uint64_t)kind);
}

/* Probes of <sys/sdt.h>: a nop each until a tracer is attached. Name the values as they lie in
   memory: then the compiler loads nothing for them. clang does not forgive the macros of that
   header. */
#if SPDL__SDT && !defined(SPDL__NO_TRACE) && defined(__clang__)
#define SPDL__PROBE(name, stage, number)                                                           \
    _Pragma("clang diagnostic push")                                                               \
    _Pragma("clang diagnostic ignored \"-Wgnu-zero-variadic-macro-arguments\"")                    \
    DTRACE_PROBE2(spdl, name, stage, number);                                                      \
    _Pragma("clang diagnostic pop")
#elif SPDL__SDT && !defined(SPDL__NO_TRACE)
#define SPDL__PROBE(name, stage, number) DTRACE_PROBE2(spdl, name, stage, number)
#else
#define SPDL__PROBE(name, stage, number) ((void)(stage), (void)(number))
#endif

/* --- meters --- */

/* Before a sitting. */
SPDL__RARE void spdl__meter_start(spdl__meter *meter) {
    if (meter->thread != spdl__os_thread_id()) {
        (void)spdl__os_file_close(meter->file);
        meter->file = SPDL__NO_FILE;
        meter->thread = spdl__os_thread_id();
        meter->last_wait_ns = SPDL__NEVER;
    }
    spdl__os_thread_times(NULL, &meter->file, NULL, &meter->wait_ns);
    spdl__meter_waited(meter, meter->wait_ns);
    spdl__os_thread_times(NULL, NULL, &meter->cpu_ns, NULL);
}

/* --- what the pipeline calls; >>trace-impl has them --- */

struct spdl__edge;

/* Something was taken, first of it ticket `from`. */
SPDL__RARE void spdl__trace_taken(struct spdl__edge *edge, uint64_t from, uint64_t now);
#ifndef SPDL_NO_REPORT /* in create and destroy */
SPDL__PRIVATE void spdl__trace_open(spdl_pipeline *p, const spdl_pipeline_desc *desc);
SPDL__PRIVATE void spdl__trace_close(spdl_pipeline *p);
SPDL__PRIVATE void spdl__trace_free(spdl_pipeline *p);
#endif

/* ============================================================================================= */
/* >>edge-impl
   Edges, and what travels on them. An edge is a ring of slots addressed by tickets, the number of a
   result on this edge. A slot is ready when its stamp is its ticket + 1. A writer may put a result
   at any ticket that was promised to it, so the ring is also the reorder buffer; the reader takes
   the tickets in order.

   The word. The reader of an edge has a word: the next ticket to take (`head`), and of a row the
   calls inside (`active`) and three flags. **An item is taken by one compare-and-swap on that
   word**, which moves `head` and counts the call. What is rare is done while the word is HELD:
   nobody else takes then, and the plain fields beside it (shift, dropped, epoch_ends) may be
   changed; no user code runs meanwhile. A merge, and the trainer, have the edges they read to
   themselves: there the word is just the head. A source or a merge has a word of its own.

   Tickets. A row with input order and a concurrency above 1 promises a ticket when it takes the
   input, in their order, so its results wait for each other: ticket = head + shift, where shift
   makes up for inputs that do not make one result. A dropped item leaves an empty slot, which gives
   its place among the waiting back at once (`refunds`) and its slot when the reader passes it. All
   other writers take a ticket when they put (`tail`).

   Room is known before the call, so no result ever waits for room: promised - refunds - taken <=
   buffer_size + concurrency, and promised - head <= window. (Of a branch: see >>flow-impl.)

   A slot holds an item; none, as it was dropped; a list, the items one call has emitted, which the
   reader takes one by one; or the end of an epoch. Its range is the lowest and the highest of the
   source's items that are in it.

   Threads: each field says who writes it. The pipeline owns the edges and every item on them. */

#define SPDL__BUFFER SPDL_MAX_STAGES /* owner of an item that is a buffer of spdl_buffer */
#define SPDL__IN_PLACE (SPDL_MAX_STAGES + 1) /* and of one that lies in a batch: nobody frees it */
#define SPDL__TOKEN (SPDL_MAX_STAGES + 2)    /* and of one that is none: see >>probe-impl */
#define SPDL__DROPPED 0xffu   /* owner of a slot whose item was dropped */
#define SPDL__EPOCH_END 0xfeu /* owner of a slot that ends an epoch */
#define SPDL__LIST 0xfdu      /* owner of a slot with a list */
#define SPDL__OPEN UINT64_MAX /* end of an edge that has not ended */
#define SPDL__WINDOW 64       /* slots that dropped items may take when the row does not say */
#define SPDL__AHEAD_BYTES ((uint64_t)256 << 20) /* of one row's blocks are made with a pipeline */

/* A word: head, flags, active. */
#define SPDL__ACTIVE 0x1fffu   /* calls inside, deferred ones too, and the thread that holds */
#define SPDL__HELD 0x2000u     /* a thread changes what belongs to the word */
#define SPDL__FINISHED 0x4000u /* nothing more will come out of this row */
#define SPDL__STOPPED 0x8000u  /* nobody may enter any more */
#define SPDL__FLAGS (SPDL__HELD | SPDL__FINISHED | SPDL__STOPPED)
#define SPDL__BUSY 0xffffu     /* flags and active: less than the concurrency if there is a place */
#define SPDL__HEAD_BITS 16
#define SPDL__HEAD_ONE ((uint64_t)1 << SPDL__HEAD_BITS)

/* A range of the source's items: the lowest, from 0 over all epochs, and how many more there are up
   to the highest. Of a feed, whose items nobody numbers, when they were pushed, in units of 256 ns:
   the lowest is the oldest (after 78 hours they count from 0 again). */
#define SPDL__SPAN_BITS 24
#define SPDL__SPAN_MAX (((uint64_t)1 << SPDL__SPAN_BITS) - 1)
#define SPDL__PUSHED_BITS 8

typedef struct spdl__slot { /* half a line of the cache; written by the owner of the ticket */
    void *item;
    uint64_t origin; /* sequence << 8 | row of the stage that made it, or one of the owners above */
    uint64_t range;  /* lowest << SPDL__SPAN_BITS | span */
    uint32_t stamp;  /* low bits of ticket + 1 when ready */
    uint32_t done;   /* when it was put, in units of 1024 ns */
} spdl__slot;

typedef struct spdl__edge {
    /* written by create */
    spdl__slot *slots;
    uint64_t mask;        /* slots - 1: a power of two */
    uint64_t window;      /* tickets that may be given out beyond head */
    uint64_t buffer_size;
    spdl__track *track; /* of the trace, or NULL */
    char pad0[SPDL_CACHE_LINE];
    /* written by the row that writes the edge */
    uint64_t tail;    /* the next ticket to put, where results take one when they are put */
    uint64_t refunds; /* tickets that were promised and hold no item */
    uint64_t end;     /* one past the last ticket, once it is known */
    char pad1[SPDL_CACHE_LINE];
    /* written by the reader */
    uint64_t word;
    uint64_t shift;   /* while held: items taken - tickets passed (lists more, dropped ones less) */
    uint64_t dropped; /* while held: tickets passed whose items were dropped */
    uint64_t epoch_ends; /* while held: tickets passed that were ends of epochs */
    uint64_t dry; /* 1 + the ticket of a stream with nothing to take, or 0; also by its writer */
    char pad2[SPDL_CACHE_LINE];
    /* written by the reader, and by the writer where it says so */
    uint64_t put_wait_ns; /* finished items waited for a place in the buffer */
    uint64_t ended_ns;    /* when the reader met the end */
    uint64_t gap_since;   /* nothing to take since then; either side exchanges it for 0 */
    uint64_t wait_since;  /* and the reader was free to take it; as gap_since */
    uint64_t empty_ns;    /* the sums of both; by the thread that has closed the gap */
    uint64_t get_wait_ns;
    char pad3[SPDL_CACHE_LINE];
    /* written by snapshots: what they have reported. The sum of an open and a closed wait can be
       less when it was closed by a clock read before, and the items while others are passed */
    uint64_t seen[6];
} spdl__edge;

SPDL__PRIVATE void spdl__report_begin(spdl_pipeline *p, const spdl_pipeline_desc *desc);
SPDL__PRIVATE void spdl__report_end(spdl_pipeline *p); /* both: >>report-impl */

/* What SPDL_DOCTOR and desc.doctor ask for. With SPDL_NO_REPORT there is no doctor, and these do
   nothing. (>>doctor-impl) */
typedef struct spdl__doctor spdl__doctor;
typedef struct spdl__hand spdl__hand;
typedef struct spdl__doctor_plan {
    spdl_doctor_desc desc; /* but for the files */
    char name[SPDL_NAME_BYTES];
    char json[SPDL__PATH_BYTES], html[SPDL__PATH_BYTES];
} spdl__doctor_plan;
SPDL__PRIVATE bool spdl__doctor_ask(spdl__doctor_plan *plan, const spdl_doctor_desc *desc,
                                    const spdl_logger *logger);
SPDL__PRIVATE spdl_result spdl__doctor_open(spdl_pipeline *p, const spdl__doctor_plan *plan,
                                            const spdl_stage *rows, int workers);
SPDL__PRIVATE int spdl__doctor_workers(const spdl__doctor *d);
SPDL__PRIVATE bool spdl__doctor_is_done(const spdl__doctor *d);
SPDL__PRIVATE void spdl__doctor_comes(spdl__doctor *d);
SPDL__PRIVATE void spdl__doctor_leaves(spdl__doctor *d, bool item);
SPDL__PRIVATE void spdl__doctor_close(spdl_pipeline *p);
SPDL__PRIVATE void spdl__doctor_empty(spdl_pipeline *p);
SPDL__PRIVATE void spdl__doctor_free(spdl_pipeline *p);

/* Whether the edge has ended and all of it was taken. The end is read before the head. */
SPDL__PRIVATE bool spdl__edge_exhausted(const spdl__edge *edge) {
    return spdl__load(&edge->end) <= spdl__load(&edge->word) >> SPDL__HEAD_BITS;
}

SPDL__INLINE uint64_t spdl__head(uint64_t word) { return word >> SPDL__HEAD_BITS; }

SPDL__INLINE spdl__slot *spdl__edge_slot(const spdl__edge *edge, uint64_t ticket) {
    return &edge->slots[ticket & edge->mask];
}

/* The acquire pairs with the release in spdl__put: the item is there. */
SPDL__INLINE bool spdl__slot_has(const spdl__slot *slot, uint64_t ticket) {
    return spdl__load32(&slot->stamp) == (uint32_t)(ticket + 1);
}

SPDL__INLINE bool spdl__edge_ready(const spdl__edge *edge, uint64_t ticket) {
    return spdl__slot_has(spdl__edge_slot(edge, ticket), ticket);
}

SPDL__INLINE uint64_t spdl__origin(uint64_t sequence, unsigned owner) {
    return sequence << 8 | owner;
}

SPDL__INLINE unsigned spdl__origin_tag(uint64_t origin) { return (unsigned)(origin & 0xff); }

/* Whether there is something to take at `ticket`, or to pass. A stream that waits for its call to
   add something is ready, too, but offers nothing. */
SPDL__INLINE bool spdl__edge_offers(const spdl__edge *edge, uint64_t ticket) {
    return spdl__edge_ready(edge, ticket) && spdl__load(&edge->dry) != ticket + 1;
}

/* Both ranges, and what lies between them. */
SPDL__PRIVATE uint64_t spdl__range_join(uint64_t a, uint64_t b) {
    const uint64_t low_a = a >> SPDL__SPAN_BITS, low_b = b >> SPDL__SPAN_BITS;
    const uint64_t low = spdl__min(low_a, low_b);
    const uint64_t high =
        spdl__max(low_a + (a & SPDL__SPAN_MAX), low_b + (b & SPDL__SPAN_MAX));
    return low << SPDL__SPAN_BITS | spdl__min(high - low, SPDL__SPAN_MAX);
}

/* How long ago the oldest item of a feed's range was pushed. */
SPDL__INLINE uint64_t spdl__range_age(uint64_t range, uint64_t now) {
    const uint64_t low = now >> SPDL__PUSHED_BITS << SPDL__SPAN_BITS;
    const uint64_t units = (low - (range & ~SPDL__SPAN_MAX)) >> SPDL__SPAN_BITS;
    return units >> 39 == 0 ? units << SPDL__PUSHED_BITS : 0; /* its clock was ahead of ours */
}

/* An item on its way. */
typedef struct spdl__item {
    void *item;
    uint64_t origin;
    uint64_t range;
} spdl__item;

/* The one way to read a slot, by everything that takes an item from an edge. If the swap of the
   word that follows fails, the item was another thread's, and may have been written anew. */
SPDL__INLINE spdl__item spdl__slot_read(const spdl__slot *slot) {
    spdl__item got;
    got.item = spdl__load_pointer(&slot->item);
    got.origin = spdl__load_relaxed(&slot->origin);
    got.range = spdl__load_relaxed(&slot->range);
    return got;
}

/* Results promised below this have room, when `capacity` may wait or be under way. Never too many:
   what is read later can only make more room. */
SPDL__INLINE uint64_t spdl__edge_until(const spdl__edge *edge, uint64_t capacity, bool by_ticket) {
    /* pairs with the takes: slots have been read before they are written again */
    const uint64_t head = spdl__head(spdl__load(&edge->word));
    const uint64_t dropped = spdl__load(&edge->dropped); /* after head: at least those before it */
    const uint64_t until = head - dropped + capacity + spdl__load(&edge->refunds);
    return by_ticket && (int64_t)(until - head - edge->window) > 0 ? head + edge->window : until;
}

/* --- waits --- */

/* Ends an open gap, if it is still open, and adds its length to *sum. */
SPDL__PRIVATE void spdl__gap_close(uint64_t *since, uint64_t *sum, uint64_t now) {
    const uint64_t opened = spdl__load_relaxed(since) ? spdl__exchange(since, 0) : 0;
    if (opened != 0 && now > opened) spdl__add(sum, now - opened);
}

/* The time in gaps, the open one too. The sum is read first: it pairs with gap_close, which ends a
   gap before it adds it, so none is counted twice. */
SPDL__PRIVATE uint64_t spdl__gap_sum(const uint64_t *since, const uint64_t *sum, uint64_t now) {
    const uint64_t closed = spdl__load(sum);
    const uint64_t opened = spdl__load_relaxed(since);
    return closed + (opened != 0 && now > opened ? now - opened : 0);
}

SPDL__PRIVATE void spdl__edge_gap_close(spdl__edge *edge, uint64_t now) {
    spdl__gap_close(&edge->gap_since, &edge->empty_ns, now);
    spdl__gap_close(&edge->wait_since, &edge->get_wait_ns, now);
}

/* Whether a ready slot holds no item. */
SPDL__PRIVATE bool spdl__slot_dropped(const spdl__slot *slot) {
    const unsigned owner = spdl__origin_tag(spdl__load_relaxed(&slot->origin));
    return owner == SPDL__DROPPED || owner == SPDL__EPOCH_END;
}

/* How long ago a ready slot was put, in whole units of 1024 ns. */
SPDL__PRIVATE uint64_t spdl__slot_age(const spdl__slot *slot, uint64_t now) {
    const int32_t ticks = (int32_t)((uint32_t)(now >> 10) - spdl__load_relaxed32(&slot->done));
    return ticks > 0 ? (uint64_t)ticks << 10 : 0;
}

/* For the thread that takes ticket `head`: how long the item that enters the buffer by that had
   waited for it. */
SPDL__PRIVATE uint64_t spdl__edge_put_wait(const spdl__edge *edge, uint64_t head, uint64_t now) {
    const spdl__slot *slot = spdl__edge_slot(edge, head + edge->buffer_size);
    if (SPDL__NO_STATS || !spdl__slot_has(slot, head + edge->buffer_size)) return 0;
    return spdl__slot_dropped(slot) ? 0 : spdl__slot_age(slot, now);
}

/* The reader has become free, or not: from now on an empty edge is a wait. */
SPDL__PRIVATE void spdl__edge_reader_idle(spdl__edge *edge, uint64_t now) {
    if (SPDL__NO_STATS || spdl__load_relaxed(&edge->gap_since) == 0) return;
    if (spdl__load_relaxed(&edge->wait_since) != 0) return;
    spdl__store_relaxed(&edge->wait_since, now);
    if (SPDL__TRACED(edge->track)) spdl__store_relaxed(&edge->track->begun, now);
    if (spdl__load_relaxed(&edge->gap_since) == 0) spdl__exchange(&edge->wait_since, 0);
}

/* After a take of what lay before `head`, first of it ticket `from`: gaps end with what was there,
   and begin where nothing is. Writer and reader may have missed each other: the slot's own time
   says when a gap ended. */
SPDL__INLINE void spdl__edge_took(spdl__edge *edge, uint64_t from, uint64_t head, uint64_t now) {
    if (SPDL__TRACED(edge->track)) spdl__trace_taken(edge, from, now);
    if (SPDL__NO_STATS || now == 0) return;
    if (SPDL__UNLIKELY(spdl__load_relaxed(&edge->gap_since) != 0 ||
                       spdl__load_relaxed(&edge->wait_since) != 0))
        spdl__edge_gap_close(edge, now - spdl__slot_age(spdl__edge_slot(edge, from), now));
    if (SPDL__LIKELY(spdl__edge_offers(edge, head))) return;
    if (spdl__head(spdl__load_relaxed(&edge->word)) != head) return; /* others are further */
    spdl__store_relaxed(&edge->gap_since, now);
    if (spdl__edge_offers(edge, head)) spdl__exchange(&edge->gap_since, 0); /* put just then */
}

/* The reader has met the end. */
SPDL__PRIVATE void spdl__edge_ended(spdl__edge *edge, uint64_t now) {
    if (edge->ended_ns != 0) return;
    spdl__edge_gap_close(edge, now);
    spdl__store_relaxed(&edge->ended_ns, now);
}

/* --- lists --- */

/* The items one call has emitted. Lists are made when a call needs one, kept by their stage and
   used again: a stage that emits as much as before allocates nothing. A list is written by its
   call, then by the reader of its slot.

   A stream is a list that is read while its call goes on (SPDL_AGAIN, input order): a ring of
   `space` places that the call fills and the reader of its slot empties. The call stores `open`
   last of all; when it is 0 and all was taken the reader puts the list back. */
typedef struct spdl__freelist spdl__freelist;
typedef struct spdl__list {
    struct spdl__list *next; /* under the freelist's lock */
    spdl__freelist *freelist;
    uint64_t space;
    uint64_t count; /* the call's: items added */
    uint64_t at;    /* the reader's: items taken */
    uint32_t open;  /* a stream, and its call may add more; by the call */
    bool stream;    /* by the call, before the first item */
    spdl__item *entry;
} spdl__list;

struct spdl__freelist {
    const spdl_allocator *allocator; /* written by create */
    uint32_t lock;
    spdl__list *spare; /* under it */
};

SPDL__PRIVATE void spdl__spin_lock(uint32_t *lock) {
    while (spdl__exchange32(lock, 1) != 0) spdl__os_yield();
}

SPDL__PRIVATE void spdl__spin_unlock(uint32_t *lock) { spdl__store32(lock, 0); }

SPDL__PRIVATE bool spdl__try_lock(uint32_t *lock) {
    return spdl__load_relaxed32(lock) == 0 && spdl__exchange32(lock, 1) == 0;
}

SPDL__PRIVATE spdl__list *spdl__list_get(spdl__freelist *freelist) {
    spdl__list *list;
    spdl__spin_lock(&freelist->lock);
    list = freelist->spare;
    if (list != NULL) freelist->spare = list->next;
    spdl__spin_unlock(&freelist->lock);
    if (list != NULL) return list;
    list = (spdl__list *)spdl__alloc_zeroed(freelist->allocator, 1, sizeof(*list), 8);
    if (list != NULL) list->freelist = freelist;
    return list;
}

SPDL__PRIVATE void spdl__list_put_back(spdl__list *list) {
    spdl__freelist *freelist = list->freelist;
    spdl__store_relaxed(&list->at, 0); /* others may still look whether it has room */
    spdl__store_relaxed(&list->count, 0);
    list->stream = false;
    spdl__spin_lock(&freelist->lock);
    list->next = freelist->spare;
    freelist->spare = list;
    spdl__spin_unlock(&freelist->lock);
}

/* False: there is no memory for one more. */
SPDL__PRIVATE bool spdl__list_add(spdl__list *list, const spdl__item *what) {
    const spdl_allocator *allocator = list->freelist->allocator;
    if (list->count == list->space) {
        const size_t before = (size_t)list->space, space = before ? 2 * before : 8;
        spdl__item *entry =
            (spdl__item *)spdl__alloc_zeroed(allocator, space, sizeof(*entry), sizeof(void *));
        if (entry == NULL) return false;
        if (before > 0) memcpy(entry, list->entry, before * sizeof(*entry));
        spdl__free(allocator, list->entry, before * sizeof(*entry));
        list->entry = entry;
        list->space = space;
    }
    list->entry[list->count++] = *what;
    return true;
}

/* The call whose stream lies at `ticket` has added to it, or closed it: it is not dry any more. The
   barrier pairs with that in stream_look. */
SPDL__PRIVATE void spdl__stream_changed(spdl__edge *edge, uint64_t ticket) {
    uint64_t dry = ticket + 1;
    spdl__full_barrier();
    if (spdl__load_relaxed(&edge->dry) != dry || !spdl__cas(&edge->dry, &dry, 0)) return;
    if (!SPDL__NO_STATS) spdl__edge_gap_close(edge, spdl_time_ns());
}

/* There is room for one more: the call looked before it began. */
SPDL__PRIVATE void spdl__stream_add(spdl__edge *edge, uint64_t ticket, spdl__list *list,
                                    const spdl__item *what) {
    list->entry[list->count % list->space] = *what;
    spdl__store(&list->count, list->count + 1); /* pairs with stream_look */
    spdl__stream_changed(edge, ticket);
}

SPDL__PRIVATE void spdl__stream_close(spdl__edge *edge, uint64_t ticket, spdl__list *list) {
    spdl__store32(&list->open, 0); /* pairs with stream_look: the list is the reader's */
    spdl__stream_changed(edge, ticket);
}

SPDL__PRIVATE void spdl__freelist_release(spdl__freelist *freelist) {
    while (freelist->spare != NULL) {
        spdl__list *list = freelist->spare;
        freelist->spare = list->next;
        spdl__free(freelist->allocator, list->entry, (size_t)list->space * sizeof(*list->entry));
        spdl__free(freelist->allocator, list, sizeof(*list));
    }
}

/* --- batches --- */

/* Batches, and buffers, which are batches of no items with a block behind them, are made with the
   pipeline and come back to its pool; a trainer that keeps many makes the pool grow. What came back
   last is used first: it may still be in a cache. Whoever gives one back waits for nobody. The pool
   lives until the pipeline and every batch are gone. */
typedef struct spdl__batch spdl__batch;
typedef struct spdl__batch_pool {
    /* written by create */
    spdl_allocator allocator;
    size_t size;
    size_t block_bytes; /* 0: there is none */
    size_t keep;        /* so many spare ones */
    spdl_free_fn free_item[SPDL__IN_PLACE + 1];
    /* by whoever gives one back, or takes: never popped one by one, but emptied */
    uint64_t returned;   /* the last one that came back; a list */
    uint64_t spares;     /* how many there are, in both lists */
    uint64_t references; /* the pipeline, and every batch that is not spare */
    /* under the lock, by workers */
    uint32_t lock;
    spdl__batch *spare;
    /* with SPDL_DEBUG, by any thread: see spdl__node */
    uint64_t unfreed[SPDL_MAX_STAGES];
} spdl__batch_pool;

/* Written by the thread that fills it, then by that which has taken it. */
struct spdl__batch {
    spdl_batch shown; /* first: what users see */
    spdl__batch_pool *pool;
    uint8_t *owner;   /* row of the stage that made each item; in place: the parts that are given */
    uint64_t range;   /* of the source's items in it; when there is one */
    spdl__batch *next; /* of a spare one: as above; in place: under place_lock */
    uint64_t epoch;   /* under place_lock: with shown.sequence, which batch it will be */
};

SPDL__PRIVATE size_t spdl__line_up(size_t bytes) {
    return (bytes + SPDL_CACHE_LINE - 1) / SPDL_CACHE_LINE * SPDL_CACHE_LINE;
}

/* Without the block. */
SPDL__PRIVATE size_t spdl__batch_head_bytes(const spdl__batch_pool *pool) {
    return spdl__line_up(sizeof(spdl__batch) + pool->size * (sizeof(void *) + 1));
}

SPDL__PRIVATE size_t spdl__batch_bytes(const spdl__batch_pool *pool) {
    return spdl__batch_head_bytes(pool) + pool->block_bytes;
}

SPDL__PRIVATE spdl__batch *spdl__batch_make(spdl__batch_pool *pool) {
    spdl__batch *batch =
        (spdl__batch *)spdl__alloc(&pool->allocator, spdl__batch_bytes(pool), SPDL_CACHE_LINE);
    if (batch == NULL) return NULL;
    batch->pool = pool;
    batch->shown.items = (void **)(void *)(batch + 1);
    batch->shown.data = pool->block_bytes ? (char *)batch + spdl__batch_head_bytes(pool) : NULL;
    batch->owner = (uint8_t *)(batch->shown.items + pool->size);
    return batch;
}

/* Under the lock, or alone. What came back goes in front of the spare ones, the last one first. */
SPDL__PRIVATE spdl__batch *spdl__batch_pool_pop(spdl__batch_pool *pool) {
    spdl__batch *got = NULL, *last;
    if (spdl__load_relaxed(&pool->returned) != 0)
        got = (spdl__batch *)(uintptr_t)spdl__exchange(&pool->returned, 0);
    if (got == NULL) got = pool->spare;
    else {
        for (last = got; last->next != NULL; last = last->next) {}
        last->next = pool->spare;
    }
    if (got == NULL) return NULL;
    pool->spare = got->next;
    spdl__sub(&pool->spares, 1);
    return got;
}

/* One reference less: of the pipeline, or with `batch` that, which is kept or freed. */
SPDL__PRIVATE void spdl__batch_pool_drop(spdl__batch_pool *pool, spdl__batch *batch) {
    const spdl_allocator allocator = pool->allocator;
    const size_t bytes = spdl__batch_bytes(pool);
    if (batch != NULL && spdl__add(&pool->spares, 1) < pool->keep) {
        uint64_t top = spdl__load_relaxed(&pool->returned);
        do batch->next = (spdl__batch *)(uintptr_t)top;
        while (!spdl__cas(&pool->returned, &top, (uint64_t)(uintptr_t)batch));
    } else if (batch != NULL) {
        spdl__sub(&pool->spares, 1);
        spdl__free(&allocator, batch, bytes);
    }
    if (spdl__sub(&pool->references, 1) != 1) return;
    while ((batch = spdl__batch_pool_pop(pool)) != NULL) spdl__free(&allocator, batch, bytes);
    spdl__free(&allocator, pool, sizeof(*pool));
}

/* An empty batch; NULL when there is no memory for one more. */
SPDL__PRIVATE spdl__batch *spdl__batch_get(spdl__batch_pool *pool) {
    spdl__batch *batch;
    spdl__add(&pool->references, 1);
    spdl__spin_lock(&pool->lock);
    batch = spdl__batch_pool_pop(pool);
    spdl__spin_unlock(&pool->lock);
    if (batch == NULL) batch = spdl__batch_make(pool);
    if (batch == NULL) {
        spdl__batch_pool_drop(pool, NULL);
        return NULL;
    }
    batch->shown.count = 0;
    batch->range = 0;
    return batch;
}

SPDL_API void spdl_batch_free(void *batch) {
    spdl__batch *whole = (spdl__batch *)batch;
    size_t i;
    if (whole == NULL) return;
    for (i = 0; i < whole->shown.count; ++i) {
        const uint8_t owner = whole->owner[i];
        if (whole->shown.items[i] == NULL) continue;
        if (whole->pool->free_item[owner] != NULL)
            whole->pool->free_item[owner](whole->shown.items[i]);
        else if (SPDL__DEBUGS && owner < SPDL_MAX_STAGES)
            spdl__add(&whole->pool->unfreed[owner], 1);
    }
    spdl__batch_pool_drop(whole->pool, whole);
}

SPDL_API void spdl_buffer_free(void *buffer) {
    const size_t head = spdl__line_up(sizeof(spdl__batch));
    if (buffer == NULL) return;
    spdl_batch_free((char *)buffer - head);
}

/* `keep` batches are made now: as many as the pipeline itself can hold, but no more than
   SPDL__AHEAD_BYTES of blocks. */
SPDL__PRIVATE spdl__batch_pool *spdl__batch_pool_make(const spdl_allocator *allocator, size_t size,
                                                      size_t block_bytes, size_t keep) {
    spdl__batch_pool *pool =
        (spdl__batch_pool *)spdl__alloc_zeroed(allocator, 1, sizeof(*pool), sizeof(void *));
    size_t ahead = keep;
    if (pool == NULL) return NULL;
    pool->allocator = *allocator;
    pool->size = size;
    pool->block_bytes = block_bytes;
    pool->keep = keep;
    pool->free_item[SPDL__BUFFER] = spdl_buffer_free;
    pool->references = 1;
    if (block_bytes > 0) ahead = (size_t)spdl__min(keep, SPDL__AHEAD_BYTES / block_bytes);
    for (; ahead > 0; --ahead) {
        spdl__batch *batch = spdl__batch_make(pool);
        if (batch == NULL) break;
        batch->next = pool->spare;
        pool->spare = batch;
        ++pool->spares;
    }
    if (ahead == 0) return pool;
    spdl__batch_pool_drop(pool, NULL);
    return NULL;
}

/* --- reading by one thread --- */

/* Where the thread is that has the edge to itself: that which holds its word, a merge, the trainer.
   Nothing of it is seen by others before cursor_settle, nor the head before that is stored. */
typedef struct spdl__cursor {
    spdl__edge *edge;
    uint64_t from, head, end;
    uint64_t shift, dropped, epoch_ends;
} spdl__cursor;

typedef enum spdl__peek {
    SPDL__PEEK_NONE,
    SPDL__PEEK_ITEM,
    SPDL__PEEK_EPOCH_END,
    SPDL__PEEK_DRY /* a stream that waits for its call */
} spdl__peek;

SPDL__INLINE spdl__cursor spdl__cursor_at_head(spdl__edge *edge) {
    spdl__cursor c;
    c.edge = edge;
    c.end = spdl__load(&edge->end); /* before the slots: what was put before it is seen */
    c.from = c.head = spdl__head(spdl__load_relaxed(&edge->word));
    c.shift = edge->shift;
    c.dropped = edge->dropped;
    c.epoch_ends = edge->epoch_ends;
    return c;
}

/* For the reader: whether nothing is in it, now. */
SPDL__PRIVATE bool spdl__list_empty(const spdl__list *list) {
    return list->at == spdl__load(&list->count);
}

/* Whether a stream offers something; if not and its call is over, it is put back. Else lookers see
   that it is dry: the barrier pairs with that in stream_add, so one of both sees the other. */
SPDL__NOINLINE spdl__peek spdl__stream_look(spdl__cursor *c, spdl__list *list) {
    for (;;) {
        const bool open = spdl__load32(&list->open) != 0; /* before count: then that is the last */
        if (!spdl__list_empty(list)) break;
        if (!open) {
            spdl__list_put_back(list);
            return SPDL__PEEK_NONE;
        }
        if (spdl__load_relaxed(&c->edge->dry) == c->head + 1) return SPDL__PEEK_DRY;
        spdl__store(&c->edge->dry, c->head + 1);
        spdl__full_barrier();
    }
    spdl__store_relaxed(&c->edge->dry, 0);
    return SPDL__PEEK_ITEM;
}

/* What comes next. Dropped items, and streams that are over, are passed. */
SPDL__INLINE spdl__peek spdl__cursor_look(spdl__cursor *c) {
    for (; c->head < c->end; ++c->head, ++c->dropped, --c->shift) {
        const spdl__slot *slot = spdl__edge_slot(c->edge, c->head);
        unsigned tag;
        if (!spdl__slot_has(slot, c->head)) return SPDL__PEEK_NONE;
        tag = spdl__origin_tag(spdl__load_relaxed(&slot->origin));
        if (tag == SPDL__EPOCH_END) return SPDL__PEEK_EPOCH_END;
        if (SPDL__UNLIKELY(tag == SPDL__LIST) && ((spdl__list *)slot->item)->stream) {
            const spdl__peek peek = spdl__stream_look(c, (spdl__list *)slot->item);
            if (peek != SPDL__PEEK_NONE) return peek;
            --c->dropped; /* its items were taken from it */
        } else if (tag != SPDL__DROPPED) {
            return SPDL__PEEK_ITEM;
        }
    }
    return SPDL__PEEK_NONE;
}

/* Passes the end of an epoch that cursor_look has seen. */
SPDL__INLINE void spdl__cursor_pass_epoch_end(spdl__cursor *c) {
    ++c->head;
    ++c->epoch_ends;
}

/* Takes the item that cursor_look has seen. */
SPDL__INLINE spdl__item spdl__cursor_take(spdl__cursor *c) {
    spdl__item got = spdl__slot_read(spdl__edge_slot(c->edge, c->head));
    if (SPDL__UNLIKELY(spdl__origin_tag(got.origin) == SPDL__LIST)) {
        spdl__list *list = (spdl__list *)got.item;
        got = list->entry[list->at % list->space];
        spdl__store(&list->at, list->at + 1); /* pairs with again_room: it was read */
        if (list->stream || list->at < list->count) { /* the slot stays */
            ++c->shift;
            return got;
        }
        spdl__list_put_back(list);
    }
    ++c->head;
    return got;
}

/* Before the head is stored, by a word that moves or by cursor_store. Each release pairs with the
   acquire of the thread that reads the field after the head, or compares and swaps the head after
   the field. Whether anything was read or passed. */
SPDL__PRIVATE bool spdl__cursor_settle(const spdl__cursor *c, uint64_t now) {
    spdl__edge *edge = c->edge;
    const bool moved = c->head != c->from || c->shift != edge->shift;
    uint64_t ticket, waited = 0;
    if (c->shift != edge->shift) spdl__store(&edge->shift, c->shift);
    if (c->dropped != edge->dropped) spdl__store(&edge->dropped, c->dropped);
    if (c->epoch_ends != edge->epoch_ends) spdl__store_relaxed(&edge->epoch_ends, c->epoch_ends);
    for (ticket = c->from; now != 0 && ticket < c->head; ++ticket)
        waited += spdl__edge_put_wait(edge, ticket, now);
    if (waited != 0) spdl__add(&edge->put_wait_ns, waited);
    return moved;
}

/* For a merge and the trainer, which have no row's calls in the word: the head, too. */
SPDL__PRIVATE bool spdl__cursor_store(const spdl__cursor *c, uint64_t now) {
    if (!spdl__cursor_settle(c, now)) return false;
    (void)spdl__exchange(&c->edge->word, c->head << SPDL__HEAD_BITS);
    spdl__edge_took(c->edge, c->from, c->head, now);
    return true;
}

/* ============================================================================================= */
/* >>flow-impl
   What a pipeline is made of: rows (nodes), the calls of their functions (tasks), the threads that
   run them (groups). The rooms that follow are in the order of an item's way: >>claim-impl takes it
   >>call-impl calls the function and puts the result, >>batch-impl and >>merge-impl are the rows
   that call nothing, >>defer-impl has the calls that end elsewhere, and >>step-impl is what a
   worker does in a row, from its first item there until it leaves.

   A worker enters a row by taking an item, then calls, puts, takes the next item, and so on for up
   to SPDL__SITTING_NS (a sitting). So nothing is ever taken and not begun, and calls of a row begin
   in the order of its inputs. When the worker leaves, `active` of the row's word goes down by one.

   Orders. `closed`, `ended`, `open`, `leaving` and `stopping` go from 0 to 1 and stay: stored with
   release and loaded with acquire by threads that take or look, so that what was written before (an
   error, the cut, what init has stored) is seen with them. `limit` guards nothing.

   Branches. The edges of a branch are those of its path rows, which do nothing else. What a branch
   routes is put at once; what a path then holds beyond its buffer_size waits. A branch is called
   while fewer than its own buffer_size wait, on all its paths together. One path may hold them all,
   so its edge has slots for both, and no result ever waits outside of a ring. A merge has no edge
   of its own in front: it reads those of the last row of each path.

   Epochs. The end of an epoch is passed when no other call of the row is active, and handed on at
   once; a merge does so when every path is there.

   Failures. The first failure that exceeds a budget is recorded and cuts the flow: with tickets
   given in advance at its ticket, which stays unfilled, so that exactly the items before it are
   delivered; else after what was in flight. The row and all before it take no more: they finish,
   and what is after them delivers what it got. The thread that ends a row also ends those after it
   that have nothing to call, so that workers which are all in calls that block, further up, are not
   waited for.

   Stop. The flag STOPPED in every word lets nobody enter any more; a worker inside leaves after the
   call at hand, and the last one to leave wakes the stop. A call of a source with a thread of its
   own may never return: destroy goes on without it (pipeline_abandon, tests/model/leave.pml). That
   thread then frees what the call returns, does not log, and drops its reference; the last
   reference frees the pipeline. */

#define SPDL__ABANDONED 2u /* a call that destroy does not wait for */
#define SPDL__MAX_CONCURRENCY 4096
#define SPDL__MAX_BUFFER (1 << 20)

/* Buckets of the histogram: exact below 8, then 8 to each power of two, up to 2^43 ns (2.4 h). */
#define SPDL__SUB_BITS 3
#define SPDL__TOP_BITS 43
#define SPDL__BUCKETS ((SPDL__TOP_BITS - SPDL__SUB_BITS + 1) << SPDL__SUB_BITS)

/* What one worker counted for one stage: one writer, read by snapshots. In the cell after those of
   the workers `freed` is added to by any stop, the rest is under external_lock; the producer
   counts in the first cell of its row, which no worker runs, the trainer times answers in the
   last. */
typedef struct spdl__counters {
    uint64_t tasks, failures, skips, retries, freed;
    uint64_t made;     /* items handed on that it did not get as its input */
    uint64_t timed_ns; /* of the calls in the histogram */
    uint64_t max_ns;
    int64_t meter_due; /* sittings until one is measured; not for others */
    uint64_t metered, metered_blind; /* calls that were measured; of them, without schedstat */
    uint64_t metered_ns, metered_cpu_ns, metered_wait_ns;
    uint64_t bytes_in, bytes_out;
    uint64_t bucket[SPDL__BUCKETS];
    char pad[SPDL_CACHE_LINE];
} spdl__counters;

typedef struct spdl__deferred spdl__deferred;
typedef struct spdl__again spdl__again;
typedef struct spdl__tuner spdl__tuner;
typedef struct spdl__group spdl__group;

typedef struct spdl__node {
    /* written by create */
    spdl_stage row;
    int index;
    char name[SPDL_NAME_BYTES];
    bool ordered;    /* results come in the order of the inputs */
    bool serial;     /* one call at a time: results take their ticket when they are put */
    bool by_ticket;  /* ordered and not serial: tickets are promised when the inputs are taken */
    bool plain;      /* a result is what the function says: no .emits, no split, no .deferred */
    bool held;       /* items are taken while the word is held: a window, or promises of .again */
    bool splits;     /* a branch whose batches are joined again */
    bool at_end;     /* the trainer or the producer may wait for what it does */
    bool alone;      /* the row says one call at a time */
    bool places;     /* its calls write into the batches of the next row */
    uint32_t above;  /* bit i: what row i makes can come here */
    uint32_t beside; /* bit i: row i writes an edge that this one reads, or the other way */
    int paths;       /* branch: rows whose edge it writes; merge: rows whose edge it reads */
    uint8_t path[SPDL_MAX_STAGES];
    size_t batch_size; /* what comes out: the most items in a batch; 0: no batches of ours */
    struct spdl__node *branch; /* a row of a path whose batches are joined: the branch that splits
                                  them; else NULL */
    struct spdl__node *begin;  /* merge: the branch it ends; of sources: the first path */
    struct spdl__node *before; /* the row that writes `in`; of a path, its branch; or NULL */
    double weight;             /* of the path that ends here, for SPDL_MERGE_WEIGHTED */
    spdl__edge *in;  /* NULL for rows that read none or several */
    uint64_t *word;  /* of the edge it reads, or `own` */
    spdl__edge out;
    spdl__counters *counters; /* one per worker, and one for other threads */
    spdl__batch_pool *batches;
    spdl__batch_pool *buffers;
    spdl__freelist freelist;
    spdl__deferred *deferred;
    spdl__again *again; /* places for calls that return SPDL_AGAIN, as many as calls at once */
    spdl__group *group; /* whose workers run it */
    uint32_t *settled; /* completion order with a window: stamps of the calls that have ended */
    uint64_t settled_mask;
    char pad0[SPDL_CACHE_LINE];
    /* written by the thread that takes: the word of a source or merge */
    uint64_t own;
    /* written by the thread that holds the word, or is alone in a serial row */
    uint32_t flushed;  /* the call without input was made in this epoch */
    uint32_t turn;     /* merge: the path that is looked at first */
    uint64_t taken;    /* items of this epoch that a merge took from here; by the merge */
    uint64_t refused;  /* merge: what merge_fn saw when it said to wait */
    uint64_t begun;    /* with a window: so many calls; all of those before `oldest` have ended */
    uint64_t oldest;
    uint64_t number;   /* batch: of the next one in this epoch */
    uint64_t range;    /* with .flush: what came in last */
    spdl__batch *open_batch;
    uint64_t epoch;    /* of the items that pass now */
    uint64_t first;    /* ticket of the first result of this epoch */
    uint64_t dropped;  /* batch in place: `dropped` of its input when the epoch began */
    uint64_t tokens;   /* batch: so many have come */
    uint64_t made;     /* source: items made so far in this epoch */
    uint64_t made_all; /* and in all of them */
    char pad1[SPDL_CACHE_LINE];
    /* written now and then, by any thread */
    uint32_t limit;  /* the concurrency now */
    uint32_t closed; /* nothing more is taken: it failed, or a stage below did */
    uint32_t ended;  /* source and feed: there is no more */
    uint32_t deferred_lock;
    uint32_t deferred_free; /* 1 + the first free place in `deferred`, or 0 */
    uint64_t cut;    /* with tickets in advance: that of the failure that ended the pipeline */
    uint64_t calls;  /* for max_failure_rate */
    uint64_t failures;
    uint64_t tolerated; /* of them; a rewind does not forget these */
    uint64_t logged;    /* of these: so many when the log had the line about them */
    uint64_t nulls;   /* with SPDL_DEBUG: results that were NULL, before the first that was not */
    uint64_t unfreed; /* and items it made that had to be freed, without free_item */
    char first_text[SPDL_TEXT_BYTES / 2]; /* why the first of those, by its thread */
    uint64_t item_ns; /* moving average of a call; a guess */
    uint32_t calling; /* source with a thread of its own: 1 while it calls, by that thread;
                         SPDL__ABANDONED by destroy */
    char pad2[SPDL_CACHE_LINE];
    /* batch in place: by the row, and by calls of the row before; all under the lock */
    uint32_t place_lock;
    spdl__batch *place;     /* batches that calls write into, the open one among them */
    uint64_t place_epoch;   /* of the items the row takes */
    uint64_t place_dropped; /* dropped items of this epoch that the row has passed, or fewer */
    char pad3[SPDL_CACHE_LINE];
    /* written under blame_lock: the trainer waited while this row's call was running, and while no
       worker took its input */
    uint64_t exposed_ns, exposed_idle_ns;
} spdl__node;

/* The threads of one pool and the rows they run: all but those with threads of their own, or one of
   those. Written by create. */
struct spdl__group {
    spdl_pipeline *pipeline;
    spdl_pool *pool; /* NULL: the trainer's thread, with workers = 0 */
    bool own_pool;
    int first; /* its workers count from here in the pipeline */
    int workers;
    int guests; /* so many of them, the last ones, are places without a thread */
    uint32_t rows; /* a bit for each */
    spdl__client client;
    spdl__client_slot *slot;
    uint32_t abandoned; /* its thread is in a call that destroy does not wait for; by destroy */
};

/* One call of a stage on a worker; there is one for each worker, used again and again. Written by
   that worker, before the call and, as what the call asks for, during it. */
struct spdl_task {
    spdl_pipeline *pipeline;
    spdl__node *node;
    int worker;
    uint32_t live;  /* the function is running; other threads look, if they misuse a task */
    uint64_t thread; /* that runs it */
    bool taken;     /* the input is not the library's any more */
    bool call_error; /* the call fails, whatever it returns: what it asked for cannot be */
    bool row_error;  /* nor can it in any other call: the row is wrong */
    bool flushing;
    bool cut_short; /* it would be repeated, but for a stop: neither a result nor a failure */
    int path;
    void *buffer;        /* what spdl_buffer gave and was not handed on yet */
    spdl__batch *holder; /* whose block it is, or a part of it */
    uint64_t sequence;
    uint64_t ticket;
    uint64_t place;  /* among the calls of a stage with a window */
    uint64_t since;  /* when it began */
    spdl__item in;
    spdl__list *list;
    spdl__deferred *deferred;
    spdl__again *again;  /* of a row with .again */
    spdl__batch **split; /* a branch of batches: what goes down each path, NULL before */
    void *no_state;      /* what spdl_state returns where there is none */
    spdl__meter meter;   /* of the worker */
    char text[SPDL_TEXT_BYTES];
};

/* A place for one call of a row with .again, from when its input is taken until it is over. Written
   by the worker that runs it. */
typedef enum spdl__again_state {
    SPDL__AGAIN_FREE,
    SPDL__AGAIN_RUNNING, /* a worker has the call */
    SPDL__AGAIN_WAITING  /* it has returned SPDL_AGAIN: whoever makes it RUNNING goes on */
} spdl__again_state;

struct spdl__again {
    uint32_t state; /* spdl__again_state */
    bool flush;
    uint64_t calls; /* that returned SPDL_AGAIN */
    uint64_t ticket, place;
    spdl__item in;
    void *user;         /* spdl_state */
    void *stream;       /* in input order: the list of what it has handed on; else NULL */
};

struct spdl_pipeline {
    /* written by create */
    spdl_allocator allocator;
    spdl_logger logger;
    spdl_profiler profiler;
    bool has_hooks; /* some row has init or fini */
    bool threaded;  /* has workers, of whatever pool */
    bool doctored;   /* has a doctor */
    bool may_starve; /* has a merge that may wait for one path while another is full */
    int workers;     /* of all groups; at least 1: the trainer is worker 0 when there is no pool */
    int count;      /* rows but the sink */
    int groups;
    spdl__group *group;  /* the first has the pool; its pool is NULL with workers = 0 */
    spdl__group *rescue; /* the last, of normal priority; for some time in the place of the first
                            when the trainer has waited for polite workers; or NULL */
    const uint32_t *sleepers; /* of the pool when there is but one group; `waiting` when there is no
                                 thread but the trainer; else a word that is 1 */
    spdl__node *node;
    spdl__node *last; /* the row in front of the sink */
    spdl__edge *sink;
    spdl__node *feed; /* the first row when items are pushed, or NULL */
    spdl__node *mix;  /* the merge of several sources, or NULL */
    spdl_task *task;  /* [worker] */
    spdl__batch **split; /* [worker * SPDL_MAX_STAGES + path], for branches */
    spdl__tuner *tuner;
    uint64_t process;
    uint64_t start_ns;
    uint64_t step_device_ns, calls_device_ns; /* written by spdl_cuda.h */
    struct spdl__reporter *reporter; /* NULL unless reports were asked for */
    struct spdl__doctor *doctor; /* NULL unless it was asked for, and these two */
    struct spdl__hand *hand;
    const char *tokens;    /* count of them: items that are none */
    spdl__trace *trace;    /* NULL: nothing is recorded */
    /* written by workers, each its own */
    void **local;          /* [worker * count + row] */
    uint8_t *inits;        /* [worker]: 0 to come; 1 + rows whose init has succeeded */
    char pad0[SPDL_CACHE_LINE];
    /* written rarely, by any thread */
    uint32_t stopping;
    uint32_t leaving;      /* destroy asks the workers to run fini */
    uint32_t left;         /* workers that have */
    uint32_t joined;       /* workers that ran every init */
    uint32_t open;         /* all of them did: calls may begin */
    uint32_t failed;       /* bit i: row i has, more often than it may; under error_lock */
    uint32_t late;         /* a stop has waited in vain */
    uint64_t references;   /* destroy, and every thread that it has abandoned */
    uint32_t completing;   /* threads inside spdl_complete */
    uint32_t error_lock;
    spdl_error error;      /* under it */
    uint32_t purge_lock;
    uint32_t stops;        /* threads inside spdl_pipeline_stop */
    uint64_t rewinder;     /* the thread inside spdl_pipeline_rewind, or 0 */
    uint32_t external_lock; /* the counters of threads that are no workers */
    spdl__os_event quiet;  /* a call has ended while stopping, or a worker has left */
    char pad1[SPDL_CACHE_LINE];
    /* written by the producer */
    uint32_t producer_inside;
    uint32_t producer_waits; /* set by it before it sleeps, cleared by the thread that wakes it */
    spdl__os_event room;   /* the edge after the feed has some */
    char pad2[SPDL_CACHE_LINE];
    /* written by the trainer */
    uint32_t trainer_inside;
    uint64_t trainer;      /* with workers = 0: the thread that is inside next, or 0 */
    bool closed_returned;
    spdl__item last_item;
    uint64_t delivered;
    uint64_t first_item_ns;
    uint64_t ended_ns;
    uint64_t wait_since;   /* 0, or when the wait in next began */
    uint64_t wait_ns;
    uint64_t first_wait_ns; /* what it was when the first item came */
    uint64_t ready_ns;     /* time inside next while an item was ready */
    uint64_t taker;        /* the thread that took the first item */
    uint64_t taker_queued_ns; /* how long it had been on a run queue by then, or SPDL__NEVER */
    uint64_t answer_wait_ns; /* with a feed: time items lay in the sink */
    uint64_t hurried_ns;   /* when it slept last, and could be rescued from that */
    uint32_t hurry;        /* the rescue works, not the first group; read by all */
    char pad3[SPDL_CACHE_LINE];
    /* while the trainer waits; read by threads that take and put */
    uint32_t waiting;      /* set before it sleeps, cleared by the thread that wakes it */
    spdl__os_event fed;    /* the sink got what the trainer waits for, or an end */
    uint32_t blame_lock;   /* the rest: written under it */
    uint64_t blame_since;  /* what the trainer waits for is where `blame` says since then; or 0 */
    spdl__node *blame;
    bool blame_idle;       /* it waits for a worker there */
    char pad4[SPDL_CACHE_LINE];
    uint64_t seen_runnable_ns; /* what snapshots have reported; written by them */
    uint32_t process_lock;     /* the rest: written under it */
    spdl_process_stats process_first, process_last;
    uint64_t trainer_runnable_ns;
};

SPDL__PRIVATE spdl__edge *spdl__path_edge(const spdl_pipeline *p, const spdl__node *node,
                                          int path) {
    return &p->node[node->path[path]].out;
}

/* Of a token the row after which the flow was cut, else -1. */
SPDL__INLINE int spdl__token_row(const spdl_pipeline *p, const void *item) {
    const uintptr_t at = (uintptr_t)item - (uintptr_t)p->tokens;
    return p->tokens != NULL && at < (uintptr_t)p->count ? (int)at : -1;
}

SPDL__PRIVATE bool spdl__row_calls(const spdl_stage *row) {
    return row->kind == SPDL_KIND_SOURCE || row->kind == SPDL_KIND_PIPE ||
           row->kind == SPDL_KIND_BRANCH;
}

/* All rows may have changed: wakes whoever can go on. (>>claim-impl) */
SPDL__PRIVATE void spdl__wake_all(spdl_pipeline *p);

/* ============================================================================================= */
/* >>claim-impl
   Taking an item: whether a row can run, the compare-and-swap that claims its next item, what is
   done while its word is held, and whom that wakes.

   A swap that fails means "look elsewhere", never "wait". What is rare is done while the word is
   held (claim_hold): passing dropped items, the items of a list, the end of an epoch, the call
   of .flush, completion order within a window, and the end of the row. Conditions are looked at
   again then, as they may have been another's when the row looked runnable. Rows that call nothing
   (batch, merge) do all their work so. User code never runs there except merge_fn, an allocator
   when more batches are needed than were made, and log_fn when such a row fails.

   The wake rule in a pipeline. Each of these is a read-modify-write, or has a full barrier after
   it; then the thread reads `sleepers` of the pool: taking an item (one input less: room for the
   row before; and the put before it: an input for the row after); leaving a row (a place in it);
   releasing a held word; the trainer's take; the producer's push; spdl_complete; a new concurrency;
   a failure. After the first take of a sitting a worker looks at all rows of its pool, as it may
   have been woken for another, and after the others at its own row and those before and after.
   After it has left it looks for work itself, which covers all rows of its pool. A trainer's take
   from a large buffer looks at the last row only while no more than half of it is on the way (a low
   watermark: a worker that is woken makes several items before it sleeps again); a trainer that is
   about to sleep, or asks for the stats, looks without that.

   Threads: workers; the trainer and the producer for the edges at the ends. */

/* --- what can run --- */

SPDL__PRIVATE bool spdl__claim_flows(const spdl_pipeline *p) {
    return !spdl__load32(&p->stopping) && spdl__load32(&p->open);
}

/* The group that runs the rows of `group` now: with polite workers it may be another. */
SPDL__PRIVATE const spdl__group *spdl__claim_group(const spdl_pipeline *p,
                                                   const spdl__group *group) {
    return group == &p->group[0] && p->rescue != NULL && spdl__load32(&p->hurry) ? p->rescue
                                                                                 : group;
}

/* Whether it is this group's turn. */
SPDL__PRIVATE bool spdl__claim_turn(const spdl_pipeline *p, const spdl__group *group) {
    return p->rescue == NULL || (group != &p->group[0] && group != p->rescue) ||
           spdl__claim_group(p, &p->group[0]) == group;
}

/* The number of the result that the next input makes, dropped ones not counted. */
SPDL__INLINE uint64_t spdl__claim_position(const spdl__node *node, uint64_t word) {
    if (node->serial) return spdl__load_relaxed(&node->out.tail);
    return spdl__head(word) + spdl__load(&node->in->shift); /* pairs with cursor_settle */
}

/* Of a branch: whether one more result may be routed, as fewer wait than may. */
SPDL__PRIVATE bool spdl__claim_routes(const spdl_pipeline *p, const spdl__node *node) {
    uint64_t waiting = 0;
    int i;
    for (i = 0; i < node->paths; ++i) {
        const spdl__edge *edge = spdl__path_edge(p, node, i);
        const uint64_t until = spdl__edge_until(edge, edge->buffer_size, false);
        const int64_t over = (int64_t)(spdl__load_relaxed(&edge->tail) - until);
        if (over > 0) waiting += (uint64_t)over;
    }
    return waiting < (uint64_t)node->row.buffer_size;
}

/* For how many more results there is room; of a branch 1, if there is any. Exact for the thread
   that is alone in a row, or holds its word; else a guess. */
SPDL__PRIVATE uint64_t spdl__claim_room(const spdl_pipeline *p, const spdl__node *node,
                                        uint64_t word) {
    uint64_t until, at;
    if (node->row.kind == SPDL_KIND_BRANCH) return spdl__claim_routes(p, node);
    until = spdl__edge_until(&node->out,
                             spdl__load_relaxed(&node->out.buffer_size) +
                                 spdl__load_relaxed32(&node->limit),
                             node->by_ticket);
    at = spdl__claim_position(node, word);
    return (int64_t)(until - at) > 0 ? until - at : 0;
}

/* Completion order with a window: how many calls may begin before one more of those that run has
   ended. */
SPDL__PRIVATE uint64_t spdl__claim_window_left(const spdl__node *node) {
    uint64_t oldest = spdl__load_relaxed(&node->oldest);
    const uint64_t begun = spdl__load_relaxed(&node->begun);
    if (node->settled == NULL) return UINT64_MAX;
    while (oldest < begun &&
           spdl__load32(&node->settled[oldest & node->settled_mask]) == (uint32_t)(oldest + 1))
        ++oldest;
    return (uint64_t)node->row.reorder_window + 1 - (begun - oldest);
}

/* Whether a step of a merge would do something. (>>merge-impl) */
SPDL__PRIVATE bool spdl__merge_runnable(const spdl_pipeline *p, const spdl__node *node);

/* Whether a call that has returned SPDL_AGAIN can go on. (>>again-impl) */
SPDL__PRIVATE bool spdl__again_runnable(const spdl_pipeline *p, const spdl__node *node,
                                        uint64_t word);

/* Any thread: whether a step of this row would do something, its word being `word`. The thread that
   holds a word looks at that row when it lets go. */
SPDL__PRIVATE bool spdl__claim_has_work(const spdl_pipeline *p, const spdl__node *node,
                                        uint64_t word) {
    const uint32_t active = (uint32_t)(word & SPDL__ACTIVE);
    const spdl_kind kind = node->row.kind;
    const spdl__slot *slot;
    unsigned owner;
    if ((word & SPDL__FLAGS) != 0 || kind == SPDL_KIND_PATH || kind == SPDL_KIND_FEED) return false;
    if (kind == SPDL_KIND_MERGE) return active == 0 && spdl__merge_runnable(p, node);
    if (node->again != NULL && spdl__again_runnable(p, node, word)) return true;
    if (spdl__load32(&node->closed)) return active == 0;
    if (node->in == NULL ? spdl__load32(&node->ended) != 0 : spdl__edge_exhausted(node->in))
        return active == 0 &&
               ((!node->row.flush && kind != SPDL_KIND_BATCH) ||
                spdl__load_relaxed32(&node->flushed) || spdl__claim_room(p, node, word));
    if (active >= spdl__load_relaxed32(&node->limit)) return false;
    if (node->in == NULL) return spdl__claim_room(p, node, word);
    slot = spdl__edge_slot(node->in, spdl__head(word));
    if (!spdl__edge_offers(node->in, spdl__head(word))) return false;
    owner = spdl__origin_tag(spdl__load_relaxed(&slot->origin));
    if (owner == SPDL__DROPPED) return true; /* needs no room, and makes some above */
    if (!spdl__claim_room(p, node, word)) return false;
    if (node->settled != NULL && spdl__claim_window_left(node) == 0) return false;
    return active == 0 || owner != SPDL__EPOCH_END;
}

SPDL__PRIVATE bool spdl__claim_runnable(const spdl_pipeline *p, const spdl__node *node) {
    return spdl__claim_has_work(p, node, spdl__load(node->word));
}

/* Whether `worker`, or with -1 any, would find a step to do in one of the group's rows. */
SPDL__PRIVATE bool spdl__claim_group_runnable(void *self, int worker) {
    const spdl__group *group = (const spdl__group *)self;
    const spdl_pipeline *p = group->pipeline;
    int i;
    if (p->has_hooks && worker >= 0) {
        const uint8_t inits = p->inits[group->first + worker]; /* written by this worker only */
        if (inits == 0 || (inits != UINT8_MAX && spdl__load32(&p->leaving))) return true;
    }
    if (!spdl__claim_flows(p) || !spdl__claim_turn(p, group)) return false;
    for (i = p->count - 1; i >= 0; --i)
        if ((group->rows >> i & 1) && spdl__claim_runnable(p, &p->node[i])) return true;
    return false;
}

/* --- who is woken --- */

/* After something the trainer may sleep for, and a full barrier. */
SPDL__PRIVATE void spdl__wake_trainer(spdl_pipeline *p) {
    uint32_t asleep = 1;
    if (spdl__load_relaxed32(&p->waiting) != 0 && spdl__cas32(&p->waiting, &asleep, 0))
        spdl__os_event_wake(&p->fed, 1);
}

/* Whether the trainer should look: something lies there, or so many dropped items that they keep
   others from getting there. */
SPDL__PRIVATE bool spdl__wake_sink_has(const spdl_pipeline *p) {
    const spdl__edge *sink = p->sink;
    const uint64_t head = spdl__head(spdl__load(&sink->word));
    uint64_t ticket = head;
    for (; ticket - head < sink->window / 2 + 1; ++ticket) {
        const spdl__slot *slot = spdl__edge_slot(sink, ticket);
        if (!spdl__edge_offers(sink, ticket)) return false;
        if (spdl__origin_tag(spdl__load_relaxed(&slot->origin)) != SPDL__DROPPED) return true;
    }
    return true;
}

/* The producer waits, and the row after the feed has taken. */
SPDL__PRIVATE void spdl__wake_producer(spdl_pipeline *p) {
    uint32_t one = 1;
    if (spdl__load_relaxed32(&p->producer_waits) && spdl__cas32(&p->producer_waits, &one, 0))
        spdl__os_event_wake(&p->room, 1);
}

/* Wakes a worker for one of these rows, in each pool. */
SPDL__PRIVATE void spdl__wake_rows(const spdl_pipeline *p, uint32_t rows) {
    int i;
    if (p->groups == 1 && (p->group[0].pool == NULL || !spdl__pool_has_sleepers(p->group[0].pool)))
        return;
    for (i = p->count - 1; i >= 0; --i) {
        spdl_pool *pool = spdl__claim_group(p, p->node[i].group)->pool;
        if ((rows >> i & 1) && pool != NULL && spdl__pool_has_sleepers(pool) &&
            spdl__claim_runnable(p, &p->node[i]))
            spdl__pool_wake_one(pool);
    }
}

SPDL__NOINLINE void spdl__wake_look(spdl_pipeline *p, const spdl__node *node, uint32_t rows,
                                    const spdl__group *all) {
    if (spdl__load_relaxed32(&p->waiting) != 0 && /* the trainer sleeps */
        (p->group[0].pool == NULL || (node == p->last && spdl__wake_sink_has(p))))
        spdl__wake_trainer(p);
    if (p->feed != NULL && node == p->feed + 1) spdl__wake_producer(p);
    if (!spdl__claim_flows(p)) return;
    if (all != NULL && all->pool != NULL) {
        if (spdl__pool_has_sleepers(all->pool) && spdl__pool_runnable(all->pool, -1, all))
            spdl__pool_wake_one(all->pool);
        rows = p->rescue != NULL ? rows | all->rows : rows & ~all->rows;
    }
    spdl__wake_rows(p, rows);
}

/* The wake rule: after a read-modify-write by which this row has changed, before anything that may
   take long. Looks at the trainer, the producer and `rows`, and with `all` at everything this
   group's workers could do. */
SPDL__INLINE void spdl__wake_hint(spdl_pipeline *p, const spdl__node *node, uint32_t rows,
                                  const spdl__group *all) {
    uint32_t sleepers;
    spdl__barrier_after_rmw(); /* pairs with those in pool_park, next_sleep and push_wait */
    sleepers = spdl__load_relaxed32(p->sleepers);
    if (SPDL__LIKELY(sleepers == 0)) return;
    if ((sleepers & SPDL__ASLEEP) == 0 && !node->at_end) return; /* the trainer or producer waits */
    spdl__wake_look(p, node, rows, all);
}

/* From a thread that will not look for work itself: this row has changed, and those beside it. */
SPDL__PRIVATE void spdl__wake_changed(spdl_pipeline *p, const spdl__node *node) {
    spdl__full_barrier();
    spdl__wake_look(p, node, node->beside | (uint32_t)1 << node->index, NULL);
}

SPDL__PRIVATE void spdl__wake_all(spdl_pipeline *p) {
    spdl__full_barrier();
    spdl__wake_look(p, p->last, UINT32_MAX, NULL);
    spdl__wake_producer(p);
}

/* --- putting --- */

/* Puts one result. What follows, taking the next item or leaving, looks whether somebody waits. The
   ticket was promised, so the slot is free. */
SPDL__INLINE void spdl__put(spdl__node *node, spdl__edge *edge, uint64_t ticket,
                            const spdl__item *what, uint64_t now) {
    spdl__slot *slot;
    if (node->serial) { /* one call at a time: its place in the word is enough */
        ticket = spdl__load_relaxed(&edge->tail);
        spdl__store_relaxed(&edge->tail, ticket + 1);
    } else if (!node->by_ticket) {
        ticket = spdl__add(&edge->tail, 1);
    }
    slot = spdl__edge_slot(edge, ticket);
    spdl__store_pointer(&slot->item, what->item);
    spdl__store_relaxed(&slot->origin, what->origin);
    spdl__store_relaxed(&slot->range, what->range);
    spdl__store_relaxed32(&slot->done, (uint32_t)(now >> 10));
    /* pairs with slot_has: all that is there before the stamp */
    spdl__store32(&slot->stamp, (uint32_t)(ticket + 1));
    SPDL_TEST_POINT("pipeline put");
    if (!SPDL__NO_STATS && SPDL__UNLIKELY(spdl__load_relaxed(&edge->gap_since) != 0) &&
        spdl__head(spdl__load_relaxed(&edge->word)) == ticket)
        spdl__edge_gap_close(edge, spdl_time_ns()); /* `now` may be from before many quick calls */
}

/* An item that was dropped: its place is another's. */
SPDL__PRIVATE void spdl__put_dropped(spdl__node *node, uint64_t ticket, uint64_t now) {
    const spdl__item dropped = { NULL, SPDL__DROPPED, 0 };
    if (node->serial) return; /* no place was promised */
    if (node->by_ticket) spdl__put(node, &node->out, ticket, &dropped, now);
    spdl__add(&node->out.refunds, 1);
}

/* By the thread that holds the word, with no call active and with room: the epoch has ended here,
   too. */
SPDL__PRIVATE void spdl__put_epoch_end(spdl_pipeline *p, spdl__node *node, uint64_t ticket,
                                       uint64_t now) {
    const uint64_t epoch = spdl__load_relaxed(&node->epoch);
    const spdl__item end = { NULL, spdl__origin(epoch, SPDL__EPOCH_END), 0 };
    const bool branches = node->row.kind == SPDL_KIND_BRANCH;
    int i;
    if (!branches) spdl__put(node, &node->out, ticket, &end, now);
    for (i = 0; branches && i < node->paths; ++i)
        spdl__put(node, spdl__path_edge(p, node, i), 0, &end, now);
    spdl__store_relaxed32(&node->flushed, 0);
    node->number = 0;
    node->first = node->by_ticket ? ticket + 1 : spdl__load_relaxed(&node->out.tail);
    spdl__store_relaxed(&node->epoch, epoch + 1);
}

/* Nothing more will come out of this edge. */
SPDL__PRIVATE void spdl__put_end(spdl_pipeline *p, spdl__edge *edge, uint64_t end) {
    spdl__store(&edge->end, end); /* pairs with the loads in exhausted and in cursor_at_head */
    if (edge != p->sink) return;
    spdl__full_barrier();
    spdl__wake_trainer(p);
}

/* By the thread that holds the word, with no call active: nothing more comes out of this row. */
SPDL__PRIVATE void spdl__put_finish(spdl_pipeline *p, spdl__node *node, uint64_t position) {
    const uint64_t now = spdl_time_ns();
    const spdl_kind kind = node->row.kind;
    const spdl__slot *slot;
    uint64_t end;
    int i;
    if (node->in != NULL) spdl__edge_ended(node->in, now);
    for (i = 0; i < node->paths; ++i) { /* those a merge reads, or a branch writes */
        spdl__edge *edge = spdl__path_edge(p, node, i);
        if (kind == SPDL_KIND_MERGE)
            spdl__edge_ended(edge, now);
        else spdl__put_end(p, edge, spdl__load_relaxed(&edge->tail));
    }
    if (kind == SPDL_KIND_BRANCH) return;
    end = node->by_ticket ? spdl__min(position, spdl__load(&node->cut))
                          : spdl__load_relaxed(&node->out.tail);
    spdl__put_end(p, &node->out, end);
    if (node->again == NULL || end == 0 || end != spdl__load(&node->cut)) return;
    slot = spdl__edge_slot(&node->out, end - 1); /* of the failure: what it has made is delivered */
    if (spdl__slot_has(slot, end - 1) && spdl__origin_tag(slot->origin) == SPDL__LIST &&
        spdl__load32(&((spdl__list *)slot->item)->open))
        spdl__stream_close(&node->out, end - 1, (spdl__list *)slot->item);
}

/* --- the word --- */

/* The word moves by `change`, which lets go of it or gives back a place. Pairs with the acquire of
   the word by the thread that enters next, finishes the row or stops: all that was put, and every
   plain field, is there. Returns what the word is now. */
SPDL__INLINE uint64_t spdl__claim_move(spdl_pipeline *p, spdl__node *node, uint64_t change) {
    const uint64_t word = spdl__add(node->word, change) + change;
    if (SPDL__UNLIKELY((word & SPDL__STOPPED) != 0 && (word & SPDL__ACTIVE) == 0))
        spdl__os_event_wake(&p->quiet, SPDL__ALL);
    return word;
}

/* A worker in a row, from its first item there until it leaves; on its stack. */
typedef struct spdl__sitting {
    spdl_pipeline *p;
    spdl__node *node;
    uint64_t word;   /* of the row, as far as we know */
    uint64_t until;  /* results below that had room when we looked last */
    uint64_t now;    /* the clock when it was read last: before the first item, after timed calls */
    uint64_t waited; /* for a place in the buffer, by items that got one as we took others */
    uint64_t each_waited;
    uint32_t calls;
    bool inside;     /* we are counted in `active` */
    bool timed;      /* calls are timed one by one */
    bool flush;      /* the call has no input */
    spdl__again *again; /* the call goes on that returned SPDL_AGAIN; else NULL */
    spdl__item in;
    uint64_t ticket, place;
} spdl__sitting;

typedef enum spdl__taken {
    SPDL__LEFT, /* there is nothing to take here, or others are at it */
    SPDL__CALL, /* an item, or the call without one */
    SPDL__DONE  /* something was done that is no call */
} spdl__taken;

/* Nobody else enters or takes before the word is let go of; those inside may leave. */
SPDL__INLINE bool spdl__claim_hold(spdl__sitting *s) {
    const uint64_t held = (s->word + !s->inside) | SPDL__HELD;
    if (!spdl__cas(s->node->word, &s->word, held)) return false;
    s->word = held;
    SPDL_TEST_POINT("pipeline held");
    return true;
}

/* Held: with a window, the next call has a place in it. */
SPDL__PRIVATE void spdl__claim_window_enter(spdl__sitting *s) {
    spdl__node *node = s->node;
    if (node->settled == NULL) return;
    spdl__store_relaxed(&node->oldest, node->begun + spdl__claim_window_left(node) -
                                           (uint64_t)node->row.reorder_window - 1);
    s->place = node->begun;
    spdl__store_relaxed(&node->begun, node->begun + 1);
}

/* Held: takes what lies at the cursor, or ends an epoch or the row. */
SPDL__PRIVATE spdl__taken spdl__claim_held_item(spdl__sitting *s, spdl__cursor *c) {
    spdl_pipeline *p = s->p;
    spdl__node *node = s->node;
    const uint64_t before = spdl__head(s->word) + node->in->shift;
    const bool alone = (spdl__load(node->word) & SPDL__ACTIVE) == 1; /* all others have put */
    const spdl__peek peek = spdl__cursor_look(c);
    const bool room = spdl__claim_room(p, node, s->word);
    const bool epoch_end = peek == SPDL__PEEK_EPOCH_END;
    const bool flush = node->row.flush && !node->flushed;
    s->ticket = before; /* dropped ones leave the number of results as it is */
    if (peek == SPDL__PEEK_ITEM) {
        if (!room || spdl__claim_window_left(node) == 0) return SPDL__LEFT;
        spdl__claim_window_enter(s);
        s->in = spdl__cursor_take(c);
        return SPDL__CALL;
    }
    if ((!epoch_end && c->head < c->end) || !alone || (!room && (flush || epoch_end)))
        return SPDL__LEFT;
    if (flush) {
        spdl__claim_window_enter(s);
        s->flush = true;
        s->in.item = NULL;
        s->in.origin = SPDL__DROPPED;
        s->in.range = node->range;
        spdl__store_relaxed32(&node->flushed, 1);
        return SPDL__CALL;
    }
    if (epoch_end) {
        spdl__put_epoch_end(p, node, before, s->now);
        spdl__cursor_pass_epoch_end(c);
    } else if (s->inside) {
        return SPDL__LEFT; /* what this sitting has done is booked before the row ends */
    } else {
        spdl__put_finish(p, node, before);
        s->word |= SPDL__FINISHED;
    }
    return SPDL__DONE;
}

/* The ways to take that change more than the word. */
SPDL__NOINLINE spdl__taken spdl__claim_held(spdl__sitting *s) {
    spdl__node *node = s->node;
    spdl__edge *in = node->in;
    spdl__taken taken = SPDL__LEFT;
    uint64_t change = (uint64_t)0 - SPDL__HELD;
    bool moved = false;
    spdl__cursor c;
    if (!spdl__claim_hold(s)) return SPDL__LEFT;
    if (in != NULL && !spdl__load32(&node->closed)) {
        c = spdl__cursor_at_head(in);
        taken = spdl__claim_held_item(s, &c);
        moved = spdl__cursor_settle(&c, s->now);
        if (moved && taken == SPDL__LEFT) taken = SPDL__DONE;
        change += (c.head - c.from) << SPDL__HEAD_BITS;
    } else if (!s->inside && (spdl__load(node->word) & SPDL__ACTIVE) == 1 &&
               (spdl__load32(&node->closed) || spdl__load32(&node->ended))) {
        spdl__put_finish(s->p, node, in != NULL ? spdl__head(s->word) + in->shift : 0);
        s->word |= SPDL__FINISHED;
        taken = SPDL__DONE;
    }
    change += s->word & SPDL__FINISHED;
    if (taken == SPDL__CALL) {
        s->inside = true;
    } else if (!s->inside) {
        change -= 1;
    }
    s->word = spdl__claim_move(s->p, node, change);
    if (moved) spdl__edge_took(in, c.from, c.head, s->now);
    return taken;
}

/* By a copy, so that the sitting itself can stay in registers. */
SPDL__INLINE spdl__taken spdl__claim_rare(spdl__sitting *s) {
    spdl__sitting copy = *s;
    const spdl__taken taken = spdl__claim_held(&copy);
    *s = copy;
    return taken;
}

/* The way nearly all items are taken: what lies at the head, by one compare-and-swap. When that
   fails others are at it, and we look elsewhere. */
SPDL__INLINE spdl__taken spdl__claim_take(spdl__sitting *s) {
    spdl__node *node = s->node;
    spdl__edge *in = node->in;
    const uint32_t limit = spdl__load_relaxed32(&node->limit);
    const uint64_t head = spdl__head(s->word);
    uint64_t position, word;
    if (s->inside ? (s->word & SPDL__FLAGS) != 0 || (s->word & SPDL__ACTIVE) > limit
                  : (s->word & SPDL__BUSY) >= limit)
        return SPDL__LEFT;
    s->flush = false;
    if (SPDL__UNLIKELY(spdl__load32(&node->closed)))
        return s->inside ? SPDL__LEFT : spdl__claim_rare(s);
    if (in != NULL) {
        const spdl__slot *slot = spdl__edge_slot(in, head);
        if (!spdl__slot_has(slot, head))
            return !s->inside && spdl__edge_exhausted(in) ? spdl__claim_rare(s) : SPDL__LEFT;
        s->in = spdl__slot_read(slot);
        if (SPDL__UNLIKELY(spdl__origin_tag(s->in.origin) >= SPDL__LIST || node->held))
            return spdl__claim_rare(s);
    } else if (spdl__load32(&node->ended)) {
        return s->inside ? SPDL__LEFT : spdl__claim_rare(s);
    }
    position = spdl__claim_position(node, s->word);
    if ((int64_t)(s->until - position) <= 0) { /* used up; what was read has made room since */
        const uint64_t room = spdl__claim_room(s->p, node, s->word);
        if (room == 0) return SPDL__LEFT;
        if (node->row.kind != SPDL_KIND_BRANCH) s->until = position + room;
    }
    s->ticket = position;
    SPDL_TEST_POINT("pipeline takes");
    word = s->word + SPDL__HEAD_ONE + !s->inside;
    if (!spdl__cas(node->word, &s->word, word)) return SPDL__LEFT;
    s->word = word;
    s->inside = true;
    if (in == NULL) return SPDL__CALL;
    if (s->timed || s->calls == 0 || s->each_waited != 0)
        s->each_waited = spdl__edge_put_wait(in, head, s->now);
    s->waited += s->each_waited;
    spdl__edge_took(in, head, head + 1, s->now);
    if ((word & SPDL__ACTIVE) < limit) spdl__edge_reader_idle(in, s->now);
    return SPDL__CALL;
}

/* Nothing more is taken here, and nothing is to be called for the end. */
SPDL__PRIVATE bool spdl__claim_over(const spdl__node *node) {
    return spdl__load32(&node->closed) ||
           (node->in != NULL && !node->row.flush && spdl__edge_exhausted(node->in));
}

/* This row has ended, or has failed and lost a call: ends it and those after it that have nothing
   to call, as every worker of theirs may be in a call that blocks. A rewind may have begun them
   anew since they were looked at first. */
SPDL__PRIVATE void spdl__claim_end_rows(spdl_pipeline *p, spdl__node *node) {
    for (; node < p->node + p->count; ++node) {
        const spdl__edge *in = node->in;
        uint64_t change = (uint64_t)0 - SPDL__HELD - 1;
        spdl__sitting s;
        s.node = node;
        s.inside = false;
        s.word = spdl__load(node->word);
        if ((s.word & SPDL__BUSY) != 0 || !spdl__row_calls(&node->row) ||
            !spdl__claim_over(node) || !spdl__claim_hold(&s))
            continue;
        if (spdl__claim_over(node)) {
            spdl__put_finish(p, node, in != NULL ? spdl__head(s.word) + in->shift : 0);
            change += SPDL__FINISHED;
        }
        (void)spdl__claim_move(p, node, change);
        spdl__wake_changed(p, node);
    }
}

/* ============================================================================================= */
/* >>call-impl
   One call: the function and its retries, what it may ask for while it runs, failures and their
   budgets, and putting the result.

   Threads: the worker (or with workers = 0 the trainer) whose task it is; a deferred call is
   settled by the thread that completes it. User functions run here, never under a lock and never
   while a word is held. An input is the call's until the function returns, and the library's again
   after that unless it was taken; a result is the library's. */

#define SPDL__RATE_CALLS 100 /* a failure rate is judged from this many calls on */
#define SPDL__NULLS 100      /* with SPDL_DEBUG: so many in a row, and nothing before, are odd */

/* --- counters --- */

SPDL__PRIVATE unsigned spdl__bucket(uint64_t ns) {
    unsigned power;
    if (ns < (1u << SPDL__SUB_BITS)) return (unsigned)ns;
    if (ns >> SPDL__TOP_BITS != 0) return SPDL__BUCKETS - 1;
    power = 63 - (unsigned)__builtin_clzll(ns);
    return ((power - SPDL__SUB_BITS + 1) << SPDL__SUB_BITS) |
           (unsigned)((ns >> (power - SPDL__SUB_BITS)) & ((1u << SPDL__SUB_BITS) - 1));
}

/* So many durations of `each`, `ns` together. */
SPDL__PRIVATE void spdl__counters_time(spdl__counters *counters, uint64_t times, uint64_t each,
                                       uint64_t ns) {
    spdl__count(&counters->timed_ns, ns);
    spdl__count(&counters->bucket[spdl__bucket(each)], times);
    if (each > spdl__load_relaxed(&counters->max_ns))
        spdl__store_relaxed(&counters->max_ns, each);
}

/* Books `calls` calls that took `ns` together, `failed` of them without success. */
SPDL__PRIVATE void spdl__counters_book(spdl__counters *counters, uint64_t calls, uint64_t failed,
                                       uint64_t ns) {
    const uint64_t good = calls - failed;
    uint64_t each;
    spdl__count(&counters->tasks, calls);
    if (SPDL__NO_STATS || good == 0) return;
    each = ns / calls;
    spdl__counters_time(counters, good, each, failed ? each * good : ns);
}

/* A moving average that a few slow calls raise fast and many quick ones lower slowly. */
SPDL__PRIVATE void spdl__counters_learn(spdl__node *node, uint64_t calls, uint64_t ns) {
    const uint64_t each = ns / calls + 1;
    const uint64_t old = spdl__load_relaxed(&node->item_ns);
    if (old == 0)
        spdl__store_relaxed(&node->item_ns, each);
    else
        spdl__store_relaxed(&node->item_ns, each > old ? old + (each - old) / 4 + 1
                                                       : old - (old - each) / 8);
}

/* --- items --- */

/* Destroys an item with the free_item of the stage that made it. */
SPDL__PRIVATE void spdl__item_free(spdl_pipeline *p, void *item, uint64_t origin) {
    const unsigned owner = spdl__origin_tag(origin);
    if (owner == SPDL__BUFFER) spdl_buffer_free(item);
    if (item == NULL || owner >= SPDL_MAX_STAGES) return;
    if (p->node[owner].row.free_item != NULL)
        p->node[owner].row.free_item(item);
    else if (SPDL__DEBUGS)
        spdl__add(&p->node[owner].unfreed, 1);
}

/* Destroys what is left in a list; how many items that were. */
SPDL__PRIVATE size_t spdl__list_drop(spdl_pipeline *p, spdl__list *list) {
    const size_t left = (size_t)(list->count - list->at);
    uint64_t at = list->at;
    for (; at < list->count; ++at) {
        const spdl__item *entry = &list->entry[at % list->space];
        spdl__item_free(p, entry->item, entry->origin);
    }
    spdl__list_put_back(list);
    return left;
}

/* --- the failure that ends a pipeline --- */

/* Whether a new failure is the one to report: the one that ends what is delivered. That is the one
   furthest downstream, and in one ordered stage the one with the smallest item: so an ordered
   pipeline without a budget fails the same way at any number of workers. The trainer reads the
   error when every stage from there on has finished, so it does not change any more. */
SPDL__PRIVATE bool spdl__error_precedes(const spdl_pipeline *p, const spdl__node *node,
                                        uint64_t item) {
    if (!p->failed) return true;
    if (!spdl__load32(&p->open)) return false; /* of several init the first is reported */
    if (p->mix != NULL && node->index < p->mix->index && spdl__load32(&p->mix->closed))
        return false; /* the merge has not waited for this path: the trainer may read the error */
    if (node->index > p->error.stage) return true;
    return node->index == p->error.stage && node->ordered && item < p->error.item;
}

/* Any thread. Nothing more is taken by this row and those above. Under the lock: of several sources
   none records a failure when their merge is closed. */
SPDL__PRIVATE void spdl__call_close(spdl_pipeline *p, spdl__node *node) {
    int i;
    spdl__spin_lock(&p->error_lock);
    spdl__store32(&node->closed, 1);
    spdl__spin_unlock(&p->error_lock);
    for (i = 0; i < p->count; ++i)
        if (node->above >> i & 1) spdl__store32(&p->node[i].closed, 1);
    spdl__wake_all(p); /* rows that are closed have an end to write, and the producer */
}

/* What is known of a failed call. */
SPDL__PRIVATE void spdl__call_error(const spdl__node *node, uint64_t item, spdl_result result,
                                    const char *text, spdl_error *error) {
    spdl__error_set(error, result, "spdl: stage %d '%s', item %llu: %s", node->index, node->name,
                    (spdl__llu)item, text);
    error->stage = node->index;
    error->item = item;
    spdl__name_copy(error->stage_name, node->name);
}

/* Any thread. Records the failure, and cuts the flow at `ticket` of this row. */
SPDL__PRIVATE void spdl__call_fatal(spdl_pipeline *p, spdl__node *node, uint64_t ticket,
                                    uint64_t item, spdl_result result, const char *text) {
    uint64_t cut = spdl__load(&node->cut);
    const uint32_t row = (uint32_t)1 << node->index;
    spdl_error error;
    bool logs;
    spdl__call_error(node, item, result, text, &error);
    spdl__spin_lock(&p->error_lock);
    logs = !(p->failed & row);
    if (spdl__error_precedes(p, node, item)) {
        p->error = error;
        logs = true;
    }
    /* pairs with the loads in next and failed: the text is there */
    spdl__store32(&p->failed, p->failed | row);
    spdl__spin_unlock(&p->error_lock);
    if (logs) spdl__log(&p->logger, SPDL_LOG_ERROR, error.text); /* not under the lock */
    while (ticket < cut && !spdl__cas(&node->cut, &cut, ticket)) {}
    spdl__call_close(p, node);
}

/* Whether one more failure is more than this stage may have. */
SPDL__PRIVATE bool spdl__call_over_budget(spdl__node *node) {
    const uint64_t failures = spdl__add(&node->failures, 1) + 1;
    if (node->row.max_failure_rate > 0) {
        const uint64_t calls = spdl__load_relaxed(&node->calls);
        return calls >= SPDL__RATE_CALLS &&
               (double)failures > node->row.max_failure_rate * (double)calls;
    }
    return node->row.max_failures >= 0 && failures > (uint64_t)node->row.max_failures;
}

/* --- what a call may ask for --- */

/* What spdl_buffer gave is not handed on. */
SPDL__PRIVATE void spdl__task_give_back(spdl_task *task) {
    char *buffer = (char *)task->buffer;
    task->buffer = NULL;
    if (spdl__token_row(task->pipeline, buffer) >= 0) return;
    if (buffer != NULL && task->node->places) {
        spdl__node *row = task->node + 1;
        spdl__spin_lock(&row->place_lock);
        task->holder->owner[(size_t)(buffer - (char *)task->holder->shown.data) /
                            row->row.item_bytes] = 0;
        spdl__spin_unlock(&row->place_lock);
    } else {
        spdl_buffer_free(buffer);
    }
}

/* The origin of a result; a buffer that is one is the call's no more. */
SPDL__PRIVATE uint64_t spdl__task_origin(spdl_task *task, const void *item) {
    unsigned owner = (unsigned)task->node->index;
    if (SPDL__UNLIKELY(task->buffer != NULL) && item == task->buffer) {
        owner = spdl__token_row(task->pipeline, item) >= 0 ? SPDL__TOKEN
                : task->node->places                       ? SPDL__IN_PLACE
                                                           : SPDL__BUFFER;
        task->buffer = NULL;
    }
    return spdl__origin(task->sequence, owner);
}

/* Takes back what a call has handed on that failed, or dropped its item after all. */
SPDL__PRIVATE void spdl__task_discard(spdl_task *task) {
    int i;
    spdl__task_give_back(task);
    if (task->list != NULL) (void)spdl__list_drop(task->pipeline, task->list);
    task->list = NULL;
    for (i = 0; task->split != NULL && i < task->node->paths; ++i) {
        spdl__batch *batch = task->split[i];
        task->split[i] = NULL;
        if (batch != NULL) spdl_batch_free(batch);
    }
    task->split = NULL;
}

/* An empty batch for each path of the branch; all or none. */
SPDL__PRIVATE bool spdl__task_split(spdl_task *task, uint64_t number) {
    spdl_pipeline *p = task->pipeline;
    int i;
    task->split = &p->split[task->worker * SPDL_MAX_STAGES];
    for (i = 0; i < task->node->paths; ++i) {
        task->split[i] = spdl__batch_get(task->node->batches);
        if (task->split[i] == NULL) break;
        task->split[i]->shown.sequence = number;
    }
    if (i == task->node->paths) return true;
    spdl__task_discard(task);
    return false;
}

/* Item `i` of a batch goes down a path. */
SPDL__PRIVATE void spdl__task_send(spdl_task *task, int path, spdl__batch *from, size_t i) {
    spdl__batch *to = task->split[path];
    to->owner[to->shown.count] = from->owner[i];
    to->shown.items[to->shown.count++] = from->shown.items[i];
    from->shown.items[i] = NULL;
}

SPDL__PRIVATE spdl_result spdl__task_fail(spdl_task *task, const char *format, ...) {
    va_list args;
    va_start(args, format);
    (void)vsnprintf(task->text, sizeof(task->text), format, args);
    va_end(args);
    return SPDL_E_STAGE;
}

/* What the call has asked for cannot be: it fails, for the reason that was just recorded. */
SPDL__PRIVATE spdl_result spdl__task_call_error(spdl_task *task, spdl_result failed) {
    task->call_error = failed != SPDL_OK;
    return SPDL_E_INVALID;
}

/* The same, in a row that no such call can be in. */
SPDL__PRIVATE spdl_result spdl__task_row_error(spdl_task *task, const char *what) {
    task->row_error = true;
    return spdl__task_call_error(task, spdl__task_fail(task, "%s", what));
}

/* Whether this is the thread that runs the call, now. */
SPDL__PRIVATE bool spdl__task_running(const spdl_task *task) {
    return spdl__load_relaxed32(&task->live) &&
           spdl__load_relaxed(&task->thread) == spdl__os_thread_id();
}

/* The same; if it is not, the log says of which function. */
SPDL__PRIVATE bool spdl__task_allows(const spdl_task *task, const char *function) {
    if (spdl__task_running(task)) return true;
    spdl__logf(&task->pipeline->logger, SPDL_LOG_ERROR,
               "spdl: %s: not inside of a call of this stage", function);
    return false;
}

SPDL_API spdl_result spdl_fail(spdl_task *task, const char *format, ...) {
    const bool running = spdl__task_running(task);
    char text[SPDL_TEXT_BYTES];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(running ? task->text : text, sizeof(text), format, args);
    va_end(args);
    if (!running)
        spdl__logf(&task->pipeline->logger, SPDL_LOG_ERROR,
                   "spdl: spdl_fail: not inside of a call of this stage: %s", text);
    return SPDL_E_STAGE;
}

SPDL_API void *spdl_ctx(const spdl_task *task) { return task->node->row.ctx; }

SPDL_API void *spdl_local(const spdl_task *task) {
    const spdl_pipeline *p = task->pipeline;
    return p->local != NULL ? p->local[task->worker * p->count + task->node->index] : NULL;
}

SPDL_API uint64_t spdl_sequence(const spdl_task *task) { return task->sequence; }

/* What users know a worker by: the rescue has further workers of the first group. */
SPDL__PRIVATE int spdl__worker_number(const spdl__group *group, int worker) {
    const spdl_pipeline *p = group->pipeline;
    return worker - group->first + (group == p->rescue ? p->group[0].workers : 0);
}

SPDL_API int spdl_worker(const spdl_task *task) {
    const spdl_pipeline *p = task->pipeline;
    int group = p->groups - 1;
    while (p->group[group].first > task->worker) --group;
    return spdl__worker_number(&p->group[group], task->worker);
}

SPDL_API bool spdl_stopping(const spdl_task *task) {
    return spdl__load32(&task->pipeline->stopping) != 0;
}

SPDL_API void spdl_take(spdl_task *task) {
    if (spdl__task_allows(task, "spdl_take")) task->taken = task->in.item != NULL;
}

/* Under place_lock: the batch that will have this number in this epoch. */
SPDL__PRIVATE spdl__batch *spdl__place_batch(spdl__node *row, uint64_t epoch, uint64_t number) {
    spdl__batch *batch = row->place;
    while (batch != NULL && (batch->epoch != epoch || batch->shown.sequence != number))
        batch = batch->next;
    if (batch != NULL) return batch;
    batch = spdl__batch_get(row->batches);
    if (batch == NULL) return NULL;
    memset(batch->owner, 0, (size_t)row->row.size);
    batch->epoch = epoch;
    batch->shown.sequence = number;
    batch->next = row->place;
    row->place = batch;
    return batch;
}

/* A part of a batch in place, for this call: the one its item will lie in if no call before drops
   its own, or the next that is free. Dropped items only move others to the front, so an item never
   lies before its place: when the batch row has come to a part, no call that still runs has it. */
SPDL__PRIVATE void *spdl__place_get(spdl_task *task, spdl__node *row) {
    const spdl__node *node = task->node;
    const uint64_t size = (uint64_t)row->row.size, epoch = spdl__load_relaxed(&node->epoch);
    uint64_t at = (node->serial ? spdl__load_relaxed(&node->out.tail) : task->ticket) - node->first;
    spdl__batch *batch;
    spdl__spin_lock(&row->place_lock);
    if (row->place_epoch == epoch) at -= row->place_dropped;
    batch = spdl__place_batch(row, epoch, at / size);
    while (batch != NULL && batch->owner[at % size] != 0)
        batch = spdl__place_batch(row, epoch, ++at / size);
    if (batch != NULL) batch->owner[at % size] = SPDL__IN_PLACE;
    spdl__spin_unlock(&row->place_lock);
    task->holder = batch;
    return batch != NULL ? (char *)batch->shown.data + at % size * row->row.item_bytes : NULL;
}

SPDL_API void *spdl_buffer(spdl_task *task) {
    spdl__node *node = task->node;
    if (!spdl__task_allows(task, "spdl_buffer")) return NULL;
    if (task->buffer != NULL) return task->buffer;
    if (node->places) {
        task->buffer = spdl__place_get(task, node + 1);
    } else if (node->buffers != NULL) {
        task->holder = spdl__batch_get(node->buffers);
        if (task->holder != NULL) task->buffer = task->holder->shown.data;
    } else {
        (void)spdl__task_row_error(task, "spdl_buffer in a stage whose row does not say "
                                         ".item_bytes, nor a SPDL_BATCH after it");
    }
    return task->buffer;
}

SPDL_API bool spdl_flushing(const spdl_task *task) { return task->flushing; }

SPDL_API uint64_t spdl_epoch(const spdl_task *task) {
    return spdl__load_relaxed(&task->node->epoch);
}

SPDL_API spdl_result spdl_emit(spdl_task *task, void *item) {
    spdl__item what;
    bool is_input;
    if (!spdl__task_allows(task, "spdl_emit")) return SPDL_E_INVALID;
    if (!task->node->row.emits)
        return spdl__task_row_error(task, "spdl_emit in a stage whose row does not say .emits");
    is_input = item != NULL && item == task->in.item && !task->taken;
    what = task->in;
    what.item = item;
    if (task->list != NULL && task->list->count >= (uint64_t)task->node->row.emits)
        return spdl__task_call_error(
            task, spdl__task_fail(task, "more than %d items from one call (.emits = %d)",
                                  task->node->row.emits, task->node->row.emits));
    if (!is_input) what.origin = spdl__task_origin(task, item);
    if (task->list == NULL) task->list = spdl__list_get(&task->node->freelist);
    if (task->list == NULL || !spdl__list_add(task->list, &what)) {
        if (!is_input && spdl__origin_tag(what.origin) == SPDL__BUFFER) task->buffer = item;
        return SPDL_E_NOMEM;
    }
    if (is_input) task->taken = true;
    return SPDL_OK;
}

SPDL_API spdl_result spdl_route(spdl_task *task, int path) {
    if (!spdl__task_allows(task, "spdl_route")) return SPDL_E_INVALID;
    if (task->node->row.kind != SPDL_KIND_BRANCH)
        return spdl__task_row_error(task, "spdl_route in a stage that is no SPDL_BRANCH");
    if (path < 0 || path >= task->node->paths)
        return spdl__task_call_error(task, spdl__task_fail(task, "path %d, but there are %d paths",
                                                           path, task->node->paths));
    task->path = path;
    return SPDL_OK;
}

static const char *const spdl__in_place_stays =
    "the items of a batch in place (.item_bytes) cannot leave it";

SPDL_API spdl_result spdl_route_items(spdl_task *task, const int *path) {
    spdl__batch *in;
    size_t i;
    if (!spdl__task_allows(task, "spdl_route_items")) return SPDL_E_INVALID;
    in = (spdl__batch *)task->in.item;
    if (task->node->batches == NULL)
        return spdl__task_row_error(
            task, "spdl_route_items in a stage that is no SPDL_BRANCH of batches");
    if (in == NULL)
        return spdl__task_call_error(task,
                                     spdl__task_fail(task, "spdl_route_items without a batch"));
    if (task->split != NULL)
        return spdl__task_call_error(task,
                                     spdl__task_fail(task, "spdl_route_items twice in one call"));
    for (i = 0; i < in->shown.count; ++i)
        if (spdl_route(task, path[i]) != SPDL_OK) return SPDL_E_INVALID;
    task->path = 0;
    if (in->shown.count > task->node->batches->size)
        return spdl__task_call_error(
            task,
            spdl__task_fail(task, "a batch with more items than the rows above can have made"));
    if (in->shown.data != NULL)
        return spdl__task_row_error(task, spdl__in_place_stays);
    if (!spdl__task_split(task, in->shown.sequence)) return SPDL_E_NOMEM;
    for (i = 0; i < in->shown.count; ++i) spdl__task_send(task, path[i], in, i);
    return SPDL_OK;
}

/* --- the call --- */

/* After a call that did not look at what spdl_emit or spdl_route returned: items are not to be lost
   in silence. A call that goes on elsewhere is judged by its completion. */
SPDL__NOINLINE spdl_result spdl__task_misused(spdl_task *task, spdl_result result, void *out) {
    const bool again = result == SPDL_AGAIN && task->again != NULL;
    if (result == SPDL_PENDING && task->deferred != NULL) {
        spdl__logf(&task->pipeline->logger, SPDL_LOG_ERROR, "spdl: stage %d '%s', item %llu: %s",
                   task->node->index, task->node->name, (spdl__llu)task->sequence, task->text);
        task->call_error = task->row_error = false;
    }
    if (result != SPDL_OK && result != SPDL_SKIP && result != SPDL_END && !again) return result;
    if ((result == SPDL_OK || again) && !task->node->row.emits) {
        if (out == task->in.item) /* its own again, taken or not */
            task->taken = false;
        else if (out != task->buffer)
            spdl__item_free(task->pipeline, out,
                            spdl__origin(task->sequence, (unsigned)task->node->index));
    }
    return SPDL_E_INVALID;
}

/* A failed call that may be repeated: its item is still there, and it left nothing behind. */
SPDL__NOINLINE bool spdl__task_repeats(spdl_task *task, spdl__counters *counters, int tries) {
    if (tries > task->node->row.retries || task->taken || task->call_error || task->split != NULL ||
        task->deferred != NULL)
        return false;
    task->cut_short = spdl__load32(&task->pipeline->stopping) != 0;
    if (task->cut_short) return false;
    spdl__task_discard(task);
    spdl__count(&counters->retries, 1);
    return true;
}

/* Calls the function, and calls it again if it fails and may be repeated. Codes that no stage may
   return are no reason to. */
SPDL__INLINE spdl_result spdl__task_call(spdl_task *task, spdl__counters *counters, void **out) {
    const spdl_profiler *profiler = &task->pipeline->profiler;
    spdl__node *node = task->node;
    spdl_result result;
    int tries = 0;
    do {
        *out = NULL;
        task->taken = task->call_error = task->row_error = task->cut_short = false;
        task->path = 0;
        task->text[0] = '\0';
        spdl__store_relaxed32(&task->live, 1);
        SPDL__PROBE(task_begin, node->row.name, task->sequence);
        spdl__profile(profiler, SPDL_EVENT_TASK_BEGIN, node->row.name, task->sequence);
        result = spdl__load_fn(&node->row.fn->call)(task, task->in.item, out);
        spdl__profile(profiler, SPDL_EVENT_TASK_END, node->row.name, task->sequence);
        SPDL__PROBE(task_end, node->row.name, task->sequence);
        spdl__store_relaxed32(&task->live, 0);
        if (SPDL__UNLIKELY(task->call_error)) result = spdl__task_misused(task, result, *out);
        if (node->row.max_failure_rate > 0) spdl__add(&node->calls, 1);
    } while (SPDL__UNLIKELY(result < 0) && spdl__task_repeats(task, counters, ++tries));
    return result;
}

/* A branch whose merge joins batches, and a call that did not split its own: all of it goes down
   one path, and empty ones down the others, as the merge expects. `out` stays the caller's. */
SPDL__PRIVATE spdl_result spdl__task_send_all(spdl_task *task, void *out) {
    spdl__batch *batch = (spdl__batch *)out;
    size_t i;
    if (batch == NULL) return spdl__task_fail(task, "no batch in *out");
    if (batch->shown.data != NULL) return spdl__task_fail(task, "%s", spdl__in_place_stays);
    if (batch->shown.count > task->node->batches->size)
        return spdl__task_fail(task, "a batch with more items than the rows above can have made");
    if (!spdl__task_split(task, batch->shown.sequence)) return SPDL_E_NOMEM;
    for (i = 0; i < batch->shown.count; ++i) spdl__task_send(task, task->path, batch, i);
    return SPDL_OK;
}

/* --- a call that failed --- */

/* Where the function gave no reason. */
SPDL__PRIVATE void spdl__failure_explain(spdl_task *task, spdl_result result) {
    const char *text = spdl_result_text(result);
    if (task->text[0] != '\0') return;
    if (result == SPDL_PENDING && task->node->deferred == NULL)
        text = "returned SPDL_PENDING, but its row does not say .deferred";
    else if (result == SPDL_AGAIN)
        text = "returned SPDL_AGAIN, but its row does not say .again";
    else if (result == SPDL_END)
        text = "returned SPDL_END, which only a source may";
    else if (result >= 0 || text == spdl__unknown_result)
        text = NULL;
    if (text != NULL)
        (void)snprintf(task->text, sizeof(task->text), "%s", text);
    else
        (void)snprintf(task->text, sizeof(task->text),
                       "returned %d, which is not a result of a stage function", (int)result);
}

/* A call failed: counted, logged if the budget allows it, else the end of the pipeline. Whether it
   is that. A wrong row is wrong for every item: no budget is for that. */
SPDL__PRIVATE bool spdl__task_failed(spdl_task *task, spdl__counters *counters,
                                     spdl_result result) {
    spdl__node *node = task->node;
    const bool over = spdl__call_over_budget(node);
    const bool fatal = over || task->row_error;
    const bool streams = task->again != NULL && task->again->stream != NULL; /* it is delivered */
    char text[SPDL_TEXT_BYTES];
    spdl__failure_explain(task, result);
    if (result >= 0) result = SPDL_E_STAGE;
    spdl__count(&counters->failures, 1);
    if (fatal) {
        (void)snprintf(text, sizeof(text), "%.470s%s", task->text,
                       over && node->row.max_failures > 0       ? " (one more than max_failures)"
                       : over && node->row.max_failure_rate > 0 ? " (more than max_failure_rate)"
                                                                : "");
        spdl__call_fatal(task->pipeline, node, task->ticket + streams, task->sequence, result,
                         text);
    } else {
        if (spdl__add(&node->tolerated, 1) == 0)
            (void)snprintf(node->first_text, sizeof(node->first_text), "item %llu: %.220s",
                           (spdl__llu)task->sequence, task->text);
        if (task->pipeline->logger.log_fn != NULL)
            spdl__logf(&task->pipeline->logger, SPDL_LOG_INFO,
                       "spdl: stage %d '%s', item %llu: %.300s (tolerated)", node->index,
                       node->name, (spdl__llu)task->sequence, task->text);
    }
    return fatal;
}

/* A call failed, and its row has .on_drop: the input is still there, unless the call took it. */
SPDL__NOINLINE void spdl__task_on_drop(spdl_task *task, spdl_result result) {
    const spdl_stage *row = &task->node->row;
    /* an earlier call for the same input may have taken it, too (SPDL_AGAIN) */
    const bool is_there = !task->taken && spdl__origin_tag(task->in.origin) != SPDL__DROPPED;
    spdl_error error;
    if (result == SPDL_SKIP || task->cut_short) return;
    spdl__failure_explain(task, result);
    spdl__call_error(task->node, task->sequence, result < 0 ? result : SPDL_E_STAGE, task->text,
                     &error);
    row->on_drop(row->ctx, is_there ? task->in.item : NULL, &error);
}

/* The pipeline has ended, or is quiet after a stop: one line for each stage whose failures were
   tolerated. */
SPDL__COLD void spdl__failures_log(spdl_pipeline *p) {
    int i, k;
    for (i = 0; i < p->count; ++i) {
        spdl__node *node = &p->node[i];
        const uint64_t dropped = spdl__load(&node->tolerated);
        const bool items = node->in != NULL && !node->row.again; /* a call for each */
        uint64_t calls = 0;
        for (k = 0; k <= p->workers; ++k) calls += spdl__load_relaxed(&node->counters[k].tasks);
        if (spdl__exchange(&node->logged, dropped) != dropped)
            spdl__logf(&p->logger, SPDL_LOG_WARN,
                       "spdl: %llu of %llu %s of stage %d '%s' %s, the first: %s",
                       (spdl__llu)dropped, (spdl__llu)calls, items ? "items" : "calls", i,
                       node->name, items ? "were dropped" : "failed", node->first_text);
    }
}

/* --- the result --- */

/* One result of a call goes on; in input order, when the call has returned SPDL_AGAIN before, with
   those in its stream. */
SPDL__PRIVATE void spdl__task_put(spdl_task *task, spdl__edge *edge, const spdl__item *what,
                                  uint64_t now) {
    if (task->again != NULL && task->again->stream != NULL)
        spdl__stream_add(edge, task->ticket, (spdl__list *)task->again->stream, what);
    else
        spdl__put(task->node, edge, task->ticket, what, now);
}

/* What a call with .emits has emitted goes on: as a list, or if it is one item as that. */
SPDL__PRIVATE void spdl__task_put_list(spdl_task *task, spdl__counters *counters, uint64_t now) {
    spdl__node *node = task->node;
    spdl__list *list = task->list;
    const size_t count = list != NULL ? (size_t)list->count : 0;
    spdl__item what = task->in;
    task->list = NULL;
    spdl__count(&counters->made, count);
    if (count == 0) {
        spdl__put_dropped(node, task->ticket, now);
    } else if (count == 1) {
        spdl__put(node, &node->out, task->ticket, &list->entry[0], now);
    } else {
        what.item = list;
        what.origin = spdl__origin(task->sequence, SPDL__LIST);
        spdl__put(node, &node->out, task->ticket, &what, now);
        return; /* its reader puts it back */
    }
    if (list != NULL) spdl__list_put_back(list);
}

/* The batches a branch has made of one go down their paths. */
SPDL__PRIVATE void spdl__task_put_split(spdl_task *task, spdl__counters *counters, uint64_t now) {
    spdl__node *node = task->node;
    spdl__item what = task->in;
    int i;
    what.origin = spdl__origin(task->sequence, (unsigned)node->index);
    for (i = 0; i < node->paths; ++i) {
        what.item = task->split[i];
        task->split[i]->range = what.range;
        spdl__put(node, spdl__path_edge(task->pipeline, node, i), 0, &what, now);
        task->split[i] = NULL;
    }
    spdl__count(&counters->made, (uint64_t)node->paths);
    task->split = NULL;
}

/* A dropped item leaves an empty slot; a dropped batch that others wait for to be joined with
   theirs, an empty batch of its number. */
SPDL__PRIVATE void spdl__task_put_nothing(spdl_task *task, spdl__counters *counters,
                                          uint64_t now) {
    spdl__node *node = task->node;
    spdl__item what = task->in;
    spdl__batch *empty;
    if (node->branch == NULL) {
        if (task->again == NULL || task->again->stream == NULL) /* else it has its place */
            spdl__put_dropped(node, task->ticket, now);
        return;
    }
    if (node->splits && spdl__task_split(task, task->sequence)) {
        spdl__task_put_split(task, counters, now);
        return;
    }
    empty = node->splits ? NULL : spdl__batch_get(node->branch->batches);
    if (empty == NULL) { /* a gap would join what does not belong together */
        spdl__call_fatal(task->pipeline, node, task->ticket, task->sequence, SPDL_E_NOMEM,
                         "no memory for another batch");
        return;
    }
    empty->shown.sequence = task->sequence;
    empty->range = what.range;
    what.item = empty;
    what.origin = spdl__origin(task->sequence, (unsigned)node->branch->index);
    spdl__put(node, &node->out, task->ticket, &what, now);
}

/* A call that made no result: what it handed on is taken back. False when it was the failure that
   ends the pipeline. */
SPDL__NOINLINE bool spdl__task_settle_nothing(spdl_task *task, spdl__counters *counters,
                                              spdl_result result, uint64_t now) {
    bool fatal = false;
    spdl__task_discard(task);
    if (task->cut_short)
        spdl__count(&counters->freed, spdl__origin_tag(task->in.origin) != SPDL__DROPPED);
    else if (result == SPDL_SKIP)
        spdl__count(&counters->skips, task->again == NULL || task->again->calls == 0);
    else
        fatal = spdl__task_failed(task, counters, result);
    /* after a fatal failure, or one that a stop has cut short, a ticket stays unfilled: nothing
       after it is delivered */
    if (!fatal && !task->cut_short) spdl__task_put_nothing(task, counters, now);
    return !fatal;
}

/* With SPDL_DEBUG: a result that is handed on. */
SPDL__NOINLINE void spdl__task_debug(spdl_task *task, const void *out) {
    spdl__node *node = task->node;
    const char *type = node->row.fn->out_type;
    if (out != NULL) spdl__store_relaxed(&node->nulls, SPDL__NULLS);
    if (out != NULL || (node->in != NULL && task->in.item == NULL) ||
        (type != NULL && strcmp(type, "void") == 0))
        return;
    if (spdl__load_relaxed(&node->nulls) < SPDL__NULLS &&
        spdl__add(&node->nulls, 1) == SPDL__NULLS - 1)
        spdl__logf(&task->pipeline->logger, SPDL_LOG_WARN,
                   "spdl: stage %d '%s' has handed on nothing but NULL, %d times: is *out set?",
                   node->index, node->name, SPDL__NULLS);
}

/* After a call: the input is destroyed or handed on, the result is put. False when the call was the
   failure that ends the pipeline: nothing more is to be called. */
SPDL__INLINE bool spdl__task_settle(spdl_task *task, spdl__counters *counters, spdl_result result,
                                    void *out, uint64_t now) {
    spdl__node *node = task->node;
    const bool plain = !node->row.emits && task->split == NULL; /* the result is in `out` */
    spdl__item what = task->in;
    bool goes_on = true;
    if (SPDL__DEBUGS && result == SPDL_OK && plain && task->again == NULL)
        spdl__task_debug(task, out);
    if (SPDL__UNLIKELY(result != SPDL_OK) || out != what.item || !plain ||
        spdl__origin_tag(what.origin) == SPDL__DROPPED) { /* else it is passed on */
        if (SPDL__UNLIKELY(result != SPDL_OK && node->row.on_drop != NULL))
            spdl__task_on_drop(task, result); /* user code */
        if (what.item != NULL && !task->taken)
            spdl__item_free(task->pipeline, what.item, what.origin);
        what.origin = result == SPDL_OK ? spdl__task_origin(task, out) : 0;
        what.item = out;
        if (result == SPDL_OK && plain) spdl__count(&counters->made, 1);
    }
    if (SPDL__UNLIKELY(task->buffer != NULL)) spdl__task_give_back(task);
    if (SPDL__UNLIKELY(result != SPDL_OK))
        goes_on = spdl__task_settle_nothing(task, counters, result, now);
    else if (node->row.emits) spdl__task_put_list(task, counters, now);
    else if (task->split != NULL)
        spdl__task_put_split(task, counters, now);
    else
        spdl__task_put(task,
                       node->row.kind == SPDL_KIND_BRANCH
                           ? spdl__path_edge(task->pipeline, node, task->path)
                           : &node->out,
                       &what, now);
    /* with a window: this call does not hold it back any more. Pairs with the load in
       claim_window_left, after which nothing else of this call is looked at */
    if (node->settled != NULL)
        spdl__store32(&node->settled[task->place & node->settled_mask],
                      (uint32_t)(task->place + 1));
    return goes_on;
}

/* --- SPDL_FROM --- */

#define SPDL__FROM_NS 50000000 /* how long it asks before it looks whether it should stop */

/* The source of an SPDL_FROM row. */
SPDL__PRIVATE spdl_result spdl__from_call(spdl_task *task, void *in, void **out) {
    const spdl__node *node = task->node;
    const spdl_stage *row = &node->row;
    spdl_result result;
    (void)in;
    do {
        if (spdl_stopping(task) || spdl__load32(&node->closed)) {
            task->cut_short = true; /* neither an item nor the end of them */
            return SPDL_SKIP;
        }
        result = row->next(row->source, out, SPDL__FROM_NS);
    } while (result == SPDL_TIMEOUT);
    if (result == SPDL_OK || result == SPDL_END) return result;
    *out = NULL;
    if (result < 0 && row->next == spdl_pipeline_next_fn && row->source != NULL) {
        const char *text = spdl_pipeline_error((const spdl_pipeline *)row->source)->text;
        if (text[0] != '\0') (void)spdl_fail(task, "%s", text);
    } else if (result > 0) {
        (void)spdl_fail(task, "its next function returned %d (%s)", (int)result,
                        spdl_result_text(result));
    }
    return result < 0 ? result : SPDL_E_STAGE;
}

static const spdl_function spdl__from = { spdl__from_call, "from", "void", NULL };

/* ============================================================================================= */
/* >>batch-impl
   Rows that gather items into batches: they call nothing, so a step does all there is to do while
   the row's word is held. One worker at a time steps; an open batch and what it holds belong to the
   row. A batch with drop_last, or of a row that has failed, is freed when the word is released. */

#define SPDL__COPIED 32 /* items that a step copies into a batch in place, to be freed after it */

/* What a step has to free when the word was let go of. */
typedef struct spdl__leavings {
    spdl__batch *batch;
    int count;
    spdl__item copied[SPDL__COPIED];
} spdl__leavings;

/* In place: the row has come to the end of `done`, or with NULL to that of an epoch. */
SPDL__PRIVATE void spdl__place_passed(spdl__node *node, const spdl__cursor *c, spdl__batch *done) {
    const uint64_t epoch = spdl__load_relaxed(&node->epoch);
    spdl__batch **at = &node->place;
    if (node->row.item_bytes == 0) return;
    spdl__spin_lock(&node->place_lock);
    node->place_dropped = c->dropped - node->dropped;
    while (*at != NULL) {
        spdl__batch *batch = *at;
        if (done != NULL ? batch != done : batch->epoch != epoch) {
            at = &batch->next;
            continue;
        }
        *at = batch->next;
        if (done == NULL) spdl_batch_free(batch); /* empty: all calls that had a part dropped it */
    }
    if (done == NULL) {
        node->place_epoch = epoch + 1;
        node->place_dropped = 0;
        node->dropped = c->dropped;
    }
    spdl__spin_unlock(&node->place_lock);
}

/* The open batch is full, or the last: it goes on. */
SPDL__PRIVATE void spdl__batch_put(spdl_pipeline *p, spdl__node *node, spdl__counters *counters,
                                   const spdl__cursor *c, uint64_t now) {
    spdl__batch *batch = node->open_batch;
    const uint64_t number = node->number++;
    spdl__item what;
    node->open_batch = NULL;
    spdl__place_passed(node, c, batch);
    batch->shown.sequence = number;
    what.item = batch;
    what.origin = spdl__origin(number, (unsigned)node->index);
    what.range = batch->range;
    spdl__count(&counters->tasks, 1);
    spdl__count(&counters->made, 1);
    if (SPDL__TRACED(p->trace))
        spdl__trace_add(&p->trace->track[counters - node->counters], SPDL__RECORD_BATCH,
                        node->index, SPDL_OK, now, spdl_time_ns(), number);
    spdl__put(node, &node->out, 0, &what, now);
}

/* The input has ended, or an epoch: what is left goes on, or is returned to be freed when the word
   was let go of. Calls may still write into one in place when the row has failed: it is purged. */
SPDL__PRIVATE spdl__batch *spdl__batch_rest(spdl_pipeline *p, spdl__node *node,
                                            spdl__counters *counters, const spdl__cursor *c,
                                            uint64_t now) {
    spdl__batch *batch = node->open_batch;
    const bool closed = spdl__load32(&node->closed) != 0;
    if (batch == NULL || (closed && node->row.item_bytes > 0)) return NULL;
    if (!node->row.drop_last && !closed && batch->shown.count > 0) {
        spdl__batch_put(p, node, counters, c, now);
        return NULL;
    }
    spdl__count(closed ? &counters->freed : &counters->skips, batch->shown.count);
    node->open_batch = NULL;
    spdl__place_passed(node, c, batch);
    return batch;
}

/* The batch that the next item goes to; false when there is no memory for it. */
SPDL__PRIVATE bool spdl__batch_open(spdl_pipeline *p, spdl__node *node) {
    if (node->row.item_bytes == 0) {
        node->open_batch = spdl__batch_get(node->batches);
    } else {
        spdl__spin_lock(&node->place_lock);
        node->open_batch =
            spdl__place_batch(node, spdl__load_relaxed(&node->epoch), node->number);
        spdl__spin_unlock(&node->place_lock);
    }
    if (node->open_batch != NULL) return true;
    spdl__call_fatal(p, node, node->out.tail, node->number, SPDL_E_NOMEM,
                     "no memory for another batch");
    return false;
}

/* The next item of a batch; in place it is copied to its part, if it was not written there. */
SPDL__PRIVATE void spdl__batch_add(spdl__batch *batch, size_t item_bytes, const spdl__item *got,
                                   spdl__leavings *leavings) {
    const size_t at = batch->shown.count++;
    unsigned owner = spdl__origin_tag(got->origin);
    void *item = got->item;
    batch->range = at == 0 ? got->range : spdl__range_join(batch->range, got->range);
    if (item_bytes > 0) {
        item = (char *)batch->shown.data + at * item_bytes;
        if (got->item == NULL)
            memset(item, 0, item_bytes);
        else if (got->item != item)
            memcpy(item, got->item, item_bytes);
        if (owner != SPDL__IN_PLACE) leavings->copied[leavings->count++] = *got;
        owner = SPDL__IN_PLACE;
    }
    batch->owner[at] = (uint8_t)owner;
    batch->shown.items[at] = item;
}

/* Moves ready items into batches, up to the end of an epoch. There is room for one batch; an end of
   an epoch after it waits for its own. */
SPDL__PRIVATE void spdl__batch_fill(spdl_pipeline *p, spdl__node *node, spdl__counters *counters,
                                    spdl__cursor *c, uint64_t now, spdl__leavings *leavings) {
    spdl__peek peek;
    while ((peek = spdl__cursor_look(c)) == SPDL__PEEK_ITEM) {
        spdl__item got;
        if (leavings->count == SPDL__COPIED) return;
        if ((node->open_batch == NULL || p->tokens != NULL) && !spdl__claim_room(p, node, 0))
            return;
        if (node->open_batch == NULL && !spdl__batch_open(p, node)) return;
        got = spdl__cursor_take(c);
        if (SPDL__UNLIKELY(spdl__origin_tag(got.origin) == SPDL__TOKEN)) {
            --node->dropped; /* as if one more was dropped: it takes no place in a batch */
            if (++node->tokens % (uint64_t)node->row.size == 0)
                spdl__put(node, &node->out, 0, &got, now);
            continue;
        }
        spdl__batch_add(node->open_batch, node->row.item_bytes, &got, leavings);
        if (node->open_batch->shown.count == (size_t)node->row.size)
            spdl__batch_put(p, node, counters, c, now);
    }
    if (peek != SPDL__PEEK_EPOCH_END || !spdl__claim_room(p, node, 0)) return;
    leavings->batch = spdl__batch_rest(p, node, counters, c, now);
    if (!spdl__claim_room(p, node, 0)) return;
    spdl__place_passed(node, c, NULL);
    spdl__cursor_pass_epoch_end(c);
    spdl__put_epoch_end(p, node, 0, now);
}

/* Without room only dropped items in front are passed. Whether the row has ended. */
SPDL__PRIVATE bool spdl__batch_work(spdl_pipeline *p, spdl__node *node, spdl__counters *counters,
                                    spdl__cursor *c, uint64_t now, spdl__leavings *leavings) {
    const bool closed = spdl__load32(&node->closed) != 0;
    if (!closed && !spdl__claim_room(p, node, 0)) {
        (void)spdl__cursor_look(c);
        return false;
    }
    if (!closed) spdl__batch_fill(p, node, counters, c, now, leavings);
    if (leavings->batch != NULL || (!closed && !spdl__claim_room(p, node, 0))) return false;
    if (!spdl__load32(&node->closed) && c->head < c->end) return false;
    leavings->batch = spdl__batch_rest(p, node, counters, c, now);
    spdl__put_finish(p, node, 0);
    return true;
}

/* One step of a batch row: as many items as there are and room for. */
SPDL__PRIVATE bool spdl__batch_step(const spdl__group *group, spdl__node *node, int worker) {
    spdl_pipeline *p = group->pipeline;
    const uint64_t now = spdl_time_ns();
    spdl__leavings leavings;
    uint64_t tail;
    bool ended, moved, frees;
    spdl__cursor c;
    spdl__sitting s;
    leavings.batch = NULL;
    leavings.count = 0;
    s.node = node;
    s.inside = false;
    s.word = spdl__load(node->word);
    if ((s.word & SPDL__BUSY) != 0 || !spdl__claim_hold(&s)) return false;
    tail = node->out.tail;
    c = spdl__cursor_at_head(node->in);
    ended = spdl__batch_work(p, node, &node->counters[worker], &c, now, &leavings);
    frees = leavings.batch != NULL || leavings.count > 0;
    moved = spdl__cursor_settle(&c, now) || ended || frees || tail != node->out.tail;
    (void)spdl__claim_move(p, node,
                           ((c.head - c.from) << SPDL__HEAD_BITS) - SPDL__HELD - 1 +
                               (ended ? SPDL__FINISHED : 0));
    if (c.head != c.from) spdl__edge_took(node->in, c.from, c.head, now);
    if (moved) spdl__edge_reader_idle(node->in, now);
    spdl__wake_hint(p, node, node->beside, frees ? group : NULL);
    spdl_batch_free(leavings.batch); /* user code, and below */
    while (leavings.count-- > 0)
        spdl__item_free(p, leavings.copied[leavings.count].item,
                        leavings.copied[leavings.count].origin);
    return moved;
}

/* What SPDL_UNBATCH calls; its row says .emits. What is not handed on stays in the batch. */
SPDL__PRIVATE spdl_result spdl__unbatch(spdl_task *task, void *in, void **out) {
    spdl__batch *batch = (spdl__batch *)in;
    spdl__item what = task->in;
    size_t i;
    (void)out;
    if (batch == NULL) return SPDL_OK;
    if (batch->shown.data != NULL) return spdl__task_row_error(task, spdl__in_place_stays);
    task->list = spdl__list_get(&task->node->freelist);
    if (task->list == NULL) return SPDL_E_NOMEM;
    for (i = 0; i < batch->shown.count; ++i) {
        what.item = batch->shown.items[i];
        what.origin = spdl__origin(task->sequence, batch->owner[i]);
        if (what.item == NULL) continue;
        if (!spdl__list_add(task->list, &what)) return SPDL_E_NOMEM;
        batch->shown.items[i] = NULL;
    }
    return SPDL_OK;
}

static const spdl_function spdl__unbatch_function = { spdl__unbatch, "unbatch", "spdl_batch",
                                                      "void" };

/* ============================================================================================= */
/* >>merge-impl
   Rows that join the paths of a branch again, or those of several sources. A merge calls no stage;
   a step takes as many items as there are and room for while the row's word is held. It has the
   edges it reads to itself, so what it takes is a function of what the paths hold: in turn it waits
   for the path whose turn it is until that has an item, an end of an epoch, or its end. A pipeline
   whose merge so waits for ever is found by the trainer (spdl__starve_fail). Sources do not starve
   each other; a path of them that fails ends the merge, which then closes the rest. */

/* What a merge sees of its paths. */
typedef struct spdl__paths {
    signed char ready[SPDL_MAX_STAGES]; /* 1: an item; 0: nothing yet; -1: the epoch or all ended */
    int items, epoch_ends, ended;
    bool dropped; /* there are some in front: passing over them makes room above */
    bool failed;  /* of several sources: a path has, and all before that was taken */
} spdl__paths;

/* Whether a row of this path has failed: those of a path lie in one piece before its last one. */
SPDL__PRIVATE bool spdl__merge_path_failed(const spdl_pipeline *p, const spdl__node *node,
                                           int path) {
    const spdl__node *row = &p->node[node->path[path]];
    for (; row->row.kind != SPDL_KIND_PATH || row->before != NULL; --row)
        if (spdl__load32(&row->closed)) return true;
    return false;
}

/* `held`: by the thread that holds the word, which may look into a stream; others guess. */
SPDL__PRIVATE spdl__paths spdl__merge_look(const spdl_pipeline *p, const spdl__node *node,
                                           bool held) {
    spdl__paths seen;
    int i;
    memset(&seen, 0, sizeof(seen));
    for (i = 0; i < node->paths; ++i) {
        const spdl__edge *edge = spdl__path_edge(p, node, i);
        const uint64_t end = spdl__load(&edge->end), head = spdl__head(spdl__load(&edge->word));
        const bool ended = head >= end, there = !ended && spdl__edge_offers(edge, head);
        const spdl__slot *slot = spdl__edge_slot(edge, head);
        const uint64_t origin = spdl__load_relaxed(&slot->origin);
        const bool dropped = there && (spdl__origin_tag(origin) == SPDL__DROPPED ||
                                       (held && spdl__origin_tag(origin) == SPDL__LIST &&
                                        spdl__list_empty((const spdl__list *)slot->item)));
        const bool epoch_end = there && spdl__origin_tag(origin) == SPDL__EPOCH_END;
        if (dropped) seen.dropped = true;
        if (there && !dropped && !epoch_end) ++seen.items;
        seen.epoch_ends += epoch_end;
        seen.ended += ended;
        if (ended && node == p->mix)
            seen.failed = seen.failed || spdl__merge_path_failed(p, node, i);
        seen.ready[i] = ended || epoch_end ? -1 : there && !dropped ? 1 : 0;
    }
    return seen;
}

/* For SPDL_MERGE_CHOICE: merge_fn is asked again when this has changed. Never 0. */
SPDL__PRIVATE uint64_t spdl__paths_key(const spdl__paths *seen, int paths) {
    uint64_t key = 1;
    int i;
    for (i = 0; i < paths; ++i) key = key * 3 + (uint64_t)(seen->ready[i] + 1);
    return key;
}

/* A weight as mantissa * 2^exponent, exactly. */
SPDL__PRIVATE uint64_t spdl__weight_split(double weight, int *exponent) {
    uint64_t bits;
    memcpy(&bits, &weight, sizeof(bits));
    *exponent = bits >> 52 ? (int)(bits >> 52) - 1 : 0; /* a subnormal has that of the smallest */
    return (bits & (((uint64_t)1 << 52) - 1)) | (uint64_t)(bits >> 52 != 0) << 52;
}

/* A product of 128 bits: some compilers for boards have no such type. */
typedef struct spdl__wide {
    uint64_t high, low;
} spdl__wide;

SPDL__PRIVATE spdl__wide spdl__wide_product(uint64_t a, uint64_t b) {
    const uint64_t half = 0xffffffffu, low = (a & half) * (b & half);
    const uint64_t left = (a >> 32) * (b & half) + (low >> 32);
    const uint64_t right = (a & half) * (b >> 32) + (left & half);
    spdl__wide product;
    product.high = (a >> 32) * (b >> 32) + (left >> 32) + (right >> 32);
    product.low = right << 32 | (low & half);
    return product;
}

/* Whether a / a_weight < b / b_weight, exactly: compares a * b_weight with b * a_weight, the one
   with the smaller exponent shifted down. */
SPDL__PRIVATE bool spdl__weight_less(uint64_t a, double a_weight, uint64_t b, double b_weight) {
    int ea, eb, shift;
    spdl__wide x = spdl__wide_product(a, spdl__weight_split(b_weight, &eb));
    spdl__wide y = spdl__wide_product(b, spdl__weight_split(a_weight, &ea));
    spdl__wide *less = eb > ea ? &y : &x;
    uint64_t rest = 0; /* what was shifted out */
    for (shift = eb > ea ? eb - ea : ea - eb; shift > 0 && (less->high | less->low) != 0; --shift) {
        rest |= less->low & 1;
        less->low = less->low >> 1 | less->high << 63;
        less->high >>= 1;
    }
    if (x.high != y.high || x.low != y.low)
        return x.high != y.high ? x.high < y.high : x.low < y.low;
    return rest != 0 && less == &y;
}

/* The path that is behind its weight the most. */
SPDL__PRIVATE int spdl__merge_weighted(const spdl_pipeline *p, const spdl__node *node,
                                       const spdl__paths *seen) {
    uint64_t next = 0;
    int i, best = -1;
    for (i = 0; i < node->paths; ++i) {
        const spdl__node *path = &p->node[node->path[i]];
        const uint64_t count = spdl__load_relaxed(&path->taken) + 1;
        if (seen->ready[i] < 0 ||
            (best >= 0 && !spdl__weight_less(count, path->weight, next,
                                             p->node[node->path[best]].weight)))
            continue;
        best = i;
        next = count;
    }
    return best >= 0 && seen->ready[best] == 1 ? best : -1;
}

/* The path to take from next, in turn or as soon as one has something; -1: none yet. */
SPDL__PRIVATE int spdl__merge_turn(const spdl_pipeline *p, const spdl__node *node,
                                   const spdl__paths *seen) {
    const int turn = (int)spdl__load_relaxed32(&node->turn);
    int i;
    if (node->row.merge_order == SPDL_MERGE_WEIGHTED) return spdl__merge_weighted(p, node, seen);
    for (i = 0; i < node->paths; ++i) {
        const int at = (turn + i) % node->paths;
        if (seen->ready[at] == 1) return at;
        if (seen->ready[at] == 0 && node->row.merge_order == SPDL_MERGE_ROBIN) return -1;
    }
    return -1;
}

SPDL__PRIVATE bool spdl__merge_runnable(const spdl_pipeline *p, const spdl__node *node) {
    const spdl__paths seen = spdl__merge_look(p, node, false);
    if (spdl__load32(&node->closed) || seen.dropped || seen.failed || seen.ended == node->paths)
        return true;
    if (!spdl__claim_room(p, node, 0)) return false;
    if (seen.items == 0) return seen.epoch_ends > 0 && seen.epoch_ends + seen.ended == node->paths;
    if (node->row.merge_order == SPDL_MERGE_BATCHES) return seen.items + seen.ended == node->paths;
    if (node->row.merge_order == SPDL_MERGE_CHOICE)
        return spdl__load_relaxed(&node->refused) != spdl__paths_key(&seen, node->paths);
    return spdl__merge_turn(p, node, &seen) >= 0;
}

/* What merge_fn says: a path to take from, or -1 to wait. An answer that would never let anything
   through is a failure. */
SPDL__PRIVATE int spdl__merge_ask(spdl_pipeline *p, spdl__node *node, const spdl__paths *seen) {
    const int paths = node->paths;
    const int choice = node->row.merge_fn(node->row.ctx, seen->ready, paths);
    const bool takes = choice >= 0 && choice < paths && seen->ready[choice] == 1;
    char text[SPDL_NAME_BYTES + 64];
    spdl__store_relaxed(&node->refused, takes ? 0 : spdl__paths_key(seen, paths));
    if (takes) return choice;
    if (choice < paths && seen->items + seen->epoch_ends + seen->ended < paths) return -1;
    if (choice >= paths)
        (void)snprintf(text, sizeof(text), "merge_fn returned %d, but there are %d paths", choice,
                       paths);
    else
        (void)snprintf(text, sizeof(text),
                       "starved: merge_fn waits, but nothing comes before something is taken");
    spdl__call_fatal(p, node, node->out.tail, node->out.tail, SPDL_E_INVALID, text);
    return -1;
}

/* Passes over the dropped items in front of each path. */
SPDL__PRIVATE void spdl__merge_pass(spdl_pipeline *p, spdl__node *node, uint64_t now) {
    int i;
    for (i = 0; i < node->paths; ++i) {
        spdl__cursor c = spdl__cursor_at_head(spdl__path_edge(p, node, i));
        (void)spdl__cursor_look(&c);
        (void)spdl__cursor_store(&c, now);
    }
}

SPDL__PRIVATE spdl__item spdl__merge_take(spdl_pipeline *p, spdl__node *node, int path,
                                          uint64_t now) {
    spdl__cursor c = spdl__cursor_at_head(spdl__path_edge(p, node, path));
    spdl__item got = { NULL, 0, 0 };
    if (spdl__cursor_look(&c) == SPDL__PEEK_ITEM) got = spdl__cursor_take(&c);
    (void)spdl__cursor_store(&c, now);
    spdl__edge_reader_idle(c.edge, now);
    return got;
}

/* One item from the path whose turn it is, or that merge_fn says. */
SPDL__PRIVATE bool spdl__merge_one(spdl_pipeline *p, spdl__node *node, const spdl__paths *seen,
                                   uint64_t now) {
    const int path = node->row.merge_order == SPDL_MERGE_CHOICE ? spdl__merge_ask(p, node, seen)
                                                                : spdl__merge_turn(p, node, seen);
    spdl__node *from;
    spdl__item got;
    if (path < 0) return false;
    from = &p->node[node->path[path]];
    spdl__store_relaxed(&from->taken, from->taken + 1);
    got = spdl__merge_take(p, node, path, now);
    spdl__store_relaxed32(&node->turn, (uint32_t)(path + 1) % (uint32_t)node->paths);
    spdl__put(node, &node->out, 0, &got, now);
    return true;
}

/* The items of one batch go after those of another. False when they do not fit. */
SPDL__PRIVATE bool spdl__batch_append(spdl__batch *to, spdl__batch *from) {
    size_t i;
    if (to->shown.count + from->shown.count > to->pool->size) return false;
    for (i = 0; i < from->shown.count; ++i) {
        to->owner[to->shown.count] = from->owner[i];
        to->shown.items[to->shown.count++] = from->shown.items[i];
        from->shown.items[i] = NULL;
    }
    return true;
}

/* Batches whose items are to be freed when the word was let go of. */
typedef struct spdl__dropped {
    int count;
    spdl__batch *batch[SPDL_MAX_STAGES + 1];
} spdl__dropped;

SPDL__PRIVATE void spdl__merge_drop(spdl__dropped *dropped, spdl__batch *batch) {
    if (batch != NULL && batch->shown.count > 0)
        dropped->batch[dropped->count++] = batch;
    else
        spdl_batch_free(batch); /* nothing in it: back to its pool */
}

/* One batch from each path: all have one of every number, in their order. The joined batch goes on,
   also an empty one when another merge waits for its number. */
SPDL__PRIVATE bool spdl__merge_batches(spdl_pipeline *p, spdl__node *node, const spdl__paths *seen,
                                       spdl__counters *counters, uint64_t now,
                                       spdl__dropped *dropped) {
    spdl__batch *batch;
    spdl__item what = { NULL, 0, 0 };
    uint64_t number = 0;
    bool fits = true;
    int i;
    if (seen->items + seen->ended < node->paths) return false;
    batch = spdl__batch_get(node->batches);
    for (i = 0; i < node->paths; ++i) {
        spdl__item got;
        if (seen->ready[i] != 1) continue;
        got = spdl__merge_take(p, node, i, now);
        number = got.origin >> 8;
        what.range = what.item == NULL ? got.range : spdl__range_join(what.range, got.range);
        what.item = batch;
        fits = batch != NULL && fits && spdl__batch_append(batch, (spdl__batch *)got.item);
        spdl__merge_drop(dropped, (spdl__batch *)got.item);
    }
    if (!fits)
        spdl__call_fatal(p, node, node->out.tail, number, SPDL_E_NOMEM,
                         batch == NULL ? "no memory for another batch"
                                       : "the batches of the paths have more items than went in");
    /* a path that has ended has failed: what was to be joined with its batches is not delivered */
    if (!fits || seen->ended > 0 || (batch->shown.count == 0 && node->branch == NULL)) {
        if (batch != NULL) spdl__count(&counters->freed, batch->shown.count);
        spdl__merge_drop(dropped, batch);
        return true;
    }
    batch->shown.sequence = number;
    spdl__count(&counters->tasks, 1);
    spdl__count(&counters->made, 1);
    batch->range = what.range;
    what.origin = spdl__origin(number, (unsigned)node->index);
    spdl__put(node, &node->out, 0, &what, now);
    return true;
}

/* Every path is at the end of the epoch. */
SPDL__PRIVATE bool spdl__merge_epoch_end(spdl_pipeline *p, spdl__node *node,
                                         const spdl__paths *seen, uint64_t now) {
    int i;
    if (seen->epoch_ends == 0 || seen->epoch_ends + seen->ended < node->paths) return false;
    for (i = 0; i < node->paths; ++i) {
        spdl__cursor c = spdl__cursor_at_head(spdl__path_edge(p, node, i));
        if (spdl__cursor_look(&c) == SPDL__PEEK_EPOCH_END) spdl__cursor_pass_epoch_end(&c);
        (void)spdl__cursor_store(&c, now);
        spdl__store_relaxed(&p->node[node->path[i]].taken, 0);
    }
    spdl__store_relaxed32(&node->turn, 0);
    spdl__store_relaxed(&node->refused, 0);
    spdl__put_epoch_end(p, node, 0, now);
    return true;
}

/* Whether anything was done; *ended: it was the end of the row. */
SPDL__PRIVATE bool spdl__merge_once(spdl_pipeline *p, spdl__node *node, spdl__counters *counters,
                                    uint64_t now, bool *ended, spdl__dropped *dropped) {
    const spdl__paths seen = spdl__merge_look(p, node, true);
    if (seen.failed) spdl__call_close(p, node); /* the other sources, too */
    *ended = spdl__load32(&node->closed) || seen.ended == node->paths;
    if (*ended) {
        spdl__put_finish(p, node, 0);
        return true;
    }
    if (seen.dropped) {
        spdl__merge_pass(p, node, now);
        return true;
    }
    if (!spdl__claim_room(p, node, 0)) return false;
    if (spdl__merge_epoch_end(p, node, &seen, now)) return true;
    if (seen.items == 0) return false;
    if (node->row.merge_order == SPDL_MERGE_BATCHES)
        return spdl__merge_batches(p, node, &seen, counters, now, dropped);
    return spdl__merge_one(p, node, &seen, now);
}

/* One step of a merge: as many items as there are and room for. Whether anything was done. */
SPDL__PRIVATE bool spdl__merge_step(const spdl__group *group, spdl__node *node, int worker) {
    spdl_pipeline *p = group->pipeline;
    const uint64_t now = spdl_time_ns();
    bool progress = false, ended = false;
    spdl__dropped dropped;
    spdl__sitting s;
    dropped.count = 0;
    s.node = node;
    s.inside = false;
    s.word = spdl__load(node->word);
    if ((s.word & SPDL__BUSY) != 0 || !spdl__claim_hold(&s)) return false;
    while (!ended && dropped.count == 0 && !spdl__load32(&p->stopping) &&
           spdl__merge_once(p, node, &node->counters[worker], now, &ended, &dropped))
        progress = true;
    (void)spdl__claim_move(p, node, (uint64_t)0 - SPDL__HELD - 1 + (ended ? SPDL__FINISHED : 0));
    spdl__wake_hint(p, node, node->beside, dropped.count > 0 ? group : NULL);
    while (dropped.count > 0) spdl_batch_free(dropped.batch[--dropped.count]); /* user code */
    return progress;
}

/* ============================================================================================= */
/* >>defer-impl
   Calls that end elsewhere. Each has a place in `deferred`, whose state is one word: armed by
   spdl_defer; then either the function returns PENDING first (waiting, and spdl_complete settles
   the call) or spdl_complete comes first (done, and the worker settles it when the function
   returns). The generation in that word and in the id tells a handle that is dead from one that
   lives (tests/model/deferred.pml).

   Threads: spdl_defer and deferred_returned run on the worker, spdl_complete on any thread. A place
   is the call's from spdl_defer until it is settled. */

typedef enum spdl__deferred_state {
    SPDL__DEFERRED_FREE,
    SPDL__DEFERRED_ARMED,      /* the function is running */
    SPDL__DEFERRED_WAITING,    /* it has returned PENDING: spdl_complete settles the call */
    SPDL__DEFERRED_COMPLETING, /* spdl_complete came first and is writing the result */
    SPDL__DEFERRED_DONE,       /* and has: the worker settles the call */
    SPDL__DEFERRED_SETTLING    /* spdl_complete is settling the call */
} spdl__deferred_state;

/* A place for one deferred call. Written by the stage's call before it is armed, by spdl_complete
   while it is COMPLETING or SETTLING. */
struct spdl__deferred {
    uint64_t state; /* generation << 3 | spdl__deferred_state */
    uint32_t next;  /* under deferred_lock: as deferred_free */
    uint64_t sequence, ticket, place, since;
    uint64_t thread; /* that settles the call inside spdl_complete, or 0 */
    spdl__item in;
    bool taken, flushing;
    void *buffer; /* as in the task */
    spdl__batch *holder;
    spdl_result result;
    void *item;
    char text[SPDL_TEXT_BYTES];
};

/* An id is the generation, the row and the place. */
#define SPDL__ID_PLACE_BITS 16
#define SPDL__ID_ROW_BITS 8
#define SPDL__ID_BITS (SPDL__ID_PLACE_BITS + SPDL__ID_ROW_BITS)

SPDL__PRIVATE uint64_t spdl__deferred_load(const spdl__deferred *call) {
    return spdl__load(&call->state);
}

SPDL__PRIVATE bool spdl__deferred_move(spdl__deferred *call, uint64_t generation,
                                       spdl__deferred_state from, spdl__deferred_state to) {
    uint64_t expected = generation << 3 | (uint64_t)from;
    return spdl__cas(&call->state, &expected, generation << 3 | (uint64_t)to);
}

/* Any thread that settles the call: the id is dead from here on. The generation has as many bits
   as an id has for it, or after 2^40 calls no id would be found any more. */
SPDL__PRIVATE void spdl__deferred_release(spdl__node *node, spdl__deferred *call) {
    const uint64_t generation =
        ((spdl__deferred_load(call) >> 3) + 1) & (UINT64_MAX >> SPDL__ID_BITS);
    spdl__store(&call->state, generation << 3 | SPDL__DEFERRED_FREE);
    spdl__spin_lock(&node->deferred_lock);
    call->next = node->deferred_free;
    node->deferred_free = (uint32_t)(call - node->deferred) + 1;
    spdl__spin_unlock(&node->deferred_lock);
}

SPDL_API spdl_deferred spdl_defer(spdl_task *task) {
    spdl_deferred deferred = { NULL, 0 };
    spdl__node *node;
    spdl__deferred *call;
    if (!spdl__task_allows(task, "spdl_defer")) return deferred;
    node = task->node;
    if (node->deferred == NULL) return deferred;
    if (task->deferred == NULL) { /* there is a place for each call the concurrency allows */
        spdl__spin_lock(&node->deferred_lock);
        call = task->deferred = &node->deferred[node->deferred_free - 1];
        node->deferred_free = call->next;
        spdl__spin_unlock(&node->deferred_lock);
        call->text[0] = '\0';
        call->in = task->in;
        call->flushing = task->flushing;
        call->sequence = task->sequence;
        call->ticket = task->ticket;
        call->place = task->place;
        call->since = task->since;
        spdl__store(&call->state, (spdl__deferred_load(call) >> 3 << 3) | SPDL__DEFERRED_ARMED);
    }
    call = task->deferred;
    deferred.pipeline = task->pipeline;
    deferred.id = spdl__deferred_load(call) >> 3 << SPDL__ID_BITS |
                  (uint64_t)node->index << SPDL__ID_PLACE_BITS | (uint64_t)(call - node->deferred);
    return deferred;
}

/* The function of a deferred call has returned. Whether the call is over: *result and *out say how.
   False: spdl_complete will settle it, and nothing of it may be touched any more. */
SPDL__PRIVATE bool spdl__deferred_returned(spdl_task *task, spdl_result *result, void **out) {
    spdl__deferred *call = task->deferred;
    const uint64_t generation = call != NULL ? spdl__deferred_load(call) >> 3 : 0;
    const bool pending = *result == SPDL_PENDING;
    task->deferred = NULL;
    if (call == NULL) {
        if (pending) {
            (void)spdl__task_fail(task, "returned SPDL_PENDING without a call of spdl_defer");
            *result = SPDL_E_STAGE;
        }
        return true;
    }
    call->taken = task->taken;
    call->buffer = task->buffer;
    call->holder = task->holder;
    if (pending) task->buffer = NULL; /* it is the call's */
    if (spdl__deferred_move(call, generation, SPDL__DEFERRED_ARMED,
                            pending ? SPDL__DEFERRED_WAITING : SPDL__DEFERRED_FREE)) {
        if (!pending) spdl__deferred_release(task->node, call);
        return !pending;
    }
    /* spdl_complete has come first, or is writing the result */
    while ((spdl__deferred_load(call) & 7) != SPDL__DEFERRED_DONE) spdl__os_yield();
    if (pending) {
        *result = call->result;
        *out = call->item;
        task->buffer = call->buffer;
        memcpy(task->text, call->text, sizeof(call->text));
    } else {
        spdl__log(&task->pipeline->logger, SPDL_LOG_ERROR,
                  "spdl: a call that did not return SPDL_PENDING was completed with spdl_complete");
        if (call->result == SPDL_OK && call->item != task->in.item && call->item != *out &&
            call->item != task->buffer)
            spdl__item_free(task->pipeline, call->item,
                            spdl__origin(0, (unsigned)task->node->index));
    }
    spdl__deferred_release(task->node, call);
    return true;
}

/* Adds what one call has counted; the cell has one writer at a time. */
SPDL__PRIVATE void spdl__external_book(spdl_pipeline *p, spdl__node *node,
                                       const spdl__counters *call, uint64_t since, uint64_t now) {
    spdl__counters *counters = &node->counters[p->workers];
    spdl__spin_lock(&p->external_lock);
    spdl__count(&counters->made, call->made);
    spdl__count(&counters->skips, call->skips);
    spdl__count(&counters->failures, call->failures);
    spdl__counters_book(counters, 1, call->failures, now - since);
    spdl__counters_learn(node, 1, now - since);
    spdl__spin_unlock(&p->external_lock);
}

/* Any thread: does for a waiting call what its worker would have done. */
SPDL__PRIVATE void spdl__deferred_settle(spdl_pipeline *p, spdl__node *node, spdl__deferred *call) {
    const uint64_t now = spdl_time_ns();
    spdl__counters counted;
    spdl_task task;
    memset(&counted, 0, offsetof(spdl__counters, bucket));
    memset(&task, 0, sizeof(task));
    task.pipeline = p;
    task.node = node;
    task.worker = p->workers;
    task.in = call->in;
    task.taken = call->taken;
    task.buffer = call->buffer;
    task.holder = call->holder;
    task.flushing = call->flushing;
    task.sequence = call->sequence;
    task.ticket = call->ticket;
    task.place = call->place;
    task.since = call->since;
    memcpy(task.text, call->text, sizeof(call->text));
    spdl__store_relaxed(&call->thread, spdl__os_thread_id()); /* for a stop in what is called now */
    (void)spdl__task_settle(&task, &counted, call->result, call->item, now);
    spdl__store_relaxed(&call->thread, 0);
    spdl__external_book(p, node, &counted, task.since, now);
    spdl__deferred_release(node, call);
    if (node->in != NULL) spdl__edge_reader_idle(node->in, now);
    (void)spdl__claim_move(p, node, (uint64_t)-1);
    spdl__wake_changed(p, node);
    if (spdl__load32(&node->closed)) spdl__claim_end_rows(p, node);
}

/* What the call was when it became ours to complete: ARMED or WAITING; FREE when there is no such
   call any more, or somebody else completes it. */
SPDL__PRIVATE spdl__deferred_state spdl__deferred_claim(spdl__deferred *call, uint64_t generation) {
    for (;;) {
        const uint64_t state = spdl__deferred_load(call);
        const spdl__deferred_state now = (spdl__deferred_state)(state & 7);
        if (state >> 3 != generation) return SPDL__DEFERRED_FREE;
        if (now != SPDL__DEFERRED_ARMED && now != SPDL__DEFERRED_WAITING)
            return SPDL__DEFERRED_FREE;
        if (spdl__deferred_move(call, generation, now,
                                now == SPDL__DEFERRED_ARMED ? SPDL__DEFERRED_COMPLETING
                                                            : SPDL__DEFERRED_SETTLING))
            return now;
    }
}

SPDL__PRIVATE spdl_result spdl__complete(spdl_deferred deferred, spdl_result result, void *item,
                                         const char *text) {
    spdl_pipeline *p = deferred.pipeline;
    const uint64_t generation = deferred.id >> SPDL__ID_BITS;
    const uint64_t row = deferred.id >> SPDL__ID_PLACE_BITS & ((1u << SPDL__ID_ROW_BITS) - 1);
    const uint64_t place = deferred.id & ((1u << SPDL__ID_PLACE_BITS) - 1);
    spdl__deferred_state was = SPDL__DEFERRED_FREE;
    spdl__deferred *call = NULL;
    spdl__node *node;
    if (p == NULL) return SPDL_E_INVALID;
    spdl__add32(&p->completing, 1); /* destroy waits for us, too */
    node = row < (uint64_t)p->count ? &p->node[row] : NULL;
    if (node != NULL && node->deferred != NULL && place < (uint64_t)node->row.max_concurrency)
        call = &node->deferred[place];
    if (call != NULL) was = spdl__deferred_claim(call, generation);
    if (was != SPDL__DEFERRED_FREE) {
        call->result = result;
        call->item = item;
        (void)snprintf(call->text, sizeof(call->text), "%s", text);
        if (was == SPDL__DEFERRED_WAITING) spdl__deferred_settle(p, node, call);
        else /* the worker is in the function and settles it; from here on it may */
            spdl__store(&call->state, generation << 3 | SPDL__DEFERRED_DONE);
    } else {
        spdl__log(&p->logger, SPDL_LOG_ERROR,
                  "spdl: spdl_complete: no such call, or it was completed before");
    }
    spdl__sub32(&p->completing, 1);
    return was == SPDL__DEFERRED_FREE ? SPDL_E_INVALID : SPDL_OK;
}

SPDL_API spdl_result spdl_complete(spdl_deferred deferred, spdl_result result, void *item) {
    return spdl__complete(deferred, result, item, "");
}

SPDL_API spdl_result spdl_complete_fail(spdl_deferred deferred, const char *format, ...) {
    char text[SPDL_TEXT_BYTES];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    return spdl__complete(deferred, SPDL_E_STAGE, NULL, text);
}

/* ============================================================================================= */
/* >>again-impl
   Calls that return SPDL_AGAIN: each hands on an item and is called again, with the same input,
   when there is room for the next: by the worker at hand, or after that has left by whoever makes
   it RUNNING. It waits in its place then, and counts as a call inside of the row. Room for each
   result but the first, which the take has promised:

       serial       alone in the row: the edge has room
       completion   one more result is promised (`refunds` goes down) while the word is held
       input order  the results of one call are a stream in the slot of its ticket, which has as
                    many places as may wait: those after it do not use up its room

   A stream is dry when its reader has found nothing in it: stored with a barrier before it looks
   again, and cleared after the call has added something (tests/model/stream.pml).

   In a row that is closed calls that wait are dropped, except those before the failure that is to
   end what is delivered. Stop drops all of them, after no worker enters any more. */

SPDL_API void **spdl_state(spdl_task *task) {
    if (!spdl__task_allows(task, "spdl_state")) return &task->no_state;
    if (task->again != NULL) return &task->again->user;
    (void)spdl__task_row_error(task, "spdl_state in a stage whose row does not say .again");
    return &task->no_state;
}

/* Whether the call may go on although its row is closed: what comes before the cut is delivered. */
SPDL__PRIVATE bool spdl__again_lives(const spdl__node *node, const spdl__again *call) {
    const uint64_t cut = spdl__load(&node->cut);
    return !spdl__load32(&node->closed) ||
           (node->by_ticket && cut != UINT64_MAX && call->ticket < cut);
}

/* Whether there is room for one more result; a guess, except for the thread that has the call and
   is alone, or holds the word. */
SPDL__PRIVATE bool spdl__again_room(const spdl_pipeline *p, const spdl__node *node,
                                    const spdl__again *call, uint64_t word) {
    const spdl__list *list = (const spdl__list *)spdl__load_pointer(&call->stream);
    if (list == NULL) return node->by_ticket || spdl__claim_room(p, node, word);
    return spdl__load(&list->count) - spdl__load(&list->at) < (uint64_t)node->row.buffer_size;
}

SPDL__PRIVATE bool spdl__again_runnable(const spdl_pipeline *p, const spdl__node *node,
                                        uint64_t word) {
    int i;
    for (i = 0; i < node->row.max_concurrency; ++i) {
        const spdl__again *call = &node->again[i];
        if (spdl__load32(&call->state) == SPDL__AGAIN_WAITING &&
            (spdl__again_room(p, node, call, word) || !spdl__again_lives(node, call)))
            return true;
    }
    return false;
}

SPDL__PRIVATE bool spdl__again_claim(spdl__again *call, spdl__again_state from) {
    uint32_t expected = (uint32_t)from;
    return spdl__load_relaxed32(&call->state) == expected &&
           spdl__cas32(&call->state, &expected, SPDL__AGAIN_RUNNING);
}

/* The last call has returned: frees what spdl_state holds. */
SPDL__PRIVATE void spdl__again_forget(const spdl__node *node, spdl__again *call) {
    void *user = call->user;
    call->user = NULL;
    if (user != NULL && node->row.free_state != NULL) node->row.free_state(user);
}

/* And its result was put: its place is free, and the reader of its stream goes on to the next. But
   not when the call was cut: what comes after it is not delivered. */
SPDL__PRIVATE void spdl__again_over(spdl__node *node, spdl__again *call, bool cut) {
    spdl__list *stream = (spdl__list *)call->stream;
    spdl__store_pointer(&call->stream, NULL);
    if (stream != NULL && !cut) spdl__stream_close(&node->out, call->ticket, stream);
    spdl__store32(&call->state, SPDL__AGAIN_FREE);
}

/* RUNNING, and not to go on. For a stop (`outside` of the row) the call is over before its state
   and input are freed: they may stop the pipeline, too. */
SPDL__PRIVATE void spdl__again_drop(spdl_pipeline *p, spdl__node *node, spdl__again *call,
                                    spdl__counters *counters, bool outside) {
    const spdl__item in = call->in;
    void *user = call->user;
    spdl__add(&counters->freed, spdl__origin_tag(in.origin) < SPDL__LIST);
    call->user = NULL;
    spdl__again_over(node, call, true);
    if (outside) (void)spdl__claim_move(p, node, (uint64_t)-1);
    if (user != NULL && node->row.free_state != NULL) node->row.free_state(user);
    spdl__item_free(p, in.item, in.origin);
    if (!outside) (void)spdl__claim_move(p, node, (uint64_t)-1);
    spdl__wake_changed(p, node);
}

/* Room for the next result is the call's from here on. */
SPDL__PRIVATE bool spdl__again_promise(spdl__sitting *s, const spdl__again *call) {
    spdl__node *node = s->node;
    bool room;
    s->word = spdl__load(node->word);
    if ((s->word & SPDL__STOPPED) != 0 || !spdl__again_lives(node, call)) return false;
    if (node->serial || node->by_ticket) return spdl__again_room(s->p, node, call, s->word);
    s->inside = true; /* the call is */
    if ((s->word & SPDL__FLAGS) != 0 || !spdl__claim_hold(s)) return s->inside = false;
    room = s->inside = spdl__claim_room(s->p, node, s->word) > 0;
    if (room) spdl__sub(&node->out.refunds, 1);
    s->word = spdl__claim_move(s->p, node, (uint64_t)0 - SPDL__HELD);
    return room;
}

/* RUNNING no more: whoever comes may go on. A stop that has found it RUNNING looks again. */
SPDL__PRIVATE void spdl__again_let_go(spdl_pipeline *p, spdl__again *call) {
    spdl__store32(&call->state, SPDL__AGAIN_WAITING);
    spdl__full_barrier(); /* pairs with those of the reader's take, and in pipeline_halt */
    if (spdl__load32(&p->stopping)) spdl__os_event_wake(&p->quiet, SPDL__ALL);
}

/* The sitting's next: the call at hand, if it has returned SPDL_AGAIN and has room, or one that
   waits and has. */
SPDL__NOINLINE bool spdl__again_take(spdl__sitting *s, spdl__counters *counters) {
    spdl__node *node = s->node;
    int i;
    if (s->again != NULL) {
        spdl__full_barrier(); /* its last result was put; the take that follows is a look */
        s->in = s->again->in;
        return spdl__again_promise(s, s->again);
    }
    if (s->inside) return false;
    for (i = 0; i < node->row.max_concurrency; ++i) {
        spdl__again *call = &node->again[i];
        if (!spdl__again_claim(call, SPDL__AGAIN_WAITING)) continue;
        if (!spdl__again_lives(node, call)) {
            spdl__again_drop(s->p, node, call, counters, false);
        } else if (spdl__again_promise(s, call)) {
            s->again = call;
            s->inside = true;
            s->flush = call->flush;
            s->in = call->in;
            s->ticket = call->ticket;
            s->place = call->place;
            return true;
        } else {
            spdl__again_let_go(s->p, call);
        }
    }
    return false;
}

/* A call begins: there is a place for each that the concurrency allows. */
SPDL__PRIVATE spdl__again *spdl__again_begin(const spdl__sitting *s) {
    spdl__again *call = s->node->again;
    while (!spdl__again_claim(call, SPDL__AGAIN_FREE)) ++call;
    call->flush = s->flush;
    call->in = s->in;
    call->ticket = s->ticket;
    call->place = s->place;
    call->calls = 0;
    return call;
}

/* In input order the first result opens the stream. */
SPDL__PRIVATE bool spdl__again_open(spdl__node *node, spdl__again *call, uint64_t now) {
    spdl__list *list = spdl__list_get(&node->freelist);
    spdl__item what = call->in;
    if (list == NULL) return false;
    if (list->space == 0) {
        list->entry = (spdl__item *)spdl__alloc_zeroed(list->freelist->allocator,
                                                       (size_t)node->row.buffer_size,
                                                       sizeof(*list->entry), sizeof(void *));
        if (list->entry == NULL) {
            spdl__list_put_back(list);
            return false;
        }
        list->space = (uint64_t)node->row.buffer_size;
    }
    list->stream = true;
    spdl__store32(&list->open, 1);
    what.item = list;
    what.origin = spdl__origin(call->in.origin >> 8, SPDL__LIST);
    spdl__store_pointer(&call->stream, list);
    spdl__put(node, &node->out, call->ticket, &what, now);
    return true;
}

/* The function has returned SPDL_AGAIN: its result goes on. SPDL_AGAIN, or why the call fails. */
SPDL__NOINLINE spdl_result spdl__again_returned(spdl_task *task, spdl__counters *counters,
                                                void *out, uint64_t now) {
    spdl__node *node = task->node;
    spdl__again *call = task->again;
    spdl__item what = task->in;
    what.item = out;
    what.origin = spdl__task_origin(task, out);
    if (out != NULL && out == task->in.item)
        return spdl__task_fail(task, "returned SPDL_AGAIN with its input in *out");
    if (node->by_ticket && call->stream == NULL && !spdl__again_open(node, call, now)) {
        spdl__item_free(task->pipeline, out, what.origin);
        return SPDL_E_NOMEM;
    }
    if (SPDL__UNLIKELY(task->buffer != NULL)) spdl__task_give_back(task);
    spdl__task_put(task, &node->out, &what, now);
    spdl__count(&counters->made, 1);
    ++call->calls;
    if (task->taken) call->in.origin = spdl__origin(task->sequence, SPDL__DROPPED);
    return SPDL_AGAIN;
}

/* After all of the call was booked: whoever comes may go on with it. Its result is seen by those
   that sleep. */
SPDL__PRIVATE void spdl__again_wait(spdl_pipeline *p, spdl__node *node, spdl__again *call) {
    spdl__again_let_go(p, call);
    spdl__wake_hint(p, node, node->beside | (uint32_t)1 << node->index, NULL);
}

/* Stop: no worker goes on with the calls that wait. */
SPDL__PRIVATE void spdl__again_drop_all(spdl_pipeline *p) {
    int i, k;
    for (i = 0; i < p->count; ++i) {
        spdl__node *node = &p->node[i];
        for (k = 0; node->again != NULL && k < node->row.max_concurrency; ++k)
            if (spdl__again_claim(&node->again[k], SPDL__AGAIN_WAITING))
                spdl__again_drop(p, node, &node->again[k], &node->counters[p->workers], true);
    }
}

/* ============================================================================================= */
/* >>step-impl
   What a worker does in a pipeline: its init and fini, a sitting in a row, and what the trainer's
   waiting is booked on meanwhile.

   A worker that steps looks for the row furthest downstream that has something to do. In a row that
   calls it sits: it takes items one by one, calls and puts, for up to SPDL__SITTING_NS, and looks
   downstream again. It never keeps an item it has not begun, and never waits in a row.

   Threads: workers, and with workers = 0 the trainer. */

#define SPDL__SITTING_NS 40000 /* how long a worker stays in a row before it looks downstream */
#define SPDL__SITTING_ITEMS 32 /* and how many items it takes there at most */
#define SPDL__TIMED_NS 1000    /* calls that take as long on average are timed one by one */

/* --- a worker comes and goes --- */

/* Runs every init of the group's rows on this worker; the last worker to succeed opens the
   pipeline. */
SPDL__PRIVATE void spdl__step_init(spdl_pipeline *p, const spdl__group *group, int worker) {
    int i;
    p->inits[worker] = 1;
    for (i = 0; i < p->count; ++i) {
        const spdl_stage *row = &p->node[i].row;
        void **local = &p->local[worker * p->count + i];
        spdl_result result = SPDL_OK;
        if (row->init != NULL && (group->rows >> i & 1))
            result = row->init(row->ctx, spdl__worker_number(group, worker), local);
        if (result != SPDL_OK) {
            char text[SPDL_NAME_BYTES + 64];
            (void)snprintf(text, sizeof(text), "init on worker %d failed: %s",
                           spdl__worker_number(group, worker), spdl_result_text(result));
            spdl__call_fatal(p, &p->node[i], 0, 0, result < 0 ? result : SPDL_E_STAGE, text);
            spdl__put_end(p, p->sink, 0); /* nothing was processed, nothing will be */
            return;
        }
        p->inits[worker]++;
    }
    if (spdl__add32(&p->joined, 1) + 1 < (uint32_t)p->workers) return;
    spdl__store32(&p->open, 1); /* every other worker may be asleep: this one starts the flow */
    spdl__wake_all(p);          /* and in other groups another */
}

/* Runs the fini of every init that succeeded on this worker. */
SPDL__PRIVATE void spdl__step_fini(spdl_pipeline *p, const spdl__group *group, int worker) {
    int i;
    for (i = (int)p->inits[worker] - 2; i >= 0; --i) {
        const spdl_stage *row = &p->node[i].row;
        if (row->fini != NULL && (group->rows >> i & 1))
            row->fini(row->ctx, spdl__worker_number(group, worker),
                      p->local[worker * p->count + i]);
    }
    p->inits[worker] = UINT8_MAX;
    if (spdl__load32(&group->abandoned)) return; /* nobody counts it */
    spdl__add32(&p->left, 1);
    spdl__os_event_wake(&p->quiet, SPDL__ALL);
}

/* --- why the trainer waits --- */

/* Where the item is that the trainer waits for: from the sink up to the first row that has it, is
   called with it, or could be. Of several paths the first one where something is. *idle: its input
   is there, and no worker. */
SPDL__PRIVATE spdl__node *spdl__blame_find(const spdl_pipeline *p, bool *idle) {
    spdl__node *node = p->last;
    for (;;) {
        const uint64_t word = spdl__load(node->word), active = word & SPDL__ACTIVE;
        const spdl__edge *in = node->in;
        *idle = false;
        if (node->row.kind == SPDL_KIND_MERGE) {
            int i = 0;
            while (i + 1 < node->paths &&
                   !(spdl__load(p->node[node->path[i]].word) & SPDL__ACTIVE))
                ++i;
            node = &p->node[node->path[i]];
            continue;
        }
        if (node->row.kind == SPDL_KIND_PATH) {
            node = node->before;
            continue;
        }
        if (node->by_ticket ? (int64_t)(spdl__claim_position(node, word) -
                                        spdl__head(spdl__load(&node->out.word))) > 0
                            : active > 0)
            return node;
        if (in == NULL) {
            *idle = node->row.kind == SPDL_KIND_SOURCE;
            return node;
        }
        if (spdl__edge_ready(in, spdl__head(word))) {
            *idle = active < spdl__load_relaxed32(&node->limit);
            return node;
        }
        node = node->before;
    }
}

/* Books the time since the last mark where the item was then, and looks where it is now. A worker
   marks when it enters a row whose calls take a microsecond or more, and when it leaves it, and
   goes on when another thread is at it; `over` is the trainer's last one. */
SPDL__PRIVATE void spdl__blame_mark(spdl_pipeline *p, bool over) {
    uint64_t now;
    if (over)
        spdl__spin_lock(&p->blame_lock);
    else if (!spdl__try_lock(&p->blame_lock))
        return;
    now = spdl_time_ns();
    if (p->blame_since != 0) {
        if (now > p->blame_since)
            spdl__count(p->blame_idle ? &p->blame->exposed_idle_ns : &p->blame->exposed_ns,
                        now - p->blame_since);
        spdl__store_relaxed(&p->blame_since, over ? 0 : now);
        if (!over) p->blame = spdl__blame_find(p, &p->blame_idle);
    }
    spdl__spin_unlock(&p->blame_lock);
}

/* The trainer: a wait begins. */
SPDL__PRIVATE void spdl__blame_begin(spdl_pipeline *p, uint64_t since) {
    spdl__spin_lock(&p->blame_lock);
    p->blame = spdl__blame_find(p, &p->blame_idle);
    spdl__store_relaxed(&p->blame_since, since);
    spdl__spin_unlock(&p->blame_lock);
}

/* --- a sitting --- */

/* How a call has ended. */
typedef enum spdl__outcome {
    SPDL__GOES_ON,
    SPDL__OVER,     /* no call of this row is to follow */
    SPDL__NO_CALL,  /* it was the one that said the source has ended, or nobody waits for it */
    SPDL__LATER,    /* it is to be called again, by whoever comes */
    SPDL__ELSEWHERE /* spdl_complete will end it, and give its place back */
} spdl__outcome;

/* The end of the epoch, or of all. */
SPDL__PRIVATE void spdl__step_source_end(spdl_pipeline *p, spdl__node *node, uint64_t now) {
    if (!node->row.continuous) {
        spdl__store32(&node->ended, 1);
        return;
    }
    spdl__put_epoch_end(p, node, 0, now);
    spdl__store_relaxed(&node->made, 0);
}

/* After a call in a row where the result is not just what the function says. False when the call
   goes on without us. */
SPDL__NOINLINE bool spdl__step_returned(spdl_task *task, spdl_result *result, void **out) {
    const spdl__node *node = task->node;
    if (node->row.emits && *result == SPDL_OK && *out != NULL)
        *result = spdl__task_fail(
            task, "*out is set, but its row says .emits: results go to spdl_emit");
    if (node->splits && *result == SPDL_OK) {
        if (task->split == NULL) *result = spdl__task_send_all(task, *out);
        if (*out == task->in.item) /* its own again, taken or not */
            task->taken = false;
        else
            spdl_batch_free(*out); /* sent or not, it is empty or refused */
    }
    return node->deferred == NULL || spdl__deferred_returned(task, result, out);
}

/* A source with a thread of its own is about to be called: not after a stop. Either this exchange
   is seen by destroy, which may abandon the call then, or the stop is seen here: both threads have
   a full barrier between their store and their load. */
SPDL__PRIVATE bool spdl__step_may_block(spdl_pipeline *p, spdl__node *node) {
    (void)spdl__exchange32(&node->calling, 1);
    spdl__full_barrier();
    SPDL_TEST_POINT("source about to block");
    if (!spdl__load32(&p->stopping)) return true;
    (void)spdl__exchange32(&node->calling, 0);
    return false;
}

/* Such a call has returned. False: destroy has gone on without it, and what it made is freed. */
SPDL__PRIVATE bool spdl__step_is_back(spdl_task *task, spdl_result result, void *out) {
    spdl__node *node = task->node;
    if (spdl__exchange32(&node->calling, 0) != SPDL__ABANDONED) return true;
    if (result == SPDL_OK && out != task->buffer) /* else it is given back */
        spdl__item_free(task->pipeline, out,
                        spdl__origin(task->sequence, (unsigned)node->index));
    spdl__task_discard(task);
    return false;
}

/* One call on what was taken. */
SPDL__INLINE spdl__outcome spdl__step_call(spdl__sitting *s, spdl_task *task,
                                           spdl__counters *counters) {
    spdl__node *node = s->node;
    const bool source = node->in == NULL, blocks = source && node->row.threads > 0;
    spdl_result result;
    bool goes_on;
    void *out;
    if (SPDL__UNLIKELY(blocks) && !spdl__step_may_block(s->p, node)) return SPDL__NO_CALL;
    task->in = s->in;
    task->flushing = s->flush;
    task->sequence = s->flush ? 0 : s->in.origin >> 8;
    task->ticket = s->ticket;
    task->place = s->place;
    task->since = s->now;
    if (source) {
        task->in.item = NULL;
        task->in.origin = SPDL__DROPPED;
        task->in.range = node->made_all << SPDL__SPAN_BITS;
        task->sequence = node->made;
    } else if (node->row.flush && !s->flush) {
        node->range = s->in.range;
    }
    task->again = s->again;
    if (SPDL__UNLIKELY(node->again != NULL) && s->again == NULL)
        task->again = s->again = spdl__again_begin(s);
    result = spdl__task_call(task, counters, &out);
    if (SPDL__UNLIKELY(blocks) && !spdl__step_is_back(task, result, out)) return SPDL__NO_CALL;
    if (SPDL__UNLIKELY(!node->plain) && !spdl__step_returned(task, &result, &out))
        return SPDL__ELSEWHERE;
    if (s->timed) s->now = spdl_time_ns();
    if (SPDL__UNLIKELY(task->again != NULL) && result == SPDL_AGAIN) {
        result = spdl__again_returned(task, counters, out, s->now);
        if (result == SPDL_AGAIN) return SPDL__LATER;
        out = NULL;
    }
    if (SPDL__UNLIKELY(task->again != NULL)) spdl__again_forget(node, task->again);
    if (source && result == SPDL_END) {
        spdl__task_discard(task);
        spdl__step_source_end(s->p, node, s->now);
        return SPDL__NO_CALL;
    }
    if (source && result == SPDL_OK) {
        spdl__store_relaxed(&node->made, node->made + 1);
        ++node->made_all;
    }
    goes_on = spdl__task_settle(task, counters, result, out, s->now);
    if (SPDL__UNLIKELY(task->again != NULL))
        spdl__again_over(node, task->again, !goes_on || task->cut_short);
    s->again = NULL;
    return goes_on ? SPDL__GOES_ON : SPDL__OVER;
}

/* The end of a sitting of `ns` that was measured, and how many to leave out then: on average as
   many of its length as take SPDL__METER_NS. (A sequence of Weyl's.) The meter is read before and
   after the clock, so its times may come to more. */
SPDL__NOINLINE void spdl__meter_book(spdl__meter *meter, spdl__counters *counters, uint64_t calls,
                                     uint64_t ns) {
    uint64_t cpu, wait, cpu_ns;
    bool cpu_known, wait_known;
    spdl__os_thread_times(NULL, NULL, &cpu, NULL);
    spdl__os_thread_times(NULL, &meter->file, NULL, &wait);
    cpu_known = meter->cpu_ns != SPDL__NEVER && cpu != SPDL__NEVER;
    wait_known = meter->wait_ns != SPDL__NEVER && wait != SPDL__NEVER;
    spdl__meter_waited(meter, wait);
    meter->lot += 0x9e3779b97f4a7c15u;
    counters->meter_due =
        (int64_t)((meter->lot >> 32) * (2 * (SPDL__METER_NS / (ns + 1)) + 1) >> 32);
    if (!cpu_known) return;
    cpu_ns = spdl__min(cpu - meter->cpu_ns, ns);
    spdl__count(&counters->metered_ns, ns);
    spdl__count(&counters->metered_cpu_ns, cpu_ns);
    spdl__count(&counters->metered, calls);
    if (wait_known)
        spdl__count(&counters->metered_wait_ns, spdl__min(wait - meter->wait_ns, ns - cpu_ns));
    else spdl__count(&counters->metered_blind, calls);
}

/* At the end of a sitting, before the row is left: a thread that sees the end of the row sees all
   counted. */
SPDL__PRIVATE void spdl__step_book(spdl__sitting *s, spdl__counters *counters, spdl__meter *meter,
                                   uint64_t begun, uint64_t failures) {
    if (!s->timed) {
        s->now = spdl_time_ns();
        spdl__counters_book(counters, s->calls,
                            spdl__load_relaxed(&counters->failures) - failures, s->now - begun);
    }
    spdl__counters_learn(s->node, s->calls, s->now - begun);
    if (SPDL__METERED && SPDL__UNLIKELY(counters->meter_due-- <= 0))
        spdl__meter_book(meter, counters, s->calls, s->now - begun);
}

/* What comes next: a call of SPDL_AGAIN that can go on, or an item. A call at hand that cannot ends
   the sitting. */
SPDL__INLINE spdl__taken spdl__step_take(spdl__sitting *s, spdl__counters *counters,
                                         spdl__outcome outcome) {
    if (SPDL__UNLIKELY(s->node->again != NULL) && spdl__again_take(s, counters)) return SPDL__CALL;
    return outcome == SPDL__LATER ? SPDL__LEFT : spdl__claim_take(s);
}

/* Before the first call of a sitting. Whether it is measured: then it begins now. */
SPDL__INLINE bool spdl__step_first(spdl__sitting *s, spdl_task *task,
                                   const spdl__counters *counters) {
    if (s->timed && spdl__load_relaxed(&s->p->blame_since) != 0) spdl__blame_mark(s->p, false);
    spdl__store_relaxed(&task->thread, spdl__os_thread_id());
    if (!SPDL__METERED || SPDL__LIKELY(counters->meter_due > 0)) return false;
    spdl__meter_start(&task->meter);
    s->now = spdl_time_ns();
    return true;
}

/* The end of a sitting, all of it booked: the place in the row is given back, or the call at hand
   waits in it. */
SPDL__INLINE void spdl__step_leave(spdl__sitting *s, spdl__outcome outcome) {
    spdl_pipeline *p = s->p;
    spdl__node *node = s->node;
    if (outcome == SPDL__LATER) {
        spdl__again_wait(p, node, s->again);
    } else {
        if (node->in != NULL) spdl__edge_reader_idle(node->in, s->now);
        (void)spdl__claim_move(p, node, (uint64_t)-1);
        spdl__wake_hint(p, node, node->beside, NULL);
    }
    if (s->timed && spdl__load_relaxed(&p->blame_since) != 0) spdl__blame_mark(p, false);
}

/* What a worker does in a row that calls a function. Whether anything was done. */
SPDL__PRIVATE bool spdl__step_sit(const spdl__group *group, spdl__node *node, int worker) {
    spdl_pipeline *p = group->pipeline;
    spdl__counters *counters = &node->counters[worker];
    spdl_task *task = &p->task[worker];
    const uint64_t each = spdl__load_relaxed(&node->item_ns); /* of a call; 0: not known yet */
    const uint32_t most =
        each == 0 ? 1 : (uint32_t)spdl__max(1, spdl__min(SPDL__SITTING_NS / each,
                                                         SPDL__SITTING_ITEMS));
    const uint64_t failures = spdl__load_relaxed(&counters->failures);
    const uint64_t late = /* from then on no call begins: a guest's budget */
        group->pool != NULL ? group->pool->worker[worker - group->first].until : SPDL__NEVER;
    uint64_t begun, failed = failures;
    spdl__outcome outcome = SPDL__GOES_ON;
    bool done = false;
    spdl__sitting s;
    spdl__taken taken;
    s.p = p;
    s.node = node;
    s.until = s.waited = s.each_waited = s.place = s.calls = 0;
    s.inside = false;
    s.again = NULL;
    s.timed = each == 0 || each >= SPDL__TIMED_NS || late != SPDL__NEVER;
    begun = s.now = spdl_time_ns();
    s.word = spdl__load(node->word);
    task->node = node;
    while (s.now < late && (taken = spdl__step_take(&s, counters, outcome)) != SPDL__LEFT) {
        uint64_t since;
        done = true;
        /* after a held take our own row may have looked empty to others */
        spdl__wake_hint(p, node, node->beside | (uint32_t)1 << node->index,
                        s.calls == 0 && taken == SPDL__CALL ? group : NULL);
        if (taken == SPDL__DONE) {
            if (s.word & SPDL__FINISHED) spdl__claim_end_rows(p, node + 1);
            continue;
        }
        if (s.calls == 0 && spdl__step_first(&s, task, counters)) begun = s.now;
        since = s.now;
        outcome = spdl__step_call(&s, task, counters);
        if (outcome == SPDL__ELSEWHERE) s.inside = false;
        if (outcome == SPDL__ELSEWHERE || outcome == SPDL__NO_CALL) break;
        ++s.calls;
        if (s.timed) {
            const uint64_t now_failed = spdl__load_relaxed(&counters->failures);
            spdl__counters_book(counters, 1, now_failed - failed, s.now - since);
            failed = now_failed;
        }
        if (outcome == SPDL__OVER || s.calls >= most) break;
        s.word = spdl__load(node->word);
    }
    if (s.calls > 0) spdl__step_book(&s, counters, &task->meter, begun, failures);
    if (s.waited != 0) spdl__add(&node->in->put_wait_ns, s.waited);
    /* a polite worker whose turn is over meanwhile does not look again at what it held */
    if (!done && p->rescue != NULL) spdl__wake_all(p);
    if (outcome == SPDL__LATER || s.inside) spdl__step_leave(&s, outcome);
    return done;
}

/* --- a step --- */

/* The row to look at as number `i` from the source: of several sources the path whose turn it is in
   their merge comes first, or one that is quick would leave no time for the rest. */
SPDL__PRIVATE int spdl__step_row(const spdl_pipeline *p, int i) {
    const spdl__node *mix = p->mix;
    int at;
    if (mix == NULL || i >= mix->index) return i;
    at = mix->path[spdl__load_relaxed32(&mix->turn)] + i + 1 - mix->index;
    return at < 0 ? at + mix->index : at;
}

/* One piece of work, as far downstream as possible: first where nobody else is, as two in one row
   send its word to and fro. */
SPDL__PRIVATE bool spdl__step(void *self, int worker) {
    const spdl__group *group = (const spdl__group *)self;
    spdl_pipeline *p = group->pipeline;
    int joins, i;
    const bool guest = worker >= group->workers - group->guests; /* others call their hooks */
    worker += group->first;
    if (p->has_hooks && !guest && p->inits[worker] != UINT8_MAX) {
        if (spdl__load32(&p->leaving)) {
            spdl__step_fini(p, group, worker);
            return true;
        }
        if (p->inits[worker] == 0) {
            spdl__step_init(p, group, worker);
            return true;
        }
    }
    if (!spdl__claim_flows(p) || !spdl__claim_turn(p, group)) return false;
    for (joins = 0; joins < 2; ++joins) {
        for (i = p->count - 1; i >= 0; --i) {
            spdl__node *node = &p->node[spdl__step_row(p, i)];
            const uint64_t word = spdl__load(node->word);
            const spdl_kind kind = node->row.kind;
            if (!(group->rows >> node->index & 1) ||
                ((word & SPDL__ACTIVE) != 0 && node->again == NULL) != (joins != 0) ||
                !spdl__claim_has_work(p, node, word))
                continue;
            if (kind == SPDL_KIND_BATCH   ? spdl__batch_step(group, node, worker)
                : kind == SPDL_KIND_MERGE ? spdl__merge_step(group, node, worker)
                                          : spdl__step_sit(group, node, worker))
                return true;
        }
    }
    return false;
}

/* ============================================================================================= */
/* >>tune-impl
   With .autotune the trainer looks at the statistics now and then, in next. If it has waited, the
   stage that is busiest for its concurrency gets more of it, while the stages use less than their
   budget of processors; if not, the one that needs least of its concurrency gets one less. The next
   look judges: what did not help, or was needed, is taken back, and the stage left alone for a
   while. Beyond the budget the stage that uses most gets less. Each decision is a line in the log,
   and so is, when it has changed, why there is none. Trainer only; what create writes says so. */

#define SPDL__TUNE_ITEMS 16    /* decisions are not taken on fewer items */
#define SPDL__TUNE_WAIT 0.02   /* a trainer that waits less has enough */
#define SPDL__TUNE_BUSY 0.7    /* a stage that is busy less is not the limit */
#define SPDL__TUNE_FULL 0.9    /* workers that are busy less have time for more calls */
#define SPDL__TUNE_MARGIN 1.05 /* a rate has grown, or the budget is exceeded, by more than this */
#define SPDL__TUNE_REST 16     /* looks for which a stage is left alone */

struct spdl__tuner {
    double budget;     /* create: processors */
    uint64_t least_ns; /* create: between two looks */
    /* written by each look; these two are of when it was */
    uint64_t since;       /* as spdl_time_ns */
    uint64_t cpu_ns;      /* of the workers */
    spdl_stats now, last; /* this look and the one before; between them: */
    double rate;    /* items per second */
    double waiting; /* share of time that the trainer waited */
    bool fed;       /* which is little */
    double cores;   /* processors that the workers used */
    uint32_t limit[SPDL_MAX_STAGES]; /* calls it may have now, as far as there are threads */
    uint32_t most[SPDL_MAX_STAGES];  /* and if it were raised */
    double busy[SPDL_MAX_STAGES];    /* calls that ran at the same time, on average */
    double load[SPDL_MAX_STAGES];    /* their share of `limit` */
    int rest[SPDL_MAX_STAGES]; /* looks for which a row is still left alone */
    int trial;              /* the row with a change that the next look judges, or -1 */
    uint32_t before, after; /* its concurrency */
    double rate_before;     /* items per second */
    int reason, said; /* why nothing was raised, as last found, and as last logged: see tune_idle */
};

/* The most calls that tuning can give a stage. */
SPDL__COLD uint32_t spdl__node_most(const spdl_pipeline *p, const spdl__node *node) {
    const int most = node->row.max_concurrency;
    const int threads = node->row.threads > 0 ? node->row.threads : p->group[0].workers;
    return (uint32_t)(node->row.deferred || most < threads ? most : threads);
}

SPDL__COLD void spdl__tune_look(spdl_pipeline *p) {
    spdl__tuner *t = p->tuner;
    uint64_t cpu_ns = 0;
    double ns;
    int i, k;
    spdl_pipeline_stats(p, &t->now);
    for (i = 0; i < p->groups; ++i)
        for (k = 0; p->group[i].pool != NULL && k < p->group[i].pool->threads; ++k) {
            uint64_t used; /* what guests use is not known */
            spdl__os_thread_times(&p->group[i].pool->worker[k].thread, NULL, &used, NULL);
            if (used != SPDL__NEVER) cpu_ns += used;
        }
    ns = (double)(t->now.elapsed_ns - t->last.elapsed_ns);
    t->rate = 1e9 * (double)(t->now.delivered - t->last.delivered) / ns;
    t->waiting = (double)(t->now.wait_ns - t->last.wait_ns) / ns;
    t->fed = t->waiting <= SPDL__TUNE_WAIT;
    t->cores = (double)spdl__grown(t->cpu_ns, cpu_ns) / ns;
    for (i = 0; i < p->count; ++i) {
        const spdl_stage_stats *stage = &t->now.stage[i];
        t->most[i] = spdl__node_most(p, &p->node[i]);
        t->limit[i] = (uint32_t)spdl__min((uint64_t)stage->concurrency, t->most[i]);
        t->busy[i] = (double)(stage->busy_ns - t->last.stage[i].busy_ns) / ns;
        t->load[i] = t->busy[i] / t->limit[i];
        if (t->rest[i] > 0) --t->rest[i];
    }
    t->last = t->now;
    t->cpu_ns = cpu_ns;
}

/* A row gets a concurrency, or keeps it. What was measured stands in parentheses. */
SPDL__COLD void spdl__tune_set(spdl_pipeline *p, int row, uint32_t from, uint32_t to,
                               const char *why) {
    const spdl__tuner *t = p->tuner;
    char change[32];
    if (from == to)
        (void)snprintf(change, sizeof(change), "%u kept", (unsigned)to);
    else
        (void)snprintf(change, sizeof(change), "%u -> %u", (unsigned)from, (unsigned)to);
    spdl__logf(&p->logger, SPDL_LOG_INFO,
               "spdl: autotune: stage %d '%s': concurrency %s, because "
               "%s (busy %.0f %%, %.1f items/s, %.1f of %.1f processors, the trainer waited "
               "%.0f %% of the time)", row, p->node[row].name, change, why, 100 * t->load[row],
               t->rate, t->cores, t->budget, 100 * t->waiting);
    if (from == to) return;
    spdl__store32(&p->node[row].limit, to);
    spdl__wake_all(p);
}

/* Whether more has helped, or less is enough; if not it is taken back. */
SPDL__COLD void spdl__tune_judge(spdl_pipeline *p) {
    spdl__tuner *t = p->tuner;
    const int row = t->trial;
    const bool less = t->after < t->before;
    const bool kept = less ? t->fed
                           : t->rate >= t->rate_before * SPDL__TUNE_MARGIN &&
                                 t->cores <= t->budget * SPDL__TUNE_MARGIN;
    t->trial = -1;
    if (spdl__load_relaxed32(&p->node[row].limit) != t->after) return; /* changed by hand */
    if (!kept) t->rest[row] = SPDL__TUNE_REST;
    spdl__tune_set(p, row, t->after, kept ? t->after : t->before,
                   less ? kept ? "it is enough" : "it was not enough"
                        : kept ? "it helped" : "it did not help");
}

/* The stages use more than their budget: the one that uses most gets less. False: none can. */
SPDL__COLD bool spdl__tune_lower(spdl_pipeline *p) {
    spdl__tuner *t = p->tuner;
    int i, row = -1;
    for (i = 0; i < p->count; ++i)
        if (t->limit[i] > 1 && (row < 0 || t->busy[i] > t->busy[row])) row = i;
    if (row < 0) return false;
    t->rest[row] = SPDL__TUNE_REST;
    spdl__tune_set(p, row, t->limit[row], t->limit[row] - 1,
                   "the stages use more than cpu_budget, and this one most");
    return true;
}

/* Tries more calls with the busiest stage that may have more; or one less with that which needs
   least of what it has, and would not become the limit without it. False: there is none. */
SPDL__COLD bool spdl__tune_try(spdl_pipeline *p, bool more) {
    spdl__tuner *t = p->tuner;
    int i, row = -1;
    for (i = 0; i < p->count; ++i) {
        const uint32_t limit = t->limit[i];
        const bool fits = more ? limit < t->most[i] && t->load[i] >= SPDL__TUNE_BUSY
                               : limit > 1 && t->busy[i] < SPDL__TUNE_BUSY * (limit - 1);
        if (fits && t->rest[i] == 0 && (row < 0 || (t->load[i] > t->load[row]) == more))
            row = i;
    }
    if (row < 0) return false;
    t->trial = row;
    t->rate_before = t->rate;
    t->before = t->limit[row];
    t->after = more ? (uint32_t)spdl__min(t->before + 1 + t->before / 4, t->most[row])
                    : t->before - 1;
    spdl__tune_set(p, row, t->before, t->after,
                   more ? "the trainer waited" : "the trainer did not wait");
    return true;
}

/* Says why nothing is raised, once two looks in turn have found the same. */
SPDL__COLD void spdl__tune_idle(spdl_pipeline *p) {
    static const char *const reasons[] = {
        "the trainer does not wait", "the stages use all of cpu_budget",
        "all workers are busy: more might help", "no stage is busy most of the time",
        "was tried not long ago", "is at max_concurrency or has no more threads"
    };
    spdl__tuner *t = p->tuner;
    char stage[SPDL_NAME_BYTES + 24] = "";
    double busy = 0;
    int i, why, reason, top = 0;
    for (i = 0; i < p->count; ++i) {
        if (t->load[i] > t->load[top]) top = i;
        if ((p->group[0].rows >> i & 1) && !p->node[i].row.deferred) busy += t->busy[i];
    }
    if (t->fed) why = 0;
    else if (t->cores >= t->budget) why = 1;
    else if (busy >= SPDL__TUNE_FULL * p->group[0].workers) why = 2;
    else if (t->load[top] < SPDL__TUNE_BUSY) why = 3;
    else why = t->limit[top] < t->most[top] ? 4 : 5;
    if (why >= 4)
        (void)snprintf(stage, sizeof(stage), "stage %d '%s' ", top, p->node[top].name);
    reason = why < 4 ? why : 8 * top + why;
    if (reason == t->reason && reason != t->said) {
        t->said = reason;
        spdl__logf(&p->logger, SPDL_LOG_INFO,
                   "spdl: autotune: nothing is raised: %s%s (%u calls, "
                   "busy %.0f %%, %.1f of %.1f processors, the trainer waited %.0f %% of the time)",
                   stage, reasons[why], (unsigned)t->limit[top], 100 * t->load[top],
                   t->cores, t->budget, 100 * t->waiting);
    }
    t->reason = reason;
}

/* The trainer, with an item in its hands. The first look is not acted on: pages, caches and
   connections are new. */
SPDL__COLD void spdl__tune(spdl_pipeline *p, uint64_t now) {
    spdl__tuner *t = p->tuner;
    const bool first = t->last.elapsed_ns == 0;
    if (now - t->since < t->least_ns || p->delivered - t->last.delivered < SPDL__TUNE_ITEMS) return;
    t->since = now;
    spdl__tune_look(p);
    if (first) return;
    if (t->trial >= 0)
        spdl__tune_judge(p);
    else if (!(t->cores > t->budget * SPDL__TUNE_MARGIN && spdl__tune_lower(p)) &&
             !((t->fed || t->cores < t->budget) && spdl__tune_try(p, !t->fed)))
        spdl__tune_idle(p);
}

/* Where no row can be tuned there is no tuner. */
SPDL__COLD spdl_result spdl__tuner_build(spdl_pipeline *p, const spdl_pipeline_desc *desc) {
    spdl_process_stats process;
    int i = 0;
    if (!desc->autotune) return SPDL_OK;
    while (i < p->count && spdl__node_most(p, &p->node[i]) <= 1) ++i;
    if (i == p->count) {
        spdl__logf(&p->logger, SPDL_LOG_INFO,
                   "spdl: autotune: no stage can be tuned: SPDL_PIPE "
                   "rows can, with more than one thread to run them, without .flush and without "
                   "max_concurrency = 1");
        return SPDL_OK;
    }
    p->tuner = (spdl__tuner *)spdl__alloc_zeroed(&p->allocator, 1, sizeof(*p->tuner), 8);
    if (p->tuner == NULL) return SPDL_E_NOMEM;
    p->tuner->trial = p->tuner->reason = p->tuner->said = -1;
    spdl_process_read(&process);
    p->tuner->budget = desc->cpu_budget > 0 ? desc->cpu_budget : 0.4 * process.cores_allowed;
    p->tuner->least_ns = (uint64_t)(1e9 * (desc->tune_seconds > 0 ? desc->tune_seconds : 0.5));
    return SPDL_OK;
}

/* ============================================================================================= */
/* >>next-impl
   The ends of a pipeline: the trainer takes from the sink, the producer pushes into the feed. Both
   look a few times, then sleep until a worker wakes them (>>claim-impl). A trainer that sleeps also
   looks, every SPDL__STARVED_NS, whether polite workers get a processor and whether a merge in turn
   starves.

   Threads: next is the trainer's, push the producer's; with workers = 0 stages run inside next. An
   item is the caller's after next and before push has returned SPDL_OK. */

#define SPDL__STARVED_NS 20000000 /* a trainer that sleeps for so long looks why: polite workers */
#define SPDL__RESCUE_NS SPDL_SECONDS(60) /* are helped for so long then */
#define SPDL__WATERMARK_BUFFER 8 /* a sink that large has a low watermark, see sink_hint */
#define SPDL__MAX_BATCH (1 << 24)
#define SPDL__TAKER_ITEMS 16 /* with reports: after so many the trainer reads its schedstat */

/* --- the trainer --- */

/* Whether this is the child of a fork: it has no workers. */
SPDL__PRIVATE bool spdl__pipeline_forked(const spdl_pipeline *p) {
    return p->threaded && p->process != spdl__os_process_id(NULL);
}

/* Polite workers may get next to nothing beside other programs. When the trainer sleeps, and in
   SPDL__STARVED_NS they were ready to run for half as long, others do their work for
   SPDL__RESCUE_NS. What polite ones have begun they end. */
SPDL__PRIVATE void spdl__rescue(spdl_pipeline *p, bool hurry) {
    if (hurry) p->hurried_ns = spdl_time_ns();
    if (spdl__exchange32(&p->hurry, hurry) != hurry) spdl__wake_all(p); /* others' turn */
}

/* Whether the polite workers, all together, have been on the run queues for that long since this
   was asked last, or the system does not say. *before: what they had been, 0 at first. */
SPDL__PRIVATE bool spdl__rescue_due(const spdl_pipeline *p, uint64_t *before) {
    const uint64_t last = *before;
    uint64_t ns;
    int i;
    *before = 1;
    for (i = 0; i < p->group[0].workers; ++i) {
        spdl__os_thread_times(&p->group[0].pool->worker[i].thread, NULL, NULL, &ns);
        if (ns == SPDL__NEVER) return true;
        *before += ns;
    }
    return last != 0 && *before - last >= SPDL__STARVED_NS / 2;
}

/* After a take: wakes a worker for the last row. With a large buffer only when no more than half of
   it is filled or under way (the low watermark; not where the producer may be the trainer). Waking
   may take the processor away from us. */
SPDL__PRIVATE void spdl__sink_hint(spdl_pipeline *p) {
    const spdl__node *last = p->last;
    const spdl__edge *sink = p->sink;
    uint64_t since, there;
    spdl__barrier_after_rmw();
    if (spdl__load_relaxed32(p->sleepers) == 0) return;
    there = spdl__claim_position(last, spdl__load(last->word)) -
            spdl__load_relaxed(&sink->refunds) - spdl__head(spdl__load_relaxed(&sink->word)) +
            spdl__load_relaxed(&sink->dropped);
    if (p->feed == NULL && sink->buffer_size >= SPDL__WATERMARK_BUFFER &&
        2 * there > sink->buffer_size + (uint64_t)spdl__load_relaxed32(&last->limit))
        return;
    since = spdl_time_ns();
    spdl__wake_look(p, last, (uint32_t)1 << last->index, NULL);
    spdl__count(&p->ready_ns, spdl_time_ns() - since);
}

/* With a feed: the trainer takes an answer. How long that took since the push goes to the feed's
   row, which makes no calls. */
SPDL__PRIVATE void spdl__sink_answer(spdl_pipeline *p, const spdl__slot *item, uint64_t now) {
    spdl__counters *counters = &p->feed->counters[p->workers];
    const uint64_t ns = spdl__range_age(p->last_item.range, now);
    spdl__counters_time(counters, 1, ns, ns);
    spdl__count(&p->answer_wait_ns, spdl__min(ns, spdl__slot_age(item, now)));
}

/* The trainer: for how long it has been on a run queue since the first item. */
SPDL__COLD void spdl__taker_look(spdl_pipeline *p) {
    uint64_t queued;
    spdl__os_thread_times(NULL, NULL, NULL, &queued);
    if (queued != SPDL__NEVER && p->taker_queued_ns != SPDL__NEVER)
        spdl__store_relaxed(&p->trainer_runnable_ns, spdl__grown(p->taker_queued_ns, queued));
}

/* Something was read from the sink. The clock is read when that begins or ends something: it costs
   more than the rest. */
SPDL__PRIVATE void spdl__sink_taken(spdl_pipeline *p, const spdl__cursor *c,
                                    const spdl__slot *item) {
    const spdl__edge *sink = p->sink;
    const uint64_t waits = spdl__load_relaxed(&p->wait_since);
    const bool timed =
        !SPDL__NO_STATS && (p->delivered == 0 || p->feed != NULL ||
                            spdl__load_relaxed(&sink->gap_since) != 0 ||
                            spdl__load_relaxed(&sink->wait_since) != 0 || waits != 0 ||
                            !spdl__edge_ready(sink, c->head) ||
                            spdl__edge_ready(sink, c->head + sink->buffer_size - 1));
    const uint64_t now = timed || p->tuner != NULL || p->hurry ? spdl_time_ns() : 0;
    if (item != NULL && waits != 0 && now > waits) /* it lay there before we came to look */
        spdl__count(&p->ready_ns, spdl__min(now - waits, spdl__slot_age(item, now)));
    if (item != NULL && p->feed != NULL && timed) spdl__sink_answer(p, item, now);
    (void)spdl__cursor_store(c, now);
    if (item != NULL && p->delivered == 0) {
        spdl__store_relaxed(&p->first_wait_ns, spdl__gap_sum(&p->wait_since, &p->wait_ns, now));
        spdl__store_relaxed(&p->first_item_ns, now - p->start_ns);
        spdl__os_thread_times(NULL, NULL, NULL, &p->taker_queued_ns);
        spdl__store(&p->taker, spdl__os_thread_id());
    }
    spdl__count(&p->delivered, item != NULL);
    if (p->reporter != NULL && p->delivered % SPDL__TAKER_ITEMS == 0) spdl__taker_look(p);
    if (p->hurry && now - p->hurried_ns > SPDL__RESCUE_NS) spdl__rescue(p, false);
    spdl__sink_hint(p);
    if (p->tuner != NULL && item != NULL && (p->doctor == NULL || spdl__doctor_is_done(p->doctor)))
        spdl__tune(p, now);
}

/* Takes the next item if there is one: SPDL_OK, SPDL_EMPTY, or how it ended. */
SPDL__PRIVATE spdl_result spdl__sink_take(spdl_pipeline *p, void **item) {
    /* the stop is looked at before the items: what was put before it is still handed out */
    const bool halted = spdl__load32(&p->stopping) != 0;
    spdl__cursor c = spdl__cursor_at_head(p->sink);
    const spdl__slot *slot = NULL;
    spdl_result result = SPDL_EMPTY;
    spdl__peek peek;
    uint64_t now;
    if (p->closed_returned) return SPDL_CLOSED;
    peek = spdl__cursor_look(&c);
    if (peek == SPDL__PEEK_ITEM) {
        slot = spdl__edge_slot(p->sink, c.head);
        p->last_item = spdl__cursor_take(&c);
        memcpy(item, &p->last_item.item, sizeof(*item)); /* *item may be any object pointer */
        result = SPDL_OK;
    } else if (peek == SPDL__PEEK_EPOCH_END) {
        spdl__cursor_pass_epoch_end(&c);
        result = SPDL_END;
    }
    if (result != SPDL_EMPTY || c.head != c.from) spdl__sink_taken(p, &c, slot);
    if (result != SPDL_EMPTY || (c.head < c.end && !halted)) return result;
    now = spdl_time_ns();
    spdl__edge_ended(p->sink, now);
    if (p->ended_ns == 0) spdl__store_relaxed(&p->ended_ns, now);
    p->closed_returned = c.head < c.end;
    if (p->closed_returned) return SPDL_CLOSED;
    if (spdl__load32(&p->failed)) return p->error.result;
    spdl__failures_log(p);
    return SPDL_END;
}

/* What was taken so far from the edge in front of a branch and from those between it and its merge:
   grows with every item, of a list too. */
SPDL__PRIVATE uint64_t spdl__starve_taken(const spdl__node *merge) {
    const spdl__node *node = merge->begin;
    const spdl__edge *edge = node->in;
    uint64_t sum = 0;
    for (; node < merge; edge = &(++node)->out)
        sum += 2 * spdl__head(spdl__load(&edge->word)) + spdl__load(&edge->shift);
    return sum;
}

/* Whether this merge waits for ever: it does not want the item that it has room for, the branch has
   an input and may not route it, as so many results wait already, and none of the rows from there
   to here has a call inside, or work. They are looked at in the order of the data: those before the
   one looked at rest, so nothing more comes to it; room comes when something is taken, and as the
   sum stays nothing was. The room after the merge comes without that, and goes when a step of the
   merge puts what it took before the first sum: it is looked at when no step runs, and before the
   merge's work is. */
SPDL__PRIVATE bool spdl__starve_at(const spdl_pipeline *p, const spdl__node *merge) {
    const uint64_t passed = spdl__starve_taken(merge);
    const spdl__node *node = merge->begin;
    const uint64_t at_branch = spdl__load(node->word);
    if (!spdl__edge_ready(node->in, spdl__head(at_branch)) || spdl__claim_room(p, node, at_branch))
        return false;
    for (; node <= merge; ++node) {
        const uint64_t word = spdl__load(node->word);
        if ((word & SPDL__ACTIVE) != 0 || (node == merge && !spdl__claim_room(p, merge, 0)) ||
            spdl__claim_has_work(p, node, word))
            return false;
        SPDL_TEST_POINT("starve looked");
    }
    return spdl__merge_look(p, merge, false).items > 0 && spdl__starve_taken(merge) == passed;
}

/* The first merge that starves, or NULL. */
SPDL__PRIVATE spdl__node *spdl__starve_find(const spdl_pipeline *p) {
    int i;
    for (i = 0; i < p->count; ++i)
        if (p->node[i].row.kind == SPDL_KIND_MERGE && &p->node[i] != p->mix &&
            spdl__starve_at(p, &p->node[i]))
            return &p->node[i];
    return NULL;
}

/* The trainer is about to sleep: what starves now does so for good, and is a failure. Of a merge in
   a path of another it is the inner one: that may have come to rest after it was looked at, and is
   looked at again when all of it rests. */
SPDL__PRIVATE void spdl__starve_fail(spdl_pipeline *p) {
    char text[SPDL_TEXT_BYTES / 2];
    spdl__node *node = spdl__starve_find(p);
    uint64_t tail;
    int turn;
    if (node != NULL) node = spdl__starve_find(p);
    if (node == NULL) return;
    tail = spdl__load_relaxed(&node->out.tail);
    turn = (int)spdl__load_relaxed32(&node->turn);
    /* a row that has stopped or failed has no work either: that is seen by now */
    if (spdl__load32(&p->failed) || spdl__load32(&p->stopping)) return;
    if (node->row.merge_order == SPDL_MERGE_CHOICE)
        (void)snprintf(text, sizeof(text),
                       "starved: merge_fn waits, but nothing comes before something is taken");
    else
        (void)snprintf(text, sizeof(text),
                       "starved: it waits for path %d '%s', which gets nothing while another is "
                       "full (see .buffer_size of SPDL_BRANCH)",
                       turn, p->node[node->begin->path[turn]].name);
    spdl__call_fatal(p, node, tail, tail, SPDL_E_INVALID, text);
}

/* From here on, or no longer, whatever takes or puts looks whether this thread waits. */
SPDL__PRIVATE void spdl__waiter_add(spdl_pipeline *p, uint32_t count) {
    int i;
    for (i = 0; i < p->groups; ++i)
        if (p->group[i].pool != NULL) spdl__add32(&p->group[i].pool->sleepers, count);
}

/* Sleeps until something is put into the sink, or with workers = 0 until something can be run. A
   put, take or leave that comes later is followed by a full barrier and a look at `waiting`; what
   was put before is seen here, after the barrier. */
SPDL__PRIVATE spdl_result spdl__next_sleep(spdl_pipeline *p, void **item, uint64_t deadline,
                                           bool *late) {
    const uint32_t word = spdl__load32(&p->fed.word);
    spdl_result result;
    (void)spdl__exchange32(&p->waiting, 1);
    spdl__full_barrier();
    /* what the watermark has passed over */
    spdl__wake_rows(p, (uint32_t)1 << p->last->index);
    result = spdl__sink_take(p, item);
    SPDL_TEST_POINT("trainer about to sleep");
    if (result == SPDL_EMPTY &&
        !(p->group[0].pool == NULL && spdl__claim_group_runnable(&p->group[0], 0))) {
        if (spdl__pipeline_forked(p)) {
            result = SPDL_E_INVALID;
        } else {
            if (p->may_starve) spdl__starve_fail(p);
            *late = spdl__os_event_sleep(&p->fed, word, deadline) == SPDL_TIMEOUT;
            result = spdl__sink_take(p, item);
        }
    }
    spdl__store32(&p->waiting, 0);
    return result;
}

/* With workers = 0: runs stages on this thread until there is a result. */
SPDL__PRIVATE spdl_result spdl__next_inline(spdl_pipeline *p, void **item, uint64_t deadline) {
    spdl_result result = SPDL_EMPTY;
    bool late = false;
    spdl__store(&p->trainer, spdl__os_thread_id());
    while (result == SPDL_EMPTY && !late) {
        const bool done = spdl__step(&p->group[0], 0);
        result = spdl__sink_take(p, item);
        if (result == SPDL_EMPTY && !done) result = spdl__next_sleep(p, item, deadline, &late);
        if (deadline != SPDL__NEVER && spdl_time_ns() >= deadline) late = true;
    }
    spdl__store(&p->trainer, 0);
    return result == SPDL_EMPTY ? SPDL_TIMEOUT : result;
}

/* Looks again a few times, then sleeps until there is a result. */
SPDL__PRIVATE spdl_result spdl__next_wait(spdl_pipeline *p, void **item, uint64_t deadline) {
    spdl_result result = SPDL_EMPTY;
    uint64_t queued = 0;
    bool late = false, slept = false, booked = false;
    int round = 0;
    while (result == SPDL_EMPTY && spdl__backoff(&round, SPDL__IDLE_YIELDS)) {
        result = spdl__sink_take(p, item);
        if (round < SPDL_SPINS || booked || result != SPDL_EMPTY) continue;
        spdl__blame_begin(p, p->wait_since); /* shorter waits are not worth it */
        booked = true;
    }
    if (result == SPDL_EMPTY) {
        slept = true;
        spdl__waiter_add(p, SPDL__WAITER);
    }
    while (result == SPDL_EMPTY && !late) {
        const bool rescues = p->rescue != NULL && !p->hurry;
        const uint64_t until = rescues || p->may_starve
                                   ? spdl__min(deadline, spdl_time_ns() + SPDL__STARVED_NS)
                                   : deadline;
        result = spdl__next_sleep(p, item, until, &late);
        if (!late || until == deadline || SPDL__NO_SLEEP) continue;
        late = false;
        if (rescues && spdl__rescue_due(p, &queued)) spdl__rescue(p, true);
    }
    if (slept) spdl__waiter_add(p, (uint32_t)0 - SPDL__WAITER);
    if (booked) spdl__blame_mark(p, true);
    return result == SPDL_EMPTY ? SPDL_TIMEOUT : result;
}

SPDL_API spdl_result spdl_pipeline_next(spdl_pipeline *p, void **item, int64_t timeout_ns) {
    spdl_result result;
    if (p == NULL || item == NULL) return SPDL_E_INVALID;
    if (spdl__exchange32(&p->trainer_inside, 1) != 0) return SPDL_E_INVALID;
    if (SPDL__UNLIKELY(p->doctor != NULL)) spdl__doctor_comes(p->doctor);
    result = spdl__sink_take(p, item);
    if (result == SPDL_EMPTY && timeout_ns == 0 && p->group[0].pool != NULL) {
        spdl__full_barrier(); /* instead of a sleep: what the watermark has passed over */
        spdl__wake_rows(p, (uint32_t)1 << p->last->index);
        if (p->may_starve) spdl__starve_fail(p);
        result = SPDL_TIMEOUT;
    } else if (result == SPDL_EMPTY) {
        const uint64_t deadline = spdl__deadline(timeout_ns), since = spdl_time_ns();
        const uint64_t waited_for = p->delivered;
        spdl__store_relaxed(&p->wait_since, since);
        SPDL__PROBE(next_wait_begin, p->last->name, p->delivered);
        spdl__profile(&p->profiler, SPDL_EVENT_WAIT_BEGIN, "next", waited_for);
        result = p->group[0].pool == NULL ? spdl__next_inline(p, item, deadline)
                                         : spdl__next_wait(p, item, deadline);
        spdl__profile(&p->profiler, SPDL_EVENT_WAIT_END, "next", waited_for);
        SPDL__PROBE(next_wait_end, p->last->name, p->delivered);
        if (SPDL__TRACED(p->trace))
            spdl__trace_add(&p->trace->track[p->workers], SPDL__RECORD_NEXT, p->count - 1,
                            (int)result, since, spdl_time_ns(), p->delivered - (result == SPDL_OK));
        spdl__store_relaxed(&p->wait_since, 0);
        spdl__store(&p->wait_ns, p->wait_ns + (spdl_time_ns() - since)); /* pairs with gap_sum */
    }
    if (SPDL__UNLIKELY(p->doctor != NULL)) spdl__doctor_leaves(p->doctor, result == SPDL_OK);
    spdl__store32(&p->trainer_inside, 0);
    return result;
}

SPDL_API spdl_result spdl_pipeline_next_fn(void *pipeline, void **item, int64_t timeout_ns) {
    return spdl_pipeline_next((spdl_pipeline *)pipeline, item, timeout_ns);
}

SPDL_API bool spdl_pipeline_failed(const spdl_pipeline *p) { return spdl__load32(&p->failed) != 0; }

SPDL_API uint32_t spdl_pipeline_failed_stages(const spdl_pipeline *p) {
    return spdl__load32(&p->failed);
}

SPDL_API const spdl_error *spdl_pipeline_error(const spdl_pipeline *p) { return &p->error; }

/* --- the producer --- */

SPDL__PRIVATE spdl_result spdl__push_try(spdl_pipeline *p, void *item) {
    spdl__node *feed = p->feed;
    const uint64_t number = feed->made;
    spdl__item what;
    uint64_t now;
    if (spdl__load32(&feed->ended) || spdl__load32(&feed->closed) || spdl__load32(&p->stopping))
        return SPDL_CLOSED;
    if (feed->out.tail >= spdl__edge_until(&feed->out, feed->out.buffer_size, false))
        return SPDL_FULL;
    now = SPDL__NO_STATS ? 0 : spdl_time_ns();
    what.item = item;
    what.origin = spdl__origin(number, (unsigned)feed->index);
    what.range = now >> SPDL__PUSHED_BITS << SPDL__SPAN_BITS;
    spdl__store_relaxed(&feed->made, number + 1);
    spdl__count(&feed->counters[0].tasks, 1);
    spdl__count(&feed->counters[0].made, 1);
    spdl__put(feed, &feed->out, 0, &what, now);
    spdl__wake_changed(p, feed);
    return SPDL_OK;
}

/* Takes the place of the reader for a moment, unless it is at work: then there is room soon. */
SPDL__PRIVATE void spdl__push_drop_oldest(spdl_pipeline *p) {
    spdl__node *feed = p->feed, *reader = feed + 1;
    spdl__item got = { NULL, 0, 0 };
    spdl__cursor c;
    spdl__sitting s;
    s.node = reader;
    s.inside = false;
    s.word = spdl__load(reader->word);
    /* a row that calls nothing is not to be entered while it works */
    if ((s.word & SPDL__FLAGS) != 0 ||
        ((s.word & SPDL__ACTIVE) != 0 && !spdl__row_calls(&reader->row)) || !spdl__claim_hold(&s)) {
        spdl__os_yield();
        return;
    }
    c = spdl__cursor_at_head(&feed->out);
    if (spdl__cursor_look(&c) == SPDL__PEEK_ITEM) {
        got = spdl__cursor_take(&c);
        --c.shift; /* the reader's results have no place for it */
        spdl__count(&feed->counters[0].skips, 1);
    }
    (void)spdl__cursor_settle(&c, 0);
    (void)spdl__claim_move(p, reader, ((c.head - c.from) << SPDL__HEAD_BITS) - SPDL__HELD - 1);
    spdl__wake_changed(p, reader);            /* a worker that found the word held may sleep */
    spdl__item_free(p, got.item, got.origin); /* user code */
}

/* Sleeps until there is room, or the deadline has passed. */
SPDL__PRIVATE spdl_result spdl__push_wait(spdl_pipeline *p, void *item, uint64_t deadline) {
    spdl_result result = SPDL_FULL;
    bool late = false;
    int round = 0;
    while (result == SPDL_FULL && spdl__backoff(&round, SPDL__IDLE_YIELDS))
        result = spdl__push_try(p, item);
    if (result != SPDL_FULL) return result;
    spdl__waiter_add(p, SPDL__WAITER);
    while (result == SPDL_FULL && !late) {
        const uint32_t word = spdl__load32(&p->room.word);
        (void)spdl__exchange32(&p->producer_waits, 1);
        spdl__full_barrier(); /* pairs with those after the takes */
        result = spdl__push_try(p, item);
        if (result != SPDL_FULL) break;
        if (spdl__pipeline_forked(p)) {
            result = SPDL_E_INVALID;
        } else {
            late = spdl__os_event_sleep(&p->room, word, deadline) == SPDL_TIMEOUT;
            result = spdl__push_try(p, item);
        }
    }
    spdl__store32(&p->producer_waits, 0);
    spdl__waiter_add(p, (uint32_t)0 - SPDL__WAITER);
    return result == SPDL_FULL ? SPDL_TIMEOUT : result;
}

#define SPDL__DROP_TRIES 16

SPDL_API spdl_result spdl_pipeline_push(spdl_pipeline *p, void *item, int64_t timeout_ns) {
    spdl_result result;
    int tries;
    if (p == NULL || p->feed == NULL) return SPDL_E_INVALID;
    if (spdl__exchange32(&p->producer_inside, 1) != 0) return SPDL_E_INVALID;
    result = spdl__push_try(p, item);
    if (p->feed->row.drop_oldest) {
        for (tries = 0; result == SPDL_FULL && tries < SPDL__DROP_TRIES; ++tries) {
            spdl__push_drop_oldest(p);
            result = spdl__push_try(p, item);
        }
    } else if (result == SPDL_FULL && timeout_ns != 0) {
        result = spdl__push_wait(p, item, spdl__deadline(timeout_ns));
    }
    spdl__store32(&p->producer_inside, 0);
    return result;
}

SPDL_API spdl_result spdl_pipeline_push_end(spdl_pipeline *p) {
    if (p == NULL || p->feed == NULL) return SPDL_E_INVALID;
    if (spdl__exchange32(&p->producer_inside, 1) != 0) return SPDL_E_INVALID;
    spdl__store32(&p->feed->ended, 1);
    spdl__put_end(p, &p->feed->out, spdl__load(&p->feed->out.tail));
    spdl__wake_changed(p, p->feed);
    spdl__store32(&p->producer_inside, 0);
    return SPDL_OK;
}

/* ============================================================================================= */
/* >>stop-impl
   Changes while a pipeline runs, its stop and its destruction. Any thread may stop: the flags let
   nobody enter a row any more, the calls inside end, and the thread that waited for them frees what
   nobody can take. The owner destroys. */

#ifndef SPDL__DESTROY_WARN_NS
#define SPDL__DESTROY_WARN_NS SPDL_SECONDS(5) /* then destroy reports what it waits for */
#endif

SPDL_API int spdl_pipeline_find(const spdl_pipeline *p, const char *name) {
    int i;
    for (i = 0; name != NULL && i < p->count; ++i)
        if (strcmp(p->node[i].name, name) == 0) return i;
    return -1;
}

SPDL_API spdl_result spdl_pipeline_set_concurrency(spdl_pipeline *p, int stage, int concurrency) {
    if (p == NULL || stage < 0 || stage >= p->count) return SPDL_E_INVALID;
    if (p->node[stage].row.kind != SPDL_KIND_PIPE) return SPDL_E_INVALID;
    if (concurrency < 1 || concurrency > p->node[stage].row.max_concurrency) return SPDL_E_LIMIT;
    spdl__store32(&p->node[stage].limit, (uint32_t)concurrency);
    spdl__wake_changed(p, &p->node[stage]);
    return SPDL_OK;
}

/* Whether this thread runs a call, or settles a deferred one (a free_item or log_fn that stops): to
   wait for the calls that run would be to wait for itself. */
SPDL__PRIVATE bool spdl__pipeline_inside(const spdl_pipeline *p) {
    const uint64_t thread = spdl__os_thread_id();
    int i, k;
    for (i = 0; i < p->groups; ++i)
        if (p->group[i].pool != NULL && spdl__pool_is_worker(p->group[i].pool)) return true;
    for (i = 0; i < p->count; ++i)
        for (k = 0; p->node[i].deferred != NULL && k < p->node[i].row.max_concurrency; ++k)
            if (spdl__load_relaxed(&p->node[i].deferred[k].thread) == thread) return true;
    return p->group[0].pool == NULL && spdl__load(&p->trainer) == thread;
}

/* Destroy, after halt: whether this row is a source on a thread of its own that is in a call, which
   is abandoned by that. A thread that is not in the call leaves soon. A next function keeps to its
   timeout: it is abandoned only when it was waited for (`long_ago`). */
SPDL__PRIVATE bool spdl__pipeline_abandon(spdl_pipeline *p, spdl__node *node, bool long_ago) {
    uint32_t calling = 1;
    if (spdl__load_relaxed32(&node->group->abandoned)) return true;
    if (node->row.next != NULL && !long_ago) return false;
    if (!spdl__cas32(&node->calling, &calling, SPDL__ABANDONED)) return false;
    spdl__store32(&node->group->abandoned, 1);
    ++p->references;
    return true;
}

/* After halt: waits until no call is inside of a row. With `leave` those of sources on threads of
   their own are abandoned. */
SPDL__PRIVATE spdl_result spdl__pipeline_await_quiet(spdl_pipeline *p, uint64_t deadline,
                                                     bool leave) {
    spdl_result slept = SPDL_OK;
    int i = 0;
    while (i < p->count) {
        const uint32_t word = spdl__load32(&p->quiet.word);
        spdl__again_drop_all(p);
        if ((spdl__load(p->node[i].word) & SPDL__ACTIVE) == 0 || /* pairs with claim_move */
            (leave && spdl__pipeline_abandon(p, &p->node[i], deadline == SPDL__NEVER))) {
            ++i;
        } else {
            if (slept == SPDL_TIMEOUT) return SPDL_TIMEOUT;
            slept = spdl__os_event_sleep(&p->quiet, word, deadline);
        }
    }
    return SPDL_OK;
}

/* Frees what a slot holds; how many items that were. */
SPDL__PRIVATE size_t spdl__slot_purge(spdl_pipeline *p, spdl__slot *slot) {
    const uint64_t origin = slot->origin;
    void *item = slot->item;
    spdl__store_relaxed(&slot->origin, spdl__origin(0, SPDL__DROPPED));
    if (spdl__origin_tag(origin) == SPDL__LIST) return spdl__list_drop(p, (spdl__list *)item);
    if (spdl__origin_tag(origin) > SPDL__LIST) return 0;
    spdl__item_free(p, item, origin);
    return 1;
}

/* The pipeline is quiet: frees what nobody can take any more, open batches and all edges except the
   last `keep`. If another stop is at it, or this is a stop inside a free_item, that one does it. */
SPDL__PRIVATE void spdl__pipeline_purge(spdl_pipeline *p, int keep) {
    int i;
    if (!spdl__try_lock(&p->purge_lock)) return;
    for (i = 0; i < p->count; ++i) {
        spdl__node *node = &p->node[i];
        spdl__counters *counters = &node->counters[p->workers];
        uint64_t ticket = spdl__head(spdl__load(&node->out.word));
        const uint64_t end = i < p->count - keep ? ticket + node->out.mask + 1 : ticket;
        spdl__batch *open_batch = node->open_batch;
        node->open_batch = NULL;
        if (open_batch != NULL) spdl__add(&counters->freed, open_batch->shown.count);
        if (node->place == NULL) spdl_batch_free(open_batch);
        while (node->place != NULL) { /* one of them is open_batch */
            spdl__batch *batch = node->place;
            node->place = batch->next;
            spdl_batch_free(batch);
        }
        for (; ticket < end; ++ticket)
            if (spdl__edge_ready(&node->out, ticket))
                spdl__add(&counters->freed,
                          spdl__slot_purge(p, spdl__edge_slot(&node->out, ticket)));
    }
    spdl__spin_unlock(&p->purge_lock);
}

/* No worker enters a row any more, and those inside take no further item. */
SPDL__PRIVATE void spdl__pipeline_halt(spdl_pipeline *p) {
    int i;
    spdl__store32(&p->stopping, 1);
    for (i = 0; i < p->count; ++i) (void)spdl__or(p->node[i].word, SPDL__STOPPED);
    spdl__full_barrier();
    spdl__wake_trainer(p);
    spdl__wake_producer(p);
}

SPDL_API void spdl_stop(spdl_task *task) { spdl__pipeline_halt(task->pipeline); }

/* A stop waits until a rewind is over. One in a free_item that the rewind calls does not: that
   drops everything anyway. */
SPDL__PRIVATE spdl_result spdl__pipeline_await_rewind(spdl_pipeline *p, uint64_t deadline) {
    spdl_result slept = SPDL_OK;
    for (;;) {
        const uint32_t word = spdl__load32(&p->quiet.word);
        const uint64_t rewinder = spdl__load(&p->rewinder);
        if (rewinder == 0) return SPDL_OK;
        if (rewinder == spdl__os_thread_id()) return SPDL_E_INVALID;
        if (slept == SPDL_TIMEOUT) return SPDL_TIMEOUT;
        slept = spdl__os_event_sleep(&p->quiet, word, deadline);
    }
}

SPDL_API spdl_result spdl_pipeline_stop(spdl_pipeline *p, int64_t timeout_ns) {
    const uint64_t deadline = spdl__deadline(timeout_ns);
    spdl_result result;
    if (p == NULL || spdl__pipeline_forked(p)) return SPDL_E_INVALID;
    if (spdl__pipeline_inside(p)) {
        spdl__pipeline_halt(p);
        return SPDL_OK;
    }
    spdl__add32(&p->stops, 1); /* pairs with rewind: one of both sees the other */
    spdl__full_barrier();
    result = spdl__pipeline_await_rewind(p, deadline);
    if (result == SPDL_OK) {
        spdl__pipeline_halt(p);
        result = spdl__pipeline_await_quiet(p, deadline, false);
        if (result != SPDL_OK && timeout_ns != 0) spdl__store32(&p->late, 1);
    }
    if (result == SPDL_OK) {
        spdl__pipeline_purge(p, 1);
        spdl__failures_log(p);
    }
    spdl__sub32(&p->stops, 1);
    spdl__os_event_wake(&p->quiet, SPDL__ALL);
    return result;
}

/* Each worker runs its fini on its own thread. */
SPDL__PRIVATE void spdl__pipeline_part_all(spdl_pipeline *p) {
    int i;
    spdl__store32(&p->leaving, 1);
    spdl__full_barrier(); /* pairs with that in pool_park: a worker is asleep, or will see it */
    if (p->group[0].pool == NULL && p->inits != NULL && p->inits[0] != UINT8_MAX)
        spdl__step_fini(p, &p->group[0], 0);
    for (i = 0; i < p->groups; ++i)
        if (p->group[i].pool != NULL) spdl__pool_wake_all(p->group[i].pool);
    for (;;) {
        const uint32_t word = spdl__load32(&p->quiet.word);
        if (spdl__load32(&p->left) + p->references - 1 ==
            (uint64_t)(p->workers - p->group[0].guests))
            return;
        (void)spdl__os_event_sleep(&p->quiet, word, SPDL__NEVER);
    }
}

/* No guest can be inside any more: the fini of their places. */
SPDL__PRIVATE void spdl__pipeline_part_guests(spdl_pipeline *p) {
    const spdl__group *group = &p->group[0];
    int i;
    for (i = group->workers - group->guests; p->has_hooks && i < group->workers; ++i)
        spdl__step_fini(p, group, i);
}

/* With SPDL_DEBUG: the items that nobody has freed, those in batches included. */
SPDL__COLD void spdl__unfreed_log(const spdl_pipeline *p) {
    int i, k;
    for (i = 0; i < p->count; ++i) {
        uint64_t items = spdl__load_relaxed(&p->node[i].unfreed);
        for (k = 0; k < p->count; ++k)
            if (p->node[k].batches != NULL)
                items += spdl__load_relaxed(&p->node[k].batches->unfreed[i]);
        if (items > 0)
            spdl__logf(&p->logger, SPDL_LOG_WARN,
                       "spdl: %llu items of stage %d '%s' were freed by nobody: its row has no "
                       "free_item", (spdl__llu)items, i, p->node[i].name);
    }
}

/* Frees whatever create has made so far. */
SPDL__PRIVATE void spdl__pipeline_release(spdl_pipeline *p) {
    const spdl_allocator allocator = p->allocator;
    const size_t workers = (size_t)p->workers;
    int i;
    for (i = 0; p->group != NULL && i < p->groups; ++i)
        if (p->group[i].own_pool) spdl__pool_release(p->group[i].pool);
    spdl__doctor_free(p);
#ifndef SPDL_NO_REPORT
    spdl__trace_free(p);
#endif
    for (i = 0; p->task != NULL && i < p->workers; ++i)
        (void)spdl__os_file_close(p->task[i].meter.file);
    for (i = 0; p->node != NULL && i < p->count; ++i) {
        spdl__node *node = &p->node[i];
        if (node->batches != NULL) spdl__batch_pool_drop(node->batches, NULL);
        if (node->buffers != NULL) spdl__batch_pool_drop(node->buffers, NULL);
        spdl__freelist_release(&node->freelist);
        spdl__free(&allocator, node->out.slots, (size_t)(node->out.mask + 1) * sizeof(spdl__slot));
        spdl__free(&allocator, node->counters, (workers + 1) * sizeof(*node->counters));
        spdl__free(&allocator, node->deferred,
                   (size_t)node->row.max_concurrency * sizeof(*node->deferred));
        spdl__free(&allocator, node->again,
                   (size_t)node->row.max_concurrency * sizeof(*node->again));
        spdl__free(&allocator, node->settled,
                   (size_t)(node->settled_mask + 1) * sizeof(*node->settled));
    }
    spdl__free(&allocator, p->node, (size_t)p->count * sizeof(*p->node));
    spdl__free(&allocator, p->group, (size_t)p->groups * sizeof(*p->group));
    spdl__free(&allocator, p->task, workers * sizeof(*p->task));
    spdl__free(&allocator, p->split, workers * SPDL_MAX_STAGES * sizeof(*p->split));
    spdl__free(&allocator, p->local, workers * (size_t)p->count * sizeof(*p->local));
    spdl__free(&allocator, p->inits, workers);
    spdl__free(&allocator, p->tuner, sizeof(*p->tuner));
    spdl__os_event_fini(&p->fed);
    spdl__os_event_fini(&p->quiet);
    spdl__os_event_fini(&p->room);
    spdl__free(&allocator, p, sizeof(*p));
}

/* Quiet and purged: the edge is empty, at the ticket its row will promise next, and what was in it
   counts as neither taken nor dropped. Room is as at the start. */
SPDL__PRIVATE void spdl__edge_rewind(spdl__node *node, uint64_t now) {
    spdl__edge *edge = &node->out;
    const uint64_t promised = spdl__claim_position(node, spdl__load(node->word));
    const uint64_t head = node->by_ticket ? promised : spdl__load_relaxed(&edge->tail);
    spdl__store(&edge->shift, edge->shift + spdl__head(spdl__load(&edge->word)) - head);
    spdl__store(&edge->refunds, promised - head + edge->dropped);
    spdl__store_relaxed(&edge->tail, head);
    spdl__store_relaxed(&edge->dry, 0);
    spdl__store(&edge->end, SPDL__OPEN);
    spdl__store_relaxed(&edge->ended_ns, 0);
    if (spdl__load_relaxed(&edge->gap_since) == 0) spdl__store_relaxed(&edge->gap_since, now);
    spdl__store(&edge->word, head << SPDL__HEAD_BITS | SPDL__STOPPED);
    node->first = head;
}

/* As create has left it. */
SPDL__PRIVATE void spdl__node_rewind(spdl__node *node, uint64_t sequence) {
    spdl__store_relaxed32(&node->flushed, 0);
    spdl__store_relaxed32(&node->turn, 0);
    spdl__store_relaxed(&node->taken, 0);
    spdl__store_relaxed(&node->refused, 0);
    spdl__store_relaxed(&node->oldest, node->begun);
    node->number = node->range = 0;
    spdl__store_relaxed(&node->epoch, 0);
    spdl__store_relaxed(&node->made, sequence);
    node->made_all = sequence;
    node->dropped = node->in != NULL ? node->in->dropped : 0;
    node->place_epoch = node->place_dropped = 0;
    spdl__store32(&node->closed, 0);
    spdl__store32(&node->ended, 0);
    spdl__store(&node->cut, SPDL__OPEN);
    spdl__store_relaxed(&node->calls, 0);
    spdl__store_relaxed(&node->failures, 0);
}

/* Nobody enters a row, and no end of the pipeline is in use: everything starts again. */
SPDL__PRIVATE void spdl__pipeline_restart(spdl_pipeline *p, uint64_t sequence) {
    const uint64_t now = spdl_time_ns();
    int i;
    spdl__pipeline_purge(p, 0);
    for (i = 0; i < p->count; ++i) spdl__edge_rewind(&p->node[i], now);
    for (i = 0; i < p->count; ++i) spdl__node_rewind(&p->node[i], sequence);
    spdl__store32(&p->failed, 0);
    spdl__store32(&p->late, 0);
    spdl__error_clear(&p->error);
    p->closed_returned = false;
    memset(&p->last_item, 0, sizeof(p->last_item));
    spdl__store_relaxed(&p->ended_ns, 0);
    spdl__store32(&p->stopping, 0);
    for (i = 0; i < p->count; ++i) { /* the flags of words go */
        spdl__node *node = &p->node[i];
        spdl__store(&node->out.word, spdl__head(spdl__load(&node->out.word)) << SPDL__HEAD_BITS);
        spdl__store(&node->own, spdl__head(spdl__load(&node->own)) << SPDL__HEAD_BITS);
    }
    spdl__wake_all(p);
}

/* Before the first call: waits for every init, of the trainer's thread here. */
SPDL__PRIVATE spdl_result spdl__pipeline_await_open(spdl_pipeline *p, uint64_t deadline) {
    if (!spdl__load32(&p->open) && p->group[0].pool == NULL && p->inits[0] == 0)
        spdl__step_init(p, &p->group[0], 0);
    while (!spdl__load32(&p->open)) {
        const uint64_t now = spdl_time_ns();
        if (spdl__load32(&p->failed)) return p->error.result;
        if (now >= deadline) return SPDL_TIMEOUT;
        (void)spdl__os_event_sleep(&p->quiet, spdl__load32(&p->quiet.word),
                                   spdl__min(deadline, now + 1000000));
    }
    return SPDL_OK;
}

/* This thread is the rewinder as soon as no other thread is in stop; one that comes later waits. */
SPDL__PRIVATE spdl_result spdl__pipeline_await_stops(spdl_pipeline *p, uint64_t deadline) {
    spdl_result slept = SPDL_OK;
    for (;;) {
        uint32_t word;
        spdl__store(&p->rewinder, spdl__os_thread_id());
        spdl__full_barrier(); /* pairs with stop */
        if (spdl__load32(&p->stops) == 0) return SPDL_OK;
        spdl__store(&p->rewinder, 0);
        spdl__os_event_wake(&p->quiet, SPDL__ALL);
        word = spdl__load32(&p->quiet.word);
        if (slept == SPDL_TIMEOUT) return SPDL_TIMEOUT;
        if (spdl__load32(&p->stops) != 0) slept = spdl__os_event_sleep(&p->quiet, word, deadline);
    }
}

/* With both ends of the pipeline in hand. */
SPDL__PRIVATE spdl_result spdl__pipeline_again(spdl_pipeline *p, uint64_t sequence,
                                               uint64_t deadline) {
    spdl_result result = spdl__pipeline_await_open(p, deadline);
    if (result == SPDL_OK) result = spdl__pipeline_await_stops(p, deadline);
    if (result != SPDL_OK) return result;
    spdl__pipeline_halt(p);
    result = spdl__pipeline_await_quiet(p, deadline, false);
    if (result == SPDL_OK) spdl__pipeline_restart(p, sequence);
    spdl__store(&p->rewinder, 0);
    spdl__os_event_wake(&p->quiet, SPDL__ALL);
    return result;
}

SPDL_API spdl_result spdl_pipeline_rewind(spdl_pipeline *p, uint64_t sequence,
                                          int64_t timeout_ns) {
    spdl_result result = SPDL_E_INVALID;
    if (p == NULL || sequence >> (64 - SPDL__SPAN_BITS) != 0 || spdl__pipeline_forked(p) ||
        spdl__pipeline_inside(p) || spdl__load(&p->rewinder) != 0)
        return SPDL_E_INVALID;
    if (spdl__exchange32(&p->trainer_inside, 1) != 0) return SPDL_E_INVALID;
    if (p->feed == NULL || spdl__exchange32(&p->producer_inside, 1) == 0) {
        result = spdl__pipeline_again(p, sequence, spdl__deadline(timeout_ns));
        if (p->feed != NULL) spdl__store32(&p->producer_inside, 0);
    }
    spdl__store32(&p->trainer_inside, 0);
    return result;
}

/* A reference less. */
SPDL__PRIVATE void spdl__pipeline_drop(spdl_pipeline *p) {
    if (spdl__sub(&p->references, 1) == 1) spdl__pipeline_release(p);
}

/* The end of a thread that was abandoned. */
SPDL__PRIVATE void spdl__pipeline_leave(void *ctx) {
    const spdl__group *group = (const spdl__group *)ctx;
    spdl_pipeline *p = group->pipeline;
    if (p->has_hooks && p->inits[group->first] != UINT8_MAX)
        spdl__step_fini(p, group, group->first);
    spdl__pipeline_drop(p);
}

/* Destroy has waited for long: what for. */
SPDL__PRIVATE void spdl__pipeline_warn(spdl_pipeline *p) {
    int i;
    for (i = 0; i < p->count; ++i) {
        const spdl__node *node = &p->node[i];
        if ((spdl__load(node->word) & SPDL__ACTIVE) == 0 || node->group->abandoned) continue;
        spdl__logf(&p->logger, SPDL_LOG_WARN,
                   "spdl: spdl_pipeline_destroy %s a call of stage %d '%s' to return%s",
                   node->in == NULL && node->row.threads > 0 ? "no longer waits for" : "waits for",
                   i, node->name, node->row.deferred ? " and be completed" : "");
    }
}

SPDL_API void spdl_pipeline_destroy(spdl_pipeline *p) {
    int i;
    if (p == NULL || spdl__pipeline_forked(p)) return;
    if (spdl__pipeline_inside(p)) {
        spdl__log(&p->logger, SPDL_LOG_ERROR,
                  "spdl: spdl_pipeline_destroy: called on a worker of its pool, nothing was done");
        return;
    }
    spdl__doctor_close(p);
    spdl__pipeline_halt(p);
    if (spdl__pipeline_await_quiet(p, spdl__deadline(SPDL__DESTROY_WARN_NS),
                                   spdl__load32(&p->late) != 0) != SPDL_OK) {
        spdl__pipeline_warn(p);
        /* without threads nobody else can complete a call: nothing is freed that one may use */
        if (spdl__pipeline_await_quiet(p, SPDL__NEVER, true) != SPDL_OK) return;
    }
    if (p->has_hooks) spdl__pipeline_part_all(p);
    for (i = 0; i < p->groups; ++i)
        if (p->group[i].slot != NULL && !p->group[i].abandoned)
            spdl__pool_detach(p->group[i].pool, p->group[i].slot);
    spdl__pipeline_part_guests(p);
    while (spdl__load32(&p->completing) != 0) spdl__os_yield(); /* on its last steps */
    spdl__pipeline_purge(p, 0);
    spdl__doctor_empty(p);
    spdl__failures_log(p);
    if (SPDL__DEBUGS) spdl__unfreed_log(p);
    spdl__report_end(p);
#ifndef SPDL_NO_REPORT
    spdl__trace_close(p);
#endif
    for (i = 0; i < p->groups; ++i) {
        spdl__group *group = &p->group[i];
        if (group->abandoned) {
            spdl__pool_abandon(group->pool, spdl__pipeline_leave, group);
        } else if (group->own_pool) {
            spdl__pool_release(group->pool);
            group->own_pool = false;
        }
    }
    spdl__pipeline_drop(p);
}

/* ============================================================================================= */
/* >>create-impl
   How create checks the rows and builds nodes, edges and groups from them. All of it runs on the
   owner's thread. Create allocates everything, spdl__pipeline_release frees what is there. */

#define SPDL__MAX_SPARE 65536 /* batches of one row that are made ahead */
#define SPDL__ROUTED 32 /* results of a branch that may wait when the row does not say */

/* --- what the rows say --- */

/* What create works on. The arrays are written by plan_connect. */
typedef struct spdl__plan {
    const spdl_pipeline_desc *desc; /* its error is always set */
    const spdl_stage *rows;
    int count; /* rows, with the sink */
    int before[SPDL_MAX_STAGES + 1]; /* the row whose edge it reads; path: its branch; else -1 */
    uint32_t above[SPDL_MAX_STAGES + 1]; /* bit k: what row k makes can come here */
    int paths[SPDL_MAX_STAGES + 1];      /* branch and merge: how many */
    uint8_t path[SPDL_MAX_STAGES + 1][SPDL_MAX_STAGES]; /* and which rows they write, or read */
    int branch[SPDL_MAX_STAGES + 1]; /* the branch it is inside of; merge: that it ends; or -1. Of
                                        several sources that is row 0, the first of their paths */
    int merge[SPDL_MAX_STAGES + 1];  /* branch: where it ends */
    const spdl__doctor_plan *doctor; /* or NULL */
} spdl__plan;

SPDL__COLD const char *spdl__kind_name(spdl_kind kind) {
    static const char *const names[] = { "(none)", "source", "pipe",   "batch", "sink",
                                         "feed",   "branch", "path", "merge", "unbatch" };
    return (unsigned)kind <= SPDL_KIND_UNBATCH ? names[kind] : "(unknown)";
}

SPDL__COLD const char *spdl__row_name(const spdl_stage *row) {
    if (row->name != NULL) return row->name;
    if (row->next != NULL) return spdl__from.name;
    return row->fn != NULL && row->fn->name != NULL ? row->fn->name : spdl__kind_name(row->kind);
}

/* Where a row was written: "file:line". */
typedef struct spdl__place {
    char text[SPDL_TEXT_BYTES / 4];
} spdl__place;

SPDL__COLD spdl__place spdl__row_place(const spdl_stage *row) {
    const char *file = row->file != NULL ? row->file : "(unknown file)";
    spdl__place place;
    if (row->line > 0)
        (void)snprintf(place.text, sizeof(place.text), "%s:%d", file, row->line);
    else
        (void)snprintf(place.text, sizeof(place.text), "%s", file);
    return place;
}

/* "spdl: file:line: stage 2 'decode': ...", or for a type "... 'decode' takes ...". */
SPDL__COLD spdl_result spdl__row_blame(const spdl__plan *plan, int i, spdl_result result,
                                       const char *text) {
    const spdl_stage *row = &plan->rows[i];
    spdl__error_set(plan->desc->error, result, "spdl: %s: stage %d '%s'%s %s",
                    spdl__row_place(row).text, i, spdl__row_name(row),
                    result == SPDL_E_TYPE ? "" : ":", text);
    plan->desc->error->stage = i;
    spdl__name_copy(plan->desc->error->stage_name, spdl__row_name(row));
    return result;
}

SPDL__COLD spdl_result spdl__row_error(const spdl__plan *plan, int i, const char *format, ...)
    SPDL__PRINTF(3, 4);
SPDL__COLD spdl_result spdl__row_error(const spdl__plan *plan, int i, const char *format, ...) {
    char text[SPDL_TEXT_BYTES / 2];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    return spdl__row_blame(plan, i, SPDL_E_INVALID, text);
}

/* A field of a row; 0 is its default, and always right. */
typedef struct spdl__row_field {
    const char *name;
    const char *kinds; /* the kinds of rows that have it */
    int64_t value;     /* of a flag or pointer: whether it is set */
    int min, max;
} spdl__row_field;

/* Fields that are out of range, or without effect on this kind of row. */
SPDL__COLD spdl_result spdl__check_fields(const spdl__plan *plan, int i) {
    static const char *const calls = "source, pipe and branch";
    const spdl_stage *row = &plan->rows[i];
    const spdl__row_field fields[] = {
        { "fn", calls, row->fn != NULL, 0, 1 },
        { "type", "feed", row->type != NULL && row->next == NULL, 0, 1 },
        { "next", "source", row->next != NULL, 0, 1 },
        { "size", "batch", row->size, 1, SPDL__MAX_BATCH },
        { "concurrency", "pipe", row->concurrency == 1 ? 0 : row->concurrency, 1,
          SPDL__MAX_CONCURRENCY },
        { "max_concurrency", "pipe", row->max_concurrency, 1, SPDL__MAX_CONCURRENCY },
        { "threads", "source and pipe", row->threads, 1,
          row->kind == SPDL_KIND_SOURCE ? 1 : SPDL__MAX_WORKERS },
        { "buffer_size", NULL, row->buffer_size, 1, SPDL__MAX_BUFFER },
        { "output_order", "pipe", row->output_order, 0, SPDL_ORDER_COMPLETION },
        { "reorder_window", "pipe", row->reorder_window, 1, SPDL__MAX_BUFFER },
        { "item_bytes", "source, pipe and batch", (int64_t)row->item_bytes, 1, INT32_MAX },
        { "drop_last", "batch", row->drop_last, 0, 1 },
        { "drop_oldest", "feed", row->drop_oldest, 0, 1 },
        { "continuous", "source", row->continuous, 0, 1 },
        { "emits", "source and pipe", row->emits, 1, SPDL__MAX_BUFFER },
        { "flush", "pipe", row->flush, 0, 1 },
        { "deferred", "pipe", row->deferred, 0, 1 },
        { "again", "pipe", row->again, 0, 1 },
        { "free_state", "pipe", row->free_state != NULL, 0, 1 },
        { "merge_order", "merge", row->merge_order, 0, SPDL_MERGE_WEIGHTED },
        { "merge_fn", "merge", row->merge_fn != NULL, 0, 1 },
        { "weight", "path", row->weight != 0, 0, 1 },
        { "retries", calls, row->retries, 0, INT32_MAX },
        { "max_failures", calls, row->max_failures, -1, INT32_MAX },
        { "max_failure_rate", calls, row->max_failure_rate != 0, 0, 1 },
        { "on_drop", calls, row->on_drop != NULL, 0, 1 },
        { "free_item", "source, feed, pipe and branch", row->free_item != NULL, 0, 1 },
        { "copy_item", "source and pipe", row->copy_item != NULL, 0, 1 },
        { "const_input", "pipe", row->const_input, 0, 1 },
        { "init", calls, row->init != NULL, 0, 1 },
        { "fini", calls, row->fini != NULL, 0, 1 },
    };
    const spdl__row_field *f = fields;
    if (row->kind < SPDL_KIND_SOURCE || row->kind > SPDL_KIND_UNBATCH)
        return spdl__row_error(plan, i, "kind is %d, which is no kind of row", (int)row->kind);
    for (; f < fields + sizeof(fields) / sizeof(fields[0]); ++f) {
        if (f->value == 0) continue;
        if (f->kinds != NULL && strstr(f->kinds, spdl__kind_name(row->kind)) == NULL)
            return spdl__row_error(plan, i, "%s is set, but only %s rows have it", f->name,
                                   f->kinds);
        if (f->max == INT32_MAX && f->value < f->min)
            return spdl__row_error(plan, i, "%s is %d, must be at least %d", f->name,
                                   (int)f->value, f->min);
        if (f->value < f->min || f->value > f->max)
            return spdl__row_error(plan, i, "%s is %d, must be %d to %d", f->name, (int)f->value,
                                   f->min, f->max);
    }
    return SPDL_OK;
}

/* Rows in the wrong place, and fields that do not go together or are missing. */
SPDL__COLD spdl_result spdl__check_rules(const spdl__plan *plan, int i) {
    const spdl_stage *row = &plan->rows[i];
    const bool begins = row->kind == SPDL_KIND_SOURCE || row->kind == SPDL_KIND_FEED;
    const bool ends = row->kind == SPDL_KIND_SINK, last = i == plan->count - 1;
    const struct {
        bool broken;
        const char *why;
    } rules[] = {
        { i == 0 && !begins && row->kind != SPDL_KIND_PATH,
          "the first row must be SPDL_SOURCE, SPDL_FROM or SPDL_FEED, or SPDL_PATH before several "
          "sources" },
        { i > 0 && row->kind == SPDL_KIND_FEED,
          "only the first row may be SPDL_FEED: one of several sources is SPDL_SOURCE or "
          "SPDL_FROM" },
        { last && !ends, "the last row must be SPDL_SINK" },
        { !last && ends, "only the last row may be SPDL_SINK" },
        { i == 1 && ends && plan->rows[0].kind == SPDL_KIND_FEED,
          "after SPDL_FEED there must be a stage" },
        { spdl__row_calls(row) && row->next == NULL && (row->fn == NULL || row->fn->call == NULL),
          "fn is NULL" },
        { row->next != NULL && row->type == NULL, "next is set, but type is NULL" },
        { row->next != NULL && row->fn != NULL, "next and fn are both set" },
        { row->next != NULL && row->emits, "emits is set, but what SPDL_FROM yields are items" },
        { row->kind == SPDL_KIND_BATCH && row->size == 0, "size is 0, must be at least 1" },
        { i == plan->count - 2 && row->buffer_size != 0,
          "buffer_size is set, but SPDL_SINK sets that of the edge after the last stage" },
        { row->max_failure_rate != 0 && row->max_failures != 0,
          "max_failures and max_failure_rate are both set" },
        { row->fini != NULL && row->init == NULL, "fini is set without init" },
        { row->flush && (row->concurrency > 1 || row->max_concurrency > 1),
          "flush is set, but concurrency is more than 1" },
        { row->deferred && row->emits, "deferred and emits are both set" },
        { row->deferred && row->flush, "deferred and flush are both set" },
        { (uint64_t)row->size * row->item_bytes > SIZE_MAX / 2,
          "size times item_bytes is more than there can be memory" },
        { row->next != NULL && row->item_bytes != 0,
          "item_bytes is set, but what SPDL_FROM yields are items" },
        { row->again && row->emits, "again and emits are both set" },
        { row->again && row->deferred, "again and deferred are both set" },
        { row->free_state != NULL && !row->again, "free_state is set without again" },
        { row->deferred && row->retries > 0,
          "deferred and retries are both set: whoever completes a call repeats it" },
        { (row->merge_order == SPDL_MERGE_CHOICE) != (row->merge_fn != NULL),
          "merge_fn goes with SPDL_MERGE_CHOICE, and only with it" },
    };
    size_t k;
    for (k = 0; k < sizeof(rules) / sizeof(rules[0]); ++k)
        if (rules[k].broken) return spdl__row_error(plan, i, "%s", rules[k].why);
    if (row->max_concurrency != 0 && row->max_concurrency < row->concurrency)
        return spdl__row_error(plan, i, "max_concurrency is %d, less than the concurrency of %d",
                               row->max_concurrency, row->concurrency);
    if (!(row->weight >= 0 && row->weight <= 1.7976931348623157e308))
        return spdl__row_error(plan, i, "weight is %g, must be more than 0", row->weight);
    if (!(row->max_failure_rate >= 0 && row->max_failure_rate <= 1))
        return spdl__row_error(plan, i, "max_failure_rate is %g, must be in (0, 1]",
                               row->max_failure_rate);
    return SPDL_OK;
}

/* Row `i` reads what row `from` writes. */
SPDL__COLD void spdl__plan_join(spdl__plan *plan, int i, int from) {
    plan->above[i] |= plan->above[from] | (uint32_t)1 << from;
}

/* Whether this is the first row of several sources, in the place of their branch. */
SPDL__COLD bool spdl__plan_sources(const spdl__plan *plan, int branch) {
    return branch == 0 && plan->rows[0].kind == SPDL_KIND_PATH;
}

/* What may be wrong with a row between the paths of several sources, or their merge. */
SPDL__COLD spdl_result spdl__check_sources(const spdl__plan *plan, int i) {
    const spdl_stage *row = &plan->rows[i], *before = &plan->rows[i > 0 ? i - 1 : 0];
    const bool merge = row->kind == SPDL_KIND_MERGE, source = row->kind == SPDL_KIND_SOURCE;
    const bool among = spdl__plan_sources(plan, plan->branch[i]); /* not in a branch of a path */
    const char *why = NULL;
    if (source && i > 0 && !(among && before->kind == SPDL_KIND_PATH))
        why = "only the first row may be SPDL_SOURCE or SPDL_FROM, or the first of a path when the "
              "table begins with SPDL_PATH";
    if (among && i > 0 && before->kind == SPDL_KIND_PATH && !source)
        why = "after SPDL_PATH of several sources there must be SPDL_SOURCE or SPDL_FROM";
    if (among && row->kind == SPDL_KIND_PATH && row->buffer_size != 0)
        why = "buffer_size is set, but there is no edge before a source: set that of the source";
    if (among && source && row->continuous != plan->rows[1].continuous)
        why = "continuous is set for some of the sources that a merge joins, but not for all";
    if (merge && among && row->merge_order == SPDL_MERGE_BATCHES)
        why = "merge_order is SPDL_MERGE_BATCHES, which joins what one SPDL_BRANCH has split";
    if (merge && !among && row->merge_order == SPDL_MERGE_WEIGHTED)
        why = "merge_order is SPDL_MERGE_WEIGHTED, which joins several sources";
    return why == NULL ? SPDL_OK : spdl__row_error(plan, i, "%s", why);
}

/* Each path of a weighted merge has a weight, and no other one. */
SPDL__COLD spdl_result spdl__check_weights(const spdl__plan *plan, int merge, int branch) {
    const bool weighted = plan->rows[merge].merge_order == SPDL_MERGE_WEIGHTED;
    int k;
    for (k = 0; k < plan->paths[branch]; ++k)
        if ((plan->rows[plan->path[branch][k]].weight > 0) != weighted)
            return spdl__row_error(plan, plan->path[branch][k],
                                   weighted ? "weight is 0, must be more than 0: its merge is "
                                              "SPDL_MERGE_WEIGHTED"
                                            : "weight is set, but its merge is not "
                                              "SPDL_MERGE_WEIGHTED");
    return SPDL_OK;
}

/* Which row reads the edge of which; `open` are the branches whose merge is still to come. */
SPDL__COLD spdl_result spdl__plan_connect(spdl__plan *plan) {
    int open[SPDL_MAX_STAGES + 2], depth = 0, i, k;
    spdl_result result;
    open[0] = -1;
    if (plan->rows[0].kind == SPDL_KIND_PATH) open[++depth] = 0;
    for (i = 0; i < plan->count; ++i) {
        const spdl_kind kind = plan->rows[i].kind;
        const int branch = open[depth];
        plan->branch[i] = branch;
        plan->before[i] = i - 1;
        result = spdl__check_sources(plan, i);
        if (result != SPDL_OK) return result;
        if (i == 0) plan->branch[0] = -1; /* also where it stands for the branch */
        if (i > 0 && plan->rows[i - 1].kind == SPDL_KIND_BRANCH && kind != SPDL_KIND_PATH)
            return spdl__row_error(plan, i, "after SPDL_BRANCH there must be SPDL_PATH");
        if (branch < 0 && (kind == SPDL_KIND_PATH || kind == SPDL_KIND_MERGE))
            return spdl__row_error(plan, i, "%s without SPDL_BRANCH above",
                                   kind == SPDL_KIND_PATH ? "SPDL_PATH" : "SPDL_MERGE");
        if (kind == SPDL_KIND_BRANCH) open[++depth] = i;
        if (kind == SPDL_KIND_SOURCE) plan->before[i] = -1;
        if (kind == SPDL_KIND_PATH) {
            plan->before[i] = spdl__plan_sources(plan, branch) ? -1 : branch;
            plan->path[branch][plan->paths[branch]++] = (uint8_t)i;
        }
        if (kind == SPDL_KIND_MERGE) {
            if (plan->paths[branch] < 2)
                return spdl__row_error(plan, i, "SPDL_MERGE of fewer than 2 paths");
            result = spdl__check_weights(plan, i, branch);
            if (result != SPDL_OK) return result;
            --depth;
            plan->before[i] = -1;
            plan->merge[branch] = i;
            plan->paths[i] = plan->paths[branch];
            for (k = 0; k < plan->paths[i]; ++k) { /* a path ends where the next one begins */
                const int next = k + 1 < plan->paths[i] ? plan->path[branch][k + 1] : i;
                plan->path[i][k] = (uint8_t)(next - 1);
                spdl__plan_join(plan, i, next - 1);
            }
        }
        if (plan->before[i] >= 0) spdl__plan_join(plan, i, plan->before[i]);
    }
    if (depth == 0) return SPDL_OK;
    return spdl__row_error(plan, open[depth], "%s without SPDL_MERGE below",
                           plan->rows[open[depth]].kind == SPDL_KIND_PATH ? "SPDL_PATH"
                                                                          : "SPDL_BRANCH");
}

SPDL__COLD bool spdl__type_any(const char *type) {
    return strcmp(type, "void") == 0 || strcmp(type, "const void") == 0;
}

/* What a row hands on, as a type name; "void" fits anything. A merge hands on what its paths do. */
SPDL__COLD const char *spdl__row_yields(const spdl__plan *plan, int i) {
    const spdl_stage *row = &plan->rows[i];
    const char *type = "void";
    int k;
    if (row->kind == SPDL_KIND_PATH)
        return plan->before[i] < 0 ? type : spdl__row_yields(plan, plan->before[i]);
    if (row->kind == SPDL_KIND_BATCH) return "spdl_batch";
    if (row->kind == SPDL_KIND_UNBATCH && plan->rows[plan->before[i]].kind == SPDL_KIND_BATCH)
        return spdl__row_yields(plan, plan->before[plan->before[i]]);
    if ((row->kind == SPDL_KIND_FEED || row->next != NULL) && row->type != NULL) return row->type;
    if (row->fn != NULL && row->fn->out_type != NULL) return row->fn->out_type;
    for (k = 0; k < plan->paths[i] && row->kind == SPDL_KIND_MERGE && spdl__type_any(type); ++k)
        type = spdl__row_yields(plan, plan->path[i][k]);
    return type;
}

SPDL__COLD const char *spdl__row_takes(const spdl_stage *row) {
    if (row->kind == SPDL_KIND_MERGE && row->merge_order == SPDL_MERGE_BATCHES) return "spdl_batch";
    if (row->kind == SPDL_KIND_UNBATCH) return "spdl_batch";
    return row->fn != NULL && row->fn->in_type != NULL ? row->fn->in_type : "void";
}

/* Whether a stage may take what another yields; it may promise not to change it. */
SPDL__COLD bool spdl__types_fit(const char *takes, const char *yields) {
    if (strncmp(takes, "const ", 6) == 0 && strncmp(yields, "const ", 6) != 0) takes += 6;
    return spdl__type_any(takes) || spdl__type_any(yields) || strcmp(takes, yields) == 0 ||
           (*takes == '[') != (*yields == '['); /* one name is a compiler's, see >>cpp */
}

/* Whether row i can read what row `from` yields; a merge stands for the ends of its paths. */
SPDL__COLD spdl_result spdl__check_pair(const spdl__plan *plan, int i, int from) {
    const spdl_stage *row = &plan->rows[i], *before = &plan->rows[from];
    const char *takes = spdl__row_takes(row), *yields = spdl__row_yields(plan, from);
    char text[SPDL_TEXT_BYTES / 2];
    spdl_result result = SPDL_OK;
    int k;
    for (k = 0; before->kind == SPDL_KIND_MERGE && k < plan->paths[from]; ++k)
        if (result == SPDL_OK) result = spdl__check_pair(plan, i, plan->path[from][k]);
    if (result != SPDL_OK || spdl__types_fit(takes, yields)) return result;
    (void)snprintf(text, sizeof(text), "takes '%s *' but stage %d '%s' (%s) yields '%s *'", takes,
                   from, spdl__row_name(before), spdl__row_place(before).text, yields);
    return spdl__row_blame(plan, i, SPDL_E_TYPE, text);
}

/* A row takes what those before it yield, a source takes nothing, and what comes out of a merge is
   of one type. */
SPDL__COLD spdl_result spdl__check_types(const spdl__plan *plan, int i) {
    const spdl_kind kind = plan->rows[i].kind;
    const char *takes = spdl__row_takes(&plan->rows[i]), *merged = spdl__row_yields(plan, i);
    char text[SPDL_TEXT_BYTES / 2];
    spdl_result result = SPDL_OK;
    int first = -1, k;
    if (kind == SPDL_KIND_SOURCE && !spdl__type_any(takes)) {
        (void)snprintf(text, sizeof(text), "is a source, but takes '%s *': it must take 'void *'",
                       takes);
        return spdl__row_blame(plan, i, SPDL_E_TYPE, text);
    }
    if (plan->before[i] >= 0 && kind != SPDL_KIND_PATH)
        return spdl__check_pair(plan, i, plan->before[i]);
    for (k = 0; kind == SPDL_KIND_MERGE && k < plan->paths[i] && result == SPDL_OK; ++k) {
        const int from = plan->path[i][k];
        const char *yields = spdl__row_yields(plan, from);
        result = spdl__check_pair(plan, i, from);
        if (first < 0 && !spdl__type_any(yields)) first = from;
        if (result != SPDL_OK || spdl__types_fit(merged, yields) ||
            spdl__types_fit(yields, merged))
            continue;
        (void)snprintf(text, sizeof(text),
                       "merges '%s *' of stage %d '%s' with '%s *' of stage %d '%s'", merged, first,
                       spdl__row_name(&plan->rows[first]), yields, from,
                       spdl__row_name(&plan->rows[from]));
        return spdl__row_blame(plan, i, SPDL_E_TYPE, text);
    }
    return result;
}

/* What a row may not be between a branch and its merge: with SPDL_MERGE_BATCHES each path keeps the
   order and number of its batches; with SPDL_MERGE_ROBIN nothing may make more or fewer of the
   items than can be known, or a path would starve sooner or later. */
SPDL__COLD spdl_result spdl__check_inside(const spdl__plan *plan, int i) {
    const spdl_stage *row = &plan->rows[i];
    int branch = row->kind == SPDL_KIND_MERGE ? plan->branch[plan->branch[i]] : plan->branch[i];
    const char *why = NULL;
    for (; branch >= 0; branch = plan->branch[branch]) {
        const spdl_merge_order order = plan->rows[plan->merge[branch]].merge_order;
        if (order == SPDL_MERGE_BATCHES) {
            if (row->output_order == SPDL_ORDER_COMPLETION) why = "completion order";
            if (row->emits) why = "emits";
            if (row->again) why = "again";
            if (row->flush) why = "flush";
            if (row->kind == SPDL_KIND_BATCH) why = "SPDL_BATCH";
            if (row->kind == SPDL_KIND_UNBATCH) why = "SPDL_UNBATCH";
            if (row->kind == SPDL_KIND_MERGE && row->merge_order != order) why = "merge_order";
            if (why != NULL)
                return spdl__row_error(plan, i,
                                       "%s: in a path that SPDL_MERGE_BATCHES joins, batches have "
                                       "to keep their order and number",
                                       why);
        }
        if (order != SPDL_MERGE_ROBIN || spdl__plan_sources(plan, branch)) continue;
        if (row->emits) why = "emits";
        if (row->again) why = "again";
        if (row->flush) why = "flush";
        if (row->kind == SPDL_KIND_UNBATCH) why = "SPDL_UNBATCH";
        if (row->max_failures != 0) why = "max_failures";
        if (row->max_failure_rate > 0) why = "max_failure_rate";
        if (why != NULL)
            return spdl__row_error(plan, i, "%s: in a path of SPDL_MERGE_ROBIN the number of "
                                            "results has to be certain, or the merge could starve",
                                   why);
    }
    return SPDL_OK;
}

SPDL__COLD spdl_result spdl__check_desc(const spdl_pipeline_desc *desc) {
    if (desc->workers < 0 || desc->workers > SPDL__MAX_WORKERS)
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "spdl: pipeline: workers is %d, must be 0 to %d", desc->workers,
                               SPDL__MAX_WORKERS);
    if (desc->pool != NULL && desc->workers != 0)
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "spdl: pipeline: workers is %d, but pool is set: leave it 0",
                               desc->workers);
    if (!(desc->cpu_budget >= 0))
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "spdl: pipeline: cpu_budget is %g, must be at least 0",
                               desc->cpu_budget);
    if (!(desc->tune_seconds >= 0 && desc->tune_seconds < 1e9))
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "spdl: pipeline: tune_seconds is %g, must be %s", desc->tune_seconds,
                               desc->tune_seconds >= 1e9 ? "less than 1e9" : "at least 0");
    if (desc->trace_events < 0 || desc->trace_events > SPDL__TRACE_EVENTS_MAX)
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "spdl: pipeline: trace_events is %d, must be 0 to %d",
                               desc->trace_events, SPDL__TRACE_EVENTS_MAX);
    return spdl__allocator_check(&desc->allocator, "pipeline", desc->error);
}

SPDL__COLD spdl_result spdl__check_plan(spdl__plan *plan) {
    spdl_result result = spdl__check_desc(plan->desc);
    int i;
    if (result != SPDL_OK) return result;
    if (plan->rows == NULL || plan->count < 1)
        return spdl__error_set(plan->desc->error, SPDL_E_INVALID,
                               "spdl: pipeline: no rows; it needs at least a source and a "
                               "sink");
    if (plan->count == 1)
        return spdl__row_error(plan, 0, "the only row; a pipeline needs at least a source and a "
                                        "sink");
    if (plan->count > SPDL_MAX_STAGES + 1)
        return spdl__error_set(plan->desc->error, SPDL_E_INVALID,
                               "spdl: pipeline: too many stages: %d rows, at most %d and a sink",
                               plan->count, SPDL_MAX_STAGES);
    for (i = 0; i < plan->count && result == SPDL_OK; ++i) {
        result = spdl__check_fields(plan, i);
        if (result == SPDL_OK) result = spdl__check_rules(plan, i);
    }
    if (result == SPDL_OK) result = spdl__plan_connect(plan);
    for (i = 0; i < plan->count && result == SPDL_OK; ++i) result = spdl__check_types(plan, i);
    for (i = 0; i < plan->count && result == SPDL_OK; ++i) result = spdl__check_inside(plan, i);
    return result;
}

/* --- what is built --- */

/* The most items a batch of ours can have that leaves this row; 0: it yields none. */
SPDL__COLD size_t spdl__node_batch_size(const spdl_pipeline *p, const spdl__plan *plan, int i) {
    const spdl_stage *row = &plan->rows[i];
    size_t most = 0;
    int k;
    if (row->kind == SPDL_KIND_BATCH) return (size_t)row->size;
    if (row->kind != SPDL_KIND_UNBATCH && strcmp(spdl__row_yields(plan, i), "spdl_batch") != 0)
        return 0;
    for (k = 0; row->kind == SPDL_KIND_MERGE && k < plan->paths[i]; ++k)
        most = (size_t)spdl__max(most, p->node[plan->path[i][k]].batch_size);
    if (plan->before[i] >= 0) most = p->node[plan->before[i]].batch_size;
    if (!row->emits && !row->again && row->kind != SPDL_KIND_UNBATCH) return most;
    for (k = 0; k < i; ++k) /* batches out of a batch of batches */
        if (plan->above[i] >> k & 1) most = (size_t)spdl__max(most, p->node[k].batch_size);
    return most;
}

/* The bytes of an item in the batches in place that row `i` feeds, or 0. */
SPDL__COLD size_t spdl__row_feeds(const spdl__plan *plan, int i) {
    const spdl_kind kind = plan->rows[i].kind;
    if (kind != SPDL_KIND_SOURCE && kind != SPDL_KIND_PIPE) return 0;
    if (plan->rows[i].next != NULL) return 0; /* it has no calls of spdl_buffer */
    return plan->rows[i + 1].kind == SPDL_KIND_BATCH ? plan->rows[i + 1].item_bytes : 0;
}

SPDL__COLD int spdl__row_threads(const spdl_stage *row) {
    return row->next != NULL ? 1 : row->threads;
}

/* Whether calls of this row know where in a batch their items will lie: if none is dropped, that is
   a matter of tickets. Not of a source that destroy may leave: it would write into a batch that is
   gone. */
SPDL__COLD bool spdl__row_places(const spdl__plan *plan, int i) {
    const spdl_stage *row = &plan->rows[i];
    return spdl__row_feeds(plan, i) > 0 && row->item_bytes == 0 && !row->emits && !row->again &&
           row->output_order == SPDL_ORDER_INPUT &&
           (row->kind != SPDL_KIND_SOURCE || spdl__row_threads(row) == 0);
}

/* The row with defaults in place of zeros. */
SPDL__COLD spdl_stage spdl__row_defaults(const spdl__plan *plan, int i, int threads) {
    const int at_sink = plan->rows[plan->count - 1].buffer_size;
    const bool routes_items = plan->rows[i].kind == SPDL_KIND_BRANCH &&
                              strcmp(spdl__row_yields(plan, i), "spdl_batch") != 0;
    spdl_stage row = plan->rows[i];
    if (row.next != NULL) row.fn = &spdl__from;
    row.threads = spdl__row_threads(&row);
    if (row.kind == SPDL_KIND_PIPE && row.concurrency == 0 && row.threads > 0 && !row.flush)
        row.concurrency = row.max_concurrency ? (int)spdl__min((uint64_t)row.threads,
                                                               (uint64_t)row.max_concurrency)
                                              : row.threads;
    if (row.concurrency == 0) row.concurrency = 1;
    if (row.max_concurrency == 0) row.max_concurrency = row.concurrency;
    if ((plan->desc->autotune ||
         (plan->doctor != NULL && plan->doctor->desc.raise)) &&
        row.kind == SPDL_KIND_PIPE && !row.flush && plan->rows[i].max_concurrency == 0 &&
        threads > row.concurrency)
        row.max_concurrency = threads;
    if (i == plan->count - 2) row.buffer_size = at_sink ? at_sink : 3;
    if (row.buffer_size == 0 && spdl__row_places(plan, i)) /* they need no memory of their own */
        row.buffer_size = (int)spdl__min(SPDL__SITTING_ITEMS, (uint64_t)plan->rows[i + 1].size);
    if (row.buffer_size == 0) row.buffer_size = routes_items ? SPDL__ROUTED : 2;
    if (!spdl__row_places(plan, i) && row.item_bytes == 0)
        row.item_bytes = spdl__row_feeds(plan, i);
    if (row.kind == SPDL_KIND_UNBATCH) {
        row.kind = SPDL_KIND_PIPE;
        row.fn = &spdl__unbatch_function;
        row.emits = 1; /* or as many as there are: no spdl_emit counts them */
    }
    if (row.kind == SPDL_KIND_BATCH || row.kind == SPDL_KIND_MERGE) row.free_item = spdl_batch_free;
    return row;
}

/* Whether the batches that this branch splits are joined again. */
SPDL__COLD bool spdl__plan_joins(const spdl__plan *plan, int branch) {
    return branch >= 0 && plan->rows[plan->merge[branch]].merge_order == SPDL_MERGE_BATCHES;
}

/* Whether a row before this one has its name. */
SPDL__COLD bool spdl__node_namesake(const spdl_pipeline *p, const spdl__node *node) {
    int i = 0;
    while (i < node->index && strcmp(p->node[i].name, node->name) != 0) ++i;
    return i < node->index;
}

/* The name of a row, the second one of the same name being "name#2". */
SPDL__COLD void spdl__node_name(const spdl_pipeline *p, spdl__node *node, const char *name) {
    char text[SPDL_NAME_BYTES + 16];
    int number;
    spdl__name_copy(node->name, name);
    for (number = 2; spdl__node_namesake(p, node); ++number) {
        (void)snprintf(text, sizeof(text), "%.*s#%d", SPDL_NAME_BYTES - 4, name, number);
        spdl__name_copy(node->name, text);
    }
}

/* A row, except for its memory. The rows before it are there. */
SPDL__COLD void spdl__node_init(spdl_pipeline *p, const spdl__plan *plan, int i) {
    spdl__node *node = &p->node[i];
    spdl_stage *row = &node->row;
    int outer = plan->branch[i], k;
    *row = spdl__row_defaults(plan, i,
                              plan->rows[i].threads ? plan->rows[i].threads : p->group[0].workers);
    node->index = i;
    spdl__node_name(p, node, spdl__row_name(&plan->rows[i]));
    row->name = node->name; /* for the probes */
    node->ordered = row->kind != SPDL_KIND_PIPE || row->output_order == SPDL_ORDER_INPUT;
    node->serial = row->max_concurrency == 1;
    node->alone = row->flush || plan->rows[i].max_concurrency == 1;
    node->by_ticket = node->ordered && !node->serial;
    node->places = spdl__row_places(plan, i);
    node->above = plan->above[i];
    node->paths = plan->paths[i];
    memcpy(node->path, plan->path[i], sizeof(node->path));
    node->limit = (uint32_t)row->concurrency;
    node->cut = SPDL__OPEN;
    node->freelist.allocator = &p->allocator;
    node->batch_size = spdl__node_batch_size(p, plan, i);
    if (row->kind == SPDL_KIND_BRANCH && node->batch_size > 0 && row->free_item == NULL)
        row->free_item = spdl_batch_free;
    node->splits = row->kind == SPDL_KIND_BRANCH && spdl__plan_joins(plan, i);
    node->plain = !row->emits && !row->deferred && !node->splits;
    node->held = (!node->ordered && row->reorder_window > 0) ||
                 (row->again && !node->serial && !node->by_ticket);
    if (row->kind == SPDL_KIND_MERGE) {
        for (k = 0; k < node->paths; ++k)
            p->node[node->path[k]].weight = plan->rows[plan->path[outer][k]].weight;
        node->begin = &p->node[outer];
        outer = plan->branch[outer];
    }
    if (spdl__plan_joins(plan, outer)) node->branch = &p->node[outer];
    node->word = &node->own;
    if (plan->before[i] >= 0) node->before = &p->node[plan->before[i]];
    if (node->before != NULL && row->kind != SPDL_KIND_PATH) {
        node->in = &node->before->out;
        node->word = &node->in->word;
    }
    if (row->kind == SPDL_KIND_FEED) p->feed = node;
    if (node->begin != NULL && node->begin->row.kind == SPDL_KIND_PATH) p->mix = node;
    if (row->init != NULL) p->has_hooks = true;
    if ((row->merge_order == SPDL_MERGE_ROBIN || row->merge_order == SPDL_MERGE_CHOICE) &&
        node != p->mix)
        p->may_starve = true;
}

/* Rows that make batches: of items, of parts of a batch, of batches that are joined. */
SPDL__COLD bool spdl__node_makes_batches(const spdl__node *node) {
    return node->row.kind == SPDL_KIND_BATCH ||
           (node->row.kind == SPDL_KIND_BRANCH && node->batch_size > 0) ||
           (node->row.kind == SPDL_KIND_MERGE && node->row.merge_order == SPDL_MERGE_BATCHES);
}

/* How many batches of row `first` can be alive: on the edges they may travel, if later stages pass
   them on, in calls, in batches of batches, and a few in the trainer's hands; of a branch on all
   paths together. */
SPDL__COLD uint64_t spdl__batches_alive(const spdl_pipeline *p, int first) {
    uint64_t alive = 4, calls = 0;
    int i;
    for (i = p->count - 1; i >= first; --i) { /* from the sink up: what comes after is known */
        const spdl_stage *row = &p->node[i].row;
        const uint64_t room = (uint64_t)row->buffer_size + (uint64_t)row->max_concurrency;
        alive += room + calls;
        calls = row->kind == SPDL_KIND_PIPE ? (uint64_t)row->max_concurrency : 0;
        if (row->kind == SPDL_KIND_BATCH && i > first && row->item_bytes > 0)
            alive = SPDL__COPIED; /* items end here */
        else if (row->kind == SPDL_KIND_BATCH && i > first)
            alive = spdl__min((alive + 1) * (uint64_t)row->size, SPDL__MAX_SPARE);
    }
    if (p->node[first].row.kind == SPDL_KIND_BRANCH) alive *= 2;
    return spdl__min(alive, SPDL__MAX_SPARE);
}

/* The memory of a row: its edge, places for deferred calls, stamps for completion order with a
   window, counters, and batches. */
SPDL__COLD spdl_result spdl__node_build(spdl_pipeline *p, spdl__node *node) {
    const spdl_allocator *allocator = &p->allocator;
    const spdl_stage *row = &node->row;
    const uint32_t calls = (uint32_t)row->max_concurrency;
    spdl__edge *edge = &node->out;
    uint64_t alive;
    uint32_t k;
    int i;
    edge->end = SPDL__OPEN;
    edge->buffer_size = (uint64_t)row->buffer_size;
    edge->window = edge->buffer_size + calls;
    if (node == p->last && p->doctored) edge->window += edge->buffer_size; /* it may be doubled */
    if (row->kind == SPDL_KIND_PATH && node->before != NULL) /* all that wait may be here */
        edge->window = edge->buffer_size + (uint64_t)node->before->row.buffer_size;
    if (row->kind == SPDL_KIND_BRANCH) edge->window = 1; /* it writes those of its paths */
    if (node->by_ticket)
        edge->window = spdl__max(edge->window, row->reorder_window ? (uint64_t)row->reorder_window
                                                                   : SPDL__WINDOW);
    edge->mask = spdl__pow2(edge->window) - 1;
    edge->slots = (spdl__slot *)spdl__alloc_zeroed(allocator, (size_t)edge->mask + 1,
                                                   sizeof(*edge->slots), SPDL_CACHE_LINE);
    node->counters = (spdl__counters *)spdl__alloc_zeroed(
        allocator, (size_t)p->workers + 1, sizeof(*node->counters), SPDL_CACHE_LINE);
    if (edge->slots == NULL || node->counters == NULL) return SPDL_E_NOMEM;
    /* not the first calls, as somebody waits for those; and a deferred one ends on no thread that
       could be measured */
    for (i = 0; i <= p->workers; ++i) node->counters[i].meter_due = row->deferred ? INT64_MAX : 1;
    if (row->deferred) {
        node->deferred = (spdl__deferred *)spdl__alloc_zeroed(
            allocator, calls, sizeof(*node->deferred), sizeof(uint64_t));
        if (node->deferred == NULL) return SPDL_E_NOMEM;
        for (k = 0; k < calls; ++k) node->deferred[k].next = k + 1 < calls ? k + 2 : 0;
        node->deferred_free = 1;
    }
    if (row->again) {
        node->again = (spdl__again *)spdl__alloc_zeroed(allocator, calls, sizeof(*node->again),
                                                        sizeof(uint64_t));
        if (node->again == NULL) return SPDL_E_NOMEM;
    }
    if (!node->ordered && row->reorder_window > 0) {
        node->settled_mask = spdl__pow2((uint64_t)row->reorder_window + 1) - 1;
        node->settled = (uint32_t *)spdl__alloc_zeroed(allocator, (size_t)node->settled_mask + 1,
                                                       sizeof(*node->settled), sizeof(void *));
        if (node->settled == NULL) return SPDL_E_NOMEM;
    }
    alive = spdl__batches_alive(p, node->index);
    if (row->kind == SPDL_KIND_BATCH && node->before->places) /* those that are written into */
        alive += node->before->out.window / (uint64_t)row->size + 2;
    if (row->item_bytes > 0 && spdl__row_calls(row)) {
        node->buffers = spdl__batch_pool_make(allocator, 0, row->item_bytes, (size_t)alive);
        if (node->buffers == NULL) return SPDL_E_NOMEM;
    }
    if (!spdl__node_makes_batches(node)) return SPDL_OK;
    node->batches = spdl__batch_pool_make(allocator, node->batch_size,
                                          (size_t)row->size * row->item_bytes, (size_t)alive);
    if (node->batches == NULL) return SPDL_E_NOMEM;
    for (i = 0; i <= node->index; ++i) node->batches->free_item[i] = p->node[i].row.free_item;
    return SPDL_OK;
}

/* What workers have: a task each, and what init of each row stores for it. */
SPDL__COLD spdl_result spdl__tasks_build(spdl_pipeline *p) {
    const size_t workers = (size_t)p->workers;
    int i;
    p->task = (spdl_task *)spdl__alloc_zeroed(&p->allocator, workers, sizeof(*p->task),
                                              SPDL_CACHE_LINE);
    p->split = (spdl__batch **)spdl__alloc_zeroed(&p->allocator, workers * SPDL_MAX_STAGES,
                                                  sizeof(*p->split), sizeof(void *));
    for (i = 0; p->task != NULL && i < p->workers; ++i) {
        p->task[i].pipeline = p;
        p->task[i].worker = i;
        p->task[i].meter.file = SPDL__NO_FILE;
    }
    if (p->task == NULL || p->split == NULL) return SPDL_E_NOMEM;
    p->open = !p->has_hooks;
    if (!p->has_hooks) return SPDL_OK;
    p->local = (void **)spdl__alloc_zeroed(&p->allocator, (size_t)p->count * workers,
                                           sizeof(*p->local), sizeof(void *));
    p->inits = (uint8_t *)spdl__alloc_zeroed(&p->allocator, workers, 1, sizeof(void *));
    return p->local != NULL && p->inits != NULL ? SPDL_OK : SPDL_E_NOMEM;
}

SPDL__COLD spdl__group *spdl__group_add(spdl_pipeline *p, uint32_t rows, int workers) {
    spdl__group *group = &p->group[p->groups++];
    group->pipeline = p;
    group->rows = rows;
    group->first = p->workers;
    group->workers = workers;
    p->workers += workers;
    return group;
}

/* The first group is the pool, or the trainer; each row with threads of its own has another. */
SPDL__COLD spdl_result spdl__groups_plan(spdl_pipeline *p, const spdl__plan *plan) {
    const spdl_pipeline_desc *desc = plan->desc;
    const bool polite = desc->workers > 0 && desc->policy.polite;
    const bool one_more = plan->doctor != NULL && plan->doctor->desc.raise && !polite &&
                          desc->workers < SPDL__MAX_WORKERS;
    size_t count = 1 + (size_t)polite;
    int i;
    for (i = 0; i < p->count; ++i) count += spdl__row_threads(&plan->rows[i]) > 0;
    p->threaded = desc->pool != NULL || desc->workers > 0 || count > 1;
    p->group =
        (spdl__group *)spdl__alloc_zeroed(&p->allocator, count, sizeof(*p->group), SPDL_CACHE_LINE);
    if (p->group == NULL) return SPDL_E_NOMEM;
    spdl__group_add(p, 0, desc->pool      ? desc->pool->places
                         : desc->workers ? desc->workers + one_more
                                         : 1);
    p->group[0].pool = desc->pool;
    if (desc->pool != NULL) p->group[0].guests = desc->pool->desc.guests;
    for (i = 0; i < p->count; ++i) {
        const int threads = spdl__row_threads(&plan->rows[i]);
        if (threads > 0)
            spdl__group_add(p, (uint32_t)1 << i, threads);
        else p->group[0].rows |= (uint32_t)1 << i;
    }
    if (polite) p->rescue = spdl__group_add(p, p->group[0].rows, desc->workers);
    return SPDL_OK;
}

/* Which row reads an edge of which, and which group runs it. A polite worker whose turn is over
   looks for nothing itself. */
SPDL__COLD void spdl__rows_connect(spdl_pipeline *p) {
    int i, k;
    for (i = 0; i < p->count; ++i) {
        spdl__node *node = &p->node[i];
        const bool merge = node->row.kind == SPDL_KIND_MERGE;
        for (k = p->groups - 1; k >= 0; --k)
            if (p->group[k].rows >> i & 1) node->group = &p->group[k];
        for (k = 0; k < (merge ? node->paths : 1) && node->row.kind != SPDL_KIND_PATH; ++k) {
            spdl__node *from = merge ? &p->node[node->path[k]] : node->before;
            if (from == NULL) continue;
            if (from->row.kind == SPDL_KIND_PATH) from = from->before; /* writes in its place */
            from->beside |= (uint32_t)1 << i;
            node->beside |= (uint32_t)1 << from->index;
        }
        node->at_end = node == p->last || (p->feed != NULL && node == p->feed + 1);
    }
    for (i = 0; p->rescue != NULL && i < p->count; ++i)
        p->node[i].beside = UINT32_MAX;
}

/* Everything but the threads. On failure spdl__pipeline_release frees what is there. */
SPDL__COLD spdl_result spdl__pipeline_build(spdl_pipeline *p, const spdl__plan *plan) {
    spdl_result result = spdl__groups_plan(p, plan);
    int i;
    if (result != SPDL_OK) return result;
    p->node = (spdl__node *)spdl__alloc_zeroed(&p->allocator, (size_t)p->count, sizeof(*p->node),
                                               SPDL_CACHE_LINE);
    if (p->node == NULL) return SPDL_E_NOMEM;
    for (i = 0; i < p->count; ++i) {
        spdl__node_init(p, plan, i);
        if (spdl__node_makes_batches(&p->node[i]) && p->node[i].batch_size == 0)
            return spdl__row_error(plan, i, "merge_order is SPDL_MERGE_BATCHES, but there is no "
                                            "SPDL_BATCH above whose batches it could join");
    }
    p->last = &p->node[p->count - 1];
    p->sink = &p->last->out;
    spdl__rows_connect(p);
    for (i = 0; i < p->count && result == SPDL_OK; ++i) result = spdl__node_build(p, &p->node[i]);
    if (result == SPDL_OK) result = spdl__tasks_build(p);
    if (result == SPDL_OK) result = spdl__tuner_build(p, plan->desc);
    if (result == SPDL_OK)
        result = spdl__doctor_open(p, plan->doctor, plan->rows,
                                   plan->desc->pool ? p->group[0].workers : plan->desc->workers);
#ifndef SPDL_NO_REPORT /* else report_begin says so */
    if (result == SPDL_OK) spdl__trace_open(p, plan->desc);
#endif
    return result;
}

/* The pools that are the pipeline's own. */
SPDL__COLD spdl_result spdl__groups_start(spdl_pipeline *p, const spdl_pipeline_desc *desc) {
    spdl_result result = SPDL_OK;
    int i, row = 0;
    for (i = desc->workers > 0 ? 0 : 1; i < p->groups && result == SPDL_OK; ++i) {
        spdl__group *group = &p->group[i];
        spdl_pool_desc pool;
        memset(&pool, 0, sizeof(pool));
        pool.workers = group->workers;
        pool.policy = desc->policy;
        pool.stack_bytes = desc->stack_bytes;
        pool.queue_size = 1;
        pool.allocator = desc->allocator;
        pool.logger = desc->logger;
        pool.profiler = desc->profiler;
        pool.error = desc->error;
        pool.name = desc->name;
        if (group == p->rescue) {
            pool.policy.polite = false;
            pool.policy.nice = 0;
            pool.policy.sched = SPDL_SCHED_DEFAULT;
        } else if (i > 0) {
            while ((group->rows >> row & 1) == 0) ++row;
            pool.name = p->node[row].name;
        }
        result = spdl_pool_create(&group->pool, &pool);
        group->own_pool = result == SPDL_OK;
    }
    return result;
}

/* The clock starts, every edge is empty and every reader except the trainer idle. */
SPDL__COLD spdl_result spdl__pipeline_start(spdl_pipeline *p, const spdl_pipeline_desc *desc) {
    static const uint32_t always = 1;
    int i;
    p->process = spdl__os_process_id(NULL);
    if (!SPDL__NO_STATS) spdl_process_read(&p->process_first);
    p->process_last = p->process_first;
    p->start_ns = spdl_time_ns();
    if (p->tuner != NULL) p->tuner->since = p->start_ns;
    /* before the first call: one word that says whether anybody may have to be woken */
    p->sleepers = p->groups > 1 || (p->feed != NULL && p->group[0].pool == NULL) ? &always
                  : p->group[0].pool != NULL ? &p->group[0].pool->sleepers
                                             : &p->waiting;
    for (i = 0; i < p->count; ++i) {
        p->node[i].out.gap_since = p->start_ns;
        if (i + 1 < p->count) p->node[i].out.wait_since = p->start_ns;
    }
    for (i = p->group[0].workers - p->group[0].guests; p->has_hooks && i < p->group[0].workers; ++i)
        spdl__step_init(p, &p->group[0], i); /* of the guests' places, while nobody is there */
    for (i = 0; i < p->groups; ++i) {
        spdl__group *group = &p->group[i];
        group->client.step = spdl__step;
        group->client.runnable = spdl__claim_group_runnable;
        group->client.self = group;
        if (group->pool == NULL) continue;
        group->slot = spdl__pool_attach(group->pool, &group->client);
        if (group->slot != NULL) continue;
        spdl__pipeline_part_guests(p);
        return spdl__error_set(desc->error, SPDL_E_LIMIT,
                               "spdl: pipeline: the pool has %d pipelines already",
                               SPDL__MAX_CLIENTS);
    }
    return SPDL_OK;
}

SPDL__COLD bool spdl__pipeline_events(spdl_pipeline *p) {
    if (!spdl__os_event_init(&p->fed)) return false;
    if (!spdl__os_event_init(&p->quiet)) goto no_quiet;
    if (spdl__os_event_init(&p->room)) return true;
    spdl__os_event_fini(&p->quiet);
no_quiet:
    spdl__os_event_fini(&p->fed);
    return false;
}

/* More calls than there are threads for: if they wait for each other they do so for ever. Deferred
   calls need no thread, and a pipeline without workers has but one. */
SPDL__COLD void spdl__rows_warn(const spdl_pipeline *p, const spdl__plan *plan) {
    int i;
    for (i = 0; i < p->count; ++i) {
        const spdl__node *node = &p->node[i];
        int threads = node->group->workers;
        if (p->doctor != NULL && node->group == &p->group[0])
            threads -= spdl__doctor_workers(p->doctor);
        if (node->group->pool == NULL || node->row.deferred || node->row.concurrency <= threads)
            continue;
        spdl__logf(&p->logger, SPDL_LOG_WARN,
                   "spdl: %s: stage %d '%s': concurrency is %d, but no more calls than its %d "
                   "%s%s can run at the same time",
                   spdl__row_place(&plan->rows[i]).text, i, node->name, node->row.concurrency,
                   threads, node->row.threads > 0 ? "thread" : "worker", threads > 1 ? "s" : "");
    }
}

/* The rows are right: allocates everything and starts the threads. */
SPDL__COLD spdl_result spdl__pipeline_new(spdl_pipeline **pipeline, const spdl__plan *plan) {
    const spdl_pipeline_desc *desc = plan->desc;
    spdl_pipeline *p = (spdl_pipeline *)spdl__alloc_zeroed(&desc->allocator, 1, sizeof(*p),
                                                           SPDL_CACHE_LINE);
    spdl_result result = SPDL_E_NOMEM;
    if (p != NULL && !spdl__pipeline_events(p)) {
        spdl__free(&desc->allocator, p, sizeof(*p));
        p = NULL;
    }
    if (p != NULL) {
        p->allocator = desc->allocator;
        p->logger = desc->logger;
        p->profiler = desc->profiler;
        if (desc->profiler.event_fn == NULL && desc->pool != NULL)
            p->profiler = desc->pool->desc.profiler;
        p->count = plan->count - 1;
        p->references = 1;
        p->doctored = plan->doctor != NULL;
        spdl__error_clear(&p->error);
        result = spdl__pipeline_build(p, plan);
    }
    if (result == SPDL_E_NOMEM)
        spdl__error_set(desc->error, result, "spdl: pipeline: out of memory");
    if (result == SPDL_OK) result = spdl__groups_start(p, desc);
    if (result == SPDL_OK) {
        *pipeline = p; /* before the first call: a stage may use it */
        result = spdl__pipeline_start(p, desc);
    }
    if (result == SPDL_OK) return result;
    *pipeline = NULL;
    if (p != NULL) spdl__pipeline_release(p);
    return result;
}

SPDL_API spdl_result spdl_pipeline_create(spdl_pipeline **pipeline, const spdl_pipeline_desc *desc,
                                          const spdl_stage *stages, size_t stage_count) {
    spdl_pipeline_desc known;
    spdl_error error;
    spdl__doctor_plan doctor;
    spdl__plan plan;
    spdl_result result;
    if (pipeline == NULL) return SPDL_E_INVALID;
    *pipeline = NULL;
    memset(&known, 0, sizeof(known));
    memset(&plan, 0, sizeof(plan));
    if (desc != NULL) known = *desc;
    if (known.error == NULL) known.error = &error; /* the log needs a text in any case */
    spdl__error_clear(known.error);
    plan.desc = &known;
    plan.rows = stages;
    plan.count = stage_count > INT16_MAX ? INT16_MAX : (int)stage_count;
    if (spdl__doctor_ask(&doctor, known.doctor, &known.logger)) plan.doctor = &doctor;
    if (known.name != NULL) spdl__name_copy(doctor.name, known.name);
    result = spdl__check_plan(&plan);
    if (result == SPDL_OK && plan.doctor != NULL && stages[0].kind == SPDL_KIND_FEED) {
        spdl__log(&known.logger, SPDL_LOG_WARN, "spdl: no doctor where items are pushed: the "
                                                "statistics say how soon they are answered");
        plan.doctor = NULL;
    }
    if (result == SPDL_OK) result = spdl__pipeline_new(pipeline, &plan);
    if (result == SPDL_OK) spdl__rows_warn(*pipeline, &plan);
    if (result == SPDL_OK) spdl__report_begin(*pipeline, &known);
    if (result != SPDL_OK) spdl__log(&known.logger, SPDL_LOG_ERROR, known.error->text);
    return result;
}

/* ============================================================================================= */
/* >>stats-impl
   Snapshots, and the texts made of them. Workers count into cells of their own, without a lock; any
   thread may take a snapshot, which adds the cells up. Waits are kept as the sum of those that are
   over and the start of the open one. What a snapshot has reported is kept with the edge, so that
   no number goes backwards. Nothing is owned here. */

SPDL_API void spdl_report_bytes(spdl_task *task, uint64_t bytes_in, uint64_t bytes_out) {
    spdl__counters *counters = &task->node->counters[task->worker];
    spdl__count(&counters->bytes_in, bytes_in);
    spdl__count(&counters->bytes_out, bytes_out);
}

/* --- histograms --- */

typedef char spdl__histogram_fits[SPDL_HISTOGRAM_BUCKETS == SPDL__BUCKETS ? 1 : -1];

SPDL_API void spdl_histogram_add(spdl_histogram *histogram, uint64_t ns, uint64_t times) {
    if (times == 0) return;
    histogram->count += times;
    histogram->sum_ns += ns * times;
    histogram->max_ns = spdl__max(histogram->max_ns, ns);
    histogram->bucket[spdl__bucket(ns)] += times;
}

SPDL_API void spdl_histogram_merge(spdl_histogram *histogram, const spdl_histogram *more) {
    unsigned i;
    histogram->count += more->count;
    histogram->sum_ns += more->sum_ns;
    histogram->max_ns = spdl__max(histogram->max_ns, more->max_ns);
    for (i = 0; i < SPDL__BUCKETS; ++i) histogram->bucket[i] += more->bucket[i];
}

/* The shortest time that falls into a bucket. */
SPDL__COLD uint64_t spdl__bucket_start(unsigned bucket) {
    const unsigned sub = 1u << SPDL__SUB_BITS;
    const unsigned power = bucket >> SPDL__SUB_BITS;
    if (bucket < sub) return bucket;
    return (uint64_t)(sub + (bucket & (sub - 1))) << (power - 1);
}

SPDL_API uint64_t spdl_histogram_percentile(const spdl_histogram *histogram, double share) {
    const double part = !(share > 0) ? 0 : share < 1 ? share : 1;
    const uint64_t rank = (uint64_t)(part * (double)histogram->count);
    uint64_t seen = 0;
    unsigned i;
    for (i = 0; i < SPDL__BUCKETS; ++i) {
        seen += histogram->bucket[i];
        if (seen > rank || (seen == histogram->count && seen > 0))
            return spdl__min(histogram->max_ns,
                             (spdl__bucket_start(i) + spdl__bucket_start(i + 1)) / 2);
    }
    return 0;
}

SPDL__COLD double spdl__share(uint64_t part, uint64_t whole) {
    return whole > 0 ? (double)part / (double)whole : 0;
}

/* What was counted after `from`, which becomes the difference. Its maximum is not known: the end of
   the last bucket stands for it. */
SPDL__COLD void spdl__histogram_since(spdl_histogram *from, const spdl_histogram *to) {
    unsigned i;
    from->sum_ns = spdl__grown(from->sum_ns, to->sum_ns);
    from->count = from->max_ns = 0;
    for (i = 0; i < SPDL__BUCKETS; ++i) {
        from->bucket[i] = spdl__grown(from->bucket[i], to->bucket[i]);
        from->count += from->bucket[i];
        if (from->bucket[i] > 0) from->max_ns = spdl__min(to->max_ns, spdl__bucket_start(i + 1));
    }
}

/* --- snapshots --- */

SPDL__COLD void spdl__counters_merge(spdl_histogram *times, const spdl__counters *counters) {
    unsigned i;
    times->sum_ns += spdl__load_relaxed(&counters->timed_ns);
    times->max_ns = spdl__max(times->max_ns, spdl__load_relaxed(&counters->max_ns));
    for (i = 0; i < SPDL__BUCKETS; ++i) {
        const uint64_t calls = spdl__load_relaxed(&counters->bucket[i]);
        times->bucket[i] += calls;
        times->count += calls;
    }
}

SPDL__COLD void spdl__node_times(const spdl_pipeline *p, const spdl__node *node,
                                 spdl_histogram *times) {
    int i;
    memset(times, 0, sizeof(*times));
    for (i = 0; i <= p->workers; ++i) spdl__counters_merge(times, &node->counters[i]);
}

SPDL_API spdl_result spdl_pipeline_histogram(const spdl_pipeline *p, int stage,
                                             spdl_histogram *histogram) {
    if (stage < 0 || stage >= p->count) return SPDL_E_NOT_FOUND;
    spdl__node_times(p, &p->node[stage], histogram);
    return SPDL_OK;
}

/* The fields that follow from the times of the calls. */
SPDL__COLD void spdl__stage_times(spdl_stage_stats *stats, const spdl_histogram *times) {
    stats->busy_ns = stats->kind != SPDL_KIND_FEED ? times->sum_ns : 0;
    stats->mean_ns = times->count ? times->sum_ns / times->count : 0;
    stats->p50_ns = spdl_histogram_percentile(times, 0.50);
    stats->p90_ns = spdl_histogram_percentile(times, 0.90);
    stats->p99_ns = spdl_histogram_percentile(times, 0.99);
    stats->max_ns = times->max_ns;
}

/* The sums over all cells; busy_ns, which is there, is split as the calls that were measured. */
SPDL__COLD void spdl__stage_counts(const spdl_pipeline *p, const spdl__node *node,
                                   spdl_stage_stats *stats) {
    uint64_t ns = 0, cpu_ns = 0, wait_ns = 0, blind = 0;
    int i;
    for (i = 0; i <= p->workers; ++i) {
        const spdl__counters *counters = &node->counters[i];
        stats->tasks += spdl__load_relaxed(&counters->tasks);
        stats->failures += spdl__load_relaxed(&counters->failures);
        stats->skips += spdl__load_relaxed(&counters->skips);
        stats->retries += spdl__load_relaxed(&counters->retries);
        stats->freed += spdl__load_relaxed(&counters->freed);
        ns += spdl__load_relaxed(&counters->metered_ns);
        cpu_ns += spdl__load_relaxed(&counters->metered_cpu_ns);
        wait_ns += spdl__load_relaxed(&counters->metered_wait_ns);
        blind += spdl__load_relaxed(&counters->metered_blind);
        stats->split_calls += spdl__load_relaxed(&counters->metered);
        stats->bytes_in += spdl__load_relaxed(&counters->bytes_in);
        stats->bytes_out += spdl__load_relaxed(&counters->bytes_out);
    }
    if (ns == 0) return;
    cpu_ns = spdl__min(cpu_ns, ns); /* the loads were not at one time */
    wait_ns = spdl__min(wait_ns, ns - cpu_ns);
    stats->cpu_ns = (uint64_t)((double)stats->busy_ns * ((double)cpu_ns / (double)ns));
    stats->cpu_ns = spdl__min(stats->cpu_ns, stats->busy_ns);
    stats->runnable_ns = (uint64_t)((double)stats->busy_ns * ((double)wait_ns / (double)ns));
    stats->runnable_ns = spdl__min(stats->runnable_ns, stats->busy_ns - stats->cpu_ns);
    stats->blocked_ns = stats->busy_ns - stats->cpu_ns - stats->runnable_ns;
    stats->runnable_known = blind == 0;
}

SPDL__COLD void spdl__stage_snapshot(const spdl_pipeline *p, const spdl__node *node,
                                     spdl_stage_stats *stats) {
    spdl_histogram times;
    uint64_t word;
    memcpy(stats->name, node->name, sizeof(stats->name));
    stats->kind = node->row.kind;
    stats->concurrency = (int)spdl__load_relaxed32(&node->limit);
    word = spdl__load(node->word);
    stats->in_flight = (int)(word & SPDL__ACTIVE) - ((word & SPDL__HELD) != 0);
    if (stats->in_flight > stats->concurrency) stats->in_flight = stats->concurrency;
    stats->threads = node->group != &p->group[0] ? node->group->workers : 0;
    stats->deferred = node->row.deferred;
    stats->alone = node->alone;
    stats->in_order = node->ordered;
    stats->exposed_ns = spdl__load_relaxed(&node->exposed_ns);
    stats->exposed_idle_ns = spdl__load_relaxed(&node->exposed_idle_ns);
    spdl__node_times(p, node, &times);
    spdl__stage_times(stats, &times);
    spdl__stage_counts(p, node, stats);
}

/* Every number is lifted to what an earlier snapshot reported: it may be a little less when a wait
   that was seen open ended at a clock reading from before. */
SPDL__COLD void spdl__edge_snapshot(const spdl_pipeline *p, spdl__node *node, uint64_t now,
                                    spdl_edge_stats *stats) {
    spdl__edge *edge = &node->out;
    const uint64_t head = spdl__head(spdl__load(&edge->word));
    const uint64_t shift = spdl__load(&edge->shift); /* after head: no less than belongs to it */
    const uint64_t ended = spdl__load_relaxed(&edge->ended_ns);
    const uint64_t size = spdl__load_relaxed(&edge->buffer_size); /* the doctor may change it */
    /* dropped items and ends of epochs may be counted before the head has moved past them */
    const int64_t items = (int64_t)(head + shift - spdl__load_relaxed(&edge->epoch_ends));
    uint64_t put_wait = spdl__load_relaxed(&edge->put_wait_ns), get_wait, empty, depth = 0, ticket;
    bool in_turn = true; /* so far every slot was ready */
    if (ended != 0) now = ended;
    for (ticket = head; ticket <= head + edge->mask; ++ticket) {
        const spdl__slot *slot = spdl__edge_slot(edge, ticket);
        const bool has = spdl__slot_has(slot, ticket);
        in_turn = in_turn && has;
        if (!has || spdl__slot_dropped(slot)) continue;
        depth += in_turn;
        if (ended == 0 && ticket - head >= size) /* has no place in the buffer yet */
            put_wait += spdl__slot_age(slot, now);
    }
    /* the reader may have gone on from `head`: what it took meanwhile still looks ready */
    depth = spdl__min(depth, node->row.kind == SPDL_KIND_PATH
                                 ? edge->window
                                 : size + (uint64_t)node->row.max_concurrency);
    if (depth > 0) { /* something is there: what looks open has just ended */
        empty = spdl__load_relaxed(&edge->empty_ns);
        get_wait = spdl__load_relaxed(&edge->get_wait_ns);
    } else {
        empty = spdl__gap_sum(&edge->gap_since, &edge->empty_ns, now);
        get_wait = spdl__gap_sum(&edge->wait_since, &edge->get_wait_ns, now);
    }
    if (edge == p->sink) get_wait = spdl__gap_sum(&p->wait_since, &p->wait_ns, now);
    stats->buffer_size = (int)size;
    stats->depth = (int)depth;
    stats->elapsed_ns = spdl__atomic_max(&edge->seen[0], now - p->start_ns);
    stats->put_wait_ns = spdl__atomic_max(&edge->seen[1], put_wait);
    /* what was read later than the clock may have gone on */
    stats->get_wait_ns = spdl__atomic_max(&edge->seen[2], spdl__min(get_wait, stats->elapsed_ns));
    stats->empty_ns = spdl__atomic_max(&edge->seen[3], spdl__min(empty, stats->elapsed_ns));
    stats->items = spdl__atomic_max(&edge->seen[5], items > 0 ? (uint64_t)items : 0);
}

/* The fields that follow from others, of a snapshot and of an interval. */
SPDL__COLD void spdl__stats_means(spdl_stats *stats) {
    int i;
    stats->step_mean_ns = stats->step_ns / spdl__max(stats->delivered, 1);
    for (i = 0; i < stats->stage_count; ++i) {
        spdl_edge_stats *edge = &stats->edge[i];
        edge->readiness =
            spdl__share(spdl__grown(edge->empty_ns, edge->elapsed_ns), edge->elapsed_ns);
    }
}

/* What the process has used. Reading it takes about 0.1 ms, and its clocks tick every 10 ms. After
   the end it is read once. */
SPDL__COLD void spdl__stats_process(spdl_pipeline *p, uint64_t ended, spdl_stats *stats) {
    const spdl_process_stats *first = &p->process_first, *last = &p->process_last;
    const uint64_t now = spdl_time_ns();
    if (first->time_ns == 0) return;
    spdl__spin_lock(&p->process_lock);
    if (ended ? last->time_ns < ended : now > last->time_ns + 10000000)
        spdl_process_read(&p->process_last);
    if (stats->delivered > 0 && spdl__load(&p->taker) == spdl__os_thread_id())
        spdl__taker_look(p);
    stats->trainer_runnable_ns = spdl__load_relaxed(&p->trainer_runnable_ns);
    stats->process_ns = spdl__grown(p->start_ns, last->time_ns);
    stats->process_cpu_ns = spdl__grown(first->cpu_ns, last->cpu_ns);
    stats->others_cpu_ns = spdl__grown(first->others_ns, last->others_ns);
    stats->minor_faults = spdl__grown(first->minor_faults, last->minor_faults);
    stats->cores_allowed = last->cores_allowed;
    stats->cores = last->cores;
    spdl__spin_unlock(&p->process_lock);
}

SPDL_API void spdl_pipeline_stats(const spdl_pipeline *pipeline, spdl_stats *stats) {
    spdl_pipeline *p = SPDL__CAST(spdl_pipeline *, SPDL__UNCONST(pipeline)); /* `seen` is written */
    const uint64_t ended = spdl__load_relaxed(&p->ended_ns);
    const uint64_t now = ended ? ended : spdl_time_ns();
    uint64_t runnable = 0, inside = 0; /* of it, in calls */
    uint64_t since, waited;            /* the first item */
    int i;
    /* a trainer that asks whether its buffer is full makes sure that it will be, see sink_hint */
    spdl__full_barrier();
    if (!ended) spdl__wake_rows(p, (uint32_t)1 << p->last->index);
    if (spdl__load_relaxed(&p->blame_since) != 0) spdl__blame_mark(p, false);
    memset(stats, 0, sizeof(*stats));
    stats->elapsed_ns = spdl__atomic_max(&p->sink->seen[4], now - p->start_ns);
    stats->workers = p->threaded ? p->workers : 0;
    if (p->rescue != NULL) stats->workers -= p->rescue->workers;
    if (p->doctor != NULL) stats->workers -= spdl__doctor_workers(p->doctor);
    stats->stage_count = p->count;
    stats->delivered = spdl__load_relaxed(&p->delivered);
    stats->first_item_ns = spdl__load_relaxed(&p->first_item_ns);
    for (i = 0; i < p->count; ++i) {
        spdl__stage_snapshot(p, &p->node[i], &stats->stage[i]);
        spdl__edge_snapshot(p, &p->node[i], now, &stats->edge[i]);
    }
    stats->wait_ns = stats->edge[p->count - 1].get_wait_ns;
    stats->ready_ns = spdl__load_relaxed(&p->ready_ns);
    stats->answer_wait_ns = spdl__load_relaxed(&p->answer_wait_ns);
    stats->step_device_ns = spdl__load_relaxed(&p->step_device_ns);
    stats->calls_device_ns = spdl__load_relaxed(&p->calls_device_ns);
    for (i = 0; i < p->workers; ++i) runnable += spdl__load_relaxed(&p->task[i].meter.waited_ns);
    for (i = 0; i < p->count; ++i) inside += stats->stage[i].runnable_ns;
    stats->workers_runnable_ns =
        spdl__atomic_max(&p->seen_runnable_ns, spdl__grown(inside, runnable));
    spdl__stats_process(p, ended, stats);
    since = spdl__grown(stats->first_item_ns, stats->elapsed_ns);
    waited = spdl__grown(spdl__load_relaxed(&p->first_wait_ns), stats->wait_ns);
    if (stats->delivered > 0 && stats->first_item_ns > 0)
        stats->step_ns = spdl__grown(waited, since);
    spdl__stats_means(stats);
}

/* --- text --- */

/* A text on its way into a buffer. The thread that has it writes every field. */
typedef struct spdl__text {
    char *buffer;
    size_t bytes;  /* of the buffer */
    size_t length; /* of the whole text, what does not fit as well */
    bool colour;   /* styles are written, too */
} spdl__text;

SPDL__COLD void spdl__text_add(spdl__text *text, const char *format, ...) SPDL__PRINTF(2, 3);
SPDL__COLD void spdl__text_add(spdl__text *text, const char *format, ...) {
    const size_t left = text->length < text->bytes ? text->bytes - text->length : 0;
    char none[1];
    va_list args;
    int length;
    va_start(args, format);
    length = vsnprintf(left ? text->buffer + text->length : none, left ? left : 1, format, args);
    va_end(args);
    if (length > 0) text->length += (size_t)length;
}

SPDL__COLD spdl__text spdl__text_start(char *buffer, size_t bytes) {
    const spdl__text text = { buffer, bytes, 0, false };
    if (bytes > 0) buffer[0] = '\0';
    return text;
}

/* The numbers of an escape sequence of a terminal: "1" is bold, "0" ends all styles. */
SPDL__COLD void spdl__text_style(spdl__text *text, const char *style) {
    if (text->colour) spdl__text_add(text, "\033[%sm", style);
}

/* The bytes of the UTF-8 character at `at`; 0 when it is none (RFC 3629). */
SPDL__COLD int spdl__utf8(const char *at) {
    const unsigned char *c = (const unsigned char *)at;
    const int length = c[0] < 0x80 ? 1 : c[0] < 0xc2 ? 0 : c[0] < 0xe0 ? 2 : c[0] < 0xf0 ? 3
                     : c[0] < 0xf5 ? 4 : 0;
    int i;
    for (i = 1; i < length; ++i)
        if ((c[i] & 0xc0) != 0x80) return 0;
    if (length == 3 && ((c[0] == 0xe0 && c[1] < 0xa0) || (c[0] == 0xed && c[1] > 0x9f))) return 0;
    if (length == 4 && ((c[0] == 0xf0 && c[1] < 0x90) || (c[0] == 0xf4 && c[1] > 0x8f))) return 0;
    return length;
}

/* A name in a column: cut or filled up to `width` characters, or as it is when that is -1. Control
   characters, and what is not UTF-8, become question marks. */
SPDL__COLD void spdl__text_name(spdl__text *text, const char *name, int width) {
    int left = width;
    for (; *name != '\0' && left != 0; --left) {
        const unsigned char *c = (const unsigned char *)name;
        const int length = spdl__utf8(name);
        const bool plain = length > 0 && c[0] >= 0x20 && c[0] != 0x7f &&
                           !(length == 2 && c[0] == 0xc2 && c[1] < 0xa0);
        spdl__text_add(text, "%.*s", plain ? length : 1, plain ? name : "?");
        name += length > 0 ? length : 1;
    }
    if (left > 0) spdl__text_add(text, "%*s", left, "");
}

/* The text of a number, until it is added to a text. */
typedef struct spdl__cell {
    char text[24];
} spdl__cell;

/* Three digits and one of four units, each 1000 times the one before. */
SPDL__COLD const char *spdl__scaled(spdl__cell *cell, double value, const char *const units[4],
                                    bool whole) {
    int unit = 0;
    while (value >= 999.5 && unit < 3) {
        value /= 1000;
        ++unit;
    }
    if (unit > 0) whole = false;
    (void)snprintf(cell->text, sizeof(cell->text), "%.*f%s",
                   whole || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2, value, units[unit]);
    return cell->text;
}

SPDL__COLD const char *spdl__duration(spdl__cell *cell, double ns) {
    static const char *const units[] = { " ns", " us", " ms", " s" };
    return spdl__scaled(cell, ns, units, true);
}

/* So many in so long, per second. */
SPDL__COLD const char *spdl__rate(spdl__cell *cell, uint64_t items, uint64_t ns) {
    static const char *const units[] = { "/s", "k/s", "M/s", "G/s" };
    const double rate = ns > 0 ? (double)items * 1e9 / (double)ns : 0;
    return spdl__scaled(cell, rate, units, items == 0 || ns == 0);
}

SPDL__COLD const char *spdl__percent(spdl__cell *cell, double share) {
    (void)snprintf(cell->text, sizeof(cell->text), "%.0f%%", 100 * share);
    return cell->text;
}

/* Hours, minutes and seconds as 1:02:03, but less than a minute as 12.3 s. */
SPDL__COLD const char *spdl__clock(spdl__cell *cell, double seconds) {
    const unsigned all = seconds < 1e9 ? (unsigned)(seconds + 0.5) : 1000000000;
    const unsigned hours = all / 3600, minutes = all / 60 % 60;
    const size_t bytes = sizeof(cell->text);
    if (seconds < 59.95)
        (void)snprintf(cell->text, bytes, "%.1f s", seconds);
    else if (hours == 0)
        (void)snprintf(cell->text, bytes, "%u:%02u", minutes, all % 60);
    else
        (void)snprintf(cell->text, bytes, "%u:%02u:%02u", hours, minutes, all % 60);
    return cell->text;
}

/* --- what the numbers say: for the verdict, the table, JSON and the reports --- */

#define SPDL__FED 0.05        /* a trainer that waits less has enough */
#define SPDL__LIMITING 0.5    /* a stage that is busy less is not the limit */
#define SPDL__SURE 0.8        /* one that is busy more is, wherever the trainer's item was */
#define SPDL__FAILING 0.05    /* a larger share of calls that fail is in the verdict */
#define SPDL__ALL_BUSY 0.93   /* workers that are busy more have no time for other calls */
#define SPDL__FULL 0.92       /* processors that are used more have none either */
#define SPDL__OTHERS 0.15     /* so much of a core that other programs use is worth a word */
#define SPDL__TAIL 10         /* so many times the median is a rare slow call */
#define SPDL__FAULT_NS 500    /* of a page that is mapped and zeroed, about */
#define SPDL__PART_SHOWN 0.05 /* of the time in calls: the table shows runq and block over this */

SPDL__COLD double spdl__smaller(double a, double b) { return a < b ? a : b; }
SPDL__COLD double spdl__larger(double a, double b) { return a > b ? a : b; }

/* Threads that run stages: with workers = 0 the trainer's. Those of rows with threads of their own
   are left out. */
SPDL__COLD int spdl__stats_threads(const spdl_stats *stats) {
    int threads = stats->workers, i;
    for (i = 0; i < stats->stage_count; ++i) threads -= stats->stage[i].threads;
    return threads > 0 ? threads : 1;
}

/* The most calls of a stage at a time. */
SPDL__COLD int spdl__stage_calls(const spdl_stats *stats, int i) {
    const spdl_stage_stats *stage = &stats->stage[i];
    const int threads = stage->threads > 0 ? stage->threads : spdl__stats_threads(stats);
    return stage->concurrency < threads || stage->deferred ? stage->concurrency : threads;
}

/* How busy a stage was: 1 when all the calls it may have were running all the time. */
SPDL__COLD double spdl__stage_load(const spdl_stats *stats, int i) {
    return spdl__share(stats->stage[i].busy_ns, stats->elapsed_ns) / spdl__stage_calls(stats, i);
}

SPDL__COLD int spdl__stats_busiest(const spdl_stats *stats) {
    int i, busiest = 0;
    for (i = 1; i < stats->stage_count; ++i)
        if (spdl__stage_load(stats, i) > spdl__stage_load(stats, busiest)) busiest = i;
    return busiest;
}

/* The share of time the trainer waited, the wait for the first item left out. */
SPDL__COLD double spdl__stats_waiting(const spdl_stats *stats) {
    return spdl__share(spdl__grown(stats->first_item_ns, stats->wait_ns),
                       spdl__grown(stats->first_item_ns, stats->elapsed_ns));
}

/* Whether items are pushed: what counts then is how soon they are answered. */
SPDL__COLD bool spdl__stats_pushed(const spdl_stats *stats) {
    return stats->stage_count > 0 && stats->stage[0].kind == SPDL_KIND_FEED;
}

/* What the numbers say, and what to write; 0: nothing. */
typedef struct spdl__finding {
    spdl_limit limit;
    int stage;      /* or -1 */
    int tie;        /* a row that is as busy, or -1 */
    int calls, workers, threads, buffer_size;
    double used, others; /* cores: of this process; of other programs, as far as they take ours */
    bool full;      /* the processors are used up */
} spdl__finding;

/* The processors. Too short a run says nothing, nor a reading from long after its end. */
SPDL__COLD void spdl__find_cores(const spdl_stats *stats, spdl__finding *f) {
    const double spare = (double)stats->cores - stats->cores_allowed;
    if (stats->process_ns < 50000000 || stats->process_ns / 5 > stats->elapsed_ns / 4 ||
        !(stats->cores_allowed > 0))
        return;
    f->used = spdl__share(stats->process_cpu_ns, stats->process_ns);
    f->others = spdl__share(stats->others_cpu_ns, stats->process_ns) - spdl__larger(spare, 0);
    f->others = spdl__larger(f->others, 0);
    f->full = f->used + f->others >= SPDL__FULL * stats->cores_allowed;
}

/* Time in calls that was not spent waiting for a processor. */
SPDL__COLD double spdl__stage_work(const spdl_stats *stats, int i) {
    const spdl_stage_stats *stage = &stats->stage[i];
    return (double)(stage->busy_ns - spdl__min(stage->runnable_ns, stage->busy_ns));
}

/* The time that the run takes at least if row `but` had all the calls it can use: by the rows, the
   trainer's steps, or the processors, whichever is the next limit. Of those that others use half
   could be had. */
SPDL__COLD double spdl__find_rest(const spdl_stats *stats, const spdl__finding *f, int but) {
    const double cores = spdl__larger(stats->cores_allowed - f->others, stats->cores_allowed / 2);
    double rest = spdl__larger((double)stats->step_ns,
                               f->used / cores * (double)stats->elapsed_ns);
    int i;
    for (i = 0; i < stats->stage_count; ++i)
        if (i != but)
            rest = spdl__larger(rest, spdl__stage_work(stats, i) / stats->stage[i].concurrency);
    return rest;
}

/* So many that the next limit is reached, but not over four times as many as now: what is further
   away is not known that well. One more where the processors are not known. */
SPDL__COLD int spdl__find_more(const spdl__finding *f, double work, double rest, int now) {
    const double wanted = rest > 0 ? spdl__smaller(work / rest, 4.0 * now) : 4.0 * now;
    return f->used <= 0 || wanted < now + 1 ? now + 1 : (int)(wanted + 0.9);
}

/* The threads that run `calls` of a row, if there are too few. */
SPDL__COLD void spdl__find_threads(const spdl_stats *stats, spdl__finding *f) {
    const spdl_stage_stats *stage = &stats->stage[f->stage];
    const int threads = spdl__stats_threads(stats);
    if (stage->deferred) return;
    if (stage->threads > 0)
        f->threads = f->calls > stage->threads ? f->calls : 0;
    else
        f->workers = f->calls > threads ? f->calls : 0;
}

/* All workers are in calls: so many that the next limit is reached. The busiest row gets more calls
   if it has no use for more workers without. */
SPDL__COLD void spdl__find_workers(const spdl_stats *stats, spdl__finding *f) {
    const spdl_stage_stats *stage = &stats->stage[f->stage];
    const double work = spdl__stage_work(stats, f->stage);
    const bool raise = !stage->alone && stage->kind == SPDL_KIND_PIPE &&
                       spdl__share(stage->busy_ns, stats->elapsed_ns) / stage->concurrency >=
                           SPDL__SURE;
    const double rest = spdl__find_rest(stats, f, raise ? f->stage : -1);
    const int threads = spdl__stats_threads(stats);
    double sum = 0;
    int i;
    for (i = 0; i < stats->stage_count; ++i)
        if (!stats->stage[i].deferred && stats->stage[i].threads == 0)
            sum += spdl__stage_work(stats, i);
    f->limit = SPDL_LIMIT_WORKERS;
    f->workers = stats->workers == 0 ? 1 : spdl__find_more(f, sum, rest, threads);
    if (raise && stats->workers > 0)
        f->calls = spdl__find_more(f, work, spdl__larger(rest, sum / f->workers),
                                   stage->concurrency);
}

/* How many results have to fit while one call takes as long as the slow ones. */
SPDL__COLD void spdl__find_buffer(const spdl_stats *stats, spdl__finding *f) {
    const spdl_stage_stats *stage = &stats->stage[f->stage];
    const int now = stats->edge[f->stage].buffer_size;
    const uint64_t slow = stage->p99_ns >= SPDL__TAIL * stage->p50_ns ? stage->p99_ns
                                                                      : stage->max_ns;
    double rate = stats->step_ns ? (double)stage->tasks / (double)stats->step_ns : 1;
    if (stage->concurrency > 1 && stage->p50_ns > 0)
        rate = spdl__smaller(rate, (stage->concurrency - 1) / (double)stage->p50_ns);
    f->limit = SPDL_LIMIT_ORDER;
    f->buffer_size = (int)spdl__smaller(spdl__larger((double)slow * rate, 2.0 * now), 4096);
}

/* Whether calls of a row that sleep do so for copies to a device. */
SPDL__COLD bool spdl__stage_copies(const spdl_stats *stats, int i) {
    const uint64_t blocked = stats->stage[i].blocked_ns;
    return blocked > stats->stage[i].busy_ns / 2 && stats->calls_device_ns > blocked / 2;
}

/* Whether a good part of what the rows compute is page faults. */
SPDL__COLD bool spdl__stats_faults(const spdl_stats *stats) {
    uint64_t cpu = 0;
    int i;
    for (i = 0; i < stats->stage_count; ++i) cpu += stats->stage[i].cpu_ns;
    return spdl__share(stats->minor_faults * SPDL__FAULT_NS, stats->process_ns) >
           0.3 * spdl__share(cpu, stats->elapsed_ns);
}

/* Why row f->stage, which is busy, is the limit. */
SPDL__COLD void spdl__find_class(const spdl_stats *stats, spdl__finding *f) {
    const spdl_stage_stats *stage = &stats->stage[f->stage];
    const double cpu = spdl__share(stage->cpu_ns, stats->elapsed_ns);
    const double blocked = spdl__share(stage->blocked_ns, stage->busy_ns);
    const double rest = spdl__find_rest(stats, f, f->stage);
    int i;
    f->limit = SPDL_LIMIT_CONCURRENCY;
    for (i = 0; i < stats->stage_count; ++i)
        if (i != f->stage && f->tie < 0 &&
            spdl__stage_load(stats, i) > SPDL__ALL_BUSY * spdl__stage_load(stats, f->stage))
            f->tie = i;
    if (spdl__stage_copies(stats, f->stage))
        f->limit = SPDL_LIMIT_DEVICE;
    else if (stage->kind == SPDL_KIND_SOURCE && stage->concurrency == 1)
        f->limit = SPDL_LIMIT_SOURCE;
    else if (stage->kind == SPDL_KIND_BRANCH || stage->alone)
        f->limit = SPDL_LIMIT_SERIAL;
    else if (stage->concurrency > 1 && cpu > 0.85 && cpu < 1.05 && blocked > 0.15)
        f->limit = SPDL_LIMIT_LOCK; /* one thread computes, the others sleep */
    else if (blocked > 0.5)
        f->limit = SPDL_LIMIT_IO;
    else if (stage->split_calls > 0 && spdl__stats_faults(stats))
        f->limit = SPDL_LIMIT_MEMORY;
    if (f->limit != SPDL_LIMIT_CONCURRENCY && f->limit != SPDL_LIMIT_IO) return;
    f->calls = spdl__find_more(f, spdl__stage_work(stats, f->stage), rest, stage->concurrency);
    spdl__find_threads(stats, f);
}

/* The processors are used up: by other programs, or by the row with the most CPU time. */
SPDL__COLD void spdl__find_full(const spdl_stats *stats, spdl__finding *f) {
    const int busiest = f->stage;
    uint64_t cpu = 0;
    int i;
    f->stage = 0;
    for (i = 0; i < stats->stage_count; ++i) {
        cpu += stats->stage[i].cpu_ns;
        if (stats->stage[i].cpu_ns > stats->stage[f->stage].cpu_ns) f->stage = i;
    }
    f->limit = SPDL_LIMIT_MACHINE;
    if (f->others >= SPDL__OTHERS && f->used < SPDL__FULL * stats->cores_allowed) {
        f->limit = SPDL_LIMIT_FOREIGN;
        f->stage = spdl__stage_load(stats, busiest) >= SPDL__LIMITING ? busiest : -1;
    } else if (spdl__share(cpu, stats->elapsed_ns) < f->used / 2) {
        f->limit = SPDL_LIMIT_NOT_KNOWN; /* it is not the stages that use them */
        f->stage = -1;
    }
}

/* Whether rare slow calls of a row explain what the trainer waited for it. */
SPDL__COLD bool spdl__stage_tail(const spdl_stage_stats *stage, uint64_t exposed) {
    return stage->exposed_ns > exposed / 2 && stage->p50_ns > 0 && stage->kind != SPDL_KIND_FEED &&
           stage->max_ns >= SPDL__TAIL * stage->p50_ns &&
           spdl__grown(stage->p50_ns * stage->tasks, stage->busy_ns) > stage->exposed_ns / 2;
}

/* The trainer waits, or requests made way. A row that is not that busy is the limit if it has one
   call at a time, and the trainer's item was mostly in it. */
SPDL__COLD void spdl__find_wait(const spdl_stats *stats, spdl__finding *f) {
    const int busiest = spdl__stats_busiest(stats);
    const double load = spdl__stage_load(stats, busiest);
    const spdl_stage_stats *stage = &stats->stage[busiest];
    const bool sleeps = spdl__share(stage->blocked_ns, stage->busy_ns) > 0.5;
    uint64_t busy = 0, exposed = 0;
    bool limits = load >= (spdl__stats_pushed(stats) ? SPDL__LIMITING : SPDL__SURE), tail;
    int i, most = 0;
    for (i = 0; i < stats->stage_count; ++i) {
        stage = &stats->stage[i];
        busy += stage->deferred || stage->threads > 0 ? 0 : stage->busy_ns;
        exposed += stage->exposed_ns + stage->exposed_idle_ns;
        if (stage->exposed_ns > stats->stage[most].exposed_ns) most = i;
    }
    stage = &stats->stage[most];
    tail = spdl__stage_tail(stage, exposed);
    if (load >= SPDL__LIMITING && busiest == most && stage->concurrency == 1 &&
        stage->exposed_ns > exposed / 2 && !tail)
        limits = true;
    f->stage = busiest;
    if (f->full && !(limits && sleeps))
        spdl__find_full(stats, f);
    else if (stats->workers == 0 ||
             spdl__share(busy, stats->elapsed_ns) >= SPDL__ALL_BUSY * spdl__stats_threads(stats))
        spdl__find_workers(stats, f);
    else if (limits)
        spdl__find_class(stats, f);
    else if (tail && (f->stage = most, stage->in_order || stage->concurrency == 1))
        spdl__find_buffer(stats, f);
    else if (stats->stage[f->stage = most].kind == SPDL_KIND_BATCH &&
             stage->exposed_ns > exposed / 2)
        f->limit = SPDL_LIMIT_BATCH;
    else
        f->stage = -1;
}

SPDL__COLD spdl__finding spdl__find(const spdl_stats *stats) {
    spdl__finding f;
    const int busiest = spdl__stats_busiest(stats);
    memset(&f, 0, sizeof(f));
    f.stage = f.tie = -1;
    if (stats->delivered == 0) return f;
    spdl__find_cores(stats, &f);
    if (spdl__stats_pushed(stats)) {
        if (stats->stage[0].skips > 0) f.limit = SPDL_LIMIT_REQUESTS;
        if (spdl__stage_load(stats, busiest) >= SPDL__LIMITING) f.stage = busiest;
    } else if (spdl__stats_waiting(stats) >= SPDL__FED) {
        spdl__find_wait(stats, &f);
    } else if (spdl__share(stats->step_device_ns, stats->step_ns) >= SPDL__FED) {
        f.limit = SPDL_LIMIT_DEVICE;
    } else if (spdl__share(stats->trainer_runnable_ns, stats->step_ns) >= SPDL__FED) {
        f.limit = f.others > f.used ? SPDL_LIMIT_FOREIGN : SPDL_LIMIT_HARM;
    } else {
        f.limit = SPDL_LIMIT_TRAINER;
    }
    return f;
}

SPDL_API spdl_limit spdl_stats_limit(const spdl_stats *stats, int *stage) {
    const spdl__finding f = spdl__find(stats);
    if (stage != NULL) *stage = f.stage;
    return f.limit;
}

/* --- the verdict --- */

SPDL__COLD void spdl__text_stage(spdl__text *text, const char *before, const spdl_stats *stats,
                                 int i) {
    spdl__text_add(text, "%sstage %d '", before, i);
    spdl__text_name(text, stats->stage[i].name, -1);
    spdl__text_add(text, "'");
}

/* The stage with the largest share of calls that fail, if that is too large to go unseen. */
SPDL__COLD void spdl__verdict_of_failures(spdl__text *text, const spdl_stats *stats) {
    double most = SPDL__FAILING;
    int i, stage = -1;
    for (i = 0; i < stats->stage_count; ++i) {
        const double share = spdl__share(stats->stage[i].failures, stats->stage[i].tasks);
        if (share <= most) continue;
        most = share;
        stage = i;
    }
    if (stage < 0) return;
    spdl__text_add(text, " %.0f %% of the calls of ", 100 * most);
    spdl__text_stage(text, "", stats, stage);
    spdl__text_add(text, " fail.");
}

/* Of a pipeline with a feed: where most of the time from push to answer went. */
SPDL__COLD void spdl__verdict_of_answers(spdl__text *text, const spdl_stats *stats) {
    const spdl_stage_stats *feed = &stats->stage[0];
    const double half = 0.5 * (double)feed->mean_ns * (double)stats->delivered;
    const int busiest = spdl__stats_busiest(stats);
    const double load = spdl__stage_load(stats, busiest);
    bool batches = false;
    uint64_t busy = 0;
    spdl__cell cell[2];
    int i;
    for (i = 0; i < stats->stage_count; ++i) {
        busy += stats->stage[i].busy_ns;
        batches = batches || stats->stage[i].kind == SPDL_KIND_BATCH;
    }
    spdl__text_add(text, "Answers took %s (p50) to %s (p99), most of it ",
                   spdl__duration(&cell[0], (double)feed->p50_ns),
                   spdl__duration(&cell[1], (double)feed->p99_ns));
    if ((double)stats->answer_wait_ns > half)
        spdl__text_add(text, "until they were taken.");
    else if ((double)busy > half)
        spdl__text_add(text, "in calls%s", feed->skips ? "." : ": no request waited long.");
    else if (batches && load < SPDL__LIMITING)
        spdl__text_add(text, "until a batch was full.");
    else {
        spdl__text_stage(text, "waiting in front of ", stats, busiest);
        if (feed->skips == 0) spdl__text_add(text, ", busy %.0f %% of the time", 100 * load);
        spdl__text_add(text, ".");
    }
}

static const char spdl__ask_doctor[] = "run the doctor (SPDL_DOCTOR=1)";
static const char spdl__send_less[] = "Send less: bytes instead of floats, converted there";

/* What the calls of a stage do, where it was measured. */
SPDL__COLD const char *spdl__stage_does(const spdl_stage_stats *stage) {
    if (stage->split_calls == 0) return "";
    return spdl__share(stage->blocked_ns, stage->busy_ns) > 0.5 ? ", asleep"
           : spdl__share(stage->cpu_ns, stage->busy_ns) > 0.5   ? ", computing" : "";
}

/* The settings to write, as "Write .concurrency = 3 and workers = 5." */
SPDL__COLD void spdl__verdict_write(spdl__text *text, const spdl_stats *stats,
                                    const spdl__finding *f) {
    const struct {
        const char *name;
        int value;
    } fields[] = { { ".concurrency", f->calls }, { ".threads", f->threads },
                   { "workers", f->workers }, { ".buffer_size", f->buffer_size } };
    const char *before = " Write ";
    int i;
    for (i = 0; i < 4; ++i) {
        if (fields[i].value == 0) continue;
        spdl__text_add(text, "%s%s = %d", before, fields[i].name, fields[i].value);
        before = " and ";
    }
    if (f->tie >= 0 && f->calls > 0) spdl__text_stage(text, ", and more for ", stats, f->tie);
    if (f->tie >= 0 && f->calls > 0) spdl__text_add(text, ", which is as busy");
    if (f->calls > 0 && stats->stage[f->stage].concurrency == 1)
        spdl__text_add(text, ", if its function may run on several threads at a time");
}

/* What to do about a stage. */
SPDL__COLD void spdl__verdict_cure(spdl__text *text, const spdl_stats *stats,
                                   const spdl__finding *f) {
    const spdl_stage_stats *stage = &stats->stage[f->stage];
    spdl__verdict_write(text, stats, f);
    if (f->limit == SPDL_LIMIT_WORKERS && stage->blocked_ns > stage->busy_ns / 2)
        spdl__text_add(text, ", or give it .threads = %d of its own",
                       f->calls > 0 ? f->calls : stage->concurrency);
    else if (f->limit == SPDL_LIMIT_IO && stage->concurrency > 1)
        spdl__text_add(text, "; if its calls wait for a lock that will not help: %s",
                       spdl__ask_doctor);
    else if (f->limit == SPDL_LIMIT_ORDER && stage->concurrency > 1)
        spdl__text_add(text, ", or .output_order = SPDL_ORDER_COMPLETION");
    else if (f->limit == SPDL_LIMIT_LOCK)
        spdl__text_add(text, " It may be a lock: %s", spdl__ask_doctor);
    else if (f->limit == SPDL_LIMIT_SOURCE)
        spdl__text_add(text, " Move work from the source to a stage");
    else if (f->limit == SPDL_LIMIT_SERIAL)
        spdl__text_add(text, " Make it cheaper, or split the row in two");
    else if (f->limit == SPDL_LIMIT_MEMORY)
        spdl__text_add(text, " Use memory again instead of allocating it for each item, such as "
                             "by spdl_buffer; or else %s", spdl__ask_doctor);
    else if (f->limit == SPDL_LIMIT_DEVICE)
        spdl__text_add(text, " %s", spdl__send_less);
    spdl__text_add(text, ".");
}

/* A row, or all workers, that the trainer or requests wait for. */
SPDL__COLD void spdl__verdict_of_row(spdl__text *text, const spdl_stats *stats,
                                     const spdl__finding *f) {
    const spdl_stage_stats *stage = &stats->stage[f->stage];
    const double load = 100 * spdl__stage_load(stats, f->stage);
    spdl__cell cell[2];
    if (f->limit == SPDL_LIMIT_WORKERS) {
        const int threads = spdl__stats_threads(stats);
        if (stats->workers == 0)
            spdl__text_add(text, "the only thread was busy, as workers is 0");
        else if (threads == 1)
            spdl__text_add(text, "the only worker was busy");
        else
            spdl__text_add(text, "all %d workers were busy", threads);
        spdl__text_stage(text, ", most of all with ", stats, f->stage);
        spdl__text_add(text, "%s.", spdl__stage_does(stage));
    } else if (f->limit == SPDL_LIMIT_ORDER) {
        spdl__text_add(text, "rare slow calls of");
        spdl__text_stage(text, " ", stats, f->stage);
        spdl__text_add(text, " took up to %s, where half take %s, and held back the rest.",
                       spdl__duration(&cell[0], (double)stage->max_ns),
                       spdl__duration(&cell[1], (double)stage->p50_ns));
    } else {
        spdl__text_stage(text, "", stats, f->stage);
        spdl__text_add(text, " was busy %.0f %% of the time (concurrency %d)%s", load,
                       stage->concurrency, spdl__stage_does(stage));
        if (f->limit == SPDL_LIMIT_MEMORY)
            spdl__text_add(text, ", with %.0f page faults for each item of the trainer",
                           spdl__share(stats->minor_faults, stats->delivered));
        else if (f->limit == SPDL_LIMIT_SERIAL)
            spdl__text_add(text, ", one call at a time");
        else if (f->limit == SPDL_LIMIT_LOCK)
            spdl__text_add(text, " on one processor at a time");
        else if (f->limit == SPDL_LIMIT_DEVICE)
            spdl__text_add(text, ", waiting for copies to the device");
        spdl__text_add(text, ".");
    }
    spdl__verdict_cure(text, stats, f);
}

/* The trainer waits, and no row is to blame; or the processors are. */
SPDL__COLD void spdl__verdict_of_none(spdl__text *text, const spdl_stats *stats,
                                      const spdl__finding *f) {
    const int busiest = spdl__stats_busiest(stats);
    const uint64_t each = stats->elapsed_ns / spdl__max(stats->delivered, 1);
    if (f->limit == SPDL_LIMIT_MACHINE) {
        spdl__text_add(text, "the processors are used up (%.2f of %.3g)", f->used + f->others,
                       stats->cores_allowed);
        spdl__text_stage(text, ", most of all by ", stats, f->stage);
        spdl__text_add(text, ". More concurrency does not help: make that stage cheaper.");
    } else if (f->limit == SPDL_LIMIT_FOREIGN) {
        spdl__text_add(text, "other programs used %.2f of %.3g processors", f->others,
                       stats->cores_allowed);
        if (f->stage >= 0) {
            spdl__text_stage(text, ", and ", stats, f->stage);
            spdl__text_add(text, " was busy %.0f %% of the time",
                           100 * spdl__stage_load(stats, f->stage));
        }
        spdl__text_add(text, ". Run less beside it, and look again.");
    } else if (f->limit == SPDL_LIMIT_BATCH) {
        spdl__text_stage(text, "until ", stats, f->stage);
        spdl__text_add(text, " had a batch full. Write a smaller size, or a larger buffer_size.");
    } else if (f->full) {
        spdl__text_add(text, "the processors are used up (%.2f of %.3g), mostly outside of the "
                             "stages. To know more, %s.", f->used + f->others,
                       stats->cores_allowed, spdl__ask_doctor);
    } else {
        spdl__text_add(text, "no stage was busy more than %.0f %% of the time. What holds it back "
                             "is not known: %s", 100 * spdl__stage_load(stats, busiest),
                       spdl__ask_doctor);
        if (each < 50000)
            spdl__text_add(text, ", or try a larger buffer_size (16 to 64), as items are short");
        spdl__text_add(text, ".");
    }
}

SPDL__COLD void spdl__verdict_of_feed(spdl__text *text, const spdl_stats *stats,
                                      spdl__finding f) {
    const spdl_stage_stats *feed = &stats->stage[0];
    const spdl_edge_stats *sink = &stats->edge[stats->stage_count - 1];
    if (feed->skips > 0) {
        spdl__text_add(text, "%llu of %llu requests made way: ", (spdl__llu)feed->skips,
                       (spdl__llu)feed->tasks);
        spdl__find_wait(stats, &f);
        if (f.limit == SPDL_LIMIT_MACHINE || f.limit == SPDL_LIMIT_FOREIGN)
            spdl__verdict_of_none(text, stats, &f);
        else if (f.limit != SPDL_LIMIT_NOT_KNOWN && f.limit != SPDL_LIMIT_REQUESTS &&
                 f.limit != SPDL_LIMIT_ORDER && f.limit != SPDL_LIMIT_BATCH)
            spdl__verdict_of_row(text, stats, &f);
        else
            spdl__text_add(text, spdl__share(sink->put_wait_ns, sink->elapsed_ns) >= SPDL__LIMITING
                                     ? "answers were not taken in time."
                                 : stats->edge[0].readiness >= SPDL__LIMITING
                                     ? "the workers lacked processor time."
                                     : "more came at once than its buffer_size.");
        spdl__text_add(text, " ");
    }
    if (stats->delivered > 0)
        spdl__verdict_of_answers(text, stats);
    else
        spdl__text_add(text, "Nothing has been %s yet.", feed->tasks ? "answered" : "pushed");
}

SPDL__COLD void spdl__verdict_of_waits(spdl__text *text, const spdl_stats *stats) {
    const double waiting = 100 * spdl__stats_waiting(stats);
    const double late = 100 * spdl__share(stats->trainer_runnable_ns, stats->step_ns);
    const spdl__finding f = spdl__find(stats);
    if (spdl__stats_pushed(stats)) {
        spdl__verdict_of_feed(text, stats, f);
    } else if (stats->delivered == 0) {
        spdl__text_add(text, "Nothing has been delivered yet.");
    } else if (waiting >= 100 * SPDL__FED) {
        spdl__text_add(text, "The trainer waited %.0f %% of its time: ", waiting);
        if (f.stage < 0 || f.limit == SPDL_LIMIT_MACHINE || f.limit == SPDL_LIMIT_BATCH ||
            f.limit == SPDL_LIMIT_FOREIGN)
            spdl__verdict_of_none(text, stats, &f);
        else
            spdl__verdict_of_row(text, stats, &f);
    } else {
        spdl__text_add(text, "Loading is fast enough: the trainer waited %.1f %% of its time",
                       waiting);
        if (f.limit == SPDL_LIMIT_TRAINER)
            spdl__text_add(text, ". There is nothing to gain: stop tuning.");
        else if (f.limit == SPDL_LIMIT_DEVICE)
            spdl__text_add(text, ". But for %.0f %% of its own steps it waited for copies to the "
                                 "device. %s.",
                           100 * spdl__share(stats->step_device_ns, stats->step_ns),
                           spdl__send_less);
        else
            spdl__text_add(text, ". For %.0f %% of its own steps other %s had its processor: "
                                 "%s.", late,
                           f.limit == SPDL_LIMIT_HARM ? "threads" : "programs",
                           f.limit == SPDL_LIMIT_HARM ? "use fewer workers, or .policy.polite"
                                                      : "run less beside it");
    }
}

SPDL__COLD void spdl__verdict(spdl__text *text, const spdl_stats *stats) {
    spdl__verdict_of_waits(text, stats);
    spdl__verdict_of_failures(text, stats);
}

/* --- the table --- */

/* One row, 100 columns wide with the mark before it. */
SPDL__COLD void spdl__stats_row(spdl__text *text, const spdl_stats *stats, int i) {
    const spdl_stage_stats *stage = &stats->stage[i];
    const uint64_t times[] = { stage->p50_ns, stage->p99_ns, stage->max_ns };
    const double waits = spdl__share(stage->exposed_ns + stage->exposed_idle_ns, stats->wait_ns);
    const double runq = spdl__share(stage->runnable_ns, stage->busy_ns);
    const double block = spdl__share(stage->blocked_ns, stage->busy_ns);
    const bool calls = stage->kind == SPDL_KIND_SOURCE || stage->kind == SPDL_KIND_PIPE ||
                       stage->kind == SPDL_KIND_BRANCH;
    const bool timed = calls || stage->kind == SPDL_KIND_FEED;
    spdl__cell c[4];
    int k;
    spdl__text_name(text, stage->name, 18);
    spdl__text_add(text, " %4d %9llu %7s", stage->concurrency, (spdl__llu)stage->tasks,
                   spdl__rate(&c[0], stage->tasks, stats->elapsed_ns));
    for (k = 0; k < 3; ++k)
        spdl__text_add(text, " %7s", timed ? spdl__duration(&c[k], (double)times[k]) : "-");
    spdl__text_add(text, " %4s", calls ? spdl__percent(&c[0], spdl__stage_load(stats, i)) : "-");
    spdl__text_add(text, " %4s %4s %5s", stage->split_calls == 0 ? "-" : spdl__percent(&c[1],
                   spdl__share(stage->cpu_ns, stage->busy_ns)),
                   runq > SPDL__PART_SHOWN ? spdl__percent(&c[2], runq) : "",
                   block > SPDL__PART_SHOWN ? spdl__percent(&c[3], block) : "");
    spdl__text_add(text, " %5s %5s", spdl__percent(&c[0], stats->edge[i].readiness),
                   waits > 0.005 ? spdl__percent(&c[1], spdl__smaller(waits, 1)) : "");
}

SPDL__COLD void spdl__stats_rows(spdl__text *text, const spdl_stats *stats) {
    static const char *const losses[] = { "failed", "retried", "skipped", "freed" };
    const int limit = spdl__find(stats).stage;
    int i, k;
    spdl__text_style(text, "2");
    spdl__text_add(text, "  stage              conc     tasks    rate     p50     p99     max"
                         " busy  cpu runq block ready waits\n");
    for (i = 0; i < stats->stage_count; ++i) {
        spdl__text_style(text, i == limit ? "1;33" : "0");
        spdl__text_add(text, i == limit ? "> " : "  ");
        spdl__stats_row(text, stats, i);
        spdl__text_style(text, "0");
        spdl__text_add(text, "\n");
    }
    for (i = 0; i < stats->stage_count; ++i) {
        const spdl_stage_stats *s = &stats->stage[i];
        const uint64_t counts[] = { s->failures, s->retries, s->skips, s->freed };
        bool any = false;
        for (k = 0; k < 4; ++k) {
            if (counts[k] == 0) continue;
            spdl__text_add(text, any ? "," : "  ");
            if (!any) spdl__text_name(text, s->name, -1);
            spdl__text_add(text, "%s %llu %s", any ? "" : ":", (spdl__llu)counts[k], losses[k]);
            any = true;
        }
        if (any) spdl__text_add(text, "\n");
    }
}

SPDL_API int spdl_stats_verdict(const spdl_stats *stats, char *buffer, size_t bytes) {
    spdl__text text = spdl__text_start(buffer, bytes);
    spdl__verdict(&text, stats);
    return (int)text.length;
}

SPDL_API int spdl_stats_text(const spdl_stats *stats, char *buffer, size_t bytes) {
    spdl__text text = spdl__text_start(buffer, bytes);
    spdl__cell cell[4];
    spdl__verdict(&text, stats);
    spdl__text_add(&text, "\n");
    if (spdl__stats_pushed(stats))
        spdl__text_add(&text, "%llu requests, ", (spdl__llu)stats->stage[0].tasks);
    spdl__text_add(&text,
                   "%llu items in %s, the first after %s, %s, a step of %s, %d worker%s\n\n",
                   (spdl__llu)stats->delivered,
                   spdl__duration(&cell[0], (double)stats->elapsed_ns),
                   spdl__duration(&cell[1], (double)stats->first_item_ns),
                   spdl__rate(&cell[2], stats->delivered, stats->elapsed_ns),
                   spdl__duration(&cell[3], (double)stats->step_mean_ns), stats->workers,
                   stats->workers == 1 ? "" : "s");
    spdl__stats_rows(&text, stats);
    return (int)text.length;
}

/* The fields that a row sets, in its line of a drawing. */
SPDL__COLD void spdl__row_fields(spdl__text *text, const spdl_stage *row) {
    static const char *const merges[] = { "", "in turn", "joins batches", "merge_fn",
                                           "by weight" };
    const struct {
        const char *name;
        int value;
    } fields[] = {
        { "size", row->size },
        { "concurrency", row->concurrency == 1 ? 0 : row->concurrency },
        { "max_concurrency", row->max_concurrency },
        { "threads", row->threads },
        { "buffer_size", row->buffer_size },
        { "reorder_window", row->reorder_window },
    };
    const char *before = "  ";
    size_t k;
    for (k = 0; k < sizeof(fields) / sizeof(fields[0]); ++k) {
        if (fields[k].value == 0) continue;
        spdl__text_add(text, "%s%s %d", before, fields[k].name, fields[k].value);
        before = ", ";
    }
    if (row->output_order == SPDL_ORDER_COMPLETION)
        spdl__text_add(text, "%scompletion order", before);
    if (row->merge_order > SPDL_MERGE_READY && row->merge_order <= SPDL_MERGE_WEIGHTED)
        spdl__text_add(text, "%s%s", before, merges[row->merge_order]);
    if (row->weight != 0) spdl__text_add(text, "%sweight %g", before, row->weight);
}

SPDL_API int spdl_rows_text(const spdl_stage *stages, size_t stage_count, char *buffer,
                            size_t bytes) {
    spdl__text text = spdl__text_start(buffer, bytes);
    int depth = stage_count > 0 && stages[0].kind == SPDL_KIND_PATH, i, k; /* several sources */
    for (i = 0; i < (int)stage_count; ++i) {
        const spdl_stage *row = &stages[i];
        if (row->kind == SPDL_KIND_MERGE && depth > 0) --depth;
        spdl__text_add(&text, "%2d  ", i);
        for (k = 1; k <= depth; ++k)
            spdl__text_add(&text, k == depth && row->kind == SPDL_KIND_PATH ? "+- " : "|  ");
        if (row->name == NULL && row->fn == NULL && row->next == NULL) { /* named as its kind */
            spdl__text_add(&text, "%s", spdl__kind_name(row->kind));
        } else {
            spdl__text_add(&text, "%-6s  ", spdl__kind_name(row->kind));
            spdl__text_name(&text, spdl__row_name(row), -1);
        }
        spdl__row_fields(&text, row);
        spdl__text_add(&text, "\n");
        if (row->kind == SPDL_KIND_BRANCH) ++depth;
    }
    return (int)text.length;
}

SPDL__COLD void spdl__progress(spdl__text *text, const spdl_stats *stats, uint64_t length,
                               bool ended) {
    const uint64_t since = spdl__grown(stats->first_item_ns, stats->elapsed_ns);
    const uint64_t left = spdl__grown(stats->delivered, length);
    spdl__cell cell;
    spdl__text_add(text, "%llu", (spdl__llu)stats->delivered);
    if (length > 0)
        spdl__text_add(text, " of %llu items (%.0f %%)", (spdl__llu)length,
                       100 * (double)spdl__min(stats->delivered, length) / (double)length);
    else
        spdl__text_add(text, " items");
    spdl__text_add(text, ", %s", spdl__rate(&cell, stats->delivered, stats->elapsed_ns));
    if (!ended && left > 0 && stats->delivered > 1)
        spdl__text_add(text, ", %s left",
                       spdl__clock(&cell, 1e-9 * (double)since / (double)(stats->delivered - 1) *
                                              (double)left));
    if (stats->delivered > 0 && spdl__stats_pushed(stats))
        spdl__text_add(text, ", p99 %s", spdl__duration(&cell, (double)stats->stage[0].p99_ns));
    else if (stats->delivered > 0)
        spdl__text_add(text, ", waited %.0f %%", 100 * spdl__stats_waiting(stats));
}

SPDL_API int spdl_stats_progress(const spdl_stats *stats, uint64_t length, char *buffer,
                                 size_t bytes) {
    spdl__text text = spdl__text_start(buffer, bytes);
    spdl__progress(&text, stats, length, false);
    return (int)text.length;
}

/* --- JSON --- */

/* A counter and its name. */
typedef struct spdl__field {
    const char *name;
    size_t at; /* offset in its struct */
} spdl__field;

#define SPDL__FIELD(type, field) { #field, offsetof(type, field) }
#define SPDL__FIELDS_END { NULL, 0 }

/* What is written of each struct, in this order, and subtracted for an interval. */
static const spdl__field spdl__stats_fields[] = {
    SPDL__FIELD(spdl_stats, elapsed_ns),
    SPDL__FIELD(spdl_stats, delivered),
    SPDL__FIELD(spdl_stats, first_item_ns),
    SPDL__FIELD(spdl_stats, wait_ns),
    SPDL__FIELD(spdl_stats, ready_ns),
    SPDL__FIELD(spdl_stats, workers_runnable_ns),
    SPDL__FIELD(spdl_stats, step_ns),
    SPDL__FIELD(spdl_stats, step_mean_ns),
    SPDL__FIELD(spdl_stats, answer_wait_ns),
    SPDL__FIELD(spdl_stats, trainer_runnable_ns),
    SPDL__FIELD(spdl_stats, step_device_ns),
    SPDL__FIELD(spdl_stats, calls_device_ns),
    SPDL__FIELD(spdl_stats, process_ns),
    SPDL__FIELD(spdl_stats, process_cpu_ns),
    SPDL__FIELD(spdl_stats, others_cpu_ns),
    SPDL__FIELD(spdl_stats, minor_faults),
    SPDL__FIELDS_END
};
static const spdl__field spdl__stage_fields[] = {
    SPDL__FIELD(spdl_stage_stats, tasks),
    SPDL__FIELD(spdl_stage_stats, failures),
    SPDL__FIELD(spdl_stage_stats, skips),
    SPDL__FIELD(spdl_stage_stats, retries),
    SPDL__FIELD(spdl_stage_stats, freed),
    SPDL__FIELD(spdl_stage_stats, busy_ns),
    SPDL__FIELD(spdl_stage_stats, exposed_ns),
    SPDL__FIELD(spdl_stage_stats, exposed_idle_ns),
    SPDL__FIELD(spdl_stage_stats, mean_ns),
    SPDL__FIELD(spdl_stage_stats, p50_ns),
    SPDL__FIELD(spdl_stage_stats, p90_ns),
    SPDL__FIELD(spdl_stage_stats, p99_ns),
    SPDL__FIELD(spdl_stage_stats, max_ns),
    SPDL__FIELD(spdl_stage_stats, cpu_ns),
    SPDL__FIELD(spdl_stage_stats, runnable_ns),
    SPDL__FIELD(spdl_stage_stats, blocked_ns),
    SPDL__FIELD(spdl_stage_stats, split_calls),
    SPDL__FIELD(spdl_stage_stats, bytes_in),
    SPDL__FIELD(spdl_stage_stats, bytes_out),
    SPDL__FIELDS_END
};
static const spdl__field spdl__edge_fields[] = {
    SPDL__FIELD(spdl_edge_stats, items),
    SPDL__FIELD(spdl_edge_stats, put_wait_ns),
    SPDL__FIELD(spdl_edge_stats, get_wait_ns),
    SPDL__FIELD(spdl_edge_stats, empty_ns),
    SPDL__FIELD(spdl_edge_stats, elapsed_ns),
    SPDL__FIELDS_END
};

/* The inside of a JSON string, which may stand in the script of a page. Bytes that are not UTF-8
   become U+FFFD. */
SPDL__COLD void spdl__json_escape(spdl__text *text, const char *string) {
    while (*string != '\0') {
        const int length = spdl__utf8(string);
        const char c = *string;
        if (length == 0)
            spdl__text_add(text, "\\ufffd");
        else if (length == 1 && ((unsigned char)c < 0x20 || c == 0x7f || strchr("\"\\<>&'", c)))
            spdl__text_add(text, "\\u%04x", (unsigned)c);
        else
            spdl__text_add(text, "%.*s", length, string);
        string += length > 0 ? length : 1;
    }
}

SPDL__COLD void spdl__json_string(spdl__text *text, const char *string) {
    spdl__text_add(text, "\"");
    spdl__json_escape(text, string);
    spdl__text_add(text, "\"");
}

/* A number with three decimals, and a point whatever the locale. */
SPDL__COLD void spdl__json_real(spdl__text *text, const char *name, double value) {
    const spdl__llu thousandths = value > 0 && value < 1e15 ? (spdl__llu)(value * 1000 + 0.5) : 0;
    spdl__text_add(text, ",\"%s\":%llu.%03u", name, thousandths / 1000,
                   (unsigned)(thousandths % 1000));
}

/* The counter at an offset of a struct. */
SPDL__COLD uint64_t spdl__field_at(const void *stats, size_t at) {
    uint64_t value;
    memcpy(&value, (const char *)stats + at, sizeof(value));
    return value;
}

SPDL__COLD void spdl__json_fields(spdl__text *text, const void *stats, const spdl__field *field) {
    for (; field->name != NULL; ++field)
        spdl__text_add(text, ",\"%s\":%llu", field->name,
                       (spdl__llu)spdl__field_at(stats, field->at));
}

SPDL__COLD void spdl__json_stage(spdl__text *text, const spdl_stats *stats, int i) {
    static const char *const kinds[] = { "none", "source", "pipe",   "batch", "sink",
                                         "feed", "branch", "path", "merge" };
    const spdl_stage_stats *stage = &stats->stage[i];
    spdl__text_add(text, "%s{\"name\":", i ? "," : "");
    spdl__json_string(text, stage->name);
    spdl__text_add(text, ",\"kind\":\"%s\",\"concurrency\":%d,\"threads\":%d,\"in_flight\":%d"
                   ",\"deferred\":%s,\"alone\":%s,\"in_order\":%s,\"runnable_known\":%s",
                   (unsigned)stage->kind < 9 ? kinds[stage->kind] : "other", stage->concurrency,
                   stage->threads, stage->in_flight, stage->deferred ? "true" : "false",
                   stage->alone ? "true" : "false", stage->in_order ? "true" : "false",
                   stage->runnable_known ? "true" : "false");
    spdl__json_real(text, "load", spdl__stage_load(stats, i));
    spdl__json_fields(text, stage, spdl__stage_fields);
    spdl__text_add(text, "}");
}

SPDL__COLD void spdl__json_edge(spdl__text *text, const spdl_stats *stats, int i) {
    const spdl_edge_stats *edge = &stats->edge[i];
    spdl__text_add(text, "%s{\"buffer_size\":%d,\"depth\":%d", i ? "," : "", edge->buffer_size,
                   edge->depth);
    spdl__json_real(text, "readiness", edge->readiness);
    spdl__json_fields(text, edge, spdl__edge_fields);
    spdl__text_add(text, "}");
}

SPDL__COLD void spdl__json_stats(spdl__text *text, const spdl_stats *stats) {
    static const char *const classes[] = {
        "not known", "trainer", "concurrency", "io", "machine", "lock", "serial", "order", "batch",
        "workers", "memory", "device", "source", "harm", "foreign", "requests"
    };
    char verdict[768];
    int i, limit;
    (void)spdl_stats_verdict(stats, verdict, sizeof(verdict));
    spdl__text_add(text, "{\"verdict\":");
    spdl__json_string(text, verdict);
    spdl__text_add(text, ",\"class\":\"%s\"", classes[spdl_stats_limit(stats, &limit)]);
    spdl__text_add(text, ",\"limit\":%d,\"workers\":%d,\"cores\":%d", limit, stats->workers,
                   stats->cores);
    spdl__json_real(text, "cores_allowed", stats->cores_allowed);
    spdl__json_fields(text, stats, spdl__stats_fields);
    spdl__text_add(text, ",\"stages\":[");
    for (i = 0; i < stats->stage_count; ++i) spdl__json_stage(text, stats, i);
    spdl__text_add(text, "],\"edges\":[");
    for (i = 0; i < stats->stage_count; ++i) spdl__json_edge(text, stats, i);
    spdl__text_add(text, "]}");
}

SPDL_API int spdl_stats_json(const spdl_stats *stats, char *buffer, size_t bytes) {
    spdl__text text = spdl__text_start(buffer, bytes);
    spdl__json_stats(&text, stats);
    return (int)text.length;
}

/* ============================================================================================= */
/* >>report-impl
   One thread for each pipeline that was asked for reports: it sleeps, takes snapshots as anybody
   may, and writes. Only destroy waits for it. spdl_report_html runs where it is called, and reads
   the samples under `lock`: the thread passes over a sample when that is taken. Files are opened
   and buffers allocated by create. With SPDL_NO_REPORT there is only the warning at the end. */

#ifndef SPDL_NO_REPORT

#define SPDL__SAMPLES 256           /* then every second one is dropped */
#define SPDL__SAMPLE_NS 100000000   /* between two samples, at first */
#define SPDL__PAGE_NS 10000000000u  /* between two versions of the page */
#define SPDL__STDERR_NS 100000000   /* how long stderr may take to accept a piece */
#define SPDL__EVERY_LEAST 0.01      /* seconds of an interval */
#define SPDL__EVERY_MOST 1e7
#define SPDL__SAMPLE_STAGE 7        /* numbers in a sample for a stage and the edge after it */
#define SPDL__SAMPLE_TOP 7          /* and for all of them */
#define SPDL__MARK_BYTES 48

/* --- files that are written, of reports and traces --- */

/* Text on its way to a file, through a buffer. After a failure no more is written. */
typedef struct spdl__out {
    spdl__os_file file;
    const char *failure; /* the first, or NULL */
    spdl__text text;
} spdl__out;

/* In place of what is in the file. */
SPDL__COLD spdl__out spdl__out_start(spdl__os_file file, char *buffer, size_t bytes) {
    spdl__out out;
    out.file = file;
    out.failure = spdl__os_file_truncate(file);
    out.text = spdl__text_start(buffer, bytes);
    return out;
}

SPDL__COLD void spdl__out_flush(spdl__out *out) {
    if (out->failure == NULL && out->text.length >= out->text.bytes) out->failure = "too long";
    if (out->failure == NULL)
        out->failure = spdl__os_file_write(out->file, out->text.buffer, out->text.length,
                                           SPDL__NEVER);
    out->text.length = 0;
}

/* Stands near the start of what this process writes: its number may come again, but not with the
   time it was started. */
SPDL__COLD void spdl__out_mark(char mark[SPDL__MARK_BYTES]) {
    uint64_t started;
    const uint64_t id = spdl__os_process_id(&started);
    (void)snprintf(mark, SPDL__MARK_BYTES, "%llu-%llu", (spdl__llu)id, (spdl__llu)started);
}

/* The name of a file, "" for NULL; false, and a warning, when it does not fit. */
SPDL__COLD bool spdl__path_copy(char to[SPDL__PATH_BYTES], const char *from, const char *what,
                                const spdl_logger *logger) {
    if (snprintf(to, SPDL__PATH_BYTES, "%s", from != NULL ? from : "") < SPDL__PATH_BYTES)
        return true;
    to[0] = '\0';
    spdl__logf(logger, SPDL_LOG_WARN, "spdl: %s: the name has more than %d bytes: \"%.60s...\"",
               what, SPDL__PATH_BYTES - 1, from);
    return false;
}

/* run.html, run-2.html, run-3.html ... False when it does not fit. */
SPDL__COLD bool spdl__out_claim_name(char to[SPDL__PATH_BYTES], const char *path, int number) {
    const char *slash = strrchr(path, '/'), *dot = strrchr(path, '.');
    int length;
    if (dot == NULL || dot <= (slash != NULL ? slash + 1 : path)) dot = path + strlen(path);
    length = number == 1 ? snprintf(to, SPDL__PATH_BYTES, "%s", path)
                         : snprintf(to, SPDL__PATH_BYTES, "%.*s-%d%s", (int)(dot - path), path,
                                    number, dot);
    return length > 0 && length < SPDL__PATH_BYTES;
}

/* Opens the first of these names that is no other pipeline's, which is in `to` then, and holds it
   until it is closed. One that runs holds its file, in any process; one of this process that is
   over has left our mark. What went wrong, or NULL. */
SPDL__COLD const char *spdl__out_claim(spdl__os_file *file, char to[SPDL__PATH_BYTES],
                                       const char *path) {
    char mark[SPDL__MARK_BYTES], head[128];
    int number;
    spdl__out_mark(mark);
    for (number = 1; number < 100; ++number) {
        const char *reason;
        uint64_t bytes;
        size_t have = 0;
        if (!spdl__out_claim_name(to, path, number)) return "the name is too long";
        reason = spdl__os_file_open(file, to, SPDL__OS_CLAIM, &bytes);
        if (reason == spdl__os_in_use) continue;
        if (reason == NULL && bytes > 0)
            (void)spdl__os_file_read(*file, head, sizeof(head) - 1, 0, &have);
        head[have] = '\0';
        if (strstr(head, mark) == NULL) return reason;
        (void)spdl__os_file_close(*file);
        *file = SPDL__NO_FILE;
    }
    return "it and 98 more with a number are other pipelines'";
}

/* --- what is asked for --- */

typedef struct spdl__report_plan {
    spdl_report_desc desc; /* except for the names of files */
    char json[SPDL__PATH_BYTES], html[SPDL__PATH_BYTES];
    bool quiet;
} spdl__report_plan;

/* Seconds as 5 or 0.25, in every locale; 0 when the word is something else. */
SPDL__COLD double spdl__report_seconds(const char *word) {
    double value = 0, place = 1;
    const size_t whole = strspn(word, "0123456789");
    const size_t part = word[whole] == '.' ? 1 + strspn(word + whole + 1, "0123456789") : 0;
    size_t i;
    if (whole == 0 || word[whole + part] != '\0') return 0;
    for (i = 0; i < whole; ++i) value = 10 * value + (word[i] - '0');
    for (i = whole + 1; i < whole + part; ++i) value += (place /= 10) * (word[i] - '0');
    return value;
}

/* The words of an environment variable, with commas between; takes one, false when it is none. */
typedef bool (*spdl__word_fn)(void *plan, const char *word);

/* False, and a warning, when one is wrong: then nothing is asked for. `known`: what else it could
   have been, and what is not done now. */
SPDL__COLD bool spdl__words_read(const char *name, const char *value, spdl__word_fn take,
                                 void *plan, const char *known, const spdl_logger *logger) {
    char word[SPDL__PATH_BYTES + 8];
    const char *at = value;
    for (;; ++at) {
        const size_t length = strcspn(at, ",");
        (void)snprintf(word, sizeof(word), "%.*s", (int)spdl__min(length, sizeof(word) - 1), at);
        if (!take(plan, word)) {
            spdl__logf(logger, SPDL_LOG_WARN, "spdl: %s is \"%.200s\", but \"%.200s\" is neither a "
                                              "number of seconds nor %s", name, value, word, known);
            return false;
        }
        at += length;
        if (*at == '\0') return true;
    }
}

/* "json=FILE" and the like, from behind the sign. */
SPDL__COLD bool spdl__word_path(char to[SPDL__PATH_BYTES], const char *from) {
    const int length = snprintf(to, SPDL__PATH_BYTES, "%s", from);
    return length > 0 && length < SPDL__PATH_BYTES;
}

/* Of SPDL_STATS. */
SPDL__COLD bool spdl__report_word(void *to, const char *word) {
    spdl__report_plan *plan = (spdl__report_plan *)to;
    if (strcmp(word, "live") == 0) return plan->desc.live = true;
    if (strcmp(word, "quiet") == 0) return plan->quiet = true;
    if (strncmp(word, "json=", 5) == 0) return spdl__word_path(plan->json, word + 5);
    plan->desc.every = spdl__report_seconds(word);
    return plan->desc.every >= SPDL__EVERY_LEAST && plan->desc.every <= SPDL__EVERY_MOST;
}

SPDL__COLD void spdl__report_stats(spdl__report_plan *plan, const char *value,
                                   const spdl_logger *logger) {
    spdl__report_plan asked = *plan;
    if (strcmp(value, "0") == 0 ||
        !spdl__words_read("SPDL_STATS", value, spdl__report_word, &asked,
                          "live, quiet or json=FILE: no reports", logger))
        return;
    *plan = asked;
    plan->desc.table |= !asked.quiet && !asked.desc.live;
}

/* Whether there is anything to do. */
SPDL__COLD bool spdl__report_ask(spdl__report_plan *plan, const spdl_report_desc *desc,
                                 const spdl_logger *logger) {
    memset(plan, 0, sizeof(*plan));
    if (desc != NULL) plan->desc = *desc;
    (void)spdl__path_copy(plan->json, plan->desc.json, "report", logger);
    (void)spdl__path_copy(plan->html, plan->desc.html, "report", logger);
    if (!plan->desc.ignore_environment) {
        const char *stats = spdl__os_environment("SPDL_STATS");
        const char *html = spdl__os_environment("SPDL_REPORT");
        if (stats != NULL) spdl__report_stats(plan, stats, logger);
        if (html != NULL) (void)spdl__path_copy(plan->html, html, "SPDL_REPORT", logger);
    }
    if (!(plan->desc.every > 0)) plan->desc.every = plan->desc.live ? 1 : 5;
    if (plan->desc.every < SPDL__EVERY_LEAST) plan->desc.every = SPDL__EVERY_LEAST;
    if (plan->desc.every > SPDL__EVERY_MOST) plan->desc.every = SPDL__EVERY_MOST;
    return plan->desc.table || plan->desc.live || plan->desc.report_fn != NULL ||
           plan->json[0] != '\0' || plan->html[0] != '\0';
}

/* --- text --- */

typedef struct spdl__reporter {
    /* written by create */
    spdl_pipeline *pipeline;
    spdl__report_plan plan; /* the thread ends what has failed: table, live */
    char name[SPDL_NAME_BYTES];
    spdl__os_thread thread;
    uint64_t run; /* Unix time in us */
    char *buffer; /* what is in it: the thread's */
    size_t block_bytes, bytes, sample_width;
    bool colour, utf8;
    spdl__os_file draw_lock; /* the terminal, or SPDL__NO_FILE */
    /* written by destroy */
    uint32_t quit;
    spdl__os_event bell;
    /* written by the thread */
    bool draws;
    spdl__os_file json_file, page_file; /* or SPDL__NO_FILE */
    int drawn;                /* lines of the live view that stand on the terminal */
    spdl_stats last, now, interval;
    spdl_process_stats process; /* at the last report */
    double cores_used, others_cores; /* since the one before */
    spdl_histogram *times; /* of each stage, at the last report */
    /* written by the thread under `lock` */
    uint64_t *samples; /* rows of sample_width numbers, or NULL */
    size_t sample_count;
    uint64_t sample_ns;
    uint32_t lock;
} spdl__reporter;

/* What a line of JSON and the data of the page begin with, and how they write the process. */
SPDL__COLD void spdl__json_head(spdl__text *text, const char *schema, const char *name) {
    spdl__text_add(text, "{\"schema\":\"%s\",\"pipeline\":", schema);
    spdl__json_string(text, name);
    spdl__text_add(text, ",\"pid\":%llu", (spdl__llu)spdl__os_process_id(NULL));
    spdl__json_real(text, "time", (double)spdl__os_clock_ns(SPDL__OS_UNIX) * 1e-9);
}

static const spdl__field spdl__process_fields[] = {
    SPDL__FIELD(spdl_process_stats, cpu_ns),
    SPDL__FIELD(spdl_process_stats, others_ns),
    SPDL__FIELD(spdl_process_stats, resident_bytes),
    SPDL__FIELD(spdl_process_stats, minor_faults),
    SPDL__FIELD(spdl_process_stats, major_faults),
    SPDL__FIELDS_END
};

SPDL__COLD void spdl__json_process(spdl__text *text, const spdl_process_stats *process) {
    spdl__text_add(text, ",\"process\":{\"time_ns\":%llu", (spdl__llu)process->time_ns);
    spdl__json_real(text, "cores_allowed", process->cores_allowed);
    spdl__json_fields(text, process, spdl__process_fields);
}

/* After a `reason`, which may be NULL, nothing more is written to a file. */
SPDL__COLD void spdl__report_failed(spdl__reporter *r, spdl__os_file *file, const char *path,
                                    const char *what, const char *reason) {
    if (reason == NULL) return;
    spdl__logf(&r->pipeline->logger, SPDL_LOG_WARN, "spdl: no %s in %.400s: %s", what, path,
               reason);
    (void)spdl__os_file_close(*file);
    *file = SPDL__NO_FILE;
}

SPDL__COLD void spdl__report_json(spdl__reporter *r, bool final) {
    const char *reason = "too long";
    spdl__text text = spdl__text_start(r->buffer, r->bytes);
    spdl__json_head(&text, "spdl.stats.1", r->name);
    spdl__text_add(&text, ",\"run\":%llu,\"final\":%s,\"interval\":", (spdl__llu)(r->run / 1000),
                   final ? "true" : "false");
    spdl__json_stats(&text, &r->interval);
    spdl__text_add(&text, ",\"total\":");
    spdl__json_stats(&text, &r->now);
    spdl__json_process(&text, &r->process);
    spdl__json_real(&text, "cores_used", r->cores_used);
    spdl__json_real(&text, "others_cores", r->others_cores);
    spdl__text_add(&text, "}}\n");
    if (text.length < r->bytes)
        reason = spdl__os_file_write(r->json_file, text.buffer, text.length, SPDL__NEVER);
    spdl__report_failed(r, &r->json_file, r->plan.json, "more statistics", reason);
}

SPDL__COLD void spdl__report_bar(const spdl__reporter *r, spdl__text *text, double share) {
    int i;
    for (i = 0; i < 10; ++i)
        spdl__text_add(text, i < (int)(10 * share + 0.5) ? r->utf8 ? "\xe2\x96\x88" : "#"
                                                         : r->utf8 ? "\xe2\x96\x91" : ".");
}

SPDL__COLD void spdl__report_live_row(spdl__reporter *r, spdl__text *text, int i, bool limit) {
    const spdl_stage_stats *stage = &r->interval.stage[i];
    const spdl_edge_stats *edge = &r->interval.edge[i];
    const double load = spdl__stage_load(&r->interval, i);
    spdl__cell cell;
    spdl__text_style(text, limit ? "1;33" : "0");
    spdl__text_add(text, "%c ", limit ? '>' : ' ');
    spdl__text_name(text, stage->name, 16);
    spdl__text_add(text, " %8s  busy ", spdl__rate(&cell, stage->tasks, r->interval.elapsed_ns));
    spdl__report_bar(r, text, load);
    spdl__text_add(text, " %3.0f%%  waiting ", 100 * load);
    spdl__report_bar(r, text, spdl__share((uint64_t)edge->depth, (uint64_t)edge->buffer_size));
    spdl__text_add(text, " %d/%d", edge->depth, edge->buffer_size);
    spdl__text_style(text, "0");
    spdl__text_add(text, "\n");
}

/* The table, or until the end the live view: on a terminal it goes over the lines that stand there,
   and lines are not wrapped meanwhile, so that as many stand there as were written; elsewhere it is
   one line. */
SPDL__COLD void spdl__report_show(spdl__reporter *r, bool final) {
    const bool live = r->plan.desc.live && !final, draws = live && r->draws;
    const spdl_stats *stats = final ? &r->now : &r->interval;
    const int limit = spdl__find(stats).stage;
    const char *reason;
    spdl__text text = spdl__text_start(r->buffer, r->bytes);
    spdl__cell cell;
    int i;
    text.colour = r->colour;
    if (draws) spdl__text_add(&text, "\033[?7l");
    if (draws && r->drawn > 0) spdl__text_add(&text, "\033[%dA\r\033[J", r->drawn);
    spdl__text_style(&text, "1;36");
    spdl__text_name(&text, r->name, -1);
    spdl__text_style(&text, "0");
    spdl__text_add(&text, "  %s %s: ", final ? "ended after" : "at",
                   spdl__clock(&cell, (double)r->now.elapsed_ns * 1e-9));
    spdl__progress(&text, &r->now, r->plan.desc.length, final);
    if (live && !draws && limit >= 0) {
        spdl__text_add(&text, ", limited by ");
        spdl__text_name(&text, stats->stage[limit].name, -1);
    }
    spdl__text_add(&text, "\n");
    if (draws || !live) {
        spdl__text_style(&text, "1");
        if (stats->delivered == 0 && spdl__stats_pushed(stats) && r->now.delivered > 0)
            spdl__text_add(&text, "No answer was taken, %s.",
                           stats->edge[stats->stage_count - 1].depth > 0 ? "though some are ready"
                                                                         : "as none was ready");
        else if (stats->delivered == 0 && r->now.delivered > 0) /* not as before the first */
            spdl__text_add(&text, "No item was taken: the trainer %s.",
                           2 * stats->wait_ns > stats->elapsed_ns ? "waited"
                                                                  : "did not ask for one");
        else
            spdl__verdict(&text, stats);
        spdl__text_style(&text, "0");
        spdl__text_add(&text, "\n");
        if (!live) spdl__stats_rows(&text, stats);
        for (i = 0; live && i < stats->stage_count; ++i)
            spdl__report_live_row(r, &text, i, i == limit);
        spdl__text_style(&text, "2");
        spdl__text_add(&text, "  %.2f of %.3g cores used, others %.2f; %.0f MB resident",
                       r->cores_used, r->process.cores_allowed, r->others_cores,
                       (double)r->process.resident_bytes / 1e6);
        spdl__text_style(&text, "0");
        spdl__text_add(&text, draws ? "\n\033[?7h" : "\n");
    }
    r->drawn = draws ? stats->stage_count + 3 : 0;
    reason = spdl__os_stderr_write(r->buffer, spdl__min(text.length, r->bytes - 1),
                                   SPDL__STDERR_NS);
    if (reason == NULL) return;
    spdl__logf(&r->pipeline->logger, SPDL_LOG_WARN, "spdl: no more statistics on stderr: %s",
               reason);
    r->plan.desc.table = r->plan.desc.live = false;
}

/* --- intervals --- */

SPDL__COLD void spdl__report_subtract(void *to, const void *from, const spdl__field *field) {
    for (; field->name != NULL; ++field) {
        const uint64_t value =
            spdl__grown(spdl__field_at(from, field->at), spdl__field_at(to, field->at));
        memcpy((char *)to + field->at, &value, sizeof(value));
    }
}

/* From `last` to `now`; times[] is brought up to date. */
SPDL__COLD void spdl__report_interval(spdl__reporter *r) {
    spdl_stats *stats = &r->interval;
    spdl_histogram now;
    int i;
    *stats = r->now;
    spdl__report_subtract(stats, &r->last, spdl__stats_fields);
    stats->first_item_ns = r->last.first_item_ns > 0
                               ? 0 : spdl__grown(r->last.elapsed_ns, r->now.first_item_ns);
    for (i = 0; i < stats->stage_count; ++i) {
        spdl__report_subtract(&stats->stage[i], &r->last.stage[i], spdl__stage_fields);
        spdl__report_subtract(&stats->edge[i], &r->last.edge[i], spdl__edge_fields);
        (void)spdl_pipeline_histogram(r->pipeline, i, &now);
        spdl__histogram_since(&r->times[i], &now);
        spdl__stage_times(&stats->stage[i], &r->times[i]);
        r->times[i] = now;
    }
    spdl__stats_means(stats);
}

SPDL__COLD void spdl__report_once(spdl__reporter *r, bool final) {
    const spdl_process_stats before = r->process;
    uint64_t ns;
    spdl_pipeline_stats(r->pipeline, &r->now);
    spdl_process_read(&r->process);
    ns = r->process.time_ns - before.time_ns;
    r->cores_used = spdl__share(spdl__grown(before.cpu_ns, r->process.cpu_ns), ns);
    r->others_cores = spdl__share(spdl__grown(before.others_ns, r->process.others_ns), ns);
    spdl__report_interval(r);
    if (r->plan.desc.report_fn != NULL)
        r->plan.desc.report_fn(&r->interval, &r->now, r->plan.desc.user);
    if (r->json_file != SPDL__NO_FILE) spdl__report_json(r, final);
    if (r->plan.desc.table || r->plan.desc.live) spdl__report_show(r, final);
    r->last = r->now;
}

/* --- samples --- */

/* Drops every second sample: those that stay are twice as far apart, and end with the last. */
SPDL__COLD void spdl__samples_thin(spdl__reporter *r) {
    const size_t row = r->sample_width * sizeof(*r->samples);
    size_t i;
    for (i = 1; i < r->sample_count / 2; ++i)
        memcpy(r->samples + i * r->sample_width, r->samples + (2 * i + 1) * r->sample_width, row);
    r->sample_count /= 2;
    r->sample_ns *= 2;
}

/* Sums since the start, in microseconds and KiB: the page takes the differences. */
SPDL__COLD void spdl__samples_row(uint64_t *to, const spdl_stats *stats,
                                  const spdl_process_stats *process) {
    int i;
    *to++ = stats->elapsed_ns / 1000;
    *to++ = stats->delivered;
    *to++ = stats->wait_ns / 1000;
    *to++ = process->time_ns / 1000;
    *to++ = process->cpu_ns / 1000;
    *to++ = process->others_ns / 1000;
    *to++ = process->resident_bytes / 1024;
    for (i = 0; i < stats->stage_count; ++i) {
        *to++ = stats->stage[i].tasks - spdl__min(stats->stage[i].failures, stats->stage[i].tasks);
        *to++ = stats->stage[i].busy_ns / 1000;
        *to++ = stats->edge[i].items;
        *to++ = stats->edge[i].empty_ns / 1000;
        *to++ = stats->edge[i].put_wait_ns / 1000;
        *to++ = stats->edge[i].get_wait_ns / 1000;
        *to++ = (uint64_t)stats->edge[i].depth;
    }
}

/* One more, if there are any; when the last is quite new it is replaced, so that no interval is
   tiny. */
SPDL__COLD void spdl__report_sample(spdl__reporter *r) {
    const size_t width = r->sample_width;
    spdl_process_stats process;
    uint64_t *row;
    if (r->samples == NULL || !spdl__try_lock(&r->lock)) return;
    spdl_pipeline_stats(r->pipeline, &r->now);
    spdl_process_read(&process);
    if (r->sample_count == SPDL__SAMPLES) spdl__samples_thin(r);
    row = r->samples + r->sample_count * width;
    if (r->sample_count > 1 && r->now.elapsed_ns / 1000 < *(row - width) + r->sample_ns / 2000)
        row -= width;
    else
        r->sample_count++;
    spdl__samples_row(row, &r->now, &process);
    spdl__spin_unlock(&r->lock);
}

/* --- the page --- */

/* Two parts, each ended by NULL; between them stand its numbers, JSON. */
/* clang-format off: this array is examples/data/report.html, made by `make report-page` */
static const char *const spdl__page[] = {
"<html lang='en'><head><meta charset='utf-8'><title>spdl report</title><meta name='viewport' conte"
"nt='width=device-width,initial-scale=1'><style>:root{--bg:#f7f7f5;--card:#fff;--ink:#1c1c1a;--dim"
":#6a6a64;--line:#e3e2dd;--soft:#efeeea;--hot:#c8450c;--hotbg:#fdf0e8;--c0:#26c;--c1:#d61;--c2:#28"
"4;--c3:#93b;--c4:#b80;--c5:#179;--c6:#c25;--c7:#667}@media(prefers-color-scheme:dark){:root{--bg:"
"#161615;--card:#1f1f1d;--ink:#ededea;--dim:#9d9c95;--line:#35342f;--soft:#2a2926;--hot:#ff9a5c;--"
"hotbg:#37241a;--c0:#7af;--c1:#f95;--c2:#6d8;--c3:#d8e;--c4:#fc4;--c5:#4cd;--c6:#f8b;--c7:#aab}}*{"
"box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.45 system-u"
"i,sans-serif}main{max-width:1120px;margin:0 auto;padding:28px 20px 40px}p,span,.edge,th,footer{co"
"lor:var(--dim);margin:0}p,.legend,.tip,footer{font-size:12.5px}.stage,.edge,.tip,td,th{white-spac"
"e:nowrap}#name{font-size:15px}h1{font-size:24px;line-height:1.3;margin:4px 0 18px;max-width:46em;"
"text-wrap:pretty}h2{font-size:16px;margin:26px 0 10px}h3{font-size:14px;margin:0}.card{background"
":var(--card);border:1px solid var(--line);border-radius:10px}#tiles{display:grid;grid-template-co"
"lumns:repeat(auto-fit,minmax(130px,1fr));gap:10px}#tiles div{padding:10px 14px}#tiles span,.stage"
" span{font-size:13px;display:block}#tiles b{font-size:21px;font-weight:600}#flow{display:flex;fle"
"x-wrap:wrap;padding:18px 16px;row-gap:16px}.stage{border:1.5px solid var(--line);border-radius:9p"
"x;padding:9px 12px;min-width:104px;max-width:180px;position:relative}.stage b{display:block;font-"
"size:14px;overflow:hidden;text-overflow:ellipsis}.stage.limit{border:2px solid var(--hot);backgro"
"und:var(--hotbg)}.stage.limit::after{content:'limit';position:absolute;top:-10px;right:8px;backgr"
"ound:var(--hot);color:var(--card);font:600 11px/18px system-ui,sans-serif;padding:0 7px;border-ra"
"dius:9px}.bar,.bar i,.plot,svg{display:block}.bar{height:5px;border-radius:3px;background:var(--s"
"oft);margin-top:6px;position:relative}.bar i{height:100%;border-radius:3px;background:var(--c0)}."
"limit .bar i{background:var(--hot)}.edge{align-self:center;width:80px;text-align:center;font-size"
":12px}.edge .bar{height:6px;width:56px;margin:5px 8px}.edge .bar i{background:var(--c2)}.edge .ba"
"r::after{content:'';position:absolute;left:58px;top:-2.5px;border:5.5px solid transparent;border-"
"left:8px solid var(--dim)}#charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(1"
"00%,440px),1fr));gap:14px;margin-top:26px}.chart{padding:12px 14px 10px;position:relative}svg{ove"
"rflow:visible;margin-top:4px}text{fill:var(--dim);font-size:11px;text-anchor:end}.legend{display:"
"flex;flex-wrap:wrap;gap:2px 14px}.legend i{display:inline-block;width:14px;height:3px;border-radi"
"us:2px;margin-right:5px;vertical-align:3px}.tip{position:absolute;pointer-events:none;padding:6px"
" 9px;z-index:1;top:44px}.tip,.rule{visibility:hidden;stroke:var(--dim)}.plot:hover .rule,.plot:ho"
"ver~.tip{visibility:visible}.scroll{overflow-x:auto;padding:4px 0}table{border-collapse:collapse;"
"font-size:13px;width:100%;font-variant-numeric:tabular-nums}th,td{padding:6px 10px;text-align:rig"
"ht}th{font-weight:500;border-bottom:1px solid var(--line)}th:first-child,td:first-child{text-alig"
"n:left}tr.limit td{background:var(--hotbg)}tr.limit td:first-child{color:var(--hot);font-weight:6"
"00}footer{margin-top:22px}</style></head><body><main><p id='name'></p><h1 id='verdict'></h1><sect"
"ion id='tiles'></section><h2>Flow</h2><section id='flow' class='card'></section><section id='char"
"ts'></section><h2>Since the start</h2><div class='scroll card'><table id='table'></table></div><f"
"ooter></footer><noscript>This page draws itself: scripts have to be allowed.</noscript></main><sc"
"ript type='application/json' id='data'>",
NULL,
"</script><script>const $=id=>document.getElementById(id);const D=JSON.parse($('data').textContent"
"),T=D.total,P=D.process,S=D.samples;const el=(tag,kind,...kids)=>{const made=document.createEleme"
"nt(tag);if(kind)made.className=kind;made.append(...kids);return made;};const drawn=(kind,html)=>O"
"bject.assign(el('span',kind),{innerHTML:html});const digits=v=>v.toFixed(v<9.995?2:v<99.95?1:0);c"
"onst scaled=(v,units)=>{let u=0;for(;v>=999.5&&u<3;u++)v/=1000;return(u||v%1?digits(v):v)+units[u"
"];};const time=ns=>scaled(ns,[' ns',' us',' ms',' s']);const count=v=>scaled(v,['','k','M','G']),"
"rate=v=>count(v)+'/s';const percent=v=>(100*v).toFixed()+' %';const div=(a,b)=>b>0?a/b:NaN;const "
"color=k=>`var(--c${k % 8})`;const feed=T.stages.length&&T.stages[0].kind=='feed'?T.stages[0]:0;co"
"nst waited=Math.max(0,div(T.wait_ns-T.first_item_ns,T.elapsed_ns-T.first_item_ns))||0;const dot='"
" \\u00b7 ';document.title=D.pipeline+dot+'spdl report';$('name').textContent=D.pipeline+dot+new D"
"ate(1000*D.time).toLocaleString()+dot+time(T.elapsed_ns);$('verdict').textContent=T.verdict.repla"
"ceAll(' %','\\u00a0%');for(const[key,value]of Object.entries({'items':count(T.delivered),'rate':r"
"ate(div(1e9*T.delivered,T.elapsed_ns)||0),...feed?{'requests':count(feed.tasks),'made way':count("
"feed.skips),'answer p50':time(feed.p50_ns),'answer p99':time(feed.p99_ns)}:{'trainer waited':perc"
"ent(waited),'its own step':time(T.step_mean_ns)},'first item after':time(T.first_item_ns),'memory"
"':digits(P.resident_bytes/1e6)+' MB','cores allowed':+P.cores_allowed.toFixed(2)}))$('tiles').app"
"end(el('div','card',el('span','',key),el('b','',value)));const bar=v=>drawn('bar',`<i style=width"
":${100 * Math.min(1, v)}%></i>`);const put=(made,title)=>{made.title=title;$('flow').append(made)"
";};const box=(name,kind,lines,load)=>put(el('div','stage'+kind,el('b','',name),...lines.map(line="
">el('span','',line)),load>=0?bar(load):''),name);T.stages.forEach((s,i)=>{const e=T.edges[i];if(s"
".busy_ns)box(s.name,i==T.limit?' limit':'',[s.kind+' \\u00d7 '+s.concurrency,time(s.p50_ns)+' p50"
"',percent(s.load)+' busy'],s.load);else box(s.name,'',[s.kind,s.tasks+(s==feed?' pushed':' made')"
"]);put(el('div','edge',bar(e.readiness),percent(e.readiness)+' ready'),e.depth+' of '+e.buffer_si"
"ze+' waiting now');});if(feed)box('answers','',[T.delivered+' taken',time(feed.p50_ns)+' p50']);e"
"lse box('trainer','',[time(T.step_mean_ns)+' a step','waited '+percent(waited)],waited);const X=S"
".map(row=>row[0]/1e6),last=X.length-1;const steps=(from,to,by)=>{const all=[];for(let v=from;v<=t"
"o+by/100;v+=by)all.push(v);return all;};const nice=most=>{const power=10**Math.floor(Math.log10(m"
"ost)),first=most/power;return power*(first>5?2:first>2?1:.5);};const chart=(title,note,format,ser"
"ies,most,log)=>{const f=log?Math.log10:v=>v,shown=v=>log?v>0:isFinite(v);const rows=series.map(s="
">X.map((t,i)=>i?s.at(i):NaN));const all=rows.flat().filter(shown);let high=Math.max(most||0,...al"
"l)||1,low=0;if(log){low=10**Math.floor(f(Math.min(high,...all)));high=10**Math.floor(f(high)+1);}"
"else if(!most)high*=1.06;const x=t=>54+458*(t-X[0])/(X[last]-X[0]);const y=v=>6+144*(f(high)-f(v)"
")/(f(high)-f(low));const marks=log?steps(f(low),f(high),Math.ceil((f(high)-f(low))/6)).map(v=>10*"
"*v):steps(0,high,nice(high));let art='';for(const v of marks)art+=`<path d='M54 ${y(v)}h458' stro"
"ke=var(--line) />`+`<text x=48 y=${y(v) + 4}>${format(v)}</text>`;for(const t of steps(0,X[last],"
"nice(X[last])))if(t>=X[0])art+=`<text x=${x(t) + 12} y=166>${+t.toFixed(2)} s</text>`;series.forE"
"ach((s,k)=>{let path='',pen='M';rows[k].forEach((v,i)=>{if(shown(v))path+=pen+x(X[i])+' '+y(v);pe"
"n=shown(v)?'L':'M';});if(path&&!s.name)art+=`<path d='${path}V150H${x(X[1])}z' fill=${s.color} op"
"acity=.13 />`;art+=`<path d='${path}' fill=none stroke=${s.color} stroke-width=${s.wide ? 2.6 : 1"
".6} `+`stroke-linejoin=round stroke-dasharray=${k > 7 ? '5,3' : 0} />`;});const plot=drawn('plot'"
",`<svg viewBox='0 0 520 170'>${art}<path class=rule d=M0,6V150 /></svg>`);const tip=el('div','tip"
" card');plot.onmousemov",
"e=mouse=>{const edge=plot.getBoundingClientRect(),left=mouse.clientX-edge.left;const i=X.findInde"
"x((t,i)=>i&&(x(t)>=left*520/edge.width||i==last));plot.querySelector('.rule').style.transform=`tr"
"anslate(${x(X[i])}px)`;tip.replaceChildren(el('b','',digits(X[i])+' s'),...series.map((s,k)=>el('"
"div','',(s.name?s.name+'  ':'')+(isFinite(rows[k][i])?format(rows[k][i]):'-'))));tip.style.left=M"
"ath.min(left+24,edge.width-tip.offsetWidth)+'px';};$('charts').append(el('div','card chart',el('h"
"3','',title),el('p','',note),plot,el('div','legend',...series.filter(s=>s.name).map(s=>el('span',"
"'',drawn('',`<i style=background:${s.color}></i>`),s.name))),tip));};const since=(i,at)=>S[i][at]"
"-S[i-1][at];const per=(a,b,unit)=>(i,at)=>unit*div(since(i,at+a),since(i,at+b));const one=(k,of)="
">[{color:color(k),at:i=>of(i,0)}];const each=of=>T.stages.map((s,k)=>({name:s.name,color:color(k)"
",wide:k==T.limit,at:i=>of(i,7+7*k)}));if(last>2){chart('Rate','items taken per second',rate,one(0"
",per(1,0,1e6)));if(!feed)chart('Trainer waiting','share of time it waited for data',percent,one(1"
",per(2,0,1)),1);chart('Data readiness','share of time something could be taken after each stage',"
"percent,each((i,at)=>1-Math.min(1,div(since(i,at+3),since(i,0)))),1);chart('Stage time','mean of "
"a call',time,each(per(1,0,1e3)).filter((s,k)=>T.stages[k].busy_ns),0,true);chart('Put wait','time"
" a finished item waits for a place after its stage',time,each(per(4,2,1e3)));chart('Get wait','ti"
"me the reader after each stage is idle, per item',time,each(per(5,2,1e3)));chart('Processor','cor"
"es used by this process, and by others on the machine',v=>+v.toFixed(2),[{name:'this process',wid"
"e:true,...one(0,per(4,3,1))[0]},{name:'others',...one(7,per(5,3,1))[0]}],P.cores_allowed);chart('"
"Memory','resident',v=>count(v)+'B',one(3,i=>1024*S[i][6]));}else $('charts').append('No plots: no"
"thing was sampled. SPDL_REPORT=FILE, or html in the desc of '+'the reports, has samples taken fro"
"m the start.');const timed=text=>s=>s.max_ns?text(s):'-';const columns={'stage':s=>s.name,'calls'"
":s=>s.in_flight+'/'+s.concurrency,'tasks':s=>s.tasks,'failed':s=>s.failures,'skip':s=>s.skips,'re"
"try':s=>s.retries,...Object.fromEntries(['mean','p50','p90','p99','max'].map(k=>[k,timed(s=>time("
"s[k+'_ns']))])),'busy':s=>s.busy_ns?percent(s.load):'-','put wait':(s,e)=>time(div(e.put_wait_ns,"
"e.items)||0),'get wait':(s,e)=>time(div(e.get_wait_ns,e.items)||0),'ready':(s,e)=>percent(e.readi"
"ness)};$('table').append(el('tr','',...Object.keys(columns).map(name=>el('th','',name))),...T.sta"
"ges.map((s,i)=>el('tr',i==T.limit?'limit':'',...Object.values(columns).map(text=>el('td','',text("
"s,T.edges[i]))))));document.querySelector('footer').textContent=`spdl.h ${D.version}, process ${D"
".pid}; ${S.length} samples`;</script></body></html>\n",
NULL,
};
/* clang-format on */

/* How much of a buffer JSON of all stages may need, twice. */
SPDL__COLD size_t spdl__report_bytes_for(int stages) { return 8192 + 3072 * (size_t)stages; }

/* With the statistics now, which are in *total then, and the samples if there are some. NULL, or
   what went wrong. */
SPDL__COLD const char *spdl__page_write(const spdl_pipeline *p, spdl__os_file file,
                                        spdl_stats *total, char *buffer, size_t bytes) {
    const spdl__reporter *r = p->reporter;
    const size_t samples = r != NULL && r->samples != NULL ? r->sample_count : 0;
    spdl__out out = spdl__out_start(file, buffer, bytes);
    spdl_process_stats process;
    const char *const *page = spdl__page;
    char mark[SPDL__MARK_BYTES];
    size_t i, k;
    spdl_pipeline_stats(p, total);
    spdl_process_read(&process);
    spdl__out_mark(mark);
    spdl__text_add(&out.text, "<!doctype html><!-- spdl.report %s -->", mark);
    for (; *page != NULL; ++page) {
        spdl__text_add(&out.text, "%s", *page);
        spdl__out_flush(&out);
    }
    spdl__json_head(&out.text, "spdl.report.1", r != NULL ? r->name : "spdl");
    spdl__text_add(&out.text, ",\"version\":\"%s\",\"total\":", spdl_version());
    spdl__json_stats(&out.text, total);
    spdl__json_process(&out.text, &process);
    spdl__text_add(&out.text, "},\"samples\":[");
    for (i = 0; i < samples; ++i) {
        spdl__out_flush(&out);
        for (k = 0; k < r->sample_width; ++k)
            spdl__text_add(&out.text, "%s%llu", k > 0 ? "," : i > 0 ? "],\n[" : "\n[",
                           (spdl__llu)r->samples[i * r->sample_width + k]);
    }
    spdl__text_add(&out.text, samples > 0 ? "]]}" : "]}");
    for (++page; *page != NULL; ++page) {
        spdl__out_flush(&out);
        spdl__text_add(&out.text, "%s", *page);
    }
    spdl__out_flush(&out);
    return out.failure;
}

SPDL__COLD void spdl__report_page(spdl__reporter *r) {
    if (r->page_file == SPDL__NO_FILE) return;
    spdl__report_failed(r, &r->page_file, r->plan.html, "report",
                        spdl__page_write(r->pipeline, r->page_file, &r->now, r->buffer, r->bytes));
}

SPDL_API spdl_result spdl_report_html(const spdl_pipeline *p, const char *path) {
    const size_t bytes = spdl__report_bytes_for(p != NULL ? p->count : 0);
    const char *reason, *unwritten;
    spdl_stats *total;
    spdl__os_file file;
    if (p == NULL || path == NULL) return SPDL_E_INVALID;
    total = (spdl_stats *)spdl__alloc(&p->allocator, sizeof(*total) + bytes, sizeof(void *));
    if (total == NULL) return SPDL_E_NOMEM;
    reason = spdl__os_file_open(&file, path, SPDL__OS_REPLACE, NULL);
    if (p->reporter != NULL) spdl__spin_lock(&p->reporter->lock); /* its thread does not wait */
    if (reason == NULL) reason = spdl__page_write(p, file, total, (char *)(total + 1), bytes);
    if (p->reporter != NULL) spdl__spin_unlock(&p->reporter->lock);
    unwritten = spdl__os_file_close(file);
    spdl__free(&p->allocator, total, sizeof(*total) + bytes);
    return reason == NULL && unwritten == NULL ? SPDL_OK : SPDL_E_IO;
}

/* --- the thread --- */

/* The final report comes when the pipeline has ended, or is destroyed before; and again when it has
   gone on after that. */
SPDL__COLD void *spdl__report_main(void *arg) {
    spdl__reporter *r = (spdl__reporter *)arg;
    const uint64_t every = (uint64_t)(r->plan.desc.every * 1e9);
    uint64_t sample = r->samples != NULL ? spdl_time_ns() : SPDL__NEVER;
    uint64_t page = r->samples != NULL ? sample + SPDL__PAGE_NS : SPDL__NEVER;
    uint64_t report = spdl_time_ns() + every;
    bool over = false; /* the final report was made */
    for (;;) {
        const uint32_t word = spdl__load32(&r->bell.word);
        const bool quit = spdl__load32(&r->quit) != 0;
        const bool ended = spdl__load_relaxed(&r->pipeline->ended_ns) != 0;
        const bool runs = !ended && !quit;
        const uint64_t now = spdl_time_ns();
        const bool final = !over && (quit || (ended && now >= report));
        if (final || (runs && now >= report)) spdl__report_once(r, final);
        if (final || (runs && now >= sample)) spdl__report_sample(r);
        if (final || (runs && now >= page)) spdl__report_page(r);
        if (quit) return NULL;
        over = final || (over && ended);
        if (now >= sample) sample = now + r->sample_ns;
        if (now >= page) page = now + SPDL__PAGE_NS;
        if (now >= report) report = now + every - (now - report) % every;
        (void)spdl__os_event_sleep(&r->bell, word,
                                   ended ? report : spdl__min(sample, spdl__min(page, report)));
    }
}

/* --- beginning and end --- */

/* Only one pipeline draws on a terminal: the one that holds it. */
SPDL__COLD void spdl__report_terminal(spdl__reporter *r) {
    static const char *const names[] = { "LC_ALL", "LC_CTYPE", "LANG" };
    const char *term = getenv("TERM"), *no_color = getenv("NO_COLOR"), *locale = NULL;
    const bool terminal = term != NULL && strcmp(term, "dumb") != 0 &&
                          spdl__os_terminal(r->plan.desc.live ? &r->draw_lock : NULL);
    int i;
    for (i = 0; i < 3 && (locale == NULL || *locale == '\0'); ++i) locale = getenv(names[i]);
    r->colour = terminal && (no_color == NULL || *no_color == '\0');
    r->utf8 = locale != NULL && (strstr(locale, "UTF-8") != NULL || strstr(locale, "utf8") != NULL);
    r->draws = terminal && r->draw_lock != SPDL__NO_FILE;
}

SPDL__COLD void spdl__report_open(spdl__reporter *r) {
    char asked[SPDL__PATH_BYTES];
    if (r->plan.desc.table || r->plan.desc.live) spdl__report_terminal(r);
    if (r->plan.json[0] != '\0')
        spdl__report_failed(
            r, &r->json_file, r->plan.json, "statistics",
            spdl__os_file_open(&r->json_file, r->plan.json, SPDL__OS_APPEND, NULL));
    if (r->plan.html[0] == '\0') return;
    memcpy(asked, r->plan.html, sizeof(asked));
    spdl__report_failed(r, &r->page_file, asked, "report",
                        spdl__out_claim(&r->page_file, r->plan.html, asked));
    spdl__report_page(r); /* what cannot be written is reported at once */
}

SPDL__COLD void spdl__report_free(spdl__reporter *r) {
    (void)spdl__os_file_close(r->json_file);
    (void)spdl__os_file_close(r->page_file);
    (void)spdl__os_file_close(r->draw_lock);
    r->pipeline->reporter = NULL;
    spdl__os_event_fini(&r->bell);
    spdl__free(&r->pipeline->allocator, r, r->block_bytes);
}

/* After the pipeline has been made. Whatever goes wrong is a warning. */
SPDL__COLD void spdl__report_begin(spdl_pipeline *p, const spdl_pipeline_desc *desc) {
    const size_t stages = (size_t)p->count, text = 2 * spdl__report_bytes_for(p->count);
    const size_t width = SPDL__SAMPLE_TOP + stages * SPDL__SAMPLE_STAGE;
    size_t samples, bytes;
    spdl__report_plan plan;
    spdl__reporter *r;
    if (!spdl__report_ask(&plan, desc->report, &p->logger)) return;
    samples = plan.html[0] != '\0' ? SPDL__SAMPLES * width : 0;
    bytes = sizeof(*r) + stages * sizeof(*r->times) + samples * sizeof(*r->samples) + text;
    r = (spdl__reporter *)spdl__alloc_zeroed(&p->allocator, 1, bytes, sizeof(void *));
    if (r != NULL && spdl__os_event_init(&r->bell)) {
        r->pipeline = p;
        r->plan = plan;
        r->block_bytes = bytes;
        r->times = (spdl_histogram *)(r + 1);
        r->buffer = (char *)(r->times + stages) + samples * sizeof(*r->samples);
        r->bytes = text;
        if (samples > 0) r->samples = (uint64_t *)(r->times + stages);
        r->sample_width = width;
        r->sample_ns = SPDL__SAMPLE_NS;
        r->run = spdl__os_clock_ns(SPDL__OS_UNIX) / 1000;
        r->json_file = r->page_file = r->draw_lock = SPDL__NO_FILE;
        spdl__name_copy(r->name, desc->name != NULL ? desc->name : "spdl");
        spdl_process_read(&r->process);
        p->reporter = r;
        spdl__report_open(r);
        if (spdl__os_thread_start(&r->thread, "spdl-report", NULL, 0, spdl__report_main, r)) return;
        spdl__report_free(r);
    } else {
        spdl__free(&p->allocator, r, bytes);
    }
    spdl__logf(&p->logger, SPDL_LOG_WARN, "spdl: no memory or thread for reports: there are none");
}

/* Before the pipeline is freed: the last reports are written, the thread ends. */
SPDL__COLD void spdl__report_end(spdl_pipeline *p) {
    spdl__reporter *r = p->reporter;
    if (r == NULL) return;
    spdl__store32(&r->quit, 1);
    spdl__os_event_wake(&r->bell, SPDL__ALL);
    spdl__os_thread_join(&r->thread);
    spdl__report_free(r);
}

#else /* SPDL_NO_REPORT */

SPDL__COLD void spdl__report_begin(spdl_pipeline *p, const spdl_pipeline_desc *desc) {
    static const char *const names[] = { "SPDL_TRACE", "SPDL_REPORT", "SPDL_STATS" };
    const char *asked = NULL;
    int i;
    for (i = 0; i < 3; ++i) {
        const char *value = spdl__os_environment(names[i]);
        if (value != NULL && strcmp(value, "0") != 0) asked = names[i];
    }
    if (desc->trace_events > 0) asked = "desc.trace_events";
    if (desc->trace != NULL && *desc->trace != '\0') asked = "desc.trace";
    if (desc->report != NULL) asked = "desc.report";
    if (asked != NULL)
        spdl__logf(&p->logger, SPDL_LOG_WARN,
                   "spdl: %s is ignored: this program was built with "
                   "SPDL_NO_REPORT, without reports and traces",
                   asked);
}

SPDL__COLD void spdl__report_end(spdl_pipeline *p) { (void)p; }

SPDL__COLD bool spdl__doctor_ask(spdl__doctor_plan *plan, const spdl_doctor_desc *desc,
                                 const spdl_logger *logger) {
    const char *value = spdl__os_environment("SPDL_DOCTOR");
    (void)plan;
    if (desc != NULL || (value != NULL && strcmp(value, "0") != 0))
        spdl__logf(logger, SPDL_LOG_WARN, "spdl: there is no doctor: this program was built with "
                                          "SPDL_NO_REPORT");
    return false;
}

SPDL__COLD spdl_result spdl__doctor_open(spdl_pipeline *p, const spdl__doctor_plan *plan,
                                         const spdl_stage *rows, int workers) {
    (void)p;
    (void)plan;
    (void)rows;
    (void)workers;
    return SPDL_OK;
}

SPDL__COLD int spdl__doctor_workers(const spdl__doctor *d) { return d != NULL; }
SPDL__COLD bool spdl__doctor_is_done(const spdl__doctor *d) { return d == NULL; }
SPDL__COLD void spdl__doctor_comes(spdl__doctor *d) { (void)d; }
SPDL__COLD void spdl__doctor_leaves(spdl__doctor *d, bool item) { (void)d, (void)item; }
SPDL__COLD void spdl__doctor_close(spdl_pipeline *p) { (void)p; }
SPDL__COLD void spdl__doctor_empty(spdl_pipeline *p) { (void)p; }
SPDL__COLD void spdl__doctor_free(spdl_pipeline *p) { (void)p; }
#endif

/* ============================================================================================= */
/* >>cache-impl
   Runs in the owner's thread, without locks. The cache owns what it keeps; of an item that was
   handed out and is not kept it is the owner until the next call, unless copy_item is set. */

struct spdl_cache { /* written by the owner */
    spdl_cache_desc desc; /* delete_source is NULL once it was called */
    void **item;       /* those that are kept */
    uint64_t kept;     /* so many of them */
    uint64_t position; /* the next one to hand out when they are used */
    uint64_t given;    /* items handed out */
    void *loan;        /* handed out and not kept: freed by the next call */
    bool warm;         /* the source is not used any more */
    bool owed;         /* the item kept last is still to be handed out: its copy failed */
};

SPDL__PRIVATE spdl_result spdl__cache_check(const spdl_cache_desc *desc) {
    const uint64_t after = spdl__max(desc->num_caches, desc->return_caches_after);
    if (desc->next == NULL)
        return spdl__error_set(desc->error, SPDL_E_INVALID, "spdl: cache: next is NULL");
    if (desc->num_caches < 1 || desc->num_caches > SIZE_MAX / sizeof(void *))
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "spdl: cache: num_caches is %llu, must be at least 1 and fit memory",
                               (spdl__llu)desc->num_caches);
    if (desc->return_caches_after != 0 && desc->return_caches_after < desc->num_caches)
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "spdl: cache: return_caches_after is %llu, must be at least "
                               "num_caches, %llu", (spdl__llu)desc->return_caches_after,
                               (spdl__llu)desc->num_caches);
    if (desc->stop_after != 0 && desc->stop_after < after)
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "spdl: cache: stop_after is %llu, must be at least "
                               "return_caches_after, %llu", (spdl__llu)desc->stop_after,
                               (spdl__llu)after);
    return spdl__allocator_check(&desc->allocator, "cache", desc->error);
}

SPDL_API spdl_result spdl_cache_create(spdl_cache **cache, const spdl_cache_desc *desc) {
    spdl_result result;
    spdl_cache *made;
    if (cache == NULL) return SPDL_E_INVALID;
    *cache = NULL;
    if (desc == NULL) return SPDL_E_INVALID;
    spdl__error_clear(desc->error);
    result = spdl__cache_check(desc);
    if (result != SPDL_OK) return result;
    made = (spdl_cache *)spdl__alloc_zeroed(&desc->allocator, 1, sizeof(*made), sizeof(void *));
    if (made != NULL)
        made->item = (void **)spdl__alloc(
            &desc->allocator, (size_t)desc->num_caches * sizeof(void *), sizeof(void *));
    if (made == NULL || made->item == NULL) {
        spdl__free(&desc->allocator, made, sizeof(*made));
        return spdl__error_set(desc->error, SPDL_E_NOMEM, "spdl: cache: out of memory");
    }
    made->desc = *desc;
    made->desc.error = NULL; /* the caller's, for this call only */
    if (made->desc.return_caches_after == 0) made->desc.return_caches_after = desc->num_caches;
    *cache = made;
    return SPDL_OK;
}

SPDL__PRIVATE void spdl__cache_free_item(const spdl_cache *cache, void *item) {
    if (item != NULL && cache->desc.free_item != NULL) cache->desc.free_item(item);
}

SPDL__PRIVATE void spdl__cache_delete_source(spdl_cache *cache) {
    if (cache->desc.delete_source != NULL) cache->desc.delete_source(cache->desc.source);
    cache->desc.delete_source = NULL;
}

SPDL_API void spdl_cache_destroy(spdl_cache *cache) {
    spdl_allocator allocator;
    uint64_t i;
    if (cache == NULL) return;
    allocator = cache->desc.allocator;
    spdl__cache_free_item(cache, cache->loan);
    for (i = 0; i < cache->kept; ++i) spdl__cache_free_item(cache, cache->item[i]);
    spdl__cache_delete_source(cache);
    spdl__free(&allocator, cache->item, (size_t)cache->desc.num_caches * sizeof(void *));
    spdl__free(&allocator, cache, sizeof(*cache));
}

SPDL_API bool spdl_cache_warm(const spdl_cache *cache) { return cache->warm; }

/* Hands out an item that is kept: itself, or a copy that is the caller's. */
SPDL__PRIVATE spdl_result spdl__cache_give(spdl_cache *cache, void *kept, void **item) {
    void *given = kept;
    if (cache->desc.copy_item != NULL && kept != NULL) {
        given = cache->desc.copy_item(kept);
        if (given == NULL) return SPDL_E_NOMEM;
    }
    memcpy(item, &given, sizeof(given)); /* *item may be any object pointer */
    cache->given++;
    return SPDL_OK;
}

SPDL__PRIVATE spdl_result spdl__cache_give_last(spdl_cache *cache, void **item) {
    const spdl_result result = spdl__cache_give(cache, cache->item[cache->kept - 1], item);
    cache->owed = result != SPDL_OK;
    return result;
}

SPDL__PRIVATE spdl_result spdl__cache_from_source(spdl_cache *cache, void **item,
                                                  int64_t timeout_ns) {
    void *fresh = NULL;
    const spdl_result result = cache->desc.next(cache->desc.source, &fresh, timeout_ns);
    if (result != SPDL_OK) return result;
    if (cache->given + 1 >= cache->desc.return_caches_after) cache->warm = true;
    if (cache->kept < cache->desc.num_caches) {
        cache->item[cache->kept++] = fresh;
        return spdl__cache_give_last(cache, item);
    }
    if (cache->desc.copy_item == NULL) cache->loan = fresh;
    memcpy(item, &fresh, sizeof(fresh));
    cache->given++;
    return SPDL_OK;
}

SPDL_API spdl_result spdl_cache_next(spdl_cache *cache, void **item, int64_t timeout_ns) {
    spdl_result result;
    if (cache == NULL || item == NULL) return SPDL_E_INVALID;
    if (cache->desc.stop_after != 0 && cache->given >= cache->desc.stop_after) return SPDL_END;
    spdl__cache_free_item(cache, cache->loan);
    cache->loan = NULL;
    if (cache->owed) return spdl__cache_give_last(cache, item);
    if (!cache->warm) {
        result = spdl__cache_from_source(cache, item, timeout_ns);
        if (result != SPDL_END) return result;
        cache->warm = true; /* the source was short: the cache takes over at once */
    }
    spdl__cache_delete_source(cache);
    if (cache->kept == 0) return SPDL_END;
    result = spdl__cache_give(cache, cache->item[cache->position], item);
    if (result == SPDL_OK) cache->position = (cache->position + 1) % cache->kept;
    return result;
}

SPDL_API spdl_result spdl_cache_next_fn(void *cache, void **item, int64_t timeout_ns) {
    return spdl_cache_next((spdl_cache *)cache, item, timeout_ns);
}

/* ============================================================================================= */
/* >>compare-impl
   Is one thing quicker than another? Both are measured in each round, in an order that a drift of
   the machine cannot favour; the ratio of a round is free of what the round's two share; and the
   interval is the one of the sign test, which asks nothing of the noise but that rounds do not
   depend on each other. (As in nanobench's Bench::compare.) No state but the caller's, no libm. */

/* The geometric mean of two that are not negative: the middle of two ratios, either way up. */
SPDL__COLD double spdl__middle(double a, double b) {
    const double square = a * b;
    double root = square > 1 ? square : 1, next;
    while ((next = (root + square / root) / 2) < root) root = next; /* Newton, from above */
    return root;
}

SPDL__COLD int spdl__double_compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* How many of n rounds (up to 1000) may be cut off at either end: the largest k for which fewer
   than k of n fair coins show heads, or fewer than k tails, in 5 % of throws divided by the number
   of comparisons (Bonferroni). 0: with so few rounds nothing is known. */
SPDL__COLD int spdl__interval_rank(int n, int comparisons) {
    double term = 1, tail;
    int k;
    for (k = 0; k < n; ++k) term /= 2;
    tail = term; /* k or fewer heads */
    for (k = 0; 2 * tail * comparisons <= 0.05;) {
        ++k;
        term = term * (n - k + 1) / k;
        tail += term;
    }
    return k;
}

/* Of n ratios above 0, which are sorted on the way. A ratio of exactly 1 counts for both sides: it
   stays in the order. `comparisons`: how many are read from the same rounds, or chosen among. */
SPDL__COLD spdl_interval spdl__interval(double *ratio, int n, int comparisons) {
    spdl_interval interval = { 0, 0, __builtin_huge_val(), n, false };
    const int rank = spdl__interval_rank(n, comparisons);
    if (n > 0) {
        qsort(ratio, (size_t)n, sizeof(*ratio), spdl__double_compare);
        interval.value = spdl__middle(ratio[(n - 1) / 2], ratio[n / 2]);
    }
    if (rank > 0) {
        interval.low = ratio[rank - 1];
        interval.high = ratio[n - rank];
        interval.known = true;
    }
    return interval;
}

/* Which arm (from 0) stands where in a round: a cyclic Latin square of as many rounds as arms, so
   that each arm stands once in each place, with its rows and symbols in random order, and another
   one after each. The same seed has the same squares. */
#define SPDL__LATIN 16 /* arms at most */

typedef struct spdl__latin {
    uint64_t seed;
    int arms, square;
    uint8_t row[SPDL__LATIN], symbol[SPDL__LATIN];
} spdl__latin;

/* The next of a row of random numbers (splitmix64); it may begin with any state. */
SPDL__COLD uint64_t spdl__random(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* The numbers below n in random order. */
SPDL__COLD void spdl__latin_shuffle(uint8_t *order, int n, uint64_t *random) {
    int i;
    for (i = 0; i < n; ++i) {
        const int j = (int)(spdl__random(random) % (uint64_t)(i + 1));
        order[i] = order[j];
        order[j] = (uint8_t)i;
    }
}

SPDL__COLD void spdl__latin_start(spdl__latin *latin, uint64_t seed, int arms) {
    latin->seed = seed;
    latin->arms = arms;
    latin->square = -1;
}

SPDL__COLD int spdl__latin_arm(spdl__latin *latin, int round, int position) {
    const int n = latin->arms, square = round / n;
    if (square != latin->square) {
        uint64_t random = latin->seed + (uint64_t)square * 0xd1342543de82ef95u;
        spdl__latin_shuffle(latin->row, n, &random);
        spdl__latin_shuffle(latin->symbol, n, &random);
        latin->square = square;
    }
    return latin->symbol[(latin->row[round % n] + position) % n];
}

/* Whether others disturbed a measurement: read before it, asked about after it. */
typedef struct spdl__clocks {
    uint64_t time_ns, cpu_ns, idle_ns;
    double cores; /* of the machine */
} spdl__clocks;

#define SPDL__FOREIGN 0.15 /* processors of others that make figures worthless */

SPDL__COLD spdl__clocks spdl__clocks_read(void) {
    spdl_process_stats process;
    spdl__clocks clocks;
    clocks.time_ns = spdl_time_ns();
    clocks.idle_ns = spdl__os_machine_idle();
    spdl_process_read(&process);
    clocks.cpu_ns = process.cpu_ns;
    clocks.cores = process.cores;
    return clocks;
}

/* Processors that other programs have had since then: those that were neither idle nor ours. What
   runs at a low priority counts, too: it does not make way for other sessions everywhere. 0: not
   known. */
SPDL__COLD double spdl__clocks_foreign(const spdl__clocks *since) {
    const spdl__clocks now = spdl__clocks_read();
    const double ns = (double)(now.time_ns - since->time_ns);
    const double idle = (double)spdl__grown(since->idle_ns, now.idle_ns);
    const double own = (double)spdl__grown(since->cpu_ns, now.cpu_ns);
    const double others = now.cores - (idle + own) / ns;
    if (now.idle_ns == 0 || ns < 1e8) return 0;
    if (idle / ns >= 1) return 0; /* there is one for everybody */
    return others > 0 ? others : 0;
}

/* ============================================================================================= */
/* >>headspace-impl
   All of it runs in the caller's thread. Measuring fills in the rounds of the report; what they
   mean is worked out of them alone, at the end. */

#define SPDL__HEADSPACE_NS 300000000 /* a window; workers that have rested are given processors */
#define SPDL__HEADSPACE_LEAST_NS 50000000 /* sooner, so short ones understate harm */
#define SPDL__HEADSPACE_STEPS 8           /* in a window, at least */
#define SPDL__HEADSPACE_KEPT 32
#define SPDL__HEADSPACE_LEAVE 0.03 /* share of a step that is not worth anybody's time */

/* A stretch of the loop. */
typedef struct spdl__window {
    uint64_t steps, ns;
    uint64_t wait_ns;   /* inside of next */
    uint64_t queued_ns; /* the caller was ready to run */
} spdl__window;

typedef struct spdl__headspace { /* written by the caller of spdl_headspace */
    const spdl_headspace_desc *desc;
    spdl_headspace_report *report;
    void **item; /* those that are kept */
    int kept, position;
    uint64_t start, deadline, window_ns;
    uint64_t paused_ns;   /* since the source was asked */
    spdl__window usual;   /* as it is, before the first pause */
    spdl_result result;   /* not SPDL_OK: the source has ended or failed */
} spdl__headspace;

SPDL__COLD spdl_result spdl__headspace_check(const spdl_headspace_desc *desc) {
    if (desc->next == NULL || desc->step == NULL)
        return spdl__error_set(desc->error, SPDL_E_INVALID, "spdl: headspace: %s is NULL",
                               desc->next == NULL ? "next" : "step");
    if (desc->kept < 0)
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "spdl: headspace: kept is %d, must be at least 1", desc->kept);
    if (!(desc->seconds <= 86400 && (desc->seconds >= 0.1 || desc->seconds == 0)))
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "spdl: headspace: seconds is %g, must be 0.1 to 86400",
                               desc->seconds);
    return spdl__allocator_check(&desc->allocator, "headspace", desc->error);
}

SPDL__COLD void spdl__headspace_free(const spdl__headspace *h, void *item) {
    if (item != NULL && h->desc->free_item != NULL) h->desc->free_item(item);
}

/* False when there is none. */
SPDL__COLD bool spdl__headspace_take(spdl__headspace *h, void **item) {
    const spdl_headspace_desc *desc = h->desc;
    h->result = desc->next(desc->source, item, SPDL_FOREVER);
    if (h->result == SPDL_END) h->result = desc->next(desc->source, item, SPDL_FOREVER);
    h->report->items += h->result == SPDL_OK;
    return h->result == SPDL_OK;
}

/* Steps on the source's items, or on those that are kept, for so long and so many at least. */
SPDL__COLD spdl__window spdl__headspace_steps(spdl__headspace *h, bool live, uint64_t ns,
                                              uint64_t steps) {
    const uint64_t start = spdl_time_ns();
    spdl__window w = { 0, 0, 0, 0 };
    uint64_t queued[2] = { 0, 0 };
    spdl__os_thread_times(NULL, NULL, NULL, &queued[0]);
    while (w.ns < ns || w.steps < steps) {
        void *item = NULL;
        if (live) {
            if (!spdl__headspace_take(h, &item)) break;
            w.wait_ns += spdl_time_ns() - start - w.ns;
        } else {
            item = h->item[h->position];
            h->position = (h->position + 1) % h->kept;
        }
        h->desc->step(h->desc->ctx, item);
        if (live) spdl__headspace_free(h, item);
        ++w.steps;
        w.ns = spdl_time_ns() - start;
    }
    spdl__os_thread_times(NULL, NULL, NULL, &queued[1]);
    w.queued_ns = queued[0] == SPDL__NEVER ? 0 : queued[1] - queued[0];
    return w;
}

/* Takes the items to keep, for up to a fifth of the time; then the loop as it is. As no step runs
   meanwhile, what lay in buffers at the start is gone. */
SPDL__COLD void spdl__headspace_begin(spdl__headspace *h, int most) {
    const uint64_t until = h->start + (h->deadline - h->start) / 5;
    void *item = NULL;
    while (h->kept < most && (h->kept == 0 || spdl_time_ns() < until)) {
        if (!spdl__headspace_take(h, &item)) return;
        h->item[h->kept++] = item;
    }
    (void)spdl__headspace_steps(h, true, h->window_ns, 1);
    if (h->result == SPDL_OK)
        h->usual = spdl__headspace_steps(h, true, h->window_ns, SPDL__HEADSPACE_STEPS);
}

/* After a pause: drops what was loaded in it, so that the loop does not live on its buffers. There
   is nothing more of it when some calls of next in a row took as long as they usually do, or when
   as many items are gone as the loop takes in such a time. */
SPDL__COLD void spdl__headspace_drain(spdl__headspace *h) {
    uint64_t took[SPDL__HEADSPACE_STEPS] = { 0 }, sum = 0, since = spdl_time_ns(), i;
    const uint64_t wait = h->usual.wait_ns / h->usual.steps;
    const uint64_t most = h->usual.steps * h->paused_ns / h->usual.ns + 1;
    if (wait * 200 < h->usual.ns / h->usual.steps) return; /* its buffers are full all the time */
    for (i = 0; i < most && sum < SPDL__HEADSPACE_STEPS * wait * 9 / 10; ++i) {
        uint64_t *last = &took[i % SPDL__HEADSPACE_STEPS], now;
        void *item = NULL;
        if (!spdl__headspace_take(h, &item)) return;
        now = spdl_time_ns();
        spdl__headspace_free(h, item);
        sum += now - since - *last;
        *last = now - since;
        since = now;
    }
}

/* One window of the two, once things have settled. */
SPDL__COLD spdl__window spdl__headspace_window(spdl__headspace *h, bool live) {
    spdl__window w = { 0, 0, 0, 0 };
    if (live && h->paused_ns > 0) spdl__headspace_drain(h);
    if (h->result == SPDL_OK) w = spdl__headspace_steps(h, live, h->window_ns / 5, 1);
    h->paused_ns = live ? 0 : h->paused_ns + w.ns;
    if (h->result == SPDL_OK)
        w = spdl__headspace_steps(h, live, h->window_ns, SPDL__HEADSPACE_STEPS);
    h->paused_ns += live ? 0 : w.ns;
    return w;
}

SPDL__COLD void spdl__headspace_round(spdl__headspace *h, spdl__latin *order) {
    spdl_headspace_report *report = h->report;
    spdl_headspace_round *round = &report->round[report->rounds];
    const spdl__clocks before = spdl__clocks_read();
    spdl__window w[2]; /* as it is, on kept items */
    int i;
    for (i = 0; i < 2; ++i) {
        const int arm = spdl__latin_arm(order, report->rounds, i);
        w[arm] = spdl__headspace_window(h, arm == 0);
    }
    if (h->result != SPDL_OK) return; /* half a round is none */
    round->today = 1e9 * (double)w[0].steps / (double)w[0].ns;
    round->ceiling = 1e9 * (double)w[1].steps / (double)w[1].ns;
    round->waiting = (double)w[0].wait_ns / (double)w[0].ns;
    round->queued = (double)w[0].queued_ns / (double)w[0].ns -
                    (double)w[1].queued_ns / (double)w[1].ns;
    round->others = spdl__clocks_foreign(&before);
    round->dropped = round->others > SPDL__FOREIGN;
    ++report->rounds;
    spdl__logf(&h->desc->logger, SPDL_LOG_INFO,
               "spdl: headspace: round %d: %.4g steps/s, %.4g on kept items, others used %.2f "
               "processors%s", report->rounds, round->today, round->ceiling, round->others,
               round->dropped ? ": dropped" : "");
}

/* Rounds until the time is over. */
SPDL__COLD void spdl__headspace_measure(spdl__headspace *h) {
    spdl_headspace_report *report = h->report;
    const uint64_t budget = h->deadline - h->start;
    uint64_t setup, length, now;
    spdl__latin order;
    h->window_ns = spdl__max(spdl__min(budget / 32, SPDL__HEADSPACE_NS), SPDL__HEADSPACE_LEAST_NS);
    h->window_ns = spdl__max(h->window_ns, budget / (2 * SPDL_HEADSPACE_ROUNDS));
    spdl__headspace_begin(h, h->desc->kept > 0 ? h->desc->kept : SPDL__HEADSPACE_KEPT);
    if (h->result != SPDL_OK) return;
    spdl__latin_start(&order, spdl_time_ns(), 2);
    now = spdl_time_ns();
    setup = now - h->start;
    length = h->usual.ns * 5 / 2; /* of a round */
    while (report->rounds < SPDL_HEADSPACE_ROUNDS && now + length <= h->deadline) {
        spdl__headspace_round(h, &order);
        if (h->result != SPDL_OK) return;
        now = spdl_time_ns();
        length = (now - h->start - setup) / (uint64_t)report->rounds;
    }
    report->more_seconds = 1e-9 * (double)setup + 7e-9 * (double)length;
}

/* --- what it means --- */

/* Sorts them. */
SPDL__COLD double spdl__median(double *value, int n) {
    if (n == 0) return 0;
    qsort(value, (size_t)n, sizeof(*value), spdl__double_compare);
    return (value[(n - 1) / 2] + value[n / 2]) / 2;
}

SPDL__COLD void spdl__headspace_sum_up(spdl_headspace_report *report) {
    double value[6][SPDL_HEADSPACE_ROUNDS];
    int n = 0, i;
    for (i = 0; i < report->rounds; ++i) {
        const spdl_headspace_round *round = &report->round[i];
        if (round->dropped) continue;
        value[0][n] = round->today;
        value[1][n] = round->ceiling;
        value[2][n] = round->waiting;
        value[3][n] = round->queued;
        value[4][n] = round->ceiling / round->today;
        value[5][n++] = round->ceiling / round->today * (1 - round->waiting);
    }
    report->dropped = report->rounds - n;
    report->today = spdl__median(value[0], n);
    report->ceiling = spdl__median(value[1], n);
    report->waiting = spdl__median(value[2], n);
    report->queued = spdl__median(value[3], n);
    report->gain = spdl__interval(value[4], n, 1);
    report->harm = spdl__interval(value[5], n, 1);
    report->kind = report->gain.low > 1 ? SPDL_HEADSPACE_GAIN : SPDL_HEADSPACE_NONE;
    if (!report->gain.known)
        report->kind = spdl__interval_rank(report->rounds, 1) > 0 ? SPDL_HEADSPACE_FOREIGN
                                                                  : SPDL_HEADSPACE_FEW;
}

/* The share of a step that loading costs, for so many times as many steps without it. */
SPDL__COLD double spdl__headspace_cost(double gain) { return gain > 1 ? 1 - 1 / gain : 0; }

/* ", 2.1 h of this 12 h run": the share of the whole run, if its length is known. */
SPDL__COLD void spdl__headspace_run(spdl__text *text, const spdl_headspace_report *report,
                                    uint64_t run_steps, const char *before, double share) {
    const double run = (double)run_steps / report->today;
    const char *unit = run >= 3600 ? "h" : run >= 60 ? "min" : "s";
    const double length = run / (run >= 3600 ? 3600 : run >= 60 ? 60 : 1);
    if (run_steps == 0) return;
    spdl__text_add(text, ", %s%.*f %s of this %.*f %s run", before, share * length < 9.95,
                   share * length, unit, length < 9.95, length, unit);
}

SPDL__COLD void spdl__headspace_costs(spdl__text *text, const spdl_headspace_report *report,
                                      uint64_t run_steps) {
    const double cost = 100 * spdl__headspace_cost(report->gain.value);
    const double high = 100 * spdl__headspace_cost(report->gain.high);
    const double waiting = 100 * report->waiting;
    const bool leave = high < 100 * SPDL__HEADSPACE_LEAVE;
    const int digits = high < 9.95;
    spdl__text_add(text, "Loading costs %.*f %% of a step (%.*f to %.*f)", digits, cost, digits,
                   100 * spdl__headspace_cost(report->gain.low), digits, high);
    spdl__headspace_run(text, report, run_steps, leave ? "at most " : "",
                        (leave ? high : cost) / 100);
    spdl__text_add(text, leave ? ": leave it." : ": harm %.1f, waiting %.1f.",
                   cost > waiting ? cost - waiting : 0, waiting < cost ? waiting : cost);
}

SPDL__COLD void spdl__headspace_no_difference(spdl__text *text,
                                              const spdl_headspace_report *report,
                                              uint64_t run_steps) {
    const double high = spdl__headspace_cost(report->gain.high);
    spdl__text_add(text, "No difference: loading costs %s%.*f %% of a step",
                   high > 0 ? "at most " : "", high > 0 && high < 0.0995, 100 * high);
    if (high > 0) spdl__headspace_run(text, report, run_steps, "", high);
    spdl__text_add(text, high < SPDL__HEADSPACE_LEAVE ? ": leave it."
                                                      : "; a longer measurement knows it better.");
}

SPDL__COLD void spdl__headspace_unknown(spdl__text *text, const spdl_headspace_report *report) {
    double most = 0;
    int i;
    if (report->kind == SPDL_HEADSPACE_FEW) {
        spdl__text_add(text, "Too few rounds to say: %d, and 6 are needed",
                       report->rounds - report->dropped);
        if (report->more_seconds > 0)
            spdl__text_add(text, ": measure for %.0f seconds", report->more_seconds + 0.5);
        spdl__text_add(text, ".");
        return;
    }
    for (i = 0; i < report->rounds; ++i)
        if (report->round[i].others > most) most = report->round[i].others;
    spdl__text_add(text,
                   "Foreign load: in %d of %d rounds other programs used processors, up to %.1f: "
                   "no verdict.", report->dropped, report->rounds, most);
}

/* All of the report that follows from its rounds. */
SPDL__COLD void spdl__headspace_judge(spdl_headspace_report *report, uint64_t run_steps) {
    spdl__text text = spdl__text_start(report->text, sizeof(report->text));
    spdl__headspace_sum_up(report);
    if (report->kind == SPDL_HEADSPACE_GAIN)
        spdl__headspace_costs(&text, report, run_steps);
    else if (report->kind == SPDL_HEADSPACE_NONE)
        spdl__headspace_no_difference(&text, report, run_steps);
    else
        spdl__headspace_unknown(&text, report);
    if (report->kind != SPDL_HEADSPACE_FEW) report->more_seconds = 0;
    if (report->ended)
        spdl__text_add(&text, " The source ended after %llu items.", (spdl__llu)report->items);
}

SPDL_API spdl_result spdl_headspace(const spdl_headspace_desc *desc,
                                    spdl_headspace_report *report) {
    spdl__headspace h;
    spdl_result result;
    size_t bytes;
    int i;
    if (desc == NULL || report == NULL) return SPDL_E_INVALID;
    memset(report, 0, sizeof(*report));
    memset(&h, 0, sizeof(h));
    spdl__error_clear(desc->error);
    result = spdl__headspace_check(desc);
    if (result != SPDL_OK) return result;
    bytes = (size_t)(desc->kept > 0 ? desc->kept : SPDL__HEADSPACE_KEPT) * sizeof(*h.item);
    h.desc = desc;
    h.report = report;
    h.item = (void **)spdl__alloc(&desc->allocator, bytes, sizeof(*h.item));
    if (h.item == NULL)
        return spdl__error_set(desc->error, SPDL_E_NOMEM, "spdl: headspace: out of memory");
    h.start = spdl_time_ns();
    h.deadline = h.start + (uint64_t)(1e9 * (desc->seconds > 0 ? desc->seconds : 10));
    spdl__headspace_measure(&h);
    for (i = 0; i < h.kept; ++i) spdl__headspace_free(&h, h.item[i]);
    spdl__free(&desc->allocator, h.item, bytes);
    report->ended = h.result == SPDL_END;
    spdl__headspace_judge(report, desc->run_steps);
    if (h.result == SPDL_OK || report->ended) return SPDL_OK;
    return spdl__error_set(desc->error, h.result,
                           "spdl: headspace: next returned '%s' after %llu items",
                           spdl_result_text(h.result), (spdl__llu)report->items);
}

/* ============================================================================================= */
/* >>probe-impl
   The doctor's hand in the rows. In a pipeline with a doctor each row that calls a function calls
   probe_call in its place, which may make the call take longer, keep what it made, or leave it out.
   In all others nothing of this is looked at.

   Replay. While the flow is cut after row k, calls of the source make tokens instead of items. A
   token passes row after row without a call, a row of batches one for each `size` of them, until
   row k (.copy_item) puts a copy of a kept item in its place, or row k + 1 (.const_input) is called
   with a kept item. So real items before and after the cut lose nothing and keep their numbers, and
   when the cut ends what is still a token goes on to its row. A token has an origin of its own:
   nobody frees it. Kept items are a random sample of those seen in the time of observing; nobody
   looks at them before that is over, and nobody changes them after.

   Threads: the trainer sets what is different; any worker calls. */

#ifndef SPDL_NO_REPORT

#define SPDL__KEPT 32         /* items of a row */
#define SPDL__KEPT_BYTES ((size_t)256 << 20) /* of them, where their size is known */
#define SPDL__SLEEP_NS 100000 /* a thread that is to sleep a while does so in pieces of this */

typedef enum spdl__replay { SPDL__REPLAY_NOT, SPDL__REPLAY_COPY, SPDL__REPLAY_INPUT } spdl__replay;

/* One row. */
typedef struct spdl__probe {
    const spdl_function *fn; /* the user's; NULL: the row calls none */
    spdl_function call;      /* what the row has in its place */
    uint32_t replay;         /* spdl__replay: how its results can be replayed */
    size_t bytes;            /* kept are copies of so many bytes; 0: copy_item's, or inputs */
    uint64_t most;           /* are kept: up to SPDL__KEPT, as far as their size is known */
    uint64_t seen, turn;
    uint32_t lock;
    uint32_t broken;         /* the row after it keeps its input, or hands it on */
    int count;               /* of `kept`; by the trainer when that is complete */
    spdl__item kept[SPDL__KEPT];
    uint64_t item_ns;        /* of a call, when nothing was different */
    uint64_t delay_ns;       /* each call takes longer by this: computing, or asleep */
    uint32_t asleep;
    uint64_t worked;         /* what the computing comes to */
} spdl__probe;

/* What a thread still has to sleep, of a row or of the trainer. */
typedef struct spdl__debt {
    uint64_t arm;
    int64_t ns;
} spdl__debt;

struct spdl__hand {
    spdl_pipeline *p;
    spdl__probe probe[SPDL_MAX_STAGES];
    char token[SPDL_MAX_STAGES]; /* their addresses are the tokens; by the row of the cut */
    spdl__debt *debt;        /* [worker * rows + row], the trainer's last */
    uint32_t keeps;          /* results are kept */
    uint32_t cut;            /* 1 + the row after which the flow is cut; 0: none */
    uint64_t cut_until;      /* for so long at most: an item may not come before the source ends */
    uint64_t arm;            /* counts what was set */
    double rounds_ns;        /* of counted work, in a nanosecond */
    spdl__os_event never;    /* nobody wakes it */
};

/* Counted work: a clock would go on while others have the processor. */
SPDL__NOINLINE uint64_t spdl__spin_work(uint64_t rounds) {
    uint64_t x = rounds;
    while (rounds-- > 0) x = (x ^ x >> 29) * 6364136223846793005u + 1442695040888963407u;
    return x;
}

/* How much of it fits in a nanosecond: the best of some tries. */
SPDL__COLD void spdl__spin_calibrate(spdl__hand *hand) {
    uint64_t best = SPDL__NEVER, begun;
    int i;
    for (i = 0; i < 16; ++i) {
        begun = spdl_time_ns();
        hand->probe[0].worked += spdl__spin_work(20000);
        best = spdl__min(best, spdl_time_ns() - begun);
    }
    hand->rounds_ns = 20000 / (double)spdl__max(best, 1);
}

/* Takes `ns`, now or in the calls to come: sleeping takes its own time, which is counted. */
SPDL__COLD void spdl__hand_delay(spdl__hand *hand, spdl__debt *debt, uint64_t ns, bool asleep,
                                 uint64_t *worked) {
    const uint64_t arm = spdl__load_relaxed(&hand->arm);
    uint64_t begun;
    if (!asleep) {
        spdl__store_relaxed(worked, spdl__spin_work((uint64_t)((double)ns * hand->rounds_ns)));
        return;
    }
    if (debt->arm != arm) debt->ns = 0;
    debt->arm = arm;
    debt->ns += (int64_t)ns;
    if (debt->ns < SPDL__SLEEP_NS) return;
    begun = spdl_time_ns();
    (void)spdl__os_event_sleep(&hand->never, spdl__load32(&hand->never.word),
                               begun + (uint64_t)debt->ns);
    debt->ns -= (int64_t)(spdl_time_ns() - begun);
}

/* --- what is kept --- */

SPDL__COLD void spdl__kept_free(spdl_pipeline *p, const spdl__probe *probe,
                                const spdl__item *kept) {
    if (kept->item == NULL) return;
    if (probe->bytes > 0)
        spdl__free(&p->allocator, kept->item, probe->bytes);
    else
        spdl__item_free(p, kept->item, kept->origin);
}

SPDL__COLD void *spdl__kept_copy(const spdl_task *task, const spdl__probe *probe,
                                 const void *item) {
    void *copy;
    if (probe->bytes == 0) return task->node->row.copy_item(item);
    if (item != task->buffer) return NULL; /* who knows how large it is */
    copy = spdl__alloc(&task->pipeline->allocator, probe->bytes, SPDL_CACHE_LINE);
    if (copy != NULL) memcpy(copy, item, probe->bytes);
    return copy;
}

/* The place of one more result in the sample, or SPDL__KEPT: it is not kept. */
SPDL__COLD uint64_t spdl__kept_place(spdl__probe *probe) {
    const uint64_t seen = spdl__add(&probe->seen, 1);
    uint64_t random = seen;
    if (seen < probe->most) return seen;
    random = spdl__random(&random) % (seen + 1);
    return random < probe->most ? random : SPDL__KEPT;
}

/* Whether it is there now; if not it stays the caller's. */
SPDL__COLD bool spdl__kept_store(spdl__hand *hand, spdl__probe *probe, uint64_t place,
                                 const spdl__item *what) {
    spdl__item old = *what;
    bool keeps;
    spdl__spin_lock(&probe->lock);
    keeps = spdl__load32(&hand->keeps) != 0;
    if (keeps) {
        old = probe->kept[place];
        probe->kept[place] = *what;
    }
    spdl__spin_unlock(&probe->lock);
    if (keeps) spdl__kept_free(hand->p, probe, &old); /* user code */
    return keeps;
}

/* After a call that was made as always: its result is kept, or its input. */
SPDL__COLD void spdl__kept_look(spdl_task *task, spdl__hand *hand, const void *out) {
    const int row = task->node->index;
    spdl__probe *probe = &hand->probe[row];
    uint64_t place = SPDL__KEPT;
    if (task->call_error) return; /* it will have failed */
    if (spdl__load_relaxed32(&probe->replay) == SPDL__REPLAY_COPY && out != NULL &&
        (place = spdl__kept_place(probe)) < SPDL__KEPT) {
        spdl__item what = { NULL, 0, 0 };
        what.item = spdl__kept_copy(task, probe, out);
        what.origin = spdl__origin(0, (unsigned)row);
        if (what.item != NULL && !spdl__kept_store(hand, probe, place, &what))
            spdl__kept_free(hand->p, probe, &what);
    }
    if (row == 0 || task->in.item == NULL ||
        spdl__load_relaxed32(&probe[-1].replay) != SPDL__REPLAY_INPUT)
        return;
    if (out == task->in.item || task->taken) {
        spdl__store32(&probe[-1].broken, 1);
    } else if ((place = spdl__kept_place(&probe[-1])) < SPDL__KEPT) {
        task->taken = spdl__kept_store(hand, &probe[-1], place, &task->in);
    }
}

/* The sample is complete: nothing is kept any more. */
SPDL__COLD void spdl__kept_close(spdl__hand *hand) {
    int i, k;
    spdl__store32(&hand->keeps, 0);
    for (i = 0; i < hand->p->count; ++i) {
        spdl__probe *probe = &hand->probe[i];
        spdl__spin_lock(&probe->lock); /* a thread that has seen `keeps` has stored */
        for (k = 0; k < SPDL__KEPT; ++k)
            if (probe->kept[k].item != NULL) probe->kept[probe->count++] = probe->kept[k];
        for (k = probe->count; k < SPDL__KEPT; ++k) probe->kept[k].item = NULL;
        if (spdl__load32(&probe->broken) || probe->count < 2)
            spdl__store_relaxed32(&probe->replay, SPDL__REPLAY_NOT);
        spdl__spin_unlock(&probe->lock);
    }
}

/* --- a call --- */

SPDL__COLD spdl__item *spdl__kept_next(spdl__probe *probe) {
    return &probe->kept[spdl__add(&probe->turn, 1) % (uint64_t)probe->count];
}

/* A token becomes a copy of what was kept; without memory for it nothing, as it was nothing. */
SPDL__COLD spdl_result spdl__probe_copy(spdl_task *task, spdl__probe *probe, void **out) {
    const spdl__item *kept = spdl__kept_next(probe);
    if (probe->bytes == 0) {
        *out = task->node->row.copy_item(kept->item);
    } else {
        *out = spdl_buffer(task);
        if (*out != NULL) memcpy(*out, kept->item, probe->bytes);
    }
    return *out != NULL ? SPDL_OK : SPDL_SKIP;
}

/* A token goes on, or from the source is made. */
SPDL__COLD spdl_result spdl__probe_pass(spdl_task *task, void *token, void **out) {
    if (task->node->in == NULL) task->buffer = token; /* task_origin knows it by that */
    if (task->node->row.emits) return spdl_emit(task, token) == SPDL_OK ? SPDL_OK : SPDL_SKIP;
    *out = token;
    return SPDL_OK;
}

/* A row is called with what was kept of the row before. What it takes is not ours any more. */
SPDL__COLD spdl_result spdl__probe_again(spdl_task *task, spdl__probe *probe, void **out) {
    spdl__item *kept = spdl__kept_next(&probe[-1]);
    spdl_result result;
    task->in.item = spdl__load_pointer(&kept->item); /* with the origin of the token */
    if (task->in.item == NULL) return SPDL_SKIP;
    result = probe->fn->call(task, task->in.item, out);
    if (task->taken && !task->node->row.emits) spdl__store_pointer(&kept->item, NULL);
    if (task->taken || (result == SPDL_OK && *out == task->in.item))
        return spdl__task_row_error(task, "its row says .const_input, but it has kept its input "
                                          "or handed it on");
    return result;
}

/* The row after which the flow is cut, for this call: the source looks, a token knows. -1: it is an
   item. A call with a kept item that has failed is repeated with another one. */
SPDL__INLINE int spdl__probe_cut(const spdl_task *task, spdl__hand *hand, const void *in) {
    const int row = task->node->index;
    int cut;
    if (task->node->in != NULL) {
        cut = spdl__token_row(task->pipeline, in);
        return cut < 0 && spdl__origin_tag(task->in.origin) == SPDL__TOKEN ? row - 1 : cut;
    }
    cut = (int)spdl__load32(&hand->cut) - 1; /* pairs with its store: the kept are complete */
    return SPDL__UNLIKELY(cut >= 0) && spdl_time_ns() > spdl__load_relaxed(&hand->cut_until) ? -1
                                                                                           : cut;
}

/* What rows call instead of their function. */
SPDL__PRIVATE spdl_result spdl__probe_call(spdl_task *task, void *in, void **out) {
    spdl_pipeline *p = task->pipeline;
    spdl__node *node = task->node;
    spdl__hand *hand = p->hand;
    spdl__probe *probe = &hand->probe[node->index];
    const bool source = node->in == NULL;
    const int cut = spdl__probe_cut(task, hand, in);
    const uint64_t delay_ns = spdl__load_relaxed(&probe->delay_ns);
    spdl_result result;
    if (SPDL__UNLIKELY(cut >= 0)) {
        /* a call is not as quick as this */
        spdl__store_relaxed(&node->item_ns, spdl__load_relaxed(&probe->item_ns));
        if (cut + 1 != node->index || probe[-1].replay != SPDL__REPLAY_INPUT) {
            result = cut == node->index && probe->replay == SPDL__REPLAY_COPY
                         ? spdl__probe_copy(task, probe, out)
                         : spdl__probe_pass(task, source ? &hand->token[cut] : in, out);
            if (source && result == SPDL_OK) /* it has no number */
                spdl__store_relaxed(&node->made, node->made - 1);
            return result;
        }
    }
    if (delay_ns > 0)
        spdl__hand_delay(hand, &hand->debt[task->worker * p->count + node->index], delay_ns,
                         spdl__load_relaxed32(&probe->asleep), &probe->worked);
    if (SPDL__UNLIKELY(cut >= 0)) return spdl__probe_again(task, probe, out);
    result = probe->fn->call(task, in, out);
    if (SPDL__UNLIKELY(spdl__load_relaxed32(&hand->keeps)) && result == SPDL_OK)
        spdl__kept_look(task, hand, *out);
    return result;
}

/* --- a pipeline gets it, and loses it --- */

/* How the results of a row can be replayed. Tokens are items to a branch or a merge: none there. */
SPDL__COLD void spdl__probe_replay(const spdl_pipeline *p, const spdl__node *node,
                                   spdl__probe *probe) {
    const spdl_stage *row = &node->row, *next = node == p->last ? NULL : &node[1].row;
    const bool plain = spdl__row_calls(row) && !row->emits && !row->again;
    const size_t bytes = node->places                  ? next->item_bytes
                         : row->kind == SPDL_KIND_BATCH ? (size_t)row->size * row->item_bytes
                                                        : row->item_bytes;
    int i;
    for (i = 0; i < p->count; ++i)
        if ((!spdl__row_calls(&p->node[i].row) && p->node[i].row.kind != SPDL_KIND_BATCH) ||
            p->node[i].row.kind == SPDL_KIND_BRANCH)
            return;
    probe->most = spdl__max(2, spdl__min(SPDL__KEPT, SPDL__KEPT_BYTES / spdl__max(bytes, 1)));
    if (plain && (row->copy_item != NULL || bytes > 0)) {
        probe->replay = SPDL__REPLAY_COPY;
        if (row->copy_item == NULL) probe->bytes = bytes;
    } else if (next != NULL && next->const_input && !next->again && !next->deferred) {
        probe->replay = SPDL__REPLAY_INPUT;
    }
}

SPDL__COLD spdl_result spdl__hand_open(spdl_pipeline *p, bool replay) {
    const size_t debts = (size_t)(p->workers * p->count + 1);
    spdl__hand *hand =
        (spdl__hand *)spdl__alloc_zeroed(&p->allocator, 1, sizeof(*hand), SPDL_CACHE_LINE);
    int i;
    if (hand == NULL) return SPDL_E_NOMEM;
    hand->debt = (spdl__debt *)spdl__alloc_zeroed(&p->allocator, debts, sizeof(*hand->debt), 8);
    if (hand->debt == NULL || !spdl__os_event_init(&hand->never)) {
        spdl__free(&p->allocator, hand->debt, debts * sizeof(*hand->debt));
        spdl__free(&p->allocator, hand, sizeof(*hand));
        return SPDL_E_NOMEM;
    }
    hand->p = p;
    p->hand = hand;
    p->tokens = replay ? hand->token : NULL;
    for (i = 0; i < p->count; ++i) {
        spdl__node *node = &p->node[i];
        spdl__probe *probe = &hand->probe[i];
        if (!spdl__row_calls(&node->row)) continue;
        probe->fn = node->row.fn;
        probe->call = *probe->fn;
        probe->call.call = spdl__probe_call;
        node->row.fn = &probe->call;
    }
    for (i = 0; replay && i < p->count; ++i)
        spdl__probe_replay(p, &p->node[i], &hand->probe[i]);
    spdl__spin_calibrate(hand);
    return SPDL_OK;
}

/* No call of a row is to come: what was kept is freed. */
SPDL__COLD void spdl__hand_empty(spdl_pipeline *p) {
    int i, k;
    for (i = 0; p->hand != NULL && i < p->count; ++i)
        for (k = 0; k < SPDL__KEPT; ++k) {
            spdl__item *kept = &p->hand->probe[i].kept[k];
            spdl__kept_free(p, &p->hand->probe[i], kept);
            kept->item = NULL;
        }
}

/* The rows have their own functions again. With replay there may be tokens under way. */
SPDL__COLD void spdl__hand_leave(spdl_pipeline *p) {
    spdl__probe *probe = p->hand->probe;
    int i;
    for (i = 0; p->tokens == NULL && i < p->count; ++i)
        if (probe[i].fn != NULL) spdl__store_fn(&probe[i].call.call, probe[i].fn->call);
}

SPDL__COLD void spdl__hand_close(spdl_pipeline *p) {
    spdl__hand *hand = p->hand;
    if (hand == NULL) return;
    spdl__hand_empty(p);
    spdl__os_event_fini(&hand->never);
    spdl__free(&p->allocator, hand->debt,
               (size_t)(p->workers * p->count + 1) * sizeof(*hand->debt));
    spdl__free(&p->allocator, hand, sizeof(*hand));
    p->hand = NULL;
}
/* ============================================================================================= */
/* >>doctor-impl
   The experiments, and what follows from them. All of it runs on the thread of the trainer, in
   next: an item ends a window or does not. What is different in a window is set before it, some
   items and some time are let pass, and then the time is taken from one item to another.

   The model is the operational law: a row allows c / (V t) items/s, c calls at a time of t each and
   V of them for an item, what a call waited for a processor left out; the processors, the workers
   and the trainer allow what they do; the least of these is the rate. */

#define SPDL__DOCTOR_SECONDS 10
#ifndef SPDL__WINDOW_NS
#define SPDL__WINDOW_NS 50000000  /* the least length of a window */
#endif
#define SPDL__WINDOW_ITEMS 8
#define SPDL__SETTLE_NS 1e9       /* the most that is let pass for what was ready to be gone */
#define SPDL__ROUNDS 11           /* of a phase, if there is time for them */
#define SPDL__ROUNDS_LEAST 6      /* fewer say nothing */
#define SPDL__SLOWER 0.2          /* calls are made longer by this share */
#define SPDL__BUSY_ROW 0.4        /* a row that is less busy is not looked at */
#define SPDL__TINY_NS 10000       /* calls as short as this take no longer than handing over does */
#define SPDL__FITS 0.8            /* below this share of its rate the model explains nothing */
#define SPDL__EVEN 0.9            /* below this a larger buffer may even out what comes unevenly */
#define SPDL__GAIN 1.04           /* what is less is not worth a word */
#define SPDL__WAITED 0.05         /* then our threads wait for a processor so much of the time */
#define SPDL__HARM 0.05           /* of a step, waiting for a processor */
#define SPDL__BURSTY 0.3          /* the same twice differs by more */
#define SPDL__COOLING 0.3         /* of the time, for windows with cold files and those before */
#define SPDL__COLD_ROUNDS 8
#define SPDL__COLD_NS 200000000   /* for taking files out of the page cache */
#define SPDL__LOOK_NS 10000000    /* between two looks which files are open */
#define SPDL__READ_LEAST (1 << 20) /* bytes that say where they came from */

/* What limits, where it is no row. */
enum { SPDL__BY_TRAINER = -1, SPDL__BY_MACHINE = -2, SPDL__BY_WORKERS = -3, SPDL__BY_NONE = -4 };

typedef enum spdl__arm_kind {
    SPDL__ARM_BASE,
    SPDL__ARM_CUT,     /* after `row` */
    SPDL__ARM_KEPT,    /* the trainer works on what it has, the pipeline is not asked */
    SPDL__ARM_COMPUTE, /* calls of `row` take `value` ns longer */
    SPDL__ARM_SLEEP,
    SPDL__ARM_PAUSE,   /* the trainer does */
    SPDL__ARM_CALLS,   /* `row` has a concurrency of `value` */
    SPDL__ARM_WORKER,  /* one more */
    SPDL__ARM_BUFFER,  /* of the sink */
    SPDL__ARM_COLD     /* files are taken out of the page cache first */
} spdl__arm_kind;

typedef struct spdl__arm {
    spdl__arm_kind kind;
    int row;
    uint64_t value;
} spdl__arm;

typedef enum spdl__doctor_phase {
    SPDL__DOCTOR_WARM,
    SPDL__DOCTOR_OBSERVE,
    SPDL__DOCTOR_SCREEN,
    SPDL__DOCTOR_CONFIRM,
    SPDL__DOCTOR_BEFORE, /* with `cold`: windows as it is */
    SPDL__DOCTOR_COLD,
    SPDL__DOCTOR_DONE
} spdl__doctor_phase;

struct spdl__doctor {
    spdl_pipeline *p;
    spdl__doctor_plan plan;
    spdl__doctor_phase phase;
    uint64_t begun_ns, phase_ns; /* the first item; the phase */
    uint64_t items;              /* since the first */
    spdl_stats last, now;        /* at both ends of observing */
    spdl_process_stats process;
    uint64_t step_since, step_sum, step_cpu, step_queued, steps; /* of the trainer, observing */
    uint64_t step_cpu_at, step_queued_at;
    spdl__os_file schedstat;     /* of the trainer's thread */
    /* windows */
    spdl__arm arm[SPDL_DOCTOR_ARMS];
    int arms, first, position, round; /* arms from `first` of the report's are of this phase */
    spdl__latin latin;
    bool counting;
    uint64_t window_ns, settle_items, settle_ns; /* lengths */
    uint64_t window_since, window_items;         /* of the one at hand: when, and d->items then */
    uint64_t set_since, set_items;               /* when it was set */
    uint64_t waited_ns;          /* the trainer, before the item at hand */
    spdl__clocks clocks;         /* when the round began */
    uint64_t queued_ns;          /* of our threads, then */
    double foreign;              /* sum over rounds */
    double others;               /* processors that others had in the time of observing, */
    bool disturbed;              /* and we have waited for some */
    double observed;             /* items/s then */
    uint64_t pause_ns;           /* of the trainer, each step */
    uint32_t limit[SPDL_MAX_STAGES]; /* as it is */
    bool serial[SPDL_MAX_STAGES];    /* the row says that it may have one call at a time only */
    bool tuned[SPDL_MAX_STAGES];     /* it may be changed */
    uint64_t buffer;
    bool worker_kept;            /* the further worker goes on */
    uint32_t holds;              /* it is kept away: see doctor_worker */
    spdl__os_event hold;
    void *kept[SPDL__KEPT];      /* of doctor_run, for SPDL__ARM_KEPT */
    uint64_t kept_origin[SPDL__KEPT];
    int kept_count;
    char files[8192];            /* seen: names, each with a zero behind it */
    size_t files_used;
    uint64_t looked_ns;          /* for them, last */
    uint64_t read_asked, read_disk;  /* when the window began */
    double asked[2], from_disk[2];   /* in windows as it is, in cold ones */
    double predicted[SPDL_DOCTOR_TRIALS]; /* by the model, whether it fits or not */
    bool keeps_to_itself;        /* the arm is SPDL__ARM_KEPT */
    bool ended;                  /* the pipeline has, before the doctor was done */
    spdl_doctor_report report;
};

/* How many of the first group's workers are the doctor's. */
SPDL__COLD int spdl__doctor_workers(const spdl__doctor *d) {
    return d->p->group[0].pool != NULL ? d->p->group[0].workers - d->report.workers : 0;
}

/* Whether calls of this row need a worker of the pool. */
SPDL__COLD bool spdl__doctor_pooled(const spdl__doctor *d, int row) {
    return d->p->node[row].group == &d->p->group[0] && !d->p->node[row].row.deferred;
}

/* --- the model --- */

/* What is different from the rows as they are. */
typedef struct spdl__what_if {
    int row;
    double speed;  /* of its calls */
    int calls;     /* more at a time */
    int workers;   /* more */
} spdl__what_if;

typedef struct spdl__law {
    double rate, next; /* items/s; and if what limits did not */
    int by, next_by;
} spdl__law;

SPDL__COLD void spdl__law_limit(spdl__law *law, double rate, int by) {
    if (!(rate > 0)) return;
    if (rate < law->rate) {
        law->next = law->rate;
        law->next_by = law->by;
        law->rate = rate;
        law->by = by;
    } else if (rate < law->next) {
        law->next = rate;
        law->next_by = by;
    }
}

SPDL__COLD spdl__law spdl__law_of(const spdl__doctor *d, const spdl__what_if *what) {
    const spdl_doctor_report *r = &d->report;
    spdl__law law = { 1e18, 1e18, SPDL__BY_NONE, SPDL__BY_NONE };
    double cpu = r->step_cpu_ns, calls = 0;
    int workers = r->workers + (what != NULL ? what->workers : 0), i;
    for (i = 0; i < r->row_count; ++i) {
        const spdl_doctor_row *row = &r->row[i];
        const bool pooled = spdl__doctor_pooled(d, i);
        const double speed = what != NULL && what->row == i ? what->speed : 1;
        const double ns = (row->mean_ns - row->runnable_ns) / speed;
        int most = row->concurrency + (what != NULL && what->row == i ? what->calls : 0);
        if (row->mean_ns <= 0) continue;
        cpu += row->visits * row->cpu_ns / speed;
        if (pooled) calls += row->visits * ns;
        if (pooled && workers > 0 && most > workers) most = workers;
        if (d->p->node[i].row.threads > 0 && most > d->p->node[i].row.threads)
            most = d->p->node[i].row.threads;
        spdl__law_limit(&law, 1e9 * most / (row->visits * ns), i);
    }
    spdl__law_limit(&law, 1e9 / r->step_ns, SPDL__BY_TRAINER);
    spdl__law_limit(&law, 1e9 * r->cores / cpu, SPDL__BY_MACHINE);
    if (d->p->group[0].pool == NULL) /* the trainer does it all */
        spdl__law_limit(&law, 1e9 / (calls + r->step_ns), SPDL__BY_WORKERS);
    else
        spdl__law_limit(&law, 1e9 * workers / calls, SPDL__BY_WORKERS);
    return law;
}

/* More workers, until something else limits; if that brings nothing, with them more calls of a row
   that may use them all. */
SPDL__COLD spdl__what_if spdl__law_workers(const spdl__doctor *d, int row) {
    const double rate = spdl__law_of(d, NULL).rate;
    spdl__what_if what = { row, 1, 0, 1 };
    while (what.workers < 64 && spdl__law_of(d, &what).by == SPDL__BY_WORKERS) ++what.workers;
    if (spdl__law_of(d, &what).rate > SPDL__GAIN * rate || d->serial[row]) return what;
    for (what.workers = 0; what.workers < 64; ++what.workers, ++what.calls) {
        const int by = spdl__law_of(d, &what).by;
        if (what.workers > 0 && by != SPDL__BY_WORKERS && by != row) break;
    }
    return what;
}

/* The least concurrency of a row with which something else limits, as far as it may be raised. */
SPDL__COLD int spdl__law_calls(const spdl__doctor *d, int row, int most) {
    spdl__what_if what = { row, 1, 1, 0 };
    const int now = d->report.row[row].concurrency;
    while (now + what.calls < most && spdl__law_of(d, &what).by == row) ++what.calls;
    return now + what.calls;
}

/* --- observing --- */

/* Before and after a step of the trainer. */
SPDL__COLD void spdl__doctor_step_begins(spdl__doctor *d) {
    spdl__os_thread_times(NULL, &d->schedstat, NULL, &d->step_queued_at);
    spdl__os_thread_times(NULL, NULL, &d->step_cpu_at, NULL);
    d->step_since = spdl_time_ns();
}

SPDL__COLD void spdl__doctor_step_ends(spdl__doctor *d) {
    uint64_t cpu, queued;
    if (d->step_since == 0) return;
    d->step_sum += spdl_time_ns() - d->step_since;
    spdl__os_thread_times(NULL, NULL, &cpu, NULL);
    spdl__os_thread_times(NULL, &d->schedstat, NULL, &queued);
    if (cpu != SPDL__NEVER) d->step_cpu += cpu - d->step_cpu_at;
    if (queued != SPDL__NEVER && d->step_queued_at != SPDL__NEVER)
        d->step_queued += queued - d->step_queued_at;
    d->step_since = 0;
}

SPDL__COLD void spdl__doctor_row_look(spdl__doctor *d, int i) {
    const spdl_stage_stats *now = &d->now.stage[i], *last = &d->last.stage[i];
    const spdl_stage *row = &d->p->node[i].row;
    spdl_doctor_row *to = &d->report.row[i];
    const double calls = (double)(now->tasks - last->tasks);
    const double tasks = calls - (double)(now->failures - last->failures); /* that are timed */
    const double busy = (double)(now->busy_ns - last->busy_ns);
    const double items = (double)(d->now.delivered - d->last.delivered);
    const double whole = (double)now->busy_ns;
    memcpy(to->name, now->name, sizeof(to->name));
    to->kind = now->kind;
    to->concurrency = (int)d->limit[i];
    to->may_raise = row->kind == SPDL_KIND_PIPE && row->max_concurrency > (int)d->limit[i];
    if (!spdl__row_calls(row) || tasks <= 0 || busy <= 0 || items <= 0) return;
    to->visits = calls / items;
    to->mean_ns = busy / tasks;
    to->cpu_ns = row->deferred ? 0 : to->mean_ns; /* if nothing is known */
    if (now->split_calls > 0 && whole > 0) {
        to->cpu_ns = to->mean_ns * (double)now->cpu_ns / whole;
        to->runnable_ns = to->mean_ns * (double)now->runnable_ns / whole;
    }
    to->blocked_ns = to->mean_ns - to->cpu_ns - to->runnable_ns;
    if (to->blocked_ns < 0) to->blocked_ns = 0;
    to->load = busy / ((double)(d->now.elapsed_ns - d->last.elapsed_ns)) / to->concurrency;
    spdl__store_relaxed(&d->p->hand->probe[i].item_ns, (uint64_t)to->mean_ns);
}

/* The share of the trainer's steps in which it waits for copies to a device. */
SPDL__COLD double spdl__doctor_copies(const spdl__doctor *d) {
    return spdl__share(d->now.step_device_ns - d->last.step_device_ns,
                       d->now.step_ns - d->last.step_ns);
}

/* The end of observing. */
SPDL__COLD void spdl__doctor_look(spdl__doctor *d) {
    spdl_doctor_report *r = &d->report;
    spdl_process_stats process;
    double ns, visits_most = 1;
    uint64_t there = 0;
    int i;
    spdl_pipeline_stats(d->p, &d->now);
    spdl_process_read(&process);
    ns = (double)(d->now.elapsed_ns - d->last.elapsed_ns);
    r->row_count = d->p->count;
    r->cores = process.cores_allowed;
    r->cores_used = (double)(process.cpu_ns - d->process.cpu_ns) / ns;
    r->today = d->observed = 1e9 * (double)(d->now.delivered - d->last.delivered) / ns;
    r->waiting = (double)(d->now.wait_ns - d->last.wait_ns) / ns;
    if (d->steps > 0) {
        r->step_ns = (double)d->step_sum / (double)d->steps;
        r->step_cpu_ns = (double)d->step_cpu / (double)d->steps;
        r->harm = d->step_sum > 0 ? (double)d->step_queued / (double)d->step_sum : 0;
        r->harm = spdl__smaller(r->harm, 0.95);
    }
    for (i = 0; i < r->row_count; ++i) spdl__doctor_row_look(d, i);
    for (i = r->row_count - 1; i >= 0; --i) { /* sink items that lie in buffers and calls */
        const spdl__node *node = &d->p->node[i];
        if (r->row[i].visits > 0) visits_most = r->row[i].visits;
        there += (uint64_t)((double)(node->out.buffer_size + d->limit[i]) / visits_most + 0.5);
    }
    for (i = 0; i < r->row_count; ++i) {
        spdl_doctor_row *row = &r->row[i];
        if (row->mean_ns > 0)
            row->most = 1e9 * row->concurrency / (row->visits * (row->mean_ns - row->runnable_ns));
    }
    d->settle_items = there;
    r->model = spdl__law_of(d, NULL).rate;
    r->ceiling = r->step_ns * (1 - r->harm - spdl__doctor_copies(d));
    r->ceiling = r->ceiling > 0 ? 1e9 / r->ceiling : 0;
}

/* --- windows --- */

SPDL__COLD void spdl__doctor_limit(spdl__doctor *d, int row, uint32_t calls) {
    spdl__node *node = &d->p->node[row];
    if (spdl__load_relaxed32(&node->limit) == calls) return;
    spdl__store32(&node->limit, calls);
    spdl__wake_changed(d->p, node);
}

/* The job that keeps a worker away. */
SPDL__COLD void spdl__doctor_hold(void *arg, int worker, void *local) {
    spdl__doctor *d = (spdl__doctor *)arg;
    (void)worker;
    (void)local;
    for (;;) {
        const uint32_t word = spdl__load32(&d->hold.word);
        uint32_t holds = 2;
        if (spdl__cas32(&d->holds, &holds, 0)) break;
        (void)spdl__os_event_sleep(&d->hold, word, SPDL__NEVER);
    }
}

/* Whether the worker that create has made for the doctor works: `holds` is 1 while it is kept away,
   2 until it has left the job, 0 without. */
SPDL__COLD void spdl__doctor_worker(spdl__doctor *d, bool works) {
    uint32_t holds = 1;
    if (spdl__doctor_workers(d) == 0) return;
    if (works && spdl__cas32(&d->holds, &holds, 2)) {
        spdl__os_event_wake(&d->hold, SPDL__ALL);
    } else if (!works) {
        holds = 2; /* it has not left yet: it stays */
        if (spdl__cas32(&d->holds, &holds, 1)) return;
        holds = 0;
        if (!spdl__cas32(&d->holds, &holds, 1)) return;
        if (spdl_pool_submit(d->p->group[0].pool, spdl__doctor_hold, d, SPDL_FOREVER) != SPDL_OK)
            spdl__store32(&d->holds, 0);
    }
}

SPDL__COLD void spdl__doctor_buffer(spdl__doctor *d, uint64_t size) {
    spdl__store_relaxed(&d->p->sink->buffer_size, size);
    spdl__wake_changed(d->p, d->p->last);
}

/* The files that are open, now and then while it observes. */
SPDL__COLD void spdl__doctor_look_for_files(spdl__doctor *d, uint64_t now) {
    if (!d->plan.desc.cold || now - d->looked_ns < SPDL__LOOK_NS) return;
    d->files_used = spdl__os_files_seen(d->files, d->files_used, sizeof(d->files));
    d->looked_ns = now;
}

SPDL__COLD void spdl__doctor_forget_files(spdl__doctor *d) {
    uint64_t files, bytes;
    spdl__os_files_forget(d->files, d->files_used, spdl_time_ns() + SPDL__COLD_NS, &files, &bytes);
    if (files > (uint64_t)d->report.cold_files) {
        d->report.cold_files = (int)spdl__min(files, INT32_MAX);
        d->report.cold_bytes = (double)bytes;
    }
}

/* What is different from here on; all else as it is. */
SPDL__COLD void spdl__doctor_set(spdl__doctor *d, const spdl__arm *arm) {
    spdl__hand *hand = d->p->hand;
    int i;
    spdl__add(&hand->arm, 1);
    spdl__store_relaxed(&hand->cut_until, spdl_time_ns() + 20 * d->window_ns);
    spdl__store32(&hand->cut, arm->kind == SPDL__ARM_CUT ? (uint32_t)arm->row + 1 : 0);
    d->keeps_to_itself = arm->kind == SPDL__ARM_KEPT;
    d->pause_ns = arm->kind == SPDL__ARM_PAUSE ? arm->value : 0;
    for (i = 0; i < d->p->count; ++i) {
        const bool mine = arm->row == i;
        const bool slower =
            mine && (arm->kind == SPDL__ARM_COMPUTE || arm->kind == SPDL__ARM_SLEEP);
        spdl__store_relaxed32(&hand->probe[i].asleep, arm->kind == SPDL__ARM_SLEEP);
        spdl__store_relaxed(&hand->probe[i].delay_ns, slower ? arm->value : 0);
        spdl__doctor_limit(d, i, mine && arm->kind == SPDL__ARM_CALLS ? (uint32_t)arm->value
                                                                    : d->limit[i]);
    }
    spdl__doctor_worker(d, d->worker_kept || arm->kind == SPDL__ARM_WORKER);
    spdl__doctor_buffer(d, arm->kind == SPDL__ARM_BUFFER ? arm->value : d->buffer);
    if (arm->kind == SPDL__ARM_COLD) spdl__doctor_forget_files(d);
    d->counting = false;
    d->set_since = spdl_time_ns();
    d->set_items = d->items;
}

SPDL__COLD void spdl__doctor_say(const spdl__doctor *d, const char *format, ...)
    SPDL__PRINTF(2, 3);
SPDL__COLD void spdl__doctor_say(const spdl__doctor *d, const char *format, ...) {
    char line[256];
    va_list args;
    int length;
    if (d->plan.desc.quiet) return;
    length = snprintf(line, sizeof(line), "spdl: doctor: ");
    va_start(args, format);
    length += vsnprintf(line + length, sizeof(line) - (size_t)length - 1, format, args);
    va_end(args);
    length = (int)spdl__min((uint64_t)length, sizeof(line) - 2);
    line[length++] = '\n';
    (void)spdl__os_stderr_write(line, (size_t)length, SPDL__STDERR_NS);
}

/* One more kind of window in this phase. */
SPDL__COLD void spdl__doctor_arm(spdl__doctor *d, spdl__arm_kind kind, int row, uint64_t value) {
    spdl_doctor_arm *to = &d->report.arm[d->first + d->arms];
    const char *name = row >= 0 ? d->report.row[row].name : "";
    const spdl__arm arm = { kind, row, value };
    static const char *const formats[] = {
        "as it is", "after %.16s", "all kept", "%.14s computes", "%.14s sleeps", "trainer sleeps",
        "%.14s x %d", "one more worker", "buffer of %.0s%d", "files not in memory"
    };
    if (d->arms == SPDL__LATIN) return;
    d->arm[d->arms] = arm;
    memset(to, 0, sizeof(*to));
    to->stage = row;
    to->confirming = d->phase == SPDL__DOCTOR_CONFIRM;
    (void)snprintf(to->name, sizeof(to->name), formats[kind], name, (int)value);
    if (d->arms == 1) (void)snprintf(to->name, sizeof(to->name), "the same again");
    ++d->arms;
}

/* For how long our threads have been ready to run without a processor so far, all together; 0: not
   known. */
SPDL__COLD uint64_t spdl__doctor_queued_ns(spdl__doctor *d) {
    const spdl_pipeline *p = d->p;
    uint64_t sum = 0, ns;
    int i, k;
    spdl__os_thread_times(NULL, &d->schedstat, NULL, &ns);
    if (ns != SPDL__NEVER) sum = ns;
    for (i = 0; i < p->groups; ++i)
        for (k = 0; p->group[i].pool != NULL && k < p->group[i].pool->threads; ++k) {
            spdl__os_thread_times(&p->group[i].pool->worker[k].thread, NULL, NULL, &ns);
            if (ns != SPDL__NEVER) sum += ns;
        }
    return sum;
}

/* When the second phase is to end. */
SPDL__COLD uint64_t spdl__doctor_until(const spdl__doctor *d) {
    const double cools = d->plan.desc.cold ? SPDL__COOLING : 0;
    return d->begun_ns + (uint64_t)(1e9 * (1 - cools) * d->plan.desc.seconds);
}

/* All kinds of windows of this phase are there; it may last `seconds`. */
SPDL__COLD void spdl__doctor_phase_begins(spdl__doctor *d, double seconds) {
    const double each = 1e9 * seconds / (d->arms * SPDL__ROUNDS); /* with what it lets pass */
    const double passing = 1.5e9 * (double)d->settle_items / d->report.today;
    const double window = spdl__smaller(0.8 * each, each - passing);
    d->report.arm_count = d->first + d->arms;
    d->window_ns = window > SPDL__WINDOW_NS ? (uint64_t)spdl__smaller(window, 5 * SPDL__WINDOW_NS)
                                            : SPDL__WINDOW_NS;
    d->settle_ns = d->window_ns / 5;
    d->phase_ns = spdl_time_ns() + (uint64_t)(1e9 * seconds);
    d->round = d->position = 0;
    d->queued_ns = spdl__doctor_queued_ns(d);
    spdl__latin_start(&d->latin, d->phase_ns, d->arms);
    d->clocks = spdl__clocks_read();
    spdl__doctor_set(d, &d->arm[spdl__latin_arm(&d->latin, 0, 0)]);
}

/* Whether there may be a change to try. */
SPDL__COLD bool spdl__doctor_tries(const spdl__doctor *d) {
    int i;
    for (i = 0; i < d->report.row_count; ++i)
        if (d->report.row[i].may_raise || (d->tuned[i] && d->report.row[i].concurrency > 1))
            return true;
    return spdl__doctor_workers(d) > 0 || d->report.today < SPDL__EVEN * d->report.model;
}

/* Whether others have had processors since the round began, and we have waited for some. */
SPDL__COLD bool spdl__doctor_disturbed(spdl__doctor *d, double others, double took_ns) {
    const uint64_t queued = spdl__doctor_queued_ns(d);
    const double waited = (double)spdl__grown(d->queued_ns, queued);
    d->queued_ns = queued;
    return others > SPDL__FOREIGN && (queued == 0 || waited > SPDL__WAITED * took_ns);
}

/* A round is complete: it counts, unless others had the processors. Whether the phase goes on. */
SPDL__COLD bool spdl__doctor_round_ends(spdl__doctor *d, uint64_t now) {
    const double others = spdl__clocks_foreign(&d->clocks);
    const uint64_t took = now - d->clocks.time_ns;
    const bool drop = spdl__doctor_disturbed(d, others, (double)took);
    const bool cools = d->phase > SPDL__DOCTOR_CONFIRM;
    int i;
    d->report.rounds += !cools; /* a verdict does not hang on the others */
    d->foreign += cools ? 0 : others;
    d->report.others_used = d->foreign / d->report.rounds;
    d->report.dropped += drop && !cools;
    for (i = d->first; i < d->first + d->arms; ++i) {
        if (drop) d->report.arm[i].rate[d->round] = 0;
        d->report.arm[i].rounds = d->round + 1;
    }
    d->position = 0;
    d->clocks = spdl__clocks_read();
    if (d->phase == SPDL__DOCTOR_SCREEN && !spdl__doctor_tries(d)) /* all the time is for this */
        d->phase_ns = spdl__doctor_until(d);
    return ++d->round < (cools ? SPDL__COLD_ROUNDS : SPDL_DOCTOR_ROUNDS) &&
           now + took / 2 < d->phase_ns;
}

/* At the begin of a window, and at its end. */
SPDL__COLD void spdl__doctor_count_reads(spdl__doctor *d, bool ends) {
    const int cold = d->phase == SPDL__DOCTOR_COLD;
    uint64_t asked, disk;
    if (d->phase <= SPDL__DOCTOR_CONFIRM) return;
    if (cold && !ends) spdl__doctor_forget_files(d); /* what is read again and again, too */
    if (!spdl__os_reads(&asked, &disk)) return;
    d->asked[cold] += ends ? (double)(asked - d->read_asked) : 0;
    d->from_disk[cold] += ends ? (double)(disk - d->read_disk) : 0;
    d->read_asked = asked;
    d->read_disk = disk;
}

/* An item has come: whether the phase is over. */
SPDL__COLD bool spdl__doctor_window(spdl__doctor *d, uint64_t now) {
    const int arm = spdl__latin_arm(&d->latin, d->round, d->position);
    const uint64_t most = spdl__max(3 * d->window_ns, (uint64_t)spdl__smaller(
        SPDL__SETTLE_NS, 1.5e9 * (double)d->settle_items / d->report.today));
    const uint64_t items = d->items - d->window_items, ns = now - d->window_since;
    const bool waited = d->p->wait_ns != d->waited_ns;
    d->waited_ns = d->p->wait_ns;
    if (!d->counting) { /* what was ready is taken first, as quick as the trainer is */
        const uint64_t passed = d->items - d->set_items;
        const bool gone = passed >= 2 * d->settle_items || (passed >= d->settle_items && waited);
        if (now - d->set_since < d->settle_ns || (now - d->set_since < most && !gone)) return false;
        spdl__doctor_count_reads(d, false);
        d->counting = true;
        d->window_since = d->phase == SPDL__DOCTOR_COLD ? spdl_time_ns() : now;
        d->window_items = d->items;
        return false;
    }
    if (ns < d->window_ns || (items < SPDL__WINDOW_ITEMS && ns < 4 * d->window_ns)) return false;
    spdl__doctor_count_reads(d, true);
    d->report.arm[d->first + arm].rate[d->round] = (float)(1e9 * (double)items / (double)ns);
    if (++d->position == d->arms && !spdl__doctor_round_ends(d, now)) return true;
    spdl__doctor_set(d, &d->arm[spdl__latin_arm(&d->latin, d->round, d->position)]);
    return false;
}

/* --- what the windows say --- */

/* Throughput in windows of one kind, compared with those as it is in the same rounds: with either
   of the two in turn. */
SPDL__COLD spdl_interval spdl__doctor_ratio(const spdl__doctor *d, int first, int arm,
                                            int comparisons) {
    const spdl_doctor_arm *base = &d->report.arm[first], *to = &d->report.arm[arm];
    double ratio[SPDL_DOCTOR_ROUNDS];
    int i, n = 0;
    for (i = 0; i < to->rounds; ++i) {
        double from = base->rate[i];
        if (from <= 0 || to->rate[i] <= 0) continue;
        if (arm > first + 1 && (i & 1)) from = base[1].rate[i]; /* one of the two: as noisy as it */
        ratio[n++] = to->rate[i] / from;
    }
    return spdl__interval(ratio, n, comparisons);
}

/* Windows in which nothing is different, of all rounds so far. */
SPDL__COLD void spdl__doctor_same(spdl__doctor *d) {
    spdl_doctor_report *r = &d->report;
    double ratio[2 * SPDL_DOCTOR_ROUNDS], off[2 * SPDL_DOCTOR_ROUNDS];
    double rate[2 * SPDL_DOCTOR_ROUNDS];
    int first, i, n = 0;
    for (first = 0; first + 1 < r->arm_count; first += d->first > first ? d->first : r->arm_count) {
        const spdl_doctor_arm *arm = &r->arm[first];
        for (i = 0; i < arm->rounds; ++i) {
            if (arm[0].rate[i] <= 0 || arm[1].rate[i] <= 0) continue;
            ratio[n] = (double)arm[1].rate[i] / arm[0].rate[i];
            off[n] = ratio[n] > 1 ? ratio[n] : 1 / ratio[n];
            rate[n] = spdl__middle(arm[0].rate[i], arm[1].rate[i]);
            ++n;
        }
    }
    if (n > 0) r->today = spdl__interval(rate, n, 1).value;
    r->same = spdl__interval(ratio, n, 1);
    r->noise = n > 0 ? spdl__interval(off, n, 1).value - 1 : 0;
}

/* Whether the model gives what is measured. */
SPDL__COLD bool spdl__doctor_fits(const spdl_doctor_report *r) {
    return r->today >= SPDL__FITS * r->model && r->today <= r->model / SPDL__FITS;
}

/* How far throughput follows a longer call: 1 all the way, 0 not at all. */
SPDL__COLD double spdl__doctor_follows(const spdl_interval *slower, double delay, double ns) {
    const double all = ns > 0 ? 1 - 1 / (1 + delay / ns) : 0;
    return slower->rounds > 0 && all > 0 ? (1 - slower->value) / all : 0;
}

/* --- the phases --- */

SPDL__COLD void spdl__doctor_tried(spdl__doctor *d);

/* The first phase: what would be if a row were not there, or were slower. */
SPDL__COLD void spdl__doctor_screen(spdl__doctor *d) {
    spdl_doctor_report *r = &d->report;
    const double seconds = (r->replays ? 0.6 : 0.35) * d->plan.desc.seconds;
    int i;
    d->phase = SPDL__DOCTOR_SCREEN;
    d->first = d->arms = 0;
    spdl__doctor_arm(d, SPDL__ARM_BASE, -1, 0);
    spdl__doctor_arm(d, SPDL__ARM_BASE, -1, 0);
    if (d->kept_count > 0) spdl__doctor_arm(d, SPDL__ARM_KEPT, -1, 0);
    for (i = r->row_count - 1; i >= 0; --i) {
        spdl_doctor_row *row = &r->row[i];
        if (d->p->hand->probe[i].replay != SPDL__REPLAY_NOT && d->arms < 9) {
            row->method = SPDL_DOCTOR_REPLAYED;
            spdl__doctor_arm(d, SPDL__ARM_CUT, i, 0);
        }
    }
    for (i = 0; i < r->row_count && d->arms + 2 < 12; ++i) {
        spdl_doctor_row *row = &r->row[i];
        if (row->method == SPDL_DOCTOR_REPLAYED || row->mean_ns <= 0 ||
            row->load < SPDL__BUSY_ROW || d->p->node[i].row.deferred) /* it takes no worker */
            continue;
        row->method = SPDL_DOCTOR_SLOWED;
        row->delay_ns = row->mean_ns * (row->load > 0.7 ? SPDL__SLOWER : 2 * SPDL__SLOWER);
        spdl__doctor_arm(d, SPDL__ARM_COMPUTE, i, (uint64_t)row->delay_ns);
        spdl__doctor_arm(d, SPDL__ARM_SLEEP, i, (uint64_t)row->delay_ns);
    }
    if (!r->replays && r->today * r->step_ns > 1e9 * SPDL__BUSY_ROW)
        spdl__doctor_arm(d, SPDL__ARM_PAUSE, -1, (uint64_t)(SPDL__SLOWER * r->step_ns));
    spdl__doctor_say(d, "%d kinds of windows for %.1f s", d->arms, seconds);
    spdl__doctor_phase_begins(d, seconds);
}

/* What both methods say, or 0: a row that is twice as fast takes half of what hangs on it away, and
   the next limit stays. */
SPDL__COLD double spdl__doctor_twice(const spdl__doctor *d, int i) {
    const spdl_doctor_row *row = &d->report.row[i];
    const spdl__what_if what = { i, 2, 0, 0 };
    const spdl__law law = spdl__law_of(d, NULL);
    const double model = spdl__law_of(d, &what).rate / law.rate;
    double follows, windows;
    if (!spdl__doctor_fits(&d->report)) return 0;
    if (row->method != SPDL_DOCTOR_SLOWED || row->computing.rounds < 3) return model;
    follows = (spdl__doctor_follows(&row->computing, row->delay_ns, row->mean_ns) +
               spdl__doctor_follows(&row->asleep, row->delay_ns, row->mean_ns)) / 2;
    follows = follows < 0 ? 0 : spdl__smaller(follows, 1);
    windows = spdl__smaller(1 / (1 - follows / 2), law.next / law.rate);
    return windows > 0.9 * model && windows < 1.1 * model ? spdl__middle(windows, model) : 0;
}

/* What the first phase has found goes into the rows. */
SPDL__COLD void spdl__doctor_screened(spdl__doctor *d) {
    spdl_doctor_report *r = &d->report;
    int i;
    spdl__doctor_same(d);
    for (i = 2; i < d->arms; ++i) {
        const spdl__arm *arm = &d->arm[i];
        const spdl_interval ratio = spdl__doctor_ratio(d, 0, i, d->arms - 2);
        if (arm->kind == SPDL__ARM_CUT) r->row[arm->row].replayed = ratio;
        if (arm->kind == SPDL__ARM_COMPUTE) r->row[arm->row].computing = ratio;
        if (arm->kind == SPDL__ARM_SLEEP) r->row[arm->row].asleep = ratio;
        if (arm->kind == SPDL__ARM_KEPT) r->cached = ratio;
        if (arm->kind == SPDL__ARM_PAUSE) r->trainer_asleep = ratio;
    }
    for (i = 0; i < r->row_count; ++i)
        if (r->row[i].mean_ns > 0) r->row[i].twice = spdl__doctor_twice(d, i);
}

/* How much of throughput hangs on a row: the load, and what the windows say. */
SPDL__COLD double spdl__doctor_weight(const spdl__doctor *d, int i) {
    const spdl_doctor_row *row = &d->report.row[i];
    double weight = row->load;
    if (row->mean_ns <= 0) return 0;
    if (row->method == SPDL_DOCTOR_SLOWED)
        weight += (spdl__doctor_follows(&row->computing, row->delay_ns, row->mean_ns) +
                   spdl__doctor_follows(&row->asleep, row->delay_ns, row->mean_ns)) / 2;
    if (row->method == SPDL_DOCTOR_REPLAYED) { /* more than with only the rows above replayed */
        int k = i - 1;
        double above = 1;
        while (k >= 0 && d->report.row[k].method != SPDL_DOCTOR_REPLAYED) --k;
        if (k >= 0) above = d->report.row[k].replayed.value;
        if (above > 0) weight += spdl__smaller(1, row->replayed.value / above - 1);
    }
    return weight;
}

/* Of the rows that are busy the one that most hangs on, or -1. */
SPDL__COLD int spdl__doctor_row(const spdl__doctor *d) {
    int i, most = -1;
    for (i = 0; i < d->report.row_count; ++i)
        if (d->report.row[i].mean_ns > 0 && d->report.row[i].load >= SPDL__BUSY_ROW &&
            (most < 0 || spdl__doctor_weight(d, i) > spdl__doctor_weight(d, most)))
            most = i;
    return most;
}

SPDL__COLD void spdl__doctor_try(spdl__doctor *d, spdl__arm_kind kind, int row, int from, int to,
                                 double predicted) {
    static const spdl_doctor_change changes[] = { SPDL_DOCTOR_CONCURRENCY, SPDL_DOCTOR_WORKERS,
                                                  SPDL_DOCTOR_BUFFER };
    spdl_doctor_trial *trial = &d->report.trial[d->report.trial_count];
    if (d->report.trial_count == SPDL_DOCTOR_TRIALS) return;
    ++d->report.trial_count;
    trial->change = changes[kind - SPDL__ARM_CALLS];
    trial->stage = row;
    trial->from = from;
    trial->to = to;
    trial->predicted = spdl__doctor_fits(&d->report) ? predicted : 0;
    d->predicted[d->report.trial_count - 1] = predicted;
    spdl__doctor_arm(d, kind, row, (uint64_t)to);
}

/* The second phase: as it is, and the changes that promise most. */
SPDL__COLD void spdl__doctor_confirm(spdl__doctor *d) {
    spdl_doctor_report *r = &d->report;
    const spdl__law law = spdl__law_of(d, NULL);
    const int row = spdl__doctor_row(d), now = row >= 0 ? r->row[row].concurrency : 0;
    const double left = 1e-9 * ((double)spdl__doctor_until(d) - (double)spdl_time_ns());
    const spdl__what_if worker = { -1, 1, 0, 1 };
    d->first = r->arm_count;
    d->arms = 0;
    d->phase = SPDL__DOCTOR_CONFIRM;
    spdl__doctor_arm(d, SPDL__ARM_BASE, -1, 0);
    spdl__doctor_arm(d, SPDL__ARM_BASE, -1, 0);
    r->stage = row;
    if (row >= 0 && r->row[row].may_raise) {
        const int to = spdl__law_calls(d, row, d->p->node[row].row.max_concurrency);
        const spdl__what_if what = { row, 1, to - now, 0 };
        spdl__doctor_try(d, SPDL__ARM_CALLS, row, now, to,
                         spdl__law_of(d, &what).rate / law.rate);
    }
    if (spdl__doctor_workers(d) > 0)
        spdl__doctor_try(d, SPDL__ARM_WORKER, -1, r->workers, r->workers + 1,
                         spdl__law_of(d, &worker).rate / law.rate);
    if (row >= 0 && now > 1 && d->tuned[row]) { /* if that costs nothing they wait for each other */
        const spdl__what_if what = { row, 1, -1, 0 };
        const double costs = spdl__law_of(d, &what).rate / law.rate;
        if (costs < 0.95) spdl__doctor_try(d, SPDL__ARM_CALLS, row, now, now - 1, costs);
    }
    if (d->p->sink->window >= 2 * d->buffer && r->today * r->step_ns < 0.95e9 &&
        r->today < SPDL__EVEN * r->model)
        spdl__doctor_try(d, SPDL__ARM_BUFFER, -1, (int)d->buffer, (int)(2 * d->buffer), 1);
    if (left > 0.5 && r->trial_count > 0) {
        spdl__doctor_say(d, "%d changes for %.1f s", r->trial_count, left);
        spdl__doctor_phase_begins(d, left);
    } else {
        r->trial_count = 0;
        r->arm_count = d->first;
        spdl__doctor_tried(d);
    }
}

/* What the trials have come to; the best one that helps is kept. */
SPDL__COLD void spdl__doctor_confirmed(spdl__doctor *d) {
    spdl_doctor_report *r = &d->report;
    const spdl__arm as_it_is = { SPDL__ARM_BASE, -1, 0 };
    spdl_doctor_trial *best = NULL;
    int i;
    spdl__doctor_same(d);
    for (i = 0; i < r->trial_count; ++i) {
        spdl_doctor_trial *trial = &r->trial[i];
        trial->measured = spdl__doctor_ratio(d, d->first, d->first + 2 + i, r->trial_count);
        if (trial->measured.known && trial->measured.low > 1 &&
            trial->measured.value > SPDL__GAIN &&
            (best == NULL || trial->measured.value > best->measured.value))
            best = trial;
    }
    if (best != NULL) {
        best->kept = true;
        if (best->change == SPDL_DOCTOR_CONCURRENCY) d->limit[best->stage] = (uint32_t)best->to;
        if (best->change == SPDL_DOCTOR_BUFFER) d->buffer = (uint64_t)best->to;
        if (best->change == SPDL_DOCTOR_WORKERS) d->worker_kept = true;
    }
    spdl__doctor_set(d, &as_it_is);
}

/* Windows as it is, or with cold files: not in turns, as these stay cold. */
SPDL__COLD void spdl__doctor_cool(spdl__doctor *d, spdl__doctor_phase phase) {
    const double seconds = d->plan.desc.seconds;
    d->phase = phase;
    d->first = d->report.arm_count;
    d->arms = 0;
    spdl__doctor_arm(d, phase == SPDL__DOCTOR_COLD ? SPDL__ARM_COLD : SPDL__ARM_BASE, -1, 0);
    spdl__doctor_phase_begins(d, SPDL__COOLING / 2 * seconds);
    if (phase == SPDL__DOCTOR_COLD) /* they may be slow, and a few rounds say nothing */
        d->phase_ns += (uint64_t)(1e9 * SPDL__COOLING * seconds);
}

/* The share that did not come from a disk, or -1. */
SPDL__COLD double spdl__doctor_from_cache(const spdl__doctor *d, int cold) {
    const double asked = d->asked[cold], disk = d->from_disk[cold];
    if (spdl__larger(asked, disk) < SPDL__READ_LEAST) return -1;
    return disk < asked ? 1 - disk / asked : 0;
}

SPDL__COLD void spdl__doctor_cooled(spdl__doctor *d) {
    spdl_doctor_report *r = &d->report;
    r->cold = spdl__doctor_ratio(d, d->first - 1, d->first, 1);
    r->from_cache = spdl__doctor_from_cache(d, 0);
    r->cold_from_cache = spdl__doctor_from_cache(d, 1);
}

/* --- the verdict --- */

/* Processors that the rows and the trainer ask for, of those there are. */
SPDL__COLD double spdl__doctor_demand(const spdl__doctor *d) {
    const spdl_doctor_report *r = &d->report;
    double ns = r->step_cpu_ns;
    int i;
    for (i = 0; i < r->row_count; ++i) ns += r->row[i].visits * r->row[i].cpu_ns;
    return r->cores > 0 ? 1e-9 * r->today * ns / r->cores : 0;
}

/* The row that takes most of the workers' time, or of the processors'. */
SPDL__COLD int spdl__doctor_most(const spdl__doctor *d, bool cpu) {
    double most = 0;
    int i, row = 0;
    for (i = 0; i < d->report.row_count; ++i) {
        const spdl_doctor_row *at = &d->report.row[i];
        const double ns = at->visits * (cpu ? at->cpu_ns : at->mean_ns);
        if (!cpu && !spdl__doctor_pooled(d, i)) continue;
        if (ns <= most) continue;
        row = i;
        most = ns;
    }
    return row;
}

/* The trial of this change, or NULL. */
SPDL__COLD const spdl_doctor_trial *spdl__doctor_trial_of(const spdl_doctor_report *r,
                                                          spdl_doctor_change change, bool more) {
    int i;
    for (i = 0; i < r->trial_count; ++i)
        if (r->trial[i].change == change && (r->trial[i].to > r->trial[i].from) == more)
            return &r->trial[i];
    return NULL;
}

/* By its interval, or in few rounds if the model says the same. */
SPDL__COLD bool spdl__doctor_helps(const spdl_doctor_trial *trial) {
    const double measured = trial->measured.value, off = measured / trial->predicted;
    if (measured <= SPDL__GAIN) return false;
    if (trial->measured.known) return trial->measured.low > 1;
    return trial->measured.rounds >= 3 && trial->predicted > SPDL__GAIN && off > 0.9 && off < 1.1;
}

/* Calls of this row wait for each other: more of them bring less than 40 % of what they should, or
   fewer cost less than 40 % of it. */
SPDL__COLD bool spdl__doctor_locks(const spdl__doctor *d, int row) {
    const spdl_doctor_report *r = &d->report;
    bool locks = false;
    int i;
    for (i = 0; i < r->trial_count && r->row[row].concurrency > 1; ++i) {
        const spdl_doctor_trial *trial = &r->trial[i];
        const double should = d->predicted[i] - 1, does = trial->measured.value - 1;
        const bool clear = trial->measured.rounds > 3 && (should > 0.2 || should < -0.2) &&
                           does / should < 0.2; /* so far off that few rounds will do */
        if (trial->change != SPDL_DOCTOR_CONCURRENCY || trial->stage != row ||
            (!trial->measured.known && !clear) || (should < 0.1 && should > -0.05))
            continue;
        if (should < 0 && (clear || trial->measured.low - 1 > 0.4 * should)) return true;
        if (should < 0) return false; /* it says more than the other */
        locks = clear || trial->measured.high - 1 < 0.4 * should;
    }
    return locks;
}

/* The class of a row that limits. */
SPDL__COLD spdl_limit spdl__doctor_class(const spdl__doctor *d, int i) {
    const spdl_doctor_row *row = &d->report.row[i];
    if (spdl__stage_copies(&d->now, i)) return SPDL_LIMIT_DEVICE;
    if (spdl__doctor_locks(d, i)) return SPDL_LIMIT_LOCK;
    if (row->kind == SPDL_KIND_SOURCE) return SPDL_LIMIT_SOURCE;
    if (d->serial[i]) return SPDL_LIMIT_SERIAL;
    if (row->blocked_ns > row->mean_ns / 2) return SPDL_LIMIT_IO;
    return d->now.stage[i].split_calls > 0 && spdl__stats_faults(&d->now) ? SPDL_LIMIT_MEMORY
                                                                          : SPDL_LIMIT_CONCURRENCY;
}

/* The row in input order whose rare slow calls the trainer waited for most, or -1. */
SPDL__COLD int spdl__doctor_tail(const spdl__doctor *d) {
    int i, most = -1;
    for (i = 0; i < d->report.row_count; ++i) {
        const spdl_stage_stats *stage = &d->now.stage[i];
        const spdl_doctor_row *row = &d->report.row[i];
        if (d->p->node[i].ordered && stage->concurrency > 1 && row->mean_ns > SPDL__TINY_NS &&
            row->runnable_ns < row->mean_ns / 5 &&
            stage->max_ns > 10 * stage->p50_ns && stage->mean_ns > stage->p50_ns * 5 / 4 &&
            5 * stage->exposed_ns > d->now.wait_ns &&
            (most < 0 || stage->exposed_ns > d->now.stage[most].exposed_ns))
            most = i;
    }
    return most;
}

/* How many workers were in calls, on average. */
SPDL__COLD double spdl__doctor_in_calls(const spdl__doctor *d) {
    double calls = 0;
    int i;
    for (i = 0; i < d->report.row_count; ++i)
        if (spdl__doctor_pooled(d, i))
            calls += 1e-9 * d->report.today * d->report.row[i].visits * d->report.row[i].mean_ns;
    return calls;
}

/* No row is to blame. The statistics know whether it was the filling of a batch. */
SPDL__COLD void spdl__doctor_decide_none(spdl__doctor *d) {
    spdl_doctor_report *r = &d->report;
    int stage;
    r->outcome = SPDL_DOCTOR_DISAGREE;
    if (spdl_stats_limit(&d->now, &stage) != SPDL_LIMIT_BATCH) return;
    r->outcome = SPDL_DOCTOR_LIMIT;
    r->limit = SPDL_LIMIT_BATCH;
    r->stage = stage;
}

/* A row limits, and what would without it. */
SPDL__COLD void spdl__doctor_decide_row(spdl__doctor *d, int row, bool helps) {
    spdl_doctor_report *r = &d->report;
    const spdl__law law = spdl__law_of(d, NULL);
    const int next = law.by == row ? law.next_by : law.by;
    r->stage = row;
    r->limit = spdl__doctor_class(d, row);
    r->next_stage = next < 0 ? -1 : next;
    r->next_rate = law.by == row ? law.next : law.rate;
    r->next_limit = next >= 0                  ? spdl__doctor_class(d, next)
                    : next == SPDL__BY_TRAINER ? SPDL_LIMIT_TRAINER
                    : next == SPDL__BY_MACHINE ? SPDL_LIMIT_MACHINE
                    : next == SPDL__BY_WORKERS ? SPDL_LIMIT_WORKERS
                                               : SPDL_LIMIT_NOT_KNOWN;
    if (r->limit == SPDL_LIMIT_LOCK)
        r->row[row].twice = 0;
    else if (r->today < SPDL__FITS * r->model && !helps &&
             spdl__doctor_weight(d, row) < r->row[row].load + SPDL__BUSY_ROW)
        spdl__doctor_decide_none(d); /* the windows do not say so either */
    else if (!helps && next == SPDL__BY_TRAINER && r->next_rate < SPDL__GAIN * r->model) {
        r->limit = SPDL_LIMIT_TRAINER;
        r->outcome = SPDL_DOCTOR_NOTHING;
    }
}

/* First line of the table that holds. */
SPDL__COLD void spdl__doctor_decide(spdl__doctor *d) {
    spdl_doctor_report *r = &d->report;
    const spdl_doctor_trial *worker = spdl__doctor_trial_of(r, SPDL_DOCTOR_WORKERS, true);
    const int row = spdl__doctor_row(d), tail = spdl__doctor_tail(d), used = r->rounds - r->dropped;
    const bool few = used < SPDL__ROUNDS_LEAST || spdl__doctor_ratio(d, 0, 1, 1).rounds < 3;
    const double trainer = 1e-9 * r->today * r->step_ns;
    const double paused = spdl__doctor_follows(&r->trainer_asleep, SPDL__SLOWER, 1);
    const int by = spdl__law_of(d, NULL).by;
    bool helps = false;
    int i;
    for (i = 0; i < r->trial_count; ++i)
        helps = helps || r->trial[i].kept ||
                (r->trial[i].to > r->trial[i].from && spdl__doctor_helps(&r->trial[i]));
    r->stage = r->next_stage = -1;
    r->outcome = SPDL_DOCTOR_LIMIT;
    if (d->disturbed || (few && 2 * r->dropped > r->rounds)) {
        r->outcome = SPDL_DOCTOR_FOREIGN;
        r->limit = SPDL_LIMIT_FOREIGN;
    } else if (few) {
        r->outcome = SPDL_DOCTOR_FEW;
    } else if (r->today > 1.3 * d->observed || d->observed > 1.3 * r->today) {
        r->outcome = SPDL_DOCTOR_DISAGREE; /* what was observed is not so any more */
    } else if (r->noise > SPDL__BURSTY || (tail >= 0 && r->today < SPDL__FITS * r->model)) {
        r->outcome = SPDL_DOCTOR_BURSTY;
        r->stage = tail;
        if (tail >= 0) r->limit = SPDL_LIMIT_ORDER;
    } else if (!helps && (trainer >= 0.9 || (trainer >= 0.75 && paused > 0.6))) {
        r->limit = spdl__doctor_copies(d) >= SPDL__FED ? SPDL_LIMIT_DEVICE
                   : r->harm < SPDL__HARM      ? SPDL_LIMIT_TRAINER
                   : d->others < SPDL__FOREIGN ? SPDL_LIMIT_HARM
                                               : SPDL_LIMIT_FOREIGN;
        if (r->limit == SPDL_LIMIT_TRAINER) r->outcome = SPDL_DOCTOR_NOTHING;
        if (r->limit == SPDL_LIMIT_FOREIGN) r->outcome = SPDL_DOCTOR_FOREIGN;
    } else if (r->today > r->model / SPDL__FITS) {
        r->outcome = SPDL_DOCTOR_DISAGREE;
    } else if (spdl__doctor_demand(d) >= (by == SPDL__BY_MACHINE ? SPDL__FITS : 0.92) && !helps) {
        r->limit = SPDL_LIMIT_MACHINE;
        r->stage = spdl__doctor_most(d, true);
    } else if (spdl__doctor_in_calls(d) >= (by == SPDL__BY_WORKERS ? 0.85 : 0.93) * r->workers &&
               (worker == NULL || spdl__doctor_helps(worker))) {
        r->limit = SPDL_LIMIT_WORKERS;
        r->stage = spdl__doctor_most(d, false);
    } else if (row >= 0) {
        spdl__doctor_decide_row(d, row, helps);
    } else {
        spdl__doctor_decide_none(d);
    }
}

/* How many workers were ready to run, in calls or between them, but had no processor. */
SPDL__COLD double spdl__doctor_queued(const spdl__doctor *d) {
    double ns = (double)(d->now.workers_runnable_ns - d->last.workers_runnable_ns);
    int i;
    for (i = 0; i < d->report.row_count; ++i)
        ns += (double)(d->now.stage[i].runnable_ns - d->last.stage[i].runnable_ns);
    return ns / (double)(d->now.elapsed_ns - d->last.elapsed_ns + 1);
}

SPDL__COLD void spdl__doctor_measured(spdl__text *text, const spdl_doctor_trial *trial) {
    spdl__text_add(text, ": measured %.2fx", trial->measured.value);
    if (trial->measured.known)
        spdl__text_add(text, " (%.2f to %.2f)", trial->measured.low, trial->measured.high);
    else
        spdl__text_add(text, " in %d rounds", trial->measured.rounds);
    if (trial->predicted > 0) spdl__text_add(text, ", the model says %.2fx", trial->predicted);
    spdl__text_add(text, ".%s", trial->kept ? " It is so from now on, in this run." : "");
}

/* What limits then. */
SPDL__COLD void spdl__doctor_say_next(spdl__text *text, const spdl_doctor_report *r) {
    static const char *const next[] = { "the trainer", "the machine's processors", "the workers" };
    const int i = r->next_limit == SPDL_LIMIT_TRAINER   ? 0
                  : r->next_limit == SPDL_LIMIT_MACHINE ? 1
                  : r->next_limit == SPDL_LIMIT_WORKERS ? 2 : -1;
    spdl__cell cell;
    if (r->next_limit == SPDL_LIMIT_NOT_KNOWN || r->next_rate > 1e15 || !spdl__doctor_fits(r))
        return;
    spdl__text_add(text, " The next limit is %s%s%s (%s).", i < 0 ? "'" : "",
                   i < 0 ? r->row[r->next_stage].name : next[i], i < 0 ? "'" : "",
                   spdl__rate(&cell, (uint64_t)(r->next_rate + 0.5), 1000000000));
}

/* What to write, for a row that more calls at a time may help. */
SPDL__COLD void spdl__doctor_say_calls(spdl__text *text, const spdl__doctor *d) {
    const spdl_doctor_report *r = &d->report;
    const spdl_doctor_row *row = &r->row[r->stage];
    const spdl_doctor_trial *more = spdl__doctor_trial_of(r, SPDL_DOCTOR_CONCURRENCY, true);
    if (more != NULL && spdl__doctor_helps(more)) {
        spdl__text_add(text, "Write .concurrency = %d", more->to);
        spdl__doctor_measured(text, more);
    } else if (more != NULL) {
        const spdl_interval *m = &more->measured;
        spdl__text_add(text, "A concurrency of %d instead of %d %s", more->to, more->from,
                       !m->known                ? "was tried in too few rounds"
                       : m->high < 1            ? "is slower"
                       : m->high < 1.5 * SPDL__GAIN - 0.5 || m->low > 0.9
                           ? "makes no difference that shows"
                           : "may help or not");
        spdl__doctor_measured(text, more);
    } else {
        const int most = spdl__doctor_pooled(d, r->stage) && r->workers > row->concurrency
                             ? r->workers : row->concurrency + 1;
        const int to = spdl__law_calls(d, r->stage, most);
        const spdl__what_if what = { r->stage, 1, to - row->concurrency, 0 };
        spdl__text_add(text, "If its function may have more calls at a time write .concurrency = "
                             "%d", to);
        if (spdl__doctor_fits(r))
            spdl__text_add(text, ": the model says %.2fx", spdl__law_of(d, &what).rate / r->model);
        spdl__text_add(text, " (not tried%s).", row->may_raise ? "" : ": see raise");
    }
}

SPDL__COLD void spdl__doctor_say_row(spdl__text *text, const spdl__doctor *d) {
    const spdl_doctor_report *r = &d->report;
    const spdl_doctor_row *row = &r->row[r->stage];
    spdl__cell cell[2];
    spdl__text_add(text, "Stage %d '", r->stage);
    spdl__text_name(text, row->name, -1);
    spdl__text_add(text, "' limits: %d call%s of %s at a time make %s. ", row->concurrency,
                   row->concurrency > 1 ? "s" : "", spdl__duration(&cell[0], row->mean_ns),
                   spdl__rate(&cell[1], (uint64_t)spdl__smaller(row->most + 0.5, 1e15),
                              1000000000));
    if (r->limit == SPDL_LIMIT_LOCK)
        spdl__text_add(text, "Its calls wait for each other, as for a lock: another concurrency is "
                             "hardly slower or faster. Make what they hold it for shorter.");
    else if (r->limit == SPDL_LIMIT_SOURCE)
        spdl__text_add(text, "A source makes one item at a time: move work from it to a stage");
    else if (r->limit == SPDL_LIMIT_SERIAL)
        spdl__text_add(text, "By its row (%s) it may have one call at a time: split it",
                       d->p->node[r->stage].row.flush ? ".flush" : ".max_concurrency");
    else if (r->limit == SPDL_LIMIT_DEVICE)
        spdl__text_add(text, "Its calls wait for copies to the device. %s.", spdl__send_less);
    else {
        if (r->limit == SPDL_LIMIT_MEMORY)
            spdl__text_add(text, "With %.0f page faults for each item of the trainer: use memory "
                                 "again, such as by spdl_buffer. ",
                           spdl__share(d->now.minor_faults, d->now.delivered));
        spdl__doctor_say_calls(text, d);
    }
    if (r->limit == SPDL_LIMIT_SOURCE || r->limit == SPDL_LIMIT_SERIAL) {
        if (row->twice > 0) spdl__text_add(text, "; %.2fx if it took half as long", row->twice);
        spdl__text_add(text, ".");
    }
    spdl__doctor_say_next(text, r);
}

SPDL__COLD void spdl__doctor_say_workers(spdl__text *text, const spdl__doctor *d) {
    const spdl_doctor_report *r = &d->report;
    const spdl_doctor_trial *worker = spdl__doctor_trial_of(r, SPDL_DOCTOR_WORKERS, true);
    const spdl_doctor_row *row = &r->row[r->stage];
    const spdl__what_if what = spdl__law_workers(d, r->stage);
    if (r->workers == 0) {
        spdl__text_add(text, "Without workers the stages run between the trainer's steps, most of "
                             "the time stage %d '%s'. Write .workers = 1 or more.", r->stage,
                       row->name);
        return;
    }
    spdl__text_add(text, "All %d workers are in calls, %.0f %% of the time in stage %d '",
                   r->workers, 1e-7 * r->today * row->visits * row->mean_ns / r->workers, r->stage);
    spdl__text_name(text, row->name, -1);
    spdl__text_add(text, "'");
    if (row->twice > 0) spdl__text_add(text, ": %.2fx if it took half as long", row->twice);
    spdl__text_add(text, ". Or write .workers = %d", r->workers + what.workers);
    if (what.calls > 0)
        spdl__text_add(text, ", in its row .concurrency = %d", row->concurrency + what.calls);
    if (spdl__doctor_fits(r))
        spdl__text_add(text, ": the model says %.2fx", spdl__law_of(d, &what).rate / r->model);
    if (worker == NULL) {
        spdl__text_add(text, " (not tried: see raise).");
    } else {
        spdl__text_add(text, "; with %d workers", worker->to);
        spdl__doctor_measured(text, worker);
    }
}

SPDL__COLD bool spdl__doctor_tiny(const spdl_doctor_report *r) {
    int i;
    for (i = 0; i < r->row_count; ++i)
        if (r->row[i].mean_ns > SPDL__TINY_NS) return false;
    return r->step_ns < SPDL__TINY_NS;
}

/* Why there is no limit to name. */
SPDL__COLD void spdl__doctor_say_unknown(spdl__text *text, const spdl__doctor *d) {
    const spdl_doctor_report *r = &d->report;
    const int used = r->rounds - r->dropped;
    if (r->outcome == SPDL_DOCTOR_FOREIGN && (d->disturbed || r->dropped == 0))
        spdl__text_add(text, "Not known: the threads waited for processors, and other programs had "
                             "%.1f of them. Run it again without them.", d->others);
    else if (r->outcome == SPDL_DOCTOR_FOREIGN)
        spdl__text_add(text, "Not known: in %d of %d rounds other programs had %.1f processors. "
                             "Run it again without them.", r->dropped, r->rounds, r->others_used);
    else if (r->outcome == SPDL_DOCTOR_FEW && r->rounds == 0 && d->ended)
        spdl__text_add(text, "Not known: the items ended after %.2g s, before the first "
                             "experiment.", r->seconds);
    else if (r->outcome == SPDL_DOCTOR_FEW)
        spdl__text_add(text, "Not known: %d round%s too few. %s", used, used == 1 ? " is" : "s are",
                       d->ended ? "The items have ended." : "Give it more seconds.");
    else if (r->today > 1.3 * d->observed || d->observed > 1.3 * r->today)
        spdl__text_add(text, "Not known: it made %.0f items/s at first, and %.0f later, as a first "
                             "epoch does that fills caches. Run it for longer, or again.",
                       d->observed, r->today);
    else if (r->outcome == SPDL_DOCTOR_BURSTY)
        spdl__text_add(text, "Not known: windows in which nothing is different differ by %.0f %%.",
                       100 * r->noise);
    else if (spdl__doctor_tiny(r))
        spdl__text_add(text, "No call takes as long as handing an item on (%.0f items/s): do more "
                             "in one call, or hand on batches.", r->today);
    else
        spdl__text_add(text, "Not known: %.0f items/s, but the times of the calls allow %.0f: %s",
                       r->today, r->model,
                       spdl__doctor_queued(d) > 0.5 && r->cores_used < r->cores - 0.5
                           ? "the system leaves workers waiting for a processor while others are "
                             "idle."
                           : "items are handed over late, or come in bursts.");
}

/* Rare slow calls. */
SPDL__COLD void spdl__doctor_say_tail(spdl__text *text, const spdl__doctor *d) {
    const spdl_doctor_report *r = &d->report;
    const spdl_stage_stats *stage = &d->now.stage[r->stage];
    spdl__cell cell[2];
    spdl__text_add(text, "Stage %d '", r->stage);
    spdl__text_name(text, stage->name, -1);
    spdl__text_add(text, "' has rare calls of up to %s (half of them take %s or less), and what "
                         "comes after them waits. Write "
                         ".output_order = SPDL_ORDER_COMPLETION, or a larger buffer_size.",
                   spdl__duration(&cell[0], (double)stage->max_ns),
                   spdl__duration(&cell[1], (double)stage->p50_ns));
}

/* Two sentences or so. */
SPDL__COLD void spdl__doctor_verdict(spdl__doctor *d) {
    spdl_doctor_report *r = &d->report;
    spdl__text text = spdl__text_start(r->verdict, sizeof(r->verdict));
    const spdl_doctor_trial *buffer = spdl__doctor_trial_of(r, SPDL_DOCTOR_BUFFER, true);
    spdl__cell cell;
    switch (r->limit) {
    case SPDL_LIMIT_NOT_KNOWN:
    case SPDL_LIMIT_FOREIGN: spdl__doctor_say_unknown(&text, d); return;
    case SPDL_LIMIT_ORDER: spdl__doctor_say_tail(&text, d); break;
    case SPDL_LIMIT_TRAINER:
        spdl__text_add(&text, "There is nothing to gain: the trainer's own steps of %s take %.0f "
                              "%% of the time. Stop tuning.", spdl__duration(&cell, r->step_ns),
                       100 * spdl__smaller(1, 1e-9 * r->today * r->step_ns));
        break;
    case SPDL_LIMIT_HARM:
        spdl__text_add(&text, "Loading takes processors from the trainer: %.0f %% of a step it "
                              "waits for one, and %.1f %% of the time for items. Use fewer "
                              "workers, or polite ones (.policy.polite).", 100 * r->harm,
                       100 * r->waiting);
        break;
    case SPDL_LIMIT_MACHINE:
        spdl__text_add(&text, "The processors are used up (%.2f of %.3g): no concurrency helps. "
                              "Make stage %d '%s' cheaper, it takes most of them.", r->cores_used,
                       r->cores, r->stage, r->row[r->stage].name);
        break;
    case SPDL_LIMIT_WORKERS: spdl__doctor_say_workers(&text, d); break;
    case SPDL_LIMIT_BATCH:
        spdl__text_add(&text, "The trainer waits until stage %d '", r->stage);
        spdl__text_name(&text, r->row[r->stage].name, -1);
        spdl__text_add(&text, "' has a batch full. Write a smaller size, or a larger buffer_size "
                              "(not tried).");
        break;
    case SPDL_LIMIT_DEVICE:
        if (r->stage < 0) {
            spdl__text_add(&text, "For %.0f %% of its steps the trainer waits for copies to the "
                                  "device. %s.", 100 * spdl__doctor_copies(d), spdl__send_less);
            break;
        } /* fallthrough */
    default:
        if (r->outcome == SPDL_DOCTOR_DISAGREE)
            spdl__doctor_say_unknown(&text, d);
        else
            spdl__doctor_say_row(&text, d);
    }
    if (buffer != NULL && buffer->kept) {
        spdl__text_add(&text, " Write SPDL_SINK(%d)", buffer->to);
        spdl__doctor_measured(&text, buffer);
    }
}

/* Into a file, with the mark of this process after its first words: the next pipeline's has another
   name. */
SPDL__COLD const char *spdl__doctor_save(const char *path, const char *text, size_t bytes,
                                         bool json) {
    const size_t head = json ? strcspn(text, ",") : strcspn(text, ">") + 1;
    char name[SPDL__PATH_BYTES], mark[SPDL__MARK_BYTES], line[SPDL__MARK_BYTES + 32];
    spdl__os_file file = SPDL__NO_FILE;
    const char *reason = spdl__out_claim(&file, name, path);
    int length;
    spdl__out_mark(mark);
    length = snprintf(line, sizeof(line), json ? ",\"process\":\"%s\"" : "<!-- %s -->", mark);
    if (reason == NULL) reason = spdl__os_file_truncate(file);
    if (reason == NULL) reason = spdl__os_file_write(file, text, head, SPDL__NEVER);
    if (reason == NULL) reason = spdl__os_file_write(file, line, (size_t)length, SPDL__NEVER);
    if (reason == NULL)
        reason = spdl__os_file_write(file, text + head, bytes - head, SPDL__NEVER);
    if (file != SPDL__NO_FILE) (void)spdl__os_file_close(file);
    return reason;
}

SPDL__COLD void spdl__doctor_file(spdl__doctor *d, const char *path,
                                  int (*text)(const spdl_doctor_report *, char *, size_t)) {
    const size_t bytes = (size_t)text(&d->report, NULL, 0) + 1;
    char *buffer = (char *)spdl__alloc(&d->p->allocator, bytes, 16);
    const char *reason = "no memory";
    if (buffer != NULL) {
        (void)text(&d->report, buffer, bytes);
        reason = path == NULL ? spdl__os_stderr_write(buffer, bytes - 1, SPDL__STDERR_NS)
                              : spdl__doctor_save(path, buffer, bytes - 1,
                                                  text == spdl_doctor_json);
    }
    spdl__free(&d->p->allocator, buffer, bytes);
    if (reason != NULL)
        spdl__logf(&d->p->logger, SPDL_LOG_WARN, "spdl: doctor: no report in %.400s: %s",
                   path != NULL ? path : "stderr", reason);
}

/* Everything is as it was, or better; what was found is written. */
SPDL__COLD void spdl__doctor_finish(spdl__doctor *d) {
    const spdl__arm as_it_is = { SPDL__ARM_BASE, -1, 0 };
    spdl_doctor_report *r = &d->report;
    if (d->phase == SPDL__DOCTOR_DONE) return;
    spdl__store32(&d->p->hand->keeps, 0);
    if (d->phase < SPDL__DOCTOR_SCREEN) spdl__doctor_look(d);
    if (d->phase == SPDL__DOCTOR_SCREEN) spdl__doctor_screened(d);
    if (d->phase == SPDL__DOCTOR_CONFIRM) spdl__doctor_confirmed(d);
    if (d->phase == SPDL__DOCTOR_COLD) spdl__doctor_cooled(d);
    if (d->phase >= SPDL__DOCTOR_SCREEN) spdl__doctor_set(d, &as_it_is);
    d->phase = SPDL__DOCTOR_DONE;
    spdl__hand_leave(d->p);
    r->seconds = d->begun_ns ? 1e-9 * (double)(spdl_time_ns() - d->begun_ns) : 0;
    spdl__doctor_decide(d);
    if (d->plan.desc.run_steps > 0 && r->today > 0 && r->ceiling > 0) {
        r->hours = (double)d->plan.desc.run_steps / r->today / 3600;
        r->hours_less = r->hours * (1 - spdl__smaller(1, r->today / r->ceiling));
    }
    spdl__doctor_verdict(d);
    if (!d->plan.desc.quiet) spdl__doctor_file(d, NULL, spdl_doctor_text);
    if (d->plan.json[0] != '\0') spdl__doctor_file(d, d->plan.json, spdl_doctor_json);
    if (d->plan.html[0] != '\0') spdl__doctor_file(d, d->plan.html, spdl_doctor_html);
}

/* The second phase is over. */
SPDL__COLD void spdl__doctor_tried(spdl__doctor *d) {
    if (d->files_used == 0) {
        spdl__doctor_finish(d);
        return;
    }
    spdl__doctor_confirmed(d);
    spdl__doctor_say(d, "as it is, and with files that are not in memory, for %.1f s",
                     SPDL__COOLING * d->plan.desc.seconds);
    spdl__doctor_cool(d, SPDL__DOCTOR_BEFORE);
}

/* --- where the trainer passes --- */

/* Observing begins, or begins again as others had processors that we waited for. */
SPDL__COLD void spdl__doctor_observe(spdl__doctor *d, uint64_t now) {
    int i;
    d->phase = SPDL__DOCTOR_OBSERVE;
    d->phase_ns = now + (uint64_t)(0.1e9 * d->plan.desc.seconds);
    d->step_since = d->step_sum = d->step_cpu = d->step_queued = d->steps = 0;
    for (i = 0; i < d->p->count; ++i)
        d->limit[i] = spdl__load_relaxed32(&d->p->node[i].limit);
    spdl_pipeline_stats(d->p, &d->last);
    spdl_process_read(&d->process);
    d->clocks = spdl__clocks_read();
    d->queued_ns = spdl__doctor_queued_ns(d);
}

SPDL__COLD bool spdl__doctor_is_done(const spdl__doctor *d) {
    return d->phase == SPDL__DOCTOR_DONE;
}

/* The trainer comes for an item: its step has ended, unless there is none yet. */
SPDL__COLD void spdl__doctor_comes(spdl__doctor *d) {
    if (d->phase == SPDL__DOCTOR_OBSERVE) spdl__doctor_step_ends(d);
}

/* It has an item. */
SPDL__COLD void spdl__doctor_item(spdl__doctor *d) {
    const uint64_t now = spdl_time_ns();
    const double seconds = d->plan.desc.seconds;
    spdl_pipeline *p = d->p;
    ++d->items;
    if (d->phase <= SPDL__DOCTOR_OBSERVE) spdl__doctor_look_for_files(d, now);
    switch (d->phase) {
    case SPDL__DOCTOR_WARM:
        if (d->begun_ns == 0) {
            d->begun_ns = now;
            spdl__doctor_say(d, "%.3g s from now on", seconds);
            spdl__doctor_worker(d, false);
        }
        if ((double)(now - d->begun_ns) < 0.03e9 * seconds) break;
        spdl__store32(&p->hand->keeps, d->plan.desc.replay);
        spdl__doctor_observe(d, now);
        break;
    case SPDL__DOCTOR_OBSERVE:
        ++d->steps;
        if (now < d->phase_ns || d->steps < SPDL__WINDOW_ITEMS) break;
        d->others = spdl__clocks_foreign(&d->clocks);
        d->disturbed = spdl__doctor_disturbed(d, d->others, (double)(now - d->clocks.time_ns));
        if (d->disturbed && (double)(now - d->begun_ns) < 0.3e9 * seconds) {
            spdl__doctor_observe(d, now);
            break;
        }
        spdl__kept_close(p->hand);
        spdl__doctor_look(d);
        spdl__doctor_screen(d);
        break;
    case SPDL__DOCTOR_SCREEN:
        if (!spdl__doctor_window(d, now)) break;
        spdl__doctor_screened(d);
        spdl__doctor_confirm(d);
        break;
    case SPDL__DOCTOR_CONFIRM:
        if (spdl__doctor_window(d, now)) spdl__doctor_tried(d);
        break;
    case SPDL__DOCTOR_BEFORE:
        if (spdl__doctor_window(d, now)) spdl__doctor_cool(d, SPDL__DOCTOR_COLD);
        break;
    case SPDL__DOCTOR_COLD:
        if (spdl__doctor_window(d, now)) spdl__doctor_finish(d);
        break;
    default: break;
    }
    if (d->pause_ns > 0) {
        uint64_t worked;
        spdl__hand_delay(p->hand, &p->hand->debt[p->workers * p->count], d->pause_ns, true,
                         &worked);
    }
}

/* Its step begins, or goes on. */
SPDL__COLD void spdl__doctor_leaves(spdl__doctor *d, bool item) {
    if (item && d->phase != SPDL__DOCTOR_DONE) spdl__doctor_item(d);
    if (d->phase == SPDL__DOCTOR_OBSERVE) spdl__doctor_step_begins(d);
}

SPDL_API spdl_result spdl_pipeline_doctor(const spdl_pipeline *p, spdl_doctor_report *report) {
    if (p == NULL || report == NULL || p->doctor == NULL) return SPDL_E_NOT_FOUND;
    *report = p->doctor->report;
    return p->doctor->phase == SPDL__DOCTOR_DONE ? SPDL_OK : SPDL_TIMEOUT;
}

/* The trainer of doctor_run is done with an item: it is kept, or freed. */
SPDL__COLD void spdl__doctor_done_with(spdl__doctor *d, void *item) {
    const uint64_t origin = d->p->last_item.origin;
    if (d->plan.desc.replay && d->phase == SPDL__DOCTOR_OBSERVE && d->kept_count < SPDL__KEPT) {
        d->kept[d->kept_count] = item;
        d->kept_origin[d->kept_count++] = origin;
    } else {
        spdl__item_free(d->p, item, origin);
    }
}

SPDL_API spdl_result spdl_doctor_run(spdl_pipeline *p, spdl_step_fn step, void *ctx,
                                     spdl_doctor_report *report) {
    spdl__doctor *d = p != NULL ? p->doctor : NULL;
    spdl_result result = SPDL_OK;
    uint64_t turn = 0, before = 0;
    void *item;
    if (d == NULL || step == NULL) return SPDL_E_INVALID;
    while (result == SPDL_OK && d->phase != SPDL__DOCTOR_DONE) {
        if (d->keeps_to_itself) {
            step(ctx, d->kept[turn++ % (uint64_t)d->kept_count]);
            spdl__doctor_item(d);
            continue;
        }
        result = spdl_pipeline_next(p, &item, SPDL_FOREVER);
        if (result == SPDL_OK) {
            step(ctx, item);
            spdl__doctor_done_with(d, item);
        } else if (result == SPDL_END && d->items > before) {
            before = d->items;
            result = p->ended_ns != 0 ? spdl_pipeline_rewind(p, 0, SPDL_FOREVER) : SPDL_OK;
        }
    }
    d->ended = true;
    spdl__doctor_finish(d);
    if (report != NULL) *report = d->report;
    return result == SPDL_END ? SPDL_OK : result;
}

/* --- a pipeline gets it, and loses it --- */

/* Of SPDL_DOCTOR. */
SPDL__COLD bool spdl__doctor_word(void *to, const char *word) {
    spdl__doctor_plan *plan = (spdl__doctor_plan *)to;
    const double number = spdl__report_seconds(word);
    if (strcmp(word, "replay") == 0) return plan->desc.replay = true;
    if (strcmp(word, "raise") == 0) return plan->desc.raise = true;
    if (strcmp(word, "cold") == 0) return plan->desc.cold = true;
    if (strncmp(word, "steps=", 6) == 0)
        return (plan->desc.run_steps = (uint64_t)spdl__report_seconds(word + 6)) > 0;
    if (strncmp(word, "json=", 5) == 0) return spdl__word_path(plan->json, word + 5);
    if (strncmp(word, "html=", 5) == 0) return spdl__word_path(plan->html, word + 5);
    if (number != 1) plan->desc.seconds = number;
    return number > 0 && number < 1e6;
}

/* What is asked for, by desc and environment; false: nothing. */
SPDL__COLD bool spdl__doctor_ask(spdl__doctor_plan *plan, const spdl_doctor_desc *desc,
                                 const spdl_logger *logger) {
    const char *value = spdl__os_environment("SPDL_DOCTOR");
    memset(plan, 0, sizeof(*plan));
    if (desc != NULL) {
        plan->desc = *desc;
        (void)spdl__path_copy(plan->json, desc->json, "doctor", logger);
        (void)spdl__path_copy(plan->html, desc->html, "doctor", logger);
    } else if (value == NULL || strcmp(value, "0") == 0 ||
               !spdl__words_read("SPDL_DOCTOR", value, spdl__doctor_word, plan,
                                 "replay, raise, cold, steps=N, json=FILE or html=FILE: no doctor",
                                 logger)) {
        return false;
    }
    if (!(plan->desc.seconds > 0)) plan->desc.seconds = SPDL__DOCTOR_SECONDS;
    if (plan->desc.seconds > 1e6) plan->desc.seconds = 1e6;
    return true;
}

/* With the rows there, before the first thread. */
SPDL__COLD spdl_result spdl__doctor_open(spdl_pipeline *p, const spdl__doctor_plan *plan,
                                         const spdl_stage *rows, int workers) {
    spdl__doctor *d;
    int i;
    if (plan == NULL) return SPDL_OK;
    d = (spdl__doctor *)spdl__alloc_zeroed(&p->allocator, 1, sizeof(*d), SPDL_CACHE_LINE);
    if (d == NULL) return SPDL_E_NOMEM;
    d->p = p;
    d->plan = *plan;
    d->schedstat = SPDL__NO_FILE;
    memcpy(d->report.name, plan->name, sizeof(d->report.name));
    d->report.workers = workers;
    d->report.replays = plan->desc.replay;
    d->report.cools = plan->desc.cold;
    d->report.from_cache = d->report.cold_from_cache = -1;
    d->report.row_count = p->count;
    d->report.stage = d->report.next_stage = -1;
    d->buffer = p->sink->buffer_size;
    spdl_process_read(&d->process);
    for (i = 0; i < p->count; ++i) {
        d->limit[i] = p->node[i].limit;
        d->serial[i] = rows[i].flush || rows[i].max_concurrency == 1;
        d->tuned[i] = plan->desc.raise || rows[i].max_concurrency > (int)p->node[i].limit;
    }
    if (!spdl__os_event_init(&d->hold)) {
        spdl__free(&p->allocator, d, sizeof(*d));
        return SPDL_E_NOMEM;
    }
    p->doctor = d;
    return spdl__hand_open(p, plan->desc.replay);
}

/* Before a pipeline stops for good. */
SPDL__COLD void spdl__doctor_close(spdl_pipeline *p) {
    if (p->doctor == NULL) return;
    p->doctor->ended = true;
    spdl__doctor_finish(p->doctor);
    p->doctor->worker_kept = true;
    spdl__doctor_worker(p->doctor, true);
}

/* It is quiet, but for a source that destroy does not wait for. */
SPDL__COLD void spdl__doctor_empty(spdl_pipeline *p) {
    spdl__doctor *d = p->doctor;
    if (d == NULL) return;
    for (; d->kept_count > 0; --d->kept_count)
        spdl__item_free(p, d->kept[d->kept_count - 1], d->kept_origin[d->kept_count - 1]);
    spdl__hand_empty(p);
}

SPDL__COLD void spdl__doctor_free(spdl_pipeline *p) {
    spdl__doctor *d = p->doctor;
    if (d == NULL) return;
    spdl__doctor_empty(p);
    spdl__hand_close(p);
    (void)spdl__os_file_close(d->schedstat);
    spdl__os_event_fini(&d->hold);
    spdl__free(&p->allocator, d, sizeof(*d));
    p->doctor = NULL;
}

#endif /* SPDL_NO_REPORT */

/* ============================================================================================= */
/* >>doctor-text-impl
   The report of the doctor as text, as JSON and as a page: functions of the report alone, for any
   thread. A number that cannot be one stands as "-", or null. The page has no script: a line of it
   is a label and an <svg> as wide as the window, whose places are percentages. Its colours are
   those of >>report-impl. */

#ifndef SPDL_NO_REPORT

#define SPDL__FOUND_COLUMNS 80
#define SPDL__FOUND_BYTES 24576 /* of the text of the largest report */
#define SPDL__LEAVE 0.05         /* of the hours of a run: less is not worth the work */

/* --- words --- */

static const char *const spdl__found_outcomes[] = { "running", "limit",  "nothing",  "few",
                                                      "foreign", "bursty", "disagree", NULL };
static const char *const spdl__found_limits[] = {
    "not_known", "trainer", "concurrency", "io",     "machine", "lock",   "serial", "order",
    "batch",     "workers", "memory",      "device", "source",  "harm",   "foreign", "requests",
    NULL
};
static const char *const spdl__found_methods[] = { "none", "replayed", "slowed", NULL };
static const char *const spdl__found_changes[] = { "concurrency", "workers", "buffer", NULL };

SPDL__COLD const char *spdl__found_word(const char *const *words, unsigned value) {
    for (; *words != NULL; ++words)
        if (value-- == 0) return *words;
    return "other";
}

SPDL__COLD int spdl__found_count(int count, int most) {
    return count < 0 ? 0 : count < most ? count : most;
}

SPDL__COLD int spdl__found_rows(const spdl_doctor_report *report) {
    return spdl__found_count(report->row_count, SPDL_MAX_STAGES);
}

/* --- numbers --- */

SPDL__COLD const char *spdl__found_rate(spdl__cell *cell, double rate) {
    static const char *const units[] = { "/s", "k/s", "M/s", "G/s" };
    return rate > 0 && rate < 1e12 ? spdl__scaled(cell, rate, units, false) : "-";
}

SPDL__COLD const char *spdl__found_time(spdl__cell *cell, double ns) {
    return ns > 0 && ns < 1e12 ? spdl__duration(cell, ns) : "-";
}

SPDL__COLD const char *spdl__found_share(spdl__cell *cell, double share) {
    return share >= 0 && share < 10 ? spdl__percent(cell, share > 0 ? share : 0) : "-";
}

/* A ratio of throughput as a change in percent: 0.83 is -17. */
SPDL__COLD int spdl__found_percent(double ratio) {
    const double change = 100 * (ratio - 1);
    return !(ratio < 100) ? 9900 : (int)(change < 0 ? change - 0.5 : change + 0.5);
}

/* "0.83x", or in percent "-17 %". */
SPDL__COLD const char *spdl__found_ratio(spdl__cell *cell, double ratio, bool percent) {
    if (!(ratio > 0 && ratio < 10000)) return "-";
    if (percent)
        (void)snprintf(cell->text, sizeof(cell->text), "%+d %%", spdl__found_percent(ratio));
    else
        (void)snprintf(cell->text, sizeof(cell->text), "%.2fx", ratio);
    return cell->text;
}

/* "1.41 to 1.49" or "-19 to -15 %". */
SPDL__COLD const char *spdl__found_range(spdl__cell *cell, const spdl_interval *interval,
                                          bool percent) {
    const double low = interval->low, high = interval->high;
    if (!interval->known) return "too few rounds";
    if (!(low >= 0 && high >= low && high < 10000)) return "-";
    if (percent)
        (void)snprintf(cell->text, sizeof(cell->text), "%+d to %+d %%", spdl__found_percent(low),
                       spdl__found_percent(high));
    else
        (void)snprintf(cell->text, sizeof(cell->text), high < 100 ? "%.2f to %.2f" : "%.0f to %.0f",
                       low, high);
    return cell->text;
}

/* "1.45x (1.41 to 1.49)" */
SPDL__COLD void spdl__found_result(spdl__text *text, const spdl_interval *interval,
                                    bool percent) {
    spdl__cell cell[2];
    spdl__text_add(text, "%s (%s)", spdl__found_ratio(&cell[0], interval->value, percent),
                   spdl__found_range(&cell[1], interval, percent));
}

/* --- the experiments, for text and page --- */

/* One that was made, as a line of the ladder. */
typedef struct spdl__rung {
    int row;                       /* -1: of the trainer or of all */
    const char *name;
    char what[24];
    double rate, ratio;            /* 0: not known */
    const spdl_interval *interval; /* NULL: none */
    bool percent;                  /* of one that slows */
} spdl__rung;

#define SPDL__RUNGS (3 * SPDL_MAX_STAGES + 5)

/* The next one, when it was made. */
SPDL__COLD spdl__rung *spdl__rung_add(spdl__rung *rung, const spdl_doctor_report *report, int row,
                                      const char *what, const spdl_interval *interval) {
    if (interval->rounds <= 0) return rung;
    rung->row = row;
    rung->name = row >= 0 ? report->row[row].name : "trainer";
    (void)snprintf(rung->what, sizeof(rung->what), "%s", what);
    rung->interval = interval;
    rung->ratio = interval->value;
    rung->rate = rung->ratio * report->today;
    return rung + 1;
}

/* One in which calls took `share` longer. */
SPDL__COLD spdl__rung *spdl__rung_slowed(spdl__rung *rung, const spdl_doctor_report *report,
                                         int row, const char *how, double share,
                                         const spdl_interval *interval) {
    char what[sizeof(rung->what)];
    const int length = snprintf(what, sizeof(what), "%s", how);
    if (share > 0 && share < 100)
        (void)snprintf(what + length, sizeof(what) - (size_t)length, " +%.0f %%", 100 * share);
    rung->percent = interval->rounds > 0; /* else the place is for another one */
    return spdl__rung_add(rung, report, row, what, interval);
}

/* One that compares with nothing. */
SPDL__COLD spdl__rung *spdl__rung_plain(spdl__rung *rung, const char *name, const char *what,
                                        double rate, double ratio) {
    memset(rung, 0, sizeof(*rung));
    rung->row = -1;
    rung->name = name;
    (void)snprintf(rung->what, sizeof(rung->what), "%s", what);
    rung->rate = rate;
    rung->ratio = ratio;
    return rung + 1;
}

/* From the trainer alone down to the rows as they are; how many there are. */
SPDL__COLD int spdl__rungs(spdl__rung rung[SPDL__RUNGS], const spdl_doctor_report *report) {
    const double most = report->today > 0 ? report->ceiling / report->today : 0;
    spdl__rung *at = rung;
    int i;
    memset(rung, 0, SPDL__RUNGS * sizeof(*rung));
    if (report->cached.rounds <= 0)
        at = spdl__rung_plain(at, "trainer", "alone", report->ceiling, most);
    at = spdl__rung_add(at, report, -1, "on kept items", &report->cached);
    at = spdl__rung_slowed(at, report, -1, "asleep", 0.2, &report->trainer_asleep);
    for (i = spdl__found_rows(report); i-- > 0;) {
        const spdl_doctor_row *row = &report->row[i];
        const double share = row->mean_ns > 0 ? row->delay_ns / row->mean_ns : 0;
        at = spdl__rung_add(at, report, i, "replayed", &row->replayed);
        at = spdl__rung_slowed(at, report, i, "computing", share, &row->computing);
        at = spdl__rung_slowed(at, report, i, "asleep", share, &row->asleep);
    }
    at = spdl__rung_plain(at, "as it is", "", report->today, 0);
    at = spdl__rung_add(at, report, -1, "", &report->same);
    if (at[-1].interval != NULL) at[-1].name = "same again";
    return (int)(at - rung);
}

/* --- text --- */

/* A paragraph: lines of 80 characters at most, the later ones indented. */
SPDL__COLD void spdl__found_wrap(spdl__text *text, const char *string, int indent) {
    int column = 0;
    string += strspn(string, " ");
    while (*string != '\0') {
        const int limit = SPDL__FOUND_COLUMNS - (column > 0 ? column + 1 : 0);
        const int room = SPDL__FOUND_COLUMNS - indent;
        char word[4 * SPDL__FOUND_COLUMNS + 1];
        int width = 0;
        size_t bytes = 0;
        while (string[bytes] != '\0' && string[bytes] != ' ' && width < room) {
            const int length = spdl__utf8(string + bytes);
            bytes += length > 0 ? (size_t)length : 1;
            ++width;
        }
        memcpy(word, string, bytes);
        word[bytes] = '\0';
        if (column > 0 && width > limit) {
            spdl__text_add(text, "\n%*s", indent, "");
            column = indent;
        } else if (column > 0) {
            spdl__text_add(text, " ");
            ++column;
        }
        spdl__text_name(text, word, -1);
        column += width;
        string += bytes;
        string += strspn(string, " ");
    }
    spdl__text_add(text, "\n");
}

SPDL__COLD void spdl__found_verdict(spdl__text *text, const spdl_doctor_report *report) {
    static const char *const none[] = {
        "It is not done yet.", "Something holds the trainer back.", "There is nothing to gain.",
        "Too few rounds for an answer.", "Other programs had the processors: no answer.",
        "Windows differ too much by themselves: no answer.",
        "Two methods do not agree: no answer.", NULL
    };
    spdl__text_add(text, "%s", report->verdict[0] != '\0'
                                   ? report->verdict
                                   : spdl__found_word(none, (unsigned)report->outcome));
}

SPDL__COLD void spdl__found_run_line(spdl__text *text, const spdl_doctor_report *report) {
    const double numbers[] = { report->seconds, report->cores_used, report->cores,
                               report->others_used };
    double shown[4];
    int i;
    for (i = 0; i < 4; ++i) shown[i] = numbers[i] > 0 && numbers[i] < 1e6 ? numbers[i] : 0;
    spdl__text_add(text, "%.1f s, %d round%s", shown[0], report->rounds,
                   report->rounds == 1 ? "" : "s");
    if (report->dropped > 0)
        spdl__text_add(text, " (%d dropped: others had processors)", report->dropped);
    if (report->noise > 0 && report->noise < 100)
        spdl__text_add(text, " with a noise of %.1f %%", 100 * report->noise);
    spdl__text_add(text, ", %d worker%s, %.2f of %.3g processors used, %.2f by others%s",
                   report->workers, report->workers == 1 ? "" : "s", shown[1], shown[2], shown[3],
                   report->replays ? "; items were repeated: what the trainer learned is void"
                                   : "");
}

SPDL__COLD void spdl__found_ladder(spdl__text *text, const spdl_doctor_report *report) {
    spdl__rung rung[SPDL__RUNGS];
    const int count = spdl__rungs(rung, report);
    spdl__cell cell[3];
    int i;
    spdl__text_style(text, "2");
    spdl__text_add(text, "\n  row              experiment            rate   result  95 %% interval"
                         "   rounds\n");
    spdl__text_style(text, "0");
    for (i = 0; i < count; ++i) {
        const bool limit = rung[i].row >= 0 && rung[i].row == report->stage;
        const bool same = i > 0 && rung[i].name == rung[i - 1].name;
        spdl__text_style(text, limit ? "1;33" : "0");
        spdl__text_add(text, "%c ", limit && !same ? '>' : ' ');
        spdl__text_name(text, same ? "" : rung[i].name, 16);
        spdl__text_add(text, " %-17s %8s", rung[i].what,
                       spdl__found_rate(&cell[0], rung[i].rate));
        if (rung[i].ratio != 0)
            spdl__text_add(text, " %8s",
                           spdl__found_ratio(&cell[1], rung[i].ratio, rung[i].percent));
        if (rung[i].interval != NULL)
            spdl__text_add(text, "  %-16s %6d",
                           spdl__found_range(&cell[2], rung[i].interval, rung[i].percent),
                           spdl__found_count(rung[i].interval->rounds, 9999));
        spdl__text_style(text, "0");
        spdl__text_add(text, "\n");
    }
}

SPDL__COLD void spdl__found_row_line(spdl__text *text, const spdl_doctor_row *row, bool limit) {
    const double part[] = { row->cpu_ns, row->runnable_ns, row->blocked_ns };
    spdl__cell cell;
    int k;
    spdl__text_style(text, limit ? "1;33" : "0");
    spdl__text_add(text, "%c ", limit ? '>' : ' ');
    spdl__text_name(text, row->name, 16);
    spdl__text_add(text, " %4d %8s", spdl__found_count(row->concurrency, 9999),
                   spdl__found_time(&cell, row->mean_ns));
    for (k = 0; k < 3; ++k)
        spdl__text_add(text, k == 2 ? " %6s" : " %4s",
                       spdl__found_share(&cell, row->mean_ns > 0 ? part[k] / row->mean_ns : -1));
    spdl__text_add(text, " %5s", spdl__found_share(&cell, row->load));
    spdl__text_add(text, " %8s", spdl__found_rate(&cell, row->most));
    spdl__text_add(text, " %8s", spdl__found_ratio(&cell, row->twice, false));
    spdl__text_style(text, "0");
    spdl__text_add(text, "\n");
}

/* What the rows cost, and what the model makes of it. */
SPDL__COLD void spdl__found_model(spdl__text *text, const spdl_doctor_report *report) {
    spdl_doctor_row trainer;
    int i;
    memset(&trainer, 0, sizeof(trainer));
    memcpy(trainer.name, "trainer", 8);
    trainer.concurrency = 1;
    trainer.mean_ns = report->step_ns;
    trainer.cpu_ns = report->step_cpu_ns;
    trainer.runnable_ns = report->harm * report->step_ns;
    trainer.blocked_ns = trainer.mean_ns - trainer.cpu_ns - trainer.runnable_ns;
    if (trainer.blocked_ns < 0) trainer.blocked_ns = 0;
    trainer.load = 1 - report->waiting;
    trainer.most = report->ceiling;
    spdl__text_style(text, "2");
    spdl__text_add(text, "\n  row              conc     mean  cpu runq asleep  load   allows   "
                         "halved\n");
    spdl__text_style(text, "0");
    spdl__found_row_line(text, &trainer, false);
    for (i = spdl__found_rows(report); i-- > 0;)
        if (report->row[i].mean_ns > 0 || i == report->stage)
            spdl__found_row_line(text, &report->row[i], i == report->stage);
}

SPDL__COLD void spdl__found_legend(spdl__text *text, const spdl_doctor_report *report) {
    char words[512];
    spdl__text line = spdl__text_start(words, sizeof(words));
    spdl__cell cell[2];
    spdl__text_add(&line,
                   "%scomputing, asleep: each call takes so much longer. x, %%: throughput "
                   "compared with \"as it is\". allows: rate if nothing else were a limit. "
                   "halved: throughput if its calls took half as long. By the model today's "
                   "%s would be %s.",
                   !report->replays ? ""
                                    : "on kept items: nothing is loaded. replayed: results of "
                                      "this row are kept items, nothing above it is called. ",
                   spdl__found_rate(&cell[0], report->today),
                   spdl__found_rate(&cell[1], report->model));
    spdl__text_style(text, "2");
    spdl__found_wrap(text, words, 0);
    spdl__text_style(text, "0");
}

/* The name of the row that a change is of; "" when it is of all. */
SPDL__COLD const char *spdl__trial_row(const spdl_doctor_report *report,
                                       const spdl_doctor_trial *trial) {
    const bool row = trial->change == SPDL_DOCTOR_CONCURRENCY && trial->stage >= 0 &&
                     trial->stage < spdl__found_rows(report);
    return row ? report->row[trial->stage].name : "";
}

/* "conc 2 -> 3" */
SPDL__COLD const char *spdl__trial_change(spdl__cell *cell, const spdl_doctor_trial *trial) {
    static const char *const changes[] = { "conc", "workers", "buffer", NULL };
    (void)snprintf(cell->text, sizeof(cell->text), "%s %d -> %d",
                   spdl__found_word(changes, (unsigned)trial->change),
                   spdl__found_count(trial->from, 999), spdl__found_count(trial->to, 999));
    return cell->text;
}

/* What to write for a change that was kept. */
SPDL__COLD void spdl__trial_paste(spdl__text *text, const spdl_doctor_report *report,
                                  const spdl_doctor_trial *trial) {
    if (trial->change == SPDL_DOCTOR_WORKERS)
        spdl__text_add(text, "write: .workers = %d in spdl_pipeline_desc", trial->to);
    else if (trial->change == SPDL_DOCTOR_BUFFER)
        spdl__text_add(text, "write: SPDL_SINK(%d)", trial->to);
    else
        spdl__text_add(text, "write: .concurrency = %d in the row of '%s'", trial->to,
                       spdl__trial_row(report, trial));
}

SPDL__COLD void spdl__found_trials(spdl__text *text, const spdl_doctor_report *report) {
    const int count = spdl__found_count(report->trial_count, SPDL_DOCTOR_TRIALS);
    char words[512];
    spdl__cell cell[4];
    int i, k;
    spdl__text_style(text, "2");
    if (count > 0)
        spdl__text_add(text, "\n  row              change            predicted measured  "
                             "95 %% interval\n");
    spdl__text_style(text, "0");
    for (i = 0; i < count; ++i) {
        const spdl_doctor_trial *trial = &report->trial[i];
        spdl__text_add(text, "  ");
        spdl__text_name(text, spdl__trial_row(report, trial), 16);
        spdl__text_add(text, " %-18s %8s %8s  %-16s %s\n", spdl__trial_change(&cell[0], trial),
                       spdl__found_ratio(&cell[1], trial->predicted, false),
                       spdl__found_ratio(&cell[2], trial->measured.value, false),
                       spdl__found_range(&cell[3], &trial->measured, false),
                       trial->kept ? "kept" : "undone");
    }
    for (i = 0; i < count; ++i) {
        const spdl_doctor_trial *trial = &report->trial[i];
        spdl__text line = spdl__text_start(words, sizeof(words));
        bool last = trial->kept; /* a later one may have raised it again */
        for (k = i + 1; k < count; ++k)
            if (report->trial[k].kept && report->trial[k].change == trial->change &&
                report->trial[k].stage == trial->stage)
                last = false;
        if (last) spdl__trial_paste(&line, report, trial);
        if (line.length == 0) continue;
        spdl__text_style(text, "1");
        spdl__found_wrap(text, words, 4);
        spdl__text_style(text, "0");
    }
}

/* How it is with files that are not in memory. */
SPDL__COLD void spdl__found_cold(spdl__text *text, const spdl_doctor_report *report) {
    static const char *const units[] = { " B", " kB", " MB", " GB" };
    const double cached = report->cold_from_cache;
    char words[512];
    spdl__text line = spdl__text_start(words, sizeof(words));
    spdl__cell cell;
    if (!report->cools) return;
    spdl__text_add(&line, "cold: ");
    if (report->cold_files <= 0) {
        spdl__text_add(&line, "not known: no file was seen to be open or mapped.");
    } else {
        spdl__text_add(&line, "with %d file%s of %s not in memory ", report->cold_files,
                       report->cold_files > 1 ? "s" : "",
                       spdl__scaled(&cell, report->cold_bytes, units, false));
        if (cached > 0.5) {
            spdl__text_add(&line, "%.0f %% of what was read was there all the same: how it is "
                                  "without is not known.", 100 * cached);
        } else {
            spdl__found_result(&line, &report->cold, false);
            if (report->from_cache >= 0)
                spdl__text_add(&line, ". As it is the page cache has %.0f %% of what is read",
                               100 * report->from_cache);
            if (cached >= 0) spdl__text_add(&line, ", then %.0f %%", 100 * cached);
            else spdl__text_add(&line, "; how much came from a disk then is not known");
            spdl__text_add(&line, ". A warm cache makes reading look free: not so in a first "
                                  "epoch, or with data larger than memory.");
        }
    }
    spdl__found_wrap(text, words, 0);
}

/* What loading costs the trainer, and whether the rest is worth the work. */
SPDL__COLD void spdl__found_headspace(spdl__text *text, const spdl_doctor_report *report) {
    const double hours = report->hours, less = report->hours_less;
    char words[512];
    spdl__text line = spdl__text_start(words, sizeof(words));
    spdl__cell cell;
    if (!(report->ceiling > 0 && report->waiting >= 0 && report->waiting <= 1)) return;
    spdl__text_add(&line, "headspace: the trainer waited %.1f %% of the time for items",
                   100 * report->waiting);
    if (report->harm >= 0 && report->harm <= 1)
        spdl__text_add(&line, ", and for a processor in %.1f %% of its step", 100 * report->harm);
    spdl__text_add(&line, ". Without any loading: %s",
                   spdl__found_rate(&cell, report->ceiling));
    if (report->outcome <= SPDL_DOCTOR_NOTHING && hours > 0 && hours < 1e6 && less >= 0 &&
        less <= hours)
        spdl__text_add(&line, ", at most %.1f h less of %.1f h: %s", less, hours,
                       less < SPDL__LEAVE * hours ? "leave it" : "worth the work");
    spdl__text_add(&line, ".");
    spdl__found_wrap(text, words, 0);
}

SPDL__COLD void spdl__found_write(spdl__text *text, const spdl_doctor_report *report) {
    char words[sizeof(report->verdict) + 4 * sizeof(report->name) + 16];
    spdl__text line = spdl__text_start(words, sizeof(words));
    spdl__text_add(&line, "spdl doctor: ");
    if (report->name[0] != '\0') {
        spdl__text_name(&line, report->name, -1);
        spdl__text_add(&line, ": ");
    }
    spdl__found_verdict(&line, report);
    spdl__text_style(text, "1");
    spdl__found_wrap(text, words, 0);
    spdl__text_style(text, "0");
    line = spdl__text_start(words, sizeof(words));
    spdl__found_run_line(&line, report);
    spdl__found_wrap(text, words, 0);
    if (report->outcome == SPDL_DOCTOR_RUNNING) return;
    if (report->outcome == SPDL_DOCTOR_LIMIT) {
        spdl__found_ladder(text, report);
        spdl__found_model(text, report);
        spdl__found_legend(text, report);
    }
    spdl__found_trials(text, report);
    spdl__found_headspace(text, report);
    spdl__found_cold(text, report);
    if (report->outcome == SPDL_DOCTOR_LIMIT)
        spdl__text_add(text, "not known: how it is with other data%s.\n",
                       report->cools ? "" : ", or with files that are not in memory");
}

SPDL_API int spdl_doctor_text(const spdl_doctor_report *report, char *buffer, size_t bytes) {
    spdl__text text = spdl__text_start(buffer, bytes);
    spdl__found_write(&text, report);
    return (int)text.length;
}

/* --- JSON --- */

/* A field of a struct: 'd' double, 'i' int, 'b' bool, 's' characters, 'v' an interval, 'e' an
   enum with its words, 'k' a kind. */
typedef struct spdl__found_field {
    char type;
    const char *name;
    size_t at; /* offset in its struct */
    const char *const *words;
} spdl__found_field;

#define SPDL__SHOWN(type, of, field) { type, #field, offsetof(of, field), NULL }
#define SPDL__SHOWN_ENUM(of, field, words) { 'e', #field, offsetof(of, field), words }
#define SPDL__SHOWN_END { '\0', NULL, 0, NULL }

static const spdl__found_field spdl__found_fields[] = {
    SPDL__SHOWN('s', spdl_doctor_report, name),
    SPDL__SHOWN_ENUM(spdl_doctor_report, outcome, spdl__found_outcomes),
    SPDL__SHOWN_ENUM(spdl_doctor_report, limit, spdl__found_limits),
    SPDL__SHOWN('i', spdl_doctor_report, stage),
    SPDL__SHOWN_ENUM(spdl_doctor_report, next_limit, spdl__found_limits),
    SPDL__SHOWN('i', spdl_doctor_report, next_stage),
    SPDL__SHOWN('d', spdl_doctor_report, next_rate),
    SPDL__SHOWN('d', spdl_doctor_report, seconds),
    SPDL__SHOWN('i', spdl_doctor_report, workers),
    SPDL__SHOWN('d', spdl_doctor_report, cores),
    SPDL__SHOWN('d', spdl_doctor_report, cores_used),
    SPDL__SHOWN('d', spdl_doctor_report, others_used),
    SPDL__SHOWN('d', spdl_doctor_report, step_ns),
    SPDL__SHOWN('d', spdl_doctor_report, step_cpu_ns),
    SPDL__SHOWN('d', spdl_doctor_report, today),
    SPDL__SHOWN('d', spdl_doctor_report, model),
    SPDL__SHOWN('d', spdl_doctor_report, ceiling),
    SPDL__SHOWN('d', spdl_doctor_report, waiting),
    SPDL__SHOWN('d', spdl_doctor_report, harm),
    SPDL__SHOWN('d', spdl_doctor_report, hours),
    SPDL__SHOWN('d', spdl_doctor_report, hours_less),
    SPDL__SHOWN('b', spdl_doctor_report, replays),
    SPDL__SHOWN('v', spdl_doctor_report, same),
    SPDL__SHOWN('d', spdl_doctor_report, noise),
    SPDL__SHOWN('v', spdl_doctor_report, cached),
    SPDL__SHOWN('v', spdl_doctor_report, trainer_asleep),
    SPDL__SHOWN('b', spdl_doctor_report, cools),
    SPDL__SHOWN('i', spdl_doctor_report, cold_files),
    SPDL__SHOWN('d', spdl_doctor_report, cold_bytes),
    SPDL__SHOWN('v', spdl_doctor_report, cold),
    SPDL__SHOWN('d', spdl_doctor_report, from_cache),
    SPDL__SHOWN('d', spdl_doctor_report, cold_from_cache),
    SPDL__SHOWN('i', spdl_doctor_report, rounds),
    SPDL__SHOWN('i', spdl_doctor_report, dropped),
    SPDL__SHOWN('s', spdl_doctor_report, verdict),
    SPDL__SHOWN_END
};
static const spdl__found_field spdl__found_row_fields[] = {
    SPDL__SHOWN('s', spdl_doctor_row, name),
    SPDL__SHOWN('k', spdl_doctor_row, kind),
    SPDL__SHOWN('i', spdl_doctor_row, concurrency),
    SPDL__SHOWN('b', spdl_doctor_row, may_raise),
    SPDL__SHOWN_ENUM(spdl_doctor_row, method, spdl__found_methods),
    SPDL__SHOWN('d', spdl_doctor_row, visits),
    SPDL__SHOWN('d', spdl_doctor_row, mean_ns),
    SPDL__SHOWN('d', spdl_doctor_row, cpu_ns),
    SPDL__SHOWN('d', spdl_doctor_row, runnable_ns),
    SPDL__SHOWN('d', spdl_doctor_row, blocked_ns),
    SPDL__SHOWN('d', spdl_doctor_row, load),
    SPDL__SHOWN('d', spdl_doctor_row, most),
    SPDL__SHOWN('d', spdl_doctor_row, twice),
    SPDL__SHOWN('v', spdl_doctor_row, replayed),
    SPDL__SHOWN('v', spdl_doctor_row, computing),
    SPDL__SHOWN('v', spdl_doctor_row, asleep),
    SPDL__SHOWN('d', spdl_doctor_row, delay_ns),
    SPDL__SHOWN_END
};
static const spdl__found_field spdl__found_trial_fields[] = {
    SPDL__SHOWN_ENUM(spdl_doctor_trial, change, spdl__found_changes),
    SPDL__SHOWN('i', spdl_doctor_trial, stage),
    SPDL__SHOWN('i', spdl_doctor_trial, from),
    SPDL__SHOWN('i', spdl_doctor_trial, to),
    SPDL__SHOWN('d', spdl_doctor_trial, predicted),
    SPDL__SHOWN('v', spdl_doctor_trial, measured),
    SPDL__SHOWN('b', spdl_doctor_trial, kept),
    SPDL__SHOWN_END
};
static const spdl__found_field spdl__found_arm_fields[] = {
    SPDL__SHOWN('s', spdl_doctor_arm, name),
    SPDL__SHOWN('i', spdl_doctor_arm, stage),
    SPDL__SHOWN('b', spdl_doctor_arm, confirming),
    SPDL__SHOWN('i', spdl_doctor_arm, rounds),
    SPDL__SHOWN_END
};

/* With up to six decimals, and a point whatever the locale; null when it is none. */
SPDL__COLD void spdl__json_double(spdl__text *text, double value) {
    const spdl__llu parts = value >= 0 && value < 1e12 ? (spdl__llu)(value * 1e6 + 0.5) : 0;
    if (!(value >= 0 && value < 1e12)) {
        spdl__text_add(text, "null");
        return;
    }
    spdl__text_add(text, "%llu", parts / 1000000);
    if (parts % 1000000 > 0) spdl__text_add(text, ".%06llu", parts % 1000000);
}

/* Without an interval low and high are null. */
SPDL__COLD void spdl__json_interval(spdl__text *text, const spdl_interval *interval) {
    spdl__text_add(text, "{\"value\":");
    spdl__json_double(text, interval->value);
    spdl__text_add(text, ",\"low\":");
    spdl__json_double(text, interval->known ? interval->low : -1);
    spdl__text_add(text, ",\"high\":");
    spdl__json_double(text, interval->known ? interval->high : -1);
    spdl__text_add(text, ",\"rounds\":%d}", interval->rounds);
}

SPDL__COLD void spdl__found_value(spdl__text *text, const char *at,
                                   const spdl__found_field *field) {
    int number = 0;
    double real;
    if (field->type == 'i' || field->type == 'k' || field->type == 'e')
        memcpy(&number, at, sizeof(number));
    if (field->type == 'd') {
        memcpy(&real, at, sizeof(real));
        spdl__json_double(text, real);
    } else if (field->type == 'i') {
        spdl__text_add(text, "%d", number);
    } else if (field->type == 'b') {
        spdl__text_add(text, *(const bool *)at ? "true" : "false");
    } else if (field->type == 's') {
        spdl__json_string(text, at);
    } else if (field->type == 'v') {
        spdl__json_interval(text, (const spdl_interval *)(const void *)at);
    } else {
        spdl__json_string(text, field->words != NULL
                                    ? spdl__found_word(field->words, (unsigned)number)
                                    : spdl__kind_name((spdl_kind)number));
    }
}

/* All but the brace that ends it. */
SPDL__COLD void spdl__found_object(spdl__text *text, const char *before, const void *object,
                                    const spdl__found_field *field) {
    for (; field->name != NULL; ++field, before = ",") {
        spdl__text_add(text, "%s\"%s\":", before, field->name);
        spdl__found_value(text, (const char *)object + field->at, field);
    }
}

SPDL_API int spdl_doctor_json(const spdl_doctor_report *report, char *buffer, size_t bytes) {
    const int trials = spdl__found_count(report->trial_count, SPDL_DOCTOR_TRIALS);
    const int arms = spdl__found_count(report->arm_count, 2 * SPDL_DOCTOR_ARMS);
    spdl__text text = spdl__text_start(buffer, bytes);
    int i, k;
    spdl__text_add(&text, "{\"schema\":\"spdl.doctor.1\",\"version\":\"%s\"",
                   spdl_version());
    spdl__found_object(&text, ",", report, spdl__found_fields);
    spdl__text_add(&text, ",\"row\":[");
    for (i = 0; i < spdl__found_rows(report); ++i) {
        spdl__found_object(&text, i > 0 ? "},\n{" : "\n{", &report->row[i],
                            spdl__found_row_fields);
    }
    spdl__text_add(&text, i > 0 ? "}],\"trial\":[" : "],\"trial\":[");
    for (i = 0; i < trials; ++i) {
        spdl__found_object(&text, i > 0 ? "},\n{" : "\n{", &report->trial[i],
                            spdl__found_trial_fields);
    }
    spdl__text_add(&text, i > 0 ? "}],\"arm\":[" : "],\"arm\":[");
    for (i = 0; i < arms; ++i) {
        const spdl_doctor_arm *arm = &report->arm[i];
        spdl__found_object(&text, i > 0 ? ",\n{" : "\n{", arm, spdl__found_arm_fields);
        spdl__text_add(&text, ",\"rate\":[");
        for (k = 0; k < spdl__found_count(arm->rounds, SPDL_DOCTOR_ROUNDS); ++k) {
            if (k > 0) spdl__text_add(&text, ",");
            spdl__json_double(&text, (double)arm->rate[k]);
        }
        spdl__text_add(&text, "]}");
    }
    spdl__text_add(&text, "]}\n");
    return (int)text.length;
}

/* --- the page --- */

/* A name or a text inside an element. */
SPDL__COLD void spdl__html_add(spdl__text *text, const char *string) {
    for (; *string != '\0'; ++string) {
        const int length = spdl__utf8(string);
        const char c = *string;
        if (length > 1) {
            spdl__text_add(text, "%.*s", length, string);
            string += length - 1;
        } else if (length == 1 && (c == '\n' || ((unsigned char)c >= 0x20 && c != 0x7f))) {
            spdl__text_add(text, strchr("<>&'\"", c) != NULL ? "&#%d;" : "%c", c);
        } else {
            spdl__text_add(text, "?");
        }
    }
}

/* A line of a picture: numbers from 0 to `top` are from the left to the right of the window. */
typedef struct spdl__strip {
    spdl__text *text;
    double top;
} spdl__strip;

/* Percent of the width. A point in every locale. */
SPDL__COLD const char *spdl__strip_at(const spdl__strip *strip, spdl__cell *cell, double value) {
    const double share = value > 0 && strip->top > 0 ? value / strip->top : 0;
    const unsigned tenths = share < 1 ? (unsigned)(1000 * share) : 1000;
    (void)snprintf(cell->text, sizeof(cell->text), "%u.%u%%", tenths / 10, tenths % 10);
    return cell->text;
}

SPDL__COLD void spdl__strip_rect(const spdl__strip *strip, double from, double to,
                                 const char *style) {
    const double low = from < to ? from : to, width = from < to ? to - from : from - to;
    spdl__cell cell[2];
    spdl__text_add(strip->text, "<rect x='%s' y='2' width='%s' height='10' class='%s'/>",
                   spdl__strip_at(strip, &cell[0], low), spdl__strip_at(strip, &cell[1], width),
                   style);
}

SPDL__COLD void spdl__strip_line(const spdl__strip *strip, double from, double to, int top,
                                 int bottom) {
    spdl__cell cell[2];
    spdl__text_add(strip->text, "<line x1='%s' x2='%s' y1='%d' y2='%d'/>",
                   spdl__strip_at(strip, &cell[0], from), spdl__strip_at(strip, &cell[1], to), top,
                   bottom);
}

/* The label, then a bar: what was there, and what `from` to `to` adds or takes; `unit` is what the
   interval counts in. */
SPDL__COLD void spdl__strip_bar(const spdl__strip *strip, const char *label, bool limit,
                                double from, double to, const spdl_interval *interval,
                                double unit) {
    spdl__text_add(strip->text, "<p%s>", limit ? " class='hot'" : "");
    spdl__html_add(strip->text, label);
    spdl__text_add(strip->text, "</p><svg width='100%%' height='16'%s>",
                   limit ? " class='hot'" : "");
    spdl__strip_rect(strip, 0, from < to ? from : to, "base");
    spdl__strip_rect(strip, from, to, from < to ? "more" : "less");
    if (interval != NULL && interval->known) {
        spdl__strip_line(strip, interval->low * unit, interval->high * unit, 7, 7);
        spdl__strip_line(strip, interval->low * unit, interval->low * unit, 3, 11);
        spdl__strip_line(strip, interval->high * unit, interval->high * unit, 3, 11);
    }
    spdl__text_add(strip->text, "</svg>\n");
}

/* The rungs from the rows as they are up to the trainer alone: each bar begins where the replay
   before ended, so that its end is that row's share of what there is to gain. */
SPDL__COLD void spdl__page_ladder(spdl__text *text, const spdl_doctor_report *report) {
    spdl__rung rung[SPDL__RUNGS];
    const double gap = report->ceiling - report->today;
    double reached = report->today;
    spdl__strip strip = { text, report->ceiling };
    spdl__cell cell;
    int i = spdl__rungs(rung, report), k;
    if (report->same.rounds > 0) --i; /* is among the rounds */
    spdl__text_add(text, "<h2>From today up to the trainer alone</h2><div class='card'>\n");
    for (k = 0; k < i; ++k)
        if (rung[k].rate > strip.top && rung[k].rate < 1e12) strip.top = rung[k].rate;
    while (i-- > 0) {
        const spdl__rung *at = &rung[i];
        const double to = at->rate;
        const double from = at->percent ? report->today
                            : at->interval == NULL && i > 0 ? 0 : reached;
        char label[256];
        spdl__text line = spdl__text_start(label, sizeof(label));
        spdl__text_add(&line, "%s%s%s: %s", at->name, at->what[0] != '\0' ? " " : "", at->what,
                       spdl__found_rate(&cell, at->rate));
        if (at->interval != NULL) {
            spdl__text_add(&line, ", ");
            spdl__found_result(&line, at->interval, at->percent);
        }
        if (!at->percent && from > 0 && gap > 0 && to > from && to - from < 2 * gap)
            spdl__text_add(&line, ", %.0f %% of the gap", 100 * (to - from) / gap);
        spdl__strip_bar(&strip, label, at->row >= 0 && at->row == report->stage, from, to,
                        at->interval, report->today);
        if (!at->percent && to > 0) reached = to;
    }
    spdl__text_add(text, "</div>\n");
}

SPDL__COLD void spdl__page_trials(spdl__text *text, const spdl_doctor_report *report) {
    const int count = spdl__found_count(report->trial_count, SPDL_DOCTOR_TRIALS);
    spdl__strip strip = { text, 1 };
    spdl__cell cell[2];
    int i;
    for (i = 0; i < count; ++i) {
        const spdl_doctor_trial *trial = &report->trial[i];
        const double ends[] = { trial->predicted, trial->measured.value,
                                trial->measured.known ? trial->measured.high : 0 };
        int k;
        for (k = 0; k < 3; ++k)
            if (ends[k] > strip.top && ends[k] < 10000) strip.top = ends[k];
    }
    if (count > 0)
        spdl__text_add(text, "<h2>Changes that were tried</h2><div class='card'>\n");
    for (i = 0; i < count; ++i) {
        const spdl_doctor_trial *trial = &report->trial[i];
        char label[256];
        spdl__text line = spdl__text_start(label, sizeof(label));
        spdl__text_add(&line, "%s %s: predicted %s", spdl__trial_row(report, trial),
                       spdl__trial_change(&cell[0], trial),
                       spdl__found_ratio(&cell[1], trial->predicted, false));
        spdl__strip_bar(&strip, label, false, 1, trial->predicted, NULL, 1);
        line = spdl__text_start(label, sizeof(label));
        spdl__text_add(&line, "measured ");
        spdl__found_result(&line, &trial->measured, false);
        spdl__text_add(&line, trial->kept ? ", kept" : ", undone");
        spdl__strip_bar(&strip, label, false, 1, trial->measured.value, &trial->measured, 1);
    }
    if (count > 0) spdl__text_add(text, "</div>\n");
}

/* Each window as a dot; the first round is at the top. */
SPDL__COLD void spdl__page_rounds(spdl__text *text, const spdl_doctor_report *report) {
    const int arms = spdl__found_count(report->arm_count, 2 * SPDL_DOCTOR_ARMS);
    spdl__strip strip = { text, 0 };
    spdl__cell cell;
    int i, k;
    for (i = 0; i < arms; ++i)
        for (k = 0; k < spdl__found_count(report->arm[i].rounds, SPDL_DOCTOR_ROUNDS); ++k)
            if (report->arm[i].rate[k] < 1e12f && (double)report->arm[i].rate[k] > strip.top)
                strip.top = (double)report->arm[i].rate[k];
    if (arms > 0)
        spdl__text_add(text, "<h2>Every round, from 0 to %s</h2><div class='card'>\n",
                       spdl__found_rate(&cell, strip.top));
    for (i = 0; i < arms; ++i) {
        const spdl_doctor_arm *arm = &report->arm[i];
        const int rounds = spdl__found_count(arm->rounds, SPDL_DOCTOR_ROUNDS);
        spdl__text_add(text, "<p>");
        spdl__html_add(text, arm->name);
        spdl__text_add(text, "%s</p><svg width='100%%' height='22' class='dots%s'>",
                       arm->confirming ? ", confirming" : "", arm->confirming ? " two" : "");
        for (k = 0; k < rounds; ++k)
            if (arm->rate[k] > 0)
                spdl__text_add(text, "<circle cx='%s' cy='%d' r='2.5'/>",
                               spdl__strip_at(&strip, &cell, (double)arm->rate[k]),
                               3 + 16 * k / rounds);
        spdl__text_add(text, "</svg>\n");
    }
    if (arms > 0) spdl__text_add(text, "</div>\n");
}

SPDL_API int spdl_doctor_html(const spdl_doctor_report *report, char *buffer, size_t bytes) {
    const char *style = strstr(spdl__page[0], "<style>"), *end = strstr(style, "</style>");
    spdl__text text = spdl__text_start(buffer, bytes);
    char words[SPDL__FOUND_BYTES];
    spdl__text line = spdl__text_start(words, sizeof(words));
    spdl__text_add(&text,
                   "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>spdl doctor"
                   "</title><meta name='viewport' content='width=device-width,initial-scale=1'>"
                   "%.*s.card{padding:10px 16px 14px}.card p{margin-top:8px}svg line{stroke:"
                   "var(--ink);stroke-width:1.5}.base{fill:var(--line)}.more{fill:var(--c2)}.less"
                   "{fill:var(--c6);opacity:.5}.hot .more,.hot .less{fill:var(--hot)}p.hot{color:"
                   "var(--hot);font-weight:600}.dots{background:var(--soft);fill:var(--c0)}.two{"
                   "fill:var(--c1)}circle{opacity:.7}pre{font-size:12.5px;line-height:1.4}"
                   "</style></head><body><main><p>",
                   (int)(end - style), style);
    spdl__found_run_line(&line, report);
    spdl__html_add(&text, words);
    spdl__text_add(&text, "</p><h1>");
    line = spdl__text_start(words, sizeof(words));
    spdl__found_verdict(&line, report);
    spdl__html_add(&text, words);
    spdl__text_add(&text, "</h1>\n");
    if (report->today > 0) spdl__page_ladder(&text, report);
    spdl__page_trials(&text, report);
    spdl__page_rounds(&text, report);
    (void)spdl_doctor_text(report, words, sizeof(words));
    spdl__text_add(&text, "<h2>The report</h2><pre class='card scroll'>");
    spdl__html_add(&text, words);
    spdl__text_add(&text, "</pre><footer>spdl.h %s</footer></main></body></html>\n",
                   spdl_version());
    return (int)text.length;
}

#endif /* SPDL_NO_REPORT */

#ifndef SPDL_NO_NPZ

/* ============================================================================================= */
/* >>crc-impl
   CRC-32 as ZIP has it, and the loads of little-endian numbers, which are right at any alignment
   and on any host. The owner of a spdl__crc fills it before any other thread can see it; from then
   on it is only read, so any number of threads may use it at once.
   A CRC is the remainder of a division of polynomials, which stays the same when leading digits are
   replaced by others with the same remainder: so the fast way multiplies 128 bits (without carries)
   by what x^n is modulo the divisor and adds them n digits further on. (V. Gopal and others, "Fast
   CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009.) */

SPDL__PRIVATE uint16_t spdl__le16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

SPDL__PRIVATE uint32_t spdl__le32(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

SPDL__INLINE uint64_t spdl__le64(const uint8_t *p) {
    uint64_t value;
    memcpy(&value, p, 8);
    return SPDL__BIG_ENDIAN ? __builtin_bswap64(value) : value;
}

typedef struct spdl__crc {
    uint32_t table[8][256]; /* table[k][b]: what byte b does when k zero bytes follow it */
    bool folds; /* the processor multiplies without carries: PCLMULQDQ, PMULL */
} spdl__crc;

/* The fast ways are twins: for x86-64, for arm64, and none for the others. */
#if defined(__x86_64__)
typedef long long spdl__v128 __attribute__((vector_size(16)));
#define SPDL__CRC_FOLDS 1
#define SPDL__CRC_TARGET SPDL__TARGET("pclmul,sse4.1")

SPDL__PRIVATE bool spdl__crc_can_fold(void) {
    return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}

SPDL__CRC_TARGET SPDL__INLINE spdl__v128 spdl__crc_fold(spdl__v128 x, spdl__v128 by) {
    return __builtin_ia32_pclmulqdq128(x, by, 0x00) ^ __builtin_ia32_pclmulqdq128(x, by, 0x11);
}

#elif defined(__aarch64__) && !SPDL__BIG_ENDIAN
typedef long long spdl__v128 __attribute__((vector_size(16)));
#define SPDL__CRC_FOLDS 1
#define SPDL__CRC_TARGET

SPDL__PRIVATE bool spdl__crc_can_fold(void) { return spdl__arm_has_pmull(); }

SPDL__INLINE spdl__v128 spdl__crc_fold(spdl__v128 x, spdl__v128 by) {
    spdl__v128 low, high;
    __asm__(".arch_extension crypto\n\tpmull %0.1q, %1.1d, %2.1d" : "=w"(low) : "w"(x), "w"(by));
    __asm__(".arch_extension crypto\n\tpmull2 %0.1q, %1.2d, %2.2d" : "=w"(high) : "w"(x), "w"(by));
    return low ^ high;
}

#else
#define SPDL__CRC_FOLDS 0
SPDL__PRIVATE bool spdl__crc_can_fold(void) { return false; }
#endif

/* What a byte does is the sum of what its bits do, so each bit doubles what is known. */
SPDL__PRIVATE void spdl__crc_init(spdl__crc *crc) {
    uint32_t value, bit, k, i;
    for (k = 0; k < 8; k++) crc->table[k][0] = 0;
    for (bit = 0; bit < 8; bit++) {
        for (value = 1u << bit, k = 0; k < 8; k++) {
            for (i = 0; i < 8; i++) value = (value >> 1) ^ (value & 1 ? 0xedb88320u : 0u);
            for (i = 0; i < 1u << bit; i++)
                crc->table[k][(1u << bit) + i] = crc->table[k][i] ^ value;
        }
    }
    crc->folds = spdl__crc_can_fold();
}

/* Eight bytes a step, each through its own table. */
SPDL__PRIVATE uint32_t spdl__crc_tables(const spdl__crc *crc, uint32_t value, const uint8_t *data,
                                        size_t bytes) {
    uint32_t low, high;
    for (; bytes >= 8; bytes -= 8, data += 8) {
        low = spdl__le32(data) ^ value;
        high = spdl__le32(data + 4);
        value = crc->table[7][low & 255] ^ crc->table[6][low >> 8 & 255] ^
                crc->table[5][low >> 16 & 255] ^ crc->table[4][low >> 24] ^
                crc->table[3][high & 255] ^ crc->table[2][high >> 8 & 255] ^
                crc->table[1][high >> 16 & 255] ^ crc->table[0][high >> 24];
    }
    for (; bytes > 0; bytes--, data++) value = crc->table[0][(value ^ *data) & 255] ^ value >> 8;
    return value;
}

#if SPDL__CRC_FOLDS
SPDL__CRC_TARGET SPDL__INLINE spdl__v128 spdl__crc_load(const void *from) {
    spdl__v128 x;
    memcpy(&x, from, 16);
    return x;
}

/* For 64 bytes or more: folds whole 64 bytes into one, those into their last 16, and whole 16 bytes
   into these. What folds over n bytes are the remainders of x^(8 n + 32) and of x^(8 n - 32), for
   the low half and the high; digits are stored with the highest power lowest, and a product of two
   such numbers comes out one bit too low, so they are shifted by one. */
SPDL__CRC_TARGET SPDL__PRIVATE uint32_t spdl__crc_folded(const spdl__crc *crc, uint32_t value,
                                                         const uint8_t *data, size_t bytes) {
    const spdl__v128 by_64 = { 0x154442bd4, 0x1c6e41596 }, by_16 = { 0x1751997d0, 0x0ccaa009e };
    const spdl__v128 before = { (long long)value, 0 }; /* is added to the first four bytes */
    spdl__v128 a = spdl__crc_load(data) ^ before, b = spdl__crc_load(data + 16);
    spdl__v128 c = spdl__crc_load(data + 32), d = spdl__crc_load(data + 48);
    uint8_t rest[16];
    for (data += 64, bytes -= 64; bytes >= 64; data += 64, bytes -= 64) {
        a = spdl__crc_fold(a, by_64) ^ spdl__crc_load(data);
        b = spdl__crc_fold(b, by_64) ^ spdl__crc_load(data + 16);
        c = spdl__crc_fold(c, by_64) ^ spdl__crc_load(data + 32);
        d = spdl__crc_fold(d, by_64) ^ spdl__crc_load(data + 48);
    }
    b ^= spdl__crc_fold(a, by_16);
    c ^= spdl__crc_fold(b, by_16);
    d ^= spdl__crc_fold(c, by_16);
    for (; bytes >= 16; data += 16, bytes -= 16)
        d = spdl__crc_fold(d, by_16) ^ spdl__crc_load(data);
    memcpy(rest, &d, 16);
    return spdl__crc_tables(crc, spdl__crc_tables(crc, 0, rest, 16), data, bytes);
}
#endif

/* The CRC of what `value` is the CRC of, followed by these bytes; start with 0. */
SPDL__PRIVATE uint32_t spdl__crc_add(const spdl__crc *crc, uint32_t value, const uint8_t *data,
                                     size_t bytes) {
#if SPDL__CRC_FOLDS
    if (bytes >= 64 && crc->folds) return ~spdl__crc_folded(crc, ~value, data, bytes);
#endif
    return ~spdl__crc_tables(crc, ~value, data, bytes);
}

/* ============================================================================================= */
/* >>inflate-impl
   Deflate (RFC 1951) from memory to memory. The thread that decodes owns the state, which lies on
   its stack; nothing is allocated, nothing is shared except the tables of the fixed codes, which
   are only read. A run stops before any byte of output, and a later one goes on from there, to
   other memory if that is wanted.
   Two decoders share the tables: a careful one, symbol by symbol with every check, and a fast one,
   which runs while neither end is near and leaves whatever is not plain to the careful one, at the
   bit where it stands. The fast one runs up to two streams side by side. Decoding is one long
   chain: the next code begins where the last one ended, so a processor that could do six things at
   once waits for one. A second stream fills the gaps.
   Never is a byte read outside the input (or the memory after it that the caller vouches for) or
   before the output, nor written past the limit of the run (or FAST_OUT bytes after it, where the
   caller has no use for them); the time is linear in input plus output. It refuses what zlib
   refuses: codes that are over-subscribed, or incomplete except for a lone code of one bit; no code
   for the end of a block; lengths 286 and 287, distances 30 and 31; distances that reach back too
   far; stored blocks whose two lengths disagree; input that ends early. */

/* An entry of a decoding table. The bits to drop stand alone in the lowest byte, so that an entry
   can be subtracted from a count, and shifted by, as it is.
     bits 0-7    how many bits the code and its extra bits take; in a link: bits of the subtable
     bits 8-11   how many of them are the code
     bits 12-14  a link to a subtable, the end of the block, or a code that is not in use
     bits 16-30  the literal, the base to which the extra bits are added, or a subtable begins
     bit 31      a literal; without any flag: a length or a distance */
#define SPDL__INFLATE_LITERAL 0x80000000u
#define SPDL__INFLATE_LINK 0x4000u
#define SPDL__INFLATE_END 0x2000u
#define SPDL__INFLATE_BAD 0x1000u
#define SPDL__INFLATE_AGAIN SPDL__INFLATE_LINK /* of code lengths: a run of the last one */
#define SPDL__INFLATE_ODD (SPDL__INFLATE_LINK | SPDL__INFLATE_END | SPDL__INFLATE_BAD)

/* Most entries a table of so many first-level bits can need: zlib's examples/enough.c computes
   them, for 286 and 30 symbols of at most 15 bits. The fixed codes need 512 and 32. */
#define SPDL__INFLATE_LITLEN_BITS 11
#define SPDL__INFLATE_LITLEN_ENTRIES 2342
#define SPDL__INFLATE_DIST_BITS 8
#define SPDL__INFLATE_DIST_ENTRIES 402
#define SPDL__INFLATE_PRECODE_BITS 7
#define SPDL__INFLATE_PRECODE_ENTRIES 128

#define SPDL__INFLATE_WINDOW 32768 /* the longest distance */
#define SPDL__INFLATE_FAST_IN 16   /* input a fast round may look at: two loads */
#define SPDL__INFLATE_FAST_OUT 32  /* output it may write beyond what it makes */
#define SPDL__INFLATE_LANES 2      /* streams side by side; a third one gained nothing */

/* What a run ended with; also, with the first four, what it is in the middle of. */
typedef enum spdl__inflate_mode {
    SPDL__INFLATE_BLOCK,  /* before the header of a block */
    SPDL__INFLATE_STORED, /* in a stored block */
    SPDL__INFLATE_CODES,  /* in a compressed block */
    SPDL__INFLATE_DONE,   /* after the last block */
    SPDL__INFLATE_FAILED, /* `reason` says why */
    SPDL__INFLATE_FULL    /* the next byte is at the limit */
} spdl__inflate_mode;

typedef enum spdl__inflate_alphabet {
    SPDL__INFLATE_LITLEN,
    SPDL__INFLATE_DIST,
    SPDL__INFLATE_PRECODE
} spdl__inflate_alphabet;

/* The tables of a block: once filled they are only read. */
typedef struct spdl__inflate_tables {
    uint32_t dist[SPDL__INFLATE_DIST_ENTRIES];
    uint32_t litlen[SPDL__INFLATE_LITLEN_ENTRIES];
    unsigned litlen_bits; /* of the first level; distances always have DIST_BITS */
} spdl__inflate_tables;

/* The caller sets `in_room`, `slack` and, between two runs, where output goes; all else is written
   by the decoder. */
typedef struct spdl__inflate {
    const uint8_t *in, *in_begin, *in_end;
    const uint8_t *in_room; /* bytes up to here may be looked at; in_end when nothing is known */
    uint64_t bits;          /* input that was loaded and not used yet, the next bit lowest; those
                               above `count` are zero or what comes next */
    unsigned count;         /* how many */

    uint8_t *base, *out, *limit; /* output so far, and where this run must stop */
    const uint8_t *before;       /* the output that came before `base` and lies elsewhere */
    size_t before_bytes;
    bool slack; /* FAST_OUT bytes after `limit` may be written, too */

    spdl__inflate_mode mode;
    const char *reason;
    bool last_block;
    bool odd; /* the fast loop left a symbol that it cannot decode */
    unsigned stored_left;
    size_t match_left, match_distance;
    const spdl__inflate_tables *fixed;
    const spdl__inflate_tables *tables; /* of this block: `fixed` or `own` */
    spdl__inflate_tables own;
} spdl__inflate;

SPDL__PRIVATE void spdl__inflate_init(spdl__inflate *s, const spdl__inflate_tables *fixed,
                                      const uint8_t *in, size_t bytes, uint8_t *out) {
    memset(s, 0, offsetof(spdl__inflate, own)); /* tables are filled before they are used */
    s->fixed = fixed;
    s->in = s->in_begin = in;
    s->in_end = s->in_room = in + bytes;
    s->base = s->out = s->limit = out;
}

SPDL__PRIVATE bool spdl__inflate_fail(spdl__inflate *s, const char *reason) {
    s->mode = SPDL__INFLATE_FAILED;
    s->reason = reason;
    return false;
}

/* Afterwards there are 56 bits or more, or all that are left. A load of 8 bytes puts the bits above
   `count` where a later load will put them again. */
SPDL__INLINE const uint8_t *spdl__inflate_load(const uint8_t *in, const uint8_t *end,
                                               uint64_t *bits, unsigned *count) {
    if (SPDL__LIKELY(end - in >= 8)) {
        *bits |= spdl__le64(in) << *count;
        in += (63 - *count) >> 3;
        *count |= 56;
        return in;
    }
    for (; *count < 56 && in != end; *count += 8) *bits |= (uint64_t)*in++ << *count;
    return in;
}

SPDL__PRIVATE void spdl__inflate_refill(spdl__inflate *s) {
    s->in = spdl__inflate_load(s->in, s->in_end, &s->bits, &s->count);
}

SPDL__PRIVATE void spdl__inflate_drop(spdl__inflate *s, unsigned count) {
    s->bits >>= count;
    s->count -= count;
}

/* Takes up to 16 bits. */
SPDL__PRIVATE bool spdl__inflate_take(spdl__inflate *s, unsigned count, unsigned *value) {
    if (s->count < count) spdl__inflate_refill(s);
    if (s->count < count) return spdl__inflate_fail(s, "the deflate stream is cut off");
    *value = (unsigned)(s->bits & ((1u << count) - 1));
    spdl__inflate_drop(s, count);
    return true;
}

/* What a symbol means that is no literal: an entry without the bits of its code. One of the precode
   is a run, as long as bits 16-23 say, of the length in bits 24-27 or, with AGAIN, the last one. */
SPDL__INLINE uint32_t spdl__inflate_meaning(spdl__inflate_alphabet alphabet, unsigned symbol) {
    static const uint16_t length_base[29] = { 3,  4,  5,  6,   7,   8,   9,   10,  11, 13,
                                              15, 17, 19, 23,  27,  31,  35,  43,  51, 59,
                                              67, 83, 99, 115, 131, 163, 195, 227, 258 };
    static const uint8_t length_extra[29] = { 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2,
                                              2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0 };
    static const uint32_t runs[3] = { 3u << 16 | SPDL__INFLATE_AGAIN | 2, 3u << 16 | 3,
                                      11u << 16 | 7 };
    uint32_t extra;
    if (alphabet == SPDL__INFLATE_PRECODE)
        return symbol < 16 ? symbol << 24 | 1u << 16 : runs[symbol - 16];
    if (alphabet == SPDL__INFLATE_DIST) {
        if (symbol < 4) return (symbol + 1) << 16;
        extra = symbol / 2 - 1;
        return symbol < 30 ? (((2 + symbol % 2) << extra) + 1) << 16 | extra : SPDL__INFLATE_BAD;
    }
    if (symbol == 256) return SPDL__INFLATE_END;
    if (symbol >= 286) return SPDL__INFLATE_BAD;
    return (uint32_t)length_base[symbol - 257] << 16 | length_extra[symbol - 257];
}

/* Whether the lengths make a prefix code: each code of `length` bits takes 2^-length of the space,
   and all of it must be used, except by the lone code of one bit and the code without symbols. */
SPDL__PRIVATE bool spdl__inflate_complete(const unsigned *count, unsigned longest,
                                          spdl__inflate_alphabet alphabet) {
    unsigned length, left = 1;
    for (length = 1; length <= longest; length++) {
        left *= 2;
        if (count[length] > left) return false;
        left -= count[length];
    }
    return left == 0 || (longest <= 1 && alphabet != SPDL__INFLATE_PRECODE);
}

SPDL__PRIVATE void spdl__inflate_count(unsigned *count, const uint8_t *lengths, unsigned symbols) {
    unsigned i;
    memset(count, 0, 16 * sizeof(*count));
    for (i = 0; i < symbols; i++) count[lengths[i]]++;
}

/* Sorts what the symbols mean, shorter codes first; those of symbols without a code go to the end,
   unused. A place that was just moved on can be used again only when that is done, so the first 128
   symbols are placed from the front of each length on, others from its end. Returns how many have a
   code. */
SPDL__INLINE unsigned spdl__inflate_sort(uint32_t *sorted, spdl__inflate_alphabet alphabet,
                                         const uint8_t *lengths, unsigned symbols,
                                         const unsigned *count) {
    const unsigned half = alphabet == SPDL__INFLATE_LITLEN ? 128 : 0;
    unsigned front[16], end[16], i, length, at = 0;
    for (length = 1; length < 16; length++) {
        front[length] = at;
        at += count[length];
        end[length] = at;
    }
    front[0] = at;
    end[0] = at + count[0];
    for (i = symbols; i > 2 * half; i--) {
        length = lengths[i - 1];
        sorted[--end[length]] = spdl__inflate_meaning(alphabet, i - 1);
    }
    for (i = 0; i < half; i++) {
        sorted[front[lengths[i]]++] = i << 16 | SPDL__INFLATE_LITERAL;
        sorted[--end[lengths[255 - i]]] = (255 - i) << 16 | SPDL__INFLATE_LITERAL;
    }
    return at;
}

/* Codes of one length follow each other as numbers, but deflate stores the first bit lowest, so
   they are needed reversed. From the reverse of number - 1 to that of number as many bits change as
   from the lowest up to the lowest 1 of number, seen from the other end. */
SPDL__INLINE unsigned spdl__inflate_next_code(unsigned code, unsigned number, unsigned length) {
    return code ^ ((1u << length) - ((1u << length) >> (__builtin_ctz(number) + 1)));
}

/* Fills the subtables with the codes longer than `root`, of which `code` is the first. A subtable
   has so many bits that all codes which share its first `root` bits fit; count[] says how many
   codes have no place yet. */
SPDL__PRIVATE void spdl__inflate_build_subs(uint32_t *table, unsigned root, unsigned longest,
                                            const uint32_t *sorted, unsigned used, unsigned *count,
                                            unsigned code, unsigned number) {
    unsigned i, at, left, length = root, bits = 0, sub = 0, end = 1u << root, prefix = ~0u;
    count[root] = 0; /* all have their place */
    for (i = 0; i < used; i++) {
        for (; count[length] == 0; length++) number *= 2;
        if ((code & ((1u << root) - 1)) != prefix) {
            prefix = code & ((1u << root) - 1);
            bits = length - root;
            for (left = 1u << bits; bits + root < longest && count[bits + root] < left; bits++)
                left = (left - count[bits + root]) * 2;
            sub = end;
            end += 1u << bits;
            table[prefix] = sub << 16 | SPDL__INFLATE_LINK | bits;
        }
        for (at = code >> root; at < 1u << bits; at += 1u << (length - root))
            table[sub + at] = sorted[i] + length * 0x101;
        count[length]--;
        code = spdl__inflate_next_code(code, ++number, length);
    }
}

/* Doubles a table that is filled so far; entries after it, below the 32nd, may change. */
SPDL__INLINE void spdl__inflate_double(uint32_t *table, unsigned entries) {
    uint32_t sixteen[16];
    unsigned i;
    for (i = 0; i < entries; i += 16) {
        memcpy(sixteen, table + i, sizeof(sixteen));
        memcpy(table + entries + i, sixteen, sizeof(sixteen));
    }
}

/* Fills a decoding table and returns the bits of its first level, or 0 when there is no such code.
   It is filled for codes of one bit, then doubled by a copy for those of two bits, and so on: every
   code is written once. The size of the large table follows the longest code, so that many tiny
   blocks cannot make it slow. count[] says how many codes of each length there are and is used up.
   A copy for each alphabet, so that each has only what it needs. */
SPDL__INLINE unsigned spdl__inflate_build(uint32_t *table, unsigned root,
                                          spdl__inflate_alphabet alphabet, const uint8_t *lengths,
                                          unsigned symbols, unsigned *count) {
    unsigned longest = 15, used, i = 0, end, length, code = 0, number = 0;
    uint32_t sorted[288];
    used = spdl__inflate_sort(sorted, alphabet, lengths, symbols, count);
    while (longest > 0 && count[longest] == 0) longest--;
    if (!spdl__inflate_complete(count, longest, alphabet)) return 0;
    if (root > longest && alphabet == SPDL__INFLATE_LITLEN) root = longest;
    if (longest <= 1) table[0] = table[1] = SPDL__INFLATE_BAD | 1;
    for (length = 1; length <= root; length++) {
        number *= 2;
        for (end = i + count[length]; i < end; i++) {
            table[code] = sorted[i] + length * 0x101;
            code = spdl__inflate_next_code(code, ++number, length);
        }
        if (length < root && (i > 0 || longest <= 1))
            spdl__inflate_double(table, 1u << length);
    }
    if (i < used)
        spdl__inflate_build_subs(table, root, longest, sorted + i, used - i, count, code, number);
    return root;
}

/* Fills the tables from the lengths of both codes; count[] says how many of each length there are
   and is used up. Returns NULL, or why they are no codes. */
SPDL__PRIVATE const char *spdl__inflate_build_both(spdl__inflate_tables *tables,
                                                   const uint8_t *lengths, unsigned litlens,
                                                   unsigned dists, unsigned *count) {
    unsigned of_dists[16], i;
    spdl__inflate_count(of_dists, lengths + litlens, dists);
    for (i = 0; i < 16; i++) count[i] -= of_dists[i];
    if (lengths[256] == 0) return "a block has no code for its end";
    tables->litlen_bits = spdl__inflate_build(tables->litlen, SPDL__INFLATE_LITLEN_BITS,
                                              SPDL__INFLATE_LITLEN, lengths, litlens, count);
    if (tables->litlen_bits == 0) return "the literal code is no code";
    if (spdl__inflate_build(tables->dist, SPDL__INFLATE_DIST_BITS, SPDL__INFLATE_DIST,
                            lengths + litlens, dists, of_dists) == 0)
        return "the distance code is no code";
    return NULL;
}

SPDL__PRIVATE void spdl__inflate_build_fixed(spdl__inflate_tables *tables) {
    uint8_t lengths[288 + 32];
    unsigned count[16];
    memset(lengths, 8, 144);
    memset(lengths + 144, 9, 112);
    memset(lengths + 256, 7, 24);
    memset(lengths + 280, 8, 8);
    memset(lengths + 288, 5, 32);
    spdl__inflate_count(count, lengths, 288 + 32);
    (void)spdl__inflate_build_both(tables, lengths, 288, 32, count);
}

SPDL__INLINE uint32_t spdl__inflate_follow(const uint32_t *table, unsigned root, uint64_t bits,
                                           uint32_t link) {
    return table[(link >> 16) + (bits >> root & ((1u << (link & 15)) - 1))];
}

SPDL__PRIVATE uint32_t spdl__inflate_find(const uint32_t *table, unsigned root, uint64_t bits) {
    uint32_t entry = table[bits & ((1u << root) - 1)];
    return entry & SPDL__INFLATE_LINK ? spdl__inflate_follow(table, root, bits, entry) : entry;
}

/* The base of a length or distance plus its extra bits, which follow the code in `bits`. */
SPDL__INLINE size_t spdl__inflate_value(uint32_t entry, uint64_t bits) {
    return (entry >> 16) +
           (size_t)((bits & (((uint64_t)1 << (entry & 63)) - 1)) >> (entry >> 8 & 63));
}

SPDL__PRIVATE bool spdl__inflate_stored_block(spdl__inflate *s) {
    unsigned length, check;
    spdl__inflate_drop(s, s->count & 7);
    if (!spdl__inflate_take(s, 16, &length) || !spdl__inflate_take(s, 16, &check)) return false;
    if (length != (check ^ 0xffff))
        return spdl__inflate_fail(s, "the two lengths of a stored block disagree");
    s->in -= s->count / 8; /* the bytes are copied from the input itself */
    s->bits = 0;
    s->count = 0;
    s->stored_left = length;
    s->mode = SPDL__INFLATE_STORED;
    return true;
}

/* Reads the code lengths of both codes; they are themselves coded, with runs. lengths[] has room
   for `total` and 7 more; count[] gets how many there are of each. Which of them are runs cannot be
   foretold, so all are: 8 bytes are written for each, which are enough except for long runs of
   zeros, and zeros are there already. Four need no more bits than are loaded at once; when there
   were too few, `left` is far above 64. */
SPDL__PRIVATE bool spdl__inflate_lengths(spdl__inflate *s, const uint32_t *precode,
                                         uint8_t *lengths, unsigned total, unsigned *count) {
    const uint8_t *in = s->in, *const end = s->in_end;
    unsigned have = 0, value = 0, run, left = s->count, i;
    uint64_t bits = s->bits, word;
    uint32_t entry;
    memset(lengths, 0, total);
    in = spdl__inflate_load(in, end, &bits, &left);
    entry = precode[bits & ((1u << SPDL__INFLATE_PRECODE_BITS) - 1)];
    if ((entry & SPDL__INFLATE_AGAIN) && (entry & 63) <= left)
        return spdl__inflate_fail(s, "a run of code lengths does not fit");
    while (have < total) {
        in = spdl__inflate_load(in, end, &bits, &left);
        i = 4;
        do {
            entry = precode[bits & ((1u << SPDL__INFLATE_PRECODE_BITS) - 1)];
            run = (unsigned)spdl__inflate_value(entry, bits) & 255;
            value = entry & SPDL__INFLATE_AGAIN ? value : entry >> 24;
            bits >>= entry & 63;
            left -= entry & 63;
            word = value * UINT64_C(0x0101010101010101);
            memcpy(lengths + have, &word, 8);
            count[value] += run;
            have += run;
        } while (--i > 0 && have < total);
        if (left > 64) return spdl__inflate_fail(s, "the deflate stream is cut off");
    }
    s->in = in;
    s->bits = bits;
    s->count = left;
    return have == total || spdl__inflate_fail(s, "a run of code lengths does not fit");
}

SPDL__PRIVATE bool spdl__inflate_dynamic_block(spdl__inflate *s) {
    static const uint8_t place[19] = { 16, 17, 18, 0, 8,  7, 9,  6, 10, 5,
                                       11, 4,  12, 3, 13, 2, 14, 1, 15 };
    uint32_t precode[SPDL__INFLATE_PRECODE_ENTRIES];
    uint8_t lengths[286 + 30 + 7], of_lengths[19] = { 0 };
    unsigned litlens, dists, precodes, i, value, count[16];
    const char *reason;
    if (!spdl__inflate_take(s, 5, &litlens) || !spdl__inflate_take(s, 5, &dists) ||
        !spdl__inflate_take(s, 4, &precodes))
        return false;
    litlens += 257;
    dists += 1;
    if (litlens > 286 || dists > 30)
        return spdl__inflate_fail(s, "too many length or distance codes");
    for (i = 0; i < precodes + 4; i++) {
        if (!spdl__inflate_take(s, 3, &value)) return false;
        of_lengths[place[i]] = (uint8_t)value;
    }
    spdl__inflate_count(count, of_lengths, 19);
    if (spdl__inflate_build(precode, SPDL__INFLATE_PRECODE_BITS, SPDL__INFLATE_PRECODE, of_lengths,
                            19, count) == 0)
        return spdl__inflate_fail(s, "the code of the code lengths is no code");
    memset(count, 0, sizeof(count));
    if (!spdl__inflate_lengths(s, precode, lengths, litlens + dists, count)) return false;
    reason = spdl__inflate_build_both(&s->own, lengths, litlens, dists, count);
    if (reason != NULL) return spdl__inflate_fail(s, reason);
    s->tables = &s->own;
    s->mode = SPDL__INFLATE_CODES;
    return true;
}

SPDL__PRIVATE bool spdl__inflate_block(spdl__inflate *s) {
    unsigned header;
    if (s->last_block) {
        s->mode = SPDL__INFLATE_DONE;
        return true;
    }
    if (!spdl__inflate_take(s, 3, &header)) return false;
    s->last_block = header & 1;
    if (header >> 1 == 0) return spdl__inflate_stored_block(s);
    if (header >> 1 == 2) return spdl__inflate_dynamic_block(s);
    if (header >> 1 == 3) return spdl__inflate_fail(s, "a block is of no known kind");
    s->tables = s->fixed;
    s->mode = SPDL__INFLATE_CODES;
    return true;
}

/* Copies from a stored block; false when the output is full. */
SPDL__PRIVATE bool spdl__inflate_stored(spdl__inflate *s) {
    size_t bytes = s->stored_left, room = (size_t)(s->limit - s->out);
    size_t left = (size_t)(s->in_end - s->in);
    if (bytes == 0) {
        s->mode = SPDL__INFLATE_BLOCK;
        return true;
    }
    if (room == 0) return false;
    if (left == 0) {
        spdl__inflate_fail(s, "the deflate stream is cut off");
        return true;
    }
    if (bytes > room) bytes = room;
    if (bytes > left) bytes = left;
    memcpy(s->out, s->in, bytes);
    s->out += bytes;
    s->in += bytes;
    s->stored_left -= (unsigned)bytes;
    return true;
}

/* Copies what is left of a match, byte by byte since source and destination may overlap; false when
   the output is full. */
SPDL__PRIVATE bool spdl__inflate_match(spdl__inflate *s) {
    size_t here, i, bytes = (size_t)(s->limit - s->out);
    const uint8_t *from;
    if (bytes == 0) return false;
    if (bytes > s->match_left) bytes = s->match_left;
    here = (size_t)(s->out - s->base);
    if (s->match_distance > here) {
        from = s->before + (s->before_bytes - (s->match_distance - here));
        if (bytes > s->match_distance - here) bytes = s->match_distance - here;
    } else {
        from = s->out - s->match_distance;
    }
    for (i = 0; i < bytes; i++) s->out[i] = from[i];
    s->out += bytes;
    s->match_left -= bytes;
    return true;
}

/* Drops a code and its extra bits, if they are all there and the code is in use. */
SPDL__PRIVATE bool spdl__inflate_drop_code(spdl__inflate *s, uint32_t entry) {
    if ((entry & 255) > s->count) return spdl__inflate_fail(s, "the deflate stream is cut off");
    if (entry & SPDL__INFLATE_BAD) return spdl__inflate_fail(s, "a code is not in use");
    spdl__inflate_drop(s, entry & 255);
    return true;
}

/* Decodes one symbol, with every check; false when the output is full. After a length and a
   distance only spdl__inflate_match may write. */
SPDL__PRIVATE bool spdl__inflate_symbol(spdl__inflate *s) {
    uint32_t entry;
    size_t length, distance;
    if (s->count < 48) spdl__inflate_refill(s); /* the most a length and a distance take */
    entry = spdl__inflate_find(s->tables->litlen, s->tables->litlen_bits, s->bits);
    if ((entry & 255) <= s->count && (entry & SPDL__INFLATE_LITERAL)) {
        if (s->out == s->limit) return false;
        *s->out++ = (uint8_t)(entry >> 16);
        spdl__inflate_drop(s, entry & 255);
        return true;
    }
    length = spdl__inflate_value(entry, s->bits);
    if (!spdl__inflate_drop_code(s, entry)) return true;
    if (entry & SPDL__INFLATE_END) {
        s->mode = SPDL__INFLATE_BLOCK;
        return true;
    }
    entry = spdl__inflate_find(s->tables->dist, SPDL__INFLATE_DIST_BITS, s->bits);
    distance = spdl__inflate_value(entry, s->bits);
    if (!spdl__inflate_drop_code(s, entry)) return true;
    if (distance > (size_t)(s->out - s->base) + s->before_bytes) {
        spdl__inflate_fail(s, "a distance reaches back before the first byte");
        return true;
    }
    s->match_left = length;
    s->match_distance = distance;
    return true;
}

/* The part of the state that the fast loop keeps in registers: a local copy, which no store through
   `out` can be thought to change. */
typedef struct spdl__inflate_lane {
    const uint8_t *in, *in_stop; /* a round may begin while `in` is before in_stop */
    uint8_t *out, *out_stop;     /* and `out` before out_stop */
    const uint8_t *base;
    uint64_t bits;
    uint32_t count; /* in its lowest byte; whole entries are subtracted from it */
    uint32_t entry; /* of the next code */
    uint32_t undo;  /* lowest byte: bits that were dropped but are to be decoded again */
    bool odd;       /* what comes next is for the careful decoder */
    const spdl__inflate_tables *tables;
    uint64_t litlen_mask;
} spdl__inflate_lane;

/* A fast round may begin with more room than this before the limit: for what it may write beyond
   what it makes; or where that does no harm, for the second and third literal of the round. */
SPDL__INLINE ptrdiff_t spdl__inflate_out_left(const spdl__inflate *s) {
    return s->slack ? 2 : SPDL__INFLATE_FAST_OUT;
}

/* Without a branch, to 56 bits or more (variant 4 of Fabian Giesen's "Reading bits in far too many
   ways"). */
SPDL__INLINE void spdl__inflate_lane_refill(spdl__inflate_lane *l) {
    l->bits |= spdl__le64(l->in) << (l->count & 63);
    l->in += 7;
    l->in -= l->count >> 3 & 7;
    l->count |= 56;
}

SPDL__INLINE uint32_t spdl__inflate_lane_next(const spdl__inflate_lane *l) {
    return l->tables->litlen[l->bits & l->litlen_mask];
}

SPDL__INLINE void spdl__inflate_lane_drop(spdl__inflate_lane *l, uint32_t entry) {
    l->bits >>= entry & 63;
    l->count -= entry;
}

/* Writes a literal and returns the entry of what comes next. */
SPDL__INLINE uint32_t spdl__inflate_lane_literal(spdl__inflate_lane *l, uint32_t entry) {
    *l->out++ = (uint8_t)(entry >> 16);
    spdl__inflate_lane_drop(l, entry);
    return spdl__inflate_lane_next(l);
}

/* The next entry is looked up from what is left, and more is loaded while that is under way. */
SPDL__INLINE bool spdl__inflate_lane_go_on(spdl__inflate_lane *l, uint32_t next) {
    l->entry = next;
    spdl__inflate_lane_refill(l);
    return true;
}

SPDL__INLINE bool spdl__inflate_lane_leave(spdl__inflate_lane *l, uint32_t undo) {
    l->undo = undo;
    l->odd = true;
    return false;
}

SPDL__INLINE void spdl__inflate_copy_8(uint8_t *out, const uint8_t *from) {
    uint64_t word;
    memcpy(&word, from, 8);
    memcpy(out, &word, 8);
}

SPDL__INLINE void spdl__inflate_copy_4x8(uint8_t *out, const uint8_t *from) {
    spdl__inflate_copy_8(out, from);
    spdl__inflate_copy_8(out + 8, from + 8);
    spdl__inflate_copy_8(out + 16, from + 16);
    spdl__inflate_copy_8(out + 24, from + 24);
}

SPDL__INLINE void spdl__inflate_fill(uint8_t *out, const uint8_t *end, uint64_t word) {
    const uint64_t words[4] = { word, word, word, word };
    do {
        memcpy(out, words, 32);
        out += 32;
    } while (out < end);
}

/* A match that lies in the output whole; what is written ends FAST_OUT bytes after it at the
   latest. Most matches are short: three words that need no decision cost less than a wrong guess.
   Distances of 1 and 4 are runs of one byte or one float, so frequent that they have a path. */
SPDL__INLINE void spdl__inflate_copy(uint8_t *out, size_t distance, size_t length) {
    const uint8_t *from = out - distance;
    const uint8_t *const end = out + length;
    if (SPDL__LIKELY(distance >= 8)) {
        spdl__inflate_copy_8(out, from);
        spdl__inflate_copy_8(out + 8, from + 8);
        spdl__inflate_copy_8(out + 16, from + 16);
        if (SPDL__LIKELY(length <= 24)) return;
        out += 24;
        from += 24;
        if (distance >= 32)
            for (; out < end; out += 32, from += 32) memcpy(out, from, 32);
        else
            for (; out < end; out += 32, from += 32) spdl__inflate_copy_4x8(out, from);
    } else if (distance == 1) {
        spdl__inflate_fill(out, end, *from * UINT64_C(0x0101010101010101));
    } else if (distance == 4) {
        uint32_t four;
        memcpy(&four, from, 4);
        spdl__inflate_fill(out, end, four * UINT64_C(0x0000000100000001));
    } else { /* the first `distance` bytes of every word are right */
        for (; out < end; out += distance, from += distance) spdl__inflate_copy_8(out, from);
    }
}

/* Decodes the distance that belongs to the length which was just dropped, and copies. */
SPDL__INLINE bool spdl__inflate_lane_match(spdl__inflate_lane *l, uint32_t before,
                                           size_t length) {
    uint32_t entry = l->tables->dist[l->bits & ((1u << SPDL__INFLATE_DIST_BITS) - 1)];
    size_t distance;
    /* 8 bits, 13 extra bits, and 11 to look up what comes next; a longer code takes 28 and 11 */
    if (SPDL__UNLIKELY((l->count & 255) < 21 + 11)) spdl__inflate_lane_refill(l);
    if (SPDL__UNLIKELY(entry & SPDL__INFLATE_ODD)) {
        if (!(entry & SPDL__INFLATE_LINK)) return spdl__inflate_lane_leave(l, before);
        spdl__inflate_lane_refill(l);
        entry = spdl__inflate_follow(l->tables->dist, SPDL__INFLATE_DIST_BITS, l->bits, entry);
        if (entry & SPDL__INFLATE_ODD) return spdl__inflate_lane_leave(l, before);
    }
    distance = spdl__inflate_value(entry, l->bits);
    spdl__inflate_lane_drop(l, entry);
    if (SPDL__UNLIKELY(distance > (size_t)(l->out - l->base) ||
                       (ptrdiff_t)length > l->out_stop - l->out))
        return spdl__inflate_lane_leave(l, before + entry);
    l->out += length;
    entry = spdl__inflate_lane_next(l);
    spdl__inflate_lane_go_on(l, entry);
    spdl__inflate_copy(l->out - length, distance, length);
    return true;
}

/* Decodes three literals, or up to two and a match or a literal with a long code. At its beginning
   there are 56 bits: two codes of the first level, 22, and a length, 20, need no more loaded.
   False: what comes next is to be done with care. */
SPDL__INLINE bool spdl__inflate_round(spdl__inflate_lane *l) {
    uint32_t entry = l->entry;
    size_t length;
    if (entry & SPDL__INFLATE_LITERAL) {
        entry = spdl__inflate_lane_literal(l, entry);
        if (entry & SPDL__INFLATE_LITERAL) {
            entry = spdl__inflate_lane_literal(l, entry);
            if (entry & SPDL__INFLATE_LITERAL)
                return spdl__inflate_lane_go_on(l, spdl__inflate_lane_literal(l, entry));
        }
    }
    if (SPDL__UNLIKELY(entry & SPDL__INFLATE_ODD)) {
        if (!(entry & SPDL__INFLATE_LINK)) return spdl__inflate_lane_leave(l, 0);
        entry = spdl__inflate_follow(l->tables->litlen, l->tables->litlen_bits, l->bits, entry);
        if (entry & SPDL__INFLATE_LITERAL)
            return spdl__inflate_lane_go_on(l, spdl__inflate_lane_literal(l, entry));
        if (entry & SPDL__INFLATE_ODD) return spdl__inflate_lane_leave(l, 0);
    }
    length = spdl__inflate_value(entry, l->bits);
    spdl__inflate_lane_drop(l, entry);
    return spdl__inflate_lane_match(l, entry, length);
}

SPDL__INLINE spdl__inflate_lane spdl__inflate_lane_load(const spdl__inflate *s) {
    spdl__inflate_lane l;
    l.in = s->in;
    l.in_stop = s->in_room - (SPDL__INFLATE_FAST_IN - 1);
    l.out = s->out;
    l.out_stop = s->limit - spdl__inflate_out_left(s);
    l.base = s->base;
    l.bits = s->bits;
    l.count = s->count;
    l.undo = 0;
    l.odd = false;
    l.tables = s->tables;
    l.litlen_mask = ((uint64_t)1 << s->tables->litlen_bits) - 1;
    spdl__inflate_lane_refill(&l);
    l.entry = spdl__inflate_lane_next(&l);
    return l;
}

/* Gives back all whole bytes that were loaded but not used. With room after the input a lane may
   have decoded what is no input. */
SPDL__INLINE void spdl__inflate_lane_store(const spdl__inflate_lane *l, spdl__inflate *s) {
    const unsigned count = (l->count & 255) + (l->undo & 255);
    s->in = l->in - count / 8;
    s->count = count % 8;
    s->bits = s->count > 0 ? (uint64_t)(s->in[-1] >> (8 - s->count)) : 0;
    s->out = l->out;
    s->odd = l->odd;
    if (s->in > s->in_end) spdl__inflate_fail(s, "the deflate stream is cut off");
}

SPDL__INLINE bool spdl__inflate_step(spdl__inflate_lane *l) {
    if (SPDL__UNLIKELY(l->in >= l->in_stop)) return false; /* two branches: gcc joins an && */
    if (SPDL__UNLIKELY(l->out >= l->out_stop)) return false;
    return spdl__inflate_round(l);
}

/* Rounds of one stream, or of two in turn, until one of them cannot go on. */
SPDL__INLINE void spdl__inflate_loop(spdl__inflate *const *s, unsigned count) {
    spdl__inflate_lane a = spdl__inflate_lane_load(s[0]), b;
    if (count == 1) {
        while (spdl__inflate_step(&a)) continue;
    } else {
        b = spdl__inflate_lane_load(s[1]);
        for (;;) {
            if (!spdl__inflate_step(&a)) break;
            if (!spdl__inflate_step(&b)) break;
        }
        spdl__inflate_lane_store(&b, s[1]);
    }
    spdl__inflate_lane_store(&a, s[0]);
}

SPDL__NOINLINE void spdl__inflate_fast_any(spdl__inflate *const *s, unsigned count) {
    spdl__inflate_loop(s, count);
}

/* A twin where BMI2 is, which shifts by any register and needs fewer moves for it. */
#if SPDL__X86
SPDL__TARGET("bmi,bmi2")
SPDL__PRIVATE void spdl__inflate_fast_bmi2(spdl__inflate *const *s, unsigned count) {
    spdl__inflate_loop(s, count);
}
#define SPDL__INFLATE_FAST \
    (__builtin_cpu_supports("bmi2") ? spdl__inflate_fast_bmi2 : spdl__inflate_fast_any)
#else
#define SPDL__INFLATE_FAST spdl__inflate_fast_any
#endif

/* Goes on with care until the fast loop can: CODES; otherwise what the run ended with. */
SPDL__PRIVATE spdl__inflate_mode spdl__inflate_careful(spdl__inflate *s) {
    bool room = true;
    while (room) {
        if (s->mode == SPDL__INFLATE_BLOCK) {
            spdl__inflate_block(s);
        } else if (s->mode == SPDL__INFLATE_STORED) {
            room = spdl__inflate_stored(s);
        } else if (s->mode != SPDL__INFLATE_CODES) {
            return s->mode;
        } else if (s->match_left > 0) {
            room = spdl__inflate_match(s);
        } else if (!s->odd && s->in_room - s->in >= SPDL__INFLATE_FAST_IN + 8 &&
                   s->limit - s->out > spdl__inflate_out_left(s)) {
            return SPDL__INFLATE_CODES;
        } else {
            s->odd = false;
            room = spdl__inflate_symbol(s);
        }
    }
    return SPDL__INFLATE_FULL;
}

/* Decodes up to LANES streams side by side, each up to its limit, until one of them has ended as a
   run of it alone would end. Returns which one, and in *ended how. */
SPDL__PRIVATE unsigned spdl__inflate_run_lanes(spdl__inflate *const *lanes, unsigned count,
                                               spdl__inflate_mode *ended) {
    unsigned i;
    for (;;) {
        for (i = 0; i < count; i++) {
            *ended = spdl__inflate_careful(lanes[i]);
            if (*ended != SPDL__INFLATE_CODES) return i;
        }
        SPDL__INFLATE_FAST(lanes, count);
    }
}

/* Decodes until the next byte of output would be at `limit`, the stream ends or is found to be bad.
   A later run may go on with a new limit, and with new memory if `before` says where the old is. */
SPDL__PRIVATE spdl__inflate_mode spdl__inflate_run(spdl__inflate *s, uint8_t *limit) {
    spdl__inflate_mode ended;
    s->limit = limit;
    (void)spdl__inflate_run_lanes(&s, 1, &ended);
    return ended;
}

/* ============================================================================================= */
/* >>zip-impl
   The directory of a ZIP archive, in memory or in a file. Opening reads the end record and the
   central directory, in time that grows with their length (names out of order: with n log n), and
   nothing of the members. A member's own header is checked each time the member is used, so that a
   broken member does not take the others with it. One thread opens and closes; between, only the
   states of the CRCs change, so any thread may ask. Of a file the zip keeps a copy of its tail, in
   which the directory lies; archive bytes in memory stay the caller's; the directory made from them
   is one allocation of the zip. Sizes, CRC and method are those of the central directory: the local
   header of a current NumPy file says 0xffffffff. A member ends where the next one begins, at the
   latest. */

#define SPDL__ZIP_STORED 0
#define SPDL__ZIP_DEFLATED 8
#define SPDL__ZIP_LOCAL_BYTES 30
#define SPDL__ZIP_ENTRY_BYTES 46
#define SPDL__ZIP_END_BYTES 22
#define SPDL__ZIP_END64_BYTES 56
#define SPDL__ZIP_LOCATOR_BYTES 20
#ifndef SPDL__ZIP_TAIL_BYTES
#define SPDL__ZIP_TAIL_BYTES 4096 /* of a file that are looked at first */
#endif

/* Written by open. */
typedef struct spdl__zip_member {
    const uint8_t *key; /* the whole name, where the directory has it */
    const char *name;   /* without ".npy", zero at the end; NULL: hidden by a later one */
    uint64_t offset;    /* of the local header, from the first byte in memory */
    uint64_t limit;     /* where the next member or the directory begins */
    uint64_t csize, usize;
    uint32_t crc;
    uint32_t hidden;    /* earlier members of the same name */
    uint32_t state;     /* of the CRC, a spdl_npz_crc: written by any thread, whole and relaxed */
    uint16_t key_bytes, method, flags;
    bool overlaps;
} spdl__zip_member;

typedef struct spdl__zip {
    /* Written by the owner before open. */
    const uint8_t *data; /* all of it, or NULL when it is in the file */
    uint64_t size;
    spdl__os_file file;
    char label[208]; /* the file, for messages; a long path loses its head */
    spdl_allocator allocator;
    /* Written by open. */
    const uint8_t *tail; /* its bytes from tail_at on: all, or a block of the zip */
    uint64_t tail_at;
    uint64_t directory;  /* where the central directory begins */
    uint64_t prefix;     /* bytes in front of the archive, which its offsets do not count */
    spdl__zip_member *members;
    uint32_t *by_name; /* members by name */
    size_t count;
    size_t block_bytes; /* at members: they, by_name, as many numbers to sort with, and the names */
} spdl__zip;

/* Copies a name for a message: nothing in it can steer a terminal, and it does not fill it. */
SPDL__PRIVATE void spdl__zip_printable(char *to, size_t bytes, const char *name) {
    size_t i, length = strlen(name);
    for (i = 0; i < length && i + 1 < bytes; i++)
        to[i] = (unsigned char)name[i] < 32 || name[i] == 127 ? '?' : name[i];
    to[i] = 0;
    if (i < length) memcpy(to + bytes - 4, "...", 3);
}

SPDL__PRIVATE void spdl__zip_set_label(spdl__zip *zip, const char *path) {
    size_t length = strlen(path), room = sizeof(zip->label) - 1;
    if (length > room) path += length - room;
    spdl__zip_printable(zip->label, sizeof(zip->label), path);
    if (length > room) memcpy(zip->label, "...", 3);
}

/* What is being looked at, and where to report what is wrong with it. */
typedef struct spdl__zip_where {
    const spdl__zip *zip;
    const spdl__zip_member *member; /* NULL: the archive as a whole */
    spdl_error *error;              /* may be NULL */
} spdl__zip_where;

/* Records "file: member 'name': reason" and returns the result. */
SPDL__PRINTF(3, 4)
SPDL__PRIVATE spdl_result spdl__zip_fail(const spdl__zip_where *where, spdl_result result,
                                         const char *format, ...) {
    char reason[192], name[80];
    const char *label = where->zip->label;
    va_list args;
    if (where->error == NULL) return result;
    va_start(args, format);
    vsnprintf(reason, sizeof(reason), format, args);
    va_end(args);
    if (where->member == NULL)
        return spdl__error_set(where->error, result, "%s: %s", label, reason);
    spdl__zip_printable(name, sizeof(name), where->member->name);
    return spdl__error_set(where->error, result, "%s: member '%s': %s", label, name, reason);
}

/* Memory for `what`, which the caller frees. */
SPDL__PRIVATE spdl_result spdl__zip_alloc(const spdl__zip_where *where, uint8_t **to,
                                          uint64_t bytes, const char *what) {
    *to = NULL;
    if (bytes <= SIZE_MAX / 2)
        *to = (uint8_t *)spdl__alloc(&where->zip->allocator, (size_t)bytes, 64);
    if (*to != NULL) return SPDL_OK;
    return spdl__zip_fail(where, SPDL_E_NOMEM, "no memory for %s (%llu bytes)", what,
                          (spdl__llu)bytes);
}

/* Reads bytes of the file; *have says how many there were. */
SPDL__PRIVATE spdl_result spdl__zip_read(const spdl__zip_where *where, void *to, size_t bytes,
                                         uint64_t at, size_t *have) {
    const char *reason = spdl__os_file_read(where->zip->file, to, bytes, at, have);
    if (reason == NULL) return SPDL_OK;
    return spdl__zip_fail(where, SPDL_E_IO, "at byte %llu of %llu: %s", (spdl__llu)(at + *have),
                          (spdl__llu)where->zip->size, reason);
}

/* What open knows so far, on its stack. */
typedef struct spdl__zip_opening {
    spdl__zip *zip;
    spdl__zip_where where;
    uint64_t max_members;
    uint64_t entries, bytes, offset; /* of the central directory, as the end records say */
    uint64_t stop;                   /* where the central directory must end */
    bool wide; /* a ZIP64 record was there: `entries` is the whole number */
} spdl__zip_opening;

SPDL__PRIVATE const uint8_t *spdl__zip_at(const spdl__zip *zip, uint64_t at) {
    return zip->tail + (at - zip->tail_at);
}

SPDL__PRIVATE void spdl__zip_drop_tail(spdl__zip *zip) {
    if (zip->data == NULL)
        spdl__free(&zip->allocator, SPDL__UNCONST(zip->tail), (size_t)(zip->size - zip->tail_at));
    zip->tail = zip->data;
    zip->tail_at = 0;
}

/* Makes the tail begin at `at`, at the latest. */
SPDL__PRIVATE spdl_result spdl__zip_need_tail(const spdl__zip_opening *o, uint64_t at) {
    spdl__zip *zip = o->zip;
    const uint64_t bytes = zip->size - at;
    uint8_t *block;
    size_t have;
    spdl_result result;
    if (zip->tail != NULL && at >= zip->tail_at) return SPDL_OK;
    spdl__zip_drop_tail(zip);
    result = spdl__zip_alloc(&o->where, &block, bytes, "the directory");
    if (result != SPDL_OK) return result;
    zip->tail = block;
    zip->tail_at = at;
    return spdl__zip_read(&o->where, block, (size_t)bytes, at, &have);
}

/* Looks for the end record, the last thing in the file except its comment: in the last bytes of a
   file first, then in all that a comment can take. When none ends with the file, *end is the last
   there is, as Python takes it. */
SPDL__PRIVATE spdl_result spdl__zip_find_end(const spdl__zip_opening *o, uint64_t *end) {
    const spdl__zip *zip = o->zip;
    const uint64_t size = zip->size, reach = SPDL__ZIP_END_BYTES + 65535;
    uint64_t at, tail = SPDL__ZIP_TAIL_BYTES;
    spdl_result result;
    for (*end = size; tail <= SPDL__ZIP_TAIL_BYTES + reach; tail += reach) {
        result = spdl__zip_need_tail(o, size - spdl__min(size, tail));
        if (result != SPDL_OK) return result;
        at = size < SPDL__ZIP_END_BYTES ? 0 : size - SPDL__ZIP_END_BYTES + 1;
        while (at-- > spdl__max(zip->tail_at, size - spdl__min(size, reach))) {
            if (spdl__le32(spdl__zip_at(zip, at)) != 0x06054b50) continue;
            if (*end == size) *end = at;
            if (at + SPDL__ZIP_END_BYTES + spdl__le16(spdl__zip_at(zip, at) + 20) != size) continue;
            *end = at;
            return SPDL_OK;
        }
    }
    if (*end < size) return SPDL_OK;
    return spdl__zip_fail(&o->where, SPDL_E_FORMAT,
                          "neither .npy nor .npz, or cut off: no end of a ZIP archive in "
                          "%llu bytes", (spdl__llu)size);
}

/* Takes the ZIP64 value of a field that is all ones in the older record; the two must not differ
   otherwise. */
SPDL__PRIVATE bool spdl__zip_widen(uint64_t *field, uint64_t ones, uint64_t wide) {
    bool fits = *field == ones || *field == wide;
    *field = wide;
    return fits;
}

/* Reads the ZIP64 end record when there is a locator for it before the end record at `end`. */
SPDL__PRIVATE spdl_result spdl__zip_read_end64(spdl__zip_opening *o, uint64_t end) {
    const spdl__zip *zip = o->zip;
    const uint64_t at = end - SPDL__ZIP_LOCATOR_BYTES;
    const uint8_t *record;
    uint64_t position, latest;
    spdl_result result;
    if (end < zip->tail_at + SPDL__ZIP_LOCATOR_BYTES) return SPDL_OK;
    if (spdl__le32(spdl__zip_at(zip, at)) != 0x07064b50) return SPDL_OK;
    if (spdl__le32(spdl__zip_at(zip, at) + 16) > 1)
        return spdl__zip_fail(&o->where, SPDL_E_UNSUPPORTED, "archive of several disks");
    position = spdl__le64(spdl__zip_at(zip, at) + 8);
    latest = at >= SPDL__ZIP_END64_BYTES ? at - SPDL__ZIP_END64_BYTES : 0;
    if (position <= latest && latest - position < 65536) { /* what may be in it besides numbers */
        result = spdl__zip_need_tail(o, position);
        if (result != SPDL_OK) return result;
    }
    if (position > latest || position < zip->tail_at ||
        spdl__le32(spdl__zip_at(zip, position)) != 0x06064b50)
        position = latest; /* bytes in front of the archive: then it is the 56 before the locator */
    record = spdl__zip_at(zip, position);
    if (at < SPDL__ZIP_END64_BYTES || position < zip->tail_at ||
        spdl__le32(record) != 0x06064b50 || spdl__le64(record + 4) > at - position - 12)
        return spdl__zip_fail(&o->where, SPDL_E_FORMAT,
                              "the ZIP64 locator at byte %llu leads to no ZIP64 end record",
                              (spdl__llu)at);
    o->wide = true;
    o->stop = position;
    if (!spdl__zip_widen(&o->entries, 0xffff, spdl__le64(record + 32)) ||
        !spdl__zip_widen(&o->bytes, 0xffffffff, spdl__le64(record + 40)) ||
        !spdl__zip_widen(&o->offset, 0xffffffff, spdl__le64(record + 48)))
        return spdl__zip_fail(&o->where, SPDL_E_FORMAT,
                              "the end record at byte %llu and its ZIP64 record disagree",
                              (spdl__llu)end);
    return SPDL_OK;
}

/* Finds out where the central directory is, and proves that it is there. */
SPDL__PRIVATE spdl_result spdl__zip_read_end(spdl__zip_opening *o) {
    spdl__zip *zip = o->zip;
    const uint8_t *record;
    uint64_t at = 0;
    uint16_t disk;
    spdl_result result = spdl__zip_find_end(o, &at);
    if (result == SPDL_OK) /* with the ZIP64 records before it */
        result = spdl__zip_need_tail(o, at > 128 ? at - 128 : 0);
    if (result != SPDL_OK) return result;
    record = spdl__zip_at(zip, at);
    disk = spdl__le16(record + 4);
    o->entries = spdl__le16(record + 10);
    o->bytes = spdl__le32(record + 12);
    o->offset = spdl__le32(record + 16);
    o->stop = at;
    result = spdl__zip_read_end64(o, at);
    if (result != SPDL_OK) return result;
    if (disk != 0 && !(o->wide && disk == 0xffff))
        return spdl__zip_fail(&o->where, SPDL_E_UNSUPPORTED, "archive of several disks");
    if (o->bytes > o->stop || o->offset > o->stop - o->bytes)
        return spdl__zip_fail(&o->where, SPDL_E_FORMAT,
                              "a central directory of %llu bytes at byte %llu does not fit before "
                              "its end record at byte %llu",
                              (spdl__llu)o->bytes, (spdl__llu)o->offset, (spdl__llu)o->stop);
    zip->directory = o->stop - o->bytes;
    zip->prefix = zip->directory - o->offset;
    if (o->bytes >> 10 > o->max_members + 64)
        return spdl__zip_fail(&o->where, SPDL_E_LIMIT,
                              "a central directory of %llu bytes, too many for max_members, which "
                              "is %llu", (spdl__llu)o->bytes, (spdl__llu)o->max_members);
    return spdl__zip_need_tail(o, zip->directory);
}

SPDL__PRIVATE size_t spdl__zip_entry_bytes(const uint8_t *entry) {
    return (size_t)SPDL__ZIP_ENTRY_BYTES + spdl__le16(entry + 28) + spdl__le16(entry + 30) +
           spdl__le16(entry + 32);
}

/* Takes the sizes that are all ones in the entry from its ZIP64 field, which need not be the first.
   Up to three bytes that are no field may follow the last. */
SPDL__PRIVATE bool spdl__zip_read_extra(spdl__zip_member *member, const uint8_t *extra,
                                        size_t bytes) {
    uint64_t *const field[3] = { &member->usize, &member->csize, &member->offset };
    size_t length = 0, i;
    for (; bytes >= 4; extra += 4 + length, bytes -= 4 + length) {
        length = spdl__le16(extra + 2);
        if (length > bytes - 4) return false;
        if (spdl__le16(extra) == 1) break;
    }
    if (bytes < 4) return true;
    for (i = 0, extra += 4; i < 3; i++) {
        if (*field[i] != 0xffffffff) continue;
        if (length < 8) return false;
        *field[i] = spdl__le64(extra);
        extra += 8;
        length -= 8;
    }
    return true;
}

/* Fills in a member from its entry, all but the name; false when its extra field is damaged. */
SPDL__PRIVATE bool spdl__zip_read_entry(const spdl__zip *zip, spdl__zip_member *member,
                                        const uint8_t *entry) {
    memset(member, 0, sizeof(*member));
    member->flags = spdl__le16(entry + 8);
    member->method = spdl__le16(entry + 10);
    member->crc = spdl__le32(entry + 16);
    member->csize = spdl__le32(entry + 20);
    member->usize = spdl__le32(entry + 24);
    member->key_bytes = spdl__le16(entry + 28);
    member->offset = spdl__le32(entry + 42);
    member->key = entry + SPDL__ZIP_ENTRY_BYTES;
    member->state = SPDL_NPZ_CRC_UNCHECKED;
    if (!spdl__zip_read_extra(member, member->key + member->key_bytes, spdl__le16(entry + 30)))
        return false;
    member->offset += spdl__min(zip->prefix, UINT64_MAX - member->offset);
    return true;
}

/* Fills in the members, and proves that each entry is there as a whole. Keys end in ".npy" in
   NumPy's files; one such ending is left out of the name. */
SPDL__PRIVATE spdl_result spdl__zip_read_entries(spdl__zip_opening *o, char *names) {
    spdl__zip *zip = o->zip;
    uint64_t at = zip->directory, stop = o->stop;
    spdl__zip_member *member = zip->members;
    const uint8_t *entry;
    size_t bytes;
    bool good;
    for (; at < stop; at += spdl__zip_entry_bytes(entry), member++, zip->count++) {
        entry = spdl__zip_at(zip, at);
        if (stop - at < SPDL__ZIP_ENTRY_BYTES || spdl__le32(entry) != 0x02014b50 ||
            stop - at < spdl__zip_entry_bytes(entry) ||
            memchr(entry + SPDL__ZIP_ENTRY_BYTES, 0, spdl__le16(entry + 28)) != NULL)
            return spdl__zip_fail(&o->where, SPDL_E_FORMAT,
                                  "entry %llu of the central directory, at byte %llu, is damaged",
                                  (spdl__llu)zip->count, (spdl__llu)at);
        if (zip->count >= o->max_members)
            return spdl__zip_fail(&o->where, SPDL_E_LIMIT,
                                  "more members than max_members, which is %llu",
                                  (spdl__llu)o->max_members);
        good = spdl__zip_read_entry(zip, member, entry);
        bytes = member->key_bytes;
        if (bytes >= 4 && memcmp(member->key + bytes - 4, ".npy", 4) == 0) bytes -= 4;
        memcpy(names, member->key, bytes);
        names[bytes] = 0;
        member->name = names;
        names += bytes + 1;
        if (good) continue;
        o->where.member = member;
        return spdl__zip_fail(&o->where, SPDL_E_FORMAT,
                              "the extra field of its directory entry is damaged");
    }
    if (zip->count == o->entries || (!o->wide && (zip->count & 0xffff) == o->entries))
        return SPDL_OK;
    return spdl__zip_fail(&o->where, SPDL_E_FORMAT,
                          "the central directory has %llu entries, its end record says %llu",
                          (spdl__llu)zip->count, (spdl__llu)o->entries);
}

/* Below zero when the name of the member comes before `name` with `suffix`. Shorter names come
   first: arr_0 to arr_10 as NumPy writes them are in this order already. */
SPDL__PRIVATE int spdl__zip_compare(const spdl__zip_member *member, const uint8_t *name,
                                    size_t bytes, const char *suffix) {
    size_t more = strlen(suffix);
    int order;
    if (member->key_bytes != bytes + more) return member->key_bytes < bytes + more ? -1 : 1;
    order = memcmp(member->key, name, bytes);
    return order != 0 ? order : memcmp(member->key + bytes, suffix, more);
}

SPDL__PRIVATE bool spdl__zip_before(const spdl__zip_member *a, const spdl__zip_member *b,
                                    bool by_name) {
    return by_name ? spdl__zip_compare(a, b->key, b->key_bytes, "") < 0 : a->offset < b->offset;
}

/* Fills by_name with the members by name or by offset; equal ones keep the order of the directory.
   Merges sorted runs of twice the length each time, between by_name and the numbers after it: n log
   n at most, without recursion. */
SPDL__PRIVATE void spdl__zip_sort(spdl__zip *zip, bool by_name) {
    const spdl__zip_member *const m = zip->members;
    const size_t count = zip->count;
    uint32_t *from = zip->by_name, *to = from + count, *held;
    size_t width, a, b, middle, end, i;
    bool sorted = true;
    for (i = 0; i < count; i++) {
        from[i] = (uint32_t)i;
        sorted = sorted && (i == 0 || !spdl__zip_before(&m[i], &m[i - 1], by_name));
    }
    if (sorted) return;
    for (width = 1; width < count; width *= 2) {
        for (i = 0; i < count;) {
            a = i;
            b = middle = (size_t)spdl__min(a + width, count);
            end = (size_t)spdl__min(b + width, count);
            for (; i < end; i++) {
                const bool second = b < end && (a == middle || spdl__zip_before(
                                                   &m[from[b]], &m[from[a]], by_name));
                to[i] = from[second ? b++ : a++];
            }
        }
        held = from;
        from = to;
        to = held;
    }
    if (from != zip->by_name) memcpy(zip->by_name, from, count * sizeof(*from));
}

/* Marks members that share bytes with another, and notes where each must end. Two entries with
   one offset are two names for one place, of which the local header will confirm one at most. */
SPDL__PRIVATE void spdl__zip_find_limits(spdl__zip *zip) {
    spdl__zip_member *member, *other = NULL;
    uint64_t limit = zip->directory, start = limit, end = 0, bytes;
    size_t i;
    spdl__zip_sort(zip, false);
    for (i = zip->count; i-- > 0;) {
        member = &zip->members[zip->by_name[i]];
        if (member->offset < start) {
            limit = start;
            start = member->offset;
        }
        member->limit = limit;
    }
    for (i = 0; i < zip->count; i++) {
        member = &zip->members[zip->by_name[i]];
        if (other != NULL && member->offset < end && member->offset != other->offset)
            member->overlaps = other->overlaps = true;
        bytes = (uint64_t)SPDL__ZIP_LOCAL_BYTES + member->key_bytes;
        if (member->offset > zip->directory || bytes > zip->directory - member->offset ||
            member->csize > zip->directory - member->offset - bytes) {
            continue; /* not in the file as a whole: refused when it is used */
        }
        if (member->offset + bytes + member->csize > end) {
            end = member->offset + bytes + member->csize;
            other = member;
        }
    }
}

/* Of members with one name only the last stays. Returns whether any had to go. */
SPDL__PRIVATE bool spdl__zip_drop_hidden(spdl__zip *zip) {
    spdl__zip_member *member, *next;
    size_t i, kept = 0, count = zip->count;
    for (i = 0; i + 1 < count; i++) {
        member = &zip->members[zip->by_name[i]];
        next = &zip->members[zip->by_name[i + 1]];
        if (spdl__zip_compare(member, next->key, next->key_bytes, "") != 0) continue;
        member->name = NULL;
        next->hidden = member->hidden + 1;
    }
    for (i = 0; i < count; i++) {
        if (zip->members[i].name != NULL) zip->members[kept++] = zip->members[i];
    }
    zip->count = kept;
    return kept != count;
}

SPDL__PRIVATE void spdl__zip_close(spdl__zip *zip) {
    spdl__zip_drop_tail(zip);
    if (zip->block_bytes > 0) spdl__free(&zip->allocator, zip->members, zip->block_bytes);
}

/* Needs data or file, size, label and allocator. To be closed also after a failure. */
SPDL__PRIVATE spdl_result spdl__zip_open(spdl__zip *zip, uint64_t max_members, spdl_error *error) {
    const size_t each = sizeof(spdl__zip_member) + 2 * sizeof(uint32_t);
    spdl__zip_opening o = { zip, { zip, NULL, error }, 0, 0, 0, 0, 0, false };
    uint64_t most, bytes;
    uint8_t *block;
    spdl_result result;
    o.max_members = spdl__min(max_members, 0x7fffffff); /* they are numbered with 32 bits */
    zip->tail = zip->data;
    result = spdl__zip_read_end(&o);
    if (result != SPDL_OK) return result;
    most = spdl__min(o.bytes / SPDL__ZIP_ENTRY_BYTES, o.max_members);
    bytes = most * each + o.bytes + 1; /* names take less than the directory */
    result = spdl__zip_alloc(&o.where, &block, bytes, "the directory");
    if (result != SPDL_OK) return result;
    zip->block_bytes = (size_t)bytes;
    zip->members = (spdl__zip_member *)(void *)block;
    zip->by_name = (uint32_t *)(void *)(zip->members + most);
    result = spdl__zip_read_entries(&o, (char *)(zip->by_name + 2 * most));
    if (result != SPDL_OK) return result;
    spdl__zip_find_limits(zip);
    spdl__zip_sort(zip, true);
    if (spdl__zip_drop_hidden(zip)) spdl__zip_sort(zip, true);
    return SPDL_OK;
}

/* Whether there is a member whose whole name is `name` with `suffix`; *place is where in by_name it
   is or would be. */
SPDL__PRIVATE bool spdl__zip_find(const spdl__zip *zip, const char *name, const char *suffix,
                                  size_t *place) {
    size_t low = 0, high = zip->count, middle, bytes = strlen(name);
    int order = 1;
    while (low < high && order != 0) {
        middle = low + (high - low) / 2;
        order = spdl__zip_compare(&zip->members[zip->by_name[middle]], (const uint8_t *)name,
                                  bytes, suffix);
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    *place = high;
    return order == 0;
}

/* Whether a member can be read at all, its sizes can be true, and it can be where the directory
   says, before its header is looked at. Deflate makes at most 258 bytes of 2 bits. */
SPDL__PRIVATE spdl_result spdl__zip_check(const spdl__zip_where *where, uint64_t max_ratio) {
    const spdl__zip_member *m = where->member;
    if (m->flags & (0x0001 | 0x0040 | 0x2000))
        return spdl__zip_fail(where, SPDL_E_UNSUPPORTED, "encrypted");
    if (m->flags & 0x0020)
        return spdl__zip_fail(where, SPDL_E_UNSUPPORTED, "holds patched data");
    if (m->method != SPDL__ZIP_STORED && m->method != SPDL__ZIP_DEFLATED)
        return spdl__zip_fail(
            where, SPDL_E_UNSUPPORTED,
            "compressed by method %u%s; only 0 (stored) and 8 (deflate) can be read",
            (unsigned)m->method,
            m->method == 12 ? " (bzip2)" : m->method == 14 ? " (LZMA)"
                                       : m->method == 93 ? " (Zstandard)" : "");
    if (m->method == SPDL__ZIP_STORED && m->csize != m->usize)
        return spdl__zip_fail(where, SPDL_E_FORMAT,
                              "stored, but the directory says %llu bytes and %llu in the file",
                              (spdl__llu)m->usize, (spdl__llu)m->csize);
    if (m->method == SPDL__ZIP_DEFLATED && m->usize / 1032 > m->csize)
        return spdl__zip_fail(where, SPDL_E_FORMAT, "%llu deflated bytes cannot become %llu",
                              (spdl__llu)m->csize, (spdl__llu)m->usize);
    if (m->method == SPDL__ZIP_DEFLATED && m->usize / max_ratio > m->csize)
        return spdl__zip_fail(where, SPDL_E_LIMIT,
                              "grows from %llu to %llu bytes, more than max_ratio, which is %llu",
                              (spdl__llu)m->csize, (spdl__llu)m->usize, (spdl__llu)max_ratio);
    if (m->offset > m->limit || m->limit - m->offset < SPDL__ZIP_LOCAL_BYTES)
        return spdl__zip_fail(where, SPDL_E_FORMAT,
                              "its header would be at byte %llu, past byte %llu where it must end",
                              (spdl__llu)m->offset, (spdl__llu)m->limit);
    if (m->overlaps)
        return spdl__zip_fail(where, SPDL_E_FORMAT, "at byte %llu, overlaps another member",
                              (spdl__llu)m->offset);
    return SPDL_OK;
}

/* Compares a member's header with the directory, and finds where its bytes begin: csize of them,
   all before its limit. `local` is the header with as many bytes of the name as fit before the
   limit. */
SPDL__PRIVATE spdl_result spdl__zip_check_local(const spdl__zip_where *where, const uint8_t *local,
                                                uint64_t *payload) {
    const spdl__zip_member *member = where->member;
    const uint64_t at = member->offset;
    uint64_t left = member->limit - at - SPDL__ZIP_LOCAL_BYTES;
    if (spdl__le32(local) != 0x04034b50)
        return spdl__zip_fail(where, SPDL_E_FORMAT, "no header at byte %llu", (spdl__llu)at);
    if (spdl__le16(local + 26) != member->key_bytes || member->key_bytes > left ||
        memcmp(local + SPDL__ZIP_LOCAL_BYTES, member->key, member->key_bytes) != 0)
        return spdl__zip_fail(where, SPDL_E_FORMAT, "the header at byte %llu has another name",
                              (spdl__llu)at);
    left -= member->key_bytes;
    if (spdl__le16(local + 28) > left || member->csize > left - spdl__le16(local + 28))
        return spdl__zip_fail(where, SPDL_E_FORMAT,
                              "%llu bytes at byte %llu reach past byte %llu where it must end",
                              (spdl__llu)member->csize, (spdl__llu)at, (spdl__llu)member->limit);
    *payload = at + SPDL__ZIP_LOCAL_BYTES + member->key_bytes + spdl__le16(local + 28);
    return SPDL_OK;
}

/* ============================================================================================= */
/* >>npy-impl
   The header of an array: a Python literal, read by a tokenizer that knows just the forms it can
   have. Sizes that come out of it are products, each checked before it is formed. Then what reading
   can change about the data: byte order and index order. The calling thread runs all of it, in the
   caller's memory, of which nothing is kept. */

#define SPDL__NPY_HEAD_BYTES 65536           /* longest header text, unless the desc says other */
#define SPDL__NPY_NESTING 16                 /* structured types inside structured types */
#define SPDL__NPY_MOST ((uint64_t)INT64_MAX) /* NumPy's own bound for the bytes of an array */

/* Where the tokenizer is, and what went wrong first. */
typedef struct spdl__npy_text {
    const char *begin, *at, *end;
    bool foreign; /* a number is not in the byte order of this machine */
    spdl_result result;
    char reason[160];
} spdl__npy_text;

/* Records why, with the place in the header text; returns false. */
SPDL__PRINTF(3, 4)
SPDL__PRIVATE bool spdl__npy_fail(spdl__npy_text *t, spdl_result result, const char *format, ...) {
    char what[120];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof(what), format, args);
    va_end(args);
    t->result = result;
    snprintf(t->reason, sizeof(t->reason), "%s, at byte %u of its header", what,
             (unsigned)(t->at - t->begin));
    return false;
}

SPDL__PRIVATE const char *spdl__npy_skip_blanks(const char *at, const char *end) {
    while (at != end && (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r' || *at == '\f'))
        at++;
    return at;
}

/* Takes the character if it comes next. (A header asks 20 times: inlined it is read in 3/4 of the
   time.) */
SPDL__INLINE bool spdl__npy_take(spdl__npy_text *t, char c) {
    const char *at = spdl__npy_skip_blanks(t->at, t->end);
    const bool there = at != t->end && *at == c;
    t->at = at + there;
    return there;
}

SPDL__PRIVATE bool spdl__npy_need(spdl__npy_text *t, char c) {
    return spdl__npy_take(t, c) || spdl__npy_fail(t, SPDL_E_FORMAT, "'%c' is missing", c);
}

/* Takes what stands between quotes of either kind. A backslash hides the character after it. */
SPDL__PRIVATE bool spdl__npy_string(spdl__npy_text *t, const char **string, size_t *bytes) {
    const char *at = spdl__npy_skip_blanks(t->at, t->end);
    const char quote = at != t->end ? *at : 0;
    t->at = at;
    if (quote != '\'' && quote != '"') return spdl__npy_fail(t, SPDL_E_FORMAT, "no string");
    for (*string = ++at; at != t->end && *at != quote; at++) {
        if (*at == '\\' && at + 1 != t->end) at++;
    }
    *bytes = (size_t)(at - *string);
    t->at = at;
    return spdl__npy_need(t, quote);
}

/* Takes digits. False without an error when there are none or the number is beyond 64 bits. */
SPDL__PRIVATE bool spdl__npy_digits(const char **at, const char *end, uint64_t *value) {
    const char *first = *at;
    uint64_t digit;
    for (*value = 0; *at != end && **at >= '0' && **at <= '9'; (*at)++) {
        digit = (uint64_t)(**at - '0');
        if (*value > (UINT64_MAX - digit) / 10) return false;
        *value = *value * 10 + digit;
    }
    return *at != first;
}

/* A tuple: (), (n,), (n, m) and so on; one number alone needs its comma. Python 2 put an L after
   some numbers. */
SPDL__PRIVATE bool spdl__npy_shape(spdl__npy_text *t, uint64_t *shape, int *ndim) {
    const char *first;
    bool comma = true;
    if (!spdl__npy_need(t, '(')) return false;
    for (*ndim = 0; !spdl__npy_take(t, ')'); ++*ndim) {
        if (!comma) return spdl__npy_need(t, ',');
        if (*ndim == SPDL_NPY_MAX_DIMS)
            return spdl__npy_fail(t, SPDL_E_LIMIT, "more than %d dimensions", SPDL_NPY_MAX_DIMS);
        first = t->at;
        if (first != t->end && *first == '-')
            return spdl__npy_fail(t, SPDL_E_FORMAT, "the shape has a negative dimension");
        if (!spdl__npy_digits(&t->at, t->end, &shape[*ndim]) ||
            (*first == '0' && t->at != first + 1))
            return spdl__npy_fail(t, SPDL_E_FORMAT, "the shape has a dimension that is no number");
        if (t->at != t->end && *t->at == 'L') t->at++;
        comma = spdl__npy_take(t, ',');
    }
    if (*ndim == 1 && !comma) return spdl__npy_fail(t, SPDL_E_FORMAT, "the shape is no tuple");
    return true;
}

SPDL__PRIVATE bool spdl__npy_multiply(uint64_t *product, uint64_t factor) {
    if (factor != 0 && *product > SPDL__NPY_MOST / factor) return false;
    *product *= factor;
    return true;
}

/* The product of the dimensions and of the size of an element, which must not pass NumPy's bound
   even when a dimension of zero makes the array empty. */
SPDL__PRIVATE bool spdl__npy_product(const uint64_t *shape, int ndim, uint64_t itemsize,
                                     uint64_t *count) {
    uint64_t product = itemsize > 0 ? itemsize : 1;
    int i;
    *count = 1;
    for (i = 0; i < ndim; i++) {
        if (shape[i] > 0 && !spdl__npy_multiply(&product, shape[i])) return false;
        *count *= shape[i]; /* no more than product */
    }
    return true;
}

/* Bytes of an element of this kind and number, or false when there is no such type. */
SPDL__PRIVATE bool spdl__npy_itemsize(char kind, uint64_t number, uint64_t *itemsize) {
    *itemsize = number;
    switch (kind) {
    case 'b': return number == 1;
    case 'i':
    case 'u': return number == 1 || number == 2 || number == 4 || number == 8;
    case 'f': return number == 2 || number == 4 || number == 8 || number == 12 || number == 16;
    case 'c': return number == 8 || number == 16 || number == 24 || number == 32;
    case 'M':
    case 'm': return number == 8;
    case 'S':
    case 'V': return number <= SPDL__NPY_MOST;
    case 'U': *itemsize = 4; return spdl__npy_multiply(itemsize, number);
    default: return false;
    }
}

SPDL__PRIVATE char spdl__npy_host_order(void) { return SPDL__BIG_ENDIAN ? '>' : '<'; }

/* Whether a type has a byte order at all. */
SPDL__PRIVATE bool spdl__npy_is_ordered(char kind, uint64_t itemsize) {
    return kind == 'U' || (kind != 'S' && kind != 'V' && itemsize != 1);
}

/* A simple type, such as '<f4', '|S12' or '>M8[ns]'. */
SPDL__PRIVATE bool spdl__npy_simple(spdl__npy_text *t, spdl_npy_info *info) {
    const char *at, *end, *string;
    const char host = spdl__npy_host_order();
    char kind, order = '=';
    uint64_t number = 1;
    size_t bytes;
    bool known = true;
    if (!spdl__npy_string(t, &string, &bytes)) return false;
    at = string;
    end = string + bytes;
    if (at != end && (*at == '<' || *at == '>' || *at == '=' || *at == '|')) order = *at++;
    kind = at != end ? *at++ : 0;
    if (kind == 'O')
        return spdl__npy_fail(t, SPDL_E_UNSUPPORTED,
                              "object arrays (dtype '|O') hold Python pickles and are not "
                              "supported");
    if (kind == 'a') kind = 'S';
    if (kind == '?' && at == end) kind = 'b';
    else known = spdl__npy_digits(&at, end, &number);
    known = known && spdl__npy_itemsize(kind, number, &info->itemsize);
    if ((kind == 'M' || kind == 'm') && end - at > 2 && *at == '[' && end[-1] == ']')
        at = end; /* the unit, as in [25us] */
    if (!known || at != end)
        return spdl__npy_fail(t, SPDL_E_UNSUPPORTED, "dtype '%.*s' is not known",
                              (int)(bytes < 40 ? bytes : 40), string);
    if (order == '=' || order == '|') order = host;
    info->kind = kind;
    info->byte_order = spdl__npy_is_ordered(kind, info->itemsize) ? order : '|';
    t->foreign = t->foreign || (info->byte_order != '|' && order != host);
    return true;
}

/* The beginning of a field: ('name', or (('title', 'name'), */
SPDL__PRIVATE bool spdl__npy_field_name(spdl__npy_text *t) {
    const char *string;
    size_t bytes;
    if (!spdl__npy_need(t, '(')) return false;
    if (!spdl__npy_take(t, '('))
        return spdl__npy_string(t, &string, &bytes) && spdl__npy_need(t, ',');
    return spdl__npy_string(t, &string, &bytes) && spdl__npy_need(t, ',') &&
           spdl__npy_string(t, &string, &bytes) && spdl__npy_need(t, ')') &&
           spdl__npy_need(t, ',');
}

/* The end of a field after its type: an optional shape. Adds the field to its struct's size. */
SPDL__PRIVATE bool spdl__npy_field_end(spdl__npy_text *t, uint64_t itemsize, uint64_t *total) {
    uint64_t shape[SPDL_NPY_MAX_DIMS], count = 1;
    int ndim = 0;
    if (spdl__npy_take(t, ',') && !spdl__npy_take(t, ')')) {
        if (!spdl__npy_shape(t, shape, &ndim)) return false;
        spdl__npy_take(t, ',');
        if (!spdl__npy_need(t, ')')) return false;
    } else if (t->at[-1] != ')' && !spdl__npy_need(t, ')')) {
        return false;
    }
    if (!spdl__npy_product(shape, ndim, itemsize, &count) ||
        itemsize * count > SPDL__NPY_MOST - *total)
        return spdl__npy_fail(t, SPDL_E_FORMAT, "the size of an element overflows");
    *total += itemsize * count;
    return true;
}

/* A structured type after its '[': fields, whose types may be structured in turn. Leaves only the
   size of an element in info. */
SPDL__PRIVATE bool spdl__npy_structured(spdl__npy_text *t, spdl_npy_info *info) {
    uint64_t total[SPDL__NPY_NESTING]; /* of each struct that is open, the bytes so far */
    int depth = 0;
    for (total[0] = 0;;) {
        if (spdl__npy_take(t, ']')) {
            info->itemsize = total[depth];
            if (depth-- == 0) return true;
        } else {
            if (!spdl__npy_field_name(t)) return false;
            if (spdl__npy_take(t, '[')) {
                if (++depth == SPDL__NPY_NESTING)
                    return spdl__npy_fail(t, SPDL_E_LIMIT, "types nested more than %d deep",
                                          SPDL__NPY_NESTING);
                total[depth] = 0;
                continue;
            }
            if (!spdl__npy_simple(t, info)) return false;
        }
        if (!spdl__npy_field_end(t, info->itemsize, &total[depth])) return false;
        if (!spdl__npy_take(t, ',') && (t->at == t->end || *t->at != ']'))
            return spdl__npy_need(t, ']');
    }
}

/* The type, and its text as the header has it, cut between characters when it is too long. */
SPDL__PRIVATE bool spdl__npy_descr(spdl__npy_text *t, spdl_npy_info *info) {
    const char *first;
    size_t bytes;
    t->at = spdl__npy_skip_blanks(t->at, t->end);
    first = t->at;
    if (spdl__npy_take(t, '[')) {
        if (!spdl__npy_structured(t, info)) return false;
        info->structured = true;
        info->kind = 'V';
        info->byte_order = '|';
        bytes = (size_t)(t->at - first);
    } else {
        if (!spdl__npy_simple(t, info)) return false;
        bytes = (size_t)(t->at - first) - 2;
        first++; /* without its quotes */
    }
    if (bytes >= sizeof(info->descr)) {
        bytes = sizeof(info->descr) - 1;
        while (bytes > 0 && ((unsigned char)first[bytes] & 0xc0) == 0x80) bytes--;
    }
    memcpy(info->descr, first, bytes); /* info was cleared */
    return true;
}

SPDL__PRIVATE bool spdl__npy_bool(spdl__npy_text *t, bool *value) {
    size_t left;
    t->at = spdl__npy_skip_blanks(t->at, t->end);
    left = (size_t)(t->end - t->at);
    *value = left >= 4 && memcmp(t->at, "True", 4) == 0;
    if (!*value && (left < 5 || memcmp(t->at, "False", 5) != 0))
        return spdl__npy_fail(t, SPDL_E_FORMAT, "fortran_order is neither True nor False");
    t->at += *value ? 4 : 5;
    return true;
}

SPDL__PRIVATE bool spdl__npy_is(const char *string, size_t bytes, const char *word) {
    return bytes == strlen(word) && memcmp(string, word, bytes) == 0;
}

/* {'descr': ..., 'fortran_order': ..., 'shape': ...}, each once, in any order. */
SPDL__PRIVATE bool spdl__npy_dictionary(spdl__npy_text *t, spdl_npy_info *info) {
    const char *key;
    size_t bytes;
    bool good, comma = true, have_descr = false, have_order = false, have_shape = false;
    if (!spdl__npy_need(t, '{')) return false;
    while (!spdl__npy_take(t, '}')) {
        if (!comma) return spdl__npy_need(t, ',');
        if (!spdl__npy_string(t, &key, &bytes) || !spdl__npy_need(t, ':')) return false;
        if (spdl__npy_is(key, bytes, "descr") && !have_descr) {
            good = have_descr = spdl__npy_descr(t, info);
        } else if (spdl__npy_is(key, bytes, "fortran_order") && !have_order) {
            good = have_order = spdl__npy_bool(t, &info->fortran_order);
        } else if (spdl__npy_is(key, bytes, "shape") && !have_shape) {
            good = have_shape = spdl__npy_shape(t, info->shape, &info->ndim);
        } else {
            good = spdl__npy_fail(t, SPDL_E_FORMAT, "an unknown key, or one for the second time");
        }
        if (!good) return false;
        comma = spdl__npy_take(t, ',');
    }
    if (!have_descr || !have_order || !have_shape)
        return spdl__npy_fail(t, SPDL_E_FORMAT, "descr, fortran_order or shape is missing");
    while (t->end - t->at >= 8 && memcmp(t->at, "        ", 8) == 0) t->at += 8; /* up to 63 */
    t->at = spdl__npy_skip_blanks(t->at, t->end);
    return t->at == t->end || spdl__npy_fail(t, SPDL_E_FORMAT, "text after the dictionary");
}

/* Reads the text of a header into info, with the products. */
SPDL__PRIVATE bool spdl__npy_read(spdl__npy_text *t, const uint8_t *text, size_t bytes,
                                  spdl_npy_info *info) {
    t->begin = t->at = (const char *)text;
    t->end = t->begin + bytes;
    t->foreign = false;
    memset(info, 0, sizeof(*info));
    if (!spdl__npy_dictionary(t, info)) return false;
    if (!spdl__npy_product(info->shape, info->ndim, info->itemsize, &info->count))
        return spdl__npy_fail(t, SPDL_E_FORMAT, "the product of the shape overflows");
    info->bytes = info->count * info->itemsize;
    return true;
}

/* Reverses the bytes of each of `count` numbers. */
SPDL__PRIVATE void spdl__npy_swap_each(uint8_t *data, uint64_t count, size_t bytes) {
    size_t low, high;
    uint8_t held;
    for (; count > 0; count--, data += bytes) {
        for (low = 0, high = bytes - 1; low < high; low++, high--) {
            held = data[low];
            data[low] = data[high];
            data[high] = held;
        }
    }
}

/* The same for a type: characters have four bytes, complex numbers two parts. */
SPDL__PRIVATE void spdl__npy_swap(uint8_t *data, uint64_t bytes, const spdl_npy_info *info) {
    const uint64_t unit = info->kind == 'U'   ? 4
                          : info->kind == 'c' ? info->itemsize / 2
                                              : info->itemsize;
    if (bytes == 0) return;
    if (unit == 2) spdl__npy_swap_each(data, bytes / 2, 2); /* constants help the compiler */
    else if (unit == 4) spdl__npy_swap_each(data, bytes / 4, 4);
    else if (unit == 8) spdl__npy_swap_each(data, bytes / 8, 8);
    else spdl__npy_swap_each(data, bytes / unit, (size_t)unit);
}

/* Copies rows x columns elements so that rows become columns, in tiles that the cache holds. `from`
   steps by one element along a column, `to` by one along a row. */
SPDL__PRIVATE void spdl__npy_turn(uint8_t *to, uint64_t to_row, const uint8_t *from,
                                  uint64_t from_column, uint64_t rows, uint64_t columns,
                                  size_t bytes) {
    const uint64_t tile = 32;
    const uint8_t *source;
    uint64_t top, left, row, column, end;
    uint8_t *at;
    for (top = 0; top < rows; top += tile) {
        for (left = 0; left < columns; left += tile) {
            end = spdl__min(left + tile, columns);
            for (row = top; row < spdl__min(top + tile, rows); row++) {
                at = to + (row * to_row + left) * bytes;
                source = from + (left * from_column + row) * bytes;
                for (column = left; column < end; column++) {
                    if (bytes == 4) memcpy(at, source, 4); /* constants become single moves */
                    else if (bytes == 8) memcpy(at, source, 8);
                    else memcpy(at, source, bytes);
                    at += bytes;
                    source += from_column * bytes;
                }
            }
        }
    }
}

/* Column-major to row-major. The first and the last index are turned together, since those are
   neighbours in memory; the ones between are counted through. */
SPDL__PRIVATE void spdl__npy_to_c_order(uint8_t *to, const uint8_t *from,
                                        const spdl_npy_info *info) {
    uint64_t index[SPDL_NPY_MAX_DIMS] = { 0 }, to_step[SPDL_NPY_MAX_DIMS],
             from_step[SPDL_NPY_MAX_DIMS], to_at = 0, from_at = 0;
    const int last = info->ndim - 1;
    int i;
    from_step[0] = to_step[last] = 1;
    for (i = 1; i <= last; i++) from_step[i] = from_step[i - 1] * info->shape[i - 1];
    for (i = last; i > 0; i--) to_step[i - 1] = to_step[i] * info->shape[i];
    for (;;) {
        spdl__npy_turn(to + to_at * info->itemsize, to_step[0], from + from_at * info->itemsize,
                       from_step[last], info->shape[0], info->shape[last], (size_t)info->itemsize);
        for (i = last - 1; i > 0; i--) {
            to_at += to_step[i];
            from_at += from_step[i];
            if (++index[i] < info->shape[i]) break;
            to_at -= to_step[i] * index[i];
            from_at -= from_step[i] * index[i];
            index[i] = 0;
        }
        if (i <= 0) return;
    }
}

/* ============================================================================================= */
/* >>npz-impl
   Arrays out of archives. A small file is read into the allocation of its archive, memory given to
   spdl_npz_open_memory stays the caller's, and of a larger file only the directory is kept. Between
   open and close three things change, each a word that is exchanged as a whole, so the other calls
   may run on any threads at once: what is known of the CRCs, the mapping that the first view makes,
   and the tables that the first to verify or inflate makes.
   There is one way to read a member: spdl__npz_begin finds it and reads a stored one to its end; of
   a deflated one it prepares a run of the decoder, and after each run spdl__npz_ran takes the CRC
   and prepares the next, until the result is not PENDING any more. The first run makes the header
   and as much of the data as HEAD bytes hold, the next ones go straight to the caller's memory, and
   what follows the array goes to a window. Between them the thread may run the decoder of another
   member beside this one (>>many-impl).
   The reader lies on the stack of the call (about 17 KB); the call allocates for a larger deflated
   member of a large file, a long header, or what follows an array. Sizes are proven plausible
   first: a deflated member is at most 1032 times its bytes in the file, an array at most its
   member. */

#ifndef SPDL__NPZ_SMALL_FILE
#define SPDL__NPZ_SMALL_FILE 262144 /* read at once up to here; measured against mapping it */
#endif
#define SPDL__NPZ_PIECE 131072 /* bytes whose CRC is taken while they are in the cache */
#define SPDL__NPZ_WINDOW 2048  /* of a file, on the stack */
#ifndef SPDL__NPZ_HEAD
#define SPDL__NPZ_HEAD 2048 /* the first run of a decoder; longer headers need other memory */
#endif
#define SPDL__NPZ_AFTER 64 /* bytes that follow what is deflated, for inflate to look at */

/* What verifying and inflating need, made when one of them is first asked for. */
typedef struct spdl__npz_tables {
    spdl__crc crc;
    spdl__inflate_tables fixed;
} spdl__npz_tables;

struct spdl_npz {
    /* Written by open alone. */
    spdl__zip zip;         /* of a .npy file: one member, made up */
    spdl__zip_member only; /* that member */
    uint32_t only_order;
    bool is_npy;
    spdl_npz_desc desc; /* with its defaults; verify is NONE when there are no CRCs */
    uint8_t *small;     /* the bytes of a small file */

    /* Any thread: set once, by cas, by the first call that needs it. */
    uint64_t mapping; /* a const uint8_t *, or 0 */
    uint64_t tables;  /* a const spdl__npz_tables *, or 0 */
};

/* A member in use: on the stack of the call that uses it, which alone writes it. */
typedef struct spdl__npz_reader {
    spdl_npz *npz;
    spdl__zip_where where;
    const spdl__npz_tables *tables; /* NULL until they are needed */

    /* Set when a member is found. */
    spdl__zip_member *member;
    bool stored;
    uint64_t payload; /* where its bytes begin */

    /* The bytes of the file that are there. */
    uint8_t *window; /* `local`, or allocated */
    size_t room, have;
    size_t ahead; /* how much of a file to read at once, at least; `room` may be more */
    uint64_t window_at;
    const uint8_t *readable; /* the end of the memory in which the last bytes fetched lie */

    /* Set with the header. */
    const uint8_t *head; /* what comes before the data: in memory, in the window, or inflated */
    size_t head_bytes;
    bool swap, turn;   /* what is to be converted */
    uint8_t *large;    /* what `small` cannot hold: a long header, or all, made by SPDL_INFLATE */
    size_t large_bytes;

    /* Of a read. */
    bool keep;   /* false: only the CRC is wanted */
    bool verify;
    bool begun;  /* the header is read */
    void *to;    /* the caller's memory, of `to_bytes` */
    size_t to_bytes;
    spdl_npy_info *info;
    uint8_t *held;  /* the data before they are turned */
    uint8_t *data;  /* where the next bytes of the array go */
    size_t want;    /* bytes of the array that have no place yet */
    uint64_t left;  /* bytes of a deflated member that are not made yet */
    uint8_t *piece; /* what the decoder makes in this run */
    uint32_t crc;   /* of what is made */
    uint8_t *trailer; /* room to inflate what follows the array */

    uint8_t small[SPDL__NPZ_HEAD + SPDL__INFLATE_FAST_OUT];
    uint8_t local[SPDL__NPZ_WINDOW];
    spdl__inflate inflate;
} spdl__npz_reader;

/* Makes the tables, or finds those that another call made. */
SPDL__PRIVATE spdl_result spdl__npz_need_tables(spdl__npz_reader *r) {
    spdl_npz *npz = r->npz;
    uint64_t found = spdl__load(&npz->tables); /* pairs with the cas below */
    spdl__npz_tables *made;
    spdl_result result;
    uint8_t *block;
    if (found == 0) {
        result = spdl__zip_alloc(&r->where, &block, sizeof(*made), "tables");
        if (result != SPDL_OK) return result;
        made = (spdl__npz_tables *)(void *)block;
        spdl__crc_init(&made->crc);
        spdl__inflate_build_fixed(&made->fixed);
        if (spdl__cas(&npz->tables, &found, (uint64_t)(uintptr_t)made))
            found = (uint64_t)(uintptr_t)made;
        else
            spdl__free(&npz->zip.allocator, made, sizeof(*made)); /* another was faster */
    }
    r->tables = (const spdl__npz_tables *)(uintptr_t)found;
    return SPDL_OK;
}

SPDL__PRIVATE void spdl__npz_free_window(spdl__npz_reader *r) {
    if (r->window != r->local) spdl__free(&r->npz->zip.allocator, r->window, r->room);
    r->window = r->local;
    r->room = sizeof(r->local);
    r->have = 0;
}

SPDL__PRIVATE bool spdl__npz_has(const spdl__npz_reader *r, uint64_t at, size_t bytes) {
    return at >= r->window_at && at - r->window_at <= r->have &&
           bytes <= r->have - (size_t)(at - r->window_at);
}

/* Makes `bytes` bytes of the archive be at *from: in its memory, or in the window. They are known
   to be in the archive. */
SPDL__PRIVATE spdl_result spdl__npz_fetch(spdl__npz_reader *r, uint64_t at, size_t bytes,
                                          const uint8_t **from) {
    const spdl__zip *zip = &r->npz->zip;
    const size_t room = (size_t)spdl__max(bytes + SPDL__NPZ_AFTER, r->ahead);
    uint8_t *made;
    spdl_result result = SPDL_OK;
    if (zip->data != NULL) {
        *from = zip->data + at;
        r->readable = zip->data + zip->size;
        return SPDL_OK;
    }
    if (!spdl__npz_has(r, at, bytes)) {
        if (room > r->room) { /* a larger window; what was in it is lost */
            spdl__npz_free_window(r);
            result = spdl__zip_alloc(&r->where, &made, room, "its bytes in the file");
            if (result != SPDL_OK) return result;
            r->window = made;
            r->room = room;
        }
        r->window_at = at;
        result = spdl__zip_read(&r->where, r->window, (size_t)spdl__min(room, zip->size - at), at,
                                &r->have);
        if (result != SPDL_OK && r->have < bytes) return result;
    }
    *from = r->window + (size_t)(at - r->window_at);
    r->readable = r->window + r->have;
    return SPDL_OK;
}

/* Copies bytes of the archive: few of them by way of the window, which looks ahead. */
SPDL__PRIVATE spdl_result spdl__npz_copy_out(spdl__npz_reader *r, uint64_t at, uint8_t *to,
                                             size_t bytes) {
    const uint8_t *from = NULL;
    size_t have = 0;
    spdl_result result;
    if (r->npz->zip.data == NULL && bytes > r->ahead / 2 && !spdl__npz_has(r, at, bytes))
        return spdl__zip_read(&r->where, to, bytes, at, &have);
    result = spdl__npz_fetch(r, at, bytes, &from);
    if (result == SPDL_OK) memcpy(to, from, bytes);
    return result;
}

SPDL__PRIVATE spdl_result spdl__npz_inflate_error(const spdl__npz_reader *r,
                                                  spdl__inflate_mode ended) {
    const spdl__llu at = (spdl__llu)spdl__min((uint64_t)(r->inflate.in - r->inflate.in_begin),
                                              r->member->csize); /* it may have looked further */
    if (ended == SPDL__INFLATE_FAILED)
        return spdl__zip_fail(&r->where, SPDL_E_FORMAT, "damaged near byte %llu of %llu: %s", at,
                              (spdl__llu)r->member->csize, r->inflate.reason);
    return spdl__zip_fail(
        &r->where, SPDL_E_FORMAT, "inflates to %s than the %llu bytes the directory says",
        ended == SPDL__INFLATE_DONE ? "less" : "more", (spdl__llu)r->member->usize);
}

SPDL__PRIVATE void spdl__npz_end(spdl__npz_reader *r) {
    const spdl_allocator *allocator = &r->npz->zip.allocator;
    spdl__free(allocator, r->large, r->large_bytes);
    if (r->held != NULL) spdl__free(allocator, r->held, (size_t)r->info->bytes);
    spdl__free(allocator, r->trailer, (size_t)2 * SPDL__INFLATE_WINDOW);
    r->large = r->held = r->trailer = NULL;
}

/* Lets inflate begin, with so many of the compressed bytes. */
SPDL__PRIVATE spdl_result spdl__npz_start_inflate(spdl__npz_reader *r, size_t bytes) {
    const uint8_t *in = NULL;
    spdl_result result = spdl__npz_need_tables(r);
    if (result == SPDL_OK) result = spdl__npz_fetch(r, r->payload, bytes, &in);
    if (result != SPDL_OK) return result;
    spdl__npz_end(r);
    r->head = r->small;
    spdl__inflate_init(&r->inflate, &r->tables->fixed, in, bytes, r->small);
    r->inflate.in_room = r->readable;
    r->inflate.slack = true;
    return SPDL_OK;
}

/* Makes the first `bytes` of the member be at r->head. */
SPDL__PRIVATE spdl_result spdl__npz_need_head(spdl__npz_reader *r, size_t bytes) {
    spdl__inflate *s = &r->inflate;
    spdl__inflate_mode ended;
    spdl_result result;
    if (bytes > r->member->usize)
        return spdl__zip_fail(&r->where, SPDL_E_FORMAT, "no .npy array: %llu bytes, a header of %u",
                              (spdl__llu)r->member->usize, (unsigned)bytes);
    r->head_bytes = bytes;
    if (r->stored) return spdl__npz_fetch(r, r->payload, bytes, &r->head);
    if ((size_t)(s->out - s->base) >= bytes) return SPDL_OK;
    if (bytes > SPDL__NPZ_HEAD) { /* what is inflated moves to other memory */
        r->large_bytes = bytes + SPDL__INFLATE_FAST_OUT;
        result = spdl__zip_alloc(&r->where, &r->large, r->large_bytes, "its header");
        if (result != SPDL_OK) return result;
        memcpy(r->large, r->small, (size_t)(s->out - s->base));
        s->out = r->large + (s->out - s->base);
        r->head = s->base = r->large;
    }
    ended = spdl__inflate_run(s, s->base + bytes);
    if (ended != SPDL__INFLATE_FAILED && s->out == s->limit) return SPDL_OK;
    return spdl__npz_inflate_error(r, ended);
}

/* Magic, version and length; then r->head is the whole header and its text begins at *text. */
SPDL__PRIVATE spdl_result spdl__npz_read_head(spdl__npz_reader *r, size_t *text) {
    uint32_t length;
    spdl_result result = spdl__npz_need_head(r, 10);
    if (result != SPDL_OK) return result;
    if (memcmp(r->head, "\x93NUMPY", 6) != 0)
        return spdl__zip_fail(&r->where, SPDL_E_FORMAT,
                              "no .npy array: it does not begin with \\x93NUMPY");
    if (r->head[6] < 1 || r->head[6] > 3 || r->head[7] != 0)
        return spdl__zip_fail(&r->where, SPDL_E_UNSUPPORTED,
                              ".npy version %u.%u; only 1.0, 2.0 and 3.0 can be read",
                              (unsigned)r->head[6], (unsigned)r->head[7]);
    *text = r->head[6] == 1 ? 10 : 12;
    result = spdl__npz_need_head(r, *text);
    if (result != SPDL_OK) return result;
    length = r->head[6] == 1 ? spdl__le16(r->head + 8) : spdl__le32(r->head + 8);
    if (length > r->npz->desc.max_header_bytes)
        return spdl__zip_fail(&r->where, SPDL_E_LIMIT,
                              "a header of %lu bytes; max_header_bytes is %llu",
                              (unsigned long)length, (spdl__llu)r->npz->desc.max_header_bytes);
    return spdl__npz_need_head(r, *text + length);
}

/* Makes a reader that can be used for one member after the other. */
SPDL__PRIVATE void spdl__npz_init_reader(spdl__npz_reader *r, const spdl_npz *npz,
                                         spdl_error *error) {
    memset(r, 0, offsetof(spdl__npz_reader, small)); /* the rest is filled before it is used */
    r->npz = (spdl_npz *)SPDL__UNCONST(npz); /* for what is made once */
    r->where.zip = npz != NULL ? &npz->zip : NULL;
    r->where.error = error;
    r->window = r->local;
    r->room = r->ahead = sizeof(r->local);
}

SPDL__PRIVATE void spdl__npz_fini_reader(spdl__npz_reader *r) {
    if (r->npz == NULL) return;
    spdl__npz_end(r);
    spdl__npz_free_window(r);
}

/* Finds a member, and where its bytes begin. */
SPDL__PRIVATE spdl_result spdl__npz_locate(spdl__npz_reader *r, size_t index) {
    const spdl_npz *npz = r->npz;
    const uint8_t *local = NULL;
    spdl_result result;
    if (npz == NULL)
        return spdl__error_set(r->where.error, SPDL_E_INVALID, "spdl_npz: npz is NULL");
    spdl__npz_end(r);
    r->where.member = NULL;
    if (index >= npz->zip.count)
        return spdl__zip_fail(&r->where, SPDL_E_NOT_FOUND, "no array %llu; there are %llu",
                              (spdl__llu)index, (spdl__llu)npz->zip.count);
    r->where.member = r->member = &npz->zip.members[index];
    r->stored = r->member->method == SPDL__ZIP_STORED;
    if (npz->is_npy) return SPDL_OK;
    result = spdl__zip_check(&r->where, npz->desc.max_ratio);
    if (result == SPDL_OK)
        result = spdl__npz_fetch(
            r, r->member->offset,
            (size_t)spdl__min((uint64_t)SPDL__ZIP_LOCAL_BYTES + r->member->key_bytes,
                              r->member->limit - r->member->offset),
            &local);
    return result == SPDL_OK ? spdl__zip_check_local(&r->where, local, &r->payload) : result;
}

/* Reads the header of a member that was found; then its data are known to fit, and info says how
   they will be after desc.convert. */
SPDL__PRIVATE spdl_result spdl__npz_parse(spdl__npz_reader *r, spdl_npy_info *info) {
    spdl__npy_text t;
    size_t text = 0;
    spdl_result result = spdl__npz_read_head(r, &text);
    if (result != SPDL_OK) return result;
    if (!spdl__npy_read(&t, r->head + text, r->head_bytes - text, info))
        return spdl__zip_fail(&r->where, t.result, "%s", t.reason);
    info->version = r->head[6];
    info->header_bytes = r->head_bytes;
    if (info->bytes > r->member->usize - r->head_bytes)
        return spdl__zip_fail(
            &r->where, SPDL_E_FORMAT, "the shape needs %llu bytes, but %llu follow the header",
            (spdl__llu)info->bytes, (spdl__llu)(r->member->usize - r->head_bytes));
    if (info->bytes > r->npz->desc.max_bytes)
        return spdl__zip_fail(&r->where, SPDL_E_LIMIT,
                              "%llu bytes, more than max_bytes, which is %llu",
                              (spdl__llu)info->bytes, (spdl__llu)r->npz->desc.max_bytes);
    r->swap = t.foreign && (r->npz->desc.convert & SPDL_NPZ_NATIVE_BYTES) != 0;
    r->turn = info->fortran_order && (r->npz->desc.convert & SPDL_NPZ_C_ORDER) != 0;
    if (r->swap && info->structured)
        return spdl__zip_fail(&r->where, SPDL_E_UNSUPPORTED,
                              "structured, with fields in the other byte order, which "
                              "SPDL_NPZ_NATIVE_BYTES cannot change");
    if (r->swap) info->byte_order = spdl__npy_host_order();
    if (r->turn) info->fortran_order = false;
    r->turn = r->turn && info->ndim > 1;
    return SPDL_OK;
}

/* Finds a member and reads its header, and no more. Of a deflated one in a file only some bytes are
   read; a header that is not whole then is tried again with more of them. */
SPDL__PRIVATE spdl_result spdl__npz_start(spdl__npz_reader *r, size_t index, spdl_npy_info *info) {
    spdl_error *const error = r->where.error;
    spdl_error why;
    size_t bytes = SPDL__NPZ_WINDOW / 2;
    spdl_result result = spdl__npz_locate(r, index);
    if (result != SPDL_OK) return result;
    if (r->stored) return spdl__npz_parse(r, info);
    r->where.error = &why;
    for (;; bytes *= 64) {
        if (r->npz->zip.data != NULL || bytes > r->member->csize) bytes = (size_t)r->member->csize;
        result = spdl__npz_start_inflate(r, bytes);
        if (result == SPDL_OK) result = spdl__npz_parse(r, info);
        if (result != SPDL_E_FORMAT || bytes == r->member->csize) break;
    }
    r->where.error = error;
    if (result != SPDL_OK && error != NULL) *error = why;
    return result;
}

/* Compares a CRC with the directory's, and remembers what came of it. */
SPDL__PRIVATE spdl_result spdl__npz_check_crc(const spdl__npz_reader *r, uint32_t crc) {
    const bool good = crc == r->member->crc;
    spdl__store_relaxed32(&r->member->state,
                          (uint32_t)(good ? SPDL_NPZ_CRC_GOOD : SPDL_NPZ_CRC_BAD));
    if (good) return SPDL_OK;
    return spdl__zip_fail(&r->where, SPDL_E_CHECKSUM, "CRC-32 is %08lx, the directory says %08lx",
                          (unsigned long)crc, (unsigned long)r->member->crc);
}

/* Reads a stored member whose header is there: the data to memory, the rest only for its CRC. */
SPDL__PRIVATE spdl_result spdl__npz_read_stored(spdl__npz_reader *r) {
    const uint64_t end = r->payload + r->member->usize;
    uint64_t at = r->payload + r->head_bytes;
    const uint8_t *from = NULL;
    size_t piece;
    uint32_t crc = 0;
    spdl_result result;
    if (!r->verify)
        return r->want > 0 ? spdl__npz_copy_out(r, at, r->data, r->want) : SPDL_OK;
    result = spdl__npz_need_tables(r);
    if (result == SPDL_OK) crc = spdl__crc_add(&r->tables->crc, 0, r->head, r->head_bytes);
    for (; result == SPDL_OK && at < end; at += piece) {
        piece = (size_t)spdl__min(r->want > 0 ? r->want : end - at, SPDL__NPZ_PIECE);
        if (r->want > 0) {
            result = spdl__npz_copy_out(r, at, r->data, piece);
            from = r->data;
            r->data += piece;
            r->want -= piece;
        } else {
            result = spdl__npz_fetch(r, at, piece, &from);
        }
        if (result == SPDL_OK) crc = spdl__crc_add(&r->tables->crc, crc, from, piece);
    }
    return result == SPDL_OK ? spdl__npz_check_crc(r, crc) : result;
}

/* The header is read: whether the array fits the memory it is to be read to, and where its bytes go
   first. max_bytes bounds what is inflated after an array, too. */
SPDL__PRIVATE spdl_result spdl__npz_aim(spdl__npz_reader *r) {
    const spdl_npy_info *info = r->info;
    const uint64_t after = r->member->usize - r->head_bytes - info->bytes;
    spdl_result result;
    if (r->keep && info->bytes > r->to_bytes)
        return spdl__zip_fail(&r->where, SPDL_E_INVALID,
                              "the array has %llu bytes, the memory for it %llu",
                              (spdl__llu)info->bytes, (spdl__llu)r->to_bytes);
    if (r->keep && r->to == NULL && info->bytes > 0)
        return spdl__zip_fail(&r->where, SPDL_E_INVALID, "the memory for it is NULL");
    if (!r->stored && after > r->npz->desc.max_bytes)
        return spdl__zip_fail(&r->where, SPDL_E_LIMIT,
                              "%llu bytes follow the array, max_bytes is %llu", (spdl__llu)after,
                              (spdl__llu)r->npz->desc.max_bytes);
    r->data = (uint8_t *)r->to;
    r->want = r->keep ? (size_t)info->bytes : 0;
    if (!r->turn || r->want == 0) return SPDL_OK;
    result = spdl__zip_alloc(&r->where, &r->held, r->want, "changing its order");
    r->data = r->held;
    return result;
}

/* The array is there: its bytes get the order that is wanted. */
SPDL__PRIVATE void spdl__npz_convert(const spdl__npz_reader *r) {
    if (!r->keep) return;
    if (r->held != NULL) spdl__npy_to_c_order((uint8_t *)r->to, r->held, r->info);
    if (r->swap) spdl__npy_swap((uint8_t *)r->to, r->info->bytes, r->info);
}

#ifdef SPDL_INFLATE
/* Has all of the member made by the other decoder; what that refuses is left to the one here. */
SPDL__PRIVATE spdl_result spdl__npz_inflate_all(spdl__npz_reader *r) {
    const uint64_t usize = r->member->usize;
    uint8_t *all;
    spdl_result result = spdl__zip_alloc(&r->where, &all, usize, "inflating it");
    if (result != SPDL_OK) return result;
    if (!SPDL_INFLATE(all, (size_t)usize, r->inflate.in_begin, (size_t)r->member->csize)) {
        spdl__free(&r->npz->zip.allocator, all, (size_t)usize);
        return SPDL_OK;
    }
    spdl__free(&r->npz->zip.allocator, r->large, r->large_bytes);
    r->large = all;
    r->large_bytes = (size_t)usize;
    r->head = r->inflate.base = all;
    r->inflate.out = all + usize;
    r->inflate.mode = SPDL__INFLATE_DONE;
    return SPDL_OK;
}
#endif

/* The first run is over: reads the header, copies the data that were made with it, and directs the
   decoder to the caller's memory for the others. */
SPDL__PRIVATE spdl_result spdl__npz_open_data(spdl__npz_reader *r) {
    size_t have;
    spdl_result result = spdl__npz_parse(r, r->info);
    if (result == SPDL_OK) result = spdl__npz_aim(r);
#ifdef SPDL_INFLATE
    if (result == SPDL_OK) result = spdl__npz_inflate_all(r);
#endif
    if (result != SPDL_OK) return result;
    r->begun = true;
    have = (size_t)(r->inflate.out - r->inflate.base);
    if (r->verify) r->crc = spdl__crc_add(&r->tables->crc, 0, r->head, have);
    r->left = r->member->usize - have;
    have = (size_t)spdl__min(have - r->head_bytes, r->want);
    if (have > 0) memcpy(r->data, r->head + r->head_bytes, have);
    r->want -= have;
    r->piece = r->inflate.out;
    if (r->want == 0) return SPDL_OK;
    r->inflate.before = r->head;
    r->inflate.before_bytes = r->head_bytes;
    r->inflate.base = r->data;
    r->inflate.out = r->piece = r->data + have;
    r->inflate.slack = false;
    return SPDL_OK;
}

/* Directs the decoder to the window for what follows the array, of which only the CRC and the end
   are wanted. In front of it lies what a match may reach back to. */
SPDL__PRIVATE spdl_result spdl__npz_next_trailer(spdl__npz_reader *r) {
    const size_t window = SPDL__INFLATE_WINDOW;
    spdl__inflate *s = &r->inflate;
    const size_t here = (size_t)spdl__min((uint64_t)(s->out - s->base), window);
    const size_t earlier = (size_t)spdl__min(s->before_bytes, window - here);
    uint8_t *to;
    spdl_result result = SPDL_OK;
    if (r->trailer == NULL)
        result = spdl__zip_alloc(&r->where, &r->trailer, 2 * window, "what follows the array");
    if (result != SPDL_OK) return result;
    to = r->trailer + window - here;
    memmove(to, s->out - here, here);
    if (earlier > 0) memcpy(to - earlier, s->before + s->before_bytes - earlier, earlier);
    s->before_bytes = 0;
    s->base = to - earlier;
    s->out = r->trailer + window;
    s->slack = false;
    return SPDL_OK;
}

/* After a run of the decoder. PENDING: it is to run again, to its limit; otherwise the member is
   over, with this result. */
SPDL__PRIVATE spdl_result spdl__npz_ran(spdl__npz_reader *r, spdl__inflate_mode ended) {
    spdl__inflate *s = &r->inflate;
    size_t bytes;
    const bool bad = ended == SPDL__INFLATE_FAILED || s->out != s->limit;
    spdl_result result = SPDL_OK;
    if (!r->begun) {
        if (bad) /* what the header says comes first, and it may have run on after its input */
            result = spdl__npz_start_inflate(r, (size_t)r->member->csize);
        if (result == SPDL_OK) result = spdl__npz_open_data(r);
        if (result != SPDL_OK) return result;
    } else if (bad) {
        return spdl__npz_inflate_error(r, ended);
    } else {
        bytes = (size_t)(s->out - r->piece);
        if (r->verify) r->crc = spdl__crc_add(&r->tables->crc, r->crc, r->piece, bytes);
        r->left -= bytes;
    }
    if (r->left > 0) {
        bytes = (size_t)spdl__min(r->want, SPDL__NPZ_PIECE);
        r->want -= bytes;
        if (bytes == 0) {
            result = spdl__npz_next_trailer(r);
            bytes = (size_t)spdl__min(r->left, SPDL__INFLATE_WINDOW);
        }
        r->piece = s->out;
        s->limit = s->out + bytes;
        return result == SPDL_OK ? SPDL_PENDING : result;
    }
    ended = spdl__inflate_run(s, s->out); /* the stream ends where its last byte of output was */
    if (ended != SPDL__INFLATE_DONE) return spdl__npz_inflate_error(r, ended);
    if (r->verify) result = spdl__npz_check_crc(r, r->crc);
    if (result == SPDL_OK) spdl__npz_convert(r);
    return result;
}

/* Begins to read a member to memory. PENDING: the decoder is to run to its limit, and then
   spdl__npz_ran says how it goes on; otherwise the member is over, with this result. */
SPDL__PRIVATE spdl_result spdl__npz_begin(spdl__npz_reader *r, size_t index, spdl_npy_info *info,
                                          void *to, size_t to_bytes) {
    spdl_result result = spdl__npz_locate(r, index);
    if (result != SPDL_OK) return result;
    r->info = info;
    r->to = to;
    r->to_bytes = to_bytes;
    r->begun = false;
    r->verify = !r->keep ? !r->npz->is_npy : r->npz->desc.verify != SPDL_NPZ_VERIFY_NONE;
    if (!r->stored) {
        result = spdl__npz_start_inflate(r, (size_t)r->member->csize);
        if (result != SPDL_OK) return result;
#ifndef SPDL_INFLATE
        r->inflate.limit = r->small + spdl__min(r->member->usize, SPDL__NPZ_HEAD);
#endif
        return SPDL_PENDING;
    }
    result = spdl__npz_parse(r, info);
    if (result == SPDL_OK) result = spdl__npz_aim(r);
    if (result == SPDL_OK) result = spdl__npz_read_stored(r);
    if (result == SPDL_OK) spdl__npz_convert(r);
    return result;
}

SPDL__PRIVATE spdl_result spdl__npz_finish(spdl__npz_reader *r, spdl_result result) {
    while (result == SPDL_PENDING)
        result = spdl__npz_ran(r, spdl__inflate_run(&r->inflate, r->inflate.limit));
    return result;
}

/* The whole file as one mapping, made by the first call that needs it. */
SPDL__PRIVATE const uint8_t *spdl__npz_map(spdl_npz *npz) {
    uint64_t mapping = spdl__load(&npz->mapping), none = 0;
    const uint8_t *made;
    if (mapping != 0) return (const uint8_t *)(uintptr_t)mapping;
    made = spdl__os_file_map(npz->zip.file, npz->zip.size);
    if (made == NULL) return NULL;
    if (spdl__cas(&npz->mapping, &none, (uint64_t)(uintptr_t)made)) return made;
    spdl__os_file_unmap(made, npz->zip.size); /* another thread was faster */
    return (const uint8_t *)(uintptr_t)none;
}

/* Makes a .npy file look like an archive of one stored member; all else of that is zero. */
SPDL__PRIVATE void spdl__npz_open_npy(spdl_npz *npz) {
    npz->only.key = (const uint8_t *)"arr_0.npy";
    npz->only.key_bytes = 9;
    npz->only.name = "arr_0";
    npz->only.limit = npz->only.csize = npz->only.usize = npz->zip.size;
    npz->zip.members = &npz->only;
    npz->zip.by_name = &npz->only_order;
    npz->zip.count = 1;
    npz->is_npy = true;
    npz->desc.verify = SPDL_NPZ_VERIFY_NONE;
}

/* The desc that was given, or none, with its defaults. */
SPDL__PRIVATE spdl_npz_desc spdl__npz_defaults(const spdl_npz_desc *desc) {
    spdl_npz_desc full;
    memset(&full, 0, sizeof(full));
    if (desc != NULL) full = *desc;
    if (full.max_bytes == 0) full.max_bytes = (uint64_t)1 << 40;
    if (full.max_members == 0) full.max_members = (uint64_t)1 << 20;
    if (full.max_header_bytes == 0) full.max_header_bytes = SPDL__NPY_HEAD_BYTES;
    if (full.max_ratio == 0) full.max_ratio = 1032;
    return full;
}

/* Makes an archive that has no bytes yet, if there is all that its open function needs. */
SPDL__PRIVATE spdl_result spdl__npz_make(spdl_npz **npz, bool there, const char *name,
                                         const char *function, const spdl_npz_desc *desc) {
    const spdl_npz_desc full = spdl__npz_defaults(desc);
    spdl_npz *made;
    if (npz != NULL) *npz = NULL;
    if (npz == NULL || !there)
        return spdl__error_set(full.error, SPDL_E_INVALID, "%s: an argument is NULL", function);
    if (spdl__allocator_check(&full.allocator, "npz", full.error) != SPDL_OK) return SPDL_E_INVALID;
    made = *npz = (spdl_npz *)spdl__alloc_zeroed(&full.allocator, 1, sizeof(*made), 64);
    if (made == NULL)
        return spdl__error_set(full.error, SPDL_E_NOMEM, "%.200s: no memory for the archive", name);
    made->desc = full;
    made->zip.allocator = full.allocator;
    made->zip.file = SPDL__NO_FILE;
    spdl__zip_set_label(&made->zip, name);
    return SPDL_OK;
}

/* Gets the bytes of a small file, or the first of a large one, which say what it is, and reads the
   directory. `reason` says why there is no file. */
SPDL__PRIVATE spdl_result spdl__npz_read_start(spdl_npz *npz, const char *reason) {
    spdl__zip *zip = &npz->zip;
    const spdl__zip_where where = { zip, NULL, npz->desc.error };
    const size_t first = (size_t)spdl__min(zip->size, 6);
    uint8_t magic[6] = { 0 };
    size_t have;
    spdl_result result = SPDL_OK;
    if (reason != NULL) return spdl__zip_fail(&where, SPDL_E_IO, "%s", reason);
    if (zip->size == 0) return spdl__zip_fail(&where, SPDL_E_FORMAT, "empty, 0 bytes");
    if (zip->data == NULL && zip->size <= SPDL__NPZ_SMALL_FILE) {
        result = spdl__zip_alloc(&where, &npz->small, zip->size, "the file");
        if (result == SPDL_OK)
            result = spdl__zip_read(&where, npz->small, (size_t)zip->size, 0, &have);
        (void)spdl__os_file_close(zip->file);
        zip->file = SPDL__NO_FILE;
        zip->data = npz->small;
    } else if (zip->data == NULL) {
        result = spdl__zip_read(&where, magic, first, 0, &have);
    }
    if (result != SPDL_OK) return result;
    if (zip->data != NULL) memcpy(magic, zip->data, first);
    if (memcmp(magic, "\x93NUMPY", 6) != 0)
        return spdl__zip_open(zip, npz->desc.max_members, npz->desc.error);
    spdl__npz_open_npy(npz);
    return SPDL_OK;
}

/* Ends an open: with the archive, or with what is wrong. */
SPDL__PRIVATE spdl_result spdl__npz_opened(spdl_npz **npz, const char *reason) {
    spdl_result result = spdl__npz_read_start(*npz, reason);
    if (result == SPDL_OK) return SPDL_OK;
    spdl_npz_close(*npz);
    *npz = NULL;
    return result;
}

SPDL_API spdl_result spdl_npz_open_file(spdl_npz **npz, const char *path,
                                        const spdl_npz_desc *desc) {
    spdl_result result = spdl__npz_make(npz, path != NULL, path, "spdl_npz_open_file", desc);
    spdl__zip *zip;
    if (result != SPDL_OK) return result;
    zip = &(*npz)->zip;
    return spdl__npz_opened(npz, spdl__os_file_open(&zip->file, path, SPDL__OS_READ, &zip->size));
}

SPDL_API spdl_result spdl_npz_open_fd(spdl_npz **npz, int fd, const char *name,
                                      const spdl_npz_desc *desc) {
    spdl_result result =
        spdl__npz_make(npz, true, name != NULL ? name : "file", "spdl_npz_open_fd", desc);
    if (result != SPDL_OK) return result;
    return spdl__npz_opened(npz, spdl__os_file_duplicate(&(*npz)->zip.file, fd, &(*npz)->zip.size));
}

SPDL_API spdl_result spdl_npz_open_memory(spdl_npz **npz, const void *data, size_t bytes,
                                          const char *name, const spdl_npz_desc *desc) {
    spdl_result result = spdl__npz_make(npz, data != NULL || bytes == 0,
                                        name != NULL ? name : "memory", "spdl_npz_open_memory",
                                        desc);
    if (result != SPDL_OK) return result;
    (*npz)->zip.data = (const uint8_t *)data;
    (*npz)->zip.size = bytes;
    return spdl__npz_opened(npz, NULL);
}

SPDL_API void spdl_npz_close(spdl_npz *npz) {
    spdl_allocator allocator;
    if (npz == NULL) return;
    allocator = npz->zip.allocator;
    spdl__free(&allocator, (void *)(uintptr_t)npz->tables, sizeof(spdl__npz_tables));
    spdl__os_file_unmap((const uint8_t *)(uintptr_t)npz->mapping, npz->zip.size);
    (void)spdl__os_file_close(npz->zip.file);
    spdl__zip_close(&npz->zip);
    spdl__free(&allocator, npz->small, (size_t)npz->zip.size);
    spdl__free(&allocator, npz, sizeof(*npz));
}

SPDL_API size_t spdl_npz_count(const spdl_npz *npz) { return npz != NULL ? npz->zip.count : 0; }

SPDL_API const char *spdl_npz_name(const spdl_npz *npz, size_t index) {
    return index < spdl_npz_count(npz) ? npz->zip.members[index].name : NULL;
}

/* A name that fits as it is comes before one that lacks its ".npy". */
SPDL_API spdl_result spdl_npz_find(const spdl_npz *npz, const char *name, size_t *index) {
    size_t place;
    if (npz == NULL || name == NULL) return SPDL_E_NOT_FOUND;
    if (!spdl__zip_find(&npz->zip, name, "", &place) &&
        !spdl__zip_find(&npz->zip, name, ".npy", &place))
        return SPDL_E_NOT_FOUND;
    if (index != NULL) *index = npz->zip.by_name[place];
    return SPDL_OK;
}

SPDL_API spdl_result spdl_npz_stat(const spdl_npz *npz, size_t index, spdl_npz_member *member) {
    const spdl__zip_member *from;
    if (member == NULL || index >= spdl_npz_count(npz)) return SPDL_E_NOT_FOUND;
    from = &npz->zip.members[index];
    member->stored = from->method == SPDL__ZIP_STORED;
    member->bytes = from->usize;
    member->file_bytes = from->csize;
    member->file_offset = from->offset;
    member->crc = from->crc;
    member->crc_state = (spdl_npz_crc)spdl__load_relaxed32(&from->state);
    member->duplicates = from->hidden;
    return SPDL_OK;
}

SPDL_API spdl_result spdl_npz_info(const spdl_npz *npz, size_t index, spdl_npy_info *info,
                                   spdl_error *error) {
    spdl__npz_reader r;
    spdl_result result;
    if (info == NULL) return spdl__error_set(error, SPDL_E_INVALID, "spdl: npz: info is NULL");
    spdl__npz_init_reader(&r, npz, error);
    result = spdl__npz_start(&r, index, info);
    spdl__npz_fini_reader(&r);
    return result;
}

/* Reads a member to its end: to memory, or to verify it alone. */
SPDL__PRIVATE spdl_result spdl__npz_read(const spdl_npz *npz, size_t index, bool keep, void *data,
                                         size_t bytes, spdl_error *error) {
    spdl__npz_reader r;
    spdl_npy_info info;
    spdl_result result;
    spdl__npz_init_reader(&r, npz, error);
    r.keep = keep;
    result = spdl__npz_finish(&r, spdl__npz_begin(&r, index, &info, data, bytes));
    spdl__npz_fini_reader(&r);
    return result;
}

SPDL_API spdl_result spdl_npz_read(const spdl_npz *npz, size_t index, void *data, size_t bytes,
                                   spdl_error *error) {
    return spdl__npz_read(npz, index, true, data, bytes, error);
}

SPDL_API spdl_result spdl_npz_check(const spdl_npz *npz, size_t index, spdl_error *error) {
    return spdl__npz_read(npz, index, false, NULL, 0, error);
}

SPDL__PRIVATE spdl_result spdl__npz_copy_rows(spdl__npz_reader *r, const spdl_npy_info *info,
                                              uint64_t first, uint64_t count, uint8_t *data,
                                              size_t bytes) {
    const uint64_t rows = info->ndim > 0 ? info->shape[0] : 0;
    const uint64_t row = rows > 0 ? info->bytes / rows : 0;
    spdl_result result;
    if (!r->stored)
        return spdl__zip_fail(&r->where, SPDL_E_UNSUPPORTED, "deflated: it has no rows to pick");
    if ((info->fortran_order || r->turn) && info->ndim > 1)
        return spdl__zip_fail(&r->where, SPDL_E_UNSUPPORTED,
                              "in Fortran order: its rows are not together");
    if (info->ndim == 0 || first > rows || count > rows - first)
        return spdl__zip_fail(&r->where, SPDL_E_INVALID, "no %llu rows from row %llu; it has %llu",
                              (spdl__llu)count, (spdl__llu)first, (spdl__llu)rows);
    if (row * count == 0) return SPDL_OK;
    if (data == NULL || row * count > bytes)
        return spdl__zip_fail(&r->where, SPDL_E_INVALID,
                              "the rows have %llu bytes, the memory for them %llu",
                              (spdl__llu)(row * count), (spdl__llu)(data != NULL ? bytes : 0));
    result = spdl__npz_copy_out(r, r->payload + r->head_bytes + first * row, data,
                                (size_t)(row * count));
    if (result == SPDL_OK && r->swap) spdl__npy_swap(data, row * count, info);
    return result;
}

SPDL_API spdl_result spdl_npz_read_rows(const spdl_npz *npz, size_t index, uint64_t first,
                                        uint64_t count, void *data, size_t bytes,
                                        spdl_error *error) {
    spdl__npz_reader r;
    spdl_npy_info info;
    spdl_result result;
    spdl__npz_init_reader(&r, npz, error);
    result = spdl__npz_start(&r, index, &info);
    if (result == SPDL_OK)
        result = spdl__npz_copy_rows(&r, &info, first, count, (uint8_t *)data, bytes);
    spdl__npz_fini_reader(&r);
    return result;
}

SPDL__PRIVATE spdl_result spdl__npz_find_data(spdl__npz_reader *r, const uint8_t **data) {
    spdl_npz *npz = r->npz;
    const uint8_t *base = npz->zip.data;
    spdl_result result;
    if (!r->stored)
        return spdl__zip_fail(&r->where, SPDL_E_UNSUPPORTED,
                              "deflated: it has no bytes to look at; read it");
    if (r->swap || r->turn)
        return spdl__zip_fail(&r->where, SPDL_E_UNSUPPORTED,
                              "not in the order that convert asks for; read it");
    r->verify = npz->desc.verify == SPDL_NPZ_VERIFY_ALL;
    result = spdl__npz_read_stored(r);
    if (result != SPDL_OK) return result;
    if (base == NULL) base = spdl__npz_map(npz);
    if (base == NULL) return spdl__zip_fail(&r->where, SPDL_E_IO, "the file cannot be mapped");
    *data = base + r->payload + r->head_bytes;
    return SPDL_OK;
}

SPDL_API spdl_result spdl_npz_view(const spdl_npz *npz, size_t index, const void **data,
                                   bool *aligned, spdl_error *error) {
    const uint8_t *found = NULL;
    spdl__npz_reader r;
    spdl_npy_info info;
    spdl_result result;
    if (data == NULL) return spdl__error_set(error, SPDL_E_INVALID, "spdl: npz: data is NULL");
    spdl__npz_init_reader(&r, npz, error);
    result = spdl__npz_start(&r, index, &info);
    if (result == SPDL_OK) result = spdl__npz_find_data(&r, &found);
    spdl__npz_fini_reader(&r);
    if (result != SPDL_OK) return result;
    *data = found;
    if (aligned != NULL) *aligned = ((uintptr_t)found & 63) == 0;
    return SPDL_OK;
}

SPDL_API spdl_result spdl_npy_parse(const void *data, size_t bytes, spdl_npy_info *info,
                                    spdl_error *error) {
    spdl__npz_reader r; /* only what a stored member in memory needs */
    spdl_npz npz;
    memset(&npz, 0, sizeof(npz));
    if (data == NULL || info == NULL)
        return spdl__error_set(error, SPDL_E_INVALID, "spdl_npy_parse: an argument is NULL");
    npz.zip.data = (const uint8_t *)data;
    npz.zip.size = bytes;
    memcpy(npz.zip.label, "memory", 7);
    npz.desc = spdl__npz_defaults(NULL);
    npz.desc.max_bytes = UINT64_MAX;
    spdl__npz_open_npy(&npz);
    spdl__npz_init_reader(&r, &npz, error);
    return spdl__npz_start(&r, 0, info);
}

/* ============================================================================================= */
/* >>many-impl
   Many arrays at once, and whole files. The requests are handed out in groups, by one counter; the
   caller takes its share, so that it works without a pool, and on a worker of the pool itself. Each
   thread reads two members side by side. What the threads share is freed by the last of them, since
   a job may get its turn only when all is done: then it finds nothing to take, and must not look at
   requests or archive, which may be gone. */

#define SPDL__MANY_AHEAD 262144 /* bytes that are read from a file at once */
#define SPDL__MANY_GROUPS 16    /* for each thread */

typedef struct spdl__npz_many {
    /* Set by the caller, before any other thread sees it. */
    const spdl_npz *npz;
    spdl_npz_request *requests; /* each is written by the thread that took it */
    size_t count, group;
    spdl_allocator allocator;
    spdl__os_event done;

    /* All threads. */
    uint64_t next;  /* the first request that is not taken */
    uint64_t left;  /* not read yet, or by a thread that is still in the archive */
    uint64_t users; /* threads that may look at this: the last one frees it */

    /* A thread whose request failed, while it holds the lock. */
    uint32_t locked;
    size_t failed; /* the first request that did, and why */
    spdl_error error;
} spdl__npz_many;

/* Keeps the failure of the first of all requests. */
SPDL__PRIVATE void spdl__many_fail(spdl__npz_many *many, size_t which, const spdl_error *error) {
    spdl__spin_lock(&many->locked);
    if (which < many->failed) {
        many->failed = which;
        many->error = *error;
    }
    spdl__spin_unlock(&many->locked);
}

/* One of the members that a thread reads side by side. */
typedef struct spdl__many_lane {
    bool busy;
    size_t which; /* request */
    spdl_npy_info info;
    spdl_error error;
    spdl__npz_reader r;
} spdl__many_lane;

/* What a thread does: the requests it has taken but not begun, and its lanes. */
typedef struct spdl__many_share {
    spdl__npz_many *many;
    size_t first, end;
    size_t done;
    spdl__many_lane lane[SPDL__INFLATE_LANES];
} spdl__many_share;

SPDL__PRIVATE bool spdl__many_take(spdl__many_share *share) {
    spdl__npz_many *many = share->many;
    const uint64_t next = spdl__add(&many->next, many->group);
    if (next >= many->count) return false;
    share->first = (size_t)next;
    share->end = (size_t)spdl__min(next + many->group, many->count);
    return true;
}

/* A lane goes on with PENDING; any other result is that of its request. */
SPDL__PRIVATE void spdl__many_result(spdl__many_share *share, spdl__many_lane *lane,
                                     spdl_result result) {
    lane->busy = result == SPDL_PENDING;
    if (lane->busy) return;
    share->done++;
    share->many->requests[lane->which].result = result;
    if (result != SPDL_OK) spdl__many_fail(share->many, lane->which, &lane->error);
}

/* Begins with the next request. Streams with long matches are copies more than decoding, and a
   second one only takes the registers away: they are read alone. */
SPDL__PRIVATE void spdl__many_begin(spdl__many_share *share, spdl__many_lane *lane) {
    const spdl_npz_request *request = &share->many->requests[share->first];
    spdl_result result;
    lane->which = share->first++;
    result = spdl__npz_begin(&lane->r, request->index, &lane->info, request->data, request->bytes);
    if (result == SPDL_PENDING && lane->r.member->csize <= lane->r.member->usize / 10)
        result = spdl__npz_finish(&lane->r, result);
    spdl__many_result(share, lane, result);
}

/* Keeps the lanes busy until nothing is left to take. */
SPDL__PRIVATE void spdl__many_run(spdl__many_share *share) {
    spdl__inflate *states[SPDL__INFLATE_LANES];
    spdl__many_lane *lanes[SPDL__INFLATE_LANES], *lane;
    spdl__inflate_mode ended = SPDL__INFLATE_FULL;
    unsigned busy, i;
    for (;;) {
        for (busy = i = 0; i < SPDL__INFLATE_LANES; i++) {
            lane = &share->lane[i];
            while (!lane->busy && (share->first < share->end || spdl__many_take(share)))
                spdl__many_begin(share, lane);
            if (!lane->busy) continue;
            lanes[busy] = lane;
            states[busy++] = &lane->r.inflate;
        }
        if (busy == 0) return;
        i = spdl__inflate_run_lanes(states, busy, &ended);
        spdl__many_result(share, lanes[i], spdl__npz_ran(&lanes[i]->r, ended));
    }
}

SPDL__PRIVATE void spdl__many_work(spdl__npz_many *many) {
    spdl__many_share share;
    unsigned i;
    share.many = many;
    share.done = 0;
    if (!spdl__many_take(&share)) return;
    for (i = 0; i < SPDL__INFLATE_LANES; i++) {
        spdl__npz_init_reader(&share.lane[i].r, many->npz, &share.lane[i].error);
        share.lane[i].r.ahead = SPDL__MANY_AHEAD;
        share.lane[i].r.keep = true;
        share.lane[i].busy = false;
    }
    spdl__many_run(&share);
    for (i = 0; i < SPDL__INFLATE_LANES; i++) spdl__npz_fini_reader(&share.lane[i].r);
    /* Releases what was read to the caller, which may return when it sees 0. This thread is a user
       of `many` still. */
    if (spdl__sub(&many->left, share.done) == share.done && spdl__load(&many->users) > 1)
        spdl__os_event_wake(&many->done, 1);
}

SPDL__PRIVATE void spdl__many_leave(spdl__npz_many *many) {
    const spdl_allocator allocator = many->allocator;
    if (spdl__sub(&many->users, 1) != 1) return;
    spdl__os_event_fini(&many->done);
    spdl__free(&allocator, many, sizeof(*many));
}

SPDL__PRIVATE void spdl__many_job(void *arg, int worker, void *local) {
    (void)worker;
    (void)local;
    spdl__many_work((spdl__npz_many *)arg);
    spdl__many_leave((spdl__npz_many *)arg);
}

/* Asks workers of the pool to help: one less than there are, since the caller is one too. */
SPDL__PRIVATE void spdl__many_ask(spdl__npz_many *many, spdl_pool *pool) {
    uint64_t helpers = (uint64_t)spdl_pool_workers(pool), i;
    if (helpers > 1) helpers--;
    if (helpers > many->count - 1) helpers = many->count - 1;
    many->group = many->count / ((size_t)(helpers + 1) * SPDL__MANY_GROUPS) + 1;
    for (i = 0; i < helpers; i++) {
        spdl__add(&many->users, 1);
        if (spdl_pool_submit(pool, spdl__many_job, many, 0) == SPDL_OK) continue;
        spdl__sub(&many->users, 1); /* the queue is full: it goes without */
        return;
    }
}

SPDL__PRIVATE void spdl__many_wait(spdl__npz_many *many) {
    for (;;) {
        const uint32_t word = spdl__load32(&many->done.word);
        if (spdl__load(&many->left) == 0) return;
        (void)spdl__os_event_sleep(&many->done, word, SPDL__NEVER);
    }
}

SPDL_API spdl_result spdl_npz_read_many(const spdl_npz *npz, spdl_npz_request *requests,
                                        size_t count, spdl_pool *pool, spdl_error *error) {
    spdl__npz_many *many;
    spdl_result result = SPDL_OK;
    if (npz == NULL || (requests == NULL && count > 0))
        return spdl__error_set(error, SPDL_E_INVALID, "spdl_npz_read_many: an argument is NULL");
    if (count == 0) return SPDL_OK;
    many = (spdl__npz_many *)spdl__alloc_zeroed(&npz->zip.allocator, 1, sizeof(*many), 64);
    if (many == NULL || !spdl__os_event_init(&many->done)) {
        spdl__free(&npz->zip.allocator, many, sizeof(*many));
        return spdl__error_set(error, SPDL_E_NOMEM, "%s: no memory for reading many",
                               npz->zip.label);
    }
    many->npz = npz;
    many->allocator = npz->zip.allocator;
    many->requests = requests;
    many->count = many->group = many->failed = count;
    many->left = count;
    many->users = 1;
    if (pool != NULL && count > 1) spdl__many_ask(many, pool);
    spdl__many_work(many);
    spdl__many_wait(many);
    if (many->failed < count) { /* no thread writes it any more: all is over */
        result = many->error.result;
        if (error != NULL) *error = many->error;
    }
    spdl__many_leave(many);
    return result;
}

/* Reads all headers; *bytes, first those of the bundle, becomes what the whole will take: the
   arrays, their names, and the data, each at a multiple of 64. */
SPDL__PRIVATE spdl_result spdl__bundle_heads(const spdl_npz *npz, spdl_npz_array *arrays,
                                             uint64_t *bytes, spdl_error *error) {
    uint64_t data = 0, one;
    size_t i;
    spdl__npz_reader r; /* one for all: its window holds several small members */
    spdl_result result = SPDL_OK;
    for (i = 0; i < npz->zip.count; i++) *bytes += strlen(npz->zip.members[i].name) + 1;
    *bytes = (*bytes + 63) & ~(uint64_t)63;
    spdl__npz_init_reader(&r, npz, error);
    for (i = 0; result == SPDL_OK && i < npz->zip.count; i++) {
        result = spdl__npz_start(&r, i, &arrays[i].info);
        if (result != SPDL_OK) break;
        one = arrays[i].info.bytes;
        r.where.member = NULL;
        if (one > npz->desc.max_bytes - data || one > SIZE_MAX / 2 - *bytes)
            result = spdl__zip_fail(&r.where, SPDL_E_LIMIT,
                                    "its arrays are larger than max_bytes, which is %llu",
                                    (spdl__llu)npz->desc.max_bytes);
        data += one;
        *bytes += (one + 63) & ~(uint64_t)63;
    }
    spdl__npz_fini_reader(&r);
    return result;
}

SPDL__PRIVATE void spdl__bundle_place(const spdl_npz *npz, spdl_npz_bundle *bundle,
                                      spdl_npz_request *requests) {
    char *at = (char *)(bundle->arrays + bundle->count);
    size_t i, bytes;
    for (i = 0; i < bundle->count; i++) {
        bytes = strlen(npz->zip.members[i].name) + 1;
        memcpy(at, npz->zip.members[i].name, bytes);
        bundle->arrays[i].name = at;
        at += bytes;
    }
    at = (char *)bundle + (((size_t)(at - (char *)bundle) + 63) & ~(size_t)63);
    for (i = 0; i < bundle->count; i++) {
        requests[i].index = i;
        requests[i].data = bundle->arrays[i].data = at;
        requests[i].bytes = (size_t)bundle->arrays[i].info.bytes;
        at += (requests[i].bytes + 63) & ~(size_t)63;
    }
}

/* Makes *bundle, which on failure may be there as well, from what the headers say: they and the
   requests lie in `heads` until then. */
SPDL__PRIVATE spdl_result spdl__bundle_fill(const spdl_npz *npz, spdl_npz_bundle **bundle,
                                            spdl_error *error) {
    const spdl__zip_where where = { &npz->zip, NULL, error };
    const size_t count = npz->zip.count, each = sizeof(spdl_npz_array) + sizeof(spdl_npz_request);
    uint64_t bytes = sizeof(**bundle) + (uint64_t)count * sizeof(spdl_npz_array);
    uint8_t *heads, *whole;
    spdl_npz_request *requests;
    spdl_result result =
        spdl__zip_alloc(&where, &heads, (uint64_t)(count + 1) * each, "its headers");
    if (result != SPDL_OK) return result;
    requests = (spdl_npz_request *)(void *)(heads + count * sizeof(spdl_npz_array));
    result = spdl__bundle_heads(npz, (spdl_npz_array *)(void *)heads, &bytes, error);
    if (result == SPDL_OK) result = spdl__zip_alloc(&where, &whole, bytes, "its arrays");
    if (result == SPDL_OK) {
        *bundle = (spdl_npz_bundle *)(void *)whole;
        (*bundle)->arrays = (spdl_npz_array *)(void *)(*bundle + 1);
        (*bundle)->count = count;
        (*bundle)->bytes = (size_t)bytes;
        (*bundle)->allocator = npz->zip.allocator;
        memcpy((*bundle)->arrays, heads, count * sizeof(spdl_npz_array));
        spdl__bundle_place(npz, *bundle, requests);
        result = spdl_npz_read_many(npz, requests, count, NULL, error);
    }
    spdl__free(&npz->zip.allocator, heads, (count + 1) * each);
    return result;
}

SPDL_API spdl_result spdl_npz_load(spdl_npz_bundle **bundle, const char *path,
                                   const spdl_npz_desc *desc) {
    spdl_npz *npz = NULL;
    spdl_result result;
    if (bundle == NULL)
        return spdl__error_set(desc != NULL ? desc->error : NULL, SPDL_E_INVALID,
                               "spdl_npz_load: an argument is NULL");
    *bundle = NULL;
    result = spdl_npz_open_file(&npz, path, desc);
    if (result != SPDL_OK) return result;
    result = spdl__bundle_fill(npz, bundle, desc != NULL ? desc->error : NULL);
    spdl_npz_close(npz);
    if (result == SPDL_OK) return SPDL_OK;
    spdl_npz_bundle_free(*bundle);
    *bundle = NULL;
    return result;
}

SPDL_API spdl_npz_array *spdl_npz_bundle_find(const spdl_npz_bundle *bundle, const char *name) {
    const char *at;
    size_t i;
    if (bundle == NULL || name == NULL) return NULL;
    for (i = 0; i < bundle->count; i++)
        if (strcmp(bundle->arrays[i].name, name) == 0) return &bundle->arrays[i];
    for (i = 0; i < bundle->count; i++) {
        at = bundle->arrays[i].name;
        if (strncmp(at, name, strlen(at)) == 0 && strcmp(name + strlen(at), ".npy") == 0)
            return &bundle->arrays[i];
    }
    return NULL;
}

SPDL_API void spdl_npz_bundle_free(void *bundle) {
    spdl_npz_bundle *freed = (spdl_npz_bundle *)bundle;
    spdl_allocator allocator;
    if (freed == NULL) return;
    allocator = freed->allocator;
    spdl__free(&allocator, freed, freed->bytes);
}

SPDL__PRIVATE spdl_result spdl__npz_stage(spdl_task *task, void *in, void **out) {
    spdl_npz_desc desc = spdl__npz_defaults((const spdl_npz_desc *)spdl_ctx(task));
    spdl_npz_bundle *bundle = NULL;
    spdl_error error;
    spdl_result result;
    desc.error = &error;
    result = spdl_npz_load(&bundle, (const char *)in, &desc);
    *out = bundle;
    if (result == SPDL_OK) return SPDL_OK;
    spdl_fail(task, "%s", error.text);
    return result;
}

#if defined(SPDL_STATIC) && defined(__cplusplus)
namespace {
SPDL__UNUSED const spdl_function spdl_npz_load_spdl = { spdl__npz_stage, "spdl_npz_load", "char",
                                                        "spdl_npz_bundle" };
}
#else
#if defined(SPDL_STATIC)
SPDL__UNUSED static
#endif
const spdl_function spdl_npz_load_spdl = { spdl__npz_stage, "spdl_npz_load", "char",
                                           "spdl_npz_bundle" };
#endif

/* ============================================================================================= */
/* >>write-impl
   Writing .npz and .npy. One thread at a time has the writer, which owns an open file beside its
   target until finish gives it that name. Sizes are known before the data, so a local header is
   written with the array's header, before the data; only the CRC is put in after them. ZIP64 fields
   are there only where a number needs them. Data are aligned by an extra field of padding, of the
   form that zipalign made known (id 0xd935: two bytes of alignment, then zeros).
   What was written is kept as the members of a zip, whose order by name shows whether a name was
   there. Names that come in this order, as arr_0 to arr_10 do, are appended; any other moves 4
   bytes for each name after it: for 100,000 arrays of 1 KB in no order two fifths of the time. */

#define SPDL__WRITE_DATE 0x00210000u /* the first of January 1980, as NumPy has it */
#define SPDL__WRITE_LOCAL 98368      /* holds a local header with any name, alignment and sizes */
#define SPDL__WRITE_HEAD 8192        /* holds an array's header, which takes 2 KB at most */
#define SPDL__WRITE_BYTES (SPDL__WRITE_LOCAL + SPDL__WRITE_HEAD)

struct spdl_npz_writer {
    /* Written by create. */
    spdl_npz_write_desc desc;
    spdl__os_file file;
    uint8_t *scratch; /* SPDL__WRITE_BYTES, which each call fills anew, and both paths */
    size_t block_bytes;
    char *path, *temporary;
    spdl__crc crc;
    /* Written by the other calls. */
    spdl_error *error; /* of the call that is running */
    spdl__zip zip;     /* label, members and by_name; each key is an allocation */
    size_t room;       /* for members */
    uint64_t at;       /* where the next byte goes */
    bool open;         /* an array was begun and lacks `left` bytes */
    bool failed, finished;
    uint64_t left;
};

/* Records why. When a file or the memory ended, nothing more can be written. */
SPDL__COLD spdl_result spdl__write_fail(spdl_npz_writer *w, spdl_result result, const char *name,
                                        const char *reason) {
    spdl__zip_member member;
    const spdl__zip_where where = { &w->zip, name != NULL ? &member : NULL, w->error };
    member.name = name;
    if (result == SPDL_E_IO || result == SPDL_E_NOMEM) w->failed = true;
    return spdl__zip_fail(&where, result, "%s", reason);
}

SPDL__COLD spdl_result spdl__write_bytes(spdl_npz_writer *w, const void *from, size_t bytes) {
    const char *reason = spdl__os_file_write(w->file, from, bytes, w->at);
    if (reason != NULL) return spdl__write_fail(w, SPDL_E_IO, NULL, reason);
    w->at += bytes;
    return SPDL_OK;
}

SPDL__COLD uint8_t *spdl__put16(uint8_t *to, uint64_t value) {
    to[0] = (uint8_t)value;
    to[1] = (uint8_t)(value >> 8);
    return to + 2;
}

SPDL__COLD uint8_t *spdl__put32(uint8_t *to, uint64_t value) {
    return spdl__put16(spdl__put16(to, value), value >> 16);
}

SPDL__COLD uint8_t *spdl__put64(uint8_t *to, uint64_t value) {
    return spdl__put32(spdl__put32(to, value), value >> 32);
}

SPDL__COLD bool spdl__write_is_ascii(const void *text, size_t bytes) {
    const uint8_t *at = (const uint8_t *)text;
    for (; bytes > 0; bytes--, at++)
        if (*at >= 128) return false;
    return true;
}

/* The fields that a local header and a directory entry have in common, from "version needed" to
   the length of the name. */
SPDL__COLD uint8_t *spdl__write_common(uint8_t *to, const spdl__zip_member *m) {
    const bool wide = m->usize >= 0xffffffffu || m->offset >= 0xffffffffu;
    to = spdl__put16(to, wide ? 45 : 20);
    to = spdl__put16(to, spdl__write_is_ascii(m->key, m->key_bytes) ? 0 : 0x0800); /* UTF-8 */
    to = spdl__put16(to, SPDL__ZIP_STORED);
    to = spdl__put32(to, SPDL__WRITE_DATE);
    to = spdl__put32(to, m->crc);
    to = spdl__put32(to, spdl__min(m->usize, 0xffffffffu));
    to = spdl__put32(to, spdl__min(m->usize, 0xffffffffu));
    return spdl__put16(to, m->key_bytes);
}

/* Makes the local header end where the array's header begins; padding brings the data to a multiple
   of the alignment. Returns its length. */
SPDL__COLD size_t spdl__write_local(const spdl_npz_writer *w, const spdl__zip_member *m,
                                    size_t head_bytes) {
    const bool wide = m->usize >= 0xffffffffu;
    const size_t align = w->desc.align, extra = (wide ? 20 : 0) + 6;
    const size_t least = SPDL__ZIP_LOCAL_BYTES + (size_t)m->key_bytes + extra;
    const size_t pad = (size_t)((align - (m->offset + least + head_bytes) % align) % align);
    uint8_t *at = spdl__put32(w->scratch + SPDL__WRITE_LOCAL - least - pad, 0x04034b50);
    at = spdl__put16(spdl__write_common(at, m), extra + pad);
    memcpy(at, m->key, m->key_bytes);
    at += m->key_bytes;
    if (wide) at = spdl__put64(spdl__put64(spdl__put32(at, 16 << 16 | 1), m->usize), m->usize);
    at = spdl__put16(spdl__put16(spdl__put16(at, 0xd935), 2 + pad), align);
    memset(at, 0, pad);
    return least + pad;
}

SPDL__COLD size_t spdl__write_central(uint8_t *to, const spdl__zip_member *m) {
    const uint64_t all[3] = { m->usize, m->usize, m->offset };
    uint8_t *at = spdl__put16(spdl__put32(to, 0x02014b50), 45);
    size_t i, wide = 0;
    for (i = 0; i < 3; i++) wide += all[i] >= 0xffffffffu;
    at = spdl__put16(spdl__write_common(at, m), wide > 0 ? 4 + 8 * wide : 0);
    memset(at, 0, 10); /* comment, disk, attributes */
    at = spdl__put32(at + 10, spdl__min(m->offset, 0xffffffffu));
    memcpy(at, m->key, m->key_bytes);
    at += m->key_bytes;
    if (wide > 0) at = spdl__put16(spdl__put16(at, 1), 8 * wide);
    for (i = 0; i < 3; i++)
        if (all[i] >= 0xffffffffu) at = spdl__put64(at, all[i]);
    return (size_t)(at - to);
}

SPDL__COLD bool spdl__write_grow(spdl_npz_writer *w) {
    const size_t room = w->room > 0 ? 2 * w->room : 64;
    const size_t bytes = room * (sizeof(spdl__zip_member) + sizeof(uint32_t));
    spdl__zip_member *members;
    uint32_t *by_name;
    if (w->zip.count < w->room) return true;
    members = (spdl__zip_member *)spdl__alloc_zeroed(&w->zip.allocator, 1, bytes, 64);
    if (members == NULL) return false;
    by_name = (uint32_t *)(void *)(members + room);
    if (w->room > 0) {
        memcpy(members, w->zip.members, w->room * sizeof(*members));
        memcpy(by_name, w->zip.by_name, w->room * sizeof(*by_name));
    }
    spdl__free(&w->zip.allocator, w->zip.members, w->zip.block_bytes);
    w->zip.members = members;
    w->zip.block_bytes = bytes;
    w->zip.by_name = by_name;
    w->room = room;
    return true;
}

/* Adds a member of this name, whose key has ".npy" after it. */
SPDL__COLD spdl_result spdl__write_name(spdl_npz_writer *w, const char *name) {
    const size_t bytes = strlen(name), count = w->zip.count;
    uint8_t *key;
    size_t place;
    if (bytes > 65535 - 4 || count >= 0x7fffffff)
        return spdl__write_fail(w, SPDL_E_LIMIT, NULL, "a name too long, or one too many");
    if (spdl__zip_find(&w->zip, name, ".npy", &place))
        return spdl__write_fail(w, SPDL_E_INVALID, name, "there is one of this name");
    key = spdl__write_grow(w) ? (uint8_t *)spdl__alloc(&w->zip.allocator, bytes + 4, 1) : NULL;
    if (key == NULL)
        return spdl__write_fail(w, SPDL_E_NOMEM, name, "no memory for the directory");
    memcpy(key, name, bytes);
    memcpy(key + bytes, ".npy", 4);
    w->zip.members[count].key = key;
    w->zip.members[count].key_bytes = (uint16_t)(bytes + 4);
    memmove(&w->zip.by_name[place + 1], &w->zip.by_name[place], (count - place) * sizeof(uint32_t));
    w->zip.by_name[place] = (uint32_t)count;
    w->zip.count++;
    return SPDL_OK;
}

/* The dictionary of a header; its type is that of descr, or if that is empty of kind, itemsize and
   order. */
SPDL__COLD size_t spdl__write_dictionary(const spdl_npy_info *info, char *to, size_t room) {
    const char *quote = info->descr[0] == '[' ? "" : "'", *comma = "";
    const uint64_t number = info->kind == 'U' ? info->itemsize / 4 : info->itemsize;
    char order = info->byte_order;
    size_t used;
    int i;
    if (order != '<' && order != '>') order = spdl__npy_host_order();
    if (!spdl__npy_is_ordered(info->kind, info->itemsize)) order = '|';
    if (info->descr[0] != 0)
        used = (size_t)snprintf(to, room, "{'descr': %s%.255s%s", quote, info->descr, quote);
    else
        used = (size_t)snprintf(to, room, "{'descr': '%c%c%llu'", order, info->kind,
                                (spdl__llu)number);
    used += (size_t)snprintf(to + used, room - used, ", 'fortran_order': %s, 'shape': (",
                             info->fortran_order ? "True" : "False");
    for (i = 0; i < info->ndim; i++, comma = ", ")
        used += (size_t)snprintf(to + used, room - used, "%s%llu", comma,
                                 (spdl__llu)info->shape[i]);
    return used + (size_t)snprintf(to + used, room - used, info->ndim == 1 ? ",), }" : "), }");
}

/* Makes a whole header in the scratch, and reads it back to see whether it is one: what is wrong
   with info is then wrong with the text. */
SPDL__COLD spdl_result spdl__write_header(spdl_npz_writer *w, const char *name,
                                          const spdl_npy_info *info, spdl_npy_info *real) {
    uint8_t *const head = w->scratch + SPDL__WRITE_LOCAL;
    size_t start = 10, total, used;
    spdl__npy_text t;
    if (info->ndim < 0 || info->ndim > SPDL_NPY_MAX_DIMS ||
        memchr(info->descr, 0, sizeof(info->descr)) == NULL)
        return spdl__write_fail(w, SPDL_E_INVALID, name, "ndim or descr is not valid");
    used = spdl__write_dictionary(info, (char *)head + start, SPDL__WRITE_HEAD - 128);
    if (!spdl__npy_read(&t, head + start, used, real))
        return spdl__write_fail(
            w, t.result == SPDL_E_UNSUPPORTED ? t.result : SPDL_E_INVALID, name,
            info->descr[sizeof(info->descr) - 2] != 0 ? "its descr is cut off" : t.reason);
    real->version = 1;
    if (!spdl__write_is_ascii(head + start, used)) { /* UTF-8 in names of fields */
        real->version = 3;
        memmove(head + 12, head + start, used);
        start = 12;
    }
    total = (start + used + 1 + 63) & ~(size_t)63; /* as NumPy, whatever the align */
    memset(head + start + used, ' ', total - start - used - 1);
    head[total - 1] = '\n';
    memcpy(head, "\x93NUMPY", 6);
    head[6] = (uint8_t)real->version;
    head[7] = 0;
    if (start == 10) spdl__put16(head + 8, total - start);
    else spdl__put32(head + 8, total - start);
    real->header_bytes = total;
    return SPDL_OK;
}

/* Ends the array that is being written, if it has all its data, and looks whether another may
   follow. */
SPDL__COLD spdl_result spdl__write_ready(spdl_npz_writer *w, const char *name, spdl_error *error) {
    const spdl__zip_member *last;
    const char *reason = NULL;
    uint8_t crc[4];
    w->error = error;
    if (w->failed || w->finished)
        return spdl__write_fail(w, SPDL_E_INVALID, NULL,
                                w->failed ? "the writer has failed before"
                                          : "the writer has finished");
    if (w->open && w->left > 0)
        return spdl__write_fail(w, SPDL_E_INVALID, NULL, "the last array lacks data");
    if (name != NULL && w->desc.npy && w->zip.count > 0)
        return spdl__write_fail(w, SPDL_E_INVALID, name, "a .npy file holds one array");
    if (w->open && !w->desc.npy) {
        last = &w->zip.members[w->zip.count - 1];
        spdl__put32(crc, last->crc);
        reason = spdl__os_file_write(w->file, crc, 4, last->offset + 14);
    }
    w->open = false;
    return reason == NULL ? SPDL_OK : spdl__write_fail(w, SPDL_E_IO, NULL, reason);
}

SPDL_API spdl_result spdl_npz_begin(spdl_npz_writer *writer, const char *name,
                                    const spdl_npy_info *info, spdl_error *error) {
    spdl__zip_member *member;
    size_t head_bytes, local_bytes = 0;
    spdl_npy_info real;
    uint8_t *head;
    spdl_result result;
    if (writer == NULL || name == NULL || info == NULL)
        return spdl__error_set(error, SPDL_E_INVALID, "spdl_npz_begin: an argument is NULL");
    result = spdl__write_ready(writer, name, error);
    if (result == SPDL_OK) result = spdl__write_header(writer, name, info, &real);
    if (result == SPDL_OK) result = spdl__write_name(writer, name);
    if (result != SPDL_OK) return result;
    head = writer->scratch + SPDL__WRITE_LOCAL;
    head_bytes = (size_t)real.header_bytes;
    member = &writer->zip.members[writer->zip.count - 1];
    member->offset = writer->at;
    member->usize = head_bytes + real.bytes;
    member->crc = spdl__crc_add(&writer->crc, 0, head, head_bytes);
    if (!writer->desc.npy) local_bytes = spdl__write_local(writer, member, head_bytes);
    writer->open = true;
    writer->left = real.bytes;
    return spdl__write_bytes(writer, head - local_bytes, local_bytes + head_bytes);
}

SPDL_API spdl_result spdl_npz_append(spdl_npz_writer *writer, const void *data, size_t bytes,
                                     spdl_error *error) {
    const uint8_t *from = (const uint8_t *)data;
    spdl__zip_member *member;
    spdl_result result = SPDL_OK;
    size_t piece;
    if (writer == NULL || (data == NULL && bytes > 0))
        return spdl__error_set(error, SPDL_E_INVALID, "spdl_npz_append: an argument is NULL");
    writer->error = error;
    if (writer->failed || !writer->open || bytes > writer->left)
        return spdl__write_fail(writer, SPDL_E_INVALID, NULL,
                                "more data than the shape says, or no array begun");
    member = &writer->zip.members[writer->zip.count - 1];
    for (; bytes > 0 && result == SPDL_OK; bytes -= piece, from += piece) {
        piece = (size_t)spdl__min(bytes, SPDL__NPZ_PIECE);
        member->crc = spdl__crc_add(&writer->crc, member->crc, from, piece);
        result = spdl__write_bytes(writer, from, piece);
        writer->left -= piece;
    }
    return result;
}

SPDL_API spdl_result spdl_npz_write(spdl_npz_writer *writer, const char *name,
                                    const spdl_npy_info *info, const void *data,
                                    spdl_error *error) {
    spdl_result result;
    if (writer == NULL || name == NULL || info == NULL)
        return spdl__error_set(error, SPDL_E_INVALID, "spdl_npz_write: an argument is NULL");
    result = spdl_npz_begin(writer, name, info, error);
    if (result != SPDL_OK) return result;
    if (data == NULL && writer->left > 0)
        return spdl__write_fail(writer, SPDL_E_INVALID, name, "its data is NULL");
    return spdl_npz_append(writer, data, (size_t)writer->left, error);
}

/* The directory, entry by entry, through the scratch. */
SPDL__COLD spdl_result spdl__write_directory(spdl_npz_writer *w) {
    size_t i, used = 0;
    spdl_result result = SPDL_OK;
    for (i = 0; i < w->zip.count && result == SPDL_OK; i++) {
        if (used + SPDL__ZIP_ENTRY_BYTES + w->zip.members[i].key_bytes + 28 > SPDL__WRITE_BYTES) {
            result = spdl__write_bytes(w, w->scratch, used);
            used = 0;
        }
        used += spdl__write_central(w->scratch + used, &w->zip.members[i]);
    }
    return result == SPDL_OK ? spdl__write_bytes(w, w->scratch, used) : result;
}

/* The end records, with ZIP64 ones where a number needs them. */
SPDL__COLD spdl_result spdl__write_end(spdl_npz_writer *w, uint64_t start) {
    const uint64_t bytes = w->at - start, end = w->at, count = w->zip.count;
    const bool wide = count >= 0xffff || bytes >= 0xffffffffu || start >= 0xffffffffu;
    uint8_t *at = w->scratch;
    if (wide) {
        at = spdl__put64(spdl__put32(at, 0x06064b50), SPDL__ZIP_END64_BYTES - 12);
        at = spdl__put64(spdl__put16(spdl__put16(at, 45), 45), 0);
        at = spdl__put64(spdl__put64(at, count), count);
        at = spdl__put64(spdl__put64(at, bytes), start);
        at = spdl__put64(spdl__put32(spdl__put32(at, 0x07064b50), 0), end);
        at = spdl__put32(at, 1);
    }
    at = spdl__put32(spdl__put32(at, 0x06054b50), 0);
    at = spdl__put16(at, spdl__min(count, 0xffff));
    at = spdl__put16(at, spdl__min(count, 0xffff));
    at = spdl__put32(at, spdl__min(bytes, 0xffffffffu));
    at = spdl__put16(spdl__put32(at, spdl__min(start, 0xffffffffu)), 0);
    return spdl__write_bytes(w, w->scratch, (size_t)(at - w->scratch));
}

SPDL_API spdl_result spdl_npz_finish(spdl_npz_writer *writer, spdl_error *error) {
    const char *reason = NULL;
    spdl_result result;
    uint64_t start;
    if (writer == NULL)
        return spdl__error_set(error, SPDL_E_INVALID, "spdl_npz_finish: writer is NULL");
    result = spdl__write_ready(writer, NULL, error);
    if (result != SPDL_OK) return result;
    if (writer->desc.npy && writer->zip.count == 0)
        return spdl__write_fail(writer, SPDL_E_INVALID, NULL, "no array was written");
    start = writer->at;
    if (!writer->desc.npy) {
        result = spdl__write_directory(writer);
        if (result == SPDL_OK) result = spdl__write_end(writer, start);
        if (result != SPDL_OK) return result;
    }
    reason = spdl__os_file_commit(writer->file, writer->temporary, writer->path,
                                  writer->desc.sync);
    if (reason != NULL) return spdl__write_fail(writer, SPDL_E_IO, NULL, reason);
    writer->finished = true;
    return SPDL_OK;
}

SPDL_API void spdl_npz_writer_close(spdl_npz_writer *writer) {
    spdl_allocator allocator;
    spdl__zip *zip;
    size_t i;
    if (writer == NULL) return;
    allocator = writer->desc.allocator;
    zip = &writer->zip;
    (void)spdl__os_file_close(writer->file);
    if (writer->file != SPDL__NO_FILE && !writer->finished) (void)remove(writer->temporary);
    for (i = 0; i < zip->count; i++)
        spdl__free(&allocator, SPDL__UNCONST(zip->members[i].key), zip->members[i].key_bytes);
    spdl__zip_close(zip);
    spdl__free(&allocator, writer->scratch, writer->block_bytes);
    spdl__free(&allocator, writer, sizeof(*writer));
}

/* Allocates, and makes a file beside the target that no other writer has. */
SPDL__COLD spdl_result spdl__write_open(spdl_npz_writer *w, const char *path) {
    const spdl__zip_where where = { &w->zip, NULL, w->error };
    const size_t length = strlen(path);
    const char *reason = spdl__os_in_use;
    int tries;
    w->block_bytes = SPDL__WRITE_BYTES + 2 * length + 32;
    if (spdl__zip_alloc(&where, &w->scratch, w->block_bytes, "the writer") != SPDL_OK)
        return SPDL_E_NOMEM;
    w->path = (char *)w->scratch + SPDL__WRITE_BYTES;
    w->temporary = w->path + length + 1;
    memcpy(w->path, path, length + 1);
    spdl__crc_init(&w->crc);
    for (tries = 0; reason == spdl__os_in_use && tries < 100; tries++) {
        const uint64_t chance =
            spdl__os_process_id(NULL) << 32 ^ spdl_time_ns() * 0x9e3779b97f4a7c15u;
        snprintf(w->temporary, length + 31, "%s.%016llx.tmp", path,
                 (spdl__llu)chance);
        reason = spdl__os_file_open(&w->file, w->temporary, SPDL__OS_NEW, NULL);
    }
    return reason == NULL ? SPDL_OK : spdl__write_fail(w, SPDL_E_IO, NULL, reason);
}

SPDL_API spdl_result spdl_npz_create(spdl_npz_writer **writer, const char *path,
                                     const spdl_npz_write_desc *desc) {
    spdl_npz_write_desc full;
    spdl_npz_writer *w;
    spdl_result result;
    memset(&full, 0, sizeof(full));
    if (desc != NULL) full = *desc;
    if (full.align == 0) full.align = 64;
    if (writer != NULL) *writer = NULL;
    if (writer == NULL || path == NULL || (full.align & (full.align - 1)) != 0 ||
        full.align > 32768)
        return spdl__error_set(full.error, SPDL_E_INVALID,
                               "spdl_npz_create: an argument is NULL, or align no power of two up "
                               "to 32768");
    if (spdl__allocator_check(&full.allocator, "npz writer", full.error) != SPDL_OK)
        return SPDL_E_INVALID;
    w = (spdl_npz_writer *)spdl__alloc_zeroed(&full.allocator, 1, sizeof(*w), 64);
    if (w == NULL)
        return spdl__error_set(full.error, SPDL_E_NOMEM, "%.200s: no memory for the writer", path);
    w->desc = full;
    w->error = full.error;
    w->file = SPDL__NO_FILE;
    w->zip.allocator = full.allocator;
    spdl__zip_set_label(&w->zip, path);
    result = spdl__write_open(w, path);
    if (result == SPDL_OK) *writer = w;
    else spdl_npz_writer_close(w);
    return result;
}

#endif /* SPDL_NO_NPZ */

/* ============================================================================================= */
/* >>trace-impl
   The hooks, and the file. Hooks run where the pipeline calls them. The file is claimed when the
   pipeline is created: it gets an empty trace, and is held for as long as the pipeline lives. The
   writer runs in destroy or spdl_trace_write; it copies the events first and owns the copy, so it
   may write while they are recorded. */

/* Tracks of threads: index p->workers is the owner's thread, which is the trainer. */
SPDL__COLD int spdl__tracks(const spdl_pipeline *p) { return p->workers + 1; }

/* --- events --- */

/* The depth of an edge, by the reader that has moved its head; when that has moved on meanwhile,
   the reader that did it says so. What looked ready before need not be looked at again. */
SPDL__COLD void spdl__trace_depth(spdl__edge *edge) {
    const uint64_t head = spdl__head(spdl__load(&edge->word));
    uint64_t now, end = spdl__max(spdl__load_relaxed(&edge->track->ready), head);
    while (end <= head + edge->mask && spdl__edge_ready(edge, end)) ++end;
    spdl__store_relaxed(&edge->track->ready, end);
    now = spdl_time_ns();
    if (spdl__head(spdl__load(&edge->word)) == head)
        spdl__trace_add(edge->track, SPDL__RECORD_DEPTH, 0, 0, now, now, end - head);
}

/* The reader waited from when it became idle until the first of the items was put; one that had
   no place had none until now. The trainer may bring no time with it: ages by a clock of 0 would be
   anything. */
SPDL__RARE void spdl__trace_taken(spdl__edge *edge, uint64_t from, uint64_t now) {
    const uint64_t idle = spdl__exchange(&edge->track->begun, 0);
    const uint64_t ticket = from + edge->buffer_size;
    uint64_t put, age = 0;
    if (now == 0) now = spdl_time_ns();
    put = now - spdl__slot_age(spdl__edge_slot(edge, from), now);
    if (idle != 0 && idle < put)
        spdl__trace_add(edge->track, SPDL__RECORD_EMPTY, 0, 0, idle, put, 0);
    if (spdl__edge_ready(edge, ticket) && !spdl__slot_dropped(spdl__edge_slot(edge, ticket)))
        age = spdl__slot_age(spdl__edge_slot(edge, ticket), now);
    if (age > 0) spdl__trace_add(edge->track, SPDL__RECORD_FULL, 0, 0, now - age, now, 0);
    spdl__trace_depth(edge);
}

/* --- spans and counters of users --- */

SPDL__RARE void spdl__span_begin(spdl__track *track, const char *name) {
    const uint32_t depth = track->spans++;
    if (depth >= SPDL__SPANS) return;
    track->span[depth].name = name;
    track->span[depth].begin = spdl_time_ns();
}

SPDL__RARE void spdl__span_end(spdl__track *track, uint64_t now) {
    const uint32_t depth = track->spans - 1;
    if (track->spans == 0) return;
    track->spans = depth;
    if (depth < SPDL__SPANS)
        spdl__trace_add(track, SPDL__RECORD_SPAN, 0, (int)depth, track->span[depth].begin, now,
                        (uint64_t)(uintptr_t)track->span[depth].name);
}

SPDL__RARE void spdl__trace_value(spdl__track *track, const char *name, double value) {
    const uint64_t now = spdl_time_ns();
    uint64_t bits;
    memcpy(&bits, &value, sizeof(bits));
    if ((bits >> 52 & 0x7ff) != 0x7ff) /* JSON has no infinity */
        spdl__trace_add(track, SPDL__RECORD_VALUE, 0, 0, now, bits, (uint64_t)(uintptr_t)name);
}

SPDL__RARE void spdl__trace_copy(const spdl_pipeline *p, uint64_t begin, uint64_t bytes) {
    if (SPDL__TRACED(p->trace))
        spdl__trace_add(&p->trace->track[p->trace->tracks - 1], SPDL__RECORD_COPY, 0, 0, begin,
                        spdl_time_ns(), bytes);
}

SPDL_API void spdl_trace_begin(spdl_task *task, const char *name) {
    spdl__trace *trace = task->pipeline->trace;
    if (SPDL__TRACED(trace) && spdl__task_allows(task, "spdl_trace_begin"))
        spdl__span_begin(&trace->track[task->worker], name);
}

SPDL_API void spdl_trace_end(spdl_task *task) {
    spdl__trace *trace = task->pipeline->trace;
    if (SPDL__TRACED(trace) && spdl__task_allows(task, "spdl_trace_end"))
        spdl__span_end(&trace->track[task->worker], spdl_time_ns());
}

SPDL_API void spdl_trace_counter(spdl_task *task, const char *name, double value) {
    spdl__trace *trace = task->pipeline->trace;
    if (SPDL__TRACED(trace) && spdl__task_allows(task, "spdl_trace_counter"))
        spdl__trace_value(&trace->track[task->worker], name, value);
}

SPDL_API void spdl_pipeline_trace_begin(spdl_pipeline *p, const char *name) {
    if (SPDL__TRACED(p->trace)) spdl__span_begin(&p->trace->track[p->workers], name);
}

SPDL_API void spdl_pipeline_trace_end(spdl_pipeline *p) {
    if (SPDL__TRACED(p->trace)) spdl__span_end(&p->trace->track[p->workers], spdl_time_ns());
}

SPDL_API void spdl_pipeline_trace_counter(spdl_pipeline *p, const char *name, double value) {
    if (SPDL__TRACED(p->trace)) spdl__trace_value(&p->trace->track[p->workers], name, value);
}

#ifndef SPDL_NO_REPORT
/* Stands in the rows of a pipeline that has a trace, so that the others pay nothing. Spans that the
   function has left open end with the call. */
SPDL__COLD spdl_result spdl__traced_call(spdl_task *task, void *in, void **out) {
    spdl__trace *trace = task->pipeline->trace;
    const int row = task->node->index;
    spdl__track *track = &trace->track[task->worker];
    const uint64_t begun = spdl_time_ns();
    const spdl_result result = spdl__load_fn(&trace->fn[row]->call)(task, in, out);
    const uint64_t now = spdl_time_ns();
    while (track->spans > 0) spdl__span_end(track, now);
    spdl__trace_add(track, SPDL__RECORD_CALL, row, (int)result, begun, now, task->sequence);
    return result;
}

static const spdl_function spdl__traced_function = { spdl__traced_call, "traced", "void", "void" };

/* --- a copy of the events, in order --- */

SPDL__COLD spdl__record_kind spdl__record_of_kind(const spdl__record *record) {
    return (spdl__record_kind)(record->stamp & 0xff);
}

/* Of a copy: the track stands where its place in the track was. */
SPDL__COLD int spdl__record_track(const spdl__record *record) { return (int)(record->stamp >> 32); }

/* Copies the events that are there, track by track; *dropped counts those overwritten. */
SPDL__COLD size_t spdl__trace_collect(const spdl__trace *trace, spdl__record *records,
                                      uint64_t *dropped) {
    size_t count = 0;
    int i;
    *dropped = 0;
    for (i = 0; i < trace->tracks; ++i) {
        const spdl__track *track = &trace->track[i];
        const uint64_t end = spdl__load(&track->count);
        uint64_t place = end - spdl__min(end, track->mask + 1);
        *dropped += place;
        for (; place < end; ++place) {
            const spdl__record *record = &track->records[place & track->mask];
            const uint64_t stamp = spdl__load(&record->stamp);
            spdl__record *to = &records[count];
            to->begin = spdl__load(&record->begin);
            to->end = spdl__load(&record->end);
            to->number = spdl__load(&record->number);
            to->stamp = (uint64_t)i << 32 | (uint32_t)stamp;
            if (stamp >> 32 == (uint32_t)(place + 1) && spdl__load(&record->stamp) == stamp)
                ++count;
            else
                ++*dropped;
        }
    }
    return count;
}

/* What a slice may be inside of: slices of a lower level. The trainer waits inside of its spans. */
SPDL__COLD int spdl__record_level(const spdl__record *record) {
    const spdl__record_kind kind = spdl__record_of_kind(record);
    if (kind == SPDL__RECORD_SPAN) return 1 + (int)(record->stamp >> 16 & 0xffff) % SPDL__SPANS;
    return kind == SPDL__RECORD_NEXT ? SPDL__SPANS + 1 : 0;
}

/* By track and time, what is around the others first. */
SPDL__COLD int spdl__record_compare(const void *a, const void *b) {
    const spdl__record *x = (const spdl__record *)a, *y = (const spdl__record *)b;
    const int lane_x = spdl__record_track(x), lane_y = spdl__record_track(y);
    const int level_x = spdl__record_level(x), level_y = spdl__record_level(y);
    if (lane_x != lane_y) return lane_x - lane_y;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    if (level_x != level_y) return level_x - level_y;
    return (x->end > y->end) - (x->end < y->end);
}

/* In order, and slices of a track one after the other, or one inside of another of a lower level:
   each begins where the one before it ends at the earliest, and ends where the one around it does
   at the latest. */
SPDL__COLD void spdl__trace_order(spdl__record *records, size_t count, uint64_t start) {
    struct {
        int level;
        uint64_t end;
    } open[SPDL__SPANS + 2]; /* levels only rise */
    uint64_t last = start; /* where the slice before this one begins now */
    int depth = 0;
    size_t i;
    if (count > 0) qsort(records, count, sizeof(*records), spdl__record_compare);
    for (i = 0; i < count; ++i) {
        spdl__record *record = &records[i];
        const spdl__record_kind kind = spdl__record_of_kind(record);
        const int level = spdl__record_level(record);
        if (i > 0 && spdl__record_track(record) != spdl__record_track(record - 1)) {
            last = start;
            depth = 0;
        }
        record->begin = spdl__max(record->begin, start);
        if (kind == SPDL__RECORD_DEPTH || kind > SPDL__RECORD_SPAN) continue;
        record->begin = spdl__max(record->begin, last);
        for (; depth > 0; --depth) {
            if (open[depth - 1].level < level && open[depth - 1].end > record->begin) break;
            record->begin = spdl__max(record->begin, open[depth - 1].end);
        }
        record->end = spdl__max(record->end, record->begin);
        if (depth > 0) record->end = spdl__min(record->end, open[depth - 1].end);
        last = record->begin;
        open[depth].level = level;
        open[depth++].end = record->end;
    }
}

/* --- text --- */

/* The start of an event; `track` is a thread to the viewer. Times are in microseconds. */
SPDL__COLD spdl__text *spdl__trace_event(spdl__out *out, const spdl_pipeline *p, const char *phase,
                                         int track, uint64_t when) {
    if (out->text.length + 1000 >= out->text.bytes) spdl__out_flush(out); /* more than it takes */
    spdl__text_add(&out->text, ",\n{\"ph\":\"%s\",\"pid\":%llu,\"tid\":%d", phase,
                   (spdl__llu)spdl__os_process_id(NULL), track + 1);
    if (when != SPDL__NEVER)
        spdl__json_real(&out->text, "ts", (double)(when - p->start_ns) / 1e3);
    return &out->text;
}

/* The names of the tracks; the viewer shows them in this order. */
SPDL__COLD void spdl__trace_lanes(spdl__out *out, const spdl_pipeline *p) {
    int i;
    for (i = 0; i + 1 < p->trace->tracks; ++i) { /* copies have no lane */
        const int edge = i - spdl__tracks(p);
        spdl__text *text = spdl__trace_event(out, p, "M", i, SPDL__NEVER);
        spdl__text_add(text, ",\"name\":\"thread_sort_index\",\"args\":{\"sort_index\":%d}}", i);
        (void)spdl__trace_event(out, p, "M", i, SPDL__NEVER);
        spdl__text_add(text, ",\"name\":\"thread_name\",\"args\":{\"name\":\"");
        if (edge >= 0) {
            spdl__text_add(text, "edge %d, after ", edge);
            spdl__json_escape(text, p->node[edge].name);
        } else if (i == p->workers) {
            spdl__text_add(text, "trainer");
        } else {
            spdl__json_escape(text, p->trace->name);
            spdl__text_add(text, "-%d", i);
        }
        spdl__text_add(text, "\"}}");
    }
}

/* The name of a span or counter, of a length for which there is room. */
SPDL__COLD void spdl__trace_user_name(spdl__text *text, const spdl__record *record) {
    const char *name = (const char *)(uintptr_t)record->number;
    char start[101];
    (void)snprintf(start, sizeof(start), "%s", name != NULL ? name : "");
    spdl__text_add(text, ",\"name\":\"");
    spdl__json_escape(text, start);
    spdl__text_add(text, "\"");
}

/* The value of a counter, with a point whatever the locale. */
SPDL__COLD void spdl__trace_print_value(spdl__out *out, const spdl_pipeline *p,
                                        const spdl__record *record) {
    spdl__text *text =
        spdl__trace_event(out, p, "C", spdl__record_track(record), record->begin);
    const char *at, *end;
    char digits[40];
    double value;
    memcpy(&value, &record->end, sizeof(value));
    (void)snprintf(digits, sizeof(digits), "%.9g", value);
    spdl__trace_user_name(text, record);
    at = digits + strspn(digits, "+-0123456789");
    end = at + strcspn(at, "0123456789e");
    spdl__text_add(text, ",\"args\":{\"value\":%.*s%s%s}}", (int)(at - digits), digits,
                   end > at ? "." : "", end);
}

/* Copies overlap, as slices of a lane must not: they are asynchronous events, each with an id. */
SPDL__COLD void spdl__trace_print_copy(spdl__out *out, const spdl_pipeline *p,
                                       const spdl__record *record, size_t id) {
    int i;
    for (i = 0; i < 2; ++i) {
        const uint64_t when = i ? spdl__max(record->end, record->begin) : record->begin;
        spdl__text *text =
            spdl__trace_event(out, p, i ? "e" : "b", spdl__record_track(record), when);
        spdl__text_add(text, ",\"cat\":\"copy\",\"id\":%llu,\"name\":\"copy to device\"",
                       (spdl__llu)id);
        if (i == 0)
            spdl__text_add(text, ",\"args\":{\"bytes\":%llu}", (spdl__llu)record->number);
        spdl__text_add(text, "}");
    }
}

SPDL__COLD void spdl__trace_record(spdl__out *out, const spdl_pipeline *p,
                                   const spdl__record *record) {
    static const char *const cats[] = { "task", "batch", "trainer", "edge", "edge" };
    static const char *const names[] = { "", "", "next waits", "empty", "full" };
    const spdl__record_kind kind = spdl__record_of_kind(record);
    const int track = spdl__record_track(record), row = (int)(record->stamp >> 8 & 0xff);
    const bool depth = kind == SPDL__RECORD_DEPTH;
    spdl__text *text = spdl__trace_event(out, p, depth ? "C" : "X", track, record->begin);
    if (depth) {
        const int edge = track - spdl__tracks(p);
        spdl__text_add(text, ",\"name\":\"edge %d depth, after ", edge);
        spdl__json_escape(text, p->node[edge].name);
        spdl__text_add(text, "\",\"args\":{\"items\":%llu}}", (spdl__llu)record->number);
        return;
    }
    spdl__json_real(text, "dur", (double)(record->end - record->begin) / 1e3);
    if (kind == SPDL__RECORD_SPAN) {
        spdl__trace_user_name(text, record);
        spdl__text_add(text, ",\"cat\":\"span\"}");
        return;
    }
    spdl__text_add(text, ",\"cat\":\"%s\",\"name\":\"%s", cats[kind], names[kind]);
    if (kind <= SPDL__RECORD_BATCH) spdl__json_escape(text, p->node[row].name);
    spdl__text_add(text, "\"");
    if (kind <= SPDL__RECORD_NEXT)
        spdl__text_add(text, ",\"args\":{\"item\":%llu,\"stage\":%d,\"result\":\"%s\"}",
                       (spdl__llu)record->number, row,
                       spdl_result_text((spdl_result)(int16_t)(uint16_t)(record->stamp >> 16)));
    spdl__text_add(text, "}");
}

/* Writes a trace of these events, which it sorts. NULL, or what went wrong. */
SPDL__COLD const char *spdl__trace_print(const spdl_pipeline *p, spdl__os_file file,
                                         spdl__record *records, size_t count, uint64_t dropped) {
    char buffer[8192], mark[SPDL__MARK_BYTES];
    spdl__out out = spdl__out_start(file, buffer, sizeof(buffer));
    size_t i;
    spdl__out_mark(mark);
    spdl__text_add(&out.text,
                   "{\"otherData\":{\"process\":\"%s\",\"spdl\":\"%s\",\"events\":%llu,"
                   "\"dropped_events\":%llu},\n\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n"
                   "{\"ph\":\"M\",\"pid\":%llu,\"tid\":0,\"name\":\"process_name\",\"args\":"
                   "{\"name\":\"spdl ", mark, spdl_version(), (spdl__llu)count,
                   (spdl__llu)dropped, (spdl__llu)spdl__os_process_id(NULL));
    spdl__json_escape(&out.text, p->trace->name);
    spdl__text_add(&out.text, "\"}}");
    spdl__trace_lanes(&out, p);
    spdl__trace_order(records, count, p->start_ns);
    for (i = 0; i < count && out.failure == NULL; ++i) {
        const spdl__record_kind kind = spdl__record_of_kind(&records[i]);
        if (kind == SPDL__RECORD_COPY) spdl__trace_print_copy(&out, p, &records[i], i);
        else if (kind == SPDL__RECORD_VALUE)
            spdl__trace_print_value(&out, p, &records[i]);
        else
            spdl__trace_record(&out, p, &records[i]);
    }
    spdl__text_add(&out.text, "\n]}\n");
    spdl__out_flush(&out);
    return out.failure;
}

/* Writes to an open file and reports how it went. */
SPDL__COLD spdl_result spdl__trace_save(const spdl_pipeline *p, spdl__os_file file,
                                        const char *path) {
    const size_t most = (size_t)p->trace->tracks * (size_t)(p->trace->track->mask + 1);
    spdl__record *records =
        (spdl__record *)spdl__alloc_zeroed(&p->allocator, most, sizeof(*records), sizeof(uint64_t));
    const char *failure = "out of memory";
    uint64_t dropped = 0;
    size_t count = 0;
    if (records != NULL) {
        count = spdl__trace_collect(p->trace, records, &dropped);
        failure = spdl__trace_print(p, file, records, count, dropped);
        spdl__free(&p->allocator, records, most * sizeof(*records));
    }
    if (failure != NULL)
        spdl__logf(&p->logger, SPDL_LOG_WARN, "spdl: trace '%s': %s", path, failure);
    else if (dropped > 0)
        spdl__logf(&p->logger, SPDL_LOG_WARN,
                   "spdl: trace '%s': the latest %llu events are there, %llu were dropped "
                   "(trace_events, or SPDL_TRACE=FILE,events=N, keeps more)",
                   path, (spdl__llu)count, (spdl__llu)dropped);
    else
        spdl__logf(&p->logger, SPDL_LOG_INFO, "spdl: trace '%s': %llu events", path,
                   (spdl__llu)count);
    return failure == NULL ? SPDL_OK : records == NULL ? SPDL_E_NOMEM : SPDL_E_IO;
}

SPDL_API spdl_result spdl_trace_write(const spdl_pipeline *p, const char *path) {
    const char *reason;
    spdl_result result;
    spdl__os_file file;
    if (p == NULL || path == NULL || p->trace == NULL) return SPDL_E_INVALID;
    reason = spdl__os_file_open(&file, path, SPDL__OS_REPLACE, NULL);
    if (reason != NULL) {
        spdl__logf(&p->logger, SPDL_LOG_WARN, "spdl: trace '%s': %s", path, reason);
        return SPDL_E_IO;
    }
    result = spdl__trace_save(p, file, path);
    (void)spdl__os_file_close(file);
    return result;
}

/* --- create and destroy --- */

/* Room for `events` events of each track; false when there is no memory. */
SPDL__COLD bool spdl__trace_build(spdl_pipeline *p, uint64_t events) {
    const int tracks = spdl__tracks(p) + p->count + 1;
    const size_t records = (size_t)spdl__pow2(events);
    const size_t lane_bytes = sizeof(spdl__track) + records * sizeof(spdl__record);
    const size_t bytes = sizeof(spdl__trace) + (size_t)tracks * lane_bytes;
    spdl__trace *trace = (spdl__trace *)spdl__alloc_zeroed(&p->allocator, 1, bytes, 8);
    int i;
    if (trace == NULL) return false;
    trace->bytes = bytes;
    trace->tracks = tracks;
    trace->file = SPDL__NO_FILE;
    trace->track = (spdl__track *)(trace + 1);
    for (i = 0; i < tracks; ++i) {
        trace->track[i].records = (spdl__record *)(trace->track + tracks) + (size_t)i * records;
        trace->track[i].mask = records - 1;
    }
    for (i = 0; i < p->count; ++i) {
        p->node[i].out.track = &trace->track[spdl__tracks(p) + i];
        if (i + 1 < p->count) p->node[i].out.track->begun = 1; /* idle from the start */
        trace->fn[i] = p->node[i].row.fn;
        if (trace->fn[i] != NULL) p->node[i].row.fn = &spdl__traced_function;
    }
    p->trace = trace;
    return true;
}

SPDL__COLD void spdl__trace_free(spdl_pipeline *p) {
    spdl__trace *trace = p->trace;
    int i;
    if (trace == NULL) return;
    for (i = 0; i < p->count; ++i) {
        p->node[i].out.track = NULL;
        if (trace->fn[i] != NULL) p->node[i].row.fn = trace->fn[i];
    }
    p->trace = NULL;
    (void)spdl__os_file_close(trace->file);
    spdl__free(&p->allocator, trace, trace->bytes);
}

/* Takes ",events=N" off the value of SPDL_TRACE. */
SPDL__COLD void spdl__trace_option(const spdl_logger *logger, char *value, uint64_t *events) {
    const char *const key = ",events=";
    char *option = strstr(value, key), *end;
    unsigned long long number;
    if (option == NULL) return;
    number = strtoull(option + strlen(key), &end, 10);
    if (option[strlen(key)] < '0' || option[strlen(key)] > '9' || *end != '\0' || number < 1 ||
        number > SPDL__TRACE_EVENTS_MAX)
        spdl__logf(logger, SPDL_LOG_WARN,
                   "spdl: SPDL_TRACE: '%s' is not events=1 to %d; %llu are kept", option + 1,
                   SPDL__TRACE_EVENTS_MAX, (spdl__llu)*events);
    else
        *events = number;
    if (option == value)
        spdl__logf(logger, SPDL_LOG_WARN, "spdl: SPDL_TRACE: there is no file in front of '%s'",
                   value);
    *option = '\0';
}

/* Whatever is wrong is a warning: the pipeline runs as it would without a trace. */
SPDL__COLD void spdl__trace_open(spdl_pipeline *p, const spdl_pipeline_desc *desc) {
    const char *value = desc->trace != NULL ? desc->trace : spdl__os_environment("SPDL_TRACE");
    const char *name = desc->pool != NULL ? desc->pool->name : desc->name, *failure = NULL;
    uint64_t events = desc->trace_events > 0 ? (uint64_t)desc->trace_events : SPDL__TRACE_EVENTS;
    char path[SPDL__PATH_BYTES];
    if (!spdl__path_copy(path, value, "trace", &p->logger)) return;
    if (desc->trace == NULL) spdl__trace_option(&p->logger, path, &events);
    if (path[0] == '\0' && desc->trace_events <= 0) return;
    if (!spdl__trace_build(p, events)) {
        failure = "out of memory";
    } else {
        spdl__name_copy(p->trace->name, name != NULL ? name : "spdl");
        if (path[0] != '\0') failure = spdl__out_claim(&p->trace->file, p->trace->path, path);
    }
    if (failure == NULL && path[0] != '\0')
        failure = spdl__trace_print(p, p->trace->file, NULL, 0, 0);
    if (failure == NULL) return;
    spdl__logf(&p->logger, SPDL_LOG_WARN, "spdl: trace '%s': %s; there will be none", path,
               failure);
    spdl__trace_free(p);
}

SPDL__COLD void spdl__trace_close(spdl_pipeline *p) {
    spdl__trace *trace = p->trace;
    if (trace == NULL) return;
    while (trace->track[p->workers].spans > 0)
        spdl__span_end(&trace->track[p->workers], spdl_time_ns());
    if (trace->file != SPDL__NO_FILE && p->start_ns != 0)
        (void)spdl__trace_save(p, trace->file, trace->path);
    (void)spdl__os_file_close(trace->file);
    trace->file = SPDL__NO_FILE;
}
#endif

#endif /* SPDL_IMPLEMENTATION */

/* ============================================================================================= */
/* >>license
   MIT License

   Copyright (c) 2026 the spdl.h authors

   Permission is hereby granted, free of charge, to any person obtaining a copy
   of this software and associated documentation files (the "Software"), to deal
   in the Software without restriction, including without limitation the rights
   to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
   copies of the Software, and to permit persons to whom the Software is
   furnished to do so, subject to the following conditions:

   The above copyright notice and this permission notice shall be included in all
   copies or substantial portions of the Software.

   THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
   IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
   FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
   AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
   LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
   OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
   SOFTWARE. */
