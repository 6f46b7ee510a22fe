/* The CUDA runtime and the driver, simulated: see cudart_sim.h.

   Order is the whole point. A host thread hands an operation to a stream through a list of many
   producers (each operation is its own link, so the stream acquires exactly what its producer had
   done by then, and nothing that came later); a stream tells that an operation has ended by a
   release to the operation's own word `done`. Everything else that threads share, the counters,
   tables and switches, is relaxed and orders nothing. Sleeping is done with bare futexes, which
   ThreadSanitizer does not take for synchronisation. Operations are never freed before sim_reset:
   an event may point at one for as long as it likes, without a reference count that would order
   its users. The memory for them is static and zero, so nobody has to initialise it either. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#undef CUDA_API_PER_THREAD_DEFAULT_STREAM /* both names of every function are in here */
#include "cudart_sim.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SIM_STREAMS = 4096, SIM_BLOCKS = 8192, SIM_HEAP = 256 << 20, SIM_PAGE = 4096 };
enum { SIM_CAPTURED_EVENT = 907 };               /* cudaErrorCapturedEvent */
enum { SIM_LEGACY = 0x100, SIM_STACK = 1 << 18 }; /* a flag of a stream beside CUDA's; bytes */

#define LOAD(p) __atomic_load_n((p), __ATOMIC_RELAXED)
#define STORE(p, value) __atomic_store_n((p), (value), __ATOMIC_RELAXED)
#define ADD(p, value) __atomic_fetch_add((p), (value), __ATOMIC_RELAXED)
#define SUB(p, value) __atomic_fetch_sub((p), (value), __ATOMIC_RELAXED)

typedef enum sim_kind {
    SIM_OP_MARK, /* does nothing: an event */
    SIM_OP_WAIT,
    SIM_OP_COPY,
    SIM_OP_SET,
    SIM_OP_KERNEL,
    SIM_OP_FAIL,
    SIM_OP_EXIT
} sim_kind;

enum { SIM_ENGINE_TO, SIM_ENGINE_FROM, SIM_ENGINE_COMPUTE, SIM_ENGINES };

typedef struct sim_block {
    int state; /* 0 free, 1 being written, 2 there */
    bool host, registered, is_alias;
    int device;
    uintptr_t base;
    size_t bytes;
    char *alias;   /* where the engine reads and writes */
    int64_t users; /* operations under way that touch it */
} sim_block;

/* Written by its producer before it is linked; `ends` by the stream before `done`. */
typedef struct sim_op {
    struct sim_op *next; /* atomic, release: of the stream's list */
    uint32_t done;       /* atomic, release, futex */
    sim_kind kind;
    uint64_t asked, takes, ends; /* device clock, ns */
    uint64_t ticket;             /* of all operations, in the order in which they were made */
    struct sim_op *awaited;
    sim_block *blocks[2];
    void *to;
    const void *from;
    void *staged; /* freed after the copy */
    size_t bytes;
    int value, engine;
    sim_kernel kernel;
    void *arg;
    struct sim_op *in_graph; /* the next node of a captured graph */
} sim_op;

struct CUgraph_st {
    sim_op *first, *last;
};

struct CUgraphExec_st {
    sim_op *first;
};

struct CUevent_st {
    int alive, device;
    unsigned flags;
    sim_op *last; /* what it was recorded behind: a snapshot */
    bool captured;
};

struct CUstream_st {
    int alive, device; /* atomic, as are the next two: other threads look through all streams */
    cudaStream_t handle; /* that of the stream destroyed last, or its address */
    unsigned flags;
    pthread_t thread;
    sim_op *tail;          /* atomic: producers */
    uint32_t bell;         /* atomic, futex: something was linked */
    sim_op *last;          /* atomic: linked last */
    sim_op *waited_legacy; /* atomic: the last operation of the legacy stream it waits for */
    sim_op *legacy_waited; /* atomic: the last one of this stream the legacy stream waits for */
    uint64_t now, random;  /* the stream's thread alone */
    int green;                                /* atomic */
    int capture, capture_mode, capture_owner; /* atomic */
    struct CUgraph_st *graph;                 /* of the thread that captures */
    sim_op stub;
};

static struct sim_state {
    int pid, devices; /* devices is the count + 1, so that zero can be the first state */
    int unloaded, sticky, numa, driver, managed, without_ranges;
    int touching; /* streams that are inside of memory just now */
    int ending, hold;
    uint32_t hold_bell;
    int gather;
    uint64_t tickets, submitted; /* operations up to that ticket may begin */
    uint32_t submit_bell;
    int permits;
    uint64_t fail_in;
    int fail_with, failed_call, fail_for_ever;
    cudaStream_t drop[SIM_CALLS];  /* 0: none */
    cudaStream_t spare[SIM_CALLS]; /* of SIM_ANY_STREAM, all but this one */
    uint64_t delay_us, delay_seed;
    double rate;
    uint64_t call_ns;
    int late;
    size_t pin_limit, device_limit;
    int pin_error;
    uint64_t engine[SIM_DEVICES][SIM_ENGINES]; /* free again at, device clock */
    cudaStream_t legacy[SIM_DEVICES];
    cudaStream_t stream[SIM_STREAMS];
    int streams_made, blocks_used, global_captures, captures;
    cudaStream_t destroyed; /* atomic: its handle, or NULL */
    uint64_t generation;
    size_t device_used[SIM_DEVICES];
    int context[SIM_DEVICES], retained[SIM_DEVICES]; /* there is one; so many want it */
    sim_stats stats;
    const char *violation;
    sim_block block[SIM_BLOCKS];
} sim;

static char sim_heap[SIM_HEAP] __attribute__((aligned(64)));
static size_t sim_heap_used;
static uint64_t sim_generation = 1; /* of resets: what a thread remembers of an older one is void */

static __thread struct sim_thread_state {
    uint64_t generation;
    int current; /* 1 + the device whose primary context is current; 0: none is */
    int device;  /* of that, or the one that a call would make one on */
    int saved[16], depth; /* under those that were pushed */
    int last_error, mode, local_captures;
    cudaStream_t own[SIM_DEVICES];
} sim_me;

static const char *const sim_call_names[SIM_CALLS] = {
#define SIM_TEXT(name) "cuda" #name,
    SIM_THREAD_CALLS(SIM_TEXT) SIM_WORK_CALLS(SIM_TEXT)
};

/* ---- small things ---- */

static uint64_t sim_clock(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void sim_sleep_until(uint64_t ns) {
    struct timespec t;
    t.tv_sec = (time_t)(ns / 1000000000u);
    t.tv_nsec = (long)(ns % 1000000000u);
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) {
    }
}

/* The time limit makes a wake that was missed a delay. */
static void sim_wait(uint32_t *word, uint32_t value) {
    const struct timespec limit = { 0, 20000000 };
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, &limit, NULL, 0);
}

static void sim_wake(uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 0x7fffffff, NULL, NULL, 0);
}

static uint64_t sim_random(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static void sim_max(uint64_t *word, uint64_t value) {
    uint64_t old = LOAD(word);
    while (old < value && !__atomic_compare_exchange_n(word, &old, value, true, __ATOMIC_RELAXED,
                                                       __ATOMIC_RELAXED)) {
    }
}

static void sim_min_not_zero(uint64_t *word, uint64_t value) {
    uint64_t old = LOAD(word);
    while ((old == 0 || old > value) &&
           !__atomic_compare_exchange_n(word, &old, value, true, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
    }
}

static void *sim_new(size_t bytes) {
    const size_t size = (bytes + 63) / 64 * 64;
    const size_t at = ADD(&sim_heap_used, size);
    if (at + size > SIM_HEAP) {
        fputs("cudart_sim: too many operations without a sim_reset\n", stderr);
        abort();
    }
    return sim_heap + at;
}

static void sim_misuse(const char *what) {
    if (ADD(&sim.stats.violations, 1) == 0) STORE(&sim.violation, what);
}

/* A thread that ends takes its capture mode with it. */
static pthread_key_t sim_key;

static void sim_thread_ends(void *state) {
    const struct sim_thread_state *me = (const struct sim_thread_state *)state;
    if (me->generation == LOAD(&sim_generation) && me->mode != 0) SUB(&sim.stats.mode_depth, 1);
}

/* What this thread remembers from before a reset is forgotten at its first call after it. */
static void sim_remember(void) {
    if (sim_me.generation == LOAD(&sim_generation)) return;
    memset(&sim_me, 0, sizeof sim_me);
    sim_me.generation = LOAD(&sim_generation);
    pthread_setspecific(sim_key, &sim_me);
}

/* Success does not clear the last error. */
static cudaError_t sim_error(int error) {
    if (error != 0) sim_me.last_error = error;
    return (cudaError_t)error;
}

/* ---- what every call goes through ---- */

/* When the device is lost nothing runs on it any more, and the program may unmap what it likes; the
   driver would hold on to pinned pages, this stand-in cannot. (Both sides change one word and then
   look at the other; relaxed, so that it orders nothing for ThreadSanitizer. But nobody has to wait
   for a driver that unloads: that it has stopped is all the order there is.) */
static void sim_stop_device(int *why, int value) {
    STORE(why, value);
    while (LOAD(&sim.pid) == (int)getpid() && LOAD(&sim.touching) > 0) sched_yield();
    if (why == &sim.unloaded || value == (int)cudaErrorCudartUnloading)
        (void)__atomic_load_n(&sim.touching, __ATOMIC_ACQUIRE); /* pairs with sim_touch */
}

static bool sim_fails_now(sim_call call) {
    if (LOAD(&sim.fail_in) == 0 || SUB(&sim.fail_in, 1) != 1) return false;
    STORE(&sim.failed_call, (int)call + 1);
    if (LOAD(&sim.fail_for_ever)) sim_stop_device(&sim.sticky, LOAD(&sim.fail_with));
    return true;
}

static int sim_broken(void) {
    int none = 0;
    const int pid = (int)getpid();
    if (!__atomic_compare_exchange_n(&sim.pid, &none, pid, false, __ATOMIC_RELAXED,
                                     __ATOMIC_RELAXED) &&
        none != pid)
        return cudaErrorInitializationError;
    if (LOAD(&sim.unloaded)) return cudaErrorCudartUnloading;
    return LOAD(&sim.sticky);
}

static void sim_count(sim_call call) {
    ADD(&sim.stats.calls[call], 1u);
    ADD(call <= SIM_StreamIsCapturing ? &sim.stats.thread_calls : &sim.stats.work_calls, 1u);
}

static int sim_device_count(void) {
    const int told = LOAD(&sim.devices);
    return told == 0 ? 1 : told - 2;
}

static bool sim_no_driver(void) {
    const int driver = LOAD(&sim.driver);
    return sim_device_count() < 0 || (driver > 0 && driver / 1000 < CUDART_VERSION / 1000);
}

/* A call of the runtime makes a context on the device that is current, unless it only asks. */
static bool sim_makes_context(sim_call call) {
    switch (call) {
    case SIM_DriverGetVersion: case SIM_RuntimeGetVersion: case SIM_GetDeviceCount: case SIM_Init:
    case SIM_DeviceGetAttribute: case SIM_GetDeviceProperties: case SIM_DeviceGetPCIBusId:
    case SIM_GetDevice: case SIM_SetDevice: case SIM_GetLastError: case SIM_PeekAtLastError:
    case SIM_DeviceGet: case SIM_PrimaryCtxRetain: case SIM_PrimaryCtxRelease:
    case SIM_CtxPushCurrent: case SIM_CtxPopCurrent: case SIM_CtxGetCurrent:
    case SIM_ExchangeMode:
        return false;
    default: return true;
    }
}

static void sim_make_current(int device) {
    STORE(&sim.context[device], 1);
    sim_me.device = device;
    sim_me.current = device + 1;
}

/* Without a driver, or with one that is too old, only cudaDriverGetVersion works. */
static int sim_enter(sim_call call, bool needs_driver) {
    int error;
    sim_remember();
    sim_count(call);
    error = sim_broken();
    if (error) return error;
    if (needs_driver && sim_no_driver()) return cudaErrorInsufficientDriver;
    if (sim_fails_now(call)) return LOAD(&sim.fail_with);
    if (needs_driver && call != SIM_GetDeviceCount && sim_device_count() == 0)
        return cudaErrorNoDevice;
    if (sim_me.current == 0 && sim_makes_context(call)) sim_make_current(sim_me.device);
    return 0;
}

#define ENTER_IF(call, needs_driver)                                                               \
    do {                                                                                           \
        const int entered_ = sim_enter(SIM_##call, needs_driver);                                  \
        if (entered_) return sim_error(entered_);                                                  \
    } while (0)
#define ENTER(call) ENTER_IF(call, true)

static bool sim_dropped(sim_call call, cudaStream_t stream) {
    const cudaStream_t which = LOAD(&sim.drop[call]), spare = LOAD(&sim.spare[call]);
    if (which == NULL) return false;
    return which == stream || (which == SIM_ANY_STREAM && (spare == NULL || spare != stream));
}

/* ---- capture: a call that may stall the device spoils captures of other threads, too ---- */

static void sim_invalidate(bool all_global) {
    int i;
    for (i = 0; i < LOAD(&sim.streams_made); ++i) {
        cudaStream_t s = LOAD(&sim.stream[i]);
        if (s == NULL || LOAD(&s->capture) != cudaStreamCaptureStatusActive) continue;
        if ((all_global && LOAD(&s->capture_mode) == cudaStreamCaptureModeGlobal) ||
            (LOAD(&s->capture_owner) == (int)gettid() &&
             LOAD(&s->capture_mode) != cudaStreamCaptureModeRelaxed))
            STORE(&s->capture, (int)cudaStreamCaptureStatusInvalidated);
    }
}

static int sim_unsafe(void) {
    bool prohibited = false;
    if (sim_me.mode == cudaStreamCaptureModeGlobal)
        prohibited = LOAD(&sim.global_captures) > 0 || sim_me.local_captures > 0;
    else if (sim_me.mode == cudaStreamCaptureModeThreadLocal)
        prohibited = sim_me.local_captures > 0;
    if (!prohibited) return 0;
    sim_invalidate(true);
    return cudaErrorStreamCaptureUnsupported;
}

#define ENTER_UNSAFE(call)                                                                         \
    do {                                                                                           \
        ENTER(call);                                                                               \
        if (sim_unsafe()) return sim_error(cudaErrorStreamCaptureUnsupported);                     \
    } while (0)

/* What waits, and finds the device lost, comes behind all that ran on it: it has stopped. Other
   calls that fail say nothing about when. */
static int sim_enter_wait(sim_call call) {
    const int error = sim_enter(call, true);
    if (error && LOAD(&sim.sticky))
        while (__atomic_load_n(&sim.touching, __ATOMIC_ACQUIRE) > 0) sched_yield();
    return error;
}

#define ENTER_WAIT(call)                                                                           \
    do {                                                                                           \
        const int entered_ = sim_enter_wait(SIM_##call);                                           \
        if (entered_) return sim_error(entered_);                                                  \
        if (sim_unsafe()) return sim_error(cudaErrorStreamCaptureUnsupported);                     \
    } while (0)

/* ---- streams: the consumer's side ---- */

/* Acquires what its stream had done by then: pairs with the release in sim_run. */
static bool sim_done(sim_op *op) { return __atomic_load_n(&op->done, __ATOMIC_ACQUIRE) != 0; }

static void sim_submit(const sim_op *op) {
    if (!LOAD(&sim.gather)) return;
    sim_max(&sim.submitted, op->ticket);
    ADD(&sim.submit_bell, 1u);
    sim_wake(&sim.submit_bell);
}

static void sim_await_submit(const sim_op *op) {
    for (;;) {
        const uint32_t bell = LOAD(&sim.submit_bell);
        if (!LOAD(&sim.gather) || LOAD(&sim.ending) || LOAD(&sim.submitted) >= op->ticket) return;
        sim_wait(&sim.submit_bell, bell);
    }
}

static void sim_await(sim_op *op) {
    sim_submit(op);
    while (!sim_done(op) && !LOAD(&sim.ending))
        sim_wait(&op->done, 0);
}

static void sim_pass_gate(void) {
    for (;;) {
        const uint32_t bell = LOAD(&sim.hold_bell);
        int permits = LOAD(&sim.permits);
        if (!LOAD(&sim.hold) || LOAD(&sim.ending)) return;
        while (permits > 0)
            if (__atomic_compare_exchange_n(&sim.permits, &permits, permits - 1, true,
                                            __ATOMIC_RELAXED, __ATOMIC_RELAXED))
                return;
        sim_wait(&sim.hold_bell, bell);
    }
}

/* When an operation that takes a while may begin: not before the stream, the host and the engine
   are ready. Reserves the engine. */
static uint64_t sim_begin(cudaStream_t s, const sim_op *op) {
    uint64_t *engine = &sim.engine[s->device][op->engine];
    uint64_t start, busy = LOAD(engine);
    do {
        start = s->now > op->asked ? s->now : op->asked;
        if (op->takes > 0 && busy > start) start = busy;
    } while (op->takes > 0 && !__atomic_compare_exchange_n(engine, &busy, start + op->takes, true,
                                                           __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    sim_min_not_zero(&sim.stats.first_ns, start);
    return start;
}

static void sim_spend(cudaStream_t s, sim_op *op) {
    op->ends = sim_begin(s, op) + op->takes;
    ADD(op->kind == SIM_OP_KERNEL ? &sim.stats.kernel_ns : &sim.stats.copy_ns, op->takes);
    if (op->takes > 0 && !LOAD(&sim.ending)) sim_sleep_until(op->ends);
    sim_max(&sim.stats.last_ns, op->ends);
}

static void sim_be_late(cudaStream_t s) {
    const uint64_t most = LOAD(&sim.delay_us);
    uint64_t r;
    if (most == 0) return;
    r = sim_random(&s->random);
    if (r & 1) sim_sleep_until(sim_clock() + (r >> 1) % (most * 1000));
}

static void sim_touch(sim_op *op) {
    ADD(&sim.touching, 1);
    if (!LOAD(&sim.ending) && !LOAD(&sim.sticky) && !LOAD(&sim.unloaded)) {
        if (op->kind == SIM_OP_COPY) memcpy(op->to, op->from, op->bytes);
        if (op->kind == SIM_OP_SET) memset(op->to, op->value, op->bytes);
        if (op->kind == SIM_OP_KERNEL) op->kernel(op->arg);
    }
    __atomic_fetch_sub(&sim.touching, 1, __ATOMIC_RELEASE); /* pairs with sim_enter_wait */
}

static void sim_work(cudaStream_t s, sim_op *op) {
    if (op->kind == SIM_OP_COPY) sim_pass_gate();
    sim_be_late(s);
    sim_spend(s, op);
    if (op->kind != SIM_OP_FAIL) sim_touch(op);
    else if (!LOAD(&sim.ending)) sim_stop_device(&sim.sticky, op->value);
}

static void sim_run(cudaStream_t s, sim_op *op) {
    op->ends = s->now > op->asked ? s->now : op->asked;
    if (op->kind == SIM_OP_WAIT) {
        sim_await(op->awaited);
        if (!LOAD(&sim.ending) && op->awaited->ends > op->ends) op->ends = op->awaited->ends;
    } else if (op->kind != SIM_OP_MARK && op->kind != SIM_OP_EXIT) {
        sim_work(s, op);
    }
    s->now = op->ends;
    free(op->staged);
    if (op->blocks[0] != NULL) SUB(&op->blocks[0]->users, 1);
    if (op->blocks[1] != NULL) SUB(&op->blocks[1]->users, 1);
    __atomic_store_n(&op->done, 1, __ATOMIC_RELEASE);
    sim_wake(&op->done);
}

static void *sim_thread(void *arg) {
    cudaStream_t s = (cudaStream_t)arg;
    sim_op *op = &s->stub;
    while (op->kind != SIM_OP_EXIT) {
        const uint32_t bell = LOAD(&s->bell);
        sim_op *next = __atomic_load_n(&op->next, __ATOMIC_ACQUIRE);
        if (next == NULL) {
            sim_wait(&s->bell, bell);
            continue;
        }
        op = next;
        sim_await_submit(op);
        sim_run(s, op);
    }
    return NULL;
}

/* ---- streams: the producers' side ---- */

static sim_op *sim_op_new(sim_kind kind) {
    sim_op *op = (sim_op *)sim_new(sizeof *op);
    op->kind = kind;
    op->ticket = ADD(&sim.tickets, 1u) + 1;
    op->asked = sim_clock();
    return op;
}

static void sim_link(cudaStream_t s, sim_op *op) {
    sim_op *before = __atomic_exchange_n(&s->tail, op, __ATOMIC_RELAXED);
    __atomic_store_n(&before->next, op, __ATOMIC_RELEASE);
    __atomic_fetch_add(&s->bell, 1, __ATOMIC_RELEASE);
    sim_wake(&s->bell);
    STORE(&s->last, op);
}

static bool sim_is(cudaStream_t s, unsigned flag) { return (LOAD(&s->flags) & flag) != 0; }

static bool sim_blocking_on(cudaStream_t s, int device) {
    return LOAD(&s->device) == device && !sim_is(s, cudaStreamNonBlocking);
}

static void sim_link_wait(cudaStream_t s, sim_op *awaited) {
    sim_op *op = sim_op_new(SIM_OP_WAIT);
    op->awaited = awaited;
    sim_link(s, op);
}

/* The legacy stream waits for all blocking streams of its device, and they wait for it. */
static void sim_link_legacy(cudaStream_t s) {
    int i;
    cudaStream_t legacy = LOAD(&sim.legacy[s->device]);
    if (s != legacy) {
        sim_op *last = legacy ? LOAD(&legacy->last) : NULL;
        if (last != NULL && LOAD(&s->waited_legacy) != last) sim_link_wait(s, last);
        STORE(&s->waited_legacy, last);
        return;
    }
    for (i = 0; i < LOAD(&sim.streams_made); ++i) {
        cudaStream_t t = LOAD(&sim.stream[i]);
        sim_op *last = NULL;
        if (t != NULL && t != s && sim_blocking_on(t, s->device)) last = LOAD(&t->last);
        if (last == NULL) continue;
        if (LOAD(&t->legacy_waited) != last) sim_link_wait(s, last);
        STORE(&t->legacy_waited, last);
    }
}

static int sim_capture_node(cudaStream_t s, sim_op *op) {
    if (LOAD(&s->capture) != cudaStreamCaptureStatusActive)
        return cudaErrorStreamCaptureInvalidated;
    if (s->graph->last != NULL) s->graph->last->in_graph = op;
    else s->graph->first = op;
    s->graph->last = op;
    return 0;
}

/* Work on the legacy stream would wait for a stream that is being captured. */
static bool sim_legacy_meets_capture(cudaStream_t s) {
    int i;
    bool meets = false;
    if (!sim_is(s, SIM_LEGACY) || LOAD(&sim.captures) == 0) return false;
    for (i = 0; i < LOAD(&sim.streams_made); ++i) {
        cudaStream_t t = LOAD(&sim.stream[i]);
        if (t == NULL || !sim_blocking_on(t, s->device) ||
            LOAD(&t->capture) != cudaStreamCaptureStatusActive)
            continue;
        STORE(&t->capture, (int)cudaStreamCaptureStatusInvalidated);
        meets = true;
    }
    return meets;
}

static int sim_push(cudaStream_t s, sim_op *op) {
    int i;
    if (LOAD(&s->capture) != cudaStreamCaptureStatusNone) return sim_capture_node(s, op);
    if (sim_legacy_meets_capture(s)) return cudaErrorStreamCaptureImplicit;
    for (i = 0; i < 2; ++i)
        if (op->blocks[i] != NULL) ADD(&op->blocks[i]->users, 1);
    if (!sim_is(s, cudaStreamNonBlocking)) sim_link_legacy(s);
    sim_link(s, op);
    return 0;
}

static cudaStream_t sim_stream_new(int device, unsigned flags) {
    cudaStream_t s;
    pthread_attr_t small;
    bool made;
    const int i = ADD(&sim.streams_made, 1);
    if (i >= SIM_STREAMS) {
        SUB(&sim.streams_made, 1);
        return NULL;
    }
    s = (cudaStream_t)sim_new(sizeof *s);
    STORE(&s->device, device);
    STORE(&s->handle, s);
    STORE(&s->flags, flags);
    s->tail = &s->stub;
    s->random = LOAD(&sim.delay_seed) + (uint64_t)i;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, SIM_STACK);
    made = pthread_create(&s->thread, &small, sim_thread, s) == 0;
    pthread_attr_destroy(&small);
    if (!made) return NULL;
    STORE(&s->alive, 1);
    STORE(&sim.stream[i], s);
    return s;
}

static cudaStream_t sim_legacy(int device) {
    cudaStream_t none = NULL, s = LOAD(&sim.legacy[device]);
    if (s != NULL) return s;
    s = sim_stream_new(device, SIM_LEGACY);
    if (s == NULL) return NULL;
    if (__atomic_compare_exchange_n(&sim.legacy[device], &none, s, false, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED))
        return s;
    sim_link(s, sim_op_new(SIM_OP_EXIT)); /* another thread was faster */
    return none;
}

static cudaStream_t sim_per_thread(int device) {
    if (sim_me.own[device] == NULL) sim_me.own[device] = sim_stream_new(device, 0);
    return sim_me.own[device];
}

/* NULL: no such stream. */
static cudaStream_t sim_resolve(cudaStream_t handle) {
    int i;
    if (handle == NULL || handle == cudaStreamLegacy) return sim_legacy(sim_me.device);
    if (handle == cudaStreamPerThread) return sim_per_thread(sim_me.device);
    for (i = 0; i < LOAD(&sim.streams_made); ++i) {
        cudaStream_t s = LOAD(&sim.stream[i]);
        if (s != NULL && LOAD(&s->alive) && LOAD(&s->handle) == handle) return s;
    }
    return NULL;
}

static void sim_await_device(int device) {
    int i;
    for (i = 0; i < LOAD(&sim.streams_made); ++i) {
        cudaStream_t s = LOAD(&sim.stream[i]);
        sim_op *last = s && LOAD(&s->device) == device ? LOAD(&s->last) : NULL;
        if (last != NULL) sim_await(last);
    }
}

/* ---- memory ---- */

static sim_block *sim_find(const void *address, size_t bytes, bool *straddles) {
    const uintptr_t at = (uintptr_t)address;
    int i;
    for (i = 0; i < LOAD(&sim.blocks_used); ++i) {
        sim_block *b = &sim.block[i];
        uintptr_t base, end;
        if (LOAD(&b->state) != 2 || LOAD(&b->is_alias)) continue;
        base = LOAD(&b->base);
        end = base + LOAD(&b->bytes);
        if (at >= base && at + bytes <= end && at < end) return b;
        if (straddles != NULL && at < end && at + bytes > base) *straddles = true;
    }
    return NULL;
}

static sim_block *sim_block_new(uintptr_t base, size_t bytes, char *alias, bool host) {
    int i, none = 0;
    for (i = 0; i < SIM_BLOCKS; ++i, none = 0) {
        sim_block *b = &sim.block[i];
        if (LOAD(&b->state) != 0 ||
            !__atomic_compare_exchange_n(&b->state, &none, 1, false, __ATOMIC_RELAXED,
                                         __ATOMIC_RELAXED))
            continue;
        STORE(&b->base, base);
        STORE(&b->bytes, bytes);
        STORE(&b->alias, alias);
        STORE(&b->host, host);
        STORE(&b->registered, false);
        STORE(&b->is_alias, false);
        STORE(&b->device, sim_me.device);
        while (LOAD(&sim.blocks_used) <= i) ADD(&sim.blocks_used, 1);
        STORE(&b->state, 2);
        return b;
    }
    return NULL;
}

static char *sim_alias_of(const sim_block *b, const void *address) {
    return LOAD(&b->alias) + ((uintptr_t)address - LOAD(&b->base));
}

/* Where the engine reads host memory: where it is, or where sim_alias said. */
static char *sim_engine_address(void *host, size_t bytes) {
    const uintptr_t at = (uintptr_t)host;
    int i;
    for (i = 0; i < LOAD(&sim.blocks_used); ++i) {
        sim_block *b = &sim.block[i];
        if (LOAD(&b->state) == 2 && LOAD(&b->is_alias) && at >= LOAD(&b->base) &&
            at + bytes <= LOAD(&b->base) + LOAD(&b->bytes))
            return sim_alias_of(b, host);
    }
    return (char *)host;
}

static size_t sim_round(size_t bytes) { return (bytes + SIM_PAGE - 1) / SIM_PAGE * SIM_PAGE; }

/* 0, or the error. */
static int sim_pins_too_much(size_t bytes) {
    const size_t limit = LOAD(&sim.pin_limit);
    if (limit == 0 || LOAD(&sim.stats.pinned_bytes) + bytes <= limit) return 0;
    return LOAD(&sim.pin_error) != 0 ? LOAD(&sim.pin_error) : cudaErrorMemoryAllocation;
}

static int sim_pinned(void *memory, size_t bytes, bool registered) {
    sim_block *b =
        sim_block_new((uintptr_t)memory, bytes, sim_engine_address(memory, bytes), true);
    if (b == NULL) return cudaErrorMemoryAllocation;
    STORE(&b->registered, registered);
    ADD(&sim.stats.pinned_bytes, bytes);
    sim_max(&sim.stats.largest_pin, bytes);
    ADD(&sim.stats.pins, 1);
    ADD(&sim.stats.creations, 1u);
    return 0;
}

static void sim_forget(sim_block *b) {
    const size_t bytes = LOAD(&b->bytes);
    void *memory = (void *)LOAD(&b->base);
    if (LOAD(&b->users) > 0) sim_misuse("memory was given back while a copy uses it");
    if (LOAD(&b->host)) {
        SUB(&sim.stats.pinned_bytes, bytes);
        SUB(&sim.stats.pins, 1);
        if (!LOAD(&b->registered)) munmap(memory, sim_round(bytes));
    } else {
        SUB(&sim.stats.device_bytes, bytes);
        SUB(&sim.device_used[LOAD(&b->device)], bytes);
        SUB(&sim.stats.blocks, 1);
        munmap(memory, sim_round(bytes));
        munmap(LOAD(&b->alias), sim_round(bytes));
    }
    STORE(&b->state, 0);
}

/* ---- strings ---- */

static void sim_end_streams(void) {
    int i;
    STORE(&sim.ending, 1);
    sim_release();
    for (i = 0; i < sim.streams_made; ++i)
        if (sim.stream[i] != NULL) sim_link(sim.stream[i], sim_op_new(SIM_OP_EXIT));
    for (i = 0; i < sim.streams_made; ++i)
        if (sim.stream[i] != NULL) pthread_join(sim.stream[i]->thread, NULL);
}

void sim_reset(void) {
    int i;
    if (sim.pid == (int)getpid()) sim_end_streams();
    for (i = 0; i < sim.blocks_used; ++i)
        if (sim.block[i].state == 2 && !sim.block[i].is_alias) sim_forget(&sim.block[i]);
    memset(sim_heap, 0, sim_heap_used < SIM_HEAP ? sim_heap_used : SIM_HEAP);
    sim_heap_used = 0;
    memset(&sim, 0, sizeof sim);
    sim.numa = -1;
    STORE(&sim_generation, sim_generation + 1);
}

__attribute__((constructor)) static void sim_first(void) {
    sim.numa = -1;
    pthread_key_create(&sim_key, sim_thread_ends);
}

cudaError_t sim_standing(void) { return (cudaError_t)sim_broken(); }


void sim_set_devices(int count) { STORE(&sim.devices, count + 2); }
void sim_set_driver(int version) { STORE(&sim.driver, version); }
void sim_set_device_memory(size_t bytes) { STORE(&sim.device_limit, bytes); }
void sim_set_pin_limit(size_t bytes) { STORE(&sim.pin_limit, bytes); }
void sim_set_pin_error(cudaError_t error) { STORE(&sim.pin_error, (int)error); }
void sim_set_numa_node(int node) { STORE(&sim.numa, node); }
void sim_set_managed(bool managed) { STORE(&sim.managed, managed ? 1 : 0); }
void sim_set_ranges(bool known) { STORE(&sim.without_ranges, known ? 0 : 1); }
void sim_poison(cudaError_t error) { sim_stop_device(&sim.sticky, (int)error); }
void sim_unload(void) { sim_stop_device(&sim.unloaded, 1); }
void sim_gather(bool gather) { STORE(&sim.gather, gather ? 1 : 0); }
void sim_make_green(cudaStream_t stream) { STORE(&sim_resolve(stream)->green, 1); }
void sim_pageable_late(bool late) { STORE(&sim.late, late ? 1 : 0); }

void sim_fail_nth(uint64_t n, cudaError_t error) {
    STORE(&sim.failed_call, 0);
    STORE(&sim.fail_with, (int)error);
    STORE(&sim.fail_for_ever, 0);
    STORE(&sim.fail_in, n);
}

void sim_poison_nth(uint64_t n, cudaError_t error) {
    sim_fail_nth(n, error);
    STORE(&sim.fail_for_ever, 1);
}

bool sim_failed(void) { return LOAD(&sim.failed_call) != 0; }

const char *sim_failed_call(void) {
    const int call = LOAD(&sim.failed_call);
    return call == 0 ? "none" : sim_call_names[call - 1];
}

void sim_drop(sim_call call, cudaStream_t stream) {
    STORE(&sim.spare[call], NULL);
    STORE(&sim.drop[call], stream);
}

void sim_drop_but(sim_call call, cudaStream_t spared) {
    STORE(&sim.spare[call], spared);
    STORE(&sim.drop[call], SIM_ANY_STREAM);
}

void sim_drop_none(void) {
    int i;
    for (i = 0; i < SIM_CALLS; ++i) STORE(&sim.drop[i], NULL);
}

static void sim_ring_gate(void) {
    ADD(&sim.hold_bell, 1u);
    sim_wake(&sim.hold_bell);
}

void sim_hold(void) {
    STORE(&sim.permits, 0);
    STORE(&sim.hold, 1);
}

void sim_step(unsigned copies) {
    ADD(&sim.permits, (int)copies);
    sim_ring_gate();
}

void sim_release(void) {
    STORE(&sim.hold, 0);
    sim_ring_gate();
}

void sim_delay(uint64_t max_us, uint64_t seed) {
    STORE(&sim.delay_seed, seed);
    STORE(&sim.delay_us, max_us);
}

void sim_model(double bytes_per_second, uint64_t call_ns) {
    sim.rate = bytes_per_second; /* before the streams are used */
    sim.call_ns = call_ns;
}

void *sim_view(const void *device) {
    sim_block *b = sim_find(device, 1, NULL);
    return b == NULL || LOAD(&b->host) ? NULL : sim_alias_of(b, device);
}

void sim_alias(const void *host, size_t bytes, void *alias) {
    sim_block *b = sim_block_new((uintptr_t)host, bytes, (char *)alias, true);
    if (b != NULL) STORE(&b->is_alias, true);
}

const char *sim_call_name(sim_call call) { return sim_call_names[call]; }
const char *sim_violation(void) {
    const char *text = LOAD(&sim.violation);
    return text ? text : "";
}

void sim_get_stats(sim_stats *stats) {
    typedef uint64_t __attribute__((may_alias)) word;
    const word *from = (const word *)&sim.stats;
    word *to = (word *)stats;
    size_t i;
    for (i = 0; i < sizeof *stats / sizeof *to; ++i) to[i] = LOAD(&from[i]);
    stats->captures = LOAD(&sim.captures);
    for (i = 0; i < SIM_DEVICES; ++i) {
        stats->retained += LOAD(&sim.retained[i]);
        if (LOAD(&sim.context[i])) stats->contexts |= 1u << i;
    }
}

int sim_leaks(void) {
    sim_stats s;
    sim_get_stats(&s);
    if (s.streams + s.events + s.pins + s.blocks + s.retained != 0)
        fprintf(stderr, "leaked: %d streams, %d events, %d pins, %d blocks, %d contexts retained\n",
                s.streams, s.events, s.pins, s.blocks, s.retained);
    return s.streams + s.events + s.pins + s.blocks + s.retained;
}

cudaError_t sim_launch(cudaStream_t stream, sim_kernel kernel, void *arg, uint64_t takes_ns) {
    sim_op *op;
    cudaStream_t s;
    sim_remember();
    if (sim_broken()) return sim_error(sim_broken());
    s = sim_resolve(stream);
    if (s == NULL) return sim_error(cudaErrorInvalidResourceHandle);
    op = sim_op_new(SIM_OP_KERNEL);
    op->kernel = kernel;
    op->arg = arg;
    op->takes = takes_ns;
    op->engine = SIM_ENGINE_COMPUTE;
    return sim_error(sim_push(s, op));
}

cudaError_t sim_launch_failing(cudaStream_t stream, cudaError_t error) {
    sim_op *op = sim_op_new(SIM_OP_FAIL);
    cudaStream_t s;
    sim_remember();
    s = sim_resolve(stream);
    if (s == NULL) return sim_error(cudaErrorInvalidResourceHandle);
    op->value = (int)error;
    op->engine = SIM_ENGINE_COMPUTE;
    return sim_error(sim_push(s, op));
}

/* ---- the runtime: device and errors ---- */

cudaError_t cudaDriverGetVersion(int *version) {
    ENTER_IF(DriverGetVersion, false);
    *version = sim_device_count() < 0 ? 0 : LOAD(&sim.driver) ? LOAD(&sim.driver) : CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    ENTER_IF(RuntimeGetVersion, false);
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count) {
    ENTER(GetDeviceCount); /* *count stays as it was */
    *count = sim_device_count();
    return *count > 0 ? cudaSuccess : sim_error(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *device) {
    ENTER(GetDevice);
    *device = sim_me.device;
    return cudaSuccess;
}

static bool sim_no_such_device(int device) { return device < 0 || device >= sim_device_count(); }

cudaError_t cudaSetDevice(int device) {
    ENTER(SetDevice);
    if (sim_no_such_device(device)) return sim_error(cudaErrorInvalidDevice);
    sim_make_current(device); /* since CUDA 12 */
    return cudaSuccess;
}

static size_t sim_device_bytes(void) {
    const size_t limit = LOAD(&sim.device_limit);
    return limit > 0 ? limit : (size_t)64 << 30;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    ENTER(DeviceGetAttribute);
    if (sim_no_such_device(device)) return sim_error(cudaErrorInvalidDevice);
    *value = 0;
    if (attribute == cudaDevAttrComputeCapabilityMajor) *value = 9;
    if (attribute == cudaDevAttrPageableMemoryAccess) *value = LOAD(&sim.late);
    if (attribute == cudaDevAttrHostNumaId) *value = LOAD(&sim.numa);
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    ENTER(GetDeviceProperties);
    if (sim_no_such_device(device)) return sim_error(cudaErrorInvalidDevice);
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "simulated device %d", device);
    properties->totalGlobalMem = sim_device_bytes();
    properties->major = 9;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int bytes, int device) {
    ENTER(DeviceGetPCIBusId);
    if (sim_no_such_device(device)) return sim_error(cudaErrorInvalidDevice);
    if (bytes < 13) return sim_error(cudaErrorInvalidValue);
    snprintf(id, (size_t)bytes, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
    ENTER_WAIT(DeviceSynchronize);
    sim_await_device(sim_me.device);
    return sim_error(LOAD(&sim.sticky));
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *all_bytes) {
    ENTER(MemGetInfo);
    *all_bytes = sim_device_bytes();
    *free_bytes = *all_bytes - LOAD(&sim.device_used[sim_me.device]);
    return cudaSuccess;
}

static int sim_standing_error(void) {
    const int broken = sim_broken();
    sim_remember();
    if (broken) return broken;
    return sim_no_driver() ? cudaErrorInsufficientDriver : sim_me.last_error;
}

cudaError_t cudaGetLastError(void) {
    const int error = sim_standing_error();
    sim_count(SIM_GetLastError);
    sim_me.last_error = 0;
    return (cudaError_t)error;
}

cudaError_t cudaPeekAtLastError(void) {
    sim_count(SIM_PeekAtLastError);
    return (cudaError_t)sim_standing_error();
}

static const char sim_unknown[] = "unrecognized error code";

/* Names of the errors there are in here. */
const char *cudaGetErrorName(cudaError_t error) {
    switch ((int)error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInitializationError: return "cudaErrorInitializationError";
    case cudaErrorCudartUnloading: return "cudaErrorCudartUnloading";
    case cudaErrorInsufficientDriver: return "cudaErrorInsufficientDriver";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorHostMemoryAlreadyRegistered: return "cudaErrorHostMemoryAlreadyRegistered";
    case cudaErrorHostMemoryNotRegistered: return "cudaErrorHostMemoryNotRegistered";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorStreamCaptureIsolation: return "cudaErrorStreamCaptureIsolation";
    case cudaErrorStreamCaptureImplicit: return "cudaErrorStreamCaptureImplicit";
    default: return sim_unknown;
    }
}

const char *cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

static void sim_kill_stream(cudaStream_t s) {
    if (!LOAD(&s->alive)) return;
    STORE(&s->alive, 0);
    SUB(&sim.stats.streams, 1);
}

cudaError_t cudaDeviceReset(void) {
    int i;
    ENTER_UNSAFE(DeviceReset);
    sim_await_device(sim_me.device);
    for (i = 0; i < LOAD(&sim.streams_made); ++i)
        if (LOAD(&sim.stream[i]) && !sim_is(sim.stream[i], SIM_LEGACY) &&
            LOAD(&sim.stream[i]->device) == sim_me.device)
            sim_kill_stream(sim.stream[i]);
    for (i = 0; i < LOAD(&sim.blocks_used); ++i)
        if (LOAD(&sim.block[i].state) == 2 && !LOAD(&sim.block[i].host) &&
            LOAD(&sim.block[i].device) == sim_me.device)
            sim_forget(&sim.block[i]);
    return cudaSuccess;
}

/* ---- the runtime: streams ---- */

static cudaError_t sim_stream_create(cudaStream_t *stream, unsigned flags) {
    cudaStream_t s = sim_stream_new(sim_me.device, flags), again;
    if (s == NULL) return sim_error(cudaErrorMemoryAllocation);
    again = __atomic_exchange_n(&sim.destroyed, NULL, __ATOMIC_ACQ_REL);
    if (again != NULL) STORE(&s->handle, again);
    *stream = LOAD(&s->handle);
    ADD(&sim.stats.streams, 1);
    ADD(&sim.stats.creations, 1u);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    ENTER_UNSAFE(StreamCreate);
    if (flags > cudaStreamNonBlocking) return sim_error(cudaErrorInvalidValue);
    return sim_stream_create(stream, flags);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    (void)priority;
    return cudaStreamCreateWithFlags(stream, flags);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

/* The work goes on to its end; the thread is joined by sim_reset. The next stream that is made has
   the handle. */
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    cudaStream_t s;
    ENTER(StreamDestroy);
    if (stream == NULL || stream == cudaStreamLegacy || stream == cudaStreamPerThread)
        return sim_error(cudaErrorInvalidResourceHandle);
    s = sim_resolve(stream);
    if (s == NULL) {
        sim_misuse("a stream was destroyed that is not there");
        return sim_error(cudaErrorInvalidResourceHandle);
    }
    sim_kill_stream(s);
    STORE(&sim.destroyed, stream);
    return cudaSuccess;
}

#define RESOLVE(s, stream)                                                                         \
    do {                                                                                           \
        s = sim_resolve(stream);                                                                   \
        if (s == NULL) return sim_error(cudaErrorInvalidResourceHandle);                           \
    } while (0)

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    cudaStream_t s;
    sim_op *last;
    ENTER_WAIT(StreamSynchronize);
    RESOLVE(s, stream);
    if (LOAD(&s->capture) != cudaStreamCaptureStatusNone)
        return sim_error(cudaErrorStreamCaptureUnsupported);
    if (sim_dropped(SIM_StreamSynchronize, stream)) return cudaSuccess;
    if (sim_is(s, SIM_LEGACY)) sim_link_legacy(s);
    last = LOAD(&s->last);
    if (last != NULL) sim_await(last);
    return sim_error(LOAD(&sim.sticky));
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    cudaStream_t s;
    sim_op *last;
    ENTER_UNSAFE(StreamQuery);
    RESOLVE(s, stream);
    last = LOAD(&s->last);
    if (last != NULL) sim_submit(last);
    if (last == NULL || sim_done(last)) return sim_error(LOAD(&sim.sticky));
    return sim_error(cudaErrorNotReady);
}

/* Whether a stream is being captured that the legacy one would wait for. */
static bool sim_is_captured(int device) {
    bool captured = false;
    int i;
    for (i = 0; i < LOAD(&sim.streams_made); ++i) {
        cudaStream_t s = LOAD(&sim.stream[i]);
        captured = captured || (s != NULL && sim_blocking_on(s, device) &&
                                LOAD(&s->capture) != cudaStreamCaptureStatusNone);
    }
    return captured;
}

/* Of the legacy stream it fails where work would, but spoils no capture. */
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    cudaStream_t s;
    ENTER(StreamIsCapturing);
    RESOLVE(s, stream);
    if (sim_is(s, SIM_LEGACY) && sim_is_captured(s->device))
        return sim_error(cudaErrorStreamCaptureImplicit);
    *status = (enum cudaStreamCaptureStatus)LOAD(&s->capture);
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    cudaStream_t s;
    ENTER(StreamBeginCapture);
    RESOLVE(s, stream);
    if (sim_is(s, SIM_LEGACY) || LOAD(&s->capture) != cudaStreamCaptureStatusNone)
        return sim_error(cudaErrorStreamCaptureUnsupported);
    s->graph = (struct CUgraph_st *)sim_new(sizeof *s->graph);
    STORE(&s->capture_mode, (int)mode);
    STORE(&s->capture_owner, (int)gettid());
    STORE(&s->capture, (int)cudaStreamCaptureStatusActive);
    ADD(&sim.captures, 1);
    if (mode == cudaStreamCaptureModeGlobal) ADD(&sim.global_captures, 1);
    if (mode != cudaStreamCaptureModeRelaxed) ++sim_me.local_captures;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    cudaStream_t s;
    int state;
    ENTER(StreamEndCapture);
    RESOLVE(s, stream);
    state = LOAD(&s->capture);
    *graph = NULL;
    if (state == cudaStreamCaptureStatusNone) return sim_error(cudaErrorStreamCaptureUnmatched);
    SUB(&sim.captures, 1);
    if (LOAD(&s->capture_mode) == cudaStreamCaptureModeGlobal) SUB(&sim.global_captures, 1);
    if (LOAD(&s->capture_mode) != cudaStreamCaptureModeRelaxed) --sim_me.local_captures;
    STORE(&s->capture, (int)cudaStreamCaptureStatusNone);
    if (state != cudaStreamCaptureStatusActive)
        return sim_error(cudaErrorStreamCaptureInvalidated);
    *graph = s->graph;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    const int old = sim_me.mode;
    ENTER(ThreadExchangeStreamCaptureMode);
    ADD(&sim.stats.mode_depth, ((int)*mode != 0) - (old != 0));
    sim_me.mode = (int)*mode;
    *mode = (enum cudaStreamCaptureMode)old;
    return cudaSuccess;
}

#if CUDART_VERSION >= 12000
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph,
                                 unsigned long long flags) {
    ENTER(GraphInstantiate);
    (void)flags;
    *exec = (cudaGraphExec_t)sim_new(sizeof **exec);
    (*exec)->first = graph->first;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    const sim_op *node;
    cudaStream_t s;
    ENTER(GraphLaunch);
    RESOLVE(s, stream);
    for (node = exec->first; node != NULL; node = node->in_graph) {
        sim_op *op = sim_op_new(node->kind);
        const uint64_t asked = op->asked;
        *op = *node;
        op->asked = asked;
        op->in_graph = op->next = NULL;
        op->done = 0;
        if (sim_push(s, op)) return sim_error(cudaErrorStreamCaptureUnsupported);
    }
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    ENTER(GraphDestroy);
    (void)graph;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    ENTER(GraphExecDestroy);
    (void)exec;
    return cudaSuccess;
}
#endif

/* ---- the runtime: events ---- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    ENTER(EventCreate);
    if (flags > 7) return sim_error(cudaErrorInvalidValue);
    *event = (cudaEvent_t)sim_new(sizeof **event);
    (*event)->device = sim_me.device;
    (*event)->flags = flags;
    STORE(&(*event)->alive, 1);
    ADD(&sim.stats.events, 1);
    ADD(&sim.stats.creations, 1u);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

static bool sim_no_such_event(cudaEvent_t event) {
    const uintptr_t at = (uintptr_t)event, heap = (uintptr_t)sim_heap;
    if (at >= heap && at < heap + LOAD(&sim_heap_used) && LOAD(&event->alive)) return false;
    sim_misuse("an event was used that is not there");
    return true;
}

#define CHECK_EVENT(event)                                                                         \
    do {                                                                                           \
        if (sim_no_such_event(event)) return sim_error(cudaErrorInvalidResourceHandle);            \
    } while (0)

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    ENTER(EventDestroy);
    CHECK_EVENT(event);
    STORE(&event->alive, 0);
    SUB(&sim.stats.events, 1);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    cudaStream_t s;
    sim_op *op;
    int error;
    ENTER(EventRecord);
    RESOLVE(s, stream);
    CHECK_EVENT(event);
    if (event->device != s->device) return sim_error(cudaErrorInvalidResourceHandle);
    if (sim_dropped(SIM_EventRecord, stream)) return cudaSuccess;
    op = sim_op_new(SIM_OP_MARK);
    STORE(&event->captured, LOAD(&s->capture) != cudaStreamCaptureStatusNone);
    error = sim_push(s, op);
    if (error) return sim_error(error);
    STORE(&event->last, op);
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    sim_op *op;
    ENTER_UNSAFE(EventQuery);
    CHECK_EVENT(event);
    if (LOAD(&event->captured)) return sim_error(SIM_CAPTURED_EVENT);
    if (sim_dropped(SIM_EventQuery, NULL)) return cudaSuccess;
    op = LOAD(&event->last);
    if (op != NULL) sim_submit(op);
    if (op != NULL && !sim_done(op)) return sim_error(cudaErrorNotReady);
    return sim_error(LOAD(&sim.sticky));
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    sim_op *op;
    ENTER_WAIT(EventSynchronize);
    CHECK_EVENT(event);
    if (LOAD(&event->captured)) return sim_error(SIM_CAPTURED_EVENT);
    if (sim_dropped(SIM_EventSynchronize, NULL)) return cudaSuccess;
    op = LOAD(&event->last);
    if (op != NULL) sim_await(op);
    return sim_error(LOAD(&sim.sticky));
}

/* Waits for what the event stands for now; recorded again later, it stands for something else. */
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    cudaStream_t s;
    sim_op *op, *last;
    ENTER(StreamWaitEvent);
    if (flags != 0) return sim_error(cudaErrorInvalidValue);
    RESOLVE(s, stream);
    CHECK_EVENT(event);
    if (sim_dropped(SIM_StreamWaitEvent, stream)) return cudaSuccess;
    last = LOAD(&event->last);
    if (last == NULL) return cudaSuccess;
    if (LOAD(&s->capture) != cudaStreamCaptureStatusNone && !LOAD(&event->captured)) {
        STORE(&s->capture, (int)cudaStreamCaptureStatusInvalidated);
        return sim_error(cudaErrorStreamCaptureIsolation);
    }
    op = sim_op_new(SIM_OP_WAIT);
    op->awaited = last;
    return sim_error(sim_push(s, op));
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    sim_op *a, *b;
    ENTER(EventElapsedTime);
    CHECK_EVENT(start);
    CHECK_EVENT(end);
    a = LOAD(&start->last);
    b = LOAD(&end->last);
    if (a == NULL || b == NULL || ((start->flags | end->flags) & cudaEventDisableTiming))
        return sim_error(cudaErrorInvalidResourceHandle);
    if (!sim_done(a) || !sim_done(b))
        return sim_error(cudaErrorNotReady);
    *ms = (float)((double)(int64_t)(b->ends - a->ends) * 1e-6);
    return cudaSuccess;
}

/* ---- the runtime: memory ---- */

static void *sim_map(size_t bytes, int protection) {
    return mmap(NULL, sim_round(bytes), protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                -1, 0);
}

cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned flags) {
    int error;
    (void)flags;
    ENTER_UNSAFE(HostAlloc);
    *memory = NULL;
    if (bytes == 0) return cudaSuccess;
    if (sim_pins_too_much(bytes)) return sim_error(sim_pins_too_much(bytes));
    *memory = sim_map(bytes, PROT_READ | PROT_WRITE);
    if (*memory == MAP_FAILED) return sim_error(cudaErrorMemoryAllocation);
    error = sim_pinned(*memory, bytes, false);
    return sim_error(error);
}

cudaError_t cudaMallocHost(void **memory, size_t bytes) {
    return cudaHostAlloc(memory, bytes, cudaHostAllocDefault);
}

cudaError_t cudaFreeHost(void *memory) {
    sim_block *b;
    ENTER_UNSAFE(FreeHost);
    if (memory == NULL) return cudaSuccess;
    b = sim_find(memory, 1, NULL);
    if (b == NULL || !LOAD(&b->host) || LOAD(&b->registered) || LOAD(&b->base) != (uintptr_t)memory)
        return sim_error(cudaErrorInvalidValue);
    sim_forget(b);
    return cudaSuccess;
}

/* What the kernel says of a mapping. */
static bool sim_is_read_only(const void *memory) {
    FILE *maps = fopen("/proc/self/maps", "r");
    unsigned long from, until;
    char line[512], may[5] = "";
    bool read_only = false;
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL)
        if (sscanf(line, "%lx-%lx %4s", &from, &until, may) == 3 && (uintptr_t)memory >= from &&
            (uintptr_t)memory < until)
            read_only = may[0] == 'r' && may[1] == '-';
    if (maps != NULL) fclose(maps);
    return read_only;
}

cudaError_t cudaHostRegister(void *memory, size_t bytes, unsigned flags) {
    const unsigned read_only = 8; /* cudaHostRegisterReadOnly */
    bool overlaps = false;
    ENTER_UNSAFE(HostRegister);
    if (memory == NULL || bytes == 0 || flags > 15) return sim_error(cudaErrorInvalidValue);
    if (!(flags & read_only) && sim_is_read_only(memory)) return sim_error(cudaErrorInvalidValue);
    if (sim_find(memory, bytes, &overlaps) != NULL || overlaps)
        return sim_error(cudaErrorHostMemoryAlreadyRegistered);
    if (sim_pins_too_much(bytes)) return sim_error(sim_pins_too_much(bytes));
    return sim_error(sim_pinned(memory, bytes, true));
}

cudaError_t cudaHostUnregister(void *memory) {
    sim_block *b;
    ENTER_UNSAFE(HostUnregister);
    b = sim_find(memory, 1, NULL);
    if (b == NULL || !LOAD(&b->registered) || LOAD(&b->base) != (uintptr_t)memory)
        return sim_error(cudaErrorHostMemoryNotRegistered);
    sim_forget(b);
    return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags) {
    ENTER(HostGetDevicePointer);
    (void)flags;
    *device = host;
    return sim_find(host, 1, NULL) ? cudaSuccess : sim_error(cudaErrorInvalidValue);
}

/* The address the program sees may not be touched by it; the engine and kernels use another one. */
static int sim_device_alloc(void **memory, size_t bytes) {
    sim_block *b;
    void *seen = sim_map(bytes, PROT_NONE), *alias = sim_map(bytes, PROT_READ | PROT_WRITE);
    if (seen == MAP_FAILED || alias == MAP_FAILED) return cudaErrorMemoryAllocation;
    b = sim_block_new((uintptr_t)seen, bytes, (char *)alias, false);
    if (b == NULL) return cudaErrorMemoryAllocation;
    memset(alias, 0xdb, bytes);
    ADD(&sim.device_used[sim_me.device], bytes);
    ADD(&sim.stats.device_bytes, bytes);
    ADD(&sim.stats.blocks, 1);
    ADD(&sim.stats.creations, 1u);
    *memory = seen;
    return 0;
}

/* The attributes and helper functions of the real header are macros in some releases. */
#undef cudaMalloc
#undef cudaMallocHost

cudaError_t cudaMalloc(void **memory, size_t bytes) {
    const size_t limit = LOAD(&sim.device_limit);
    ENTER_UNSAFE(Malloc);
    *memory = NULL;
    if (bytes == 0) return cudaSuccess;
    if (limit > 0 && LOAD(&sim.device_used[sim_me.device]) + bytes > limit)
        return sim_error(cudaErrorMemoryAllocation);
    return sim_error(sim_device_alloc(memory, bytes));
}

/* Waits for the device, as the real one does. */
cudaError_t cudaFree(void *memory) {
    sim_block *b;
    ENTER_UNSAFE(Free);
    if (memory == NULL) return cudaSuccess;
    b = sim_find(memory, 1, NULL);
    if (b == NULL || LOAD(&b->host) || LOAD(&b->base) != (uintptr_t)memory)
        return sim_error(cudaErrorInvalidValue);
    sim_await_device(LOAD(&b->device));
    sim_forget(b);
    return cudaSuccess;
}

/* One end of a copy: where it is for the engine. */
typedef struct sim_end {
    sim_block *block; /* NULL: pageable */
    char *address;
} sim_end;

static bool sim_find_end(const void *address, size_t bytes, sim_end *end) {
    bool straddles = false;
    end->block = sim_find(address, bytes, &straddles);
    if (straddles) return false; /* partly pinned, or beyond the end of device memory */
    end->address = end->block ? sim_alias_of(end->block, address) : (char *)(uintptr_t)address;
    return true;
}

static bool sim_on_device(const sim_end *end) { return end->block && !LOAD(&end->block->host); }

static bool sim_kind_fits(enum cudaMemcpyKind kind, bool to_device, bool from_device) {
    switch (kind) {
    case cudaMemcpyHostToDevice: return to_device && !from_device;
    case cudaMemcpyDeviceToHost: return !to_device && from_device;
    case cudaMemcpyDeviceToDevice: return to_device && from_device;
    case cudaMemcpyHostToHost: return !to_device && !from_device;
    default: return true;
    }
}

static uint64_t sim_copy_time(size_t bytes) {
    return sim.rate > 0 ? sim.call_ns + (uint64_t)((double)bytes / sim.rate * 1e9) : 0;
}

static sim_op *sim_copy_op(const sim_end *to, const sim_end *from, size_t bytes) {
    sim_op *op = sim_op_new(SIM_OP_COPY);
    op->blocks[0] = to->block;
    op->blocks[1] = from->block;
    op->to = to->address;
    op->from = from->address;
    op->bytes = bytes;
    op->takes = sim_copy_time(bytes);
    op->engine = sim_on_device(to) ? SIM_ENGINE_TO : SIM_ENGINE_FROM;
    ADD(&sim.stats.copies, 1u);
    ADD(&sim.stats.bytes_copied, bytes);
    return op;
}

static int sim_stage(sim_op *op) {
    ADD(&sim.stats.pageable_copies, 1u);
    if (LOAD(&sim.late)) return 0;
    op->staged = malloc(op->bytes);
    if (op->staged == NULL) return cudaErrorMemoryAllocation;
    memcpy(op->staged, op->from, op->bytes);
    op->from = op->staged;
    return 0;
}

/* Returns when CUDA promises to: a copy to pageable memory is over by then, one from pageable
   memory has been read (or not even that, see sim_pageable_late) and may still be under way. */
static int sim_copy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                    cudaStream_t s, bool wait) {
    sim_end a, b;
    sim_op *op;
    int error;
    if (!sim_find_end(to, bytes, &a) || !sim_find_end(from, bytes, &b) ||
        !sim_kind_fits(kind, sim_on_device(&a), sim_on_device(&b)))
        return cudaErrorInvalidValue;
    op = sim_copy_op(&a, &b, bytes);
    if (b.block == NULL && sim_on_device(&a)) {
        error = sim_stage(op);
        wait = false;
        if (error) return error;
    }
    error = sim_push(s, op);
    if (!error && (wait || a.block == NULL)) sim_await(op);
    return error ? error : LOAD(&sim.sticky);
}

static cudaError_t sim_memcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                              cudaStream_t stream) {
    cudaStream_t s;
    ENTER_UNSAFE(Memcpy);
    RESOLVE(s, stream);
    if (bytes == 0) return cudaSuccess;
    return sim_error(sim_copy(to, from, bytes, kind, s, true));
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    return sim_memcpy(to, from, bytes, kind, cudaStreamLegacy);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    cudaStream_t s;
    ENTER(MemcpyAsync);
    RESOLVE(s, stream);
    if (bytes == 0) return cudaSuccess;
    return sim_error(sim_copy(to, from, bytes, kind, s, false));
}

static cudaError_t sim_memset(void *memory, int value, size_t bytes, cudaStream_t stream) {
    sim_end end;
    sim_op *op;
    cudaStream_t s;
    RESOLVE(s, stream);
    if (bytes == 0) return cudaSuccess;
    if (!sim_find_end(memory, bytes, &end) || !end.block)
        return sim_error(cudaErrorInvalidValue);
    op = sim_op_new(SIM_OP_SET);
    op->blocks[0] = end.block;
    op->to = end.address;
    op->value = value;
    op->bytes = bytes;
    op->engine = SIM_ENGINE_COMPUTE;
    return sim_error(sim_push(s, op));
}

cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream) {
    ENTER(MemsetAsync);
    return sim_memset(memory, value, bytes, stream);
}

cudaError_t cudaMemset(void *memory, int value, size_t bytes) {
    ENTER_UNSAFE(Memset);
    return sim_memset(memory, value, bytes, cudaStreamLegacy);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    cudaStream_t s;
    sim_op *op;
    ENTER(LaunchHostFunc);
    RESOLVE(s, stream);
    op = sim_op_new(SIM_OP_KERNEL);
    op->kernel = (sim_kernel)function;
    op->arg = data;
    op->engine = SIM_ENGINE_COMPUTE;
    return sim_error(sim_push(s, op));
}

/* ---- names that programs built with CUDA_API_PER_THREAD_DEFAULT_STREAM use ---- */

/* clang-format off */
#define PER_THREAD(name, parameters, arguments)                                                    \
    cudaError_t name##_ptsz parameters;                                                            \
    cudaError_t name##_ptsz parameters {                                                           \
        if (stream == NULL) stream = cudaStreamPerThread;                                          \
        return name arguments;                                                                     \
    }
PER_THREAD(cudaMemcpyAsync, (void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                             cudaStream_t stream), (to, from, bytes, kind, stream))
PER_THREAD(cudaMemsetAsync, (void *memory, int value, size_t bytes, cudaStream_t stream),
           (memory, value, bytes, stream))
PER_THREAD(cudaStreamSynchronize, (cudaStream_t stream), (stream))
PER_THREAD(cudaStreamQuery, (cudaStream_t stream), (stream))
PER_THREAD(cudaStreamWaitEvent, (cudaStream_t stream, cudaEvent_t event, unsigned flags),
           (stream, event, flags))
PER_THREAD(cudaStreamIsCapturing, (cudaStream_t stream, enum cudaStreamCaptureStatus *status),
           (stream, status))
PER_THREAD(cudaStreamBeginCapture, (cudaStream_t stream, enum cudaStreamCaptureMode mode),
           (stream, mode))
PER_THREAD(cudaStreamEndCapture, (cudaStream_t stream, cudaGraph_t *graph), (stream, graph))
PER_THREAD(cudaGraphLaunch, (cudaGraphExec_t exec, cudaStream_t stream), (exec, stream))
PER_THREAD(cudaEventRecord, (cudaEvent_t event, cudaStream_t stream), (event, stream))
PER_THREAD(cudaLaunchHostFunc, (cudaStream_t stream, cudaHostFn_t function, void *data),
           (stream, function, data))
/* clang-format on */

cudaError_t cudaMemcpy_ptds(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind);
cudaError_t cudaMemcpy_ptds(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    return sim_memcpy(to, from, bytes, kind, cudaStreamPerThread);
}

cudaError_t cudaMemset_ptds(void *memory, int value, size_t bytes);
cudaError_t cudaMemset_ptds(void *memory, int value, size_t bytes) {
    ENTER_UNSAFE(Memset);
    return sim_memset(memory, value, bytes, cudaStreamPerThread);
}

/* ---- the driver: the same under other names, with the context that is current, and no last error.
   CUresult, CUdevice are int, CUdeviceptr is uint64_t, the rest pointers. ---- */

static char sim_contexts[SIM_DEVICES]; /* their addresses are the handles */
static char sim_green_context;

static int sim_context_of(const void *context) {
    const ptrdiff_t at = (const char *)context - sim_contexts;
    return context != NULL && at >= 0 && at < SIM_DEVICES ? (int)at : -1;
}

enum { SIM_NO_CONTEXT = 201 };

/* clang-format off */
#define DRIVER(name, parameters, call)                                                             \
    int name parameters;                                                                           \
    int name parameters {                                                                          \
        int before, result;                                                                        \
        sim_remember();                                                                            \
        before = sim_me.last_error;                                                                \
        if (sim_me.current == 0 && !sim_broken()) return SIM_NO_CONTEXT;                           \
        result = (int)(call);                                                                      \
        sim_me.last_error = before;                                                                \
        return result;                                                                             \
    }
DRIVER(cuCtxSynchronize, (void), cudaDeviceSynchronize())
DRIVER(cuStreamCreate, (void **s, unsigned flags),
       cudaStreamCreateWithFlags((cudaStream_t *)(void *)s, flags))
DRIVER(cuStreamDestroy_v2, (void *s), cudaStreamDestroy((cudaStream_t)s))
DRIVER(cuStreamSynchronize, (void *s), cudaStreamSynchronize((cudaStream_t)s))
DRIVER(cuStreamWaitEvent, (void *s, void *e, unsigned flags),
       cudaStreamWaitEvent((cudaStream_t)s, (cudaEvent_t)e, flags))
DRIVER(cuStreamIsCapturing, (void *s, int *status),
       cudaStreamIsCapturing((cudaStream_t)s, (enum cudaStreamCaptureStatus *)(void *)status))
DRIVER(cuEventCreate, (void **e, unsigned flags),
       cudaEventCreateWithFlags((cudaEvent_t *)(void *)e, flags))
DRIVER(cuEventDestroy_v2, (void *e), cudaEventDestroy((cudaEvent_t)e))
DRIVER(cuEventRecord, (void *e, void *s), cudaEventRecord((cudaEvent_t)e, (cudaStream_t)s))
DRIVER(cuEventQuery, (void *e), cudaEventQuery((cudaEvent_t)e))
DRIVER(cuEventSynchronize, (void *e), cudaEventSynchronize((cudaEvent_t)e))
DRIVER(cuEventElapsedTime, (float *ms, void *a, void *b),
       cudaEventElapsedTime(ms, (cudaEvent_t)a, (cudaEvent_t)b))
DRIVER(cuMemAlloc_v2, (uint64_t *memory, size_t bytes),
       cudaMalloc((void **)(void *)memory, bytes))
DRIVER(cuMemFree_v2, (uint64_t memory), cudaFree((void *)(uintptr_t)memory))
DRIVER(cuMemHostRegister_v2, (void *memory, size_t bytes, unsigned flags),
       cudaHostRegister(memory, bytes, flags))
DRIVER(cuMemHostUnregister, (void *memory), cudaHostUnregister(memory))
DRIVER(cuMemcpyHtoDAsync_v2, (uint64_t to, const void *from, size_t bytes, void *s),
       cudaMemcpyAsync((void *)(uintptr_t)to, from, bytes, cudaMemcpyHostToDevice,
                       (cudaStream_t)s))
DRIVER(cuMemcpyDtoHAsync_v2, (void *to, uint64_t from, size_t bytes, void *s),
       cudaMemcpyAsync(to, (const void *)(uintptr_t)from, bytes, cudaMemcpyDeviceToHost,
                       (cudaStream_t)s))
/* clang-format on */

/* Needs no context, and leaves no error. */
#define DRIVER_ENTER(call, needs_driver)                                                           \
    do {                                                                                           \
        const int entered_ = sim_enter(SIM_##call, needs_driver);                                  \
        if (entered_) return entered_;                                                             \
    } while (0)

int cuDriverGetVersion(int *version);
int cuDriverGetVersion(int *version) {
    DRIVER_ENTER(DriverGetVersion, false);
    *version = LOAD(&sim.driver) ? LOAD(&sim.driver) : CUDART_VERSION;
    return 0;
}

int cuInit(unsigned flags);
int cuInit(unsigned flags) {
    const int stub = 34;
    DRIVER_ENTER(Init, false);
    if (flags != 0) return cudaErrorInvalidValue;
    if (sim_dropped(SIM_Init, NULL)) return 0;
    return sim_device_count() < 0 ? stub : sim_device_count() == 0 ? cudaErrorNoDevice : 0;
}

int cuDeviceGetCount(int *count);
int cuDeviceGetCount(int *count) {
    DRIVER_ENTER(GetDeviceCount, false);
    *count = sim_device_count();
    return 0;
}

int cuDeviceGet(int *device, int ordinal);
int cuDeviceGet(int *device, int ordinal) {
    DRIVER_ENTER(DeviceGet, false);
    *device = ordinal;
    return sim_no_such_device(ordinal) ? cudaErrorInvalidDevice : 0;
}

int cuDeviceGetName(char *name, int bytes, int device);
int cuDeviceGetName(char *name, int bytes, int device) {
    DRIVER_ENTER(GetDeviceProperties, false);
    snprintf(name, (size_t)bytes, "simulated device %d", device);
    return 0;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device);
int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    (void)device;
    DRIVER_ENTER(GetDeviceProperties, false);
    *bytes = sim_device_bytes();
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device);
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    const int before = sim_me.last_error;
    const int result =
        (int)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device);
    sim_me.last_error = before;
    return result;
}

int cuDevicePrimaryCtxRetain(void **context, int device);
int cuDevicePrimaryCtxRetain(void **context, int device) {
    DRIVER_ENTER(PrimaryCtxRetain, false);
    if (sim_no_such_device(device)) return cudaErrorInvalidDevice;
    *context = &sim_contexts[device];
    ADD(&sim.retained[device], 1);
    STORE(&sim.context[device], 1);
    return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device);
int cuDevicePrimaryCtxRelease_v2(int device) {
    DRIVER_ENTER(PrimaryCtxRelease, false);
    if (LOAD(&sim.retained[device]) == 0) return SIM_NO_CONTEXT;
    SUB(&sim.retained[device], 1);
    return 0;
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active);
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = LOAD(&sim.context[device]);
    return 0;
}

int cuCtxPushCurrent_v2(void *context);
int cuCtxPushCurrent_v2(void *context) {
    const int device = sim_context_of(context);
    DRIVER_ENTER(CtxPushCurrent, false);
    if (device < 0 || !LOAD(&sim.context[device]) || sim_me.depth == 16) return SIM_NO_CONTEXT;
    sim_me.saved[sim_me.depth++] = sim_me.current;
    sim_make_current(device);
    ADD(&sim.stats.mode_depth, 1);
    return 0;
}

int cuCtxPopCurrent_v2(void **context);
int cuCtxPopCurrent_v2(void **context) {
    DRIVER_ENTER(CtxPopCurrent, false);
    if (sim_me.depth == 0) return SIM_NO_CONTEXT;
    *context = &sim_contexts[sim_me.current - 1];
    sim_me.current = sim_me.saved[--sim_me.depth];
    sim_me.device = sim_me.current > 0 ? sim_me.current - 1 : 0;
    SUB(&sim.stats.mode_depth, 1);
    return 0;
}

int cuCtxGetCurrent(void **context);
int cuCtxGetCurrent(void **context) {
    DRIVER_ENTER(CtxGetCurrent, false);
    *context = sim_me.current > 0 ? &sim_contexts[sim_me.current - 1] : NULL;
    return 0;
}

DRIVER(cuCtxGetDevice, (int *device), cudaGetDevice(device))

int cuStreamGetCtx(void *stream, void **context);
int cuStreamGetCtx(void *stream, void **context) {
    const cudaStream_t s = sim_resolve((cudaStream_t)stream);
    DRIVER_ENTER(StreamGetCtx, false);
    if (s == NULL) return cudaErrorInvalidResourceHandle;
    *context = LOAD(&s->green) ? &sim_green_context : &sim_contexts[LOAD(&s->device)];
    return 0;
}

/* Memory of the device, or that was pinned or registered; of any other it says nothing. */
int cuPointerGetAttribute(void *value, int attribute, uint64_t memory);
int cuPointerGetAttribute(void *value, int attribute, uint64_t memory) {
    const int type = 2; /* CU_POINTER_ATTRIBUTE_MEMORY_TYPE: 1 of the host, 2 of the device */
    const sim_block *b;
    DRIVER_ENTER(PointerGetAttribute, false);
    b = sim_find((const void *)(uintptr_t)memory, 1, NULL);
    if (b == NULL || attribute != type) return cudaErrorInvalidValue;
    *(int *)value = LOAD(&b->host) ? 1 : 2;
    return 0;
}

/* Says of memory that it does not know that everything is 0. */
int cuPointerGetAttributes(unsigned count, int *attribute, void **data, uint64_t memory);
int cuPointerGetAttributes(unsigned count, int *attribute, void **data, uint64_t memory) {
    enum { TYPE = 2, IS_MANAGED = 8, RANGE_START = 11, RANGE_SIZE = 12 };
    const sim_block *b;
    bool ranged;
    unsigned i;
    DRIVER_ENTER(PointerGetAttribute, false);
    b = sim_find((const void *)(uintptr_t)memory, 1, NULL);
    ranged = b != NULL && !LOAD(&sim.without_ranges);
    for (i = 0; i < count; ++i) {
        switch (attribute[i]) {
        case TYPE: *(int *)data[i] = b == NULL ? 0 : LOAD(&b->host) ? 1 : 2; break;
        case IS_MANAGED: *(bool *)data[i] = b != NULL && LOAD(&sim.managed) != 0; break;
        case RANGE_START: *(uint64_t *)data[i] = ranged ? LOAD(&b->base) : 0; break;
        case RANGE_SIZE: *(size_t *)data[i] = ranged ? LOAD(&b->bytes) : 0; break;
        default: return cudaErrorInvalidValue;
        }
    }
    return 0;
}

/* Needs no context. */
int cuThreadExchangeStreamCaptureMode(int *mode);
int cuThreadExchangeStreamCaptureMode(int *mode) {
    const int old = sim_me.mode;
    DRIVER_ENTER(ExchangeMode, false);
    ADD(&sim.stats.mode_depth, (*mode != 0) - (old != 0));
    sim_me.mode = *mode;
    *mode = old;
    return 0;
}

int cuGetErrorString(int error, const char **text);
int cuGetErrorString(int error, const char **text) {
    const char *name = cudaGetErrorName((cudaError_t)error);
    *text = name == sim_unknown ? NULL : name;
    return *text == NULL ? (int)cudaErrorInvalidValue : 0;
}
