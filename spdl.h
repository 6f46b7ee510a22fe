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
       >>pipeline  >>state  >>stats  >>report  >>trace  >>cache  >>headspace  >>doctor
       >>sampler  >>loader  >>npz  >>files  >>cpp                          declarations
       >>platform-impl  >>atomics-impl  >>os  >>os-none  >>os-posix
       >>os-process                                                        what all stand on
       >>core-impl  >>ring-core  >>ring-impl  >>pool-impl  >>trace-core
       >>edge-impl  >>row-impl  >>position-impl  >>flow-impl  >>batch-impl  >>merge-impl
       >>step-impl  >>next-impl  >>stop-impl  >>create-impl                an item's way
       >>stats-impl  >>report-impl                                         around it
       >>cache-impl  >>compare-impl  >>headspace-impl
       >>probe-impl  >>doctor-impl  >>doctor-text-impl  >>sampler-impl  >>loader-impl
       >>crc-impl  >>inflate-impl  >>zip-impl  >>npy-impl  >>npz-impl  >>load-impl  >>write-impl
       >>files-impl  >>state-impl  >>trace-impl  >>license

   WORDS
       item          a void * that moves through the pipeline; NULL is an item like any other
       stage         a user function with a concurrency
       edge          the bounded ring between two stages
       worker        a thread of the pool
       task          one call of a stage function on one item
       batch         items grouped by SPDL_BATCH
       sink          the last edge, read by the consumer
       consumer      who calls spdl_pipeline_next: a trainer, in most programs
       buffer_size   how many finished items may wait on an edge
       readiness     the share of time an edge had something to take
       headspace     the gain if loading cost nothing

   THREADS
       Every doc block says who may call: "any" thread, the "owner" (one thread at a time), the
       "producer" or the "consumer" of a ring, or "a stage" (inside a stage function). Workers
       sleep in the kernel when there is nothing to do; nothing polls. There is one timer, that of
       reports that were asked for (>>report). Workers block all signals but those a fault raises.
       A process that forks may use the library in the child only for objects made there: the
       workers stay behind in the parent.

   MEMORY
       Allocation happens in create and open calls only, through spdl_allocator, except in these
       cases: batches and buffers that the consumer keeps, reading and writing npz (see >>npz-impl),
       records of files (>>files), spdl_state_load, and a copy of what a trace has recorded while
       its file is written.
       A running pipeline allocates nothing. An item belongs to the library from the moment a stage
       hands it out until spdl_pipeline_next hands it to the consumer; see >>pipeline for the rules.

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

/* In front of each public declaration. Your own definition must begin with extern. For hidden
   symbols: extern __attribute__((visibility("hidden"))). */
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
   Define them for the file with the implementation: a call of a function that was left out then
   fails when the program is linked. Or define them for every file: then it does not compile.
   Structs and all other functions are the same with and without. */

/* SPDL_DEBUG, defined before the implementation, finds misuse that costs time to look for:
       two threads at once on a side of an SPSC ring (an assert);
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

/* The version of the implementation that was linked.
   Returns: "major.minor.patch", a string literal. */
SPDL_API const char *spdl_version(void);

/* ============================================================================================= */
/* >>time */

/* Timeouts are in nanoseconds on the monotonic clock: 0 tries once and never waits. */
#define SPDL_FOREVER SPDL__CAST(int64_t, -1)
#define SPDL_SECONDS(s) SPDL__CAST(int64_t, (s) * 1e9)

/* The monotonic clock that all timeouts and statistics use.
   Returns: nanoseconds since an arbitrary moment; they never go backwards. */
SPDL_API uint64_t spdl_time_ns(void);

/* ============================================================================================= */
/* >>result */

#define SPDL__RESULT_LIST(X)                                                                        \
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
    X(SPDL_E_CUDA_FORKED, -14, "CUDA was opened before a fork and used after it, in the child")    \
    X(SPDL_E_PROCESS, -15, "a loader process has ended")

typedef enum spdl_result SPDL__INT_ENUM {
#define SPDL__ENUM(name, value, text) name = value,
    SPDL__RESULT_LIST(SPDL__ENUM)
#undef SPDL__ENUM
} spdl_result;

/* What a result means, in a few words.
   Returns: a string literal; "unknown result" for a value outside the list. */
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
   returns NULL when there is none; `align` is a power of two, at least 8. free_fn gets the size
   that was asked for. Any thread may call both, at the same time: workers make batches when the
   consumer keeps many, spdl_batch_free and spdl_npz_read run where they are called. The allocator
   must outlive the last batch. */
typedef struct spdl_allocator {
    void *(*alloc_fn)(size_t bytes, size_t align, void *user);
    void (*free_fn)(void *memory, size_t bytes, void *user);
    void *user;
} spdl_allocator;

/* ============================================================================================= */
/* >>log */

typedef enum spdl_log_level { SPDL_LOG_ERROR, SPDL_LOG_WARN, SPDL_LOG_INFO } spdl_log_level;

/* Where messages go. Zero means stderr for errors and warnings, nothing for the rest. `text` is one
   line without a newline. Any thread may call log_fn, workers too. */
typedef struct spdl_logger {
    void (*log_fn)(spdl_log_level level, const char *text, void *user);
    void *user;
} spdl_logger;

/* ============================================================================================= */
/* >>ring
   A bounded queue of items of one size, a pointer by default. It holds exactly `capacity` items;
   they leave in the order in which they came in. Items of 8 bytes are quickest.

   In this section: producers call push, consumers call pop, and any thread calls the rest. Calls
   with a timeout spin, yield, and then sleep in the kernel; the others never wait. After SPDL_OK a
   pushed item belongs to the ring and a popped one to the caller; after any other result nothing
   has moved. SPDL_CLOSED tells a producer that the ring is closed, and a consumer that it is closed
   and empty.

   MPMC has any number of producers and consumers. Each consumer sees the items of one producer in
   order. A thread that is stopped between claiming a slot and filling (or emptying) it holds up the
   slots after it: try_pop may return SPDL_EMPTY although later items are inside.

   SPSC is quicker, and wait-free. One thread at a time is its producer and one its consumer; either
   side may pass to another thread when the program orders the two. Two threads at once on a side
   corrupt the ring. With SPDL_DEBUG in the implementation file they meet an assert, and the call
   returns SPDL_E_INVALID. */

typedef enum spdl_ring_mode { SPDL_RING_MPMC, SPDL_RING_SPSC } spdl_ring_mode;

typedef struct spdl_ring_desc {
    uint64_t capacity;        /* items, at least 1, at most 2^30 */
    size_t item_bytes;        /* 0: sizeof(void *); at most 4096 */
    spdl_ring_mode mode;      /* default MPMC */
    spdl_allocator allocator; /* default malloc */
    spdl_error *error;        /* optional: says why create failed */
} spdl_ring_desc;
typedef struct spdl_ring spdl_ring;

/* Makes a ring; on failure *ring is NULL.
   Returns: SPDL_OK, SPDL_E_INVALID (a field out of range), SPDL_E_NOMEM. */
SPDL_API spdl_result spdl_ring_create(spdl_ring **ring, const spdl_ring_desc *desc);

/* Frees the ring. Calls free_item (may be NULL) once with the address of each item left inside,
   aligned to 8 bytes at most. The ring may be NULL.
   Threads: one; no other call on the ring may be running, nor come later. */
SPDL_API void spdl_ring_destroy(spdl_ring *ring, void (*free_item)(void *item, void *user),
                                void *user);

/* Copies one item of item_bytes from `item` to the tail.
   Returns: SPDL_OK, SPDL_FULL, SPDL_CLOSED. */
SPDL_API spdl_result spdl_ring_try_push(spdl_ring *ring, const void *item);

/* Copies one item from the head to `item`.
   Returns: SPDL_OK, SPDL_EMPTY, SPDL_CLOSED. */
SPDL_API spdl_result spdl_ring_try_pop(spdl_ring *ring, void *item);

/* As spdl_ring_try_push, but waits for room.
   Returns: SPDL_OK, SPDL_TIMEOUT, SPDL_CLOSED, SPDL_E_INVALID (a NULL argument). */
SPDL_API spdl_result spdl_ring_push(spdl_ring *ring, const void *item, int64_t timeout_ns);

/* As spdl_ring_try_pop, but waits for an item.
   Returns: SPDL_OK, SPDL_TIMEOUT, SPDL_CLOSED, SPDL_E_INVALID (a NULL argument). */
SPDL_API spdl_result spdl_ring_pop(spdl_ring *ring, void *item, int64_t timeout_ns);

/* Pushes up to n items that lie one after the other. *moved: how many went in, from the first on;
   the rest stays the caller's.
   Returns: SPDL_OK (at least one, or n is 0), SPDL_FULL, SPDL_CLOSED. */
SPDL_API spdl_result spdl__ring_try_push_n(spdl_ring *ring, const void *items, uint64_t n,
                                          uint64_t *moved);

/* Pops up to n items to `items`, one after the other. *moved: how many.
   Returns: SPDL_OK (at least one, or n is 0), SPDL_EMPTY, SPDL_CLOSED. */
SPDL_API spdl_result spdl__ring_try_pop_n(spdl_ring *ring, void *items, uint64_t n,
                                         uint64_t *moved);

/* Pushes n items, and waits for room as often as it must. *moved: how many went in, whatever the
   result; the rest stays the caller's. Items of other producers may come in between.
   Returns: SPDL_OK (all n), SPDL_TIMEOUT, SPDL_CLOSED, SPDL_E_INVALID (a NULL argument). */
SPDL_API spdl_result spdl_ring_push_n(spdl_ring *ring, const void *items, uint64_t n,
                                      uint64_t *moved, int64_t timeout_ns);

/* Waits for at least one item, then pops up to n that are there. *moved: how many.
   Returns: SPDL_OK (at least one, or n is 0), SPDL_TIMEOUT, SPDL_CLOSED, SPDL_E_INVALID (NULL). */
SPDL_API spdl_result spdl_ring_pop_n(spdl_ring *ring, void *items, uint64_t n, uint64_t *moved,
                                     int64_t timeout_ns);

/* Ends the flow. A push that starts after close has returned is refused with SPDL_CLOSED. Pops
   take the items that were accepted, and then return SPDL_CLOSED. All waiting calls wake up. A push
   that runs at the same time is either refused, or its item can be popped. Closing twice is fine.
   Threads: any in MPMC; in SPSC the producer. */
SPDL_API void spdl_ring_close(spdl_ring *ring);

/* Items inside right now; exact when no other thread is pushing or popping.
   Returns: 0 to capacity. */
SPDL_API uint64_t spdl_ring_count(const spdl_ring *ring);

/* The capacity the ring was made with.
   Returns: at least 1. */
SPDL_API uint64_t spdl_ring_capacity(const spdl_ring *ring);

/* ============================================================================================= */
/* >>pool
   A fixed set of worker threads. It runs submitted jobs, and the stages of the pipelines attached
   to it.

   Defaults of this section: any thread may call, a call does not wait, and pointers stay the
   caller's. Only exceptions are written.

   Guests. A program with a job system lends its threads: a pool with guests = n has places for n of
   them at a time, and a thread takes one by spdl_pool_run. Statistics, traces, spdl__task_worker and the
   `worker` of a job count these places after the workers. Nobody wakes a thread that is outside: it
   should come when there may be something to do, as once a frame. With workers = 0 next and push
   wait for guests. What init stores for a place must not belong to a thread: any thread may take
   the place. */

/* Per-worker state: init stores it in *local, fini gets it back. */
typedef spdl_result (*spdl_init_fn)(void *ctx, int worker, void **local);
typedef void (*spdl_fini_fn)(void *ctx, int worker, void *local);

typedef enum spdl_sched {
    SPDL_SCHED_DEFAULT, /* as the thread that creates the workers */
    SPDL_SCHED_BATCH,   /* yields to threads that have just woken */
    SPDL_SCHED_IDLE     /* runs when nobody else would: may starve on a busy machine */
} spdl_sched;

/* How the system schedules workers. Zero changes nothing. For a loader that shares its machine with
   a consumer that computes, first leave it a core: workers = cores - 1, and .next_works_ns.
   `polite` is for consumers with threads on all cores: nice 10 and SCHED_BATCH on Linux, the
   utility class on macOS, nice elsewhere. */
typedef struct spdl_policy {
    bool polite;
    int nice;        /* -20 to 19, 0: as it is; per thread. Lower than now needs a privilege */
    spdl_sched sched;
    const int *cpus; /* the processors the workers may use, by number; Linux only */
    int cpu_count;   /* 0: all that the process may use */
} spdl_policy;

/* What a profiler (Tracy and the like) gets as it happens, begin and end on one thread. */
typedef enum spdl_event {
    SPDL_EVENT_THREAD_BEGIN, /* a worker, before its init: name of the pool, number of the worker */
    SPDL_EVENT_THREAD_END,
    SPDL_EVENT_TASK_BEGIN,   /* a call of a stage: name of the row, number of the item; a job: name
                                of the pool, number of the worker */
    SPDL_EVENT_TASK_END,
    SPDL_EVENT_WAIT_BEGIN,   /* a worker is about to sleep: name of the pool, its number; the
                                consumer has to wait: "next", the number of the item */
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

/* Starts the workers. If an init or a thread fails, or the system refuses the policy, all are ended
   again. The caller destroys *pool; on failure *pool is NULL.
   Returns: SPDL_OK, SPDL_E_INVALID, SPDL_E_NOMEM, SPDL_E_THREAD, or what init returned.
   Blocks:  until every init has returned and every worker has its policy. */
SPDL_API spdl_result spdl_pool_create(spdl_pool **pool, const spdl_pool_desc *desc);

/* Runs the accepted jobs, then fini on every worker, and frees the pool. While a pipeline is
   attached it only logs an error. NULL is allowed.
   Threads: one, not a worker or guest of this pool; no guest may come any more.
   Blocks:  until the jobs have run and the guests inside have left. */
SPDL_API void spdl_pool_destroy(spdl_pool *pool);

/* Queues fn(arg). Jobs start in the order of submission; an accepted job runs exactly once. A job
   that submits should use a timeout of 0, or it may wait for itself.
   Returns: SPDL_OK, SPDL_TIMEOUT (the queue stayed full), SPDL_CLOSED (after stop), SPDL_E_INVALID.
   Blocks:  while the queue is full, up to timeout_ns. */
SPDL_API spdl_result spdl_pool_submit(spdl_pool *pool, spdl_job_fn fn, void *arg,
                                      int64_t timeout_ns);

/* Waits until no job, old or new, is queued or running; without workers it runs those queued.
   Returns: SPDL_OK, SPDL_TIMEOUT, SPDL_E_INVALID on a worker of this pool.
   Blocks:  until then, or up to timeout_ns. */
SPDL_API spdl_result spdl_pool_drain(spdl_pool *pool, int64_t timeout_ns);

/* Accepts no more jobs and waits for those accepted. Pipelines on the pool go on.
   Returns: SPDL_OK, SPDL_TIMEOUT, SPDL_E_INVALID on a worker of this pool.
   Blocks:  until the jobs have run, or up to timeout_ns. */
SPDL_API spdl_result spdl_pool_stop(spdl_pool *pool, int64_t timeout_ns);

/* Makes the calling thread a guest: it runs jobs and stages of all pipelines on the pool until
   there is nothing to do or budget_ns is over. After that it begins no job or call, and finishes
   the one at hand. With a budget of 0 it only looks. A job of a job system may come to
       if (spdl_pool_run(pool, 300000) == SPDL_OK) come_again();
   Returns: SPDL_OK: the budget is over, and there is more to do; SPDL_EMPTY: there is nothing to do
            now; SPDL_FULL: others are at all places; SPDL_E_INVALID: the pool has no guests, or the
            thread is a worker or inside already.
   Blocks:  in the functions it calls. */
SPDL_API spdl_result spdl_pool_run(spdl_pool *pool, int64_t budget_ns);

/* Returns: how many workers the pool has, guests not counted. */
SPDL_API int spdl_pool_workers(const spdl_pool *pool);

/* ============================================================================================= */
/* >>pipeline
   A source, stages and a sink, declared as rows of a table and run by a pool. Any worker runs any
   stage, the one furthest downstream first. A stage is called only when it has an input, is under
   its concurrency and has room for its output, so no worker ever waits on a full edge.

   Defaults of this section: a function that takes a task may be called by the stage function that
   got the task, during that call; others by any thread. A call does not wait. Only exceptions are
   written.

   Stage functions. SPDL_FN(decode, Path, Image) { ... } defines
       spdl_result decode(spdl_task *task, Path *in, Image **out)
   and records the type names: create refuses a table whose stages do not fit. void fits anything. A
   source has void as its input type. The function returns
       SPDL_OK       with an item in *out (for a stage: *out may be `in`, changed in place)
       SPDL_SKIP     drops the item; from a source: there is none yet, and no number is taken
       SPDL_END      from a source: there is no more, or with .continuous no more in this epoch
       SPDL_PENDING  with .deferred, after spdl_defer: spdl_complete gives the result later
       SPDL_AGAIN    with .again: an item in *out, and there is more: see One to many below
       negative      this item failed; `return spdl_fail(task, "...")` records why
   *out counts only with SPDL_OK and SPDL_AGAIN. With any other result the library ignores it, and
   the function keeps what it points to. In C++ a stage function that throws has failed, with what()
   as the reason. Other functions of yours must not throw, and none may end its thread.

   Ownership. A stage borrows its input. After the call the library destroys the input, exactly
   once, with the free_item of the stage that made it, unless the stage passed it on (*out == in) or
   took it with spdl_take. So stage functions never free their input, whatever happens. The consumer
   owns what spdl_pipeline_next hands out. free_item never gets NULL. For each row, items made =
   delivered + taken in by stages, skipped, failed or freed at a stop.

   Order. In input order (the default) a stage hands on its results in the order of its inputs. A
   slow call holds back those after it, up to buffer_size of them. In completion order it hands them
   on as they are done. A table in input order delivers the same items in the same order at any
   number of workers: with random numbers seeded by spdl_item_key, bit by bit.

   One to many. A stage with .again may return SPDL_AGAIN: the item in *out goes on at once, and the
   stage is called again with the same input when there is room for the next result, until it
   returns SPDL_OK with the last one, SPDL_SKIP without one, or fails. So an archive of many files
   or a video flows in bounded memory. spdl_call_state(task) keeps what the calls for one input share.
   Such a stage has one call at a time, or completion order. To do the slow part in parallel and
   keep the order, put a stage before it that opens or reads ahead. SPDL_UNBATCH() hands on the
   items of each batch that are not NULL, one by one. A stage with .flush is called once more when
   its input ends (spdl_flushing(task) is true, `in` is NULL): it may gather items by its own rules
   and hand on what is left.

   Memory that is used again. With .item_bytes = n on a source or pipe, spdl_buffer(task) gives its
   calls buffers of n bytes. A buffer that was handed on comes back when the library destroys the
   item, or when the consumer calls spdl_buffer_free. SPDL_BATCH(count, .item_bytes = n) makes
   batches in place: `data` of a batch is one block of count * n bytes, and spdl_buffer gives a call
   of the row directly before (in input order, without .again) the part of the block where its item
   will be. All other items must have n bytes, too: they are copied there, then destroyed. NULL
   becomes zeros. The items cannot leave the batch; spdl_batch_free gives the block back. Blocks and
   buffers begin at a multiple of 64, are not cleared, come from desc.allocator or .allocator of the
   row, and are made with the pipeline (up to 256 MiB for each row, the rest when it is needed).

   Failures. The item of a failed call is dropped; .on_drop sees it. While .max_failures allows it
   the flow goes on: each failure is logged as SPDL_LOG_INFO, and at the end one line for each
   stage, as SPDL_LOG_WARN, says how many items were dropped. A failure beyond that ends the
   pipeline, and is logged as SPDL_LOG_ERROR. The consumer gets the items before the failure (in
   completion order: what was handed on before it), then the failure. next does not wait for calls
   that still run in earlier rows, such as a source that blocks. So after the loop a program asks
   spdl_pipeline_failed. To try a call again, write a loop in the function.

   Branches. SPDL_BRANCH(fn), then two or more SPDL_PATH(name), each followed by its rows, then
   SPDL_MERGE(): `fn` is a stage that sends its result down one of the paths with spdl_route(task,
   path). A path may have no rows, or branches of its own. A path that is full or slow does not stop
   the others: what exceeds its buffer_size waits, in order, and `fn` is called while fewer than
   .buffer_size of SPDL_BRANCH results wait so, on all its paths together. The merge hands on the
   results in the order in which the branch routed them. In such paths each item makes one result or
   none: create refuses .again, .flush, batches and completion order there. SPDL_MERGE(.output_order
   = SPDL_ORDER_COMPLETION) takes from whichever path has something.

   Epochs. A source with .continuous starts over after SPDL_END, its items numbered from 0 again;
   next returns SPDL_END once for each epoch. The end of an epoch is a barrier in every stage: no
   call of the next epoch begins before the calls of this one have ended, no batch spans two epochs,
   and stages further up work on the next epoch meanwhile. An error ends this epoch and all others.

   Sources that block. A source that may block has .threads = 1: a thread of its own calls it.
   SPDL_FROM(Type, next_fn, source) is such a source; its items are what next_fn(source, &item,
   timeout) yields: with spdl_pipeline_next, another pipeline. It asks for at most 50 ms at a
   time, so next_fn has to keep to its timeout. SPDL_END ends it (or an epoch), SPDL_TIMEOUT is
   asked again, anything else fails, with the text of the other pipeline's failure. `source` has to
   outlive the pipeline. To rewind both, stop this one, rewind the other one, and then this one.

   Who works. `workers` threads; with workers = 0 the thread in next alone. With .next_works_ns the
   thread in next runs stages too, while it would wait, but no stage whose mean call is longer than
   that. A consumer that only waits gains 8 to 29 % of the rate of items that take 5 to 100 us. The
   price: an item may be returned late by one call. A consumer that computes: workers = cores - 1
   and SPDL_FOREVER. One that waits for a device: workers = cores and 2 ms.

   Who may wait for whom. While one worker is free, every row with an input, under its concurrency
   and with room for its result is called, whatever other calls wait for. Calls of a row begin in
   the order of its inputs. Up to `concurrency` calls of a row may wait for each other, if there are
   as many workers (in input order: within buffer_size + concurrency items). A call may wait for
   what a later stage, the consumer or the producer does, if its row has a concurrency of 1 or
   completion order: else order itself makes calls wait for those before them. The consumer may wait
   until its buffer is full, or pause for as long as it likes. `*pipeline` is stored before the
   first call. Pipelines on one pool get turns by time, not by calls. No function of yours is called
   under a lock of the library.

   Fork. In the child of a fork a pipeline that has threads is dead: next, push, stop and rewind
   return SPDL_E_INVALID (next and push as soon as they would wait), and destroy does nothing. A
   pipeline that runs when the process exits is no problem. */

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

/* Anything that yields items, such as spdl_pipeline_next. */
typedef spdl_result (*spdl_next_fn)(void *source, void **item, int64_t timeout_ns);

/* A call has failed, whether that is tolerated or ends the pipeline: the place to note what was
   dropped. `item` is the input of the call, borrowed; NULL if the call was a source's or that of
   .flush, or has taken its input. Not for SPDL_SKIP. Called on the thread of the call, by as many
   at a time as the row has calls. */
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

/* The order in which a stage or a merge hands on results. */
typedef enum spdl_order { SPDL_ORDER_INPUT, SPDL_ORDER_COMPLETION } spdl_order;

/* One row, made by the macros below; zero is the default. */
typedef struct spdl_stage {
    spdl_kind kind SPDL__ZERO;
    const spdl_function *fn SPDL__ZERO;
    const char *type SPDL__ZERO;        /* feed, SPDL_FROM: the type of its items */
    spdl_next_fn next SPDL__ZERO;       /* SPDL_FROM: what yields the items */
    const char *file SPDL__ZERO;        /* with line: where the row was written */
    int size SPDL__ZERO;                /* batch: items in a batch */
    const char *name SPDL__ZERO;        /* default: the name of the function, "batch" or so; the
                                           second of a name is called "name#2" */
    void *ctx SPDL__ZERO;               /* spdl_ctx(task); SPDL_FROM: the first argument of next */
    int concurrency SPDL__ZERO;         /* pipe: calls at the same time, a hard bound; default 1.
                                           1 written out: there may never be more */
    int threads SPDL__ZERO;             /* source: 1 for one that may block: it gets a thread of its
                                           own, see spdl_pipeline_destroy */
    int buffer_size SPDL__ZERO;         /* finished items that may wait; default 2, sink 3, in front
                                           of a batch its size, branch 32 */
    spdl_order output_order SPDL__ZERO; /* pipe, merge: default input order */
    size_t item_bytes SPDL__ZERO;       /* source, pipe: of spdl_buffer; batch: of an item, whose
                                           bytes lie in the batch: see Memory that is used again */
    const spdl_allocator *allocator SPDL__ZERO; /* with item_bytes: of this row's blocks, which are
                                           kept until the pipeline ends; NULL: the pipeline's */
    bool drop_last SPDL__ZERO;          /* batch: drop the last one when it is not full */
    bool drop_oldest SPDL__ZERO;        /* feed: when it is full, drop the oldest item */
    bool continuous SPDL__ZERO;         /* source: starts over after SPDL_END */
    bool flush SPDL__ZERO;              /* pipe: called once more at the end; concurrency 1 */
    bool deferred SPDL__ZERO;           /* pipe: may return SPDL_PENDING */
    bool again SPDL__ZERO;              /* pipe: may return SPDL_AGAIN */
    int max_failures SPDL__ZERO;        /* 0: the first one is fatal; n: n are tolerated; -1: any
                                           number is. See Failures above */
    spdl_drop_fn on_drop SPDL__ZERO;    /* sees the input of a failed call; gets the row's ctx */
    spdl_free_fn free_item SPDL__ZERO;  /* destroys what this stage makes; default: nothing to do */
    spdl_free_fn free_state SPDL__ZERO; /* again: destroys what spdl_call_state holds */
    spdl_copy_fn copy_item SPDL__ZERO;  /* source, pipe: another item like this one: see >>doctor */
    spdl_init_fn init SPDL__ZERO;       /* on each worker, before its first call of this stage */
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
    /* clang-format off */
    SPDL__WITH(const char *, name)                SPDL__WITH(void *, ctx)
    SPDL__WITH(int, concurrency)                  SPDL__WITH(int, threads)
    SPDL__WITH(int, buffer_size)                  SPDL__WITH(spdl_order, output_order)
    SPDL__WITH(size_t, item_bytes)                SPDL__WITH(const spdl_allocator *, allocator)
    SPDL__WITH(bool, drop_last)
    SPDL__WITH(bool, drop_oldest)                 SPDL__WITH(bool, continuous)
    SPDL__WITH(bool, flush)                       SPDL__WITH(bool, deferred)
    SPDL__WITH(bool, again)                       SPDL__WITH(int, max_failures)
    SPDL__WITH(spdl_drop_fn, on_drop)             SPDL__WITH(spdl_free_fn, free_item)
    SPDL__WITH(spdl_free_fn, free_state)          SPDL__WITH(spdl_copy_fn, copy_item)
    SPDL__WITH(spdl_init_fn, init)                SPDL__WITH(spdl_fini_fn, fini)
    /* clang-format on */
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
    uint64_t epoch;    /* of its items; 0 when the source is not continuous */
    void *data;        /* in place: items one after the other, on a line of the cache; else NULL */
} spdl_batch;

typedef struct spdl_pipeline spdl_pipeline;

typedef struct spdl_pipeline_desc {
    int workers;              /* threads of its own pool; 0: the thread in next does all the work */
    spdl_pool *pool;          /* or a pool that is shared; then leave workers 0 */
    const char *name;         /* names the threads; default "spdl" */
    spdl_policy policy;       /* of its own threads */
    size_t stack_bytes;       /* of each of them; 0: the system's default */
    int64_t next_works_ns;    /* the thread in next runs stages too, while it would wait, but none
                                 whose mean call is longer than this; 0: none, SPDL_FOREVER: all */
    spdl_allocator allocator;
    spdl_logger logger;
    spdl_profiler profiler;   /* see >>pool; default: that of `pool` */
    spdl_error *error;        /* optional: says why create failed */
    const char *trace;        /* file of a trace; NULL: as SPDL_TRACE says; "": none; see >>trace */
    int trace_events;         /* kept of each thread and edge, of 32 bytes each; default 65536 */
    const struct spdl_report_desc *report; /* optional, is copied: see >>report */
    const struct spdl_doctor_desc *doctor; /* optional, is copied; NULL: as SPDL_DOCTOR says */
    uint64_t seed;            /* of spdl_item_key */
    uint64_t data_hash;       /* tells data sets apart when a state is loaded: spdl_files_hash, or
                                 spdl_hash of names and sizes */
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
#ifdef __cplusplus /* there fields have an order, and .name comes before .ctx */
#define SPDL__FROM_ROW(type_, next_, source_, ...)                                                 \
    SPDL__STAGE { .kind = SPDL_KIND_SOURCE, .type = #type_, .next = next_, .file = __FILE__,       \
                  __VA_ARGS__ }.with_ctx(source_)
#else
#define SPDL__FROM_ROW(type_, next_, source_, ...)                                                 \
    SPDL__STAGE { .kind = SPDL_KIND_SOURCE, .type = #type_, .next = next_, .ctx = source_,         \
                  .file = __FILE__, __VA_ARGS__ }
#endif
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
   ctx pointers must outlive the pipeline. What is wrong is said in desc->error and the log, with
   file and line, number and field of the row. A row with more concurrency than there are threads is
   a warning. The caller destroys *pipeline; on failure *pipeline is NULL.
   Returns: SPDL_OK, SPDL_E_INVALID, SPDL_E_TYPE, SPDL_E_NOMEM, SPDL_E_THREAD, SPDL_E_LIMIT (the
            pool has 64 pipelines already).
   Blocks:  as spdl_pool_create, for its own pool. */
SPDL_API spdl_result spdl_pipeline_create(spdl_pipeline **pipeline, const spdl_pipeline_desc *desc,
                                          const spdl_stage *stages, size_t stage_count);

/* Stops the pipeline if it runs, and frees it with every item that was not handed out. After 5
   seconds the log says which stages it waits for. A source with .threads = 1 that is in a call is
   waited for 5 seconds, and not at all when a stop with a timeout has waited for it in vain. When
   that call returns, its thread frees what it made, runs fini and frees the rest: ctx, allocator
   and profiler have to be there until then. NULL is allowed.
   Threads: one, not on a worker of its pool; no other call on the pipeline may be running.
   Blocks:  until the stage functions that are running have returned, except as above, and every
            deferred call was completed; with fini rows on a shared pool until each worker was
            free. */
SPDL_API void spdl_pipeline_destroy(spdl_pipeline *pipeline);

/* Takes the next item out of the sink. A timeout loses nothing. After the last item every call
   returns how it ended: SPDL_END, or the error that ended the pipeline early, or SPDL_CLOSED after
   a stop. With a continuous source SPDL_END is returned once for each epoch, and the next call goes
   on with the next one. The caller owns *item after SPDL_OK; otherwise *item is untouched.
   Returns: SPDL_OK, SPDL_TIMEOUT, SPDL_END, SPDL_CLOSED, an error (see spdl_pipeline_error),
            SPDL_E_INVALID when another thread is inside, and in the child of a fork.
   Threads: one at a time (the consumer). Wait-free when an item is ready.
   Blocks:  until there is an item or the end, or up to timeout_ns. Stages that run inside of this
            call (workers = 0, .next_works_ns) are finished first. */
SPDL_API spdl_result spdl_pipeline_next(spdl_pipeline *pipeline, void **item, int64_t timeout_ns);

/* The epoch that the consumer is in: of what next has returned last; after SPDL_END the one that
   comes next; after spdl_state_load that of the text.
   Returns: the number, from 0; 0 when the source is not continuous.
   Threads: the consumer. */
SPDL_API uint64_t spdl_pipeline_epoch(const spdl_pipeline *pipeline);

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

/* Ends the flow early: no stage function is called again. Items in the sink can still be taken,
   then next returns SPDL_CLOSED, also while a source blocks; others are freed, by a stop that has
   waited or else by destroy. Stopping twice, or after the end, is fine.
   Returns: SPDL_OK, SPDL_TIMEOUT (stage functions are still running; the stop goes on),
            SPDL_E_INVALID in the child of a fork.
   Blocks:  until the stage functions that are running have returned and every deferred call was
            completed, or up to timeout_ns; what free_item takes comes on top. Inside of a stage,
            and on a worker of the pipeline's pool: never. */
SPDL_API spdl_result spdl_pipeline_stop(spdl_pipeline *pipeline, int64_t timeout_ns);

/* Starts again, with the source at `sequence`: waits for the calls that run, frees all that is on
   its way, and forgets an end, a failure or a stop. spdl_sequence of the source's next call is
   `sequence`, its epoch 0: a source that reads in order sees by it that it must seek. What a
   stage keeps in its ctx stays there. No thread is made; statistics go on. For a validation set
   that is read from its beginning every few steps. The consumer keeps what next has returned.
   Returns: SPDL_OK; SPDL_TIMEOUT: calls still run, and the pipeline is stopped; SPDL_E_INVALID
            inside of a stage, while another thread is in next or push, in the child of a fork, or
            for a sequence of 2^40 or more.
   Threads: the consumer. A push or push_end meanwhile returns SPDL_E_INVALID; a stop waits.
   Blocks:  until the calls at hand have returned, deferred ones and those of SPDL_FROM (50 ms) too,
            or up to the timeout. */
SPDL_API spdl_result spdl_pipeline_rewind(spdl_pipeline *pipeline, uint64_t sequence,
                                          int64_t timeout_ns);

/* Hands an item to a pipeline whose first row is SPDL_FEED. A timeout of 0 never blocks, whatever
   the rest of the pipeline does: for threads with deadlines, as of games and audio. With
   .drop_oldest the oldest item is dropped when there is no room, and freed with free_item of the
   row (the stats count it as a skip of row 0); SPDL_FULL then means that the reader was at work
   just now. The pipeline owns the item after SPDL_OK; otherwise it stays the caller's.
   Returns: SPDL_OK; SPDL_FULL (timeout 0) or SPDL_TIMEOUT: no room; SPDL_CLOSED after the end, a
            stop or a failure; SPDL_E_INVALID without such a row, in the child of a fork, or when
            another thread is inside.
   Threads: one at a time (the producer).
   Blocks:  until there is room, or up to timeout_ns; never with drop_oldest. */
SPDL_API spdl_result spdl_pipeline_push(spdl_pipeline *pipeline, void *item, int64_t timeout_ns);

/* No more items will be pushed: the pipeline ends when those it has are done.
   Returns: SPDL_OK, SPDL_E_INVALID without a row SPDL_FEED, or when another thread pushes.
   Threads: the producer. */
SPDL_API spdl_result spdl_pipeline_push_end(spdl_pipeline *pipeline);

/* The row of a stage, by its name: what stats and errors call `stage`.
   Returns: the row from 0, or -1 when there is no such name. */
SPDL_API int spdl__pipeline_find(const spdl_pipeline *pipeline, const char *name);

/* Changes the concurrency of a stage while the pipeline runs, for calls that begin from now on. A
   row that is to be raised later is created with the highest value.
   Returns: SPDL_OK, SPDL_E_INVALID when there is no such row or it is no pipe, SPDL_E_LIMIT when
            concurrency is less than 1 or more than the row's .concurrency. */
SPDL_API spdl_result spdl_pipeline_set_concurrency(spdl_pipeline *pipeline, int stage,
                                                   int concurrency);

/* Whether a stage has failed more often than it may.
   Returns: true once the pipeline has failed, until it is rewound. */
SPDL_API bool spdl_pipeline_failed(const spdl_pipeline *pipeline);

/* Which stages have failed more often than they may: bit i stands for row i. More than one if
   others failed before they were ended; spdl_pipeline_error is about the one that ended what is
   delivered, the log has all.
   Returns: the bits; 0 while spdl_pipeline_failed is false. */
SPDL_API uint32_t spdl_pipeline_failed_stages(const spdl_pipeline *pipeline);

/* The failure that ended the pipeline: stage, item and text. Valid until it is rewound or
   destroyed.
   Returns: never NULL; result is SPDL_OK when there was no failure.
   Threads: the consumer, after next has returned it; any, when a stop outside of stages was
            SPDL_OK. */
SPDL_API const spdl_error *spdl_pipeline_error(const spdl_pipeline *pipeline);

/* Memory for the result of this call, to be its *out; see Memory that is used again. A
   buffer that the call does not hand on goes back to the library when it ends.
   Returns: item_bytes bytes, the same ones until they are handed on; NULL: there is no memory, or
            (the pipeline fails) neither this row nor a SPDL_BATCH after it says .item_bytes. */
SPDL_API void *spdl_buffer(spdl_task *task);

/* Gives back what spdl_buffer gave and the pipeline has handed out; nothing of a batch in place.
   NULL is allowed. Fits free_item. May be called after the pipeline was destroyed. */
SPDL_API void spdl_buffer_free(void *buffer);

/* Frees a batch and the items in it that are not NULL, with the free_item of their stage. NULL is
   allowed. Fits free_item. May be called after the pipeline was destroyed. */
SPDL_API void spdl_batch_free(void *batch);

/* Records why this call fails, as printf would write it, up to SPDL_TEXT_BYTES. Outside of the call
   the text goes to the log.
   Returns: SPDL_E_STAGE, to be returned by the stage function. */
SPDL_API spdl_result spdl_fail(spdl_task *task, const char *format, ...) SPDL__PRINTF(2, 3);

/* Returns: the ctx of this stage's row. */
SPDL_API void *spdl_ctx(const spdl_task *task);

/* What this stage's init stored for this worker.
   Returns: NULL when the row has no init. */
SPDL_API void *spdl_local(const spdl_task *task);

/* The number of this item: in a source the number of items made so far, elsewhere the number its
   source gave it; after SPDL_BATCH the number of the batch.
   Returns: the number, from 0. */
SPDL_API uint64_t spdl_sequence(const spdl_task *task);

/* The epoch this item belongs to.
   Returns: the number, from 0; 0 when the source is not continuous. */
SPDL_API uint64_t spdl_epoch(const spdl_task *task);

/* The worker that runs this call.
   Returns: from 0, less than workers and guests of the pool; a consumer that works comes after
            them; 0 with workers = 0 and in a source with .threads. */
SPDL_API int spdl__task_worker(const spdl_task *task);

/* Whether the pipeline is being stopped; a stage function that takes long should return early.
   Returns: true once it is. */
SPDL_API bool spdl_stopping(const spdl_task *task);

/* Takes the input away from the library, which will not free it after this call. The caller frees
   it (a batch with spdl_batch_free). */
SPDL_API void spdl_take(spdl_task *task);

/* In a stage with .again: what the calls for one input share. NULL when the input is new. What is
   stored there is destroyed with free_state of the row, before the input, when the last of the
   calls has returned, or the pipeline stops.
   Returns: where it is; never NULL. */
SPDL_API void **spdl_call_state(spdl_task *task);

/* Sends the result of this call down a path, in an SPDL_BRANCH; without it path 0 is taken.
   Returns: SPDL_OK, so that it can be what the function returns; SPDL_E_INVALID when there is no
            such path: the call fails, and in a row that is no SPDL_BRANCH the pipeline. */
SPDL_API spdl_result spdl_route(spdl_task *task, int path);

/* Returns: true in the last call of a stage with .flush in this epoch, which has no input. */
SPDL_API bool spdl_flushing(const spdl_task *task);

/* Names one call that will be completed later. A value: copy it as you like. */
typedef struct spdl_deferred {
    spdl_pipeline *pipeline; /* NULL: there is no such call */
    uint64_t id;
} spdl_deferred;

/* Announces that this call, in a stage with .deferred, returns SPDL_PENDING and is completed later:
   the worker is free, the call counts in the stage's concurrency, and `in` stays valid until then.
   Returns: what spdl_complete takes; its pipeline is NULL when the row does not say .deferred. */
SPDL_API spdl_deferred spdl_defer(spdl_task *task);

/* Completes a deferred call, as if its function returned `result` with `item`. It may come before
   the function has returned. A worker hands on the result: no function of yours runs in here. A
   pipeline is destroyed only after all calls have been completed.
   Returns: SPDL_OK; SPDL_E_INVALID, with a line in the log, when there is no such call or it was
            completed before: nothing happens to `item` then.
   Threads: any, as long as the pipeline is there. */
SPDL_API spdl_result spdl_complete(spdl_deferred deferred, spdl_result result, void *item);

/* Completes a deferred call as failed, and records why, as printf would write it.
   Returns: as spdl_complete.
   Threads: any, as long as the pipeline is there. */
SPDL_API spdl_result spdl_complete_fail(spdl_deferred deferred, const char *format, ...)
    SPDL__PRINTF(2, 3);

/* Ends the pipeline early from inside a stage, as spdl_pipeline_stop does, without waiting. */
SPDL_API void spdl_stop(spdl_task *task);

/* ============================================================================================= */
/* >>state
   To go on where a run was interrupted: the consumer saves the pipeline's position as a line of
   text beside its model, and another run loads it. A position says what was *delivered to the
   consumer*. What waits in the pipeline is not in it: that is made again. After a load the consumer
   gets, bit by bit, what it would have got without the interruption, with any number of workers,
   any .concurrency and .buffer_size, and with a loader process or without, if
     - the order is the same in every run, as said under Order in >>pipeline, and so are the rows
     - sources make the item with number spdl_sequence(task) of epoch spdl_epoch(task), or seek when
       the number is not the one after the last
     - results are a function of the input, spdl_sequence, spdl_epoch, and spdl_item_key, which is
       for random numbers
     - what a stage keeps in its ctx does not matter, except in a row with .flush: that is called
       with spdl_flushing first, for what it has gathered by then, and its results are freed.
   What is taken ahead of the consumer, to a cache, a GPU or another thread, counts as delivered.

   A load calls rows again for what was under way; those that make several results, or gather, for
   the item or batch at hand, or the whole epoch up to the position. A table has no position if its
   items are pushed (SPDL_FEED) or come from SPDL_FROM, if their order may differ from run to run
   (SPDL_ORDER_COMPLETION, also of a merge), or if its doctor replays items.

   Ranks. With SPDL_INDEX each rank saves a text of its own. As many ranks as before load their own.
   Another number of ranks loads the texts of all, at each rank the same ones, saved where all ranks
   had taken the same number of items of an epoch, or its last, or its end: what remains of the
   epoch is dealt to them in order of position. To jump over items, load a text with a larger item=.

   Epochs. Saved after the last item of an epoch, the next call returns SPDL_END; saved after that,
   the first item of the next epoch; after the end of all, the end again.

       char text[SPDL_STATE_BYTES];
       if (spdl_state_save(p, text, sizeof text) < 0) puts(text);          beside the model
       ...
       const char *texts[] = { text };
       if (spdl_state_load(p, texts, 1, SPDL_FOREVER, &error) != SPDL_OK) puts(error.text);  */

#define SPDL_STATE_BYTES 1024 /* the longest text, with its end */

/* Writes where the consumer is: after what spdl_pipeline_next returned last, a line of text without
   a newline. It takes less than a microsecond, and may be done after every step.
   Returns: the length of the text, which is cut to `bytes` with its end, as by snprintf; or a
            negative result, and `text` says why: SPDL_E_UNSUPPORTED: the table has no position.
   Threads: the consumer. */
SPDL_API int spdl_state_save(const spdl_pipeline *pipeline, char *text, size_t bytes);

/* Starts again at the position of a text, in a new pipeline or one that runs, as
   spdl_pipeline_rewind does. A text that was changed, of another version, of other rows, of another
   seed, or of other data (desc.data_hash) is refused, with a sentence that says what differs and
   how to load it all the same. After a refusal the pipeline goes on as if nothing had been asked.
   Returns: SPDL_OK; SPDL_E_FORMAT: no such text; SPDL_E_CHECKSUM: it was changed; SPDL_E_INVALID:
            it does not fit this pipeline, or as rewind; SPDL_E_UNSUPPORTED as save, or the number
            of ranks cannot change there; SPDL_E_NOMEM; SPDL_TIMEOUT: calls still run, and the
            pipeline is stopped; the error of an init that has failed.
   Threads: the consumer.
   Blocks:  as spdl_pipeline_rewind. */
SPDL_API spdl_result spdl_state_load(spdl_pipeline *pipeline, const char *const *texts, int count,
                                     int64_t timeout_ns, spdl_error *error);

/* A seed for the random numbers of this call: a hash of the pipeline's seed (desc.seed), the epoch
   (0 if the source is not continuous) and the number that spdl_sequence returns; with SPDL_INDEX of
   the sampler's seed and the position, too. It is the same after a load, for any number of workers
   and, up to the first SPDL_BATCH, of ranks. The results of one item share it.
   Returns: 64 bits, all of them good.
   Threads: a stage. */
SPDL_API uint64_t spdl_item_key(const spdl_task *task);

/* ============================================================================================= */
/* >>stats
   Numbers that say which stage is slow. Every struct is plain data without pointers: numbers of
   several processes can be sent as bytes. >>report has them in regular intervals. Any thread may
   call what is here; nothing blocks. */

/* Durations in buckets: exact below 8 ns, then 8 to each power of two, so percentiles are within
   6.25 %; from 2^43 ns (2.4 h) all in the last. All zero is empty. */
#define SPDL__HISTOGRAM_BUCKETS 328

typedef struct spdl__histogram {
    uint64_t count, sum_ns, max_ns; /* exact */
    uint64_t bucket[SPDL__HISTOGRAM_BUCKETS];
} spdl__histogram;

/* The duration that `share` (0 to 1) of the durations did not exceed: the middle of its bucket, but
   never more than the maximum.
   Returns: nanoseconds; 0 for an empty histogram. */
SPDL_API uint64_t spdl__histogram_percentile(const spdl__histogram *histogram, double share);

/* These three are written by spdl_pipeline_stats. */
typedef struct spdl_stage_stats {
    char name[SPDL_NAME_BYTES];
    spdl_kind kind;
    int concurrency;   /* the bound */
    int threads;       /* of its own; 0: the workers are */
    int in_flight;     /* calls running now */
    uint64_t tasks;    /* calls that have ended; for a batch row: batches made; feed: pushes */
    uint64_t failures; /* of them, calls that failed; not in the times. Feed: pushes refused */
    uint64_t skips;    /* of them, that dropped their item; batch: of drop_last; feed: dropped for
                          a new one */
    uint64_t freed;    /* items this stage had made or taken that a stop or failure freed */
    uint64_t busy_ns;  /* time spent in calls that did not fail, over all workers */
    bool deferred;     /* calls end when they are completed: busy_ns is no worker's time */
    bool alone;        /* its row says one call at a time: .concurrency = 1 or .flush */
    bool in_order;     /* results leave in input order */
    /* The part of the consumer's waits (over a microsecond; not with workers = 0) in which the
       item it waited for was here: the sum over all stages is what it waited. */
    uint64_t exposed_ns;      /* in a call of this stage, or held back for order by one */
    uint64_t exposed_idle_ns; /* ready for it, but no worker took it */
    /* Of one call; below 1 us of up to 32. Of a feed: from the push of an item until the consumer
       has the answer, of a batch or the like from the oldest push, to 256 ns. */
    uint64_t mean_ns, p50_ns, p90_ns, p99_ns, max_ns;
    /* Where busy_ns went: the three add up to it. Estimates, scaled up from the calls measured (one
       in about 0.8 ms of each worker, not its first); they may go backwards a little. */
    uint64_t cpu_ns;       /* on a processor */
    uint64_t runnable_ns;  /* ready to run, but other threads had the processors */
    uint64_t blocked_ns;   /* asleep: input, locks, timers */
    uint64_t split_calls;  /* how many calls were measured; 0: the three are not known, and 0 */
    bool runnable_known;   /* false: no schedstat; what is runnable is in blocked_ns */
} spdl_stage_stats;

typedef struct spdl_edge_stats {
    int buffer_size;
    int depth;              /* to take now: up to buffer_size + concurrency; path: + its branch's */
    uint64_t items;         /* items taken so far */
    uint64_t put_wait_ns;   /* time finished items waited for a place among the buffer_size */
    uint64_t get_wait_ns;   /* time the reader was idle for want of an item, open waits too */
    uint64_t empty_ns;      /* time the edge had nothing to take, the open gap too */
    uint64_t elapsed_ns;    /* from the start to now, or to the end of the edge */
    double readiness;       /* 1 - empty_ns / elapsed_ns; 0 before any time has passed */
} spdl_edge_stats;

/* What holds a consumer back. */
typedef enum spdl_limit {
    SPDL_LIMIT_NOT_KNOWN,
    SPDL_LIMIT_CONSUMER,     /* nothing: loading keeps up */
    SPDL_LIMIT_CONCURRENCY, /* a stage that more calls at a time help, computing or asleep */
    SPDL_LIMIT_MACHINE,     /* the processors are used up */
    SPDL_LIMIT_LOCK,        /* calls of a stage wait for each other */
    SPDL_LIMIT_SERIAL,      /* a source, or a stage that may have one call at a time only */
    SPDL_LIMIT_ORDER,       /* rare slow calls hold back those after them */
    SPDL_LIMIT_BATCH,       /* items wait until a batch is full */
    SPDL_LIMIT_WORKERS,     /* all workers are in calls */
    SPDL_LIMIT_HARM,        /* loading takes processor time from the consumer's steps */
    SPDL_LIMIT_FOREIGN      /* other programs have the processors that a stage waits for */
} spdl_limit;

/* What holds it back, and what to write; 0 where nothing is to be written. Numbers are those at
   which the next limit is reached, and at most twice what there is. Nothing is to be written that
   would gain less than 3 %. */
typedef struct spdl_finding {
    spdl_limit limit;
    int stage;           /* the row, or -1 */
    int tie;             /* a row that is as busy, or -1 */
    int concurrency;     /* of `stage` */
    int tie_concurrency; /* of `tie` */
    int workers;
    int buffer_size;     /* of `stage`; of the last row the number in SPDL_SINK */
    double gain;         /* with all of these so many times as many items, by the times of the
                            calls; 0: not known */
} spdl_finding;

typedef struct spdl_stats {
    uint64_t elapsed_ns;    /* from the start to now, or to the end */
    int workers;            /* and guests */
    int stage_count;        /* rows but the sink: stage[i] feeds edge[i], the last is the sink */
    uint64_t delivered;     /* items handed to the consumer */
    uint64_t first_item_ns; /* from the start to the first of them; 0 before */
    uint64_t wait_ns;       /* time the consumer waited in next, a running wait included */
    uint64_t workers_runnable_ns; /* time workers were ready to run outside of calls, but other
                               threads had the processors (Linux with schedstat; else 0) */
    uint64_t step_ns;       /* time since the first item that it did not: its own steps */
    uint64_t step_mean_ns;  /* of one step: from an item to the next call of next */
    uint64_t answer_wait_ns; /* with a feed: time answers lay in the sink until they were taken */
    uint64_t consumer_runnable_ns; /* since the first item: the consumer was ready to run, but other
                               threads had the processors (known to its own snapshots; else 0) */
    /* The process since the start, read at most every 10 ms; 0: not known. */
    uint64_t process_ns;    /* from the start to that reading */
    uint64_t process_cpu_ns; /* CPU time of all its threads */
    uint64_t others_cpu_ns; /* and of other programs on the machine */
    uint64_t minor_faults;
    double cores_allowed;   /* see spdl__process_stats */
    int cores;
    spdl_stage_stats stage[SPDL_MAX_STAGES];
    spdl_edge_stats edge[SPDL_MAX_STAGES];
} spdl_stats;

/* Copies the counters while the pipeline runs on, some microseconds for each stage, and every 10 ms
   what spdl__process_read knows. Each is exact, and none goes backwards from one snapshot to the
   next. A worker is woken if the last row can be called: a consumer may wait for its buffer to
   fill. */
SPDL_API void spdl_pipeline_stats(const spdl_pipeline *pipeline, spdl_stats *stats);

/* The durations of the calls of one stage so far, failed calls left out; of a feed those from push
   to answer.
   Returns: SPDL_OK, SPDL_E_NOT_FOUND (there is no such stage). */
SPDL_API spdl_result spdl__pipeline_histogram(const spdl_pipeline *pipeline, int stage,
                                             spdl__histogram *histogram);

/* The process at one moment, by spdl__process_read. Between readings a and b it used (b.cpu_ns -
   a.cpu_ns) / (b.time_ns - a.time_ns) cores, others the same of others_ns. */
typedef struct spdl__process_stats {
    uint64_t time_ns;        /* spdl_time_ns of the reading */
    uint64_t cpu_ns;         /* CPU time of this process so far, all threads */
    uint64_t others_ns;      /* and of everything else on the machine (Linux; else 0) */
    int cores;               /* of the machine */
    double cores_allowed;    /* by affinity and cgroup quotas (elsewhere: the cores there are) */
    uint64_t resident_bytes; /* memory in use (Linux; else 0) */
    uint64_t minor_faults;   /* pages that were mapped or zeroed on first use */
    uint64_t major_faults;   /* pages that were read from a disk */
} spdl__process_stats;

/* Reads what the system knows about this process: files of /proc and of the cgroup, some 50 to 200
   microseconds; what cannot be had is 0. The first snapshot of a pipeline reads it, and those
   after it. */
SPDL_API void spdl__process_read(spdl__process_stats *stats);

/* The advisor: the verdict says it in words, and the doctor tries it. `finding` may be NULL.
   Returns: its limit; SPDL_LIMIT_NOT_KNOWN when the numbers do not decide. */
SPDL_API spdl_limit spdl_stats_find(const spdl_stats *stats, spdl_finding *finding);

/* The finding in words: how long the consumer waited, for which stage and why; and what to write.
   With a feed: how many requests were dropped or refused, how soon the others were answered, and
   where most of that time went. One sentence more if more than 5 % of the calls of a stage fail.
   Returns: the length of all sentences, as snprintf does; buffer holds what fits. */
SPDL_API int spdl_stats_verdict(const spdl_stats *stats, char *buffer, size_t bytes);

/* The verdict, a line about the run, and a table of at most 100 columns, ">" at what limits:
       conc tasks rate  its concurrency; calls that have ended, so many a second
       p50 .. max       how long a call takes; of a feed, how long from push to answer
       busy             share of the time that as many calls ran as can
       cpu runq block   where that went: on a processor ("-": not measured); ready, but others had
                        the processors; asleep (these two where they are over 5 %)
       ready            share of the time the next stage, or the consumer, had a result to take
       waits            share of the consumer's waits in which its item was here, in a call or
                        waiting for a worker: they add up to 100 %; blank where it hardly waited
   Below, a line for each stage with calls that failed, items skipped or freed.
   Returns: the length of the whole text, as snprintf does; buffer holds what fits. */
SPDL_API int spdl_stats_text(const spdl_stats *stats, char *buffer, size_t bytes);

/* The struct as a JSON object: its fields by their names, "stages" and "edges" being arrays, with
   the "verdict" and the "finding", whose "limit" is one of not_known, trainer, concurrency,
   machine, lock, serial, order, batch, workers, harm, foreign. Strings are valid UTF-8
   whatever the names are.
   Returns: the length of the whole text, as snprintf does; buffer holds what fits. */
SPDL_API int spdl_stats_json(const spdl_stats *stats, char *buffer, size_t bytes);

/* ============================================================================================= */
/* >>report
   Statistics in regular intervals, from a thread that a pipeline has only when it is asked for: by
   the field `report` of its desc, or, in any program that uses the library, by the environment:

       SPDL_STATS=5                  a table on stderr every 5 s, and at the end
       SPDL_REPORT=run.jsonl         a line of JSON for each interval, and one of the doctor

   What cannot be done is one warning in the log
   of the pipeline, which goes on. It never waits for its reports: a stderr that takes nothing for
   100 ms loses one. Destroy waits until the last one is written. A file that is a symbolic link is
   not followed.

   examples/data/report.html, opened in a browser, draws such a file: it loads nothing else.
   Pipelines and processes may share it: each line is appended in one piece.

   JSON lines, schema "spdl.stats.1": an object for each interval. Later versions of the library may
   add fields; none changes its meaning under this name.
       schema     "spdl.stats.1"
       version    of the library
       pipeline   the name in its desc
       pid, run   the process; when the pipeline was created (Unix time in ms): together, which one
       time       when the line was written (Unix time in s)
       final      whether this is the last line of the pipeline
       interval   what spdl_stats_json writes, since the line before: differences; percentiles are
                  of the calls that ended in it, max_ns is the end of the largest one's bucket
       total      the same since the start
       process    spdl__process_stats */

#ifndef SPDL_NO_REPORT
/* Runs on the thread of the reports, at the end once more; `interval` is since the last call. Must
   not destroy the pipeline, which waits for it. */
typedef void (*spdl_report_fn)(const spdl_stats *interval, const spdl_stats *total, void *user);

/* All zero: no reports but those of the environment. */
typedef struct spdl_report_desc {
    double every;           /* seconds between reports, 0.01 to 1e7; default 5 */
    spdl_report_fn report_fn; /* is called with the numbers */
    void *user;
    bool table;             /* the table, on stderr */
    const char *json;       /* file that JSON lines are appended to */
} spdl_report_desc;
#endif

/* ============================================================================================= */
/* >>trace
   What happened when, as a file for a viewer: Perfetto (ui.perfetto.dev) or chrome://tracing. A
   lane for each worker with its calls (stage, number of the item, result) and the batches it put;
   one for the consumer's waits in next; and a plot for each edge of how many items it has.

   desc.trace names the file. Where it is NULL the environment does: SPDL_TRACE=t.json, or
   SPDL_TRACE=t.json,events=N to set trace_events as well. With desc.trace "" there is none. Create
   empties the file, and destroy writes it: of several pipelines with the same file it has the one
   destroyed last. "%p" in the name stands for the number of the process. A symbolic link is not
   followed. What goes wrong with it is one warning in the log.

   Memory: (workers + 1 + edges) * trace_events * 32 bytes, allocated by create. Of each thread and
   edge the latest events are kept; log and file say how many were dropped.

   Spans and counters of your own, by the functions below: parts of a call on the worker's lane, or
   parts of a step on the consumer's. Spans nest, 16 deep; deeper ones are left out. One that is
   open when the call returns, or the consumer's when the pipeline is destroyed, ends then. Only the
   pointer to a name is kept: names live as long as the pipeline; the file has their first 100
   bytes. Each function takes some 30 ns where a trace is recorded, and 1 where none is. None of
   these functions blocks; those of a task are for its call, those of a pipeline for the consumer.

   Debuggers and profilers: the workers have names. Where the implementation is compiled with
   <sys/sdt.h>, it has probes for perf and bpftrace: spdl:task_begin and spdl:task_end (stage,
   item), spdl:next_wait_begin and spdl:next_wait_end (last stage, items delivered). */

/* Begins a span of this call, inside of those that are open.
   Threads: a stage; outside of the call, or on another thread, a line in the log.
   Owns:    `name` stays where it is until the pipeline is destroyed. */
SPDL_API void spdl_trace_begin(spdl_task *task, const char *name);

/* Ends the span of this call that was begun last; without one it is nothing.
   Threads: a stage, as spdl_trace_begin. */
SPDL_API void spdl_trace_end(spdl_task *task);

/* Records the value that a counter has now, for a plot over time; one that is not finite is left
   out. There is one counter of each name.
   Threads: a stage, as spdl_trace_begin.
   Owns:    as spdl_trace_begin. */
SPDL_API void spdl_trace_counter(spdl_task *task, const char *name, double value);

/* Begins a span of the consumer, around what it does, its calls of next included.
   Owns:    as spdl_trace_begin. */
SPDL_API void spdl_pipeline_trace_begin(spdl_pipeline *pipeline, const char *name);

/* Ends the span of the consumer that was begun last. */
SPDL_API void spdl_pipeline_trace_end(spdl_pipeline *pipeline);

/* As spdl_trace_counter: the loss, for one.
   Owns:    as spdl_trace_begin. */
SPDL_API void spdl_pipeline_trace_counter(spdl_pipeline *pipeline, const char *name, double value);

/* ============================================================================================= */
/* >>cache
   An iterator that stands before anything with a next function, such as a pipeline. It hands on the
   source's items, keeps the first num_caches of them, and after return_caches_after items forgets
   the source and hands out the kept ones, over and over. A consumer that runs on it runs as if
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
   Owns:    the caller destroys *cache, and keeps the source unless delete_source is set. */
SPDL_API spdl_result spdl_cache_create(spdl_cache **cache, const spdl_cache_desc *desc);

/* Frees the kept items, and calls delete_source unless it was called already.
   Returns: nothing; NULL is allowed.
   Blocks:  as delete_source does.
   Owns:    everything the cache held is freed. */
SPDL_API void spdl_cache_destroy(spdl_cache *cache);

/* The next item. A source that ends before return_caches_after items is replaced by the cache at
   once; one that ends without an item ends the cache too.
   Returns: SPDL_OK, SPDL_END (stop_after reached, or an empty source), SPDL_E_NOMEM (copy_item), or
            what the source returned. After a timeout or an error the call can be repeated; nothing
            is lost.
   Blocks:  as the source does; never once the cache is used.
   Owns:    without copy_item the item stays the cache's: valid until the next call if it was not
            kept, until destroy if it was, and must not be changed. With copy_item each item handed
            out is the caller's own. */
SPDL_API spdl_result spdl_cache_next(spdl_cache *cache, void **item, int64_t timeout_ns);

/* spdl_pipeline_next with the type of spdl_cache_desc.next; the source is the spdl_pipeline.
   Returns: as spdl_pipeline_next.
   Threads: one at a time.
   Blocks:  as spdl_pipeline_next.
   Owns:    as spdl_pipeline_next. */
SPDL_API spdl_result spdl_pipeline_next(void *pipeline, void **item, int64_t timeout_ns);

/* spdl_cache_next with the same type, so that one training loop runs on either.
   Returns: as spdl_cache_next.
   Blocks:  as spdl_cache_next.
   Owns:    as spdl_cache_next. */
SPDL_API spdl_result spdl_cache_next(void *cache, void **item, int64_t timeout_ns);

/* ============================================================================================= */
/* >>headspace
   What loading costs a training loop, whatever loads: one call that runs the loop for some seconds
   and answers in a sentence. Windows of the loop as it is take turns with windows of the same steps
   on items that were kept, in which nothing is loaded: the source is not asked, its workers fill
   their buffers and rest (one that takes longer than a window works on: its harm is understated).
   What a loop would gain is called headspace. It has two parts: the loop waits for items, and the
   step itself is slower beside those who load (harm), which no figure of the loader shows.

   The steps are real ones, on items that come again and again, while others are taken and dropped:
   the results of training are void, so measure before a run, or on a copy. */

/* How many times as large one thing is as another, measured in rounds that each have both: sums of
   all rounds. low and high hold the true ratio in 95 of 100 such measurements; of several to choose
   among, all of them together. An interval that holds 1 is no difference. With fewer than 5 rounds
   it is not known, from 0 to infinity. */
typedef struct spdl_interval {
    double value; /* 0 without a round */
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
    double seconds;     /* how long to measure, 0.1 to 86400; default 30 */
    int kept;           /* items the steps without loading go around on; default 32 */
    spdl_logger logger; /* each round is an SPDL_LOG_INFO */
    spdl_allocator allocator;
    spdl_error *error;  /* optional: says why it failed */
} spdl_headspace_desc;

typedef enum spdl_headspace_kind {
    SPDL_HEADSPACE_GAIN,   /* loading costs something */
    SPDL_HEADSPACE_NONE,   /* no difference */
    SPDL_HEADSPACE_FEW,    /* too few rounds to say */
    SPDL_HEADSPACE_FOREIGN /* others used the processors in too many: how it is beside them */
} spdl_headspace_kind;

typedef struct spdl_headspace_report {
    spdl_headspace_kind kind;
    double today, ceiling; /* steps per second as it is, and on kept items */
    double waiting;        /* share of the time in next, as it is */
    double others; /* processors that other programs used, at most (Linux) */
    spdl_interval gain; /* ceiling / today: so many times as many steps if loading cost nothing */
    spdl_interval harm; /* a step takes so many times as long beside those who load */
    double more_seconds; /* FEW: what `seconds` would probably do; 0 if more would not help */
    uint64_t items;      /* taken from the source */
    bool ended;          /* the source has, before the time was over */
    int rounds, dropped; /* all rounds; those that others disturbed, which were made again */
    char text[SPDL_TEXT_BYTES]; /* such as "Loading costs 17 % of a step (15 to 19), 2.1 h of this
                                   12 h run: slower steps 16.7, waiting 0.3." */
} spdl_headspace_report;

/* Measures the headspace of a loop. A window is 400 ms, 8 steps and 3 of the longest gaps between
   items at least; a round has one of each kind, in random order. What was loaded while the source
   was not asked is taken and dropped. The source stays the caller's; each item taken is given to
   free_item before it returns.
   Returns: SPDL_OK, with whatever there is to say in *report; SPDL_E_INVALID, SPDL_E_NOMEM; or what
            next returned, if that was neither SPDL_OK nor SPDL_END: *report has the rounds so far.
   Threads: owner of the source; step is called here.
   Blocks:  for about `seconds`, and as long as a call of next or step does. */
SPDL_API spdl_result spdl_headspace(const spdl_headspace_desc *desc, spdl_headspace_report *report);

/* ============================================================================================= */
/* >>doctor
   Tries by experiments on the running pipeline what the verdict of the statistics says, and prints
   that sentence with what was measured. In any program, without a change to it, by the environment:

       SPDL_DOCTOR=1                 for 30 s from the first item on; the report goes to stderr, and
                                     as a line of JSON to the file that SPDL_REPORT names
       SPDL_DOCTOR=60                for 60 s
       SPDL_DOCTOR=1,replay          also repeats items that were kept, see below: what the consumer
                                     learns in this run is void
       SPDL_DOCTOR=1,raise           tries the settings of the verdict: may change the concurrency
                                     of every stage that does not say .concurrency = 1, and has
                                     twice as many workers made; spdl__task_worker may be so large then

   What it does, in next, on the thread of the consumer. It observes for a tenth of the time. Then
   it runs windows of 400 ms, or of three times the longest gap between items, in an order drawn by
   lot, in which one thing is different, and compares them with windows in which nothing is:
   - everything up to a row is replayed: its results are items that were kept, nothing above it is
     called. That needs .copy_item on the row (buffers of spdl_buffer are copied without), and
     `replay`, as the consumer gets items more than once.
   - else each call of the busiest rows takes a known time longer, once computing, once asleep. How
     far throughput follows says how much the program hangs on the row, and on which resource. Calls
     that wait for a lock hide the delay: so a lock is told from a stage that needs more calls.
   Then the settings of the verdict are tried, all at once, and stay in force if they help. Delays
   change no item: without `replay` a consumer gets what it would get without the doctor. Statistics
   of the run include what the experiments did. Meanwhile what spdl_pipeline_set_concurrency sets
   does not last.

   A round is made again when who limits has waited for processors that other programs had; if most
   were, the figures are those beside these programs, and the report says so. Not known to it: what
   happens with other data, and with files that are not in the page cache.

   Every pipeline of the process has its doctor, and those that run at the same time disturb each
   other. What is kept for replay, up to 32 items of each row and 256 MiB of those whose size is
   known, is freed with the pipeline. A process that ends without spdl_pipeline_destroy before the
   time is over prints nothing. */

typedef enum spdl__doctor_method {
    SPDL__DOCTOR_NO_METHOD, /* it calls nothing, is hardly busy, deferred, or one row too many */
    SPDL__DOCTOR_REPLAYED,
    SPDL__DOCTOR_SLOWED
} spdl__doctor_method;

/* One row. Intervals are of throughput, compared with the rows as they are: 1.2 is 20 % more. */
typedef struct spdl__doctor_row {
    char name[SPDL_NAME_BYTES];
    spdl_kind kind;
    int concurrency;
    spdl__doctor_method method;
    double mean_ns, cpu_ns, runnable_ns, blocked_ns; /* of one call; the first is the sum */
    double load;            /* share of the time that as many calls ran as can */
    double delay_ns;        /* by which each call was longer */
    spdl_interval replayed; /* everything up to this row replayed */
    spdl_interval computing, asleep; /* each call took delay_ns longer */
} spdl__doctor_row;

/* Plain data without pointers. */
typedef struct spdl__doctor_report {
    char name[SPDL_NAME_BYTES]; /* of the pipeline */
    bool done;
    spdl_finding finding;  /* of the time of observing, after the experiments */
    bool tried, kept;      /* its settings were; and are in force */
    spdl_interval measured; /* with them */
    double seconds;        /* that it took */
    int workers;
    double cores, cores_used, others_used; /* processors: allowed, used by us, by others */
    double step_ns;        /* of the consumer */
    double today;          /* items/s as it is */
    double ceiling;        /* items/s if loading cost nothing */
    double waiting;        /* share of the time that the consumer waited */
    bool replays;          /* items were given out more than once */
    spdl_interval same;    /* nothing against nothing: as far off 1 as chance goes */
    spdl_interval cached;  /* spdl_doctor_run with replay: the consumer on items it has */
    int rounds, dropped;   /* rounds of windows; of them made again */
    int row_count;
    spdl__doctor_row row[SPDL_MAX_STAGES];
    char verdict[1024];
} spdl__doctor_report;

/* What SPDL_DOCTOR says, as the field `doctor` of spdl_pipeline_desc. */
typedef struct spdl_doctor_desc {
    double seconds;        /* it takes; default 30 */
    bool replay, raise;
    bool quiet;            /* nothing goes to stderr */
    const char *json;      /* file that the report is appended to, or NULL */
} spdl_doctor_desc;

#ifndef SPDL_NO_REPORT
/* The report of a pipeline that was created with a doctor.
   Returns: SPDL_OK; SPDL_TIMEOUT: it is not done yet, `report` is what is known; SPDL_E_NOT_FOUND:
            it has none.
   Threads: the consumer. */
SPDL_API spdl_result spdl_pipeline_doctor(const spdl_pipeline *pipeline,
                                          spdl__doctor_report *report);

/* Runs a training loop until the doctor is done: takes items, calls `step` with each, and frees
   them as the pipeline would. Starts over with spdl_pipeline_rewind when the items end.
   Returns: SPDL_OK; SPDL_E_INVALID when the pipeline has no doctor; how the pipeline ended, if not
            with SPDL_END.
   Threads: the consumer.
   Blocks:  for as long as the doctor takes. */
SPDL_API spdl_result spdl_doctor_run(spdl_pipeline *pipeline, spdl_step_fn step, void *ctx,
                                     spdl__doctor_report *report);

/* The report as text.
   Returns: the length of the whole text, as snprintf does; buffer holds what fits. */
SPDL_API int spdl__doctor_text(const spdl__doctor_report *report, char *buffer, size_t bytes);

/* The report as a line of JSON, "schema" being "spdl.doctor.1": the fields of the structs by their
   names. What is not known, as the interval of too few rounds, is null.
   Returns: as spdl__doctor_text. */
SPDL_API int spdl__doctor_json(const spdl__doctor_report *report, char *buffer, size_t bytes);
#endif

/* ============================================================================================= */
/* >>sampler
   A sampler says which item comes when: in order, shuffled, in shuffled blocks, mixed from several
   data sets, or by a function of yours; and which rank gets it. Everything is arithmetic: any
   position of any epoch can be asked for at any time, on any machine.

       spdl_sampler_desc desc = { 0 };
       desc.count = 1000000;                       indices 0 to 999,999
       desc.order = SPDL_SAMPLE_SHUFFLED;
       desc.seed = 7;
       spdl_ranks_from_env(&desc.ranks, NULL);     rank 3 of 8, as torchrun or mpirun says
       spdl_sampler_create(&s, &desc);
       ... SPDL_STAGES(SPDL_INDEX(s, .continuous = true), SPDL_PIPE(load, .concurrency = 4), ...)

   Which to use. Shuffled, if every item can be read alone. Blocks, if items lie in large files that
   are best read in one go. A mixture, if data sets have shares. A function for all else: weighted
   draws (examples/weighted.c), curricula, blocks of different sizes.

   An epoch has positions from 0, and the order puts an index on each. Rank r of w takes the
   positions r, r + w, r + 2w and so on: its items number 0, 1, 2. (Of a mixture it takes one of
   each w, but not always the same one: its share of each source is that of all.) The order depends
   on the desc and the epoch alone; each pair of seed and epoch is shuffled anew. An index takes 10
   to 15 ns, a sampler 0.5 KB. Up to 4,096 indices or blocks are shuffled in a table of 8 KB, as a
   true shuffle; more by a permutation made of hashes.

   Unless a block says otherwise: any thread may call, nothing blocks, what is passed is only read,
   and *_create gives what the caller destroys, or NULL with a text in desc->error. Calls for one
   sampler come one at a time, a running pipeline with SPDL_INDEX being one of them. */

/* An item of SPDL_INDEX. It is from spdl_buffer: spdl_buffer_free frees it. */
typedef struct spdl_index {
    uint64_t index;
    uint64_t position; /* in the epoch, the same for any number of ranks */
    uint64_t epoch;
    uint32_t source;   /* of a mixture: which sampler the index is of; else 0 */
} spdl_index;

typedef enum spdl_sampler_order {
    SPDL_SAMPLE_SEQUENTIAL,
    SPDL_SAMPLE_SHUFFLED,
    SPDL_SAMPLE_BLOCKS,   /* blocks of .block indices, shuffled, each from its begin to its end */
    SPDL_SAMPLE_FUNCTION, /* what index_fn says */
    SPDL_SAMPLE_MIXTURE   /* other samplers, mixed */
} spdl_sampler_order;

/* What becomes of the last positions if they do not suffice for all ranks. */
typedef enum spdl_tail {
    SPDL_TAIL_KEEP, /* some ranks have one item more: 26 on 4 ranks are 7, 7, 6, 6 */
    SPDL_TAIL_DROP, /* nobody has them: 6 each */
    SPDL_TAIL_PAD   /* those at the epoch's begin come again: 7 each */
} spdl_tail;

/* Which of `world` processes this is; all zero: the only one. */
typedef struct spdl_ranks {
    int rank, world;
} spdl_ranks;

/* The index at a position of an epoch: less than desc.count, and always the same. */
typedef uint64_t (*spdl_index_fn)(void *ctx, uint64_t epoch, uint64_t position);

typedef struct spdl_sampler spdl_sampler;
typedef struct spdl_mixture spdl_mixture;

typedef struct spdl_sampler_desc {
    spdl_sampler_order order;
    uint64_t count;     /* indices, 1 to 2^63; of a mixture leave it 0 */
    uint64_t draws;     /* positions in an epoch: more than `count` only with index_fn; default
                           `count`; a mixture needs it */
    uint64_t seed;
    spdl_ranks ranks;
    spdl_tail tail;
    uint64_t block;     /* indices in each block */
    spdl_index_fn index_fn;
    void *ctx;          /* its first argument */
    const spdl_mixture *mixture; /* with a sampler of one rank for each of its sources: */
    spdl_sampler *const *samplers; /* both outlive this one, which alone uses the samplers */
    spdl_allocator allocator;
    spdl_error *error;  /* optional: says why create failed */
} spdl_sampler_desc;

/* Makes a sampler. One of a mixture goes through the order of each source, again and again, each
   time that of the source's next epoch. Its own next epoch goes on where this one stops.
   Returns: SPDL_OK; SPDL_E_INVALID: desc->error names the field; SPDL_E_NOMEM. */
SPDL_API spdl_result spdl_sampler_create(spdl_sampler **sampler, const spdl_sampler_desc *desc);

/* Frees a sampler, after the pipeline that uses it. NULL is allowed. */
SPDL_API void spdl_sampler_destroy(spdl_sampler *sampler);

/* How many items this rank has in an epoch.
   Returns: the number. */
SPDL_API uint64_t spdl_sampler_count(const spdl_sampler *sampler, uint64_t epoch);

/* This rank's item `number` of an epoch, from 0: what SPDL_INDEX makes.
   Returns: SPDL_OK; SPDL_END: it has fewer; SPDL_E_INVALID: what index_fn returned is in
            item->index, and is not less than count. */
SPDL_API spdl_result spdl_sampler_item(spdl_sampler *sampler, uint64_t epoch, uint64_t number,
                                       spdl_index *item);

/* What comes at a position of an epoch, on whatever rank.
   Returns: as spdl_sampler_item; SPDL_END: the epoch has fewer positions. */
SPDL_API spdl_result spdl__sampler_at(spdl_sampler *sampler, uint64_t epoch, uint64_t position,
                                     spdl_index *item);

/* Rank and world as a launcher has set them: RANK and WORLD_SIZE (torchrun), OMPI_COMM_WORLD_RANK
   and _SIZE (Open MPI), PMI_RANK and PMI_SIZE (MPICH), SLURM_PROCID and SLURM_NTASKS (srun): the
   first of these pairs that is there. error may be NULL.
   Returns: SPDL_OK; SPDL_E_NOT_FOUND: there are none, *ranks is 0 of 1; SPDL_E_INVALID: they make
            no sense, which `error` says, and *ranks stays as it was.
   Threads: any, while no other one changes the environment. */
SPDL_API spdl_result spdl_ranks_from_env(spdl_ranks *ranks, spdl_error *error);

/* A hash of bytes, the same on every machine, for a pipeline's data_hash: chain it over names and
   sizes of files, with what it returned as the next `seed`. It does not protect against intent.
   Returns: 64 bits. */
SPDL_API uint64_t spdl_hash(uint64_t seed, const void *data, size_t bytes);

typedef struct spdl_mixture_desc {
    size_t sources;          /* 1 to 65536 */
    const double *weights;   /* of each: any scale; 0: it never comes */
    spdl_allocator allocator;
    spdl_error *error;       /* optional: says why create failed */
} spdl_mixture_desc;

/* Makes a mixture: which source each position takes its item from. It does not end: the sampler's
   `draws` say how long an epoch is. After any number of positions no source is off its share by 1.7
   items or more (beyond 2^50 positions rounding adds to that). Costs 16 bytes a source.
   Returns: SPDL_OK; SPDL_E_INVALID: desc->error names the field; SPDL_E_NOMEM. */
SPDL_API spdl_result spdl_mixture_create(spdl_mixture **mixture, const spdl_mixture_desc *desc);

/* Frees a mixture. NULL is allowed. */
SPDL_API void spdl_mixture_destroy(spdl_mixture *mixture);

/* Which source a position, less than 2^63, takes its item from, and which item of that source, from
   0.
   Returns: SPDL_OK, SPDL_E_INVALID.
   Threads: any number at a time. */
SPDL_API spdl_result spdl_mixture_at(const spdl_mixture *mixture, uint64_t position,
                                     uint32_t *source, uint64_t *index);

/* A source of a pipeline: the items of a sampler, of type spdl_index, in its order for any number
   of workers; SPDL_END after those of an epoch.
       SPDL_INDEX(sampler, .continuous = true)
   Before C++20: SPDL_INDEX(sampler).with_continuous(true). */
/* clang-format off */
#define SPDL_INDEX(...) SPDL__INDEX_ROW(__VA_ARGS__, SPDL__LINE)
#if !defined(__cplusplus)
#define SPDL__INDEX_ROW(sampler_, ...)                                                             \
    SPDL__FN_ROW(SPDL_KIND_SOURCE, spdl_index,                                                     \
                 .ctx = SPDL__UNCONST((const spdl_sampler *)(sampler_)),                           \
                 .item_bytes = sizeof(spdl_index), .free_item = spdl_buffer_free, __VA_ARGS__)
#else
#define SPDL__INDEX_ROW(sampler_, ...)                                                             \
    spdl__ctx_row<spdl_sampler>(SPDL__FN_ROW(SPDL_KIND_SOURCE, spdl_index, __VA_ARGS__), sampler_, \
                                spdl_buffer_free, NULL, sizeof(spdl_index))
#endif
/* clang-format on */

#if !defined(SPDL_STATIC)
SPDL_API const spdl_function spdl_index_spdl;
#elif !defined(__cplusplus)
SPDL__UNUSED static const spdl_function spdl_index_spdl;
#endif

/* ============================================================================================= */
/* >>loader
   A pipeline in a process of its own, which writes its batches where the trainer reads them: in
   shared memory. Nothing is copied, and what a stage does to its process stays there: a crash, a
   leak, a library that is not thread-safe. Linux; elsewhere open returns SPDL_E_UNSUPPORTED.

   Which to use. A pipeline with polite workers (spdl_policy) protects the trainer's speed at least
   as well, and costs less. A loader is for stages that crash, leak, or may not share a process.

       spdl_loader_desc desc = { 0 };
       desc.pipeline.workers = 4;
       if (spdl_loader_open(&loader, &desc, SPDL_STAGES(
               SPDL_SOURCE(list), SPDL_PIPE(decode, .concurrency = 4),
               SPDL_BATCH(32, .item_bytes = sizeof(image)), SPDL_SINK(2))) != SPDL_OK) return 1;
       while (spdl_loader_next(loader, &batch, SPDL_FOREVER) == SPDL_OK) {
           train(batch.data, batch.count);
           spdl_loader_done(loader, &batch);
       }
       if (spdl_loader_error(loader)->result != SPDL_OK) puts(spdl_loader_error(loader)->text);
       spdl_loader_close(loader);

   Rows. The last row with .item_bytes makes the batches: SPDL_BATCH in place, or a stage that calls
   spdl_buffer. Rows after it hand on what they get. Its blocks are slots of the shared memory (the
   arena): as many as the pipeline itself can have in use, and desc.slots.

   Processes. Open forks a supervisor, and that forks the child, now and when it has to be started
   again: rows, ctx and all memory are there as they were at open. A fork copies one thread alone,
   so open refuses when the process has others. Open loaders first of all, before threads, CUDA and
   large allocations. Both processes ignore SIGINT, SIGTERM and the like; they end with the process
   that opened the loader, however it ends, and so do programs of a stage that stay in its process
   group. Several children are several loaders, taken in turn: examples/loaders_in_turn.c.

   Failures. What the child has handed out before is delivered first. Then spdl_loader_next returns
   what the pipeline failed with, or SPDL_E_PROCESS when the child has ended: by which signal or
   with which code (0 is one, too), in which call of which stage, or which calls were running. With
   max_restarts the child is started again after the last batch that was handed out, if the table
   has a position (see spdl_state_save). The trainer trusts nothing that a child can write.

   Memory. Open reserves the arena: if the cgroup or the machine has no room for it, open says so,
   and no page of it can be missing later. To bound what a child uses of its own, call setrlimit in
   .init of a row. When a cgroup runs out of memory the system kills one process in it or, in a
   Kubernetes pod, all of them: then no one is left to report it.

   Seeing inside. Reports, statistics and traces of desc.pipeline are made in the child, and its
   log_fn, report_fn and event_fn are called there. There is no doctor in a child.

   Unless a block says otherwise: the trainer calls (one thread at a time), nothing blocks, and what
   a function hands out is the loader's, valid until it is closed. In the child of a fork of the
   trainer next, done, save, load and rewind return SPDL_E_INVALID. */

typedef struct spdl_loader_desc {
    spdl_pipeline_desc pipeline; /* of the child; without pool */
    int slots;                /* batches that are ready or the trainer's; default 4 */
    uint64_t arena_bytes;     /* the most that may be shared; 0: what there is room for */
    double hang_timeout;      /* seconds for which the trainer waits, in one call or in several that
                                 time out, before the child is killed; 0: for ever */
    int max_restarts;
    bool fork_with_threads;   /* open all the same: no stage takes a lock that they hold */
    const char *name;         /* for messages; default "spdl" */
    spdl_logger logger;       /* in this process */
    spdl_error *error;        /* optional: says why open failed */
} spdl_loader_desc;

typedef struct spdl_loader spdl_loader;

/* Zero before it is filled in. What it points to is there until spdl_loader_done. */
typedef struct spdl_loader_batch {
    void *data;      /* at a multiple of 64; may be written, too */
    size_t bytes;    /* of it: items of SPDL_BATCH, or item_bytes */
    size_t count;    /* items of SPDL_BATCH; else 1 */
    uint64_t number; /* in its epoch, from 0 */
    uint64_t epoch;
    int slot;        /* where it lies: data is the same again for the same slot */
    uint64_t ticket; /* of the library */
    spdl_loader *loader;
} spdl_loader_batch;

typedef struct spdl_loader_status {
    int slots;                /* those that the pipeline uses, too */
    int64_t supervisor, pid;  /* process ids; 0: there is none now */
    int restarts;
    uint64_t taken;           /* batches that the trainer got */
    uint64_t held;            /* and has now */
    uint64_t wait_ns;         /* time it waited for them */
} spdl_loader_status;

/* Checks the rows as spdl_pipeline_create does, reserves the arena, and starts the processes, whose
   failures come with spdl_loader_next. ctx pointers must outlive the loader.
   Returns: SPDL_OK; what spdl_pipeline_create returns for wrong rows; SPDL_E_INVALID (a field, or
            threads); SPDL_E_NOMEM; SPDL_E_LIMIT (arena_bytes, or no room); SPDL_E_PROCESS (no
            process could be started); SPDL_E_UNSUPPORTED (SPDL_FEED, or not on this system).
   Threads: any.
   Owns:    the caller closes *loader; on failure it is NULL. */
SPDL_API spdl_result spdl_loader_open(spdl_loader **loader, const spdl_loader_desc *desc,
                                      const spdl_stage *stages, size_t stage_count);

/* Ends the processes, and frees the arena with all batches. NULL is allowed.
   Blocks:  until they have ended or were killed: the child has a second for that, a supervisor that
            stands still 1.5. */
SPDL_API void spdl_loader_close(spdl_loader *loader);

/* The next batch: a view of shared memory. After the last one each call returns SPDL_END; with a
   continuous source it does once for each epoch. A failure is returned again and again. A batch
   that is ready costs no system call.
   Returns: SPDL_OK, SPDL_TIMEOUT, SPDL_END, SPDL_CLOSED (a stage has called spdl_stop), or a
            failure, which spdl_loader_error describes; SPDL_E_PROCESS: a process has ended, or
            hung, or has overwritten what is shared; SPDL_E_LIMIT: the trainer holds all desc.slots
            batches: when it has given one back, it may go on.
   Blocks:  until there is a batch, an end or a failure, or up to timeout_ns. */
SPDL_API spdl_result spdl_loader_next(spdl_loader *loader, spdl_loader_batch *batch,
                                      int64_t timeout_ns);

/* Gives the slot of a batch back, in any order.
   Returns: SPDL_OK; SPDL_E_INVALID: it was given back already, or is none of this loader's.
   Threads: one at a time, also beside spdl_loader_next. */
SPDL_API spdl_result spdl_loader_done(spdl_loader *loader, const spdl_loader_batch *batch);

/* spdl_loader_next with the type of spdl_next_fn, for >>cache, >>headspace and SPDL_FROM: the item
   is a spdl_loader_batch *, to be freed with spdl_loader_batch_free.
   Returns: as spdl_loader_next.
   Blocks:  as spdl_loader_next. */
SPDL_API spdl_result spdl_loader_next_fn(void *loader, void **item, int64_t timeout_ns);

/* spdl_loader_done of what spdl_loader_next_fn gave. NULL is allowed; fits free_item. */
SPDL_API void spdl_loader_batch_free(void *batch);

/* The position after what spdl_loader_next returned last: the text of spdl_state_save. A run may go
   on with a loader or without.
   Returns: as spdl_state_save; SPDL_E_PROCESS; SPDL_E_CHECKSUM: the child's text makes no sense.
   Blocks:  before the first batch: until the child has begun. */
SPDL_API int spdl_loader_state_save(spdl_loader *loader, char *text, size_t bytes);

/* Goes on at the position of a text, in the same process, as spdl_state_load. Batches that are
   ready are dropped; those that the trainer holds stay its. A failure of the pipeline is forgotten;
   a process that has ended stays gone. After a refusal all is as before.
   Returns: as spdl_state_load; SPDL_TIMEOUT: the next call waits on, and returns a refusal; of
            several the last one counts; SPDL_E_LIMIT: texts of more than some 150 ranks;
            SPDL_E_PROCESS.
   Blocks:  until the calls at hand have returned, or up to timeout_ns. */
SPDL_API spdl_result spdl_loader_state_load(spdl_loader *loader, const char *const *texts, int count,
                                      int64_t timeout_ns, spdl_error *error);

/* The same, at item `sequence` of epoch 0, as spdl_pipeline_rewind: tables without a position, too.
   Returns: as spdl_pipeline_rewind and spdl_loader_state_load.
   Blocks:  as spdl_loader_state_load. */
SPDL_API spdl_result spdl_loader_rewind(spdl_loader *loader, uint64_t sequence,
                                        int64_t timeout_ns);

/* The failure that spdl_loader_next has returned.
   Returns: never NULL; result is SPDL_OK when there was none. stage -1: it is of no stage. */
SPDL_API const spdl_error *spdl_loader_error(const spdl_loader *loader);

/* The statistics of the child's pipeline, some 50 ms old. Its trainer is the child's main thread,
   which takes a batch when fewer than desc.slots are ready or held: it waits when the trainer does.
   Returns: SPDL_OK; SPDL_E_NOT_FOUND: there are none yet.
   Threads: any. */
SPDL_API spdl_result spdl_loader_stats(const spdl_loader *loader, spdl_stats *stats);

/* Who runs, and what the trainer has taken. */
SPDL_API void spdl_loader_get_status(const spdl_loader *loader, spdl_loader_status *status);

/* Where the slots are: one block of memory, at a page border, with a slot of *slot_bytes after the
   other: for spdl_cuda_adopt(cuda, base, bytes). Each pointer may be NULL.
   Threads: any. */
SPDL_API void spdl_loader_arena(const spdl_loader *loader, void **base, size_t *bytes,
                                size_t *slot_bytes);

/* ============================================================================================= */
/* >>npz
   Arrays as NumPy writes them: .npy (1.0, 2.0, 3.0) and .npz (stored or deflated members, ZIP64),
   read and written. Reading gives C order (the last index varies fastest) and numbers in the byte
   order of this machine, whatever the file has; structured elements stay as they are. A .npy file
   is an archive of one array named "arr_0". Every length is compared with the bytes that are there
   before it is used or allocated for, and every product is checked.

   For all functions here, where nothing else is said: any thread may call them, several at a time
   on one archive, but only one at a time on a writer. They wait for the file system alone. What is
   passed in stays the caller's; desc, error and the index of find may be NULL. A function that
   makes something sets the pointer to it to NULL when it fails. A spdl_result is SPDL_OK or, with
   an error that names file, member and byte, one of SPDL_E_INVALID (an argument), SPDL_E_NOT_FOUND,
   SPDL_E_IO, SPDL_E_FORMAT (damaged), SPDL_E_UNSUPPORTED, SPDL_E_CHECKSUM, SPDL_E_LIMIT (of the
   desc; or over 2^20 members, 64 dimensions, a header of 64 KB) and SPDL_E_NOMEM.

   A file of at most 256 KB is read when it is opened, and closed. Of a larger one the directory is
   read; reading copies straight to the caller's memory, and the first view maps the file. When a
   file is truncated meanwhile, reading fails with SPDL_E_IO, and only looking at bytes of a view
   that are gone raises SIGBUS.

   The CRC-32 of an array is verified in the pass that reads it as a whole; views, rows and .npy
   files have none. Bytes after an array are skipped, as by NumPy, but belong to its CRC. */

#ifndef SPDL_NO_NPZ

#define SPDL_NPY_MAX_DIMS 64

/* An array, as it is read. */
typedef struct spdl_npy_info {
    char kind;      /* as NumPy's dtype.kind: b i u f c S U V M m; V also for structs */
    bool stored;    /* not deflated: spdl_npz_read_rows and spdl_npz_view can work */
    int ndim;       /* 0 to SPDL_NPY_MAX_DIMS */
    uint64_t itemsize; /* bytes of one element */
    uint64_t shape[SPDL_NPY_MAX_DIMS];
    uint64_t count;    /* elements: the product of shape, 1 for ndim 0 */
    uint64_t bytes;    /* count * itemsize */
    char descr[256];   /* "<f4", "|S12" or "[('x', '<f4'), ...]"; cut if longer */
} spdl_npy_info;

typedef struct spdl_npz_desc {
    uint64_t max_bytes; /* refuse an array, or with load all arrays, over this; default 2^40 */
    bool no_crc;        /* trust the file: verify nothing; load maps what need not be copied */
    spdl_allocator allocator;
    spdl_error *error;  /* optional: why open or load failed */
} spdl_npz_desc;

/* Loading whole files: all arrays of one. */
typedef struct spdl_npz_array {
    const char *name; /* without ".npy" */
    void *data;       /* aligned to 64 bytes; may be changed */
    spdl_npy_info info;
} spdl_npz_array;

typedef struct spdl_npz_bundle {
    spdl_npz_array *arrays;
    size_t count;
    size_t bytes; /* of the allocation that holds it all */
    spdl_allocator allocator;
    const void *mapping; /* with no_crc: the file, of which some arrays are views; or NULL */
    uint64_t mapped;
} spdl_npz_bundle;

/* Reads all arrays of a file. With no_crc, stored arrays of 64 KB and more that are aligned to 64
   bytes (as spdl_npz_writer_add does) are views: do not truncate the file while the bundle is in use.
   Returns: as the section says. The caller frees *bundle. */
SPDL_API spdl_result spdl_npz_load(spdl_npz_bundle **bundle, const char *path,
                                   const spdl_npz_desc *desc);

/* The same from memory, of which nothing is kept. `name` is used in messages.
   Returns: as the section says. The caller frees *bundle. */
SPDL_API spdl_result spdl_npz_load_memory(spdl_npz_bundle **bundle, const void *data, size_t bytes,
                                          const char *name, const spdl_npz_desc *desc);

/* The array of this name; if there is none, the array whose name this is with ".npy" after it.
   Returns: the array, or NULL. */
SPDL_API spdl_npz_array *spdl_npz_bundle_find(const spdl_npz_bundle *bundle, const char *name);

/* Whether an array has this type and shape. dtype is as NumPy's, "<f4", or without byte order; it
   does not matter, since numbers are those of this machine. A dimension of 0 fits any.
   Returns: SPDL_OK, SPDL_E_NOT_FOUND (array is NULL), SPDL_E_INVALID; error says what it has. */
SPDL_API spdl_result spdl_npz_expect(const spdl_npz_array *array, const char *dtype, int ndim,
                                     const uint64_t *shape, spdl_error *error);

/* Frees a bundle with all its arrays; NULL is allowed. Fits free_item. */
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
#else
#define SPDL__NPZ_ROW(desc_, ...)                                                                  \
    spdl__ctx_row<spdl_npz_desc>(SPDL__FN_ROW(SPDL_KIND_PIPE, spdl_npz_load, __VA_ARGS__), desc_,  \
                                 spdl_npz_bundle_free)
#endif
/* clang-format on */

#if !defined(SPDL_STATIC)
SPDL_API const spdl_function spdl_npz_load_spdl;
#elif !defined(__cplusplus)
SPDL__UNUSED static const spdl_function spdl_npz_load_spdl;
#endif

/* One array at a time, out of an archive that is open. */
typedef struct spdl_npz spdl_npz;

/* Opens an .npz or .npy file and reads its directory.
   Returns: as the section says. The caller closes *npz. */
SPDL_API spdl_result spdl_npz_open(spdl_npz **npz, const char *path,
                                        const spdl_npz_desc *desc);

/* The same from memory, which must stay unchanged until close. `name` is used in messages.
   Returns: as the section says. The caller closes *npz. */
SPDL_API spdl_result spdl_npz_open_memory(spdl_npz **npz, const void *data, size_t bytes,
                                          const char *name, const spdl_npz_desc *desc);

/* Closes the archive; NULL is allowed. Views of it end. No other call on it may be running. */
SPDL_API void spdl_npz_close(spdl_npz *npz);

/* How many arrays there are. Of several with one name only the last counts, as in NumPy.
   Returns: the number of arrays. */
SPDL_API size_t spdl_npz_count(const spdl_npz *npz);

/* The name of array `index`: without ".npy", if no other array has that name.
   Returns: a string, valid until close; NULL when there is no such array. */
SPDL_API const char *spdl_npz_name(const spdl_npz *npz, size_t index);

/* Finds an array as spdl_npz_bundle_find does.
   Returns: SPDL_OK with *index, or SPDL_E_NOT_FOUND. */
SPDL_API spdl_result spdl_npz_find(const spdl_npz *npz, const char *name, size_t *index);

/* Type and shape of array `index`; of a deflated member only the head is inflated.
   Returns: as the section says. */
SPDL_API spdl_result spdl_npz_info(const spdl_npz *npz, size_t index, spdl_npy_info *info,
                                   spdl_error *error);

/* Reads array `index`, info.bytes of data, to memory of at least so many `bytes`.
   Returns: as the section says; after a failure the content of `data` is undefined. */
SPDL_API spdl_result spdl_npz_read(const spdl_npz *npz, size_t index, void *data, size_t bytes,
                                   spdl_error *error);

/* Reads the rows `first` to `first + count - 1` of a stored array: the elements with these first
   indices, each bytes / shape[0] large. Nothing else is read.
   Returns: as spdl_npz_read; SPDL_E_UNSUPPORTED for an array that is deflated, or in Fortran order
            in the file; SPDL_E_INVALID for rows that are not there. */
SPDL_API spdl_result spdl_npz_read_rows(const spdl_npz *npz, size_t index, uint64_t first,
                                        uint64_t count, void *data, size_t bytes,
                                        spdl_error *error);

/* The data of a stored array without a copy. NumPy's own files are not aligned in an .npz: look at
   *aligned (to 64 bytes; may be NULL) before using it as anything but bytes.
   Returns: as the section says; the archive keeps the data, until close. SPDL_E_UNSUPPORTED for an
            array that is deflated, or in another order of bytes or indices in the file. */
SPDL_API spdl_result spdl_npz_view(const spdl_npz *npz, size_t index, const void **data,
                                   bool *aligned, spdl_error *error);

/* Writing. The arrays go to a file beside `path`, which takes its place when everything is written:
   a program that opens `path` sees the old file or the whole new one. Members are stored, and their
   data aligned to 64 bytes, so that they can be viewed; NumPy reads them. */
typedef struct spdl_npz_writer_desc {
    bool npy;          /* a .npy file, of exactly one array */
    bool sync;         /* have it on the disk before it takes its place */
    spdl_allocator allocator;
    spdl_error *error; /* optional: why create failed */
} spdl_npz_writer_desc;

typedef struct spdl_npz_writer spdl_npz_writer;

/* Begins a file.
   Returns: as the section says. The caller closes *writer. */
SPDL_API spdl_result spdl_npz_writer_open(spdl_npz_writer **writer, const char *path,
                                     const spdl_npz_writer_desc *desc);

/* Writes an array in C order. The name is UTF-8, without ".npy". dtype is what stands in the file:
   "<f4", "|u1", "<M8[ns]", "[('x', '<f4')]"; "f4" has the byte order of this machine. `data` has
   the bytes that it and the shape need.
   Returns: as the section says; after SPDL_E_IO and SPDL_E_NOMEM the writer can only be closed. */
SPDL_API spdl_result spdl_npz_writer_add(spdl_npz_writer *writer, const char *name, const char *dtype,
                                    int ndim, const uint64_t *shape, const void *data,
                                    spdl_error *error);

/* Writes the directory and puts the file in its place.
   Returns: as the section says; SPDL_E_INVALID when two arrays have one name. */
SPDL_API spdl_result spdl_npz_writer_finish(spdl_npz_writer *writer, spdl_error *error);

/* Frees the writer; NULL is allowed. Without a finish that succeeded nothing of it remains. */
SPDL_API void spdl_npz_writer_close(spdl_npz_writer *writer);

#endif /* SPDL_NO_NPZ */

/* ============================================================================================= */
/* >>files
   Data sets in files: lists of files, tar archives, lines of text, shards of tokens. Sizes and
   places have 64 bits. Every length is compared with the bytes that are there before it is used.
   What is cut off is an error, and an error names the file and the byte. Rows are at the end.

   Unless a block says otherwise: any thread may call; open, next and read block on the file system;
   any `desc` and any `error` may be NULL; *_open gives what the caller closes, or NULL; the first
   argument of all other functions owns what they return. */

typedef struct spdl_files_desc {
    bool recursive;     /* of a folder: also what is in the folders below it */
    uint64_t max_files; /* refuse more files and folders; default 2^24 */
    spdl_allocator allocator;
    spdl_error *error;  /* optional: why open failed */
} spdl_files_desc;

typedef struct spdl_files spdl_files;

/* Lists files. `path` is a file; a folder: the files in it; a pattern with * and ?, also for
   folders, as "train-?/a*.tar"; or @list.txt, which has a path on each line, relative to its own
   folder. Files come in the order of the bytes of their paths, the same on every machine; those of
   a list in its order. Names that begin with a dot need one in the pattern or the list.
   Returns: SPDL_OK; SPDL_E_IO; SPDL_E_NOT_FOUND: there is none; SPDL_E_FORMAT (the list),
            SPDL_E_LIMIT (max_files; paths over 4095 bytes, 32 folders deep), SPDL_E_NOMEM,
            SPDL_E_INVALID. With SPDL_NO_THREADS there are no folders: SPDL_E_IO. */
SPDL_API spdl_result spdl_files_open(spdl_files **files, const char *path,
                                     const spdl_files_desc *desc);

/* Frees a list and its paths, when nothing that was opened with it is in use. NULL is allowed. */
SPDL_API void spdl_files_close(spdl_files *files);

/* How many files there are.
   Returns: the number. */
SPDL_API uint64_t spdl_files_count(const spdl_files *files);

/* The path of file `index`.
   Returns: a string, or NULL when there is no such file. */
SPDL_API const char *spdl_files_path(const spdl_files *files, uint64_t index);

/* A hash of names, sizes and order, for a pipeline's data_hash: a state of other data is refused.
   Names count from the folder on that all paths share: where that lies does not matter.
   Returns: the hash, the same on every machine. */
SPDL_API uint64_t spdl_files_hash(const spdl_files *files);

/* Bytes out of a file: a member of an archive, or a line. One allocation. */
typedef struct spdl_record {
    const char *name; /* of the member; else the path of the file */
    uint8_t *data;    /* aligned to 64 bytes; a zero follows the last one */
    size_t bytes;
    uint64_t offset;  /* of the data in the file */
    struct spdl_record *next; /* the other members of a sample (.group), or NULL */
} spdl_record;

/* Frees a record and those that follow it. NULL is allowed; fits free_item. */
SPDL_API void spdl_record_free(void *record);

/* The member of a sample whose name has this after the first dot: "jpg", "seg.png".
   Returns: the record, or NULL. */
SPDL_API spdl_record *spdl_record_find(spdl_record *sample, const char *extension);

/* Files that are read record by record. Tar archives may be ustar, GNU, pax or older; the plain
   files in them are handed on. Checksums are verified; an archive without an empty block at its end
   was cut off. Lines end in LF or CR LF, or with the file. Memory: 64 KB and a record. */
typedef enum spdl__records_kind { SPDL__RECORDS_TAR, SPDL__RECORDS_LINES } spdl__records_kind;

typedef struct spdl_records_desc {
    spdl__records_kind kind; /* the rows set it themselves */
    bool group;             /* tar: members that follow each other and have the same path up to the
                               first dot of the file's name are one sample: a row of records */
    uint64_t max_bytes;     /* refuse a larger member, sample (of each member 512 bytes more) or
                               line; default 2^30, lines 2^24 */
    spdl_allocator allocator;
    spdl_error *error;      /* optional: why open failed */
} spdl_records_desc;

typedef struct spdl__records spdl__records;

/* Opens a file to be read record by record.
   Returns: SPDL_OK, SPDL_E_IO, SPDL_E_NOMEM, SPDL_E_INVALID. */
SPDL_API spdl_result spdl__records_open(spdl__records **records, const char *path,
                                       const spdl_records_desc *desc);

/* Reads the next record.
   Returns: SPDL_OK, SPDL_END; SPDL_E_FORMAT, SPDL_E_UNSUPPORTED (sparse files, parts of archives),
            SPDL_E_LIMIT, SPDL_E_IO, SPDL_E_NOMEM, and the same again if it is called again.
   Threads: one at a time.
   Owns:    the caller frees *record. */
SPDL_API spdl_result spdl__records_next(spdl__records *records, spdl_record **record,
                                       spdl_error *error);

/* Closes the file; records stay. NULL is allowed; fits free_state. */
SPDL_API void spdl__records_close(void *records);

/* Tokens in shards: the files of llm.c (256 int32 of header: 20240520, version 1 with uint16, or
   20240801, version 7 with uint32), or raw ones as those of nanoGPT. All shards one after the other
   are one row of tokens. Window i is the tokens i * length to i * length + length, one more than
   `length`: the last one is the last target, and the first input of the next window. */
typedef struct spdl_tokens_desc {
    uint64_t length; /* of a window: needed */
    int raw_bytes;   /* the shards have no header, and tokens of 2 or 4 bytes; 0: of llm.c */
    spdl_allocator allocator;
    spdl_error *error; /* optional: why open failed */
} spdl_tokens_desc;

typedef struct spdl_tokens spdl_tokens;

/* Opens the shards of a list and checks their lengths. They stay open.
   Returns: SPDL_OK, SPDL_E_INVALID, SPDL_E_IO, SPDL_E_NOMEM; SPDL_E_FORMAT: no such shard, or it is
            longer or shorter than it says, or all have too few tokens for a window.
   Owns:    `files` has to outlive *tokens. */
SPDL_API spdl_result spdl_tokens_open(spdl_tokens **tokens, const spdl_files *files,
                                      const spdl_tokens_desc *desc);

/* Closes the shards, when no other call is running. NULL is allowed. */
SPDL_API void spdl_tokens_close(spdl_tokens *tokens);

/* How many windows there are; what is left at the end is no window.
   Returns: the number. */
SPDL_API uint64_t spdl_tokens_count(const spdl_tokens *tokens);

/* The size of a window of uint32_t in memory, for .item_bytes. One of uint16_t takes half of it.
   Returns: 4 * (length + 1). */
SPDL_API size_t spdl_tokens_bytes(const spdl_tokens *tokens);

/* Reads window `index`, as uint32_t or as uint16_t. The second form needs shards of 2 bytes a
   token, whose bytes it reads as they are.
   Returns: SPDL_OK, SPDL_E_INVALID (no such window, or shards of 4 bytes a token), SPDL_E_IO: then
            the content of `window` is undefined. */
SPDL_API spdl_result spdl_tokens_read(const spdl_tokens *tokens, uint64_t index, uint32_t *window,
                                      spdl_error *error);
/* See spdl_tokens_read.
   Returns: the same. */
SPDL_API spdl_result spdl_tokens_read16(const spdl_tokens *tokens, uint64_t index,
                                        uint16_t *window, spdl_error *error);

/* Rows. The first argument has to outlive the pipeline; fields follow, as in all rows.
       SPDL_FILES(files)       a source of paths (char), which belong to the list
       SPDL_TOKENS(tokens)     a source of windows (uint32_t), in memory of spdl_buffer: it, or the
                               SPDL_BATCH after it, says .item_bytes = spdl_tokens_bytes(tokens)
       SPDL_TOKENS16(tokens)   the same of uint16_t, with half of these .item_bytes
       SPDL_FILES_AT(files), SPDL_TOKENS_AT(tokens), SPDL_TOKENS16_AT(tokens)
                               pipes: the path or the window that an spdl_index names
       SPDL_TAR(desc), SPDL_LINES(desc)
                               pipes: the records (spdl_record) of each path (char), by SPDL_AGAIN;
                               desc is NULL or the address of a spdl_records_desc, whose error is
                               not used. In input order one file at a time; storage that is slow
                               to answer gains by completion order with .concurrency = 2 or more
   Item spdl_sequence of a source is file or window spdl_sequence: a rewind goes to any of them. */
/* clang-format off */
#define SPDL_FILES(...)       SPDL__FILE_ROW(SOURCE, 0, spdl_files, __VA_ARGS__, SPDL__LINE)
#define SPDL_FILES_AT(...)    SPDL__FILE_ROW(PIPE, 1, spdl_files, __VA_ARGS__, SPDL__LINE)
#define SPDL_TOKENS(...)      SPDL__FILE_ROW(SOURCE, 2, spdl_tokens, __VA_ARGS__, SPDL__LINE)
#define SPDL_TOKENS_AT(...)   SPDL__FILE_ROW(PIPE, 3, spdl_tokens, __VA_ARGS__, SPDL__LINE)
#define SPDL_TOKENS16(...)    SPDL__FILE_ROW(SOURCE, 4, spdl_tokens, __VA_ARGS__, SPDL__LINE)
#define SPDL_TOKENS16_AT(...) SPDL__FILE_ROW(PIPE, 5, spdl_tokens, __VA_ARGS__, SPDL__LINE)
#define SPDL_TAR(...)   SPDL__RECORDS_ROW(6, __VA_ARGS__, SPDL__LINE)
#define SPDL_LINES(...) SPDL__RECORDS_ROW(7, __VA_ARGS__, SPDL__LINE)
#if !defined(__cplusplus)
#define SPDL__FILE_ROW(kind_, which_, type_, ctx_, ...)                                            \
    { .kind = SPDL_KIND_##kind_, .fn = &spdl__file_rows[which_], .file = __FILE__,                 \
      .ctx = SPDL__UNCONST((const type_ *)(ctx_)), __VA_ARGS__ }
#define SPDL__RECORDS_ROW(which_, desc_, ...)                                                      \
    { .kind = SPDL_KIND_PIPE, .fn = &spdl__file_rows[which_], .file = __FILE__,                    \
      .ctx = SPDL__UNCONST((const spdl_records_desc *)(desc_)), .again = true,                     \
      .free_item = spdl_record_free, .free_state = spdl__records_close, __VA_ARGS__ }
#else
#if __cplusplus >= 202002L
#define SPDL__FILE_STAGE(kind_, which_, ...)                                                       \
    spdl_stage{ .kind = SPDL_KIND_##kind_, .fn = &spdl__file_rows[which_], .file = __FILE__,       \
                __VA_ARGS__ }
#else
#define SPDL__FILE_STAGE(kind_, which_, ...)                                                       \
    spdl__row(SPDL_KIND_##kind_, &spdl__file_rows[which_], __FILE__, SPDL__ROW_LINE(#__VA_ARGS__), \
              0, NULL)
#endif
#define SPDL__FILE_ROW(kind_, which_, type_, ctx_, ...)                                            \
    spdl__ctx_row<type_>(SPDL__FILE_STAGE(kind_, which_, __VA_ARGS__), ctx_, NULL)
#define SPDL__RECORDS_ROW(which_, desc_, ...)                                                      \
    spdl__ctx_row<spdl_records_desc>(SPDL__FILE_STAGE(PIPE, which_, __VA_ARGS__),                  \
                                     desc_, spdl_record_free, spdl__records_close)
#endif
/* clang-format on */

#if !defined(SPDL_STATIC)
SPDL_API const spdl_function spdl__file_rows[8];
#elif !defined(__cplusplus)
SPDL__UNUSED static const spdl_function spdl__file_rows[8];
#endif

#ifdef __cplusplus
} /* extern "C" */
#endif

/* ============================================================================================= */
/* >>cpp
   Thin forms of what C does with compound literals, and rows of lambdas, without any C++ header. */

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
    row.ctx = source;
    return row;
}

#ifdef SPDL_STATIC
namespace {
extern SPDL__UNUSED const spdl_function spdl_index_spdl, spdl__file_rows[8];
#ifndef SPDL_NO_NPZ
extern SPDL__UNUSED const spdl_function spdl_npz_load_spdl;
#endif
}
#endif

/* What SPDL_INDEX, SPDL_NPZ and the rows of >>files stand for: these fields may be set already. */
template <class Ctx>
inline spdl_stage spdl__ctx_row(spdl_stage row, const Ctx *ctx, spdl_free_fn free_item,
                                spdl_free_fn free_state = NULL, size_t item_bytes = 0) {
    row.ctx = SPDL__UNCONST(ctx);
    row.again = row.again || free_state != NULL;
    if (row.free_item == NULL) row.free_item = free_item;
    if (row.free_state == NULL) row.free_state = free_state;
    if (row.item_bytes == 0) row.item_bytes = item_bytes;
    return row;
}

/* As the C function, with SPDL_STAGES(...) as the last argument. */
template <size_t count>
inline spdl_result spdl_pipeline_create(spdl_pipeline **pipeline, const spdl_pipeline_desc *desc,
                                        const spdl_stage (&stages)[count]) {
    return spdl_pipeline_create(pipeline, desc, stages, count);
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

/* The name of a type, "[with T = Image]" or so: compared with its like only, not with SPDL_FN's. */
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
   The row has the address of `load`, which must outlive the pipeline, in place of a ctx; as many
   threads as `concurrency` says call it at a time. One without captures may be written in place. */
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

#if defined(__has_include) && defined(__linux__) /* elsewhere it is another one */
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
   see at each access what it orders. load = acquire, store = release; add, or, exchange and cas =
   acquire and release; relaxed ones say so. `32` is for uint32_t, the others are for uint64_t. All
   that has a name with __atomic or __builtin in it comes first: another compiler is a twin of that
   part. */

/* For fields: in a struct, some 32-bit processors align a uint64_t to 4, and others stop at an
   atomic word that is aligned so. spdl__alloc aligns to 8, too. */
typedef uint64_t spdl__word64 __attribute__((aligned(8)));

#define SPDL__ATOMICS(type, word, suffix)                                                          \
    SPDL__INLINE type spdl__load##suffix(const type *p) {                                          \
        return __atomic_load_n((const word *)(const void *)p, __ATOMIC_ACQUIRE);                   \
    }                                                                                              \
    SPDL__INLINE type spdl__load_relaxed##suffix(const type *p) {                                  \
        return __atomic_load_n((const word *)(const void *)p, __ATOMIC_RELAXED);                   \
    }                                                                                              \
    SPDL__INLINE void spdl__store##suffix(type *p, type value) {                                   \
        __atomic_store_n((word *)(void *)p, value, __ATOMIC_RELEASE);                              \
    }                                                                                              \
    SPDL__INLINE void spdl__store_relaxed##suffix(type *p, type value) {                           \
        __atomic_store_n((word *)(void *)p, value, __ATOMIC_RELAXED);                              \
    }                                                                                              \
    SPDL__INLINE type spdl__exchange##suffix(type *p, type value) {                                \
        return __atomic_exchange_n((word *)(void *)p, value, __ATOMIC_ACQ_REL);                    \
    }                                                                                              \
    SPDL__INLINE type spdl__add##suffix(type *p, type value) {                                     \
        return __atomic_fetch_add((word *)(void *)p, value, __ATOMIC_ACQ_REL);                     \
    }                                                                                              \
    SPDL__INLINE type spdl__sub##suffix(type *p, type value) {                                     \
        return __atomic_fetch_sub((word *)(void *)p, value, __ATOMIC_ACQ_REL);                     \
    }                                                                                              \
    SPDL__INLINE type spdl__or##suffix(type *p, type bits) {                                       \
        return __atomic_fetch_or((word *)(void *)p, bits, __ATOMIC_ACQ_REL);                       \
    }                                                                                              \
    SPDL__INLINE bool spdl__cas##suffix(type *p, type *expected, type desired) {                   \
        return __atomic_compare_exchange_n((word *)(void *)p, expected, desired, false,            \
                                           __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);                    \
    }                                                                                              \
    /* for claims whose order is carried by something else */                                      \
    SPDL__INLINE bool spdl__cas_relaxed##suffix(type *p, type *expected, type desired) {           \
        return __atomic_compare_exchange_n((word *)(void *)p, expected, desired, false,            \
                                           __ATOMIC_RELAXED, __ATOMIC_RELAXED);                    \
    }
SPDL__ATOMICS(uint32_t, uint32_t, 32)
SPDL__ATOMICS(uint64_t, spdl__word64, )
#undef SPDL__ATOMICS

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
   The operating system, as the 25 functions below. No other section calls one, and only twins have
   an #if for one. Each kind of system is a twin, a section that defines these functions: >>os-none
   is C alone, >>os-posix is Linux and other POSIX systems, SPDL_OS_HEADER is a file of yours.

   Any thread may call any of them at any time. Pointers are not NULL unless it says so. Times are
   nanoseconds. A `const char *` that is returned says why the call failed, until the thread's next
   call; NULL is success. Nothing blocks unless it says so, and files for as long as a disk takes.

   A twin also defines
       struct spdl__os_event   with `word` in it, of 32 bits
       struct spdl__os_thread  with `refused` in it
       SPDL__OS_BARRIER        0 where spdl__os_barrier is always false
       SPDL__OS_NO_THREAD      "", or what to say of a thread where there is never one
       SPDL__NO_SLEEP          1 where every sleep ends at once */

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
    SPDL__OS_APPEND   /* to write at the end */
} spdl__os_access;

static const char spdl__os_in_use[] = "it is in use"; /* of NEW: this very pointer */

/* --- time and waits --- */

/* A monotonic time with any origin, the same for all threads; or that since 1970. */
SPDL__PRIVATE uint64_t spdl__os_clock_ns(spdl__os_clock which);
/* A full barrier in every thread of this process, some time before it returns: then all others need
   only keep their compiler from reordering. False, and nothing done, where there is no such thing:
   that never changes for a process. Takes some microseconds. */
SPDL__PRIVATE bool spdl__os_barrier(void);
/* An event has a word that threads wait for. False: no memory. fini: nobody sleeps on it. */
SPDL__PRIVATE bool spdl__os_event_init(spdl__os_event *event);
SPDL__PRIVATE void spdl__os_event_fini(spdl__os_event *event);
/* Blocks while event->word is `word`, until the deadline on the monotonic clock: SPDL_TIMEOUT then;
   SPDL_OK may be spurious. */
SPDL__PRIVATE spdl_result spdl__os_event_sleep(spdl__os_event *event, uint32_t word,
                                               uint64_t deadline);
/* Adds 1 to event->word, with release, and wakes up to `count` sleepers. A thread that read the
   word before and sleeps afterwards does not miss it. */
SPDL__PRIVATE void spdl__os_event_wake(spdl__os_event *event, int count);

/* --- threads --- */

/* Runs entry(arg) in a new thread. The name is shown as far as the system does; policy may be NULL,
   and has to stay until entry begins; stack_bytes 0 is the usual stack. The thread handles no
   signals but faults. Before entry, thread->refused says whether the system refused the policy.
   *thread stays in place until join. False: no thread. */
SPDL__PRIVATE bool spdl__os_thread_start(spdl__os_thread *thread, const char *name,
                                         const spdl_policy *policy, size_t stack_bytes,
                                         void *(*entry)(void *), void *arg);
/* Blocks until the thread has ended. detach: nobody waits; it may free *thread before it ends. */
SPDL__PRIVATE void spdl__os_thread_join(spdl__os_thread *thread);
SPDL__PRIVATE void spdl__os_thread_detach(spdl__os_thread *thread);
/* A number for the calling thread that no other one has now; not 0. Takes some nanoseconds. */
SPDL__PRIVATE uint64_t spdl__os_thread_id(void);
/* The processor time of this thread, and how long it was ready to run while others had the
   processors; SPDL__NEVER: unknown. Either pointer may be NULL. *file keeps what is open between
   calls of the same thread, SPDL__NO_FILE at first; or NULL. Takes some microseconds. */
SPDL__PRIVATE void spdl__os_thread_times(spdl__os_file *file, uint64_t *cpu_ns,
                                         uint64_t *queued_ns);
/* Gives the processor away for a moment. */
SPDL__PRIVATE void spdl__os_yield(void);

/* --- the process --- */

/* Its number. */
SPDL__PRIVATE uint64_t spdl__os_process_id(void);
/* spdl__process_read (>>stats), *stats being zeros; without `whole` only the time and what was used,
   by the process and by others, in a tenth of the 100 microseconds. */
SPDL__PRIVATE void spdl__os_process_read(spdl__process_stats *stats, bool whole);
/* An environment variable; NULL when it is empty, not there, or set by a user with fewer rights. */
SPDL__PRIVATE const char *spdl__os_environment(const char *name);
/* Writes to stderr. Blocks up to patience_ns for each piece; if it is not taken by then it is left
   out with all that follows, which is no failure. */
SPDL__PRIVATE const char *spdl__os_stderr_write(const char *text, size_t bytes,
                                                int64_t patience_ns);

/* --- files --- */

/* Opens a file; all but READ make it. The last two may also open a pipe or a device: it is not
   waited for. The path is UTF-8 where the system has an opinion.
   *bytes: how long it is, 0 for a pipe or a device; or NULL. */
SPDL__PRIVATE const char *spdl__os_file_open(spdl__os_file *file, const char *path,
                                             spdl__os_access access, uint64_t *bytes);
/* What could not be written may be known only now. Does nothing with SPDL__NO_FILE. */
SPDL__PRIVATE const char *spdl__os_file_close(spdl__os_file file);
/* What is at a path: a folder, or a plain file of so many bytes. */
SPDL__PRIVATE const char *spdl__os_file_look(const char *path, uint64_t *bytes, bool *folder);
/* Calls each(ctx, name) for what is in a folder, in any order, until it returns false. */
SPDL__PRIVATE const char *spdl__os_folder_read(const char *path,
                                               bool (*each)(void *ctx, const char *name),
                                               void *ctx);
/* Reads `bytes` bytes at a place; *have: how many there were, all of them on success. */
SPDL__PRIVATE const char *spdl__os_file_read(spdl__os_file file, void *to, size_t bytes,
                                             uint64_t at, size_t *have);
/* Writes at a place, or after what was written last: SPDL__NEVER. */
SPDL__PRIVATE const char *spdl__os_file_write(spdl__os_file file, const void *from, size_t bytes,
                                              uint64_t at);
/* The file in memory, to read, or `own`: also to change, unseen by others. NULL: that cannot be. It
   may be closed meanwhile. */
SPDL__PRIVATE const uint8_t *spdl__os_file_map(spdl__os_file file, uint64_t bytes, bool own);
SPDL__PRIVATE void spdl__os_file_unmap(const uint8_t *memory, uint64_t bytes);
/* Asks for large pages for memory that will be filled: its first use takes a third of the time. */
SPDL__PRIVATE void spdl__os_huge_pages(void *memory, size_t bytes);
/* The open file at `from` takes the place of `to`, in one step where the system can; with sync not
   before its bytes are safe. */
SPDL__PRIVATE const char *spdl__os_file_commit(spdl__os_file file, const char *from, const char *to,
                                               bool sync);

/* ============================================================================================= */
/* >>os-none
   No system at all, only C: for SPDL_NO_THREADS, as in wasm without threads and on boards. There is
   no other thread that could end a sleep, so each times out at once. Files are those of <stdio.h>:
   as long as a long counts, not mapped, never in use by others, and one that is claimed is emptied
   at once. Another twin can begin with a copy of this. */

#if defined(SPDL_NO_THREADS) && !defined(SPDL_OS_HEADER)

#include <limits.h>
#include <time.h>

#define SPDL__OS_BARRIER 0
#define SPDL__OS_NO_THREAD ": there are none with SPDL_NO_THREADS"
#define SPDL__NO_SLEEP 1

struct spdl__os_event {
    uint32_t word;
};

struct spdl__os_thread {
    bool refused;
};

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

SPDL__PRIVATE bool spdl__os_barrier(void) { return false; }

SPDL__PRIVATE bool spdl__os_event_init(spdl__os_event *event) {
    event->word = 0;
    return true;
}
SPDL__PRIVATE void spdl__os_event_fini(spdl__os_event *event) { (void)event; }

SPDL__PRIVATE spdl_result spdl__os_event_sleep(spdl__os_event *event, uint32_t word,
                                               uint64_t deadline) {
    (void)deadline;
    return event->word != word ? SPDL_OK : SPDL_TIMEOUT;
}

SPDL__PRIVATE void spdl__os_event_wake(spdl__os_event *event, int count) {
    (void)count;
    ++event->word;
}

SPDL__PRIVATE bool spdl__os_thread_start(spdl__os_thread *thread, const char *name,
                                         const spdl_policy *policy, size_t stack_bytes,
                                         void *(*entry)(void *), void *arg) {
    (void)thread, (void)name, (void)policy, (void)stack_bytes, (void)entry, (void)arg;
    return false;
}
SPDL__PRIVATE void spdl__os_thread_join(spdl__os_thread *thread) { (void)thread; }
SPDL__PRIVATE void spdl__os_thread_detach(spdl__os_thread *thread) { (void)thread; }
SPDL__PRIVATE uint64_t spdl__os_thread_id(void) { return 1; }
SPDL__PRIVATE void spdl__os_yield(void) {}

SPDL__PRIVATE void spdl__os_thread_times(spdl__os_file *file, uint64_t *cpu_ns,
                                         uint64_t *queued_ns) {
    (void)file;
    if (cpu_ns != NULL) *cpu_ns = SPDL__NEVER;
    if (queued_ns != NULL) *queued_ns = SPDL__NEVER;
}

SPDL__PRIVATE uint64_t spdl__os_process_id(void) { return 1; }

SPDL__PRIVATE void spdl__os_process_read(spdl__process_stats *stats, bool whole) {
    (void)whole;
    stats->time_ns = stats->cpu_ns = spdl__os_clock_ns(SPDL__OS_MONOTONIC);
    stats->cores_allowed = stats->cores = 1;
}

SPDL__PRIVATE const char *spdl__os_environment(const char *name) {
    const char *value = getenv(name);
    return value != NULL && *value != '\0' ? value : NULL;
}

SPDL__PRIVATE const char *spdl__os_stderr_write(const char *text, size_t bytes,
                                                int64_t patience_ns) {
    (void)patience_ns;
    return fwrite(text, 1, bytes, stderr) == bytes ? NULL : "it takes no more";
}

SPDL__PRIVATE FILE *spdl__os_file_stream(spdl__os_file file) { return (FILE *)file; }

SPDL__PRIVATE const char *spdl__os_file_close(spdl__os_file file) {
    if (file == SPDL__NO_FILE || fclose(spdl__os_file_stream(file)) == 0) return NULL;
    return "it could not be written";
}

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

SPDL__PRIVATE const char *spdl__os_file_look(const char *path, uint64_t *bytes, bool *folder) {
    spdl__os_file file;
    const char *reason = spdl__os_file_open(&file, path, SPDL__OS_READ, bytes);
    *folder = false;
    return reason == NULL ? spdl__os_file_close(file) : reason;
}

SPDL__PRIVATE const char *spdl__os_folder_read(const char *path,
                                               bool (*each)(void *ctx, const char *name),
                                               void *ctx) {
    (void)path, (void)each, (void)ctx;
    return "there are no folders with SPDL_NO_THREADS";
}

SPDL__PRIVATE bool spdl__os_file_seek(FILE *stream, uint64_t at) {
    return at <= (uint64_t)LONG_MAX && fseek(stream, (long)at, SEEK_SET) == 0;
}

SPDL__PRIVATE const char *spdl__os_file_read(spdl__os_file file, void *to, size_t bytes,
                                             uint64_t at, size_t *have) {
    FILE *stream = spdl__os_file_stream(file);
    *have = 0;
    if (!spdl__os_file_seek(stream, at)) return "there is no such place";
    *have = fread(to, 1, bytes, stream);
    if (*have == bytes) return NULL;
    return ferror(stream) ? "it could not be read" : "it ended while it was read";
}

SPDL__PRIVATE const char *spdl__os_file_write(spdl__os_file file, const void *from, size_t bytes,
                                              uint64_t at) {
    FILE *stream = spdl__os_file_stream(file);
    if (at != SPDL__NEVER && !spdl__os_file_seek(stream, at)) return "there is no such place";
    if (fwrite(from, 1, bytes, stream) == bytes && fflush(stream) == 0) return NULL;
    return "it could not be written";
}

SPDL__PRIVATE const uint8_t *spdl__os_file_map(spdl__os_file file, uint64_t bytes, bool own) {
    (void)file, (void)bytes, (void)own;
    return NULL;
}

SPDL__PRIVATE void spdl__os_file_unmap(const uint8_t *memory, uint64_t bytes) {
    (void)memory, (void)bytes;
}

SPDL__PRIVATE void spdl__os_huge_pages(void *memory, size_t bytes) { (void)memory, (void)bytes; }

/* In C a name that is taken may be refused: then it is given free first. */
SPDL__PRIVATE const char *spdl__os_file_commit(spdl__os_file file, const char *from, const char *to,
                                               bool sync) {
    (void)sync;
    if (fflush(spdl__os_file_stream(file)) != 0) return "it could not be written";
    if (rename(from, to) == 0 || (remove(to) == 0 && rename(from, to) == 0)) return NULL;
    return "it could not be renamed";
}
#endif

/* ============================================================================================= */
/* >>os-posix
   POSIX. One block has what Linux does in its own way: futexes, membarrier, priorities of threads,
   what /proc and the cgroups say. The next block takes its place on other systems. A file that
   SPDL_OS_HEADER names is the twin instead, and included here. */

#if defined(SPDL_OS_HEADER)
#include SPDL_OS_HEADER
#elif defined(SPDL_NO_THREADS) /* the section before */
#elif !defined(__unix__) && !defined(__unix) && !defined(__APPLE__)
#error "spdl.h: not a POSIX system: SPDL_NO_THREADS, or SPDL_OS_HEADER, a file with what >>os says"
#else

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
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
#if defined(O_NOFOLLOW)
#define SPDL__O_NOFOLLOW O_NOFOLLOW
#elif defined(__arm__) || defined(__aarch64__) || defined(__powerpc__)
#define SPDL__O_NOFOLLOW 0100000
#else
#define SPDL__O_NOFOLLOW 0400000
#endif
#else
#define SPDL__O_NOFOLLOW O_NOFOLLOW
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
    bool refused;
};

#if SPDL__LINUX
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
};

SPDL__PRIVATE bool spdl__os_event_init(spdl__os_event *event) {
    event->word = 0;
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
   own threads. Faults stay (of a sandbox, too: SYS), and so do profilers and what libc keeps for
   itself (32 to 34). */
SPDL__PRIVATE void spdl__os_signals_block(spdl__os_signals *old) {
    /* all but ILL, TRAP, ABRT, BUS, FPE; SEGV; PROF; SYS, 32, 33 and 34 */
    const spdl__os_signals set = ~(0x1full << 3 | 1ull << 10 | 1ull << 26 | 0xfull << 30);
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

/* Of the calling thread: priorities are per thread on Linux. `polite`: SCHED_BATCH and nice 10. */
SPDL__PRIVATE bool spdl__os_thread_set_policy(const spdl_policy *policy) {
    const bool batch = policy->sched == SPDL_SCHED_BATCH || policy->polite;
    const int nice = policy->polite && policy->nice == 0 ? 10 : policy->nice, priority = 0;
    const long sched = policy->sched == SPDL_SCHED_IDLE ? 5 : batch ? 3 : 0;
    return spdl__os_thread_set_cpus(policy->cpus, policy->cpu_count) &&
           (sched == 0 || syscall(SYS_sched_setscheduler, 0L, sched, &priority) == 0) &&
           (nice == 0 || syscall(SYS_setpriority, 0L, 0L, (long)nice) == 0);
}

/* Shows 15 characters of the name. */
SPDL__PRIVATE void spdl__os_thread_begins(spdl__os_thread *thread) {
    const long pr_set_name = 15;
    (void)syscall(SYS_prctl, pr_set_name, thread->name, 0L, 0L, 0L);
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
SPDL__PRIVATE void spdl__os_thread_times(spdl__os_file *file, uint64_t *cpu_ns,
                                         uint64_t *queued_ns) {
    const int thread_clock = 3;
    char text[64], *at;
    if (cpu_ns != NULL) *cpu_ns = spdl__os_clock_read(thread_clock);
    if (queued_ns == NULL) return;
    *queued_ns = SPDL__NEVER;
    if (spdl__os_text(file, "/proc/thread-self/schedstat", text, sizeof(text)) == 0) return;
    (void)strtoull(text, &at, 10);
    *queued_ns = strtoull(at, NULL, 10);
}

/* A field of the process's stat, from the third on; the second one is a name in brackets. */
SPDL__PRIVATE uint64_t spdl__os_process_field(int wanted) {
    char stat[1024], *at;
    int field;
    (void)spdl__os_text(NULL, "/proc/self/stat", stat, sizeof(stat));
    at = strrchr(stat, ')');
    for (field = 2; at != NULL && field < wanted; ++field) at = strchr(at + 1, ' ');
    return at != NULL ? strtoull(at, NULL, 10) : 0;
}

/* Lowers *most to the cores that the quota of the cgroup in folder `at` allows. Version 2 has
   "quota period" or "max period" in one file, version 1 two files, and -1 for no quota. */
SPDL__PRIVATE void spdl__os_quota_at(const char *at, void *most) {
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
    if (quota > 0 && period > 0 && quota / period < *(double *)most)
        *(double *)most = quota / period;
}

/* Calls look(folder, data) for the cgroups of the process and all above them, as each may have a
   limit. `self` has lines "number:controllers:path", and no controllers in version 2. Inside of a
   container the path may be one of the host: the way up ends at the container's own root. */
SPDL__PRIVATE void spdl__os_cgroups(const char *root, const char *self, const char *controller,
                                    void (*look)(const char *at, void *data), void *data) {
    char text[2048], at[576], *line = text, *next;
    (void)spdl__os_text(NULL, self, text, sizeof(text));
    for (; *line != '\0'; line = next) {
        char *names = strchr(line, ':'), *path = names ? strchr(names + 1, ':') : NULL;
        const size_t length = strcspn(line, "\n");
        next = line + length + (line[length] == '\n');
        line[length] = '\0';
        if (path == NULL || path > line + length) continue;
        *path++ = '\0';
        if (*++names != '\0' && strstr(names, controller) == NULL) continue;
        for (;;) {
            char *slash = strrchr(path, '/');
            (void)snprintf(at, sizeof(at), "%.200s%s%.100s%.250s", root, *names ? "/" : "", names,
                           path);
            look(at, data);
            if (slash == NULL) break;
            *slash = '\0';
        }
    }
}

SPDL__PRIVATE double spdl__os_quota(const char *root, const char *self, double most) {
    spdl__os_cgroups(root, self, "cpu", spdl__os_quota_at, &most);
    return most;
}

/* For how long the cores were busy, all together: "cpu  user nice system idle iowait irq softirq
   steal ..." without the fourth and fifth column. */
SPDL__PRIVATE uint64_t spdl__os_machine_busy(void) {
    const long tick = sysconf(_SC_CLK_TCK);
    char text[256], *at = text + 4;
    uint64_t sum = 0;
    int column;
    (void)spdl__os_text(NULL, "/proc/stat", text, sizeof(text));
    if (strncmp(text, "cpu ", 4) != 0) return 0;
    for (column = 0; column < 8; ++column) {
        const uint64_t ticks = strtoull(at, &at, 10);
        if (column != 3 && column != 4) sum += ticks;
    }
    return sum * (1000000000u / (uint64_t)(tick > 0 ? tick : 100));
}

/* What POSIX does not know. */
SPDL__PRIVATE void spdl__os_process_more(spdl__process_stats *stats, bool whole) {
    uint64_t mask[SPDL__CPUS_MAX / 64];
    const uint64_t busy = spdl__os_machine_busy();
    char statm[128], *resident;
    int cores = 0;
    long i, bytes;
    stats->others_ns = busy > stats->cpu_ns ? busy - stats->cpu_ns : 0;
    if (!whole) return;
    bytes = syscall(SYS_sched_getaffinity, 0L, (long)sizeof(mask), mask);
    for (i = 0; i < bytes / 8; ++i)
        for (; mask[i] != 0; mask[i] &= mask[i] - 1) ++cores;
    stats->cores_allowed = spdl__os_quota("/sys/fs/cgroup", "/proc/self/cgroup",
                                          cores > 0 ? cores : stats->cores_allowed);
    if (spdl__os_text(NULL, "/proc/self/statm", statm, sizeof(statm)) == 0) return;
    (void)strtoull(statm, &resident, 10);
    stats->resident_bytes = strtoull(resident, NULL, 10) * (uint64_t)sysconf(_SC_PAGESIZE);
}

#else /* not Linux */
#if defined(__APPLE__)
#include <pthread/qos.h>
#endif
#define SPDL__OS_BARRIER 0

SPDL__PRIVATE bool spdl__os_barrier(void) { return false; }

struct spdl__os_event {
    uint32_t word;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
};

SPDL__PRIVATE bool spdl__os_event_init(spdl__os_event *event) {
    pthread_condattr_t attributes;
    bool made;
    event->word = 0;
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
    const int keep[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS,
                         SIGPROF };
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

SPDL__PRIVATE void spdl__os_thread_times(spdl__os_file *file, uint64_t *cpu_ns,
                                         uint64_t *queued_ns) {
    (void)file;
    if (queued_ns != NULL) *queued_ns = SPDL__NEVER;
    if (cpu_ns != NULL) *cpu_ns = spdl__os_clock_read(CLOCK_THREAD_CPUTIME_ID);
}

SPDL__PRIVATE void spdl__os_process_more(spdl__process_stats *stats, bool whole) {
    (void)stats, (void)whole;
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

SPDL__PRIVATE uint64_t spdl__os_process_id(void) { return (uint64_t)getpid(); }

SPDL__PRIVATE const char *spdl__os_environment(const char *name) {
    const char *value = getuid() == geteuid() && getgid() == getegid() ? getenv(name) : NULL;
    return value != NULL && *value != '\0' ? value : NULL;
}

SPDL__PRIVATE void spdl__os_process_read(spdl__process_stats *stats, bool whole) {
    const long online = whole ? sysconf(_SC_NPROCESSORS_ONLN) : 0;
    struct rusage used;
    if (getrusage(RUSAGE_SELF, &used) == 0) {
        stats->cpu_ns = (uint64_t)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1000000000u +
                        (uint64_t)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1000u;
        stats->minor_faults = (uint64_t)used.ru_minflt;
        stats->major_faults = (uint64_t)used.ru_majflt;
    }
    stats->cores = online > 0 ? (int)online : whole;
    stats->cores_allowed = stats->cores;
    spdl__os_process_more(stats, whole);
    stats->time_ns = spdl__os_clock_ns(SPDL__OS_MONOTONIC);
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

SPDL__PRIVATE const char *spdl__os_file_look(const char *path, uint64_t *bytes, bool *folder) {
    struct stat status;
    if (stat(path, &status) != 0) return strerror(errno);
    *folder = S_ISDIR(status.st_mode);
    *bytes = *folder ? 0 : (uint64_t)status.st_size;
    return *folder || S_ISREG(status.st_mode) ? NULL : "a pipe or a device, not a file";
}

SPDL__PRIVATE const char *spdl__os_folder_read(const char *path,
                                               bool (*each)(void *ctx, const char *name),
                                               void *ctx) {
    DIR *folder = opendir(path);
    const struct dirent *entry;
    bool more = true;
    int error = errno;
    while (folder != NULL && more) {
        errno = 0;
        entry = readdir(folder);
        error = errno;
        if (entry == NULL) break;
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            more = each(ctx, entry->d_name);
    }
    if (folder != NULL) (void)closedir(folder);
    return more && error != 0 ? strerror(error) : NULL;
}

SPDL__PRIVATE const char *spdl__os_file_close(spdl__os_file file) {
    return file == SPDL__NO_FILE || close((int)file) == 0 ? NULL : strerror(errno);
}

SPDL__PRIVATE const char *spdl__os_file_open(spdl__os_file *file, const char *path,
                                             spdl__os_access access, uint64_t *bytes) {
    static const int how[] = { O_RDONLY, O_RDWR | O_CREAT | O_EXCL, O_WRONLY | O_CREAT | O_TRUNC,
                               O_WRONLY | O_CREAT | O_APPEND };
    const bool plain = access == SPDL__OS_REPLACE || access == SPDL__OS_APPEND;
    const char *reason;
    uint64_t length;
    if (bytes == NULL) bytes = &length;
    *file = spdl__os_file_own(
        open(path, how[access] | (plain ? SPDL__O_NOFOLLOW : 0) | O_NONBLOCK | O_NOCTTY |
                       SPDL__O_CLOEXEC, 0666));
    if (*file < 0 && plain && errno == ELOOP) return "it is a symbolic link";
    if (*file < 0) return errno == EEXIST ? spdl__os_in_use : strerror(errno);
    reason = spdl__os_file_length(*file, bytes);
    if (access != SPDL__OS_READ) reason = NULL;
    if (reason == NULL) return NULL;
    (void)close((int)*file);
    *file = SPDL__NO_FILE;
    return reason;
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

SPDL__PRIVATE const uint8_t *spdl__os_file_map(spdl__os_file file, uint64_t bytes, bool own) {
    void *memory = MAP_FAILED;
    if (bytes > 0 && bytes <= SIZE_MAX)
        memory = mmap(NULL, (size_t)bytes, own ? PROT_READ | PROT_WRITE : PROT_READ,
                      own ? MAP_PRIVATE : MAP_SHARED, (int)file, 0);
    return memory != MAP_FAILED ? (const uint8_t *)memory : NULL;
}

SPDL__PRIVATE void spdl__os_file_unmap(const uint8_t *memory, uint64_t bytes) {
    if (memory != NULL) (void)munmap((void *)(uintptr_t)memory, (size_t)bytes);
}

SPDL__PRIVATE void spdl__os_huge_pages(void *memory, size_t bytes) {
#if SPDL__LINUX
    const uintptr_t first = ((uintptr_t)memory + 4095) & ~(uintptr_t)4095;
    const uintptr_t end = (uintptr_t)memory + bytes;
    if (first < end) (void)syscall(SYS_madvise, first, end - first, 14L);
#else
    (void)memory, (void)bytes;
#endif
}

SPDL__PRIVATE const char *spdl__os_file_commit(spdl__os_file file, const char *from, const char *to,
                                               bool sync) {
    if (sync && fsync((int)file) != 0) return strerror(errno);
    return rename(from, to) == 0 ? NULL : strerror(errno);
}

/* --- stderr --- */

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
/* >>os-process
   Processes and the memory they share, for >>loader-impl alone: Linux. Where there are none
   SPDL__OS_PROCESSES is 0. A process is known by its id; a text that is returned says why not, as
   in >>os, and what is open then is the caller's. */

#if SPDL__LINUX
#define SPDL__OS_PROCESSES 1
#define SPDL__OS_PAGE 4096
#ifndef SPDL_FORK
#define SPDL_FORK fork
#endif

/* Blocks while *word is `was`, in whatever process it is changed, until the deadline. */
SPDL__PRIVATE void spdl__os_shared_sleep(uint32_t *word, uint32_t was, uint64_t deadline) {
    const long wait_bitset = 9;
    struct {
        long seconds, nanoseconds;
    } at;
    at.seconds = (long)(deadline / 1000000000u);
    at.nanoseconds = (long)(deadline % 1000000000u);
    (void)syscall(SYS_futex, word, wait_bitset, (long)was, deadline == SPDL__NEVER ? NULL : &at,
                  NULL, 0xffffffffL);
}

/* Changes the word, and wakes all who sleep there. */
SPDL__PRIVATE void spdl__os_shared_wake(uint32_t *word) {
    spdl__add32(word, 1);
    (void)syscall(SYS_futex, word, 1L, 0x7fffffffL, NULL, NULL, 0L);
}

SPDL__PRIVATE uint64_t spdl__os_threads(void) { return spdl__os_process_field(20); }

/* --- memory --- */

/* What there may be of a kind of memory, and what is left of it. */
typedef struct spdl__os_room {
    const char *what;
    uint64_t limit, left;
} spdl__os_room;

SPDL__PRIVATE void spdl__os_room_least(spdl__os_room *room, const char *what, uint64_t limit,
                                       uint64_t used) {
    const uint64_t left = limit > used ? limit - used : 0;
    if (left >= room->left) return;
    room->what = what;
    room->limit = limit;
    room->left = left;
}

/* The number in a file, or SPDL__NEVER. */
SPDL__PRIVATE uint64_t spdl__os_number_at(const char *at, const char *file) {
    char path[640], text[64];
    (void)snprintf(path, sizeof(path), "%s/%s", at, file);
    if (spdl__os_text(NULL, path, text, sizeof(text)) == 0) return SPDL__NEVER;
    return text[0] >= '0' && text[0] <= '9' ? strtoull(text, NULL, 10) : SPDL__NEVER;
}

/* Of what a cgroup uses: copies of files, which go when there is need. */
SPDL__PRIVATE uint64_t spdl__os_idle_files(const char *at) {
    char path[640], text[8192];
    const char *found;
    (void)snprintf(path, sizeof(path), "%s/memory.stat", at);
    (void)spdl__os_text(NULL, path, text, sizeof(text));
    found = strstr(text, "total_inactive_file "); /* version 1: with the cgroups below */
    if (found == NULL) found = strstr(text, "inactive_file ");
    return found != NULL ? strtoull(strchr(found, ' '), NULL, 10) : 0;
}

SPDL__PRIVATE void spdl__os_room_at(const char *at, void *data) {
    uint64_t limit = spdl__os_number_at(at, "memory.max");
    uint64_t used = spdl__os_number_at(at, "memory.current"), idle;
    if (limit == SPDL__NEVER) limit = spdl__os_number_at(at, "memory.limit_in_bytes");
    if (used == SPDL__NEVER) used = spdl__os_number_at(at, "memory.usage_in_bytes");
    if (limit == SPDL__NEVER || used == SPDL__NEVER) return;
    idle = spdl__os_idle_files(at);
    spdl__os_room_least((spdl__os_room *)data, "memory.max of the cgroup", limit,
                        used > idle ? used - idle : 0);
}

/* A line "name: number kB" of /proc/meminfo. */
SPDL__PRIVATE uint64_t spdl__os_meminfo(const char *text, const char *name) {
    const char *at = strstr(text, name);
    return at != NULL ? strtoull(at + strlen(name), NULL, 10) * 1024 : SPDL__NEVER;
}

/* The least of what the cgroups, this process and the machine leave. A file that grows beyond
   RLIMIT_FSIZE ends the process, so that is looked at before. */
SPDL__PRIVATE spdl__os_room spdl__os_room_in(const char *root, const char *self) {
    spdl__os_room room = { "no limit", SPDL__NEVER, SPDL__NEVER };
    char text[512];
    uint64_t total, left;
    struct rlimit size;
    spdl__os_cgroups(root, self, "memory", spdl__os_room_at, &room);
    if (getrlimit(RLIMIT_FSIZE, &size) == 0 && size.rlim_cur != RLIM_INFINITY)
        spdl__os_room_least(&room, "RLIMIT_FSIZE of the process", size.rlim_cur, 0);
    (void)spdl__os_text(NULL, "/proc/meminfo", text, sizeof(text));
    total = spdl__os_meminfo(text, "MemTotal:");
    left = spdl__os_meminfo(text, "MemAvailable:");
    if (left <= total) spdl__os_room_least(&room, "memory of the machine", total, total - left);
    return room;
}

SPDL__PRIVATE spdl__os_room spdl__os_memory_room(void) {
    return spdl__os_room_in("/sys/fs/cgroup", "/proc/self/cgroup");
}

/* A page that a child of a fork shares, or one that is zero there; or NULL. */
SPDL__PRIVATE void *spdl__os_page(bool shared) {
    const int anonymous = 0x20; /* C99 hides the name; elsewhere it fails */
    const long wipe_on_fork = 18;
    void *page = mmap(NULL, SPDL__OS_PAGE, PROT_READ | PROT_WRITE,
                      (shared ? MAP_SHARED : MAP_PRIVATE) | anonymous, -1, 0);
    if (page == MAP_FAILED) return NULL;
    if (shared || syscall(SYS_madvise, page, (long)SPDL__OS_PAGE, wipe_on_fork) == 0) return page;
    (void)munmap(page, SPDL__OS_PAGE);
    return NULL;
}

/* Memory without a name, of a size that nobody can change, and with all of its pages: none can be
   missing later. Huge pages come when a mapping is touched first; fallocate says what is missing
   then, and where there is a signal begins again where it was. */
SPDL__PRIVATE const char *spdl__os_shared_make(void **memory, uint64_t bytes) {
    const long cloexec_seals = 3, huge = 14, populate_write = 23, add_seals = 1033;
    const int shrink_grow_seal = 1 | 2 | 4;
    const int file = (int)spdl__os_file_own((int)syscall(SYS_memfd_create, "spdl", cloexec_seals));
    const char *reason = NULL;
    uint64_t at;
    *memory = MAP_FAILED;
    if (file < 0) return strerror(errno);
    if (ftruncate(file, (off_t)bytes) == 0)
        *memory = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (*memory == MAP_FAILED) {
        reason = strerror(errno);
        *memory = NULL;
    } else if (syscall(SYS_madvise, *memory, (long)bytes, huge) == 0) {
        (void)syscall(SYS_madvise, *memory, (long)bytes, populate_write);
    }
    while (reason == NULL && syscall(SYS_fallocate, (long)file, 0L, 0L, (long)bytes) != 0)
        if (errno != EINTR) reason = strerror(errno);
    if (reason == NULL && fcntl(file, (int)add_seals, shrink_grow_seal) != 0)
        reason = strerror(errno);
    (void)close(file); /* it stays mapped */
    if (reason == NULL && syscall(SYS_madvise, *memory, (long)bytes, populate_write) != 0)
        for (at = 0; at < bytes; at += SPDL__OS_PAGE) (void)((volatile char *)*memory)[at];
    return reason;
}

/* --- processes --- */

SPDL__PRIVATE const char *spdl__os_fork(int64_t *process) {
    *process = SPDL_FORK();
    return *process >= 0 ? NULL : strerror(errno);
}

/* A child gets a group of its own, with all that it starts. */
SPDL__PRIVATE void spdl__os_group_make(int64_t process) {
    (void)syscall(SYS_setpgid, (long)process, (long)process);
}

/* SIGKILL, or SIGCHLD, which ends a sleep in signal_wait. Of minus its number: to its group. */
SPDL__PRIVATE void spdl__os_process_signal(int64_t process, int number) {
    if (process > 1 || process < -1) (void)syscall(SYS_kill, (long)process, (long)number);
}

/* Does nothing, unlike SIG_IGN, which programs that this process starts would inherit. Where the
   language is C alone a signal takes its handler off. */
SPDL__PRIVATE void spdl__os_signal_nothing(int number) {
    (void)signal(number, spdl__os_signal_nothing);
}

#ifdef __GLIBC__
#ifndef __cplusplus /* there they are declared */
extern int on_exit(void (*fn)(int code, void *data), void *data);
extern int ftrylockfile(FILE *file);
extern void funlockfile(FILE *file);
#endif
/* What the program wants done at its end is for the process that it began in. Other threads run on,
   and may have a FILE for ever. */
SPDL__PRIVATE void spdl__os_exit_now(int code, void *data) {
    FILE *const files[] = { stdout, stderr };
    size_t i;
    (void)data;
    for (i = 0; i < 2; ++i) {
        if (ftrylockfile(files[i]) != 0) continue;
        (void)fflush(files[i]);
        funlockfile(files[i]);
    }
    _exit(code);
}
SPDL__PRIVATE bool spdl__os_exit_early(void) { return on_exit(spdl__os_exit_now, NULL) == 0; }
#else /* no way to be told the code */
SPDL__PRIVATE void spdl__os_exit_now(void) { _exit(0); }
SPDL__PRIVATE bool spdl__os_exit_early(void) { return atexit(spdl__os_exit_now) == 0; }
#endif

/* In a new process, that `parent` has made: the end of the parent ends it, or wakes it if it is the
   supervisor, which blocks all signals; *signals are those that were blocked before. Signals of a
   terminal are for the program, with which the child ends; it has a group of its own, as programs
   that it starts. Why not, or NULL. */
SPDL__PRIVATE const char *spdl__os_process_begins(int64_t parent, const char *name, bool supervisor,
                                                  spdl__os_signals *signals) {
    static const int ours[] = { SIGINT, SIGQUIT, SIGTERM, SIGHUP, SIGPIPE };
    const spdl__os_signals all = ~(spdl__os_signals)0;
    const long set_parent_signal = 1, set_name = 15;
    size_t i;
    (void)signal(SIGCHLD, SIG_DFL);
    for (i = 0; i < sizeof(ours) / sizeof(ours[0]) && !supervisor; ++i)
        (void)signal(ours[i], spdl__os_signal_nothing);
    if (supervisor) spdl__os_signals_set(&all, signals);
    else spdl__os_signals_set(signals, NULL);
    if (!supervisor) spdl__os_group_make(0);
    (void)syscall(SYS_prctl, set_name, name, 0L, 0L, 0L);
    if (syscall(SYS_prctl, set_parent_signal, supervisor ? (long)SIGCHLD : (long)SIGKILL, 0L, 0L,
                0L) != 0 || (!supervisor && !spdl__os_exit_early()))
        return "it cannot be told of the end of its parent";
    return getppid() == (pid_t)parent ? NULL : "its parent has ended";
}

/* Sleeps until a child or the parent has ended, or somebody has sent SIGCHLD, or a while. */
SPDL__PRIVATE void spdl__os_signal_wait(uint64_t ns) {
    const spdl__os_signals child = (uint64_t)1 << (SIGCHLD - 1);
    struct {
        long seconds, nanoseconds;
    } most;
    most.seconds = (long)(ns / 1000000000u);
    most.nanoseconds = (long)(ns % 1000000000u);
    (void)syscall(SYS_rt_sigtimedwait, &child, NULL, &most, (long)sizeof(child));
}

/* Whether a child has ended: 1 if so, 0, or -1: it runs, and cannot be waited for. *end: with which
   code, or minus the signal that killed it; 0, too, when somebody else has waited for it. */
SPDL__PRIVATE int spdl__os_process_ended(int64_t process, int *end) {
    int status = 0;
    long got;
    if (process <= 0) return 1;
    do got = syscall(SYS_wait4, (long)process, &status, 1L, NULL);
    while (got < 0 && errno == EINTR);
    *end = (status & 0x7f) != 0 ? -(status & 0x7f) : status >> 8 & 0xff;
    if (got >= 0) return got > 0;
    return syscall(SYS_kill, (long)process, 0L) != 0 ? 1 : -1;
}

SPDL__PRIVATE int64_t spdl__os_parent(void) { return getppid(); }

/* A variable of the environment is gone. */
extern char **environ;
SPDL__PRIVATE void spdl__os_forget(const char *name) {
    const size_t length = strlen(name);
    char **at = environ;
    while (at != NULL && *at != NULL && (strncmp(*at, name, length) != 0 || (*at)[length] != '='))
        ++at;
    for (; at != NULL && *at != NULL; ++at) at[0] = at[1];
}

SPDL__PRIVATE const char *spdl__os_signal_name(int number) {
    static const struct {
        int number;
        const char *name;
    } names[] = { { SIGHUP, "SIGHUP" },   { SIGINT, "SIGINT" },   { SIGQUIT, "SIGQUIT" },
                  { SIGILL, "SIGILL" },   { SIGABRT, "SIGABRT" }, { SIGFPE, "SIGFPE" },
                  { SIGKILL, "SIGKILL" }, { SIGSEGV, "SIGSEGV" }, { SIGPIPE, "SIGPIPE" },
                  { SIGALRM, "SIGALRM" }, { SIGTERM, "SIGTERM" }, { SIGBUS, "SIGBUS" },
                  { SIGTRAP, "SIGTRAP" }, { SIGXCPU, "SIGXCPU" }, { SIGSYS, "SIGSYS" } };
    size_t i;
    for (i = 0; i < sizeof(names) / sizeof(names[0]); ++i)
        if (names[i].number == number) return names[i].name;
    return "a signal";
}

/* --- faults: which thread it was --- */

#ifdef SA_ONSTACK
#define SPDL__OS_STACK_BYTES 65536
#define SPDL__OS_STACK_OURS 0x7370646c20737461u

/* The first words of a stack of ours. */
typedef struct spdl__os_stack {
    uint64_t ours; /* a thread may have put one of others' in its place */
    uint32_t *to, value;
} spdl__os_stack;

/* On the stack that the thread has for faults. */
SPDL__PRIVATE void spdl__os_fault(int number) {
    stack_t now;
    (void)signal(number, SIG_DFL);
    if (sigaltstack(NULL, &now) == 0 && (now.ss_flags & SS_DISABLE) == 0) {
        spdl__os_stack stack;
        uint32_t none = 0;
        memcpy(&stack, now.ss_sp, sizeof(stack));
        if (stack.ours == SPDL__OS_STACK_OURS) (void)spdl__cas32(stack.to, &none, stack.value);
    }
    (void)raise(number); /* comes when we return */
}

/* Faults whose action is the default one are noted, then take it. */
SPDL__PRIVATE void spdl__os_faults_watch(void) {
    static const int faults[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT };
    size_t i;
    for (i = 0; i < sizeof(faults) / sizeof(faults[0]); ++i) {
        struct sigaction action;
        if (sigaction(faults[i], NULL, &action) != 0 || action.sa_handler != SIG_DFL) continue;
        memset(&action, 0, sizeof(action));
        action.sa_handler = spdl__os_fault;
        action.sa_flags = SA_ONSTACK;
        (void)sigaction(faults[i], &action, NULL);
    }
}

/* This thread notes its faults as `value` in *to, on a stack of its own, unless it has one of
   others' for that. */
SPDL__PRIVATE void spdl__os_faults_note(uint32_t *to, uint32_t value) {
    stack_t now;
    spdl__os_stack *stack;
    if (sigaltstack(NULL, &now) != 0 || (now.ss_flags & SS_DISABLE) == 0) return;
    stack = (spdl__os_stack *)SPDL_MALLOC(SPDL__OS_STACK_BYTES);
    if (stack == NULL) return;
    stack->ours = SPDL__OS_STACK_OURS;
    stack->to = to;
    stack->value = value;
    memset(&now, 0, sizeof(now));
    now.ss_sp = stack;
    now.ss_size = SPDL__OS_STACK_BYTES;
    (void)sigaltstack(&now, NULL);
}
#else /* the C library hides what it takes: it is not known which call it was */
SPDL__PRIVATE void spdl__os_faults_watch(void) {}
SPDL__PRIVATE void spdl__os_faults_note(uint32_t *to, uint32_t value) { (void)to, (void)value; }
#endif
#else
#define SPDL__OS_PROCESSES 0
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
        SPDL__RESULT_LIST(SPDL__CASE)
#undef SPDL__CASE
    default: return spdl__unknown_result;
    }
}

SPDL__PRIVATE uint64_t spdl__min(uint64_t a, uint64_t b) { return a < b ? a : b; }
SPDL__PRIVATE uint64_t spdl__max(uint64_t a, uint64_t b) { return a > b ? a : b; }

SPDL_API uint64_t spdl_time_ns(void) { return spdl__os_clock_ns(SPDL__OS_MONOTONIC); }

SPDL_API void spdl__process_read(spdl__process_stats *stats) {
    memset(stats, 0, sizeof(*stats));
    spdl__os_process_read(stats, true);
}

/* When a wait that starts now has to end. */
SPDL__PRIVATE uint64_t spdl__deadline(int64_t timeout_ns) {
    return timeout_ns < 0 ? SPDL__NEVER : spdl_time_ns() + (uint64_t)timeout_ns;
}

SPDL__PRIVATE bool spdl__late(uint64_t deadline) {
    return deadline != SPDL__NEVER && spdl_time_ns() >= deadline;
}

/* Memory for `bytes`, aligned to 8 at least, as 64-bit words that are atomic must be on 32-bit
   processors, too; NULL when there is none. malloc knows no alignment: the start of its block is
   kept in front of what is handed out. */
SPDL__PRIVATE void *spdl__alloc(const spdl_allocator *allocator, size_t bytes, size_t align) {
    char *block;
    uintptr_t at;
    if (align < 8) align = 8;
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

/* The block of `count` elements, or a larger one in its place, with room for `more`; *room: how
   many it holds. NULL: no memory, and the block is as it was. */
SPDL__PRIVATE void *spdl__room_for(const spdl_allocator *allocator, void *block, size_t *room,
                                   size_t count, size_t more, size_t each) {
    const size_t wanted = (size_t)spdl__max(count + more, count * 2 + 64);
    void *made;
    if (more <= *room - count) return block;
    if (count > SIZE_MAX / 4 / each || more > SIZE_MAX / 4 / each) return NULL;
    made = spdl__alloc(allocator, wanted * each, 16);
    if (made == NULL) return NULL;
    if (count > 0) memcpy(made, block, count * each);
    spdl__free(allocator, block, *room * each);
    *room = wanted;
    return made;
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
                           "%s: set both functions of the allocator or none", what);
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

/* Little-endian numbers, at any alignment and on any host. */
SPDL__PRIVATE uint16_t spdl__le16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

SPDL__PRIVATE uint32_t spdl__le32(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

SPDL__INLINE uint64_t spdl__le64(const uint8_t *p) {
    uint64_t value;
    memcpy(&value, p, 8);
    return SPDL__BIG_ENDIAN ? __builtin_bswap64(value) : value;
}

/* Copies a name for a message: nothing in it can steer a terminal, and it does not fill it. */
SPDL__PRIVATE void spdl__printable(char *to, size_t bytes, const char *name) {
    size_t i, length = strlen(name);
    for (i = 0; i < length && i + 1 < bytes; i++)
        to[i] = (unsigned char)name[i] < 32 || name[i] == 127 ? '?' : name[i];
    to[i] = 0;
    if (i < length) memcpy(to + bytes - 4, "...", 3);
}

/* The same for the path of a file: a long one loses its head. */
SPDL__PRIVATE void spdl__label(char *to, size_t bytes, const char *path) {
    const size_t length = strlen(path);
    if (length >= bytes) path += length - (bytes - 1);
    spdl__printable(to, bytes, path);
    if (length >= bytes) memcpy(to, "...", 3);
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

/* A lock for what is short and rare. 0: free, 1: held, 2: held, and somebody may sleep. A thread
   that finds it held sleeps, so that a holder of low priority that was preempted inside gets a
   processor. Any number of locks may share the event `parked`.

   No wake-up is lost: a waiter reads parked->word, and then puts its 2. If the holder unlocks
   before that, the waiter finds 0 and has the lock. If it unlocks after that, it finds a 2 and adds
   to a word that the waiter has read already: the waiter does not sleep, or is woken. A waiter that
   gets the lock leaves 2 in it, as others may sleep: at most one wake too many. */
SPDL__PRIVATE void spdl__lock(uint32_t *lock, spdl__os_event *parked) {
    int round = 0;
    do {
        uint32_t open = 0;
        if (spdl__cas32(lock, &open, 1)) return;
    } while (spdl__backoff(&round, 0));
    for (;;) {
        const uint32_t word = spdl__load32(&parked->word); /* before the exchange, by its acquire */
        if (spdl__exchange32(lock, 2) == 0) return;
        (void)spdl__os_event_sleep(parked, word, SPDL__NEVER);
    }
}

SPDL__PRIVATE void spdl__unlock(uint32_t *lock, spdl__os_event *parked) {
    if (spdl__exchange32(lock, 0) == 2) spdl__os_event_wake(parked, SPDL__ALL);
}

/* No exchange: it could make a 1 of the 2 by which a thread that sleeps is known. */
SPDL__PRIVATE bool spdl__try_lock(uint32_t *lock) {
    uint32_t open = 0;
    if (spdl__load_relaxed32(lock) != 0) return false;
    SPDL_TEST_POINT("lock tried");
    return spdl__cas32(lock, &open, 1);
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

   Closing refuses every push that starts later, and lets pops drain every push that was accepted
   before one of them returns SPDL_CLOSED. In MPMC tail gets a mark, so that every later claim
   fails and tail is the end. In SPSC the producer closes, so that its tail is the end. Then CLOSED
   is set: a pop that sees it, looks at tail after that, and finds nothing before tail, is done.

   Each field says who writes it. Slots are handed over by their stamp or by the index. */

#define SPDL__RING_MARK ((uint64_t)1 << 63)
#define SPDL__RING_CLOSED 0x80000000u /* in pops_waiting, above the number of waiting pops */
#define SPDL__RING_WAITING 0x7fffffffu
#define SPDL__RING_AHEAD 64 /* items of credit, and how far ahead lines are fetched */
#define SPDL__RING_FETCHED (256 * 1024)

/* A slot of an MPMC ring of 8-byte items. */
typedef struct spdl__ring_cell {
    spdl__word64 stamp;
    uint64_t item;
} spdl__ring_cell;

typedef struct spdl__ring_core {
    /* written by create */
    spdl_ring_mode mode;
    bool asymmetric;
    bool quick;      /* items of 8 bytes and cheap barriers: the quick paths may be taken */
    bool quick_spsc; /* that of SPSC */
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
    spdl__word64 tail;
    char pad1[SPDL_CACHE_LINE];
    /* SPSC, the producer's own */
    uint64_t limit;     /* it may push up to here unasked; 0 in MPMC and after close */
    uint64_t head_seen; /* its copy of head */
    char pad2[SPDL_CACHE_LINE];
    /* written by consumers */
    spdl__word64 head;
    char pad3[SPDL_CACHE_LINE];
    /* SPSC, the consumer's own */
    uint64_t tail_seen; /* its copy of tail */
    char pad4[SPDL_CACHE_LINE];
    /* written by threads about to sleep, and by close */
    uint32_t pops_waiting;
    uint32_t pushes_waiting;
    char pad5[SPDL_CACHE_LINE];
} spdl__ring_core;

SPDL__PRIVATE unsigned char *spdl__ring_slot(const spdl__ring_core *ring, uint64_t at) {
    return ring->slots + (size_t)(at & ring->index_mask) * ring->stride;
}

/* With acquire: pairs with the store of CLOSED in close, which comes after the last tail. */
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

/* Producer. Fetches the lines of free slots for writing: they were last read by the other core.
   Rings that are larger than a cache near the core lose by it. */
SPDL__PREFETCHES
SPDL__NOINLINE void spdl__spsc_fetch(const spdl__ring_core *ring, uint64_t from, uint64_t to) {
    if (ring->index_mask * ring->stride > SPDL__RING_FETCHED) return;
    for (; from < to; from += ring->line_items) spdl__prefetch_write(spdl__ring_slot(ring, from));
}

/* Producer. After a push of one item the quick path may go on to `limit`: not beyond what is known
   to be free, nor beyond what was fetched. */
SPDL__PRIVATE spdl_result spdl__spsc_push_n(spdl__ring_core *ring, const void *items, uint64_t n,
                                            uint64_t *moved) {
    const uint64_t tail = spdl__load_relaxed(&ring->tail), ahead = SPDL__RING_AHEAD;
    const char *from = (const char *)items;
    uint64_t run, next;
    if (spdl__ring_closed(ring)) return SPDL_CLOSED;
    *moved = n = spdl__spsc_room(ring, tail, n);
    if (n == 0) return SPDL_FULL;
    run = spdl__spsc_run(ring, tail, n);
    memcpy(spdl__ring_slot(ring, tail), from, (size_t)run * ring->stride);
    if (run < n) memcpy(ring->slots, from + run * ring->stride, (size_t)(n - run) * ring->stride);
    next = tail + n;
    if (n > 1) {
        const uint64_t free_to = ring->head_seen + ring->capacity;
        spdl__spsc_fetch(ring, next + ahead, spdl__min(next + ahead + n, free_to));
    } else if (ring->quick) {
        const uint64_t room = spdl__spsc_room(ring, next, 2 * ahead);
        ring->limit = next + spdl__min(room, ahead);
        spdl__spsc_fetch(ring, next + ahead, next + room);
    }
    spdl__store(&ring->tail, next); /* pairs with its load in a pop: the items are there */
    return SPDL_OK;
}

/* Consumer. CLOSED is read before tail: the producer stores no tail after it. */
SPDL__PRIVATE spdl_result spdl__spsc_pop_n(spdl__ring_core *ring, void *items, uint64_t n,
                                           uint64_t *moved) {
    const uint64_t head = spdl__load_relaxed(&ring->head);
    char *to = (char *)items;
    bool closed = false;
    uint64_t run;
    if (ring->tail_seen - head < n) {
        closed = spdl__ring_closed(ring);
        ring->tail_seen = spdl__load(&ring->tail); /* pairs with its stores in pushes */
    }
    *moved = n = spdl__min(n, ring->tail_seen - head);
    if (n == 0) return closed ? SPDL_CLOSED : SPDL_EMPTY;
    run = spdl__spsc_run(ring, head, n);
    memcpy(to, spdl__ring_slot(ring, head), (size_t)run * ring->stride);
    if (run < n) memcpy(to + run * ring->stride, ring->slots, (size_t)(n - run) * ring->stride);
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

/* False: take the long way. True: done, and *waiting is what stands in pops_waiting: not 0 when
   there may be a thread to wake. An SPSC ring has a limit above tail, an MPMC ring has cells whose
   stamp may equal tail; neither has the other's. */
SPDL__INLINE bool spdl__ring_quick_push(spdl__ring_core *ring, const void *item,
                                         uint32_t *waiting) {
    uint64_t tail = spdl__load_relaxed(&ring->tail);
    if (__builtin_expect(tail < ring->limit, 1)) {
        memcpy(ring->slots + (tail & ring->index_mask) * sizeof(uint64_t), item, sizeof(uint64_t));
        SPDL_TEST_POINT("ring filled");
        spdl__store(&ring->tail, tail + 1); /* pairs with its load in a pop: the item is there */
    } else {
        spdl__ring_cell *cell = ring->cells + (tail & ring->cell_mask);
        /* pairs with the store of the stamp in a pop: the old item was read */
        if (spdl__load(&cell->stamp) != tail) return false;
        if (!spdl__cas_relaxed(&ring->tail, &tail, tail + 1)) return false;
        SPDL_TEST_POINT("ring claimed for push");
        memcpy(&cell->item, item, sizeof(uint64_t));
        spdl__store(&cell->stamp, tail + 1); /* pairs with its load in a pop: the item is there */
    }
    spdl__barrier_quick(); /* pairs with the heavy one of a sleeper */
    *waiting = spdl__load_relaxed32(&ring->pops_waiting);
    return true;
}

SPDL__INLINE bool spdl__ring_quick_pop(spdl__ring_core *ring, void *item, uint32_t *waiting) {
    uint64_t head = spdl__load_relaxed(&ring->head);
    if (__builtin_expect(ring->quick_spsc, 1)) {
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
    ring->quick = quick && item_bytes == sizeof(uint64_t);
}

/* First stamps, and which quick path there is. */
SPDL__PRIVATE void spdl__ring_core_start(spdl__ring_core *ring) {
    const bool stamped = ring->mode == SPDL_RING_MPMC, cells = stamped && ring->quick;
    uint64_t i;
    for (i = 0; stamped && i < ring->slot_count; ++i)
        *spdl__mpmc_stamp(ring, i) = i < ring->capacity ? i : UINT64_MAX;
    ring->no_cell.stamp = UINT64_MAX;
    ring->quick_spsc = ring->quick && !stamped;
    ring->cells = cells ? (spdl__ring_cell *)(void *)ring->slots : &ring->no_cell;
    ring->cell_mask = cells ? ring->index_mask : 0;
}

/* Everything that close does except waking. MPMC: any thread; SPSC: the producer. */
SPDL__PRIVATE void spdl__ring_core_close(spdl__ring_core *ring) {
    if (ring->mode == SPDL_RING_MPMC)
        (void)spdl__or(&ring->tail, SPDL__RING_MARK);
    else
        ring->limit = 0; /* its next push takes the long way */
    SPDL_TEST_POINT("ring about to be closed");
    (void)spdl__or32(&ring->pops_waiting, SPDL__RING_CLOSED); /* pairs with spdl__ring_closed */
}

/* Items inside. Claims are relaxed, so tail may be seen older than head: then none is. Acquires
   keep the three looks in order. */
SPDL__PRIVATE uint64_t spdl__ring_inside(const spdl__ring_core *ring) {
    const uint64_t lap = ring->index_mask + 1;
    uint64_t head, tail;
    do { /* a head that stood still around the tail */
        head = spdl__load(&ring->head);
        tail = spdl__load(&ring->tail) & ~SPDL__RING_MARK;
    } while (head != spdl__load(&ring->head));
    if (ring->mode == SPDL_RING_MPMC) {
        head = head / lap * ring->capacity + (head & ring->index_mask);
        tail = tail / lap * ring->capacity + (tail & ring->index_mask);
    }
    return spdl__min(spdl__max(tail, head) - head, ring->capacity);
}

/* ============================================================================================= */
/* >>ring-impl
   What is around the core: making, waiting, waking, the calls. A thread that is about to sleep says
   so in pops_waiting or pushes_waiting, does a heavy barrier and tries once more; a thread that has
   pushed or popped does a light barrier and looks there. One of the two sees the other. */

#define SPDL__RING_MAX_CAPACITY ((uint64_t)1 << 30)
#define SPDL__RING_MAX_ITEM 4096

/* The threads that wait on one side. */
typedef struct spdl__ring_side {
    uint32_t *waiting; /* how many, in the core; written by create */
    spdl__os_event event; /* written by the threads that wake them */
    uint32_t inside; /* SPDL_DEBUG: a thread is in a call; written by it */
} spdl__ring_side;

struct spdl_ring {
    spdl__ring_core core;
    spdl__ring_side pushes; /* wait for room */
    spdl__ring_side pops;   /* wait for items */
    spdl_allocator allocator; /* written by create */
};

/* A side of SPSC notices a second thread on it, in debug builds. (The quick paths do not look.) */
SPDL__INLINE bool spdl__ring_enter(const spdl_ring *ring, spdl__ring_side *side) {
    const bool entered = !SPDL__DEBUGS || ring->core.mode != SPDL_RING_SPSC ||
                         spdl__exchange32(&side->inside, 1) == 0;
    SPDL__ASSERT(entered && "two threads on a side of a ring that is for one");
    return entered;
}

SPDL__INLINE void spdl__ring_leave(spdl__ring_side *side) {
    if (SPDL__DEBUGS) spdl__store32(&side->inside, 0);
}

/* Wakes n of the threads that wait on a side. After a close the pops that sleep wait only for the
   pushes that were under way, and all of them for the last: then each of these wakes all. */
SPDL__NOINLINE void spdl__ring_wake(spdl__ring_side *side, uint64_t n) {
    const uint32_t waiting = spdl__load_relaxed32(side->waiting);
    n = spdl__min(n, waiting & SPDL__RING_WAITING);
    if (n == 0) return;
    spdl__os_event_wake(&side->event, waiting & SPDL__RING_CLOSED ? SPDL__ALL : (int)n);
}

/* n items or slots are there for threads that wait on a side. The barrier pairs with the heavy one
   in spdl__ring_sleep. */
SPDL__INLINE void spdl__ring_hint(spdl_ring *ring, spdl__ring_side *side, uint64_t n) {
    spdl__barrier_light(ring->core.asymmetric);
    if (spdl__load_relaxed32(side->waiting) != 0) spdl__ring_wake(side, n);
}

/* One attempt to push or pop up to n items; *moved says how many. Out of line, as all long ways
   are, so that the quick paths stay small. */
SPDL__NOINLINE spdl_result spdl__ring_try(spdl_ring *ring, bool push, void *items, uint64_t n,
                                          uint64_t *moved) {
    spdl__ring_core *core = &ring->core;
    spdl__ring_side *side = push ? &ring->pushes : &ring->pops;
    const bool spsc = core->mode == SPDL_RING_SPSC;
    spdl_result result;
    *moved = 0;
    if (n == 0) return SPDL_OK;
    if (!spdl__ring_enter(ring, side)) return SPDL_E_INVALID;
    if (push)
        result = spsc ? spdl__spsc_push_n(core, items, n, moved)
                      : spdl__mpmc_push_n(core, items, n, moved);
    else
        result = spsc ? spdl__spsc_pop_n(core, items, n, moved)
                      : spdl__mpmc_pop_n(core, items, n, moved);
    if (result == SPDL_OK) spdl__ring_hint(ring, push ? &ring->pops : &ring->pushes, *moved);
    spdl__ring_leave(side);
    return result;
}

SPDL_API spdl_result spdl__ring_try_push_n(spdl_ring *ring, const void *items, uint64_t n,
                                          uint64_t *moved) {
    return spdl__ring_try(ring, true, SPDL__UNCONST(items), n, moved);
}

SPDL_API spdl_result spdl__ring_try_pop_n(spdl_ring *ring, void *items, uint64_t n,
                                         uint64_t *moved) {
    return spdl__ring_try(ring, false, items, n, moved);
}

SPDL_API SPDL__HOT spdl_result spdl_ring_try_push(spdl_ring *ring, const void *item) {
    uint32_t waiting;
    uint64_t moved;
    if (!spdl__ring_quick_push(&ring->core, item, &waiting))
        return spdl__ring_try_push_n(ring, item, 1, &moved);
    if (SPDL__UNLIKELY(waiting != 0)) spdl__ring_wake(&ring->pops, 1);
    return SPDL_OK;
}

SPDL_API SPDL__HOT spdl_result spdl_ring_try_pop(spdl_ring *ring, void *item) {
    uint32_t waiting;
    uint64_t moved;
    if (!spdl__ring_quick_pop(&ring->core, item, &waiting))
        return spdl__ring_try_pop_n(ring, item, 1, &moved);
    if (SPDL__UNLIKELY(waiting != 0)) spdl__ring_wake(&ring->pushes, 1);
    return SPDL_OK;
}

/* --- calls that wait --- */

typedef struct spdl__ring_call {
    spdl_ring *ring;
    bool push;
    void *items; /* that a push reads, or a pop writes */
    uint64_t n;
    uint64_t moved; /* so far */
} spdl__ring_call;

/* SPDL_FULL: a push is not done; SPDL_EMPTY: a pop has nothing. */
SPDL__PRIVATE spdl_result spdl__ring_attempt(spdl__ring_call *call) {
    char *at = (char *)call->items + call->moved * call->ring->core.item_bytes;
    uint64_t moved;
    const spdl_result result = spdl__ring_try(call->ring, call->push, at, call->n - call->moved,
                                              &moved);
    call->moved += moved;
    return result == SPDL_OK && call->push && call->moved < call->n ? SPDL_FULL : result;
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
SPDL__PRIVATE spdl_result spdl__ring_sleep(spdl__ring_call *call, uint64_t deadline) {
    spdl__ring_side *side = call->push ? &call->ring->pushes : &call->ring->pops;
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
    spdl_result result = spdl__ring_attempt(call);
    uint64_t deadline, moved = call->moved;
    int round = 0;
    if (!spdl__ring_must_wait(result)) return result;
    if (timeout_ns == 0) return SPDL_TIMEOUT;
    deadline = spdl__deadline(timeout_ns);
    while (spdl__backoff(&round, SPDL_YIELDS)) {
        result = spdl__ring_attempt(call);
        if (!spdl__ring_must_wait(result)) return result;
        if ((call->moved != moved || round >= SPDL_SPINS) && spdl__late(deadline))
            return SPDL_TIMEOUT;
        if (call->moved != moved) round = 0;
        moved = call->moved;
    }
    return spdl__ring_sleep(call, deadline);
}

SPDL__NOINLINE spdl_result spdl__ring_many(spdl_ring *ring, bool push, void *items, uint64_t n,
                                           uint64_t *moved, int64_t timeout_ns) {
    spdl__ring_call call = { ring, push, items, n, 0 };
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
    return spdl__ring_many(ring, true, SPDL__UNCONST(items), n, moved, timeout_ns);
}

SPDL_API spdl_result spdl_ring_pop_n(spdl_ring *ring, void *items, uint64_t n, uint64_t *moved,
                                     int64_t timeout_ns) {
    return spdl__ring_many(ring, false, items, n, moved, timeout_ns);
}

SPDL_API SPDL__HOT spdl_result spdl_ring_push(spdl_ring *ring, const void *item,
                                              int64_t timeout_ns) {
    uint32_t waiting;
    uint64_t moved;
    if (ring == NULL || item == NULL) return SPDL_E_INVALID;
    if (!spdl__ring_quick_push(&ring->core, item, &waiting))
        return spdl_ring_push_n(ring, item, 1, &moved, timeout_ns);
    if (SPDL__UNLIKELY(waiting != 0)) spdl__ring_wake(&ring->pops, 1);
    return SPDL_OK;
}

SPDL_API SPDL__HOT spdl_result spdl_ring_pop(spdl_ring *ring, void *item, int64_t timeout_ns) {
    uint32_t waiting;
    uint64_t moved;
    if (ring == NULL || item == NULL) return SPDL_E_INVALID;
    if (!spdl__ring_quick_pop(&ring->core, item, &waiting))
        return spdl_ring_pop_n(ring, item, 1, &moved, timeout_ns);
    if (SPDL__UNLIKELY(waiting != 0)) spdl__ring_wake(&ring->pushes, 1);
    return SPDL_OK;
}

SPDL_API void spdl_ring_close(spdl_ring *ring) {
    if (!spdl__ring_enter(ring, &ring->pushes)) return;
    spdl__ring_core_close(&ring->core);
    spdl__ring_hint(ring, &ring->pops, SPDL__RING_WAITING);
    spdl__ring_hint(ring, &ring->pushes, SPDL__RING_WAITING);
    spdl__ring_leave(&ring->pushes);
}

SPDL_API uint64_t spdl_ring_count(const spdl_ring *ring) { return spdl__ring_inside(&ring->core); }

SPDL_API uint64_t spdl_ring_capacity(const spdl_ring *ring) { return ring->core.capacity; }

/* --- making and ending --- */

SPDL__PRIVATE spdl_result spdl__ring_check(const spdl_ring_desc *desc) {
    if (desc->capacity < 1 || desc->capacity > SPDL__RING_MAX_CAPACITY)
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "ring: capacity is %llu, must be 1 to %llu",
                               (spdl__llu)desc->capacity, (spdl__llu)SPDL__RING_MAX_CAPACITY);
    if (desc->item_bytes > SPDL__RING_MAX_ITEM)
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "ring: item_bytes is %llu, must be at most %d",
                               (spdl__llu)desc->item_bytes, SPDL__RING_MAX_ITEM);
    if (desc->mode != SPDL_RING_MPMC && desc->mode != SPDL_RING_SPSC)
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "ring: mode is %d, must be SPDL_RING_MPMC or SPDL_RING_SPSC",
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
    return spdl__error_set(desc->error, SPDL_E_NOMEM, "ring: out of memory");
}

SPDL_API void spdl_ring_destroy(spdl_ring *ring, void (*free_item)(void *item, void *user),
                                void *user) {
    spdl_allocator allocator;
    spdl__ring_core *core;
    uint64_t left, at;
    if (ring == NULL) return;
    core = &ring->core;
    allocator = ring->allocator;
    left = free_item != NULL ? spdl__ring_inside(core) : 0;
    for (at = core->head; left > 0; --left, ++at) {
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
   A worker looks for something to do: a job, or a step of an attached pipeline (a "client"). When
   it finds nothing it looks again for 16 pauses and 8 yields, then sleeps on its bell.

   The wake rule. A worker that goes to sleep reads its bell, announces itself (`asleep`, then
   `sleepers`), clears `waking`, looks at everything once more, and sleeps. A thread that makes
   something runnable, and does not look for work itself next, publishes it, passes a full barrier
   and reads `sleepers`. So one of the two sees the other. If a worker sleeps, `waking` is clear and
   what the thread has changed can run, the thread sets `waking` and rings the bell of the first
   worker in the pool that is `asleep`. The first, not the one that has slept longest: two workers
   do what two can do, and their caches stay warm. At most one wake is under way at a time: a worker
   that is about to sleep, or has stopped sleeping, clears `waking`, always before a full barrier
   and a look at everything. So a thread that finds it set relies on a look that is still to come,
   and a worker that finds work looks at everything again before its first call, which passes the
   wake on. (tests/model/sit.pml checks this exhaustively.)

   The upper half of `sleepers` counts consumers and producers that wait: takes and puts read one
   word to know that nobody does.

   Quiet clients. With several clients a worker that finds nothing in one sets its bit in `quiet`,
   passes a full barrier, and looks at it once more. A thread that changes a client reads the bit
   behind a full barrier, and clears it. So an idle pipeline costs the others nothing.

   Turns. Of several clients each worker steps in the one that it has worked least for, for up to
   SPDL__TURN_NS; one that had nothing to do saves up no more than two turns.

   Guests. The place of a guest is a worker without a thread; `taken` says that a thread has it. A
   guest never sleeps, so nobody wakes it: it passes on what it leaves.

   Threads: workers run worker_main; clients come and go from any thread. `slot.users` counts the
   workers inside a client, and detach waits until it is 0. The pool owns threads, queue and locals;
   jobs own their args. */

#define SPDL__MAX_WORKERS 256
#define SPDL__MAX_CLIENTS 64 /* bits of a word */
#define SPDL__MAX_QUEUE (1 << 24)
#define SPDL__IDLE_YIELDS 8   /* turns a worker or consumer gives away before it sleeps; 64 cost
                                 18 % more processor time beside steps of a millisecond */
#define SPDL__TURN_NS 1000000 /* how long a worker stays with one client when there are others */

typedef struct spdl__client {
    /* written by its owner before it is attached */
    bool (*step)(void *self, int worker);     /* runs one piece of work; false: there is none */
    bool (*runnable)(void *self, int worker); /* whether step would find some; -1: any worker */
    void *self;
} spdl__client;

typedef struct spdl__client_slot {
    uint64_t client; /* a spdl__client *, or 0; written by attach and detach */
    bool taken;      /* from attach until detach has returned; under attach_lock */
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

/* What everybody who takes or puts looks at: one line, that of the pool, or of a pipeline without
   one. Written by threads that sleep and those that wake them. */
typedef struct spdl__beacon {
    uint32_t sleepers; /* workers asleep; SPDL__WAITER for each consumer or producer that waits */
    uint32_t waking;   /* a worker was woken and has yet to look */
    uint64_t quiet;    /* bit i: there is no client i, or a look at it found nothing, and nothing
                          has changed since */
    char pad[SPDL_CACHE_LINE];
} spdl__beacon;

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
    char pad[SPDL_CACHE_LINE];
    spdl__beacon beacon;
    /* written by attach and detach, under the lock */
    uint32_t attach_lock;
    uint32_t clients;
    uint32_t slots_used; /* no client is in the slots from here on */
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

/* The client has changed, or has something to do: workers look at it again. The bit goes before the
   caller looks who sleeps: a worker that goes to sleep is seen, or sees that the bit is gone. */
SPDL__PRIVATE void spdl__client_stir(spdl__beacon *beacon, uint64_t bit) {
    uint64_t quiet = spdl__load_relaxed(&beacon->quiet);
    if ((quiet & bit) == 0) return;
    while ((quiet & bit) != 0 && !spdl__cas(&beacon->quiet, &quiet, quiet & ~bit)) {}
    spdl__full_barrier(); /* pairs with that in pool_park */
}

/* --- who is woken --- */

/* Any thread. Whether a worker would find something now. `inside` is the client whose step is
   running on this thread, which need not be entered, or NULL. */
SPDL__PRIVATE bool spdl__pool_runnable(spdl_pool *pool, int worker, const spdl__client *inside) {
    const uint32_t used = spdl__load32(&pool->slots_used);
    const uint64_t quiet = spdl__load(&pool->beacon.quiet);
    uint32_t i;
    if (spdl_ring_count(pool->jobs) > 0) return true;
    for (i = 0; i < used; ++i) {
        spdl__client_slot *slot = &pool->slot[i];
        const bool here = inside != NULL && spdl__slot_client(slot) == inside;
        const spdl__client *client = inside;
        bool found;
        if ((quiet >> i & 1) != 0) continue;
        if (!here) client = spdl__client_enter(pool, slot);
        found = client != NULL && client->runnable(client->self, worker);
        if (client != NULL && !here) spdl__client_leave(pool, slot);
        if (found) return true;
    }
    return false;
}

/* After a full barrier: whether it is worth looking for something to wake a worker for. */
SPDL__INLINE bool spdl__pool_has_sleepers(const spdl_pool *pool) {
    return (spdl__load_relaxed32(&pool->beacon.sleepers) & SPDL__ASLEEP) != 0 &&
           spdl__load_relaxed32(&pool->beacon.waking) == 0;
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
    if (!spdl__cas32(&pool->beacon.waking, &none, 1)) return;
    for (i = 0; i < pool->desc.workers; ++i)
        if (spdl__worker_wake(&pool->worker[i])) return;
    (void)spdl__exchange32(&pool->beacon.waking, 0);
}

SPDL__PRIVATE void spdl__pool_wake_all(spdl_pool *pool) {
    int i;
    for (i = 0; i < pool->desc.workers; ++i) (void)spdl__worker_wake(&pool->worker[i]);
}

/* A worker inside the client has found nothing. Either it sees what another thread has published,
   or that thread sees the bit: both have a full barrier between their store and their load. In the
   first case others may have seen the bit, too, and gone to sleep; what there is may be theirs
   alone to do (a fini), so they look again. */
SPDL__PRIVATE void spdl__client_settle(spdl_pool *pool, const spdl__client *client, uint32_t at) {
    const uint64_t bit = (uint64_t)1 << at;
    if (client->runnable(client->self, -1)) return;
    (void)spdl__or(&pool->beacon.quiet, bit);
    spdl__barrier_after_rmw();
    SPDL_TEST_POINT("pool settles");
    if (!client->runnable(client->self, -1)) return;
    spdl__client_stir(&pool->beacon, bit);
    spdl__pool_wake_all(pool);
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
    spdl__beacon *beacon = &pool->beacon;
    const uint32_t word = spdl__load32(&worker->bell.word);
    spdl__store32(&worker->asleep, 1);
    spdl__add32(&beacon->sleepers, 1);
    SPDL_TEST_POINT("pool announced");
    (void)spdl__exchange32(&beacon->waking, 0);
    spdl__barrier_after_rmw(); /* pairs with those after each publication */
    SPDL_TEST_POINT("pool about to sleep");
    if (!spdl__load32(&pool->quit) && !spdl__pool_runnable(pool, worker->index, NULL))
        (void)spdl__os_event_sleep(&worker->bell, word, SPDL__NEVER);
    /* before `asleep`: a worker that is counted can be woken, or was */
    spdl__sub32(&beacon->sleepers, 1);
    spdl__store32(&worker->asleep, 0);
    (void)spdl__exchange32(&beacon->waking, 0);
    spdl__barrier_after_rmw();
}

/* Works for one client until it has nothing to do, or others should have a turn. Whether it had
   something to do. While all others are quiet it goes on until one of them is not: that is seen by
   a change of `quiet` since the load that said so. */
SPDL__PRIVATE bool spdl__pool_visit(spdl_pool *pool, spdl__worker *worker, uint32_t at) {
    spdl__client_slot *slot = &pool->slot[at];
    const spdl__client *client = spdl__client_enter(pool, slot);
    const uint64_t quiet = spdl__load(&pool->beacon.quiet);
    const bool alone = (~quiet & ~((uint64_t)1 << at)) == 0;
    const uint64_t since = alone ? 0 : spdl_time_ns();
    bool found = false, over = false;
    if (client == NULL) return false;
    while (!over && client->step(client->self, worker->index)) {
        found = true;
        over = (spdl__load_relaxed(&pool->pending) != 0 && spdl_ring_count(pool->jobs) > 0) ||
               spdl__load32(&pool->quit) || spdl__late(worker->until) ||
               (alone ? spdl__load_relaxed(&pool->beacon.quiet) != quiet
                      : spdl_time_ns() - since > SPDL__TURN_NS);
    }
    if (!over && spdl__load_relaxed32(&pool->clients) > 1) spdl__client_settle(pool, client, at);
    spdl__client_leave(pool, slot);
    if (!alone && found) worker->worked_ns[at] += spdl_time_ns() - since;
    if (over) spdl__pool_hint(pool); /* it may have more, and we look elsewhere */
    return found;
}

/* A turn with a client that has something to do, the one first that this worker has worked least
   for. None is further behind than two turns: it is new, or had nothing to do. */
SPDL__PRIVATE bool spdl__pool_turn(spdl_pool *pool, spdl__worker *worker) {
    const uint32_t used = spdl__load32(&pool->slots_used);
    uint64_t *worked = worker->worked_ns, turn;
    uint64_t left = ~spdl__load(&pool->beacon.quiet); /* a bit for each client to look at */
    uint32_t i, least;
    for (;;) {
        for (i = 0, least = used; i < used; ++i) {
            if ((left >> i & 1) == 0) continue;
            worked[i] = spdl__max(worked[i], worker->least_ns);
            if (least == used || worked[i] < worked[least]) least = i;
        }
        if (least == used) return false;
        left &= ~((uint64_t)1 << least);
        turn = worked[least];
        if (!spdl__pool_visit(pool, worker, least)) continue;
        if (turn > worker->least_ns + 2 * SPDL__TURN_NS)
            worker->least_ns = turn - 2 * SPDL__TURN_NS;
        return true;
    }
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
    const bool job = spdl__load_relaxed(&pool->pending) != 0 && spdl__pool_job(pool, worker);
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
    return NULL;
}

SPDL__PRIVATE void spdl__pool_await32(spdl_pool *pool, const uint32_t *word, uint32_t value) {
    for (;;) {
        const uint32_t ticket = spdl__load32(&pool->idle.word);
        if (spdl__load32(word) == value) return;
        (void)spdl__os_event_sleep(&pool->idle, ticket, SPDL__NEVER);
    }
}

/* Lets a client's steps be run by the workers. `client` stays the caller's; *bit: its own in
   `quiet`. NULL: there are as many already as there may be. */
SPDL__PRIVATE spdl__client_slot *spdl__pool_attach(spdl_pool *pool, const spdl__client *client,
                                                   uint64_t *bit) {
    spdl__client_slot *slot = NULL;
    uint32_t i;
    spdl__lock(&pool->attach_lock, &pool->idle);
    for (i = 0; i < SPDL__MAX_CLIENTS && pool->slot[i].taken; ++i) {}
    if (i < SPDL__MAX_CLIENTS) {
        slot = &pool->slot[i];
        slot->taken = true;
        *bit = (uint64_t)1 << i;
        spdl__store_relaxed32(&pool->clients, pool->clients + 1);
        spdl__store(&slot->client, (uint64_t)(uintptr_t)client);
        spdl__client_stir(&pool->beacon, (uint64_t)1 << i);
        if (i >= pool->slots_used) spdl__store32(&pool->slots_used, i + 1);
    }
    spdl__unlock(&pool->attach_lock, &pool->idle);
    spdl__full_barrier();
    spdl__pool_wake_all(pool);
    return slot;
}

/* When it returns no worker is inside the client, nor will be. */
SPDL__PRIVATE void spdl__pool_detach(spdl_pool *pool, spdl__client_slot *slot) {
    uint32_t used;
    spdl__store(&slot->client, 0);
    spdl__full_barrier();
    spdl__pool_await32(pool, &slot->users, 0);
    spdl__lock(&pool->attach_lock, &pool->idle);
    (void)spdl__or(&pool->beacon.quiet, (uint64_t)1 << (slot - pool->slot));
    slot->taken = false;
    spdl__store_relaxed32(&pool->clients, pool->clients - 1);
    for (used = pool->slots_used; used > 0 && !pool->slot[used - 1].taken; --used) {}
    spdl__store32(&pool->slots_used, used);
    spdl__unlock(&pool->attach_lock, &pool->idle);
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

SPDL__PRIVATE spdl_result spdl__policy_check(const spdl_policy *policy, const char *whose,
                                              spdl_error *error) {
    if (policy->nice < -20 || policy->nice > 19)
        return spdl__error_set(error, SPDL_E_INVALID,
                               "%s: policy.nice is %d, must be -20 to 19", whose,
                               policy->nice);
    if (policy->sched < SPDL_SCHED_DEFAULT || policy->sched > SPDL_SCHED_IDLE)
        return spdl__error_set(error, SPDL_E_INVALID,
                               "%s: policy.sched is %d, which is no class", whose,
                               (int)policy->sched);
    if (policy->cpu_count < 0 || (policy->cpu_count > 0 && policy->cpus == NULL))
        return spdl__error_set(error, SPDL_E_INVALID, "%s: policy.cpu_count is %d%s", whose,
                               policy->cpu_count,
                               policy->cpus == NULL ? ", but policy.cpus is NULL" : "");
    return SPDL_OK;
}

SPDL__PRIVATE spdl_result spdl__pool_check(const spdl_pool_desc *desc) {
    const int threads = SPDL__MAX_WORKERS - (desc->guests > 0 ? desc->guests : 0);
    const struct {
        const char *name;
        int value, least, most;
    } number[] = { { "guests", desc->guests, 0, SPDL__MAX_WORKERS },
                   { "workers", desc->workers, desc->guests == 0, threads },
                   { "queue_size", desc->queue_size ? desc->queue_size : 1, 1, SPDL__MAX_QUEUE } };
    spdl_result result;
    int i;
    for (i = 0; i < 3; ++i)
        if (number[i].value < number[i].least || number[i].value > number[i].most)
            return spdl__error_set(desc->error, SPDL_E_INVALID,
                                   "pool: %s is %d, must be %d to %d", number[i].name,
                                   number[i].value, number[i].least, number[i].most);
    result = spdl__policy_check(&desc->policy, "pool", desc->error);
    if (result != SPDL_OK) return result;
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
    pool->beacon.quiet = UINT64_MAX; /* no slot has a client */
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
                                   "pool '%s': thread %d of %d could not be created%s",
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
        return spdl__error_set(desc->error, result, "pool '%s': init of a worker failed: %s",
                               pool->name, spdl_result_text(result));
    if (!spdl__load32(&pool->policy_refused)) return SPDL_OK;
    return spdl__error_set(desc->error, SPDL_E_THREAD,
                           "pool '%s': the system refuses the policy of its threads"
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
        spdl__error_set(desc->error, result, "pool: out of memory");
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
    const char *why = NULL;
    if (pool == NULL) return;
    if (spdl__pool_is_worker(pool)) why = "called on a worker of the pool";
    if (spdl__load32(&pool->clients) > 0) why = "a pipeline is still on the pool";
    if (why != NULL) {
        spdl__logf(&pool->desc.logger, SPDL_LOG_ERROR,
                   "spdl_pool_destroy: %s, nothing was done", why);
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
   stages, one for the consumer and one for each edge. A thread writes its own track, and the reader
   of an edge that edge's; who adds takes a number first, as readers of an edge may come at the same
   time. Nobody reads them before destroy.

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
    SPDL__RECORD_BATCH, /* a batch was put, at its end; number: its own */
    SPDL__RECORD_NEXT,  /* the trainer waited; number: of the item it got */
    SPDL__RECORD_DEPTH, /* number: the items on an edge */
    SPDL__RECORD_SPAN,  /* a user's; number: the pointer to its name, result: spans around it */
    SPDL__RECORD_VALUE  /* of a counter; number: the pointer to its name, end: the bits */
} spdl__record_kind;

/* 32 bytes, as is documented. Written by the thread that took its place in the track. */
typedef struct spdl__record {
    uint64_t begin;
    uint64_t end;
    uint64_t number;
    uint64_t stamp; /* result 16, row 8, kind 8 bits */
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
    /* written by the thread whose track it is */
    uint32_t spans; /* that are open, also those too deep to be kept */
    spdl__span span[SPDL__SPANS];
    char pad[SPDL_CACHE_LINE];
} spdl__track;

/* Written by create. */
typedef struct spdl__trace {
    size_t bytes;    /* of the block: this, the tracks, their records */
    int tracks;      /* of threads, then those of edges */
    spdl__track *track;
    const spdl_function *fn[SPDL_MAX_STAGES]; /* the stages' own */
    char name[SPDL_NAME_BYTES]; /* of the threads */
    char path[SPDL__PATH_BYTES]; /* of the file that destroy writes */
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
    spdl__store_relaxed(&record->begin, begin);
    spdl__store_relaxed(&record->end, end);
    spdl__store_relaxed(&record->number, number);
    spdl__store_relaxed(&record->stamp, (uint64_t)(uint16_t)result << 16 |
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
    spdl__os_thread_times(&meter->file, NULL, &meter->wait_ns);
    spdl__meter_waited(meter, meter->wait_ns);
    spdl__os_thread_times(NULL, &meter->cpu_ns, NULL);
}

/* --- what the pipeline calls; >>trace-impl has them --- */

struct spdl__edge;

/* Something was taken. */
SPDL__RARE void spdl__trace_taken(struct spdl__edge *edge);
#ifndef SPDL_NO_REPORT /* in create and destroy */
SPDL__PRIVATE void spdl__trace_open(spdl_pipeline *p, const spdl_pipeline_desc *desc);
SPDL__PRIVATE void spdl__trace_close(spdl_pipeline *p);
SPDL__PRIVATE void spdl__trace_free(spdl_pipeline *p);
#endif

/* ============================================================================================= */
/* >>edge-impl
   Edges, and what travels on them. An edge is a ring of slots addressed by tickets: the number of a
   result on this edge. A slot is ready when its stamp is its ticket + 1. A writer may put a result
   at any ticket that was promised to it, so the ring is also the reorder buffer. The reader takes
   the tickets in order.

   A slot holds one of three:
       an item   with the row that made it, which says how to free it
       a hole    an input that made no result; its reader passes it without a call
       a mark    END, EPOCH or FAIL of a row. It travels from row to row, in order (>>row-impl)
   `range` is the source's number of the item, or where a run goes on (>>position-impl); behind a
   feed, when the oldest of what is in it was pushed.

   The word. The reader of an edge has a word: {head, SHUT, active}. `head` is the next ticket to
   take, `active` counts the calls inside of the row, SHUT says that nobody enters any more. **An
   item is taken by one compare-and-swap on that word**, which moves `head` and counts the call. A
   mark is passed by who moves `active` from 0 to PASSING. A merge, and the consumer, have the edges
   they read to themselves: there the word is just the head. A source, or a merge, has a word of its
   own.

   Tickets. A row with input order and a concurrency above 1 promises the ticket of a result when it
   takes the input: ticket = head + base, for ever. With completion order, or one call at a time, a
   result takes its ticket when it is put (`tail`).

   Room is known before the call, so no result waits for room: promised - refunds - (head - dropped)
   < buffer_size + concurrency, and where there may be holes, ticket < head + window. `refunds`
   counts promises that made no item, `dropped` those of them that the reader has passed. The reader
   raises `dropped` before it moves its head, so a writer that reads the head first never sees too
   much room.

   Threads: each field says who writes it. The pipeline owns the edges and every item on them. */

#define SPDL__BUFFER SPDL_MAX_STAGES /* owner of an item that is a buffer of spdl_buffer */
#define SPDL__IN_PLACE (SPDL_MAX_STAGES + 1) /* and of one that lies in a batch: nobody frees it */
#define SPDL__TOKEN (SPDL_MAX_STAGES + 2)    /* and of one that is none: see >>probe-impl */
#define SPDL__HOLE 0xfbu  /* owner of a slot without an item; what is greater is a mark */
#define SPDL__EPOCH 0xfcu
#define SPDL__END 0xfdu
#define SPDL__FAIL 0xfeu  /* its number is that of the row that has failed */
#define SPDL__WINDOW 64   /* slots that holes may take beside items */
#define SPDL__AHEAD_BYTES ((uint64_t)256 << 20) /* of one row's blocks are made with a pipeline */

/* A word: head, SHUT, active. */
#define SPDL__ACTIVE 0xffffu /* calls inside, parked ones too */
#define SPDL__PASSING 0xffffu /* as `active`: one thread is inside alone, at a mark */
#define SPDL__SHUT 0x10000u  /* nobody enters any more */
#define SPDL__BUSY (SPDL__SHUT | SPDL__ACTIVE) /* less than the concurrency if there is a place */
#define SPDL__HEAD_BITS 17
#define SPDL__HEAD_ONE ((uint64_t)1 << SPDL__HEAD_BITS)

/* In a range from the row that marks on: the lower bits are a number of results. Of a feed, whose
   items nobody numbers, the range is when they were pushed, in units of 256 ns. */
#define SPDL__SPAN_BITS 24
#define SPDL__SPAN_MAX (((uint64_t)1 << SPDL__SPAN_BITS) - 1)
#define SPDL__PUSHED_BITS 8

typedef struct spdl__slot { /* half a line of the cache; written by the owner of the ticket */
    void *item;
    uint64_t origin; /* sequence << 8 | row of the stage that made it, or one of the owners above */
    uint64_t range;
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
    bool holes;         /* there may be some */
    char pad0[SPDL_CACHE_LINE];
    /* written by the row that writes the edge */
    uint64_t tail;    /* the next ticket to put, where results take one when they are put */
    uint64_t refunds; /* tickets that were promised and hold no item */
    char pad1[SPDL_CACHE_LINE];
    /* written by the reader */
    uint64_t word;
    uint64_t dropped; /* holes it has passed, before their head; tickets that a rewind left out */
    uint64_t marks;   /* marks it has passed */
    char pad2[SPDL_CACHE_LINE];
    uint64_t put_wait_ns; /* finished items waited for a place in the buffer */
    uint64_t ended_ns;    /* when the reader met the end */
    uint64_t gap_since;   /* nothing to take since then; exchanged for 0 by who ends it */
    uint64_t idle_since;  /* and the reader was free to take it since then; or 0 */
    uint64_t empty_ns, get_wait_ns; /* the sums of both */
    char pad3[SPDL_CACHE_LINE];
    uint64_t seen[6]; /* what snapshots have reported; written by them */
} spdl__edge;

SPDL__PRIVATE void spdl__report_begin(spdl_pipeline *p, const spdl_pipeline_desc *desc);
SPDL__PRIVATE void spdl__report_end(spdl_pipeline *p); /* both: >>report-impl */

/* What SPDL_DOCTOR and desc.doctor ask for. With SPDL_NO_REPORT there is no doctor, and these do
   nothing. (>>doctor-impl) */
typedef struct spdl__doctor spdl__doctor;
typedef struct spdl__hand spdl__hand;
typedef struct spdl__doctor_plan {
    spdl_doctor_desc desc; /* but for the file */
    char name[SPDL_NAME_BYTES];
    char json[SPDL__PATH_BYTES];
} spdl__doctor_plan;
SPDL__PRIVATE bool spdl__doctor_ask(spdl__doctor_plan *plan, const spdl_doctor_desc *desc,
                                    const spdl_logger *logger);
SPDL__PRIVATE spdl_result spdl__doctor_open(spdl_pipeline *p, const spdl__doctor_plan *plan,
                                            int workers);
SPDL__PRIVATE void spdl__doctor_item(spdl__doctor *d);
SPDL__PRIVATE void spdl__doctor_close(spdl_pipeline *p);
SPDL__PRIVATE void spdl__doctor_empty(spdl_pipeline *p);
SPDL__PRIVATE void spdl__doctor_free(spdl_pipeline *p);

SPDL__INLINE uint64_t spdl__head(uint64_t word) { return word >> SPDL__HEAD_BITS; }

SPDL__INLINE spdl__slot *spdl__edge_slot(const spdl__edge *edge, uint64_t ticket) {
    return &edge->slots[ticket & edge->mask];
}

/* The acquire pairs with the release in spdl__slot_put: what the slot holds is there. */
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

SPDL__INLINE unsigned spdl__slot_tag(const spdl__slot *slot) {
    return spdl__origin_tag(spdl__load_relaxed(&slot->origin));
}

/* How long ago the oldest item of a feed's range was pushed. */
SPDL__INLINE uint64_t spdl__range_age(uint64_t range, uint64_t now) {
    const uint64_t pushed = range << SPDL__PUSHED_BITS;
    return now > pushed ? now - pushed : 0; /* its clock may be ahead of ours */
}

/* An item on its way. */
typedef struct spdl__item {
    void *item;
    uint64_t origin;
    uint64_t range;
} spdl__item;

/* The one way to read a slot. If the swap of the word that follows fails, the item was another
   thread's, and may have been written anew. */
SPDL__INLINE spdl__item spdl__slot_read(const spdl__slot *slot) {
    spdl__item got;
    got.item = spdl__load_pointer(&slot->item);
    got.origin = spdl__load_relaxed(&slot->origin);
    got.range = spdl__load_relaxed(&slot->range);
    return got;
}

/* Results promised below this have room, when `capacity` may wait or be under way. Never too many:
   what is read later can only make more room. */
SPDL__INLINE uint64_t spdl__edge_until(const spdl__edge *edge, uint64_t capacity) {
    /* pairs with the takes: slots have been read before they are written again */
    const uint64_t head = spdl__head(spdl__load(&edge->word));
    const uint64_t dropped = spdl__load(&edge->dropped); /* after head: at least those before it */
    const uint64_t until = head - dropped + capacity + spdl__load(&edge->refunds);
    return edge->holes && (int64_t)(until - head - edge->window) > 0 ? head + edge->window : until;
}

/* Writes one slot. Its ticket was promised, so it is free. */
SPDL__INLINE void spdl__slot_put(spdl__slot *slot, uint64_t ticket, const spdl__item *what,
                                 uint64_t now) {
    spdl__store_pointer(&slot->item, what->item);
    spdl__store_relaxed(&slot->origin, what->origin);
    spdl__store_relaxed(&slot->range, what->range);
    spdl__store_relaxed32(&slot->done, (uint32_t)(now >> 10));
    spdl__store32(&slot->stamp, (uint32_t)(ticket + 1)); /* pairs with slot_has */
    SPDL_TEST_POINT("pipeline put");
}

SPDL__INLINE void spdl__put_at(spdl__edge *edge, uint64_t ticket, const spdl__item *what,
                               uint64_t now) {
    spdl__slot_put(spdl__edge_slot(edge, ticket), ticket, what, now);
}

/* --- waits --- */

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
    return spdl__slot_tag(slot) >= SPDL__HOLE ? 0 : spdl__slot_age(slot, now);
}

/* The gap has ended when `until` was: adds it to the sums, unless another thread has. */
SPDL__NOINLINE void spdl__gap_close(spdl__edge *edge, uint64_t until) {
    const uint64_t idle = spdl__load_relaxed(&edge->idle_since);
    const uint64_t since = spdl__exchange(&edge->gap_since, 0);
    if (since == 0 || until <= since) return;
    spdl__add(&edge->empty_ns, until - since);
    if (idle != 0 && until > spdl__max(idle, since))
        spdl__add(&edge->get_wait_ns, until - spdl__max(idle, since));
}

/* Nothing is there to take at `head`, as far as we see; `idle`: and the reader is free. */
SPDL__PRIVATE void spdl__gap_open(spdl__edge *edge, uint64_t head, uint64_t now, bool idle) {
    if (spdl__head(spdl__load_relaxed(&edge->word)) != head) return; /* others are further */
    spdl__store_relaxed(&edge->idle_since, idle ? now : 0);
    spdl__store_relaxed(&edge->gap_since, now);
}

/* The reader has become free: from now on an empty edge is a wait. */
SPDL__INLINE void spdl__gap_idle(spdl__edge *edge, uint64_t now) {
    if (SPDL__NO_STATS || spdl__load_relaxed(&edge->gap_since) == 0) return;
    if (spdl__load_relaxed(&edge->idle_since) == 0) spdl__store_relaxed(&edge->idle_since, now);
}

/* After a take of the ticket before `head`: an open gap ended when that was put, and another begins
   if nothing follows it. `idle`: the reader is free to take what comes. */
SPDL__INLINE void spdl__edge_took(spdl__edge *edge, uint64_t head, uint64_t now, bool idle) {
    if (SPDL__TRACED(edge->track)) spdl__trace_taken(edge);
    if (SPDL__NO_STATS || now == 0) return;
    if (SPDL__UNLIKELY(spdl__load_relaxed(&edge->gap_since) != 0))
        spdl__gap_close(edge, now - spdl__slot_age(spdl__edge_slot(edge, head - 1), now));
    if (!spdl__edge_ready(edge, head)) spdl__gap_open(edge, head, now, idle);
}

/* The reader has met the end. */
SPDL__PRIVATE void spdl__edge_ended(spdl__edge *edge, uint64_t now) {
    if (edge->ended_ns != 0) return;
    spdl__gap_close(edge, now);
    spdl__store_relaxed(&edge->ended_ns, now);
}

/* --- batches --- */

/* Batches, and buffers, which are batches of no items with a block behind them, are made with the
   pipeline and come back to its pool; a consumer that keeps many makes the pool grow. What came
   back last is used first: it may still be in a cache. Whoever gives one back waits for nobody. The
   pool lives until the pipeline and every batch are gone. */
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
    spdl__os_event parked; /* where threads wait for it; by create */
    spdl__batch *spare;
    /* with SPDL_DEBUG, by any thread: see spdl__node */
    uint64_t unfreed[SPDL_MAX_STAGES];
} spdl__batch_pool;

/* Written by the thread that fills it, then by that which has taken it. */
struct spdl__batch {
    spdl_batch shown; /* first: what users see */
    spdl__batch_pool *pool;
    uint8_t *owner;   /* row of the stage that made each item; in place: the parts that are given */
    uint64_t range;   /* of what is in it: see >>position-impl */
    spdl__batch *next; /* of a spare one: as above; in place: under place_lock */
};

SPDL__PRIVATE size_t spdl__line_up(size_t bytes) {
    return (bytes + SPDL_CACHE_LINE - 1) / SPDL_CACHE_LINE * SPDL_CACHE_LINE;
}

/* Of a batch of `size` items, without the block. */
SPDL__PRIVATE size_t spdl__batch_head_bytes(size_t size) {
    return spdl__line_up(sizeof(spdl__batch) + size * (sizeof(void *) + 1));
}

SPDL__PRIVATE size_t spdl__batch_bytes(const spdl__batch_pool *pool) {
    return spdl__batch_head_bytes(pool->size) + pool->block_bytes;
}

SPDL__PRIVATE spdl__batch *spdl__batch_make(spdl__batch_pool *pool) {
    spdl__batch *batch =
        (spdl__batch *)spdl__alloc(&pool->allocator, spdl__batch_bytes(pool), SPDL_CACHE_LINE);
    if (batch == NULL) return NULL;
    batch->pool = pool;
    batch->shown.items = (void **)(void *)(batch + 1);
    batch->shown.data =
        pool->block_bytes ? (char *)batch + spdl__batch_head_bytes(pool->size) : NULL;
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
    spdl__os_event_fini(&pool->parked);
    spdl__free(&allocator, pool, sizeof(*pool));
}

/* An empty batch; NULL when there is no memory for one more. */
SPDL__PRIVATE spdl__batch *spdl__batch_get(spdl__batch_pool *pool) {
    spdl__batch *batch;
    spdl__add(&pool->references, 1);
    spdl__lock(&pool->lock, &pool->parked);
    batch = spdl__batch_pool_pop(pool);
    spdl__unlock(&pool->lock, &pool->parked);
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

/* `ahead` batches are made now: as many as the pipeline itself can hold, but no more than
   SPDL__AHEAD_BYTES of blocks. Up to `keep` are kept. */
SPDL__PRIVATE spdl__batch_pool *spdl__batch_pool_make(const spdl_allocator *allocator, size_t size,
                                                      size_t block_bytes, size_t ahead,
                                                      size_t keep) {
    spdl__batch_pool *pool =
        (spdl__batch_pool *)spdl__alloc_zeroed(allocator, 1, sizeof(*pool), sizeof(void *));
    if (pool == NULL || !spdl__os_event_init(&pool->parked)) {
        spdl__free(allocator, pool, sizeof(*pool));
        return NULL;
    }
    pool->allocator = *allocator;
    pool->size = size;
    pool->block_bytes = block_bytes;
    pool->keep = keep;
    pool->free_item[SPDL__BUFFER] = spdl_buffer_free;
    pool->references = 1;
    if (block_bytes > 0) ahead = (size_t)spdl__min(ahead, SPDL__AHEAD_BYTES / block_bytes);
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

/* ============================================================================================= */
/* >>row-impl
   What a pipeline is made of: rows (nodes), the calls of their functions (tasks), and the threads
   that run them. The rooms that follow are in the order of an item's way: >>flow-impl takes it,
   calls the function, puts the result and leaves; >>flow-impl also has the calls that go on later,
   >>batch-impl and >>merge-impl are rows whose functions are the library's, and >>step-impl is what
   a worker does.

   A worker enters a row by taking an item, then calls, puts, takes the next item, and so on for up
   to SPDL__SITTING_NS (a sitting). So nothing is ever taken and not begun, and calls of a row begin
   in the order of its inputs. When the worker leaves, `active` of the row's word goes down by one.

   Marks. A source that ends puts END or EPOCH, a call that fails for good puts FAIL, in the place
   that was promised to its result. A row passes the mark at its head when no call is inside: by one
   swap that moves `active` from 0 to SPDL__PASSING. Under that it makes the call of .flush, or else
   puts the mark. So items before a mark come before it in every edge, and an epoch is a barrier.
       END    passed: SHUT in this row.  EPOCH: nothing is shut.
       FAIL   put or passed: SHUT in this row and all that feed it. Later calls that still run put
              their results behind the mark, where nobody takes them.
   SHUT is set before `active` goes down. It is in the word and nowhere else: a flag beside it would
   let one more call in behind the mark. The consumer takes EPOCH. END and FAIL stay in the last
   edge, so the result of next stays the same. The error is that of the row which the mark names.
   (tests/model/marks.pml)

   Stop. `stopping`, then SHUT in all rows, then whoever waits frees what lies in all edges but the
   last when no call is inside. A rewind moves every head on to the next ticket that would be put,
   never back: a thread that slept between its copy of a slot and its swap must fail.

   Branches. The edges of a branch are those of its path rows, which do nothing else. What a branch
   routes is put at once; what a path then holds beyond its buffer_size waits. A branch is called
   while fewer than its own buffer_size wait, on all its paths together. One path may hold them all,
   so its edge has slots for both. For a merge in input order the branch also writes the path of
   each result into a ring of words, `turns`, before it puts the result. Marks go down every path.

   Threads: workers run rows. A source with .threads has a thread of its own, the producer, which
   sits in that row only. Each field says who writes it. */

#define SPDL__ABANDONED 2u /* a call that destroy does not wait for */
#define SPDL__MAX_CONCURRENCY 4096
#define SPDL__MAX_BUFFER (1 << 20)
#define SPDL__MAX_BATCH (1 << 24)
#define SPDL__TURN_MARK 255u /* in `turns`: a mark lies at the head of every path */

/* Buckets of the histogram: exact below 8, then 8 to each power of two, up to 2^43 ns (2.4 h). */
#define SPDL__SUB_BITS 3
#define SPDL__TOP_BITS 43
#define SPDL__BUCKETS ((SPDL__TOP_BITS - SPDL__SUB_BITS + 1) << SPDL__SUB_BITS)

/* What one worker counted for one stage: one writer, read by snapshots. The cell after those of the
   workers is that of other threads: they add to `freed`, the rest is the producer's of a feed, who
   counts pushes there, and the consumer's, who times answers. */
typedef struct spdl__counters {
    uint64_t tasks, failures, skips, freed;
    uint64_t made;     /* items handed on that it did not get as its input */
    uint64_t timed_ns; /* of the calls in the histogram */
    uint64_t max_ns;
    int64_t meter_due; /* sittings until one is measured; not for others */
    uint64_t metered, metered_blind; /* calls that were measured; of them, without schedstat */
    uint64_t metered_ns, metered_cpu_ns, metered_wait_ns;
    uint64_t bucket[SPDL__BUCKETS];
    char pad[SPDL_CACHE_LINE];
} spdl__counters;

/* What has passed the row that counts: see >>position-impl. */
typedef struct spdl__mark {
    uint64_t item, results;
} spdl__mark;

/* Where the consumer is: after what it took last. A run that starts there delivers the rest. */
typedef struct spdl__position {
    uint64_t epoch;
    uint64_t source;    /* the item that the source begins with, in that epoch */
    uint64_t results;   /* so many results where they are counted are not for us */
    uint64_t number;    /* of the next batch of the row that marks */
    uint64_t drops;     /* so many items in the sink are not for us, either */
    uint64_t delivered; /* items of this epoch that the consumer got */
} spdl__position;

/* How a run begins. */
typedef struct spdl__start {
    spdl__position at;
    bool loads; /* rows with .flush are to forget what they have gathered */
    const spdl_sampler *sampler; /* NULL, or what the sampler becomes */
} spdl__start;

/* A call that goes on later: one of a row with .again or .deferred. (>>flow-impl) */
typedef enum spdl__parked_state {
    SPDL__PARKED_FREE,
    SPDL__PARKED_RUNNING, /* a worker has it */
    SPDL__PARKED_ARMED,   /* the same, and spdl_defer has given out its number */
    SPDL__PARKED_EARLY,   /* the same, and it was completed before its function has returned */
    SPDL__PARKED_PENDING, /* its function has returned SPDL_PENDING */
    SPDL__PARKED_DONE,    /* it was completed: a worker settles it */
    SPDL__PARKED_WAITING  /* its function has returned SPDL_AGAIN: it goes on when there is room */
} spdl__parked_state;

typedef struct spdl__parked {
    /* under the row's parked_lock */
    spdl__parked_state state;
    uint32_t next; /* 1 + the place of the next one in the list it is in, or 0 */
    uint64_t generation;
    spdl_result result; /* spdl_complete: what the call comes to */
    void *completed;
    /* written by the worker that has the call */
    spdl__item in;
    uint64_t sequence, ticket, since;
    bool flush, taken;
    uint64_t handed_on; /* results it has handed on by SPDL_AGAIN */
    void *user;         /* spdl_call_state */
    void *buffer;       /* what spdl_buffer gave and was not handed on yet */
    spdl__batch *holder;
    char text[SPDL_TEXT_BYTES]; /* under the lock: why it failed */
} spdl__parked;

/* A list of places; under the row's parked_lock, but others read `count`. */
typedef struct spdl__parked_list {
    uint32_t first, last; /* 1 + place, or 0 */
    uint32_t count;
} spdl__parked_list;

typedef struct spdl__node {
    /* written by create */
    spdl_stage row;
    int index;
    char name[SPDL_NAME_BYTES];
    int most;        /* its concurrency at most */
    bool ordered;    /* results come in the order of the inputs */
    bool serial;     /* one call at a time */
    bool by_ticket;  /* ordered and not serial: the ticket of a result is promised at the take */
    bool at_put;     /* room is what was put and not taken: serial rows, and those of SPDL_AGAIN */
    bool holes;      /* a dropped input leaves a hole */
    bool plain;      /* its calls need nothing that is rare: see flow_sit */
    bool gathers;    /* its function is the library's: a batch or a merge */
    bool at_end;     /* the consumer or the producer may wait for what it does */
    bool alone;      /* the row says one call at a time */
    bool places;     /* its calls write into the batches of the next row */
    bool own_thread; /* a source with .threads */
    uint32_t above;  /* bit i: what row i makes can come here */
    uint32_t beside; /* bit i: row i writes an edge that this one reads, or the other way */
    uint32_t near;   /* these, and this one */
    int paths;       /* branch: rows whose edge it writes; merge: rows whose edge it reads */
    uint8_t path[SPDL_MAX_STAGES];
    struct spdl__node *merge;  /* branch: where it ends; merge: its branch */
    struct spdl__node *before; /* the row that writes `in`; of a path, its branch; or NULL */
    spdl__edge *in;  /* NULL for rows that read none or several */
    uint64_t *word;  /* of the edge it reads, or `own` */
    spdl__edge out;
    spdl__counters *counters; /* one per worker, and one for other threads */
    spdl__batch_pool *batches;
    spdl__batch_pool *buffers;
    spdl__parked *parked; /* places for `most` calls, or NULL */
    uint32_t *turns;      /* branch whose merge is in input order */
    uint64_t turns_mask;
    spdl__os_event *locks; /* of the pipeline: where threads wait for one of its locks */
    char pad0[SPDL_CACHE_LINE];
    /* written by the thread that takes: the word of a source or merge */
    uint64_t own;
    /* written by a rewind: the ticket of a result - that of its input */
    uint64_t base;
    /* written by the thread that is inside alone */
    bool flushed;      /* the call without input was made in this epoch */
    bool gathered;     /* .flush: a call with input was made since */
    bool holds;        /* .flush behind a feed: and has made no result yet */
    uint64_t held_range; /* when the oldest of these was pushed */
    bool sheds;        /* what it has gathered is of another run: it hands it on, to nobody */
    uint32_t turn;     /* merge of what is ready: the path that is looked at first */
    uint64_t number;   /* batch: of the next one in this epoch */
    uint64_t number_first; /* and of the first one that this run makes in it */
    spdl__mark mark;   /* of the row that marks */
    uint64_t skip;     /* of the row that marks: results that were delivered before this run */
    bool in_batches;   /* by create: what it takes has the number of a batch */
    spdl__batch *open_batch;
    uint64_t epoch;    /* of the items that pass now */
    uint64_t first;    /* ticket of the first result of this epoch */
    uint64_t dropped;  /* batch in place: `dropped` of its input when the epoch began */
    uint64_t tokens;   /* batch: so many have come */
    uint64_t made;     /* source: items made so far in this epoch */
    uint64_t turns_put;   /* branch: entries of `turns` */
    char pad1[SPDL_CACHE_LINE];
    uint64_t turns_taken; /* by the merge */
    /* written now and then, by any thread */
    uint32_t limit;  /* the concurrency now */
    uint64_t failures;
    uint64_t tolerated; /* of them; a rewind does not forget these */
    uint64_t logged;    /* of these: so many when the log had the line about them */
    uint64_t nulls;   /* with SPDL_DEBUG: results that were NULL, before the first that was not */
    uint64_t unfreed; /* and items it made that had to be freed, without free_item */
    char first_text[SPDL_TEXT_BYTES / 2]; /* why the first of those, by its thread */
    uint64_t fail_ticket; /* under error_lock: of `error` */
    spdl_error error;   /* under error_lock: the failure that its first FAIL is about */
    uint64_t item_ns;   /* moving average of a call; a guess */
    uint32_t calling;   /* with own_thread: 1 while it calls; SPDL__ABANDONED by destroy */
    uint32_t parked_lock;
    spdl__parked_list parked_free, parked_done, parked_waiting;
    char pad2[SPDL_CACHE_LINE];
    /* batch in place: by the row, and by calls of the row before; all under the lock */
    uint32_t place_lock;
    spdl__batch *place;     /* batches that calls write into, the open one among them */
    uint64_t place_epoch;   /* of the items the row takes */
    uint64_t place_dropped; /* dropped items of this epoch that the row has passed, or fewer */
    char pad3[SPDL_CACHE_LINE];
    /* written under blame_lock: the consumer waited while this row's call was running, and while no
       worker took its input */
    uint64_t exposed_ns, exposed_idle_ns;
} spdl__node;

/* A worker in a pipeline: its sitting in a row, and the call at hand. One for each worker, written
   by that worker; what a call asks for, during the call. */
struct spdl_task {
    spdl_pipeline *pipeline;
    int worker;
    spdl__node *node;
    uint32_t live;    /* the function is running; other threads look, if they misuse a task */
    uint64_t thread;  /* that runs it */
    /* what the call asks for; cleared before each */
    bool taken;       /* the input is not the library's any more */
    bool call_error;  /* the call fails, whatever it returns: what it asked for cannot be */
    bool row_error;   /* nor can it in any other call: the row is wrong */
    bool cut_short;   /* neither a result nor a failure: a stop has come between */
    uint8_t path;
    uint8_t owner;    /* whose items its results are; the row's index but for SPDL_UNBATCH */
    bool flushing;
    bool passing;     /* it is inside alone, at a mark */
    bool gone;        /* the producer: destroy has gone on without its call */
    spdl__item in;    /* its range is that of the result */
    uint64_t sequence;
    uint64_t ticket;  /* of the result, if it was promised at the take */
    uint64_t since;   /* when the call began */
    void *buffer;        /* what spdl_buffer gave and was not handed on yet */
    spdl__batch *holder; /* whose block it is, or a part of it */
    spdl__parked *parked; /* of a row with .again or .deferred */
    void *no_state;      /* what spdl_call_state returns where there is none */
    uint32_t inits;      /* bit i: init of row i has run here */
    spdl__meter meter;
    char text[SPDL_TEXT_BYTES];
    char pad[SPDL_CACHE_LINE];
};

struct spdl_pipeline {
    /* written by create */
    spdl_allocator allocator;
    spdl_logger logger;
    spdl_profiler profiler;
    bool has_hooks; /* some row has init or fini */
    bool threaded;  /* there are threads that run its rows */
    uint64_t works_ns; /* next runs calls of rows whose mean is not longer; 0: none */
    int workers;    /* places of the pool, or 1: the consumer; and one more for the producer */
    int threads;    /* of them, what the statistics call workers */
    int spare;      /* and those of them that the doctor lets work when it tries more */
    int count;      /* rows but the sink */
    spdl_pool *pool; /* NULL: the consumer runs all rows, workers = 0 */
    bool own_pool;
    spdl__client client;
    spdl__client_slot *slot;
    spdl__beacon *beacon; /* of the pool, or `own_beacon` */
    uint64_t bit;         /* its own in beacon->quiet */
    spdl__node *node;
    spdl__node *last; /* the row in front of the sink */
    spdl__edge *sink;
    spdl__node *feed; /* the first row when items are pushed, or NULL */
    spdl__node *producer; /* the first row when it has a thread of its own, or NULL */
    spdl__node *marks; /* the row that marks; NULL: results are counted at the sink */
    const char *unsaved; /* why it has no position that could be saved, or NULL */
    uint32_t table; /* a hash of what a position depends on */
    spdl_sampler *sampler; /* that of SPDL_INDEX, or NULL */
    bool many;     /* an item of the source may make several results before they are counted */
    bool remakes;  /* and a batch after that: the batch delivered last is made again */
    bool replays;  /* the epoch is made again, from its beginning */
    uint64_t seed;
    spdl_task *task;  /* [worker] */
    uint64_t process;
    uint64_t start_ns;
    struct spdl__reporter *reporter; /* NULL unless reports were asked for */
    struct spdl__doctor *doctor; /* NULL unless it was asked for, and these two */
    struct spdl__hand *hand;
    const char *tokens;    /* count of them: items that are none */
    spdl__trace *trace;    /* NULL: nothing is recorded */
    void **local;          /* [worker * count + row], by each worker */
    spdl__beacon own_beacon;
    /* written rarely, by any thread */
    uint32_t stopping;
    uint32_t leaving;      /* destroy asks the workers to run fini */
    uint32_t left;         /* threads of the pool that have */
    uint32_t joined;       /* threads of the pool that ran an init */
    uint32_t failed;       /* bit i: row i has, more often than it may; under error_lock */
    uint32_t late;         /* a stop has waited in vain */
    uint64_t references;   /* destroy, and a producer that it has abandoned */
    uint32_t completing;   /* threads inside spdl_complete */
    uint32_t error_lock;
    uint32_t purge_lock;
    uint32_t stops;        /* threads inside spdl_pipeline_stop */
    uint64_t rewinder;     /* the thread inside spdl_pipeline_rewind, or 0 */
    spdl__os_event quiet;  /* a call has ended while stopping, or a worker has left */
    spdl__os_event locks;  /* where threads wait for one of its locks */
    char pad1[SPDL_CACHE_LINE];
    /* written by the producer: of a feed, or its own thread */
    uint32_t producer_inside;
    uint32_t producer_waits; /* set by it before it sleeps, cleared by the thread that wakes it */
    spdl__os_event room;   /* the edge after the first row has some */
    spdl__os_thread producer_thread; /* by create and destroy */
    spdl_policy policy;              /* by create; that thread reads it when it starts */
    bool producer_started;
    uint32_t producer_quits; /* by destroy */
    uint64_t producer_id;
    char pad2[SPDL_CACHE_LINE];
    /* written by the consumer */
    uint32_t trainer_inside;
    uint64_t trainer;      /* the thread that waits in next, or 0 */
    bool closed_returned;
    spdl__item last_item;
    spdl__position at;     /* when `delivered` was `begun` */
    uint64_t begun;
    spdl__mark mark;       /* if nobody else marks; of a pipeline that remakes: the batch, and how
                              many of its items were taken */
    uint64_t drops;        /* items of the sink that were delivered before this run */
    uint64_t data_hash;    /* by create */
    uint64_t delivered;
    uint64_t first_item_ns;
    uint64_t ended_ns;
    uint64_t wait_since;   /* 0, or when the wait in next began */
    uint64_t wait_ns;
    uint64_t first_wait_ns; /* what it was when the first item came */
    uint64_t taker;        /* the thread that took the first item */
    uint64_t taker_queued_ns; /* how long it had been on a run queue by then, or SPDL__NEVER */
    uint64_t answer_wait_ns; /* with a feed: time items lay in the sink */
    char pad3[SPDL_CACHE_LINE];
    /* while the consumer waits; read by threads that take and put */
    uint32_t waiting;      /* set before it sleeps, cleared by the thread that wakes it */
    spdl__os_event fed;    /* the sink got what the consumer waits for, or an end */
    uint32_t blame_lock;   /* the rest: written under it */
    uint64_t blame_since;  /* what the consumer waits for is where `blame` says since then; or 0 */
    spdl__node *blame;
    bool blame_idle;       /* it waits for a worker there */
    char pad4[SPDL_CACHE_LINE];
    spdl_error no_error;   /* by create */
    uint64_t seen_runnable_ns; /* what snapshots have reported; written by them */
    uint32_t process_lock;     /* the rest: written under it */
    spdl__process_stats process_first, process_last;
    uint64_t consumer_runnable_ns;
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

/* --- what can run --- */

/* The number of the result that the next take promises. */
SPDL__INLINE uint64_t spdl__row_at(const spdl__node *node, uint64_t word) {
    if (node->at_put) return spdl__load_relaxed(&node->out.tail);
    return spdl__head(word) + spdl__load_relaxed(&node->base);
}

/* Results whose number is below this have room. A row with SPDL_AGAIN in completion order is called
   while fewer than buffer_size results lie there: each call inside may put one more, so there are
   slots for buffer_size + concurrency. */
SPDL__INLINE uint64_t spdl__row_until(const spdl__node *node) {
    const uint64_t calls = node->at_put && !node->serial ? 0 : spdl__load_relaxed32(&node->limit);
    return spdl__edge_until(&node->out, spdl__load_relaxed(&node->out.buffer_size) + calls);
}

/* Whether a path has a slot for one more. Holes take slots, and are not among those that wait. */
SPDL__PRIVATE bool spdl__path_has_slot(const spdl__edge *edge) {
    const uint64_t head = spdl__head(spdl__load(&edge->word)); /* as in edge_until */
    return (int64_t)(head + edge->window - spdl__load_relaxed(&edge->tail)) > 0;
}

/* Of a branch: whether one more result may be routed, as fewer wait than may; or a mark go down
   every path. */
SPDL__PRIVATE bool spdl__row_routes(const spdl_pipeline *p, const spdl__node *node) {
    uint64_t waiting = 0;
    int i;
    for (i = 0; i < node->paths; ++i) {
        const spdl__edge *edge = spdl__path_edge(p, node, i);
        const uint64_t until = spdl__edge_until(edge, edge->buffer_size);
        const int64_t over = (int64_t)(spdl__load_relaxed(&edge->tail) - until);
        if (over > 0) waiting += (uint64_t)over;
        if (!spdl__path_has_slot(edge)) return false;
    }
    return waiting < (uint64_t)node->row.buffer_size;
}

/* For how many more results there is room; of a branch 1, if there is any. Exact for the thread
   that is alone in a row; else a guess. */
SPDL__PRIVATE uint64_t spdl__row_room(const spdl_pipeline *p, const spdl__node *node,
                                      uint64_t word) {
    int64_t room;
    if (node->row.kind == SPDL_KIND_BRANCH) return spdl__row_routes(p, node);
    room = (int64_t)(spdl__row_until(node) - spdl__row_at(node, word));
    return room > 0 ? (uint64_t)room : 0;
}

/* Whether a hole at the head can be passed: it needs a slot where it is put, and no place. */
SPDL__PRIVATE bool spdl__row_passes_hole(const spdl_pipeline *p, const spdl__node *node,
                                         uint64_t word) {
    const uint64_t head = spdl__head(spdl__load(&node->out.word));
    if (node->row.kind == SPDL_KIND_BRANCH) /* it goes down the first one */
        return !node->holes || spdl__path_has_slot(spdl__path_edge(p, node, 0));
    return !node->holes || (int64_t)(head + node->out.window - spdl__row_at(node, word)) > 0;
}

/* Whether a step of a merge would do something. (>>merge-impl) */
SPDL__PRIVATE bool spdl__merge_runnable(const spdl_pipeline *p, const spdl__node *node);

/* Any thread: whether a step of this row would do something, its word being `word`. */
SPDL__PRIVATE bool spdl__row_has_work(const spdl_pipeline *p, const spdl__node *node,
                                      uint64_t word) {
    const uint32_t active = (uint32_t)(word & SPDL__ACTIVE);
    const spdl_kind kind = node->row.kind;
    const spdl__slot *slot;
    unsigned tag;
    if (node->own_thread || kind == SPDL_KIND_PATH || kind == SPDL_KIND_FEED) return false;
    if (node->parked != NULL) {
        if (spdl__load_relaxed32(&node->parked_done.count) > 0) return true;
        if (spdl__load_relaxed32(&node->parked_waiting.count) > 0 && !(word & SPDL__SHUT) &&
            spdl__row_room(p, node, word))
            return true;
    }
    if ((word & SPDL__BUSY) >= spdl__load_relaxed32(&node->limit)) return false;
    if (kind == SPDL_KIND_MERGE) return spdl__merge_runnable(p, node);
    if (node->in == NULL) return spdl__row_room(p, node, word) > 0;
    slot = spdl__edge_slot(node->in, spdl__head(word));
    if (!spdl__slot_has(slot, spdl__head(word))) return false;
    tag = spdl__slot_tag(slot);
    if (tag == SPDL__HOLE) return spdl__row_passes_hole(p, node, word);
    return (tag < SPDL__HOLE || active == 0) && spdl__row_room(p, node, word);
}

SPDL__PRIVATE bool spdl__row_runnable(const spdl_pipeline *p, const spdl__node *node) {
    return spdl__row_has_work(p, node, spdl__load(node->word));
}

/* Whether this is a thread of the pool: guests, the producer and a consumer are not. (The producer
   may outlive the pool.) */
SPDL__PRIVATE bool spdl__is_pool_thread(const spdl_pipeline *p, int worker) {
    if (p->producer != NULL && worker == p->workers - 1) return false;
    return p->pool != NULL && worker < p->pool->desc.workers;
}

/* Destroy asks for it: this thread of the pool has an init that was not undone yet. */
SPDL__PRIVATE bool spdl__task_leaves(const spdl_pipeline *p, int worker) {
    return spdl__is_pool_thread(p, worker) && p->task[worker].inits != 0;
}

/* Whether `worker`, or with -1 any, would find a step to do. */
SPDL__PRIVATE bool spdl__pipeline_runnable(void *self, int worker) {
    const spdl_pipeline *p = (const spdl_pipeline *)self;
    int i;
    if (p->has_hooks && spdl__load32(&p->leaving) &&
        (worker >= 0 ? spdl__task_leaves(p, worker)
                     : spdl__load32(&p->left) < spdl__load32(&p->joined)))
        return true;
    if (spdl__load32(&p->stopping)) return false;
    for (i = p->count - 1; i >= 0; --i)
        if (spdl__row_runnable(p, &p->node[i])) return true;
    return false;
}

/* --- who is woken --- */

/* The wake rule in a pipeline. Each of these is a read-modify-write, or has a full barrier after
   it; then the thread looks whether somebody sleeps: taking an item (one input less: room for the
   row before; and the put before it: an input for the row after); leaving a row (a place in it);
   passing a mark; the consumer's take; a push; spdl_complete; a new concurrency; a failure. After
   the first take of a sitting a worker looks at everything its pool could do, as it may have been
   woken for something else, and after the others at its own row and those beside it. After it has
   left it looks for work itself, which covers all rows. A consumer's take from a large buffer looks
   at the last row only while no more than half of it is on the way (a low watermark: a worker that
   is woken makes several items before it sleeps again); a consumer that is about to sleep, or asks
   for the stats, looks without that. */

/* After something the consumer may sleep for, and a full barrier. */
SPDL__PRIVATE void spdl__wake_consumer(spdl_pipeline *p) {
    uint32_t asleep = 1;
    if (spdl__load_relaxed32(&p->waiting) != 0 && spdl__cas32(&p->waiting, &asleep, 0))
        spdl__os_event_wake(&p->fed, 1);
}

/* Whether a sleeping consumer should look: an item or a mark lies there, or a hole that has
   something behind it, or that keeps the last row from going on. */
SPDL__PRIVATE bool spdl__wake_sink_has(const spdl_pipeline *p) {
    const spdl__edge *sink = p->sink;
    const uint64_t head = spdl__head(spdl__load(&sink->word));
    if (!spdl__edge_ready(sink, head)) return false;
    if (spdl__slot_tag(spdl__edge_slot(sink, head)) != SPDL__HOLE) return true;
    return spdl__edge_ready(sink, head + 1) ||
           !spdl__row_room(p, p->last, spdl__load(p->last->word));
}

/* The producer waits, and the row after the first has taken. */
SPDL__PRIVATE void spdl__wake_producer(spdl_pipeline *p) {
    uint32_t one = 1;
    if (spdl__load_relaxed32(&p->producer_waits) && spdl__cas32(&p->producer_waits, &one, 0))
        spdl__os_event_wake(&p->room, 1);
}

/* Wakes a worker if one of these rows can run; if none sleeps, the consumer that works. */
SPDL__PRIVATE void spdl__wake_rows(spdl_pipeline *p, uint32_t rows) {
    const bool sleepers = p->pool != NULL && spdl__pool_has_sleepers(p->pool);
    const bool helps = p->works_ns != 0 && spdl__load_relaxed32(&p->waiting) != 0;
    int i;
    if (!sleepers && !helps) return;
    for (i = p->count - 1; i >= 0; --i) {
        if (!(rows >> i & 1) || !spdl__row_runnable(p, &p->node[i])) continue;
        if (sleepers) spdl__pool_wake_one(p->pool);
        else spdl__wake_consumer(p);
        return;
    }
}

SPDL__NOINLINE void spdl__wake_look(spdl_pipeline *p, const spdl__node *node, uint32_t rows,
                                    bool all) {
    spdl__client_stir(p->beacon, p->bit);
    if (!node->at_end && p->works_ns == 0 && p->pool != NULL && !spdl__pool_has_sleepers(p->pool))
        return; /* the consumer or the producer waits, for other rows */
    if (spdl__load_relaxed32(&p->waiting) != 0 && /* the consumer sleeps */
        (p->pool == NULL || (node == p->last && spdl__wake_sink_has(p))))
        spdl__wake_consumer(p);
    if (node->at_end) spdl__wake_producer(p);
    if (spdl__load32(&p->stopping)) return;
    if (!all) {
        spdl__wake_rows(p, rows);
    } else if (p->pool != NULL && spdl__pool_has_sleepers(p->pool)) {
        if (spdl__pool_runnable(p->pool, -1, &p->client)) spdl__pool_wake_one(p->pool);
    } else {
        spdl__wake_rows(p, UINT32_MAX);
    }
}

/* Whether somebody sleeps, or the pipeline is taken for quiet. */
SPDL__INLINE bool spdl__wake_wanted(const spdl__beacon *beacon, uint64_t bit) {
    return spdl__load_relaxed32(&beacon->sleepers) != 0 ||
           (spdl__load_relaxed(&beacon->quiet) & bit) != 0;
}

/* After a read-modify-write by which this row has changed, before anything that may take long.
   Looks at the consumer, the producer and `rows`, or with `all` at everything the pool could do. */
SPDL__INLINE void spdl__wake_hint(spdl_pipeline *p, const spdl__node *node, uint32_t rows,
                                  bool all) {
    spdl__barrier_after_rmw(); /* pairs with those in pool_park, next_sleep and push_wait */
    if (SPDL__UNLIKELY(spdl__wake_wanted(p->beacon, p->bit))) spdl__wake_look(p, node, rows, all);
}

/* From the consumer, instead of a sleep or after it: what the watermark has passed over. */
SPDL__PRIVATE void spdl__wake_passed(spdl_pipeline *p) {
    spdl__full_barrier();
    spdl__client_stir(p->beacon, p->bit);
    spdl__wake_rows(p, (uint32_t)1 << p->last->index);
}

/* From a thread that will not look for work itself: this row has changed, and those beside it. */
SPDL__PRIVATE void spdl__wake_changed(spdl_pipeline *p, const spdl__node *node) {
    spdl__full_barrier();
    spdl__wake_look(p, node, node->near, false);
}

SPDL__PRIVATE void spdl__wake_all(spdl_pipeline *p) {
    spdl__full_barrier();
    spdl__wake_look(p, p->last, UINT32_MAX, false);
    spdl__wake_producer(p);
}

/* ============================================================================================= */
/* >>position-impl
   Where a run goes on (>>state-impl). Results are counted where they pass one point of the flow in
   an order that is always the same: the first SPDL_BATCH, the row that marks, or else the sink. A
   run whose source starts at a later item passes the same results there as this one, if no row in
   front of that point holds anything of earlier items. So a mark is {item, results}: start the
   source at that item, and leave out so many of the results that pass. Without .again in front of
   the point a mark is {next item, 0}; with it, the item of the last result, and how many it had.

   What the consumer takes carries the mark to it: up to the row that marks the range of a slot is
   the source's number of the item, from there on item << SPDL__SPAN_BITS | results. If rows after
   it make several results of a batch, it is the mark before the batch, which is made again, and the
   consumer counts what comes of it. A table with .flush, or batches of batches, makes the epoch
   again.

   Threads: the mark of a row belongs to the thread that is inside alone, that of the sink and `at`
            to the consumer. Whoever takes a slot has what was written before it was put. */

/* A result of the source's item `item` passes. */
SPDL__INLINE void spdl__mark_pass(spdl__mark *mark, uint64_t item, bool many) {
    if (!many) {
        mark->item = item + 1;
    } else if (item != mark->item) {
        mark->item = item;
        mark->results = 1;
    } else {
        ++mark->results;
    }
}

SPDL__INLINE uint64_t spdl__mark_range(const spdl__mark *mark) {
    return mark->item << SPDL__SPAN_BITS | spdl__min(mark->results, SPDL__SPAN_MAX);
}

/* A run begins, or an epoch. */
SPDL__PRIVATE void spdl__mark_begin(spdl__mark *mark, uint64_t item) {
    mark->item = item;
    mark->results = 0;
}

/* The consumer has taken this, or dropped it. */
SPDL__INLINE void spdl__position_watch(spdl_pipeline *p, const spdl__item *got) {
    if (p->many || p->remakes) spdl__mark_pass(&p->mark, got->range, true);
}

/* And the end of its epoch. */
SPDL__PRIVATE void spdl__position_epoch(spdl_pipeline *p) {
    const uint64_t epoch = p->at.epoch + 1;
    memset(&p->at, 0, sizeof(p->at));
    p->at.epoch = epoch;
    p->begun = p->delivered;
    spdl__mark_begin(&p->mark, p->remakes ? SPDL__NEVER : 0);
}

/* A run begins. */
SPDL__PRIVATE void spdl__position_begin(spdl_pipeline *p, const spdl__position *at) {
    p->at = *at;
    p->begun = p->delivered;
    p->drops = p->replays || p->marks != NULL ? at->drops : at->results;
    if (p->marks != NULL) p->marks->skip = at->results;
    spdl__mark_begin(&p->mark, p->remakes ? SPDL__NEVER : at->source);
}

SPDL_API uint64_t spdl_pipeline_epoch(const spdl_pipeline *p) { return p->at.epoch; }

/* The consumer, between calls of next: where it is. Why there is no position, or NULL. */
SPDL__PRIVATE const char *spdl__position_read(const spdl_pipeline *p, spdl__position *at) {
    const uint64_t taken = p->delivered - p->begun, range = p->last_item.range;
    *at = p->at;
    if (p->unsaved != NULL) return p->unsaved;
    at->delivered += taken;
    if (taken == 0) return NULL;
    if (p->replays) {
        at->drops = at->delivered;
    } else if (p->marks != NULL) {
        at->number = (p->last_item.origin >> 8) + !p->remakes;
        at->source = range >> SPDL__SPAN_BITS;
        at->results = range & SPDL__SPAN_MAX;
        at->drops = p->remakes ? p->mark.results : 0;
    } else {
        at->source = p->many ? p->mark.item : range + 1;
        at->results = p->many ? p->mark.results : 0;
    }
    if (spdl__load_relaxed(&p->node[0].made) >> (64 - SPDL__SPAN_BITS) != 0)
        return "an epoch has more than 2^40 items";
    return at->results >= SPDL__SPAN_MAX ? "one item has more than 16777214 results" : NULL;
}

/* What is the same for all tables that have positions in common. */
SPDL__COLD uint32_t spdl__position_table(const spdl_pipeline *p) {
    uint32_t hash = 2166136261u;
    int i, k;
    for (i = 0; i < p->count; ++i) {
        const spdl_stage *row = &p->node[i].row;
        const int says[] = { (int)row->kind, row->again, row->flush, row->continuous,
                             p->replays || p->remakes ? row->size * 2 + row->drop_last : 0 };
        for (k = 0; k < (int)(sizeof(says) / sizeof(says[0])); ++k)
            hash = (hash ^ (uint32_t)says[k]) * 16777619u; /* FNV-1a */
    }
    return hash;
}

/* Which row marks, and what else a position of this table depends on. */
SPDL__COLD void spdl__position_plan(spdl_pipeline *p) {
    int i, k, depth = 0;
    bool disorder = false;
    for (i = 0; i < p->count; ++i) {
        spdl__node *node = &p->node[i];
        const spdl_stage *row = &node->row;
        const bool batch = row->kind == SPDL_KIND_BATCH;
        depth += (row->kind == SPDL_KIND_BRANCH) - (row->kind == SPDL_KIND_MERGE);
        for (k = 0; k < i; ++k)
            if ((node->above >> k & 1) && p->node[k].row.kind == SPDL_KIND_BATCH)
                node->in_batches = true;
        if (row->output_order == SPDL_ORDER_COMPLETION &&
            (!node->serial || row->kind == SPDL_KIND_MERGE))
            disorder = true;
        if (batch && p->marks == NULL && depth == 0) p->marks = node;
        else if (batch || row->flush) p->replays = true;
        if (p->marks != NULL) p->remakes = p->remakes || row->again;
        else p->many = p->many || row->again;
        if (row->next != NULL) p->unsaved = "SPDL_FROM cannot be asked for one of its items";
        if (row->kind == SPDL_KIND_FEED) p->unsaved = "its items are pushed (SPDL_FEED)";
    }
    if (disorder)
        p->unsaved = "its order is not always the same: a row has completion order, or a merge "
                     "takes what is ready";
    if (p->tokens != NULL) p->unsaved = "its doctor replays items";
    if (p->replays || p->unsaved != NULL) {
        p->marks = NULL;
        p->many = p->remakes = false;
    }
    p->table = spdl__position_table(p);
    spdl__mark_begin(&p->mark, p->remakes ? SPDL__NEVER : 0);
}

/* ============================================================================================= */
/* >>flow-impl
   An item's way through a row, in the order of its parts: put, fail, what a call may ask for, call,
   settle, take, leave, and the loop that does them (flow_sit).

   Threads: the worker (or with workers = 0 the consumer) whose task it is. User functions run here,
   never under a lock. An input is the call's until the function returns, and the library's again
   after that unless it was taken; a result is the library's. */

#define SPDL__NULLS 100 /* with SPDL_DEBUG: so many in a row, and nothing before, are odd */
#define SPDL__SITTING_NS 40000 /* how long a worker stays in a row before it looks downstream */
#define SPDL__SITTING_ITEMS 32 /* and how many calls it makes there at most */
#define SPDL__TIMED_NS 1000    /* calls that take as long on average are timed one by one */

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

/* --- the word --- */

/* The word moves by `change`, which gives back a place. Pairs with the acquire of the word by the
   thread that enters next, passes a mark or stops: all that was put, and every plain field, is
   there. */
SPDL__INLINE void spdl__word_move(spdl_pipeline *p, spdl__node *node, uint64_t change) {
    const uint64_t word = spdl__add(node->word, change) + change;
    if (SPDL__UNLIKELY((word & SPDL__SHUT) != 0 && (word & SPDL__ACTIVE) == 0) &&
        spdl__load32(&p->stopping))
        spdl__os_event_wake(&p->quiet, SPDL__ALL);
}

/* Nobody enters these rows any more. */
SPDL__PRIVATE void spdl__word_shut(spdl_pipeline *p, uint32_t rows) {
    int i;
    for (i = 0; i < p->count; ++i)
        if (rows >> i & 1) (void)spdl__or(p->node[i].word, SPDL__SHUT);
    spdl__full_barrier();
    spdl__wake_producer(p);
}

/* --- put --- */

/* The ticket of a result, or of what takes its place. */
SPDL__INLINE uint64_t spdl__put_ticket(spdl__node *node, uint64_t promised) {
    spdl__edge *edge = &node->out;
    if (node->by_ticket) return promised;
    if (!node->serial) return spdl__add(&edge->tail, 1);
    promised = spdl__load_relaxed(&edge->tail); /* one call at a time: its place is enough */
    spdl__store_relaxed(&edge->tail, promised + 1);
    return promised;
}

/* Puts one result. What follows, taking the next item or leaving, looks whether somebody waits. */
SPDL__INLINE void spdl__put(spdl__node *node, uint64_t promised, const spdl__item *what,
                            uint64_t now) {
    spdl__put_at(&node->out, spdl__put_ticket(node, promised), what, now);
}

/* A branch: puts one thing into a path. */
SPDL__PRIVATE void spdl__put_path(const spdl_pipeline *p, spdl__node *node, int path,
                                  const spdl__item *what, uint64_t now) {
    spdl__edge *edge = spdl__path_edge(p, node, path);
    const uint64_t ticket = spdl__load_relaxed(&edge->tail);
    spdl__store_relaxed(&edge->tail, ticket + 1);
    spdl__put_at(edge, ticket, what, now);
}

/* A branch whose merge is in input order: where the next result is found. There is room: `turns`
   has an entry for each slot and call on the way to the merge. */
SPDL__PRIVATE void spdl__put_turn(spdl__node *node, unsigned turn) {
    if (node->turns == NULL) return;
    spdl__store_relaxed32(&node->turns[node->turns_put & node->turns_mask], turn);
    spdl__store(&node->turns_put, node->turns_put + 1); /* pairs with merge_look */
}

/* An input made no result: its place among those that wait is another's. */
SPDL__PRIVATE void spdl__put_nothing(const spdl_pipeline *p, spdl__node *node, uint64_t promised,
                                     uint64_t now) {
    const spdl__item hole = { NULL, SPDL__HOLE, 0 };
    if (node->serial && !node->holes) return; /* no place was promised */
    if (node->row.kind == SPDL_KIND_BRANCH) {
        spdl__put_turn(node, 0);
        spdl__add(&spdl__path_edge(p, node, 0)->refunds, 1);
        spdl__put_path(p, node, 0, &hole, now);
        return;
    }
    if (!node->at_put || node->holes) spdl__add(&node->out.refunds, 1);
    if (node->holes) spdl__put(node, promised, &hole, now);
}

/* A mark, in the place of a result; from a branch down every path. */
SPDL__PRIVATE void spdl__put_mark(spdl_pipeline *p, spdl__node *node, uint64_t promised,
                                  const spdl__item *mark, uint64_t now) {
    int i;
    if (node->row.kind != SPDL_KIND_BRANCH) {
        spdl__put(node, promised, mark, now);
        return;
    }
    spdl__put_turn(node, SPDL__TURN_MARK);
    for (i = 0; i < node->paths; ++i) spdl__put_path(p, node, i, mark, now);
}

/* By the thread that is inside alone: the next epoch begins here. `next`: the ticket of its first
   result, if that is promised. */
SPDL__PRIVATE void spdl__row_epoch(spdl__node *node, uint64_t epoch, uint64_t next) {
    node->flushed = false;
    node->number = node->number_first = 0;
    node->mark.item = node->mark.results = 0;
    node->first = node->by_ticket ? next : spdl__load_relaxed(&node->out.tail);
    spdl__store_relaxed(&node->epoch, epoch);
}

/* --- fail --- */

/* What is known of a failed call. */
SPDL__PRIVATE void spdl__fail_error(const spdl__node *node, uint64_t item, spdl_result result,
                                    const char *text, spdl_error *error) {
    spdl__error_set(error, result, "stage %d '%s', item %llu: %s", node->index, node->name,
                    (spdl__llu)item, text);
    error->stage = node->index;
    error->item = item;
    spdl__name_copy(error->stage_name, node->name);
}

/* A call inside of the row fails for good: FAIL is put in the place of its result, and nobody
   enters this row and those that feed it. Of several failures of a row the record is that of the
   first in order: so a table in input order without a budget fails the same way at any number of
   workers. */
SPDL__PRIVATE void spdl__fail(spdl_pipeline *p, spdl__node *node, uint64_t promised, uint64_t item,
                              spdl_result result, const char *text) {
    const uint32_t row = (uint32_t)1 << node->index;
    const bool branch = node->row.kind == SPDL_KIND_BRANCH;
    const uint64_t ticket = branch ? 0 : spdl__put_ticket(node, promised), now = spdl_time_ns();
    spdl__item mark = { NULL, 0, 0 };
    spdl_error error;
    bool first;
    spdl__fail_error(node, item, result, text, &error);
    spdl__lock(&p->error_lock, &p->locks);
    first = !(p->failed & row) || ticket < node->fail_ticket;
    if (first) {
        node->error = error;
        node->fail_ticket = ticket;
    }
    spdl__store32(&p->failed, p->failed | row);
    spdl__unlock(&p->error_lock, &p->locks);
    if (first) spdl__log(&p->logger, SPDL_LOG_ERROR, error.text); /* not under the lock */
    mark.origin = spdl__origin((uint64_t)node->index, SPDL__FAIL);
    if (branch) spdl__put_mark(p, node, 0, &mark, now);
    else spdl__put_at(&node->out, ticket, &mark, now); /* the record is there: by the stamp */
    spdl__word_shut(p, node->above | row);
}

/* Whether one more failure is more than this stage may have. */
SPDL__PRIVATE bool spdl__fail_over_budget(spdl__node *node) {
    const uint64_t failures = spdl__add(&node->failures, 1) + 1;
    return node->row.max_failures >= 0 && failures > (uint64_t)node->row.max_failures;
}

/* The pipeline has ended, or is quiet after a stop: one line for each stage whose failures were
   tolerated. */
SPDL__COLD void spdl__fail_log(spdl_pipeline *p) {
    int i, k;
    for (i = 0; i < p->count; ++i) {
        spdl__node *node = &p->node[i];
        const uint64_t dropped = spdl__load(&node->tolerated);
        const bool items = node->in != NULL && !node->row.again; /* a call for each */
        uint64_t calls = 0;
        for (k = 0; k <= p->workers; ++k) calls += spdl__load_relaxed(&node->counters[k].tasks);
        if (spdl__exchange(&node->logged, dropped) != dropped)
            spdl__logf(&p->logger, SPDL_LOG_WARN,
                       "%llu of %llu %s of stage %d '%s' %s, the first: %s",
                       (spdl__llu)dropped, (spdl__llu)calls, items ? "items" : "calls", i,
                       node->name, items ? "were dropped" : "failed", node->first_text);
    }
}

/* --- what a call may ask for --- */

/* What spdl_buffer gave is not handed on. */
SPDL__PRIVATE void spdl__task_give_back(spdl_task *task) {
    char *buffer = (char *)task->buffer;
    task->buffer = NULL;
    if (spdl__token_row(task->pipeline, buffer) >= 0) return;
    if (buffer != NULL && task->node->places) {
        spdl__node *row = task->node + 1;
        spdl__lock(&row->place_lock, row->locks);
        task->holder->owner[(size_t)(buffer - (char *)task->holder->shown.data) /
                            row->row.item_bytes] = 0;
        spdl__unlock(&row->place_lock, row->locks);
    } else {
        spdl_buffer_free(buffer);
    }
}

/* The origin of a result; a buffer that is one is the call's no more. */
SPDL__PRIVATE uint64_t spdl__task_origin(spdl_task *task, const void *item) {
    unsigned owner = task->owner;
    if (SPDL__UNLIKELY(task->buffer != NULL) && item == task->buffer) {
        owner = spdl__token_row(task->pipeline, item) >= 0 ? SPDL__TOKEN
                : task->node->places                       ? SPDL__IN_PLACE
                                                           : SPDL__BUFFER;
        task->buffer = NULL;
    }
    return spdl__origin(task->sequence, owner);
}

SPDL__PRINTF(2, 3)
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
               "%s: not inside of a call of this stage", function);
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
                   "spdl_fail: not inside of a call of this stage: %s", text);
    return SPDL_E_STAGE;
}

SPDL_API void *spdl_ctx(const spdl_task *task) { return task->node->row.ctx; }

SPDL_API void *spdl_local(const spdl_task *task) {
    const spdl_pipeline *p = task->pipeline;
    return p->local != NULL ? p->local[task->worker * p->count + task->node->index] : NULL;
}

SPDL_API uint64_t spdl_sequence(const spdl_task *task) { return task->sequence; }

SPDL_API int spdl__task_worker(const spdl_task *task) {
    return task->node->own_thread ? 0 : task->worker;
}

SPDL_API bool spdl_stopping(const spdl_task *task) {
    return spdl__load32(&task->pipeline->stopping) != 0;
}

SPDL_API void spdl_take(spdl_task *task) {
    if (spdl__task_allows(task, "spdl_take")) task->taken = task->in.item != NULL;
}

SPDL_API bool spdl_flushing(const spdl_task *task) { return task->flushing; }

SPDL_API uint64_t spdl_epoch(const spdl_task *task) {
    return spdl__load_relaxed(&task->node->epoch);
}

SPDL_API spdl_result spdl_route(spdl_task *task, int path) {
    if (!spdl__task_allows(task, "spdl_route")) return SPDL_E_INVALID;
    if (task->node->row.kind != SPDL_KIND_BRANCH)
        return spdl__task_row_error(task, "spdl_route in a stage that is no SPDL_BRANCH");
    if (path < 0 || path >= task->node->paths)
        return spdl__task_call_error(task, spdl__task_fail(task, "path %d, but there are %d paths",
                                                           path, task->node->paths));
    task->path = (uint8_t)path;
    return SPDL_OK;
}

/* --- call --- */

/* The row's init on this worker, before its first call there. */
SPDL__COLD spdl_result spdl__call_init(spdl_task *task) {
    spdl_pipeline *p = task->pipeline;
    const spdl__node *node = task->node;
    const uint32_t bit = (uint32_t)1 << node->index;
    spdl_result result;
    if ((task->inits & bit) != 0) return SPDL_OK;
    result = node->row.init(node->row.ctx, spdl__task_worker(task),
                            &p->local[task->worker * p->count + node->index]);
    if (result != SPDL_OK) {
        task->row_error = true; /* no budget is for that */
        (void)spdl__task_fail(task, "init on worker %d failed: %s", spdl__task_worker(task),
                              spdl_result_text(result));
        return result < 0 ? result : SPDL_E_STAGE;
    }
    if (task->inits == 0 && spdl__is_pool_thread(p, task->worker)) spdl__add32(&p->joined, 1);
    task->inits |= bit;
    return SPDL_OK;
}

/* After a call that did not look at what spdl_route or so returned: items are not to be lost in
   silence. A call that goes on elsewhere is judged by its completion. */
SPDL__NOINLINE spdl_result spdl__call_misused(spdl_task *task, spdl_result result, void *out) {
    const spdl_stage *row = &task->node->row;
    const bool again = result == SPDL_AGAIN && row->again;
    if (result == SPDL_PENDING && row->deferred) {
        spdl__logf(&task->pipeline->logger, SPDL_LOG_ERROR, "stage %d '%s', item %llu: %s",
                   task->node->index, task->node->name, (spdl__llu)task->sequence, task->text);
        task->call_error = task->row_error = false;
    }
    if (result != SPDL_OK && result != SPDL_SKIP && result != SPDL_END && !again) return result;
    if (result == SPDL_OK || again) {
        if (out == task->in.item) /* its own again, taken or not */
            task->taken = false;
        else if (out != task->buffer)
            spdl__item_free(task->pipeline, out, spdl__origin(task->sequence, task->owner));
    }
    return SPDL_E_INVALID;
}

/* Calls the function. The row may have anything. */
SPDL__NOINLINE spdl_result spdl__call(spdl_task *task, void **out) {
    const spdl_profiler *profiler = &task->pipeline->profiler;
    const spdl__node *node = task->node;
    spdl_result result = SPDL_OK;
    *out = NULL;
    task->taken = task->call_error = task->row_error = task->cut_short = false;
    task->path = 0;
    task->owner = (uint8_t)node->index;
    task->text[0] = '\0';
    if (node->row.init != NULL) result = spdl__call_init(task);
    if (result != SPDL_OK) return result;
    spdl__store_relaxed32(&task->live, 1);
    if (!node->gathers) {
        SPDL__PROBE(task_begin, node->row.name, task->sequence);
        spdl__profile(profiler, SPDL_EVENT_TASK_BEGIN, node->row.name, task->sequence);
    }
    result = spdl__load_fn(&node->row.fn->call)(task, task->in.item, out);
    if (!node->gathers) {
        spdl__profile(profiler, SPDL_EVENT_TASK_END, node->row.name, task->sequence);
        SPDL__PROBE(task_end, node->row.name, task->sequence);
    }
    spdl__store_relaxed32(&task->live, 0);
    if (SPDL__UNLIKELY(task->call_error)) result = spdl__call_misused(task, result, *out);
    return result;
}

/* In a row with .flush, before its first call after a load: what it has gathered is freed. */
SPDL__COLD void spdl__call_shed(spdl_task *task) {
    spdl__node *node = task->node;
    spdl__parked *parked = task->parked, none;
    const spdl__item in = task->in;
    const bool flushing = task->flushing;
    spdl_result result;
    void *out;
    node->sheds = false;
    memset(&none, 0, sizeof(none));
    if (node->row.again) task->parked = &none;
    task->flushing = true;
    task->in.item = NULL;
    task->in.origin = SPDL__HOLE;
    do {
        result = spdl__call(task, &out);
        if ((result == SPDL_OK || result == SPDL_AGAIN) && out != task->buffer)
            spdl__item_free(task->pipeline, out, spdl__origin(0, task->owner));
        spdl__task_give_back(task);
    } while (result == SPDL_AGAIN && node->row.again);
    if (none.user != NULL && node->row.free_state != NULL) node->row.free_state(none.user);
    task->parked = parked;
    task->flushing = flushing;
    task->in = in;
}

/* A source with a thread of its own is about to be called: not after a stop. Either this exchange
   is seen by destroy, which may abandon the call then, or the stop is seen here: both threads have
   a full barrier between their store and their load. (tests/model/leave.pml) */
SPDL__PRIVATE bool spdl__call_may_block(spdl_task *task) {
    spdl__node *node = task->node;
    (void)spdl__exchange32(&node->calling, 1);
    spdl__full_barrier();
    SPDL_TEST_POINT("source about to block");
    if (!spdl__load32(&task->pipeline->stopping)) return true;
    task->gone = spdl__exchange32(&node->calling, 0) == SPDL__ABANDONED;
    return false;
}

/* Such a call has returned. False: destroy has gone on without it, and what it made is freed. */
SPDL__PRIVATE bool spdl__call_is_back(spdl_task *task, spdl_result result, void *out) {
    spdl__node *node = task->node;
    if (spdl__exchange32(&node->calling, 0) != SPDL__ABANDONED) return true;
    if (result == SPDL_OK && out != task->buffer) /* else it is given back */
        spdl__item_free(task->pipeline, out, spdl__origin(task->sequence, task->owner));
    spdl__task_give_back(task);
    return false;
}

/* --- settle --- */

/* Where the function gave no reason. */
SPDL__PRIVATE void spdl__settle_explain(spdl_task *task, spdl_result result) {
    const char *text = spdl_result_text(result);
    if (task->text[0] != '\0') return;
    if (result == SPDL_PENDING && !task->node->row.deferred)
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
SPDL__PRIVATE bool spdl__settle_failed(spdl_task *task, spdl__counters *counters,
                                       spdl_result result) {
    spdl_pipeline *p = task->pipeline;
    spdl__node *node = task->node;
    const bool over = spdl__fail_over_budget(node);
    char text[SPDL_TEXT_BYTES];
    spdl__settle_explain(task, result);
    if (result >= 0) result = SPDL_E_STAGE;
    spdl__count(&counters->failures, 1);
    if (over || task->row_error) {
        (void)snprintf(text, sizeof(text), "%.470s%s", task->text,
                       over && node->row.max_failures > 0 ? " (one more than max_failures)" : "");
        spdl__fail(p, node, task->ticket, task->sequence, result, text);
        return true;
    }
    if (spdl__add(&node->tolerated, 1) == 0)
        (void)snprintf(node->first_text, sizeof(node->first_text), "item %llu: %.220s",
                       (spdl__llu)task->sequence, task->text);
    if (p->logger.log_fn != NULL)
        spdl__logf(&p->logger, SPDL_LOG_INFO, "stage %d '%s', item %llu: %.300s (tolerated)",
                   node->index, node->name, (spdl__llu)task->sequence, task->text);
    return false;
}

/* A call failed, and its row has .on_drop: the input is still there, unless the call took it. */
SPDL__NOINLINE void spdl__settle_on_drop(spdl_task *task, spdl_result result) {
    const spdl_stage *row = &task->node->row;
    /* an earlier call for the same input may have taken it, too (SPDL_AGAIN) */
    const bool is_there = !task->taken && spdl__origin_tag(task->in.origin) != SPDL__HOLE;
    spdl_error error;
    if (result == SPDL_SKIP || task->cut_short) return;
    spdl__settle_explain(task, result);
    spdl__fail_error(task->node, task->sequence, result < 0 ? result : SPDL_E_STAGE, task->text,
                     &error);
    row->on_drop(row->ctx, is_there ? task->in.item : NULL, &error);
}

/* A call that made no result. False when it was the failure that ends the pipeline. */
SPDL__NOINLINE bool spdl__settle_nothing(spdl_task *task, spdl__counters *counters,
                                         spdl_result result, uint64_t now) {
    spdl__node *node = task->node;
    const bool handed_on = task->parked != NULL && task->parked->handed_on > 0;
    bool fatal = false;
    if (task->cut_short)
        spdl__count(&counters->freed, spdl__origin_tag(task->in.origin) != SPDL__HOLE);
    else if (result == SPDL_SKIP)
        spdl__count(&counters->skips, !handed_on && !node->gathers);
    else
        fatal = spdl__settle_failed(task, counters, result);
    /* after one that a stop has cut short a ticket stays unfilled: nothing after it is delivered */
    if (!fatal && !task->cut_short) spdl__put_nothing(task->pipeline, node, task->ticket, now);
    return !fatal;
}

/* With SPDL_DEBUG: a result that is handed on. */
SPDL__NOINLINE void spdl__settle_debug(spdl_task *task, const void *out) {
    spdl__node *node = task->node;
    const char *type = node->row.fn->out_type;
    if (out != NULL) spdl__store_relaxed(&node->nulls, SPDL__NULLS);
    if (out != NULL || (node->in != NULL && task->in.item == NULL) ||
        (type != NULL && strcmp(type, "void") == 0))
        return;
    if (spdl__load_relaxed(&node->nulls) < SPDL__NULLS &&
        spdl__add(&node->nulls, 1) == SPDL__NULLS - 1)
        spdl__logf(&task->pipeline->logger, SPDL_LOG_WARN,
                   "stage %d '%s' has handed on nothing but NULL, %d times: is *out set?",
                   node->index, node->name, SPDL__NULLS);
}

/* One result goes on. */
SPDL__PRIVATE void spdl__settle_put(spdl_task *task, const spdl__item *what, uint64_t now) {
    spdl__node *node = task->node;
    if (node->row.kind != SPDL_KIND_BRANCH) {
        spdl__put(node, task->ticket, what, now);
        return;
    }
    spdl__put_turn(node, task->path);
    spdl__put_path(task->pipeline, node, task->path, what, now);
}

/* After a call: the input is destroyed or handed on, the result is put. False when the call was the
   failure that ends the pipeline: nothing more is to be called. */
SPDL__NOINLINE bool spdl__settle(spdl_task *task, spdl__counters *counters, spdl_result result,
                                 void *out, uint64_t now) {
    spdl__node *node = task->node;
    spdl__item what = task->in;
    bool goes_on = true;
    if (SPDL__DEBUGS && result == SPDL_OK && !node->row.again && !node->gathers)
        spdl__settle_debug(task, out);
    if (result != SPDL_OK || out != what.item || spdl__origin_tag(what.origin) == SPDL__HOLE) {
        if (result != SPDL_OK && node->row.on_drop != NULL)
            spdl__settle_on_drop(task, result); /* user code */
        if (what.item != NULL && !task->taken)
            spdl__item_free(task->pipeline, what.item, what.origin);
        what.origin = result == SPDL_OK ? spdl__task_origin(task, out) : 0;
        what.item = out;
        what.range = task->in.range;
        if (result == SPDL_OK) spdl__count(&counters->made, 1);
    } /* else it is passed on */
    if (task->buffer != NULL) spdl__task_give_back(task);
    if (result != SPDL_OK) goes_on = spdl__settle_nothing(task, counters, result, now);
    else spdl__settle_put(task, &what, now);
    return goes_on;
}

/* --- calls that go on later ---
   Each has a place in its row from the first call of its function until it
   is over, and counts as a call inside of the row all that time.

   SPDL_AGAIN. The function hands on an item and is called again, with the same input, when there is
   room for the next: by the worker at hand, or WAITING by whoever comes. Only in rows whose results
   take their ticket when they are put.

   SPDL_PENDING. spdl_defer arms the place and gives out its number. Then either the function
   returns PENDING first, and spdl_complete makes the call DONE, or spdl_complete comes first
   (EARLY). A worker settles a call that is DONE, in a sitting, as any other: no user code runs in
   spdl_complete. The generation tells a number that is dead from one that lives.
   (tests/model/parked.pml)

   In rows that are shut, calls that wait for room are dropped by a stop, a rewind or destroy; those
   that are DONE are still settled: in input order they may come before the failure.

   Threads: states and lists are under the row's parked_lock, which is held for some instructions.
            The rest of a place belongs to the worker that has the call, or to spdl_complete while
            it is ARMED. */

/* Under the lock. */
SPDL__PRIVATE void spdl__parked_add(spdl__node *node, spdl__parked_list *list, uint32_t place) {
    node->parked[place].next = 0;
    if (list->count == 0)
        list->first = place + 1;
    else
        node->parked[list->last - 1].next = place + 1;
    list->last = place + 1;
    spdl__store_relaxed32(&list->count, list->count + 1);
}

/* The first of a list, RUNNING; NULL: it is empty. */
SPDL__PRIVATE spdl__parked *spdl__parked_pop(spdl__node *node, spdl__parked_list *list) {
    spdl__parked *call = NULL;
    if (spdl__load_relaxed32(&list->count) == 0) return NULL;
    spdl__lock(&node->parked_lock, node->locks);
    if (list->count > 0) {
        call = &node->parked[list->first - 1];
        list->first = call->next;
        spdl__store_relaxed32(&list->count, list->count - 1);
        call->state = SPDL__PARKED_RUNNING;
    }
    spdl__unlock(&node->parked_lock, node->locks);
    return call;
}

/* Moves a call into a list. */
SPDL__PRIVATE void spdl__parked_push(spdl__node *node, spdl__parked_list *list, spdl__parked *call,
                                     spdl__parked_state state) {
    spdl__lock(&node->parked_lock, node->locks);
    call->state = state;
    if (state == SPDL__PARKED_FREE) ++call->generation;
    spdl__parked_add(node, list, (uint32_t)(call - node->parked));
    spdl__unlock(&node->parked_lock, node->locks);
}

/* A call begins. There is a place for each that may be inside. */
SPDL__PRIVATE void spdl__parked_begin(spdl_task *task) {
    spdl__parked *call = spdl__parked_pop(task->node, &task->node->parked_free);
    call->in = task->in;
    call->sequence = task->sequence;
    call->ticket = task->ticket;
    call->since = task->since;
    call->flush = task->flushing;
    call->taken = false;
    call->handed_on = 0;
    call->user = call->buffer = NULL;
    call->text[0] = '\0';
    task->parked = call;
}

/* The worker goes on with a call. */
SPDL__PRIVATE void spdl__parked_resume(spdl_task *task, spdl__parked *call) {
    task->parked = call;
    task->in = call->in;
    task->sequence = call->sequence;
    task->ticket = call->ticket;
    task->since = call->since;
    task->flushing = task->passing = call->flush;
    task->buffer = call->buffer;
    task->holder = call->holder;
    task->owner = (uint8_t)task->node->index;
    call->buffer = NULL;
}

/* --- SPDL_AGAIN --- */

SPDL_API void **spdl_call_state(spdl_task *task) {
    if (!spdl__task_allows(task, "spdl_call_state")) return &task->no_state;
    if (task->node->row.again && task->parked != NULL) return &task->parked->user;
    (void)spdl__task_row_error(task, "spdl_call_state in a stage whose row does not say .again");
    return &task->no_state;
}

/* The function has returned SPDL_AGAIN: its result goes on. SPDL_AGAIN, or why the call fails. */
SPDL__PRIVATE spdl_result spdl__parked_again(spdl_task *task, spdl__counters *counters, void *out,
                                             uint64_t now) {
    spdl__parked *call = task->parked;
    spdl__item what = task->in;
    if (out != NULL && out == task->in.item)
        return spdl__task_fail(task, "returned SPDL_AGAIN with its input in *out");
    what.item = out;
    what.origin = spdl__task_origin(task, out);
    if (task->buffer != NULL) spdl__task_give_back(task);
    spdl__put(task->node, 0, &what, now);
    spdl__count(&counters->made, 1);
    ++call->handed_on;
    if (task->taken) call->in.origin = spdl__origin(task->sequence, SPDL__HOLE);
    if (task->taken) call->in.item = NULL;
    task->in = call->in;
    return SPDL_AGAIN;
}

/* A call that waits or is done will not go on: frees what it has. */
SPDL__PRIVATE void spdl__parked_drop(spdl_pipeline *p, spdl__node *node, spdl__parked *call,
                                     bool done) {
    const spdl__item in = call->in;
    const bool taken = call->taken;
    void *user = call->user, *buffer = call->buffer, *completed = call->completed;
    const uint64_t change = call->flush ? SPDL__PASSING : 1;
    spdl__add(&node->counters[p->workers].freed, spdl__origin_tag(in.origin) < SPDL__HOLE);
    if (done && call->result == SPDL_OK && completed != in.item && completed != buffer)
        spdl__item_free(p, completed, spdl__origin(0, (unsigned)node->index));
    spdl__parked_push(node, &node->parked_free, call, SPDL__PARKED_FREE);
    spdl__word_move(p, node, (uint64_t)0 - change); /* before user code that may stop, too */
    if (user != NULL && node->row.free_state != NULL) node->row.free_state(user);
    if (!node->places) spdl_buffer_free(buffer); /* else the purge frees the batch */
    if (in.item != NULL && !taken) spdl__item_free(p, in.item, in.origin);
}

/* A stop: no worker goes on with them. */
SPDL__PRIVATE void spdl__parked_drop_all(spdl_pipeline *p) {
    spdl__parked *call;
    int i;
    for (i = 0; i < p->count; ++i) {
        spdl__node *node = &p->node[i];
        if (node->parked == NULL) continue;
        while ((call = spdl__parked_pop(node, &node->parked_waiting)) != NULL)
            spdl__parked_drop(p, node, call, false);
        while ((call = spdl__parked_pop(node, &node->parked_done)) != NULL)
            spdl__parked_drop(p, node, call, true);
    }
}

/* --- SPDL_PENDING --- */

/* A number is the generation, the row and the place. */
#define SPDL__ID_PLACE_BITS 16
#define SPDL__ID_ROW_BITS 8
#define SPDL__ID_BITS (SPDL__ID_PLACE_BITS + SPDL__ID_ROW_BITS)

SPDL_API spdl_deferred spdl_defer(spdl_task *task) {
    spdl_deferred deferred = { NULL, 0 };
    spdl__node *node;
    spdl__parked *call;
    if (!spdl__task_allows(task, "spdl_defer")) return deferred;
    node = task->node;
    call = task->parked;
    if (!node->row.deferred || call == NULL) return deferred;
    spdl__lock(&node->parked_lock, node->locks);
    if (call->state == SPDL__PARKED_RUNNING) call->state = SPDL__PARKED_ARMED;
    deferred.id = call->generation << SPDL__ID_BITS | (uint64_t)node->index << SPDL__ID_PLACE_BITS |
                  (uint64_t)(call - node->parked);
    spdl__unlock(&node->parked_lock, node->locks);
    deferred.pipeline = task->pipeline;
    return deferred;
}

/* The function of a call that was deferred has not returned PENDING, and was completed. */
SPDL__COLD void spdl__parked_twice(spdl_task *task, const void *out) {
    spdl__parked *call = task->parked;
    spdl__log(&task->pipeline->logger, SPDL_LOG_ERROR,
              "a call that did not return SPDL_PENDING was completed with spdl_complete");
    if (call->result == SPDL_OK && call->completed != task->in.item && call->completed != out &&
        call->completed != task->buffer)
        spdl__item_free(task->pipeline, call->completed, spdl__origin(0, task->owner));
}

/* The function has returned. Whether the call is over: *result and *out say how. False: it is
   PENDING, and nothing of it may be touched any more. */
SPDL__PRIVATE bool spdl__parked_returned(spdl_task *task, spdl_result *result, void **out) {
    spdl__node *node = task->node;
    spdl__parked *call = task->parked;
    const bool pending = *result == SPDL_PENDING;
    spdl__parked_state was;
    call->taken = task->taken;
    spdl__lock(&node->parked_lock, node->locks);
    was = call->state;
    if (pending && was == SPDL__PARKED_ARMED) {
        call->buffer = task->buffer;
        call->holder = task->holder;
        call->state = SPDL__PARKED_PENDING;
    } else {
        call->state = SPDL__PARKED_RUNNING; /* its number is dead */
    }
    spdl__unlock(&node->parked_lock, node->locks);
    if (pending && was == SPDL__PARKED_ARMED) {
        task->buffer = NULL; /* it is the call's */
        task->parked = NULL;
        return false;
    }
    if (was != SPDL__PARKED_EARLY) {
        if (pending)
            *result = spdl__task_fail(task, "returned SPDL_PENDING without a call of spdl_defer");
    } else if (!pending) {
        spdl__parked_twice(task, *out);
    } else {
        *result = call->result;
        *out = call->completed;
        memcpy(task->text, call->text, sizeof(task->text));
    }
    return true;
}

/* Under the row's lock: the call was completed. False: there is no such call. */
SPDL__PRIVATE bool spdl__complete_call(spdl__node *node, uint32_t place, uint64_t generation,
                                       spdl_result result, void *item, const char *text) {
    spdl__parked *call = &node->parked[place];
    const bool early = call->state == SPDL__PARKED_ARMED;
    if ((call->generation & (UINT64_MAX >> SPDL__ID_BITS)) != generation ||
        (!early && call->state != SPDL__PARKED_PENDING))
        return false;
    call->result = result;
    call->completed = item;
    (void)snprintf(call->text, sizeof(call->text), "%s", text);
    call->state = early ? SPDL__PARKED_EARLY : SPDL__PARKED_DONE;
    if (!early) spdl__parked_add(node, &node->parked_done, place);
    return true;
}

SPDL__PRIVATE spdl_result spdl__complete(spdl_deferred deferred, spdl_result result, void *item,
                                         const char *text) {
    spdl_pipeline *p = deferred.pipeline;
    const uint64_t row = deferred.id >> SPDL__ID_PLACE_BITS & ((1u << SPDL__ID_ROW_BITS) - 1);
    const uint32_t place = (uint32_t)deferred.id & ((1u << SPDL__ID_PLACE_BITS) - 1);
    spdl__node *node = NULL;
    bool found = false;
    if (p == NULL) return SPDL_E_INVALID;
    spdl__add32(&p->completing, 1); /* destroy waits for us, too */
    if (row < (uint64_t)p->count) node = &p->node[row];
    if (node != NULL && node->row.deferred && place < (uint32_t)node->most) {
        spdl__lock(&node->parked_lock, node->locks);
        found = spdl__complete_call(node, place, deferred.id >> SPDL__ID_BITS, result, item, text);
        spdl__unlock(&node->parked_lock, node->locks);
    }
    if (found) {
        spdl__wake_changed(p, node);
        if (spdl__load32(&p->stopping)) spdl__os_event_wake(&p->quiet, SPDL__ALL);
    } else {
        spdl__log(&p->logger, SPDL_LOG_ERROR,
                  "spdl_complete: no such call, or it was completed before");
    }
    spdl__sub32(&p->completing, 1);
    return found ? SPDL_OK : SPDL_E_INVALID;
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

/* --- why the consumer waits --- */

SPDL__PRIVATE spdl__node *spdl__merge_awaits(const spdl_pipeline *p, const spdl__node *node);

/* Where the item is that the consumer waits for: from the sink up to the first row that has it, is
   called with it, or could be. *idle: its input is there, and no worker. */
SPDL__PRIVATE spdl__node *spdl__blame_find(const spdl_pipeline *p, bool *idle) {
    spdl__node *node = p->last;
    for (;;) {
        const uint64_t word = spdl__load(node->word), active = word & SPDL__ACTIVE;
        const spdl__edge *in = node->in;
        *idle = false;
        if (node->row.kind == SPDL_KIND_MERGE) {
            node = spdl__merge_awaits(p, node);
            continue;
        }
        if (node->row.kind == SPDL_KIND_PATH) {
            node = node->before;
            continue;
        }
        if (node->by_ticket ? (int64_t)(spdl__row_at(node, word) -
                                        spdl__head(spdl__load(&node->out.word))) > 0
                            : active > 0)
            return node;
        if (in == NULL) {
            *idle = node->row.kind == SPDL_KIND_SOURCE && !node->own_thread;
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
   goes on when another thread is at it; `over` is the consumer's last one. */
SPDL__PRIVATE void spdl__blame_mark(spdl_pipeline *p, bool over) {
    uint64_t now;
    if (over)
        spdl__lock(&p->blame_lock, &p->locks);
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
    spdl__unlock(&p->blame_lock, &p->locks);
}

/* The consumer: a wait begins. */
SPDL__PRIVATE void spdl__blame_begin(spdl_pipeline *p, uint64_t since) {
    spdl__lock(&p->blame_lock, &p->locks);
    p->blame = spdl__blame_find(p, &p->blame_idle);
    spdl__store_relaxed(&p->blame_since, since);
    spdl__unlock(&p->blame_lock, &p->locks);
}

/* The end of a sitting of `ns` that was measured, and how many to leave out then: on average as
   many of its length as take SPDL__METER_NS. (A sequence of Weyl's.) The meter is read before and
   after the clock, so its times may come to more. */
SPDL__NOINLINE void spdl__meter_book(spdl__meter *meter, spdl__counters *counters, uint64_t calls,
                                     uint64_t ns) {
    uint64_t cpu, wait, cpu_ns;
    bool cpu_known, wait_known;
    spdl__os_thread_times(NULL, &cpu, NULL);
    spdl__os_thread_times(&meter->file, NULL, &wait);
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

/* --- a call in a row that may have anything --- */

/* How a call has ended. */
typedef enum spdl__outcome {
    SPDL__GOES_ON,
    SPDL__OVER,    /* it has failed for good: no call of this row is to follow */
    SPDL__NO_CALL, /* it was the one that said the source has ended, or nobody waits for it */
    SPDL__LATER,   /* it has handed on a result, and is to be called again */
    SPDL__PENDING, /* it goes on without us, and has our place in the row */
    SPDL__GONE     /* destroy has gone on without it: nothing of the row is ours any more */
} spdl__outcome;

/* The source says: the end of the epoch, or of all. There is room for one result: this is it. */
SPDL__NOINLINE void spdl__flow_source_end(spdl__node *node, uint64_t now) {
    const uint64_t epoch = spdl__load_relaxed(&node->epoch);
    spdl__item mark = { NULL, 0, 0 };
    mark.origin = spdl__origin(epoch, node->row.continuous ? SPDL__EPOCH : SPDL__END);
    spdl__put(node, 0, &mark, now);
    if (!node->row.continuous) {
        (void)spdl__or(node->word, SPDL__SHUT); /* before `active` goes down */
        return;
    }
    spdl__row_epoch(node, epoch + 1, 0);
    spdl__store_relaxed(&node->made, 0);
}

/* What the function has returned is settled, and the call is over. */
SPDL__PRIVATE spdl__outcome spdl__flow_over(spdl_task *task, spdl__counters *counters,
                                            spdl_result result, void *out, uint64_t now) {
    spdl__node *node = task->node;
    spdl__parked *call = task->parked;
    bool goes_on;
    if (call != NULL && call->user != NULL && node->row.free_state != NULL)
        node->row.free_state(call->user); /* before the input */
    goes_on = spdl__settle(task, counters, result, out, now);
    if (call != NULL) spdl__parked_push(node, &node->parked_free, call, SPDL__PARKED_FREE);
    task->parked = NULL;
    return goes_on ? SPDL__GOES_ON : SPDL__OVER;
}

/* Behind a feed what a row with .flush makes is as old as the oldest it has gathered. */
SPDL__COLD void spdl__flow_held(spdl_task *task) {
    spdl__node *node = task->node;
    if (!node->holds) node->held_range = task->in.range;
    node->holds = true;
    task->in.range = node->held_range;
}

/* One call on what was taken, or once more on what was parked. *now: the clock, when it was
   read. */
SPDL__NOINLINE spdl__outcome spdl__flow_call(spdl_task *task, spdl__counters *counters,
                                             uint64_t *now) {
    spdl_pipeline *p = task->pipeline;
    spdl__node *node = task->node;
    const bool source = node->in == NULL;
    spdl_result result;
    void *out;
    if (node->own_thread && !spdl__call_may_block(task))
        return task->gone ? SPDL__GONE : SPDL__NO_CALL;
    if (node->sheds && !source) spdl__call_shed(task);
    if (node->parked != NULL && task->parked == NULL) spdl__parked_begin(task);
    if (node->row.flush && !task->flushing) node->gathered = true;
    if (node->row.flush && p->feed != NULL && !node->gathers) spdl__flow_held(task);
    result = spdl__call(task, &out);
    if (node->row.flush && (result == SPDL_OK || result == SPDL_AGAIN)) node->holds = false;
    if (node->own_thread && !spdl__call_is_back(task, result, out)) return SPDL__GONE;
    if (node->row.deferred && !spdl__parked_returned(task, &result, &out)) return SPDL__PENDING;
    if (!node->gathers) *now = spdl_time_ns();
    if (node->row.again && result == SPDL_AGAIN) {
        result = spdl__parked_again(task, counters, out, *now);
        if (result == SPDL_AGAIN) return SPDL__LATER;
        out = NULL;
    }
    if (source && result == SPDL_END && !task->call_error) {
        if (task->buffer != NULL) spdl__task_give_back(task);
        spdl__flow_source_end(node, *now);
        return SPDL__NO_CALL;
    }
    if (source && result == SPDL_OK) spdl__store_relaxed(&node->made, node->made + 1);
    return spdl__flow_over(task, counters, result, out, *now);
}

/* A call that spdl_complete has made DONE is settled as if its function had returned now. */
SPDL__NOINLINE spdl__outcome spdl__flow_done(spdl_task *task, spdl__parked *call,
                                             spdl__counters *counters, uint64_t now) {
    spdl__parked_resume(task, call);
    task->taken = call->taken;
    task->call_error = task->row_error = task->cut_short = false;
    memcpy(task->text, call->text, sizeof(task->text));
    return spdl__flow_over(task, counters, call->result, call->completed, now);
}

/* --- take --- */

/* What is taken goes into the task. */
SPDL__INLINE void spdl__flow_begin(spdl_task *task, const spdl__item *what, uint64_t ticket,
                                   uint64_t now) {
    task->in = *what;
    task->sequence = what->origin >> 8;
    task->ticket = ticket;
    task->since = now;
}

/* There is no room for the next result of this call: whoever comes goes on with it. */
SPDL__NOINLINE void spdl__flow_park(const spdl_task *task, spdl__parked *call) {
    spdl_pipeline *p = task->pipeline;
    spdl__node *node = task->node;
    spdl__parked_push(node, &node->parked_waiting, call, SPDL__PARKED_WAITING);
    spdl__full_barrier(); /* room may have come just before: pairs with those of the reader */
    spdl__wake_hint(p, node, node->near, false);
    if (spdl__load32(&p->stopping)) spdl__os_event_wake(&p->quiet, SPDL__ALL);
}

/* Whether the call at hand can go on at once: its result was put, as after a take. */
SPDL__NOINLINE bool spdl__flow_again(const spdl_task *task) {
    const spdl__node *node = task->node;
    spdl__full_barrier();
    spdl__wake_hint(task->pipeline, node, node->near, false);
    return !(spdl__load(node->word) & SPDL__SHUT) && spdl__row_room(task->pipeline, node, 0);
}

/* Passes the mark at the head, or makes the call of .flush that comes before it. Whether it did. */
SPDL__NOINLINE bool spdl__flow_pass(spdl_task *task, spdl__node *node) {
    spdl_pipeline *p = task->pipeline;
    spdl__counters *counters = &node->counters[task->worker];
    uint64_t word = spdl__load(node->word), change = (uint64_t)0 - SPDL__PASSING, at, now, failed;
    const uint64_t head = spdl__head(word);
    const spdl__slot *slot = spdl__edge_slot(node->in, head);
    spdl__outcome outcome;
    spdl__item mark;
    unsigned tag;
    if ((word & SPDL__BUSY) != 0 || !spdl__slot_has(slot, head)) return false;
    mark = spdl__slot_read(slot);
    tag = spdl__origin_tag(mark.origin);
    if (tag <= SPDL__HOLE || !spdl__row_room(p, node, word)) return false;
    if (!spdl__cas(node->word, &word, word + SPDL__PASSING)) return false;
    /* Alone, and the head did not move. `flushed` and the room are looked at only now: another may
       have been in and out since the word was read. */
    SPDL_TEST_POINT("pipeline passes");
    now = spdl_time_ns();
    at = spdl__row_at(node, word);
    if (node->row.flush && !node->flushed && spdl__row_room(p, node, word)) {
        spdl__wake_hint(p, node, node->near, true);
        node->flushed = true;
        node->gathered = false;
        task->node = node;
        task->flushing = task->passing = true;
        spdl__store_relaxed(&task->thread, spdl__os_thread_id());
        mark.item = NULL;
        mark.range = p->feed != NULL ? now >> SPDL__PUSHED_BITS : 0;
        mark.origin = spdl__origin(0, SPDL__HOLE);
        spdl__flow_begin(task, &mark, at, now);
        failed = spdl__load_relaxed(&counters->failures);
        outcome = spdl__flow_call(task, counters, &now);
        if (!node->gathers)
            spdl__counters_book(counters, 1, spdl__load_relaxed(&counters->failures) - failed,
                                now - task->since);
        if (outcome == SPDL__LATER) {
            spdl__flow_park(task, task->parked); /* it stays inside, alone */
            task->parked = NULL;
            return true;
        }
    } else if (spdl__row_room(p, node, word)) {
        spdl__put_mark(p, node, at, &mark, now);
        if (tag == SPDL__EPOCH) spdl__row_epoch(node, node->epoch + 1, at + 1);
        else spdl__edge_ended(node->in, now);
        if (tag == SPDL__END) (void)spdl__or(node->word, SPDL__SHUT);
        if (tag == SPDL__FAIL) spdl__word_shut(p, node->above | (uint32_t)1 << node->index);
        spdl__store_relaxed(&node->in->marks, node->in->marks + 1);
        change += SPDL__HEAD_ONE;
    }
    spdl__word_move(p, node, change);
    if (tag == SPDL__EPOCH && change >> 63 == 0) spdl__edge_took(node->in, head + 1, now, true);
    spdl__wake_hint(p, node, node->near, false);
    return true;
}

/* --- the loop --- */

/* Before the first call of a sitting. Whether it is measured: then it begins now. */
SPDL__INLINE bool spdl__flow_first(spdl_task *task, const spdl__counters *counters, bool timed) {
    spdl_pipeline *p = task->pipeline;
    if (timed && spdl__load_relaxed(&p->blame_since) != 0) spdl__blame_mark(p, false);
    spdl__store_relaxed(&task->thread, spdl__os_thread_id());
    if (!SPDL__METERED || SPDL__LIKELY(counters->meter_due > 0)) return false;
    spdl__meter_start(&task->meter);
    return true;
}

/* A worker in a row, from its first item there until it leaves; on its stack. */
typedef struct spdl__sitting {
    spdl_pipeline *p;
    spdl__node *node;
    spdl__counters *counters;
    uint64_t begun, now; /* the clock; `now` when it was read last */
    uint64_t word;       /* of the row, as far as we know */
    uint64_t enter;      /* what a take adds to it: SPDL__HEAD_ONE, and 1 if we are not inside */
    uint64_t change;     /* what leaving takes from it */
    uint64_t until;      /* results below that had room when we looked last */
    uint64_t waited;     /* for a place in the buffer, by items that got one as we took others */
    uint64_t failures;   /* what they were when it began, or a timed call */
    uint32_t calls, most, holes;
    uint32_t made;       /* items handed on that were not inputs, and are not booked yet */
    uint32_t limit;
    bool timed;          /* calls are timed one by one */
    bool done;           /* something was */
    bool empty;          /* it ended as nothing was there */
    bool mark;           /* it ended at a mark */
    bool again;          /* the call at hand has returned SPDL_AGAIN, and goes on */
} spdl__sitting;

/* Whether we are counted in `active`. */
SPDL__INLINE bool spdl__sits(const spdl__sitting *s) { return s->enter == SPDL__HEAD_ONE; }

/* Passes a hole at the head, without a call. Whether it did; the word is what it is then. It enters
   first: `dropped` changes before the head does, and a rewind must not come in between. */
SPDL__NOINLINE bool spdl__flow_hole(spdl__sitting *s) {
    spdl_pipeline *p = s->p;
    spdl__node *node = s->node;
    const uint64_t at = spdl__row_at(node, s->word);
    if (!spdl__row_passes_hole(p, node, s->word)) return false;
    if (!spdl__sits(s)) {
        if (!spdl__cas(node->word, &s->word, s->word + 1)) return false;
        ++s->word;
        s->enter = SPDL__HEAD_ONE;
        s->done = true; /* leaves */
    }
    spdl__add(&node->in->dropped, 1); /* before the head: see edge_until */
    if (!spdl__cas(node->word, &s->word, s->word + SPDL__HEAD_ONE)) {
        spdl__sub(&node->in->dropped, 1);
        spdl__wake_hint(p, node, node->beside, false); /* who looked meanwhile saw less room */
        return false;
    }
    spdl__put_nothing(p, node, at, s->now);
    spdl__wake_hint(p, node, node->near, false);
    s->word = spdl__load(node->word);
    return true;
}

/* A sitting begins. */
SPDL__INLINE void spdl__flow_enter(spdl__sitting *s, spdl_task *task, spdl__node *node,
                                   uint64_t late) {
    const uint64_t each = spdl__load_relaxed(&node->item_ns); /* of a call; 0: not known yet */
    s->until = s->waited = 0;
    s->calls = s->holes = s->made = 0;
    s->done = s->empty = s->mark = s->again = false;
    s->p = task->pipeline;
    s->node = node;
    s->counters = &node->counters[task->worker];
    s->begun = s->now = spdl_time_ns();
    s->enter = SPDL__HEAD_ONE + 1;
    s->change = 1;
    s->failures = spdl__load_relaxed(&s->counters->failures);
    s->most = each == 0 ? 1
                        : (uint32_t)spdl__max(1, spdl__min(SPDL__SITTING_NS / each,
                                                           SPDL__SITTING_ITEMS));
    s->limit = spdl__load_relaxed32(&node->limit);
    s->timed = !node->gathers && (each == 0 || each >= SPDL__TIMED_NS || late != SPDL__NEVER ||
                                  node->parked != NULL); /* those are booked before they park */
    s->word = spdl__load(node->word);
    task->node = node;
    task->owner = (uint8_t)node->index;
    task->flushing = task->passing = false;
}

/* A timed call is over, or has handed on a result. */
SPDL__INLINE void spdl__flow_book(spdl__sitting *s, uint64_t since) {
    const uint64_t failures = spdl__load_relaxed(&s->counters->failures);
    spdl__counters_book(s->counters, 1, failures - s->failures, s->now - since);
    s->failures = failures;
}

/* The end of a sitting. All but a deferred call is booked before the row is left: a thread that
   sees the end of the row sees the rest counted. */
SPDL__INLINE void spdl__flow_leave(spdl_task *task, spdl__sitting *s) {
    spdl_pipeline *p = s->p;
    spdl__node *node = s->node;
    spdl__counters *counters = s->counters;
    if (s->calls > 0) {
        if (!s->timed) s->now = spdl_time_ns();
        if (s->made > 0) spdl__count(&counters->made, s->made);
        if (!s->timed && !node->gathers)
            spdl__counters_book(counters, s->calls,
                                spdl__load_relaxed(&counters->failures) - s->failures,
                                s->now - s->begun);
        spdl__counters_learn(node, s->calls, s->now - s->begun);
        if (SPDL__METERED && SPDL__UNLIKELY(counters->meter_due-- <= 0))
            spdl__meter_book(&task->meter, counters, s->calls, s->now - s->begun);
    }
    if (s->waited != 0) spdl__add(&node->in->put_wait_ns, s->waited);
    if (spdl__sits(s)) {
        if (node->in != NULL) spdl__gap_idle(node->in, s->now);
        spdl__word_move(p, node, (uint64_t)0 - s->change);
        spdl__wake_hint(p, node, node->beside, false);
    }
    if (s->timed && spdl__load_relaxed(&p->blame_since) != 0) spdl__blame_mark(p, false);
    if (s->empty && s->calls > 0 && !s->timed && !SPDL__NO_STATS)
        spdl__gap_open(node->in, spdl__head(s->word), s->now, true);
}

/* Goes on with a call that was parked, if one can: one that is DONE is settled. Whether one is to
   be called again. */
SPDL__NOINLINE bool spdl__flow_resume(spdl_task *task, spdl__sitting *s, spdl__outcome *outcome) {
    spdl__node *node = s->node;
    spdl__parked *call = spdl__parked_pop(node, &node->parked_done);
    const bool settles = call != NULL;
    if (settles) {
        spdl__wake_hint(s->p, node, node->near, true); /* on_drop may take long */
        *outcome = spdl__flow_done(task, call, s->counters, s->now);
        spdl__flow_book(s, task->since);
    } else if (spdl__load_relaxed32(&node->parked_waiting.count) > 0 &&
               !(s->word & SPDL__SHUT) && spdl__row_room(s->p, node, 0)) {
        call = spdl__parked_pop(node, &node->parked_waiting);
    }
    if (call == NULL) return false;
    if (!settles && !spdl__row_room(s->p, node, 0)) { /* another had it, and used the room */
        spdl__flow_park(task, call);
        return false;
    }
    s->done = true;
    s->enter = SPDL__HEAD_ONE; /* we have its place */
    if (settles) return false;
    spdl__wake_hint(s->p, node, node->near, true); /* as after a take */
    spdl__parked_resume(task, call);
    task->since = s->now;
    if (task->passing) s->change = SPDL__PASSING;
    return true;
}

/* What a take has come to. */
typedef enum spdl__taken {
    SPDL__LEFT,  /* there is nothing for us here, or others are at it */
    SPDL__TOOK,  /* an item, or the right to call the source: it is in the task */
    SPDL__PASSED /* a hole */
} spdl__taken;

/* Takes what lies at the head, by one compare-and-swap. When that fails others are at it, and we
   look elsewhere. */
SPDL__INLINE spdl__taken spdl__flow_take(spdl__sitting *s, spdl_task *task, const bool plain) {
    spdl__node *const node = s->node;
    spdl__edge *const in = node->in;
    const uint64_t head = spdl__head(s->word), next = s->word + s->enter;
    const bool routes = !plain && node->paths > 0;
    spdl__item what = { NULL, SPDL__HOLE, 0 };
    uint64_t at;
    if ((s->word & SPDL__BUSY) >= s->limit + spdl__sits(s)) return SPDL__LEFT;
    if (!plain && s->change != 1) return SPDL__LEFT; /* a call of .flush: the mark comes next */
    if (in != NULL) {
        const spdl__slot *slot = spdl__edge_slot(in, head);
        unsigned tag;
        s->empty = !spdl__slot_has(slot, head);
        if (s->empty) return SPDL__LEFT;
        what = spdl__slot_read(slot);
        tag = spdl__origin_tag(what.origin);
        s->mark = tag > SPDL__HOLE;
        if (SPDL__UNLIKELY(s->mark)) return SPDL__LEFT;
        if (SPDL__UNLIKELY(tag == SPDL__HOLE)) {
            if (s->holes++ == SPDL__SITTING_ITEMS) return SPDL__LEFT;
            return spdl__flow_hole(s) ? SPDL__PASSED : SPDL__LEFT;
        }
    }
    at = spdl__row_at(node, s->word);
    if (routes) s->until = at + spdl__row_routes(s->p, node);
    if ((int64_t)(s->until - at) <= 0) { /* used up; what was read has made room since */
        if (!routes) s->until = spdl__row_until(node);
        if ((int64_t)(s->until - at) <= 0) return SPDL__LEFT;
    }
    SPDL_TEST_POINT("pipeline takes");
    if (!spdl__cas(node->word, &s->word, next)) return SPDL__LEFT;
    s->enter = SPDL__HEAD_ONE;
    spdl__wake_hint(s->p, node, node->near, s->calls == 0);
    if (in == NULL) {
        what.range = node->made;
        what.origin = spdl__origin(node->made, SPDL__HOLE);
    } else if (s->timed || s->calls == 0 || (!plain && SPDL__TRACED(in->track))) {
        s->waited += spdl__edge_put_wait(in, head, s->now);
        spdl__edge_took(in, head + 1, s->now, (next & SPDL__ACTIVE) < s->limit);
    }
    task->in = what;
    task->sequence = what.origin >> 8;
    task->ticket = at;
    if (!plain) task->since = s->now;
    return SPDL__TOOK;
}

/* A call in a plain row, and its put. */
SPDL__INLINE spdl__outcome spdl__flow_call_plain(spdl__sitting *s, spdl_task *task, spdl_fn call) {
    spdl__node *const node = s->node;
    const bool source = node->in == NULL;
    spdl_result result;
    void *out = NULL;
    task->taken = task->call_error = task->row_error = task->cut_short = false;
    task->text[0] = '\0';
    SPDL__PROBE(task_begin, node->row.name, task->sequence);
    result = call(task, task->in.item, &out);
    SPDL__PROBE(task_end, node->row.name, task->sequence);
    if (s->timed) s->now = spdl_time_ns();
    if (SPDL__LIKELY(result == SPDL_OK && !task->call_error && task->buffer == NULL) &&
        !SPDL__DEBUGS) {
        spdl__item what = task->in;
        if (source || out != what.item) { /* else it is passed on */
            if (what.item != NULL && !task->taken)
                spdl__item_free(s->p, what.item, what.origin);
            what.item = out;
            what.origin = spdl__origin(task->sequence, (unsigned)node->index);
            ++s->made;
            if (source) spdl__store_relaxed(&node->made, node->made + 1);
        }
        spdl__put(node, task->ticket, &what, s->now);
        return SPDL__GOES_ON;
    }
    if (source && result == SPDL_END && !task->call_error) {
        if (task->buffer != NULL) spdl__task_give_back(task);
        spdl__flow_source_end(node, s->now);
        return SPDL__NO_CALL;
    }
    if (task->call_error) result = spdl__call_misused(task, result, out);
    if (source && result == SPDL_OK) spdl__store_relaxed(&node->made, node->made + 1);
    return spdl__settle(task, s->counters, result, out, s->now) ? SPDL__GOES_ON : SPDL__OVER;
}

/* What a worker does in a row: takes items one by one, calls, puts, leaves. Whether anything was
   done. Two copies are compiled: `plain` is for rows that have none of what is rare (see
   node_is_plain in >>create-impl). `late`: no call begins from then on. */
SPDL__INLINE bool spdl__flow_sit(spdl_task *task, spdl__node *node, uint64_t late,
                                 const bool plain) {
    const spdl_fn call = plain ? spdl__load_fn(&node->row.fn->call) : NULL;
    spdl__outcome outcome = SPDL__GOES_ON;
    spdl__sitting s;
    uint64_t since;
    spdl__flow_enter(&s, task, node, late);
    if (plain) spdl__store_relaxed32(&task->live, 1);
    if (!plain && node->parked != NULL) s.again = spdl__flow_resume(task, &s, &outcome);
    while (outcome != SPDL__OVER && (!s.timed || s.now < late)) {
        if (plain || !s.again) {
            const spdl__taken taken = spdl__flow_take(&s, task, plain);
            if (taken == SPDL__LEFT) break;
            s.done = true;
            if (taken == SPDL__PASSED) continue;
        }
        if (s.calls == 0 && (plain || !node->gathers) &&
            spdl__flow_first(task, s.counters, s.timed))
            s.begun = s.now = spdl_time_ns();
        since = s.now;
        outcome = plain ? spdl__flow_call_plain(&s, task, call)
                        : spdl__flow_call(task, s.counters, &s.now);
        if (!plain) task->gone = outcome == SPDL__GONE;
        if (!plain && task->gone) return false;
        if (outcome == SPDL__NO_CALL) break;
        ++s.calls;
        if (s.timed && (plain || outcome != SPDL__PENDING)) spdl__flow_book(&s, since);
        if (!plain && outcome == SPDL__PENDING) s.enter = SPDL__HEAD_ONE + 1; /* not our place */
        if (!plain) s.again = outcome == SPDL__LATER;
        if (s.calls >= s.most || (!plain && s.again && !spdl__flow_again(task))) break;
        s.word = spdl__load(node->word);
    }
    if (!plain && s.again) {
        spdl__flow_park(task, task->parked);
        task->parked = NULL;
        s.enter = SPDL__HEAD_ONE + 1;
    }
    if (plain) spdl__store_relaxed32(&task->live, 0);
    if (s.done) spdl__flow_leave(task, &s);
    if (s.mark) s.done = spdl__flow_pass(task, node) || s.done;
    return s.done;
}

SPDL__NOINLINE bool spdl__flow_sit_plain(spdl_task *task, spdl__node *node, uint64_t late) {
    return spdl__flow_sit(task, node, late, true);
}

SPDL__NOINLINE bool spdl__flow_sit_any(spdl_task *task, spdl__node *node, uint64_t late) {
    return spdl__flow_sit(task, node, late, false);
}

/* ============================================================================================= */
/* >>batch-impl
   SPDL_BATCH is a function of the library on an ordinary row with .flush and one call at a time: it
   adds its input to the open batch, and returns SPDL_SKIP, or SPDL_OK with a batch that is full. At
   a mark it hands on what is left. SPDL_UNBATCH is one with .again.

   Batches in place. A call of the row before gets the part of a batch where its result will lie, by
   spdl_buffer: that of its ticket, if no call before drops its own. Dropped items only move others
   to the front, so an item never lies before its part: when the batch row has come to a part, no
   call that still runs has it.

   Threads: the worker that is inside. Parts are given out under place_lock, to calls of the row
   before. */

static const char *const spdl__in_place_stays =
    "the items of a batch in place (.item_bytes) cannot leave it";

/* Under place_lock: the batch that will have this number in this epoch. */
SPDL__PRIVATE spdl__batch *spdl__place_batch(spdl__node *row, uint64_t epoch, uint64_t number) {
    spdl__batch *batch = row->place;
    while (batch != NULL && (batch->shown.epoch != epoch || batch->shown.sequence != number))
        batch = batch->next;
    if (batch != NULL) return batch;
    batch = spdl__batch_get(row->batches);
    if (batch == NULL) return NULL;
    memset(batch->owner, 0, (size_t)row->row.size);
    batch->shown.epoch = epoch;
    batch->shown.sequence = number;
    batch->next = row->place;
    row->place = batch;
    return batch;
}

/* A part of a batch in place, for this call. */
SPDL__PRIVATE void *spdl__place_get(spdl_task *task, spdl__node *row) {
    const spdl__node *node = task->node;
    const uint64_t size = (uint64_t)row->row.size, epoch = spdl__load_relaxed(&node->epoch);
    uint64_t at = (node->serial ? spdl__load_relaxed(&node->out.tail) : task->ticket) - node->first;
    spdl__batch *batch;
    spdl__lock(&row->place_lock, row->locks);
    if (row->place_epoch == epoch) at -= row->place_dropped;
    batch = spdl__place_batch(row, epoch, at / size);
    while (batch != NULL && batch->owner[at % size] != 0)
        batch = spdl__place_batch(row, epoch, ++at / size);
    if (batch != NULL) batch->owner[at % size] = SPDL__IN_PLACE;
    spdl__unlock(&row->place_lock, row->locks);
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

/* In place: the row has come to the end of `done`, or with NULL to that of an epoch. */
SPDL__PRIVATE void spdl__place_passed(spdl__node *node, spdl__batch *done) {
    const uint64_t epoch = spdl__load_relaxed(&node->epoch);
    const uint64_t dropped = spdl__load_relaxed(&node->in->dropped);
    spdl__batch **at = &node->place;
    if (node->row.item_bytes == 0) return;
    spdl__lock(&node->place_lock, node->locks);
    node->place_dropped = dropped - node->dropped;
    while (*at != NULL) {
        spdl__batch *batch = *at;
        if (done != NULL ? batch != done : batch->shown.epoch != epoch) {
            at = &batch->next;
            continue;
        }
        *at = batch->next;
        if (done == NULL) spdl_batch_free(batch); /* empty: all calls that had a part dropped it */
    }
    if (done == NULL) {
        node->place_epoch = epoch + 1;
        node->place_dropped = 0;
        node->dropped = dropped;
    }
    spdl__unlock(&node->place_lock, node->locks);
}

/* The batch that the next item goes to; NULL: there is no memory for it. */
SPDL__PRIVATE spdl__batch *spdl__batch_open(spdl__node *node) {
    spdl__batch *batch;
    if (node->row.item_bytes == 0) return spdl__batch_get(node->batches);
    spdl__lock(&node->place_lock, node->locks);
    batch = spdl__place_batch(node, spdl__load_relaxed(&node->epoch),
                              node->number - node->number_first);
    spdl__unlock(&node->place_lock, node->locks);
    return batch;
}

/* A batch goes on. */
SPDL__PRIVATE spdl_result spdl__batch_done(spdl_task *task, spdl__batch *batch, void **out) {
    spdl_pipeline *p = task->pipeline;
    spdl__node *node = task->node;
    spdl__counters *counters = &node->counters[task->worker];
    batch->shown.sequence = task->sequence = node->number++;
    batch->shown.epoch = spdl__load_relaxed(&node->epoch);
    if (node == p->marks && !p->remakes) batch->range = spdl__mark_range(&node->mark);
    task->in.range = batch->range;
    node->open_batch = NULL;
    spdl__count(&counters->tasks, 1);
    if (SPDL__TRACED(p->trace)) {
        const uint64_t now = spdl_time_ns();
        spdl__trace_add(&p->trace->track[task->worker], SPDL__RECORD_BATCH, node->index, SPDL_OK,
                        now, now, batch->shown.sequence);
    }
    *out = batch;
    return SPDL_OK;
}

/* The same items in a batch of its own; NULL: there is no memory for it. */
SPDL__COLD spdl__batch *spdl__batch_copy(const spdl__node *node, const spdl__batch *batch) {
    const size_t bytes = node->row.item_bytes;
    spdl__batch *copy = spdl__batch_get(node->batches);
    size_t i;
    if (copy == NULL) return NULL;
    copy->range = batch->range;
    copy->shown.count = batch->shown.count;
    memcpy(copy->shown.data, batch->shown.data, batch->shown.count * bytes);
    for (i = 0; i < batch->shown.count; ++i) {
        copy->owner[i] = SPDL__IN_PLACE;
        copy->shown.items[i] = (char *)copy->shown.data + i * bytes;
    }
    return copy;
}

/* A mark comes next: what is left goes on, or is freed. Behind a failure calls of the row before
   may still write into a batch in place: a copy goes on, and the purge frees the batch. */
SPDL__PRIVATE spdl_result spdl__batch_rest(spdl_task *task, void **out) {
    spdl__node *node = task->node;
    const uint64_t head = spdl__head(spdl__load_relaxed(node->word));
    const unsigned mark = spdl__slot_tag(spdl__edge_slot(node->in, head));
    const bool shared = mark == SPDL__FAIL && node->row.item_bytes > 0;
    spdl__batch *batch = node->open_batch;
    const size_t count = batch != NULL ? batch->shown.count : 0;
    spdl_result result = SPDL_SKIP;
    if (count > 0 && node->row.drop_last) {
        spdl__count(&node->counters[task->worker].skips, count);
    } else if (count > 0) {
        if (shared) batch = spdl__batch_copy(node, batch);
        if (batch != NULL) result = spdl__batch_done(task, batch, out);
        if (!shared) spdl__place_passed(node, batch);
    }
    if (shared) return result;
    if (result != SPDL_OK && batch != NULL) {
        node->open_batch = NULL;
        spdl__place_passed(node, batch);
        spdl_batch_free(batch);
    }
    if (mark == SPDL__EPOCH) spdl__place_passed(node, NULL);
    return result;
}

/* A token takes no place in a batch, but one goes on for each `size` of them. */
SPDL__COLD spdl_result spdl__batch_token(spdl_task *task, void *token, void **out) {
    spdl__node *node = task->node;
    --node->dropped; /* as if one more was dropped */
    *out = token;
    return ++node->tokens % (uint64_t)node->row.size == 0 ? SPDL_OK : SPDL_SKIP;
}

/* In place the item is copied to its part, if it was not written there; then the library frees
   it. */
SPDL__INLINE void spdl__batch_add(spdl_task *task, spdl__batch *batch, void *item) {
    const size_t bytes = task->node->row.item_bytes, at = batch->shown.count++;
    void *part;
    if (bytes == 0) {
        batch->owner[at] = (uint8_t)spdl__origin_tag(task->in.origin);
        batch->shown.items[at] = item;
        task->taken = true;
        return;
    }
    part = (char *)batch->shown.data + at * bytes;
    if (item == NULL)
        memset(part, 0, bytes);
    else if (item != part)
        memcpy(part, item, bytes);
    batch->owner[at] = SPDL__IN_PLACE;
    batch->shown.items[at] = part;
}

/* The function of SPDL_BATCH. */
SPDL__PRIVATE spdl_result spdl__batch_call(spdl_task *task, void *in, void **out) {
    const spdl_pipeline *p = task->pipeline;
    spdl__node *node = task->node;
    spdl__batch *batch = node->open_batch;
    bool first;
    if (task->flushing) return spdl__batch_rest(task, out);
    if (SPDL__UNLIKELY(spdl__origin_tag(task->in.origin) == SPDL__TOKEN))
        return spdl__batch_token(task, in, out);
    if (batch == NULL) batch = node->open_batch = spdl__batch_open(node);
    if (batch == NULL) {
        (void)spdl__task_fail(task, "no memory for another batch");
        return SPDL_E_NOMEM;
    }
    first = batch->shown.count == 0;
    if (node != p->marks) {
        if (first) batch->range = task->in.range; /* of a feed: the oldest */
    } else {
        if (first && p->remakes) batch->range = spdl__mark_range(&node->mark);
        spdl__mark_pass(&node->mark, task->in.range, p->many);
        if (SPDL__UNLIKELY(node->skip > 0)) { /* it was delivered before this run */
            --node->skip;
            --node->dropped; /* it takes no place */
            spdl__count(&node->counters[task->worker].freed, 1);
            return SPDL_SKIP;
        }
    }
    spdl__batch_add(task, batch, in);
    if (batch->shown.count < (size_t)node->row.size) return SPDL_SKIP;
    spdl__place_passed(node, batch);
    return spdl__batch_done(task, batch, out);
}

static const spdl_function spdl__batch_function = { spdl__batch_call, "batch", "void",
                                                    "spdl_batch" };

/* The function of SPDL_UNBATCH: the items of a batch one by one. What spdl_call_state has is the number
   of those that were handed on or left out. */
SPDL__PRIVATE spdl_result spdl__unbatch_call(spdl_task *task, void *in, void **out) {
    spdl__batch *batch = (spdl__batch *)in;
    uintptr_t i = (uintptr_t)task->parked->user;
    if (batch == NULL) return SPDL_SKIP;
    if (batch->shown.data != NULL) return spdl__task_row_error(task, spdl__in_place_stays);
    while (i < batch->shown.count && batch->shown.items[i] == NULL) ++i;
    if (i == batch->shown.count) return SPDL_SKIP;
    *out = batch->shown.items[i];
    task->owner = batch->owner[i];
    batch->shown.items[i] = NULL;
    while (i < batch->shown.count && batch->shown.items[i] == NULL) ++i;
    task->parked->user = (void *)i;
    return i < batch->shown.count ? SPDL_AGAIN : SPDL_OK;
}

static const spdl_function spdl__unbatch_function = { spdl__unbatch_call, "unbatch", "spdl_batch",
                                                      "void" };

/* ============================================================================================= */
/* >>merge-impl
   Rows that join the paths of a branch again. A merge is a source that reads edges: it calls no
   stage, and one worker at a time takes from the paths and puts, for as long as there are items and
   room.

   Input order: the branch has written the path of each result into `turns`, and each row of a path
   makes an item or a hole of each. So the merge takes what lies at the head of the path whose turn
   it is, and waits until something does. Nothing can starve: what it waits for was routed, and what
   is routed later cannot hold it up. Completion order: the merge takes from whichever path has
   something.

   Marks. END, EPOCH and a FAIL from above the branch go down every path, and are passed when they
   lie at the head of all. A FAIL of a row in a path is passed alone: in its turn, or in completion
   order when no path has an item.

   Threads: the worker that is inside has the heads of all paths to itself. */

#define SPDL__ALL_PATHS SPDL_MAX_STAGES /* merge_pick: the mark that lies in each */

/* The tag of what lies at the head of a path, or SPDL__HOLE + 0x100: nothing does. */
#define SPDL__NOTHING 0x100u

SPDL__PRIVATE unsigned spdl__merge_tag(const spdl_pipeline *p, const spdl__node *node, int path) {
    const spdl__edge *edge = spdl__path_edge(p, node, path);
    const uint64_t head = spdl__head(spdl__load(&edge->word));
    const spdl__slot *slot = spdl__edge_slot(edge, head);
    return spdl__slot_has(slot, head) ? spdl__slot_tag(slot) : SPDL__NOTHING;
}

/* Whether what lies at the head of this path is a FAIL of one of its own rows. */
SPDL__PRIVATE bool spdl__merge_failed(const spdl_pipeline *p, const spdl__node *node, int path) {
    const spdl__edge *edge = spdl__path_edge(p, node, path);
    const uint64_t head = spdl__head(spdl__load(&edge->word));
    const spdl__slot *slot = spdl__edge_slot(edge, head);
    uint64_t origin;
    if (!spdl__slot_has(slot, head)) return false; /* first: else this is what was there before */
    origin = spdl__load_relaxed(&slot->origin);
    return spdl__origin_tag(origin) == SPDL__FAIL && origin >> 8 > (uint64_t)node->merge->index;
}

/* The paths have a mark in common, or one has failed: that, or -1. */
SPDL__PRIVATE int spdl__merge_mark(const spdl_pipeline *p, const spdl__node *node) {
    int i, marks = 0;
    for (i = 0; i < node->paths; ++i) {
        const unsigned tag = spdl__merge_tag(p, node, i);
        if (spdl__merge_failed(p, node, i)) return i;
        marks += tag > SPDL__HOLE && tag != SPDL__NOTHING;
    }
    return marks == node->paths ? SPDL__ALL_PATHS : -1;
}

/* The path to take from next, or SPDL__ALL_PATHS; -1: there is nothing to take yet. */
SPDL__PRIVATE int spdl__merge_pick(const spdl_pipeline *p, const spdl__node *node) {
    const spdl__node *branch = node->merge;
    const int turn = (int)spdl__load_relaxed32(&node->turn);
    const uint64_t taken = spdl__load_relaxed(&branch->turns_taken);
    int i;
    if (branch->turns != NULL) {
        if (spdl__load(&branch->turns_put) == taken) return -1; /* pairs with put_turn */
        i = (int)spdl__load_relaxed32(&branch->turns[taken & branch->turns_mask]);
        if (i == (int)SPDL__TURN_MARK) return spdl__merge_mark(p, node);
        return spdl__merge_tag(p, node, i) != SPDL__NOTHING ? i : -1;
    }
    for (i = 0; i < node->paths; ++i) {
        const int at = (turn + i) % node->paths;
        if (spdl__merge_tag(p, node, at) <= SPDL__HOLE) return at;
    }
    return spdl__merge_mark(p, node);
}

/* Whether it can be taken now: a hole may need no room. */
SPDL__PRIVATE bool spdl__merge_may(const spdl_pipeline *p, const spdl__node *node, int path) {
    if (path < 0) return false;
    if (path < SPDL__ALL_PATHS && spdl__merge_tag(p, node, path) == SPDL__HOLE)
        return spdl__row_passes_hole(p, node, 0);
    return spdl__row_room(p, node, 0) > 0;
}

SPDL__PRIVATE bool spdl__merge_runnable(const spdl_pipeline *p, const spdl__node *node) {
    return spdl__merge_may(p, node, spdl__merge_pick(p, node));
}

/* Where what the consumer waits for is: the last row of the path whose turn it is, or that has a
   call. */
SPDL__PRIVATE spdl__node *spdl__merge_awaits(const spdl_pipeline *p, const spdl__node *node) {
    const spdl__node *branch = node->merge;
    const uint64_t taken = spdl__load_relaxed(&branch->turns_taken);
    int i = 0;
    if (branch->turns != NULL) {
        if (spdl__load(&branch->turns_put) == taken) return node->merge;
        i = (int)spdl__load_relaxed32(&branch->turns[taken & branch->turns_mask]);
        return &p->node[node->path[i == (int)SPDL__TURN_MARK ? 0 : i]];
    }
    while (i + 1 < node->paths && !(spdl__load(p->node[node->path[i]].word) & SPDL__ACTIVE)) ++i;
    return &p->node[node->path[i]];
}

/* Takes what lies at the head of a path. */
SPDL__PRIVATE spdl__item spdl__merge_take(const spdl_pipeline *p, const spdl__node *node, int path,
                                          uint64_t now) {
    spdl__edge *edge = spdl__path_edge(p, node, path);
    const uint64_t head = spdl__head(spdl__load_relaxed(&edge->word));
    const spdl__item got = spdl__slot_read(spdl__edge_slot(edge, head));
    const unsigned tag = spdl__origin_tag(got.origin);
    const uint64_t waited = spdl__edge_put_wait(edge, head, now);
    if (tag == SPDL__HOLE) spdl__store(&edge->dropped, edge->dropped + 1); /* before the head */
    if (tag > SPDL__HOLE) spdl__store_relaxed(&edge->marks, edge->marks + 1);
    (void)spdl__exchange(&edge->word, (head + 1) << SPDL__HEAD_BITS);
    if (waited != 0) spdl__add(&edge->put_wait_ns, waited);
    if (tag == SPDL__END || tag == SPDL__FAIL) spdl__edge_ended(edge, now);
    else spdl__edge_took(edge, head + 1, now, true);
    return got;
}

/* A mark goes on. */
SPDL__PRIVATE void spdl__merge_pass(spdl_pipeline *p, spdl__node *node, int path, uint64_t now) {
    spdl__item mark = { NULL, 0, 0 };
    unsigned tag;
    int i;
    if (path < SPDL__ALL_PATHS) mark = spdl__merge_take(p, node, path, now);
    for (i = 0; path == SPDL__ALL_PATHS && i < node->paths; ++i)
        mark = spdl__merge_take(p, node, i, now);
    tag = spdl__origin_tag(mark.origin);
    spdl__put(node, 0, &mark, now);
    if (tag == SPDL__EPOCH) spdl__row_epoch(node, node->epoch + 1, 0);
    if (tag == SPDL__END) (void)spdl__or(node->word, SPDL__SHUT);
    if (tag == SPDL__FAIL) spdl__word_shut(p, node->above | (uint32_t)1 << node->index);
}

/* What a worker does in a merge. Whether anything was done. */
SPDL__PRIVATE bool spdl__merge_sit(spdl_pipeline *p, spdl__node *node) {
    const uint64_t now = spdl_time_ns();
    uint64_t word = spdl__load(node->word);
    int path, taken = 0;
    if ((word & SPDL__BUSY) != 0 || !spdl__merge_runnable(p, node) ||
        !spdl__cas(node->word, &word, word + 1))
        return false;
    for (; taken < SPDL__SITTING_ITEMS && !(spdl__load(node->word) & SPDL__SHUT); ++taken) {
        path = spdl__merge_pick(p, node);
        if (!spdl__merge_may(p, node, path)) break;
        if (path == SPDL__ALL_PATHS || spdl__merge_tag(p, node, path) > SPDL__HOLE) {
            spdl__merge_pass(p, node, path, now);
        } else {
            const spdl__item got = spdl__merge_take(p, node, path, now);
            if (spdl__origin_tag(got.origin) == SPDL__HOLE)
                spdl__put_nothing(p, node, 0, now);
            else
                spdl__put(node, 0, &got, now);
            spdl__store_relaxed32(&node->turn, (uint32_t)(path + 1) % (uint32_t)node->paths);
        }
        if (node->merge->turns != NULL)
            spdl__store_relaxed(&node->merge->turns_taken, node->merge->turns_taken + 1);
        spdl__full_barrier();
        spdl__wake_hint(p, node, node->near, taken == 0);
    }
    spdl__word_move(p, node, (uint64_t)0 - 1);
    spdl__wake_hint(p, node, node->beside, false);
    return taken > 0;
}

/* ============================================================================================= */
/* >>step-impl
   What a worker does in a pipeline, and the thread of a source with .threads.

   A worker that steps looks for the row furthest downstream that has something to do, and sits
   there. It never keeps an item it has not begun, and never waits in a row. The thread of a source
   sits in that row only, and sleeps while there is no room: as a producer, on `room`.

   Threads: workers, with workers = 0 the consumer, and the producer. */

/* Runs the fini of every init that succeeded on this worker. */
SPDL__PRIVATE void spdl__step_fini(spdl_pipeline *p, spdl_task *task) {
    const uint32_t inits = task->inits;
    int i;
    if (inits == 0) return;
    task->inits = 0;
    for (i = p->count - 1; i >= 0; --i) {
        const spdl__node *node = &p->node[i];
        if ((inits >> i & 1) != 0 && node->row.fini != NULL)
            node->row.fini(node->row.ctx, node->own_thread ? 0 : task->worker,
                           p->local[task->worker * p->count + i]);
    }
    if (!spdl__is_pool_thread(p, task->worker)) return;
    spdl__add32(&p->left, 1);
    spdl__os_event_wake(&p->quiet, SPDL__ALL);
}

/* Whether calls of this row are not longer than that on average; one that was not timed yet may
   be. */
SPDL__INLINE bool spdl__step_suits(const spdl__node *node, uint64_t longest) {
    return longest == SPDL__NEVER || node->gathers ||
           spdl__load_relaxed(&node->item_ns) - 1 < longest;
}

/* One piece of work, as far downstream as possible: first where nobody else is, as two in one row
   send its word to and fro. From rows whose calls take longer than `longest` it keeps away. */
SPDL__PRIVATE bool spdl__step_for(spdl_pipeline *p, int worker, uint64_t longest) {
    spdl_task *task = &p->task[worker];
    const uint64_t late = p->pool != NULL ? p->pool->worker[worker].until : SPDL__NEVER;
    int joins, i;
    for (joins = 0; joins < 2; ++joins) {
        for (i = p->count - 1; i >= 0; --i) {
            spdl__node *node = &p->node[i];
            const uint64_t word = spdl__load(node->word);
            bool done;
            if (((word & SPDL__ACTIVE) != 0 && node->parked == NULL) != (joins != 0) ||
                !spdl__row_has_work(p, node, word) || !spdl__step_suits(node, longest))
                continue;
            if (node->row.kind == SPDL_KIND_MERGE) done = spdl__merge_sit(p, node);
            else if (node->plain) done = spdl__flow_sit_plain(task, node, late);
            else done = spdl__flow_sit_any(task, node, late);
            if (done) return true;
        }
    }
    return false;
}

SPDL__PRIVATE bool spdl__step(void *self, int worker) {
    spdl_pipeline *p = (spdl_pipeline *)self;
    if (p->has_hooks && spdl__load32(&p->leaving) && spdl__task_leaves(p, worker)) {
        spdl__step_fini(p, &p->task[worker]);
        return true;
    }
    return !spdl__load32(&p->stopping) && spdl__step_for(p, worker, SPDL__NEVER);
}

/* --- the thread of a source --- */

/* Whether it can be called now. */
SPDL__PRIVATE bool spdl__producer_may(const spdl_pipeline *p) {
    const uint64_t word = spdl__load(p->producer->word);
    return !spdl__load32(&p->stopping) && (word & SPDL__BUSY) == 0 &&
           spdl__row_room(p, p->producer, word) > 0;
}

/* From here on, or no longer, whatever takes or puts looks whether this thread waits. */
SPDL__PRIVATE void spdl__waiter_add(spdl_pipeline *p, uint32_t count) {
    spdl__add32(&p->beacon->sleepers, count);
}

/* Sleeps until there is room, a rewind, or the end. */
SPDL__PRIVATE void spdl__producer_sleep(spdl_pipeline *p) {
    const spdl_profiler *profiler = &p->profiler;
    const uint32_t word = spdl__load32(&p->room.word);
    spdl__waiter_add(p, SPDL__WAITER);
    (void)spdl__exchange32(&p->producer_waits, 1);
    spdl__full_barrier(); /* pairs with those after the takes */
    spdl__profile(profiler, SPDL_EVENT_WAIT_BEGIN, p->producer->name, 0);
    if (!spdl__load32(&p->producer_quits) && !spdl__producer_may(p))
        (void)spdl__os_event_sleep(&p->room, word, SPDL__NEVER);
    spdl__profile(profiler, SPDL_EVENT_WAIT_END, p->producer->name, 0);
    spdl__store32(&p->producer_waits, 0);
    spdl__waiter_add(p, (uint32_t)0 - SPDL__WAITER);
}

/* A reference less. (>>stop-impl) */
SPDL__PRIVATE void spdl__pipeline_drop(spdl_pipeline *p);

SPDL__PRIVATE void *spdl__producer_main(void *arg) {
    spdl_pipeline *p = (spdl_pipeline *)arg;
    spdl_task *task = &p->task[p->workers - 1];
    int round = 0;
    spdl__store(&p->producer_id, spdl__os_thread_id());
    if (p->producer_thread.refused) return NULL; /* create fails */
    spdl__profile(&p->profiler, SPDL_EVENT_THREAD_BEGIN, p->producer->name, 0);
    while (!spdl__load32(&p->producer_quits) && !task->gone) {
        if (spdl__producer_may(p) && spdl__flow_sit_any(task, p->producer, SPDL__NEVER)) {
            round = 0;
            continue;
        }
        if (task->gone) break; /* the pool may be, too */
        if (spdl__backoff(&round, SPDL__IDLE_YIELDS)) continue;
        spdl__producer_sleep(p);
        round = 0;
    }
    spdl__step_fini(p, task);
    spdl__profile(&p->profiler, SPDL_EVENT_THREAD_END, p->producer->name, 0);
    if (task->gone) spdl__pipeline_drop(p);
    return NULL;
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
        if (spdl_stopping(task) || (spdl__load(node->word) & SPDL__SHUT) != 0) {
            task->cut_short = true; /* neither an item nor the end of them */
            return SPDL_SKIP;
        }
        result = row->next(row->ctx, out, SPDL__FROM_NS);
    } while (result == SPDL_TIMEOUT);
    if (result == SPDL_OK || result == SPDL_END) return result;
    *out = NULL;
    if (result < 0 && row->next == spdl_pipeline_next && row->ctx != NULL) {
        const char *text = spdl_pipeline_error((const spdl_pipeline *)row->ctx)->text;
        if (text[0] != '\0') (void)spdl_fail(task, "%s", text);
    } else if (result > 0) {
        (void)spdl_fail(task, "its next function returned %d (%s)", (int)result,
                        spdl_result_text(result));
    }
    return result < 0 ? result : SPDL_E_STAGE;
}

static const spdl_function spdl__from = { spdl__from_call, "from", "void", NULL };

/* ============================================================================================= */
/* >>next-impl
   The ends of a pipeline: the consumer takes from the sink, the producer pushes into the feed. Both
   look a few times, then sleep until a worker wakes them (>>row-impl). With .next_works_ns, and
   with workers = 0, the consumer runs rows while it would wait: in a place of a guest, or as worker
   0.

   Threads: next is the consumer's, push the producer's. An item is the caller's after next and
            before push has returned SPDL_OK. */

#define SPDL__WATERMARK_BUFFER 8 /* a sink that large has a low watermark, see sink_hint */
#define SPDL__TAKER_ITEMS 16 /* with reports: after so many the consumer reads its schedstat */

/* --- the consumer --- */

/* Whether this is the child of a fork: it has no workers. */
SPDL__PRIVATE bool spdl__pipeline_forked(const spdl_pipeline *p) {
    return p->threaded && p->process != spdl__os_process_id();
}

/* After a take: wakes a worker for the last row. With a large buffer only when no more than half of
   it is filled or under way (the low watermark; not where the producer may be the consumer). Waking
   may take the processor away from us. */
SPDL__PRIVATE void spdl__sink_hint(spdl_pipeline *p) {
    const spdl__node *last = p->last;
    const spdl__edge *sink = p->sink;
    uint64_t there;
    spdl__barrier_after_rmw();
    if (!spdl__wake_wanted(p->beacon, p->bit)) return;
    there = spdl__row_at(last, spdl__load(last->word)) - spdl__load_relaxed(&sink->refunds) -
            spdl__head(spdl__load_relaxed(&sink->word)) + spdl__load_relaxed(&sink->dropped);
    if (p->feed == NULL && sink->buffer_size >= SPDL__WATERMARK_BUFFER &&
        2 * there > sink->buffer_size + (uint64_t)spdl__load_relaxed32(&last->limit))
        return;
    spdl__wake_look(p, last, (uint32_t)1 << last->index, false);
}

/* With a feed: the consumer takes an answer. How long that took since the push goes to the feed's
   row, which makes no calls. */
SPDL__PRIVATE void spdl__sink_answer(spdl_pipeline *p, const spdl__slot *item, uint64_t now) {
    spdl__counters *counters = &p->feed->counters[p->workers];
    const uint64_t ns = spdl__range_age(p->last_item.range, now);
    spdl__counters_time(counters, 1, ns, ns);
    spdl__count(&p->answer_wait_ns, spdl__min(ns, spdl__slot_age(item, now)));
}

/* The consumer: for how long it has been on a run queue since the first item. */
SPDL__COLD void spdl__taker_look(spdl_pipeline *p) {
    uint64_t queued;
    spdl__os_thread_times(NULL, NULL, &queued);
    if (queued != SPDL__NEVER && p->taker_queued_ns != SPDL__NEVER)
        spdl__store_relaxed(&p->consumer_runnable_ns, spdl__grown(p->taker_queued_ns, queued));
}

/* The first item was taken. */
SPDL__COLD void spdl__sink_first(spdl_pipeline *p, uint64_t now) {
    const uint64_t since = p->wait_since;
    spdl__store_relaxed(&p->first_wait_ns, p->wait_ns + (since != 0 ? now - since : 0));
    spdl__store_relaxed(&p->first_item_ns, now - p->start_ns);
    spdl__os_thread_times(NULL, NULL, &p->taker_queued_ns);
    spdl__store(&p->taker, spdl__os_thread_id());
}

/* The head of the sink moves to `head`; `item`: the slot of the item taken by that, or NULL. The
   clock is read when that begins or ends something: it costs more than the rest. */
SPDL__PRIVATE void spdl__sink_moves(spdl_pipeline *p, uint64_t head, const spdl__slot *item) {
    spdl__edge *sink = p->sink;
    const uint64_t waits = spdl__load_relaxed(&p->wait_since);
    const bool timed = !SPDL__NO_STATS && (p->delivered == 0 || p->feed != NULL || waits != 0 ||
                                           spdl__load_relaxed(&sink->gap_since) != 0 ||
                                           !spdl__edge_ready(sink, head) ||
                                           spdl__edge_ready(sink, head + sink->buffer_size - 1));
    const uint64_t now = timed ? spdl_time_ns() : 0;
    const uint64_t waited = timed ? spdl__edge_put_wait(sink, head - 1, now) : 0;
    if (item != NULL && timed) {
        if (p->feed != NULL) spdl__sink_answer(p, item, now);
        if (p->delivered == 0) spdl__sink_first(p, now);
    }
    if (waited != 0) spdl__add(&sink->put_wait_ns, waited);
    (void)spdl__exchange(&sink->word, head << SPDL__HEAD_BITS);
    spdl__edge_took(sink, head, now, waits != 0);
    if (item != NULL) spdl__store_relaxed(&p->delivered, p->delivered + 1);
    if (p->reporter != NULL && p->delivered % SPDL__TAKER_ITEMS == 0) spdl__taker_look(p);
    spdl__sink_hint(p);
}

/* What lies at the head says that it is over. It stays there. */
SPDL__PRIVATE spdl_result spdl__sink_over(spdl_pipeline *p, uint64_t origin) {
    const uint64_t now = spdl_time_ns();
    spdl__edge_ended(p->sink, now);
    if (p->ended_ns == 0) spdl__store_relaxed(&p->ended_ns, now);
    if (spdl__origin_tag(origin) == SPDL__FAIL) return p->node[origin >> 8].error.result;
    if (spdl__origin_tag(origin) == SPDL__END) spdl__fail_log(p); /* else calls may still run */
    return SPDL_END;
}

/* The item at the head was delivered before this run. */
SPDL__COLD void spdl__sink_drop(spdl_pipeline *p, uint64_t head, const spdl__item *got) {
    --p->drops;
    spdl__position_watch(p, got);
    spdl__sink_moves(p, head + 1, NULL);
    spdl__add(&p->last->counters[p->workers].freed, 1);
    spdl__item_free(p, got->item, got->origin); /* user code */
}

/* Takes the next item if there is one: SPDL_OK, SPDL_EMPTY, or how it ended. */
SPDL__PRIVATE spdl_result spdl__sink_take(spdl_pipeline *p, void **item) {
    /* the stop is looked at before the items: what was put before it is still handed out */
    const bool halted = spdl__load32(&p->stopping) != 0;
    spdl__edge *sink = p->sink;
    uint64_t head = spdl__head(spdl__load_relaxed(&sink->word));
    for (; !p->closed_returned; ++head) {
        const spdl__slot *slot = spdl__edge_slot(sink, head);
        spdl__item got;
        unsigned tag;
        if (!spdl__slot_has(slot, head)) {
            if (!halted) return SPDL_EMPTY;
            p->closed_returned = true;
            (void)spdl__sink_over(p, 0);
            break;
        }
        got = spdl__slot_read(slot);
        tag = spdl__origin_tag(got.origin);
        if (SPDL__LIKELY(tag < SPDL__HOLE)) {
            if (SPDL__UNLIKELY(p->drops > 0)) {
                spdl__sink_drop(p, head, &got);
                continue;
            }
            spdl__position_watch(p, &got);
            p->last_item = got;
            memcpy(item, &got.item, sizeof(*item)); /* *item may be any object pointer */
            spdl__sink_moves(p, head + 1, slot);
            return SPDL_OK;
        }
        if (tag == SPDL__END || tag == SPDL__FAIL) return spdl__sink_over(p, got.origin);
        if (tag == SPDL__HOLE) spdl__store(&sink->dropped, sink->dropped + 1); /* before the head */
        else spdl__store_relaxed(&sink->marks, sink->marks + 1);
        if (tag == SPDL__EPOCH) spdl__position_epoch(p);
        spdl__sink_moves(p, head + 1, NULL);
        if (tag == SPDL__EPOCH) return SPDL_END;
    }
    return SPDL_CLOSED;
}

/* Whether the consumer would find work in rows that suit it. */
SPDL__PRIVATE bool spdl__next_could(const spdl_pipeline *p, uint64_t longest) {
    int i;
    for (i = p->count - 1; i >= 0 && !spdl__load32(&p->stopping); --i)
        if (spdl__step_suits(&p->node[i], longest) && spdl__row_runnable(p, &p->node[i]))
            return true;
    return false;
}

/* Sleeps until something is put into the sink, or if the consumer works (`worker` is not -1) until
   something can be run. A put, take or leave that comes later is followed by a full barrier and a
   look at `waiting`; what was put before is seen here, after the barrier. */
SPDL__PRIVATE spdl_result spdl__next_sleep(spdl_pipeline *p, void **item, uint64_t deadline,
                                           bool *late, int worker, uint64_t longest) {
    const uint32_t word = spdl__load32(&p->fed.word);
    spdl_result result;
    (void)spdl__exchange32(&p->waiting, 1);
    spdl__wake_passed(p); /* begins with a full barrier */
    result = spdl__sink_take(p, item);
    SPDL_TEST_POINT("trainer about to sleep");
    if (result == SPDL_EMPTY && !(worker >= 0 && spdl__next_could(p, longest))) {
        if (spdl__pipeline_forked(p)) {
            result = SPDL_E_INVALID;
        } else {
            *late = spdl__os_event_sleep(&p->fed, word, deadline) == SPDL_TIMEOUT;
            result = spdl__sink_take(p, item);
        }
    }
    spdl__store32(&p->waiting, 0);
    return result;
}

/* Works, looks again a few times, then sleeps, until there is a result. */
SPDL__PRIVATE spdl_result spdl__next_wait(spdl_pipeline *p, void **item, uint64_t deadline) {
    const bool works = p->works_ns != 0 && p->pool != NULL && !spdl__pipeline_forked(p);
    spdl__worker *guest = works ? spdl__guest_enter(p->pool, SPDL__NEVER) : NULL;
    const int worker = p->pool == NULL ? 0 : guest != NULL ? guest->index : -1;
    const uint64_t longest = p->pool == NULL ? SPDL__NEVER : p->works_ns;
    spdl_result result = SPDL_EMPTY;
    bool late = false, slept = false, booked = false;
    int round = 0;
    spdl__store(&p->trainer, spdl__os_thread_id());
    while (result == SPDL_EMPTY && !late) {
        if (!booked && p->pool != NULL && (worker >= 0 || round >= SPDL_SPINS)) {
            spdl__blame_begin(p, p->wait_since); /* shorter waits are not worth it */
            booked = true;
        }
        if (worker >= 0 && !spdl__load32(&p->stopping) && spdl__step_for(p, worker, longest)) {
            result = spdl__sink_take(p, item);
            late = result == SPDL_EMPTY && spdl__late(deadline);
            round = 0;
        } else if (p->pool != NULL && spdl__backoff(&round, SPDL__IDLE_YIELDS)) {
            result = spdl__sink_take(p, item);
        } else {
            if (!slept) spdl__waiter_add(p, SPDL__WAITER);
            slept = true;
            result = spdl__next_sleep(p, item, deadline, &late, worker, longest);
        }
    }
    if (slept) spdl__waiter_add(p, (uint32_t)0 - SPDL__WAITER);
    if (booked) spdl__blame_mark(p, true);
    spdl__store(&p->trainer, 0);
    if (guest != NULL) spdl__guest_leave(guest);
    return result == SPDL_EMPTY ? SPDL_TIMEOUT : result;
}

SPDL_API spdl_result spdl_pipeline_next(spdl_pipeline *p, void **item, int64_t timeout_ns) {
    spdl_result result;
    if (p == NULL || item == NULL) return SPDL_E_INVALID;
    if (SPDL__UNLIKELY(spdl__exchange32(&p->trainer_inside, 1) != 0)) {
        spdl__log(&p->logger, SPDL_LOG_ERROR, "spdl_pipeline_next: another thread is inside");
        return SPDL_E_INVALID;
    }
    result = spdl__sink_take(p, item);
    if (result == SPDL_EMPTY && timeout_ns == 0 && p->pool != NULL) {
        spdl__wake_passed(p);
        result = SPDL_TIMEOUT;
    } else if (result == SPDL_EMPTY) {
        const uint64_t deadline = spdl__deadline(timeout_ns), since = spdl_time_ns();
        const uint64_t waited_for = p->delivered;
        spdl__store_relaxed(&p->wait_since, since);
        SPDL__PROBE(next_wait_begin, p->last->name, p->delivered);
        spdl__profile(&p->profiler, SPDL_EVENT_WAIT_BEGIN, "next", waited_for);
        result = spdl__next_wait(p, item, deadline);
        spdl__profile(&p->profiler, SPDL_EVENT_WAIT_END, "next", waited_for);
        SPDL__PROBE(next_wait_end, p->last->name, p->delivered);
        if (SPDL__TRACED(p->trace))
            spdl__trace_add(&p->trace->track[p->workers], SPDL__RECORD_NEXT, p->count - 1,
                            (int)result, since, spdl_time_ns(), p->delivered - (result == SPDL_OK));
        spdl__store_relaxed(&p->wait_since, 0);
        spdl__store(&p->wait_ns, p->wait_ns + (spdl_time_ns() - since)); /* pairs with wait_sum */
    }
    if (SPDL__UNLIKELY(p->doctor != NULL) && result == SPDL_OK) spdl__doctor_item(p->doctor);
    spdl__store32(&p->trainer_inside, 0);
    return result;
}

SPDL_API spdl_result spdl_pipeline_next(void *pipeline, void **item, int64_t timeout_ns) {
    return spdl_pipeline_next((spdl_pipeline *)pipeline, item, timeout_ns);
}

/* Time the consumer has waited, an open wait too. The sum is read first: it pairs with next, which
   ends a wait before it adds it, so none is counted twice. */
SPDL__PRIVATE uint64_t spdl__wait_sum(const spdl_pipeline *p, uint64_t now) {
    const uint64_t closed = spdl__load(&p->wait_ns);
    const uint64_t opened = spdl__load_relaxed(&p->wait_since);
    return closed + (opened != 0 && now > opened ? now - opened : 0);
}

SPDL_API bool spdl_pipeline_failed(const spdl_pipeline *p) { return spdl__load32(&p->failed) != 0; }

SPDL_API uint32_t spdl_pipeline_failed_stages(const spdl_pipeline *p) {
    return spdl__load32(&p->failed);
}

/* That of the mark which the consumer has met; before that, of the row furthest downstream. */
SPDL_API const spdl_error *spdl_pipeline_error(const spdl_pipeline *p) {
    const uint32_t failed = spdl__load32(&p->failed);
    const uint64_t head = spdl__head(spdl__load(&p->sink->word));
    const spdl__slot *slot = spdl__edge_slot(p->sink, head);
    const bool has = spdl__slot_has(slot, head); /* first: else this is what was there before */
    const uint64_t origin = spdl__load_relaxed(&slot->origin);
    int i = p->count - 1;
    if (failed == 0) return &p->no_error;
    if (has && spdl__origin_tag(origin) == SPDL__FAIL)
        i = (int)(origin >> 8);
    else
        while (!(failed >> i & 1)) --i;
    return &p->node[i].error;
}

/* --- the producer --- */

SPDL__PRIVATE spdl_result spdl__push_try(spdl_pipeline *p, void *item) {
    spdl__node *feed = p->feed;
    spdl__counters *counters = &feed->counters[0];
    spdl__item what;
    uint64_t now;
    if ((spdl__load(&feed->own) & SPDL__SHUT) != 0 || spdl__load32(&p->stopping))
        return SPDL_CLOSED;
    if (spdl__row_room(p, feed, 0) == 0) return SPDL_FULL;
    now = SPDL__NO_STATS ? 0 : spdl_time_ns();
    what.item = item;
    what.origin = spdl__origin(feed->made, (unsigned)feed->index);
    what.range = now >> SPDL__PUSHED_BITS;
    spdl__store_relaxed(&feed->made, feed->made + 1);
    spdl__count(&counters->tasks, 1);
    spdl__count(&counters->made, 1);
    spdl__put(feed, 0, &what, now);
    spdl__wake_changed(p, feed);
    return SPDL_OK;
}

/* Takes the oldest item by the reader's own swap, as if the reader had dropped it. A ticket that
   the reader promises with it gets a hole. When that cannot be now the reader is at work: there is
   room soon. */
SPDL__PRIVATE void spdl__push_drop_oldest(spdl_pipeline *p) {
    spdl__node *feed = p->feed, *reader = feed + 1;
    uint64_t word = spdl__load(reader->word);
    const uint64_t head = spdl__head(word), at = spdl__row_at(reader, word);
    const spdl__slot *slot = spdl__edge_slot(&feed->out, head);
    const bool ready = spdl__slot_has(slot, head);
    const spdl__item got = spdl__slot_read(slot);
    if (!ready || spdl__origin_tag(got.origin) >= SPDL__HOLE ||
        (word & SPDL__ACTIVE) == SPDL__PASSING || (word & SPDL__SHUT) != 0 ||
        !spdl__row_passes_hole(p, reader, word) ||
        !spdl__cas(reader->word, &word, word + SPDL__HEAD_ONE)) {
        spdl__os_yield();
        return;
    }
    spdl__put_nothing(p, reader, at, spdl_time_ns());
    spdl__count(&feed->counters[0].skips, 1);
    spdl__wake_changed(p, reader);
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
    if (result == SPDL_FULL || result == SPDL_TIMEOUT)
        spdl__count(&p->feed->counters[0].failures, 1); /* to a feed: refused */
    spdl__store32(&p->producer_inside, 0);
    return result;
}

/* The edge has a slot more than its room, for this mark. */
SPDL_API spdl_result spdl_pipeline_push_end(spdl_pipeline *p) {
    const spdl__item end = { NULL, SPDL__END, 0 };
    if (p == NULL || p->feed == NULL) return SPDL_E_INVALID;
    if (spdl__exchange32(&p->producer_inside, 1) != 0) return SPDL_E_INVALID;
    if ((spdl__or(&p->feed->own, SPDL__SHUT) & SPDL__SHUT) == 0)
        spdl__put(p->feed, 0, &end, spdl_time_ns());
    spdl__wake_changed(p, p->feed);
    spdl__store32(&p->producer_inside, 0);
    return SPDL_OK;
}

/* ============================================================================================= */
/* >>stop-impl
   Changes while a pipeline runs, its stop, rewind and destruction. Any thread may stop: SHUT in
   every word lets nobody enter a row any more, the calls inside end, and the thread that waited for
   them frees what nobody can take. The owner destroys. */

#ifndef SPDL__DESTROY_WARN_NS
#define SPDL__DESTROY_WARN_NS SPDL_SECONDS(5) /* then destroy reports what it waits for */
#endif

SPDL_API int spdl__pipeline_find(const spdl_pipeline *p, const char *name) {
    int i;
    for (i = 0; name != NULL && i < p->count; ++i)
        if (strcmp(p->node[i].name, name) == 0) return i;
    return -1;
}

SPDL_API spdl_result spdl_pipeline_set_concurrency(spdl_pipeline *p, int stage, int concurrency) {
    if (p == NULL || stage < 0 || stage >= p->count) return SPDL_E_INVALID;
    if (p->node[stage].row.kind != SPDL_KIND_PIPE) return SPDL_E_INVALID;
    if (concurrency < 1 || concurrency > p->node[stage].row.concurrency) return SPDL_E_LIMIT;
    spdl__store32(&p->node[stage].limit, (uint32_t)concurrency);
    spdl__wake_changed(p, &p->node[stage]);
    return SPDL_OK;
}

/* Whether this thread runs a call: to wait for the calls that run would be to wait for itself. */
SPDL__PRIVATE bool spdl__pipeline_inside(const spdl_pipeline *p) {
    const uint64_t thread = spdl__os_thread_id();
    if (p->pool != NULL && spdl__pool_is_worker(p->pool)) return true;
    if (p->producer != NULL && spdl__load(&p->producer_id) == thread) return true;
    return p->pool == NULL && spdl__load(&p->trainer) == thread;
}

/* After halt: waits until no call is inside of a row, but for one of the producer that is
   `left`. */
SPDL__PRIVATE spdl_result spdl__pipeline_await_quiet(spdl_pipeline *p, uint64_t deadline,
                                                     const spdl__node *left) {
    spdl_result slept = SPDL_OK;
    int i = 0;
    while (i < p->count) {
        const uint32_t word = spdl__load32(&p->quiet.word);
        spdl__parked_drop_all(p);
        if (&p->node[i] == left ||
            (spdl__load(p->node[i].word) & SPDL__ACTIVE) == 0) { /* pairs with word_move */
            ++i;
        } else {
            if (slept == SPDL_TIMEOUT) return SPDL_TIMEOUT;
            slept = spdl__os_event_sleep(&p->quiet, word, deadline);
        }
    }
    return SPDL_OK;
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
        for (; ticket < end; ++ticket) {
            spdl__slot *slot = spdl__edge_slot(&node->out, ticket);
            uint64_t origin;
            if (!spdl__slot_has(slot, ticket)) continue; /* a push may be at it */
            origin = spdl__load_relaxed(&slot->origin);
            if (spdl__origin_tag(origin) >= SPDL__HOLE) continue;
            spdl__store_relaxed(&slot->origin, spdl__origin(0, SPDL__HOLE));
            spdl__add(&counters->freed, 1);
            spdl__item_free(p, spdl__load_pointer(&slot->item), origin);
        }
    }
    spdl__unlock(&p->purge_lock, &p->locks);
}

/* No worker enters a row any more, and those inside take no further item. */
SPDL__PRIVATE void spdl__pipeline_halt(spdl_pipeline *p) {
    spdl__store32(&p->stopping, 1);
    spdl__word_shut(p, UINT32_MAX); /* a full barrier, and the producer */
    spdl__wake_consumer(p);
}

SPDL_API void spdl_stop(spdl_task *task) { spdl__pipeline_halt(task->pipeline); }

/* A stop waits until a rewind is over. One in a free_item that the rewind calls has no need to. */
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
        result = spdl__pipeline_await_quiet(p, deadline, NULL);
        if (result != SPDL_OK && timeout_ns != 0) spdl__store32(&p->late, 1);
    }
    if (result == SPDL_OK) {
        spdl__pipeline_purge(p, 1);
        spdl__fail_log(p);
    }
    spdl__sub32(&p->stops, 1);
    spdl__os_event_wake(&p->quiet, SPDL__ALL);
    return result;
}

/* --- rewind --- */

/* The ticket that the row would give to its next result. */
SPDL__PRIVATE uint64_t spdl__rewind_ticket(const spdl__node *node) {
    return node->by_ticket ? spdl__head(spdl__load(node->word)) + spdl__load_relaxed(&node->base)
                           : spdl__load_relaxed(&node->out.tail);
}

/* Quiet and purged: the edge is empty, its head at the next ticket. What it moves over counts as
   neither taken nor dropped. */
SPDL__PRIVATE void spdl__rewind_edge(spdl__node *node, uint64_t ticket, uint64_t now, bool sink) {
    spdl__edge *edge = &node->out;
    const uint64_t head = spdl__head(spdl__load(&edge->word));
    spdl__store(&edge->dropped, edge->dropped + (ticket - head));
    spdl__store(&edge->refunds, edge->dropped);
    spdl__store_relaxed(&edge->tail, ticket);
    spdl__store_relaxed(&edge->ended_ns, 0);
    if (spdl__load_relaxed(&edge->gap_since) == 0) {
        spdl__store_relaxed(&edge->idle_since, sink ? 0 : now);
        spdl__store_relaxed(&edge->gap_since, now);
    }
    spdl__store(&edge->word, ticket << SPDL__HEAD_BITS | SPDL__SHUT);
}

/* As create has left it, but for the position. */
SPDL__PRIVATE void spdl__rewind_node(spdl_pipeline *p, spdl__node *node, const spdl__start *start) {
    const spdl__position *at = &start->at;
    spdl__store_relaxed(&node->base, node->out.tail - spdl__head(spdl__load(node->word)));
    node->first = node->out.tail;
    node->flushed = false;
    node->sheds = start->loads && node->row.flush && !node->gathers &&
                  (node->gathered || node->sheds);
    node->gathered = node->holds = false;
    spdl__store_relaxed32(&node->turn, 0);
    spdl__store_relaxed(&node->turns_put, 0);
    spdl__store_relaxed(&node->turns_taken, 0);
    node->number = node->number_first = node == p->marks ? at->number : 0;
    spdl__mark_begin(&node->mark, at->source);
    spdl__store_relaxed(&node->epoch, at->epoch);
    spdl__store_relaxed(&node->made, at->source);
    node->dropped = node->in != NULL ? node->in->dropped : 0;
    node->place_epoch = at->epoch;
    node->place_dropped = 0;
    spdl__store_relaxed(&node->failures, 0);
}

/* What a load makes of the sampler, or a rewind, of NULL. (>>state-impl) */
SPDL__PRIVATE void spdl__state_edit(spdl_sampler *sampler, const spdl_sampler *from);

/* SHUT goes: pairs with the acquire of who enters. */
SPDL__PRIVATE void spdl__word_open(uint64_t *word) {
    uint64_t old = spdl__load(word);
    while (!spdl__cas(word, &old, spdl__head(old) << SPDL__HEAD_BITS)) {}
}

/* Nobody enters a row, and no end of the pipeline is in use: everything starts again. */
SPDL__PRIVATE void spdl__rewind_all(spdl_pipeline *p, const spdl__start *start) {
    const uint64_t now = spdl_time_ns();
    uint64_t ticket[SPDL_MAX_STAGES];
    int i;
    spdl__pipeline_purge(p, 0);
    for (i = 0; i < p->count; ++i) ticket[i] = spdl__rewind_ticket(&p->node[i]);
    for (i = 0; i < p->count; ++i)
        spdl__rewind_edge(&p->node[i], ticket[i], now, i == p->count - 1);
    for (i = 0; i < p->count; ++i) spdl__rewind_node(p, &p->node[i], start);
    if (p->sampler != NULL) spdl__state_edit(p->sampler, start->sampler);
    spdl__store32(&p->failed, 0);
    spdl__store32(&p->late, 0);
    p->closed_returned = false;
    memset(&p->last_item, 0, sizeof(p->last_item));
    spdl__position_begin(p, &start->at);
    spdl__store_relaxed(&p->ended_ns, 0);
    spdl__store32(&p->stopping, 0);
    for (i = p->count - 1; i >= 0; --i) { /* the source last: before it nobody calls anything */
        spdl__word_open(&p->node[i].out.word);
        spdl__word_open(&p->node[i].own);
    }
    if (spdl__load32(&p->stopping)) spdl__word_shut(p, UINT32_MAX); /* a stop came meanwhile */
    spdl__wake_all(p);
}

/* This thread is the rewinder as soon as no other thread is in stop; one that comes later waits. */
SPDL__PRIVATE spdl_result spdl__rewind_await_stops(spdl_pipeline *p, uint64_t deadline) {
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

/* Both ends of the pipeline are in hand before anything is stopped. */
SPDL__PRIVATE spdl_result spdl__pipeline_go(spdl_pipeline *p, const spdl__start *start,
                                            uint64_t deadline) {
    spdl_result result = SPDL_E_INVALID;
    if (p == NULL || start->at.source >> (64 - SPDL__SPAN_BITS) != 0 || spdl__pipeline_forked(p) ||
        spdl__pipeline_inside(p) || spdl__load(&p->rewinder) != 0)
        return SPDL_E_INVALID;
    if (spdl__exchange32(&p->trainer_inside, 1) != 0) return SPDL_E_INVALID;
    if (p->feed == NULL || spdl__exchange32(&p->producer_inside, 1) == 0) {
        result = spdl__rewind_await_stops(p, deadline);
        if (result == SPDL_OK) {
            spdl__pipeline_halt(p);
            result = spdl__pipeline_await_quiet(p, deadline, NULL);
            if (result == SPDL_OK) spdl__rewind_all(p, start);
            spdl__store(&p->rewinder, 0);
            spdl__os_event_wake(&p->quiet, SPDL__ALL);
        }
        if (p->feed != NULL) spdl__store32(&p->producer_inside, 0);
    }
    spdl__store32(&p->trainer_inside, 0);
    return result;
}

SPDL_API spdl_result spdl_pipeline_rewind(spdl_pipeline *p, uint64_t sequence,
                                          int64_t timeout_ns) {
    spdl__start start;
    memset(&start, 0, sizeof(start));
    start.at.source = sequence;
    return spdl__pipeline_go(p, &start, spdl__deadline(timeout_ns));
}

/* --- destroy --- */

/* No thread of the pool comes any more. Each has run its fini itself; those of other places run
   here. */
SPDL__PRIVATE void spdl__destroy_part(spdl_pipeline *p) {
    int i;
    spdl__store32(&p->leaving, 1);
    spdl__full_barrier(); /* pairs with that in pool_park: a worker is asleep, or will see it */
    spdl__client_stir(p->beacon, p->bit);
    if (p->pool != NULL) spdl__pool_wake_all(p->pool);
    while (p->has_hooks) {
        const uint32_t word = spdl__load32(&p->quiet.word);
        if (spdl__load32(&p->left) == spdl__load32(&p->joined)) break;
        (void)spdl__os_event_sleep(&p->quiet, word, SPDL__NEVER);
    }
    if (p->slot != NULL) spdl__pool_detach(p->pool, p->slot);
    p->slot = NULL;
    for (i = 0; i < p->workers - (p->producer != NULL); ++i) spdl__step_fini(p, &p->task[i]);
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
                       "%llu items of stage %d '%s' were freed by nobody: its row has no "
                       "free_item", (spdl__llu)items, i, p->node[i].name);
    }
}

/* Frees whatever create has made so far, but the pool. */
SPDL__PRIVATE void spdl__pipeline_release(spdl_pipeline *p) {
    const spdl_allocator allocator = p->allocator;
    const size_t workers = (size_t)p->workers;
    int i;
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
        spdl__free(&allocator, node->out.slots, (size_t)(node->out.mask + 1) * sizeof(spdl__slot));
        spdl__free(&allocator, node->counters, (workers + 1) * sizeof(*node->counters));
        spdl__free(&allocator, node->parked, (size_t)node->most * sizeof(*node->parked));
        spdl__free(&allocator, node->turns, (size_t)(node->turns_mask + 1) * sizeof(*node->turns));
    }
    spdl__free(&allocator, p->node, (size_t)p->count * sizeof(*p->node));
    spdl__free(&allocator, p->task, workers * sizeof(*p->task));
    spdl__free(&allocator, p->local, workers * (size_t)p->count * sizeof(*p->local));
    spdl__os_event_fini(&p->fed);
    spdl__os_event_fini(&p->quiet);
    spdl__os_event_fini(&p->room);
    spdl__os_event_fini(&p->locks);
    spdl__free(&allocator, p, sizeof(*p));
}

SPDL__PRIVATE void spdl__pipeline_drop(spdl_pipeline *p) {
    if (spdl__sub(&p->references, 1) == 1) spdl__pipeline_release(p);
}

/* The thread of a source ends, or is left in its call, which may never return. A next function
   keeps to its timeout: it is left only when it was waited for (`long_ago`). Whether it is left. */
SPDL__PRIVATE bool spdl__destroy_abandons(spdl_pipeline *p, bool long_ago) {
    uint32_t calling = 1;
    if (p->producer == NULL || !p->producer_started) return false;
    if (p->producer->row.next != NULL && !long_ago) return false;
    spdl__add(&p->references, 1); /* before: its thread may be the last one soon */
    if (spdl__cas32(&p->producer->calling, &calling, SPDL__ABANDONED)) return true;
    spdl__sub(&p->references, 1);
    return false;
}

SPDL__PRIVATE void spdl__destroy_producer(spdl_pipeline *p, bool left) {
    if (!p->producer_started) return;
    spdl__store32(&p->producer_quits, 1);
    spdl__full_barrier();
    spdl__wake_producer(p);
    if (left) spdl__os_thread_detach(&p->producer_thread);
    else spdl__os_thread_join(&p->producer_thread);
    p->producer_started = false;
}

/* Destroy has waited for long: what for. */
SPDL__PRIVATE void spdl__destroy_warn(spdl_pipeline *p) {
    int i;
    for (i = 0; i < p->count; ++i) {
        const spdl__node *node = &p->node[i];
        if ((spdl__load(node->word) & SPDL__ACTIVE) == 0) continue;
        spdl__logf(&p->logger, SPDL_LOG_WARN,
                   "spdl_pipeline_destroy %s a call of stage %d '%s' to return%s",
                   node->own_thread ? "no longer waits for" : "waits for", i, node->name,
                   node->row.deferred ? " and be completed" : "");
    }
}

/* Waits until no call is inside. The row whose call it has gone on without, or NULL; false: without
   threads nobody else can complete a call, and nothing is freed that one may use. */
SPDL__PRIVATE bool spdl__destroy_await(spdl_pipeline *p, const spdl__node **left) {
    *left = spdl__load32(&p->late) && spdl__destroy_abandons(p, false) ? p->producer : NULL;
    if (spdl__pipeline_await_quiet(p, spdl__deadline(SPDL__DESTROY_WARN_NS), *left) == SPDL_OK)
        return true;
    spdl__destroy_warn(p);
    if (*left == NULL && spdl__destroy_abandons(p, true)) *left = p->producer;
    return spdl__pipeline_await_quiet(p, SPDL__NEVER, *left) == SPDL_OK;
}

SPDL_API void spdl_pipeline_destroy(spdl_pipeline *p) {
    const spdl__node *left;
    if (p == NULL || spdl__pipeline_forked(p)) return;
    if (spdl__pipeline_inside(p)) {
        spdl__log(&p->logger, SPDL_LOG_ERROR,
                  "spdl_pipeline_destroy: called on a worker of its pool, nothing was done");
        return;
    }
    spdl__doctor_close(p);
    spdl__pipeline_halt(p);
    if (!spdl__destroy_await(p, &left)) return;
    while (spdl__load32(&p->completing) != 0) spdl__os_yield(); /* on its last steps */
    spdl__destroy_producer(p, left != NULL);
    spdl__destroy_part(p); /* last: nobody stirs the client now, as its bit is another's soon */
    spdl__pipeline_purge(p, 0);
    spdl__doctor_empty(p);
    spdl__fail_log(p);
    if (SPDL__DEBUGS) spdl__unfreed_log(p);
    spdl__report_end(p);
#ifndef SPDL_NO_REPORT
    spdl__trace_close(p);
#endif
    if (p->own_pool) spdl__pool_release(p->pool);
    spdl__pipeline_drop(p);
}

/* ============================================================================================= */
/* >>create-impl
   How create checks the rows and builds nodes and edges from them. All of it runs on the owner's
   thread. Create allocates everything, spdl__pipeline_release frees what is there. */

#define SPDL__MAX_SPARE 65536 /* batches of one row that are made ahead */
#define SPDL__ROUTED 32 /* results of a branch that may wait when the row does not say */
#define SPDL__BATCH_BUFFER 1024 /* items in front of a batch, at most, when the row does not say */

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
    int branch[SPDL_MAX_STAGES + 1]; /* the branch it is inside of; merge: that it ends; or -1 */
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
    spdl__place place;
    char line[16] = ""; /* or the name of the file has it */
    if (row->line > 0) (void)snprintf(line, sizeof(line), ":%d", row->line);
    (void)snprintf(place.text, sizeof(place.text), "%s%s",
                   row->file != NULL ? row->file : "(unknown file)", line);
    return place;
}

/* "file:line: stage 2 'decode': ...", SPDL_E_INVALID. A text that begins with a blank is
   about types: "... 'decode' takes ...", SPDL_E_TYPE. */
SPDL__PRINTF(3, 4)
SPDL__COLD spdl_result spdl__row_error(const spdl__plan *plan, int i, const char *format, ...) {
    const spdl_result result = format[0] == ' ' ? SPDL_E_TYPE : SPDL_E_INVALID;
    const spdl_stage *row = &plan->rows[i];
    char text[SPDL_TEXT_BYTES / 2];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    spdl__error_set(plan->desc->error, result, "%s: stage %d '%s'%s%s",
                    spdl__row_place(row).text, i, spdl__row_name(row),
                    result == SPDL_E_TYPE ? "" : ": ", text);
    plan->desc->error->stage = i;
    spdl__name_copy(plan->desc->error->stage_name, spdl__row_name(row));
    return result;
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
        { "threads", "source", row->threads, 1, 1 },
        { "buffer_size", NULL, row->buffer_size, 1, SPDL__MAX_BUFFER },
        { "output_order", "pipe and merge", row->output_order, 0, SPDL_ORDER_COMPLETION },
        { "item_bytes", "source, pipe and batch", (int64_t)row->item_bytes, 1, INT32_MAX },
        { "allocator", "source, pipe and batch", row->allocator != NULL, 0, 1 },
        { "drop_last", "batch", row->drop_last, 0, 1 },
        { "drop_oldest", "feed", row->drop_oldest, 0, 1 },
        { "continuous", "source", row->continuous, 0, 1 },
        { "flush", "pipe", row->flush, 0, 1 },
        { "deferred", "pipe", row->deferred, 0, 1 },
        { "again", "pipe", row->again, 0, 1 },
        { "free_state", "pipe", row->free_state != NULL, 0, 1 },
        { "max_failures", calls, row->max_failures, -1, INT32_MAX },
        { "on_drop", calls, row->on_drop != NULL, 0, 1 },
        { "free_item", "source, feed, pipe and branch", row->free_item != NULL, 0, 1 },
        { "copy_item", "source and pipe", row->copy_item != NULL, 0, 1 },
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

typedef struct spdl__rule {
    bool broken;
    const char *why;
} spdl__rule;

/* The first rule that a row breaks. */
SPDL__COLD spdl_result spdl__row_judge(const spdl__plan *plan, int i, const spdl__rule *rules,
                                       size_t count) {
    size_t k = 0;
    while (k < count && !rules[k].broken) ++k;
    return k < count ? spdl__row_error(plan, i, "%s", rules[k].why) : SPDL_OK;
}

/* Rows in the wrong place, and fields that do not go together or are missing. */
SPDL__COLD spdl_result spdl__check_rules(const spdl__plan *plan, int i) {
    const spdl_stage *row = &plan->rows[i];
    const bool source = row->kind == SPDL_KIND_SOURCE;
    const bool begins = source || row->kind == SPDL_KIND_FEED;
    const bool ends = row->kind == SPDL_KIND_SINK, last = i == plan->count - 1;
    const bool several = row->concurrency > 1;
    const spdl__rule rules[] = {
        { i == 0 && !begins, "the first row must be SPDL_SOURCE, SPDL_FROM or SPDL_FEED" },
        { i > 0 && begins, "only the first row may be SPDL_SOURCE, SPDL_FROM or SPDL_FEED" },
        { last && !ends, "the last row must be SPDL_SINK" },
        { !last && ends, "only the last row may be SPDL_SINK" },
        { i == 1 && ends && plan->rows[0].kind == SPDL_KIND_FEED,
          "after SPDL_FEED there must be a stage" },
        { spdl__row_calls(row) && row->next == NULL && (row->fn == NULL || row->fn->call == NULL),
          "fn is NULL" },
        { row->next != NULL && row->type == NULL, "next is set, but type is NULL" },
        { row->next != NULL && row->fn != NULL, "next and fn are both set" },
        { row->next != NULL && row->item_bytes != 0,
          "item_bytes is set, but what SPDL_FROM yields are items" },
        { row->kind == SPDL_KIND_BATCH && row->size == 0, "size is 0, must be at least 1" },
        { (uint64_t)row->size * row->item_bytes > SIZE_MAX / 2,
          "size times item_bytes is more than there can be memory" },
        { i == plan->count - 2 && row->buffer_size != 0,
          "buffer_size is set, but SPDL_SINK sets that of the edge after the last stage" },
        { row->fini != NULL && row->init == NULL, "fini is set without init" },
        { row->flush && several, "flush is set, but concurrency is more than 1" },
        { row->flush && row->deferred, "deferred and flush are both set" },
        { row->again && row->deferred, "again and deferred are both set" },
        { row->again && several && row->output_order == SPDL_ORDER_INPUT,
          "again is set, and concurrency is more than 1: write .output_order = "
          "SPDL_ORDER_COMPLETION, or a stage before it that does what takes long" },
        { row->free_state != NULL && !row->again, "free_state is set without again" },
    };
    return spdl__row_judge(plan, i, SPDL_TABLE(rules));
}

/* Rows of branches in the wrong place; `branch` is open. */
SPDL__COLD spdl_result spdl__check_paths(const spdl__plan *plan, int i, int branch) {
    const spdl_kind kind = plan->rows[i].kind;
    const spdl_kind before = i > 0 ? plan->rows[i - 1].kind : SPDL_KIND_NONE;
    const bool merge = kind == SPDL_KIND_MERGE, path = kind == SPDL_KIND_PATH;
    const spdl__rule rules[] = {
        { before == SPDL_KIND_BRANCH && !path, "after SPDL_BRANCH there must be SPDL_PATH" },
        { path && branch < 0, "SPDL_PATH without SPDL_BRANCH above" },
        { merge && branch < 0, "SPDL_MERGE without SPDL_BRANCH above" },
        { merge && branch >= 0 && plan->paths[branch] < 2, "SPDL_MERGE of fewer than 2 paths" },
    };
    return spdl__row_judge(plan, i, SPDL_TABLE(rules));
}

/* Which row reads the edge of which; `open` are the branches whose merge is still to come. */
SPDL__COLD spdl_result spdl__plan_connect(spdl__plan *plan) {
    int open[SPDL_MAX_STAGES + 2], depth = 0, i, k;
    spdl_result result;
    open[0] = -1;
    for (i = 0; i < plan->count; ++i) {
        const spdl_kind kind = plan->rows[i].kind;
        const int branch = open[depth];
        result = spdl__check_paths(plan, i, branch);
        if (result != SPDL_OK) return result;
        plan->branch[i] = branch;
        plan->before[i] = i - 1; /* the first: -1 */
        if (kind == SPDL_KIND_BRANCH) open[++depth] = i;
        if (kind == SPDL_KIND_PATH) {
            plan->before[i] = branch;
            plan->path[branch][plan->paths[branch]++] = (uint8_t)i;
        }
        if (kind == SPDL_KIND_MERGE) {
            --depth;
            plan->before[i] = -1;
            plan->merge[branch] = i;
            plan->paths[i] = plan->paths[branch];
            for (k = 0; k < plan->paths[i]; ++k) { /* a path ends where the next one begins */
                const int next = k + 1 < plan->paths[i] ? plan->path[branch][k + 1] : i;
                plan->path[i][k] = (uint8_t)(next - 1);
                plan->above[i] |= plan->above[next - 1] | (uint32_t)1 << (next - 1);
            }
        }
        if (plan->before[i] >= 0)
            plan->above[i] |= plan->above[plan->before[i]] | (uint32_t)1 << plan->before[i];
    }
    if (depth == 0) return SPDL_OK;
    return spdl__row_error(plan, open[depth], "SPDL_BRANCH without SPDL_MERGE below");
}

SPDL__COLD bool spdl__type_any(const char *type) {
    return strcmp(type, "void") == 0 || strcmp(type, "const void") == 0;
}

/* What a row hands on, as a type name; "void" fits anything. A merge hands on what its paths do. */
SPDL__COLD const char *spdl__row_yields(const spdl__plan *plan, int i) {
    const spdl_stage *row = &plan->rows[i];
    const char *type = "void";
    int k;
    if (row->kind == SPDL_KIND_PATH) return spdl__row_yields(plan, plan->before[i]);
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
    spdl_result result = SPDL_OK;
    int k;
    for (k = 0; before->kind == SPDL_KIND_MERGE && k < plan->paths[from]; ++k)
        if (result == SPDL_OK) result = spdl__check_pair(plan, i, plan->path[from][k]);
    if (result != SPDL_OK || spdl__types_fit(takes, yields)) return result;
    return spdl__row_error(plan, i, " takes '%s *' but stage %d '%s' (%s) yields '%s *'", takes,
                           from, spdl__row_name(before), spdl__row_place(before).text, yields);
}

/* A row takes what those before it yield, a source nothing; what a merge hands on has one type. */
SPDL__COLD spdl_result spdl__check_types(const spdl__plan *plan, int i) {
    const spdl_kind kind = plan->rows[i].kind;
    const char *takes = spdl__row_takes(&plan->rows[i]), *merged = spdl__row_yields(plan, i);
    spdl_result result = SPDL_OK;
    int first = -1, k;
    if (kind == SPDL_KIND_SOURCE && !spdl__type_any(takes))
        return spdl__row_error(plan, i, " is a source, but takes '%s *': it must take 'void *'",
                               takes);
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
        return spdl__row_error(plan, i,
                               " merges '%s *' of stage %d '%s' with '%s *' of stage %d '%s'",
                               merged, first, spdl__row_name(&plan->rows[first]), yields, from,
                               spdl__row_name(&plan->rows[from]));
    }
    return result;
}

/* Whether a row lies in a path whose merge is in the order of its branch. */
SPDL__COLD bool spdl__plan_in_turn(const spdl__plan *plan, int i) {
    int branch = plan->branch[i];
    if (plan->rows[i].kind == SPDL_KIND_MERGE) branch = plan->branch[branch];
    for (; branch >= 0; branch = plan->branch[branch])
        if (plan->rows[plan->merge[branch]].output_order == SPDL_ORDER_INPUT) return true;
    return false;
}

/* What a row may not be there: each item has to make one result or none, in order. */
SPDL__COLD spdl_result spdl__check_inside(const spdl__plan *plan, int i) {
    const spdl_stage *row = &plan->rows[i];
    const char *what = row->kind == SPDL_KIND_UNBATCH                     ? "SPDL_UNBATCH"
                       : row->kind == SPDL_KIND_BATCH                     ? "SPDL_BATCH"
                       : row->output_order == SPDL_ORDER_COMPLETION ? "completion order"
                       : row->flush                                       ? "flush"
                       : row->again                                       ? "again"
                                                                          : NULL;
    if (what == NULL || !spdl__plan_in_turn(plan, i)) return SPDL_OK;
    return spdl__row_error(plan, i,
                           "%s in a path whose merge is in input order, where each item makes one "
                           "result or none: write SPDL_MERGE(.output_order = "
                           "SPDL_ORDER_COMPLETION)", what);
}

SPDL__COLD spdl_result spdl__check_desc(const spdl__plan *plan) {
    const spdl_pipeline_desc *desc = plan->desc;
    char why[SPDL_NAME_BYTES + 64] = "";
    if (desc->workers < 0 || desc->workers > SPDL__MAX_WORKERS)
        (void)snprintf(why, sizeof(why), "workers is %d, must be 0 to %d", desc->workers,
                       SPDL__MAX_WORKERS);
    else if (desc->pool != NULL && desc->workers != 0)
        (void)snprintf(why, sizeof(why), "workers is %d, but pool is set: leave it 0",
                       desc->workers);
    else if (desc->workers == SPDL__MAX_WORKERS && desc->next_works_ns != 0)
        (void)snprintf(why, sizeof(why), "workers is %d, with next_works_ns at most %d",
                       desc->workers, SPDL__MAX_WORKERS - 1);
    else if (desc->trace_events < 0 || desc->trace_events > SPDL__TRACE_EVENTS_MAX)
        (void)snprintf(why, sizeof(why), "trace_events is %d, must be 0 to %d", desc->trace_events,
                       SPDL__TRACE_EVENTS_MAX);
    else if (spdl__allocator_check(&desc->allocator, "pipeline", desc->error) != SPDL_OK ||
             spdl__policy_check(&desc->policy, "pipeline", desc->error) != SPDL_OK)
        return SPDL_E_INVALID;
    else if (plan->rows == NULL || plan->count < 1)
        (void)snprintf(why, sizeof(why), "no rows; it needs at least a source and a sink");
    else if (plan->count > SPDL_MAX_STAGES + 1)
        (void)snprintf(why, sizeof(why), "too many stages: %d rows, at most %d and a sink",
                       plan->count, SPDL_MAX_STAGES);
    if (why[0] == '\0') return SPDL_OK;
    return spdl__error_set(desc->error, SPDL_E_INVALID, "pipeline: %s", why);
}

SPDL__COLD spdl_result spdl__check_plan(spdl__plan *plan) {
    spdl_result result = spdl__check_desc(plan);
    int i;
    if (result == SPDL_OK && plan->count == 1)
        result = spdl__row_error(plan, 0,
                                 "the only row; a pipeline needs at least a source and a sink");
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

/* The bytes of an item in the batches in place that row `i` feeds, or 0. */
SPDL__COLD size_t spdl__row_feeds(const spdl__plan *plan, int i) {
    const spdl_stage *row = &plan->rows[i];
    if (row->kind != SPDL_KIND_SOURCE && row->kind != SPDL_KIND_PIPE) return 0;
    if (row->next != NULL) return 0; /* it has no calls of spdl_buffer */
    return row[1].kind == SPDL_KIND_BATCH ? row[1].item_bytes : 0;
}

/* Whether calls of this row know where in a batch their items will lie: if none is dropped, that is
   a matter of tickets. Not of a source that destroy may leave: the batch would be gone. */
SPDL__COLD bool spdl__row_places(const spdl__plan *plan, int i) {
    const spdl_stage *row = &plan->rows[i];
    return spdl__row_feeds(plan, i) > 0 && row->item_bytes == 0 && !row->again &&
           row->output_order == SPDL_ORDER_INPUT &&
           (row->kind != SPDL_KIND_SOURCE || row->threads == 0);
}

/* Finished items that may wait when the row does not say. Those in front of a batch are held
   anyway. */
SPDL__COLD int spdl__row_buffer(const spdl__plan *plan, int i) {
    const spdl_stage *row = &plan->rows[i];
    if (spdl__row_places(plan, i)) /* they need no memory of their own */
        return (int)spdl__min(SPDL__SITTING_ITEMS, (uint64_t)row[1].size);
    if (row->kind == SPDL_KIND_BRANCH && strcmp(spdl__row_yields(plan, i), "spdl_batch") != 0)
        return SPDL__ROUTED;
    if (row[1].kind == SPDL_KIND_BATCH && row[1].item_bytes == 0)
        return (int)spdl__max(2, spdl__min(SPDL__BATCH_BUFFER, (uint64_t)row[1].size));
    return 2;
}

/* The row with defaults in place of zeros. */
SPDL__COLD spdl_stage spdl__row_defaults(const spdl__plan *plan, int i) {
    const int at_sink = plan->rows[plan->count - 1].buffer_size;
    spdl_stage row = plan->rows[i];
    if (row.next != NULL) {
        row.fn = &spdl__from;
        row.threads = 1;
    }
    if (row.concurrency == 0) row.concurrency = 1;
    if (i == plan->count - 2) row.buffer_size = at_sink ? at_sink : 3;
    if (row.buffer_size == 0) row.buffer_size = spdl__row_buffer(plan, i);
    if (!spdl__row_places(plan, i) && row.item_bytes == 0)
        row.item_bytes = spdl__row_feeds(plan, i);
    if (row.kind == SPDL_KIND_UNBATCH) {
        row.kind = SPDL_KIND_PIPE;
        row.fn = &spdl__unbatch_function;
        row.again = true;
    }
    if (row.kind == SPDL_KIND_BATCH) {
        row.fn = &spdl__batch_function;
        row.flush = true;
        row.free_item = spdl_batch_free;
    }
    return row;
}

/* The name of a row, the second one of the same name being "name#2". */
SPDL__COLD void spdl__node_name(const spdl_pipeline *p, spdl__node *node, const char *name) {
    char text[SPDL_NAME_BYTES + 16];
    int number;
    spdl__name_copy(node->name, name);
    for (number = 2; spdl__pipeline_find(p, node->name) < node->index; ++number) {
        (void)snprintf(text, sizeof(text), "%.*s#%d", SPDL_NAME_BYTES - 4, name, number);
        spdl__name_copy(node->name, text);
    }
}

/* What a row reads from. */
SPDL__COLD void spdl__node_connect(spdl_pipeline *p, const spdl__plan *plan, spdl__node *node) {
    const int i = node->index;
    const bool merge = node->row.kind == SPDL_KIND_MERGE;
    int k;
    node->word = &node->own;
    if (plan->before[i] >= 0) node->before = &p->node[plan->before[i]];
    if (node->before != NULL && node->row.kind != SPDL_KIND_PATH) {
        node->in = &node->before->out;
        node->word = &node->in->word;
    }
    for (k = 0; k < (merge ? node->paths : node->in != NULL); ++k) {
        spdl__node *from = merge ? &p->node[node->path[k]] : node->before;
        if (from->row.kind == SPDL_KIND_PATH) from = from->before; /* writes in its place */
        from->beside |= (uint32_t)1 << i;
        node->beside |= (uint32_t)1 << from->index;
    }
    if (merge) node->merge = &p->node[plan->branch[i]];
    if (node->row.kind == SPDL_KIND_BRANCH) node->merge = &p->node[plan->merge[i]];
    node->at_end = node == p->last || i == 1;
    for (k = 0; k <= i; ++k) p->node[k].near = p->node[k].beside | (uint32_t)1 << k;
}

/* A row, except for its memory. The rows before it are there. */
SPDL__COLD void spdl__node_init(spdl_pipeline *p, const spdl__plan *plan, int i) {
    spdl__node *node = &p->node[i];
    spdl_stage *row = &node->row;
    const bool raises = plan->doctor != NULL && plan->doctor->desc.raise;
    *row = spdl__row_defaults(plan, i);
    node->index = i;
    node->locks = &p->locks;
    spdl__node_name(p, node, spdl__row_name(&plan->rows[i]));
    row->name = node->name; /* for the probes */
    node->gathers = row->kind == SPDL_KIND_BATCH || row->kind == SPDL_KIND_MERGE;
    node->alone = row->flush || plan->rows[i].concurrency == 1;
    node->most = row->concurrency;
    if (raises && row->kind == SPDL_KIND_PIPE && !node->alone && !row->again)
        node->most = (int)spdl__min(spdl__max(2 * (uint64_t)node->most, (uint64_t)p->threads),
                                    SPDL__MAX_WORKERS);
    node->ordered = row->output_order == SPDL_ORDER_INPUT;
    node->serial = node->most == 1;
    node->by_ticket = node->ordered && !node->serial;
    node->at_put = node->serial || row->again;
    node->holes = node->by_ticket || spdl__plan_in_turn(plan, i);
    node->own_thread = row->kind == SPDL_KIND_SOURCE && row->threads > 0;
    node->places = spdl__row_places(plan, i);
    node->above = plan->above[i];
    node->paths = plan->paths[i];
    memcpy(node->path, plan->path[i], sizeof(node->path));
    node->limit = row->kind == SPDL_KIND_FEED ? 0 : (uint32_t)row->concurrency;
    if (row->kind == SPDL_KIND_FEED) p->feed = node;
    if (node->own_thread) p->producer = node;
    if (row->fn == &spdl_index_spdl && p->sampler == NULL) p->sampler = (spdl_sampler *)row->ctx;
    if (row->init != NULL) p->has_hooks = true;
    spdl__node_connect(p, plan, node);
}

/* Whether its calls need nothing that is rare: see flow_sit. */
SPDL__COLD bool spdl__node_is_plain(const spdl_pipeline *p, const spdl__node *node) {
    const spdl_stage *row = &node->row;
    return (row->kind == SPDL_KIND_SOURCE || row->kind == SPDL_KIND_PIPE) && !node->own_thread &&
           !row->again && !row->deferred && !row->flush && row->init == NULL &&
           p->trace == NULL && p->profiler.event_fn == NULL;
}

/* How many batches of row `first` can be alive: on the edges they may travel, if later stages pass
   them on, in calls, in batches of batches, and a few in the consumer's hands. */
SPDL__COLD uint64_t spdl__batches_alive(const spdl_pipeline *p, int first) {
    uint64_t alive = 4, calls = 0;
    int i;
    for (i = p->count - 1; i >= first; --i) { /* from the sink up: what comes after is known */
        const spdl_stage *row = &p->node[i].row;
        const uint64_t most = (uint64_t)p->node[i].most;
        alive += (uint64_t)row->buffer_size + most + calls;
        calls = row->kind == SPDL_KIND_PIPE ? most : 0;
        if (row->kind == SPDL_KIND_BATCH && i > first && row->item_bytes > 0)
            alive = SPDL__SITTING_ITEMS; /* items end here */
        else if (row->kind == SPDL_KIND_BATCH && i > first)
            alive = spdl__min((alive + 1) * (uint64_t)row->size, SPDL__MAX_SPARE);
    }
    return spdl__min(alive, SPDL__MAX_SPARE);
}

/* Results of a row that may be promised and not taken. */
SPDL__COLD uint64_t spdl__node_window(const spdl__node *node) {
    uint64_t window = (uint64_t)node->row.buffer_size + (uint64_t)node->most; /* feed: END */
    const bool path = node->row.kind == SPDL_KIND_PATH;
    if (node->row.kind == SPDL_KIND_BRANCH) return 1; /* it writes those of its paths */
    if (path) window += 1 + (uint64_t)node->before->row.buffer_size; /* all that wait, and a mark */
    return (path ? node->before : node)->holes ? spdl__max(2 * window, SPDL__WINDOW) : window;
}

/* Blocks of a row that the pipeline itself may use at once; in place those written into, too. */
SPDL__COLD uint64_t spdl__node_blocks(const spdl_pipeline *p, const spdl__node *node) {
    uint64_t alive = spdl__batches_alive(p, node->index);
    if (node->row.kind == SPDL_KIND_BATCH && node->before->places)
        alive += spdl__node_window(node->before) / (uint64_t)node->row.size + 2;
    return alive;
}

/* Zeroed memory for `count` elements of a pipeline. */
SPDL__COLD void *spdl__pipeline_alloc(const spdl_pipeline *p, uint64_t count, size_t bytes) {
    return spdl__alloc_zeroed(&p->allocator, (size_t)count, bytes, SPDL_CACHE_LINE);
}

/* Batches and buffers. */
SPDL__COLD spdl_result spdl__node_pools(spdl_pipeline *p, spdl__node *node) {
    const spdl_stage *row = &node->row;
    const spdl_allocator *blocks = row->allocator != NULL ? row->allocator : &p->allocator;
    const size_t ahead = (size_t)spdl__node_blocks(p, node);
    const size_t alive = row->allocator != NULL ? SPDL__MAX_SPARE : ahead; /* it keeps all */
    int i;
    if (row->item_bytes > 0 && spdl__row_calls(row)) {
        node->buffers = spdl__batch_pool_make(blocks, 0, row->item_bytes, ahead, alive);
        if (node->buffers == NULL) return SPDL_E_NOMEM;
    }
    if (row->kind != SPDL_KIND_BATCH) return SPDL_OK;
    node->batches = spdl__batch_pool_make(blocks, (size_t)row->size,
                                          (size_t)row->size * row->item_bytes, ahead, alive);
    if (node->batches == NULL) return SPDL_E_NOMEM;
    for (i = 0; i <= node->index; ++i) node->batches->free_item[i] = p->node[i].row.free_item;
    return SPDL_OK;
}

/* A branch whose merge is in input order: an entry for each slot and call on the way there. */
SPDL__COLD bool spdl__node_turns(spdl_pipeline *p, spdl__node *node) {
    const spdl__node *row;
    uint64_t most = 1;
    if (node->row.kind != SPDL_KIND_BRANCH || !node->merge->ordered) return true;
    for (row = node + 1; row < node->merge; ++row)
        most += spdl__pow2(spdl__node_window(row)) + (uint64_t)row->most + 1;
    node->turns_mask = spdl__pow2(most) - 1;
    node->turns =
        (uint32_t *)spdl__pipeline_alloc(p, node->turns_mask + 1, sizeof(*node->turns));
    return node->turns != NULL;
}

/* The memory of a row: its edge, counters, places for calls that go on later, and batches. */
SPDL__COLD spdl_result spdl__node_build(spdl_pipeline *p, spdl__node *node) {
    const spdl_stage *row = &node->row;
    const bool parks = row->deferred || row->again;
    spdl__edge *edge = &node->out;
    uint32_t k;
    int i;
    edge->buffer_size = (uint64_t)row->buffer_size;
    edge->window = spdl__node_window(node);
    edge->holes = row->kind == SPDL_KIND_PATH ? node->before->holes : node->holes;
    edge->mask = spdl__pow2(edge->window) - 1;
    edge->slots = (spdl__slot *)spdl__pipeline_alloc(p, edge->mask + 1, sizeof(*edge->slots));
    node->counters = (spdl__counters *)spdl__pipeline_alloc(p, (uint64_t)p->workers + 1,
                                                            sizeof(*node->counters));
    if (parks)
        node->parked = (spdl__parked *)spdl__pipeline_alloc(p, (uint64_t)node->most,
                                                            sizeof(*node->parked));
    if (edge->slots == NULL || node->counters == NULL || (parks && node->parked == NULL) ||
        !spdl__node_turns(p, node))
        return SPDL_E_NOMEM;
    for (k = 0; parks && k < (uint32_t)node->most; ++k)
        spdl__parked_add(node, &node->parked_free, k);
    /* not the first calls: somebody waits for those; nor deferred ones, which end elsewhere */
    for (i = 0; i <= p->workers; ++i) node->counters[i].meter_due = row->deferred ? INT64_MAX : 1;
    return spdl__node_pools(p, node);
}

/* What workers have: a task each, and what init of each row stores for it. */
SPDL__COLD spdl_result spdl__tasks_build(spdl_pipeline *p) {
    const uint64_t workers = (uint64_t)p->workers;
    int i;
    p->task = (spdl_task *)spdl__pipeline_alloc(p, workers, sizeof(*p->task));
    if (p->task == NULL) return SPDL_E_NOMEM;
    for (i = 0; i < p->workers; ++i) {
        p->task[i].pipeline = p;
        p->task[i].worker = i;
        p->task[i].meter.file = SPDL__NO_FILE;
    }
    if (!p->has_hooks) return SPDL_OK;
    p->local = (void **)spdl__pipeline_alloc(p, workers * (uint64_t)p->count, sizeof(*p->local));
    return p->local != NULL ? SPDL_OK : SPDL_E_NOMEM;
}

/* Who runs the rows: the places of the pool, or the consumer; and the thread of a source. */
SPDL__COLD void spdl__workers_plan(spdl_pipeline *p, const spdl__plan *plan) {
    const spdl_pipeline_desc *desc = plan->desc;
    const bool producer = plan->rows[0].threads > 0 || plan->rows[0].next != NULL;
    p->works_ns = desc->next_works_ns < 0 ? SPDL__NEVER : (uint64_t)desc->next_works_ns;
    p->threads = desc->pool != NULL ? desc->pool->places : desc->workers;
    if (plan->doctor != NULL && plan->doctor->desc.raise && desc->workers > 0) /* to try more */
        p->spare = (int)spdl__min((uint64_t)desc->workers,
                                  (uint64_t)(SPDL__MAX_WORKERS - desc->workers));
    p->threaded = p->threads > 0 || producer;
    p->workers = desc->pool != NULL    ? desc->pool->places
                 : desc->workers > 0 ? desc->workers + p->spare + (p->works_ns != 0)
                                     : 1;
    p->workers += producer;
}

/* Everything but the threads. On failure spdl__pipeline_release frees what is there. */
SPDL__COLD spdl_result spdl__pipeline_build(spdl_pipeline *p, const spdl__plan *plan) {
    spdl_result result = SPDL_OK;
    int i;
    spdl__workers_plan(p, plan);
    p->node = (spdl__node *)spdl__pipeline_alloc(p, (uint64_t)p->count, sizeof(*p->node));
    if (p->node == NULL) return SPDL_E_NOMEM;
    p->last = &p->node[p->count - 1];
    p->sink = &p->last->out;
    for (i = 0; i < p->count; ++i) spdl__node_init(p, plan, i);
    for (i = 0; i < p->count && result == SPDL_OK; ++i)
        result = spdl__node_build(p, &p->node[i]);
    if (result == SPDL_OK) result = spdl__tasks_build(p);
    if (result == SPDL_OK) result = spdl__doctor_open(p, plan->doctor, p->threads);
#ifndef SPDL_NO_REPORT /* else report_begin says so */
    if (result == SPDL_OK) spdl__trace_open(p, plan->desc);
#endif
    if (result != SPDL_OK) return result;
    spdl__position_plan(p);
    for (i = 0; i < p->count; ++i) p->node[i].plain = spdl__node_is_plain(p, &p->node[i]);
    return SPDL_OK;
}

/* The pool, if it is the pipeline's own. */
SPDL__COLD spdl_result spdl__pool_own(spdl_pipeline *p, const spdl_pipeline_desc *desc) {
    spdl_pool_desc pool;
    p->pool = desc->pool;
    if (desc->workers == 0) return SPDL_OK;
    memset(&pool, 0, sizeof(pool));
    pool.workers = desc->workers + p->spare;
    pool.guests = p->works_ns != 0;
    pool.name = desc->name;
    pool.policy = desc->policy;
    pool.stack_bytes = desc->stack_bytes;
    pool.queue_size = p->spare + 1; /* jobs of the doctor */
    pool.allocator = desc->allocator;
    pool.logger = desc->logger;
    pool.profiler = desc->profiler;
    pool.error = desc->error;
    p->own_pool = spdl_pool_create(&p->pool, &pool) == SPDL_OK;
    return p->own_pool ? SPDL_OK : desc->error->result;
}

/* The thread of a source. With a policy it is waited for: the system may refuse it, and the list of
   processors is the caller's. */
SPDL__COLD spdl_result spdl__producer_start(spdl_pipeline *p, const spdl_pipeline_desc *desc) {
    const spdl_policy *policy = &p->policy;
    char name[SPDL_NAME_BYTES];
    p->policy = desc->policy;
    (void)snprintf(name, sizeof(name), "%.11s-0", p->producer->name);
    if (!spdl__os_thread_start(&p->producer_thread, name, policy, desc->stack_bytes,
                               spdl__producer_main, p))
        return spdl__error_set(desc->error, SPDL_E_THREAD,
                               "pipeline: the thread of stage 0 '%s' could not be created%s",
                               p->producer->name, SPDL__OS_NO_THREAD);
    p->producer_started = true;
    if (!policy->polite && policy->nice == 0 && policy->sched == SPDL_SCHED_DEFAULT &&
        policy->cpu_count == 0)
        return SPDL_OK;
    while (spdl__load(&p->producer_id) == 0) spdl__os_yield();
    if (!p->producer_thread.refused) return SPDL_OK;
    spdl__os_thread_join(&p->producer_thread);
    p->producer_started = false;
    return spdl__error_set(desc->error, SPDL_E_THREAD,
                           "pipeline: the system refuses the policy of the thread of stage 0 "
                           "'%s'", p->producer->name);
}

/* The clock starts, every edge is empty and every reader except the consumer idle. */
SPDL__COLD spdl_result spdl__pipeline_start(spdl_pipeline *p, const spdl_pipeline_desc *desc) {
    int i;
    p->process = spdl__os_process_id();
    if (!SPDL__NO_STATS) spdl__os_process_read(&p->process_first, false); /* of zeros */
    p->process_last = p->process_first;
    p->start_ns = spdl_time_ns();
    for (i = 0; i < p->count; ++i) {
        p->node[i].out.gap_since = p->start_ns;
        if (i + 1 < p->count) p->node[i].out.idle_since = p->start_ns;
    }
    p->beacon = p->pool != NULL ? &p->pool->beacon : &p->own_beacon;
    p->client.step = spdl__step;
    p->client.runnable = spdl__pipeline_runnable;
    p->client.self = p;
    if (p->pool != NULL) {
        p->slot = spdl__pool_attach(p->pool, &p->client, &p->bit);
        if (p->slot == NULL)
            return spdl__error_set(desc->error, SPDL_E_LIMIT,
                                   "pipeline: the pool has %d pipelines already",
                                   SPDL__MAX_CLIENTS);
    }
    return p->producer != NULL ? spdl__producer_start(p, desc) : SPDL_OK;
}

/* All of them, or none. */
SPDL__COLD bool spdl__pipeline_events(spdl_pipeline *p) {
    spdl__os_event *const event[] = { &p->fed, &p->quiet, &p->room, &p->locks };
    int i = 0;
    while (i < 4 && spdl__os_event_init(event[i])) ++i;
    if (i == 4) return true;
    while (i > 0) spdl__os_event_fini(event[--i]);
    return false;
}

/* More calls than there are threads for: if they wait for each other they do so for ever. Deferred
   calls need no thread, and a pipeline without workers has but one. */
SPDL__COLD void spdl__rows_warn(const spdl_pipeline *p, const spdl__plan *plan) {
    const int threads = p->threads + (p->own_pool && p->works_ns != 0);
    int i;
    for (i = 0; i < p->count && p->pool != NULL; ++i) {
        const spdl__node *node = &p->node[i];
        if (node->row.deferred || node->row.concurrency <= threads) continue;
        spdl__logf(&p->logger, SPDL_LOG_WARN,
                   "%s: stage %d '%s': concurrency is %d, but no more calls than its %d "
                   "worker%s can run at the same time",
                   spdl__row_place(&plan->rows[i]).text, i, node->name, node->row.concurrency,
                   threads, threads > 1 ? "s" : "");
    }
}

/* The rows are right: allocates everything and starts the threads. */
SPDL__COLD spdl_result spdl__pipeline_new(spdl_pipeline **pipeline, const spdl__plan *plan) {
    const spdl_pipeline_desc *desc = plan->desc;
    spdl_pipeline *p = (spdl_pipeline *)spdl__alloc_zeroed(&desc->allocator, 1, sizeof(*p),
                                                           SPDL_CACHE_LINE);
    static const char *const no_memory = "pipeline: out of memory";
    spdl_result result;
    if (p == NULL || !spdl__pipeline_events(p)) {
        spdl__free(&desc->allocator, p, sizeof(*p));
        return spdl__error_set(desc->error, SPDL_E_NOMEM, "%s", no_memory);
    }
    p->allocator = desc->allocator;
    p->logger = desc->logger;
    p->profiler = desc->profiler;
    if (desc->profiler.event_fn == NULL && desc->pool != NULL)
        p->profiler = desc->pool->desc.profiler;
    p->count = plan->count - 1;
    p->references = 1;
    p->seed = desc->seed;
    p->data_hash = desc->data_hash;
    spdl__error_clear(&p->no_error);
    result = spdl__pipeline_build(p, plan);
    if (result == SPDL_E_NOMEM) spdl__error_set(desc->error, result, "%s", no_memory);
    if (result == SPDL_OK) result = spdl__pool_own(p, desc);
    if (result == SPDL_OK) {
        *pipeline = p; /* before the first call: a stage may use it */
        result = spdl__pipeline_start(p, desc);
    }
    if (result == SPDL_OK) return result;
    *pipeline = NULL;
    if (p->slot != NULL) { /* calls may have begun */
        spdl__pipeline_halt(p);
        (void)spdl__pipeline_await_quiet(p, SPDL__NEVER, NULL);
        spdl__destroy_part(p);
        spdl__pipeline_purge(p, 0);
    }
    spdl__destroy_producer(p, false);
    if (p->own_pool) spdl__pool_release(p->pool);
    spdl__pipeline_release(p);
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
        spdl__log(&known.logger, SPDL_LOG_WARN, "no doctor where items are pushed: the "
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
   thread may take a snapshot, which adds the cells up. Waits are the sum of those that are over and
   the start of the open one. What was reported is kept with the edge: no number goes backwards. */

/* --- histograms --- */

typedef char spdl__histogram_fits[SPDL__HISTOGRAM_BUCKETS == SPDL__BUCKETS ? 1 : -1];

/* The shortest time that falls into a bucket. */
SPDL__COLD uint64_t spdl__bucket_start(unsigned bucket) {
    const unsigned sub = 1u << SPDL__SUB_BITS, power = bucket >> SPDL__SUB_BITS;
    return power == 0 ? bucket : (uint64_t)(sub + bucket % sub) << (power - 1);
}

SPDL_API uint64_t spdl__histogram_percentile(const spdl__histogram *histogram, double share) {
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

/* The same share of `all`. */
SPDL__COLD uint64_t spdl__part(uint64_t all, uint64_t part, uint64_t whole) {
    return spdl__min((uint64_t)((double)all * spdl__share(part, whole)), all);
}

/* From what to what was counted; `from` becomes it, its maximum the end of the last bucket. */
SPDL__COLD void spdl__histogram_since(spdl__histogram *from, const spdl__histogram *to) {
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

SPDL__COLD void spdl__counters_merge(spdl__histogram *times, const spdl__counters *counters) {
    unsigned i;
    times->sum_ns += spdl__load_relaxed(&counters->timed_ns);
    times->max_ns = spdl__max(times->max_ns, spdl__load_relaxed(&counters->max_ns));
    for (i = 0; i < SPDL__BUCKETS; ++i) {
        const uint64_t calls = spdl__load_relaxed(&counters->bucket[i]);
        times->bucket[i] += calls;
        times->count += calls;
    }
}

SPDL_API spdl_result spdl__pipeline_histogram(const spdl_pipeline *p, int stage,
                                             spdl__histogram *histogram) {
    int i;
    if (stage < 0 || stage >= p->count) return SPDL_E_NOT_FOUND;
    memset(histogram, 0, sizeof(*histogram));
    for (i = 0; i <= p->workers; ++i)
        spdl__counters_merge(histogram, &p->node[stage].counters[i]);
    return SPDL_OK;
}

/* The fields that follow from the times of the calls. */
SPDL__COLD void spdl__stage_times(spdl_stage_stats *stats, const spdl__histogram *times) {
    stats->busy_ns = stats->kind != SPDL_KIND_FEED ? times->sum_ns : 0;
    stats->mean_ns = times->count ? times->sum_ns / times->count : 0;
    stats->p50_ns = spdl__histogram_percentile(times, 0.50);
    stats->p90_ns = spdl__histogram_percentile(times, 0.90);
    stats->p99_ns = spdl__histogram_percentile(times, 0.99);
    stats->max_ns = times->max_ns;
}

/* Counts are the sums over all cells. busy_ns is split as the calls that were measured. */
SPDL__COLD void spdl__stage_snapshot(const spdl_pipeline *p, const spdl__node *node,
                                     spdl_stage_stats *stats) {
    const uint64_t word = spdl__load(node->word);
    uint64_t ns = 0, cpu_ns = 0, wait_ns = 0, blind = 0;
    spdl__histogram times;
    int i;
    memcpy(stats->name, node->name, sizeof(stats->name));
    stats->kind = node->row.kind;
    stats->concurrency = (int)spdl__load_relaxed32(&node->limit);
    stats->in_flight = (int)spdl__min(word & SPDL__ACTIVE, (uint64_t)stats->concurrency);
    stats->threads = node->own_thread;
    stats->deferred = node->row.deferred;
    stats->alone = node->alone;
    stats->in_order = node->ordered;
    stats->exposed_ns = spdl__load_relaxed(&node->exposed_ns);
    stats->exposed_idle_ns = spdl__load_relaxed(&node->exposed_idle_ns);
    (void)spdl__pipeline_histogram(p, node->index, &times);
    spdl__stage_times(stats, &times);
    for (i = 0; i <= p->workers; ++i) {
        const spdl__counters *counters = &node->counters[i];
        stats->tasks += spdl__load_relaxed(&counters->tasks);
        stats->failures += spdl__load_relaxed(&counters->failures);
        stats->skips += spdl__load_relaxed(&counters->skips);
        stats->freed += spdl__load_relaxed(&counters->freed);
        ns += spdl__load_relaxed(&counters->metered_ns);
        cpu_ns += spdl__load_relaxed(&counters->metered_cpu_ns);
        wait_ns += spdl__load_relaxed(&counters->metered_wait_ns);
        blind += spdl__load_relaxed(&counters->metered_blind);
        stats->split_calls += spdl__load_relaxed(&counters->metered);
    }
    if (ns == 0) return;
    cpu_ns = spdl__min(cpu_ns, ns); /* the loads were not at one time */
    wait_ns = spdl__min(wait_ns, ns - cpu_ns);
    stats->cpu_ns = spdl__part(stats->busy_ns, cpu_ns, ns);
    stats->runnable_ns =
        spdl__min(spdl__part(stats->busy_ns, wait_ns, ns), stats->busy_ns - stats->cpu_ns);
    stats->blocked_ns = stats->busy_ns - stats->cpu_ns - stats->runnable_ns;
    stats->runnable_known = blind == 0;
}

/* Every number is lifted to what an earlier snapshot reported: it may be a little less when a wait
   that was seen open ended at a clock reading from before. */
SPDL__COLD void spdl__edge_snapshot(const spdl_pipeline *p, spdl__node *node, uint64_t now,
                                    spdl_edge_stats *stats) {
    spdl__edge *edge = &node->out;
    const uint64_t head = spdl__head(spdl__load(&edge->word));
    const uint64_t none = spdl__load(&edge->dropped) + spdl__load_relaxed(&edge->marks);
    const uint64_t ended = spdl__load_relaxed(&edge->ended_ns);
    const uint64_t size = edge->buffer_size;
    uint64_t put_wait = spdl__load_relaxed(&edge->put_wait_ns), get_wait, empty, depth = 0, ticket;
    uint64_t since, idle, until;
    bool in_turn = true; /* so far every slot was ready */
    if (ended != 0) now = ended;
    for (ticket = head; ticket <= head + edge->mask; ++ticket) {
        const spdl__slot *slot = spdl__edge_slot(edge, ticket);
        const bool has = spdl__slot_has(slot, ticket);
        in_turn = in_turn && has;
        if (!has || spdl__slot_tag(slot) >= SPDL__HOLE) continue;
        depth += in_turn;
        if (ended == 0 && ticket - head >= size) /* has no place in the buffer yet */
            put_wait += spdl__slot_age(slot, now);
    }
    /* the reader may have gone on from `head`: what it took meanwhile still looks ready */
    depth = spdl__min(depth, node->row.kind == SPDL_KIND_PATH ? edge->window
                                                              : size + (uint64_t)node->most);
    /* the sums before the open gap: none is counted twice */
    empty = spdl__load(&edge->empty_ns);
    get_wait = spdl__load(&edge->get_wait_ns);
    since = spdl__load_relaxed(&edge->gap_since);
    idle = spdl__load_relaxed(&edge->idle_since);
    until = now;
    if (spdl__edge_ready(edge, head)) /* when that was put: the same in every snapshot */
        until = (now >> 10 << 10) - spdl__slot_age(spdl__edge_slot(edge, head), now);
    if (since != 0 && until > since) empty += until - since;
    if (since != 0 && idle != 0 && until > spdl__max(idle, since))
        get_wait += until - spdl__max(idle, since);
    if (edge == p->sink) get_wait = spdl__wait_sum(p, now);
    stats->buffer_size = (int)size;
    stats->depth = (int)depth;
    stats->elapsed_ns = spdl__atomic_max(&edge->seen[0], now - p->start_ns);
    stats->put_wait_ns = spdl__atomic_max(&edge->seen[1], put_wait);
    /* what was read later than the clock may have gone on */
    stats->get_wait_ns = spdl__atomic_max(&edge->seen[2], spdl__min(get_wait, stats->elapsed_ns));
    stats->empty_ns = spdl__atomic_max(&edge->seen[3], spdl__min(empty, stats->elapsed_ns));
    stats->items = spdl__atomic_max(&edge->seen[5], spdl__grown(none, head));
}

/* The fields that follow from others, of a snapshot and of an interval. */
SPDL__COLD void spdl__stats_means(spdl_stats *stats) {
    int i;
    stats->step_mean_ns = stats->step_ns / spdl__max(stats->delivered, 1);
    for (i = 0; i < stats->stage_count; ++i) {
        spdl_edge_stats *e = &stats->edge[i];
        e->readiness = spdl__share(spdl__grown(e->empty_ns, e->elapsed_ns), e->elapsed_ns);
    }
}

/* What the process has used. Reading it takes about 0.1 ms, and its clocks tick every 10 ms. After
   the end it is read once. What others had before the first snapshot is taken to be as after it. */
SPDL__COLD void spdl__stats_process(spdl_pipeline *p, uint64_t ended, spdl_stats *stats) {
    const spdl__process_stats *first = &p->process_first, *last = &p->process_last;
    const uint64_t now = spdl_time_ns();
    spdl__lock(&p->process_lock, &p->locks);
    if (last->cores == 0 || (ended ? last->time_ns < ended : now > last->time_ns + 10000000))
        spdl__process_read(&p->process_last);
    if (stats->delivered > 0 && spdl__load(&p->taker) == spdl__os_thread_id())
        spdl__taker_look(p);
    stats->consumer_runnable_ns = spdl__load_relaxed(&p->consumer_runnable_ns);
    stats->process_ns = spdl__grown(p->start_ns, last->time_ns);
    stats->process_cpu_ns = spdl__grown(first->cpu_ns, last->cpu_ns);
    stats->others_cpu_ns = spdl__grown(first->others_ns, last->others_ns);
    stats->minor_faults = spdl__grown(first->minor_faults, last->minor_faults);
    stats->cores_allowed = last->cores_allowed;
    stats->cores = last->cores;
    spdl__unlock(&p->process_lock, &p->locks);
}

SPDL_API void spdl_pipeline_stats(const spdl_pipeline *pipeline, spdl_stats *stats) {
    spdl_pipeline *p = SPDL__CAST(spdl_pipeline *, SPDL__UNCONST(pipeline)); /* `seen` is written */
    const uint64_t ended = spdl__load_relaxed(&p->ended_ns);
    const uint64_t now = ended ? ended : spdl_time_ns();
    uint64_t runnable = 0, inside = 0; /* of it, in calls */
    int i;
    /* a consumer that asks whether its buffer is full makes sure that it will be, see sink_hint */
    if (!ended) spdl__wake_passed(p);
    if (spdl__load_relaxed(&p->blame_since) != 0) spdl__blame_mark(p, false);
    memset(stats, 0, sizeof(*stats));
    stats->elapsed_ns = spdl__atomic_max(&p->sink->seen[4], now - p->start_ns);
    stats->workers = p->threads;
    stats->stage_count = p->count;
    stats->delivered = spdl__load_relaxed(&p->delivered);
    stats->first_item_ns = spdl__load_relaxed(&p->first_item_ns);
    for (i = 0; i < p->count; ++i) {
        spdl__stage_snapshot(p, &p->node[i], &stats->stage[i]);
        spdl__edge_snapshot(p, &p->node[i], now, &stats->edge[i]);
    }
    stats->wait_ns = stats->edge[p->count - 1].get_wait_ns;
    stats->answer_wait_ns = spdl__load_relaxed(&p->answer_wait_ns);
    for (i = 0; i < p->workers; ++i) runnable += spdl__load_relaxed(&p->task[i].meter.waited_ns);
    for (i = 0; i < p->count; ++i) inside += stats->stage[i].runnable_ns;
    stats->workers_runnable_ns =
        spdl__atomic_max(&p->seen_runnable_ns, spdl__grown(inside, runnable));
    spdl__stats_process(p, ended, stats);
    if (stats->delivered > 0 && stats->first_item_ns > 0)
        stats->step_ns =
            spdl__grown(spdl__grown(spdl__load_relaxed(&p->first_wait_ns), stats->wait_ns),
                        spdl__grown(stats->first_item_ns, stats->elapsed_ns));
    spdl__stats_means(stats);
}

/* --- text --- */

/* A text on its way into a buffer. The thread that has it writes every field. */
typedef struct spdl__text {
    char *buffer;
    size_t bytes;  /* of the buffer */
    size_t length; /* of the whole text, what does not fit as well */
} spdl__text;

SPDL__COLD void spdl__text_add(spdl__text *text, const char *format, ...) SPDL__PRINTF(2, 3);
SPDL__COLD void spdl__text_add(spdl__text *text, const char *format, ...) {
    const size_t left = text->length < text->bytes ? text->bytes - text->length : 0;
    va_list args;
    int length;
    va_start(args, format);
    length = vsnprintf(left > 0 ? text->buffer + text->length : NULL, left, format, args);
    va_end(args);
    if (length > 0) text->length += (size_t)length;
}

SPDL__COLD spdl__text spdl__text_start(char *buffer, size_t bytes) {
    const spdl__text text = { buffer, bytes, 0 };
    if (bytes > 0) buffer[0] = '\0';
    return text;
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
    for (; *name != '\0' && width != 0; --width) {
        const int length = spdl__utf8(name);
        const bool plain = length == 1 ? (unsigned char)*name >= 0x20 && *name != 0x7f
                                       : length > 0 && memcmp(name, "\xc2\xa0", 2) >= 0;
        spdl__text_add(text, "%.*s", plain ? length : 1, plain ? name : "?");
        name += length > 0 ? length : 1;
    }
    if (width > 0) spdl__text_add(text, "%*s", width, "");
}

/* The text of a number, or of a stage, until it is added to a text. */
typedef struct spdl__cell {
    char text[SPDL_NAME_BYTES + 24];
} spdl__cell;

/* Three digits and one of four units, each 1000 times the one before. */
SPDL__COLD const char *spdl__scaled(spdl__cell *cell, double value, const char *const units[4],
                                    bool whole) {
    int unit = 0;
    for (; value >= 999.5 && unit < 3; ++unit) value /= 1000;
    (void)snprintf(cell->text, sizeof(cell->text), "%.*f%s",
                   (whole && unit == 0) || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2, value,
                   units[unit]);
    return cell->text;
}

SPDL__COLD const char *spdl__duration(spdl__cell *cell, double ns) {
    static const char *const units[] = { " ns", " us", " ms", " s" };
    return spdl__scaled(cell, ns, units, true);
}

/* So many a second. */
SPDL__COLD const char *spdl__rate(spdl__cell *cell, double rate) {
    static const char *const units[] = { "/s", "k/s", "M/s", "G/s" };
    return spdl__scaled(cell, rate, units, !(rate > 0));
}

SPDL__COLD const char *spdl__percent(spdl__cell *cell, double share) {
    (void)snprintf(cell->text, sizeof(cell->text), "%.0f%%", 100 * share);
    return cell->text;
}

/* "stage 3 'decode'" */
SPDL__COLD const char *spdl__stage_called(spdl__cell *cell, const spdl_stats *stats, int i) {
    spdl__text text = spdl__text_start(cell->text, sizeof(cell->text));
    spdl__text_add(&text, "stage %d '", i);
    spdl__text_name(&text, stats->stage[i].name, -1);
    spdl__text_add(&text, "'");
    return cell->text;
}

/* --- the advisor: what the numbers say, for the verdict, the table, JSON and the doctor --- */

#define SPDL__FED 0.05        /* a consumer that waits less has enough */
#define SPDL__LIMITING 0.5    /* a stage that is busy less is not the limit */
#define SPDL__SURE 0.8        /* one that is busy more is, wherever the consumer's item was */
#define SPDL__FAILING 0.05    /* a larger share of calls that fail is in the verdict */
#define SPDL__ALL_BUSY 0.93   /* workers that are busy more have no time for other calls */
#define SPDL__FULL 0.92       /* processors that are used more have none either */
#define SPDL__OTHERS 0.15     /* processors that other programs use: less is not worth a word */
#define SPDL__QUEUED 0.1      /* a row whose calls wait so much for a processor lacks them */
#define SPDL__TAIL 10         /* so many times the median is a rare slow call */
#define SPDL__TINY_NS 10000   /* calls as short as this take no longer than handing over does */
#define SPDL__FAULT_NS 500    /* of a page that is mapped and zeroed, about */
#define SPDL__GAIN 1.03       /* an advice that promises less is not given */
#define SPDL__PART_SHOWN 0.05 /* of the time in calls: the table shows runq and block over this */
#define SPDL__WAIT_SHOWN 0.01 /* of the time: waiting for less, `waits` is blank */

SPDL__COLD double spdl__smaller(double a, double b) { return a < b ? a : b; }
SPDL__COLD double spdl__larger(double a, double b) { return a > b ? a : b; }

/* Threads for all rows but those with threads of their own: with workers = 0 the consumer's. */
SPDL__COLD int spdl__stats_threads(const spdl_stats *stats) {
    int threads = stats->workers, i;
    for (i = 0; i < stats->stage_count; ++i) threads -= stats->stage[i].threads;
    return threads > 0 ? threads : 1;
}

/* How busy a stage was: 1 when all the calls it may have were running all the time. */
SPDL__COLD double spdl__stage_load(const spdl_stats *stats, int i) {
    const spdl_stage_stats *stage = &stats->stage[i];
    const int threads = stage->threads > 0 ? stage->threads : spdl__stats_threads(stats);
    return spdl__share(stage->busy_ns, stats->elapsed_ns) /
           (stage->concurrency < threads || stage->deferred ? stage->concurrency : threads);
}

SPDL__COLD int spdl__stats_busiest(const spdl_stats *stats) {
    int i, busiest = 0;
    for (i = 1; i < stats->stage_count; ++i)
        if (spdl__stage_load(stats, i) > spdl__stage_load(stats, busiest)) busiest = i;
    return busiest;
}

/* The share of time the consumer waited, the wait for the first item left out. */
SPDL__COLD double spdl__stats_waiting(const spdl_stats *stats) {
    return spdl__share(spdl__grown(stats->first_item_ns, stats->wait_ns),
                       spdl__grown(stats->first_item_ns, stats->elapsed_ns));
}

/* Whether items are pushed: what counts then is how soon they are answered. */
SPDL__COLD bool spdl__stats_pushed(const spdl_stats *stats) {
    return stats->stage_count > 0 && stats->stage[0].kind == SPDL_KIND_FEED;
}

/* A finding, and what its sentences need beside it. */
typedef struct spdl__found {
    spdl_finding is;
    double used, others; /* processors: of this process; of others, as far as they take ours */
    bool short_calls;    /* handing over takes longer than they do */
    bool proven;         /* by an experiment: the calls wait for each other */
    const spdl_interval *measured; /* what the settings come to, or NULL: they were not tried */
} spdl__found;

/* Time in calls that was not spent waiting for a processor. */
SPDL__COLD double spdl__stage_work(const spdl_stats *stats, int i) {
    return (double)spdl__grown(stats->stage[i].runnable_ns, stats->stage[i].busy_ns);
}

SPDL__COLD bool spdl__stage_pooled(const spdl_stats *stats, int i) {
    return !stats->stage[i].deferred && stats->stage[i].threads == 0;
}

/* Calls of pooled rows, all together. */
SPDL__COLD double spdl__stats_work(const spdl_stats *stats) {
    double sum = 0;
    int i;
    for (i = 0; i < stats->stage_count; ++i)
        sum += spdl__stage_pooled(stats, i) ? spdl__stage_work(stats, i) : 0;
    return sum;
}

/* The law. The least time in which these items could have been made: by each row with the calls it
   has, or with those of the finding; by the consumer's steps; by the processors, of those that
   others use half could be had; and by the workers, unless `workers` is 0. Rows `a` and `b` are
   left out. */
SPDL__COLD double spdl__law(const spdl_stats *stats, const spdl__found *f, bool changed,
                            int workers, int a, int b) {
    const double cores = spdl__larger(stats->cores_allowed - f->others, stats->cores_allowed / 2);
    double least = spdl__stats_pushed(stats) ? 0 : (double)stats->step_ns, calls;
    int i;
    if (cores > 0)
        least = spdl__larger(least, f->used / cores * (double)stats->elapsed_ns);
    for (i = 0; i < stats->stage_count; ++i) {
        if (i == a || i == b) continue;
        calls = stats->stage[i].concurrency;
        if (changed && i == f->is.stage && f->is.concurrency > 0) calls = f->is.concurrency;
        if (changed && i == f->is.tie && f->is.tie_concurrency > 0) calls = f->is.tie_concurrency;
        if (workers > 0 && spdl__stage_pooled(stats, i)) calls = spdl__smaller(calls, workers);
        least = spdl__larger(least, spdl__stage_work(stats, i) / calls);
    }
    return workers > 0 ? spdl__larger(least, spdl__stats_work(stats) / workers) : least;
}

/* So many that the next limit is reached, but not over twice as many as now: what is further away
   is not known that well. */
SPDL__COLD int spdl__find_more(double work, double rest, int now) {
    const double wanted = rest > 0 ? spdl__smaller(work / rest, 2.0 * now) : 2.0 * now;
    return wanted < now + 1 ? now + 1 : (int)(wanted + 0.9);
}

SPDL__COLD bool spdl__stage_raises(const spdl_stats *stats, int i) {
    return i >= 0 && stats->stage[i].kind == SPDL_KIND_PIPE && !stats->stage[i].alone;
}

/* More calls for the rows that limit, workers for them, and what that gains. If it is not worth it,
   or not known, none. */
SPDL__COLD void spdl__find_settings(const spdl_stats *stats, spdl__found *f, bool calls) {
    const int threads = spdl__stats_threads(stats), row = f->is.stage, tie = f->is.tie;
    const bool raise = calls && spdl__stage_raises(stats, row);
    const bool both = raise && spdl__stage_raises(stats, tie);
    const double rest = spdl__law(stats, f, false, 0, raise ? row : -1, both ? tie : -1);
    double now, then;
    int most = 0;
    if (raise)
        most = f->is.concurrency = spdl__find_more(spdl__stage_work(stats, row), rest,
                                                   stats->stage[row].concurrency);
    if (both)
        f->is.tie_concurrency = spdl__find_more(spdl__stage_work(stats, tie), rest,
                                                stats->stage[tie].concurrency);
    if (raise && !spdl__stage_pooled(stats, row)) most = 0;
    if (both && spdl__stage_pooled(stats, tie) && f->is.tie_concurrency > most)
        most = f->is.tie_concurrency;
    then = spdl__law(stats, f, true, 0, -1, -1);
    if (stats->workers == 0) {
        most = 1;
    } else if (spdl__stats_work(stats) > 1.05 * threads * then) {
        const int more = spdl__find_more(spdl__stats_work(stats), then, threads);
        if (more > most) most = more;
    }
    if (most > threads || stats->workers == 0) f->is.workers = most;
    if (stats->workers == 0)
        now = spdl__larger(spdl__stats_work(stats) + (double)stats->step_ns, then);
    else
        now = spdl__law(stats, f, false, threads, -1, -1);
    then = spdl__law(stats, f, true, f->is.workers > 0 ? f->is.workers : threads, -1, -1);
    f->is.gain = then > 0 ? now / then : 0;
    if (f->is.gain >= SPDL__GAIN && (f->is.concurrency > 0 || f->is.workers > 0)) return;
    f->is.concurrency = f->is.tie_concurrency = f->is.workers = 0;
    f->is.gain = 0;
}

/* How many results have to fit while one call takes as long as the slow ones. */
SPDL__COLD void spdl__find_buffer(const spdl_stats *stats, spdl__found *f) {
    const spdl_stage_stats *stage = &stats->stage[f->is.stage];
    const double then = spdl__law(stats, f, false, spdl__stats_threads(stats), -1, -1);
    const int now = stats->edge[f->is.stage].buffer_size;
    const uint64_t slow = stage->p99_ns >= SPDL__TAIL * stage->p50_ns ? stage->p99_ns
                                                                      : stage->max_ns;
    double rate = stats->step_ns ? (double)stage->tasks / (double)stats->step_ns : 1;
    if (stage->concurrency > 1 && stage->p50_ns > 0)
        rate = spdl__smaller(rate, (stage->concurrency - 1) / (double)stage->p50_ns);
    f->is.limit = SPDL_LIMIT_ORDER;
    f->is.buffer_size = (int)spdl__smaller(spdl__larger((double)slow * rate, 2.0 * now), 4096);
    f->is.gain = then > 0 ? spdl__larger((double)stats->elapsed_ns / then, 1) : 0;
}

/* Whether its calls, of which it may have several, were on one processor at a time, or about to be,
   while others slept: as behind a lock. */
SPDL__COLD bool spdl__stage_takes_turns(const spdl_stats *stats, int i) {
    const spdl_stage_stats *stage = &stats->stage[i];
    const double cores = spdl__share(stage->cpu_ns + stage->runnable_ns, stats->elapsed_ns);
    return stage->concurrency > 1 && !stage->deferred && cores > 0.85 && cores < 1.05 &&
           spdl__share(stage->cpu_ns, stats->elapsed_ns) > 0.7 &&
           spdl__share(stage->blocked_ns, stage->busy_ns) > 0.15;
}

SPDL__COLD bool spdl__stage_sleeps(const spdl_stage_stats *stage) {
    return spdl__share(stage->blocked_ns, stage->busy_ns) > 0.5;
}

/* Whether its calls lacked processors; without schedstat whether it computes at all. */
SPDL__COLD bool spdl__stage_queued(const spdl_stage_stats *stage) {
    if (stage->split_calls > 0 && !stage->runnable_known) return !spdl__stage_sleeps(stage);
    return spdl__share(stage->runnable_ns, stage->busy_ns) >= SPDL__QUEUED;
}

/* Whether a good part of what the rows compute is page faults. */
SPDL__COLD bool spdl__stats_faults(const spdl_stats *stats) {
    uint64_t cpu = 0;
    int i;
    for (i = 0; i < stats->stage_count; ++i) cpu += stats->stage[i].cpu_ns;
    return spdl__share(stats->minor_faults * SPDL__FAULT_NS, stats->process_ns) >
           0.3 * spdl__share(cpu, stats->elapsed_ns);
}

/* Why row f->is.stage, which is busy, is the limit. */
SPDL__COLD void spdl__find_class(const spdl_stats *stats, spdl__found *f) {
    const spdl_stage_stats *stage = &stats->stage[f->is.stage];
    const double load = spdl__stage_load(stats, f->is.stage);
    const bool serial = (stage->kind == SPDL_KIND_SOURCE && stage->concurrency == 1) ||
                        stage->kind == SPDL_KIND_BRANCH || stage->alone;
    int i;
    f->is.limit = serial                                        ? SPDL_LIMIT_SERIAL
                  : spdl__stage_takes_turns(stats, f->is.stage) ? SPDL_LIMIT_LOCK
                                                                : SPDL_LIMIT_CONCURRENCY;
    if (f->is.limit != SPDL_LIMIT_CONCURRENCY) return;
    for (i = 0; i < stats->stage_count && f->is.tie < 0; ++i)
        if (i != f->is.stage && spdl__stage_load(stats, i) > SPDL__ALL_BUSY * load) f->is.tie = i;
    spdl__find_settings(stats, f, true);
}

/* All workers are in calls. The busiest row gets more calls if more workers need that. */
SPDL__COLD void spdl__find_workers(const spdl_stats *stats, spdl__found *f) {
    const spdl_stage_stats *stage = &stats->stage[f->is.stage];
    const double calls = spdl__share(stage->busy_ns, stats->elapsed_ns) / stage->concurrency;
    f->is.limit = SPDL_LIMIT_WORKERS;
    if (spdl__stage_takes_turns(stats, f->is.stage))
        f->is.limit = SPDL_LIMIT_LOCK;
    else
        spdl__find_settings(stats, f, stats->workers > 0 && calls >= SPDL__SURE);
}

/* The row that computes most, or -1 if it is not the rows that use the processors. */
SPDL__COLD int spdl__stats_hottest(const spdl_stats *stats, double used) {
    uint64_t cpu = 0;
    int i, row = 0;
    for (i = 0; i < stats->stage_count; ++i) {
        cpu += stats->stage[i].cpu_ns;
        if (stats->stage[i].cpu_ns > stats->stage[row].cpu_ns) row = i;
    }
    return spdl__share(cpu, stats->elapsed_ns) < used / 2 ? -1 : row;
}

/* Whether the row that limits lacks processors, or all rows do: `f` says so then. Who waits for
   none has enough, whoever else computes. What others have is known from the second snapshot on. */
SPDL__COLD bool spdl__find_full(const spdl_stats *stats, spdl__found *f, int busiest) {
    const double cores = stats->cores_allowed;
    const bool ours = f->used >= SPDL__FULL * cores;
    const bool queued = spdl__stage_queued(&stats->stage[busiest]);
    const bool unknown = stats->others_cpu_ns == 0 &&
                         spdl__stage_load(stats, busiest) >= SPDL__LIMITING;
    const bool full = f->used + f->others >= SPDL__FULL * cores || unknown;
    if (f->used <= 0 || !(ours || (full && queued))) return false;
    if (spdl__stage_sleeps(&stats->stage[busiest]) &&
        spdl__stage_load(stats, busiest) >= SPDL__SURE)
        return false;
    f->is.limit = ours || f->others < SPDL__OTHERS ? SPDL_LIMIT_MACHINE : SPDL_LIMIT_FOREIGN;
    if (f->is.limit == SPDL_LIMIT_FOREIGN)
        f->is.stage = spdl__stage_load(stats, busiest) >= SPDL__LIMITING ? busiest : -1;
    else if ((f->is.stage = spdl__stats_hottest(stats, f->used)) < 0)
        f->is.limit = SPDL_LIMIT_NOT_KNOWN;
    return true;
}

/* Whether all rows are so short that it is the handing over that counts. */
SPDL__COLD bool spdl__stats_short_calls(const spdl_stats *stats) {
    int i;
    if (stats->step_mean_ns >= SPDL__TINY_NS) return false;
    for (i = 0; i < stats->stage_count; ++i)
        if (stats->stage[i].mean_ns >= SPDL__TINY_NS) return false;
    return spdl__share(stats->elapsed_ns, stats->delivered) < 2 * SPDL__TINY_NS;
}

/* The consumer waits, or requests were dropped. A row that is not that busy is the limit if it has
   one call at a time, and the consumer's item was mostly in it. */
SPDL__COLD void spdl__find_wait(const spdl_stats *stats, spdl__found *f) {
    const int busiest = spdl__stats_busiest(stats);
    const double load = spdl__stage_load(stats, busiest);
    const spdl_stage_stats *stage, *most = stats->stage;
    uint64_t busy = 0, exposed = 0;
    bool limits = load >= (spdl__stats_pushed(stats) ? SPDL__LIMITING : SPDL__SURE), here, tail;
    for (stage = stats->stage; stage < stats->stage + stats->stage_count; ++stage) {
        busy += stage->deferred || stage->threads > 0 ? 0 : stage->busy_ns;
        exposed += stage->exposed_ns + stage->exposed_idle_ns;
        if (stage->exposed_ns > most->exposed_ns) most = stage;
    }
    here = most->exposed_ns > exposed / 2; /* in calls of this row */
    tail = here && most->p50_ns > 0 && most->kind != SPDL_KIND_FEED && /* in rare slow ones */
           most->max_ns >= SPDL__TAIL * most->p50_ns &&
           spdl__grown(most->p50_ns * most->tasks, most->busy_ns) > most->exposed_ns / 2;
    if (load >= SPDL__LIMITING && most == &stats->stage[busiest] && most->concurrency == 1)
        limits |= here && !tail;
    f->is.stage = busiest;
    if (spdl__stats_short_calls(stats)) {
        f->short_calls = true;
        f->is.stage = -1;
    } else if (spdl__find_full(stats, f, busiest)) {
        return;
    } else if (stats->workers == 0 || spdl__share(busy, stats->elapsed_ns) >=
                                          SPDL__ALL_BUSY * spdl__stats_threads(stats)) {
        spdl__find_workers(stats, f);
    } else if (limits) {
        spdl__find_class(stats, f);
    } else {
        f->is.stage = (int)(most - stats->stage);
        if (tail && (most->in_order || most->concurrency == 1))
            spdl__find_buffer(stats, f);
        else if (here && most->kind == SPDL_KIND_BATCH)
            f->is.limit = SPDL_LIMIT_BATCH;
        else
            f->is.stage = -1;
    }
}

/* Who had the consumer's processor: our own rows, or other programs. */
SPDL__COLD spdl_limit spdl__find_harm(const spdl_stats *stats, const spdl__found *f) {
    uint64_t cpu = 0;
    int i;
    for (i = 0; i < stats->stage_count; ++i) cpu += stats->stage[i].cpu_ns;
    return f->others > spdl__share(cpu, stats->elapsed_ns) ? SPDL_LIMIT_FOREIGN : SPDL_LIMIT_HARM;
}

SPDL__COLD spdl__found spdl__find(const spdl_stats *stats) {
    const double cores = stats->cores_allowed;
    spdl__found f = { { SPDL_LIMIT_NOT_KNOWN, -1, -1, 0, 0, 0, 0, 0 }, 0, 0, false, false, NULL };
    if (stats->delivered == 0) return f;
    /* too short a run says nothing of the processors, nor a reading from long after its end */
    if (stats->process_ns >= 50000000 && stats->process_ns / 5 <= stats->elapsed_ns / 4 &&
        cores > 0) {
        f.used = spdl__share(stats->process_cpu_ns, stats->process_ns);
        f.others = spdl__share(stats->others_cpu_ns, stats->process_ns) -
                   spdl__larger((double)stats->cores - cores, 0);
        f.others = spdl__smaller(spdl__larger(f.others, 0), cores);
    }
    if (spdl__stats_pushed(stats)) {
        const int busiest = spdl__stats_busiest(stats);
        if (stats->stage[0].skips + stats->stage[0].failures > 0)
            spdl__find_wait(stats, &f);
        else if (spdl__stage_load(stats, busiest) >= SPDL__LIMITING)
            f.is.stage = busiest;
    } else if (spdl__stats_waiting(stats) >= SPDL__FED) {
        spdl__find_wait(stats, &f);
    } else if (spdl__share(stats->consumer_runnable_ns, stats->step_ns) >= SPDL__FED) {
        f.is.limit = spdl__find_harm(stats, &f);
    } else {
        f.is.limit = SPDL_LIMIT_CONSUMER;
    }
    return f;
}

SPDL_API spdl_limit spdl_stats_find(const spdl_stats *stats, spdl_finding *finding) {
    const spdl__found f = spdl__find(stats);
    if (finding != NULL) *finding = f.is;
    return f.is.limit;
}

/* --- the verdict --- */

#define SPDL__ASK_DOCTOR "SPDL_DOCTOR=30 measures it"
#define SPDL__ASK_TRIAL "SPDL_DOCTOR=30,raise tries it"

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
        batches |= stats->stage[i].kind == SPDL_KIND_BATCH;
    }
    spdl__text_add(text, "Answers took %s (p50) to %s (p99), most of it ",
                   spdl__duration(&cell[0], (double)feed->p50_ns),
                   spdl__duration(&cell[1], (double)feed->p99_ns));
    if ((double)stats->answer_wait_ns > half) {
        spdl__text_add(text, "until they were taken.");
    } else if ((double)busy > half) {
        spdl__text_add(text, "in calls%s", feed->skips ? "." : ": no request waited long.");
    } else if (batches && load < SPDL__LIMITING) {
        spdl__text_add(text, "until a batch was full.");
    } else {
        spdl__text_add(text, "waiting in front of %s", spdl__stage_called(cell, stats, busiest));
        if (feed->skips == 0) spdl__text_add(text, ", busy %.0f %% of the time", 100 * load);
        spdl__text_add(text, ".");
    }
}

/* What the calls of a stage do, where it was measured. */
SPDL__COLD const char *spdl__stage_does(const spdl_stage_stats *stage) {
    if (stage->split_calls == 0) return "";
    return spdl__stage_sleeps(stage) ? ", asleep"
           : spdl__share(stage->cpu_ns, stage->busy_ns) > 0.5 ? ", computing" : "";
}

/* "1.9x (1.8 to 2.0)" */
SPDL__COLD void spdl__text_interval(spdl__text *text, const spdl_interval *is) {
    spdl__text_add(text, "%.2fx", is->value);
    if (is->known)
        spdl__text_add(text, " (%.2f to %.2f)", is->low, is->high);
    else
        spdl__text_add(text, " in %d round%s", is->rounds, is->rounds == 1 ? "" : "s");
}

/* What the settings come to: measured, or by the times of the calls, and on what that hangs. */
SPDL__COLD void spdl__verdict_gain(spdl__text *text, const spdl_stats *stats,
                                   const spdl__found *f) {
    const spdl_finding *is = &f->is;
    const bool several = stats->stage[is->stage].concurrency > 1;
    if (f->measured != NULL) {
        spdl__text_add(text, ": measured ");
        spdl__text_interval(text, f->measured);
        spdl__text_add(text, ".");
        return;
    }
    if (is->gain >= SPDL__GAIN)
        spdl__text_add(text, ": %s %.2gx", is->limit == SPDL_LIMIT_ORDER ? "up to" : "about",
                       is->gain);
    if (is->limit == SPDL_LIMIT_ORDER)
        spdl__text_add(text, ".");
    else if (is->concurrency > 0 && !several)
        spdl__text_add(text, ", if its function may run on several threads at a time. "
                             SPDL__ASK_TRIAL ".");
    else
        spdl__text_add(text, ", unless its calls wait for a lock. " SPDL__ASK_TRIAL ".");
}

/* The settings to write, as "Write .concurrency = 3 and workers = 5." False: there are none. */
SPDL__COLD bool spdl__verdict_settings(spdl__text *text, const spdl_stats *stats,
                                       const spdl__found *f) {
    const spdl_finding *is = &f->is;
    const bool fails = f->measured != NULL && !(f->measured->value >= SPDL__GAIN);
    const char *before = fails ? " " : " Write ";
    spdl__cell cell;
    if (is->concurrency + is->workers + is->buffer_size == 0) return false;
    if (is->concurrency > 0) {
        spdl__text_add(text, "%s.concurrency = %d", before, is->concurrency);
        before = " and ";
    }
    if (is->tie_concurrency > 0)
        spdl__text_add(text, "%s.concurrency = %d for %s, which is as busy", before,
                       is->tie_concurrency, spdl__stage_called(&cell, stats, is->tie));
    if (is->workers > 0) spdl__text_add(text, "%sworkers = %d", before, is->workers);
    if (is->buffer_size > 0)
        spdl__text_add(text, is->stage == stats->stage_count - 1 ? "%sSPDL_SINK(%d)"
                                                                 : "%s.buffer_size = %d",
                       before, is->buffer_size);
    if (is->limit == SPDL_LIMIT_ORDER && stats->stage[is->stage].concurrency > 1)
        spdl__text_add(text, ", or .output_order = SPDL_ORDER_COMPLETION");
    if (fails) spdl__text_add(text, " was tried and does not help");
    spdl__verdict_gain(text, stats, f);
    return true;
}

/* Of a row that is busy, or of all workers: what to do about it. */
SPDL__COLD void spdl__verdict_cure(spdl__text *text, const spdl_stats *stats,
                                   const spdl__found *f) {
    const spdl_stage_stats *stage = &stats->stage[f->is.stage];
    if (f->is.limit == SPDL_LIMIT_LOCK) {
        spdl__text_add(text, f->proven ? " Its calls wait for each other, as for a lock: more at a "
                                         "time do not help. Hold it for less."
                                       : " It may be a lock: " SPDL__ASK_DOCTOR ".");
    } else if (f->is.limit == SPDL_LIMIT_SERIAL) {
        spdl__text_add(text, stage->kind == SPDL_KIND_SOURCE
                                 ? " Move work from the source to a stage."
                                 : " Make it cheaper, or split the row in two.");
    } else {
        if (stage->split_calls > 0 && spdl__stats_faults(stats))
            spdl__text_add(text, " It takes %.0f page faults for each item of the consumer: use "
                                 "memory again, such as by spdl_buffer.",
                           spdl__share(stats->minor_faults, stats->delivered));
        if (!spdl__verdict_settings(text, stats, f))
            spdl__text_add(text, " More calls at a time would gain less than 3 %%: the next limit "
                                 "is as near.");
    }
}

/* Without a row to blame. */
SPDL__COLD void spdl__verdict_of_none(spdl__text *text, const spdl_stats *stats,
                                      const spdl__found *f) {
    const double load = 100 * spdl__stage_load(stats, spdl__stats_busiest(stats));
    const double cores = stats->cores_allowed;
    if (f->short_calls)
        spdl__text_add(text, "no call takes as long as handing an item on. Do more in one call, or "
                             "hand on batches.");
    else if (f->used >= SPDL__FULL * cores && cores > 0)
        spdl__text_add(text, "the processors are used up (%.2f of %.3g), mostly outside of the "
                             "stages.", f->used + f->others, cores);
    else if (stats->workers_runnable_ns / (uint64_t)spdl__stats_threads(stats) >
             stats->elapsed_ns / 5)
        spdl__text_add(text, "the workers were ready for it, and waited for a processor. Run less "
                             "beside it, or use fewer workers.");
    else
        spdl__text_add(text, "no stage was busy more than %.0f %% of the time. What holds it back "
                             "is not known: " SPDL__ASK_DOCTOR "%s.", load,
                       stats->elapsed_ns / 50000 >= stats->delivered
                           ? "" : ", or try a larger buffer_size (16 to 64), as items are short");
}

/* What the consumer or requests wait for: the processors, all workers, a row. */
SPDL__COLD void spdl__verdict_of_limit(spdl__text *text, const spdl_stats *stats,
                                       const spdl__found *f) {
    const int row = f->is.stage >= 0 ? f->is.stage : spdl__stats_busiest(stats);
    const int threads = spdl__stats_threads(stats);
    const spdl_stage_stats *stage = &stats->stage[row];
    const double load = 100 * spdl__stage_load(stats, row), cores = stats->cores_allowed;
    spdl__cell cell[3];
    const char *called = spdl__stage_called(&cell[0], stats, row);
    switch (f->is.limit) {
    case SPDL_LIMIT_MACHINE:
        if (f->used + f->others >= SPDL__FULL * cores)
            spdl__text_add(text, "the processors are used up (%.2f of %.3g), most of all by %s. ",
                           f->used + f->others, cores, called);
        else
            spdl__text_add(text, "calls of %s waited for a processor, %.0f %% of their time. ",
                           called, 100 * spdl__share(stage->runnable_ns, stage->busy_ns));
        spdl__text_add(text, "More concurrency does not help: make that stage cheaper.");
        break;
    case SPDL_LIMIT_FOREIGN:
        spdl__text_add(text, "other programs used %.2f of %.3g processors", f->others, cores);
        if (f->is.stage >= 0 && stage->runnable_known)
            spdl__text_add(text, ", and calls of %s waited for one %.0f %% of their time", called,
                           100 * spdl__share(stage->runnable_ns, stage->busy_ns));
        spdl__text_add(text, ". Run less beside it.");
        break;
    case SPDL_LIMIT_BATCH:
        spdl__text_add(text, "until %s had a batch full. Write a smaller size, or a larger "
                             "buffer_size.", called);
        break;
    case SPDL_LIMIT_ORDER:
        spdl__text_add(text, "rare slow calls of %s took up to %s, where half take %s, and held "
                             "back the rest.", called,
                       spdl__duration(&cell[1], (double)stage->max_ns),
                       spdl__duration(&cell[2], (double)stage->p50_ns));
        (void)spdl__verdict_settings(text, stats, f);
        break;
    case SPDL_LIMIT_WORKERS:
        if (stats->workers > 0 && threads > 1)
            spdl__text_add(text, "all %d workers were busy", threads);
        else
            spdl__text_add(text, stats->workers > 0 ? "the only worker was busy"
                                                    : "the only thread was busy, as workers is 0");
        spdl__text_add(text, ", most of all with %s%s.", called, spdl__stage_does(stage));
        spdl__verdict_cure(text, stats, f);
        break;
    case SPDL_LIMIT_CONCURRENCY:
    case SPDL_LIMIT_LOCK:
    case SPDL_LIMIT_SERIAL:
        spdl__text_add(text, "%s was busy %.0f %% of the time (concurrency %d)%s%s", called, load,
                       stage->concurrency, spdl__stage_does(stage),
                       f->is.limit == SPDL_LIMIT_SERIAL ? ", one call at a time."
                       : f->is.limit == SPDL_LIMIT_LOCK && !f->proven
                           ? " on one processor at a time." : ".");
        spdl__verdict_cure(text, stats, f);
        break;
    default: spdl__verdict_of_none(text, stats, f);
    }
}

SPDL__COLD void spdl__verdict_of_feed(spdl__text *text, const spdl_stats *stats,
                                      const spdl__found *f) {
    const spdl_stage_stats *feed = &stats->stage[0];
    const spdl_edge_stats *sink = &stats->edge[stats->stage_count - 1];
    const uint64_t lost = feed->skips + feed->failures;
    if (lost > 0) {
        spdl__text_add(text, "%llu of %llu requests were %s: ", (spdl__llu)lost,
                       (spdl__llu)(feed->tasks + feed->failures),
                       feed->failures == 0 ? "dropped"
                       : feed->skips == 0  ? "refused" : "dropped or refused");
        if (f->is.limit != SPDL_LIMIT_NOT_KNOWN && f->is.limit != SPDL_LIMIT_ORDER &&
            f->is.limit != SPDL_LIMIT_BATCH)
            spdl__verdict_of_limit(text, stats, f);
        else if (spdl__share(sink->put_wait_ns, sink->elapsed_ns) >= SPDL__LIMITING)
            spdl__text_add(text, "answers were not taken in time.");
        else
            spdl__text_add(text, stats->edge[0].readiness >= SPDL__LIMITING
                                     ? "the workers lacked processor time."
                                     : "more came at once than its buffer_size.");
        spdl__text_add(text, " ");
    }
    if (stats->delivered > 0)
        spdl__verdict_of_answers(text, stats);
    else
        spdl__text_add(text, "Nothing was %s.",
                       sink->depth > 0    ? "taken, though answers are ready"
                       : feed->tasks == 0 ? "pushed" : "answered");
}

/* A consumer that has enough. */
SPDL__COLD void spdl__verdict_of_fed(spdl__text *text, const spdl_stats *stats,
                                     const spdl__found *f) {
    spdl__text_add(text, "Loading keeps up: the consumer waited %.1f %% of its time. ",
                   100 * spdl__stats_waiting(stats));
    if (f->is.limit == SPDL_LIMIT_CONSUMER)
        spdl__text_add(text, "What its own steps lose to loading only spdl_headspace measures.");
    else
        spdl__text_add(text, "But for %.0f %% of its own steps other %s.",
                       100 * spdl__share(stats->consumer_runnable_ns, stats->step_ns),
                       f->is.limit == SPDL_LIMIT_FOREIGN
                           ? "programs had its processor: run less beside it"
                           : "threads of this program had its processor: write .policy.polite, by "
                             "which workers give way to it, or use fewer workers");
}

SPDL__COLD void spdl__verdict(spdl__text *text, const spdl_stats *stats, const spdl__found *f) {
    double most = SPDL__FAILING;
    spdl__cell cell;
    int i, stage = -1;
    if (spdl__stats_pushed(stats)) {
        spdl__verdict_of_feed(text, stats, f);
    } else if (stats->delivered == 0) {
        spdl__text_add(text, "Nothing was delivered: the consumer %s.",
                       2 * stats->wait_ns > stats->elapsed_ns ? "waited" : "did not ask for it");
    } else if (spdl__stats_waiting(stats) >= SPDL__FED) {
        spdl__text_add(text, "The consumer waited %.0f %% of its time: ",
                       100 * spdl__stats_waiting(stats));
        spdl__verdict_of_limit(text, stats, f);
    } else {
        spdl__verdict_of_fed(text, stats, f);
    }
    for (i = spdl__stats_pushed(stats); i < stats->stage_count; ++i) { /* too many to go unseen */
        const double share = spdl__share(stats->stage[i].failures, stats->stage[i].tasks);
        if (share <= most) continue;
        most = share;
        stage = i;
    }
    if (stage >= 0)
        spdl__text_add(text, " %.0f %% of the calls of %s fail.", 100 * most,
                       spdl__stage_called(&cell, stats, stage));
}

/* --- the table --- */

/* One row, 100 columns wide with the mark before it. Of calls under a microsecond only a guess is
   known of where their time goes: it is left out. */
SPDL__COLD void spdl__stats_row(spdl__text *text, const spdl_stats *stats, int i) {
    const spdl_stage_stats *stage = &stats->stage[i];
    const uint64_t times[] = { stage->p50_ns, stage->p99_ns, stage->max_ns };
    const bool waited = spdl__share(stats->wait_ns, stats->elapsed_ns) >= SPDL__WAIT_SHOWN;
    const double waits = spdl__share(stage->exposed_ns + stage->exposed_idle_ns, stats->wait_ns);
    const double cpu = spdl__share(stage->cpu_ns, stage->busy_ns);
    const double runq = spdl__share(stage->runnable_ns, stage->busy_ns);
    const double block = spdl__share(stage->blocked_ns, stage->busy_ns);
    const bool calls = stage->kind == SPDL_KIND_SOURCE || stage->kind == SPDL_KIND_PIPE ||
                       stage->kind == SPDL_KIND_BRANCH;
    const bool split = stage->split_calls > 0 && stage->mean_ns >= 1000;
    spdl__cell c[6];
    int k;
    spdl__text_name(text, stage->name, 18);
    spdl__text_add(text, " %4d %9llu %7s", stage->concurrency, (spdl__llu)stage->tasks,
                   spdl__rate(c, 1e9 * spdl__share(stage->tasks, stats->elapsed_ns)));
    for (k = 0; k < 3; ++k)
        spdl__text_add(text, " %7s", calls || stage->kind == SPDL_KIND_FEED
                                         ? spdl__duration(c, (double)times[k]) : "-");
    spdl__text_add(text, " %4s %4s %4s %5s %5s %5s",
                   calls ? spdl__percent(&c[0], spdl__stage_load(stats, i)) : "-",
                   split ? spdl__percent(&c[1], cpu) : "-",
                   split && runq > SPDL__PART_SHOWN ? spdl__percent(&c[2], runq) : "",
                   split && block > SPDL__PART_SHOWN ? spdl__percent(&c[3], block) : "",
                   spdl__percent(&c[4], stats->edge[i].readiness),
                   waited && waits > 0.005 ? spdl__percent(&c[5], spdl__smaller(waits, 1)) : "");
}

SPDL__COLD void spdl__stats_rows(spdl__text *text, const spdl_stats *stats, int limit) {
    int i, k;
    spdl__text_add(text, "  stage              conc     tasks    rate     p50     p99     max"
                         " busy  cpu runq block ready waits\n");
    for (i = 0; i < stats->stage_count; ++i) {
        spdl__text_add(text, i == limit ? "> " : "  ");
        spdl__stats_row(text, stats, i);
        spdl__text_add(text, "\n");
    }
    for (i = 0; i < stats->stage_count; ++i) {
        const spdl_stage_stats *s = &stats->stage[i];
        const uint64_t counts[] = { s->failures, s->skips, s->freed };
        const bool feed = s->kind == SPDL_KIND_FEED;
        const char *const losses[] = { feed ? "refused" : "failed",
                                       feed ? "dropped" : "skipped", "freed" };
        const char *before = ":";
        for (k = 0; k < 3; ++k) {
            if (counts[k] == 0) continue;
            if (*before == ':') spdl__text_add(text, "  ");
            if (*before == ':') spdl__text_name(text, s->name, -1);
            spdl__text_add(text, "%s %llu %s", before, (spdl__llu)counts[k], losses[k]);
            before = ",";
        }
        if (*before == ',') spdl__text_add(text, "\n");
    }
}

SPDL_API int spdl_stats_verdict(const spdl_stats *stats, char *buffer, size_t bytes) {
    spdl__text text = spdl__text_start(buffer, bytes);
    const spdl__found f = spdl__find(stats);
    spdl__verdict(&text, stats, &f);
    return (int)text.length;
}

/* Verdict, run and table. */
SPDL__COLD void spdl__stats_write(spdl__text *text, const spdl_stats *stats) {
    const spdl__found f = spdl__find(stats);
    spdl__cell cell[3];
    spdl__verdict(text, stats, &f);
    spdl__text_add(text, "\n");
    if (spdl__stats_pushed(stats))
        spdl__text_add(text, "%llu requests, ", (spdl__llu)stats->stage[0].tasks);
    spdl__text_add(text, "%llu items in %s", (spdl__llu)stats->delivered,
                   spdl__duration(&cell[0], (double)stats->elapsed_ns));
    if (stats->first_item_ns > 0)
        spdl__text_add(text, ", the first after %s",
                       spdl__duration(&cell[0], (double)stats->first_item_ns));
    spdl__text_add(text, ", %s, a step of %s, %d worker%s\n\n",
                   spdl__rate(&cell[1], 1e9 * spdl__share(stats->delivered, stats->elapsed_ns)),
                   spdl__duration(&cell[2], (double)stats->step_mean_ns), stats->workers,
                   stats->workers == 1 ? "" : "s");
    spdl__stats_rows(text, stats, f.is.stage);
}

SPDL_API int spdl_stats_text(const spdl_stats *stats, char *buffer, size_t bytes) {
    spdl__text text = spdl__text_start(buffer, bytes);
    spdl__stats_write(&text, stats);
    return (int)text.length;
}

/* --- JSON: one describer for statistics, reports and the doctor --- */

/* A field of a struct: 'u' uint64_t, 'd' double, 'i' int, 'b' bool, 's' characters, 'v' an
   interval, 'e' an enum with its words (NULL: a kind). */
typedef struct spdl__field {
    char type;
    const char *name;
    size_t at; /* offset in its struct */
    const char *const *words;
} spdl__field;

#define SPDL__FIELD_(of, type, field, words) { type, #field, offsetof(of, field), words }
#define SPDL__U(of, field) SPDL__FIELD_(of, 'u', field, NULL)
#define SPDL__D(of, field) SPDL__FIELD_(of, 'd', field, NULL)
#define SPDL__I(of, field) SPDL__FIELD_(of, 'i', field, NULL)
#define SPDL__B(of, field) SPDL__FIELD_(of, 'b', field, NULL)
#define SPDL__S(of, field) SPDL__FIELD_(of, 's', field, NULL)
#define SPDL__V(of, field) SPDL__FIELD_(of, 'v', field, NULL)
#define SPDL__FIELDS_END { '\0', NULL, 0, NULL }

static const char *const spdl__limit_names[] = {
    "not_known", "trainer", "concurrency", "machine", "lock", "serial", "order", "batch",
    "workers", "harm", "foreign", NULL
};

/* What is written of each struct, in this order. The 'u' are counters: they are subtracted for an
   interval. */
static const spdl__field spdl__finding_fields[] = {
    SPDL__FIELD_(spdl_finding, 'e', limit, spdl__limit_names), SPDL__I(spdl_finding, stage),
    SPDL__I(spdl_finding, tie), SPDL__I(spdl_finding, concurrency),
    SPDL__I(spdl_finding, tie_concurrency), SPDL__I(spdl_finding, workers),
    SPDL__I(spdl_finding, buffer_size), SPDL__D(spdl_finding, gain), SPDL__FIELDS_END
};
static const spdl__field spdl__stats_fields[] = {
    SPDL__I(spdl_stats, workers), SPDL__I(spdl_stats, cores), SPDL__D(spdl_stats, cores_allowed),
    SPDL__U(spdl_stats, elapsed_ns), SPDL__U(spdl_stats, delivered),
    SPDL__U(spdl_stats, first_item_ns), SPDL__U(spdl_stats, wait_ns),
    SPDL__U(spdl_stats, workers_runnable_ns), SPDL__U(spdl_stats, step_ns),
    SPDL__U(spdl_stats, step_mean_ns),
    SPDL__U(spdl_stats, answer_wait_ns), SPDL__U(spdl_stats, consumer_runnable_ns),
    SPDL__U(spdl_stats, process_ns), SPDL__U(spdl_stats, process_cpu_ns),
    SPDL__U(spdl_stats, others_cpu_ns), SPDL__U(spdl_stats, minor_faults), SPDL__FIELDS_END
};
static const spdl__field spdl__stage_fields[] = {
    SPDL__S(spdl_stage_stats, name), SPDL__FIELD_(spdl_stage_stats, 'e', kind, NULL),
    SPDL__I(spdl_stage_stats, concurrency), SPDL__I(spdl_stage_stats, threads),
    SPDL__I(spdl_stage_stats, in_flight), SPDL__B(spdl_stage_stats, deferred),
    SPDL__B(spdl_stage_stats, alone), SPDL__B(spdl_stage_stats, in_order),
    SPDL__B(spdl_stage_stats, runnable_known), SPDL__U(spdl_stage_stats, tasks),
    SPDL__U(spdl_stage_stats, failures), SPDL__U(spdl_stage_stats, skips),
    SPDL__U(spdl_stage_stats, freed),
    SPDL__U(spdl_stage_stats, busy_ns), SPDL__U(spdl_stage_stats, exposed_ns),
    SPDL__U(spdl_stage_stats, exposed_idle_ns), SPDL__U(spdl_stage_stats, mean_ns),
    SPDL__U(spdl_stage_stats, p50_ns), SPDL__U(spdl_stage_stats, p90_ns),
    SPDL__U(spdl_stage_stats, p99_ns), SPDL__U(spdl_stage_stats, max_ns),
    SPDL__U(spdl_stage_stats, cpu_ns), SPDL__U(spdl_stage_stats, runnable_ns),
    SPDL__U(spdl_stage_stats, blocked_ns), SPDL__U(spdl_stage_stats, split_calls), SPDL__FIELDS_END
};
static const spdl__field spdl__edge_fields[] = {
    SPDL__I(spdl_edge_stats, buffer_size), SPDL__I(spdl_edge_stats, depth),
    SPDL__D(spdl_edge_stats, readiness), SPDL__U(spdl_edge_stats, items),
    SPDL__U(spdl_edge_stats, put_wait_ns), SPDL__U(spdl_edge_stats, get_wait_ns),
    SPDL__U(spdl_edge_stats, empty_ns), SPDL__U(spdl_edge_stats, elapsed_ns), SPDL__FIELDS_END
};

/* The inside of a JSON string. What is not UTF-8 becomes U+FFFD. */
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

/* With a point whatever the locale; null when it is none. */
SPDL__COLD const char *spdl__json_double(spdl__cell *cell, double value) {
    const char *at, *end;
    char digits[40];
    uint64_t bits;
    memcpy(&bits, &value, sizeof(bits));
    if ((bits >> 52 & 0x7ff) == 0x7ff) return "null";
    (void)snprintf(digits, sizeof(digits), "%.12g", value);
    at = digits + strspn(digits, "+-0123456789");
    end = at + strcspn(at, "0123456789e");
    (void)snprintf(cell->text, sizeof(cell->text), "%.*s%s%s", (int)(at - digits), digits,
                   end > at ? "." : "", end);
    return cell->text;
}

/* Without an interval low and high are null. */
SPDL__COLD void spdl__json_interval(spdl__text *text, const spdl_interval *interval) {
    spdl__cell cell[3];
    spdl__text_add(text, "{\"value\":%s,\"low\":%s,\"high\":%s,\"rounds\":%d}",
                   spdl__json_double(&cell[0], interval->value),
                   interval->known ? spdl__json_double(&cell[1], interval->low) : "null",
                   interval->known ? spdl__json_double(&cell[2], interval->high) : "null",
                   interval->rounds);
}

/* The counter at an offset of a struct. */
SPDL__COLD uint64_t spdl__field_at(const void *stats, size_t at) {
    uint64_t value;
    memcpy(&value, (const char *)stats + at, sizeof(value));
    return value;
}

/* An object without its last brace; `before` is the first one, or a comma. */
SPDL__COLD void spdl__json_fields(spdl__text *text, const char *before, const void *object,
                                  const spdl__field *field) {
    spdl__cell cell;
    for (; field->name != NULL; ++field, before = ",") {
        const void *at = (const char *)object + field->at;
        int value; /* of an enum, whatever its type */
        spdl__text_add(text, "%s\"%s\":", before, field->name);
        switch (field->type) {
        case 'u':
            spdl__text_add(text, "%llu", (spdl__llu)spdl__field_at(object, field->at));
            break;
        case 'd': spdl__text_add(text, "%s", spdl__json_double(&cell, *(const double *)at)); break;
        case 'i': spdl__text_add(text, "%d", *(const int *)at); break;
        case 'b': spdl__text_add(text, *(const bool *)at ? "true" : "false"); break;
        case 's': spdl__json_string(text, (const char *)at); break;
        case 'v': spdl__json_interval(text, (const spdl_interval *)at); break;
        default:
            memcpy(&value, at, sizeof(value));
            spdl__json_string(text, field->words != NULL ? field->words[value]
                                                         : spdl__kind_name((spdl_kind)value));
        }
    }
}

SPDL__COLD void spdl__json_array(spdl__text *text, const char *name, const void *first, int count,
                                 size_t bytes, const spdl__field *fields) {
    int i;
    spdl__text_add(text, ",\"%s\":[", name);
    for (i = 0; i < count; ++i) {
        spdl__json_fields(text, i > 0 ? ",{" : "{", (const char *)first + (size_t)i * bytes,
                          fields);
        spdl__text_add(text, "}");
    }
    spdl__text_add(text, "]");
}

SPDL__COLD void spdl__json_stats(spdl__text *text, const spdl_stats *stats) {
    const spdl__found f = spdl__find(stats);
    char verdict[768];
    (void)spdl_stats_verdict(stats, verdict, sizeof(verdict));
    spdl__text_add(text, "{\"verdict\":");
    spdl__json_string(text, verdict);
    spdl__json_fields(text, ",\"finding\":{", &f.is, spdl__finding_fields);
    spdl__json_fields(text, "},", stats, spdl__stats_fields);
    spdl__json_array(text, "stages", stats->stage, stats->stage_count, sizeof(stats->stage[0]),
                     spdl__stage_fields);
    spdl__json_array(text, "edges", stats->edge, stats->stage_count, sizeof(stats->edge[0]),
                     spdl__edge_fields);
    spdl__text_add(text, "}");
}

SPDL_API int spdl_stats_json(const spdl_stats *stats, char *buffer, size_t bytes) {
    spdl__text text = spdl__text_start(buffer, bytes);
    spdl__json_stats(&text, stats);
    return (int)text.length;
}

/* ============================================================================================= */
/* >>report-impl
   One thread for each pipeline that was asked for reports: it sleeps, takes snapshots as anybody
   may, and writes. Only destroy waits for it. Files are opened and buffers allocated by create. */

/* What has changed since the snapshot before: of reports, and of the doctor. */
typedef struct spdl__since {
    spdl_stats last;
    spdl__histogram times[SPDL_MAX_STAGES];
} spdl__since;

SPDL__COLD void spdl__fields_subtract(void *to, const void *from, const spdl__field *field) {
    for (; field->name != NULL; ++field) {
        uint64_t value;
        if (field->type != 'u') continue;
        value = spdl__grown(spdl__field_at(from, field->at), spdl__field_at(to, field->at));
        memcpy((char *)to + field->at, &value, sizeof(value));
    }
}

/* From `last` to `now`, which is the last one then. */
SPDL__COLD void spdl__since_take(const spdl_pipeline *p, spdl__since *since, const spdl_stats *now,
                                 spdl_stats *interval) {
    const spdl_stats *last = &since->last;
    spdl__histogram times;
    int i;
    *interval = *now;
    spdl__fields_subtract(interval, last, spdl__stats_fields);
    if (last->first_item_ns == 0)
        interval->first_item_ns = spdl__grown(last->elapsed_ns, now->first_item_ns);
    for (i = 0; i < interval->stage_count; ++i) {
        spdl_stage_stats *stage = &interval->stage[i];
        spdl__fields_subtract(stage, &last->stage[i], spdl__stage_fields);
        spdl__fields_subtract(&interval->edge[i], &last->edge[i], spdl__edge_fields);
        (void)spdl__pipeline_histogram(p, i, &times);
        spdl__histogram_since(&since->times[i], &times);
        spdl__stage_times(stage, &since->times[i]);
        since->times[i] = times;
    }
    spdl__stats_means(interval);
    since->last = *now;
}

#ifndef SPDL_NO_REPORT

#define SPDL__STDERR_NS 100000000   /* how long stderr may take to accept a piece */
#define SPDL__EVERY_LEAST 0.01      /* seconds of an interval */
#define SPDL__EVERY_MOST 1e7

/* --- what is asked for --- */

typedef struct spdl__report_plan {
    spdl_report_desc desc; /* except for the name of the file */
    char json[SPDL__PATH_BYTES];
} spdl__report_plan;

/* The name of a file, "" for NULL; false, and a warning, when it does not fit. */
SPDL__COLD bool spdl__path_copy(char to[SPDL__PATH_BYTES], const char *from, const char *what,
                                const spdl_logger *logger) {
    if (snprintf(to, SPDL__PATH_BYTES, "%s", from != NULL ? from : "") < SPDL__PATH_BYTES)
        return true;
    to[0] = '\0';
    spdl__logf(logger, SPDL_LOG_WARN, "%s: the name has more than %d bytes: \"%.60s...\"",
               what, SPDL__PATH_BYTES - 1, from);
    return false;
}

/* Seconds as 5 or 0.25, in every locale; 0 when the word is something else. */
SPDL__COLD double spdl__report_seconds(const char *word) {
    double value = 0, place = 1;
    const char *at = word;
    for (; *at >= '0' && *at <= '9'; ++at) value = 10 * value + (*at - '0');
    if (at == word) return 0;
    if (*at == '.')
        for (++at; *at >= '0' && *at <= '9'; ++at) value += (place /= 10) * (*at - '0');
    return *at == '\0' ? value : 0;
}

/* Whether there is anything to do. */
SPDL__COLD bool spdl__report_ask(spdl__report_plan *plan, const spdl_report_desc *desc,
                                 const spdl_logger *logger) {
    const char *stats = spdl__os_environment("SPDL_STATS");
    const char *json = spdl__os_environment("SPDL_REPORT");
    memset(plan, 0, sizeof(*plan));
    if (desc != NULL) plan->desc = *desc;
    (void)spdl__path_copy(plan->json, plan->desc.json, "report", logger);
    if (stats != NULL && strcmp(stats, "0") != 0) {
        const double every = spdl__report_seconds(stats);
        plan->desc.table |= every >= SPDL__EVERY_LEAST && every <= SPDL__EVERY_MOST;
        if (plan->desc.table)
            plan->desc.every = every;
        else
            spdl__logf(logger, SPDL_LOG_WARN, "SPDL_STATS is \"%.200s\", but not a number of "
                                              "seconds: no reports", stats);
    }
    if (json != NULL) (void)spdl__path_copy(plan->json, json, "SPDL_REPORT", logger);
    if (!(plan->desc.every > 0)) plan->desc.every = 5;
    plan->desc.every =
        spdl__smaller(spdl__larger(plan->desc.every, SPDL__EVERY_LEAST), SPDL__EVERY_MOST);
    return plan->desc.table || plan->desc.report_fn != NULL || plan->json[0] != '\0';
}

/* --- text --- */

typedef struct spdl__reporter {
    /* written by create */
    spdl_pipeline *pipeline;
    spdl__report_plan plan; /* the thread ends the table when it has failed */
    char name[SPDL_NAME_BYTES];
    spdl__os_thread thread;
    uint64_t run; /* Unix time in us */
    char *buffer; /* what is in it: the thread's */
    size_t block_bytes, bytes;
    /* written by destroy */
    uint32_t quit;
    spdl__os_event bell;
    /* written by the thread */
    spdl__os_file json_file; /* or SPDL__NO_FILE */
    spdl_stats now, interval;
    spdl__process_stats process; /* at the last report */
    spdl__since since;
} spdl__reporter;

/* What a line of JSON begins with. */
SPDL__COLD void spdl__json_head(spdl__text *text, const char *schema, const char *name) {
    spdl__cell cell;
    spdl__text_add(text, "{\"schema\":\"%s\",\"version\":\"%s\",\"pipeline\":", schema,
                   spdl_version());
    spdl__json_string(text, name);
    spdl__text_add(text, ",\"pid\":%llu,\"time\":%s", (spdl__llu)spdl__os_process_id(),
                   spdl__json_double(&cell, (double)spdl__os_clock_ns(SPDL__OS_UNIX) * 1e-9));
}

static const spdl__field spdl__process_fields[] = {
    SPDL__U(spdl__process_stats, time_ns), SPDL__D(spdl__process_stats, cores_allowed),
    SPDL__U(spdl__process_stats, cpu_ns), SPDL__U(spdl__process_stats, others_ns),
    SPDL__U(spdl__process_stats, resident_bytes), SPDL__U(spdl__process_stats, minor_faults),
    SPDL__U(spdl__process_stats, major_faults), SPDL__FIELDS_END
};

/* After a `reason`, which may be NULL, nothing more is written to the file. */
SPDL__COLD void spdl__report_failed(spdl__reporter *r, const char *what, const char *reason) {
    if (reason == NULL) return;
    spdl__logf(&r->pipeline->logger, SPDL_LOG_WARN, "no %s in %.400s: %s", what, r->plan.json,
               reason);
    (void)spdl__os_file_close(r->json_file);
    r->json_file = SPDL__NO_FILE;
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
    spdl__json_fields(&text, ",\"process\":{", &r->process, spdl__process_fields);
    spdl__text_add(&text, "}}\n");
    if (text.length < r->bytes)
        reason = spdl__os_file_write(r->json_file, text.buffer, text.length, SPDL__NEVER);
    spdl__report_failed(r, "more statistics", reason);
}

SPDL__COLD void spdl__report_show(spdl__reporter *r, bool final) {
    const char *reason;
    spdl__text text = spdl__text_start(r->buffer, r->bytes);
    spdl__cell cell;
    spdl__text_name(&text, r->name, -1);
    spdl__text_add(&text, "  %s %s, %llu items\n", final ? "ended after" : "at",
                   spdl__duration(&cell, (double)r->now.elapsed_ns),
                   (spdl__llu)r->now.delivered);
    spdl__stats_write(&text, final ? &r->now : &r->interval);
    spdl__text_add(&text, "  %.2f of %.3g cores used, others %.2f; %.0f MB resident\n",
                   spdl__share(r->interval.process_cpu_ns, r->interval.process_ns),
                   r->process.cores_allowed,
                   spdl__share(r->interval.others_cpu_ns, r->interval.process_ns),
                   (double)r->process.resident_bytes / 1e6);
    reason = spdl__os_stderr_write(r->buffer, spdl__min(text.length, r->bytes - 1),
                                   SPDL__STDERR_NS);
    if (reason == NULL) return;
    spdl__logf(&r->pipeline->logger, SPDL_LOG_WARN, "no more statistics on stderr: %s",
               reason);
    r->plan.desc.table = false;
}

SPDL__COLD void spdl__report_once(spdl__reporter *r, bool final) {
    spdl_pipeline_stats(r->pipeline, &r->now);
    spdl__process_read(&r->process);
    spdl__since_take(r->pipeline, &r->since, &r->now, &r->interval);
    if (r->plan.desc.report_fn != NULL)
        r->plan.desc.report_fn(&r->interval, &r->now, r->plan.desc.user);
    if (r->json_file != SPDL__NO_FILE) spdl__report_json(r, final);
    if (r->plan.desc.table) spdl__report_show(r, final);
}

/* --- the thread --- */

/* The final report comes at the end or destroy; again when the pipeline has gone on after it. */
SPDL__COLD void *spdl__report_main(void *arg) {
    spdl__reporter *r = (spdl__reporter *)arg;
    const uint64_t every = (uint64_t)(r->plan.desc.every * 1e9);
    uint64_t report = spdl_time_ns() + every;
    bool over = false; /* the final report was made */
    for (;;) {
        const uint32_t word = spdl__load32(&r->bell.word);
        const bool quit = spdl__load32(&r->quit) != 0;
        const bool ended = spdl__load_relaxed(&r->pipeline->ended_ns) != 0;
        const uint64_t now = spdl_time_ns();
        const bool final = !over && (quit || (ended && now >= report));
        if (final || (!ended && !quit && now >= report)) spdl__report_once(r, final);
        if (quit) return NULL;
        over = final || (over && ended);
        if (now >= report) report = now + every - (now - report) % every;
        (void)spdl__os_event_sleep(&r->bell, word, report);
    }
}

/* --- beginning and end --- */

SPDL__COLD void spdl__report_open(spdl__reporter *r) {
    if (r->plan.json[0] != '\0')
        spdl__report_failed(
            r, "statistics",
            spdl__os_file_open(&r->json_file, r->plan.json, SPDL__OS_APPEND, NULL));
}

SPDL__COLD void spdl__report_free(spdl__reporter *r) {
    (void)spdl__os_file_close(r->json_file);
    r->pipeline->reporter = NULL;
    spdl__os_event_fini(&r->bell);
    spdl__free(&r->pipeline->allocator, r, r->block_bytes);
}

/* After the pipeline has been made. Whatever goes wrong is a warning. */
SPDL__COLD void spdl__report_begin(spdl_pipeline *p, const spdl_pipeline_desc *desc) {
    const size_t text = 2 * (8192 + 3072 * (size_t)p->count); /* JSON of all stages, twice */
    const size_t bytes = sizeof(spdl__reporter) + text;
    spdl__report_plan plan;
    spdl__reporter *r;
    if (!spdl__report_ask(&plan, desc->report, &p->logger)) return;
    r = (spdl__reporter *)spdl__alloc_zeroed(&p->allocator, 1, bytes, sizeof(void *));
    if (r != NULL && spdl__os_event_init(&r->bell)) {
        r->pipeline = p;
        r->plan = plan;
        r->block_bytes = bytes;
        r->buffer = (char *)(r + 1);
        r->bytes = text;
        r->run = spdl__os_clock_ns(SPDL__OS_UNIX) / 1000;
        r->json_file = SPDL__NO_FILE;
        spdl__name_copy(r->name, desc->name != NULL ? desc->name : "spdl");
        p->reporter = r;
        spdl__report_open(r);
        if (spdl__os_thread_start(&r->thread, "spdl-report", NULL, 0, spdl__report_main, r)) return;
        spdl__report_free(r);
    } else {
        spdl__free(&p->allocator, r, bytes);
    }
    spdl__logf(&p->logger, SPDL_LOG_WARN, "no memory or thread for reports: there are none");
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
    static const char *const names[] = { "SPDL_STATS", "SPDL_REPORT", "SPDL_TRACE", "SPDL_DOCTOR" };
    const char *asked = desc->report != NULL                          ? "desc.report"
                        : desc->trace != NULL && *desc->trace != '\0' ? "desc.trace"
                        : desc->trace_events > 0 ? "desc.trace_events"
                        : desc->doctor != NULL   ? "desc.doctor" : NULL;
    int i;
    for (i = 0; i < 4 && asked == NULL; ++i) {
        const char *value = spdl__os_environment(names[i]);
        if (value != NULL && strcmp(value, "0") != 0) asked = names[i];
    }
    if (asked != NULL)
        spdl__logf(&p->logger, SPDL_LOG_WARN, "%s is ignored: this program was built with "
                                              "SPDL_NO_REPORT, without reports, traces or doctor",
                   asked);
}

SPDL__COLD void spdl__report_end(spdl_pipeline *p) { (void)p; }

SPDL__COLD bool spdl__doctor_ask(spdl__doctor_plan *plan, const spdl_doctor_desc *desc,
                                 const spdl_logger *logger) {
    (void)plan, (void)desc, (void)logger;
    return false;
}

SPDL__COLD spdl_result spdl__doctor_open(spdl_pipeline *p, const spdl__doctor_plan *plan,
                                         int workers) {
    (void)p, (void)plan, (void)workers;
    return SPDL_OK;
}

SPDL__COLD void spdl__doctor_item(spdl__doctor *d) { (void)d; }
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
        return spdl__error_set(desc->error, SPDL_E_INVALID, "cache: next is NULL");
    if (desc->num_caches < 1 || desc->num_caches > SIZE_MAX / sizeof(void *))
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "cache: num_caches is %llu, must be at least 1 and fit memory",
                               (spdl__llu)desc->num_caches);
    if (desc->return_caches_after != 0 && desc->return_caches_after < desc->num_caches)
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "cache: return_caches_after is %llu, must be at least "
                               "num_caches, %llu", (spdl__llu)desc->return_caches_after,
                               (spdl__llu)desc->num_caches);
    if (desc->stop_after != 0 && desc->stop_after < after)
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "cache: stop_after is %llu, must be at least "
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
        return spdl__error_set(desc->error, SPDL_E_NOMEM, "cache: out of memory");
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

SPDL_API spdl_result spdl_cache_next(void *cache, void **item, int64_t timeout_ns) {
    return spdl_cache_next((spdl_cache *)cache, item, timeout_ns);
}

/* ============================================================================================= */
/* >>compare-impl
   The one measuring core, of headspace, doctor and benches. Several arms (things as they are, and
   with a difference) are measured in windows, each arm once a round, in an order that is drawn
   afresh for each round. The rate of an arm is the sum of its items by the sum of its time, and the
   interval of a ratio is the jackknife's: how far it moves without each of the rounds. A window is
   as long as three of the longest gaps between items, so that no period of the program itself is
   met at one phase only. No state but the caller's, no libm. */

#define SPDL__ARMS 16
#define SPDL__ROUNDS 64
#define SPDL__ROUNDS_LEAST 5 /* fewer say nothing */
#ifndef SPDL__WINDOW_NS
#define SPDL__WINDOW_NS 400000000 /* the least length of a window */
#endif
#define SPDL__WINDOW_GAPS 3
#define SPDL__FOREIGN SPDL__OTHERS

typedef struct spdl__rounds {
    uint64_t random;
    int arms, round, position; /* arms that take turns; the round and the place in it at hand */
    uint8_t order[SPDL__ARMS]; /* of the arms in this round */
    double items[SPDL__ARMS][SPDL__ROUNDS], ns[SPDL__ARMS][SPDL__ROUNDS];
    bool dropped[SPDL__ROUNDS];
    int drops;
} spdl__rounds;

/* A bijection of 64-bit words that looks like chance (the end of splitmix64). */
SPDL__INLINE uint64_t spdl__mix(uint64_t z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

SPDL__COLD void spdl__rounds_shuffle(spdl__rounds *r) {
    int i;
    for (i = 0; i < r->arms; ++i) {
        const int j = (int)(spdl__mix(r->random++) % (uint64_t)(i + 1));
        r->order[i] = r->order[j];
        r->order[j] = (uint8_t)i;
    }
}

SPDL__COLD void spdl__rounds_start(spdl__rounds *r, uint64_t seed, int arms) {
    memset(r, 0, sizeof(*r));
    r->random = seed;
    r->arms = arms;
    spdl__rounds_shuffle(r);
}

/* The arm that is to be measured now. */
SPDL__COLD int spdl__rounds_arm(const spdl__rounds *r) { return r->order[r->position]; }

/* A window of it is over. Whether that was the last of the round: then comes rounds_next. */
SPDL__COLD bool spdl__rounds_window(spdl__rounds *r, double items, double ns) {
    const int arm = spdl__rounds_arm(r);
    r->items[arm][r->round] = items;
    r->ns[arm][r->round] = ns;
    return ++r->position == r->arms;
}

/* The round is complete; one that was dropped is kept beside the others. False: no room for
   more. */
SPDL__COLD bool spdl__rounds_next(spdl__rounds *r, bool drop) {
    r->dropped[r->round++] = drop;
    r->drops += drop;
    r->position = 0;
    spdl__rounds_shuffle(r);
    return r->round < SPDL__ROUNDS;
}

/* Whether enough rounds were not dropped: else all of them are looked at. */
SPDL__COLD bool spdl__rounds_clean(const spdl__rounds *r) {
    return r->round - r->drops >= SPDL__ROUNDS_LEAST || r->drops == 0;
}

SPDL__COLD bool spdl__rounds_counts(const spdl__rounds *r, int round) {
    return !r->dropped[round] || !spdl__rounds_clean(r);
}

/* Items a second of arms `first` to `last`, all rounds together but this one (-1: with all). */
SPDL__COLD double spdl__rounds_rate(const spdl__rounds *r, int first, int last, int but) {
    double items = 0, ns = 0;
    int arm, i;
    for (arm = first; arm <= last; ++arm)
        for (i = 0; i < r->round; ++i) {
            if (i == but || !spdl__rounds_counts(r, i)) continue;
            items += r->items[arm][i];
            ns += r->ns[arm][i];
        }
    return ns > 0 ? 1e9 * items / ns : 0;
}

SPDL__COLD double spdl__root(double square) {
    double root = square > 1 ? square : 1, next;
    if (!(square > 0)) return 0;
    while ((next = (root + square / root) / 2) < root) root = next; /* Newton, from above */
    return root;
}

/* Student's t for 95 % of `comparisons` intervals together: the normal quantile, corrected for few
   rounds (Cornish and Fisher). */
SPDL__COLD double spdl__student(int freedom, int comparisons) {
    static const double normal[] = { 1.960, 2.241, 2.394, 2.498, 2.576, 2.638, 2.690, 2.734,
                                     2.773, 2.807, 2.838, 2.865, 2.891, 2.913, 2.935, 2.955 };
    const double z = normal[comparisons < 1 ? 0 : comparisons > 16 ? 15 : comparisons - 1];
    const double n = freedom, z3 = z * z * z, z5 = z3 * z * z, z7 = z5 * z * z;
    return z + (z3 + z) / (4 * n) + (5 * z5 + 16 * z3 + 3 * z) / (96 * n * n) +
           (3 * z7 + 19 * z5 + 17 * z3 - 15 * z) / (384 * n * n * n);
}

/* Half of an interval by the jackknife, of what comes of n rounds without each of them. */
SPDL__COLD double spdl__jackknife(const double *without, int n, int comparisons) {
    double mean = 0, square = 0;
    int i;
    for (i = 0; i < n; ++i) mean += without[i] / n;
    for (i = 0; i < n; ++i) square += (without[i] - mean) * (without[i] - mean);
    return spdl__student(n - 1, comparisons) * spdl__root(square * (n - 1) / n);
}

/* How many times as fast arm `arm` is as the arms `first` to `last` together. `comparisons`: how
   many are read from these rounds, or chosen among. */
SPDL__COLD spdl_interval spdl__rounds_ratio(const spdl__rounds *r, int arm, int first, int last,
                                            int comparisons) {
    spdl_interval is = { 0, 0, __builtin_huge_val(), 0, false };
    double ratio[SPDL__ROUNDS], off;
    const double base = spdl__rounds_rate(r, first, last, -1);
    int i, n = 0;
    if (base > 0) is.value = spdl__rounds_rate(r, arm, arm, -1) / base;
    for (i = 0; i < r->round; ++i) {
        if (!spdl__rounds_counts(r, i)) continue;
        off = spdl__rounds_rate(r, first, last, i);
        ratio[n++] = off > 0 ? spdl__rounds_rate(r, arm, arm, i) / off : 0;
    }
    is.rounds = n;
    if (n < SPDL__ROUNDS_LEAST || !(is.value > 0)) return is;
    off = 1 + spdl__jackknife(ratio, n, comparisons) / is.value;
    is.low = is.value / off;
    is.high = is.value * off;
    is.known = true;
    return is;
}

SPDL__COLD uint64_t spdl__window_ns(uint64_t longest_gap) {
    return spdl__max(SPDL__WINDOW_NS, SPDL__WINDOW_GAPS * longest_gap);
}

/* Processors that other programs, of low priority too, have had since then. 0: not known, or there
   is one for everybody. */
SPDL__COLD double spdl__foreign_since(const spdl__process_stats *since) {
    spdl__process_stats now;
    double ns;
    spdl__process_read(&now);
    ns = (double)(now.time_ns - since->time_ns);
    return ns >= 1e8 ? spdl__smaller((double)spdl__grown(since->others_ns, now.others_ns) / ns,
                                     now.cores)
                     : 0;
}

/* Who waits for what: the busiest row of a pipeline, or the consumer where it waits for none. */
typedef struct spdl__waiter {
    int row; /* or -1: the consumer */
    uint64_t runnable_ns, ns; /* when the round began */
} spdl__waiter;

/* The share of its time that it waited for a processor since the round began, which begins
   anew. */
SPDL__COLD double spdl__waiter_waited(spdl__waiter *w, const spdl_stats *now) {
    const uint64_t runnable = w->row >= 0 ? now->stage[w->row].runnable_ns
                                          : now->consumer_runnable_ns;
    const uint64_t ns = w->row >= 0 ? now->stage[w->row].busy_ns : now->elapsed_ns;
    const double share = spdl__share(spdl__grown(w->runnable_ns, runnable),
                                     spdl__grown(w->ns, ns));
    w->runnable_ns = runnable;
    w->ns = ns;
    return share;
}

/* ============================================================================================= */
/* >>headspace-impl
   All of it runs in the caller's thread, on the measuring core: one arm is the loop as it is, the
   other its steps on kept items. What the report says follows from the rounds alone. */

#define SPDL__HEADSPACE_SECONDS 30
#define SPDL__HEADSPACE_STEPS 8 /* in a window, at least */
#define SPDL__HEADSPACE_KEPT 32

/* The arms; the third is the first without the time inside of next. */
enum { SPDL__LIVE, SPDL__STILL, SPDL__STEPS };

/* A stretch of the loop. */
typedef struct spdl__window {
    uint64_t steps, ns;
    uint64_t wait_ns;   /* inside of next */
    uint64_t queued_ns; /* the caller was ready to run */
    uint64_t gap_ns;    /* the longest from item to item */
} spdl__window;

typedef struct spdl__headspace { /* written by the caller of spdl_headspace */
    const spdl_headspace_desc *desc;
    spdl_headspace_report *report;
    void **item; /* those that are kept */
    int kept, position;
    uint64_t window_ns;
    uint64_t paused_ns;   /* since the source was asked */
    spdl__window usual;   /* as it is, before the first pause */
    spdl_result result;   /* not SPDL_OK: the source has ended or failed */
    spdl__waiter waiter;
    spdl_stats stats;     /* of the source, if it is a pipeline */
    spdl__rounds rounds;
} spdl__headspace;

SPDL__COLD spdl_result spdl__headspace_check(const spdl_headspace_desc *desc) {
    if (desc->next == NULL || desc->step == NULL)
        return spdl__error_set(desc->error, SPDL_E_INVALID, "headspace: %s is NULL",
                               desc->next == NULL ? "next" : "step");
    if (desc->kept < 0)
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "headspace: kept is %d, must be at least 1", desc->kept);
    if (!(desc->seconds <= 86400 && (desc->seconds >= 0.1 || desc->seconds == 0)))
        return spdl__error_set(desc->error, SPDL_E_INVALID, "headspace: seconds is %g, "
                                                            "must be 0.1 to 86400", desc->seconds);
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
    spdl__window w = { 0, 0, 0, 0, 0 };
    uint64_t queued[2] = { 0, 0 };
    spdl__os_thread_times(NULL, NULL, &queued[0]);
    for (; w.ns < ns || w.steps < steps; ++w.steps) {
        void *item = live ? NULL : h->item[h->position];
        uint64_t now;
        if (live) {
            if (!spdl__headspace_take(h, &item)) break;
            w.wait_ns += spdl_time_ns() - start - w.ns;
        } else {
            h->position = (h->position + 1) % h->kept;
        }
        h->desc->step(h->desc->ctx, item);
        if (live) spdl__headspace_free(h, item);
        now = spdl_time_ns() - start;
        w.gap_ns = spdl__max(w.gap_ns, now - w.ns);
        w.ns = now;
    }
    spdl__os_thread_times(NULL, NULL, &queued[1]);
    w.queued_ns = queued[0] == SPDL__NEVER ? 0 : queued[1] - queued[0];
    return w;
}

/* After a pause: drops what was loaded in it, so that the loop does not live on its buffers, until
   some calls of next in a row took as long as usual, or as many items as such a time takes. */
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

/* The share of the round that a processor was waited for: by the busiest row of a pipeline, or by
   the caller. Of another source that is waited for nobody knows: all of it. */
SPDL__COLD double spdl__headspace_waited(spdl__headspace *h, const spdl__window *live) {
    const bool pipeline = h->desc->next == spdl_pipeline_next;
    const double queued = spdl__share(live->queued_ns, live->ns);
    double waited = spdl__share(live->wait_ns, live->ns) < SPDL__FED ? 0 : 1;
    if (pipeline) {
        spdl_pipeline_stats((const spdl_pipeline *)h->desc->source, &h->stats);
        waited = spdl__waiter_waited(&h->waiter, &h->stats);
    }
    return spdl__larger(queued, waited);
}

/* One window of each kind, once things have settled. Half a round is none. */
SPDL__COLD void spdl__headspace_round(spdl__headspace *h) {
    spdl__process_stats before;
    spdl__rounds *r = &h->rounds;
    spdl__window w[2];
    double others, waited;
    bool drop;
    spdl__process_read(&before);
    do {
        const int arm = spdl__rounds_arm(r);
        const bool live = arm == SPDL__LIVE;
        uint64_t settling;
        if (live && h->paused_ns > 0) spdl__headspace_drain(h);
        if (h->result != SPDL_OK) return;
        settling = spdl__headspace_steps(h, live, h->window_ns / 5, 1).ns;
        if (h->result != SPDL_OK) return;
        w[arm] = spdl__headspace_steps(h, live, h->window_ns, SPDL__HEADSPACE_STEPS);
        if (h->result != SPDL_OK) return;
        h->paused_ns = live ? 0 : h->paused_ns + settling + w[arm].ns;
    } while (!spdl__rounds_window(r, (double)w[spdl__rounds_arm(r)].steps,
                                  (double)w[spdl__rounds_arm(r)].ns));
    r->items[SPDL__STEPS][r->round] = (double)w[SPDL__LIVE].steps;
    r->ns[SPDL__STEPS][r->round] = (double)(w[SPDL__LIVE].ns - w[SPDL__LIVE].wait_ns);
    others = spdl__foreign_since(&before);
    waited = spdl__headspace_waited(h, &w[SPDL__LIVE]);
    drop = others > SPDL__FOREIGN && waited >= SPDL__QUEUED;
    h->report->others = spdl__larger(h->report->others, others);
    spdl__logf(&h->desc->logger, SPDL_LOG_INFO,
               "headspace: round %d: %.4g steps/s, %.4g on kept items, others used %.2f "
               "processors%s", r->round + 1,
               1e9 * spdl__share(w[SPDL__LIVE].steps, w[SPDL__LIVE].ns),
               1e9 * spdl__share(w[SPDL__STILL].steps, w[SPDL__STILL].ns), others,
               drop ? ": once more" : "");
    (void)spdl__rounds_next(r, drop);
}

/* Takes the items to keep, for up to a fifth of the time; then the loop as it is. As no step runs
   meanwhile, what lay in buffers at the start is gone. Then rounds until the time is over; those
   that are dropped are made again, for half of the time more. */
SPDL__COLD void spdl__headspace_measure(spdl__headspace *h, int most, uint64_t budget) {
    const uint64_t start = spdl_time_ns();
    uint64_t setup, length, now, until;
    while (h->kept < most && (h->kept == 0 || spdl_time_ns() < start + budget / 5)) {
        if (!spdl__headspace_take(h, &h->item[h->kept])) return;
        h->kept++;
    }
    (void)spdl__headspace_steps(h, true, SPDL__WINDOW_NS / 2, 1);
    if (h->result != SPDL_OK) return;
    h->usual = spdl__headspace_steps(h, true, SPDL__WINDOW_NS, SPDL__HEADSPACE_STEPS);
    if (h->result != SPDL_OK) return;
    h->window_ns = spdl__window_ns(h->usual.gap_ns);
    h->window_ns = spdl__max(h->window_ns, budget / (3 * SPDL__ROUNDS));
    h->waiter.row = -1;
    if (h->desc->next == spdl_pipeline_next) {
        spdl_pipeline_stats((const spdl_pipeline *)h->desc->source, &h->stats);
        h->waiter.row = spdl__stats_busiest(&h->stats);
        (void)spdl__waiter_waited(&h->waiter, &h->stats);
    }
    spdl__rounds_start(&h->rounds, start, 2);
    now = spdl_time_ns();
    setup = now - start;
    length = spdl__max(h->usual.ns, h->window_ns) * 5 / 2; /* of a round */
    until = start + budget;
    while (h->result == SPDL_OK && (h->rounds.round < SPDL__ROUNDS) && now + length <= until) {
        const int drops = h->rounds.drops;
        spdl__headspace_round(h);
        now = spdl_time_ns();
        length = (now - start - setup) / spdl__max((uint64_t)h->rounds.round, 1);
        if (h->rounds.drops > drops) until = spdl__min(until + length, start + budget * 3 / 2);
    }
    if (h->result == SPDL_OK)
        h->report->more_seconds = 1e-9 * (double)setup +
                                  1e-9 * (SPDL__ROUNDS_LEAST + 1) * (double)length;
}

/* The share of a step that loading costs, for so many times as many steps without it. */
SPDL__COLD double spdl__headspace_cost(double gain) { return gain > 1 ? 1 - 1 / gain : 0; }

/* ", 2.1 h of this 12 h run": the share of the whole run, if its length is known. */
SPDL__COLD void spdl__headspace_run(spdl__text *text, const spdl_headspace_report *report,
                                    uint64_t run_steps, const char *before, double share) {
    const double run = (double)run_steps / report->today; /* seconds */
    const double unit = run >= 3600 ? 3600 : run >= 60 ? 60 : 1, length = run / unit;
    const char *name = run >= 3600 ? "h" : run >= 60 ? "min" : "s";
    if (run_steps == 0 || !(run < 1e12)) return;
    if (run >= 60 && share * run < 60)
        spdl__text_add(text, ", under 1 minute of this %.*f %s run", length < 9.95, length, name);
    else
        spdl__text_add(text, ", %s%.*f %s of this %.*f %s run", before, share * length < 9.95,
                       share * length, name, length < 9.95, length, name);
}

SPDL__COLD void spdl__headspace_costs(spdl__text *text, const spdl_headspace_report *report,
                                      uint64_t run_steps) {
    const double cost = spdl__headspace_cost(report->gain.value);
    const double low = spdl__headspace_cost(report->gain.low);
    const double high = spdl__headspace_cost(report->gain.high);
    const double waiting = spdl__smaller(report->waiting, cost);
    const bool leave = high < 1 - 1 / SPDL__GAIN;
    const int digits = high < 0.0995;
    if (report->gain.low <= 1) {
        spdl__text_add(text, "No difference: loading costs %s%.*f %% of a step",
                       high > 0 ? "at most " : "", high > 0 && digits, 100 * high);
        if (high > 0) spdl__headspace_run(text, report, run_steps, "", high);
        spdl__text_add(text, leave ? ": leave it." : "; a longer measurement knows it better.");
        return;
    }
    spdl__text_add(text, "Loading costs %.*f %% of a step (%.*f to %.*f)", digits, 100 * cost,
                   digits, 100 * low, digits, 100 * high);
    spdl__headspace_run(text, report, run_steps, leave ? "at most " : "", leave ? high : cost);
    spdl__text_add(text, leave ? ": leave it." : ": slower steps %.1f, waiting %.1f.",
                   100 * (cost - waiting), 100 * waiting);
}

/* All of the report that follows from the rounds. */
SPDL__COLD void spdl__headspace_judge(spdl_headspace_report *report, const spdl__rounds *r,
                                      uint64_t run_steps) {
    spdl__text text = spdl__text_start(report->text, sizeof(report->text));
    const double steps = spdl__rounds_rate(r, SPDL__STEPS, SPDL__STEPS, -1);
    report->rounds = r->round;
    report->dropped = r->drops;
    report->today = spdl__rounds_rate(r, SPDL__LIVE, SPDL__LIVE, -1);
    report->ceiling = spdl__rounds_rate(r, SPDL__STILL, SPDL__STILL, -1);
    report->waiting = steps > 0 ? spdl__larger(1 - report->today / steps, 0) : 0;
    report->gain = spdl__rounds_ratio(r, SPDL__STILL, SPDL__LIVE, SPDL__LIVE, 1);
    report->harm = spdl__rounds_ratio(r, SPDL__STILL, SPDL__STEPS, SPDL__STEPS, 1);
    report->kind = !report->gain.known        ? SPDL_HEADSPACE_FEW
                   : !spdl__rounds_clean(r)   ? SPDL_HEADSPACE_FOREIGN
                   : report->gain.low > 1     ? SPDL_HEADSPACE_GAIN
                                              : SPDL_HEADSPACE_NONE;
    if (report->kind != SPDL_HEADSPACE_FEW) report->more_seconds = 0;
    if (report->kind == SPDL_HEADSPACE_FOREIGN)
        spdl__text_add(&text, "Beside other programs, which used up to %.1f processors in %d of %d "
                              "rounds: ", report->others, r->drops, r->round);
    if (report->kind == SPDL_HEADSPACE_FEW) {
        spdl__text_add(&text, "Too few rounds to say: %d, and %d are needed", r->round,
                       SPDL__ROUNDS_LEAST);
        if (report->more_seconds > 0)
            spdl__text_add(&text, ": measure for %.0f seconds", report->more_seconds + 0.5);
        spdl__text_add(&text, ".");
    } else {
        spdl__headspace_costs(&text, report, run_steps);
    }
    if (report->ended)
        spdl__text_add(&text, " The source ended after %llu items.", (spdl__llu)report->items);
}

SPDL_API spdl_result spdl_headspace(const spdl_headspace_desc *desc,
                                    spdl_headspace_report *report) {
    spdl__headspace *h;
    spdl_result result;
    size_t bytes;
    int i, most;
    if (desc == NULL || report == NULL) return SPDL_E_INVALID;
    memset(report, 0, sizeof(*report));
    spdl__error_clear(desc->error);
    result = spdl__headspace_check(desc);
    if (result != SPDL_OK) return result;
    most = desc->kept > 0 ? desc->kept : SPDL__HEADSPACE_KEPT;
    bytes = sizeof(*h) + (size_t)most * sizeof(*h->item);
    h = (spdl__headspace *)spdl__alloc_zeroed(&desc->allocator, 1, bytes, sizeof(void *));
    if (h == NULL)
        return spdl__error_set(desc->error, SPDL_E_NOMEM, "headspace: out of memory");
    h->desc = desc;
    h->report = report;
    h->item = (void **)(h + 1);
    spdl__headspace_measure(h, most, (uint64_t)(1e9 * (desc->seconds > 0
                                                           ? desc->seconds
                                                           : SPDL__HEADSPACE_SECONDS)));
    for (i = 0; i < h->kept; ++i) spdl__headspace_free(h, h->item[i]);
    result = h->result;
    report->ended = result == SPDL_END;
    spdl__headspace_judge(report, &h->rounds, desc->run_steps);
    spdl__free(&desc->allocator, h, bytes);
    if (result == SPDL_OK || report->ended) return SPDL_OK;
    return spdl__error_set(desc->error, result,
                           "headspace: next returned '%s' after %llu items",
                           spdl_result_text(result), (spdl__llu)report->items);
}

/* ============================================================================================= */
/* >>probe-impl
   The doctor's hand in the rows. In a pipeline with a doctor, and in no other, a row that calls a
   function calls probe_call in its place: it may take longer, and its result be kept or replaced.

   Replay. While the flow is cut after row k, calls of the source make tokens instead of items. A
   token passes row after row without a call, a row of batches one for each `size` of them, until
   row k puts a copy of a kept item in its place. So real items before and after the cut lose
   nothing and keep their numbers, and when the cut ends what is still a token goes on to its row. A
   token has an origin of its own: nobody frees it. Kept items are a random sample of those seen in
   the time of observing; nobody looks at them before that is over, and nobody changes them after.

   Threads: the consumer sets what is different; any worker calls. */

#ifndef SPDL_NO_REPORT

#define SPDL__KEPT 32         /* items of a row */
#define SPDL__KEPT_BYTES ((size_t)256 << 20) /* of them, where their size is known */
#define SPDL__SLEEP_NS 100000 /* a thread that is to sleep a while does so in pieces of this */

/* One row. */
typedef struct spdl__probe {
    const spdl_function *fn; /* the user's; NULL: the row calls none */
    spdl_function call;      /* what the row has in its place */
    uint32_t replays;        /* its results can be replayed */
    size_t bytes;            /* kept are copies of so many bytes; 0: copy_item's */
    uint64_t most;           /* are kept: up to SPDL__KEPT, as far as their size is known */
    uint64_t seen, turn;
    uint32_t lock;
    int count;               /* of `kept`; by the consumer when that is complete */
    void *kept[SPDL__KEPT];
    uint64_t item_ns;        /* of a call, when nothing was different */
    uint64_t delay_ns;       /* each call takes longer by this: computing, or asleep */
    uint32_t asleep;
    uint64_t worked;         /* what the computing comes to */
} spdl__probe;

/* What a thread still has to sleep, of a row. */
typedef struct spdl__debt {
    uint64_t arm;
    int64_t ns;
} spdl__debt;

struct spdl__hand {
    spdl_pipeline *p;
    spdl__probe probe[SPDL_MAX_STAGES];
    char token[SPDL_MAX_STAGES]; /* their addresses are the tokens; by the row of the cut */
    spdl__debt *debt;        /* [worker * rows + row] */
    uint32_t keeps;          /* results are kept */
    uint32_t cut;            /* 1 + the row after which the flow is cut; 0: none */
    uint64_t cut_until;      /* for so long at most: an item may not come before the source ends */
    uint64_t arm;            /* counts what was set */
    size_t bytes;            /* of this and `debt` */
    double rounds_ns;        /* of counted work, in a nanosecond */
    spdl__os_event never;    /* nobody wakes it */
};

/* Counted work: a clock would go on while others have the processor. */
SPDL__NOINLINE uint64_t spdl__spin_work(uint64_t rounds) {
    uint64_t x = rounds;
    while (rounds-- > 0) x = (x ^ x >> 29) * 6364136223846793005u + 1442695040888963407u;
    return x;
}

/* Takes `ns`, now or in the calls to come: sleeping takes its own time, which is counted. */
SPDL__COLD void spdl__hand_delay(spdl__hand *hand, spdl__debt *debt, spdl__probe *probe,
                                 uint64_t ns) {
    const uint64_t arm = spdl__load_relaxed(&hand->arm);
    uint64_t begun;
    if (!spdl__load_relaxed32(&probe->asleep)) {
        const uint64_t worked = spdl__spin_work((uint64_t)((double)ns * hand->rounds_ns));
        spdl__store_relaxed(&probe->worked, worked);
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

SPDL__COLD void spdl__kept_free(spdl_pipeline *p, const spdl__probe *probe, void *kept) {
    if (kept == NULL) return;
    if (probe->bytes > 0)
        spdl__free(&p->allocator, kept, probe->bytes);
    else
        spdl__item_free(p, kept, spdl__origin(0, (unsigned)(probe - p->hand->probe)));
}

/* The place of one more result in the sample, or SPDL__KEPT: it is not kept. */
SPDL__COLD uint64_t spdl__kept_place(spdl__probe *probe) {
    const uint64_t seen = spdl__add(&probe->seen, 1);
    const uint64_t place = seen < probe->most ? seen : spdl__mix(seen) % (seen + 1);
    return place < probe->most ? place : SPDL__KEPT;
}

/* After a call that was made as always: a copy of its result is kept. */
SPDL__COLD void spdl__kept_look(spdl_task *task, spdl__hand *hand, const void *out) {
    spdl__probe *probe = &hand->probe[task->node->index];
    void *copy = NULL, *old = NULL;
    uint64_t place;
    if (task->call_error || out == NULL || !spdl__load_relaxed32(&probe->replays)) return;
    place = spdl__kept_place(probe);
    if (place == SPDL__KEPT) return;
    if (probe->bytes == 0)
        copy = task->node->row.copy_item(out);
    else if (out == task->buffer) /* else who knows how large it is */
        copy = spdl__alloc(&hand->p->allocator, probe->bytes, SPDL_CACHE_LINE);
    if (copy == NULL) return;
    if (probe->bytes > 0) memcpy(copy, out, probe->bytes);
    spdl__lock(&probe->lock, &hand->p->locks);
    old = copy;
    if (spdl__load32(&hand->keeps) != 0) {
        old = probe->kept[place];
        probe->kept[place] = copy;
    }
    spdl__unlock(&probe->lock, &hand->p->locks);
    spdl__kept_free(hand->p, probe, old); /* user code */
}

/* The sample is complete: nothing is kept any more. */
SPDL__COLD void spdl__kept_close(spdl__hand *hand) {
    int i, k;
    spdl__store32(&hand->keeps, 0);
    for (i = 0; i < hand->p->count; ++i) {
        spdl__probe *probe = &hand->probe[i];
        spdl__lock(&probe->lock, &hand->p->locks); /* a thread that has seen `keeps` has stored */
        for (k = 0; k < SPDL__KEPT; ++k)
            if (probe->kept[k] != NULL) probe->kept[probe->count++] = probe->kept[k];
        for (k = probe->count; k < SPDL__KEPT; ++k) probe->kept[k] = NULL;
        if (probe->count < 2) spdl__store_relaxed32(&probe->replays, 0);
        spdl__unlock(&probe->lock, &hand->p->locks);
    }
}

/* A token becomes a copy of what was kept; without memory for it nothing, as it was nothing. */
SPDL__COLD spdl_result spdl__probe_copy(spdl_task *task, spdl__probe *probe, void **out) {
    const void *kept = probe->kept[spdl__add(&probe->turn, 1) % (uint64_t)probe->count];
    *out = probe->bytes == 0 ? task->node->row.copy_item(kept) : spdl_buffer(task);
    if (probe->bytes > 0 && *out != NULL) memcpy(*out, kept, probe->bytes);
    return *out != NULL ? SPDL_OK : SPDL_SKIP;
}

/* A token goes on, or from the source is made. */
SPDL__COLD spdl_result spdl__probe_pass(spdl_task *task, void *token, void **out) {
    if (task->node->in == NULL) task->buffer = token; /* task_origin knows it by that */
    *out = token;
    return SPDL_OK;
}

/* What rows call instead of their function. */
SPDL__PRIVATE spdl_result spdl__probe_call(spdl_task *task, void *in, void **out) {
    spdl_pipeline *p = task->pipeline;
    spdl__node *node = task->node;
    spdl__hand *hand = p->hand;
    spdl__probe *probe = &hand->probe[node->index];
    const bool source = node->in == NULL;
    const uint64_t delay_ns = spdl__load_relaxed(&probe->delay_ns);
    spdl_result result;
    /* the row after which the flow is cut, for this call; -1: it has an item, or makes one. The
       load pairs with the store: the kept are complete */
    int cut = source ? (int)spdl__load32(&hand->cut) - 1 : spdl__token_row(p, in);
    if (source && cut >= 0 && spdl_time_ns() > spdl__load_relaxed(&hand->cut_until)) cut = -1;
    if (SPDL__UNLIKELY(cut >= 0)) {
        /* a call is not as quick as this */
        spdl__store_relaxed(&node->item_ns, spdl__load_relaxed(&probe->item_ns));
        result = cut == node->index
                     ? spdl__probe_copy(task, probe, out)
                     : spdl__probe_pass(task, source ? &hand->token[cut] : in, out);
        if (source && result == SPDL_OK) /* it has no number */
            spdl__store_relaxed(&node->made, node->made - 1);
        return result;
    }
    if (delay_ns > 0)
        spdl__hand_delay(hand, &hand->debt[task->worker * p->count + node->index], probe, delay_ns);
    result = probe->fn->call(task, in, out);
    if (SPDL__UNLIKELY(spdl__load_relaxed32(&hand->keeps)) && result == SPDL_OK)
        spdl__kept_look(task, hand, *out);
    return result;
}

/* --- a pipeline gets it, and loses it --- */

/* Whether the results of a row can be replayed. Tokens are items to a branch or a merge: none
   there. */
SPDL__COLD void spdl__probe_replay(const spdl_pipeline *p, const spdl__node *node,
                                   spdl__probe *probe) {
    const spdl_stage *row = &node->row, *next = node == p->last ? NULL : &node[1].row;
    const size_t bytes = node->places ? next->item_bytes : row->item_bytes;
    int i;
    for (i = 0; i < p->count; ++i)
        if ((!spdl__row_calls(&p->node[i].row) && p->node[i].row.kind != SPDL_KIND_BATCH) ||
            p->node[i].row.kind == SPDL_KIND_BRANCH)
            return;
    probe->most = spdl__max(2, spdl__min(SPDL__KEPT, SPDL__KEPT_BYTES / spdl__max(bytes, 1)));
    probe->replays = spdl__row_calls(row) && !row->again &&
                     (row->copy_item != NULL || bytes > 0);
    if (row->copy_item == NULL) probe->bytes = bytes;
}

SPDL__COLD spdl_result spdl__hand_open(spdl_pipeline *p, bool replay) {
    const size_t debts = (size_t)(p->workers * p->count);
    const size_t bytes = sizeof(spdl__hand) + debts * sizeof(spdl__debt);
    spdl__hand *hand =
        (spdl__hand *)spdl__alloc_zeroed(&p->allocator, 1, bytes, SPDL_CACHE_LINE);
    uint64_t best = SPDL__NEVER, begun;
    int i;
    if (hand == NULL || !spdl__os_event_init(&hand->never)) {
        spdl__free(&p->allocator, hand, bytes);
        return SPDL_E_NOMEM;
    }
    hand->p = p;
    hand->bytes = bytes;
    hand->debt = (spdl__debt *)(hand + 1);
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
    for (i = 0; i < 16; ++i) { /* the best of some tries */
        begun = spdl_time_ns();
        hand->probe[0].worked += spdl__spin_work(20000);
        best = spdl__min(best, spdl_time_ns() - begun);
    }
    hand->rounds_ns = 20000 / (double)spdl__max(best, 1);
    return SPDL_OK;
}

/* No call of a row is to come: what was kept is freed. */
SPDL__COLD void spdl__hand_empty(spdl_pipeline *p) {
    int i, k;
    for (i = 0; p->hand != NULL && i < p->count; ++i)
        for (k = 0; k < SPDL__KEPT; ++k) {
            spdl__kept_free(p, &p->hand->probe[i], p->hand->probe[i].kept[k]);
            p->hand->probe[i].kept[k] = NULL;
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
    if (p->hand == NULL) return;
    spdl__hand_empty(p);
    spdl__os_event_fini(&p->hand->never);
    spdl__free(&p->allocator, p->hand, p->hand->bytes);
    p->hand = NULL;
}

/* ============================================================================================= */
/* >>doctor-impl
   The experiments. All of it runs on the thread of the consumer, in next: an item ends a window or
   does not. What is different in a window is set before it, some items and some time are let pass,
   and then the time is taken from one item to another. Three phases: it observes; it measures the
   ladder, where rows are replayed or made slower; and it tries what the verdict would have one
   write. What it finds is the finding of the statistics while it observed, as the experiments leave
   it: there is no other model, and no other sentence. */

#define SPDL__DOCTOR_SECONDS 30
#define SPDL__WINDOW_ITEMS 8
#define SPDL__SETTLE_NS 1e9  /* the most that is let pass for what was ready to be gone */
#define SPDL__SLOWER 0.2     /* calls are made longer by this share */
#define SPDL__BUSY_ROW 0.4   /* a row that is less busy is not looked at */
#define SPDL__HELD_ROW 0.9   /* one that is busier follows a delay, unless its calls wait in turn */
#define SPDL__FOLLOWS 0.97   /* throughput under this share has followed */
#define SPDL__HIDDEN (1.03 / (1 + SPDL__SLOWER)) /* over this it has not followed all the way */

typedef enum spdl__arm_kind {
    SPDL__ARM_BASE,
    SPDL__ARM_KEPT,    /* the consumer works on what it has, the pipeline is not asked */
    SPDL__ARM_CUT,     /* after `row` */
    SPDL__ARM_COMPUTE, /* calls of `row` take `value` ns longer */
    SPDL__ARM_SLEEP,
    SPDL__ARM_SETTINGS /* of the finding, all at once */
} spdl__arm_kind;

typedef struct spdl__arm {
    spdl__arm_kind kind;
    int row;
    uint64_t value;
    spdl_interval *result; /* in the report, or NULL */
} spdl__arm;

typedef enum spdl__doctor_phase {
    SPDL__DOCTOR_WARM,
    SPDL__DOCTOR_OBSERVE,
    SPDL__DOCTOR_LADDER,
    SPDL__DOCTOR_TRIAL,
    SPDL__DOCTOR_DONE
} spdl__doctor_phase;

/* A worker that create has made for the doctor: 1 while a job keeps it away, 2 until it has left
   that job, 0 without. */
typedef struct spdl__spare {
    struct spdl__doctor *d;
    uint32_t held;
} spdl__spare;

struct spdl__doctor {
    spdl_pipeline *p;
    spdl__doctor_plan plan;
    spdl__doctor_phase phase;
    uint64_t begun_ns;           /* the first item */
    uint64_t phase_ns, most_ns;  /* when the phase is to end, and if rounds are made again */
    uint64_t items, last_ns, gap_ns; /* since the first; when it came; the longest between two */
    spdl_stats now, seen;        /* the latest; what was observed */
    spdl__since since;
    spdl__found found;
    /* windows */
    spdl__rounds rounds;
    spdl__arm arm[SPDL__ARMS];
    spdl__arm at;                /* what is different now */
    bool counting, ended;        /* the pipeline has, before the doctor was done */
    uint64_t window_ns, settle_items;
    uint64_t since_ns, since_items; /* when that was set, or counting began, and d->items then */
    spdl__process_stats clocks;   /* when the round began */
    spdl__waiter waiter;
    double others;               /* sum over all rounds */
    /* settings as they are */
    uint32_t limit[SPDL_MAX_STAGES];
    int open;                    /* spare workers that work */
    spdl__spare spare[SPDL__MAX_WORKERS];
    spdl__os_event hold;
    spdl__item kept[SPDL__KEPT]; /* of doctor_run, for SPDL__ARM_KEPT */
    int kept_count;
    spdl__doctor_report report;
};


SPDL__COLD void spdl__doctor_say(const spdl__doctor *d, const char *format, ...) SPDL__PRINTF(2, 3);
SPDL__COLD void spdl__doctor_say(const spdl__doctor *d, const char *format, ...) {
    char line[256] = "doctor: ";
    const size_t length = strlen(line);
    va_list args;
    if (d->plan.desc.quiet) return;
    va_start(args, format);
    (void)vsnprintf(line + length, sizeof(line) - length, format, args);
    va_end(args);
    (void)spdl__os_stderr_write(line, strlen(line), SPDL__STDERR_NS);
}

/* --- what is different --- */

/* The job that keeps a worker away. */
SPDL__COLD void spdl__doctor_hold(void *arg, int worker, void *local) {
    spdl__spare *spare = (spdl__spare *)arg;
    (void)worker, (void)local;
    for (;;) {
        const uint32_t word = spdl__load32(&spare->d->hold.word);
        uint32_t leaves = 2;
        if (spdl__cas32(&spare->held, &leaves, 0)) return;
        (void)spdl__os_event_sleep(&spare->d->hold, word, SPDL__NEVER);
    }
}

/* So many of the spare workers work, the others are kept away. */
SPDL__COLD void spdl__doctor_open_workers(spdl__doctor *d, int open) {
    int i;
    for (i = 0; i < d->p->spare; ++i) {
        uint32_t held = i < open ? 1 : 2; /* 2: it has not left yet, and stays */
        if (spdl__cas32(&d->spare[i].held, &held, i < open ? 2 : 1) || i < open) continue;
        held = 0;
        if (spdl__cas32(&d->spare[i].held, &held, 1) &&
            spdl_pool_submit(d->p->pool, spdl__doctor_hold, &d->spare[i], SPDL_FOREVER) !=
                SPDL_OK)
            spdl__store32(&d->spare[i].held, 0);
    }
    spdl__os_event_wake(&d->hold, SPDL__ALL);
}

/* The calls that row i may have in this window. */
SPDL__COLD uint32_t spdl__doctor_calls(const spdl__doctor *d, const spdl__arm *arm, int i) {
    const spdl_finding *is = &d->found.is;
    if (arm->kind == SPDL__ARM_SETTINGS && i == is->stage && is->concurrency > 0)
        return (uint32_t)is->concurrency;
    if (arm->kind == SPDL__ARM_SETTINGS && i == is->tie && is->tie_concurrency > 0)
        return (uint32_t)is->tie_concurrency;
    return d->limit[i];
}

/* What is different from here on; all else as it is. */
SPDL__COLD void spdl__doctor_set(spdl__doctor *d, const spdl__arm *arm) {
    spdl__hand *hand = d->p->hand;
    const bool tries = arm->kind == SPDL__ARM_SETTINGS && d->found.is.workers > 0;
    int i;
    spdl__add(&hand->arm, 1);
    spdl__store_relaxed(&hand->cut_until, spdl_time_ns() + 20 * d->window_ns);
    spdl__store32(&hand->cut, arm->kind == SPDL__ARM_CUT ? (uint32_t)arm->row + 1 : 0);
    for (i = 0; i < d->p->count; ++i) {
        spdl__node *node = &d->p->node[i];
        const spdl__arm_kind kind = arm->row == i ? arm->kind : SPDL__ARM_BASE;
        const bool slower = kind == SPDL__ARM_COMPUTE || kind == SPDL__ARM_SLEEP;
        const uint32_t calls = spdl__doctor_calls(d, arm, i);
        spdl__store_relaxed32(&hand->probe[i].asleep, kind == SPDL__ARM_SLEEP);
        spdl__store_relaxed(&hand->probe[i].delay_ns, slower ? arm->value : 0);
        if (spdl__load_relaxed32(&node->limit) == calls) continue;
        spdl__store32(&node->limit, calls);
        spdl__wake_changed(d->p, node);
    }
    spdl__doctor_open_workers(d, tries ? d->found.is.workers - d->report.workers : d->open);
    d->at = *arm;
    d->counting = false;
    d->since_ns = spdl_time_ns();
    d->since_items = d->items;
}

/* --- windows --- */

/* One more kind of window in this phase. */
SPDL__COLD void spdl__doctor_arm(spdl__doctor *d, spdl__arm_kind kind, int row, uint64_t value,
                                 spdl_interval *result) {
    const spdl__arm arm = { kind, row, value, result };
    if (d->rounds.arms < SPDL__ARMS) d->arm[d->rounds.arms++] = arm;
}

/* All kinds of windows of this phase are there; it may last `seconds`. */
SPDL__COLD void spdl__doctor_phase_begins(spdl__doctor *d, spdl__doctor_phase phase,
                                          double seconds) {
    d->phase = phase;
    d->phase_ns = spdl_time_ns() + (uint64_t)(1e9 * seconds);
    d->most_ns = d->phase_ns + (uint64_t)(1e9 * seconds);
    spdl__rounds_start(&d->rounds, d->phase_ns, d->rounds.arms);
    spdl_pipeline_stats(d->p, &d->now);
    (void)spdl__waiter_waited(&d->waiter, &d->now);
    spdl__process_read(&d->clocks);
    spdl__doctor_set(d, &d->arm[spdl__rounds_arm(&d->rounds)]);
}

/* A round is complete. It counts, unless who limits has waited for processors that others had: then
   it is made again. Whether the phase goes on. */
SPDL__COLD bool spdl__doctor_round_ends(spdl__doctor *d, uint64_t now) {
    const double others = spdl__foreign_since(&d->clocks);
    const uint64_t took = now - d->clocks.time_ns;
    bool drop, room;
    spdl_pipeline_stats(d->p, &d->now);
    drop = spdl__waiter_waited(&d->waiter, &d->now) >= SPDL__QUEUED && others > SPDL__FOREIGN;
    d->others += others;
    ++d->report.rounds;
    d->report.dropped += drop;
    d->report.others_used = d->others / d->report.rounds;
    if (drop) d->phase_ns = spdl__min(d->phase_ns + took, d->most_ns);
    room = spdl__rounds_next(&d->rounds, drop);
    spdl__process_read(&d->clocks);
    return room && now + took / 2 < d->phase_ns;
}

/* An item has come: whether the phase is over. */
SPDL__COLD bool spdl__doctor_window(spdl__doctor *d, uint64_t now) {
    const double rate = spdl__larger(d->report.today, 1e-3);
    const uint64_t most = spdl__max(3 * d->window_ns, (uint64_t)spdl__smaller(
        SPDL__SETTLE_NS, 1.5e9 * (double)d->settle_items / rate));
    const uint64_t items = d->items - d->since_items, ns = now - d->since_ns;
    if (!d->counting) { /* what was ready is taken first, as quick as the consumer is */
        if (ns < d->window_ns / 5 || (items < d->settle_items && ns < most)) return false;
        d->counting = true;
        d->since_ns = now;
        d->since_items = d->items;
        return false;
    }
    if (ns < d->window_ns || (items < SPDL__WINDOW_ITEMS && ns < 4 * d->window_ns)) return false;
    if (spdl__rounds_window(&d->rounds, (double)items, (double)ns) &&
        !spdl__doctor_round_ends(d, now))
        return true;
    spdl__doctor_set(d, &d->arm[spdl__rounds_arm(&d->rounds)]);
    return false;
}

/* What the windows of this phase say. The first two arms are as it is. */
SPDL__COLD void spdl__doctor_results(spdl__doctor *d) {
    spdl__doctor_report *r = &d->report;
    const int arms = d->rounds.arms;
    int i;
    if (d->rounds.round == 0) return;
    r->today = spdl__rounds_rate(&d->rounds, 0, 1, -1);
    r->same = spdl__rounds_ratio(&d->rounds, 1, 0, 0, 1);
    for (i = 2; i < arms; ++i)
        *d->arm[i].result = spdl__rounds_ratio(&d->rounds, i, 0, 1, arms - 2);
}

/* --- the phases --- */

/* Of what was observed. */
SPDL__COLD void spdl__doctor_row_look(spdl__doctor *d, int i) {
    const spdl_stage_stats *seen = &d->seen.stage[i];
    const double timed = (double)spdl__grown(seen->failures, seen->tasks);
    spdl__doctor_row *to = &d->report.row[i];
    memcpy(to->name, seen->name, sizeof(to->name));
    to->kind = seen->kind;
    to->concurrency = (int)d->limit[i];
    if (!spdl__row_calls(&d->p->node[i].row) || timed <= 0 || seen->busy_ns == 0) return;
    to->mean_ns = (double)seen->busy_ns / timed;
    to->cpu_ns = (double)seen->cpu_ns / timed;
    to->runnable_ns = (double)seen->runnable_ns / timed;
    to->blocked_ns = (double)seen->blocked_ns / timed;
    to->load = spdl__stage_load(&d->seen, i);
    spdl__store_relaxed(&d->p->hand->probe[i].item_ns, (uint64_t)to->mean_ns);
}

/* Observing ends: what limits, and who is watched for rounds that do not count. */
SPDL__COLD void spdl__doctor_look(spdl__doctor *d) {
    spdl__doctor_report *r = &d->report;
    double visits = 1;
    int i;
    spdl_pipeline_stats(d->p, &d->now);
    spdl__since_take(d->p, &d->since, &d->now, &d->seen);
    d->found = spdl__find(&d->seen);
    r->cores = d->seen.cores_allowed;
    r->cores_used = d->found.used;
    r->others_used = d->found.others;
    r->today = 1e9 * spdl__share(d->seen.delivered, d->seen.elapsed_ns);
    r->waiting = spdl__stats_waiting(&d->seen);
    r->step_ns = (double)d->seen.step_mean_ns;
    for (i = r->row_count - 1; i >= 0; --i) {
        spdl__doctor_row_look(d, i);
        if (d->seen.delivered > 0 && d->seen.stage[i].tasks > 0)
            visits = spdl__share(d->seen.stage[i].tasks, d->seen.delivered);
        d->settle_items += (uint64_t)((double)(d->p->node[i].out.buffer_size + d->limit[i]) /
                                      visits + 0.5);
    }
    d->waiter.row = r->waiting >= SPDL__FED ? spdl__stats_busiest(&d->seen) : -1;
    d->window_ns = spdl__window_ns(d->gap_ns);
}

/* Whether the settings may be tried on the running pipeline. */
SPDL__COLD bool spdl__doctor_may_try(const spdl__doctor *d) {
    const spdl_finding *is = &d->found.is;
    if (is->concurrency + is->workers == 0) return false;
    return is->workers <= d->report.workers + d->p->spare &&
           (is->concurrency == 0 ||
            is->concurrency <= d->p->node[is->stage].most) &&
           (is->tie_concurrency == 0 ||
            is->tie_concurrency <= d->p->node[is->tie].most);
}

/* Two windows for the busiest rows that cannot be replayed, one for those that can; at most three
   more than there are rows. */
SPDL__COLD void spdl__doctor_ladder(spdl__doctor *d) {
    spdl__doctor_report *r = &d->report;
    const int most = r->row_count + 3;
    uint32_t looked = 0;
    int i, k, row;
    d->rounds.arms = 0;
    spdl__doctor_arm(d, SPDL__ARM_BASE, -1, 0, NULL);
    spdl__doctor_arm(d, SPDL__ARM_BASE, -1, 0, NULL);
    if (d->kept_count > 0) spdl__doctor_arm(d, SPDL__ARM_KEPT, -1, 0, &r->cached);
    for (i = r->row_count - 1; i >= 0 && d->rounds.arms < most; --i) {
        if (!d->p->hand->probe[i].replays) continue;
        r->row[i].method = SPDL__DOCTOR_REPLAYED;
        spdl__doctor_arm(d, SPDL__ARM_CUT, i, 0, &r->row[i].replayed);
    }
    for (k = 0; k < r->row_count && d->rounds.arms + 2 <= most; ++k) {
        for (row = -1, i = 0; i < r->row_count; ++i) /* the busiest of those that are left */
            if (!(looked >> i & 1) && (row < 0 || r->row[i].load > r->row[row].load)) row = i;
        looked |= (uint32_t)1 << row;
        if (r->row[row].method != SPDL__DOCTOR_NO_METHOD || r->row[row].load < SPDL__BUSY_ROW ||
            d->p->node[row].row.deferred) /* it takes no worker */
            continue;
        r->row[row].method = SPDL__DOCTOR_SLOWED;
        r->row[row].delay_ns = SPDL__SLOWER * r->row[row].mean_ns;
        spdl__doctor_arm(d, SPDL__ARM_COMPUTE, row, (uint64_t)r->row[row].delay_ns,
                         &r->row[row].computing);
        spdl__doctor_arm(d, SPDL__ARM_SLEEP, row, (uint64_t)r->row[row].delay_ns,
                         &r->row[row].asleep);
    }
}

/* What the ladder says against the finding. Calls that wait in turn hide a delay in front of the
   lock; where there is one call at a time nothing could hide it, so the row is not the limit. */
SPDL__COLD void spdl__doctor_doubts(spdl__doctor *d) {
    spdl__found *f = &d->found;
    const spdl_finding none = { SPDL_LIMIT_NOT_KNOWN, -1, -1, 0, 0, 0, 0, 0 };
    const spdl__doctor_row *row;
    bool follows, hides;
    if (f->is.stage < 0 || (f->is.limit != SPDL_LIMIT_CONCURRENCY &&
                            f->is.limit != SPDL_LIMIT_WORKERS && f->is.limit != SPDL_LIMIT_LOCK))
        return;
    row = &d->report.row[f->is.stage];
    if (row->method != SPDL__DOCTOR_SLOWED || !row->asleep.known) return;
    follows = row->asleep.high < SPDL__FOLLOWS;
    hides = row->asleep.low > SPDL__HIDDEN && row->asleep.value > SPDL__FOLLOWS - 0.05;
    if (hides && row->load > SPDL__HELD_ROW && row->concurrency > 1) {
        f->is.limit = SPDL_LIMIT_LOCK;
        f->is.concurrency = f->is.tie_concurrency = f->is.workers = 0;
        f->is.gain = 0;
        f->proven = true;
    } else if (f->is.limit == SPDL_LIMIT_LOCK && follows) {
        f->is.limit = SPDL_LIMIT_CONCURRENCY;
        spdl__find_settings(&d->seen, f, true);
    } else if (hides && row->concurrency == 1 && row->computing.known &&
               row->computing.low > SPDL__HIDDEN) {
        f->is = none;
    }
}

SPDL__COLD void spdl__doctor_try(spdl__doctor *d, double seconds) {
    d->rounds.arms = 2; /* as it is */
    spdl__doctor_arm(d, SPDL__ARM_SETTINGS, -1, 0, &d->report.measured);
    spdl__doctor_say(d, "tries the settings of the verdict for %.1f s\n", seconds);
    d->report.tried = true;
    spdl__doctor_phase_begins(d, SPDL__DOCTOR_TRIAL, seconds);
}

/* What the trial has come to: the settings are kept if they help. */
SPDL__COLD void spdl__doctor_tried(spdl__doctor *d) {
    spdl__doctor_report *r = &d->report;
    spdl_finding *is = &d->found.is;
    const spdl__arm settings = { SPDL__ARM_SETTINGS, -1, 0, NULL };
    const double promised = is->gain - 1;
    int i;
    spdl__doctor_results(d);
    d->found.measured = &r->measured;
    if (r->measured.known && r->measured.low > 1 && r->measured.value >= SPDL__GAIN) {
        r->kept = true;
        for (i = 0; i < d->p->count; ++i) d->limit[i] = spdl__doctor_calls(d, &settings, i);
        if (is->workers > 0) d->open = is->workers - r->workers;
    } else if (r->measured.known && is->stage >= 0 && r->row[is->stage].concurrency > 1 &&
               promised > 0.1 && r->measured.high - 1 < 0.4 * promised &&
               !spdl__stage_queued(&d->seen.stage[is->stage])) {
        is->limit = SPDL_LIMIT_LOCK;
        d->found.proven = true;
    }
}

/* --- what is written --- */

/* The words before the verdict, where the rounds do not count or are too few. */
SPDL__COLD void spdl__doctor_verdict(spdl__doctor *d) {
    spdl__doctor_report *r = &d->report;
    spdl__text text = spdl__text_start(r->verdict, sizeof(r->verdict));
    const bool foreign = r->rounds > 0 && !spdl__rounds_clean(&d->rounds);
    if (d->seen.delivered == 0) {
        spdl__text_add(&text, "Not known: the items ended before anything was observed.");
        return;
    }
    spdl__verdict(&text, &d->seen, &d->found);
    if (foreign)
        spdl__text_add(&text, " Other programs had %.1f processors that were waited for in %d of "
                              "%d rounds: measured is how it is beside them.", r->others_used,
                       r->dropped, r->rounds);
    else if (d->rounds.round < SPDL__ROUNDS_LEAST)
        spdl__text_add(&text, " That was observed; %d round%s too few for an interval%s.",
                       d->rounds.round, d->rounds.round == 1 ? " is" : "s are",
                       d->ended ? ", and the items have ended" : ": give it more seconds");
}

/* Goes to the end of a file, or to stderr. */
SPDL__COLD void spdl__doctor_write(spdl__doctor *d, const char *path,
                                   int (*text)(const spdl__doctor_report *, char *, size_t)) {
    const size_t room = (size_t)text(&d->report, NULL, 0) + 64; /* the time may be longer then */
    char *buffer = (char *)spdl__alloc(&d->p->allocator, room, 16);
    spdl__os_file file = SPDL__NO_FILE;
    const char *reason = "no memory";
    if (buffer != NULL) {
        const size_t bytes = (size_t)text(&d->report, buffer, room);
        if (path == NULL) {
            reason = spdl__os_stderr_write(buffer, bytes, SPDL__STDERR_NS);
        } else {
            reason = spdl__os_file_open(&file, path, SPDL__OS_APPEND, NULL);
            if (reason == NULL) reason = spdl__os_file_write(file, buffer, bytes, SPDL__NEVER);
        }
    }
    (void)spdl__os_file_close(file);
    spdl__free(&d->p->allocator, buffer, room);
    if (reason != NULL)
        spdl__logf(&d->p->logger, SPDL_LOG_WARN, "doctor: no report in %.400s: %s",
                   path != NULL ? path : "stderr", reason);
}

/* What the phase at hand has come to. */
SPDL__COLD void spdl__doctor_phase_ends(spdl__doctor *d) {
    if (d->phase == SPDL__DOCTOR_OBSERVE) {
        spdl__kept_close(d->p->hand);
        spdl__doctor_look(d);
    }
    if (d->phase == SPDL__DOCTOR_TRIAL) spdl__doctor_tried(d);
    if (d->phase != SPDL__DOCTOR_LADDER) return;
    spdl__doctor_results(d);
    spdl__doctor_doubts(d);
}

/* Everything is as it was, or better; what was found is written. */
SPDL__COLD void spdl__doctor_finish(spdl__doctor *d) {
    const spdl__arm as_it_is = { SPDL__ARM_BASE, -1, 0, NULL };
    spdl__doctor_report *r = &d->report;
    double alone;
    if (d->phase >= SPDL__DOCTOR_LADDER) spdl__doctor_set(d, &as_it_is);
    d->phase = SPDL__DOCTOR_DONE;
    spdl__hand_leave(d->p);
    r->done = true;
    r->finding = d->found.is;
    r->seconds = d->begun_ns ? 1e-9 * (double)(spdl_time_ns() - d->begun_ns) : 0;
    alone = r->step_ns - (double)d->seen.consumer_runnable_ns /
                             spdl__larger((double)d->seen.delivered, 1);
    r->ceiling = r->cached.rounds > 0 ? r->cached.value * r->today : alone > 0 ? 1e9 / alone : 0;
    spdl__doctor_verdict(d);
    if (!d->plan.desc.quiet) spdl__doctor_write(d, NULL, spdl__doctor_text);
    if (d->plan.json[0] != '\0') spdl__doctor_write(d, d->plan.json, spdl__doctor_json);
}

/* --- where the consumer passes --- */

SPDL__COLD void spdl__doctor_observes(spdl__doctor *d, uint64_t now) {
    const double seconds = 0.1 * d->plan.desc.seconds;
    int i;
    spdl__store32(&d->p->hand->keeps, d->plan.desc.replay);
    d->phase = SPDL__DOCTOR_OBSERVE;
    d->phase_ns = now + (uint64_t)(1e9 * seconds);
    d->gap_ns = 0;
    for (i = 0; i < d->p->count; ++i)
        d->limit[i] = spdl__load_relaxed32(&d->p->node[i].limit);
    spdl_pipeline_stats(d->p, &d->now);
    spdl__since_take(d->p, &d->since, &d->now, &d->seen);
    spdl__doctor_say(d, "observes for %.1f s\n", seconds);
}

/* A phase is over. */
SPDL__COLD void spdl__doctor_goes_on(spdl__doctor *d) {
    double seconds = d->plan.desc.seconds;
    spdl__doctor_phase_ends(d);
    if (d->phase == SPDL__DOCTOR_OBSERVE) {
        spdl__doctor_ladder(d);
        seconds *= spdl__doctor_may_try(d) ? 0.5 : 0.85;
        spdl__doctor_say(d, "measures %d kinds of windows for %.1f s\n", d->rounds.arms, seconds);
        spdl__doctor_phase_begins(d, SPDL__DOCTOR_LADDER, seconds);
    } else if (d->phase == SPDL__DOCTOR_LADDER && spdl__doctor_may_try(d)) {
        spdl__doctor_try(d, 0.35 * seconds);
    } else {
        spdl__doctor_finish(d);
    }
}

/* No more items come, now or for good. */
SPDL__COLD void spdl__doctor_break_off(spdl__doctor *d) {
    if (d->phase == SPDL__DOCTOR_DONE) return;
    d->ended = true;
    spdl__doctor_phase_ends(d);
    spdl__doctor_finish(d);
}

/* It has an item. */
SPDL__COLD void spdl__doctor_item(spdl__doctor *d) {
    const uint64_t now = spdl_time_ns();
    if (d->phase == SPDL__DOCTOR_DONE) return;
    if (++d->items > 1) d->gap_ns = spdl__max(d->gap_ns, now - d->last_ns);
    d->last_ns = now;
    if (d->phase == SPDL__DOCTOR_WARM) {
        if (d->begun_ns == 0) {
            d->begun_ns = now;
            spdl__doctor_open_workers(d, 0);
        }
        if ((double)(now - d->begun_ns) >= 0.03e9 * d->plan.desc.seconds)
            spdl__doctor_observes(d, now);
    } else if (d->phase == SPDL__DOCTOR_OBSERVE) {
        if (now >= d->phase_ns) spdl__doctor_goes_on(d);
    } else if (spdl__doctor_window(d, now)) {
        spdl__doctor_goes_on(d);
    }
}

SPDL_API spdl_result spdl_pipeline_doctor(const spdl_pipeline *p, spdl__doctor_report *report) {
    if (p == NULL || report == NULL || p->doctor == NULL) return SPDL_E_NOT_FOUND;
    *report = p->doctor->report;
    return p->doctor->phase == SPDL__DOCTOR_DONE ? SPDL_OK : SPDL_TIMEOUT;
}

SPDL_API spdl_result spdl_doctor_run(spdl_pipeline *p, spdl_step_fn step, void *ctx,
                                     spdl__doctor_report *report) {
    spdl__doctor *d = p != NULL ? p->doctor : NULL;
    spdl_result result = SPDL_OK;
    uint64_t turn = 0, before = 0;
    void *item;
    if (d == NULL || step == NULL) return SPDL_E_INVALID;
    while (result == SPDL_OK && d->phase != SPDL__DOCTOR_DONE) {
        if (d->at.kind == SPDL__ARM_KEPT) { /* the pipeline is not asked */
            step(ctx, d->kept[turn++ % (uint64_t)d->kept_count].item);
            spdl__doctor_item(d);
            continue;
        }
        result = spdl_pipeline_next(p, &item, SPDL_FOREVER);
        if (result == SPDL_OK) {
            step(ctx, item);
            if (d->plan.desc.replay && d->phase == SPDL__DOCTOR_OBSERVE &&
                d->kept_count < SPDL__KEPT)
                d->kept[d->kept_count++] = p->last_item;
            else
                spdl__item_free(p, item, p->last_item.origin);
        } else if (result == SPDL_END && d->items > before) {
            before = d->items;
            result = p->ended_ns != 0 ? spdl_pipeline_rewind(p, 0, SPDL_FOREVER) : SPDL_OK;
        }
    }
    spdl__doctor_break_off(d);
    if (report != NULL) *report = d->report;
    return result == SPDL_END ? SPDL_OK : result;
}

/* --- a pipeline gets it, and loses it --- */

/* Of SPDL_DOCTOR: a word between commas; false when it is none. */
SPDL__COLD bool spdl__doctor_word(spdl__doctor_plan *plan, const char *word) {
    const double number = spdl__report_seconds(word);
    if (strcmp(word, "replay") == 0) return plan->desc.replay = true;
    if (strcmp(word, "raise") == 0) return plan->desc.raise = true;
    if (number != 1) plan->desc.seconds = number;
    return number > 0 && number < 1e6;
}

/* What is asked for, by desc and environment; false: nothing. */
SPDL__COLD bool spdl__doctor_ask(spdl__doctor_plan *plan, const spdl_doctor_desc *desc,
                                 const spdl_logger *logger) {
    const char *value = spdl__os_environment("SPDL_DOCTOR"), *at = value;
    char word[64];
    memset(plan, 0, sizeof(*plan));
    if (desc != NULL) {
        plan->desc = *desc;
        (void)spdl__path_copy(plan->json, desc->json, "doctor", logger);
    } else if (value == NULL || strcmp(value, "0") == 0) {
        return false;
    } else {
        (void)spdl__path_copy(plan->json, spdl__os_environment("SPDL_REPORT"), "SPDL_REPORT",
                              logger);
    }
    for (; desc == NULL && at != NULL; at = *at == ',' ? at + 1 : NULL) {
        const int length = (int)strcspn(at, ",");
        (void)snprintf(word, sizeof(word), "%.*s", length, at);
        if (!spdl__doctor_word(plan, word)) {
            spdl__logf(logger, SPDL_LOG_WARN,
                       "SPDL_DOCTOR is \"%.200s\", but \"%s\" is neither a number of seconds "
                       "nor replay or raise: no doctor", value, word);
            return false;
        }
        at += length;
    }
    if (!(plan->desc.seconds > 0)) plan->desc.seconds = SPDL__DOCTOR_SECONDS;
    if (plan->desc.seconds > 1e6) plan->desc.seconds = 1e6;
    return true;
}

/* With the rows there, before the first thread. */
SPDL__COLD spdl_result spdl__doctor_open(spdl_pipeline *p, const spdl__doctor_plan *plan,
                                         int workers) {
    spdl__doctor *d;
    int i;
    if (plan == NULL) return SPDL_OK;
    d = (spdl__doctor *)spdl__alloc_zeroed(&p->allocator, 1, sizeof(*d), SPDL_CACHE_LINE);
    if (d == NULL) return SPDL_E_NOMEM;
    d->p = p;
    d->plan = *plan;
    memcpy(d->report.name, plan->name, sizeof(d->report.name));
    d->report.workers = workers;
    d->report.replays = plan->desc.replay;
    d->report.row_count = p->count;
    d->found.is.stage = d->found.is.tie = d->report.finding.stage = d->report.finding.tie = -1;
    for (i = 0; i < p->count; ++i) d->limit[i] = p->node[i].limit;
    for (i = 0; i < SPDL__MAX_WORKERS; ++i) d->spare[i].d = d;
    if (!spdl__os_event_init(&d->hold)) {
        spdl__free(&p->allocator, d, sizeof(*d));
        return SPDL_E_NOMEM;
    }
    p->doctor = d;
    return spdl__hand_open(p, plan->desc.replay);
}

/* Before a pipeline stops for good. */
SPDL__COLD void spdl__doctor_close(spdl_pipeline *p) {
    spdl__doctor *d = p->doctor;
    if (d == NULL) return;
    spdl__doctor_break_off(d);
    spdl__doctor_open_workers(d, d->p->spare);
}

/* It is quiet, but for a source that destroy does not wait for. */
SPDL__COLD void spdl__doctor_empty(spdl_pipeline *p) {
    spdl__doctor *d = p->doctor;
    if (d == NULL) return;
    for (; d->kept_count > 0; --d->kept_count)
        spdl__item_free(p, d->kept[d->kept_count - 1].item, d->kept[d->kept_count - 1].origin);
    spdl__hand_empty(p);
}

SPDL__COLD void spdl__doctor_free(spdl_pipeline *p) {
    spdl__doctor *d = p->doctor;
    if (d == NULL) return;
    spdl__doctor_empty(p);
    spdl__hand_close(p);
    spdl__os_event_fini(&d->hold);
    spdl__free(&p->allocator, d, sizeof(*d));
    p->doctor = NULL;
}

/* ============================================================================================= */
/* >>doctor-text-impl
   The report of the doctor as text and as JSON: functions of the report alone, for any thread. A
   number that cannot be one stands as "-", or null. */

static const char *const spdl__found_methods[] = { "none", "replayed", "slowed", NULL };

/* "1.45x (1.41 to 1.49)", or of what slows "-17 % (-19 to -15)". */
SPDL__COLD const char *spdl__found_result(spdl__cell *cell, const spdl_interval *is, bool slows) {
    spdl__text text = spdl__text_start(cell->text, sizeof(cell->text));
    if (!(is->value > 0 && is->value < 1e4)) return "-";
    if (!slows) {
        spdl__text_interval(&text, is);
        return cell->text;
    }
    spdl__text_add(&text, "%+.0f %%", 100 * (is->value - 1));
    if (is->known)
        spdl__text_add(&text, " (%+.0f to %+.0f)", 100 * (is->low - 1), 100 * (is->high - 1));
    return cell->text;
}

/* An experiment with a row: in the line of the row's own numbers, or below it. */
SPDL__COLD void spdl__found_experiment(spdl__text *text, const char *what, double share,
                                       const spdl_interval *is, int *lines) {
    char label[24];
    spdl__cell cell;
    if (is->rounds <= 0) return;
    (void)snprintf(label, sizeof(label), share > 0 && share < 100 ? "%s +%.0f %%" : "%s", what,
                   100 * share);
    spdl__text_add(text, "%*s %-15s %s\n", (*lines)++ > 0 ? 48 : 0, "", label,
                   spdl__found_result(&cell, is, share > 0));
}

SPDL__COLD void spdl__found_row(spdl__text *text, const spdl__doctor_row *row, bool limit) {
    const double parts[] = { row->cpu_ns, row->runnable_ns, row->blocked_ns };
    const double share = row->mean_ns > 0 ? row->delay_ns / row->mean_ns : 0;
    spdl__cell cell;
    int lines = 0, k;
    spdl__text_add(text, limit ? "> " : "  ");
    spdl__text_name(text, row->name, 16);
    spdl__text_add(text, " %4d", row->concurrency);
    spdl__text_add(text, " %7s", row->mean_ns > 0 ? spdl__duration(&cell, row->mean_ns) : "-");
    for (k = 0; k < 3; ++k)
        spdl__text_add(text, " %4s",
                       row->mean_ns > 0 ? spdl__percent(&cell, parts[k] / row->mean_ns) : "-");
    spdl__text_add(text, "%*s", 3, "");
    spdl__found_experiment(text, "replayed", 0, &row->replayed, &lines);
    spdl__found_experiment(text, "computing", share, &row->computing, &lines);
    spdl__found_experiment(text, "asleep", share, &row->asleep, &lines);
    if (lines == 0) spdl__text_add(text, "\n");
}

/* From the consumer down to the source, and as it is. */
SPDL__COLD void spdl__found_ladder(spdl__text *text, const spdl__doctor_report *report) {
    spdl__cell cell[3];
    int i, lines = 0;
    spdl__text_add(text, "\n  row              conc    mean  cpu runq  asl    experiment      "
                         "throughput\n");
    spdl__text_add(text, "  %-16s %4d %7s %17s", "consumer", 1,
                   spdl__duration(&cell[0], report->step_ns), "");
    spdl__found_experiment(text, "on kept items", 0, &report->cached, &lines);
    if (lines == 0)
        spdl__text_add(text, " %-15s %s\n", "alone", spdl__rate(cell, report->ceiling));
    for (i = report->row_count - 1; i >= 0; --i)
        if (report->row[i].mean_ns > 0 || i == report->finding.stage)
            spdl__found_row(text, &report->row[i], i == report->finding.stage);
    spdl__text_add(text, "  as it is: %s; the same again: %s\n",
                   spdl__rate(&cell[0], report->today),
                   spdl__found_result(&cell[1], &report->same, true));
}

SPDL_API int spdl__doctor_text(const spdl__doctor_report *report, char *buffer, size_t bytes) {
    spdl__text text = spdl__text_start(buffer, bytes);
    spdl__cell cell;
    spdl__text_add(&text, "spdl doctor: ");
    spdl__text_name(&text, report->name, -1);
    spdl__text_add(&text, "%s%s\n", report->name[0] ? ": " : "",
                   report->verdict[0] != '\0' ? report->verdict : "It is not done yet.");
    if (!report->done) return (int)text.length;
    spdl__text_add(&text, "%.1f s, %d round%s", report->seconds, report->rounds,
                   report->rounds == 1 ? "" : "s");
    if (report->dropped > 0) spdl__text_add(&text, " (%d made again)", report->dropped);
    spdl__text_add(&text, ", %d worker%s, %.2f of %.3g processors used, %.2f by others%s.\n",
                   report->workers, report->workers == 1 ? "" : "s", report->cores_used,
                   report->cores, report->others_used,
                   report->replays ? "; items were repeated: what was learned is void" : "");
    if (report->rounds > 0) spdl__found_ladder(&text, report);
    if (report->rounds > 0 && report->ceiling > 0)
        spdl__text_add(&text, "The consumer waited %.1f %% of its time. Without any loading: %s.\n",
                       100 * report->waiting, spdl__rate(&cell, report->ceiling));
    if (report->kept)
        spdl__text_add(&text, "The settings are in force for the rest of this run.\n");
    return (int)text.length;
}

static const spdl__field spdl__report_fields[] = {
    SPDL__V(spdl__doctor_report, measured), SPDL__B(spdl__doctor_report, tried),
    SPDL__B(spdl__doctor_report, kept), SPDL__D(spdl__doctor_report, seconds),
    SPDL__I(spdl__doctor_report, workers), SPDL__D(spdl__doctor_report, cores),
    SPDL__D(spdl__doctor_report, cores_used), SPDL__D(spdl__doctor_report, others_used),
    SPDL__D(spdl__doctor_report, step_ns), SPDL__D(spdl__doctor_report, today),
    SPDL__D(spdl__doctor_report, ceiling), SPDL__D(spdl__doctor_report, waiting),
    SPDL__B(spdl__doctor_report, replays), SPDL__V(spdl__doctor_report, same),
    SPDL__V(spdl__doctor_report, cached),
    SPDL__I(spdl__doctor_report, rounds), SPDL__I(spdl__doctor_report, dropped),
    SPDL__S(spdl__doctor_report, verdict), SPDL__FIELDS_END
};
static const spdl__field spdl__row_fields[] = {
    SPDL__S(spdl__doctor_row, name), SPDL__FIELD_(spdl__doctor_row, 'e', kind, NULL),
    SPDL__I(spdl__doctor_row, concurrency),
    SPDL__FIELD_(spdl__doctor_row, 'e', method, spdl__found_methods),
    SPDL__D(spdl__doctor_row, mean_ns), SPDL__D(spdl__doctor_row, cpu_ns),
    SPDL__D(spdl__doctor_row, runnable_ns), SPDL__D(spdl__doctor_row, blocked_ns),
    SPDL__D(spdl__doctor_row, load), SPDL__D(spdl__doctor_row, delay_ns),
    SPDL__V(spdl__doctor_row, replayed), SPDL__V(spdl__doctor_row, computing),
    SPDL__V(spdl__doctor_row, asleep), SPDL__FIELDS_END
};

SPDL_API int spdl__doctor_json(const spdl__doctor_report *report, char *buffer, size_t bytes) {
    spdl__text text = spdl__text_start(buffer, bytes);
    spdl__json_head(&text, "spdl.doctor.1", report->name[0] != '\0' ? report->name : "spdl");
    spdl__json_fields(&text, ",\"finding\":{", &report->finding, spdl__finding_fields);
    spdl__json_fields(&text, "},", report, spdl__report_fields);
    spdl__json_array(&text, "rows", report->row, report->row_count, sizeof(report->row[0]),
                     spdl__row_fields);
    spdl__text_add(&text, "}\n");
    return (int)text.length;
}

#endif /* SPDL_NO_REPORT */

/* ============================================================================================= */
/* >>sampler-impl
   Orders are functions of (seed, epoch, position). What a shuffle needs more of, keys or a table,
   is kept for one epoch at a time and made anew when another is asked for: so one thread calls at a
   time, which also holds for the calls of a source. What >>state asks from the trainer's thread
   looks at ranks and `from` alone, which do not change meanwhile. */

#define SPDL__TABLE 4096u /* up to here a shuffle is a table: statistics see 5 rounds below 3,000 */
#define SPDL__MOST ((uint64_t)1 << 63) /* of what is counted here */

/* A product of 128 bits: some compilers for boards have no such type. */
typedef struct spdl__wide {
    uint64_t high, low;
} spdl__wide;

SPDL__INLINE spdl__wide spdl__wide_product(uint64_t a, uint64_t b) {
    spdl__wide product;
#ifdef __SIZEOF_INT128__
    __extension__ typedef unsigned __int128 spdl__u128;
    product.high = (uint64_t)((spdl__u128)a * b >> 64);
    product.low = a * b;
#else
    const uint64_t half = 0xffffffffu, low = (a & half) * (b & half);
    const uint64_t left = (a >> 32) * (b & half) + (low >> 32);
    const uint64_t right = (a & half) * (b >> 32) + (left & half);
    product.high = (a >> 32) * (b >> 32) + (left >> 32) + (right >> 32);
    product.low = right << 32 | (low & half);
#endif
    return product;
}

/* Number `n` of the random numbers of a key. */
SPDL__INLINE uint64_t spdl__hashed(uint64_t key, uint64_t n) {
    return spdl__mix(spdl__mix(key + 0x9e3779b97f4a7c15u) + n * 0x9e3779b97f4a7c15u);
}

SPDL_API uint64_t spdl_hash(uint64_t seed, const void *data, size_t bytes) {
    const unsigned char *from = (const unsigned char *)data;
    uint64_t hash = spdl__hashed(seed, bytes), word = 0;
    size_t i;
    for (i = 0; i < bytes; ++i) {
        word = word << 8 | from[i];
        if (i % 8 == 7 || i + 1 == bytes) {
            hash = spdl__mix(hash ^ word) + 0x9e3779b97f4a7c15u;
            word = 0;
        }
    }
    return spdl__mix(hash);
}

/* --- shuffles --- */

/* The numbers below n in an order that depends on the key. Few are shuffled in a table. Of more,
   the part above `shift` bits and that below are changed in turn by a hash of the other one (a
   Feistel network that adds, as that reaches odd permutations, too). A result of n or above goes
   through again, which is rare: the parts leave room for less than `1 << shift` of those. */
typedef struct spdl__shuffle {
    uint64_t n;     /* 0: none so far */
    uint64_t highs; /* how many values the high part has */
    unsigned shift;
    uint64_t key_of[5]; /* rounds */
    uint16_t *table; /* NULL: n is never so small */
} spdl__shuffle;

SPDL__NOINLINE void spdl__shuffle_fill(spdl__shuffle *shuffle, uint64_t key) {
    uint64_t i;
    for (i = 0; i < shuffle->n; ++i) {
        const uint64_t j = spdl__wide_product(spdl__hashed(key, i), i + 1).high;
        shuffle->table[i] = shuffle->table[j];
        shuffle->table[j] = (uint16_t)i;
    }
}

SPDL__PRIVATE void spdl__shuffle_set(spdl__shuffle *shuffle, uint64_t key, uint64_t n) {
    int i;
    shuffle->n = n;
    key = spdl__hashed(key, n);
    if (n <= SPDL__TABLE) {
        spdl__shuffle_fill(shuffle, key);
        return;
    }
    for (shuffle->shift = 0; n >> 2 * shuffle->shift > 3; ++shuffle->shift) {}
    shuffle->highs = (n - 1) / ((uint64_t)1 << shuffle->shift) + 1;
    for (i = 0; i < 5; ++i) shuffle->key_of[i] = spdl__hashed(key, (uint64_t)i);
}

/* A hash of one part, of 32 bits. */
SPDL__INLINE uint64_t spdl__shuffle_hash(uint64_t part, uint64_t key) {
    part = (part ^ key) * 0xbf58476d1ce4e5b9u;
    return (part ^ part >> 32) * 0x94d049bb133111ebu >> 32;
}

/* high + a hash of low, modulo highs. */
SPDL__INLINE uint64_t spdl__shuffle_high(uint64_t high, uint64_t low, uint64_t key,
                                         uint64_t highs) {
    const uint64_t sum = high + (spdl__shuffle_hash(low, key) * highs >> 32), wrapped = sum - highs;
    return sum < highs ? sum : wrapped; /* no branch */
}

SPDL__INLINE uint64_t spdl__shuffle_at(const spdl__shuffle *shuffle, uint64_t x) {
    const uint64_t highs = shuffle->highs, lows = ((uint64_t)1 << shuffle->shift) - 1;
    const uint64_t *key = shuffle->key_of;
    if (shuffle->n <= SPDL__TABLE) return shuffle->table[x];
    do {
        uint64_t high = x >> shuffle->shift, low = x & lows;
        high = spdl__shuffle_high(high, low, key[0], highs);
        low = (low + spdl__shuffle_hash(high, key[1])) & lows;
        high = spdl__shuffle_high(high, low, key[2], highs);
        low = (low + spdl__shuffle_hash(high, key[3])) & lows;
        high = spdl__shuffle_high(high, low, key[4], highs);
        x = high << shuffle->shift | low;
    } while (SPDL__UNLIKELY(x >= shuffle->n));
    return x;
}

/* --- mixtures ---
   A binary tree, whose leaves are sources. Of the items that a node gets, the first c are split so
   that its left child, of share f of the weights, has c * f of them, rounded: which one gets the
   next item, and how many it has had, is one multiplication.

   How far a source is off. Rounding adds up to 1/2 at each node, either way, and what a node is off
   goes on to its children by their shares. So a leaf of weight w is off by up to (1 + the sum of w
   / W over the nodes above it but the root, W being theirs) / 2. In the tree of Huffman a node's
   children weigh less than its sibling: the sum is below 2.36, that of 1 / Fibonacci's numbers less
   the first, and the error below 1.68. (Less than 1 can be had one position after the other, by
   Tijdeman's earliest deadline; we know of no way that finds the source at a position without those
   before it.)

   Weights are rounded to 2^-62 of their sum, shares to 2^-64: after 2^50 positions this is below
   0.001 of an item. */

typedef struct spdl__split {
    uint64_t share;  /* of the left child, times 2^64 */
    int32_t kid[2];  /* a node, or -1 - a source */
} spdl__split;

struct spdl_mixture {
    spdl_allocator allocator;
    size_t bytes, sources;
    uint64_t spec;
    int32_t root; /* as a kid */
    spdl__split node[1]; /* sources of them, in the same block */
};

/* What create works on. */
typedef struct spdl__weighed {
    uint64_t weight;
    int32_t source;
} spdl__weighed;

/* a / b times 2^64, a < b < 2^63. */
SPDL__PRIVATE uint64_t spdl__fraction(uint64_t a, uint64_t b) {
    uint64_t quotient = 0;
    int i;
    for (i = 0; i < 64; ++i) {
        a <<= 1;
        quotient = quotient << 1 | (a >= b);
        if (a >= b) a -= b;
    }
    return quotient;
}

/* Of the first c items of a node: how many its left child has. *next: it gets the next one. */
SPDL__INLINE uint64_t spdl__split_left(uint64_t c, uint64_t share, bool *next) {
    const spdl__wide product = spdl__wide_product(c, share);
    const uint64_t half = (uint64_t)1 << 63, low = product.low + half;
    *next = low + share < low;
    return product.high + (low < half);
}

/* The source, and which of its items. */
SPDL__PRIVATE uint64_t spdl__mixture_get(const spdl_mixture *m, uint64_t position,
                                         uint32_t *source) {
    uint64_t c = position;
    int32_t at;
    for (at = m->root; at >= 0;) {
        const spdl__split *node = &m->node[at];
        bool left;
        const uint64_t lefts = spdl__split_left(c, node->share, &left);
        c = left ? lefts : c - lefts;
        at = node->kid[left ? 0 : 1];
    }
    *source = (uint32_t)(-1 - at);
    return c;
}

SPDL_API spdl_result spdl_mixture_at(const spdl_mixture *mixture, uint64_t position,
                                     uint32_t *source, uint64_t *index) {
    if (mixture == NULL || source == NULL || index == NULL || position >= SPDL__MOST)
        return SPDL_E_INVALID;
    *index = spdl__mixture_get(mixture, position, source);
    return SPDL_OK;
}

SPDL__PRIVATE int spdl__weighed_order(const void *left, const void *right) {
    const spdl__weighed *a = (const spdl__weighed *)left, *b = (const spdl__weighed *)right;
    if (a->weight != b->weight) return a->weight < b->weight ? -1 : 1;
    return a->source < b->source ? -1 : a->source > b->source;
}

/* The sources that have a weight, in its order. */
SPDL__COLD int spdl__mix_leaves(const spdl_mixture_desc *desc, spdl__weighed *leaf) {
    double most = 0, sum = 0;
    size_t i;
    int n = 0;
    for (i = 0; i < desc->sources; ++i) most = spdl__larger(most, desc->weights[i]);
    for (i = 0; i < desc->sources; ++i) sum += desc->weights[i] / most;
    for (i = 0; i < desc->sources; ++i) {
        leaf[n].weight =
            (uint64_t)(desc->weights[i] / most / sum * (double)((uint64_t)1 << 62));
        leaf[n].source = (int32_t)i;
        n += leaf[n].weight != 0; /* else it comes after 2^62 positions or more */
    }
    qsort(leaf, (size_t)n, sizeof(*leaf), spdl__weighed_order);
    return n;
}

/* Huffman's tree: the two lightest become one, of leaves and of nodes, whose weights both ascend.
   The first of the two is the lighter one: its share is below 1. */
SPDL__COLD void spdl__mix_tree(spdl_mixture *m, const spdl__weighed *leaves, int count,
                               uint64_t *weights) {
    int leaf = 0, node = 0, all, k;
    m->root = count == 1 ? -1 - leaves[0].source : count - 2;
    for (all = 0; all < count - 1; ++all) {
        spdl__split *made = &m->node[all];
        uint64_t weight[2];
        for (k = 0; k < 2; ++k) {
            if (leaf < count && (node == all || leaves[leaf].weight <= weights[node])) {
                weight[k] = leaves[leaf].weight;
                made->kid[k] = -1 - leaves[leaf++].source;
            } else {
                weight[k] = weights[node];
                made->kid[k] = node++;
            }
        }
        weights[all] = weight[0] + weight[1];
        made->share = spdl__fraction(weight[0], weights[all]);
    }
}

/* A weight is told by its bits: -ffast-math does away with comparing for NaN. */
SPDL__COLD spdl_result spdl__mixture_check_weights(const spdl_mixture_desc *desc) {
    size_t i;
    uint64_t bits;
    bool some = false;
    if (desc->weights == NULL)
        return spdl__error_set(desc->error, SPDL_E_INVALID, "mixture: weights is NULL");
    for (i = 0; i < desc->sources; ++i) {
        memcpy(&bits, &desc->weights[i], sizeof(bits));
        if (bits << 1 != 0 && bits >= (uint64_t)0x7ff << 52)
            return spdl__error_set(desc->error, SPDL_E_INVALID, "mixture: weights[%llu] is "
                                   "%g, must be a number that is not negative", (spdl__llu)i,
                                   desc->weights[i]);
        some = some || bits << 1 != 0;
    }
    if (some) return SPDL_OK;
    return spdl__error_set(desc->error, SPDL_E_INVALID,
                           "mixture: the sum of weights is 0");
}

SPDL__COLD spdl_result spdl__mixture_check(const spdl_mixture_desc *desc) {
    const spdl_result result = spdl__allocator_check(&desc->allocator, "mixture", desc->error);
    if (result != SPDL_OK) return result;
    if (desc->sources < 1 || desc->sources > 65536)
        return spdl__error_set(desc->error, SPDL_E_INVALID, "mixture: sources is %llu, "
                               "must be from 1 to 65536", (spdl__llu)desc->sources);
    return spdl__mixture_check_weights(desc);
}

SPDL_API spdl_result spdl_mixture_create(spdl_mixture **mixture, const spdl_mixture_desc *desc) {
    const size_t work_bytes = sizeof(spdl__weighed) + sizeof(uint64_t); /* of a source */
    size_t n, bytes, i;
    spdl_mixture *m;
    spdl__weighed *leaves;
    spdl_result result;
    uint64_t bits;
    if (mixture == NULL) return SPDL_E_INVALID;
    *mixture = NULL;
    if (desc == NULL) return SPDL_E_INVALID;
    spdl__error_clear(desc->error);
    result = spdl__mixture_check(desc);
    if (result != SPDL_OK) return result;
    n = desc->sources;
    bytes = sizeof(*m) + n * sizeof(m->node[0]);
    m = (spdl_mixture *)spdl__alloc_zeroed(&desc->allocator, 1, bytes, 8);
    leaves = (spdl__weighed *)spdl__alloc_zeroed(&desc->allocator, n, work_bytes, 8);
    if (m == NULL || leaves == NULL) {
        spdl__free(&desc->allocator, m, bytes);
        spdl__free(&desc->allocator, leaves, n * work_bytes);
        return spdl__error_set(desc->error, SPDL_E_NOMEM, "mixture: no memory");
    }
    m->allocator = desc->allocator;
    m->bytes = bytes;
    m->sources = n;
    for (i = 0; i < n; ++i) { /* a run goes on with the same order only */
        memcpy(&bits, &desc->weights[i], sizeof(bits));
        m->spec = spdl__hashed(m->spec, bits);
    }
    spdl__mix_tree(m, leaves, spdl__mix_leaves(desc, leaves),
                   (uint64_t *)(void *)(leaves + n));
    spdl__free(&desc->allocator, leaves, n * work_bytes);
    *mixture = m;
    return SPDL_OK;
}

SPDL_API void spdl_mixture_destroy(spdl_mixture *mixture) {
    spdl_allocator allocator;
    if (mixture == NULL) return;
    allocator = mixture->allocator;
    spdl__free(&allocator, mixture, mixture->bytes);
}

/* --- the sampler --- */

struct spdl_sampler {
    spdl_sampler_desc desc; /* samplers are our own or NULL, ranks those of now */
    uint64_t length;        /* positions of an epoch, */
    uint64_t rows;          /* and the most that a rank has of them */
    uint64_t blocks;        /* that are shuffled: the whole ones */
    uint64_t short_at;      /* position of the short one in this epoch, if there is one */
    uint64_t epoch;         /* of the shuffle, if `ready` */
    bool ready;
    spdl__shuffle shuffle;  /* of indices or blocks */
    uint64_t from_epoch, from; /* in that epoch ranks of a run before had the positions below */
    spdl_sampler **samplers;
    char identity[160]; /* what has to be the same in another run: " order=... spec=..." */
};

SPDL__COLD spdl_result spdl__sampler_refuse(const spdl_sampler_desc *desc, const char *why) {
    return spdl__error_set(desc->error, SPDL_E_INVALID, "sampler: %s", why);
}

SPDL__COLD spdl_result spdl__sampler_check_mixture(const spdl_sampler_desc *desc) {
    const spdl_mixture *m = desc->mixture;
    size_t i;
    if (m == NULL || desc->samplers == NULL)
        return spdl__sampler_refuse(desc, "mixture or samplers is NULL");
    if (desc->count != 0)
        return spdl__sampler_refuse(desc, "count is set, but a mixture has that of its sources");
    if (desc->draws == 0)
        return spdl__sampler_refuse(desc, "draws is 0, but the mixture does not end");
    for (i = 0; i < m->sources; ++i) {
        const spdl_sampler *source = desc->samplers[i];
        const char *why = source == NULL ? "is NULL"
                          : "has ranks of its own; give them to the one of the mixture";
        if (source == NULL || source->desc.ranks.world != 1)
            return spdl__error_set(desc->error, SPDL_E_INVALID, "sampler: samplers[%llu] %s",
                                   (spdl__llu)i, why);
    }
    return SPDL_OK;
}

SPDL__COLD spdl_result spdl__sampler_check(const spdl_sampler_desc *desc) {
    const int rank = desc->ranks.rank, world = desc->ranks.world;
    const spdl_result result = spdl__allocator_check(&desc->allocator, "sampler", desc->error);
    if (result != SPDL_OK) return result;
    if ((rank | world) != 0 && (rank < 0 || rank >= world))
        return spdl__error_set(desc->error, SPDL_E_INVALID, "sampler: rank is %d, must be "
                               "from 0 to world - 1, which is %d", rank, world - 1);
    if ((unsigned)desc->order > SPDL_SAMPLE_MIXTURE || (unsigned)desc->tail > SPDL_TAIL_PAD)
        return spdl__sampler_refuse(desc, "order or tail is none that there is");
    if (desc->count > SPDL__MOST || desc->draws > SPDL__MOST)
        return spdl__sampler_refuse(desc, "count or draws is more than 2^63");
    if (desc->order == SPDL_SAMPLE_MIXTURE) return spdl__sampler_check_mixture(desc);
    if (desc->count == 0)
        return spdl__sampler_refuse(desc, "count is 0, must be the number of items");
    if (desc->order == SPDL_SAMPLE_BLOCKS && desc->block == 0)
        return spdl__sampler_refuse(desc, "block is 0, must be the indices in a block");
    if (desc->order == SPDL_SAMPLE_FUNCTION)
        return desc->index_fn != NULL ? SPDL_OK : spdl__sampler_refuse(desc, "index_fn is NULL");
    if (desc->draws <= desc->count) return SPDL_OK;
    return spdl__error_set(desc->error, SPDL_E_INVALID, "sampler: draws is %llu, but each of "
                           "the %llu indices comes once", (spdl__llu)desc->draws,
                           (spdl__llu)desc->count);
}

/* A hash of what else makes the order. */
SPDL__COLD uint64_t spdl__sampler_spec(const spdl_sampler *s) {
    uint64_t spec = s->desc.order == SPDL_SAMPLE_BLOCKS ? s->desc.block : 0;
    size_t i, k;
    if (s->desc.order != SPDL_SAMPLE_MIXTURE) return spec;
    spec = s->desc.mixture->spec;
    for (i = 0; i < s->desc.mixture->sources; ++i) {
        const spdl_sampler *source = s->samplers[i];
        const uint64_t says[] = { spdl__sampler_spec(source), source->length, source->desc.seed,
                                  source->desc.count, (uint64_t)source->desc.order };
        for (k = 0; k < sizeof(says) / sizeof(says[0]); ++k) spec = spdl__hashed(spec, says[k]);
    }
    return spec;
}

SPDL__COLD void spdl__sampler_identify(spdl_sampler *s) {
    static const char *const order[] = { "sequential", "shuffled", "blocks", "function",
                                         "mixture" };
    static const char *const tail[] = { "keep", "drop", "pad" };
    (void)snprintf(s->identity, sizeof(s->identity), " order=%s count=%llu draws=%llu seed=%llu "
                   "tail=%s spec=%016llx", order[s->desc.order], (spdl__llu)s->desc.count,
                   (spdl__llu)s->length, (spdl__llu)s->desc.seed, tail[s->desc.tail],
                   (spdl__llu)spdl__sampler_spec(s));
}

/* Its tables. False: no memory. */
SPDL__COLD bool spdl__sampler_build(spdl_sampler *s, const spdl_sampler_desc *desc) {
    const size_t sources = desc->mixture != NULL ? desc->mixture->sources : 0;
    if (desc->order == SPDL_SAMPLE_MIXTURE) {
        s->samplers = (spdl_sampler **)spdl__alloc_zeroed(&desc->allocator, sources,
                                                          sizeof(*s->samplers), sizeof(void *));
        if (s->samplers == NULL) return false;
        memcpy(s->samplers, desc->samplers, sources * sizeof(*s->samplers));
        return true;
    }
    s->blocks = desc->order == SPDL_SAMPLE_BLOCKS ? desc->count / desc->block : desc->count;
    if (desc->order == SPDL_SAMPLE_SEQUENTIAL || desc->order == SPDL_SAMPLE_FUNCTION ||
        s->blocks > SPDL__TABLE)
        return true;
    s->shuffle.table = (uint16_t *)spdl__alloc(&desc->allocator, SPDL__TABLE * sizeof(uint16_t), 2);
    return s->shuffle.table != NULL;
}

SPDL_API spdl_result spdl_sampler_create(spdl_sampler **sampler, const spdl_sampler_desc *desc) {
    spdl_result result;
    spdl_sampler *s;
    uint64_t world;
    if (sampler == NULL) return SPDL_E_INVALID;
    *sampler = NULL;
    if (desc == NULL) return SPDL_E_INVALID;
    spdl__error_clear(desc->error);
    result = spdl__sampler_check(desc);
    if (result != SPDL_OK) return result;
    s = (spdl_sampler *)spdl__alloc_zeroed(&desc->allocator, 1, sizeof(*s), sizeof(void *));
    if (s != NULL) {
        s->desc = *desc;
        s->desc.error = NULL;
        if (desc->ranks.world == 0) s->desc.ranks.world = 1;
    }
    if (s == NULL || !spdl__sampler_build(s, desc)) {
        spdl_sampler_destroy(s);
        return spdl__error_set(desc->error, SPDL_E_NOMEM, "sampler: no memory");
    }
    s->length = desc->draws != 0 ? desc->draws : desc->count;
    world = (uint64_t)s->desc.ranks.world;
    s->rows = s->length / world + (s->length % world != 0);
    spdl__sampler_identify(s);
    *sampler = s;
    return SPDL_OK;
}

SPDL_API void spdl_sampler_destroy(spdl_sampler *sampler) {
    spdl_allocator allocator;
    if (sampler == NULL) return;
    allocator = sampler->desc.allocator;
    if (sampler->samplers != NULL)
        spdl__free(&allocator, sampler->samplers,
                   sampler->desc.mixture->sources * sizeof(*sampler->samplers));
    spdl__free(&allocator, sampler->shuffle.table, SPDL__TABLE * sizeof(uint16_t));
    spdl__free(&allocator, sampler, sizeof(*sampler));
}

/* --- which index is at a position --- */

SPDL__PRIVATE spdl_result spdl__mixture_item(spdl_sampler *s, uint64_t epoch, uint64_t position,
                                             spdl_index *item) {
    uint64_t at, length;
    spdl_result result;
    uint32_t source;
    if (epoch > (SPDL__MOST - 1 - position) / s->length) return SPDL_END;
    at = spdl__mixture_get(s->desc.mixture, epoch * s->length + position, &source);
    length = s->samplers[source]->length;
    result = spdl__sampler_at(s->samplers[source], at / length, at % length, item);
    item->position = position;
    item->epoch = epoch;
    item->source = source;
    return result;
}

/* Makes the shuffle that of an epoch. The short block lies between any two of the others. */
SPDL__NOINLINE void spdl__sampler_make(spdl_sampler *s, uint64_t epoch) {
    const uint64_t key = spdl__hashed(s->desc.seed, epoch);
    s->ready = true;
    s->epoch = epoch;
    if (s->desc.order != SPDL_SAMPLE_SHUFFLED && s->desc.order != SPDL_SAMPLE_BLOCKS) return;
    if (s->blocks > 0) spdl__shuffle_set(&s->shuffle, key, s->blocks);
    if (s->desc.order == SPDL_SAMPLE_BLOCKS)
        s->short_at = spdl__wide_product(spdl__hashed(~key, 0), s->blocks + 1).high *
                      s->desc.block;
}

SPDL__PRIVATE uint64_t spdl__block_at(const spdl_sampler *s, uint64_t position) {
    const uint64_t block = s->desc.block, whole = s->blocks * block, rest = s->desc.count - whole;
    if (position >= s->short_at) {
        if (position - s->short_at < rest) return whole + (position - s->short_at);
        position -= rest;
    }
    return spdl__shuffle_at(&s->shuffle, position / block) * block + position % block;
}

SPDL__INLINE spdl_result spdl__sampler_get(spdl_sampler *s, uint64_t epoch, uint64_t position,
                                           spdl_index *item) {
    uint64_t index = position;
    if (SPDL__UNLIKELY(s->epoch != epoch || !s->ready)) spdl__sampler_make(s, epoch);
    item->position = position;
    item->epoch = epoch;
    item->source = 0;
    switch (s->desc.order) {
    case SPDL_SAMPLE_SEQUENTIAL: break;
    case SPDL_SAMPLE_SHUFFLED: index = spdl__shuffle_at(&s->shuffle, position); break;
    case SPDL_SAMPLE_BLOCKS: index = spdl__block_at(s, position); break;
    case SPDL_SAMPLE_FUNCTION: index = s->desc.index_fn(s->desc.ctx, epoch, position); break;
    case SPDL_SAMPLE_MIXTURE: return spdl__mixture_item(s, epoch, position, item);
    }
    item->index = index;
    return index < s->desc.count ? SPDL_OK : SPDL_E_INVALID;
}

SPDL_API spdl_result spdl__sampler_at(spdl_sampler *sampler, uint64_t epoch, uint64_t position,
                                     spdl_index *item) {
    if (sampler == NULL || item == NULL) return SPDL_E_INVALID;
    if (position >= sampler->length) return SPDL_END;
    return spdl__sampler_get(sampler, epoch, position, item);
}

/* --- which position is whose --- */

/* The first position of an epoch that is dealt. */
SPDL__INLINE uint64_t spdl__sampler_first(const spdl_sampler *s, uint64_t epoch) {
    return SPDL__UNLIKELY(s->from != 0 && s->from_epoch == epoch) ? s->from : 0;
}

/* Positions are dealt in rows of `world`, the first to rank 0. Those of a mixture, where sources
   come in a rhythm that a rank could fall into, begin at another rank in each row. It depends on
   where the row begins, so it is the same when a run goes on from there. */
SPDL__PRIVATE uint64_t spdl__sampler_dealt(const spdl_sampler *s, uint64_t epoch, uint64_t rank,
                                           uint64_t row) {
    const uint64_t world = (uint64_t)s->desc.ranks.world;
    const uint64_t begin = spdl__sampler_first(s, epoch) + row * world;
    if (s->desc.order != SPDL_SAMPLE_MIXTURE || world < 2) return begin + rank;
    rank += spdl__wide_product(spdl__hashed(spdl__hashed(s->desc.seed, epoch), begin), world).high;
    return begin + (rank >= world ? rank - world : rank);
}

SPDL_API uint64_t spdl_sampler_count(const spdl_sampler *sampler, uint64_t epoch) {
    const uint64_t rank = (uint64_t)sampler->desc.ranks.rank;
    const uint64_t world = (uint64_t)sampler->desc.ranks.world;
    const uint64_t left = sampler->length - spdl__sampler_first(sampler, epoch);
    const uint64_t rows = left / world;
    if (sampler->desc.tail == SPDL_TAIL_DROP || left % world == 0) return rows;
    return rows + (sampler->desc.tail == SPDL_TAIL_PAD ||
                   spdl__sampler_dealt(sampler, epoch, rank, rows) < sampler->length);
}

/* The position of this rank's item `number`; SPDL__NEVER: it has fewer. */
SPDL__NOINLINE uint64_t spdl__sampler_globally(const spdl_sampler *s, uint64_t epoch,
                                               uint64_t number) {
    uint64_t at;
    if (number >= spdl_sampler_count(s, epoch)) return SPDL__NEVER;
    at = spdl__sampler_dealt(s, epoch, (uint64_t)s->desc.ranks.rank, number);
    return at < s->length ? at : at % s->length; /* of the padding */
}
SPDL__INLINE uint64_t spdl__sampler_global(const spdl_sampler *s, uint64_t epoch, uint64_t number) {
    const uint64_t at = number * (uint64_t)s->desc.ranks.world + (uint64_t)s->desc.ranks.rank;
    if (number >= s->rows) return SPDL__NEVER;
    if (s->from != 0 || s->desc.tail != SPDL_TAIL_KEEP || s->desc.order == SPDL_SAMPLE_MIXTURE)
        return spdl__sampler_globally(s, epoch, number);
    return at < s->length ? at : SPDL__NEVER;
}

SPDL_API spdl_result spdl_sampler_item(spdl_sampler *sampler, uint64_t epoch, uint64_t number,
                                       spdl_index *item) {
    uint64_t position;
    if (sampler == NULL || item == NULL) return SPDL_E_INVALID;
    position = spdl__sampler_global(sampler, epoch, number);
    return position == SPDL__NEVER ? SPDL_END : spdl__sampler_get(sampler, epoch, position, item);
}

/* --- what >>state asks --- */

/* A position as text, while it is written. snprintf takes half a microsecond for as much as these
   functions write in a tenth. */
typedef struct spdl__line {
    char text[SPDL_STATE_BYTES]; /* without a zero at its end */
    size_t length;
    bool full; /* it would be longer, with the zero */
} spdl__line;

static const char spdl__digits[] = "0123456789abcdef";

SPDL__PRIVATE void spdl__line_add(spdl__line *line, const char *text, size_t length) {
    line->full = line->full || length >= sizeof(line->text) - line->length;
    if (line->full) return;
    memcpy(line->text + line->length, text, length);
    line->length += length;
}

SPDL__PRIVATE void spdl__line_number(spdl__line *line, const char *before, uint64_t number) {
    char digits[20];
    size_t at = sizeof(digits);
    do digits[--at] = (char)('0' + number % 10);
    while ((number /= 10) > 0);
    spdl__line_add(line, before, strlen(before));
    spdl__line_add(line, digits + at, sizeof(digits) - at);
}

SPDL__PRIVATE void spdl__line_hex(spdl__line *line, const char *before, uint32_t number) {
    char digits[8];
    int i;
    for (i = 0; i < 8; ++i) digits[i] = spdl__digits[number >> (28 - 4 * i) & 15];
    spdl__line_add(line, before, strlen(before));
    spdl__line_add(line, digits, sizeof(digits));
}

/* The sampler as fields of a line. from=EPOCH:POSITION is there if it still matters. */
SPDL__PRIVATE void spdl__sampler_describe(const spdl_sampler *s, uint64_t epoch, spdl__line *line) {
    spdl__line_add(line, s->identity, strlen(s->identity));
    spdl__line_number(line, " rank=", (uint64_t)s->desc.ranks.rank);
    spdl__line_number(line, "/", (uint64_t)s->desc.ranks.world);
    if (s->from == 0 || s->from_epoch < epoch) return;
    spdl__line_number(line, " from=", s->from_epoch);
    spdl__line_number(line, ":", s->from);
}

/* The value of the field "name=value", which a space or the end of the text follows, and a space
   comes before; NULL: there is none. */
SPDL__PRIVATE const char *spdl__text_field(const char *text, const char *name) {
    const size_t length = strlen(name);
    const char *at;
    for (at = text; (at = strstr(at, name)) != NULL; ++at)
        if (at[length] == '=' && (at == text || at[-1] == ' ')) return at + length + 1;
    return NULL;
}

/* A number of this base, and what follows it: the end, or one of `after`. NULL: there is none that
   fits. */
SPDL__PRIVATE const char *spdl__text_number(const char *at, unsigned base, const char *after,
                                            uint64_t *number) {
    const char *begin = at, *digit;
    for (*number = 0; (digit = (const char *)memchr(spdl__digits, *at, base)) != NULL; ++at) {
        if (*number > (UINT64_MAX - (uint64_t)(digit - spdl__digits)) / base) return NULL;
        *number = *number * base + (uint64_t)(digit - spdl__digits);
    }
    return at != begin && strchr(after, *at) != NULL ? at : NULL;
}

/* Two numbers, "first:second". False: it is something else. */
SPDL__PRIVATE bool spdl__text_pair(const char *at, char between, uint64_t *first,
                                   uint64_t *second) {
    const char middle[2] = { between, '\0' };
    at = spdl__text_number(at, 10, middle, first);
    return at != NULL && *at == between && spdl__text_number(at + 1, 10, " \n", second) != NULL;
}

/* Whether a text that spdl__sampler_describe has written (other words may be around) is of the same
   order of the same data, on whatever rank. */
SPDL__PRIVATE spdl_result spdl__sampler_differs(const spdl_sampler *s, const char *text,
                                                spdl_error *error) {
    char key[8];
    const char *at, *value, *there;
    size_t length;
    for (at = s->identity; *at != '\0'; at = value + length) {
        value = strchr(at, '=') + 1;
        length = strcspn(value, " ");
        (void)snprintf(key, sizeof(key), "%.*s", (int)(value - at - 2), at + 1);
        there = spdl__text_field(text, key);
        if (there == NULL)
            return spdl__error_set(error, SPDL_E_FORMAT, "it says nothing of the sampler's %s",
                                   key);
        if (strcspn(there, " \n") == length && strncmp(there, value, length) == 0) continue;
        return spdl__error_set(error, SPDL_E_INVALID, "%s of the sampler is %.*s, that of the "
                               "saved run was %.*s%s", key, (int)length, value,
                               (int)spdl__min(strcspn(there, " \n"), 32), there,
                               strcmp(key, "spec") == 0 ? ": blocks or mixture differ" : "");
    }
    return SPDL_OK;
}

/* --- ranks from the environment --- */

SPDL_API spdl_result spdl_ranks_from_env(spdl_ranks *ranks, spdl_error *error) {
    /* Slurm's last: mpirun and torchrun within its jobs inherit those of the script. */
    static const char *const names[][2] = { { "RANK", "WORLD_SIZE" },
                                            { "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE" },
                                            { "PMI_RANK", "PMI_SIZE" },
                                            { "SLURM_PROCID", "SLURM_NTASKS" } };
    spdl_ranks found = { 0, 1 };
    uint64_t first, second;
    size_t i;
    if (ranks == NULL) return SPDL_E_INVALID;
    spdl__error_clear(error);
    for (i = 0; i < sizeof(names) / sizeof(names[0]); ++i) {
        const char *rank = spdl__os_environment(names[i][0]);
        const char *world = spdl__os_environment(names[i][1]);
        if (rank == NULL) continue;
        if (world == NULL)
            return spdl__error_set(error, SPDL_E_INVALID, "ranks: %s is set, but %s is not",
                                   names[i][0], names[i][1]);
        if (spdl__text_number(rank, 10, "", &first) == NULL ||
            spdl__text_number(world, 10, "", &second) == NULL || second > INT32_MAX ||
            first >= second)
            return spdl__error_set(error, SPDL_E_INVALID, "ranks: %s is %.32s and %s is "
                                   "%.32s, must be a number and a larger one", names[i][0], rank,
                                   names[i][1], world);
        ranks->rank = (int)first;
        ranks->world = (int)second;
        return SPDL_OK;
    }
    *ranks = found;
    return SPDL_E_NOT_FOUND;
}

/* --- SPDL_INDEX --- */

SPDL__PRIVATE spdl_result spdl__index_stage(spdl_task *task, void *in, void **out) {
    spdl_sampler *s = (spdl_sampler *)spdl_ctx(task);
    spdl_index item, *made;
    spdl_result result;
    (void)in;
    if (s == NULL) return spdl_fail(task, "its sampler is NULL");
    result = spdl_sampler_item(s, spdl_epoch(task), spdl_sequence(task), &item);
    if (result == SPDL_E_INVALID)
        return spdl_fail(task, "index_fn gave %llu for position %llu of epoch %llu, must be less "
                         "than count, %llu", (spdl__llu)item.index, (spdl__llu)item.position,
                         (spdl__llu)item.epoch, (spdl__llu)s->desc.count);
    if (result != SPDL_OK) return result;
    made = (spdl_index *)spdl_buffer(task);
    if (made == NULL) return SPDL_E_NOMEM;
    *made = item;
    *out = made;
    return SPDL_OK;
}

#if defined(SPDL_STATIC) && defined(__cplusplus)
namespace {
#elif defined(SPDL_STATIC)
SPDL__UNUSED static
#endif
const spdl_function spdl_index_spdl = { spdl__index_stage, "spdl_index", "void", "spdl_index" };
#if defined(SPDL_STATIC) && defined(__cplusplus)
}
#endif

/* ============================================================================================= */
/* >>loader-impl
   Who is there. The trainer's process opens a loader. The child makes batches and publishes them;
   the trainer takes them in order. The supervisor, between the two, starts the child and says how
   it ended: it is the child's parent, as a thread of the trainer may end before its process does.

   What they share. The arena: a struct spdl__shared, a ring of entries, notes of calls, a word for
   each slot, and the slots. And the ledger, a page that the child unmaps before it calls anything:
   what the trainer and the supervisor tell each other is safe from what a stage may write. No lock
   is shared, so the death of any of them leaves nothing locked. The trainer trusts nothing that the
   child can write: places and sizes are compared with its own (struct spdl__layout), numbers of
   batches with those it has counted, and how long it waits it knows by its own clock.

   A batch, number n (from 0, over all lives of the child), and its slot s:
       child    words[s] = n + 1        the slot is not the child's
                entry[n] = { s, ... }   then stamp = n + 1 (release): it is published
       trainer  sees the stamp (acquire), reads the entry, then passed = n + 1 (release): the entry
                may be written again
                works on the data, then words[s] = 0 (release): done
       child    sees 0 (acquire): the slot goes back to the pool of its pipeline
   A child that was killed before the stamp has published nothing: the next one takes the slot back,
   as words[s] is more than what was published. One that was killed after it has: the next one
   counts anew, and the supervisor wakes the trainer if it sleeps. (tests/model/loader.pml)

   Sleep. Both sides look some times, then wait for a word that the other one changes: `filled` by
   the child that publishes and by the supervisor, `emptied` by the trainer that is done, commands
   or quits. A waiter counts itself, does a full barrier and looks again; the other side changes
   what is waited for, does a full barrier and looks whether somebody counts. So one of both sees
   the other, and no call is made when nobody sleeps. Both wake now and then all the same, should a
   count have been overwritten. A batch that is only taken wakes nobody: the ring has room for more
   entries than there are batches; only ends fill it.

   Commands. The trainer writes a position (text, sequence), where the ring is at (start_at), and
   `command`, and writes none of them again before it has seen `ack`: what it wants meanwhile it
   keeps, the last one wins. The child starts its pipeline there, takes back what was published from
   start_at on, and writes `begun`, `begun_at` and `ack`; if it refuses, nothing but `refusal` and
   `ack`. So a position that was only asked for is never one to go on from.
       ack == 0         no life has begun: the first command is the beginning, a new pipeline's
       ack == command   nothing is asked
       else             a life obeys in its first turn, after it went where it was: to the last
                        entry if there is one from begun_at on, or to `begun`
   Killed before `begun` the next life obeys again, and nobody has seen the difference: until `ack`
   the trainer looks at no entry. A load, a rewind and a restart are one call (spdl__child_go).

   Threads: in the child all of this runs on its main thread, which is its pipeline's trainer, but
   for notes (any worker). The supervisor has one thread. In the trainer's process it is the
   trainer's, but spdl_loader_done may come from another one. */

#define SPDL__LOADER_LOOK_NS 10000000u /* a trainer that sleeps looks around */
#define SPDL__LOADER_TURN_NS 50000000u /* a child whose pipeline has nothing looks for commands */
#define SPDL__LOADER_STATS_NS 50000000u /* so old its statistics may be */
#define SPDL__LOADER_GRACE_NS 1000000000u /* to end in */
#define SPDL__LOADER_SPARE 4   /* entries without a slot: ends and failures */
#define SPDL__LOADER_NOTES 256 /* threads whose calls are noted: a power of two */
#define SPDL__LOADER_TEXTS 65536

typedef struct spdl__shared_event {
    uint32_t word, waiters;
} spdl__shared_event;

/* Written by the child, before the stamp. */
typedef struct spdl__shared_entry {
    uint64_t stamp;
    int32_t result;  /* SPDL_OK: a batch; else what next of its pipeline has returned */
    uint32_t last;   /* nothing comes after it but by a command */
    uint64_t slot, bytes, count;
    uint64_t number, epoch; /* of the batch; of an end: how many its epoch had */
    char text[SPDL_STATE_BYTES]; /* where to go on, or why that cannot be told */
} spdl__shared_entry;

/* The call that a thread is in. */
typedef struct spdl__shared_note {
    uint64_t thread; /* 0: nobody's */
    uint64_t item;
    uint32_t stage;  /* 1 + row, or 0: in none */
    char pad[44]; /* 64 bytes: threads do not share a line */
} spdl__shared_note;

typedef struct spdl__shared {
    /* written by the child; filled.word by the supervisor, too */
    spdl__shared_event filled; /* waiters: by the trainer */
    uint64_t published;
    uint32_t ack;
    int32_t ack_result;
    uint32_t fault;   /* 1 + the note whose call raised one */
    uint64_t version; /* of stats: odd while they are written */
    spdl_stats stats;
    spdl_error error;   /* of the entry that is a failure */
    spdl_error refusal; /* of the command that was refused last */
    char begun[SPDL_STATE_BYTES]; /* as text of an entry: where the last command has led */
    uint64_t begun_at;            /* and its start_at */
    char pad0[SPDL_CACHE_LINE];
    /* written by the trainer */
    spdl__shared_event emptied; /* waiters: by the child */
    uint32_t command;
    uint32_t quits;
    uint64_t start_at; /* the entry that the run of the last command begins with */
    uint64_t sequence; /* where: this item, or if there are texts, what they say */
    uint64_t texts;
    uint64_t passed;
    char text[SPDL__LOADER_TEXTS]; /* one after the other, each with its zero */
} spdl__shared;

/* What the child cannot write. */
typedef struct spdl__ledger {
    /* written by the trainer */
    uint32_t quits;
    uint32_t hangs; /* 1 + the life that is to be ended as it hangs */
    /* written by the supervisor */
    uint32_t ends;  /* lives that have ended */
    uint32_t gone;  /* for good */
    uint32_t hangs_seen; /* of `hangs`: it was killed */
    uint32_t restarts;
    int64_t process; /* by the child, too, as it begins: it may publish first */
    spdl_error end; /* how the last one has ended */
} spdl__ledger;

/* Sizes and places, each process's own. */
typedef struct spdl__layout {
    int stages, row;  /* that makes the batches */
    int slots, quota; /* of them for the trainer */
    uint64_t ring;    /* entries, a power of two */
    uint64_t stride;  /* of a slot: `head` bytes of the pipeline's, then the data */
    uint64_t head, room;
    uint64_t item;    /* bytes of an item of SPDL_BATCH; 0: a batch is one item */
    uint64_t entries, notes, words, data, bytes;
} spdl__layout;

struct spdl_loader {
    /* written by open */
    spdl_loader_desc desc;
    const spdl_stage *rows; /* in open, and in the other processes */
    size_t count;
    char name[SPDL_NAME_BYTES];
    uint64_t process;
    uint32_t *mark;     /* 1, but 0 in the child of a fork; or NULL */
    int64_t supervisor; /* 0: there is none any more */
    spdl__layout layout;
    spdl__ledger *ledger;
    spdl__shared *shared; /* the memory, with its parts: */
    spdl__shared_entry *entries;
    spdl__shared_note *notes;
    uint64_t *words;
    char *slots;
    char stage_name[SPDL_MAX_STAGES][SPDL_NAME_BYTES];
    spdl_loader_batch *held; /* of each slot; the ticket goes to 0 by any thread */
    uint32_t holds;          /* batches in the trainer's hands; by any thread */
    /* written by the trainer */
    uint64_t at;        /* the next entry */
    uint64_t number, epoch;
    bool last;          /* no epoch follows */
    bool slept;         /* the last wait did */
    bool commanded;     /* until the child has obeyed `command` */
    bool wants;         /* one more command, which waits for that */
    uint32_t command, ends; /* ends: of lives, that were logged */
    uint64_t since;     /* when the wait has begun, or 0: the child owes nothing */
    uint64_t looked_ns; /* when it has looked around last */
    uint64_t asked_ns;  /* when the supervisor was asked to end a child that hangs, or 0 */
    uint64_t taken, wait_ns;
    char text[SPDL_STATE_BYTES]; /* of the last entry */
    spdl_error error;
    uint64_t wanted_sequence, wanted_texts; /* of the command to come: as spdl__shared has them */
    char wanted[SPDL__LOADER_TEXTS];
};

#if SPDL__OS_PROCESSES
/* A slot, as the child sees it. */
typedef struct spdl__child_slot {
    void *item;    /* lent to the trainer, by the main thread; itself: by an earlier life */
    uint32_t used; /* by any thread */
} spdl__child_slot;

typedef struct spdl__child {
    /* written when it begins */
    spdl_loader *loader;
    spdl_pipeline *pipeline; /* NULL: it could not be made */
    spdl_error failure;
    spdl_profiler profiler;  /* the user's */
    spdl_allocator blocks;
    spdl__os_signals signals; /* that are blocked in the trainer */
    bool continuous;
    spdl__child_slot *slot;
    /* written by the main thread */
    int lendings;
    uint64_t published, number, epoch;
    uint32_t command;
    bool over; /* the pipeline has ended */
    uint64_t stats_ns;
} spdl__child;

SPDL__PRIVATE uint32_t spdl__state_sum(const char *text, size_t length); /* (>>state-impl) */

/* --- places --- */

SPDL__COLD bool spdl__layout_plan(spdl__layout *y) {
    const uint64_t page = SPDL__OS_PAGE, slots = (uint64_t)y->slots;
    y->ring = spdl__pow2((uint64_t)y->quota + SPDL__LOADER_SPARE);
    y->entries = spdl__line_up(sizeof(spdl__shared));
    y->notes = spdl__line_up((size_t)(y->entries + y->ring * sizeof(spdl__shared_entry)));
    y->words = y->notes + SPDL__LOADER_NOTES * sizeof(spdl__shared_note);
    y->data = (y->words + slots * sizeof(uint64_t) + page - 1) / page * page;
    y->stride = spdl__line_up((size_t)(y->head + y->room));
    if (y->stride > ((uint64_t)1 << 46) / slots) return false;
    y->bytes = (y->data + slots * y->stride + page - 1) / page * page;
    return true;
}

SPDL__PRIVATE spdl__shared_entry *spdl__loader_entry(const spdl_loader *l, uint64_t n) {
    return &l->entries[n & (l->layout.ring - 1)];
}

SPDL__PRIVATE void spdl__shared_notify(spdl__shared_event *event) {
    spdl__full_barrier();
    if (spdl__load_relaxed32(&event->waiters) != 0) spdl__os_shared_wake(&event->word);
}

/* A text that somebody may change while it is copied: it has an end. */
SPDL__PRIVATE void spdl__text_take(char to[SPDL_STATE_BYTES], const char *from) {
    const void *end = memchr(from, '\0', SPDL_STATE_BYTES - 1);
    const size_t length = end != NULL ? (size_t)((const char *)end - from) : SPDL_STATE_BYTES - 1;
    memcpy(to, from, length);
    to[length] = '\0';
}

/* Which batch of which epoch comes after a position; 0 of 0 if it is none. */
SPDL__PRIVATE void spdl__text_numbers(const char *text, uint64_t *number, uint64_t *epoch) {
    const char *delivered = spdl__text_field(text, "delivered");
    const char *at = spdl__text_field(text, "epoch");
    *number = *epoch = 0;
    if (delivered == NULL || spdl__text_number(delivered, 10, " ", number) == NULL) *number = 0;
    if (at == NULL || spdl__text_number(at, 10, " ", epoch) == NULL) *epoch = 0;
}

/* --- the slots of the child --- */

/* A block of the row that makes the batches is a slot; what else the row needs is told by its size.
   To take one pairs with the stores of 0: who had it is done with it. */
SPDL__PRIVATE void *spdl__child_alloc(size_t bytes, size_t align, void *user) {
    const spdl__child *child = (const spdl__child *)user;
    const spdl__layout *y = &child->loader->layout;
    int slot;
    if (bytes != y->head + y->room)
        return spdl__alloc(&child->loader->desc.pipeline.allocator, bytes, align);
    for (slot = 0; slot < y->slots; ++slot)
        if (spdl__exchange32(&child->slot[slot].used, 1) == 0)
            return child->loader->slots + (uint64_t)slot * y->stride;
    return NULL;
}

SPDL__PRIVATE void spdl__child_free(void *memory, size_t bytes, void *user) {
    const spdl__child *child = (const spdl__child *)user;
    const spdl__layout *y = &child->loader->layout;
    const uint64_t slot = ((uintptr_t)memory - (uintptr_t)child->loader->slots) / y->stride;
    if (slot < (uint64_t)y->slots) spdl__store32(&child->slot[slot].used, 0);
    else spdl__free(&child->loader->desc.pipeline.allocator, memory, bytes);
}

SPDL__PRIVATE void spdl__child_give_back(spdl__child *child, int slot) {
    spdl__child_slot *s = &child->slot[slot];
    if (s->item == s)
        spdl__store32(&s->used, 0);
    else if (child->loader->layout.item > 0)
        spdl_batch_free(s->item);
    else
        spdl_buffer_free(s->item);
    s->item = NULL;
    --child->lendings;
}

/* Slots that the trainer is done with are the pipeline's again. */
SPDL__PRIVATE void spdl__child_reclaim(spdl__child *child) {
    int slot;
    for (slot = 0; child->lendings > 0 && slot < child->loader->layout.slots; ++slot)
        if (child->slot[slot].item != NULL && spdl__load(&child->loader->words[slot]) == 0)
            spdl__child_give_back(child, slot);
}

/* --- the child publishes --- */

/* Its statistics, for whoever looks: by `version` they see whether they have read half of them. */
SPDL__PRIVATE void spdl__child_stats(spdl__child *child, uint64_t now) {
    spdl__shared *s = child->loader->shared;
    const uint64_t version = spdl__load_relaxed(&s->version);
    spdl_stats stats;
    if (child->pipeline == NULL || now < child->stats_ns) return;
    child->stats_ns = now + SPDL__LOADER_STATS_NS;
    spdl_pipeline_stats(child->pipeline, &stats);
    spdl__store_relaxed(&s->version, version | 1);
    spdl__full_barrier();
    memcpy(&s->stats, &stats, sizeof(stats));
    spdl__store(&s->version, (version | 1) + 1);
}

SPDL__PRIVATE void spdl__child_publish(spdl__child *child, spdl_result result, bool last) {
    spdl__shared *s = child->loader->shared;
    spdl__shared_entry *entry = spdl__loader_entry(child->loader, child->published);
    entry->result = (int32_t)result;
    entry->last = last;
    entry->number = child->number;
    entry->epoch = child->epoch;
    entry->text[0] = '\0';
    if (child->pipeline != NULL)
        (void)spdl_state_save(child->pipeline, entry->text, sizeof(entry->text));
    if (result == SPDL_OK) ++child->number;
    if (result == SPDL_END) {
        child->number = 0;
        ++child->epoch;
    }
    child->over = last;
    SPDL_TEST_POINT("loader publishes");
    spdl__store(&entry->stamp, child->published + 1); /* pairs with loader_look */
    spdl__store(&s->published, ++child->published);
    SPDL_TEST_POINT("loader published");
    spdl__shared_notify(&s->filled);
}

/* Nothing more comes of the child's pipeline: `error` says why. */
SPDL__COLD void spdl__child_fail(spdl__child *child, const spdl_error *error) {
    child->loader->shared->error = *error;
    spdl__child_publish(child, error->result, true);
}

/* A batch of the pipeline: where its block begins, a slot. */
SPDL__PRIVATE void spdl__child_batch_out(spdl__child *child, void *item) {
    const spdl_loader *l = child->loader;
    const spdl__layout *y = &l->layout;
    const uint64_t at = (uintptr_t)item - (uintptr_t)l->slots, slot = at / y->stride;
    spdl__shared_entry *entry = spdl__loader_entry(l, child->published);
    spdl_error error;
    if (slot >= (uint64_t)y->slots || at % y->stride != (y->item > 0 ? 0 : y->head)) {
        spdl__error_clear(&error);
        (void)spdl__error_set(&error, SPDL_E_INVALID,
                              "loader '%s': an item does not lie in a slot: rows after stage "
                              "%d '%s', the last one with .item_bytes, may only hand on what it "
                              "makes", l->name, y->row, l->stage_name[y->row]);
        spdl__child_fail(child, &error);
        return;
    }
    child->slot[slot].item = item;
    ++child->lendings;
    spdl__store_relaxed(&l->words[slot], child->published + 1);
    entry->slot = slot;
    entry->count = y->item > 0 ? ((const spdl_batch *)item)->count : 1;
    entry->bytes = y->item > 0 ? y->item * entry->count : y->room;
    spdl__child_publish(child, SPDL_OK, false);
}

/* Whether one more entry may be published: the slots for the trainer are not all out, and it is not
   too far behind. */
SPDL__PRIVATE bool spdl__child_room(const spdl__child *child) {
    const spdl_loader *l = child->loader;
    return child->lendings < l->layout.quota &&
           child->published - spdl__load(&l->shared->passed) + 1 < l->layout.ring;
}

/* Starts the pipeline where the texts say, or at an item. Before the first command it is new, and
   at item 0. */
SPDL__COLD spdl_result spdl__child_go(spdl__child *child, const char *text, uint64_t texts,
                                      uint64_t sequence, spdl_error *error) {
    const char *at[SPDL__LOADER_TEXTS / 64];
    const char *const end = text + SPDL__LOADER_TEXTS;
    spdl_result result = SPDL_OK;
    uint64_t i;
    if (child->pipeline == NULL) {
        *error = child->failure;
        return error->result;
    }
    spdl__error_clear(error);
    if (texts == 0 && (sequence > 0 || child->command > 0)) {
        result = spdl_pipeline_rewind(child->pipeline, sequence, SPDL_FOREVER);
        if (result != SPDL_OK) *error = *spdl_pipeline_error(child->pipeline);
        if (result != SPDL_OK && error->result != result)
            (void)spdl__error_set(error, result, "loader '%s': its pipeline cannot be "
                                  "rewound: %s", child->loader->name, spdl_result_text(result));
    } else if (texts > 0) {
        for (i = 0; i < texts && i < SPDL__LOADER_TEXTS / 64 && text < end; ++i) {
            at[i] = text;
            text += strlen(text) + 1;
        }
        result = spdl_state_load(child->pipeline, at, (int)i, SPDL_FOREVER, error);
    }
    return result;
}

/* What was published since the run that a command begins is taken back. */
SPDL__COLD void spdl__child_take_back(spdl__child *child, uint64_t from) {
    const spdl_loader *l = child->loader;
    while (child->published > from && child->published - from <= l->layout.ring) {
        spdl__shared_entry *entry = spdl__loader_entry(l, --child->published);
        const uint64_t slot = entry->slot;
        if (entry->result == SPDL_OK && slot < (uint64_t)l->layout.slots &&
            spdl__load_relaxed(&l->words[slot]) == child->published + 1)
            spdl__store_relaxed(&l->words[slot], 0);
        spdl__store(&entry->stamp, 0);
    }
    spdl__store(&l->shared->published, child->published);
    spdl__child_reclaim(child);
}

/* Where it is now. */
SPDL__COLD void spdl__child_count(spdl__child *child, char text[SPDL_STATE_BYTES]) {
    text[0] = '\0';
    if (child->pipeline != NULL)
        (void)spdl_state_save(child->pipeline, text, SPDL_STATE_BYTES);
    spdl__text_numbers(text, &child->number, &child->epoch);
}

/* Does what the trainer commands. If that is refused all is as before. */
SPDL__COLD void spdl__child_obey(spdl__child *child, uint32_t command) {
    spdl__shared *s = child->loader->shared;
    spdl_error error;
    const spdl_result result = spdl__child_go(child, s->text, s->texts, s->sequence, &error);
    child->command = command;
    if (result == SPDL_OK) {
        spdl__child_take_back(child, spdl__load_relaxed(&s->start_at));
        child->over = false;
        spdl__child_count(child, s->begun);
        s->begun_at = s->start_at;
    } else {
        s->refusal = error;
    }
    s->ack_result = (int32_t)result;
    spdl__store32(&s->ack, command); /* pairs with loader_obeyed: the entries are as they will be */
    spdl__shared_notify(&s->filled);
}

/* Whether there is nothing to do. */
SPDL__PRIVATE bool spdl__child_waits(spdl__child *child) {
    const spdl__shared *s = child->loader->shared;
    spdl__child_reclaim(child);
    return (child->over || !spdl__child_room(child)) && !spdl__load32(&s->quits) &&
           spdl__load32(&s->command) == child->command;
}

/* Looks, then sleeps until the trainer has done something, or the deadline. */
SPDL__PRIVATE void spdl__child_sleep(spdl__child *child, uint64_t deadline) {
    spdl__shared_event *emptied = &child->loader->shared->emptied;
    int round = 0;
    uint32_t word;
    while (spdl__child_waits(child) && spdl__backoff(&round, SPDL__IDLE_YIELDS)) {}
    word = spdl__load32(&emptied->word);
    spdl__add32(&emptied->waiters, 1);
    spdl__full_barrier(); /* pairs with shared_notify */
    if (spdl__child_waits(child)) spdl__os_shared_sleep(&emptied->word, word, deadline);
    spdl__sub32(&emptied->waiters, 1);
}

/* What the child does, over and over: obeys, takes slots back, takes a batch and publishes it. */
SPDL__PRIVATE void spdl__child_turn(spdl__child *child) {
    const uint32_t command = spdl__load32(&child->loader->shared->command);
    const uint64_t now = spdl_time_ns(); /* the load pairs with loader_command */
    spdl_result result;
    void *item;
    if (command != child->command) spdl__child_obey(child, command);
    spdl__child_reclaim(child);
    spdl__child_stats(child, now);
    if (child->over || !spdl__child_room(child)) {
        spdl__child_sleep(child, now + SPDL__LOADER_TURN_NS);
        return;
    }
    result = spdl_pipeline_next(child->pipeline, &item, SPDL__LOADER_TURN_NS);
    if (result == SPDL_TIMEOUT) return;
    if (result != SPDL_OK) child->stats_ns = 0;
    if (result == SPDL_OK)
        spdl__child_batch_out(child, item);
    else if (result == SPDL_END || result == SPDL_CLOSED)
        spdl__child_publish(child, result, result == SPDL_CLOSED || !child->continuous);
    else
        spdl__child_fail(child, spdl_pipeline_error(child->pipeline));
    if (child->over) spdl__child_stats(child, spdl_time_ns());
}

/* --- the child's calls, so that its end can name them --- */

/* The note of this thread, which it finds by its number; NULL: there are too many threads. */
SPDL__PRIVATE spdl__shared_note *spdl__child_note(spdl__child *child) {
    const uint64_t thread = spdl__os_thread_id();
    const uint64_t first = spdl__mix(thread);
    uint64_t i;
    for (i = 0; i < SPDL__LOADER_NOTES; ++i) {
        const uint64_t at = (first + i) % SPDL__LOADER_NOTES;
        spdl__shared_note *note = &child->loader->notes[at];
        uint64_t has = spdl__load_relaxed(&note->thread);
        if (has == thread) return note;
        if (has != 0 || !spdl__cas(&note->thread, &has, thread)) continue;
        /* it is new: programs that it starts can be ended, and its faults are noted */
        spdl__os_signals_set(&child->signals, NULL);
        spdl__os_faults_note(&child->loader->shared->fault, (uint32_t)at + 1);
        return note;
    }
    return NULL;
}

/* The row that has a name. */
SPDL__PRIVATE int spdl__child_row(const spdl_loader *l, const char *name) {
    int i = 0;
    while (i < l->layout.stages - 1 && strcmp(l->stage_name[i], name) != 0) ++i;
    return i;
}

/* What the pipeline tells its profiler. */
SPDL__PRIVATE void spdl__child_event(spdl_event event, const char *name, uint64_t number,
                                     void *user) {
    spdl__child *child = (spdl__child *)user;
    spdl__shared_note *note = NULL;
    if (event == SPDL_EVENT_TASK_BEGIN || event == SPDL_EVENT_TASK_END)
        note = spdl__child_note(child);
    if (note != NULL && event == SPDL_EVENT_TASK_BEGIN) {
        spdl__store_relaxed(&note->item, number);
        spdl__store32(&note->stage, 1 + (uint32_t)spdl__child_row(child->loader, name));
    } else if (note != NULL) {
        spdl__store32(&note->stage, 0); /* pairs with supervisor_add_calls, as the other one */
    }
    if (child->profiler.event_fn != NULL)
        child->profiler.event_fn(event, name, number, child->profiler.user);
}

/* --- the child begins and ends --- */

/* For stderr, where no log_fn was given. */
SPDL__COLD void spdl__child_log(spdl_log_level level, const char *text, void *user) {
    if (level <= SPDL_LOG_WARN)
        (void)fprintf(stderr, "%s: %s\n", ((const spdl__child *)user)->loader->name, text);
}

/* What a life before this one has left: what was published, and the slots that are not ours. */
SPDL__COLD void spdl__child_inherit(spdl__child *child) {
    const spdl_loader *l = child->loader;
    spdl__shared *s = l->shared;
    int slot;
    child->published = spdl__load(&s->published);
    if (spdl__loader_entry(l, child->published)->stamp == child->published + 1)
        spdl__store(&s->published, ++child->published); /* it was killed before it said so */
    for (slot = 0; slot < l->layout.slots; ++slot) {
        const uint64_t word = spdl__load(&l->words[slot]);
        if (word > child->published) spdl__store_relaxed(&l->words[slot], 0);
        if (word == 0 || word > child->published) continue;
        child->slot[slot].used = 1;
        child->slot[slot].item = &child->slot[slot];
        ++child->lendings;
    }
    memset(l->notes, 0, SPDL__LOADER_NOTES * sizeof(*l->notes));
    spdl__store32(&s->fault, 0);
    spdl__store32(&s->emptied.waiters, 0);
    child->command = spdl__load32(&s->ack);
}

/* The rows, with blocks of the one that makes the batches in slots. */
SPDL__COLD void spdl__child_create(spdl__child *child) {
    spdl_loader *l = child->loader;
    spdl_pipeline_desc desc = l->desc.pipeline;
    spdl_stage *rows = (spdl_stage *)SPDL_MALLOC(l->count * sizeof(*rows));
    size_t i;
    if (rows == NULL) {
        (void)spdl__error_set(&child->failure, SPDL_E_NOMEM, "loader: out of memory");
        return;
    }
    memcpy(rows, l->rows, l->count * sizeof(*rows));
    rows[l->layout.row].allocator = &child->blocks;
    for (i = 0; i < l->count; ++i) child->continuous = child->continuous || rows[i].continuous;
    desc.error = &child->failure;
    desc.doctor = NULL;
    if (desc.name == NULL) desc.name = l->name;
    if (desc.logger.log_fn == NULL) {
        desc.logger.log_fn = spdl__child_log;
        desc.logger.user = child;
    }
    child->profiler = desc.profiler;
    desc.profiler.event_fn = spdl__child_event;
    desc.profiler.user = child;
    (void)spdl_pipeline_create(&child->pipeline, &desc, rows, l->count);
    SPDL_FREE(rows);
}

/* Goes on after what was published last, or where the last command has led. If that fails a failure
   is published. A command that nobody has obeyed comes next. */
SPDL__COLD void spdl__child_begin(spdl__child *child) {
    const spdl_loader *l = child->loader;
    const char *from = l->shared->begun;
    char text[SPDL_STATE_BYTES];
    spdl__child_inherit(child);
    spdl__child_create(child);
    if (child->published > l->shared->begun_at) {
        const spdl__shared_entry *last = spdl__loader_entry(l, child->published - 1);
        from = last->text;
        child->over = last->last != 0;
    }
    if (child->over || (child->command == 0 && child->pipeline != NULL)) return;
    spdl__text_take(text, from);
    if (spdl__child_go(child, text, 1, 0, &child->failure) != SPDL_OK)
        spdl__child_fail(child, &child->failure);
    else
        spdl__child_count(child, text);
}

/* --- the supervisor --- */

typedef struct spdl__supervisor {
    spdl_loader *l;
    int64_t parent;
    spdl__os_signals signals; /* that are blocked in the trainer */
    uint64_t quits_ns; /* the child has to be gone by then; 0: it runs */
    const char *why;   /* it was killed by us; or NULL */
    bool lost;         /* it could not be waited for: who knows whether it is gone */
} spdl__supervisor;

/* The process of the child: does not return. */
SPDL__COLD void spdl__child_main(spdl__supervisor *v, int64_t supervisor) {
    spdl_loader *l = v->l;
    const char *reason =
        spdl__os_process_begins(supervisor, l->name, false, &v->signals);
    spdl__child *child = (spdl__child *)SPDL_MALLOC(sizeof(*child));
    spdl__child_slot *slots =
        (spdl__child_slot *)SPDL_MALLOC((size_t)l->layout.slots * sizeof(*slots));
    int slot;
    l->ledger->process = (int64_t)spdl__os_process_id(); /* whoever is first */
    spdl__os_file_unmap((const uint8_t *)l->ledger, SPDL__OS_PAGE);
    spdl__os_forget("SPDL_DOCTOR");
    if (reason != NULL || child == NULL || slots == NULL) {
        (void)fprintf(stderr, "loader '%s': the child cannot begin: %s\n", l->name,
                      reason != NULL ? reason : "out of memory");
        _exit(1);
    }
    memset(child, 0, sizeof(*child));
    memset(slots, 0, (size_t)l->layout.slots * sizeof(*slots));
    child->loader = l;
    child->slot = slots;
    child->signals = v->signals;
    child->blocks.alloc_fn = spdl__child_alloc;
    child->blocks.free_fn = spdl__child_free;
    child->blocks.user = child;
    spdl__error_clear(&child->failure);
    spdl__os_faults_watch();
    SPDL_TEST_POINT("loader child begins");
    spdl__child_begin(child);
    while (!spdl__load32(&l->shared->quits)) spdl__child_turn(child);
    for (slot = 0; child->lendings > 0 && slot < l->layout.slots; ++slot)
        if (child->slot[slot].item != NULL) spdl__child_give_back(child, slot);
    spdl_pipeline_destroy(child->pipeline);
    (void)fflush(NULL);
    _exit(0);
}

/* The next call that the child was in, by items; NULL: there is none. Of a fault only the one that
   has raised it. */
SPDL__COLD const spdl__shared_note *spdl__supervisor_call(const spdl_loader *l,
                                                          const spdl__shared_note *last) {
    const uint32_t raised = spdl__load32(&l->shared->fault);
    const spdl__shared_note *note, *next = NULL;
    for (note = l->notes; note < l->notes + SPDL__LOADER_NOTES; ++note) {
        if (raised > 0 && raised <= SPDL__LOADER_NOTES && note != &l->notes[raised - 1]) continue;
        if (spdl__load32(&note->stage) == 0) continue;
        if (last != NULL && (note->item < last->item || (note->item == last->item && note <= last)))
            continue;
        if (next == NULL || note->item < next->item) next = note;
    }
    return next;
}

/* Which calls it was in, the first of them. The error is that of the first. */
SPDL__COLD void spdl__supervisor_add_calls(const spdl_loader *l, spdl__text *t, spdl_error *end) {
    const spdl__shared_note *call = NULL;
    char words[SPDL_TEXT_BYTES / 2];
    spdl__text calls = spdl__text_start(words, sizeof(words));
    int count = 0;
    while (count < 8 && (call = spdl__supervisor_call(l, call)) != NULL) {
        const uint32_t stage = spdl__load32(&call->stage) - 1;
        if (stage >= (uint32_t)l->layout.stages) continue;
        spdl__text_add(&calls, "%s stage %u '%s', item %llu", count > 0 ? "," : "", stage,
                       l->stage_name[stage], (spdl__llu)call->item);
        if (count++ > 0) continue;
        end->stage = (int)stage;
        end->item = call->item;
        spdl__name_copy(end->stage_name, l->stage_name[stage]);
    }
    spdl__text_add(t, "%s%s", count == 0   ? ", outside of calls of stages"
                              : count == 1 ? ", in" : "; calls that ran:", words);
}

/* Says how the child has ended, after all it has published. */
SPDL__COLD void spdl__supervisor_gone(spdl__supervisor *v, const spdl_error *end, bool gone) {
    spdl__ledger *ledger = v->l->ledger;
    ledger->end = *end;
    if (!gone) spdl__store32(&ledger->restarts, ledger->restarts + 1);
    if (gone) spdl__store32(&ledger->gone, 1); /* pairs with loader_sleep; log_ends sees it, too */
    spdl__store32(&ledger->ends, ledger->ends + 1);
    spdl__os_shared_wake(&v->l->shared->filled.word);
}

/* Whether the child, which ended so, is to be started again. */
SPDL__COLD bool spdl__supervisor_ended(spdl__supervisor *v, int how) {
    const spdl_loader *l = v->l;
    char begun[SPDL_STATE_BYTES];
    bool again = !v->lost && l->ledger->restarts < (uint32_t)l->desc.max_restarts;
    spdl_error end;
    spdl__text t = spdl__text_start(end.text, sizeof(end.text));
    spdl__error_clear(&end);
    end.result = SPDL_E_PROCESS;
    spdl__text_add(&t, "loader '%s': the child ", l->name);
    if (v->why != NULL)
        spdl__text_add(&t, "was killed, as it %s", v->why);
    else if (how < 0)
        spdl__text_add(&t, "was killed by %s", spdl__os_signal_name(-how));
    else
        spdl__text_add(&t, "has ended with code %d%s", how,
                       how == 0 ? ", but not its source" : "");
    spdl__supervisor_add_calls(l, &t, &end);
    spdl__text_take(begun, l->shared->begun);
    if (again && strncmp(begun, "", 6) == 0) {
        spdl__text_add(&t, "; it is not started again: %.200s", begun + 6);
        again = false;
    }
    spdl__supervisor_gone(v, &end, !again);
    return again;
}

/* Until the child has ended: how. */
SPDL__COLD int spdl__supervisor_watch(spdl__supervisor *v, int64_t child) {
    spdl__ledger *ledger = v->l->ledger;
    int how = 0, ended;
    v->why = NULL;
    for (;;) {
        const uint64_t now = spdl_time_ns();
        ended = spdl__os_process_ended(child, &how);
        v->lost = ended < 0;
        if (v->lost) v->why = "could not be waited for";
        if (ended != 0) break;
        if (spdl__os_parent() != v->parent || (v->quits_ns != 0 && now >= v->quits_ns)) break;
        if (v->quits_ns == 0 && spdl__load32(&ledger->quits) != 0)
            v->quits_ns = now + SPDL__LOADER_GRACE_NS;
        if (v->why == NULL && spdl__load32(&ledger->hangs) == ledger->ends + 1) {
            v->why = "made nothing for hang_timeout";
            spdl__os_process_signal(-child, SIGKILL);
            spdl__store32(&ledger->hangs_seen, ledger->ends + 1);
        }
        spdl__os_signal_wait(v->quits_ns != 0 ? spdl__grown(now, v->quits_ns)
                                              : SPDL__LOADER_GRACE_NS);
    }
    spdl__os_process_signal(-child, SIGKILL); /* and all that it has started */
    while (ended == 0 && spdl__os_process_ended(child, &how) == 0)
        spdl__os_signal_wait(SPDL__LOADER_LOOK_NS);
    return how;
}

/* This process is the supervisor of `l`, and its parent is the trainer. Does not return. */
SPDL__COLD void spdl__supervisor_main(spdl_loader *l, int64_t parent) {
    const int64_t self = (int64_t)spdl__os_process_id();
    spdl__supervisor v;
    const char *reason;
    spdl_error end;
    bool again = true;
    memset(&v, 0, sizeof(v));
    v.l = l;
    v.parent = parent;
    reason = spdl__os_process_begins(parent, "spdl-loader", true, &v.signals);
    while (again && reason == NULL) {
        int64_t child = 0;
        int how;
        reason = spdl__os_fork(&child);
        if (reason != NULL) break;
        if (child == 0) spdl__child_main(&v, self);
        spdl__os_group_make(child); /* as it does itself: whoever is first */
        l->ledger->process = child;
        how = spdl__supervisor_watch(&v, child);
        l->ledger->process = 0;
        if (spdl__load32(&l->ledger->quits) != 0 || spdl__os_parent() != parent) _exit(0);
        again = spdl__supervisor_ended(&v, how);
    }
    if (reason != NULL) {
        spdl__error_clear(&end);
        (void)spdl__error_set(&end, SPDL_E_PROCESS,
                              "loader '%s': the child could not be started: %.60s", l->name,
                              reason);
        spdl__supervisor_gone(&v, &end, true);
    }
    while (spdl__os_parent() == parent && spdl__load32(&l->ledger->quits) == 0)
        spdl__os_signal_wait(SPDL__LOADER_GRACE_NS);
    _exit(0);
}

/* --- the trainer takes --- */

/* What the trainer's calls return from now on, or why it cannot be opened. */
SPDL__PRINTF(3, 4)
SPDL__COLD spdl_result spdl__loader_fail(spdl_loader *l, spdl_result result, const char *format,
                                         ...) {
    char text[SPDL_TEXT_BYTES - 80];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    spdl__error_clear(&l->error);
    (void)spdl__error_set(&l->error, result, "loader '%s': %s", l->name, text);
    spdl__log(&l->desc.logger, SPDL_LOG_ERROR, l->error.text);
    return result;
}

SPDL__COLD spdl_result spdl__loader_torn(spdl_loader *l, const char *what) {
    return spdl__loader_fail(l, SPDL_E_PROCESS,
                             "what the child has published makes no sense: %s; something has "
                             "overwritten the shared memory", what);
}

/* A failure, as it was recorded elsewhere. */
SPDL__COLD spdl_result spdl__loader_failed(spdl_loader *l, const spdl_error *error,
                                           int32_t result) {
    l->error = *error;
    l->error.text[SPDL_TEXT_BYTES - 1] = l->error.stage_name[SPDL_NAME_BYTES - 1] = '\0';
    if (l->error.stage < -1 || l->error.stage >= l->layout.stages) l->error.stage = -1;
    if (result >= 0 || (int32_t)l->error.result != result) return spdl__loader_torn(l, "a failure");
    return l->error.result;
}

/* The batch of an entry is ours now. */
SPDL__PRIVATE spdl_result spdl__loader_take(spdl_loader *l, const spdl__shared_entry *entry,
                                            spdl_loader_batch *batch) {
    const uint64_t slot = entry->slot, bytes = entry->bytes, count = entry->count;
    const uint64_t item = l->layout.item;
    spdl_loader_batch *held;
    if (slot >= (uint64_t)l->layout.slots || bytes > l->layout.room || count == 0 ||
        (item > 0 ? bytes % item != 0 || bytes / item != count : count != 1))
        return spdl__loader_torn(l, "a batch");
    held = &l->held[slot];
    if (spdl__load_relaxed(&held->ticket_) != 0)
        return spdl__loader_torn(l, "a batch in a slot that we have");
    held->slot_ = (int)slot;
    held->data = l->slots + slot * l->layout.stride + l->layout.head;
    held->bytes = (size_t)bytes;
    held->count = (size_t)count;
    held->sequence = l->number;
    held->epoch = l->epoch;
    held->loader_ = l;
    spdl__store_relaxed(&held->ticket_, l->at + 1);
    spdl__add32(&l->holds, 1);
    ++l->taken;
    *batch = *held;
    return SPDL_OK;
}

/* What is there: SPDL_OK with a batch, an end, a failure; or SPDL_EMPTY. */
SPDL__PRIVATE spdl_result spdl__loader_look(spdl_loader *l, spdl_loader_batch *batch) {
    const spdl__shared_entry *entry = spdl__loader_entry(l, l->at);
    spdl_result result;
    if (l->last) return SPDL_END;
    /* pairs with child_publish: the entry is written, and the batch */
    if (spdl__load(&entry->stamp) != l->at + 1) return SPDL_EMPTY;
    result = (spdl_result)entry->result;
    if (result != SPDL_OK && result != SPDL_END && result != SPDL_CLOSED)
        return spdl__loader_failed(l, &l->shared->error, entry->result);
    if (entry->number != l->number || entry->epoch != l->epoch)
        return spdl__loader_torn(l, result == SPDL_OK ? "the number of a batch"
                                                      : "the number of batches at an end");
    if (result == SPDL_CLOSED) return result;
    if (result == SPDL_OK && spdl__loader_take(l, entry, batch) != SPDL_OK) return SPDL_E_PROCESS;
    spdl__text_take(l->text, entry->text);
    ++l->number;
    if (result == SPDL_END) {
        l->last = entry->last != 0;
        l->number = 0;
        ++l->epoch;
    }
    /* the entry was read, and may be written again: pairs with child_room */
    spdl__store(&l->shared->passed, ++l->at);
    if (result == SPDL_END) spdl__shared_notify(&l->shared->emptied);
    return result;
}

/* --- the trainer waits --- */

/* Whether the child was started again: the log says why, and the wait begins anew. */
SPDL__COLD void spdl__loader_log_ends(spdl_loader *l) {
    const uint32_t ends = spdl__load32(&l->ledger->ends);
    if (ends == l->ends) return;
    l->ends = ends;
    l->asked_ns = 0;
    l->since = spdl_time_ns();
    if (spdl__load32(&l->ledger->gone)) return;
    spdl__logf(&l->desc.logger, SPDL_LOG_WARN, "%s; started again (%u starts so far)",
               l->ledger->end.text, l->ledger->restarts);
}

/* Whether the supervisor is still there, and whether the child hangs. A supervisor that was asked
   to end one has a second to do it; what it has killed may take longer to go. */
SPDL__COLD spdl_result spdl__loader_look_around(spdl_loader *l, uint64_t now) {
    const uint64_t most = spdl__load32(&l->ledger->hangs_seen) == l->ledger->hangs ? 30 : 1;
    int how;
    l->looked_ns = now;
    if (l->asked_ns != 0 && now - l->asked_ns > most * SPDL__LOADER_GRACE_NS)
        spdl__os_process_signal(l->supervisor, SIGKILL); /* it does nothing, either */
    if (spdl__os_process_ended(l->supervisor, &how) == 1) {
        spdl__os_process_signal(-l->ledger->process, SIGKILL); /* and what it has started */
        l->ledger->process = 0;
        how = (int)l->supervisor;
        l->supervisor = 0;
        return spdl__loader_fail(l, SPDL_E_PROCESS,
                                 "its supervisor (process %d) has ended, and the child with it",
                                 how);
    }
    if (l->desc.hang_timeout > 0 && l->asked_ns == 0 &&
        (double)(now - l->since) > l->desc.hang_timeout * 1e9) {
        l->asked_ns = now;
        spdl__store32(&l->ledger->hangs, l->ends + 1);
        spdl__os_process_signal(l->supervisor, SIGCHLD);
    }
    return SPDL_OK;
}

/* Sleeps until something has changed, or a while; after the deadline not at all. What it finds out
   is a failure. */
SPDL__PRIVATE spdl_result spdl__loader_sleep(spdl_loader *l, uint64_t deadline) {
    spdl__shared *s = l->shared;
    uint64_t now = spdl_time_ns();
    const uint64_t until = spdl__min(deadline, now + SPDL__LOADER_LOOK_NS);
    const uint32_t word = spdl__load32(&s->filled.word);
    bool gone, waits;
    spdl__add32(&s->filled.waiters, 1);
    spdl__full_barrier(); /* pairs with shared_notify */
    gone = spdl__load32(&l->ledger->gone) != 0; /* before the stamp: what it published is seen */
    waits = l->commanded ? spdl__load32(&s->ack) != l->command
                         : spdl__load(&spdl__loader_entry(l, l->at)->stamp) != l->at + 1;
    SPDL_TEST_POINT("loader trainer about to sleep");
    if (waits && !gone && now < until) spdl__os_shared_sleep(&s->filled.word, word, until);
    spdl__sub32(&s->filled.waiters, 1);
    spdl__loader_log_ends(l);
    if (waits && gone) { /* for good, and all it has published was taken */
        spdl__log(&l->desc.logger, SPDL_LOG_ERROR, l->ledger->end.text);
        return spdl__loader_failed(l, &l->ledger->end, SPDL_E_PROCESS);
    }
    now = spdl_time_ns();
    return waits && now - l->looked_ns >= SPDL__LOADER_LOOK_NS ? spdl__loader_look_around(l, now)
                                                               : SPDL_OK;
}

/* Until something has changed, or a while: SPDL_OK; SPDL_TIMEOUT behind the deadline; or a failure.
   After a wait that was long the next one will be, too: no turns are given away then. Who only
   looks, again and again, learns of failures and hangs, too. */
SPDL__PRIVATE spdl_result spdl__loader_wait(spdl_loader *l, uint64_t deadline, int *round) {
    spdl_result result;
    if (spdl__late(deadline)) {
        result = spdl__loader_sleep(l, deadline);
        return result == SPDL_OK ? SPDL_TIMEOUT : result;
    }
    if (!l->commanded && spdl__load_relaxed32(&l->holds) >= (uint32_t)l->layout.quota)
        return spdl__loader_fail(l, SPDL_E_LIMIT,
                                 "the trainer holds all %d slots: give batches back, or raise "
                                 "desc.slots", l->layout.quota);
    if (spdl__backoff(round, l->slept ? 0 : SPDL__IDLE_YIELDS)) return SPDL_OK;
    return spdl__loader_sleep(l, deadline);
}

/* Tells the child what is wanted. */
SPDL__COLD void spdl__loader_send(spdl_loader *l) {
    spdl__shared *s = l->shared;
    memcpy(s->text, l->wanted, sizeof(s->text));
    s->texts = l->wanted_texts;
    s->sequence = l->wanted_sequence;
    spdl__store_relaxed(&s->start_at, l->at);
    l->wants = false;
    l->commanded = true;
    l->since = l->asked_ns = 0;
    spdl__store32(&s->command, ++l->command); /* pairs with child_turn */
    spdl__shared_notify(&s->emptied);
}

/* The child has answered: SPDL_OK, or what it was refused with, and all is as before. */
SPDL__COLD spdl_result spdl__loader_answer(spdl_loader *l, spdl_error *error) {
    spdl_result result = (spdl_result)l->shared->ack_result;
    const spdl_error was = l->error;
    l->commanded = false;
    l->since = 0;
    if (result != SPDL_OK) {
        result = spdl__loader_failed(l, &l->shared->refusal, (int32_t)result);
        *error = l->error;
        if (result != SPDL_E_PROCESS && error != &l->error) l->error = was;
        return result;
    }
    spdl__error_clear(&l->error);
    l->last = false;
    spdl__text_take(l->text, l->shared->begun);
    spdl__text_numbers(l->text, &l->number, &l->epoch);
    return SPDL_OK;
}

/* After a command whether the child has obeyed: SPDL_OK, SPDL_TIMEOUT, what it was refused with, or
   a failure. One that another one has followed is nobody's. */
SPDL__PRIVATE spdl_result spdl__loader_obeyed(spdl_loader *l, uint64_t deadline,
                                              spdl_error *error) {
    spdl_error unread;
    spdl_result result = SPDL_OK;
    int round = 0;
    while (l->commanded && result == SPDL_OK) {
        if (l->since == 0) l->since = spdl_time_ns();
        if (l->error.result == SPDL_E_PROCESS) {
            result = SPDL_E_PROCESS;
        } else if (spdl__load32(&l->shared->ack) != l->command) { /* pairs with child_obey */
            result = spdl__loader_wait(l, deadline, &round);
        } else if (l->wants) {
            result = spdl__loader_answer(l, &unread);
            if (result != SPDL_E_PROCESS) result = SPDL_OK;
            if (result == SPDL_OK) spdl__loader_send(l);
        } else {
            return spdl__loader_answer(l, error);
        }
    }
    if (result < 0 && error != &l->error) *error = l->error;
    return result;
}

/* There is nothing yet. */
SPDL__PRIVATE spdl_result spdl__loader_await(spdl_loader *l, spdl_loader_batch *batch,
                                             uint64_t deadline) {
    const uint64_t since = spdl_time_ns();
    spdl_result result = spdl__loader_obeyed(l, deadline, &l->error);
    int round = 0;
    if (l->since == 0) l->since = since;
    while (result == SPDL_OK) {
        result = spdl__loader_look(l, batch);
        if (result != SPDL_EMPTY) break;
        result = spdl__loader_wait(l, deadline, &round);
    }
    l->slept = round >= SPDL_SPINS + (l->slept ? 0 : SPDL__IDLE_YIELDS);
    l->wait_ns += spdl_time_ns() - since;
    return result;
}

/* In the child of a fork: what is shared is the trainer's. */
SPDL__PRIVATE bool spdl__loader_forked(const spdl_loader *l) {
    return l->mark != NULL ? spdl__load_relaxed32(l->mark) == 0
                           : l->process != spdl__os_process_id();
}

SPDL_API spdl_result spdl_loader_next(spdl_loader *l, spdl_loader_batch *batch,
                                      int64_t timeout_ns) {
    spdl_result result = SPDL_EMPTY;
    if (l == NULL || batch == NULL || spdl__loader_forked(l)) return SPDL_E_INVALID;
    if (SPDL__UNLIKELY(l->error.result != SPDL_OK)) {
        if (l->error.result == SPDL_E_PROCESS) return SPDL_E_PROCESS;
        spdl__error_clear(&l->error); /* a failure of the pipeline is still there */
    }
    if (!l->commanded) result = spdl__loader_look(l, batch);
    if (result == SPDL_EMPTY) result = spdl__loader_await(l, batch, spdl__deadline(timeout_ns));
    if (result != SPDL_TIMEOUT ||
        (!l->commanded && spdl__load_relaxed32(&l->holds) >= (uint32_t)l->layout.quota))
        l->since = l->asked_ns = 0;
    return result;
}

SPDL_API spdl_result spdl_loader_done(spdl_loader *l, const spdl_loader_batch *batch) {
    spdl_loader_batch *held;
    if (l == NULL || batch == NULL || batch->loader_ != l || batch->slot_ < 0 ||
        batch->slot_ >= l->layout.slots)
        return SPDL_E_INVALID;
    held = &l->held[batch->slot_];
    if (batch->ticket_ == 0 || spdl__load_relaxed(&held->ticket_) != batch->ticket_ ||
        spdl__loader_forked(l))
        return SPDL_E_INVALID;
    spdl__store_relaxed(&held->ticket_, 0);
    spdl__sub32(&l->holds, 1);
    spdl__store(&l->words[batch->slot_], 0); /* pairs with child_reclaim: the data were read */
    spdl__shared_notify(&l->shared->emptied);
    return SPDL_OK;
}

/* --- positions --- */

/* Tells the child where to go on, once it has obeyed the command before. */
SPDL__COLD spdl_result spdl__loader_command(spdl_loader *l, const char *const *texts, int count,
                                            uint64_t sequence, uint64_t deadline,
                                            spdl_error *error) {
    size_t at = 0;
    int i;
    if (l->error.result == SPDL_E_PROCESS) {
        *error = l->error;
        return SPDL_E_PROCESS;
    }
    for (i = 0; i < count && at <= sizeof(l->wanted); ++i) at += strlen(texts[i]) + 1;
    if (count > SPDL__LOADER_TEXTS / 64 || at > sizeof(l->wanted))
        return spdl__error_set(error, SPDL_E_LIMIT, "loader '%s': %d texts are more than a "
                               "loader takes", l->name, count);
    for (i = 0, at = 0; i < count; at += strlen(texts[i]) + 1, ++i)
        memcpy(l->wanted + at, texts[i], strlen(texts[i]) + 1);
    l->wanted_texts = (uint64_t)count;
    l->wanted_sequence = sequence;
    l->wants = true;
    if (!l->commanded) spdl__loader_send(l);
    return spdl__loader_obeyed(l, deadline, error);
}

SPDL_API spdl_result spdl_loader_state_load(spdl_loader *l, const char *const *texts, int count,
                                      int64_t timeout_ns, spdl_error *error) {
    spdl_error unread;
    int i = 0;
    if (error == NULL) error = &unread;
    spdl__error_clear(error);
    while (l != NULL && texts != NULL && i < count && texts[i] != NULL) ++i;
    if (i == 0 || i < count || spdl__loader_forked(l))
        return spdl__error_set(error, SPDL_E_INVALID,
                               "spdl_loader_state_load: no loader, or text %d is not there", i);
    return spdl__loader_command(l, texts, count, 0, spdl__deadline(timeout_ns), error);
}

SPDL_API spdl_result spdl_loader_rewind(spdl_loader *l, uint64_t sequence, int64_t timeout_ns) {
    spdl_error error;
    if (l == NULL || spdl__loader_forked(l)) return SPDL_E_INVALID;
    return spdl__loader_command(l, NULL, 0, sequence, spdl__deadline(timeout_ns), &error);
}

SPDL_API int spdl_loader_state_save(spdl_loader *l, char *text, size_t bytes) {
    const char *sum;
    uint64_t number;
    spdl_error error;
    spdl_result result = SPDL_E_INVALID;
    if (l == NULL || text == NULL || bytes == 0 || spdl__loader_forked(l)) return SPDL_E_INVALID;
    result = spdl__loader_obeyed(l, SPDL__NEVER, &error);
    sum = spdl__text_field(l->text, "sum");
    (void)snprintf(text, bytes, "%s", result == SPDL_OK ? l->text : error.text);
    if (result != SPDL_OK) return result;
    if (strncmp(l->text, "", 6) == 0) return SPDL_E_UNSUPPORTED;
    if (sum != NULL && spdl__text_number(sum, 16, "", &number) != NULL &&
        number == spdl__state_sum(l->text, (size_t)(sum - 5 - l->text)))
        return (int)strlen(l->text);
    (void)snprintf(text, bytes, "loader '%s': the position that the child has written makes "
                   "no sense", l->name);
    return SPDL_E_CHECKSUM;
}

/* --- open and close --- */

SPDL__COLD spdl_result spdl__loader_check(spdl_loader *l) {
    const spdl_loader_desc *desc = &l->desc;
    const struct {
        const char *name;
        double value, most;
    } fields[] = { { "slots", (double)desc->slots, 1 << 16 },
                   { "max_restarts", (double)desc->max_restarts, INT16_MAX },
                   { "hang_timeout", desc->hang_timeout, 1e9 } };
    size_t i;
    for (i = 0; i < sizeof(fields) / sizeof(fields[0]); ++i)
        if (!(fields[i].value >= 0 && fields[i].value <= fields[i].most))
            return spdl__loader_fail(l, SPDL_E_INVALID, "%s is %.9g, must be 0 to %.9g",
                                     fields[i].name, fields[i].value, fields[i].most);
    if (desc->pipeline.pool != NULL)
        return spdl__loader_fail(l, SPDL_E_INVALID, "pipeline.pool is set, but threads of this "
                                                    "process are in no child");
    l->layout.quota = desc->slots > 0 ? desc->slots : 4;
    return SPDL_OK;
}

/* What the rows say, before there is a pipeline: which row makes the batches, how many blocks the
   pipeline may have of it, what lies in front of the data in a block, and names. (The only place
   that reads what is private to the pipeline.) */
SPDL__COLD spdl_result spdl__loader_measure(spdl_loader *l, spdl_pipeline *p,
                                            const spdl__plan *plan) {
    spdl__layout *y = &l->layout;
    const spdl__node *node = NULL;
    int i;
    spdl__workers_plan(p, plan);
    p->node = (spdl__node *)spdl__alloc_zeroed(&p->allocator, (size_t)p->count, sizeof(*p->node),
                                               SPDL_CACHE_LINE);
    if (p->node == NULL) return SPDL_E_NOMEM;
    p->last = &p->node[p->count - 1];
    for (i = 0; i < p->count; ++i) {
        spdl__node_init(p, plan, i);
        spdl__name_copy(l->stage_name[i], p->node[i].name);
        if (p->node[i].row.item_bytes > 0) node = &p->node[i];
    }
    if (node == NULL)
        return spdl__loader_fail(l, SPDL_E_INVALID,
                                 "no row says .item_bytes: batches are made in shared memory by "
                                 "SPDL_BATCH(n, .item_bytes = ...), or by a stage that calls "
                                 "spdl_buffer");
    y->row = node->index;
    y->stages = p->count;
    y->head =
        spdl__batch_head_bytes(node->row.kind == SPDL_KIND_BATCH ? (size_t)node->row.size : 0);
    y->item = node->row.kind == SPDL_KIND_BATCH ? node->row.item_bytes : 0;
    y->room = y->item > 0 ? (uint64_t)node->row.size * y->item : node->row.item_bytes;
    y->slots = (int)spdl__node_blocks(p, node) + y->quota;
    if (y->slots <= SPDL__MAX_SPARE && spdl__layout_plan(y)) return SPDL_OK;
    return spdl__loader_fail(l, SPDL_E_LIMIT, "%d slots of %llu bytes are more than there can be",
                             y->slots, (spdl__llu)y->room);
}

SPDL__COLD spdl_result spdl__loader_plan(spdl_loader *l) {
    const spdl_allocator *heap = &l->desc.pipeline.allocator;
    spdl__plan plan;
    spdl_pipeline *p;
    spdl_result result;
    memset(&plan, 0, sizeof(plan));
    plan.desc = &l->desc.pipeline;
    plan.rows = l->rows;
    plan.count = l->count > INT16_MAX ? INT16_MAX : (int)l->count;
    result = spdl__check_plan(&plan);
    if (result != SPDL_OK) spdl__log(&l->desc.logger, SPDL_LOG_ERROR, l->error.text);
    if (result != SPDL_OK) return result;
    if (l->rows[0].kind == SPDL_KIND_FEED)
        return spdl__loader_fail(l, SPDL_E_UNSUPPORTED,
                                 "SPDL_FEED: what is pushed in this process is in no child");
    p = (spdl_pipeline *)spdl__alloc_zeroed(heap, 1, sizeof(*p), SPDL_CACHE_LINE);
    if (p == NULL || !spdl__pipeline_events(p)) {
        spdl__free(heap, p, sizeof(*p));
        return spdl__loader_fail(l, SPDL_E_NOMEM, "out of memory");
    }
    p->allocator = *heap;
    p->count = plan.count - 1;
    result = spdl__loader_measure(l, p, &plan);
    spdl__pipeline_release(p);
    return result == SPDL_E_NOMEM ? spdl__loader_fail(l, SPDL_E_NOMEM, "out of memory") : result;
}

/* The memory, if there is room for it. */
SPDL__COLD spdl_result spdl__loader_reserve(spdl_loader *l) {
    const double mib = 1 << 20;
    const spdl__layout *y = &l->layout;
    const double bytes = (double)y->bytes / mib, slot = (double)y->stride / mib;
    const spdl__os_room room = spdl__os_memory_room();
    const char *reason = "";
    void *memory = NULL;
    char *at;
    if (l->desc.arena_bytes > 0 && y->bytes > l->desc.arena_bytes)
        return spdl__loader_fail(l, SPDL_E_LIMIT,
                                 "no room: %.1f MiB wanted (%d slots of %.1f MiB), arena_bytes is "
                                 "%.1f MiB", bytes, y->slots, slot,
                                 (double)l->desc.arena_bytes / mib);
    if (y->bytes <= room.left) reason = spdl__os_shared_make(&memory, y->bytes);
    l->shared = (spdl__shared *)memory;
    if (reason != NULL)
        return spdl__loader_fail(l, SPDL_E_LIMIT,
                                 "no room: %.1f MiB wanted, %s is %.1f MiB, %.1f MiB of it are "
                                 "left%s%s", bytes, room.what, (double)room.limit / mib,
                                 (double)room.left / mib, *reason ? ": " : "", reason);
    at = (char *)memory;
    l->entries = (spdl__shared_entry *)(void *)(at + y->entries);
    l->notes = (spdl__shared_note *)(void *)(at + y->notes);
    l->words = (uint64_t *)(void *)(at + y->words);
    l->slots = at + y->data;
    l->ledger = (spdl__ledger *)spdl__os_page(true);
    l->mark = (uint32_t *)spdl__os_page(false);
    if (l->mark != NULL) *l->mark = 1;
    l->held = (spdl_loader_batch *)spdl__alloc_zeroed(&l->desc.pipeline.allocator,
                                                      (size_t)y->slots, sizeof(*l->held), 8);
    if (l->ledger == NULL || l->held == NULL)
        return spdl__loader_fail(l, SPDL_E_NOMEM, "out of memory");
    spdl__logf(&l->desc.logger, SPDL_LOG_INFO,
               "loader '%s': %.1f MiB are shared (%d slots of %.1f MiB) of the %.1f MiB that "
               "were left", l->name, bytes, y->slots, slot, (double)room.left / mib);
    return SPDL_OK;
}

/* Starts the supervisor. What FILEs hold is written before: else both processes would. */
SPDL__COLD spdl_result spdl__loader_launch(spdl_loader *l) {
    const uint64_t threads = spdl__os_threads();
    const char *reason;
    if (!l->desc.fork_with_threads && threads > 1)
        return spdl__loader_fail(l, SPDL_E_INVALID,
                                 "this process has %llu threads, of which a child would have one: "
                                 "open the loader before they are started, or set "
                                 "fork_with_threads if they hold no lock that stages take",
                                 (spdl__llu)threads);
    if (l->desc.pipeline.doctor != NULL || spdl__os_environment("SPDL_DOCTOR") != NULL)
        spdl__logf(&l->desc.logger, SPDL_LOG_WARN,
                   "loader '%s': no doctor in another process: create a pipeline of the same "
                   "rows for one", l->name);
    l->command = l->shared->command = 1; /* to begin at the beginning */
    l->commanded = true;
    (void)fflush(NULL);
    reason = spdl__os_fork(&l->supervisor);
    if (reason == NULL && l->supervisor == 0) spdl__supervisor_main(l, (int64_t)l->process);
    if (reason == NULL) return SPDL_OK;
    l->supervisor = 0;
    return spdl__loader_fail(l, SPDL_E_PROCESS, "no process: %s", reason);
}

/* Frees whatever open has made so far. */
SPDL__COLD void spdl__loader_release(spdl_loader *l) {
    const spdl_allocator heap = l->desc.pipeline.allocator;
    spdl__os_file_unmap((const uint8_t *)l->shared, l->layout.bytes);
    spdl__os_file_unmap((const uint8_t *)l->ledger, SPDL__OS_PAGE);
    spdl__os_file_unmap((const uint8_t *)l->mark, SPDL__OS_PAGE);
    spdl__free(&heap, l->held, (size_t)l->layout.slots * sizeof(*l->held));
    spdl__free(&heap, l, sizeof(*l));
}

SPDL_API spdl_result spdl_loader_open(spdl_loader **loader, const spdl_loader_desc *desc,
                                      const spdl_stage *stages, size_t stage_count) {
    spdl_loader_desc known;
    spdl_error local, *why;
    spdl_loader *l = NULL;
    spdl_result result;
    if (loader == NULL) return SPDL_E_INVALID;
    *loader = NULL;
    memset(&known, 0, sizeof(known));
    if (desc != NULL) known = *desc;
    why = known.error != NULL ? known.error : &local;
    spdl__error_clear(why);
    result = spdl__allocator_check(&known.pipeline.allocator, "loader", why);
    if (result == SPDL_OK) {
        l = (spdl_loader *)spdl__alloc_zeroed(&known.pipeline.allocator, 1, sizeof(*l), 8);
        if (l == NULL) result = spdl__error_set(why, SPDL_E_NOMEM, "loader: out of memory");
    }
    if (l == NULL) {
        spdl__log(&known.logger, SPDL_LOG_ERROR, why->text);
        return result;
    }
    l->desc = known;
    l->desc.pipeline.error = &l->error;
    l->process = spdl__os_process_id();
    l->rows = stages;
    l->count = stage_count;
    spdl__name_copy(l->name, known.name != NULL ? known.name : "spdl");
    spdl__error_clear(&l->error);
    result = spdl__loader_check(l);
    if (result == SPDL_OK) result = spdl__loader_plan(l);
    if (result == SPDL_OK) result = spdl__loader_reserve(l);
    if (result == SPDL_OK) result = spdl__loader_launch(l);
    if (result == SPDL_OK) {
        *loader = l;
        return SPDL_OK;
    }
    *why = l->error;
    spdl__loader_release(l);
    return result;
}

SPDL_API void spdl_loader_close(spdl_loader *l) {
    const uint64_t until = spdl_time_ns() + SPDL__LOADER_GRACE_NS * 3 / 2;
    int how;
    if (l == NULL || l->process != spdl__os_process_id()) return; /* a fork's: not ours */
    spdl__store32(&l->ledger->quits, 1); /* first: a child that quits is not started again */
    spdl__store32(&l->shared->quits, 1);
    spdl__os_shared_wake(&l->shared->emptied.word);
    spdl__os_process_signal(l->supervisor, SIGCHLD);
    while (l->supervisor > 0) {
        const int ended = spdl__os_process_ended(l->supervisor, &how);
        if (ended == 1) break;
        if (ended < 0 || spdl_time_ns() >= until) /* and so the child */
            spdl__os_process_signal(l->supervisor, SIGKILL);
        if (ended < 0) break;
        spdl__os_shared_sleep(&l->ledger->ends, l->ledger->ends, spdl_time_ns() + 50000);
    }
    spdl__os_process_signal(-l->ledger->process, SIGKILL); /* that it has left, as it was killed */
    spdl__loader_release(l);
}
#else /* no processes: nothing can be opened */
SPDL_API spdl_result spdl_loader_open(spdl_loader **loader, const spdl_loader_desc *desc,
                                      const spdl_stage *stages, size_t stage_count) {
    (void)stages, (void)stage_count;
    if (loader == NULL) return SPDL_E_INVALID;
    *loader = NULL;
    return spdl__error_set(desc != NULL ? desc->error : NULL, SPDL_E_UNSUPPORTED,
                           "loader: there are no processes that share memory here: create a "
                           "pipeline of the same rows");
}
SPDL_API void spdl_loader_close(spdl_loader *l) { (void)l; }
SPDL_API spdl_result spdl_loader_next(spdl_loader *l, spdl_loader_batch *batch,
                                      int64_t timeout_ns) {
    (void)l, (void)batch, (void)timeout_ns;
    return SPDL_E_INVALID;
}
SPDL_API spdl_result spdl_loader_done(spdl_loader *l, const spdl_loader_batch *batch) {
    (void)l, (void)batch;
    return SPDL_E_INVALID;
}
SPDL_API int spdl_loader_state_save(spdl_loader *l, char *text, size_t bytes) {
    (void)l, (void)text, (void)bytes;
    return SPDL_E_INVALID;
}
SPDL_API spdl_result spdl_loader_state_load(spdl_loader *l, const char *const *texts, int count,
                                      int64_t timeout_ns, spdl_error *error) {
    (void)l, (void)texts, (void)count, (void)timeout_ns;
    return spdl__error_set(error, SPDL_E_INVALID, "spdl_loader_state_load: no loader");
}
SPDL_API spdl_result spdl_loader_rewind(spdl_loader *l, uint64_t sequence, int64_t timeout_ns) {
    (void)l, (void)sequence, (void)timeout_ns;
    return SPDL_E_INVALID;
}
#endif

SPDL_API spdl_result spdl_loader_next_fn(void *loader, void **item, int64_t timeout_ns) {
    spdl_loader *l = (spdl_loader *)loader;
    spdl_loader_batch batch;
    const spdl_result result = spdl_loader_next(l, &batch, timeout_ns);
    if (result == SPDL_OK) *item = &l->held[batch.slot_];
    return result;
}

SPDL_API void spdl_loader_batch_free(void *batch) {
    const spdl_loader_batch *whole = (const spdl_loader_batch *)batch;
    if (whole != NULL) (void)spdl_loader_done(whole->loader_, whole);
}

/* --- what is seen from outside --- */

SPDL_API const spdl_error *spdl_loader_error(const spdl_loader *l) { return &l->error; }

/* What the child has written is made such that texts can be made of it. */
SPDL_API spdl_result spdl_loader_stats(const spdl_loader *l, spdl_stats *stats) {
    const spdl__shared *s = l->shared;
    int tries, i;
    for (tries = 0; tries < 1000; ++tries) {
        const uint64_t version = spdl__load(&s->version);
        if (version == 0) return SPDL_E_NOT_FOUND;
        memcpy(stats, &s->stats, sizeof(*stats));
        spdl__full_barrier(); /* pairs with child_stats */
        if (version % 2 == 0 && spdl__load_relaxed(&s->version) == version) break;
        spdl__os_yield();
    }
    if (tries == 1000 || stats->stage_count != l->layout.stages) return SPDL_E_NOT_FOUND;
    for (i = 0; i < stats->stage_count; ++i) {
        stats->stage[i].name[SPDL_NAME_BYTES - 1] = '\0';
        if ((unsigned)stats->stage[i].kind > SPDL_KIND_UNBATCH)
            stats->stage[i].kind = SPDL_KIND_NONE;
    }
    return SPDL_OK;
}

SPDL_API void spdl_loader_get_status(const spdl_loader *l, spdl_loader_status *status) {
    memset(status, 0, sizeof(*status));
    status->slots = l->layout.slots;
    status->supervisor = l->supervisor;
    status->pid = l->ledger->process;
    status->restarts = (int)l->ledger->restarts;
    status->taken = l->taken;
    status->held = spdl__load_relaxed32(&l->holds);
    status->wait_ns = l->wait_ns;
}

SPDL_API void spdl_loader_arena(const spdl_loader *l, void **base, size_t *bytes,
                                size_t *slot_bytes) {
    if (base != NULL) *base = l->slots;
    if (bytes != NULL) *bytes = (size_t)(l->layout.bytes - l->layout.data);
    if (slot_bytes != NULL) *slot_bytes = (size_t)l->layout.stride;
}

#ifndef SPDL_NO_NPZ

/* ============================================================================================= */
/* >>crc-impl
   CRC-32 as ZIP has it. The owner of a spdl__crc fills it before any other thread can see it; from
   then on it is only read.
   A CRC is the remainder of a division of polynomials, which stays the same when leading digits are
   replaced by others with the same remainder: so the fast way multiplies 128 bits (without carries)
   by what x^n is modulo the divisor and adds them n digits further on. (V. Gopal and others, "Fast
   CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009.) */

typedef struct spdl__crc {
    uint32_t table[8][256]; /* table[k][b]: what byte b does when k zero bytes follow it */
    bool folds; /* the processor multiplies without carries: PCLMULQDQ, PMULL */
    bool wide;  /* and four at once: VPCLMULQDQ */
} spdl__crc;

/* 16 bytes, anywhere in memory. */
typedef long long spdl__v128 __attribute__((vector_size(16), aligned(1), may_alias));

/* The fast ways are twins: for x86-64, for arm64, and none for the others. */
#if defined(__x86_64__)
#define SPDL__CRC_TARGET SPDL__TARGET("pclmul,sse4.1")
#define SPDL__CRC_FOLDS (__builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"))

SPDL__CRC_TARGET SPDL__INLINE spdl__v128 spdl__crc_fold(spdl__v128 x, spdl__v128 by) {
    return __builtin_ia32_pclmulqdq128(x, by, 0x00) ^ __builtin_ia32_pclmulqdq128(x, by, 0x11);
}

/* Two numbers of 128 bits, each with its own product. */
typedef long long spdl__v256 __attribute__((vector_size(32), aligned(1), may_alias));
#define SPDL__CRC_WIDE_TARGET SPDL__TARGET("avx2,pclmul,vpclmulqdq")
#define SPDL__CRC_WIDE (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq"))
#if defined(__clang__)
#define SPDL__CRC_WIDE_PRODUCT __builtin_ia32_pclmulqdq256
#else
#define SPDL__CRC_WIDE_PRODUCT __builtin_ia32_vpclmulqdq_v4di
#endif

SPDL__CRC_WIDE_TARGET SPDL__INLINE spdl__v256 spdl__crc_fold_wide(spdl__v256 x, spdl__v256 by) {
    return SPDL__CRC_WIDE_PRODUCT(x, by, 0x00) ^ SPDL__CRC_WIDE_PRODUCT(x, by, 0x11);
}

#elif defined(__aarch64__) && !SPDL__BIG_ENDIAN
#define SPDL__CRC_TARGET
#define SPDL__CRC_FOLDS spdl__arm_has_pmull()

SPDL__INLINE spdl__v128 spdl__crc_fold(spdl__v128 x, spdl__v128 by) {
    spdl__v128 low, high;
    __asm__(".arch_extension crypto\n\tpmull %0.1q, %1.1d, %2.1d" : "=w"(low) : "w"(x), "w"(by));
    __asm__(".arch_extension crypto\n\tpmull2 %0.1q, %1.2d, %2.2d" : "=w"(high) : "w"(x), "w"(by));
    return low ^ high;
}

#else
#define SPDL__CRC_FOLDS false
#endif
#ifndef SPDL__CRC_WIDE
#define SPDL__CRC_WIDE false
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
    crc->folds = SPDL__CRC_FOLDS;
    crc->wide = SPDL__CRC_WIDE;
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

#ifdef SPDL__CRC_TARGET
/* For 64 bytes or more: folds whole 64 bytes into one, those into their last 16, and whole 16 bytes
   into these. What folds over n bytes are the remainders of x^(8 n + 32) and of x^(8 n - 32), for
   the low half and the high; digits are stored with the highest power lowest, and a product of two
   such numbers comes out one bit too low, so they are shifted by one. */
SPDL__CRC_TARGET SPDL__PRIVATE uint32_t spdl__crc_folded(const spdl__crc *crc, uint32_t value,
                                                         const uint8_t *data, size_t bytes) {
    const spdl__v128 by_64 = { 0x154442bd4, 0x1c6e41596 }, by_16 = { 0x1751997d0, 0x0ccaa009e };
    const spdl__v128 before = { (long long)value, 0 }; /* is added to the first four bytes */
    const spdl__v128 *from = (const spdl__v128 *)data;
    spdl__v128 a = from[0] ^ before, b = from[1], c = from[2], d = from[3];
    for (from += 4, bytes -= 64; bytes >= 64; from += 4, bytes -= 64) {
        a = spdl__crc_fold(a, by_64) ^ from[0];
        b = spdl__crc_fold(b, by_64) ^ from[1];
        c = spdl__crc_fold(c, by_64) ^ from[2];
        d = spdl__crc_fold(d, by_64) ^ from[3];
    }
    b ^= spdl__crc_fold(a, by_16);
    c ^= spdl__crc_fold(b, by_16);
    d ^= spdl__crc_fold(c, by_16);
    for (; bytes >= 16; bytes -= 16) d = spdl__crc_fold(d, by_16) ^ *from++;
    value = spdl__crc_tables(crc, 0, (const uint8_t *)&d, 16);
    return spdl__crc_tables(crc, value, (const uint8_t *)from, bytes);
}
#endif

#ifdef SPDL__CRC_WIDE_TARGET
/* For a multiple of 128 bytes: folds them into the last 32. */
SPDL__CRC_WIDE_TARGET SPDL__PRIVATE uint32_t spdl__crc_wide(const spdl__crc *crc, uint32_t value,
                                                            const uint8_t *data, size_t bytes) {
    const spdl__v256 by_128 = { 0x1e88ef372, 0x14a7fe880, 0x1e88ef372, 0x14a7fe880 };
    const spdl__v256 by_32 = { 0x0f1da05aa, 0x15a546366, 0x0f1da05aa, 0x15a546366 };
    const spdl__v256 before = { (long long)value, 0, 0, 0 };
    const spdl__v256 *from = (const spdl__v256 *)data;
    spdl__v256 a = from[0] ^ before, b = from[1], c = from[2], d = from[3];
    for (from += 4, bytes -= 128; bytes >= 128; from += 4, bytes -= 128) {
        a = spdl__crc_fold_wide(a, by_128) ^ from[0];
        b = spdl__crc_fold_wide(b, by_128) ^ from[1];
        c = spdl__crc_fold_wide(c, by_128) ^ from[2];
        d = spdl__crc_fold_wide(d, by_128) ^ from[3];
    }
    b ^= spdl__crc_fold_wide(a, by_32);
    c ^= spdl__crc_fold_wide(b, by_32);
    d ^= spdl__crc_fold_wide(c, by_32);
    return spdl__crc_tables(crc, 0, (const uint8_t *)&d, 32);
}
#endif

/* The CRC of what `value` is the CRC of, followed by these bytes; start with 0. */
SPDL__PRIVATE uint32_t spdl__crc_add(const spdl__crc *crc, uint32_t value, const uint8_t *data,
                                     size_t bytes) {
#ifdef SPDL__CRC_WIDE_TARGET
    if (bytes >= 512 && crc->wide) {
        const size_t whole = bytes & ~(size_t)127;
        value = ~spdl__crc_wide(crc, ~value, data, whole);
        data += whole;
        bytes -= whole;
    }
#endif
#ifdef SPDL__CRC_TARGET
    if (bytes >= 64 && crc->folds) return ~spdl__crc_folded(crc, ~value, data, bytes);
#endif
    return ~spdl__crc_tables(crc, ~value, data, bytes);
}

/* ============================================================================================= */
/* >>inflate-impl
   Deflate (RFC 1951) from memory to memory. The thread that decodes owns the state, which lies on
   its stack; nothing is allocated, nothing is shared except the tables of the fixed codes, which
   are only read. A run stops before any byte of output, and a later one goes on from there.
   Two decoders share the tables: a careful one, symbol by symbol with every check, and a fast one,
   which runs while neither end is near and leaves whatever is not plain to the careful one, at the
   bit where it stands. The fast one runs up to two streams side by side: each code begins where the
   last one ended, so a processor that could do six things at once waits for one, and a second
   stream fills the gaps.
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

/* The caller sets `in_room`, `slack` and, between two runs, where output goes. */
typedef struct spdl__inflate {
    const uint8_t *in, *in_begin, *in_end;
    const uint8_t *in_room; /* bytes up to here may be looked at; in_end when nothing is known */
    uint64_t bits;          /* input that is loaded, the next bit lowest */
    unsigned count;         /* how many; the bits above are zero or what comes next */

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

/* As all steps of the careful decoder: true when it can go on. */
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

SPDL__PRIVATE void spdl__inflate_count(unsigned *count, const uint8_t *lengths, unsigned symbols) {
    unsigned i;
    memset(count, 0, 16 * sizeof(*count));
    for (i = 0; i < symbols; i++) count[lengths[i]]++;
}

/* Sorts what the symbols mean, shorter codes first, those without one last. Returns how many have
   one. A place that was just moved on can be used again only when that is done, so the first 128
   symbols are placed from the front of each length on, others from its end. */
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
   has room for all codes that share its first `root` bits; count[]: those without a place yet. */
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

/* Fills a decoding table and returns the bits of its first level, or 0 when the lengths make no
   prefix code: it must use all of the space, except for the lone code of one bit and the code
   without symbols. Filled for codes of one bit, it is doubled by a copy for those of two bits, and
   so on: every code is written once. The size of the large table follows the longest code, so that
   many tiny blocks cannot make it slow. count[] is used up. Inlined for each alphabet. */
SPDL__INLINE unsigned spdl__inflate_build(uint32_t *table, unsigned root,
                                          spdl__inflate_alphabet alphabet, const uint8_t *lengths,
                                          unsigned symbols, unsigned *count) {
    unsigned longest = 15, i = 0, end, length, code = 0, number = 0, left = 1;
    uint32_t sorted[288];
    const unsigned used = spdl__inflate_sort(sorted, alphabet, lengths, symbols, count);
    while (longest > 0 && count[longest] == 0) longest--;
    for (length = 1; length <= longest; length++) { /* a code takes 2^-length of the space */
        left *= 2;
        if (count[length] > left) return 0;
        left -= count[length];
    }
    if (left > 0 && (longest > 1 || alphabet == SPDL__INFLATE_PRECODE)) return 0;
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

/* Fills the tables from the lengths of both codes. Returns NULL, or why they are no codes. */
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

/* Reads the code lengths of both codes, which are coded, with runs. lengths[] has room for `total`
   and 7 more; count[] gets how many there are of each. Which are runs cannot be foretold, so all
   are: 8 bytes are written for each, enough except for long runs of zeros, which are there already.
   Four need no more bits than are loaded at once; when there were too few, `left` is above 64. */
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
    uint32_t precode[1 << SPDL__INFLATE_PRECODE_BITS];
    uint8_t lengths[286 + 30 + 7], of_lengths[19] = { 0 };
    unsigned header, litlens, dists, i, value, count[16];
    const char *reason;
    if (!spdl__inflate_take(s, 14, &header)) return false;
    litlens = (header & 31) + 257;
    dists = (header >> 5 & 31) + 1;
    if (litlens > 286 || dists > 30)
        return spdl__inflate_fail(s, "too many length or distance codes");
    for (i = 0; i < (header >> 10) + 4; i++) {
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
    s->tables = &s->own;
    s->mode = SPDL__INFLATE_CODES;
    return reason == NULL || spdl__inflate_fail(s, reason);
}

SPDL__PRIVATE bool spdl__inflate_block(spdl__inflate *s) {
    unsigned header, length, check;
    if (s->last_block) {
        s->mode = SPDL__INFLATE_DONE;
        return true;
    }
    if (!spdl__inflate_take(s, 3, &header)) return false;
    s->last_block = header & 1;
    if (header >> 1 == 2) return spdl__inflate_dynamic_block(s);
    if (header >> 1 == 3) return spdl__inflate_fail(s, "a block is of no known kind");
    if (header >> 1 == 1) {
        s->tables = s->fixed;
        s->mode = SPDL__INFLATE_CODES;
        return true;
    }
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

/* Copies from a stored block. */
SPDL__PRIVATE bool spdl__inflate_stored(spdl__inflate *s) {
    const uint64_t room = (uint64_t)(s->limit - s->out), left = (uint64_t)(s->in_end - s->in);
    const size_t bytes = (size_t)spdl__min(s->stored_left, spdl__min(room, left));
    if (s->stored_left == 0) s->mode = SPDL__INFLATE_BLOCK;
    else if (room == 0) return false;
    else if (left == 0) return spdl__inflate_fail(s, "the deflate stream is cut off");
    memcpy(s->out, s->in, bytes);
    s->out += bytes;
    s->in += bytes;
    s->stored_left -= (unsigned)bytes;
    return true;
}

/* Copies what is left of a match, byte by byte: source and destination may overlap. */
SPDL__PRIVATE bool spdl__inflate_match(spdl__inflate *s) {
    const size_t here = (size_t)(s->out - s->base), distance = s->match_distance;
    const size_t back = distance > here ? distance - here : 0; /* so far before `base` */
    const uint8_t *from = back > 0 ? s->before + (s->before_bytes - back) : s->out - distance;
    size_t i, bytes = (size_t)spdl__min((uint64_t)(s->limit - s->out), s->match_left);
    if (back > 0) bytes = (size_t)spdl__min(bytes, back);
    for (i = 0; i < bytes; i++) s->out[i] = from[i];
    s->out += bytes;
    s->match_left -= bytes;
    return bytes > 0;
}

/* Drops a code and its extra bits, if they are all there and the code is in use. */
SPDL__PRIVATE bool spdl__inflate_drop_code(spdl__inflate *s, uint32_t entry) {
    if ((entry & 255) > s->count) return spdl__inflate_fail(s, "the deflate stream is cut off");
    if (entry & SPDL__INFLATE_BAD) return spdl__inflate_fail(s, "a code is not in use");
    spdl__inflate_drop(s, entry & 255);
    return true;
}

/* Decodes one symbol; a match is left to spdl__inflate_match. */
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
    if (!spdl__inflate_drop_code(s, entry)) return false;
    if (entry & SPDL__INFLATE_END) {
        s->mode = SPDL__INFLATE_BLOCK;
        return true;
    }
    entry = spdl__inflate_find(s->tables->dist, SPDL__INFLATE_DIST_BITS, s->bits);
    distance = spdl__inflate_value(entry, s->bits);
    if (!spdl__inflate_drop_code(s, entry)) return false;
    if (distance > (size_t)(s->out - s->base) + s->before_bytes)
        return spdl__inflate_fail(s, "a distance reaches back before the first byte");
    s->match_left = length;
    s->match_distance = distance;
    return true;
}

/* What the fast loop keeps in registers: a local copy, which no store through `out` can change. */
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

/* Without a branch, to 56 bits or more: as variant 4 of "Reading bits in far too many ways". */
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
            for (; out < end; out += 32, from += 32) {
                spdl__inflate_copy_8(out, from);
                spdl__inflate_copy_8(out + 8, from + 8);
                spdl__inflate_copy_8(out + 16, from + 16);
                spdl__inflate_copy_8(out + 24, from + 24);
            }
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

/* Decodes three literals, or up to two and a match or a literal with a long code. At its beginning
   there are 56 bits: two codes of the first level, 22, and a length, 20, need no more loaded.
   False: what comes next is to be done with care. */
SPDL__INLINE bool spdl__inflate_round(spdl__inflate_lane *l) {
    uint32_t entry = l->entry, before;
    size_t length, distance;
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
    before = entry;
    entry = l->tables->dist[l->bits & ((1u << SPDL__INFLATE_DIST_BITS) - 1)];
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
    spdl__inflate_lane_go_on(l, spdl__inflate_lane_next(l));
    spdl__inflate_copy(l->out - length, distance, length);
    return true;
}

SPDL__INLINE spdl__inflate_lane spdl__inflate_lane_load(const spdl__inflate *s) {
    const uint64_t litlen_mask = ((uint64_t)1 << s->tables->litlen_bits) - 1;
    spdl__inflate_lane l = { s->in, s->in_room - (SPDL__INFLATE_FAST_IN - 1),
                             s->out, s->limit - spdl__inflate_out_left(s), s->base,
                             s->bits, s->count, 0, 0, false, s->tables, litlen_mask };
    spdl__inflate_lane_refill(&l);
    l.entry = spdl__inflate_lane_next(&l);
    return l;
}

/* Gives back whole bytes that were not used. A lane may have decoded what comes after the input. */
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
    bool goes_on = true;
    while (goes_on) {
        if (s->mode == SPDL__INFLATE_BLOCK) {
            goes_on = spdl__inflate_block(s);
        } else if (s->mode == SPDL__INFLATE_STORED) {
            goes_on = spdl__inflate_stored(s);
        } else if (s->mode != SPDL__INFLATE_CODES) {
            return s->mode;
        } else if (s->match_left > 0) {
            goes_on = spdl__inflate_match(s);
        } else if (!s->odd && s->in_room - s->in >= SPDL__INFLATE_FAST_IN + 8 &&
                   s->limit - s->out > spdl__inflate_out_left(s)) {
            return SPDL__INFLATE_CODES;
        } else {
            s->odd = false;
            goes_on = spdl__inflate_symbol(s);
        }
    }
    return s->mode == SPDL__INFLATE_FAILED ? s->mode : SPDL__INFLATE_FULL;
}

/* Decodes streams side by side until one has ended or is at its limit: which, and in *ended how. */
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
   broken member does not take the others with it. One thread opens and closes; between, any thread
   may read. Of a file the zip keeps a copy of its tail, in which the directory lies; the directory
   made from it is one allocation. Sizes, CRC and method are
   those of the central directory: the local header of a current NumPy file says 0xffffffff. A
   member ends where the next one begins, at the latest. */

#define SPDL__ZIP_STORED 0
#define SPDL__ZIP_DEFLATED 8
#define SPDL__ZIP_LOCAL_BYTES 30
#define SPDL__ZIP_ENTRY_BYTES 46
#define SPDL__ZIP_END_BYTES 22
#define SPDL__ZIP_END64_BYTES 56
#define SPDL__ZIP_LOCATOR_BYTES 20
#define SPDL__ZIP_MEMBERS 0x100000 /* the most that an archive may have */
#ifndef SPDL__ZIP_TAIL_BYTES
#define SPDL__ZIP_TAIL_BYTES 4096 /* of a file that are looked at first */
#endif

/* Written by open. */
typedef struct spdl__zip_member {
    const uint8_t *key; /* the whole name, where the directory has it */
    char *name;         /* mostly without ".npy", zero at the end; NULL: hidden by a later one */
    uint64_t offset;    /* of the local header, from the first byte in memory */
    uint64_t limit;     /* where the next member or the directory begins */
    uint64_t csize, usize;
    uint32_t crc;
    uint16_t key_bytes, method, flags;
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
    size_t block_bytes; /* at members: they, by_name, and the names */
} spdl__zip;

/* What is being looked at, and what is wrong with it: set by what returns false, or NULL. */
typedef struct spdl__zip_where {
    const spdl__zip *zip;
    const spdl__zip_member *member; /* NULL: the archive as a whole */
    spdl_error *error;              /* may be NULL */
    spdl_result result;
} spdl__zip_where;

/* Records "file: member 'name': reason"; returns false. */
SPDL__PRINTF(3, 4)
SPDL__PRIVATE bool spdl__zip_fail(spdl__zip_where *where, spdl_result result, const char *format,
                                  ...) {
    char reason[192], name[80];
    const char *label = where->zip != NULL ? where->zip->label : "spdl_npz";
    va_list args;
    where->result = result;
    if (where->error == NULL) return false;
    va_start(args, format);
    vsnprintf(reason, sizeof(reason), format, args);
    va_end(args);
    if (where->member != NULL) {
        spdl__printable(name, sizeof(name), where->member->name);
        spdl__error_set(where->error, result, "%s: member '%s': %s", label, name, reason);
    } else {
        spdl__error_set(where->error, result, "%s: %s", label, reason);
    }
    return false;
}

/* Memory for `what`, which the caller frees. */
SPDL__PRIVATE void *spdl__zip_alloc(spdl__zip_where *where, uint64_t bytes, const char *what) {
    void *made = NULL;
    if (bytes <= SIZE_MAX / 2) made = spdl__alloc(&where->zip->allocator, (size_t)bytes, 64);
    if (made == NULL)
        spdl__zip_fail(where, SPDL_E_NOMEM, "no memory for %s (%llu bytes)", what,
                       (spdl__llu)bytes);
    return made;
}

/* Reads up to `bytes` bytes of the file. Returns how many there were; below `need`: it failed. */
SPDL__PRIVATE size_t spdl__zip_read(spdl__zip_where *where, void *to, size_t bytes, size_t need,
                                    uint64_t at) {
    size_t have;
    const char *reason = spdl__os_file_read(where->zip->file, to, bytes, at, &have);
    if (reason != NULL && have < need)
        spdl__zip_fail(where, SPDL_E_IO, "at byte %llu of %llu: %s", (spdl__llu)(at + have),
                       (spdl__llu)where->zip->size, reason);
    return have;
}

/* What open knows so far, on its stack. */
typedef struct spdl__zip_opening {
    spdl__zip *zip;
    spdl__zip_where *where;
    spdl__llu stop; /* where the central directory must end */
    spdl__llu entries, bytes, offset; /* of the central directory, as the end records say */
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
SPDL__PRIVATE bool spdl__zip_need_tail(spdl__zip_opening *o, uint64_t at) {
    spdl__zip *zip = o->zip;
    const size_t bytes = (size_t)(zip->size - at);
    void *block;
    if (zip->tail != NULL && at >= zip->tail_at) return true;
    spdl__zip_drop_tail(zip);
    block = spdl__zip_alloc(o->where, zip->size - at, "the directory");
    if (block == NULL) return false;
    zip->tail = (const uint8_t *)block;
    zip->tail_at = at;
    return spdl__zip_read(o->where, block, bytes, bytes, at) == bytes;
}

/* Looks for the end record, after which only its comment comes: in the last bytes of a file first,
   then in all that a comment can take. If none ends with the file, the last is it, as in Python. */
SPDL__PRIVATE bool spdl__zip_find_end(spdl__zip_opening *o) {
    const spdl__zip *zip = o->zip;
    const uint64_t size = zip->size, reach = SPDL__ZIP_END_BYTES + 65535;
    uint64_t at, tail = SPDL__ZIP_TAIL_BYTES;
    bool last;
    for (o->stop = size; tail <= SPDL__ZIP_TAIL_BYTES + reach; tail += reach) {
        if (!spdl__zip_need_tail(o, spdl__grown(tail, size))) return false;
        at = spdl__grown(SPDL__ZIP_END_BYTES - 1, size);
        while (at-- > spdl__max(zip->tail_at, spdl__grown(reach, size))) {
            if (spdl__le32(spdl__zip_at(zip, at)) != 0x06054b50) continue;
            last = at + SPDL__ZIP_END_BYTES + spdl__le16(spdl__zip_at(zip, at) + 20) == size;
            if (last || o->stop == size) o->stop = at;
            if (last) return true;
        }
    }
    return o->stop < size ||
           spdl__zip_fail(o->where, SPDL_E_FORMAT,
                          "neither .npy nor .npz, or cut off: no end of a ZIP archive in "
                          "%llu bytes", (spdl__llu)size);
}

/* Reads the ZIP64 end record when there is a locator for it before the end record. Where that does
   not have all ones, the two must not differ. */
SPDL__PRIVATE bool spdl__zip_read_end64(spdl__zip_opening *o) {
    const spdl__zip *zip = o->zip;
    const spdl__llu end = o->stop, at = end - SPDL__ZIP_LOCATOR_BYTES;
    const uint64_t latest = spdl__grown(SPDL__ZIP_END64_BYTES, at);
    spdl__llu *const field[3] = { &o->entries, &o->bytes, &o->offset };
    const uint8_t *record;
    uint64_t position, wide;
    int i;
    if (end < zip->tail_at + SPDL__ZIP_LOCATOR_BYTES) return true;
    if (spdl__le32(spdl__zip_at(zip, at)) != 0x07064b50) return true;
    if (spdl__le32(spdl__zip_at(zip, at) + 16) > 1)
        return spdl__zip_fail(o->where, SPDL_E_UNSUPPORTED, "archive of several disks");
    position = spdl__le64(spdl__zip_at(zip, at) + 8);
    if (position <= latest && latest - position < 65536 && /* what else may be in it */
        !spdl__zip_need_tail(o, position))
        return false;
    if (position > latest || position < zip->tail_at ||
        spdl__le32(spdl__zip_at(zip, position)) != 0x06064b50)
        position = latest; /* bytes in front of the archive: then it is the 56 before the locator */
    record = spdl__zip_at(zip, position);
    if (at < SPDL__ZIP_END64_BYTES || position < zip->tail_at ||
        spdl__le32(record) != 0x06064b50 || spdl__le64(record + 4) > at - position - 12)
        return spdl__zip_fail(o->where, SPDL_E_FORMAT,
                              "the ZIP64 locator at byte %llu leads to no ZIP64 end record", at);
    o->wide = true;
    o->stop = position;
    for (i = 0; i < 3; i++) {
        wide = spdl__le64(record + 32 + 8 * i);
        if (*field[i] != wide && *field[i] != (i == 0 ? 0xffff : 0xffffffff))
            return spdl__zip_fail(o->where, SPDL_E_FORMAT,
                                  "the end record at byte %llu and its ZIP64 record disagree", end);
        *field[i] = wide;
    }
    return true;
}

/* Finds out where the central directory is, and proves that it is there. */
SPDL__PRIVATE bool spdl__zip_read_end(spdl__zip_opening *o) {
    spdl__zip *zip = o->zip;
    const uint8_t *record;
    uint16_t disk;
    if (!spdl__zip_find_end(o)) return false;
    if (!spdl__zip_need_tail(o, spdl__grown(128, o->stop))) return false; /* ZIP64 records */
    record = spdl__zip_at(zip, o->stop);
    disk = spdl__le16(record + 4);
    o->entries = spdl__le16(record + 10);
    o->bytes = spdl__le32(record + 12);
    o->offset = spdl__le32(record + 16);
    if (!spdl__zip_read_end64(o)) return false;
    if (disk != 0 && !(o->wide && disk == 0xffff))
        return spdl__zip_fail(o->where, SPDL_E_UNSUPPORTED, "archive of several disks");
    if (o->bytes > o->stop || o->offset > o->stop - o->bytes)
        return spdl__zip_fail(o->where, SPDL_E_FORMAT,
                              "a central directory of %llu bytes at byte %llu does not fit before "
                              "its end record at byte %llu", o->bytes, o->offset, o->stop);
    zip->directory = o->stop - o->bytes;
    zip->prefix = zip->directory - o->offset;
    if (o->bytes >> 10 > SPDL__ZIP_MEMBERS)
        return spdl__zip_fail(o->where, SPDL_E_LIMIT, "a central directory of %llu bytes",
                              o->bytes);
    return spdl__zip_need_tail(o, zip->directory);
}

SPDL__PRIVATE size_t spdl__zip_entry_bytes(const uint8_t *e) {
    return (size_t)SPDL__ZIP_ENTRY_BYTES + spdl__le16(e + 28) + spdl__le16(e + 30) +
           spdl__le16(e + 32);
}

/* Fills in a member from its entry. Returns where its name ends, NULL when its extra field is
   damaged. One ".npy" at the end of the key is left out of the name. Sizes that are all ones are in
   the ZIP64 field, which need not be the first; up to three bytes may follow the last field. */
SPDL__PRIVATE char *spdl__zip_read_entry(const spdl__zip *zip, spdl__zip_member *m,
                                         const uint8_t *entry, char *name) {
    uint64_t *const field[3] = { &m->usize, &m->csize, &m->offset };
    const uint8_t *const key = entry + SPDL__ZIP_ENTRY_BYTES, *extra;
    size_t bytes = spdl__le16(entry + 28), length = 0, i;
    memset(m, 0, sizeof(*m));
    m->key = key;
    m->key_bytes = (uint16_t)bytes;
    m->name = name;
    m->flags = spdl__le16(entry + 8);
    m->method = spdl__le16(entry + 10);
    m->crc = spdl__le32(entry + 16);
    m->csize = spdl__le32(entry + 20);
    m->usize = spdl__le32(entry + 24);
    m->offset = spdl__le32(entry + 42);
    extra = key + bytes;
    if (bytes >= 4 && memcmp(extra - 4, ".npy", 4) == 0) bytes -= 4;
    memcpy(name, key, m->key_bytes);
    name[bytes] = name[m->key_bytes] = 0;
    name += m->key_bytes + 1;
    for (bytes = spdl__le16(entry + 30); bytes >= 4; extra += 4 + length, bytes -= 4 + length) {
        length = spdl__le16(extra + 2);
        if (length > bytes - 4) return NULL;
        if (spdl__le16(extra) == 1) break;
    }
    for (i = 0; i < 3 && bytes >= 4; i++) {
        if (*field[i] != 0xffffffff) continue;
        if (length < 8) return NULL;
        *field[i] = spdl__le64(extra + 4);
        extra += 8;
        length -= 8;
    }
    m->offset += spdl__min(zip->prefix, UINT64_MAX - m->offset);
    return name;
}

/* Fills in the members and their names, and proves that each entry is there as a whole. */
SPDL__PRIVATE bool spdl__zip_read_entries(spdl__zip_opening *o, char *names) {
    spdl__zip *zip = o->zip;
    spdl__llu at = zip->directory, left;
    spdl__zip_member *member = zip->members;
    const uint8_t *entry;
    for (; at < o->stop; at += spdl__zip_entry_bytes(entry), member++, zip->count++) {
        entry = spdl__zip_at(zip, at);
        left = o->stop - at;
        if (left < SPDL__ZIP_ENTRY_BYTES || spdl__le32(entry) != 0x02014b50 ||
            left < spdl__zip_entry_bytes(entry) ||
            memchr(entry + SPDL__ZIP_ENTRY_BYTES, 0, spdl__le16(entry + 28)) != NULL)
            return spdl__zip_fail(o->where, SPDL_E_FORMAT,
                                  "entry %llu of the central directory, at byte %llu, is damaged",
                                  (spdl__llu)zip->count, at);
        if (zip->count >= SPDL__ZIP_MEMBERS)
            return spdl__zip_fail(o->where, SPDL_E_LIMIT, "more than %d members",
                                  SPDL__ZIP_MEMBERS);
        names = spdl__zip_read_entry(zip, member, entry, names);
        if (names != NULL) continue;
        o->where->member = member;
        return spdl__zip_fail(o->where, SPDL_E_FORMAT,
                              "the extra field of its directory entry is damaged");
    }
    return zip->count == o->entries || (!o->wide && (zip->count & 0xffff) == o->entries) ||
           spdl__zip_fail(o->where, SPDL_E_FORMAT,
                          "the central directory has %llu entries, its end record says %llu",
                          (spdl__llu)zip->count, o->entries);
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

/* Of two that are equal in this, the one that the directory has first. */
SPDL__PRIVATE bool spdl__zip_before(const spdl__zip_member *a, const spdl__zip_member *b,
                                    bool by_name) {
    const int order = by_name ? spdl__zip_compare(a, b->key, b->key_bytes, "")
                              : (a->offset > b->offset) - (a->offset < b->offset);
    return order != 0 ? order < 0 : a < b;
}

/* Fills by_name with the members by name or by offset. A heap sort: no memory, no recursion. */
SPDL__PRIVATE void spdl__zip_sort(spdl__zip *zip, bool by_name) {
    const spdl__zip_member *const m = zip->members;
    uint32_t *const order = zip->by_name, held;
    size_t start = 0, end = zip->count, i, child;
    for (i = 0; i < end; i++) {
        order[i] = (uint32_t)i;
        if (i > 0 && spdl__zip_before(&m[i], &m[i - 1], by_name)) start = end / 2;
    }
    if (start == 0) return; /* as most are */
    while (end > 1) {
        if (start > 0) {
            i = --start; /* the heap grows */
        } else {
            i = 0;
            held = order[--end];
            order[end] = order[0];
            order[0] = held;
        }
        for (; (child = 2 * i + 1) < end; i = child) {
            child += child + 1 < end &&
                     spdl__zip_before(&m[order[child]], &m[order[child + 1]], by_name);
            if (!spdl__zip_before(&m[order[i]], &m[order[child]], by_name)) break;
            held = order[i];
            order[i] = order[child];
            order[child] = held;
        }
    }
}

/* Notes where each member must end: where the next one begins, or the directory. Of members that
   overlap, the one that comes later can be read. */
SPDL__PRIVATE void spdl__zip_find_limits(spdl__zip *zip) {
    spdl__zip_member *member;
    uint64_t limit = zip->directory, start = limit;
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
}

/* Of members with one name only the last stays. Returns whether any had to go. */
SPDL__PRIVATE bool spdl__zip_drop_hidden(spdl__zip *zip) {
    spdl__zip_member *member, *next;
    size_t i, kept = 0, count = zip->count;
    for (i = 0; i + 1 < count; i++) {
        member = &zip->members[zip->by_name[i]];
        next = &zip->members[zip->by_name[i + 1]];
        if (spdl__zip_compare(member, next->key, next->key_bytes, "") == 0) member->name = NULL;
    }
    for (i = 0; i < count; i++) {
        if (zip->members[i].name != NULL) zip->members[kept++] = zip->members[i];
    }
    zip->count = kept;
    return kept != count;
}

/* Whether a member is called `name` with `suffix`; *place: where in by_name it is or belongs. */
SPDL__PRIVATE bool spdl__zip_find(const spdl__zip *zip, const uint8_t *name, size_t bytes,
                                  const char *suffix, size_t *place) {
    size_t low = 0, high = zip->count, middle;
    int order = 1;
    while (low < high && order != 0) {
        middle = low + (high - low) / 2;
        order = spdl__zip_compare(&zip->members[zip->by_name[middle]], name, bytes, suffix);
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    *place = high;
    return order == 0;
}

SPDL__PRIVATE bool spdl__zip_ends_npy(const uint8_t *name, size_t bytes) {
    return bytes >= 4 && memcmp(name + bytes - 4, ".npy", 4) == 0;
}

/* Whether the name is the whole key: so of a key without ".npy", and of one that would have the
   name of another otherwise. Then no two members have one name. */
SPDL__PRIVATE bool spdl__zip_in_full(const spdl__zip *zip, const spdl__zip_member *member) {
    size_t bytes = member->key_bytes, place;
    while (spdl__zip_ends_npy(member->key, bytes)) {
        bytes -= 4;
        if (!spdl__zip_find(zip, member->key, bytes, "", &place)) return false;
    }
    return true;
}

/* Puts the ".npy" back where the name is the whole key. Files of NumPy have no other keys. */
SPDL__PRIVATE void spdl__zip_tell_apart(spdl__zip *zip) {
    spdl__zip_member *member;
    bool other = false;
    size_t i;
    for (i = 0; i < zip->count; i++)
        other = other || !spdl__zip_ends_npy(zip->members[i].key, zip->members[i].key_bytes);
    for (i = 0; i < zip->count && other; i++) {
        member = &zip->members[i];
        if (spdl__zip_in_full(zip, member) && spdl__zip_ends_npy(member->key, member->key_bytes))
            member->name[member->key_bytes - 4] = '.';
    }
}

/* Finds the member that has just this name. */
SPDL__PRIVATE bool spdl__zip_find_name(const spdl__zip *zip, const char *name, size_t bytes,
                                       size_t *place) {
    const uint8_t *text = (const uint8_t *)name;
    const spdl__zip_member *m = zip->members;
    if (spdl__zip_find(zip, text, bytes, ".npy", place) &&
        strlen(m[zip->by_name[*place]].name) == bytes)
        return true;
    return spdl__zip_find(zip, text, bytes, "", place) &&
           strlen(m[zip->by_name[*place]].name) == bytes;
}

SPDL__PRIVATE void spdl__zip_close(spdl__zip *zip) {
    spdl__zip_drop_tail(zip);
    if (zip->block_bytes > 0) spdl__free(&zip->allocator, zip->members, zip->block_bytes);
}

/* Makes the members of a directory, which is known to be there. */
SPDL__PRIVATE bool spdl__zip_make(spdl__zip_opening *o) {
    spdl__zip *zip = o->zip;
    const uint64_t most = spdl__min(o->bytes / SPDL__ZIP_ENTRY_BYTES, SPDL__ZIP_MEMBERS);
    const uint64_t bytes = most * (sizeof(*zip->members) + sizeof(*zip->by_name)) + o->bytes + 1;
    zip->members = (spdl__zip_member *)spdl__zip_alloc(o->where, bytes, "the directory");
    if (zip->members == NULL) return false;
    zip->block_bytes = (size_t)bytes; /* names take less than the directory */
    zip->by_name = (uint32_t *)(void *)(zip->members + most);
    return spdl__zip_read_entries(o, (char *)(zip->by_name + most));
}

/* Needs data or file, size, label and allocator. To be closed also after a failure. */
SPDL__PRIVATE bool spdl__zip_open(spdl__zip *zip, spdl__zip_where *where) {
    spdl__zip_opening o = { zip, where, 0, 0, 0, 0, false };
    zip->tail = zip->data;
    if (!spdl__zip_read_end(&o) || !spdl__zip_make(&o)) return false;
    spdl__zip_find_limits(zip);
    spdl__zip_sort(zip, true);
    if (spdl__zip_drop_hidden(zip)) spdl__zip_sort(zip, true);
    spdl__zip_tell_apart(zip);
    return true;
}

/* Whether a member can be read at all, its sizes can be true, and it can be where the directory
   says, before its header is looked at. Deflate makes at most 258 bytes of 2 bits. */
SPDL__PRIVATE bool spdl__zip_check(spdl__zip_where *where) {
    const spdl__zip_member *m = where->member;
    const spdl__llu csize = m->csize, usize = m->usize, offset = m->offset;
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
    if (m->method == SPDL__ZIP_STORED && csize != usize)
        return spdl__zip_fail(where, SPDL_E_FORMAT, "stored, but the directory says %llu bytes "
                              "and %llu in the file", usize, csize);
    if (m->method == SPDL__ZIP_DEFLATED && usize / 1032 > csize)
        return spdl__zip_fail(where, SPDL_E_FORMAT, "%llu deflated bytes cannot become %llu",
                              csize, usize);
    if (offset > m->limit || m->limit - offset < SPDL__ZIP_LOCAL_BYTES)
        return spdl__zip_fail(where, SPDL_E_FORMAT, "its header would be at byte %llu, past byte "
                              "%llu where it must end", offset, (spdl__llu)m->limit);
    return true;
}

/* Compares a member's header with the directory, and finds its payload: csize bytes, all before its
   limit. `local`: the header with as much of the name as fits before the limit. */
SPDL__PRIVATE bool spdl__zip_check_local(spdl__zip_where *where, const uint8_t *local,
                                         uint64_t *payload) {
    const spdl__zip_member *m = where->member;
    const spdl__llu at = m->offset;
    uint64_t left = m->limit - at - SPDL__ZIP_LOCAL_BYTES;
    if (spdl__le32(local) != 0x04034b50)
        return spdl__zip_fail(where, SPDL_E_FORMAT, "no header at byte %llu", at);
    if (spdl__le16(local + 26) != m->key_bytes || m->key_bytes > left ||
        memcmp(local + SPDL__ZIP_LOCAL_BYTES, m->key, m->key_bytes) != 0)
        return spdl__zip_fail(where, SPDL_E_FORMAT, "the header at byte %llu has another name", at);
    left -= m->key_bytes;
    if (spdl__le16(local + 28) > left || m->csize > left - spdl__le16(local + 28))
        return spdl__zip_fail(where, SPDL_E_FORMAT, "%llu bytes at byte %llu reach past byte %llu "
                              "where it must end", (spdl__llu)m->csize, at, (spdl__llu)m->limit);
    *payload = at + SPDL__ZIP_LOCAL_BYTES + m->key_bytes + spdl__le16(local + 28);
    return true;
}

/* ============================================================================================= */
/* >>npy-impl
   The header of an array: a Python literal, read by a tokenizer that knows just the forms it can
   have. Sizes that come out of it are products, each checked before it is formed. Then what reading
   changes about the data: byte order and index order. Nothing is kept of the caller's memory. */

#define SPDL__NPY_HEAD_BYTES 65536           /* longest header text */
#define SPDL__NPY_NESTING 16                 /* structured types inside structured types */
#define SPDL__NPY_MOST ((uint64_t)INT64_MAX) /* NumPy's own bound for the bytes of an array */

/* Where the tokenizer is, what it found that the caller is not told, and what went wrong first. */
typedef struct spdl__npy_text {
    const char *begin, *at, *end;
    bool foreign; /* the numbers are not in the byte order of this machine */
    bool fortran; /* the first index varies fastest */
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

/* Takes the character if it comes next. Inlined, a header is read in 3/4 of the time. */
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

/* A tuple: (), (n,), (n, m) and so on; one alone needs its comma. Python 2 put an L after some. */
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
    uint64_t product = spdl__max(itemsize, 1);
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

#define SPDL__NPY_HOST_ORDER (SPDL__BIG_ENDIAN ? '>' : '<')

/* A simple type, such as '<f4', '|S12' or '>M8[ns]'. */
SPDL__PRIVATE bool spdl__npy_simple(spdl__npy_text *t, spdl_npy_info *info) {
    const char *at, *end, *string;
    char kind, order = SPDL__NPY_HOST_ORDER;
    uint64_t number = 1;
    size_t bytes;
    bool known = true;
    if (!spdl__npy_string(t, &string, &bytes)) return false;
    at = string;
    end = string + bytes;
    if (at != end && (*at == '<' || *at == '>')) order = *at++;
    else if (at != end && (*at == '=' || *at == '|')) at++;
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
    info->kind = kind;
    t->foreign = order != SPDL__NPY_HOST_ORDER && kind != 'S' && kind != 'V' &&
                 (info->itemsize > 1 || kind == 'U');
    return true;
}

/* The beginning of a field: ('name', or (('title', 'name'), */
SPDL__PRIVATE bool spdl__npy_field_name(spdl__npy_text *t) {
    const char *string;
    size_t bytes;
    bool titled;
    if (!spdl__npy_need(t, '(')) return false;
    titled = spdl__npy_take(t, '(');
    if (!spdl__npy_string(t, &string, &bytes) || !spdl__npy_need(t, ',')) return false;
    return !titled || (spdl__npy_string(t, &string, &bytes) && spdl__npy_need(t, ')') &&
                       spdl__npy_need(t, ','));
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

/* A structured type after its '[': fields, maybe structured in turn. Leaves the size in info. */
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
        info->kind = 'V';
        t->foreign = false; /* its fields stay as they are, and descr says how */
        bytes = (size_t)(t->at - first);
    } else {
        if (!spdl__npy_simple(t, info)) return false;
        bytes = (size_t)(t->at - first) - 2;
        first++; /* without its quotes */
    }
    if (bytes >= sizeof(info->dtype)) {
        bytes = sizeof(info->dtype) - 1;
        while (bytes > 0 && ((unsigned char)first[bytes] & 0xc0) == 0x80) bytes--;
    }
    memcpy(info->dtype, first, bytes); /* info was cleared */
    if (t->foreign) info->dtype[0] = SPDL__NPY_HOST_ORDER;
    return true;
}

/* Takes the word if it comes next. */
SPDL__INLINE bool spdl__npy_word(spdl__npy_text *t, const char *word) {
    const size_t bytes = strlen(word);
    t->at = spdl__npy_skip_blanks(t->at, t->end);
    if ((size_t)(t->end - t->at) < bytes || memcmp(t->at, word, bytes) != 0) return false;
    t->at += bytes;
    return true;
}

SPDL__PRIVATE bool spdl__npy_is(const char *string, size_t bytes, const char *word) {
    return bytes == strlen(word) && memcmp(string, word, bytes) == 0;
}

/* Reads a header, {'descr': .., 'fortran_order': .., 'shape': ..}, each once, in any order. */
SPDL__PRIVATE bool spdl__npy_read(spdl__npy_text *t, const uint8_t *text, size_t bytes,
                                  spdl_npy_info *info) {
    bool good, comma = true, have_descr = false, have_order = false, have_shape = false;
    const char *key;
    t->begin = t->at = (const char *)text;
    t->end = t->begin + bytes;
    memset(info, 0, sizeof(*info));
    if (!spdl__npy_need(t, '{')) return false;
    while (!spdl__npy_take(t, '}')) {
        if (!comma) return spdl__npy_need(t, ',');
        if (!spdl__npy_string(t, &key, &bytes) || !spdl__npy_need(t, ':')) return false;
        if (spdl__npy_is(key, bytes, "descr") && !have_descr) {
            good = have_descr = spdl__npy_descr(t, info);
        } else if (spdl__npy_is(key, bytes, "fortran_order") && !have_order) {
            t->fortran = spdl__npy_word(t, "True");
            good = have_order = t->fortran || spdl__npy_word(t, "False") ||
                                spdl__npy_fail(t, SPDL_E_FORMAT,
                                               "fortran_order is neither True nor False");
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
    if (t->at != t->end) return spdl__npy_fail(t, SPDL_E_FORMAT, "text after the dictionary");
    if (!spdl__npy_product(info->shape, info->ndim, info->itemsize, &info->count))
        return spdl__npy_fail(t, SPDL_E_FORMAT, "the product of the shape overflows");
    info->bytes = info->count * info->itemsize;
    return true;
}

/* Reverses the bytes of each number: characters have four bytes, complex numbers two parts. */
SPDL__PRIVATE void spdl__npy_swap(uint8_t *data, uint64_t bytes, const spdl_npy_info *info) {
    const size_t number = (size_t)info->itemsize / (info->kind == 'c' ? 2 : 1);
    const size_t unit = info->kind == 'U' ? 4 : number;
    uint8_t *const end = data + bytes, held;
    size_t i;
    for (; data < end; data += unit) {
        for (i = 0; i < unit / 2; i++) {
            held = data[i];
            data[i] = data[unit - 1 - i];
            data[unit - 1 - i] = held;
        }
    }
}

/* Copies rows x columns elements so that rows become columns, in tiles that the cache holds. `from`
   steps by one element along a column, `to` by one along a row. */
SPDL__PRIVATE void spdl__npy_turn(uint8_t *to, uint64_t to_row, const uint8_t *from,
                                  uint64_t from_column, uint64_t rows, uint64_t columns,
                                  size_t bytes) {
    const uint64_t tile = 32;
    uint64_t top, left, row, column;
    for (top = 0; top < rows; top += tile) {
        for (left = 0; left < columns; left += tile) {
            for (row = top; row < spdl__min(top + tile, rows); row++) {
                for (column = left; column < spdl__min(left + tile, columns); column++) {
                    uint8_t *at = to + (row * to_row + column) * bytes;
                    const uint8_t *source = from + (column * from_column + row) * bytes;
                    if (bytes == 4) memcpy(at, source, 4); /* a constant becomes a single move */
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
   Arrays out of archives. Between open and close two things change, each a word that is exchanged
   as a whole, so the other calls may run on any threads at once: the mapping that the first view
   makes, and the tables that the first to verify or inflate makes.
   There is one way to read a member: spdl__npz_begin finds it and reads a stored one to its end; of
   a deflated one it prepares a run of the decoder, and after each run spdl__npz_ran takes the CRC
   and prepares the next, until it says that the member is over. The first run makes the header and
   as much of the data as HEAD bytes hold, the next ones go straight to the caller's memory. Between
   them the thread may run the decoder of another member beside this one (>>load-impl).
   The reader lies on the stack of the call (about 17 KB); the call allocates for a larger deflated
   member of a large file, a long header, or an array in Fortran order. Sizes are proven plausible
   first: a deflated member is at most 1032 times its bytes in the file, an array at most its
   member. */

#ifndef SPDL__NPZ_SMALL_FILE
#define SPDL__NPZ_SMALL_FILE 262144 /* read at once up to here; measured against mapping it */
#endif
#define SPDL__NPZ_PIECE 131072 /* bytes whose CRC is taken while they are in the cache */
#define SPDL__NPZ_WINDOW 2048  /* of a file, on the stack */
#define SPDL__NPZ_INFO 73728   /* deflated bytes that hold the longest header */
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
    spdl_npz_desc desc; /* with its defaults */
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
    const spdl__zip_member *member;
    bool stored;
    uint64_t payload; /* where its bytes begin */

    /* Bytes of a file: the window, or a block for what that cannot hold. */
    uint8_t *window; /* `local`, or the caller's */
    size_t room, have;
    size_t ahead; /* how much to read to it at once: little, before a member that is large */
    uint64_t window_at;
    uint8_t *block;
    size_t block_bytes;

    /* Set with the header. */
    spdl_npy_info *info; /* `own`, or the caller's */
    const uint8_t *head; /* what comes before the data: in memory, in the window, or inflated */
    size_t head_bytes;
    bool swap, turn; /* what is to be converted */
    uint8_t *large;  /* a header that `small` cannot hold */
    size_t large_bytes;

    /* Of a read. */
    bool verify;
    bool roomy; /* the caller's memory may be written behind the array */
    void *to;   /* the caller's memory, of `to_bytes` */
    size_t to_bytes;
    uint8_t *held;  /* the data before they are turned */
    uint8_t *data;  /* where the next bytes of the array go */
    size_t want;    /* bytes of the array that have no place yet */
    uint8_t *piece; /* what the decoder makes in this run; NULL: the header */
    uint32_t crc;   /* of what is made */

    spdl_npy_info own;
    uint8_t small[SPDL__NPZ_HEAD + SPDL__INFLATE_FAST_OUT];
    uint8_t local[SPDL__NPZ_WINDOW];
    spdl__inflate inflate;
} spdl__npz_reader;

/* Makes the tables, or finds those that another call made. */
SPDL__PRIVATE bool spdl__npz_need_tables(spdl__npz_reader *r) {
    spdl_npz *npz = r->npz;
    uint64_t found = spdl__load(&npz->tables); /* pairs with the cas below */
    if (found == 0) {
        spdl__npz_tables *made =
            (spdl__npz_tables *)spdl__zip_alloc(&r->where, sizeof(*made), "tables");
        if (made == NULL) return false;
        spdl__crc_init(&made->crc);
        spdl__inflate_build_fixed(&made->fixed);
        if (spdl__cas(&npz->tables, &found, (uint64_t)(uintptr_t)made))
            found = (uint64_t)(uintptr_t)made;
        else spdl__free(&npz->zip.allocator, made, sizeof(*made)); /* another was faster */
    }
    r->tables = (const spdl__npz_tables *)(uintptr_t)found;
    return true;
}

SPDL__PRIVATE bool spdl__npz_has(const spdl__npz_reader *r, uint64_t at, size_t bytes) {
    return at >= r->window_at && at - r->window_at <= r->have &&
           bytes <= r->have - (size_t)(at - r->window_at);
}

/* Where `bytes` bytes of the archive are, which are known to be in it, and in *end what else can be
   looked at. Of a file they are read to the window, if that has the room. NULL: it failed. */
SPDL__PRIVATE const uint8_t *spdl__npz_fetch(spdl__npz_reader *r, uint64_t at, size_t bytes,
                                             const uint8_t **end) {
    const spdl__zip *zip = &r->npz->zip;
    const size_t most = (size_t)spdl__min(spdl__max(bytes + SPDL__NPZ_AFTER, r->ahead),
                                          zip->size - at);
    const uint8_t *from = zip->data;
    if (from != NULL) {
        *end = from + zip->size;
        return from + at;
    }
    if (most <= r->room) {
        if (!spdl__npz_has(r, at, bytes)) {
            r->window_at = at;
            r->have = spdl__zip_read(&r->where, r->window, most, bytes, at);
            if (r->have < bytes) return NULL;
        }
        *end = r->window + r->have;
        return r->window + (size_t)(at - r->window_at);
    }
    spdl__free(&zip->allocator, r->block, r->block_bytes);
    r->block_bytes = most;
    r->block = (uint8_t *)spdl__zip_alloc(&r->where, most, "its bytes in the file");
    if (r->block == NULL) return NULL;
    *end = r->block + spdl__zip_read(&r->where, r->block, most, bytes, at);
    return *end >= r->block + bytes ? r->block : NULL;
}

/* Copies bytes of the archive: few of them by way of the window, which looks ahead. */
SPDL__PRIVATE bool spdl__npz_copy_out(spdl__npz_reader *r, uint64_t at, void *to, size_t bytes) {
    const uint8_t *from, *end;
    if (r->npz->zip.data == NULL && bytes > r->ahead / 2 && !spdl__npz_has(r, at, bytes))
        return spdl__zip_read(&r->where, to, bytes, bytes, at) == bytes;
    from = spdl__npz_fetch(r, at, bytes, &end);
    if (from != NULL) memcpy(to, from, bytes);
    return from != NULL;
}

SPDL__PRIVATE bool spdl__npz_inflate_error(spdl__npz_reader *r, spdl__inflate_mode ended) {
    const spdl__llu csize = r->member->csize;
    const uint64_t at = (uint64_t)(r->inflate.in - r->inflate.in_begin); /* or further */
    if (ended == SPDL__INFLATE_FAILED)
        return spdl__zip_fail(&r->where, SPDL_E_FORMAT, "damaged near byte %llu of %llu: %s",
                              (spdl__llu)spdl__min(at, csize), csize, r->inflate.reason);
    return spdl__zip_fail(
        &r->where, SPDL_E_FORMAT, "inflates to %s than the %llu bytes the directory says",
        ended == SPDL__INFLATE_DONE ? "less" : "more", (spdl__llu)r->member->usize);
}

/* Makes a reader that can be used for one member after the other. */
SPDL__PRIVATE void spdl__npz_init_reader(spdl__npz_reader *r, const spdl_npz *npz,
                                         spdl_error *error) {
    memset(r, 0, offsetof(spdl__npz_reader, own)); /* the rest is filled before it is used */
    r->npz = (spdl_npz *)SPDL__UNCONST(npz); /* for what is made once */
    r->where.zip = npz != NULL ? &npz->zip : NULL;
    r->where.error = error;
    r->info = &r->own;
    r->window = r->local;
    r->room = sizeof(r->local);
}

/* Frees what was allocated for the last member. Returns what came of it. */
SPDL__PRIVATE spdl_result spdl__npz_end(spdl__npz_reader *r) {
    const spdl_allocator *allocator;
    if (r->npz == NULL) return r->where.result;
    allocator = &r->npz->zip.allocator;
    spdl__free(allocator, r->block, r->block_bytes);
    spdl__free(allocator, r->large, r->large_bytes);
    if (r->held != NULL) spdl__free(allocator, r->held, (size_t)r->info->bytes);
    r->block = r->large = r->held = NULL;
    return r->where.result;
}

/* Finds a member, and where its bytes begin. */
SPDL__PRIVATE bool spdl__npz_locate(spdl__npz_reader *r, size_t index) {
    const spdl_npz *npz = r->npz;
    const spdl__zip_member *m;
    const uint8_t *local, *end;
    uint64_t bytes;
    r->where.result = SPDL_OK;
    if (npz == NULL) return spdl__zip_fail(&r->where, SPDL_E_INVALID, "npz is NULL");
    r->where.member = NULL;
    if (index >= npz->zip.count)
        return spdl__zip_fail(&r->where, SPDL_E_NOT_FOUND, "no array %llu; there are %llu",
                              (spdl__llu)index, (spdl__llu)npz->zip.count);
    m = r->where.member = r->member = &npz->zip.members[index];
    r->stored = m->method == SPDL__ZIP_STORED;
    r->piece = NULL;
    r->ahead = m->csize > r->room / 4 ? SPDL__NPZ_WINDOW : r->room;
    if (npz->is_npy) return true;
    if (!spdl__zip_check(&r->where)) return false;
    bytes = spdl__min((uint64_t)SPDL__ZIP_LOCAL_BYTES + m->key_bytes, m->limit - m->offset);
    local = spdl__npz_fetch(r, m->offset, (size_t)bytes, &end);
    return local != NULL && spdl__zip_check_local(&r->where, local, &r->payload);
}

/* Prepares the first run of the decoder, with so many of the compressed bytes. */
SPDL__PRIVATE bool spdl__npz_start_inflate(spdl__npz_reader *r, uint64_t bytes) {
    spdl__inflate *s = &r->inflate;
    const uint8_t *end, *in = NULL;
    if (spdl__npz_need_tables(r)) in = spdl__npz_fetch(r, r->payload, (size_t)bytes, &end);
    if (in == NULL) return false;
    r->head = r->small;
    spdl__inflate_init(s, &r->tables->fixed, in, (size_t)bytes, r->small);
    s->in_room = end;
    s->slack = true;
    s->limit = r->small + spdl__min(r->member->usize, SPDL__NPZ_HEAD);
    return true;
}

/* Makes the first `bytes` of the member be at r->head. */
SPDL__PRIVATE bool spdl__npz_need_head(spdl__npz_reader *r, size_t bytes) {
    spdl__inflate *s = &r->inflate;
    spdl__inflate_mode ended;
    const uint8_t *end;
    if (bytes > r->member->usize)
        return spdl__zip_fail(&r->where, SPDL_E_FORMAT, "no .npy array: %llu bytes, a header of %u",
                              (spdl__llu)r->member->usize, (unsigned)bytes);
    r->head_bytes = bytes;
    if (r->stored) {
        r->head = spdl__npz_fetch(r, r->payload, bytes, &end);
        return r->head != NULL;
    }
    if ((size_t)(s->out - s->base) >= bytes) return true;
    if (bytes > SPDL__NPZ_HEAD) { /* what is inflated moves to other memory */
        r->large_bytes = bytes + SPDL__INFLATE_FAST_OUT;
        r->large = (uint8_t *)spdl__zip_alloc(&r->where, r->large_bytes, "its header");
        if (r->large == NULL) return false;
        memcpy(r->large, r->small, (size_t)(s->out - s->base));
        s->out = r->large + (s->out - s->base);
        r->head = s->base = r->large;
    }
    ended = spdl__inflate_run(s, s->base + bytes);
    return (ended != SPDL__INFLATE_FAILED && s->out == s->limit) ||
           spdl__npz_inflate_error(r, ended);
}

/* Reads a member's header: then its data are known to fit, and info is as they will be read. */
SPDL__PRIVATE bool spdl__npz_parse(spdl__npz_reader *r) {
    const spdl_npz_desc *desc = &r->npz->desc;
    spdl_npy_info *info = r->info;
    spdl__npy_text t;
    uint32_t length;
    spdl__llu left;
    size_t text;
    if (!spdl__npz_need_head(r, 10)) return false;
    if (memcmp(r->head, "\x93NUMPY", 6) != 0)
        return spdl__zip_fail(&r->where, SPDL_E_FORMAT,
                              "no .npy array: it does not begin with \\x93NUMPY");
    if (r->head[6] < 1 || r->head[6] > 3 || r->head[7] != 0)
        return spdl__zip_fail(&r->where, SPDL_E_UNSUPPORTED,
                              ".npy version %u.%u; only 1.0, 2.0 and 3.0 can be read",
                              (unsigned)r->head[6], (unsigned)r->head[7]);
    text = r->head[6] == 1 ? 10 : 12; /* where the dictionary begins */
    if (!spdl__npz_need_head(r, text)) return false;
    length = text == 10 ? spdl__le16(r->head + 8) : spdl__le32(r->head + 8);
    if (length > SPDL__NPY_HEAD_BYTES)
        return spdl__zip_fail(&r->where, SPDL_E_LIMIT, "a header of %lu bytes; %d at most",
                              (unsigned long)length, SPDL__NPY_HEAD_BYTES);
    if (!spdl__npz_need_head(r, text + length)) return false;
    if (!spdl__npy_read(&t, r->head + text, length, info))
        return spdl__zip_fail(&r->where, t.result, "%s", t.reason);
    left = r->member->usize - r->head_bytes;
    if (info->bytes > left)
        return spdl__zip_fail(&r->where, SPDL_E_FORMAT, "the shape needs %llu bytes, but %llu "
                              "follow the header", (spdl__llu)info->bytes, left);
    if (info->bytes > desc->max_bytes)
        return spdl__zip_fail(&r->where, SPDL_E_LIMIT, "%llu bytes, more than max_bytes, which is "
                              "%llu", (spdl__llu)info->bytes, (spdl__llu)desc->max_bytes);
    info->stored = r->stored;
    r->swap = t.foreign;
    r->turn = t.fortran && info->ndim > 1;
    r->verify = !desc->no_crc && !r->npz->is_npy;
    return true;
}

/* After the first run of the decoder: reads the header. A run that went wrong may have gone on with
   what follows its input; then it is done again, and stops before that. */
SPDL__PRIVATE bool spdl__npz_inflated_head(spdl__npz_reader *r, spdl__inflate_mode ended) {
    spdl__inflate *s = &r->inflate;
    const uint8_t *const in = s->in_begin;
    uint8_t *const limit = s->limit;
    if (ended == SPDL__INFLATE_FAILED || s->out != limit) {
        spdl__inflate_init(s, s->fixed, in, (size_t)(s->in_end - in), r->small);
        (void)spdl__inflate_run(s, limit);
    }
    return spdl__npz_parse(r);
}

/* Finds a member and reads its header, and no more. */
SPDL__PRIVATE bool spdl__npz_start(spdl__npz_reader *r, size_t index) {
    uint64_t bytes;
    if (!spdl__npz_locate(r, index)) return false;
    if (r->stored) return spdl__npz_parse(r);
    bytes = r->member->csize;
    if (r->npz->zip.data == NULL) bytes = spdl__min(bytes, SPDL__NPZ_INFO);
    if (!spdl__npz_start_inflate(r, bytes)) return false;
    return spdl__npz_inflated_head(r, spdl__inflate_run(&r->inflate, r->inflate.limit));
}

/* The array is there as a whole: compares its CRC, and gives its bytes the order that is wanted. */
SPDL__PRIVATE bool spdl__npz_complete(spdl__npz_reader *r) {
    if (r->verify && r->crc != r->member->crc)
        return spdl__zip_fail(&r->where, SPDL_E_CHECKSUM,
                              "CRC-32 is %08lx, the directory says %08lx",
                              (unsigned long)r->crc, (unsigned long)r->member->crc);
    if (r->held != NULL) spdl__npy_to_c_order((uint8_t *)r->to, r->held, r->info);
    if (r->swap && r->info->bytes > 0) spdl__npy_swap((uint8_t *)r->to, r->info->bytes, r->info);
    return true;
}

/* Reads the data of a stored member whose header is there. */
SPDL__PRIVATE bool spdl__npz_read_stored(spdl__npz_reader *r) {
    uint64_t at = r->payload + r->head_bytes;
    const uint8_t *from, *end;
    size_t piece;
    if (r->verify) r->crc = spdl__crc_add(&r->tables->crc, 0, r->head, r->head_bytes);
    for (; r->want > 0; r->want -= piece, r->data += piece, at += piece) {
        piece = r->verify ? (size_t)spdl__min(r->want, SPDL__NPZ_PIECE) : r->want;
        if (!spdl__npz_copy_out(r, at, r->data, piece)) return false;
        if (r->verify) r->crc = spdl__crc_add(&r->tables->crc, r->crc, r->data, piece);
    }
    for (; r->verify && at < r->payload + r->member->usize; at += piece) { /* after the array */
        piece = (size_t)spdl__min(r->payload + r->member->usize - at, SPDL__NPZ_PIECE);
        from = spdl__npz_fetch(r, at, piece, &end);
        if (from == NULL) return false;
        r->crc = spdl__crc_add(&r->tables->crc, r->crc, from, piece);
    }
    return spdl__npz_complete(r);
}

/* Reads the data of a deflated member where bytes follow the array: they, too, make the CRC. */
SPDL__PRIVATE bool spdl__npz_read_whole(spdl__npz_reader *r) {
    const size_t usize = (size_t)r->member->usize;
    const uint8_t *const in = r->inflate.in_begin;
    spdl__inflate_mode ended;
    uint8_t *whole;
    bool whole_there;
    if (usize - r->head_bytes - r->info->bytes > r->npz->desc.max_bytes)
        return spdl__zip_fail(&r->where, SPDL_E_LIMIT, "more than max_bytes follow the array");
    whole = (uint8_t *)spdl__zip_alloc(&r->where, r->member->usize, "what follows the array");
    if (whole == NULL) return false;
    spdl__inflate_init(&r->inflate, r->inflate.fixed, in, (size_t)(r->inflate.in_end - in), whole);
    ended = spdl__inflate_run(&r->inflate, whole + usize);
    if (ended == SPDL__INFLATE_FULL) ended = spdl__inflate_run(&r->inflate, whole + usize);
    whole_there = ended == SPDL__INFLATE_DONE && r->inflate.out == whole + usize;
    if (r->want > 0) memcpy(r->data, whole + r->head_bytes, r->want);
    r->crc = spdl__crc_add(&r->tables->crc, 0, whole, usize);
    spdl__free(&r->npz->zip.allocator, whole, usize);
    return whole_there ? spdl__npz_complete(r) : spdl__npz_inflate_error(r, ended);
}

/* The header is read: whether the array fits the memory it is to be read to, and where its bytes go
   first. */
SPDL__PRIVATE bool spdl__npz_aim(spdl__npz_reader *r) {
    const spdl__llu bytes = r->info->bytes, room = r->to_bytes;
    if (bytes > room)
        return spdl__zip_fail(&r->where, SPDL_E_INVALID,
                              "the array has %llu bytes, the memory for it %llu", bytes, room);
    if (r->to == NULL && bytes > 0)
        return spdl__zip_fail(&r->where, SPDL_E_INVALID, "the memory for it is NULL");
    if (r->verify && !spdl__npz_need_tables(r)) return false;
    r->data = (uint8_t *)r->to;
    r->want = (size_t)bytes;
    if (!r->turn || bytes == 0) return true;
    r->data = r->held = (uint8_t *)spdl__zip_alloc(&r->where, bytes, "changing its order");
    return r->held != NULL;
}

/* Takes what the first run made of the data, and directs the decoder to the caller's memory. */
SPDL__PRIVATE void spdl__npz_open_data(spdl__npz_reader *r) {
    spdl__inflate *s = &r->inflate;
    size_t have = (size_t)(s->out - s->base);
    if (r->verify) r->crc = spdl__crc_add(&r->tables->crc, 0, r->head, have);
    have = (size_t)spdl__min(have - r->head_bytes, r->want);
    if (have > 0) memcpy(r->data, r->head + r->head_bytes, have);
    r->want -= have;
    r->piece = s->out;
    if (r->want == 0) return;
    s->before = r->head;
    s->before_bytes = r->head_bytes;
    s->base = r->data;
    s->out = r->piece = r->data + have;
}

/* After a run of the decoder. True: it is to run again, to its limit; or the member is over. */
SPDL__PRIVATE bool spdl__npz_ran(spdl__npz_reader *r, spdl__inflate_mode ended) {
    spdl__inflate *s = &r->inflate;
    size_t bytes;
    if (r->piece == NULL) {
        if (!spdl__npz_inflated_head(r, ended) || !spdl__npz_aim(r)) return false;
        if (r->verify && r->member->usize > r->head_bytes + r->info->bytes)
            return spdl__npz_read_whole(r) && false;
        spdl__npz_open_data(r);
    } else if (ended == SPDL__INFLATE_FAILED || s->out != s->limit) {
        return spdl__npz_inflate_error(r, ended);
    } else if (r->verify) {
        bytes = (size_t)(s->out - r->piece);
        r->crc = spdl__crc_add(&r->tables->crc, r->crc, r->piece, bytes);
    }
    if (r->want > 0) {
        bytes = (size_t)spdl__min(r->want, SPDL__NPZ_PIECE);
        r->want -= bytes;
        r->piece = s->out;
        s->limit = s->out + bytes;
        s->slack = r->want >= SPDL__INFLATE_FAST_OUT || (r->roomy && !r->turn);
        return true;
    }
    if (r->member->usize == r->head_bytes + r->info->bytes) {
        ended = spdl__inflate_run(s, s->out); /* the stream ends with the array */
        if (ended != SPDL__INFLATE_DONE) return spdl__npz_inflate_error(r, ended);
    }
    (void)spdl__npz_complete(r);
    return false;
}

/* Begins to read a member to memory. True: the decoder is to run to its limit, and then
   spdl__npz_ran says how it goes on; or the member is over, with where.result. */
SPDL__PRIVATE bool spdl__npz_begin(spdl__npz_reader *r, size_t index, void *to, size_t to_bytes) {
    if (!spdl__npz_locate(r, index)) return false;
    r->to = to;
    r->to_bytes = to_bytes;
    if (!r->stored) return spdl__npz_start_inflate(r, r->member->csize);
    if (spdl__npz_parse(r) && spdl__npz_aim(r)) (void)spdl__npz_read_stored(r);
    return false;
}

/* Makes a .npy file look like an archive of one stored member; all else of that is zero. */
SPDL__PRIVATE void spdl__npz_open_npy(spdl_npz *npz) {
    npz->only.key = (const uint8_t *)"arr_0.npy";
    npz->only.key_bytes = 9;
    npz->only.name = (char *)SPDL__UNCONST("arr_0");
    npz->only.limit = npz->only.csize = npz->only.usize = npz->zip.size;
    npz->zip.members = &npz->only;
    npz->zip.by_name = &npz->only_order;
    npz->zip.count = 1;
    npz->is_npy = true;
}

/* Makes an archive that has no bytes yet, if there is all that its open function needs. */
SPDL__PRIVATE spdl_result spdl__npz_make(spdl_npz **npz, bool there, const char *name,
                                         const char *function, const spdl_npz_desc *desc) {
    spdl_npz_desc full;
    spdl_npz *made;
    memset(&full, 0, sizeof(full));
    if (desc != NULL) full = *desc;
    if (full.max_bytes == 0) full.max_bytes = (uint64_t)1 << 40;
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
    spdl__label(made->zip.label, sizeof(made->zip.label), name);
    return SPDL_OK;
}

/* Gets a small file whole, or the bytes that say what a large one is, and reads the directory. */
SPDL__PRIVATE bool spdl__npz_read_start(spdl_npz *npz, spdl__zip_where *where) {
    spdl__zip *zip = &npz->zip;
    const size_t size = (size_t)zip->size, first = (size_t)spdl__min(zip->size, 6);
    uint8_t magic[6] = { 0 };
    if (zip->size == 0) return spdl__zip_fail(where, SPDL_E_FORMAT, "empty, 0 bytes");
    if (zip->data == NULL && zip->size <= SPDL__NPZ_SMALL_FILE) {
        npz->small = (uint8_t *)spdl__zip_alloc(where, size, "the file");
        if (npz->small == NULL || spdl__zip_read(where, npz->small, size, size, 0) < size)
            return false;
        (void)spdl__os_file_close(zip->file);
        zip->file = SPDL__NO_FILE;
        zip->data = npz->small;
    }
    if (zip->data != NULL) memcpy(magic, zip->data, first);
    else if (spdl__zip_read(where, magic, first, first, 0) < first) return false;
    if (memcmp(magic, "\x93NUMPY", 6) != 0) return spdl__zip_open(zip, where);
    spdl__npz_open_npy(npz);
    return true;
}

/* Ends an open: with the archive, or with what is wrong. `reason` says why there is no file. */
SPDL__PRIVATE spdl_result spdl__npz_opened(spdl_npz **npz, const char *reason) {
    spdl__zip_where where = { &(*npz)->zip, NULL, (*npz)->desc.error, SPDL_OK };
    if (reason != NULL) spdl__zip_fail(&where, SPDL_E_IO, "%s", reason);
    else if (spdl__npz_read_start(*npz, &where)) return SPDL_OK;
    spdl_npz_close(*npz);
    *npz = NULL;
    return where.result;
}

SPDL_API spdl_result spdl_npz_open(spdl_npz **npz, const char *path,
                                        const spdl_npz_desc *desc) {
    spdl_result result = spdl__npz_make(npz, path != NULL, path, "spdl_npz_open", desc);
    spdl__zip *zip = result == SPDL_OK ? &(*npz)->zip : NULL;
    if (zip == NULL) return result;
    return spdl__npz_opened(npz, spdl__os_file_open(&zip->file, path, SPDL__OS_READ, &zip->size));
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

SPDL_API spdl_result spdl_npz_find(const spdl_npz *npz, const char *name, size_t *index) {
    size_t place, bytes = name != NULL ? strlen(name) : 0;
    if (npz == NULL || name == NULL) return SPDL_E_NOT_FOUND;
    if (!spdl__zip_find_name(&npz->zip, name, bytes, &place) &&
        !(spdl__zip_ends_npy((const uint8_t *)name, bytes) &&
          spdl__zip_find_name(&npz->zip, name, bytes - 4, &place)))
        return SPDL_E_NOT_FOUND;
    if (index != NULL) *index = npz->zip.by_name[place];
    return SPDL_OK;
}

SPDL_API spdl_result spdl_npz_info(const spdl_npz *npz, size_t index, spdl_npy_info *info,
                                   spdl_error *error) {
    spdl__npz_reader r;
    if (info == NULL) return spdl__error_set(error, SPDL_E_INVALID, "npz: info is NULL");
    spdl__npz_init_reader(&r, npz, error);
    r.info = info;
    (void)spdl__npz_start(&r, index);
    return spdl__npz_end(&r);
}

SPDL_API spdl_result spdl_npz_read(const spdl_npz *npz, size_t index, void *data, size_t bytes,
                                   spdl_error *error) {
    spdl__npz_reader r;
    bool more;
    spdl__npz_init_reader(&r, npz, error);
    more = spdl__npz_begin(&r, index, data, bytes);
    while (more) more = spdl__npz_ran(&r, spdl__inflate_run(&r.inflate, r.inflate.limit));
    return spdl__npz_end(&r);
}

SPDL_API spdl_result spdl_npz_read_rows(const spdl_npz *npz, size_t index, uint64_t first,
                                        uint64_t count, void *data, size_t bytes,
                                        spdl_error *error) {
    spdl__llu rows, row, wanted;
    spdl__npz_reader r;
    spdl__npz_init_reader(&r, npz, error);
    if (!spdl__npz_start(&r, index)) return spdl__npz_end(&r);
    rows = r.own.ndim > 0 ? r.own.shape[0] : 0;
    row = rows > 0 ? r.own.bytes / rows : 0;
    wanted = row * count;
    if (!r.stored)
        spdl__zip_fail(&r.where, SPDL_E_UNSUPPORTED, "deflated: it has no rows to pick");
    else if (r.turn)
        spdl__zip_fail(&r.where, SPDL_E_UNSUPPORTED, "in Fortran order: its rows are not together");
    else if (r.own.ndim == 0 || first > rows || count > rows - first)
        spdl__zip_fail(&r.where, SPDL_E_INVALID, "no %llu rows from row %llu; it has %llu",
                       (spdl__llu)count, (spdl__llu)first, rows);
    else if (wanted > 0 && (data == NULL || wanted > bytes))
        spdl__zip_fail(&r.where, SPDL_E_INVALID,
                       "the rows have %llu bytes, the memory for them %llu", wanted,
                       (spdl__llu)(data != NULL ? bytes : 0));
    else if (wanted > 0 && spdl__npz_copy_out(&r, r.payload + r.head_bytes + first * row,
                                              data, (size_t)wanted) && r.swap)
        spdl__npy_swap((uint8_t *)data, wanted, r.info);
    return spdl__npz_end(&r);
}

/* Where the data of a member lie: of a large file in its mapping, which the first call makes. */
SPDL__PRIVATE bool spdl__npz_find_data(spdl__npz_reader *r, const uint8_t **data) {
    spdl_npz *npz = r->npz;
    uint64_t mapping = spdl__load(&npz->mapping);
    const uint8_t *base = npz->zip.data;
    if (!r->stored)
        return spdl__zip_fail(&r->where, SPDL_E_UNSUPPORTED,
                              "deflated: it has no bytes to look at; read it");
    if (r->swap || r->turn)
        return spdl__zip_fail(&r->where, SPDL_E_UNSUPPORTED,
                              "in Fortran order or another byte order in the file; read it");
    if (base == NULL && mapping == 0) {
        base = spdl__os_file_map(npz->zip.file, npz->zip.size, false);
        if (base == NULL)
            return spdl__zip_fail(&r->where, SPDL_E_IO, "the file cannot be mapped");
        if (!spdl__cas(&npz->mapping, &mapping, (uint64_t)(uintptr_t)base)) {
            spdl__os_file_unmap(base, npz->zip.size); /* another thread was faster */
            base = NULL;
        }
    }
    if (base == NULL) base = (const uint8_t *)(uintptr_t)mapping;
    *data = base + r->payload + r->head_bytes;
    return true;
}

SPDL_API spdl_result spdl_npz_view(const spdl_npz *npz, size_t index, const void **data,
                                   bool *aligned, spdl_error *error) {
    const uint8_t *found = NULL;
    spdl__npz_reader r;
    if (data == NULL) return spdl__error_set(error, SPDL_E_INVALID, "npz: data is NULL");
    spdl__npz_init_reader(&r, npz, error);
    if (spdl__npz_start(&r, index) && spdl__npz_find_data(&r, &found)) {
        *data = found;
        if (aligned != NULL) *aligned = ((uintptr_t)found & 63) == 0;
    }
    return spdl__npz_end(&r);
}

/* ============================================================================================= */
/* >>load-impl
   Whole files, all arrays in one block. Each array has the room of its member, header included, so
   that the headers are read once, with the data. The decoders of two deflated members run side by
   side on the calling thread; that is faster where codes are the work, not copies of matches. */

#define SPDL__LOAD_AHEAD 262144  /* bytes that are read from a file at once */
#define SPDL__LOAD_FEW 16        /* arrays that are read without that */
#define SPDL__LOAD_LEND 65536    /* bytes of an array that may be lent */
#define SPDL__LOAD_HUGE 4194304  /* bytes from which huge pages are asked for */

/* One of the members that are read side by side. */
typedef struct spdl__load_lane {
    bool busy;
    size_t which; /* array */
    spdl_error error;
    spdl__npz_reader r;
} spdl__load_lane;

typedef struct spdl__loading {
    spdl_npz *npz;
    spdl_npz_bundle *bundle;
    spdl__zip_where where;
    size_t next;            /* the first array that is not begun */
    size_t failed;          /* the first that failed, or count */
    const uint8_t *mapping; /* with no_crc: the file; or NULL */
    uint8_t *windows;       /* of the lanes; NULL: the bytes are in memory */
    spdl__load_lane lane[SPDL__INFLATE_LANES];
} spdl__loading;

SPDL__PRIVATE bool spdl__load_too_large(spdl__loading *load) {
    return spdl__zip_fail(&load->where, SPDL_E_LIMIT,
                          "its arrays are larger than max_bytes, which is %llu",
                          (spdl__llu)load->npz->desc.max_bytes);
}

/* Smaller ones are copied sooner than looked for. */
SPDL__PRIVATE bool spdl__load_may_lend(const spdl__zip_member *member) {
    return member->method == SPDL__ZIP_STORED && member->usize >= SPDL__LOAD_LEND;
}

/* Where a stored array need not be copied: its data, in the mapping. */
SPDL__PRIVATE bool spdl__load_lend(spdl__loading *load, size_t index, spdl_npz_array *array) {
    spdl__npz_reader *r = &load->lane[0].r;
    const uint8_t *data;
    if (load->mapping == NULL || !spdl__load_may_lend(&load->npz->zip.members[index])) return false;
    r->info = &array->info;
    if (!spdl__npz_start(r, index) || r->swap || r->turn) return false;
    data = load->mapping + r->payload + r->head_bytes;
    array->data = SPDL__UNCONST(data);
    return ((uintptr_t)data & 63) == 0;
}

/* Bytes for the data: of all members that are not lent, each at a multiple of 64. */
SPDL__PRIVATE bool spdl__load_measure(spdl__loading *load, uint64_t *names, uint64_t *data) {
    const spdl_npz *npz = load->npz;
    const uint64_t heads = npz->zip.count * (uint64_t)SPDL__NPY_HEAD_BYTES * 2;
    spdl_npz_array one;
    size_t i;
    for (i = 0; i < npz->zip.count; i++) {
        const spdl__zip_member *m = load->where.member = &npz->zip.members[i];
        *names += strlen(m->name) + 1;
        if (!npz->is_npy && !spdl__zip_check(&load->where)) return false;
        if (m->usize > SIZE_MAX / 4 - *data) break;
        if (!spdl__load_lend(load, i, &one)) *data += (m->usize + 63) & ~(uint64_t)63;
    }
    load->where.member = NULL;
    return (i == npz->zip.count && *data <= npz->desc.max_bytes + heads) ||
           spdl__load_too_large(load);
}

/* Makes the bundle, with names and the places of the data. */
SPDL__PRIVATE bool spdl__load_place(spdl__loading *load) {
    const spdl__zip *zip = &load->npz->zip;
    uint64_t names = 0, data = 0, bytes;
    spdl_npz_bundle *made;
    char *name, *at;
    size_t i;
    if (!spdl__load_measure(load, &names, &data)) return false;
    bytes = (sizeof(*made) + zip->count * sizeof(*made->arrays) + names + 63) & ~(uint64_t)63;
    made = (spdl_npz_bundle *)spdl__zip_alloc(&load->where, bytes + data, "its arrays");
    if (made == NULL) return false;
    load->bundle = made;
    if (bytes + data >= SPDL__LOAD_HUGE && zip->allocator.alloc_fn == NULL)
        spdl__os_huge_pages(made, (size_t)(bytes + data));
    memset(made, 0, (size_t)bytes);
    made->arrays = (spdl_npz_array *)(void *)(made + 1);
    made->count = load->failed = zip->count;
    made->bytes = (size_t)(bytes + data);
    made->allocator = zip->allocator;
    name = (char *)(made->arrays + zip->count);
    at = (char *)made + bytes;
    for (i = 0; i < zip->count; i++, name += strlen(name) + 1) {
        memcpy(name, zip->members[i].name, strlen(zip->members[i].name) + 1);
        made->arrays[i].name = name;
        if (spdl__load_lend(load, i, &made->arrays[i])) {
            made->mapping_ = load->mapping;
            made->mapped_ = zip->size;
        } else {
            memset(&made->arrays[i].info, 0, sizeof(made->arrays[i].info));
            made->arrays[i].data = at;
            at += (size_t)((zip->members[i].usize + 63) & ~(uint64_t)63);
        }
    }
    return true;
}

/* A lane that does not go on has its result. The failure of the first of all arrays is kept, and
   nothing is begun after one. */
SPDL__PRIVATE void spdl__load_went(spdl__loading *load, spdl__load_lane *lane, bool more) {
    lane->busy = more;
    if (more) return;
    (void)spdl__npz_end(&lane->r);
    if (lane->r.where.result == SPDL_OK) return;
    load->next = load->bundle->count;
    if (lane->which >= load->failed) return;
    load->failed = lane->which;
    load->where.result = lane->r.where.result;
    if (load->where.error != NULL) *load->where.error = lane->error;
}

/* Begins with the next array. Streams with long matches are copies more than decoding, and a second
   one only takes the registers away: they are read alone. */
SPDL__PRIVATE void spdl__load_begin(spdl__loading *load, spdl__load_lane *lane) {
    spdl__npz_reader *r = &lane->r;
    const spdl__zip_member *m = &load->npz->zip.members[load->next];
    spdl_npz_array *array = &load->bundle->arrays[load->next];
    bool more;
    lane->which = load->next++;
    if (array->info.stored) return; /* it is lent */
    r->info = &array->info;
    more = spdl__npz_begin(r, lane->which, array->data, (size_t)((m->usize + 63) & ~(uint64_t)63));
    while (more && m->csize <= m->usize / 10)
        more = spdl__npz_ran(r, spdl__inflate_run(&r->inflate, r->inflate.limit));
    spdl__load_went(load, lane, more);
}

/* Keeps the lanes busy until nothing is left. */
SPDL__PRIVATE void spdl__load_read(spdl__loading *load) {
    spdl__inflate *states[SPDL__INFLATE_LANES];
    spdl__load_lane *lanes[SPDL__INFLATE_LANES], *lane;
    spdl__inflate_mode ended = SPDL__INFLATE_FULL;
    unsigned busy, i;
    for (;;) {
        for (busy = i = 0; i < SPDL__INFLATE_LANES; i++) {
            lane = &load->lane[i];
            while (!lane->busy && load->next < load->bundle->count) spdl__load_begin(load, lane);
            if (!lane->busy) continue;
            lanes[busy] = lane;
            states[busy++] = &lane->r.inflate;
        }
        if (busy == 0) return;
        i = spdl__inflate_run_lanes(states, busy, &ended);
        spdl__load_went(load, lanes[i], spdl__npz_ran(&lanes[i]->r, ended));
    }
}

/* Gets ready what the lanes read with: a mapping that is trusted, or a window for each. */
SPDL__PRIVATE bool spdl__load_prepare(spdl__loading *load) {
    spdl__zip *zip = &load->npz->zip;
    size_t i;
    load->where.zip = zip;
    for (i = 0; i < SPDL__INFLATE_LANES; i++) {
        spdl__npz_init_reader(&load->lane[i].r, load->npz, &load->lane[i].error);
        load->lane[i].r.roomy = true;
        load->lane[i].busy = false;
    }
    if (zip->data != NULL) return true;
    for (i = 0; i < zip->count && !spdl__load_may_lend(&zip->members[i]); i++) continue;
    if (load->npz->desc.no_crc && i < zip->count)
        load->mapping = spdl__os_file_map(zip->file, zip->size, true);
    zip->data = load->mapping;
    if (zip->data != NULL || zip->count < SPDL__LOAD_FEW) return true;
    load->windows = (uint8_t *)spdl__zip_alloc(
        &load->where, SPDL__INFLATE_LANES * SPDL__LOAD_AHEAD, "reading ahead");
    for (i = 0; i < SPDL__INFLATE_LANES; i++) {
        load->lane[i].r.window = load->windows + i * SPDL__LOAD_AHEAD;
        load->lane[i].r.room = SPDL__LOAD_AHEAD;
    }
    return load->windows != NULL;
}

/* Loads all of an archive, and closes it. */
SPDL__PRIVATE spdl_result spdl__load_all(spdl_npz *npz, spdl_npz_bundle **bundle) {
    spdl__loading load;
    uint64_t bytes = 0;
    size_t i;
    memset(&load, 0, offsetof(spdl__loading, lane));
    load.npz = npz;
    load.where.error = npz->desc.error;
    if (spdl__load_prepare(&load) && spdl__load_place(&load)) {
        spdl__load_read(&load);
        for (i = 0; i < load.bundle->count; i++)
            bytes += load.bundle->arrays[i].info.bytes;
        if (load.where.result == SPDL_OK && bytes > npz->desc.max_bytes)
            spdl__load_too_large(&load);
    }
    if (load.mapping != NULL && (load.bundle == NULL || load.bundle->mapping_ == NULL))
        spdl__os_file_unmap(load.mapping, npz->zip.size);
    if (load.mapping != NULL) npz->zip.data = NULL;
    spdl__free(&npz->zip.allocator, load.windows, SPDL__INFLATE_LANES * SPDL__LOAD_AHEAD);
    spdl_npz_close(npz);
    if (load.where.result == SPDL_OK) *bundle = load.bundle;
    else spdl_npz_bundle_free(load.bundle);
    return load.where.result;
}

SPDL_API spdl_result spdl_npz_load(spdl_npz_bundle **bundle, const char *path,
                                   const spdl_npz_desc *desc) {
    spdl_npz *npz = NULL;
    spdl_result result;
    if (bundle == NULL)
        return spdl__error_set(desc != NULL ? desc->error : NULL, SPDL_E_INVALID,
                               "spdl_npz_load: an argument is NULL");
    *bundle = NULL;
    result = spdl_npz_open(&npz, path, desc);
    return result == SPDL_OK ? spdl__load_all(npz, bundle) : result;
}

SPDL_API spdl_result spdl_npz_load_memory(spdl_npz_bundle **bundle, const void *data, size_t bytes,
                                          const char *name, const spdl_npz_desc *desc) {
    spdl_npz *npz = NULL;
    spdl_result result;
    if (bundle == NULL)
        return spdl__error_set(desc != NULL ? desc->error : NULL, SPDL_E_INVALID,
                               "spdl_npz_load_memory: an argument is NULL");
    *bundle = NULL;
    result = spdl_npz_open_memory(&npz, data, bytes, name, desc);
    return result == SPDL_OK ? spdl__load_all(npz, bundle) : result;
}

SPDL__PRIVATE spdl_npz_array *spdl__bundle_find(const spdl_npz_bundle *bundle, const char *name,
                                                size_t bytes) {
    size_t i;
    for (i = 0; i < bundle->count; i++)
        if (strncmp(bundle->arrays[i].name, name, bytes) == 0 && bundle->arrays[i].name[bytes] == 0)
            return &bundle->arrays[i];
    return NULL;
}

SPDL_API spdl_npz_array *spdl_npz_bundle_find(const spdl_npz_bundle *bundle, const char *name) {
    spdl_npz_array *found;
    size_t bytes;
    if (bundle == NULL || name == NULL) return NULL;
    bytes = strlen(name);
    found = spdl__bundle_find(bundle, name, bytes);
    if (found != NULL || !spdl__zip_ends_npy((const uint8_t *)name, bytes)) return found;
    return spdl__bundle_find(bundle, name, bytes - 4);
}

SPDL__COLD void spdl__bundle_shape(spdl__text *text, int ndim, const uint64_t *shape, bool any) {
    int i;
    for (i = 0; i < ndim; i++) {
        if (any && shape[i] == 0) spdl__text_add(text, i > 0 ? ", any" : "any");
        else spdl__text_add(text, i > 0 ? ", %llu" : "%llu", (spdl__llu)shape[i]);
    }
    spdl__text_add(text, ndim == 1 ? ",)" : ")");
}

SPDL_API spdl_result spdl_npz_expect(const spdl_npz_array *array, const char *dtype, int ndim,
                                     const uint64_t *shape, spdl_error *error) {
    const spdl_npy_info *info;
    char why[400], name[80];
    spdl__text text = spdl__text_start(why, sizeof(why));
    bool fits;
    int i;
    if (array == NULL) return spdl__error_set(error, SPDL_E_NOT_FOUND, "the array is not there");
    if (dtype == NULL || (shape == NULL && ndim > 0))
        return spdl__error_set(error, SPDL_E_INVALID, "spdl_npz_expect: an argument is NULL");
    info = &array->info;
    fits = info->ndim == ndim && strcmp(info->dtype + strspn(info->dtype, "<>|="),
                                        dtype + strspn(dtype, "<>|=")) == 0;
    for (i = 0; i < ndim && fits; i++) fits = shape[i] == 0 || info->shape[i] == shape[i];
    if (fits) return SPDL_OK;
    spdl__printable(name, sizeof(name), array->name);
    spdl__text_add(&text, "array '%s' is '%.60s' (", name, info->dtype);
    spdl__bundle_shape(&text, info->ndim, info->shape, false);
    spdl__text_add(&text, ", not '%.60s' (", dtype);
    spdl__bundle_shape(&text, ndim, shape, true);
    return spdl__error_set(error, SPDL_E_INVALID, "%s", why);
}

SPDL_API void spdl_npz_bundle_free(void *bundle) {
    spdl_npz_bundle *freed = (spdl_npz_bundle *)bundle;
    spdl_allocator allocator;
    if (freed == NULL) return;
    allocator = freed->allocator;
    spdl__os_file_unmap((const uint8_t *)freed->mapping_, freed->mapped_);
    spdl__free(&allocator, freed, freed->bytes);
}

SPDL__PRIVATE spdl_result spdl__npz_stage(spdl_task *task, void *in, void **out) {
    const spdl_npz_desc *const given = (const spdl_npz_desc *)spdl_ctx(task);
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
#elif defined(SPDL_STATIC)
static
#endif
SPDL__UNUSED const spdl_function spdl_npz_load_spdl = { spdl__npz_stage, "spdl_npz_load", "char",
                                                        "spdl_npz_bundle" };
#if defined(SPDL_STATIC) && defined(__cplusplus)
}
#endif

/* ============================================================================================= */
/* >>write-impl
   Writing .npz and .npy. One thread at a time has the writer, which owns an open file beside its
   target until finish gives it that name. What is kept of the members is the directory as the file
   will have it; behind it, in the same memory, each call makes the member's own headers. Finish
   reads it as the reader does, to see that no two members have one name. ZIP64 fields are there
   only where a number needs them. Data are aligned by an extra field of padding, of the form that
   zipalign made known (id 0xd935: two bytes of alignment, then zeros). */

#define SPDL__WRITE_DATE 0x00210000u /* the first of January 1980, as NumPy has it */
#define SPDL__WRITE_ALIGN 64         /* of the data in the file, and of the array's header */
#define SPDL__WRITE_HEAD 8192        /* holds an array's header */

struct spdl_npz_writer {
    /* Written by create. */
    spdl_npz_writer_desc desc;
    spdl__os_file file;
    char *path, *temporary; /* one allocation of so many bytes */
    size_t path_bytes;
    spdl__crc crc;
    /* Written by the other calls. */
    spdl__zip_where where; /* error and result are those of the call that is running */
    spdl__zip zip;         /* its label and allocator; all when finish looks at the names */
    uint8_t *directory;
    size_t used, room; /* of the directory */
    uint64_t count;    /* arrays */
    uint64_t at;       /* where the next byte goes */
    bool failed, finished;
};

/* Records why, and returns false. When a file or the memory ended, nothing more can be written. */
SPDL__COLD bool spdl__write_fail(spdl_npz_writer *w, spdl_result result, const char *name,
                                 const char *reason) {
    spdl__zip_member member;
    member.name = (char *)SPDL__UNCONST(name);
    w->where.member = name != NULL ? &member : NULL;
    w->failed = w->failed || result == SPDL_E_IO || result == SPDL_E_NOMEM;
    spdl__zip_fail(&w->where, result, "%s", reason);
    w->where.member = NULL;
    return false;
}

SPDL__COLD bool spdl__write_bytes(spdl_npz_writer *w, const void *from, size_t bytes) {
    const char *reason = spdl__os_file_write(w->file, from, bytes, w->at);
    if (reason != NULL) return spdl__write_fail(w, SPDL_E_IO, NULL, reason);
    w->at += bytes;
    return true;
}

/* Makes so much room behind the directory. */
SPDL__COLD bool spdl__write_room(spdl_npz_writer *w, size_t bytes) {
    void *made = spdl__room_for(&w->zip.allocator, w->directory, &w->room, w->used, bytes, 1);
    if (made != NULL) w->directory = (uint8_t *)made;
    return made != NULL || spdl__write_fail(w, SPDL_E_NOMEM, NULL, "no memory for the directory");
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

SPDL__COLD bool spdl__write_is_utf8(const char *text) {
    int bytes = 1;
    for (; *text != 0 && bytes > 0; text += bytes) bytes = spdl__utf8(text);
    return bytes > 0;
}

/* Makes the header of an array at `head`, and reads it back: what is wrong with the arguments is
   wrong with that. Returns its length; 0: it cannot be made. */
SPDL__COLD size_t spdl__write_header(spdl_npz_writer *w, uint8_t *head, const char *name,
                                     const char *dtype, int ndim, const uint64_t *shape,
                                     spdl_npy_info *info) {
    spdl__text text = spdl__text_start((char *)head + 10, SPDL__WRITE_HEAD - 128);
    const char *const quote = dtype[0] == '[' ? "" : "'";
    const char own[2] = { SPDL__NPY_HOST_ORDER, 0 };
    const char *const order = strchr("<>|=[", dtype[0]) != NULL ? "" : own;
    size_t start = 10, total;
    spdl__npy_text t;
    int i;
    spdl__text_add(&text, "{'descr': %s%s%s%s, 'fortran_order': False, 'shape': (", quote, order,
                   dtype, quote);
    for (i = 0; i < ndim; i++)
        spdl__text_add(&text, i > 0 ? ", %llu" : "%llu", (spdl__llu)shape[i]);
    spdl__text_add(&text, ndim == 1 ? ",), }" : "), }");
    if (text.length >= text.bytes || !spdl__write_is_utf8(dtype)) {
        spdl__write_fail(w, SPDL_E_INVALID, name, "its dtype is too long or not UTF-8");
        return 0;
    }
    if (!spdl__npy_read(&t, head + start, text.length, info)) {
        spdl__write_fail(w, t.result == SPDL_E_UNSUPPORTED ? t.result : SPDL_E_INVALID, name,
                         t.reason);
        return 0;
    }
    if (!spdl__write_is_ascii(dtype, strlen(dtype))) { /* UTF-8 in names of fields */
        memmove(head + 12, head + start, text.length);
        start = 12;
    }
    total = start + text.length + SPDL__WRITE_ALIGN;
    total -= total % SPDL__WRITE_ALIGN;
    memset(head + start + text.length, ' ', total - start - text.length - 1);
    head[total - 1] = '\n';
    memcpy(head, "\x93NUMPY", 6);
    head[6] = start == 10 ? 1 : 3; /* the version */
    head[7] = 0;
    if (start == 10) spdl__put16(head + 8, total - start);
    else spdl__put32(head + 8, total - start);
    return total;
}

/* Makes the entry of a member in the directory, which has the room, and its local header, which
   ends at `head`. Returns the length of that. */
SPDL__COLD size_t spdl__write_entry(spdl_npz_writer *w, uint8_t *head, const char *name,
                                    uint32_t crc, uint64_t usize) {
    const bool wide = usize >= 0xffffffffu, far = w->at >= 0xffffffffu;
    const size_t bytes = strlen(name), key_bytes = bytes + 4;
    const size_t sizes = wide ? 20u : 0, places = (wide ? 16u : 0) + (far ? 8u : 0);
    const size_t least = SPDL__ZIP_LOCAL_BYTES + key_bytes + sizes + 6;
    const size_t pad = (size_t)(-(w->at + least) % SPDL__WRITE_ALIGN);
    uint8_t *const local = head - least - pad, *at = spdl__put32(local, 0x04034b50);
    at = spdl__put16(at, wide || far ? 45 : 20);
    at = spdl__put16(at, spdl__write_is_ascii(name, bytes) ? 0 : 0x0800); /* UTF-8 */
    at = spdl__put32(spdl__put16(at, SPDL__ZIP_STORED), SPDL__WRITE_DATE);
    at = spdl__put32(spdl__put32(at, crc), spdl__min(usize, 0xffffffffu));
    at = spdl__put16(spdl__put32(at, spdl__min(usize, 0xffffffffu)), key_bytes);
    at = spdl__put16(at, sizes + 6 + pad);
    memcpy(at, name, bytes);
    memcpy(at + bytes, ".npy", 4);
    at += key_bytes;
    if (wide) at = spdl__put64(spdl__put64(spdl__put32(at, 16 << 16 | 1), usize), usize);
    at = spdl__put16(spdl__put16(spdl__put16(at, 0xd935), 2 + pad), SPDL__WRITE_ALIGN);
    memset(at, 0, pad);

    at = spdl__put16(spdl__put32(w->directory + w->used, 0x02014b50), 45);
    memcpy(at, local + 4, 24); /* from the version that is needed to the length of the name */
    at = spdl__put16(at + 24, places > 0 ? 4 + places : 0);
    memset(at, 0, 10); /* comment, disk, attributes */
    at = spdl__put32(at + 10, spdl__min(w->at, 0xffffffffu));
    memcpy(at, local + SPDL__ZIP_LOCAL_BYTES, key_bytes);
    at += key_bytes;
    if (places > 0) at = spdl__put16(spdl__put16(at, 1), places);
    if (wide) at = spdl__put64(spdl__put64(at, usize), usize);
    if (far) at = spdl__put64(at, w->at);
    w->used = (size_t)(at - w->directory);
    return least + pad;
}

/* Whether another call may go on, after a failure or at the end. */
SPDL__COLD bool spdl__write_ready(spdl_npz_writer *w, spdl_error *error) {
    w->where.error = error;
    w->where.result = SPDL_OK;
    if (w->failed) return spdl__write_fail(w, SPDL_E_INVALID, NULL, "the writer has failed before");
    return !w->finished || spdl__write_fail(w, SPDL_E_INVALID, NULL, "the writer has finished");
}

SPDL_API spdl_result spdl_npz_writer_add(spdl_npz_writer *w, const char *name, const char *dtype,
                                    int ndim, const uint64_t *shape, const void *data,
                                    spdl_error *error) {
    size_t head_bytes, local_bytes = 0, most;
    spdl_npy_info info;
    uint8_t *head;
    uint32_t crc;
    if (w == NULL || name == NULL || dtype == NULL || (shape == NULL && ndim > 0))
        return spdl__error_set(error, SPDL_E_INVALID, "spdl_npz_writer_add: an argument is NULL");
    if (!spdl__write_ready(w, error)) return w->where.result;
    if (ndim < 0 || ndim > SPDL_NPY_MAX_DIMS)
        spdl__write_fail(w, SPDL_E_INVALID, name, "ndim is not 0 to 64");
    else if (strlen(name) > 65535 - 4 || w->count >= SPDL__ZIP_MEMBERS)
        spdl__write_fail(w, SPDL_E_LIMIT, NULL, "a name too long, or one too many");
    else if (!spdl__write_is_utf8(name))
        spdl__write_fail(w, SPDL_E_INVALID, name, "its name is not UTF-8");
    else if (w->desc.npy && w->count > 0)
        spdl__write_fail(w, SPDL_E_INVALID, name, "a .npy file holds one array");
    if (w->where.result != SPDL_OK) return w->where.result;
    most = SPDL__ZIP_ENTRY_BYTES + SPDL__ZIP_LOCAL_BYTES + 2 * (strlen(name) + 4) + 256;
    if (!spdl__write_room(w, most + SPDL__WRITE_HEAD)) return w->where.result;
    head = w->directory + w->used + most;
    head_bytes = spdl__write_header(w, head, name, dtype, ndim, shape, &info);
    if (head_bytes == 0) return w->where.result;
    if (info.bytes > SIZE_MAX / 2 || (data == NULL && info.bytes > 0)) {
        spdl__write_fail(w, SPDL_E_INVALID, name, "its data is NULL, or more than memory can hold");
        return w->where.result;
    }
    if (!w->desc.npy) {
        crc = spdl__crc_add(&w->crc, 0, head, head_bytes);
        crc = spdl__crc_add(&w->crc, crc, (const uint8_t *)data, (size_t)info.bytes);
        local_bytes = spdl__write_entry(w, head, name, crc, head_bytes + info.bytes);
    }
    w->count++;
    if (spdl__write_bytes(w, head - local_bytes, local_bytes + head_bytes))
        spdl__write_bytes(w, data, (size_t)info.bytes);
    return w->where.result;
}

/* Whether each name is there once: reads the directory. */
SPDL__COLD bool spdl__write_names_differ(spdl_npz_writer *w) {
    spdl__zip *zip = &w->zip;
    spdl__zip_opening o = { zip, &w->where, w->used, w->count, w->used, 0, true };
    const spdl__zip_member *m;
    bool differ = true;
    size_t i;
    zip->data = zip->tail = w->directory;
    zip->size = w->used;
    zip->count = 0;
    if (spdl__zip_make(&o)) {
        spdl__zip_sort(zip, true);
        for (i = 1; i < zip->count && differ; i++) {
            m = &zip->members[zip->by_name[i]];
            differ = spdl__zip_compare(&zip->members[zip->by_name[i - 1]], m->key, m->key_bytes,
                                       "") != 0;
            if (!differ) spdl__write_fail(w, SPDL_E_INVALID, m->name, "two arrays have this name");
        }
    }
    spdl__zip_close(zip);
    zip->members = NULL;
    zip->block_bytes = 0;
    return w->where.result == SPDL_OK;
}

/* The directory and the end records, with ZIP64 ones where a number needs them. */
SPDL__COLD bool spdl__write_directory(spdl_npz_writer *w) {
    const uint64_t start = w->at, count = w->count, bytes = w->used;
    uint8_t *at;
    if (!spdl__write_room(w, 128)) return false;
    at = w->directory + w->used;
    if (count >= 0xffff || bytes >= 0xffffffffu || start >= 0xffffffffu) {
        at = spdl__put64(spdl__put32(at, 0x06064b50), SPDL__ZIP_END64_BYTES - 12);
        at = spdl__put64(spdl__put16(spdl__put16(at, 45), 45), 0);
        at = spdl__put64(spdl__put64(at, count), count);
        at = spdl__put64(spdl__put64(at, bytes), start);
        at = spdl__put64(spdl__put32(spdl__put32(at, 0x07064b50), 0), start + bytes);
        at = spdl__put32(at, 1);
    }
    at = spdl__put32(spdl__put32(at, 0x06054b50), 0);
    at = spdl__put16(spdl__put16(at, spdl__min(count, 0xffff)), spdl__min(count, 0xffff));
    at = spdl__put32(at, spdl__min(bytes, 0xffffffffu));
    at = spdl__put16(spdl__put32(at, spdl__min(start, 0xffffffffu)), 0);
    return spdl__write_bytes(w, w->directory, (size_t)(at - w->directory));
}

SPDL_API spdl_result spdl_npz_writer_finish(spdl_npz_writer *w, spdl_error *error) {
    const char *reason;
    if (w == NULL)
        return spdl__error_set(error, SPDL_E_INVALID, "spdl_npz_writer_finish: writer is NULL");
    if (!spdl__write_ready(w, error)) return w->where.result;
    if (w->desc.npy && w->count == 0)
        spdl__write_fail(w, SPDL_E_INVALID, NULL, "no array was written");
    else if (!w->desc.npy && spdl__write_names_differ(w)) spdl__write_directory(w);
    if (w->where.result != SPDL_OK) return w->where.result;
    reason = spdl__os_file_commit(w->file, w->temporary, w->path, w->desc.sync);
    if (reason != NULL) spdl__write_fail(w, SPDL_E_IO, NULL, reason);
    w->finished = reason == NULL;
    return w->where.result;
}

SPDL_API void spdl_npz_writer_close(spdl_npz_writer *w) {
    spdl_allocator allocator;
    if (w == NULL) return;
    allocator = w->desc.allocator;
    (void)spdl__os_file_close(w->file);
    if (w->file != SPDL__NO_FILE && !w->finished) (void)remove(w->temporary);
    spdl__free(&allocator, w->directory, w->room);
    spdl__free(&allocator, w->path, w->path_bytes);
    spdl__free(&allocator, w, sizeof(*w));
}

/* Makes a file beside the target that no other writer has. */
SPDL__COLD bool spdl__write_open(spdl_npz_writer *w, const char *path) {
    const size_t length = strlen(path);
    const char *reason = spdl__os_in_use;
    int tries;
    w->path_bytes = 2 * length + 32;
    w->path = (char *)spdl__zip_alloc(&w->where, w->path_bytes, "the writer");
    if (w->path == NULL) return false;
    w->temporary = w->path + length + 1;
    memcpy(w->path, path, length + 1);
    spdl__crc_init(&w->crc);
    for (tries = 0; reason == spdl__os_in_use && tries < 100; tries++) {
        const uint64_t chance =
            spdl__os_process_id() << 32 ^ spdl_time_ns() * 0x9e3779b97f4a7c15u;
        snprintf(w->temporary, length + 31, "%s.%016llx.tmp", path, (spdl__llu)chance);
        reason = spdl__os_file_open(&w->file, w->temporary, SPDL__OS_NEW, NULL);
    }
    return reason == NULL || spdl__write_fail(w, SPDL_E_IO, NULL, reason);
}

SPDL_API spdl_result spdl_npz_writer_open(spdl_npz_writer **writer, const char *path,
                                     const spdl_npz_writer_desc *desc) {
    spdl_npz_writer_desc full;
    spdl_npz_writer *w;
    spdl_result result;
    memset(&full, 0, sizeof(full));
    if (desc != NULL) full = *desc;
    if (writer != NULL) *writer = NULL;
    if (writer == NULL || path == NULL)
        return spdl__error_set(full.error, SPDL_E_INVALID, "spdl_npz_writer_open: an argument is NULL");
    if (spdl__allocator_check(&full.allocator, "npz writer", full.error) != SPDL_OK)
        return SPDL_E_INVALID;
    w = (spdl_npz_writer *)spdl__alloc_zeroed(&full.allocator, 1, sizeof(*w), 64);
    if (w == NULL)
        return spdl__error_set(full.error, SPDL_E_NOMEM, "%.200s: no memory for the writer", path);
    w->desc = full;
    w->where.zip = &w->zip;
    w->where.error = full.error;
    w->file = SPDL__NO_FILE;
    w->zip.allocator = full.allocator;
    spdl__label(w->zip.label, sizeof(w->zip.label), path);
    if (spdl__write_open(w, path)) {
        *writer = w;
        return SPDL_OK;
    }
    result = w->where.result;
    spdl_npz_writer_close(w);
    return result;
}

#endif /* SPDL_NO_NPZ */

/* ============================================================================================= */
/* >>files-impl
   A spdl__reader is a file that one thread looks at through a window: what is asked for is compared
   with what is there first. Streams (tar, lines) move such a reader forward, and only
   when a record was made, so that a call that failed can be repeated. */

#define SPDL__READER_ROOM 65536
#define SPDL__LISTED_BYTES 4096
#define SPDL__FOLDERS_DEEP 32

typedef struct spdl__reader {
    const char *path; /* for messages; its owner keeps it */
    spdl_error *error; /* of the call that is running */
    spdl_result result; /* of spdl__reader_need */
    spdl__os_file file;
    uint64_t bytes;
    uint8_t *window; /* `room` bytes, `have` of them those at window_at */
    size_t room;
    uint64_t window_at;
    size_t have;
} spdl__reader;

/* Records "file: at byte N: reason" and returns the result. */
SPDL__PRINTF(4, 5)
SPDL__PRIVATE spdl_result spdl__reader_fail(const spdl__reader *r, spdl_result result, uint64_t at,
                                            const char *format, ...) {
    char reason[224], label[208];
    va_list args;
    if (r->error == NULL) return result;
    va_start(args, format);
    (void)vsnprintf(reason, sizeof(reason), format, args);
    va_end(args);
    spdl__label(label, sizeof(label), r->path);
    return spdl__error_set(r->error, result, "%s: at byte %llu: %s", label, (spdl__llu)at, reason);
}

SPDL__PRIVATE spdl_result spdl__reader_has(const spdl__reader *r, uint64_t at, uint64_t bytes) {
    if (at <= r->bytes && bytes <= r->bytes - at) return SPDL_OK;
    return spdl__reader_fail(r, SPDL_E_FORMAT, at,
                             "cut off: %llu bytes should be here, and the file ends at %llu",
                             (spdl__llu)bytes, (spdl__llu)r->bytes);
}

/* How many bytes from `at` on are in the window. */
SPDL__PRIVATE size_t spdl__reader_ready(const spdl__reader *r, uint64_t at) {
    if (at < r->window_at || at - r->window_at >= r->have) return 0;
    return r->have - (size_t)(at - r->window_at);
}

/* At least `bytes` bytes, no more than the window holds. NULL: r->result says why not. */
SPDL__PRIVATE const uint8_t *spdl__reader_need(spdl__reader *r, uint64_t at, size_t bytes) {
    const char *reason;
    r->result = spdl__reader_has(r, at, bytes);
    if (r->result != SPDL_OK) return NULL;
    if (spdl__reader_ready(r, at) < bytes) {
        r->window_at = at;
        reason = spdl__os_file_read(r->file, r->window,
                                    (size_t)spdl__min(r->room, r->bytes - at), at, &r->have);
        if (r->have < bytes)
            r->result = spdl__reader_fail(r, SPDL_E_IO, at + r->have, "%s", reason);
    }
    return r->result == SPDL_OK ? r->window + (size_t)(at - r->window_at) : NULL;
}

/* Opens the file of a reader; it is closed by spdl__os_file_close. */
SPDL__PRIVATE spdl_result spdl__reader_open(spdl__reader *r, const char *path, spdl_error *error) {
    char label[208];
    const char *reason;
    memset(r, 0, sizeof(*r));
    r->path = path;
    r->error = error;
    reason = spdl__os_file_open(&r->file, path, SPDL__OS_READ, &r->bytes);
    if (reason == NULL) return SPDL_OK;
    spdl__label(label, sizeof(label), path);
    return spdl__error_set(error, SPDL_E_IO, "%s: %s", label, reason);
}

/* --- records --- */

typedef struct spdl__kept {
    spdl_record shown;
    spdl_allocator allocator;
    size_t block_bytes;
} spdl__kept;

SPDL_API void spdl_record_free(void *record) {
    spdl_record *next = (spdl_record *)record;
    while (next != NULL) {
        spdl__kept *freed = (spdl__kept *)(void *)next;
        const spdl_allocator allocator = freed->allocator;
        next = next->next;
        spdl__free(&allocator, freed, freed->block_bytes);
    }
}

/* A record of the bytes at a place, which spdl__reader_has: header, data, a zero, and the name with
   a zero, in one block. */
SPDL__PRIVATE spdl_result spdl__reader_record(spdl__reader *r, const spdl_allocator *allocator,
                                              const char *name, uint64_t at, uint64_t bytes,
                                              spdl_record **record) {
    const size_t head = (sizeof(spdl__kept) + 63) & ~(size_t)63, name_bytes = strlen(name) + 1;
    const size_t block_bytes = head + (size_t)bytes + 1 + name_bytes;
    const char *reason = NULL;
    size_t have, more = 0;
    spdl__kept *made = NULL;
    if (bytes <= SIZE_MAX / 2) made = (spdl__kept *)spdl__alloc(allocator, block_bytes, 64);
    if (made == NULL)
        return spdl__reader_fail(r, SPDL_E_NOMEM, at, "no memory for %llu bytes", (spdl__llu)bytes);
    made->allocator = *allocator;
    made->block_bytes = block_bytes;
    made->shown.data = (uint8_t *)made + head;
    made->shown.bytes = (size_t)bytes;
    made->shown.data[bytes] = 0;
    made->shown.name = (char *)memcpy(made->shown.data + bytes + 1, name, name_bytes);
    made->shown.offset = at;
    made->shown.next = NULL;
    r->result = SPDL_OK;
    if (bytes > 0 && bytes <= r->room / 4 && spdl__reader_ready(r, at) == 0)
        (void)spdl__reader_need(r, at, (size_t)bytes); /* and what follows */
    have = (size_t)spdl__min(spdl__reader_ready(r, at), bytes);
    if (have > 0) memcpy(made->shown.data, r->window + (size_t)(at - r->window_at), have);
    if (have < bytes && r->result == SPDL_OK)
        reason = spdl__os_file_read(r->file, made->shown.data + have, (size_t)bytes - have,
                                    at + have, &more);
    if (reason != NULL)
        r->result = spdl__reader_fail(r, SPDL_E_IO, at + have + more, "%s", reason);
    if (r->result == SPDL_OK) *record = &made->shown;
    else spdl_record_free(&made->shown);
    return r->result;
}

/* Where the extension begins: behind the first dot of the last part of a name, or at its end. What
   comes before it is the key of a sample. */
SPDL__PRIVATE const char *spdl__extension(const char *name) {
    const char *slash = strrchr(name, '/'), *dot = strchr(slash != NULL ? slash : name, '.');
    return dot != NULL ? dot + 1 : name + strlen(name);
}

SPDL_API spdl_record *spdl_record_find(spdl_record *sample, const char *extension) {
    while (sample != NULL && strcmp(spdl__extension(sample->name), extension) != 0)
        sample = sample->next;
    return sample;
}

/* --- records one after the other --- */

struct spdl__records {
    spdl__reader reader;
    spdl_records_desc desc; /* with its defaults */
    uint64_t at;            /* of what is read next */
    spdl_record *sample;    /* .group: the sample under way */
    size_t block_bytes;
    uint8_t window[SPDL__READER_ROOM];
    char path[1]; /* all of it */
};

/* What the headers in front of a member say. */
typedef struct spdl__tar_member {
    uint64_t at; /* of the next header, then of the data */
    uint64_t bytes;
    uint64_t long_bytes; /* of pax, in place of `bytes`: SPDL__NEVER if it says nothing */
    char kind;
    char name[SPDL__LISTED_BYTES]; /* of pax or GNU, or empty up to the member's own header */
} spdl__tar_member;

/* A number: in base 256 when the first bit says so, else octal, between blanks and zeros. */
SPDL__PRIVATE bool spdl__tar_number(const uint8_t *field, int bytes, uint64_t *number) {
    int i = 0;
    *number = field[0] & 0x7f;
    if (field[0] & 0x80) {
        for (i = 1; i < bytes; ++i) {
            if (*number >> 55 != 0) return false;
            *number = *number << 8 | field[i];
        }
        return true;
    }
    for (*number = 0; i < bytes && field[i] == ' '; ++i) {}
    for (; i < bytes && field[i] >= '0' && field[i] <= '7'; ++i)
        *number = *number << 3 | (uint64_t)(field[i] - '0');
    return i == bytes || field[i] == ' ' || field[i] == '\0';
}

/* Puts a name together; false: it is too long, or has a zero in it. */
SPDL__PRIVATE bool spdl__tar_name(spdl__tar_member *m, const uint8_t *name, size_t bytes) {
    if (bytes >= sizeof(m->name) || memchr(name, 0, bytes) != NULL) return false;
    memcpy(m->name, name, bytes);
    m->name[bytes] = '\0';
    return true;
}

SPDL__PRIVATE size_t spdl__tar_length(const uint8_t *field, size_t bytes) {
    const void *end = memchr(field, 0, bytes);
    return end != NULL ? (size_t)((const uint8_t *)end - field) : bytes;
}

/* Pax records "LENGTH KEY=VALUE\n": the lengths count, whatever the values hold. */
SPDL__PRIVATE spdl_result spdl__tar_pax(const spdl__reader *r, spdl__tar_member *m,
                                        const uint8_t *text, size_t bytes) {
    while (bytes > 0) {
        const uint8_t *key, *value = NULL;
        size_t length = 0, i = 0, left, key_bytes;
        bool path, size;
        for (; i < bytes && i < 7 && text[i] >= '0' && text[i] <= '9'; ++i)
            length = length * 10 + (size_t)(text[i] - '0');
        key = text + i + 1;
        if (i < bytes && text[i] == ' ' && length <= bytes && length >= i + 3 &&
            text[length - 1] == '\n')
            value = (const uint8_t *)memchr(key, '=', length - i - 2);
        if (value == NULL)
            return spdl__reader_fail(r, SPDL_E_FORMAT, m->at, "a pax header that is damaged");
        key_bytes = (size_t)(value++ - key);
        path = key_bytes == 4 && memcmp(key, "path", 4) == 0;
        size = key_bytes == 4 && memcmp(key, "size", 4) == 0;
        text += length;
        bytes -= length;
        left = (size_t)(text - 1 - value);
        if (key_bytes >= 10 && memcmp(key, "GNU.sparse", 10) == 0)
            return spdl__reader_fail(r, SPDL_E_UNSUPPORTED, m->at, "a sparse file");
        if (path && (left == 0 || !spdl__tar_name(m, value, left)))
            return spdl__reader_fail(r, SPDL_E_FORMAT, m->at,
                                     "a name that is empty, too long or has a zero in it");
        if (!size) continue;
        for (m->long_bytes = 0; left > 0 && *value >= '0' && *value <= '9'; --left, ++value) {
            if (m->long_bytes >= INT64_MAX / 10) break;
            m->long_bytes = m->long_bytes * 10 + (uint64_t)(*value - '0');
        }
        if (left > 0)
            return spdl__reader_fail(r, SPDL_E_FORMAT, m->at, "a size that is no number");
    }
    return SPDL_OK;
}

/* Reads a header: its kind, and the size of what follows it. SPDL_END: the empty block. */
SPDL__PRIVATE spdl_result spdl__tar_head(spdl__reader *r, spdl__tar_member *m,
                                         const uint8_t **head) {
    uint64_t sum = 0, told = 0;
    size_t i;
    bool empty = true;
    if (m->at == r->bytes)
        return spdl__reader_fail(r, SPDL_E_FORMAT, m->at,
                                 "cut off: it ends without an empty block");
    *head = spdl__reader_need(r, m->at, 512);
    if (*head == NULL) return r->result;
    for (i = 0; i < 512; ++i) {
        const uint8_t byte = i >= 148 && i < 156 ? ' ' : (*head)[i];
        empty = empty && (*head)[i] == 0;
        sum += byte;
    }
    if (empty) return SPDL_END;
    if (!spdl__tar_number(*head + 148, 8, &told) || told != sum)
        return spdl__reader_fail(r, SPDL_E_FORMAT, m->at, "%s",
                                 m->at == 0 && (*head)[0] == 0x1f && (*head)[1] == 0x8b
                                     ? "gzip: a tar file has to be unpacked"
                                     : "no header of a tar file: its checksum is wrong");
    m->kind = (char)(*head)[156];
    if (!spdl__tar_number(*head + 124, 12, &m->bytes))
        return spdl__reader_fail(r, SPDL_E_FORMAT, m->at + 124, "a size that is no number");
    return SPDL_OK;
}

/* Reads what a header of kind x or L has to say of the next member. One of kind K has a link's
   target, one of kind g comments or times of all members. */
SPDL__PRIVATE spdl_result spdl__tar_extend(spdl__reader *r, spdl__tar_member *m) {
    const uint8_t *text;
    if (m->bytes == 0 || m->kind == 'K' || m->kind == 'g') return SPDL_OK;
    if (m->bytes > r->room)
        return spdl__reader_fail(r, SPDL_E_LIMIT, m->at, "a header of %llu bytes",
                                 (spdl__llu)m->bytes);
    text = spdl__reader_need(r, m->at, (size_t)m->bytes);
    if (text == NULL) return r->result;
    if (m->kind == 'x') return spdl__tar_pax(r, m, text, (size_t)m->bytes);
    if (spdl__tar_name(m, text, spdl__tar_length(text, (size_t)m->bytes)))
        return SPDL_OK;
    return spdl__reader_fail(r, SPDL_E_FORMAT, m->at, "a name that is too long");
}

/* Name and size of a member, with what the headers in front of it said. ustar has the first part of
   a long name in another field; what others have there is no name. */
SPDL__PRIVATE void spdl__tar_own(spdl__tar_member *m, const uint8_t *head) {
    const size_t prefix = memcmp(head + 257, "ustar", 6) == 0
                              ? spdl__tar_length(head + 345, 155) : 0;
    const size_t name = spdl__tar_length(head, 100);
    if (m->long_bytes != SPDL__NEVER) m->bytes = m->long_bytes;
    if (m->name[0] == '\0') {
        memcpy(m->name, head + 345, prefix);
        m->name[prefix] = '/';
        memcpy(m->name + (prefix > 0 ? prefix + 1 : 0), head, name);
        m->name[(prefix > 0 ? prefix + 1 : 0) + name] = '\0';
    }
    /* in old archives a folder is a file whose name ends in a slash */
    if (m->kind == '\0') m->kind = name > 0 && head[name - 1] == '/' ? '5' : '0';
    if (m->kind >= '1' && m->kind <= '6') m->bytes = 0; /* whatever a link or a folder says */
}

/* Goes through headers up to the next member that is a plain file: m->at is that of its data. */
SPDL__PRIVATE spdl_result spdl__tar_find(spdl__records *s, spdl__tar_member *m) {
    spdl__reader *r = &s->reader;
    const uint8_t *head = NULL;
    bool extends, plain;
    spdl_result result;
    for (m->at = s->at;;) {
        if (m->at == s->at) { /* nothing was said of it before its own header */
            m->name[0] = '\0';
            m->long_bytes = SPDL__NEVER;
        }
        result = spdl__tar_head(r, m, &head);
        if (result != SPDL_OK) return result;
        extends = m->kind != '\0' && strchr("xgLK", m->kind) != NULL;
        if (!extends) spdl__tar_own(m, head);
        if (m->kind == 'S' || m->kind == 'M')
            return spdl__reader_fail(r, SPDL_E_UNSUPPORTED, m->at, "%s", m->kind == 'S'
                                         ? "a sparse file" : "a part of a larger archive");
        m->at += 512;
        result = spdl__reader_has(r, m->at, m->bytes);
        if (result == SPDL_OK && extends) result = spdl__tar_extend(r, m);
        plain = m->kind == '0' || m->kind == '7';
        if (result != SPDL_OK || plain) return result;
        m->at += (m->bytes + 511) & ~(uint64_t)511;
        if (!extends) s->at = m->at; /* a link, a folder: what was said of it is over */
    }
}

SPDL__PRIVATE spdl_result spdl__tar_next(spdl__records *s, spdl_record **record) {
    spdl__tar_member m;
    char name[80];
    spdl_result result = spdl__tar_find(s, &m);
    if (result != SPDL_OK) return result;
    if (m.bytes > s->desc.max_bytes) {
        spdl__printable(name, sizeof(name), m.name);
        return spdl__reader_fail(&s->reader, SPDL_E_LIMIT, m.at,
                                 "member '%s' has %llu bytes, more than max_bytes, which is %llu",
                                 name, (spdl__llu)m.bytes, (spdl__llu)s->desc.max_bytes);
    }
    result = spdl__reader_record(&s->reader, &s->desc.allocator, m.name, m.at, m.bytes, record);
    if (result == SPDL_OK) s->at = m.at + ((m.bytes + 511) & ~(uint64_t)511);
    return result;
}

/* Members up to one of another key, which waits in s->sample for the next call. */
SPDL__PRIVATE spdl_result spdl__tar_sample(spdl__records *s, spdl_record **record) {
    spdl_record *more = NULL, **end = &s->sample;
    uint64_t bytes = 0;
    for (;;) {
        const char *key = s->sample != NULL ? s->sample->name : NULL;
        const size_t length = key != NULL ? (size_t)(spdl__extension(key) - key) : 0;
        spdl_result result;
        for (; *end != NULL; end = &(*end)->next) bytes += (*end)->bytes + 512;
        if (bytes > 512 && bytes - 512 > s->desc.max_bytes)
            return spdl__reader_fail(&s->reader, SPDL_E_LIMIT, s->at,
                                     "a sample with more than max_bytes, which is %llu",
                                     (spdl__llu)s->desc.max_bytes);
        result = spdl__tar_next(s, &more);
        if (result < 0 || (result == SPDL_END && key == NULL)) return result;
        if (result == SPDL_OK && (key == NULL || (strncmp(key, more->name, length) == 0 &&
                                  spdl__extension(more->name) == more->name + length))) {
            *end = more;
            continue;
        }
        *record = s->sample;
        s->sample = result == SPDL_OK ? more : NULL;
        return SPDL_OK;
    }
}

/* The line at `at`: *bytes without its end, and *next, where the next one begins. */
SPDL__PRIVATE spdl_result spdl__line_find(spdl__reader *r, uint64_t at, uint64_t most,
                                          uint64_t *bytes, uint64_t *next) {
    const uint8_t *from, *end = NULL;
    size_t have = 0;
    uint8_t last = 0;
    for (*next = at; end == NULL && *next < r->bytes; *next += have) {
        from = spdl__reader_need(r, *next, 1);
        if (from == NULL) return r->result;
        have = spdl__reader_ready(r, *next);
        end = (const uint8_t *)memchr(from, '\n', have);
        if (end != NULL) have = (size_t)(end - from) + 1;
        if (have > (end != NULL)) last = from[have - 1 - (end != NULL)];
        if (end == NULL && *next - at > most) break;
    }
    *bytes = *next - at - (end != NULL);
    if (end != NULL && *bytes > 0 && last == '\r') --*bytes;
    if (*bytes <= most) return SPDL_OK;
    return spdl__reader_fail(r, SPDL_E_LIMIT, at, "a line of more than max_bytes, which is %llu",
                             (spdl__llu)most);
}

SPDL__PRIVATE spdl_records_desc spdl__records_defaults(const spdl_records_desc *given,
                                                       spdl__records_kind kind) {
    spdl_records_desc desc;
    memset(&desc, 0, sizeof(desc));
    if (given != NULL) desc = *given;
    if (desc.max_bytes == 0) desc.max_bytes = kind == SPDL__RECORDS_TAR ? 1 << 30 : 1 << 24;
    spdl__error_clear(desc.error);
    return desc;
}

SPDL_API spdl_result spdl__records_open(spdl__records **records, const char *path,
                                       const spdl_records_desc *given) {
    const spdl_records_desc desc =
        spdl__records_defaults(given, given != NULL ? given->kind : SPDL__RECORDS_TAR);
    spdl__records *s;
    size_t block_bytes;
    spdl_result result;
    if (records != NULL) *records = NULL;
    if (records == NULL || path == NULL)
        return spdl__error_set(desc.error, SPDL_E_INVALID, "spdl__records_open: %s is NULL",
                               path == NULL ? "path" : "records");
    result = spdl__allocator_check(&desc.allocator, "records", desc.error);
    if (result != SPDL_OK) return result;
    block_bytes = sizeof(*s) + strlen(path);
    s = (spdl__records *)spdl__alloc(&desc.allocator, block_bytes, 64);
    if (s == NULL)
        return spdl__error_set(desc.error, SPDL_E_NOMEM, "spdl__records_open: out of memory");
    memset(s, 0, offsetof(spdl__records, window));
    s->desc = desc;
    s->block_bytes = block_bytes;
    result = spdl__reader_open(&s->reader, strcpy(s->path, path), desc.error);
    s->reader.window = s->window;
    s->reader.room = sizeof(s->window);
    if (result == SPDL_OK) *records = s;
    else spdl__free(&desc.allocator, s, block_bytes);
    return result;
}

SPDL_API spdl_result spdl__records_next(spdl__records *records, spdl_record **record,
                                       spdl_error *error) {
    spdl__records *s = records;
    uint64_t bytes = 0, next = 0;
    spdl_result result;
    spdl__error_clear(error);
    s->reader.error = error;
    if (s->desc.kind != SPDL__RECORDS_LINES)
        return s->desc.group ? spdl__tar_sample(s, record) : spdl__tar_next(s, record);
    if (s->at == s->reader.bytes) return SPDL_END;
    result = spdl__line_find(&s->reader, s->at, s->desc.max_bytes, &bytes, &next);
    if (result == SPDL_OK)
        result = spdl__reader_record(&s->reader, &s->desc.allocator, s->path, s->at, bytes, record);
    if (result == SPDL_OK) s->at = next;
    return result;
}

SPDL_API void spdl__records_close(void *records) {
    spdl__records *s = (spdl__records *)records;
    spdl_allocator allocator;
    if (s == NULL) return;
    allocator = s->desc.allocator;
    spdl_record_free(s->sample);
    (void)spdl__os_file_close(s->reader.file);
    spdl__free(&allocator, s, s->block_bytes);
}

/* --- lists of files --- */

typedef struct spdl__file {
    const char *path; /* while the list is made: how far into the text */
    uint64_t bytes;
} spdl__file;

struct spdl_files {
    spdl_allocator allocator;
    spdl__file *at;
    char *text; /* the paths, each with a zero at its end */
    uint64_t hash;
    size_t count, room, text_bytes, text_room;
};

/* What open knows so far. */
typedef struct spdl__search {
    spdl_files *files;
    spdl_files_desc desc;
    const char *pattern; /* what is left of it: for the folder at `path`; NULL: everything */
    uint64_t seen;       /* files and folders */
    int depth;
    spdl_result result;
    size_t length;
    char path[SPDL__LISTED_BYTES];
} spdl__search;

SPDL__PRIVATE bool spdl__search_fail(spdl__search *f, spdl_result result, const char *reason) {
    char label[208];
    spdl__label(label, sizeof(label), f->path[0] != '\0' ? f->path : ".");
    f->result = spdl__error_set(f->desc.error, result, "%s: %s", label, reason);
    return false;
}

/* Appends to the path; spdl__search_pop takes it back. */
SPDL__PRIVATE bool spdl__search_push(spdl__search *f, const char *name, size_t bytes) {
    const size_t slash = f->length > 0 && f->path[f->length - 1] != '/' && f->depth > 0;
    if (bytes >= sizeof(f->path) - f->length - slash)
        return spdl__search_fail(f, SPDL_E_LIMIT, "a path in it has more than 4095 bytes");
    if (slash) f->path[f->length++] = '/';
    memcpy(f->path + f->length, name, bytes);
    f->path[f->length += bytes] = '\0';
    return true;
}

SPDL__PRIVATE void spdl__search_pop(spdl__search *f, size_t length) {
    f->path[f->length = length] = '\0';
}

SPDL__PRIVATE bool spdl__search_add(spdl__search *f, uint64_t bytes) {
    spdl_files *files = f->files;
    void *at = spdl__room_for(&files->allocator, files->at, &files->room, files->count, 1,
                              sizeof(*files->at));
    void *text = spdl__room_for(&files->allocator, files->text, &files->text_room,
                                files->text_bytes, f->length + 1, 1);
    if (at != NULL) files->at = (spdl__file *)at;
    if (text != NULL) files->text = (char *)text;
    if (at == NULL || text == NULL)
        return spdl__search_fail(f, SPDL_E_NOMEM, "no memory for a list of files");
    files->at[files->count].path = (const char *)(uintptr_t)files->text_bytes;
    files->at[files->count++].bytes = bytes;
    memcpy(files->text + files->text_bytes, f->path, f->length + 1);
    files->text_bytes += f->length + 1;
    return true;
}

/* Whether a name fits one part of a pattern. After a mismatch the last star takes one more. */
SPDL__PRIVATE bool spdl__match(const char *part, const char *end, const char *name) {
    const char *star = NULL, *from = NULL;
    if (name[0] == '.' && part[0] != '.') return false;
    while (*name != '\0' || part < end) {
        if (part < end && *part == '*') {
            star = ++part;
            from = name;
        } else if (part < end && *name != '\0' && (*part == '?' || *part == *name)) {
            ++part;
            ++name;
        } else {
            if (star == NULL || *from == '\0') return false;
            part = star;
            name = ++from;
        }
    }
    return true;
}

SPDL__PRIVATE bool spdl__search_entry(void *finding, const char *name);

SPDL__PRIVATE bool spdl__search_in(spdl__search *f) {
    const char *reason;
    if (++f->depth > SPDL__FOLDERS_DEEP)
        return spdl__search_fail(f, SPDL_E_LIMIT, "32 folders deep: does a link lead back?");
    reason = spdl__os_folder_read(f->length > 0 ? f->path : ".", spdl__search_entry, f);
    --f->depth;
    return f->result == SPDL_OK && (reason == NULL || spdl__search_fail(f, SPDL_E_IO, reason));
}

/* Looks at f->path. */
SPDL__PRIVATE bool spdl__search_look(spdl__search *f, uint64_t *bytes, bool *folder) {
    const char *reason = spdl__os_file_look(f->path, bytes, folder);
    if (reason != NULL) return spdl__search_fail(f, SPDL_E_IO, reason);
    return ++f->seen <= f->desc.max_files ||
           spdl__search_fail(f, SPDL_E_LIMIT, "more files and folders than max_files");
}

/* An entry of the folder at f->path: false ends the search. */
SPDL__PRIVATE bool spdl__search_entry(void *finding, const char *name) {
    spdl__search *f = (spdl__search *)finding;
    const char *pattern = f->pattern;
    const char *end = pattern != NULL ? pattern + strcspn(pattern, "/") : NULL;
    const bool more = end != NULL && *end == '/';
    const size_t length = f->length;
    uint64_t bytes = 0;
    bool folder = false, good;
    if (pattern != NULL ? !spdl__match(pattern, end, name) : name[0] == '.') return true;
    if (!spdl__search_push(f, name, strlen(name))) return false;
    good = spdl__search_look(f, &bytes, &folder);
    if (good && folder && (more || (pattern == NULL && f->desc.recursive))) {
        f->pattern = more ? end + 1 : NULL;
        good = spdl__search_in(f);
        f->pattern = pattern;
    } else if (good && !folder && !more) {
        good = spdl__search_add(f, bytes);
    }
    spdl__search_pop(f, length);
    return good;
}

/* A path that was named, not found: `f->path`. */
SPDL__PRIVATE bool spdl__search_named(spdl__search *f) {
    uint64_t bytes = 0;
    bool folder = false;
    if (!spdl__search_look(f, &bytes, &folder)) return false;
    if (folder) return spdl__search_fail(f, SPDL_E_IO, "a folder, not a file");
    return spdl__search_add(f, bytes);
}

/* The line of a list: an empty one names nothing. */
SPDL__PRIVATE bool spdl__search_line(spdl__search *f, const spdl_record *line) {
    const char *path = (const char *)line->data, *slash = strrchr(line->name, '/');
    const size_t folder = slash != NULL && path[0] != '/' ? (size_t)(slash + 1 - line->name) : 0;
    spdl__search_pop(f, 0);
    if (line->bytes == 0) return true;
    if (!spdl__search_push(f, line->name, folder)) return false;
    if (!spdl__search_push(f, path, line->bytes)) return false;
    if (strlen(path) == line->bytes) return spdl__search_named(f);
    return spdl__search_fail(f, SPDL_E_FORMAT, "in a list: a path with a zero in it");
}

SPDL__PRIVATE bool spdl__search_listed(spdl__search *f, const char *list) {
    spdl_records_desc desc;
    spdl__records *lines = NULL;
    spdl_record *line = NULL;
    memset(&desc, 0, sizeof(desc));
    desc.kind = SPDL__RECORDS_LINES;
    desc.max_bytes = SPDL__LISTED_BYTES;
    desc.allocator = f->desc.allocator;
    desc.error = f->desc.error;
    f->result = spdl__records_open(&lines, list, &desc);
    while (f->result == SPDL_OK) {
        f->result = spdl__records_next(lines, &line, f->desc.error);
        if (f->result != SPDL_OK) break;
        (void)spdl__search_line(f, line);
        spdl_record_free(line);
    }
    spdl__records_close(lines);
    if (f->result == SPDL_END) f->result = SPDL_OK;
    return f->result == SPDL_OK;
}

/* Of a pattern, what comes before the part with the first wildcard is a path. */
SPDL__PRIVATE bool spdl__search_path(spdl__search *f, const char *path) {
    const char *end = path + strlen(path), *wildcard = strpbrk(path, "*?"), *reason;
    uint64_t bytes = 0;
    bool folder = false;
    if (path[0] == '@') return spdl__search_listed(f, path + 1);
    reason = spdl__os_file_look(path, &bytes, &folder);
    if (reason != NULL && wildcard != NULL) {
        for (end = wildcard; end > path && end[-1] != '/'; --end) {}
        f->pattern = end;
        folder = true;
    }
    if (!spdl__search_push(f, path, (size_t)(end - path))) return false;
    return folder ? spdl__search_in(f) : spdl__search_named(f);
}

SPDL__PRIVATE int spdl__file_order(const void *a, const void *b) {
    return strcmp(((const spdl__file *)a)->path, ((const spdl__file *)b)->path);
}

/* Names from the folder on that all paths begin with, and sizes. */
SPDL__PRIVATE uint64_t spdl__files_manifest(const spdl_files *files) {
    const char *first = files->at[0].path, *name = strrchr(first, '/');
    size_t common = name != NULL ? (size_t)(name + 1 - first) : 0, i;
    uint64_t hash = 0;
    for (i = 1; i < files->count; ++i)
        while (strncmp(first, files->at[i].path, common) != 0)
            for (--common; common > 0 && first[common - 1] != '/'; --common) {}
    for (i = 0; i < files->count; ++i) {
        name = files->at[i].path + common;
        hash = spdl__hashed(spdl_hash(hash, name, strlen(name)), files->at[i].bytes);
    }
    return hash;
}

SPDL_API spdl_result spdl_files_open(spdl_files **files, const char *path,
                                     const spdl_files_desc *desc) {
    spdl__search f;
    spdl_files *made;
    size_t i;
    memset(&f, 0, sizeof(f));
    if (desc != NULL) f.desc = *desc;
    if (f.desc.max_files == 0) f.desc.max_files = 1 << 24;
    spdl__error_clear(f.desc.error);
    if (files != NULL) *files = NULL;
    if (files == NULL || path == NULL || path[0] == '\0')
        return spdl__error_set(f.desc.error, SPDL_E_INVALID, "spdl_files_open: %s",
                               files == NULL ? "files is NULL" : "path is NULL or empty");
    f.result = spdl__allocator_check(&f.desc.allocator, "files", f.desc.error);
    if (f.result != SPDL_OK) return f.result;
    made = (spdl_files *)spdl__alloc_zeroed(&f.desc.allocator, 1, sizeof(*made), 64);
    if (made == NULL)
        return spdl__error_set(f.desc.error, SPDL_E_NOMEM, "spdl_files_open: out of memory");
    made->allocator = f.desc.allocator;
    f.files = made;
    if (spdl__search_path(&f, path) && made->count == 0) {
        spdl__search_pop(&f, 0);
        (void)(spdl__search_push(&f, path, strlen(path)) &&
               spdl__search_fail(&f, SPDL_E_NOT_FOUND, "no files"));
    }
    if (f.result != SPDL_OK) {
        spdl_files_close(made);
        return f.result;
    }
    for (i = 0; i < made->count; ++i) made->at[i].path = made->text + (uintptr_t)made->at[i].path;
    if (path[0] != '@') qsort(made->at, made->count, sizeof(*made->at), spdl__file_order);
    made->hash = spdl__files_manifest(made);
    *files = made;
    return SPDL_OK;
}

SPDL_API void spdl_files_close(spdl_files *files) {
    spdl_allocator allocator;
    if (files == NULL) return;
    allocator = files->allocator;
    spdl__free(&allocator, files->at, files->room * sizeof(*files->at));
    spdl__free(&allocator, files->text, files->text_room);
    spdl__free(&allocator, files, sizeof(*files));
}

SPDL_API uint64_t spdl_files_count(const spdl_files *files) { return files->count; }

SPDL_API const char *spdl_files_path(const spdl_files *files, uint64_t index) {
    return index < files->count ? files->at[index].path : NULL;
}

SPDL_API uint64_t spdl_files_hash(const spdl_files *files) { return files->hash; }

/* --- tokens --- */

typedef struct spdl__shard {
    spdl__reader reader; /* file and length */
    uint64_t data;       /* where its tokens begin */
    uint64_t first;      /* its first token */
} spdl__shard;

/* Nothing of it changes between open and close: any threads read. */
struct spdl_tokens {
    spdl_allocator allocator;
    spdl__shard *at;
    size_t count, opened;
    uint64_t total, length, windows;
    size_t width; /* bytes of a token in the file */
};

/* Finds out where the tokens of a shard are, and counts them. All have as many bytes as those of
   the first. */
SPDL__PRIVATE spdl_result spdl__tokens_head(spdl_tokens *tokens, spdl__shard *shard,
                                            int raw_bytes) {
    const spdl__reader *r = &shard->reader;
    uint64_t count;
    uint8_t head[12] = { 0 };
    uint32_t magic, version;
    size_t have = 0, bytes;
    const char *reason = NULL;
    const spdl_result result = raw_bytes == 0 ? spdl__reader_has(r, 0, 1024) : SPDL_OK;
    if (result != SPDL_OK) return result;
    if (r->bytes >= 1024) reason = spdl__os_file_read(r->file, head, sizeof(head), 0, &have);
    if (reason != NULL) return spdl__reader_fail(r, SPDL_E_IO, have, "%s", reason);
    magic = spdl__le32(head);
    version = spdl__le32(head + 4);
    bytes = magic == 20240520 && version == 1 ? 2 : magic == 20240801 && version == 7 ? 4 : 0;
    shard->data = raw_bytes == 0 ? 1024 : 0;
    if (bytes == 0 && raw_bytes == 0)
        return spdl__reader_fail(r, SPDL_E_FORMAT, 0, "no tokens of llm.c: magic %u, version %u",
                                 (unsigned)magic, (unsigned)version);
    if (bytes != 0 && raw_bytes != 0)
        return spdl__reader_fail(r, SPDL_E_FORMAT, 0, "a header of llm.c: raw_bytes has to be 0");
    if (raw_bytes != 0) bytes = (size_t)raw_bytes;
    count = (r->bytes - shard->data) / bytes;
    if (r->bytes % bytes != 0)
        return spdl__reader_fail(r, SPDL_E_FORMAT, r->bytes - r->bytes % bytes,
                                 "cut off: a token has %d bytes", (int)bytes);
    if (raw_bytes == 0 && count != spdl__le32(head + 8))
        return spdl__reader_fail(r, SPDL_E_FORMAT, 8, "it says %u tokens, and has %llu",
                                 (unsigned)spdl__le32(head + 8), (spdl__llu)count);
    if (tokens->width != 0 && tokens->width != bytes)
        return spdl__reader_fail(r, SPDL_E_FORMAT, 0, "tokens of %d bytes, behind some of %d",
                                 (int)bytes, (int)tokens->width);
    tokens->width = bytes;
    shard->first = tokens->total;
    tokens->total += count;
    return SPDL_OK;
}

SPDL__PRIVATE spdl_result spdl__tokens_fill(spdl_tokens *tokens, const spdl_files *files,
                                            const spdl_tokens_desc *desc) {
    spdl_result result = SPDL_OK;
    tokens->length = desc->length;
    tokens->count = files->count;
    tokens->at = (spdl__shard *)spdl__alloc_zeroed(&desc->allocator, tokens->count,
                                                   sizeof(*tokens->at), 64);
    if (tokens->at == NULL)
        return spdl__error_set(desc->error, SPDL_E_NOMEM, "tokens: out of memory");
    while (result == SPDL_OK && tokens->opened < tokens->count) {
        spdl__shard *shard = &tokens->at[tokens->opened];
        result = spdl__reader_open(&shard->reader, files->at[tokens->opened].path, desc->error);
        tokens->opened += result == SPDL_OK;
        if (result == SPDL_OK) result = spdl__tokens_head(tokens, shard, desc->raw_bytes);
    }
    tokens->windows = tokens->total > 0 ? (tokens->total - 1) / desc->length : 0;
    if (result == SPDL_OK && tokens->windows == 0)
        result = spdl__reader_fail(&tokens->at[0].reader, SPDL_E_FORMAT, tokens->at[0].data,
                                   "all files together have %llu tokens, and a window takes %llu",
                                   (spdl__llu)tokens->total, (spdl__llu)desc->length + 1);
    return result;
}

SPDL_API spdl_result spdl_tokens_open(spdl_tokens **tokens, const spdl_files *files,
                                      const spdl_tokens_desc *given) {
    spdl_tokens_desc desc;
    spdl_tokens *made;
    spdl_result result;
    memset(&desc, 0, sizeof(desc));
    if (given != NULL) desc = *given;
    spdl__error_clear(desc.error);
    if (tokens != NULL) *tokens = NULL;
    if (tokens == NULL || files == NULL)
        return spdl__error_set(desc.error, SPDL_E_INVALID, "tokens: an argument is NULL");
    if (desc.length == 0 || desc.length >= SIZE_MAX / 8)
        return spdl__error_set(desc.error, SPDL_E_INVALID, "tokens: length is %llu",
                               (spdl__llu)desc.length);
    if (desc.raw_bytes != 0 && desc.raw_bytes != 2 && desc.raw_bytes != 4)
        return spdl__error_set(desc.error, SPDL_E_INVALID,
                               "tokens: raw_bytes is %d, not 0, 2 or 4", desc.raw_bytes);
    result = spdl__allocator_check(&desc.allocator, "tokens", desc.error);
    if (result != SPDL_OK) return result;
    made = (spdl_tokens *)spdl__alloc_zeroed(&desc.allocator, 1, sizeof(*made), 64);
    if (made == NULL)
        return spdl__error_set(desc.error, SPDL_E_NOMEM, "tokens: out of memory");
    made->allocator = desc.allocator;
    result = spdl__tokens_fill(made, files, &desc);
    if (result == SPDL_OK) *tokens = made;
    else spdl_tokens_close(made);
    return result;
}

SPDL_API void spdl_tokens_close(spdl_tokens *tokens) {
    spdl_allocator allocator;
    if (tokens == NULL) return;
    allocator = tokens->allocator;
    while (tokens->opened > 0)
        (void)spdl__os_file_close(tokens->at[--tokens->opened].reader.file);
    spdl__free(&allocator, tokens->at, tokens->count * sizeof(*tokens->at));
    spdl__free(&allocator, tokens, sizeof(*tokens));
}

SPDL_API uint64_t spdl_tokens_count(const spdl_tokens *tokens) { return tokens->windows; }

SPDL_API size_t spdl_tokens_bytes(const spdl_tokens *tokens) {
    return ((size_t)tokens->length + 1) * sizeof(uint32_t);
}

/* So many bytes of a shard. */
SPDL__PRIVATE spdl_result spdl__shard_read(const spdl__shard *shard, uint64_t from, void *to,
                                           size_t bytes, spdl_error *error) {
    spdl__reader reader;
    size_t have = 0;
    const char *reason = spdl__os_file_read(shard->reader.file, to, bytes, from, &have);
    if (SPDL__LIKELY(reason == NULL)) return SPDL_OK;
    reader = shard->reader;
    reader.error = error;
    return spdl__reader_fail(&reader, SPDL_E_IO, from + have, "%s", reason);
}

/* Tokens as they lie in the file become numbers: nothing, where the processor has the low byte
   first. */
SPDL__PRIVATE void spdl__tokens_order(void *tokens, size_t width, size_t count) {
    uint8_t *at = (uint8_t *)tokens;
    const uint16_t one = 1;
    uint32_t wide;
    uint16_t narrow;
    if (*(const uint8_t *)&one == 1) return;
    for (; count > 0; --count, at += width) {
        wide = width == 4 ? spdl__le32(at) : 0;
        narrow = spdl__le16(at);
        memcpy(at, width == 4 ? (const void *)&wide : &narrow, width);
    }
}

SPDL__PRIVATE void spdl__tokens_widen(uint32_t *__restrict to, const uint16_t *__restrict from,
                                      size_t count) {
    size_t i;
    for (i = 0; i < count; ++i) to[i] = from[i];
}

/* Tokens of 2 bytes as 4, by way of a piece that stays in the nearest cache. */
SPDL__PRIVATE spdl_result spdl__shard_read_wide(const spdl__shard *shard, uint64_t from,
                                                uint32_t *to, size_t count, spdl_error *error) {
    uint16_t piece[8192];
    spdl_result result = SPDL_OK;
    size_t done, part;
    for (done = 0; done < count && result == SPDL_OK; done += part) {
        part = spdl__min(count - done, sizeof(piece) / sizeof(piece[0]));
        result = spdl__shard_read(shard, from + done * 2, piece, part * 2, error);
        if (result != SPDL_OK) return result;
        spdl__tokens_order(piece, 2, part);
        spdl__tokens_widen(to + done, piece, part);
    }
    return result;
}

/* A window, over as many shards as it takes, of tokens of `wide` bytes. */
SPDL__PRIVATE spdl_result spdl__tokens_window(const spdl_tokens *tokens, uint64_t index,
                                              void *window, size_t wide, spdl_error *error) {
    const size_t width = tokens->width, count = (size_t)tokens->length + 1;
    const spdl__shard *shard = tokens->at, *end = tokens->at + tokens->count, *middle;
    size_t done, part;
    spdl_result result = SPDL_OK;
    spdl__error_clear(error);
    if (index >= tokens->windows)
        return spdl__error_set(error, SPDL_E_INVALID, "no window %llu: there are %llu",
                               (spdl__llu)index, (spdl__llu)tokens->windows);
    if (wide < width)
        return spdl__error_set(error, SPDL_E_INVALID, "windows of uint16_t, but the shards "
                               "have 4 bytes a token");
    while (end - shard > 1) { /* the last one that begins there or before */
        middle = shard + (end - shard) / 2;
        if (middle->first <= index * tokens->length) shard = middle;
        else end = middle;
    }
    for (done = 0; done < count && result == SPDL_OK; done += part, ++shard) {
        const uint64_t from = shard->data + (index * tokens->length + done - shard->first) * width;
        char *to = (char *)window + done * wide;
        part = (size_t)spdl__min(count - done, (shard->reader.bytes - from) / width);
        if (wide > width) {
            result = spdl__shard_read_wide(shard, from, (uint32_t *)(void *)to, part, error);
        } else {
            result = spdl__shard_read(shard, from, to, part * width, error);
            if (result == SPDL_OK) spdl__tokens_order(to, width, part);
        }
    }
    return result;
}

SPDL_API spdl_result spdl_tokens_read(const spdl_tokens *tokens, uint64_t index, uint32_t *window,
                                      spdl_error *error) {
    return spdl__tokens_window(tokens, index, window, 4, error);
}

SPDL_API spdl_result spdl_tokens_read16(const spdl_tokens *tokens, uint64_t index,
                                        uint16_t *window, spdl_error *error) {
    return spdl__tokens_window(tokens, index, window, 2, error);
}

/* --- rows --- */

/* What an index names; a source has none, and makes item spdl_sequence. */
SPDL__PRIVATE spdl_result spdl__row_index(spdl_task *task, const void *in, bool source,
                                          const char *what, uint64_t count, uint64_t *index) {
    if (!source && in == NULL) return spdl_fail(task, "NULL, not an index");
    *index = source ? spdl_sequence(task) : ((const spdl_index *)in)->index;
    if (*index < count) return SPDL_OK;
    if (source) return SPDL_END;
    return spdl_fail(task, "no %s %llu: there are %llu", what, (spdl__llu)*index, (spdl__llu)count);
}

SPDL__PRIVATE spdl_result spdl__row_result(spdl_task *task, spdl_result result,
                                           const spdl_error *error) {
    if (result < 0) (void)spdl_fail(task, "%s", error->text);
    return result;
}

SPDL__PRIVATE spdl_result spdl__files_row(spdl_task *task, void *in, bool source, void **out) {
    const spdl_files *files = (const spdl_files *)spdl_ctx(task);
    uint64_t index = 0;
    const spdl_result result = spdl__row_index(task, in, source, "file", files->count, &index);
    if (result == SPDL_OK) *out = SPDL__UNCONST(files->at[index].path);
    return result;
}

/* The bytes of what spdl_buffer gives in this row. */
SPDL__PRIVATE size_t spdl__row_bytes(const spdl_task *task) {
    return (task->node + task->node->places)->row.item_bytes;
}

SPDL__PRIVATE spdl_result spdl__tokens_row(spdl_task *task, void *in, bool source, size_t wide,
                                           void **out) {
    const spdl_tokens *tokens = (const spdl_tokens *)spdl_ctx(task);
    const size_t bytes = spdl_tokens_bytes(tokens) / 4 * wide, room = spdl__row_bytes(task);
    uint64_t index = 0;
    spdl_error error;
    spdl_result result = spdl__row_index(task, in, source, "window", tokens->windows, &index);
    if (result != SPDL_OK) return result;
    if (room > 0 && room < bytes)
        return spdl_fail(task, "item_bytes is %zu, and a window takes %zu", room, bytes);
    *out = spdl_buffer(task);
    if (*out == NULL) return SPDL_E_NOMEM;
    result = spdl__tokens_window(tokens, index, *out, wide, &error);
    return spdl__row_result(task, result, &error);
}

SPDL__PRIVATE spdl_result spdl__records_row(spdl_task *task, void *in, spdl__records_kind kind,
                                            void **out) {
    const spdl_records_desc *given = (const spdl_records_desc *)spdl_ctx(task);
    void **state = spdl_call_state(task);
    spdl__records *opened = NULL;
    spdl_record *record = NULL;
    spdl_records_desc desc;
    spdl_error error;
    spdl_result result = SPDL_OK;
    memset(&desc, 0, sizeof(desc));
    if (given != NULL) desc = *given;
    desc.kind = kind;
    desc.error = &error;
    if (*state == NULL) {
        result = spdl__records_open(&opened, (const char *)in, &desc);
        *state = opened;
    }
    if (result == SPDL_OK) result = spdl__records_next((spdl__records *)*state, &record, &error);
    *out = record;
    return result == SPDL_OK ? SPDL_AGAIN
           : result == SPDL_END ? SPDL_SKIP : spdl__row_result(task, result, &error);
}

#define SPDL__ROW_FN(name, call)                                                                   \
    SPDL__PRIVATE spdl_result name(spdl_task *task, void *in, void **out) { return call; }
SPDL__ROW_FN(spdl__files_source, spdl__files_row(task, in, true, out))
SPDL__ROW_FN(spdl__files_pipe, spdl__files_row(task, in, false, out))
SPDL__ROW_FN(spdl__tokens_source, spdl__tokens_row(task, in, true, 4, out))
SPDL__ROW_FN(spdl__tokens_pipe, spdl__tokens_row(task, in, false, 4, out))
SPDL__ROW_FN(spdl__tokens16_source, spdl__tokens_row(task, in, true, 2, out))
SPDL__ROW_FN(spdl__tokens16_pipe, spdl__tokens_row(task, in, false, 2, out))
SPDL__ROW_FN(spdl__tar_pipe, spdl__records_row(task, in, SPDL__RECORDS_TAR, out))
SPDL__ROW_FN(spdl__lines_pipe, spdl__records_row(task, in, SPDL__RECORDS_LINES, out))

#if defined(SPDL_STATIC) && defined(__cplusplus)
namespace {
#elif defined(SPDL_STATIC)
SPDL__UNUSED static
#endif
const spdl_function spdl__file_rows[8] = {
    { spdl__files_source, "files", "void", "char" },
    { spdl__files_pipe, "files_at", "spdl_index", "char" },
    { spdl__tokens_source, "tokens", "void", "uint32_t" },
    { spdl__tokens_pipe, "tokens_at", "spdl_index", "uint32_t" },
    { spdl__tokens16_source, "tokens16", "void", "uint16_t" },
    { spdl__tokens16_pipe, "tokens16_at", "spdl_index", "uint16_t" },
    { spdl__tar_pipe, "tar", "char", "spdl_record" },
    { spdl__lines_pipe, "lines", "char", "spdl_record" },
};
#if defined(SPDL_STATIC) && defined(__cplusplus)
}
#endif

/* ============================================================================================= */
/* >>state-impl
   Positions as text: "spdl.state.1 table=... item_seed=... epoch=... item=... sum=...", fields with
   one space before each, those of a sampler among them. What they mean is in >>position-impl. A
   field that can be compared may be taken out by hand, and with "sum=none" nobody looks whether the
   rest was changed. Bytes from outside: numbers are checked, a text has an end within
   SPDL_STATE_BYTES, and whatever it says the worst is another position.

   Threads: the trainer. */

#define SPDL__STATE_BEGIN "spdl.state."
#define SPDL__STATE_VERSION 1

SPDL__PRIVATE uint32_t spdl__state_sum(const char *text, size_t length) {
    return (uint32_t)spdl_hash(SPDL__STATE_VERSION, text, length);
}

/* The line; why there is none, or NULL. */
SPDL__PRIVATE const char *spdl__state_write(const spdl_pipeline *p, spdl__line *line) {
    spdl__position at;
    const char *why = spdl__position_read(p, &at);
    line->length = 0;
    line->full = false;
    if (why != NULL) return why;
    spdl__line_number(line, SPDL__STATE_BEGIN, SPDL__STATE_VERSION);
    spdl__line_hex(line, " table=", p->table);
    spdl__line_number(line, " item_seed=", p->seed);
    spdl__line_number(line, " data=", p->data_hash);
    spdl__line_number(line, " epoch=", at.epoch);
    spdl__line_number(line, " item=", at.source);
    spdl__line_number(line, " results=", at.results);
    spdl__line_number(line, " batch=", at.number);
    spdl__line_number(line, " drops=", at.drops);
    spdl__line_number(line, " delivered=", at.delivered);
    if (p->sampler != NULL) spdl__sampler_describe(p->sampler, at.epoch, line);
    spdl__line_hex(line, " sum=", spdl__state_sum(line->text, line->length));
    return line->full ? "it would be longer than SPDL_STATE_BYTES" : NULL;
}

SPDL_API int spdl_state_save(const spdl_pipeline *p, char *text, size_t bytes) {
    spdl__line line;
    const char *why;
    if (p == NULL || text == NULL || bytes == 0) return SPDL_E_INVALID;
    why = spdl__state_write(p, &line);
    if (why != NULL) {
        (void)snprintf(text, bytes, "the position of this pipeline cannot be saved: %s", why);
        return SPDL_E_UNSUPPORTED;
    }
    bytes = (size_t)spdl__min(bytes - 1, line.length);
    memcpy(text, line.text, bytes);
    text[bytes] = '\0';
    return (int)line.length;
}

/* --- reading --- */

/* A load, as far as it has come. */
typedef struct spdl__state_loads {
    spdl_pipeline *p;
    const char *const *texts;
    int count, at;        /* the text at hand */
    spdl_sampler sampler; /* what the load makes of it: the pipeline's own may be at work */
    spdl_error *error;
} spdl__state_loads;

SPDL__PRINTF(3, 4)
SPDL__COLD spdl_result spdl__state_error(const spdl__state_loads *l, spdl_result result,
                                         const char *format, ...) {
    char text[SPDL_TEXT_BYTES / 2];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    return spdl__error_set(l->error, result, "spdl_state_load: text %d %s", l->at, text);
}

/* A field that has to be there. */
SPDL__COLD spdl_result spdl__state_number(const spdl__state_loads *l, const char *name,
                                          uint64_t most, uint64_t *number) {
    const char *at = spdl__text_field(l->texts[l->at], name);
    if (at != NULL && spdl__text_number(at, 10, " ", number) != NULL && *number <= most)
        return SPDL_OK;
    return spdl__state_error(l, SPDL_E_FORMAT, "%s '%s='",
                             at == NULL ? "has no" : "has a number that cannot be in", name);
}

/* A field that has to be the same as ours, if it is there. */
SPDL__COLD spdl_result spdl__state_same(const spdl__state_loads *l, const char *name, unsigned base,
                                        uint64_t ours, const char *what) {
    const char *at = spdl__text_field(l->texts[l->at], name);
    uint64_t number;
    char here[24];
    if (at == NULL || (spdl__text_number(at, base, " ", &number) != NULL && number == ours))
        return SPDL_OK;
    (void)snprintf(here, sizeof(here), base == 16 ? "%08llx" : "%llu", (spdl__llu)ours);
    return spdl__state_error(l, SPDL_E_INVALID, "is of %s: %s=%.*s, here %s=%s; to load it all the "
                             "same take that out of it and end it with sum=none", what, name,
                             (int)strcspn(at, " "), at, name, here);
}

/* Version, length and sum. */
SPDL__COLD spdl_result spdl__state_check(const spdl__state_loads *l) {
    const size_t begin = sizeof(SPDL__STATE_BEGIN) - 1;
    const char *text = l->texts[l->at], *sum;
    const char *end = (const char *)memchr(text, '\0', SPDL_STATE_BYTES);
    uint64_t number;
    if (end == NULL || strncmp(text, SPDL__STATE_BEGIN, begin) != 0)
        return spdl__state_error(l, SPDL_E_FORMAT, "is not what spdl_state_save has written");
    if (spdl__text_number(text + begin, 10, " ", &number) == NULL || number != SPDL__STATE_VERSION)
        return spdl__state_error(l, SPDL_E_FORMAT, "is of version %.*s, this is version %d",
                                 (int)strcspn(text + begin, " "), text + begin,
                                 SPDL__STATE_VERSION);
    sum = spdl__text_field(text, "sum");
    if (sum == NULL)
        return spdl__state_error(l, SPDL_E_FORMAT, "has no 'sum=': its end is missing");
    while (strchr("\r\n ", end[-1]) != NULL) --end;
    if (end - sum == 4 && memcmp(sum, "none", 4) == 0) return SPDL_OK;
    if (end - sum == 8 && spdl__text_number(sum, 16, "\r\n ", &number) == end &&
        number == spdl__state_sum(text, (size_t)(sum - 5 - text)))
        return SPDL_OK;
    return spdl__state_error(l, SPDL_E_CHECKSUM,
                             "was changed: its sum does not fit; to load it all the same end it "
                             "with sum=none");
}

/* What a text says of the sampler; l->sampler has its `from` then. */
SPDL__COLD spdl_result spdl__state_sampler(spdl__state_loads *l) {
    const char *from = spdl__text_field(l->texts[l->at], "from");
    spdl_sampler *s = &l->sampler;
    spdl_error error;
    const spdl_result result = spdl__sampler_differs(l->p->sampler, l->texts[l->at], &error);
    if (result != SPDL_OK)
        return spdl__state_error(l, result, "does not fit: %.300s; to load it all the same write "
                                 "ours into it and end it with sum=none", error.text);
    s->from_epoch = s->from = 0;
    if (from == NULL ||
        (spdl__text_pair(from, ':', &s->from_epoch, &s->from) && s->from <= s->length))
        return SPDL_OK;
    return spdl__state_error(l, SPDL_E_FORMAT, "has something else than EPOCH:POSITION in 'from='");
}

/* All of a text. */
SPDL__COLD spdl_result spdl__state_read(spdl__state_loads *l, spdl__position *at) {
    const uint64_t items = UINT64_MAX >> SPDL__SPAN_BITS, any = SPDL__NEVER - 1;
    const struct {
        const char *name;
        uint64_t most, *number;
    } fields[] = { { "epoch", items, &at->epoch },     { "item", items, &at->source },
                   { "results", any, &at->results },   { "batch", items, &at->number },
                   { "drops", any, &at->drops },       { "delivered", any, &at->delivered } };
    const spdl_pipeline *p = l->p;
    size_t i;
    spdl_result result = spdl__state_check(l);
    if (result == SPDL_OK)
        result = spdl__state_same(l, "table", 16, p->table, "a pipeline with other rows");
    if (result == SPDL_OK)
        result = spdl__state_same(l, "item_seed", 10, p->seed, "a run with another seed");
    if (result == SPDL_OK)
        result = spdl__state_same(l, "data", 10, p->data_hash, "another data set");
    for (i = 0; i < sizeof(fields) / sizeof(fields[0]) && result == SPDL_OK; ++i)
        result = spdl__state_number(l, fields[i].name, fields[i].most, fields[i].number);
    return result == SPDL_OK && p->sampler != NULL ? spdl__state_sampler(l) : result;
}

/* --- ranks --- */

/* Which rank of how many has written the text at hand. */
SPDL__COLD spdl_result spdl__state_rank(const spdl__state_loads *l, spdl_ranks *of) {
    const char *at = spdl__text_field(l->texts[l->at], "rank");
    uint64_t rank, world;
    const spdl_result result = spdl__state_check(l);
    if (result != SPDL_OK) return result;
    if (at == NULL || !spdl__text_pair(at, '/', &rank, &world) || world > INT32_MAX ||
        rank >= world)
        return spdl__state_error(l, SPDL_E_FORMAT, "does not say of which rank it is");
    of->rank = (int)rank;
    of->world = (int)world;
    return SPDL_OK;
}

/* Whether the texts are of all ranks of a run, each once, or the only one is ours. *own: the one
   that is ours, or -1: the numbers of ranks differ. */
SPDL__COLD spdl_result spdl__state_pick(spdl__state_loads *l, bool *there, int *own) {
    const spdl_ranks ours = l->sampler.desc.ranks;
    spdl_ranks of = { 0, 0 };
    *own = -1;
    for (l->at = 0; l->at < l->count; ++l->at) {
        const spdl_result result = spdl__state_rank(l, &of);
        if (result != SPDL_OK) return result;
        if (of.world == ours.world && of.rank == ours.rank) *own = l->at;
        if (l->count == 1 && *own == 0) return SPDL_OK;
        if (of.world != l->count)
            return spdl__state_error(l, SPDL_E_INVALID, "is of rank %d of %d, this is rank %d of "
                                     "%d: that takes the texts of all %d, not of %d", of.rank,
                                     of.world, ours.rank, ours.world, of.world, l->count);
        if (there[of.rank])
            return spdl__state_error(l, SPDL_E_INVALID, "is the second one of rank %d", of.rank);
        there[of.rank] = true;
    }
    return SPDL_OK;
}

/* The texts of all ranks of a run that had another number of them: all are level, or at the end of
   their epoch. What remains begins at one position. */
SPDL__COLD spdl_result spdl__state_join(spdl__state_loads *l, spdl__position *at) {
    const spdl_ranks ours = l->sampler.desc.ranks;
    const uint64_t world = (uint64_t)l->count, now = (uint64_t)ours.world;
    uint64_t from_epoch = 0, from = 0;
    spdl__position all, one;
    bool level = true, over = true;
    memset(&all, 0, sizeof(all));
    for (l->at = 0; l->at < l->count; ++l->at) {
        spdl_result result = spdl__state_read(l, &one);
        if (result != SPDL_OK) return result;
        (void)spdl__state_rank(l, &l->sampler.desc.ranks);
        if (l->at == 0) {
            all = one;
            from_epoch = l->sampler.from_epoch;
            from = l->sampler.from;
        } else if (one.epoch != all.epoch || from != l->sampler.from ||
                   from_epoch != l->sampler.from_epoch) {
            return spdl__state_error(l, SPDL_E_INVALID, "was not saved in the same epoch as text "
                                                        "0, or not by the same run");
        }
        level = level && one.source == all.source && (one.results | one.drops) == 0;
        over = over && one.source >= spdl_sampler_count(&l->sampler, one.epoch) &&
               (one.results | one.drops) == 0;
    }
    l->at = 0;
    if (!level && !over)
        return spdl__state_error(l, SPDL_E_UNSUPPORTED, "and the others are of %d ranks that had "
                                 "not taken the same number of whole items: another number of "
                                 "ranks goes on from where they had, or from the end of an epoch",
                                 l->count);
    memset(at, 0, sizeof(*at));
    at->epoch = all.epoch;
    at->number = all.number * world / now;
    at->delivered = all.delivered * world / now;
    l->sampler.desc.ranks = ours;
    l->sampler.from = spdl__sampler_first(&l->sampler, at->epoch);
    l->sampler.from_epoch = at->epoch;
    l->sampler.from = over || all.source > (l->sampler.length - l->sampler.from) / world
                          ? l->sampler.length
                          : l->sampler.from + all.source * world;
    return SPDL_OK;
}

/* Where the run is to begin. */
SPDL__COLD spdl_result spdl__state_start(spdl__state_loads *l, spdl__position *at) {
    const spdl_allocator *heap = &l->p->allocator;
    bool *there;
    int own = 0;
    spdl_result result;
    if (l->p->sampler == NULL)
        return l->count == 1 ? spdl__state_read(l, at)
                             : spdl__state_error(l, SPDL_E_INVALID, "is one of %d, but only a "
                                                 "pipeline whose source is SPDL_INDEX can go on "
                                                 "with several", l->count);
    l->sampler.desc = l->p->sampler->desc; /* what does not change while it is at work */
    l->sampler.length = l->p->sampler->length;
    there = (bool *)spdl__alloc_zeroed(heap, (size_t)l->count, sizeof(*there), 1);
    if (there == NULL)
        return spdl__error_set(l->error, SPDL_E_NOMEM, "spdl_state_load: no memory");
    result = spdl__state_pick(l, there, &own);
    spdl__free(heap, there, (size_t)l->count * sizeof(*there));
    if (result != SPDL_OK) return result;
    l->at = own >= 0 ? own : 0;
    return own >= 0 ? spdl__state_read(l, at) : spdl__state_join(l, at);
}

/* The run begins: nothing asks the sampler now. */
SPDL__PRIVATE void spdl__state_edit(spdl_sampler *sampler, const spdl_sampler *from) {
    sampler->from_epoch = from != NULL ? from->from_epoch : 0;
    sampler->from = from != NULL ? from->from : 0;
}

SPDL_API spdl_result spdl_state_load(spdl_pipeline *p, const char *const *texts, int count,
                                     int64_t timeout_ns, spdl_error *error) {
    const uint64_t deadline = spdl__deadline(timeout_ns);
    const char *why;
    spdl__state_loads l;
    spdl__start start;
    spdl_result result;
    int i = 0;
    memset(&l, 0, sizeof(l));
    memset(&start, 0, sizeof(start));
    while (p != NULL && texts != NULL && i < count && texts[i] != NULL) ++i;
    if (i == 0 || i < count)
        return spdl__error_set(error, SPDL_E_INVALID,
                               "spdl_state_load: no pipeline, or text %d is not there", i);
    why = p->unsaved;
    if (why != NULL)
        return spdl__error_set(error, SPDL_E_UNSUPPORTED,
                               "spdl_state_load: this pipeline has no position: %s", why);
    l.p = p;
    l.texts = texts;
    l.count = count;
    l.error = error;
    result = spdl__state_start(&l, &start.at);
    if (result != SPDL_OK) return result;
    start.loads = true;
    if (p->sampler != NULL) start.sampler = &l.sampler;
    result = spdl__pipeline_go(p, &start, deadline);
    if (result == SPDL_OK) return SPDL_OK;
    why = result == SPDL_TIMEOUT     ? "calls still run: the pipeline is stopped"
          : spdl__load32(&p->failed) ? spdl_pipeline_error(p)->text
                                     : "not in a stage, beside next or push, or after a fork";
    return spdl__error_set(error, result, "spdl_state_load: %s", why);
}

/* --- random numbers --- */

SPDL_API uint64_t spdl_item_key(const spdl_task *task) {
    const spdl_pipeline *p = task->pipeline;
    const spdl_sampler *sampler = p->sampler;
    const uint64_t epoch = spdl_epoch(task);
    uint64_t item = task->sequence, key = p->seed, kind = task->flushing ? 3 : 1;
    if (task->node->in_batches && !task->flushing) kind = 2;
    if (sampler != NULL) {
        key += spdl__mix(sampler->desc.seed + 1);
        item = kind == 1 ? spdl__sampler_global(sampler, epoch, item)
                         : item * (uint64_t)sampler->desc.ranks.world +
                               (uint64_t)sampler->desc.ranks.rank;
    }
    key = spdl__mix(spdl__mix(key + 0x9e3779b97f4a7c15u) ^ (epoch * 0x9e3779b97f4a7c15u + kind));
    return spdl__mix(key ^ (item * 0x9e3779b97f4a7c15u + 1));
}

/* ============================================================================================= */
/* >>trace-impl
   The hooks, which run where the pipeline calls them, and the file: create empties it, and destroy
   writes it, when no thread of the pipeline is left. */

/* Tracks of threads: index p->workers is the owner's thread, which is the trainer. */
SPDL__COLD int spdl__tracks(const spdl_pipeline *p) { return p->workers + 1; }

/* The depth is said by the reader that has moved the head; when that has moved on meanwhile, by the
   one that did it. */
SPDL__RARE void spdl__trace_taken(spdl__edge *edge) {
    const uint64_t head = spdl__head(spdl__load(&edge->word)), now = spdl_time_ns();
    uint64_t depth = 0, ticket;
    for (ticket = head; ticket <= head + edge->mask && spdl__edge_ready(edge, ticket); ++ticket)
        depth += spdl__slot_tag(spdl__edge_slot(edge, ticket)) < SPDL__HOLE; /* else no item */
    if (spdl__head(spdl__load(&edge->word)) == head)
        spdl__trace_add(edge->track, SPDL__RECORD_DEPTH, 0, 0, now, now, depth);
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
/* In the rows of a pipeline with a trace: others pay nothing. Open spans end with the call. */
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

/* --- text --- */

/* Text on its way to a file, through a buffer. After a failure no more is written. */
typedef struct spdl__out {
    spdl__os_file file;
    const char *failure; /* the first, or NULL */
    spdl__text text;
} spdl__out;

SPDL__COLD void spdl__out_flush(spdl__out *out) {
    if (out->failure == NULL && out->text.length >= out->text.bytes) out->failure = "too long";
    if (out->failure == NULL)
        out->failure = spdl__os_file_write(out->file, out->text.buffer, out->text.length,
                                           SPDL__NEVER);
    out->text.length = 0;
}

/* In microseconds, with a point whatever the locale. */
SPDL__COLD void spdl__trace_time(spdl__text *text, const char *name, uint64_t ns) {
    spdl__text_add(text, ",\"%s\":%llu.%03u", name, (spdl__llu)(ns / 1000), (unsigned)(ns % 1000));
}

/* The start of an event; `track` is a thread to the viewer. Times are in microseconds. */
SPDL__COLD spdl__text *spdl__trace_event(spdl__out *out, const spdl_pipeline *p, const char *phase,
                                         int track, uint64_t when) {
    if (out->text.length + 1000 >= out->text.bytes) spdl__out_flush(out); /* more than it takes */
    spdl__text_add(&out->text, ",\n{\"ph\":\"%s\",\"pid\":%llu,\"tid\":%d", phase,
                   (spdl__llu)spdl__os_process_id(), track + 1);
    if (when != SPDL__NEVER)
        spdl__trace_time(&out->text, "ts", when - p->start_ns);
    return &out->text;
}

SPDL__COLD void spdl__trace_record(spdl__out *out, const spdl_pipeline *p, int track,
                                   const spdl__record *record) {
    static const char *const phases[] = { "X", "X", "X", "C", "X", "C" };
    static const char *const cats[] = { "task", "batch", "trainer", "", "span", "" };
    const spdl__record_kind kind = (spdl__record_kind)(record->stamp & 0xff);
    const int code = (int)(record->stamp >> 8 & 0xff), edge = track - spdl__tracks(p);
    spdl__text *text = spdl__trace_event(out, p, phases[kind], track,
                                         spdl__max(record->begin, p->start_ns));
    const char *name = kind <= SPDL__RECORD_BATCH   ? p->node[code].name
                       : kind == SPDL__RECORD_NEXT  ? "next waits"
                       : kind == SPDL__RECORD_DEPTH ? p->node[edge].name
                                                    : (const char *)(uintptr_t)record->number;
    char start[101]; /* there is room for so much of a user's */
    spdl__cell cell;
    double value;
    (void)snprintf(start, sizeof(start), "%s", name != NULL ? name : "");
    if (*phases[kind] == 'X')
        spdl__trace_time(text, "dur", spdl__grown(record->begin, record->end));
    if (*cats[kind] != '\0') spdl__text_add(text, ",\"cat\":\"%s\"", cats[kind]);
    spdl__text_add(text, ",\"name\":\"");
    if (kind == SPDL__RECORD_DEPTH) spdl__text_add(text, "edge %d depth, after ", edge);
    spdl__json_escape(text, start);
    if (kind <= SPDL__RECORD_NEXT) {
        spdl__text_add(text, "\",\"args\":{\"item\":%llu,\"stage\":%d,\"result\":\"%s\"}}",
                       (spdl__llu)record->number, code,
                       spdl_result_text((spdl_result)(int16_t)(uint16_t)(record->stamp >> 16)));
    } else if (kind == SPDL__RECORD_DEPTH) {
        spdl__text_add(text, "\",\"args\":{\"items\":%llu}}", (spdl__llu)record->number);
    } else if (kind == SPDL__RECORD_VALUE) {
        memcpy(&value, &record->end, sizeof(value));
        spdl__text_add(text, "\",\"args\":{\"value\":%s}}", spdl__json_double(&cell, value));
    } else {
        spdl__text_add(text, "\"}");
    }
}

/* By time, what is around the others first. */
SPDL__COLD int spdl__record_compare(const void *a, const void *b) {
    const spdl__record *x = (const spdl__record *)a, *y = (const spdl__record *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return (x->end < y->end) - (x->end > y->end);
}

/* The events of a track that are there. */
SPDL__COLD uint64_t spdl__track_kept(const spdl__track *track) {
    return spdl__min(track->count, track->mask + 1);
}

/* Writes all that is there, track by track; the viewer shows them in the order of their names here.
   NULL, or what went wrong. */
SPDL__COLD const char *spdl__trace_print(const spdl_pipeline *p, uint64_t kept, uint64_t dropped) {
    char buffer[8192];
    spdl__out out = { SPDL__NO_FILE, NULL, spdl__text_start(buffer, sizeof(buffer)) };
    spdl__text *text = &out.text;
    uint64_t i;
    int track;
    out.failure = spdl__os_file_open(&out.file, p->trace->path, SPDL__OS_REPLACE, NULL);
    spdl__text_add(text,
                   "{\"otherData\":{\"spdl\":\"%s\",\"events\":%llu,"
                   "\"dropped_events\":%llu},\n\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n"
                   "{\"ph\":\"M\",\"pid\":%llu,\"tid\":0,\"name\":\"process_name\",\"args\":"
                   "{\"name\":\"spdl ", spdl_version(), (spdl__llu)kept,
                   (spdl__llu)dropped, (spdl__llu)spdl__os_process_id());
    spdl__json_escape(text, p->trace->name);
    spdl__text_add(text, "\"}}");
    for (track = 0; track < p->trace->tracks && out.failure == NULL; ++track) {
        spdl__track *t = &p->trace->track[track];
        if (track < spdl__tracks(p)) { /* edges are counters */
            (void)spdl__trace_event(&out, p, "M", track, SPDL__NEVER);
            spdl__text_add(text, ",\"name\":\"thread_sort_index\",\"args\":{\"sort_index\":%d}}",
                           track);
            (void)spdl__trace_event(&out, p, "M", track, SPDL__NEVER);
            spdl__text_add(text, ",\"name\":\"thread_name\",\"args\":{\"name\":\"");
            spdl__json_escape(text, track < p->workers ? p->trace->name : "consumer");
            if (track < p->workers) spdl__text_add(text, "-%d", track);
            spdl__text_add(text, "\"}}");
        }
        qsort(t->records, (size_t)spdl__track_kept(t), sizeof(*t->records), spdl__record_compare);
        for (i = 0; i < spdl__track_kept(t) && out.failure == NULL; ++i)
            spdl__trace_record(&out, p, track, &t->records[i]);
    }
    spdl__text_add(text, "\n]}\n");
    spdl__out_flush(&out);
    (void)spdl__os_file_close(out.file);
    return out.failure;
}

/* Writes the file and reports how it went. No thread adds events any more. */
SPDL__COLD void spdl__trace_save(const spdl_pipeline *p) {
    const char *path = p->trace->path, *failure;
    uint64_t kept = 0, dropped = 0;
    int i;
    for (i = 0; i < p->trace->tracks; ++i) {
        kept += spdl__track_kept(&p->trace->track[i]);
        dropped += p->trace->track[i].count - spdl__track_kept(&p->trace->track[i]);
    }
    failure = spdl__trace_print(p, kept, dropped);
    if (failure != NULL)
        spdl__logf(&p->logger, SPDL_LOG_WARN, "trace '%s': %s", path, failure);
    else if (dropped > 0)
        spdl__logf(&p->logger, SPDL_LOG_WARN,
                   "trace '%s': the latest %llu events are there, %llu were dropped "
                   "(trace_events, or SPDL_TRACE=FILE,events=N, keeps more)",
                   path, (spdl__llu)kept, (spdl__llu)dropped);
    else
        spdl__logf(&p->logger, SPDL_LOG_INFO, "trace '%s': %llu events", path,
                   (spdl__llu)kept);
}

/* --- create and destroy --- */

/* Room for `events` events of each track; false when there is no memory. */
SPDL__COLD bool spdl__trace_build(spdl_pipeline *p, uint64_t events) {
    const int tracks = spdl__tracks(p) + p->count;
    const size_t records = (size_t)spdl__pow2(events);
    const size_t lane_bytes = sizeof(spdl__track) + records * sizeof(spdl__record);
    const size_t bytes = sizeof(spdl__trace) + (size_t)tracks * lane_bytes;
    spdl__trace *trace = (spdl__trace *)spdl__alloc_zeroed(&p->allocator, 1, bytes, 8);
    int i;
    if (trace == NULL) return false;
    trace->bytes = bytes;
    trace->tracks = tracks;
    trace->track = (spdl__track *)(trace + 1);
    for (i = 0; i < tracks; ++i) {
        trace->track[i].records = (spdl__record *)(trace->track + tracks) + (size_t)i * records;
        trace->track[i].mask = records - 1;
    }
    for (i = 0; i < p->count; ++i) {
        p->node[i].out.track = &trace->track[spdl__tracks(p) + i];
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
    spdl__free(&p->allocator, trace, trace->bytes);
}

/* "%p" in a name stands for the number of the process. False when it does not fit. */
SPDL__COLD bool spdl__trace_path(char to[SPDL__PATH_BYTES], const char *from) {
    const char *mark = strstr(from, "%p");
    const int before = mark != NULL ? (int)(mark - from) : (int)strlen(from);
    char number[24] = "";
    if (mark != NULL)
        (void)snprintf(number, sizeof(number), "%llu", (spdl__llu)spdl__os_process_id());
    return snprintf(to, SPDL__PATH_BYTES, "%.*s%s%s", before, from, number,
                    mark != NULL ? mark + 2 : "") < SPDL__PATH_BYTES;
}

/* Takes ",events=N" off the value of SPDL_TRACE. */
SPDL__COLD void spdl__trace_option(const spdl_logger *logger, char *value, uint64_t *events) {
    char *option = strstr(value, ",events=");
    uint64_t number;
    if (option == NULL) return;
    if (spdl__text_number(option + strlen(",events="), 10, "", &number) != NULL && number > 0 &&
        number <= SPDL__TRACE_EVENTS_MAX)
        *events = number;
    else
        spdl__logf(logger, SPDL_LOG_WARN,
                   "SPDL_TRACE: '%s' is not events=1 to %d; %llu are kept", option + 1,
                   SPDL__TRACE_EVENTS_MAX, (spdl__llu)*events);
    if (option == value)
        spdl__logf(logger, SPDL_LOG_WARN, "SPDL_TRACE: there is no file in front of '%s'",
                   value);
    *option = '\0';
}

/* Whatever is wrong is a warning: the pipeline runs as it would without a trace. */
SPDL__COLD void spdl__trace_open(spdl_pipeline *p, const spdl_pipeline_desc *desc) {
    const char *value = desc->trace != NULL ? desc->trace : spdl__os_environment("SPDL_TRACE");
    const char *name = desc->pool != NULL ? desc->pool->name : desc->name, *failure = NULL;
    uint64_t events = desc->trace_events > 0 ? (uint64_t)desc->trace_events : SPDL__TRACE_EVENTS;
    spdl__os_file file = SPDL__NO_FILE;
    char path[SPDL__PATH_BYTES];
    if (!spdl__path_copy(path, value, "trace", &p->logger)) return;
    if (desc->trace == NULL) spdl__trace_option(&p->logger, path, &events);
    if (path[0] == '\0') return;
    if (!spdl__trace_build(p, events)) {
        failure = "out of memory";
    } else {
        spdl__name_copy(p->trace->name, name != NULL ? name : "spdl");
        if (!spdl__trace_path(p->trace->path, path))
            failure = "the name is too long";
        else /* destroy opens it again: others may have written it by then */
            failure = spdl__os_file_open(&file, p->trace->path, SPDL__OS_REPLACE, NULL);
        (void)spdl__os_file_close(file);
    }
    if (failure == NULL) return;
    spdl__logf(&p->logger, SPDL_LOG_WARN, "trace '%s': %s; there will be none", path,
               failure);
    spdl__trace_free(p);
}

SPDL__COLD void spdl__trace_close(spdl_pipeline *p) {
    spdl__track *consumer = p->trace != NULL ? &p->trace->track[p->workers] : NULL;
    while (consumer != NULL && consumer->spans > 0) spdl__span_end(consumer, spdl_time_ns());
    if (consumer != NULL && p->start_ns != 0) spdl__trace_save(p);
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
