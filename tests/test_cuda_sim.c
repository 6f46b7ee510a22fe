/* The stand-in for the CUDA runtime against what CUDA promises: it must order what CUDA orders, and
   nothing else. The last tests write the four mistakes there are to make by hand, and see to it
   that ThreadSanitizer finds them in here. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#undef CUDA_API_PER_THREAD_DEFAULT_STREAM /* stream 0 is the legacy stream in here */
#include "cudart_sim.h"
#include "test.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { BYTES = 64 << 10 };

#define OK(call) CHECK_EQ(call, cudaSuccess)

static void *pinned(size_t bytes) {
    void *memory = NULL;
    OK(cudaHostAlloc(&memory, bytes, 0));
    REQUIRE(memory != NULL);
    return memory;
}

static void *device(size_t bytes) {
    void *memory = NULL;
    OK(cudaMalloc(&memory, bytes));
    REQUIRE(memory != NULL);
    return memory;
}

static cudaStream_t stream(void) {
    cudaStream_t s = NULL;
    OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return s;
}

static cudaEvent_t event(void) {
    cudaEvent_t e = NULL;
    OK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    return e;
}

/* A kernel that counts the bytes that are not `expected`. */
typedef struct look {
    const void *device;
    size_t bytes;
    int expected;
    long wrong; /* of the stream's thread, until the host has waited for it */
} look;

static void look_at(void *arg) {
    look *l = (look *)arg;
    const unsigned char *bytes = (const unsigned char *)sim_view(l->device);
    size_t i;
    l->wrong = 0;
    for (i = 0; i < l->bytes; ++i) l->wrong += bytes[i] != l->expected;
}

static look at(const void *memory, int expected) {
    const look l = { memory, BYTES, expected, -1 };
    return l;
}

static void to_device(void *to, const void *from, cudaStream_t s) {
    OK(cudaMemcpyAsync(to, from, BYTES, cudaMemcpyHostToDevice, s));
}

static void copies_there_and_back(void) {
    unsigned char *a = (unsigned char *)pinned(BYTES), *b = (unsigned char *)pinned(BYTES);
    void *d = device(BYTES);
    cudaStream_t s = stream();
    look l = at(d, 7);
    memset(a, 7, BYTES);
    to_device(d, a, s);
    OK(sim_launch(s, look_at, &l, 0));
    OK(cudaMemcpyAsync(b, d, BYTES, cudaMemcpyDeviceToHost, s));
    OK(cudaStreamSynchronize(s));
    CHECK_EQ(l.wrong, 0);
    CHECK_EQ(memcmp(a, b, BYTES), 0);
    OK(cudaMemsetAsync(d, 9, BYTES, s));
    OK(cudaMemcpyAsync(b, d, BYTES, cudaMemcpyDefault, s));
    OK(cudaStreamSynchronize(s));
    CHECK_EQ(b[BYTES - 1], 9);
    sim_reset();
}

static void calls_return_before_the_copy(void) {
    void *a = pinned(BYTES), *d = device(BYTES);
    cudaStream_t s = stream();
    cudaEvent_t e = event();
    OK(cudaEventQuery(e)); /* never recorded: nothing to wait for */
    sim_hold();
    to_device(d, a, s);
    OK(cudaEventRecord(e, s));
    CHECK_EQ(cudaEventQuery(e), cudaErrorNotReady);
    CHECK_EQ(cudaPeekAtLastError(), cudaErrorNotReady);
    CHECK_EQ(cudaGetLastError(), cudaErrorNotReady);
    CHECK_EQ(cudaGetLastError(), cudaSuccess);
    CHECK_EQ(cudaStreamQuery(s), cudaErrorNotReady);
    sim_step(1);
    OK(cudaEventSynchronize(e));
    OK(cudaEventQuery(e));
    CHECK_EQ(cudaGetLastError(), cudaErrorNotReady); /* of StreamQuery: success clears nothing */
    sim_reset();
}

/* The second stream waits for the first recording alone, though the event has moved on since. */
static void an_event_is_a_snapshot(void) {
    void *a = pinned(BYTES), *d = device(BYTES);
    cudaStream_t s = stream(), t = stream();
    cudaEvent_t e = event(), f = event();
    sim_hold();
    to_device(d, a, s);
    OK(cudaEventRecord(e, s));
    OK(cudaStreamWaitEvent(t, e, 0));
    OK(cudaEventRecord(f, t));
    to_device(d, a, s);
    OK(cudaEventRecord(e, s));
    CHECK_EQ(cudaEventQuery(f), cudaErrorNotReady);
    sim_step(1);
    OK(cudaEventSynchronize(f));
    CHECK_EQ(cudaEventQuery(e), cudaErrorNotReady);
    sim_release();
    OK(cudaEventSynchronize(e));
    sim_reset();
}

static void pageable_memory_is_staged_at_the_call(void) {
    unsigned char *a = (unsigned char *)malloc(BYTES);
    void *d = device(BYTES);
    cudaStream_t s = stream();
    look first = at(d, 1), second = at(d, 2);
    sim_stats stats;
    memset(a, 1, BYTES);
    sim_hold();
    to_device(d, a, s);
    memset(a, 2, BYTES);
    sim_release();
    OK(sim_launch(s, look_at, &first, 0));
    OK(cudaStreamSynchronize(s));
    CHECK_EQ(first.wrong, 0);
    sim_pageable_late(true); /* a coherent machine reads it when the copy runs */
    memset(a, 1, BYTES);
    sim_hold();
    to_device(d, a, s);
    if (!TEST_SANITIZED) memset(a, 2, BYTES); /* a race, and meant to be one */
    else second.expected = 1;
    sim_release();
    OK(sim_launch(s, look_at, &second, 0));
    OK(cudaStreamSynchronize(s));
    CHECK_EQ(second.wrong, 0);
    sim_get_stats(&stats);
    CHECK_EQ(stats.pageable_copies, 2);
    sim_reset();
    free(a);
}

/* cudaMemcpy from pageable memory comes back when it has read it: the copy itself, on the legacy
   stream, may be still to come, and a non-blocking stream does not wait for it. */
static void memcpy_from_pageable_memory_comes_back_early(void) {
    unsigned char *a = (unsigned char *)malloc(BYTES);
    void *d = device(BYTES);
    cudaStream_t s = stream();
    cudaEvent_t e = event();
    look after = at(d, 1);
    memset(a, 1, BYTES);
    sim_hold();
    OK(cudaMemcpy(d, a, BYTES, cudaMemcpyHostToDevice));
    CHECK_EQ(cudaStreamQuery(cudaStreamLegacy), cudaErrorNotReady);
    OK(cudaEventRecord(e, s));
    OK(cudaEventSynchronize(e));
    sim_release();
    OK(cudaStreamSynchronize(NULL));
    OK(sim_launch(s, look_at, &after, 0));
    OK(cudaStreamSynchronize(s));
    CHECK_EQ(after.wrong, 0);
    sim_reset();
    free(a);
}

static void the_legacy_stream_waits_and_is_waited_for(void) {
    void *a = pinned(BYTES), *d = device(BYTES);
    cudaStream_t blocking = NULL, other = stream();
    cudaEvent_t e = event(), f = event(), g = event();
    OK(cudaStreamCreateWithFlags(&blocking, cudaStreamDefault));
    sim_hold();
    to_device(d, a, blocking);
    OK(cudaEventRecord(e, NULL)); /* behind the blocking stream */
    OK(cudaEventRecord(f, blocking));
    OK(cudaEventRecord(g, other)); /* behind nothing */
    OK(cudaEventSynchronize(g));
    CHECK_EQ(cudaEventQuery(e), cudaErrorNotReady);
    sim_step(1);
    OK(cudaEventSynchronize(e));
    to_device(d, a, cudaStreamLegacy);
    OK(cudaEventRecord(f, blocking));
    OK(cudaEventRecord(g, other));
    OK(cudaEventSynchronize(g));
    CHECK_EQ(cudaEventQuery(f), cudaErrorNotReady);
    sim_release();
    OK(cudaEventSynchronize(f));
    sim_reset();
}

static void *records_on_its_own_stream(void *arg) {
    cudaEvent_t *e = (cudaEvent_t *)arg;
    OK(cudaEventRecord(*e, cudaStreamPerThread));
    OK(cudaEventSynchronize(*e));
    return NULL;
}

static void each_thread_has_a_stream(void) {
    void *a = pinned(BYTES), *d = device(BYTES);
    cudaEvent_t mine = event(), theirs = event();
    pthread_t thread;
    sim_hold();
    to_device(d, a, cudaStreamPerThread);
    OK(cudaEventRecord(mine, cudaStreamPerThread));
    REQUIRE(pthread_create(&thread, NULL, records_on_its_own_stream, &theirs) == 0);
    pthread_join(thread, NULL); /* it did not wait for this thread's copy */
    CHECK_EQ(cudaEventQuery(mine), cudaErrorNotReady);
    sim_release();
    OK(cudaEventSynchronize(mine));
    sim_reset();
}

/* The status of a child that runs this; -1 if it was killed. */
static int in_child(void (*run)(void *), void *arg) {
    int status = 0;
    const pid_t child = fork();
    if (child == 0) {
        if (freopen("/dev/null", "w", stderr) == NULL) _exit(1);
        run(arg);
        _exit(0);
    }
    REQUIRE(child > 0 && waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void touch(void *memory) { *(volatile char *)memory = 1; }

static void device_memory_faults_on_the_host(void) {
    void *d = device(BYTES);
    CHECK(in_child(touch, d) != 0);
    CHECK(sim_view(d) != NULL && sim_view(d) != d);
    CHECK_EQ(in_child(touch, sim_view(d)), 0);
    sim_reset();
}

static void the_nth_call_fails_once(void) {
    int n = 0;
    sim_fail_nth(2, cudaErrorUnknown);
    OK(cudaGetDevice(&n));
    CHECK(!sim_failed());
    CHECK_EQ(cudaGetDevice(&n), cudaErrorUnknown);
    CHECK(sim_failed());
    CHECK_STR(sim_failed_call(), "cudaGetDevice");
    OK(cudaGetDevice(&n));
    CHECK_EQ(cudaGetLastError(), cudaErrorUnknown);
    CHECK_EQ(cudaGetLastError(), cudaSuccess);
    sim_reset();
}

static void sticky_errors_stick(void) {
    cudaStream_t s = stream();
    int n = 0;
    OK(sim_launch_failing(s, cudaErrorIllegalAddress));
    CHECK_EQ(cudaStreamSynchronize(s), cudaErrorIllegalAddress);
    CHECK_EQ(cudaGetDevice(&n), cudaErrorIllegalAddress);
    CHECK_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
    CHECK_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
    sim_reset();
    OK(cudaGetDevice(&n));
    sim_unload();
    CHECK_EQ(cudaGetDevice(&n), cudaErrorCudartUnloading);
    sim_reset();
}

static void calls_as_a_child(void *arg) {
    int n = 0;
    (void)arg;
    if (cudaGetDevice(&n) != cudaErrorInitializationError) _exit(1);
    sim_reset(); /* a stand-in of its own, for whoever wants one */
    if (cudaGetDevice(&n) != cudaSuccess) _exit(2);
}

static void a_child_has_no_runtime(void) {
    int n = 0;
    OK(cudaGetDevice(&n));
    CHECK_EQ(in_child(calls_as_a_child, NULL), 0);
    OK(cudaGetDevice(&n));
    sim_reset();
}

static void without_driver_or_device(void) {
    int n = -7;
    void *memory;
    sim_set_devices(-1);
    CHECK_EQ(cudaGetDeviceCount(&n), cudaErrorInsufficientDriver);
    CHECK_EQ(n, -7);
    CHECK_EQ(cudaMalloc(&memory, 1), cudaErrorInsufficientDriver);
    CHECK_EQ(cudaGetLastError(), cudaErrorInsufficientDriver);
    CHECK_EQ(cudaGetLastError(), cudaErrorInsufficientDriver);
    OK(cudaDriverGetVersion(&n));
    CHECK_EQ(n, 0);
    sim_set_devices(0);
    OK(cudaDriverGetVersion(&n));
    CHECK(n > 0);
    CHECK_EQ(cudaGetDeviceCount(&n), cudaErrorNoDevice);
    CHECK_EQ(cudaMalloc(&memory, 1), cudaErrorNoDevice);
    sim_reset();
}

static void devices_are_told_apart(void) {
    cudaStream_t s = stream();
    cudaEvent_t e = event(), f;
    int n = 0;
    sim_set_devices(2);
    CHECK_EQ(cudaSetDevice(2), cudaErrorInvalidDevice);
    CHECK_EQ(cudaSetDevice(-1), cudaErrorInvalidDevice);
    OK(cudaSetDevice(1));
    OK(cudaGetDevice(&n));
    CHECK_EQ(n, 1);
    f = event();
    CHECK_EQ(cudaEventRecord(e, NULL), cudaErrorInvalidResourceHandle); /* of device 1 */
    CHECK_EQ(cudaEventRecord(f, s), cudaErrorInvalidResourceHandle);
    OK(cudaEventRecord(e, s));
    OK(cudaEventRecord(f, NULL));
    OK(cudaStreamWaitEvent(s, f, 0));
    OK(cudaStreamSynchronize(s));
    sim_reset();
}

static void registrations_have_limits(void) {
    char *memory = (char *)mmap(NULL, 4 * BYTES, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    void *d = device(4 * BYTES);
    cudaStream_t s = stream();
    CHECK_EQ(cudaHostRegister(memory, 0, 0), cudaErrorInvalidValue);
    OK(cudaHostRegister(memory, BYTES, 0));
    CHECK_EQ(cudaHostRegister(memory, BYTES, 0), cudaErrorHostMemoryAlreadyRegistered);
    CHECK_EQ(cudaHostRegister(memory + BYTES / 2, BYTES, 0), cudaErrorHostMemoryAlreadyRegistered);
    OK(cudaHostRegister(memory + BYTES, BYTES, 0));
    CHECK_EQ(cudaMemcpyAsync(d, memory + 8, BYTES, cudaMemcpyHostToDevice, s),
             cudaErrorInvalidValue); /* across both */
    CHECK_EQ(cudaMemcpyAsync((char *)d + 8, memory, 4 * BYTES, cudaMemcpyHostToDevice, s),
             cudaErrorInvalidValue); /* beyond the end */
    sim_set_pin_limit(3 * BYTES);
    CHECK_EQ(cudaHostRegister(memory + 2 * BYTES, 2 * BYTES, 0), cudaErrorMemoryAllocation);
    OK(cudaHostUnregister(memory));
    CHECK_EQ(cudaHostUnregister(memory), cudaErrorHostMemoryNotRegistered);
    OK(cudaHostUnregister(memory + BYTES));
    CHECK_EQ(sim_leaks(), 2); /* the stream and the memory of the device */
    sim_reset();
    munmap(memory, 4 * BYTES);
}

static void misuse_is_counted(void) {
    void *a = pinned(BYTES), *d = device(BYTES);
    cudaStream_t s = stream();
    cudaEvent_t e = event();
    sim_stats stats;
    sim_hold();
    to_device(d, a, s);
    OK(cudaFreeHost(a)); /* in use; nobody reads it before the reset */
    sim_get_stats(&stats);
    CHECK_EQ(stats.violations, 1);
    CHECK(strstr(sim_violation(), "given back") != NULL);
    OK(cudaEventDestroy(e));
    CHECK_EQ(cudaEventQuery(e), cudaErrorInvalidResourceHandle);
    OK(cudaStreamDestroy(s));
    CHECK_EQ(cudaStreamDestroy(s), cudaErrorInvalidResourceHandle);
    sim_get_stats(&stats);
    CHECK_EQ(stats.violations, 3);
    sim_reset();
}

static void unsafe_calls_spoil_a_capture(void) {
    cudaStream_t s = stream();
    cudaEvent_t e = event();
    cudaGraph_t graph = NULL;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    CHECK_EQ(cudaEventQuery(e), cudaErrorStreamCaptureUnsupported);
    CHECK_EQ(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    OK(cudaThreadExchangeStreamCaptureMode(&mode));
    CHECK_EQ(mode, cudaStreamCaptureModeGlobal);
    OK(cudaEventQuery(e));
    OK(cudaThreadExchangeStreamCaptureMode(&mode));
    CHECK_EQ(mode, cudaStreamCaptureModeRelaxed);
    OK(cudaStreamEndCapture(s, &graph));
    CHECK(graph != NULL);
    sim_reset();
}

static void waiting_for_the_outside_spoils_a_capture(void) {
    cudaStream_t s = stream(), t = stream();
    cudaEvent_t e = event();
    cudaGraph_t graph = NULL;
    OK(cudaEventRecord(e, t));
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    CHECK_EQ(cudaStreamWaitEvent(s, e, 0), cudaErrorStreamCaptureIsolation);
    CHECK_EQ(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
    sim_reset();
}

static void a_graph_runs_what_was_captured(void) {
    void *a = pinned(BYTES), *d = device(BYTES);
    cudaStream_t s = stream();
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    look l = at(d, 3);
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    to_device(d, a, s);
    OK(sim_launch(s, look_at, &l, 0));
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaStreamSynchronize(s));
    CHECK_EQ(l.wrong, -1); /* nothing has run */
    OK(cudaGraphInstantiate(&exec, graph, 0));
    memset(a, 3, BYTES);
    OK(cudaGraphLaunch(exec, s));
    OK(cudaStreamSynchronize(s));
    CHECK_EQ(l.wrong, 0);
    sim_reset();
}

static void nothing(void *arg) { (void)arg; }

/* Copies share an engine, kernels another; the two overlap, and the clock of the device says so
   whatever the machine is doing. */
static void the_model_keeps_time(void) {
    void *a = pinned(BYTES), *d = device(BYTES), *d2 = device(BYTES);
    cudaStream_t s = stream(), t = stream(), u = stream();
    sim_stats stats;
    sim_model((double)BYTES / 2e-3, 0); /* 2 ms each */
    to_device(d, a, s);
    to_device(d2, a, t);
    OK(sim_launch(u, nothing, NULL, 3000000));
    OK(cudaDeviceSynchronize());
    sim_get_stats(&stats);
    CHECK_EQ(stats.copy_ns, 4000000);
    CHECK_EQ(stats.kernel_ns, 3000000);
    CHECK(stats.last_ns - stats.first_ns >= 4000000);
    sim_reset();
}

/* Nothing begins by itself; a question begins what stands before what it is about. */
static void work_may_be_gathered(void) {
    void *a = pinned(BYTES), *d = device(BYTES);
    cudaStream_t s = stream(), t = stream();
    cudaEvent_t e = event(), f = event();
    sim_stats stats;
    sim_gather(true);
    to_device(d, a, s);
    OK(cudaEventRecord(e, s));
    OK(cudaStreamWaitEvent(t, e, 0));
    OK(cudaEventRecord(f, t));
    usleep(30000);
    sim_get_stats(&stats);
    CHECK_EQ(stats.first_ns, 0);
    while (cudaEventQuery(f) == cudaErrorNotReady) usleep(1000);
    OK(cudaEventQuery(e));
    sim_get_stats(&stats);
    CHECK(stats.first_ns != 0);
    OK(sim_launch(t, nothing, NULL, 0));
    OK(cudaStreamSynchronize(t));
    sim_reset();
}

static void drops_what_it_is_told_to(void) {
    void *a = pinned(BYTES), *d = device(BYTES);
    cudaStream_t s = stream(), t = stream();
    cudaEvent_t e = event(), f = event();
    sim_hold();
    to_device(d, a, s);
    OK(cudaEventRecord(e, s));
    sim_drop(SIM_StreamWaitEvent, t);
    OK(cudaStreamWaitEvent(t, e, 0));
    OK(cudaEventRecord(f, t));
    OK(cudaEventSynchronize(f)); /* though the copy is held */
    sim_drop(SIM_EventSynchronize, SIM_ANY_STREAM);
    OK(cudaEventSynchronize(e));
    sim_drop_none();
    CHECK_EQ(cudaEventQuery(e), cudaErrorNotReady);
    sim_release();
    OK(cudaEventSynchronize(e));
    sim_reset();
}

static void the_engine_reads_through_an_alias(void) {
    char *arena, *alias;
    void *d = device(BYTES);
    cudaStream_t s = stream();
    look l = at(d, 5);
    const int file = memfd_create("arena", MFD_CLOEXEC);
    REQUIRE(file >= 0 && ftruncate(file, BYTES) == 0);
    arena = (char *)mmap(NULL, BYTES, PROT_NONE, MAP_SHARED, file, 0);
    alias = (char *)mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    REQUIRE(arena != MAP_FAILED && alias != MAP_FAILED);
    memset(alias, 5, BYTES);
    sim_alias(arena, BYTES, alias);
    OK(cudaHostRegister(arena, BYTES, 0));
    to_device(d, arena, s);
    OK(sim_launch(s, look_at, &l, 0));
    OK(cudaStreamSynchronize(s));
    CHECK_EQ(l.wrong, 0);
    sim_reset();
    munmap(arena, BYTES);
    munmap(alias, BYTES);
    close(file);
}

/* ---- a ring of slots written by hand, with one edge missing on request ---- */

enum { SLOTS = 2, BATCHES = 24 };
typedef enum edge { EVERY_EDGE, NO_E1, NO_E2, NO_E3, NO_E4 } edge;

typedef struct hand_ring {
    unsigned char *host[SLOTS];
    void *device[SLOTS];
    cudaEvent_t copied[SLOTS], used[SLOTS];
    cudaStream_t copy, compute;
    look looks[BATCHES];
} hand_ring;

static void hand_open(hand_ring *r) {
    int i;
    r->copy = stream();
    r->compute = stream();
    for (i = 0; i < SLOTS; ++i) {
        r->host[i] = (unsigned char *)pinned(BYTES);
        r->device[i] = device(BYTES);
        r->copied[i] = event();
        r->used[i] = event();
    }
}

static void hand_batch(hand_ring *r, int n, edge missing) {
    const int slot = n % SLOTS;
    look *l = &r->looks[n];
    if (missing != NO_E1) OK(cudaEventSynchronize(r->copied[slot]));
    memset(r->host[slot], n + 1, BYTES);
    if (missing != NO_E3) OK(cudaStreamWaitEvent(r->copy, r->used[slot], 0));
    to_device(r->device[slot], r->host[slot], r->copy);
    OK(cudaEventRecord(r->copied[slot], r->copy));
    if (missing != NO_E2) OK(cudaStreamWaitEvent(r->compute, r->copied[slot], 0));
    *l = at(r->device[slot], n + 1);
    OK(sim_launch(r->compute, look_at, l, 0));
    OK(cudaEventRecord(r->used[slot], r->compute));
}

static long hand_run(edge missing) {
    static hand_ring r;
    long wrong = 0;
    int i;
    sim_delay(300, test_seed());
    hand_open(&r);
    for (i = 0; i < BATCHES; ++i) hand_batch(&r, i, missing);
    OK(cudaDeviceSynchronize());
    for (i = 0; i < BATCHES; ++i) wrong += r.looks[i].wrong;
    sim_reset();
    return wrong;
}

/* E4: the copy of pageable memory runs on the legacy stream, the kernel on one that does not wait
   for it. */
static long hand_pageable(edge missing) {
    static look looks[BATCHES];
    unsigned char *a = (unsigned char *)malloc(BYTES);
    void *d = device(BYTES);
    cudaStream_t s = stream();
    long wrong = 0;
    int i;
    sim_delay(300, test_seed());
    for (i = 0; i < BATCHES; ++i) {
        memset(a, i + 1, BYTES);
        OK(cudaMemcpy(d, a, BYTES, cudaMemcpyHostToDevice));
        if (missing != NO_E4) OK(cudaStreamSynchronize(cudaStreamLegacy));
        looks[i] = at(d, i + 1);
        OK(sim_launch(s, look_at, &looks[i], 0));
        OK(cudaStreamSynchronize(s));
    }
    OK(cudaDeviceSynchronize());
    for (i = 0; i < BATCHES; ++i) wrong += looks[i].wrong;
    sim_reset();
    free(a);
    return wrong;
}

static void run_with(void *arg) {
    const edge missing = *(const edge *)arg;
    _exit((missing == NO_E4 ? hand_pageable(missing) : hand_run(missing)) != 0 ? 65 : 0);
}

/* Caught: by ThreadSanitizer (66) or by wrong bytes (65). */
static bool is_caught(edge missing) {
    int tries;
    for (tries = 0; tries < 10; ++tries) {
        const int status = in_child(run_with, &missing);
        if (status == 65 || status == 66) return true;
        CHECK_EQ(status, 0);
    }
    return false;
}

static void every_edge_is_enough(void) {
    CHECK_EQ(hand_run(EVERY_EDGE), 0);
    CHECK_EQ(hand_pageable(EVERY_EDGE), 0);
}

static void a_missing_edge_is_caught(void) {
    int missing;
    for (missing = NO_E1; missing <= NO_E4; ++missing)
        if (!is_caught((edge)missing)) CHECK_EQ(missing, EVERY_EDGE);
}

TEST_TABLE(cuda_sim) {
    TEST_CASE(copies_there_and_back),
    TEST_CASE(calls_return_before_the_copy),
    TEST_CASE(an_event_is_a_snapshot),
    TEST_CASE(pageable_memory_is_staged_at_the_call),
    TEST_CASE(memcpy_from_pageable_memory_comes_back_early),
    TEST_CASE(the_legacy_stream_waits_and_is_waited_for),
    TEST_CASE(each_thread_has_a_stream),
    TEST_CASE(device_memory_faults_on_the_host),
    TEST_CASE(the_nth_call_fails_once),
    TEST_CASE(sticky_errors_stick),
    TEST_CASE(a_child_has_no_runtime),
    TEST_CASE(without_driver_or_device),
    TEST_CASE(devices_are_told_apart),
    TEST_CASE(registrations_have_limits),
    TEST_CASE(misuse_is_counted),
    TEST_CASE(unsafe_calls_spoil_a_capture),
    TEST_CASE(waiting_for_the_outside_spoils_a_capture),
    TEST_CASE(a_graph_runs_what_was_captured),
    TEST_CASE(the_model_keeps_time),
    TEST_CASE(work_may_be_gathered),
    TEST_CASE(drops_what_it_is_told_to),
    TEST_CASE(the_engine_reads_through_an_alias),
    TEST_CASE(every_edge_is_enough),
    TEST_CASE(a_missing_edge_is_caught),
    TEST_END
};
