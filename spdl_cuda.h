/* spdl_cuda.h - v0.4.0 - CUDA companion of spdl.h - SPDX-License-Identifier: MIT

   DO THIS: in exactly one C, C++ or .cu file of your program,

       #define SPDL_IMPLEMENTATION
       #include "spdl.h"
       #define SPDL_CUDA_IMPLEMENTATION
       #include "spdl_cuda.h"

   Link with nothing (-ldl before glibc 2.34); no CUDA header or nvcc is needed. The first spdl_cuda
   opens the driver, libcuda.so.1 ($SPDL_LIBCUDA names another file). Without a driver or a device
   spdl_cuda_open fails, with the reason. With SPDL_CUDA_NONE defined before the implementation
   spdl_cuda_open always fails.

   A TRAINING LOOP, on a device that spdl_cuda_iter_open chooses and opens

       spdl_cuda_iter *it;
       spdl_cuda_batch batch;
       spdl_cuda_iter_desc desc = { .next = spdl_pipeline_next, .source = p, .error = &error };
       if (spdl_cuda_iter_open(&it, &desc) != SPDL_OK) return 1; // a loader: spdl_loader_next_fn
       while (spdl_cuda_iter_next(it, stream, &batch, SPDL_FOREVER) == SPDL_OK)
           train<<<grid, block, 0, stream>>>((const float *)batch.data);
       spdl_cuda_iter_destroy(it);

   PINNED MEMORY is what a device copies from without the CPU. Other memory can be sent, but more
   slowly.
       a loader     iter_open, or spdl_cuda_adopt, pins the arena of spdl_loader_arena
       batches      in place, SPDL_BATCH(n, .item_bytes = b), and buffers (desc.buffers), such as
                    a struct of images and labels: pinned by the iterator, when it first gets a
                    block of them
       a pipeline   desc.allocator = spdl_cuda_allocator(cuda), of an spdl_cuda that is opened
                    first: the blocks of all rows are pinned, near the device and on huge pages
       by hand      memory of the allocator, which `release` of the view gives back
       by others    cudaHostAlloc, cudaHostRegister, another spdl_cuda: the driver knows

   THE EDGES: what must end before other work begins. Every ring of slots needs them, and no call
   can leave one out.
       E1  the library releases sent memory after it has seen the end of the copy
       E2  the stream that reads a batch waits for its copy
       E3  a copy into a device slot waits for all readers of the batch before
       E4  the same as E1, for memory that is not pinned
       D1  the copy of an output waits for the kernels that write it
       D2  the host reads an output after its copy
       D3  kernels write an output after the last copy out of it
       D4  no copy goes into an output that the host has not freed

   CONTENTS (search for the tag)
       >>count  >>slots  >>outputs  >>iterator                             declarations
       >>driver-impl  >>state-impl  >>memory-impl  >>copy-impl  >>slots-impl
       >>outputs-impl  >>open-impl  >>iterator-impl  >>license             implementation

   WORDS
       device slot   memory of the device for one batch
       arena         memory of the caller that is pinned where it is (spdl_cuda_adopt)
       copy stream   a stream of the library; there is one for each direction
       reader        a stream on which a batch was made ready, until spdl_cuda_done for this stream
       lost          a CUDA error that no call can clear, or an unknown one (999): destroy the
                     iterator, then the pipeline, close the spdl_cuda, and start a new process

   THREADS: any thread may send. In the child of a fork every call on an open spdl_cuda returns
   SPDL_E_CUDA_FORKED and touches nothing. Blocks of the allocator and the host memory of outputs
   are not mapped there. (Before Linux 5.9 a fork moves private pages away from under the device:
   fork before iter_open, and adopt only what is mapped MAP_SHARED.) Calls do not change the
   thread's current device, nor the errors of its earlier CUDA calls. Captures of CUDA graphs on
   other threads and streams are not disturbed. A stream that is being captured is refused.

   STREAMS (a cudaStream_t each) must be of the device of the spdl_cuda. A stream is one that you
   created, 0, cudaStreamLegacy or cudaStreamPerThread. For the last three the device of the
   spdl_cuda must be current where kernels are launched. 0 means cudaStreamLegacy. If the file of
   the implementation has CUDA_API_PER_THREAD_DEFAULT_STREAM, 0 means cudaStreamPerThread. Only the
   thread that made a batch ready on cudaStreamPerThread knows that stream. Streams must outlive the
   batches made ready on them.

   LIMITS: Linux, a driver of CUDA 11 or later. 4 readers of a batch at a time, 4096 slots of each
   kind. 5 to 6 calls of CUDA for a batch, and one more if others have pinned its memory. Streams
   of green contexts are refused. A MIG instance is a device. On integrated devices (Jetson) the
   copy is made as well. MPS and WSL2 (which may delay copies until a later call) are not tested.
   Not in this library: GPUDirect Storage, cudaMallocAsync. A Jetson before 7.2 pins no memory. */

#ifndef SPDL_CUDA_H_INCLUDED
#define SPDL_CUDA_H_INCLUDED

#ifndef SPDL_H_INCLUDED
#error "include spdl.h before spdl_cuda.h"
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define SPDL_CUDA_MAX_READERS 4
#define SPDL_CUDA_MAX_SLOTS 4096
#define SPDL_CUDA_ALIGN 256 /* bytes: where device slots begin */

typedef void *spdl_cuda_stream; /* a cudaStream_t */

/* ============================================================================================= */
/* >>count */

/* Counts the devices, and makes no context. Any thread may call it.
   Returns: the number; 0 with *error: no driver, an old one, no device, or an error of the driver.
   Blocks:  while the driver starts, the first time. */
SPDL_API int spdl_cuda_count(spdl_error *error);

/* ============================================================================================= */
/* >>slots
   Level 1. The order of calls for a batch is send, ready, kernels, done. spdl_cuda_send copies a
   view to a device slot, and releases its memory after the copy (E1). spdl_cuda_ready makes the
   batch ready on each stream that reads it (E2). spdl_cuda_done ends its use on the same streams;
   the next copy into the slot waits on the device for all of them (E3). Any other order returns
   SPDL_E_INVALID and does nothing.
   send, ready and done put work on streams and do not wait for it. Only calls with timeout_ns wait,
   up to that time. After a wait of 1 s for a slot one warning names the holders of the slots.
   The defaults of spdl.h apply. Every call returns SPDL_OK or a result that its comment names. It
   may also return SPDL_E_INVALID (an argument), SPDL_E_CUDA (a call of CUDA failed, and had no
   effect), SPDL_E_CUDA_LOST or SPDL_E_CUDA_FORKED; spdl_cuda_error has the reason. */

typedef struct spdl_cuda spdl_cuda; /* slots on one device */

#define SPDL_CUDA_ORDINAL(n) ((n) + 1) /* for spdl_cuda_desc.device: device n, from 0 */

typedef struct spdl_cuda_desc {
    size_t slot_bytes SPDL__ZERO; /* the largest batch */
    int device SPDL__ZERO; /* SPDL_CUDA_ORDINAL(n), or 0: the current device of the calling thread,
                            or device 0 if the thread has no context (cudaSetDevice makes one since
                            CUDA 12) */
    int device_slots SPDL__ZERO;    /* default 3 */
    size_t output_bytes SPDL__ZERO; /* the largest output; 0: no outputs */
    int output_slots SPDL__ZERO;    /* default 4 with outputs */
    spdl_allocator allocator SPDL__ZERO;
    spdl_logger logger SPDL__ZERO;
    spdl_error *error SPDL__ZERO;
} spdl_cuda_desc;

/* Memory to be sent. release(item) is called once, after the memory was read. */
typedef struct spdl_cuda_view {
    const void *data;
    size_t bytes;
    void *user;           /* becomes batch.user */
    spdl_free_fn release; /* optional; on any thread that uses the spdl_cuda; must not wait */
    void *item;
} spdl_cuda_view;

/* A batch on the device. */
typedef struct spdl_cuda_batch {
    void *data;        /* memory of the device */
    size_t bytes;
    int slot;          /* from 0: it has always the same `data`, as a CUDA graph needs */
    uint64_t sequence; /* of its copy, from 0 */
    void *user;        /* of the view */
    spdl_cuda *cuda;
    void *slot_;       /* private */
    uint64_t ticket_;  /* private: changes when the batch is done with */
} spdl_cuda_batch;

typedef struct spdl_cuda_stats {
    bool lost;
    int device;
    int device_free, output_free;  /* slots */
    size_t pinned_bytes;           /* batches, outputs and arenas */
    uint64_t batches, bytes;       /* sent */
    uint64_t pageable_bytes;       /* sent from memory that was not pinned, which is slower */
    uint64_t wait_copy_ns;         /* waits for copies: for the bus, or for kernels before them */
    uint64_t wait_slot_ns;         /* waits for a free device slot or output */
} spdl_cuda_stats;

/* Makes the slots and all that sending uses: device memory, events, streams, and pinned memory for
   outputs. Logs the device, and the reason for it, as SPDL_LOG_INFO.
   Returns: SPDL_E_NOT_FOUND (no such device; desc->error has the reason), SPDL_E_NOMEM (host or
            device).
   Blocks:  while the driver starts and memory is pinned.
   Owns:    the caller closes *cuda. On failure *cuda is NULL. */
SPDL_API spdl_result spdl_cuda_open(spdl_cuda **cuda, const spdl_cuda_desc *desc) SPDL__CHECKED;

/* Waits for the copies and for the recorded ends of readers, releases what was sent, and frees all.
   It does not call CUDA after a fork, or when the driver is unloading at exit. NULL is allowed.
   Threads: no other call may run. Destroy its iterator, and the pipelines with its allocator,
            before. */
SPDL_API void spdl_cuda_close(spdl_cuda *cuda);

/* Makes an allocator for spdl_pipeline_desc, which pins blocks of items: requests with an align of
   SPDL_BLOCK_ALIGN and at least slot_bytes. They are near the device, on huge pages if there are
   any. Freed blocks are used again, and stay pinned until close. Larger requests add blocks. A
   forked child does not have them. For other requests it calls the allocator of the desc. The log
   reports memory that cannot be pinned.
   Returns: the allocator.
   Threads: any thread may call its functions. The spdl_cuda must outlive the memory that they
            return. */
SPDL_API spdl_allocator spdl_cuda_allocator(spdl_cuda *cuda);

/* Pins memory of the caller, such as the arena of a loader process (spdl_loader_arena): `bytes`
   from `base`, at a page border. It may be read-only. Memory that cannot be pinned is used
   unpinned, and the log has a line about it. Memory that another spdl_cuda (of any device) or the
   caller has pinned is sent as pinned until it is unpinned. The spdl_cuda that adopted first must
   be closed last.
   Returns: SPDL_E_INVALID (also: only a part of it is pinned already), SPDL_E_NOMEM.
   Blocks:  while memory is pinned.
   Owns:    the memory must stay mapped until spdl_cuda_close. */
SPDL_API spdl_result spdl_cuda_adopt(spdl_cuda *cuda, void *base, size_t bytes);

/* Sends a view to the device, by one copy on the copy stream.
   Returns: SPDL_TIMEOUT (no device slot was free, or as many copies run as there are slots),
            SPDL_E_LIMIT (larger than a slot).
   Owns:    after SPDL_OK *batch is the caller's until spdl_cuda_done for its last stream. A later
            call calls release(item): a send that waits, spdl_cuda_arrived for this batch or a later
            one, or close. Up to device_slots batches are not released: a source with fewer slots of
            its own waits for spdl_cuda_arrived. After any other result the memory stays the
            caller's. */
SPDL_API spdl_result spdl_cuda_send(spdl_cuda *cuda, const spdl_cuda_view *view,
                                    spdl_cuda_batch *batch, int64_t timeout_ns);

/* Makes a batch ready on a stream: later work on the stream sees the data. Up to 4 streams may read
   a batch. Call spdl_cuda_done for each stream before you destroy the stream.
   Returns: SPDL_E_INVALID (also: the stream is captured or of another device), SPDL_E_LIMIT (a
            fifth one). */
SPDL_API spdl_result spdl_cuda_ready(const spdl_cuda_batch *batch, spdl_cuda_stream stream);

/* Waits for the copy of a batch, and releases the memory of this one and of those before it.
   Returns: SPDL_TIMEOUT. */
SPDL_API spdl_result spdl_cuda_arrived(const spdl_cuda_batch *batch, int64_t timeout_ns);

/* Ends the use of a batch on a stream, after the last work that reads it. The slot of the batch is
   free after this call for each stream on which the batch was made ready.
   Returns: SPDL_E_INVALID (also: the batch is not ready on that stream, or its use there has ended;
            the stream is captured, or cudaStreamPerThread of another thread).
   Owns:    the last stream returns the batch to the library. After a failure the call may be
            repeated. */
SPDL_API spdl_result spdl_cuda_done(const spdl_cuda_batch *batch, spdl_cuda_stream stream);

/* Gives back an unwanted batch, as spdl_cuda_done for all of its streams. NULL, and a batch whose
   use has ended, are ignored. Fits free_item.
   Blocks:  if the end of its readers cannot be recorded, until they are idle. */
SPDL_API void spdl_cuda_batch_free(void *batch);

/* Copies the last failure: the call, the device and the text of CUDA. A lost device keeps its first
   failure. Without a failure error->result is SPDL_OK. */
SPDL_API void spdl_cuda_error(spdl_cuda *cuda, spdl_error *error);

/* Copies the counters. */
SPDL_API void spdl_cuda_get_stats(const spdl_cuda *cuda, spdl_cuda_stats *stats);

/* ============================================================================================= */
/* >>outputs
   Results. An output is memory of the device, for kernels to write, with pinned memory of the same
   size for its copy. The order: get on the stream of the kernels (D3), the kernels, send (D1), wait
   (D2), reading out->host, free (D4). Any other order returns SPDL_E_INVALID.
   examples/cuda_infer.cu answers each batch of a pipeline. Threads, waiting and results are as in
   >>slots. */

typedef struct spdl_cuda_output {
    void *dev;    /* for kernels to write */
    void *host;   /* valid after the wait */
    size_t bytes; /* of the copy: output_bytes; may be reduced before it is sent */
    int slot;     /* from 0: it has always the same `dev` */
    void *user;   /* of the caller */
    spdl_cuda *cuda;
} spdl_cuda_output;

/* Returns an output that later work on the stream may write: its last copy is over by then.
   Returns: SPDL_TIMEOUT, SPDL_E_INVALID (also: no outputs; the stream as in spdl_cuda_ready).
   Owns:    the caller frees *out. */
SPDL_API spdl_result spdl_cuda_output_get(spdl_cuda *cuda, spdl_cuda_stream stream,
                                          spdl_cuda_output **out, int64_t timeout_ns);

/* Copies the output to the host, after the work on the stream of get.
   Returns: SPDL_E_INVALID (also: it was sent or freed, bytes is more than output_bytes; the stream
            as in spdl_cuda_done). */
SPDL_API spdl_result spdl_cuda_output_send(spdl_cuda_output *out);

/* Waits for the copy to out->host.
   Returns: SPDL_TIMEOUT, SPDL_E_INVALID (also: it was not sent). */
SPDL_API spdl_result spdl_cuda_output_wait(spdl_cuda_output *out, int64_t timeout_ns);

/* Gives the output back in any state. Ignores NULL, and an output that was freed and that nobody
   got again: do not keep the pointer. Fits free_item.
   Blocks:  as spdl_cuda_batch_free, if there was work on it and it was not sent. */
SPDL_API void spdl_cuda_output_free(void *out);

/* ============================================================================================= */
/* >>iterator
   Level 2, for a loop. It takes items from any next function, sends them ahead of time, and returns
   batches that are ready on the consumer's stream. The next call ends the use of the last batch. It
   calls CUDA inside spdl_cuda_iter_next, on the consumer's thread, so no other thread contends with
   its kernel launches. It holds as many items of the source as there are device slots; a loader
   needs more slots than that. Each stream has its own iterator, on its own spdl_cuda.
   Only the consumer calls, one thread at a time. Results are as in >>slots. */

/* Describes an item of the source. view->item and view->release are already set.
   Returns: SPDL_OK, or an error, which ends the iterator. */
typedef spdl_result (*spdl_cuda_view_fn)(void *item, spdl_cuda_view *view);

typedef struct spdl_cuda_iter_desc {
    spdl_next_fn next SPDL__ZERO; /* spdl_pipeline_next, spdl_loader_next_fn, ... */
    void *source SPDL__ZERO;
    bool buffers SPDL__ZERO; /* items are spdl_buffer(task), such as a struct of arrays; default:
                                batches of a loader, or of SPDL_BATCH(n, .item_bytes = ...) */
    spdl_cuda_view_fn view SPDL__ZERO; /* describes an item, for all others */
    spdl_free_fn free_item SPDL__ZERO; /* with view: destroys an item after its memory was read */
    int depth SPDL__ZERO; /* batches sent ahead; default and most: device_slots - 1 */
    int device SPDL__ZERO;          /* of spdl_cuda_iter_open, as in spdl_cuda_desc */
    spdl_logger logger SPDL__ZERO;  /* of spdl_cuda_iter_open */
    spdl_error *error SPDL__ZERO;
} spdl_cuda_iter_desc;

typedef struct spdl_cuda_iter spdl_cuda_iter;

/* Opens a device, and an iterator for batches of a loader, batches in place or buffers. The slots
   have the size of a full batch. It pins the arena of a loader, and the blocks of a pipeline that
   have 64 KiB or more and the default allocator. The first batch out of each block takes longer.
   Returns: the result of `next` (SPDL_END: no item), or as spdl_cuda_open, with *error.
   Blocks:  until the first item is there.
   Owns:    the caller destroys *iter before the source. If a source has several iterators, the one
            that was opened first is destroyed last. */
SPDL_API spdl_result spdl_cuda_iter_open(spdl_cuda_iter **iter,
                                         const spdl_cuda_iter_desc *desc) SPDL__CHECKED;

/* Makes an iterator on an spdl_cuda, which can have one at a time.
   Returns: SPDL_E_INVALID (a field, or there is an iterator already), SPDL_E_NOMEM.
   Owns:    the caller destroys *iter, and keeps the source. */
SPDL_API spdl_result spdl_cuda_iter_create(spdl_cuda_iter **iter, spdl_cuda *cuda,
                                         const spdl_cuda_iter_desc *desc) SPDL__CHECKED;

/* Ends the use of the last batch on all its streams, and returns the next batch, ready on `stream`.
   With SPDL_FOREVER it may sleep until a copy is done, also if the pipeline is stopped. Each
   SPDL_END of the source is returned once, after the batches before it. After SPDL_END the next
   call goes on, with the next epoch if there is one. An error is returned after the batches before
   it, and again by every later call.
   Returns: SPDL_TIMEOUT (nothing is lost), SPDL_END, SPDL_E_INVALID (also: `stream` as in
            spdl_cuda_ready, the stream of the last call as in spdl_cuda_done, or an item is larger
            than a slot), SPDL_E_LIMIT (the caller has all device slots or all items of the source:
            give one back and repeat), the result of the source or `view`.
   Owns:    *batch is lent until the next call; do not call spdl_cuda_done for it. batch->cuda is
            set after a failure, too, for spdl_cuda_error. */
SPDL_API spdl_result spdl_cuda_iter_next(spdl_cuda_iter *iter, spdl_cuda_stream stream,
                                    spdl_cuda_batch *batch, int64_t timeout_ns);

/* Keeps the next n batches on the device and repeats them, without the source and the bus. A call
   with n = 0 ends this, and the iterator goes on where it was. The time that steps gain is the cost
   of loading and copying. Kernels must not change the batches.
   Returns: SPDL_E_INVALID (n is not 0 to device_slots). */
SPDL_API spdl_result spdl_cuda_iter_hold(spdl_cuda_iter *iter, int n);

/* Destroys the iterator: it ends the use of the last batch, waits for the copies, releases the
   items, and closes an spdl_cuda of its own. It does not wait for other work on the device. NULL is
   allowed.
   Blocks:  until copies are done, which wait for the readers of batches before (E3). */
SPDL_API void spdl_cuda_iter_destroy(spdl_cuda_iter *iter);

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
   The calls of the CUDA driver, a table of pointers from libcuda.so.1, which any thread reads.
   CUresult and CUdevice are int, CUdeviceptr is uint64_t, all other arguments are integers and
   pointers, unchanged since CUDA 11 (tests/cuda_types.c compares them with cuda.h). The runtime
   would make contexts of hundreds of MiB on the current device of a thread, and leave its errors
   there. */

enum { /* of CUresult */
    SPDL__CU_OUT_OF_MEMORY = 2,
    SPDL__CU_UNLOADING = 4,
    SPDL__CU_NOT_READY = 600,
    SPDL__CU_ALREADY_PINNED = 712, SPDL__CU_UNKNOWN = 999,
    SPDL__CU_IMPLICIT = 906 /* the legacy stream, while a stream that it waits for is captured */
};

enum { /* flags and attributes */
    SPDL__CU_RELAXED = 2,          /* CU_STREAM_CAPTURE_MODE_RELAXED */
    SPDL__CU_NON_BLOCKING = 1,     /* CU_STREAM_NON_BLOCKING */
    SPDL__CU_BLOCKING_SYNC = 1,    /* CU_EVENT_BLOCKING_SYNC */
    SPDL__CU_DISABLE_TIMING = 2,   /* CU_EVENT_DISABLE_TIMING */
    SPDL__CU_PORTABLE = 1,         /* CU_MEMHOSTREGISTER_PORTABLE */
    SPDL__CU_READ_ONLY = 8,        /* CU_MEMHOSTREGISTER_READ_ONLY */
    SPDL__CU_ATTR_NUMA_NODE = 134, /* CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, of drivers since 12.2 */
    SPDL__CU_HOST = 1,             /* CU_MEMORYTYPE_HOST */
    SPDL__CU_MEMORY_TYPE = 2,      /* CU_POINTER_ATTRIBUTE_MEMORY_TYPE, */
    SPDL__CU_IS_MANAGED = 8,       /* _IS_MANAGED, */
    SPDL__CU_RANGE_START = 11,     /* _RANGE_START_ADDR, */
    SPDL__CU_RANGE_SIZE = 12       /* _RANGE_SIZE */
};

#define SPDL__CU_LEGACY ((spdl_cuda_stream)(uintptr_t)1)     /* CU_STREAM_LEGACY */
#define SPDL__CU_PER_THREAD ((spdl_cuda_stream)(uintptr_t)2) /* CU_STREAM_PER_THREAD */

/* clang-format off */
#define SPDL__CUDA_CALLS(X) \
    X(Init, "", (unsigned flags)) \
    X(GetErrorString, "", (int error, const char **text)) \
    X(DeviceGetCount, "", (int *count)) X(DeviceGet, "", (int *device, int ordinal)) \
    X(DeviceGetName, "", (char *name, int bytes, int device)) \
    X(DeviceGetAttribute, "", (int *value, int attribute, int device)) \
    X(DevicePrimaryCtxRetain, "", (void **context, int device)) \
    X(DevicePrimaryCtxRelease, "_v2", (int device)) \
    X(CtxGetCurrent, "", (void **context)) X(CtxPushCurrent, "_v2", (void *context)) \
    X(CtxPopCurrent, "_v2", (void **context)) X(CtxGetDevice, "", (int *device)) \
    X(CtxSynchronize, "", (void)) \
    X(ThreadExchangeStreamCaptureMode, "", (int *mode)) \
    X(StreamCreate, "", (void **stream, unsigned flags)) \
    X(StreamDestroy, "_v2", (void *stream)) X(StreamSynchronize, "", (void *stream)) \
    X(StreamWaitEvent, "", (void *stream, void *event, unsigned flags)) \
    X(StreamIsCapturing, "", (void *stream, int *status)) \
    X(StreamGetCtx, "", (void *stream, void **context)) \
    X(EventCreate, "", (void **event, unsigned flags)) \
    X(EventDestroy, "_v2", (void *event)) \
    X(EventRecord, "", (void *event, void *stream)) X(EventQuery, "", (void *event)) \
    X(EventSynchronize, "", (void *event)) \
    X(MemAlloc, "_v2", (uint64_t *memory, size_t bytes)) \
    X(MemFree, "_v2", (uint64_t memory)) \
    X(MemHostRegister, "_v2", (void *memory, size_t bytes, unsigned flags)) \
    X(MemHostUnregister, "", (void *memory)) \
    X(PointerGetAttributes, "", (unsigned count, int *attribute, void **data, uint64_t pointer)) \
    X(MemcpyHtoDAsync, "_v2", (uint64_t to, const void *from, size_t bytes, void *stream)) \
    X(MemcpyDtoHAsync, "_v2", (void *to, uint64_t from, size_t bytes, void *stream))
/* clang-format on */

typedef struct spdl__cuda_api {
#define SPDL__CUDA_POINTER(name, version, parameters) int(*name) parameters;
    SPDL__CUDA_CALLS(SPDL__CUDA_POINTER)
#undef SPDL__CUDA_POINTER
} spdl__cuda_api;

/* Returns NULL or why there is no table. The library stays open. */
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
    char room[SPDL__OS_VARIABLE];
    const char *named = spdl__os_environment("SPDL_LIBCUDA", room);
    void *library = dlopen(named != NULL ? named : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    bool all = true;
    if (library == NULL) return "no NVIDIA driver was found (libcuda.so.1)";
#define SPDL__CUDA_SYMBOL(name, version, parameters) \
    if (!spdl__cuda_symbol(library, "cu" #name version, (void *)&api->name)) all = false;
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

/* Returns the number of devices; 0 with *error. */
SPDL__PRIVATE int spdl__cuda_count(spdl__cuda_api *api, spdl_error *error) {
    const char *call = "", *why = spdl__cuda_fill(api);
    int code = 0, count = 0;
    if (why == NULL) code = api->Init((call = "cuInit: ", 0));
    if (why == NULL && code == 0) code = api->DeviceGetCount((call = "cuDeviceGetCount: ", &count));
    if (code == 0 && count > 0) return count;
    if (code == 0) call = "";
    if (why == NULL) why = code != 0 ? spdl__cuda_text(api, code) : "the driver sees no device";
    (void)spdl__error_set(error, SPDL_E_NOT_FOUND, "cuda: there is no device: %s%.100s", call, why);
    return 0;
}

SPDL_API int spdl_cuda_count(spdl_error *error) {
    spdl__cuda_api api;
    spdl__error_clear(error);
    return spdl__cuda_count(&api, error);
}

/* ============================================================================================= */
/* >>state-impl
   One object per device and owner. The states, and who records which event on which stream:

       copy         numbered `sent` on; its event is in transfer[number % device_slots].
                    submit, on the copy stream:  wait for each reader of the slot's last batch (E3),
                                                 copy, record the copy's event. Pageable memory: the
                                                 same on the loose stream, with the event of a
                                                 reader, for which the copy stream waits
                    a host thread that waits:    sees that the event is done, by query or sync,
                                                 reclaims the number, releases its memory (E1, E4)
       device slot  FREE -> SENT -> FREE, with a new ticket; free_slots holds the FREE ones.
                    ready, on a reader's stream: wait for the copy's event, unless the number was
                                                 reclaimed: a host thread has seen it done (E2)
                    done, on the same stream:    record that reader's event, for E3 of the next copy
       output       FREE -> GOT -> SENT -> THERE -> FREE; free_outputs holds the FREE ones (D4).
                    get, on the stream of the kernels: wait for the last copy out of it, unless the
                                                 host has seen that (D3)
                    send:                        record the kernels' event, wait for it on the
                                                 stream back (D1), copy, record the copy's event
                    wait, on a host thread:      that event, by query or sync (D2)

   Copies are in order on one stream, so a copy is done after all before it, and numbers are
   reclaimed in order. A transfer's event is recorded again only when its number was reclaimed. A
   later wait for it waits for a later copy, which is right, too. An event that a stream waits for
   may be recorded again at once: the wait is for the earlier record.

   Once the device is lost no event shows the end of a copy. Memory is then released in two places
   only, after a wait for the stream that returned, even with an error: a send that fails, and
   close, of an iterator, too. CUDA does not document that its copies have stopped by then. One that
   still ran would only read host memory, which stays pinned as long as the driver holds it, and
   write device memory that this process can no longer use. A driver that is unloading (exit) is not
   waited for.

   `lock` guards the copy stream (wait, copy and record belong together), the numbers, the readers
   of batches and the table of slabs, for a few calls that only enqueue or, after a failed call,
   wait. The loose stream and that of outputs need no lock: calls of other threads between ours
   only make them wait for more. */

typedef struct spdl__cuda_transfer {
    void *event; /* of the copy */
    spdl_free_fn release;
    void *item;
} spdl__cuda_transfer;

enum { SPDL__READER_NONE, SPDL__READER_READING, SPDL__READER_DONE };

typedef struct spdl__cuda_reader {
    spdl_cuda_stream stream;
    uint64_t thread; /* for SPDL__CU_PER_THREAD; else 0 */
    void *event;     /* after its work */
    int state;
} spdl__cuda_reader;

/* The readers are written under lock or, if it is `lent`, by the iterator. free_slots passes them
   to the next sender. */
typedef struct spdl__cuda_slot {
    spdl_cuda_batch batch;
    uint64_t ticket;       /* a new one when it is FREE; any thread may read it */
    uint64_t transfer;     /* number of its copy */
    spdl__cuda_reader reader[SPDL_CUDA_MAX_READERS];
    bool lent;    /* by an iterator, which is done with it itself */
    bool repeats; /* held by spdl_cuda_iter_hold */
} spdl__cuda_slot;

enum { SPDL__OUTPUT_FREE, SPDL__OUTPUT_GOT, SPDL__OUTPUT_SENT, SPDL__OUTPUT_THERE };

/* Written by its holder. */
typedef struct spdl__cuda_output {
    spdl_cuda_output out; /* first: the pointer of callers */
    uint32_t state;
    spdl__cuda_reader kernels; /* the stream of get */
    void *copied;              /* of the copy */
    void *behind;              /* what the next work on it waits for, or NULL */
} spdl__cuda_output;

typedef struct spdl__cuda_slab {
    char *base;
    size_t bytes;
    size_t pinned; /* registered bytes from base on: all or none */
    bool ours;     /* mapped by us; no arena */
    struct spdl__cuda_slab *spare; /* the next one that was given back to the allocator */
} spdl__cuda_slab;

struct spdl_cuda {
    /* Written by open. */
    spdl_cuda_desc desc;
    spdl__cuda_api api;
    bool nap_made;
    int device, handle, numa_node;
    long process;
    uint32_t *ours; /* 1, on a page that a fork clears: getpid is a system call; NULL: none */
    void *context;             /* primary */
    void *stream, *loose, *back; /* copies to the device; those of pageable memory; back */
    uint64_t memory;           /* of device slots, then outputs */
    size_t stride, output_stride, table_bytes;
    spdl__cuda_slab *outputs_at; /* host side */
    spdl__cuda_slot *slot;       /* one block, with the next four */
    spdl__cuda_transfer *transfer;
    spdl__cuda_output *output;
    void **event;
    int events;
    spdl_ring *free_slots, *free_outputs;
    spdl__os_event nap; /* nobody wakes it */
    char pad0[SPDL_CACHE_LINE];
    /* Written under lock; the numbers are read without it. */
    pthread_mutex_t lock;
    uint64_t sent, reclaimed;
    spdl__cuda_slab **slab; /* by address */
    int slabs, slab_room;
    spdl__cuda_slab *spare;
    char pad1[SPDL_CACHE_LINE];
    /* Written by any thread. */
    uint32_t lost;
    uint32_t unloading; /* the driver is gone: no more calls */
    uint32_t iterating; /* by an iterator */
    uint32_t told_stall, told_pageable; /* the warning was logged */
    uint64_t batches, bytes, pageable_bytes, pinned_bytes, wait_copy_ns, wait_slot_ns;
    pthread_mutex_t error_lock;
    spdl_error error; /* under error_lock */
};

#define SPDL__CUDA_TRY(cuda, name, arguments) \
    spdl__cuda_check(cuda, "cu" #name, (cuda)->api.name arguments)

/* Errors after which no call of this process works. */
SPDL__PRIVATE bool spdl__cuda_sticky(int error) {
    switch (error) {
    case SPDL__CU_UNLOADING:
    case 201: case 214: case 220: case 226:  /* no context, ECC, NVLink */
    case 700: case 702: case 709: case 710:  /* address, timeout, destroyed, assert */
    case 714: case 715: case 716: case 717: case 718: case 719: case 721:
    case 810: case 911: case SPDL__CU_UNKNOWN: return true; /* ended by others; unknown effects */
    default: return false;
    }
}

SPDL__PRIVATE void spdl__cuda_lose(spdl_cuda *cuda) {
    spdl__store32(&cuda->lost, 1);
    if (cuda->free_slots != NULL) spdl_ring_close(cuda->free_slots);
    if (cuda->free_outputs != NULL) spdl_ring_close(cuda->free_outputs);
}

/* Records a failure; the first one that lost the device stays. `why` NULL: keeps the text. */
SPDL__PRIVATE spdl_result spdl__cuda_refuse(spdl_cuda *cuda, spdl_result result, const char *why) {
    pthread_mutex_lock(&cuda->error_lock);
    if (spdl__load_relaxed32(&cuda->lost) == 0) {
        if (why != NULL) (void)spdl__error_set(&cuda->error, result, "cuda: %s", why);
        cuda->error.result = result;
        if (result == SPDL_E_CUDA_LOST) spdl__cuda_lose(cuda);
    }
    pthread_mutex_unlock(&cuda->error_lock);
    return result;
}

SPDL__PRIVATE spdl_result spdl__cuda_fail(spdl_cuda *cuda, const char *call, int code) {
    const bool lost = spdl__cuda_sticky(code), fault = code >= 700 && code < 800;
    char why[sizeof(cuda->error.text)];
    if (code == SPDL__CU_UNLOADING) spdl__store32(&cuda->unloading, 1);
    (void)snprintf(why, sizeof(why), "%s failed on device %d: %s (%d)%s%s", call, cuda->device,
                   spdl__cuda_text(&cuda->api, code), code,
                   lost ? "; the device is lost to this process" : "",
                   lost && fault ? "; a kernel or copy before that call, of whomever, did it" : "");
    return spdl__cuda_refuse(cuda, lost ? SPDL_E_CUDA_LOST : SPDL_E_CUDA, why);
}

SPDL__PRIVATE spdl_result spdl__cuda_check(spdl_cuda *cuda, const char *call, int code) {
    return code == 0 ? SPDL_OK : spdl__cuda_fail(cuda, call, code);
}

SPDL__PRIVATE spdl_result spdl__cuda_invalid(spdl_cuda *cuda, const char *why) {
    return spdl__cuda_refuse(cuda, SPDL_E_INVALID, why);
}

SPDL__PRIVATE bool spdl__cuda_forked(const spdl_cuda *cuda) {
    return cuda->ours != NULL ? *cuda->ours == 0 : cuda->process != (long)getpid();
}

SPDL__PRIVATE spdl_result spdl__cuda_usable(const spdl_cuda *cuda) {
    if (cuda == NULL) return SPDL_E_INVALID;
    if (spdl__cuda_forked(cuda)) return SPDL_E_CUDA_FORKED;
    return spdl__load32(&cuda->lost) ? SPDL_E_CUDA_LOST : SPDL_OK;
}

typedef struct spdl__cuda_scope {
    bool pushed, relaxed;
    int mode;
} spdl__cuda_scope;

SPDL__PRIVATE void spdl__cuda_leave(spdl_cuda *cuda, spdl__cuda_scope *scope) {
    void *ours;
    if (scope->relaxed)
        (void)SPDL__CUDA_TRY(cuda, ThreadExchangeStreamCaptureMode, (&scope->mode));
    if (scope->pushed) (void)SPDL__CUDA_TRY(cuda, CtxPopCurrent, (&ours));
}

/* CUDA is called between enter and leave, on our device. `relaxed`: the call may wait or allocate,
   which breaks captures of other threads. The caller's functions are not called there. */
SPDL__PRIVATE spdl_result spdl__cuda_enter(spdl_cuda *cuda, spdl__cuda_scope *scope, bool relaxed) {
    void *current = NULL;
    spdl_result result;
    memset(scope, 0, sizeof(*scope));
    result = SPDL__CUDA_TRY(cuda, CtxGetCurrent, (&current));
    if (result == SPDL_OK && current != cuda->context) {
        result = SPDL__CUDA_TRY(cuda, CtxPushCurrent, (cuda->context));
        scope->pushed = result == SPDL_OK;
    }
    if (result == SPDL_OK && relaxed) {
        scope->mode = SPDL__CU_RELAXED;
        result = SPDL__CUDA_TRY(cuda, ThreadExchangeStreamCaptureMode, (&scope->mode));
        scope->relaxed = result == SPDL_OK;
    }
    if (result != SPDL_OK) spdl__cuda_leave(cuda, scope);
    return result;
}

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

/* In a scope. Events work only in their own context. A captured event never happens, and would draw
   the copy stream into the capture. */
SPDL__PRIVATE spdl_result spdl__stream_check(spdl_cuda *cuda, spdl_cuda_stream stream, bool known) {
    void *context = cuda->context;
    int status = 0, code = 0;
    if (!known && (uintptr_t)stream > 2) code = cuda->api.StreamGetCtx(stream, &context);
    if (code != 0) return spdl__cuda_fail(cuda, "cuStreamGetCtx", code);
    if (context != cuda->context)
        return spdl__cuda_invalid(cuda, "the stream is of another device, or of a context that is "
                                        "not the device's primary");
    code = cuda->api.StreamIsCapturing(stream, &status);
    if (code != 0 && code != SPDL__CU_IMPLICIT)
        return spdl__cuda_fail(cuda, "cuStreamIsCapturing", code);
    if (code == 0 && status == 0) return SPDL_OK;
    return spdl__cuda_invalid(cuda,
                              "the stream is being captured; take batches outside of the capture");
}

/* Waits for a stream after a failed call. If that fails, too, the device counts as lost. */
SPDL__PRIVATE void spdl__stream_settle(spdl_cuda *cuda, const spdl__cuda_reader *reader) {
    const bool own = reader->thread == 0 || reader->thread == spdl__os_thread_id();
    spdl__cuda_scope scope;
    spdl_result result, entered;
    if (spdl__load32(&cuda->unloading) != 0) return;
    entered = spdl__cuda_enter(cuda, &scope, true);
    if (own) result = SPDL__CUDA_TRY(cuda, StreamSynchronize, (reader->stream)); /* also if lost */
    else result = SPDL__CUDA_TRY(cuda, CtxSynchronize, ());
    if (entered == SPDL_OK) spdl__cuda_leave(cuda, &scope);
    if (entered != SPDL_OK || result != SPDL_OK) /* the device may still read or write */
        (void)spdl__cuda_refuse(cuda, SPDL_E_CUDA_LOST, NULL);
}

/* Waits for a direction of copies: cuda->stream, with cuda->loose, or cuda->back. */
SPDL__PRIVATE void spdl__copies_settle(spdl_cuda *cuda, spdl_cuda_stream stream) {
    const spdl__cuda_reader copies = spdl__stream_of(stream);
    if (stream == NULL) return;
    if (stream == cuda->stream) spdl__copies_settle(cuda, cuda->loose);
    spdl__stream_settle(cuda, &copies);
}

/* Records the end of the work on a stream: of a reader for E3, of an output's kernels for D1. */
SPDL__PRIVATE spdl_result spdl__work_record(spdl_cuda *cuda, spdl__cuda_reader *reader) {
    spdl__cuda_scope scope;
    spdl_result result;
    if (reader->thread != 0 && reader->thread != spdl__os_thread_id())
        return spdl__cuda_invalid(cuda, "cudaStreamPerThread is another stream on this thread");
    result = spdl__cuda_enter(cuda, &scope, false);
    if (result != SPDL_OK) return result;
    result = spdl__stream_check(cuda, reader->stream, true);
    if (result == SPDL_OK)
        result = SPDL__CUDA_TRY(cuda, EventRecord, (reader->event, reader->stream));
    if (result == SPDL_OK) reader->state = SPDL__READER_DONE;
    spdl__cuda_leave(cuda, &scope);
    return result;
}

/* ============================================================================================= */
/* >>memory-impl
   Host memory: ours is mapped and registered; an arena is only registered. Any thread: the lock
   guards the table of slabs, not registrations. */

#define SPDL__HUGE_PAGE ((size_t)2 << 20)
#define SPDL__PIECE ((size_t)1 << 30) /* of a registration: Linux 6.11 to 6.13 fail beyond 2 GiB */
#define SPDL__MAX_SLOT_BYTES ((size_t)1 << 40)

SPDL__PRIVATE size_t spdl__round_up(size_t bytes, size_t unit) {
    return (bytes + unit - 1) / unit * unit;
}

/* In a scope. Returns false if some of it is still registered, and must stay mapped. */
SPDL__PRIVATE bool spdl__slab_unpin(spdl_cuda *cuda, spdl__cuda_slab *slab) {
    bool all = true;
    size_t at;
    for (at = 0; at < slab->pinned; at += SPDL__PIECE)
        all = SPDL__CUDA_TRY(cuda, MemHostUnregister, (slab->base + at)) == SPDL_OK && all;
    spdl__sub(&cuda->pinned_bytes, slab->pinned);
    slab->pinned = 0;
    return all || spdl__load32(&cuda->lost) != 0;
}

/* In a scope: registers all or nothing. Returns 0 or CUDA's error. */
SPDL__PRIVATE int spdl__slab_pin(spdl_cuda *cuda, spdl__cuda_slab *slab) {
    const unsigned flags = SPDL__CU_PORTABLE, read_only = flags | SPDL__CU_READ_ONLY;
    int code = 0;
    while (slab->pinned < slab->bytes) {
        char *at = slab->base + slab->pinned;
        const size_t bytes = (size_t)spdl__min(slab->bytes - slab->pinned, SPDL__PIECE);
        code = cuda->api.MemHostRegister(at, bytes, flags);
        if (code != 0 && code != SPDL__CU_ALREADY_PINNED && code != SPDL__CU_OUT_OF_MEMORY &&
            cuda->api.MemHostRegister(at, bytes, read_only) == 0)
            code = 0;
        if (code != 0) break;
        slab->pinned += bytes;
        spdl__add(&cuda->pinned_bytes, bytes);
    }
    if (code != 0) (void)spdl__slab_unpin(cuda, slab);
    return code;
}

/* In a scope. Returns the bytes from `from` up to the end of its registration; 0 if pageable. The
   driver knows about memory outside of `slab`. */
SPDL__PRIVATE size_t spdl__pinned_span(const spdl_cuda *cuda, const spdl__cuda_slab *slab,
                                       const char *from) {
    int attribute[4] = { SPDL__CU_MEMORY_TYPE, SPDL__CU_IS_MANAGED, SPDL__CU_RANGE_START,
                         SPDL__CU_RANGE_SIZE };
    uint64_t type = 0, managed = 0, start = 0, size = 0; /* 1 to 8 bytes, little-endian */
    void *data[4] = { &type, &managed, &start, &size };
    const uint64_t at = (uint64_t)(uintptr_t)from;
    if (slab != NULL && slab->pinned > 0)
        return SPDL__PIECE - (size_t)(from - slab->base) % SPDL__PIECE;
    if (cuda->api.PointerGetAttributes(4, attribute, data, at) != 0) return 0;
    if (type != SPDL__CU_HOST || managed != 0) return 0;
    return at - start < size ? (size_t)(size - (at - start)) : SPDL__PAGE;
}

/* In a scope. Returns true if all of it is pinned, by anyone. */
SPDL__PRIVATE bool spdl__host_pinned(const spdl_cuda *cuda, const spdl__cuda_slab *slab,
                                     const void *data, size_t bytes) {
    const char *from = (const char *)data;
    size_t at, span = 1;
    for (at = 0; at < bytes && span > 0; at += (size_t)spdl__min(span, bytes - at))
        span = spdl__pinned_span(cuda, slab, from + at);
    return span > 0;
}

/* Pins, unless others have. Returns SPDL_E_INVALID if others have pinned a part. */
SPDL__PRIVATE spdl_result spdl__slab_register(spdl_cuda *cuda, spdl__cuda_slab *slab) {
    spdl__cuda_scope scope;
    spdl_result result = spdl__cuda_enter(cuda, &scope, true);
    int code = 0;
    if (result != SPDL_OK) return result;
    if (!spdl__host_pinned(cuda, NULL, slab->base, slab->bytes)) /* others unpin it */
        code = spdl__slab_pin(cuda, slab);
    spdl__cuda_leave(cuda, &scope);
    if (code == 0) return SPDL_OK;
    if (code == SPDL__CU_ALREADY_PINNED)
        return spdl__cuda_invalid(cuda, "adopt: only a part of the memory is pinned already");
    if (code != SPDL__CU_UNKNOWN) result = spdl__cuda_fail(cuda, "cuMemHostRegister", code);
    if (result != SPDL_OK && result != SPDL_E_CUDA) return result;
    if (spdl__exchange32(&cuda->told_pageable, 1) == 0)
        spdl__logf(&cuda->desc.logger, SPDL_LOG_WARN,
                   "cuda: %llu bytes could not be pinned: %s (%d); going on, slower",
                   (spdl__llu)slab->bytes, spdl__cuda_text(&cuda->api, code), code);
    return SPDL_OK;
}

/* Pages near the device, huge, and without children: a fork must not move pinned pages. */
SPDL__PRIVATE void spdl__slab_advise(const spdl_cuda *cuda, const spdl__cuda_slab *slab) {
    const long dont_fork = 10, huge_pages = 14, preferred = 1, bits = 64;
    const uint64_t mask = (uint64_t)1 << (cuda->numa_node & 63);
    (void)syscall(SYS_madvise, slab->base, slab->bytes, dont_fork);
    (void)syscall(SYS_madvise, slab->base, slab->bytes, huge_pages);
    if (cuda->numa_node >= 0 && cuda->numa_node < 64)
        (void)syscall(SYS_mbind, slab->base, slab->bytes, preferred, &mask, bits + 1, 0L);
}

/* Maps memory, on a border of huge pages if it is large. */
SPDL__PRIVATE char *spdl__map(size_t bytes) {
    const int anonymous = 0x20; /* hidden in strict ISO mode */
    const size_t more = bytes >= SPDL__HUGE_PAGE ? SPDL__HUGE_PAGE : 0;
    void *memory;
    char *whole;
    size_t head;
    if (bytes > SIZE_MAX - more) return NULL;
    memory = mmap(NULL, bytes + more, PROT_READ | PROT_WRITE, MAP_PRIVATE | anonymous, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    whole = (char *)memory;
    if (more == 0) return whole;
    head = (size_t)(-(uintptr_t)whole & (SPDL__HUGE_PAGE - 1));
    if (head != 0) (void)munmap(whole, head);
    (void)munmap(whole + head + bytes, more - head); /* head is smaller */
    return whole + head;
}

/* Under lock. Returns how many slabs begin at or before this address. */
SPDL__PRIVATE int spdl__slab_count(const spdl_cuda *cuda, uintptr_t at) {
    int low = 0, high = cuda->slabs;
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if ((uintptr_t)cuda->slab[middle]->base <= at) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Under lock. Returns the slab that begins last before this memory, if it has all of it, or NULL.
   Adopted memory may be a part of other adopted memory: what is not found the driver knows. */
SPDL__PRIVATE spdl__cuda_slab *spdl__slab_find(const spdl_cuda *cuda, const void *data,
                                               size_t bytes) {
    const int count = spdl__slab_count(cuda, (uintptr_t)data);
    spdl__cuda_slab *slab = count > 0 ? cuda->slab[count - 1] : NULL;
    const size_t at = slab != NULL ? (uintptr_t)data - (uintptr_t)slab->base : 0;
    return slab != NULL && at <= slab->bytes && bytes <= slab->bytes - at ? slab : NULL;
}

/* Under lock. Returns false without memory. */
SPDL__PRIVATE bool spdl__slab_add(spdl_cuda *cuda, spdl__cuda_slab *slab) {
    const int at = spdl__slab_count(cuda, (uintptr_t)slab->base), count = cuda->slabs;
    if (count == cuda->slab_room) {
        const int room = count < 16 ? 16 : 2 * count;
        spdl__cuda_slab **more = SPDL__NEW(&cuda->desc.allocator, spdl__cuda_slab *, (size_t)room);
        if (more == NULL) return false;
        if (count > 0) memcpy(more, cuda->slab, (size_t)count * sizeof(*more));
        spdl__free(&cuda->desc.allocator, cuda->slab, (size_t)count * sizeof(*more));
        cuda->slab = more;
        cuda->slab_room = room;
    }
    memmove(cuda->slab + at + 1, cuda->slab + at, (size_t)(count - at) * sizeof(*cuda->slab));
    cuda->slab[at] = slab;
    ++cuda->slabs;
    return true;
}

/* Unpins and unmaps. What may still be registered stays mapped, unless the device is lost. */
SPDL__PRIVATE void spdl__slab_end(spdl_cuda *cuda, spdl__cuda_slab *slab) {
    spdl__cuda_scope scope;
    bool ended = slab->pinned == 0;
    if (!ended && spdl__load32(&cuda->unloading) == 0) {
        const bool entered = spdl__cuda_enter(cuda, &scope, true) == SPDL_OK;
        ended = entered ? spdl__slab_unpin(cuda, slab) : spdl__load32(&cuda->lost) != 0;
        if (entered) spdl__cuda_leave(cuda, &scope);
    }
    if (slab->ours && ended) (void)munmap(slab->base, slab->bytes);
    spdl__free(&cuda->desc.allocator, slab, sizeof(*slab));
}

/* Pins an arena or, if that is NULL, memory of ours, and puts it into the table. Ours may stay
   pageable: the next call returns why. */
SPDL__PRIVATE spdl_result spdl__slab_new(spdl_cuda *cuda, void *arena, size_t bytes,
                                         spdl__cuda_slab **made) {
    spdl_result result = SPDL_E_NOMEM;
    spdl__cuda_slab *slab = SPDL__NEW(&cuda->desc.allocator, spdl__cuda_slab, 1);
    bool added;
    if (slab == NULL) return result;
    slab->ours = arena == NULL;
    slab->bytes = slab->ours ? spdl__round_up(bytes, SPDL__PAGE) : bytes;
    slab->base = slab->ours ? spdl__map(slab->bytes) : (char *)arena;
    if (slab->ours && slab->base != NULL) spdl__slab_advise(cuda, slab);
    if (slab->base != NULL) result = spdl__slab_register(cuda, slab);
    if (slab->base == NULL || (result != SPDL_OK && !slab->ours)) {
        spdl__free(&cuda->desc.allocator, slab, sizeof(*slab));
        return result;
    }
    pthread_mutex_lock(&cuda->lock);
    added = spdl__slab_add(cuda, slab);
    pthread_mutex_unlock(&cuda->lock);
    *made = added ? slab : NULL;
    if (!added) spdl__slab_end(cuda, slab);
    return added ? SPDL_OK : SPDL_E_NOMEM;
}

SPDL__PRIVATE void *spdl__cuda_alloc(size_t bytes, size_t align, void *user) {
    spdl_cuda *cuda = (spdl_cuda *)user;
    spdl__cuda_slab **from, *slab;
    if (align != SPDL_BLOCK_ALIGN || bytes < cuda->desc.slot_bytes)
        return spdl__alloc(&cuda->desc.allocator, bytes, align);
    if (spdl__cuda_usable(cuda) == SPDL_E_CUDA_FORKED) return NULL;
    pthread_mutex_lock(&cuda->lock);
    for (from = &cuda->spare; *from != NULL && (*from)->bytes < bytes;) from = &(*from)->spare;
    slab = *from;
    if (slab != NULL) *from = slab->spare;
    pthread_mutex_unlock(&cuda->lock);
    if (slab == NULL) (void)spdl__slab_new(cuda, NULL, bytes, &slab);
    return slab == NULL ? NULL : slab->base;
}

SPDL__PRIVATE void spdl__cuda_free(void *memory, size_t bytes, void *user) {
    spdl_cuda *cuda = (spdl_cuda *)user;
    const bool child = spdl__cuda_forked(cuda); /* without slabs */
    spdl__cuda_slab *slab;
    if (!child) pthread_mutex_lock(&cuda->lock);
    slab = spdl__slab_find(cuda, memory, 0);
    if (slab != NULL && !slab->ours) slab = NULL; /* other memory may be in an adopted one */
    if (slab != NULL) slab->spare = cuda->spare;
    if (slab != NULL) cuda->spare = slab;
    if (!child) pthread_mutex_unlock(&cuda->lock);
    if (slab == NULL) spdl__free(&cuda->desc.allocator, memory, bytes);
}

SPDL_API spdl_allocator spdl_cuda_allocator(spdl_cuda *cuda) {
    spdl_allocator allocator;
    allocator.alloc_fn = spdl__cuda_alloc;
    allocator.free_fn = spdl__cuda_free;
    allocator.user = cuda;
    return allocator;
}

/* ============================================================================================= */
/* >>copy-impl
   The copy stream and its numbers. Any thread; see >>state-impl. */

/* Copies that were not reclaimed. Loads pair with the stores in submit and reap. */
SPDL__PRIVATE uint64_t spdl__cuda_in_flight(const spdl_cuda *cuda) {
    const uint64_t reclaimed = spdl__load(&cuda->reclaimed); /* first: it never passes `sent` */
    return spdl__load(&cuda->sent) - reclaimed;
}

SPDL__PRIVATE bool spdl__cuda_is_full(const spdl_cuda *cuda) {
    return spdl__cuda_in_flight(cuda) >= (uint64_t)cuda->desc.device_slots;
}

SPDL__PRIVATE spdl__cuda_transfer *spdl__cuda_transfer_of(const spdl_cuda *cuda, uint64_t number) {
    return &cuda->transfer[number % (uint64_t)cuda->desc.device_slots];
}

SPDL__PRIVATE int64_t spdl__time_left(uint64_t deadline) {
    const uint64_t now = deadline == SPDL__NEVER ? 0 : spdl_time_ns();
    if (deadline == SPDL__NEVER) return SPDL_FOREVER;
    return now < deadline ? (int64_t)(deadline - now) : 0;
}

/* Reclaims the numbers before `until`, whose copies are done, and releases their memory (E1). */
SPDL__PRIVATE void spdl__cuda_reap_until(spdl_cuda *cuda, uint64_t until) {
    for (;;) {
        spdl__cuda_transfer was;
        pthread_mutex_lock(&cuda->lock);
        if (cuda->reclaimed >= until) break;
        was = *spdl__cuda_transfer_of(cuda, cuda->reclaimed);
        /* pairs with the loads in ready and arrived; without it they read a copy that they see as
           done */
        spdl__store(&cuda->reclaimed, cuda->reclaimed + 1);
        pthread_mutex_unlock(&cuda->lock);
        if (was.release != NULL) was.release(was.item); /* without the lock */
    }
    pthread_mutex_unlock(&cuda->lock);
}

/* Asks for an event, if `soon` for the time of a wake-up. Then it sleeps or, with a deadline, asks
   and naps: CUDA has no wait with a time limit. One scope for all of it: other calls take locks. */
SPDL__PRIVATE spdl_result spdl__event_wait(spdl_cuda *cuda, void *event, uint64_t deadline,
                                           bool soon) {
    const uint64_t asks_until = spdl_time_ns() + 50000;
    uint64_t nap_ns = 10000, now = soon || deadline != SPDL__NEVER ? 0 : asks_until;
    const char *call = "cuEventQuery";
    spdl__cuda_scope scope;
    spdl_result result = spdl__cuda_enter(cuda, &scope, true);
    int code;
    if (result != SPDL_OK) return result;
    for (;;) {
        if (deadline == SPDL__NEVER && now >= asks_until) {
            call = "cuEventSynchronize";
            code = cuda->api.EventSynchronize(event);
            break;
        }
        code = cuda->api.EventQuery(event);
        if (code != SPDL__CU_NOT_READY || (now = spdl_time_ns()) >= deadline) break;
        if (now < asks_until) continue;
        (void)spdl__os_event_sleep(&cuda->nap, 0, spdl__min(now + nap_ns, deadline));
        if (nap_ns < 250000) nap_ns *= 2;
    }
    spdl__cuda_leave(cuda, &scope);
    return code == SPDL__CU_NOT_READY ? SPDL_TIMEOUT : spdl__cuda_check(cuda, call, code);
}

/* Waits until a copy was reaped, if any runs. `two`: of three it awaits two, for half the calls. */
SPDL__PRIVATE spdl_result spdl__cuda_await_copy(spdl_cuda *cuda, uint64_t deadline, bool two) {
    const uint64_t start = spdl_time_ns(), reclaimed = spdl__load(&cuda->reclaimed);
    const uint64_t flying = spdl__load(&cuda->sent) - reclaimed;
    const uint64_t until = reclaimed + (two && flying >= 3 ? 2u : 1u);
    spdl_result result;
    if (flying == 0) return SPDL_OK;
    result = spdl__event_wait(cuda, spdl__cuda_transfer_of(cuda, until - 1)->event, deadline,
                              false);
    spdl__add(&cuda->wait_copy_ns, spdl_time_ns() - start);
    if (result == SPDL_OK) spdl__cuda_reap_until(cuda, until);
    return result;
}

SPDL__PRIVATE void spdl__cuda_stalled(spdl_cuda *cuda, const char *what) {
    const int inputs = cuda->desc.device_slots, outputs = cuda->desc.output_slots;
    if (spdl__exchange32(&cuda->told_stall, 1) != 0) return;
    spdl__logf(&cuda->desc.logger, SPDL_LOG_WARN,
               "cuda: 1 s without %s. Batches that were not done with hold %d of %d device slots. "
               "Outputs that were not freed: %d of %d. Copies that are not done: %d", what,
               inputs - (int)spdl_ring_count(cuda->free_slots), inputs,
               outputs == 0 ? 0 : outputs - (int)spdl_ring_count(cuda->free_outputs), outputs,
               (int)spdl__cuda_in_flight(cuda));
}

/* Pops from a ring of free slots, which is closed when the device is lost. Whoever has a slot may
   wait for the memory of a copy: while copies run this wakes up to release it. */
SPDL__PRIVATE spdl_result spdl__free_pop(spdl_cuda *cuda, spdl_ring *ring, void *pointer,
                                         const char *what, uint64_t deadline) {
    const uint64_t second = 1000000000, slice_ns = 200000;
    spdl_result result = spdl_ring_try_pop(ring, pointer);
    uint64_t start, now, until;
    if (result == SPDL_OK) return result;
    now = start = spdl_time_ns();
    while (result == SPDL_EMPTY || result == SPDL_TIMEOUT) {
        spdl_result reaped = SPDL_OK;
        while (reaped == SPDL_OK && spdl__cuda_in_flight(cuda) > 0)
            reaped = spdl__cuda_await_copy(cuda, 0, false);
        if (reaped != SPDL_OK && reaped != SPDL_TIMEOUT) return reaped;
        if (now >= deadline) return SPDL_TIMEOUT;
        if (now - start >= second) spdl__cuda_stalled(cuda, what);
        until = now - start >= second ? deadline : spdl__min(deadline, start + second);
        if (spdl__cuda_in_flight(cuda) > 0) until = spdl__min(until, now + slice_ns);
        result = spdl_ring_pop(ring, pointer, spdl__time_left(until));
        spdl__add(&cuda->wait_slot_ns, spdl_time_ns() - now);
        now = spdl_time_ns();
    }
    return result == SPDL_CLOSED ? SPDL_E_CUDA_LOST : result;
}

typedef struct spdl__cuda_sending {
    spdl__cuda_slot *slot;
    const spdl_cuda_view *view;
    const spdl__cuda_slab *slab; /* of this spdl_cuda, or NULL */
    bool pinned;                 /* by anyone */
    bool copied;                 /* on the loose stream */
    bool whole;                  /* in one registration of others, as nearly always: one question */
} spdl__cuda_sending;

/* In a scope: E3 on a stream, then the copy, which is cut where a registration ends. */
SPDL__PRIVATE spdl_result spdl__submit_bytes(spdl_cuda *cuda, const spdl__cuda_sending *s,
                                             spdl_cuda_stream stream) {
    const char *from = (const char *)s->view->data;
    uint64_t to = (uint64_t)(uintptr_t)s->slot->batch.data;
    size_t left = s->copied ? 0 : s->view->bytes, bytes;
    spdl_result result = SPDL_OK;
    int i;
    for (i = 0; i < SPDL_CUDA_MAX_READERS && result == SPDL_OK; ++i)
        if (s->slot->reader[i].state == SPDL__READER_DONE)
            result = SPDL__CUDA_TRY(cuda, StreamWaitEvent, (stream, s->slot->reader[i].event, 0));
    for (; left > 0 && result == SPDL_OK; from += bytes, to += bytes, left -= bytes) {
        bytes = s->pinned && !s->whole ? spdl__pinned_span(cuda, s->slab, from) : left;
        if (bytes == 0 || bytes > left) bytes = left;
        result = SPDL__CUDA_TRY(cuda, MemcpyHtoDAsync, (to, from, bytes, stream));
    }
    return result;
}

/* Without the lock: the driver copies pageable memory on this thread, on the loose stream. The copy
   then counts as a reader that is done: the copy stream waits for its event. */
SPDL__PRIVATE spdl_result spdl__submit_loose(spdl_cuda *cuda, spdl__cuda_sending *s) {
    spdl__cuda_scope scope;
    spdl_result result = spdl__cuda_enter(cuda, &scope, true);
    int i;
    if (result != SPDL_OK) return result;
    s->whole = spdl__pinned_span(cuda, NULL, (const char *)s->view->data) >= s->view->bytes;
    s->pinned = s->whole || spdl__host_pinned(cuda, NULL, s->view->data, s->view->bytes);
    if (!s->pinned) {
        result = spdl__submit_bytes(cuda, s, cuda->loose);
        if (result == SPDL_OK)
            result = SPDL__CUDA_TRY(cuda, EventRecord, (s->slot->reader[0].event, cuda->loose));
        s->copied = result == SPDL_OK;
    }
    spdl__cuda_leave(cuda, &scope);
    if (result != SPDL_OK) spdl__copies_settle(cuda, cuda->loose);
    for (i = 0; s->copied && i < SPDL_CUDA_MAX_READERS; ++i)
        s->slot->reader[i].state = i == 0 ? SPDL__READER_DONE : SPDL__READER_NONE;
    return result;
}

/* Under lock: the copy and its event. After a failure no copy runs. */
SPDL__PRIVATE spdl_result spdl__submit_copy(spdl_cuda *cuda, const spdl__cuda_sending *s) {
    void *event = spdl__cuda_transfer_of(cuda, cuda->sent)->event;
    spdl__cuda_scope scope;
    spdl_result result = spdl__cuda_enter(cuda, &scope, s->slab == NULL || s->slab->pinned == 0);
    if (result != SPDL_OK) return result;
    result = spdl__submit_bytes(cuda, s, cuda->stream);
    if (result == SPDL_OK) result = SPDL__CUDA_TRY(cuda, EventRecord, (event, cuda->stream));
    spdl__cuda_leave(cuda, &scope);
    if (result != SPDL_OK) spdl__copies_settle(cuda, cuda->stream);
    return result != SPDL_OK && spdl__load32(&cuda->lost) ? SPDL_E_CUDA_LOST : result;
}

/* Under lock, which it releases meanwhile: waits until one more copy may run. */
SPDL__PRIVATE spdl_result spdl__submit_number(spdl_cuda *cuda, uint64_t deadline) {
    spdl_result result = SPDL_OK;
    while (result == SPDL_OK && spdl__cuda_is_full(cuda)) {
        pthread_mutex_unlock(&cuda->lock);
        result = spdl__cuda_await_copy(cuda, deadline, deadline == SPDL__NEVER);
        pthread_mutex_lock(&cuda->lock);
    }
    return result;
}

SPDL__PRIVATE void spdl__submit_note(spdl_cuda *cuda, const spdl__cuda_sending *s) {
    const spdl__llu bytes = s->view->bytes;
    spdl__add(&cuda->batches, 1);
    spdl__add(&cuda->bytes, bytes);
    if (s->pinned) return;
    spdl__add(&cuda->pageable_bytes, bytes);
    if (bytes >= SPDL__PAGE && spdl__exchange32(&cuda->told_pageable, 1) == 0)
        spdl__logf(&cuda->desc.logger, SPDL_LOG_WARN,
                   "cuda: a batch of %llu bytes is not in pinned memory: it is several times "
                   "slower to send; use spdl_cuda_allocator (slot_bytes is %llu) or "
                   "spdl_cuda_adopt",
                   bytes, (spdl__llu)cuda->desc.slot_bytes);
}

/* Sends a view to a slot, and fills in its batch. After a failure the caller has both. */
SPDL__PRIVATE spdl_result spdl__cuda_submit(spdl_cuda *cuda, spdl__cuda_slot *slot,
                                            const spdl_cuda_view *view, uint64_t deadline) {
    spdl__cuda_sending s = { slot, view, NULL, false, false, false };
    spdl__cuda_transfer *transfer;
    spdl_result result;
    int i;
    pthread_mutex_lock(&cuda->lock);
    s.slab = spdl__slab_find(cuda, view->data, view->bytes);
    s.pinned = s.slab != NULL && s.slab->pinned > 0;
    result = spdl__submit_number(cuda, deadline);
    if (result == SPDL_OK && !s.pinned) {
        pthread_mutex_unlock(&cuda->lock);
        result = spdl__submit_loose(cuda, &s);
        pthread_mutex_lock(&cuda->lock);
        if (result == SPDL_OK) result = spdl__submit_number(cuda, SPDL__NEVER);
    }
    if (result == SPDL_OK) result = spdl__submit_copy(cuda, &s);
    if (result != SPDL_OK) {
        pthread_mutex_unlock(&cuda->lock);
        if (s.copied) spdl__copies_settle(cuda, cuda->loose);
        return result;
    }
    transfer = spdl__cuda_transfer_of(cuda, cuda->sent);
    transfer->release = view->release;
    transfer->item = view->item;
    slot->batch.bytes = view->bytes;
    slot->batch.user = view->user;
    slot->batch.sequence = slot->transfer = cuda->sent;
    for (i = 0; i < SPDL_CUDA_MAX_READERS; ++i) slot->reader[i].state = SPDL__READER_NONE;
    slot->batch.ticket_ = slot->ticket;
    /* pairs with the loads of all who wait for copies; without it they wait for an older record */
    spdl__store(&cuda->sent, cuda->sent + 1);
    pthread_mutex_unlock(&cuda->lock);
    spdl__submit_note(cuda, &s);
    return SPDL_OK;
}

/* ============================================================================================= */
/* >>slots-impl
   Level 1: sending and readers. Each function checks its arguments' state first. */

SPDL__PRIVATE spdl_result spdl__view_check(spdl_cuda *cuda, const spdl_cuda_view *view,
                                           spdl_result too_large) {
    if (view->bytes > cuda->desc.slot_bytes) {
        char why[sizeof(cuda->error.text)];
        (void)snprintf(why, sizeof(why), "send: a batch of %llu bytes, slot_bytes is %llu",
                       (spdl__llu)view->bytes, (spdl__llu)cuda->desc.slot_bytes);
        return spdl__cuda_refuse(cuda, too_large, why);
    }
    if (view->data == NULL && view->bytes > 0)
        return spdl__cuda_invalid(cuda, "send: data is NULL");
    return SPDL_OK;
}

SPDL_API spdl_result spdl_cuda_send(spdl_cuda *cuda, const spdl_cuda_view *view,
                                    spdl_cuda_batch *batch, int64_t timeout_ns) {
    const uint64_t deadline = spdl__deadline(timeout_ns);
    spdl__cuda_slot *slot = NULL;
    spdl_result result;
    if (view == NULL || batch == NULL) return SPDL_E_INVALID;
    result = spdl__cuda_usable(cuda);
    if (result == SPDL_OK) result = spdl__view_check(cuda, view, SPDL_E_LIMIT);
    if (result != SPDL_OK) return result;
    result = spdl__free_pop(cuda, cuda->free_slots, &slot, "a device slot", deadline);
    if (result != SPDL_OK) return result;
    result = spdl__cuda_submit(cuda, slot, view, deadline);
    if (result == SPDL_OK) *batch = slot->batch;
    else (void)spdl_ring_try_push(cuda->free_slots, &slot); /* has room for all */
    return result;
}

SPDL__PRIVATE spdl__cuda_slot *spdl__slot_of(const spdl_cuda_batch *batch) {
    spdl__cuda_slot *slot = (spdl__cuda_slot *)batch->slot_;
    return slot != NULL && spdl__load(&slot->ticket) == batch->ticket_ ? slot : NULL;
}

/* Takes the lock if it returns SPDL_OK: several threads may use a batch, each on its stream. */
SPDL__PRIVATE spdl_result spdl__batch_lock(const spdl_cuda_batch *batch, spdl__cuda_slot **slot,
                                           const char *why) {
    spdl_result result;
    if (batch == NULL) return SPDL_E_INVALID;
    result = spdl__cuda_usable(batch->cuda);
    if (result != SPDL_OK) return result;
    pthread_mutex_lock(&batch->cuda->lock);
    *slot = spdl__slot_of(batch);
    if (*slot != NULL) return SPDL_OK;
    pthread_mutex_unlock(&batch->cuda->lock);
    return spdl__cuda_invalid(batch->cuda, why);
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

/* E2: the stream waits for the copy, unless a host thread has seen it done. It also waits for
   `ended`, unless that is NULL. */
SPDL__PRIVATE spdl_result spdl__slot_wait(spdl_cuda *cuda, const spdl__cuda_slot *slot,
                                          spdl_cuda_stream stream, bool checked, void *ended) {
    void *event = spdl__cuda_transfer_of(cuda, slot->transfer)->event;
    /* pairs with the store in reap; without it this thread's work may pass the copy */
    const bool done = slot->transfer < spdl__load(&cuda->reclaimed);
    spdl__cuda_scope scope;
    spdl_result result;
    if (done && checked && ended == NULL) return SPDL_OK;
    result = spdl__cuda_enter(cuda, &scope, false);
    if (result != SPDL_OK) return result;
    if (!checked) result = spdl__stream_check(cuda, stream, false);
    if (result == SPDL_OK && !done)
        result = SPDL__CUDA_TRY(cuda, StreamWaitEvent, (stream, event, 0));
    if (result == SPDL_OK && ended != NULL)
        result = SPDL__CUDA_TRY(cuda, StreamWaitEvent, (stream, ended, 0));
    spdl__cuda_leave(cuda, &scope);
    return result;
}

/* Makes the stream a reader. `checked`: work may be put on it. */
SPDL__PRIVATE spdl_result spdl__slot_ready(spdl_cuda *cuda, spdl__cuda_slot *slot,
                                           spdl_cuda_stream handle, bool checked) {
    const spdl__cuda_reader stream = spdl__stream_of(handle);
    spdl__cuda_reader *reader = spdl__reader_of(slot, &stream);
    /* A stream that was done with the batch and destroyed may have had this handle. The reader's
       next record must cover its work, too. */
    void *ended = reader != NULL ? reader->event : NULL;
    spdl_result result;
    int i;
    if (reader != NULL && reader->state == SPDL__READER_READING) return SPDL_OK;
    for (i = 0; i < SPDL_CUDA_MAX_READERS && reader == NULL; ++i)
        if (slot->reader[i].state == SPDL__READER_NONE) reader = &slot->reader[i];
    if (reader == NULL)
        return spdl__cuda_refuse(cuda, SPDL_E_LIMIT, "ready: a batch has at most 4 readers");
    result = spdl__slot_wait(cuda, slot, stream.stream, checked, ended);
    if (result != SPDL_OK) return result;
    reader->stream = stream.stream;
    reader->thread = stream.thread;
    reader->state = SPDL__READER_READING;
    return SPDL_OK;
}

SPDL_API spdl_result spdl_cuda_ready(const spdl_cuda_batch *batch, spdl_cuda_stream stream) {
    spdl__cuda_slot *slot = NULL;
    spdl_result result = spdl__batch_lock(batch, &slot, "ready: the batch was done with");
    if (result != SPDL_OK) return result;
    result = spdl__slot_ready(batch->cuda, slot, stream, false);
    pthread_mutex_unlock(&batch->cuda->lock);
    return result;
}

SPDL_API spdl_result spdl_cuda_arrived(const spdl_cuda_batch *batch, int64_t timeout_ns) {
    spdl__cuda_slot *slot = NULL;
    spdl_result result = spdl__batch_lock(batch, &slot, "arrived: the batch was done with");
    spdl_cuda *cuda;
    uint64_t number;
    if (result != SPDL_OK) return result;
    cuda = batch->cuda;
    number = slot->transfer;
    pthread_mutex_unlock(&cuda->lock);
    if (number < spdl__load(&cuda->reclaimed)) return SPDL_OK; /* pairs as in slot_wait */
    result = spdl__event_wait(cuda, spdl__cuda_transfer_of(cuda, number)->event,
                              spdl__deadline(timeout_ns), true);
    if (result == SPDL_OK) spdl__cuda_reap_until(cuda, number + 1);
    return result;
}

SPDL__PRIVATE void spdl__slot_retire(spdl_cuda *cuda, spdl__cuda_slot *slot) {
    slot->lent = false;
    /* pairs with the load in slot_of; without it a copy of the batch that is done with is used */
    spdl__store(&slot->ticket, slot->ticket + 1);
    /* pairs with the pop of the next sender; without it unrecorded events of readers are waited
       for */
    (void)spdl_ring_try_push(cuda->free_slots, &slot);
}

/* `always`: waits for a stream whose end cannot be recorded. */
SPDL__PRIVATE spdl_result spdl__slot_finish(spdl_cuda *cuda, spdl__cuda_slot *slot, bool always) {
    spdl_result result = SPDL_OK;
    int i;
    for (i = 0; i < SPDL_CUDA_MAX_READERS && result == SPDL_OK; ++i) {
        if (slot->reader[i].state != SPDL__READER_READING) continue;
        result = spdl__work_record(cuda, &slot->reader[i]);
        if (result == SPDL_OK || !always) continue;
        spdl__stream_settle(cuda, &slot->reader[i]);
        result = SPDL_OK;
    }
    return result;
}

SPDL__PRIVATE void spdl__slot_end(spdl_cuda *cuda, spdl__cuda_slot *slot) {
    (void)spdl__slot_finish(cuda, slot, true);
    spdl__slot_retire(cuda, slot);
}

/* Under lock: another thread may be done on its stream. */
SPDL__PRIVATE spdl_result spdl__slot_done(spdl_cuda *cuda, spdl__cuda_slot *slot,
                                          spdl_cuda_stream handle) {
    const spdl__cuda_reader stream = spdl__stream_of(handle);
    spdl__cuda_reader *reader;
    spdl_result result;
    int i;
    if (slot->lent)
        return spdl__cuda_invalid(cuda,
                                  "done: the batch is the iterator's, which does that itself");
    reader = spdl__reader_of(slot, &stream);
    if (reader == NULL || reader->state != SPDL__READER_READING)
        return spdl__cuda_invalid(cuda, "done: the batch was not made ready on this stream");
    result = spdl__work_record(cuda, reader);
    if (result != SPDL_OK) return result;
    for (i = 0; i < SPDL_CUDA_MAX_READERS; ++i)
        if (slot->reader[i].state == SPDL__READER_READING) return SPDL_OK;
    spdl__slot_retire(cuda, slot);
    return SPDL_OK;
}

SPDL_API spdl_result spdl_cuda_done(const spdl_cuda_batch *batch, spdl_cuda_stream stream) {
    spdl__cuda_slot *slot = NULL;
    spdl_result result = spdl__batch_lock(batch, &slot, "done: the batch was done with");
    if (result != SPDL_OK) return result;
    result = spdl__slot_done(batch->cuda, slot, stream);
    pthread_mutex_unlock(&batch->cuda->lock);
    return result;
}

SPDL_API void spdl_cuda_batch_free(void *batch) {
    spdl_cuda_batch *given = (spdl_cuda_batch *)batch;
    spdl__cuda_slot *slot;
    if (given == NULL || spdl__cuda_usable(given->cuda) != SPDL_OK) return;
    pthread_mutex_lock(&given->cuda->lock);
    slot = spdl__slot_of(given);
    if (slot != NULL && !slot->lent) spdl__slot_end(given->cuda, slot);
    pthread_mutex_unlock(&given->cuda->lock);
}

SPDL_API spdl_result spdl_cuda_adopt(spdl_cuda *cuda, void *base, size_t bytes) {
    spdl__cuda_slab *slab;
    spdl_result result = spdl__cuda_usable(cuda);
    if (result != SPDL_OK) return result;
    if (base == NULL || bytes == 0 || (uintptr_t)base % SPDL__PAGE != 0 || bytes > SIZE_MAX / 2)
        return spdl__cuda_invalid(cuda, "adopt: base has to be at a page border, bytes above 0");
    result = spdl__slab_new(cuda, base, bytes, &slab);
    if (result != SPDL_E_NOMEM) return result;
    return spdl__cuda_refuse(cuda, result, "adopt: out of memory");
}

SPDL_API void spdl_cuda_error(spdl_cuda *cuda, spdl_error *error) {
    if (error == NULL) return;
    spdl__error_clear(error);
    if (cuda == NULL) return;
    if (spdl__cuda_forked(cuda)) { /* threads of the parent may hold its locks */
        (void)spdl__error_set(error, SPDL_E_CUDA_FORKED,
                              "cuda: opened before a fork: the child of a process that uses CUDA "
                              "cannot use it; fork before the first spdl_cuda, or exec");
        return;
    }
    pthread_mutex_lock(&cuda->error_lock);
    *error = cuda->error;
    pthread_mutex_unlock(&cuda->error_lock);
}

SPDL_API void spdl_cuda_get_stats(const spdl_cuda *cuda, spdl_cuda_stats *stats) {
    if (stats == NULL) return;
    memset(stats, 0, sizeof(*stats));
    if (cuda == NULL || spdl__cuda_forked(cuda)) return;
    stats->lost = spdl__load32(&cuda->lost) != 0;
    stats->device = cuda->device;
    stats->device_free = (int)spdl_ring_count(cuda->free_slots);
    if (cuda->free_outputs != NULL) stats->output_free = (int)spdl_ring_count(cuda->free_outputs);
    stats->pinned_bytes = (size_t)spdl__load_relaxed(&cuda->pinned_bytes);
    stats->batches = spdl__load_relaxed(&cuda->batches);
    stats->bytes = spdl__load_relaxed(&cuda->bytes);
    stats->pageable_bytes = spdl__load_relaxed(&cuda->pageable_bytes);
    stats->wait_copy_ns = spdl__load_relaxed(&cuda->wait_copy_ns);
    stats->wait_slot_ns = spdl__load_relaxed(&cuda->wait_slot_ns);
}

/* ============================================================================================= */
/* >>outputs-impl
   The holder of an output writes it; free_outputs passes it on. */

SPDL__PRIVATE void spdl__output_return(spdl__cuda_output *output) {
    spdl__store32(&output->state, SPDL__OUTPUT_FREE);
    (void)spdl_ring_try_push(output->out.cuda->free_outputs, &output); /* has room for all */
}

/* Makes the stream wait for the last work on the output (D3). After a failure it is free. */
SPDL__PRIVATE spdl_result spdl__output_begin(spdl__cuda_output *output, spdl_cuda_stream handle) {
    const spdl__cuda_reader stream = spdl__stream_of(handle);
    spdl_cuda *cuda = output->out.cuda;
    spdl__cuda_scope scope;
    spdl_result result = spdl__cuda_enter(cuda, &scope, false);
    if (result == SPDL_OK) {
        result = spdl__stream_check(cuda, stream.stream, false);
        if (result == SPDL_OK && output->behind != NULL)
            result = SPDL__CUDA_TRY(cuda, StreamWaitEvent, (stream.stream, output->behind, 0));
        spdl__cuda_leave(cuda, &scope);
    }
    output->kernels.stream = stream.stream;
    output->kernels.thread = stream.thread;
    output->out.bytes = cuda->desc.output_bytes;
    output->out.user = NULL;
    if (result == SPDL_OK) spdl__store32(&output->state, SPDL__OUTPUT_GOT);
    else spdl__output_return(output);
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
        return spdl__cuda_invalid(cuda, "output_bytes is 0: there are no outputs");
    result = spdl__free_pop(cuda, cuda->free_outputs, &output, "an output",
                            spdl__deadline(timeout_ns));
    if (result == SPDL_OK) result = spdl__output_begin(output, stream);
    if (result == SPDL_OK) *out = &output->out;
    return result;
}

/* After a failure only the kernels run. */
SPDL__PRIVATE spdl_result spdl__output_copy(spdl_cuda *cuda, const spdl__cuda_output *output) {
    const spdl_cuda_output *out = &output->out;
    const uint64_t from = (uint64_t)(uintptr_t)out->dev;
    void *back = cuda->back;
    spdl__cuda_scope scope;
    spdl_result result = spdl__cuda_enter(cuda, &scope, cuda->outputs_at->pinned == 0);
    if (result == SPDL_OK) {
        result = SPDL__CUDA_TRY(cuda, StreamWaitEvent, (back, output->kernels.event, 0));
        if (result == SPDL_OK && out->bytes > 0)
            result = SPDL__CUDA_TRY(cuda, MemcpyDtoHAsync, (out->host, from, out->bytes, back));
        if (result == SPDL_OK) result = SPDL__CUDA_TRY(cuda, EventRecord, (output->copied, back));
        spdl__cuda_leave(cuda, &scope);
        if (result != SPDL_OK) spdl__copies_settle(cuda, back);
    }
    return result != SPDL_OK && spdl__load32(&cuda->lost) ? SPDL_E_CUDA_LOST : result;
}

SPDL_API spdl_result spdl_cuda_output_send(spdl_cuda_output *out) {
    spdl__cuda_output *output = (spdl__cuda_output *)(void *)out;
    spdl_result result = out == NULL ? SPDL_E_INVALID : spdl__cuda_usable(out->cuda);
    if (result != SPDL_OK) return result;
    if (spdl__load32(&output->state) != SPDL__OUTPUT_GOT ||
        out->bytes > out->cuda->desc.output_bytes)
        return spdl__cuda_invalid(out->cuda,
                                  "output_send: it was sent or freed, or bytes is too large");
    result = spdl__work_record(out->cuda, &output->kernels);
    if (result == SPDL_OK) result = spdl__output_copy(out->cuda, output);
    if (result != SPDL_OK) return result;
    output->behind = output->copied;
    spdl__store32(&output->state, SPDL__OUTPUT_SENT);
    return SPDL_OK;
}

SPDL_API spdl_result spdl_cuda_output_wait(spdl_cuda_output *out, int64_t timeout_ns) {
    spdl__cuda_output *output = (spdl__cuda_output *)(void *)out;
    spdl_result result = out == NULL ? SPDL_E_INVALID : spdl__cuda_usable(out->cuda);
    uint32_t state;
    if (result != SPDL_OK) return result;
    state = spdl__load32(&output->state);
    if (state == SPDL__OUTPUT_THERE) return SPDL_OK;
    if (state != SPDL__OUTPUT_SENT)
        return spdl__cuda_invalid(out->cuda, "output_wait: it was not sent");
    result = spdl__event_wait(out->cuda, output->copied, spdl__deadline(timeout_ns), true);
    if (result != SPDL_OK) return result;
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
    if (state == SPDL__OUTPUT_GOT) { /* kernels may run */
        const bool known = spdl__work_record(output->out.cuda, &output->kernels) == SPDL_OK;
        if (!known) spdl__stream_settle(output->out.cuda, &output->kernels);
        output->behind = known ? output->kernels.event : NULL;
    }
    spdl__output_return(output);
}

/* ============================================================================================= */
/* >>open-impl
   Open acquires everything in steps. After a failed step, and in close, cuda_release frees what is
   there. The log reports what cannot be freed. */

SPDL__PRIVATE spdl_result spdl__cuda_prepare(spdl_cuda *cuda) {
    static const char *const name[] = { "slot_bytes", "output_bytes", "device_slots",
                                        "output_slots", "device" };
    const int64_t count = SPDL_CUDA_MAX_SLOTS, bytes = (int64_t)SPDL__MAX_SLOT_BYTES;
    const int64_t most[] = { bytes, bytes, count, count, INT32_MAX };
    spdl_cuda_desc *desc = &cuda->desc;
    const int64_t value[] = { (int64_t)desc->slot_bytes, (int64_t)desc->output_bytes,
                              desc->device_slots, desc->output_slots, desc->device };
    int i;
    for (i = 0; i < 5; ++i)
        if (value[i] < (i == 0) || value[i] > most[i])
            return spdl__error_set(&cuda->error, SPDL_E_INVALID,
                                   "cuda: %s is %lld, must be %d to %lld", name[i],
                                   (long long)value[i], i == 0, (long long)most[i]);
    if (desc->device_slots == 0) desc->device_slots = 3;
    if (desc->output_slots == 0) desc->output_slots = 4;
    if (desc->output_bytes == 0) desc->output_slots = 0;
    cuda->stride = spdl__round_up(desc->slot_bytes, SPDL_CUDA_ALIGN);
    cuda->output_stride = spdl__round_up(desc->output_bytes, SPDL_CUDA_ALIGN);
    return SPDL_OK;
}

SPDL__PRIVATE int spdl__cuda_ordinal(const spdl_cuda *cuda, const char **why) {
    void *context = NULL;
    int device = 0;
    *why = "of the desc";
    if (cuda->desc.device > 0) return cuda->desc.device - 1;
    *why = "the calling thread has none";
    if (cuda->api.CtxGetCurrent(&context) != 0 || context == NULL ||
        cuda->api.CtxGetDevice(&device) != 0)
        return 0;
    *why = "that of the calling thread";
    return device;
}

SPDL__PRIVATE spdl_result spdl__cuda_choose(spdl_cuda *cuda) {
    const int count = spdl__cuda_count(&cuda->api, &cuda->error);
    char name[64] = "";
    const char *why;
    spdl_result result;
    if (count == 0) return SPDL_E_NOT_FOUND;
    cuda->device = spdl__cuda_ordinal(cuda, &why);
    if (cuda->device >= count)
        return spdl__error_set(&cuda->error, SPDL_E_NOT_FOUND, "cuda: there is no device %d: this "
                               "process sees %d", cuda->device, count);
    result = SPDL__CUDA_TRY(cuda, DeviceGet, (&cuda->handle, cuda->device));
    if (result == SPDL_OK) (void)cuda->api.DeviceGetName(name, sizeof(name), cuda->handle);
    spdl__logf(&cuda->desc.logger, SPDL_LOG_INFO, "cuda: device %d, %s (%s)", cuda->device, name,
               why);
    if (result == SPDL_OK &&
        cuda->api.DeviceGetAttribute(&cuda->numa_node, SPDL__CU_ATTR_NUMA_NODE, cuda->handle) != 0)
        cuda->numa_node = -1;
    return result;
}

SPDL__PRIVATE spdl_result spdl__cuda_ring(const spdl_cuda *cuda, spdl_ring **ring, int capacity) {
    spdl_ring_desc desc;
    if (capacity == 0) return SPDL_OK;
    memset((void *)&desc, 0, sizeof(desc));
    desc.capacity = (uint64_t)capacity;
    desc.allocator = cuda->desc.allocator;
    return spdl_ring_create(ring, &desc);
}

SPDL__PRIVATE spdl_result spdl__cuda_make_host(spdl_cuda *cuda) {
    const int inputs = cuda->desc.device_slots, outputs = cuda->desc.output_slots;
    spdl_result result;
    cuda->events = inputs * (1 + SPDL_CUDA_MAX_READERS) + 2 * outputs;
    cuda->table_bytes = (size_t)inputs * (sizeof(*cuda->slot) + sizeof(*cuda->transfer)) +
                        (size_t)outputs * sizeof(*cuda->output) +
                        (size_t)cuda->events * sizeof(*cuda->event);
    cuda->slot = (spdl__cuda_slot *)spdl__alloc_zeroed(&cuda->desc.allocator, 1, cuda->table_bytes);
    if (cuda->slot == NULL) return SPDL_E_NOMEM;
    cuda->transfer = (spdl__cuda_transfer *)(void *)(cuda->slot + inputs);
    cuda->output = (spdl__cuda_output *)(void *)(cuda->transfer + inputs);
    cuda->event = (void **)(void *)(cuda->output + outputs);
    result = spdl__cuda_ring(cuda, &cuda->free_slots, inputs);
    return result == SPDL_OK ? spdl__cuda_ring(cuda, &cuda->free_outputs, outputs) : result;
}

SPDL__PRIVATE spdl_result spdl__cuda_malloc(spdl_cuda *cuda) {
    const size_t bytes = (size_t)cuda->desc.device_slots * cuda->stride +
                         (size_t)cuda->desc.output_slots * cuda->output_stride;
    const int code = cuda->api.MemAlloc(&cuda->memory, bytes);
    spdl_result result;
    if (code == 0) return SPDL_OK;
    cuda->memory = 0;
    result = spdl__cuda_fail(cuda, "cuMemAlloc", code);
    return code == SPDL__CU_OUT_OF_MEMORY ? SPDL_E_NOMEM : result;
}

/* Waits for copies sleep. Only streams wait for the other events. */
SPDL__PRIVATE spdl_result spdl__cuda_make_events(spdl_cuda *cuda) {
    const unsigned plain = SPDL__CU_DISABLE_TIMING, sleeps = plain | SPDL__CU_BLOCKING_SYNC;
    const int copies = cuda->desc.device_slots + cuda->desc.output_slots;
    spdl_result result = SPDL_OK;
    int i;
    for (i = 0; i < cuda->events && result == SPDL_OK; ++i) {
        result = SPDL__CUDA_TRY(cuda, EventCreate, (&cuda->event[i], i < copies ? sleeps : plain));
        if (result != SPDL_OK) cuda->event[i] = NULL;
    }
    return result;
}

/* In the primary context, which the CUDA runtime uses. */
SPDL__PRIVATE spdl_result spdl__cuda_make_device(spdl_cuda *cuda) {
    spdl__cuda_scope scope;
    void **const stream[3] = { &cuda->stream, &cuda->loose, &cuda->back };
    spdl_result result =
        SPDL__CUDA_TRY(cuda, DevicePrimaryCtxRetain, (&cuda->context, cuda->handle));
    int i;
    if (result != SPDL_OK) {
        cuda->context = NULL;
        return result;
    }
    result = spdl__cuda_enter(cuda, &scope, true);
    if (result != SPDL_OK) return result;
    result = spdl__cuda_malloc(cuda);
    for (i = 0; i < (cuda->desc.output_slots > 0 ? 3 : 2) && result == SPDL_OK; ++i) {
        result = SPDL__CUDA_TRY(cuda, StreamCreate, (stream[i], SPDL__CU_NON_BLOCKING));
        if (result != SPDL_OK) *stream[i] = NULL;
    }
    if (result == SPDL_OK) result = spdl__cuda_make_events(cuda);
    spdl__cuda_leave(cuda, &scope);
    if (result != SPDL_OK || cuda->desc.output_slots == 0) return result;
    result = spdl__slab_new(cuda, NULL, (size_t)cuda->desc.output_slots * cuda->output_stride,
                            &cuda->outputs_at);
    return result == SPDL_OK ? spdl__cuda_usable(cuda) : result;
}

SPDL__PRIVATE void spdl__cuda_fill_rings(spdl_cuda *cuda) {
    const int inputs = cuda->desc.device_slots, outputs = cuda->desc.output_slots;
    uintptr_t device = (uintptr_t)cuda->memory;
    void **copied = cuda->event, **read = cuda->event + inputs + outputs;
    int i, k;
    for (i = 0; i < inputs; ++i) {
        spdl__cuda_slot *slot = &cuda->slot[i];
        slot->batch.data = (void *)(device + (size_t)i * cuda->stride);
        slot->batch.slot = i;
        slot->batch.cuda = cuda;
        slot->batch.slot_ = slot;
        for (k = 0; k < SPDL_CUDA_MAX_READERS; ++k) slot->reader[k].event = *read++;
        cuda->transfer[i].event = *copied++;
        (void)spdl_ring_try_push(cuda->free_slots, &slot);
    }
    device += (size_t)inputs * cuda->stride;
    for (i = 0; i < outputs; ++i) {
        spdl__cuda_output *output = &cuda->output[i];
        output->out.host = cuda->outputs_at->base + (size_t)i * cuda->output_stride;
        output->out.dev = (void *)(device + (size_t)i * cuda->output_stride);
        output->out.slot = i;
        output->out.cuda = cuda;
        output->kernels.event = *read++;
        output->copied = *copied++;
        (void)spdl_ring_try_push(cuda->free_outputs, &output);
    }
}

/* Frees what CUDA gave, unless the driver is unloading or fails: the process then ends. */
SPDL__PRIVATE void spdl__cuda_release_device(spdl_cuda *cuda) {
    const bool there = cuda->context != NULL && spdl__load32(&cuda->unloading) == 0;
    void *const stream[3] = { cuda->stream, cuda->loose, cuda->back };
    spdl__cuda_scope scope;
    const bool entered = there && spdl__cuda_enter(cuda, &scope, true) == SPDL_OK;
    int i;
    if (entered) {
        for (i = 0; i < cuda->events; ++i)
            if (cuda->event[i] != NULL)
                (void)SPDL__CUDA_TRY(cuda, EventDestroy, (cuda->event[i]));
        for (i = 0; i < 3; ++i)
            if (stream[i] != NULL) (void)SPDL__CUDA_TRY(cuda, StreamDestroy, (stream[i]));
        if (cuda->memory != 0) (void)SPDL__CUDA_TRY(cuda, MemFree, (cuda->memory));
    }
    if (entered) spdl__cuda_leave(cuda, &scope);
    while (cuda->slabs > 0) spdl__slab_end(cuda, cuda->slab[--cuda->slabs]);
    spdl__free(&cuda->desc.allocator, cuda->slab, (size_t)cuda->slab_room * sizeof(*cuda->slab));
    if (there) (void)SPDL__CUDA_TRY(cuda, DevicePrimaryCtxRelease, (cuda->handle));
    if (cuda->error.result == SPDL_E_CUDA) /* something remains, or failed before */
        spdl__logf(&cuda->desc.logger, SPDL_LOG_INFO, "%.*s", (int)sizeof(cuda->error.text) - 1,
                   cuda->error.text);
}

SPDL__PRIVATE void spdl__cuda_release(spdl_cuda *cuda) {
    const spdl_allocator allocator = cuda->desc.allocator;
    spdl__cuda_release_device(cuda);
    if (cuda->ours != NULL) (void)munmap(cuda->ours, SPDL__PAGE);
    pthread_mutex_destroy(&cuda->error_lock);
    pthread_mutex_destroy(&cuda->lock);
    if (cuda->nap_made) spdl__os_event_fini(&cuda->nap);
    spdl_ring_destroy(cuda->free_slots, NULL, NULL);
    spdl_ring_destroy(cuda->free_outputs, NULL, NULL);
    spdl__free(&allocator, cuda->slot, cuda->table_bytes);
    spdl__free(&allocator, cuda, sizeof(*cuda));
}

/* Returns NULL before Linux 4.14. */
SPDL__PRIVATE uint32_t *spdl__cuda_mark(void) {
    const long wipe_on_fork = 18;
    uint32_t *mark = (uint32_t *)(void *)spdl__map(SPDL__PAGE);
    if (mark == NULL) return NULL;
    *mark = 1;
    if (syscall(SYS_madvise, mark, SPDL__PAGE, wipe_on_fork) == 0) return mark;
    (void)munmap(mark, SPDL__PAGE);
    return NULL;
}

SPDL_API spdl_result spdl_cuda_open(spdl_cuda **cuda, const spdl_cuda_desc *desc) {
    static const pthread_mutex_t unlocked = PTHREAD_MUTEX_INITIALIZER;
    spdl_cuda *made;
    spdl_result result;
    if (cuda == NULL) return SPDL_E_INVALID;
    *cuda = NULL;
    if (desc == NULL) return SPDL_E_INVALID;
    spdl__error_clear(desc->error);
    result = spdl__allocator_check(&desc->allocator, "cuda", desc->error);
    if (result != SPDL_OK) return result; /* nothing could be given back */
    made = SPDL__NEW(&desc->allocator, spdl_cuda, 1);
    if (made == NULL)
        return spdl__error_set(desc->error, SPDL_E_NOMEM, "cuda: out of memory");
    made->desc = *desc;
    made->process = (long)getpid();
    made->ours = spdl__cuda_mark();
    made->desc.error = NULL; /* for this call only */
    spdl__error_clear(&made->error);
    made->lock = made->error_lock = unlocked;
    made->nap_made = spdl__os_event_init(&made->nap);
    result = made->nap_made ? spdl__cuda_prepare(made) : SPDL_E_NOMEM;
    if (result == SPDL_OK) result = spdl__cuda_choose(made);
    if (result == SPDL_OK) result = spdl__cuda_make_host(made);
    if (result == SPDL_OK) result = spdl__cuda_make_device(made);
    if (result != SPDL_OK) {
        if (made->error.result == SPDL_OK)
            (void)spdl__error_set(&made->error, result, "cuda: out of host memory");
        made->error.result = result;
        if (desc->error != NULL) *desc->error = made->error;
        spdl__cuda_release(made);
        return result;
    }
    spdl__cuda_fill_rings(made);
    *cuda = made;
    return SPDL_OK;
}

SPDL_API void spdl_cuda_close(spdl_cuda *cuda) {
    spdl_result result;
    int i;
    if (cuda == NULL || spdl__cuda_forked(cuda)) return;
    spdl__copies_settle(cuda, cuda->stream);
    spdl__copies_settle(cuda, cuda->back);
    result = spdl__cuda_usable(cuda);
    for (i = 0; i < cuda->events && result == SPDL_OK; ++i) /* readers, too */
        result = spdl__event_wait(cuda, cuda->event[i], SPDL__NEVER, false);
    spdl__cuda_reap_until(cuda, cuda->sent); /* idle or lost */
    spdl__cuda_release(cuda);
}

/* ============================================================================================= */
/* >>iterator-impl
   On the consumer's thread. Items of the source go to device slots and into `queue`; the oldest is
   made ready when the last is done. NULL in the queue is an end of the source.
   The consumer reaps before it takes an item, if all copies run, and before it waits for a source,
   which may wait for its items. It never waits for a device slot: the queue or the caller has them
   all. */

struct spdl_cuda_iter {
    size_t bytes;
    spdl_cuda_iter_desc desc;
    spdl_cuda *cuda;
    spdl__cuda_slot **queue; /* depth + 2; after the struct, with `slot` */
    spdl__cuda_slot **slot; /* device_slots: the held ones */
    int first, count;
    spdl_result end;         /* an error is final */
    void *first_item;        /* taken by open, sent first */
    bool owns;               /* cuda */
    bool asked_in_vain;      /* by the last call */
    spdl__cuda_slot *current, *offered;
    spdl_cuda_stream stream; /* of `current` */
    int hold, held, position; /* wanted; held; the next one */
};

/* Waits for copies before it waits for the source, which may wait for their items. SPDL_E_LIMIT of
   a loader: the consumer has all of its slots. */
SPDL__PRIVATE spdl_result spdl__iter_take(spdl_cuda_iter *iter, void **item, uint64_t deadline) {
    const spdl_cuda_iter_desc *desc = &iter->desc;
    const uint64_t slice_ns = 200000;
    spdl_cuda *cuda = iter->cuda;
    spdl_result result, waited;
    *item = iter->first_item;
    iter->first_item = NULL;
    if (*item != NULL) return SPDL_OK;
    result = desc->next(desc->source, item, 0);
    while (result == SPDL_TIMEOUT || result == SPDL_E_LIMIT) {
        const bool flying = spdl__cuda_in_flight(cuda) > 0;
        const uint64_t slice = spdl_time_ns() + slice_ns;
        const int64_t left = spdl__time_left(deadline);
        if (!flying && (result == SPDL_E_LIMIT || left == 0)) return result;
        if (!flying) {
            result = desc->next(desc->source, item, left);
            continue;
        }
        waited = spdl__cuda_await_copy(cuda, left < 0 ? deadline : spdl__min(slice, deadline),
                                       left < 0);
        if (waited == SPDL_TIMEOUT && left == 0) return SPDL_TIMEOUT;
        if (waited != SPDL_OK && waited != SPDL_TIMEOUT) return waited;
        result = desc->next(desc->source, item, 0);
    }
    return result;
}

/* Returns NULL if the item is of another kind. */
SPDL__PRIVATE spdl__block *spdl__iter_block(const spdl_cuda_iter_desc *desc, void *item) {
    if (item == NULL || desc->view != NULL) return NULL;
    return desc->buffers ? (spdl__block *)item - 1 : &((spdl__batch *)item)->block;
}

/* Pins the block of a batch, which has pages of its own, until the spdl_cuda is closed. Its
   pool then keeps all blocks until the pipeline ends, so none is unmapped while it is pinned. */
SPDL__PRIVATE void spdl__iter_pin(spdl_cuda *cuda, spdl__block *block) {
    spdl__batch_pool *pool = block->pool;
    void *memory = (char *)block - pool->front;
    const size_t bytes = spdl__batch_bytes(pool);
    spdl__cuda_slab *slab;
    if (pool->allocator.alloc_fn != NULL || bytes < SPDL__OWN_PAGES) return;
    pthread_mutex_lock(&cuda->lock);
    slab = spdl__slab_find(cuda, memory, bytes);
    pthread_mutex_unlock(&cuda->lock);
    if (slab != NULL) return;
    spdl__store(&pool->keep, UINT64_MAX);
    (void)spdl__slab_new(cuda, memory, spdl__round_up(bytes, SPDL__PAGE), &slab);
}

SPDL__PRIVATE spdl_result spdl__iter_view(spdl_cuda_iter *iter, void *item, spdl_cuda_view *view) {
    spdl__block *block = spdl__iter_block(&iter->desc, item);
    spdl_result result = SPDL_OK;
    memset(view, 0, sizeof(*view));
    view->item = item;
    view->release = item != NULL ? iter->desc.free_item : NULL;
    if (iter->desc.view != NULL) {
        result = iter->desc.view(item, view);
    } else if (block == NULL || block->pool->block_bytes == 0) {
        result = spdl__cuda_invalid(iter->cuda, "iterator: an item is not a batch in place");
    } else {
        if (iter->owns) spdl__iter_pin(iter->cuda, block);
        view->data = iter->desc.buffers ? item : ((spdl_batch *)item)->data;
        view->bytes = iter->desc.buffers ? block->pool->block_bytes : ((spdl_batch *)item)->bytes;
    }
    if (result == SPDL_OK) result = spdl__view_check(iter->cuda, view, SPDL_E_INVALID);
    if (result == SPDL_OK) return SPDL_OK;
    if (view->release != NULL) view->release(view->item);
    iter->end = result < 0 ? result : SPDL_E_INVALID; /* also of `view`: the item is gone */
    return iter->end;
}

/* With deadline 0 (there are batches) it asks every second time at most. */
SPDL__PRIVATE spdl_result spdl__iter_number(spdl_cuda_iter *iter, uint64_t deadline) {
    const bool again = iter->asked_in_vain && deadline == 0;
    spdl_result result = SPDL_OK;
    iter->asked_in_vain = false;
    if (!spdl__cuda_is_full(iter->cuda)) return SPDL_OK;
    result = again ? SPDL_TIMEOUT : spdl__cuda_await_copy(iter->cuda, deadline, true);
    iter->asked_in_vain = result == SPDL_TIMEOUT && !again;
    return result;
}

/* Sends one more batch. SPDL_FULL: no device slot. */
SPDL__PRIVATE spdl_result spdl__iter_fetch(spdl_cuda_iter *iter, uint64_t deadline,
                                           spdl__cuda_slot **slot) {
    spdl_cuda *cuda = iter->cuda;
    spdl_cuda_view view;
    void *item = NULL;
    spdl_result result = spdl_ring_try_pop(cuda->free_slots, slot);
    if (result != SPDL_OK) return result == SPDL_CLOSED ? SPDL_E_CUDA_LOST : SPDL_FULL;
    result = spdl__iter_number(iter, deadline);
    if (result == SPDL_OK) result = spdl__iter_take(iter, &item, deadline);
    if (result == SPDL_OK) result = spdl__iter_view(iter, item, &view);
    if (result == SPDL_OK) {
        result = spdl__cuda_submit(cuda, *slot, &view, SPDL__NEVER);
        if (result != SPDL_OK && view.release != NULL) view.release(view.item);
    }
    if (result != SPDL_OK) (void)spdl_ring_try_push(cuda->free_slots, slot);
    return result;
}

/* An end (NULL) follows no other end at once. */
SPDL__PRIVATE void spdl__iter_put(spdl_cuda_iter *iter, spdl__cuda_slot *slot) {
    const int places = iter->desc.depth + 2, next = (iter->first + iter->count) % places;
    if (slot == NULL && iter->count > 0 && iter->queue[(next + places - 1) % places] == NULL)
        return;
    iter->queue[next] = slot;
    ++iter->count;
}

/* Fills the queue; waits only if it is empty. Returns the last result of a fetch. */
SPDL__PRIVATE spdl_result spdl__iter_top_up(spdl_cuda_iter *iter, uint64_t deadline) {
    spdl_result result = SPDL_OK;
    while (iter->end == SPDL_OK && result == SPDL_OK && iter->count <= iter->desc.depth) {
        spdl__cuda_slot *slot = NULL;
        result = spdl__iter_fetch(iter, iter->count == 0 ? deadline : 0, &slot);
        if (result == SPDL_OK || result == SPDL_END)
            spdl__iter_put(iter, result == SPDL_OK ? slot : NULL);
        if (result != SPDL_OK && result != SPDL_END && result != SPDL_TIMEOUT &&
            result != SPDL_FULL && result != SPDL_E_LIMIT)
            iter->end = result;
    }
    return result;
}

SPDL__PRIVATE spdl_result spdl__iter_obtain(spdl_cuda_iter *iter, uint64_t deadline,
                                            spdl__cuda_slot **slot) {
    spdl_result result;
    if (iter->hold > 0 && iter->held == iter->hold) {
        *slot = iter->slot[iter->position];
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
    (*slot)->repeats = iter->hold > 0;
    if (iter->hold > 0) iter->slot[iter->held++] = *slot;
    return SPDL_OK;
}

/* Is done with the last batch. `checked`: work may be put on its stream. */
SPDL__PRIVATE spdl_result spdl__iter_finish(spdl_cuda_iter *iter, bool *checked) {
    spdl_result result;
    *checked = false;
    if (iter->current == NULL) return SPDL_OK;
    result = spdl__slot_finish(iter->cuda, iter->current, false);
    if (result != SPDL_OK) return result;
    if (!iter->current->repeats) spdl__slot_retire(iter->cuda, iter->current);
    *checked = true;
    iter->current = NULL;
    return SPDL_OK;
}

SPDL_API spdl_result spdl_cuda_iter_next(spdl_cuda_iter *iter, spdl_cuda_stream stream,
                                    spdl_cuda_batch *batch, int64_t timeout_ns) {
    spdl_result result;
    bool checked;
    if (batch == NULL) return SPDL_E_INVALID;
    memset(batch, 0, sizeof(*batch));
    if (iter == NULL) return SPDL_E_INVALID;
    batch->cuda = iter->cuda;
    result = spdl__cuda_usable(iter->cuda);
    if (result == SPDL_OK) result = spdl__iter_finish(iter, &checked);
    if (result == SPDL_OK && iter->offered == NULL) {
        result = spdl__iter_obtain(iter, spdl__deadline(timeout_ns), &iter->offered);
        if (result != SPDL_OK) iter->offered = NULL;
    }
    if (result != SPDL_OK) return result;
    result = spdl__slot_ready(iter->cuda, iter->offered, stream,
                              checked && iter->stream == stream);
    if (result != SPDL_OK) return result; /* offered again */
    iter->current = iter->offered;
    iter->offered = NULL;
    iter->stream = stream;
    iter->current->lent = true;
    *batch = iter->current->batch;
    return SPDL_OK;
}

/* Ends holding. The consumer's batch is free when it is done with. */
SPDL__PRIVATE void spdl__iter_let_go(spdl_cuda_iter *iter) {
    int i;
    for (i = 0; i < iter->held; ++i) {
        iter->slot[i]->repeats = false;
        if (iter->slot[i] != iter->current && iter->slot[i] != iter->offered)
            spdl__slot_retire(iter->cuda, iter->slot[i]);
    }
    iter->hold = iter->held = iter->position = 0;
}

SPDL_API spdl_result spdl_cuda_iter_hold(spdl_cuda_iter *iter, int n) {
    spdl_result result;
    if (iter == NULL) return SPDL_E_INVALID;
    result = spdl__cuda_usable(iter->cuda);
    if (result != SPDL_OK) return result;
    if (n < 0 || n > iter->cuda->desc.device_slots)
        return spdl__cuda_invalid(iter->cuda, "iter_hold: n must be 0 to device_slots");
    spdl__iter_let_go(iter);
    iter->hold = n;
    return SPDL_OK;
}

/* Without view. */
SPDL__PRIVATE spdl_free_fn spdl__iter_free(const spdl_cuda_iter_desc *desc) {
    if (desc->next == spdl_loader_next_fn) return spdl_loader_batch_free;
    return desc->buffers ? spdl_buffer_free : spdl_batch_free;
}

SPDL__PRIVATE spdl_result spdl__iter_view_loader(void *item, spdl_cuda_view *view) {
    const spdl_loader_batch *batch = (const spdl_loader_batch *)item;
    view->data = batch->data;
    view->bytes = batch->bytes;
    return SPDL_OK;
}

SPDL__PRIVATE spdl_result spdl__iter_check(const spdl_cuda *cuda, const spdl_cuda_iter_desc *desc) {
    const char *why = NULL;
    const spdl_result result = spdl__cuda_usable(cuda);
    if (result != SPDL_OK)
        return spdl__error_set(desc->error, result, "cuda: iterator: %s",
                               spdl_result_text(result));
    if (desc->next == NULL) why = "next is NULL";
    if (desc->depth < 0 || desc->depth > cuda->desc.device_slots - 1)
        why = "depth must be 0 to device_slots - 1";
    if (why == NULL) return SPDL_OK;
    return spdl__error_set(desc->error, SPDL_E_INVALID, "cuda: iterator: %s", why);
}

SPDL_API spdl_result spdl_cuda_iter_create(spdl_cuda_iter **iter, spdl_cuda *cuda,
                                         const spdl_cuda_iter_desc *desc) {
    spdl_cuda_iter *made;
    uint32_t none = 0;
    spdl_result result;
    size_t bytes;
    int depth;
    if (iter == NULL) return SPDL_E_INVALID;
    *iter = NULL;
    if (desc == NULL) return SPDL_E_INVALID;
    spdl__error_clear(desc->error);
    result = spdl__iter_check(cuda, desc);
    if (result != SPDL_OK) return result;
    if (!spdl__cas32(&cuda->iterating, &none, 1))
        return spdl__error_set(desc->error, SPDL_E_INVALID,
                               "cuda: iterator: there is one on this spdl_cuda already");
    depth = desc->depth > 0 ? desc->depth : cuda->desc.device_slots - 1;
    bytes = sizeof(*made) + (size_t)(depth + 2 + cuda->desc.device_slots) * sizeof(void *);
    made = (spdl_cuda_iter *)spdl__alloc_zeroed(&cuda->desc.allocator, 1, bytes);
    if (made == NULL) {
        spdl__store32(&cuda->iterating, 0);
        return spdl__error_set(desc->error, SPDL_E_NOMEM, "cuda: iterator: out of memory");
    }
    made->cuda = cuda;
    made->bytes = bytes;
    made->desc = *desc;
    made->desc.error = NULL; /* for this call only */
    made->desc.depth = depth;
    if (desc->view == NULL) made->desc.free_item = spdl__iter_free(desc);
    if (made->desc.free_item == spdl_loader_batch_free) made->desc.view = spdl__iter_view_loader;
    made->queue = (spdl__cuda_slot **)(void *)(made + 1);
    made->slot = made->queue + depth + 2;
    *iter = made;
    return SPDL_OK;
}

/* Takes the first item, for the size of slots: that of a full batch. It may be a short one. */
SPDL__PRIVATE spdl_result spdl__iter_first(const spdl_cuda_iter_desc *desc, void **item,
                                           size_t *bytes) {
    const spdl_result result = desc->next(desc->source, item, SPDL_FOREVER);
    const char *why = NULL;
    if (result != SPDL_OK) why = spdl_result_text(result);
    else if (*item == NULL) why = "NULL";
    else if (desc->next == spdl_loader_next_fn)
        spdl_loader_arena((const spdl_loader *)desc->source, NULL, NULL, bytes);
    else *bytes = spdl__iter_block(desc, *item)->pool->block_bytes;
    if (why == NULL && *bytes == 0) why = "it is not a batch in place";
    if (why == NULL) return SPDL_OK;
    return spdl__error_set(desc->error, result != SPDL_OK ? result : SPDL_E_INVALID,
                           "cuda: iterator: the first item: %s", why);
}

SPDL_API spdl_result spdl_cuda_iter_open(spdl_cuda_iter **iter, const spdl_cuda_iter_desc *desc) {
    spdl_cuda_desc known;
    spdl_cuda *cuda = NULL;
    spdl_result result;
    void *item = NULL, *arena;
    size_t bytes;
    if (iter == NULL) return SPDL_E_INVALID;
    *iter = NULL;
    if (desc == NULL) return SPDL_E_INVALID;
    spdl__error_clear(desc->error);
    if (desc->next == NULL || desc->view != NULL)
        return spdl__error_set(desc->error, SPDL_E_INVALID, "cuda: iterator: next is NULL, or view "
                                                            "is set, which iter_create takes");
    memset((void *)&known, 0, sizeof(known));
    known.device = desc->device;
    known.logger = desc->logger;
    known.error = desc->error;
    result = spdl__iter_first(desc, &item, &known.slot_bytes);
    if (result == SPDL_OK) result = spdl_cuda_open(&cuda, &known);
    if (result == SPDL_OK && desc->next == spdl_loader_next_fn) {
        spdl_loader_arena((const spdl_loader *)desc->source, &arena, &bytes, NULL);
        result = spdl_cuda_adopt(cuda, arena, bytes);
        if (result != SPDL_OK) spdl_cuda_error(cuda, desc->error);
    }
    if (result == SPDL_OK) result = spdl_cuda_iter_create(iter, cuda, desc);
    if (result == SPDL_OK) {
        (*iter)->owns = true;
        (*iter)->first_item = item;
        return SPDL_OK;
    }
    spdl_cuda_close(cuda);
    spdl__iter_free(desc)(item);
    return result;
}

SPDL_API void spdl_cuda_iter_destroy(spdl_cuda_iter *iter) {
    spdl_cuda *cuda;
    bool owns;
    if (iter == NULL || spdl__cuda_forked(iter->cuda)) return;
    cuda = iter->cuda;
    owns = iter->owns;
    if (iter->first_item != NULL) iter->desc.free_item(iter->first_item);
    spdl__iter_let_go(iter);
    if (iter->current != NULL) spdl__slot_end(cuda, iter->current);
    if (iter->offered != NULL) spdl__slot_end(cuda, iter->offered);
    for (; iter->count > 0; --iter->count, ++iter->first) {
        spdl__cuda_slot *slot = iter->queue[iter->first % (iter->desc.depth + 2)];
        if (slot != NULL) spdl__slot_end(cuda, slot);
    }
    spdl__copies_settle(cuda, cuda->stream);
    spdl__cuda_reap_until(cuda, spdl__load(&cuda->sent)); /* done or lost */
    spdl__store32(&cuda->iterating, 0);
    spdl__free(&cuda->desc.allocator, iter, iter->bytes);
    if (owns) spdl_cuda_close(cuda);
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
