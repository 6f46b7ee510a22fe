/* spdl_cuda.h: slots, memory, the iterator, streams, devices. All of it runs on the stand-in for
   CUDA and, built with CUDA_REAL, on a device; failures are in test_cuda_fault.c. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#define SPDL_CUDA_IMPLEMENTATION
#include "../spdl_cuda.h"

#include "cuda_flow.h"

#ifdef CUDA_REAL
#define SIM(statement)
#else
#include "cudart_sim.h"
#define SIM(statement) statement
#endif

enum { ROUNDS = TEST_SANITIZED ? 60 : 300 };

/* What every test ends with: nothing is left, nothing went wrong. */
static void finish(void) {
    SIM(sim_stats stats);
    CHECK_EQ(kit_wrong(), 0);
    CHECK_EQ(cudaGetLastError(), cudaSuccess);
    SIM(sim_get_stats(&stats));
    SIM(CHECK_EQ(stats.violations, 0));
    SIM(CHECK_STR(sim_violation(), ""));
    SIM(CHECK_EQ(stats.mode_depth, 0));
    SIM(CHECK_EQ(sim_leaks(), 0));
    SIM(sim_reset());
}

static spdl_cuda *open_small(int device_slots) {
    spdl_cuda_desc desc = flow_desc(FLOW_SLOT);
    desc.device_slots = device_slots;
    return flow_open(&desc);
}

static spdl_result open_iter(spdl_cuda_iter **it, spdl_next_fn next, void *source,
                             spdl_error *error) {
    const spdl_cuda_iter_desc desc = { .next = next, .source = source, .error = error };
    return spdl_cuda_iter_open(it, &desc);
}

static spdl_cuda_batch sent(spdl_cuda *cuda, uint64_t seed) {
    spdl_cuda_batch batch;
    REQUIRE(flow_send(cuda, &batch, 1000, seed, SPDL_FOREVER) == SPDL_OK);
    return batch;
}

/* ---- slots ---- */

static void devices_are_counted(void) {
    spdl_error error;
    memset(&error, 0xff, sizeof error);
    CHECK(spdl_cuda_count(&error) > 0);
    CHECK_EQ(error.result, SPDL_OK);
    CHECK_STR(error.text, "");
    CHECK(spdl_cuda_count(NULL) > 0);
    CHECK_EQ(cudaGetLastError(), cudaSuccess);
}

static int count_with(const char *library, spdl_error *error) {
    if (library == NULL) CHECK_EQ(unsetenv("SPDL_LIBCUDA"), 0);
    else CHECK_EQ(setenv("SPDL_LIBCUDA", library, 1), 0);
    return spdl_cuda_count(error);
}

/* Without a name for it, or with an empty one, the driver is libcuda.so.1, where there is one. */
static void the_driver_has_a_name(void) {
    spdl_error named, empty, unset;
    const int count = count_with("libcuda.so.1", &named);
    CHECK_EQ(count_with("", &empty), count);
    CHECK_EQ(count_with(NULL, &unset), count);
    CHECK_STR(empty.text, named.text);
    CHECK_STR(unset.text, named.text);
    if (count == 0) CHECK(named.text[0] != '\0');
}

/* A library that is no driver, or an old one. */
static void a_driver_without_its_functions_is_told(void) {
    spdl_cuda_desc desc = flow_desc(FLOW_SLOT);
    spdl_cuda *cuda = (spdl_cuda *)&desc;
    spdl_error error;
    CHECK_EQ(count_with("libc.so.6", &error), 0);
    CHECK(strstr(error.text, "lacks functions") != NULL);
    desc.error = &error;
    CHECK_EQ(spdl_cuda_open(&cuda, &desc), SPDL_E_NOT_FOUND);
    CHECK(cuda == NULL && strstr(error.text, "lacks functions") != NULL);
}

static void every_size_arrives(void) {
    static const size_t sizes[] = { 0, 1, 2, 255, 256, 257, 4095, 4096, 9999, FLOW_SLOT - 1,
                                    FLOW_SLOT };
    spdl_cuda *cuda = open_small(0);
    void *stream = kit_stream(false);
    size_t i, bytes = 0;
    for (i = 0; i < sizeof sizes / sizeof sizes[0]; ++i) {
        CHECK_EQ(flow_batch(cuda, stream, sizes[i], i), SPDL_OK);
        bytes += sizes[i];
    }
    CHECK_EQ(kit_wrong(), 0);
    CHECK_EQ(flow_stats(cuda).batches, sizeof sizes / sizeof sizes[0]);
    CHECK_EQ(flow_stats(cuda).bytes, bytes);
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    finish();
}

static void what_does_not_fit_is_refused(void) {
    static unsigned char data[FLOW_SLOT + 1];
    spdl_cuda *cuda = open_small(0);
    spdl_cuda_view view = { .data = data, .bytes = FLOW_SLOT + 1 };
    spdl_cuda_batch batch;
    spdl_error error;
    CHECK_EQ(spdl_cuda_send(cuda, &view, &batch, SPDL_FOREVER), SPDL_E_LIMIT);
    spdl_cuda_error(cuda, &error);
    CHECK(strstr(error.text, "16385 bytes") != NULL && strstr(error.text, "16384") != NULL);
    view.data = NULL;
    view.bytes = 1;
    CHECK_EQ(spdl_cuda_send(cuda, &view, &batch, SPDL_FOREVER), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_send(cuda, NULL, &batch, SPDL_FOREVER), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_send(cuda, &view, NULL, SPDL_FOREVER), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_send(NULL, &view, &batch, SPDL_FOREVER), SPDL_E_INVALID);
    CHECK_EQ(flow_stats(cuda).batches, 0);
    CHECK_EQ(flow_stats(cuda).device_free, 3);
    view.bytes = 0; /* nothing of nothing is a batch */
    CHECK_EQ(spdl_cuda_send(cuda, &view, &batch, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(batch.bytes, 0);
    CHECK_EQ(flow_stats(cuda).pageable_bytes, 0);
    CHECK_EQ(spdl_cuda_arrived(&batch, SPDL_FOREVER), SPDL_OK);
    spdl_cuda_batch_free(&batch);
    CHECK_EQ(flow_stats(cuda).device_free, 3);
    spdl_cuda_close(cuda);
    finish();
}

static void any_other_order_is_refused(void) {
    spdl_cuda *cuda = open_small(4);
    void *stream = kit_stream(false), *other = kit_stream(false);
    spdl_cuda_batch batch = sent(cuda, 1), stale, next;
    CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_E_INVALID); /* not ready there */
    CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
    CHECK_EQ(spdl_cuda_done(&batch, other), SPDL_E_INVALID);
    stale = batch;
    CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
    CHECK_EQ(spdl_cuda_done(&stale, stream), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_ready(&stale, stream), SPDL_E_INVALID);
    spdl_cuda_batch_free(&stale); /* ignored */
    next = sent(cuda, 2);
    CHECK_EQ(spdl_cuda_done(&stale, stream), SPDL_E_INVALID); /* not even if the slot is the same */
    spdl_cuda_batch_free(&next);
    spdl_cuda_batch_free(NULL);
    CHECK_EQ(flow_stats(cuda).device_free, 4);
    spdl_cuda_close(cuda);
    spdl_cuda_close(NULL);
    kit_stream_free(stream);
    kit_stream_free(other);
    finish();
}

/* A second ready on a stream changes nothing, a second done is refused while others read. */
static void a_stream_reads_a_batch_once(void) {
    spdl_cuda *cuda = open_small(2);
    void *stream = kit_stream(false), *other = kit_stream(false);
    spdl_cuda_batch batch = sent(cuda, 1);
    spdl_error error;
    CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
    CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
    CHECK_EQ(spdl_cuda_ready(&batch, other), SPDL_OK);
    flow_read(&batch, stream, 1);
    flow_read(&batch, other, 1);
    CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
    CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_E_INVALID);
    spdl_cuda_error(cuda, &error);
    CHECK(strstr(error.text, "not made ready on this stream") != NULL);
    CHECK_EQ(flow_stats(cuda).device_free, 1); /* the other one still reads it */
    CHECK_EQ(spdl_cuda_done(&batch, other), SPDL_OK);
    CHECK_EQ(flow_stats(cuda).device_free, 2);
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    kit_stream_free(other);
    finish();
}

static void several_streams_read_a_batch(void) {
    spdl_cuda *cuda = open_small(2);
    void *streams[SPDL_CUDA_MAX_READERS + 1];
    uint64_t round;
    int i;
    kit_disorder(test_seed());
    for (i = 0; i <= SPDL_CUDA_MAX_READERS; ++i) streams[i] = kit_stream(i % 2 == 0);
    for (round = 0; round < ROUNDS / 4; ++round) {
        const int readers = 1 + (int)(round % SPDL_CUDA_MAX_READERS);
        spdl_cuda_batch batch = sent(cuda, round);
        for (i = 0; i < readers; ++i) {
            CHECK_EQ(spdl_cuda_ready(&batch, streams[i]), SPDL_OK);
            flow_read(&batch, streams[i], round);
        }
        if (readers == SPDL_CUDA_MAX_READERS)
            CHECK_EQ(spdl_cuda_ready(&batch, streams[readers]), SPDL_E_LIMIT);
        for (i = readers - 1; i >= 0; --i) CHECK_EQ(spdl_cuda_done(&batch, streams[i]), SPDL_OK);
        CHECK_EQ(spdl_cuda_done(&batch, streams[0]), SPDL_E_INVALID);
    }
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_close(cuda);
    for (i = 0; i <= SPDL_CUDA_MAX_READERS; ++i) kit_stream_free(streams[i]);
    finish();
}

typedef struct pair {
    spdl_cuda_batch batch;
    void *stream[2];
    pthread_barrier_t meet;
} pair;

/* Reads the batch of each round on its stream. */
static void *reads_in_turns(void *arg) {
    pair *p = (pair *)arg;
    uint64_t round;
    for (round = 0; round < ROUNDS; ++round) {
        pthread_barrier_wait(&p->meet);
        CHECK_EQ(spdl_cuda_ready(&p->batch, p->stream[1]), SPDL_OK);
        flow_read(&p->batch, p->stream[1], round);
        pthread_barrier_wait(&p->meet);
        CHECK_EQ(spdl_cuda_done(&p->batch, p->stream[1]), SPDL_OK);
        pthread_barrier_wait(&p->meet);
    }
    return NULL;
}

/* Each thread with a stream of its own: the last one returns the slot, once. */
static void threads_share_a_batch(void) {
    spdl_cuda *cuda = open_small(2);
    pthread_t thread;
    uint64_t round;
    pair p;
    int i;
    for (i = 0; i < 2; ++i) p.stream[i] = kit_stream(false);
    REQUIRE(pthread_barrier_init(&p.meet, NULL, 2) == 0);
    REQUIRE(pthread_create(&thread, NULL, reads_in_turns, &p) == 0);
    for (round = 0; round < ROUNDS; ++round) {
        p.batch = sent(cuda, round);
        pthread_barrier_wait(&p.meet);
        CHECK_EQ(spdl_cuda_ready(&p.batch, p.stream[0]), SPDL_OK);
        flow_read(&p.batch, p.stream[0], round);
        pthread_barrier_wait(&p.meet);
        CHECK_EQ(spdl_cuda_done(&p.batch, p.stream[0]), SPDL_OK);
        pthread_barrier_wait(&p.meet);
        CHECK_EQ(flow_stats(cuda).device_free, 2);
    }
    pthread_join(thread, NULL);
    pthread_barrier_destroy(&p.meet);
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_close(cuda);
    for (i = 0; i < 2; ++i) kit_stream_free(p.stream[i]);
    finish();
}

static void full_slots_are_back_pressure(void) {
    spdl_cuda *cuda = open_small(2);
    void *stream = kit_stream(false);
    spdl_cuda_batch batch[2], third;
    int i;
    for (i = 0; i < 2; ++i) batch[i] = sent(cuda, (uint64_t)i);
    CHECK_EQ(flow_send(cuda, &third, 1000, 2, 0), SPDL_TIMEOUT);
    CHECK_EQ(flow_send(cuda, &third, 1000, 2, SPDL_SECONDS(0.01)), SPDL_TIMEOUT);
    CHECK_EQ(flow_stats(cuda).device_free, 0);
    CHECK(flow_stats(cuda).wait_slot_ns > 5000000);
    spdl_cuda_batch_free(&batch[0]); /* read by nobody */
    CHECK_EQ(flow_send(cuda, &third, 1000, 2, SPDL_SECONDS(5)), SPDL_OK);
    CHECK_EQ(spdl_cuda_ready(&third, stream), SPDL_OK);
    flow_read(&third, stream, 2);
    spdl_cuda_batch_free(&third); /* done with on its stream */
    spdl_cuda_batch_free(&batch[1]);
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    finish();
}

#ifndef CUDA_REAL
/* While a copy is held its number is taken; with the copy it comes back, also for who never
   waits. */
static void a_number_comes_back_with_its_copy(void) {
    spdl_cuda *cuda = open_small(1);
    spdl_cuda_batch batch, next;
    sim_hold();
    batch = sent(cuda, 0);
    spdl_cuda_batch_free(&batch);
    CHECK_EQ(flow_send(cuda, &next, 1000, 1, 0), SPDL_TIMEOUT);
    CHECK_EQ(flow_send(cuda, &next, 1000, 1, SPDL_SECONDS(0.02)), SPDL_TIMEOUT);
    CHECK(flow_stats(cuda).wait_copy_ns > 10000000);
    sim_step(1);
    CHECK_EQ(flow_send(cuda, &next, 1000, 1, SPDL_SECONDS(5)), SPDL_OK);
    spdl_cuda_batch_free(&next);
    sim_release();
    CHECK_EQ(kit_wrong(), 0); /* the copy is done */
    CHECK_EQ(flow_send(cuda, &next, 1000, 2, 0), SPDL_OK);
    spdl_cuda_batch_free(&next);
    spdl_cuda_close(cuda);
    finish();
}

static void arrived_asks_and_waits(void) {
    spdl_cuda *cuda = open_small(2);
    spdl_cuda_batch batch;
    sim_hold();
    batch = sent(cuda, 1);
    CHECK_EQ(spdl_cuda_arrived(&batch, 0), SPDL_TIMEOUT);
    CHECK_EQ(spdl_cuda_arrived(&batch, SPDL_SECONDS(0.01)), SPDL_TIMEOUT);
    sim_release();
    CHECK_EQ(spdl_cuda_arrived(&batch, SPDL_SECONDS(5)), SPDL_OK);
    CHECK_EQ(flow_reap_one(cuda, 0), SPDL_EMPTY); /* its memory came back by that */
    sim_poison(cudaErrorIllegalAddress);
    CHECK_EQ(spdl_cuda_arrived(&batch, 0), SPDL_OK); /* known: without a call of CUDA */
    sim_poison(cudaSuccess);
    spdl_cuda_batch_free(&batch);
    CHECK_EQ(spdl_cuda_arrived(&batch, 0), SPDL_E_INVALID);
    spdl_cuda_close(cuda);
    finish();
}
#endif

/* ---- order ---- */

/* Every kind of stream, in any mixture, with everything late. */
static void order_holds_on_any_stream(void) {
    spdl_cuda *cuda = open_small(2);
    void *mine = kit_stream(false), *blocking = kit_stream(true);
    void *const streams[] = { mine, blocking, NULL, cudaStreamLegacy, cudaStreamPerThread };
    uint64_t state = test_seed(), i;
    kit_disorder(state);
    for (i = 0; i < ROUNDS; ++i) {
        const size_t which = test_random(&state) % (sizeof streams / sizeof streams[0]);
        REQUIRE(flow_batch(cuda, streams[which], FLOW_SLOT - 8 * (i % 3), i) == SPDL_OK);
    }
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_close(cuda);
    kit_stream_free(mine);
    kit_stream_free(blocking);
    finish();
}

typedef struct sender {
    spdl_cuda *cuda;
    uint64_t first;
    pthread_t thread;
} sender;

static void *sends(void *arg) {
    sender *s = (sender *)arg;
    void *stream = kit_stream(false);
    uint64_t i;
    for (i = 0; i < ROUNDS / 4; ++i)
        CHECK_EQ(flow_batch(s->cuda, stream, FLOW_SLOT, s->first + i), SPDL_OK);
    SIM(cudaStreamSynchronize((cudaStream_t)stream));
    kit_stream_free(stream);
    return NULL;
}

/* Reaps beside the senders, with timeouts that end. */
static void *reaps(void *arg) {
    sender *s = (sender *)arg;
    while (!__atomic_load_n(&s->first, __ATOMIC_RELAXED)) {
        CHECK(flow_reap_one(s->cuda, SPDL_SECONDS(0.0001)) >= 0);
        CHECK(flow_stats(s->cuda).device_free <= 3);
    }
    return NULL;
}

static void any_thread_may_send(void) {
    spdl_cuda *cuda = open_small(3);
    sender senders[4], reaper = { 0 };
    int i;
    reaper.cuda = cuda;
    kit_disorder(test_seed());
    CHECK_EQ(kit_wrong(), 0);
    for (i = 0; i < 4; ++i) {
        senders[i].cuda = cuda;
        senders[i].first = (uint64_t)i * 100000;
        REQUIRE(pthread_create(&senders[i].thread, NULL, sends, &senders[i]) == 0);
    }
    REQUIRE(pthread_create(&reaper.thread, NULL, reaps, &reaper) == 0);
    for (i = 0; i < 4; ++i) pthread_join(senders[i].thread, NULL);
    __atomic_store_n(&reaper.first, 1, __ATOMIC_RELAXED);
    pthread_join(reaper.thread, NULL);
    CHECK_EQ(kit_wrong(), 0);
    CHECK_EQ(flow_stats(cuda).batches, (uint64_t)ROUNDS / 4 * 4);
    spdl_cuda_close(cuda);
    finish();
}

static void errors_of_the_caller_stay(void) {
    spdl_cuda *cuda = open_small(2);
    void *stream = kit_stream(false);
    uint64_t i;
    int device = 0;
    kit_disorder(test_seed());
    CHECK(cudaSetDevice(1000) != cudaSuccess);
    for (i = 0; i < 20; ++i) CHECK_EQ(flow_batch(cuda, stream, 5000, i), SPDL_OK);
    CHECK_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
    for (i = 0; i < 20; ++i) {
        CHECK_EQ(flow_batch(cuda, stream, 5000, i), SPDL_OK);
        CHECK_EQ(cudaGetLastError(), cudaSuccess); /* nothing of ours, such as "not ready" */
    }
    CHECK_EQ(cudaGetDevice(&device), cudaSuccess);
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    finish();
}

static void captures_go_on_undisturbed(void) {
    spdl_cuda *cuda = open_small(2);
    cudaStream_t captured = (cudaStream_t)kit_stream(false);
    cudaGraph_t graph = NULL;
    spdl_cuda_batch batch;
    void *stream = kit_stream(false);
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    uint64_t i;
    CHECK_EQ(flow_batch(cuda, stream, 1000, 0), SPDL_OK);
    batch = sent(cuda, 1);
    REQUIRE(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal) == cudaSuccess);
    for (i = 2; i < 12; ++i) {
        spdl_cuda_batch other = sent(cuda, i); /* blocks are mapped and pinned, too */
        CHECK_EQ(spdl_cuda_ready(&other, stream), SPDL_OK);
        CHECK_EQ(spdl_cuda_done(&other, stream), SPDL_OK);
    }
    CHECK_EQ(spdl_cuda_ready(&batch, captured), SPDL_E_INVALID);
    CHECK_EQ(cudaStreamIsCapturing(captured, &status), cudaSuccess);
    CHECK_EQ(status, cudaStreamCaptureStatusActive);
    CHECK_EQ(cudaStreamEndCapture(captured, &graph), cudaSuccess);
    CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
    CHECK_EQ(spdl_cuda_ready(&batch, captured), SPDL_OK);
    CHECK_EQ(spdl_cuda_done(&batch, captured), SPDL_OK);
    spdl_cuda_close(cuda);
    kit_stream_free(captured);
    kit_stream_free(stream);
    finish();
}

/* What a captured stream records never happens: its end is refused, and can be repeated. */
static void a_captured_stream_ends_nothing(void) {
    spdl_cuda_desc desc = flow_desc(FLOW_SLOT);
    cudaStream_t stream = (cudaStream_t)kit_stream(false);
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaGraph_t graph = NULL;
    spdl_cuda_output *out = NULL;
    spdl_cuda_batch batch;
    spdl_error error;
    spdl_cuda *cuda;
    desc.output_bytes = 100;
    cuda = flow_open(&desc);
    batch = sent(cuda, 1);
    CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
    CHECK_EQ(spdl_cuda_output_get(cuda, stream, &out, SPDL_FOREVER), SPDL_OK);
    REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed) == cudaSuccess);
    CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_output_send(out), SPDL_E_INVALID);
    spdl_cuda_error(cuda, &error);
    CHECK(strstr(error.text, "captured") != NULL);
    CHECK_EQ(cudaStreamIsCapturing(stream, &status), cudaSuccess);
    CHECK_EQ(status, cudaStreamCaptureStatusActive);
    CHECK_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
    flow_read(&batch, stream, 1);
    CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
    CHECK_EQ(spdl_cuda_output_send(out), SPDL_OK);
    CHECK_EQ(spdl_cuda_output_wait(out, SPDL_FOREVER), SPDL_OK);
    spdl_cuda_output_free(out);
    CHECK_EQ(flow_stats(cuda).device_free, 3);
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    finish();
}

/* The legacy stream would wait for a blocking stream that is being captured, and spoil that. */
#ifdef CUDA_REAL
/* A stream of a context that the program has made itself, on the same device. */
static void streams_of_other_contexts_are_refused(void) {
    int (*make)(void **context, unsigned flags, int device) = NULL;
    int (*make_stream)(void **stream, unsigned flags) = NULL;
    int (*end)(void *context) = NULL;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context = NULL, *stream = NULL;
    spdl_cuda *cuda = open_small(2);
    spdl_cuda_batch batch = sent(cuda, 1);
    spdl_error error;
    REQUIRE(driver != NULL);
    *(void **)(void *)&make = dlsym(driver, "cuCtxCreate_v2");
    *(void **)(void *)&make_stream = dlsym(driver, "cuStreamCreate");
    *(void **)(void *)&end = dlsym(driver, "cuCtxDestroy_v2");
    REQUIRE(make != NULL && make_stream != NULL && end != NULL);
    REQUIRE(make(&context, 0, 0) == 0 && make_stream(&stream, 1) == 0);
    CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_E_INVALID);
    spdl_cuda_error(cuda, &error);
    CHECK(strstr(error.text, "context") != NULL);
    CHECK_EQ(end(context), 0); /* which was current */
    CHECK_EQ(cudaSetDevice(0), cudaSuccess);
    spdl_cuda_batch_free(&batch);
    spdl_cuda_close(cuda);
    finish();
}
#endif

static void the_legacy_stream_spoils_no_capture(void) {
    spdl_cuda *cuda = open_small(2);
    cudaStream_t captured = (cudaStream_t)kit_stream(true);
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaGraph_t graph = NULL;
    spdl_cuda_batch batch = sent(cuda, 1);
    spdl_error error;
    REQUIRE(cudaStreamBeginCapture(captured, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK_EQ(spdl_cuda_ready(&batch, cudaStreamLegacy), SPDL_E_INVALID);
    spdl_cuda_error(cuda, &error);
    CHECK(strstr(error.text, "captured") != NULL);
    CHECK_EQ(cudaStreamIsCapturing(captured, &status), cudaSuccess);
    CHECK_EQ(status, cudaStreamCaptureStatusActive);
    CHECK_EQ(cudaStreamEndCapture(captured, &graph), cudaSuccess);
    CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
    CHECK_EQ(spdl_cuda_ready(&batch, cudaStreamLegacy), SPDL_OK);
    CHECK_EQ(spdl_cuda_done(&batch, cudaStreamLegacy), SPDL_OK);
    spdl_cuda_close(cuda);
    kit_stream_free(captured);
    finish();
}

/* ---- memory ---- */

static void arenas_are_read_where_they_are(void) {
    flow_source s;
    void *stream = kit_stream(false);
    spdl_cuda *cuda = open_small(3);
    spdl_cuda_batch batch;
    spdl_cuda_view view;
    void *item = NULL;
    kit_disorder(test_seed());
    flow_source_open(&s, 5, ROUNDS);
    REQUIRE(spdl_cuda_adopt(cuda, s.seen, 5 * FLOW_SLOT) == SPDL_OK);
    CHECK_EQ(flow_reap_one(cuda, SPDL_FOREVER), SPDL_EMPTY);
    while (s.next < s.count) {
        while (flow_next(&s, &item, 0) == SPDL_TIMEOUT)
            CHECK_EQ(flow_reap_one(cuda, SPDL_FOREVER), SPDL_OK);
        memset(&view, 0, sizeof view);
        CHECK_EQ(flow_view(item, &view), SPDL_OK);
        view.release = flow_item_free;
        view.item = item;
        REQUIRE(spdl_cuda_send(cuda, &view, &batch, SPDL_FOREVER) == SPDL_OK);
        CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
        flow_read(&batch, stream, (uint64_t)(uintptr_t)batch.user);
        CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
    }
    CHECK_EQ(kit_wrong(), 0);
    CHECK_EQ(flow_stats(cuda).pageable_bytes, 0);
    CHECK_EQ(flow_stats(cuda).pinned_bytes, 5 * FLOW_SLOT);
    spdl_cuda_close(cuda);
    CHECK_EQ(s.released, s.next);
    flow_source_close(&s);
    kit_stream_free(stream);
    finish();
}

static void count_release(void *item) { ++*(int *)item; }

/* Who gives the slots back may wait for this memory. */
static void a_send_that_waits_releases_memory(void) {
    spdl_cuda *cuda = open_small(2);
    void *stream = kit_stream(false), *data = NULL;
    spdl_cuda_view view = { .bytes = FLOW_SLOT, .release = count_release };
    spdl_cuda_batch batch[2], third;
    int released = 0, i;
    CHECK_EQ(cudaHostAlloc(&data, FLOW_SLOT, cudaHostAllocDefault), cudaSuccess);
    view.data = data;
    view.item = &released;
    kit_fill(data, FLOW_SLOT, 5);
    for (i = 0; i < 2; ++i) {
        CHECK_EQ(spdl_cuda_send(cuda, &view, &batch[i], SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(spdl_cuda_ready(&batch[i], stream), SPDL_OK);
        flow_read(&batch[i], stream, 5);
    }
    CHECK_EQ(kit_wrong(), 0); /* both copies are done */
    CHECK_EQ(spdl_cuda_send(cuda, &view, &third, SPDL_SECONDS(0.01)), SPDL_TIMEOUT);
    CHECK_EQ(released, 2);
    for (i = 0; i < 2; ++i) CHECK_EQ(spdl_cuda_done(&batch[i], stream), SPDL_OK);
    spdl_cuda_close(cuda);
    CHECK_EQ(cudaFreeHost(data), cudaSuccess);
    kit_stream_free(stream);
    finish();
}

/* Sent as it is, told once, and released like any other. */
static void other_memory_is_sent_slower(void) {
    unsigned char *data = (unsigned char *)malloc(FLOW_SLOT);
    int released = 0, i;
    spdl_cuda *cuda = open_small(2);
    void *stream = kit_stream(false);
    spdl_cuda_view view = { .data = data, .bytes = FLOW_SLOT, .release = count_release,
                            .item = &released };
    spdl_cuda_batch batch;
    flow_lines = 0;
    kit_fill(data, FLOW_SLOT, 9);
    for (i = 1; i <= 3; ++i) {
        CHECK_EQ(spdl_cuda_send(cuda, &view, &batch, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
        flow_read(&batch, stream, 9);
        CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
        flow_reap(cuda);
        CHECK_EQ(released, i);
    }
    CHECK_EQ(kit_wrong(), 0);
    CHECK_EQ(flow_stats(cuda).pageable_bytes, 3 * FLOW_SLOT);
    CHECK_EQ(flow_lines, 1);
    CHECK(strstr(flow_line, "pinned") != NULL);
    spdl_cuda_close(cuda);
    free(data);
    kit_stream_free(stream);
    finish();
}

/* Sends one slot of the source's memory and looks at it on the device. */
static void send_seen(spdl_cuda *cuda, void *stream, const unsigned char *data, uint64_t seed) {
    const spdl_cuda_view view = { .data = data, .bytes = FLOW_SLOT };
    spdl_cuda_batch batch;
    REQUIRE(spdl_cuda_send(cuda, &view, &batch, SPDL_FOREVER) == SPDL_OK);
    CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
    flow_read(&batch, stream, seed);
    CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
    flow_reap(cuda);
}

/* The driver knows what the program has pinned itself. A view over the border of two registrations
   takes two copies. */
static void memory_that_others_pinned_is_known(void) {
    spdl_cuda *cuda = open_small(2);
    void *stream = kit_stream(false), *mine = NULL;
    flow_source s;
    flow_lines = 0;
    flow_source_open(&s, 4, 0);
    CHECK_EQ(cudaHostAlloc(&mine, FLOW_SLOT, cudaHostAllocDefault), cudaSuccess);
    kit_fill(mine, FLOW_SLOT, 3);
    kit_fill(s.written, 4 * FLOW_SLOT, 4);
    send_seen(cuda, stream, (unsigned char *)mine, 3);
    CHECK_EQ(cudaHostRegister(s.seen, FLOW_SLOT / 2, cudaHostRegisterDefault), cudaSuccess);
    CHECK_EQ(cudaHostRegister(s.seen + FLOW_SLOT / 2, FLOW_SLOT / 2, cudaHostRegisterDefault),
             cudaSuccess);
    send_seen(cuda, stream, s.seen, 4);
    CHECK_EQ(spdl_cuda_adopt(cuda, s.seen, FLOW_SLOT), SPDL_OK);
    send_seen(cuda, stream, s.seen, 4);
    CHECK_EQ(flow_stats(cuda).pageable_bytes, 0);
    CHECK_EQ(flow_stats(cuda).pinned_bytes, 0); /* by the spdl_cuda */
    CHECK_EQ(flow_lines, 0);
    CHECK_EQ(cudaHostUnregister(s.seen + FLOW_SLOT / 2), cudaSuccess);
    CHECK_EQ(cudaHostUnregister(s.seen), cudaSuccess);
    send_seen(cuda, stream, s.seen, 4); /* it is pageable again */
    CHECK_EQ(flow_stats(cuda).pageable_bytes, FLOW_SLOT);
    CHECK_EQ(flow_lines, 1);
    CHECK_EQ(kit_wrong(), 0);
    CHECK_EQ(cudaFreeHost(mine), cudaSuccess);
    spdl_cuda_close(cuda);
    flow_source_close(&s);
    kit_stream_free(stream);
    finish();
}

/* Two on one device: the second finds the arena pinned, until the first lets go of it. */
static void two_adopt_one_arena(void) {
    spdl_cuda *first = open_small(2), *second = open_small(2);
    void *stream = kit_stream(false);
    flow_source s;
    int i;
    flow_source_open(&s, 4, 0);
    kit_fill(s.written, 4 * FLOW_SLOT, 4);
    CHECK_EQ(spdl_cuda_adopt(first, s.seen, 4 * FLOW_SLOT), SPDL_OK);
    CHECK_EQ(spdl_cuda_adopt(second, s.seen, 4 * FLOW_SLOT), SPDL_OK);
    CHECK_EQ(spdl_cuda_adopt(second, s.seen + FLOW_SLOT, FLOW_SLOT), SPDL_OK); /* a part of it */
    for (i = 0; i < 6; ++i) send_seen(i % 2 == 0 ? first : second, stream, s.seen, 4);
    CHECK_EQ(flow_stats(first).pageable_bytes + flow_stats(second).pageable_bytes, 0);
    CHECK_EQ(flow_stats(second).pinned_bytes, 0);
    spdl_cuda_close(first);
    send_seen(second, stream, s.seen, 4);
    CHECK_EQ(flow_stats(second).pageable_bytes, FLOW_SLOT);
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_close(second);
    flow_source_close(&s);
    kit_stream_free(stream);
    finish();
}

/* Two arenas side by side: what lies across their border takes two copies. */
static void arenas_may_touch(void) {
    spdl_cuda *cuda = open_small(2);
    void *stream = kit_stream(false);
    flow_source s;
    int i;
    flow_source_open(&s, 2, 0);
    for (i = 0; i < 2; ++i)
        CHECK_EQ(spdl_cuda_adopt(cuda, s.seen + i * FLOW_SLOT, FLOW_SLOT), SPDL_OK);
    for (i = 0; i < 3; ++i) { /* the first, both, the second */
        unsigned char *data = s.written + i * FLOW_SLOT / 2;
        kit_fill(data, FLOW_SLOT, (uint64_t)i);
        send_seen(cuda, stream, data, (uint64_t)i);
        CHECK_EQ(kit_wrong(), 0);
        SIM(sim_stats stats);
        SIM(sim_get_stats(&stats));
        SIM(CHECK_EQ(stats.copies, i < 1 ? 1 : i + 2));
    }
    CHECK_EQ(flow_stats(cuda).pageable_bytes, 0);
    spdl_cuda_close(cuda);
    flow_source_close(&s);
    kit_stream_free(stream);
    finish();
}

#ifdef CUDA_REAL
/* It is pinned in pieces of 1 GiB; a view over the border of two takes two copies. */
static void an_arena_beyond_2_gib(void) {
    const size_t gib = (size_t)1 << 30, bytes = 2 * gib + gib / 2;
    unsigned char *arena = (unsigned char *)mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                                                 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    const size_t places[] = { 0, gib - FLOW_SLOT / 2, 2 * gib - 64, bytes - FLOW_SLOT };
    spdl_cuda *cuda = open_small(2);
    void *stream = kit_stream(false);
    size_t i;
    REQUIRE(arena != MAP_FAILED);
    flow_lines = 0;
    CHECK_EQ(spdl_cuda_adopt(cuda, arena, bytes), SPDL_OK);
    CHECK_EQ(flow_stats(cuda).pinned_bytes, bytes);
    CHECK_EQ(flow_lines, 0);
    for (i = 0; i < 4; ++i) {
        kit_fill(arena + places[i], FLOW_SLOT, i);
        send_seen(cuda, stream, arena + places[i], i);
    }
    CHECK_EQ(flow_stats(cuda).pageable_bytes, 0);
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_close(cuda);
    munmap(arena, bytes);
    kit_stream_free(stream);
    finish();
}
#endif

static void adopt_refuses_what_it_cannot_use(void) {
    spdl_error error;
    flow_source s;
    spdl_cuda *cuda = open_small(0), *other = open_small(0);
    int i;
    flow_source_open(&s, 12, 0);
    CHECK_EQ(spdl_cuda_adopt(cuda, NULL, FLOW_SLOT), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_adopt(cuda, s.seen, 0), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_adopt(cuda, s.seen + 1, FLOW_SLOT), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_adopt(cuda, s.seen, SIZE_MAX / 2 + 1), SPDL_E_INVALID);
    for (i = 0; i < 12; ++i)
        if (i != 5) CHECK_EQ(spdl_cuda_adopt(cuda, s.seen + i * FLOW_SLOT, FLOW_SLOT), SPDL_OK);
    CHECK_EQ(spdl_cuda_adopt(other, s.seen, 12 * FLOW_SLOT), SPDL_E_INVALID); /* a part is not */
    spdl_cuda_error(other, &error);
    CHECK(strstr(error.text, "only a part") != NULL);
    CHECK_EQ(flow_stats(cuda).pinned_bytes, 11 * FLOW_SLOT);
    spdl_cuda_close(cuda); /* unpins them */
    CHECK_EQ(spdl_cuda_adopt(other, s.seen, 12 * FLOW_SLOT), SPDL_OK);
    spdl_cuda_close(other);
    flow_source_close(&s);
    finish();
}

/* Blocks that hold a batch, and nothing else; what was given back is given again. */
static void only_what_is_sent_is_pinned(void) {
    static const struct { size_t bytes, align; } request[] = {
        { 1, 8 },          { FLOW_SLOT - 1, SPDL_BLOCK_ALIGN }, { FLOW_SLOT, 64 },
        { FLOW_SLOT, 128 }, { 100, SPDL_BLOCK_ALIGN },          { 100 * FLOW_SLOT, 64 }
    };
    spdl_cuda *cuda = open_small(0);
    const spdl_allocator from = spdl_cuda_allocator(cuda);
    size_t i, pinned;
    void *block[2], *memory;
    for (i = 0; i < sizeof request / sizeof request[0]; ++i) {
        memory = from.alloc_fn(request[i].bytes, request[i].align, from.user);
        REQUIRE(memory != NULL);
        memset(memory, 1, request[i].bytes);
        CHECK_EQ((uintptr_t)memory % request[i].align, 0);
        CHECK_EQ(flow_stats(cuda).pinned_bytes, 0);
        from.free_fn(memory, request[i].bytes, from.user);
    }
    for (i = 0; i < 2; ++i) block[i] = flow_block(cuda);
    pinned = flow_stats(cuda).pinned_bytes;
    CHECK(pinned >= 2 * FLOW_SLOT && pinned <= 2 * (FLOW_SLOT + 4096));
    for (i = 0; i < 2; ++i) flow_block_free(block[i]);
    for (i = 0; i < 2; ++i) block[i] = flow_block(cuda);
    CHECK(block[0] != NULL && block[1] != NULL && block[0] != block[1]);
    CHECK_EQ(flow_stats(cuda).pinned_bytes, pinned);
    for (i = 0; i < 2; ++i) flow_block_free(block[i]);
    spdl_cuda_close(cuda);
    finish();
}

/* A block that was given back serves requests up to its size. What nobody has is not given. */
static void larger_blocks_are_others(void) {
    spdl_cuda *cuda = open_small(0);
    const spdl_allocator from = spdl_cuda_allocator(cuda);
    void *small = from.alloc_fn(FLOW_SLOT, SPDL_BLOCK_ALIGN, from.user), *large;
    size_t pinned;
    REQUIRE(small != NULL);
    from.free_fn(small, FLOW_SLOT, from.user);
    large = from.alloc_fn(3 * FLOW_SLOT, SPDL_BLOCK_ALIGN, from.user);
    REQUIRE(large != NULL && large != small);
    memset(large, 1, 3 * FLOW_SLOT);
    pinned = flow_stats(cuda).pinned_bytes;
    CHECK_EQ(pinned, 4 * FLOW_SLOT);
    CHECK(from.alloc_fn(FLOW_SLOT, SPDL_BLOCK_ALIGN, from.user) == small);
    from.free_fn(large, 3 * FLOW_SLOT, from.user);
    CHECK(from.alloc_fn(2 * FLOW_SLOT, SPDL_BLOCK_ALIGN, from.user) == large);
    CHECK_EQ(flow_stats(cuda).pinned_bytes, pinned);
    CHECK(from.alloc_fn(SIZE_MAX, SPDL_BLOCK_ALIGN, from.user) == NULL);
    CHECK(from.alloc_fn(SIZE_MAX - 8191, SPDL_BLOCK_ALIGN, from.user) == NULL);
    CHECK(from.alloc_fn(SIZE_MAX / 2, SPDL_BLOCK_ALIGN, from.user) == NULL);
    from.free_fn(small, FLOW_SLOT, from.user);
    from.free_fn(large, 2 * FLOW_SLOT, from.user);
    CHECK_EQ(flow_batch(cuda, NULL, 1000, 1), SPDL_OK);
    spdl_cuda_close(cuda);
    finish();
}

/* ---- batches in place ---- */

enum { ITEM = FLOW_SLOT / 8, ITEMS = 8 };

SPDL_FN(place_source, void, void) {
    *out = (void *)(uintptr_t)(spdl_sequence(task) + 1);
    return spdl_sequence(task) == 40 * ITEMS + 3 ? SPDL_END : SPDL_OK;
}

SPDL_FN(place_item, void, void) {
    const uint64_t n = spdl_sequence(task);
    *out = spdl_buffer(task);
    if (*out == NULL) return SPDL_E_NOMEM;
    kit_fill(*out, ITEM, n);
    return SPDL_OK;
}

/* Stages write into the memory that the device reads: no copy by the CPU. */
static void batches_in_place_are_pinned(void) {
    spdl_pipeline_desc workers = { .workers = 3 };
    spdl_cuda_iter_desc iter_desc = { .next = spdl_pipeline_next };
    void *stream = kit_stream(false);
    spdl_cuda_iter *it = NULL;
    spdl_pipeline *p = NULL;
    spdl_cuda *cuda = open_small(3);
    spdl_cuda_batch batch;
    uint64_t n = 0, i;
    kit_disorder(test_seed());
    workers.allocator = spdl_cuda_allocator(cuda);
    REQUIRE(spdl_pipeline_create(&p, &workers, SPDL_STAGES(
        SPDL_SOURCE(place_source), SPDL_PIPE(place_item, .concurrency = 3),
        SPDL_BATCH(ITEMS, .item_bytes = ITEM), SPDL_SINK(2))) == SPDL_OK);
    iter_desc.source = p;
    REQUIRE(spdl_cuda_iter_create(&it, cuda, &iter_desc) == SPDL_OK);
    while (spdl_cuda_iter_next(it, stream, &batch, SPDL_FOREVER) == SPDL_OK) {
        const uint64_t rows = n < 40 * ITEMS ? ITEMS : 3; /* the last one has fewer */
        CHECK_EQ(batch.bytes, ITEM * rows);
        for (i = 0; i < rows; ++i, ++n)
            kit_check(stream, (char *)batch.data + i * ITEM, ITEM, n);
    }
    CHECK_EQ(n, 40 * ITEMS + 3);
    CHECK_EQ(flow_stats(cuda).pageable_bytes, 0);
    spdl_cuda_iter_destroy(it);
    spdl_pipeline_destroy(p);
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    finish();
}

/* Only the pointers of small items go into such a batch. */
static void small_buffers_are_not_pinned(void) {
    spdl_pipeline_desc workers = { .workers = 1 };
    spdl_cuda *cuda = open_small(3);
    spdl_pipeline *p = NULL;
    workers.allocator = spdl_cuda_allocator(cuda);
    REQUIRE(spdl_pipeline_create(&p, &workers, SPDL_STAGES(
        SPDL_SOURCE(place_source), SPDL_PIPE(place_item, .item_bytes = ITEM),
        SPDL_BATCH(4096), SPDL_SINK(2))) == SPDL_OK);
    CHECK_EQ(flow_stats(cuda).pinned_bytes, 0);
    spdl_pipeline_destroy(p);
    spdl_cuda_close(cuda);
    finish();
}

SPDL_FN(plain_source, void, void) {
    static int item;
    *out = &item;
    return spdl_sequence(task) == 3 ? SPDL_END : SPDL_OK;
}

/* What is no batch in place is told, and goes back. */
static void what_is_not_in_place_is_refused(void) {
    spdl_cuda_iter_desc iter_desc = { .next = spdl_pipeline_next };
    spdl_cuda *cuda = open_small(3);
    spdl_cuda_iter *it = NULL;
    spdl_pipeline *p = NULL;
    spdl_cuda_batch batch;
    spdl_error error;
    REQUIRE(spdl_pipeline_create(&p, &(spdl_pipeline_desc){ .workers = 1 }, SPDL_STAGES(
        SPDL_SOURCE(plain_source), SPDL_BATCH(2), SPDL_SINK(2))) == SPDL_OK);
    iter_desc.source = p;
    REQUIRE(spdl_cuda_iter_create(&it, cuda, &iter_desc) == SPDL_OK);
    CHECK_EQ(spdl_cuda_iter_next(it, NULL, &batch, SPDL_FOREVER), SPDL_E_INVALID);
    spdl_cuda_error(cuda, &error);
    CHECK(strstr(error.text, "in place") != NULL);
    spdl_cuda_iter_destroy(it);
    spdl_pipeline_destroy(p);
    spdl_cuda_close(cuda);
    finish();
}

/* ---- the iterator ---- */

typedef struct iter_case {
    int depth, outside, hold, held_at;
} iter_case;

/* The seeds come in order, every one of them; while they are held those again. */
static void iterate(const iter_case *c) {
    flow_source s;
    void *stream = kit_stream(false);
    spdl_cuda *cuda = open_small(4);
    spdl_cuda_iter *it = NULL;
    spdl_cuda_iter_desc desc;
    spdl_cuda_batch batch;
    uint64_t seed = 0, first = 0;
    int i, round;
    kit_disorder(test_seed());
    flow_source_open(&s, 7, ROUNDS);
    s.outside = c->outside;
    REQUIRE(spdl_cuda_adopt(cuda, s.seen, 7 * FLOW_SLOT) == SPDL_OK);
    desc = flow_iter_desc(&s);
    desc.depth = c->depth;
    REQUIRE(spdl_cuda_iter_create(&it, cuda, &desc) == SPDL_OK);
    while (spdl_cuda_iter_next(it, stream, &batch, SPDL_FOREVER) == SPDL_OK) {
        CHECK_EQ((uintptr_t)batch.user, seed);
        CHECK_EQ(batch.bytes, s.bytes);
        flow_read(&batch, stream, seed++);
        if ((int)seed != c->held_at) continue;
        CHECK_EQ(spdl_cuda_iter_hold(it, c->hold), SPDL_OK);
        for (round = 0; round < 5; ++round)
            for (i = 0; i < c->hold; ++i) {
                REQUIRE(spdl_cuda_iter_next(it, stream, &batch, SPDL_FOREVER) == SPDL_OK);
                if (round == 0 && i == 0) first = (uintptr_t)batch.user;
                CHECK_EQ((uintptr_t)batch.user, first + (uint64_t)i);
                flow_read(&batch, stream, (uint64_t)(uintptr_t)batch.user);
                if ((uintptr_t)batch.user >= seed) seed = (uintptr_t)batch.user + 1;
            }
        CHECK_EQ(spdl_cuda_iter_hold(it, 0), SPDL_OK);
    }
    CHECK_EQ(seed, ROUNDS);
    CHECK_EQ(spdl_cuda_iter_hold(it, 5), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_iter_next(it, stream, &batch, SPDL_FOREVER), SPDL_END); /* told again */
    CHECK_EQ(spdl_cuda_iter_next(it, stream, &batch, 0), SPDL_END);
    spdl_cuda_iter_destroy(it);
    CHECK_EQ(s.viewed, s.next);
    CHECK_EQ(kit_wrong(), 0);
    CHECK_EQ(flow_stats(cuda).device_free, 4);
    spdl_cuda_close(cuda);
    flow_source_close(&s);
    kit_stream_free(stream);
    finish();
}

/* Each way in which a desc is wrong has its text; then a right one is taken. */
static void an_iterator_needs_a_right_desc(void) {
    static const struct {
        spdl_next_fn next;
        spdl_cuda_view_fn view;
        int depth;
        const char *text;
    } wrong[] = {
        { NULL, flow_view, 0, "next is NULL" },
        { flow_next, flow_view, -1, "depth must be 0 to" },
        { flow_next, flow_view, 3, "depth must be 0 to" },
    };
    spdl_cuda *cuda = open_small(3);
    spdl_cuda_iter *it;
    spdl_cuda_iter_desc desc;
    spdl_error error;
    flow_source s;
    size_t i;
    flow_source_open(&s, 4, 10);
    for (i = 0; i < sizeof wrong / sizeof wrong[0]; ++i) {
        desc = flow_iter_desc(&s);
        desc.next = wrong[i].next;
        desc.view = wrong[i].view;
        desc.depth = wrong[i].depth;
        desc.error = &error;
        it = (spdl_cuda_iter *)(void *)&desc;
        CHECK_EQ(spdl_cuda_iter_create(&it, cuda, &desc), SPDL_E_INVALID);
        CHECK(it == NULL);
        CHECK_EQ(error.result, SPDL_E_INVALID);
        if (strstr(error.text, wrong[i].text) == NULL) CHECK_STR(error.text, wrong[i].text);
    }
    desc = flow_iter_desc(&s);
    desc.depth = 2;
    REQUIRE(spdl_cuda_iter_create(&it, cuda, &desc) == SPDL_OK);
    CHECK_EQ(spdl_cuda_iter_hold(it, -1), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_iter_hold(it, 4), SPDL_E_INVALID);
    spdl_cuda_error(cuda, &error);
    CHECK(strstr(error.text, "0 to device_slots") != NULL);
    CHECK_EQ(spdl_cuda_iter_hold(it, 3), SPDL_OK);
    spdl_cuda_iter_destroy(it);
    spdl_cuda_close(cuda);
    flow_source_close(&s);
    finish();
}

/* `depth` of them, and by default one for each other slot. */
static void batches_are_sent_ahead(void) {
    int depth;
    for (depth = 0; depth < 4; ++depth) {
        spdl_cuda *cuda = open_small(4);
        spdl_cuda_iter *it = NULL;
        spdl_cuda_iter_desc desc;
        spdl_cuda_batch batch;
        flow_source s;
        uint64_t i;
        flow_source_open(&s, 20, 20);
        desc = flow_iter_desc(&s);
        desc.depth = depth;
        REQUIRE(spdl_cuda_iter_create(&it, cuda, &desc) == SPDL_OK);
        for (i = 1; i <= 3; ++i) {
            flow_reap(cuda); /* as many copies run as there are slots */
            REQUIRE(spdl_cuda_iter_next(it, NULL, &batch, SPDL_FOREVER) == SPDL_OK);
            CHECK_EQ(flow_stats(cuda).batches, i + (depth == 0 ? 3 : (uint64_t)depth));
        }
        spdl_cuda_iter_destroy(it);
        spdl_cuda_close(cuda);
        flow_source_close(&s);
        finish();
    }
}

/* The third item cannot be sent, whatever the reason: those before it come, then the reason, again
   and again. Nothing is left out. */
typedef enum why { TOO_LARGE, NO_DATA, RETURNS } why;
static why third;
static spdl_result third_returns;

static spdl_result view_of_third(void *memory, spdl_cuda_view *view) {
    const spdl_result result = flow_view(memory, view);
    if (((flow_item *)memory)->seed != 2) return result;
    if (third == TOO_LARGE) view->bytes = FLOW_SLOT + 1;
    if (third == NO_DATA) view->data = NULL;
    return third == RETURNS ? third_returns : result;
}

static void an_item_that_cannot_be_sent_ends_it(void) {
    static const struct {
        why third;
        spdl_result returns, result;
        const char *text;
    } cases[] = {
        { TOO_LARGE, SPDL_OK, SPDL_E_INVALID, "slot_bytes is 16384" },
        { NO_DATA, SPDL_OK, SPDL_E_INVALID, "data is NULL" },
        { RETURNS, SPDL_E_IO, SPDL_E_IO, "" },
        { RETURNS, SPDL_E_LIMIT, SPDL_E_LIMIT, "" },
        { RETURNS, SPDL_TIMEOUT, SPDL_E_INVALID, "" },
        { RETURNS, SPDL_FULL, SPDL_E_INVALID, "" },
        { RETURNS, SPDL_END, SPDL_E_INVALID, "" },
        { RETURNS, SPDL_SKIP, SPDL_E_INVALID, "" },
    };
    size_t i;
    for (i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        spdl_cuda *cuda = open_small(3);
        spdl_cuda_iter *it = NULL;
        spdl_cuda_iter_desc desc;
        spdl_error error;
        flow_source s;
        uint64_t count = 0;
        third = cases[i].third;
        third_returns = cases[i].returns;
        flow_source_open(&s, 5, 10);
        desc = flow_iter_desc(&s);
        desc.view = view_of_third;
        REQUIRE(spdl_cuda_iter_create(&it, cuda, &desc) == SPDL_OK);
        CHECK_EQ(flow_train(it, NULL, &count), cases[i].result);
        CHECK_EQ(count, 2);
        CHECK_EQ(flow_train(it, NULL, &count), cases[i].result);
        CHECK_EQ(count, 0);
        CHECK_EQ(s.next, 3); /* no item is taken any more */
        spdl_cuda_error(cuda, &error);
        CHECK(strstr(error.text, cases[i].text) != NULL);
        spdl_cuda_iter_destroy(it);
        CHECK_EQ(flow_stats(cuda).device_free, 3);
        spdl_cuda_close(cuda);
        flow_source_close(&s);
        finish();
    }
}

/* Items of memory that nobody frees; the second is NULL, an item as any other. */
static unsigned char borrowed[4][100];
static int borrowed_freed;

static spdl_result borrowed_next(void *source, void **out, int64_t timeout_ns) {
    int *n = (int *)source;
    (void)timeout_ns;
    if (*n == 4) return SPDL_END;
    *out = *n == 1 ? NULL : borrowed[*n];
    ++*n;
    return SPDL_OK;
}

static spdl_result borrowed_view(void *item, spdl_cuda_view *view) {
    view->data = item != NULL ? item : borrowed[1];
    view->bytes = 100;
    view->user = (void *)(uintptr_t)(((const unsigned char *)view->data - borrowed[0]) / 100);
    return view->data == borrowed[3] ? SPDL_E_IO : SPDL_OK;
}

static void borrowed_free(void *item) {
    CHECK(item != NULL);
    ++borrowed_freed;
}

static void items_may_be_null_and_borrowed(void) {
    int frees;
    for (frees = 0; frees < 2; ++frees) {
        spdl_cuda_iter_desc desc = { .next = borrowed_next, .view = borrowed_view };
        spdl_cuda *cuda = open_small(3);
        spdl_cuda_iter *it = NULL;
        uint64_t count = 0, i;
        int n = 0;
        borrowed_freed = 0;
        for (i = 0; i < 4; ++i) kit_fill(borrowed[i], 100, i);
        desc.source = &n;
        if (frees) desc.free_item = borrowed_free;
        REQUIRE(spdl_cuda_iter_create(&it, cuda, &desc) == SPDL_OK);
        CHECK_EQ(flow_train(it, NULL, &count), SPDL_E_IO);
        CHECK_EQ(count, 3);
        spdl_cuda_iter_destroy(it);
        CHECK_EQ(borrowed_freed, frees ? 3 : 0); /* all but NULL, also the one that was refused */
        CHECK_EQ(kit_wrong(), 0);
        spdl_cuda_close(cuda);
        finish();
    }
}

static spdl_result null_next(void *source, void **out, int64_t timeout_ns) {
    (void)source, (void)timeout_ns;
    *out = NULL;
    return SPDL_OK;
}

/* Where batches in place are expected. */
static void null_is_no_batch(void) {
    const spdl_cuda_iter_desc desc = { .next = null_next };
    spdl_cuda *cuda = open_small(2);
    spdl_cuda_iter *it = NULL;
    spdl_cuda_batch batch;
    spdl_error error;
    REQUIRE(spdl_cuda_iter_create(&it, cuda, &desc) == SPDL_OK);
    CHECK_EQ(spdl_cuda_iter_next(it, NULL, &batch, SPDL_FOREVER), SPDL_E_INVALID);
    spdl_cuda_error(batch.cuda, &error);
    CHECK(strstr(error.text, "not a batch in place") != NULL);
    spdl_cuda_iter_destroy(it);
    spdl_cuda_close(cuda);
    CHECK_EQ(open_iter(&it, null_next, NULL, &error), SPDL_E_INVALID);
    CHECK(it == NULL && strstr(error.text, "first item") != NULL);
    finish();
}

/* A stream that cannot be used gets nothing: the batch is the next one's. */
static void streams_of_an_iterator_may_change(void) {
    cudaStream_t stream[2], captured = (cudaStream_t)kit_stream(false);
    cudaGraph_t graph = NULL;
    spdl_cuda *cuda = open_small(3);
    spdl_cuda_iter *it = NULL;
    spdl_cuda_iter_desc desc;
    spdl_cuda_batch batch;
    flow_source s;
    uint64_t seed;
    int i;
    for (i = 0; i < 2; ++i) stream[i] = (cudaStream_t)kit_stream(false);
    kit_disorder(test_seed());
    flow_source_open(&s, 5, 30);
    REQUIRE(spdl_cuda_adopt(cuda, s.seen, 5 * FLOW_SLOT) == SPDL_OK);
    desc = flow_iter_desc(&s);
    REQUIRE(spdl_cuda_iter_create(&it, cuda, &desc) == SPDL_OK);
    REQUIRE(cudaStreamBeginCapture(captured, cudaStreamCaptureModeRelaxed) == cudaSuccess);
    for (seed = 0; seed < 30; ++seed) {
        const cudaStream_t on = stream[seed / 2 % 2]; /* two on each: it is known, or is not */
        if (seed % 4 == 0) {
            CHECK_EQ(spdl_cuda_iter_next(it, captured, &batch, SPDL_FOREVER), SPDL_E_INVALID);
            CHECK(batch.cuda == cuda && batch.data == NULL);
        }
        REQUIRE(spdl_cuda_iter_next(it, on, &batch, SPDL_FOREVER) == SPDL_OK);
        CHECK_EQ((uintptr_t)batch.user, seed);
        flow_read(&batch, on, seed);
    }
    CHECK_EQ(cudaStreamEndCapture(captured, &graph), cudaSuccess);
    CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
    spdl_cuda_iter_destroy(it);
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_close(cuda);
    flow_source_close(&s);
    for (i = 0; i < 2; ++i) kit_stream_free(stream[i]);
    kit_stream_free(captured);
    finish();
}

/* The iterator is done with its batches, nobody else. */
static void a_lent_batch_is_the_iterators(void) {
    spdl_cuda *cuda = open_small(2);
    spdl_cuda_iter *it = NULL;
    spdl_cuda_iter_desc desc;
    spdl_cuda_batch batch;
    spdl_error error;
    flow_source s;
    uint64_t seed;
    flow_source_open(&s, 4, 6);
    desc = flow_iter_desc(&s);
    REQUIRE(spdl_cuda_iter_create(&it, cuda, &desc) == SPDL_OK);
    for (seed = 0; seed < 6; ++seed) {
        REQUIRE(spdl_cuda_iter_next(it, NULL, &batch, SPDL_FOREVER) == SPDL_OK);
        CHECK_EQ(spdl_cuda_done(&batch, NULL), SPDL_E_INVALID);
        spdl_cuda_error(cuda, &error);
        CHECK(strstr(error.text, "the iterator's") != NULL);
        spdl_cuda_batch_free(&batch); /* ignored */
        CHECK_EQ((uintptr_t)batch.user, seed);
        flow_read(&batch, NULL, seed);
    }
    CHECK_EQ(spdl_cuda_iter_next(it, NULL, &batch, SPDL_FOREVER), SPDL_END);
    CHECK_EQ(flow_stats(cuda).device_free, 2);
    spdl_cuda_iter_destroy(it);
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_close(cuda);
    flow_source_close(&s);
    finish();
}

/* ---- the iterator with a device of its own ---- */

/* Batches of a pipeline, to two streams, each by an iterator; items are in order. */
static void an_iterator_for_each_stream(void) {
    enum { STREAMS = 2 };
    spdl_pipeline *p[STREAMS] = { NULL };
    spdl_cuda_iter *it[STREAMS] = { NULL };
    void *stream[STREAMS];
    spdl_cuda_batch batch;
    uint64_t n[STREAMS] = { 0 }, i;
    spdl_error error;
    int k, round;
    for (k = 0; k < STREAMS; ++k) {
        stream[k] = kit_stream(false);
        REQUIRE(spdl_pipeline_create(&p[k], &(spdl_pipeline_desc){ .workers = 2 }, SPDL_STAGES(
            SPDL_SOURCE(place_source), SPDL_PIPE(place_item, .concurrency = 2),
            SPDL_BATCH(ITEMS, .item_bytes = ITEM), SPDL_SINK(2))) == SPDL_OK);
        REQUIRE(open_iter(&it[k], spdl_pipeline_next, p[k], &error) == SPDL_OK);
    }
    for (round = 0; round <= 40; ++round)
        for (k = 0; k < STREAMS; ++k) {
            REQUIRE(spdl_cuda_iter_next(it[k], stream[k], &batch, SPDL_FOREVER) == SPDL_OK);
            CHECK_EQ(batch.bytes, ITEM * (round < 40 ? ITEMS : 3));
            for (i = 0; i < batch.bytes / ITEM; ++i, ++n[k])
                kit_check(stream[k], (char *)batch.data + i * ITEM, ITEM, n[k]);
        }
    for (k = 0; k < STREAMS; ++k) {
        CHECK_EQ(spdl_cuda_iter_next(it[k], stream[k], &batch, SPDL_FOREVER), SPDL_END);
        CHECK_EQ(flow_stats(batch.cuda).batches, 41);
        CHECK_EQ(kit_wrong(), 0);
        spdl_cuda_iter_destroy(it[k]);
        spdl_pipeline_destroy(p[k]);
        kit_stream_free(stream[k]);
    }
    finish();
}

enum { BLOCK = 16 << 10 };

SPDL_FN(block_item, void, void) {
    const uint64_t n = spdl_sequence(task);
    if (n == 8 * 100 + 3) return SPDL_END;
    *out = spdl_buffer(task);
    if (*out == NULL) return SPDL_E_NOMEM;
    kit_fill(*out, BLOCK, n);
    return SPDL_OK;
}

/* The shortest program: its pipeline knows nothing of a device. Each block is pinned once, and no
   longer than the iterator lives; a second iterator goes on. */
static void blocks_of_a_pipeline_are_pinned(void) {
    spdl_pipeline *p = NULL;
    spdl_cuda_iter *it = NULL;
    spdl_cuda_batch batch;
    spdl_error error;
    void *stream = kit_stream(false);
    uint64_t n = 0;
    int round;
    kit_disorder(test_seed());
    REQUIRE(spdl_pipeline_create(&p, &(spdl_pipeline_desc){ .workers = 2 }, SPDL_STAGES(
        SPDL_SOURCE(block_item), SPDL_BATCH(8, .item_bytes = BLOCK),
        SPDL_SINK(3))) == SPDL_OK);
    for (round = 0; round < 2; ++round) {
        SIM(sim_stats stats);
        size_t pinned = 0;
        REQUIRE(open_iter(&it, spdl_pipeline_next, p, &error) == SPDL_OK);
        while (spdl_cuda_iter_next(it, stream, &batch, SPDL_FOREVER) == SPDL_OK) {
            uint64_t i;
            for (i = 0; i < batch.bytes / BLOCK; ++i, ++n)
                kit_check(stream, (char *)batch.data + i * BLOCK, BLOCK, n);
            pinned = flow_stats(batch.cuda).pinned_bytes;
            CHECK(pinned >= 8 * BLOCK && pinned % 4096 == 0);
            CHECK_EQ(flow_stats(batch.cuda).pageable_bytes, 0);
            if (n == 8 * 20) break;
        }
        if (round == 0) n = 8 * flow_stats(batch.cuda).batches; /* some were sent ahead */
        CHECK(pinned <= 16 * (8 * BLOCK + 4096));
        CHECK_EQ(kit_wrong(), 0);
        spdl_cuda_iter_destroy(it);
        SIM(sim_get_stats(&stats));
        SIM(CHECK_EQ(stats.pins, 0));
    }
    CHECK_EQ(n, 8 * 100 + 3);
    spdl_pipeline_destroy(p);
    kit_stream_free(stream);
    finish();
}

enum { PICTURES = 8 };

/* Each array is contiguous on the device, as kernels want it. */
typedef struct pictures {
    uint32_t label[PICTURES];
    unsigned char pixel[PICTURES][BLOCK];
} pictures;

SPDL_FN(take_pictures, spdl_batch, pictures) {
    size_t i;
    *out = spdl_buffer(task);
    if (*out == NULL) return SPDL_E_NOMEM;
    memset(*out, 0, sizeof **out);
    for (i = 0; i < in->count; ++i) {
        const uint64_t n = ((const spdl_index *)in->items[i])->index;
        (*out)->label[i] = (uint32_t)n;
        kit_fill((*out)->pixel[i], BLOCK, n);
    }
    return SPDL_OK;
}

/* Images and labels of a batch by one copy, filled in place by several workers. */
static void a_struct_of_arrays_is_one_copy(void) {
    spdl_pipeline *p = NULL;
    spdl_cuda_iter *it = NULL;
    spdl_cuda_batch batch;
    spdl_error error;
    spdl_cuda_iter_desc desc = { .next = spdl_pipeline_next, .buffers = true, .error = &error };
    void *stream = kit_stream(false);
    uint32_t label[PICTURES];
    uint64_t n = 0, i;
    kit_disorder(test_seed());
    REQUIRE(spdl_pipeline_create(&p, &(spdl_pipeline_desc){ .workers = 3 }, SPDL_STAGES(
        SPDL_COUNT(40 * PICTURES), SPDL_BATCH(PICTURES),
        SPDL_PIPE(take_pictures, .item_bytes = sizeof(pictures), .concurrency = 3,
                  .free_item = spdl_buffer_free),
        SPDL_SINK(3))) == SPDL_OK);
    desc.source = p;
    REQUIRE(spdl_cuda_iter_open(&it, &desc) == SPDL_OK);
    while (spdl_cuda_iter_next(it, stream, &batch, SPDL_FOREVER) == SPDL_OK) {
        const pictures *on_device = (const pictures *)batch.data;
        REQUIRE(batch.bytes == sizeof(pictures));
        CHECK_EQ(flow_peek(&batch, 0, label, sizeof label, stream), SPDL_OK);
        for (i = 0; i < PICTURES; ++i, ++n) {
            CHECK_EQ(label[i], n);
            kit_check(stream, on_device->pixel[i], BLOCK, n);
        }
    }
    CHECK_EQ(n, 40 * PICTURES);
    CHECK_EQ(flow_stats(batch.cuda).batches, 40);
    CHECK_EQ(flow_stats(batch.cuda).pageable_bytes, 0);
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_iter_destroy(it);
    spdl_pipeline_destroy(p);
    kit_stream_free(stream);
    finish();
}

static void iter_open_takes_a_device_and_a_logger(void) {
    spdl_pipeline *p = NULL;
    spdl_cuda_iter *it = NULL;
    spdl_error error;
    spdl_cuda_iter_desc desc = { .next = spdl_pipeline_next, .error = &error,
                                 .logger = { flow_log_all, NULL } };
    REQUIRE(spdl_pipeline_create(&p, &(spdl_pipeline_desc){ .workers = 1 }, SPDL_STAGES(
        SPDL_SOURCE(block_item), SPDL_BATCH(8, .item_bytes = BLOCK), SPDL_SINK(3))) == SPDL_OK);
    desc.source = p;
    desc.device = SPDL_CUDA_ORDINAL(99);
    CHECK_EQ(spdl_cuda_iter_open(&it, &desc), SPDL_E_NOT_FOUND);
    CHECK(it == NULL && strstr(error.text, "no device 99") != NULL);
    SIM(sim_set_devices(2));
    SIM(desc.device = SPDL_CUDA_ORDINAL(1));
    SIM(REQUIRE(spdl_cuda_iter_open(&it, &desc) == SPDL_OK));
    SIM(CHECK(strstr(flow_line, "device 1") != NULL));
    spdl_cuda_iter_destroy(it);
    spdl_pipeline_destroy(p);
    finish();
}

/* Its first item goes back. */
static void an_iterator_may_end_unused(void) {
    spdl_pipeline *p = NULL;
    spdl_cuda_iter *it = NULL;
    spdl_error error;
    REQUIRE(spdl_pipeline_create(&p, &(spdl_pipeline_desc){ .workers = 1 }, SPDL_STAGES(
        SPDL_SOURCE(place_source), SPDL_PIPE(place_item), SPDL_BATCH(ITEMS, .item_bytes = ITEM),
        SPDL_SINK(2))) == SPDL_OK);
    REQUIRE(open_iter(&it, spdl_pipeline_next, p, &error) == SPDL_OK);
    spdl_cuda_iter_destroy(it);
    spdl_pipeline_destroy(p);
    finish();
}

SPDL_FN(loader_item, void, void) {
    if (spdl_sequence(task) == 30) return SPDL_END;
    *out = spdl_buffer(task);
    if (*out == NULL) return SPDL_E_NOMEM;
    kit_fill(*out, FLOW_SLOT, spdl_sequence(task));
    return SPDL_OK;
}

/* Out of a loader's arena, which is pinned. */
static void a_loader_in_one_call(void) {
    const spdl_loader_desc desc = {
        .pipeline = { .workers = 1 },
        .slot_count = 8,
        .fork_with_threads = true /* a sanitizer may have one */
    };
    spdl_loader *loader = NULL;
    spdl_cuda_iter *it = NULL;
    spdl_cuda_batch batch;
    spdl_error error;
    void *stream, *arena = NULL;
    uint64_t n = 1; /* the item before it went back when the first open failed */
    REQUIRE(spdl_loader_open(&loader, &desc, SPDL_STAGES(
        SPDL_SOURCE(loader_item, .item_bytes = FLOW_SLOT), SPDL_SINK(2))) == SPDL_OK);
    spdl_loader_arena(loader, &arena, NULL, NULL);
    CHECK_EQ(cudaHostRegister(arena, 4096, cudaHostRegisterDefault), cudaSuccess);
    CHECK_EQ(open_iter(&it, spdl_loader_next_fn, loader, &error), SPDL_E_INVALID);
    CHECK(it == NULL && strstr(error.text, "only a part") != NULL);
    CHECK_EQ(cudaHostUnregister(arena), cudaSuccess);
    REQUIRE(open_iter(&it, spdl_loader_next_fn, loader, &error) == SPDL_OK);
    stream = kit_stream(false);
    for (; spdl_cuda_iter_next(it, stream, &batch, SPDL_FOREVER) == SPDL_OK; ++n) {
        CHECK_EQ(batch.bytes, FLOW_SLOT);
        flow_read(&batch, stream, n);
    }
    CHECK_EQ(n, 30);
    CHECK_EQ(flow_stats(batch.cuda).pageable_bytes, 0);
    CHECK(flow_stats(batch.cuda).pinned_bytes >= 8 * FLOW_SLOT);
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_iter_destroy(it);
    spdl_loader_close(loader);
    kit_stream_free(stream);
    finish();
}

SPDL_FN(short_item, void, void) {
    const uint64_t n = spdl_sequence(task);
    if (n == 40) return SPDL_END;
    *out = spdl_buffer(task);
    if (*out == NULL) return SPDL_E_NOMEM;
    kit_fill(*out, ITEM, n);
    return SPDL_OK;
}

/* Batches of 32 and 8 items in each epoch; the first one that the iterator gets is of 8. */
static void short_batches_first(spdl_next_fn next, void *source) {
    spdl_cuda_iter *it = NULL;
    spdl_cuda_batch batch;
    spdl_error error;
    void *stream = kit_stream(false);
    int n = 0;
    REQUIRE(open_iter(&it, next, source, &error) == SPDL_OK);
    while (n < 6) {
        const spdl_result result = spdl_cuda_iter_next(it, stream, &batch, SPDL_FOREVER);
        if (result == SPDL_END) continue;
        REQUIRE(result == SPDL_OK);
        CHECK_EQ(batch.bytes, n % 2 == 0 ? 8 * ITEM : 32 * ITEM);
        kit_check(stream, batch.data, ITEM, n % 2 == 0 ? 32 : 0);
        ++n;
    }
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_iter_destroy(it);
    kit_stream_free(stream);
}

static void the_first_batch_may_be_short(void) {
    const spdl_loader_desc loader_desc = { .pipeline = { .workers = 1 }, .slot_count = 6,
                                           .fork_with_threads = true };
    const spdl_pipeline_desc desc = { .workers = 1 };
    spdl_loader *loader = NULL;
    spdl_pipeline *p = NULL;
    void *first;
    REQUIRE(spdl_loader_open(&loader, &loader_desc, SPDL_STAGES(
        SPDL_SOURCE(short_item, .continuous = true), SPDL_BATCH(32, .item_bytes = ITEM),
        SPDL_SINK(2))) == SPDL_OK);
    REQUIRE(spdl_loader_next_fn(loader, &first, SPDL_FOREVER) == SPDL_OK);
    spdl_loader_batch_free(first);
    short_batches_first(spdl_loader_next_fn, loader);
    spdl_loader_close(loader);
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_SOURCE(short_item, .continuous = true), SPDL_BATCH(32, .item_bytes = ITEM),
        SPDL_SINK(2))) == SPDL_OK);
    REQUIRE(spdl_pipeline_next(p, &first, SPDL_FOREVER) == SPDL_OK);
    spdl_batch_free(first);
    short_batches_first(spdl_pipeline_next, p);
    spdl_pipeline_destroy(p);
    finish();
}

static spdl_result next_fails(void *source, void **item, int64_t timeout_ns) {
    (void)item, (void)timeout_ns;
    return *(spdl_result *)source;
}

/* Each failure has its text, and gives the first item back. */
static void what_cannot_be_opened_is_told(void) {
    spdl_result ends = SPDL_END;
    spdl_cuda_iter *it = (spdl_cuda_iter *)(void *)&ends;
    spdl_pipeline *p = NULL;
    spdl_error error;
    const spdl_cuda_iter_desc viewed = { .next = next_fails, .source = &ends, .view = flow_view,
                                         .error = &error };
    CHECK_EQ(open_iter(NULL, next_fails, &ends, &error), SPDL_E_INVALID);
    CHECK_EQ(open_iter(&it, NULL, &ends, &error), SPDL_E_INVALID);
    CHECK(it == NULL && strstr(error.text, "next is NULL") != NULL);
    CHECK_EQ(spdl_cuda_iter_open(&it, NULL), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_iter_open(&it, &viewed), SPDL_E_INVALID);
    CHECK(it == NULL && strstr(error.text, "view is set") != NULL);
    CHECK_EQ(open_iter(&it, next_fails, &ends, &error), SPDL_END);
    CHECK(strstr(error.text, "first item") != NULL);
    REQUIRE(spdl_pipeline_create(&p, &(spdl_pipeline_desc){ .workers = 1 }, SPDL_STAGES(
        SPDL_SOURCE(plain_source), SPDL_BATCH(2), SPDL_SINK(2))) == SPDL_OK);
    CHECK_EQ(open_iter(&it, spdl_pipeline_next, p, &error), SPDL_E_INVALID);
    CHECK(it == NULL && strstr(error.text, "not a batch in place") != NULL);
    spdl_pipeline_destroy(p);
    REQUIRE(spdl_pipeline_create(&p, &(spdl_pipeline_desc){ .workers = 1 }, SPDL_STAGES(
        SPDL_SOURCE(place_source), SPDL_PIPE(place_item), SPDL_BATCH(ITEMS, .item_bytes = ITEM),
        SPDL_SINK(2))) == SPDL_OK);
    CHECK_EQ(setenv("SPDL_LIBCUDA", "/nothing/libcuda.so", 1), 0);
    CHECK_EQ(open_iter(&it, spdl_pipeline_next, p, &error), SPDL_E_NOT_FOUND);
    CHECK(it == NULL && strstr(error.text, "driver") != NULL);
    spdl_pipeline_destroy(p);
}

static void iterates_inline(void) {
    const iter_case c = { 0, 3, 0, 0 }, one = { 1, 0, 0, 0 };
    iterate(&c);
    iterate(&one);
}

static void holds_batches_and_goes_on(void) {
    int n, depth;
    for (n = 1; n <= 4; ++n)
        for (depth = 0; depth < 4; ++depth) {
            const iter_case c = { depth, 3, n, 5 + n };
            iterate(&c);
        }
}

/* An end comes once for each epoch, and the next one is sent ahead meanwhile. */
static void epochs_go_on(void) {
    flow_source s;
    void *stream = kit_stream(false);
    spdl_cuda *cuda = open_small(3);
    spdl_cuda_iter *it = NULL;
    spdl_cuda_iter_desc desc;
    uint64_t count, epoch;
    kit_disorder(test_seed());
    flow_source_open(&s, 5, 7);
    s.epochs = true;
    REQUIRE(spdl_cuda_adopt(cuda, s.seen, 5 * FLOW_SLOT) == SPDL_OK);
    desc = flow_iter_desc(&s);
    REQUIRE(spdl_cuda_iter_create(&it, cuda, &desc) == SPDL_OK);
    for (epoch = 1; epoch <= 6; ++epoch) {
        CHECK_EQ(flow_train(it, stream, &count), SPDL_END);
        CHECK_EQ(count, 7);
    }
    spdl_cuda_iter_destroy(it);
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_close(cuda);
    flow_source_close(&s);
    kit_stream_free(stream);
    finish();
}

/* A source that is late: next comes back in time, and loses nothing. */
static void next_keeps_its_time(void) {
    flow_source s;
    void *stream = kit_stream(false);
    spdl_cuda *cuda = open_small(3);
    spdl_cuda_iter *it = NULL;
    spdl_cuda_iter_desc desc;
    spdl_cuda_batch batch;
    spdl_result result = SPDL_OK;
    uint64_t seed = 0, late = 0;
    flow_source_open(&s, 5, 12);
    s.takes_us = 3000;
    desc = flow_iter_desc(&s);
    REQUIRE(spdl_cuda_iter_create(&it, cuda, &desc) == SPDL_OK);
    while (result != SPDL_END) {
        result = spdl_cuda_iter_next(it, stream, &batch, seed % 2 ? 0 : 500000);
        if (result == SPDL_TIMEOUT) ++late;
        if (result != SPDL_OK) continue;
        CHECK_EQ((uintptr_t)batch.user, seed);
        flow_read(&batch, stream, seed++);
    }
    CHECK_EQ(seed, 12);
    CHECK(late > 0);
    spdl_cuda_iter_destroy(it);
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_close(cuda);
    flow_source_close(&s);
    kit_stream_free(stream);
    finish();
}

static void a_source_that_fails_is_told(void) {
    {
        flow_source s;
        void *stream = kit_stream(false);
        spdl_cuda *cuda = open_small(3);
        spdl_cuda_iter *it = NULL, *second = NULL;
        spdl_cuda_iter_desc desc;
        uint64_t count = 0;
        flow_source_open(&s, 5, 100);
        s.fails_at = 11;
        desc = flow_iter_desc(&s);
        REQUIRE(spdl_cuda_iter_create(&it, cuda, &desc) == SPDL_OK);
        CHECK_EQ(spdl_cuda_iter_create(&second, cuda, &desc), SPDL_E_INVALID);
        CHECK_EQ(flow_train(it, stream, &count), SPDL_E_IO);
        CHECK_EQ(count, 10); /* those before it come first */
        CHECK_EQ(flow_train(it, stream, &count), SPDL_E_IO);
        spdl_cuda_iter_destroy(it);
        spdl_cuda_iter_destroy(NULL);
        CHECK_EQ(kit_wrong(), 0);
        spdl_cuda_close(cuda);
        flow_source_close(&s);
        kit_stream_free(stream);
        finish();
    }
}

static void iterators_end_in_the_middle(void) {
    int taken;
        for (taken = 0; taken < 7; ++taken) {
            flow_source s;
            void *stream = kit_stream(false);
            spdl_cuda *cuda = open_small(3);
            spdl_cuda_iter *it = NULL;
            spdl_cuda_iter_desc desc;
            spdl_cuda_batch batch;
            int i;
            flow_source_open(&s, 3, 1000);
            s.outside = 2;
            REQUIRE(spdl_cuda_adopt(cuda, s.seen, 3 * FLOW_SLOT) == SPDL_OK);
            desc = flow_iter_desc(&s);
            REQUIRE(spdl_cuda_iter_create(&it, cuda, &desc) == SPDL_OK);
            for (i = 0; i < taken; ++i) {
                CHECK_EQ(spdl_cuda_iter_next(it, stream, &batch, SPDL_FOREVER), SPDL_OK);
                flow_read(&batch, stream, (uint64_t)i);
            }
            spdl_cuda_iter_destroy(it);
            CHECK_EQ(kit_wrong(), 0);
            spdl_cuda_close(cuda);
            flow_source_close(&s);
            kit_stream_free(stream);
            finish();
        }
}

/* A loader whose slots the trainer has all, as those under way are: it says so until one is
   back. */
static spdl_result limited_next(void *source, void **out, int64_t timeout_ns) {
    const spdl_result result = flow_next(source, out, 0);
    (void)timeout_ns;
    return result == SPDL_TIMEOUT ? SPDL_E_LIMIT : result;
}

static void slots_of_a_loader_come_back(void) {
    int slots;
    for (slots = 1; slots <= 3; ++slots) {
        flow_source s;
        void *stream = kit_stream(false);
        spdl_cuda *cuda = open_small(3);
        spdl_cuda_iter *it = NULL;
        spdl_cuda_iter_desc desc;
        uint64_t count = 0;
        kit_disorder(test_seed());
        flow_source_open(&s, slots, ROUNDS / 4);
        REQUIRE(spdl_cuda_adopt(cuda, s.seen, (size_t)slots * FLOW_SLOT) == SPDL_OK);
        desc = flow_iter_desc(&s);
        desc.next = limited_next;
        REQUIRE(spdl_cuda_iter_create(&it, cuda, &desc) == SPDL_OK);
        CHECK_EQ(flow_train(it, stream, &count), SPDL_END);
        CHECK_EQ(count, ROUNDS / 4);
        spdl_cuda_iter_destroy(it);
        spdl_cuda_close(cuda);
        flow_source_close(&s);
        kit_stream_free(stream);
        finish();
    }
}

/* With all slots in the caller's hands and none on its way, next does not wait for one. */
static void a_loader_without_slots_is_told(void) {
    spdl_cuda *cuda = open_small(3);
    spdl_cuda_iter *it = NULL;
    spdl_cuda_iter_desc desc;
    spdl_cuda_batch batch;
    void *held[2] = { NULL, NULL };
    flow_source s;
    uint64_t count = 0;
    int i;
    flow_source_open(&s, 2, 10);
    for (i = 0; i < 2; ++i) REQUIRE(flow_next(&s, &held[i], 0) == SPDL_OK);
    desc = flow_iter_desc(&s);
    desc.next = limited_next;
    REQUIRE(spdl_cuda_iter_create(&it, cuda, &desc) == SPDL_OK);
    for (i = 0; i < 2; ++i)
        CHECK_EQ(spdl_cuda_iter_next(it, NULL, &batch, SPDL_FOREVER), SPDL_E_LIMIT);
    for (i = 0; i < 2; ++i) flow_item_free(held[i]);
    CHECK_EQ(flow_train(it, NULL, &count), SPDL_END);
    CHECK_EQ(count, 8);
    spdl_cuda_iter_destroy(it);
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_close(cuda);
    flow_source_close(&s);
    finish();
}

/* ---- processes ---- */

#ifndef CUDA_REAL
static uint64_t work_calls(void) {
    sim_stats stats;
    sim_get_stats(&stats);
    return stats.work_calls + stats.thread_calls;
}
#endif

typedef struct forked {
    spdl_cuda *cuda;
    void *block;
    spdl_cuda_iter *it;
    spdl_cuda_batch batch;
    flow_source source;
} forked;

static int uses_it_in_a_child(void *arg) {
    forked *f = (forked *)arg;
    SIM(const uint64_t before = work_calls());
    const spdl_allocator slots = spdl_cuda_allocator(f->cuda);
    const spdl_cuda_view view = { .data = f->source.seen, .bytes = 10 };
    spdl_cuda_batch batch;
    spdl_error error;
    CHECK_EQ(spdl_cuda_send(f->cuda, &view, &batch, SPDL_FOREVER), SPDL_E_CUDA_FORKED);
    CHECK_EQ(spdl_cuda_ready(&f->batch, NULL), SPDL_E_CUDA_FORKED);
    CHECK_EQ(spdl_cuda_done(&f->batch, NULL), SPDL_E_CUDA_FORKED);
    CHECK_EQ(spdl_cuda_arrived(&f->batch, 0), SPDL_E_CUDA_FORKED);
    CHECK_EQ(spdl_cuda_adopt(f->cuda, f->source.seen, FLOW_SLOT), SPDL_E_CUDA_FORKED);
    CHECK_EQ(spdl_cuda_iter_next(f->it, NULL, &batch, SPDL_FOREVER), SPDL_E_CUDA_FORKED);
    CHECK_EQ(spdl_cuda_iter_hold(f->it, 1), SPDL_E_CUDA_FORKED);
    spdl_cuda_error(f->cuda, &error);
    CHECK_EQ(error.result, SPDL_E_CUDA_FORKED);
    CHECK(strstr(error.text, "cannot use it") != NULL);
    CHECK_EQ(flow_stats(f->cuda).batches, 0); /* those are the parent's */
    CHECK_EQ(flow_stats(f->cuda).device_free, 0);
    CHECK(flow_block(f->cuda) == NULL);
    slots.free_fn((char *)f->block - FLOW_HEAD, FLOW_HEAD + FLOW_SLOT, slots.user);
    spdl_cuda_batch_free(&f->batch);
    spdl_cuda_iter_destroy(f->it);
    spdl_cuda_close(f->cuda);
    SIM(CHECK_EQ(work_calls(), before)); /* CUDA was left alone */
    return 7;
}

static void a_child_is_refused(void) {
    static forked f;
    uint32_t *mark;
    spdl_cuda_iter_desc iter_desc;
    void *stream = kit_stream(false);
    flow_source_open(&f.source, 4, 10);
    f.cuda = open_small(2);
    f.block = flow_block(f.cuda);
    REQUIRE(f.block != NULL);
    f.batch = sent(f.cuda, 1);
    iter_desc = flow_iter_desc(&f.source);
    REQUIRE(spdl_cuda_iter_create(&f.it, f.cuda, &iter_desc) == SPDL_OK);
    CHECK_EQ(flow_child(uses_it_in_a_child, &f, 10, true), 7);
    mark = f.cuda->ours;
    f.cuda->ours = NULL; /* as before Linux 4.14 */
    CHECK_EQ(flow_child(uses_it_in_a_child, &f, 10, true), 7);
    f.cuda->ours = mark;
    CHECK_EQ(spdl_cuda_ready(&f.batch, stream), SPDL_OK); /* the parent goes on */
    flow_read(&f.batch, stream, 1);
    CHECK_EQ(spdl_cuda_done(&f.batch, stream), SPDL_OK);
    spdl_cuda_iter_destroy(f.it);
    CHECK_EQ(kit_wrong(), 0);
    flow_block_free(f.block);
    spdl_cuda_close(f.cuda);
    flow_source_close(&f.source);
    kit_stream_free(stream);
    finish();
}

static spdl_cuda *exit_cuda; /* so that LeakSanitizer finds it */

static int leaves_without_closing(void *arg) {
    (void)arg;
    exit_cuda = open_small(2);
    CHECK_EQ(flow_batch(exit_cuda, NULL, 1000, 1), SPDL_OK);
    return 8;
}

static void closes_at_exit(void) { spdl_cuda_close(exit_cuda); }

static int closes_while_it_exits(void *arg) {
    atexit(closes_at_exit);
    return leaves_without_closing(arg);
}

static void leaving_is_quiet(void) {
    CHECK_EQ(flow_child(leaves_without_closing, NULL, 10, true), 8);
    CHECK_EQ(flow_child(closes_while_it_exits, NULL, 10, true), 8);
}

static void a_device_that_is_not_there_is_told(void) {
    spdl_cuda_desc desc = flow_desc(FLOW_SLOT);
    spdl_cuda *cuda = (spdl_cuda *)&desc;
    spdl_error error;
    desc.error = &error;
    desc.device = SPDL_CUDA_ORDINAL(99);
    CHECK_EQ(spdl_cuda_open(&cuda, &desc), SPDL_E_NOT_FOUND);
    CHECK(cuda == NULL && strstr(error.text, "99") != NULL);
    finish();
}

static void *half_an_allocator(size_t bytes, size_t align, void *user) {
    (void)align, (void)user;
    return malloc(bytes);
}

static void arguments_are_checked(void) {
    spdl_cuda_desc desc = flow_desc(FLOW_SLOT);
    spdl_cuda *cuda = (spdl_cuda *)&desc;
    spdl_error error;
    desc.error = &error;
    desc.slot_bytes = 0;
    CHECK_EQ(spdl_cuda_open(&cuda, &desc), SPDL_E_INVALID);
    CHECK(cuda == NULL);
    CHECK_EQ(error.result, SPDL_E_INVALID);
    CHECK(strstr(error.text, "slot_bytes") != NULL);
    desc = flow_desc(FLOW_SLOT);
    desc.device_slots = SPDL_CUDA_MAX_SLOTS + 1;
    CHECK_EQ(spdl_cuda_open(&cuda, &desc), SPDL_E_INVALID);
    desc.device_slots = -1;
    CHECK_EQ(spdl_cuda_open(&cuda, &desc), SPDL_E_INVALID);
    desc = flow_desc(FLOW_SLOT);
    desc.output_slots = -1;
    CHECK_EQ(spdl_cuda_open(&cuda, &desc), SPDL_E_INVALID);
    desc = flow_desc(FLOW_SLOT);
    desc.device = -1;
    CHECK_EQ(spdl_cuda_open(&cuda, &desc), SPDL_E_INVALID);
    desc = flow_desc(FLOW_SLOT);
    desc.error = &error;
    desc.allocator.alloc_fn = half_an_allocator;
    CHECK_EQ(spdl_cuda_open(&cuda, &desc), SPDL_E_INVALID);
    CHECK(strstr(error.text, "allocator") != NULL);
    desc = flow_desc(SIZE_MAX - 5);
    CHECK(spdl_cuda_open(&cuda, &desc) < 0);
    CHECK(cuda == NULL);
    finish();
}

/* Functions without a result ignore it. */
static void null_is_refused_by_every_function(void) {
    spdl_cuda_desc desc = flow_desc(FLOW_SLOT);
    spdl_cuda_iter_desc iter_desc;
    spdl_cuda *cuda = open_small(2), *none = cuda;
    spdl_cuda_iter *it = NULL, *no_iter = NULL;
    spdl_cuda_output *out = NULL;
    spdl_cuda_batch batch;
    spdl_cuda_stats stats;
    spdl_error error;
    flow_source s;
    size_t i;
    flow_source_open(&s, 4, 10);
    iter_desc = flow_iter_desc(&s);
    REQUIRE(spdl_cuda_iter_create(&it, cuda, &iter_desc) == SPDL_OK);
    {
        const spdl_result result[] = {
            spdl_cuda_open(NULL, &desc),
            spdl_cuda_open(&none, NULL),
            spdl_cuda_adopt(NULL, s.seen, FLOW_SLOT),
            spdl_cuda_ready(NULL, NULL),
            spdl_cuda_arrived(NULL, 0),
            spdl_cuda_done(NULL, NULL),
            spdl_cuda_output_get(NULL, NULL, &out, 0),
            spdl_cuda_output_get(cuda, NULL, NULL, 0),
            spdl_cuda_output_send(NULL),
            spdl_cuda_output_wait(NULL, 0),
            spdl_cuda_iter_create(NULL, cuda, &iter_desc),
            spdl_cuda_iter_create(&no_iter, NULL, &iter_desc),
            spdl_cuda_iter_create(&no_iter, cuda, NULL),
            spdl_cuda_iter_next(NULL, NULL, &batch, 0),
            spdl_cuda_iter_next(it, NULL, NULL, 0),
            spdl_cuda_iter_hold(NULL, 1),
        };
        for (i = 0; i < sizeof result / sizeof result[0]; ++i)
            if (!CHECK_EQ(result[i], SPDL_E_INVALID)) fprintf(stderr, "   call %d\n", (int)i);
    }
    CHECK(none == NULL && no_iter == NULL && out == NULL);
    spdl_cuda_error(cuda, NULL);
    memset(&error, 0xff, sizeof error);
    spdl_cuda_error(NULL, &error);
    CHECK_EQ(error.result, SPDL_OK);
    CHECK_STR(error.text, "");
    spdl_cuda_get_stats(cuda, NULL);
    memset(&stats, 0xff, sizeof stats);
    spdl_cuda_get_stats(NULL, &stats);
    CHECK_EQ(stats.device_free, 0);
    CHECK(!stats.lost && stats.batches == 0 && stats.wait_slot_ns == 0);
    CHECK_EQ(s.next, 0);
    spdl_cuda_iter_destroy(it);
    spdl_cuda_close(cuda);
    flow_source_close(&s);
    finish();
}

TEST_TABLE(cuda) {
    TEST_CASE(devices_are_counted),
    TEST_CASE(the_driver_has_a_name),
    TEST_CASE(a_driver_without_its_functions_is_told),
    TEST_CASE(every_size_arrives),
    TEST_CASE(what_does_not_fit_is_refused),
    TEST_CASE(any_other_order_is_refused),
    TEST_CASE(a_stream_reads_a_batch_once),
    TEST_CASE(several_streams_read_a_batch),
    TEST_CASE(threads_share_a_batch),
    TEST_CASE(full_slots_are_back_pressure),
#ifndef CUDA_REAL
    TEST_CASE(a_number_comes_back_with_its_copy),
    TEST_CASE(arrived_asks_and_waits),
#endif
    TEST_CASE(order_holds_on_any_stream),
    TEST_CASE(any_thread_may_send),
    TEST_CASE(errors_of_the_caller_stay),
    TEST_CASE(captures_go_on_undisturbed),
    TEST_CASE(a_captured_stream_ends_nothing),
    TEST_CASE(the_legacy_stream_spoils_no_capture),
#ifdef CUDA_REAL
    TEST_CASE(streams_of_other_contexts_are_refused),
#endif
    TEST_CASE(arenas_are_read_where_they_are),
    TEST_CASE(a_send_that_waits_releases_memory),
    TEST_CASE(other_memory_is_sent_slower),
    TEST_CASE(memory_that_others_pinned_is_known),
    TEST_CASE(two_adopt_one_arena),
    TEST_CASE(arenas_may_touch),
#ifdef CUDA_REAL
    TEST_CASE(an_arena_beyond_2_gib),
#endif
    TEST_CASE(adopt_refuses_what_it_cannot_use),
    TEST_CASE(only_what_is_sent_is_pinned),
    TEST_CASE(larger_blocks_are_others),
    TEST_CASE(batches_in_place_are_pinned),
    TEST_CASE(small_buffers_are_not_pinned),
    TEST_CASE(what_is_not_in_place_is_refused),
    TEST_CASE(an_iterator_for_each_stream),
    TEST_CASE(blocks_of_a_pipeline_are_pinned),
    TEST_CASE(a_struct_of_arrays_is_one_copy),
    TEST_CASE(iter_open_takes_a_device_and_a_logger),
    TEST_CASE(an_iterator_may_end_unused),
    TEST_CASE(a_loader_in_one_call),
    TEST_CASE(the_first_batch_may_be_short),
    TEST_CASE(what_cannot_be_opened_is_told),
    TEST_CASE(iterates_inline),
    TEST_CASE(an_iterator_needs_a_right_desc),
    TEST_CASE(batches_are_sent_ahead),
    TEST_CASE(an_item_that_cannot_be_sent_ends_it),
    TEST_CASE(items_may_be_null_and_borrowed),
    TEST_CASE(null_is_no_batch),
    TEST_CASE(streams_of_an_iterator_may_change),
    TEST_CASE(a_lent_batch_is_the_iterators),
    TEST_CASE(holds_batches_and_goes_on),
    TEST_CASE(epochs_go_on),
    TEST_CASE(next_keeps_its_time),
    TEST_CASE(a_source_that_fails_is_told),
    TEST_CASE(iterators_end_in_the_middle),
    TEST_CASE(slots_of_a_loader_come_back),
    TEST_CASE(a_loader_without_slots_is_told),
    TEST_CASE(a_child_is_refused),
    TEST_CASE(leaving_is_quiet),
    TEST_CASE(a_device_that_is_not_there_is_told),
    TEST_CASE(arguments_are_checked),
    TEST_CASE(null_is_refused_by_every_function),
    TEST_END
};
