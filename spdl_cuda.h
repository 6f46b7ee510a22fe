/* spdl_cuda.h - v0.1.0 - CUDA companion of spdl.h - SPDX-License-Identifier: MIT

   DO THIS: in exactly one C, C++ or .cu file of your program,

       #define SPDL_IMPLEMENTATION
       #include "spdl.h"
       #define SPDL_CUDA_IMPLEMENTATION
       #include "spdl_cuda.h"

   and link the CUDA runtime (-lcudart, or -lcudart_static -ldl -lrt -lpthread). Plain C on the CUDA
   runtime API: nvcc is not needed, and the declarations need no CUDA header. In front of that:

       #define SPDL_CUDA_DLOPEN   no CUDA header and no link flag (but -ldl before glibc 2.34): the
                                  runtime is looked for when it is first used ($SPDL_CUDART, then
                                  libcudart.so.13, .12, .11.0)
       #define SPDL_CUDA_NONE     no CUDA at all: everything runs on the CPU
       #define SPDL_CUDA_NVTX     ranges of what the library does, in the domain "spdl" of Nsight

   Without a driver or a device the same program runs on the CPU, and says so once.

   A TRAINING LOOP

       while (spdl_cuda_next(it, stream, &batch) == SPDL_OK)
           train<<<grid, block, 0, stream>>>((const float *)batch.dev);

   No copy by the CPU, no allocation, no pinning, no wait but for data: batches lie in pinned slots
   (or in the loader's arena), go over the bus by one copy each while the last one is trained on,
   and no slot is written while somebody may still read it.

   THE FOUR EDGES that every ring of slots must have; here no call can leave one out.
       E1  a pinned slot is filled again only after the copy out of it has been seen to be done
       E2  the stream that reads a batch waits for its copy
       E3  a copy into a device slot waits for everybody who read the batch that was there
       E4  a source that is not pinned is waited for before it is let go

   CONTENTS (search for the tag)
       >>probe  >>slots  >>iterator                                        declarations
       >>probe-impl  >>license                                             implementation

   WORDS
       host slot     pinned memory for one batch, filled by the loader
       device slot   memory of the device for one batch
       arena         memory of the caller that is pinned where it is (spdl_cuda_adopt)
       copy stream   the one stream on which the library copies, in order
       reader        a stream that a batch was made ready on and that is not done with it
       lost          a CUDA error that no call can clear; only a new process helps

   THREADS
       Any thread may fill and send slots. A process that forks may not use an open spdl_cuda in the
       child: every call there returns SPDL_E_CUDA_FORKED and touches nothing.
       The CUDA device that is current for the calling thread stays what it is; errors of earlier
       CUDA calls of the caller stay where they are unless a call of the library fails as well.
       Captures of CUDA graphs on other threads and streams are not disturbed; a stream that is
       being captured is refused.

   STREAMS are cudaStream_t: any of the same device, 0 (the legacy default stream),
       cudaStreamLegacy, cudaStreamPerThread. They must outlive the batches made ready on them. The
       library has no callbacks on streams.

   LIMITS
       Linux. 16 arrays in a batch, 8 dimensions, 4 readers at a time, 8 arenas, 4096 slots. On a
       device the library was not run yet; the tests run it on a stand-in of the CUDA runtime.

   License (MIT) at the end of the file. */

#ifndef SPDL_CUDA_H_INCLUDED
#define SPDL_CUDA_H_INCLUDED

#ifndef SPDL_H_INCLUDED
#error "include spdl.h before spdl_cuda.h"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Results of this header, beside those of spdl.h. */
#define SPDL_E_CUDA        SPDL__CAST(spdl_result, -32) /* a CUDA call failed; it can be repeated */
#define SPDL_E_CUDA_LOST   SPDL__CAST(spdl_result, -33) /* the device is lost to this process */
#define SPDL_E_CUDA_FORKED SPDL__CAST(spdl_result, -34) /* opened before a fork, used behind it */

#define SPDL_CUDA_MAX_DEVICES 16
#define SPDL_CUDA_MAX_ARRAYS 16
#define SPDL_CUDA_MAX_DIMS 8
#define SPDL_CUDA_MAX_READERS 4
#define SPDL_CUDA_MAX_ARENAS 8
#define SPDL_CUDA_MAX_SLOTS 4096
#define SPDL_CUDA_ALIGN 256 /* bytes: where arrays of a batch begin */

typedef void *spdl_cuda_stream; /* a cudaStream_t */

/* What a result means, in a few words; knows those of spdl.h too.
   Returns: a string literal.
   Threads: any.
   Blocks:  never.
   Owns:    the library. */
SPDL_API const char *spdl_cuda_result_text(spdl_result result);

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
    int runtime_version; /* of the runtime that is linked or was loaded; 0: none */
    char reason[160];    /* why there is no device; empty when there is one */
    spdl_cuda_device device[SPDL_CUDA_MAX_DEVICES];
} spdl_cuda_info;

/* Says which CUDA devices there are, or why there is none: no runtime, no driver, a driver older
   than the runtime, no device, or what the runtime says. Never fails; makes no context and leaves
   no CUDA error behind that the runtime can clear.
   Returns: nothing; *info is filled in whatever happens.
   Threads: any.
   Blocks:  while the driver starts, the first time.
   Owns:    nothing. */
SPDL_API void spdl_cuda_probe(spdl_cuda_info *info);

/* ============================================================================================= */
/* >>slots
   Level 1. A host slot goes round: spdl_cuda_host_get, spdl_cuda_host_add for each array and the
   filling of it, spdl_cuda_send; when its copy is done it is free again (E1). A device slot goes
   round too: spdl_cuda_send, spdl_cuda_ready on each stream that reads it (E2), the kernels,
   spdl_cuda_done on the same streams; the next copy into it waits on the device for all of them
   (E3). Any other order is refused with SPDL_E_INVALID, and nothing happens.

   send, ready and done put work on streams and never wait for the device. Where waiting is meant it
   has a timeout: for a free host slot (copies are not done yet: the bus) and for a free device slot
   (batches are not done with yet: the trainer). */

typedef struct spdl_cuda spdl_cuda; /* slots on one device */

typedef enum spdl_cuda_backend {
    SPDL_CUDA_AUTO, /* a device, or the CPU where there is none */
    SPDL_CUDA_GPU,  /* a device, or an error */
    SPDL_CUDA_CPU   /* the CPU: device memory is host memory, nothing is copied */
} spdl_cuda_backend;

typedef struct spdl_cuda_desc {
    size_t slot_bytes;  /* the largest batch, arrays rounded up to SPDL_CUDA_ALIGN */
    int device;         /* -1: $LOCAL_RANK modulo the number of devices */
    spdl_cuda_backend backend;
    int host_slots;     /* default 4; -1: none, everything comes out of arenas */
    int device_slots;   /* default 3 */
    int touch_threads;  /* that fault the slots in; default a quarter of the cores, 4 at most */
    bool must_pin;      /* fail rather than go on with memory that cannot be pinned */
    bool no_huge_pages;
    bool any_node;      /* do not ask for memory of the device's NUMA node */
    bool time_copies;   /* fill copy_us of the statistics: 2 more CUDA calls a batch */
    spdl_allocator allocator;
    spdl_logger logger;
    spdl_error *error;  /* optional: says why open failed */
} spdl_cuda_desc;

/* An array in a batch. Types are NumPy's: "u1", "<f4", "i8"; the digits are the bytes of one
   element. */
typedef struct spdl_cuda_array {
    char name[SPDL_NAME_BYTES];
    char type[8];
    int ndim;
    uint64_t shape[SPDL_CUDA_MAX_DIMS];
    size_t offset, bytes; /* inside the batch */
} spdl_cuda_array;

/* A host slot that is being filled. Only `user` may be changed; it goes with the batch. */
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
    size_t bytes;
    int array_count;
    const spdl_cuda_array *array;
    uint64_t sequence; /* of its copy, from 0 */
    void *user;
    spdl_cuda *cuda;
    void *slot_;      /* private */
    uint64_t ticket_; /* private: a copy of a batch that is done with is recognised */
} spdl_cuda_batch;

/* A batch that already lies somewhere: in an arena (then the device reads it there) or anywhere
   else (then it is copied to a host slot). release(item) is called once it has been read. */
typedef struct spdl_cuda_view {
    const void *data;
    size_t bytes;
    int array_count;
    const spdl_cuda_array *array; /* may be NULL when array_count is 0; copied */
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
    size_t requested_bytes;      /* of host slots */
    size_t pinned_bytes;         /* for them; 0 when they could not be pinned */
    size_t adopted_bytes;        /* arenas that are pinned */
    uint64_t batches, bytes;     /* sent */
    uint64_t copied_bytes;       /* of them, copied by the CPU first */
    uint64_t cuda_calls;         /* that reach a device since open: copies, events and waits */
    uint64_t cuda_checks;        /* that only look at the thread's own state: errors, captures */
    uint64_t wait_source_ns;     /* iterator: for the source */
    uint64_t wait_bus_ns;        /* for copies, to have a host slot */
    uint64_t wait_device_ns;     /* for batches to be done with, to have a device slot */
    uint64_t wait_next_ns;       /* iterator: the trainer in spdl_cuda_next, all causes */
    uint64_t copy_us[32];        /* copies that took [2^k, 2^(k+1)) us; [0]: less than 2 */
} spdl_cuda_stats;

/* Makes the slots, and with them everything that will ever be used: pinned memory (mapped, on huge
   pages where there are any, on the device's NUMA node, faulted in by several threads, registered
   in pieces of at most 1 GiB that end on slot borders), device memory, events, one stream. Where
   memory cannot be pinned it goes on without, says so, and waits for each copy (E4). AUTO without
   any device goes on with the CPU, and says so.
   Returns: SPDL_OK, SPDL_E_INVALID (a field), SPDL_E_NOT_FOUND (no device, or not that one),
            SPDL_E_NOMEM (of host or device), SPDL_E_THREAD, SPDL_E_CUDA, SPDL_E_CUDA_LOST.
   Threads: any.
   Blocks:  while the driver starts and memory is pinned.
   Owns:    the caller closes *cuda; on failure *cuda is NULL and nothing is left. */
SPDL_API spdl_result spdl_cuda_open(spdl_cuda **cuda, const spdl_cuda_desc *desc);

/* Waits for the device, releases what was sent, and frees everything. When the CUDA runtime is
   already unloading (at exit) or the process has forked, CUDA is left alone, silently.
   Returns: nothing; NULL is allowed.
   Threads: owner; its iterator must be closed; no other call on it may be running.
   Blocks:  until the device is idle.
   Owns:    slots and batches of it end. */
SPDL_API void spdl_cuda_close(spdl_cuda *cuda);

/* Pins memory of the caller where it is, the arena of a loader process for one: `bytes` from `base`
   (at a page border), cut in slots of slot_bytes (the last may be shorter). Batches that lie in one
   slot of it are read there by the device. Memory that another spdl_cuda of this process has pinned
   is shared: that one must be closed last. If it cannot be pinned, batches are copied to host slots
   instead, and the log says so, unless must_pin is set.
   Returns: SPDL_OK, SPDL_E_INVALID, SPDL_E_LIMIT (8 arenas), SPDL_E_CUDA (must_pin),
            SPDL_E_CUDA_LOST, SPDL_E_CUDA_FORKED.
   Threads: any.
   Blocks:  while memory is pinned.
   Owns:    the caller; it must stay mapped until spdl_cuda_disown or spdl_cuda_close. */
SPDL_API spdl_result spdl_cuda_adopt(spdl_cuda *cuda, void *base, size_t bytes, size_t slot_bytes);

/* Unpins an arena, once all copies have been made; batches out of it have been released then.
   Returns: SPDL_OK, SPDL_E_NOT_FOUND (no arena begins there), SPDL_E_CUDA, SPDL_E_CUDA_LOST,
            SPDL_E_CUDA_FORKED.
   Threads: any; nothing may be sent out of that arena meanwhile.
   Blocks:  until the copies that were sent are done.
   Owns:    the arena is the caller's alone. */
SPDL_API spdl_result spdl_cuda_disown(spdl_cuda *cuda, void *base);

/* A free host slot, to be filled. Waiting for one is the back-pressure: it comes when a copy is
   done. While an iterator is open this makes no CUDA calls: the iterator sees to it.
   Returns: SPDL_OK, SPDL_TIMEOUT, SPDL_E_INVALID (there are no host slots), SPDL_E_CUDA,
            SPDL_E_CUDA_LOST, SPDL_E_CUDA_FORKED.
   Threads: any.
   Blocks:  until a slot is free, or up to timeout_ns.
   Owns:    the caller has *host until it is sent or freed. */
SPDL_API spdl_result spdl_cuda_host_get(spdl_cuda *cuda, spdl_cuda_host **host, int64_t timeout_ns);

/* Adds an array to a slot and hands out where to write it: C order, aligned to 256 bytes.
   Returns: SPDL_OK, SPDL_E_LIMIT (the slot is full, or has 16 arrays), SPDL_E_INVALID (type, shape,
            or the slot is not being filled).
   Threads: whoever has the slot.
   Blocks:  never.
   Owns:    *data is part of the slot. */
SPDL_API spdl_result spdl_cuda_host_add(spdl_cuda_host *host, const char *name, const char *type,
                                        int ndim, const uint64_t *shape, void **data);

/* Gives back a slot that was not sent.
   Returns: nothing; NULL and a slot that was sent are ignored. Fits free_item.
   Threads: whoever has the slot.
   Blocks:  never.
   Owns:    the slot is the library's. */
SPDL_API void spdl_cuda_host_free(void *host);

/* Sends a slot to the device by one copy on the copy stream, and takes it. It waits for a device
   slot, and never for the device unless memory is not pinned.
   Returns: SPDL_OK, SPDL_TIMEOUT (no device slot), SPDL_E_INVALID (the slot is not being filled),
            SPDL_E_CUDA, SPDL_E_CUDA_LOST, SPDL_E_CUDA_FORKED.
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
            in a later call, or in spdl_cuda_close. Otherwise it stays the caller's. */
SPDL_API spdl_result spdl_cuda_send_view(spdl_cuda *cuda, const spdl_cuda_view *view,
                                         spdl_cuda_batch *batch, int64_t timeout_ns);

/* Makes a batch ready on a stream: work put on it from now on sees the data. Up to 4 streams may
   read a batch; each has to be done with it.
   Returns: SPDL_OK, SPDL_E_INVALID (the batch was done with; the stream is being captured),
            SPDL_E_LIMIT (a fifth stream), SPDL_E_CUDA, SPDL_E_CUDA_LOST, SPDL_E_CUDA_FORKED.
   Threads: whoever has the batch.
   Blocks:  never.
   Owns:    nothing changes hands. */
SPDL_API spdl_result spdl_cuda_ready(const spdl_cuda_batch *batch, spdl_cuda_stream stream);

/* Says that the last work that reads the batch has been put on the stream. When all streams it was
   made ready on are done with it, its slot goes back.
   Returns: SPDL_OK, SPDL_E_INVALID (not ready on that stream, or done with before; the stream is
            being captured), SPDL_E_CUDA, SPDL_E_CUDA_LOST, SPDL_E_CUDA_FORKED.
   Threads: whoever has the batch.
   Blocks:  never.
   Owns:    with the last stream the batch is the library's; after a failure it stays the
            caller's, who may try again. */
SPDL_API spdl_result spdl_cuda_done(const spdl_cuda_batch *batch, spdl_cuda_stream stream);

/* Gives back a batch that is not wanted, done with on the streams it was made ready on.
   Returns: nothing; NULL and a batch that was done with are ignored. Fits free_item.
   Threads: whoever has the batch.
   Blocks:  never; if the end of its readers cannot be recorded, until they are done.
   Owns:    the batch is the library's. */
SPDL_API void spdl_cuda_batch_free(void *batch);

/* Where an array of the batch lies on the device.
   Returns: NULL when there is none of that name.
   Threads: any.
   Blocks:  never.
   Owns:    the batch. */
SPDL_API void *spdl_cuda_batch_array(const spdl_cuda_batch *batch, const char *name);

/* Copies bytes of a batch back to the host, behind the work on a stream it is ready on. For looking
   at results and for tests; it is not fast.
   Returns: SPDL_OK, SPDL_E_INVALID (done with, not ready on that stream, outside of the batch),
            SPDL_E_CUDA, SPDL_E_CUDA_LOST, SPDL_E_CUDA_FORKED.
   Threads: whoever has the batch.
   Blocks:  until the work on the stream is done.
   Owns:    `to` is the caller's. */
SPDL_API spdl_result spdl_cuda_peek(const spdl_cuda_batch *batch, size_t offset, void *to,
                                    size_t bytes, spdl_cuda_stream stream);

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

/* SPDL_CUDA_TRANSFER(cuda): a row of a pipeline that takes host slots (spdl_cuda_host) and yields
   batches (spdl_cuda_batch). The row before it has .free_item = spdl_cuda_host_free. The trainer
   calls spdl_cuda_ready and spdl_cuda_done for what it gets. device_slots should be buffer_size of
   the row (2) + that of the sink + 2; with fewer, one worker waits in this stage. */
/* clang-format off */
#if !defined(__cplusplus) || __cplusplus >= 202002L
#define SPDL_CUDA_TRANSFER(cuda_)                                                                  \
    SPDL__STAGE { .kind = SPDL_KIND_PIPE, .fn = spdl_cuda_transfer(), .file = __FILE__,            \
                  .ctx = (cuda_), .free_item = spdl_cuda_batch_free, .line = __LINE__ }
#else
#define SPDL_CUDA_TRANSFER(cuda_)                                                                  \
    spdl__row(SPDL_KIND_PIPE, spdl_cuda_transfer(), __FILE__, __LINE__, 0, 0)                      \
        .with_ctx(cuda_).with_free_item(spdl_cuda_batch_free)
#endif
/* clang-format on */

/* The function of the row that SPDL_CUDA_TRANSFER makes.
   Returns: never NULL.
   Threads: any.
   Blocks:  never.
   Owns:    the library. */
SPDL_API const spdl_function *spdl_cuda_transfer(void);

/* ============================================================================================= */
/* >>iterator
   Level 2: what a training loop uses. It takes items from anything with a next function, sends them
   ahead of time, hands out batches that are ready on the trainer's stream, and is done with the
   last one on that stream when the next is asked for. An item is a host slot, or what `view`
   describes: a batch of the loader that lies in an adopted arena goes to the device without a copy
   by the CPU.

   Inline mode: the calls to CUDA are made inside spdl_cuda_next, on the trainer's thread; no other
   thread of the process calls CUDA, so none contends with kernel launches. Thread mode: one thread
   does it, for trainers that call next too rarely to keep the bus busy.

   Caches, with the parameters of spdl_cache: the first num_caches batches are kept on the device
   (its step is then that of the kernels alone: the ceiling) or on the host in pinned memory (then
   each is copied again: the ceiling with the bus). Kept batches must not be changed by kernels. */

typedef enum spdl_cuda_mode { SPDL_CUDA_INLINE, SPDL_CUDA_THREAD } spdl_cuda_mode;

typedef enum spdl_cuda_cache {
    SPDL_CUDA_CACHE_NONE,
    SPDL_CUDA_CACHE_DEVICE,
    SPDL_CUDA_CACHE_HOST
} spdl_cuda_cache;

/* Describes an item of the source; view->item and view->release are already set. */
typedef spdl_result (*spdl_cuda_view_fn)(void *item, spdl_cuda_view *view);

typedef struct spdl_cuda_iter_desc {
    spdl_next_fn next;       /* spdl_pipeline_next_fn, spdl_cache_next_fn, ... */
    void *source;
    spdl_cuda_view_fn view;  /* NULL: items are spdl_cuda_host, and free_item is not used */
    spdl_free_fn free_item;  /* destroys an item, when its memory has been read */
    spdl_cuda_mode mode;
    int depth;               /* batches sent ahead; default and at most device_slots - 1 */
    spdl_cuda_cache cache;
    uint64_t num_caches;          /* with a cache at least 1 */
    uint64_t return_caches_after; /* default num_caches, and at least that */
    uint64_t stop_after;          /* end after so many batches in all; 0: never */
    void (*delete_source)(void *source); /* optional: called once, when the source is done with */
    spdl_error *error;            /* optional: says why open failed */
} spdl_cuda_iter_desc;

typedef struct spdl_cuda_iter spdl_cuda_iter;

/* Makes an iterator, with the memory its cache needs. There is one at a time on an spdl_cuda.
   Returns: SPDL_OK, SPDL_E_INVALID (a field, or there is an iterator already), SPDL_E_NOMEM,
            SPDL_E_THREAD, SPDL_E_CUDA, SPDL_E_CUDA_LOST, SPDL_E_CUDA_FORKED.
   Threads: any.
   Blocks:  while memory is pinned.
   Owns:    the caller closes *iter, and keeps the source unless delete_source is set and this
            returned SPDL_OK. */
SPDL_API spdl_result spdl_cuda_iter_open(spdl_cuda_iter **iter, spdl_cuda *cuda,
                                         const spdl_cuda_iter_desc *desc);

/* Is done with the batch of the last call on the stream of that call, and hands out the next, ready
   on `stream`. What comes last is told by every later call: the end, what the source returned, or
   the CUDA call that failed; batches before it are delivered first.
   Returns: SPDL_OK, SPDL_END, SPDL_E_INVALID (the stream is being captured), what the source or
            `view` returned, SPDL_E_CUDA, SPDL_E_CUDA_LOST, SPDL_E_CUDA_FORKED.
   Threads: one at a time (the trainer).
   Blocks:  until the source has an item, or a copy has freed a slot for the loader to go on.
   Owns:    *batch is lent until the next call; do not call spdl_cuda_done for it. */
SPDL_API spdl_result spdl_cuda_next(spdl_cuda_iter *iter, spdl_cuda_stream stream,
                                    spdl_cuda_batch *batch);

/* Whether batches now come from the cache.
   Returns: true once the source is no longer used.
   Threads: the trainer.
   Blocks:  never.
   Owns:    nothing. */
SPDL_API bool spdl_cuda_iter_warm(const spdl_cuda_iter *iter);

/* Ends the iterator: waits for copies, releases the items, frees the cache, and deletes the source
   when delete_source is set and was not called yet. The last batch may still be in use on the
   device: it is waited for.
   Returns: nothing; NULL is allowed.
   Threads: the trainer; no other call on it may be running.
   Blocks:  until the device is idle; in thread mode until the call of next that is running has
            returned, which is asked to within 20 ms.
   Owns:    batches and cache end. */
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

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>

/* ============================================================================================= */
/* >>probe-impl
   Any thread; no state. cudaDriverGetVersion comes first because it is the one call that succeeds,
   and leaves no error, on a machine without a driver; cudaGetDeviceCount does not even write its
   result there. */

SPDL__UNUSED static void spdl__cuda_reason(spdl_cuda_info *info, const char *call,
                                           cudaError_t error) {
    (void)snprintf(info->reason, sizeof(info->reason), "%s: %s", call, cudaGetErrorString(error));
    (void)cudaGetLastError(); /* clears it, unless it is one that stays */
}

SPDL__UNUSED static bool spdl__cuda_describe(spdl_cuda_info *info, int i) {
    spdl_cuda_device *device = &info->device[i];
    struct cudaDeviceProp properties;
    const cudaError_t error = cudaGetDeviceProperties(&properties, i);
    if (error != cudaSuccess) {
        spdl__cuda_reason(info, "cudaGetDeviceProperties", error);
        return false;
    }
    (void)snprintf(device->name, sizeof(device->name), "%.63s", properties.name);
    device->major = properties.major;
    device->minor = properties.minor;
    device->memory_bytes = properties.totalGlobalMem;
    return true;
}

SPDL_API void spdl_cuda_probe(spdl_cuda_info *info) {
    cudaError_t error;
    int i, count = 0;
    memset(info, 0, sizeof(*info));
    (void)cudaRuntimeGetVersion(&info->runtime_version);
    error = cudaDriverGetVersion(&info->driver_version);
    if (error != cudaSuccess || info->driver_version == 0) {
        (void)snprintf(info->reason, sizeof(info->reason), "no NVIDIA driver was found");
        return;
    }
    error = cudaGetDeviceCount(&count);
    if (error == cudaErrorInsufficientDriver)
        (void)snprintf(info->reason, sizeof(info->reason),
                       "the driver supports CUDA %d.%d, the program is linked with %d.%d",
                       info->driver_version / 1000, info->driver_version % 1000 / 10,
                       info->runtime_version / 1000, info->runtime_version % 1000 / 10);
    else if (error != cudaSuccess)
        spdl__cuda_reason(info, "cudaGetDeviceCount", error);
    else if (count == 0)
        (void)snprintf(info->reason, sizeof(info->reason), "the driver sees no device");
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        return;
    }
    for (i = 0; i < count && i < SPDL_CUDA_MAX_DEVICES; ++i)
        if (!spdl__cuda_describe(info, i)) return;
    info->device_count = count;
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
