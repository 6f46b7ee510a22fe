/* spdl_cuda.h: slots, the iterator, streams, devices. All of it runs on the stand-in for the CUDA
   runtime and, built with CUDA_REAL, on a device; failures are in test_cuda_fault.c. */
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

static spdl_cuda_backend backend = SPDL_CUDA_GPU;

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

static spdl_cuda *open_small(int host_slots, int device_slots) {
    spdl_cuda_desc desc = flow_desc(backend, FLOW_SLOT);
    desc.host_slots = host_slots;
    desc.device_slots = device_slots;
    return flow_open(&desc);
}

static spdl_cuda_stats stats_of(const spdl_cuda *cuda) {
    spdl_cuda_stats stats;
    spdl_cuda_get_stats(cuda, &stats);
    return stats;
}

static spdl_cuda_host *filled(spdl_cuda *cuda, uint64_t seed) {
    spdl_cuda_host *host = NULL;
    REQUIRE(flow_fill(cuda, &host, 1000, seed) == SPDL_OK);
    return host;
}

/* ---- slots ---- */

static void probe_tells_what_there_is(void) {
    spdl_cuda_info info;
    int i;
    memset(&info, 0xff, sizeof info);
    spdl_cuda_probe(&info);
    CHECK(info.device_count > 0 && info.driver_version > 0);
    CHECK_STR(info.reason, "");
    for (i = 0; i < info.device_count && i < SPDL_CUDA_MAX_DEVICES; ++i) {
        CHECK(info.device[i].name[0] != '\0');
        CHECK(info.device[i].memory_bytes > 0);
        CHECK(info.device[i].major > 0);
    }
    CHECK_EQ(cudaGetLastError(), cudaSuccess);
}

static void every_size_arrives(void) {
    static const size_t sizes[] = { 0, 1, 2, 255, 256, 257, 4095, 4096, 9999, FLOW_SLOT - 1,
                                    FLOW_SLOT };
    spdl_cuda *cuda = open_small(0, 0);
    void *stream = kit_stream(false);
    size_t i;
    for (i = 0; i < sizeof sizes / sizeof sizes[0]; ++i)
        CHECK_EQ(flow_batch(cuda, stream, sizes[i], i), SPDL_OK);
    CHECK_EQ(kit_wrong(), 0);
    CHECK_EQ(stats_of(cuda).batches, sizeof sizes / sizeof sizes[0]);
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    finish();
}

static void arrays_are_packed(void) {
    spdl_cuda *cuda = open_small(0, 0);
    void *stream = kit_stream(false), *data[3];
    const uint64_t image[3] = { 4, 5, 6 }, label[1] = { 4 };
    unsigned char back[480];
    spdl_cuda_host *host = NULL;
    spdl_cuda_batch batch;
    REQUIRE(spdl_cuda_host_get(cuda, &host, SPDL_FOREVER) == SPDL_OK);
    CHECK(host->capacity >= FLOW_SLOT && host->bytes == 0 && host->array_count == 0);
    CHECK_EQ(spdl_cuda_host_add(host, "image", "<f4", 3, image, &data[0]), SPDL_OK);
    CHECK_EQ(spdl_cuda_host_add(host, "label", "i8", 1, label, &data[1]), SPDL_OK);
    CHECK_EQ(spdl_cuda_host_add(host, "one", "u1", 0, NULL, &data[2]), SPDL_OK);
    kit_fill(data[0], 480, 1);
    kit_fill(data[1], 32, 2);
    kit_fill(data[2], 1, 3);
    CHECK_EQ(spdl_cuda_send(host, &batch, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(batch.array_count, 3);
    CHECK_EQ(batch.bytes, 512 + 256 + 1);
    CHECK_STR(batch.array[0].name, "image");
    CHECK_EQ(batch.array[0].bytes, 480);
    CHECK_EQ(batch.array[0].shape[2], 6);
    CHECK_EQ(batch.array[1].offset, 512);
    CHECK_EQ(batch.array[1].bytes, 32);
    CHECK_EQ(batch.array[2].offset, 768);
    CHECK_EQ(batch.array[2].bytes, 1);
    CHECK_EQ((char *)spdl_cuda_batch_array(&batch, "label") - (char *)batch.dev, 512);
    CHECK_EQ((char *)spdl_cuda_at(&batch, 2) - (char *)batch.dev, 768);
    CHECK(spdl_cuda_at(&batch, 3) == NULL && spdl_cuda_at(&batch, -1) == NULL);
    CHECK(spdl_cuda_batch_array(&batch, "labels") == NULL);
    CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
    CHECK_EQ(flow_peek(&batch, 0, back, 480, stream), SPDL_OK);
    CHECK_EQ(kit_differ(back, 480, 1), 0);
    CHECK_EQ(flow_peek(&batch, 512, back, 32, stream), SPDL_OK);
    CHECK_EQ(kit_differ(back, 32, 2), 0);
    CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    finish();
}

static void what_does_not_fit_is_refused(void) {
    spdl_cuda *cuda = open_small(0, 0);
    spdl_cuda_host *host = NULL;
    void *data = NULL;
    uint64_t shape[2] = { FLOW_SLOT + 1, 1 };
    int i;
    REQUIRE(spdl_cuda_host_get(cuda, &host, SPDL_FOREVER) == SPDL_OK);
    CHECK_EQ(spdl_cuda_host_add(host, "x", "u1", 1, shape, &data), SPDL_E_LIMIT);
    shape[0] = FLOW_SLOT / 4 + 1;
    CHECK_EQ(spdl_cuda_host_add(host, "x", "f4", 1, shape, &data), SPDL_E_LIMIT);
    shape[0] = shape[1] = (uint64_t)1 << 33; /* the product is too large for 64 bits */
    CHECK(spdl_cuda_host_add(host, "x", "f8", 2, shape, &data) < 0);
    shape[0] = shape[1] = 2;
    CHECK_EQ(spdl_cuda_host_add(host, "x", "", 1, shape, &data), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_host_add(host, "x", "f", 1, shape, &data), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_host_add(host, "x", "f4", 9, shape, &data), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_host_add(host, "x", "f4", -1, shape, &data), SPDL_E_INVALID);
    CHECK_EQ(host->array_count, 0);
    for (i = 0; i < SPDL_CUDA_MAX_ARRAYS; ++i)
        CHECK_EQ(spdl_cuda_host_add(host, "x", "u1", 1, shape, &data), SPDL_OK);
    CHECK_EQ(spdl_cuda_host_add(host, "x", "u1", 1, shape, &data), SPDL_E_LIMIT);
    spdl_cuda_host_free(host);
    CHECK_EQ(spdl_cuda_host_add(host, "x", "u1", 1, shape, &data), SPDL_E_INVALID);
    spdl_cuda_host_free(NULL);
    CHECK_EQ(stats_of(cuda).host_free, stats_of(cuda).host_slots);
    spdl_cuda_close(cuda);
    finish();
}

static void any_other_order_is_refused(void) {
    spdl_cuda *cuda = open_small(4, 4);
    void *stream = kit_stream(false), *other = kit_stream(false);
    spdl_cuda_host *host = filled(cuda, 1);
    spdl_cuda_batch batch, stale, next;
    CHECK_EQ(spdl_cuda_send(host, &batch, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(spdl_cuda_send(host, &next, 0), SPDL_E_INVALID); /* sent already */
    spdl_cuda_host_free(host);                                /* ignored */
    CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_E_INVALID); /* not ready there */
    CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
    CHECK_EQ(spdl_cuda_done(&batch, other), SPDL_E_INVALID);
    stale = batch;
    CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
    CHECK_EQ(spdl_cuda_done(&stale, stream), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_ready(&stale, stream), SPDL_E_INVALID);
    spdl_cuda_batch_free(&stale); /* ignored */
    CHECK_EQ(spdl_cuda_send(filled(cuda, 2), &next, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(spdl_cuda_done(&stale, stream), SPDL_E_INVALID); /* not even if the slot is the same */
    spdl_cuda_batch_free(&next);
    spdl_cuda_batch_free(NULL);
    CHECK_EQ(stats_of(cuda).device_free, stats_of(cuda).device_slots);
    spdl_cuda_close(cuda);
    spdl_cuda_close(NULL);
    kit_stream_free(stream);
    kit_stream_free(other);
    finish();
}

static void several_streams_read_a_batch(void) {
    spdl_cuda *cuda = open_small(3, 2);
    void *streams[SPDL_CUDA_MAX_READERS + 1];
    spdl_cuda_batch batch;
    uint64_t round;
    int i;
    kit_disorder(test_seed());
    for (i = 0; i <= SPDL_CUDA_MAX_READERS; ++i) streams[i] = kit_stream(i % 2 == 0);
    for (round = 0; round < ROUNDS / 4; ++round) {
        const int readers = 1 + (int)(round % SPDL_CUDA_MAX_READERS);
        REQUIRE(spdl_cuda_send(filled(cuda, round), &batch, SPDL_FOREVER) == SPDL_OK);
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

static void full_slots_are_back_pressure(void) {
    spdl_cuda *cuda = open_small(3, 2);
    void *stream = kit_stream(false);
    spdl_cuda_host *host[3], *none = NULL;
    spdl_cuda_batch batch[2], third;
    int i;
    for (i = 0; i < 3; ++i) host[i] = filled(cuda, (uint64_t)i);
    CHECK_EQ(spdl_cuda_host_get(cuda, &none, 0), SPDL_TIMEOUT);
    CHECK_EQ(spdl_cuda_host_get(cuda, &none, SPDL_SECONDS(0.01)), SPDL_TIMEOUT);
    for (i = 0; i < 2; ++i) CHECK_EQ(spdl_cuda_send(host[i], &batch[i], 0), SPDL_OK);
    CHECK_EQ(spdl_cuda_send(host[2], &third, 0), SPDL_TIMEOUT);
    CHECK_EQ(spdl_cuda_send(host[2], &third, SPDL_SECONDS(0.01)), SPDL_TIMEOUT);
    CHECK_EQ(stats_of(cuda).device_free, 0);
    spdl_cuda_batch_free(&batch[0]); /* read by nobody */
    CHECK_EQ(spdl_cuda_send(host[2], &third, SPDL_SECONDS(5)), SPDL_OK);
    CHECK_EQ(spdl_cuda_ready(&third, stream), SPDL_OK);
    flow_read(&third, stream, 2);
    spdl_cuda_batch_free(&third); /* done with on its stream */
    spdl_cuda_batch_free(&batch[1]);
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    finish();
}

/* A program that never waits: a call that has no time gets back what has been copied, too. */
static void without_time_slots_come_back(void) {
    static unsigned char elsewhere[1000];
    const spdl_cuda_view view = { .data = elsewhere, .bytes = sizeof elsewhere };
    spdl_cuda *cuda = open_small(1, 2);
    spdl_cuda_batch batch;
    int i;
    for (i = 0; i < 6; ++i) {
        spdl_cuda_host *host = NULL;
        if (i % 2) {
            CHECK_EQ(spdl_cuda_send_view(cuda, &view, &batch, 0), SPDL_OK);
        } else {
            REQUIRE(spdl_cuda_host_get(cuda, &host, 0) == SPDL_OK);
            CHECK_EQ(spdl_cuda_send(host, &batch, 0), SPDL_OK);
        }
        spdl_cuda_batch_free(&batch);
        CHECK_EQ(kit_wrong(), 0); /* the copy is done */
    }
    spdl_cuda_close(cuda);
    finish();
}

#ifndef CUDA_REAL
/* While copies are held, host slots run out; one copy that is done brings one back. */
static void a_host_slot_comes_back_with_its_copy(void) {
    spdl_cuda *cuda = open_small(2, 4);
    spdl_cuda_host *host = NULL;
    spdl_cuda_batch batch[3];
    sim_hold();
    CHECK_EQ(spdl_cuda_send(filled(cuda, 0), &batch[0], 0), SPDL_OK);
    CHECK_EQ(spdl_cuda_send(filled(cuda, 1), &batch[1], 0), SPDL_OK);
    CHECK_EQ(spdl_cuda_host_get(cuda, &host, SPDL_SECONDS(0.02)), SPDL_TIMEOUT);
    sim_step(1);
    CHECK_EQ(spdl_cuda_host_get(cuda, &host, SPDL_SECONDS(5)), SPDL_OK);
    spdl_cuda_host_free(host);
    sim_release();
    CHECK(stats_of(cuda).wait_bus_ns > 0);
    spdl_cuda_batch_free(&batch[0]);
    spdl_cuda_batch_free(&batch[1]);
    spdl_cuda_close(cuda);
    finish();
}
#endif

/* ---- order ---- */

/* Every kind of stream, in any mixture, with everything late. */
static void order_holds_on_any_stream(void) {
    spdl_cuda *cuda = open_small(2, 2);
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

/* Reaps beside the senders, and waits for slots with timeouts that end. */
static void *reaps(void *arg) {
    sender *s = (sender *)arg;
    while (!__atomic_load_n(&s->first, __ATOMIC_RELAXED)) {
        spdl_cuda_host *host = NULL;
        CHECK(spdl_cuda_reap(s->cuda, SPDL_SECONDS(0.0001)) >= 0);
        if (spdl_cuda_host_get(s->cuda, &host, SPDL_SECONDS(0.0001)) == SPDL_OK)
            spdl_cuda_host_free(host);
        CHECK(stats_of(s->cuda).host_free <= 3);
    }
    return NULL;
}

static void any_thread_may_send(void) {
    spdl_cuda *cuda = open_small(3, 3);
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
    CHECK_EQ(stats_of(cuda).batches, (uint64_t)ROUNDS / 4 * 4);
    spdl_cuda_close(cuda);
    finish();
}

static void errors_of_the_caller_stay(void) {
    spdl_cuda *cuda = open_small(2, 2);
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
    spdl_cuda *cuda = open_small(2, 2);
    cudaStream_t captured = (cudaStream_t)kit_stream(false);
    cudaGraph_t graph = NULL;
    spdl_cuda_batch batch;
    void *stream = kit_stream(false);
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    uint64_t i;
    CHECK_EQ(flow_batch(cuda, stream, 1000, 0), SPDL_OK);
    REQUIRE(spdl_cuda_send(filled(cuda, 1), &batch, SPDL_FOREVER) == SPDL_OK);
    REQUIRE(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal) == cudaSuccess);
    for (i = 2; i < 12; ++i) {
        spdl_cuda_host *host = NULL;
        spdl_cuda_batch other;
        CHECK_EQ(flow_fill(cuda, &host, 1000, i), SPDL_OK);
        CHECK_EQ(spdl_cuda_send(host, &other, SPDL_FOREVER), SPDL_OK);
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

/* The legacy stream would wait for a blocking stream that is being captured, and spoil that. */
static void the_legacy_stream_spoils_no_capture(void) {
    spdl_cuda *cuda = open_small(2, 2);
    cudaStream_t captured = (cudaStream_t)kit_stream(true);
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaGraph_t graph = NULL;
    spdl_cuda_batch batch;
    spdl_error error;
    REQUIRE(spdl_cuda_send(filled(cuda, 1), &batch, SPDL_FOREVER) == SPDL_OK);
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

/* ---- arenas ---- */

static void arenas_are_read_where_they_are(void) {
    flow_source s;
    void *stream = kit_stream(false);
    spdl_cuda *cuda = open_small(-1, 3);
    spdl_cuda_batch batch;
    spdl_cuda_view view;
    void *item = NULL;
    kit_disorder(test_seed());
    flow_source_open(&s, 5, ROUNDS);
    REQUIRE(spdl_cuda_adopt(cuda, s.seen, 5 * FLOW_SLOT, FLOW_SLOT) == SPDL_OK);
    CHECK_EQ(spdl_cuda_reap(cuda, SPDL_FOREVER), SPDL_EMPTY);
    while (s.next < s.count) {
        while (flow_next(&s, &item, 0) == SPDL_TIMEOUT)
            CHECK_EQ(spdl_cuda_reap(cuda, SPDL_FOREVER), SPDL_OK);
        memset(&view, 0, sizeof view);
        CHECK_EQ(flow_view(item, &view), SPDL_OK);
        view.release = flow_item_free;
        view.item = item;
        REQUIRE(spdl_cuda_send_view(cuda, &view, &batch, SPDL_FOREVER) == SPDL_OK);
        CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
        flow_read(&batch, stream, (uint64_t)(uintptr_t)batch.user);
        CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
    }
    CHECK_EQ(kit_wrong(), 0);
    CHECK_EQ(stats_of(cuda).copied_bytes, 0);
    if (backend == SPDL_CUDA_GPU) CHECK_EQ(stats_of(cuda).adopted_bytes, 5 * FLOW_SLOT);
    CHECK_EQ(spdl_cuda_disown(cuda, s.seen + 1), SPDL_E_NOT_FOUND);
    CHECK_EQ(spdl_cuda_disown(cuda, s.seen), SPDL_OK);
    CHECK_EQ(spdl_cuda_disown(cuda, s.seen), SPDL_E_NOT_FOUND);
    CHECK_EQ(s.released, s.next);
    spdl_cuda_close(cuda);
    flow_source_close(&s);
    kit_stream_free(stream);
    finish();
}

static void count_release(void *item) { ++*(int *)item; }

static void other_memory_is_copied_first(void) {
    unsigned char *data = (unsigned char *)malloc(FLOW_SLOT + 1);
    int released = 0;
    spdl_cuda *cuda = open_small(2, 2);
    void *stream = kit_stream(false);
    spdl_cuda_view view;
    spdl_cuda_batch batch;
    memset(&view, 0, sizeof view);
    kit_fill(data, FLOW_SLOT, 9);
    view.data = data;
    view.bytes = FLOW_SLOT;
    view.release = count_release;
    view.item = &released;
    CHECK_EQ(spdl_cuda_send_view(cuda, &view, &batch, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(released, backend == SPDL_CUDA_GPU); /* on the CPU the batch is this memory */
    if (released) memset(data, 0, FLOW_SLOT);
    CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
    flow_read(&batch, stream, 9);
    CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
    CHECK_EQ(kit_wrong(), 0);
    CHECK_EQ(released, 1);
    CHECK_EQ(stats_of(cuda).copied_bytes, backend == SPDL_CUDA_GPU ? FLOW_SLOT : 0);
    view.bytes = FLOW_SLOT + 1;
    CHECK_EQ(spdl_cuda_send_view(cuda, &view, &batch, SPDL_FOREVER), SPDL_E_LIMIT);
    spdl_cuda_close(cuda);
    free(data);
    kit_stream_free(stream);
    finish();
}

static void adopt_refuses_what_it_cannot_use(void) {
    flow_source s;
    spdl_cuda *cuda = open_small(0, 0);
    flow_source_open(&s, 12, 0);
    CHECK_EQ(spdl_cuda_adopt(cuda, NULL, FLOW_SLOT, FLOW_SLOT), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_adopt(cuda, s.seen, 0, FLOW_SLOT), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_adopt(cuda, s.seen, FLOW_SLOT, 0), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_adopt(cuda, s.seen + 1, FLOW_SLOT, FLOW_SLOT), SPDL_E_INVALID);
    int i;
    for (i = 0; i < 12; ++i)
        CHECK_EQ(spdl_cuda_adopt(cuda, s.seen + i * FLOW_SLOT, FLOW_SLOT, FLOW_SLOT), SPDL_OK);
    spdl_cuda_close(cuda); /* unpins them */
    flow_source_close(&s);
    finish();
}

/* ---- the iterator ---- */

typedef struct iter_case {
    int depth, outside, hold, held_at;
    spdl_cuda_hold what;
} iter_case;

/* The seeds come in order, every one of them; while they are held those again. */
static void iterate(const iter_case *c) {
    flow_source s;
    void *stream = kit_stream(false);
    spdl_cuda *cuda = open_small(7, 4);
    spdl_cuda_iter *it = NULL;
    spdl_cuda_iter_desc desc;
    spdl_cuda_batch batch;
    uint64_t seed = 0, first = 0;
    int i, round;
    kit_disorder(test_seed());
    flow_source_open(&s, 7, ROUNDS);
    s.outside = c->outside;
    REQUIRE(spdl_cuda_adopt(cuda, s.seen, 7 * FLOW_SLOT, FLOW_SLOT) == SPDL_OK);
    desc = flow_iter_desc(&s);
    desc.depth = c->depth;
    REQUIRE(spdl_cuda_iter_open(&it, cuda, &desc) == SPDL_OK);
    while (spdl_cuda_next(it, stream, &batch, SPDL_FOREVER) == SPDL_OK) {
        CHECK_EQ((uintptr_t)batch.user, seed);
        CHECK_EQ(batch.bytes, s.bytes);
        flow_read(&batch, stream, seed++);
        if ((int)seed != c->held_at) continue;
        CHECK_EQ(spdl_cuda_iter_hold(it, c->hold, c->what), SPDL_OK);
        for (round = 0; round < 5; ++round)
            for (i = 0; i < c->hold; ++i) {
                REQUIRE(spdl_cuda_next(it, stream, &batch, SPDL_FOREVER) == SPDL_OK);
                if (round == 0 && i == 0) first = (uintptr_t)batch.user;
                if (round == 0 || c->what == SPDL_CUDA_HOLD_DEVICE)
                    CHECK_EQ((uintptr_t)batch.user, first + (uint64_t)i);
                flow_read(&batch, stream, (uint64_t)(uintptr_t)batch.user);
                if ((uintptr_t)batch.user >= seed) seed = (uintptr_t)batch.user + 1;
            }
        CHECK_EQ(spdl_cuda_iter_hold(it, 0, c->what), SPDL_OK);
        /* what was sent ahead, again, comes first */
        while (spdl_cuda_next(it, stream, &batch, SPDL_FOREVER) == SPDL_OK &&
               (uintptr_t)batch.user < seed)
            flow_read(&batch, stream, (uint64_t)(uintptr_t)batch.user);
        CHECK_EQ((uintptr_t)batch.user, seed);
        flow_read(&batch, stream, seed++);
    }
    CHECK_EQ(seed, ROUNDS);
    CHECK_EQ(spdl_cuda_iter_hold(it, 5, SPDL_CUDA_HOLD_DEVICE), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_next(it, stream, &batch, SPDL_FOREVER), SPDL_END); /* told again */
    CHECK_EQ(spdl_cuda_next(it, stream, &batch, 0), SPDL_END);
    spdl_cuda_iter_close(it);
    CHECK_EQ(s.viewed, s.next);
    CHECK_EQ(kit_wrong(), 0);
    CHECK_EQ(stats_of(cuda).device_free, 4);
    CHECK_EQ(stats_of(cuda).host_free, 7);
    spdl_cuda_close(cuda);
    flow_source_close(&s);
    kit_stream_free(stream);
    finish();
}

static void iterates_inline(void) {
    const iter_case c = { 0, 3, 0, 0, SPDL_CUDA_HOLD_DEVICE };
    const iter_case one = { 1, 0, 0, 0, SPDL_CUDA_HOLD_DEVICE };
    iterate(&c);
    iterate(&one);
}

static void holds_batches_and_goes_on(void) {
    int n, depth;
    for (n = 1; n <= 4; ++n)
        for (depth = 0; depth < 4; ++depth) {
            const iter_case device = { depth, 3, n, 5 + n, SPDL_CUDA_HOLD_DEVICE };
            const iter_case host = { depth, 0, n, 5 + n, SPDL_CUDA_HOLD_HOST };
            const iter_case staged = { depth, 2, n, 5 + n, SPDL_CUDA_HOLD_HOST };
            iterate(&device);
            iterate(&host);
            iterate(&staged);
        }
}

/* A view has its arrays for one call; what is repeated on the host has them for longer. */
static spdl_result numbered_view(void *memory, spdl_cuda_view *view) {
    static spdl_cuda_array array;
    const spdl_result result = flow_view(memory, view);
    memset(&array, 0, sizeof array);
    array.shape[0] = (uint64_t)(uintptr_t)view->user;
    view->array = &array;
    view->array_count = 1;
    return result;
}

static void what_is_repeated_keeps_its_arrays(void) {
    flow_source s;
    void *stream = kit_stream(false);
    spdl_cuda *cuda = open_small(4, 3);
    spdl_cuda_iter *it = NULL;
    spdl_cuda_iter_desc desc;
    spdl_cuda_batch batch;
    int i;
    flow_source_open(&s, 7, 100);
    REQUIRE(spdl_cuda_adopt(cuda, s.seen, 7 * FLOW_SLOT, FLOW_SLOT) == SPDL_OK);
    desc = flow_iter_desc(&s);
    desc.view = numbered_view;
    REQUIRE(spdl_cuda_iter_open(&it, cuda, &desc) == SPDL_OK);
    CHECK_EQ(spdl_cuda_iter_hold(it, 3, SPDL_CUDA_HOLD_HOST), SPDL_OK);
    for (i = 0; i < 12; ++i) {
        REQUIRE(spdl_cuda_next(it, stream, &batch, SPDL_FOREVER) == SPDL_OK);
        CHECK_EQ((uintptr_t)batch.user, i % 3);
        CHECK_EQ(batch.array[0].shape[0], i % 3);
    }
    spdl_cuda_iter_close(it);
    spdl_cuda_close(cuda);
    flow_source_close(&s);
    kit_stream_free(stream);
    finish();
}

/* An end comes once for each epoch, and the next one is sent ahead meanwhile. */
static void epochs_go_on(void) {
    flow_source s;
    void *stream = kit_stream(false);
    spdl_cuda *cuda = open_small(3, 3);
    spdl_cuda_iter *it = NULL;
    spdl_cuda_iter_desc desc;
    uint64_t count, epoch;
    kit_disorder(test_seed());
    flow_source_open(&s, 5, 7);
    s.epochs = true;
    REQUIRE(spdl_cuda_adopt(cuda, s.seen, 5 * FLOW_SLOT, FLOW_SLOT) == SPDL_OK);
    desc = flow_iter_desc(&s);
    REQUIRE(spdl_cuda_iter_open(&it, cuda, &desc) == SPDL_OK);
    for (epoch = 1; epoch <= 6; ++epoch) {
        CHECK_EQ(flow_train(it, stream, &count), SPDL_END);
        CHECK_EQ(count, 7);
    }
    spdl_cuda_iter_close(it);
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
    spdl_cuda *cuda = open_small(3, 3);
    spdl_cuda_iter *it = NULL;
    spdl_cuda_iter_desc desc;
    spdl_cuda_batch batch;
    spdl_result result = SPDL_OK;
    uint64_t seed = 0, late = 0;
    flow_source_open(&s, 5, 12);
    s.takes_us = 3000;
    desc = flow_iter_desc(&s);
    REQUIRE(spdl_cuda_iter_open(&it, cuda, &desc) == SPDL_OK);
    while (result != SPDL_END) {
        result = spdl_cuda_next(it, stream, &batch, seed % 2 ? 0 : 500000);
        if (result == SPDL_TIMEOUT) ++late;
        if (result != SPDL_OK) continue;
        CHECK_EQ((uintptr_t)batch.user, seed);
        flow_read(&batch, stream, seed++);
    }
    CHECK_EQ(seed, 12);
    CHECK(late > 0);
    spdl_cuda_iter_close(it);
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
        spdl_cuda *cuda = open_small(2, 3);
        spdl_cuda_iter *it = NULL, *second = NULL;
        spdl_cuda_iter_desc desc;
        uint64_t count = 0;
        flow_source_open(&s, 5, 100);
        s.fails_at = 11;
        desc = flow_iter_desc(&s);
        REQUIRE(spdl_cuda_iter_open(&it, cuda, &desc) == SPDL_OK);
        CHECK_EQ(spdl_cuda_iter_open(&second, cuda, &desc), SPDL_E_INVALID);
        CHECK_EQ(flow_train(it, stream, &count), SPDL_E_IO);
        CHECK_EQ(count, 10); /* those before it come first */
        CHECK_EQ(flow_train(it, stream, &count), SPDL_E_IO);
        spdl_cuda_iter_close(it);
        spdl_cuda_iter_close(NULL);
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
            spdl_cuda *cuda = open_small(2, 3);
            spdl_cuda_iter *it = NULL;
            spdl_cuda_iter_desc desc;
            spdl_cuda_batch batch;
            int i;
            flow_source_open(&s, 3, 1000);
            s.outside = 2;
            REQUIRE(spdl_cuda_adopt(cuda, s.seen, 3 * FLOW_SLOT, FLOW_SLOT) == SPDL_OK);
            desc = flow_iter_desc(&s);
            REQUIRE(spdl_cuda_iter_open(&it, cuda, &desc) == SPDL_OK);
            for (i = 0; i < taken; ++i) {
                CHECK_EQ(spdl_cuda_next(it, stream, &batch, SPDL_FOREVER), SPDL_OK);
                flow_read(&batch, stream, (uint64_t)i);
            }
            spdl_cuda_iter_close(it);
            CHECK_EQ(kit_wrong(), 0);
            spdl_cuda_close(cuda);
            flow_source_close(&s);
            kit_stream_free(stream);
            finish();
        }
}

/* ---- a pipeline that fills slots, and a row of it that sends them ---- */

static spdl_cuda *line_cuda; /* of the one pipeline at a time */
static int line_made;

SPDL_FN(line_source, void, spdl_cuda_host) {
    if (line_made == 50) return SPDL_END;
    if (flow_fill(line_cuda, out, 3000, (uint64_t)line_made) != SPDL_OK)
        return spdl_fail(task, "no slot");
    ++line_made;
    return SPDL_OK;
}

static void a_pipeline_sends(void) {
    void *stream = kit_stream(false);
    spdl_pipeline *pipeline = NULL;
    const spdl_pipeline_desc desc = { .workers = 2 };
    spdl_cuda_batch *batch = NULL;
    uint64_t count = 0;
    kit_disorder(test_seed());
    line_cuda = open_small(4, 7);
    line_made = 0;
    REQUIRE(spdl_pipeline_create(&pipeline, &desc,
                                 SPDL_STAGES(SPDL_SOURCE(line_source,
                                                         .free_item = spdl_cuda_host_free),
                                             SPDL_CUDA_TRANSFER(line_cuda), SPDL_SINK(2))) ==
            SPDL_OK);
    while (SPDL_NEXT(pipeline, &batch, SPDL_FOREVER) == SPDL_OK) {
        CHECK_EQ((uintptr_t)batch->user, count);
        CHECK_EQ(spdl_cuda_ready(batch, stream), SPDL_OK);
        flow_read(batch, stream, count++);
        CHECK_EQ(spdl_cuda_done(batch, stream), SPDL_OK);
    }
    CHECK_EQ(count, 50);
    spdl_pipeline_destroy(pipeline);
    CHECK_EQ(kit_wrong(), 0);
    CHECK_EQ(stats_of(line_cuda).device_free, 7);
    spdl_cuda_close(line_cuda);
    kit_stream_free(stream);
    finish();
}

/* The other way: the pipeline makes slots, the iterator sends them. */
static void a_pipeline_feeds_the_iterator(void) {
    {
        void *stream = kit_stream(false);
        spdl_pipeline *pipeline = NULL;
        const spdl_pipeline_desc desc = { .workers = 2 };
        spdl_cuda_iter_desc iter_desc;
        spdl_cuda_iter *it = NULL;
        uint64_t count = 0;
        kit_disorder(test_seed());
        line_cuda = open_small(6, 3);
        line_made = 0;
        REQUIRE(spdl_pipeline_create(&pipeline, &desc,
                                     SPDL_STAGES(SPDL_SOURCE(line_source,
                                                             .free_item = spdl_cuda_host_free),
                                                 SPDL_SINK(2))) == SPDL_OK);
        memset(&iter_desc, 0, sizeof iter_desc);
        iter_desc.next = spdl_pipeline_next_fn;
        iter_desc.source = pipeline;
        REQUIRE(spdl_cuda_iter_open(&it, line_cuda, &iter_desc) == SPDL_OK);
        CHECK_EQ(flow_train(it, stream, &count), SPDL_END);
        CHECK_EQ(count, 50);
        spdl_cuda_iter_close(it);
        spdl_pipeline_destroy(pipeline);
        CHECK_EQ(kit_wrong(), 0);
        spdl_cuda_close(line_cuda);
        kit_stream_free(stream);
        finish();
    }
}

/* How many lines of a file have both texts, and the sum of what follows the second. */
static uint64_t lines_with(const char *path, const char *first, const char *second, uint64_t *sum) {
    FILE *file = fopen(path, "r");
    char line[1000];
    uint64_t count = 0;
    *sum = 0;
    REQUIRE(file != NULL);
    while (fgets(line, sizeof line, file) != NULL) {
        const char *at = strstr(line, second);
        if (strstr(line, first) == NULL || at == NULL) continue;
        *sum += strtoull(at + strlen(second), NULL, 10);
        ++count;
    }
    fclose(file);
    return count;
}

/* All copies of an iterator are in the trace of the pipeline, until that is ended. */
static void copies_are_in_the_trace(void) {
    {
        char path[] = "/tmp/spdl_cuda_XXXXXX";
        const spdl_pipeline_desc desc = { .workers = 2, .trace = path, .trace_events = 1000 };
        const bool copied = backend == SPDL_CUDA_GPU;
        const int file = mkstemp(path);
        void *stream = kit_stream(false);
        spdl_pipeline *pipeline = NULL;
        spdl_cuda_iter_desc iter_desc;
        spdl_cuda_iter *it = NULL;
        uint64_t count = 0, bytes, ends;
        REQUIRE(file >= 0 && close(file) == 0);
        kit_disorder(test_seed());
        line_cuda = open_small(6, 3);
        line_made = 0;
        REQUIRE(spdl_pipeline_create(&pipeline, &desc,
                                     SPDL_STAGES(SPDL_SOURCE(line_source,
                                                             .free_item = spdl_cuda_host_free),
                                                 SPDL_SINK(2))) == SPDL_OK);
        CHECK(spdl_cuda_trace(NULL, pipeline) < 0);
        CHECK_EQ(spdl_cuda_trace(line_cuda, pipeline), SPDL_OK);
        memset(&iter_desc, 0, sizeof iter_desc);
        iter_desc.next = spdl_pipeline_next_fn;
        iter_desc.source = pipeline;
        REQUIRE(spdl_cuda_iter_open(&it, line_cuda, &iter_desc) == SPDL_OK);
        CHECK_EQ(flow_train(it, stream, &count), SPDL_END);
        CHECK_EQ(count, 50);
        spdl_cuda_iter_close(it);
        spdl_cuda_trace(line_cuda, NULL);
        CHECK_EQ(flow_batch(line_cuda, stream, 1000, 1), SPDL_OK); /* not in it any more */
        spdl_pipeline_destroy(pipeline);
        CHECK_EQ(lines_with(path, "\"ph\":\"b\"",
                            "\"copy to device\",\"args\":{\"bytes\":", &bytes),
                 copied ? 50 : 0);
        CHECK_EQ(bytes, copied ? 50 * 3000 : 0);
        CHECK_EQ(lines_with(path, "\"ph\":\"e\"", "\"copy to device\"", &ends), copied ? 50 : 0);
        spdl_cuda_close(line_cuda);
        unlink(path);
        kit_stream_free(stream);
        finish();
    }
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
    spdl_allocator slots;
    void *block;
    spdl_cuda_iter *it;
    spdl_cuda_host *host;
    spdl_cuda_batch batch;
    flow_source source;
} forked;

static int uses_it_in_a_child(void *arg) {
    forked *f = (forked *)arg;
    SIM(const uint64_t before = work_calls());
    spdl_cuda_host *host = NULL;
    spdl_cuda_batch batch;
    spdl_error error;
    CHECK_EQ(spdl_cuda_host_get(f->cuda, &host, SPDL_FOREVER), SPDL_E_CUDA_FORKED);
    CHECK_EQ(spdl_cuda_send(f->host, &batch, SPDL_FOREVER), SPDL_E_CUDA_FORKED);
    CHECK_EQ(spdl_cuda_ready(&f->batch, NULL), SPDL_E_CUDA_FORKED);
    CHECK_EQ(spdl_cuda_done(&f->batch, NULL), SPDL_E_CUDA_FORKED);
    CHECK_EQ(spdl_cuda_arrived(&f->batch, 0), SPDL_E_CUDA_FORKED);
    CHECK_EQ(spdl_cuda_adopt(f->cuda, f->source.seen, FLOW_SLOT, FLOW_SLOT), SPDL_E_CUDA_FORKED);
    CHECK_EQ(spdl_cuda_disown(f->cuda, f->source.seen), SPDL_E_CUDA_FORKED);
    CHECK_EQ(spdl_cuda_next(f->it, NULL, &batch, SPDL_FOREVER), SPDL_E_CUDA_FORKED);
    spdl_cuda_error(f->cuda, &error);
    CHECK_EQ(error.result, SPDL_E_CUDA_FORKED);
    CHECK(strstr(error.text, "fork") != NULL);
    CHECK(f->slots.alloc_fn(FLOW_SLOT, 64, f->slots.user) == NULL || spdl_cuda_on_cpu(f->cuda));
    f->slots.free_fn(f->block, FLOW_SLOT, f->slots.user);
    spdl_cuda_host_free(f->host);
    spdl_cuda_batch_free(&f->batch);
    spdl_cuda_iter_close(f->it);
    spdl_cuda_close(f->cuda);
    SIM(CHECK_EQ(work_calls(), before)); /* CUDA was left alone */
    return 7;
}

static void a_child_is_refused(void) {
    static forked f;
    spdl_cuda_iter_desc iter_desc;
    void *stream = kit_stream(false);
    flow_source_open(&f.source, 4, 10);
    f.cuda = open_small(2, 2);
    f.slots = spdl_cuda_slots(f.cuda);
    f.block = f.slots.alloc_fn(FLOW_SLOT, 64, f.slots.user);
    REQUIRE(f.block != NULL);
    REQUIRE(flow_fill(f.cuda, &f.host, 10, 1) == SPDL_OK);
    REQUIRE(spdl_cuda_send(f.host, &f.batch, SPDL_FOREVER) == SPDL_OK);
    REQUIRE(flow_fill(f.cuda, &f.host, 10, 2) == SPDL_OK);
    iter_desc = flow_iter_desc(&f.source);
    REQUIRE(spdl_cuda_iter_open(&f.it, f.cuda, &iter_desc) == SPDL_OK);
    CHECK_EQ(flow_child(uses_it_in_a_child, &f, 10, true), 7);
    CHECK_EQ(spdl_cuda_ready(&f.batch, stream), SPDL_OK); /* the parent goes on */
    flow_read(&f.batch, stream, 1);
    CHECK_EQ(spdl_cuda_done(&f.batch, stream), SPDL_OK);
    spdl_cuda_host_free(f.host);
    spdl_cuda_iter_close(f.it);
    CHECK_EQ(kit_wrong(), 0);
    f.slots.free_fn(f.block, FLOW_SLOT, f.slots.user);
    spdl_cuda_close(f.cuda);
    flow_source_close(&f.source);
    kit_stream_free(stream);
    finish();
}

static spdl_cuda *exit_cuda; /* so that LeakSanitizer finds it */

static int leaves_without_closing(void *arg) {
    (void)arg;
    exit_cuda = open_small(2, 2);
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
    spdl_cuda_desc desc = flow_desc(backend, FLOW_SLOT);
    spdl_cuda *cuda = (spdl_cuda *)&desc;
    spdl_error error;
    desc.error = &error;
    desc.device = SPDL_CUDA_ORDINAL(99);
    CHECK_EQ(spdl_cuda_open(&cuda, &desc), SPDL_E_NOT_FOUND);
    CHECK(cuda == NULL && strstr(error.text, "99") != NULL);
    finish();
}

/* ---- the same program without a device ---- */

static void the_cpu_does_it_too(void) {
    backend = SPDL_CUDA_CPU;
    every_size_arrives();
    arrays_are_packed();
    what_does_not_fit_is_refused();
    any_other_order_is_refused();
    full_slots_are_back_pressure();
    order_holds_on_any_stream();
    any_thread_may_send();
    arenas_are_read_where_they_are();
    other_memory_is_copied_first();
    adopt_refuses_what_it_cannot_use();
    several_streams_read_a_batch();
}

static void the_cpu_iterates_too(void) {
    backend = SPDL_CUDA_CPU;
    iterates_inline();
    holds_batches_and_goes_on();
    epochs_go_on();
    next_keeps_its_time();
    a_source_that_fails_is_told();
    iterators_end_in_the_middle();
    a_pipeline_sends();
    a_pipeline_feeds_the_iterator();
    copies_are_in_the_trace();
}

static void *half_an_allocator(size_t bytes, size_t align, void *user) {
    (void)align, (void)user;
    return malloc(bytes);
}

static void arguments_are_checked(void) {
    spdl_cuda_desc desc = flow_desc(backend, FLOW_SLOT);
    spdl_cuda *cuda = (spdl_cuda *)&desc;
    spdl_error error;
    desc.error = &error;
    desc.slot_bytes = 0;
    CHECK_EQ(spdl_cuda_open(&cuda, &desc), SPDL_E_INVALID);
    CHECK(cuda == NULL);
    CHECK_EQ(error.result, SPDL_E_INVALID);
    CHECK(strstr(error.text, "slot_bytes") != NULL);
    desc = flow_desc(backend, FLOW_SLOT);
    desc.host_slots = SPDL_CUDA_MAX_SLOTS + 1;
    CHECK_EQ(spdl_cuda_open(&cuda, &desc), SPDL_E_INVALID);
    desc.host_slots = -2;
    CHECK_EQ(spdl_cuda_open(&cuda, &desc), SPDL_E_INVALID);
    desc = flow_desc(backend, FLOW_SLOT);
    desc.device_slots = -1;
    CHECK_EQ(spdl_cuda_open(&cuda, &desc), SPDL_E_INVALID);
    desc = flow_desc(backend, FLOW_SLOT);
    desc.error = &error;
    desc.allocator.alloc_fn = half_an_allocator;
    CHECK_EQ(spdl_cuda_open(&cuda, &desc), SPDL_E_INVALID);
    CHECK(strstr(error.text, "allocator") != NULL);
    desc = flow_desc(backend, SIZE_MAX - 5);
    CHECK(spdl_cuda_open(&cuda, &desc) < 0);
    CHECK(cuda == NULL);
    finish();
}

TEST_TABLE(cuda) {
    TEST_CASE(probe_tells_what_there_is),
    TEST_CASE(arguments_are_checked),
    TEST_CASE(every_size_arrives),
    TEST_CASE(arrays_are_packed),
    TEST_CASE(what_does_not_fit_is_refused),
    TEST_CASE(any_other_order_is_refused),
    TEST_CASE(several_streams_read_a_batch),
    TEST_CASE(full_slots_are_back_pressure),
    TEST_CASE(without_time_slots_come_back),
#ifndef CUDA_REAL
    TEST_CASE(a_host_slot_comes_back_with_its_copy),
#endif
    TEST_CASE(order_holds_on_any_stream),
    TEST_CASE(any_thread_may_send),
    TEST_CASE(errors_of_the_caller_stay),
    TEST_CASE(captures_go_on_undisturbed),
    TEST_CASE(the_legacy_stream_spoils_no_capture),
    TEST_CASE(arenas_are_read_where_they_are),
    TEST_CASE(other_memory_is_copied_first),
    TEST_CASE(adopt_refuses_what_it_cannot_use),
    TEST_CASE(iterates_inline),
    TEST_CASE(holds_batches_and_goes_on),
    TEST_CASE(what_is_repeated_keeps_its_arrays),
    TEST_CASE(epochs_go_on),
    TEST_CASE(next_keeps_its_time),
    TEST_CASE(a_source_that_fails_is_told),
    TEST_CASE(iterators_end_in_the_middle),
    TEST_CASE(a_pipeline_sends),
    TEST_CASE(a_pipeline_feeds_the_iterator),
    TEST_CASE(copies_are_in_the_trace),
    TEST_CASE(a_child_is_refused),
    TEST_CASE(leaving_is_quiet),
    TEST_CASE(a_device_that_is_not_there_is_told),
    TEST_CASE(the_cpu_does_it_too),
    TEST_CASE(the_cpu_iterates_too),
    TEST_END
};
