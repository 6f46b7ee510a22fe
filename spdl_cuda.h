/* spdl_cuda.h - v0.1.0 - CUDA companion of spdl.h - SPDX-License-Identifier: MIT

   DO THIS: in exactly one C, C++ or .cu file of your program,

       #define SPDL_IMPLEMENTATION
       #include "spdl.h"
       #define SPDL_CUDA_IMPLEMENTATION
       #include "spdl_cuda.h"

   There is nothing to link with (but -ldl before glibc 2.34), and no CUDA header or nvcc is needed:
   the functions are those of the driver, libcuda.so.1, which is opened when the first spdl_cuda is
   ($SPDL_LIBCUDA names another file). Streams are those of the CUDA runtime: pass cudaStream_t.
   Without a driver or a device the same program runs on the CPU, and says so once. In front of
   that:

       #define SPDL_CUDA_NONE     no CUDA at all: everything runs on the CPU

   A TRAINING LOOP

       while (spdl_cuda_next(it, stream, &batch, SPDL_FOREVER) == SPDL_OK)
           train<<<grid, block, 0, stream>>>((const float *)batch.dev);

   AN ANSWER FOR EACH BATCH: a row of the pipeline that launches kernels

       SPDL_SOURCE(load, .ctx = cuda, .free_item = spdl_cuda_host_free),
       SPDL_CUDA_STAGE(cuda, launch),
       SPDL_SINK(3)                       each item is an spdl_cuda_output: see out->host

   No copy by the CPU, no allocation, no pinning, no wait but for data: batches lie in pinned slots
   (or in the loader's arena), go over the bus by one copy each while the last one is worked on, and
   no slot is written while somebody may still read it.

   THE EDGES that every ring of slots must have; here no call can leave one out.
       E1  a host slot is filled again only after the copy out of it has been seen to be done; E4:
           also when it is not pinned
       E2  the stream that reads a batch waits for its copy
       E3  a copy into a device slot waits for everybody who read the batch that was there
       D1  the copy of an output waits for the kernels that write it
       D2  the host reads an output after its copy
       D3  kernels write an output after the last copy out of it
       D4  no copy goes into an output that the host has not freed

   CONTENTS (search for the tag)
       >>probe  >>slots  >>outputs  >>iterator                             declarations
       >>driver-impl  >>probe-impl  >>state-impl  >>memory-impl  >>copy-impl  >>slots-impl
       >>outputs-impl  >>open-impl  >>iterator-impl  >>license             implementation

   WORDS
       host slot     pinned memory for one batch, filled by the loader
       device slot   memory of the device for one batch
       output        memory of the device for one result, with pinned memory it is copied to
       arena         memory of the caller that is pinned where it is (spdl_cuda_adopt)
       copy stream   a stream of the library; there is one for each direction
       reader        a stream that a batch was made ready on and that is not done with it
       lost          a CUDA error that no call can clear; only a new process helps

   THREADS
       Any thread may fill and send slots. A process that forks may not use an open spdl_cuda in the
       child: every call there returns SPDL_E_CUDA_FORKED and touches nothing. (Memory of the caller
       that is pinned should be mapped MAP_SHARED if the process forks: before Linux 5.9 a fork
       moves private pages away from under the device.)
       Calls are made on the device of the spdl_cuda and on no other, whichever is current for the
       thread, and that stays what it is. Errors of earlier CUDA calls of the caller stay where they
       are. Captures of CUDA graphs on other threads and streams are not disturbed; a stream that is
       being captured is refused.

   STREAMS are any of the same device: 0 and cudaStreamLegacy (where the file of the implementation
       has CUDA_API_PER_THREAD_DEFAULT_STREAM 0 is the next), cudaStreamPerThread, which is known
       only to the thread that made a batch ready on it, or one that was made. The first three are
       those of the device of the spdl_cuda: it has to be current where kernels are put on them.
       They must outlive the batches made ready on them. The library has no callbacks on streams.

   LIMITS
       Linux. 16 arrays in a batch, 8 dimensions, 4 readers at a time, 4096 slots of each kind. On a
       device the library was not run yet; the tests run it on a stand-in of the CUDA driver.

   License (MIT) at the end of the file. */

#ifndef SPDL_CUDA_H_INCLUDED
#define SPDL_CUDA_H_INCLUDED

#ifndef SPDL_H_INCLUDED
#error "include spdl.h before spdl_cuda.h"
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define SPDL_CUDA_MAX_DEVICES 16
#define SPDL_CUDA_MAX_ARRAYS 16
#define SPDL_CUDA_MAX_DIMS 8
#define SPDL_CUDA_MAX_READERS 4
#define SPDL_CUDA_MAX_SLOTS 4096
#define SPDL_CUDA_ALIGN 256 /* bytes: where arrays of a batch begin */

typedef void *spdl_cuda_stream; /* a cudaStream_t */

/* ============================================================================================= */
/* >>probe */

typedef struct spdl_cuda_device {
    char name[64];
    int major, minor;      /* compute capability */
    uint64_t memory_bytes; /* of the device, in all */
} spdl_cuda_device;

typedef struct spdl_cuda_info {
    int device_count;    /* that can be used; the first SPDL_CUDA_MAX_DEVICES are described */
    int driver_version;  /* the CUDA version the driver supports, 12040 for 12.4; 0: no driver */
    char reason[160];    /* why there is no device; empty when there is one */
    spdl_cuda_device device[SPDL_CUDA_MAX_DEVICES];
} spdl_cuda_info;

/* Says which CUDA devices there are, or why there is none: no driver, one that is too old, no
   device, or what the driver says. Never fails; makes no context.
   Returns: nothing; *info is filled in whatever happens.
   Threads: any.
   Blocks:  while the driver starts, the first time.
   Owns:    nothing. */
SPDL_API void spdl_cuda_probe(spdl_cuda_info *info);

/* ============================================================================================= */
/* >>slots
   Level 1. A host slot goes round: spdl_cuda_host_get (in a stage: spdl_cuda_host_take),
   the filling of its arrays, spdl_cuda_send; when its copy is done it is free again (E1). A device
   slot goes round too: spdl_cuda_send, spdl_cuda_ready on each stream that reads it (E2), the
   kernels, spdl_cuda_done on the same streams; the next copy into it waits on the device for all of
   them (E3). Any other order is refused with SPDL_E_INVALID, and nothing happens: also for a batch
   that was done with, until its slot has held two others.

   send, ready and done put work on streams and never wait for the device. Where waiting is meant it
   has a timeout: for a free host slot (copies are not done yet: the bus) and for a free device slot
   (batches are not done with yet: the trainer). When such a wait has lasted 1 s, and the trainer
   does not do something else meanwhile, a warning says once who has the slots. */

typedef struct spdl_cuda spdl_cuda; /* slots on one device */

typedef enum spdl_cuda_backend {
    SPDL_CUDA_AUTO, /* a device, or the CPU where there is none */
    SPDL_CUDA_GPU,  /* a device, or an error */
    SPDL_CUDA_CPU   /* the CPU: device memory is host memory, nothing is copied */
} spdl_cuda_backend;

/* An array in a batch. Types are NumPy's: "u1", "<f4", "i8"; the digits are the bytes of one
   element. */
typedef struct spdl_cuda_array {
    char name[SPDL_NAME_BYTES];
    char type[8];
    int ndim;
    uint64_t shape[SPDL_CUDA_MAX_DIMS];
    size_t offset, bytes; /* inside the batch; a multiple of SPDL_CUDA_ALIGN */
} spdl_cuda_array;

#define SPDL_CUDA_ORDINAL(n) ((n) + 1) /* of spdl_cuda_desc.device: the n-th device, from 0 */
#define SPDL_CUDA_LOCAL_RANK (-1) /* $LOCAL_RANK, $OMPI_COMM_WORLD_LOCAL_RANK or $SLURM_LOCALID,
                                     modulo the number of devices */

typedef struct spdl_cuda_desc {
    spdl_cuda_array array[SPDL_CUDA_MAX_ARRAYS]; /* what each batch has: host slots come with these
                                                    arrays, up to the first without a type (offset
                                                    and bytes need not be filled in); or none */
    size_t slot_bytes;  /* the largest batch, arrays rounded up; 0: what `array` needs */
    int device;         /* 0: that of the calling thread, whose context has to exist (of the runtime
                           since CUDA 12 cudaSetDevice makes it); or one of the above */
    spdl_cuda_backend backend;
    int host_slots;     /* default 4; -1: none, everything comes out of arenas */
    int device_slots;   /* default 3 */
    void *device_memory; /* yours for them; for each slot_bytes, rounded up to SPDL_CUDA_ALIGN */
    size_t output_bytes; /* of the largest output; 0: there are none */
    int output_slots;   /* default 4 when there are outputs */
    bool keep_host;     /* batches keep their host slot until they are done with: batch.host */
    bool must_pin;      /* fail rather than go on with memory that cannot be pinned */
    bool time_copies;   /* fill copy_us of the statistics: 2 more CUDA calls a batch */
    void *context;      /* yours: batch.context */
    spdl_allocator allocator;
    spdl_logger logger;
    spdl_error *error;  /* optional: says why open failed */
} spdl_cuda_desc;

/* A host slot that is being filled. Only `user`, and shape[0] of an array whose last rows are not
   there, may be changed; they go with the batch. */
typedef struct spdl_cuda_host {
    void *data;
    size_t capacity; /* bytes in data */
    size_t bytes;    /* used by the arrays so far */
    int array_count;
    spdl_cuda_array array[SPDL_CUDA_MAX_ARRAYS];
    void *user;
    spdl_cuda *cuda;
} spdl_cuda_host;

/* A batch on the device. `array` is valid until the batch is done with. */
typedef struct spdl_cuda_batch {
    void *dev; /* device memory; on the CPU backend the host's */
    const void *host; /* with keep_host, or on the CPU backend: the same on the host; else NULL */
    size_t bytes;
    int slot;  /* of the device, from 0: always the same `dev`, as for a CUDA graph for each */
    int array_count;
    const spdl_cuda_array *array;
    uint64_t sequence; /* of its copy, from 0 */
    void *user;    /* of the host slot or view */
    void *context; /* of the desc */
    spdl_cuda *cuda;
    void *slot_;      /* private */
    uint64_t ticket_; /* private: a batch that is done with is recognised */
} spdl_cuda_batch;

/* A batch that already lies somewhere: in an arena (then the device reads it there) or anywhere
   else (then it is copied to a host slot). release(item) is called once it has been read. */
typedef struct spdl_cuda_view {
    const void *data;
    size_t bytes;
    int array_count; /* 0: those of the desc, if they fit; if there is only one, its rows (shape[0])
                        are those that are there, as in the last batch of an epoch */
    const spdl_cuda_array *array; /* copied */
    void *user;
    spdl_free_fn release; /* optional; on any thread that uses the spdl_cuda; must not wait */
    void *item;
} spdl_cuda_view;

typedef struct spdl_cuda_stats {
    bool on_cpu;
    bool lost;
    int device;
    int numa_node;               /* the slots were asked for there; -1: anywhere */
    int host_slots, host_free;
    int device_slots, device_free;
    int output_slots, output_free;
    size_t requested_bytes;      /* of host slots, and of the host's side of outputs */
    size_t pinned_bytes;         /* for them; 0 when they could not be pinned */
    size_t adopted_bytes;        /* arenas that are pinned */
    uint64_t batches, bytes;     /* sent */
    uint64_t outputs;            /* sent back */
    uint64_t copied_bytes;       /* of what was sent: copied by the CPU first */
    uint64_t cuda_calls;         /* that reach a device since open: copies, events and waits */
    uint64_t cuda_checks;        /* that only look at, or set, the thread's own state */
    uint64_t wait_source_ns;     /* iterator: for the source */
    uint64_t wait_bus_ns;        /* for copies, to have a host slot, while the device had no work */
    uint64_t wait_device_ns;     /* for batches to be done with, by the caller or by kernels */
    uint64_t wait_next_ns;       /* iterator: the trainer in spdl_cuda_next, all causes */
    uint64_t trace_error_ns;     /* how far off copies in a trace may be (spdl_cuda_trace) */
    uint64_t copy_us[32];        /* copies that took [2^k, 2^(k+1)) us; [0]: less than 2 */
} spdl_cuda_stats;

/* Makes the slots, and with them everything that will ever be used: pinned memory (mapped, on huge
   pages where there are any, on the device's NUMA node, faulted in by several threads, registered
   in pieces of at most 1 GiB that end on slot borders), device memory, events, streams. Where
   memory cannot be pinned it goes on without, and says so. AUTO without any device goes on with the
   CPU, and says so. Which device it is, and why, is logged as SPDL_LOG_INFO.
   Returns: SPDL_OK, SPDL_E_INVALID (a field), SPDL_E_NOT_FOUND (no device, or not that one),
            SPDL_E_NOMEM (of host or device), SPDL_E_THREAD, SPDL_E_CUDA, SPDL_E_CUDA_LOST.
   Threads: any.
   Blocks:  while the driver starts and memory is pinned.
   Owns:    the caller closes *cuda; on failure *cuda is NULL and nothing is left. */
SPDL_API spdl_result spdl_cuda_open(spdl_cuda **cuda, const spdl_cuda_desc *desc);

/* Waits for the copies, releases what was sent, and frees everything; the driver may wait for the
   device when memory of it is freed. When the driver is already unloading (at exit) or the process
   has forked, CUDA is left alone, silently.
   Returns: nothing; NULL is allowed.
   Threads: owner; its iterator must be closed, and pipelines that use it destroyed; no other call
            on it may be running.
   Blocks:  until copies are done, and readers that were recorded.
   Owns:    slots, batches and outputs of it end. */
SPDL_API void spdl_cuda_close(spdl_cuda *cuda);

/* Pins memory of the caller where it is, as the arena of a loader process (spdl_loader_arena):
   `bytes` from `base` (at a page border), cut in slots of slot_bytes (the last may be shorter). A
   mapping that may only be read will do. Batches that lie in one slot of it are read there by the
   device. Several spdl_cuda of a process may adopt the same memory, and in any order let it go. If
   it cannot be pinned, batches are copied to host slots instead, and the log says so, unless
   must_pin is set.
   Returns: SPDL_OK, SPDL_E_INVALID (also: a part of it is pinned already, the rest is not, or it is
            adopted in slots of another size), SPDL_E_NOMEM, SPDL_E_CUDA (must_pin),
            SPDL_E_CUDA_LOST, SPDL_E_CUDA_FORKED.
   Threads: any.
   Blocks:  while memory is pinned.
   Owns:    the caller; it must stay mapped until spdl_cuda_disown or spdl_cuda_close. */
SPDL_API spdl_result spdl_cuda_adopt(spdl_cuda *cuda, void *base, size_t bytes, size_t slot_bytes);

/* Lets go of an arena, once all copies have been made; batches out of it have been released then
   (with keep_host, and on the CPU backend, those that were done with).
   Returns: SPDL_OK, SPDL_E_NOT_FOUND (no arena begins there), SPDL_E_CUDA, SPDL_E_CUDA_LOST,
            SPDL_E_CUDA_FORKED.
   Threads: any; nothing may be sent out of that arena meanwhile.
   Blocks:  until the copies that were sent are done.
   Owns:    the arena is the caller's alone. */
SPDL_API spdl_result spdl_cuda_disown(spdl_cuda *cuda, void *base);

/* An allocator for spdl_pipeline_desc: what has at least half of slot_bytes, as the batches of
   SPDL_BATCH(n, .item_bytes = ...) and buffers, is pinned, so that the device reads it where it is
   (see spdl_cuda_view_batch); the rest comes from the desc's allocator.
   Returns: the allocator.
   Threads: any.
   Blocks:  its alloc_fn while memory is pinned.
   Owns:    nothing; the spdl_cuda must outlive the last batch. */
SPDL_API spdl_allocator spdl_cuda_slots(spdl_cuda *cuda);

/* A free host slot, to be filled. Waiting for one is the back-pressure: it comes when a copy is
   done. While an iterator is open this makes no CUDA calls: the iterator sees to it.
   Returns: SPDL_OK, SPDL_TIMEOUT, SPDL_E_INVALID (there are no host slots), SPDL_E_CUDA,
            SPDL_E_CUDA_LOST, SPDL_E_CUDA_FORKED.
   Threads: any.
   Blocks:  until a slot is free, or up to timeout_ns.
   Owns:    the caller has *host until it is sent or freed. */
SPDL_API spdl_result spdl_cuda_host_get(spdl_cuda *cuda, spdl_cuda_host **host, int64_t timeout_ns);

/* The same in a stage. In a row with input order the calls get their slots in that order, so that
   one slot is enough whatever the concurrency; of two such rows only if other slots are not
   needed. It gives up when the pipeline is stopped. A failure has been recorded with spdl_fail.
   Returns: SPDL_OK, SPDL_SKIP (the pipeline is being stopped), or an error as spdl_cuda_host_get:
            what the stage then returns.
   Threads: a stage.
   Blocks:  until a slot is free. The worker can do nothing else meanwhile, so if it is the only one
            and there are rows after this one, give this one .threads = 1.
   Owns:    the caller has *host until it is handed on, sent or freed. */
SPDL_API spdl_result spdl_cuda_host_take(spdl_task *task, spdl_cuda *cuda, spdl_cuda_host **host);

/* Adds an array to a slot and hands out where to write it: C order, aligned to 256 bytes.
   Returns: SPDL_OK, SPDL_E_LIMIT (the slot is full, or has 16 arrays), SPDL_E_INVALID (type, shape,
            or the slot is not being filled), SPDL_E_CUDA_FORKED.
   Threads: whoever has the slot.
   Blocks:  never.
   Owns:    *data is part of the slot. */
SPDL_API spdl_result spdl_cuda_host_add(spdl_cuda_host *host, const char *name, const char *type,
                                        int ndim, const uint64_t *shape, void **data);

/* Where array i of a slot is to be written.
   Returns: NULL when there is none.
   Threads: whoever has the slot.
   Blocks:  never.
   Owns:    part of the slot. */
SPDL_API void *spdl_cuda_host_at(const spdl_cuda_host *host, int i);

/* Gives back a slot that was not sent.
   Returns: nothing; NULL and a slot that was sent are ignored, as long as nobody else has got that
            slot: a pointer is not kept. Fits free_item.
   Threads: whoever has the slot.
   Blocks:  never.
   Owns:    the slot is the library's. */
SPDL_API void spdl_cuda_host_free(void *host);

/* Sends a slot to the device by one copy on the copy stream, and takes it. It waits for a device
   slot, and never for the device.
   Returns: SPDL_OK, SPDL_TIMEOUT (no device slot), SPDL_E_INVALID (the slot is not being filled, or
            an iterator is open), SPDL_E_CUDA, SPDL_E_CUDA_LOST, SPDL_E_CUDA_FORKED.
   Threads: whoever has the slot.
   Blocks:  until a device slot is free, or up to timeout_ns.
   Owns:    after SPDL_OK the slot is the library's, and the caller has *batch until it is done
            with; otherwise the caller still has the slot. */
SPDL_API spdl_result spdl_cuda_send(spdl_cuda_host *host, spdl_cuda_batch *batch,
                                    int64_t timeout_ns);

/* Sends what lies in an arena, without a copy by the CPU; from elsewhere by way of a host slot.
   Returns: as spdl_cuda_send and spdl_cuda_host_get, or SPDL_E_LIMIT (larger than a slot, or too
            many arrays).
   Threads: any.
   Blocks:  until a device slot (and, outside of arenas, a host slot) is free, or up to timeout_ns.
   Owns:    after SPDL_OK release(item) will be called once, when the memory has been read: at once,
            in a call that finds no free slot, in spdl_cuda_reap or spdl_cuda_close. Otherwise it
            stays the caller's. */
SPDL_API spdl_result spdl_cuda_send_view(spdl_cuda *cuda, const spdl_cuda_view *view,
                                         spdl_cuda_batch *batch, int64_t timeout_ns);

/* Gives back what has been read: host slots, and the items of views. spdl_cuda_host_get does so
   when it finds no free slot, and an iterator now and then; this is for a loader that waits for
   items of views to be released. On the CPU backend they are when their batches are done with.
   Returns: SPDL_OK (at least one came back), SPDL_EMPTY (no copy is in flight), SPDL_TIMEOUT,
            SPDL_E_INVALID (an iterator is open, which does that), SPDL_E_CUDA, SPDL_E_CUDA_LOST,
            SPDL_E_CUDA_FORKED.
   Threads: any.
   Blocks:  until a copy is done, or up to timeout_ns.
   Owns:    release(item) is called for items that were read. */
SPDL_API spdl_result spdl_cuda_reap(spdl_cuda *cuda, int64_t timeout_ns);

/* Makes a batch ready on a stream: work put on it from now on sees the data. Up to 4 streams may
   read a batch; each has to be done with it.
   Returns: SPDL_OK, SPDL_E_INVALID (the batch was done with; the stream is being captured, or not
            of this device), SPDL_E_LIMIT (a fifth stream), SPDL_E_CUDA, SPDL_E_CUDA_LOST,
            SPDL_E_CUDA_FORKED.
   Threads: whoever has the batch.
   Blocks:  never.
   Owns:    nothing changes hands. */
SPDL_API spdl_result spdl_cuda_ready(const spdl_cuda_batch *batch, spdl_cuda_stream stream);

/* Whether a batch is there, for those who have no stream that waits for it.
   Returns: SPDL_OK, SPDL_TIMEOUT, SPDL_E_INVALID (the batch was done with), SPDL_E_CUDA,
            SPDL_E_CUDA_LOST, SPDL_E_CUDA_FORKED.
   Threads: whoever has the batch.
   Blocks:  until its copy is done, or up to timeout_ns.
   Owns:    nothing changes hands. */
SPDL_API spdl_result spdl_cuda_arrived(const spdl_cuda_batch *batch, int64_t timeout_ns);

/* Says that the last work that reads the batch has been put on the stream. When all streams it was
   made ready on are done with it, its slot goes back.
   Returns: SPDL_OK, SPDL_E_INVALID (not ready on that stream, or done with before; the stream is
            being captured, or cudaStreamPerThread of another thread), SPDL_E_CUDA,
            SPDL_E_CUDA_LOST, SPDL_E_CUDA_FORKED.
   Threads: whoever has the batch.
   Blocks:  never.
   Owns:    with the last stream the batch is the library's; after a failure it stays the
            caller's, who may try again. */
SPDL_API spdl_result spdl_cuda_done(const spdl_cuda_batch *batch, spdl_cuda_stream stream);

/* Gives back a batch that is not wanted, done with on the streams it was made ready on.
   Returns: nothing; NULL and a batch that was done with are ignored. Fits free_item.
   Threads: whoever has the batch.
   Blocks:  never; if the end of its readers cannot be recorded, until the device is idle.
   Owns:    the batch is the library's. */
SPDL_API void spdl_cuda_batch_free(void *batch);

/* Where array i of the batch lies on the device.
   Returns: NULL when there is none, or the batch was done with.
   Threads: any.
   Blocks:  never.
   Owns:    the batch. */
SPDL_API void *spdl_cuda_at(const spdl_cuda_batch *batch, int i);

/* The same by its name.
   Returns: as spdl_cuda_at.
   Threads: any.
   Blocks:  never.
   Owns:    the batch. */
SPDL_API void *spdl_cuda_batch_array(const spdl_cuda_batch *batch, const char *name);

/* Whether this is the CPU backend.
   Returns: true when `dev` of batches is host memory.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API bool spdl_cuda_on_cpu(const spdl_cuda *cuda);

/* The last failure: a sentence with the call, the device and what CUDA says. Once the device is
   lost it stays what it was at the first failing call.
   Returns: nothing; error->result is SPDL_OK when there was none.
   Threads: any.
   Blocks:  never.
   Owns:    *error is a copy. */
SPDL_API void spdl_cuda_error(spdl_cuda *cuda, spdl_error *error);

/* Copies the statistics as they stand. Of the waits, the largest says what limits: the source (load
   faster), the bus (send less: bytes, not floats), the device (nothing to gain from loading).
   Returns: nothing.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API void spdl_cuda_get_stats(const spdl_cuda *cuda, spdl_cuda_stats *stats);

/* Records copies and launches from here on in the trace of a pipeline, whoever makes them: "copy to
   device", "launch" (of SPDL_CUDA_STAGE) and "copy to host", from when the device began them to
   when it was done, by events. The clock of the device is fitted to that of the trace by what the
   host saw of every copy; trace_error_ns of the statistics, and a line in the log (SPDL_LOG_INFO)
   at the end, say how far off they may be. NULL ends it: it has to, before the pipeline is
   destroyed. What was not seen to be done by the next call of this is left out. It costs 3 CUDA
   calls a copy, and records nothing on the CPU backend. (Not measured on a GPU.)
   Returns: SPDL_OK, SPDL_E_CUDA, SPDL_E_CUDA_LOST, SPDL_E_CUDA_FORKED.
   Threads: any.
   Blocks:  never, except for calls that send meanwhile.
   Owns:    nothing; the pipeline stays alive until the next call, or spdl_cuda_close. */
SPDL_API spdl_result spdl_cuda_trace(spdl_cuda *cuda, const spdl_pipeline *pipeline);

/* SPDL_CUDA_TRANSFER(cuda): a row of a pipeline that takes host slots (spdl_cuda_host) and yields
   batches (spdl_cuda_batch). The row before it has .free_item = spdl_cuda_host_free. The trainer
   calls spdl_cuda_ready and spdl_cuda_done for what it gets. device_slots should be buffer_size of
   the row (2) + that of the sink + 2; with fewer, one worker waits in this stage.
   SPDL_CUDA_STAGE(cuda, launch): see >>outputs. */
/* clang-format off */
#if !defined(__cplusplus) || __cplusplus >= 202002L
#define SPDL_CUDA_TRANSFER(cuda_)                                                                  \
    SPDL__STAGE { .kind = SPDL_KIND_PIPE, .fn = spdl_cuda_transfer(), .file = __FILE__,            \
                  .ctx = (cuda_), .free_item = spdl_cuda_batch_free, .line = __LINE__ }
#define SPDL_CUDA_STAGE(cuda_, launch_)                                                            \
    SPDL__STAGE { .kind = SPDL_KIND_PIPE, .fn = spdl_cuda_stage(cuda_, launch_), .file = __FILE__, \
                  .ctx = (cuda_), .concurrency = spdl_cuda_stage_width(cuda_), .deferred = true,   \
                  .free_item = spdl_cuda_output_free, .line = __LINE__ }
#else
#define SPDL_CUDA_TRANSFER(cuda_)                                                                  \
    spdl__row(SPDL_KIND_PIPE, spdl_cuda_transfer(), __FILE__, __LINE__, 0, 0)                      \
        .with_ctx(cuda_).with_free_item(spdl_cuda_batch_free)
#define SPDL_CUDA_STAGE(cuda_, launch_)                                                            \
    spdl__row(SPDL_KIND_PIPE, spdl_cuda_stage(cuda_, launch_), __FILE__, __LINE__, 0, 0)           \
        .with_ctx(cuda_).with_concurrency(spdl_cuda_stage_width(cuda_)).with_deferred(true)        \
        .with_free_item(spdl_cuda_output_free)
#endif
/* clang-format on */

/* The function of the row that SPDL_CUDA_TRANSFER makes.
   Returns: never NULL.
   Threads: any.
   Blocks:  never.
   Owns:    the library. */
SPDL_API const spdl_function *spdl_cuda_transfer(void);

/* ============================================================================================= */
/* >>outputs
   What comes back. An output is memory of the device, for kernels to write, with pinned memory of
   the same size that it is copied to, by a copy stream of its own. It goes round: get on the stream
   of the kernels (D3), the kernels, send (D1), wait (D2), reading out->host, free (D4). Any other
   order is refused with SPDL_E_INVALID.

   SPDL_CUDA_STAGE(cuda, launch) does all of it in a row: it sends the host slot that comes in, has
   `launch` put kernels that read the batch and write out->dev on a stream of the library, sends the
   output, and hands it on, in the order of its inputs, when it has arrived: out->host is there for
   the rows after it, and the trainer. No worker waits for the device, but one thread of the
   spdl_cuda does. An output keeps `user` of its host slot. There should be as many outputs as
   device slots, and 2 for each row after it, what the sink holds and what the trainer does; with
   fewer a worker waits in this stage. A launch that fails fails its item; when the device is lost
   all do. There is one such row on an spdl_cuda at a time. */

typedef struct spdl_cuda_output {
    void *dev;    /* for kernels to write; on the CPU backend the same memory as host */
    void *host;   /* when it was waited for */
    size_t bytes; /* to be copied: output_bytes; may be set to fewer before it is sent */
    int slot;     /* from 0: always the same `dev` */
    void *user;
    spdl_cuda *cuda;
} spdl_cuda_output;

/* Puts work on the stream; out->bytes may be lowered. With a failure (spdl_fail) it may have put
   some there, and the rest is undone. On the CPU backend it computes; `stream` is NULL. */
typedef spdl_result (*spdl_cuda_launch_fn)(spdl_task *task, const spdl_cuda_batch *batch,
                                           spdl_cuda_output *out, spdl_cuda_stream stream);

/* An output whose last copy is over for what is put on the stream from now on.
   Returns: SPDL_OK, SPDL_TIMEOUT, SPDL_E_INVALID (there are no outputs; the stream is being
            captured, or not of this device), SPDL_E_CUDA, SPDL_E_CUDA_LOST, SPDL_E_CUDA_FORKED.
   Threads: any.
   Blocks:  until one is free, or up to timeout_ns.
   Owns:    the caller frees *out. */
SPDL_API spdl_result spdl_cuda_output_get(spdl_cuda *cuda, spdl_cuda_stream stream,
                                          spdl_cuda_output **out, int64_t timeout_ns);

/* Has the output copied to the host behind the work on the stream it was got on.
   Returns: SPDL_OK, SPDL_E_INVALID (it was sent or freed; bytes is more than output_bytes; the
            stream as in spdl_cuda_done), SPDL_E_CUDA, SPDL_E_CUDA_LOST, SPDL_E_CUDA_FORKED.
   Threads: whoever has the output.
   Blocks:  never.
   Owns:    nothing changes hands. */
SPDL_API spdl_result spdl_cuda_output_send(spdl_cuda_output *out);

/* Waits until out->host is there.
   Returns: SPDL_OK, SPDL_TIMEOUT, SPDL_E_INVALID (it was not sent), SPDL_E_CUDA, SPDL_E_CUDA_LOST,
            SPDL_E_CUDA_FORKED.
   Threads: whoever has the output.
   Blocks:  until it is there, or up to timeout_ns.
   Owns:    nothing changes hands. */
SPDL_API spdl_result spdl_cuda_output_wait(spdl_cuda_output *out, int64_t timeout_ns);

/* Gives the output back, sent and waited for or not.
   Returns: nothing; NULL and an output that was freed are ignored, as long as nobody else has got
            that output: a pointer is not kept. Fits free_item.
   Threads: whoever has the output.
   Blocks:  never; if work on it was put on a stream and it was not sent, as
            spdl_cuda_batch_free.
   Owns:    the output is the library's. */
SPDL_API void spdl_cuda_output_free(void *out);

/* The function of the row that SPDL_CUDA_STAGE makes; its ctx is the spdl_cuda.
   Returns: never NULL. What is wrong (no outputs, no launch function) fails its calls.
   Threads: any; no such row may be running.
   Blocks:  never.
   Owns:    the library. */
SPDL_API const spdl_function *spdl_cuda_stage(spdl_cuda *cuda, spdl_cuda_launch_fn launch);

/* How many launches of SPDL_CUDA_STAGE may be on the device at a time: its concurrency.
   Returns: at least 1.
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API int spdl_cuda_stage_width(const spdl_cuda *cuda);

/* ============================================================================================= */
/* >>iterator
   Level 2: what a training loop uses. It takes items from anything with a next function, sends them
   ahead of time, hands out batches that are ready on the trainer's stream, and is done with the
   last one on that stream when the next is asked for. An item is a host slot, or what `view`
   describes: a batch of the loader that lies in an adopted arena, or a batch in place of a pipeline
   with spdl_cuda_slots, goes to the device without a copy by the CPU. The calls to CUDA are made
   inside spdl_cuda_next, on the trainer's thread; no other thread of the process calls CUDA, so
   none contends with kernel launches. */

/* Describes an item of the source; view->item and view->release are already set. When a call of
   spdl_cuda_next has timed out, the next one has the same item described again. */
typedef spdl_result (*spdl_cuda_view_fn)(void *item, spdl_cuda_view *view);

typedef struct spdl_cuda_iter_desc {
    spdl_next_fn next;       /* spdl_pipeline_next_fn, spdl_cache_next_fn, ... */
    void *source;
    spdl_cuda_view_fn view;  /* NULL: items are spdl_cuda_host, and free_item is not used */
    spdl_free_fn free_item;  /* destroys an item, when its memory has been read */
    int depth;               /* batches sent ahead; default and at most device_slots - 1 */
    spdl_error *error;       /* optional: says why open failed */
} spdl_cuda_iter_desc;

typedef struct spdl_cuda_iter spdl_cuda_iter;

/* What is repeated. */
typedef enum spdl_cuda_hold {
    SPDL_CUDA_HOLD_DEVICE, /* batches on the device: a step costs what its kernels cost */
    SPDL_CUDA_HOLD_HOST    /* batches on the host, copied again: that, or what the bus costs */
} spdl_cuda_hold;

/* The view of a batch in place (SPDL_BATCH with .item_bytes), with free_item = spdl_batch_free.
   Returns: SPDL_OK, SPDL_E_INVALID (not in place).
   Threads: any.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API spdl_result spdl_cuda_view_batch(void *item, spdl_cuda_view *view);

/* Makes an iterator. There is one at a time on an spdl_cuda.
   Returns: SPDL_OK, SPDL_E_INVALID (a field, or there is an iterator already), SPDL_E_NOMEM,
            SPDL_E_CUDA_LOST, SPDL_E_CUDA_FORKED.
   Threads: any.
   Blocks:  never.
   Owns:    the caller closes *iter, and keeps the source. */
SPDL_API spdl_result spdl_cuda_iter_open(spdl_cuda_iter **iter, spdl_cuda *cuda,
                                         const spdl_cuda_iter_desc *desc);

/* Is done with the batch of the last call on the stream of that call, and hands out the next, ready
   on `stream`. SPDL_END comes once for each time the source says so, behind the batches before it,
   and the next call goes on: with the next epoch, if there is one. After an error every later call
   returns it; batches before it are delivered first.
   Returns: SPDL_OK, SPDL_TIMEOUT (nothing is lost), SPDL_END, SPDL_E_INVALID (the stream is being
            captured, or not of this device; the last one was cudaStreamPerThread of another
            thread), SPDL_E_LIMIT (all device slots are held by batches that were not done with: go
            on when one was), what the source or `view` returned, SPDL_E_CUDA, SPDL_E_CUDA_LOST,
            SPDL_E_CUDA_FORKED.
   Threads: one at a time (the trainer).
   Blocks:  until the source has an item, or a copy has freed a slot for the loader to go on; up to
            timeout_ns.
   Owns:    *batch is lent until the next call; do not call spdl_cuda_done for it. */
SPDL_API spdl_result spdl_cuda_next(spdl_cuda_iter *iter, spdl_cuda_stream stream,
                                    spdl_cuda_batch *batch, int64_t timeout_ns);

/* Keeps the next n batches and repeats them, without the source, until it is called with 0; then it
   goes on where it was. What steps gain by that is what loading, or the bus, costs. Kernels must
   not change them.
   Returns: SPDL_OK, SPDL_E_INVALID (n is not 0 to device_slots; or the batches would keep more host
            slots than there are: on the host, with keep_host and on the CPU), SPDL_E_CUDA,
            SPDL_E_CUDA_LOST, SPDL_E_CUDA_FORKED.
   Threads: the trainer.
   Blocks:  never; at the end of SPDL_CUDA_HOLD_HOST until copies are done.
   Owns:    items that are repeated are released at its end, or by spdl_cuda_iter_close. */
SPDL_API spdl_result spdl_cuda_iter_hold(spdl_cuda_iter *iter, int n, spdl_cuda_hold what);

/* Ends the iterator: is done with the last batch, waits for its copies and releases the items. Work
   of others on the device is not waited for.
   Returns: nothing; NULL is allowed.
   Threads: the trainer; no other call on it may be running.
   Blocks:  until copies are done, which wait for the readers of batches before (E3).
   Owns:    its batches end. */
SPDL_API void spdl_cuda_iter_close(spdl_cuda_iter *iter);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* SPDL_CUDA_H_INCLUDED */

/* ============================================================================================= */
/* IMPLEMENTATION                                                                                */
/* ============================================================================================= */

#if defined(SPDL_CUDA_IMPLEMENTATION) && !defined(SPDL_CUDA_IMPLEMENTATION_INCLUDED)
#define SPDL_CUDA_IMPLEMENTATION_INCLUDED

#ifndef SPDL_IMPLEMENTATION_INCLUDED
#error "spdl_cuda.h: its implementation stands after that of spdl.h, in the same file"
#endif

#include <sys/mman.h>
#ifndef SPDL_CUDA_NONE
#include <dlfcn.h>
#endif

/* ============================================================================================= */
/* >>driver-impl
   What is used of the CUDA driver, as a table of pointers out of libcuda.so.1.
   CUresult and CUdevice are int, CUdeviceptr is uint64_t, all other arguments are integers and
   pointers; they have been the same since CUDA 11 (tests/cuda_types.c compares them with cuda.h).
   The driver and not the runtime: a call of the runtime makes a context on whatever device is
   current for the thread, hundreds of MiB each, and leaves its errors there. A table belongs to the
   object that was opened; any thread reads it. On the CPU there is none, and no call is made. */

enum { /* of CUresult */
    SPDL__CU_UNLOADING = 4,
    SPDL__CU_NOT_READY = 600,
    SPDL__CU_ALREADY_PINNED = 712
};

enum { /* flags and attributes */
    SPDL__CU_RELAXED = 2,         /* CU_STREAM_CAPTURE_MODE_RELAXED */
    SPDL__CU_NON_BLOCKING = 1,    /* CU_STREAM_NON_BLOCKING */
    SPDL__CU_BLOCKING_SYNC = 1,   /* CU_EVENT_BLOCKING_SYNC */
    SPDL__CU_DISABLE_TIMING = 2,  /* CU_EVENT_DISABLE_TIMING */
    SPDL__CU_PORTABLE = 1,        /* CU_MEMHOSTREGISTER_PORTABLE */
    SPDL__CU_READ_ONLY = 8,       /* CU_MEMHOSTREGISTER_READ_ONLY */
    SPDL__CU_ATTR_MAJOR = 75,     /* CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR */
    SPDL__CU_ATTR_MINOR = 76,
    SPDL__CU_ATTR_NUMA_NODE = 134, /* CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, of drivers since 12.2 */
    SPDL__CU_POINTER_TYPE = 2     /* CU_POINTER_ATTRIBUTE_MEMORY_TYPE: fails if it is not pinned */
};

#define SPDL__CU_LEGACY ((spdl_cuda_stream)(uintptr_t)1)     /* CU_STREAM_LEGACY */
#define SPDL__CU_PER_THREAD ((spdl_cuda_stream)(uintptr_t)2) /* CU_STREAM_PER_THREAD */

/* clang-format off */
#define SPDL__CUDA_CALLS(X)                                                                        \
    X(Init, "", (unsigned flags))                                                                  \
    X(DriverGetVersion, "", (int *version))                                                        \
    X(GetErrorString, "", (int error, const char **text))                                          \
    X(DeviceGetCount, "", (int *count))                                                            \
    X(DeviceGet, "", (int *device, int ordinal))                                                   \
    X(DeviceGetName, "", (char *name, int bytes, int device))                                      \
    X(DeviceTotalMem, "_v2", (size_t *bytes, int device))                                          \
    X(DeviceGetAttribute, "", (int *value, int attribute, int device))                             \
    X(DevicePrimaryCtxRetain, "", (void **context, int device))                                    \
    X(DevicePrimaryCtxRelease, "_v2", (int device))                                                \
    X(CtxGetCurrent, "", (void **context))                                                         \
    X(CtxPushCurrent, "_v2", (void *context))                                                      \
    X(CtxPopCurrent, "_v2", (void **context))                                                      \
    X(CtxGetDevice, "", (int *device))                                                             \
    X(CtxSynchronize, "", (void))                                                                  \
    X(ThreadExchangeStreamCaptureMode, "", (int *mode))                                            \
    X(StreamCreate, "", (void **stream, unsigned flags))                                           \
    X(StreamDestroy, "_v2", (void *stream))                                                        \
    X(StreamSynchronize, "", (void *stream))                                                       \
    X(StreamWaitEvent, "", (void *stream, void *event, unsigned flags))                            \
    X(StreamIsCapturing, "", (void *stream, int *status))                                          \
    X(StreamGetCtx, "", (void *stream, void **context))                                            \
    X(EventCreate, "", (void **event, unsigned flags))                                             \
    X(EventDestroy, "_v2", (void *event))                                                          \
    X(EventRecord, "", (void *event, void *stream))                                                \
    X(EventQuery, "", (void *event))                                                               \
    X(EventSynchronize, "", (void *event))                                                         \
    X(EventElapsedTime, "", (float *ms, void *start, void *end))                                   \
    X(MemAlloc, "_v2", (uint64_t *memory, size_t bytes))                                           \
    X(MemFree, "_v2", (uint64_t memory))                                                           \
    X(MemHostRegister, "_v2", (void *memory, size_t bytes, unsigned flags))                        \
    X(MemHostUnregister, "", (void *memory))                                                       \
    X(PointerGetAttribute, "", (void *value, int attribute, uint64_t memory))                      \
    X(MemcpyHtoDAsync, "_v2", (uint64_t to, const void *from, size_t bytes, void *stream))         \
    X(MemcpyDtoHAsync, "_v2", (void *to, uint64_t from, size_t bytes, void *stream))
/* clang-format on */

typedef struct spdl__cuda_api {
#define SPDL__CUDA_POINTER(name, version, parameters) int(*name) parameters;
    SPDL__CUDA_CALLS(SPDL__CUDA_POINTER)
#undef SPDL__CUDA_POINTER
} spdl__cuda_api;

/* Fills in the table. NULL, or why there is none. The library stays open. */
#ifdef SPDL_CUDA_NONE
SPDL__PRIVATE const char *spdl__cuda_fill(spdl__cuda_api *api) {
    memset(api, 0, sizeof(*api));
    return "this program was built without CUDA";
}
#else
SPDL__PRIVATE bool spdl__cuda_symbol(void *library, const char *name, void *function) {
    void *symbol = dlsym(library, name);
    memcpy(function, &symbol, sizeof(symbol)); /* ISO C has no cast for this */
    return symbol != NULL;
}

SPDL__PRIVATE const char *spdl__cuda_fill(spdl__cuda_api *api) {
    const char *named = getenv("SPDL_LIBCUDA");
    void *library = dlopen(named != NULL && named[0] != '\0' ? named : "libcuda.so.1",
                           RTLD_NOW | RTLD_LOCAL);
    bool all = true;
    if (library == NULL) return "no NVIDIA driver was found (libcuda.so.1)";
#define SPDL__CUDA_SYMBOL(name, version, parameters)                                               \
    all = spdl__cuda_symbol(library, "cu" #name version, (void *)&api->name) && all;
    SPDL__CUDA_CALLS(SPDL__CUDA_SYMBOL)
#undef SPDL__CUDA_SYMBOL
    return all ? NULL : "the NVIDIA driver lacks functions: it is older than CUDA 11";
}
#endif

SPDL__PRIVATE const char *spdl__cuda_text(const spdl__cuda_api *api, int error) {
    const char *text = NULL;
    if (api->GetErrorString == NULL || api->GetErrorString(error, &text) != 0 || text == NULL)
        return "unknown error";
    return text;
}

/* ============================================================================================= */
/* >>probe-impl
   Any thread; no state, no context. */

/* How many devices there are; with none info->reason says why. */
SPDL__PRIVATE int spdl__cuda_count(spdl__cuda_api *api, spdl_cuda_info *info) {
    const char *call = "cuInit", *missing = spdl__cuda_fill(api);
    int error, count = 0;
    if (missing != NULL) {
        (void)snprintf(info->reason, sizeof(info->reason), "%s", missing);
        return 0;
    }
    error = api->Init(0);
    if (error == 0) error = api->DriverGetVersion(&info->driver_version);
    if (error == 0) error = api->DeviceGetCount((call = "cuDeviceGetCount", &count));
    if (error == 0 && count > 0) return count;
    if (error == 0)
        (void)snprintf(info->reason, sizeof(info->reason), "the driver sees no device");
    else
        (void)snprintf(info->reason, sizeof(info->reason), "%s: %.100s", call,
                       spdl__cuda_text(api, error));
    return 0;
}

SPDL__PRIVATE int spdl__cuda_describe(const spdl__cuda_api *api, spdl_cuda_device *device,
                                      int ordinal) {
    size_t bytes = 0;
    int handle, error = api->DeviceGet(&handle, ordinal);
    if (error == 0) error = api->DeviceGetName(device->name, (int)sizeof(device->name), handle);
    if (error == 0) error = api->DeviceTotalMem(&bytes, handle);
    if (error == 0) error = api->DeviceGetAttribute(&device->major, SPDL__CU_ATTR_MAJOR, handle);
    if (error == 0) error = api->DeviceGetAttribute(&device->minor, SPDL__CU_ATTR_MINOR, handle);
    device->memory_bytes = bytes;
    return error;
}

SPDL_API void spdl_cuda_probe(spdl_cuda_info *info) {
    spdl__cuda_api api;
    int i, count, error = 0;
    if (info == NULL) return;
    memset(info, 0, sizeof(*info));
    count = spdl__cuda_count(&api, info);
    for (i = 0; i < count && i < SPDL_CUDA_MAX_DEVICES && error == 0; ++i)
        error = spdl__cuda_describe(&api, &info->device[i], i);
    if (error == 0)
        info->device_count = count;
    else
        (void)snprintf(info->reason, sizeof(info->reason), "device %d: %.100s", i - 1,
                       spdl__cuda_text(&api, error));
}

/* ============================================================================================= */
/* >>state-impl
   One object per device and owner. What moves, who records which event on which stream, and who
   waits for it:

       host slot    FREE -> FILLING -> SENDING -> SENT -> FREE
                    host_get, then send; by a reap to FREE again. free_hosts holds the FREE ones.
       copy         numbered `sent` on; its event lies in transfer[number % transfers].
                    submit, on the copy stream:  wait for each reader of the slot's last batch (E3),
                                                 copy, record the copy's event
                    reap, on a host thread:      sees the copy's event done by query or sync, then
                                                 reclaims the number and gives its source back (E1,
                                                 E4): to the slot's batch when that keeps it
       device slot  FREE -> SENT (ticket is odd) -> FREE; free_slots holds the FREE ones.
                    ready, on a reader's stream: wait for the copy's event, unless the number was
                                                 reclaimed: then a host thread has seen it done, and
                                                 what is put on a stream later comes behind (E2)
                    done, on the same stream:    record that reader's event, for E3 of the next copy
       output       FREE -> GOT -> SENT -> THERE -> FREE; free_outputs holds the FREE ones (D4).
                    get, on the stream of the kernels: wait for the last copy out of it, unless the
                                                 host has seen that (D3)
                    send:                        record the kernels' event there, wait for it on the
                                                 stream back (D1), copy, record the copy's event
                    wait, on a host thread:      that event, by query or sync (D2)

   Copies are in order on one stream, so a copy that is done says the same of all before it, and
   numbers are reclaimed in order. A transfer's event is recorded again only when its number has
   been reclaimed; whoever then waits for it waits for a later copy, which is right too.

   Once the device is lost no event says when a copy has ended. Sources then come back in two places
   only, each behind a wait for the stream that has returned, with an error if need be: a send that
   fails, and close, of an iterator too. That CUDA has stopped its copies by then is not written
   down anywhere; should one still run, it only reads host memory, which stays pinned as long as the
   driver holds it, and what it brings goes to device memory that this process can use no more. A
   driver that is unloading (exit) is not even waited for.

   `lock` guards the copy streams (wait, copy and record belong together), the numbers and the list
   of arenas. It is held for a few calls that only enqueue, never while anybody waits, but after a
   call that failed. host_get does not take it while a slot is free, nor while an iterator is open:
   workers of low priority cannot hold up the trainer. */

typedef struct spdl__cuda_held { /* what is given back when a source has been read */
    spdl_cuda_host *host;
    spdl_free_fn release;
    void *item;
} spdl__cuda_held;

/* A span of the device in a trace: two events with a time. */
typedef struct spdl__cuda_span {
    void *start, *stop;
    uint64_t since, bytes; /* when it was submitted, or 0: not in the trace */
} spdl__cuda_span;

typedef struct spdl__cuda_transfer {
    void *event;  /* the copy is done */
    void *reader; /* atomic: recorded behind the batch's kernels, or NULL */
    spdl__cuda_held held;
    spdl__cuda_span span; /* with time_copies or in a trace */
} spdl__cuda_transfer;

enum { SPDL__HOST_FREE, SPDL__HOST_FILLING, SPDL__HOST_SENDING, SPDL__HOST_SENT };

typedef struct spdl__cuda_host {
    spdl_cuda_host host; /* first: what callers have a pointer to */
    uint32_t state;
    const spdl__node *node; /* of the call that took it, or NULL; may be gone: only compared */
    uint64_t ticket;
} spdl__cuda_host;

/* Rounds of a slot for which it has events and batch structs of their own: what the last copies
   waited for can be asked about while the host runs ahead, and a stale pointer is told. */
enum { SPDL__LAPS = 3 };

enum { SPDL__READER_NONE, SPDL__READER_READING, SPDL__READER_DONE };

typedef struct spdl__cuda_reader {
    spdl_cuda_stream stream;
    uint64_t thread; /* whose stream it is, of SPDL__CU_PER_THREAD; else 0 */
    void *event[SPDL__LAPS];
    int lap;         /* of the event that was recorded last */
    int state;
} spdl__cuda_reader;

/* Whoever has the batch writes the readers; free_slots hands them on to the next sender. */
typedef struct spdl__cuda_slot {
    spdl_cuda_batch batch;              /* the one in it */
    spdl_cuda_batch shown[SPDL__LAPS]; /* what a row hands out, in turns */
    spdl_cuda_array array[SPDL_CUDA_MAX_ARRAYS];
    void *memory;
    uint64_t ticket;   /* odd while it is SENT; other threads may look */
    uint64_t transfer; /* the number of its copy */
    spdl__cuda_reader reader[SPDL_CUDA_MAX_READERS];
    spdl__cuda_held held; /* the source, as long as the batch is its memory, or keeps it */
    bool lent;            /* by an iterator, which is done with it itself */
    bool repeats;         /* held by spdl_cuda_iter_hold */
} spdl__cuda_slot;

enum { SPDL__OUTPUT_FREE, SPDL__OUTPUT_GOT, SPDL__OUTPUT_SENT, SPDL__OUTPUT_THERE };

/* Written by whoever has the output. */
typedef struct spdl__cuda_output {
    spdl_cuda_output out; /* first: what callers have a pointer to */
    uint32_t state;
    spdl__cuda_reader kernels; /* the stream it was got on, the event behind its work */
    void *copied;              /* the copy's event */
    void *behind;              /* what the next work on it waits for, or NULL */
    spdl_deferred call;        /* of the stage */
    spdl__cuda_span launch, copy;
} spdl__cuda_output;

/* Memory that is registered in pieces. */
typedef struct spdl__pin {
    char *base;
    size_t bytes;
    size_t piece;  /* a multiple of slots and of pages */
    size_t done;   /* bytes that are registered */
    long process;
    void *context; /* in which, retained */
    int handle;    /* of its device */
    uint64_t users;
    struct spdl__pin *next;
} spdl__pin;

typedef struct spdl__cuda_slab { /* host memory of ours, or an arena */
    char *base;
    size_t bytes, stride, piece;
    spdl__pin *pin;     /* the process's; NULL: it is not pinned, or by somebody else */
    bool pinned;
    struct spdl__cuda_slab *next;
} spdl__cuda_slab;

/* Who gets the next of what there are few of: see turns_before. */
typedef struct spdl__cuda_turns {
    uint32_t lock;
    const spdl__node *node; /* the row whose calls are in order */
    uint64_t since;         /* and of which pipeline: another may have its place in memory */
    uint64_t head, next, taken; /* ticket `next` + i has one if bit i is set */
} spdl__cuda_turns;

struct spdl_cuda {
    /* written by open */
    spdl_cuda_desc desc;
    spdl__cuda_api api;
    bool cpu, asymmetric, locks_made, event_made;
    int device, handle, device_count, numa_node, array_count;
    long process;
    void *context; /* the primary one of the device */
    void *stream, *back, *compute; /* copies there, copies back, kernels of SPDL_CUDA_STAGE */
    uint64_t memory; /* of the device slots, when it is ours */
    uint64_t output_memory;
    size_t stride, output_stride; /* on the device */
    size_t array_bytes;           /* of the desc's arrays */
    spdl__cuda_slab slab, output_slab;
    spdl__cuda_host *host;
    spdl__cuda_slot *slot;
    spdl__cuda_output *output;
    spdl__cuda_transfer *transfer;
    uint64_t transfers;
    spdl_ring *free_hosts, *free_slots, *free_outputs, *launched;
    spdl_cuda_launch_fn launch; /* written by spdl_cuda_stage, as is: */
    spdl__os_thread completer;
    bool completing;
    char pad0[SPDL_CACHE_LINE];
    /* written under lock; the numbers are read without it */
    pthread_mutex_t lock;
    uint64_t sent, reclaimed;
    spdl__cuda_slab *arenas;
    const spdl_pipeline *traced; /* copies are in its trace; or NULL */
    uint32_t tracing;            /* whether: read without it */
    void *origin[2]; /* the event that the device's time in it counts from, and the next one */
    bool origin_moves;
    double origin_ns, low_ns, high_ns, fitted_ns; /* what is known of its clock: see trace_fit */
    char pad1[SPDL_CACHE_LINE];
    /* written by any thread */
    spdl__os_event changed;   /* a slot is free, or there is a copy to wait for */
    uint32_t lost;
    uint32_t unloading;       /* the driver is gone: no more calls, leave everything as it is */
    uint32_t iterating;       /* an iterator is open: it alone sends and reaps */
    uint32_t reaper;          /* 1 while a thread that waits for a host slot waits for copies */
    uint32_t told;            /* who has the slots */
    uint64_t fetcher;         /* the thread that is fetching for an iterator; 0: none */
    spdl__cuda_turns host_turns, output_turns;
    uint64_t calls, checks, batches, bytes, outputs, copied_bytes, adopted_bytes;
    uint64_t wait_source_ns, wait_bus_ns, wait_device_ns, wait_next_ns;
    uint64_t told_bus_ns; /* of wait_bus_ns: in the statistics of a pipeline */
    uint64_t trace_error_ns;
    uint64_t copy_us[32];
    pthread_mutex_t back_lock; /* of the stream back */
    pthread_mutex_t error_lock;
    spdl_error error; /* under error_lock */
};

/* A call that reaches the device, and one that only looks at the state of the thread. */
#define SPDL__CUDA(cuda, call) (spdl__add(&(cuda)->calls, 1), (cuda)->cpu ? 0 : (cuda)->api.call)
#define SPDL__CUDA_LOOK(cuda, call)                                                                \
    (spdl__add(&(cuda)->checks, 1), (cuda)->cpu ? 0 : (cuda)->api.call)
/* The same as a result; what failed is recorded. */
#define SPDL__CUDA_TRY(cuda, name, arguments)                                                      \
    spdl__cuda_check(cuda, "cu" #name, SPDL__CUDA(cuda, name arguments))
#define SPDL__CUDA_SEE(cuda, name, arguments)                                                      \
    spdl__cuda_check(cuda, "cu" #name, SPDL__CUDA_LOOK(cuda, name arguments))

/* Errors after which no call of this process to the device works again: the context is gone, the
   hardware has failed, or the driver is being unloaded. */
SPDL__PRIVATE bool spdl__cuda_sticky(int error) {
    switch (error) {
    case SPDL__CU_UNLOADING:
    case 201: case 214: case 220: case 226:  /* no context, ECC, NVLink */
    case 700: case 702: case 709: case 710:  /* address, timeout, destroyed, assert */
    case 714: case 715: case 716: case 717: case 718: case 719: case 721:
    case 810: case 911: return true;         /* the MPS server, or another device, has ended it */
    default: return false;
    }
}

/* Wakes everybody who waits for a slot: none will come. */
SPDL__PRIVATE void spdl__cuda_lose(spdl_cuda *cuda) {
    spdl__store32(&cuda->lost, 1);
    if (cuda->free_slots != NULL) spdl_ring_close(cuda->free_slots);
    if (cuda->free_outputs != NULL) spdl_ring_close(cuda->free_outputs);
    if (cuda->event_made) spdl__os_event_wake(&cuda->changed, SPDL__ALL);
}

/* Records what a call of ours returned; the first one that lost the device stays. */
SPDL__PRIVATE spdl_result spdl__cuda_fail(spdl_cuda *cuda, const char *call, int code) {
    const bool lost = spdl__cuda_sticky(code), fault = code >= 700 && code < 800;
    if (code == SPDL__CU_UNLOADING) spdl__store32(&cuda->unloading, 1);
    pthread_mutex_lock(&cuda->error_lock);
    if (spdl__load_relaxed32(&cuda->lost) == 0)
        (void)spdl__error_set(&cuda->error, lost ? SPDL_E_CUDA_LOST : SPDL_E_CUDA,
                              "spdl: cuda: %s failed on device %d: %s (%d)%s%s", call, cuda->device,
                              spdl__cuda_text(&cuda->api, code), code,
                              lost ? "; the device is lost to this process" : "",
                              lost && fault ? "; a kernel or copy before that call, of whomever, "
                                              "did it" : "");
    if (lost) spdl__cuda_lose(cuda);
    pthread_mutex_unlock(&cuda->error_lock);
    return lost ? SPDL_E_CUDA_LOST : SPDL_E_CUDA;
}

SPDL__PRIVATE spdl_result spdl__cuda_check(spdl_cuda *cuda, const char *call, int code) {
    return code == 0 ? SPDL_OK : spdl__cuda_fail(cuda, call, code);
}

/* Not even a wait has worked: nobody knows what the device still reads or writes. */
SPDL__PRIVATE void spdl__cuda_abandon(spdl_cuda *cuda) {
    pthread_mutex_lock(&cuda->error_lock);
    if (spdl__load_relaxed32(&cuda->lost) == 0) {
        cuda->error.result = SPDL_E_CUDA_LOST;
        spdl__cuda_lose(cuda);
    }
    pthread_mutex_unlock(&cuda->error_lock);
}

/* The caller's mistake. */
SPDL__PRIVATE spdl_result spdl__cuda_refuse(spdl_cuda *cuda, spdl_result result, const char *why) {
    pthread_mutex_lock(&cuda->error_lock);
    if (spdl__load_relaxed32(&cuda->lost) == 0)
        (void)spdl__error_set(&cuda->error, result, "spdl: cuda: %s", why);
    pthread_mutex_unlock(&cuda->error_lock);
    return result;
}

/* First in every call: is the device still ours? */
SPDL__PRIVATE spdl_result spdl__cuda_usable(const spdl_cuda *cuda) {
    if (cuda == NULL) return SPDL_E_INVALID;
    if (cuda->process != (long)getpid()) return SPDL_E_CUDA_FORKED;
    return spdl__load32(&cuda->lost) ? SPDL_E_CUDA_LOST : SPDL_OK;
}

/* What was changed of the thread, and is put back. */
typedef struct spdl__cuda_scope {
    bool pushed, relaxed;
    int mode;
} spdl__cuda_scope;

SPDL__PRIVATE void spdl__cuda_leave(spdl_cuda *cuda, spdl__cuda_scope *scope) {
    void *ours;
    int mode = scope->mode;
    if (scope->relaxed && SPDL__CUDA_LOOK(cuda, ThreadExchangeStreamCaptureMode(&mode)) != 0) {
        mode = scope->mode; /* must not be left out: once more */
        (void)SPDL__CUDA_LOOK(cuda, ThreadExchangeStreamCaptureMode(&mode));
    }
    if (scope->pushed && SPDL__CUDA_LOOK(cuda, CtxPopCurrent(&ours)) != 0)
        (void)SPDL__CUDA_LOOK(cuda, CtxPopCurrent(&ours));
}

/* Calls to CUDA are made between this and leave: on our device, and when they may wait or allocate,
   which would break captures of other threads, in relaxed mode. No function of the caller's is
   called there. */
SPDL__PRIVATE spdl_result spdl__cuda_enter(spdl_cuda *cuda, spdl__cuda_scope *scope, bool relaxed) {
    void *current = NULL;
    spdl_result result;
    memset(scope, 0, sizeof(*scope));
    if (cuda->cpu) return SPDL_OK;
    result = SPDL__CUDA_SEE(cuda, CtxGetCurrent, (&current));
    if (result == SPDL_OK && current != cuda->context) {
        result = SPDL__CUDA_SEE(cuda, CtxPushCurrent, (cuda->context));
        scope->pushed = result == SPDL_OK;
    }
    if (result == SPDL_OK && relaxed) {
        scope->mode = SPDL__CU_RELAXED;
        result = SPDL__CUDA_SEE(cuda, ThreadExchangeStreamCaptureMode, (&scope->mode));
        scope->relaxed = result == SPDL_OK;
    }
    if (result != SPDL_OK) spdl__cuda_leave(cuda, scope);
    return result;
}

/* What the caller's stream is to the driver, and whose. */
SPDL__PRIVATE spdl__cuda_reader spdl__stream_of(spdl_cuda_stream stream) {
    spdl__cuda_reader reader;
    memset(&reader, 0, sizeof(reader));
#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
    if (stream == NULL) stream = SPDL__CU_PER_THREAD;
#endif
    reader.stream = stream == NULL ? SPDL__CU_LEGACY : stream;
    if (stream == SPDL__CU_PER_THREAD) reader.thread = spdl__os_thread_id();
    return reader;
}

/* Whether work may be put on the stream, inside of a scope: it is of our context, since a context
   has its events to itself; and not being captured: what is recorded there never happens, and would
   draw the copy stream into it. */
SPDL__PRIVATE spdl_result spdl__stream_check(spdl_cuda *cuda, spdl_cuda_stream stream) {
    const int implicit = 906; /* the legacy stream, while another that it waits for is captured */
    void *context = cuda->context;
    int status = 0, code = 0;
    if (cuda->cpu) return SPDL_OK;
    if (cuda->device_count > 1 && (uintptr_t)stream > 2)
        code = SPDL__CUDA_LOOK(cuda, StreamGetCtx(stream, &context));
    if (code != 0) return spdl__cuda_fail(cuda, "cuStreamGetCtx", code);
    if (context != cuda->context)
        return spdl__cuda_refuse(cuda, SPDL_E_INVALID, "the stream is of another device");
    code = SPDL__CUDA_LOOK(cuda, StreamIsCapturing(stream, &status));
    if (code != 0 && code != implicit) return spdl__cuda_fail(cuda, "cuStreamIsCapturing", code);
    if (code == 0 && status == 0) return SPDL_OK;
    return spdl__cuda_refuse(cuda, SPDL_E_INVALID,
                             "the stream is being captured; take batches outside of the capture");
}

/* Waits for a stream after a call on it has failed, or for all when it is another thread's. Twice,
   as what comes next depends on it; when that does not help either, the device counts as lost. */
SPDL__PRIVATE void spdl__stream_settle(spdl_cuda *cuda, const spdl__cuda_reader *reader) {
    const bool own = reader->thread == 0 || reader->thread == spdl__os_thread_id();
    spdl_result result = SPDL_E_CUDA;
    int tries;
    for (tries = 0; tries < 2 && result == SPDL_E_CUDA; ++tries) {
        spdl__cuda_scope scope;
        spdl_result entered;
        if (spdl__load32(&cuda->unloading) != 0) return;
        entered = spdl__cuda_enter(cuda, &scope, true);
        if (entered == SPDL_E_CUDA) continue;
        result = own ? SPDL__CUDA_TRY(cuda, StreamSynchronize, (reader->stream)) /* also if lost */
                     : SPDL__CUDA_TRY(cuda, CtxSynchronize, ());
        if (entered == SPDL_OK) spdl__cuda_leave(cuda, &scope);
    }
    if (result != SPDL_OK) spdl__cuda_abandon(cuda);
}

/* Records the end of the work on a stream. */
SPDL__PRIVATE spdl_result spdl__work_record(spdl_cuda *cuda, spdl__cuda_reader *reader) {
    const int lap = reader->event[1] == NULL ? 0 : (reader->lap + 1) % SPDL__LAPS;
    spdl__cuda_scope scope;
    spdl_result result;
    if (reader->thread != 0 && reader->thread != spdl__os_thread_id())
        return spdl__cuda_refuse(cuda, SPDL_E_INVALID,
                                 "cudaStreamPerThread is another stream on this thread");
    result = spdl__cuda_enter(cuda, &scope, false);
    if (result != SPDL_OK) return result;
    result = spdl__stream_check(cuda, reader->stream);
    if (result == SPDL_OK)
        result = SPDL__CUDA_TRY(cuda, EventRecord, (reader->event[lap], reader->stream));
    spdl__cuda_leave(cuda, &scope);
    if (result == SPDL_OK) reader->lap = lap;
    return result;
}

/* ============================================================================================= */
/* >>memory-impl
   Host memory for slots: mapped, on huge pages, near the device, faulted in, registered. All of it
   in open calls, on the thread of the caller and a few helpers that end before the call does.

   What is registered belongs to the process, so its list is the one thing here that is global: it
   counts who uses a piece of memory, whichever device they are for, and keeps the context that it
   was registered in. */

#define SPDL__PAGE ((size_t)4096)
#define SPDL__HUGE_PAGE ((size_t)2 << 20)
#define SPDL__PIECE ((size_t)1 << 30)
#define SPDL__MAX_SLOT_BYTES ((size_t)1 << 40)

static pthread_mutex_t spdl__pins_lock = PTHREAD_MUTEX_INITIALIZER;
static spdl__pin *spdl__pins;

SPDL__PRIVATE size_t spdl__round_up(size_t bytes, size_t unit) {
    return (bytes + unit - 1) / unit * unit;
}

/* Small slots lie close together; large ones begin on pages, so that pieces come out near 1 GiB. */
SPDL__PRIVATE size_t spdl__cuda_stride(size_t slot_bytes) {
    return spdl__round_up(slot_bytes, slot_bytes >= ((size_t)1 << 20) ? SPDL__PAGE
                                                                      : SPDL_CUDA_ALIGN);
}

/* The largest number of bytes, up to 1 GiB, that ends both a slot and a page; a slot may straddle
   two pieces as little as a page may belong to both. */
SPDL__PRIVATE size_t spdl__cuda_piece(size_t slot_bytes) {
    const size_t low_bit = slot_bytes & (~slot_bytes + 1);
    const size_t step = slot_bytes * (SPDL__PAGE / (low_bit < SPDL__PAGE ? low_bit : SPDL__PAGE));
    return step >= SPDL__PIECE ? step : SPDL__PIECE / step * step;
}

/* Inside of a scope: unregisters all there is, in the context that it was registered in. False:
   some of it stayed registered, and must stay mapped. */
SPDL__PRIVATE bool spdl__pin_end(spdl_cuda *cuda, spdl__pin *pin) {
    const spdl_allocator plain = { NULL, NULL, NULL };
    spdl_result result = SPDL_OK, ended;
    void *ours;
    size_t at;
    if (pin->done > 0) result = SPDL__CUDA_SEE(cuda, CtxPushCurrent, (pin->context));
    if (pin->done > 0 && result == SPDL_OK) {
        for (at = 0; at < pin->done; at += pin->piece) {
            ended = SPDL__CUDA_TRY(cuda, MemHostUnregister, (pin->base + at));
            if (ended != SPDL_OK) result = ended;
        }
        if (SPDL__CUDA_LOOK(cuda, CtxPopCurrent(&ours)) != 0)
            (void)SPDL__CUDA_LOOK(cuda, CtxPopCurrent(&ours));
    }
    (void)SPDL__CUDA(cuda, DevicePrimaryCtxRelease(pin->handle));
    spdl__free(&plain, pin, sizeof(*pin));
    return result == SPDL_OK || spdl__load32(&cuda->lost) != 0;
}

/* Registers one piece; a mapping that may only be read has to be called so. */
SPDL__PRIVATE int spdl__pin_piece(spdl_cuda *cuda, char *base, size_t bytes) {
    const unsigned read_only = SPDL__CU_PORTABLE | SPDL__CU_READ_ONLY;
    const int invalid = 1, not_permitted = 800, not_supported = 801;
    const int code = SPDL__CUDA(cuda, MemHostRegister(base, bytes, SPDL__CU_PORTABLE));
    int second;
    if (code != invalid && code != not_permitted && code != not_supported) return code;
    second = SPDL__CUDA(cuda, MemHostRegister(base, bytes, read_only));
    return second == 0 ? 0 : code;
}

/* Inside of a scope: registers all of it or nothing; 0 or what CUDA says. */
SPDL__PRIVATE int spdl__pin_make(spdl_cuda *cuda, spdl__cuda_slab *slab, spdl__pin **made) {
    const spdl_allocator plain = { NULL, NULL, NULL }; /* of the process, not of this spdl_cuda */
    spdl__pin *pin = (spdl__pin *)spdl__alloc_zeroed(&plain, 1, sizeof(*pin), 0);
    const int out_of_memory = 2;
    int code;
    if (pin == NULL) return out_of_memory;
    code = SPDL__CUDA(cuda, DevicePrimaryCtxRetain(&pin->context, cuda->handle));
    if (code != 0) {
        spdl__free(&plain, pin, sizeof(*pin));
        return code;
    }
    pin->process = cuda->process;
    pin->handle = cuda->handle;
    pin->base = slab->base;
    pin->bytes = slab->bytes;
    pin->piece = slab->piece;
    while (pin->done < pin->bytes && code == 0) {
        const size_t left = pin->bytes - pin->done;
        const size_t bytes = left < pin->piece ? left : pin->piece;
        code = spdl__pin_piece(cuda, pin->base + pin->done, bytes);
        if (code == 0) pin->done += bytes;
    }
    if (code != 0)
        (void)spdl__pin_end(cuda, pin);
    else
        *made = pin;
    return code;
}

/* Whether somebody else has registered both ends of each piece: then all of it, or nothing that we
   could find out. (cuMemHostGetFlags is for memory of cuMemHostAlloc only.) */
SPDL__PRIVATE bool spdl__pin_is_there(spdl_cuda *cuda, const spdl__cuda_slab *slab) {
    const uint64_t base = (uint64_t)(uintptr_t)slab->base;
    const int what = SPDL__CU_POINTER_TYPE;
    size_t at;
    int type;
    for (at = 0; at < slab->bytes; at += slab->piece) {
        const size_t left = slab->bytes - at, last = (left < slab->piece ? left : slab->piece) - 1;
        if (SPDL__CUDA(cuda, PointerGetAttribute(&type, what, base + at)) != 0 ||
            SPDL__CUDA(cuda, PointerGetAttribute(&type, what, base + at + last)) != 0)
            return false;
    }
    return true;
}

/* The one in the list that has any of this memory. */
SPDL__PRIVATE spdl__pin *spdl__pin_find(const spdl_cuda *cuda, const spdl__cuda_slab *slab) {
    spdl__pin *pin = spdl__pins;
    while (pin != NULL && (pin->process != cuda->process || pin->base >= slab->base + slab->bytes ||
                           slab->base >= pin->base + pin->bytes))
        pin = pin->next;
    return pin;
}

/* Inside of a scope, under pins_lock. SPDL_E_INVALID: it is pinned in another way. */
SPDL__PRIVATE spdl_result spdl__pin_share(spdl_cuda *cuda, spdl__cuda_slab *slab, int *code) {
    spdl__pin *pin = spdl__pin_find(cuda, slab);
    *code = 0;
    if (pin == NULL) {
        *code = spdl__pin_make(cuda, slab, &pin);
        if (*code == SPDL__CU_ALREADY_PINNED)
            return spdl__pin_is_there(cuda, slab)
                       ? SPDL_OK
                       : spdl__cuda_refuse(cuda, SPDL_E_INVALID, "adopt: a part of the memory is "
                                                                 "pinned already, the rest is not");
        if (*code != 0) return spdl__cuda_fail(cuda, "cuMemHostRegister", *code);
        pin->next = spdl__pins;
        spdl__pins = pin;
    } else if (pin->base != slab->base || pin->bytes != slab->bytes || pin->piece != slab->piece) {
        return spdl__cuda_refuse(cuda, SPDL_E_INVALID,
                                 "adopt: the memory is adopted already, in slots of another size");
    }
    ++pin->users;
    slab->pin = pin;
    return SPDL_OK;
}

/* Inside of a scope. Memory that cannot be pinned is used as it is, unless it must be. */
SPDL__PRIVATE spdl_result spdl__slab_pin(spdl_cuda *cuda, spdl__cuda_slab *slab, const char *what) {
    spdl_result result;
    int code;
    if (cuda->cpu || slab->bytes == 0) return SPDL_OK;
    pthread_mutex_lock(&spdl__pins_lock);
    result = spdl__pin_share(cuda, slab, &code);
    pthread_mutex_unlock(&spdl__pins_lock);
    slab->pinned = result == SPDL_OK;
    if (result != SPDL_E_CUDA || cuda->desc.must_pin) return result;
    spdl__logf(&cuda->desc.logger, SPDL_LOG_WARN,
               "spdl: cuda: %llu bytes for %s could not be pinned: %s (%d); going on, slower",
               (spdl__llu)slab->bytes, what, spdl__cuda_text(&cuda->api, code), code);
    return SPDL_OK;
}

/* Inside of a scope, or when there can be none: then it is only forgotten. False: it stayed
   registered, and must stay mapped. */
SPDL__PRIVATE bool spdl__slab_unpin(spdl_cuda *cuda, spdl__cuda_slab *slab, bool entered) {
    const spdl_allocator plain = { NULL, NULL, NULL };
    spdl__pin **at = &spdl__pins;
    bool ended = true;
    if (slab->pin == NULL) return true;
    pthread_mutex_lock(&spdl__pins_lock);
    if (--slab->pin->users == 0) {
        while (*at != slab->pin) at = &(*at)->next;
        *at = slab->pin->next;
        if (entered) {
            ended = spdl__pin_end(cuda, slab->pin);
        } else {
            ended = spdl__load32(&cuda->lost) != 0 && spdl__load32(&cuda->unloading) == 0;
            spdl__free(&plain, slab->pin, sizeof(*slab->pin));
        }
    }
    pthread_mutex_unlock(&spdl__pins_lock);
    slab->pin = NULL;
    slab->pinned = false;
    return ended;
}

/* Pages of the device's node, if it has room, huge ones, and none for children: a forked child must
   not move pinned pages. */
SPDL__PRIVATE void spdl__slab_advise(spdl_cuda *cuda, const spdl__cuda_slab *slab) {
#if defined(__linux__) && defined(SYS_mbind)
    const long dont_fork = 10, huge_pages = 14, preferred = 1, bits = 64;
    const uint64_t mask = (uint64_t)1 << (cuda->numa_node & 63);
    (void)syscall(SYS_madvise, slab->base, slab->bytes, dont_fork);
    (void)syscall(SYS_madvise, slab->base, slab->bytes, huge_pages);
    if (cuda->numa_node < 0 || (cuda->numa_node < 64 &&
        syscall(SYS_mbind, slab->base, slab->bytes, preferred, &mask, bits + 1, 0L) == 0)) return;
#else
    (void)slab;
#endif
    cuda->numa_node = -1;
}

/* Maps memory that begins on a huge page, when it is large enough to have one. */
SPDL__PRIVATE char *spdl__map(size_t bytes) {
#if defined(__linux__)
    const int anonymous = 0x20; /* hidden in strict ISO mode */
#else
    const int anonymous = MAP_ANON;
#endif
    const size_t more = bytes >= SPDL__HUGE_PAGE ? SPDL__HUGE_PAGE : 0;
    void *memory =
        mmap(NULL, bytes + more, PROT_READ | PROT_WRITE, MAP_PRIVATE | anonymous, -1, 0);
    char *whole = (char *)memory;
    size_t head;
    if (memory == MAP_FAILED) return NULL;
    if (more == 0) return whole;
    head = (size_t)(-(uintptr_t)whole & (SPDL__HUGE_PAGE - 1));
    if (head != 0) (void)munmap(whole, head);
    if (head != more) (void)munmap(whole + head + bytes, more - head);
    return whole + head;
}

typedef struct spdl__touch {
    volatile char *at;
    size_t bytes;
    spdl__os_thread thread;
    bool started;
} spdl__touch;

SPDL__PRIVATE void *spdl__touch_run(void *arg) {
    const spdl__touch *part = (const spdl__touch *)arg;
    size_t at;
    for (at = 0; at < part->bytes; at += SPDL__PAGE) part->at[at] = 0;
    return NULL;
}

/* Faults the pages in, by a quarter of the cores, up to 4, where there are many pages. */
SPDL__PRIVATE void spdl__touch_all(char *memory, size_t bytes) {
    const long cores = sysconf(_SC_NPROCESSORS_ONLN) / 4;
    const int threads = bytes < 8 * SPDL__HUGE_PAGE || cores < 2 ? 1 : cores < 4 ? (int)cores : 4;
    const size_t each = spdl__round_up(bytes / (size_t)threads + 1, SPDL__HUGE_PAGE);
    spdl__touch part[4];
    size_t at = 0;
    int i;
    for (i = 0; i < threads; ++i) {
        part[i].at = memory + at;
        part[i].bytes = bytes - at < each ? bytes - at : each;
        at += part[i].bytes;
        part[i].started = i > 0 && part[i].bytes > 0 &&
                          spdl__os_thread_start(&part[i].thread, "spdl-touch", NULL, 0,
                                                spdl__touch_run, &part[i]);
    }
    for (i = 0; i < threads; ++i)
        if (!part[i].started) (void)spdl__touch_run(&part[i]);
    for (i = 0; i < threads; ++i)
        if (part[i].started) spdl__os_thread_join(&part[i].thread);
}

/* Memory for `count` slots, in place but not yet registered. */
SPDL__PRIVATE spdl_result spdl__slab_make(spdl_cuda *cuda, spdl__cuda_slab *slab, size_t slot_bytes,
                                          size_t count) {
    memset(slab, 0, sizeof(*slab));
    slab->stride = spdl__cuda_stride(slot_bytes);
    slab->piece = spdl__cuda_piece(slab->stride);
    if (count == 0) return SPDL_OK;
    if (count > (SIZE_MAX / 4) / slab->stride) return SPDL_E_NOMEM;
    slab->bytes = spdl__round_up(count * slab->stride, SPDL__PAGE);
    slab->base = spdl__map(slab->bytes);
    if (slab->base == NULL) return SPDL_E_NOMEM;
    if (cuda->cpu) return SPDL_OK;
    spdl__slab_advise(cuda, slab);
    spdl__touch_all(slab->base, slab->bytes);
    return SPDL_OK;
}

/* As slab_unpin. */
SPDL__PRIVATE void spdl__slab_end(spdl_cuda *cuda, spdl__cuda_slab *slab, bool entered) {
    if (slab->base != NULL && spdl__slab_unpin(cuda, slab, entered))
        (void)munmap(slab->base, slab->bytes);
    slab->base = NULL;
}

/* ---- memory for a pipeline ---- */

/* What has to be pinned is told by its size alone, as it was when it was made. */
SPDL__PRIVATE bool spdl__blocks_pin(const spdl_cuda *cuda, size_t bytes) {
    return !cuda->cpu && bytes >= cuda->desc.slot_bytes / 2 && bytes >= SPDL__PAGE;
}

SPDL__PRIVATE spdl__cuda_slab *spdl__arena_new(spdl_cuda *cuda, void *base, size_t bytes,
                                               size_t slot_bytes) {
    spdl__cuda_slab *arena = (spdl__cuda_slab *)spdl__alloc_zeroed(&cuda->desc.allocator, 1,
                                                                   sizeof(*arena), 0);
    if (arena == NULL) return NULL;
    arena->base = (char *)base;
    arena->bytes = bytes;
    arena->stride = slot_bytes;
    arena->piece = spdl__cuda_piece(slot_bytes);
    return arena;
}

SPDL__PRIVATE void spdl__arena_link(spdl_cuda *cuda, spdl__cuda_slab *arena) {
    pthread_mutex_lock(&cuda->lock);
    arena->next = cuda->arenas;
    cuda->arenas = arena;
    pthread_mutex_unlock(&cuda->lock);
}

/* Out of the list, or NULL. */
SPDL__PRIVATE spdl__cuda_slab *spdl__arena_unlink(spdl_cuda *cuda, const void *base) {
    spdl__cuda_slab **at = &cuda->arenas, *found;
    pthread_mutex_lock(&cuda->lock);
    while (*at != NULL && (*at)->base != (const char *)base) at = &(*at)->next;
    found = *at;
    if (found != NULL) *at = found->next;
    pthread_mutex_unlock(&cuda->lock);
    return found;
}

SPDL__PRIVATE void *spdl__blocks_alloc(size_t bytes, size_t align, void *user) {
    spdl_cuda *cuda = (spdl_cuda *)user;
    spdl__cuda_scope scope;
    spdl__cuda_slab slab, *arena = NULL;
    spdl_result result;
    if (!spdl__blocks_pin(cuda, bytes)) return spdl__alloc(&cuda->desc.allocator, bytes, align);
    if (spdl__cuda_usable(cuda) != SPDL_OK) return NULL;
    result = spdl__slab_make(cuda, &slab, bytes, 1);
    if (result == SPDL_OK) arena = spdl__arena_new(cuda, slab.base, slab.bytes, slab.bytes);
    if (arena != NULL) result = spdl__cuda_enter(cuda, &scope, true);
    if (arena != NULL && result == SPDL_OK) {
        result = spdl__slab_pin(cuda, arena, "batches");
        spdl__cuda_leave(cuda, &scope);
    }
    if (arena != NULL && result == SPDL_OK) {
        spdl__arena_link(cuda, arena);
        return arena->base;
    }
    if (slab.base != NULL) (void)munmap(slab.base, slab.bytes);
    spdl__free(&cuda->desc.allocator, arena, sizeof(*arena));
    return NULL;
}

SPDL__PRIVATE void spdl__blocks_free(void *memory, size_t bytes, void *user) {
    spdl_cuda *cuda = (spdl_cuda *)user;
    spdl__cuda_scope scope;
    spdl__cuda_slab *arena;
    bool entered;
    if (!spdl__blocks_pin(cuda, bytes)) {
        spdl__free(&cuda->desc.allocator, memory, bytes);
        return;
    }
    if (cuda->process != (long)getpid()) return; /* it is not mapped here */
    arena = spdl__arena_unlink(cuda, memory);
    if (arena == NULL) return;
    entered = spdl__cuda_enter(cuda, &scope, true) == SPDL_OK;
    spdl__slab_end(cuda, arena, entered);
    if (entered) spdl__cuda_leave(cuda, &scope);
    spdl__free(&cuda->desc.allocator, arena, sizeof(*arena));
}

SPDL_API spdl_allocator spdl_cuda_slots(spdl_cuda *cuda) {
    spdl_allocator allocator;
    allocator.alloc_fn = spdl__blocks_alloc;
    allocator.free_fn = spdl__blocks_free;
    allocator.user = cuda;
    return allocator;
}

/* ============================================================================================= */
/* >>copy-impl
   The copy stream and its numbers: submit, ask, wait, reap; and what of it is in a trace. Any
   thread; see >>state-impl. */

/* Copies that were sent and not yet reclaimed. Loads pair with the stores in submit and reap. */
SPDL__PRIVATE uint64_t spdl__cuda_in_flight(const spdl_cuda *cuda) {
    const uint64_t reclaimed = spdl__load(&cuda->reclaimed);
    return spdl__load(&cuda->sent) - reclaimed;
}

/* The oldest copy in flight; false when there is none. Both numbers are looked at once: a number
   that was reclaimed in between has been sent all the same, one beyond `sent` has not. */
SPDL__PRIVATE bool spdl__cuda_oldest(const spdl_cuda *cuda, uint64_t *number) {
    *number = spdl__load(&cuda->reclaimed); /* first: it never passes `sent` */
    return *number < spdl__load(&cuda->sent);
}

SPDL__PRIVATE spdl__cuda_transfer *spdl__cuda_transfer_of(const spdl_cuda *cuda, uint64_t number) {
    return &cuda->transfer[number % cuda->transfers];
}

/* Something has changed that any of those who wait may wait for. */
SPDL__PRIVATE void spdl__cuda_notify(spdl_cuda *cuda) {
    spdl__event_notify(&cuda->changed, cuda->asymmetric, SPDL__ALL);
}

/* Puts a host slot back. It has been read: its copy was seen to be done, and the ring hands that on
   to the next owner. */
SPDL__PRIVATE void spdl__host_return(spdl_cuda_host *host) {
    spdl__cuda_host *slot = (spdl__cuda_host *)(void *)host;
    spdl__store32(&slot->state, SPDL__HOST_FREE);
    (void)spdl_ring_try_push(host->cuda->free_hosts, &slot); /* has room for all */
    spdl__cuda_notify(host->cuda);
}

SPDL__PRIVATE void spdl__held_release(spdl__cuda_held *held) {
    const spdl__cuda_held was = *held;
    memset(held, 0, sizeof(*held));
    if (was.host != NULL) spdl__host_return(was.host);
    if (was.release != NULL) was.release(was.item);
}

/* ---- what the device did when ---- */

SPDL__PRIVATE bool spdl__cuda_timed(const spdl_cuda *cuda) {
    return cuda->desc.time_copies || spdl__load32(&cuda->tracing); /* pairs as trace_forget says */
}

/* When work that is submitted now was, if a trace is to know of it; else 0. */
SPDL__PRIVATE uint64_t spdl__trace_since(const spdl_cuda *cuda) {
    return spdl__load32(&cuda->tracing) ? spdl_time_ns() : 0;
}

/* Inside of a scope: records one end of a span, if it is to be told. */
SPDL__PRIVATE int spdl__span_record(spdl_cuda *cuda, void *const *event, spdl_cuda_stream stream) {
    if (!spdl__cuda_timed(cuda) || *event == NULL) return 0;
    return SPDL__CUDA(cuda, EventRecord(*event, stream));
}

/* Its number of ns from one event to another; false when there is none. */
SPDL__PRIVATE bool spdl__span_ns(spdl_cuda *cuda, void *from, void *to, double *ns) {
    float ms = 0;
    if (SPDL__CUDA(cuda, EventElapsedTime(&ms, from, to)) != 0) return false;
    *ns = (double)ms * 1e6;
    return true;
}

/* Under lock: what a copy that the device began at `start` and ended at `stop`, by its own clock,
   says of that clock. It began after it was submitted and ended before that was seen, so the
   difference of the clocks is between two bounds; those from before have become wider meanwhile, as
   clocks drift apart by up to 100 ppm. The difference. */
SPDL__PRIVATE double spdl__trace_fit(spdl_cuda *cuda, double since, double start, double stop) {
    const double now = (double)spdl_time_ns(), drift = (now - cuda->fitted_ns) * 1e-4;
    const double low = since - start, high = now - stop;
    const bool first = cuda->fitted_ns <= 0;
    cuda->low_ns = first || low > cuda->low_ns - drift ? low : cuda->low_ns - drift;
    cuda->high_ns = first || high < cuda->high_ns + drift ? high : cuda->high_ns + drift;
    cuda->fitted_ns = now;
    if (cuda->high_ns < cuda->low_ns) cuda->high_ns = cuda->low_ns = (low + high) / 2;
    spdl__store_relaxed(&cuda->trace_error_ns, (uint64_t)((cuda->high_ns - cuda->low_ns) / 2));
    return (cuda->high_ns + cuda->low_ns) / 2;
}

/* Under lock, inside of a scope: time is counted from a new event every 8 s, as a float has only 24
   bits. */
SPDL__PRIVATE void spdl__trace_move(spdl_cuda *cuda, double at) {
    void *event = cuda->origin[1];
    double ns;
    if (!cuda->origin_moves && at - cuda->origin_ns > 8e9)
        cuda->origin_moves = SPDL__CUDA(cuda, EventRecord(event, cuda->stream)) == 0;
    else if (cuda->origin_moves && spdl__span_ns(cuda, cuda->origin[0], event, &ns)) {
        cuda->origin_moves = false;
        cuda->origin_ns += ns;
        cuda->origin[1] = cuda->origin[0];
        cuda->origin[0] = event;
    }
}

/* Under lock, inside of a scope: tells of a span that was seen to be done. */
SPDL__PRIVATE void spdl__work_tell(spdl_cuda *cuda, spdl__cuda_span *span, spdl__device_work what) {
    double took, at, offset;
    uint64_t us;
    unsigned k = 0;
    const uint64_t since = spdl__load_relaxed(&span->since);
    spdl__store_relaxed(&span->since, 0);
    if (since == 0 && what != SPDL__DEVICE_TO) return;
    if (!spdl__cuda_timed(cuda) || span->start == NULL || spdl__load32(&cuda->unloading)) return;
    if (!spdl__span_ns(cuda, span->start, span->stop, &took)) return;
    if (cuda->desc.time_copies && what == SPDL__DEVICE_TO) {
        for (us = (uint64_t)(took / 1000.0); us > 1 && k < 31; us >>= 1) ++k;
        spdl__add(&cuda->copy_us[k], 1);
    }
    if (cuda->traced == NULL || since == 0) return;
    if (!spdl__span_ns(cuda, cuda->origin[0], span->start, &at)) return;
    at += cuda->origin_ns;
    offset = spdl__trace_fit(cuda, (double)since, at, at + took);
    spdl__trace_copy(cuda->traced, what, (uint64_t)(at + offset), (uint64_t)(at + took + offset),
                     span->bytes);
    spdl__trace_move(cuda, at);
}

SPDL__PRIVATE spdl_result spdl__event_make(spdl_cuda *cuda, void **event, unsigned flags) {
    const spdl_result result = *event != NULL ? SPDL_OK
                                              : SPDL__CUDA_TRY(cuda, EventCreate, (event, flags));
    if (result != SPDL_OK) *event = NULL;
    return result;
}

/* Inside of a scope: the events of spans, where there are none yet. */
SPDL__PRIVATE spdl_result spdl__spans_make(spdl_cuda *cuda) {
    spdl_result result = SPDL_OK;
    uint64_t i;
    for (i = 0; i < cuda->transfers && result == SPDL_OK; ++i) {
        result = spdl__event_make(cuda, &cuda->transfer[i].span.start, 0);
        if (result == SPDL_OK) result = spdl__event_make(cuda, &cuda->transfer[i].span.stop, 0);
    }
    for (i = 0; i < (uint64_t)cuda->desc.output_slots && result == SPDL_OK; ++i) {
        spdl__cuda_output *output = &cuda->output[i];
        result = spdl__event_make(cuda, &output->launch.start, 0);
        if (result == SPDL_OK) result = spdl__event_make(cuda, &output->launch.stop, 0);
        if (result == SPDL_OK) result = spdl__event_make(cuda, &output->copy.start, 0);
        if (result == SPDL_OK) result = spdl__event_make(cuda, &output->copy.stop, 0);
    }
    for (i = 0; i < 2 && result == SPDL_OK; ++i)
        result = spdl__event_make(cuda, &cuda->origin[i], 0);
    return result;
}

/* Under lock: nothing that is under way is in the trace. */
SPDL__PRIVATE void spdl__trace_forget(spdl_cuda *cuda, const spdl_pipeline *pipeline) {
    uint64_t i;
    cuda->traced = pipeline;
    /* pairs with the loads in cuda_timed and trace_since: the events of spans are there */
    spdl__store32(&cuda->tracing, pipeline != NULL);
    cuda->origin_moves = false;
    cuda->fitted_ns = cuda->origin_ns = 0;
    for (i = 0; i < cuda->transfers; ++i) cuda->transfer[i].span.since = 0;
    for (i = 0; i < (uint64_t)cuda->desc.output_slots; ++i)
        spdl__store_relaxed(&cuda->output[i].launch.since, 0),
            spdl__store_relaxed(&cuda->output[i].copy.since, 0);
}

SPDL_API spdl_result spdl_cuda_trace(spdl_cuda *cuda, const spdl_pipeline *pipeline) {
    spdl__cuda_scope scope;
    spdl_result result = spdl__cuda_usable(cuda);
    const uint64_t error_ns = cuda == NULL ? 0 : spdl__load_relaxed(&cuda->trace_error_ns);
    if (cuda == NULL || result == SPDL_E_CUDA_FORKED || cuda->cpu) return result;
    pthread_mutex_lock(&cuda->lock);
    if (cuda->traced != NULL && pipeline == NULL)
        spdl__logf(&cuda->desc.logger, SPDL_LOG_INFO,
                   "spdl: cuda: the copies in the trace are right to %.1f us",
                   (double)error_ns * 1e-3);
    if (pipeline != NULL && result == SPDL_OK) result = spdl__cuda_enter(cuda, &scope, true);
    if (pipeline != NULL && result == SPDL_OK) {
        result = spdl__spans_make(cuda);
        if (result == SPDL_OK)
            result = SPDL__CUDA_TRY(cuda, EventRecord, (cuda->origin[0], cuda->stream));
        spdl__cuda_leave(cuda, &scope);
    }
    spdl__trace_forget(cuda, result == SPDL_OK ? pipeline : NULL);
    pthread_mutex_unlock(&cuda->lock);
    return result;
}

/* ---- asking and waiting ---- */

/* Under lock: tells of the copy with this number, which was seen to be done. */
SPDL__PRIVATE void spdl__reap_tell(spdl_cuda *cuda, spdl__cuda_transfer *transfer) {
    spdl__cuda_scope scope;
    if (!spdl__cuda_timed(cuda) || spdl__cuda_enter(cuda, &scope, true) != SPDL_OK) return;
    spdl__work_tell(cuda, &transfer->span, SPDL__DEVICE_TO);
    spdl__cuda_leave(cuda, &scope);
}

/* Reclaims the numbers before `until`, whose copies the caller has seen to be done, and gives their
   sources back (E1). */
SPDL__PRIVATE void spdl__cuda_reap(spdl_cuda *cuda, uint64_t until) {
    for (;;) {
        spdl__cuda_transfer *transfer;
        spdl__cuda_held held;
        pthread_mutex_lock(&cuda->lock);
        if (cuda->reclaimed >= until) break;
        transfer = spdl__cuda_transfer_of(cuda, cuda->reclaimed);
        spdl__reap_tell(cuda, transfer);
        held = transfer->held;
        memset(&transfer->held, 0, sizeof(transfer->held));
        /* pairs with the load in ready: who sees it may do without waiting for the event */
        spdl__store(&cuda->reclaimed, cuda->reclaimed + 1);
        pthread_mutex_unlock(&cuda->lock);
        spdl__held_release(&held); /* not under the lock: it may be the caller's function */
    }
    pthread_mutex_unlock(&cuda->lock);
}

SPDL__PRIVATE spdl_result spdl__event_ask(spdl_cuda *cuda, void *event, bool *done) {
    spdl__cuda_scope scope;
    spdl_result result = spdl__cuda_enter(cuda, &scope, true);
    int code;
    *done = false;
    if (result != SPDL_OK) return result;
    code = SPDL__CUDA(cuda, EventQuery(event));
    spdl__cuda_leave(cuda, &scope);
    *done = code == 0;
    return code == SPDL__CU_NOT_READY ? SPDL_OK : spdl__cuda_check(cuda, "cuEventQuery", code);
}

SPDL__PRIVATE spdl_result spdl__event_sync(spdl_cuda *cuda, void *event) {
    spdl__cuda_scope scope;
    spdl_result result = spdl__cuda_enter(cuda, &scope, true);
    if (result != SPDL_OK) return result;
    result = SPDL__CUDA_TRY(cuda, EventSynchronize, (event));
    spdl__cuda_leave(cuda, &scope);
    return result;
}

/* Waits for an event; CUDA has no such call with an end, so with one it asks, and sleeps in between
   for longer and longer. */
SPDL__PRIVATE spdl_result spdl__event_wait(spdl_cuda *cuda, void *event, uint64_t deadline) {
    uint64_t nap_ns = 10000, now;
    spdl_result result;
    bool done;
    if (deadline == SPDL__NEVER) return spdl__event_sync(cuda, event);
    for (;;) {
        result = spdl__event_ask(cuda, event, &done);
        if (result != SPDL_OK || done) return result;
        now = spdl_time_ns();
        if (now >= deadline) return SPDL_TIMEOUT;
        (void)spdl__os_event_sleep(&cuda->changed, spdl__load32(&cuda->changed.word),
                                   spdl__min(now + nap_ns, deadline));
        if (nap_ns < 250000) nap_ns *= 2;
    }
}

/* Asks whether the copies before `until` are done, and reaps them if so. */
SPDL__PRIVATE spdl_result spdl__cuda_reap_if_done(spdl_cuda *cuda, uint64_t until, bool *done) {
    const spdl_result result =
        spdl__event_ask(cuda, spdl__cuda_transfer_of(cuda, until - 1)->event, done);
    if (result == SPDL_OK && *done) spdl__cuda_reap(cuda, until);
    return result;
}

/* Waits until a copy or two have been reaped. Two when three are in flight and there is time: half
   the calls, and there is still one to go on with. It was the device that was waited for, not the
   bus, when it has still not done the work on the batch before: it had enough to do. */
SPDL__PRIVATE spdl_result spdl__cuda_await_copy(spdl_cuda *cuda, uint64_t deadline) {
    const uint64_t start = spdl_time_ns();
    uint64_t until, stop;
    spdl_result result;
    void *reader = NULL;
    bool idle = true;
    if (!spdl__cuda_oldest(cuda, &until)) return SPDL_OK;
    until += deadline == SPDL__NEVER && spdl__load(&cuda->sent) - until >= 3 ? 2u : 1u;
    result = spdl__event_wait(cuda, spdl__cuda_transfer_of(cuda, until - 1)->event, deadline);
    stop = spdl_time_ns();
    if (result == SPDL_OK) spdl__cuda_reap(cuda, until);
    if (result == SPDL_OK && until >= 2)
        reader = spdl__load_pointer(&spdl__cuda_transfer_of(cuda, until - 2)->reader);
    if (reader != NULL && stop - start > 50000 && /* or it is not worth a call */
        spdl__event_ask(cuda, reader, &idle) != SPDL_OK)
        idle = true; /* the next call will say so */
    spdl__add(idle ? &cuda->wait_bus_ns : &cuda->wait_device_ns, stop - start);
    return result;
}

/* What was waited for copies since it was told last is added to a counter of a pipeline. */
SPDL__PRIVATE void spdl__cuda_tell(spdl_cuda *cuda, uint64_t *counter) {
    const uint64_t now = spdl__load_relaxed(&cuda->wait_bus_ns);
    uint64_t told = spdl__load_relaxed(&cuda->told_bus_ns);
    if (told < now && spdl__cas_relaxed(&cuda->told_bus_ns, &told, now))
        spdl__add(counter, now - told);
}

/* All copies are done and reaped. */
SPDL__PRIVATE spdl_result spdl__cuda_drain(spdl_cuda *cuda) {
    spdl_result result = SPDL_OK;
    while (result == SPDL_OK && spdl__cuda_in_flight(cuda) > 0) {
        const uint64_t until = spdl__load(&cuda->sent);
        result = spdl__event_sync(cuda, spdl__cuda_transfer_of(cuda, until - 1)->event);
        if (result == SPDL_OK) spdl__cuda_reap(cuda, until);
    }
    return result;
}

/* What a wait of 1 s may mean: who has what there is none of. Not while the trainer is busy with
   something else than waiting for the pipeline. */
SPDL__PRIVATE void spdl__cuda_stalled(spdl_cuda *cuda, const char *what, uint64_t start) {
    int state[4] = { 0, 0, 0, 0 }, i;
    if (spdl_time_ns() - start < 1000000000) return;
    if (spdl__load32(&cuda->iterating) && spdl__load(&cuda->fetcher) == 0) return;
    if (spdl__exchange32(&cuda->told, 1) != 0) return;
    for (i = 0; i < cuda->desc.host_slots; ++i) ++state[spdl__load32(&cuda->host[i].state)];
    spdl__logf(&cuda->desc.logger, SPDL_LOG_WARN,
               "spdl: cuda: %s has been waited for for 1 s: of %d host slots %d are filled or "
               "being filled, in stages and between them, %d are read by copies or kept with "
               "their batches; of %d device slots %d hold batches that nobody was done with; of "
               "%d outputs %d were not freed",
               what, cuda->desc.host_slots, state[SPDL__HOST_FILLING],
               state[SPDL__HOST_SENDING] + state[SPDL__HOST_SENT], cuda->desc.device_slots,
               cuda->desc.device_slots - (int)spdl_ring_count(cuda->free_slots),
               cuda->desc.output_slots,
               cuda->free_outputs == NULL
                   ? 0
                   : cuda->desc.output_slots - (int)spdl_ring_count(cuda->free_outputs));
}

/* ---- sending ---- */

/* What is to be copied. */
typedef struct spdl__cuda_job {
    const void *data;
    size_t bytes;
    int array_count;
    const spdl_cuda_array *array;
    spdl_cuda_array less; /* what that may point to */
    void *user;
    spdl__cuda_held held;
    uint64_t deadline;
    uint64_t since; /* when it was submitted */
    bool pageable;
} spdl__cuda_job;

/* Inside of a scope, under lock: E3, the copy, its event. */
SPDL__PRIVATE spdl_result spdl__submit_calls(spdl_cuda *cuda, spdl__cuda_slot *slot,
                                             spdl__cuda_transfer *transfer,
                                             const spdl__cuda_job *job) {
    const uint64_t to = (uint64_t)(uintptr_t)slot->memory;
    const char *call = "cuStreamWaitEvent";
    int i, code = 0;
    for (i = 0; i < SPDL_CUDA_MAX_READERS && code == 0; ++i) {
        void *done = slot->reader[i].event[slot->reader[i].lap];
        if (slot->reader[i].state == SPDL__READER_DONE)
            code = SPDL__CUDA(cuda, StreamWaitEvent(cuda->stream, done, 0));
    }
    if (code == 0) {
        call = "cuEventRecord";
        code = spdl__span_record(cuda, &transfer->span.start, cuda->stream);
    }
    if (code == 0 && job->bytes > 0) {
        call = "cuMemcpyHtoDAsync";
        code = SPDL__CUDA(cuda, MemcpyHtoDAsync(to, job->data, job->bytes, cuda->stream));
    }
    if (code == 0) {
        call = "cuEventRecord";
        code = spdl__span_record(cuda, &transfer->span.stop, cuda->stream);
    }
    if (code == 0) code = SPDL__CUDA(cuda, EventRecord(transfer->event, cuda->stream));
    return spdl__cuda_check(cuda, call, code);
}

/* Under lock. On failure nothing is under way. */
SPDL__PRIVATE spdl_result spdl__submit_copy(spdl_cuda *cuda, spdl__cuda_slot *slot,
                                            const spdl__cuda_job *job) {
    spdl__cuda_transfer *transfer = spdl__cuda_transfer_of(cuda, cuda->sent);
    spdl__cuda_reader copies;
    spdl__cuda_scope scope;
    spdl_result result = spdl__cuda_enter(cuda, &scope, job->pageable);
    if (result != SPDL_OK) return result;
    result = spdl__submit_calls(cuda, slot, transfer, job);
    spdl__cuda_leave(cuda, &scope);
    if (result != SPDL_OK) {
        copies = spdl__stream_of(cuda->stream);
        spdl__stream_settle(cuda, &copies);
        return spdl__load32(&cuda->lost) ? SPDL_E_CUDA_LOST : result;
    }
    transfer->span.since = spdl__load_relaxed32(&cuda->tracing) ? job->since : 0;
    transfer->span.bytes = job->bytes;
    return SPDL_OK;
}

/* Sends a job to a device slot that is ours alone, and fills in the slot's batch. On failure the
   job and the slot are the caller's still. On the CPU the batch is the source itself. */
SPDL__PRIVATE spdl_result spdl__cuda_submit(spdl_cuda *cuda, spdl__cuda_slot *slot,
                                            spdl__cuda_job *job) {
    const bool keeps = cuda->cpu || cuda->desc.keep_host;
    spdl_cuda_batch *batch = &slot->batch;
    spdl__cuda_transfer *transfer;
    spdl_result result = SPDL_OK;
    int i;
    pthread_mutex_lock(&cuda->lock);
    while (cuda->sent - cuda->reclaimed == cuda->transfers && result == SPDL_OK) {
        pthread_mutex_unlock(&cuda->lock);
        result = spdl__cuda_await_copy(cuda, job->deadline);
        pthread_mutex_lock(&cuda->lock);
    }
    job->since = spdl_time_ns();
    if (result == SPDL_OK && !cuda->cpu) result = spdl__submit_copy(cuda, slot, job);
    if (result != SPDL_OK) {
        pthread_mutex_unlock(&cuda->lock);
        return result;
    }
    /* before the source is given back, which may hold them */
    if (job->array_count > 0)
        memcpy(slot->array, job->array, (size_t)job->array_count * sizeof(job->array[0]));
    batch->dev = cuda->cpu ? SPDL__UNCONST(job->data) : slot->memory;
    batch->host = keeps ? job->data : NULL;
    batch->user = job->user;
    batch->bytes = job->bytes;
    batch->array_count = job->array_count;
    batch->sequence = slot->transfer = cuda->sent;
    transfer = spdl__cuda_transfer_of(cuda, cuda->sent);
    spdl__store_pointer(&transfer->reader, (void *)NULL);
    slot->held = keeps ? job->held : slot->held;
    if (!keeps) transfer->held = job->held;
    for (i = 0; i < SPDL_CUDA_MAX_READERS; ++i) slot->reader[i].state = SPDL__READER_NONE;
    /* pairs with the loads in slot_of: odd is SENT */
    spdl__store(&slot->ticket, slot->ticket + 1);
    batch->ticket_ = slot->ticket;
    /* pairs with the loads of those who ask for, or wait for, copies: the event is recorded */
    spdl__store(&cuda->sent, cuda->sent + 1);
    if (cuda->cpu) spdl__store(&cuda->reclaimed, cuda->sent);
    pthread_mutex_unlock(&cuda->lock);
    spdl__add(&cuda->batches, 1);
    spdl__add(&cuda->bytes, job->bytes);
    spdl__cuda_notify(cuda); /* there is a copy to wait for */
    return SPDL_OK;
}

/* ============================================================================================= */
/* >>slots-impl
   Level 1, on top of the copy stream: host slots, sending, readers. Each function checks the state
   of what it is given before it does anything. */

/* ---- turns ----
   A row with input order and a concurrency above 1 hands on its results in the
   order of its tickets. If later calls had all that there is of something, and an earlier one none,
   all would wait for each other. So a call gets one when there are more than calls before it that
   may still ask, and the first always. */

/* Under turns->lock: how many calls before this one have neither ended nor got one. */
SPDL__PRIVATE uint64_t spdl__turns_before(spdl__cuda_turns *turns, const spdl_task *task) {
    const spdl__edge *out = &task->node->out;
    const uint64_t head = spdl__head(spdl__load(&out->word));
    uint64_t before = 0, at;
    if (turns->node != task->node || turns->since != task->pipeline->start_ns ||
        task->ticket < turns->next || head < turns->head) {
        turns->node = task->node; /* another row, or it was rewound */
        turns->since = task->pipeline->start_ns;
        turns->next = head;
        turns->taken = 0;
    }
    turns->head = head;
    while (turns->next < task->ticket && /* those that have ended; others may ask once more */
           (turns->next < head || spdl__edge_ready(out, turns->next))) {
        ++turns->next;
        turns->taken >>= 1;
    }
    for (at = turns->next; at < task->ticket; ++at) {
        const uint64_t i = at - turns->next;
        before += i >= 64 || (!(turns->taken >> i & 1) && !spdl__edge_ready(out, at));
    }
    return before;
}

/* Whether nobody wants what a call makes: the pipeline stops, or a call before it, which the others
   would wait for, has failed for good. */
SPDL__PRIVATE bool spdl__turns_over(const spdl_task *task) {
    return spdl_stopping(task) ||
           (task->node->by_ticket && task->ticket > spdl__load(&task->node->cut));
}

/* Whether a call has got its own, from here on. */
SPDL__PRIVATE void spdl__turns_mark(spdl__cuda_turns *turns, const spdl__node *node,
                                    uint64_t ticket, bool taken) {
    if (node == NULL) return;
    spdl__spin_lock(&turns->lock);
    if (turns->node == node && ticket - turns->next < 64) {
        turns->taken &= ~((uint64_t)1 << (ticket - turns->next));
        turns->taken |= (uint64_t)taken << (ticket - turns->next);
    }
    spdl__spin_unlock(&turns->lock);
}

/* Takes a pointer out of the ring, if it is the call's turn. `strictly`: only when no call before
   it may still ask; then the caller marks it. */
SPDL__PRIVATE bool spdl__turns_pop(spdl__cuda_turns *turns, const spdl_task *task, spdl_ring *ring,
                                   void *pointer, bool strictly) {
    uint64_t before, i;
    bool got;
    if (task == NULL || !task->node->by_ticket) return spdl_ring_try_pop(ring, pointer) == SPDL_OK;
    spdl__spin_lock(&turns->lock);
    before = spdl__turns_before(turns, task);
    i = task->ticket - turns->next;
    got = i < 64 && (strictly ? before == 0 : spdl_ring_count(ring) > before) &&
          spdl_ring_try_pop(ring, pointer) == SPDL_OK;
    if (got && !strictly) turns->taken |= (uint64_t)1 << i;
    spdl__spin_unlock(&turns->lock);
    return got;
}

/* ---- host slots ---- */

/* Whether the caller may make the CUDA calls that get a slot back: always on the thread that
   fetches for an iterator, as a source that runs there would wait for itself otherwise; else unless
   an iterator is open, which does that. One may be opened or closed during a wait. */
SPDL__PRIVATE bool spdl__host_reaps(const spdl_cuda *cuda) {
    return spdl__load32(&cuda->iterating) == 0 ||
           spdl__load(&cuda->fetcher) == spdl__os_thread_id();
}

/* Waits for a copy, if the caller may and nobody else does; else for whatever changes. */
SPDL__PRIVATE spdl_result spdl__host_sleep(spdl_cuda *cuda, const spdl_task *task, void *slot,
                                           bool *got, uint64_t until, uint64_t deadline) {
    const uint32_t word = spdl__event_prepare(&cuda->changed, cuda->asymmetric);
    spdl_result result = SPDL_OK;
    uint32_t nobody = 0;
    *got = spdl__turns_pop(&cuda->host_turns, task, cuda->free_hosts, slot, false);
    if (!*got && spdl__load32(&cuda->lost) == 0 && spdl__host_reaps(cuda) &&
        spdl__cuda_in_flight(cuda) > 0 && spdl__cas32(&cuda->reaper, &nobody, 1)) {
        spdl__event_cancel(&cuda->changed);
        result = spdl__cuda_await_copy(cuda, deadline);
        spdl__store32(&cuda->reaper, 0);
        spdl__cuda_notify(cuda); /* another may be the one who waits for copies now */
        *got = spdl__turns_pop(&cuda->host_turns, task, cuda->free_hosts, slot, false);
    } else if (*got || spdl__load32(&cuda->lost) != 0) {
        spdl__event_cancel(&cuda->changed);
    } else {
        (void)spdl__event_commit(&cuda->changed, word, until);
    }
    return result == SPDL_TIMEOUT ? SPDL_OK : result;
}

/* A free host slot, for a stage or, with task NULL, for anybody. */
SPDL__PRIVATE spdl_result spdl__host_take(spdl_cuda *cuda, const spdl_task *task,
                                          spdl__cuda_host **slot, uint64_t deadline) {
    const uint64_t start = spdl_time_ns(), slice_ns = 20000000;
    spdl_result result;
    bool got, late = false;
    if (cuda->free_hosts == NULL)
        return spdl__cuda_refuse(cuda, SPDL_E_INVALID, "host_slots is -1: there are none");
    got = spdl__turns_pop(&cuda->host_turns, task, cuda->free_hosts, slot, false);
    while (!got) {
        const uint64_t now = spdl_time_ns();
        result = spdl__cuda_usable(cuda);
        if (result != SPDL_OK) return result; /* lost: all are woken */
        if (task != NULL && spdl__turns_over(task)) return SPDL_SKIP;
        if (late) return SPDL_TIMEOUT;
        late = now >= deadline; /* copies are asked about once, also without any time */
        spdl__cuda_stalled(cuda, "a host slot", start);
        result = spdl__host_sleep(cuda, task, slot, &got, spdl__min(now + slice_ns, deadline),
                                  deadline);
        if (result != SPDL_OK && !got) return result;
    }
    (*slot)->host.bytes = cuda->array_bytes;
    (*slot)->host.array_count = cuda->array_count;
    if (cuda->array_count > 0)
        memcpy((*slot)->host.array, cuda->desc.array, sizeof(cuda->desc.array));
    (*slot)->host.user = NULL;
    (*slot)->node = task != NULL ? task->node : NULL;
    (*slot)->ticket = task != NULL ? task->ticket : 0;
    spdl__store32(&(*slot)->state, SPDL__HOST_FILLING);
    if (task != NULL) spdl__cuda_notify(cuda); /* it is another call's turn */
    return SPDL_OK;
}

SPDL_API spdl_result spdl_cuda_host_get(spdl_cuda *cuda, spdl_cuda_host **host,
                                        int64_t timeout_ns) {
    spdl__cuda_host *slot;
    spdl_result result;
    if (host == NULL) return SPDL_E_INVALID;
    *host = NULL;
    result = spdl__cuda_usable(cuda);
    if (result == SPDL_OK)
        result = spdl__host_take(cuda, NULL, &slot, spdl__deadline(timeout_ns));
    if (result == SPDL_OK) *host = &slot->host;
    return result;
}

/* What a stage returns when a call of ours has failed. */
SPDL__PRIVATE spdl_result spdl__stage_fails(spdl_task *task, spdl_cuda *cuda, spdl_result result) {
    spdl_error error;
    spdl_cuda_error(cuda, &error);
    (void)spdl_fail(task, "%.*s", (int)sizeof(error.text) - 1,
                    error.text[0] != '\0' ? error.text : spdl_result_text(result));
    return result;
}

SPDL_API spdl_result spdl_cuda_host_take(spdl_task *task, spdl_cuda *cuda, spdl_cuda_host **host) {
    spdl__cuda_host *slot;
    spdl_result result;
    if (task == NULL || host == NULL) return SPDL_E_INVALID;
    *host = NULL;
    result = spdl__cuda_usable(cuda);
    if (result == SPDL_OK) result = spdl__host_take(cuda, task, &slot, SPDL__NEVER);
    if (result == SPDL_OK) *host = &slot->host;
    return result < 0 ? spdl__stage_fails(task, cuda, result) : result;
}

SPDL_API void spdl_cuda_host_free(void *host) {
    spdl__cuda_host *slot = (spdl__cuda_host *)host;
    uint32_t filling = SPDL__HOST_FILLING;
    if (slot == NULL || slot->host.cuda->process != (long)getpid()) return;
    if (!spdl__cas32(&slot->state, &filling, SPDL__HOST_SENDING)) return;
    spdl__turns_mark(&slot->host.cuda->host_turns, slot->node, slot->ticket, false);
    spdl__host_return(&slot->host);
}

/* The bytes of one element: the digits at the end of a type of NumPy's. 0: there are none. */
SPDL__PRIVATE size_t spdl__type_bytes(const char *type) {
    const size_t most = sizeof(((spdl_cuda_array *)NULL)->type);
    size_t length = 0, at, bytes = 0;
    while (length < most && type[length] != '\0') ++length;
    for (at = length; at > 0 && type[at - 1] >= '0' && type[at - 1] <= '9'; --at) {}
    for (; at < length; ++at) bytes = bytes * 10 + (size_t)(type[at] - '0');
    return length < most ? bytes : 0;
}

/* Lays an array out behind `*bytes`, within `most`: fills in offset and bytes. SPDL_E_INVALID: type
   or dimensions; SPDL_E_LIMIT: it does not fit. */
SPDL__PRIVATE spdl_result spdl__array_place(spdl_cuda_array *array, size_t *bytes, size_t most) {
    size_t item = spdl__type_bytes(array->type);
    const size_t offset = spdl__round_up(*bytes, SPDL_CUDA_ALIGN);
    int i;
    if (item == 0 || array->ndim < 0 || array->ndim > SPDL_CUDA_MAX_DIMS) return SPDL_E_INVALID;
    if (offset > most) return SPDL_E_LIMIT;
    for (i = 0; i < array->ndim; ++i)
        if (array->shape[i] == 0) item = 0;
    for (i = 0; i < array->ndim && item > 0; ++i) {
        if (array->shape[i] > (most - offset) / item) return SPDL_E_LIMIT;
        item *= (size_t)array->shape[i];
    }
    if (item > most - offset) return SPDL_E_LIMIT;
    array->offset = offset;
    array->bytes = item;
    *bytes = offset + item;
    return SPDL_OK;
}

SPDL_API spdl_result spdl_cuda_host_add(spdl_cuda_host *host, const char *name, const char *type,
                                        int ndim, const uint64_t *shape, void **data) {
    spdl_cuda_array *array;
    spdl_result result = SPDL_E_LIMIT;
    if (host == NULL || name == NULL || data == NULL) return SPDL_E_INVALID;
    *data = NULL;
    if (host->cuda->process != (long)getpid()) return SPDL_E_CUDA_FORKED; /* it is not mapped */
    if (spdl__load32(&((spdl__cuda_host *)(void *)host)->state) != SPDL__HOST_FILLING)
        return spdl__cuda_refuse(host->cuda, SPDL_E_INVALID, "host_add: the slot is not being "
                                                             "filled; it was sent or freed");
    if (type == NULL || ndim < 0 || ndim > SPDL_CUDA_MAX_DIMS || (ndim > 0 && shape == NULL))
        result = SPDL_E_INVALID;
    if (result != SPDL_E_INVALID && host->array_count < SPDL_CUDA_MAX_ARRAYS) {
        array = &host->array[host->array_count];
        memset(array, 0, sizeof(*array));
        spdl__name_copy(array->name, name);
        (void)snprintf(array->type, sizeof(array->type), "%s", type);
        array->ndim = ndim;
        if (ndim > 0) memcpy(array->shape, shape, (size_t)ndim * sizeof(shape[0]));
        result = strlen(type) < sizeof(array->type)
                     ? spdl__array_place(array, &host->bytes, host->capacity)
                     : SPDL_E_INVALID;
    }
    if (result == SPDL_E_INVALID)
        return spdl__cuda_refuse(host->cuda, result,
                                 "host_add: types are like \"<f4\", dimensions 0 to 8");
    if (result == SPDL_E_LIMIT)
        return spdl__cuda_refuse(host->cuda, result,
                                 "host_add: the slot is full (slot_bytes, or 16 arrays)");
    *data = spdl_cuda_host_at(host, host->array_count++);
    return SPDL_OK;
}

SPDL_API void *spdl_cuda_host_at(const spdl_cuda_host *host, int i) {
    if (host == NULL || i < 0 || i >= host->array_count) return NULL;
    return (char *)host->data + host->array[i].offset;
}

/* ---- sending ---- */

SPDL__PRIVATE int64_t spdl__time_left(uint64_t deadline) {
    const uint64_t now = deadline == SPDL__NEVER ? 0 : spdl_time_ns();
    if (deadline == SPDL__NEVER) return SPDL_FOREVER;
    return now < deadline ? (int64_t)(deadline - now) : 0;
}

/* Out of a ring of what is free; closed is lost. */
SPDL__PRIVATE spdl_result spdl__free_pop(spdl_cuda *cuda, spdl_ring *ring, void *pointer,
                                         const char *what, uint64_t deadline) {
    const int64_t second = 1000000000;
    spdl_result result = spdl_ring_try_pop(ring, pointer);
    int64_t left = spdl__time_left(deadline);
    uint64_t start;
    if (result == SPDL_EMPTY && left == 0) return SPDL_TIMEOUT;
    if (result != SPDL_EMPTY) return result == SPDL_CLOSED ? SPDL_E_CUDA_LOST : result;
    start = spdl_time_ns();
    result = spdl_ring_pop(ring, pointer, left < 0 || left > second ? second : left);
    if (result == SPDL_TIMEOUT && (left < 0 || left > second)) {
        spdl__cuda_stalled(cuda, what, start);
        result = spdl_ring_pop(ring, pointer, spdl__time_left(deadline));
    }
    spdl__add(&cuda->wait_device_ns, spdl_time_ns() - start);
    return result == SPDL_CLOSED ? SPDL_E_CUDA_LOST : result;
}

/* Takes a device slot and sends the job there. */
SPDL__PRIVATE spdl_result spdl__cuda_send(spdl_cuda *cuda, spdl__cuda_job *job,
                                          spdl__cuda_slot **slot) {
    spdl_result result =
        spdl__free_pop(cuda, cuda->free_slots, slot, "a device slot", job->deadline);
    if (result != SPDL_OK) return result;
    result = spdl__cuda_submit(cuda, *slot, job);
    if (result != SPDL_OK) (void)spdl_ring_try_push(cuda->free_slots, slot); /* room for all */
    return result;
}

SPDL__PRIVATE void spdl__job_of_host(spdl__cuda_job *job, spdl_cuda_host *host) {
    memset(job, 0, sizeof(*job));
    job->data = host->data;
    job->bytes = host->bytes;
    job->array_count = host->array_count;
    job->array = host->array;
    job->user = host->user;
    job->pageable = !host->cuda->slab.pinned;
    job->held.host = host;
}

/* Sends a host slot that is being filled; its state goes back when that fails. */
SPDL__PRIVATE spdl_result spdl__host_send(spdl_cuda_host *host, spdl__cuda_slot **slot,
                                          uint64_t deadline) {
    spdl__cuda_host *from = (spdl__cuda_host *)(void *)host;
    uint32_t filling = SPDL__HOST_FILLING;
    spdl__cuda_job job;
    spdl_result result;
    if (!spdl__cas32(&from->state, &filling, SPDL__HOST_SENDING))
        return spdl__cuda_refuse(host->cuda, SPDL_E_INVALID,
                                 "send: the slot is not being filled; it was sent or freed");
    spdl__job_of_host(&job, host);
    job.deadline = deadline;
    result = spdl__cuda_send(host->cuda, &job, slot);
    if (result != SPDL_OK) spdl__store32(&from->state, SPDL__HOST_FILLING);
    return result;
}

SPDL__PRIVATE spdl_result spdl__cuda_may_send(spdl_cuda *cuda) {
    const spdl_result result = spdl__cuda_usable(cuda);
    if (result != SPDL_OK || spdl__load32(&cuda->iterating) == 0) return result;
    return spdl__cuda_refuse(cuda, SPDL_E_INVALID, "send: an iterator is open, which does that");
}

SPDL_API spdl_result spdl_cuda_send(spdl_cuda_host *host, spdl_cuda_batch *batch,
                                    int64_t timeout_ns) {
    spdl__cuda_slot *slot;
    spdl_result result;
    if (host == NULL || batch == NULL) return SPDL_E_INVALID;
    result = spdl__cuda_may_send(host->cuda);
    if (result == SPDL_OK) result = spdl__host_send(host, &slot, spdl__deadline(timeout_ns));
    if (result == SPDL_OK) *batch = slot->batch;
    return result;
}

/* Whether the device can read this where it is: in an arena, in one piece of it that is pinned. (On
   the CPU any memory will do.) */
SPDL__PRIVATE bool spdl__cuda_adopted(spdl_cuda *cuda, const void *data, size_t bytes) {
    const uintptr_t from = (uintptr_t)data;
    const spdl__cuda_slab *arena;
    bool found = false;
    if (cuda->cpu) return true;
    pthread_mutex_lock(&cuda->lock);
    for (arena = cuda->arenas; arena != NULL && !found; arena = arena->next) {
        const uintptr_t base = (uintptr_t)arena->base;
        found = arena->pinned && from >= base && from - base <= arena->bytes &&
                bytes <= arena->bytes - (from - base) &&
                (bytes == 0 ||
                 (from - base) / arena->piece == (from - base + bytes - 1) / arena->piece);
    }
    pthread_mutex_unlock(&cuda->lock);
    return found;
}

/* What is to be sent of a view; the arrays are the desc's where it has none. */
SPDL__PRIVATE spdl_result spdl__job_of_view(spdl_cuda *cuda, spdl__cuda_job *job,
                                            const spdl_cuda_view *view) {
    const spdl_cuda_array *only = cuda->array_count == 1 ? &cuda->desc.array[0] : NULL;
    const bool laid = view->array_count == 0 && view->bytes >= cuda->array_bytes;
    const size_t row =
        only && only->ndim > 0 && only->bytes > 0 ? only->bytes / (size_t)only->shape[0] : 0;
    if (view->bytes > cuda->desc.slot_bytes)
        return spdl__cuda_refuse(cuda, SPDL_E_LIMIT, "send_view: larger than slot_bytes");
    if (view->array_count < 0 || view->array_count > SPDL_CUDA_MAX_ARRAYS)
        return spdl__cuda_refuse(cuda, SPDL_E_LIMIT, "send_view: more than 16 arrays");
    if ((view->data == NULL && view->bytes > 0) || (view->array == NULL && view->array_count > 0))
        return spdl__cuda_refuse(cuda, SPDL_E_INVALID, "send_view: no data or no arrays");
    memset(job, 0, sizeof(*job));
    job->data = view->data;
    job->bytes = view->bytes;
    job->array_count = laid ? cuda->array_count : view->array_count;
    job->array = laid ? cuda->desc.array : view->array;
    if (view->array_count == 0 && !laid && row > 0 && view->bytes % row == 0) {
        job->less = *only;
        job->less.shape[0] = view->bytes / row;
        job->less.bytes = view->bytes;
        job->array = &job->less;
        job->array_count = 1;
    }
    job->user = view->user;
    job->held.release = view->release;
    job->held.item = view->item;
    return SPDL_OK;
}

/* Memory that the device cannot read is copied to a host slot, with what says what it is. */
SPDL__PRIVATE spdl_result spdl__job_stage(spdl_cuda *cuda, spdl__cuda_job *job, bool *staged) {
    spdl__cuda_host *host;
    spdl_result result;
    *staged = false;
    if (job->held.host != NULL || spdl__cuda_adopted(cuda, job->data, job->bytes)) return SPDL_OK;
    result = spdl__host_take(cuda, NULL, &host, job->deadline);
    if (result != SPDL_OK) return result;
    if (job->bytes > 0) memcpy(host->host.data, job->data, job->bytes);
    if (job->array_count > 0)
        memcpy(host->host.array, job->array, (size_t)job->array_count * sizeof(job->array[0]));
    spdl__add(&cuda->copied_bytes, job->bytes);
    job->data = host->host.data;
    job->array = host->host.array;
    job->pageable = !cuda->slab.pinned;
    memset(&job->held, 0, sizeof(job->held));
    job->held.host = &host->host;
    *staged = true;
    return SPDL_OK;
}

SPDL_API spdl_result spdl_cuda_send_view(spdl_cuda *cuda, const spdl_cuda_view *view,
                                         spdl_cuda_batch *batch, int64_t timeout_ns) {
    spdl__cuda_slot *slot = NULL;
    spdl__cuda_job job;
    spdl_result result;
    bool staged = false;
    if (view == NULL || batch == NULL) return SPDL_E_INVALID;
    result = spdl__cuda_may_send(cuda);
    if (result == SPDL_OK) result = spdl__job_of_view(cuda, &job, view);
    if (result != SPDL_OK) return result;
    job.deadline = spdl__deadline(timeout_ns);
    result = spdl__job_stage(cuda, &job, &staged);
    if (result == SPDL_OK) result = spdl__cuda_send(cuda, &job, &slot);
    if (result == SPDL_OK) *batch = slot->batch;
    if (result != SPDL_OK && staged) spdl__host_return(job.held.host);
    if (result == SPDL_OK && staged && view->release != NULL) view->release(view->item);
    return result;
}

SPDL_API spdl_result spdl_cuda_reap(spdl_cuda *cuda, int64_t timeout_ns) {
    spdl_result result = spdl__cuda_usable(cuda);
    uint64_t oldest;
    bool done = true;
    if (result == SPDL_OK && spdl__load32(&cuda->iterating) != 0)
        return spdl__cuda_refuse(cuda, SPDL_E_INVALID, "reap: an iterator is open, it does that");
    if (result != SPDL_OK) return result;
    if (spdl__cuda_in_flight(cuda) == 0) return SPDL_EMPTY;
    result = spdl__cuda_await_copy(cuda, spdl__deadline(timeout_ns));
    while (result == SPDL_OK && done && spdl__cuda_oldest(cuda, &oldest)) /* those behind it */
        if (spdl__cuda_reap_if_done(cuda, oldest + 1, &done) != SPDL_OK)
            break; /* the next call will say so */
    return result;
}

/* ---- batches ---- */

/* The slot of a batch that is not done with, or NULL. */
SPDL__PRIVATE spdl__cuda_slot *spdl__slot_of(const spdl_cuda_batch *batch) {
    spdl__cuda_slot *slot = batch == NULL ? NULL : (spdl__cuda_slot *)batch->slot_;
    if (slot == NULL || (batch->ticket_ & 1) == 0) return NULL;
    return spdl__load(&slot->ticket) == batch->ticket_ ? slot : NULL;
}

/* First in every call with a batch; *slot is that. */
SPDL__PRIVATE spdl_result spdl__batch_check(const spdl_cuda_batch *batch, spdl__cuda_slot **slot,
                                            const char *why) {
    spdl_result result;
    if (batch == NULL) return SPDL_E_INVALID;
    result = spdl__cuda_usable(batch->cuda);
    if (result != SPDL_OK) return result;
    *slot = spdl__slot_of(batch);
    return *slot != NULL ? SPDL_OK : spdl__cuda_refuse(batch->cuda, SPDL_E_INVALID, why);
}

SPDL__PRIVATE spdl__cuda_reader *spdl__reader_of(spdl__cuda_slot *slot,
                                                 const spdl__cuda_reader *stream) {
    int i;
    for (i = 0; i < SPDL_CUDA_MAX_READERS; ++i)
        if (slot->reader[i].state != SPDL__READER_NONE &&
            slot->reader[i].stream == stream->stream && slot->reader[i].thread == stream->thread)
            return &slot->reader[i];
    return NULL;
}

/* E2: the stream waits for the copy, unless a host thread has seen that it is done. */
SPDL__PRIVATE spdl_result spdl__slot_wait(spdl_cuda *cuda, spdl__cuda_slot *slot,
                                          spdl_cuda_stream stream, bool checked) {
    void *event = spdl__cuda_transfer_of(cuda, slot->transfer)->event;
    /* pairs with the store in reap: the copy comes before what this thread does from here on */
    const bool done = slot->transfer < spdl__load(&cuda->reclaimed);
    spdl__cuda_scope scope;
    spdl_result result;
    if (done && checked) return SPDL_OK;
    result = spdl__cuda_enter(cuda, &scope, false);
    if (result != SPDL_OK) return result;
    if (!checked) result = spdl__stream_check(cuda, stream);
    if (result == SPDL_OK && !done)
        result = SPDL__CUDA_TRY(cuda, StreamWaitEvent, (stream, event, 0));
    spdl__cuda_leave(cuda, &scope);
    return result;
}

/* Makes the stream a reader. `checked`: work may be put on it. */
SPDL__PRIVATE spdl_result spdl__slot_ready(spdl_cuda *cuda, spdl__cuda_slot *slot,
                                           spdl_cuda_stream handle, bool checked) {
    const spdl__cuda_reader stream = spdl__stream_of(handle);
    spdl__cuda_reader *reader = spdl__reader_of(slot, &stream);
    spdl_result result;
    int i;
    if (reader != NULL && reader->state == SPDL__READER_READING) return SPDL_OK;
    for (i = 0; i < SPDL_CUDA_MAX_READERS && reader == NULL; ++i)
        if (slot->reader[i].state == SPDL__READER_NONE) reader = &slot->reader[i];
    if (reader == NULL)
        return spdl__cuda_refuse(cuda, SPDL_E_LIMIT, "ready: a batch has at most 4 readers");
    result = spdl__slot_wait(cuda, slot, stream.stream, checked);
    if (result != SPDL_OK) return result;
    reader->stream = stream.stream;
    reader->thread = stream.thread;
    reader->state = SPDL__READER_READING;
    return SPDL_OK;
}

SPDL_API spdl_result spdl_cuda_ready(const spdl_cuda_batch *batch, spdl_cuda_stream stream) {
    spdl__cuda_slot *slot = NULL;
    const spdl_result result = spdl__batch_check(batch, &slot, "ready: the batch was done with");
    return result == SPDL_OK ? spdl__slot_ready(batch->cuda, slot, stream, false) : result;
}

SPDL_API spdl_result spdl_cuda_arrived(const spdl_cuda_batch *batch, int64_t timeout_ns) {
    spdl__cuda_slot *slot = NULL;
    spdl_result result = spdl__batch_check(batch, &slot, "arrived: the batch was done with");
    spdl_cuda *cuda;
    if (result != SPDL_OK) return result;
    cuda = batch->cuda;
    if (slot->transfer < spdl__load(&cuda->reclaimed)) return SPDL_OK; /* pairs as in slot_wait */
    result = spdl__event_wait(cuda, spdl__cuda_transfer_of(cuda, slot->transfer)->event,
                              spdl__deadline(timeout_ns));
    if (result == SPDL_OK && spdl__load32(&cuda->iterating) == 0)
        spdl__cuda_reap(cuda, slot->transfer + 1);
    return result;
}

/* All readers are done, or there were none: the slot can be sent to again. What the batch has kept
   goes back with its copy, if that was not seen to be done. */
SPDL__PRIVATE void spdl__slot_retire(spdl_cuda *cuda, spdl__cuda_slot *slot) {
    spdl__cuda_held held = slot->held;
    memset(&slot->held, 0, sizeof(slot->held));
    slot->lent = false;
    spdl__store(&slot->ticket, slot->ticket + 1); /* pairs with the load in slot_of */
    pthread_mutex_lock(&cuda->lock);
    if (slot->transfer >= cuda->reclaimed && (held.host != NULL || held.release != NULL)) {
        spdl__cuda_transfer_of(cuda, slot->transfer)->held = held;
        memset(&held, 0, sizeof(held));
    }
    pthread_mutex_unlock(&cuda->lock);
    spdl__held_release(&held);
    /* pairs with the pop of the next sender: the readers' events are recorded */
    (void)spdl_ring_try_push(cuda->free_slots, &slot);
}

/* E3: records the end of one reader. */
SPDL__PRIVATE spdl_result spdl__reader_done(spdl_cuda *cuda, spdl__cuda_slot *slot,
                                            spdl__cuda_reader *reader) {
    const spdl_result result = spdl__work_record(cuda, reader);
    if (result != SPDL_OK) return result;
    reader->state = SPDL__READER_DONE;
    spdl__store_pointer(&spdl__cuda_transfer_of(cuda, slot->transfer)->reader,
                        reader->event[reader->lap]);
    return SPDL_OK;
}

/* Is done with the batch on every stream that still reads it. */
SPDL__PRIVATE spdl_result spdl__slot_finish(spdl_cuda *cuda, spdl__cuda_slot *slot) {
    spdl_result result = SPDL_OK;
    int i;
    for (i = 0; i < SPDL_CUDA_MAX_READERS && result == SPDL_OK; ++i)
        if (slot->reader[i].state == SPDL__READER_READING)
            result = spdl__reader_done(cuda, slot, &slot->reader[i]);
    return result;
}

/* The same whatever happens: waits for those whose end cannot be recorded. */
SPDL__PRIVATE void spdl__slot_end(spdl_cuda *cuda, spdl__cuda_slot *slot) {
    int i;
    if (spdl__slot_finish(cuda, slot) == SPDL_OK) return;
    for (i = 0; i < SPDL_CUDA_MAX_READERS; ++i) {
        if (slot->reader[i].state != SPDL__READER_READING) continue;
        spdl__stream_settle(cuda, &slot->reader[i]);
        slot->reader[i].state = SPDL__READER_NONE;
    }
}

SPDL_API spdl_result spdl_cuda_done(const spdl_cuda_batch *batch, spdl_cuda_stream handle) {
    const spdl__cuda_reader stream = spdl__stream_of(handle);
    spdl__cuda_slot *slot = NULL;
    spdl__cuda_reader *reader;
    spdl_result result = spdl__batch_check(batch, &slot, "done: the batch was done with");
    int i;
    if (result != SPDL_OK) return result;
    if (slot->lent)
        return spdl__cuda_refuse(batch->cuda, SPDL_E_INVALID,
                                 "done: the batch is the iterator's, which does that itself");
    reader = spdl__reader_of(slot, &stream);
    if (reader == NULL || reader->state != SPDL__READER_READING)
        return spdl__cuda_refuse(batch->cuda, SPDL_E_INVALID,
                                 "done: the batch was not made ready on this stream");
    result = spdl__reader_done(batch->cuda, slot, reader);
    if (result != SPDL_OK) return result;
    for (i = 0; i < SPDL_CUDA_MAX_READERS; ++i)
        if (slot->reader[i].state == SPDL__READER_READING) return SPDL_OK;
    spdl__slot_retire(batch->cuda, slot);
    return SPDL_OK;
}

SPDL_API void spdl_cuda_batch_free(void *batch) {
    spdl_cuda_batch *given = (spdl_cuda_batch *)batch;
    spdl__cuda_slot *slot = spdl__slot_of(given);
    if (slot == NULL || slot->lent || spdl__cuda_usable(given->cuda) != SPDL_OK) return;
    spdl__slot_end(given->cuda, slot);
    spdl__slot_retire(given->cuda, slot);
}

SPDL_API void *spdl_cuda_at(const spdl_cuda_batch *batch, int i) {
    if (spdl__slot_of(batch) == NULL || i < 0 || i >= batch->array_count) return NULL;
    return (char *)batch->dev + batch->array[i].offset;
}

SPDL_API void *spdl_cuda_batch_array(const spdl_cuda_batch *batch, const char *name) {
    int i;
    if (batch == NULL || name == NULL) return NULL;
    for (i = 0; i < batch->array_count; ++i)
        if (strcmp(batch->array[i].name, name) == 0) return spdl_cuda_at(batch, i);
    return NULL;
}

SPDL_API bool spdl_cuda_on_cpu(const spdl_cuda *cuda) { return cuda != NULL && cuda->cpu; }

SPDL_API void spdl_cuda_error(spdl_cuda *cuda, spdl_error *error) {
    if (error == NULL) return;
    spdl__error_clear(error);
    if (cuda == NULL) return;
    if (cuda->process != (long)getpid()) { /* its locks may be held by threads of the parent */
        (void)spdl__error_set(error, SPDL_E_CUDA_FORKED,
                              "spdl: cuda: opened before a fork: the child has to open its own");
        return;
    }
    pthread_mutex_lock(&cuda->error_lock);
    *error = cuda->error;
    pthread_mutex_unlock(&cuda->error_lock);
}

SPDL__PRIVATE size_t spdl__pinned_bytes(const spdl__cuda_slab *slab) {
    return slab->pinned ? slab->bytes : 0;
}

SPDL_API void spdl_cuda_get_stats(const spdl_cuda *cuda, spdl_cuda_stats *stats) {
    int i;
    if (stats == NULL) return;
    memset(stats, 0, sizeof(*stats));
    if (cuda == NULL || cuda->process != (long)getpid()) return;
    stats->on_cpu = cuda->cpu;
    stats->lost = spdl__load32(&cuda->lost) != 0;
    stats->device = cuda->device;
    stats->numa_node = cuda->numa_node;
    stats->host_slots = cuda->desc.host_slots;
    stats->device_slots = cuda->desc.device_slots;
    stats->output_slots = cuda->desc.output_slots;
    if (cuda->free_hosts != NULL) stats->host_free = (int)spdl_ring_count(cuda->free_hosts);
    if (cuda->free_outputs != NULL) stats->output_free = (int)spdl_ring_count(cuda->free_outputs);
    stats->device_free = (int)spdl_ring_count(cuda->free_slots);
    stats->requested_bytes = (size_t)cuda->desc.host_slots * cuda->desc.slot_bytes +
                             (size_t)cuda->desc.output_slots * cuda->desc.output_bytes;
    stats->pinned_bytes =
        spdl__pinned_bytes(&cuda->slab) + spdl__pinned_bytes(&cuda->output_slab);
    stats->adopted_bytes = (size_t)spdl__load_relaxed(&cuda->adopted_bytes);
    stats->batches = spdl__load_relaxed(&cuda->batches);
    stats->bytes = spdl__load_relaxed(&cuda->bytes);
    stats->outputs = spdl__load_relaxed(&cuda->outputs);
    stats->copied_bytes = spdl__load_relaxed(&cuda->copied_bytes);
    stats->cuda_calls = cuda->cpu ? 0 : spdl__load_relaxed(&cuda->calls);
    stats->cuda_checks = cuda->cpu ? 0 : spdl__load_relaxed(&cuda->checks);
    stats->wait_source_ns = spdl__load_relaxed(&cuda->wait_source_ns);
    stats->wait_bus_ns = spdl__load_relaxed(&cuda->wait_bus_ns);
    stats->wait_device_ns = spdl__load_relaxed(&cuda->wait_device_ns);
    stats->wait_next_ns = spdl__load_relaxed(&cuda->wait_next_ns);
    stats->trace_error_ns = spdl__load_relaxed(&cuda->trace_error_ns);
    for (i = 0; i < 32; ++i) stats->copy_us[i] = spdl__load_relaxed(&cuda->copy_us[i]);
}

/* Sends the item of a stage. It looks every 20 ms whether the pipeline is to stop. */
SPDL__PRIVATE spdl_result spdl__stage_send(spdl_task *task, spdl_cuda_host *host,
                                           spdl__cuda_slot **slot) {
    const uint64_t slice_ns = 20000000, start = spdl_time_ns();
    spdl_result result;
    do {
        result = spdl__cuda_may_send(host->cuda);
        if (result == SPDL_OK) result = spdl__host_send(host, slot, spdl_time_ns() + slice_ns);
        if (result == SPDL_TIMEOUT) spdl__cuda_stalled(host->cuda, "a device slot", start);
    } while (result == SPDL_TIMEOUT && !spdl_stopping(task));
    if (result == SPDL_TIMEOUT) return SPDL_SKIP;
    if (result != SPDL_OK) return spdl__stage_fails(task, host->cuda, result);
    spdl_take(task); /* the host slot goes back by itself */
    return SPDL_OK;
}

/* The stage of SPDL_CUDA_TRANSFER. */
SPDL__PRIVATE spdl_result spdl__transfer_stage(spdl_task *task, void *in, void **out) {
    spdl_cuda_host *host = (spdl_cuda_host *)in;
    spdl__cuda_slot *slot = NULL;
    spdl_cuda_batch *shown;
    spdl_result result;
    if (host == NULL) return spdl_fail(task, "spdl: cuda: a NULL item is no host slot");
    if (host->cuda != (spdl_cuda *)spdl_ctx(task))
        return spdl_fail(task, "spdl: cuda: the host slot is of another spdl_cuda");
    result = spdl__stage_send(task, host, &slot);
    if (result != SPDL_OK) return result;
    spdl__cuda_tell(host->cuda, &task->pipeline->calls_device_ns);
    shown = &slot->shown[slot->ticket / 2 % SPDL__LAPS];
    *shown = slot->batch;
    *out = shown;
    return SPDL_OK;
}

SPDL_API const spdl_function *spdl_cuda_transfer(void) {
    static const spdl_function function = { spdl__transfer_stage, "transfer", "spdl_cuda_host",
                                            "spdl_cuda_batch" };
    return &function;
}

/* ============================================================================================= */
/* >>outputs-impl
   Outputs, and the row that has one for each batch. An output is written by whoever has it, which
   passes through free_outputs, or through `launched` to the thread that completes the calls. */

SPDL__PRIVATE void spdl__output_return(spdl__cuda_output *output) {
    spdl_cuda *cuda = output->out.cuda;
    spdl__store32(&output->state, SPDL__OUTPUT_FREE);
    (void)spdl_ring_try_push(cuda->free_outputs, &output); /* has room for all */
    spdl__cuda_notify(cuda);
}

/* Has the stream wait for what was last done with the output (D3). On failure it goes back. */
SPDL__PRIVATE spdl_result spdl__output_begin(spdl__cuda_output *output, spdl_cuda_stream handle) {
    const spdl__cuda_reader stream = spdl__stream_of(handle);
    spdl_cuda *cuda = output->out.cuda;
    spdl__cuda_scope scope;
    spdl_result result = spdl__cuda_enter(cuda, &scope, false);
    if (result == SPDL_OK) {
        result = spdl__stream_check(cuda, stream.stream);
        if (result == SPDL_OK && output->behind != NULL)
            result = SPDL__CUDA_TRY(cuda, StreamWaitEvent, (stream.stream, output->behind, 0));
        spdl__cuda_leave(cuda, &scope);
    }
    output->kernels.stream = stream.stream;
    output->kernels.thread = stream.thread;
    output->out.bytes = cuda->desc.output_bytes;
    output->out.user = NULL;
    if (result == SPDL_OK)
        spdl__store32(&output->state, SPDL__OUTPUT_GOT);
    else
        spdl__output_return(output);
    return result;
}

SPDL_API spdl_result spdl_cuda_output_get(spdl_cuda *cuda, spdl_cuda_stream stream,
                                          spdl_cuda_output **out, int64_t timeout_ns) {
    spdl__cuda_output *output = NULL;
    spdl_result result;
    if (out == NULL) return SPDL_E_INVALID;
    *out = NULL;
    result = spdl__cuda_usable(cuda);
    if (result != SPDL_OK) return result;
    if (cuda->free_outputs == NULL)
        return spdl__cuda_refuse(cuda, SPDL_E_INVALID, "output_bytes is 0: there are no outputs");
    result = spdl__free_pop(cuda, cuda->free_outputs, &output, "an output",
                            spdl__deadline(timeout_ns));
    if (result == SPDL_OK) result = spdl__output_begin(output, stream);
    if (result == SPDL_OK) *out = &output->out;
    return result;
}

/* Inside of a scope: D1, the copy, its event. */
SPDL__PRIVATE spdl_result spdl__output_calls(spdl_cuda *cuda, spdl__cuda_output *output) {
    const uint64_t from = (uint64_t)(uintptr_t)output->out.dev;
    const char *call = "cuStreamWaitEvent";
    int code = SPDL__CUDA(cuda, StreamWaitEvent(cuda->back, output->kernels.event[0], 0));
    if (code == 0) {
        call = "cuEventRecord";
        code = spdl__span_record(cuda, &output->copy.start, cuda->back);
    }
    if (code == 0 && output->out.bytes > 0) {
        call = "cuMemcpyDtoHAsync";
        code = SPDL__CUDA(cuda, MemcpyDtoHAsync(output->out.host, from, output->out.bytes,
                                                cuda->back));
    }
    if (code == 0) {
        call = "cuEventRecord";
        code = spdl__span_record(cuda, &output->copy.stop, cuda->back);
    }
    if (code == 0) code = SPDL__CUDA(cuda, EventRecord(output->copied, cuda->back));
    return spdl__cuda_check(cuda, call, code);
}

/* On failure nothing is under way but the kernels. */
SPDL__PRIVATE spdl_result spdl__output_copy(spdl_cuda *cuda, spdl__cuda_output *output) {
    spdl__cuda_reader back;
    spdl__cuda_scope scope;
    spdl_result result;
    pthread_mutex_lock(&cuda->back_lock);
    result = spdl__cuda_enter(cuda, &scope, !cuda->output_slab.pinned);
    if (result == SPDL_OK) {
        spdl__store_relaxed(&output->copy.since, spdl__trace_since(cuda));
        output->copy.bytes = output->out.bytes;
        result = spdl__output_calls(cuda, output);
        spdl__cuda_leave(cuda, &scope);
        back = spdl__stream_of(cuda->back);
        if (result != SPDL_OK) spdl__stream_settle(cuda, &back);
    }
    pthread_mutex_unlock(&cuda->back_lock);
    return result != SPDL_OK && spdl__load32(&cuda->lost) ? SPDL_E_CUDA_LOST : result;
}

SPDL_API spdl_result spdl_cuda_output_send(spdl_cuda_output *out) {
    spdl__cuda_output *output = (spdl__cuda_output *)(void *)out;
    spdl_result result = out == NULL ? SPDL_E_INVALID : spdl__cuda_usable(out->cuda);
    if (result != SPDL_OK) return result;
    if (spdl__load32(&output->state) != SPDL__OUTPUT_GOT ||
        out->bytes > out->cuda->desc.output_bytes)
        return spdl__cuda_refuse(out->cuda, SPDL_E_INVALID,
                                 "output_send: it was sent or freed, or bytes is too large");
    if (!out->cuda->cpu) {
        result = spdl__work_record(out->cuda, &output->kernels);
        if (result == SPDL_OK) result = spdl__output_copy(out->cuda, output);
        if (result != SPDL_OK) return result;
        output->behind = output->copied;
    }
    spdl__add(&out->cuda->outputs, 1);
    spdl__store32(&output->state, SPDL__OUTPUT_SENT);
    return SPDL_OK;
}

/* What was seen to be done goes into the trace. */
SPDL__PRIVATE void spdl__output_tell(spdl_cuda *cuda, spdl__cuda_output *output) {
    spdl__cuda_scope scope;
    if (!spdl__cuda_timed(cuda)) return;
    pthread_mutex_lock(&cuda->lock);
    if (spdl__cuda_enter(cuda, &scope, true) == SPDL_OK) {
        spdl__work_tell(cuda, &output->launch, SPDL__DEVICE_LAUNCH);
        spdl__work_tell(cuda, &output->copy, SPDL__DEVICE_FROM);
        spdl__cuda_leave(cuda, &scope);
    }
    pthread_mutex_unlock(&cuda->lock);
}

SPDL_API spdl_result spdl_cuda_output_wait(spdl_cuda_output *out, int64_t timeout_ns) {
    spdl__cuda_output *output = (spdl__cuda_output *)(void *)out;
    spdl_result result = out == NULL ? SPDL_E_INVALID : spdl__cuda_usable(out->cuda);
    uint32_t state;
    if (result != SPDL_OK) return result;
    state = spdl__load32(&output->state);
    if (state == SPDL__OUTPUT_THERE) return SPDL_OK;
    if (state != SPDL__OUTPUT_SENT)
        return spdl__cuda_refuse(out->cuda, SPDL_E_INVALID, "output_wait: it was not sent");
    if (!out->cuda->cpu)
        result = spdl__event_wait(out->cuda, output->copied, spdl__deadline(timeout_ns));
    if (result != SPDL_OK) return result;
    if (!out->cuda->cpu) spdl__output_tell(out->cuda, output);
    output->behind = NULL;
    spdl__store32(&output->state, SPDL__OUTPUT_THERE);
    return SPDL_OK;
}

SPDL_API void spdl_cuda_output_free(void *out) {
    spdl__cuda_output *output = (spdl__cuda_output *)out;
    uint32_t state;
    if (output == NULL || spdl__cuda_usable(output->out.cuda) != SPDL_OK) return;
    state = spdl__load32(&output->state);
    if (state == SPDL__OUTPUT_FREE) return;
    if (state == SPDL__OUTPUT_GOT && !output->out.cuda->cpu) { /* kernels may be at work on it */
        const bool known = spdl__work_record(output->out.cuda, &output->kernels) == SPDL_OK;
        if (!known) spdl__stream_settle(output->out.cuda, &output->kernels);
        output->behind = known ? output->kernels.event[0] : NULL;
    }
    spdl__output_return(output);
}

/* ---- the row ---- */

/* An output, for the call whose turn it is. */
SPDL__PRIVATE spdl_result spdl__stage_output(spdl_task *task, spdl_cuda *cuda,
                                             spdl__cuda_output **output) {
    const uint64_t start = spdl_time_ns(), slice_ns = 20000000;
    while (!spdl__turns_pop(&cuda->output_turns, task, cuda->free_outputs, output, true)) {
        const uint32_t word = spdl__event_prepare(&cuda->changed, cuda->asymmetric);
        const spdl_result result = spdl__cuda_usable(cuda);
        const bool got =
            result == SPDL_OK &&
            spdl__turns_pop(&cuda->output_turns, task, cuda->free_outputs, output, true);
        if (result != SPDL_OK || got || spdl__turns_over(task)) {
            spdl__event_cancel(&cuda->changed);
            if (got) break;
            return result != SPDL_OK ? result : SPDL_SKIP;
        }
        (void)spdl__event_commit(&cuda->changed, word, spdl_time_ns() + slice_ns);
        spdl__cuda_stalled(cuda, "an output", start);
    }
    return spdl__output_begin(*output, cuda->compute);
}

/* The kernels of one batch, in the order of the row, on our device. */
SPDL__PRIVATE spdl_result spdl__stage_launch(spdl_task *task, spdl_cuda *cuda,
                                             spdl__cuda_slot *slot, spdl__cuda_output *output) {
    spdl__cuda_scope scope;
    spdl_result result = SPDL_OK, launched;
    if (!cuda->cpu) result = spdl__slot_ready(cuda, slot, cuda->compute, true);
    if (result == SPDL_OK) result = spdl__cuda_enter(cuda, &scope, false);
    if (result != SPDL_OK) return spdl__stage_fails(task, cuda, result);
    spdl__store_relaxed(&output->launch.since, spdl__trace_since(cuda));
    output->launch.bytes = slot->batch.bytes;
    output->out.user = slot->batch.user;
    (void)spdl__span_record(cuda, &output->launch.start, cuda->compute);
    launched = cuda->launch(task, &slot->batch, &output->out, cuda->cpu ? NULL : cuda->compute);
    (void)spdl__span_record(cuda, &output->launch.stop, cuda->compute);
    spdl__cuda_leave(cuda, &scope);
    return launched;
}

SPDL__PRIVATE spdl_result spdl__launch_stage(spdl_task *task, void *in, void **out) {
    spdl_cuda *cuda = (spdl_cuda *)spdl_ctx(task);
    spdl_cuda_host *host = (spdl_cuda_host *)in;
    spdl__cuda_output *output = NULL;
    spdl__cuda_slot *slot = NULL;
    spdl_result result;
    if (cuda == NULL || cuda->launch == NULL || cuda->free_outputs == NULL)
        return spdl_fail(task, "spdl: cuda: output_bytes is 0, launch is NULL, or no thread could "
                               "be made for the row");
    if (host == NULL || host->cuda != cuda)
        return spdl_fail(task, "spdl: cuda: an item is not a host slot of this spdl_cuda");
    result = spdl__cuda_usable(cuda);
    if (result == SPDL_OK) result = spdl__stage_output(task, cuda, &output);
    if (result != SPDL_OK) return result < 0 ? spdl__stage_fails(task, cuda, result) : result;
    result = spdl__stage_send(task, host, &slot);
    if (result == SPDL_OK) {
        result = spdl__stage_launch(task, cuda, slot, output);
        spdl__slot_end(cuda, slot);
        spdl__slot_retire(cuda, slot);
        if (result == SPDL_OK) {
            result = spdl_cuda_output_send(&output->out);
            if (result != SPDL_OK) (void)spdl__stage_fails(task, cuda, result);
        }
    }
    if (result != SPDL_OK) {
        spdl_cuda_output_free(output);
        return result;
    }
    *out = output;
    if (cuda->cpu) return spdl_cuda_output_wait(&output->out, 0);
    output->call = spdl_defer(task);
    (void)spdl_ring_try_push(cuda->launched, &output); /* has room for all */
    spdl__turns_mark(&cuda->output_turns, task->node, task->ticket, true);
    spdl__cuda_notify(cuda); /* it is another call's turn */
    return SPDL_PENDING;
}

/* Completes the calls, in the order of their launches, as the device has done their outputs. */
SPDL__PRIVATE void *spdl__complete_run(void *arg) {
    spdl_cuda *cuda = (spdl_cuda *)arg;
    spdl__cuda_output *output;
    spdl_error error;
    while (spdl_ring_pop(cuda->launched, &output, SPDL_FOREVER) == SPDL_OK) {
        const spdl_deferred call = output->call;
        const spdl_result result = spdl_cuda_output_wait(&output->out, SPDL_FOREVER);
        if (result == SPDL_OK) {
            if (spdl_complete(call, SPDL_OK, output) != SPDL_OK) spdl_cuda_output_free(output);
            continue;
        }
        spdl_cuda_error(cuda, &error);
        spdl_cuda_output_free(output);
        (void)spdl__complete(call, result, NULL, error.text);
    }
    return NULL;
}

SPDL_API const spdl_function *spdl_cuda_stage(spdl_cuda *cuda, spdl_cuda_launch_fn launch) {
    static const spdl_function function = { spdl__launch_stage, "launch", "spdl_cuda_host",
                                            "spdl_cuda_output" };
    if (cuda == NULL || cuda->free_outputs == NULL || cuda->process != (long)getpid())
        return &function; /* its calls fail */
    if (!cuda->cpu && !cuda->completing)
        cuda->completing = spdl__os_thread_start(&cuda->completer, "spdl-cuda", NULL, 0,
                                                 spdl__complete_run, cuda);
    cuda->launch = cuda->cpu || cuda->completing ? launch : NULL;
    return &function;
}

SPDL_API int spdl_cuda_stage_width(const spdl_cuda *cuda) {
    if (cuda == NULL || cuda->desc.output_slots < 1) return 1;
    return cuda->desc.device_slots < cuda->desc.output_slots ? cuda->desc.device_slots
                                                             : cuda->desc.output_slots;
}

/* ============================================================================================= */
/* >>open-impl
   Open acquires everything in one run of steps; whatever step fails, cuda_release frees what is
   there, and close does the same. What cannot be freed is left, with a line in the log. */

SPDL__PRIVATE spdl_result spdl__desc_refuse(const spdl_cuda_desc *desc, const char *what,
                                            int64_t value, int64_t least, int64_t most) {
    return spdl__error_set(desc->error, SPDL_E_INVALID,
                           "spdl: cuda: %s is %lld, must be %lld to %lld", what, (long long)value,
                           (long long)least, (long long)most);
}

/* Lays out the arrays of the desc, and fills in what it leaves open. */
SPDL__PRIVATE spdl_result spdl__cuda_prepare(spdl_cuda *cuda) {
    spdl_cuda_desc *desc = &cuda->desc;
    const int most = SPDL_CUDA_MAX_SLOTS;
    while (cuda->array_count < SPDL_CUDA_MAX_ARRAYS &&
           desc->array[cuda->array_count].type[0] != '\0') {
        spdl_cuda_array *array = &desc->array[cuda->array_count++];
        array->name[sizeof(array->name) - 1] = '\0';
        if (spdl__array_place(array, &cuda->array_bytes, SPDL__MAX_SLOT_BYTES) != SPDL_OK)
            return spdl__error_set(desc->error, SPDL_E_INVALID,
                                   "spdl: cuda: array '%s': types are like \"<f4\", dimensions 0 "
                                   "to 8, bytes at most 2^40", array->name);
    }
    if (desc->slot_bytes == 0) desc->slot_bytes = cuda->array_bytes;
    if (desc->slot_bytes == 0 || desc->slot_bytes > SPDL__MAX_SLOT_BYTES ||
        desc->slot_bytes < cuda->array_bytes)
        return spdl__desc_refuse(desc, "slot_bytes", (int64_t)desc->slot_bytes,
                                 (int64_t)spdl__max(1, cuda->array_bytes),
                                 (int64_t)SPDL__MAX_SLOT_BYTES);
    if (desc->host_slots < -1 || desc->host_slots > most)
        return spdl__desc_refuse(desc, "host_slots", desc->host_slots, -1, most);
    if (desc->device_slots < 0 || desc->device_slots > most)
        return spdl__desc_refuse(desc, "device_slots", desc->device_slots, 0, most);
    if (desc->output_slots < 0 || desc->output_slots > most)
        return spdl__desc_refuse(desc, "output_slots", desc->output_slots, 0, most);
    if (desc->output_bytes > SPDL__MAX_SLOT_BYTES)
        return spdl__desc_refuse(desc, "output_bytes", (int64_t)desc->output_bytes, 0,
                                 (int64_t)SPDL__MAX_SLOT_BYTES);
    if (desc->device < SPDL_CUDA_LOCAL_RANK || (int)desc->backend < SPDL_CUDA_AUTO ||
        (int)desc->backend > SPDL_CUDA_CPU)
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "spdl: cuda: device or backend is out of range");
    if (desc->host_slots == 0) desc->host_slots = 4;
    if (desc->host_slots < 0) desc->host_slots = 0;
    if (desc->device_slots == 0) desc->device_slots = 3;
    if (desc->output_slots == 0) desc->output_slots = 4;
    if (desc->output_bytes == 0) desc->output_slots = 0;
    cuda->transfers = (uint64_t)(desc->host_slots + desc->device_slots);
    cuda->stride = spdl__round_up(desc->slot_bytes, SPDL_CUDA_ALIGN);
    cuda->output_stride = spdl__round_up(desc->output_bytes, SPDL_CUDA_ALIGN);
    return SPDL_OK;
}

/* The ordinal that is meant, and why. */
SPDL__PRIVATE int spdl__cuda_ordinal(spdl_cuda *cuda, const char **why) {
    static const char *const names[] = { "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
                                         "SLURM_LOCALID" };
    void *context = NULL;
    int device = 0;
    size_t i;
    *why = "as the desc says";
    if (cuda->desc.device > 0) return cuda->desc.device - 1;
    if (cuda->desc.device == 0) {
        const bool current = cuda->api.CtxGetCurrent(&context) == 0 && context != NULL &&
                             cuda->api.CtxGetDevice(&device) == 0;
        *why = current ? "that of the calling thread" : "as the calling thread has none";
        return current ? device : 0;
    }
    for (i = 0; i < sizeof(names) / sizeof(names[0]); ++i) {
        const char *rank = getenv(*why = names[i]);
        const long number = rank == NULL ? -1 : strtol(rank, NULL, 10);
        if (rank != NULL && rank[0] != '\0')
            return number < 0 ? 0 : (int)(number % cuda->device_count);
    }
    *why = "as no rank is told";
    return 0;
}

/* Fills in the table: that of a device, or of the CPU. */
SPDL__PRIVATE spdl_result spdl__cuda_choose(spdl_cuda *cuda) {
    spdl_cuda_info info;
    const char *why;
    memset(&info, 0, sizeof(info));
    cuda->cpu = cuda->desc.backend == SPDL_CUDA_CPU;
    if (!cuda->cpu) cuda->device_count = spdl__cuda_count(&cuda->api, &info);
    if (!cuda->cpu && cuda->device_count == 0) {
        if (cuda->desc.backend == SPDL_CUDA_GPU)
            return spdl__error_set(&cuda->error, SPDL_E_NOT_FOUND,
                                   "spdl: cuda: there is no device: %s", info.reason);
        spdl__logf(&cuda->desc.logger, SPDL_LOG_WARN, "spdl: cuda: running on the CPU: %s",
                   info.reason);
        cuda->cpu = true;
    }
    if (cuda->cpu) return SPDL_OK;
    cuda->device = spdl__cuda_ordinal(cuda, &why);
    if (cuda->device >= cuda->device_count)
        return spdl__error_set(&cuda->error, SPDL_E_NOT_FOUND,
                               "spdl: cuda: there is no device %d: this process sees %d",
                               cuda->device, cuda->device_count);
    (void)spdl__cuda_describe(&cuda->api, &info.device[0], cuda->device);
    spdl__logf(&cuda->desc.logger, SPDL_LOG_INFO, "spdl: cuda: device %d, %s (%s)", cuda->device,
               info.device[0].name, why);
    return SPDL__CUDA_SEE(cuda, DeviceGet, (&cuda->handle, cuda->device));
}

SPDL__PRIVATE bool spdl__cuda_sync_init(spdl_cuda *cuda) {
    pthread_mutex_t *const locks[] = { &cuda->lock, &cuda->back_lock, &cuda->error_lock };
    int i;
    for (i = 0; i < 3; ++i) {
        if (pthread_mutex_init(locks[i], NULL) == 0) continue;
        while (--i >= 0) pthread_mutex_destroy(locks[i]);
        return false;
    }
    cuda->locks_made = true;
    cuda->event_made = spdl__os_event_init(&cuda->changed);
    return cuda->event_made;
}

SPDL__PRIVATE spdl_result spdl__cuda_ring(spdl_cuda *cuda, spdl_ring **ring, int capacity) {
    spdl_ring_desc desc;
    if (capacity == 0) return SPDL_OK;
    memset(&desc, 0, sizeof(desc));
    desc.capacity = (uint64_t)capacity;
    desc.allocator = cuda->desc.allocator;
    return spdl_ring_create(ring, &desc);
}

SPDL__PRIVATE int spdl__cuda_node(spdl_cuda *cuda) {
    int node = -1;
    if (cuda->cpu || SPDL__CUDA_LOOK(cuda, DeviceGetAttribute(&node, SPDL__CU_ATTR_NUMA_NODE,
                                                              cuda->handle)) != 0)
        return -1;
    return node;
}

/* The host's side: tables, rings, memory. */
SPDL__PRIVATE spdl_result spdl__cuda_make_host(spdl_cuda *cuda) {
    const spdl_cuda_desc *desc = &cuda->desc;
    const size_t hosts = (size_t)desc->host_slots, slots = (size_t)desc->device_slots;
    const size_t outputs = (size_t)desc->output_slots;
    spdl_result result;
    cuda->asymmetric = spdl__os_barrier();
    cuda->host = (spdl__cuda_host *)spdl__alloc_zeroed(&desc->allocator, hosts + 1,
                                                       sizeof(*cuda->host), 0);
    cuda->slot =
        (spdl__cuda_slot *)spdl__alloc_zeroed(&desc->allocator, slots, sizeof(*cuda->slot), 0);
    cuda->output = (spdl__cuda_output *)spdl__alloc_zeroed(&desc->allocator, outputs + 1,
                                                           sizeof(*cuda->output), 0);
    cuda->transfer = (spdl__cuda_transfer *)spdl__alloc_zeroed(
        &desc->allocator, (size_t)cuda->transfers, sizeof(*cuda->transfer), 0);
    if (cuda->host == NULL || cuda->slot == NULL || cuda->transfer == NULL || cuda->output == NULL)
        return SPDL_E_NOMEM;
    result = spdl__cuda_ring(cuda, &cuda->free_hosts, desc->host_slots);
    if (result == SPDL_OK) result = spdl__cuda_ring(cuda, &cuda->free_slots, desc->device_slots);
    if (result == SPDL_OK) result = spdl__cuda_ring(cuda, &cuda->free_outputs, desc->output_slots);
    if (result == SPDL_OK) result = spdl__cuda_ring(cuda, &cuda->launched, desc->output_slots);
    cuda->numa_node = spdl__cuda_node(cuda);
    if (result == SPDL_OK) result = spdl__slab_make(cuda, &cuda->slab, desc->slot_bytes, hosts);
    if (result == SPDL_OK)
        result = spdl__slab_make(cuda, &cuda->output_slab, spdl__max(1, desc->output_bytes),
                                 outputs);
    return result;
}

SPDL__PRIVATE void **spdl__slot_event(spdl__cuda_slot *slot, int k) {
    return &slot->reader[k / SPDL__LAPS].event[k % SPDL__LAPS];
}

/* Copies' events sleep when they are waited for; readers' events only streams wait for. */
SPDL__PRIVATE spdl_result spdl__cuda_make_events(spdl_cuda *cuda) {
    const unsigned plain = SPDL__CU_DISABLE_TIMING, sleeps = plain | SPDL__CU_BLOCKING_SYNC;
    spdl_result result = cuda->desc.time_copies ? spdl__spans_make(cuda) : SPDL_OK;
    uint64_t i;
    int k;
    for (i = 0; i < cuda->transfers && result == SPDL_OK; ++i)
        result = spdl__event_make(cuda, &cuda->transfer[i].event, sleeps);
    for (i = 0; i < (uint64_t)cuda->desc.device_slots; ++i)
        for (k = 0; k < SPDL_CUDA_MAX_READERS * SPDL__LAPS && result == SPDL_OK; ++k)
            result = spdl__event_make(cuda, spdl__slot_event(&cuda->slot[i], k), plain);
    for (i = 0; i < (uint64_t)cuda->desc.output_slots && result == SPDL_OK; ++i) {
        result = spdl__event_make(cuda, &cuda->output[i].copied, sleeps);
        if (result == SPDL_OK)
            result = spdl__event_make(cuda, &cuda->output[i].kernels.event[0], plain);
    }
    return result;
}

/* Device memory for `count` slots. */
SPDL__PRIVATE spdl_result spdl__cuda_malloc(spdl_cuda *cuda, uint64_t *memory, int count,
                                            size_t stride) {
    const int out_of_memory = 2;
    spdl_result result;
    int code;
    if (count == 0) return SPDL_OK;
    if ((size_t)count > (SIZE_MAX / 2) / stride) return SPDL_E_NOMEM;
    code = SPDL__CUDA(cuda, MemAlloc(memory, (size_t)count * stride));
    if (code == 0) return SPDL_OK;
    *memory = 0;
    result = spdl__cuda_fail(cuda, "cuMemAlloc", code);
    return code == out_of_memory ? SPDL_E_NOMEM : result;
}

SPDL__PRIVATE spdl_result spdl__stream_make(spdl_cuda *cuda, void **stream) {
    const spdl_result result =
        SPDL__CUDA_TRY(cuda, StreamCreate, (stream, SPDL__CU_NON_BLOCKING));
    if (result != SPDL_OK) *stream = NULL;
    return result;
}

/* The device's side, in its primary context, the one of the CUDA runtime. */
SPDL__PRIVATE spdl_result spdl__cuda_make_device(spdl_cuda *cuda) {
    const spdl_cuda_desc *desc = &cuda->desc;
    spdl__cuda_scope scope;
    spdl_result result;
    if (cuda->cpu) return SPDL_OK;
    result = SPDL__CUDA_TRY(cuda, DevicePrimaryCtxRetain, (&cuda->context, cuda->handle));
    if (result != SPDL_OK) {
        cuda->context = NULL;
        return result;
    }
    result = spdl__cuda_enter(cuda, &scope, true);
    if (result != SPDL_OK) return result;
    if (desc->device_memory == NULL)
        result = spdl__cuda_malloc(cuda, &cuda->memory, desc->device_slots, cuda->stride);
    if (result == SPDL_OK)
        result = spdl__cuda_malloc(cuda, &cuda->output_memory, desc->output_slots,
                                   cuda->output_stride);
    if (result == SPDL_OK) result = spdl__slab_pin(cuda, &cuda->slab, "host slots");
    if (result == SPDL_OK) result = spdl__slab_pin(cuda, &cuda->output_slab, "outputs");
    if (result == SPDL_OK) result = spdl__stream_make(cuda, &cuda->stream);
    if (result == SPDL_OK && desc->output_slots > 0) result = spdl__stream_make(cuda, &cuda->back);
    if (result == SPDL_OK && desc->output_slots > 0)
        result = spdl__stream_make(cuda, &cuda->compute);
    if (result == SPDL_OK) result = spdl__cuda_make_events(cuda);
    spdl__cuda_leave(cuda, &scope);
    return result;
}

/* All slots are free. */
SPDL__PRIVATE void spdl__cuda_fill_rings(spdl_cuda *cuda) {
    const uintptr_t device = cuda->desc.device_memory != NULL
                                 ? (uintptr_t)cuda->desc.device_memory
                                 : (uintptr_t)cuda->memory;
    int i;
    for (i = 0; i < cuda->desc.host_slots; ++i) {
        spdl__cuda_host *slot = &cuda->host[i];
        slot->host.data = cuda->slab.base + (size_t)i * cuda->slab.stride;
        slot->host.capacity = cuda->desc.slot_bytes;
        slot->host.cuda = cuda;
        (void)spdl_ring_try_push(cuda->free_hosts, &slot);
    }
    for (i = 0; i < cuda->desc.device_slots; ++i) {
        spdl__cuda_slot *slot = &cuda->slot[i];
        slot->memory = (void *)(device + (size_t)i * cuda->stride);
        slot->batch.array = slot->array;
        slot->batch.slot = i;
        slot->batch.context = cuda->desc.context;
        slot->batch.cuda = cuda;
        slot->batch.slot_ = slot;
        (void)spdl_ring_try_push(cuda->free_slots, &slot);
    }
    for (i = 0; i < cuda->desc.output_slots; ++i) {
        spdl__cuda_output *output = &cuda->output[i];
        output->out.host = cuda->output_slab.base + (size_t)i * cuda->output_slab.stride;
        output->out.dev = cuda->cpu ? output->out.host
                                    : (void *)((uintptr_t)cuda->output_memory +
                                               (size_t)i * cuda->output_stride);
        output->out.slot = i;
        output->out.cuda = cuda;
        (void)spdl_ring_try_push(cuda->free_outputs, &output);
    }
}

SPDL__PRIVATE void spdl__event_end(spdl_cuda *cuda, void *event) {
    if (event != NULL) (void)SPDL__CUDA_TRY(cuda, EventDestroy, (event));
}

SPDL__PRIVATE void spdl__cuda_end_events(spdl_cuda *cuda) {
    uint64_t i;
    int k;
    for (i = 0; cuda->transfer != NULL && i < cuda->transfers; ++i) {
        spdl__event_end(cuda, cuda->transfer[i].event);
        spdl__event_end(cuda, cuda->transfer[i].span.start);
        spdl__event_end(cuda, cuda->transfer[i].span.stop);
    }
    for (i = 0; cuda->slot != NULL && i < (uint64_t)cuda->desc.device_slots; ++i)
        for (k = 0; k < SPDL_CUDA_MAX_READERS * SPDL__LAPS; ++k)
            spdl__event_end(cuda, *spdl__slot_event(&cuda->slot[i], k));
    for (i = 0; cuda->output != NULL && i < (uint64_t)cuda->desc.output_slots; ++i) {
        spdl__event_end(cuda, cuda->output[i].copied);
        spdl__event_end(cuda, cuda->output[i].kernels.event[0]);
        spdl__event_end(cuda, cuda->output[i].launch.start);
        spdl__event_end(cuda, cuda->output[i].launch.stop);
        spdl__event_end(cuda, cuda->output[i].copy.start);
        spdl__event_end(cuda, cuda->output[i].copy.stop);
    }
    spdl__event_end(cuda, cuda->origin[0]);
    spdl__event_end(cuda, cuda->origin[1]);
}

/* Frees what CUDA gave. Not once the driver is unloading, or does not answer: then the process
   ends, and memory that may still be registered stays mapped. */
SPDL__PRIVATE void spdl__cuda_release_device(spdl_cuda *cuda) {
    void *const streams[] = { cuda->stream, cuda->back, cuda->compute };
    const bool there = cuda->context != NULL && spdl__load32(&cuda->unloading) == 0;
    spdl__cuda_slab *arena;
    spdl__cuda_scope scope;
    const bool entered = there && spdl__cuda_enter(cuda, &scope, true) == SPDL_OK;
    int i;
    if (entered) spdl__cuda_end_events(cuda);
    for (i = 0; i < 3 && entered; ++i)
        if (streams[i] != NULL) (void)SPDL__CUDA_TRY(cuda, StreamDestroy, (streams[i]));
    if (entered && cuda->memory != 0) (void)SPDL__CUDA_TRY(cuda, MemFree, (cuda->memory));
    if (entered && cuda->output_memory != 0)
        (void)SPDL__CUDA_TRY(cuda, MemFree, (cuda->output_memory));
    for (arena = cuda->arenas; arena != NULL; arena = arena->next)
        (void)spdl__slab_unpin(cuda, arena, entered);
    spdl__slab_end(cuda, &cuda->slab, entered);
    spdl__slab_end(cuda, &cuda->output_slab, entered);
    if (entered) spdl__cuda_leave(cuda, &scope);
    if (there) (void)SPDL__CUDA_TRY(cuda, DevicePrimaryCtxRelease, (cuda->handle));
    if (cuda->error.result == SPDL_E_CUDA) /* something is left, or was told before */
        spdl__logf(&cuda->desc.logger, SPDL_LOG_INFO, "%.*s", (int)sizeof(cuda->error.text) - 1,
                   cuda->error.text);
}

/* Frees whatever there is; nothing is in flight. */
SPDL__PRIVATE void spdl__cuda_release(spdl_cuda *cuda) {
    const spdl_allocator allocator = cuda->desc.allocator;
    const size_t hosts = (size_t)cuda->desc.host_slots, slots = (size_t)cuda->desc.device_slots;
    const size_t outputs = (size_t)cuda->desc.output_slots;
    if (cuda->locks_made) {
        spdl__cuda_release_device(cuda);
        pthread_mutex_destroy(&cuda->error_lock);
        pthread_mutex_destroy(&cuda->back_lock);
        pthread_mutex_destroy(&cuda->lock);
    }
    while (cuda->arenas != NULL) {
        spdl__cuda_slab *arena = cuda->arenas;
        cuda->arenas = arena->next;
        spdl__free(&allocator, arena, sizeof(*arena));
    }
    if (cuda->event_made) spdl__os_event_fini(&cuda->changed);
    spdl_ring_destroy(cuda->free_hosts, NULL, NULL);
    spdl_ring_destroy(cuda->free_slots, NULL, NULL);
    spdl_ring_destroy(cuda->free_outputs, NULL, NULL);
    spdl_ring_destroy(cuda->launched, NULL, NULL);
    spdl__free(&allocator, cuda->transfer, (size_t)cuda->transfers * sizeof(*cuda->transfer));
    spdl__free(&allocator, cuda->output, (outputs + 1) * sizeof(*cuda->output));
    spdl__free(&allocator, cuda->slot, slots * sizeof(*cuda->slot));
    spdl__free(&allocator, cuda->host, (hosts + 1) * sizeof(*cuda->host));
    spdl__free(&allocator, cuda, sizeof(*cuda));
}

SPDL_API spdl_result spdl_cuda_open(spdl_cuda **cuda, const spdl_cuda_desc *desc) {
    spdl_cuda *made;
    spdl_result result;
    if (cuda == NULL) return SPDL_E_INVALID;
    *cuda = NULL;
    if (desc == NULL) return SPDL_E_INVALID;
    spdl__error_clear(desc->error);
    result = spdl__allocator_check(&desc->allocator, "cuda", desc->error);
    if (result != SPDL_OK) return result; /* nothing could be given back */
    made = (spdl_cuda *)spdl__alloc_zeroed(&desc->allocator, 1, sizeof(*made), SPDL_CACHE_LINE);
    if (made == NULL)
        return spdl__error_set(desc->error, SPDL_E_NOMEM, "spdl: cuda: out of memory");
    made->desc = *desc;
    made->process = (long)getpid();
    spdl__error_clear(&made->error);
    result = spdl__cuda_prepare(made);
    made->desc.error = NULL; /* the caller's, for this call only */
    if (result != SPDL_OK) {
        spdl__free(&desc->allocator, made, sizeof(*made));
        return result;
    }
    if (!spdl__cuda_sync_init(made)) result = SPDL_E_NOMEM;
    if (result == SPDL_OK) result = spdl__cuda_choose(made);
    if (result == SPDL_OK) result = spdl__cuda_make_host(made);
    if (result == SPDL_OK) result = spdl__cuda_make_device(made);
    if (result != SPDL_OK) {
        if (made->error.result == SPDL_OK)
            (void)spdl__error_set(&made->error, result, "spdl: cuda: out of host memory");
        made->error.result = result;
        if (desc->error != NULL) *desc->error = made->error;
        spdl__cuda_release(made);
        return result;
    }
    spdl__cuda_fill_rings(made);
    *cuda = made;
    return SPDL_OK;
}

/* Waits for the work on slots and outputs whose end was recorded: nobody else may, where the memory
   is the caller's. */
SPDL__PRIVATE void spdl__cuda_readers_end(spdl_cuda *cuda) {
    spdl_result result = spdl__cuda_usable(cuda);
    int i;
    for (i = 0; i < cuda->desc.device_slots * SPDL_CUDA_MAX_READERS && result == SPDL_OK; ++i) {
        const spdl__cuda_slot *slot = &cuda->slot[i / SPDL_CUDA_MAX_READERS];
        const spdl__cuda_reader *reader = &slot->reader[i % SPDL_CUDA_MAX_READERS];
        if (reader->state == SPDL__READER_DONE)
            result = spdl__event_sync(cuda, reader->event[reader->lap]);
    }
    for (i = 0; i < cuda->desc.output_slots && result == SPDL_OK; ++i)
        if (cuda->output[i].behind != NULL)
            result = spdl__event_sync(cuda, cuda->output[i].behind);
}

SPDL_API void spdl_cuda_close(spdl_cuda *cuda) {
    spdl__cuda_reader stream;
    int i;
    if (cuda == NULL || cuda->process != (long)getpid()) return;
    if (cuda->launched != NULL) spdl_ring_close(cuda->launched);
    if (cuda->completing) spdl__os_thread_join(&cuda->completer);
    if (!cuda->cpu) {
        stream = spdl__stream_of(cuda->stream);
        spdl__stream_settle(cuda, &stream);
        stream = spdl__stream_of(cuda->back);
        if (cuda->back != NULL) spdl__stream_settle(cuda, &stream);
        spdl__cuda_readers_end(cuda);
    }
    spdl__cuda_reap(cuda, cuda->sent); /* idle, or lost: see >>state-impl */
    for (i = 0; i < cuda->desc.device_slots; ++i) spdl__held_release(&cuda->slot[i].held);
    spdl__cuda_release(cuda);
}

SPDL_API spdl_result spdl_cuda_adopt(spdl_cuda *cuda, void *base, size_t bytes, size_t slot_bytes) {
    spdl__cuda_scope scope;
    spdl__cuda_slab *arena;
    spdl_result result = spdl__cuda_usable(cuda);
    if (result != SPDL_OK) return result;
    if (base == NULL || bytes == 0 || slot_bytes == 0 || slot_bytes > SPDL__MAX_SLOT_BYTES ||
        (uintptr_t)base % SPDL__PAGE != 0 || bytes > SIZE_MAX / 2)
        return spdl__cuda_refuse(cuda, SPDL_E_INVALID,
                                 "adopt: base has to be at a page border, sizes above 0");
    arena = spdl__arena_new(cuda, base, bytes, slot_bytes);
    if (arena == NULL) return spdl__cuda_refuse(cuda, SPDL_E_NOMEM, "adopt: out of memory");
    result = spdl__cuda_enter(cuda, &scope, true);
    if (result == SPDL_OK) {
        result = spdl__slab_pin(cuda, arena, "an arena");
        spdl__cuda_leave(cuda, &scope);
    }
    if (result != SPDL_OK) {
        spdl__free(&cuda->desc.allocator, arena, sizeof(*arena));
        return result;
    }
    if (arena->pinned) spdl__add(&cuda->adopted_bytes, bytes);
    spdl__arena_link(cuda, arena);
    return SPDL_OK;
}

SPDL_API spdl_result spdl_cuda_disown(spdl_cuda *cuda, void *base) {
    spdl__cuda_scope scope;
    spdl__cuda_slab *arena;
    spdl_result result = spdl__cuda_usable(cuda);
    if (result == SPDL_OK) result = spdl__cuda_drain(cuda);
    if (result == SPDL_OK) result = spdl__cuda_enter(cuda, &scope, true);
    if (result != SPDL_OK) return result;
    arena = spdl__arena_unlink(cuda, base);
    if (arena == NULL) {
        spdl__cuda_leave(cuda, &scope);
        return spdl__cuda_refuse(cuda, SPDL_E_NOT_FOUND, "disown: no arena begins there");
    }
    if (arena->pinned) spdl__sub(&cuda->adopted_bytes, arena->bytes);
    if (!spdl__slab_unpin(cuda, arena, true)) result = SPDL_E_CUDA; /* the error says more */
    spdl__cuda_leave(cuda, &scope);
    spdl__free(&cuda->desc.allocator, arena, sizeof(*arena));
    return result;
}

/* ============================================================================================= */
/* >>iterator-impl
   All of it on the trainer's thread: it takes items from the source, makes jobs of them, sends them
   to device slots and puts those into `queue`; then it takes the oldest out, makes it ready, and is
   done with the last. NULL in the queue is an end of the source.

   The trainer gets copies reaped, so that the loader has slots: before it waits for the source, and
   now and then in between. While the source has nothing, it first waits for all copies in flight,
   each of which may be what the source is waiting for. It never waits for a device slot: they are
   all in the queue, or in the caller's hands. */

struct spdl_cuda_iter {
    spdl_cuda_iter_desc desc;
    spdl_cuda *cuda;
    spdl__cuda_slot **queue; /* depth + 2 */
    int first, count;
    void *item;              /* out of the source, but not sent yet; see has_item */
    bool has_item;
    spdl_result end;         /* an error that stays */
    spdl__cuda_slot *current, *offered;
    spdl_cuda_stream stream; /* that current was made ready on */
    uint64_t reclaimed_before;
    int calls_since;         /* copies were reaped */
    int hold, held, position; /* so many are to be held; are; the next one */
    spdl_cuda_hold what;
    spdl__cuda_slot **slots; /* device_slots: what is held on the device */
    spdl__cuda_job *jobs;    /* or on the host, */
    spdl_cuda_array *arrays; /* with SPDL_CUDA_MAX_ARRAYS for each */
};

/* What an item is. When it is nothing that can be sent, it is released. */
SPDL__PRIVATE spdl_result spdl__iter_job(spdl_cuda_iter *iter, void *item, spdl__cuda_job *job) {
    spdl__cuda_host *host = (spdl__cuda_host *)item;
    uint32_t filling = SPDL__HOST_FILLING;
    spdl_cuda_view view;
    spdl_result result;
    if (iter->desc.view == NULL) {
        if (host == NULL || host->host.cuda != iter->cuda ||
            !spdl__cas32(&host->state, &filling, SPDL__HOST_SENDING))
            return spdl__cuda_refuse(iter->cuda, SPDL_E_INVALID,
                                     "iterator: an item is not a host slot that is being filled");
        spdl__job_of_host(job, &host->host);
        return SPDL_OK;
    }
    memset(&view, 0, sizeof(view));
    view.item = item;
    view.release = iter->desc.free_item;
    result = iter->desc.view(item, &view);
    if (result == SPDL_OK) result = spdl__job_of_view(iter->cuda, job, &view);
    if (result != SPDL_OK && view.release != NULL) view.release(view.item);
    return result;
}

SPDL__PRIVATE spdl_result spdl__iter_ask(spdl_cuda_iter *iter, int64_t timeout_ns) {
    spdl_cuda *cuda = iter->cuda;
    const uint64_t start = timeout_ns == 0 ? 0 : spdl_time_ns();
    spdl_result result;
    spdl__store(&cuda->fetcher, spdl__os_thread_id()); /* for host_get on this thread */
    result = iter->desc.next(iter->desc.source, &iter->item, timeout_ns);
    spdl__store(&cuda->fetcher, 0);
    if (timeout_ns != 0) spdl__add(&cuda->wait_source_ns, spdl_time_ns() - start);
    if (iter->desc.next == spdl_pipeline_next_fn)
        spdl__cuda_tell(cuda, &((spdl_pipeline *)iter->desc.source)->step_device_ns);
    iter->has_item = result == SPDL_OK;
    return result;
}

/* An item of the source. Waits for it, but for copies first, which it may be waiting for. */
SPDL__PRIVATE spdl_result spdl__iter_take(spdl_cuda_iter *iter, uint64_t deadline) {
    const int64_t slice_ns = 200000;
    spdl_cuda *cuda = iter->cuda;
    spdl_result result = iter->has_item ? SPDL_OK : spdl__iter_ask(iter, 0);
    uint64_t oldest;
    while (result == SPDL_TIMEOUT) {
        const int64_t left = spdl__time_left(deadline);
        bool done;
        if (left == 0) return SPDL_TIMEOUT;
        if (!spdl__cuda_oldest(cuda, &oldest)) {
            result = spdl__iter_ask(iter, left);
        } else if (left < 0) {
            result = spdl__cuda_await_copy(cuda, SPDL__NEVER);
            if (result == SPDL_OK) result = spdl__iter_ask(iter, 0);
        } else {
            result = spdl__iter_ask(iter, left < slice_ns ? left : slice_ns);
            if (result == SPDL_TIMEOUT) {
                const spdl_result asked = spdl__cuda_reap_if_done(cuda, oldest + 1, &done);
                if (asked != SPDL_OK) return asked;
            }
        }
    }
    return result;
}

/* Makes a job of the item at hand, which is used up then; SPDL_TIMEOUT: it is not. */
SPDL__PRIVATE spdl_result spdl__iter_prepare(spdl_cuda_iter *iter, spdl__cuda_job *job,
                                             uint64_t deadline) {
    spdl__cuda_held held;
    spdl_result result = spdl__iter_job(iter, iter->item, job);
    bool staged;
    iter->has_item = false;
    if (result != SPDL_OK) return result;
    held = job->held;
    job->deadline = deadline;
    spdl__store(&iter->cuda->fetcher, spdl__os_thread_id()); /* nobody else gets a slot back */
    result = spdl__job_stage(iter->cuda, job, &staged);
    spdl__store(&iter->cuda->fetcher, 0);
    iter->has_item = result == SPDL_TIMEOUT; /* it is a view, and described again */
    if (staged || (result != SPDL_OK && result != SPDL_TIMEOUT)) spdl__held_release(&held);
    return result;
}

/* Keeps a job to be repeated, with its arrays, which a view has for this call only. */
SPDL__PRIVATE void spdl__iter_keep(spdl_cuda_iter *iter, spdl__cuda_job *job) {
    spdl_cuda_array *array = iter->arrays + iter->held * SPDL_CUDA_MAX_ARRAYS;
    if (job->array_count > 0)
        memcpy(array, job->array, (size_t)job->array_count * sizeof(*array));
    job->array = array;
    iter->jobs[iter->held++] = *job;
    memset(&job->held, 0, sizeof(job->held));
}

/* Sends one more batch. SPDL_FULL: there is no device slot. */
SPDL__PRIVATE spdl_result spdl__iter_fetch(spdl_cuda_iter *iter, uint64_t deadline,
                                           spdl__cuda_slot **slot) {
    const bool holds = iter->hold > 0 && iter->what == SPDL_CUDA_HOLD_HOST;
    spdl_cuda *cuda = iter->cuda;
    spdl__cuda_job job;
    spdl_result result = spdl_ring_try_pop(cuda->free_slots, slot);
    if (result != SPDL_OK) return result == SPDL_CLOSED ? SPDL_E_CUDA_LOST : SPDL_FULL;
    if (holds && iter->held == iter->hold) {
        job = iter->jobs[iter->position];
        memset(&job.held, 0, sizeof(job.held));
        iter->position = (iter->position + 1) % iter->hold;
    } else {
        result = spdl__iter_take(iter, deadline);
        if (result == SPDL_OK) result = spdl__iter_prepare(iter, &job, deadline);
        if (result == SPDL_OK && holds) spdl__iter_keep(iter, &job);
    }
    if (result == SPDL_OK) {
        job.deadline = SPDL__NEVER; /* there are as many numbers as slots: no wait worth the name */
        result = spdl__cuda_submit(cuda, *slot, &job);
        if (result != SPDL_OK) spdl__held_release(&job.held);
    }
    if (result != SPDL_OK) (void)spdl_ring_try_push(cuda->free_slots, slot);
    return result;
}

/* Asks now and then whether copies are done that nobody had to wait for: every second call, about
   the newest that was sent before this call, unless copies were reaped anyway. */
SPDL__PRIVATE spdl_result spdl__iter_reap(spdl_cuda_iter *iter, uint64_t sent_before) {
    spdl_cuda *cuda = iter->cuda;
    const uint64_t reclaimed = spdl__load(&cuda->reclaimed);
    bool done;
    if (reclaimed != iter->reclaimed_before) iter->calls_since = 0;
    iter->reclaimed_before = reclaimed;
    if (reclaimed >= sent_before || ++iter->calls_since < 2) return SPDL_OK;
    iter->calls_since = 0;
    return spdl__cuda_reap_if_done(cuda, sent_before, &done);
}

SPDL__PRIVATE void spdl__iter_put(spdl_cuda_iter *iter, spdl__cuda_slot *slot) {
    iter->queue[(iter->first + iter->count++) % (iter->desc.depth + 2)] = slot;
}

/* Whether the last thing in the queue is an end: no other follows at once. */
SPDL__PRIVATE bool spdl__iter_ended(const spdl_cuda_iter *iter) {
    const int last = (iter->first + iter->count - 1) % (iter->desc.depth + 2);
    return iter->count > 0 && iter->queue[last] == NULL;
}

/* Fills the queue, waiting only when it is empty. What fetching returned last, or an error. */
SPDL__PRIVATE spdl_result spdl__iter_top_up(spdl_cuda_iter *iter, uint64_t deadline) {
    const uint64_t sent_before = spdl__load(&iter->cuda->sent);
    spdl_result result = SPDL_OK;
    while (iter->end == SPDL_OK && result == SPDL_OK && iter->count <= iter->desc.depth) {
        spdl__cuda_slot *slot = NULL;
        result = spdl__iter_fetch(iter, iter->count == 0 ? deadline : 0, &slot);
        if (result == SPDL_OK) spdl__iter_put(iter, slot);
        if (result == SPDL_END && !spdl__iter_ended(iter)) spdl__iter_put(iter, NULL);
        if (result != SPDL_OK && result != SPDL_END && result != SPDL_TIMEOUT &&
            result != SPDL_FULL)
            iter->end = result;
    }
    if (iter->end == SPDL_OK) iter->end = spdl__iter_reap(iter, sent_before);
    return result;
}

/* The next batch that was sent ahead, or that is held. */
SPDL__PRIVATE spdl_result spdl__iter_obtain(spdl_cuda_iter *iter, uint64_t deadline,
                                            spdl__cuda_slot **slot) {
    const bool holds = iter->hold > 0 && iter->what == SPDL_CUDA_HOLD_DEVICE;
    spdl_result result;
    if (holds && iter->held == iter->hold) {
        *slot = iter->slots[iter->position];
        iter->position = (iter->position + 1) % iter->hold;
        return SPDL_OK;
    }
    result = spdl__iter_top_up(iter, deadline);
    if (iter->count == 0 && iter->end != SPDL_OK) return iter->end;
    if (iter->count == 0 && result == SPDL_FULL)
        return spdl__cuda_refuse(iter->cuda, SPDL_E_LIMIT,
                                 "next: all device slots hold batches that were not done with");
    if (iter->count == 0) return result;
    *slot = iter->queue[iter->first];
    iter->first = (iter->first + 1) % (iter->desc.depth + 2);
    --iter->count;
    if (*slot == NULL) return SPDL_END;
    if (holds) iter->slots[iter->held++] = *slot;
    (*slot)->repeats = holds;
    return SPDL_OK;
}

/* Is done with the batch of the last call. `checked`: work may be put on its stream. */
SPDL__PRIVATE spdl_result spdl__iter_finish(spdl_cuda_iter *iter, bool *checked) {
    spdl_result result;
    *checked = false;
    if (iter->current == NULL) return SPDL_OK;
    result = spdl__slot_finish(iter->cuda, iter->current);
    if (result != SPDL_OK) return result;
    if (!iter->current->repeats) spdl__slot_retire(iter->cuda, iter->current);
    *checked = true;
    iter->current = NULL;
    return SPDL_OK;
}

SPDL_API spdl_result spdl_cuda_next(spdl_cuda_iter *iter, spdl_cuda_stream stream,
                                    spdl_cuda_batch *batch, int64_t timeout_ns) {
    uint64_t start;
    spdl_result result;
    bool checked;
    if (batch == NULL) return SPDL_E_INVALID;
    memset(batch, 0, sizeof(*batch));
    if (iter == NULL) return SPDL_E_INVALID;
    result = spdl__cuda_usable(iter->cuda);
    if (result == SPDL_OK) result = spdl__iter_finish(iter, &checked);
    if (result != SPDL_OK) return result;
    if (iter->offered == NULL) {
        start = spdl_time_ns();
        result = spdl__iter_obtain(iter, spdl__deadline(timeout_ns), &iter->offered);
        spdl__add(&iter->cuda->wait_next_ns, spdl_time_ns() - start);
        if (result != SPDL_OK) {
            iter->offered = NULL;
            return result;
        }
    }
    result = spdl__slot_ready(iter->cuda, iter->offered, stream,
                              checked && iter->stream == stream);
    if (result != SPDL_OK) return result; /* it is offered again */
    iter->current = iter->offered;
    iter->offered = NULL;
    iter->stream = stream;
    iter->current->lent = true;
    *batch = iter->current->batch;
    return SPDL_OK;
}

/* The last batch to be done with whose bytes on the host are those of a job, or NULL. */
SPDL__PRIVATE spdl__cuda_slot *spdl__iter_user(const spdl_cuda_iter *iter, const void *data) {
    int i = iter->count;
    while (--i >= 0) {
        spdl__cuda_slot *slot = iter->queue[(iter->first + i) % (iter->desc.depth + 2)];
        if (slot != NULL && slot->batch.host == data) return slot;
    }
    if (iter->offered != NULL && iter->offered->batch.host == data) return iter->offered;
    return iter->current != NULL && iter->current->batch.host == data ? iter->current : NULL;
}

/* Nothing is held any more. What the trainer has now goes back when it is done with it. */
SPDL__PRIVATE spdl_result spdl__iter_let_go(spdl_cuda_iter *iter) {
    spdl_result result = SPDL_OK;
    int i;
    if (iter->what == SPDL_CUDA_HOLD_HOST && iter->held > 0) result = spdl__cuda_drain(iter->cuda);
    if (result == SPDL_E_CUDA) return result; /* they are still read */
    for (i = 0; i < iter->held; ++i) {
        if (iter->what == SPDL_CUDA_HOLD_HOST) {
            spdl__cuda_slot *user = spdl__iter_user(iter, iter->jobs[i].data);
            if (user != NULL)
                user->held = iter->jobs[i].held;
            else
                spdl__held_release(&iter->jobs[i].held);
        } else {
            iter->slots[i]->repeats = false;
            if (iter->slots[i] != iter->current && iter->slots[i] != iter->offered)
                spdl__slot_retire(iter->cuda, iter->slots[i]);
        }
    }
    iter->hold = iter->held = iter->position = 0;
    return result;
}

/* Whether each batch has a host slot: items are those, or are copied there. */
SPDL__PRIVATE bool spdl__iter_fills_hosts(const spdl_cuda_iter *iter) {
    const spdl__cuda_slab *arena;
    bool pinned = iter->cuda->cpu;
    if (iter->desc.view == NULL) return true;
    pthread_mutex_lock(&iter->cuda->lock);
    for (arena = iter->cuda->arenas; arena != NULL; arena = arena->next)
        pinned = pinned || arena->pinned;
    pthread_mutex_unlock(&iter->cuda->lock);
    return !pinned;
}

SPDL_API spdl_result spdl_cuda_iter_hold(spdl_cuda_iter *iter, int n, spdl_cuda_hold what) {
    spdl_result result;
    if (iter == NULL) return SPDL_E_INVALID;
    result = spdl__cuda_usable(iter->cuda);
    if (result != SPDL_OK) return result;
    if (n < 0 || n > iter->cuda->desc.device_slots || (what != SPDL_CUDA_HOLD_DEVICE &&
                                                       what != SPDL_CUDA_HOLD_HOST))
        return spdl__cuda_refuse(iter->cuda, SPDL_E_INVALID,
                                 "iter_hold: n must be 0 to device_slots");
    if (n > iter->cuda->desc.host_slots && spdl__iter_fills_hosts(iter) &&
        (what == SPDL_CUDA_HOLD_HOST || iter->cuda->cpu || iter->cuda->desc.keep_host))
        return spdl__cuda_refuse(iter->cuda, SPDL_E_INVALID, "iter_hold: n batches keep as many "
                                                             "host slots, and there are fewer");
    result = spdl__iter_let_go(iter);
    if (result != SPDL_OK) return result;
    iter->hold = n;
    iter->what = what;
    return SPDL_OK;
}

SPDL_API spdl_result spdl_cuda_view_batch(void *item, spdl_cuda_view *view) {
    const spdl__batch *batch = (const spdl__batch *)item;
    if (batch == NULL || view == NULL || batch->shown.data == NULL) return SPDL_E_INVALID;
    view->data = batch->shown.data;
    view->bytes = batch->shown.count * (batch->pool->block_bytes / batch->pool->size);
    return SPDL_OK;
}

SPDL__PRIVATE spdl_result spdl__iter_refuse(const spdl_cuda_iter_desc *desc, const char *why) {
    return spdl__error_set(desc->error, SPDL_E_INVALID, "spdl: cuda: iterator: %s", why);
}

/* Frees whatever there is; nothing is in flight. */
SPDL__PRIVATE void spdl__iter_release(spdl_cuda_iter *iter) {
    spdl_cuda *cuda = iter->cuda;
    const spdl_allocator *allocator = &cuda->desc.allocator;
    const size_t slots = (size_t)cuda->desc.device_slots;
    spdl__free(allocator, iter->arrays, slots * SPDL_CUDA_MAX_ARRAYS * sizeof(*iter->arrays));
    spdl__free(allocator, iter->jobs, slots * sizeof(*iter->jobs));
    spdl__free(allocator, iter->slots, slots * sizeof(void *));
    spdl__free(allocator, iter->queue, (size_t)(iter->desc.depth + 2) * sizeof(void *));
    spdl__free(allocator, iter, sizeof(*iter));
    spdl__store32(&cuda->iterating, 0);
    spdl__cuda_notify(cuda); /* who waits for host slots reaps now */
}

SPDL_API spdl_result spdl_cuda_iter_open(spdl_cuda_iter **iter, spdl_cuda *cuda,
                                         const spdl_cuda_iter_desc *desc) {
    const spdl_allocator *allocator;
    spdl_cuda_iter *made;
    uint32_t none = 0;
    size_t slots;
    spdl_result result;
    if (iter == NULL) return SPDL_E_INVALID;
    *iter = NULL;
    if (desc == NULL) return SPDL_E_INVALID;
    spdl__error_clear(desc->error);
    result = spdl__cuda_usable(cuda);
    if (result != SPDL_OK)
        return spdl__error_set(desc->error, result, "spdl: cuda: iterator: %s",
                               spdl_result_text(result));
    if (desc->next == NULL) return spdl__iter_refuse(desc, "next is NULL");
    if (desc->depth < 0 || desc->depth > cuda->desc.device_slots - 1)
        return spdl__iter_refuse(desc, "depth must be 0 to device_slots - 1");
    if (!spdl__cas32(&cuda->iterating, &none, 1))
        return spdl__iter_refuse(desc, "there is one on this spdl_cuda already");
    allocator = &cuda->desc.allocator;
    slots = (size_t)cuda->desc.device_slots;
    made = (spdl_cuda_iter *)spdl__alloc_zeroed(allocator, 1, sizeof(*made), 0);
    if (made != NULL) {
        made->cuda = cuda;
        made->desc = *desc;
        made->desc.error = NULL; /* the caller's, for this call only */
        if (made->desc.depth == 0) made->desc.depth = cuda->desc.device_slots - 1;
        if (cuda->cpu) made->desc.depth = 0; /* sending ahead would only hold host slots */
        made->queue = (spdl__cuda_slot **)spdl__alloc_zeroed(
            allocator, (size_t)made->desc.depth + 2, sizeof(void *), 0);
        made->slots = (spdl__cuda_slot **)spdl__alloc_zeroed(allocator, slots, sizeof(void *), 0);
        made->jobs =
            (spdl__cuda_job *)spdl__alloc_zeroed(allocator, slots, sizeof(*made->jobs), 0);
        made->arrays = (spdl_cuda_array *)spdl__alloc_zeroed(
            allocator, slots * SPDL_CUDA_MAX_ARRAYS, sizeof(*made->arrays), 0);
        if (made->queue != NULL && made->slots != NULL && made->jobs != NULL &&
            made->arrays != NULL) {
            *iter = made;
            return SPDL_OK;
        }
        spdl__iter_release(made);
    }
    spdl__store32(&cuda->iterating, 0);
    return spdl__error_set(desc->error, SPDL_E_NOMEM, "spdl: cuda: iterator: out of memory");
}

/* A batch that will not be handed out, or that the trainer is done with. */
SPDL__PRIVATE void spdl__iter_drop(spdl_cuda_iter *iter, spdl__cuda_slot *slot) {
    if (slot == NULL) return;
    spdl__slot_end(iter->cuda, slot);
    spdl__slot_retire(iter->cuda, slot);
}

SPDL_API void spdl_cuda_iter_close(spdl_cuda_iter *iter) {
    spdl__cuda_reader copies;
    spdl_cuda *cuda;
    if (iter == NULL || iter->cuda->process != (long)getpid()) return;
    cuda = iter->cuda;
    copies = spdl__stream_of(cuda->stream);
    if (spdl__iter_let_go(iter) != SPDL_OK && !cuda->cpu) {
        spdl__stream_settle(cuda, &copies); /* done, or lost: see >>state-impl */
        (void)spdl__iter_let_go(iter);
    }
    spdl__iter_drop(iter, iter->current);
    spdl__iter_drop(iter, iter->offered);
    for (; iter->count > 0; --iter->count, ++iter->first)
        spdl__iter_drop(iter, iter->queue[iter->first % (iter->desc.depth + 2)]);
    if (spdl__cuda_drain(cuda) != SPDL_OK && !cuda->cpu) spdl__stream_settle(cuda, &copies);
    spdl__cuda_reap(cuda, cuda->sent);
    if (iter->has_item && iter->desc.free_item != NULL) iter->desc.free_item(iter->item);
    spdl__iter_release(iter);
}

#endif /* SPDL_CUDA_IMPLEMENTATION */

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
