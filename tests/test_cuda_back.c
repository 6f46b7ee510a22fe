/* spdl_cuda.h: what comes back, rows that answer items, what a missing edge does, and random
   programs of all of it. On the stand-in for CUDA and, built with CUDA_REAL, on a device; failures
   are in test_cuda_fault.c. */
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

enum { ROUNDS = TEST_SANITIZED ? 60 : 200, BYTES = sizeof(((flow_filled *)NULL)->data) };

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

static spdl_cuda *open_back(int device_slots, int output_slots) {
    spdl_cuda_desc desc = flow_desc(BYTES);
    desc.device_slots = device_slots;
    desc.output_slots = output_slots;
    desc.output_bytes = output_slots > 0 ? BYTES : 0;
    return flow_open(&desc);
}

/* ---- outputs ---- */

/* A batch there, its bytes inverted into an output, and that back. */
static spdl_cuda_output *round_trip(spdl_cuda *cuda, void *stream, uint64_t seed, size_t bytes) {
    spdl_cuda_output *out = NULL;
    spdl_cuda_batch batch;
    REQUIRE(flow_send(cuda, &batch, bytes, seed, SPDL_FOREVER) == SPDL_OK);
    CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
    REQUIRE(spdl_cuda_output_get(cuda, stream, &out, SPDL_FOREVER) == SPDL_OK);
    CHECK_EQ(out->bytes, BYTES);
    out->bytes = bytes;
    kit_invert(stream, out->dev, batch.data, bytes);
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
        spdl_cuda *cuda = open_back(2, outputs);
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
        CHECK_EQ(flow_stats(cuda).output_free, outputs);
        spdl_cuda_close(cuda);
        kit_stream_free(stream[0]);
        kit_stream_free(stream[1]);
        finish();
    }
}

static void any_other_order_is_refused(void) {
    spdl_cuda *cuda = open_back(2, 1), *without = open_back(2, 0);
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
    CHECK_EQ(flow_stats(cuda).output_free, 1);
    CHECK_EQ(spdl_cuda_output_send(out), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_output_wait(out, 0), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_output_get(NULL, stream, &out, 0), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_output_send(NULL), SPDL_E_INVALID);
    spdl_cuda_close(cuda);
    spdl_cuda_close(without);
    kit_stream_free(stream);
    finish();
}

typedef struct answerer {
    spdl_cuda *cuda;
    uint64_t first;
    pthread_t thread;
} answerer;

static void *answers(void *arg) {
    answerer *a = (answerer *)arg;
    void *stream = kit_stream(false);
    uint64_t i;
    for (i = 0; i < ROUNDS / 10; ++i) {
        spdl_cuda_output *out = round_trip(a->cuda, stream, a->first + i, BYTES);
        CHECK_EQ(spdl_cuda_output_wait(out, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(differs_inverted(out->host, BYTES, a->first + i), 0);
        spdl_cuda_output_free(out);
    }
    kit_stream_free(stream);
    return NULL;
}

/* Outputs, too, one to a thread at a time. */
static void any_thread_may_send(void) {
    spdl_cuda *cuda = open_back(3, 2);
    answerer a[4];
    int i;
    kit_disorder(test_seed());
    for (i = 0; i < 4; ++i) {
        a[i].cuda = cuda;
        a[i].first = (uint64_t)i * 100000;
        REQUIRE(pthread_create(&a[i].thread, NULL, answers, &a[i]) == 0);
    }
    for (i = 0; i < 4; ++i) pthread_join(a[i].thread, NULL);
    CHECK_EQ(flow_stats(cuda).output_free, 2);
    spdl_cuda_close(cuda);
    finish();
}

/* Freed before it was sent, or waited for: what kernels and copies still do to it comes before what
   the next ones do. */
static void outputs_may_be_dropped(void) {
    spdl_cuda *cuda = open_back(2, 1);
    void *stream = kit_stream(false), *other = kit_stream(false);
    spdl_cuda_output *out = NULL;
    uint64_t i;
    kit_disorder(test_seed());
    for (i = 0; i < ROUNDS; ++i) {
        if (i % 3 == 0) { /* not sent */
            REQUIRE(spdl_cuda_output_get(cuda, other, &out, SPDL_FOREVER) == SPDL_OK);
            kit_invert(other, out->dev, out->dev, BYTES);
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

#ifndef CUDA_REAL
/* How often a get lets its stream wait. */
static uint64_t waits_of_get(spdl_cuda *cuda, void *stream, spdl_cuda_output **out) {
    sim_stats before, after;
    sim_get_stats(&before);
    REQUIRE(spdl_cuda_output_get(cuda, stream, out, SPDL_FOREVER) == SPDL_OK);
    sim_get_stats(&after);
    return after.calls[SIM_StreamWaitEvent] - before.calls[SIM_StreamWaitEvent];
}

/* For what may still run on the output: kernels that were not sent, or a copy that nobody saw. */
static void a_get_waits_for_what_may_run(void) {
    spdl_cuda *cuda = open_back(1, 1);
    void *stream = kit_stream(false);
    spdl_cuda_output *out = NULL;
    CHECK_EQ(waits_of_get(cuda, stream, &out), 0); /* the first one */
    spdl_cuda_output_free(out);
    CHECK_EQ(waits_of_get(cuda, stream, &out), 1);
    CHECK_EQ(spdl_cuda_output_send(out), SPDL_OK);
    spdl_cuda_output_free(out);
    CHECK_EQ(waits_of_get(cuda, stream, &out), 1);
    CHECK_EQ(spdl_cuda_output_send(out), SPDL_OK);
    CHECK_EQ(spdl_cuda_output_wait(out, SPDL_FOREVER), SPDL_OK);
    spdl_cuda_output_free(out);
    CHECK_EQ(waits_of_get(cuda, stream, &out), 0); /* the host has seen it */
    spdl_cuda_output_free(out);
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    finish();
}
#endif

/* ---- rows that answer each item ---- */

static uint64_t fill_count = 100;

SPDL_FN(fill, void, flow_filled) {
    const uint64_t n = spdl_sequence(task);
    if (n == fill_count) return SPDL_END;
    *out = (flow_filled *)spdl_buffer(task);
    if (*out == NULL) return SPDL_E_NOMEM;
    (*out)->seed = n;
    (*out)->bytes = 1000 + n % 50;
    kit_fill((*out)->data, (*out)->bytes, n);
    return SPDL_OK;
}

#define FILL SPDL_SOURCE(fill, .item_bytes = sizeof(flow_filled), .free_item = spdl_buffer_free)

static spdl_pipeline *answering(flow_answers *a, int workers, int sink) {
    spdl_pipeline_desc desc = { .workers = TEST_WORKERS(workers), .logger = { flow_quiet, NULL } };
    spdl_pipeline *p = NULL;
    desc.allocator = spdl_cuda_allocator(a->cuda);
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(FILL, FLOW_ROWS(a), SPDL_SINK(sink))) ==
            SPDL_OK);
    return p;
}

static uint64_t drain(spdl_pipeline *p) {
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

static void rows_answer_each_item(void) {
    int workers, slots;
    for (workers = 2; workers <= 4; workers += 2)
        for (slots = 1; slots <= 4; ++slots) {
            spdl_cuda *cuda = open_back(slots, 2 * slots);
            void *stream = kit_stream(false);
            flow_answers a;
            spdl_pipeline *p;
            kit_disorder(test_seed());
            flow_answers_open(&a, cuda, stream);
            p = answering(&a, workers, 2);
            CHECK_EQ(drain(p), fill_count);
            CHECK(!spdl_pipeline_failed(p));
            spdl_pipeline_destroy(p);
            flow_answers_close(&a);
            flow_reap(cuda);
            CHECK_EQ(flow_stats(cuda).output_free, 2 * slots);
            CHECK_EQ(flow_stats(cuda).device_free, slots);
            CHECK_EQ(flow_stats(cuda).pageable_bytes, 0);
            spdl_cuda_close(cuda);
            kit_stream_free(stream);
            finish();
        }
}

static void a_launch_that_fails_fails_its_item(void) {
    spdl_cuda *cuda = open_back(3, 4);
    void *stream = kit_stream(false);
    flow_answers a;
    spdl_pipeline *p;
    flow_answers_open(&a, cuda, stream);
    a.fails_at = 21;
    p = answering(&a, 2, 2);
    CHECK_EQ(drain(p), 20);
    CHECK(spdl_pipeline_failed(p));
    CHECK(strstr(spdl_pipeline_error(p)->text, "launch 20 failed") != NULL);
    CHECK_EQ(spdl_pipeline_error(p)->item, 20);
    spdl_pipeline_destroy(p);
    flow_reap(cuda);
    CHECK_EQ(flow_stats(cuda).output_free, 4);
    CHECK_EQ(flow_stats(cuda).device_free, 3);
    a.fails_at = 0;
    p = answering(&a, 2, 2); /* and another */
    CHECK_EQ(drain(p), fill_count);
    spdl_pipeline_destroy(p);
    flow_answers_close(&a);
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    finish();
}

/* Stopped at any time, with outputs in the trainer's hands or none. */
static void rows_end_with_the_pipeline(void) {
    uint64_t taken;
    for (taken = 0; taken < 8; ++taken) {
        spdl_cuda *cuda = open_back(2, 3);
        spdl_cuda_output *out[8];
        void *stream = kit_stream(false);
        flow_answers a;
        spdl_pipeline *p;
        uint64_t i, held = taken < 3 ? taken : 2;
        kit_disorder(test_seed());
        flow_answers_open(&a, cuda, stream);
        p = answering(&a, 2, 1);
        for (i = 0; i < taken; ++i) {
            REQUIRE(SPDL_NEXT(p, &out[i], SPDL_FOREVER) == SPDL_OK);
            if (i >= held) spdl_cuda_output_free(out[i]);
        }
        spdl_pipeline_destroy(p);
        for (i = 0; i < held; ++i) spdl_cuda_output_free(out[i]);
        flow_answers_close(&a);
        flow_reap(cuda);
        CHECK_EQ(flow_stats(cuda).output_free, 3);
        CHECK_EQ(flow_stats(cuda).device_free, 2);
        spdl_cuda_close(cuda);
        kit_stream_free(stream);
        finish();
    }
}

#ifndef CUDA_REAL

/* The device is lost while launches are under way: all their items fail, and everything ends. */
static void a_lost_device_ends_the_rows(void) {
    int at;
    for (at = 0; at < 6; ++at) {
        spdl_cuda *cuda = open_back(2, 4);
        spdl_cuda_output *out = NULL;
        void *stream = kit_stream(false);
        flow_answers a;
        spdl_pipeline *p;
        spdl_result result = SPDL_OK;
        int n = 0;
        flow_answers_open(&a, cuda, stream);
        p = answering(&a, 2, 2);
        while (result == SPDL_OK) {
            result = SPDL_NEXT(p, &out, SPDL_FOREVER);
            if (result == SPDL_OK) spdl_cuda_output_free(out);
            if (n++ == at) sim_poison(cudaErrorIllegalAddress);
        }
        CHECK(result == SPDL_E_STAGE || result == SPDL_END);
        if (result < 0) CHECK(strstr(spdl_pipeline_error(p)->text, "lost") != NULL);
        spdl_pipeline_destroy(p);
        flow_answers_close(&a);
        spdl_cuda_close(cuda);
        sim_reset();
    }
}

/* max(there, kernels, back) / all, by the clock of the simulated device. */
static double overlap(uint64_t there_ns, uint64_t kernel_ns) {
    spdl_cuda *cuda;
    void *stream = kit_stream(false);
    flow_answers a;
    spdl_pipeline *p;
    sim_stats stats;
    double longest;
    sim_model(1000.0 / ((double)there_ns * 1e-9), 0); /* the copies back are as long */
    fill_count = 24;
    cuda = open_back(3, 8);
    flow_answers_open(&a, cuda, stream);
    a.kernel_ns = kernel_ns;
    p = answering(&a, 3, 2);
    CHECK_EQ(drain(p), 24);
    spdl_pipeline_destroy(p);
    flow_answers_close(&a);
    sim_get_stats(&stats);
    spdl_cuda_close(cuda);
    sim_reset();
    fill_count = 100;
    longest = (double)(stats.copy_ns / 2 > stats.kernel_ns ? stats.copy_ns / 2 : stats.kernel_ns);
    return longest / (double)(stats.last_ns - stats.first_ns);
}

static void there_kernels_and_back_overlap(void) {
    flow_overlaps(overlap, "copies there and back");
}

/* ---- an edge is missing ----
   Each edge is judged by itself, in every build: what has to come first is held, and what has to
   come behind it is given time to run. It runs only with the edge left out; then the bytes are
   wrong. ThreadSanitizer sees the race as well. */

typedef enum edge { D1, D2, D3, D4 } edge;

typedef struct broken {
    edge edge;
    bool missing;
    uint32_t open; /* of the gate in front of a kernel; relaxed, so that it orders nothing */
} broken;

typedef struct written { /* a kernel that writes a constant, and may wait at the gate */
    void *to;
    unsigned char value;
    const uint32_t *open;
} written;

/* No memset: gcc would write it in line, and ThreadSanitizer not see it. */
static void write_constant(void *arg) {
    const written *w = (const written *)arg;
    volatile unsigned char *to = (volatile unsigned char *)sim_view(w->to);
    size_t i;
    while (w->open != NULL && __atomic_load_n(w->open, __ATOMIC_RELAXED) == 0) usleep(1000);
    for (i = 0; i < BYTES; ++i) to[i] = w->value;
}

static spdl_cuda_output *output_with(spdl_cuda *cuda, void *stream, written *w,
                                     unsigned char value, const uint32_t *open) {
    spdl_cuda_output *out = NULL;
    REQUIRE(spdl_cuda_output_get(cuda, stream, &out, SPDL_SECONDS(5)) == SPDL_OK);
    *w = (written){ out->dev, value, open };
    REQUIRE(sim_launch((cudaStream_t)stream, write_constant, w, 0) == cudaSuccess);
    return out;
}

static long count_other(const void *memory, int value) {
    const unsigned char *from = (const unsigned char *)memory;
    long wrong = 0;
    size_t i;
    for (i = 0; i < BYTES; ++i) wrong += from[i] != value;
    return wrong;
}

/* How long to wait for what must not happen, and may when the edge is missing. */
static int64_t patience(const broken *b) { return SPDL_SECONDS(b->missing ? 20 : 0.03); }

static long run_d1(broken *b, spdl_cuda *cuda, void *stream) {
    static written w;
    spdl_cuda_output *out = output_with(cuda, stream, &w, 7, &b->open);
    long wrong;
    if (b->missing) sim_drop(SIM_StreamWaitEvent, (cudaStream_t)cuda->back);
    CHECK_EQ(spdl_cuda_output_send(out), SPDL_OK);
    CHECK_EQ(spdl_cuda_output_wait(out, patience(b)), b->missing ? SPDL_OK : SPDL_TIMEOUT);
    __atomic_store_n(&b->open, 1, __ATOMIC_RELAXED);
    CHECK_EQ(spdl_cuda_output_wait(out, SPDL_FOREVER), SPDL_OK);
    wrong = count_other(out->host, 7);
    spdl_cuda_output_free(out);
    return wrong;
}

static long run_d2(broken *b, spdl_cuda *cuda, void *stream) {
    static written w;
    spdl_cuda_output *out = output_with(cuda, stream, &w, 7, NULL);
    long wrong;
    sim_hold();
    CHECK_EQ(spdl_cuda_output_send(out), SPDL_OK);
    if (b->missing) sim_drop(SIM_EventQuery, SIM_ANY_STREAM);
    CHECK_EQ(spdl_cuda_output_wait(out, patience(b)), b->missing ? SPDL_OK : SPDL_TIMEOUT);
    if (!b->missing) sim_release();
    CHECK_EQ(spdl_cuda_output_wait(out, SPDL_FOREVER), SPDL_OK);
    wrong = count_other(out->host, 7);
    sim_release();
    spdl_cuda_output_free(out);
    return wrong;
}

static long run_d3(broken *b, spdl_cuda *cuda, void *stream) {
    static written w[2];
    spdl_cuda_output *out = output_with(cuda, stream, &w[0], 7, NULL);
    const void *host = out->host;
    long wrong;
    sim_hold();
    CHECK_EQ(spdl_cuda_output_send(out), SPDL_OK);
    spdl_cuda_output_free(out); /* not waited for */
    if (b->missing) sim_drop(SIM_StreamWaitEvent, (cudaStream_t)stream);
    out = output_with(cuda, stream, &w[1], 9, NULL);
    CHECK_EQ(flow_idle(stream, patience(b)), b->missing);
    sim_release();
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
    wrong = count_other(host, 7);
    spdl_cuda_output_free(out);
    return wrong;
}

/* The call that hands outputs out makes this edge: missing, it is freed too early. */
static long run_d4(broken *b, spdl_cuda *cuda, void *stream) {
    static written w[2];
    spdl_cuda_output *out = output_with(cuda, stream, &w[0], 7, NULL), *next = NULL;
    const void *host = out->host;
    long wrong = 0;
    CHECK_EQ(spdl_cuda_output_send(out), SPDL_OK);
    CHECK_EQ(spdl_cuda_output_wait(out, SPDL_FOREVER), SPDL_OK);
    if (!b->missing) CHECK_EQ(spdl_cuda_output_get(cuda, stream, &next, 0), SPDL_TIMEOUT);
    if (!b->missing) wrong = count_other(host, 7);
    spdl_cuda_output_free(out);
    next = output_with(cuda, stream, &w[1], 9, NULL);
    CHECK_EQ(spdl_cuda_output_send(next), SPDL_OK);
    if (b->missing) usleep(20000); /* for ThreadSanitizer: not behind the copy */
    if (b->missing) wrong = count_other(host, 7);
    CHECK_EQ(spdl_cuda_output_wait(next, SPDL_FOREVER), SPDL_OK);
    if (b->missing) wrong += count_other(host, 7);
    spdl_cuda_output_free(next);
    return wrong;
}

static int run_broken(void *arg) {
    static long (*const run[])(broken *, spdl_cuda *, void *) = { run_d1, run_d2, run_d3, run_d4 };
    broken *b = (broken *)arg;
    void *stream = kit_stream(false);
    spdl_cuda *cuda = open_back(1, 1);
    const long wrong = run[b->edge](b, cuda, stream);
    sim_drop_none();
    if (wrong != 0) _exit(65);
    spdl_cuda_close(cuda);
    sim_reset();
    return 0;
}

/* With the edge the bytes are right; without it they are not, or ThreadSanitizer says so (66). */
static void is_needed(edge which) {
    broken b = { which, false, 0 };
    int status;
    CHECK_EQ(flow_child(run_broken, &b, 30, true), 0);
    b.missing = true;
    status = flow_child(run_broken, &b, 60, false);
    if (!CHECK(status == 65 || status == 66)) fprintf(stderr, "   ended with %d\n", status);
}

static void without_d1_it_is_caught(void) { is_needed(D1); }
static void without_d2_it_is_caught(void) { is_needed(D2); }
static void without_d3_it_is_caught(void) { is_needed(D3); }
static void without_d4_it_is_caught(void) { is_needed(D4); }

/* Everything late, two outputs in turns, some of them freed unread. */
static int run_late(void *arg) {
    static written w[80];
    void *stream = kit_stream(false);
    spdl_cuda *cuda = open_back(1, 2);
    spdl_cuda_output *old[2] = { NULL, NULL };
    long wrong = 0;
    int i;
    (void)arg;
    kit_disorder(test_seed() + (uint64_t)getpid());
    for (i = 0; i < 80; ++i) {
        spdl_cuda_output **out = &old[i % 2];
        if (*out != NULL && i % 3 != 0) {
            REQUIRE(spdl_cuda_output_wait(*out, SPDL_FOREVER) == SPDL_OK);
            wrong += count_other((*out)->host, (unsigned char)(i - 2));
        }
        spdl_cuda_output_free(*out);
        *out = output_with(cuda, stream, &w[i], (unsigned char)i, NULL);
        REQUIRE(spdl_cuda_output_send(*out) == SPDL_OK);
    }
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
    if (wrong != 0) _exit(65);
    spdl_cuda_close(cuda);
    sim_reset();
    return 0;
}

static void all_edges_are_enough(void) { CHECK_EQ(flow_child(run_late, NULL, 30, true), 0); }

#endif /* CUDA_REAL */

/* ---- random programs ---- */

typedef enum shape { ITERATED, BY_HAND, ANSWERED, SHAPES } shape;

typedef struct program {
    uint64_t seed, count, stop_at; /* 0: it runs to its end */
    shape shape;
    int fillers, workers, hold;
    bool epochs, skips, unpinned;
    spdl_cuda *cuda;
    flow_answers answers;
} program;

SPDL_FN(program_source, void, void) {
    const program *g = (const program *)spdl_ctx(task);
    *out = (void *)(uintptr_t)(spdl_sequence(task) + 1);
    return spdl_sequence(task) == g->count ? SPDL_END : SPDL_OK;
}

SPDL_FN(program_fill, void, flow_filled) {
    const program *g = (const program *)spdl_ctx(task);
    const uint64_t n = spdl_sequence(task);
    uint64_t state = g->seed + n;
    if (g->skips && n % 5 == 2) return SPDL_SKIP;
    if (test_random(&state) % 4 == 0) usleep((useconds_t)(test_random(&state) % 300));
    *out = (flow_filled *)spdl_buffer(task);
    if (*out == NULL) return SPDL_E_NOMEM;
    (*out)->seed = n;
    (*out)->bytes = 1000 + n % 50;
    kit_fill((*out)->data, (*out)->bytes, n);
    return SPDL_OK;
}

static spdl_result program_view(void *item, spdl_cuda_view *view) {
    const flow_filled *filled = (const flow_filled *)item;
    view->data = filled->data;
    view->bytes = filled->bytes;
    view->user = (void *)(uintptr_t)filled->seed;
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
    flow_read(batch, stream, n);
}

/* The trainer of an iterator: epochs, patience of all kinds, now and then a while of the same. */
static void program_iterate(const program *g, spdl_pipeline *p, void *stream, uint64_t *state) {
    spdl_cuda_iter_desc desc = { .next = spdl_pipeline_next, .source = p, .view = program_view,
                                 .free_item = spdl_buffer_free };
    spdl_cuda_iter *it = NULL;
    spdl_cuda_batch batch;
    uint64_t n = 0, ends = 0, last = 0;
    spdl_result result = SPDL_OK;
    desc.depth = (int)(test_random(state) % (uint64_t)g->cuda->desc.device_slots);
    REQUIRE(spdl_cuda_iter_create(&it, g->cuda, &desc) == SPDL_OK);
    while (result >= 0 && ends < (g->epochs ? 3u : 1u) && (g->stop_at == 0 || n < g->stop_at)) {
        result = spdl_cuda_iter_next(it, stream, &batch, program_patience(state));
        if (result == SPDL_END) {
            ++ends;
            last = 0;
        }
        if (result != SPDL_OK) continue;
        program_read(&batch, stream, g->hold > 0 ? NULL : &last);
        ++n;
        if (g->hold > 0 && n % 16 == 7) CHECK_EQ(spdl_cuda_iter_hold(it, g->hold), SPDL_OK);
        if (g->hold > 0 && n % 16 == 14) CHECK_EQ(spdl_cuda_iter_hold(it, 0), SPDL_OK);
    }
    CHECK(result >= 0);
    spdl_cuda_iter_destroy(it);
}

/* One after the other is sent, with patience of all kinds; now and then two are on their way. */
static void program_send(const program *g, spdl_pipeline *p, void *stream, uint64_t *state) {
    flow_filled *item = NULL;
    uint64_t n = 0, last = 0;
    spdl_result result = SPDL_OK;
    while (result >= 0 && result != SPDL_END && (g->stop_at == 0 || n < g->stop_at)) {
        spdl_cuda_view view = { .release = spdl_buffer_free };
        spdl_cuda_batch batch;
        result = SPDL_NEXT(p, &item, program_patience(state));
        if (result != SPDL_OK) continue;
        CHECK_EQ(program_view(item, &view), SPDL_OK);
        view.item = item;
        do result = spdl_cuda_send(g->cuda, &view, &batch, program_patience(state));
        while (result == SPDL_TIMEOUT);
        REQUIRE(result == SPDL_OK);
        if (test_random(state) % 4 == 0)
            CHECK_EQ(spdl_cuda_arrived(&batch, SPDL_FOREVER), SPDL_OK);
        if (test_random(state) % 4 == 0) CHECK(flow_reap_one(g->cuda, 0) >= 0);
        CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
        program_read(&batch, stream, &last);
        CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
        ++n;
    }
    CHECK(result >= 0);
}

static void program_answers(const program *g, spdl_pipeline *p, uint64_t *state) {
    spdl_cuda_output *out = NULL;
    uint64_t n = 0, last = 0;
    spdl_result result = SPDL_OK;
    while (result >= 0 && result != SPDL_END && (g->stop_at == 0 || n < g->stop_at)) {
        result = SPDL_NEXT(p, &out, program_patience(state));
        if (result != SPDL_OK) continue;
        ++n;
        CHECK((uintptr_t)out->user >= last);
        last = (uintptr_t)out->user + 1;
        CHECK_EQ(differs_inverted(out->host, out->bytes, last - 1), 0);
        spdl_cuda_output_free(out);
    }
    CHECK(result >= 0);
}

static spdl_pipeline *program_pipeline(program *g) {
    spdl_pipeline_desc desc = { .workers = g->workers, .logger = { flow_quiet, NULL } };
    spdl_pipeline *p = NULL;
    if (!g->unpinned) desc.allocator = spdl_cuda_allocator(g->cuda);
#define PROGRAM_FILL                                                                               \
    SPDL_SOURCE(program_source, .ctx = g, .continuous = g->epochs),                                \
        SPDL_PIPE(program_fill, .ctx = g, .concurrency = g->fillers,                               \
                  .item_bytes = sizeof(flow_filled), .free_item = spdl_buffer_free)
    if (g->shape == ANSWERED)
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(PROGRAM_FILL, FLOW_ROWS(&g->answers),
                                                            SPDL_SINK(2))) == SPDL_OK);
    else
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(PROGRAM_FILL, SPDL_SINK(2))) ==
                SPDL_OK);
    return p;
}

static void run_program(uint64_t seed) {
    uint64_t state = seed;
    program g;
    spdl_pipeline *p;
    void *stream;
    int slots, outputs;
    memset(&g, 0, sizeof g);
    g.seed = seed;
    slots = 1 + (int)(test_random(&state) % 4);
    outputs = 1 + (int)(test_random(&state) % 6);
    g.shape = (shape)(test_random(&state) % SHAPES);
    g.fillers = 1 + (int)(test_random(&state) % 8);
    g.workers = 1 + (g.shape == ANSWERED) + (int)(test_random(&state) % 7);
    g.skips = test_random(&state) % 3 == 0;
    g.unpinned = test_random(&state) % 6 == 0;
    g.count = 1 + test_random(&state) % 30;
    g.epochs = g.shape == ITERATED && test_random(&state) % 3 == 0;
    if (test_random(&state) % 3 == 0) g.stop_at = 1 + test_random(&state) % 20;
    if (g.shape == ITERATED && test_random(&state) % 3 == 0)
        g.hold = 1 + (int)(test_random(&state) % (uint64_t)slots);
    SIM(if (test_random(&state) % 6 == 0) sim_set_pin_limit(1));
    SIM(sim_pageable_late(true));
    if (test_random(&state) % 2) kit_disorder(seed);
    stream = kit_stream(test_random(&state) % 2 == 0);
    g.cuda = open_back(slots, outputs);
    if (g.shape == ANSWERED) flow_answers_open(&g.answers, g.cuda, stream);
    p = program_pipeline(&g);
    if (g.shape == ITERATED) program_iterate(&g, p, stream, &state);
    if (g.shape == BY_HAND) program_send(&g, p, stream, &state);
    if (g.shape == ANSWERED) program_answers(&g, p, &state);
    spdl_pipeline_destroy(p);
    if (g.shape == ANSWERED) flow_answers_close(&g.answers);
    CHECK_EQ(kit_wrong(), 0);
    flow_reap(g.cuda);
    CHECK_EQ(flow_stats(g.cuda).device_free, slots);
    CHECK_EQ(flow_stats(g.cuda).output_free, outputs);
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

TEST_TABLE(cuda_back) {
    TEST_CASE(outputs_come_back),
    TEST_CASE(any_other_order_is_refused),
    TEST_CASE(any_thread_may_send),
    TEST_CASE(outputs_may_be_dropped),
    TEST_CASE(rows_answer_each_item),
    TEST_CASE(a_launch_that_fails_fails_its_item),
    TEST_CASE(rows_end_with_the_pipeline),
    TEST_CASE(random_programs_end),
#ifndef CUDA_REAL
    TEST_CASE(a_get_waits_for_what_may_run),
    TEST_CASE(a_lost_device_ends_the_rows),
    TEST_CASE(there_kernels_and_back_overlap),
    TEST_CASE(all_edges_are_enough),
    TEST_CASE(without_d1_it_is_caught),
    TEST_CASE(without_d2_it_is_caught),
    TEST_CASE(without_d3_it_is_caught),
    TEST_CASE(without_d4_it_is_caught),
#endif
    TEST_END
};
