/* spdl_cuda.h: what batches come with, what comes back, and random programs of all of it. On the
   stand-in for CUDA and, built with CUDA_REAL, on a device; failures are in test_cuda_fault.c. */
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

enum { ROUNDS = TEST_SANITIZED ? 60 : 200, BYTES = 4096 };

static spdl_cuda_backend backend = SPDL_CUDA_GPU;

static void finish(void) {
    SIM(sim_stats stats);
    CHECK_EQ(kit_wrong(), 0);
    SIM(sim_get_stats(&stats));
    SIM(CHECK_EQ(stats.violations, 0));
    SIM(CHECK_STR(sim_violation(), ""));
    SIM(CHECK_EQ(stats.mode_depth, 0));
    SIM(CHECK_EQ(sim_leaks(), 0));
    SIM(sim_reset());
}

static spdl_cuda_desc back_desc(int host_slots, int device_slots, int output_slots) {
    spdl_cuda_desc desc = flow_desc(backend, BYTES);
    desc.host_slots = host_slots;
    desc.device_slots = device_slots;
    desc.output_slots = output_slots;
    desc.output_bytes = output_slots > 0 ? BYTES : 0;
    return desc;
}

static spdl_cuda_stats stats_of(const spdl_cuda *cuda) {
    spdl_cuda_stats stats;
    spdl_cuda_get_stats(cuda, &stats);
    return stats;
}

/* ---- what a batch comes with ---- */

static void a_layout_comes_with_each_slot(void) {
    spdl_cuda_desc desc = { .array = { { "image", "<f4", 3, { 4, 5, 6 }, 0, 0 },
                                       { "label", "i8", 1, { 4 }, 0, 0 } } };
    spdl_cuda *cuda;
    spdl_cuda_host *host = NULL;
    spdl_cuda_batch batch;
    void *data = NULL, *stream = kit_stream(false);
    const uint64_t shape = 1;
    int mine = 0;
    desc.backend = backend;
    desc.context = &mine;
    cuda = flow_open(&desc);
    REQUIRE(spdl_cuda_host_get(cuda, &host, 0) == SPDL_OK);
    CHECK_EQ(host->array_count, 2);
    CHECK_EQ(host->bytes, 512 + 32);
    CHECK_EQ((char *)spdl_cuda_host_at(host, 1) - (char *)host->data, 512);
    CHECK(spdl_cuda_host_at(host, 2) == NULL && spdl_cuda_host_at(host, -1) == NULL);
    CHECK_EQ(spdl_cuda_host_add(host, "more", "u1", 1, &shape, &data), SPDL_E_LIMIT);
    kit_fill(spdl_cuda_host_at(host, 0), 480, 1);
    host->array[1].shape[0] = 3; /* the last batch of a set is short */
    CHECK_EQ(spdl_cuda_send(host, &batch, SPDL_FOREVER), SPDL_OK);
    CHECK(batch.context == &mine);
    CHECK_EQ(batch.array[1].shape[0], 3);
    CHECK_EQ((char *)spdl_cuda_at(&batch, 1) - (char *)batch.dev, 512);
    CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
    if (backend == SPDL_CUDA_GPU) kit_check(stream, spdl_cuda_at(&batch, 0), 480, 1);
    CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
    CHECK(spdl_cuda_at(&batch, 1) == NULL);
    while (spdl_cuda_reap(cuda, SPDL_FOREVER) == SPDL_OK) {}
    REQUIRE(spdl_cuda_host_get(cuda, &host, 0) == SPDL_OK);
    CHECK_EQ(host->array[1].shape[0], 4); /* of the desc again */
    spdl_cuda_host_free(host);
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    finish();
}

static void a_layout_that_cannot_be_is_refused(void) {
    static const struct { spdl_cuda_array array; size_t slot_bytes; const char *word; } bad[] = {
        { { "image", "f", 1, { 4 }, 0, 0 }, 0, "image" },
        { { "image", "<f4", 9, { 4 }, 0, 0 }, 0, "image" },
        { { "image", "<f4", 2, { (uint64_t)1 << 40, (uint64_t)1 << 40 }, 0, 0 }, 0, "image" },
        { { "image", "<f4", 1, { 100 }, 0, 0 }, 399, "slot_bytes" },
    };
    size_t i;
    for (i = 0; i < sizeof bad / sizeof bad[0]; ++i) {
        spdl_cuda_desc desc = { .backend = backend };
        spdl_cuda *cuda = NULL;
        spdl_error error;
        desc.array[0] = bad[i].array;
        desc.slot_bytes = bad[i].slot_bytes;
        desc.error = &error;
        CHECK_EQ(spdl_cuda_open(&cuda, &desc), SPDL_E_INVALID);
        CHECK(cuda == NULL && strstr(error.text, bad[i].word) != NULL);
    }
    finish();
}

/* The host slot stays with its batch, and can be read there; it is nobody else's until both the
   batch is done with and its copy is done. */
static void batches_keep_their_host_slot(void) {
    spdl_cuda_desc desc = back_desc(2, 2, 0);
    spdl_cuda *cuda;
    spdl_cuda_host *host = NULL;
    spdl_cuda_batch batch;
    void *stream = kit_stream(false);
    uint64_t i;
    desc.keep_host = true;
    cuda = flow_open(&desc);
    kit_disorder(test_seed());
    for (i = 0; i < ROUNDS; ++i) {
        REQUIRE(flow_fill(cuda, &host, 2000, i) == SPDL_OK);
        REQUIRE(spdl_cuda_send(host, &batch, SPDL_FOREVER) == SPDL_OK);
        CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
        flow_read(&batch, stream, i);
        CHECK(batch.host != NULL);
        CHECK_EQ(kit_differ(batch.host, 2000, i), 0);
        if (i % 3 == 0) CHECK_EQ(spdl_cuda_arrived(&batch, SPDL_FOREVER), SPDL_OK);
        CHECK(stats_of(cuda).host_free < 2);
        CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
    }
    CHECK_EQ(kit_wrong(), 0);
    while (spdl_cuda_reap(cuda, SPDL_FOREVER) == SPDL_OK) {}
    CHECK_EQ(stats_of(cuda).host_free, 2);
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    finish();
}

/* Slots in memory of the caller; each has its number and its place for good. */
static void device_memory_may_be_the_callers(void) {
    spdl_cuda_desc desc = back_desc(2, 3, 0);
    void *memory = NULL, *stream = kit_stream(false);
    spdl_cuda *cuda;
    spdl_cuda_batch batch;
    spdl_cuda_host *host = NULL;
    uint64_t i;
    if (backend == SPDL_CUDA_CPU) return;
    REQUIRE(cudaMalloc(&memory, 3 * BYTES) == cudaSuccess);
    desc.device_memory = memory;
    cuda = flow_open(&desc);
    for (i = 0; i < 10; ++i) {
        REQUIRE(flow_fill(cuda, &host, BYTES, i) == SPDL_OK);
        REQUIRE(spdl_cuda_send(host, &batch, SPDL_FOREVER) == SPDL_OK);
        CHECK(batch.slot >= 0 && batch.slot < 3);
        CHECK_EQ((char *)batch.dev - (char *)memory, batch.slot * BYTES);
        CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
        flow_read(&batch, stream, i);
        CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
    }
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_close(cuda);
    CHECK_EQ(cudaFree(memory), cudaSuccess);
    kit_stream_free(stream);
    finish();
}

#ifndef CUDA_REAL
static void arrived_asks_and_waits(void) {
    const spdl_cuda_desc desc = back_desc(2, 2, 0);
    spdl_cuda *cuda = flow_open(&desc);
    spdl_cuda_host *host = NULL;
    spdl_cuda_batch batch;
    sim_hold();
    REQUIRE(flow_fill(cuda, &host, 100, 1) == SPDL_OK);
    CHECK_EQ(spdl_cuda_send(host, &batch, 0), SPDL_OK);
    CHECK_EQ(spdl_cuda_arrived(&batch, 0), SPDL_TIMEOUT);
    CHECK_EQ(spdl_cuda_arrived(&batch, SPDL_SECONDS(0.01)), SPDL_TIMEOUT);
    sim_release();
    CHECK_EQ(spdl_cuda_arrived(&batch, SPDL_SECONDS(5)), SPDL_OK);
    CHECK_EQ(stats_of(cuda).host_free, 2); /* its source came back by that */
    spdl_cuda_batch_free(&batch);
    CHECK_EQ(spdl_cuda_arrived(&batch, 0), SPDL_E_INVALID);
    spdl_cuda_close(cuda);
    finish();
}
#endif

/* A pointer that a row has handed out is not good for the next batch in the slot. */
SPDL_FN(slots_source, void, spdl_cuda_host) {
    if (spdl_sequence(task) == 40) return SPDL_END;
    return flow_fill((spdl_cuda *)spdl_ctx(task), out, 1000, spdl_sequence(task));
}

static void a_pointer_that_was_kept_is_refused(void) {
    const spdl_cuda_desc desc = back_desc(4, 1, 0);
    const spdl_pipeline_desc workers = { .workers = 1 };
    spdl_cuda *cuda = flow_open(&desc);
    void *stream = kit_stream(false);
    spdl_pipeline *p = NULL;
    spdl_cuda_batch *batch = NULL, *kept = NULL;
    REQUIRE(spdl_pipeline_create(&p, &workers, SPDL_STAGES(
        SPDL_SOURCE(slots_source, .ctx = cuda, .free_item = spdl_cuda_host_free),
        SPDL_CUDA_TRANSFER(cuda), SPDL_SINK(1))) == SPDL_OK);
    while (SPDL_NEXT(p, &batch, SPDL_FOREVER) == SPDL_OK) {
        if (kept != NULL) {
            CHECK_EQ(spdl_cuda_ready(kept, stream), SPDL_E_INVALID);
            CHECK_EQ(spdl_cuda_done(kept, stream), SPDL_E_INVALID);
        }
        CHECK_EQ(spdl_cuda_ready(batch, stream), SPDL_OK);
        flow_read(batch, stream, (uint64_t)(uintptr_t)batch->user);
        CHECK_EQ(spdl_cuda_done(batch, stream), SPDL_OK);
        kept = batch;
    }
    spdl_pipeline_destroy(p);
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    finish();
}

/* ---- batches in place ---- */

enum { ITEM = 512, ITEMS = 8 };

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
    spdl_cuda_desc desc = flow_desc(backend, ITEM * ITEMS);
    spdl_pipeline_desc workers = { .workers = 3 };
    spdl_cuda_iter_desc iter_desc = { .next = spdl_pipeline_next_fn, .view = spdl_cuda_view_batch,
                                      .free_item = spdl_batch_free };
    void *stream = kit_stream(false);
    spdl_cuda_iter *it = NULL;
    spdl_pipeline *p = NULL;
    spdl_cuda *cuda;
    spdl_cuda_batch batch;
    uint64_t n = 0, i;
    desc.host_slots = -1;
    desc.array[0].ndim = 2; /* the last batch has fewer rows */
    memcpy(desc.array[0].type, "u1", 3);
    desc.array[0].shape[0] = ITEMS;
    desc.array[0].shape[1] = ITEM;
    cuda = flow_open(&desc);
    kit_disorder(test_seed());
    workers.allocator = spdl_cuda_slots(cuda);
    REQUIRE(spdl_pipeline_create(&p, &workers, SPDL_STAGES(
        SPDL_SOURCE(place_source), SPDL_PIPE(place_item, .concurrency = 3),
        SPDL_BATCH(ITEMS, .item_bytes = ITEM), SPDL_SINK(2))) == SPDL_OK);
    iter_desc.source = p;
    REQUIRE(spdl_cuda_iter_open(&it, cuda, &iter_desc) == SPDL_OK);
    while (spdl_cuda_next(it, stream, &batch, SPDL_FOREVER) == SPDL_OK) {
        const uint64_t rows = n < 40 * ITEMS ? ITEMS : 3;
        CHECK_EQ(batch.bytes, ITEM * rows);
        CHECK(spdl_cuda_at(&batch, 0) == batch.dev);
        CHECK_EQ(batch.array[0].shape[0], rows);
        CHECK_EQ(batch.array[0].bytes, batch.bytes);
        for (i = 0; i < rows; ++i, ++n)
            if (backend == SPDL_CUDA_GPU)
                kit_check(stream, (char *)batch.dev + i * ITEM, ITEM, n);
            else
                CHECK_EQ(kit_differ((char *)batch.dev + i * ITEM, ITEM, n), 0);
    }
    CHECK_EQ(n, 40 * ITEMS + 3);
    CHECK_EQ(stats_of(cuda).copied_bytes, 0);
    spdl_cuda_iter_close(it);
    spdl_pipeline_destroy(p);
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    finish();
}

/* ---- outputs ---- */

/* A batch there, its bytes inverted into an output, and that back. */
static spdl_cuda_output *round_trip(spdl_cuda *cuda, void *stream, uint64_t seed, size_t bytes) {
    spdl_cuda_host *host = NULL;
    spdl_cuda_output *out = NULL;
    spdl_cuda_batch batch;
    size_t i;
    REQUIRE(flow_fill(cuda, &host, bytes, seed) == SPDL_OK);
    REQUIRE(spdl_cuda_send(host, &batch, SPDL_FOREVER) == SPDL_OK);
    CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
    REQUIRE(spdl_cuda_output_get(cuda, stream, &out, SPDL_FOREVER) == SPDL_OK);
    CHECK_EQ(out->bytes, BYTES);
    out->bytes = bytes;
    if (backend == SPDL_CUDA_GPU) kit_invert(stream, out->dev, batch.dev, bytes);
    for (i = 0; backend == SPDL_CUDA_CPU && i < bytes; ++i)
        ((unsigned char *)out->dev)[i] = (unsigned char)~((unsigned char *)batch.dev)[i];
    CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
    CHECK_EQ(spdl_cuda_output_send(out), SPDL_OK);
    return out;
}

static long differs_inverted(const void *memory, size_t bytes, uint64_t seed) {
    const unsigned char *from = (const unsigned char *)memory;
    long wrong = 0;
    size_t i;
    for (i = 0; i < bytes; ++i) wrong += from[i] != (unsigned char)~kit_byte(seed, i);
    return wrong;
}

static void outputs_come_back(void) {
    int outputs;
    for (outputs = 1; outputs <= 3; ++outputs) {
        const spdl_cuda_desc desc = back_desc(2, 2, outputs);
        spdl_cuda *cuda = flow_open(&desc);
        void *const stream[] = { kit_stream(false), kit_stream(true), NULL };
        spdl_cuda_output *pending[3] = { NULL, NULL, NULL };
        uint64_t i;
        kit_disorder(test_seed());
        for (i = 0; i < ROUNDS + (uint64_t)outputs; ++i) {
            const uint64_t seed = i - (uint64_t)outputs;
            spdl_cuda_output *old = pending[i % (uint64_t)outputs];
            if (old != NULL) {
                const size_t bytes = BYTES - seed % 100;
                CHECK_EQ(spdl_cuda_output_wait(old, i % 2 ? SPDL_FOREVER : SPDL_SECONDS(10)),
                         SPDL_OK);
                CHECK_EQ(differs_inverted(old->host, bytes, seed), 0);
                spdl_cuda_output_free(old);
            }
            pending[i % (uint64_t)outputs] =
                i < ROUNDS ? round_trip(cuda, stream[i % 3], i, BYTES - i % 100) : NULL;
        }
        CHECK_EQ(stats_of(cuda).output_free, outputs);
        CHECK_EQ(stats_of(cuda).outputs, ROUNDS);
        spdl_cuda_close(cuda);
        kit_stream_free(stream[0]);
        kit_stream_free(stream[1]);
        finish();
    }
}

static void any_other_order_is_refused(void) {
    const spdl_cuda_desc desc = back_desc(2, 2, 1), none = back_desc(2, 2, 0);
    spdl_cuda *cuda = flow_open(&desc), *without = flow_open(&none);
    void *stream = kit_stream(false);
    spdl_cuda_output *out = NULL, *second = NULL;
    CHECK_EQ(spdl_cuda_output_get(without, stream, &out, 0), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_output_get(cuda, stream, &out, 0), SPDL_OK);
    CHECK_EQ(spdl_cuda_output_get(cuda, stream, &second, 0), SPDL_TIMEOUT);
    CHECK_EQ(spdl_cuda_output_get(cuda, stream, &second, SPDL_SECONDS(0.01)), SPDL_TIMEOUT);
    CHECK_EQ(spdl_cuda_output_wait(out, 0), SPDL_E_INVALID); /* not sent */
    out->bytes = BYTES + 1;
    CHECK_EQ(spdl_cuda_output_send(out), SPDL_E_INVALID);
    out->bytes = 0;
    CHECK_EQ(spdl_cuda_output_send(out), SPDL_OK);
    CHECK_EQ(spdl_cuda_output_send(out), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_output_wait(out, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(spdl_cuda_output_wait(out, 0), SPDL_OK);
    spdl_cuda_output_free(out);
    spdl_cuda_output_free(out); /* ignored */
    spdl_cuda_output_free(NULL);
    CHECK_EQ(stats_of(cuda).output_free, 1);
    CHECK_EQ(spdl_cuda_output_send(out), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_output_wait(out, 0), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_output_get(NULL, stream, &out, 0), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_output_send(NULL), SPDL_E_INVALID);
    spdl_cuda_close(cuda);
    spdl_cuda_close(without);
    kit_stream_free(stream);
    finish();
}

/* Freed before it was sent, or waited for: what kernels and copies still do to it comes before what
   the next ones do. */
static void outputs_may_be_dropped(void) {
    const spdl_cuda_desc desc = back_desc(2, 2, 1);
    spdl_cuda *cuda = flow_open(&desc);
    void *stream = kit_stream(false), *other = kit_stream(false);
    spdl_cuda_output *out = NULL;
    uint64_t i;
    kit_disorder(test_seed());
    for (i = 0; i < ROUNDS; ++i) {
        if (i % 3 == 0) { /* not sent */
            REQUIRE(spdl_cuda_output_get(cuda, other, &out, SPDL_FOREVER) == SPDL_OK);
            if (backend == SPDL_CUDA_GPU) kit_invert(other, out->dev, out->dev, BYTES);
            spdl_cuda_output_free(out);
            continue;
        }
        out = round_trip(cuda, stream, i, BYTES);
        if (i % 3 == 2) {
            CHECK_EQ(spdl_cuda_output_wait(out, SPDL_FOREVER), SPDL_OK);
            CHECK_EQ(differs_inverted(out->host, BYTES, i), 0);
        }
        spdl_cuda_output_free(out);
    }
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    kit_stream_free(other);
    finish();
}

/* ---- the row ---- */


static uint64_t stage_fails_at;       /* this launch fails, from 1; 0: none */
static uint64_t stage_late_at;        /* and this one returns SPDL_TIMEOUT */
static uint64_t stage_ns;             /* of a kernel */
static uint64_t stage_next;           /* the batch whose launch comes next */

static spdl_result stage_launch(spdl_task *task, const spdl_cuda_batch *batch,
                                spdl_cuda_output *out, spdl_cuda_stream stream) {
    const uint64_t seed = (uint64_t)(uintptr_t)batch->user;
    size_t i;
    CHECK(seed >= __atomic_load_n(&stage_next, __ATOMIC_RELAXED)); /* in order */
    __atomic_store_n(&stage_next, seed + 1, __ATOMIC_RELAXED);
    CHECK(out->user == batch->user);
    if (stage_fails_at == seed + 1) return spdl_fail(task, "launch %d failed", (int)seed);
    if (stage_late_at == seed + 1) return SPDL_TIMEOUT;
    out->bytes = batch->bytes;
    if (stream != NULL && stage_ns > 0) kit_spin(stream, stage_ns);
    if (stream != NULL) kit_invert(stream, out->dev, batch->dev, batch->bytes);
    for (i = 0; stream == NULL && i < batch->bytes; ++i)
        ((unsigned char *)out->dev)[i] = (unsigned char)~((unsigned char *)batch->dev)[i];
    return SPDL_OK;
}

static uint64_t stage_count = 100;

SPDL_FN(stage_source, void, spdl_cuda_host) {
    const uint64_t n = spdl_sequence(task), shape = 1000 + n % 50;
    spdl_result result;
    void *data;
    if (n == stage_count) return SPDL_END;
    result = spdl_cuda_host_take(task, (spdl_cuda *)spdl_ctx(task), out);
    if (result != SPDL_OK) return result;
    CHECK_EQ(spdl_cuda_host_add(*out, "x", "u1", 1, &shape, &data), SPDL_OK);
    kit_fill(data, shape, n);
    (*out)->user = (void *)(uintptr_t)n;
    return SPDL_OK;
}

static spdl_pipeline *stage_pipeline(spdl_cuda *cuda, int workers, int sink) {
    const spdl_pipeline_desc desc = { .workers = workers, .logger = { flow_quiet, NULL } };
    spdl_pipeline *p = NULL;
    stage_next = 0;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_SOURCE(stage_source, .ctx = cuda, .free_item = spdl_cuda_host_free,
                    .threads = workers == 1), /* it waits for what a worker does */
        SPDL_CUDA_STAGE(cuda, stage_launch),
        SPDL_SINK(sink))) == SPDL_OK);
    return p;
}

static uint64_t stage_drain(spdl_pipeline *p) {
    spdl_cuda_output *out = NULL;
    uint64_t n = 0;
    while (SPDL_NEXT(p, &out, SPDL_FOREVER) == SPDL_OK) {
        CHECK_EQ((uintptr_t)out->user, n);
        CHECK_EQ(differs_inverted(out->host, 1000 + n % 50, n), 0);
        spdl_cuda_output_free(out);
        ++n;
    }
    return n;
}

/* What was repeated on the host stays there until the last batch of it is done with. */
static void a_repeated_batch_keeps_its_host_slot(void) {
    const spdl_pipeline_desc workers = { .workers = 1 };
    spdl_cuda_desc desc = back_desc(2, 3, 0);
    spdl_cuda_iter_desc iter_desc = { .next = spdl_pipeline_next_fn };
    void *stream = kit_stream(false);
    spdl_cuda_iter *it = NULL;
    spdl_pipeline *p = NULL;
    spdl_cuda_batch batch;
    spdl_cuda *cuda;
    int i;
    desc.keep_host = true;
    cuda = flow_open(&desc);
    REQUIRE(spdl_pipeline_create(&p, &workers, SPDL_STAGES(
        SPDL_SOURCE(stage_source, .ctx = cuda, .free_item = spdl_cuda_host_free),
        SPDL_SINK(1))) == SPDL_OK);
    iter_desc.source = p;
    REQUIRE(spdl_cuda_iter_open(&it, cuda, &iter_desc) == SPDL_OK);
    for (i = 0; i < 24; ++i) {
        if (i % 6 == 2) CHECK_EQ(spdl_cuda_iter_hold(it, 1, SPDL_CUDA_HOLD_HOST), SPDL_OK);
        if (i % 6 == 5) CHECK_EQ(spdl_cuda_iter_hold(it, 0, SPDL_CUDA_HOLD_HOST), SPDL_OK);
        REQUIRE(spdl_cuda_next(it, stream, &batch, SPDL_FOREVER) == SPDL_OK);
        usleep(2000); /* the source fills whatever it may */
        CHECK_EQ(kit_differ(batch.host, batch.bytes, (uint64_t)(uintptr_t)batch.user), 0);
        flow_read(&batch, stream, (uint64_t)(uintptr_t)batch.user);
    }
    spdl_cuda_iter_close(it);
    spdl_pipeline_destroy(p);
    CHECK_EQ(stats_of(cuda).host_free, 2);
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    finish();
}

/* With all host slots held nothing would come any more. */
static void no_more_is_held_than_there_is(void) {
    const spdl_cuda_desc desc = back_desc(2, 4, 0);
    spdl_cuda_iter_desc iter_desc = { .next = spdl_pipeline_next_fn };
    spdl_cuda *cuda = flow_open(&desc);
    void *stream = kit_stream(false);
    spdl_cuda_iter *it = NULL;
    spdl_pipeline *p = NULL;
    spdl_cuda_batch batch;
    int i;
    stage_next = 0;
    REQUIRE(spdl_pipeline_create(&p, &(spdl_pipeline_desc){ .workers = 2 }, SPDL_STAGES(
        SPDL_SOURCE(stage_source, .ctx = cuda, .free_item = spdl_cuda_host_free),
        SPDL_SINK(1))) == SPDL_OK);
    stage_next = 0;
    iter_desc.source = p;
    REQUIRE(spdl_cuda_iter_open(&it, cuda, &iter_desc) == SPDL_OK);
    CHECK_EQ(spdl_cuda_iter_hold(it, 3, SPDL_CUDA_HOLD_HOST), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_iter_hold(it, 2, SPDL_CUDA_HOLD_HOST), SPDL_OK);
    for (i = 0; i < 12; ++i)
        REQUIRE(spdl_cuda_next(it, stream, &batch, SPDL_SECONDS(10)) == SPDL_OK);
    spdl_cuda_iter_close(it);
    spdl_pipeline_destroy(p);
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    finish();
}

/* The trainer may give back what it has when the pipeline is gone. */
static void a_host_slot_outlives_its_pipeline(void) {
    const spdl_cuda_desc desc = back_desc(2, 1, 0);
    spdl_cuda *cuda = flow_open(&desc);
    spdl_cuda_host *host = NULL;
    spdl_pipeline *p = NULL;
    stage_next = 0;
    REQUIRE(spdl_pipeline_create(&p, &(spdl_pipeline_desc){ .workers = 2 }, SPDL_STAGES(
        SPDL_SOURCE(stage_source, .ctx = cuda, .free_item = spdl_cuda_host_free),
        SPDL_SINK(1))) == SPDL_OK);
    REQUIRE(SPDL_NEXT(p, &host, SPDL_FOREVER) == SPDL_OK);
    spdl_pipeline_destroy(p);
    spdl_cuda_host_free(host);
    CHECK_EQ(stats_of(cuda).host_free, 2);
    spdl_cuda_close(cuda);
    finish();
}

/* Only one of them would get host slots back. */
static void no_row_beside_an_iterator(void) {
    const spdl_cuda_desc desc = back_desc(2, 2, 2);
    flow_source none = { .count = 0 };
    spdl_cuda_iter_desc iter_desc = { .next = flow_next, .source = &none };
    spdl_cuda *cuda = flow_open(&desc);
    spdl_cuda_iter *it = NULL;
    spdl_pipeline *p;
    REQUIRE(spdl_cuda_iter_open(&it, cuda, &iter_desc) == SPDL_OK);
    p = stage_pipeline(cuda, 2, 1);
    CHECK_EQ(stage_drain(p), 0);
    CHECK(strstr(spdl_pipeline_error(p)->text, "iterator") != NULL);
    spdl_pipeline_destroy(p);
    spdl_cuda_iter_close(it);
    CHECK_EQ(stats_of(cuda).output_free, 2);
    CHECK_EQ(stats_of(cuda).host_free, 2);
    spdl_cuda_close(cuda);
    finish();
}

/* Batches that keep a host slot cannot be more than there are: the source would wait for ever. */
static void what_is_repeated_has_to_fit(void) {
    int kind;
    for (kind = 0; kind < 4; ++kind) { /* as it is, with keep_host, on the CPU, memory elsewhere */
        spdl_cuda_iter_desc iter_desc = { .next = spdl_pipeline_next_fn };
        spdl_cuda_desc desc = back_desc(2, 3, 0);
        spdl_cuda_iter *it = NULL;
        spdl_cuda *cuda;
        desc.keep_host = kind == 1;
        if (kind == 2) desc.backend = SPDL_CUDA_CPU;
        if (kind == 3) iter_desc.view = spdl_cuda_view_batch;
        cuda = flow_open(&desc);
        REQUIRE(spdl_cuda_iter_open(&it, cuda, &iter_desc) == SPDL_OK);
        CHECK_EQ(spdl_cuda_iter_hold(it, 2, SPDL_CUDA_HOLD_HOST), SPDL_OK);
        CHECK_EQ(spdl_cuda_iter_hold(it, 3, SPDL_CUDA_HOLD_HOST), SPDL_E_INVALID);
        CHECK_EQ(spdl_cuda_iter_hold(it, 3, SPDL_CUDA_HOLD_DEVICE),
                 kind % 3 == 0 ? SPDL_OK : SPDL_E_INVALID);
        spdl_cuda_iter_close(it);
        spdl_cuda_close(cuda);
    }
    finish();
}

static void a_row_answers_each_batch(void) {
    int workers, slots;
    for (workers = 1; workers <= 3; workers += 2)
        for (slots = 1; slots <= 4; ++slots) {
            const spdl_cuda_desc desc = back_desc(2, slots, 2 * slots);
            spdl_cuda *cuda = flow_open(&desc);
            spdl_pipeline *p;
            kit_disorder(test_seed());
            p = stage_pipeline(cuda, workers, 2);
            CHECK_EQ(stage_drain(p), stage_count);
            CHECK(!spdl_pipeline_failed(p));
            spdl_pipeline_destroy(p);
            while (spdl_cuda_reap(cuda, SPDL_FOREVER) == SPDL_OK) {}
            CHECK_EQ(stats_of(cuda).output_free, 2 * slots);
            CHECK_EQ(stats_of(cuda).host_free, 2);
            CHECK_EQ(stats_of(cuda).device_free, slots);
            spdl_cuda_close(cuda);
            finish();
        }
}

static void a_launch_that_fails_fails_its_item(void) {
    const spdl_cuda_desc desc = back_desc(3, 3, 4);
    spdl_cuda *cuda = flow_open(&desc);
    spdl_pipeline *p;
    stage_fails_at = 21;
    p = stage_pipeline(cuda, 2, 2);
    CHECK_EQ(stage_drain(p), 20);
    CHECK(spdl_pipeline_failed(p));
    CHECK(strstr(spdl_pipeline_error(p)->text, "launch 20 failed") != NULL);
    CHECK_EQ(spdl_pipeline_error(p)->stage, 1);
    CHECK_EQ(spdl_pipeline_error(p)->item, 20);
    spdl_pipeline_destroy(p);
    stage_fails_at = 0;
    CHECK_EQ(stats_of(cuda).output_free, 4);
    CHECK_EQ(stats_of(cuda).device_free, 3);
    stage_late_at = 11; /* no result of a stage, and not a reason to drop the item in silence */
    p = stage_pipeline(cuda, 2, 2);
    CHECK_EQ(stage_drain(p), 10);
    CHECK(spdl_pipeline_failed(p));
    spdl_pipeline_destroy(p);
    stage_late_at = 0;
    p = stage_pipeline(cuda, 2, 2); /* and another */
    CHECK_EQ(stage_drain(p), stage_count);
    spdl_pipeline_destroy(p);
    spdl_cuda_close(cuda);
    finish();
}

/* Stopped at any time, with outputs in the trainer's hands or none. */
static void the_row_ends_with_the_pipeline(void) {
    uint64_t taken;
    for (taken = 0; taken < 8; ++taken) {
        const spdl_cuda_desc desc = back_desc(2, 2, 3);
        spdl_cuda *cuda = flow_open(&desc);
        spdl_cuda_output *out[8];
        spdl_pipeline *p;
        uint64_t i, held = taken < 3 ? taken : 2;
        kit_disorder(test_seed());
        p = stage_pipeline(cuda, 2, 1);
        for (i = 0; i < taken; ++i) {
            REQUIRE(SPDL_NEXT(p, &out[i], SPDL_FOREVER) == SPDL_OK);
            if (i >= held) spdl_cuda_output_free(out[i]);
        }
        spdl_pipeline_destroy(p);
        for (i = 0; i < held; ++i) spdl_cuda_output_free(out[i]);
        while (spdl_cuda_reap(cuda, SPDL_FOREVER) == SPDL_OK) {}
        CHECK_EQ(stats_of(cuda).output_free, 3);
        CHECK_EQ(stats_of(cuda).host_free, 2);
        CHECK_EQ(stats_of(cuda).device_free, 2);
        spdl_cuda_close(cuda);
        finish();
    }
}

static void the_row_needs_outputs(void) {
    const spdl_cuda_desc desc = back_desc(2, 2, 0);
    spdl_cuda *cuda = flow_open(&desc);
    spdl_pipeline *p = stage_pipeline(cuda, 1, 1);
    CHECK_EQ(stage_drain(p), 0);
    CHECK(strstr(spdl_pipeline_error(p)->text, "output_bytes") != NULL);
    spdl_pipeline_destroy(p);
    spdl_cuda_close(cuda);
    finish();
}

#ifndef CUDA_REAL

/* The device is lost while launches are under way: all their items fail, and everything ends. */
static void a_lost_device_ends_the_row(void) {
    int at;
    for (at = 0; at < 6; ++at) {
        const spdl_cuda_desc desc = back_desc(2, 2, 4);
        spdl_cuda *cuda = flow_open(&desc);
        spdl_pipeline *p = stage_pipeline(cuda, 2, 2);
        spdl_cuda_output *out = NULL;
        spdl_result result = SPDL_OK;
        int n = 0;
        while (result == SPDL_OK) {
            result = SPDL_NEXT(p, &out, SPDL_FOREVER);
            if (result == SPDL_OK) spdl_cuda_output_free(out);
            if (n++ == at) sim_poison(cudaErrorIllegalAddress);
        }
        CHECK(result == SPDL_E_CUDA_LOST || result == SPDL_END);
        if (result < 0) CHECK(strstr(spdl_pipeline_error(p)->text, "lost") != NULL);
        spdl_pipeline_destroy(p);
        spdl_cuda_close(cuda);
        sim_reset();
    }
}

/* max(there, kernels, back) / all, by the clock of the simulated device. */
static double overlap(uint64_t there_ns, uint64_t kernel_ns) {
    const spdl_cuda_desc desc = back_desc(6, 3, 8);
    spdl_cuda *cuda;
    spdl_pipeline *p;
    sim_stats stats;
    double longest;
    sim_model(1000.0 / ((double)there_ns * 1e-9), 0); /* the copies back are as long */
    stage_count = 24;
    stage_ns = kernel_ns;
    cuda = flow_open(&desc);
    p = stage_pipeline(cuda, 3, 2);
    CHECK_EQ(stage_drain(p), 24);
    spdl_pipeline_destroy(p);
    sim_get_stats(&stats);
    spdl_cuda_close(cuda);
    sim_reset();
    stage_ns = 0;
    stage_count = 100;
    longest = (double)(stats.copy_ns / 2 > stats.kernel_ns ? stats.copy_ns / 2 : stats.kernel_ns);
    return longest / (double)(stats.last_ns - stats.first_ns);
}

static void there_kernels_and_back_overlap(void) {
    flow_overlaps(overlap, "copies there and back");
}

/* How many lines of a trace have this text, and the latest time on them in ms. */
static int trace_lines(const char *path, const char *with) {
    FILE *file = fopen(path, "r");
    char line[1000];
    int count = 0;
    REQUIRE(file != NULL);
    while (fgets(line, sizeof line, file) != NULL) count += strstr(line, with) != NULL;
    fclose(file);
    return count;
}

/* Copies, launches and what comes back are in the trace, when the device did them: 3 ms each, by
   its own clock, though the host saw them later. */
static void the_trace_tells_the_devices_time(void) {
    char path[] = "/tmp/spdl_cuda_XXXXXX";
    const spdl_pipeline_desc desc = { .workers = 2, .trace = path, .trace_events = 1000 };
    spdl_cuda_desc slots = back_desc(2, 2, 6);
    const int file = mkstemp(path);
    spdl_pipeline *p = NULL;
    spdl_cuda *cuda;
    const spdl__track *track;
    uint64_t i, off = 0;
    REQUIRE(file >= 0 && close(file) == 0);
    stage_count = 20;
    stage_next = 0;
    stage_ns = 3000000;
    sim_model(1000.0 / 3e-3, 0);
    slots.logger.log_fn = flow_log_all;
    cuda = flow_open(&slots);
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_SOURCE(stage_source, .ctx = cuda, .free_item = spdl_cuda_host_free),
        SPDL_CUDA_STAGE(cuda, stage_launch), SPDL_SINK(2))) == SPDL_OK);
    CHECK_EQ(spdl_cuda_trace(cuda, p), SPDL_OK);
    CHECK_EQ(stage_drain(p), 20);
    while (spdl_cuda_reap(cuda, SPDL_FOREVER) == SPDL_OK) {}
    track = &p->trace->track[p->trace->tracks - 1];
    for (i = 0; i < track->count; ++i) {
        const uint64_t took = track->records[i].end - track->records[i].begin;
        if (took < 2500000 || took > 6500000) ++off;
    }
    CHECK(off <= 2); /* the first may have been queued before the trace began */
    CHECK_EQ(spdl_cuda_trace(cuda, NULL), SPDL_OK);
    spdl_pipeline_destroy(p);
    CHECK(trace_lines(path, "\"copy to device\"") >= 2 * 17);
    CHECK(trace_lines(path, "\"launch\",\"args\"") >= 17);
    CHECK(trace_lines(path, "\"copy to host\",\"args\"") >= 17);
    printf("   right to %.1f us\n", (double)stats_of(cuda).trace_error_ns * 1e-3);
    CHECK(stats_of(cuda).trace_error_ns < 5000000);
    CHECK(strstr(flow_line, "right to") != NULL);
    spdl_cuda_close(cuda);
    unlink(path);
    stage_ns = 0;
    stage_count = 100;
    finish();
}

/* ---- an edge is missing ---- */

typedef enum edge { EVERY_EDGE, NO_D1, NO_D2, NO_D3, NO_D4 } edge;

static void leave_out(edge missing, const spdl_cuda *cuda, void *stream) {
    switch (missing) {
    case NO_D1: sim_drop(SIM_StreamWaitEvent, (cudaStream_t)cuda->back); break;
    case NO_D2:
        sim_drop(SIM_EventQuery, SIM_ANY_STREAM);
        sim_drop(SIM_EventSynchronize, SIM_ANY_STREAM);
        break;
    case NO_D3: sim_drop(SIM_StreamWaitEvent, (cudaStream_t)stream); break;
    default: break;
    }
}

typedef struct constant { /* a kernel that writes what it was told */
    void *to;
    unsigned char value;
} constant;

static void write_constant(void *arg) {
    const constant *c = (const constant *)arg;
    memset(sim_view(c->to), c->value, BYTES);
}

static long count_other(const unsigned char *from, int value) {
    long wrong = 0;
    size_t i;
    for (i = 0; i < BYTES; ++i) wrong += from[i] != value;
    return wrong;
}

/* Two outputs in turns, each waited for and read before it is got again; no batches, so that no
   other edge is made by the calls that are left out. For D3 it is given back without that, for D4
   before it is read. */
static int run_broken(void *arg) {
    const edge missing = *(const edge *)arg;
    static constant work[80];
    const spdl_cuda_desc desc = back_desc(1, 1, 2);
    void *stream = kit_stream(false);
    spdl_cuda *cuda = flow_open(&desc);
    spdl_cuda_output *old[2] = { NULL, NULL }, *out = NULL;
    long wrong = 0;
    int i;
    kit_disorder(test_seed() + (uint64_t)getpid());
    leave_out(missing, cuda, stream);
    for (i = 0; i < 80; ++i) {
        const spdl_cuda_output *before = old[i % 2];
        if (before != NULL && missing != NO_D3) {
            REQUIRE(spdl_cuda_output_wait(old[i % 2], SPDL_FOREVER) == SPDL_OK);
            if (missing != NO_D4)
                wrong += count_other((const unsigned char *)before->host, (unsigned char)(i - 2));
        }
        spdl_cuda_output_free(old[i % 2]);
        REQUIRE(spdl_cuda_output_get(cuda, stream, &out, SPDL_SECONDS(5)) == SPDL_OK);
        work[i].to = out->dev;
        work[i].value = (unsigned char)i;
        REQUIRE(sim_launch((cudaStream_t)stream, write_constant, &work[i], 0) == cudaSuccess);
        REQUIRE(spdl_cuda_output_send(out) == SPDL_OK);
        if (missing == NO_D4) usleep(100);
        if (before != NULL && missing == NO_D4)
            wrong += count_other((const unsigned char *)before->host, (unsigned char)(i - 2));
        old[i % 2] = out;
    }
    sim_drop_none();
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
    if (wrong != 0) _exit(65);
    spdl_cuda_close(cuda);
    sim_reset();
    return 0;
}

/* Caught: by ThreadSanitizer (66) or by wrong bytes (65). */
static bool is_caught(edge missing) {
    int tries;
    for (tries = 0; tries < 12; ++tries) {
        const int status = flow_child(run_broken, &missing, 30, false);
        if (status == 65 || status == 66) return true;
        if (!CHECK_EQ(status, 0)) return false;
    }
    return false;
}

static void all_edges_are_enough(void) {
    edge none = EVERY_EDGE;
    CHECK_EQ(flow_child(run_broken, &none, 30, true), 0);
}

static void without_d1_it_is_caught(void) { CHECK(is_caught(NO_D1)); }
static void without_d2_it_is_caught(void) { CHECK(is_caught(NO_D2)); }

static void without_d4_it_is_caught(void) { CHECK(is_caught(NO_D4)); }

/* Nobody reads what the device then has mixed up: only ThreadSanitizer sees it. */
static void without_d3_it_is_caught(void) {
#if defined(__SANITIZE_THREAD__)
    CHECK(is_caught(NO_D3));
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
    CHECK(is_caught(NO_D3));
#endif
#endif
}

#endif /* CUDA_REAL */

/* ---- random programs ---- */

typedef struct program {
    uint64_t seed, count, stop_at; /* 0: it runs to its end */
    int shape, fillers, workers, odd, hold;
    bool epochs;
    spdl_cuda *cuda;
} program;

SPDL_FN(program_source, void, void) {
    const program *g = (const program *)spdl_ctx(task);
    *out = (void *)(uintptr_t)(spdl_sequence(task) + 1);
    return spdl_sequence(task) == g->count ? SPDL_END : SPDL_OK;
}

SPDL_FN(program_fill, void, spdl_cuda_host) {
    const program *g = (const program *)spdl_ctx(task);
    const uint64_t n = spdl_sequence(task), shape = 1000 + n % 50;
    uint64_t state = g->seed + n;
    spdl_result result;
    void *data;
    if (g->odd == 1 && n % 5 == 2) return SPDL_SKIP;
    if (test_random(&state) % 4 == 0) usleep((useconds_t)(test_random(&state) % 300));
    result = spdl_cuda_host_take(task, g->cuda, out);
    if (result != SPDL_OK) return result;
    CHECK_EQ(spdl_cuda_host_add(*out, "x", "u1", 1, &shape, &data), SPDL_OK);
    kit_fill(data, shape, n);
    (*out)->user = (void *)(uintptr_t)n;
    if (g->odd == 2 && n % 7 == 3) {
        spdl_cuda_host_free(*out);
        return SPDL_SKIP;
    }
    return SPDL_OK;
}

static int64_t program_patience(uint64_t *state) {
    const uint64_t which = test_random(state) % 3;
    return which == 0 ? SPDL_FOREVER : which == 1 ? 0 : (int64_t)(test_random(state) % 300000);
}

static void program_read(const spdl_cuda_batch *batch, void *stream, uint64_t *last) {
    const uint64_t n = (uint64_t)(uintptr_t)batch->user;
    CHECK(last == NULL || n >= *last);
    if (last != NULL) *last = n + 1;
    CHECK_EQ(batch->bytes, 1000 + n % 50);
    if (batch->host != NULL) CHECK_EQ(kit_differ(batch->host, batch->bytes, n), 0);
    flow_read(batch, stream, n);
}

/* The trainer of an iterator: epochs, patience of all kinds, now and then a while of the same. */
static void program_iterate(const program *g, spdl_pipeline *p, void *stream, uint64_t *state) {
    spdl_cuda_iter_desc desc = { .next = spdl_pipeline_next_fn, .source = p };
    spdl_cuda_iter *it = NULL;
    spdl_cuda_batch batch;
    uint64_t n = 0, ends = 0, last = 0, held = 0;
    spdl_result result = SPDL_OK;
    desc.depth = (int)(test_random(state) % (uint64_t)stats_of(g->cuda).device_slots);
    REQUIRE(spdl_cuda_iter_open(&it, g->cuda, &desc) == SPDL_OK);
    while (result >= 0 && ends < (g->epochs ? 3u : 1u) && (g->stop_at == 0 || n < g->stop_at)) {
        result = spdl_cuda_next(it, stream, &batch, program_patience(state));
        if (result == SPDL_END) {
            ++ends;
            last = 0;
        }
        if (result != SPDL_OK) continue;
        program_read(&batch, stream, held > 0 || g->hold > 0 ? NULL : &last);
        ++n;
        if (g->hold > 0 && n % 16 == 7)
            CHECK_EQ(spdl_cuda_iter_hold(it, g->hold, n % 32 < 16 ? SPDL_CUDA_HOLD_DEVICE
                                                                  : SPDL_CUDA_HOLD_HOST), SPDL_OK);
        if (g->hold > 0 && n % 16 == 14)
            CHECK_EQ(spdl_cuda_iter_hold(it, 0, SPDL_CUDA_HOLD_DEVICE), SPDL_OK);
    }
    CHECK(result >= 0);
    spdl_cuda_iter_close(it);
}

static void program_rows(const program *g, spdl_pipeline *p, void *stream, uint64_t *state) {
    void *item = NULL;
    uint64_t n = 0, last = 0;
    spdl_result result = SPDL_OK;
    while (result >= 0 && result != SPDL_END && (g->stop_at == 0 || n < g->stop_at)) {
        result = spdl_pipeline_next(p, &item, program_patience(state));
        if (result != SPDL_OK) continue;
        ++n;
        if (g->shape == 1) {
            const spdl_cuda_batch *batch = (const spdl_cuda_batch *)item;
            CHECK_EQ(spdl_cuda_ready(batch, stream), SPDL_OK);
            program_read(batch, stream, &last);
            CHECK_EQ(spdl_cuda_done(batch, stream), SPDL_OK);
        } else {
            spdl_cuda_output *out = (spdl_cuda_output *)item;
            const uint64_t seed = (uint64_t)(uintptr_t)out->user;
            CHECK(seed >= last);
            last = seed + 1;
            CHECK_EQ(differs_inverted(out->host, out->bytes, seed), 0);
            spdl_cuda_output_free(out);
        }
    }
    CHECK(result >= 0);
}

static spdl_pipeline *program_pipeline(program *g) {
    const spdl_pipeline_desc desc = { .workers = g->workers, .logger = { flow_quiet, NULL } };
    spdl_pipeline *p = NULL;
    stage_next = 0;
#define PROGRAM_FILL                                                                               \
    SPDL_SOURCE(program_source, .ctx = g, .continuous = g->epochs),                                \
        SPDL_PIPE(program_fill, .ctx = g, .concurrency = g->fillers,                               \
                  .threads = g->shape > 0 ? g->fillers : 0, .free_item = spdl_cuda_host_free)
    if (g->shape == 0)
        (void)spdl_pipeline_create(&p, &desc, SPDL_STAGES(PROGRAM_FILL, SPDL_SINK(2)));
    else if (g->shape == 1)
        (void)spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            PROGRAM_FILL, SPDL_CUDA_TRANSFER(g->cuda), SPDL_SINK(1)));
    else
        (void)spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            PROGRAM_FILL, SPDL_CUDA_STAGE(g->cuda, stage_launch), SPDL_SINK(2)));
    REQUIRE(p != NULL);
    return p;
}

static void run_program(uint64_t seed) {
    uint64_t state = seed;
    spdl_cuda_desc desc;
    program g;
    spdl_pipeline *p;
    void *stream;
    memset(&g, 0, sizeof g);
    g.seed = seed;
    backend = test_random(&state) % 5 == 0 ? SPDL_CUDA_CPU : SPDL_CUDA_GPU;
    desc = back_desc(1 + (int)(test_random(&state) % 4), 1 + (int)(test_random(&state) % 4),
                     1 + (int)(test_random(&state) % 4));
    desc.keep_host = test_random(&state) % 4 == 0;
    desc.time_copies = test_random(&state) % 8 == 0;
    g.shape = (int)(test_random(&state) % 3);
    g.fillers = 1 + (int)(test_random(&state) % 8);
    g.workers = 1 + (int)(test_random(&state) % 8);
    g.odd = (int)(test_random(&state) % 3);
    g.count = 1 + test_random(&state) % 30;
    g.epochs = g.shape == 0 && test_random(&state) % 3 == 0;
    if (test_random(&state) % 3 == 0) g.stop_at = 1 + test_random(&state) % 20;
    if (g.shape == 0 && test_random(&state) % 3 == 0)
        g.hold = 1 + (int)(test_random(&state) % (uint64_t)(desc.host_slots < desc.device_slots
                                                                ? desc.host_slots
                                                                : desc.device_slots));
    SIM(if (test_random(&state) % 6 == 0) sim_set_pin_limit(1));
    SIM(sim_pageable_late(true));
    if (test_random(&state) % 2) kit_disorder(seed);
    stream = kit_stream(test_random(&state) % 2 == 0);
    g.cuda = flow_open(&desc);
    p = program_pipeline(&g);
    if (g.shape == 0) program_iterate(&g, p, stream, &state);
    else program_rows(&g, p, stream, &state);
    spdl_pipeline_destroy(p);
    CHECK_EQ(kit_wrong(), 0);
    while (spdl_cuda_reap(g.cuda, SPDL_FOREVER) == SPDL_OK) {}
    CHECK_EQ(stats_of(g.cuda).host_free, desc.host_slots);
    CHECK_EQ(stats_of(g.cuda).device_free, desc.device_slots);
    CHECK_EQ(stats_of(g.cuda).output_free, desc.output_slots);
    spdl_cuda_close(g.cuda);
    kit_stream_free(stream);
    finish();
}

/* Each of its own kind, and none hangs. SPDL_PROGRAMS says how many, and has their numbers shown
   (with TEST_TIMEOUT=0 any number of them). */
static void random_programs_end(void) {
    const char *wanted = getenv("SPDL_PROGRAMS");
    const int count = wanted != NULL ? atoi(wanted) : TEST_SANITIZED ? 30 : 150;
    const uint64_t first = test_seed() * 100000;
    int i;
    for (i = 0; i < count; ++i) {
        if (wanted != NULL) fprintf(stderr, "\rprogram %d ", i);
        run_program(first + (uint64_t)i);
    }
}

/* ---- the same without a device ---- */

static void the_cpu_does_it_too(void) {
    backend = SPDL_CUDA_CPU;
    a_layout_comes_with_each_slot();
    batches_keep_their_host_slot();
    a_pointer_that_was_kept_is_refused();
    batches_in_place_are_pinned();
    outputs_come_back();
    any_other_order_is_refused();
    outputs_may_be_dropped();
    a_repeated_batch_keeps_its_host_slot();
    a_row_answers_each_batch();
    a_launch_that_fails_fails_its_item();
    the_row_ends_with_the_pipeline();
    the_row_needs_outputs();
}

TEST_TABLE(cuda_back) {
    TEST_CASE(a_layout_comes_with_each_slot),
    TEST_CASE(a_layout_that_cannot_be_is_refused),
    TEST_CASE(batches_keep_their_host_slot),
    TEST_CASE(device_memory_may_be_the_callers),
    TEST_CASE(a_pointer_that_was_kept_is_refused),
    TEST_CASE(batches_in_place_are_pinned),
    TEST_CASE(outputs_come_back),
    TEST_CASE(any_other_order_is_refused),
    TEST_CASE(outputs_may_be_dropped),
    TEST_CASE(a_repeated_batch_keeps_its_host_slot),
    TEST_CASE(no_more_is_held_than_there_is),
    TEST_CASE(a_host_slot_outlives_its_pipeline),
    TEST_CASE(no_row_beside_an_iterator),
    TEST_CASE(what_is_repeated_has_to_fit),
    TEST_CASE(a_row_answers_each_batch),
    TEST_CASE(a_launch_that_fails_fails_its_item),
    TEST_CASE(the_row_ends_with_the_pipeline),
    TEST_CASE(the_row_needs_outputs),
    TEST_CASE(the_cpu_does_it_too),
    TEST_CASE(random_programs_end),
#ifndef CUDA_REAL
    TEST_CASE(arrived_asks_and_waits),
    TEST_CASE(a_lost_device_ends_the_row),
    TEST_CASE(there_kernels_and_back_overlap),
    TEST_CASE(the_trace_tells_the_devices_time),
    TEST_CASE(all_edges_are_enough),
    TEST_CASE(without_d1_it_is_caught),
    TEST_CASE(without_d2_it_is_caught),
    TEST_CASE(without_d3_it_is_caught),
    TEST_CASE(without_d4_it_is_caught),
#endif
    TEST_END
};
