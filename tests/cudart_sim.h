/* cudart_sim.h - a stand-in for the CUDA runtime and the driver, and the strings to pull on it.

   libcudart_sim.so is linked instead of libcudart, and opened instead of libcuda.so.1. It keeps the
   order that CUDA promises and not a bit more: streams are threads; what a host thread did before
   it enqueued something is seen by the stream, what a stream did before a completed event is seen
   by whoever waited for that event, and nothing else is ordered. Host threads and stream threads
   share no lock, so that ThreadSanitizer sees a missing edge as the race it is.

   It shows whether a program is right, not how fast it is: no driver, no locks of a driver, no
   cost of pinning. Times come from a model (sim_model), kept on a clock of the simulated device.

   The sim_ calls are for one thread at a time; the counters may be read by any. */
#ifndef CUDART_SIM_INCLUDED
#define CUDART_SIM_INCLUDED

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Every entry point that counts, by its name without `cuda`. First those that only look at state
   on the host. */
/* clang-format off */
#define SIM_THREAD_CALLS(X)                                                                        \
    X(GetDevice) X(SetDevice) X(GetLastError) X(PeekAtLastError)                                   \
    X(CtxPushCurrent) X(CtxPopCurrent) X(CtxGetCurrent) X(CtxGetDevice) X(StreamGetCtx)            \
    X(ExchangeMode)                                                                                \
    X(ThreadExchangeStreamCaptureMode) X(StreamIsCapturing)
#define SIM_WORK_CALLS(X)                                                                          \
    X(DriverGetVersion) X(RuntimeGetVersion) X(GetDeviceCount) X(DeviceGetAttribute)               \
    X(GetDeviceProperties) X(DeviceGetPCIBusId) X(DeviceSynchronize) X(DeviceReset)                \
    X(Init) X(DeviceGet) X(PrimaryCtxRetain) X(PrimaryCtxRelease) X(PointerGetAttribute)           \
    X(MemGetInfo) X(StreamCreate) X(StreamDestroy) X(StreamSynchronize) X(StreamQuery)             \
    X(StreamWaitEvent) X(StreamBeginCapture) X(StreamEndCapture)                                   \
    X(GraphInstantiate) X(GraphLaunch) X(GraphDestroy) X(GraphExecDestroy)                         \
    X(EventCreate) X(EventDestroy) X(EventRecord) X(EventQuery) X(EventSynchronize)                \
    X(EventElapsedTime) X(HostAlloc) X(FreeHost) X(HostRegister) X(HostUnregister)                 \
    X(HostGetDevicePointer) X(Malloc) X(Free) X(Memcpy) X(MemcpyAsync) X(Memset) X(MemsetAsync)    \
    X(LaunchHostFunc)
#define SIM_NAME(name) SIM_##name,
typedef enum sim_call {
    SIM_THREAD_CALLS(SIM_NAME)
    SIM_WORK_CALLS(SIM_NAME)
    SIM_CALLS
} sim_call;
/* clang-format on */

enum { SIM_DEVICES = 8 };

/* Ends all streams, whatever they wait for, and starts afresh: no driver state, no error, one
   device, no delays. The caller must be the only thread left that uses the runtime. */
void sim_reset(void);

/* -1: no driver; 0: a driver without a device; at most SIM_DEVICES. */
void sim_set_devices(int count);
void sim_set_driver(int version); /* 12040 for 12.4; one older than the runtime does not work */
void sim_set_device_memory(size_t bytes); /* of each device; 0 is no limit */
void sim_set_pin_limit(size_t bytes);     /* HostRegister and HostAlloc fail beyond; 0 is none */
void sim_set_pin_error(cudaError_t error); /* what a pin beyond the limit says; 0: out of memory */
void sim_set_numa_node(int node);         /* what cudaDevAttrHostNumaId says, -1 at first */
void sim_set_managed(bool managed);       /* what the driver says of all pinned memory */
void sim_set_ranges(bool known);          /* whether it says where that begins and ends */

/* The n-th call from now (1 is the next) fails once with `error`, having done nothing. 0: none.
   Calls that cannot fail (GetLastError, ...) are not numbered. */
void sim_fail_nth(uint64_t n, cudaError_t error);
bool sim_failed(void); /* that call has been made */
const char *sim_failed_call(void);
/* From now on every call, but those that read the last error, fails with this one for ever. */
void sim_poison(cudaError_t error);
/* The n-th call from now and all that follow. */
void sim_poison_nth(uint64_t n, cudaError_t error);
void sim_unload(void); /* every call: cudaErrorCudartUnloading, as when the process exits */

cudaError_t sim_standing(void); /* the error that every call returns; counts as no call */

#define SIM_ANY_STREAM ((cudaStream_t)(intptr_t)-1)
/* Calls of this kind on this stream are counted, say cudaSuccess and do nothing: an edge is
   missing. EventQuery, EventSynchronize and Init have no stream: SIM_ANY_STREAM. */
void sim_drop(sim_call call, cudaStream_t stream);
void sim_drop_but(sim_call call, cudaStream_t spared); /* on every other stream */
void sim_drop_none(void);

/* Copies wait, each before it begins, until they are let through. */
void sim_hold(void);
void sim_step(unsigned copies);
void sim_release(void);

/* Every second operation or so is late by up to this much. */
void sim_delay(uint64_t max_us, uint64_t seed);
/* A copy takes call_ns and its bytes at this rate, on one engine per device and direction.
   0 bytes per second: no time at all. */
void sim_model(double bytes_per_second, uint64_t call_ns);
/* Streams begin nothing before a call asks for it or for something enqueued later, or waits for
   that: drivers of WSL2 gather work, and submit it then. */
void sim_gather(bool gather);
/* The stream was made in a green context: cuStreamGetCtx returns a context of its own for it. */
void sim_make_green(cudaStream_t stream);
/* Pageable sources are read when the copy runs, as coherent machines do, and not at the call. */
void sim_pageable_late(bool late);

/* A kernel: runs on the thread of the stream, after `takes_ns` of device time. It reaches device
   memory through sim_view. */
typedef void (*sim_kernel)(void *arg);
cudaError_t sim_launch(cudaStream_t stream, sim_kernel kernel, void *arg, uint64_t takes_ns);
cudaError_t sim_launch_failing(cudaStream_t stream, cudaError_t error); /* sticks when it runs */
void *sim_view(const void *device); /* NULL: not device memory */
/* The engine reads this part of host memory at `alias`: the host may then be shut out of it. */
void sim_alias(const void *host, size_t bytes, void *alias);

typedef struct sim_stats {
    uint64_t calls[SIM_CALLS];
    uint64_t work_calls, thread_calls;
    uint64_t copies, bytes_copied; /* by cudaMemcpy and its kin */
    uint64_t pageable_copies;
    uint64_t creations;            /* of streams, events, memory, registrations: ever */
    size_t pinned_bytes, device_bytes;
    uint64_t largest_pin; /* bytes of the largest piece */
    int streams, events, pins, blocks; /* alive; pins: registrations and pinned memory */
    int retained;        /* primary contexts, and not released */
    unsigned contexts;   /* bit i: there is one on device i, made by whatever call */
    uint64_t violations; /* misuse that CUDA leaves undefined: freed in use, used when destroyed */
    int captures;        /* begun and not ended */
    int mode_depth;      /* threads that are not in the capture mode they began with */
    uint64_t first_ns, last_ns; /* device clock: the first operation began, the last one ended */
    uint64_t copy_ns, kernel_ns; /* device time of copies and kernels, summed */
} sim_stats;

void sim_get_stats(sim_stats *stats);
int sim_leaks(void); /* streams, events, pins, blocks, contexts retained; stderr has which */
const char *sim_call_name(sim_call call);
const char *sim_violation(void); /* the first one, as text */

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* CUDART_SIM_INCLUDED */
