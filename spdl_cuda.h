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
       >>runtime-impl  >>probe-impl  >>state-impl  >>memory-impl  >>copy-impl  >>slots-impl
       >>open-impl  >>iterator-impl  >>license                             implementation

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
       CUDA calls of the caller stay where they are, unless a call of the library fails as well or
       has to poll (spdl_cuda_host_get and spdl_cuda_reap with a timeout that ends).
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
    uint64_t wait_device_ns;     /* for batches to be done with, by the caller or by kernels that a
                                    copy waits for; exact up to two copies in flight for each
                                    device slot, beyond that a slow bus may count here */
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
            or the slot is not being filled), SPDL_E_CUDA_FORKED.
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

/* Records copies from here on in the trace of a pipeline, whoever sends them: as spans "copy to
   device" with their bytes, from when a copy was put on the copy stream to when it was seen to be
   done (which may be a call or two later). NULL ends it: it has to, before the pipeline is
   destroyed. Copies that are not seen to be done until the next call of this are left out, and so
   is what the CPU backend does. (Not measured on a GPU.)
   Returns: nothing.
   Threads: any.
   Blocks:  never, except for calls that send meanwhile.
   Owns:    nothing; the pipeline stays alive until the next call, or spdl_cuda_close. */
SPDL_API void spdl_cuda_trace(spdl_cuda *cuda, const spdl_pipeline *pipeline);

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
   on `stream`. Every later call returns what comes last: the end, what the source returned, or
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

#ifndef SPDL_IMPLEMENTATION_INCLUDED
#error "spdl_cuda.h: its implementation stands after that of spdl.h, in the same file"
#endif

#include <sys/mman.h>

#ifdef SPDL_CUDA_NVTX
#include <nvtx3/nvToolsExt.h>
#endif
#if defined(SPDL_CUDA_NONE)
#elif defined(SPDL_CUDA_DLOPEN)
#include <dlfcn.h>
#else
#include <cuda_runtime_api.h>
#endif

/* ============================================================================================= */
/* >>runtime-impl
   What is used of the CUDA runtime, as one table with three fillings: functions that call the
   runtime this is linked with (so the compiler compares our types with those of its header),
   pointers out of a runtime that was opened (all arguments are integers and pointers, and have been
   the same since CUDA 11), and the CPU: no device, device memory is host memory, a copy is done
   when the call returns. A table belongs to the object that was opened; any thread reads it. */

enum { /* of cudaError_t */
    SPDL__CU_UNLOADING = 4,
    SPDL__CU_OLD_DRIVER = 35,
    SPDL__CU_ALREADY_PINNED = 712,
    SPDL__CU_NOT_READY = 600
};

enum { /* flags and attributes */
    SPDL__CU_RELAXED = 2,         /* cudaStreamCaptureModeRelaxed */
    SPDL__CU_TO_DEVICE = 1,       /* cudaMemcpyHostToDevice */
    SPDL__CU_TO_HOST = 2,         /* cudaMemcpyDeviceToHost */
    SPDL__CU_NON_BLOCKING = 1,    /* cudaStreamNonBlocking */
    SPDL__CU_BLOCKING_SYNC = 1,   /* cudaEventBlockingSync */
    SPDL__CU_DISABLE_TIMING = 2,  /* cudaEventDisableTiming */
    SPDL__CU_PORTABLE = 1,        /* cudaHostRegisterPortable */
    SPDL__CU_ATTR_MAJOR = 75,     /* cudaDevAttrComputeCapabilityMajor */
    SPDL__CU_ATTR_MINOR = 76,
    SPDL__CU_ATTR_NUMA_NODE = 134 /* cudaDevAttrHostNumaId */
};

/* clang-format off */
#define SPDL__CUDA_CALLS(X)                                                                        \
    X(DriverGetVersion, (int *version), (version))                                                 \
    X(RuntimeGetVersion, (int *version), (version))                                                \
    X(GetDeviceCount, (int *count), (count))                                                       \
    X(GetDeviceProperties, (void *to, int device), ((struct cudaDeviceProp *)to, device))          \
    X(DeviceGetAttribute, (int *value, int attribute, int device),                                 \
      (value, (enum cudaDeviceAttr)attribute, device))                                             \
    X(DeviceGetPCIBusId, (char *text, int bytes, int device), (text, bytes, device))               \
    X(GetDevice, (int *device), (device))                                                          \
    X(SetDevice, (int device), (device))                                                           \
    X(DeviceSynchronize, (void), ())                                                               \
    X(GetLastError, (void), ())                                                                    \
    X(PeekAtLastError, (void), ())                                                                 \
    X(ThreadExchangeStreamCaptureMode, (int *mode), ((enum cudaStreamCaptureMode *)(void *)mode))  \
    X(StreamCreateWithFlags, (void **stream, unsigned flags),                                      \
      ((cudaStream_t *)(void *)stream, flags))                                                     \
    X(StreamDestroy, (void *stream), ((cudaStream_t)stream))                                       \
    X(StreamSynchronize, (void *stream), ((cudaStream_t)stream))                                   \
    X(StreamWaitEvent, (void *stream, void *event, unsigned flags),                                \
      ((cudaStream_t)stream, (cudaEvent_t)event, flags))                                           \
    X(StreamIsCapturing, (void *stream, int *status),                                              \
      ((cudaStream_t)stream, (enum cudaStreamCaptureStatus *)(void *)status))                      \
    X(EventCreateWithFlags, (void **event, unsigned flags),                                        \
      ((cudaEvent_t *)(void *)event, flags))                                                       \
    X(EventDestroy, (void *event), ((cudaEvent_t)event))                                           \
    X(EventRecord, (void *event, void *stream), ((cudaEvent_t)event, (cudaStream_t)stream))        \
    X(EventQuery, (void *event), ((cudaEvent_t)event))                                             \
    X(EventSynchronize, (void *event), ((cudaEvent_t)event))                                       \
    X(EventElapsedTime, (float *ms, void *start, void *end),                                       \
      (ms, (cudaEvent_t)start, (cudaEvent_t)end))                                                  \
    X(Malloc, (void **memory, size_t bytes), (memory, bytes))                                      \
    X(Free, (void *memory), (memory))                                                              \
    X(HostRegister, (void *memory, size_t bytes, unsigned flags), (memory, bytes, flags))          \
    X(HostUnregister, (void *memory), (memory))                                                    \
    X(MemcpyAsync, (void *to, const void *from, size_t bytes, int kind, void *stream),             \
      (to, from, bytes, (enum cudaMemcpyKind)kind, (cudaStream_t)stream))
/* clang-format on */

typedef struct spdl__cuda_api {
#define SPDL__CUDA_POINTER(name, parameters, arguments) int(*name) parameters;
    SPDL__CUDA_CALLS(SPDL__CUDA_POINTER)
#undef SPDL__CUDA_POINTER
    const char *(*GetErrorString)(int error);
} spdl__cuda_api;

/* The CPU. One function for each list of parameters. */
SPDL__PRIVATE int spdl__cpu_ok(void) { return 0; }
SPDL__PRIVATE int spdl__cpu_ok_i(int i SPDL__UNUSED) { return 0; }
SPDL__PRIVATE int spdl__cpu_zero(int *value) { return *value = 0; }
SPDL__PRIVATE int spdl__cpu_ok_p(void *p SPDL__UNUSED) { return 0; }
SPDL__PRIVATE int spdl__cpu_ok_pp(void *p SPDL__UNUSED, void *q SPDL__UNUSED) { return 0; }
SPDL__PRIVATE int spdl__cpu_ok_pi(void *p SPDL__UNUSED, int i SPDL__UNUSED) { return 0; }
SPDL__PRIVATE int spdl__cpu_ok_ppu(void *p SPDL__UNUSED, void *q SPDL__UNUSED,
                                   unsigned u SPDL__UNUSED) {
    return 0;
}
SPDL__PRIVATE int spdl__cpu_ok_pzu(void *p SPDL__UNUSED, size_t z SPDL__UNUSED,
                                   unsigned u SPDL__UNUSED) {
    return 0;
}
SPDL__PRIVATE int spdl__cpu_none(void **made, unsigned flags SPDL__UNUSED) {
    *made = NULL;
    return 0;
}
SPDL__PRIVATE int spdl__cpu_attribute(int *value, int which SPDL__UNUSED, int i SPDL__UNUSED) {
    *value = -1;
    return 0;
}
SPDL__PRIVATE int spdl__cpu_bus(char *text, int bytes, int device SPDL__UNUSED) {
    if (bytes > 0) text[0] = '\0';
    return 0;
}
SPDL__PRIVATE int spdl__cpu_capturing(void *stream SPDL__UNUSED, int *status) {
    return *status = 0;
}
SPDL__PRIVATE int spdl__cpu_elapsed(float *ms, void *p SPDL__UNUSED, void *q SPDL__UNUSED) {
    *ms = 0;
    return 0;
}
SPDL__PRIVATE int spdl__cpu_malloc(void **memory, size_t bytes) {
    const spdl_allocator plain = { NULL, NULL, NULL };
    const int out_of_memory = 2;
    *memory = spdl__alloc(&plain, bytes, SPDL_CUDA_ALIGN);
    return *memory == NULL ? out_of_memory : 0;
}
SPDL__PRIVATE int spdl__cpu_free(void *memory) {
    const spdl_allocator plain = { NULL, NULL, NULL };
    spdl__free(&plain, memory, 0);
    return 0;
}
SPDL__PRIVATE int spdl__cpu_copy(void *to, const void *from, size_t bytes, int kind SPDL__UNUSED,
                                 void *stream SPDL__UNUSED) {
    memcpy(to, from, bytes);
    return 0;
}
SPDL__PRIVATE const char *spdl__cpu_text(int error) {
    return error == 2 ? "out of memory" : "unknown error";
}

SPDL__PRIVATE void spdl__cuda_fill_cpu(spdl__cuda_api *api) {
    api->DriverGetVersion = api->RuntimeGetVersion = api->GetDeviceCount = spdl__cpu_zero;
    api->GetDevice = api->ThreadExchangeStreamCaptureMode = spdl__cpu_zero;
    api->GetDeviceProperties = spdl__cpu_ok_pi;
    api->DeviceGetAttribute = spdl__cpu_attribute;
    api->DeviceGetPCIBusId = spdl__cpu_bus;
    api->SetDevice = spdl__cpu_ok_i;
    api->DeviceSynchronize = api->GetLastError = api->PeekAtLastError = spdl__cpu_ok;
    api->StreamCreateWithFlags = api->EventCreateWithFlags = spdl__cpu_none;
    api->StreamDestroy = api->StreamSynchronize = api->EventDestroy = spdl__cpu_ok_p;
    api->EventQuery = api->EventSynchronize = api->HostUnregister = spdl__cpu_ok_p;
    api->StreamWaitEvent = spdl__cpu_ok_ppu;
    api->StreamIsCapturing = spdl__cpu_capturing;
    api->EventRecord = spdl__cpu_ok_pp;
    api->EventElapsedTime = spdl__cpu_elapsed;
    api->Malloc = spdl__cpu_malloc;
    api->Free = spdl__cpu_free;
    api->HostRegister = spdl__cpu_ok_pzu;
    api->MemcpyAsync = spdl__cpu_copy;
    api->GetErrorString = spdl__cpu_text;
}

/* Fills in the runtime. NULL, or why there is none. */
#if defined(SPDL_CUDA_NONE)
SPDL__PRIVATE const char *spdl__cuda_fill(spdl__cuda_api *api) {
    spdl__cuda_fill_cpu(api);
    return "this program was built without CUDA";
}
#elif defined(SPDL_CUDA_DLOPEN)
/* The library stays open: what was loaded from it may still be in use when the last object ends. */
SPDL__PRIVATE void *spdl__cuda_library(void) {
    const char *const names[] = { "libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0" };
    const char *named = getenv("SPDL_CUDART");
    void *library = NULL;
    size_t i;
    if (named != NULL && named[0] != '\0') return dlopen(named, RTLD_NOW | RTLD_LOCAL);
    for (i = 0; i < sizeof(names) / sizeof(names[0]) && library == NULL; ++i)
        library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    return library;
}

SPDL__PRIVATE bool spdl__cuda_symbol(void *library, const char *name, void *function) {
    void *symbol = dlsym(library, name);
    memcpy(function, &symbol, sizeof(symbol)); /* ISO C has no cast for this */
    return symbol != NULL;
}

SPDL__PRIVATE const char *spdl__cuda_fill(spdl__cuda_api *api) {
    bool all = true;
    void *library = spdl__cuda_library();
    if (library == NULL)
        return "no CUDA runtime was found (set SPDL_CUDART to the path of libcudart.so)";
#define SPDL__CUDA_SYMBOL(name, parameters, arguments)                                             \
    all = spdl__cuda_symbol(library, "cuda" #name, (void *)&api->name) && all;
    SPDL__CUDA_CALLS(SPDL__CUDA_SYMBOL)
#undef SPDL__CUDA_SYMBOL
    all = spdl__cuda_symbol(library, "cudaGetErrorString", (void *)&api->GetErrorString) && all;
    return all ? NULL : "the CUDA runtime that was found lacks functions: it is older than 11";
}
#else
#define SPDL__CUDA_LINKED(name, parameters, arguments)                                             \
    SPDL__PRIVATE int spdl__linked_##name parameters { return (int)cuda##name arguments; }
SPDL__CUDA_CALLS(SPDL__CUDA_LINKED)
#undef SPDL__CUDA_LINKED
SPDL__PRIVATE const char *spdl__linked_GetErrorString(int error) {
    return cudaGetErrorString((cudaError_t)error);
}

SPDL__PRIVATE const char *spdl__cuda_fill(spdl__cuda_api *api) {
#define SPDL__CUDA_TAKE(name, parameters, arguments) api->name = spdl__linked_##name;
    SPDL__CUDA_CALLS(SPDL__CUDA_TAKE)
#undef SPDL__CUDA_TAKE
    api->GetErrorString = spdl__linked_GetErrorString;
    return NULL;
}
#endif

/* ============================================================================================= */
/* >>probe-impl
   Any thread; no state. cudaDriverGetVersion comes first because it is the one call that succeeds,
   and leaves no error, on a machine without a driver; cudaGetDeviceCount does not even write its
   result there. */

SPDL__PRIVATE void spdl__cuda_reason(const spdl__cuda_api *api, spdl_cuda_info *info,
                                     const char *call, int error) {
    (void)snprintf(info->reason, sizeof(info->reason), "%s: %s", call, api->GetErrorString(error));
    (void)api->GetLastError(); /* clears it, unless it is one that stays */
}

/* How many devices there are; with none info->reason says why. */
SPDL__PRIVATE int spdl__cuda_count(const spdl__cuda_api *api, spdl_cuda_info *info) {
    int error, count = 0;
    if (api->RuntimeGetVersion(&info->runtime_version) != 0) (void)api->GetLastError();
    error = api->DriverGetVersion(&info->driver_version);
    if (error != 0 || info->driver_version == 0) {
        info->driver_version = 0;
        if (error != 0) (void)api->GetLastError();
        (void)snprintf(info->reason, sizeof(info->reason), "no NVIDIA driver was found");
        return 0;
    }
    error = api->GetDeviceCount(&count);
    if (error == 0 && count > 0) return count;
    if (error == 0)
        (void)snprintf(info->reason, sizeof(info->reason), "the driver sees no device");
    else
        spdl__cuda_reason(api, info, "cudaGetDeviceCount", error);
    if (error == SPDL__CU_OLD_DRIVER)
        (void)snprintf(info->reason, sizeof(info->reason),
                       "the driver supports CUDA %d.%d, the runtime is %d.%d",
                       info->driver_version / 1000, info->driver_version % 1000 / 10,
                       info->runtime_version / 1000, info->runtime_version % 1000 / 10);
    return 0;
}

/* cudaDeviceProp has begun like this since CUDA 10; it was never larger than 2 KiB. */
typedef union spdl__cuda_properties {
    struct {
        char name[256];
        char uuid[16], luid[8];
        unsigned nodes;
        size_t memory_bytes;
    } head;
    uint64_t space[1024];
} spdl__cuda_properties;

SPDL__PRIVATE bool spdl__cuda_describe(const spdl__cuda_api *api, spdl_cuda_info *info, int i) {
    spdl_cuda_device *device = &info->device[i];
    spdl__cuda_properties properties;
    int error;
    memset(&properties, 0, sizeof(properties));
    error = api->GetDeviceProperties(&properties, i);
    if (error == 0) error = api->DeviceGetAttribute(&device->major, SPDL__CU_ATTR_MAJOR, i);
    if (error == 0) error = api->DeviceGetAttribute(&device->minor, SPDL__CU_ATTR_MINOR, i);
    if (error != 0) {
        spdl__cuda_reason(api, info, "cudaGetDeviceProperties", error);
        return false;
    }
    (void)snprintf(device->name, sizeof(device->name), "%.63s", properties.head.name);
    device->memory_bytes = properties.head.memory_bytes;
    return true;
}

SPDL_API void spdl_cuda_probe(spdl_cuda_info *info) {
    spdl__cuda_api api;
    const char *missing;
    int i, count;
    if (info == NULL) return;
    memset(info, 0, sizeof(*info));
    missing = spdl__cuda_fill(&api);
    if (missing != NULL) {
        (void)snprintf(info->reason, sizeof(info->reason), "%s", missing);
        return;
    }
    count = spdl__cuda_count(&api, info);
    for (i = 0; i < count && i < SPDL_CUDA_MAX_DEVICES; ++i)
        if (!spdl__cuda_describe(&api, info, i)) return;
    info->device_count = count;
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
                                                 reclaims the number and gives its source back (E1)
       device slot  FREE -> SENT (ticket is odd) -> FREE; free_slots holds the FREE ones.
                    ready, on a reader's stream: wait for the copy's event, unless the number was
                                                 reclaimed: then a host thread has seen it done, and
                                                 what is put on a stream later comes behind (E2)
                    done, on the same stream:    record that reader's event, for E3 of the next copy
       not pinned   submit waits for the copy's event before it gives the source back (E4)

   Copies are in order on one stream, so a copy that is done says the same of all before it, and
   numbers are reclaimed in order. A transfer's event is recorded again only when its number has
   been reclaimed; whoever then waits for it waits for a later copy, which is right too.

   Once the device is lost no event says when a copy has ended. Sources then come back in two places
   only, each behind a wait for the stream or the device that has returned, with an error if need
   be: a send that fails, and close, of an iterator too. That CUDA has stopped its copies by then is
   not written down anywhere; should one still run, it only reads host memory, which stays pinned as
   long as the driver holds it, and what it brings goes to device memory that this process can use
   no more. A runtime that is unloading (exit) is not even waited for.

   `lock` guards the copy stream (wait, copy and record belong together) and the numbers. It is held
   for a few calls that only enqueue, never while anybody waits, but for E4 and after a call that
   failed. host_get does not take
   it while a slot is free, nor while an iterator is open: workers of low priority cannot hold up
   the trainer. */

typedef struct spdl__cuda_held { /* what is given back when a source has been read */
    spdl_cuda_host *host;
    spdl_free_fn release;
    void *item;
} spdl__cuda_held;

typedef struct spdl__cuda_transfer {
    void *event;  /* the copy is done */
    void *start;  /* with time_copies */
    void *behind[SPDL_CUDA_MAX_READERS]; /* events of readers it waits for, then NULL */
    spdl__cuda_held held;
    uint64_t since, bytes; /* for a trace: when it was submitted, or 0 */
} spdl__cuda_transfer;

enum { SPDL__HOST_FREE, SPDL__HOST_FILLING, SPDL__HOST_SENDING, SPDL__HOST_SENT };

typedef struct spdl__cuda_host {
    spdl_cuda_host host; /* first: what callers have a pointer to */
    uint32_t state;
    bool pageable;
} spdl__cuda_host;

/* Each reader has an event for each of so many rounds of its slot, used in turns: what a copy waits
   for can then be asked about while the host runs ahead. */
enum { SPDL__LAPS = 3 };

enum { SPDL__READER_NONE, SPDL__READER_READING, SPDL__READER_DONE };

typedef struct spdl__cuda_reader {
    spdl_cuda_stream stream;
    void *event[SPDL__LAPS];
    int lap; /* of the event that was recorded last */
    int state;
} spdl__cuda_reader;

/* Whoever has the batch writes the readers; free_slots hands them on to the next sender. */
typedef struct spdl__cuda_slot {
    spdl_cuda_batch batch;
    spdl_cuda_array array[SPDL_CUDA_MAX_ARRAYS];
    void *memory;
    uint64_t ticket;   /* odd while it is SENT; other threads may look */
    uint64_t transfer; /* the number of its copy */
    spdl__cuda_reader reader[SPDL_CUDA_MAX_READERS];
    spdl__cuda_held held; /* CPU backend: its memory is that of the source */
    bool kept;            /* in the device cache: never written again */
    bool lent;            /* by an iterator, which is done with it itself */
} spdl__cuda_slot;

/* Memory that is registered in pieces. */
typedef struct spdl__pin {
    char *base;
    size_t bytes;
    size_t piece;  /* a multiple of slots and of pages */
    size_t done;   /* bytes that are registered */
    bool shared;   /* somebody else registered them */
} spdl__pin;

typedef struct spdl__cuda_slab { /* host memory of ours */
    spdl__pin pin;
    size_t stride;
    bool pinned;
} spdl__cuda_slab;

struct spdl_cuda {
    /* written by open */
    spdl_cuda_desc desc;
    spdl__cuda_api api;
    bool cpu, asymmetric, locks_made, event_made;
    int device, device_count, numa_node;
    long process;
    void *stream;
    void *memory; /* of the device slots */
    size_t stride;
    spdl__cuda_slab slab;
    spdl__cuda_host *host;
    spdl__cuda_slot *slot;
    spdl__cuda_transfer *transfer;
    uint64_t transfers;
    spdl_ring *free_hosts, *free_slots;
    char pad0[SPDL_CACHE_LINE];
    /* written under lock; the numbers are read without it */
    pthread_mutex_t lock;
    uint64_t sent, reclaimed;
    const spdl_pipeline *traced; /* copies are in its trace; or NULL */
    spdl__cuda_slab arena[SPDL_CUDA_MAX_ARENAS];
    char pad1[SPDL_CACHE_LINE];
    /* written by any thread */
    spdl__os_event host_changed; /* a host slot is free, or there is a copy to wait for */
    uint32_t lost;
    uint32_t unloading;       /* the runtime is gone: no more calls, leave everything as it is */
    uint32_t iterating;       /* an iterator is open: it alone sends and reaps */
    uint64_t fetcher;         /* the thread that is fetching for it; 0: none */
    uint64_t calls, checks, batches, bytes, copied_bytes, adopted_bytes;
    uint64_t wait_source_ns, wait_bus_ns, wait_device_ns, wait_next_ns;
    uint64_t told_bus_ns; /* of wait_bus_ns: in the statistics of a pipeline */
    uint64_t copy_us[32];
    pthread_mutex_t error_lock;
    spdl_error error; /* under error_lock */
#ifdef SPDL_CUDA_NVTX
    nvtxDomainHandle_t domain;
#endif
};

/* A call that reaches the device, and one that only looks at the state of the thread. */
#define SPDL__CUDA(cuda, call) (spdl__add(&(cuda)->calls, 1), (cuda)->api.call)
#define SPDL__CUDA_CHECK(cuda, call) (spdl__add(&(cuda)->checks, 1), (cuda)->api.call)
/* A call that ends something. It is tried twice: there is nobody to tell. */
#define SPDL__CUDA_TRY(cuda, call)                                                                 \
    (SPDL__CUDA(cuda, call) == 0 || (SPDL__CUDA_CHECK(cuda, GetLastError()), false))
#define SPDL__CUDA_END(cuda, name, what)                                                           \
    (SPDL__CUDA_TRY(cuda, name(what)) || SPDL__CUDA_TRY(cuda, name(what)))

#ifdef SPDL_CUDA_NVTX
SPDL__PRIVATE void spdl__range_begin(spdl_cuda *cuda, const char *name) {
    nvtxEventAttributes_t attributes;
    memset(&attributes, 0, sizeof(attributes));
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
    attributes.message.ascii = name;
    (void)nvtxDomainRangePushEx(cuda->domain, &attributes);
}
SPDL__PRIVATE void spdl__range_end(spdl_cuda *cuda) { (void)nvtxDomainRangePop(cuda->domain); }
#else
SPDL__PRIVATE void spdl__range_begin(spdl_cuda *cuda, const char *name) { (void)cuda, (void)name; }
SPDL__PRIVATE void spdl__range_end(spdl_cuda *cuda) { (void)cuda; }
#endif

/* Errors after which no call of this process to the device works again: the context is gone, the
   hardware has failed, or the runtime is being unloaded. */
SPDL__PRIVATE bool spdl__cuda_sticky(int error) {
    switch (error) {
    case SPDL__CU_UNLOADING:
    case 46: case 201: case 214: case 220: case 226: /* unavailable, no context, ECC, NVLink */
    case 700: case 702: case 709: case 710:          /* address, timeout, destroyed, assert */
    case 714: case 715: case 716: case 717: case 718: case 719: case 721: return true;
    default: return false;
    }
}

/* Wakes everybody who waits for a slot: none will come. */
SPDL__PRIVATE void spdl__cuda_lose(spdl_cuda *cuda) {
    spdl__store32(&cuda->lost, 1);
    if (cuda->free_slots != NULL) spdl_ring_close(cuda->free_slots);
    if (cuda->event_made) spdl__os_event_wake(&cuda->host_changed, SPDL__ALL);
}

/* Records what a call of ours returned; the first one that lost the device stays. */
SPDL__PRIVATE spdl_result spdl__cuda_fail(spdl_cuda *cuda, const char *call, int code) {
    const char *text = cuda->api.GetErrorString(code);
    bool lost = spdl__cuda_sticky(code);
    if (code == SPDL__CU_UNLOADING)
        spdl__store32(&cuda->unloading, 1);
    else
        (void)cuda->api.GetLastError(); /* ours; the caller's next check is about its own calls */
    if (!lost) lost = cuda->api.PeekAtLastError() == code; /* it cannot be cleared */
    pthread_mutex_lock(&cuda->error_lock);
    if (spdl__load_relaxed32(&cuda->lost) == 0)
        (void)spdl__error_set(&cuda->error, lost ? SPDL_E_CUDA_LOST : SPDL_E_CUDA,
                              "spdl: cuda: %s failed on device %d: %s (%d)%s", call, cuda->device,
                              text, code, lost ? "; the device is lost to this process" : "");
    if (lost) spdl__cuda_lose(cuda);
    pthread_mutex_unlock(&cuda->error_lock);
    return lost ? SPDL_E_CUDA_LOST : SPDL_E_CUDA;
}

/* The call that failed last was the last resort: the device counts as lost. */
SPDL__PRIVATE void spdl__cuda_abandon(spdl_cuda *cuda) {
    pthread_mutex_lock(&cuda->error_lock);
    if (spdl__load_relaxed32(&cuda->lost) == 0) {
        cuda->error.result = SPDL_E_CUDA_LOST;
        spdl__cuda_lose(cuda);
    }
    pthread_mutex_unlock(&cuda->error_lock);
}

/* Not even a wait has worked: nobody knows what the device still reads or writes. */
SPDL__PRIVATE void spdl__cuda_give_up(spdl_cuda *cuda, const char *call, int code) {
    (void)spdl__cuda_fail(cuda, call, code);
    spdl__cuda_abandon(cuda);
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

/* Calls that may wait or allocate would break the captures of other threads, unless this thread is
   in relaxed mode. Restoring is tried twice, since it must not be left out. */
SPDL__PRIVATE spdl_result spdl__cuda_relax(spdl_cuda *cuda, int *mode) {
    int code;
    *mode = SPDL__CU_RELAXED;
    code = SPDL__CUDA_CHECK(cuda, ThreadExchangeStreamCaptureMode(mode));
    return code == 0 ? SPDL_OK
                     : spdl__cuda_fail(cuda, "cudaThreadExchangeStreamCaptureMode", code);
}

SPDL__PRIVATE void spdl__cuda_unrelax(spdl_cuda *cuda, int mode) {
    int other = mode;
    if (SPDL__CUDA_CHECK(cuda, ThreadExchangeStreamCaptureMode(&other)) == 0) return;
    other = mode;
    if (SPDL__CUDA_CHECK(cuda, ThreadExchangeStreamCaptureMode(&other)) != 0)
        (void)SPDL__CUDA_CHECK(cuda, GetLastError());
}

/* What a call that makes or frees things changes of the thread, and puts back. */
typedef struct spdl__cuda_scope {
    int device, mode;
} spdl__cuda_scope;

SPDL__PRIVATE void spdl__cuda_switch_back(spdl_cuda *cuda, int device) {
    if (device == cuda->device) return;
    if (SPDL__CUDA_CHECK(cuda, SetDevice(device)) != 0 &&
        SPDL__CUDA_CHECK(cuda, SetDevice(device)) != 0)
        (void)SPDL__CUDA_CHECK(cuda, GetLastError());
}

SPDL__PRIVATE spdl_result spdl__cuda_switch(spdl_cuda *cuda, int *before) {
    int code = SPDL__CUDA_CHECK(cuda, GetDevice(before));
    if (code != 0) return spdl__cuda_fail(cuda, "cudaGetDevice", code);
    if (*before == cuda->device) return SPDL_OK;
    code = SPDL__CUDA_CHECK(cuda, SetDevice(cuda->device));
    return code == 0 ? SPDL_OK : spdl__cuda_fail(cuda, "cudaSetDevice", code);
}

SPDL__PRIVATE spdl_result spdl__cuda_enter(spdl_cuda *cuda, spdl__cuda_scope *scope) {
    spdl_result result = spdl__cuda_switch(cuda, &scope->device);
    if (result != SPDL_OK) return result;
    result = spdl__cuda_relax(cuda, &scope->mode);
    if (result != SPDL_OK) spdl__cuda_switch_back(cuda, scope->device);
    return result;
}

/* For what has to be freed whatever happens. */
SPDL__PRIVATE bool spdl__cuda_enter_twice(spdl_cuda *cuda, spdl__cuda_scope *scope) {
    return spdl__cuda_enter(cuda, scope) == SPDL_OK ||
           (spdl__load32(&cuda->unloading) == 0 && spdl__cuda_enter(cuda, scope) == SPDL_OK);
}

SPDL__PRIVATE void spdl__cuda_leave(spdl_cuda *cuda, const spdl__cuda_scope *scope) {
    spdl__cuda_unrelax(cuda, scope->mode);
    spdl__cuda_switch_back(cuda, scope->device);
}

/* The streams 0, 1 and 2 are those of the device that is current; all others know theirs, so that
   nothing has to be switched for them, nor where there is but one device. */
SPDL__PRIVATE spdl_result spdl__stream_enter(spdl_cuda *cuda, spdl_cuda_stream stream,
                                             int *before) {
    *before = cuda->device;
    if ((uintptr_t)stream > 2 || cuda->device_count < 2) return SPDL_OK;
    return spdl__cuda_switch(cuda, before);
}

/* What is recorded in a capture never happens, and would draw the copy stream into it. */
SPDL__PRIVATE spdl_result spdl__stream_check(spdl_cuda *cuda, spdl_cuda_stream stream) {
    const int implicit = 906; /* the legacy stream, while another that it waits for is captured */
    int status = 0;
    const int code = SPDL__CUDA_CHECK(cuda, StreamIsCapturing(stream, &status));
    if (code != 0 && code != implicit) return spdl__cuda_fail(cuda, "cudaStreamIsCapturing", code);
    if (code == implicit) (void)SPDL__CUDA_CHECK(cuda, GetLastError());
    if (code == 0 && status == 0) return SPDL_OK;
    return spdl__cuda_refuse(cuda, SPDL_E_INVALID,
                             "the stream is being captured; take batches outside of the capture");
}

/* ============================================================================================= */
/* >>memory-impl
   Host memory for slots: mapped, on huge pages, near the device, faulted in, registered. All of it
   in open calls, on the thread of the caller and a few helpers that end before the call does. */

#define SPDL__PAGE ((size_t)4096)
#define SPDL__HUGE_PAGE ((size_t)2 << 20)
#define SPDL__PIECE ((size_t)1 << 30)
#define SPDL__MAX_SLOT_BYTES ((size_t)1 << 40)

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

/* False: it stayed registered, and must stay mapped. */
SPDL__PRIVATE bool spdl__cuda_unpin(spdl_cuda *cuda, spdl__pin *pin) {
    bool ended = true;
    size_t at;
    if (!pin->shared)
        for (at = 0; at < pin->done; at += pin->piece)
            ended = SPDL__CUDA_END(cuda, HostUnregister, pin->base + at) && ended;
    pin->done = 0;
    return ended || spdl__load32(&cuda->lost) != 0;
}

/* Registers all of it or nothing; 0 or what CUDA says. */
SPDL__PRIVATE int spdl__cuda_register(spdl_cuda *cuda, spdl__pin *pin) {
    int code = 0;
    while (pin->done < pin->bytes && code == 0) {
        const size_t left = pin->bytes - pin->done;
        const size_t bytes = left < pin->piece ? left : pin->piece;
        code = SPDL__CUDA(cuda, HostRegister(pin->base + pin->done, bytes, SPDL__CU_PORTABLE));
        if (code == SPDL__CU_ALREADY_PINNED && pin->done == 0) pin->shared = true;
        if (pin->shared && code == SPDL__CU_ALREADY_PINNED) {
            (void)SPDL__CUDA_CHECK(cuda, GetLastError());
            code = 0;
        } else if (code == 0 && pin->shared) {
            (void)SPDL__CUDA_END(cuda, HostUnregister, pin->base + pin->done);
            code = SPDL__CU_ALREADY_PINNED; /* half of it is somebody else's */
        }
        if (code == 0) pin->done += bytes;
    }
    if (code != 0) (void)spdl__cuda_unpin(cuda, pin);
    return code;
}

/* Memory that cannot be pinned is used as it is, unless the caller wants it pinned. */
SPDL__PRIVATE spdl_result spdl__cuda_pin(spdl_cuda *cuda, spdl__cuda_slab *slab, const char *what) {
    char text[SPDL_TEXT_BYTES];
    spdl_result result;
    int code;
    if (cuda->cpu || slab->pin.bytes == 0) return SPDL_OK;
    code = spdl__cuda_register(cuda, &slab->pin);
    slab->pinned = code == 0;
    if (code == 0) return SPDL_OK;
    (void)snprintf(text, sizeof(text),
                   "spdl: cuda: %llu bytes for %s could not be pinned: %s (%d); going on, slower",
                   (spdl__llu)slab->pin.bytes, what, cuda->api.GetErrorString(code), code);
    result = spdl__cuda_fail(cuda, "cudaHostRegister", code);
    if (result == SPDL_E_CUDA_LOST || cuda->desc.must_pin) return result;
    spdl__log(&cuda->desc.logger, SPDL_LOG_WARN, text);
    return SPDL_OK;
}

/* The node the kernel says a PCI device is on, or -1. */
SPDL__PRIVATE int spdl__pci_node(const char *bus) {
    char path[96], text[16] = "";
    size_t have = 0, i;
    spdl__os_file file;
    (void)snprintf(path, sizeof(path), "/sys/bus/pci/devices/%.31s/numa_node", bus);
    for (i = 0; path[i] != '\0'; ++i)
        if (path[i] >= 'A' && path[i] <= 'F') path[i] = (char)(path[i] - 'A' + 'a');
    if (spdl__os_file_open(&file, path, SPDL__OS_READ, NULL) != NULL) return -1;
    (void)spdl__os_file_read(file, text, sizeof(text) - 1, 0, &have);
    (void)spdl__os_file_close(file);
    return have == 0 ? -1 : (int)strtol(text, NULL, 10);
}

SPDL__PRIVATE int spdl__cuda_node(spdl_cuda *cuda) {
    char bus[32] = "";
    const int device = cuda->device;
    int node = -1;
    if (cuda->cpu || cuda->desc.any_node) return -1;
    if (SPDL__CUDA_CHECK(cuda, DeviceGetAttribute(&node, SPDL__CU_ATTR_NUMA_NODE, device)) == 0)
        return node;
    (void)SPDL__CUDA_CHECK(cuda, GetLastError()); /* the driver is older than 12.2 */
    if (SPDL__CUDA_CHECK(cuda, DeviceGetPCIBusId(bus, (int)sizeof(bus), device)) == 0)
        return spdl__pci_node(bus);
    (void)SPDL__CUDA_CHECK(cuda, GetLastError());
    return -1;
}

/* Asks for pages of one node; the kernel takes others when that is full. */
SPDL__PRIVATE bool spdl__prefer_node(void *memory, size_t bytes, int node) {
#if defined(__linux__) && defined(SYS_mbind)
    const long preferred = 1, bits = 64;
    const uint64_t mask = (uint64_t)1 << (node & 63);
    if (node < 0 || node > 63) return false;
    return syscall(SYS_mbind, memory, bytes, preferred, &mask, bits + 1, 0L) == 0;
#else
    (void)memory, (void)bytes, (void)node;
    return false;
#endif
}

/* Huge pages, and no copies for children: a forked child must not move pinned pages. */
SPDL__PRIVATE void spdl__advise(void *memory, size_t bytes, bool huge) {
#if defined(__linux__)
    const long dont_fork = 10, huge_pages = 14;
    (void)syscall(SYS_madvise, memory, bytes, dont_fork);
    if (huge) (void)syscall(SYS_madvise, memory, bytes, huge_pages);
#else
    (void)memory, (void)bytes, (void)huge;
#endif
}

SPDL__PRIVATE void *spdl__map(size_t bytes) {
#if defined(__linux__)
    const int anonymous = 0x20; /* hidden in strict ISO mode */
#else
    const int anonymous = MAP_ANON;
#endif
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | anonymous, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

/* Maps memory that begins on a huge page, when it is large enough to have one. */
SPDL__PRIVATE char *spdl__map_aligned(size_t bytes) {
    const size_t more = bytes >= SPDL__HUGE_PAGE ? SPDL__HUGE_PAGE : 0;
    char *whole = (char *)spdl__map(bytes + more), *base;
    size_t head;
    if (whole == NULL || more == 0) return whole;
    head = (size_t)(-(uintptr_t)whole & (SPDL__HUGE_PAGE - 1));
    base = whole + head;
    if (head != 0) (void)munmap(whole, head);
    if (head != more) (void)munmap(base + bytes, more - head);
    return base;
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

/* Faults the pages in, each by one of several threads. A thread that cannot be made is done
   without. */
SPDL__PRIVATE void spdl__touch_all(char *memory, size_t bytes, int threads) {
    spdl__touch part[16];
    size_t each, at = 0;
    int i;
    if (threads > 16) threads = 16;
    each = spdl__round_up(bytes / (size_t)threads + 1, SPDL__HUGE_PAGE);
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

SPDL__PRIVATE int spdl__touch_threads(const spdl_cuda *cuda) {
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (cuda->desc.touch_threads > 0) return cuda->desc.touch_threads;
    if (cores < 8) return 1;
    return cores / 4 < 4 ? (int)(cores / 4) : 4;
}

/* Memory for `count` slots, in place but not yet registered. */
SPDL__PRIVATE spdl_result spdl__slab_make(spdl_cuda *cuda, spdl__cuda_slab *slab, uint64_t count) {
    const size_t stride = spdl__cuda_stride(cuda->desc.slot_bytes);
    size_t bytes;
    slab->stride = stride;
    if (count == 0) return SPDL_OK;
    if (count > (SIZE_MAX / 4) / stride) return SPDL_E_NOMEM;
    bytes = spdl__round_up((size_t)count * stride, SPDL__PAGE);
    slab->pin.base = spdl__map_aligned(bytes);
    if (slab->pin.base == NULL) return SPDL_E_NOMEM;
    slab->pin.bytes = bytes;
    slab->pin.piece = spdl__cuda_piece(stride);
    if (!cuda->cpu) spdl__advise(slab->pin.base, bytes, !cuda->desc.no_huge_pages);
    if (!spdl__prefer_node(slab->pin.base, bytes, cuda->numa_node)) cuda->numa_node = -1;
    if (!cuda->cpu) spdl__touch_all(slab->pin.base, bytes, spdl__touch_threads(cuda));
    return SPDL_OK;
}

SPDL__PRIVATE void spdl__slab_end(spdl_cuda *cuda, spdl__cuda_slab *slab) {
    if (slab->pin.base != NULL && spdl__cuda_unpin(cuda, &slab->pin))
        (void)munmap(slab->pin.base, slab->pin.bytes);
    slab->pin.base = NULL;
}

/* ============================================================================================= */
/* >>copy-impl
   The copy stream and its numbers: submit, ask, wait, reap. Any thread; see >>state-impl. */

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

/* Puts a host slot back and wakes one who waits for it. The slot has been read: its copy was seen
   to be done, and the ring hands that on to the next owner. */
SPDL__PRIVATE void spdl__host_return(spdl_cuda_host *host) {
    spdl__cuda_host *slot = (spdl__cuda_host *)(void *)host;
    spdl__store32(&slot->state, SPDL__HOST_FREE);
    (void)spdl_ring_try_push(host->cuda->free_hosts, &slot); /* has room for all */
    spdl__event_notify(&host->cuda->host_changed, host->cuda->asymmetric, 1);
}

SPDL__PRIVATE void spdl__held_release(spdl__cuda_held *held) {
    const spdl__cuda_held was = *held;
    memset(held, 0, sizeof(*held));
    if (was.host != NULL) spdl__host_return(was.host);
    if (was.release != NULL) was.release(was.item);
}

SPDL__PRIVATE void spdl__cuda_time_copy(spdl_cuda *cuda, const spdl__cuda_transfer *transfer) {
    float ms = 0;
    uint64_t us;
    unsigned k = 0;
    if (!cuda->desc.time_copies || cuda->cpu || spdl__load32(&cuda->unloading) != 0) return;
    if (SPDL__CUDA(cuda, EventElapsedTime(&ms, transfer->start, transfer->event)) != 0) {
        (void)SPDL__CUDA_CHECK(cuda, GetLastError()); /* no figure for this one */
        return;
    }
    for (us = (uint64_t)(ms * 1000.0f); us > 1 && k < 31; us >>= 1) ++k;
    spdl__add(&cuda->copy_us[k], 1);
}

/* A copy that was seen to be done goes into the trace. Under lock. */
SPDL__PRIVATE void spdl__cuda_trace_copy(spdl_cuda *cuda, spdl__cuda_transfer *transfer) {
    if (cuda->traced != NULL && transfer->since != 0)
        spdl__trace_copy(cuda->traced, transfer->since, transfer->bytes);
    transfer->since = 0;
}

SPDL_API void spdl_cuda_trace(spdl_cuda *cuda, const spdl_pipeline *pipeline) {
    uint64_t i;
    if (cuda == NULL || cuda->process != (long)getpid()) return;
    pthread_mutex_lock(&cuda->lock);
    cuda->traced = pipeline;
    for (i = 0; i < cuda->transfers; ++i) cuda->transfer[i].since = 0; /* of another trace */
    pthread_mutex_unlock(&cuda->lock);
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
        spdl__cuda_time_copy(cuda, transfer);
        spdl__cuda_trace_copy(cuda, transfer);
        held = transfer->held;
        memset(&transfer->held, 0, sizeof(transfer->held));
        /* pairs with the load in ready: who sees it may do without waiting for the event */
        spdl__store(&cuda->reclaimed, cuda->reclaimed + 1);
        pthread_mutex_unlock(&cuda->lock);
        spdl__held_release(&held); /* not under the lock: it may be the caller's function */
    }
    pthread_mutex_unlock(&cuda->lock);
}

/* Whether an event is done; the thread is in relaxed mode. "Not ready" is an answer and not an
   error, but CUDA records it as one, over one of the caller's that is pending: then this is not
   asked unless it `must` be, and *done stays as it is. */
SPDL__PRIVATE spdl_result spdl__event_query(spdl_cuda *cuda, void *event, bool must, bool *done) {
    const int pending = SPDL__CUDA_CHECK(cuda, PeekAtLastError());
    int code;
    if (pending != 0 && pending != SPDL__CU_NOT_READY && !must) return SPDL_OK;
    code = SPDL__CUDA(cuda, EventQuery(event));
    *done = code == 0;
    if (code == 0) return SPDL_OK;
    if (code != SPDL__CU_NOT_READY) return spdl__cuda_fail(cuda, "cudaEventQuery", code);
    (void)SPDL__CUDA_CHECK(cuda, GetLastError());
    return SPDL_OK;
}

SPDL__PRIVATE spdl_result spdl__event_ask(spdl_cuda *cuda, void *event, bool must, bool *done) {
    int mode;
    spdl_result result = spdl__cuda_relax(cuda, &mode);
    if (result != SPDL_OK) return result;
    result = spdl__event_query(cuda, event, must, done);
    spdl__cuda_unrelax(cuda, mode);
    return result;
}

/* Asks whether the copies before `until` are done, and reaps them if so. */
SPDL__PRIVATE spdl_result spdl__cuda_reap_if_done(spdl_cuda *cuda, uint64_t until, bool must,
                                                  bool *done) {
    void *event = spdl__cuda_transfer_of(cuda, until - 1)->event;
    spdl_result result;
    *done = false;
    result = spdl__event_ask(cuda, event, must, done);
    if (result == SPDL_OK && *done) spdl__cuda_reap(cuda, until);
    return result;
}

/* Whether a copy that is waited for waits itself, for readers of the batch that was in its slot: it
   is the device then that is slow, not the bus. Their events still are those it waits for unless
   their slot has gone round twice since. */
SPDL__PRIVATE bool spdl__cuda_held_up(spdl_cuda *cuda, uint64_t number) {
    void *behind[SPDL_CUDA_MAX_READERS];
    bool done = true;
    int i;
    pthread_mutex_lock(&cuda->lock);
    memcpy(behind, spdl__cuda_transfer_of(cuda, number)->behind, sizeof(behind));
    pthread_mutex_unlock(&cuda->lock);
    for (i = 0; i < SPDL_CUDA_MAX_READERS && behind[i] != NULL && done; ++i)
        if (spdl__event_ask(cuda, behind[i], false, &done) != SPDL_OK) return false;
    return !done;
}

/* Sleeps until the copies before `until` are done; reaps them. */
SPDL__PRIVATE spdl_result spdl__cuda_reap_wait(spdl_cuda *cuda, uint64_t until) {
    spdl_result result;
    int mode, code;
    result = spdl__cuda_relax(cuda, &mode);
    if (result != SPDL_OK) return result;
    code = SPDL__CUDA(cuda, EventSynchronize(spdl__cuda_transfer_of(cuda, until - 1)->event));
    spdl__cuda_unrelax(cuda, mode);
    if (code != 0) return spdl__cuda_fail(cuda, "cudaEventSynchronize", code);
    spdl__cuda_reap(cuda, until);
    return SPDL_OK;
}

/* Waits until a copy or two have been reaped. Two when three are in flight: half the calls, and
   there is still one to go on with. What was waited for is asked behind the wait, of the copy that
   comes next: when the device is slow its readers are still at work, when the bus is slow they have
   had the time of a copy to be done. */
SPDL__PRIVATE spdl_result spdl__cuda_wait_copy(spdl_cuda *cuda) {
    const uint64_t start = spdl_time_ns();
    uint64_t oldest, ahead, stop;
    spdl_result result;
    bool device = false;
    if (!spdl__cuda_oldest(cuda, &oldest)) return SPDL_OK;
    ahead = spdl__load(&cuda->sent) - oldest;
    spdl__range_begin(cuda, "wait for a copy");
    if (ahead == 1) device = spdl__cuda_held_up(cuda, oldest); /* none comes next */
    result = spdl__cuda_reap_wait(cuda, oldest + (ahead >= 3 ? 2 : 1));
    stop = spdl_time_ns();
    if (result == SPDL_OK && ahead > 1 && spdl__cuda_oldest(cuda, &oldest))
        device = spdl__cuda_held_up(cuda, oldest);
    spdl__range_end(cuda);
    spdl__add(device ? &cuda->wait_device_ns : &cuda->wait_bus_ns, stop - start);
    return result;
}

/* The same with an end, for which CUDA has no call: asks, and sleeps in between. */
SPDL__PRIVATE spdl_result spdl__cuda_poll_copy(spdl_cuda *cuda, uint64_t deadline) {
    const uint64_t start = spdl_time_ns(), nap_ns = 50000;
    uint64_t now = start, oldest;
    spdl_result result = SPDL_OK;
    int round = 0;
    bool done = false, device = false;
    while (spdl__cuda_oldest(cuda, &oldest)) {
        result = spdl__cuda_reap_if_done(cuda, oldest + 1, true, &done);
        now = spdl_time_ns();
        if (result == SPDL_OK && !done && now >= deadline) result = SPDL_TIMEOUT;
        if (result != SPDL_OK || done) break;
        if (++round < 17) continue; /* a copy of 256 KiB takes about as long as so many questions */
        if (round == 17) device = spdl__cuda_held_up(cuda, oldest);
        (void)spdl__os_event_sleep(&cuda->host_changed, spdl__load32(&cuda->host_changed.word),
                                   spdl__min(now + nap_ns, deadline));
    }
    spdl__add(device ? &cuda->wait_device_ns : &cuda->wait_bus_ns, now - start);
    return result;
}

SPDL__PRIVATE spdl_result spdl__cuda_await_copy(spdl_cuda *cuda, uint64_t deadline) {
    return deadline == SPDL__NEVER ? spdl__cuda_wait_copy(cuda)
                                   : spdl__cuda_poll_copy(cuda, deadline);
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
    while (result == SPDL_OK && spdl__cuda_in_flight(cuda) > 0)
        result = spdl__cuda_reap_wait(cuda, spdl__load(&cuda->sent));
    return result;
}

/* What is to be copied. */
typedef struct spdl__cuda_job {
    const void *data;
    size_t bytes;
    int array_count;
    const spdl_cuda_array *array;
    void *user;
    spdl__cuda_held held;
    uint64_t deadline; /* 0: none */
    bool pageable;
    bool own_memory; /* CPU backend: copy, the source goes on to exist without this batch */
} spdl__cuda_job;

/* Waits for a stream after a call on it has failed; when not even that works, gives up. */
SPDL__PRIVATE void spdl__stream_settle(spdl_cuda *cuda, spdl_cuda_stream stream) {
    int mode, code, before;
    bool relaxed;
    if (spdl__load32(&cuda->unloading) != 0) return;
    if (spdl__stream_enter(cuda, stream, &before) != SPDL_OK &&
        spdl__stream_enter(cuda, stream, &before) != SPDL_OK) {
        spdl__cuda_abandon(cuda);
        return;
    }
    relaxed = spdl__cuda_relax(cuda, &mode) == SPDL_OK;
    code = SPDL__CUDA(cuda, StreamSynchronize(stream));
    if (relaxed) spdl__cuda_unrelax(cuda, mode);
    spdl__cuda_switch_back(cuda, before);
    if (code != 0) spdl__cuda_give_up(cuda, "cudaStreamSynchronize", code);
}

/* E3: the copy waits for all who read the last batch in this slot. */
SPDL__PRIVATE spdl_result spdl__submit_behind(spdl_cuda *cuda, spdl__cuda_slot *slot,
                                              spdl__cuda_transfer *transfer) {
    int i, count = 0, code = 0;
    memset(transfer->behind, 0, sizeof(transfer->behind));
    for (i = 0; i < SPDL_CUDA_MAX_READERS && code == 0; ++i) {
        if (slot->reader[i].state != SPDL__READER_DONE) continue;
        transfer->behind[count] = slot->reader[i].event[slot->reader[i].lap];
        code = SPDL__CUDA(cuda, StreamWaitEvent(cuda->stream, transfer->behind[count++], 0));
    }
    return code == 0 ? SPDL_OK : spdl__cuda_fail(cuda, "cudaStreamWaitEvent", code);
}

/* Copy, its event, and for pageable memory the wait (E4). On failure nothing is under way. */
SPDL__PRIVATE spdl_result spdl__submit_copy(spdl_cuda *cuda, spdl__cuda_slot *slot,
                                            spdl__cuda_transfer *transfer,
                                            const spdl__cuda_job *job) {
    const char *call = "cudaEventRecord";
    spdl_result result = SPDL_OK;
    int code = 0, mode = 0;
    if (job->pageable) result = spdl__cuda_relax(cuda, &mode);
    if (result != SPDL_OK) return result;
    if (cuda->desc.time_copies)
        code = SPDL__CUDA(cuda, EventRecord(transfer->start, cuda->stream));
    if (code == 0 && job->bytes > 0) {
        call = "cudaMemcpyAsync";
        code = SPDL__CUDA(cuda, MemcpyAsync(slot->memory, job->data, job->bytes,
                                            SPDL__CU_TO_DEVICE, cuda->stream));
    }
    if (code == 0) {
        call = "cudaEventRecord";
        code = SPDL__CUDA(cuda, EventRecord(transfer->event, cuda->stream));
    }
    if (code == 0 && job->pageable) {
        call = "cudaEventSynchronize";
        code = SPDL__CUDA(cuda, EventSynchronize(transfer->event));
    }
    if (job->pageable) spdl__cuda_unrelax(cuda, mode);
    if (code == 0) return SPDL_OK;
    (void)spdl__cuda_fail(cuda, call, code);
    spdl__stream_settle(cuda, cuda->stream);
    return spdl__load32(&cuda->lost) ? SPDL_E_CUDA_LOST : SPDL_E_CUDA;
}

/* A copy on the CPU: the batch is the source itself, unless that must stay as it is. */
SPDL__PRIVATE void spdl__submit_cpu(spdl_cuda *cuda, spdl__cuda_slot *slot, spdl__cuda_job *job) {
    const bool own_memory = job->own_memory || slot->kept;
    slot->batch.dev = SPDL__UNCONST(job->data);
    if (own_memory && job->bytes > 0) memcpy(slot->memory, job->data, job->bytes);
    if (own_memory) {
        slot->batch.dev = slot->memory;
        spdl__add(&cuda->copied_bytes, job->bytes);
        spdl__held_release(&job->held);
    }
    slot->held = job->held;
    pthread_mutex_lock(&cuda->lock);
    slot->transfer = cuda->sent;
    spdl__store(&cuda->sent, cuda->sent + 1);
    spdl__store(&cuda->reclaimed, cuda->reclaimed + 1);
    pthread_mutex_unlock(&cuda->lock);
}

/* A copy on the copy stream; returns with the lock released. */
SPDL__PRIVATE spdl_result spdl__submit_device(spdl_cuda *cuda, spdl__cuda_slot *slot,
                                              spdl__cuda_job *job) {
    spdl__cuda_transfer *transfer;
    spdl_result result = SPDL_OK;
    pthread_mutex_lock(&cuda->lock);
    while (cuda->sent - cuda->reclaimed == cuda->transfers && result == SPDL_OK) {
        pthread_mutex_unlock(&cuda->lock);
        result = spdl__cuda_await_copy(cuda, job->deadline > 0 ? job->deadline : SPDL__NEVER);
        pthread_mutex_lock(&cuda->lock);
    }
    transfer = spdl__cuda_transfer_of(cuda, cuda->sent);
    if (result == SPDL_OK) result = spdl__submit_behind(cuda, slot, transfer);
    if (result == SPDL_OK) {
        transfer->since = cuda->traced != NULL ? spdl_time_ns() : 0;
        transfer->bytes = job->bytes;
        result = spdl__submit_copy(cuda, slot, transfer, job);
    }
    if (result == SPDL_OK) {
        if (job->pageable) spdl__cuda_trace_copy(cuda, transfer); /* it was waited for */
        if (!job->pageable) transfer->held = job->held;
        slot->transfer = cuda->sent;
        /* pairs with the loads of those who ask for, or wait for, copies: the event is recorded */
        spdl__store(&cuda->sent, cuda->sent + 1);
    }
    pthread_mutex_unlock(&cuda->lock);
    if (result == SPDL_OK && job->pageable) spdl__held_release(&job->held);
    return result;
}

/* Sends a job to a device slot that is ours alone, and fills in the slot's batch. On failure the
   job and the slot are the caller's still. */
SPDL__PRIVATE spdl_result spdl__cuda_submit(spdl_cuda *cuda, spdl__cuda_slot *slot,
                                            spdl__cuda_job *job) {
    spdl_cuda_batch *batch = &slot->batch;
    spdl_result result = SPDL_OK;
    int i;
    /* before submit gives the source back, which may hold them */
    memcpy(slot->array, job->array, (size_t)job->array_count * sizeof(job->array[0]));
    batch->dev = slot->memory;
    batch->user = job->user;
    batch->bytes = job->bytes;
    batch->array_count = job->array_count;
    spdl__range_begin(cuda, "send");
    if (cuda->cpu)
        spdl__submit_cpu(cuda, slot, job);
    else
        result = spdl__submit_device(cuda, slot, job);
    spdl__range_end(cuda);
    if (result != SPDL_OK) return result;
    for (i = 0; i < SPDL_CUDA_MAX_READERS; ++i) slot->reader[i].state = SPDL__READER_NONE;
    batch->sequence = slot->transfer;
    /* pairs with the loads in slot_of: odd is SENT */
    spdl__store(&slot->ticket, slot->ticket + 1);
    batch->ticket_ = slot->ticket;
    spdl__add(&cuda->batches, 1);
    spdl__add(&cuda->bytes, job->bytes);
    spdl__event_notify(&cuda->host_changed, cuda->asymmetric, 1); /* there is a copy to wait for */
    return SPDL_OK;
}

/* ============================================================================================= */
/* >>slots-impl
   Level 1, on top of the copy stream: host slots, sending, readers. Each function checks the state
   of what it is given before it does anything. */

SPDL_API const char *spdl_cuda_result_text(spdl_result result) {
    if (result == SPDL_E_CUDA) return "a CUDA call failed";
    if (result == SPDL_E_CUDA_LOST) return "the CUDA device is lost to this process";
    if (result == SPDL_E_CUDA_FORKED) return "opened before a fork, used after it";
    return spdl_result_text(result);
}

/* Whether the caller may make the CUDA calls that get a slot back: always (`reaps`), or unless an
   iterator is open, which does that; one may be opened or closed during a wait. */
SPDL__PRIVATE bool spdl__host_reaps(const spdl_cuda *cuda, bool reaps) {
    return reaps || spdl__load32(&cuda->iterating) == 0;
}

/* Sleeps until a host slot may be free, or there is a copy to wait for. This is no wait for the
   bus: slots that were filled have not been sent yet, so the loader is ahead. */
SPDL__PRIVATE spdl_result spdl__host_sleep(spdl_cuda *cuda, bool reaps, uint64_t deadline) {
    const uint32_t word = spdl__event_prepare(&cuda->host_changed, cuda->asymmetric);
    if (spdl_ring_count(cuda->free_hosts) > 0 || spdl__load32(&cuda->lost) != 0 ||
        (spdl__host_reaps(cuda, reaps) && spdl__cuda_in_flight(cuda) > 0)) {
        spdl__event_cancel(&cuda->host_changed);
        return SPDL_OK;
    }
    if (deadline != SPDL__NEVER && spdl_time_ns() >= deadline) {
        spdl__event_cancel(&cuda->host_changed);
        return SPDL_TIMEOUT;
    }
    return spdl__event_commit(&cuda->host_changed, word, deadline);
}

/* Waits for a host slot; `reaps` as for host_reaps. Who leaves without one may have had the wake-up
   that another waits for, and passes it on. */
SPDL__PRIVATE spdl_result spdl__host_wait(spdl_cuda *cuda, spdl__cuda_host **slot, bool reaps,
                                          uint64_t deadline) {
    spdl_result result = SPDL_OK;
    while (result == SPDL_OK && spdl_ring_try_pop(cuda->free_hosts, slot) != SPDL_OK) {
        result = spdl__cuda_usable(cuda);
        if (result != SPDL_OK) return result; /* lost: all are woken */
        if (!spdl__host_reaps(cuda, reaps) || spdl__cuda_in_flight(cuda) == 0)
            result = spdl__host_sleep(cuda, reaps, deadline);
        else
            result = spdl__cuda_await_copy(cuda, deadline);
    }
    if (result == SPDL_TIMEOUT && spdl_ring_try_pop(cuda->free_hosts, slot) == SPDL_OK)
        result = SPDL_OK;
    if (result != SPDL_OK) spdl__event_notify(&cuda->host_changed, cuda->asymmetric, 1);
    return result;
}

SPDL__PRIVATE spdl_result spdl__host_take(spdl_cuda *cuda, spdl__cuda_host **slot, bool reaps,
                                          uint64_t deadline) {
    spdl_result result = SPDL_OK;
    if (cuda->free_hosts == NULL)
        return spdl__cuda_refuse(cuda, SPDL_E_INVALID, "host_slots is -1: there are none");
    if (spdl_ring_try_pop(cuda->free_hosts, slot) != SPDL_OK)
        result = spdl__host_wait(cuda, slot, reaps, deadline);
    if (result != SPDL_OK) return result;
    (*slot)->host.bytes = 0;
    (*slot)->host.array_count = 0;
    (*slot)->host.user = NULL;
    spdl__store32(&(*slot)->state, SPDL__HOST_FILLING);
    return SPDL_OK;
}

SPDL_API spdl_result spdl_cuda_host_get(spdl_cuda *cuda, spdl_cuda_host **host,
                                        int64_t timeout_ns) {
    spdl__cuda_host *slot;
    spdl_result result;
    bool fetches;
    if (host == NULL) return SPDL_E_INVALID;
    *host = NULL;
    result = spdl__cuda_usable(cuda);
    if (result != SPDL_OK) return result;
    /* a source that runs on the fetching thread itself would wait for itself otherwise */
    fetches = spdl__load(&cuda->fetcher) == spdl__os_thread_id();
    result = spdl__host_take(cuda, &slot, fetches, spdl__deadline(timeout_ns));
    if (result == SPDL_OK) *host = &slot->host;
    return result;
}

SPDL_API void spdl_cuda_host_free(void *host) {
    spdl_cuda_host *slot = (spdl_cuda_host *)host;
    uint32_t filling = SPDL__HOST_FILLING;
    if (slot == NULL || slot->cuda->process != (long)getpid()) return;
    if (spdl__cas32(&((spdl__cuda_host *)host)->state, &filling, SPDL__HOST_SENDING))
        spdl__host_return(slot);
}

/* The bytes of one element: the digits at the end of a type of NumPy's. 0: there are none. */
SPDL__PRIVATE size_t spdl__type_bytes(const char *type) {
    const size_t length = strlen(type);
    size_t at = length, bytes = 0;
    if (length >= sizeof(((spdl_cuda_array *)NULL)->type)) return 0;
    while (at > 0 && type[at - 1] >= '0' && type[at - 1] <= '9') --at;
    for (; at < length; ++at) bytes = bytes * 10 + (size_t)(type[at] - '0');
    return bytes;
}

/* The bytes of an array; false when they are more than `most`. */
SPDL__PRIVATE bool spdl__array_bytes(size_t item, int ndim, const uint64_t *shape, size_t most,
                                     size_t *bytes) {
    int i;
    *bytes = 0;
    for (i = 0; i < ndim; ++i)
        if (shape[i] == 0) return true;
    for (i = 0; i < ndim; ++i) {
        if (shape[i] > most / item) return false;
        item *= (size_t)shape[i];
    }
    *bytes = item;
    return item <= most;
}

SPDL_API spdl_result spdl_cuda_host_add(spdl_cuda_host *host, const char *name, const char *type,
                                        int ndim, const uint64_t *shape, void **data) {
    const size_t item = type == NULL ? 0 : spdl__type_bytes(type);
    spdl_cuda_array *array;
    size_t offset, bytes;
    if (host == NULL || name == NULL || data == NULL) return SPDL_E_INVALID;
    *data = NULL;
    if (host->cuda->process != (long)getpid()) return SPDL_E_CUDA_FORKED; /* it is not mapped */
    if (spdl__load32(&((spdl__cuda_host *)(void *)host)->state) != SPDL__HOST_FILLING)
        return spdl__cuda_refuse(host->cuda, SPDL_E_INVALID, "host_add: the slot is not being "
                                                             "filled; it was sent or freed");
    if (item == 0 || ndim < 0 || ndim > SPDL_CUDA_MAX_DIMS || (ndim > 0 && shape == NULL))
        return spdl__cuda_refuse(host->cuda, SPDL_E_INVALID,
                                 "host_add: types are like \"<f4\", dimensions 0 to 8");
    offset = spdl__round_up(host->bytes, SPDL_CUDA_ALIGN);
    if (host->array_count == SPDL_CUDA_MAX_ARRAYS || offset > host->capacity ||
        !spdl__array_bytes(item, ndim, shape, host->capacity - offset, &bytes))
        return spdl__cuda_refuse(host->cuda, SPDL_E_LIMIT,
                                 "host_add: the slot is full (slot_bytes, or 16 arrays)");
    array = &host->array[host->array_count++];
    memset(array, 0, sizeof(*array));
    spdl__name_copy(array->name, name);
    memcpy(array->type, type, strlen(type));
    array->ndim = ndim;
    if (ndim > 0) memcpy(array->shape, shape, (size_t)ndim * sizeof(shape[0]));
    array->offset = offset;
    array->bytes = bytes;
    host->bytes = offset + bytes;
    *data = (char *)host->data + offset;
    return SPDL_OK;
}

/* Takes a device slot; closed is lost. */
SPDL__PRIVATE spdl_result spdl__slot_take(spdl_cuda *cuda, spdl__cuda_slot **slot,
                                          int64_t timeout_ns) {
    uint64_t start;
    spdl_result result = spdl_ring_try_pop(cuda->free_slots, slot);
    if (result == SPDL_OK) return result;
    start = spdl_time_ns();
    spdl__range_begin(cuda, "wait for a device slot");
    result = spdl_ring_pop(cuda->free_slots, slot, timeout_ns);
    spdl__range_end(cuda);
    spdl__add(&cuda->wait_device_ns, spdl_time_ns() - start);
    return result == SPDL_CLOSED ? SPDL_E_CUDA_LOST : result;
}

/* Takes a device slot and sends the job there. */
SPDL__PRIVATE spdl_result spdl__cuda_send(spdl_cuda *cuda, spdl__cuda_job *job,
                                          spdl__cuda_slot **slot, int64_t timeout_ns) {
    spdl_result result;
    job->deadline = spdl__deadline(timeout_ns);
    result = spdl__slot_take(cuda, slot, timeout_ns);
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
    job->pageable = ((spdl__cuda_host *)(void *)host)->pageable;
    job->held.host = host;
}

/* Sends a host slot that is being filled; its state goes back when that fails. */
SPDL__PRIVATE spdl_result spdl__host_send(spdl_cuda_host *host, spdl__cuda_slot **slot,
                                          int64_t timeout_ns) {
    spdl__cuda_host *from = (spdl__cuda_host *)(void *)host;
    uint32_t filling = SPDL__HOST_FILLING;
    spdl__cuda_job job;
    spdl_result result;
    if (!spdl__cas32(&from->state, &filling, SPDL__HOST_SENDING))
        return spdl__cuda_refuse(host->cuda, SPDL_E_INVALID,
                                 "send: the slot is not being filled; it was sent or freed");
    spdl__job_of_host(&job, host);
    result = spdl__cuda_send(host->cuda, &job, slot, timeout_ns);
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
    if (result == SPDL_OK) result = spdl__host_send(host, &slot, timeout_ns);
    if (result == SPDL_OK) *batch = slot->batch;
    return result;
}

/* Whether the device can read this where it is: in an arena, in one piece of it that is pinned. (On
   the CPU any memory will do.) */
SPDL__PRIVATE bool spdl__cuda_adopted(spdl_cuda *cuda, const void *data, size_t bytes) {
    const uintptr_t from = (uintptr_t)data;
    bool found = false;
    int i;
    if (cuda->cpu) return true;
    pthread_mutex_lock(&cuda->lock);
    for (i = 0; i < SPDL_CUDA_MAX_ARENAS && !found; ++i) {
        const spdl__cuda_slab *arena = &cuda->arena[i];
        const uintptr_t base = (uintptr_t)arena->pin.base;
        if (base == 0 || from < base || from - base > arena->pin.bytes ||
            bytes > arena->pin.bytes - (from - base))
            continue;
        found = arena->pinned && (bytes == 0 || (from - base) / arena->pin.piece ==
                                                    (from - base + bytes - 1) / arena->pin.piece);
    }
    pthread_mutex_unlock(&cuda->lock);
    return found;
}

SPDL__PRIVATE int64_t spdl__time_left(uint64_t deadline) {
    const uint64_t now = deadline == SPDL__NEVER ? 0 : spdl_time_ns();
    if (deadline == SPDL__NEVER) return SPDL_FOREVER;
    return now < deadline ? (int64_t)(deadline - now) : 0;
}

SPDL__PRIVATE spdl_result spdl__view_check(spdl_cuda *cuda, const spdl_cuda_view *view) {
    if (view->bytes > cuda->desc.slot_bytes)
        return spdl__cuda_refuse(cuda, SPDL_E_LIMIT, "send_view: larger than slot_bytes");
    if (view->array_count < 0 || view->array_count > SPDL_CUDA_MAX_ARRAYS)
        return spdl__cuda_refuse(cuda, SPDL_E_LIMIT, "send_view: more than 16 arrays");
    if ((view->data == NULL && view->bytes > 0) || (view->array == NULL && view->array_count > 0))
        return spdl__cuda_refuse(cuda, SPDL_E_INVALID, "send_view: no data or no arrays");
    return SPDL_OK;
}

SPDL__PRIVATE void spdl__job_of_view(spdl__cuda_job *job, const spdl_cuda_view *view) {
    static const spdl_cuda_array none = { { 0 }, { 0 }, 0, { 0 }, 0, 0 };
    memset(job, 0, sizeof(*job));
    job->data = view->data;
    job->bytes = view->bytes;
    job->array_count = view->array_count;
    job->array = view->array_count > 0 ? view->array : &none;
    job->user = view->user;
    job->held.release = view->release;
    job->held.item = view->item;
}

/* By way of a host slot: then the view has been read when it was copied there. */
SPDL__PRIVATE spdl_result spdl__view_stage(spdl_cuda *cuda, spdl__cuda_job *job, bool reaps,
                                           uint64_t deadline) {
    spdl__cuda_host *host;
    const spdl_result result = spdl__host_take(cuda, &host, reaps, deadline);
    if (result != SPDL_OK) return result;
    if (job->bytes > 0) memcpy(host->host.data, job->data, job->bytes);
    spdl__add(&cuda->copied_bytes, job->bytes);
    job->data = host->host.data;
    job->pageable = host->pageable;
    memset(&job->held, 0, sizeof(job->held));
    job->held.host = &host->host;
    return SPDL_OK;
}

/* Sends a view; `reaps` as for host_reaps. */
SPDL__PRIVATE spdl_result spdl__view_send(spdl_cuda *cuda, const spdl_cuda_view *view,
                                          spdl__cuda_slot **slot, bool reaps, int64_t timeout_ns) {
    const uint64_t deadline = spdl__deadline(timeout_ns);
    spdl_cuda_host *staged = NULL;
    spdl__cuda_job job;
    spdl_result result = spdl__view_check(cuda, view);
    if (result != SPDL_OK) return result;
    spdl__job_of_view(&job, view);
    if (!spdl__cuda_adopted(cuda, view->data, view->bytes)) {
        result = spdl__view_stage(cuda, &job, reaps, deadline);
        if (result != SPDL_OK) return result;
        staged = job.held.host;
    }
    result = spdl__cuda_send(cuda, &job, slot, spdl__time_left(deadline));
    if (staged == NULL) return result;
    if (result != SPDL_OK)
        spdl__host_return(staged);
    else if (view->release != NULL)
        view->release(view->item);
    return result;
}

SPDL_API spdl_result spdl_cuda_send_view(spdl_cuda *cuda, const spdl_cuda_view *view,
                                         spdl_cuda_batch *batch, int64_t timeout_ns) {
    spdl__cuda_slot *slot;
    spdl_result result;
    if (view == NULL || batch == NULL) return SPDL_E_INVALID;
    result = spdl__cuda_may_send(cuda);
    if (result == SPDL_OK) result = spdl__view_send(cuda, view, &slot, true, timeout_ns);
    if (result == SPDL_OK) *batch = slot->batch;
    return result;
}

SPDL_API spdl_result spdl_cuda_reap(spdl_cuda *cuda, int64_t timeout_ns) {
    const uint64_t deadline = spdl__deadline(timeout_ns);
    spdl_result result = spdl__cuda_usable(cuda);
    uint64_t oldest;
    bool done = true;
    if (result == SPDL_OK && spdl__load32(&cuda->iterating) != 0)
        return spdl__cuda_refuse(cuda, SPDL_E_INVALID, "reap: an iterator is open, it does that");
    if (result != SPDL_OK) return result;
    if (spdl__cuda_in_flight(cuda) == 0) return SPDL_EMPTY;
    result = spdl__cuda_await_copy(cuda, deadline);
    while (result == SPDL_OK && done && spdl__cuda_oldest(cuda, &oldest)) /* those behind it */
        if (spdl__cuda_reap_if_done(cuda, oldest + 1, false, &done) != SPDL_OK)
            break; /* the next call will say so */
    return result;
}

/* The slot of a batch that is not done with, or NULL. */
SPDL__PRIVATE spdl__cuda_slot *spdl__slot_of(const spdl_cuda_batch *batch) {
    spdl__cuda_slot *slot = batch == NULL ? NULL : (spdl__cuda_slot *)batch->slot_;
    if (slot == NULL || (batch->ticket_ & 1) == 0) return NULL;
    return spdl__load(&slot->ticket) == batch->ticket_ ? slot : NULL;
}

SPDL__PRIVATE spdl__cuda_reader *spdl__reader_of(spdl__cuda_slot *slot, spdl_cuda_stream stream) {
    int i;
    for (i = 0; i < SPDL_CUDA_MAX_READERS; ++i)
        if (slot->reader[i].state != SPDL__READER_NONE && slot->reader[i].stream == stream)
            return &slot->reader[i];
    return NULL;
}

/* E2: the stream waits for the copy, unless a host thread has seen that it is done. */
SPDL__PRIVATE spdl_result spdl__slot_wait(spdl_cuda *cuda, spdl__cuda_slot *slot,
                                          spdl_cuda_stream stream, bool checked) {
    spdl_result result = SPDL_OK;
    void *event = spdl__cuda_transfer_of(cuda, slot->transfer)->event;
    /* pairs with the store in reap: the copy comes before what this thread does from here on */
    const bool done = slot->transfer < spdl__load(&cuda->reclaimed);
    int before, code;
    if (done && checked) return SPDL_OK;
    result = spdl__stream_enter(cuda, stream, &before);
    if (result == SPDL_OK && !checked) result = spdl__stream_check(cuda, stream);
    if (result == SPDL_OK && !done) {
        code = SPDL__CUDA(cuda, StreamWaitEvent(stream, event, 0));
        if (code != 0) result = spdl__cuda_fail(cuda, "cudaStreamWaitEvent", code);
    }
    spdl__cuda_switch_back(cuda, before);
    return result;
}

/* Makes the stream a reader. `checked`: it is known not to be captured. */
SPDL__PRIVATE spdl_result spdl__slot_ready(spdl_cuda *cuda, spdl__cuda_slot *slot,
                                           spdl_cuda_stream stream, bool checked) {
    spdl__cuda_reader *reader = spdl__reader_of(slot, stream);
    spdl_result result;
    int i;
    if (slot->kept) return spdl__slot_wait(cuda, slot, stream, checked);
    if (reader != NULL && reader->state == SPDL__READER_READING) return SPDL_OK;
    for (i = 0; i < SPDL_CUDA_MAX_READERS && reader == NULL; ++i)
        if (slot->reader[i].state == SPDL__READER_NONE) reader = &slot->reader[i];
    if (reader == NULL)
        return spdl__cuda_refuse(cuda, SPDL_E_LIMIT, "ready: a batch has at most 4 readers");
    result = spdl__slot_wait(cuda, slot, stream, checked);
    if (result != SPDL_OK) return result;
    reader->stream = stream;
    reader->state = SPDL__READER_READING;
    return SPDL_OK;
}

SPDL_API spdl_result spdl_cuda_ready(const spdl_cuda_batch *batch, spdl_cuda_stream stream) {
    spdl__cuda_slot *slot;
    spdl_result result;
    if (batch == NULL) return SPDL_E_INVALID;
    result = spdl__cuda_usable(batch->cuda);
    if (result != SPDL_OK) return result;
    slot = spdl__slot_of(batch);
    if (slot == NULL)
        return spdl__cuda_refuse(batch->cuda, SPDL_E_INVALID, "ready: the batch was done with");
    return spdl__slot_ready(batch->cuda, slot, stream, false);
}

/* All readers are done, or there were none: the slot can be sent to again. */
SPDL__PRIVATE void spdl__slot_retire(spdl_cuda *cuda, spdl__cuda_slot *slot) {
    slot->lent = false;
    spdl__store(&slot->ticket, slot->ticket + 1); /* pairs with the load in slot_of */
    spdl__held_release(&slot->held);
    /* pairs with the pop of the next sender: the readers' events are recorded */
    (void)spdl_ring_try_push(cuda->free_slots, &slot);
}

/* E3: records the end of one reader. */
SPDL__PRIVATE spdl_result spdl__reader_done(spdl_cuda *cuda, spdl__cuda_reader *reader) {
    spdl_result result;
    const int lap = (reader->lap + 1) % SPDL__LAPS;
    int before, code;
    result = spdl__stream_enter(cuda, reader->stream, &before);
    if (result == SPDL_OK) result = spdl__stream_check(cuda, reader->stream);
    if (result == SPDL_OK) {
        code = SPDL__CUDA(cuda, EventRecord(reader->event[lap], reader->stream));
        if (code != 0) result = spdl__cuda_fail(cuda, "cudaEventRecord", code);
    }
    spdl__cuda_switch_back(cuda, before);
    if (result != SPDL_OK) return result;
    reader->lap = lap;
    reader->state = SPDL__READER_DONE;
    return SPDL_OK;
}

/* Is done with the batch on every stream that still reads it, and gives it back. */
SPDL__PRIVATE spdl_result spdl__slot_finish(spdl_cuda *cuda, spdl__cuda_slot *slot) {
    spdl_result result = SPDL_OK;
    int i;
    for (i = 0; i < SPDL_CUDA_MAX_READERS && result == SPDL_OK; ++i)
        if (slot->reader[i].state == SPDL__READER_READING)
            result = spdl__reader_done(cuda, &slot->reader[i]);
    if (result == SPDL_OK) spdl__slot_retire(cuda, slot);
    return result;
}

SPDL_API spdl_result spdl_cuda_done(const spdl_cuda_batch *batch, spdl_cuda_stream stream) {
    spdl__cuda_slot *slot;
    spdl__cuda_reader *reader;
    spdl_result result;
    int i;
    if (batch == NULL) return SPDL_E_INVALID;
    result = spdl__cuda_usable(batch->cuda);
    if (result != SPDL_OK) return result;
    slot = spdl__slot_of(batch);
    if (slot == NULL)
        return spdl__cuda_refuse(batch->cuda, SPDL_E_INVALID, "done: the batch was done with");
    if (slot->lent)
        return spdl__cuda_refuse(batch->cuda, SPDL_E_INVALID,
                                 "done: the batch is the iterator's, which does that itself");
    reader = spdl__reader_of(slot, stream);
    if (reader == NULL || reader->state != SPDL__READER_READING)
        return spdl__cuda_refuse(batch->cuda, SPDL_E_INVALID,
                                 "done: the batch was not made ready on this stream");
    result = spdl__reader_done(batch->cuda, reader);
    if (result != SPDL_OK) return result;
    for (i = 0; i < SPDL_CUDA_MAX_READERS; ++i)
        if (slot->reader[i].state == SPDL__READER_READING) return SPDL_OK;
    spdl__slot_retire(batch->cuda, slot);
    return SPDL_OK;
}

SPDL_API void spdl_cuda_batch_free(void *batch) {
    spdl_cuda_batch *given = (spdl_cuda_batch *)batch;
    spdl__cuda_slot *slot = spdl__slot_of(given);
    int i;
    if (slot == NULL || slot->lent || spdl__cuda_usable(given->cuda) != SPDL_OK) return;
    if (spdl__slot_finish(given->cuda, slot) == SPDL_OK) return;
    for (i = 0; i < SPDL_CUDA_MAX_READERS; ++i) {
        if (slot->reader[i].state != SPDL__READER_READING) continue;
        spdl__stream_settle(given->cuda, slot->reader[i].stream);
        slot->reader[i].state = SPDL__READER_NONE;
    }
    spdl__slot_retire(given->cuda, slot);
}

SPDL_API void *spdl_cuda_batch_array(const spdl_cuda_batch *batch, const char *name) {
    int i;
    if (spdl__slot_of(batch) == NULL || name == NULL) return NULL;
    for (i = 0; i < batch->array_count; ++i)
        if (strcmp(batch->array[i].name, name) == 0)
            return (char *)batch->dev + batch->array[i].offset;
    return NULL;
}

/* Copies back and waits, on the caller's stream. */
SPDL__PRIVATE spdl_result spdl__slot_peek(spdl_cuda *cuda, const void *from, void *to, size_t bytes,
                                          spdl_cuda_stream stream) {
    spdl__cuda_scope scope;
    const char *call = "cudaMemcpyAsync";
    spdl_result result = spdl__cuda_enter(cuda, &scope);
    int code = 0;
    if (result != SPDL_OK) return result;
    result = spdl__stream_check(cuda, stream);
    if (result == SPDL_OK)
        code = SPDL__CUDA(cuda, MemcpyAsync(to, from, bytes, SPDL__CU_TO_HOST, stream));
    if (result == SPDL_OK && code == 0) {
        call = "cudaStreamSynchronize";
        code = SPDL__CUDA(cuda, StreamSynchronize(stream));
    }
    spdl__cuda_leave(cuda, &scope);
    if (code == 0) return result;
    result = spdl__cuda_fail(cuda, call, code);
    spdl__stream_settle(cuda, stream); /* it may write to the caller's memory still */
    return spdl__load32(&cuda->lost) ? SPDL_E_CUDA_LOST : result;
}

SPDL_API spdl_result spdl_cuda_peek(const spdl_cuda_batch *batch, size_t offset, void *to,
                                    size_t bytes, spdl_cuda_stream stream) {
    spdl__cuda_slot *slot;
    spdl__cuda_reader *reader;
    spdl_result result;
    if (batch == NULL || (to == NULL && bytes > 0)) return SPDL_E_INVALID;
    result = spdl__cuda_usable(batch->cuda);
    if (result != SPDL_OK) return result;
    slot = spdl__slot_of(batch);
    reader = slot == NULL ? NULL : spdl__reader_of(slot, stream);
    if (slot == NULL ||
        (!slot->kept && (reader == NULL || reader->state != SPDL__READER_READING)) ||
        offset > batch->bytes || bytes > batch->bytes - offset)
        return spdl__cuda_refuse(batch->cuda, SPDL_E_INVALID,
                                 "peek: outside of the batch, or not ready on this stream");
    if (bytes == 0) return SPDL_OK;
    return spdl__slot_peek(batch->cuda, (const char *)batch->dev + offset, to, bytes, stream);
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
    if (cuda->free_hosts != NULL) stats->host_free = (int)spdl_ring_count(cuda->free_hosts);
    stats->device_free = (int)spdl_ring_count(cuda->free_slots);
    stats->requested_bytes = (size_t)cuda->desc.host_slots * cuda->desc.slot_bytes;
    stats->pinned_bytes = cuda->slab.pinned ? cuda->slab.pin.bytes : 0;
    stats->adopted_bytes = (size_t)spdl__load_relaxed(&cuda->adopted_bytes);
    stats->batches = spdl__load_relaxed(&cuda->batches);
    stats->bytes = spdl__load_relaxed(&cuda->bytes);
    stats->copied_bytes = spdl__load_relaxed(&cuda->copied_bytes);
    stats->cuda_calls = cuda->cpu ? 0 : spdl__load_relaxed(&cuda->calls);
    stats->cuda_checks = cuda->cpu ? 0 : spdl__load_relaxed(&cuda->checks);
    stats->wait_source_ns = spdl__load_relaxed(&cuda->wait_source_ns);
    stats->wait_bus_ns = spdl__load_relaxed(&cuda->wait_bus_ns);
    stats->wait_device_ns = spdl__load_relaxed(&cuda->wait_device_ns);
    stats->wait_next_ns = spdl__load_relaxed(&cuda->wait_next_ns);
    for (i = 0; i < 32; ++i) stats->copy_us[i] = spdl__load_relaxed(&cuda->copy_us[i]);
}

/* The stage of SPDL_CUDA_TRANSFER. It looks every 20 ms whether the pipeline is to stop. */
SPDL__PRIVATE spdl_result spdl__transfer_stage(spdl_task *task, void *in, void **out) {
    spdl_cuda_host *host = (spdl_cuda_host *)in;
    const int64_t slice_ns = 20000000;
    spdl__cuda_slot *slot;
    spdl_error error;
    spdl_result result;
    if (host == NULL) return spdl_fail(task, "spdl: cuda: a NULL item is no host slot");
    if (host->cuda != (spdl_cuda *)spdl_ctx(task))
        return spdl_fail(task, "spdl: cuda: the host slot is of another spdl_cuda");
    do {
        result = spdl__cuda_may_send(host->cuda);
        if (result == SPDL_OK) result = spdl__host_send(host, &slot, slice_ns);
    } while (result == SPDL_TIMEOUT && !spdl_stopping(task));
    if (result == SPDL_TIMEOUT) return SPDL_SKIP;
    if (result != SPDL_OK) {
        spdl_cuda_error(host->cuda, &error);
        (void)spdl_fail(task, "%.*s", (int)sizeof(error.text) - 1, error.text);
        return result;
    }
    spdl__cuda_tell(host->cuda, &task->pipeline->calls_device_ns);
    spdl_take(task); /* the slot goes back by itself */
    *out = &slot->batch;
    return SPDL_OK;
}

SPDL_API const spdl_function *spdl_cuda_transfer(void) {
    static const spdl_function function = { spdl__transfer_stage, "transfer", "spdl_cuda_host",
                                            "spdl_cuda_batch" };
    return &function;
}

/* ============================================================================================= */
/* >>open-impl
   Open acquires everything in one run of steps; whatever step fails, cuda_release frees what is
   there, and close does the same. */

SPDL__PRIVATE spdl_result spdl__cuda_check_desc(const spdl_cuda_desc *desc) {
    if (desc->slot_bytes == 0 || desc->slot_bytes > SPDL__MAX_SLOT_BYTES)
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "spdl: cuda: slot_bytes is %llu, must be 1 to 2^40",
                               (spdl__llu)desc->slot_bytes);
    if (desc->host_slots < -1 || desc->host_slots > SPDL_CUDA_MAX_SLOTS)
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "spdl: cuda: host_slots is %d, must be -1 to %d", desc->host_slots,
                               SPDL_CUDA_MAX_SLOTS);
    if (desc->device_slots < 0 || desc->device_slots > SPDL_CUDA_MAX_SLOTS)
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "spdl: cuda: device_slots is %d, must be 0 to %d",
                               desc->device_slots, SPDL_CUDA_MAX_SLOTS);
    if (desc->device < -1 || (int)desc->backend < SPDL_CUDA_AUTO ||
        (int)desc->backend > SPDL_CUDA_CPU || desc->touch_threads < 0)
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "spdl: cuda: device, backend or touch_threads is out of range");
    return spdl__allocator_check(&desc->allocator, "cuda", desc->error);
}

SPDL__PRIVATE void spdl__cuda_defaults(spdl_cuda_desc *desc) {
    if (desc->host_slots == 0) desc->host_slots = 4;
    if (desc->host_slots < 0) desc->host_slots = 0;
    if (desc->device_slots == 0) desc->device_slots = 3;
}

/* The ordinal that is meant, when there are `count` devices. */
SPDL__PRIVATE int spdl__cuda_ordinal(int device, int count) {
    const char *rank = getenv("LOCAL_RANK");
    long number;
    if (device >= 0) return device;
    number = rank == NULL ? 0 : strtol(rank, NULL, 10);
    return number < 0 ? 0 : (int)(number % count);
}

/* Fills in the table: that of a device, or of the CPU. */
SPDL__PRIVATE spdl_result spdl__cuda_choose(spdl_cuda *cuda) {
    char text[SPDL_TEXT_BYTES];
    spdl_cuda_info info;
    const char *missing;
    memset(&info, 0, sizeof(info));
    cuda->cpu = cuda->desc.backend == SPDL_CUDA_CPU;
    missing = cuda->cpu ? NULL : spdl__cuda_fill(&cuda->api);
    if (missing != NULL) (void)snprintf(info.reason, sizeof(info.reason), "%s", missing);
    if (!cuda->cpu && missing == NULL) cuda->device_count = spdl__cuda_count(&cuda->api, &info);
    if (!cuda->cpu && cuda->device_count == 0) {
        if (cuda->desc.backend == SPDL_CUDA_GPU)
            return spdl__error_set(&cuda->error, SPDL_E_NOT_FOUND,
                                   "spdl: cuda: there is no device: %s", info.reason);
        (void)snprintf(text, sizeof(text), "spdl: cuda: running on the CPU: %s", info.reason);
        spdl__log(&cuda->desc.logger, SPDL_LOG_WARN, text);
        cuda->cpu = true;
    }
    if (cuda->cpu) {
        spdl__cuda_fill_cpu(&cuda->api);
        return SPDL_OK;
    }
    cuda->device = spdl__cuda_ordinal(cuda->desc.device, cuda->device_count);
    if (cuda->device < cuda->device_count) return SPDL_OK;
    return spdl__error_set(&cuda->error, SPDL_E_NOT_FOUND,
                           "spdl: cuda: there is no device %d: this process sees %d",
                           cuda->device, cuda->device_count);
}

SPDL__PRIVATE bool spdl__cuda_sync_init(spdl_cuda *cuda) {
    if (pthread_mutex_init(&cuda->lock, NULL) != 0) return false;
    if (pthread_mutex_init(&cuda->error_lock, NULL) != 0) {
        pthread_mutex_destroy(&cuda->lock);
        return false;
    }
    cuda->locks_made = true;
    cuda->event_made = spdl__os_event_init(&cuda->host_changed);
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

/* The host's side: locks, tables, rings, memory. */
SPDL__PRIVATE spdl_result spdl__cuda_make_host(spdl_cuda *cuda) {
    const spdl_cuda_desc *desc = &cuda->desc;
    const size_t hosts = (size_t)desc->host_slots, slots = (size_t)desc->device_slots;
    spdl_result result;
    cuda->asymmetric = spdl__os_barrier();
    cuda->transfers = hosts + slots;
    cuda->stride = spdl__cuda_stride(desc->slot_bytes);
    if (!spdl__cuda_sync_init(cuda)) return SPDL_E_NOMEM;
    cuda->host = (spdl__cuda_host *)spdl__alloc_zeroed(&desc->allocator, hosts + 1,
                                                       sizeof(*cuda->host), 0);
    cuda->slot =
        (spdl__cuda_slot *)spdl__alloc_zeroed(&desc->allocator, slots, sizeof(*cuda->slot), 0);
    cuda->transfer = (spdl__cuda_transfer *)spdl__alloc_zeroed(
        &desc->allocator, (size_t)cuda->transfers, sizeof(*cuda->transfer), 0);
    if (cuda->host == NULL || cuda->slot == NULL || cuda->transfer == NULL) return SPDL_E_NOMEM;
    result = spdl__cuda_ring(cuda, &cuda->free_hosts, desc->host_slots);
    if (result == SPDL_OK) result = spdl__cuda_ring(cuda, &cuda->free_slots, desc->device_slots);
    if (result != SPDL_OK) return result;
    cuda->numa_node = spdl__cuda_node(cuda);
    return spdl__slab_make(cuda, &cuda->slab, hosts);
}

SPDL__PRIVATE spdl_result spdl__event_make(spdl_cuda *cuda, void **event, unsigned flags) {
    const int code = SPDL__CUDA(cuda, EventCreateWithFlags(event, flags));
    if (code == 0) return SPDL_OK;
    *event = NULL;
    return spdl__cuda_fail(cuda, "cudaEventCreateWithFlags", code);
}

enum { SPDL__READER_EVENTS = SPDL_CUDA_MAX_READERS * SPDL__LAPS };

SPDL__PRIVATE void **spdl__reader_event(spdl__cuda_slot *slot, int i) {
    return &slot->reader[i / SPDL__LAPS].event[i % SPDL__LAPS];
}

/* Copies' events sleep when they are waited for; readers' events only streams wait for. */
SPDL__PRIVATE spdl_result spdl__cuda_make_events(spdl_cuda *cuda) {
    const bool timed = cuda->desc.time_copies;
    const unsigned untimed = timed ? 0u : (unsigned)SPDL__CU_DISABLE_TIMING;
    spdl_result result = SPDL_OK;
    uint64_t i;
    int k;
    for (i = 0; i < cuda->transfers && result == SPDL_OK; ++i) {
        spdl__cuda_transfer *transfer = &cuda->transfer[i];
        result = spdl__event_make(cuda, &transfer->event, SPDL__CU_BLOCKING_SYNC | untimed);
        if (result == SPDL_OK && timed) result = spdl__event_make(cuda, &transfer->start, 0);
    }
    for (i = 0; i < (uint64_t)cuda->desc.device_slots; ++i)
        for (k = 0; k < SPDL__READER_EVENTS && result == SPDL_OK; ++k)
            result = spdl__event_make(cuda, spdl__reader_event(&cuda->slot[i], k),
                                      SPDL__CU_DISABLE_TIMING);
    return result;
}

/* Device memory for `count` slots. */
SPDL__PRIVATE spdl_result spdl__cuda_malloc(spdl_cuda *cuda, void **memory, uint64_t count) {
    const int out_of_memory = 2;
    spdl_result result;
    int code;
    if (count > (SIZE_MAX / 2) / cuda->stride) return SPDL_E_NOMEM;
    code = SPDL__CUDA(cuda, Malloc(memory, (size_t)count * cuda->stride));
    if (code == 0) return SPDL_OK;
    *memory = NULL;
    result = spdl__cuda_fail(cuda, "cudaMalloc", code);
    return code == out_of_memory ? SPDL_E_NOMEM : result;
}

/* The device's side, on the device. */
SPDL__PRIVATE spdl_result spdl__cuda_make_device(spdl_cuda *cuda) {
    spdl__cuda_scope scope;
    spdl_result result = spdl__cuda_enter(cuda, &scope);
    int code;
    if (result != SPDL_OK) return result;
    result = spdl__cuda_malloc(cuda, &cuda->memory, (uint64_t)cuda->desc.device_slots);
    if (result == SPDL_OK) result = spdl__cuda_pin(cuda, &cuda->slab, "host slots");
    if (result == SPDL_OK) {
        code = SPDL__CUDA(cuda, StreamCreateWithFlags(&cuda->stream, SPDL__CU_NON_BLOCKING));
        if (code != 0) {
            cuda->stream = NULL;
            result = spdl__cuda_fail(cuda, "cudaStreamCreateWithFlags", code);
        }
    }
    if (result == SPDL_OK) result = spdl__cuda_make_events(cuda);
    spdl__cuda_leave(cuda, &scope);
    return result;
}

/* All slots are free. */
SPDL__PRIVATE void spdl__cuda_fill_rings(spdl_cuda *cuda) {
    int i;
    for (i = 0; i < cuda->desc.host_slots; ++i) {
        spdl__cuda_host *slot = &cuda->host[i];
        slot->pageable = !cuda->slab.pinned;
        slot->host.data = cuda->slab.pin.base + (size_t)i * cuda->stride;
        slot->host.capacity = cuda->desc.slot_bytes;
        slot->host.cuda = cuda;
        (void)spdl_ring_try_push(cuda->free_hosts, &slot);
    }
    for (i = 0; i < cuda->desc.device_slots; ++i) {
        spdl__cuda_slot *slot = &cuda->slot[i];
        slot->memory = (char *)cuda->memory + (size_t)i * cuda->stride;
        slot->batch.array = slot->array;
        slot->batch.cuda = cuda;
        slot->batch.slot_ = slot;
        (void)spdl_ring_try_push(cuda->free_slots, &slot);
    }
}

SPDL__PRIVATE void spdl__cuda_end_events(spdl_cuda *cuda) {
    uint64_t i;
    int k;
    for (i = 0; cuda->transfer != NULL && i < cuda->transfers; ++i) {
        if (cuda->transfer[i].event != NULL)
            (void)SPDL__CUDA_END(cuda, EventDestroy, cuda->transfer[i].event);
        if (cuda->transfer[i].start != NULL)
            (void)SPDL__CUDA_END(cuda, EventDestroy, cuda->transfer[i].start);
    }
    for (i = 0; cuda->slot != NULL && i < (uint64_t)cuda->desc.device_slots; ++i)
        for (k = 0; k < SPDL__READER_EVENTS; ++k)
            if (*spdl__reader_event(&cuda->slot[i], k) != NULL)
                (void)SPDL__CUDA_END(cuda, EventDestroy, *spdl__reader_event(&cuda->slot[i], k));
}

/* Frees what CUDA gave, on the device. Not once the runtime is unloading: then the process ends,
   and memory that may still be registered stays mapped. */
SPDL__PRIVATE void spdl__cuda_release_device(spdl_cuda *cuda) {
    spdl__cuda_scope scope;
    const bool entered = spdl__cuda_enter_twice(cuda, &scope);
    int i;
    spdl__cuda_end_events(cuda);
    if (cuda->stream != NULL) (void)SPDL__CUDA_END(cuda, StreamDestroy, cuda->stream);
    if (cuda->memory != NULL) (void)SPDL__CUDA_END(cuda, Free, cuda->memory);
    for (i = 0; i < SPDL_CUDA_MAX_ARENAS; ++i)
        if (cuda->arena[i].pinned) (void)spdl__cuda_unpin(cuda, &cuda->arena[i].pin);
    spdl__slab_end(cuda, &cuda->slab);
    if (entered) spdl__cuda_leave(cuda, &scope);
}

/* Frees whatever there is; nothing is in flight. */
SPDL__PRIVATE void spdl__cuda_release(spdl_cuda *cuda) {
    const spdl_allocator allocator = cuda->desc.allocator;
    const size_t hosts = (size_t)cuda->desc.host_slots, slots = (size_t)cuda->desc.device_slots;
    if (cuda->locks_made) {
        if (spdl__load32(&cuda->unloading) == 0) spdl__cuda_release_device(cuda);
        pthread_mutex_destroy(&cuda->error_lock);
        pthread_mutex_destroy(&cuda->lock);
    }
    if (cuda->event_made) spdl__os_event_fini(&cuda->host_changed);
    spdl_ring_destroy(cuda->free_hosts, NULL, NULL);
    spdl_ring_destroy(cuda->free_slots, NULL, NULL);
    spdl__free(&allocator, cuda->transfer, (size_t)cuda->transfers * sizeof(*cuda->transfer));
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
    result = spdl__cuda_check_desc(desc);
    if (result != SPDL_OK) return result;
    made = (spdl_cuda *)spdl__alloc_zeroed(&desc->allocator, 1, sizeof(*made), SPDL_CACHE_LINE);
    if (made == NULL)
        return spdl__error_set(desc->error, SPDL_E_NOMEM, "spdl: cuda: out of memory");
    made->desc = *desc;
    made->desc.error = NULL; /* the caller's, for this call only */
    made->process = (long)getpid();
    spdl__error_clear(&made->error);
    spdl__cuda_defaults(&made->desc);
#ifdef SPDL_CUDA_NVTX
    made->domain = nvtxDomainCreateA("spdl");
#endif
    result = spdl__cuda_choose(made);
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

/* Waits for the device; without that nothing can be released in order. When it cannot be entered,
   the copy stream can be waited for all the same: then nobody reads the sources any more. Who reads
   the batches is not known, so they are not to be used again. */
SPDL__PRIVATE void spdl__cuda_idle(spdl_cuda *cuda) {
    spdl__cuda_scope scope;
    int code;
    if (spdl__load32(&cuda->unloading) != 0) return;
    if (!spdl__cuda_enter_twice(cuda, &scope)) {
        spdl__stream_settle(cuda, cuda->stream);
        spdl__cuda_abandon(cuda);
        return;
    }
    code = SPDL__CUDA(cuda, DeviceSynchronize());
    if (code != 0 && spdl__cuda_fail(cuda, "cudaDeviceSynchronize", code) == SPDL_E_CUDA)
        code = SPDL__CUDA(cuda, DeviceSynchronize());
    if (code != 0) spdl__cuda_give_up(cuda, "cudaDeviceSynchronize", code);
    spdl__cuda_leave(cuda, &scope);
}

SPDL_API void spdl_cuda_close(spdl_cuda *cuda) {
    int i;
    if (cuda == NULL || cuda->process != (long)getpid()) return;
    spdl__cuda_idle(cuda);
    spdl__cuda_reap(cuda, cuda->sent); /* idle, or lost: see >>state-impl */
    for (i = 0; i < cuda->desc.device_slots; ++i) spdl__held_release(&cuda->slot[i].held);
    spdl__cuda_release(cuda);
}

SPDL__PRIVATE spdl_result spdl__adopt_check(spdl_cuda *cuda, const void *base, size_t bytes,
                                            size_t slot_bytes) {
    const spdl_result result = spdl__cuda_usable(cuda);
    if (result != SPDL_OK) return result;
    if (base == NULL || bytes == 0 || slot_bytes == 0 || slot_bytes > SPDL__MAX_SLOT_BYTES ||
        (uintptr_t)base % SPDL__PAGE != 0 || bytes > SIZE_MAX / 2)
        return spdl__cuda_refuse(cuda, SPDL_E_INVALID,
                                 "adopt: base has to be at a page border, sizes above 0");
    return SPDL_OK;
}

/* A place in the table, or NULL. The place is ours at once: its base is set. */
SPDL__PRIVATE spdl__cuda_slab *spdl__arena_place(spdl_cuda *cuda, void *was, void *base) {
    spdl__cuda_slab *place = NULL;
    int i;
    pthread_mutex_lock(&cuda->lock);
    for (i = 0; i < SPDL_CUDA_MAX_ARENAS && place == NULL; ++i)
        if (cuda->arena[i].pin.base == (char *)was) place = &cuda->arena[i];
    if (place != NULL && was == NULL) {
        memset(place, 0, sizeof(*place));
        place->pin.base = (char *)base;
    }
    pthread_mutex_unlock(&cuda->lock);
    return place;
}

SPDL_API spdl_result spdl_cuda_adopt(spdl_cuda *cuda, void *base, size_t bytes, size_t slot_bytes) {
    spdl__cuda_scope scope;
    spdl__cuda_slab *place, arena;
    spdl_result result = spdl__adopt_check(cuda, base, bytes, slot_bytes);
    if (result != SPDL_OK) return result;
    place = spdl__arena_place(cuda, NULL, base);
    if (place == NULL) return spdl__cuda_refuse(cuda, SPDL_E_LIMIT, "adopt: 8 arenas at most");
    memset(&arena, 0, sizeof(arena));
    arena.pin.base = (char *)base;
    arena.pin.bytes = bytes;
    arena.pin.piece = spdl__cuda_piece(slot_bytes);
    result = spdl__cuda_enter(cuda, &scope);
    if (result == SPDL_OK) {
        result = spdl__cuda_pin(cuda, &arena, "an arena");
        spdl__cuda_leave(cuda, &scope);
    }
    if (result != SPDL_OK) memset(&arena, 0, sizeof(arena));
    pthread_mutex_lock(&cuda->lock);
    *place = arena;
    pthread_mutex_unlock(&cuda->lock);
    if (arena.pinned) spdl__add(&cuda->adopted_bytes, bytes);
    return result;
}

SPDL_API spdl_result spdl_cuda_disown(spdl_cuda *cuda, void *base) {
    spdl__cuda_scope scope;
    spdl__cuda_slab *place;
    spdl_result result = spdl__cuda_usable(cuda);
    if (result != SPDL_OK) return result;
    place = base == NULL ? NULL : spdl__arena_place(cuda, base, NULL);
    if (place == NULL)
        return spdl__cuda_refuse(cuda, SPDL_E_NOT_FOUND, "disown: no arena begins there");
    result = spdl__cuda_drain(cuda);
    if (result == SPDL_OK) result = spdl__cuda_enter(cuda, &scope);
    if (result != SPDL_OK) return result;
    if (place->pinned) spdl__sub(&cuda->adopted_bytes, place->pin.bytes);
    if (place->pinned && !spdl__cuda_unpin(cuda, &place->pin))
        result = spdl__cuda_refuse(cuda, SPDL_E_CUDA, "disown: cudaHostUnregister failed");
    spdl__cuda_leave(cuda, &scope);
    pthread_mutex_lock(&cuda->lock);
    memset(place, 0, sizeof(*place));
    pthread_mutex_unlock(&cuda->lock);
    return result;
}

/* ============================================================================================= */
/* >>iterator-impl
   One side fetches: takes items from the source, makes jobs of them, sends them to device slots and
   puts those into `queue`. The other side, the trainer, takes them out, makes them ready, and is
   done with the last. Inline both are the trainer's thread; in thread mode the first is a thread of
   its own, and the queue, closed at the end, hands over what it wrote (`end`, `warm`).

   Who gets copies reaped, so that the loader has slots: the fetching side, before it waits for the
   source, and now and then in between. While the source has nothing, it first waits for all copies
   in flight, each of which may be what the source is waiting for. */

struct spdl_cuda_iter {
    /* written by open */
    spdl_cuda_iter_desc desc;
    spdl_cuda *cuda;
    spdl_ring *queue;
    spdl__cuda_slot *kept_slot; /* host cache: their memory is the slab's */
    void *kept_memory;          /* of the device cache */
    spdl__cuda_slab slab;       /* of the host cache */
    spdl__os_thread thread;
    bool threaded;
    uint32_t stop; /* written by close */
    /* written by the fetching side; the trainer reads them when the queue is drained */
    uint64_t taken;    /* from the source */
    uint64_t kept;
    uint64_t position; /* next one out of the cache */
    uint64_t fetched;  /* taken and out of the cache */
    uint32_t warm;
    bool source_deleted;
    spdl_result end;
    /* written by the trainer */
    spdl__cuda_slot *current, *offered;
    spdl_cuda_stream stream; /* that current was made ready on */
    uint64_t given, reclaimed_before;
    int calls_since;         /* copies were reaped */
    bool drained;            /* the thread has ended, and the queue is empty */
};

#define SPDL__ITER_SLICE_NS ((int64_t)20000000) /* how late a thread may see that it is to stop */

SPDL__PRIVATE spdl_result spdl__iter_refuse(const spdl_cuda_iter_desc *desc, const char *why) {
    return spdl__error_set(desc->error, SPDL_E_INVALID, "spdl: cuda: iterator: %s", why);
}

SPDL__PRIVATE spdl_result spdl__iter_check(const spdl_cuda *cuda, const spdl_cuda_iter_desc *desc) {
    const bool cached = desc->cache != SPDL_CUDA_CACHE_NONE;
    const uint64_t after = spdl__max(desc->num_caches, desc->return_caches_after);
    if (desc->next == NULL) return spdl__iter_refuse(desc, "next is NULL");
    if (desc->depth < 0 || desc->depth > cuda->desc.device_slots - 1)
        return spdl__iter_refuse(desc, "depth must be 0 to device_slots - 1");
    if ((int)desc->mode < SPDL_CUDA_INLINE || (int)desc->mode > SPDL_CUDA_THREAD ||
        (int)desc->cache < SPDL_CUDA_CACHE_NONE || (int)desc->cache > SPDL_CUDA_CACHE_HOST)
        return spdl__iter_refuse(desc, "mode or cache is out of range");
    if (!cached && (desc->num_caches != 0 || desc->return_caches_after != 0))
        return spdl__iter_refuse(desc, "num_caches and return_caches_after need a cache");
    if (!cached) return SPDL_OK;
    if (desc->num_caches < 1 || desc->num_caches > ((uint64_t)1 << 32))
        return spdl__iter_refuse(desc, "num_caches must be 1 to 2^32");
    if (desc->return_caches_after != 0 && desc->return_caches_after < desc->num_caches)
        return spdl__iter_refuse(desc, "return_caches_after must be at least num_caches");
    if (desc->stop_after != 0 && desc->stop_after < after)
        return spdl__iter_refuse(desc, "stop_after must be at least return_caches_after");
    return SPDL_OK;
}

/* ---- the fetching side ---- */

SPDL__PRIVATE bool spdl__iter_stopped(const spdl_cuda_iter *iter) {
    return iter->threaded && spdl__load32(&iter->stop) != 0; /* pairs with the store in close */
}

/* Waits for the source, as long as nothing is to be reaped, which it might be waiting for. */
SPDL__PRIVATE spdl_result spdl__iter_wait_source(spdl_cuda_iter *iter, void **item) {
    spdl_cuda *cuda = iter->cuda;
    const int64_t timeout_ns = iter->threaded ? SPDL__ITER_SLICE_NS : SPDL_FOREVER;
    const uint64_t start = spdl_time_ns();
    spdl_result result;
    spdl__range_begin(cuda, "wait for the source");
    result = iter->desc.next(iter->desc.source, item, timeout_ns);
    spdl__range_end(cuda);
    spdl__add(&cuda->wait_source_ns, spdl_time_ns() - start);
    return result;
}

/* An item of the source. Without `wait` there may be none: SPDL_TIMEOUT. */
SPDL__PRIVATE spdl_result spdl__iter_take(spdl_cuda_iter *iter, bool wait, void **item) {
    for (;;) {
        spdl_result result = iter->desc.next(iter->desc.source, item, 0);
        if (result != SPDL_TIMEOUT || !wait) return result;
        if (spdl__iter_stopped(iter)) return SPDL_CLOSED;
        if (spdl__cuda_in_flight(iter->cuda) > 0) {
            result = spdl__cuda_wait_copy(iter->cuda);
            if (result != SPDL_OK) return result;
        } else {
            result = spdl__iter_wait_source(iter, item);
            if (result != SPDL_TIMEOUT) return result;
        }
    }
}

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
    if (result == SPDL_OK) result = spdl__view_check(iter->cuda, &view);
    if (result == SPDL_OK)
        spdl__job_of_view(job, &view);
    else if (view.release != NULL)
        view.release(view.item);
    return result;
}

/* Keeps a job in the host cache: copied once, released, and sent from there from now on. */
SPDL__PRIVATE void spdl__iter_keep(spdl_cuda_iter *iter, spdl__cuda_job *job) {
    spdl__cuda_slot *keep = &iter->kept_slot[iter->kept];
    if (job->bytes > 0) memcpy(keep->memory, job->data, job->bytes);
    spdl__add(&iter->cuda->copied_bytes, job->bytes);
    memcpy(keep->array, job->array, (size_t)job->array_count * sizeof(job->array[0]));
    keep->batch.bytes = job->bytes;
    keep->batch.array_count = job->array_count;
    keep->batch.user = job->user;
    spdl__held_release(&job->held);
}

SPDL__PRIVATE void spdl__job_of_kept(spdl__cuda_job *job, const spdl_cuda_iter *iter, uint64_t i) {
    const spdl__cuda_slot *kept = &iter->kept_slot[i];
    memset(job, 0, sizeof(*job));
    job->data = kept->memory;
    job->bytes = kept->batch.bytes;
    job->array_count = kept->batch.array_count;
    job->array = kept->array;
    job->user = kept->batch.user;
    job->pageable = !iter->slab.pinned;
    job->own_memory = true;
}

/* Enough was sent ahead: while it waits for a device slot the thread sees to it that the loader has
   slots. What is sent next would come behind these copies anyway. */
SPDL__PRIVATE spdl_result spdl__iter_idle(spdl_cuda_iter *iter) {
    spdl_cuda *cuda = iter->cuda;
    if (!iter->threaded || spdl_ring_count(cuda->free_slots) > 0) return SPDL_OK;
    return spdl__cuda_drain(cuda);
}

/* Sends a job to a slot that circulates. The job's source is given back even when that fails. */
SPDL__PRIVATE spdl_result spdl__iter_send(spdl_cuda_iter *iter, spdl__cuda_job *job,
                                          spdl__cuda_slot **slot) {
    const int64_t timeout_ns = iter->threaded ? SPDL__ITER_SLICE_NS : SPDL_FOREVER;
    spdl_result result = spdl__iter_idle(iter);
    if (result == SPDL_OK) result = spdl__cuda_send(iter->cuda, job, slot, timeout_ns);
    while (result == SPDL_TIMEOUT && !spdl__iter_stopped(iter))
        result = spdl__cuda_send(iter->cuda, job, slot, timeout_ns);
    if (result != SPDL_OK) spdl__held_release(&job->held);
    return result == SPDL_TIMEOUT ? SPDL_CLOSED : result;
}

/* The first time a batch goes to the device cache: straight into its place. */
SPDL__PRIVATE spdl_result spdl__iter_send_kept(spdl_cuda_iter *iter, spdl__cuda_job *job,
                                               spdl__cuda_slot **slot) {
    spdl_result result;
    *slot = &iter->kept_slot[iter->kept];
    result = spdl__cuda_submit(iter->cuda, *slot, job);
    if (result != SPDL_OK) spdl__held_release(&job->held);
    return result;
}

/* Memory that the device cannot read is copied to a host slot. */
SPDL__PRIVATE spdl_result spdl__iter_stage(spdl_cuda_iter *iter, spdl__cuda_job *job) {
    spdl__cuda_held held = job->held;
    spdl_result result;
    if (job->held.host != NULL || spdl__cuda_adopted(iter->cuda, job->data, job->bytes))
        return SPDL_OK;
    do {
        result = spdl__view_stage(iter->cuda, job, true,
                                  spdl__deadline(iter->threaded ? SPDL__ITER_SLICE_NS
                                                                : SPDL_FOREVER));
    } while (result == SPDL_TIMEOUT && !spdl__iter_stopped(iter));
    spdl__held_release(&held); /* it was read, or will not be */
    return result == SPDL_TIMEOUT ? SPDL_CLOSED : result;
}

/* Sends an item of the source. */
SPDL__PRIVATE spdl_result spdl__iter_send_item(spdl_cuda_iter *iter, void *item,
                                               spdl__cuda_slot **slot) {
    const bool keep =
        iter->desc.cache != SPDL_CUDA_CACHE_NONE && iter->kept < iter->desc.num_caches;
    spdl__cuda_job job;
    spdl_result result = spdl__iter_job(iter, item, &job);
    if (result != SPDL_OK) return result;
    if (keep && iter->desc.cache == SPDL_CUDA_CACHE_HOST) {
        spdl__iter_keep(iter, &job);
        spdl__job_of_kept(&job, iter, iter->kept);
    } else {
        result = spdl__iter_stage(iter, &job);
    }
    if (result != SPDL_OK) return result;
    result = keep && iter->desc.cache == SPDL_CUDA_CACHE_DEVICE
                 ? spdl__iter_send_kept(iter, &job, slot)
                 : spdl__iter_send(iter, &job, slot);
    if (result == SPDL_OK && keep) iter->kept++;
    return result;
}

/* The source is done with once nothing of it is in flight. On the CPU batches are its memory: then
   it is done with when the iterator is. */
SPDL__PRIVATE spdl_result spdl__iter_leave_source(spdl_cuda_iter *iter) {
    spdl_result result;
    if (iter->source_deleted || iter->desc.delete_source == NULL || iter->cuda->cpu) return SPDL_OK;
    result = spdl__cuda_drain(iter->cuda);
    if (result != SPDL_OK) return result;
    iter->source_deleted = true;
    iter->desc.delete_source(iter->desc.source);
    return SPDL_OK;
}

SPDL__PRIVATE spdl_result spdl__iter_from_cache(spdl_cuda_iter *iter, spdl__cuda_slot **slot) {
    const uint64_t i = iter->position;
    spdl__cuda_job job;
    spdl_result result;
    if (iter->kept == 0) return SPDL_END;
    result = spdl__iter_leave_source(iter);
    if (result != SPDL_OK) return result;
    *slot = &iter->kept_slot[i];
    if (iter->desc.cache == SPDL_CUDA_CACHE_HOST) {
        spdl__job_of_kept(&job, iter, i);
        result = spdl__iter_send(iter, &job, slot);
    }
    if (result == SPDL_OK) iter->position = i + 1 < iter->kept ? i + 1 : 0;
    return result;
}

/* The next batch, on its way to the device. */
SPDL__PRIVATE spdl_result spdl__iter_fetch(spdl_cuda_iter *iter, bool wait,
                                           spdl__cuda_slot **slot) {
    const spdl_cuda_iter_desc *desc = &iter->desc;
    void *item = NULL;
    spdl_result result = SPDL_END;
    if (desc->stop_after != 0 && iter->fetched >= desc->stop_after) return SPDL_END;
    if (spdl__load_relaxed32(&iter->warm) == 0) {
        spdl__store(&iter->cuda->fetcher, spdl__os_thread_id()); /* for host_get on this thread */
        result = spdl__iter_take(iter, wait, &item);
        spdl__store(&iter->cuda->fetcher, 0);
        if (desc->next == spdl_pipeline_next_fn)
            spdl__cuda_tell(iter->cuda, &((spdl_pipeline *)desc->source)->step_device_ns);
        if (result == SPDL_OK) result = spdl__iter_send_item(iter, item, slot);
        if (result == SPDL_OK && ++iter->taken >= desc->return_caches_after &&
            desc->cache != SPDL_CUDA_CACHE_NONE)
            spdl__store32(&iter->warm, 1); /* pairs with the load in iter_warm */
        if (result == SPDL_END && desc->cache != SPDL_CUDA_CACHE_NONE)
            spdl__store32(&iter->warm, 1); /* the source was short */
        else if (result != SPDL_OK)
            return result;
    }
    if (result == SPDL_END) result = spdl__iter_from_cache(iter, slot);
    if (result == SPDL_OK) iter->fetched++;
    return result;
}

/* A warm device cache needs nobody to fetch: what the thread does has ended. */
SPDL__PRIVATE bool spdl__iter_rests(const spdl_cuda_iter *iter) {
    return iter->desc.cache == SPDL_CUDA_CACHE_DEVICE && spdl__load_relaxed32(&iter->warm) != 0;
}

SPDL__PRIVATE void *spdl__iter_run(void *arg) {
    spdl_cuda_iter *iter = (spdl_cuda_iter *)arg;
    spdl_cuda *cuda = iter->cuda;
    int mode, device;
    iter->end = spdl__cuda_switch(cuda, &device);
    if (iter->end == SPDL_OK) iter->end = spdl__cuda_relax(cuda, &mode);
    while (iter->end == SPDL_OK && !spdl__iter_stopped(iter) && !spdl__iter_rests(iter)) {
        spdl__cuda_slot *slot;
        iter->end = spdl__iter_fetch(iter, true, &slot);
        if (iter->end == SPDL_OK && spdl_ring_push(iter->queue, &slot, SPDL_FOREVER) != SPDL_OK) {
            if (!slot->kept) spdl__slot_retire(cuda, slot); /* closing: nobody has read it */
            iter->end = SPDL_CLOSED;
        }
    }
    spdl_ring_close(iter->queue); /* hands `end` and the cache to the trainer */
    return NULL;
}

/* ---- the trainer's side ---- */

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
    return spdl__cuda_reap_if_done(cuda, sent_before, false, &done);
}

/* Fills the queue, waiting only when it is empty. */
SPDL__PRIVATE void spdl__iter_top_up(spdl_cuda_iter *iter) {
    const uint64_t sent_before = spdl__load(&iter->cuda->sent);
    while (iter->end == SPDL_OK) {
        const uint64_t queued = spdl_ring_count(iter->queue);
        spdl__cuda_slot *slot;
        spdl_result result;
        if (queued > (uint64_t)iter->desc.depth) break;
        result = spdl__iter_fetch(iter, queued == 0, &slot);
        if (result == SPDL_TIMEOUT) break;
        if (result == SPDL_OK)
            (void)spdl_ring_try_push(iter->queue, &slot);
        else
            iter->end = result;
    }
    if (iter->end == SPDL_OK) iter->end = spdl__iter_reap(iter, sent_before);
}

/* The next batch that was sent ahead. */
SPDL__PRIVATE spdl_result spdl__iter_obtain(spdl_cuda_iter *iter, spdl__cuda_slot **slot) {
    if (iter->threaded && !iter->drained) {
        if (spdl_ring_pop(iter->queue, slot, SPDL_FOREVER) == SPDL_OK) return SPDL_OK;
        iter->drained = true;
    }
    if (iter->threaded) /* its queue is closed: a warm device cache, or the end */
        return iter->end == SPDL_OK ? spdl__iter_fetch(iter, true, slot) : iter->end;
    spdl__iter_top_up(iter);
    return spdl_ring_try_pop(iter->queue, slot) == SPDL_OK ? SPDL_OK : iter->end;
}

/* Is done with the batch of the last call. `checked`: its stream was found not to be captured. */
SPDL__PRIVATE spdl_result spdl__iter_finish(spdl_cuda_iter *iter, bool *checked) {
    spdl_result result;
    *checked = false;
    if (iter->current == NULL) return SPDL_OK;
    if (!iter->current->kept) {
        result = spdl__slot_finish(iter->cuda, iter->current);
        if (result != SPDL_OK) return result;
        *checked = true;
    }
    iter->current = NULL;
    return SPDL_OK;
}

SPDL__PRIVATE spdl_result spdl__iter_next(spdl_cuda_iter *iter, spdl_cuda_stream stream,
                                          spdl_cuda_batch *batch) {
    spdl_cuda *cuda = iter->cuda;
    bool checked;
    spdl_result result = spdl__iter_finish(iter, &checked);
    if (result != SPDL_OK) return result;
    if (iter->offered == NULL) {
        const uint64_t start = spdl_time_ns();
        result = spdl__iter_obtain(iter, &iter->offered);
        spdl__add(&cuda->wait_next_ns, spdl_time_ns() - start);
        if (result != SPDL_OK) {
            iter->offered = NULL;
            return result;
        }
    }
    result = spdl__slot_ready(cuda, iter->offered, stream, checked && iter->stream == stream);
    if (result != SPDL_OK) return result; /* it is offered again */
    iter->current = iter->offered;
    iter->offered = NULL;
    iter->stream = stream;
    iter->current->lent = true;
    iter->given++;
    *batch = iter->current->batch;
    return SPDL_OK;
}

SPDL_API spdl_result spdl_cuda_next(spdl_cuda_iter *iter, spdl_cuda_stream stream,
                                    spdl_cuda_batch *batch) {
    spdl_result result;
    if (batch == NULL) return SPDL_E_INVALID;
    memset(batch, 0, sizeof(*batch));
    if (iter == NULL) return SPDL_E_INVALID;
    result = spdl__cuda_usable(iter->cuda);
    if (result != SPDL_OK) return result;
    spdl__range_begin(iter->cuda, "next");
    result = spdl__iter_next(iter, stream, batch);
    spdl__range_end(iter->cuda);
    return result;
}

SPDL_API bool spdl_cuda_iter_warm(const spdl_cuda_iter *iter) {
    return iter != NULL && spdl__load32(&iter->warm) != 0; /* pairs with the stores in fetch */
}

/* ---- open and close ---- */

/* The memory of the cache. */
SPDL__PRIVATE spdl_result spdl__iter_make_cache(spdl_cuda_iter *iter) {
    const uint64_t count = iter->desc.num_caches;
    const bool device = iter->desc.cache == SPDL_CUDA_CACHE_DEVICE;
    spdl_cuda *cuda = iter->cuda;
    spdl__cuda_scope scope;
    spdl_result result = SPDL_OK;
    uint64_t i;
    if (iter->desc.cache == SPDL_CUDA_CACHE_NONE) return SPDL_OK;
    iter->kept_slot = (spdl__cuda_slot *)spdl__alloc_zeroed(
        &cuda->desc.allocator, (size_t)count, sizeof(*iter->kept_slot), 0);
    if (iter->kept_slot == NULL) return SPDL_E_NOMEM;
    if (!device) result = spdl__slab_make(cuda, &iter->slab, count);
    if (result != SPDL_OK) return result;
    result = spdl__cuda_enter(cuda, &scope);
    if (result != SPDL_OK) return result;
    if (device)
        result = spdl__cuda_malloc(cuda, &iter->kept_memory, count);
    else
        result = spdl__cuda_pin(cuda, &iter->slab, "the host cache");
    spdl__cuda_leave(cuda, &scope);
    if (result != SPDL_OK) return result;
    for (i = 0; i < count; ++i) {
        spdl__cuda_slot *slot = &iter->kept_slot[i];
        slot->memory = (device ? (char *)iter->kept_memory : iter->slab.pin.base) +
                       (size_t)i * cuda->stride;
        slot->kept = device;
        slot->batch.array = slot->array;
        slot->batch.cuda = cuda;
        slot->batch.slot_ = slot;
    }
    return result;
}

/* Frees whatever there is; the device is idle. */
SPDL__PRIVATE void spdl__iter_release(spdl_cuda_iter *iter) {
    spdl_cuda *cuda = iter->cuda;
    const spdl_allocator *allocator = &cuda->desc.allocator;
    spdl__cuda_scope scope;
    if (spdl__load32(&cuda->unloading) == 0 &&
        (iter->kept_memory != NULL || iter->slab.pin.base != NULL)) {
        const bool entered = spdl__cuda_enter_twice(cuda, &scope);
        if (iter->kept_memory != NULL) (void)SPDL__CUDA_END(cuda, Free, iter->kept_memory);
        spdl__slab_end(cuda, &iter->slab);
        if (entered) spdl__cuda_leave(cuda, &scope);
    }
    spdl__free(allocator, iter->kept_slot,
               (size_t)iter->desc.num_caches * sizeof(*iter->kept_slot));
    spdl_ring_destroy(iter->queue, NULL, NULL);
    spdl__free(allocator, iter, sizeof(*iter));
    spdl__store32(&cuda->iterating, 0);
    spdl__event_notify(&cuda->host_changed, cuda->asymmetric, SPDL__ALL); /* they reap now */
}

SPDL__PRIVATE spdl_result spdl__iter_new(spdl_cuda_iter **iter, spdl_cuda *cuda,
                                         const spdl_cuda_iter_desc *desc) {
    spdl_cuda_iter *made = (spdl_cuda_iter *)spdl__alloc_zeroed(&cuda->desc.allocator, 1,
                                                                sizeof(*made), 0);
    if (made == NULL) return SPDL_E_NOMEM;
    made->desc = *desc;
    made->desc.error = NULL; /* the caller's, for this call only */
    made->cuda = cuda;
    if (made->desc.depth == 0) made->desc.depth = cuda->desc.device_slots - 1;
    if (cuda->cpu && desc->mode == SPDL_CUDA_INLINE)
        made->desc.depth = 0; /* only the batch asked for: sending ahead would hold host slots */
    if (made->desc.return_caches_after == 0) made->desc.return_caches_after = desc->num_caches;
    *iter = made;
    return SPDL_OK;
}

SPDL__PRIVATE spdl_result spdl__iter_start(spdl_cuda_iter *iter) {
    const int depth = iter->desc.depth;
    const bool threaded = iter->desc.mode == SPDL_CUDA_THREAD;
    spdl_result result = spdl__iter_make_cache(iter);
    if (result == SPDL_OK)
        result = spdl__cuda_ring(iter->cuda, &iter->queue, !threaded ? depth + 1
                                                           : depth > 0 ? depth : 1);
    if (result != SPDL_OK || !threaded) return result;
    iter->threaded = true;
    if (spdl__os_thread_start(&iter->thread, "spdl-cuda", NULL, 0, spdl__iter_run, iter))
        return SPDL_OK;
    iter->threaded = false;
    return SPDL_E_THREAD;
}

SPDL_API spdl_result spdl_cuda_iter_open(spdl_cuda_iter **iter, spdl_cuda *cuda,
                                         const spdl_cuda_iter_desc *desc) {
    spdl_cuda_iter *made = NULL;
    uint32_t none = 0;
    spdl_result result;
    if (iter == NULL) return SPDL_E_INVALID;
    *iter = NULL;
    if (desc == NULL) return SPDL_E_INVALID;
    spdl__error_clear(desc->error);
    result = spdl__cuda_usable(cuda);
    if (result != SPDL_OK)
        return spdl__error_set(desc->error, result, "spdl: cuda: iterator: %s",
                               spdl_cuda_result_text(result));
    result = spdl__iter_check(cuda, desc);
    if (result != SPDL_OK) return result;
    if (!spdl__cas32(&cuda->iterating, &none, 1))
        return spdl__iter_refuse(desc, "there is one on this spdl_cuda already");
    result = spdl__iter_new(&made, cuda, desc);
    if (result == SPDL_OK) result = spdl__iter_start(made);
    if (result == SPDL_OK) {
        *iter = made;
        return SPDL_OK;
    }
    (void)spdl__error_set(desc->error, result, "spdl: cuda: iterator: %s",
                          spdl_cuda_result_text(result));
    if (result <= SPDL_E_CUDA && desc->error != NULL) spdl_cuda_error(cuda, desc->error);
    if (made != NULL)
        spdl__iter_release(made);
    else
        spdl__store32(&cuda->iterating, 0);
    return result;
}

/* A batch that will not be handed out, or whose readers have been waited for. */
SPDL__PRIVATE void spdl__iter_drop(spdl_cuda_iter *iter, spdl__cuda_slot *slot) {
    int i;
    if (slot == NULL || slot->kept) return;
    for (i = 0; i < SPDL_CUDA_MAX_READERS; ++i) slot->reader[i].state = SPDL__READER_NONE;
    spdl__slot_retire(iter->cuda, slot);
}

SPDL_API void spdl_cuda_iter_close(spdl_cuda_iter *iter) {
    spdl__cuda_slot *slot;
    spdl_cuda *cuda;
    if (iter == NULL || iter->cuda->process != (long)getpid()) return;
    cuda = iter->cuda;
    spdl__store32(&iter->stop, 1); /* pairs with the load in iter_stopped */
    spdl_ring_close(iter->queue);
    if (iter->threaded) spdl__os_thread_join(&iter->thread);
    spdl__cuda_idle(cuda);
    spdl__iter_drop(iter, iter->current);
    spdl__iter_drop(iter, iter->offered);
    while (spdl_ring_try_pop(iter->queue, &slot) == SPDL_OK) spdl__iter_drop(iter, slot);
    spdl__cuda_reap(cuda, cuda->sent); /* idle, or lost: see >>state-impl */
    if (!iter->source_deleted && iter->desc.delete_source != NULL)
        iter->desc.delete_source(iter->desc.source);
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
