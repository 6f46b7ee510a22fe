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
           int *n;
           desc.workers = 2;
           if (spdl_pipeline_create(&p, &desc, SPDL_STAGES(
                   SPDL_SOURCE(count, .free_item = free),
                   SPDL_SINK(3))) != SPDL_OK) return 1;
           while (spdl_pipeline_next(p, (void **)&n, SPDL_FOREVER) == SPDL_OK) {
               printf("%d\n", *n);
               free(n);
           }
           spdl_pipeline_destroy(p);
           return 0;
       }

   CONTENTS (search for the tag; `make toc` prints them with line numbers)
       >>config  >>version  >>time  >>result  >>error  >>alloc  >>log  >>ring  >>pool
       >>pipeline  >>stats  >>report  >>trace  >>cache  >>npz  >>cpp         declarations
       >>platform-impl  >>atomics-impl  >>os-impl  >>core-impl  >>ring-core  >>ring-impl
       >>pool-impl  >>trace-core  >>edge-impl  >>flow-impl  >>tune-impl  >>pipeline-impl
       >>stats-impl  >>report-impl  >>cache-impl  >>crc-impl  >>inflate-impl  >>split-impl
       >>file-impl  >>zip-impl  >>npy-impl  >>npz-impl  >>many-impl  >>write-impl
       >>trace-impl  >>license
                                                                             implementation

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
       of reports that were asked for (>>report), and that of a trainer that waits for polite
       workers, which looks every 20 ms whether they get a processor (>>pool). Workers block every
       signal but those a fault raises. A process that forks may use the library in the child only
       for objects made there: the workers stay behind in the parent.

   MEMORY
       Allocation happens in create and open calls only, through spdl_allocator, but for these
       cases: batches that the trainer keeps, what a stage emits at once for the first time,
       spdl_report_html, reading and writing npz (see >>npz-impl), and a copy of what a trace has
       recorded while its file is written.
       A running pipeline allocates nothing. An item belongs to the library from the moment a stage
       hands it out until spdl_pipeline_next hands it to the trainer; see >>pipeline for the rules.

   ERRORS
       Zero is success, positive results are ordinary outcomes (end, timeout, full, empty, closed),
       negative ones are errors. Text for an error is in an spdl_error. Pointers must not be NULL
       unless a block says so. The library never aborts the program, never uses errno as an
       interface, and has no global state.

   LIMITS
       Linux on 64-bit processors. The code for other POSIX systems is there, but was only run on
       Linux; MIPS, SPARC, Alpha and Windows: not yet.
       32 stages in a pipeline, 64 pipelines on a pool, 256 workers in a pool.

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
   the decoder here takes its turn, and tells what is wrong. Any threads may be in it at once. */

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
    X(SPDL_E_CUDA_FORKED, -14, "CUDA was opened before a fork and used behind it")

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
   A bounded queue of fixed-size items (a pointer unless told otherwise) that holds exactly
   `capacity` of them. The mode says how many threads there may be on each side; a side with one
   thread is cheaper. Items of 8 bytes are quickest.

   SPSC is wait-free. The other modes' try operations never wait, but a thread that stops between
   claiming a slot and filling (or emptying) it holds back those behind it: try_pop may say
   SPDL_EMPTY although later items are inside. Order is first in, first out; with several producers
   by claim, so each consumer sees the items of one producer in order. Waits spin a little, yield a
   little, and then sleep in the kernel.

   Misuse: the one thread of a side may be another thread later, when the program orders the two.
   Two at the same time corrupt the ring; with SPDL_DEBUG defined in the implementation file that is
   an assert and SPDL_E_INVALID from any call below, wherever two calls overlap; between a reserve
   and its commit (a peek and its release) it cannot tell. Nothing may be called during or after
   spdl_ring_destroy. */

typedef enum spdl_ring_mode {
    SPDL_RING_MPMC, /* any number of producers and consumers */
    SPDL_RING_SPSC, /* one producer and one consumer */
    SPDL_RING_MPSC, /* any number of producers, one consumer */
    SPDL_RING_SPMC  /* one producer, any number of consumers */
} spdl_ring_mode;

typedef struct spdl_ring_desc {
    uint64_t capacity;        /* items, at least 1, at most 2^30 */
    size_t item_bytes;        /* 0: sizeof(void *); at most 4096 */
    spdl_ring_mode mode;      /* default MPMC */
    spdl_allocator allocator; /* default malloc */
    spdl_error *error;        /* optional: says why create failed */
} spdl_ring_desc;

typedef struct spdl_ring spdl_ring;

/* What a ring has seen since it was made. A wait is a blocking call that outlasted the spinning;
   shorter ones cost too little to be counted. Sleeps are trips to the kernel, now and then several
   in a wait. */
typedef struct spdl_ring_counters {
    uint64_t pushed, popped, count; /* items: in, out, and inside now */
    uint64_t push_waits, pop_waits;
    uint64_t push_wait_ns, pop_wait_ns;
    uint64_t push_sleeps, pop_sleeps;
    uint64_t wakes; /* calls into the kernel to wake somebody */
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
   Threads: owner; no other call on the ring may be running.
   Blocks:  never, but for free_item.
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
   Returns: SPDL_OK, SPDL_EMPTY, SPDL_CLOSED (closed and drained).
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
   Returns: SPDL_OK, SPDL_TIMEOUT, SPDL_CLOSED (closed and drained), SPDL_E_INVALID (a NULL
            argument).
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
   Returns: SPDL_OK (at least one, or n is 0), SPDL_EMPTY, SPDL_CLOSED (closed and drained).
   Threads: consumers.
   Blocks:  never.
   Owns:    the caller has the *moved items. */
SPDL_API spdl_result spdl_ring_try_pop_n(spdl_ring *ring, void *items, uint64_t n,
                                         uint64_t *moved);

/* Pushes n items, waiting for room as often as it must. *moved says how many went in, also when
   it is not all of them. Other producers' items may come in between.
   Returns: SPDL_OK (all n), SPDL_TIMEOUT, SPDL_CLOSED, SPDL_E_INVALID (a NULL argument).
   Threads: producers.
   Blocks:  until all are in, the ring is closed, or timeout_ns has passed.
   Owns:    the ring has the first *moved items, the caller the rest. */
SPDL_API spdl_result spdl_ring_push_n(spdl_ring *ring, const void *items, uint64_t n,
                                      uint64_t *moved, int64_t timeout_ns);

/* Waits for at least one item, then pops up to n that are there; *moved says how many.
   Returns: SPDL_OK (at least one, or n is 0), SPDL_TIMEOUT, SPDL_CLOSED (closed and drained),
            SPDL_E_INVALID (a NULL argument).
   Threads: consumers.
   Blocks:  until there is an item, the ring is closed, or timeout_ns has passed.
   Owns:    the caller has the *moved items. */
SPDL_API spdl_result spdl_ring_pop_n(spdl_ring *ring, void *items, uint64_t n, uint64_t *moved,
                                     int64_t timeout_ns);

/* SPSC: gives the producer up to n free slots to write into, side by side, at *slots. *have says
   how many: at least one, fewer than n when less is free or the slots wrap around. Nothing is
   pushed before spdl_ring_commit; reserving again gives the same slots.
   Returns: SPDL_OK, SPDL_TIMEOUT (also when timeout_ns is 0 and the ring is full), SPDL_CLOSED,
            SPDL_E_INVALID (another mode, n is 0, a NULL argument).
   Threads: the producer.
   Blocks:  until there is room, the ring is closed, or timeout_ns has passed.
   Owns:    the slots stay the ring's; they are the producer's to write until commit. */
SPDL_API spdl_result spdl_ring_reserve(spdl_ring *ring, uint64_t n, void **slots, uint64_t *have,
                                       int64_t timeout_ns);

/* SPSC: pushes the first n of the reserved slots.
   Returns: SPDL_OK, SPDL_CLOSED (nothing was pushed), SPDL_E_INVALID (another mode, or more than
            there is room for).
   Threads: the producer.
   Blocks:  never.
   Owns:    the ring has the items after SPDL_OK, the caller otherwise. */
SPDL_API spdl_result spdl_ring_commit(spdl_ring *ring, uint64_t n);

/* SPSC: gives the consumer up to n items to read in place, side by side, at *items. *have says how
   many: at least one, fewer than n when fewer are there or they wrap around. Nothing is popped
   before spdl_ring_release; peeking again gives the same items.
   Returns: SPDL_OK, SPDL_TIMEOUT (also when timeout_ns is 0 and the ring is empty), SPDL_CLOSED
            (closed and drained), SPDL_E_INVALID (another mode, n is 0, a NULL argument).
   Threads: the consumer.
   Blocks:  until there is an item, the ring is closed, or timeout_ns has passed.
   Owns:    the items stay the ring's; they are the consumer's to use until release. */
SPDL_API spdl_result spdl_ring_peek(spdl_ring *ring, uint64_t n, void **items, uint64_t *have,
                                    int64_t timeout_ns);

/* SPSC: pops the first n of the peeked items, whose slots may be written again.
   Returns: SPDL_OK, SPDL_E_INVALID (another mode, or more than were peeked).
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

/* Items inside right now; exact when nobody else is pushing or popping.
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

/* Fills *counters. They cost the quick calls nothing: items are read off the ring's indices, and
   only calls that wait count.
   Returns: nothing.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API void spdl_ring_stats(const spdl_ring *ring, spdl_ring_counters *counters);

/* ============================================================================================= */
/* >>pool
   A fixed set of worker threads. It runs jobs that are submitted to it, and the stages of the
   pipelines that are attached to it. */

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

typedef struct spdl_pool_desc {
    int workers;            /* 1 to 256 */
    const char *name;       /* thread names are name-0, name-1, ... (default "spdl") */
    spdl_policy policy;
    size_t stack_bytes;     /* 0: the system's default */
    int queue_size;         /* jobs that may wait, default 256 */
    spdl_init_fn init;      /* on each worker, before any job */
    spdl_fini_fn fini;      /* on each worker that ran init */
    void *ctx;              /* handed to init and fini */
    spdl_allocator allocator;
    spdl_logger logger;
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
   destroyed before: else nothing happens but a logged error.
   Returns: nothing; NULL is allowed.
   Threads: owner; not a worker of this pool.
   Blocks:  until the jobs that were accepted have run.
   Owns:    the pool's memory is freed. */
SPDL_API void spdl_pool_destroy(spdl_pool *pool);

/* Queues fn(arg). Jobs start in the order of submission.
   Returns: SPDL_OK, SPDL_TIMEOUT (the queue stayed full), SPDL_CLOSED (after stop), SPDL_E_INVALID.
   Threads: any; a job that submits should use a timeout of 0, or it may wait for itself.
   Blocks:  while the queue is full, up to timeout_ns.
   Owns:    `arg` stays the caller's; a job that was accepted is run exactly once. */
SPDL_API spdl_result spdl_pool_submit(spdl_pool *pool, spdl_job_fn fn, void *arg,
                                      int64_t timeout_ns);

/* Waits until no job is queued or running. Jobs that others submit meanwhile count too: beside
   steady submitters it may never return.
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

/* How many workers the pool has.
   Returns: at least 1.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API int spdl_pool_workers(const spdl_pool *pool);

/* ============================================================================================= */
/* >>pipeline
   A source, stages and a sink, declared as rows of a table and run by a pool: any worker runs any
   stage, the one furthest downstream first; those in which no call is under way come before the
   others. A stage is called only when it has an input, is under its concurrency and has room for
   its output, so no worker ever waits on a full edge.

   Stage functions. SPDL_FN(decode, Path, Image) { ... } defines
       spdl_result decode(spdl_task *task, Path *in, Image **out)
   and records the type names, so that a pipeline whose stages do not fit is refused when it is
   created; void fits anything. A source has void as its input type. The function returns
       SPDL_OK    with an item in *out (for a stage: *out may be `in`, changed in place)
       SPDL_SKIP  drops the item
       SPDL_END   from a source: there is no more, or with .continuous no more in this epoch
       SPDL_PENDING  with .deferred, after spdl_defer: spdl_complete tells the result later
       negative   this item failed; `return spdl_fail(task, "...")` records why
   *out counts only with SPDL_OK; with any other result what it points to stays the function's. A
   task is good for its call: a worker has the same one for all its calls, of whatever stage.

   Ownership. A stage borrows its input. After the call the library destroys it, exactly once, with
   the free_item of the stage that made it, unless the stage passed it on (*out == in) or took it
   with spdl_take. So stage functions never free their input, whatever happens. What
   spdl_pipeline_next hands out is the trainer's. NULL items are never passed to free_item.
   Invariant: items made by source and stages = delivered + taken in by stages, skipped, failed or
   freed at stop.

   One to many. A stage with .emits hands on what it gives to spdl_emit, none or any number of items
   for each call (*out stays NULL); they stay together and wait in memory until they are read,
   whatever buffer_size says. A stage with .flush is called once more when its
   input ends (spdl_flushing(task) is true and there is no input): it may gather items by its own
   rules and hand on what is left.

   Order. With input order (the default) a stage hands on its results in the order of its inputs; a
   slow call holds back those behind it, up to buffer_size of them. With completion order it hands
   them on as they are done; reorder_window = n then bounds the disorder: no item is overtaken by
   more than n others of its stage. With input order reorder_window is how many results may be under
   way or wait, the places of dropped items included (default: 64 or what fits the rest): give a
   filter that keeps one of a thousand a large one. An ordered pipeline without merges that take
   what is there delivers the same items in the same order at any number of workers: with random
   numbers seeded by spdl_sequence, bit by bit.

   Branches. SPDL_BRANCH(fn), then two or more SPDL_PATH(name), each followed by its rows, then
   SPDL_MERGE(): `fn` is a stage that sends its result down one of the paths with spdl_route(task,
   path); paths may hold any rows but a source and a sink, also none, and branches of their own. A
   branch of batches sends the items of a batch down several paths with spdl_route_items: every path
   then gets one batch, maybe an empty one, and SPDL_MERGE(.merge_order = SPDL_MERGE_BATCHES) joins
   what became of them to one batch again (one that a stage drops counts as empty; one that
   spdl_route sends down one path has empty ones beside it). What a merge hands on is of one type:
   say void where it is not.

   Epochs. A source with .continuous starts over after SPDL_END, its items numbered from 0 again;
   next returns SPDL_END once for each epoch. The end of an epoch is a barrier in every stage: no
   call of the next epoch begins before the calls of this one have ended, no batch spans two epochs,
   and stages further up work on the next epoch meanwhile. An error ends this epoch and all others.

   Who may wait for whom. While one worker is free, every row with an input, under its concurrency
   and with room for its result is called, whatever other calls wait for; calls of a row begin in
   the order of its inputs. Up to `concurrency` calls of a row may wait for each other, also in the
   last items of a source (in input order: within buffer_size + concurrency items). A call may wait
   for what a later stage, the trainer or the producer does, if its row has a concurrency of 1 or
   completion order: else order itself makes calls wait for those before them. `*pipeline` is stored
   before the first call. Pipelines on one pool get turns by time, not by calls. (Room that the
   trainer makes in a sink of 8 or more counts when half of it is free, or when it waits, or asks.)
   A trainer may ask for the depth of its buffer (spdl_pipeline_stats), wait until it is full, pause
   for as long as it likes at no cost, and go on. No function of yours is called under a lock of the
   library, but merge_fn; alloc_fn and free_fn, when more batches are alive than were made ahead;
   and log_fn, when a row of batches or a merge fails.

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

typedef enum spdl_kind {
    SPDL_KIND_NONE,
    SPDL_KIND_SOURCE,
    SPDL_KIND_PIPE,
    SPDL_KIND_BATCH,
    SPDL_KIND_SINK,
    SPDL_KIND_FEED,
    SPDL_KIND_BRANCH,
    SPDL_KIND_PATH,
    SPDL_KIND_MERGE
} spdl_kind;

/* The order in which a stage hands on its results. */
typedef enum spdl_order { SPDL_ORDER_INPUT, SPDL_ORDER_COMPLETION } spdl_order;

/* Which path a merge takes its next item from. */
typedef enum spdl_merge_order {
    SPDL_MERGE_READY,   /* whichever has one, in turn */
    SPDL_MERGE_ROBIN,   /* each in turn, waiting for it; left out are paths that have ended, and
                           those that get nothing while others are full. The turn of what a path
                           hands on when its input ends (.flush, the rest of a batch) may depend on
                           when the source tells its end */
    SPDL_MERGE_BATCHES, /* one batch from each, joined in the order of the paths */
    SPDL_MERGE_CHOICE   /* what merge_fn says */
} spdl_merge_order;

/* Which of `paths` paths to take from: ready[i] is 1 when path i has an item, 0 when it may get
   one, -1 when it has none until the next epoch or for good. A path that is not ready is waited
   for; less than 0: wait for any. Asked when some path has an item. An answer that would wait for
   ever is a failure, as is a path there is none of: no path is at 0, or those that are get nothing
   because the branch has no more room on the others. Called while nobody else may take from the
   paths: to be quick, and not to call the library. */
typedef int (*spdl_merge_fn)(void *ctx, const signed char *ready, int paths);

/* One row, made by the macros below; zero is the default. */
typedef struct spdl_stage {
    spdl_kind kind SPDL__ZERO;
    const spdl_function *fn SPDL__ZERO;
    const char *type SPDL__ZERO;        /* feed: the type of its items */
    const char *file SPDL__ZERO;        /* with line: where the row was written */
    int size SPDL__ZERO;                /* batch: items in a batch */
    const char *name SPDL__ZERO;        /* default: the name of the function, "batch" or so */
    void *ctx SPDL__ZERO;               /* spdl_ctx(task) */
    int concurrency SPDL__ZERO;         /* pipe: calls at the same time, a hard bound; default 1 */
    int max_concurrency SPDL__ZERO;     /* pipe: how far it can be raised; default: not at all,
                                           with autotune (and without flush) to as many as there
                                           are threads to run it: set 1 for a function that only
                                           one thread may be in */
    int threads SPDL__ZERO;             /* pipe: runs on so many threads of its own */
    int buffer_size SPDL__ZERO;         /* finished items that may wait behind; default 2, sink 3 */
    spdl_order output_order SPDL__ZERO; /* pipe: default input order */
    int reorder_window SPDL__ZERO;      /* pipe: see Order above */
    bool drop_last SPDL__ZERO;          /* batch: drop the last one when it is not full */
    bool drop_oldest SPDL__ZERO;        /* feed: when full, an old item makes way for a new one */
    bool continuous SPDL__ZERO;         /* source: starts over after SPDL_END */
    bool emits SPDL__ZERO;              /* source, pipe: hands on what it gives to spdl_emit */
    bool flush SPDL__ZERO;              /* pipe: called once more at the end; concurrency 1 */
    bool deferred SPDL__ZERO;           /* pipe: may return SPDL_PENDING */
    spdl_merge_order merge_order SPDL__ZERO;
    spdl_merge_fn merge_fn SPDL__ZERO;  /* merge: gets the row's ctx */
    int retries SPDL__ZERO;             /* a call that fails is repeated so many times */
    int max_failures SPDL__ZERO;        /* 0: the first one is fatal; n: n are tolerated, and told
                                           to log_fn as SPDL_LOG_INFO; -1: any number is */
    double max_failure_rate SPDL__ZERO; /* instead: a share in (0,1], judged from 100 calls on */
    spdl_free_fn free_item SPDL__ZERO;  /* destroys what this stage makes; default: nothing to do */
    spdl_init_fn init SPDL__ZERO;       /* on each worker, before any call of any stage */
    spdl_fini_fn fini SPDL__ZERO;       /* on each worker that ran init */
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
    SPDL__WITH(bool, drop_last)
    SPDL__WITH(bool, drop_oldest)
    SPDL__WITH(bool, continuous)
    SPDL__WITH(bool, emits)
    SPDL__WITH(bool, flush)
    SPDL__WITH(bool, deferred)
    SPDL__WITH(spdl_merge_order, merge_order)
    SPDL__WITH(spdl_merge_fn, merge_fn)
    SPDL__WITH(int, retries)
    SPDL__WITH(int, max_failures)
    SPDL__WITH(double, max_failure_rate)
    SPDL__WITH(spdl_free_fn, free_item)
    SPDL__WITH(spdl_init_fn, init)
    SPDL__WITH(spdl_fini_fn, fini)
#undef SPDL__WITH
#endif
} spdl_stage;

/* Items grouped by SPDL_BATCH; the input type of the next stage is spdl_batch. Set items[i] to NULL
   to take an item out of a batch you borrow; an item put in its place is destroyed with the same
   free_item. */
typedef struct spdl_batch {
    void **items;
    size_t count;
    uint64_t sequence; /* number of the batch, from 0 */
} spdl_batch;

typedef struct spdl_pipeline spdl_pipeline;

typedef struct spdl_pipeline_desc {
    int workers;              /* threads of its own pool; 0: the thread in next does all the work */
    spdl_pool *pool;          /* or a pool that is shared; then leave workers 0 */
    const char *name;         /* names the threads; default "spdl" */
    spdl_policy policy;       /* of its own threads */
    size_t stack_bytes;       /* of each of them; 0: the system's default */
    bool autotune;            /* concurrency is tuned while it runs, up to max_concurrency and
                                 down to 1: that of all pipes but those with max_concurrency 1 or
                                 flush. What it does, and why it does nothing, are lines to log_fn
                                 as SPDL_LOG_INFO; see >>tune-impl */
    double cpu_budget;        /* autotune: processors the stages may use; default: 40 % of them */
    double tune_seconds;      /* autotune: the least time between two decisions; default 0.5 */
    spdl_allocator allocator;
    spdl_logger logger;
    spdl_error *error;        /* optional: says why create failed */
    const char *trace;        /* file of a trace; NULL: as SPDL_TRACE says; "": none; see >>trace */
    int trace_events;         /* kept of each thread and edge, of 32 bytes each; default 65536 */
    const struct spdl_report_desc *report; /* optional, is copied: see >>report */
} spdl_pipeline_desc;

/* clang-format off */
#define SPDL_FN(name, In, Out)                                                                     \
    static spdl_result name(spdl_task *task, In *in, Out **out);                                   \
    SPDL__UNUSED static spdl_result name##_spdl_call(spdl_task *task, void *in, void **out) {      \
        Out *spdl__made = NULL; /* no name that a program may have, too */                         \
        const spdl_result spdl__told = name(task, SPDL__CAST(In *, in), &spdl__made);              \
        *out = SPDL__UNCONST(spdl__made);                                                          \
        return spdl__told;                                                                         \
    }                                                                                              \
    SPDL__UNUSED static const spdl_function name##_spdl = { name##_spdl_call, #name, #In, #Out };  \
    static spdl_result name(spdl_task *task SPDL__UNUSED, In *in SPDL__UNUSED,                     \
                            Out **out SPDL__UNUSED)

/* Rows, as data, the fields written as .concurrency = 4 and so on:
       SPDL_SOURCE(fn, fields...), or SPDL_FEED(Type, fields...) for spdl_pipeline_push
       SPDL_PIPE(fn, fields...)
       SPDL_BATCH(size, fields...)
       SPDL_BRANCH(fn, fields...), for each path SPDL_PATH(name, fields...) and its rows, and
       SPDL_MERGE(fields...)
       SPDL_SINK(buffer_size) */
#define SPDL_SOURCE(...) SPDL__FN_ROW(SPDL_KIND_SOURCE, __VA_ARGS__, SPDL__LINE)
#define SPDL_FEED(...)   SPDL__FEED_ROW(__VA_ARGS__, SPDL__LINE)
#define SPDL_PIPE(...)   SPDL__FN_ROW(SPDL_KIND_PIPE, __VA_ARGS__, SPDL__LINE)
#define SPDL_BATCH(...)  SPDL__BATCH_ROW(__VA_ARGS__, SPDL__LINE)
#define SPDL_BRANCH(...) SPDL__FN_ROW(SPDL_KIND_BRANCH, __VA_ARGS__, SPDL__LINE)
#define SPDL_PATH(...)   SPDL__PATH_ROW(__VA_ARGS__, SPDL__LINE)
#define SPDL_MERGE(...)  SPDL__MERGE_ROW(__VA_ARGS__)

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
#define SPDL__PATH_ROW(name_, ...)                                                                 \
    SPDL__STAGE { .kind = SPDL_KIND_PATH, .file = __FILE__, .name = name_, __VA_ARGS__ }
/* It may have no fields, so its line cannot come last: it is part of the file's name. */
#define SPDL__MERGE_ROW(...)                                                                       \
    SPDL__STAGE { .kind = SPDL_KIND_MERGE, .file = __FILE__ ":" SPDL__EXPAND(__LINE__),            \
                  __VA_ARGS__ }
#define SPDL_SINK(buffer_size_)                                                                    \
    SPDL__STAGE { .kind = SPDL_KIND_SINK, .file = __FILE__, .buffer_size = buffer_size_,           \
                  .line = __LINE__ }
#else
#define SPDL__LINE __LINE__
/* Fields come behind, before C++20: SPDL_PIPE(decode).with_concurrency(4) */
#define SPDL__FN_ROW(kind_, fn_, line_) spdl__row(kind_, &fn_##_spdl, __FILE__, line_, 0, 0)
#define SPDL__BATCH_ROW(size_, line_)                                                              \
    spdl__row(SPDL_KIND_BATCH, NULL, __FILE__, line_, size_, 0)
#define SPDL__FEED_ROW(type_, line_) spdl__named_row(SPDL_KIND_FEED, #type_, NULL, __FILE__, line_)
#define SPDL__PATH_ROW(name_, line_) spdl__named_row(SPDL_KIND_PATH, NULL, name_, __FILE__, line_)
#define SPDL__MERGE_ROW(...) spdl__row(SPDL_KIND_MERGE, NULL, __FILE__, __LINE__, 0, 0)
#define SPDL_SINK(buffer_size_)                                                                    \
    spdl__row(SPDL_KIND_SINK, NULL, __FILE__, __LINE__, 0, buffer_size_)
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
   ctx pointers must outlive the pipeline. Whatever is wrong is told in desc->error and to the log,
   with file and line of the row, the row's number and the field.
   Returns: SPDL_OK, SPDL_E_INVALID, SPDL_E_TYPE, SPDL_E_NOMEM, SPDL_E_THREAD, SPDL_E_LIMIT (the
            pool has 64 pipelines already).
   Threads: any.
   Blocks:  as spdl_pool_create, for its own pool.
   Owns:    the caller destroys *pipeline; on failure *pipeline is NULL. */
SPDL_API spdl_result spdl_pipeline_create(spdl_pipeline **pipeline, const spdl_pipeline_desc *desc,
                                          const spdl_stage *stages, size_t stage_count);

/* Stops the pipeline if it runs, waits for the calls in flight, and frees every item that was not
   handed out. Batches that were handed out stay valid. After 5 seconds the log is told which stages
   it waits for.
   Returns: nothing; NULL is allowed.
   Threads: owner; no other call on the pipeline may be running; not on a worker of its pool.
   Blocks:  until the stage functions that are running have returned and every deferred call was
            completed; with init rows on a shared pool also until each worker has been free once.
   Owns:    the pipeline and every item still inside are freed. */
SPDL_API void spdl_pipeline_destroy(spdl_pipeline *pipeline);

/* Takes the next item out of the sink. A timeout takes nothing and loses nothing. After the last
   item the end is told by every call: SPDL_END, or the error that ended the pipeline early (items
   made before it are delivered first), or SPDL_CLOSED after a stop. Behind a continuous source
   SPDL_END is told once for each epoch, and the next call goes on with the next one.
   Returns: SPDL_OK, SPDL_TIMEOUT, SPDL_END, SPDL_CLOSED, a negative result (see
            spdl_pipeline_error), SPDL_E_INVALID when another thread is inside, and in the child of
            a fork.
   Threads: one at a time (the trainer). Wait-free when an item is ready.
   Blocks:  until there is an item or the end, or up to timeout_ns. With workers = 0 the stages run
            inside this call, and the timeout is looked at between their calls.
   Owns:    the caller has *item after SPDL_OK; otherwise *item is untouched. */
SPDL_API spdl_result spdl_pipeline_next(spdl_pipeline *pipeline, void **item, int64_t timeout_ns);

/* Ends the flow early: no stage function is called again; those running are waited for. Items in
   the sink can still be taken, then next returns SPDL_CLOSED; all others are freed, by a stop that
   has waited or else by destroy. Stopping twice, or after the end, is fine. On a worker of the
   pipeline's pool it does not wait, nor in a free_item or log_fn that spdl_complete calls.
   Returns: SPDL_OK, SPDL_TIMEOUT (stage functions are still running; the stop goes on),
            SPDL_E_INVALID in the child of a fork.
   Threads: any, also inside a stage.
   Blocks:  until the stage functions that are running have returned and every deferred call was
            completed, or up to timeout_ns; what free_item takes comes on top.
   Owns:    the library frees the items that are not in the sink. */
SPDL_API spdl_result spdl_pipeline_stop(spdl_pipeline *pipeline, int64_t timeout_ns);

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

/* Tells that no more items will be pushed: the pipeline ends when those it has are done.
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
   Returns: true once the pipeline has failed, for good.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API bool spdl_pipeline_failed(const spdl_pipeline *pipeline);

/* The failure that ended the pipeline: stage, item and text.
   Returns: never NULL; result is SPDL_OK when there was no failure.
   Threads: the trainer, after next has returned the failure; any, after a stop outside of stages
            that returned SPDL_OK.
   Blocks:  never.
   Owns:    the pipeline; valid until it is destroyed. */
SPDL_API const spdl_error *spdl_pipeline_error(const spdl_pipeline *pipeline);

/* Frees a batch and the items in it that are not NULL, with the free_item of their stage.
   Returns: nothing; NULL is allowed. Fits free_item.
   Threads: any.
   Blocks:  never, but for free_item.
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
   source gave it; behind SPDL_BATCH the number of the batch. From 0.
   Returns: the number.
   Threads: a stage.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API uint64_t spdl_sequence(const spdl_task *task);

/* The worker that runs this call, from 0; 0 with workers = 0.
   Returns: less than the workers of the pool; with policy.polite less than twice that.
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

/* Hands on one more result of this call, in a stage with .emits. Where the row does not say so the
   call fails, whatever it returns, and the pipeline with it. (A call that returns SPDL_PENDING is
   judged by its completion: there the log is told. So it is with spdl_route.)
   Returns: SPDL_OK, SPDL_E_NOMEM, SPDL_E_INVALID when the row does not say .emits; outside of the
            call, or on another thread, that and a line in the log.
   Threads: a stage.
   Blocks:  never.
   Owns:    the library has the item after SPDL_OK. The input may be handed on, too, once. */
SPDL_API spdl_result spdl_emit(spdl_task *task, void *item);

/* Sends the result of this call down a path, in an SPDL_BRANCH; without it path 0 is taken.
   Returns: SPDL_OK, so that it can be what the function returns; SPDL_E_INVALID when there is no
            such path: the call fails, whatever it returns, with a text that says so, and in a row
            that is no SPDL_BRANCH the pipeline with it. Outside of the call, or on another thread:
            SPDL_E_INVALID and a line in the log.
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
   Blocks:  never, but for free_item.
   Owns:    as for the result of a stage function. */
SPDL_API spdl_result spdl_complete(spdl_deferred deferred, spdl_result result, void *item);

/* Completes a deferred call as failed, and records why, as printf would write it.
   Returns: as spdl_complete.
   Threads: any, as long as the pipeline is there.
   Blocks:  never, but for free_item.
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
/* >>stats Numbers that say which stage is slow. Stage times come from one clock reading per call
   (where they take less than a microsecond, for up to 32 in a row); percentiles from histograms
   whose buckets are at most 1/8 wide, so they are within 6.25 %. Edge k lies after stage k; the
   last is the sink. Every struct here is plain data without pointers: what workers, processes and
   ranks counted can be sent as bytes, and histograms added up. See >>report for numbers in regular
   intervals. */

/* Durations from 0 to 2^43 ns (2.4 h) in buckets: exact below 8 ns, then 8 to each power of two.
   Longer ones fall into the last bucket. All zero is an empty one. */
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

/* The duration that `share` (0 to 1) of the durations did not exceed: the middle of its bucket,
   which is within 6.25 % of the true one, but never more than the maximum.
   Returns: nanoseconds; 0 for an empty histogram.
   Threads: any, while nothing is counted.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API uint64_t spdl_histogram_percentile(const spdl_histogram *histogram, double share);

typedef struct spdl_stage_stats {
    char name[SPDL_NAME_BYTES];
    spdl_kind kind;
    int concurrency;   /* the bound */
    int in_flight;     /* calls running now */
    uint64_t tasks;    /* calls that have ended; for a batch row: batches made */
    uint64_t failures; /* of them, calls that failed; not in the times */
    uint64_t skips;    /* of them, calls that dropped their item; batch: items of drop_last */
    uint64_t retries;  /* calls that were made again for an item that had failed */
    uint64_t freed;    /* items this stage had made or taken that a stop or failure freed */
    uint64_t busy_ns;  /* time spent in calls that did not fail, over all workers */
    bool deferred;     /* calls end when they are completed: busy_ns is no worker's time */
    /* Of the trainer's waits of more than a microsecond or so (not with workers = 0), the part in
       which the item it waited for was here: the sum over all stages is what it waited. */
    uint64_t exposed_ns;      /* in a call of this stage, or held back for order by one */
    uint64_t exposed_idle_ns; /* ready for it, but no worker took it */
    uint64_t mean_ns, p50_ns, p90_ns, p99_ns, max_ns; /* of one call */
    /* Where busy_ns went; the three make busy_ns together. They are estimates, scaled up from calls
       that were measured: of each worker (but its first) one for about each 0.8 ms in the stage. So
       they may go backwards a little. */
    uint64_t cpu_ns;       /* on a processor */
    uint64_t runnable_ns;  /* ready to run, but other threads had the processors */
    uint64_t blocked_ns;   /* asleep: input, locks, timers */
    uint64_t split_calls;  /* how many calls were measured; 0: the three are not known, and 0 */
    bool runnable_known;   /* false: no schedstat; what is runnable is in blocked_ns */
    uint64_t bytes_in;     /* what the stage reported, see spdl_report_bytes */
    uint64_t bytes_out;
} spdl_stage_stats;

typedef struct spdl_edge_stats {
    int buffer_size;
    int depth;              /* items that can be taken now: up to buffer_size + concurrency */
    uint64_t items;         /* items taken so far */
    uint64_t put_wait_ns;   /* time finished items waited for a place among the buffer_size */
    uint64_t get_wait_ns;   /* time the reader was idle for want of an item, open waits too */
    uint64_t empty_ns;      /* time the edge had nothing to take, the open gap too */
    uint64_t elapsed_ns;    /* from the start to now, or to the end of the edge */
    double readiness;       /* 1 - empty_ns / elapsed_ns; 0 before any time has passed */
} spdl_edge_stats;

typedef struct spdl_stats {
    uint64_t elapsed_ns;    /* from the start to now, or to the end */
    int workers;
    int stage_count;        /* rows but the sink: stage[i] feeds edge[i] */
    uint64_t delivered;     /* items handed to the trainer */
    uint64_t first_item_ns; /* from the start to the first of them; 0 before */
    uint64_t wait_ns;       /* time the trainer waited in next, a running wait included */
    uint64_t ready_ns;      /* time it was in next although an item was ready: woken late, or waking
                               a worker, which may take its processor */
    uint64_t workers_runnable_ns; /* time workers were ready to run outside of calls, but other
                               threads had the processors (Linux with schedstat; else 0) */
    uint64_t step_ns;       /* time since the first item that it did not: its own steps */
    uint64_t step_mean_ns;  /* of one step: from an item to the next call of next */
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
   backwards from one snapshot to the next; they are read one after the other. Costs a few
   microseconds for each stage, and nothing on the workers' side. If the last stage can be called
   and a worker sleeps, one is woken: so a trainer may wait until its buffer is full.
   Returns: nothing.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API void spdl_pipeline_stats(const spdl_pipeline *pipeline, spdl_stats *stats);

/* The durations of the calls of one stage so far, failed calls left out.
   Returns: SPDL_OK, SPDL_E_NOT_FOUND (there is no such stage).
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API spdl_result spdl_pipeline_histogram(const spdl_pipeline *pipeline, int stage,
                                             spdl_histogram *histogram);

/* The process at one moment. Between readings a and b it used (b.cpu_ns - a.cpu_ns) /
   (b.time_ns - a.time_ns) cores, others the same of others_ns. */
typedef struct spdl_process_stats {
    uint64_t time_ns;        /* spdl_time_ns of the reading */
    uint64_t cpu_ns;         /* CPU time of this process so far, all threads */
    uint64_t others_ns;      /* and of everything else on the machine (Linux; else 0) */
    double cores_allowed;    /* by affinity and cgroup quotas (elsewhere: the cores there are) */
    uint64_t resident_bytes; /* memory in use (Linux; else 0) */
    uint64_t minor_faults;   /* pages that were mapped or zeroed on first use */
    uint64_t major_faults;   /* pages that were read from a disk */
} spdl_process_stats;

/* Reads what the system knows about this process: a few files of /proc and of the cgroup, some 50
   to 200 microseconds. Nothing reads it unless asked to.
   Returns: nothing; what cannot be had is 0.
   Threads: any.
   Blocks:  never, but for the system calls.
   Owns:    nothing. */
SPDL_API void spdl_process_read(spdl_process_stats *stats);

/* One sentence: who waited for whom, and which stage to look at.
   Returns: the length of the whole sentence, as snprintf does; buffer holds what fits.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API int spdl_stats_verdict(const spdl_stats *stats, char *buffer, size_t bytes);

/* The verdict and a table with a line for each stage and the edge behind it, aligned, with units;
   the stage that limits is marked with ">". Columns that are 0 for all stages (failed, skip, retry,
   freed) are left out.
   Returns: the length of the whole text, as snprintf does; buffer holds what fits.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API int spdl_stats_text(const spdl_stats *stats, char *buffer, size_t bytes);

/* One line without a newline: items, rate, the time left if `length`, the number of items there
   will be, is not 0, and the share of time the trainer waited.
   Returns: the length of the whole text, as snprintf does; buffer holds what fits.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API int spdl_stats_progress(const spdl_stats *stats, uint64_t length, char *buffer,
                                 size_t bytes);

/* The struct as a JSON object: its fields by their names, "stages" and "edges" being arrays, with
   the "verdict", the index of the stage that is the "limit" (or -1), and the "load" of each stage,
   from 0 to 1. Strings are valid UTF-8 whatever the names are.
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
   (a value that makes no sense, a file that cannot be written, a full disk, a closed stderr) is
   warned of once, through the logger of the pipeline, which goes on. The pipeline never waits for
   its reports; a stderr that takes nothing for 100 ms loses one. spdl_pipeline_destroy waits until
   the last one is written.

   Several pipelines. JSON lines are appended, each in one piece, so that pipelines and processes
   may share a file. A page is for one: another pipeline of the process, or a process that runs at
   the same time, takes run.2.html, run.3.html and so on. In place on a terminal only one draws at a
   time, the others write lines.

   JSON lines, schema "spdl.stats.1": one object per line and interval. Fields may be added in later
   versions of the library, none changes its meaning under this name.
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

/* Called on the thread of the reports, at the end once more; `interval` is since the last call.
   Must not destroy the pipeline, which waits for it. */
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

/* Writes the page of a pipeline now: one file without anything it loads from elsewhere. It plots
   what was sampled for desc.report.html or SPDL_REPORT; without them it has the numbers alone. An
   existing file is overwritten.
   Returns: SPDL_OK, SPDL_E_INVALID, SPDL_E_NOMEM, SPDL_E_IO.
   Threads: any.
   Blocks:  while the file is written.
   Owns:    nothing. */
SPDL_API spdl_result spdl_report_html(const spdl_pipeline *pipeline, const char *path);

/* ============================================================================================= */
/* >>trace
   What happened when, as a file for a viewer: Perfetto (ui.perfetto.dev) or chrome://tracing. A
   lane for each worker with its calls (stage, number of the item, result) and the batches it put;
   one for the trainer's waits in next; one for each edge, with the times its reader wanted an item
   and there was none ("empty") and the times a finished item had no place ("full"); a counter for
   the depth of each edge, whenever items were taken or one was put; an arrow from
   the call that made an item to its batch.

   desc.trace names the file. Where it is NULL the environment does: SPDL_TRACE=t.json, or
   SPDL_TRACE=t.json,events=N to set trace_events as well. With desc.trace "" there is none.
   The file is claimed by create and written by destroy. If another pipeline of this process has
   written it, or any process is tracing to it, the name gets a number: t-2.json, up to 99. What
   goes wrong with it is one warning in the log, and the pipeline runs as it would without.

   Memory: (workers + 1 + edges) * trace_events * 32 bytes, allocated by create. Of each thread and
   edge the latest events are kept; how many were dropped is told in the log and in the file. With
   trace_events set and no file the pipeline only records, for spdl_trace_write.

   Debuggers and profilers: the workers have names. Where <sys/sdt.h> is there when the
   implementation is compiled, it has probes for perf and bpftrace: spdl:task_begin and
   spdl:task_end (stage, item), spdl:next_wait_begin and spdl:next_wait_end (last stage, items
   delivered). */

/* Writes what is recorded now to a file of its own, which is created or replaced. The pipeline may
   be running.
   Returns: SPDL_OK, SPDL_E_INVALID (nothing is recorded), SPDL_E_NOMEM, SPDL_E_IO. Why is logged.
   Threads: any; not while the pipeline is destroyed.
   Blocks:  while the file is written.
   Owns:    nothing is kept; memory for a copy of the events is taken and given back. */
SPDL_API spdl_result spdl_trace_write(const spdl_pipeline *pipeline, const char *path);

/* ============================================================================================= */
/* >>cache
   An iterator in front of anything with a next function, a pipeline for one. It hands on items from
   the source, keeps the first num_caches of them, and after return_caches_after items forgets the
   source and hands out the kept ones, over and over. A trainer that runs on it runs as if loading
   cost nothing: the difference is the headspace. */

/* Anything that yields items; spdl_pipeline_next is one, behind spdl_pipeline_next_fn. */
typedef spdl_result (*spdl_next_fn)(void *source, void **item, int64_t timeout_ns);

typedef struct spdl_cache_desc {
    spdl_next_fn next;
    void *source;
    uint64_t num_caches;          /* at least 1 */
    uint64_t return_caches_after; /* default num_caches, and at least that */
    uint64_t stop_after;          /* end after so many items in all; 0: never */
    void (*delete_source)(void *source); /* optional: called once, when the source is done with */
    spdl_free_fn free_item;       /* destroys an item of the source */
    void *(*copy_item)(const void *item); /* optional: see spdl_cache_next; NULL means no memory */
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

/* Frees the kept items, and the source when delete_source is set and was not called yet.
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

/* Whether items now come from the cache.
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
/* >>npz
   Arrays as NumPy writes them: .npy (1.0, 2.0, 3.0) and .npz (stored or deflated members, ZIP64),
   read and written. Every length is compared with the bytes that are there before it is used or
   allocated for, every product is checked. An archive may be read by several threads at the same
   time. A .npy file is an archive of one array named "arr_0".

   What a file costs. One of at most 256 KB is read when it is opened, and closed. Of a larger one
   only the directory is read; the file stays open, reading copies straight to the caller's memory,
   and the first view of a stored array maps the file. The library itself never touches such a
   mapping: if somebody truncates the file, reading fails with SPDL_E_IO, and only a program that
   looks at bytes of a view that are gone gets SIGBUS. Who can rule that out may map a file and give
   it to spdl_npz_open_memory, which copies nothing.

   CRC-32. Reading verifies it in the same pass; a view does not, so that it costs nothing. Either
   can be changed by desc.verify; spdl_npz_check verifies when it suits, spdl_npz_stat tells what is
   known so far. A .npy file has none, and a range of rows is not verified. */

#define SPDL_NPY_MAX_DIMS 64

typedef struct spdl_npy_info {
    char kind;             /* as NumPy's dtype.kind: b i u f c S U V M m; 'V' if structured */
    char byte_order;       /* '<', '>', or '|' where it does not matter or is told by fields */
    bool fortran_order;    /* column-major: the first index varies fastest */
    bool structured;       /* spdl_npz_fields tells the fields */
    int version;           /* of the header: 1, 2 or 3 */
    int ndim;              /* 0 to SPDL_NPY_MAX_DIMS */
    uint64_t itemsize;     /* bytes of one element */
    uint64_t shape[SPDL_NPY_MAX_DIMS];
    uint64_t count;        /* elements: the product of shape, 1 for ndim 0 */
    uint64_t bytes;        /* count * itemsize */
    uint64_t header_bytes; /* in front of the data */
    char descr[256];       /* as in the header, "<f4" or "[('x', '<f4'), ...]"; cut if longer */
} spdl_npy_info;

/* A field of a structured type, in the order of the header. The fields of a field that is
   structured itself follow it, one deeper. Padding is a field without a name. */
typedef struct spdl_npy_field {
    char name[64];         /* UTF-8; cut if longer */
    char descr[32];        /* "<f4", "<M8[us]"; empty if structured; cut if longer */
    char kind, byte_order; /* as in spdl_npy_info */
    bool structured;
    int depth;             /* 0: a field of the element itself */
    int ndim;              /* of a field that is an array; else 0 */
    uint64_t shape[SPDL_NPY_MAX_DIMS];
    uint64_t offset;       /* from the start of the element; in an array of structs, of the first */
    uint64_t itemsize;     /* bytes of one */
    uint64_t count;        /* the product of shape */
} spdl_npy_field;

typedef enum spdl_npz_verify {
    SPDL_NPZ_VERIFY_READS, /* what is read as a whole */
    SPDL_NPZ_VERIFY_ALL,   /* views as well, when they are made */
    SPDL_NPZ_VERIFY_NONE
} spdl_npz_verify;

/* What reading changes; added up. spdl_npz_info then tells the array as it is read. */
#define SPDL_NPZ_NATIVE_BYTES 1u /* the byte order of this machine, in fields too */
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

/* Opens an .npz or .npy file and reads its directory. desc may be NULL.
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

/* How many arrays there are. Of several with one name only the last is told, as NumPy does.
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

/* Whether array `index` is stored rather than deflated.
   Returns: true when spdl_npz_view can work.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API bool spdl_npz_stored(const spdl_npz *npz, size_t index);

/* What is known of a CRC-32. */
typedef enum spdl_npz_crc {
    SPDL_NPZ_CRC_NONE,      /* a .npy file has none */
    SPDL_NPZ_CRC_UNCHECKED, /* nobody looked so far */
    SPDL_NPZ_CRC_GOOD,
    SPDL_NPZ_CRC_BAD
} spdl_npz_crc;

/* What the directory tells about a member. */
typedef struct spdl_npz_member {
    bool stored;
    uint64_t bytes;         /* the array with its header, inflated */
    uint64_t file_bytes;    /* what it takes in the file */
    uint64_t file_offset;   /* of its local header; 0 for .npy */
    uint32_t crc;           /* 0 for .npy */
    spdl_npz_crc crc_state; /* from all reads and checks so far, on any thread */
    uint32_t duplicates;    /* members of the same name before it, which nobody can read */
} spdl_npz_member;

/* Tells about array `index` without looking at it.
   Returns: SPDL_OK, SPDL_E_NOT_FOUND.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API spdl_result spdl_npz_stat(const spdl_npz *npz, size_t index, spdl_npz_member *member);

/* Type, shape and order of array `index`; of a deflated member only the head is inflated.
   error may be NULL.
   Returns: SPDL_OK, SPDL_E_NOT_FOUND, SPDL_E_IO, SPDL_E_FORMAT, SPDL_E_UNSUPPORTED, SPDL_E_LIMIT,
            SPDL_E_NOMEM, SPDL_E_INVALID (info is NULL).
   Threads: any.
   Blocks:  on the file system, when the file is over 256 KB.
   Owns:    nothing. */
SPDL_API spdl_result spdl_npz_info(const spdl_npz *npz, size_t index, spdl_npy_info *info,
                                   spdl_error *error);

/* The fields of a structured array: the first `room` of them to `fields`, and to *count how many
   there are, 0 when the array is not structured. error may be NULL.
   Returns: as spdl_npz_info.
   Threads: any.
   Blocks:  as spdl_npz_info.
   Owns:    nothing. */
SPDL_API spdl_result spdl_npz_fields(const spdl_npz *npz, size_t index, spdl_npy_field *fields,
                                     size_t room, size_t *count, spdl_error *error);

/* Copies the data of array `index`, info.bytes of them, to `data` (`bytes` large), as they are but
   for desc.convert. error may be NULL.
   Returns: as spdl_npz_info, or SPDL_E_INVALID (the buffer is too small, or NULL),
            SPDL_E_CHECKSUM.
   Threads: any.
   Blocks:  as spdl_npz_info.
   Owns:    the caller has `data`; after a failure its content is undefined. */
SPDL_API spdl_result spdl_npz_read(const spdl_npz *npz, size_t index, void *data, size_t bytes,
                                   spdl_error *error);

/* Copies the rows `first` to `first + count - 1` of a stored array: the elements with these first
   indices, each bytes / shape[0] large. Nothing else of the member is read, so its CRC is not
   verified. error may be NULL.
   Returns: as spdl_npz_read, or SPDL_E_UNSUPPORTED for a deflated or a Fortran-ordered array,
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

/* Reads many arrays, faster than one call for each: deflated ones are decoded two or three at a
   time, large ones in parts, and with a pool its workers help. A worker that comes too late to help
   frees what was shared, perhaps after close: an allocator of the archive must outlive the pool, or
   spdl_pool_drain of it. pool and error may be NULL.
   Returns: SPDL_OK, or the result of the first request that failed, which `error` describes; the
            others are read all the same. SPDL_E_NOMEM, SPDL_E_INVALID.
   Threads: any, also a worker of the pool.
   Blocks:  until all are read.
   Owns:    as spdl_npz_read. Requests must not share memory. */
SPDL_API spdl_result spdl_npz_read_many(const spdl_npz *npz, spdl_npz_request *requests,
                                        size_t count, spdl_pool *pool, spdl_error *error);

/* The data of a stored array without a copy. NumPy's own files are not aligned in an .npz: look at
   *aligned (to 64 bytes) before using it as anything but bytes; spdl.h writes aligned ones. Arrays
   that desc.convert would change are refused. error may be NULL.
   Returns: as spdl_npz_info, SPDL_E_UNSUPPORTED for a deflated array or one to convert, with
            SPDL_NPZ_VERIFY_ALL also SPDL_E_CHECKSUM.
   Threads: any.
   Blocks:  as spdl_npz_info.
   Owns:    the archive; valid until close. A file over 256 KB is mapped, see above. */
SPDL_API spdl_result spdl_npz_view(const spdl_npz *npz, size_t index, const void **data,
                                   bool *aligned, spdl_error *error);

/* Verifies the CRC-32 of array `index` whatever desc.verify says; of a .npy file there is none to
   verify. error may be NULL.
   Returns: as spdl_npz_info, or SPDL_E_CHECKSUM.
   Threads: any.
   Blocks:  as spdl_npz_info.
   Owns:    nothing. */
SPDL_API spdl_result spdl_npz_check(const spdl_npz *npz, size_t index, spdl_error *error);

/* Reads the header of a .npy file in memory; allocates nothing. error may be NULL.
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

/* Reads all arrays of a file. desc may be NULL; its max_bytes bounds their sum.
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
#define SPDL__NPZ_ROW(desc_, line_)                                                                \
    spdl__npz_row(spdl__row(SPDL_KIND_PIPE, &spdl_npz_load_spdl, __FILE__, line_, 0, 0), desc_)
#endif
/* clang-format on */

#if !defined(SPDL_STATIC)
extern const spdl_function spdl_npz_load_spdl;
#elif !defined(__cplusplus)
SPDL__UNUSED static const spdl_function spdl_npz_load_spdl;
#endif

/* Writing. The arrays go to a file beside `path`, which takes its place when everything is written:
   whoever opens `path` sees the old file or the whole new one. Members are stored, not compressed,
   and their data aligned, so that they can be viewed; NumPy reads them. */

/* Compresses `bytes` bytes to one raw deflate stream of at most `room` bytes.
   Returns its length, or 0 when it does not fit or is not worth it: then they are stored. */
typedef size_t (*spdl_deflate_fn)(void *to, size_t room, const void *from, size_t bytes,
                                  void *user);

typedef struct spdl_npz_write_desc {
    bool npy;                /* a .npy file, of exactly one array */
    bool sync;               /* have it on the disk before it takes its place */
    size_t align;            /* of the data in the file, a power of two up to 32768; default 64 */
    spdl_deflate_fn deflate; /* optional: compresses what spdl_npz_write gets */
    void *deflate_user;
    spdl_allocator allocator;
    spdl_error *error;       /* optional: why create failed */
} spdl_npz_write_desc;

typedef struct spdl_npz_writer spdl_npz_writer;

/* Begins a file. desc may be NULL.
   Returns: SPDL_OK, SPDL_E_INVALID, SPDL_E_IO, SPDL_E_NOMEM.
   Threads: any.
   Blocks:  on the file system.
   Owns:    the caller closes *writer; on failure it is NULL. */
SPDL_API spdl_result spdl_npz_create(spdl_npz_writer **writer, const char *path,
                                     const spdl_npz_write_desc *desc);

/* Writes an array. Of info count: shape, ndim, fortran_order, and the type: descr, or if that is
   empty kind, itemsize and byte_order (0: this machine's). The name is given without ".npy".
   error may be NULL.
   Returns: SPDL_OK, SPDL_E_INVALID (also for a name that was there), SPDL_E_UNSUPPORTED (objects),
            SPDL_E_LIMIT, SPDL_E_IO, SPDL_E_NOMEM; after the last two it can only be closed.
   Threads: owner.
   Blocks:  on the file system.
   Owns:    `data`, of info's bytes, stay the caller's. */
SPDL_API spdl_result spdl_npz_write(spdl_npz_writer *writer, const char *name,
                                    const spdl_npy_info *info, const void *data,
                                    spdl_error *error);

/* Begins an array whose data come in pieces, by spdl_npz_append; the next array, or finish, ends
   it. error may be NULL.
   Returns: as spdl_npz_write.
   Threads: owner.
   Blocks:  on the file system.
   Owns:    nothing. */
SPDL_API spdl_result spdl_npz_begin(spdl_npz_writer *writer, const char *name,
                                    const spdl_npy_info *info, spdl_error *error);

/* Writes the next `bytes` bytes of the array that was begun. error may be NULL.
   Returns: as spdl_npz_write; SPDL_E_INVALID when it gets more than its shape says.
   Threads: owner.
   Blocks:  on the file system.
   Owns:    `data` stay the caller's. */
SPDL_API spdl_result spdl_npz_append(spdl_npz_writer *writer, const void *data, size_t bytes,
                                     spdl_error *error);

/* Writes array `index` of an archive as it is there, header and all, but stored and aligned; takes
   memory for the array meanwhile. error may be NULL.
   Returns: as spdl_npz_write and spdl_npz_read.
   Threads: owner.
   Blocks:  on the file system.
   Owns:    nothing. */
SPDL_API spdl_result spdl_npz_copy(spdl_npz_writer *writer, const spdl_npz *npz, size_t index,
                                   spdl_error *error);

/* Writes the directory and puts the file in its place. error may be NULL.
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

#ifdef __cplusplus
} /* extern "C" */
#endif

/* ============================================================================================= */
/* >>cpp
   Thin C++ forms of what C does with compound literals. */

#ifdef __cplusplus
inline spdl_stage spdl__row(spdl_kind kind, const spdl_function *fn, const char *file, int line,
                            int size, int buffer_size) {
    spdl_stage row = spdl_stage();
    row.kind = kind;
    row.fn = fn;
    row.file = file;
    row.line = line;
    row.size = size;
    row.buffer_size = buffer_size;
    return row;
}

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

inline spdl_stage spdl__named_row(spdl_kind kind, const char *type, const char *name,
                                  const char *file, int line) {
    spdl_stage row = spdl__row(kind, NULL, file, line, 0, 0);
    row.type = type;
    row.name = name;
    return row;
}

/* As the C function, with SPDL_STAGES(...) as the last argument. */
template <size_t count>
inline spdl_result spdl_pipeline_create(spdl_pipeline **pipeline, const spdl_pipeline_desc *desc,
                                        const spdl_stage (&stages)[count]) {
    return spdl_pipeline_create(pipeline, desc, stages, count);
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
   The only section, with >>os-impl, that knows operating systems; what >>stats-impl reads of the
   process and >>report-impl writes is POSIX. Everything here may be defined before the include.
   SPDL_TEST_POINT(id) marks the places where timing decides, for tests that want to yield or fail
   there. SPDL_DEBUG turns on what finds misuse at run time. */

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(_WIN32)
#error "spdl.h: Windows is not supported yet"
#endif

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

#if defined(__linux__)
#include <sys/syscall.h>
#endif
#if defined(__APPLE__)
#include <pthread/qos.h>
#endif
#include <sys/file.h>
#if defined(__has_include)
#if __has_include(<sys/sdt.h>)
#include <sys/sdt.h>
#define SPDL__SDT 1
#endif
#endif
#ifndef SPDL__SDT
#define SPDL__SDT 0
#endif
#if defined(__linux__) && defined(__aarch64__)
#include <sys/auxv.h>
#endif

#if defined(__linux__) && !defined(SPDL_NO_FUTEX)
#define SPDL__FUTEX 1
#else
#define SPDL__FUTEX 0
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

#if defined(__linux__) && !defined(SPDL_NO_MEMBARRIER) && !SPDL__TSAN
#define SPDL__MEMBARRIER 1
#else
#define SPDL__MEMBARRIER 0
#endif

#ifndef SPDL_MALLOC
#define SPDL_MALLOC(bytes) malloc(bytes)
#define SPDL_FREE(memory) free(memory)
#endif
#ifndef SPDL_PTHREAD_CREATE
#define SPDL_PTHREAD_CREATE pthread_create
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
#define SPDL__COLD __attribute__((noinline)) SPDL__PRIVATE
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

#ifdef SPDL_DEBUG
#include <assert.h>
#endif

/* ============================================================================================= */
/* >>atomics-impl
   Plain integers behind these helpers: _Atomic does not compile in every C++, and a reader should
   see at each access what it orders. load = acquire, store = release, add, exchange and cas =
   acquire and release; relaxed ones say so. `32` is for uint32_t, the others are for uint64_t. */

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
    SPDL__INLINE bool spdl__cas##suffix(type *p, type *expected, type desired) {                  \
        return __atomic_compare_exchange_n(p, expected, desired, false, __ATOMIC_ACQ_REL,          \
                                           __ATOMIC_ACQUIRE);                                      \
    }
SPDL__ATOMICS(uint32_t, 32)
SPDL__ATOMICS(uint64_t, )
#undef SPDL__ATOMICS

SPDL__INLINE uint64_t spdl__or(uint64_t *p, uint64_t bits) {
    return __atomic_fetch_or(p, bits, __ATOMIC_ACQ_REL);
}
SPDL__INLINE uint32_t spdl__or32(uint32_t *p, uint32_t bits) {
    return __atomic_fetch_or(p, bits, __ATOMIC_ACQ_REL);
}

/* A pointer, relaxed. */
SPDL__INLINE void *spdl__load_pointer(void *const *p) {
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}
SPDL__INLINE void spdl__store_pointer(void **p, void *value) {
    __atomic_store_n(p, value, __ATOMIC_RELAXED);
}

/* For claims whose order is carried by something else. */
SPDL__INLINE bool spdl__cas_relaxed(uint64_t *p, uint64_t *expected, uint64_t desired) {
    return __atomic_compare_exchange_n(p, expected, desired, false, __ATOMIC_RELAXED,
                                       __ATOMIC_RELAXED);
}

/* Sequentially consistent, for the few places where two threads write one word each and then read
   the other's. */
SPDL__INLINE uint32_t spdl__load_ordered32(const uint32_t *p) {
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);
}
SPDL__INLINE void spdl__add_ordered32(uint32_t *p, uint32_t value) {
    (void)__atomic_fetch_add(p, value, __ATOMIC_SEQ_CST);
}
SPDL__INLINE void spdl__sub_ordered32(uint32_t *p, uint32_t value) {
    (void)__atomic_fetch_sub(p, value, __ATOMIC_SEQ_CST);
}
SPDL__INLINE uint64_t spdl__load_ordered(const uint64_t *p) {
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);
}
SPDL__INLINE void spdl__store_ordered(uint64_t *p, uint64_t value) {
    __atomic_store_n(p, value, __ATOMIC_SEQ_CST);
}

/* What one thread writes and others read: no read-modify-write is needed. */
SPDL__INLINE void spdl__advance(uint64_t *number, uint64_t more) {
    spdl__store_relaxed(number, spdl__load_relaxed(number) + more);
}

/* The same for what is only told. */
SPDL__INLINE void spdl__count(uint64_t *counter, uint64_t more) {
    if (!SPDL__NO_STATS) spdl__advance(counter, more);
}

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

/* The same after a read-modify-write: on x86 that is one already. */
SPDL__INLINE void spdl__barrier_after_rmw(void) {
#if defined(__x86_64__) || defined(__i386__)
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
#else
    spdl__full_barrier();
#endif
}

SPDL__INLINE void spdl__compiler_barrier(void) { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

/* Asks for the line at p, to write to it. x86 compilers emit prefetchw only in functions that are
   told there is one; every 64-bit x86 has it or ignores it. */
#if defined(__x86_64__)
#define SPDL__PREFETCHES __attribute__((target("prfchw")))
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

/* ============================================================================================= */
/* >>os-impl
   POSIX, with futexes on Linux and a mutex and condition variable per event elsewhere. Windows will
   be a twin of this section with the same function names. In strict modes the C library hides a few
   declarations we need; the functions are always there. glibc goes by what was defined before its
   first header, others by what is defined now. */

#if defined(__linux__) && !defined(__cplusplus)
#if defined(__GLIBC__) ? !defined(__USE_MISC) : !defined(_GNU_SOURCE) && !defined(_DEFAULT_SOURCE)
#define SPDL__STRICT 1
#endif
#endif
#if defined(SPDL__STRICT)
extern long syscall(long number, ...);
extern int clock_gettime(int clock, struct timespec *now);
extern int pthread_getcpuclockid(pthread_t thread, int *clock);
extern int pthread_condattr_setclock(pthread_condattr_t *attributes, int clock);
#endif
#if defined(O_CLOEXEC)
#define SPDL__O_CLOEXEC O_CLOEXEC
#elif defined(__O_CLOEXEC)
#define SPDL__O_CLOEXEC __O_CLOEXEC /* glibc in strict ISO mode */
#else
#define SPDL__O_CLOEXEC 0
#endif
#ifndef CLOCK_MONOTONIC
#define SPDL__CLOCK 1 /* Linux, in strict ISO mode */
#else
#define SPDL__CLOCK CLOCK_MONOTONIC
#endif

SPDL_API uint64_t spdl_time_ns(void) {
    struct timespec now;
    clock_gettime(SPDL__CLOCK, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

#define SPDL__NEVER UINT64_MAX

/* When a wait that starts now has to end. */
SPDL__PRIVATE uint64_t spdl__deadline(int64_t timeout_ns) {
    return timeout_ns < 0 ? SPDL__NEVER : spdl_time_ns() + (uint64_t)timeout_ns;
}

/* Asymmetric barriers, of the rings. Whoever publishes something does a light barrier and then
   looks whether somebody sleeps; whoever is about to sleep says so, does a heavy barrier and then
   looks again. One of the two sees the other. With membarrier(2) the light one costs nothing and
   the heavy one about a microsecond, which only the sleeper pays. Without it both are full
   barriers. */
SPDL__PRIVATE bool spdl__barrier_init(void) {
#if SPDL__MEMBARRIER
    const long query = 0, registration = 1 << 4, expedited = 1 << 3;
    const long commands = syscall(SYS_membarrier, query, 0L, 0L);
    return commands > 0 && (commands & expedited) != 0 &&
           syscall(SYS_membarrier, registration, 0L, 0L) == 0;
#else
    return false;
#endif
}

SPDL__INLINE void spdl__barrier_light(bool asymmetric) {
    if (asymmetric)
        spdl__compiler_barrier();
    else
        spdl__full_barrier();
}

SPDL__PRIVATE void spdl__barrier_heavy(bool asymmetric) {
#if SPDL__MEMBARRIER
    if (asymmetric) {
        (void)syscall(SYS_membarrier, 1L << 3, 0L, 0L);
        return;
    }
#endif
    (void)asymmetric;
    spdl__full_barrier();
}

/* The light barrier for code that does not ask which kind it is: where membarrier may be missing,
   it is not run without it. */
SPDL__INLINE void spdl__barrier_quick(void) {
#if SPDL__MEMBARRIER
    spdl__compiler_barrier();
#else
    spdl__full_barrier();
#endif
}

/* An event: sleepers wait for `word` to change. Any thread may signal. */
typedef struct spdl__event {
    uint32_t word;
    uint32_t waiters;
#if !SPDL__FUTEX
    pthread_mutex_t mutex;
    pthread_cond_t changed;
#endif
} spdl__event;

#if SPDL__FUTEX
SPDL__PRIVATE bool spdl__event_init(spdl__event *event) {
    event->word = event->waiters = 0;
    return true;
}

SPDL__PRIVATE void spdl__event_fini(spdl__event *event) { (void)event; }

/* Sleeps while `word` is unchanged. SPDL_OK may be spurious. */
SPDL__PRIVATE spdl_result spdl__event_sleep(spdl__event *event, uint32_t word, uint64_t deadline) {
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

SPDL__PRIVATE void spdl__event_wake(spdl__event *event, int count) {
    const long wake_private = 1 | 128;
    spdl__add32(&event->word, 1);
    (void)syscall(SYS_futex, &event->word, wake_private, (long)count, NULL, NULL, 0L);
}
#else
SPDL__PRIVATE bool spdl__event_init(spdl__event *event) {
    pthread_condattr_t attributes;
    bool made;
    event->word = event->waiters = 0;
    if (pthread_condattr_init(&attributes) != 0) return false;
#if !defined(__APPLE__)
    (void)pthread_condattr_setclock(&attributes, SPDL__CLOCK);
#endif
    made = pthread_cond_init(&event->changed, &attributes) == 0;
    pthread_condattr_destroy(&attributes);
    if (!made) return false;
    if (pthread_mutex_init(&event->mutex, NULL) == 0) return true;
    pthread_cond_destroy(&event->changed);
    return false;
}

SPDL__PRIVATE void spdl__event_fini(spdl__event *event) {
    pthread_cond_destroy(&event->changed);
    pthread_mutex_destroy(&event->mutex);
}

SPDL__PRIVATE int spdl__event_timedwait(spdl__event *event, uint64_t deadline) {
    struct timespec at;
#if defined(__APPLE__) /* no monotonic condition variables, but a relative wait */
    const uint64_t now = spdl_time_ns();
    const uint64_t left = deadline > now ? deadline - now : 0;
    at.tv_sec = (time_t)(left / 1000000000u);
    at.tv_nsec = (long)(left % 1000000000u);
    return pthread_cond_timedwait_relative_np(&event->changed, &event->mutex, &at);
#else
    at.tv_sec = (time_t)(deadline / 1000000000u);
    at.tv_nsec = (long)(deadline % 1000000000u);
    return pthread_cond_timedwait(&event->changed, &event->mutex, &at);
#endif
}

SPDL__PRIVATE spdl_result spdl__event_sleep(spdl__event *event, uint32_t word, uint64_t deadline) {
    int error = 0;
    pthread_mutex_lock(&event->mutex);
    while (spdl__load_relaxed32(&event->word) == word && error == 0)
        error = deadline == SPDL__NEVER ? pthread_cond_wait(&event->changed, &event->mutex)
                                        : spdl__event_timedwait(event, deadline);
    if (spdl__load_relaxed32(&event->word) != word) error = 0; /* a wake-up is never lost */
    pthread_mutex_unlock(&event->mutex);
    return error == ETIMEDOUT ? SPDL_TIMEOUT : SPDL_OK;
}

SPDL__PRIVATE void spdl__event_wake(spdl__event *event, int count) {
    pthread_mutex_lock(&event->mutex);
    spdl__add32(&event->word, 1);
    pthread_mutex_unlock(&event->mutex);
    if (count == 1)
        pthread_cond_signal(&event->changed);
    else
        pthread_cond_broadcast(&event->changed);
}
#endif

#define SPDL__ALL 0x7fffffff

/* The waiting side of an event count: prepare, look again, then commit or cancel. */
SPDL__PRIVATE uint32_t spdl__event_prepare(spdl__event *event, bool asymmetric) {
    const uint32_t word = spdl__load32(&event->word);
    spdl__add32(&event->waiters, 1);
    spdl__barrier_heavy(asymmetric);
    return word;
}

SPDL__PRIVATE void spdl__event_cancel(spdl__event *event) { spdl__sub32(&event->waiters, 1); }

SPDL__PRIVATE spdl_result spdl__event_commit(spdl__event *event, uint32_t word, uint64_t deadline) {
    const spdl_result result = spdl__event_sleep(event, word, deadline);
    spdl__event_cancel(event);
    return result;
}

/* The other side: call it after publishing what the waiters wait for. */
SPDL__PRIVATE void spdl__event_notify(spdl__event *event, bool asymmetric, int count) {
    spdl__barrier_light(asymmetric);
    if (spdl__load_relaxed32(&event->waiters) != 0) spdl__event_wake(event, count);
}

/* Blocks the signals that may be delivered to any thread, so that the program's handlers run on its
   own threads. Faults stay, and so do profilers and what libc keeps for itself (32 to 34). */
#if defined(__linux__)
typedef struct spdl__signals {
    uint64_t bits; /* as the kernel has them */
} spdl__signals;

SPDL__PRIVATE void spdl__signals_swap(const spdl__signals *set, spdl__signals *old) {
    const long set_mask = 2, bytes = 8;
    (void)syscall(SYS_rt_sigprocmask, set_mask, set, old, bytes);
}

SPDL__PRIVATE void spdl__signals_block(spdl__signals *old) {
    const int keep[] = { 4, 5, 6, 7, 8, 11, 27, 32, 33, 34 }; /* ILL TRAP ABRT BUS FPE SEGV PROF */
    spdl__signals set = { UINT64_MAX };
    size_t i;
    for (i = 0; i < sizeof(keep) / sizeof(keep[0]); ++i)
        set.bits &= ~((uint64_t)1 << (keep[i] - 1));
    spdl__signals_swap(&set, old);
}

SPDL__PRIVATE void spdl__signals_restore(const spdl__signals *old) {
    spdl__signals_swap(old, NULL);
}
#else
typedef sigset_t spdl__signals;

SPDL__PRIVATE void spdl__signals_block(spdl__signals *old) {
    const int keep[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGPROF };
    sigset_t set;
    size_t i;
    sigfillset(&set);
    for (i = 0; i < sizeof(keep) / sizeof(keep[0]); ++i) sigdelset(&set, keep[i]);
    pthread_sigmask(SIG_SETMASK, &set, old);
}

SPDL__PRIVATE void spdl__signals_restore(const spdl__signals *old) {
    pthread_sigmask(SIG_SETMASK, old, NULL);
}
#endif

typedef pthread_t spdl__thread;

SPDL__PRIVATE bool spdl__thread_start(spdl__thread *thread, size_t stack_bytes,
                                      void *(*entry)(void *), void *arg) {
    pthread_attr_t attributes;
    spdl__signals old;
    int error;
    if (pthread_attr_init(&attributes) != 0) return false;
    error = stack_bytes ? pthread_attr_setstacksize(&attributes, stack_bytes) : 0;
    if (error == 0) {
        spdl__signals_block(&old);
        error = SPDL_PTHREAD_CREATE(thread, &attributes, entry, arg);
        spdl__signals_restore(&old);
    }
    pthread_attr_destroy(&attributes);
    return error == 0;
}

SPDL__PRIVATE void spdl__thread_join(spdl__thread thread) { pthread_join(thread, NULL); }

/* A number for the calling thread: an integer or a pointer on every POSIX system we know. */
SPDL__PRIVATE uint64_t spdl__thread_id(void) { return (uint64_t)(uintptr_t)pthread_self(); }

/* The number by which the system tells about the calling thread, or 0. */
SPDL__PRIVATE uint64_t spdl__thread_number(void) {
#if defined(__linux__)
    return (uint64_t)syscall(SYS_gettid);
#else
    return 0;
#endif
}

/* Names the calling thread; Linux shows 15 characters. */
SPDL__PRIVATE void spdl__thread_name(const char *name) {
#if defined(__linux__)
    const long pr_set_name = 15;
    (void)syscall(SYS_prctl, pr_set_name, name, 0L, 0L, 0L);
#elif defined(__APPLE__)
    (void)pthread_setname_np(name);
#else
    (void)name;
#endif
}

SPDL__PRIVATE void spdl__yield(void) { (void)sched_yield(); }

SPDL__PRIVATE uint64_t spdl__process_id(void) { return (uint64_t)getpid(); }

#if defined(__linux__)
#define SPDL__CPU_BITS ((int)(8 * sizeof(unsigned long)))
#define SPDL__CPUS_MAX 8192

typedef struct spdl__cpus {
    unsigned long bits[SPDL__CPUS_MAX / (8 * sizeof(unsigned long))];
} spdl__cpus;

/* The processors that the calling thread may use. Returns how many bytes the system uses for them,
   or 0 where it does not tell. */
SPDL__PRIVATE size_t spdl__cpus_get(spdl__cpus *cpus) {
    const long bytes = syscall(SYS_sched_getaffinity, 0L, (long)sizeof(*cpus), cpus);
    return bytes > 0 ? (size_t)bytes : 0;
}

SPDL__PRIVATE bool spdl__cpus_set(const spdl__cpus *cpus, size_t bytes) {
    return syscall(SYS_sched_setaffinity, 0L, (long)bytes, cpus) == 0;
}
#endif

/* How many processors this thread may use. */
SPDL__PRIVATE int spdl__cpu_count(void) {
#if defined(__linux__)
    spdl__cpus cpus;
    const size_t bytes = spdl__cpus_get(&cpus);
    int count = 0;
    size_t i;
    for (i = 0; i < bytes / sizeof(cpus.bits[0]); ++i) count += __builtin_popcountl(cpus.bits[i]);
    if (count > 0) return count;
#endif
    {
        const long online = sysconf(_SC_NPROCESSORS_ONLN);
        return online > 0 && online < 65536 ? (int)online : 1;
    }
}

/* Processor time a thread has used; where the system does not tell that of others, 0. */
SPDL__PRIVATE uint64_t spdl__thread_cpu_ns(spdl__thread thread) {
#if defined(__linux__)
    struct timespec used;
    int clock;
    if (pthread_getcpuclockid(thread, &clock) != 0 || clock_gettime(clock, &used) != 0) return 0;
    return (uint64_t)used.tv_sec * 1000000000u + (uint64_t)used.tv_nsec;
#else
    (void)thread;
    return 0;
#endif
}

/* How long a thread of this process has been ready to run while others had the processors, so far:
   the second number in its schedstat. False where the system does not tell. */
SPDL__PRIVATE bool spdl__thread_queued_ns(uint64_t number, uint64_t *ns) {
#if defined(__linux__)
    char text[96], *at;
    ssize_t length = -1;
    int file;
    (void)snprintf(text, sizeof(text), "/proc/self/task/%llu/schedstat",
                   (unsigned long long)number);
    file = open(text, O_RDONLY | SPDL__O_CLOEXEC);
    if (file >= 0) length = read(file, text, sizeof(text) - 1);
    if (file >= 0) (void)close(file);
    if (length <= 0) return false;
    text[length] = '\0';
    (void)strtoull(text, &at, 10);
    *ns = strtoull(at, NULL, 10);
    return true;
#else
    (void)number;
    (void)ns;
    return false;
#endif
}

#if defined(__linux__)
/* These are per thread on Linux: `who` 0 is the calling one. */
SPDL__PRIVATE bool spdl__thread_nice(int nice) {
    return syscall(SYS_setpriority, 0L, 0L, (long)nice) == 0;
}

SPDL__PRIVATE bool spdl__thread_sched(spdl_sched sched) {
    const int priority = 0; /* all there is in struct sched_param */
    const long policy = sched == SPDL_SCHED_BATCH ? 3 : 5;
    return sched == SPDL_SCHED_DEFAULT ||
           syscall(SYS_sched_setscheduler, 0L, policy, &priority) == 0;
}

SPDL__PRIVATE bool spdl__thread_cpus(const int *cpus, int count) {
    spdl__cpus mask;
    int i;
    if (count == 0) return true;
    memset(&mask, 0, sizeof(mask));
    for (i = 0; i < count; ++i) {
        if (cpus[i] < 0 || cpus[i] >= SPDL__CPUS_MAX) return false;
        mask.bits[cpus[i] / SPDL__CPU_BITS] |= 1ul << cpus[i] % SPDL__CPU_BITS;
    }
    return spdl__cpus_set(&mask, sizeof(mask));
}

SPDL__PRIVATE bool spdl__policy_apply(const spdl_policy *policy) {
    const spdl_sched sched =
        policy->polite && policy->sched == SPDL_SCHED_DEFAULT ? SPDL_SCHED_BATCH : policy->sched;
    const int nice = policy->polite && policy->nice == 0 ? 19 : policy->nice;
    return spdl__thread_cpus(policy->cpus, policy->cpu_count) && spdl__thread_sched(sched) &&
           (nice == 0 || spdl__thread_nice(nice));
}
#elif defined(__APPLE__)
SPDL__PRIVATE bool spdl__policy_apply(const spdl_policy *policy) {
    qos_class_t qos = QOS_CLASS_DEFAULT;
    if (policy->polite || policy->nice > 0 || policy->sched == SPDL_SCHED_BATCH)
        qos = QOS_CLASS_UTILITY;
    if (policy->sched == SPDL_SCHED_IDLE) qos = QOS_CLASS_BACKGROUND;
    return qos == QOS_CLASS_DEFAULT || pthread_set_qos_class_self_np(qos, 0) == 0;
}
#else
SPDL__PRIVATE bool spdl__policy_apply(const spdl_policy *policy) {
    (void)policy; /* POSIX has no priorities of threads that need no privilege */
    return true;
}
#endif

typedef int spdl__file;
#define SPDL__NO_FILE (-1)

#if defined(O_CLOEXEC)
#define SPDL__O_CLOEXEC O_CLOEXEC
#elif defined(__O_CLOEXEC)
#define SPDL__O_CLOEXEC __O_CLOEXEC /* glibc in strict ISO mode */
#else
#define SPDL__O_CLOEXEC 0
#endif
#if defined(F_DUPFD_CLOEXEC)
#define SPDL__F_DUPFD F_DUPFD_CLOEXEC
#elif defined(__linux__)
#define SPDL__F_DUPFD 1030 /* glibc in strict ISO mode */
#else
#define SPDL__F_DUPFD F_DUPFD
#endif

/* ============================================================================================= */
/* >>core-impl
   Results, memory, errors and messages. No state of its own. */

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

/* Lifts *word to `value`, if it is less. What it is then, or more. */
SPDL__PRIVATE uint64_t spdl__lift(uint64_t *word, uint64_t value) {
    uint64_t old = spdl__load_relaxed(word);
    while (old < value && !spdl__cas_relaxed(word, &old, value)) {}
    return spdl__max(old, value);
}

/* malloc with an alignment: the start of the block is kept in front of what is handed out. */
SPDL__PRIVATE void *spdl__default_alloc(size_t bytes, size_t align) {
    char *block;
    uintptr_t at;
    if (bytes > SIZE_MAX - align - sizeof(void *)) return NULL;
    block = (char *)SPDL_MALLOC(bytes + align + sizeof(void *));
    if (block == NULL) return NULL;
    at = ((uintptr_t)block + sizeof(void *) + align - 1) & ~(uintptr_t)(align - 1);
    memcpy((void *)(at - sizeof(void *)), &block, sizeof(block));
    return (void *)at;
}

/* Memory for `bytes`, at least as aligned as a pointer; NULL when there is none. */
SPDL__PRIVATE void *spdl__alloc(const spdl_allocator *allocator, size_t bytes, size_t align) {
    if (align < sizeof(void *)) align = sizeof(void *);
    if (allocator->alloc_fn != NULL) return allocator->alloc_fn(bytes, align, allocator->user);
    return spdl__default_alloc(bytes, align);
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
SPDL__PRIVATE spdl_result spdl__error_set(spdl_error *error, spdl_result result, const char *format,
                                          ...) SPDL__PRINTF(3, 4);
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
SPDL__PRIVATE void spdl__tell(const spdl_logger *logger, spdl_log_level level, const char *format,
                              ...) SPDL__PRINTF(3, 4);
SPDL__PRIVATE void spdl__tell(const spdl_logger *logger, spdl_log_level level, const char *format,
                              ...) {
    char text[SPDL_TEXT_BYTES + 1024]; /* with the name of a file */
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    spdl__log(logger, level, text);
}

/* Copies a name, cut to what fits. */
SPDL__PRIVATE void spdl__name_copy(char name[SPDL_NAME_BYTES], const char *from) {
    size_t length = strlen(from);
    if (length >= SPDL_NAME_BYTES) length = SPDL_NAME_BYTES - 1;
    memcpy(name, from, length);
    name[length] = '\0';
}

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
        spdl__yield();
    return true;
}

/* ============================================================================================= */
/* >>ring-core
   The lock-free part of the rings: positions, slots and the words that sleepers and closers leave
   for the other side. It never sleeps and calls nothing of an operating system, so it can be cut
   out between its tag and the next one and given to a model checker: it needs the integer types,
   the ring's declarations, memcpy and the helpers of >>atomics-impl, spdl__min and spdl__max.

   SPSC, an index ring: tail and head count items. Each side keeps what it last saw of the other
   side's index and looks again only when that runs out. Wait-free.

   Stamped rings, the other modes: a position is an index into the slots (low bits) and a lap (the
   bits above). Each slot has a stamp: a push may fill the slot whose stamp equals tail, a pop may
   empty the slot whose stamp equals head + 1. That is exact at any capacity, 1 included. With a
   capacity that is no power of two the index `capacity` has no slot: the position after the last
   slot is the first of the next lap. A side with one thread on it (the producer of SPMC, the
   consumer of MPSC) stores its index, the others compare and swap. (Dmitry Vyukov's bounded queue
   with the laps of crossbeam's array channel.)

   Closing must refuse every push that starts later, and let pops drain every push that was
   accepted before one of them says SPDL_CLOSED.
   - Many producers: a mark in tail, so that every later claim fails.
   - One producer, which stores tail and so cannot see a mark: `end` is the position where the ring
     ends, SPDL__RING_OPEN until it is decided by one compare-and-swap. The closer sets CLOSING,
     does a heavy barrier and sets CLOSED. A producer looks at CLOSING after it has stored tail,
     behind a light barrier: it sees CLOSING, or the closer and everyone who sees CLOSED see its
     tail. If it does, it must win `end` for its push or take tail back. In SPSC the consumer is the
     other one who may decide: when it sees CLOSED and an empty ring. In SPMC the closer decides,
     and only then sets CLOSED, so that consumers never look at a tail that may be taken back.

   Threads: each field says who writes it. Slots are handed over by their stamp or by the index. */

#define SPDL__RING_OPEN UINT64_MAX
#define SPDL__RING_MARK ((uint64_t)1 << 63)
#define SPDL__RING_CLOSING 0x80000000u /* in pops_waiting, above the number of waiting pops */
#define SPDL__RING_CLOSED 0x40000000u
#define SPDL__RING_WAITING 0x3fffffffu
#define SPDL__RING_AHEAD 64 /* items of credit, and how far ahead lines are fetched */
#define SPDL__RING_FETCHED (256 * 1024)

/* A slot of a stamped ring of 8-byte items. */
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
    uint64_t push_mask, pop_mask; /* index_mask, or 0 when there is no quick path */
    spdl__ring_cell *push_cells, *pop_cells; /* the slots, or a cell that never fits */
    unsigned char *slots;
    size_t item_bytes;
    size_t stride;
    uint64_t line_items; /* how many begin in a line of 64 bytes, at least 1 */
    spdl__ring_cell no_cell;
    char pad0[SPDL_CACHE_LINE];
    /* written by producers */
    uint64_t tail;
    char pad1[SPDL_CACHE_LINE];
    uint64_t limit;     /* SPSC: the producer may push up to here unasked; close sets it to 0 */
    uint64_t head_seen; /* SPSC: the producer's copy of head */
    char pad2[SPDL_CACHE_LINE];
    /* written by consumers */
    uint64_t head;
    char pad3[SPDL_CACHE_LINE];
    uint64_t tail_seen; /* SPSC: the consumer's copy of tail */
    bool quick_pops;    /* SPSC: until the consumer has decided the end */
    char pad4[SPDL_CACHE_LINE];
    /* written by whoever is about to sleep, and by close; read by all */
    uint32_t pops_waiting;
    uint32_t pushes_waiting;
    uint64_t end; /* SPSC and SPMC */
    char pad5[SPDL_CACHE_LINE];
} spdl__ring_core;

SPDL__PRIVATE void spdl__copy_item(void *to, const void *from, size_t bytes) {
    if (bytes == sizeof(uint64_t))
        memcpy(to, from, sizeof(uint64_t));
    else
        memcpy(to, from, bytes);
}

/* Relaxed: behind a light barrier where it matters, elsewhere a hint. */
SPDL__PRIVATE bool spdl__ring_closing(const spdl__ring_core *ring) {
    return (spdl__load_relaxed32(&ring->pops_waiting) & SPDL__RING_CLOSING) != 0;
}

/* ---- SPSC ---- */

SPDL__PRIVATE unsigned char *spdl__spsc_slot(const spdl__ring_core *ring, uint64_t at) {
    return ring->slots + (size_t)(at & ring->index_mask) * ring->stride;
}

/* How many of `n` items from `at` on lie side by side. */
SPDL__PRIVATE uint64_t spdl__spsc_run(const spdl__ring_core *ring, uint64_t at, uint64_t n) {
    return spdl__min(n, ring->index_mask + 1 - (at & ring->index_mask));
}

/* Producer. How many of `n` items there is room for. */
SPDL__PRIVATE uint64_t spdl__spsc_room(spdl__ring_core *ring, uint64_t tail, uint64_t n) {
    if (ring->head_seen + ring->capacity - tail < n)
        ring->head_seen = spdl__load(&ring->head); /* pairs with its store in spdl__spsc_release:
                                                      the slot was read before it is reused */
    return spdl__min(n, ring->head_seen + ring->capacity - tail);
}

/* Producer. CLOSING was seen behind the store of tail + n: is the push inside the ring? It is when
   its `end` is the one that counts; otherwise the consumer was told the end before it and never
   looks at tail again. In both cases nothing is pushed any more. */
SPDL__PRIVATE spdl_result spdl__spsc_settle(spdl__ring_core *ring, uint64_t tail, uint64_t n) {
    uint64_t end = SPDL__RING_OPEN;
    spdl__store_relaxed(&ring->limit, 0);
    SPDL_TEST_POINT("ring about to settle");
    /* pairs with the cas of end in spdl__spsc_look: who wins there has not seen this tail */
    if (spdl__cas(&ring->end, &end, tail + n) || end > tail) return SPDL_OK;
    spdl__store_relaxed(&ring->tail, tail);
    return SPDL_CLOSED;
}

/* Producer. Hands over n items that were written from tail on. */
SPDL__PRIVATE spdl_result spdl__spsc_publish(spdl__ring_core *ring, uint64_t tail, uint64_t n) {
    /* pairs with the load of tail in spdl__spsc_look: the items are there before their index */
    spdl__store(&ring->tail, tail + n);
    spdl__barrier_light(ring->asymmetric); /* pairs with the heavy one in close */
    return spdl__ring_closing(ring) ? spdl__spsc_settle(ring, tail, n) : SPDL_OK;
}

/* Producer. Fetches the lines of free slots from `from` to `to` for writing: they were last read by
   the other core. Rings that are larger than a cache near the core lose by it. */
SPDL__PREFETCHES
SPDL__COLD void spdl__spsc_fetch(const spdl__ring_core *ring, uint64_t from, uint64_t to) {
    if (ring->index_mask * ring->stride > SPDL__RING_FETCHED) return;
    for (; from < to; from += ring->line_items) spdl__prefetch_write(spdl__spsc_slot(ring, from));
}

/* Producer. How far the quick path may go after a push of one item: not beyond what is known to be
   free, nor beyond what was fetched. This comes before publish, whose look at CLOSING undoes it
   unless the closer's store of 0 is still to come. */
SPDL__PRIVATE void spdl__spsc_credit(spdl__ring_core *ring, uint64_t from) {
    uint64_t room;
    if (!ring->quick) return;
    room = spdl__spsc_room(ring, from, 2 * SPDL__RING_AHEAD);
    spdl__store_relaxed(&ring->limit, from + spdl__min(room, SPDL__RING_AHEAD));
    spdl__spsc_fetch(ring, from + SPDL__RING_AHEAD, from + room);
}

SPDL__PRIVATE spdl_result spdl__spsc_push_n(spdl__ring_core *ring, const void *items, uint64_t n,
                                            uint64_t *moved) {
    const uint64_t tail = spdl__load_relaxed(&ring->tail);
    uint64_t run, free_to;
    if (spdl__ring_closing(ring)) return SPDL_CLOSED;
    n = spdl__spsc_room(ring, tail, n);
    if (n == 0) return SPDL_FULL;
    *moved = n;
    if (n == 1) {
        spdl__copy_item(spdl__spsc_slot(ring, tail), items, ring->stride);
        spdl__spsc_credit(ring, tail + 1);
        return spdl__spsc_publish(ring, tail, 1);
    }
    run = spdl__spsc_run(ring, tail, n);
    memcpy(spdl__spsc_slot(ring, tail), items, (size_t)run * ring->stride);
    if (run < n)
        memcpy(ring->slots, (const char *)items + run * ring->stride,
               (size_t)(n - run) * ring->stride);
    free_to = ring->head_seen + ring->capacity;
    spdl__spsc_fetch(ring, tail + n + SPDL__RING_AHEAD,
                     spdl__min(tail + 2 * n + SPDL__RING_AHEAD, free_to));
    return spdl__spsc_publish(ring, tail, n);
}

/* Producer. Up to `want` free slots that lie side by side. */
SPDL__PRIVATE spdl_result spdl__spsc_reserve(spdl__ring_core *ring, uint64_t want, void **items,
                                             uint64_t *have) {
    const uint64_t tail = spdl__load_relaxed(&ring->tail);
    if (spdl__ring_closing(ring)) return SPDL_CLOSED;
    *items = spdl__spsc_slot(ring, tail);
    *have = spdl__spsc_run(ring, tail, spdl__spsc_room(ring, tail, want));
    return *have > 0 ? SPDL_OK : SPDL_FULL;
}

SPDL__PRIVATE spdl_result spdl__spsc_commit(spdl__ring_core *ring, uint64_t n) {
    const uint64_t tail = spdl__load_relaxed(&ring->tail);
    if (spdl__ring_closing(ring)) return SPDL_CLOSED;
    if (n > spdl__spsc_room(ring, tail, n)) return SPDL_E_INVALID;
    return spdl__spsc_publish(ring, tail, n);
}

/* Consumer. Looks for items beyond what it has seen. `end` is looked at before tail: once it is
   decided, tail may be about to be taken back. */
SPDL__PRIVATE spdl_result spdl__spsc_look(spdl__ring_core *ring, uint64_t head) {
    for (;;) {
        /* pairs with the store of CLOSED in close */
        const bool closed = (spdl__load32(&ring->pops_waiting) & SPDL__RING_CLOSED) != 0;
        uint64_t end = SPDL__RING_OPEN;
        if (closed && head >= spdl__load(&ring->end)) return SPDL_CLOSED;
        ring->tail_seen = spdl__load(&ring->tail); /* pairs with its store in spdl__spsc_publish */
        if (ring->tail_seen != head) return SPDL_OK;
        if (!closed) return SPDL_EMPTY;
        SPDL_TEST_POINT("ring about to end");
        /* pairs with the cas of end in spdl__spsc_settle: who loses here sees its tail next */
        if (!spdl__cas(&ring->end, &end, head)) continue;
        ring->quick_pops = false; /* they look at tail only */
        return SPDL_CLOSED;
    }
}

/* Consumer. How many of `n` items are there; `result` says why when there are none. */
SPDL__PRIVATE uint64_t spdl__spsc_there(spdl__ring_core *ring, uint64_t head, uint64_t n,
                                        spdl_result *result) {
    *result = ring->tail_seen - head < n ? spdl__spsc_look(ring, head) : SPDL_OK;
    return spdl__min(n, ring->tail_seen - head);
}

/* Consumer. n items were read from head on. */
SPDL__PRIVATE void spdl__spsc_release(spdl__ring_core *ring, uint64_t head, uint64_t n) {
    spdl__store(&ring->head, head + n); /* pairs with the load of head in spdl__spsc_room */
}

SPDL__PRIVATE spdl_result spdl__spsc_pop_n(spdl__ring_core *ring, void *items, uint64_t n,
                                           uint64_t *moved) {
    const uint64_t head = spdl__load_relaxed(&ring->head);
    spdl_result result;
    uint64_t run;
    n = spdl__spsc_there(ring, head, n, &result);
    if (n == 0) return result;
    *moved = n;
    if (n == 1) {
        spdl__copy_item(items, spdl__spsc_slot(ring, head), ring->stride);
        spdl__spsc_release(ring, head, 1);
        return SPDL_OK;
    }
    run = spdl__spsc_run(ring, head, n);
    memcpy(items, spdl__spsc_slot(ring, head), (size_t)run * ring->stride);
    if (run < n)
        memcpy((char *)items + run * ring->stride, ring->slots,
               (size_t)(n - run) * ring->stride);
    spdl__spsc_release(ring, head, n);
    return SPDL_OK;
}

SPDL__PRIVATE spdl_result spdl__spsc_peek(spdl__ring_core *ring, uint64_t want, void **items,
                                          uint64_t *have) {
    const uint64_t head = spdl__load_relaxed(&ring->head);
    spdl_result result;
    *items = spdl__spsc_slot(ring, head);
    *have = spdl__spsc_run(ring, head, spdl__spsc_there(ring, head, want, &result));
    return *have > 0 ? SPDL_OK : result;
}

SPDL__PRIVATE spdl_result spdl__spsc_release_peeked(spdl__ring_core *ring, uint64_t n) {
    const uint64_t head = spdl__load_relaxed(&ring->head);
    if (n > ring->tail_seen - head) return SPDL_E_INVALID;
    spdl__spsc_release(ring, head, n);
    return SPDL_OK;
}

/* ---- stamped rings ---- */

/* A position that may stand behind the last slot is the first of the next lap. */
SPDL__PRIVATE uint64_t spdl__ring_at(const spdl__ring_core *ring, uint64_t at) {
    if ((at & ring->index_mask) < ring->capacity) return at;
    return (at | ring->index_mask) + 1;
}

SPDL__PRIVATE uint64_t spdl__ring_next(const spdl__ring_core *ring, uint64_t at) {
    return spdl__ring_at(ring, at + 1);
}

SPDL__PRIVATE uint64_t *spdl__ring_stamp(const spdl__ring_core *ring, uint64_t at) {
    return (uint64_t *)(void *)(ring->slots + (size_t)(at & ring->index_mask) * ring->stride);
}

/* How many of up to n slots from *at on have the stamp of their position plus `full`; *at becomes
   the position after them. The loads pair with the stores of the stamps: a push sees that the old
   item has been read, a pop that the new one is there. */
SPDL__PRIVATE uint64_t spdl__ring_count_fit(const spdl__ring_core *ring, uint64_t *at, uint64_t n,
                                            uint64_t full) {
    uint64_t fit = 0;
    while (fit < n && spdl__load(spdl__ring_stamp(ring, *at)) == *at + full) {
        *at = spdl__ring_next(ring, *at);
        ++fit;
    }
    return fit;
}

/* SPMC producer. Claims up to `next` and finds out whether close was faster. */
SPDL__PRIVATE bool spdl__spmc_claim(spdl__ring_core *ring, uint64_t tail, uint64_t next) {
    uint64_t end = SPDL__RING_OPEN;
    spdl__store(&ring->tail, next);        /* pairs with its load in close */
    spdl__barrier_light(ring->asymmetric); /* pairs with the heavy one in close */
    if (!spdl__ring_closing(ring)) return true;
    SPDL_TEST_POINT("ring about to settle");
    /* pairs with the cas of end in spdl__ring_core_close */
    if (spdl__cas(&ring->end, &end, next) || end > tail) return true;
    spdl__store_relaxed(&ring->tail, tail);
    return false;
}

/* Fills claimed slots. */
SPDL__PRIVATE void spdl__ring_fill(const spdl__ring_core *ring, uint64_t at, const void *items,
                                   uint64_t n) {
    const char *from = (const char *)items;
    SPDL_TEST_POINT("ring claimed for push");
    for (; n > 0; --n) {
        uint64_t *stamp = spdl__ring_stamp(ring, at);
        spdl__copy_item(stamp + 1, from, ring->item_bytes);
        spdl__store(stamp, at + 1); /* pairs with its load in a pop: the item is there */
        at = spdl__ring_next(ring, at);
        from += ring->item_bytes;
    }
}

/* Empties claimed slots. */
SPDL__PRIVATE void spdl__ring_empty(const spdl__ring_core *ring, uint64_t at, void *items,
                                    uint64_t n) {
    char *to = (char *)items;
    SPDL_TEST_POINT("ring claimed for pop");
    for (; n > 0; --n) {
        uint64_t *stamp = spdl__ring_stamp(ring, at);
        spdl__copy_item(to, stamp + 1, ring->item_bytes);
        /* pairs with its load in a push: the item was read; free in the next lap */
        spdl__store(stamp, at + ring->index_mask + 1);
        at = spdl__ring_next(ring, at);
        to += ring->item_bytes;
    }
}

/* SPMC. The closing word is looked at first: a push that starts after close must not claim. */
SPDL__PRIVATE spdl_result spdl__spmc_push_n(spdl__ring_core *ring, const void *items, uint64_t n,
                                            uint64_t *moved) {
    const uint64_t tail = spdl__load_relaxed(&ring->tail);
    uint64_t next = tail;
    if (spdl__ring_closing(ring)) return SPDL_CLOSED;
    n = spdl__ring_count_fit(ring, &next, n, 0);
    if (n == 0) return SPDL_FULL;
    if (!spdl__spmc_claim(ring, tail, next)) return SPDL_CLOSED;
    spdl__ring_fill(ring, tail, items, n);
    *moved = n;
    return SPDL_OK;
}

/* MPMC and MPSC. The claim is relaxed: stamps carry the order. It fails when the ring is closed. */
SPDL__PRIVATE spdl_result spdl__mp_push_n(spdl__ring_core *ring, const void *items, uint64_t n,
                                          uint64_t *moved) {
    uint64_t raw = spdl__load_relaxed(&ring->tail);
    while ((raw & SPDL__RING_MARK) == 0) {
        const uint64_t tail = spdl__ring_at(ring, raw);
        uint64_t next = tail;
        const uint64_t fit = spdl__ring_count_fit(ring, &next, n, 0);
        if (fit > 0) {
            if (!spdl__cas_relaxed(&ring->tail, &raw, next)) continue;
            spdl__ring_fill(ring, tail, items, fit);
            *moved = fit;
            return SPDL_OK;
        }
        if ((int64_t)(spdl__load(spdl__ring_stamp(ring, tail)) - tail) < 0) {
            /* the slot still holds an item of the last lap, unless others have moved on */
            const uint64_t seen = spdl__load(&ring->tail);
            if (seen == raw) return SPDL_FULL;
            raw = seen;
        } else {
            raw = spdl__load_relaxed(&ring->tail); /* another producer was faster */
        }
    }
    return SPDL_CLOSED;
}

/* Nothing is at `head`: for now, or for good? An open ring is told from one word that is seldom
   written: looking at tail would take it from the producers. */
SPDL__PRIVATE spdl_result spdl__ring_ended(const spdl__ring_core *ring, uint64_t head) {
    uint64_t end;
    /* pairs with the store of CLOSED in close, which comes after the mark or the decision on end */
    if ((spdl__load32(&ring->pops_waiting) & SPDL__RING_CLOSED) == 0) return SPDL_EMPTY;
    if (ring->mode == SPDL_RING_SPMC)
        end = spdl__load(&ring->end);
    else
        end = spdl__ring_at(ring, spdl__load(&ring->tail) & ~SPDL__RING_MARK);
    return head >= end ? SPDL_CLOSED : SPDL_EMPTY;
}

/* MPMC and SPMC. As spdl__mp_push_n, at the other end. */
SPDL__PRIVATE spdl_result spdl__mc_pop_n(spdl__ring_core *ring, void *items, uint64_t n,
                                         uint64_t *moved) {
    uint64_t raw = spdl__load_relaxed(&ring->head);
    for (;;) {
        const uint64_t head = spdl__ring_at(ring, raw);
        uint64_t next = head;
        const uint64_t fit = spdl__ring_count_fit(ring, &next, n, 1);
        if (fit > 0) {
            if (!spdl__cas_relaxed(&ring->head, &raw, next)) continue;
            spdl__ring_empty(ring, head, items, fit);
            *moved = fit;
            return SPDL_OK;
        }
        if ((int64_t)(spdl__load(spdl__ring_stamp(ring, head)) - head) <= 0) {
            const spdl_result result = spdl__ring_ended(ring, head);
            const uint64_t seen = spdl__load(&ring->head);
            if (seen == raw) return result;
            raw = seen;
        } else {
            raw = spdl__load_relaxed(&ring->head); /* another consumer was faster */
        }
    }
}

/* MPSC. Nobody else moves head. */
SPDL__PRIVATE spdl_result spdl__mpsc_pop_n(spdl__ring_core *ring, void *items, uint64_t n,
                                           uint64_t *moved) {
    const uint64_t head = spdl__load_relaxed(&ring->head);
    uint64_t next = head;
    n = spdl__ring_count_fit(ring, &next, n, 1);
    if (n == 0) return spdl__ring_ended(ring, head);
    spdl__store_relaxed(&ring->head, next); /* for spdl_ring_count; the stamps carry the order */
    spdl__ring_empty(ring, head, items, n);
    *moved = n;
    return SPDL_OK;
}

/* ---- beginning ---- */

/* How many slots: a stamped ring has one more that never fits where an index has no slot. */
SPDL__PRIVATE size_t spdl__ring_slot_count(const spdl__ring_core *ring) {
    if (ring->mode == SPDL_RING_SPSC) return (size_t)ring->index_mask + 1;
    return (size_t)(ring->capacity + (ring->capacity <= ring->index_mask));
}

/* Sizes, of a ring that is all zeros; `quick` says whether spdl__barrier_quick is a barrier. Then
   `slots` must be set to spdl__ring_slot_count slots of `stride` bytes, and the ring started. */
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
    ring->end = SPDL__RING_OPEN;
    ring->quick = quick && item_bytes == sizeof(uint64_t);
}

/* First stamps, and which quick paths there are. */
SPDL__PRIVATE void spdl__ring_core_start(spdl__ring_core *ring) {
    const size_t count = spdl__ring_slot_count(ring);
    const bool stamped = ring->mode != SPDL_RING_SPSC;
    const bool push = stamped && ring->quick && ring->mode != SPDL_RING_SPMC;
    const bool pop = stamped && ring->quick && ring->mode != SPDL_RING_MPSC;
    uint64_t i;
    for (i = 0; stamped && i < count; ++i)
        *spdl__ring_stamp(ring, i) = i < ring->capacity ? i : UINT64_MAX;
    ring->no_cell.stamp = UINT64_MAX;
    ring->quick_pops = ring->quick && !stamped;
    ring->push_cells = push ? (spdl__ring_cell *)(void *)ring->slots : &ring->no_cell;
    ring->push_mask = push ? ring->index_mask : 0;
    ring->pop_cells = pop ? (spdl__ring_cell *)(void *)ring->slots : &ring->no_cell;
    ring->pop_mask = pop ? ring->index_mask : 0;
}

/* ---- the quick paths: one item of 8 bytes, nothing unusual ---- */

/* False: take the long way. True: done, and *waiting is what stands in pops_waiting; when it is not
   0 there is somebody to wake or, in SPSC, a close to settle. An SPSC ring has a limit above tail,
   an MPMC or MPSC ring has cells whose stamp may equal tail; nothing else has either. */
SPDL__INLINE bool spdl__ring_quick_push(spdl__ring_core *ring, const void *item,
                                         uint32_t *waiting) {
    uint64_t tail = spdl__load_relaxed(&ring->tail);
    spdl__ring_cell *cell;
    if (__builtin_expect(tail < spdl__load_relaxed(&ring->limit), 1)) {
        memcpy(ring->slots + (tail & ring->index_mask) * sizeof(uint64_t), item, sizeof(uint64_t));
        SPDL_TEST_POINT("ring filled");
        spdl__store(&ring->tail, tail + 1); /* pairs with its load in spdl__spsc_look */
        spdl__barrier_quick(); /* pairs with the heavy ones of a sleeper and of close */
        *waiting = spdl__load_relaxed32(&ring->pops_waiting);
        return true;
    }
    cell = ring->push_cells + (tail & ring->push_mask);
    /* pairs with the store of the stamp in a pop: the old item was read */
    if (spdl__load(&cell->stamp) != tail) return false;
    if (!spdl__cas_relaxed(&ring->tail, &tail, tail + 1)) return false;
    SPDL_TEST_POINT("ring claimed for push");
    memcpy(&cell->item, item, sizeof(uint64_t));
    spdl__store(&cell->stamp, tail + 1); /* pairs with its load in a pop: the item is there */
    spdl__barrier_quick();               /* pairs with the heavy one of a sleeper */
    *waiting = spdl__load_relaxed32(&ring->pops_waiting);
    return true;
}

/* As spdl__ring_quick_push, at the other end. */
SPDL__INLINE bool spdl__ring_quick_pop(spdl__ring_core *ring, void *item, uint32_t *waiting) {
    uint64_t head = spdl__load_relaxed(&ring->head);
    spdl__ring_cell *cell;
    if (__builtin_expect(ring->quick_pops, 1)) {
        if (head == ring->tail_seen) {
            ring->tail_seen = spdl__load(&ring->tail); /* pairs with its store in a push */
            if (head == ring->tail_seen) return false;
        }
        memcpy(item, ring->slots + (head & ring->index_mask) * sizeof(uint64_t), sizeof(uint64_t));
        SPDL_TEST_POINT("ring emptied");
        spdl__store(&ring->head, head + 1); /* pairs with its load in spdl__spsc_room */
        spdl__barrier_quick();              /* pairs with the heavy one of a sleeper */
        *waiting = spdl__load_relaxed32(&ring->pushes_waiting);
        return true;
    }
    cell = ring->pop_cells + (head & ring->pop_mask);
    /* pairs with the store of the stamp in a push: the item is there */
    if (spdl__load(&cell->stamp) != head + 1) return false;
    if (!spdl__cas_relaxed(&ring->head, &head, head + 1)) return false;
    SPDL_TEST_POINT("ring claimed for pop");
    memcpy(item, &cell->item, sizeof(uint64_t));
    /* pairs with its load in a push: the item was read */
    spdl__store(&cell->stamp, head + ring->index_mask + 1);
    spdl__barrier_quick(); /* pairs with the heavy one of a sleeper */
    *waiting = spdl__load_relaxed32(&ring->pushes_waiting);
    return true;
}

/* ---- all modes ---- */

SPDL__PRIVATE spdl_result spdl__ring_core_push(spdl__ring_core *ring, const void *items,
                                               uint64_t n, uint64_t *moved) {
    if (ring->mode == SPDL_RING_SPSC) return spdl__spsc_push_n(ring, items, n, moved);
    if (ring->mode == SPDL_RING_SPMC) return spdl__spmc_push_n(ring, items, n, moved);
    return spdl__mp_push_n(ring, items, n, moved);
}

SPDL__PRIVATE spdl_result spdl__ring_core_pop(spdl__ring_core *ring, void *items, uint64_t n,
                                              uint64_t *moved) {
    if (ring->mode == SPDL_RING_SPSC) return spdl__spsc_pop_n(ring, items, n, moved);
    if (ring->mode == SPDL_RING_MPSC) return spdl__mpsc_pop_n(ring, items, n, moved);
    return spdl__mc_pop_n(ring, items, n, moved);
}

/* Everything that close does but for waking. Any thread, any number of times. */
SPDL__PRIVATE void spdl__ring_core_close(spdl__ring_core *ring) {
    const bool spsc = ring->mode == SPDL_RING_SPSC, spmc = ring->mode == SPDL_RING_SPMC;
    uint64_t end = SPDL__RING_OPEN;
    if (!spsc && !spmc) (void)spdl__or(&ring->tail, SPDL__RING_MARK);
    (void)spdl__or32(&ring->pops_waiting, SPDL__RING_CLOSING);
    SPDL_TEST_POINT("ring closing");
    spdl__barrier_heavy(ring->asymmetric); /* pairs with the light ones after tail is stored */
    /* pairs with the store of tail and the cas of end in spdl__spmc_claim */
    if (spmc) (void)spdl__cas(&ring->end, &end, spdl__load(&ring->tail));
    if (spsc) spdl__store_relaxed(&ring->limit, 0);
    SPDL_TEST_POINT("ring about to be closed");
    (void)spdl__or32(&ring->pops_waiting, SPDL__RING_CLOSED); /* pairs with its loads in pops */
}

/* Items pushed before position `at` was reached. */
SPDL__PRIVATE uint64_t spdl__ring_items(const spdl__ring_core *ring, uint64_t at) {
    const uint64_t lap = ring->index_mask + 1;
    if (ring->mode == SPDL_RING_SPSC) return at;
    return at / lap * ring->capacity + (at & ring->index_mask);
}

/* Items that were pushed and popped so far; the pair is consistent. Claims are relaxed, so tail may
   be seen older than head where stores do not reach all others at once: then nothing is counted as
   inside. The second look at head has to come after the one at tail: both are acquires. */
SPDL__PRIVATE void spdl__ring_totals(const spdl__ring_core *ring, uint64_t *pushed,
                                     uint64_t *popped) {
    uint64_t head, tail;
    do { /* a head that stood still around the tail */
        head = spdl__load(&ring->head);
        tail = spdl__load(&ring->tail) & ~SPDL__RING_MARK;
    } while (head != spdl__load(&ring->head));
    tail = spdl__min(tail, spdl__load(&ring->end)); /* a push that is about to be taken back */
    *popped = spdl__ring_items(ring, head);
    *pushed = spdl__max(spdl__ring_items(ring, tail), *popped);
    *pushed = spdl__min(*pushed, *popped + ring->capacity);
}

/* ============================================================================================= */
/* >>ring-impl
   What is around the core: making, waiting, waking, the calls. Whoever sleeps says so in
   pops_waiting or pushes_waiting, does a heavy barrier and tries once more; whoever pushes or pops
   does a light barrier afterwards and looks there. One of the two sees the other. */

#define SPDL__RING_MAX_CAPACITY ((uint64_t)1 << 30)
#define SPDL__RING_MAX_ITEM 4096

/* Those who wait on one side, and what it cost them. */
typedef struct spdl__ring_side {
    spdl__event event;
    uint64_t waits, wait_ns, sleeps;
} spdl__ring_side;

struct spdl_ring {
    spdl__ring_core core;
    spdl__ring_side pushes; /* wait for room */
    spdl__ring_side pops;   /* wait for items */
    uint64_t wakes;
#ifdef SPDL_DEBUG
    uint32_t pushing, popping; /* somebody is inside */
#endif
    spdl_allocator allocator; /* written by create */
};

/* A side with one thread on it notices a second one, in debug builds. */
#ifdef SPDL_DEBUG
SPDL__PRIVATE bool spdl__ring_enter(uint32_t *inside, bool alone) {
    const bool entered = !alone || spdl__exchange32(inside, 1) == 0;
    assert(entered && "spdl: two threads on a side of a ring that is for one");
    return entered;
}
#define SPDL__QUICK false /* they do not look */
#define SPDL__RING_ENTER(ring, side, alone) spdl__ring_enter(&(ring)->side, alone)
#define SPDL__RING_LEAVE(ring, side) spdl__store32(&(ring)->side, 0)
#else
#define SPDL__QUICK true
#define SPDL__RING_ENTER(ring, side, alone) true
#define SPDL__RING_LEAVE(ring, side) ((void)0)
#endif

SPDL__PRIVATE bool spdl__ring_one_producer(const spdl_ring *ring) {
    return ring->core.mode == SPDL_RING_SPSC || ring->core.mode == SPDL_RING_SPMC;
}

SPDL__PRIVATE bool spdl__ring_one_consumer(const spdl_ring *ring) {
    return ring->core.mode == SPDL_RING_SPSC || ring->core.mode == SPDL_RING_MPSC;
}

/* n items or slots have come for those who wait: as many of them wake. After a close the pops that
   sleep wait only for the pushes that were under way, and all of them for the last: then each of
   these wakes all. `waiting` is what stands in the word of that side. */
SPDL__PRIVATE void spdl__ring_wake(spdl_ring *ring, spdl__event *event, uint32_t waiting,
                                   uint64_t n) {
    const uint64_t count = spdl__min(n, waiting & SPDL__RING_WAITING);
    if (count == 0) return;
    spdl__add(&ring->wakes, 1);
    spdl__event_wake(event, waiting & SPDL__RING_CLOSING ? SPDL__ALL : (int)count);
}

/* Producer: n items were pushed. The barrier pairs with the heavy one in spdl__ring_announce. */
SPDL__PRIVATE void spdl__ring_pushed(spdl_ring *ring, uint64_t n) {
    spdl__barrier_light(ring->core.asymmetric);
    spdl__ring_wake(ring, &ring->pops.event, spdl__load_relaxed32(&ring->core.pops_waiting), n);
}

/* Consumer: n items were popped. */
SPDL__PRIVATE void spdl__ring_popped(spdl_ring *ring, uint64_t n) {
    spdl__barrier_light(ring->core.asymmetric);
    spdl__ring_wake(ring, &ring->pushes.event, spdl__load_relaxed32(&ring->core.pushes_waiting), n);
}

/* What is left to do after a quick push that found `waiting`. */
SPDL__COLD spdl_result spdl__ring_quick_pushed(spdl_ring *ring, uint32_t waiting) {
    spdl__ring_core *core = &ring->core;
    spdl_result result = SPDL_OK;
    if ((waiting & SPDL__RING_CLOSING) != 0 && core->mode == SPDL_RING_SPSC)
        result = spdl__spsc_settle(core, spdl__load_relaxed(&core->tail) - 1, 1);
    if (result == SPDL_OK) spdl__ring_wake(ring, &ring->pops.event, waiting, 1);
    return result;
}

SPDL__COLD spdl_result spdl__ring_quick_popped(spdl_ring *ring, uint32_t waiting) {
    spdl__ring_wake(ring, &ring->pushes.event, waiting, 1);
    return SPDL_OK;
}

SPDL_API spdl_result spdl_ring_try_push_n(spdl_ring *ring, const void *items, uint64_t n,
                                          uint64_t *moved) {
    spdl_result result;
    *moved = 0;
    if (n == 0) return SPDL_OK;
    if (!SPDL__RING_ENTER(ring, pushing, spdl__ring_one_producer(ring))) return SPDL_E_INVALID;
    result = spdl__ring_core_push(&ring->core, items, n, moved);
    if (result == SPDL_OK)
        spdl__ring_pushed(ring, *moved);
    else
        *moved = 0;
    SPDL__RING_LEAVE(ring, pushing);
    return result;
}

SPDL_API spdl_result spdl_ring_try_pop_n(spdl_ring *ring, void *items, uint64_t n,
                                         uint64_t *moved) {
    spdl_result result;
    *moved = 0;
    if (n == 0) return SPDL_OK;
    if (!SPDL__RING_ENTER(ring, popping, spdl__ring_one_consumer(ring))) return SPDL_E_INVALID;
    result = spdl__ring_core_pop(&ring->core, items, n, moved);
    if (result == SPDL_OK) spdl__ring_popped(ring, *moved);
    SPDL__RING_LEAVE(ring, popping);
    return result;
}

/* Out of line, so that the quick paths stay small. */
SPDL__COLD spdl_result spdl__ring_push_long(spdl_ring *ring, const void *item) {
    uint64_t moved;
    return spdl_ring_try_push_n(ring, item, 1, &moved);
}

SPDL__COLD spdl_result spdl__ring_pop_long(spdl_ring *ring, void *item) {
    uint64_t moved;
    return spdl_ring_try_pop_n(ring, item, 1, &moved);
}

SPDL_API SPDL__HOT spdl_result spdl_ring_try_push(spdl_ring *ring, const void *item) {
    uint32_t waiting;
    if (!spdl__ring_quick_push(&ring->core, item, &waiting))
        return spdl__ring_push_long(ring, item);
    return waiting == 0 ? SPDL_OK : spdl__ring_quick_pushed(ring, waiting);
}

SPDL_API SPDL__HOT spdl_result spdl_ring_try_pop(spdl_ring *ring, void *item) {
    uint32_t waiting;
    if (!spdl__ring_quick_pop(&ring->core, item, &waiting)) return spdl__ring_pop_long(ring, item);
    return waiting == 0 ? SPDL_OK : spdl__ring_quick_popped(ring, waiting);
}

/* A call that may wait. `attempt` does what it can, counts it in `moved`, and says SPDL_FULL or
   SPDL_EMPTY while it has to go on. */
typedef struct spdl__ring_call {
    spdl_ring *ring;
    spdl_result (*attempt)(struct spdl__ring_call *call);
    const void *from;
    void *to;
    uint64_t n;
    uint64_t moved;
    uint64_t since; /* when it began to wait in earnest */
} spdl__ring_call;

SPDL__PRIVATE spdl_result spdl__ring_attempt_push(spdl__ring_call *call) {
    const char *from = (const char *)call->from + call->moved * call->ring->core.item_bytes;
    uint64_t moved;
    const spdl_result result =
        spdl_ring_try_push_n(call->ring, from, call->n - call->moved, &moved);
    call->moved += moved;
    return result == SPDL_OK && call->moved < call->n ? SPDL_FULL : result;
}

SPDL__PRIVATE spdl_result spdl__ring_attempt_pop(spdl__ring_call *call) {
    return spdl_ring_try_pop_n(call->ring, call->to, call->n, &call->moved);
}

SPDL__PRIVATE spdl_result spdl__ring_attempt_reserve(spdl__ring_call *call) {
    spdl_result result;
    if (!SPDL__RING_ENTER(call->ring, pushing, true)) return SPDL_E_INVALID;
    result = spdl__spsc_reserve(&call->ring->core, call->n, (void **)call->to, &call->moved);
    SPDL__RING_LEAVE(call->ring, pushing);
    return result;
}

SPDL__PRIVATE spdl_result spdl__ring_attempt_peek(spdl__ring_call *call) {
    spdl_result result;
    if (!SPDL__RING_ENTER(call->ring, popping, true)) return SPDL_E_INVALID;
    result = spdl__spsc_peek(&call->ring->core, call->n, (void **)call->to, &call->moved);
    SPDL__RING_LEAVE(call->ring, popping);
    return result;
}

SPDL__PRIVATE bool spdl__ring_must_wait(spdl_result result) {
    return result == SPDL_FULL || result == SPDL_EMPTY;
}

/* A wake-up may have come too early: while the push (or pop) in front was still under way, so that
   the one that was woken found nothing and slept again. So whoever was woken and succeeded wakes
   the next if there is more. */
SPDL__PRIVATE void spdl__ring_pass_on(spdl_ring *ring, const uint32_t *waiting) {
    const uint64_t count = spdl_ring_count(ring);
    if (waiting == &ring->core.pops_waiting) {
        if (count > 0) spdl__ring_pushed(ring, 1);
    } else if (count < ring->core.capacity) {
        spdl__ring_popped(ring, 1);
    }
}

SPDL__PRIVATE bool spdl__ring_late(uint64_t deadline) {
    return deadline != SPDL__NEVER && spdl_time_ns() >= deadline;
}

/* Spins, then yields. Yields may take long, and a call that makes progress never gets to the sleep,
   so both look at the deadline. */
SPDL__PRIVATE spdl_result spdl__ring_spin(spdl__ring_call *call, uint64_t deadline) {
    spdl_result result = SPDL_FULL;
    uint64_t moved = call->moved;
    int round = 0;
    while (spdl__ring_must_wait(result) && spdl__backoff(&round, SPDL_YIELDS)) {
        if (round >= SPDL_SPINS && call->since == 0) call->since = spdl_time_ns();
        result = call->attempt(call);
        if (call->moved == moved && round < SPDL_SPINS) continue;
        if (spdl__ring_must_wait(result) && spdl__ring_late(deadline)) return SPDL_TIMEOUT;
        if (call->moved != moved) round = 0;
        moved = call->moved;
    }
    return result;
}

/* Says that the caller is about to sleep. The barrier pairs with the light ones after a push or a
   pop. Returns the word to sleep on. */
SPDL__PRIVATE uint32_t spdl__ring_announce(const spdl_ring *ring, const spdl__event *event,
                                           uint32_t *waiting) {
    const uint32_t word = spdl__load32(&event->word); /* pairs with the add in spdl__event_wake */
    spdl__add32(waiting, 1);
    spdl__barrier_heavy(ring->core.asymmetric);
    return word;
}

/* Sleeps until an attempt succeeds. A wake-up that comes with the deadline is still used: there is
   one more attempt before giving up. */
SPDL__PRIVATE spdl_result spdl__ring_sleep(spdl__ring_call *call, spdl__ring_side *side,
                                           uint32_t *waiting, uint64_t deadline) {
    spdl_result slept = SPDL_OK;
    spdl_result result;
    while (slept != SPDL_TIMEOUT) {
        const uint32_t word = spdl__ring_announce(call->ring, &side->event, waiting);
        result = call->attempt(call);
        if (!spdl__ring_must_wait(result)) {
            spdl__sub32(waiting, 1);
            return result;
        }
        SPDL_TEST_POINT("ring about to sleep");
        spdl__add(&side->sleeps, 1);
        slept = spdl__event_sleep(&side->event, word, deadline);
        spdl__sub32(waiting, 1);
        result = call->attempt(call);
        if (!spdl__ring_must_wait(result)) {
            if (result == SPDL_OK) spdl__ring_pass_on(call->ring, waiting);
            return result;
        }
        if (spdl__ring_late(deadline)) break;
    }
    return SPDL_TIMEOUT;
}

/* Spins, yields, then sleeps until an attempt succeeds. */
SPDL__PRIVATE spdl_result spdl__ring_wait(spdl__ring_call *call, spdl__ring_side *side,
                                          uint32_t *waiting, int64_t timeout_ns) {
    spdl_result result = call->attempt(call);
    uint64_t deadline;
    if (!spdl__ring_must_wait(result)) return result;
    if (timeout_ns == 0) return SPDL_TIMEOUT;
    deadline = spdl__deadline(timeout_ns);
    result = spdl__ring_spin(call, deadline);
    if (spdl__ring_must_wait(result)) result = spdl__ring_sleep(call, side, waiting, deadline);
    if (call->since != 0) {
        spdl__add(&side->waits, 1);
        spdl__add(&side->wait_ns, spdl_time_ns() - call->since);
    }
    return result;
}

SPDL__COLD spdl_result spdl__ring_push_wait(spdl_ring *ring, const void *items, uint64_t n,
                                            uint64_t *moved, int64_t timeout_ns) {
    spdl__ring_call call = { ring, spdl__ring_attempt_push, items, NULL, n, 0, 0 };
    const spdl_result result =
        spdl__ring_wait(&call, &ring->pushes, &ring->core.pushes_waiting, timeout_ns);
    *moved = call.moved;
    return result;
}

SPDL__COLD spdl_result spdl__ring_pop_wait(spdl_ring *ring, void *items, uint64_t n,
                                           uint64_t *moved, int64_t timeout_ns) {
    spdl__ring_call call = { ring, spdl__ring_attempt_pop, NULL, items, n, 0, 0 };
    const spdl_result result =
        spdl__ring_wait(&call, &ring->pops, &ring->core.pops_waiting, timeout_ns);
    *moved = call.moved;
    return result;
}

SPDL_API SPDL__HOT spdl_result spdl_ring_push(spdl_ring *ring, const void *item,
                                              int64_t timeout_ns) {
    uint32_t waiting;
    uint64_t moved;
    if (ring == NULL || item == NULL) return SPDL_E_INVALID;
    if (!spdl__ring_quick_push(&ring->core, item, &waiting))
        return spdl__ring_push_wait(ring, item, 1, &moved, timeout_ns);
    return waiting == 0 ? SPDL_OK : spdl__ring_quick_pushed(ring, waiting);
}

SPDL_API SPDL__HOT spdl_result spdl_ring_pop(spdl_ring *ring, void *item, int64_t timeout_ns) {
    uint32_t waiting;
    uint64_t moved;
    if (ring == NULL || item == NULL) return SPDL_E_INVALID;
    if (!spdl__ring_quick_pop(&ring->core, item, &waiting))
        return spdl__ring_pop_wait(ring, item, 1, &moved, timeout_ns);
    return waiting == 0 ? SPDL_OK : spdl__ring_quick_popped(ring, waiting);
}

SPDL_API spdl_result spdl_ring_push_n(spdl_ring *ring, const void *items, uint64_t n,
                                      uint64_t *moved, int64_t timeout_ns) {
    if (moved != NULL) *moved = 0;
    if (ring == NULL || moved == NULL || (items == NULL && n > 0)) return SPDL_E_INVALID;
    if (n == 0) return SPDL_OK;
    return spdl__ring_push_wait(ring, items, n, moved, timeout_ns);
}

SPDL_API spdl_result spdl_ring_pop_n(spdl_ring *ring, void *items, uint64_t n, uint64_t *moved,
                                     int64_t timeout_ns) {
    if (moved != NULL) *moved = 0;
    if (ring == NULL || moved == NULL || (items == NULL && n > 0)) return SPDL_E_INVALID;
    if (n == 0) return SPDL_OK;
    return spdl__ring_pop_wait(ring, items, n, moved, timeout_ns);
}

/* Whether a call that works in place makes sense; clears what it gives back. */
SPDL__PRIVATE bool spdl__ring_in_place(const spdl_ring *ring, uint64_t n, void **slots,
                                       uint64_t *have) {
    if (slots != NULL) *slots = NULL;
    if (have != NULL) *have = 0;
    return ring != NULL && slots != NULL && have != NULL && n > 0 &&
           ring->core.mode == SPDL_RING_SPSC;
}

/* The end of a call in place: nothing is given back but with SPDL_OK. */
SPDL__PRIVATE spdl_result spdl__ring_given(const spdl__ring_call *call, spdl_result result,
                                           void **slots, uint64_t *have) {
    if (result == SPDL_OK)
        *have = call->moved;
    else
        *slots = NULL;
    return result;
}

SPDL_API spdl_result spdl_ring_reserve(spdl_ring *ring, uint64_t n, void **slots, uint64_t *have,
                                       int64_t timeout_ns) {
    spdl__ring_call call = { ring, spdl__ring_attempt_reserve, NULL, slots, n, 0, 0 };
    if (!spdl__ring_in_place(ring, n, slots, have)) return SPDL_E_INVALID;
    return spdl__ring_given(
        &call, spdl__ring_wait(&call, &ring->pushes, &ring->core.pushes_waiting, timeout_ns),
        slots, have);
}

SPDL_API spdl_result spdl_ring_peek(spdl_ring *ring, uint64_t n, void **items, uint64_t *have,
                                    int64_t timeout_ns) {
    spdl__ring_call call = { ring, spdl__ring_attempt_peek, NULL, items, n, 0, 0 };
    if (!spdl__ring_in_place(ring, n, items, have)) return SPDL_E_INVALID;
    return spdl__ring_given(
        &call, spdl__ring_wait(&call, &ring->pops, &ring->core.pops_waiting, timeout_ns), items,
        have);
}

SPDL_API spdl_result spdl_ring_commit(spdl_ring *ring, uint64_t n) {
    spdl_result result;
    if (ring == NULL || ring->core.mode != SPDL_RING_SPSC) return SPDL_E_INVALID;
    if (!SPDL__RING_ENTER(ring, pushing, true)) return SPDL_E_INVALID;
    result = spdl__spsc_commit(&ring->core, n);
    if (result == SPDL_OK) spdl__ring_pushed(ring, n);
    SPDL__RING_LEAVE(ring, pushing);
    return result;
}

SPDL_API spdl_result spdl_ring_release(spdl_ring *ring, uint64_t n) {
    spdl_result result;
    if (ring == NULL || ring->core.mode != SPDL_RING_SPSC) return SPDL_E_INVALID;
    if (!SPDL__RING_ENTER(ring, popping, true)) return SPDL_E_INVALID;
    result = spdl__spsc_release_peeked(&ring->core, n);
    if (result == SPDL_OK) spdl__ring_popped(ring, n);
    SPDL__RING_LEAVE(ring, popping);
    return result;
}

SPDL_API void spdl_ring_close(spdl_ring *ring) {
    spdl__ring_core_close(&ring->core);
    spdl__barrier_light(ring->core.asymmetric); /* pairs with the heavy one of a sleeper */
    spdl__ring_wake(ring, &ring->pops.event, spdl__load_relaxed32(&ring->core.pops_waiting), 1);
    spdl__ring_wake(ring, &ring->pushes.event,
                    spdl__load_relaxed32(&ring->core.pushes_waiting) | SPDL__RING_CLOSING, 1);
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
    if (desc->mode < SPDL_RING_MPMC || desc->mode > SPDL_RING_SPMC)
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "spdl: ring: mode is %d, which is no mode", (int)desc->mode);
    return spdl__allocator_check(&desc->allocator, "ring", desc->error);
}

SPDL__PRIVATE spdl_result spdl__ring_new(spdl_ring **ring, const spdl_ring_desc *desc) {
    spdl_ring *made =
        (spdl_ring *)spdl__alloc_zeroed(&desc->allocator, 1, sizeof(*made), SPDL_CACHE_LINE);
    size_t slots;
    if (made == NULL) return SPDL_E_NOMEM;
    made->allocator = desc->allocator;
    made->core.asymmetric = spdl__barrier_init();
    spdl__ring_core_shape(&made->core, desc->mode, desc->capacity,
                          desc->item_bytes ? desc->item_bytes : sizeof(void *),
                          SPDL__QUICK && (made->core.asymmetric || !SPDL__MEMBARRIER));
    slots = spdl__ring_slot_count(&made->core);
    made->core.slots = (unsigned char *)spdl__alloc_zeroed(&desc->allocator, slots,
                                                           made->core.stride, SPDL_CACHE_LINE);
    if (made->core.slots == NULL) goto no_slots;
    if (!spdl__event_init(&made->pushes.event)) goto no_event;
    if (!spdl__event_init(&made->pops.event)) goto no_second_event;
    spdl__ring_core_start(&made->core);
    *ring = made;
    return SPDL_OK;
no_second_event:
    spdl__event_fini(&made->pushes.event);
no_event:
    spdl__free(&desc->allocator, made->core.slots, slots * made->core.stride);
no_slots:
    spdl__free(&desc->allocator, made, sizeof(*made));
    return SPDL_E_NOMEM;
}

SPDL_API spdl_result spdl_ring_create(spdl_ring **ring, const spdl_ring_desc *desc) {
    spdl_result result;
    if (ring == NULL) return SPDL_E_INVALID;
    *ring = NULL;
    if (desc == NULL) return SPDL_E_INVALID;
    spdl__error_clear(desc->error);
    result = spdl__ring_check(desc);
    if (result == SPDL_OK) result = spdl__ring_new(ring, desc);
    if (result == SPDL_E_NOMEM) spdl__error_set(desc->error, result, "spdl: ring: out of memory");
    return result;
}

/* Hands what is left to free_item, in order; no other thread is inside any more. */
SPDL__PRIVATE void spdl__ring_drain(spdl__ring_core *core, void (*free_item)(void *, void *),
                                    void *user) {
    uint64_t pushed, popped, at = core->head;
    spdl__ring_totals(core, &pushed, &popped);
    for (; popped < pushed; ++popped) {
        if (core->mode == SPDL_RING_SPSC) {
            free_item(spdl__spsc_slot(core, at++), user);
        } else {
            at = spdl__ring_at(core, at);
            free_item(spdl__ring_stamp(core, at++) + 1, user);
        }
    }
}

SPDL_API void spdl_ring_destroy(spdl_ring *ring, void (*free_item)(void *item, void *user),
                                void *user) {
    spdl_allocator allocator;
    spdl__ring_core *core;
    if (ring == NULL) return;
    core = &ring->core;
    allocator = ring->allocator;
    if (free_item != NULL) spdl__ring_drain(core, free_item, user);
    spdl__event_fini(&ring->pops.event);
    spdl__event_fini(&ring->pushes.event);
    spdl__free(&allocator, core->slots, spdl__ring_slot_count(core) * core->stride);
    spdl__free(&allocator, ring, sizeof(*ring));
}

/* ============================================================================================= */
/* >>pool-impl
   Workers look for something to do: a job, or a step of an attached pipeline ("client"). A worker
   that finds nothing looks again a few times, 16 pauses and 8 turns given away, and then sleeps on
   its bell. Nothing of this is learned or differs between builds.

   Who wakes whom. A worker goes to sleep in this order: read its bell, announce (`asleep`, then
   `sleepers`), clear `waking`, look at everything once more, sleep. Whoever makes something
   runnable, and does not look for work itself next, does so in this order: publish, full barrier,
   look at `sleepers`; if some worker sleeps and `waking` is clear, look whether what it has changed
   can run; if so set `waking` and ring the bell of the first worker in the pool that is `asleep`.
   So one of the two sees the other. The first, not the one that has slept longest: what two workers
   can do is done by two, however many there are; their caches stay warm, and the system, which
   places a thread by what it has done, sees two that work instead of many that hardly do. At most
   one wake is under way at a time: `waking` is set by the one who rings and cleared by every worker
   that is about to sleep or has stopped sleeping, always before a full barrier and a look at
   everything. So whoever finds it set may rely on a look that is still to come, and a worker that
   finds work looks at everything again before its first call, which passes the wake on.
   (tests/model/sit.pml checks this exhaustively.)

   The upper half of `sleepers` counts trainers and producers that wait: those who take and put look
   at one word to know that nobody does.

   Several pipelines get turns by time: each worker steps in the one it has worked least for, for up
   to SPDL__TURN_NS; one that had nothing to do saves up no more than two turns.

   Threads: workers run worker_main; clients come and go from any thread; `slot.users` counts the
   workers inside a client, and detach waits for it to be 0. The pool owns threads, queue and
   locals; jobs own their args. */

#define SPDL__MAX_WORKERS 256
#define SPDL__MAX_CLIENTS 64
#define SPDL__MAX_QUEUE (1 << 24)
#define SPDL__IDLE_YIELDS 8   /* turns a worker or trainer gives away before it sleeps; 64 cost 18 %
                                 more processor time beside steps of a millisecond */
#define SPDL__TURN_NS 1000000 /* how long a worker stays with one client when there are others */

typedef struct spdl__client {
    /* runs one piece of work; false: there is none */
    bool (*step)(void *self, int worker);
    /* whether step would find some; with -1: any worker of the pool */
    bool (*runnable)(void *self, int worker);
    void *self;
} spdl__client;

typedef struct spdl__client_slot {
    uint64_t client; /* a spdl__client *, or 0; written by attach and detach */
    uint32_t taken;  /* from attach until detach has returned */
    uint32_t generation; /* counts the clients; written by attach */
    uint32_t users;  /* workers inside the client; written by them */
    char pad[SPDL_CACHE_LINE];
} spdl__client_slot;

typedef struct spdl__job {
    spdl_job_fn fn;
    void *arg;
} spdl__job;

typedef struct spdl__worker {
    spdl_pool *pool; /* these two: written by create */
    int index;
    bool initialised; /* from here on: written by the worker */
    uint64_t id;
    uint64_t thread_number; /* that the system knows it by, for its statistics */
    uint32_t asleep;        /* or about to be; cleared by whoever rings, too */
    spdl__event bell;
    spdl__thread thread;
    void *local;
    /* turns, when there are several clients */
    uint64_t turn_ns;                        /* worked_ns of the one that had the last */
    uint64_t worked_ns[SPDL__MAX_CLIENTS];   /* for each of them */
    uint32_t generation[SPDL__MAX_CLIENTS];  /* of the client that this is about */
} spdl__worker;

struct spdl_pool {
    /* written by create */
    spdl_pool_desc desc;
    char name[SPDL_NAME_BYTES];
    spdl__worker *worker;
    spdl_ring *jobs;
    /* start-up: written by workers */
    uint32_t started;
    uint32_t init_result; /* the first result of init that was not SPDL_OK, as bits */
    uint32_t policy_refused;
    /* jobs accepted and not ended; idle: signalled at 0, by a worker that has started, and when a
       client is left */
    uint64_t pending;
    spdl__event idle;
    uint32_t quit;
    char pad0[SPDL_CACHE_LINE];
    /* read by all; written by those who sleep and those who wake them */
    uint32_t sleepers; /* workers asleep; SPDL__WAITER for each trainer or producer that waits */
    uint32_t waking;   /* a worker was woken and has yet to look */
    char pad1[SPDL_CACHE_LINE];
    uint32_t slots_used; /* slots from here on were never taken */
    spdl__client_slot slot[SPDL__MAX_CLIENTS];
};

#define SPDL__WAITER 0x10000u
#define SPDL__ASLEEP (SPDL__WAITER - 1)

SPDL__PRIVATE const spdl__client *spdl__slot_client(const spdl__client_slot *slot) {
    return (const spdl__client *)(uintptr_t)spdl__load_ordered(&slot->client);
}

SPDL__PRIVATE void spdl__client_leave(spdl_pool *pool, spdl__client_slot *slot) {
    spdl__sub_ordered32(&slot->users, 1);
    if (spdl__slot_client(slot) == NULL) spdl__event_wake(&pool->idle, SPDL__ALL);
}

/* A worker that enters counts itself first and looks at the client then; detach clears the client
   first and looks at the count then. All four accesses are sequentially consistent, so one of them
   sees the other. NULL: there is no client, and nothing to leave. */
SPDL__PRIVATE const spdl__client *spdl__client_enter(spdl_pool *pool, spdl__client_slot *slot) {
    const spdl__client *client;
    if (spdl__slot_client(slot) == NULL) return NULL;
    spdl__add_ordered32(&slot->users, 1);
    client = spdl__slot_client(slot);
    if (client == NULL) spdl__client_leave(pool, slot);
    return client;
}

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

/* A guess, behind a full barrier: whether to look for something that somebody should be woken for.
   */
SPDL__INLINE bool spdl__pool_sleeps(const spdl_pool *pool) {
    return (spdl__load_relaxed32(&pool->sleepers) & SPDL__ASLEEP) != 0 &&
           spdl__load_relaxed32(&pool->waking) == 0;
}

/* Whether it slept. */
SPDL__PRIVATE bool spdl__worker_wake(spdl__worker *worker) {
    uint32_t asleep = 1;
    if (spdl__load_relaxed32(&worker->asleep) == 0 || !spdl__cas32(&worker->asleep, &asleep, 0))
        return false;
    spdl__event_wake(&worker->bell, 1);
    return true;
}

/* If none is asleep any more, those counted in `sleepers` were woken by others: they have yet to
   look, and will see what we have published. */
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
    if (spdl__pool_sleeps(pool) && spdl__pool_runnable(pool, -1, NULL)) spdl__pool_wake_one(pool);
}

/* Runs one job. */
SPDL__PRIVATE bool spdl__pool_job(spdl_pool *pool, spdl__worker *worker) {
    spdl__job job;
    if (spdl_ring_try_pop(pool->jobs, &job) != SPDL_OK) return false;
    spdl__pool_hint(pool);
    job.fn(job.arg, worker->index, worker->local);
    if (spdl__sub(&pool->pending, 1) == 1) spdl__event_wake(&pool->idle, SPDL__ALL);
    return true;
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
        over = spdl_ring_count(pool->jobs) > 0 || spdl__load32(&pool->quit);
        if (alone) {
            over = over || spdl__load_relaxed32(&pool->slots_used) != 1;
        } else if (spdl_time_ns() - since > SPDL__TURN_NS) {
            over = true;
        }
    }
    spdl__client_leave(pool, slot);
    if (!alone && found) worker->worked_ns[at] += spdl_time_ns() - since;
    if (over) spdl__pool_hint(pool); /* it may have more, and we look elsewhere */
    return found;
}

/* Of the clients that are not in `tried`, the one this worker has worked least for. One that is new
   begins where the last turn was. */
SPDL__PRIVATE uint32_t spdl__pool_least(spdl_pool *pool, spdl__worker *worker, uint32_t used,
                                        uint64_t tried) {
    uint32_t i, least = used;
    for (i = 0; i < used; ++i) {
        const uint32_t generation = spdl__load_relaxed32(&pool->slot[i].generation);
        if (worker->generation[i] != generation) worker->worked_ns[i] = worker->turn_ns;
        worker->generation[i] = generation;
        if ((tried >> i & 1) != 0) continue;
        if (least == used || worker->worked_ns[i] < worker->worked_ns[least]) least = i;
    }
    return least;
}

/* A job, if there is one, and a turn with a client that has something to do. */
SPDL__PRIVATE bool spdl__pool_step(spdl_pool *pool, spdl__worker *worker) {
    const uint32_t used = spdl__load32(&pool->slots_used);
    const bool found = spdl__pool_job(pool, worker);
    uint64_t tried = 0; /* a bit for each client */
    uint32_t i, at, left;
    if (used == 1) return spdl__pool_visit(pool, worker, 0) || found;
    for (left = used; left > 0; --left) {
        at = spdl__pool_least(pool, worker, used, tried);
        worker->turn_ns = worker->worked_ns[at];
        if (spdl__pool_visit(pool, worker, at)) break;
        tried |= (uint64_t)1 << at;
    }
    if (left == 0) return found;
    for (i = 0; i < used; ++i) /* those that had nothing to do */
        if ((tried >> i & 1) != 0 && worker->worked_ns[i] + 2 * SPDL__TURN_NS < worker->turn_ns)
            worker->worked_ns[i] = worker->turn_ns - 2 * SPDL__TURN_NS;
    return true;
}

/* Sleeps, unless there is something to do after all. */
SPDL__PRIVATE void spdl__pool_park(spdl_pool *pool, spdl__worker *worker) {
    const uint32_t word = spdl__load32(&worker->bell.word);
    spdl__store32(&worker->asleep, 1);
    spdl__add32(&pool->sleepers, 1);
    SPDL_TEST_POINT("pool announced");
    (void)spdl__exchange32(&pool->waking, 0);
    spdl__barrier_after_rmw(); /* pairs with those behind each publication */
    SPDL_TEST_POINT("pool about to sleep");
    if (!spdl__load32(&pool->quit) && !spdl__pool_runnable(pool, worker->index, NULL))
        (void)spdl__event_sleep(&worker->bell, word, SPDL__NEVER);
    spdl__sub32(&pool->sleepers, 1); /* before `asleep`: who is counted can be woken, or was */
    spdl__store32(&worker->asleep, 0);
    (void)spdl__exchange32(&pool->waking, 0);
    spdl__barrier_after_rmw();
}

SPDL__PRIVATE void spdl__worker_run(spdl__worker *worker) {
    spdl_pool *pool = worker->pool;
    int round = 0;
    while (!spdl__load32(&pool->quit)) {
        if (spdl__pool_step(pool, worker)) {
            round = 0;
        } else if (!spdl__backoff(&round, SPDL__IDLE_YIELDS)) {
            spdl__pool_park(pool, worker);
            round = 0;
        }
    }
}

SPDL__PRIVATE void spdl__worker_init(spdl__worker *worker) {
    spdl_pool *pool = worker->pool;
    spdl_result result = SPDL_OK;
    if (pool->desc.init != NULL)
        result = pool->desc.init(pool->desc.ctx, worker->index, &worker->local);
    worker->initialised = result == SPDL_OK;
    if (result != SPDL_OK) {
        uint32_t none = 0;
        (void)spdl__cas32(&pool->init_result, &none, (uint32_t)(int)result);
    }
    spdl__add32(&pool->started, 1);
    spdl__event_wake(&pool->idle, SPDL__ALL);
}

SPDL__PRIVATE void *spdl__worker_main(void *arg) {
    spdl__worker *worker = (spdl__worker *)arg;
    spdl_pool *pool = worker->pool;
    char name[SPDL_NAME_BYTES + 16];
    (void)snprintf(name, sizeof(name), "%.11s-%d", pool->name, worker->index);
    spdl__thread_name(name);
    spdl__store(&worker->id, spdl__thread_id());
    spdl__store(&worker->thread_number, spdl__thread_number());
    if (!spdl__policy_apply(&pool->desc.policy)) spdl__store32(&pool->policy_refused, 1);
    spdl__worker_init(worker);
    spdl__worker_run(worker);
    if (worker->initialised && pool->desc.fini != NULL)
        pool->desc.fini(pool->desc.ctx, worker->index, worker->local);
    return NULL;
}

/* Waits on pool->idle until *word is `value`. */
SPDL__PRIVATE void spdl__pool_await32(spdl_pool *pool, const uint32_t *word, uint32_t value) {
    for (;;) {
        const uint32_t ticket = spdl__load32(&pool->idle.word);
        if (spdl__load_ordered32(word) == value) return;
        (void)spdl__event_sleep(&pool->idle, ticket, SPDL__NEVER);
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
        spdl__store_relaxed32(&slot->generation, slot->generation + 1);
        spdl__store_ordered(&slot->client, (uint64_t)(uintptr_t)client);
        spdl__full_barrier();
        spdl__pool_wake_all(pool); /* each worker has a look: there may be an init to run */
        return slot;
    }
    return NULL;
}

/* When it returns no worker is inside the client, nor will be. */
SPDL__PRIVATE void spdl__pool_detach(spdl_pool *pool, spdl__client_slot *slot) {
    spdl__store_ordered(&slot->client, 0);
    spdl__pool_await32(pool, &slot->users, 0);
    spdl__store32(&slot->taken, 0);
}

SPDL__PRIVATE bool spdl__pool_is_worker(const spdl_pool *pool) {
    int i;
    for (i = 0; i < pool->desc.workers; ++i)
        if (spdl__load(&pool->worker[i].id) == spdl__thread_id()) return true;
    return false;
}

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
        spdl__event_wake(&pool->idle, SPDL__ALL);
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
        slept = spdl__event_sleep(&pool->idle, ticket, deadline);
    }
}

SPDL_API spdl_result spdl_pool_stop(spdl_pool *pool, int64_t timeout_ns) {
    if (pool == NULL || spdl__pool_is_worker(pool)) return SPDL_E_INVALID;
    spdl_ring_close(pool->jobs);
    return spdl_pool_drain(pool, timeout_ns);
}

SPDL__PRIVATE spdl_result spdl__pool_check(const spdl_pool_desc *desc) {
    if (desc->workers < 1 || desc->workers > SPDL__MAX_WORKERS)
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "spdl: pool: workers is %d, must be 1 to %d", desc->workers,
                               SPDL__MAX_WORKERS);
    if (desc->queue_size < 0 || desc->queue_size > SPDL__MAX_QUEUE)
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "spdl: pool: queue_size is %d, must be 1 to %d", desc->queue_size,
                               SPDL__MAX_QUEUE);
    if (desc->policy.nice < -20 || desc->policy.nice > 19)
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "spdl: pool: policy.nice is %d, must be -20 to 19",
                               desc->policy.nice);
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

/* The workers before they have a thread. */
SPDL__PRIVATE bool spdl__pool_workers_init(spdl_pool *pool) {
    int i;
    for (i = 0; i < pool->desc.workers; ++i) {
        pool->worker[i].pool = pool;
        pool->worker[i].index = i;
        if (!spdl__event_init(&pool->worker[i].bell)) break;
    }
    if (i == pool->desc.workers) return true;
    while (i > 0) spdl__event_fini(&pool->worker[--i].bell);
    return false;
}

SPDL__PRIVATE void spdl__pool_workers_free(spdl_pool *pool, bool made) {
    int i;
    for (i = 0; made && i < pool->desc.workers; ++i) spdl__event_fini(&pool->worker[i].bell);
    spdl__free(&pool->desc.allocator, pool->worker,
               (size_t)pool->desc.workers * sizeof(*pool->worker));
    pool->worker = NULL;
}

/* Everything but the threads. On failure spdl__pool_release frees what is there. */
SPDL__PRIVATE spdl_result spdl__pool_build(spdl_pool *pool) {
    spdl_ring_desc jobs;
    memset(&jobs, 0, sizeof(jobs));
    jobs.capacity = (uint64_t)(pool->desc.queue_size ? pool->desc.queue_size : 256);
    jobs.item_bytes = sizeof(spdl__job);
    jobs.allocator = pool->desc.allocator;
    spdl__name_copy(pool->name, pool->desc.name ? pool->desc.name : "spdl");
    pool->worker = (spdl__worker *)spdl__alloc_zeroed(
        &pool->desc.allocator, (size_t)pool->desc.workers, sizeof(*pool->worker), sizeof(void *));
    if (pool->worker == NULL) return SPDL_E_NOMEM;
    if (!spdl__pool_workers_init(pool)) {
        spdl__pool_workers_free(pool, false);
        return SPDL_E_NOMEM;
    }
    return spdl_ring_create(&pool->jobs, &jobs);
}

SPDL__PRIVATE void spdl__pool_release(spdl_pool *pool) {
    const spdl_allocator allocator = pool->desc.allocator;
    spdl_ring_destroy(pool->jobs, NULL, NULL);
    if (pool->worker != NULL) spdl__pool_workers_free(pool, true);
    spdl__event_fini(&pool->idle);
    spdl__free(&allocator, pool, sizeof(*pool));
}

/* Ends and joins the first `count` workers. */
SPDL__PRIVATE void spdl__pool_join(spdl_pool *pool, int count) {
    int i;
    spdl__store32(&pool->quit, 1);
    spdl__full_barrier();
    spdl__pool_wake_all(pool);
    for (i = 0; i < count; ++i) spdl__thread_join(pool->worker[i].thread);
}

/* Whether the first steps of a worker can fail, or need what is the caller's. */
SPDL__PRIVATE bool spdl__pool_awaits_start(const spdl_pool_desc *desc) {
    return desc->init != NULL || desc->policy.polite || desc->policy.nice != 0 ||
           desc->policy.sched != SPDL_SCHED_DEFAULT || desc->policy.cpu_count > 0;
}

/* Starts the workers and waits for their init; all or none. */
SPDL__PRIVATE spdl_result spdl__pool_start(spdl_pool *pool) {
    spdl_result result = SPDL_OK;
    int count = 0;
    for (; count < pool->desc.workers && result == SPDL_OK; ++count) {
        spdl__worker *worker = &pool->worker[count];
        if (!spdl__thread_start(&worker->thread, pool->desc.stack_bytes, spdl__worker_main, worker))
            result = spdl__error_set(pool->desc.error, SPDL_E_THREAD,
                                     "spdl: pool '%s': thread %d of %d could not be created",
                                     pool->name, count, pool->desc.workers);
    }
    if (result == SPDL_OK) {
        if (!spdl__pool_awaits_start(&pool->desc)) return SPDL_OK;
        spdl__pool_await32(pool, &pool->started, (uint32_t)count);
        result = (spdl_result)(int)spdl__load32(&pool->init_result);
        if (result != SPDL_OK) {
            spdl__error_set(pool->desc.error, result,
                            "spdl: pool '%s': init of a worker failed: %s", pool->name,
                            spdl_result_text(result));
        } else if (spdl__load32(&pool->policy_refused)) {
            result = spdl__error_set(pool->desc.error, SPDL_E_THREAD,
                                     "spdl: pool '%s': the system refuses the policy of its threads"
                                     " (nice %d, sched %d, %d cpus)", pool->name,
                                     pool->desc.policy.nice, (int)pool->desc.policy.sched,
                                     pool->desc.policy.cpu_count);
        }
    } else {
        --count; /* the one that did not start */
    }
    if (result != SPDL_OK) spdl__pool_join(pool, count);
    return result;
}

SPDL__PRIVATE spdl_result spdl__pool_new(spdl_pool **pool, const spdl_pool_desc *desc) {
    spdl_pool *made =
        (spdl_pool *)spdl__alloc_zeroed(&desc->allocator, 1, sizeof(*made), SPDL_CACHE_LINE);
    spdl_result result = SPDL_E_NOMEM;
    if (made == NULL) return result;
    made->desc = *desc;
    if (spdl__event_init(&made->idle)) {
        result = spdl__pool_build(made);
        if (result == SPDL_OK) result = spdl__pool_start(made);
        made->desc.error = NULL; /* the caller's, for this call only */
        if (result == SPDL_OK)
            *pool = made;
        else
            spdl__pool_release(made);
    } else {
        spdl__free(&desc->allocator, made, sizeof(*made));
    }
    return result;
}

SPDL_API spdl_result spdl_pool_create(spdl_pool **pool, const spdl_pool_desc *desc) {
    spdl_result result;
    if (pool == NULL) return SPDL_E_INVALID;
    *pool = NULL;
    if (desc == NULL) return SPDL_E_INVALID;
    spdl__error_clear(desc->error);
    result = spdl__pool_check(desc);
    if (result == SPDL_OK) result = spdl__pool_new(pool, desc);
    if (result == SPDL_E_NOMEM) spdl__error_set(desc->error, result, "spdl: pool: out of memory");
    return result;
}

SPDL_API void spdl_pool_destroy(spdl_pool *pool) {
    uint32_t i;
    if (pool == NULL) return;
    if (spdl__pool_is_worker(pool)) {
        spdl__log(&pool->desc.logger, SPDL_LOG_ERROR,
                  "spdl: spdl_pool_destroy: called on a worker of the pool, nothing was done");
        return;
    }
    for (i = 0; i < SPDL__MAX_CLIENTS; ++i) {
        if (!spdl__load32(&pool->slot[i].taken)) continue;
        spdl__log(&pool->desc.logger, SPDL_LOG_ERROR,
                  "spdl: spdl_pool_destroy: a pipeline is still on the pool, nothing was done");
        return;
    }
    spdl_pool_stop(pool, SPDL_FOREVER);
    spdl__pool_join(pool, pool->desc.workers);
    spdl__pool_release(pool);
}

/* ============================================================================================= */
/* >>trace-core
   What the pipeline calls while it runs, so that a trace can be written and the time of stages be
   split; >>trace-impl has the rest. Off, each place costs a branch on a pointer.

   Events. A lane is a ring of events that keeps the latest; there is one for each thread that runs
   stages, one for the trainer and one for each edge. Any thread may add to any lane: it takes a
   number, marks the slot as in use, writes it and stamps it with the number. Readers, at any time,
   take a slot whose stamp is the same before and after they have copied it. (Two that add to one
   slot at the same time, a whole ring apart, may mix their words: one of them was stopped for as
   long as the others took to fill the ring.)

   Where time goes. A meter reads the thread's processor clock, and the time it was runnable from
   schedstat, before and after a sitting. That is four system calls, some microseconds, so about one
   sitting is measured for each SPDL__METER_NS that the worker spends in the stage. Which one, is
   counted in sittings and drawn by lot: by time it would always be the one after the longest, and
   in a fixed turn it could keep step with what it measures.

   The pipeline owns lanes and meters; a meter is used by the thread that runs the lane. */

/* For what is only done with a trace: its callers are compiled as if it were never called. */
#define SPDL__RARE __attribute__((noinline, cold)) SPDL__PRIVATE

#define SPDL__TRACE_EVENTS 65536
#define SPDL__TRACE_EVENTS_MAX (1 << 24)
#define SPDL__METER_NS 800000 /* time of a worker in a stage for each measurement, on average */

#ifdef SPDL__NO_TRACE /* for the bench, which compares with a build without any of it */
#define SPDL__TRACED(pointer) (false)
#define SPDL__METERED false
#else
#define SPDL__METERED true
#define SPDL__TRACED(pointer) SPDL__UNLIKELY((pointer) != NULL)
#endif

typedef enum spdl__event_kind {
    SPDL__EVENT_CALL,  /* a call of a stage; number: of the item */
    SPDL__EVENT_BATCH, /* a batch was put; number: its own */
    SPDL__EVENT_ITEM,  /* an item went into a batch; number: of the item; begin: of the batch */
    SPDL__EVENT_NEXT,  /* the trainer waited; number: of the item it got */
    SPDL__EVENT_EMPTY, /* the reader of an edge had to wait */
    SPDL__EVENT_FULL,  /* a finished item had to wait for its place */
    SPDL__EVENT_DEPTH  /* number: the items on an edge; end: its head */
} spdl__event_kind;

/* 32 bytes, as is documented. */
typedef struct spdl__note {
    uint64_t begin;
    uint64_t end;
    uint64_t number;
    uint64_t stamp; /* low bits of its place in the lane + 1, result 16, row 8, kind 8 bits */
} spdl__note;

typedef struct spdl__lane {
    uint64_t count; /* events so far, those that were overwritten too */
    uint64_t begun; /* an edge: the wait of its reader, or 0 */
    spdl__note *notes;
    uint64_t mask;
    char pad[SPDL_CACHE_LINE];
} spdl__lane;

typedef struct spdl__trace {
    int threads;      /* lanes of threads; those of edges follow */
    int edges;
    spdl__lane *lane;
    spdl__note *notes;
    size_t note_count;
    const spdl_function *fn[SPDL_MAX_STAGES]; /* the stages' own */
    int file;         /* claimed for destroy to write, or -1 */
    char name[SPDL_NAME_BYTES]; /* of the threads */
    char path[1024];
} spdl__trace;

typedef struct spdl__meter {
    uint64_t thread;  /* whose schedstat is open */
    uint64_t ns, cpu_ns, wait_ns; /* at the start of the sitting that is measured */
    int file;         /* -1: there is none */
    bool cpu_known, wait_known;
    uint64_t lot;           /* decides which sitting is measured next */
    uint64_t first_wait_ns; /* of the thread, when it was measured first */
    uint64_t waited_ns;     /* and since then; read by snapshots */
    char pad[SPDL_CACHE_LINE];
} spdl__meter;

SPDL__RARE void spdl__trace_add(spdl__lane *lane, spdl__event_kind kind, int row, int result,
                                uint64_t begin, uint64_t end, uint64_t number) {
    const uint64_t place = spdl__add(&lane->count, 1);
    spdl__note *note = &lane->notes[place & lane->mask];
    if (result > INT16_MAX || result < INT16_MIN) result = SPDL_E_STAGE;
    spdl__store_relaxed(&note->stamp, 0);
    /* release: pairs with trace_copy, which, having read one of them, sees the stamp gone */
    spdl__store(&note->begin, begin);
    spdl__store(&note->end, end);
    spdl__store(&note->number, number);
    /* pairs with the first load in trace_copy: the words are there */
    spdl__store(&note->stamp, (place + 1) << 32 | (uint64_t)(uint16_t)result << 16 |
                                  (uint64_t)(uint8_t)row << 8 | (uint64_t)kind);
}

/* --- probes of <sys/sdt.h>: a nop each until a tracer is attached --- */

#if SPDL__SDT && !defined(SPDL__NO_TRACE)
#define SPDL__PROBE(name, stage, number) DTRACE_PROBE2(spdl, name, stage, number)
#else
#define SPDL__PROBE(name, stage, number) ((void)(stage), (void)(number))
#endif
#if defined(__clang__) /* does not forgive the macros of that header */
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wgnu-zero-variadic-macro-arguments"
#endif
SPDL__INLINE void spdl__probe_task_begin(const char *const *stage, const uint64_t *item) {
    SPDL__PROBE(task_begin, *stage, *item);
}
SPDL__INLINE void spdl__probe_task_end(const char *const *stage, const uint64_t *item) {
    SPDL__PROBE(task_end, *stage, *item);
}
SPDL__INLINE void spdl__probe_next_begin(const char *stage, uint64_t delivered) {
    SPDL__PROBE(next_wait_begin, stage, delivered);
}
SPDL__INLINE void spdl__probe_next_end(const char *stage, uint64_t delivered) {
    SPDL__PROBE(next_wait_end, stage, delivered);
}
#if defined(__clang__)
#pragma clang diagnostic pop
#endif

/* --- meters --- */

/* Time this thread has been on a processor; false when there is no such clock. */
SPDL__PRIVATE bool spdl__cpu_time(uint64_t *ns) {
#if defined(__linux__) || defined(CLOCK_THREAD_CPUTIME_ID)
#if defined(__linux__)
    const int cpu_clock = 3; /* CLOCK_THREAD_CPUTIME_ID, hidden in strict ISO mode */
#else
    const clockid_t cpu_clock = CLOCK_THREAD_CPUTIME_ID;
#endif
    struct timespec now;
    if (clock_gettime(cpu_clock, &now) != 0) return false;
    *ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    return true;
#else
    (void)ns;
    return false;
#endif
}

/* Time this thread has waited for a processor: the second number in its schedstat. (The first is
   no processor clock: it stands still between ticks.) */
SPDL__PRIVATE bool spdl__wait_time(spdl__meter *meter, uint64_t *ns) {
#if defined(__linux__) && defined(SYS_pread64)
    char text[64];
    long length;
    char *at;
    if (meter->thread != spdl__thread_id()) {
        if (meter->file >= 0) (void)close(meter->file);
        meter->file = open("/proc/thread-self/schedstat", O_RDONLY | SPDL__O_CLOEXEC);
        meter->thread = spdl__thread_id();
    }
    if (meter->file < 0) return false;
    length = syscall(SYS_pread64, meter->file, text, (long)sizeof(text) - 1, 0L, 0L);
    if (length <= 0) return false;
    text[length] = '\0';
    (void)strtoull(text, &at, 10);
    *ns = strtoull(at, NULL, 10);
    return true;
#else
    (void)meter;
    (void)ns;
    return false;
#endif
}

/* Before a sitting. */
SPDL__RARE void spdl__meter_start(spdl__meter *meter) {
    meter->wait_known = spdl__wait_time(meter, &meter->wait_ns);
    meter->cpu_known = spdl__cpu_time(&meter->cpu_ns);
    meter->ns = spdl_time_ns();
}

/* After it: what of *ns was spent how. The readings of the clocks lie around those of the time, so
   they may come to more than it. */
SPDL__PRIVATE void spdl__meter_stop(spdl__meter *meter, uint64_t *ns, uint64_t *cpu_ns,
                                    uint64_t *wait_ns) {
    uint64_t cpu = meter->cpu_ns, wait = meter->wait_ns;
    *ns = spdl_time_ns() - meter->ns;
    meter->cpu_known = meter->cpu_known && spdl__cpu_time(&cpu);
    meter->wait_known = meter->wait_known && spdl__wait_time(meter, &wait);
    if (meter->first_wait_ns == 0) meter->first_wait_ns = meter->wait_ns;
    if (meter->wait_known) spdl__store_relaxed(&meter->waited_ns, wait - meter->first_wait_ns);
    *cpu_ns = spdl__min(cpu - meter->cpu_ns, *ns);
    *wait_ns = spdl__min(wait - meter->wait_ns, *ns - *cpu_ns);
}

/* --- what the pipeline calls; >>trace-impl has them --- */

struct spdl__edge;
struct spdl__node;
struct spdl__counters;

/* Around the calls of a sitting that is due to be measured. The lane is told by where it counts. */
SPDL__PRIVATE void spdl__meter_begin(spdl_pipeline *p, struct spdl__node *node,
                                     struct spdl__counters *counters);
SPDL__PRIVATE void spdl__meter_end(spdl_pipeline *p, struct spdl__node *node,
                                   struct spdl__counters *counters, uint64_t calls);

/* Around one call: probes. (A trace puts a function of its own in place of the stage's.) */
SPDL__INLINE void spdl__call_begin(const spdl_task *task);
SPDL__INLINE void spdl__call_end(const spdl_task *task);

/* Around a wait of the trainer, while p->wait_since is set. */
SPDL__PRIVATE void spdl__wait_begin(const spdl_pipeline *p);
SPDL__PRIVATE void spdl__wait_end(spdl_pipeline *p, spdl_result result);

/* Something was taken, first of it ticket `from`. */
SPDL__RARE void spdl__trace_taken(struct spdl__edge *edge, uint64_t from, uint64_t now);

/* Something was put, or taken: how many items there are now. */
SPDL__RARE void spdl__trace_depth(struct spdl__edge *edge);

/* An item goes into the open batch; batch `number` is about to be put by a step that began at
   `began`: whoever takes it from there does so later than this tells. */
SPDL__RARE void spdl__trace_item(struct spdl__node *node, uint64_t item);
SPDL__RARE void spdl__trace_batch(spdl_pipeline *p, struct spdl__node *node,
                                  struct spdl__counters *counters, uint64_t number, uint64_t began);

/* What the meters and spdl_report_bytes found, for a snapshot whose busy_ns is there. */
SPDL__PRIVATE void spdl__split_snapshot(const spdl_pipeline *p, const struct spdl__node *node,
                                        spdl_stage_stats *stats);

/* The workers' time on the run queues outside of calls; the stages' numbers are there. */
SPDL__PRIVATE uint64_t spdl__workers_snapshot(spdl_pipeline *p, const spdl_stats *stats);

/* In create and destroy. Only a lack of memory for the meters fails create. */
SPDL__PRIVATE spdl_result spdl__trace_open(spdl_pipeline *p, const spdl_pipeline_desc *desc);
SPDL__PRIVATE void spdl__trace_close(spdl_pipeline *p);

/* ============================================================================================= */
/* >>edge-impl
   Edges, and what travels on them. An edge is a ring of slots addressed by tickets, the number of a
   result on this edge. A slot is ready when its stamp is its ticket + 1. A writer may put a result
   at any ticket that was promised to it, so the ring is also the reorder buffer; who reads takes
   the tickets in order.

   The word. Who reads an edge has a word: the next ticket to take (`head`), and of a row the calls
   inside (`active`) and three flags. **An item is taken by one compare-and-swap on that word**,
   which moves `head` and counts the call. What is rare is done while the word is HELD: nobody else
   takes then, and the plain fields beside it (shift, holes, marks) may be changed; no user code
   runs meanwhile. A merge, and the trainer, have the edges they read to themselves: there the word
   is just the head. A source, a merge: a word of their own.

   Tickets. A row with input order and a concurrency above 1 promises a ticket when it takes the
   input, in their order, so its results wait for each other: ticket = head + shift, where shift
   makes up for what is not one ticket for one result. A dropped item leaves a hole, which gives its
   place among the waiting back at once (`refunds`) and its slot when the reader passes it. All
   other writers take a ticket when they put (`tail`).

   Room is known before the call, so no result ever waits for room: promised - refunds - taken <=
   buffer_size + concurrency, and promised - head <= window.

   What a slot holds: an item; a hole; a bundle, the items one call has emitted, which the reader
   takes one by one; or a mark, the end of an epoch; with the lowest and the highest of the source's
   items that are in it.

   Threads: each field says who writes it. The pipeline owns the edges and every item on them. */

#define SPDL__HOLE 0xffu   /* owner of a slot whose item was dropped */
#define SPDL__MARK 0xfeu   /* owner of a slot that ends an epoch */
#define SPDL__BUNDLE 0xfdu /* owner of a slot with a bundle */
#ifndef SPDL__PATIENCE_NS
#define SPDL__PATIENCE_NS SPDL_SECONDS(5) /* then destroy reports what it waits for */
#endif
#define SPDL__SITTING_NS 40000  /* how long a worker stays in a row before it looks downstream */
#define SPDL__SITTING_ITEMS 32  /* and how many items it takes there at most */
#define SPDL__TIMED_NS 1000     /* calls that take as long on average are timed one by one */
#define SPDL__STARVED_NS 20000000 /* polite workers: a trainer that sleeps for so long ... */
#define SPDL__RESCUE_NS SPDL_SECONDS(60) /* ... is helped for so long, see >>pipeline-impl */
#define SPDL__WATERMARK_BUFFER 8 /* a sink that large has a low watermark, see sink_hint */
#define SPDL__OPEN UINT64_MAX   /* end of an edge that has not ended */
#define SPDL__WINDOW 64         /* slots that holes may take when the row does not say */
#define SPDL__MAX_CONCURRENCY 4096
#define SPDL__MAX_BUFFER (1 << 20)
#define SPDL__MAX_SPARE 65536   /* batches of one row that are made ahead */
#define SPDL__RATE_CALLS 100    /* a failure rate is judged from this many calls on */

/* A word: head, flags, active. */
#define SPDL__ACTIVE 0x1fffu   /* calls inside, those that are deferred too, and who holds */
#define SPDL__HELD 0x2000u     /* somebody changes what belongs to the word */
#define SPDL__FINISHED 0x4000u /* nothing more will come out of this row */
#define SPDL__STOPPED 0x8000u  /* nobody may enter any more */
#define SPDL__FLAGS (SPDL__HELD | SPDL__FINISHED | SPDL__STOPPED)
#define SPDL__BUSY 0xffffu     /* flags and active: less than the concurrency if there is a place */
#define SPDL__HEAD_BITS 16
#define SPDL__HEAD_ONE ((uint64_t)1 << SPDL__HEAD_BITS)

/* A range of the source's items: the lowest, from 0 over all epochs, and how many more there are up
   to the highest. */
#define SPDL__SPAN_BITS 24
#define SPDL__SPAN_MAX (((uint64_t)1 << SPDL__SPAN_BITS) - 1)

typedef struct spdl__slot { /* half a line of the cache */
    void *item;
    uint64_t origin; /* sequence << 8 | row of the stage that made it, or one of the owners above */
    uint64_t range;  /* lowest << SPDL__SPAN_BITS | span */
    uint32_t stamp;  /* low bits of ticket + 1 when ready */
    uint32_t done;   /* when it was put, in units of 1024 ns */
} spdl__slot;

typedef struct spdl__edge {
    /* written by create */
    spdl__slot *slots;
    uint64_t mask;     /* slots - 1: a power of two */
    uint64_t window;   /* tickets that may be given out beyond head */
    uint64_t buffer_size;
    spdl__lane *lane;  /* of the trace, or NULL */
    char pad0[SPDL_CACHE_LINE];
    /* written by the row that writes the edge */
    uint64_t tail;    /* the next ticket to put, where results take one when they are put */
    uint64_t refunds; /* tickets that were promised and hold no item */
    uint64_t end;     /* one past the last ticket, once it is known */
    char pad1[SPDL_CACHE_LINE];
    /* written by whoever reads */
    uint64_t word;
    uint64_t shift; /* while held: items taken - tickets passed (of bundles more, of holes less) */
    uint64_t holes; /* while held: tickets passed that were holes */
    uint64_t marks; /* while held: tickets passed that were marks */
    char pad2[SPDL_CACHE_LINE];
    uint64_t put_wait_ns; /* added to by whoever takes */
    uint64_t ended_ns;    /* when the reader met the end */
    /* open gaps: set by whoever takes, closed by whoever exchanges them for 0 */
    uint64_t gap_since;  /* nothing to take since then */
    uint64_t wait_since; /* and the reader was free to take it */
    uint64_t empty_ns;
    uint64_t get_wait_ns;
    char pad3[SPDL_CACHE_LINE];
    uint64_t seen[6]; /* what snapshots have reported: the sum of an open and a closed wait can be a
                         little less when it was closed by a clock read before, and the items while
                         holes are passed */
} spdl__edge;

SPDL__PRIVATE uint64_t spdl__gap_sum(const uint64_t *since, const uint64_t *sum, uint64_t now);
SPDL__PRIVATE void spdl__first_item(spdl_pipeline *p, uint64_t now); /* these: >>stats-impl */
SPDL__PRIVATE void spdl__report_begin(spdl_pipeline *p, const spdl_pipeline_desc *desc);
SPDL__PRIVATE void spdl__report_end(spdl_pipeline *p); /* these two: >>report-impl */

SPDL__INLINE uint64_t spdl__head(uint64_t word) { return word >> SPDL__HEAD_BITS; }

SPDL__INLINE spdl__slot *spdl__edge_slot(const spdl__edge *edge, uint64_t ticket) {
    return &edge->slots[ticket & edge->mask];
}

/* The acquire pairs with the release in edge_put: the item is there. */
SPDL__INLINE bool spdl__slot_has(const spdl__slot *slot, uint64_t ticket) {
    return spdl__load32(&slot->stamp) == (uint32_t)(ticket + 1);
}

SPDL__INLINE bool spdl__edge_ready(const spdl__edge *edge, uint64_t ticket) {
    return spdl__slot_has(spdl__edge_slot(edge, ticket), ticket);
}

SPDL__INLINE uint64_t spdl__origin(uint64_t sequence, unsigned owner) {
    return sequence << 8 | owner;
}

SPDL__INLINE unsigned spdl__owner(uint64_t origin) { return (unsigned)(origin & 0xff); }

SPDL__INLINE uint32_t spdl__ticks(uint64_t ns) { return (uint32_t)(ns >> 10); }

/* Both ranges, and what lies between them. */
SPDL__PRIVATE uint64_t spdl__range_join(uint64_t a, uint64_t b) {
    const uint64_t low_a = a >> SPDL__SPAN_BITS, low_b = b >> SPDL__SPAN_BITS;
    const uint64_t low = spdl__min(low_a, low_b);
    const uint64_t high =
        spdl__max(low_a + (a & SPDL__SPAN_MAX), low_b + (b & SPDL__SPAN_MAX));
    return low << SPDL__SPAN_BITS | spdl__min(high - low, SPDL__SPAN_MAX);
}

/* An item on its way. */
typedef struct spdl__emitted {
    void *item;
    uint64_t origin;
    uint64_t range;
} spdl__emitted;

/* The one way to read a slot, by everything that takes an item from an edge. A compare-and-swap
   that fails afterwards says that it was somebody else's, and may have been written anew meanwhile.
   */
SPDL__INLINE spdl__emitted spdl__slot_read(const spdl__slot *slot) {
    spdl__emitted got;
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
    const uint64_t holes = spdl__load(&edge->holes); /* after head: at least those before it */
    const uint64_t until = head - holes + capacity + spdl__load(&edge->refunds);
    return by_ticket && (int64_t)(until - head - edge->window) > 0 ? head + edge->window : until;
}

/* Ends an open gap, if it is still open, and adds its length to *sum. */
SPDL__PRIVATE void spdl__gap_close(uint64_t *since, uint64_t *sum, uint64_t now) {
    const uint64_t opened = spdl__load_relaxed(since) ? spdl__exchange(since, 0) : 0;
    if (opened != 0 && now > opened) spdl__add(sum, now - opened);
}

SPDL__PRIVATE void spdl__edge_gap_close(spdl__edge *edge, uint64_t now) {
    spdl__gap_close(&edge->gap_since, &edge->empty_ns, now);
    spdl__gap_close(&edge->wait_since, &edge->get_wait_ns, now);
}

/* Writers. The ticket was promised, so the slot is free. */
SPDL__INLINE void spdl__edge_put(spdl__edge *edge, uint64_t ticket, const spdl__emitted *what,
                                 uint64_t now) {
    spdl__slot *slot = spdl__edge_slot(edge, ticket);
    spdl__store_pointer(&slot->item, what->item);
    spdl__store_relaxed(&slot->origin, what->origin);
    spdl__store_relaxed(&slot->range, what->range);
    spdl__store_relaxed32(&slot->done, spdl__ticks(now));
    /* pairs with slot_has: all that is there before the stamp */
    spdl__store32(&slot->stamp, (uint32_t)(ticket + 1));
    SPDL_TEST_POINT("pipeline put");
    if (!SPDL__NO_STATS && SPDL__UNLIKELY(spdl__load_relaxed(&edge->gap_since) != 0) &&
        spdl__head(spdl__load_relaxed(&edge->word)) == ticket)
        spdl__edge_gap_close(edge, spdl_time_ns()); /* `now` may be from before many quick calls */
}

/* Whether a ready slot holds no item. */
SPDL__PRIVATE bool spdl__slot_hole(const spdl__slot *slot) {
    const unsigned owner = spdl__owner(spdl__load_relaxed(&slot->origin));
    return owner == SPDL__HOLE || owner == SPDL__MARK;
}

/* How long ago a ready slot was put, in whole units of 1024 ns. */
SPDL__PRIVATE uint64_t spdl__slot_age(const spdl__slot *slot, uint64_t now) {
    const int32_t ticks = (int32_t)(spdl__ticks(now) - spdl__load_relaxed32(&slot->done));
    return ticks > 0 ? (uint64_t)ticks << 10 : 0;
}

/* Who takes ticket `head`: how long the item that enters the buffer now had waited for that. */
SPDL__PRIVATE uint64_t spdl__edge_put_wait(const spdl__edge *edge, uint64_t head, uint64_t now) {
    const spdl__slot *slot = spdl__edge_slot(edge, head + edge->buffer_size);
    if (SPDL__NO_STATS || !spdl__slot_has(slot, head + edge->buffer_size)) return 0;
    return spdl__slot_hole(slot) ? 0 : spdl__slot_age(slot, now);
}

SPDL__PRIVATE void spdl__edge_waited(spdl__edge *edge, uint64_t ns) {
    if (ns != 0) spdl__add(&edge->put_wait_ns, ns);
}

/* The reader has become free, or not: from now on an empty edge is a wait. */
SPDL__PRIVATE void spdl__edge_hungry(spdl__edge *edge, uint64_t now) {
    if (SPDL__NO_STATS || spdl__load_relaxed(&edge->gap_since) == 0) return;
    if (spdl__load_relaxed(&edge->wait_since) != 0) return;
    spdl__store_relaxed(&edge->wait_since, now);
    if (SPDL__TRACED(edge->lane)) spdl__store_relaxed(&edge->lane->begun, now);
    if (spdl__load_relaxed(&edge->gap_since) == 0) spdl__exchange(&edge->wait_since, 0);
}

/* Who has taken what lay before `head`, first of it ticket `from`: gaps end with what was there,
   and begin where nothing is. Writer and reader may have missed each other: the slot's own time
   says when a gap ended. */
SPDL__INLINE void spdl__edge_took(spdl__edge *edge, uint64_t from, uint64_t head, uint64_t now) {
    if (SPDL__TRACED(edge->lane)) spdl__trace_taken(edge, from, now);
    if (SPDL__NO_STATS || now == 0) return;
    if (SPDL__UNLIKELY(spdl__load_relaxed(&edge->gap_since) != 0 ||
                       spdl__load_relaxed(&edge->wait_since) != 0))
        spdl__edge_gap_close(edge, now - spdl__slot_age(spdl__edge_slot(edge, from), now));
    if (SPDL__LIKELY(spdl__edge_ready(edge, head))) return;
    if (spdl__head(spdl__load_relaxed(&edge->word)) != head) return; /* others are further */
    spdl__store_relaxed(&edge->gap_since, now);
    if (spdl__edge_ready(edge, head)) spdl__exchange(&edge->gap_since, 0); /* put just then */
}

/* The reader has met the end. */
SPDL__PRIVATE void spdl__edge_ended(spdl__edge *edge, uint64_t now) {
    if (edge->ended_ns != 0) return;
    spdl__edge_gap_close(edge, now);
    spdl__store_relaxed(&edge->ended_ns, now);
}

SPDL__PRIVATE void spdl__spin_lock(uint32_t *lock) {
    while (spdl__exchange32(lock, 1) != 0) spdl__yield();
}

SPDL__PRIVATE void spdl__spin_unlock(uint32_t *lock) { spdl__store32(lock, 0); }

SPDL__PRIVATE bool spdl__try_lock(uint32_t *lock) {
    return spdl__load_relaxed32(lock) == 0 && spdl__exchange32(lock, 1) == 0;
}

/* --- bundles --- */

/* The items one call has emitted. Bundles are made when a call needs one, kept by their stage and
   used again: a stage that emits as much as before allocates nothing. */
typedef struct spdl__shelf spdl__shelf;
typedef struct spdl__bundle {
    struct spdl__bundle *next;
    spdl__shelf *shelf;
    size_t space, count;
    size_t at; /* the reader's: the next one to take */
    spdl__emitted *entry;
} spdl__bundle;

struct spdl__shelf {
    const spdl_allocator *allocator;
    uint32_t lock;
    spdl__bundle *spare;
};

SPDL__PRIVATE spdl__bundle *spdl__bundle_get(spdl__shelf *shelf) {
    spdl__bundle *bundle;
    spdl__spin_lock(&shelf->lock);
    bundle = shelf->spare;
    if (bundle != NULL) shelf->spare = bundle->next;
    spdl__spin_unlock(&shelf->lock);
    if (bundle != NULL) return bundle;
    bundle = (spdl__bundle *)spdl__alloc_zeroed(shelf->allocator, 1, sizeof(*bundle), 8);
    if (bundle != NULL) bundle->shelf = shelf;
    return bundle;
}

SPDL__PRIVATE void spdl__bundle_put_back(spdl__bundle *bundle) {
    spdl__shelf *shelf = bundle->shelf;
    bundle->at = bundle->count = 0;
    spdl__spin_lock(&shelf->lock);
    bundle->next = shelf->spare;
    shelf->spare = bundle;
    spdl__spin_unlock(&shelf->lock);
}

/* Twice the space, or none at all. */
SPDL__PRIVATE bool spdl__bundle_grow(spdl__bundle *bundle) {
    const spdl_allocator *allocator = bundle->shelf->allocator;
    const size_t space = bundle->space ? 2 * bundle->space : 8;
    spdl__emitted *entry =
        (spdl__emitted *)spdl__alloc_zeroed(allocator, space, sizeof(*entry), sizeof(void *));
    if (entry == NULL) return false;
    if (bundle->count > 0) memcpy(entry, bundle->entry, bundle->count * sizeof(*entry));
    spdl__free(allocator, bundle->entry, bundle->space * sizeof(*entry));
    bundle->entry = entry;
    bundle->space = space;
    return true;
}

SPDL__PRIVATE bool spdl__bundle_add(spdl__bundle *bundle, const spdl__emitted *what) {
    if (bundle->count == bundle->space && !spdl__bundle_grow(bundle)) return false;
    bundle->entry[bundle->count++] = *what;
    return true;
}

SPDL__PRIVATE void spdl__shelf_release(spdl__shelf *shelf) {
    while (shelf->spare != NULL) {
        spdl__bundle *bundle = shelf->spare;
        shelf->spare = bundle->next;
        spdl__free(shelf->allocator, bundle->entry, bundle->space * sizeof(*bundle->entry));
        spdl__free(shelf->allocator, bundle, sizeof(*bundle));
    }
}

/* --- reading by one thread --- */

/* Where a reader is that has the edge to itself: who holds its word, a merge, the trainer. Nothing
   of it is seen by others before cursor_settle, nor the head before that is stored. */
typedef struct spdl__cursor {
    spdl__edge *edge;
    uint64_t from, head, end;
    uint64_t shift, holes, marks;
} spdl__cursor;

typedef enum spdl__sight { SPDL__NOTHING, SPDL__AN_ITEM, SPDL__A_MARK } spdl__sight;

SPDL__INLINE spdl__cursor spdl__cursor_at_head(spdl__edge *edge) {
    spdl__cursor c;
    c.edge = edge;
    c.end = spdl__load(&edge->end); /* before the slots: what was put before it is seen */
    c.from = c.head = spdl__head(spdl__load_relaxed(&edge->word));
    c.shift = edge->shift;
    c.holes = edge->holes;
    c.marks = edge->marks;
    return c;
}

/* What comes next. Holes are passed over. */
SPDL__INLINE spdl__sight spdl__cursor_look(spdl__cursor *c) {
    for (; c->head < c->end; ++c->head, ++c->holes, --c->shift) {
        const spdl__slot *slot = spdl__edge_slot(c->edge, c->head);
        unsigned owner;
        if (!spdl__slot_has(slot, c->head)) return SPDL__NOTHING;
        owner = spdl__owner(spdl__load_relaxed(&slot->origin));
        if (owner != SPDL__HOLE) return owner == SPDL__MARK ? SPDL__A_MARK : SPDL__AN_ITEM;
    }
    return SPDL__NOTHING;
}

/* Passes the mark that cursor_look has seen. */
SPDL__INLINE void spdl__cursor_pass_mark(spdl__cursor *c) {
    ++c->head;
    ++c->marks;
}

/* Takes the item that cursor_look has seen. */
SPDL__INLINE spdl__emitted spdl__cursor_take(spdl__cursor *c) {
    spdl__emitted got = spdl__slot_read(spdl__edge_slot(c->edge, c->head));
    if (SPDL__UNLIKELY(spdl__owner(got.origin) == SPDL__BUNDLE)) {
        spdl__bundle *bundle = (spdl__bundle *)got.item;
        got = bundle->entry[bundle->at++];
        if (bundle->at < bundle->count) { /* the slot stays */
            ++c->shift;
            return got;
        }
        spdl__bundle_put_back(bundle);
    }
    ++c->head;
    return got;
}

/* Before the head is stored. Each release pairs with the acquire of whoever reads the field after
   the head, or compares and swaps the head after the field. Whether anything was read or passed. */
SPDL__PRIVATE bool spdl__cursor_settle(const spdl__cursor *c) {
    spdl__edge *edge = c->edge;
    const bool moved = c->head != c->from || c->shift != edge->shift;
    if (c->shift != edge->shift) spdl__store(&edge->shift, c->shift);
    if (c->holes != edge->holes) spdl__store(&edge->holes, c->holes);
    if (c->marks != edge->marks) spdl__store_relaxed(&edge->marks, c->marks);
    return moved;
}

/* How long those that enter the buffer when the cursor has moved had waited for that. */
SPDL__PRIVATE void spdl__cursor_put_waits(const spdl__cursor *c, uint64_t now) {
    uint64_t ticket, waited = 0;
    if (SPDL__NO_STATS || now == 0) return;
    for (ticket = c->from; ticket < c->head; ++ticket)
        waited += spdl__edge_put_wait(c->edge, ticket, now);
    spdl__edge_waited(c->edge, waited);
}

/* For who reads the edge without a row of its own at its word: the head, too. */
SPDL__PRIVATE bool spdl__cursor_store(const spdl__cursor *c, uint64_t now) {
    const bool moved = spdl__cursor_settle(c);
    if (c->head == c->from) return moved;
    spdl__cursor_put_waits(c, now);
    (void)spdl__exchange(&c->edge->word, c->head << SPDL__HEAD_BITS);
    spdl__edge_took(c->edge, c->from, c->head, now);
    return true;
}

/* --- batches --- */

/* Batches are made with the pipeline and come back to its pool; a trainer that keeps many makes the
   pool grow. The pool lives until the pipeline and every batch are gone. */
typedef struct spdl__batch_pool {
    spdl_allocator allocator;
    size_t size;
    spdl_ring *spare;
    uint64_t references; /* the pipeline, and every batch outside of `spare` */
    spdl_free_fn free_item[SPDL_MAX_STAGES];
} spdl__batch_pool;

typedef struct spdl__batch {
    spdl_batch shown; /* first: what users see */
    spdl__batch_pool *pool;
    uint8_t *owner;   /* row of the stage that made each item */
    uint64_t range;   /* of the source's items in it; when there is one */
} spdl__batch;

SPDL__PRIVATE size_t spdl__batch_bytes(const spdl__batch_pool *pool) {
    return sizeof(spdl__batch) + pool->size * (sizeof(void *) + 1);
}

SPDL__PRIVATE spdl__batch *spdl__batch_make(spdl__batch_pool *pool) {
    spdl__batch *batch =
        (spdl__batch *)spdl__alloc(&pool->allocator, spdl__batch_bytes(pool), sizeof(void *));
    if (batch == NULL) return NULL;
    batch->pool = pool;
    batch->shown.items = (void **)(void *)(batch + 1);
    batch->owner = (uint8_t *)(batch->shown.items + pool->size);
    return batch;
}

SPDL__PRIVATE void spdl__batch_pool_drop(spdl__batch_pool *pool) {
    const spdl_allocator allocator = pool->allocator;
    void *batch;
    if (spdl__sub(&pool->references, 1) != 1) return;
    while (pool->spare != NULL && spdl_ring_try_pop(pool->spare, &batch) == SPDL_OK)
        spdl__free(&allocator, batch, spdl__batch_bytes(pool));
    spdl_ring_destroy(pool->spare, NULL, NULL);
    spdl__free(&allocator, pool, sizeof(*pool));
}

/* An empty batch; NULL when there is no memory for one more. */
SPDL__PRIVATE spdl__batch *spdl__batch_get(spdl__batch_pool *pool) {
    void *spare = NULL;
    spdl__batch *batch;
    if (spdl_ring_try_pop(pool->spare, &spare) == SPDL_OK)
        batch = (spdl__batch *)spare;
    else
        batch = spdl__batch_make(pool);
    if (batch == NULL) return NULL;
    batch->shown.count = 0;
    batch->range = 0;
    spdl__add(&pool->references, 1);
    return batch;
}

SPDL__PRIVATE void spdl__batch_free_items(spdl__batch *batch) {
    size_t i;
    for (i = 0; i < batch->shown.count; ++i) {
        const spdl_free_fn free_item = batch->pool->free_item[batch->owner[i]];
        if (batch->shown.items[i] != NULL && free_item != NULL) free_item(batch->shown.items[i]);
    }
}

SPDL_API void spdl_batch_free(void *batch) {
    spdl__batch *whole = (spdl__batch *)batch;
    spdl__batch_pool *pool;
    if (whole == NULL) return;
    pool = whole->pool;
    spdl__batch_free_items(whole);
    if (spdl_ring_try_push(pool->spare, &batch) != SPDL_OK)
        spdl__free(&pool->allocator, whole, spdl__batch_bytes(pool));
    spdl__batch_pool_drop(pool);
}

/* `ahead` batches are made now: as many as the pipeline itself can hold. */
SPDL__PRIVATE spdl__batch_pool *spdl__batch_pool_make(const spdl_allocator *allocator, size_t size,
                                                      size_t ahead) {
    spdl__batch_pool *pool =
        (spdl__batch_pool *)spdl__alloc_zeroed(allocator, 1, sizeof(*pool), sizeof(void *));
    spdl_ring_desc spare;
    size_t i;
    if (pool == NULL) return NULL;
    pool->allocator = *allocator;
    pool->size = size;
    pool->references = 1;
    memset(&spare, 0, sizeof(spare));
    spare.capacity = ahead;
    spare.allocator = *allocator;
    if (spdl_ring_create(&pool->spare, &spare) != SPDL_OK) {
        spdl__batch_pool_drop(pool);
        return NULL;
    }
    for (i = 0; i < ahead; ++i) {
        spdl__batch *batch = spdl__batch_make(pool);
        if (batch == NULL || spdl_ring_try_push(pool->spare, &batch) != SPDL_OK) {
            spdl__batch_pool_drop(pool);
            return NULL;
        }
    }
    return pool;
}

/* ============================================================================================= */
/* >>flow-impl
   Rows at work. A worker enters a row by taking an item: one compare-and-swap on the row's word
   (see >>edge-impl), then the call, then the result is put, and so on with the next item, for up to
   SPDL__SITTING_NS (a sitting). So nothing is ever taken and not begun, and calls of a row begin in
   the order of its inputs. A swap that fails means "look elsewhere", never "wait". When the worker
   leaves, `active` goes down by one.

   What is rare is done while the word is held (sitting_hold): passing dropped items, the items of a
   bundle, the end of an epoch, the call of .flush, completion order within a window, and the end of
   the row. Conditions are looked at again then, as they may have been another's when the row looked
   runnable. Rows that call nothing (batch, merge) do all their work so. User code never runs there
   but for merge_fn, an allocator when more batches are needed than were made, and log_fn when such
   a row fails.

   Who looks, and at what. Each of these is a read-modify-write, or has a full barrier behind it;
   then `sleepers` of the pool is read: taking an item (one input less: room for the row before; and
   the put before it: an input for the row after); leaving a row (a place in it); releasing a held
   word; the trainer's take; the producer's push; spdl_complete; a new concurrency; a failure.
   Behind the first take of a sitting a worker looks at all rows of its pool, as it may have been
   woken for another, and behind the others at its own row and those before and after. After it has
   left it looks for work itself, which covers all rows of its pool. A trainer's take from a large
   buffer looks at the last row only while no more than half of it is on the way (a low watermark:
   who is woken makes several items before it sleeps again); a trainer that is about to sleep, and
   who asks for the stats, look without that.

   Orders. `closed`, `ended`, `open`, `leaving` and `stopping` go from 0 to 1 and stay: stored with
   release and loaded with acquire by whoever takes or looks, so that what was written before (an
   error, the cut, what init has stored) is seen with them. `limit` guards nothing.

   Branches. The edges of a branch are those of its path rows, which do nothing else. A branch is
   called when there is room on every path. A merge has no edge of its own in front: it reads those
   of the last row of each path.

   Epochs. A mark is passed when no other call of the row is active, and handed on at once; a merge
   does so when every path is at its mark.

   Failures. The first failure that exceeds a budget is recorded and cuts the flow: with tickets
   given in advance at its ticket, which stays unfilled, so that exactly the items before it are
   delivered; else after what was in flight. The row and all before it take no more: they finish,
   and what is after them delivers what it got.

   Stop. The flag STOPPED in every word lets nobody enter any more; who is inside leaves after the
   call at hand, and the last one to leave wakes the stop.

   Deferred calls. Each has a place in `parked`, whose state is one word: armed by spdl_defer; then
   either the function returns PENDING first (waiting, and spdl_complete settles the call) or
   spdl_complete comes first (done, and the worker settles it when the function returns). The
   generation in that word and in the id tells a handle that is dead from one that lives. */

/* Buckets of the histogram: exact below 8, then 8 to each power of two, up to 2^43 ns (2.4 h). */
#define SPDL__SUB_BITS 3
#define SPDL__TOP_BITS 43
#define SPDL__BUCKETS ((SPDL__TOP_BITS - SPDL__SUB_BITS + 1) << SPDL__SUB_BITS)

/* What one worker counted for one stage: one writer, read by snapshots. In the cell after those of
   the workers `freed` is written under purge_lock, the rest under foreign_lock; the producer counts
   in the first cell of its row, which no worker runs. */
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

SPDL__INLINE bool spdl__meter_is_due(const spdl__counters *counters) {
    return SPDL__METERED && SPDL__UNLIKELY(counters->meter_due <= 0);
}

typedef struct spdl__parked spdl__parked;
typedef struct spdl__tuner spdl__tuner;
typedef struct spdl__crew spdl__crew;

typedef struct spdl__node {
    /* written by create */
    spdl_stage row;
    int index;
    char name[SPDL_NAME_BYTES];
    bool ordered;    /* results come in the order of the inputs */
    bool serial;     /* one call at a time: results take their ticket when they are put */
    bool by_ticket;  /* ordered and not serial: tickets are promised when the inputs are taken */
    bool plain;      /* a pipe with nothing out of the ordinary */
    bool splits;     /* a branch whose batches are joined again */
    bool at_end;     /* the trainer or the producer may wait for what it does */
    uint32_t above;  /* bit i: what row i makes can come here */
    uint32_t beside; /* bit i: row i writes an edge that this one reads, or the other way */
    int paths;       /* branch: rows whose edge it writes; merge: rows whose edge it reads */
    uint8_t path[SPDL_MAX_STAGES];
    size_t batch_size; /* what comes out: the most items in a batch; 0: no batches of ours */
    struct spdl__node *branch; /* a row of a path whose batches are joined: the branch that splits
                                  them; else NULL */
    struct spdl__node *begin;  /* merge: the branch it ends */
    struct spdl__node *before; /* the row that writes `in`; of a path, its branch; or NULL */
    spdl__edge *in;  /* NULL for rows that read none or several */
    uint64_t *word;  /* of the edge it reads, or `own` */
    spdl__edge out;
    spdl__counters *counters; /* one per worker, and one for other threads */
    spdl__batch_pool *batches;
    spdl__shelf shelf;
    spdl__parked *parked;
    spdl__crew *crew;  /* whose workers run it */
    uint32_t *settled; /* completion order with a window: stamps of the calls that have ended */
    uint64_t settled_mask;
    char pad0[SPDL_CACHE_LINE];
    uint64_t own; /* written by who takes: the word of a source or merge */
    /* written by who holds the word, or is alone in a serial row */
    uint32_t flushed;  /* the call without input was made in this epoch */
    uint32_t turn;     /* merge: the path that is looked at first */
    uint64_t refused;  /* merge: what merge_fn saw when it said to wait */
    uint64_t begun;    /* with a window: so many calls; all of those before `oldest` have ended */
    uint64_t oldest;
    uint64_t number;   /* batch: of the next one in this epoch */
    uint64_t range;    /* with .flush: what came in last */
    spdl__batch *open_batch;
    uint64_t epoch;    /* of the items that pass now */
    uint64_t made;     /* source: items made so far in this epoch */
    uint64_t made_all; /* and in all of them */
    char pad1[SPDL_CACHE_LINE];
    /* written now and then, by any thread */
    uint32_t limit;  /* the concurrency now */
    uint32_t closed; /* nothing more is taken: it failed, or a stage below did */
    uint32_t ended;  /* source and feed: there is no more */
    uint32_t parked_lock;
    uint32_t parked_free; /* 1 + the first free place in `parked`, or 0 */
    uint64_t cut;    /* with tickets in advance: that of the failure that ended the pipeline */
    uint64_t calls;  /* for max_failure_rate */
    uint64_t failures;
    uint64_t item_ns; /* moving average of a call; a guess */
    char pad2[SPDL_CACHE_LINE];
    /* the trainer waited: while this row's call was running, and while no worker took its input;
       written under blame_lock */
    uint64_t exposed_ns, exposed_idle_ns;
} spdl__node;

/* The threads of one pool and the rows they run: all but those with threads of their own, or one of
   those. Written by create. */
struct spdl__crew {
    spdl_pipeline *pipeline;
    spdl_pool *pool; /* NULL: the trainer's thread, with workers = 0 */
    bool own_pool;
    int first; /* its workers count from here in the pipeline */
    int workers;
    uint32_t rows; /* a bit for each */
    spdl__client client;
    spdl__client_slot *slot;
};

/* One call of a stage on a worker; there is one for each worker, used again and again. Written by
   that worker. */
struct spdl_task {
    spdl_pipeline *pipeline;
    spdl__node *node;
    int worker;
    uint32_t live; /* the function is running; other threads look, if they misuse a task */
    bool taken;  /* the input is not the library's any more */
    bool misused; /* the call fails, whatever it returns: what it asked for cannot be */
    bool unfit;   /* nor can it in any other call: the row is wrong */
    bool flushing;
    bool cut_short; /* it would be repeated, but for a stop: neither a result nor a failure */
    int path;
    uint64_t thread; /* that runs it */
    uint64_t sequence;
    uint64_t ticket;
    uint64_t place;  /* among the calls of a stage with a window */
    uint64_t since;  /* when it began */
    spdl__emitted in;
    spdl__bundle *bundle;
    spdl__parked *parked;
    spdl__batch **split; /* a branch of batches: what goes down each path, NULL before */
    char text[SPDL_TEXT_BYTES];
};

struct spdl_pipeline {
    /* written by create */
    spdl_allocator allocator;
    spdl_logger logger;
    bool has_hooks; /* some row has init or fini */
    bool threaded;  /* has workers, of whatever pool */
    int workers;    /* of all crews; at least 1: the trainer is worker 0 when there is no pool */
    int count;      /* rows but the sink */
    int crews;
    spdl__crew *crew; /* the first has the pool; its pool is NULL with workers = 0 */
    spdl__crew *rescue; /* the last, of normal priority; works in the place of the first for a while
                           when the trainer has waited for polite workers; or NULL */
    const uint32_t *sleepers; /* of the pool when there is but one crew; `waiting` when there is no
                                 thread but the trainer; else a word that is 1 */
    spdl__node *node;
    spdl__node *last; /* the row in front of the sink */
    spdl__edge *sink;
    spdl__node *feed; /* the first row when items are pushed, or NULL */
    spdl_task *task;  /* [worker] */
    spdl__batch **split; /* [worker * SPDL_MAX_STAGES + path], for branches */
    spdl__tuner *tuner;
    uint64_t process;
    uint64_t start_ns;
    struct spdl__reporter *reporter; /* NULL unless reports were asked for */
    spdl__trace *trace;    /* NULL: nothing is recorded */
    spdl__meter *meters;   /* [worker], and one for the owner's thread */
    void **local;          /* [worker * count + row] */
    uint8_t *inits;        /* [worker]: 0 to come; 1 + rows whose init has succeeded */
    char pad0[SPDL_CACHE_LINE];
    /* control: written rarely, by any thread */
    uint32_t stopping;
    uint32_t leaving;      /* destroy asks the workers to run fini */
    uint32_t left;         /* workers that have */
    uint32_t joined;       /* workers that ran every init */
    uint32_t open;         /* all of them did: calls may begin */
    uint32_t failed;
    uint32_t completing;   /* threads inside spdl_complete */
    uint32_t error_lock;
    spdl_error error;
    uint32_t purge_lock;
    uint32_t foreign_lock; /* the counters of threads that are no workers */
    spdl__event quiet;     /* a call has ended while stopping, or a worker has left */
    char pad1[SPDL_CACHE_LINE];
    /* the producer */
    uint32_t producer_inside;
    uint32_t producer_waits; /* set by it before it sleeps, cleared by who wakes it */
    spdl__event room;      /* the edge after the feed has some */
    char pad2[SPDL_CACHE_LINE];
    /* the trainer */
    uint32_t trainer_inside;
    uint64_t trainer;      /* with workers = 0: the thread that is inside next, or 0 */
    bool told_closed;
    spdl__emitted last_item;
    uint64_t delivered;
    uint64_t first_item_ns;
    uint64_t ended_ns;
    uint64_t wait_since;   /* 0, or when the wait in next began */
    uint64_t wait_ns;
    uint64_t first_wait_ns; /* what it was when the first item came */
    uint64_t ready_ns;     /* time inside next while an item was ready */
    uint64_t seen_runnable_ns; /* what snapshots have reported */
    char pad3[SPDL_CACHE_LINE];
    uint64_t hurried_ns;   /* when it slept last, and could be rescued from that */
    uint32_t hurry;        /* the rescue works, not the first crew; read by all */
    char pad5[SPDL_CACHE_LINE];
    /* while the trainer waits; read by those who take and put */
    uint32_t waiting;      /* set before it sleeps, cleared by who wakes it */
    spdl__event fed;       /* the sink got what the trainer waits for, or an end */
    uint32_t blame_lock;   /* the rest: written under it */
    uint64_t blame_since;  /* what the trainer waits for is where `blame` says since then; or 0 */
    spdl__node *blame;
    bool blame_idle;       /* it waits for a worker there */
    char pad4[SPDL_CACHE_LINE];
};

/* --- counters --- */

SPDL__PRIVATE unsigned spdl__bucket(uint64_t ns) {
    unsigned power;
    if (ns < (1u << SPDL__SUB_BITS)) return (unsigned)ns;
    if (ns >> SPDL__TOP_BITS != 0) return SPDL__BUCKETS - 1;
    power = 63 - (unsigned)__builtin_clzll(ns);
    return ((power - SPDL__SUB_BITS + 1) << SPDL__SUB_BITS) |
           (unsigned)((ns >> (power - SPDL__SUB_BITS)) & ((1u << SPDL__SUB_BITS) - 1));
}

/* `calls` calls took `ns` together. */
SPDL__PRIVATE void spdl__counters_time(spdl__counters *counters, uint64_t calls, uint64_t ns) {
    const uint64_t each = calls ? ns / calls : 0;
    if (SPDL__NO_STATS || calls == 0) return;
    spdl__count(&counters->timed_ns, ns);
    spdl__count(&counters->bucket[spdl__bucket(each)], calls);
    if (each > spdl__load_relaxed(&counters->max_ns))
        spdl__store_relaxed(&counters->max_ns, each);
}

/* --- items --- */

/* Destroys an item with the free_item of the stage that made it. */
SPDL__PRIVATE void spdl__item_free(spdl_pipeline *p, void *item, uint64_t origin) {
    const unsigned owner = spdl__owner(origin);
    if (item == NULL || owner >= SPDL_MAX_STAGES) return;
    if (p->node[owner].row.free_item != NULL) p->node[owner].row.free_item(item);
}

/* Destroys what is left in a bundle; how many items that were. */
SPDL__PRIVATE size_t spdl__bundle_drop(spdl_pipeline *p, spdl__bundle *bundle) {
    const size_t left = bundle->count - bundle->at;
    for (; bundle->at < bundle->count; ++bundle->at)
        spdl__item_free(p, bundle->entry[bundle->at].item, bundle->entry[bundle->at].origin);
    spdl__bundle_put_back(bundle);
    return left;
}

/* --- failure --- */

/* Whether a new failure is the one to report: the one that ends what is delivered. That is the one
   furthest downstream, and in one ordered stage the one with the smallest item: so an ordered
   pipeline without a budget fails the same way at any number of workers. The trainer reads the
   error when every stage from there on has finished, so it does not change any more. */
SPDL__PRIVATE bool spdl__error_precedes(const spdl_pipeline *p, const spdl__node *node,
                                        uint64_t item) {
    if (!p->failed) return true;
    if (!spdl__load32(&p->open)) return false; /* of several init the first is reported */
    if (node->index > p->error.stage) return true;
    return node->index == p->error.stage && node->ordered && item < p->error.item;
}

SPDL__PRIVATE void spdl__pipeline_record(spdl_pipeline *p, const spdl__node *node,
                                         uint64_t item, spdl_result result, const char *text) {
    char line[SPDL_TEXT_BYTES];
    line[0] = '\0';
    spdl__spin_lock(&p->error_lock);
    if (spdl__error_precedes(p, node, item)) {
        spdl__error_set(&p->error, result, "spdl: stage %d '%s', item %llu: %s", node->index,
                        node->name, (spdl__llu)item, text);
        p->error.stage = node->index;
        p->error.item = item;
        spdl__name_copy(p->error.stage_name, node->name);
        memcpy(line, p->error.text, sizeof(line));
    }
    spdl__store32(&p->failed, 1); /* pairs with the loads in next and failed: the text is there */
    spdl__spin_unlock(&p->error_lock);
    if (line[0] != '\0') spdl__log(&p->logger, SPDL_LOG_INFO, line); /* not under the lock */
}

SPDL__PRIVATE void spdl__pipeline_hint(spdl_pipeline *p);

SPDL__PRIVATE void spdl__node_fail(spdl_pipeline *p, spdl__node *node, uint64_t ticket,
                                   uint64_t item, spdl_result result, const char *text) {
    uint64_t cut = spdl__load(&node->cut);
    int i;
    spdl__pipeline_record(p, node, item, result, text);
    while (ticket < cut && !spdl__cas(&node->cut, &cut, ticket)) {}
    spdl__store32(&node->closed, 1);
    for (i = 0; i < p->count; ++i)
        if (node->above >> i & 1) spdl__store32(&p->node[i].closed, 1);
    spdl__pipeline_hint(p); /* rows that are closed have an end to write, and the producer */
}

/* Whether one more failure is more than this stage may have. */
SPDL__PRIVATE bool spdl__node_over_budget(spdl__node *node) {
    const uint64_t failures = spdl__add(&node->failures, 1) + 1;
    if (node->row.max_failure_rate > 0) {
        const uint64_t calls = spdl__load_relaxed(&node->calls);
        return calls >= SPDL__RATE_CALLS &&
               (double)failures > node->row.max_failure_rate * (double)calls;
    }
    return node->row.max_failures >= 0 && failures > (uint64_t)node->row.max_failures;
}

/* --- what can run --- */

SPDL__PRIVATE spdl__edge *spdl__path_edge(const spdl_pipeline *p, const spdl__node *node,
                                          int path) {
    return &p->node[node->path[path]].out;
}

SPDL__PRIVATE bool spdl__pipeline_halted(const spdl_pipeline *p) {
    return spdl__load32(&p->stopping) != 0;
}

/* The number of the result that the next input makes, dropped ones not counted. */
SPDL__INLINE uint64_t spdl__node_position(const spdl__node *node, uint64_t word) {
    if (node->serial) return spdl__load_relaxed(&node->out.tail);
    return spdl__head(word) + spdl__load(&node->in->shift); /* pairs with cursor_settle */
}

/* Results with a number below this have room. */
SPDL__INLINE uint64_t spdl__node_until(const spdl__node *node) {
    return spdl__edge_until(&node->out,
                            node->out.buffer_size + spdl__load_relaxed32(&node->limit),
                            node->by_ticket);
}

SPDL__PRIVATE bool spdl__row_calls(const spdl_stage *row) {
    return row->kind == SPDL_KIND_SOURCE || row->kind == SPDL_KIND_PIPE ||
           row->kind == SPDL_KIND_BRANCH;
}

/* Whether there is room for one more result. Exact for who is alone in a row, or holds its word;
   else a guess. */
SPDL__PRIVATE bool spdl__node_has_room(const spdl_pipeline *p, const spdl__node *node,
                                       uint64_t word) {
    int i;
    if (node->row.kind != SPDL_KIND_BRANCH)
        return (int64_t)(spdl__node_until(node) - spdl__node_position(node, word)) > 0;
    for (i = 0; i < node->paths; ++i) {
        const spdl__edge *edge = spdl__path_edge(p, node, i);
        if (spdl__load_relaxed(&edge->tail) >= spdl__edge_until(edge, edge->buffer_size + 1, false))
            return false;
    }
    return true;
}

/* Whether the input has ended and all of it was taken. The end is looked at before the head. */
SPDL__PRIVATE bool spdl__edge_exhausted(const spdl__edge *edge) {
    return spdl__load(&edge->end) <= spdl__head(spdl__load(&edge->word));
}

SPDL__PRIVATE bool spdl__node_exhausted(const spdl__node *node) {
    if (node->in == NULL) return spdl__load32(&node->ended) != 0;
    return spdl__edge_exhausted(node->in);
}

/* Completion order with a window: how many calls may begin before one more of those that run has
   ended. */
SPDL__PRIVATE uint64_t spdl__window_left(const spdl__node *node) {
    uint64_t oldest = spdl__load_relaxed(&node->oldest);
    const uint64_t begun = spdl__load_relaxed(&node->begun);
    if (node->settled == NULL) return UINT64_MAX;
    while (oldest < begun &&
           spdl__load32(&node->settled[oldest & node->settled_mask]) == (uint32_t)(oldest + 1))
        ++oldest;
    return (uint64_t)node->row.reorder_window + 1 - (begun - oldest);
}

SPDL__PRIVATE bool spdl__node_has_work(const spdl_pipeline *p, const spdl__node *node,
                                       uint64_t word);

/* What a merge sees of its paths. */
typedef struct spdl__paths {
    signed char ready[SPDL_MAX_STAGES]; /* 1: an item; 0: nothing yet; -1: a mark, or the end */
    int items, marks, ended;
    bool holes; /* there are some in front: passing over them makes room above */
} spdl__paths;

SPDL__PRIVATE spdl__paths spdl__merge_look(const spdl_pipeline *p, const spdl__node *node) {
    spdl__paths seen;
    int i;
    memset(&seen, 0, sizeof(seen));
    for (i = 0; i < node->paths; ++i) {
        const spdl__edge *edge = spdl__path_edge(p, node, i);
        const uint64_t end = spdl__load(&edge->end), head = spdl__head(spdl__load(&edge->word));
        const bool ended = head >= end, there = !ended && spdl__edge_ready(edge, head);
        const uint64_t origin = spdl__load_relaxed(&spdl__edge_slot(edge, head)->origin);
        const bool hole = there && spdl__owner(origin) == SPDL__HOLE;
        const bool mark = there && spdl__owner(origin) == SPDL__MARK;
        if (hole) seen.holes = true;
        if (there && !hole && !mark) ++seen.items;
        seen.marks += mark;
        seen.ended += ended;
        seen.ready[i] = ended || mark ? -1 : there && !hole ? 1 : 0;
    }
    return seen;
}

/* Changes whenever something is taken from an edge: items of a bundle whose slot stays move the one
   number, all others the other, which counts more. */
SPDL__PRIVATE uint64_t spdl__edge_reads(const spdl__edge *edge) {
    return 2 * spdl__head(spdl__load(&edge->word)) + spdl__load(&edge->shift);
}

/* What was taken so far between a branch and its merge, and in front of the branch: grows whenever
   something is. */
SPDL__PRIVATE uint64_t spdl__merge_taken(const spdl__node *merge) {
    const spdl__node *node = merge->begin;
    uint64_t sum = spdl__edge_reads(node->in);
    while (++node < merge) sum += spdl__edge_reads(&node->out);
    return sum;
}

/* Whether none of these rows is at work or has any; a branch with room waits for its input. Who is
   inside is seen in the word; who enters later moves it, or the work it is about to take is still
   there. What a call hands on or gives back is there when `active` is 0. */
SPDL__PRIVATE bool spdl__merge_rests(const spdl_pipeline *p, const spdl__node *merge) {
    const spdl__node *node;
    for (node = merge->begin; node < merge; ++node) {
        const uint64_t word = spdl__load(node->word);
        if (word & SPDL__ACTIVE) return false;
        if (node == merge->begin && spdl__node_has_room(p, node, word)) return false;
        if (spdl__node_has_work(p, node, word)) return false;
        if (spdl__load(node->word) != word) return false;
    }
    return !(spdl__load(merge->begin->word) & SPDL__FINISHED);
}

/* Whether nothing moves between a branch that has no room and its merge, nothing will before the
   merge takes something, and `seen` is what its paths then hold. Rows are looked at from the branch
   down, and those above the one looked at rest as long as nobody takes anything; that nobody has is
   known from what was taken before and after. What was seen before may be older than the rest: what
   a merge in turn takes must not depend on when it looked. */
SPDL__PRIVATE bool spdl__merge_starved(const spdl_pipeline *p, const spdl__node *merge,
                                       const spdl__paths *seen) {
    const uint64_t taken = spdl__merge_taken(merge);
    spdl__paths now;
    if (!spdl__merge_rests(p, merge)) return false;
    now = spdl__merge_look(p, merge);
    return !now.holes && memcmp(now.ready, seen->ready, sizeof(now.ready)) == 0 &&
           spdl__merge_taken(merge) == taken;
}

/* For SPDL_MERGE_CHOICE: merge_fn is asked again when this has changed. Never 0. */
SPDL__PRIVATE uint64_t spdl__paths_key(const spdl__paths *seen, int paths) {
    uint64_t key = 1;
    int i;
    for (i = 0; i < paths; ++i) key = key * 3 + (uint64_t)(seen->ready[i] + 1);
    return key;
}

/* In turn: a path that gets nothing while another is full is left out, or all would wait for each
   other. The path to take from, or -1 to wait. */
SPDL__PRIVATE int spdl__merge_turn(const spdl_pipeline *p, const spdl__node *node,
                                   const spdl__paths *seen) {
    const int paths = node->paths;
    const int turn = (int)spdl__load_relaxed32(&node->turn);
    int i;
    for (i = 0; i < paths; ++i) {
        const int at = (turn + i) % paths;
        if (seen->ready[at] == 1) return at;
        if (seen->ready[at] == 0 && node->row.merge_order == SPDL_MERGE_ROBIN &&
            (seen->items == 0 || !spdl__merge_starved(p, node, seen)))
            return -1;
    }
    return -1;
}

/* Whether a step of a merge would do something. */
SPDL__PRIVATE bool spdl__merge_runnable(const spdl_pipeline *p, const spdl__node *node) {
    const spdl__paths seen = spdl__merge_look(p, node);
    if (spdl__load32(&node->closed) || seen.holes || seen.ended == node->paths) return true;
    if (seen.items == 0) return seen.marks > 0 && seen.marks + seen.ended == node->paths;
    if (node->row.merge_order == SPDL_MERGE_BATCHES) return seen.items + seen.ended == node->paths;
    if (node->row.merge_order == SPDL_MERGE_CHOICE)
        return spdl__load_relaxed(&node->refused) != spdl__paths_key(&seen, node->paths) ||
               spdl__merge_starved(p, node, &seen);
    return spdl__merge_turn(p, node, &seen) >= 0;
}

/* Any thread: whether a step of this row would do something, its word being `word`. Where the word
   is held, who holds it looks at this row when it lets go. */
SPDL__PRIVATE bool spdl__node_has_work(const spdl_pipeline *p, const spdl__node *node,
                                       uint64_t word) {
    const uint32_t active = (uint32_t)(word & SPDL__ACTIVE);
    const spdl_kind kind = node->row.kind;
    const spdl__slot *slot;
    unsigned owner;
    if ((word & SPDL__FLAGS) != 0 || kind == SPDL_KIND_PATH || kind == SPDL_KIND_FEED) return false;
    if (kind == SPDL_KIND_MERGE) {
        if (active != 0) return false;
        return spdl__node_has_room(p, node, word) ? spdl__merge_runnable(p, node)
                                                  : spdl__merge_look(p, node).holes;
    }
    if (spdl__load32(&node->closed)) return active == 0;
    if (spdl__node_exhausted(node))
        return active == 0 && ((!node->row.flush && kind != SPDL_KIND_BATCH) ||
                               spdl__load_relaxed32(&node->flushed) ||
                               spdl__node_has_room(p, node, word));
    if (active >= spdl__load_relaxed32(&node->limit)) return false;
    if (node->in == NULL) return spdl__node_has_room(p, node, word);
    slot = spdl__edge_slot(node->in, spdl__head(word));
    if (!spdl__slot_has(slot, spdl__head(word))) return false;
    owner = spdl__owner(spdl__load_relaxed(&slot->origin));
    if (owner == SPDL__HOLE) return true; /* needs no room, and makes some above */
    if (!spdl__node_has_room(p, node, word) || spdl__window_left(node) == 0) return false;
    return active == 0 || owner != SPDL__MARK;
}

SPDL__PRIVATE bool spdl__node_runnable(const spdl_pipeline *p, const spdl__node *node) {
    return spdl__node_has_work(p, node, spdl__load(node->word));
}

SPDL__PRIVATE bool spdl__pipeline_flows(const spdl_pipeline *p) {
    return !spdl__pipeline_halted(p) && spdl__load32(&p->open) != 0;
}

/* Who runs the rows of this crew now: with polite workers it may be others. */
SPDL__PRIVATE const spdl__crew *spdl__crew_now(const spdl_pipeline *p, const spdl__crew *crew) {
    return crew == &p->crew[0] && p->rescue != NULL && spdl__load32(&p->hurry) ? p->rescue : crew;
}

/* Whether it is this crew's turn. */
SPDL__PRIVATE bool spdl__crew_works(const spdl_pipeline *p, const spdl__crew *crew) {
    return p->rescue == NULL || (crew != &p->crew[0] && crew != p->rescue) ||
           spdl__crew_now(p, &p->crew[0]) == crew;
}

/* Whether `worker`, or with -1 any, would find a step to do in one of the crew's rows. */
SPDL__PRIVATE bool spdl__crew_runnable(void *self, int worker) {
    const spdl__crew *crew = (const spdl__crew *)self;
    const spdl_pipeline *p = crew->pipeline;
    int i;
    if (p->has_hooks && worker >= 0) {
        const uint8_t inits = p->inits[crew->first + worker]; /* written by this worker only */
        if (inits == 0 || (inits != UINT8_MAX && spdl__load32(&p->leaving))) return true;
    }
    if (!spdl__pipeline_flows(p) || !spdl__crew_works(p, crew)) return false;
    for (i = p->count - 1; i >= 0; --i)
        if ((crew->rows >> i & 1) && spdl__node_runnable(p, &p->node[i])) return true;
    return false;
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
        if (node->by_ticket ? (int64_t)(spdl__node_position(node, word) -
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

/* Books the time since the last mark where the item was then, and looks where it is now. Workers
   mark when they enter a row whose calls take a microsecond or more, and when they leave it, and go
   on when another is at it; `over` is the trainer's last one. */
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

/* --- who looks again --- */

/* After something the trainer may sleep for, and a full barrier. */
SPDL__PRIVATE void spdl__trainer_wake(spdl_pipeline *p) {
    uint32_t asleep = 1;
    if (spdl__load_relaxed32(&p->waiting) != 0 && spdl__cas32(&p->waiting, &asleep, 0))
        spdl__event_wake(&p->fed, 1);
}

/* Whether the trainer should look: something lies there, or so many holes that they keep others
   from getting there. */
SPDL__PRIVATE bool spdl__sink_has(const spdl_pipeline *p) {
    const spdl__edge *sink = p->sink;
    const uint64_t head = spdl__head(spdl__load(&sink->word));
    uint64_t ticket = head;
    for (; ticket - head < sink->window / 2 + 1; ++ticket) {
        const spdl__slot *slot = spdl__edge_slot(sink, ticket);
        if (!spdl__slot_has(slot, ticket)) return false;
        if (spdl__owner(spdl__load_relaxed(&slot->origin)) != SPDL__HOLE) return true;
    }
    return true;
}

/* The trainer sleeps, and this row has put, taken or been left. */
SPDL__PRIVATE void spdl__trainer_feed(spdl_pipeline *p, const spdl__node *node) {
    if (p->crew[0].pool == NULL || (node == p->last && spdl__sink_has(p))) spdl__trainer_wake(p);
}

/* The producer waits, and the row after the feed has taken. */
SPDL__PRIVATE void spdl__producer_wake(spdl_pipeline *p) {
    uint32_t one = 1;
    if (spdl__load_relaxed32(&p->producer_waits) && spdl__cas32(&p->producer_waits, &one, 0))
        spdl__event_wake(&p->room, 1);
}

/* Wakes somebody for one of these rows, in each pool. */
SPDL__PRIVATE void spdl__rows_hint(const spdl_pipeline *p, uint32_t rows) {
    int i;
    if (p->crews == 1 && (p->crew[0].pool == NULL || !spdl__pool_sleeps(p->crew[0].pool))) return;
    for (i = p->count - 1; i >= 0; --i) {
        spdl_pool *pool = spdl__crew_now(p, p->node[i].crew)->pool;
        if ((rows >> i & 1) && pool != NULL && spdl__pool_sleeps(pool) &&
            spdl__node_runnable(p, &p->node[i]))
            spdl__pool_wake_one(pool);
    }
}

SPDL__COLD void spdl__node_hint_slow(spdl_pipeline *p, const spdl__node *node, uint32_t rows,
                                     const spdl__crew *all) {
    if (spdl__load_relaxed32(&p->waiting) != 0) spdl__trainer_feed(p, node);
    if (p->feed != NULL && node == p->feed + 1) spdl__producer_wake(p);
    if (!spdl__pipeline_flows(p)) return;
    if (all != NULL && all->pool != NULL) {
        if (spdl__pool_sleeps(all->pool) && spdl__pool_runnable(all->pool, -1, all))
            spdl__pool_wake_one(all->pool);
        rows = p->rescue != NULL ? rows | all->rows : rows & ~all->rows;
    }
    spdl__rows_hint(p, rows);
}

/* The wake rule: after a read-modify-write by which this row has changed, before anything that may
   take long. Looks at the trainer, the producer and `rows`, and with `all` at everything this
   crew's workers could do. */
SPDL__INLINE void spdl__node_hint(spdl_pipeline *p, const spdl__node *node, uint32_t rows,
                                  const spdl__crew *all) {
    uint32_t sleepers;
    spdl__barrier_after_rmw(); /* pairs with those in pool_park, next_sleep and push_wait */
    sleepers = spdl__load_relaxed32(p->sleepers);
    if (SPDL__LIKELY(sleepers == 0)) return;
    if ((sleepers & SPDL__ASLEEP) == 0 && !node->at_end) return; /* the trainer or producer waits */
    spdl__node_hint_slow(p, node, rows, all);
}

/* From a thread that will not look for work itself: this row has changed, and those beside it. */
SPDL__PRIVATE void spdl__node_changed(spdl_pipeline *p, const spdl__node *node) {
    spdl__full_barrier();
    spdl__node_hint_slow(p, node, node->beside | (uint32_t)1 << node->index, NULL);
}

/* The same of all rows. */
SPDL__PRIVATE void spdl__pipeline_hint(spdl_pipeline *p) {
    spdl__full_barrier();
    spdl__node_hint_slow(p, p->last, UINT32_MAX, NULL);
    spdl__producer_wake(p);
}

/* --- putting results --- */

/* Puts one result. What follows, taking the next item or leaving, looks whether somebody waits. */
SPDL__INLINE void spdl__node_put(spdl__node *node, spdl__edge *edge, uint64_t ticket,
                                 const spdl__emitted *what, uint64_t now) {
    if (node->serial) { /* one call at a time: its place in the word is enough */
        ticket = spdl__load_relaxed(&edge->tail);
        spdl__store_relaxed(&edge->tail, ticket + 1);
    } else if (!node->by_ticket) {
        ticket = spdl__add(&edge->tail, 1);
    }
    spdl__edge_put(edge, ticket, what, now);
    if (SPDL__TRACED(edge->lane)) spdl__trace_depth(edge);
}

/* An item that was dropped: its place is another's. */
SPDL__PRIVATE void spdl__node_put_hole(spdl__node *node, uint64_t ticket, uint64_t now) {
    const spdl__emitted hole = { NULL, SPDL__HOLE, 0 };
    if (node->serial) return; /* no place was promised */
    if (node->by_ticket) spdl__edge_put(&node->out, ticket, &hole, now);
    spdl__add(&node->out.refunds, 1);
}

/* Who holds the word, with no call active and with room: the epoch has ended here, too. */
SPDL__PRIVATE void spdl__node_put_mark(spdl_pipeline *p, spdl__node *node, uint64_t ticket,
                                       uint64_t now) {
    const uint64_t epoch = spdl__load_relaxed(&node->epoch);
    const spdl__emitted mark = { NULL, spdl__origin(epoch, SPDL__MARK), 0 };
    int i;
    if (node->row.kind != SPDL_KIND_BRANCH) spdl__node_put(node, &node->out, ticket, &mark, now);
    for (i = 0; node->row.kind == SPDL_KIND_BRANCH && i < node->paths; ++i)
        spdl__node_put(node, spdl__path_edge(p, node, i), 0, &mark, now);
    spdl__store_relaxed32(&node->flushed, 0);
    node->number = 0;
    spdl__store_relaxed(&node->epoch, epoch + 1);
}

/* Nothing more will come out of this edge. */
SPDL__PRIVATE void spdl__edge_finish(spdl_pipeline *p, spdl__edge *edge, uint64_t end) {
    spdl__store(&edge->end, end); /* pairs with the loads in exhausted and in cursor_at_head */
    if (edge != p->sink) return;
    spdl__full_barrier();
    spdl__trainer_wake(p);
}

/* Who holds the word, with no call active. */
SPDL__PRIVATE void spdl__node_finish(spdl_pipeline *p, spdl__node *node, uint64_t position) {
    const uint64_t now = spdl_time_ns();
    int i;
    if (node->in != NULL) spdl__edge_ended(node->in, now);
    for (i = 0; node->row.kind == SPDL_KIND_MERGE && i < node->paths; ++i)
        spdl__edge_ended(spdl__path_edge(p, node, i), now);
    if (node->row.kind != SPDL_KIND_BRANCH)
        spdl__edge_finish(p, &node->out,
                          node->by_ticket ? spdl__min(position, spdl__load(&node->cut))
                                          : spdl__load_relaxed(&node->out.tail));
    for (i = 0; node->row.kind == SPDL_KIND_BRANCH && i < node->paths; ++i) {
        spdl__edge *edge = spdl__path_edge(p, node, i);
        spdl__edge_finish(p, edge, spdl__load_relaxed(&edge->tail));
    }
}

/* --- the word --- */

/* The word moves by `change`, which lets go of it or gives back a place. Pairs with the acquire of
   the word by whoever enters next, finishes the row or stops: all that was put, and every plain
   field, is there. Returns what the word is now. */
SPDL__INLINE uint64_t spdl__word_move(spdl_pipeline *p, spdl__node *node, uint64_t change) {
    const uint64_t word = spdl__add(node->word, change) + change;
    if (SPDL__UNLIKELY((word & SPDL__STOPPED) != 0 && (word & SPDL__ACTIVE) == 0))
        spdl__event_wake(&p->quiet, SPDL__ALL);
    return word;
}

/* A call has ended. */
SPDL__PRIVATE void spdl__node_leave(spdl_pipeline *p, spdl__node *node, uint64_t now) {
    if (node->in != NULL) spdl__edge_hungry(node->in, now);
    (void)spdl__word_move(p, node, (uint64_t)-1);
}

/* A worker in a row: from its first item there until it leaves. */
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
    spdl__emitted in;
    uint64_t ticket, place;
} spdl__sitting;

typedef enum spdl__taken {
    SPDL__LEFT, /* there is nothing to take here, or others are at it */
    SPDL__CALL, /* an item, or the call without one */
    SPDL__DONE  /* something was done that is no call */
} spdl__taken;

/* Nobody else enters or takes before the word is let go of; those inside may leave. */
SPDL__INLINE bool spdl__sitting_hold(spdl__sitting *s) {
    const uint64_t held = (s->word + !s->inside) | SPDL__HELD;
    if (!spdl__cas(s->node->word, &s->word, held)) return false;
    s->word = held;
    SPDL_TEST_POINT("pipeline held");
    return true;
}

/* Held: with a window, the next call has a place in it. */
SPDL__PRIVATE void spdl__window_enter(spdl__sitting *s) {
    spdl__node *node = s->node;
    if (node->settled == NULL) return;
    spdl__store_relaxed(&node->oldest, node->begun + spdl__window_left(node) -
                                           (uint64_t)node->row.reorder_window - 1);
    s->place = node->begun;
    spdl__store_relaxed(&node->begun, node->begun + 1);
}

/* Held: takes what lies at the cursor, or ends an epoch or the row. */
SPDL__PRIVATE spdl__taken spdl__held_take(spdl__sitting *s, spdl__cursor *c) {
    spdl_pipeline *p = s->p;
    spdl__node *node = s->node;
    const uint64_t before = spdl__head(s->word) + node->in->shift;
    const bool alone = (spdl__load(node->word) & SPDL__ACTIVE) == 1; /* all others have put */
    const spdl__sight sight = spdl__cursor_look(c);
    const bool room = spdl__node_has_room(p, node, s->word);
    const bool ended = sight == SPDL__A_MARK || (sight == SPDL__NOTHING && c->head >= c->end);
    const bool flush = node->row.flush && !node->flushed;
    s->ticket = before; /* holes leave the number of results as it is */
    if (sight == SPDL__AN_ITEM) {
        if (!room || spdl__window_left(node) == 0) return SPDL__LEFT;
        spdl__window_enter(s);
        s->in = spdl__cursor_take(c);
        return SPDL__CALL;
    }
    if (!ended || !alone || (!room && (flush || sight == SPDL__A_MARK))) return SPDL__LEFT;
    if (flush) {
        spdl__window_enter(s);
        s->flush = true;
        s->in.item = NULL;
        s->in.origin = SPDL__HOLE;
        s->in.range = node->range;
        spdl__store_relaxed32(&node->flushed, 1);
        return SPDL__CALL;
    }
    if (sight == SPDL__A_MARK) {
        spdl__node_put_mark(p, node, before, s->now);
        spdl__cursor_pass_mark(c);
    } else {
        spdl__node_finish(p, node, before);
        s->word |= SPDL__FINISHED;
    }
    return SPDL__DONE;
}

/* The ways to take that change more than the word. */
SPDL__COLD spdl__taken spdl__node_take_held(spdl__sitting *s) {
    spdl_pipeline *p = s->p;
    spdl__node *node = s->node;
    spdl__taken taken = SPDL__LEFT;
    uint64_t change = (uint64_t)0 - SPDL__HELD;
    bool moved = false;
    spdl__cursor c;
    if (!spdl__sitting_hold(s)) return SPDL__LEFT;
    if (node->in == NULL || spdl__load32(&node->closed)) {
        if ((spdl__load(node->word) & SPDL__ACTIVE) == 1 &&
            (spdl__load32(&node->closed) || spdl__load32(&node->ended))) {
            spdl__node_finish(p, node,
                              node->in != NULL ? spdl__head(s->word) + node->in->shift : 0);
            s->word |= SPDL__FINISHED;
            taken = SPDL__DONE;
        }
    } else {
        c = spdl__cursor_at_head(node->in);
        taken = spdl__held_take(s, &c);
        moved = spdl__cursor_settle(&c);
        if (moved && taken == SPDL__LEFT) taken = SPDL__DONE;
        if (moved) spdl__cursor_put_waits(&c, s->now);
        change += (c.head - c.from) << SPDL__HEAD_BITS;
    }
    if (s->word & SPDL__FINISHED) change += SPDL__FINISHED;
    if (taken == SPDL__CALL) {
        s->inside = true;
    } else if (!s->inside || (s->word & SPDL__FINISHED)) {
        change -= 1;
        s->inside = false;
    }
    s->word = spdl__word_move(p, node, change);
    if (moved) spdl__edge_took(node->in, c.from, c.head, s->now);
    return taken;
}

/* By a copy, so that the sitting itself can stay in registers. */
SPDL__INLINE spdl__taken spdl__node_take_rare(spdl__sitting *s) {
    spdl__sitting copy = *s;
    const spdl__taken taken = spdl__node_take_held(&copy);
    *s = copy;
    return taken;
}

/* The way nearly all items are taken: what lies at the head, by one compare-and-swap. When that
   fails others are at it, and we look elsewhere. */
SPDL__INLINE spdl__taken spdl__node_take(spdl__sitting *s) {
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
        return s->inside ? SPDL__LEFT : spdl__node_take_rare(s);
    if (in != NULL) {
        const spdl__slot *slot = spdl__edge_slot(in, head);
        if (!spdl__slot_has(slot, head))
            return !s->inside && spdl__edge_exhausted(in) ? spdl__node_take_rare(s) : SPDL__LEFT;
        s->in = spdl__slot_read(slot);
        if (SPDL__UNLIKELY(spdl__owner(s->in.origin) >= SPDL_MAX_STAGES || node->settled != NULL))
            return spdl__node_take_rare(s);
    } else if (spdl__load32(&node->ended)) {
        return s->inside ? SPDL__LEFT : spdl__node_take_rare(s);
    }
    position = spdl__node_position(node, s->word);
    if ((int64_t)(s->until - position) <= 0) { /* used up; what was read has made room since */
        if (!spdl__node_has_room(s->p, node, s->word)) return SPDL__LEFT;
        if (node->row.kind != SPDL_KIND_BRANCH) s->until = spdl__node_until(node);
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
    if ((word & SPDL__ACTIVE) < limit) spdl__edge_hungry(in, s->now);
    return SPDL__CALL;
}

/* --- calls --- */

/* Takes back what a call has handed on that failed, or dropped its item after all. */
SPDL__PRIVATE void spdl__task_discard(spdl_task *task) {
    int i;
    if (task->bundle != NULL) (void)spdl__bundle_drop(task->pipeline, task->bundle);
    task->bundle = NULL;
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

/* spdl_fail for the thread that runs the call, also when the function has returned. */
SPDL__PRIVATE spdl_result spdl__task_fail(spdl_task *task, const char *format, ...)
    SPDL__PRINTF(2, 3);
SPDL__PRIVATE spdl_result spdl__task_fail(spdl_task *task, const char *format, ...) {
    va_list args;
    va_start(args, format);
    (void)vsnprintf(task->text, sizeof(task->text), format, args);
    va_end(args);
    return SPDL_E_STAGE;
}

/* A branch whose merge joins batches, and a call that did not split its own: all of it goes down
   one path, and empty ones down the others, as the merge expects. `out` stays the caller's. */
SPDL__PRIVATE spdl_result spdl__task_send_all(spdl_task *task, void *out) {
    spdl__batch *batch = (spdl__batch *)out;
    size_t i;
    if (batch == NULL) return spdl__task_fail(task, "no batch in *out");
    if (batch->shown.count > task->node->batches->size)
        return spdl__task_fail(task, "a batch with more items than the rows above can have made");
    if (!spdl__task_split(task, batch->shown.sequence)) return SPDL_E_NOMEM;
    for (i = 0; i < batch->shown.count; ++i) spdl__task_send(task, task->path, batch, i);
    return SPDL_OK;
}

/* Whether a call is to be repeated: codes that no stage may return are no reason. */
SPDL__PRIVATE bool spdl__result_fails(spdl_result result) { return result < 0; }

/* Who did not look at what spdl_emit or spdl_route said is not to lose items in silence. A call
   that goes on elsewhere is judged by its completion. */
SPDL__COLD spdl_result spdl__task_misused(spdl_task *task, spdl_result result, void *out) {
    if (result == SPDL_PENDING && task->parked != NULL) {
        spdl__tell(&task->pipeline->logger, SPDL_LOG_ERROR, "spdl: stage %d '%s', item %llu: %s",
                   task->node->index, task->node->name, (spdl__llu)task->sequence, task->text);
        task->misused = task->unfit = false;
    }
    if (result != SPDL_OK && result != SPDL_SKIP && result != SPDL_END) return result;
    if (result == SPDL_OK && !task->node->row.emits) {
        if (out == task->in.item) /* its own again, taken or not */
            task->taken = false;
        else
            spdl__item_free(task->pipeline, out,
                            spdl__origin(task->sequence, (unsigned)task->node->index));
    }
    return SPDL_E_INVALID;
}

SPDL__INLINE spdl_result spdl__task_attempt(spdl_task *task, void **out) {
    spdl__node *node = task->node;
    spdl_result result;
    task->taken = task->misused = task->unfit = false;
    task->path = 0;
    task->text[0] = '\0';
    spdl__store_relaxed32(&task->live, 1);
    spdl__call_begin(task);
    result = node->row.fn->call(task, task->in.item, out);
    spdl__call_end(task);
    spdl__store_relaxed32(&task->live, 0);
    return SPDL__UNLIKELY(task->misused) ? spdl__task_misused(task, result, *out) : result;
}

/* One more item for the bundle of this call. */
SPDL__PRIVATE spdl_result spdl__task_emit(spdl_task *task, void *item) {
    const bool is_input = item != NULL && item == task->in.item && !task->taken;
    spdl__emitted what = task->in;
    what.item = item;
    if (!is_input) what.origin = spdl__origin(task->sequence, (unsigned)task->node->index);
    if (task->bundle == NULL) task->bundle = spdl__bundle_get(&task->node->shelf);
    if (task->bundle == NULL || !spdl__bundle_add(task->bundle, &what)) return SPDL_E_NOMEM;
    if (is_input) task->taken = true;
    return SPDL_OK;
}

/* One of several calls, maybe; with a failure rate they are counted. */
SPDL__PRIVATE spdl_result spdl__task_try(spdl_task *task, void **out) {
    const spdl_result result = spdl__task_attempt(task, out);
    if (task->node->row.max_failure_rate > 0) spdl__add(&task->node->calls, 1);
    return result;
}

/* Calls the function, and calls it again if it fails and may be repeated. */
SPDL__PRIVATE spdl_result spdl__task_call(spdl_task *task, spdl__counters *counters, void **out) {
    spdl_result result = spdl__task_try(task, out);
    int left = task->node->row.retries;
    task->cut_short = false;
    for (; left > 0 && spdl__result_fails(result) && !task->taken && !task->misused &&
           task->split == NULL && task->parked == NULL; --left) {
        if (spdl__pipeline_halted(task->pipeline)) {
            task->cut_short = true;
            break;
        }
        spdl__task_discard(task);
        spdl__count(&counters->retries, 1);
        result = spdl__task_try(task, out);
    }
    if (task->node->row.emits && result == SPDL_OK && *out != NULL)
        result = spdl__task_fail(task,
                                 "*out is set, but its row says .emits: results go to spdl_emit");
    return result;
}

/* A failure that the budget allows is a line in the log, if there is one that takes it. */
SPDL__PRIVATE void spdl__failure_tell(const spdl_task *task) {
    const spdl__node *node = task->node;
    char line[SPDL_TEXT_BYTES];
    if (task->pipeline->logger.log_fn == NULL) return;
    (void)snprintf(line, sizeof(line), "spdl: stage %d '%s', item %llu: %.300s (tolerated)",
                   node->index, node->name, (spdl__llu)task->sequence, task->text);
    spdl__log(&task->pipeline->logger, SPDL_LOG_INFO, line);
}

/* Where the function gave no reason. */
SPDL__PRIVATE void spdl__failure_explain(spdl_task *task, spdl_result result) {
    const char *text = spdl_result_text(result);
    if (task->text[0] != '\0') return;
    if (result == SPDL_PENDING && task->node->parked == NULL)
        text = "returned SPDL_PENDING, but its row does not say .deferred";
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

/* A call failed: counted, told, and over the budget the end of the pipeline. Whether it is that. A
   wrong row is wrong for every item: no budget is for that. */
SPDL__PRIVATE bool spdl__task_failed(spdl_task *task, spdl__counters *counters,
                                     spdl_result result) {
    spdl__node *node = task->node;
    const bool over = spdl__node_over_budget(node);
    char text[SPDL_TEXT_BYTES];
    spdl__failure_explain(task, result);
    if (result >= 0) result = SPDL_E_STAGE;
    spdl__count(&counters->failures, 1);
    if (!over && !task->unfit) {
        spdl__failure_tell(task);
        return false;
    }
    (void)snprintf(text, sizeof(text), "%.470s%s", task->text,
                   over && node->row.max_failures > 0       ? " (one more than max_failures)"
                   : over && node->row.max_failure_rate > 0 ? " (more than max_failure_rate)"
                                                            : "");
    spdl__node_fail(task->pipeline, node, task->ticket, task->sequence, result, text);
    return true;
}

/* Puts one result of a call. */
SPDL__INLINE void spdl__task_put_one(const spdl_task *task, void *item, uint64_t origin,
                                     uint64_t now) {
    spdl__emitted what;
    what.item = item;
    what.origin = origin;
    what.range = task->in.range;
    spdl__node_put(task->node, &task->node->out, task->ticket, &what, now);
}

/* What a call with .emits has emitted goes on: as a bundle, or if it is one item as that. */
SPDL__PRIVATE void spdl__task_put_bundle(spdl_task *task, spdl__counters *counters, uint64_t now) {
    spdl__bundle *bundle = task->bundle;
    const size_t count = bundle != NULL ? bundle->count : 0;
    task->bundle = NULL;
    spdl__count(&counters->made, count);
    if (count > 1) {
        spdl__task_put_one(task, bundle, spdl__origin(task->sequence, SPDL__BUNDLE), now);
        return; /* its reader puts it back */
    }
    if (count == 1)
        spdl__task_put_one(task, bundle->entry[0].item, bundle->entry[0].origin, now);
    else
        spdl__node_put_hole(task->node, task->ticket, now);
    if (bundle != NULL) spdl__bundle_put_back(bundle);
}

/* The batches a branch has made of one go down their paths. */
SPDL__PRIVATE void spdl__task_put_split(spdl_task *task, spdl__counters *counters, uint64_t now) {
    spdl__node *node = task->node;
    spdl__emitted what = task->in;
    int i;
    what.origin = spdl__origin(task->sequence, (unsigned)node->index);
    for (i = 0; i < node->paths; ++i) {
        what.item = task->split[i];
        task->split[i]->range = what.range;
        spdl__node_put(node, spdl__path_edge(task->pipeline, node, i), 0, &what, now);
        task->split[i] = NULL;
    }
    spdl__count(&counters->made, (uint64_t)node->paths);
    task->split = NULL;
}

/* The result of a call goes on. */
SPDL__INLINE void spdl__task_put(spdl_task *task, spdl__counters *counters, void *out,
                                 uint64_t origin, uint64_t now) {
    spdl__node *node = task->node;
    if (node->row.emits) {
        spdl__task_put_bundle(task, counters, now);
    } else if (task->split != NULL) {
        spdl__task_put_split(task, counters, now);
    } else if (node->row.kind == SPDL_KIND_BRANCH) {
        spdl__emitted what = task->in;
        what.item = out;
        what.origin = origin;
        spdl__node_put(node, spdl__path_edge(task->pipeline, node, task->path), 0, &what, now);
    } else {
        spdl__task_put_one(task, out, origin, now);
    }
}

/* A dropped item leaves a hole; a dropped batch that others wait for to be joined with theirs, an
   empty one of its number. */
SPDL__PRIVATE void spdl__task_put_nothing(spdl_task *task, spdl__counters *counters,
                                          uint64_t now) {
    spdl__node *node = task->node;
    spdl__batch *empty = NULL;
    if (node->branch != NULL && node->splits && spdl__task_split(task, task->sequence)) {
        spdl__task_put_split(task, counters, now);
        return;
    }
    if (node->branch != NULL && !node->splits) empty = spdl__batch_get(node->branch->batches);
    if (empty == NULL) {
        if (node->branch == NULL)
            spdl__node_put_hole(node, task->ticket, now);
        else /* a gap would join what does not belong together */
            spdl__node_fail(task->pipeline, node, task->ticket, task->sequence, SPDL_E_NOMEM,
                            "no memory for another batch");
        return;
    }
    empty->shown.sequence = task->sequence;
    empty->range = task->in.range;
    spdl__task_put_one(task, empty, spdl__origin(task->sequence, (unsigned)node->branch->index),
                       now);
}

/* With a window: this call does not hold it back any more. */
SPDL__PRIVATE void spdl__task_leave_window(const spdl_task *task) {
    const spdl__node *node = task->node;
    if (node->settled == NULL) return;
    /* pairs with the load in window_left; who sees it looks at nothing else of this call */
    spdl__store32(&node->settled[task->place & node->settled_mask], (uint32_t)(task->place + 1));
}

/* A call that made no result: what it handed on is taken back. False when it was the failure that
   ends the pipeline. */
SPDL__COLD bool spdl__pipe_settle_nothing(spdl_task *task, spdl__counters *counters,
                                          spdl_result result, uint64_t now) {
    bool fatal = false;
    spdl__task_discard(task);
    if (task->cut_short)
        spdl__count(&counters->freed, spdl__owner(task->in.origin) != SPDL__HOLE);
    else if (result == SPDL_SKIP)
        spdl__count(&counters->skips, 1);
    else
        fatal = spdl__task_failed(task, counters, result);
    /* after a fatal failure, or one that a stop has cut short, a ticket stays unfilled: nothing
       after it is delivered */
    if (!fatal && !task->cut_short) spdl__task_put_nothing(task, counters, now);
    return !fatal;
}

/* After a call of a stage: the input is destroyed or handed on, the result is put. False when the
   call was the failure that ends the pipeline: nothing more is to be called. */
SPDL__INLINE bool spdl__pipe_settle(spdl_task *task, spdl__counters *counters, spdl_result result,
                                    void *out, uint64_t now) {
    const spdl__emitted in = task->in;
    uint64_t origin = in.origin;
    bool goes_on = true;
    if (SPDL__LIKELY(result == SPDL_OK) && out == in.item && !task->node->row.emits &&
        task->split == NULL && spdl__owner(origin) != SPDL__HOLE) { /* passed on */
        spdl__task_put(task, counters, out, origin, now);
    } else {
        if (!task->taken) spdl__item_free(task->pipeline, in.item, origin);
        origin = spdl__origin(task->sequence, (unsigned)task->node->index);
        if (result == SPDL_OK && !task->node->row.emits && task->split == NULL)
            spdl__count(&counters->made, 1);
        if (result == SPDL_OK)
            spdl__task_put(task, counters, out, origin, now);
        else
            goes_on = spdl__pipe_settle_nothing(task, counters, result, now);
    }
    spdl__task_leave_window(task);
    return goes_on;
}

/* A moving average that a few slow calls raise fast and many quick ones lower slowly. */
SPDL__PRIVATE void spdl__node_learn(spdl__node *node, uint64_t calls, uint64_t ns) {
    const uint64_t each = ns / calls + 1;
    const uint64_t old = spdl__load_relaxed(&node->item_ns);
    if (old == 0)
        spdl__store_relaxed(&node->item_ns, each);
    else
        spdl__store_relaxed(&node->item_ns, each > old ? old + (each - old) / 4 + 1
                                                       : old - (old - each) / 8);
}

/* Books `calls` calls that took `ns` together, `failed` of them without success. */
SPDL__PRIVATE void spdl__counters_book(spdl__counters *counters, uint64_t calls, uint64_t failed,
                                       uint64_t ns) {
    spdl__count(&counters->tasks, calls);
    spdl__counters_time(counters, calls - failed, failed ? ns * (calls - failed) / calls : ns);
}

/* --- deferred calls --- */

typedef enum spdl__parking {
    SPDL__PARKED_FREE,
    SPDL__PARKED_ARMED,   /* the function is running */
    SPDL__PARKED_WAITING, /* it has returned PENDING: spdl_complete settles the call */
    SPDL__PARKED_TELLING, /* spdl_complete came first and is writing the result */
    SPDL__PARKED_DONE,    /* and has: the worker settles the call */
    SPDL__PARKED_SETTLING /* spdl_complete is settling the call */
} spdl__parking;

/* A place for one deferred call. Written by the stage's call before it is armed, by spdl_complete
   while it is TELLING or SETTLING. */
struct spdl__parked {
    uint64_t state; /* generation << 3 | spdl__parking */
    uint32_t next;  /* under parked_lock: as parked_free */
    uint64_t sequence, ticket, place, since;
    uint64_t thread; /* that settles the call inside spdl_complete, or 0 */
    spdl__emitted in;
    bool taken, flushing;
    spdl_result result;
    void *item;
    char text[SPDL_TEXT_BYTES];
};

/* An id is the generation, the row and the place. */
#define SPDL__ID_PLACE_BITS 16
#define SPDL__ID_ROW_BITS 8
#define SPDL__ID_BITS (SPDL__ID_PLACE_BITS + SPDL__ID_ROW_BITS)

SPDL__PRIVATE uint64_t spdl__parked_state(const spdl__parked *parked) {
    return spdl__load(&parked->state);
}

SPDL__PRIVATE bool spdl__parked_move(spdl__parked *parked, uint64_t generation, spdl__parking from,
                                     spdl__parking to) {
    uint64_t expected = generation << 3 | (uint64_t)from;
    return spdl__cas(&parked->state, &expected, generation << 3 | (uint64_t)to);
}

/* Any thread that settles the call: the id is dead from here on. The generation has as many bits
   as an id has for it, or after 2^40 calls no id would be found any more. */
SPDL__PRIVATE void spdl__parked_release(spdl__node *node, spdl__parked *parked) {
    const uint64_t generation =
        ((spdl__parked_state(parked) >> 3) + 1) & (UINT64_MAX >> SPDL__ID_BITS);
    spdl__store(&parked->state, generation << 3 | SPDL__PARKED_FREE);
    spdl__spin_lock(&node->parked_lock);
    parked->next = node->parked_free;
    node->parked_free = (uint32_t)(parked - node->parked) + 1;
    spdl__spin_unlock(&node->parked_lock);
}

/* There is always one: a place for each call the concurrency allows. */
SPDL__PRIVATE spdl__parked *spdl__parked_take(spdl__node *node) {
    spdl__parked *parked;
    spdl__spin_lock(&node->parked_lock);
    parked = &node->parked[node->parked_free - 1];
    node->parked_free = parked->next;
    spdl__spin_unlock(&node->parked_lock);
    return parked;
}

/* What the call has asked for cannot be: it fails, for the reason that was just recorded. */
SPDL__PRIVATE spdl_result spdl__task_misuse(spdl_task *task, spdl_result failed) {
    task->misused = failed != SPDL_OK;
    return SPDL_E_INVALID;
}

/* The same, in a row that no such call can be in. */
SPDL__PRIVATE spdl_result spdl__task_unfit(spdl_task *task, const char *what) {
    task->unfit = true;
    return spdl__task_misuse(task, spdl__task_fail(task, "%s", what));
}

/* Whether this is the thread that runs the call, now. */
SPDL__PRIVATE bool spdl__task_running(const spdl_task *task) {
    return spdl__load_relaxed32(&task->live) &&
           spdl__load_relaxed(&task->thread) == spdl__thread_id();
}

/* The same; if it is not, the log says of which function. */
SPDL__PRIVATE bool spdl__task_allows(const spdl_task *task, const char *function) {
    if (spdl__task_running(task)) return true;
    spdl__tell(&task->pipeline->logger, SPDL_LOG_ERROR,
               "spdl: %s: not inside of a call of this stage", function);
    return false;
}

SPDL_API spdl_deferred spdl_defer(spdl_task *task) {
    spdl_deferred deferred = { NULL, 0 };
    spdl__node *node;
    spdl__parked *parked;
    if (!spdl__task_allows(task, "spdl_defer")) return deferred;
    node = task->node;
    parked = task->parked;
    if (node->parked == NULL) return deferred;
    if (parked == NULL) {
        parked = task->parked = spdl__parked_take(node);
        parked->text[0] = '\0';
        parked->in = task->in;
        parked->flushing = task->flushing;
        parked->sequence = task->sequence;
        parked->ticket = task->ticket;
        parked->place = task->place;
        parked->since = task->since;
        spdl__store(&parked->state, (spdl__parked_state(parked) >> 3 << 3) | SPDL__PARKED_ARMED);
    }
    deferred.pipeline = task->pipeline;
    deferred.id = spdl__parked_state(parked) >> 3 << SPDL__ID_BITS |
                  (uint64_t)node->index << SPDL__ID_PLACE_BITS |
                  (uint64_t)(parked - node->parked);
    return deferred;
}

/* The worker: spdl_complete has come first, or is writing. Afterwards the result is there. */
SPDL__PRIVATE void spdl__parked_await(const spdl__parked *parked) {
    while ((spdl__parked_state(parked) & 7) != SPDL__PARKED_DONE) spdl__yield();
}

/* The function of a deferred call has returned. Whether the call is over: *result and *out say how.
   False: spdl_complete will settle it, and nothing of it may be touched any more. */
SPDL__PRIVATE bool spdl__parked_returned(spdl_task *task, spdl_result *result, void **out) {
    spdl__parked *parked = task->parked;
    const uint64_t generation = parked != NULL ? spdl__parked_state(parked) >> 3 : 0;
    const bool pending = *result == SPDL_PENDING;
    task->parked = NULL;
    if (parked == NULL) {
        if (pending) {
            (void)spdl__task_fail(task, "returned SPDL_PENDING without a call of spdl_defer");
            *result = SPDL_E_STAGE;
        }
        return true;
    }
    parked->taken = task->taken;
    if (spdl__parked_move(parked, generation, SPDL__PARKED_ARMED,
                          pending ? SPDL__PARKED_WAITING : SPDL__PARKED_FREE)) {
        if (!pending) spdl__parked_release(task->node, parked);
        return !pending;
    }
    spdl__parked_await(parked);
    if (pending) {
        *result = parked->result;
        *out = parked->item;
        memcpy(task->text, parked->text, sizeof(parked->text));
    } else {
        spdl__log(&task->pipeline->logger, SPDL_LOG_ERROR,
                  "spdl: a call that did not return SPDL_PENDING was completed with spdl_complete");
        if (parked->result == SPDL_OK && parked->item != task->in.item && parked->item != *out)
            spdl__item_free(task->pipeline, parked->item,
                            spdl__origin(0, (unsigned)task->node->index));
    }
    spdl__parked_release(task->node, parked);
    return true;
}

/* --- a sitting --- */

/* How many items a worker takes before it looks downstream again. No more than a number: whatever
   it has not begun lies in the ring for others. */
SPDL__PRIVATE uint32_t spdl__sitting_items(const spdl__node *node) {
    const uint64_t each = spdl__load_relaxed(&node->item_ns);
    if (each == 0) return 1; /* not known yet */
    return (uint32_t)spdl__max(1, spdl__min(SPDL__SITTING_NS / each, SPDL__SITTING_ITEMS));
}

/* One call. False when it goes on without us. */
SPDL__INLINE bool spdl__pipe_call(spdl_task *task, spdl__counters *counters, spdl_result *result,
                                  void **out) {
    *out = NULL;
    if (task->node->plain) {
        *result = spdl__task_attempt(task, out);
        return true;
    }
    *result = spdl__task_call(task, counters, out);
    if (task->node->splits && *result == SPDL_OK) {
        if (task->split == NULL) *result = spdl__task_send_all(task, *out);
        if (*out == task->in.item) /* its own again, taken or not */
            task->taken = false;
        else
            spdl_batch_free(*out); /* sent or not, it is empty or refused */
    }
    return task->node->parked == NULL || spdl__parked_returned(task, result, out);
}

/* The end of the epoch, or of all. */
SPDL__PRIVATE void spdl__source_end(spdl_pipeline *p, spdl__node *node, uint64_t now) {
    if (!node->row.continuous) {
        spdl__store32(&node->ended, 1);
        return;
    }
    spdl__node_put_mark(p, node, 0, now);
    spdl__store_relaxed(&node->made, 0);
}

/* After a call of the source; whether to call it again. */
SPDL__PRIVATE bool spdl__source_settle(spdl_task *task, spdl__counters *counters,
                                       spdl_result result, void *out, uint64_t now) {
    spdl__node *node = task->node;
    if (result == SPDL_OK) {
        const uint64_t made = node->made;
        if (!node->row.emits) spdl__count(&counters->made, 1);
        spdl__store_relaxed(&node->made, made + 1);
        ++node->made_all;
        spdl__task_put(task, counters, out, spdl__origin(made, (unsigned)node->index), now);
        return true;
    }
    spdl__task_discard(task);
    if (result == SPDL_END) {
        spdl__source_end(task->pipeline, node, now);
        return node->row.continuous;
    }
    if (task->cut_short) return false;
    if (result == SPDL_SKIP) {
        spdl__count(&counters->skips, 1);
        return true;
    }
    return !spdl__task_failed(task, counters, result);
}

/* How a call has ended. */
typedef enum spdl__outcome {
    SPDL__GOES_ON,
    SPDL__OVER,      /* no call of this row is to follow */
    SPDL__NO_CALL,   /* it was the one that told the end */
    SPDL__ELSEWHERE  /* spdl_complete will end it, and give its place back */
} spdl__outcome;

SPDL__INLINE spdl__outcome spdl__source_run(spdl__sitting *s, spdl_task *task,
                                            spdl__counters *counters) {
    spdl__node *node = s->node;
    void *out = NULL;
    spdl_result result;
    bool again;
    task->in.item = NULL;
    task->in.origin = 0;
    task->in.range = node->made_all << SPDL__SPAN_BITS;
    task->flushing = false;
    task->sequence = node->made;
    result = spdl__task_call(task, counters, &out);
    if (s->timed) s->now = spdl_time_ns();
    again = spdl__source_settle(task, counters, result, out, s->now);
    if (result == SPDL_END) return SPDL__NO_CALL;
    return again ? SPDL__GOES_ON : SPDL__OVER;
}

SPDL__INLINE spdl__outcome spdl__pipe_run(spdl__sitting *s, spdl_task *task,
                                          spdl__counters *counters) {
    spdl_result result;
    void *out;
    task->in = s->in;
    task->flushing = s->flush;
    task->sequence = s->flush ? 0 : s->in.origin >> 8;
    task->ticket = s->ticket;
    task->place = s->place;
    task->since = s->now;
    if (s->node->row.flush && !s->flush) s->node->range = s->in.range;
    if (!spdl__pipe_call(task, counters, &result, &out)) return SPDL__ELSEWHERE;
    if (s->timed) s->now = spdl_time_ns();
    return spdl__pipe_settle(task, counters, result, out, s->now) ? SPDL__GOES_ON : SPDL__OVER;
}

/* At the end of a sitting, before the row is left: who sees the end of the row sees all counted. */
SPDL__PRIVATE void spdl__sitting_book(spdl__sitting *s, spdl__counters *counters, uint64_t begun,
                                      uint64_t failures) {
    if (!s->timed) {
        s->now = spdl_time_ns();
        spdl__counters_book(counters, s->calls,
                            spdl__load_relaxed(&counters->failures) - failures, s->now - begun);
    }
    spdl__node_learn(s->node, s->calls, s->now - begun);
    spdl__meter_end(s->p, s->node, counters, s->calls);
}

/* What a worker does in a row that calls a function: takes items one by one, while there are some
   and room for their results, and calls. Whether anything was done. */
SPDL__PRIVATE bool spdl__node_sit(const spdl__crew *crew, spdl__node *node, int worker) {
    spdl_pipeline *p = crew->pipeline;
    spdl__counters *counters = &node->counters[worker];
    spdl_task *task = &p->task[worker];
    const uint32_t most = spdl__sitting_items(node), own = (uint32_t)1 << node->index;
    const uint64_t failures = spdl__load_relaxed(&counters->failures);
    uint64_t begun, failed = failures;
    bool done = false;
    spdl__sitting s;
    spdl__taken taken;
    s.p = p;
    s.node = node;
    s.until = s.waited = s.each_waited = s.place = 0;
    s.calls = 0;
    s.inside = false;
    s.timed = spdl__load_relaxed(&node->item_ns) == 0 ||
              spdl__load_relaxed(&node->item_ns) >= SPDL__TIMED_NS;
    begun = s.now = spdl_time_ns();
    s.word = spdl__load(node->word);
    task->node = node;
    while ((taken = spdl__node_take(&s)) != SPDL__LEFT) {
        spdl__outcome outcome;
        uint64_t since;
        done = true;
        /* after a held take our own row may have looked empty to others */
        spdl__node_hint(p, node, node->beside | own,
                        s.calls == 0 && taken == SPDL__CALL ? crew : NULL);
        if (taken == SPDL__DONE) continue;
        if (s.calls == 0) {
            if (s.timed && spdl__load_relaxed(&p->blame_since) != 0) spdl__blame_mark(p, false);
            spdl__store_relaxed(&task->thread, spdl__thread_id());
            if (spdl__meter_is_due(counters)) {
                spdl__meter_begin(p, node, counters);
                begun = s.now = spdl_time_ns();
            }
        }
        since = s.now;
        outcome = node->in != NULL ? spdl__pipe_run(&s, task, counters)
                                   : spdl__source_run(&s, task, counters);
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
    if (s.calls > 0) spdl__sitting_book(&s, counters, begun, failures);
    if (node->in != NULL) spdl__edge_waited(node->in, s.waited);
    /* a polite worker whose turn is over meanwhile does not look again at what it held */
    if (!done && p->rescue != NULL) spdl__pipeline_hint(p);
    if (!s.inside) return done;
    spdl__node_leave(p, node, s.now);
    spdl__node_hint(p, node, node->beside, NULL);
    if (s.timed && spdl__load_relaxed(&p->blame_since) != 0) spdl__blame_mark(p, false);
    return true;
}

/* --- rows without calls: all of it while their word is held --- */

SPDL__PRIVATE void spdl__batch_put(spdl_pipeline *p, spdl__node *node, spdl__counters *counters,
                                   uint64_t now) {
    spdl__batch *batch = node->open_batch;
    const uint64_t number = node->number++;
    spdl__emitted what;
    node->open_batch = NULL;
    batch->shown.sequence = number;
    what.item = batch;
    what.origin = spdl__origin(number, (unsigned)node->index);
    what.range = batch->range;
    spdl__count(&counters->tasks, 1);
    spdl__count(&counters->made, 1);
    if (SPDL__TRACED(p->trace)) spdl__trace_batch(p, node, counters, number, now);
    spdl__node_put(node, &node->out, 0, &what, now);
}

/* Whether the open batch takes one more item; one is opened if need be. Not when there is no room
   for it, or no memory. */
SPDL__PRIVATE bool spdl__batch_open(const spdl_pipeline *p, spdl__node *node) {
    if (node->open_batch == NULL && spdl__node_has_room(p, node, 0))
        node->open_batch = spdl__batch_get(node->batches);
    return node->open_batch != NULL;
}

/* Puts one item into the open batch, which is handed on when it is full. */
SPDL__PRIVATE void spdl__batch_add(spdl_pipeline *p, spdl__node *node, spdl__counters *counters,
                                   const spdl__emitted *got, uint64_t now) {
    spdl__batch *batch = node->open_batch;
    batch->range =
        batch->shown.count == 0 ? got->range : spdl__range_join(batch->range, got->range);
    batch->owner[batch->shown.count] = (uint8_t)spdl__owner(got->origin);
    batch->shown.items[batch->shown.count++] = got->item;
    if (SPDL__TRACED(node->in->lane)) spdl__trace_item(node, got->origin >> 8);
    if (batch->shown.count == (size_t)node->row.size) spdl__batch_put(p, node, counters, now);
}

/* The input has ended, or an epoch: what is left goes on, or is returned to be freed when the word
   was let go of. */
SPDL__PRIVATE spdl__batch *spdl__batch_rest(spdl_pipeline *p, spdl__node *node,
                                            spdl__counters *counters, uint64_t now) {
    spdl__batch *batch = node->open_batch;
    const bool closed = spdl__load32(&node->closed) != 0;
    if (batch == NULL) return NULL;
    if (!node->row.drop_last && !closed && batch->shown.count > 0) {
        spdl__batch_put(p, node, counters, now);
        return NULL;
    }
    spdl__count(closed ? &counters->freed : &counters->skips, batch->shown.count);
    node->open_batch = NULL;
    return batch;
}

/* Moves ready items into batches, up to the end of an epoch; what is returned is to be freed. There
   is room for one batch; a mark behind a batch that is put waits for room of its own. */
SPDL__PRIVATE spdl__batch *spdl__batch_fill(spdl_pipeline *p, spdl__node *node,
                                            spdl__counters *counters, spdl__cursor *c,
                                            uint64_t now) {
    spdl__sight sight = spdl__cursor_look(c);
    spdl__batch *dropped = NULL;
    for (; sight == SPDL__AN_ITEM; sight = spdl__cursor_look(c)) {
        spdl__emitted got;
        if (node->open_batch == NULL && !spdl__node_has_room(p, node, 0)) return NULL;
        if (!spdl__batch_open(p, node)) {
            spdl__node_fail(p, node, node->out.tail, node->number, SPDL_E_NOMEM,
                            "no memory for another batch");
            return NULL;
        }
        got = spdl__cursor_take(c);
        spdl__batch_add(p, node, counters, &got, now);
    }
    if (sight == SPDL__A_MARK && spdl__node_has_room(p, node, 0)) {
        dropped = spdl__batch_rest(p, node, counters, now);
        if (!spdl__node_has_room(p, node, 0)) return dropped;
        spdl__cursor_pass_mark(c);
        spdl__node_put_mark(p, node, 0, now);
    }
    return dropped;
}

/* Without room only the holes in front are passed. Whether the row has ended; *dropped is to be
   freed. */
SPDL__PRIVATE bool spdl__batch_work(spdl_pipeline *p, spdl__node *node, spdl__counters *counters,
                                    spdl__cursor *c, uint64_t now, spdl__batch **dropped) {
    const bool closed = spdl__load32(&node->closed) != 0;
    if (!closed && !spdl__node_has_room(p, node, 0)) {
        (void)spdl__cursor_look(c);
        return false;
    }
    if (!closed) *dropped = spdl__batch_fill(p, node, counters, c, now);
    if (*dropped != NULL || (!closed && !spdl__node_has_room(p, node, 0))) return false;
    if (!spdl__load32(&node->closed) && c->head < c->end) return false;
    *dropped = spdl__batch_rest(p, node, counters, now);
    spdl__node_finish(p, node, 0);
    return true;
}

/* One step of a batch row: as many items as there are and room for. */
SPDL__PRIVATE bool spdl__batch_step(const spdl__crew *crew, spdl__node *node, int worker) {
    spdl_pipeline *p = crew->pipeline;
    const uint64_t now = spdl_time_ns();
    spdl__batch *dropped = NULL;
    uint64_t tail;
    bool ended, moved;
    spdl__cursor c;
    spdl__sitting s;
    s.node = node;
    s.inside = false;
    s.word = spdl__load(node->word);
    if ((s.word & SPDL__BUSY) != 0 || !spdl__sitting_hold(&s)) return false;
    tail = node->out.tail;
    c = spdl__cursor_at_head(node->in);
    ended = spdl__batch_work(p, node, &node->counters[worker], &c, now, &dropped);
    moved = spdl__cursor_settle(&c);
    if (moved) spdl__cursor_put_waits(&c, now);
    moved = moved || ended || dropped != NULL || tail != node->out.tail;
    (void)spdl__word_move(p, node, ((c.head - c.from) << SPDL__HEAD_BITS) - SPDL__HELD - 1 +
                                       (ended ? SPDL__FINISHED : 0));
    if (c.head != c.from) spdl__edge_took(node->in, c.from, c.head, now);
    if (moved) spdl__edge_hungry(node->in, now);
    spdl__node_hint(p, node, node->beside, dropped != NULL ? crew : NULL);
    spdl_batch_free(dropped); /* user code */
    return moved;
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
    if (choice < paths && seen->items + seen->marks + seen->ended < paths &&
        !spdl__merge_starved(p, node, seen))
        return -1;
    if (choice >= paths)
        (void)snprintf(text, sizeof(text), "merge_fn returned %d, but there are %d paths", choice,
                       paths);
    else
        (void)snprintf(text, sizeof(text),
                       "merge_fn waits, but nothing comes before something is taken");
    spdl__node_fail(p, node, node->out.tail, node->out.tail, SPDL_E_INVALID, text);
    return -1;
}

/* The path to take from, or -1 to wait. */
SPDL__PRIVATE int spdl__merge_choose(spdl_pipeline *p, spdl__node *node, const spdl__paths *seen) {
    if (node->row.merge_order == SPDL_MERGE_CHOICE) return spdl__merge_ask(p, node, seen);
    return spdl__merge_turn(p, node, seen);
}

/* Passes over the holes in front of each path. */
SPDL__PRIVATE void spdl__merge_pass(spdl_pipeline *p, spdl__node *node, uint64_t now) {
    int i;
    for (i = 0; i < node->paths; ++i) {
        spdl__cursor c = spdl__cursor_at_head(spdl__path_edge(p, node, i));
        (void)spdl__cursor_look(&c);
        (void)spdl__cursor_store(&c, now);
    }
}

SPDL__PRIVATE spdl__emitted spdl__merge_take(spdl_pipeline *p, spdl__node *node, int path,
                                             uint64_t now) {
    spdl__cursor c = spdl__cursor_at_head(spdl__path_edge(p, node, path));
    spdl__emitted got = { NULL, 0, 0 };
    if (spdl__cursor_look(&c) == SPDL__AN_ITEM) got = spdl__cursor_take(&c);
    (void)spdl__cursor_store(&c, now);
    spdl__edge_hungry(c.edge, now);
    return got;
}

/* One item from the path whose turn it is. */
SPDL__PRIVATE bool spdl__merge_one(spdl_pipeline *p, spdl__node *node, const spdl__paths *seen,
                                   uint64_t now) {
    const int path = spdl__merge_choose(p, node, seen);
    spdl__emitted got;
    if (path < 0) return false;
    got = spdl__merge_take(p, node, path, now);
    spdl__store_relaxed32(&node->turn, (uint32_t)(path + 1) % (uint32_t)node->paths);
    spdl__node_put(node, &node->out, 0, &got, now);
    return true;
}

/* The items of one batch move behind those of another. False when they do not fit. */
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
    spdl__emitted what = { NULL, 0, 0 };
    uint64_t number = 0;
    bool fits = true;
    int i;
    if (seen->items + seen->ended < node->paths) return false;
    batch = spdl__batch_get(node->batches);
    for (i = 0; i < node->paths; ++i) {
        spdl__emitted got;
        if (seen->ready[i] != 1) continue;
        got = spdl__merge_take(p, node, i, now);
        number = got.origin >> 8;
        what.range = what.item == NULL ? got.range : spdl__range_join(what.range, got.range);
        what.item = batch;
        fits = batch != NULL && fits && spdl__batch_append(batch, (spdl__batch *)got.item);
        spdl__merge_drop(dropped, (spdl__batch *)got.item);
    }
    if (!fits)
        spdl__node_fail(p, node, node->out.tail, number, SPDL_E_NOMEM,
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
    spdl__node_put(node, &node->out, 0, &what, now);
    return true;
}

/* Every path is at the end of the epoch. */
SPDL__PRIVATE bool spdl__merge_mark(spdl_pipeline *p, spdl__node *node, const spdl__paths *seen,
                                    uint64_t now) {
    int i;
    if (seen->marks == 0 || seen->marks + seen->ended < node->paths) return false;
    for (i = 0; i < node->paths; ++i) {
        spdl__cursor c = spdl__cursor_at_head(spdl__path_edge(p, node, i));
        if (spdl__cursor_look(&c) == SPDL__A_MARK) spdl__cursor_pass_mark(&c);
        (void)spdl__cursor_store(&c, now);
    }
    spdl__store_relaxed32(&node->turn, 0);
    spdl__store_relaxed(&node->refused, 0);
    spdl__node_put_mark(p, node, 0, now);
    return true;
}

/* Whether anything was done; *ended: it was the end of the row. */
SPDL__PRIVATE bool spdl__merge_once(spdl_pipeline *p, spdl__node *node, spdl__counters *counters,
                                    uint64_t now, bool *ended, spdl__dropped *dropped) {
    const spdl__paths seen = spdl__merge_look(p, node);
    *ended = spdl__load32(&node->closed) || seen.ended == node->paths;
    if (*ended) {
        spdl__node_finish(p, node, 0);
        return true;
    }
    if (seen.holes) {
        spdl__merge_pass(p, node, now);
        return true;
    }
    if (!spdl__node_has_room(p, node, 0)) return false;
    if (spdl__merge_mark(p, node, &seen, now)) return true;
    if (seen.items == 0) return false;
    if (node->row.merge_order == SPDL_MERGE_BATCHES)
        return spdl__merge_batches(p, node, &seen, counters, now, dropped);
    return spdl__merge_one(p, node, &seen, now);
}

/* One step of a merge: as many items as there are and room for. Whether anything was done. */
SPDL__PRIVATE bool spdl__merge_step(const spdl__crew *crew, spdl__node *node, int worker) {
    spdl_pipeline *p = crew->pipeline;
    const uint64_t now = spdl_time_ns();
    bool progress = false, ended = false;
    spdl__dropped dropped;
    spdl__sitting s;
    dropped.count = 0;
    s.node = node;
    s.inside = false;
    s.word = spdl__load(node->word);
    if ((s.word & SPDL__BUSY) != 0 || !spdl__sitting_hold(&s)) return false;
    while (!ended && dropped.count == 0 && !spdl__pipeline_halted(p) &&
           spdl__merge_once(p, node, &node->counters[worker], now, &ended, &dropped))
        progress = true;
    (void)spdl__word_move(p, node,
                          (uint64_t)0 - SPDL__HELD - 1 + (ended ? SPDL__FINISHED : 0));
    spdl__node_hint(p, node, node->beside, dropped.count > 0 ? crew : NULL);
    while (dropped.count > 0) spdl_batch_free(dropped.batch[--dropped.count]); /* user code */
    return progress;
}

/* --- workers --- */

/* What users know a worker by: the rescue has further workers of the first crew. */
SPDL__PRIVATE int spdl__worker_number(const spdl__crew *crew, int worker) {
    const spdl_pipeline *p = crew->pipeline;
    return worker - crew->first + (crew == p->rescue ? p->crew[0].workers : 0);
}

/* Runs every init of the crew's rows on this worker; the last worker to succeed opens the
   pipeline. */
SPDL__PRIVATE void spdl__pipeline_join(spdl_pipeline *p, const spdl__crew *crew, int worker) {
    int i;
    p->inits[worker] = 1;
    for (i = 0; i < p->count; ++i) {
        const spdl_stage *row = &p->node[i].row;
        void **local = &p->local[worker * p->count + i];
        spdl_result result = SPDL_OK;
        if (row->init != NULL && (crew->rows >> i & 1))
            result = row->init(row->ctx, spdl__worker_number(crew, worker), local);
        if (result != SPDL_OK) {
            char text[SPDL_NAME_BYTES + 64];
            (void)snprintf(text, sizeof(text), "init on worker %d failed: %s",
                           spdl__worker_number(crew, worker), spdl_result_text(result));
            spdl__node_fail(p, &p->node[i], 0, 0, result < 0 ? result : SPDL_E_STAGE, text);
            spdl__edge_finish(p, p->sink, 0); /* nothing was processed, nothing will be */
            return;
        }
        p->inits[worker]++;
    }
    if (spdl__add32(&p->joined, 1) + 1 < (uint32_t)p->workers) return;
    spdl__store32(&p->open, 1); /* every other worker may be asleep: this one starts the flow */
    spdl__pipeline_hint(p);     /* and in other crews another */
}

/* Runs the fini of every init that succeeded on this worker. */
SPDL__PRIVATE void spdl__pipeline_part(spdl_pipeline *p, const spdl__crew *crew, int worker) {
    int i;
    for (i = (int)p->inits[worker] - 2; i >= 0; --i) {
        const spdl_stage *row = &p->node[i].row;
        if (row->fini != NULL && (crew->rows >> i & 1))
            row->fini(row->ctx, spdl__worker_number(crew, worker), p->local[worker * p->count + i]);
    }
    p->inits[worker] = UINT8_MAX;
    spdl__add32(&p->left, 1);
    spdl__event_wake(&p->quiet, SPDL__ALL);
}

/* The first and last visit of a worker. Whether it was one. */
SPDL__PRIVATE bool spdl__pipeline_hooks(spdl_pipeline *p, const spdl__crew *crew, int worker) {
    const uint8_t inits = p->inits[worker];
    if (inits == UINT8_MAX) return false;
    if (spdl__load32(&p->leaving))
        spdl__pipeline_part(p, crew, worker);
    else if (inits == 0)
        spdl__pipeline_join(p, crew, worker);
    else
        return false;
    return true;
}

/* One piece of work, as far downstream as possible: first where nobody else is, as two in one row
   send its word to and fro. */
SPDL__PRIVATE bool spdl__crew_step(void *self, int worker) {
    const spdl__crew *crew = (const spdl__crew *)self;
    spdl_pipeline *p = crew->pipeline;
    int joins, i;
    worker += crew->first;
    if (p->has_hooks && spdl__pipeline_hooks(p, crew, worker)) return true;
    if (!spdl__pipeline_flows(p) || !spdl__crew_works(p, crew)) return false;
    for (joins = 0; joins < 2; ++joins) {
        for (i = p->count - 1; i >= 0; --i) {
            spdl__node *node = &p->node[i];
            const uint64_t word = spdl__load(node->word);
            const spdl_kind kind = node->row.kind;
            if (!(crew->rows >> i & 1) || ((word & SPDL__ACTIVE) != 0) != (joins != 0) ||
                !spdl__node_has_work(p, node, word))
                continue;
            if (kind == SPDL_KIND_BATCH    ? spdl__batch_step(crew, node, worker)
                : kind == SPDL_KIND_MERGE ? spdl__merge_step(crew, node, worker)
                                          : spdl__node_sit(crew, node, worker))
                return true;
        }
    }
    return false;
}

/* --- what a stage function may ask --- */

SPDL_API spdl_result spdl_fail(spdl_task *task, const char *format, ...) {
    const bool running = spdl__task_running(task);
    char text[SPDL_TEXT_BYTES];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(running ? task->text : text, sizeof(text), format, args);
    va_end(args);
    if (!running)
        spdl__tell(&task->pipeline->logger, SPDL_LOG_ERROR,
                   "spdl: spdl_fail: not inside of a call of this stage: %s", text);
    return SPDL_E_STAGE;
}

SPDL_API void *spdl_ctx(const spdl_task *task) { return task->node->row.ctx; }

SPDL_API void *spdl_local(const spdl_task *task) {
    const spdl_pipeline *p = task->pipeline;
    return p->local != NULL ? p->local[task->worker * p->count + task->node->index] : NULL;
}

SPDL_API uint64_t spdl_sequence(const spdl_task *task) { return task->sequence; }

SPDL_API int spdl_worker(const spdl_task *task) {
    const spdl_pipeline *p = task->pipeline;
    int crew = p->crews - 1;
    while (p->crew[crew].first > task->worker) --crew;
    return spdl__worker_number(&p->crew[crew], task->worker);
}

SPDL_API bool spdl_stopping(const spdl_task *task) { return spdl__pipeline_halted(task->pipeline); }

SPDL_API void spdl_take(spdl_task *task) {
    if (spdl__task_allows(task, "spdl_take")) task->taken = task->in.item != NULL;
}

SPDL_API bool spdl_flushing(const spdl_task *task) { return task->flushing; }

SPDL_API uint64_t spdl_epoch(const spdl_task *task) {
    return spdl__load_relaxed(&task->node->epoch);
}

SPDL_API spdl_result spdl_emit(spdl_task *task, void *item) {
    if (!spdl__task_allows(task, "spdl_emit")) return SPDL_E_INVALID;
    if (!task->node->row.emits)
        return spdl__task_unfit(task, "spdl_emit in a stage whose row does not say .emits");
    return spdl__task_emit(task, item);
}

SPDL_API spdl_result spdl_route(spdl_task *task, int path) {
    if (!spdl__task_allows(task, "spdl_route")) return SPDL_E_INVALID;
    if (task->node->row.kind != SPDL_KIND_BRANCH)
        return spdl__task_unfit(task, "spdl_route in a stage that is no SPDL_BRANCH");
    if (path < 0 || path >= task->node->paths)
        return spdl__task_misuse(
            task,
            spdl__task_fail(task, "path %d, but there are %d paths", path, task->node->paths));
    task->path = path;
    return SPDL_OK;
}

SPDL_API spdl_result spdl_route_items(spdl_task *task, const int *path) {
    spdl__batch *in;
    size_t i;
    if (!spdl__task_allows(task, "spdl_route_items")) return SPDL_E_INVALID;
    in = (spdl__batch *)task->in.item;
    if (task->node->batches == NULL)
        return spdl__task_unfit(task,
                                "spdl_route_items in a stage that is no SPDL_BRANCH of batches");
    if (in == NULL)
        return spdl__task_misuse(task, spdl__task_fail(task, "spdl_route_items without a batch"));
    if (task->split != NULL)
        return spdl__task_misuse(task, spdl__task_fail(task, "spdl_route_items twice in one call"));
    for (i = 0; i < in->shown.count; ++i)
        if (spdl_route(task, path[i]) != SPDL_OK) return SPDL_E_INVALID;
    task->path = 0;
    if (in->shown.count > task->node->batches->size)
        return spdl__task_misuse(
            task,
            spdl__task_fail(task, "a batch with more items than the rows above can have made"));
    if (!spdl__task_split(task, in->shown.sequence)) return SPDL_E_NOMEM;
    for (i = 0; i < in->shown.count; ++i) spdl__task_send(task, path[i], in, i);
    return SPDL_OK;
}

/* --- completing deferred calls --- */

SPDL__PRIVATE spdl__parked *spdl__parked_find(spdl_pipeline *p, uint64_t id, spdl__node **node) {
    const uint64_t row = id >> SPDL__ID_PLACE_BITS & ((1u << SPDL__ID_ROW_BITS) - 1);
    const uint64_t place = id & ((1u << SPDL__ID_PLACE_BITS) - 1);
    if (row >= (uint64_t)p->count || p->node[row].parked == NULL) return NULL;
    *node = &p->node[row];
    return place < (uint64_t)(*node)->row.max_concurrency ? &(*node)->parked[place] : NULL;
}

/* Adds what one call has counted; the cell has one writer at a time. */
SPDL__PRIVATE void spdl__foreign_book(spdl_pipeline *p, spdl__node *node,
                                      const spdl__counters *call, uint64_t since, uint64_t now) {
    spdl__counters *counters = &node->counters[p->workers];
    spdl__spin_lock(&p->foreign_lock);
    spdl__count(&counters->made, call->made);
    spdl__count(&counters->skips, call->skips);
    spdl__count(&counters->failures, call->failures);
    spdl__counters_book(counters, 1, call->failures, now - since);
    spdl__node_learn(node, 1, now - since);
    spdl__spin_unlock(&p->foreign_lock);
}

/* Any thread: does for a waiting call what its worker would have done. */
SPDL__PRIVATE void spdl__parked_settle(spdl_pipeline *p, spdl__node *node, spdl__parked *parked) {
    const uint64_t now = spdl_time_ns();
    spdl__counters call;
    spdl_task task;
    memset(&call, 0, offsetof(spdl__counters, bucket));
    memset(&task, 0, sizeof(task));
    task.pipeline = p;
    task.node = node;
    task.worker = p->workers;
    task.in = parked->in;
    task.taken = parked->taken;
    task.flushing = parked->flushing;
    task.sequence = parked->sequence;
    task.ticket = parked->ticket;
    task.place = parked->place;
    task.since = parked->since;
    memcpy(task.text, parked->text, sizeof(parked->text));
    spdl__store_relaxed(&parked->thread, spdl__thread_id()); /* for a stop in what is called now */
    (void)spdl__pipe_settle(&task, &call, parked->result, parked->item, now);
    spdl__store_relaxed(&parked->thread, 0);
    spdl__foreign_book(p, node, &call, task.since, now);
    spdl__parked_release(node, parked);
    spdl__node_leave(p, node, now);
    spdl__pipeline_hint(p); /* a merge far away may have waited for this row to come to rest */
}

/* What the call was when it became ours to complete: ARMED or WAITING; FREE when there is no such
   call any more, or somebody else completes it. */
SPDL__PRIVATE spdl__parking spdl__parked_claim(spdl__parked *parked, uint64_t generation) {
    for (;;) {
        const uint64_t state = spdl__parked_state(parked);
        const spdl__parking now = (spdl__parking)(state & 7);
        if (state >> 3 != generation) return SPDL__PARKED_FREE;
        if (now != SPDL__PARKED_ARMED && now != SPDL__PARKED_WAITING) return SPDL__PARKED_FREE;
        if (spdl__parked_move(parked, generation, now,
                              now == SPDL__PARKED_ARMED ? SPDL__PARKED_TELLING
                                                        : SPDL__PARKED_SETTLING))
            return now;
    }
}

SPDL__PRIVATE spdl_result spdl__complete(spdl_deferred deferred, spdl_result result, void *item,
                                         const char *text) {
    spdl_pipeline *p = deferred.pipeline;
    const uint64_t generation = deferred.id >> SPDL__ID_BITS;
    spdl__parking was = SPDL__PARKED_FREE;
    spdl__parked *parked;
    spdl__node *node;
    spdl__add32(&p->completing, 1); /* destroy waits for us, too */
    parked = spdl__parked_find(p, deferred.id, &node);
    if (parked != NULL) was = spdl__parked_claim(parked, generation);
    if (was != SPDL__PARKED_FREE) {
        parked->result = result;
        parked->item = item;
        (void)snprintf(parked->text, sizeof(parked->text), "%s", text);
        if (was == SPDL__PARKED_WAITING)
            spdl__parked_settle(p, node, parked);
        else /* the worker is in the function and settles it; from here on it may */
            spdl__store(&parked->state, generation << 3 | SPDL__PARKED_DONE);
    } else {
        spdl__log(&p->logger, SPDL_LOG_ERROR,
                  "spdl: spdl_complete: no such call, or it was completed before");
    }
    spdl__sub32(&p->completing, 1);
    return was == SPDL__PARKED_FREE ? SPDL_E_INVALID : SPDL_OK;
}

SPDL_API spdl_result spdl_complete(spdl_deferred deferred, spdl_result result, void *item) {
    if (deferred.pipeline == NULL) return SPDL_E_INVALID;
    return spdl__complete(deferred, result, item, "");
}

SPDL_API spdl_result spdl_complete_fail(spdl_deferred deferred, const char *format, ...) {
    char text[SPDL_TEXT_BYTES];
    va_list args;
    if (deferred.pipeline == NULL) return SPDL_E_INVALID;
    va_start(args, format);
    (void)vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    return spdl__complete(deferred, SPDL_E_STAGE, NULL, text);
}

/* ============================================================================================= */
/* >>tune-impl
   With .autotune the trainer's thread looks at the numbers now and then, in next. If the trainer
   has waited, the stage that is busiest for its concurrency gets more of it, as long as the stages
   use no more processors than their budget. If it has not, or no stage can be given more, the one
   that needs least of its concurrency gets one less: the aim is the least that feeds the trainer.
   The next look judges that; what did not help, or was needed, is taken back, and the stage is left
   alone for a while. If the stages use more than the budget, the one that uses most of them gets
   less. Each decision is one line in the log: why, before, after. So is why there is none, when
   that has changed. Trainer only. */

#define SPDL__TUNE_ITEMS 16   /* decisions are not taken on fewer items */
#define SPDL__TUNE_WAIT 0.02  /* a trainer that waits less is fed */
#define SPDL__TUNE_BUSY 0.7   /* a stage that is busy less is not the limit */
#define SPDL__TUNE_FULL 0.9   /* workers that are busy less have time for more calls */
#define SPDL__TUNE_GAIN 1.05  /* what more has to bring, and what less must not cost */
#define SPDL__TUNE_OVER 1.05  /* of the budget: the stages use more than that */
#define SPDL__TUNE_REST 16    /* decisions for which a stage is left alone */

struct spdl__tuner {
    double budget; /* processors */
    uint64_t least_ns;
    /* at the last look */
    uint64_t since, delivered, waited, cpu_ns;
    uint64_t busy_ns[SPDL_MAX_STAGES];
    bool warm;
    /* the change that is on trial */
    int trial; /* its row, or -1 */
    uint32_t before, after;
    double rate_before, waiting_before;
    double rate_enough; /* before the first of several steps down that were kept; else 0 */
    int rest[SPDL_MAX_STAGES];
    /* why nothing was raised: as the last such look found it, and as the log has it */
    char reason[SPDL_TEXT_BYTES / 2], said[SPDL_TEXT_BYTES / 2];
};

/* What happened since the last look. */
typedef struct spdl__tuned {
    double rate, waiting, cores;
    uint32_t limit[SPDL_MAX_STAGES]; /* calls it may have now, as far as there are threads */
    uint32_t most[SPDL_MAX_STAGES];  /* and if it were raised */
    double busy[SPDL_MAX_STAGES];    /* calls that ran at the same time, on average */
    double load[SPDL_MAX_STAGES];    /* their share of `limit` */
} spdl__tuned;

/* Processor time of all workers so far. */
SPDL__PRIVATE uint64_t spdl__pipeline_cpu_ns(const spdl_pipeline *p) {
    uint64_t sum = 0;
    int i, k;
    for (i = 0; i < p->crews; ++i)
        for (k = 0; p->crew[i].pool != NULL && k < p->crew[i].workers; ++k)
            sum += spdl__thread_cpu_ns(p->crew[i].pool->worker[k].thread);
    return sum;
}

/* The threads that can run a stage. */
SPDL__PRIVATE int spdl__node_threads(const spdl_pipeline *p, const spdl__node *node) {
    return node->row.threads > 0 ? node->row.threads : p->crew[0].workers;
}

/* The most calls that tuning can give it. */
SPDL__PRIVATE uint32_t spdl__node_most(const spdl_pipeline *p, const spdl__node *node) {
    const uint64_t most = (uint64_t)node->row.max_concurrency;
    if (node->row.deferred) return (uint32_t)most;
    return (uint32_t)spdl__min(most, (uint64_t)spdl__node_threads(p, node));
}

SPDL__PRIVATE spdl__tuned spdl__tune_look(spdl_pipeline *p, uint64_t now) {
    spdl__tuner *t = p->tuner;
    const uint64_t waited = spdl__load_relaxed(&p->wait_ns), cpu_ns = spdl__pipeline_cpu_ns(p);
    const double ns = (double)(now - t->since);
    spdl__tuned seen;
    int i, k;
    memset(&seen, 0, sizeof(seen));
    seen.rate = (double)(p->delivered - t->delivered) / (ns / 1e9);
    seen.waiting = (double)(waited - t->waited) / ns;
    if (seen.waiting > 1) seen.waiting = 1; /* it began before the last look */
    seen.cores = (double)(cpu_ns - t->cpu_ns) / ns;
    for (i = 0; i < p->count; ++i) {
        const spdl__node *node = &p->node[i];
        uint64_t busy = 0;
        for (k = 0; k <= p->workers; ++k) busy += spdl__load_relaxed(&node->counters[k].timed_ns);
        seen.most[i] = spdl__node_most(p, node);
        seen.limit[i] = (uint32_t)spdl__min(spdl__load_relaxed32(&node->limit), seen.most[i]);
        seen.busy[i] = (double)(busy - t->busy_ns[i]) / ns;
        seen.load[i] = seen.busy[i] / seen.limit[i];
        t->busy_ns[i] = busy;
    }
    t->since = now;
    t->delivered = p->delivered;
    t->waited = waited;
    t->cpu_ns = cpu_ns;
    return seen;
}

/* A stage has, or keeps, a concurrency: says why. */
SPDL__PRIVATE void spdl__tune_set(spdl_pipeline *p, int row, uint32_t from, uint32_t to,
                                  const char *format, ...) SPDL__PRINTF(5, 6);
SPDL__PRIVATE void spdl__tune_set(spdl_pipeline *p, int row, uint32_t from, uint32_t to,
                                  const char *format, ...) {
    char why[SPDL_TEXT_BYTES / 2];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(why, sizeof(why), format, args);
    va_end(args);
    if (from == to) {
        spdl__tell(&p->logger, SPDL_LOG_INFO,
                   "spdl: autotune: stage %d '%s': concurrency %u kept, %s", row,
                   p->node[row].name, (unsigned)to, why);
        return;
    }
    spdl__tell(&p->logger, SPDL_LOG_INFO,
               "spdl: autotune: stage %d '%s': concurrency %u -> %u, because %s", row,
               p->node[row].name, (unsigned)from, (unsigned)to, why);
    spdl__store32(&p->node[row].limit, to);
    spdl__pipeline_hint(p);
}

/* Whether more has helped, or less is enough; if not it is taken back. The rate of a trainer that
   does not wait is its own. */
SPDL__PRIVATE void spdl__tune_judge(spdl_pipeline *p, const spdl__tuned *seen) {
    spdl__tuner *t = p->tuner;
    const int row = t->trial;
    const bool less = t->after < t->before;
    const bool fed = seen->waiting <= SPDL__TUNE_WAIT;
    bool kept;
    t->trial = -1;
    if (spdl__load_relaxed32(&p->node[row].limit) != t->after) return; /* changed by hand */
    if (less)
        kept = fed || (t->waiting_before > SPDL__TUNE_WAIT &&
                       seen->waiting <= t->waiting_before + SPDL__TUNE_WAIT &&
                       seen->rate * SPDL__TUNE_GAIN >= t->rate_before);
    else
        kept = seen->rate >= t->rate_before * SPDL__TUNE_GAIN &&
               seen->cores <= t->budget * SPDL__TUNE_OVER;
    t->rate_enough = less && kept && !fed ? t->rate_before : 0;
    if (!kept) t->rest[row] = SPDL__TUNE_REST;
    spdl__tune_set(p, row, t->after, kept ? t->after : t->before,
                   "it %s: %.1f items/s before, %.1f with %u, %.1f of %.1f processors, the trainer "
                   "waited %.0f %% of the time",
                   less ? kept ? "is enough" : "was not enough" : kept ? "helped" : "did not help",
                   t->rate_before, seen->rate, (unsigned)t->after, seen->cores, t->budget,
                   100 * seen->waiting);
}

/* The stages use more than their budget: the one that uses most gets less. False: none can. */
SPDL__PRIVATE bool spdl__tune_lower(spdl_pipeline *p, const spdl__tuned *seen) {
    int i, row = -1;
    for (i = 0; i < p->count; ++i)
        if (seen->limit[i] > 1 && (row < 0 || seen->busy[i] > seen->busy[row])) row = i;
    if (row < 0) return false;
    p->tuner->rest[row] = SPDL__TUNE_REST;
    spdl__tune_set(p, row, seen->limit[row], seen->limit[row] - 1, "the stages use %.1f of %.1f "
                   "processors, this one most of them", seen->cores, p->tuner->budget);
    return true;
}

/* Tries more calls with the busiest stage that may have more; or one less with that which needs
   least of what it has, and would not become the limit without it. The next look judges. False:
   there is none. */
SPDL__PRIVATE bool spdl__tune_try(spdl_pipeline *p, const spdl__tuned *seen, bool more) {
    spdl__tuner *t = p->tuner;
    uint32_t from;
    int i, row = -1;
    for (i = 0; i < p->count; ++i) {
        const bool fits = more ? seen->limit[i] < seen->most[i] && seen->load[i] >= SPDL__TUNE_BUSY
                               : seen->limit[i] > 1 &&
                                     seen->busy[i] < SPDL__TUNE_BUSY * (seen->limit[i] - 1);
        if (fits && t->rest[i] == 0 && (row < 0 || (seen->load[i] > seen->load[row]) == more))
            row = i;
    }
    if (row < 0) return false;
    from = seen->limit[row];
    t->trial = row;
    t->before = from;
    t->after = more ? (uint32_t)spdl__min(from + 1 + from / 4, seen->most[row]) : from - 1;
    t->waiting_before = seen->waiting;
    t->rate_before = seen->rate;
    /* several steps down in turn must not cost more, all together, than one may */
    if (!more && t->rate_enough > seen->rate) t->rate_before = t->rate_enough;
    spdl__tune_set(p, row, from, t->after, "the trainer waited %.0f %% of the time and the stage "
                   "was %.0f %% busy (%.1f items/s, %.1f of %.1f processors)", 100 * seen->waiting,
                   seen->load[row] < 1 ? 100 * seen->load[row] : 100.0, seen->rate, seen->cores,
                   t->budget);
    return true;
}

/* Says why nothing is raised: once two looks in turn have found the same, and unless the log has
   that last. What is measured stands in parentheses at the end and does not count. */
SPDL__PRIVATE void spdl__tune_idle(spdl_pipeline *p, const spdl__tuned *seen) {
    spdl__tuner *t = p->tuner;
    const int workers = p->crew[0].workers;
    const spdl_stage *row;
    char why[sizeof(t->reason)];
    double busy = 0;
    size_t counts;
    bool news;
    int i, top = 0;
    for (i = 0; i < p->count; ++i) {
        if (seen->load[i] > seen->load[top]) top = i;
        if ((p->crew[0].rows >> i & 1) && !p->node[i].row.deferred) busy += seen->busy[i];
    }
    row = &p->node[top].row;
    if (seen->waiting <= SPDL__TUNE_WAIT)
        (void)snprintf(why, sizeof(why), "the trainer does not wait (%.1f %% of the time)",
                       100 * seen->waiting);
    else if (seen->cores >= t->budget)
        (void)snprintf(why, sizeof(why), "the stages use all of cpu_budget (%.1f of %.1f "
                       "processors)", seen->cores, t->budget);
    else if (busy >= SPDL__TUNE_FULL * workers)
        (void)snprintf(why, sizeof(why), "all %d workers are busy: more might help", workers);
    else if (seen->load[top] < SPDL__TUNE_BUSY)
        (void)snprintf(why, sizeof(why), "no stage is busy for more than %.0f %% of the time "
                       "(stage %d '%s': %.0f %%)", 100 * SPDL__TUNE_BUSY, top, p->node[top].name,
                       100 * seen->load[top]);
    else if (seen->limit[top] < seen->most[top])
        (void)snprintf(why, sizeof(why), "stage %d '%s' was tried not long ago (it rests for %d "
                       "looks)", top, p->node[top].name, t->rest[top]);
    else if (row->kind == SPDL_KIND_PIPE && !row->flush &&
             (uint32_t)row->max_concurrency == seen->most[top])
        (void)snprintf(why, sizeof(why), "stage %d '%s' is at its max_concurrency of %d", top,
                       p->node[top].name, row->max_concurrency);
    else
        (void)snprintf(why, sizeof(why), "stage %d '%s' may have no more calls at a time (%u, "
                       "%.0f %% busy)", top, p->node[top].name, (unsigned)seen->most[top],
                       100 * seen->load[top]);
    counts = strcspn(why, "(") + 1;
    news = strncmp(why, t->reason, counts) == 0 && strncmp(why, t->said, counts) != 0;
    memcpy(t->reason, why, strlen(why) + 1);
    if (!news) return;
    memcpy(t->said, why, strlen(why) + 1);
    spdl__tell(&p->logger, SPDL_LOG_INFO, "spdl: autotune: nothing is raised: %s", why);
}

/* The trainer, with an item in its hands. */
SPDL__PRIVATE void spdl__tune(spdl_pipeline *p, uint64_t now) {
    spdl__tuner *t = p->tuner;
    spdl__tuned seen;
    int i;
    if (now - t->since < t->least_ns || p->delivered - t->delivered < SPDL__TUNE_ITEMS) return;
    seen = spdl__tune_look(p, now);
    if (!t->warm) { /* the first look is at pages, caches and connections that are new */
        t->warm = true;
        return;
    }
    for (i = 0; i < p->count; ++i)
        if (t->rest[i] > 0) --t->rest[i];
    if (t->trial >= 0)
        spdl__tune_judge(p, &seen);
    else if (seen.cores > t->budget * SPDL__TUNE_OVER && spdl__tune_lower(p, &seen))
        return;
    else if (seen.waiting > SPDL__TUNE_WAIT && seen.cores < t->budget &&
             spdl__tune_try(p, &seen, true))
        return;
    else if (!spdl__tune_try(p, &seen, false))
        spdl__tune_idle(p, &seen);
}

/* Where no row can be tuned there is no tuner. */
SPDL__PRIVATE spdl_result spdl__tuner_build(spdl_pipeline *p, const spdl_pipeline_desc *desc) {
    int i = 0;
    if (!desc->autotune) return SPDL_OK;
    while (i < p->count && spdl__node_most(p, &p->node[i]) <= 1) ++i;
    if (i == p->count) {
        spdl__tell(&p->logger, SPDL_LOG_INFO, "spdl: autotune: no stage can be tuned: SPDL_PIPE "
                   "rows can, with more than one thread to run them, without .flush and without "
                   "max_concurrency = 1");
        return SPDL_OK;
    }
    p->tuner = (spdl__tuner *)spdl__alloc_zeroed(&p->allocator, 1, sizeof(*p->tuner), 8);
    if (p->tuner == NULL) return SPDL_E_NOMEM;
    p->tuner->trial = -1;
    p->tuner->budget = desc->cpu_budget > 0 ? desc->cpu_budget : 0.4 * spdl__cpu_count();
    p->tuner->least_ns = (uint64_t)(1e9 * (desc->tune_seconds > 0 ? desc->tune_seconds : 0.5));
    return SPDL_OK;
}

/* ============================================================================================= */
/* >>pipeline-impl
   A pipeline as a whole: the trainer and the producer at its ends, how it is stopped and destroyed,
   and how create checks the rows and builds edges, stages and crews from them. Create acquires in
   one run and release frees whatever of it is there.

   Threads: next is the trainer's, push the producer's; stop is anybody's; create and destroy are
   the owner's. */

/* --- the trainer --- */

/* Whether this is the child of a fork that has left the workers behind. */
SPDL__PRIVATE bool spdl__pipeline_forked(const spdl_pipeline *p) {
    return p->threaded && p->process != spdl__process_id();
}

/* What next says at the end of the sink. */
SPDL__PRIVATE spdl_result spdl__pipeline_end(spdl_pipeline *p) {
    const uint64_t now = spdl_time_ns();
    spdl__edge_ended(p->sink, now);
    if (p->ended_ns == 0) spdl__store_relaxed(&p->ended_ns, now);
    return spdl__load32(&p->failed) ? p->error.result : SPDL_END;
}

/* Whether the polite workers, all together, have been on the run queues for half of
   SPDL__STARVED_NS since this was asked last, or the system does not tell. *before: what they had
   been, 0 at first. */
SPDL__PRIVATE bool spdl__polite_starve(const spdl_pipeline *p, uint64_t *before) {
    uint64_t sum = 1, ns;
    bool starve;
    int i;
    for (i = 0; i < p->crew[0].workers; ++i) {
        if (!spdl__thread_queued_ns(spdl__load(&p->crew[0].pool->worker[i].thread_number), &ns))
            return true;
        sum += ns;
    }
    starve = *before != 0 && sum - *before >= SPDL__STARVED_NS / 2;
    *before = sum;
    return starve;
}

/* Polite workers may get next to nothing beside other programs. When the trainer sleeps, and in
   SPDL__STARVED_NS they were ready to run for half as long, others do their work for
   SPDL__RESCUE_NS. What polite ones have begun they end. */
SPDL__PRIVATE void spdl__rescue(spdl_pipeline *p, bool hurry) {
    if (hurry) p->hurried_ns = spdl_time_ns();
    if (spdl__exchange32(&p->hurry, hurry) != hurry) spdl__pipeline_hint(p); /* others' turn */
}

/* After a take: wakes somebody for the last row. With a large buffer only when no more than half of
   what may be there lies before us or is under way (the low watermark; not where who pushes may be
   the trainer). Waking may take the processor away from us. */
SPDL__PRIVATE void spdl__sink_hint(spdl_pipeline *p) {
    const spdl__node *last = p->last;
    const spdl__edge *sink = p->sink;
    uint64_t since, there;
    spdl__barrier_after_rmw();
    if (spdl__load_relaxed32(p->sleepers) == 0) return;
    there = spdl__node_position(last, spdl__load(last->word)) -
            spdl__load_relaxed(&sink->refunds) - spdl__head(spdl__load_relaxed(&sink->word)) +
            spdl__load_relaxed(&sink->holes);
    if (p->feed == NULL && sink->buffer_size >= SPDL__WATERMARK_BUFFER &&
        2 * there > sink->buffer_size + (uint64_t)spdl__load_relaxed32(&last->limit))
        return;
    since = spdl_time_ns();
    spdl__node_hint_slow(p, last, (uint32_t)1 << last->index, NULL);
    spdl__count(&p->ready_ns, spdl_time_ns() - since);
}

/* Something was read from the sink. The clock is read when that begins or ends something: it costs
   more than the rest. */
SPDL__PRIVATE void spdl__sink_taken(spdl_pipeline *p, const spdl__cursor *c,
                                    const spdl__slot *item) {
    const spdl__edge *sink = p->sink;
    const uint64_t waits = spdl__load_relaxed(&p->wait_since);
    const bool timed =
        !SPDL__NO_STATS && (p->delivered == 0 || spdl__load_relaxed(&sink->gap_since) != 0 ||
                            spdl__load_relaxed(&sink->wait_since) != 0 || waits != 0 ||
                            !spdl__edge_ready(sink, c->head) ||
                            spdl__edge_ready(sink, c->head + sink->buffer_size - 1));
    const uint64_t now = timed || p->tuner != NULL || p->hurry ? spdl_time_ns() : 0;
    if (item != NULL && waits != 0 && now > waits) /* it lay there before we came to look */
        spdl__count(&p->ready_ns, spdl__min(now - waits, spdl__slot_age(item, now)));
    (void)spdl__cursor_store(c, now);
    if (item != NULL && p->delivered == 0) spdl__first_item(p, now);
    spdl__count(&p->delivered, item != NULL);
    if (p->hurry && now - p->hurried_ns > SPDL__RESCUE_NS) spdl__rescue(p, false);
    spdl__sink_hint(p);
    if (p->tuner != NULL && item != NULL) spdl__tune(p, now);
}

/* Takes the next item if there is one: SPDL_OK, SPDL_EMPTY, or how it ended. */
SPDL__PRIVATE spdl_result spdl__sink_take(spdl_pipeline *p, void **item) {
    /* the stop is looked at before the items: what was put before it is still handed out */
    const bool halted = spdl__pipeline_halted(p);
    spdl__cursor c = spdl__cursor_at_head(p->sink);
    const spdl__slot *slot = NULL;
    spdl_result result = SPDL_EMPTY;
    spdl__sight sight;
    if (p->told_closed) return SPDL_CLOSED;
    sight = spdl__cursor_look(&c);
    if (sight == SPDL__AN_ITEM) {
        slot = spdl__edge_slot(p->sink, c.head);
        p->last_item = spdl__cursor_take(&c);
        memcpy(item, &p->last_item.item, sizeof(*item)); /* *item may be any object pointer */
        result = SPDL_OK;
    } else if (sight == SPDL__A_MARK) {
        spdl__cursor_pass_mark(&c);
        result = SPDL_END;
    }
    if (result != SPDL_EMPTY || c.head != c.from) spdl__sink_taken(p, &c, slot);
    if (result != SPDL_EMPTY) return result;
    if (c.head >= c.end) return spdl__pipeline_end(p);
    if (!halted) return SPDL_EMPTY;
    p->told_closed = true;
    (void)spdl__pipeline_end(p);
    return SPDL_CLOSED;
}

/* From here on, or no longer, those who take and put look at what waits here. */
SPDL__PRIVATE void spdl__waiter_add(spdl_pipeline *p, uint32_t count) {
    int i;
    for (i = 0; i < p->crews; ++i)
        if (p->crew[i].pool != NULL) spdl__add32(&p->crew[i].pool->sleepers, count);
}

/* Sleeps until something is put into the sink, or in line until something can be run. Whoever puts,
   takes or leaves afterwards looks at `waiting` after a full barrier; what was put before is seen
   here, after one. */
SPDL__PRIVATE spdl_result spdl__next_sleep(spdl_pipeline *p, void **item, uint64_t deadline,
                                           bool *late) {
    const uint32_t word = spdl__load32(&p->fed.word);
    spdl_result result;
    (void)spdl__exchange32(&p->waiting, 1);
    spdl__full_barrier();
    /* what the watermark has passed over */
    spdl__rows_hint(p, (uint32_t)1 << p->last->index);
    result = spdl__sink_take(p, item);
    SPDL_TEST_POINT("trainer about to sleep");
    if (result == SPDL_EMPTY &&
        !(p->crew[0].pool == NULL && spdl__crew_runnable(&p->crew[0], 0))) {
        if (spdl__pipeline_forked(p)) {
            result = SPDL_E_INVALID;
        } else {
            *late = spdl__event_sleep(&p->fed, word, deadline) == SPDL_TIMEOUT;
            result = spdl__sink_take(p, item);
        }
    }
    spdl__store32(&p->waiting, 0);
    return result;
}

/* With workers = 0: runs stages on this thread until there is something to say. */
SPDL__PRIVATE spdl_result spdl__next_inline(spdl_pipeline *p, void **item, uint64_t deadline) {
    spdl_result result = SPDL_EMPTY;
    bool late = false;
    spdl__store(&p->trainer, spdl__thread_id());
    while (result == SPDL_EMPTY && !late) {
        const bool done = spdl__crew_step(&p->crew[0], 0);
        result = spdl__sink_take(p, item);
        if (result == SPDL_EMPTY && !done) result = spdl__next_sleep(p, item, deadline, &late);
        if (deadline != SPDL__NEVER && spdl_time_ns() >= deadline) late = true;
    }
    spdl__store(&p->trainer, 0);
    return result == SPDL_EMPTY ? SPDL_TIMEOUT : result;
}

/* Looks again a few times, then sleeps until there is something to say. */
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
        const bool starves = p->rescue != NULL && !p->hurry;
        const uint64_t until =
            starves ? spdl__min(deadline, spdl_time_ns() + SPDL__STARVED_NS) : deadline;
        result = spdl__next_sleep(p, item, until, &late);
        if (!late || until == deadline) continue;
        late = false;
        if (spdl__polite_starve(p, &queued)) spdl__rescue(p, true);
    }
    if (slept) spdl__waiter_add(p, (uint32_t)0 - SPDL__WAITER);
    if (booked) spdl__blame_mark(p, true);
    return result == SPDL_EMPTY ? SPDL_TIMEOUT : result;
}

/* As gap_close, for a gap that nobody else can close. */
SPDL__PRIVATE void spdl__wait_close(spdl_pipeline *p, uint64_t now) {
    const uint64_t since = spdl__load_relaxed(&p->wait_since);
    spdl__store_relaxed(&p->wait_since, 0);
    if (now > since) spdl__store(&p->wait_ns, p->wait_ns + (now - since));
}

SPDL_API spdl_result spdl_pipeline_next(spdl_pipeline *p, void **item, int64_t timeout_ns) {
    spdl_result result;
    if (p == NULL || item == NULL) return SPDL_E_INVALID;
    if (spdl__exchange32(&p->trainer_inside, 1) != 0) return SPDL_E_INVALID;
    result = spdl__sink_take(p, item);
    if (result == SPDL_EMPTY && timeout_ns == 0 && p->crew[0].pool != NULL) {
        spdl__full_barrier(); /* who polls does not sleep: what the watermark has passed over */
        spdl__rows_hint(p, (uint32_t)1 << p->last->index);
        result = SPDL_TIMEOUT;
    } else if (result == SPDL_EMPTY) {
        const uint64_t deadline = spdl__deadline(timeout_ns);
        spdl__store_relaxed(&p->wait_since, spdl_time_ns());
        spdl__wait_begin(p);
        result = p->crew[0].pool == NULL ? spdl__next_inline(p, item, deadline)
                                         : spdl__next_wait(p, item, deadline);
        spdl__wait_end(p, result);
        spdl__wait_close(p, spdl_time_ns());
    }
    spdl__store32(&p->trainer_inside, 0);
    return result;
}

SPDL_API spdl_result spdl_pipeline_next_fn(void *pipeline, void **item, int64_t timeout_ns) {
    return spdl_pipeline_next((spdl_pipeline *)pipeline, item, timeout_ns);
}

SPDL_API bool spdl_pipeline_failed(const spdl_pipeline *p) { return spdl__load32(&p->failed) != 0; }

SPDL_API const spdl_error *spdl_pipeline_error(const spdl_pipeline *p) { return &p->error; }

/* --- the producer --- */

SPDL__PRIVATE spdl_result spdl__push_try(spdl_pipeline *p, void *item) {
    spdl__node *feed = p->feed;
    const uint64_t number = feed->made;
    spdl__emitted what;
    if (spdl__load32(&feed->ended) || spdl__load32(&feed->closed) || spdl__pipeline_halted(p))
        return SPDL_CLOSED;
    if (feed->out.tail >= spdl__edge_until(&feed->out, feed->out.buffer_size, false))
        return SPDL_FULL;
    what.item = item;
    what.origin = spdl__origin(number, (unsigned)feed->index);
    what.range = number << SPDL__SPAN_BITS;
    spdl__store_relaxed(&feed->made, number + 1);
    spdl__count(&feed->counters[0].tasks, 1);
    spdl__count(&feed->counters[0].made, 1);
    spdl__node_put(feed, &feed->out, 0, &what, spdl_time_ns());
    spdl__node_changed(p, feed);
    return SPDL_OK;
}

/* Takes the place of the reader for a moment, unless it is at work: then there is room soon. */
SPDL__PRIVATE void spdl__push_drop_oldest(spdl_pipeline *p) {
    spdl__node *feed = p->feed, *reader = feed + 1;
    spdl__emitted got = { NULL, 0, 0 };
    spdl__cursor c;
    spdl__sitting s;
    s.node = reader;
    s.inside = false;
    s.word = spdl__load(reader->word);
    /* a row that calls nothing is not to be entered while it works */
    if ((s.word & SPDL__FLAGS) != 0 ||
        ((s.word & SPDL__ACTIVE) != 0 && !spdl__row_calls(&reader->row)) ||
        !spdl__sitting_hold(&s)) {
        spdl__yield();
        return;
    }
    c = spdl__cursor_at_head(&feed->out);
    if (spdl__cursor_look(&c) == SPDL__AN_ITEM) {
        got = spdl__cursor_take(&c);
        --c.shift; /* the reader's results have no place for it */
        spdl__count(&feed->counters[0].skips, 1);
    }
    (void)spdl__cursor_settle(&c);
    (void)spdl__word_move(p, reader,
                          ((c.head - c.from) << SPDL__HEAD_BITS) - SPDL__HELD - 1);
    spdl__node_changed(p, reader); /* who found the word held may have gone to sleep */
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
            late = spdl__event_sleep(&p->room, word, deadline) == SPDL_TIMEOUT;
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
    spdl__edge_finish(p, &p->feed->out, spdl__load(&p->feed->out.tail));
    spdl__node_changed(p, p->feed);
    spdl__store32(&p->producer_inside, 0);
    return SPDL_OK;
}

/* --- changes while it runs --- */

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
    spdl__node_changed(p, &p->node[stage]);
    return SPDL_OK;
}

/* --- stop --- */

/* Whether this thread settles a deferred call: a free_item or log_fn that stops. */
SPDL__PRIVATE bool spdl__pipeline_settling(const spdl_pipeline *p) {
    const uint64_t thread = spdl__thread_id();
    int i, k;
    for (i = 0; i < p->count; ++i)
        for (k = 0; p->node[i].parked != NULL && k < p->node[i].row.max_concurrency; ++k)
            if (spdl__load_relaxed(&p->node[i].parked[k].thread) == thread) return true;
    return false;
}

/* Whether this thread runs a call: to wait for the calls that run would be to wait for itself. */
SPDL__PRIVATE bool spdl__pipeline_inside(const spdl_pipeline *p) {
    int i;
    for (i = 0; i < p->crews; ++i)
        if (p->crew[i].pool != NULL && spdl__pool_is_worker(p->crew[i].pool)) return true;
    if (p->crew[0].pool == NULL && spdl__load(&p->trainer) == spdl__thread_id()) return true;
    return spdl__pipeline_settling(p);
}

/* After halt: waits until nobody is inside of a row. */
SPDL__PRIVATE spdl_result spdl__pipeline_await_quiet(spdl_pipeline *p, uint64_t deadline) {
    spdl_result slept = SPDL_OK;
    int i = 0;
    while (i < p->count) {
        const uint32_t word = spdl__load32(&p->quiet.word);
        if ((spdl__load(p->node[i].word) & SPDL__ACTIVE) == 0) { /* pairs with word_move */
            ++i;
        } else {
            if (slept == SPDL_TIMEOUT) return SPDL_TIMEOUT;
            slept = spdl__event_sleep(&p->quiet, word, deadline);
        }
    }
    return SPDL_OK;
}

/* Frees the batch that `node` was filling. */
SPDL__PRIVATE void spdl__node_purge_batch(spdl_pipeline *p, spdl__node *node) {
    if (node->open_batch == NULL) return;
    spdl__count(&node->counters[p->workers].freed, node->open_batch->shown.count);
    spdl_batch_free(node->open_batch);
    node->open_batch = NULL;
}

/* Frees what a slot holds; how many items that were. */
SPDL__PRIVATE size_t spdl__slot_purge(spdl_pipeline *p, spdl__slot *slot) {
    const uint64_t origin = slot->origin;
    void *item = slot->item;
    spdl__store_relaxed(&slot->origin, spdl__origin(0, SPDL__HOLE));
    if (spdl__owner(origin) == SPDL__BUNDLE) return spdl__bundle_drop(p, (spdl__bundle *)item);
    if (spdl__owner(origin) >= SPDL_MAX_STAGES) return 0;
    spdl__item_free(p, item, origin);
    return 1;
}

/* Frees the items that are ready on the edge behind `node`. */
SPDL__PRIVATE void spdl__node_purge(spdl_pipeline *p, spdl__node *node) {
    spdl__counters *counters = &node->counters[p->workers];
    const uint64_t head = spdl__head(spdl__load(&node->out.word));
    uint64_t ticket;
    for (ticket = head; ticket < head + node->out.mask + 1; ++ticket)
        if (spdl__edge_ready(&node->out, ticket))
            spdl__count(&counters->freed, spdl__slot_purge(p, spdl__edge_slot(&node->out, ticket)));
}

/* The pipeline is quiet: frees what nobody can take any more, all edges but the last `keep`. If
   another stop is at it, or this is a stop inside a free_item, that one does it. */
SPDL__PRIVATE void spdl__pipeline_purge(spdl_pipeline *p, int keep) {
    int i;
    if (!spdl__try_lock(&p->purge_lock)) return;
    for (i = 0; i < p->count; ++i) spdl__node_purge_batch(p, &p->node[i]);
    for (i = 0; i < p->count - keep; ++i) spdl__node_purge(p, &p->node[i]);
    spdl__spin_unlock(&p->purge_lock);
}

/* Nobody enters a row any more, and who is inside takes no further item. */
SPDL__PRIVATE void spdl__pipeline_halt(spdl_pipeline *p) {
    int i;
    spdl__store32(&p->stopping, 1);
    for (i = 0; i < p->count; ++i) (void)spdl__or(p->node[i].word, SPDL__STOPPED);
    spdl__full_barrier();
    spdl__trainer_wake(p);
    spdl__producer_wake(p);
}

SPDL_API void spdl_stop(spdl_task *task) { spdl__pipeline_halt(task->pipeline); }

SPDL_API spdl_result spdl_pipeline_stop(spdl_pipeline *p, int64_t timeout_ns) {
    spdl_result result;
    if (p == NULL || spdl__pipeline_forked(p)) return SPDL_E_INVALID;
    spdl__pipeline_halt(p);
    if (spdl__pipeline_inside(p)) return SPDL_OK;
    result = spdl__pipeline_await_quiet(p, spdl__deadline(timeout_ns));
    if (result == SPDL_OK) spdl__pipeline_purge(p, 1);
    return result;
}

/* Each worker runs its fini on its own thread. */
SPDL__PRIVATE void spdl__pipeline_part_all(spdl_pipeline *p) {
    int i;
    spdl__store32(&p->leaving, 1);
    spdl__full_barrier(); /* pairs with that in pool_park: a worker is asleep, or will see it */
    if (p->crew[0].pool == NULL && p->inits != NULL && p->inits[0] != UINT8_MAX)
        spdl__pipeline_part(p, &p->crew[0], 0);
    for (i = 0; i < p->crews; ++i)
        if (p->crew[i].pool != NULL) spdl__pool_wake_all(p->crew[i].pool);
    for (;;) {
        const uint32_t word = spdl__load32(&p->quiet.word);
        if (spdl__load32(&p->left) == (uint32_t)p->workers) return;
        (void)spdl__event_sleep(&p->quiet, word, SPDL__NEVER);
    }
}

SPDL__PRIVATE void spdl__node_release(spdl_pipeline *p, spdl__node *node) {
    const spdl_allocator *allocator = &p->allocator;
    if (node->batches != NULL) spdl__batch_pool_drop(node->batches);
    spdl__shelf_release(&node->shelf);
    spdl__free(allocator, node->out.slots, (size_t)(node->out.mask + 1) * sizeof(spdl__slot));
    spdl__free(allocator, node->counters, ((size_t)p->workers + 1) * sizeof(*node->counters));
    spdl__free(allocator, node->parked,
               (size_t)node->row.max_concurrency * sizeof(*node->parked));
    spdl__free(allocator, node->settled,
               (size_t)(node->settled_mask + 1) * sizeof(*node->settled));
}

/* Frees whatever create has made so far. */
SPDL__PRIVATE void spdl__pipeline_release(spdl_pipeline *p) {
    const spdl_allocator allocator = p->allocator;
    const size_t workers = (size_t)p->workers;
    int i;
    for (i = 0; p->crew != NULL && i < p->crews; ++i)
        if (p->crew[i].own_pool) spdl_pool_destroy(p->crew[i].pool);
    spdl__trace_close(p);
    for (i = 0; p->node != NULL && i < p->count; ++i) spdl__node_release(p, &p->node[i]);
    spdl__free(&allocator, p->node, (size_t)p->count * sizeof(*p->node));
    spdl__free(&allocator, p->crew, (size_t)p->crews * sizeof(*p->crew));
    spdl__free(&allocator, p->task, workers * sizeof(*p->task));
    spdl__free(&allocator, p->split, workers * SPDL_MAX_STAGES * sizeof(*p->split));
    spdl__free(&allocator, p->local, workers * (size_t)p->count * sizeof(*p->local));
    spdl__free(&allocator, p->inits, workers);
    spdl__free(&allocator, p->tuner, sizeof(*p->tuner));
    spdl__event_fini(&p->fed);
    spdl__event_fini(&p->quiet);
    spdl__event_fini(&p->room);
    spdl__free(&allocator, p, sizeof(*p));
}

/* Whoever wonders why destroy does not return finds the reason in the log. */
SPDL__PRIVATE void spdl__pipeline_tell_calls(const spdl_pipeline *p) {
    int i;
    for (i = 0; i < p->count; ++i) {
        const spdl__node *node = &p->node[i];
        if ((spdl__load(node->word) & SPDL__ACTIVE) != 0)
            spdl__tell(&p->logger, SPDL_LOG_WARN,
                       "spdl: spdl_pipeline_destroy waits for a call of stage %d '%s' to %s", i,
                       node->name, node->row.deferred ? "return and be completed" : "return");
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
    if (spdl_pipeline_stop(p, SPDL__PATIENCE_NS) != SPDL_OK) {
        spdl__pipeline_tell_calls(p);
        (void)spdl_pipeline_stop(p, SPDL_FOREVER);
    }
    if (p->has_hooks) spdl__pipeline_part_all(p);
    for (i = 0; i < p->crews; ++i)
        if (p->crew[i].slot != NULL) spdl__pool_detach(p->crew[i].pool, p->crew[i].slot);
    while (spdl__load32(&p->completing) != 0) spdl__yield(); /* on its last steps */
    spdl__pipeline_purge(p, 0);
    spdl__report_end(p);
    spdl__pipeline_release(p);
}

/* --- create: what the rows say --- */

/* What create works on. */
typedef struct spdl__plan {
    const spdl_pipeline_desc *desc; /* its error is always set */
    const spdl_stage *rows;
    int count; /* rows, with the sink */
    /* found out by plan_connect */
    int before[SPDL_MAX_STAGES + 1]; /* the row whose edge it reads; path: its branch; else -1 */
    uint32_t above[SPDL_MAX_STAGES + 1];
    int paths[SPDL_MAX_STAGES + 1]; /* branch and merge: how many */
    uint8_t path[SPDL_MAX_STAGES + 1][SPDL_MAX_STAGES]; /* and which rows they write, or read */
    int branch[SPDL_MAX_STAGES + 1]; /* the branch it is inside of; merge: that it ends; or -1 */
    int merge[SPDL_MAX_STAGES + 1];  /* branch: where it ends */
} spdl__plan;

SPDL__PRIVATE const char *spdl__row_name(const spdl_stage *row) {
    static const char *const kinds[] = { "(none)", "source", "pipe",   "batch", "sink",
                                         "feed",   "branch", "path", "merge" };
    if (row->name != NULL) return row->name;
    if (row->fn != NULL && row->fn->name != NULL) return row->fn->name;
    return (unsigned)row->kind < 9 ? kinds[row->kind] : "(unknown)";
}

/* Where a row was written: "file:line". */
typedef struct spdl__place {
    char text[SPDL_TEXT_BYTES / 4];
} spdl__place;

SPDL__PRIVATE spdl__place spdl__row_place(const spdl_stage *row) {
    const char *file = row->file != NULL ? row->file : "(unknown file)";
    spdl__place place;
    if (row->line > 0)
        (void)snprintf(place.text, sizeof(place.text), "%s:%d", file, row->line);
    else
        (void)snprintf(place.text, sizeof(place.text), "%s", file);
    return place;
}

/* Says in the error which row it is about. */
SPDL__PRIVATE spdl_result spdl__row_blame(const spdl__plan *plan, int index, spdl_result result) {
    plan->desc->error->stage = index;
    spdl__name_copy(plan->desc->error->stage_name, spdl__row_name(&plan->rows[index]));
    return result;
}

/* "spdl: file:line: stage 2 'decode': ..." */
SPDL__PRIVATE spdl_result spdl__row_error(const spdl__plan *plan, int index, const char *format,
                                          ...) SPDL__PRINTF(3, 4);
SPDL__PRIVATE spdl_result spdl__row_error(const spdl__plan *plan, int index, const char *format,
                                          ...) {
    const spdl_stage *row = &plan->rows[index];
    char text[SPDL_TEXT_BYTES / 2];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    spdl__error_set(plan->desc->error, SPDL_E_INVALID, "spdl: %s: stage %d '%s': %s",
                    spdl__row_place(row).text, index, spdl__row_name(row), text);
    return spdl__row_blame(plan, index, SPDL_E_INVALID);
}

SPDL__PRIVATE bool spdl__row_begins(const spdl_stage *row) {
    return row->kind == SPDL_KIND_SOURCE || row->kind == SPDL_KIND_FEED;
}

SPDL__PRIVATE spdl_result spdl__check_kind(const spdl__plan *plan, int i) {
    const spdl_kind kind = plan->rows[i].kind;
    if (i == 0 && !spdl__row_begins(&plan->rows[i]))
        return spdl__row_error(plan, i, "the first row must be SPDL_SOURCE or SPDL_FEED");
    if (i > 0 && spdl__row_begins(&plan->rows[i]))
        return spdl__row_error(plan, i, "only the first row may be %s",
                               kind == SPDL_KIND_FEED ? "SPDL_FEED" : "SPDL_SOURCE");
    if (i == plan->count - 1 && kind != SPDL_KIND_SINK)
        return spdl__row_error(plan, i, "the last row must be SPDL_SINK");
    if (i < plan->count - 1 && kind == SPDL_KIND_SINK)
        return spdl__row_error(plan, i, "only the last row may be SPDL_SINK");
    if (kind < SPDL_KIND_SOURCE || kind > SPDL_KIND_MERGE)
        return spdl__row_error(plan, i, "kind is %d, which is no kind of row", (int)kind);
    if (i == 1 && kind == SPDL_KIND_SINK && plan->rows[0].kind == SPDL_KIND_FEED)
        return spdl__row_error(plan, i, "behind SPDL_FEED there must be a stage");
    return SPDL_OK;
}

/* A field outside its bounds, by name. */
SPDL__PRIVATE spdl_result spdl__check_bounds(const spdl__plan *plan, int i, const char *field,
                                             int value, int most) {
    if (value >= 0 && value <= most) return SPDL_OK;
    return spdl__row_error(plan, i, "%s is %d, must be 1 to %d", field, value, most);
}

SPDL__PRIVATE spdl_result spdl__check_numbers(const spdl__plan *plan, int i) {
    const spdl_stage *row = &plan->rows[i];
    spdl_result result;
    if ((result = spdl__check_bounds(plan, i, "concurrency", row->concurrency,
                                     SPDL__MAX_CONCURRENCY)) != SPDL_OK ||
        (result = spdl__check_bounds(plan, i, "max_concurrency", row->max_concurrency,
                                     SPDL__MAX_CONCURRENCY)) != SPDL_OK ||
        (result = spdl__check_bounds(plan, i, "threads", row->threads, SPDL__MAX_WORKERS)) !=
            SPDL_OK ||
        (result = spdl__check_bounds(plan, i, "reorder_window", row->reorder_window,
                                     SPDL__MAX_BUFFER)) != SPDL_OK ||
        (result = spdl__check_bounds(plan, i, "buffer_size", row->buffer_size,
                                     SPDL__MAX_BUFFER)) != SPDL_OK)
        return result;
    if (row->concurrency > 1 && row->kind != SPDL_KIND_PIPE)
        return spdl__row_error(plan, i, "concurrency is %d, but only SPDL_PIPE rows have one",
                               row->concurrency);
    if (row->max_concurrency != 0 && row->max_concurrency < row->concurrency)
        return spdl__row_error(plan, i, "max_concurrency is %d, less than the concurrency of %d",
                               row->max_concurrency, row->concurrency);
    if (row->buffer_size != 0 && i == plan->count - 2)
        return spdl__row_error(plan, i, "buffer_size is set, but SPDL_SINK sets that of the edge "
                                        "behind the last stage");
    if (row->output_order != SPDL_ORDER_INPUT && row->output_order != SPDL_ORDER_COMPLETION)
        return spdl__row_error(plan, i, "output_order is %d, which is no order",
                               (int)row->output_order);
    return SPDL_OK;
}

SPDL__PRIVATE spdl_result spdl__check_budget(const spdl__plan *plan, int i) {
    const spdl_stage *row = &plan->rows[i];
    if (row->retries < 0)
        return spdl__row_error(plan, i, "retries is %d, must be at least 0", row->retries);
    if (row->max_failures < -1)
        return spdl__row_error(plan, i, "max_failures is %d, must be at least -1",
                               row->max_failures);
    if (!(row->max_failure_rate >= 0 && row->max_failure_rate <= 1))
        return spdl__row_error(plan, i, "max_failure_rate is %g, must be in (0, 1]",
                               row->max_failure_rate);
    if (row->max_failure_rate > 0 && row->max_failures != 0)
        return spdl__row_error(plan, i, "max_failures and max_failure_rate are both set");
    return SPDL_OK;
}

SPDL__PRIVATE spdl_result spdl__check_functions(const spdl__plan *plan, int i) {
    const spdl_stage *row = &plan->rows[i];
    const bool calls = spdl__row_calls(row);
    if (calls && (row->fn == NULL || row->fn->call == NULL))
        return spdl__row_error(plan, i, "fn is NULL");
    if (!calls && row->fn != NULL)
        return spdl__row_error(plan, i, "fn is set, but this kind of row calls nothing");
    if (row->kind == SPDL_KIND_BATCH && row->size < 1)
        return spdl__row_error(plan, i, "size is %d, must be at least 1", row->size);
    if (row->kind == SPDL_KIND_BATCH && row->size > (1 << 24))
        return spdl__row_error(plan, i, "size is %d, must be at most %d", row->size, 1 << 24);
    if (!calls && row->kind != SPDL_KIND_FEED && row->free_item != NULL)
        return spdl__row_error(plan, i, row->kind == SPDL_KIND_BATCH
                                            ? "free_item is set, but a batch frees itself and its "
                                              "items"
                                            : "free_item is set, but this kind of row makes no "
                                              "items");
    if (!calls && (row->init != NULL || row->fini != NULL))
        return spdl__row_error(plan, i, "init and fini are for rows that call a function");
    if (row->fini != NULL && row->init == NULL)
        return spdl__row_error(plan, i, "fini is set without init");
    return SPDL_OK;
}

/* What two fields of a row say does not go together. */
SPDL__PRIVATE spdl_result spdl__check_pairs(const spdl__plan *plan, int i) {
    const spdl_stage *row = &plan->rows[i];
    const bool parallel = row->concurrency > 1 || row->max_concurrency > 1;
    if (row->flush && parallel)
        return spdl__row_error(plan, i, "flush is set, but concurrency is more than 1");
    if (row->deferred && row->emits)
        return spdl__row_error(plan, i, "deferred and emits are both set");
    if (row->deferred && row->retries > 0)
        return spdl__row_error(plan, i, "deferred and retries are both set: who completes a call "
                                        "repeats it");
    if (row->deferred && row->flush)
        return spdl__row_error(plan, i, "deferred and flush are both set");
    if (row->merge_order < SPDL_MERGE_READY || row->merge_order > SPDL_MERGE_CHOICE)
        return spdl__row_error(plan, i, "merge_order is %d, which is no order",
                               (int)row->merge_order);
    if ((row->merge_order == SPDL_MERGE_CHOICE) != (row->merge_fn != NULL))
        return spdl__row_error(plan, i, "merge_fn goes with SPDL_MERGE_CHOICE, and only with it");
    return SPDL_OK;
}

/* Fields that would be without effect on this kind of row are mistakes, too. */
SPDL__PRIVATE spdl_result spdl__check_strays(const spdl__plan *plan, int i) {
    const spdl_stage *row = &plan->rows[i];
    const bool calls = spdl__row_calls(row), pipe = row->kind == SPDL_KIND_PIPE;
    const char *stray = NULL;
    if (!calls && row->retries != 0) stray = "retries";
    if (!calls && row->max_failures != 0) stray = "max_failures";
    if (!calls && row->max_failure_rate != 0) stray = "max_failure_rate";
    if (!pipe && row->max_concurrency != 0) stray = "max_concurrency";
    if (!pipe && row->threads != 0) stray = "threads";
    if (!pipe && row->output_order != SPDL_ORDER_INPUT) stray = "output_order";
    if (!pipe && row->reorder_window != 0) stray = "reorder_window";
    if (!pipe && row->flush) stray = "flush";
    if (!pipe && row->deferred) stray = "deferred";
    if (!pipe && row->kind != SPDL_KIND_SOURCE && row->emits) stray = "emits";
    if (row->kind != SPDL_KIND_BATCH && row->size != 0) stray = "size";
    if (row->kind != SPDL_KIND_BATCH && row->drop_last) stray = "drop_last";
    if (row->kind != SPDL_KIND_FEED && row->drop_oldest) stray = "drop_oldest";
    if (row->kind != SPDL_KIND_FEED && row->type != NULL) stray = "type";
    if (row->kind != SPDL_KIND_SOURCE && row->continuous) stray = "continuous";
    if (row->kind != SPDL_KIND_MERGE && row->merge_order != SPDL_MERGE_READY) stray = "merge_order";
    if (row->kind != SPDL_KIND_MERGE && row->merge_fn != NULL) stray = "merge_fn";
    if (row->kind == SPDL_KIND_BRANCH && row->buffer_size != 0)
        return spdl__row_error(plan, i, "buffer_size is set, but the edges of a branch are those "
                                        "of its SPDL_PATH rows: set it there");
    if (stray == NULL) return SPDL_OK;
    return spdl__row_error(plan, i, "%s is set, but has no meaning on this kind of row", stray);
}

/* Row `i` reads the edge of row `from`. */
SPDL__PRIVATE void spdl__plan_join(spdl__plan *plan, int i, int from) {
    plan->above[i] |= plan->above[from] | (uint32_t)1 << from;
}

SPDL__PRIVATE void spdl__plan_path(spdl__plan *plan, int owner, int row) {
    plan->path[owner][plan->paths[owner]++] = (uint8_t)row;
}

/* The branches that are open while plan_connect goes through the rows. */
typedef struct spdl__open_branches {
    int depth;
    int branch[SPDL_MAX_STAGES];
    int merges[SPDL_MAX_STAGES][SPDL_MAX_STAGES]; /* last rows of the paths so far */
    int count[SPDL_MAX_STAGES];
} spdl__open_branches;

/* A path or a merge ends the path before it. */
SPDL__PRIVATE void spdl__path_end(spdl__open_branches *open, int last) {
    const int at = open->depth - 1;
    open->merges[at][open->count[at]++] = last;
}

SPDL__PRIVATE spdl_result spdl__connect_path(spdl__plan *plan, spdl__open_branches *open, int i) {
    const int branch = open->depth > 0 ? open->branch[open->depth - 1] : -1;
    if (branch < 0) return spdl__row_error(plan, i, "SPDL_PATH without SPDL_BRANCH above");
    if (i - 1 != branch) spdl__path_end(open, i - 1);
    plan->before[i] = branch;
    spdl__plan_join(plan, i, branch);
    spdl__plan_path(plan, branch, i);
    return SPDL_OK;
}

SPDL__PRIVATE spdl_result spdl__connect_merge(spdl__plan *plan, spdl__open_branches *open, int i) {
    const int at = open->depth - 1;
    int k;
    if (at < 0) return spdl__row_error(plan, i, "SPDL_MERGE without SPDL_BRANCH above");
    spdl__path_end(open, i - 1);
    if (plan->paths[open->branch[at]] < 2)
        return spdl__row_error(plan, i, "SPDL_MERGE of fewer than 2 paths");
    plan->branch[i] = open->branch[at];
    plan->merge[open->branch[at]] = i;
    for (k = 0; k < open->count[at]; ++k) {
        spdl__plan_path(plan, i, open->merges[at][k]);
        spdl__plan_join(plan, i, open->merges[at][k]);
    }
    --open->depth;
    return SPDL_OK;
}

/* Who reads whose edge. */
SPDL__PRIVATE spdl_result spdl__plan_connect(spdl__plan *plan) {
    spdl__open_branches open;
    spdl_result result = SPDL_OK;
    int i;
    open.depth = 0;
    for (i = 0; i < plan->count && result == SPDL_OK; ++i) {
        const spdl_kind kind = plan->rows[i].kind;
        plan->before[i] = -1;
        plan->branch[i] = open.depth > 0 ? open.branch[open.depth - 1] : -1;
        if (i > 0 && plan->rows[i - 1].kind == SPDL_KIND_BRANCH && kind != SPDL_KIND_PATH)
            return spdl__row_error(plan, i, "behind SPDL_BRANCH there must be SPDL_PATH");
        if (kind == SPDL_KIND_PATH) {
            result = spdl__connect_path(plan, &open, i);
        } else if (kind == SPDL_KIND_MERGE) {
            result = spdl__connect_merge(plan, &open, i);
        } else if (i > 0) {
            plan->before[i] = i - 1;
            spdl__plan_join(plan, i, i - 1);
        }
        if (kind == SPDL_KIND_BRANCH) {
            open.branch[open.depth] = i;
            open.count[open.depth++] = 0;
        }
    }
    if (result == SPDL_OK && open.depth > 0)
        return spdl__row_error(plan, open.branch[open.depth - 1],
                               "SPDL_BRANCH without SPDL_MERGE below");
    return result;
}

SPDL__PRIVATE bool spdl__type_any(const char *type) {
    return strcmp(type, "void") == 0 || strcmp(type, "const void") == 0;
}

/* What a row hands on, as a type name; "void" fits anything. A merge hands on what its paths do. */
SPDL__PRIVATE const char *spdl__row_yields(const spdl__plan *plan, int i) {
    const spdl_stage *row = &plan->rows[i];
    const char *type = "void";
    int k;
    if (row->kind == SPDL_KIND_PATH) return spdl__row_yields(plan, plan->before[i]);
    if (row->kind == SPDL_KIND_BATCH) return "spdl_batch";
    if (row->kind == SPDL_KIND_FEED && row->type != NULL) return row->type;
    if (row->fn != NULL && row->fn->out_type != NULL) return row->fn->out_type;
    for (k = 0; k < plan->paths[i] && row->kind == SPDL_KIND_MERGE && spdl__type_any(type); ++k)
        type = spdl__row_yields(plan, plan->path[i][k]);
    return type;
}

SPDL__PRIVATE const char *spdl__row_takes(const spdl_stage *row) {
    if (row->kind == SPDL_KIND_MERGE && row->merge_order == SPDL_MERGE_BATCHES) return "spdl_batch";
    return row->fn != NULL && row->fn->in_type != NULL ? row->fn->in_type : "void";
}

/* Whether a stage may take what another yields; it may promise not to change it. */
SPDL__PRIVATE bool spdl__types_fit(const char *takes, const char *yields) {
    if (strncmp(takes, "const ", 6) == 0 && strncmp(yields, "const ", 6) != 0) takes += 6;
    return spdl__type_any(takes) || spdl__type_any(yields) || strcmp(takes, yields) == 0;
}

/* Whether row i can read what row `from` yields. */
SPDL__PRIVATE spdl_result spdl__check_pair(const spdl__plan *plan, int i, int from) {
    const spdl_stage *row = &plan->rows[i], *before = &plan->rows[from];
    const char *takes = spdl__row_takes(row), *yields = spdl__row_yields(plan, from);
    if (spdl__types_fit(takes, yields)) return SPDL_OK;
    spdl__error_set(plan->desc->error, SPDL_E_TYPE,
                    "spdl: %s: stage %d '%s' takes '%s *' but stage %d '%s' (%s) yields '%s *'",
                    spdl__row_place(row).text, i, spdl__row_name(row), takes, from,
                    spdl__row_name(before), spdl__row_place(before).text, yields);
    return spdl__row_blame(plan, i, SPDL_E_TYPE);
}

/* Nothing is handed to a source. */
SPDL__PRIVATE spdl_result spdl__check_source(const spdl__plan *plan, int i) {
    const spdl_stage *row = &plan->rows[i];
    const char *takes = spdl__row_takes(row);
    if (row->kind != SPDL_KIND_SOURCE || spdl__type_any(takes)) return SPDL_OK;
    spdl__error_set(plan->desc->error, SPDL_E_TYPE,
                    "spdl: %s: stage %d '%s' is a source, but takes '%s *': it must take 'void *'",
                    spdl__row_place(row).text, i, spdl__row_name(row), takes);
    return spdl__row_blame(plan, i, SPDL_E_TYPE);
}

/* What comes out of a merge is of one type. */
SPDL__PRIVATE spdl_result spdl__check_alike(const spdl__plan *plan, int i, int from, int other) {
    const spdl_stage *row = &plan->rows[i];
    const char *one = spdl__row_yields(plan, from), *two = spdl__row_yields(plan, other);
    if (spdl__types_fit(one, two) || spdl__types_fit(two, one)) return SPDL_OK;
    spdl__error_set(plan->desc->error, SPDL_E_TYPE,
                    "spdl: %s: stage %d '%s' merges '%s *' of stage %d '%s' with '%s *' of stage "
                    "%d '%s'",
                    spdl__row_place(row).text, i, spdl__row_name(row), one, from,
                    spdl__row_name(&plan->rows[from]), two, other,
                    spdl__row_name(&plan->rows[other]));
    return spdl__row_blame(plan, i, SPDL_E_TYPE);
}

/* A merge stands for what its paths yield. */
SPDL__PRIVATE spdl_result spdl__check_types(const spdl__plan *plan, int i) {
    spdl_result result = spdl__check_source(plan, i);
    int from = plan->before[i], k, other;
    if (from >= 0 && plan->rows[from].kind == SPDL_KIND_MERGE)
        for (k = 0; k < plan->paths[from] && result == SPDL_OK; ++k)
            result = spdl__check_pair(plan, i, plan->path[from][k]);
    else if (from >= 0 && plan->rows[i].kind != SPDL_KIND_PATH)
        result = spdl__check_pair(plan, i, from);
    if (plan->rows[i].kind != SPDL_KIND_MERGE) return result;
    for (k = 0; k < plan->paths[i] && result == SPDL_OK; ++k) {
        result = spdl__check_pair(plan, i, plan->path[i][k]);
        for (other = 0; other < k && result == SPDL_OK; ++other)
            result = spdl__check_alike(plan, i, plan->path[i][other], plan->path[i][k]);
    }
    return result;
}

SPDL__PRIVATE bool spdl__merge_joins(const spdl__plan *plan, int merge) {
    return plan->rows[merge].merge_order == SPDL_MERGE_BATCHES;
}

/* Between a branch of batches and the merge that joins them, they keep their order and number. */
SPDL__PRIVATE spdl_result spdl__check_joined(const spdl__plan *plan, int i) {
    const spdl_stage *row = &plan->rows[i];
    int branch = plan->branch[i];
    bool joined = false;
    const char *why = NULL;
    if (row->kind == SPDL_KIND_MERGE) branch = plan->branch[branch];
    for (; branch >= 0; branch = plan->branch[branch])
        joined = joined || spdl__merge_joins(plan, plan->merge[branch]);
    if (!joined) return SPDL_OK;
    if (row->output_order == SPDL_ORDER_COMPLETION) why = "completion order";
    if (row->emits) why = "emits";
    if (row->flush) why = "flush";
    if (row->kind == SPDL_KIND_BATCH) why = "SPDL_BATCH";
    if (row->kind == SPDL_KIND_MERGE && !spdl__merge_joins(plan, i)) why = "merge_order";
    if (why == NULL) return SPDL_OK;
    return spdl__row_error(plan, i, "%s: in a path that SPDL_MERGE_BATCHES joins, batches have to "
                                    "keep their order and number", why);
}

SPDL__PRIVATE spdl_result spdl__check_desc(const spdl_pipeline_desc *desc) {
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

SPDL__PRIVATE spdl_result spdl__check_plan(spdl__plan *plan) {
    spdl_result result = spdl__check_desc(plan->desc);
    int i;
    if (result != SPDL_OK) return result;
    if (plan->rows == NULL || plan->count < 1)
        return spdl__error_set(plan->desc->error, SPDL_E_INVALID,
                               "spdl: pipeline: no rows; a source and a sink are the least");
    if (plan->count == 1)
        return spdl__row_error(plan, 0, "the only row; a source and a sink are the least");
    if (plan->count > SPDL_MAX_STAGES + 1)
        return spdl__error_set(plan->desc->error, SPDL_E_INVALID,
                               "spdl: pipeline: too many stages: %d rows, at most %d and a sink",
                               plan->count, SPDL_MAX_STAGES);
    for (i = 0; i < plan->count; ++i) {
        if ((result = spdl__check_kind(plan, i)) != SPDL_OK ||
            (result = spdl__check_functions(plan, i)) != SPDL_OK ||
            (result = spdl__check_numbers(plan, i)) != SPDL_OK ||
            (result = spdl__check_budget(plan, i)) != SPDL_OK ||
            (result = spdl__check_strays(plan, i)) != SPDL_OK ||
            (result = spdl__check_pairs(plan, i)) != SPDL_OK)
            return result;
    }
    result = spdl__plan_connect(plan);
    for (i = 0; i < plan->count && result == SPDL_OK; ++i) result = spdl__check_types(plan, i);
    for (i = 0; i < plan->count && result == SPDL_OK; ++i) result = spdl__check_joined(plan, i);
    return result;
}

/* --- create: what is built --- */

/* Defaults in place of zeros. */
SPDL__PRIVATE void spdl__row_defaults(spdl_stage *row, const spdl__plan *plan, int i) {
    const spdl_stage *sink = &plan->rows[plan->count - 1];
    *row = plan->rows[i];
    if (row->concurrency == 0) row->concurrency = 1;
    if (row->max_concurrency == 0) row->max_concurrency = row->concurrency;
    if (i == plan->count - 2) row->buffer_size = sink->buffer_size ? sink->buffer_size : 3;
    if (row->buffer_size == 0) row->buffer_size = 2;
    if (row->kind == SPDL_KIND_BATCH || row->kind == SPDL_KIND_MERGE)
        row->free_item = spdl_batch_free;
}

/* The most items a batch of ours can have that leaves this row; 0: it yields none. */
SPDL__PRIVATE size_t spdl__node_batch_size(const spdl_pipeline *p, const spdl__plan *plan, int i) {
    const spdl_stage *row = &plan->rows[i];
    size_t most = 0;
    int k;
    if (row->kind == SPDL_KIND_BATCH) return (size_t)row->size;
    if (strcmp(spdl__row_yields(plan, i), "spdl_batch") != 0) return 0;
    for (k = 0; row->kind == SPDL_KIND_MERGE && k < plan->paths[i]; ++k)
        most = (size_t)spdl__max(most, p->node[plan->path[i][k]].batch_size);
    if (plan->before[i] >= 0) most = p->node[plan->before[i]].batch_size;
    for (k = 0; row->emits && k < i; ++k) /* batches out of a batch of batches */
        if (plan->above[i] >> k & 1) most = (size_t)spdl__max(most, p->node[k].batch_size);
    return most;
}

/* Which branch a row belongs to. */
SPDL__PRIVATE void spdl__node_place(spdl_pipeline *p, spdl__node *node, const spdl__plan *plan) {
    const spdl_kind kind = node->row.kind;
    int outer = plan->branch[node->index];
    node->splits = kind == SPDL_KIND_BRANCH && spdl__merge_joins(plan, plan->merge[node->index]);
    if (kind == SPDL_KIND_MERGE) {
        node->begin = &p->node[outer];
        outer = plan->branch[outer];
    }
    if (outer >= 0 && spdl__merge_joins(plan, plan->merge[outer])) node->branch = &p->node[outer];
}

SPDL__PRIVATE void spdl__node_defaults(spdl_pipeline *p, spdl__node *node, const spdl__plan *plan,
                                       int i) {
    spdl_stage *row = &node->row;
    spdl__row_defaults(row, plan, i);
    node->index = i;
    node->ordered = row->kind != SPDL_KIND_PIPE || row->output_order == SPDL_ORDER_INPUT;
    if (plan->desc->autotune && row->kind == SPDL_KIND_PIPE && !row->flush &&
        plan->rows[i].max_concurrency == 0)
        row->max_concurrency = (int)spdl__max((uint64_t)row->concurrency,
                                              (uint64_t)spdl__node_threads(p, node));
    node->serial = row->max_concurrency == 1;
    node->by_ticket = node->ordered && !node->serial;
    node->above = plan->above[i];
    node->paths = plan->paths[i];
    memcpy(node->path, plan->path[i], sizeof(node->path));
    node->limit = (uint32_t)row->concurrency;
    node->cut = SPDL__OPEN;
    node->batch_size = spdl__node_batch_size(p, plan, i);
    if (row->kind == SPDL_KIND_BRANCH && node->batch_size > 0 && row->free_item == NULL)
        row->free_item = spdl_batch_free;
    node->shelf.allocator = &p->allocator;
    node->word = &node->own;
    if (plan->before[i] >= 0) node->before = &p->node[plan->before[i]];
    if (node->before != NULL && row->kind != SPDL_KIND_PATH) {
        node->in = &node->before->out;
        node->word = &node->in->word;
    }
    spdl__name_copy(node->name, spdl__row_name(&plan->rows[i]));
    if (row->kind == SPDL_KIND_FEED) p->feed = node;
    spdl__node_place(p, node, plan);
    node->plain = row->kind == SPDL_KIND_PIPE && !row->emits && !row->deferred && !row->flush &&
                  row->retries == 0 && row->max_failure_rate <= 0 &&
                  (node->ordered || row->reorder_window == 0);
    if (row->init != NULL) p->has_hooks = true;
}

SPDL__PRIVATE spdl_result spdl__edge_build(spdl_pipeline *p, spdl__node *node) {
    spdl__edge *edge = &node->out;
    uint64_t slots;
    edge->buffer_size = (uint64_t)node->row.buffer_size;
    edge->window = edge->buffer_size + (uint64_t)node->row.max_concurrency;
    if (node->by_ticket)
        edge->window = spdl__max(edge->window, node->row.reorder_window
                                                   ? (uint64_t)node->row.reorder_window
                                                   : SPDL__WINDOW);
    edge->end = SPDL__OPEN;
    slots = spdl__pow2(edge->window);
    edge->mask = slots - 1;
    edge->slots = (spdl__slot *)spdl__alloc_zeroed(&p->allocator, (size_t)slots,
                                                   sizeof(spdl__slot), SPDL_CACHE_LINE);
    return edge->slots != NULL ? SPDL_OK : SPDL_E_NOMEM;
}

/* How many batches of row `first` can be alive: on the edges they may travel, if later stages pass
   them on, in calls, in batches of batches, and a few in the trainer's hands. */
SPDL__PRIVATE uint64_t spdl__batches_alive(const spdl_pipeline *p, int first) {
    uint64_t alive = 4, calls = 0;
    int i;
    for (i = p->count - 1; i >= first; --i) { /* from the sink up: what lies behind is known */
        const spdl_stage *row = &p->node[i].row;
        const uint64_t room = (uint64_t)row->buffer_size + (uint64_t)row->max_concurrency;
        alive += room + calls;
        calls = row->kind == SPDL_KIND_PIPE ? (uint64_t)row->max_concurrency : 0;
        if (row->kind == SPDL_KIND_BATCH && i > first)
            alive = spdl__min((alive + 1) * (uint64_t)row->size, SPDL__MAX_SPARE);
    }
    return spdl__min(alive, SPDL__MAX_SPARE);
}

/* Rows that make batches: of items, of parts of a batch, of batches that are joined. */
SPDL__PRIVATE bool spdl__node_makes_batches(const spdl__node *node) {
    return node->row.kind == SPDL_KIND_BATCH ||
           (node->row.kind == SPDL_KIND_BRANCH && node->batch_size > 0) ||
           (node->row.kind == SPDL_KIND_MERGE && node->row.merge_order == SPDL_MERGE_BATCHES);
}

SPDL__PRIVATE spdl_result spdl__batches_build(spdl_pipeline *p, spdl__node *node) {
    uint64_t ahead = spdl__batches_alive(p, node->index);
    int i;
    if (node->row.kind == SPDL_KIND_BRANCH) /* all paths together, at most */
        ahead = spdl__min(2 * ahead, SPDL__MAX_SPARE);
    node->batches = spdl__batch_pool_make(&p->allocator, node->batch_size, (size_t)ahead);
    if (node->batches == NULL) return SPDL_E_NOMEM;
    for (i = 0; i <= node->index; ++i) node->batches->free_item[i] = p->node[i].row.free_item;
    return SPDL_OK;
}

/* Places for deferred calls, all of them free. */
SPDL__PRIVATE spdl_result spdl__parked_build(spdl_pipeline *p, spdl__node *node) {
    const uint32_t count = (uint32_t)node->row.max_concurrency;
    uint32_t i;
    if (!node->row.deferred) return SPDL_OK;
    node->parked = (spdl__parked *)spdl__alloc_zeroed(&p->allocator, count, sizeof(*node->parked),
                                                      sizeof(uint64_t));
    if (node->parked == NULL) return SPDL_E_NOMEM;
    for (i = 0; i < count; ++i) node->parked[i].next = i + 1 < count ? i + 2 : 0;
    node->parked_free = 1;
    return SPDL_OK;
}

/* Completion order with a bound: who has ended. */
SPDL__PRIVATE spdl_result spdl__window_build(spdl_pipeline *p, spdl__node *node) {
    if (node->ordered || node->row.reorder_window == 0) return SPDL_OK;
    node->settled_mask = spdl__pow2((uint64_t)node->row.reorder_window + 1) - 1;
    node->settled = (uint32_t *)spdl__alloc_zeroed(
        &p->allocator, (size_t)node->settled_mask + 1, sizeof(*node->settled), sizeof(void *));
    return node->settled != NULL ? SPDL_OK : SPDL_E_NOMEM;
}

SPDL__PRIVATE spdl_result spdl__node_build(spdl_pipeline *p, spdl__node *node) {
    spdl_result result = spdl__edge_build(p, node);
    int i;
    if (result == SPDL_OK) result = spdl__parked_build(p, node);
    if (result == SPDL_OK) result = spdl__window_build(p, node);
    if (result != SPDL_OK) return result;
    node->counters = (spdl__counters *)spdl__alloc_zeroed(
        &p->allocator, (size_t)p->workers + 1, sizeof(*node->counters), SPDL_CACHE_LINE);
    if (node->counters == NULL) return SPDL_E_NOMEM;
    /* not the first calls, as somebody waits for those; and a deferred one ends on no thread that
       could be measured */
    for (i = 0; i <= p->workers; ++i)
        node->counters[i].meter_due = node->row.deferred ? INT64_MAX : 1;
    return spdl__node_makes_batches(node) ? spdl__batches_build(p, node) : SPDL_OK;
}

SPDL__PRIVATE spdl_result spdl__hooks_build(spdl_pipeline *p) {
    if (!p->has_hooks) {
        p->open = 1;
        return SPDL_OK;
    }
    p->local = (void **)spdl__alloc_zeroed(&p->allocator, (size_t)p->count * (size_t)p->workers,
                                           sizeof(*p->local), sizeof(void *));
    p->inits = (uint8_t *)spdl__alloc_zeroed(&p->allocator, (size_t)p->workers, 1, sizeof(void *));
    return p->local != NULL && p->inits != NULL ? SPDL_OK : SPDL_E_NOMEM;
}

SPDL__PRIVATE spdl_result spdl__tasks_build(spdl_pipeline *p) {
    const size_t workers = (size_t)p->workers;
    int i;
    p->task = (spdl_task *)spdl__alloc_zeroed(&p->allocator, workers, sizeof(*p->task),
                                              SPDL_CACHE_LINE);
    p->split = (spdl__batch **)spdl__alloc_zeroed(&p->allocator, workers * SPDL_MAX_STAGES,
                                                  sizeof(*p->split), sizeof(void *));
    if (p->task == NULL || p->split == NULL) return SPDL_E_NOMEM;
    for (i = 0; i < p->workers; ++i) {
        p->task[i].pipeline = p;
        p->task[i].worker = i;
    }
    return SPDL_OK;
}

/* The first crew is the pool, or the trainer; each row with threads of its own has another. */
SPDL__PRIVATE spdl_result spdl__crews_plan(spdl_pipeline *p, const spdl__plan *plan) {
    const spdl_pipeline_desc *desc = plan->desc;
    int i;
    p->crews = 1;
    for (i = 0; i < p->count; ++i) p->crews += plan->rows[i].threads > 0;
    p->crews += desc->workers > 0 && desc->policy.polite;
    p->crew = (spdl__crew *)spdl__alloc_zeroed(&p->allocator, (size_t)p->crews, sizeof(*p->crew),
                                               SPDL_CACHE_LINE);
    if (p->crew == NULL) return SPDL_E_NOMEM;
    p->crew[0].pool = desc->pool;
    p->workers = desc->pool ? spdl_pool_workers(desc->pool) : desc->workers ? desc->workers : 1;
    p->crew[0].workers = p->workers;
    p->threaded = desc->pool != NULL || desc->workers > 0 || p->crews > 1;
    p->crews = 1;
    for (i = 0; i < p->count; ++i) {
        spdl__crew *crew = plan->rows[i].threads > 0 ? &p->crew[p->crews++] : &p->crew[0];
        crew->rows |= (uint32_t)1 << i;
        if (crew == &p->crew[0]) continue;
        crew->first = p->workers;
        crew->workers = plan->rows[i].threads;
        p->workers += crew->workers;
    }
    if (desc->workers > 0 && desc->policy.polite) {
        p->rescue = &p->crew[p->crews++];
        p->rescue->rows = p->crew[0].rows;
        p->rescue->first = p->workers;
        p->rescue->workers = desc->workers;
        p->workers += desc->workers;
    }
    for (i = 0; i < p->crews; ++i) p->crew[i].pipeline = p;
    return SPDL_OK;
}

/* The row that reads node `i` writes an edge of it, maybe in the place of a path. */
SPDL__PRIVATE void spdl__rows_beside(spdl_pipeline *p, const spdl__node *edge, int reader) {
    const int writer = edge->row.kind == SPDL_KIND_PATH ? edge->before->index : edge->index;
    p->node[writer].beside |= (uint32_t)1 << reader;
    p->node[reader].beside |= (uint32_t)1 << writer;
}

/* Who is whose neighbour, and who runs what. With a merge and several crews a row far away may be
   the last to come to rest, which is what a merge in turn may wait for; and a polite worker whose
   turn is over looks for nothing itself. */
SPDL__PRIVATE void spdl__rows_connect(spdl_pipeline *p) {
    bool merges = false;
    int i, k;
    for (i = 0; i < p->count; ++i) {
        spdl__node *node = &p->node[i];
        for (k = p->crews - 1; k >= 0; --k)
            if (p->crew[k].rows >> i & 1) node->crew = &p->crew[k];
        if (node->row.kind != SPDL_KIND_PATH && node->before != NULL)
            spdl__rows_beside(p, node->before, i);
        for (k = 0; node->row.kind == SPDL_KIND_MERGE && k < node->paths; ++k)
            spdl__rows_beside(p, &p->node[node->path[k]], i);
        merges = merges || node->row.kind == SPDL_KIND_MERGE;
        node->at_end = node == p->last || (p->feed != NULL && node == p->feed + 1);
    }
    for (i = 0; (p->rescue != NULL || (merges && p->crews > 1)) && i < p->count; ++i)
        p->node[i].beside = UINT32_MAX;
}

/* Everything but the threads. On failure spdl__pipeline_release frees what is there. */
SPDL__PRIVATE spdl_result spdl__pipeline_build(spdl_pipeline *p, const spdl__plan *plan) {
    spdl_result result = spdl__crews_plan(p, plan);
    int i;
    if (result != SPDL_OK) return result;
    p->node = (spdl__node *)spdl__alloc_zeroed(&p->allocator, (size_t)p->count, sizeof(*p->node),
                                               SPDL_CACHE_LINE);
    if (p->node == NULL) return SPDL_E_NOMEM;
    for (i = 0; i < p->count; ++i) {
        spdl__node_defaults(p, &p->node[i], plan, i);
        if (spdl__node_makes_batches(&p->node[i]) && p->node[i].batch_size == 0)
            return spdl__row_error(plan, i, "merge_order is SPDL_MERGE_BATCHES, but there is no "
                                            "SPDL_BATCH above whose batches it could join");
    }
    for (i = 0; i < p->count && result == SPDL_OK; ++i) result = spdl__node_build(p, &p->node[i]);
    if (result == SPDL_OK) result = spdl__tasks_build(p);
    if (result == SPDL_OK) result = spdl__tuner_build(p, plan->desc);
    if (result != SPDL_OK) return result;
    p->last = &p->node[p->count - 1];
    p->sink = &p->last->out;
    spdl__rows_connect(p);
    return spdl__hooks_build(p);
}

SPDL__PRIVATE spdl_result spdl__crew_hire(spdl__crew *crew, const spdl_pipeline_desc *desc,
                                          const char *name) {
    spdl_pool_desc pool;
    spdl_result result;
    memset(&pool, 0, sizeof(pool));
    pool.workers = crew->workers;
    pool.name = name;
    pool.policy = desc->policy;
    if (crew == crew->pipeline->rescue) {
        pool.policy.polite = false;
        pool.policy.nice = 0;
        pool.policy.sched = SPDL_SCHED_DEFAULT;
    }
    pool.stack_bytes = desc->stack_bytes;
    pool.queue_size = 1;
    pool.allocator = desc->allocator;
    pool.logger = desc->logger;
    pool.error = desc->error;
    result = spdl_pool_create(&crew->pool, &pool);
    crew->own_pool = result == SPDL_OK;
    return result;
}

/* The pools that are the pipeline's own. */
SPDL__PRIVATE spdl_result spdl__crews_hire(spdl_pipeline *p, const spdl_pipeline_desc *desc) {
    spdl_result result = SPDL_OK;
    int i, row = 0;
    if (desc->workers > 0) result = spdl__crew_hire(&p->crew[0], desc, desc->name);
    for (i = 1; i < p->crews && result == SPDL_OK; ++i) {
        while (&p->crew[i] != p->rescue && (p->crew[i].rows >> row & 1) == 0) ++row;
        result = spdl__crew_hire(&p->crew[i], desc,
                                 &p->crew[i] == p->rescue ? desc->name : p->node[row].name);
    }
    return result;
}

static const uint32_t spdl__always = 1;

/* The clock starts, every edge is empty and every reader but the trainer hungry. */
SPDL__PRIVATE spdl_result spdl__pipeline_start(spdl_pipeline *p) {
    int i;
    p->process = spdl__process_id();
    p->start_ns = spdl_time_ns();
    if (p->tuner != NULL) p->tuner->since = p->start_ns;
    /* before the first call: one word that says whether anybody may have to be woken */
    p->sleepers = p->crews > 1 || (p->feed != NULL && p->crew[0].pool == NULL) ? &spdl__always
                  : p->crew[0].pool != NULL ? &p->crew[0].pool->sleepers
                                            : &p->waiting;
    for (i = 0; i < p->count; ++i) {
        p->node[i].out.gap_since = p->start_ns;
        if (i + 1 < p->count) p->node[i].out.wait_since = p->start_ns;
    }
    for (i = 0; i < p->crews; ++i) {
        spdl__crew *crew = &p->crew[i];
        crew->client.step = spdl__crew_step;
        crew->client.runnable = spdl__crew_runnable;
        crew->client.self = crew;
        if (crew->pool == NULL) continue;
        crew->slot = spdl__pool_attach(crew->pool, &crew->client);
        if (crew->slot == NULL) return SPDL_E_LIMIT;
    }
    return SPDL_OK;
}

/* Allocates and starts; `p` is zeroed and has its allocator. */
SPDL__PRIVATE spdl_result spdl__pipeline_make(spdl_pipeline *p, const spdl__plan *plan) {
    const spdl_pipeline_desc *desc = plan->desc;
    spdl_result result;
    p->logger = desc->logger;
    p->count = plan->count - 1;
    spdl__error_clear(&p->error);
    result = spdl__pipeline_build(p, plan);
    if (result == SPDL_OK) result = spdl__trace_open(p, desc);
    if (result == SPDL_E_NOMEM)
        return spdl__error_set(desc->error, result, "spdl: pipeline: out of memory");
    if (result == SPDL_OK) result = spdl__crews_hire(p, desc);
    if (result == SPDL_OK) {
        result = spdl__pipeline_start(p);
        if (result == SPDL_E_LIMIT)
            spdl__error_set(desc->error, result,
                            "spdl: pipeline: the pool has %d pipelines already", SPDL__MAX_CLIENTS);
    }
    return result;
}

SPDL__PRIVATE bool spdl__pipeline_events(spdl_pipeline *p) {
    if (!spdl__event_init(&p->fed)) return false;
    if (!spdl__event_init(&p->quiet)) goto no_quiet;
    if (spdl__event_init(&p->room)) return true;
    spdl__event_fini(&p->quiet);
no_quiet:
    spdl__event_fini(&p->fed);
    return false;
}

SPDL__PRIVATE spdl_result spdl__pipeline_new(spdl_pipeline **pipeline, const spdl__plan *plan) {
    spdl_pipeline *p = (spdl_pipeline *)spdl__alloc_zeroed(&plan->desc->allocator, 1, sizeof(*p),
                                                           SPDL_CACHE_LINE);
    spdl_result result = SPDL_E_NOMEM;
    if (p == NULL)
        return spdl__error_set(plan->desc->error, result, "spdl: pipeline: out of memory");
    p->allocator = plan->desc->allocator;
    if (!spdl__pipeline_events(p)) {
        spdl__free(&plan->desc->allocator, p, sizeof(*p));
        return result;
    }
    *pipeline = p; /* before the first call: a stage may use it */
    result = spdl__pipeline_make(p, plan);
    if (result == SPDL_OK) return result;
    *pipeline = NULL;
    spdl__pipeline_release(p);
    return result;
}

SPDL_API spdl_result spdl_pipeline_create(spdl_pipeline **pipeline, const spdl_pipeline_desc *desc,
                                          const spdl_stage *stages, size_t stage_count) {
    spdl_pipeline_desc told;
    spdl_error error;
    spdl__plan plan;
    spdl_result result;
    if (pipeline == NULL) return SPDL_E_INVALID;
    *pipeline = NULL;
    if (desc != NULL)
        told = *desc;
    else
        memset(&told, 0, sizeof(told));
    if (told.error == NULL) told.error = &error; /* the log needs a text in any case */
    spdl__error_clear(told.error);
    memset(&plan, 0, sizeof(plan));
    plan.desc = &told;
    plan.rows = stages;
    plan.count = stage_count > INT16_MAX ? INT16_MAX : (int)stage_count;
    result = spdl__check_plan(&plan);
    if (result == SPDL_OK) result = spdl__pipeline_new(pipeline, &plan);
    if (result == SPDL_OK) spdl__report_begin(*pipeline, &told);
    if (result != SPDL_OK) spdl__log(&told.logger, SPDL_LOG_ERROR, told.error->text);
    return result;
}

/* ============================================================================================= */
/* >>stats-impl
   Workers count into cells of their own, so counting needs no lock and no shared line; a snapshot
   adds the cells up. Waits are kept as sums of closed gaps and the start of the open one. Any
   thread may take a snapshot; nothing is owned. */

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

/* The smallest time that falls into a bucket. */
SPDL__PRIVATE uint64_t spdl__bucket_start(unsigned bucket) {
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

/* How much a counter has grown. */
SPDL__PRIVATE uint64_t spdl__grown(uint64_t from, uint64_t to) { return to > from ? to - from : 0; }

/* What was counted after `from`, which becomes the difference. The maximum of the difference is not
   known: the end of its last bucket stands for it. */
SPDL__PRIVATE void spdl__histogram_since(spdl_histogram *from, const spdl_histogram *to) {
    unsigned i;
    from->sum_ns = spdl__grown(from->sum_ns, to->sum_ns);
    from->count = from->max_ns = 0;
    for (i = 0; i < SPDL__BUCKETS; ++i) {
        from->bucket[i] = spdl__grown(from->bucket[i], to->bucket[i]);
        from->count += from->bucket[i];
        if (from->bucket[i] > 0) from->max_ns = spdl__min(to->max_ns, spdl__bucket_start(i + 1));
    }
}

/* --- counting, on the side of the pipeline --- */

/* The trainer, just before the first item is counted. */
SPDL__PRIVATE void spdl__first_item(spdl_pipeline *p, uint64_t now) {
    spdl__store_relaxed(&p->first_wait_ns, spdl__gap_sum(&p->wait_since, &p->wait_ns, now));
    spdl__store_relaxed(&p->first_item_ns, now - p->start_ns);
}

/* --- snapshots --- */

SPDL__PRIVATE void spdl__counters_merge(spdl_histogram *times, const spdl__counters *counters) {
    unsigned i;
    times->sum_ns += spdl__load_relaxed(&counters->timed_ns);
    times->max_ns = spdl__max(times->max_ns, spdl__load_relaxed(&counters->max_ns));
    for (i = 0; i < SPDL__BUCKETS; ++i) {
        const uint64_t calls = spdl__load_relaxed(&counters->bucket[i]);
        times->bucket[i] += calls;
        times->count += calls;
    }
}

SPDL__PRIVATE void spdl__node_times(const spdl_pipeline *p, const spdl__node *node,
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

/* What follows from the times of the calls. */
SPDL__PRIVATE void spdl__stage_times(spdl_stage_stats *stats, const spdl_histogram *times) {
    stats->busy_ns = times->sum_ns;
    stats->mean_ns = times->count ? times->sum_ns / times->count : 0;
    stats->p50_ns = spdl_histogram_percentile(times, 0.50);
    stats->p90_ns = spdl_histogram_percentile(times, 0.90);
    stats->p99_ns = spdl_histogram_percentile(times, 0.99);
    stats->max_ns = times->max_ns;
}

SPDL__PRIVATE void spdl__stage_snapshot(const spdl_pipeline *p, const spdl__node *node,
                                        spdl_stage_stats *stats) {
    spdl_histogram times;
    uint64_t word;
    int i;
    memcpy(stats->name, node->name, sizeof(stats->name));
    stats->kind = node->row.kind;
    stats->concurrency = (int)spdl__load_relaxed32(&node->limit);
    word = spdl__load(node->word);
    stats->in_flight = (int)(word & SPDL__ACTIVE) - ((word & SPDL__HELD) != 0);
    if (stats->in_flight > stats->concurrency) stats->in_flight = stats->concurrency;
    stats->deferred = node->row.deferred;
    for (i = 0; i <= p->workers; ++i) {
        const spdl__counters *counters = &node->counters[i];
        stats->tasks += spdl__load_relaxed(&counters->tasks);
        stats->failures += spdl__load_relaxed(&counters->failures);
        stats->skips += spdl__load_relaxed(&counters->skips);
        stats->retries += spdl__load_relaxed(&counters->retries);
        stats->freed += spdl__load_relaxed(&counters->freed);
    }
    stats->exposed_ns = spdl__load_relaxed(&node->exposed_ns);
    stats->exposed_idle_ns = spdl__load_relaxed(&node->exposed_idle_ns);
    spdl__node_times(p, node, &times);
    spdl__stage_times(stats, &times);
    spdl__split_snapshot(p, node, stats);
}

/* A sum of closed gaps and the open one. The sum is read first: it pairs with gap_close, which ends
   a gap before it adds it, so that none is counted twice. */
SPDL__PRIVATE uint64_t spdl__gap_sum(const uint64_t *since, const uint64_t *sum, uint64_t now) {
    const uint64_t closed = spdl__load(sum);
    const uint64_t opened = spdl__load_relaxed(since);
    return closed + (opened != 0 && now > opened ? now - opened : 0);
}

SPDL__PRIVATE int spdl__edge_depth(const spdl__edge *edge, uint64_t head) {
    uint64_t ticket = head;
    int depth = 0;
    for (; ticket <= head + edge->mask && spdl__edge_ready(edge, ticket); ++ticket)
        if (!spdl__slot_hole(spdl__edge_slot(edge, ticket))) ++depth;
    return depth;
}

/* Finished items that are still waiting for a place in the buffer. */
SPDL__PRIVATE uint64_t spdl__edge_open_put_waits(const spdl__edge *edge, uint64_t head,
                                                 uint64_t now) {
    uint64_t ticket, waited = 0;
    for (ticket = head + edge->buffer_size; ticket <= head + edge->mask; ++ticket)
        if (spdl__edge_ready(edge, ticket) && !spdl__slot_hole(spdl__edge_slot(edge, ticket)))
            waited += spdl__slot_age(spdl__edge_slot(edge, ticket), now);
    return waited;
}

SPDL__PRIVATE void spdl__edge_waits(const spdl__edge *edge, uint64_t head, uint64_t now, bool ended,
                                    spdl_edge_stats *stats) {
    stats->put_wait_ns = spdl__load_relaxed(&edge->put_wait_ns);
    if (!ended) stats->put_wait_ns += spdl__edge_open_put_waits(edge, head, now);
    if (stats->depth > 0) { /* something is there: what looks open has just ended */
        stats->empty_ns = spdl__load_relaxed(&edge->empty_ns);
        stats->get_wait_ns = spdl__load_relaxed(&edge->get_wait_ns);
    } else {
        stats->empty_ns = spdl__gap_sum(&edge->gap_since, &edge->empty_ns, now);
        stats->get_wait_ns = spdl__gap_sum(&edge->wait_since, &edge->get_wait_ns, now);
    }
}

SPDL__PRIVATE void spdl__edge_snapshot(const spdl_pipeline *p, spdl__node *node, uint64_t now,
                                       spdl_edge_stats *stats) {
    spdl__edge *edge = &node->out;
    const uint64_t head = spdl__head(spdl__load(&edge->word));
    const uint64_t shift = spdl__load(&edge->shift); /* after head: no less than belongs to it */
    const uint64_t ended = spdl__load_relaxed(&edge->ended_ns);
    int64_t items;
    if (ended != 0) now = ended;
    stats->buffer_size = (int)edge->buffer_size;
    /* the reader may have gone on from `head`: what it took meanwhile still looks ready */
    stats->depth = (int)spdl__min((uint64_t)spdl__edge_depth(edge, head),
                                  edge->buffer_size + (uint64_t)node->row.max_concurrency);
    /* holes and marks may be counted before the head has moved past them */
    items = (int64_t)(head + shift - spdl__load_relaxed(&edge->marks));
    stats->items = spdl__lift(&edge->seen[5], items > 0 ? (uint64_t)items : 0);
    spdl__edge_waits(edge, head, now, ended != 0, stats);
    if (edge == p->sink) stats->get_wait_ns = spdl__gap_sum(&p->wait_since, &p->wait_ns, now);
    stats->elapsed_ns = spdl__lift(&edge->seen[0], now - p->start_ns);
    stats->put_wait_ns = spdl__lift(&edge->seen[1], stats->put_wait_ns);
    /* what was read later than the clock may have gone on */
    stats->get_wait_ns = spdl__lift(&edge->seen[2],
                                    spdl__min(stats->get_wait_ns, stats->elapsed_ns));
    stats->empty_ns = spdl__lift(&edge->seen[3],
                                 spdl__min(stats->empty_ns, stats->elapsed_ns));
    if (stats->elapsed_ns > 0)
        stats->readiness = 1.0 - (double)stats->empty_ns / (double)stats->elapsed_ns;
}

/* What the trainer did since the first item, when it was not waiting. */
SPDL__PRIVATE void spdl__trainer_snapshot(const spdl_pipeline *p, spdl_stats *stats) {
    const uint64_t first_wait = spdl__load_relaxed(&p->first_wait_ns);
    const uint64_t since = stats->elapsed_ns - spdl__min(stats->first_item_ns, stats->elapsed_ns);
    const uint64_t waited = stats->wait_ns - spdl__min(first_wait, stats->wait_ns);
    if (stats->delivered == 0 || stats->first_item_ns == 0) return;
    stats->step_ns = since - spdl__min(waited, since);
    stats->step_mean_ns = stats->step_ns / stats->delivered;
}

SPDL_API void spdl_pipeline_stats(const spdl_pipeline *pipeline, spdl_stats *stats) {
    spdl_pipeline *p = SPDL__CAST(spdl_pipeline *, SPDL__UNCONST(pipeline)); /* what it has seen */
    const uint64_t ended = spdl__load_relaxed(&p->ended_ns);
    const uint64_t now = ended ? ended : spdl_time_ns();
    int i;
    /* who asks whether the buffer is full sees to it that it will be, see sink_hint */
    spdl__full_barrier();
    if (!ended) spdl__rows_hint(p, (uint32_t)1 << p->last->index);
    if (spdl__load_relaxed(&p->blame_since) != 0) spdl__blame_mark(p, false);
    memset(stats, 0, sizeof(*stats));
    stats->elapsed_ns = spdl__lift(&p->sink->seen[4], now - p->start_ns);
    stats->workers = p->threaded ? p->workers : 0;
    if (p->rescue != NULL) stats->workers -= p->rescue->workers;
    stats->stage_count = p->count;
    stats->delivered = spdl__load_relaxed(&p->delivered);
    stats->first_item_ns = spdl__load_relaxed(&p->first_item_ns);
    for (i = 0; i < p->count; ++i) {
        spdl__stage_snapshot(p, &p->node[i], &stats->stage[i]);
        spdl__edge_snapshot(p, &p->node[i], now, &stats->edge[i]);
    }
    stats->wait_ns = stats->edge[p->count - 1].get_wait_ns;
    stats->ready_ns = spdl__load_relaxed(&p->ready_ns);
    stats->workers_runnable_ns = spdl__workers_snapshot(p, stats);
    spdl__trainer_snapshot(p, stats);
}

/* --- the process --- */

/* Linux tells most of it in files; elsewhere getrusage has to do. */

/* The text of a small file; what does not fit is left out. False when there is none. */
SPDL__PRIVATE bool spdl__file_text(const char *path, char *text, size_t bytes) {
    const int file = open(path, O_RDONLY | SPDL__O_CLOEXEC);
    ssize_t length;
    if (file < 0) return false;
    length = read(file, text, bytes - 1);
    (void)close(file);
    text[length > 0 ? length : 0] = '\0';
    return length > 0;
}

/* The cores that the quota in folder `at` allows, or `most`. Version 2 of cgroups has "quota
   period" or "max period" in one file, version 1 two files, and -1 for no quota. */
SPDL__PRIVATE double spdl__quota_at(const char *at, double most) {
    static const char *const files[] = { "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us" };
    char path[640], text[3][64];
    double quota, period = 0;
    char *end;
    int i;
    for (i = 0; i < 3; ++i) {
        (void)snprintf(path, sizeof(path), "%s/%s", at, files[i]);
        if (!spdl__file_text(path, text[i], sizeof(text[i]))) text[i][0] = '\0';
    }
    quota = strtod(text[0], &end);
    period = strtod(end, NULL); /* of "max" as well: no number is 0 */
    if (text[0][0] == '\0') {
        quota = strtod(text[1], NULL);
        period = strtod(text[2], NULL);
    }
    return quota > 0 && period > 0 && quota / period < most ? quota / period : most;
}

/* The same for a cgroup and all above it: each may have a quota. `path` is cut on the way up. */
SPDL__PRIVATE double spdl__quota_above(const char *root, char *path, double most) {
    char at[576];
    for (;;) {
        char *slash = strrchr(path, '/');
        (void)snprintf(at, sizeof(at), "%s%s", root, path);
        most = spdl__quota_at(at, most);
        if (slash == NULL) return most;
        *slash = '\0';
    }
}

/* `self` has lines "number:controllers:path", and no controllers in version 2. Inside of a
   container the path may be one of the host: the way up ends at the container's own root. */
SPDL__PRIVATE double spdl__quota(const char *root, const char *self, double most) {
    char text[2048], top[256], path[288];
    char *line = text, *next;
    if (!spdl__file_text(self, text, sizeof(text))) return most;
    for (; *line != '\0'; line = next) {
        char *names = strchr(line, ':'), *where = names ? strchr(names + 1, ':') : NULL;
        size_t length = strcspn(line, "\n");
        next = line + length + (line[length] == '\n');
        line[length] = '\0';
        if (where == NULL || where > line + length) continue;
        *where++ = '\0';
        if (*++names != '\0' && strncmp(names, "cpu", 3) != 0 && strstr(names, ",cpu") == NULL)
            continue;
        (void)snprintf(top, sizeof(top), "%s%s%.100s", root, *names ? "/" : "", names);
        (void)snprintf(path, sizeof(path), "%.250s", strcmp(where, "/") == 0 ? "" : where);
        most = spdl__quota_above(top, path, most);
    }
    return most;
}

SPDL__PRIVATE uint64_t spdl__timeval_ns(const struct timeval *time) {
    return (uint64_t)time->tv_sec * 1000000000u + (uint64_t)time->tv_usec * 1000u;
}

/* What all cores have done so far that was not waiting, in nanoseconds: the sum of the columns of
   "cpu  user nice system idle iowait irq softirq steal ..." without the two in the middle. */
SPDL__PRIVATE uint64_t spdl__machine_busy(const char *stat) {
    const long tick = sysconf(_SC_CLK_TCK);
    char text[256], *at = text;
    uint64_t busy = 0;
    int column;
    if (!spdl__file_text(stat, text, sizeof(text)) || strncmp(text, "cpu ", 4) != 0) return 0;
    for (column = 0, at += 4; column < 8; ++column) {
        const uint64_t ticks = strtoull(at, &at, 10);
        if (column != 3 && column != 4) busy += ticks;
    }
    return busy * (1000000000u / (uint64_t)(tick > 0 ? tick : 100));
}

SPDL__PRIVATE uint64_t spdl__resident(const char *statm) {
    char text[128], *resident;
    if (!spdl__file_text(statm, text, sizeof(text))) return 0;
    (void)strtoull(text, &resident, 10);
    return strtoull(resident, NULL, 10) * (uint64_t)sysconf(_SC_PAGESIZE);
}

SPDL_API void spdl_process_read(spdl_process_stats *stats) {
    struct rusage used;
    uint64_t busy;
    memset(stats, 0, sizeof(*stats));
    stats->cores_allowed = (double)spdl__cpu_count();
    stats->cores_allowed = spdl__quota("/sys/fs/cgroup", "/proc/self/cgroup", stats->cores_allowed);
    stats->resident_bytes = spdl__resident("/proc/self/statm");
    busy = spdl__machine_busy("/proc/stat");
    if (getrusage(RUSAGE_SELF, &used) == 0) {
        stats->cpu_ns = spdl__timeval_ns(&used.ru_utime) + spdl__timeval_ns(&used.ru_stime);
        stats->minor_faults = (uint64_t)used.ru_minflt;
        stats->major_faults = (uint64_t)used.ru_majflt;
    }
    stats->others_ns = busy - spdl__min(busy, stats->cpu_ns);
    stats->time_ns = spdl_time_ns();
}

/* When this process was started, or 0: its number may come again, but not with this one. It is the
   22nd field of what Linux tells; the second one is a name in brackets. */
SPDL__PRIVATE spdl__llu spdl__process_started(void) {
    char stat[1024], *at = NULL;
    int field;
    if (spdl__file_text("/proc/self/stat", stat, sizeof(stat))) at = strrchr(stat, ')');
    for (field = 2; at != NULL && field < 22; ++field) at = strchr(at + 1, ' ');
    return at != NULL ? strtoull(at, NULL, 10) : 0;
}

/* --- text --- */

typedef struct spdl__text {
    char *buffer;
    size_t bytes;
    size_t length; /* of the whole text, also the part that does not fit */
    bool colour;
} spdl__text;

SPDL__PRIVATE void spdl__text_add(spdl__text *text, const char *format, ...) SPDL__PRINTF(2, 3);
SPDL__PRIVATE void spdl__text_add(spdl__text *text, const char *format, ...) {
    const size_t left = text->length < text->bytes ? text->bytes - text->length : 0;
    char none[1];
    va_list args;
    int length;
    va_start(args, format);
    length = vsnprintf(left ? text->buffer + text->length : none, left ? left : 1, format, args);
    va_end(args);
    if (length > 0) text->length += (size_t)length;
}

SPDL__PRIVATE spdl__text spdl__text_start(char *buffer, size_t bytes) {
    spdl__text text;
    text.buffer = buffer;
    text.bytes = bytes;
    text.length = 0;
    text.colour = false;
    if (bytes > 0) buffer[0] = '\0';
    return text;
}

/* Numbers of SGR, "1" is bold; "0" ends it. */
SPDL__PRIVATE void spdl__text_style(spdl__text *text, const char *style) {
    if (text->colour) spdl__text_add(text, "\033[%sm", style);
}

/* The bytes of the UTF-8 character at `at`; 0 when it is none (RFC 3629). */
SPDL__PRIVATE int spdl__utf8(const char *at) {
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

/* A name in a column: cut or filled up to `width` characters, or as it is when that is -1. What a
   terminal would take for an order is a question mark. */
SPDL__PRIVATE void spdl__text_name(spdl__text *text, const char *name, int width) {
    int left = width;
    for (; *name != '\0' && left != 0; --left) {
        const int length = spdl__utf8(name);
        const bool plain = length > 0 && (unsigned char)*name >= 0x20 && *name != 0x7f &&
                           !(length == 2 && (unsigned char)name[0] == 0xc2 &&
                             (unsigned char)name[1] < 0xa0);
        if (plain)
            spdl__text_add(text, "%.*s", length, name);
        else
            spdl__text_add(text, "?");
        name += length > 0 ? length : 1;
    }
    if (left > 0) spdl__text_add(text, "%*s", left, "");
}

typedef struct spdl__cell {
    char text[24];
} spdl__cell;

/* A number below 1000 in three digits. */
SPDL__PRIVATE int spdl__decimals(double value) { return value < 9.995 ? 2 : value < 99.95 ? 1 : 0; }

/* A duration in three digits and a unit. */
SPDL__PRIVATE const char *spdl__duration(spdl__cell *cell, double ns) {
    static const char *const units[] = { "ns", "us", "ms", "s" };
    int unit = 0;
    while (ns >= 999.5 && unit < 3) {
        ns /= 1000;
        ++unit;
    }
    (void)snprintf(cell->text, sizeof(cell->text), "%.*f %s", unit > 0 ? spdl__decimals(ns) : 0,
                   ns, units[unit]);
    return cell->text;
}

/* So many in so long, per second, in three digits. */
SPDL__PRIVATE const char *spdl__rate(spdl__cell *cell, uint64_t items, uint64_t ns) {
    static const char *const units[] = { "", "k", "M", "G" };
    double rate = ns > 0 ? (double)items * 1e9 / (double)ns : 0;
    int unit = 0;
    while (rate >= 999.5 && unit < 3) {
        rate /= 1000;
        ++unit;
    }
    (void)snprintf(cell->text, sizeof(cell->text), "%.*f%s/s",
                   rate > 0 ? spdl__decimals(rate) : 0, rate, units[unit]);
    return cell->text;
}

/* Hours, minutes and seconds as 1:02:03, but less than a minute as 12.3 s. */
SPDL__PRIVATE const char *spdl__clock(spdl__cell *cell, double seconds) {
    const uint64_t all = seconds < 1e9 ? (uint64_t)(seconds + 0.5) : 1000000000;
    if (seconds < 59.95)
        (void)snprintf(cell->text, sizeof(cell->text), "%.1f s", seconds);
    else if (all < 3600)
        (void)snprintf(cell->text, sizeof(cell->text), "%u:%02u", (unsigned)(all / 60),
                       (unsigned)(all % 60));
    else
        (void)snprintf(cell->text, sizeof(cell->text), "%u:%02u:%02u", (unsigned)(all / 3600),
                       (unsigned)(all / 60 % 60), (unsigned)(all % 60));
    return cell->text;
}

SPDL__PRIVATE double spdl__share(uint64_t part, uint64_t whole) {
    return whole > 0 ? (double)part / (double)whole : 0;
}

/* --- the verdict --- */

/* Threads that run stages: with workers = 0 the trainer's. */
SPDL__PRIVATE int spdl__stats_threads(const spdl_stats *stats) {
    return stats->workers > 0 ? stats->workers : 1;
}

/* How busy a stage was: 1 when all the calls it may have were running all the time. */
SPDL__PRIVATE double spdl__stage_load(const spdl_stats *stats, int i) {
    const int threads = spdl__stats_threads(stats), bound = stats->stage[i].concurrency;
    return spdl__share(stats->stage[i].busy_ns, stats->elapsed_ns) /
           (bound < threads || stats->stage[i].deferred ? bound : threads);
}

SPDL__PRIVATE int spdl__stats_busiest(const spdl_stats *stats) {
    int i, busiest = 0;
    for (i = 1; i < stats->stage_count; ++i)
        if (spdl__stage_load(stats, i) > spdl__stage_load(stats, busiest)) busiest = i;
    return busiest;
}

/* The share of time the trainer waited, the wait for the first item left out. */
SPDL__PRIVATE double spdl__stats_waiting(const spdl_stats *stats) {
    const uint64_t first = spdl__min(stats->first_item_ns, stats->wait_ns);
    return spdl__share(stats->wait_ns - first,
                       stats->elapsed_ns - spdl__min(stats->first_item_ns, stats->elapsed_ns));
}

#define SPDL__WAITING_TOLD 0.05 /* a trainer that waits less is told to be fed well */
#define SPDL__BUSY_TOLD 0.5     /* a stage that is busy less is not told to be the limit */

/* The row of the stage that holds the trainer back, or -1 when nothing does. */
SPDL__PRIVATE int spdl__stats_suspect(const spdl_stats *stats) {
    if (stats->delivered == 0 || spdl__stats_waiting(stats) < SPDL__WAITING_TOLD) return -1;
    return spdl__stats_busiest(stats);
}

/* The same, but only if it is busy enough to be marked as the limit. */
SPDL__PRIVATE int spdl__stats_limit(const spdl_stats *stats) {
    const int suspect = spdl__stats_suspect(stats);
    return suspect >= 0 && spdl__stage_load(stats, suspect) >= SPDL__BUSY_TOLD ? suspect : -1;
}

SPDL__PRIVATE void spdl__verdict(spdl__text *text, const spdl_stats *stats) {
    const double waiting = 100 * spdl__stats_waiting(stats);
    const int limit = spdl__stats_suspect(stats);
    uint64_t busy = 0;
    int i;
    for (i = 0; i < stats->stage_count; ++i)
        busy += stats->stage[i].deferred ? 0 : stats->stage[i].busy_ns;
    if (stats->delivered == 0) {
        spdl__text_add(text, "Nothing has been delivered yet.");
    } else if (limit < 0) {
        spdl__text_add(text, "The stages waited for the trainer: it spent %.1f %% of its time "
                             "waiting for data.", waiting);
    } else if (spdl__share(busy, stats->elapsed_ns) > 0.9 * spdl__stats_threads(stats)) {
        spdl__text_add(text, "The trainer waited %.0f %% of its time for data: ", waiting);
        if (stats->workers > 1)
            spdl__text_add(text, "all %d workers were busy", stats->workers);
        else
            spdl__text_add(text, "the only %s was busy", stats->workers ? "worker" : "thread");
        spdl__text_add(text, ", most of all with stage %d '", limit);
        spdl__text_name(text, stats->stage[limit].name, -1);
        spdl__text_add(text, "'.");
    } else if (spdl__stage_load(stats, limit) < SPDL__BUSY_TOLD) {
        spdl__text_add(text, "The trainer waited %.0f %% of its time for data, though no stage was "
                             "busy for more than %.0f %%: the workers lacked processor time, or "
                             "buffer_size is small for items this short.", waiting,
                       100 * spdl__stage_load(stats, limit));
    } else {
        spdl__text_add(text, "The trainer waited %.0f %% of its time for data: stage %d '", waiting,
                       limit);
        spdl__text_name(text, stats->stage[limit].name, -1);
        spdl__text_add(text, "' is the busiest, %.0f %% of what its concurrency of %d allows.",
                       100 * spdl__stage_load(stats, limit), stats->stage[limit].concurrency);
    }
}

/* --- the table --- */

SPDL__PRIVATE double spdl__per_item(uint64_t ns, uint64_t items) {
    return items > 0 ? (double)ns / (double)items : (double)ns;
}

/* What is in a column, and where it is found. */
typedef enum spdl__content {
    SPDL__STAGE_NAME,
    SPDL__STAGE_CALLS, /* running now, and how many may */
    SPDL__STAGE_COUNT,
    SPDL__STAGE_RATE,  /* a count per second */
    SPDL__STAGE_TIME,
    SPDL__STAGE_SHARE, /* a time, as a share of busy_ns */
    SPDL__STAGE_LOAD,
    SPDL__BAR,
    SPDL__EDGE_DEPTH,
    SPDL__EDGE_WAIT,   /* a time, per item */
    SPDL__EDGE_READY
} spdl__content;

typedef struct spdl__column {
    const char *title;
    int width;
    spdl__content content;
    size_t at;
    bool optional; /* left out while it is 0 for every stage */
} spdl__column;

#define SPDL__STAGE_AT(field) offsetof(spdl_stage_stats, field)
#define SPDL__EDGE_AT(field) offsetof(spdl_edge_stats, field)

/* All columns there are, from left to right. */
static const spdl__column spdl__columns[] = {
    { "stage", 16, SPDL__STAGE_NAME, 0, false },
    { "calls", 5, SPDL__STAGE_CALLS, 0, false },
    { "tasks", 9, SPDL__STAGE_COUNT, SPDL__STAGE_AT(tasks), false },
    { "rate", 7, SPDL__STAGE_RATE, SPDL__STAGE_AT(tasks), false },
    { "failed", 6, SPDL__STAGE_COUNT, SPDL__STAGE_AT(failures), true },
    { "skip", 6, SPDL__STAGE_COUNT, SPDL__STAGE_AT(skips), true },
    { "retry", 6, SPDL__STAGE_COUNT, SPDL__STAGE_AT(retries), true },
    { "freed", 6, SPDL__STAGE_COUNT, SPDL__STAGE_AT(freed), true },
    { "mean", 7, SPDL__STAGE_TIME, SPDL__STAGE_AT(mean_ns), false },
    { "p50", 7, SPDL__STAGE_TIME, SPDL__STAGE_AT(p50_ns), false },
    { "p90", 7, SPDL__STAGE_TIME, SPDL__STAGE_AT(p90_ns), false },
    { "p99", 7, SPDL__STAGE_TIME, SPDL__STAGE_AT(p99_ns), false },
    { "max", 7, SPDL__STAGE_TIME, SPDL__STAGE_AT(max_ns), false },
    { "busy", 5, SPDL__STAGE_LOAD, 0, false },
    { "cpu", 4, SPDL__STAGE_SHARE, SPDL__STAGE_AT(cpu_ns), true },
    { "runq", 4, SPDL__STAGE_SHARE, SPDL__STAGE_AT(runnable_ns), true },
    { "block", 5, SPDL__STAGE_SHARE, SPDL__STAGE_AT(blocked_ns), true },
    { "|", 1, SPDL__BAR, 0, false },
    { "waiting", 7, SPDL__EDGE_DEPTH, 0, false },
    { "put wait", 8, SPDL__EDGE_WAIT, SPDL__EDGE_AT(put_wait_ns), false },
    { "get wait", 8, SPDL__EDGE_WAIT, SPDL__EDGE_AT(get_wait_ns), false },
    { "ready", 6, SPDL__EDGE_READY, 0, false },
};
#define SPDL__COLUMNS (sizeof(spdl__columns) / sizeof(spdl__columns[0]))

/* The counter at an offset of a struct. */
SPDL__PRIVATE uint64_t spdl__field_at(const void *stats, size_t at) {
    uint64_t value;
    memcpy(&value, (const char *)stats + at, sizeof(value));
    return value;
}

SPDL__PRIVATE bool spdl__column_shown(const spdl__column *column, const spdl_stats *stats) {
    int i;
    if (!column->optional) return true;
    for (i = 0; i < stats->stage_count; ++i)
        if (spdl__field_at(&stats->stage[i], column->at) != 0) return true;
    return false;
}

SPDL__PRIVATE const char *spdl__stage_cell(spdl__cell *cell, const spdl_stats *stats, int i,
                                           const spdl__column *column) {
    const spdl_stage_stats *stage = &stats->stage[i];
    const bool timed = stage->kind == SPDL_KIND_SOURCE || stage->kind == SPDL_KIND_PIPE ||
                       stage->kind == SPDL_KIND_BRANCH;
    const uint64_t value = spdl__field_at(stage, column->at);
    if (column->content == SPDL__STAGE_RATE) return spdl__rate(cell, value, stats->elapsed_ns);
    if (column->content == SPDL__STAGE_COUNT) {
        (void)snprintf(cell->text, sizeof(cell->text), "%llu", (spdl__llu)value);
        return cell->text;
    }
    if (column->content == SPDL__STAGE_CALLS) {
        (void)snprintf(cell->text, sizeof(cell->text), "%d/%d", stage->in_flight,
                       stage->concurrency);
        return cell->text;
    }
    if (!timed) return "-";
    if (column->content == SPDL__STAGE_TIME) return spdl__duration(cell, (double)value);
    if (column->content == SPDL__STAGE_SHARE) {
        (void)snprintf(cell->text, sizeof(cell->text), "%.0f%%",
                       100 * spdl__share(value, stage->busy_ns));
        return cell->text;
    }
    (void)snprintf(cell->text, sizeof(cell->text), "%.0f%%", 100 * spdl__stage_load(stats, i));
    return cell->text;
}

SPDL__PRIVATE const char *spdl__edge_cell(spdl__cell *cell, const spdl_edge_stats *edge,
                                          const spdl__column *column) {
    const uint64_t value = spdl__field_at(edge, column->at);
    if (column->content == SPDL__EDGE_WAIT)
        return spdl__duration(cell, spdl__per_item(value, edge->items));
    if (column->content == SPDL__EDGE_READY)
        (void)snprintf(cell->text, sizeof(cell->text), "%.1f%%", 100 * edge->readiness);
    else
        (void)snprintf(cell->text, sizeof(cell->text), "%d/%d", edge->depth, edge->buffer_size);
    return cell->text;
}

SPDL__PRIVATE void spdl__stats_row(spdl__text *text, const spdl_stats *stats, int i, bool limit) {
    spdl__cell cell;
    size_t k;
    spdl__text_style(text, limit ? "1;33" : "0");
    spdl__text_add(text, limit ? ">" : " ");
    for (k = 0; k < SPDL__COLUMNS; ++k) {
        const spdl__column *column = &spdl__columns[k];
        if (!spdl__column_shown(column, stats)) continue;
        spdl__text_add(text, " ");
        if (column->content == SPDL__STAGE_NAME)
            spdl__text_name(text, stats->stage[i].name, column->width);
        else if (column->content == SPDL__BAR)
            spdl__text_add(text, "|");
        else
            spdl__text_add(text, "%*s", column->width,
                           column->content < SPDL__BAR
                               ? spdl__stage_cell(&cell, stats, i, column)
                               : spdl__edge_cell(&cell, &stats->edge[i], column));
    }
    spdl__text_style(text, "0");
    spdl__text_add(text, "\n");
}

SPDL__PRIVATE void spdl__stats_rows(spdl__text *text, const spdl_stats *stats) {
    const int limit = spdl__stats_limit(stats);
    size_t k;
    int i;
    spdl__text_style(text, "2");
    spdl__text_add(text, " ");
    for (k = 0; k < SPDL__COLUMNS; ++k) {
        const spdl__column *column = &spdl__columns[k];
        if (!spdl__column_shown(column, stats)) continue;
        spdl__text_add(text, " %*s", k > 0 ? column->width : -column->width, column->title);
    }
    spdl__text_add(text, "\n");
    for (i = 0; i < stats->stage_count; ++i) spdl__stats_row(text, stats, i, i == limit);
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
    spdl__text_add(&text,
                   "\n%llu items in %s, the first after %s, %s, a step of %s, %d worker%s\n\n",
                   (spdl__llu)stats->delivered,
                   spdl__duration(&cell[0], (double)stats->elapsed_ns),
                   spdl__duration(&cell[1], (double)stats->first_item_ns),
                   spdl__rate(&cell[2], stats->delivered, stats->elapsed_ns),
                   spdl__duration(&cell[3], (double)stats->step_mean_ns), stats->workers,
                   stats->workers == 1 ? "" : "s");
    spdl__stats_rows(&text, stats);
    return (int)text.length;
}

SPDL__PRIVATE void spdl__progress(spdl__text *text, const spdl_stats *stats, uint64_t length,
                                  bool ended) {
    const uint64_t first = spdl__min(stats->first_item_ns, stats->elapsed_ns);
    const double each = spdl__per_item(stats->elapsed_ns - first,
                                       stats->delivered > 1 ? stats->delivered - 1 : 1) * 1e-9;
    spdl__cell cell;
    spdl__text_add(text, "%llu", (spdl__llu)stats->delivered);
    if (length > 0)
        spdl__text_add(text, " of %llu items (%.0f %%)", (spdl__llu)length,
                       100 * (double)spdl__min(stats->delivered, length) / (double)length);
    else
        spdl__text_add(text, " items");
    spdl__text_add(text, ", %s", spdl__rate(&cell, stats->delivered, stats->elapsed_ns));
    if (!ended && length > stats->delivered && stats->delivered > 1)
        spdl__text_add(text, ", %s left",
                       spdl__clock(&cell, each * (double)(length - stats->delivered)));
    if (stats->delivered > 0)
        spdl__text_add(text, ", waited %.0f %%", 100 * spdl__stats_waiting(stats));
}

SPDL_API int spdl_stats_progress(const spdl_stats *stats, uint64_t length, char *buffer,
                                 size_t bytes) {
    spdl__text text = spdl__text_start(buffer, bytes);
    spdl__progress(&text, stats, length, false);
    return (int)text.length;
}

/* --- JSON --- */

/* A counter by name. `sum`: it only grows, so an interval has a difference. */
typedef struct spdl__field {
    const char *name;
    size_t at;
    bool sum;
} spdl__field;

#define SPDL__FIELD(type, field, sum) { #field, offsetof(type, field), sum }

/* What is written of each struct, and subtracted for an interval: all of it, in this order. */
static const spdl__field spdl__stats_fields[] = {
    SPDL__FIELD(spdl_stats, elapsed_ns, true),
    SPDL__FIELD(spdl_stats, delivered, true),
    SPDL__FIELD(spdl_stats, first_item_ns, false),
    SPDL__FIELD(spdl_stats, wait_ns, true),
    SPDL__FIELD(spdl_stats, ready_ns, true),
    SPDL__FIELD(spdl_stats, workers_runnable_ns, true),
    SPDL__FIELD(spdl_stats, step_ns, true),
    SPDL__FIELD(spdl_stats, step_mean_ns, false),
};
static const spdl__field spdl__stage_fields[] = {
    SPDL__FIELD(spdl_stage_stats, tasks, true),
    SPDL__FIELD(spdl_stage_stats, failures, true),
    SPDL__FIELD(spdl_stage_stats, skips, true),
    SPDL__FIELD(spdl_stage_stats, retries, true),
    SPDL__FIELD(spdl_stage_stats, freed, true),
    SPDL__FIELD(spdl_stage_stats, busy_ns, true),
    SPDL__FIELD(spdl_stage_stats, exposed_ns, true),
    SPDL__FIELD(spdl_stage_stats, exposed_idle_ns, true),
    SPDL__FIELD(spdl_stage_stats, mean_ns, false),
    SPDL__FIELD(spdl_stage_stats, p50_ns, false),
    SPDL__FIELD(spdl_stage_stats, p90_ns, false),
    SPDL__FIELD(spdl_stage_stats, p99_ns, false),
    SPDL__FIELD(spdl_stage_stats, max_ns, false),
    SPDL__FIELD(spdl_stage_stats, cpu_ns, true),
    SPDL__FIELD(spdl_stage_stats, runnable_ns, true),
    SPDL__FIELD(spdl_stage_stats, blocked_ns, true),
    SPDL__FIELD(spdl_stage_stats, split_calls, true),
    SPDL__FIELD(spdl_stage_stats, bytes_in, true),
    SPDL__FIELD(spdl_stage_stats, bytes_out, true),
};
static const spdl__field spdl__edge_fields[] = {
    SPDL__FIELD(spdl_edge_stats, items, true),
    SPDL__FIELD(spdl_edge_stats, put_wait_ns, true),
    SPDL__FIELD(spdl_edge_stats, get_wait_ns, true),
    SPDL__FIELD(spdl_edge_stats, empty_ns, true),
    SPDL__FIELD(spdl_edge_stats, elapsed_ns, true),
};
static const spdl__field spdl__process_fields[] = {
    SPDL__FIELD(spdl_process_stats, cpu_ns, false),
    SPDL__FIELD(spdl_process_stats, others_ns, false),
    SPDL__FIELD(spdl_process_stats, resident_bytes, false),
    SPDL__FIELD(spdl_process_stats, minor_faults, false),
    SPDL__FIELD(spdl_process_stats, major_faults, false),
};
#define SPDL__LENGTH(table) (sizeof(table) / sizeof((table)[0]))

/* What stands in a JSON string; also fit for a script of a page. Bytes that are no UTF-8 become
   U+FFFD. */
SPDL__PRIVATE void spdl__json_escape(spdl__text *text, const char *string) {
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

SPDL__PRIVATE void spdl__json_string(spdl__text *text, const char *string) {
    spdl__text_add(text, "\"");
    spdl__json_escape(text, string);
    spdl__text_add(text, "\"");
}

/* A number with three decimals; printf would write what the locale takes for a point. */
SPDL__PRIVATE void spdl__json_real(spdl__text *text, const char *name, double value) {
    const spdl__llu thousandths = value > 0 && value < 1e15 ? (spdl__llu)(value * 1000 + 0.5) : 0;
    spdl__text_add(text, ",\"%s\":%llu.%03u", name, thousandths / 1000,
                   (unsigned)(thousandths % 1000));
}

SPDL__PRIVATE void spdl__json_fields(spdl__text *text, const void *stats, const spdl__field *field,
                                     size_t count) {
    size_t i;
    for (i = 0; i < count; ++i)
        spdl__text_add(text, "%s\"%s\":%llu", i ? "," : "", field[i].name,
                       (spdl__llu)spdl__field_at(stats, field[i].at));
}

SPDL__PRIVATE void spdl__json_stage(spdl__text *text, const spdl_stats *stats, int i) {
    static const char *const kinds[] = { "none", "source", "pipe",   "batch", "sink",
                                         "feed", "branch", "path", "merge" };
    const spdl_stage_stats *stage = &stats->stage[i];
    spdl__text_add(text, "{\"name\":");
    spdl__json_string(text, stage->name);
    spdl__text_add(text, ",\"kind\":\"%s\",\"concurrency\":%d,\"in_flight\":%d,\"deferred\":%s"
                   ",\"runnable_known\":%s",
                   (unsigned)stage->kind < 9 ? kinds[stage->kind] : "other", stage->concurrency,
                   stage->in_flight, stage->deferred ? "true" : "false",
                   stage->runnable_known ? "true" : "false");
    spdl__json_real(text, "load", spdl__stage_load(stats, i));
    spdl__text_add(text, ",");
    spdl__json_fields(text, stage, spdl__stage_fields, SPDL__LENGTH(spdl__stage_fields));
    spdl__text_add(text, "}");
}

SPDL__PRIVATE void spdl__json_edge(spdl__text *text, const spdl_edge_stats *edge) {
    spdl__text_add(text, "{\"buffer_size\":%d,\"depth\":%d", edge->buffer_size, edge->depth);
    spdl__json_real(text, "readiness", edge->readiness);
    spdl__text_add(text, ",");
    spdl__json_fields(text, edge, spdl__edge_fields, SPDL__LENGTH(spdl__edge_fields));
    spdl__text_add(text, "}");
}

SPDL__PRIVATE void spdl__json_stats(spdl__text *text, const spdl_stats *stats) {
    char verdict[512];
    int i;
    (void)spdl_stats_verdict(stats, verdict, sizeof(verdict));
    spdl__text_add(text, "{\"verdict\":");
    spdl__json_string(text, verdict);
    spdl__text_add(text, ",\"limit\":%d,\"workers\":%d,", spdl__stats_limit(stats), stats->workers);
    spdl__json_fields(text, stats, spdl__stats_fields, SPDL__LENGTH(spdl__stats_fields));
    spdl__text_add(text, ",\"stages\":[");
    for (i = 0; i < stats->stage_count; ++i) {
        spdl__text_add(text, i ? "," : "");
        spdl__json_stage(text, stats, i);
    }
    spdl__text_add(text, "],\"edges\":[");
    for (i = 0; i < stats->stage_count; ++i) {
        spdl__text_add(text, i ? "," : "");
        spdl__json_edge(text, &stats->edge[i]);
    }
    spdl__text_add(text, "]}");
}

SPDL_API int spdl_stats_json(const spdl_stats *stats, char *buffer, size_t bytes) {
    spdl__text text = spdl__text_start(buffer, bytes);
    spdl__json_stats(&text, stats);
    return (int)text.length;
}

/* ============================================================================================= */
/* >>report-impl
   One thread for each pipeline that was asked for reports: it sleeps, takes snapshots like anybody
   else may, and writes. Nothing in the pipeline waits for it but destroy. Everything below belongs
   to that thread, but for `quit`, and for the samples, which spdl_report_html reads under `lock`:
   the thread passes over a sample when the lock is taken. Files are opened and buffers allocated
   by create. Files never block (O_NONBLOCK, poll), and never take the numbers 0 to 2, in case the
   program has closed one of these. */

#define SPDL__SAMPLES 256           /* then every second one is dropped */
#define SPDL__SAMPLE_NS 100000000   /* between two samples, at first */
#define SPDL__PAGE_NS 10000000000u  /* between two versions of the page */
#define SPDL__STDERR_MS 100         /* how long stderr may take to accept a piece */
#define SPDL__PATH_BYTES 512
#define SPDL__EVERY_LEAST 0.01      /* seconds of an interval */
#define SPDL__EVERY_MOST 1e7
#define SPDL__SAMPLE_STAGE 7        /* numbers in a sample for a stage and the edge behind it */
#define SPDL__SAMPLE_TOP 7          /* and for all of them */

/* What was asked for, by the desc and by the environment. */
typedef struct spdl__report_plan {
    spdl_report_desc desc; /* but for the names of files */
    char json[SPDL__PATH_BYTES], html[SPDL__PATH_BYTES];
} spdl__report_plan;

typedef struct spdl__reporter {
    spdl_pipeline *pipeline;
    spdl__report_plan plan;
    char name[SPDL_NAME_BYTES];
    spdl__thread thread;
    spdl__event bell;
    uint32_t quit;
    bool terminal, colour, utf8, table, live, over;
    int json_file, page_lock, draw_lock; /* or SPDL__NO_FILE */
    int drawn;                           /* lines of the live view that stand on the terminal */
    uint64_t run;                        /* Unix time in us of create */
    spdl_stats last, now, interval;
    spdl_process_stats process_last, process_now;
    spdl_histogram *times; /* of each stage, at the last report */
    char *buffer;
    size_t bytes;
    uint32_t lock;
    uint64_t *samples; /* rows of sample_width numbers */
    size_t sample_width, sample_count;
    uint64_t sample_ns;
} spdl__reporter;

SPDL__PRIVATE uint64_t spdl__unix_us(void) {
    struct timeval now;
    (void)gettimeofday(&now, NULL);
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_usec;
}

/* --- what is asked for --- */

/* Seconds as 5 or 0.25, in every locale; 0 when the word is something else. */
SPDL__PRIVATE double spdl__report_seconds(const char *word) {
    double value = 0, place = 1;
    const size_t whole = strspn(word, "0123456789");
    const size_t part = word[whole] == '.' ? 1 + strspn(word + whole + 1, "0123456789") : 0;
    size_t i;
    if (whole == 0 || word[whole + part] != '\0') return 0;
    for (i = 0; i < whole; ++i) value = 10 * value + (word[i] - '0');
    for (i = whole + 1; i < whole + part; ++i) value += (place /= 10) * (word[i] - '0');
    return value;
}

/* One word of SPDL_STATS; false when it is none. */
SPDL__PRIVATE bool spdl__report_word(spdl__report_plan *plan, const char *word, bool *quiet) {
    const double seconds = spdl__report_seconds(word);
    if (strcmp(word, "live") == 0) return plan->desc.live = true;
    if (strcmp(word, "quiet") == 0) return *quiet = true;
    if (strncmp(word, "json=", 5) == 0) {
        if (word[5] == '\0' || strlen(word + 5) >= sizeof(plan->json)) return false;
        memcpy(plan->json, word + 5, strlen(word + 5) + 1);
        return true;
    }
    if (!(seconds >= SPDL__EVERY_LEAST && seconds <= SPDL__EVERY_MOST)) return false;
    plan->desc.every = seconds;
    return true;
}

/* SPDL_STATS: nothing is asked for when any word is wrong. */
SPDL__PRIVATE void spdl__report_stats(spdl__report_plan *plan, const char *value,
                                      const spdl_logger *logger) {
    spdl__report_plan asked = *plan;
    char word[SPDL__PATH_BYTES + 8];
    const char *at = value;
    bool quiet = false;
    if (strcmp(value, "0") == 0) return;
    for (;;) {
        const size_t length = strcspn(at, ",");
        (void)snprintf(word, sizeof(word), "%.*s",
                       (int)spdl__min(length, sizeof(word) - 1), at);
        if (!spdl__report_word(&asked, word, &quiet)) {
            spdl__tell(logger, SPDL_LOG_WARN,
                       "spdl: SPDL_STATS is \"%.200s\", but \"%.200s\" is neither a number of "
                       "seconds nor live, quiet or json=FILE: no reports", value, word);
            return;
        }
        if (at[length] == '\0') break;
        at += length + 1;
    }
    *plan = asked;
    if (!quiet && !asked.desc.live) plan->desc.table = true;
}

/* The variable, unless it is empty, or not the user's to set: the program has other rights. */
SPDL__PRIVATE const char *spdl__environment(const char *name) {
    const char *value = getuid() == geteuid() && getgid() == getegid() ? getenv(name) : NULL;
    return value != NULL && *value != '\0' ? value : NULL;
}

SPDL__PRIVATE void spdl__report_file(char to[SPDL__PATH_BYTES], const char *from,
                                     const spdl_logger *logger) {
    if (from == NULL) return;
    if (strlen(from) < SPDL__PATH_BYTES)
        memcpy(to, from, strlen(from) + 1);
    else
        spdl__tell(logger, SPDL_LOG_WARN,
                   "spdl: the name of a report has more than %d bytes: \"%.60s...\"",
                   SPDL__PATH_BYTES - 1, from);
}

/* Whether there is anything to do. */
SPDL__PRIVATE bool spdl__report_ask(spdl__report_plan *plan, const spdl_report_desc *desc,
                                    const spdl_logger *logger) {
    memset(plan, 0, sizeof(*plan));
    if (desc != NULL) plan->desc = *desc;
    spdl__report_file(plan->json, plan->desc.json, logger);
    spdl__report_file(plan->html, plan->desc.html, logger);
    if (!plan->desc.ignore_environment) {
        const char *stats = spdl__environment("SPDL_STATS");
        if (stats != NULL) spdl__report_stats(plan, stats, logger);
        spdl__report_file(plan->html, spdl__environment("SPDL_REPORT"), logger);
    }
    if (!(plan->desc.every > 0)) plan->desc.every = plan->desc.live ? 1 : 5;
    if (plan->desc.every < SPDL__EVERY_LEAST) plan->desc.every = SPDL__EVERY_LEAST;
    if (plan->desc.every > SPDL__EVERY_MOST) plan->desc.every = SPDL__EVERY_MOST;
    return plan->desc.table || plan->desc.live || plan->desc.report_fn != NULL ||
           plan->json[0] != '\0' || plan->html[0] != '\0';
}

/* --- writing --- */

/* A file of our own, never as descriptor 0 to 2. */
SPDL__PRIVATE int spdl__own_file(const char *path, int how) {
    int file = open(path, how | O_CREAT | O_NONBLOCK | O_NOCTTY | SPDL__O_CLOEXEC, 0666);
    if (file >= 0 && file <= STDERR_FILENO) {
        const int low = file;
        file = fcntl(low, SPDL__F_DUPFD, STDERR_FILENO + 1);
        (void)close(low);
    }
    return file;
}

/* Whether all of it was written; errno says why not. */
SPDL__PRIVATE bool spdl__report_write(int file, const char *text, size_t length) {
    while (length > 0) {
        const ssize_t put = write(file, text, length);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return false;
        text += put;
        length -= (size_t)put;
    }
    return true;
}

/* stderr belongs to the program, so it may block: only what poll says it takes is written, in
   pieces that a pipe takes whole. */
SPDL__PRIVATE void spdl__report_stderr(spdl__reporter *r, const spdl__text *text) {
    size_t at, most = spdl__min(text->length, r->bytes - 1);
    for (at = 0; at < most;) {
        const size_t piece = spdl__min(most - at, 4096);
        struct pollfd ready;
        ready.fd = STDERR_FILENO;
        ready.events = POLLOUT;
        ready.revents = 0;
        if (poll(&ready, 1, SPDL__STDERR_MS) == 0) return; /* this one is lost */
        if (!(ready.revents & POLLNVAL) &&
            spdl__report_write(STDERR_FILENO, text->buffer + at, piece)) {
            at += piece;
        } else if (!(ready.revents & POLLNVAL) && errno == EAGAIN) {
            return;
        } else {
            spdl__tell(&r->pipeline->logger, SPDL_LOG_WARN,
                       "spdl: no more statistics on stderr: %s",
                       strerror(ready.revents & POLLNVAL ? EBADF : errno));
            r->table = r->live = false;
            return;
        }
    }
}

/* The cores used since the report before. */
SPDL__PRIVATE double spdl__report_cores(const spdl__reporter *r, bool others) {
    const spdl_process_stats *a = &r->process_last, *b = &r->process_now;
    return spdl__share(others ? spdl__grown(a->others_ns, b->others_ns)
                              : spdl__grown(a->cpu_ns, b->cpu_ns),
                       b->time_ns - a->time_ns);
}

SPDL__PRIVATE void spdl__report_json(spdl__reporter *r, bool final) {
    spdl__text text = spdl__text_start(r->buffer, r->bytes);
    spdl__text_add(&text, "{\"schema\":\"spdl.stats.1\",\"pipeline\":");
    spdl__json_string(&text, r->name);
    spdl__text_add(&text, ",\"pid\":%ld,\"run\":%llu", (long)getpid(),
                   (spdl__llu)(r->run / 1000));
    spdl__json_real(&text, "time", (double)spdl__unix_us() * 1e-6);
    spdl__text_add(&text, ",\"final\":%s,\"interval\":", final ? "true" : "false");
    spdl__json_stats(&text, &r->interval);
    spdl__text_add(&text, ",\"total\":");
    spdl__json_stats(&text, &r->now);
    spdl__text_add(&text, ",\"process\":{");
    spdl__json_fields(&text, &r->process_now, spdl__process_fields,
                      SPDL__LENGTH(spdl__process_fields));
    spdl__json_real(&text, "cores_allowed", r->process_now.cores_allowed);
    spdl__json_real(&text, "cores_used", spdl__report_cores(r, false));
    spdl__json_real(&text, "others_cores", spdl__report_cores(r, true));
    spdl__text_add(&text, "}}\n");
    if (text.length < r->bytes && spdl__report_write(r->json_file, text.buffer, text.length))
        return;
    spdl__tell(&r->pipeline->logger, SPDL_LOG_WARN, "spdl: no more statistics in %.400s: %s",
               r->plan.json, text.length < r->bytes ? strerror(errno) : "too long");
    (void)close(r->json_file);
    r->json_file = SPDL__NO_FILE;
}

/* --- text for people --- */

SPDL__PRIVATE void spdl__report_process(spdl__reporter *r, spdl__text *text) {
    spdl__text_style(text, "2");
    spdl__text_add(text, "  %.2f of %.3g cores used, others %.2f; %.0f MB resident",
                   spdl__report_cores(r, false), r->process_now.cores_allowed,
                   spdl__report_cores(r, true), (double)r->process_now.resident_bytes / 1e6);
    spdl__text_style(text, "0");
    spdl__text_add(text, "\n");
}

/* An interval without an item says something else than a start without one. */
SPDL__PRIVATE void spdl__report_verdict(spdl__reporter *r, spdl__text *text,
                                        const spdl_stats *stats) {
    spdl__text_style(text, "1");
    if (stats->delivered == 0 && r->now.delivered > 0)
        spdl__text_add(text, "No item was taken: the trainer %s.",
                       2 * stats->wait_ns > stats->elapsed_ns ? "waited" : "did not ask for one");
    else
        spdl__verdict(text, stats);
    spdl__text_style(text, "0");
    spdl__text_add(text, "\n");
}

/* "loader  at 1:15: 7680 of 50000 items ..." */
SPDL__PRIVATE void spdl__report_heading(spdl__reporter *r, spdl__text *text, bool final) {
    spdl__cell cell;
    spdl__text_style(text, "1;36");
    spdl__text_name(text, r->name, -1);
    spdl__text_style(text, "0");
    spdl__text_add(text, "  %s %s: ", final ? "ended after" : "at",
                   spdl__clock(&cell, (double)r->now.elapsed_ns * 1e-9));
    spdl__progress(text, &r->now, r->plan.desc.length, final);
}

SPDL__PRIVATE void spdl__report_table(spdl__reporter *r, bool final) {
    const spdl_stats *stats = final ? &r->now : &r->interval;
    spdl__text text = spdl__text_start(r->buffer, r->bytes);
    text.colour = r->colour;
    spdl__report_heading(r, &text, final);
    spdl__text_add(&text, "\n");
    spdl__report_verdict(r, &text, stats);
    spdl__stats_rows(&text, stats);
    spdl__report_process(r, &text);
    spdl__report_stderr(r, &text);
}

/* A bar of ten characters. */
SPDL__PRIVATE void spdl__report_bar(const spdl__reporter *r, spdl__text *text, double share) {
    const int width = 10, full = (int)(width * (share < 1 ? share : 1) + 0.5);
    int i;
    for (i = 0; i < width; ++i)
        spdl__text_add(text, i < full ? r->utf8 ? "\xe2\x96\x88" : "#"
                                      : r->utf8 ? "\xe2\x96\x91" : ".");
}

SPDL__PRIVATE void spdl__report_live_row(spdl__reporter *r, spdl__text *text, int i, bool limit) {
    const spdl_stage_stats *stage = &r->interval.stage[i];
    const spdl_edge_stats *edge = &r->interval.edge[i];
    spdl__cell cell;
    spdl__text_style(text, limit ? "1;33" : "0");
    spdl__text_add(text, "%c ", limit ? '>' : ' ');
    spdl__text_name(text, stage->name, 16);
    spdl__text_add(text, " %8s  busy ", spdl__rate(&cell, stage->tasks, r->interval.elapsed_ns));
    spdl__report_bar(r, text, spdl__stage_load(&r->interval, i));
    spdl__text_add(text, " %3.0f%%  waiting ", 100 * spdl__stage_load(&r->interval, i));
    spdl__report_bar(r, text, spdl__share((uint64_t)edge->depth, (uint64_t)edge->buffer_size));
    spdl__text_add(text, " %d/%d", edge->depth, edge->buffer_size);
    spdl__text_style(text, "0");
    spdl__text_add(text, "\033[K\n");
}

/* On a terminal: the lines that stand there are gone over. Lines are not wrapped meanwhile, so that
   as many stand there as were written. */
SPDL__PRIVATE void spdl__report_draw(spdl__reporter *r) {
    const int limit = spdl__stats_limit(&r->interval);
    spdl__text text = spdl__text_start(r->buffer, r->bytes);
    int i;
    text.colour = r->colour;
    spdl__text_add(&text, "\033[?7l");
    if (r->drawn > 0) spdl__text_add(&text, "\033[%dA\r", r->drawn);
    spdl__report_heading(r, &text, false);
    spdl__text_add(&text, "\033[K\n");
    spdl__report_verdict(r, &text, &r->interval);
    for (i = 0; i < r->now.stage_count; ++i) spdl__report_live_row(r, &text, i, i == limit);
    spdl__report_process(r, &text);
    spdl__text_add(&text, "\033[J\033[?7h");
    r->drawn = r->now.stage_count + 3;
    spdl__report_stderr(r, &text);
}

/* Elsewhere: one line. */
SPDL__PRIVATE void spdl__report_line(spdl__reporter *r) {
    const int limit = spdl__stats_limit(&r->interval);
    spdl__text text = spdl__text_start(r->buffer, r->bytes);
    spdl__report_heading(r, &text, false);
    if (limit >= 0) {
        spdl__text_add(&text, ", limited by ");
        spdl__text_name(&text, r->now.stage[limit].name, -1);
    }
    spdl__text_add(&text, "\n");
    spdl__report_stderr(r, &text);
}

/* --- intervals --- */

/* What came between two snapshots; times[] is brought up to date. */
SPDL__PRIVATE void spdl__report_subtract(void *to, const void *from, const spdl__field *field,
                                         size_t count) {
    for (; count > 0; --count, ++field) {
        uint64_t value = spdl__field_at(to, field->at);
        if (!field->sum) continue;
        value = spdl__grown(spdl__field_at(from, field->at), value);
        memcpy((char *)to + field->at, &value, sizeof(value));
    }
}

SPDL__PRIVATE void spdl__report_interval(spdl__reporter *r) {
    spdl_stats *stats = &r->interval;
    spdl_histogram now;
    int i;
    *stats = r->now;
    spdl__report_subtract(stats, &r->last, spdl__stats_fields, SPDL__LENGTH(spdl__stats_fields));
    stats->first_item_ns = r->last.first_item_ns > 0
                               ? 0 : spdl__grown(r->last.elapsed_ns, r->now.first_item_ns);
    stats->step_mean_ns = stats->step_ns / spdl__max(stats->delivered, 1);
    for (i = 0; i < stats->stage_count; ++i) {
        spdl_edge_stats *edge = &stats->edge[i];
        spdl__report_subtract(&stats->stage[i], &r->last.stage[i], spdl__stage_fields,
                              SPDL__LENGTH(spdl__stage_fields));
        spdl__report_subtract(edge, &r->last.edge[i], spdl__edge_fields,
                              SPDL__LENGTH(spdl__edge_fields));
        edge->readiness = edge->elapsed_ns > 0
                              ? 1 - spdl__share(spdl__min(edge->empty_ns, edge->elapsed_ns),
                                                edge->elapsed_ns) : 0;
        (void)spdl_pipeline_histogram(r->pipeline, i, &now);
        spdl__histogram_since(&r->times[i], &now);
        spdl__stage_times(&stats->stage[i], &r->times[i]);
        r->times[i] = now;
    }
}

/* One report, in every form that is wanted. */
SPDL__PRIVATE void spdl__report_once(spdl__reporter *r, bool final) {
    spdl_pipeline_stats(r->pipeline, &r->now);
    spdl_process_read(&r->process_now);
    spdl__report_interval(r);
    if (r->plan.desc.report_fn != NULL)
        r->plan.desc.report_fn(&r->interval, &r->now, r->plan.desc.user);
    if (r->json_file != SPDL__NO_FILE) spdl__report_json(r, final);
    if (r->live && r->draw_lock != SPDL__NO_FILE)
        spdl__report_draw(r);
    else if (r->live && !final)
        spdl__report_line(r);
    if (r->table || (r->live && final)) spdl__report_table(r, final);
    if (final) r->drawn = 0;
    r->last = r->now;
    r->process_last = r->process_now;
}

/* --- samples --- */

/* Drops every second sample: those that stay are twice as far apart, and end with the last. */
SPDL__PRIVATE void spdl__samples_thin(spdl__reporter *r) {
    const size_t row = r->sample_width * sizeof(*r->samples);
    size_t i;
    for (i = 1; i < r->sample_count / 2; ++i)
        memcpy(r->samples + i * r->sample_width, r->samples + (2 * i + 1) * r->sample_width, row);
    r->sample_count /= 2;
    r->sample_ns *= 2;
}

/* Sums since the start, in microseconds and KiB: the page takes the differences. */
SPDL__PRIVATE void spdl__samples_row(uint64_t *to, const spdl_stats *stats,
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

/* One more; when the last is quite new it is replaced, so that no interval is tiny. */
SPDL__PRIVATE void spdl__report_sample(spdl__reporter *r) {
    spdl_process_stats process;
    uint64_t *row;
    if (!spdl__try_lock(&r->lock)) return;
    spdl_pipeline_stats(r->pipeline, &r->now);
    spdl_process_read(&process);
    if (r->sample_count == SPDL__SAMPLES) spdl__samples_thin(r);
    row = r->samples + r->sample_count * r->sample_width;
    if (r->sample_count > 1 &&
        r->now.elapsed_ns / 1000 < *(row - r->sample_width) + r->sample_ns / 2000)
        row -= r->sample_width;
    else
        r->sample_count++;
    spdl__samples_row(row, &r->now, &process);
    spdl__spin_unlock(&r->lock);
}

/* --- the thread --- */

SPDL__PRIVATE void spdl__report_page(spdl__reporter *r);

/* Writes what is left; again only if the pipeline has gone on since. */
SPDL__PRIVATE void spdl__report_final(spdl__reporter *r) {
    r->over = true;
    spdl__report_once(r, true);
    if (r->samples != NULL) spdl__report_sample(r);
    spdl__report_page(r);
}

SPDL__PRIVATE void *spdl__report_main(void *arg) {
    spdl__reporter *r = (spdl__reporter *)arg;
    const uint64_t every = (uint64_t)(r->plan.desc.every * 1e9);
    uint64_t sample = r->samples != NULL ? spdl_time_ns() : SPDL__NEVER;
    uint64_t page = r->samples != NULL ? sample + SPDL__PAGE_NS : SPDL__NEVER;
    uint64_t report = spdl_time_ns() + every;
    spdl__thread_name("spdl-report");
    for (;;) {
        const uint32_t word = spdl__load32(&r->bell.word);
        const bool ended = spdl__load_relaxed(&r->pipeline->ended_ns) != 0;
        const uint64_t now = spdl_time_ns();
        if (spdl__load32(&r->quit)) break;
        if (!ended) r->over = false;
        if (!ended && now >= sample) spdl__report_sample(r);
        if (!ended && now >= page) spdl__report_page(r);
        if (!ended && now >= report) spdl__report_once(r, false);
        if (ended && !r->over && now >= report) spdl__report_final(r);
        if (now >= sample) sample = now + r->sample_ns;
        if (now >= page) page = now + SPDL__PAGE_NS;
        if (now >= report) report = now + every - (now - report) % every;
        (void)spdl__event_sleep(&r->bell, word,
                                ended ? report : spdl__min(sample, spdl__min(page, report)));
    }
    if (!r->over) spdl__report_final(r);
    return NULL;
}

/* --- the page --- */

/* The page in pieces that are not too long for a compiler, before and behind its numbers: JSON,
   which the script draws. Everything from outside goes through textContent. */
/* clang-format off */
static const char *const spdl__page_head[] = {
    "<html lang='en'><head><meta charset='utf-8'><title>spdl report</title>\n"
    "<meta name='viewport' content='width=device-width,initial-scale=1'>\n"
    "<style>\n"
    ":root{--bg:#f7f7f5;--card:#fff;--ink:#1c1c1a;--dim:#6a6a64;--line:#e3e2dd;--soft:#efeeea;\n"
    "--hot:#c8450c;--hotbg:#fdf0e8;--c0:#2563c9;--c1:#d9660f;--c2:#2b8a3e;--c3:#9c36b5;"
    "--c4:#b08500;\n"
    "--c5:#0b7c92;--c6:#c2255c;--c7:#6b6f76}\n"
    "@media(prefers-color-scheme:dark){:root{--bg:#161615;--card:#1f1f1d;--ink:#ededea;"
    "--dim:#9d9c95;\n"
    "--line:#35342f;--soft:#2a2926;--hot:#ff9a5c;--hotbg:#37241a;--c0:#74a9ff;--c1:#ff9d4d;\n"
    "--c2:#6fd283;--c3:#d98bf0;--c4:#f0c846;--c5:#4bc6da;--c6:#f58cb2;--c7:#a9adb3}}\n"
    "*{box-sizing:border-box}\n"
    "body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.45 system-ui,sans-serif}\n"
    "main{max-width:1120px;margin:0 auto;padding:28px 20px 40px}\n"
    "#name{margin:0;color:var(--dim)}\n"
    "h1{font-size:24px;line-height:1.3;margin:4px 0 18px;max-width:46em;text-wrap:pretty}\n"
    "h2{font-size:16px;margin:26px 0 10px}\n"
    ".card{background:var(--card);border:1px solid var(--line);border-radius:10px}\n"
    "#tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:10px}\n"
    "#tiles div{padding:10px 14px}\n"
    "#tiles span{color:var(--dim);font-size:13px;display:block}\n"
    "#tiles b{font-size:21px;font-weight:600}\n"
    "#flow{display:flex;flex-wrap:wrap;align-items:stretch;padding:18px 16px;row-gap:16px}\n"
    ".stage{border:1.5px solid var(--line);border-radius:9px;padding:9px 12px;min-width:104px;\n"
    "max-width:180px;background:var(--card);position:relative;font-size:13px}\n"
    ".stage b{display:block;font-size:14px;overflow:hidden;text-overflow:ellipsis;"
    "white-space:nowrap}\n"
    ".stage span{color:var(--dim);display:block;white-space:nowrap}\n"
    ".stage.limit{border:2px solid var(--hot);background:var(--hotbg)}\n"
    ".stage em{position:absolute;top:-10px;right:8px;background:var(--hot);color:var(--card);\n"
    "font:600 11px/18px system-ui,sans-serif;padding:0 7px;border-radius:9px}\n"
    ".bar{height:5px;border-radius:3px;background:var(--soft);margin-top:6px;overflow:hidden}\n"
    ".bar i{display:block;height:100%;background:var(--c0)}\n"
    ".limit .bar i{background:var(--hot)}\n"
    ".edge{align-self:center;width:80px;text-align:center;font-size:12px;white-space:nowrap;\n"
    "color:var(--dim)}\n"
    ".edge svg{display:block;margin:1px auto}\n"
    "#charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));"
    "gap:14px;\n"
    "margin-top:26px}\n"
    ".chart{padding:12px 14px 10px;position:relative}\n"
    ".chart h3{margin:0;font-size:14px}\n"
    ".chart p{margin:0 0 4px;font-size:12.5px;color:var(--dim)}\n"
    ".chart svg{display:block;width:100%;overflow:visible}\n"
    ".chart text{fill:var(--dim);font-size:11px}\n"
    ".legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:12.5px;color:var(--dim)}\n"
    ".legend i{display:inline-block;width:14px;height:3px;border-radius:2px;margin-right:5px;\n"
    "vertical-align:3px}\n"
    ".tip{position:absolute;pointer-events:none;padding:6px 9px;font-size:12.5px;z-index:1;\n"
    "white-space:nowrap;display:none}\n"
    ".scroll{overflow-x:auto;padding:4px 0}\n"
    "table{border-collapse:collapse;font-size:13px;width:100%;font-variant-numeric:tabular-nums}\n"
    "th,td{padding:6px 10px;text-align:right;white-space:nowrap}\n"
    "th{color:var(--dim);font-weight:500;border-bottom:1px solid var(--line)}\n"
    "th:first-child,td:first-child{text-align:left}\n"
    "tr.limit td{background:var(--hotbg)}\n"
    "tr.limit td:first-child{color:var(--hot);font-weight:600}\n"
    "footer{color:var(--dim);font-size:12.5px;margin-top:22px}\n"
    "</style></head><body><main>\n"
    "<p id='name'></p><h1 id='verdict'></h1><section id='tiles'></section>\n"
    "<h2>Flow</h2><section id='flow' class='card'></section><section id='charts'></section>\n"
    "<h2>Since the start</h2><div class='scroll card'><table "
    "id='table'></table></div><footer></footer>\n"
    "<noscript>This page draws itself: scripts have to be allowed.</noscript>\n"
    "</main><script type='application/json' id='data'>\n",
    NULL,
};

static const char *const spdl__page_tail[] = {
    "</script><script>\n"
    "'use strict';\n"
    "const D=JSON.parse(document.getElementById('data').textContent),T=D.total,N=T.stages.length;\n"
    "const $=id=>document.getElementById(id),NS='http://www.w3.org/2000/svg';\n"
    "function el(tag,set,...kids){const e=document.createElement(tag);for(const k in set)\n"
    "if(k=='style')e.style.cssText=set[k];else e[k]=set[k];e.append(...kids);return e}\n"
    "function svg(tag,set,...kids){const e=document.createElementNS(NS,tag);\n"
    "for(const k in set)e.setAttribute(k,set[k]);e.append(...kids);return e}\n"
    "const digits=v=>v<9.995?v.toFixed(2):v<99.95?v.toFixed(1):v.toFixed(0);\n"
    "function time(ns){let u=0;while(ns>=999.5&&u<3){ns/=1000;u++}\n"
    "return(u?digits(ns):ns.toFixed(0))+' '+['ns','us','ms','s'][u]}\n"
    "function count(v){let u=0;while(v>=999.5&&u<3){v/=1000;u++}\n"
    "return(u||v%1?digits(v):v)+['','k','M','G'][u]}\n"
    "const rate=v=>count(v)+'/s',percent=v=>(100*v).toFixed(0)+' %',div=(a,b)=>b>0?a/b:0;\n"
    "const color=i=>'var(--c'+i%8+')',names=T.stages.map(s=>s.name);\n"
    "const since=T.elapsed_ns-T.first_item_ns,pr=D.process;\n"
    "const waited=div(Math.max(0,T.wait_ns-T.first_item_ns),since);\n"
    "$('name').textContent=D.pipeline+' \\u00b7 '+new Date(D.time*1000).toLocaleString()"
    "+' \\u00b7 '\n"
    "+time(T.elapsed_ns);\n"
    "$('verdict').textContent=T.verdict.replace(/ %/g,'\\u00a0%');"
    "document.title=D.pipeline+' \\u00b7 spdl report';\n"
    "for(const[k,v]of[['items',count(T.delivered)],['rate',rate(div(T.delivered*1e9,"
    "T.elapsed_ns))],\n"
    "['trainer waited',percent(waited)],['its own step',time(T.step_mean_ns)],\n"
    "['first item after',time(T.first_item_ns)],['memory',digits(pr.resident_bytes/1e6)+' MB'],\n"
    "['cores allowed',String(+pr.cores_allowed.toFixed(2))]])\n"
    "$('tiles').append(el('div',{className:'card'},el('span',{},k),el('b',{},v)));\n"
    "// The flow: a box for each stage, an arrow with a filled pipe for the edge behind it.\n"
    "function box(name,lines,load,limit){const b=el('div',{className:'stage'+(limit?' limit':''),\n"
    "title:name},el('b',{},name),...lines.map(l=>el('span',{},l)));\n"
    "if(load>=0)b.append(el('div',{className:'bar'},el('i',{style:'width:'+100*Math.min(1,load)"
    "+'%'})));\n"
    "if(limit)b.append(el('em',{},'limit'));return b}\n"
    "T.stages.forEach((s,i)=>{const e=T.edges[i],batch=s.kind=='batch';\n"
    "$('flow').append(box(s.name,batch?[s.kind,s.tasks+' made']:[s.kind+' \\u00d7 "
    "'+s.concurrency,\n"
    "time(s.p50_ns)+' p50',percent(s.load)+' busy'],batch?-1:s.load,i==T.limit));\n"
    "const arrow=svg('svg',{width:72,height:16,viewBox:'0 0 72 16'},\n"
    "svg('rect',{x:3,y:5,width:56,height:6,rx:3,fill:'var(--soft)'}),\n"
    "svg('rect',{x:3,y:5,width:56*e.readiness,height:6,rx:3,fill:'var(--c2)'}),\n"
    "svg('path',{d:'M61 2.5l8 5.5-8 5.5z',fill:'var(--dim)'}));\n"
    "$('flow').append(el('div',{className:'edge',title:e.depth+' of '+e.buffer_size+' waiting "
    "now'},\n"
    "arrow,percent(e.readiness)+' ready'))});\n"
    "$('flow').append(box('trainer',[time(T.step_mean_ns)+' a step','waited '+percent(waited)],\n"
    "waited));\n"
    "// Charts. A series is {name, color, wide, at: sample number -> value or NaN}.\n"
    "const S=D.samples,X=S.map(r=>r[0]/1e6),top7=7;\n"
    "const d=(i,k)=>S[i][k]-S[i-1][k],col=(s,k)=>top7+7*s+k;\n"
    "function ticks(max){const e=10**Math.floor(Math.log10(max)),m=max/e,t=(m>5?2:m>2?1:.5)*e,"
    "r=[];\n"
    "for(let v=0;v<=max*1.0001;v+=t)r.push(v);return r}\n"
    "function chart(title,note,format,series,o={}){\n"
    "const w=520,h=170,L=54,R=8,B=20,P=6,n=X.length;let lo=Infinity,hi=o.max||0;\n"
    "const rows=series.map(s=>X.map((x,i)=>i?s.at(i):NaN));\n"
    "for(const r of rows)for(const v of r)if(isFinite(v)&&(!o.log||v>0)){lo=Math.min(lo,v);\n"
    "hi=Math.max(hi,v)}\n"
    "if(!(hi>0))hi=1;if(!(lo<hi))lo=hi/10;\n"
    "if(o.log){lo=10**Math.floor(Math.log10(lo));hi=10**Math.ceil(Math.log10(hi)-1e-9)}else\n"
    "if(!o.max)hi*=1.06;\n"
    "const y=v=>o.log?P+(h-B-P)*Math.log(hi/Math.max(v,lo))/Math.log(hi/lo):P+(h-B-P)*(1-v/hi);\n"
    "const x0=X[0],x1=X[n-1],x=v=>L+(w-L-R)*(v-x0)/(x1-x0||1),g=svg('svg',{viewBox:`0 0 ${w} ${"
    "h}`});\n",
    "let marks=ticks(hi);if(o.log){marks=[];for(let v=lo;v<=hi*1.01;v*=10)marks.push(v);\n"
    "while(marks.length>6)marks=marks.filter((m,i)=>i%2==0)}\n"
    "for(const v of marks){g.append(svg('line',{x1:L,x2:w-R,y1:y(v),y2:y(v),stroke:'var(--line)"
    "'}),\n"
    "svg('text',{x:L-6,y:y(v)+4,'text-anchor':'end'},format(v)))}\n"
    "for(const v of ticks(x1).filter(v=>v>=x0))g.append(svg('text',{x:x(v),y:h-4,\n"
    "'text-anchor':'middle'},+v.toFixed(2)+' s'));\n"
    "series.forEach((s,k)=>{let path='',on=false;rows[k].forEach((v,i)=>{const ok=isFinite(v)&&\n"
    "(!o.log||v>0);if(ok)path+=(on?'L':'M')+x(X[i]).toFixed(1)+' '+y(v).toFixed(1);on=ok});\n"
    "if(!path)return;if(series.length==1)g.append(svg('path',{d:path+`L${x(X[n-1]).toFixed(1)} `\n"
    "+`${y(0)}L${x(X[1]).toFixed(1)} ${y(0)}z`,fill:s.color,opacity:.13}));\n"
    "g.append(svg('path',{d:path,fill:'none',stroke:s.color,'stroke-width':s.wide?2.6:1.6,\n"
    "'stroke-linejoin':'round',...(k>7&&{'stroke-dasharray':'5 3'})}))});\n"
    "const rule=svg('line',{y1:P,y2:h-B,stroke:'var(--dim)',visibility:'hidden'}),\n"
    "tip=el('div',{className:'tip card'});g.append(rule);\n"
    "const c=el('div',{className:'card chart'},el('h3',{},title),el('p',{},note),g);\n"
    "if(series.length>1)c.append(el('div',{className:'legend'},...series.map(s=>el('span',{},\n"
    "el('i',{style:'background:'+s.color}),s.name))));\n"
    "c.append(tip);g.onmousemove=m=>{const b=g.getBoundingClientRect(),\n"
    "v=x0+((m.clientX-b.left)*w/b.width-L)/(w-L-R)*(x1-x0);let i=X.findIndex(t=>t>=v);\n"
    "if(i<1)i=v<x0?1:n-1;rule.setAttribute('x1',x(X[i]));rule.setAttribute('x2',x(X[i]));\n"
    "rule.setAttribute('visibility','visible');tip.replaceChildren(el('b',{},digits(X[i])+' s'),\n"
    "...series.map((s,k)=>el('div',{},(series.length>1?s.name+'  ':'')+(isFinite(rows[k][i])?\n"
    "format(rows[k][i]):'-'))));tip.style.display='block';\n"
    "tip.style.left=Math.min(m.clientX-b.left+24,b.width-tip.offsetWidth)+'px';"
    "tip.style.top='44px'};\n"
    "g.onmouseleave=()=>{tip.style.display='none';rule.setAttribute('visibility','hidden')};\n"
    "$('charts').append(c)}\n"
    "const each=(f,from=0)=>T.stages.map((s,k)=>({name:names[k],color:color(k),wide:k==T.limit,\n"
    "at:i=>f(i,k),kind:s.kind})).slice(from),over=(a,b)=>b>0?a/b:NaN;\n"
    "if(S.length>3){\n"
    "chart('Rate','items the trainer took per second',rate,[{color:color(0),at:i=>over(1e6*d(i,"
    "1),\n"
    "d(i,0))}]);\n"
    "chart('Trainer waiting','share of time it waited for data',percent,[{color:color(1),\n"
    "at:i=>over(d(i,2),d(i,0))}],{max:1});\n"
    "chart('Data readiness','share of time something could be taken behind each stage',percent,\n"
    "each((i,k)=>over(d(i,0)-Math.min(d(i,0),d(i,col(k,3))),d(i,0))),{max:1});\n"
    "chart('Stage time','mean of a call',time,each((i,k)=>over(1e3*d(i,col(k,1)),d(i,col(k,0))))\n"
    ".filter(s=>s.kind!='batch'),{log:1});\n"
    "chart('Put wait','time a finished item waits for a place behind its stage',time,\n"
    "each((i,k)=>over(1e3*d(i,col(k,4)),d(i,col(k,2)))),{});\n"
    "chart('Get wait','time the reader behind each stage is idle, per item',time,\n"
    "each((i,k)=>over(1e3*d(i,col(k,5)),d(i,col(k,2)))),{});\n"
    "chart('Processor','cores used by this process, and by others on the machine',"
    "v=>+v.toFixed(2),\n"
    "[{name:'this process',color:color(0),wide:1,at:i=>over(d(i,4),d(i,3))},{name:'others',\n"
    "color:color(7),at:i=>over(d(i,5),d(i,3))}],{max:pr.cores_allowed});\n"
    "chart('Memory','resident',v=>count(v)+'B',[{color:color(3),at:i=>S[i][6]*1024}]);\n"
    "}else $('charts').append(el('p',{},'No plots: nothing was sampled. SPDL_REPORT=FILE, or "
    "html in '\n"
    "+'the desc of the reports, has samples taken from the start.'));\n"
    "// The numbers.\n"
    "const cols=[['stage',s=>s.name],['calls',s=>s.in_flight+'/'+s.concurrency],['tasks',"
    "s=>s.tasks],\n"
    "['failed',s=>s.failures],['skip',s=>s.skips],['retry',s=>s.retries],\n"
    "...[['mean','mean_ns'],['p50','p50_ns'],['p90','p90_ns'],['p99','p99_ns'],['max','max_ns']]\n"
    ".map(([t,k])=>[t,s=>s.kind=='batch'?'-':time(s[k])]),\n"
    "['busy',s=>s.kind=='batch'?'-':percent(s.load)],\n"
    "['put wait',(s,e)=>time(div(e.put_wait_ns,e.items))],\n"
    "['get wait',(s,e)=>time(div(e.get_wait_ns,e.items))],\n",
    "['ready',(s,e)=>percent(e.readiness)]];\n"
    "$('table').append(el('tr',{},...cols.map(c=>el('th',{},c[0]))),...T.stages.map((s,i)=>\n"
    "el('tr',{className:i==T.limit?'limit':''},...cols.map(c=>el('td',{},String(c[1](s,"
    "T.edges[i])))))));\n"
    "document.querySelector('footer').textContent='spdl.h '+D.version+', process '+D.pid+'; '\n"
    "+S.length+' samples';\n"
    "</script></body></html>\n",
    NULL,
};
/* clang-format on */

/* Writes pieces of a page through a buffer; after a failure it writes no more. */
typedef struct spdl__page {
    int file;
    int error; /* errno of the first failure */
    spdl__text text;
} spdl__page;

/* What is in the buffer goes to the file; there is room again. */
SPDL__PRIVATE void spdl__page_flush(spdl__page *page) {
    if (page->text.length >= page->text.bytes && page->error == 0) page->error = ENOBUFS;
    if (page->error == 0 &&
        !spdl__report_write(page->file, page->text.buffer, page->text.length))
        page->error = errno;
    page->text.length = 0;
}

SPDL__PRIVATE void spdl__page_put(spdl__page *page, const char *const *strings) {
    for (; *strings != NULL; ++strings)
        if (page->error == 0 && !spdl__report_write(page->file, *strings, strlen(*strings)))
            page->error = errno;
}

/* The start of a page, by which those of this process are recognised. */
SPDL__PRIVATE void spdl__report_identity(char *text, size_t bytes) {
    (void)snprintf(text, bytes, "<!doctype html><!-- spdl.report %ld-%llu -->", (long)getpid(),
                   spdl__process_started());
}

/* What the script of the page draws. `r` is NULL when there are no samples. */
SPDL__PRIVATE void spdl__page_data(spdl__page *page, const char *name, const spdl_stats *total,
                                   const spdl__reporter *r) {
    spdl_process_stats process;
    size_t i, k;
    spdl_process_read(&process);
    spdl__text_add(&page->text, "{\"schema\":\"spdl.report.1\",\"version\":\"%s\",\"pipeline\":",
                   spdl_version());
    spdl__json_string(&page->text, name);
    spdl__text_add(&page->text, ",\"pid\":%ld", (long)getpid());
    spdl__json_real(&page->text, "time", (double)spdl__unix_us() * 1e-6);
    spdl__text_add(&page->text, ",\"total\":");
    spdl__json_stats(&page->text, total);
    spdl__text_add(&page->text, ",\"process\":{");
    spdl__json_fields(&page->text, &process, spdl__process_fields,
                      SPDL__LENGTH(spdl__process_fields));
    spdl__json_real(&page->text, "cores_allowed", process.cores_allowed);
    spdl__text_add(&page->text, "},\"samples\":[");
    for (i = 0; r != NULL && i < r->sample_count; ++i) {
        spdl__page_flush(page);
        spdl__text_add(&page->text, i ? ",\n[" : "\n[");
        for (k = 0; k < r->sample_width; ++k)
            spdl__text_add(&page->text, k ? ",%llu" : "%llu",
                           (spdl__llu)r->samples[i * r->sample_width + k]);
        spdl__text_add(&page->text, "]");
    }
    spdl__text_add(&page->text, "]}");
    spdl__page_flush(page);
}

/* How much of a buffer JSON of all stages may need, twice. */
SPDL__PRIVATE size_t spdl__report_bytes_for(int stages) { return 8192 + 3072 * (size_t)stages; }

/* 0, or errno. Opening does not wait, and truncates only now. */
SPDL__PRIVATE int spdl__page_write(const char *path, const char *name, const spdl_stats *total,
                                   const spdl__reporter *r, char *buffer, size_t bytes) {
    spdl__page page;
    page.file = spdl__own_file(path, O_WRONLY | O_TRUNC);
    if (page.file < 0) return errno;
    page.error = 0;
    page.text = spdl__text_start(buffer, bytes);
    spdl__report_identity(buffer, bytes);
    page.text.length = strlen(buffer);
    spdl__page_flush(&page);
    spdl__page_put(&page, spdl__page_head);
    spdl__page_data(&page, name, total, r);
    spdl__page_put(&page, spdl__page_tail);
    if (close(page.file) != 0 && page.error == 0) page.error = errno;
    return page.error;
}

SPDL__PRIVATE const char *spdl__report_name(const spdl_pipeline *p) {
    return p->reporter != NULL ? p->reporter->name : "spdl";
}

/* The page of the thread itself. */
SPDL__PRIVATE void spdl__report_page(spdl__reporter *r) {
    int error;
    if (r->samples == NULL || r->plan.html[0] == '\0') return;
    spdl_pipeline_stats(r->pipeline, &r->now);
    error = spdl__page_write(r->plan.html, r->name, &r->now, r, r->buffer, r->bytes);
    if (error == 0) return;
    spdl__tell(&r->pipeline->logger, SPDL_LOG_WARN, "spdl: no report in %.400s: %s", r->plan.html,
               strerror(error));
    r->plan.html[0] = '\0';
}

SPDL_API spdl_result spdl_report_html(const spdl_pipeline *p, const char *path) {
    const size_t bytes = spdl__report_bytes_for(p != NULL ? p->count : 0);
    spdl_stats *total;
    spdl__reporter *r;
    int error;
    if (p == NULL || path == NULL) return SPDL_E_INVALID;
    total = (spdl_stats *)spdl__alloc(&p->allocator, sizeof(*total) + bytes, sizeof(void *));
    if (total == NULL) return SPDL_E_NOMEM;
    r = p->reporter != NULL && p->reporter->samples != NULL ? p->reporter : NULL;
    if (r != NULL) spdl__spin_lock(&r->lock); /* its thread does not wait for us */
    spdl_pipeline_stats(p, total);
    error = spdl__page_write(path, spdl__report_name(p), total, r, (char *)(total + 1), bytes);
    if (r != NULL) spdl__spin_unlock(&r->lock);
    spdl__free(&p->allocator, total, sizeof(*total) + bytes);
    return error == 0 ? SPDL_OK : SPDL_E_IO;
}

/* --- beginning and end --- */

/* run.html, run.2.html, run.3.html ... */
SPDL__PRIVATE void spdl__report_numbered(char to[SPDL__PATH_BYTES], const char *path, int number) {
    const char *base = strrchr(path, '/'), *dot = strrchr(path, '.');
    const int stem = dot != NULL && dot > path && (base == NULL || dot > base + 1)
                         ? (int)(dot - path) : (int)strlen(path);
    (void)snprintf(to, SPDL__PATH_BYTES, "%.*s.%d%s", stem, path, number, path + stem);
}

/* Whether a page of that name is for this pipeline: nobody holds it, and it was not written by
   another pipeline of this process. Then it is held, as long as the descriptor is open. */
SPDL__PRIVATE bool spdl__page_free(int file) {
    char identity[96], found[96];
    struct stat status;
    ssize_t length;
    if (fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) return true;
    if (flock(file, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return false;
    spdl__report_identity(identity, sizeof(identity));
    length = read(file, found, sizeof(found) - 1);
    found[length > 0 ? length : 0] = '\0';
    return strncmp(found, identity, strlen(identity)) != 0;
}

/* Finds the page a name of its own, and writes it for the first time: what cannot work is told at
   once. */
SPDL__PRIVATE void spdl__page_claim(spdl__reporter *r) {
    char asked[SPDL__PATH_BYTES];
    int number = 1;
    memcpy(asked, r->plan.html, sizeof(asked));
    for (;;) {
        r->page_lock = spdl__own_file(r->plan.html, O_RDWR);
        if (r->page_lock < 0 || spdl__page_free(r->page_lock) || number == 99) break;
        (void)close(r->page_lock);
        spdl__report_numbered(r->plan.html, asked, ++number);
    }
    spdl__report_page(r); /* if it cannot be opened, that says so, too */
}

/* Only one pipeline draws on a terminal: the one that holds it. */
SPDL__PRIVATE void spdl__report_terminal(spdl__reporter *r) {
    static const char *const names[] = { "LC_ALL", "LC_CTYPE", "LANG" };
    const char *term = getenv("TERM"), *no_color = getenv("NO_COLOR"), *locale = NULL;
    int i;
    for (i = 0; i < 3 && (locale == NULL || *locale == '\0'); ++i) locale = getenv(names[i]);
    r->terminal = isatty(STDERR_FILENO) != 0 && term != NULL && strcmp(term, "dumb") != 0;
    r->colour = r->terminal && (no_color == NULL || *no_color == '\0');
    r->utf8 = locale != NULL && (strstr(locale, "UTF-8") != NULL || strstr(locale, "utf8") != NULL);
    if (!r->terminal || !r->live) return;
    r->draw_lock = open("/proc/self/fd/2", O_WRONLY | O_NOCTTY | SPDL__O_CLOEXEC);
    if (r->draw_lock < 0) {
        r->draw_lock = fcntl(STDERR_FILENO, SPDL__F_DUPFD, STDERR_FILENO + 1);
    } else if (flock(r->draw_lock, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        (void)close(r->draw_lock);
        r->draw_lock = SPDL__NO_FILE;
    }
}

SPDL__PRIVATE void spdl__report_open_all(spdl__reporter *r) {
    r->table = r->plan.desc.table;
    r->live = r->plan.desc.live;
    r->json_file = r->page_lock = r->draw_lock = SPDL__NO_FILE;
    if (r->table || r->live) spdl__report_terminal(r);
    if (r->plan.json[0] != '\0') {
        r->json_file = spdl__own_file(r->plan.json, O_WRONLY | O_APPEND);
        if (r->json_file < 0)
            spdl__tell(&r->pipeline->logger, SPDL_LOG_WARN, "spdl: no statistics in %.400s: %s",
                       r->plan.json, strerror(errno));
    }
    if (r->samples != NULL) spdl__page_claim(r);
}

SPDL__PRIVATE void spdl__report_free(spdl__reporter *r) {
    const spdl_allocator *allocator = &r->pipeline->allocator;
    const int files[] = { r->json_file, r->page_lock, r->draw_lock };
    int i;
    for (i = 0; i < 3; ++i)
        if (files[i] >= 0) (void)close(files[i]);
    spdl__event_fini(&r->bell);
    spdl__free(allocator, r->samples, SPDL__SAMPLES * r->sample_width * sizeof(*r->samples));
    spdl__free(allocator, r->buffer, r->bytes);
    spdl__free(allocator, r->times, (size_t)r->pipeline->count * sizeof(*r->times));
    spdl__free(allocator, r, sizeof(*r));
}

/* Memory for everything the reports will need; false when there is too little. */
SPDL__PRIVATE bool spdl__report_allocate(spdl__reporter *r) {
    const spdl_allocator *allocator = &r->pipeline->allocator;
    const size_t stages = (size_t)r->pipeline->count;
    r->bytes = 2 * spdl__report_bytes_for(r->pipeline->count);
    r->buffer = (char *)spdl__alloc(allocator, r->bytes, sizeof(void *));
    r->times = (spdl_histogram *)spdl__alloc_zeroed(allocator, stages, sizeof(*r->times),
                                                    sizeof(void *));
    r->sample_width = SPDL__SAMPLE_TOP + stages * SPDL__SAMPLE_STAGE;
    r->sample_ns = SPDL__SAMPLE_NS;
    if (r->plan.html[0] != '\0') {
        r->samples = (uint64_t *)spdl__alloc(
            allocator, SPDL__SAMPLES * r->sample_width * sizeof(*r->samples), sizeof(void *));
        if (r->samples == NULL) return false;
    }
    return r->buffer != NULL && r->times != NULL;
}

/* After the pipeline has been made. Whatever goes wrong is a warning. */
SPDL__PRIVATE void spdl__report_begin(spdl_pipeline *p, const spdl_pipeline_desc *desc) {
    spdl__report_plan plan;
    spdl__reporter *r;
    bool begun;
    if (!spdl__report_ask(&plan, desc->report, &p->logger)) return;
    r = (spdl__reporter *)spdl__alloc_zeroed(&p->allocator, 1, sizeof(*r), sizeof(void *));
    if (r == NULL || !spdl__event_init(&r->bell)) {
        spdl__free(&p->allocator, r, sizeof(*r));
        spdl__tell(&p->logger, SPDL_LOG_WARN, "spdl: out of memory: no reports");
        return;
    }
    r->pipeline = p;
    r->plan = plan;
    r->run = spdl__unix_us();
    r->json_file = r->page_lock = r->draw_lock = SPDL__NO_FILE;
    spdl__name_copy(r->name, desc->name != NULL ? desc->name : "spdl");
    begun = spdl__report_allocate(r);
    if (begun) {
        spdl__report_open_all(r);
        spdl_process_read(&r->process_last);
        p->reporter = r;
        begun = spdl__thread_start(&r->thread, 0, spdl__report_main, r);
    }
    if (begun) return;
    spdl__tell(&p->logger, SPDL_LOG_WARN, "spdl: no memory or thread for reports: there are none");
    p->reporter = NULL;
    spdl__report_free(r);
}

/* Before the pipeline is freed: the last reports are written, the thread ends. */
SPDL__PRIVATE void spdl__report_end(spdl_pipeline *p) {
    spdl__reporter *r = p->reporter;
    if (r == NULL) return;
    spdl__store32(&r->quit, 1);
    spdl__event_wake(&r->bell, SPDL__ALL);
    spdl__thread_join(r->thread);
    p->reporter = NULL;
    spdl__report_free(r);
}

/* ============================================================================================= */
/* >>cache-impl
   Owner only, no locks. `item` holds what is kept; without copy_item an item that was handed out
   and not kept is `loan` until the next call. */

struct spdl_cache {
    spdl_cache_desc desc;
    void **item;
    uint64_t kept;
    uint64_t position; /* next one to hand out of the cache */
    uint64_t taken;    /* from the source */
    uint64_t given;    /* to the caller */
    void *loan;
    bool warm;
    bool owed; /* the item that was kept last is still to be handed out: its copy failed */
    bool source_deleted;
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

SPDL__PRIVATE spdl_result spdl__cache_new(spdl_cache **cache, const spdl_cache_desc *desc) {
    spdl_cache *made =
        (spdl_cache *)spdl__alloc_zeroed(&desc->allocator, 1, sizeof(*made), sizeof(void *));
    if (made == NULL) return SPDL_E_NOMEM;
    made->desc = *desc;
    made->desc.error = NULL; /* the caller's, for this call only */
    if (made->desc.return_caches_after == 0) made->desc.return_caches_after = desc->num_caches;
    made->item = (void **)spdl__alloc(&desc->allocator, (size_t)desc->num_caches * sizeof(void *),
                                      sizeof(void *));
    if (made->item == NULL) {
        spdl__free(&desc->allocator, made, sizeof(*made));
        return SPDL_E_NOMEM;
    }
    *cache = made;
    return SPDL_OK;
}

SPDL_API spdl_result spdl_cache_create(spdl_cache **cache, const spdl_cache_desc *desc) {
    spdl_result result;
    if (cache == NULL) return SPDL_E_INVALID;
    *cache = NULL;
    if (desc == NULL) return SPDL_E_INVALID;
    spdl__error_clear(desc->error);
    result = spdl__cache_check(desc);
    if (result == SPDL_OK) result = spdl__cache_new(cache, desc);
    if (result == SPDL_E_NOMEM) spdl__error_set(desc->error, result, "spdl: cache: out of memory");
    return result;
}

SPDL__PRIVATE void spdl__cache_free_item(const spdl_cache *cache, void *item) {
    if (item != NULL && cache->desc.free_item != NULL) cache->desc.free_item(item);
}

SPDL__PRIVATE void spdl__cache_delete_source(spdl_cache *cache) {
    if (cache->source_deleted) return;
    cache->source_deleted = true;
    if (cache->desc.delete_source != NULL) cache->desc.delete_source(cache->desc.source);
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
    if (++cache->taken >= cache->desc.return_caches_after) cache->warm = true;
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
/* >>crc-impl
   CRC-32 as ZIP has it. An archive fills the tables while it is opened, before any other thread can
   see it, and owns them; from then on they are only read, so any number of threads may use them at
   once. What the processor can do is asked then, too. Also the loads of little-endian numbers,
   which are right at any alignment and on any host.
   A CRC is the remainder of a division, in which the bytes are the digits of a long polynomial over
   GF(2). It stays the same when leading digits are replaced by others with the same remainder:
   so the fast ways multiply 128 bits (without carries) by what x^n is modulo the divisor and add
   them n digits further on, with many products under way at once. What is left of everything, 16
   bytes, goes through the tables. (V. Gopal and others, "Fast CRC Computation for Generic
   Polynomials Using PCLMULQDQ Instruction", 2009.) */

SPDL__PRIVATE uint16_t spdl__le16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

SPDL__PRIVATE uint32_t spdl__le32(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

SPDL__INLINE uint64_t spdl__le64(const uint8_t *p) {
    uint64_t value;
    memcpy(&value, p, 8);
    return SPDL__BIG_ENDIAN ? __builtin_bswap64(value) : value;
}

/* What the processor has; each one includes those before it. */
typedef enum spdl__crc_way {
    SPDL__CRC_TABLES,
    SPDL__CRC_BYTES,   /* arm64: instructions for the CRC of 8 bytes */
    SPDL__CRC_FOLD,    /* products of 64 bits: PCLMULQDQ, PMULL */
    SPDL__CRC_FOLD_512 /* four at once: VPCLMULQDQ on 512 bits */
} spdl__crc_way;

typedef struct spdl__crc {
    uint32_t table[8][256]; /* table[k][b]: what byte b does when k zero bytes follow it */
    uint64_t by_16[2], by_64[2],
        by_256[2]; /* what folds the low half over so many bytes, the high */
    spdl__crc_way way;
} spdl__crc;

/* The fast ways are twins: for x86-64, for arm64, and none for the others. */
#if defined(__x86_64__)
typedef long long spdl__v128 __attribute__((vector_size(16)));
typedef long long spdl__v512 __attribute__((vector_size(64)));
#define SPDL__CRC_FOLDS 1
#define SPDL__CRC_TARGET SPDL__TARGET("pclmul,sse4.1")
#define SPDL__CRC_TARGET_512 SPDL__TARGET("pclmul,avx512f,vpclmulqdq")

SPDL__PRIVATE spdl__crc_way spdl__crc_best(void) {
    if (!__builtin_cpu_supports("pclmul") || !__builtin_cpu_supports("sse4.1"))
        return SPDL__CRC_TABLES;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("vpclmulqdq"))
        return SPDL__CRC_FOLD;
    return SPDL__CRC_FOLD_512;
}

SPDL__CRC_TARGET SPDL__INLINE spdl__v128 spdl__crc_fold(spdl__v128 x, spdl__v128 by) {
    return __builtin_ia32_pclmulqdq128(x, by, 0x00) ^ __builtin_ia32_pclmulqdq128(x, by, 0x11);
}

#if defined(__clang__)
#define SPDL__CRC_CLMUL_512 __builtin_ia32_pclmulqdq512
#else
#define SPDL__CRC_CLMUL_512 __builtin_ia32_vpclmulqdq_v8di
#endif

/* Folds, and adds to what stands there. */
SPDL__CRC_TARGET_512 SPDL__INLINE void spdl__crc_fold_512(spdl__v512 *x, const spdl__v512 *by,
                                                          const void *there) {
    spdl__v512 next;
    memcpy(&next, there, 64);
    *x = SPDL__CRC_CLMUL_512(*x, *by, 0x00) ^ SPDL__CRC_CLMUL_512(*x, *by, 0x11) ^ next;
}

/* Folds whole 256 bytes into one, and this into the 64 of `state`. Returns how many bytes that
   were; there must be 256. */
SPDL__CRC_TARGET_512 SPDL__PRIVATE size_t spdl__crc_fold_wide(const spdl__crc *crc, uint32_t value,
                                                              const uint8_t *data, size_t bytes,
                                                              uint8_t *state) {
    const long long far_low = (long long)crc->by_256[0], far_high = (long long)crc->by_256[1];
    const long long low = (long long)crc->by_64[0], high = (long long)crc->by_64[1];
    const spdl__v512 by_256 = { far_low, far_high, far_low, far_high,
                                far_low, far_high, far_low, far_high };
    const spdl__v512 by_64 = { low, high, low, high, low, high, low, high };
    spdl__v512 x[4];
    size_t used = 256;
    memcpy(x, data, 256);
    x[0][0] ^= value;
    for (; bytes - used >= 256; used += 256) {
        spdl__crc_fold_512(&x[0], &by_256, data + used);
        spdl__crc_fold_512(&x[1], &by_256, data + used + 64);
        spdl__crc_fold_512(&x[2], &by_256, data + used + 128);
        spdl__crc_fold_512(&x[3], &by_256, data + used + 192);
    }
    spdl__crc_fold_512(&x[0], &by_64, &x[1]);
    spdl__crc_fold_512(&x[0], &by_64, &x[2]);
    spdl__crc_fold_512(&x[0], &by_64, &x[3]);
    memcpy(state, x, 64);
    return used;
}

#elif defined(__aarch64__) && !SPDL__BIG_ENDIAN
typedef long long spdl__v128 __attribute__((vector_size(16)));
#define SPDL__CRC_FOLDS 1
#define SPDL__CRC_TARGET

SPDL__PRIVATE spdl__crc_way spdl__crc_best(void) {
#if defined(__APPLE__)
    return SPDL__CRC_FOLD;
#elif defined(__linux__)
    const unsigned long has = getauxval(16); /* AT_HWCAP: bit 7 is CRC32, bit 4 is PMULL */
    if ((has >> 7 & 1) == 0) return SPDL__CRC_TABLES;
    return (has >> 4 & 1) != 0 ? SPDL__CRC_FOLD : SPDL__CRC_BYTES;
#else
    return SPDL__CRC_TABLES;
#endif
}

SPDL__INLINE spdl__v128 spdl__crc_fold(spdl__v128 x, spdl__v128 by) {
    spdl__v128 low, high;
    __asm__(".arch_extension crypto\n\tpmull %0.1q, %1.1d, %2.1d" : "=w"(low) : "w"(x), "w"(by));
    __asm__(".arch_extension crypto\n\tpmull2 %0.1q, %1.2d, %2.2d" : "=w"(high) : "w"(x), "w"(by));
    return low ^ high;
}

SPDL__PRIVATE uint32_t spdl__crc_words(uint32_t value, const uint8_t *data, size_t bytes) {
    for (; bytes >= 8; bytes -= 8, data += 8)
        __asm__(".arch_extension crc\n\tcrc32x %w0, %w0, %1" : "+r"(value) : "r"(spdl__le64(data)));
    return value;
}
#else
#define SPDL__CRC_FOLDS 0
SPDL__PRIVATE spdl__crc_way spdl__crc_best(void) { return SPDL__CRC_TABLES; }
#endif

/* What folds over so many bytes: the remainders of x^(8 bytes + 32) and of x^(8 bytes - 32). Digits
   are stored with the highest power lowest, and a product of two such numbers comes out one bit too
   low, so they are shifted by one. (The first four are in Gopal and others, "Fast CRC Computation
   for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009.) */
SPDL__PRIVATE void spdl__crc_folds(spdl__crc *crc) {
    crc->by_16[0] = 0x1751997d0u;
    crc->by_16[1] = 0x0ccaa009eu;
    crc->by_64[0] = 0x154442bd4u;
    crc->by_64[1] = 0x1c6e41596u;
    crc->by_256[0] = 0x11542778au;
    crc->by_256[1] = 0x1322d1430u;
}

/* The remainder of a byte is the sum of those of its bits, so each bit doubles what is known. */
SPDL__PRIVATE void spdl__crc_init(spdl__crc *crc) {
    uint32_t value, i, k, bit;
    for (k = 0; k < 8; k++) crc->table[k][0] = 0;
    for (bit = 0; bit < 8; bit++) {
        for (value = 1u << bit, i = 0; i < 8; i++)
            value = (value >> 1) ^ (value & 1 ? 0xedb88320u : 0u);
        for (i = 0; i < 1u << bit; i++) crc->table[0][(1u << bit) + i] = crc->table[0][i] ^ value;
    }
    for (k = 1; k < 8; k++) {
        for (bit = 0; bit < 8; bit++) {
            value = crc->table[k - 1][1u << bit];
            value = (value >> 8) ^ crc->table[0][value & 255];
            for (i = 0; i < 1u << bit; i++)
                crc->table[k][(1u << bit) + i] = crc->table[k][i] ^ value;
        }
    }
    spdl__crc_folds(crc);
    crc->way = spdl__crc_best();
}

/* Eight bytes a step, each through its own table. */
SPDL__PRIVATE uint32_t spdl__crc_tables(const spdl__crc *crc, uint32_t value, const uint8_t *data,
                                        size_t bytes) {
    uint32_t low, high;
#if defined(__aarch64__) && !SPDL__BIG_ENDIAN
    if (crc->way >= SPDL__CRC_BYTES) {
        value = spdl__crc_words(value, data, bytes);
        data += bytes & ~(size_t)7;
        bytes &= 7;
    }
#endif
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

/* Folds whole 64 bytes into the 64 of `state`, those into the last 16 of them, and whole 16 bytes
   into these. Returns how many bytes that were. */
SPDL__CRC_TARGET SPDL__PRIVATE size_t spdl__crc_fold_all(const spdl__crc *crc, uint8_t *state,
                                                         const uint8_t *data, size_t bytes) {
    const spdl__v128 by_64 = spdl__crc_load(crc->by_64), by_16 = spdl__crc_load(crc->by_16);
    spdl__v128 a = spdl__crc_load(state), b = spdl__crc_load(state + 16);
    spdl__v128 c = spdl__crc_load(state + 32), d = spdl__crc_load(state + 48);
    size_t used = 0;
    for (; bytes - used >= 64; used += 64) {
        a = spdl__crc_fold(a, by_64) ^ spdl__crc_load(data + used);
        b = spdl__crc_fold(b, by_64) ^ spdl__crc_load(data + used + 16);
        c = spdl__crc_fold(c, by_64) ^ spdl__crc_load(data + used + 32);
        d = spdl__crc_fold(d, by_64) ^ spdl__crc_load(data + used + 48);
    }
    b ^= spdl__crc_fold(a, by_16);
    c ^= spdl__crc_fold(b, by_16);
    d ^= spdl__crc_fold(c, by_16);
    for (; bytes - used >= 16; used += 16)
        d = spdl__crc_fold(d, by_16) ^ spdl__crc_load(data + used);
    memcpy(state + 48, &d, 16);
    return used;
}

/* For 64 bytes or more. The remainder so far is added to the first four of them. */
SPDL__PRIVATE uint32_t spdl__crc_folded(const spdl__crc *crc, uint32_t value, const uint8_t *data,
                                        size_t bytes) {
    uint8_t state[64];
    size_t used = 64;
    memcpy(state, data, 64);
    state[0] ^= (uint8_t)value;
    state[1] ^= (uint8_t)(value >> 8);
    state[2] ^= (uint8_t)(value >> 16);
    state[3] ^= (uint8_t)(value >> 24);
#if defined(__x86_64__)
    if (crc->way == SPDL__CRC_FOLD_512 && bytes >= 256)
        used = spdl__crc_fold_wide(crc, value, data, bytes, state);
#endif
    used += spdl__crc_fold_all(crc, state, data + used, bytes - used);
    return spdl__crc_tables(crc, spdl__crc_tables(crc, 0, state + 48, 16), data + used,
                            bytes - used);
}
#endif

/* The CRC of what `value` is the CRC of, followed by these bytes; start with 0. */
SPDL__PRIVATE uint32_t spdl__crc_add(const spdl__crc *crc, uint32_t value, const uint8_t *data,
                                     size_t bytes) {
#if SPDL__CRC_FOLDS
    if (bytes >= 64 && crc->way >= SPDL__CRC_FOLD)
        return ~spdl__crc_folded(crc, ~value, data, bytes);
#endif
    return ~spdl__crc_tables(crc, ~value, data, bytes);
}

/* ============================================================================================= */
/* >>inflate-impl
   Deflate (RFC 1951) from memory to memory. The state belongs to the thread that decodes and lives
   on its stack; nothing is allocated, nothing is shared but the tables of the fixed codes, which
   are only read. It stops before any byte of output and goes on from there, so that the head of a
   member can be had without the rest and the rest can go straight to the caller's memory.
   Two decoders share the tables: a careful one, symbol by symbol with every check, and a fast one,
   which runs while neither end is near and leaves whatever is not plain to the careful one, at the
   bit where it stands. The fast one runs up to two streams side by side. Decoding is one long
   chain: the next code begins where the last one ended, so a processor that could do six things at
   once waits for one. A second stream fills the gaps. Either decoder can write 16 bits for each
   byte: then a match may also copy what is no byte, which >>split-impl makes use of.
   Never is a byte read outside the input (or the room the caller tells behind it) or before the
   output, nor written past the limit of the call (or FAST_OUT bytes behind it, where the caller has
   no use for them); the time is linear in input plus output. It
   refuses what zlib refuses: codes that are over-subscribed, or incomplete except for a lone code
   of one bit; no code for the end of a block; lengths 286 and 287, distances 30 and 31; distances
   that reach back too far; stored blocks whose two lengths disagree; input that ends early. */

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

/* The tables of a block. Once filled they are only read, so those of the fixed codes may serve any
   number of decoders. */
typedef struct spdl__inflate_tables {
    uint32_t dist[SPDL__INFLATE_DIST_ENTRIES];
    uint32_t litlen[SPDL__INFLATE_LITLEN_ENTRIES];
    unsigned litlen_bits; /* of the first level; distances always have DIST_BITS */
} spdl__inflate_tables;

typedef struct spdl__inflate {
    const uint8_t *in, *in_begin, *in_end;
    const uint8_t *in_room; /* bytes up to here may be looked at; in_end when nothing is known */
    uint64_t bits;          /* input that was loaded and not used yet, the next bit lowest; those
                               above `count` are zero or what comes next */
    unsigned count;         /* how many */

    uint8_t *base, *out, *limit; /* output so far, and where this run must stop */
    const uint8_t *before;       /* the output that came before `base` and lies elsewhere */
    size_t before_bytes;
    bool slack;    /* FAST_OUT bytes behind `limit` may be written, too */
    unsigned wide; /* 1: every byte of output takes two of memory; 0: one */

    spdl__inflate_mode mode;
    const char *reason;
    bool last_block, fixed_ready; /* own tables hold the fixed codes */
    bool odd;                     /* the fast loop left a symbol that it cannot decode */
    bool by_block;                /* a run ends before every block, with BLOCK */
    unsigned stored_left;
    size_t match_left, match_distance; /* in memory */
    const spdl__inflate_tables *fixed;  /* NULL: they are made when they are needed */
    const spdl__inflate_tables *tables; /* of this block */
    spdl__inflate_tables own;
} spdl__inflate;

/* Afterwards the caller may set `fixed`, and `in_room` if memory behind the input can be read. */
SPDL__PRIVATE void spdl__inflate_init(spdl__inflate *s, const uint8_t *in, size_t bytes,
                                      uint8_t *out) {
    memset(s, 0, offsetof(spdl__inflate, own)); /* tables are filled before they are used */
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
   and all of it must be used, but for the lone code of one bit and the code without symbols. */
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

/* The bits of a subtable that begins with a code of `length` bits: so many that all codes which
   share its first `root` bits fit. count[] tells the codes that have no place yet. */
SPDL__PRIVATE unsigned spdl__inflate_sub_bits(const unsigned *count, unsigned length, unsigned root,
                                              unsigned longest) {
    unsigned bits = length - root, left = 1u << bits;
    while (bits + root < longest && count[bits + root] < left) {
        left = (left - count[bits + root]) * 2;
        bits++;
    }
    return bits;
}

/* How many codes of each length there are. */
SPDL__PRIVATE void spdl__inflate_count(unsigned *count, const uint8_t *lengths, unsigned symbols) {
    unsigned i;
    memset(count, 0, 16 * sizeof(*count));
    for (i = 0; i < symbols; i++) count[lengths[i]]++;
}

/* Sorts what the symbols mean, shorter codes first; those of symbols without a code go behind,
   unseen. A place that was just moved on can be used again only when that is done, so the first 128
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

/* Fills the subtables with the codes longer than `root`, of which `code` is the first. */
SPDL__PRIVATE void spdl__inflate_build_subs(uint32_t *table, unsigned root, unsigned longest,
                                            const uint32_t *sorted, unsigned used, unsigned *count,
                                            unsigned code, unsigned number) {
    unsigned i, at, length = root, bits = 0, sub = 0, end = 1u << root, prefix = ~0u;
    count[root] = 0; /* all have their place */
    for (i = 0; i < used; i++) {
        for (; count[length] == 0; length++) number *= 2;
        if ((code & ((1u << root) - 1)) != prefix) {
            prefix = code & ((1u << root) - 1);
            bits = spdl__inflate_sub_bits(count, length, root, longest);
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

/* Doubles a table that is filled so far; a few entries behind may change, if they are below 32. */
SPDL__INLINE void spdl__inflate_double(uint32_t *table, unsigned entries) {
    uint32_t sixteen[16];
    unsigned i;
    for (i = 0; i < entries; i += 16) {
        memcpy(sixteen, table + i, sizeof(sixteen));
        memcpy(table + entries + i, sixteen, sizeof(sixteen));
    }
}

/* Puts the codes of one length in their places and returns the next code. The first number is even,
   as every length begins with the double of the last one's: so codes come in pairs that differ in
   nothing but their last bit. */
SPDL__INLINE unsigned spdl__inflate_place(uint32_t *table, const uint32_t *sorted, unsigned codes,
                                          unsigned length, unsigned code, unsigned number) {
    const unsigned last = 1u << (length - 1);
    for (number /= 2; codes >= 2; codes -= 2, sorted += 2) {
        table[code] = sorted[0] + length * 0x101;
        table[code | last] = sorted[1] + length * 0x101;
        code = spdl__inflate_next_code(code, ++number, length - 1);
    }
    if (codes == 0) return code;
    table[code] = sorted[0] + length * 0x101;
    return code | last;
}

/* Fills a decoding table and returns the bits of its first level, or 0 when there is no such code.
   It is filled for codes of one bit, then doubled by a copy for those of two bits, and so on: every
   code is written once. The size of the large table follows the longest code, so that many tiny
   blocks cannot make it slow. count[] says how many codes of each length there are and is used up.
   A copy for each alphabet, so that each has only what it needs. */
SPDL__INLINE unsigned spdl__inflate_build(uint32_t *table, unsigned root,
                                          spdl__inflate_alphabet alphabet, const uint8_t *lengths,
                                          unsigned symbols, unsigned *count) {
    unsigned longest = 15, used, i = 0, length, code = 0, number = 0;
    uint32_t sorted[288];
    used = spdl__inflate_sort(sorted, alphabet, lengths, symbols, count);
    while (longest > 0 && count[longest] == 0) longest--;
    if (!spdl__inflate_complete(count, longest, alphabet)) return 0;
    if (root > longest && alphabet == SPDL__INFLATE_LITLEN) root = longest;
    if (longest <= 1) table[0] = table[1] = SPDL__INFLATE_BAD | 1;
    for (length = 1; length <= root; length++) {
        number *= 2;
        code = spdl__inflate_place(table, sorted + i, count[length], length, code, number);
        number += count[length];
        i += count[length];
        if (length < root && (i > 0 || longest <= 1))
            spdl__inflate_double(table, 1u << length);
    }
    if (i < used)
        spdl__inflate_build_subs(table, root, longest, sorted + i, used - i, count, code, number);
    return root;
}

SPDL__INLINE unsigned spdl__inflate_build_litlen(spdl__inflate_tables *tables,
                                                  const uint8_t *lengths, unsigned symbols,
                                                  unsigned *count) {
    tables->litlen_bits = spdl__inflate_build(tables->litlen, SPDL__INFLATE_LITLEN_BITS,
                                              SPDL__INFLATE_LITLEN, lengths, symbols, count);
    return tables->litlen_bits;
}

SPDL__INLINE unsigned spdl__inflate_build_dist(spdl__inflate_tables *tables,
                                                const uint8_t *lengths, unsigned symbols,
                                                unsigned *count) {
    return spdl__inflate_build(tables->dist, SPDL__INFLATE_DIST_BITS, SPDL__INFLATE_DIST, lengths,
                               symbols, count);
}

SPDL__INLINE unsigned spdl__inflate_build_precode(uint32_t *table, const uint8_t *lengths) {
    unsigned count[16];
    spdl__inflate_count(count, lengths, 19);
    return spdl__inflate_build(table, SPDL__INFLATE_PRECODE_BITS, SPDL__INFLATE_PRECODE, lengths,
                               19, count);
}

/* The entry for the code in the lowest bits. */
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

SPDL__PRIVATE void spdl__inflate_build_fixed(spdl__inflate_tables *tables) {
    uint8_t lengths[288];
    unsigned count[16];
    memset(lengths, 8, 144);
    memset(lengths + 144, 9, 112);
    memset(lengths + 256, 7, 24);
    memset(lengths + 280, 8, 8);
    spdl__inflate_count(count, lengths, 288);
    (void)spdl__inflate_build_litlen(tables, lengths, 288, count);
    memset(lengths, 5, 32);
    spdl__inflate_count(count, lengths, 32);
    (void)spdl__inflate_build_dist(tables, lengths, 32, count);
}

SPDL__PRIVATE bool spdl__inflate_fixed_block(spdl__inflate *s) {
    s->mode = SPDL__INFLATE_CODES;
    s->tables = s->fixed;
    if (s->fixed != NULL) return true;
    if (!s->fixed_ready) spdl__inflate_build_fixed(&s->own);
    s->fixed_ready = true;
    s->tables = &s->own;
    return true;
}

/* Reads the code lengths of both codes; they are themselves coded, with runs. lengths[] has room
   for `total` and 7 more; count[] gets how many there are of each. Which of them are runs cannot be
   foretold, so all are: 8 bytes are written for each, which are enough but for long runs of zeros,
   and zeros are there already. Four need no more bits than are loaded at once; when there were too
   few, `left` is far above 64. */
SPDL__INLINE bool spdl__inflate_lengths(spdl__inflate *s, const uint32_t *precode,
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

/* Fills the tables. */
SPDL__INLINE bool spdl__inflate_codes(spdl__inflate *s, const uint8_t *lengths, unsigned litlens,
                                       unsigned dists, unsigned *count) {
    unsigned of_dists[16], i;
    spdl__inflate_count(of_dists, lengths + litlens, dists);
    for (i = 0; i < 16; i++) count[i] -= of_dists[i];
    if (lengths[256] == 0) return spdl__inflate_fail(s, "a block has no code for its end");
    if (spdl__inflate_build_litlen(&s->own, lengths, litlens, count) == 0)
        return spdl__inflate_fail(s, "the literal code is no code");
    if (spdl__inflate_build_dist(&s->own, lengths + litlens, dists, of_dists) == 0)
        return spdl__inflate_fail(s, "the distance code is no code");
    s->tables = &s->own;
    s->mode = SPDL__INFLATE_CODES;
    return true;
}

SPDL__INLINE bool spdl__inflate_read_codes(spdl__inflate *s) {
    static const uint8_t place[19] = { 16, 17, 18, 0, 8,  7, 9,  6, 10, 5,
                                       11, 4,  12, 3, 13, 2, 14, 1, 15 };
    uint32_t precode[SPDL__INFLATE_PRECODE_ENTRIES];
    uint8_t lengths[286 + 30 + 7], of_lengths[19] = { 0 };
    unsigned litlens, dists, precodes, i, value;
    unsigned count[16] = { 0 };
    s->fixed_ready = false;
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
    if (!spdl__inflate_build_precode(precode, of_lengths))
        return spdl__inflate_fail(s, "the code of the code lengths is no code");
    return spdl__inflate_lengths(s, precode, lengths, litlens + dists, count) &&
           spdl__inflate_codes(s, lengths, litlens, dists, count);
}

/* Twice, as the fast loop is below. */
SPDL__PRIVATE bool spdl__inflate_read_codes_any(spdl__inflate *s) {
    return spdl__inflate_read_codes(s);
}

#if SPDL__X86
SPDL__TARGET("bmi,bmi2")
SPDL__PRIVATE bool spdl__inflate_read_codes_bmi2(spdl__inflate *s) {
    return spdl__inflate_read_codes(s);
}
#endif

SPDL__PRIVATE bool spdl__inflate_dynamic_block(spdl__inflate *s) {
#if SPDL__X86
    if (__builtin_cpu_supports("bmi2")) return spdl__inflate_read_codes_bmi2(s);
#endif
    return spdl__inflate_read_codes_any(s);
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
    if (header >> 1 == 1) return spdl__inflate_fixed_block(s);
    if (header >> 1 == 2) return spdl__inflate_dynamic_block(s);
    return spdl__inflate_fail(s, "a block is of no known kind");
}

/* Writes what was stored, as wide as it is wanted. */
SPDL__PRIVATE void spdl__inflate_put(spdl__inflate *s, const uint8_t *from, size_t bytes) {
    uint16_t value;
    if (!s->wide) {
        memcpy(s->out, from, bytes);
        s->out += bytes;
        return;
    }
    for (; bytes > 0; bytes--, s->out += 2) {
        value = *from++;
        memcpy(s->out, &value, 2);
    }
}

/* Copies from a stored block; false when the output is full. */
SPDL__PRIVATE bool spdl__inflate_stored(spdl__inflate *s) {
    size_t bytes = s->stored_left, room = (size_t)(s->limit - s->out) >> s->wide;
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
    spdl__inflate_put(s, s->in, bytes);
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

/* Begins a match, after which only spdl__inflate_match may write. */
SPDL__PRIVATE void spdl__inflate_begin_match(spdl__inflate *s, size_t length, size_t distance) {
    length <<= s->wide;
    distance <<= s->wide;
    if (distance > (size_t)(s->out - s->base) + s->before_bytes) {
        spdl__inflate_fail(s, "a distance reaches back before the first byte");
        return;
    }
    s->match_left = length;
    s->match_distance = distance;
}

/* What stands in a table but is neither literal nor length: the end, or an unused code. */
SPDL__PRIVATE void spdl__inflate_end_block(spdl__inflate *s, uint32_t entry) {
    if (entry & SPDL__INFLATE_BAD) {
        spdl__inflate_fail(s, "a code is not in use");
    } else {
        s->mode = SPDL__INFLATE_BLOCK;
    }
}

/* Decodes one symbol, with every check; false when the output is full. */
SPDL__PRIVATE bool spdl__inflate_symbol(spdl__inflate *s) {
    uint32_t entry;
    uint8_t literal;
    size_t length;
    if (s->count < 48) spdl__inflate_refill(s); /* the most a length and a distance take */
    entry = spdl__inflate_find(s->tables->litlen, s->tables->litlen_bits, s->bits);
    if ((entry & 255) > s->count) {
        spdl__inflate_fail(s, "the deflate stream is cut off");
        return true;
    }
    if (entry & SPDL__INFLATE_LITERAL) {
        if (s->out == s->limit) return false;
        literal = (uint8_t)(entry >> 16);
        spdl__inflate_put(s, &literal, 1);
        spdl__inflate_drop(s, entry & 255);
        return true;
    }
    length = spdl__inflate_value(entry, s->bits);
    spdl__inflate_drop(s, entry & 255);
    if (entry & SPDL__INFLATE_ODD) {
        spdl__inflate_end_block(s, entry);
        return true;
    }
    entry = spdl__inflate_find(s->tables->dist, SPDL__INFLATE_DIST_BITS, s->bits);
    if ((entry & 255) > s->count) {
        spdl__inflate_fail(s, "the deflate stream is cut off");
    } else if (entry & SPDL__INFLATE_BAD) {
        spdl__inflate_fail(s, "a code is not in use");
    } else {
        spdl__inflate_begin_match(s, length, spdl__inflate_value(entry, s->bits));
        spdl__inflate_drop(s, entry & 255);
    }
    return true;
}

/* The part of the state that the fast loop keeps in registers: a local copy, which no store through
   `out` can be thought to change. Whether it is wide is no part of it: each way has its own code,
   so `wide` is a constant wherever it is passed below. */
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

/* Whether there is room on both ends for a fast round. */
SPDL__PRIVATE bool spdl__inflate_can_run(const spdl__inflate *s) {
    return s->in_room - s->in >= SPDL__INFLATE_FAST_IN + 8 &&
           s->limit - s->out > spdl__inflate_out_left(s);
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
SPDL__INLINE uint32_t spdl__inflate_lane_literal(spdl__inflate_lane *l, unsigned wide,
                                                 uint32_t entry) {
    const uint16_t value = (uint8_t)(entry >> 16);
    if (wide) memcpy(l->out, &value, 2);
    else *l->out = (uint8_t)value;
    l->out += 1 + wide;
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

SPDL__INLINE void spdl__inflate_copy_32(uint8_t *out, const uint8_t *from) {
    uint64_t words[4];
    memcpy(words, from, 32);
    memcpy(out, words, 32);
}

SPDL__INLINE void spdl__inflate_fill(uint8_t *out, const uint8_t *end, uint64_t word) {
    do {
        memcpy(out, &word, 8);
        memcpy(out + 8, &word, 8);
        memcpy(out + 16, &word, 8);
        memcpy(out + 24, &word, 8);
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
            for (; out < end; out += 32, from += 32) spdl__inflate_copy_32(out, from);
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
SPDL__INLINE bool spdl__inflate_lane_match(spdl__inflate_lane *l, unsigned wide, uint32_t before,
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
    distance = spdl__inflate_value(entry, l->bits) << wide;
    length <<= wide;
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
SPDL__INLINE bool spdl__inflate_round(spdl__inflate_lane *l, unsigned wide) {
    uint32_t entry = l->entry;
    size_t length;
    if (entry & SPDL__INFLATE_LITERAL) {
        entry = spdl__inflate_lane_literal(l, wide, entry);
        if (entry & SPDL__INFLATE_LITERAL) {
            entry = spdl__inflate_lane_literal(l, wide, entry);
            if (entry & SPDL__INFLATE_LITERAL)
                return spdl__inflate_lane_go_on(l, spdl__inflate_lane_literal(l, wide, entry));
        }
    }
    if (SPDL__UNLIKELY(entry & SPDL__INFLATE_ODD)) {
        if (!(entry & SPDL__INFLATE_LINK)) return spdl__inflate_lane_leave(l, 0);
        entry = spdl__inflate_follow(l->tables->litlen, l->tables->litlen_bits, l->bits, entry);
        if (entry & SPDL__INFLATE_LITERAL)
            return spdl__inflate_lane_go_on(l, spdl__inflate_lane_literal(l, wide, entry));
        if (entry & SPDL__INFLATE_ODD) return spdl__inflate_lane_leave(l, 0);
    }
    length = spdl__inflate_value(entry, l->bits);
    spdl__inflate_lane_drop(l, entry);
    return spdl__inflate_lane_match(l, wide, entry, length);
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

/* Gives back all whole bytes that were loaded but not used. With room behind the input a lane may
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

/* One round, if there is room for it. */
SPDL__INLINE bool spdl__inflate_step(spdl__inflate_lane *l, unsigned wide) {
    if (SPDL__UNLIKELY(l->in >= l->in_stop)) return false; /* two branches: gcc joins an && */
    if (SPDL__UNLIKELY(l->out >= l->out_stop)) return false;
    return spdl__inflate_round(l, wide);
}

/* One or two streams, until one of them cannot go on fast. */
SPDL__INLINE void spdl__inflate_loop_1(spdl__inflate *s, unsigned wide) {
    spdl__inflate_lane a = spdl__inflate_lane_load(s);
    while (spdl__inflate_step(&a, wide)) continue;
    spdl__inflate_lane_store(&a, s);
}

SPDL__INLINE void spdl__inflate_loop_2(spdl__inflate *s, unsigned wide, spdl__inflate *t,
                                       unsigned wide_t) {
    spdl__inflate_lane a = spdl__inflate_lane_load(s), b = spdl__inflate_lane_load(t);
    while (spdl__inflate_step(&a, wide) && spdl__inflate_step(&b, wide_t)) continue;
    spdl__inflate_lane_store(&a, s);
    spdl__inflate_lane_store(&b, t);
}

SPDL__INLINE void spdl__inflate_loop(spdl__inflate *const *s, unsigned count) {
    if (count == 1 && s[0]->wide) spdl__inflate_loop_1(s[0], 1);
    else if (count == 1) spdl__inflate_loop_1(s[0], 0);
    else if (s[0]->wide && s[1]->wide) spdl__inflate_loop_2(s[0], 1, s[1], 1);
    else if (s[0]->wide != s[1]->wide) spdl__inflate_loop_2(s[s[0]->wide], 0, s[s[1]->wide], 1);
    else spdl__inflate_loop_2(s[0], 0, s[1], 0);
}

/* The same code twice: BMI2 shifts by any register and needs fewer moves for it. */
SPDL__PRIVATE void spdl__inflate_fast(spdl__inflate *const *s, unsigned count) {
    spdl__inflate_loop(s, count);
}

#if SPDL__X86
SPDL__TARGET("bmi,bmi2")
SPDL__PRIVATE void spdl__inflate_fast_bmi2(spdl__inflate *const *s, unsigned count) {
    spdl__inflate_loop(s, count);
}
#endif

SPDL__PRIVATE void spdl__inflate_fast_any(spdl__inflate *const *s, unsigned count) {
#if SPDL__X86
    if (__builtin_cpu_supports("bmi2")) {
        spdl__inflate_fast_bmi2(s, count);
        return;
    }
#endif
    spdl__inflate_fast(s, count);
}

/* Does one thing that needs care; false when the output is full. */
SPDL__PRIVATE bool spdl__inflate_careful_step(spdl__inflate *s) {
    if (s->mode == SPDL__INFLATE_STORED) return spdl__inflate_stored(s);
    if (s->mode == SPDL__INFLATE_CODES && s->match_left > 0) return spdl__inflate_match(s);
    s->odd = false;
    if (s->mode == SPDL__INFLATE_CODES) return spdl__inflate_symbol(s);
    spdl__inflate_block(s);
    return true;
}

/* Goes on with care until the fast loop can: CODES; otherwise what the run ended with. */
SPDL__PRIVATE spdl__inflate_mode spdl__inflate_careful(spdl__inflate *s) {
    for (;;) {
        if (s->mode == SPDL__INFLATE_DONE || s->mode == SPDL__INFLATE_FAILED ||
            (s->mode == SPDL__INFLATE_BLOCK && s->by_block))
            return s->mode;
        if (s->mode == SPDL__INFLATE_CODES && s->match_left == 0 && !s->odd &&
            spdl__inflate_can_run(s))
            return SPDL__INFLATE_CODES;
        if (!spdl__inflate_careful_step(s)) return SPDL__INFLATE_FULL;
    }
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
        spdl__inflate_fast_any(lanes, count);
    }
}

/* Decodes until the next byte of output would be at `limit`, the stream ends or is found to be bad.
   A later run may go on with a new limit, and with new memory if `before` tells the old. */
SPDL__PRIVATE spdl__inflate_mode spdl__inflate_run(spdl__inflate *s, uint8_t *limit) {
    spdl__inflate_mode ended;
    s->limit = limit;
    (void)spdl__inflate_run_lanes(&s, 1, &ended);
    return ended;
}

/* Decodes a whole stream, of which nothing has been decoded yet, to memory that it has to fill:
   then it ends with DONE and `out` is at the limit. */
SPDL__PRIVATE spdl__inflate_mode spdl__inflate_whole(spdl__inflate *s, uint8_t *limit) {
    spdl__inflate_mode mode;
#if defined(SPDL_INFLATE)
    if (SPDL_INFLATE(s->out, (size_t)(limit - s->out), s->in, (size_t)(s->in_end - s->in))) {
        s->out = limit;
        s->in = s->in_end;
        s->mode = SPDL__INFLATE_DONE;
        return s->mode;
    }
#endif
    mode = spdl__inflate_run(s, limit);
    return mode == SPDL__INFLATE_FULL ? spdl__inflate_run(s, limit) : mode;
}

/* Whether streams of such sizes gain from lanes: those with long matches are copies more than
   decoding, and a second one only takes the registers away. */
SPDL__PRIVATE bool spdl__inflate_gains(uint64_t csize, uint64_t usize) {
    return csize > usize / 10;
}

/* ============================================================================================= */
/* >>split-impl
   One large deflate stream decoded by several threads. It is cut into chunks of equal length. One
   thread, the front, decodes from the first byte on, to the caller's memory. Helpers take chunks
   further on: they look for a place where a block begins, and decode from there. What a match finds
   before that place they cannot know, so they write 16 bits for a byte: 32768 + n for byte n of the
   32 KB in front of the chunk. From where 32 KB without such marks have been made, they go on with
   bytes. The front, when it comes to a block that a chunk begins with, puts in what the marks stand
   for, copies the rest and goes on behind it. (The idea is that of pugz and rapidgzip.)
   Every thread decodes two streams side by side, as one that reads many arrays does: a helper two
   chunks, the front a chunk beside its own stream, or two while it waits. On data that is mostly
   literals this gains more than a second thread.
   The result is always the one of a single thread: a chunk counts only if the front arrives at its
   very first bit with 32 KB made, and only as far as its last block that is whole; everything else,
   errors included, the front decodes itself.
   Chunks are handed out in order and each has the buffer of its number modulo their count, so that
   memory is bounded: a chunk is begun when the front has done with the one whose buffer it gets.
   The front never waits for a chunk nobody has begun, and rather decodes one than waits. */

#define SPDL__SPLIT_CHUNK (1024 * 1024) /* of input; less for streams of less than 8 of them */
#define SPDL__SPLIT_LEAST (2 * 1024 * 1024)
#define SPDL__SPLIT_MARK 0x8000u
#define SPDL__SPLIT_MARKS UINT64_C(0x8000800080008000)

/* A chunk, by the thread that decodes it until `done` says its number, then by the front. */
typedef struct spdl__split_chunk {
    uint32_t done;       /* atomic: 1 + the number of the chunk that is here */
    uint32_t number;     /* of the chunk that is here or on its way */
    uint16_t *buffer;    /* WINDOW marks, then what was decoded as 16 bits, then as bytes */
    uint64_t begin, end; /* bits of input: whole blocks */
    uint64_t stop;       /* it takes no block that begins there or behind */
    size_t wide, bytes;  /* how many of either */
    size_t seen, clean;  /* of `wide`: looked through for marks, and where none have been since */
    const uint8_t *tail; /* the bytes */
    spdl__inflate inflate;
} spdl__split_chunk;

/* The chunks that a thread decodes side by side. */
typedef struct spdl__split_lanes {
    spdl__split_chunk *chunk[SPDL__INFLATE_LANES];
    unsigned count;
} spdl__split_lanes;

typedef struct spdl__split {
    spdl__inflate *inflate; /* the front's */
    size_t chunk_bytes, buffer_bytes;
    uint32_t chunks, slots;
    spdl_allocator allocator;
    void *memory; /* holds the table, slots and buffers */
    size_t memory_bytes;
    spdl__split_chunk *slot;
    uint8_t *lookup;         /* the front's: what a 16-bit number stands for */
    spdl__split_lanes lanes; /* the front's, beside its own stream */
    uint32_t front;  /* atomic: the chunk the front is in */
    uint32_t next;   /* atomic: the first that nobody has begun */
    uint32_t closed; /* atomic: no chunk is wanted any more */
    spdl__event event;
} spdl__split;

/* Whether a stream of such sizes is worth it: marks cost too much where most is matches. */
SPDL__PRIVATE bool spdl__split_gains(uint64_t csize, uint64_t usize) {
    return csize >= SPDL__SPLIT_LEAST && csize / 3 > usize / 10;
}

/* Prepares to go on with a stream, in `threads` threads, the front included. Its limit must be set
   and nothing of it decoded but its head. False: there is no memory; then nothing needs closing. */
SPDL__PRIVATE bool spdl__split_open(spdl__split *split, spdl__inflate *inflate, unsigned threads,
                                    const spdl_allocator *allocator) {
    const size_t csize = (size_t)(inflate->in_end - inflate->in_begin);
    const size_t usize = (size_t)(inflate->limit - inflate->out);
    size_t i, header;
    uint8_t *memory;
    memset(split, 0, sizeof(*split));
    split->inflate = inflate;
    split->allocator = *allocator;
    split->chunk_bytes = csize / 8 < SPDL__SPLIT_CHUNK ? csize / 8 + 1 : SPDL__SPLIT_CHUNK;
    split->chunks = (uint32_t)((csize + split->chunk_bytes - 1) / split->chunk_bytes);
    split->slots = SPDL__INFLATE_LANES * threads + 2; /* two may wait for the front */
    /* A quarter more than a chunk becomes on average, 16 bits each, and two windows. */
    split->buffer_bytes =
        (size_t)((double)split->chunk_bytes / (double)csize * (double)usize * 2.5);
    split->buffer_bytes = (split->buffer_bytes + 6 * SPDL__INFLATE_WINDOW) & ~(size_t)63;
    header = 2 * SPDL__SPLIT_MARK + ((split->slots * sizeof(*split->slot) + 63) & ~(size_t)63);
    split->memory_bytes = header + split->slots * split->buffer_bytes;
    memory = (uint8_t *)spdl__alloc(allocator, split->memory_bytes, 64);
    if (memory == NULL) return false;
    if (!spdl__event_init(&split->event)) {
        spdl__free(allocator, memory, split->memory_bytes);
        return false;
    }
    split->memory = memory;
    split->lookup = memory;
    split->slot = (spdl__split_chunk *)(void *)(memory + 2 * SPDL__SPLIT_MARK);
    for (i = 0; i < split->slots; i++) {
        split->slot[i].done = 0;
        split->slot[i].buffer = (uint16_t *)(void *)(memory + header + i * split->buffer_bytes);
    }
    split->next = 1;
    return true;
}

/* Where the next bit stands that is to be decoded. */
SPDL__PRIVATE uint64_t spdl__split_at(const spdl__inflate *s) {
    return (uint64_t)(s->in - s->in_begin) * 8 - s->count;
}

/* Goes on with a block that begins at this bit. */
SPDL__PRIVATE void spdl__split_seek(spdl__inflate *s, uint64_t bit) {
    s->in = s->in_begin + bit / 8;
    s->bits = 0;
    s->count = 0;
    s->mode = SPDL__INFLATE_BLOCK;
    s->last_block = false;
    if (bit % 8 == 0) return;
    s->bits = (uint64_t)*s->in++ >> bit % 8;
    s->count = 8 - (unsigned)(bit % 8);
}

/* Of the lowest 48 bits those at which a block of dynamic codes may begin that is not the last one:
   by its first three bits, and since there are no more than 286 and 30 codes. One in nine is. */
SPDL__PRIVATE uint64_t spdl__split_candidates(uint64_t bits) {
    const uint64_t two = bits & bits >> 1, four = two & two >> 2; /* ones from here on */
    return ~bits & ~(bits >> 1) & bits >> 2 & ~(four >> 4) & ~(four >> 9) & 0xffffffffffffu;
}

/* Whether the code of the code lengths, which such a block begins with, is complete. One candidate
   in hundreds is, by chance. */
SPDL__PRIVATE bool spdl__split_likely(const uint8_t *in, uint64_t bit) {
    unsigned left = (unsigned)(spdl__le64(in + (bit + 13) / 8) >> (bit + 13) % 8 & 15) + 4;
    uint64_t lengths = spdl__le64(in + (bit + 17) / 8) >> (bit + 17) % 8;
    unsigned space = 0;
    for (lengths &= ((uint64_t)1 << 3 * left) - 1; lengths > 0; lengths >>= 3)
        space += 128u >> (lengths & 7) & 127; /* a length of 0 takes no space */
    return space == 128;
}

/* Finds the first block from a bit on and reads its codes. Only dynamic blocks are looked for:
   others have no header that could be told from data, and are rare where this is worth it. */
SPDL__PRIVATE bool spdl__split_find(spdl__inflate *s, uint64_t from, uint64_t end) {
    uint64_t candidates, bit;
    for (; from < end; from += 48) {
        candidates = spdl__split_candidates(spdl__le64(s->in_begin + from / 8));
        for (; candidates > 0; candidates &= candidates - 1) {
            bit = from + (unsigned)__builtin_ctzll(candidates);
            if (!spdl__split_likely(s->in_begin, bit)) continue;
            spdl__split_seek(s, bit);
            if (!spdl__inflate_block(s)) continue;
            spdl__split_seek(s, bit);
            return true;
        }
    }
    return false;
}

/* Looks through what came since the last time: whether the last 32 KB are free of marks. */
SPDL__PRIVATE bool spdl__split_is_clean(spdl__split_chunk *chunk) {
    const uint16_t *const first = chunk->buffer + SPDL__INFLATE_WINDOW;
    size_t at = chunk->wide;
    uint64_t four;
    for (; at >= chunk->seen + 4; at -= 4) {
        memcpy(&four, first + at - 4, 8);
        if (four & SPDL__SPLIT_MARKS) break;
    }
    while (at > chunk->seen && first[at - 1] < SPDL__SPLIT_MARK) at--;
    if (at > chunk->seen) chunk->clean = at;
    chunk->seen = chunk->wide;
    return chunk->wide - chunk->clean >= SPDL__INFLATE_WINDOW;
}

/* Goes on with bytes, in front of which are the last 32 KB. False: there is no room. */
SPDL__PRIVATE bool spdl__split_narrow(spdl__split_chunk *chunk) {
    spdl__inflate *s = &chunk->inflate;
    const uint16_t *from = chunk->buffer + chunk->wide; /* a window before the end */
    uint8_t *to = (uint8_t *)(chunk->buffer + SPDL__INFLATE_WINDOW + chunk->wide);
    size_t i;
    if (s->limit - to < 2 * SPDL__INFLATE_WINDOW) return false;
    for (i = 0; i < SPDL__INFLATE_WINDOW; i++) to[i] = (uint8_t)from[i];
    s->base = to;
    s->out = to + SPDL__INFLATE_WINDOW;
    s->wide = 0;
    chunk->tail = s->out;
    return true;
}

/* After a block, or before the first: begins the next one. False: the chunk is at its end. */
SPDL__PRIVATE bool spdl__split_next_block(spdl__split_chunk *chunk) {
    spdl__inflate *s = &chunk->inflate;
    if (s->last_block) return false;
    if (s->wide) chunk->wide = (size_t)(s->out - s->base) / 2 - SPDL__INFLATE_WINDOW;
    else chunk->bytes = (size_t)(s->out - chunk->tail);
    chunk->end = spdl__split_at(s);
    if (chunk->end >= chunk->stop) return false;
    if (s->wide && spdl__split_is_clean(chunk) && !spdl__split_narrow(chunk)) return false;
    return spdl__inflate_block(s);
}

/* Writes marks, then 16 bits for a byte: any distance is one, since marks stand in front. */
SPDL__PRIVATE void spdl__split_widen(spdl__split_chunk *chunk, uint8_t *limit) {
    spdl__inflate *s = &chunk->inflate;
    size_t i;
    for (i = 0; i < SPDL__INFLATE_WINDOW; i++) chunk->buffer[i] = (uint16_t)(SPDL__SPLIT_MARK + i);
    s->out = s->base + 2 * SPDL__INFLATE_WINDOW;
    s->limit = limit;
    s->wide = 1;
    s->by_block = true;
    chunk->wide = chunk->bytes = chunk->seen = chunk->clean = 0;
    chunk->tail = NULL;
}

/* Begins with a chunk, in the first block that begins in it. False: there is none. */
SPDL__PRIVATE bool spdl__split_begin(const spdl__split *split, spdl__split_chunk *chunk,
                                     uint32_t number) {
    const spdl__inflate *front = split->inflate;
    const uint64_t bits = (uint64_t)split->chunk_bytes * 8, start = number * bits;
    const uint64_t input = (uint64_t)(front->in_end - front->in_begin) * 8;
    uint64_t last = start + bits;
    chunk->number = number;
    chunk->stop = last;
    chunk->begin = chunk->end = UINT64_MAX;
    spdl__inflate_init(&chunk->inflate, front->in_begin, (size_t)(input / 8),
                       (uint8_t *)chunk->buffer);
    chunk->inflate.in_room = front->in_room;
    chunk->inflate.fixed = front->fixed;
    if (input < 256 + start) return false;
    if (last > input - 256) last = input - 256; /* so far a header can be looked at */
    if (!spdl__split_find(&chunk->inflate, start, last)) return false;
    chunk->begin = spdl__split_at(&chunk->inflate);
    spdl__split_widen(chunk, (uint8_t *)chunk->buffer + split->buffer_bytes);
    return spdl__split_next_block(chunk);
}

SPDL__PRIVATE void spdl__split_publish(spdl__split *split, spdl__split_chunk *chunk) {
    spdl__store32(&chunk->done, chunk->number + 1); /* pairs with the acquire in spdl__split_wait */
    spdl__event_notify(&split->event, false, SPDL__ALL);
}

/* Takes the next chunk that nobody has begun. NULL: there is none to be had now, because all are
   begun or because their buffers are in use. */
SPDL__PRIVATE spdl__split_chunk *spdl__split_take(spdl__split *split, uint32_t *number) {
    *number = spdl__load32(&split->next);
    do {
        /* acquire, pairs with the release in spdl__split_step: the front has read that buffer */
        if (spdl__load32(&split->closed) != 0 || *number >= split->chunks ||
            *number - spdl__load32(&split->front) >= split->slots)
            return NULL;
    } while (!spdl__cas32(&split->next, number, *number + 1));
    return &split->slot[*number % split->slots];
}

/* Keeps so many lanes busy, if there are chunks for them. */
SPDL__PRIVATE void spdl__split_fill(spdl__split *split, spdl__split_lanes *lanes, unsigned most) {
    spdl__split_chunk *chunk;
    uint32_t number;
    while (lanes->count < most) {
        chunk = spdl__split_take(split, &number);
        if (chunk == NULL) return;
        if (spdl__split_begin(split, chunk, number)) lanes->chunk[lanes->count++] = chunk;
        else spdl__split_publish(split, chunk);
    }
}

/* A lane stopped: at the end of a block, or because it cannot go on. */
SPDL__PRIVATE void spdl__split_stopped(spdl__split *split, spdl__split_lanes *lanes,
                                       unsigned which, spdl__inflate_mode ended) {
    spdl__split_chunk *chunk = lanes->chunk[which];
    if (ended == SPDL__INFLATE_BLOCK && spdl__split_next_block(chunk)) return;
    lanes->count--;
    for (; which < lanes->count; which++) lanes->chunk[which] = lanes->chunk[which + 1];
    spdl__split_publish(split, chunk);
}

/* Decodes chunks, until one of them is a block further. False: there are none to be had. */
SPDL__PRIVATE bool spdl__split_turn(spdl__split *split, spdl__split_lanes *lanes) {
    spdl__inflate *states[SPDL__INFLATE_LANES];
    spdl__inflate_mode ended;
    unsigned i;
    spdl__split_fill(split, lanes, SPDL__INFLATE_LANES);
    if (lanes->count == 0) return false;
    for (i = 0; i < lanes->count; i++) states[i] = &lanes->chunk[i]->inflate;
    i = spdl__inflate_run_lanes(states, lanes->count, &ended);
    spdl__split_stopped(split, lanes, i, ended);
    return true;
}

/* What a helper does: decodes chunks until there are no more. It may be called at any time between
   open and close; it returns when all chunks are begun and its own are done, or when the front has
   come to its end and does not care for those any more. */
SPDL__PRIVATE void spdl__split_help(spdl__split *split) {
    spdl__split_lanes lanes = { { NULL }, 0 };
    uint32_t word;
    while (spdl__load32(&split->closed) == 0) {
        if (spdl__split_turn(split, &lanes)) continue;
        word = spdl__event_prepare(&split->event, false);
        if (spdl__load32(&split->closed) != 0 || spdl__load32(&split->next) >= split->chunks) {
            spdl__event_cancel(&split->event);
            return;
        }
        if (spdl__load32(&split->next) - spdl__load32(&split->front) < split->slots)
            spdl__event_cancel(&split->event);
        else (void)spdl__event_commit(&split->event, word, SPDL__NEVER);
    }
}

/* Writes what the 16-bit numbers stand for. */
SPDL__PRIVATE void spdl__split_resolve(uint8_t *to, const uint16_t *from, size_t count,
                                       const uint8_t *lookup) {
    for (; count >= 4; count -= 4, from += 4, to += 4) {
        to[0] = lookup[from[0]];
        to[1] = lookup[from[1]];
        to[2] = lookup[from[2]];
        to[3] = lookup[from[3]];
    }
    for (; count > 0; count--) *to++ = lookup[*from++];
}

/* Puts a chunk behind what the front has made, if it can be used. */
SPDL__PRIVATE void spdl__split_append(spdl__inflate *s, const spdl__split_chunk *chunk,
                                      uint8_t *lookup) {
    const size_t window = SPDL__INFLATE_WINDOW, made = (size_t)(s->out - s->base);
    size_t i;
    if (s->last_block || chunk->begin != spdl__split_at(s) || made < window) return;
    if (chunk->wide + chunk->bytes > (size_t)(s->limit - s->out)) return;
    for (i = 0; i < 256; i++) lookup[i] = (uint8_t)i;
    memcpy(lookup + SPDL__SPLIT_MARK, s->out - window, window);
    spdl__split_resolve(s->out, chunk->buffer + window, chunk->wide, lookup);
    s->out += chunk->wide;
    if (chunk->bytes > 0) memcpy(s->out, chunk->tail, chunk->bytes);
    s->out += chunk->bytes;
    spdl__split_seek(s, chunk->end);
}

/* Decodes what the front is in to the end of the block, with a chunk beside it. */
SPDL__PRIVATE spdl__inflate_mode spdl__split_run(spdl__split *split) {
    spdl__inflate *states[2];
    spdl__inflate_mode ended;
    unsigned count;
    states[0] = split->inflate;
    for (;;) {
        spdl__split_fill(split, &split->lanes, 1);
        count = split->lanes.count > 0 ? 2 : 1;
        if (count > 1) states[1] = &split->lanes.chunk[0]->inflate;
        if (spdl__inflate_run_lanes(states, count, &ended) == 0) return ended;
        spdl__split_stopped(split, &split->lanes, 0, ended);
    }
}

/* Decodes whole blocks up to the first that begins at `stop` or behind it. BLOCK: it is there. */
SPDL__PRIVATE spdl__inflate_mode spdl__split_advance(spdl__split *split, uint64_t stop) {
    spdl__inflate *s = split->inflate;
    spdl__inflate_mode mode = SPDL__INFLATE_BLOCK;
    s->by_block = true;
    if (s->mode != SPDL__INFLATE_BLOCK) mode = spdl__split_run(split);
    while (mode == SPDL__INFLATE_BLOCK && spdl__split_at(s) < stop) {
        (void)spdl__inflate_block(s);
        mode = spdl__split_run(split);
    }
    s->by_block = false;
    return mode;
}

/* Waits for a chunk, and decodes others meanwhile. */
SPDL__PRIVATE void spdl__split_wait(spdl__split *split, const uint32_t *done, uint32_t number) {
    uint32_t word;
    while (spdl__load32(done) != number) { /* pairs with the release in spdl__split_publish */
        if (spdl__split_turn(split, &split->lanes)) continue;
        word = spdl__event_prepare(&split->event, false);
        if (spdl__load32(done) == number) spdl__event_cancel(&split->event);
        else (void)spdl__event_commit(&split->event, word, SPDL__NEVER);
    }
}

/* What the front does: a chunk further. BLOCK: there is more; otherwise as a run to the limit. What
   was made so far is behind the `base` of its decoder, up to `out`. */
SPDL__PRIVATE spdl__inflate_mode spdl__split_step(spdl__split *split) {
    spdl__inflate *s = split->inflate;
    uint32_t number = split->front + 1, unbegun = number;
    const spdl__split_chunk *chunk = &split->slot[number % split->slots];
    spdl__inflate_mode mode;
    if (number >= split->chunks) return spdl__split_advance(split, UINT64_MAX);
    mode = spdl__split_advance(split, (uint64_t)number * split->chunk_bytes * 8);
    if (mode == SPDL__INFLATE_BLOCK && !spdl__cas32(&split->next, &unbegun, number + 1)) {
        spdl__split_wait(split, &chunk->done, number + 1); /* somebody has begun it */
        if (chunk->begin != UINT64_MAX) mode = spdl__split_advance(split, chunk->begin);
        if (mode == SPDL__INFLATE_BLOCK) spdl__split_append(s, chunk, split->lookup);
    }
    spdl__store32(&split->front, number); /* pairs with the acquire in spdl__split_take */
    spdl__event_notify(&split->event, false, SPDL__ALL);
    return mode;
}

/* Makes the helpers return, at the end of the block they are in. */
SPDL__PRIVATE void spdl__split_stop(spdl__split *split) {
    spdl__store32(&split->closed, 1);
    spdl__event_notify(&split->event, false, SPDL__ALL);
}

/* When all helpers have returned. */
SPDL__PRIVATE void spdl__split_close(spdl__split *split) {
    spdl__event_fini(&split->event);
    spdl__free(&split->allocator, split->memory, split->memory_bytes);
}

/* ============================================================================================= */
/* >>file-impl
   Plain files by position, so that any number of threads may read one at once. Functions return
   NULL, or a text that says why not. POSIX; Windows will be a twin of this section. */

#if defined(SPDL__STRICT)
extern ssize_t pread(int file, void *to, size_t bytes, off_t at);
extern ssize_t pwrite(int file, const void *from, size_t bytes, off_t at);
extern int fsync(int file);
#endif

/* The size of a plain file. A device or a pipe has none that could be trusted, and might make the
   caller wait: they are refused. */
SPDL__PRIVATE const char *spdl__file_size(spdl__file file, uint64_t *bytes) {
    struct stat status;
    if (fstat(file, &status) != 0) return strerror(errno);
    *bytes = (uint64_t)status.st_size;
    if (S_ISREG(status.st_mode)) return NULL;
    return S_ISDIR(status.st_mode) ? "a directory, not a file" : "a pipe or a device, not a file";
}

SPDL__PRIVATE void spdl__file_close(spdl__file file) {
    if (file != SPDL__NO_FILE) (void)close(file);
}

/* Opens a plain file to read; opening does not wait for a pipe either. */
SPDL__PRIVATE const char *spdl__file_open(spdl__file *file, const char *path, uint64_t *bytes) {
    const char *reason;
    *file = open(path, O_RDONLY | O_NONBLOCK | SPDL__O_CLOEXEC);
    if (*file < 0) return strerror(errno);
    reason = spdl__file_size(*file, bytes);
    if (reason == NULL) return NULL;
    (void)close(*file);
    *file = SPDL__NO_FILE;
    return reason;
}

/* Another descriptor for an open file, which lives on when the first is closed. */
SPDL__PRIVATE const char *spdl__file_duplicate(spdl__file *file, int from, uint64_t *bytes) {
    const char *reason = spdl__file_size(from, bytes);
    *file = SPDL__NO_FILE;
    if (reason != NULL) return reason;
    *file = fcntl(from, SPDL__F_DUPFD, 0);
    return *file < 0 ? strerror(errno) : NULL;
}

/* Reads `bytes` bytes at a place; *have says how many there were. */
SPDL__PRIVATE const char *spdl__file_read(spdl__file file, void *to, size_t bytes, uint64_t at,
                                          size_t *have) {
    for (*have = 0; *have < bytes;) {
        const ssize_t got = pread(file, (char *)to + *have, bytes - *have, (off_t)(at + *have));
        if (got == 0) return "it ended while it was read";
        if (got > 0)
            *have += (size_t)got;
        else if (errno != EINTR)
            return strerror(errno);
    }
    return NULL;
}

SPDL__PRIVATE const char *spdl__file_write(spdl__file file, const void *from, size_t bytes,
                                           uint64_t at) {
    size_t done = 0;
    while (done < bytes) {
        const ssize_t put =
            pwrite(file, (const char *)from + done, bytes - done, (off_t)(at + done));
        if (put == 0) return "nothing more can be written";
        if (put > 0)
            done += (size_t)put;
        else if (errno != EINTR)
            return strerror(errno);
    }
    return NULL;
}

/* NULL when it cannot be mapped. */
SPDL__PRIVATE const uint8_t *spdl__file_map(spdl__file file, uint64_t bytes) {
    void *memory = MAP_FAILED;
    if (bytes > 0 && bytes <= SIZE_MAX)
        memory = mmap(NULL, (size_t)bytes, PROT_READ, MAP_SHARED, file, 0);
    return memory != MAP_FAILED ? (const uint8_t *)memory : NULL;
}

SPDL__PRIVATE void spdl__file_unmap(const uint8_t *memory, uint64_t bytes) {
    if (memory != NULL) (void)munmap((void *)(uintptr_t)memory, (size_t)bytes);
}

/* Makes a file that was not there; false in *taken when there was one. */
SPDL__PRIVATE const char *spdl__file_create(spdl__file *file, const char *path, bool *taken) {
    *file = open(path, O_RDWR | O_CREAT | O_EXCL | SPDL__O_CLOEXEC, 0666);
    *taken = *file < 0 && errno == EEXIST;
    return *file < 0 ? strerror(errno) : NULL;
}

SPDL__PRIVATE const char *spdl__file_sync(spdl__file file) {
    return fsync(file) == 0 ? NULL : strerror(errno);
}

/* One file takes the place of another in one step. */
SPDL__PRIVATE const char *spdl__file_rename(const char *from, const char *to) {
    return rename(from, to) == 0 ? NULL : strerror(errno);
}

SPDL__PRIVATE void spdl__file_remove(const char *path) { (void)unlink(path); }

/* A number that the next call, and other processes, hardly have again. */
SPDL__PRIVATE uint64_t spdl__file_chance(void) {
    return ((uint64_t)getpid() << 32) ^ (spdl_time_ns() * 0x9e3779b97f4a7c15u);
}

/* ============================================================================================= */
/* >>zip-impl
   The directory of a ZIP archive, in memory or in a file. Opening reads the end record and the
   central directory, in time that grows with their length (names out of order: with n log n), and
   nothing of the members; a member's own header is checked each time the member is used, so that a
   broken member does not take the others with it. After opening only crc_state is written, so any
   thread may ask. Of a file the zip keeps a copy of its tail, in which the directory lies; archive
   bytes in memory stay the caller's; the directory made from them is one allocation of the zip.
   Sizes, CRC and method are those of the central directory: the local header of a current NumPy
   file says 0xffffffff. A member ends where the next one begins, at the latest. */

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

typedef struct spdl__zip_member {
    const uint8_t *key; /* the whole name, where the directory has it */
    char *name;         /* without ".npy", zero at the end; NULL: hidden by a later one */
    uint64_t offset;    /* of the local header, from the first byte in memory */
    uint64_t limit;     /* where the next member or the directory begins */
    uint64_t csize, usize;
    uint32_t crc;
    uint32_t hidden;    /* earlier members of the same name */
    uint32_t *state;    /* of the CRC, a spdl_npz_crc: written by any thread, whole and relaxed */
    uint16_t key_bytes, method, flags;
    bool overlaps;
} spdl__zip_member;

typedef struct spdl__zip {
    const uint8_t *data; /* all of it, or NULL when it is in the file */
    uint64_t size;
    spdl__file file;
    const uint8_t *tail; /* its bytes from tail_at on: all, or a block of the zip */
    uint64_t tail_at;
    size_t tail_bytes; /* of the block */
    char label[208];   /* the file, for messages; a long path loses its head */
    spdl_allocator allocator;
    spdl__zip_member *members;
    uint32_t *by_name; /* members in the order of spdl__zip_name_before */
    size_t count;
    void *block; /* holds members, by_name and the names */
    size_t block_bytes;
    uint64_t directory; /* where the central directory begins */
    uint64_t prefix;  /* bytes in front of the archive, which its offsets do not count */
} spdl__zip;

/* What the end records say. */
typedef struct spdl__zip_end {
    uint64_t entries, bytes, offset;
    uint64_t stop; /* where the central directory must end */
    bool wide;     /* a ZIP64 record was there: `entries` is the whole number */
} spdl__zip_end;

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

/* What is being looked at, and who wants to know what is wrong with it. */
typedef struct spdl__zip_where {
    const spdl__zip *zip;
    const spdl__zip_member *member; /* NULL: the archive as a whole */
    spdl_error *error;              /* may be NULL */
} spdl__zip_where;

/* Records "file: member 'name': reason" and returns the result. */
SPDL__PRIVATE spdl_result spdl__zip_fail(const spdl__zip_where *where, spdl_result result,
                                         const char *format, ...) SPDL__PRINTF(3, 4);

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

/* The byte at a place of the tail. */
SPDL__PRIVATE const uint8_t *spdl__zip_at(const spdl__zip *zip, uint64_t at) {
    return zip->tail + (at - zip->tail_at);
}

SPDL__PRIVATE void spdl__zip_drop_tail(spdl__zip *zip) {
    if (zip->data == NULL) spdl__free(&zip->allocator, SPDL__UNCONST(zip->tail), zip->tail_bytes);
    zip->tail = zip->data;
    zip->tail_at = 0;
}

/* Makes the tail begin at `at`, at the latest. */
SPDL__PRIVATE spdl_result spdl__zip_need_tail(const spdl__zip_where *where, spdl__zip *zip,
                                              uint64_t at) {
    const char *reason;
    uint8_t *block;
    size_t have = 0;
    if (zip->tail != NULL && at >= zip->tail_at) return SPDL_OK;
    spdl__zip_drop_tail(zip);
    if (zip->size - at > SIZE_MAX / 2)
        return spdl__zip_fail(where, SPDL_E_LIMIT, "a directory larger than the memory");
    zip->tail_bytes = (size_t)(zip->size - at);
    block = (uint8_t *)spdl__alloc(&zip->allocator, zip->tail_bytes, 64);
    if (block == NULL)
        return spdl__zip_fail(where, SPDL_E_NOMEM, "no memory for the directory (%llu bytes)",
                              (spdl__llu)zip->tail_bytes);
    zip->tail = block;
    zip->tail_at = at;
    reason = spdl__file_read(zip->file, block, zip->tail_bytes, at, &have);
    if (reason == NULL) return SPDL_OK;
    return spdl__zip_fail(where, SPDL_E_IO, "at byte %llu of %llu: %s", (spdl__llu)(at + have),
                          (spdl__llu)zip->size, reason);
}

/* The end record is the last thing in the file but for its comment. The first in the tail that ends
   with the file, seen from the back, is it; otherwise the last there is, as Python takes it. */
SPDL__PRIVATE bool spdl__zip_find_end(const spdl__zip *zip, uint64_t *end, bool *exact) {
    const uint64_t reach = SPDL__ZIP_END_BYTES + 65535;
    uint64_t at, first = zip->size > reach ? zip->size - reach : 0;
    bool found = false;
    *exact = false;
    if (zip->size < SPDL__ZIP_END_BYTES) return false;
    if (first < zip->tail_at) first = zip->tail_at;
    for (at = zip->size - SPDL__ZIP_END_BYTES + 1; at-- > first;) {
        if (spdl__le32(spdl__zip_at(zip, at)) != 0x06054b50) continue;
        if (at + SPDL__ZIP_END_BYTES + spdl__le16(spdl__zip_at(zip, at) + 20) == zip->size) {
            *end = at;
            *exact = true;
            return true;
        }
        if (!found) *end = at;
        found = true;
    }
    return found;
}

/* Looks in the last bytes of a file first, and in all that a comment can take then. */
SPDL__PRIVATE spdl_result spdl__zip_seek_end(const spdl__zip_where *where, spdl__zip *zip,
                                             uint64_t *end) {
    uint64_t reach = SPDL__ZIP_TAIL_BYTES;
    bool found, exact;
    for (;; reach = SPDL__ZIP_END_BYTES + 65535 + SPDL__ZIP_TAIL_BYTES) {
        spdl_result result =
            spdl__zip_need_tail(where, zip, zip->size > reach ? zip->size - reach : 0);
        if (result != SPDL_OK) return result;
        found = spdl__zip_find_end(zip, end, &exact);
        if (exact || zip->tail_at == 0 || reach > SPDL__ZIP_TAIL_BYTES) break;
    }
    if (found) return SPDL_OK;
    return spdl__zip_fail(where, SPDL_E_FORMAT,
                          "neither .npy nor .npz, or cut off: no end of a ZIP archive in "
                          "%llu bytes",
                          (spdl__llu)zip->size);
}

/* Takes the ZIP64 value of a field that is all ones in the older record; the two must not differ
   otherwise. */
SPDL__PRIVATE bool spdl__zip_widen(uint64_t *field, uint64_t ones, uint64_t wide) {
    bool fits = *field == ones || *field == wide;
    *field = wide;
    return fits;
}

/* Reads the ZIP64 end record when there is a locator for it in front of the end record at `at`. */
SPDL__PRIVATE spdl_result spdl__zip_read_end64(const spdl__zip_where *where, spdl__zip *zip,
                                               uint64_t at, spdl__zip_end *end) {
    const uint8_t *record;
    uint64_t position, latest;
    spdl_result result;
    if (at < zip->tail_at + SPDL__ZIP_LOCATOR_BYTES) return SPDL_OK;
    at -= SPDL__ZIP_LOCATOR_BYTES;
    if (spdl__le32(spdl__zip_at(zip, at)) != 0x07064b50) return SPDL_OK;
    if (spdl__le32(spdl__zip_at(zip, at) + 16) > 1)
        return spdl__zip_fail(where, SPDL_E_UNSUPPORTED, "archive of several disks");
    position = spdl__le64(spdl__zip_at(zip, at) + 8);
    latest = at >= SPDL__ZIP_END64_BYTES ? at - SPDL__ZIP_END64_BYTES : 0;
    if (position <= latest && latest - position < 65536) { /* what may be in it besides numbers */
        result = spdl__zip_need_tail(where, zip, position);
        if (result != SPDL_OK) return result;
    }
    if (position > latest || position < zip->tail_at ||
        spdl__le32(spdl__zip_at(zip, position)) != 0x06064b50) {
        position = latest; /* bytes in front of the archive: then it is the 56 before the locator */
    }
    record = spdl__zip_at(zip, position);
    if (at < SPDL__ZIP_END64_BYTES || position < zip->tail_at ||
        spdl__le32(record) != 0x06064b50 ||
        spdl__le64(record + 4) > at - position - 12)
        return spdl__zip_fail(where, SPDL_E_FORMAT,
                              "the ZIP64 locator at byte %llu leads to no ZIP64 end record",
                              (spdl__llu)at);
    end->wide = true;
    end->stop = position;
    if (!spdl__zip_widen(&end->entries, 0xffff, spdl__le64(record + 32)) ||
        !spdl__zip_widen(&end->bytes, 0xffffffff, spdl__le64(record + 40)) ||
        !spdl__zip_widen(&end->offset, 0xffffffff, spdl__le64(record + 48)))
        return spdl__zip_fail(where, SPDL_E_FORMAT,
                              "the end record at byte %llu and its ZIP64 record disagree",
                              (spdl__llu)at + SPDL__ZIP_LOCATOR_BYTES);
    return SPDL_OK;
}

/* Finds out where the central directory is, and proves that it is there. */
SPDL__PRIVATE spdl_result spdl__zip_read_end(const spdl__zip_where *where, spdl__zip *zip,
                                             uint64_t max_members, spdl__zip_end *end) {
    const uint8_t *record;
    uint64_t at = 0;
    spdl_result result = spdl__zip_seek_end(where, zip, &at);
    if (result == SPDL_OK) /* with the ZIP64 records before it */
        result = spdl__zip_need_tail(where, zip, at > 128 ? at - 128 : 0);
    if (result != SPDL_OK) return result;
    record = spdl__zip_at(zip, at);
    end->entries = spdl__le16(record + 10);
    end->bytes = spdl__le32(record + 12);
    end->offset = spdl__le32(record + 16);
    end->stop = at;
    end->wide = false;
    result = spdl__zip_read_end64(where, zip, at, end);
    if (result != SPDL_OK) return result;
    record = spdl__zip_at(zip, at); /* the tail may lie elsewhere now */
    if (spdl__le16(record + 4) != 0 && !(end->wide && spdl__le16(record + 4) == 0xffff))
        return spdl__zip_fail(where, SPDL_E_UNSUPPORTED, "archive of several disks");
    if (end->bytes > end->stop || end->offset > end->stop - end->bytes)
        return spdl__zip_fail(where, SPDL_E_FORMAT,
                              "a central directory of %llu bytes at byte %llu does not fit before "
                              "its end record at byte %llu",
                              (spdl__llu)end->bytes, (spdl__llu)end->offset, (spdl__llu)end->stop);
    zip->directory = end->stop - end->bytes;
    zip->prefix = zip->directory - end->offset;
    if (end->bytes >> 10 > max_members + 64)
        return spdl__zip_fail(where, SPDL_E_LIMIT,
                              "a central directory of %llu bytes, too many for max_members, which "
                              "is %llu",
                              (spdl__llu)end->bytes, (spdl__llu)max_members);
    return spdl__zip_need_tail(where, zip, zip->directory);
}

SPDL__PRIVATE size_t spdl__zip_entry_bytes(const uint8_t *entry) {
    return (size_t)SPDL__ZIP_ENTRY_BYTES + spdl__le16(entry + 28) + spdl__le16(entry + 30) +
           spdl__le16(entry + 32);
}

/* Walks over the directory: counts the entries and the bytes of their names, and proves that each
   entry is there as a whole. */
SPDL__PRIVATE spdl_result spdl__zip_measure(const spdl__zip_where *where, spdl__zip *zip,
                                            const spdl__zip_end *end, uint64_t max_members,
                                            size_t *names) {
    uint64_t at = zip->directory, stop = end->stop;
    const uint8_t *entry;
    *names = 0;
    for (zip->count = 0; at < stop; zip->count++, at += spdl__zip_entry_bytes(entry)) {
        entry = spdl__zip_at(zip, at);
        if (stop - at < SPDL__ZIP_ENTRY_BYTES || spdl__le32(entry) != 0x02014b50 ||
            stop - at < spdl__zip_entry_bytes(entry) ||
            memchr(entry + SPDL__ZIP_ENTRY_BYTES, 0, spdl__le16(entry + 28)) != NULL)
            return spdl__zip_fail(where, SPDL_E_FORMAT,
                                  "entry %llu of the central directory, at byte %llu, is damaged",
                                  (spdl__llu)zip->count, (spdl__llu)at);
        if (zip->count >= max_members)
            return spdl__zip_fail(where, SPDL_E_LIMIT,
                                  "more members than max_members, which is %llu",
                                  (spdl__llu)max_members);
        *names += (size_t)spdl__le16(entry + 28) + 1;
    }
    if (zip->count != end->entries && (end->wide || (zip->count & 0xffff) != end->entries))
        return spdl__zip_fail(where, SPDL_E_FORMAT,
                              "the central directory has %llu entries, its end record says %llu",
                              (spdl__llu)zip->count, (spdl__llu)end->entries);
    return SPDL_OK;
}

/* Takes the next 8 bytes of the ZIP64 extra field for a size that is all ones in the entry. */
SPDL__PRIVATE bool spdl__zip_take_wide(uint64_t *field, const uint8_t **extra, size_t *bytes) {
    if (*field != 0xffffffff) return true;
    if (*bytes < 8) return false;
    *field = spdl__le64(*extra);
    *extra += 8;
    *bytes -= 8;
    return true;
}

/* Looks for the ZIP64 field, which need not be the first. Up to three bytes that are no field may
   follow the last. */
SPDL__PRIVATE bool spdl__zip_read_extra(spdl__zip_member *member, const uint8_t *extra,
                                        size_t bytes) {
    size_t id, length;
    while (bytes >= 4) {
        id = spdl__le16(extra);
        length = spdl__le16(extra + 2);
        extra += 4;
        bytes -= 4;
        if (length > bytes) return false;
        if (id == 1)
            return spdl__zip_take_wide(&member->usize, &extra, &length) &&
                   spdl__zip_take_wide(&member->csize, &extra, &length) &&
                   spdl__zip_take_wide(&member->offset, &extra, &length);
        extra += length;
        bytes -= length;
    }
    return true;
}

/* Keys end in ".npy" in NumPy's files; one such ending is left out of the name. */
SPDL__PRIVATE void spdl__zip_copy_name(spdl__zip_member *member, char *name) {
    size_t bytes = member->key_bytes;
    if (bytes >= 4 && memcmp(member->key + bytes - 4, ".npy", 4) == 0) bytes -= 4;
    memcpy(name, member->key, bytes);
    name[bytes] = 0;
    member->name = name;
}

SPDL__PRIVATE spdl_result spdl__zip_read_entries(spdl__zip_where *where, spdl__zip *zip,
                                                 char *names) {
    const uint8_t *entry = spdl__zip_at(zip, zip->directory);
    spdl__zip_member *member;
    size_t i;
    for (i = 0; i < zip->count; i++, entry += spdl__zip_entry_bytes(entry)) {
        member = &zip->members[i];
        member->flags = spdl__le16(entry + 8);
        member->method = spdl__le16(entry + 10);
        member->crc = spdl__le32(entry + 16);
        member->csize = spdl__le32(entry + 20);
        member->usize = spdl__le32(entry + 24);
        member->key_bytes = spdl__le16(entry + 28);
        member->offset = spdl__le32(entry + 42);
        member->key = entry + SPDL__ZIP_ENTRY_BYTES;
        member->overlaps = false;
        member->hidden = 0;
        member->state = &zip->by_name[zip->count + i];
        *member->state = SPDL_NPZ_CRC_UNCHECKED;
        spdl__zip_copy_name(member, names);
        names += (size_t)member->key_bytes + 1;
        if (!spdl__zip_read_extra(member, member->key + member->key_bytes,
                                  spdl__le16(entry + 30))) {
            where->member = member;
            return spdl__zip_fail(where, SPDL_E_FORMAT,
                                  "the extra field of its directory entry is damaged");
        }
        if (member->offset > UINT64_MAX - zip->prefix) member->offset = UINT64_MAX;
        else member->offset += zip->prefix;
    }
    return SPDL_OK;
}

/* Orders of members. Equal ones keep the order of the directory. */
typedef bool (*spdl__zip_before)(const spdl__zip_member *a, const spdl__zip_member *b);

SPDL__PRIVATE bool spdl__zip_offset_before(const spdl__zip_member *a, const spdl__zip_member *b) {
    return a->offset != b->offset ? a->offset < b->offset : a < b;
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

SPDL__PRIVATE bool spdl__zip_name_before(const spdl__zip_member *a, const spdl__zip_member *b) {
    int order = spdl__zip_compare(a, b->key, b->key_bytes, "");
    return order != 0 ? order < 0 : a < b;
}

/* Lets order[root] sink to its place in a heap whose top is the last in order. */
SPDL__PRIVATE void spdl__zip_sift(const spdl__zip *zip, spdl__zip_before before, size_t root,
                                  size_t count) {
    uint32_t *order = zip->by_name, moved = order[root];
    size_t child;
    for (; (child = 2 * root + 1) < count; root = child) {
        if (child + 1 < count &&
            before(&zip->members[order[child]], &zip->members[order[child + 1]]))
            child++;
        if (!before(&zip->members[moved], &zip->members[order[child]])) break;
        order[root] = order[child];
    }
    order[root] = moved;
}

/* Fills by_name with the members in an order: a look when they are sorted already, a heap sort
   otherwise, which needs no memory, no recursion and never more than n log n. */
SPDL__PRIVATE void spdl__zip_sort(spdl__zip *zip, spdl__zip_before before) {
    size_t i, count = zip->count;
    uint32_t last;
    bool sorted = true;
    for (i = 0; i < count; i++) {
        zip->by_name[i] = (uint32_t)i;
        if (i > 0 && !before(&zip->members[i - 1], &zip->members[i])) sorted = false;
    }
    if (sorted) return;
    for (i = count / 2; i-- > 0;) spdl__zip_sift(zip, before, i, count);
    for (i = count; i-- > 1;) {
        last = zip->by_name[0];
        zip->by_name[0] = zip->by_name[i];
        zip->by_name[i] = last;
        spdl__zip_sift(zip, before, 0, i);
    }
}

/* Marks members that share bytes with another, and tells each where it must end. Two entries with
   one offset are two names for one place, of which the local header will confirm one at most. */
SPDL__PRIVATE void spdl__zip_find_limits(spdl__zip *zip) {
    spdl__zip_member *member, *other = NULL;
    uint64_t limit = zip->directory, start = limit, end = 0, bytes;
    size_t i;
    spdl__zip_sort(zip, spdl__zip_offset_before);
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
    spdl__free(&zip->allocator, zip->block, zip->block_bytes);
    zip->block = NULL;
}

/* Needs data or file, size, label and allocator. To be closed also after a failure. */
SPDL__PRIVATE spdl_result spdl__zip_open(spdl__zip *zip, uint64_t max_members, spdl_error *error) {
    size_t names = 0, each = sizeof(spdl__zip_member) + 2 * sizeof(uint32_t);
    spdl__zip_where where = { zip, NULL, error };
    spdl__zip_end end = { 0, 0, 0, 0, false };
    spdl_result result;
    if (max_members > 0x7fffffff) max_members = 0x7fffffff; /* they are numbered with 32 bits */
    zip->tail = zip->data;
    result = spdl__zip_read_end(&where, zip, max_members, &end);
    if (result == SPDL_OK) result = spdl__zip_measure(&where, zip, &end, max_members, &names);
    if (result != SPDL_OK || zip->count == 0) return result;
    if (zip->count > (SIZE_MAX - names) / each)
        return spdl__zip_fail(&where, SPDL_E_NOMEM, "no memory for the directory");
    zip->block_bytes = zip->count * each + names;
    zip->block = spdl__alloc(&zip->allocator, zip->block_bytes, 64);
    if (zip->block == NULL)
        return spdl__zip_fail(&where, SPDL_E_NOMEM, "no memory for the directory (%llu bytes)",
                              (spdl__llu)zip->block_bytes);
    zip->members = (spdl__zip_member *)zip->block;
    zip->by_name = (uint32_t *)(void *)(zip->members + zip->count);
    result = spdl__zip_read_entries(&where, zip, (char *)(zip->by_name + 2 * zip->count));
    if (result != SPDL_OK) return result;
    spdl__zip_find_limits(zip);
    spdl__zip_sort(zip, spdl__zip_name_before);
    if (spdl__zip_drop_hidden(zip)) spdl__zip_sort(zip, spdl__zip_name_before);
    return SPDL_OK;
}

/* The member whose whole name is `name` with `suffix`, or NULL. */
SPDL__PRIVATE const spdl__zip_member *spdl__zip_find(const spdl__zip *zip, const char *name,
                                                     const char *suffix) {
    size_t low = 0, high = zip->count, middle, bytes = strlen(name);
    const spdl__zip_member *member;
    int order;
    while (low < high) {
        middle = low + (high - low) / 2;
        member = &zip->members[zip->by_name[middle]];
        order = spdl__zip_compare(member, (const uint8_t *)name, bytes, suffix);
        if (order == 0) return member;
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return NULL;
}

/* Whether the member is one that can be read at all. */
SPDL__PRIVATE spdl_result spdl__zip_check_kind(const spdl__zip_where *where) {
    const spdl__zip_member *member = where->member;
    if (member->flags & (0x0001 | 0x0040 | 0x2000))
        return spdl__zip_fail(where, SPDL_E_UNSUPPORTED, "encrypted");
    if (member->flags & 0x0020)
        return spdl__zip_fail(where, SPDL_E_UNSUPPORTED, "holds patched data");
    if (member->method == SPDL__ZIP_STORED || member->method == SPDL__ZIP_DEFLATED) return SPDL_OK;
    return spdl__zip_fail(where, SPDL_E_UNSUPPORTED,
                          "compressed by method %u%s; only 0 (stored) and 8 (deflate) can be read",
                          (unsigned)member->method,
                          member->method == 12   ? " (bzip2)"
                          : member->method == 14 ? " (LZMA)"
                          : member->method == 93 ? " (Zstandard)"
                                                 : "");
}

/* Whether the directory's sizes can be true. Deflate makes at most 258 bytes of 2 bits. */
SPDL__PRIVATE spdl_result spdl__zip_check_sizes(const spdl__zip_where *where, uint64_t max_ratio) {
    const spdl__zip_member *member = where->member;
    if (member->method == SPDL__ZIP_STORED && member->csize != member->usize)
        return spdl__zip_fail(where, SPDL_E_FORMAT,
                              "stored, but the directory says %llu bytes and %llu in the file",
                              (spdl__llu)member->usize, (spdl__llu)member->csize);
    if (member->method == SPDL__ZIP_STORED) return SPDL_OK;
    if (member->usize / 1032 > member->csize)
        return spdl__zip_fail(where, SPDL_E_FORMAT, "%llu deflated bytes cannot become %llu",
                              (spdl__llu)member->csize, (spdl__llu)member->usize);
    if (member->usize / max_ratio > member->csize)
        return spdl__zip_fail(where, SPDL_E_LIMIT,
                              "grows from %llu to %llu bytes, more than max_ratio, which is %llu",
                              (spdl__llu)member->csize, (spdl__llu)member->usize,
                              (spdl__llu)max_ratio);
    return SPDL_OK;
}

/* Whether a member can be where the directory says, before its header is looked at. */
SPDL__PRIVATE spdl_result spdl__zip_check_place(const spdl__zip_where *where) {
    const spdl__zip_member *member = where->member;
    const uint64_t at = member->offset;
    if (at > member->limit || member->limit - at < SPDL__ZIP_LOCAL_BYTES)
        return spdl__zip_fail(where, SPDL_E_FORMAT,
                              "its header would be at byte %llu, past byte %llu where it must end",
                              (spdl__llu)at, (spdl__llu)member->limit);
    if (member->overlaps)
        return spdl__zip_fail(where, SPDL_E_FORMAT, "at byte %llu, overlaps another member",
                              (spdl__llu)at);
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
   can change about the data: byte order and index order. Everything here works in the caller's
   memory and keeps nothing. */

#define SPDL__NPY_HEAD_BYTES 65536           /* longest header text, unless the desc says other */
#define SPDL__NPY_NESTING 16                 /* structured types inside structured types */
#define SPDL__NPY_MOST ((uint64_t)INT64_MAX) /* NumPy's own bound for the bytes of an array */

/* Where the tokenizer is, and what went wrong first. */
typedef struct spdl__npy_text {
    const char *begin, *at, *end;
    spdl_npy_field *fields; /* where fields are put, as far as there is room */
    size_t room, field_count;
    bool foreign; /* a number is not in the byte order of this machine */
    spdl_result result;
    char reason[160];
} spdl__npy_text;

/* Records why, with the place in the header text; returns false. */
SPDL__PRIVATE bool spdl__npy_fail(spdl__npy_text *t, spdl_result result, const char *format, ...)
    SPDL__PRINTF(3, 4);

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

SPDL__PRIVATE void spdl__npy_skip_blanks(spdl__npy_text *t) {
    while (t->at != t->end &&
           (*t->at == ' ' || *t->at == '\n' || *t->at == '\t' || *t->at == '\r' || *t->at == '\f'))
        t->at++;
}

/* Takes the character if it comes next. */
SPDL__PRIVATE bool spdl__npy_take(spdl__npy_text *t, char c) {
    spdl__npy_skip_blanks(t);
    if (t->at == t->end || *t->at != c) return false;
    t->at++;
    return true;
}

SPDL__PRIVATE bool spdl__npy_need(spdl__npy_text *t, char c) {
    return spdl__npy_take(t, c) || spdl__npy_fail(t, SPDL_E_FORMAT, "'%c' is missing", c);
}

/* Takes what stands between quotes of either kind. A backslash hides the character behind it. */
SPDL__PRIVATE bool spdl__npy_string(spdl__npy_text *t, const char **string, size_t *bytes) {
    char quote = '\'';
    if (!spdl__npy_take(t, quote)) {
        quote = '"';
        if (!spdl__npy_take(t, quote)) return spdl__npy_fail(t, SPDL_E_FORMAT, "no string");
    }
    *string = t->at;
    for (; t->at != t->end && *t->at != quote; t->at++) {
        if (*t->at == '\\' && t->at + 1 != t->end) t->at++;
    }
    *bytes = (size_t)(t->at - *string);
    return spdl__npy_need(t, quote);
}

SPDL__PRIVATE bool spdl__npy_is(const char *string, size_t bytes, const char *word) {
    return bytes == strlen(word) && memcmp(string, word, bytes) == 0;
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

SPDL__PRIVATE bool spdl__npy_multiply(uint64_t *product, uint64_t factor) {
    if (factor != 0 && *product > SPDL__NPY_MOST / factor) return false;
    *product *= factor;
    return true;
}

/* One dimension, as Python writes numbers; Python 2 put an L behind some. */
SPDL__PRIVATE bool spdl__npy_dimension(spdl__npy_text *t, uint64_t *value) {
    const char *first;
    spdl__npy_skip_blanks(t);
    first = t->at;
    if (first != t->end && *first == '-')
        return spdl__npy_fail(t, SPDL_E_FORMAT, "the shape has a negative dimension");
    if (!spdl__npy_digits(&t->at, t->end, value) || (*first == '0' && t->at != first + 1))
        return spdl__npy_fail(t, SPDL_E_FORMAT, "the shape has a dimension that is no number");
    if (t->at != t->end && *t->at == 'L') t->at++;
    return true;
}

/* A tuple: (), (n,), (n, m) and so on; one number alone needs its comma. */
SPDL__PRIVATE bool spdl__npy_shape(spdl__npy_text *t, uint64_t *shape, int *ndim) {
    bool comma = true;
    if (!spdl__npy_need(t, '(')) return false;
    for (*ndim = 0; !spdl__npy_take(t, ')'); ++*ndim) {
        if (!comma) return spdl__npy_need(t, ',');
        if (*ndim == SPDL_NPY_MAX_DIMS)
            return spdl__npy_fail(t, SPDL_E_LIMIT, "more than %d dimensions", SPDL_NPY_MAX_DIMS);
        if (!spdl__npy_dimension(t, &shape[*ndim])) return false;
        comma = spdl__npy_take(t, ',');
    }
    if (*ndim == 1 && !comma) return spdl__npy_fail(t, SPDL_E_FORMAT, "the shape is no tuple");
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

SPDL__PRIVATE char spdl__npy_host_order(void) {
    const uint16_t one = 1;
    uint8_t first;
    memcpy(&first, &one, 1);
    return first == 1 ? '<' : '>';
}

/* A simple type, such as '<f4', '|S12' or '>M8[ns]'. */
SPDL__PRIVATE bool spdl__npy_simple(spdl__npy_text *t, char *kind, char *order,
                                    uint64_t *itemsize) {
    const char *at, *end, *string, host = spdl__npy_host_order();
    uint64_t number = 0;
    size_t bytes;
    bool known;
    if (!spdl__npy_string(t, &string, &bytes)) return false;
    at = string;
    end = string + bytes;
    *order = '=';
    if (at != end && (*at == '<' || *at == '>' || *at == '=' || *at == '|')) *order = *at++;
    *kind = at != end ? *at++ : 0;
    if (*kind == 'O')
        return spdl__npy_fail(t, SPDL_E_UNSUPPORTED,
                              "object arrays (dtype '|O') hold Python pickles and are not "
                              "supported");
    if (*kind == '?' && at == end) {
        *kind = 'b';
        *itemsize = 1;
        known = true;
    } else {
        if (*kind == 'a') *kind = 'S';
        known = spdl__npy_digits(&at, end, &number) && spdl__npy_itemsize(*kind, number, itemsize);
        if (at != end && (*kind == 'M' || *kind == 'm')) { /* the unit, as in [25us] */
            known = known && *at == '[' && end[-1] == ']' && end - at > 2;
        } else {
            known = known && at == end;
        }
    }
    if (!known)
        return spdl__npy_fail(t, SPDL_E_UNSUPPORTED, "dtype '%.*s' is not known",
                              (int)(bytes < 40 ? bytes : 40), string);
    if (*order == '=' || *order == '|') *order = host;
    if (*kind == 'S' || *kind == 'V' || (*kind != 'U' && *itemsize == 1)) *order = '|';
    t->foreign = t->foreign || (*order != '|' && *order != host);
    return true;
}

/* Copies a text that may be too long, cut between characters. */
SPDL__PRIVATE void spdl__npy_copy(char *to, size_t room, const char *from, size_t bytes) {
    if (bytes >= room) {
        bytes = room - 1;
        while (bytes > 0 && ((unsigned char)from[bytes] & 0xc0) == 0x80) bytes--;
    }
    memcpy(to, from, bytes);
    to[bytes] = 0;
}

/* Where the tokenizer is in a structured type. */
typedef struct spdl__npy_level {
    uint64_t total;        /* bytes of the fields so far */
    uint64_t start;        /* where in the element the struct lies */
    spdl_npy_field *field; /* that is this struct; NULL: the element, or there was no room */
} spdl__npy_level;

/* The beginning of a field up to its type: ('name', or (('title', 'name'), */
SPDL__PRIVATE bool spdl__npy_field_begin(spdl__npy_text *t, const spdl__npy_level *level, int depth,
                                         spdl_npy_field **field) {
    const char *string;
    size_t bytes;
    if (!spdl__npy_need(t, '(')) return false;
    if (spdl__npy_take(t, '(')) {
        if (!spdl__npy_string(t, &string, &bytes) || !spdl__npy_need(t, ',') ||
            !spdl__npy_string(t, &string, &bytes) || !spdl__npy_need(t, ')'))
            return false;
    } else if (!spdl__npy_string(t, &string, &bytes)) {
        return false;
    }
    *field = t->field_count < t->room ? &t->fields[t->field_count] : NULL;
    t->field_count++;
    if (*field != NULL) {
        memset(*field, 0, sizeof(**field));
        spdl__npy_copy((*field)->name, sizeof((*field)->name), string, bytes);
        (*field)->offset = level->start + level->total;
        (*field)->depth = depth;
    }
    return spdl__npy_need(t, ',');
}

/* The end of a field behind its type: an optional shape. Adds the field to its struct. */
SPDL__PRIVATE bool spdl__npy_field_end(spdl__npy_text *t, spdl_npy_field *field, uint64_t itemsize,
                                       uint64_t *total) {
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
    if (field == NULL) return true;
    memcpy(field->shape, shape, (size_t)ndim * sizeof(*shape));
    field->ndim = ndim;
    field->count = count;
    field->itemsize = itemsize;
    return true;
}

/* A simple type as that of a field. */
SPDL__PRIVATE bool spdl__npy_field_type(spdl__npy_text *t, spdl_npy_field *field,
                                        uint64_t *itemsize) {
    const char *first;
    char kind, order;
    spdl__npy_skip_blanks(t);
    first = t->at + 1;
    if (!spdl__npy_simple(t, &kind, &order, itemsize)) return false;
    if (field == NULL) return true;
    field->kind = kind;
    field->byte_order = order;
    spdl__npy_copy(field->descr, sizeof(field->descr), first, (size_t)(t->at - 1 - first));
    return true;
}

/* Goes down into a field that is structured itself. */
SPDL__PRIVATE bool spdl__npy_deeper(spdl__npy_text *t, spdl__npy_level *level, int *depth,
                                    spdl_npy_field *field) {
    if (*depth + 1 == SPDL__NPY_NESTING)
        return spdl__npy_fail(t, SPDL_E_LIMIT, "types nested more than %d deep", SPDL__NPY_NESTING);
    level[*depth + 1].start = level[*depth].start + level[*depth].total;
    level[*depth + 1].total = 0;
    level[*depth + 1].field = field;
    ++*depth;
    if (field == NULL) return true;
    field->structured = true;
    field->kind = 'V';
    field->byte_order = '|';
    return true;
}

/* A structured type behind its '[': fields, whose types may be structured in turn. */
SPDL__PRIVATE bool spdl__npy_structured(spdl__npy_text *t, uint64_t *itemsize) {
    spdl__npy_level level[SPDL__NPY_NESTING];
    spdl_npy_field *field;
    int depth = 0;
    memset(&level[0], 0, sizeof(level[0]));
    for (;;) {
        if (spdl__npy_take(t, ']')) {
            *itemsize = level[depth].total;
            field = level[depth].field;
            if (depth-- == 0) return true;
        } else {
            if (!spdl__npy_field_begin(t, &level[depth], depth, &field)) return false;
            if (spdl__npy_take(t, '[')) {
                if (!spdl__npy_deeper(t, level, &depth, field)) return false;
                continue;
            }
            if (!spdl__npy_field_type(t, field, itemsize)) return false;
        }
        if (!spdl__npy_field_end(t, field, *itemsize, &level[depth].total)) return false;
        if (!spdl__npy_take(t, ',') && (t->at == t->end || *t->at != ']'))
            return spdl__npy_need(t, ']');
    }
}

/* The type, and its text as the header has it, cut between characters when it is too long. */
SPDL__PRIVATE bool spdl__npy_descr(spdl__npy_text *t, spdl_npy_info *info) {
    const char *first, *last;
    spdl__npy_skip_blanks(t);
    first = t->at;
    if (spdl__npy_take(t, '[')) {
        info->structured = true;
        info->kind = 'V';
        info->byte_order = '|';
        if (!spdl__npy_structured(t, &info->itemsize)) return false;
        last = t->at;
    } else {
        if (!spdl__npy_simple(t, &info->kind, &info->byte_order, &info->itemsize)) return false;
        first++; /* without its quotes */
        last = t->at - 1;
    }
    spdl__npy_copy(info->descr, sizeof(info->descr), first, (size_t)(last - first));
    return true;
}

SPDL__PRIVATE bool spdl__npy_bool(spdl__npy_text *t, bool *value) {
    size_t left;
    spdl__npy_skip_blanks(t);
    left = (size_t)(t->end - t->at);
    *value = left >= 4 && memcmp(t->at, "True", 4) == 0;
    if (!*value && (left < 5 || memcmp(t->at, "False", 5) != 0))
        return spdl__npy_fail(t, SPDL_E_FORMAT, "fortran_order is neither True nor False");
    t->at += *value ? 4 : 5;
    return true;
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
    spdl__npy_skip_blanks(t);
    return t->at == t->end || spdl__npy_fail(t, SPDL_E_FORMAT, "text after the dictionary");
}

/* Goes over a word if it comes next, blanks and all. */
SPDL__PRIVATE bool spdl__npy_word(const char **at, const char *end, const char *word) {
    const size_t bytes = strlen(word);
    if ((size_t)(end - *at) < bytes || memcmp(*at, word, bytes) != 0) return false;
    *at += bytes;
    return true;
}

/* The inside of a shape as NumPy writes it, without the comma of a lone number. */
SPDL__PRIVATE bool spdl__npy_usual_shape(const char **at, const char *end, spdl_npy_info *info) {
    int ndim = 0;
    while (*at != end && **at != ')') {
        if (ndim == SPDL_NPY_MAX_DIMS || (ndim > 0 && !spdl__npy_word(at, end, ", "))) return false;
        if (end - *at < 2 || (**at == '0' && (*at)[1] >= '0' && (*at)[1] <= '9')) return false;
        if (!spdl__npy_digits(at, end, &info->shape[ndim++])) return false;
        if (ndim == 1 && spdl__npy_word(at, end, ",)")) --*at; /* now at the bracket */
        else if (ndim == 1 && *at != end && **at == ')') return false;
    }
    info->ndim = ndim;
    return true;
}

/* The text as NumPy writes it, which is nearly all there is: a simple type, the keys in order,
   blanks at the end. False when it is written in any other way, right or wrong; then the tokenizer
   reads it from the beginning. */
SPDL__PRIVATE bool spdl__npy_usual(spdl__npy_text *t, spdl_npy_info *info) {
    const char *at = t->at, *descr, *const end = t->end;
    if (!spdl__npy_word(&at, end, "{'descr': ") || at == end || *at != '\'') return false;
    t->at = descr = at;
    if (!spdl__npy_simple(t, &info->kind, &info->byte_order, &info->itemsize)) return false;
    spdl__npy_copy(info->descr, sizeof(info->descr), descr + 1, (size_t)(t->at - descr) - 2);
    at = t->at;
    if (spdl__npy_word(&at, end, ", 'fortran_order': True, 'shape': ("))
        info->fortran_order = true;
    else if (!spdl__npy_word(&at, end, ", 'fortran_order': False, 'shape': ("))
        return false;
    if (!spdl__npy_usual_shape(&at, end, info) || !spdl__npy_word(&at, end, "), }")) return false;
    while (spdl__npy_word(&at, end, "        ")) continue;
    while (at != end && (*at == ' ' || *at == '\n')) at++;
    return at == end;
}

/* Reads the text of a header into info, with the products. `fields` has room for so many. */
SPDL__PRIVATE bool spdl__npy_read(spdl__npy_text *t, const uint8_t *text, size_t bytes,
                                  spdl_npy_info *info, spdl_npy_field *fields, size_t room) {
    t->begin = t->at = (const char *)text;
    t->end = t->begin + bytes;
    t->fields = fields;
    t->room = room;
    t->field_count = 0;
    t->foreign = false;
    memset(info, 0, sizeof(*info));
    if (!spdl__npy_usual(t, info)) {
        t->at = t->begin;
        t->foreign = false;
        memset(info, 0, sizeof(*info));
        if (!spdl__npy_dictionary(t, info)) return false;
    }
    if (!spdl__npy_product(info->shape, info->ndim, info->itemsize, &info->count))
        return spdl__npy_fail(t, SPDL_E_FORMAT, "the product of the shape overflows");
    info->bytes = info->count * info->itemsize;
    return true;
}

/* Reverses the bytes of each of `count` numbers. */
SPDL__PRIVATE void spdl__npy_swap(uint8_t *data, uint64_t count, size_t bytes) {
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
SPDL__PRIVATE void spdl__npy_swap_kind(uint8_t *data, uint64_t bytes, char kind,
                                       uint64_t itemsize) {
    const uint64_t unit = kind == 'U' ? 4 : kind == 'c' ? itemsize / 2 : itemsize;
    if (bytes == 0) return;
    if (unit == 2) spdl__npy_swap(data, bytes / 2, 2); /* constants let the compiler do better */
    else if (unit == 4) spdl__npy_swap(data, bytes / 4, 4);
    else if (unit == 8) spdl__npy_swap(data, bytes / 8, 8);
    else spdl__npy_swap(data, bytes / unit, (size_t)unit);
}

/* Swaps field `which` in one element: as often as the fields around it are repeated. */
SPDL__PRIVATE void spdl__npy_swap_field(uint8_t *element, const spdl_npy_field *fields,
                                        size_t which) {
    const spdl_npy_field *leaf = &fields[which], *around[SPDL__NPY_NESTING];
    uint64_t times = 1, n, rest, at;
    int depth = leaf->depth, i;
    size_t k;
    for (k = which, i = depth; i > 0; k--) {
        if (fields[k].depth >= i) continue;
        around[--i] = &fields[k];
        times *= fields[k].count;
    }
    for (n = 0; n < times; n++) {
        at = leaf->offset;
        for (i = depth, rest = n; i-- > 0; rest /= around[i]->count)
            at += rest % around[i]->count * around[i]->itemsize;
        spdl__npy_swap_kind(element + at, leaf->count * leaf->itemsize, leaf->kind,
                            leaf->itemsize);
    }
}

SPDL__PRIVATE void spdl__npy_swap_fields(uint8_t *data, uint64_t count, uint64_t itemsize,
                                         const spdl_npy_field *fields, size_t field_count) {
    const char host = spdl__npy_host_order();
    uint64_t element;
    size_t i;
    for (i = 0; i < field_count; i++) {
        if (fields[i].structured || fields[i].byte_order == '|' || fields[i].byte_order == host ||
            fields[i].itemsize == 0 || fields[i].count == 0)
            continue;
        for (element = 0; element < count; element++)
            spdl__npy_swap_field(data + element * itemsize, fields, i);
    }
}

/* Copies rows x columns elements so that rows become columns, in tiles that the cache holds.
   `from` steps by one element along a column, `to` by one along a row. */
SPDL__PRIVATE void spdl__npy_turn(uint8_t *to, uint64_t to_row, const uint8_t *from,
                                  uint64_t from_column, uint64_t rows, uint64_t columns,
                                  size_t bytes) {
    const uint64_t tile = 32;
    uint64_t row, column, i, k, last_row, last_column;
    for (row = 0; row < rows; row += tile) {
        last_row = spdl__min(row + tile, rows);
        for (column = 0; column < columns; column += tile) {
            last_column = spdl__min(column + tile, columns);
            for (i = row; i < last_row; i++) {
                uint8_t *at = to + (i * to_row + column) * bytes;
                const uint8_t *source = from + (column * from_column + i) * bytes;
                for (k = column; k < last_column; k++, at += bytes, source += from_column * bytes) {
                    if (bytes == 4) memcpy(at, source, 4); /* constants become single moves */
                    else if (bytes == 8) memcpy(at, source, 8);
                    else memcpy(at, source, bytes);
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
   open and close four things change, each a word that is exchanged as a whole, so the other calls
   may run on any threads at once: what is known of the CRCs, the mapping that the first view makes,
   the tables that the first to verify or inflate makes, and one spare buffer. A call keeps its
   decoder (about 12 KB) and 4 KB of what it reads and makes on its own stack; for a larger deflated
   member of a large file, a long header, or what follows an array it takes the spare buffer, or
   allocates one. Sizes are proven plausible first: a deflated member is at most 1032 times its
   bytes in the file, an array at most its member. */

#ifndef SPDL__NPZ_SMALL_FILE
#define SPDL__NPZ_SMALL_FILE 262144 /* read at once up to here; measured against mapping it */
#endif
#define SPDL__NPZ_PIECE 131072      /* bytes whose CRC is taken while they are in the cache */
#define SPDL__NPZ_WINDOW 2048       /* of a file, on the stack */
#ifndef SPDL__NPZ_AT_ONCE
#define SPDL__NPZ_AT_ONCE 2048 /* members up to here are inflated whole, and the data copied */
#endif
#define SPDL__NPZ_SMALL 2048        /* headers up to here need no memory of their own */
#if SPDL__NPZ_AT_ONCE > SPDL__NPZ_SMALL
#error "SPDL__NPZ_AT_ONCE is larger than SPDL__NPZ_SMALL"
#endif
#define SPDL__NPZ_BEHIND 64         /* bytes that follow what is deflated, for inflate to look at */

/* A buffer that can be kept; its bytes follow. */
typedef struct spdl__npz_buffer {
    size_t bytes; /* with this head, which takes 64 */
} spdl__npz_buffer;

#define SPDL__NPZ_BUFFER_HEAD 64

/* What verifying and inflating need, made when one of them is first asked for. */
typedef struct spdl__npz_tables {
    spdl__crc crc;
    spdl__inflate_tables fixed;
} spdl__npz_tables;

struct spdl_npz {
    spdl__zip zip;         /* of a .npy file: one member, made up */
    spdl__zip_member only; /* that member */
    char only_name[8];
    uint32_t only_order, only_state;
    bool is_npy;
    spdl_npz_verify verify; /* NONE when there are no CRCs */
    unsigned convert;
    uint64_t max_bytes, max_header, max_ratio;
    size_t block_bytes; /* of this, with the bytes of a small file behind it */
    uint64_t *shared;   /* the next three, which calls on a const archive change */
    uint64_t mapping;   /* a const uint8_t *, or 0: set once by whoever needs it first */
    uint64_t spare;     /* a spdl__npz_buffer *, or 0: taken and put back by exchange */
    uint64_t tables;    /* a const spdl__npz_tables *, or 0: as the mapping */
};

/* A member in use, on the stack of the call that uses it. */
typedef struct spdl__npz_reader {
    const spdl_npz *npz;
    const spdl__zip_member *member;
    spdl__zip_where where;
    uint8_t *window; /* what is there of the file: local, or the bytes of `buffer` */
    size_t room, have;
    size_t ahead; /* how much of a file to read at once, at least */
    uint64_t window_at;
    const uint8_t *readable; /* the end of the memory in which the last bytes fetched lie */
    spdl__npz_buffer *buffer;
    const spdl__npz_tables *tables; /* NULL until they are needed */
    uint64_t payload;    /* where the member's bytes begin */
    const uint8_t *head; /* what comes before the data: in memory, in the window, or inflated */
    size_t head_bytes;
    uint64_t data_bytes; /* of the array */
    size_t in_bytes;     /* of the compressed bytes, how many inflate can see */
    bool stored;
    bool at_once;        /* all of the member is inflated to `small`, or about to be */
    bool swap, turn;     /* what is to be converted */
    size_t field_count;
    uint8_t *large;      /* a deflated header that `small` cannot hold */
    size_t large_bytes;
    uint8_t *trailer;    /* room to inflate what follows the array */
    uint8_t small[SPDL__NPZ_SMALL + SPDL__INFLATE_FAST_OUT];
    uint8_t local[SPDL__NPZ_WINDOW];
    spdl__inflate inflate;
} spdl__npz_reader;

SPDL__PRIVATE void spdl__npz_free_buffer(const spdl_npz *npz, uint64_t buffer) {
    spdl__npz_buffer *memory = (spdl__npz_buffer *)(uintptr_t)buffer;
    if (memory != NULL) spdl__free(&npz->zip.allocator, memory, memory->bytes);
}

/* A buffer for so many bytes: the spare one if it is large enough. */
SPDL__PRIVATE spdl__npz_buffer *spdl__npz_take_buffer(const spdl_npz *npz, size_t bytes) {
    uint64_t spare = spdl__exchange(&npz->shared[1], 0); /* whoever put it there has released it */
    spdl__npz_buffer *buffer = (spdl__npz_buffer *)(uintptr_t)spare;
    if (buffer != NULL && buffer->bytes - SPDL__NPZ_BUFFER_HEAD >= bytes) return buffer;
    spdl__npz_free_buffer(npz, spare);
    if (bytes > SIZE_MAX / 2) return NULL;
    buffer = (spdl__npz_buffer *)spdl__alloc(&npz->zip.allocator, bytes + SPDL__NPZ_BUFFER_HEAD,
                                             64);
    if (buffer != NULL) buffer->bytes = bytes + SPDL__NPZ_BUFFER_HEAD;
    return buffer;
}

SPDL__PRIVATE void spdl__npz_put_buffer(const spdl_npz *npz, spdl__npz_buffer *buffer) {
    if (buffer == NULL) return;
    spdl__npz_free_buffer(npz, spdl__exchange(&npz->shared[1], (uint64_t)(uintptr_t)buffer));
}

/* Makes the tables, or finds those that another call made. */
SPDL__PRIVATE spdl_result spdl__npz_need_tables(spdl__npz_reader *r) {
    const spdl_npz *npz = r->npz;
    uint64_t found = spdl__load(&npz->shared[2]); /* as the cas below released it */
    spdl__npz_tables *made;
    if (found == 0) {
        made = (spdl__npz_tables *)spdl__alloc(&npz->zip.allocator, sizeof(*made), 64);
        if (made == NULL)
            return spdl__zip_fail(&r->where, SPDL_E_NOMEM, "no memory for tables (%u bytes)",
                                  (unsigned)sizeof(*made));
        spdl__crc_init(&made->crc);
        spdl__inflate_build_fixed(&made->fixed);
        if (spdl__cas(&npz->shared[2], &found, (uint64_t)(uintptr_t)made))
            found = (uint64_t)(uintptr_t)made;
        else
            spdl__free(&npz->zip.allocator, made, sizeof(*made)); /* another was faster */
    }
    r->tables = (const spdl__npz_tables *)(uintptr_t)found;
    return SPDL_OK;
}

/* Makes the window hold `bytes`. What was in it is lost. */
SPDL__PRIVATE spdl_result spdl__npz_widen(spdl__npz_reader *r, size_t bytes) {
    if (bytes < r->ahead) bytes = r->ahead;
    if (bytes <= r->room) return SPDL_OK;
    r->have = r->room = 0;
    spdl__npz_put_buffer(r->npz, r->buffer);
    r->buffer = spdl__npz_take_buffer(r->npz, bytes);
    if (r->buffer == NULL)
        return spdl__zip_fail(&r->where, SPDL_E_NOMEM, "no memory for %llu of its bytes",
                              (spdl__llu)bytes);
    r->window = (uint8_t *)r->buffer + SPDL__NPZ_BUFFER_HEAD;
    r->room = r->buffer->bytes - SPDL__NPZ_BUFFER_HEAD;
    return SPDL_OK;
}

SPDL__PRIVATE spdl_result spdl__npz_read_at(const spdl__npz_reader *r, void *to, size_t bytes,
                                            uint64_t at, size_t *have) {
    const char *reason = spdl__file_read(r->npz->zip.file, to, bytes, at, have);
    if (reason == NULL) return SPDL_OK;
    return spdl__zip_fail(&r->where, SPDL_E_IO, "at byte %llu: %s", (spdl__llu)(at + *have),
                          reason);
}

/* Makes `bytes` bytes of the archive be at *from: in its memory, or in the window. They are known
   to be in the archive. */
SPDL__PRIVATE spdl_result spdl__npz_fetch(spdl__npz_reader *r, uint64_t at, size_t bytes,
                                          const uint8_t **from) {
    spdl_result result;
    size_t want;
    if (r->npz->zip.data != NULL) {
        *from = r->npz->zip.data + at;
        r->readable = r->npz->zip.data + r->npz->zip.size;
        return SPDL_OK;
    }
    if (at < r->window_at || at - r->window_at > r->have ||
        bytes > r->have - (size_t)(at - r->window_at)) {
        result = spdl__npz_widen(r, bytes > SPDL__NPZ_WINDOW ? bytes + SPDL__NPZ_BEHIND : bytes);
        if (result != SPDL_OK) return result;
        want = (size_t)spdl__min(r->room, r->npz->zip.size - at);
        if (bytes > SPDL__NPZ_PIECE) /* all that was asked for, and what inflate likes to see */
            want = (size_t)spdl__min(want, bytes + SPDL__NPZ_BEHIND);
        r->window_at = at;
        result = spdl__npz_read_at(r, r->window, want, at, &r->have);
        if (result != SPDL_OK && r->have < bytes) return result;
    }
    *from = r->window + (size_t)(at - r->window_at);
    r->readable = r->window + r->have;
    return SPDL_OK;
}

/* Copies bytes of the archive, those in the window from there. */
SPDL__PRIVATE spdl_result spdl__npz_copy_out(spdl__npz_reader *r, uint64_t at, uint8_t *to,
                                             size_t bytes) {
    const uint8_t *from = r->npz->zip.data;
    size_t have = 0;
    if (from != NULL) {
        memcpy(to, from + at, bytes);
        return SPDL_OK;
    }
    if (at >= r->window_at && at - r->window_at < r->have)
        have = (size_t)spdl__min(r->have - (at - r->window_at), bytes);
    if (have < bytes && bytes <= r->room / 2) { /* look ahead for what comes next */
        spdl_result result = spdl__npz_fetch(r, at, bytes, &from);
        if (result == SPDL_OK) memcpy(to, from, bytes);
        return result;
    }
    memcpy(to, r->window + (have > 0 ? (size_t)(at - r->window_at) : 0), have);
    return have == bytes ? SPDL_OK
                         : spdl__npz_read_at(r, to + have, bytes - have, at + have, &have);
}

/* Says why a deflated member did not give the bytes it should. */
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

/* Moves the head to memory that holds `bytes`. */
SPDL__PRIVATE spdl_result spdl__npz_grow_head(spdl__npz_reader *r, size_t bytes) {
    size_t have = (size_t)(r->inflate.out - r->inflate.base);
    const size_t room = bytes + SPDL__INFLATE_FAST_OUT;
    r->large = (uint8_t *)spdl__alloc(&r->npz->zip.allocator, room, 64);
    if (r->large == NULL)
        return spdl__zip_fail(&r->where, SPDL_E_NOMEM, "no memory for its header (%u bytes)",
                              (unsigned)bytes);
    r->large_bytes = room;
    memcpy(r->large, r->small, have);
    r->head = r->inflate.base = r->large;
    r->inflate.out = r->large + have;
    return SPDL_OK;
}

SPDL__PRIVATE void spdl__npz_drop_large(spdl__npz_reader *r) {
    spdl__free(&r->npz->zip.allocator, r->large, r->large_bytes);
    r->large = NULL;
}

/* Lets inflate begin with so many of the compressed bytes in sight. */
SPDL__PRIVATE spdl_result spdl__npz_start_inflate(spdl__npz_reader *r, size_t bytes) {
    const uint8_t *in = NULL;
    spdl_result result = spdl__npz_fetch(r, r->payload, bytes, &in);
    if (result != SPDL_OK) return result;
    spdl__npz_drop_large(r);
    r->head = r->small;
    r->in_bytes = bytes;
    spdl__inflate_init(&r->inflate, in, bytes, r->small);
    r->inflate.in_room = r->readable;
    r->inflate.fixed = &r->tables->fixed;
    r->inflate.slack = true;
    return SPDL_OK;
}

/* Makes the first `bytes` of the member be at r->head. */
SPDL__PRIVATE spdl_result spdl__npz_need_head(spdl__npz_reader *r, size_t bytes) {
    spdl_result result;
    spdl__inflate_mode ended;
    if (bytes > r->member->usize)
        return spdl__zip_fail(&r->where, SPDL_E_FORMAT, "no .npy array: %llu bytes, a header of %u",
                              (spdl__llu)r->member->usize, (unsigned)bytes);
    r->head_bytes = bytes;
    if (r->stored) return spdl__npz_fetch(r, r->payload, bytes, &r->head);
    if ((size_t)(r->inflate.out - r->inflate.base) >= bytes) return SPDL_OK;
    if (bytes > SPDL__NPZ_SMALL) {
        result = spdl__npz_grow_head(r, bytes);
        if (result != SPDL_OK) return result;
    }
    ended = spdl__inflate_run(&r->inflate, r->inflate.base + bytes);
    if (ended != SPDL__INFLATE_FAILED && r->inflate.out == r->inflate.limit) return SPDL_OK;
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
    if (length > r->npz->max_header)
        return spdl__zip_fail(&r->where, SPDL_E_LIMIT,
                              "a header of %lu bytes; max_header_bytes is %llu",
                              (unsigned long)length, (spdl__llu)r->npz->max_header);
    return spdl__npz_need_head(r, *text + length);
}

/* The same for a deflated member, of which the first bytes are inflated. Of one in a file the call
   sees all compressed bytes when it goes on to read it, otherwise only as many as it takes. */
SPDL__PRIVATE spdl_result spdl__npz_inflate_head(spdl__npz_reader *r, bool whole, size_t *text) {
    const size_t all = (size_t)r->member->csize;
    spdl_error *const error = r->where.error;
    size_t bytes = SPDL__NPZ_WINDOW / 2;
    spdl_result result = spdl__npz_need_tables(r);
    if (result != SPDL_OK) return result;
    for (;; bytes = bytes < SPDL__NPZ_PIECE ? SPDL__NPZ_PIECE : all) {
        if (whole || r->npz->zip.data != NULL || bytes > all) bytes = all;
        r->where.error = bytes == all ? error : NULL;
        result = spdl__npz_start_inflate(r, bytes);
        if (result == SPDL_OK) result = spdl__npz_read_head(r, text);
        r->where.error = error;
        if (result == SPDL_OK || bytes == all) return result;
        whole = result != SPDL_E_FORMAT; /* not for lack of input: once more, for its text */
    }
}

/* Whether all of a member that was found is to be inflated at once. */
SPDL__PRIVATE bool spdl__npz_fits_at_once(const spdl__npz_reader *r) {
#ifdef SPDL_INFLATE
    (void)r;
    return false;
#else
    return !r->stored && r->member->usize <= SPDL__NPZ_AT_ONCE;
#endif
}

/* Prepares for that: the decoder's limit is where the member ends. What a run up to there ended
   with matters only if it is not that limit: then the member is read as a larger one is. */
SPDL__PRIVATE spdl_result spdl__npz_start_at_once(spdl__npz_reader *r) {
    spdl_result result = spdl__npz_need_tables(r);
    if (result == SPDL_OK) result = spdl__npz_start_inflate(r, (size_t)r->member->csize);
    if (result != SPDL_OK) return result;
    r->inflate.limit = r->small + r->member->usize;
    r->at_once = true;
    return SPDL_OK;
}

/* Frees what begin took; also after it failed. */
SPDL__PRIVATE void spdl__npz_end(spdl__npz_reader *r) {
    if (r->npz == NULL) return;
    spdl__npz_drop_large(r);
    spdl__free(&r->npz->zip.allocator, r->trailer, (size_t)2 * SPDL__INFLATE_WINDOW);
    r->trailer = NULL;
}

/* Makes a reader that can be used for one member after the other. */
SPDL__PRIVATE void spdl__npz_init_reader(spdl__npz_reader *r, const spdl_npz *npz,
                                         spdl_error *error) {
    r->npz = npz;
    r->where.zip = npz != NULL ? &npz->zip : NULL;
    r->where.error = error;
    r->large = r->trailer = NULL;
    r->buffer = NULL;
    r->tables = NULL;
    r->window = r->local;
    r->room = sizeof(r->local);
    r->have = r->ahead = 0;
    r->window_at = 0;
}

SPDL__PRIVATE void spdl__npz_fini_reader(spdl__npz_reader *r) {
    if (r->npz != NULL) spdl__npz_put_buffer(r->npz, r->buffer);
}

/* Finds a member, and its bytes. */
SPDL__PRIVATE spdl_result spdl__npz_locate(spdl__npz_reader *r, size_t index) {
    const spdl_npz *npz = r->npz;
    const uint8_t *local = NULL;
    spdl_result result;
    r->where.member = NULL;
    if (npz == NULL)
        return spdl__error_set(r->where.error, SPDL_E_INVALID, "spdl_npz: npz is NULL");
    if (index >= npz->zip.count)
        return spdl__zip_fail(&r->where, SPDL_E_NOT_FOUND, "no array %llu; there are %llu",
                              (spdl__llu)index, (spdl__llu)npz->zip.count);
    r->member = r->where.member = &npz->zip.members[index];
    r->stored = r->member->method == SPDL__ZIP_STORED;
    r->at_once = false;
    r->payload = 0;
    if (npz->is_npy) return SPDL_OK;
    result = spdl__zip_check_kind(&r->where);
    if (result == SPDL_OK) result = spdl__zip_check_sizes(&r->where, npz->max_ratio);
    if (result == SPDL_OK) result = spdl__zip_check_place(&r->where);
    if (result == SPDL_OK)
        result = spdl__npz_fetch(
            r, r->member->offset,
            (size_t)spdl__min((uint64_t)SPDL__ZIP_LOCAL_BYTES + r->member->key_bytes,
                              r->member->limit - r->member->offset),
            &local);
    return result == SPDL_OK ? spdl__zip_check_local(&r->where, local, &r->payload) : result;
}

/* What desc.convert makes of an array: info tells it as it will be. */
SPDL__PRIVATE void spdl__npz_plan(spdl__npz_reader *r, bool foreign, spdl_npy_info *info) {
    r->swap = foreign && (r->npz->convert & SPDL_NPZ_NATIVE_BYTES) != 0;
    r->turn = info->fortran_order && (r->npz->convert & SPDL_NPZ_C_ORDER) != 0;
    if (r->turn) info->fortran_order = false;
    if (info->ndim < 2) r->turn = false;
    if (r->swap && !info->structured) info->byte_order = spdl__npy_host_order();
}

/* Reads the header of a member that was found. After SPDL_OK its data are known to fit, and inflate
   stands at their first byte, or behind them, with `whole` so that it can go on to the end. */
SPDL__PRIVATE spdl_result spdl__npz_begin_found(spdl__npz_reader *r, bool whole,
                                                spdl_npy_info *info, spdl_npy_field *fields,
                                                size_t room) {
    spdl__npy_text t;
    size_t text = 0;
    spdl_result result;
    if (r->at_once && (r->inflate.mode == SPDL__INFLATE_FAILED ||
                       r->inflate.out != r->inflate.limit))
        r->at_once = false; /* may have run on behind its input: again, step by step */
    result = r->stored || r->at_once ? spdl__npz_read_head(r, &text)
                                     : spdl__npz_inflate_head(r, whole, &text);
    if (result != SPDL_OK) return result;
    if (!spdl__npy_read(&t, r->head + text, r->head_bytes - text, info, fields, room))
        return spdl__zip_fail(&r->where, t.result, "%s", t.reason);
    info->version = r->head[6];
    info->header_bytes = r->head_bytes;
    r->field_count = t.field_count;
    r->data_bytes = info->bytes;
    if (info->bytes > r->member->usize - r->head_bytes)
        return spdl__zip_fail(
            &r->where, SPDL_E_FORMAT, "the shape needs %llu bytes, but %llu follow the header",
            (spdl__llu)info->bytes, (spdl__llu)(r->member->usize - r->head_bytes));
    if (info->bytes > r->npz->max_bytes)
        return spdl__zip_fail(&r->where, SPDL_E_LIMIT,
                              "%llu bytes, more than max_bytes, which is %llu",
                              (spdl__llu)info->bytes, (spdl__llu)r->npz->max_bytes);
    spdl__npz_plan(r, t.foreign, info);
    return SPDL_OK;
}

/* Finds a member and reads its header. */
SPDL__PRIVATE spdl_result spdl__npz_start(spdl__npz_reader *r, size_t index, bool whole,
                                          spdl_npy_info *info, spdl_npy_field *fields,
                                          size_t room) {
    spdl_result result = spdl__npz_locate(r, index);
    if (result == SPDL_OK && whole && spdl__npz_fits_at_once(r)) {
        result = spdl__npz_start_at_once(r);
        if (result == SPDL_OK) (void)spdl__inflate_run(&r->inflate, r->inflate.limit);
    }
    return result == SPDL_OK ? spdl__npz_begin_found(r, whole, info, fields, room) : result;
}

/* Compares a CRC with the directory's, and remembers what came of it. */
SPDL__PRIVATE spdl_result spdl__npz_check_crc(const spdl__npz_reader *r, uint32_t crc) {
    const bool good = crc == r->member->crc;
    spdl__store_relaxed32(r->member->state,
                          (uint32_t)(good ? SPDL_NPZ_CRC_GOOD : SPDL_NPZ_CRC_BAD));
    if (good) return SPDL_OK;
    return spdl__zip_fail(&r->where, SPDL_E_CHECKSUM, "CRC-32 is %08lx, the directory says %08lx",
                          (unsigned long)crc, (unsigned long)r->member->crc);
}

/* Inflates `bytes` more to where the output stands, and takes their CRC if crc is not NULL. */
SPDL__PRIVATE spdl_result spdl__npz_inflate_some(spdl__npz_reader *r, size_t bytes, uint32_t *crc) {
    uint8_t *from = r->inflate.out;
    spdl__inflate_mode ended = spdl__inflate_run(&r->inflate, from + bytes);
    if (r->inflate.out != from + bytes) return spdl__npz_inflate_error(r, ended);
    if (crc != NULL) *crc = spdl__crc_add(&r->tables->crc, *crc, from, bytes);
    return SPDL_OK;
}

/* max_bytes bounds what follows an array, too. */
SPDL__PRIVATE spdl_result spdl__npz_check_trailer(spdl__npz_reader *r) {
    const uint64_t left = r->member->usize - r->head_bytes - r->data_bytes;
    if (left <= r->npz->max_bytes) return SPDL_OK;
    return spdl__zip_fail(&r->where, SPDL_E_LIMIT, "%llu bytes follow the array, max_bytes is %llu",
                          (spdl__llu)left, (spdl__llu)r->npz->max_bytes);
}

/* Inflates what follows an array, only to see its CRC and its end. r->trailer is the window of the
   decoder, which holds the end of the data already, and as much room again. */
SPDL__PRIVATE spdl_result spdl__npz_inflate_trailer(spdl__npz_reader *r, const uint8_t *data,
                                                    size_t bytes, uint32_t *crc) {
    const size_t window = SPDL__INFLATE_WINDOW;
    uint64_t left = r->member->usize - r->head_bytes - bytes;
    size_t have = bytes < window ? bytes : window, more = 0, piece;
    spdl_result result = spdl__npz_check_trailer(r);
    if (result != SPDL_OK) return result;
    r->trailer = (uint8_t *)spdl__alloc(&r->npz->zip.allocator, 2 * window, 64);
    if (r->trailer == NULL)
        return spdl__zip_fail(&r->where, SPDL_E_NOMEM,
                              "no memory for what follows the array (%u bytes)",
                              (unsigned)(2 * window));
    if (have > 0) memcpy(r->trailer + window - have, data + bytes - have, have);
    if (have < window) more = window - have < r->head_bytes ? window - have : r->head_bytes;
    memcpy(r->trailer + window - have - more, r->head + r->head_bytes - more, more);
    r->inflate.before_bytes = 0;
    for (have += more; left > 0 && result == SPDL_OK; left -= piece) {
        piece = left < window ? (size_t)left : window;
        r->inflate.base = r->trailer + window - have;
        r->inflate.out = r->trailer + window;
        result = spdl__npz_inflate_some(r, piece, crc);
        have = have + piece < window ? have + piece : window;
        memmove(r->trailer, r->trailer + piece, window);
    }
    return result;
}

/* Turns the decoder, which stands behind the header, to the caller's memory. */
SPDL__PRIVATE uint32_t spdl__npz_inflate_to(spdl__npz_reader *r, uint8_t *data, bool verify) {
    r->inflate.before = r->head;
    r->inflate.before_bytes = r->head_bytes;
    r->inflate.base = r->inflate.out = data;
    r->inflate.slack = false;
    return verify ? spdl__crc_add(&r->tables->crc, 0, r->head, r->head_bytes) : 0;
}

/* Proves that the stream ends where its last byte of output was. */
SPDL__PRIVATE spdl_result spdl__npz_inflate_end(spdl__npz_reader *r, uint32_t crc, bool verify) {
    spdl__inflate_mode ended = spdl__inflate_run(&r->inflate, r->inflate.out);
    if (ended != SPDL__INFLATE_DONE) return spdl__npz_inflate_error(r, ended);
    return verify ? spdl__npz_check_crc(r, crc) : SPDL_OK;
}

#ifdef SPDL_INFLATE
/* By way of memory for the whole member, since that is how others decode. */
SPDL__PRIVATE spdl_result spdl__npz_inflate(spdl__npz_reader *r, uint8_t *data, size_t bytes,
                                            bool verify) {
    const uint64_t usize = r->member->usize;
    spdl__inflate_mode ended;
    spdl_result result = spdl__npz_check_trailer(r);
    uint8_t *all = NULL;
    if (result != SPDL_OK) return result;
    if (usize <= SIZE_MAX / 2)
        all = (uint8_t *)spdl__alloc(&r->npz->zip.allocator, (size_t)usize, 64);
    if (all == NULL)
        return spdl__zip_fail(&r->where, SPDL_E_NOMEM, "no memory for inflating it (%llu bytes)",
                              (spdl__llu)usize);
    spdl__inflate_init(&r->inflate, r->inflate.in_begin, (size_t)r->member->csize, all);
    ended = spdl__inflate_whole(&r->inflate, all + usize);
    if (ended != SPDL__INFLATE_DONE || r->inflate.out != all + usize)
        result = spdl__npz_inflate_error(r, ended);
    if (result == SPDL_OK && verify)
        result = spdl__npz_check_crc(r, spdl__crc_add(&r->tables->crc, 0, all, (size_t)usize));
    if (result == SPDL_OK) memcpy(data, all + r->head_bytes, bytes);
    spdl__free(&r->npz->zip.allocator, all, (size_t)usize);
    return result;
}
#else
/* Copies the first `bytes` of the data of a member that is inflated already. */
SPDL__PRIVATE spdl_result spdl__npz_copy_inflated(spdl__npz_reader *r, uint8_t *data, size_t bytes,
                                                  bool verify) {
    spdl_result result = spdl__npz_check_trailer(r);
    uint32_t crc = 0;
    if (result != SPDL_OK) return result;
    if (verify) crc = spdl__crc_add(&r->tables->crc, 0, r->small, (size_t)r->member->usize);
    memcpy(data, r->small + r->head_bytes, bytes);
    return spdl__npz_inflate_end(r, crc, verify);
}

/* Inflates the first `bytes` of the data to the caller's memory, then goes on to the end of the
   stream. */
SPDL__PRIVATE spdl_result spdl__npz_inflate(spdl__npz_reader *r, uint8_t *data, size_t bytes,
                                            bool verify) {
    spdl_result result = SPDL_OK;
    uint32_t crc;
    size_t left, piece;
    if (r->at_once) return spdl__npz_copy_inflated(r, data, bytes, verify);
    crc = spdl__npz_inflate_to(r, data, verify);
    for (left = bytes; left > 0 && result == SPDL_OK; left -= piece) {
        piece = left < SPDL__NPZ_PIECE ? left : SPDL__NPZ_PIECE;
        result = spdl__npz_inflate_some(r, piece, verify ? &crc : NULL);
    }
    if (result == SPDL_OK && r->member->usize - r->head_bytes > bytes)
        result = spdl__npz_inflate_trailer(r, data, bytes, verify ? &crc : NULL);
    return result == SPDL_OK ? spdl__npz_inflate_end(r, crc, verify) : result;
}
#endif

/* Takes the CRC of bytes of a stored member that nobody wants otherwise. */
SPDL__PRIVATE spdl_result spdl__npz_crc_over(spdl__npz_reader *r, uint64_t at, uint64_t bytes,
                                             uint32_t *crc) {
    const uint8_t *from = NULL;
    spdl_result result;
    size_t piece;
    for (; bytes > 0; bytes -= piece, at += piece) {
        piece = (size_t)spdl__min(bytes, SPDL__NPZ_PIECE);
        result = spdl__npz_fetch(r, at, piece, &from);
        if (result != SPDL_OK) return result;
        *crc = spdl__crc_add(&r->tables->crc, *crc, from, piece);
    }
    return SPDL_OK;
}

/* Copies the data of a stored member, and takes the CRC of all of it on the way. */
SPDL__PRIVATE spdl_result spdl__npz_copy_stored(spdl__npz_reader *r, uint8_t *data, size_t bytes,
                                                bool verify) {
    const uint64_t end = r->payload + r->member->usize;
    uint64_t at = r->payload + r->head_bytes;
    spdl_result result = SPDL_OK;
    uint32_t crc = 0;
    size_t piece;
    if (!verify) return spdl__npz_copy_out(r, at, data, bytes);
    result = spdl__npz_need_tables(r);
    if (result != SPDL_OK) return result;
    crc = spdl__crc_add(&r->tables->crc, 0, r->head, r->head_bytes);
    for (; bytes > 0 && result == SPDL_OK; bytes -= piece, data += piece, at += piece) {
        piece = (size_t)spdl__min(bytes, SPDL__NPZ_PIECE);
        result = spdl__npz_copy_out(r, at, data, piece);
        if (result == SPDL_OK) crc = spdl__crc_add(&r->tables->crc, crc, data, piece);
    }
    if (result == SPDL_OK) result = spdl__npz_crc_over(r, at, end - at, &crc);
    return result == SPDL_OK ? spdl__npz_check_crc(r, crc) : result;
}

/* The member as it is to the caller's memory. */
SPDL__PRIVATE spdl_result spdl__npz_read_plain(spdl__npz_reader *r, void *data, size_t bytes) {
    const bool verify = r->npz->verify != SPDL_NPZ_VERIFY_NONE;
    uint8_t *to = bytes > 0 ? (uint8_t *)data : r->small; /* may be NULL; is not written */
    return r->stored ? spdl__npz_copy_stored(r, to, bytes, verify)
                     : spdl__npz_inflate(r, to, bytes, verify);
}

/* Column-major to row-major on the way, by way of memory of the same size. */
SPDL__PRIVATE spdl_result spdl__npz_read_turned(spdl__npz_reader *r, void *data,
                                                const spdl_npy_info *info) {
    const size_t bytes = (size_t)info->bytes;
    spdl_result result;
    uint8_t *held = (uint8_t *)spdl__alloc(&r->npz->zip.allocator, bytes, 64);
    if (held == NULL)
        return spdl__zip_fail(&r->where, SPDL_E_NOMEM, "no memory to change its order (%llu bytes)",
                              (spdl__llu)bytes);
    result = spdl__npz_read_plain(r, held, bytes);
    if (result == SPDL_OK) spdl__npy_to_c_order((uint8_t *)data, held, info);
    spdl__free(&r->npz->zip.allocator, held, bytes);
    return result;
}

/* To the byte order of this machine, in place. The fields of a struct are in the header, which is
   read again for them. */
SPDL__PRIVATE spdl_result spdl__npz_swap(spdl__npz_reader *r, size_t index, uint8_t *data,
                                         uint64_t count, const spdl_npy_info *info) {
    const size_t fields = r->field_count, bytes = fields * sizeof(spdl_npy_field);
    spdl_npy_field *field;
    spdl_npy_info again;
    spdl_result result;
    if (!info->structured) {
        spdl__npy_swap_kind(data, count * info->itemsize, info->kind, info->itemsize);
        return SPDL_OK;
    }
    field = (spdl_npy_field *)spdl__alloc(&r->npz->zip.allocator, bytes, 64);
    if (field == NULL)
        return spdl__zip_fail(&r->where, SPDL_E_NOMEM, "no memory for its fields (%llu bytes)",
                              (spdl__llu)bytes);
    spdl__npz_end(r);
    result = spdl__npz_start(r, index, false, &again, field, fields);
    if (result == SPDL_OK && (again.bytes != info->bytes || r->field_count != fields))
        result = spdl__zip_fail(&r->where, SPDL_E_IO, "its header changed while it was read");
    if (result == SPDL_OK)
        spdl__npy_swap_fields(data, count, info->itemsize, field, fields);
    spdl__free(&r->npz->zip.allocator, field, bytes);
    return result;
}

/* Whether the array fits the memory it is to be read to. */
SPDL__PRIVATE spdl_result spdl__npz_check_memory(const spdl__npz_reader *r, const void *data,
                                                 size_t bytes, const spdl_npy_info *info) {
    if (info->bytes > bytes)
        return spdl__zip_fail(&r->where, SPDL_E_INVALID,
                              "the array has %llu bytes, the memory for it %llu",
                              (spdl__llu)info->bytes, (spdl__llu)bytes);
    if (data == NULL && info->bytes > 0)
        return spdl__zip_fail(&r->where, SPDL_E_INVALID, "the memory for it is NULL");
    return SPDL_OK;
}

/* Reads the array that was found. */
SPDL__PRIVATE spdl_result spdl__npz_finish_read(spdl__npz_reader *r, size_t index, void *data,
                                                const spdl_npy_info *info) {
    spdl_result result;
    if (r->turn && info->bytes > 0)
        result = spdl__npz_read_turned(r, data, info);
    else
        result = spdl__npz_read_plain(r, data, (size_t)info->bytes);
    if (result == SPDL_OK && r->swap && info->bytes > 0)
        result = spdl__npz_swap(r, index, (uint8_t *)data, info->count, info);
    return result;
}

/* The whole file as one mapping, made by the first who needs it. */
SPDL__PRIVATE const uint8_t *spdl__npz_map(const spdl_npz *npz) {
    uint64_t mapping = spdl__load(&npz->shared[0]), none = 0;
    const uint8_t *made;
    if (mapping != 0) return (const uint8_t *)(uintptr_t)mapping;
    made = spdl__file_map(npz->zip.file, npz->zip.size);
    if (made == NULL) return NULL;
    if (spdl__cas(&npz->shared[0], &none, (uint64_t)(uintptr_t)made)) return made;
    spdl__file_unmap(made, npz->zip.size); /* another thread was faster */
    return (const uint8_t *)(uintptr_t)none;
}

/* Reads a member only to see whether its CRC is right. */
SPDL__PRIVATE spdl_result spdl__npz_verify_member(spdl__npz_reader *r) {
    uint32_t crc = 0;
    spdl_result result;
    if (!r->stored) return spdl__npz_inflate(r, r->small, 0, true);
    result = spdl__npz_need_tables(r);
    if (result == SPDL_OK) result = spdl__npz_crc_over(r, r->payload, r->member->csize, &crc);
    return result == SPDL_OK ? spdl__npz_check_crc(r, crc) : result;
}

/* Makes a .npy file look like an archive of one stored member. */
SPDL__PRIVATE void spdl__npz_open_npy(spdl_npz *npz) {
    memset(&npz->only, 0, sizeof(npz->only));
    memcpy(npz->only_name, "arr_0", 6);
    npz->only.key = (const uint8_t *)"arr_0.npy";
    npz->only.key_bytes = 9;
    npz->only.name = npz->only_name;
    npz->only.limit = npz->only.csize = npz->only.usize = npz->zip.size;
    npz->only_order = 0;
    npz->only_state = SPDL_NPZ_CRC_NONE;
    npz->only.state = &npz->only_state;
    npz->zip.members = &npz->only;
    npz->zip.by_name = &npz->only_order;
    npz->zip.count = 1;
    npz->is_npy = true;
    npz->verify = SPDL_NPZ_VERIFY_NONE;
}

/* What an archive is made of. */
typedef struct spdl__npz_from {
    const char *name; /* for messages */
    const void *data; /* NULL: a file */
    uint64_t bytes;
    spdl__file file;
} spdl__npz_from;

SPDL__PRIVATE uint64_t spdl__npz_default(uint64_t value, uint64_t otherwise) {
    return value > 0 ? value : otherwise;
}

/* Makes an archive that holds no bytes yet but has room for those of a small file. */
SPDL__PRIVATE spdl_result spdl__npz_create(spdl_npz **npz, const spdl__npz_from *from,
                                           const spdl_npz_desc *desc) {
    const bool small = from->data == NULL && from->bytes <= SPDL__NPZ_SMALL_FILE;
    const size_t head = (sizeof(**npz) + 63) & ~(size_t)63;
    const size_t bytes = head + (small ? (size_t)from->bytes : 0);
    spdl_npz *made;
    if (spdl__allocator_check(&desc->allocator, "npz", desc->error) != SPDL_OK)
        return SPDL_E_INVALID;
    made = *npz = (spdl_npz *)spdl__alloc(&desc->allocator, bytes, 64);
    if (made == NULL)
        return spdl__error_set(desc->error, SPDL_E_NOMEM, "%.200s: no memory for the archive",
                               from->name);
    memset(made, 0, sizeof(*made));
    made->block_bytes = bytes;
    made->shared = &made->mapping;
    made->zip.allocator = desc->allocator;
    made->zip.size = from->bytes;
    made->zip.file = SPDL__NO_FILE;
    made->zip.data = small ? (const uint8_t *)made + head : (const uint8_t *)from->data;
    made->verify = desc->verify;
    made->convert = desc->convert;
    made->max_bytes = spdl__npz_default(desc->max_bytes, (uint64_t)1 << 40);
    made->max_header = spdl__npz_default(desc->max_header_bytes, SPDL__NPY_HEAD_BYTES);
    made->max_ratio = spdl__npz_default(desc->max_ratio, 1032);
    spdl__zip_set_label(&made->zip, from->name);
    return SPDL_OK;
}

/* Gets the bytes of a small file, or the first of a large one, which tell what it is. */
SPDL__PRIVATE spdl_result spdl__npz_load_start(spdl_npz *npz, spdl__npz_from *from,
                                               uint8_t magic[6], spdl_error *error) {
    const spdl__zip_where where = { &npz->zip, NULL, error };
    const char *reason = NULL;
    size_t have = 0;
    if (from->data != NULL) return SPDL_OK;
    if (npz->zip.data != NULL) {
        reason = spdl__file_read(from->file, (uint8_t *)npz + (npz->block_bytes - from->bytes),
                                 (size_t)from->bytes, 0, &have);
    } else {
        npz->zip.file = from->file; /* from here on the archive closes it */
        from->file = SPDL__NO_FILE;
        reason = spdl__file_read(npz->zip.file, magic, (size_t)spdl__min(from->bytes, 6), 0, &have);
    }
    if (reason == NULL) return SPDL_OK;
    return spdl__zip_fail(&where, SPDL_E_IO, "at byte %llu of %llu: %s", (spdl__llu)have,
                          (spdl__llu)from->bytes, reason);
}

/* Reads the directory. */
SPDL__PRIVATE spdl_result spdl__npz_open(spdl_npz *npz, spdl__npz_from *from,
                                         const spdl_npz_desc *desc) {
    const spdl__zip_where where = { &npz->zip, NULL, desc->error };
    uint8_t magic[6] = { 0 };
    spdl_result result = spdl__npz_load_start(npz, from, magic, desc->error);
    if (result != SPDL_OK) return result;
    if (npz->zip.size == 0) return spdl__zip_fail(&where, SPDL_E_FORMAT, "empty, 0 bytes");
    if (npz->zip.data != NULL && npz->zip.size >= 6) memcpy(magic, npz->zip.data, 6);
    if (memcmp(magic, "\x93NUMPY", 6) == 0) {
        spdl__npz_open_npy(npz);
        return SPDL_OK;
    }
    return spdl__zip_open(&npz->zip, spdl__npz_default(desc->max_members, (uint64_t)1 << 20),
                          desc->error);
}

/* Opens what there is; takes the file in any case. */
SPDL__PRIVATE spdl_result spdl__npz_open_from(spdl_npz **npz, spdl__npz_from *from,
                                              const spdl_npz_desc *desc) {
    spdl_npz_desc none;
    spdl_result result;
    memset(&none, 0, sizeof(none));
    if (desc == NULL) desc = &none;
    result = spdl__npz_create(npz, from, desc);
    if (result == SPDL_OK) {
        result = spdl__npz_open(*npz, from, desc);
        if (result != SPDL_OK) {
            spdl_npz_close(*npz);
            *npz = NULL;
        }
    }
    spdl__file_close(from->file);
    return result;
}

/* Whether there is what an open function needs; clears *npz. */
SPDL__PRIVATE bool spdl__npz_can_open(spdl_npz **npz, bool there, const char *function,
                                      const spdl_npz_desc *desc) {
    if (npz != NULL) *npz = NULL;
    if (npz != NULL && there) return true;
    spdl__error_set(desc != NULL ? desc->error : NULL, SPDL_E_INVALID, "%s: an argument is NULL",
                    function);
    return false;
}

SPDL__PRIVATE spdl_result spdl__npz_no_file(const char *name, const char *reason,
                                            const spdl_npz_desc *desc) {
    spdl__zip zip; /* only its label, for the message */
    const spdl__zip_where where = { &zip, NULL, desc != NULL ? desc->error : NULL };
    spdl__zip_set_label(&zip, name);
    return spdl__zip_fail(&where, SPDL_E_IO, "%s", reason);
}

SPDL_API spdl_result spdl_npz_open_file(spdl_npz **npz, const char *path,
                                        const spdl_npz_desc *desc) {
    spdl__npz_from from = { path, NULL, 0, SPDL__NO_FILE };
    const char *reason;
    if (!spdl__npz_can_open(npz, path != NULL, "spdl_npz_open_file", desc)) return SPDL_E_INVALID;
    reason = spdl__file_open(&from.file, path, &from.bytes);
    if (reason != NULL) return spdl__npz_no_file(path, reason, desc);
    return spdl__npz_open_from(npz, &from, desc);
}

SPDL_API spdl_result spdl_npz_open_fd(spdl_npz **npz, int fd, const char *name,
                                      const spdl_npz_desc *desc) {
    spdl__npz_from from = { name != NULL ? name : "file", NULL, 0, SPDL__NO_FILE };
    const char *reason;
    if (!spdl__npz_can_open(npz, true, "spdl_npz_open_fd", desc)) return SPDL_E_INVALID;
    reason = spdl__file_duplicate(&from.file, fd, &from.bytes);
    if (reason != NULL) return spdl__npz_no_file(from.name, reason, desc);
    return spdl__npz_open_from(npz, &from, desc);
}

SPDL_API spdl_result spdl_npz_open_memory(spdl_npz **npz, const void *data, size_t bytes,
                                          const char *name, const spdl_npz_desc *desc) {
    spdl__npz_from from = { name != NULL ? name : "memory", data, bytes, SPDL__NO_FILE };
    if (!spdl__npz_can_open(npz, data != NULL || bytes == 0, "spdl_npz_open_memory", desc))
        return SPDL_E_INVALID;
    if (data == NULL) from.data = "";
    return spdl__npz_open_from(npz, &from, desc);
}

SPDL_API void spdl_npz_close(spdl_npz *npz) {
    spdl_allocator allocator;
    if (npz == NULL) return;
    allocator = npz->zip.allocator;
    spdl__npz_free_buffer(npz, npz->spare);
    spdl__free(&allocator, (void *)(uintptr_t)npz->tables, sizeof(spdl__npz_tables));
    spdl__file_unmap((const uint8_t *)(uintptr_t)npz->mapping, npz->zip.size);
    spdl__file_close(npz->zip.file);
    spdl__zip_close(&npz->zip);
    spdl__free(&allocator, npz, npz->block_bytes);
}

SPDL_API size_t spdl_npz_count(const spdl_npz *npz) { return npz != NULL ? npz->zip.count : 0; }

SPDL_API const char *spdl_npz_name(const spdl_npz *npz, size_t index) {
    return index < spdl_npz_count(npz) ? npz->zip.members[index].name : NULL;
}

/* A name that fits as it is comes before one that lacks its ".npy". */
SPDL_API spdl_result spdl_npz_find(const spdl_npz *npz, const char *name, size_t *index) {
    const spdl__zip_member *member;
    if (npz == NULL || name == NULL) return SPDL_E_NOT_FOUND;
    member = spdl__zip_find(&npz->zip, name, "");
    if (member == NULL) member = spdl__zip_find(&npz->zip, name, ".npy");
    if (member == NULL) return SPDL_E_NOT_FOUND;
    if (index != NULL) *index = (size_t)(member - npz->zip.members);
    return SPDL_OK;
}

SPDL_API bool spdl_npz_stored(const spdl_npz *npz, size_t index) {
    return index < spdl_npz_count(npz) && npz->zip.members[index].method == SPDL__ZIP_STORED;
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
    member->crc_state = (spdl_npz_crc)spdl__load_relaxed32(from->state);
    member->duplicates = from->hidden;
    return SPDL_OK;
}

SPDL__PRIVATE spdl_result spdl__npz_describe(const spdl_npz *npz, size_t index, spdl_npy_info *info,
                                             spdl_npy_field *fields, size_t room, size_t *count,
                                             spdl_error *error) {
    spdl__npz_reader r;
    spdl_result result;
    spdl__npz_init_reader(&r, npz, error);
    result = spdl__npz_start(&r, index, false, info, fields, room);
    if (result == SPDL_OK) *count = r.field_count;
    spdl__npz_end(&r);
    spdl__npz_fini_reader(&r);
    return result;
}

SPDL_API spdl_result spdl_npz_info(const spdl_npz *npz, size_t index, spdl_npy_info *info,
                                   spdl_error *error) {
    size_t fields = 0;
    if (info == NULL) return spdl__error_set(error, SPDL_E_INVALID, "spdl: npz: info is NULL");
    return spdl__npz_describe(npz, index, info, NULL, 0, &fields, error);
}

SPDL_API spdl_result spdl_npz_fields(const spdl_npz *npz, size_t index, spdl_npy_field *fields,
                                     size_t room, size_t *count, spdl_error *error) {
    spdl_npy_info info;
    if (count == NULL || (fields == NULL && room > 0))
        return spdl__error_set(error, SPDL_E_INVALID, "spdl_npz_fields: an argument is NULL");
    *count = 0;
    return spdl__npz_describe(npz, index, &info, fields, room, count, error);
}

SPDL_API spdl_result spdl_npz_read(const spdl_npz *npz, size_t index, void *data, size_t bytes,
                                   spdl_error *error) {
    spdl__npz_reader r;
    spdl_npy_info info;
    spdl_result result;
    spdl__npz_init_reader(&r, npz, error);
    result = spdl__npz_start(&r, index, true, &info, NULL, 0);
    if (result == SPDL_OK) result = spdl__npz_check_memory(&r, data, bytes, &info);
    if (result == SPDL_OK) result = spdl__npz_finish_read(&r, index, data, &info);
    spdl__npz_end(&r);
    spdl__npz_fini_reader(&r);
    return result;
}

/* Whether rows can be had, and where they are. */
SPDL__PRIVATE spdl_result spdl__npz_rows(const spdl__npz_reader *r, const spdl_npy_info *info,
                                         uint64_t first, uint64_t count, uint64_t *row_bytes) {
    if (!r->stored)
        return spdl__zip_fail(&r->where, SPDL_E_UNSUPPORTED, "deflated: it has no rows to pick");
    if ((info->fortran_order || r->turn) && info->ndim > 1)
        return spdl__zip_fail(&r->where, SPDL_E_UNSUPPORTED,
                              "in Fortran order: its rows are not together");
    if (info->ndim == 0 || first > info->shape[0] || count > info->shape[0] - first)
        return spdl__zip_fail(&r->where, SPDL_E_INVALID, "no %llu rows from row %llu; it has %llu",
                              (spdl__llu)count, (spdl__llu)first,
                              (spdl__llu)(info->ndim == 0 ? 0 : info->shape[0]));
    *row_bytes = info->shape[0] > 0 ? info->bytes / info->shape[0] : 0;
    return SPDL_OK;
}

SPDL_API spdl_result spdl_npz_read_rows(const spdl_npz *npz, size_t index, uint64_t first,
                                        uint64_t count, void *data, size_t bytes,
                                        spdl_error *error) {
    spdl__npz_reader r;
    spdl_npy_info info;
    uint64_t row = 0;
    spdl_result result;
    spdl__npz_init_reader(&r, npz, error);
    result = spdl__npz_start(&r, index, false, &info, NULL, 0);
    if (result == SPDL_OK) result = spdl__npz_rows(&r, &info, first, count, &row);
    if (result == SPDL_OK && (row * count > bytes || (data == NULL && row * count > 0)))
        result = spdl__zip_fail(&r.where, SPDL_E_INVALID,
                                "the rows have %llu bytes, the memory for them %llu",
                                (spdl__llu)(row * count), (spdl__llu)(data != NULL ? bytes : 0));
    if (result == SPDL_OK && row * count > 0) {
        result = spdl__npz_copy_out(&r, r.payload + r.head_bytes + first * row, (uint8_t *)data,
                                    (size_t)(row * count));
        if (result == SPDL_OK && r.swap)
            result = spdl__npz_swap(&r, index, (uint8_t *)data, row * count / info.itemsize, &info);
    }
    spdl__npz_end(&r);
    spdl__npz_fini_reader(&r);
    return result;
}

/* Whether the bytes in the file are those that the caller wants to see. */
SPDL__PRIVATE spdl_result spdl__npz_can_view(const spdl__npz_reader *r) {
    if (!r->stored)
        return spdl__zip_fail(&r->where, SPDL_E_UNSUPPORTED,
                              "deflated: it has no bytes to look at; read it");
    if (r->swap || r->turn)
        return spdl__zip_fail(&r->where, SPDL_E_UNSUPPORTED,
                              "not in the order that convert asks for; read it");
    return SPDL_OK;
}

SPDL_API spdl_result spdl_npz_view(const spdl_npz *npz, size_t index, const void **data,
                                   bool *aligned, spdl_error *error) {
    const uint8_t *base = NULL;
    spdl__npz_reader r;
    spdl_npy_info info;
    spdl_result result;
    if (data == NULL) return spdl__error_set(error, SPDL_E_INVALID, "spdl: npz: data is NULL");
    spdl__npz_init_reader(&r, npz, error);
    result = spdl__npz_start(&r, index, false, &info, NULL, 0);
    if (result == SPDL_OK) result = spdl__npz_can_view(&r);
    if (result == SPDL_OK && npz->verify == SPDL_NPZ_VERIFY_ALL)
        result = spdl__npz_verify_member(&r);
    if (result == SPDL_OK) base = npz->zip.data != NULL ? npz->zip.data : spdl__npz_map(npz);
    if (result == SPDL_OK && base == NULL)
        result = spdl__zip_fail(&r.where, SPDL_E_IO, "the file cannot be mapped");
    if (result == SPDL_OK) {
        *data = base + r.payload + r.head_bytes;
        if (aligned != NULL) *aligned = ((uintptr_t)*data & 63) == 0;
    }
    spdl__npz_end(&r);
    spdl__npz_fini_reader(&r);
    return result;
}

SPDL_API spdl_result spdl_npz_check(const spdl_npz *npz, size_t index, spdl_error *error) {
    spdl__npz_reader r;
    spdl_npy_info info;
    spdl_result result;
    spdl__npz_init_reader(&r, npz, error);
    result = spdl__npz_start(&r, index, true, &info, NULL, 0);
    if (result == SPDL_OK && !npz->is_npy) result = spdl__npz_verify_member(&r);
    spdl__npz_end(&r);
    spdl__npz_fini_reader(&r);
    return result;
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
    npz.max_bytes = UINT64_MAX;
    npz.max_header = SPDL__NPY_HEAD_BYTES;
    spdl__npz_open_npy(&npz);
    spdl__npz_init_reader(&r, &npz, error);
    return spdl__npz_start(&r, 0, false, info, NULL, 0);
}

/* ============================================================================================= */
/* >>many-impl
   Many arrays at once, and whole files. The requests are handed out by one counter, several small
   ones at a time; the caller takes its share, so that it works without a pool, and on a worker of
   the pool itself. What the threads share is freed by the last of them, since a job may get its
   turn only when all is done; such a job finds nothing to take and looks at nothing else. */

#define SPDL__MANY_LANES 2      /* arrays side by side in a thread; a third gained nothing */
#define SPDL__MANY_AHEAD 262144 /* bytes that are read from a file at once */
#define SPDL__MANY_BYTES 65536  /* requests are handed out together up to about so many bytes */

typedef struct spdl__npz_many {
    const spdl_npz *npz;
    spdl_npz_request *requests;
    size_t count;
    spdl_pool *pool;   /* may be NULL */
    bool asymmetric;
    uint64_t next;   /* the first request that nobody has taken: all take, by cas */
    uint64_t left;   /* not read yet */
    uint64_t active; /* workers that may be inside the archive; the last wakes the caller */
    uint64_t users;  /* who may look at this: the last one frees it */
    spdl_allocator allocator;
    uint32_t locked; /* guards the two below; taken only by those who fail */
    size_t failed;   /* the first request that did, and why */
    spdl_error error;
    spdl__event done;
} spdl__npz_many;

/* Keeps the failure of the first of all requests. */
SPDL__PRIVATE void spdl__many_fail(spdl__npz_many *many, size_t which, const spdl_error *error) {
    uint32_t open = 0;
    while (!spdl__cas32(&many->locked, &open, 1)) { /* sees what the one before wrote */
        open = 0;
        spdl__yield();
    }
    if (which < many->failed) {
        many->failed = which;
        many->error = *error;
    }
    spdl__store32(&many->locked, 0);
}

/* How many requests from `first` on are handed out together. */
SPDL__PRIVATE size_t spdl__many_count(const spdl__npz_many *many, size_t first) {
    uint64_t bytes = 0;
    size_t n = 0;
    while (first + n < many->count && n < 256 && bytes < SPDL__MANY_BYTES)
        bytes += 256 + many->requests[first + n++].bytes;
    return n;
}

/* Changes nothing when there is nothing to take. */
SPDL__PRIVATE bool spdl__many_take(spdl__npz_many *many, size_t *first, size_t *count) {
    uint64_t next = spdl__load_relaxed(&many->next);
    size_t taken;
    do {
        if (next >= many->count) return false;
        taken = spdl__many_count(many, (size_t)next);
    } while (!spdl__cas(&many->next, &next, next + taken));
    *first = (size_t)next;
    *count = taken;
    return true;
}

#define SPDL__PARTS_CLOSED ((uint64_t)1 << 63)

/* A large member that several workers decode; the last who knows of it frees it. */
typedef struct spdl__many_parts {
    uint64_t state; /* helpers that are inside, and CLOSED: then nobody goes in any more */
    uint64_t users;
    bool asymmetric;
    spdl_allocator allocator;
    spdl__event gone;
    spdl__split split;
} spdl__many_parts;

SPDL__PRIVATE void spdl__parts_leave(spdl__many_parts *parts) {
    const spdl_allocator allocator = parts->allocator;
    if (spdl__sub(&parts->users, 1) != 1) return;
    spdl__event_fini(&parts->gone);
    spdl__free(&allocator, parts, sizeof(*parts));
}

/* One word says who is inside and whether it is closed, so a helper that comes late cannot miss it:
   either the front sees it inside, or it sees the mark. */
SPDL__PRIVATE void spdl__parts_job(void *arg, int worker, void *local) {
    spdl__many_parts *parts = (spdl__many_parts *)arg;
    (void)worker;
    (void)local;
    if ((spdl__add(&parts->state, 1) & SPDL__PARTS_CLOSED) == 0) spdl__split_help(&parts->split);
    spdl__sub(&parts->state, 1);
    spdl__event_notify(&parts->gone, parts->asymmetric, SPDL__ALL);
    spdl__parts_leave(parts);
}

/* Waits until no helper is inside, and none can come. */
SPDL__PRIVATE void spdl__parts_close(spdl__many_parts *parts) {
    uint32_t word;
    spdl__split_stop(&parts->split);
    (void)spdl__or(&parts->state, SPDL__PARTS_CLOSED);
    while (spdl__load(&parts->state) != SPDL__PARTS_CLOSED) {
        word = spdl__event_prepare(&parts->gone, parts->asymmetric);
        if (spdl__load(&parts->state) == SPDL__PARTS_CLOSED)
            spdl__event_cancel(&parts->gone);
        else
            (void)spdl__event_commit(&parts->gone, word, SPDL__NEVER);
    }
    spdl__split_close(&parts->split);
}

/* Prepares to decode a member, whose state stands at its data, in parts; NULL: no memory for it. */
SPDL__PRIVATE spdl__many_parts *spdl__parts_open(spdl__npz_many *many, spdl__inflate *inflate) {
    unsigned threads = (unsigned)spdl_pool_workers(many->pool), i;
    spdl__many_parts *parts = (spdl__many_parts *)spdl__alloc_zeroed(&many->allocator, 1,
                                                                     sizeof(*parts), 64);
    if (threads < 2) threads = 2;
    if (threads > 8) threads = 8; /* the front cannot resolve faster than so many decode */
    if (parts == NULL || !spdl__event_init(&parts->gone)) {
        spdl__free(&many->allocator, parts, sizeof(*parts));
        return NULL;
    }
    parts->users = 1;
    parts->asymmetric = many->asymmetric;
    parts->allocator = many->allocator;
    if (!spdl__split_open(&parts->split, inflate, threads, &many->allocator)) {
        spdl__parts_leave(parts);
        return NULL;
    }
    for (i = 1; i < threads; i++) {
        spdl__add(&parts->users, 1);
        if (spdl_pool_submit(many->pool, spdl__parts_job, parts, 0) == SPDL_OK) continue;
        spdl__sub(&parts->users, 1); /* the queue is full: fewer help */
        break;
    }
    return parts;
}

/* One of the arrays that a thread decodes side by side. */
typedef struct spdl__many_lane {
    bool busy;
    size_t which; /* request */
    size_t left;  /* bytes that are not decoded yet */
    uint8_t *piece;
    uint32_t crc;
    spdl_npy_info info;
    spdl_error error;
    spdl__npz_reader r;
} spdl__many_lane;

/* What a thread does: the requests it has taken but not begun, and its lanes. */
typedef struct spdl__many_share {
    spdl__npz_many *many;
    size_t first, count;
    size_t done;
    bool verify;
    spdl__many_lane lane[SPDL__MANY_LANES];
} spdl__many_share;

SPDL__PRIVATE void spdl__many_result(spdl__many_share *share, spdl__many_lane *lane,
                                     spdl_result result) {
    spdl__npz_end(&lane->r);
    lane->busy = false;
    share->done++;
    share->many->requests[lane->which].result = result;
    if (result != SPDL_OK) spdl__many_fail(share->many, lane->which, &lane->error);
}

/* Whether an array is one that gains by company: all deflated data, compressed so little that the
   chain from code to code is what takes the time. */
SPDL__PRIVATE bool spdl__many_suits(const spdl__many_lane *lane) {
#ifdef SPDL_INFLATE
    (void)lane;
    return false;
#else
    const spdl__zip_member *member = lane->r.member;
    return !lane->r.stored && !lane->r.turn && lane->info.bytes > 0 &&
           member->usize - lane->r.head_bytes == lane->info.bytes &&
           spdl__inflate_gains(member->csize, member->usize);
#endif
}

SPDL__PRIVATE void spdl__many_next_piece(spdl__many_lane *lane) {
    const size_t bytes = lane->left < SPDL__NPZ_PIECE ? lane->left : SPDL__NPZ_PIECE;
    lane->piece = lane->r.inflate.out;
    lane->r.inflate.limit = lane->piece + bytes;
    lane->left -= bytes;
}

/* Whether an array is to be decoded in parts: there are too few to keep all workers busy. */
SPDL__PRIVATE bool spdl__many_splits(const spdl__many_share *share, const spdl__many_lane *lane) {
    const spdl__zip_member *member = lane->r.member;
    return share->many->pool != NULL && spdl__many_suits(lane) &&
           (share->many->count == 1 ||
            share->many->count < (size_t)spdl_pool_workers(share->many->pool)) &&
           spdl__split_gains(member->csize, member->usize);
}

/* Decodes an array in parts; the CRC follows what is there already. */
SPDL__PRIVATE spdl_result spdl__many_read_parts(spdl__many_share *share, spdl__many_lane *lane,
                                                uint8_t *data) {
    spdl__inflate *inflate = &lane->r.inflate;
    spdl__inflate_mode mode;
    const uint8_t *seen = data;
    uint32_t crc = spdl__npz_inflate_to(&lane->r, data, share->verify);
    spdl__many_parts *parts;
    inflate->limit = data + lane->info.bytes;
    parts = spdl__parts_open(share->many, inflate);
    do {
        mode = parts != NULL ? spdl__split_step(&parts->split)
                             : spdl__inflate_run(inflate, inflate->limit);
        if (share->verify)
            crc = spdl__crc_add(&lane->r.tables->crc, crc, seen, (size_t)(inflate->out - seen));
        seen = inflate->out;
    } while (mode == SPDL__INFLATE_BLOCK);
    if (parts != NULL) {
        spdl__parts_close(parts);
        spdl__parts_leave(parts);
    }
    if (inflate->out != data + lane->info.bytes) return spdl__npz_inflate_error(&lane->r, mode);
    return spdl__npz_inflate_end(&lane->r, crc, share->verify);
}

/* Reads what suits no lane. */
SPDL__PRIVATE spdl_result spdl__many_read_alone(spdl__many_share *share, spdl__many_lane *lane,
                                                const spdl_npz_request *request) {
    spdl_result result;
    if (!spdl__many_splits(share, lane))
        return spdl__npz_finish_read(&lane->r, request->index, request->data, &lane->info);
    result = spdl__many_read_parts(share, lane, (uint8_t *)request->data);
    if (result == SPDL_OK && lane->r.swap)
        result = spdl__npz_swap(&lane->r, request->index, (uint8_t *)request->data,
                                lane->info.count, &lane->info);
    return result;
}

/* Reads the header of an array that was found, and whether it fits the memory for it. */
SPDL__PRIVATE spdl_result spdl__many_head(spdl__many_lane *lane, const spdl_npz_request *request) {
    spdl_result result = spdl__npz_begin_found(&lane->r, true, &lane->info, NULL, 0);
    if (result != SPDL_OK) return result;
    return spdl__npz_check_memory(&lane->r, request->data, request->bytes, &lane->info);
}

/* Asks for the memory that will be written when all is inflated. */
SPDL__PREFETCHES
SPDL__PRIVATE void spdl__many_fetch(const spdl_npz_request *request) {
    const size_t bytes = (size_t)spdl__min(request->bytes, SPDL__NPZ_AT_ONCE);
    size_t i;
    for (i = 0; i < bytes; i += 64) spdl__prefetch_write((const char *)request->data + i);
}

/* Begins with a member that was found: the lane is busy then, unless it suited none and was read,
   or cannot be. */
SPDL__PRIVATE spdl_result spdl__many_begin_found(spdl__many_share *share, spdl__many_lane *lane,
                                                 const spdl_npz_request *request) {
    const spdl__zip_member *member = lane->r.member;
    spdl_result result;
    if (spdl__npz_fits_at_once(&lane->r) && spdl__inflate_gains(member->csize, member->usize)) {
        result = spdl__npz_start_at_once(&lane->r);
        lane->busy = result == SPDL_OK;
        if (lane->busy && request->data != NULL) spdl__many_fetch(request);
        return result;
    }
    result = spdl__many_head(lane, request);
    if (result != SPDL_OK) return result;
    if (!spdl__many_suits(lane) || spdl__many_splits(share, lane))
        return spdl__many_read_alone(share, lane, request);
    lane->crc = spdl__npz_inflate_to(&lane->r, (uint8_t *)request->data, share->verify);
    lane->left = (size_t)lane->info.bytes;
    lane->busy = true;
    spdl__many_next_piece(lane);
    return SPDL_OK;
}

/* Begins with the next request; what suits no lane is read at once. */
SPDL__PRIVATE void spdl__many_begin(spdl__many_share *share, spdl__many_lane *lane) {
    const spdl_npz_request *request = &share->many->requests[share->first];
    spdl_result result;
    lane->which = share->first++;
    share->count--;
    result = spdl__npz_locate(&lane->r, request->index);
    if (result == SPDL_OK) result = spdl__many_begin_found(share, lane, request);
    if (!lane->busy) spdl__many_result(share, lane, result);
}

/* A lane stopped: at the end of a piece, or because of an error. */
SPDL__PRIVATE void spdl__many_stopped(spdl__many_share *share, spdl__many_lane *lane,
                                      spdl__inflate_mode ended) {
    spdl__npz_reader *r = &lane->r;
    const spdl_npz_request *request = &share->many->requests[lane->which];
    spdl_result result;
    if (r->at_once) {
        result = spdl__many_head(lane, request);
        if (result == SPDL_OK)
            result = spdl__npz_finish_read(r, request->index, request->data, &lane->info);
        spdl__many_result(share, lane, result);
        return;
    }
    if (r->inflate.out != r->inflate.limit) {
        spdl__many_result(share, lane, spdl__npz_inflate_error(r, ended));
        return;
    }
    if (share->verify)
        lane->crc = spdl__crc_add(&r->tables->crc, lane->crc, lane->piece,
                                  (size_t)(r->inflate.out - lane->piece));
    if (lane->left > 0 && ended == SPDL__INFLATE_FULL) {
        spdl__many_next_piece(lane);
        return;
    }
    result = lane->left == 0 ? spdl__npz_inflate_end(r, lane->crc, share->verify)
                             : spdl__npz_inflate_error(r, ended);
    if (result == SPDL_OK && r->swap)
        result = spdl__npz_swap(r, request->index, (uint8_t *)request->data, lane->info.count,
                                &lane->info);
    spdl__many_result(share, lane, result);
}

/* Keeps the lanes busy until nothing is left to take. */
SPDL__PRIVATE void spdl__many_run(spdl__many_share *share) {
    spdl__inflate *states[SPDL__MANY_LANES];
    spdl__many_lane *lanes[SPDL__MANY_LANES], *lane;
    spdl__inflate_mode ended = SPDL__INFLATE_FULL;
    unsigned busy, i;
    for (;;) {
        for (busy = i = 0; i < SPDL__MANY_LANES; i++) {
            lane = &share->lane[i];
            while (!lane->busy && (share->count > 0 || spdl__many_take(share->many, &share->first,
                                                                       &share->count)))
                spdl__many_begin(share, lane);
            if (!lane->busy) continue;
            lanes[busy] = lane;
            states[busy++] = &lane->r.inflate;
        }
        if (busy == 0) return;
        i = spdl__inflate_run_lanes(states, busy, &ended);
        spdl__many_stopped(share, lanes[i], ended);
    }
}

/* Reads from these requests on until nothing is left to take. */
SPDL__PRIVATE void spdl__many_work(spdl__npz_many *many, size_t first, size_t count) {
    spdl__many_share share;
    unsigned i;
    share.many = many;
    share.first = first;
    share.count = count;
    share.done = 0;
    share.verify = many->npz->verify != SPDL_NPZ_VERIFY_NONE;
    for (i = 0; i < SPDL__MANY_LANES; i++) {
        spdl__npz_init_reader(&share.lane[i].r, many->npz, &share.lane[i].error);
        share.lane[i].r.ahead = SPDL__MANY_AHEAD;
        share.lane[i].busy = false;
    }
    spdl__many_run(&share);
    for (i = 0; i < SPDL__MANY_LANES; i++) spdl__npz_fini_reader(&share.lane[i].r);
    spdl__sub(&many->left, share.done); /* releases what was read to the caller, who sees 0 */
}

SPDL__PRIVATE void spdl__many_leave(spdl__npz_many *many) {
    const spdl_allocator allocator = many->allocator;
    if (spdl__sub(&many->users, 1) != 1) return;
    spdl__event_fini(&many->done);
    spdl__free(&allocator, many, sizeof(*many));
}

SPDL__PRIVATE void spdl__many_job(void *arg, int worker, void *local) {
    spdl__npz_many *many = (spdl__npz_many *)arg;
    size_t first = 0, count = 0;
    (void)worker;
    (void)local;
    spdl__add(&many->active, 1); /* before it takes: whoever sees the work done sees this too */
    if (spdl__many_take(many, &first, &count)) spdl__many_work(many, first, count);
    if (spdl__sub(&many->active, 1) == 1)
        spdl__event_notify(&many->done, many->asymmetric, SPDL__ALL);
    spdl__many_leave(many);
}

/* Asks workers of the pool to help: one less than there are, since the caller is one too. */
SPDL__PRIVATE void spdl__many_ask(spdl__npz_many *many, spdl_pool *pool) {
    uint64_t helpers = (uint64_t)spdl_pool_workers(pool), i;
    if (helpers > 1) helpers--;
    if (helpers > many->count - 1) helpers = many->count - 1;
    for (i = 0; i < helpers; i++) {
        spdl__add(&many->users, 1);
        if (spdl_pool_submit(pool, spdl__many_job, many, 0) == SPDL_OK) continue;
        spdl__sub(&many->users, 1); /* the queue is full: it goes without */
        return;
    }
}

/* Whether all is read and every worker out of the archive. */
SPDL__PRIVATE bool spdl__many_over(const spdl__npz_many *many) {
    return spdl__load(&many->left) == 0 && spdl__load(&many->active) == 0;
}

SPDL__PRIVATE void spdl__many_wait(spdl__npz_many *many) {
    uint32_t word;
    while (!spdl__many_over(many)) {
        word = spdl__event_prepare(&many->done, many->asymmetric);
        if (spdl__many_over(many))
            spdl__event_cancel(&many->done);
        else
            (void)spdl__event_commit(&many->done, word, SPDL__NEVER);
    }
}

SPDL_API spdl_result spdl_npz_read_many(const spdl_npz *npz, spdl_npz_request *requests,
                                        size_t count, spdl_pool *pool, spdl_error *error) {
    spdl__npz_many *many;
    spdl_result result = SPDL_OK;
    size_t first = 0, taken = 0;
    if (npz == NULL || (requests == NULL && count > 0))
        return spdl__error_set(error, SPDL_E_INVALID, "spdl_npz_read_many: an argument is NULL");
    if (count == 0) return SPDL_OK;
    many = (spdl__npz_many *)spdl__alloc_zeroed(&npz->zip.allocator, 1, sizeof(*many), 64);
    if (many == NULL || !spdl__event_init(&many->done)) {
        spdl__free(&npz->zip.allocator, many, sizeof(*many));
        return spdl__error_set(error, SPDL_E_NOMEM, "%s: no memory for reading many",
                               npz->zip.label);
    }
    many->npz = npz;
    many->allocator = npz->zip.allocator;
    many->requests = requests;
    many->count = many->failed = count;
    many->left = count;
    many->users = 1;
    many->pool = pool;
    many->asymmetric = false;
    if (pool != NULL && count > 1) spdl__many_ask(many, pool);
    if (spdl__many_take(many, &first, &taken)) spdl__many_work(many, first, taken);
    spdl__many_wait(many);
    if (many->failed < count) { /* nobody writes it any more: all is over */
        result = many->error.result;
        if (error != NULL) *error = many->error;
    }
    spdl__many_leave(many);
    return result;
}

/* Puts the arrays one behind the other; returns the bytes of the whole, 0 when that is too many. */
SPDL__PRIVATE uint64_t spdl__bundle_layout(const spdl_npz *npz, spdl_npz_bundle *bundle,
                                           uint64_t max_bytes) {
    const size_t count = spdl_npz_count(npz);
    uint64_t at = sizeof(*bundle) + count * sizeof(*bundle->arrays), data = 0, bytes;
    size_t i;
    for (i = 0; i < count; i++) at += strlen(npz->zip.members[i].name) + 1;
    at = (at + 63) & ~(uint64_t)63;
    for (i = 0; i < count; i++) {
        bytes = bundle->arrays[i].info.bytes;
        if (bytes > max_bytes - data) return 0;
        data += bytes;
        bytes = (bytes + 63) & ~(uint64_t)63;
        if (bytes > SIZE_MAX / 2 - at) return 0;
        at += bytes;
    }
    return at;
}

/* Reads all headers; the names follow the arrays. */
SPDL__PRIVATE spdl_result spdl__bundle_infos(const spdl_npz *npz, spdl_npz_bundle *bundle,
                                             spdl_error *error) {
    spdl__npz_reader r;
    spdl_result result = SPDL_OK;
    size_t i;
    spdl__npz_init_reader(&r, npz, error);
    for (i = 0; i < bundle->count && result == SPDL_OK; i++) {
        result = spdl__npz_start(&r, i, false, &bundle->arrays[i].info, NULL, 0);
        spdl__npz_end(&r);
    }
    spdl__npz_fini_reader(&r);
    return result;
}

SPDL__PRIVATE spdl_npz_bundle *spdl__bundle_alloc(const spdl_npz *npz, uint64_t bytes) {
    const size_t count = spdl_npz_count(npz);
    spdl_npz_bundle *bundle = NULL;
    if (bytes > 0 && bytes <= SIZE_MAX / 2)
        bundle = (spdl_npz_bundle *)spdl__alloc(&npz->zip.allocator, (size_t)bytes, 64);
    if (bundle == NULL) return NULL;
    bundle->arrays = (spdl_npz_array *)(void *)(bundle + 1);
    bundle->count = count;
    bundle->bytes = (size_t)bytes;
    bundle->allocator = npz->zip.allocator;
    return bundle;
}

/* Copies the names and says where the data go. */
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
        bundle->arrays[i].data = at;
        requests[i].index = i;
        requests[i].data = at;
        requests[i].bytes = (size_t)bundle->arrays[i].info.bytes;
        at += (requests[i].bytes + 63) & ~(size_t)63;
    }
}

/* Fills *bundle, which on failure may be there as well. */
SPDL__PRIVATE spdl_result spdl__bundle_fill(const spdl_npz *npz, spdl_npz_bundle **bundle,
                                            spdl_error *error) {
    const size_t count = spdl_npz_count(npz);
    const spdl_allocator *allocator = &npz->zip.allocator;
    spdl_npz_request *requests;
    spdl_npz_bundle *heads = spdl__bundle_alloc(npz, sizeof(**bundle) +
                                                         count * sizeof(spdl_npz_array));
    uint64_t bytes;
    spdl_result result = SPDL_E_NOMEM;
    requests = (spdl_npz_request *)spdl__alloc_zeroed(allocator, count + 1, sizeof(*requests), 64);
    if (heads != NULL && requests != NULL) result = spdl__bundle_infos(npz, heads, error);
    if (result == SPDL_OK) {
        bytes = spdl__bundle_layout(npz, heads, npz->max_bytes);
        if (bytes == 0) {
            result = spdl__error_set(error, SPDL_E_LIMIT,
                                     "%s: its arrays are larger than max_bytes, which is %llu",
                                     npz->zip.label, (spdl__llu)npz->max_bytes);
        } else {
            *bundle = spdl__bundle_alloc(npz, bytes);
            if (*bundle == NULL) result = SPDL_E_NOMEM;
        }
    }
    if (result == SPDL_OK) {
        memcpy((*bundle)->arrays, heads->arrays, count * sizeof(spdl_npz_array));
        spdl__bundle_place(npz, *bundle, requests);
        result = spdl_npz_read_many(npz, requests, count, NULL, error);
    } else if (result == SPDL_E_NOMEM) {
        spdl__error_set(error, result, "%s: no memory for its arrays", npz->zip.label);
    }
    spdl__free(allocator, requests, (count + 1) * sizeof(*requests));
    if (heads != NULL) spdl_npz_bundle_free(heads);
    return result;
}

SPDL_API spdl_result spdl_npz_load(spdl_npz_bundle **bundle, const char *path,
                                   const spdl_npz_desc *desc) {
    spdl_npz *npz = NULL;
    spdl_result result;
    if (bundle != NULL) *bundle = NULL;
    if (!spdl__npz_can_open(&npz, bundle != NULL, "spdl_npz_load", desc)) return SPDL_E_INVALID;
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
    size_t i, bytes;
    if (bundle == NULL || name == NULL) return NULL;
    for (i = 0; i < bundle->count; i++)
        if (strcmp(bundle->arrays[i].name, name) == 0) return &bundle->arrays[i];
    bytes = strlen(name);
    if (bytes < 4 || strcmp(name + bytes - 4, ".npy") != 0) return NULL;
    for (i = 0; i < bundle->count; i++)
        if (strlen(bundle->arrays[i].name) == bytes - 4 &&
            memcmp(bundle->arrays[i].name, name, bytes - 4) == 0)
            return &bundle->arrays[i];
    return NULL;
}

SPDL_API void spdl_npz_bundle_free(void *bundle) {
    spdl_npz_bundle *freed = (spdl_npz_bundle *)bundle;
    spdl_allocator allocator;
    if (freed == NULL) return;
    allocator = freed->allocator;
    spdl__free(&allocator, freed, freed->bytes);
}

/* The stage of SPDL_NPZ. */
SPDL__PRIVATE spdl_result spdl__npz_stage(spdl_task *task, void *in, void **out) {
    const spdl_npz_desc *given = (const spdl_npz_desc *)spdl_ctx(task);
    spdl_npz_bundle *bundle = NULL;
    spdl_npz_desc desc;
    spdl_error error;
    spdl_result result;
    memset(&desc, 0, sizeof(desc));
    if (given != NULL) desc = *given;
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
   target until finish gives it that name. Sizes are known before the data, so each local header is
   written twice at most: the CRC is put in when the data are through. ZIP64 fields are there only
   where a number needs them. Data are aligned by an extra field of padding, of the form that
   zipalign made known (id 0xd935: two bytes of alignment, then zeros). */

#define SPDL__WRITE_DATE 0x00210000u /* the first of January 1980, as NumPy has it */
#define SPDL__WRITE_BYTES 131072     /* holds an array's header, or an entry with any name */

typedef struct spdl__write_entry {
    uint64_t offset, csize, usize;
    uint32_t crc;
    uint16_t method, key_bytes;
    size_t key; /* where the name begins in names */
} spdl__write_entry;

struct spdl_npz_writer {
    spdl_npz_write_desc desc;
    spdl__zip label; /* only for messages */
    spdl__file file;
    char *path, *temporary; /* one allocation */
    size_t path_bytes;
    uint64_t at; /* where the next byte goes */
    bool open;   /* an array was begun and lacks `left` bytes */
    bool failed, finished;
    uint64_t left;
    spdl__write_entry *entries;
    size_t count, room;
    char *names; /* keys, one behind the other, without zeros */
    size_t names_bytes, names_room;
    uint32_t *seen; /* open addressing: number of an entry + 1, twice as many as entries */
    size_t seen_room;
    uint8_t *scratch; /* of SPDL__WRITE_BYTES */
    spdl__crc crc;
};

/* Records why. When a file or the memory ended, nothing more can be written. */
SPDL__PRIVATE spdl_result spdl__write_fail(spdl_npz_writer *w, spdl_error *error,
                                           spdl_result result, const char *name,
                                           const char *reason) {
    char told[80];
    if (result == SPDL_E_IO || result == SPDL_E_NOMEM) w->failed = true;
    if (name == NULL)
        return spdl__error_set(error, result, "%s: %s", w->label.label, reason);
    spdl__zip_printable(told, sizeof(told), name);
    return spdl__error_set(error, result, "%s: member '%s': %s", w->label.label, told, reason);
}

SPDL__PRIVATE spdl_result spdl__write_bytes(spdl_npz_writer *w, spdl_error *error, const void *from,
                                            size_t bytes) {
    const char *reason = spdl__file_write(w->file, from, bytes, w->at);
    if (reason != NULL) return spdl__write_fail(w, error, SPDL_E_IO, NULL, reason);
    w->at += bytes;
    return SPDL_OK;
}

SPDL__PRIVATE uint8_t *spdl__put16(uint8_t *to, uint64_t value) {
    to[0] = (uint8_t)value;
    to[1] = (uint8_t)(value >> 8);
    return to + 2;
}

SPDL__PRIVATE uint8_t *spdl__put32(uint8_t *to, uint64_t value) {
    return spdl__put16(spdl__put16(to, value), value >> 16);
}

SPDL__PRIVATE uint8_t *spdl__put64(uint8_t *to, uint64_t value) {
    return spdl__put32(spdl__put32(to, value), value >> 32);
}

/* What the older fields say of a number, that has 8 bytes elsewhere if it does not fit. */
SPDL__PRIVATE uint64_t spdl__write_narrow(uint64_t value) {
    return value >= 0xffffffffu ? 0xffffffffu : value;
}

/* The fields that a local header and a directory entry have in common, from "version needed". */
SPDL__PRIVATE uint8_t *spdl__write_common(uint8_t *to, const spdl__write_entry *entry,
                                          const char *key) {
    const bool wide = entry->usize >= 0xffffffffu || entry->csize >= 0xffffffffu ||
                      entry->offset >= 0xffffffffu;
    uint16_t flags = 0;
    size_t i;
    for (i = 0; i < entry->key_bytes; i++)
        if ((unsigned char)key[i] >= 128) flags = 0x0800; /* the name is UTF-8 */
    to = spdl__put16(to, wide ? 45 : 20);
    to = spdl__put16(to, flags);
    to = spdl__put16(to, entry->method);
    to = spdl__put32(to, SPDL__WRITE_DATE);
    to = spdl__put32(to, entry->crc);
    return to;
}

/* Makes the local header, whose extra fields end where `payload` bytes more bring the data to a
   multiple of the alignment. */
SPDL__PRIVATE size_t spdl__write_local(const spdl_npz_writer *w, uint8_t *to,
                                       const spdl__write_entry *entry, uint64_t payload) {
    const bool wide = entry->usize >= 0xffffffffu || entry->csize >= 0xffffffffu;
    const size_t align = w->desc.align;
    uint8_t *at = spdl__put32(to, 0x04034b50);
    size_t extra = (wide ? 20 : 0) + 6, pad;
    uint64_t data = entry->offset + SPDL__ZIP_LOCAL_BYTES + entry->key_bytes + extra + payload;
    pad = (size_t)((align - data % align) % align);
    at = spdl__write_common(at, entry, w->names + entry->key);
    at = spdl__put32(at, wide ? 0xffffffffu : entry->csize);
    at = spdl__put32(at, wide ? 0xffffffffu : entry->usize);
    at = spdl__put16(at, entry->key_bytes);
    at = spdl__put16(at, extra + pad);
    memcpy(at, w->names + entry->key, entry->key_bytes);
    at += entry->key_bytes;
    if (wide) at = spdl__put64(spdl__put64(spdl__put16(spdl__put16(at, 1), 16), entry->usize),
                               entry->csize);
    at = spdl__put16(spdl__put16(spdl__put16(at, 0xd935), 2 + pad), align);
    memset(at, 0, pad);
    return (size_t)(at + pad - to);
}

SPDL__PRIVATE size_t spdl__write_central(const spdl_npz_writer *w, uint8_t *to,
                                         const spdl__write_entry *entry) {
    const uint64_t all[3] = { entry->usize, entry->csize, entry->offset };
    uint8_t *at = spdl__put16(spdl__put32(to, 0x02014b50), 45), *extra;
    size_t i, wide = 0;
    for (i = 0; i < 3; i++) wide += all[i] >= 0xffffffffu;
    at = spdl__write_common(at, entry, w->names + entry->key);
    at = spdl__put32(at, spdl__write_narrow(entry->csize));
    at = spdl__put32(at, spdl__write_narrow(entry->usize));
    at = spdl__put16(at, entry->key_bytes);
    at = spdl__put16(at, wide > 0 ? 4 + 8 * wide : 0);
    memset(at, 0, 10); /* comment, disk, attributes */
    at = spdl__put32(at + 10, spdl__write_narrow(entry->offset));
    memcpy(at, w->names + entry->key, entry->key_bytes);
    extra = at += entry->key_bytes;
    if (wide > 0) at = spdl__put16(spdl__put16(extra, 1), 8 * wide);
    for (i = 0; i < 3; i++)
        if (all[i] >= 0xffffffffu) at = spdl__put64(at, all[i]);
    return (size_t)(at - to);
}

/* Makes an array of `each`-byte elements hold one more than `count`. */
SPDL__PRIVATE bool spdl__write_grow(const spdl_allocator *allocator, void **array, size_t *room,
                                    size_t count, size_t each) {
    const size_t wanted = count + 1, next = wanted > 32 ? 2 * wanted : 64;
    void *larger;
    if (wanted <= *room) return true;
    larger = spdl__alloc(allocator, next * each, 64);
    if (larger == NULL) return false;
    if (*room > 0) memcpy(larger, *array, *room * each);
    spdl__free(allocator, *array, *room * each);
    *array = larger;
    *room = next;
    return true;
}

SPDL__PRIVATE uint64_t spdl__write_hash(const char *key, size_t bytes) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (; bytes > 0; bytes--, key++) hash = (hash ^ (unsigned char)*key) * 0x100000001b3u;
    return hash ^ hash >> 29;
}

/* The place in `seen` for a key: that of an entry of this name, or a free one. */
SPDL__PRIVATE uint32_t *spdl__write_place(const spdl_npz_writer *w, const char *key, size_t bytes) {
    size_t at = (size_t)spdl__write_hash(key, bytes) & (w->seen_room - 1);
    const spdl__write_entry *entry;
    for (; w->seen[at] != 0; at = (at + 1) & (w->seen_room - 1)) {
        entry = &w->entries[w->seen[at] - 1];
        if (entry->key_bytes == bytes && memcmp(w->names + entry->key, key, bytes) == 0) break;
    }
    return &w->seen[at];
}

/* Makes `seen` at least twice as large as the entries that it will hold. */
SPDL__PRIVATE bool spdl__write_spread(spdl_npz_writer *w) {
    const size_t old_room = w->seen_room;
    uint32_t *old = w->seen;
    const spdl__write_entry *entry;
    size_t i;
    if (2 * (w->count + 1) <= w->seen_room) return true;
    w->seen_room = old_room > 0 ? 2 * old_room : 128;
    w->seen = (uint32_t *)spdl__alloc_zeroed(&w->desc.allocator, w->seen_room, sizeof(*old), 64);
    if (w->seen == NULL) {
        w->seen = old;
        w->seen_room = old_room;
        return false;
    }
    for (i = 0; i < w->count; i++) {
        entry = &w->entries[i];
        *spdl__write_place(w, w->names + entry->key, entry->key_bytes) = (uint32_t)i + 1;
    }
    spdl__free(&w->desc.allocator, old, old_room * sizeof(*old));
    return true;
}

/* Adds an entry for the name; its key has ".npy" behind it. */
SPDL__PRIVATE spdl_result spdl__write_name(spdl_npz_writer *w, const char *name,
                                           spdl_error *error) {
    const size_t bytes = strlen(name), key_bytes = bytes + 4;
    const spdl_allocator *allocator = &w->desc.allocator;
    spdl__write_entry *entry;
    uint32_t *place;
    void *entries = w->entries, *names = w->names;
    bool grown;
    if (key_bytes > 65535 || w->count >= 0x7ffffffe)
        return spdl__write_fail(w, error, SPDL_E_LIMIT, NULL, "a name too long, or one too many");
    grown = spdl__write_grow(allocator, &entries, &w->room, w->count, sizeof(*entry));
    w->entries = (spdl__write_entry *)entries;
    grown = grown && spdl__write_grow(allocator, &names, &w->names_room,
                                      w->names_bytes + key_bytes, 1);
    w->names = (char *)names;
    if (!grown || !spdl__write_spread(w))
        return spdl__write_fail(w, error, SPDL_E_NOMEM, name, "no memory for the directory");
    memcpy(w->names + w->names_bytes, name, bytes);
    memcpy(w->names + w->names_bytes + bytes, ".npy", 4);
    place = spdl__write_place(w, w->names + w->names_bytes, key_bytes);
    if (*place != 0)
        return spdl__write_fail(w, error, SPDL_E_INVALID, name, "there is one of this name");
    entry = &w->entries[w->count++];
    memset(entry, 0, sizeof(*entry));
    entry->key = w->names_bytes;
    entry->key_bytes = (uint16_t)key_bytes;
    w->names_bytes += key_bytes;
    *place = (uint32_t)w->count;
    return SPDL_OK;
}

/* The text of a type that is told by kind, size and order. */
SPDL__PRIVATE void spdl__write_descr(const spdl_npy_info *info, char *to, size_t room) {
    const char order = info->byte_order == '<' || info->byte_order == '>' ? info->byte_order
                                                                          : spdl__npy_host_order();
    const bool plain = info->kind == 'S' || info->kind == 'V' ||
                       (info->kind != 'U' && info->itemsize == 1);
    const uint64_t number = info->kind == 'U' ? info->itemsize / 4 : info->itemsize;
    snprintf(to, room, "%c%c%llu", plain ? '|' : order, info->kind, (spdl__llu)number);
}

/* Appends to a text as printf does; false when it does not fit. */
SPDL__PRIVATE bool spdl__write_text(char *to, size_t room, size_t *used, const char *format, ...)
    SPDL__PRINTF(4, 5);

SPDL__PRIVATE bool spdl__write_text(char *to, size_t room, size_t *used, const char *format, ...) {
    va_list args;
    int length;
    va_start(args, format);
    length = vsnprintf(to + *used, room - *used, format, args);
    va_end(args);
    if (length < 0 || (size_t)length >= room - *used) return false;
    *used += (size_t)length;
    return true;
}

/* The dictionary of a header; 0 when there is no room for it. */
SPDL__PRIVATE size_t spdl__write_dictionary(const spdl_npy_info *info, char *to, size_t room) {
    char made[32];
    const char *descr = info->descr, *quote;
    size_t used = 0;
    bool fits;
    int i;
    if (descr[0] == 0) {
        spdl__write_descr(info, made, sizeof(made));
        descr = made;
    }
    quote = descr[0] == '[' ? "" : "'";
    fits = spdl__write_text(to, room, &used,
                            "{'descr': %s%.255s%s, 'fortran_order': %s, 'shape': (", quote, descr,
                            quote, info->fortran_order ? "True" : "False");
    for (i = 0; i < info->ndim; i++)
        fits = fits && spdl__write_text(to, room, &used, i > 0 ? ", %llu" : "%llu",
                                        (spdl__llu)info->shape[i]);
    fits = fits && spdl__write_text(to, room, &used, info->ndim == 1 ? ",), }" : "), }");
    return fits ? used : 0;
}

/* Completes the header whose text of `used` bytes is at w->scratch + 12; returns its length. */
SPDL__PRIVATE size_t spdl__write_frame(const spdl_npz_writer *w, size_t used, int version) {
    uint8_t *to = w->scratch;
    const size_t start = version == 1 ? 10 : 12;
    const size_t total = (start + used + 1 + 63) & ~(size_t)63; /* as NumPy, whatever the align */
    memmove(to + start, to + 12, used);
    memset(to + start + used, ' ', total - start - used - 1);
    to[total - 1] = '\n';
    memcpy(to, "\x93NUMPY", 6);
    to[6] = (uint8_t)version;
    to[7] = 0;
    if (version == 1) spdl__put16(to + 8, total - start);
    else spdl__put32(to + 8, total - start);
    return total;
}

/* Makes a whole header, and reads it back to see whether it is one: what is wrong with info is then
   wrong with the text. */
SPDL__PRIVATE spdl_result spdl__write_header(spdl_npz_writer *w, const char *name,
                                             const spdl_npy_info *info, spdl_npy_info *real,
                                             spdl_error *error) {
    char *text = (char *)w->scratch + 12;
    size_t used = 0, i;
    spdl__npy_text t;
    if (info->ndim >= 0 && info->ndim <= SPDL_NPY_MAX_DIMS &&
        memchr(info->descr, 0, sizeof(info->descr)) != NULL)
        used = spdl__write_dictionary(info, text, 8192); /* 64 dimensions and a descr take 2 KB */
    if (used == 0)
        return spdl__write_fail(w, error, SPDL_E_INVALID, name, "ndim or descr is not valid");
    if (!spdl__npy_read(&t, (const uint8_t *)text, used, real, NULL, 0))
        return spdl__write_fail(w, error,
                                t.result == SPDL_E_UNSUPPORTED ? t.result : SPDL_E_INVALID, name,
                                t.reason);
    real->version = 1;
    for (i = 0; i < used; i++)
        if ((unsigned char)text[i] >= 128) real->version = 3; /* UTF-8 in names of fields */
    real->header_bytes = spdl__write_frame(w, used, real->version);
    return SPDL_OK;
}

/* Writes the local header of the last entry where it belongs; the second time with its CRC. */
SPDL__PRIVATE spdl_result spdl__write_begin_member(spdl_npz_writer *w, uint64_t before_data,
                                                   spdl_error *error) {
    const spdl__write_entry *entry = &w->entries[w->count - 1];
    const size_t room = SPDL__ZIP_LOCAL_BYTES + (size_t)entry->key_bytes + 26 + w->desc.align;
    uint8_t *local = (uint8_t *)spdl__alloc(&w->desc.allocator, room, 64);
    spdl_result result;
    if (local == NULL)
        return spdl__write_fail(w, error, SPDL_E_NOMEM, NULL, "no memory for a local header");
    result = spdl__write_bytes(w, error, local, spdl__write_local(w, local, entry, before_data));
    spdl__free(&w->desc.allocator, local, room);
    return result;
}

/* Puts the CRC of the last entry into its local header. */
SPDL__PRIVATE spdl_result spdl__write_end_member(spdl_npz_writer *w, spdl_error *error) {
    const spdl__write_entry *entry = &w->entries[w->count - 1];
    const char *reason;
    uint8_t crc[4];
    w->open = false;
    if (w->desc.npy) return SPDL_OK;
    spdl__put32(crc, entry->crc);
    reason = spdl__file_write(w->file, crc, 4, entry->offset + 14);
    return reason == NULL ? SPDL_OK : spdl__write_fail(w, error, SPDL_E_IO, NULL, reason);
}

/* Ends the array that is being written, if it has all its data, and looks whether another may
   follow. */
SPDL__PRIVATE spdl_result spdl__write_ready(spdl_npz_writer *w, const char *name,
                                            spdl_error *error) {
    if (w->failed || w->finished)
        return spdl__error_set(error, SPDL_E_INVALID, "%s: the writer has %s", w->label.label,
                               w->failed ? "failed before" : "finished");
    if (w->open && w->left > 0)
        return spdl__write_fail(w, error, SPDL_E_INVALID, NULL, "the last array lacks data");
    if (name != NULL && w->desc.npy && w->count > 0)
        return spdl__write_fail(w, error, SPDL_E_INVALID, name, "a .npy file holds one array");
    return w->open ? spdl__write_end_member(w, error) : SPDL_OK;
}

/* Writes the headers of a stored member, `head` being the array's own; `bytes` of data follow. */
SPDL__PRIVATE spdl_result spdl__write_start(spdl_npz_writer *w, const char *name,
                                            const uint8_t *head, size_t head_bytes, uint64_t bytes,
                                            spdl_error *error) {
    spdl__write_entry *entry;
    spdl_result result = spdl__write_name(w, name, error);
    if (result != SPDL_OK) return result;
    entry = &w->entries[w->count - 1];
    entry->method = SPDL__ZIP_STORED;
    entry->offset = w->at;
    entry->csize = entry->usize = head_bytes + bytes;
    entry->crc = spdl__crc_add(&w->crc, 0, head, head_bytes);
    if (!w->desc.npy) result = spdl__write_begin_member(w, head_bytes, error);
    if (result == SPDL_OK) result = spdl__write_bytes(w, error, head, head_bytes);
    w->open = true;
    w->left = bytes;
    return result;
}

SPDL_API spdl_result spdl_npz_begin(spdl_npz_writer *writer, const char *name,
                                    const spdl_npy_info *info, spdl_error *error) {
    spdl_npy_info real;
    spdl_result result;
    if (writer == NULL || name == NULL || info == NULL)
        return spdl__error_set(error, SPDL_E_INVALID, "spdl_npz_begin: an argument is NULL");
    result = spdl__write_ready(writer, name, error);
    if (result != SPDL_OK) return result;
    result = spdl__write_header(writer, name, info, &real, error);
    if (result != SPDL_OK) return result;
    return spdl__write_start(writer, name, writer->scratch, (size_t)real.header_bytes, real.bytes,
                             error);
}

SPDL_API spdl_result spdl_npz_append(spdl_npz_writer *writer, const void *data, size_t bytes,
                                     spdl_error *error) {
    const uint8_t *from = (const uint8_t *)data;
    spdl__write_entry *entry;
    spdl_result result = SPDL_OK;
    size_t piece;
    if (writer == NULL || (data == NULL && bytes > 0))
        return spdl__error_set(error, SPDL_E_INVALID, "spdl_npz_append: an argument is NULL");
    if (writer->failed || !writer->open || bytes > writer->left)
        return spdl__write_fail(writer, error, SPDL_E_INVALID, NULL,
                                "more data than the shape says, or no array begun");
    entry = &writer->entries[writer->count - 1];
    for (; bytes > 0 && result == SPDL_OK; bytes -= piece, from += piece) {
        piece = (size_t)spdl__min(bytes, SPDL__NPZ_PIECE);
        entry->crc = spdl__crc_add(&writer->crc, entry->crc, from, piece);
        result = spdl__write_bytes(writer, error, from, piece);
        writer->left -= piece;
    }
    return result;
}

/* Writes a member whose data are one deflate stream of `packed` bytes. The header comes in front of
   it as a stored block, so that the two need not be together in memory. */
SPDL__PRIVATE spdl_result spdl__write_deflated(spdl_npz_writer *w, const char *name,
                                               const spdl_npy_info *real, const void *data,
                                               const uint8_t *packed, size_t packed_bytes,
                                               spdl_error *error) {
    const size_t head = (size_t)real->header_bytes;
    uint8_t block[5] = { 0 }; /* not the last, stored */
    spdl__write_entry *entry;
    spdl_result result = spdl__write_name(w, name, error);
    if (result != SPDL_OK) return result;
    entry = &w->entries[w->count - 1];
    entry->method = SPDL__ZIP_DEFLATED;
    entry->offset = w->at;
    entry->csize = 5 + (uint64_t)head + packed_bytes;
    entry->usize = head + real->bytes;
    entry->crc = spdl__crc_add(&w->crc, 0, w->scratch, head);
    entry->crc = spdl__crc_add(&w->crc, entry->crc, (const uint8_t *)data, (size_t)real->bytes);
    spdl__put16(spdl__put16(block + 1, head), ~head);
    result = spdl__write_begin_member(w, 0, error);
    if (result == SPDL_OK) result = spdl__write_bytes(w, error, block, 5);
    if (result == SPDL_OK) result = spdl__write_bytes(w, error, w->scratch, head);
    return result == SPDL_OK ? spdl__write_bytes(w, error, packed, packed_bytes) : result;
}

/* Lets the hook compress; SPDL_SKIP when the array is to be stored. */
SPDL__PRIVATE spdl_result spdl__write_packed(spdl_npz_writer *w, const char *name,
                                             const spdl_npy_info *info, const void *data,
                                             spdl_error *error) {
    spdl_npy_info real;
    size_t bytes, packed_bytes;
    uint8_t *packed;
    spdl_result result = spdl__write_header(w, name, info, &real, error);
    if (result != SPDL_OK) return result;
    if (real.bytes < 32 || real.bytes > SIZE_MAX / 2) return SPDL_SKIP;
    bytes = (size_t)real.bytes;
    packed = (uint8_t *)spdl__alloc(&w->desc.allocator, bytes, 64);
    if (packed == NULL)
        return spdl__write_fail(w, error, SPDL_E_NOMEM, name, "no memory to compress it");
    packed_bytes = w->desc.deflate(packed, bytes, data, bytes, w->desc.deflate_user);
    result = SPDL_SKIP;
    if (packed_bytes > 0 && packed_bytes <= bytes)
        result = spdl__write_deflated(w, name, &real, data, packed, packed_bytes, error);
    spdl__free(&w->desc.allocator, packed, bytes);
    return result;
}

SPDL_API spdl_result spdl_npz_write(spdl_npz_writer *writer, const char *name,
                                    const spdl_npy_info *info, const void *data,
                                    spdl_error *error) {
    spdl_result result;
    if (writer == NULL || name == NULL || info == NULL)
        return spdl__error_set(error, SPDL_E_INVALID, "spdl_npz_write: an argument is NULL");
    result = spdl__write_ready(writer, name, error);
    if (result != SPDL_OK) return result;
    if (writer->desc.deflate != NULL && !writer->desc.npy && data != NULL) {
        result = spdl__write_packed(writer, name, info, data, error);
        if (result != SPDL_SKIP) return result;
    }
    result = spdl_npz_begin(writer, name, info, error);
    if (result != SPDL_OK) return result;
    if (data == NULL && writer->left > 0)
        return spdl__write_fail(writer, error, SPDL_E_INVALID, name, "its data is NULL");
    return spdl_npz_append(writer, data, (size_t)writer->left, error);
}

/* Writes a header and data that are in memory. */
SPDL__PRIVATE spdl_result spdl__write_whole(spdl_npz_writer *w, const char *name,
                                            const spdl__npz_reader *r, const uint8_t *data,
                                            size_t bytes, spdl_error *error) {
    spdl_result result = spdl__write_start(w, name, r->head, r->head_bytes, bytes, error);
    return result == SPDL_OK ? spdl_npz_append(w, data, bytes, error) : result;
}

SPDL_API spdl_result spdl_npz_copy(spdl_npz_writer *writer, const spdl_npz *npz, size_t index,
                                   spdl_error *error) {
    spdl__npz_reader r;
    spdl_npy_info info;
    uint8_t *block = NULL;
    size_t bytes = 0, head = 0;
    spdl_result result;
    if (writer == NULL)
        return spdl__error_set(error, SPDL_E_INVALID, "spdl_npz_copy: writer is NULL");
    spdl__npz_init_reader(&r, npz, error);
    result = spdl__npz_start(&r, index, true, &info, NULL, 0);
    if (result == SPDL_OK) result = spdl__write_ready(writer, npz->zip.members[index].name, error);
    if (result == SPDL_OK) {
        head = (r.head_bytes + 63) & ~(size_t)63;
        bytes = head + (size_t)info.bytes;
        block = (uint8_t *)spdl__alloc(&writer->desc.allocator, bytes, 64);
        if (block == NULL)
            result = spdl__zip_fail(&r.where, SPDL_E_NOMEM, "no memory to copy it (%llu bytes)",
                                    (spdl__llu)bytes);
    }
    if (result == SPDL_OK) { /* the header may be in the window, which reading changes */
        memcpy(block, r.head, r.head_bytes);
        result = spdl__npz_read_plain(&r, block + head, (size_t)info.bytes);
        r.head = block;
    }
    if (result == SPDL_OK)
        result = spdl__write_whole(writer, npz->zip.members[index].name, &r, block + head,
                                   (size_t)info.bytes, error);
    spdl__free(&writer->desc.allocator, block, bytes);
    spdl__npz_end(&r);
    spdl__npz_fini_reader(&r);
    return result;
}

/* The directory, entry by entry, through the scratch. */
SPDL__PRIVATE spdl_result spdl__write_directory(spdl_npz_writer *w, spdl_error *error) {
    size_t i, used = 0;
    spdl_result result = SPDL_OK;
    for (i = 0; i < w->count && result == SPDL_OK; i++) {
        if (used + SPDL__ZIP_ENTRY_BYTES + w->entries[i].key_bytes + 28 > SPDL__WRITE_BYTES) {
            result = spdl__write_bytes(w, error, w->scratch, used);
            used = 0;
        }
        used += spdl__write_central(w, w->scratch + used, &w->entries[i]);
    }
    return result == SPDL_OK ? spdl__write_bytes(w, error, w->scratch, used) : result;
}

/* The end records, with ZIP64 ones where a number needs them. */
SPDL__PRIVATE spdl_result spdl__write_end(spdl_npz_writer *w, uint64_t start, spdl_error *error) {
    const uint64_t bytes = w->at - start, end = w->at;
    const bool wide = w->count >= 0xffff || bytes >= 0xffffffffu || start >= 0xffffffffu;
    uint8_t *to = w->scratch, *at = to;
    if (wide) {
        at = spdl__put64(spdl__put32(at, 0x06064b50), SPDL__ZIP_END64_BYTES - 12);
        at = spdl__put64(spdl__put16(spdl__put16(at, 45), 45), 0);
        at = spdl__put64(spdl__put64(at, w->count), w->count);
        at = spdl__put64(spdl__put64(at, bytes), start);
        at = spdl__put32(spdl__put32(at, 0x07064b50), 0);
        at = spdl__put32(spdl__put64(at, end), 1);
    }
    at = spdl__put32(spdl__put32(at, 0x06054b50), 0);
    at = spdl__put16(at, spdl__min(w->count, 0xffff));
    at = spdl__put16(at, spdl__min(w->count, 0xffff));
    at = spdl__put32(at, spdl__write_narrow(bytes));
    at = spdl__put16(spdl__put32(at, spdl__write_narrow(start)), 0);
    return spdl__write_bytes(w, error, to, (size_t)(at - to));
}

SPDL_API spdl_result spdl_npz_finish(spdl_npz_writer *writer, spdl_error *error) {
    const char *reason = NULL;
    spdl_result result;
    uint64_t start;
    if (writer == NULL)
        return spdl__error_set(error, SPDL_E_INVALID, "spdl_npz_finish: writer is NULL");
    result = spdl__write_ready(writer, NULL, error);
    if (result != SPDL_OK) return result;
    if (writer->desc.npy && writer->count == 0)
        return spdl__write_fail(writer, error, SPDL_E_INVALID, NULL, "no array was written");
    start = writer->at;
    if (!writer->desc.npy) {
        result = spdl__write_directory(writer, error);
        if (result == SPDL_OK) result = spdl__write_end(writer, start, error);
        if (result != SPDL_OK) return result;
    }
    if (writer->desc.sync) reason = spdl__file_sync(writer->file);
    if (reason == NULL) reason = spdl__file_rename(writer->temporary, writer->path);
    if (reason != NULL) return spdl__write_fail(writer, error, SPDL_E_IO, NULL, reason);
    writer->finished = true;
    return SPDL_OK;
}

SPDL_API void spdl_npz_writer_close(spdl_npz_writer *writer) {
    spdl_allocator allocator;
    if (writer == NULL) return;
    allocator = writer->desc.allocator;
    if (writer->file != SPDL__NO_FILE && !writer->finished) spdl__file_remove(writer->temporary);
    spdl__file_close(writer->file);
    spdl__free(&allocator, writer->entries, writer->room * sizeof(*writer->entries));
    spdl__free(&allocator, writer->names, writer->names_room);
    spdl__free(&allocator, writer->seen, writer->seen_room * sizeof(*writer->seen));
    spdl__free(&allocator, writer->scratch, SPDL__WRITE_BYTES);
    spdl__free(&allocator, writer->path, writer->path_bytes);
    spdl__free(&allocator, writer, sizeof(*writer));
}

/* Makes a file beside the target that nobody else has. */
SPDL__PRIVATE spdl_result spdl__write_open(spdl_npz_writer *w, spdl_error *error) {
    const size_t length = strlen(w->path);
    const char *reason = NULL;
    bool taken = true;
    int tries;
    for (tries = 0; taken && tries < 100; tries++) {
        memcpy(w->temporary, w->path, length);
        snprintf(w->temporary + length, w->path_bytes - 2 * length - 1, ".%016llx.tmp",
                 (spdl__llu)spdl__file_chance());
        reason = spdl__file_create(&w->file, w->temporary, &taken);
    }
    if (reason == NULL) return SPDL_OK;
    w->file = SPDL__NO_FILE;
    return spdl__write_fail(w, error, SPDL_E_IO, NULL, reason);
}

/* Everything that create allocates. */
SPDL__PRIVATE spdl_result spdl__write_build(spdl_npz_writer *w, const char *path,
                                            spdl_error *error) {
    const size_t length = strlen(path);
    w->path_bytes = 2 * length + 32;
    w->path = (char *)spdl__alloc(&w->desc.allocator, w->path_bytes, 64);
    w->scratch = (uint8_t *)spdl__alloc(&w->desc.allocator, SPDL__WRITE_BYTES, 64);
    if (w->path == NULL || w->scratch == NULL)
        return spdl__write_fail(w, error, SPDL_E_NOMEM, NULL, "no memory for the writer");
    memcpy(w->path, path, length + 1);
    w->temporary = w->path + length + 1;
    spdl__crc_init(&w->crc);
    return spdl__write_open(w, error);
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
    w->file = SPDL__NO_FILE;
    spdl__zip_set_label(&w->label, path);
    result = spdl__write_build(w, path, full.error);
    w->desc.error = NULL; /* was for create only */
    if (result == SPDL_OK) *writer = w;
    else spdl_npz_writer_close(w);
    return result;
}

/* ============================================================================================= */
/* >>trace-impl
   The hooks, and the file. A file is claimed when the pipeline is created: it gets an empty trace
   that names this process, and a lock (flock) for as long as the pipeline lives. So neither a
   pipeline beside it nor a later one of this process takes it. Writing copies the events first, so
   it may be done while they are recorded. Threads: hooks run where the pipeline calls them; the
   writer runs in destroy or spdl_trace_write and owns its copy. */

#if defined(SPDL__STRICT)
extern int ftruncate(int file, off_t bytes);
#endif

/* Lanes of threads: index p->workers is the owner's thread, which is the trainer. */
SPDL__PRIVATE int spdl__lanes(const spdl_pipeline *p) { return p->workers + 1; }

/* --- hooks --- */

/* How many items can be taken, those that were dropped and not yet passed among them. A search in
   doubling steps, as the edge may be long: where later calls have ended before earlier ones, it is
   off by as many. */
SPDL__PRIVATE uint64_t spdl__edge_fill(const spdl__edge *edge, uint64_t head) {
    uint64_t least = 0, most = 1;
    while (most <= edge->mask + 1 && spdl__edge_ready(edge, head + most - 1)) {
        least = most;
        most *= 2;
    }
    if (most > edge->mask + 2) most = edge->mask + 2;
    while (most - least > 1) { /* `least` can be taken, `most` cannot */
        const uint64_t middle = least + (most - least) / 2;
        if (spdl__edge_ready(edge, head + middle - 1))
            least = middle;
        else
            most = middle;
    }
    return least;
}

/* By whoever has put something, and by the reader when it has moved the head; when that moves
   meanwhile, it is the reader's to tell. The head goes along: a clock may be read before the store
   in front of it is seen elsewhere, so of two depths the times may not tell which came first. */
SPDL__RARE void spdl__trace_depth(spdl__edge *edge) {
    const uint64_t head = spdl__head(spdl__load(&edge->word));
    /* the reader may have gone on, but for its head: what it took still looks ready */
    const uint64_t fill = spdl__min(spdl__edge_fill(edge, head), edge->window);
    const uint64_t now = spdl_time_ns();
    if (spdl__head(spdl__load(&edge->word)) == head)
        spdl__trace_add(edge->lane, SPDL__EVENT_DEPTH, 0, 0, now, head, fill);
}

/* The meter of the lane that counts here. */
SPDL__PRIVATE spdl__meter *spdl__meter_of(const spdl_pipeline *p, const spdl__node *node,
                                          const spdl__counters *counters) {
    return &p->meters[counters - node->counters];
}

SPDL__PRIVATE void spdl__meter_begin(spdl_pipeline *p, spdl__node *node, spdl__counters *counters) {
    spdl__meter_start(spdl__meter_of(p, node, counters));
}

/* How many sittings to leave out: on average as many as take SPDL__METER_NS, by the time of a call
   and the calls of this sitting. (A sequence of Weyl's.) */
SPDL__PRIVATE int64_t spdl__meter_pause(spdl__meter *meter, const spdl__counters *counters,
                                        uint64_t calls) {
    const uint64_t each = counters->timed_ns / (counters->tasks + 1) + 1;
    const uint64_t most = spdl__min(2 * (SPDL__METER_NS / (each * calls)), 1 << 20);
    meter->lot += 0x9e3779b97f4a7c15u;
    return (int64_t)((meter->lot >> 32) * (most + 1) >> 32);
}

SPDL__RARE void spdl__meter_book(spdl__meter *meter, spdl__counters *counters, uint64_t calls) {
    uint64_t ns, cpu_ns, wait_ns;
    spdl__meter_stop(meter, &ns, &cpu_ns, &wait_ns);
    counters->meter_due = spdl__meter_pause(meter, counters, calls);
    if (!meter->cpu_known) return;
    spdl__count(&counters->metered_ns, ns);
    spdl__count(&counters->metered_cpu_ns, cpu_ns);
    spdl__count(&counters->metered_wait_ns, wait_ns);
    spdl__count(&counters->metered, calls);
    if (!meter->wait_known) spdl__count(&counters->metered_blind, calls);
}

SPDL__PRIVATE void spdl__meter_end(spdl_pipeline *p, spdl__node *node, spdl__counters *counters,
                                   uint64_t calls) {
    if (!SPDL__METERED) return;
    if (spdl__meter_is_due(counters))
        spdl__meter_book(spdl__meter_of(p, node, counters), counters, calls);
    else
        --counters->meter_due;
}

/* Both as they lie in memory: a probe has the compiler load nothing. */
SPDL__INLINE void spdl__call_begin(const spdl_task *task) {
    spdl__probe_task_begin(&task->node->row.name, &task->sequence);
}

SPDL__INLINE void spdl__call_end(const spdl_task *task) {
    spdl__probe_task_end(&task->node->row.name, &task->sequence);
}

/* Stands in the rows of a pipeline that has a trace, so that the others pay nothing. */
SPDL__PRIVATE spdl_result spdl__traced_call(spdl_task *task, void *in, void **out) {
    spdl__trace *trace = task->pipeline->trace;
    const int row = task->node->index;
    const uint64_t begun = spdl_time_ns();
    const spdl_result result = trace->fn[row]->call(task, in, out);
    spdl__trace_add(&trace->lane[task->worker], SPDL__EVENT_CALL, row, (int)result, begun,
                    spdl_time_ns(), task->sequence);
    return result;
}

static const spdl_function spdl__traced_function = { spdl__traced_call, "traced", "void", "void" };

SPDL__PRIVATE void spdl__wait_begin(const spdl_pipeline *p) {
    spdl__probe_next_begin(p->node[p->count - 1].name, p->delivered);
}

SPDL__PRIVATE void spdl__wait_end(spdl_pipeline *p, spdl_result result) {
    spdl__probe_next_end(p->node[p->count - 1].name, p->delivered);
    if (SPDL__TRACED(p->trace))
        spdl__trace_add(&p->trace->lane[p->workers], SPDL__EVENT_NEXT, p->count - 1, (int)result,
                        p->wait_since, spdl_time_ns(), p->delivered - (result == SPDL_OK));
}

/* The reader waited from when it became hungry until the first of the items was put; one that had
   no place had none until now. The trainer may bring no time with it: ages by a clock of 0 would be
   anything. */
SPDL__RARE void spdl__trace_taken(spdl__edge *edge, uint64_t from, uint64_t now) {
    const uint64_t hungry = spdl__exchange(&edge->lane->begun, 0);
    const uint64_t ticket = from + edge->buffer_size;
    uint64_t put, age = 0;
    if (now == 0) now = spdl_time_ns();
    put = now - spdl__slot_age(spdl__edge_slot(edge, from), now);
    if (hungry != 0 && hungry < put)
        spdl__trace_add(edge->lane, SPDL__EVENT_EMPTY, 0, 0, hungry, put, 0);
    if (spdl__edge_ready(edge, ticket) && !spdl__slot_hole(spdl__edge_slot(edge, ticket)))
        age = spdl__slot_age(spdl__edge_slot(edge, ticket), now);
    if (age > 0) spdl__trace_add(edge->lane, SPDL__EVENT_FULL, 0, 0, now - age, now, 0);
    spdl__trace_depth(edge);
}

SPDL__RARE void spdl__trace_item(spdl__node *node, uint64_t item) {
    spdl__trace_add(node->in->lane, SPDL__EVENT_ITEM, node->index, 0, node->number, spdl_time_ns(),
                    item);
}

SPDL__RARE void spdl__trace_batch(spdl_pipeline *p, spdl__node *node, spdl__counters *counters,
                                  uint64_t number, uint64_t began) {
    spdl__trace_add(&p->trace->lane[counters - node->counters], SPDL__EVENT_BATCH, node->index,
                    SPDL_OK, began, spdl_time_ns(), number);
}

SPDL_API void spdl_report_bytes(spdl_task *task, uint64_t bytes_in, uint64_t bytes_out) {
    spdl__counters *counters = &task->node->counters[task->worker];
    spdl__count(&counters->bytes_in, bytes_in);
    spdl__count(&counters->bytes_out, bytes_out);
}

/* The part of a snapshot that comes from the meters; busy_ns is there. */
SPDL__PRIVATE void spdl__split_snapshot(const spdl_pipeline *p, const spdl__node *node,
                                        spdl_stage_stats *stats) {
    uint64_t ns = 0, cpu_ns = 0, wait_ns = 0, blind = 0;
    int i;
    for (i = 0; i < spdl__lanes(p); ++i) {
        const spdl__counters *counters = &node->counters[i];
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

SPDL__PRIVATE uint64_t spdl__workers_snapshot(spdl_pipeline *p, const spdl_stats *stats) {
    uint64_t runnable = 0, inside = 0;
    int i;
    for (i = 0; i < p->workers; ++i) runnable += spdl__load_relaxed(&p->meters[i].waited_ns);
    for (i = 0; i < p->count; ++i) inside += stats->stage[i].runnable_ns;
    return spdl__lift(&p->seen_runnable_ns, runnable - spdl__min(inside, runnable));
}

/* --- a copy of the events, in order --- */

typedef struct spdl__traced {
    uint64_t begin, end, number;
    int32_t lane;
    int16_t result;
    uint8_t row, kind;
} spdl__traced;

/* Copies one event; false when it is not there, or just being overwritten. */
SPDL__PRIVATE bool spdl__trace_copy(const spdl__lane *lane, uint64_t place, spdl__traced *to) {
    const spdl__note *note = &lane->notes[place & lane->mask];
    const uint64_t stamp = spdl__load(&note->stamp);
    if ((uint32_t)(stamp >> 32) != (uint32_t)(place + 1)) return false;
    to->begin = spdl__load(&note->begin);
    to->end = spdl__load(&note->end);
    to->number = spdl__load(&note->number);
    to->result = (int16_t)(uint16_t)(stamp >> 16);
    to->row = (uint8_t)(stamp >> 8);
    to->kind = (uint8_t)stamp;
    return spdl__load(&note->stamp) == stamp;
}

/* The events that are there, at most `most`; *dropped counts those that were overwritten. */
SPDL__PRIVATE size_t spdl__trace_collect(const spdl__trace *trace, spdl__traced *events,
                                         size_t most, uint64_t *dropped) {
    size_t count = 0;
    int i;
    *dropped = 0;
    for (i = 0; i < trace->threads + trace->edges; ++i) {
        const spdl__lane *lane = &trace->lane[i];
        const uint64_t end = spdl__load(&lane->count), size = lane->mask + 1;
        uint64_t place = end > size ? end - size : 0;
        *dropped += place;
        for (; place < end && count < most; ++place) {
            events[count].lane = i;
            if (spdl__trace_copy(lane, place, &events[count]))
                ++count;
            else
                ++*dropped;
        }
    }
    return count;
}

SPDL__PRIVATE int spdl__compare(uint64_t a, uint64_t b) { return (a > b) - (a < b); }

/* By lane and time, for the slices. */
SPDL__PRIVATE int spdl__traced_by_lane(const void *a, const void *b) {
    const spdl__traced *x = (const spdl__traced *)a, *y = (const spdl__traced *)b;
    if (x->lane != y->lane) return x->lane < y->lane ? -1 : 1;
    if (x->begin != y->begin) return spdl__compare(x->begin, y->begin);
    return spdl__compare(x->end, y->end);
}

SPDL__PRIVATE int spdl__traced_class(const spdl__traced *event) {
    return event->kind <= SPDL__EVENT_BATCH ? 0 : event->kind == SPDL__EVENT_ITEM ? 1 : 2;
}

/* By what made which item when, for the arrows: calls and batches, then items in batches. */
SPDL__PRIVATE int spdl__traced_by_item(const void *a, const void *b) {
    const spdl__traced *x = (const spdl__traced *)a, *y = (const spdl__traced *)b;
    const int class_x = spdl__traced_class(x), class_y = spdl__traced_class(y);
    if (class_x != class_y) return class_x - class_y;
    if (x->row != y->row) return x->row < y->row ? -1 : 1;
    if (x->number != y->number) return spdl__compare(x->number, y->number);
    return spdl__compare(x->end, y->end);
}

/* Events of one lane one after the other: a slice begins where the one before it ends at the
   earliest, and a batch has a length, so that an arrow can end in it. */
SPDL__PRIVATE void spdl__trace_untangle(spdl__traced *events, size_t count, uint64_t start) {
    uint64_t end = start;
    size_t i;
    for (i = 0; i < count; ++i) {
        spdl__traced *event = &events[i];
        if (i > 0 && event->lane != event[-1].lane) end = start;
        if (event->kind == SPDL__EVENT_DEPTH || event->kind == SPDL__EVENT_ITEM) continue;
        event->begin = spdl__max(event->begin, end);
        event->end = spdl__max(event->end, event->begin + (event->kind == SPDL__EVENT_BATCH));
        end = event->end;
    }
}

/* --- text --- */

typedef struct spdl__trace_out {
    const spdl_pipeline *p;
    int file;
    int process;
    const char *failure;
    uint64_t at;
    size_t used;
    bool begun;
    char buffer[8192];
} spdl__trace_out;

SPDL__PRIVATE void spdl__out_flush(spdl__trace_out *out) {
    if (out->failure == NULL)
        out->failure = spdl__file_write(out->file, out->buffer, out->used, out->at);
    out->at += out->used;
    out->used = 0;
}

/* At most 1000 bytes in one go. */
SPDL__PRIVATE void spdl__out_text(spdl__trace_out *out, const char *format, ...)
    SPDL__PRINTF(2, 3);
SPDL__PRIVATE void spdl__out_text(spdl__trace_out *out, const char *format, ...) {
    va_list args;
    int length;
    if (out->used + 1000 > sizeof(out->buffer)) spdl__out_flush(out);
    va_start(args, format);
    length = vsnprintf(out->buffer + out->used, 1000, format, args);
    va_end(args);
    if (length > 0) out->used += spdl__min((uint64_t)length, 999);
}

/* A name, between the quotes of a JSON string. */
SPDL__PRIVATE void spdl__out_name(spdl__trace_out *out, const char *name) {
    char escaped[6 * SPDL_NAME_BYTES]; /* a byte becomes 6 at most */
    spdl__text text = spdl__text_start(escaped, sizeof(escaped));
    spdl__json_escape(&text, name);
    spdl__out_text(out, "%s", escaped);
}

/* The start of every event; `lane` is a thread to the viewer. */
SPDL__PRIVATE void spdl__out_event(spdl__trace_out *out, const char *phase, int lane) {
    spdl__out_text(out, "%s{\"ph\":\"%s\",\"pid\":%d,\"tid\":%d", out->begun ? ",\n" : "\n", phase,
                   out->process, lane + 1);
    out->begun = true;
}

/* In microseconds, as viewers want it, without losing nanoseconds. */
SPDL__PRIVATE void spdl__out_time(spdl__trace_out *out, const char *key, uint64_t ns) {
    spdl__out_text(out, ",\"%s\":%llu.%03u", key, (spdl__llu)(ns / 1000), (unsigned)(ns % 1000));
}

SPDL__PRIVATE uint64_t spdl__out_since(const spdl__trace_out *out, uint64_t ns) {
    return ns > out->p->start_ns ? ns - out->p->start_ns : 0;
}

/* Names of the process and of the lanes; the viewer shows them in this order. */
SPDL__PRIVATE void spdl__out_names(spdl__trace_out *out, uint64_t dropped) {
    const spdl__trace *trace = out->p->trace;
    int i;
    spdl__out_event(out, "M", -1);
    spdl__out_text(out, ",\"name\":\"process_name\",\"args\":{\"name\":\"spdl ");
    spdl__out_name(out, trace->name);
    spdl__out_text(out, "\"}}");
    spdl__out_event(out, "M", -1);
    spdl__out_text(out,
                   ",\"name\":\"process_labels\",\"args\":{\"labels\":\"%llu dropped\"}}",
                   (spdl__llu)dropped);
    for (i = 0; i < trace->threads + trace->edges; ++i) {
        const int edge = i - trace->threads;
        spdl__out_event(out, "M", i);
        spdl__out_text(out, ",\"name\":\"thread_name\",\"args\":{\"name\":\"");
        if (edge >= 0) {
            spdl__out_text(out, "edge %d, behind ", edge);
            spdl__out_name(out, out->p->node[edge].name);
        } else if (i == out->p->workers) {
            spdl__out_text(out, "trainer");
        } else {
            spdl__out_name(out, trace->name);
            spdl__out_text(out, "-%d", i);
        }
        spdl__out_text(out, "\"}}");
        spdl__out_event(out, "M", i);
        spdl__out_text(out, ",\"name\":\"thread_sort_index\",\"args\":{\"sort_index\":%d}}", i);
    }
}

SPDL__PRIVATE void spdl__out_depth(spdl__trace_out *out, const spdl__traced *event) {
    const int edge = event->lane - out->p->trace->threads;
    spdl__out_event(out, "C", event->lane);
    spdl__out_time(out, "ts", spdl__out_since(out, event->begin));
    spdl__out_text(out, ",\"name\":\"edge %d depth, behind ", edge);
    spdl__out_name(out, out->p->node[edge].name);
    spdl__out_text(out, "\",\"args\":{\"items\":%llu}}", (spdl__llu)event->number);
}

SPDL__PRIVATE void spdl__out_slice(spdl__trace_out *out, const spdl__traced *event) {
    const char *const cats[] = { "task", "batch", "", "trainer", "edge", "edge" };
    spdl__out_event(out, "X", event->lane);
    spdl__out_time(out, "ts", spdl__out_since(out, event->begin));
    spdl__out_time(out, "dur", event->end - event->begin);
    spdl__out_text(out, ",\"cat\":\"%s\",\"name\":\"", cats[event->kind]);
    if (event->kind == SPDL__EVENT_NEXT) spdl__out_text(out, "next waits");
    if (event->kind == SPDL__EVENT_EMPTY) spdl__out_text(out, "empty");
    if (event->kind == SPDL__EVENT_FULL) spdl__out_text(out, "full");
    if (event->kind <= SPDL__EVENT_BATCH) spdl__out_name(out, out->p->node[event->row].name);
    spdl__out_text(out, "\"");
    if (event->kind <= SPDL__EVENT_NEXT)
        spdl__out_text(out, ",\"args\":{\"item\":%llu,\"stage\":%d,\"result\":\"%s\"}",
                       (spdl__llu)event->number, event->row,
                       spdl_result_text((spdl_result)event->result));
    spdl__out_text(out, "}");
}

/* Slices and depths, in the order of lanes and times. */
SPDL__PRIVATE void spdl__out_lanes(spdl__trace_out *out, const spdl__traced *events,
                                   size_t count) {
    uint64_t head = 0;
    size_t i;
    for (i = 0; i < count && out->failure == NULL; ++i) {
        const spdl__traced *event = &events[i];
        if (i > 0 && event->lane != event[-1].lane) head = 0;
        if (event->kind != SPDL__EVENT_DEPTH) {
            if (event->kind != SPDL__EVENT_ITEM) spdl__out_slice(out, event);
        } else if (event->end >= head) { /* else a writer's, which saw the reader's head late */
            spdl__out_depth(out, event);
            head = event->end;
        }
    }
}

/* --- arrows --- */

/* Of `count` calls and batches in the order of traced_by_item: the first of this row and number
   that did not end before `end`. */
SPDL__PRIVATE size_t spdl__traced_find(const spdl__traced *events, size_t count, uint8_t row,
                                       uint64_t number, uint64_t end) {
    size_t from = 0;
    spdl__traced key;
    memset(&key, 0, sizeof(key));
    key.row = row;
    key.number = number;
    key.end = end;
    while (from < count) {
        const size_t middle = from + (count - from) / 2;
        if (spdl__traced_by_item(&events[middle], &key) < 0)
            from = middle + 1;
        else
            count = middle;
    }
    return from;
}

SPDL__PRIVATE bool spdl__traced_is(const spdl__traced *event, uint8_t row, uint64_t number) {
    return event->row == row && event->number == number;
}

/* What handed on an item that was in a batch of `row` by `end`: the last stage it has passed since
   the batch before. NULL when that was dropped. */
SPDL__PRIVATE const spdl__traced *spdl__trace_maker(const spdl_pipeline *p,
                                                    const spdl__traced *events, size_t count,
                                                    const spdl__traced *item) {
    int row = item->row;
    while (--row >= 0) {
        const uint8_t byte = (uint8_t)row;
        size_t at = spdl__traced_find(events, count, byte, item->number, item->end + 1);
        while (at-- > 0 && spdl__traced_is(&events[at], byte, item->number))
            if (events[at].result == SPDL_OK) return &events[at];
        if (p->node[row].row.kind == SPDL_KIND_BATCH) return NULL;
    }
    return NULL;
}

SPDL__PRIVATE void spdl__out_arrow_end(spdl__trace_out *out, const char *phase, uint64_t id,
                                       const spdl__traced *event) {
    const uint64_t at = event->end > event->begin ? event->end - 1 : event->begin;
    spdl__out_event(out, phase, event->lane);
    spdl__out_time(out, "ts", spdl__out_since(out, at));
    spdl__out_text(out, ",\"cat\":\"item\",\"name\":\"to batch\",\"id\":%llu%s}", (spdl__llu)id,
                   phase[0] == 'f' ? ",\"bp\":\"e\"" : "");
}

/* From each item to its batch, when both ends are there. */
SPDL__PRIVATE void spdl__out_arrows(spdl__trace_out *out, spdl__traced *events, size_t count) {
    size_t slices = 0, i;
    qsort(events, count, sizeof(*events), spdl__traced_by_item);
    while (slices < count && spdl__traced_class(&events[slices]) == 0) ++slices;
    for (i = slices; i < count && events[i].kind == SPDL__EVENT_ITEM; ++i) {
        const spdl__traced *item = &events[i];
        const uint64_t batch = item->begin; /* the batch's number stands there */
        const size_t to = spdl__traced_find(events, slices, item->row, batch, item->end);
        const spdl__traced *from = spdl__trace_maker(out->p, events, slices, item);
        if (from == NULL || to == slices || !spdl__traced_is(&events[to], item->row, batch))
            continue;
        spdl__out_arrow_end(out, "s", i, from);
        spdl__out_arrow_end(out, "f", i, &events[to]);
    }
}

/* --- files --- */

/* The start of the file, by which it is recognised. */
SPDL__PRIVATE void spdl__trace_head(char *head, size_t bytes) {
    (void)snprintf(head, bytes, "{\"otherData\":{\"process\":\"%ld-%llu\"", (long)getpid(),
                   spdl__process_started());
}

/* Writes everything; what went wrong, or NULL. `events` are sorted by this. */
SPDL__PRIVATE const char *spdl__trace_print(const spdl_pipeline *p, int file, spdl__traced *events,
                                            size_t count, uint64_t dropped) {
    spdl__trace_out out;
    char head[128];
    memset(&out, 0, sizeof(out));
    out.p = p;
    out.file = file;
    out.process = (int)getpid();
    spdl__trace_head(head, sizeof(head));
    spdl__out_text(&out, "%s,\"spdl\":\"%s\",\"events\":%llu,\"dropped_events\":%llu},\n", head,
                   spdl_version(), (spdl__llu)count, (spdl__llu)dropped);
    spdl__out_text(&out, "\"displayTimeUnit\":\"ns\",\"traceEvents\":[");
    spdl__out_names(&out, dropped);
    if (count > 0) qsort(events, count, sizeof(*events), spdl__traced_by_lane);
    spdl__trace_untangle(events, count, p->start_ns);
    spdl__out_lanes(&out, events, count);
    if (count > 0 && out.failure == NULL) spdl__out_arrows(&out, events, count);
    spdl__out_text(&out, "\n]}\n");
    spdl__out_flush(&out);
    return out.failure;
}

/* Writes to an open file and tells how it went. */
SPDL__PRIVATE spdl_result spdl__trace_save(const spdl_pipeline *p, int file, const char *path) {
    const size_t most = p->trace->note_count;
    spdl__traced *events = (spdl__traced *)spdl__alloc_zeroed(&p->allocator, most, sizeof(*events),
                                                              sizeof(uint64_t));
    const char *failure = "out of memory";
    uint64_t dropped = 0;
    size_t count;
    if (events != NULL) {
        count = spdl__trace_collect(p->trace, events, most, &dropped);
        failure = spdl__trace_print(p, file, events, count, dropped);
        spdl__free(&p->allocator, events, most * sizeof(*events));
    }
    if (failure != NULL) {
        spdl__tell(&p->logger, SPDL_LOG_WARN, "spdl: trace '%s': %s", path, failure);
        return events == NULL ? SPDL_E_NOMEM : SPDL_E_IO;
    }
    if (dropped > 0)
        spdl__tell(&p->logger, SPDL_LOG_WARN,
                         "spdl: trace '%s': the latest %llu events are there, %llu were dropped "
                         "(trace_events, or SPDL_TRACE=FILE,events=N, keeps more)",
                         path, (spdl__llu)count, (spdl__llu)dropped);
    else
        spdl__tell(&p->logger, SPDL_LOG_INFO, "spdl: trace '%s': %llu events", path,
                         (spdl__llu)count);
    return SPDL_OK;
}

SPDL_API spdl_result spdl_trace_write(const spdl_pipeline *p, const char *path) {
    spdl_result result;
    int file;
    if (p == NULL || path == NULL || p->trace == NULL) return SPDL_E_INVALID;
    file = spdl__own_file(path, O_WRONLY | O_TRUNC);
    if (file < 0) {
        spdl__tell(&p->logger, SPDL_LOG_WARN, "spdl: trace '%s': %s", path, strerror(errno));
        return SPDL_E_IO;
    }
    result = spdl__trace_save(p, file, path);
    (void)close(file);
    return result;
}

/* "t.json" with a number: "t-2.json". False when it is too long. */
SPDL__PRIVATE bool spdl__trace_path(char *to, size_t bytes, const char *path, int number) {
    const char *slash = strrchr(path, '/'), *dot = strrchr(path, '.');
    int length;
    if (dot == NULL || dot == path || (slash != NULL && dot <= slash + 1))
        dot = path + strlen(path);
    length = number == 1 ? snprintf(to, bytes, "%s", path)
                         : snprintf(to, bytes, "%.*s-%d%s", (int)(dot - path), path, number, dot);
    return length > 0 && (size_t)length < bytes;
}

/* Whether this open file is another pipeline's: of a process that is tracing, or of this one. */
SPDL__PRIVATE bool spdl__trace_taken_by_other(int file) {
    char head[128], text[128];
    size_t have;
    if (flock(file, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return true;
    spdl__trace_head(head, sizeof(head));
    (void)spdl__file_read(file, text, strlen(head), 0, &have);
    return have == strlen(head) && memcmp(head, text, have) == 0;
}

/* Finds a name that is free and puts an empty trace there; what went wrong, or NULL. */
SPDL__PRIVATE const char *spdl__trace_claim(const spdl_pipeline *p, const char *path) {
    spdl__trace *trace = p->trace;
    uint64_t bytes;
    int number;
    for (number = 1; number < 100; ++number) {
        if (!spdl__trace_path(trace->path, sizeof(trace->path), path, number))
            return "the name is too long";
        trace->file = spdl__own_file(trace->path, O_RDWR);
        if (trace->file < 0) return strerror(errno);
        if (spdl__file_size(trace->file, &bytes) != NULL) /* a device */
            return spdl__trace_print(p, trace->file, NULL, 0, 0);
        if (!spdl__trace_taken_by_other(trace->file)) {
            if (ftruncate(trace->file, 0) != 0) return strerror(errno);
            return spdl__trace_print(p, trace->file, NULL, 0, 0);
        }
        (void)close(trace->file);
        trace->file = -1;
    }
    return "it and 98 more with a number are other pipelines'";
}

/* --- create and destroy --- */

SPDL__PRIVATE void spdl__trace_free(spdl_pipeline *p) {
    spdl__trace *trace = p->trace;
    int i;
    for (i = 0; i < p->count; ++i) {
        p->node[i].out.lane = NULL;
        if (trace->fn[i] != NULL) p->node[i].row.fn = trace->fn[i];
    }
    p->trace = NULL;
    if (trace->file >= 0) (void)close(trace->file);
    spdl__free(&p->allocator, trace->notes, trace->note_count * sizeof(*trace->notes));
    spdl__free(&p->allocator, trace->lane,
               (size_t)(trace->threads + trace->edges) * sizeof(*trace->lane));
    spdl__free(&p->allocator, trace, sizeof(*trace));
}

/* Room for `events` events of each lane; false when there is no memory. */
SPDL__PRIVATE bool spdl__trace_build(spdl_pipeline *p, uint64_t events) {
    spdl__trace *trace =
        (spdl__trace *)spdl__alloc_zeroed(&p->allocator, 1, sizeof(*trace), sizeof(void *));
    size_t lanes, i;
    if (trace == NULL) return false;
    trace->threads = spdl__lanes(p);
    trace->edges = p->count;
    trace->file = -1;
    lanes = (size_t)(trace->threads + trace->edges);
    events = spdl__pow2(events);
    trace->note_count = lanes * (size_t)events;
    trace->lane = (spdl__lane *)spdl__alloc_zeroed(&p->allocator, lanes, sizeof(*trace->lane),
                                                   SPDL_CACHE_LINE);
    trace->notes = (spdl__note *)spdl__alloc_zeroed(&p->allocator, trace->note_count,
                                                    sizeof(*trace->notes), SPDL_CACHE_LINE);
    p->trace = trace;
    if (trace->lane == NULL || trace->notes == NULL) return false;
    for (i = 0; i < lanes; ++i) {
        trace->lane[i].notes = trace->notes + i * (size_t)events;
        trace->lane[i].mask = events - 1;
    }
    for (i = 0; i < (size_t)p->count; ++i) {
        p->node[i].out.lane = &trace->lane[(size_t)trace->threads + i];
        if (i + 1 < (size_t)p->count) p->node[i].out.lane->begun = 1; /* hungry from the start */
        trace->fn[i] = p->node[i].row.fn;
        if (trace->fn[i] != NULL) p->node[i].row.fn = &spdl__traced_function;
    }
    return true;
}

/* Takes ",events=N" off the value of SPDL_TRACE. */
SPDL__PRIVATE void spdl__trace_option(const spdl_logger *logger, char *value, uint64_t *events) {
    const char *const key = ",events=";
    char *option = strstr(value, key), *end;
    unsigned long long number;
    if (option == NULL) return;
    number = strtoull(option + strlen(key), &end, 10);
    if (option[strlen(key)] < '0' || option[strlen(key)] > '9' || *end != '\0' || number < 1 ||
        number > SPDL__TRACE_EVENTS_MAX)
        spdl__tell(logger, SPDL_LOG_WARN,
                         "spdl: SPDL_TRACE: '%s' is not events=1 to %d; %llu are kept", option + 1,
                         SPDL__TRACE_EVENTS_MAX, (spdl__llu)*events);
    else
        *events = number;
    if (option == value)
        spdl__tell(logger, SPDL_LOG_WARN, "spdl: SPDL_TRACE: there is no file in front of '%s'",
                   value);
    *option = '\0';
}

SPDL__PRIVATE void spdl__trace_start(spdl_pipeline *p, const spdl_pipeline_desc *desc,
                                     const char *path, uint64_t events) {
    const char *failure = NULL;
    const char *name = desc->pool != NULL ? desc->pool->name : desc->name;
    if (!spdl__trace_build(p, events)) {
        failure = "out of memory";
    } else {
        spdl__name_copy(p->trace->name, name != NULL ? name : "spdl");
        if (path[0] != '\0') failure = spdl__trace_claim(p, path);
    }
    if (failure == NULL) return;
    spdl__tell(&p->logger, SPDL_LOG_WARN, "spdl: trace '%s': %s; there will be none", path,
               failure);
    if (p->trace != NULL) spdl__trace_free(p);
}

SPDL__PRIVATE spdl_result spdl__trace_open(spdl_pipeline *p, const spdl_pipeline_desc *desc) {
    const char *value = desc->trace != NULL ? desc->trace : spdl__environment("SPDL_TRACE");
    uint64_t events = desc->trace_events > 0 ? (uint64_t)desc->trace_events : SPDL__TRACE_EVENTS;
    char path[sizeof(p->trace->path)];
    int i;
    p->meters = (spdl__meter *)spdl__alloc_zeroed(&p->allocator, (size_t)spdl__lanes(p),
                                                  sizeof(*p->meters), SPDL_CACHE_LINE);
    if (p->meters == NULL) return SPDL_E_NOMEM;
    for (i = 0; i < p->count; ++i) p->node[i].row.name = p->node[i].name; /* for the probes */
    for (i = 0; i < spdl__lanes(p); ++i) {
        p->meters[i].file = -1;
    }
    if (value == NULL) value = "";
    if (strlen(value) >= sizeof(path)) {
        spdl__tell(&p->logger, SPDL_LOG_WARN, "spdl: trace: the name is too long");
        return SPDL_OK;
    }
    memcpy(path, value, strlen(value) + 1);
    if (desc->trace == NULL) spdl__trace_option(&p->logger, path, &events);
    if (path[0] != '\0' || desc->trace_events > 0) spdl__trace_start(p, desc, path, events);
    return SPDL_OK;
}

SPDL__PRIVATE void spdl__trace_close(spdl_pipeline *p) {
    int i;
    if (p->trace != NULL && p->trace->file >= 0 && p->start_ns != 0)
        (void)spdl__trace_save(p, p->trace->file, p->trace->path);
    if (p->trace != NULL) spdl__trace_free(p);
    for (i = 0; p->meters != NULL && i < spdl__lanes(p); ++i)
        if (p->meters[i].file >= 0) (void)close(p->meters[i].file);
    spdl__free(&p->allocator, p->meters, (size_t)spdl__lanes(p) * sizeof(*p->meters));
}

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
