/* bench_cuda.c - spdl_cuda.h on a device, against what the CUDA runtime does by itself.

       make bench-cuda        on a device where there is one with a toolkit; else, plainly said, on
                              the stand-in of tests/cudart_sim.c: then the figures mean nothing

   slots_N           batches of N bytes in blocks of spdl_cuda_allocator; the peer is a ring by
                     hand, with the same edges: an event after each copy, for which the reader's
                     stream waits; an event after the reader, for which the next copy into the slot
                     waits; the host waits for the copy out of memory before it is used again
   slots_cpu_N       CPU time of the process per GiB, of the same
   arena_N           the same as slots_N out of a registered arena, by the iterator, inline
   by_hand_N         what the edges cost: the ring by hand; the peer is a bare loop of
                     cudaMemcpyAsync, which overwrites what is being read. Reported, without a goal
   pageable_4M       blocks against cudaMemcpy out of memory that is not pinned
   overlap_*         max(C, X) / T: kernels of C, copies of X, T for both, the iterator inline
   launch_pN_us      launching kernels while a loader process fills an arena and the iterator sends
                     it, inline; the peer launches kernels and nothing else. A batch and a wait for
                     the stream come before each 1,000 launches; the first launch after that wait
                     is not timed, or 1 in 1,000 would decide the last quantile
   packed_64x4K      64 arrays of 4 KiB in one batch; the peer copies them one by one
   packed_gather     what bounds that row: one thread's memcpy of the 64 arrays into pinned memory
   d2h_N             outputs of N bytes; the peer is a bare loop of cudaMemcpyAsync to pinned memory
   infer_share       a batch there, a kernel as long as its copy, an output back, several at a time:
                     kernels / time for all
   infer_vs_waits    the same, batches a second; the peer waits for its stream after each copy
   in_place_*        batches in place in pinned memory (spdl_cuda_allocator), by the iterator: rate,
                     with the ring by hand as the peer, and CPU time of the process per GiB
   held_step         a step of a kernel of 300 us with batches held on the device; the peer is the
                     kernel alone
   pin               mapping and registering blocks; the peer is cudaHostAlloc
   pinned_bytes      that are pinned for each byte of blocks
   calls_in, _out    CUDA calls that reach the device for a batch there, and there and back: counted
                     by the stand-in, so without a device only
   pin_arena         registering an arena of shared memory; the peer is cudaHostAlloc
   paced_us*         the median host time of one call of spdl_cuda_iter_next, for batches of 4 KiB
                     out of an arena, 50 us apart, so that no copy waits for another; the peer is
                     one cudaMemcpyAsync, of _ring one step of the ring by hand
   wake_N            from the end of a kernel of N us to the return of spdl_cuda_output_wait; the
                     peer is cudaEventSynchronize of an event that blocks
   close_ms          closing an iterator beside a kernel of 1 s
   contexts          on devices that were not asked for
   trainer_cpu       CPU time of the trainer's process per GiB out of an arena */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#if defined(__has_include)
#if !__has_include(<cuda_runtime_api.h>)
#include "../tests/cudart_min/cuda_runtime_api.h" /* only to be compiled */
#endif
#endif
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#define SPDL_CUDA_IMPLEMENTATION
#include "../spdl_cuda.h"

#include "../tests/cuda_kit.h"
#include "bench.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/wait.h>

#ifdef BENCH_SIMULATED
#include "../tests/cudart_sim.h"
#endif

enum { KIB = 1 << 10, MIB = 1 << 20, SLOTS = 4, ARENA_SLOTS = 8 };

/* What a real device does and the stand-in only goes through. */
#ifdef BENCH_SIMULATED
enum { SIMULATED = 1, MOST_BYTES = 8 * MIB, PIN_BYTES = 64 * MIB, LAUNCHES = 1000 };
#else
enum { SIMULATED = 0, MOST_BYTES = 1024 * MIB, PIN_BYTES = 1024 * MIB, LAUNCHES = 20000 };
#endif

static const double row_ms = SIMULATED ? 20 : 60; /* of one measurement, about */

/* A goal means nothing on the stand-in, but where calls or bytes are counted. */
static double timed_goal(double goal) { return SIMULATED ? 0 : goal; }

static void must(cudaError_t error, const char *what) {
    if (error != cudaSuccess) bench_fail("%s: %s", what, cudaGetErrorString(error));
}

#define CUDA(call) must(call, #call)

static void begin(void) {
#ifdef BENCH_SIMULATED
    sim_reset();
    sim_model(8e9, 3000);
#endif
}

#ifdef BENCH_SIMULATED
#define SIMULATED_DEVICES(count) sim_set_devices(count)
#else
#define SIMULATED_DEVICES(count) ((void)0)
#endif

/* What was sent has arrived; called outside of what is timed. */
static void end(void) { BENCH_CHECK(kit_wrong() == 0); }

/* ---- a loader in a process of its own, made before CUDA is used ---- */

/* One slot is filled while others are sent; both sides keep count, slots are used in turns. */
typedef struct loader {
    uint64_t made, taken; /* atomic; made by the child, taken by the parent */
    uint64_t bytes;       /* of a batch; 0: be idle */
    uint64_t quit;
    unsigned char arena[]; /* from a page border on */
} loader;

static loader *child;
static pid_t child_pid;

static unsigned char *loader_arena(void) { return (unsigned char *)child + 4096; }

static void loader_run(void) {
    for (;;) {
        const uint64_t made = __atomic_load_n(&child->made, __ATOMIC_RELAXED);
        const uint64_t bytes = __atomic_load_n(&child->bytes, __ATOMIC_ACQUIRE);
        if (__atomic_load_n(&child->quit, __ATOMIC_ACQUIRE)) _exit(0);
        if (bytes == 0 || made - __atomic_load_n(&child->taken, __ATOMIC_ACQUIRE) >= ARENA_SLOTS) {
            usleep(bytes == 0 ? 1000 : 20);
            continue;
        }
        memset(loader_arena() + made % ARENA_SLOTS * bytes, (int)made, (size_t)bytes);
        __atomic_store_n(&child->made, made + 1, __ATOMIC_RELEASE);
    }
}

static void loader_open(void) {
    const size_t bytes = 4096 + (size_t)ARENA_SLOTS * MOST_BYTES / 4;
    child = (loader *)mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                           MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    BENCH_CHECK(child != MAP_FAILED);
    child_pid = fork();
    BENCH_CHECK(child_pid >= 0);
    if (child_pid != 0) return;
    loader_run();
}

static void loader_close(void) {
    __atomic_store_n(&child->quit, 1, __ATOMIC_RELEASE);
    waitpid(child_pid, NULL, 0);
}

/* ---- a source: batches out of an arena, filled beforehand or by the loader ---- */

typedef struct source {
    unsigned char *arena;
    size_t bytes;
    bool live;            /* the loader fills it */
    uint64_t next, count; /* 0: no end */
    uint64_t released;    /* atomic */
} source;

static void source_release(void *item) {
    source *s = (source *)item;
    __atomic_add_fetch(&s->released, 1, __ATOMIC_RELEASE);
    if (s->live) __atomic_add_fetch(&child->taken, 1, __ATOMIC_RELEASE);
}

/* Slots come back in order, so a count of them is enough. */
static bool source_has_one(source *s) {
    if (s->live) return s->next < __atomic_load_n(&child->made, __ATOMIC_ACQUIRE);
    return s->next - __atomic_load_n(&s->released, __ATOMIC_ACQUIRE) < ARENA_SLOTS;
}

static spdl_result source_next(void *arg, void **item, int64_t timeout_ns) {
    source *s = (source *)arg;
    const uint64_t start = bench_ns();
    if (s->count > 0 && s->next == s->count) return SPDL_END;
    while (!source_has_one(s)) {
        if (timeout_ns >= 0 && bench_ns() - start >= (uint64_t)timeout_ns) return SPDL_TIMEOUT;
        usleep(5);
    }
    ++s->next;
    *item = s;
    return SPDL_OK;
}

static spdl_result source_view(void *item, spdl_cuda_view *view) {
    source *s = (source *)item;
    const uint64_t n = s->next - 1;
    view->data = s->arena + n % ARENA_SLOTS * s->bytes;
    view->bytes = s->bytes;
    view->user = (void *)(uintptr_t)(n % ARENA_SLOTS);
    return SPDL_OK;
}

/* ---- what rows are made of ---- */

typedef struct rig {
    spdl_cuda *cuda;
    spdl_cuda_iter *it;
    spdl_cuda_stream stream;
    source source;
    size_t bytes;
} rig;

static spdl_cuda *open_both(size_t bytes, int device_slots, size_t output_bytes,
                            int output_slots) {
    spdl_cuda_desc desc;
    spdl_cuda *cuda = NULL;
    spdl_error error;
    memset(&desc, 0, sizeof desc);
    desc.slot_bytes = bytes;
    desc.device_slots = device_slots;
    desc.output_bytes = output_bytes;
    desc.output_slots = output_slots;
    desc.error = &error;
    if (spdl_cuda_open(&cuda, &desc) != SPDL_OK) bench_fail("%s", error.text);
    return cuda;
}

static spdl_cuda *open_slots(size_t bytes, int device_slots) {
    return open_both(bytes, device_slots, 0, 0);
}

static void rig_open(rig *r, size_t bytes, bool live) {
    spdl_cuda_iter_desc desc;
    size_t i;
    memset(r, 0, sizeof *r);
    r->bytes = bytes;
    r->cuda = open_slots(bytes, 4);
    r->stream = kit_stream(false);
    r->source.arena = loader_arena();
    r->source.bytes = bytes;
    r->source.live = live;
    for (i = 0; i < ARENA_SLOTS && !live; ++i) kit_fill(r->source.arena + i * bytes, bytes, i);
    BENCH_CHECK(spdl_cuda_adopt(r->cuda, r->source.arena, ARENA_SLOTS * bytes) == SPDL_OK);
    memset(&desc, 0, sizeof desc);
    desc.next = source_next;
    desc.source = &r->source;
    desc.view = source_view;
    desc.free_item = source_release;
    BENCH_CHECK(spdl_cuda_iter_create(&r->it, r->cuda, &desc) == SPDL_OK);
}

static void rig_close(rig *r) {
    spdl_cuda_iter_destroy(r->it);
    spdl_cuda_close(r->cuda);
    kit_stream_free(r->stream);
}

static void rig_next(rig *r, spdl_cuda_batch *batch) {
    const spdl_result result = spdl_cuda_iter_next(r->it, r->stream, batch, SPDL_FOREVER);
    if (result != SPDL_OK) bench_fail("spdl_cuda_iter_next: %s", spdl_result_text(result));
}

static double gb_per_s(size_t bytes, uint64_t count, uint64_t ns) {
    return (double)bytes * (double)count / (double)ns;
}

static uint64_t count_for(size_t bytes) {
    const double per_ns = SIMULATED ? 1.0 : 40.0; /* bytes, about */
    const double count = row_ms * 1e6 * per_ns / (double)(bytes + 100 * KIB);
    return count < 8 ? 8 : (uint64_t)count;
}

/* ---- copies ---- */

/* A block of the allocator, with what says whose it is in front. */
enum { BLOCK_HEAD = 64 };

typedef struct block {
    spdl_cuda *cuda;
    size_t bytes;
} block;

static void *block_new(spdl_cuda *cuda, size_t bytes) {
    const spdl_allocator from = spdl_cuda_allocator(cuda);
    block *b = (block *)from.alloc_fn(BLOCK_HEAD + bytes, SPDL_BLOCK_ALIGN, from.user);
    BENCH_CHECK(b != NULL);
    b->cuda = cuda;
    b->bytes = bytes;
    return (char *)b + BLOCK_HEAD;
}

static void block_free(void *data) {
    block *b = (block *)(void *)((char *)data - BLOCK_HEAD);
    const spdl_allocator from = spdl_cuda_allocator(b->cuda);
    from.free_fn(b, BLOCK_HEAD + b->bytes, from.user);
}

static void block_send(spdl_cuda *cuda, void *data, size_t bytes, spdl_cuda_batch *batch) {
    spdl_cuda_view view;
    memset(&view, 0, sizeof view);
    view.data = view.item = data;
    view.bytes = bytes;
    view.release = block_free;
    BENCH_CHECK(spdl_cuda_send(cuda, &view, batch, SPDL_FOREVER) == SPDL_OK);
}

/* What a block holds was written by the first rounds. */
static void slot_send(spdl_cuda *cuda, size_t bytes, spdl_cuda_stream stream, bool fill,
                      bool look) {
    void *data = block_new(cuda, bytes);
    spdl_cuda_batch batch;
    if (fill) kit_fill(data, bytes, 5);
    block_send(cuda, data, bytes, &batch);
    BENCH_CHECK(spdl_cuda_ready(&batch, stream) == SPDL_OK);
    if (look) kit_check(stream, batch.data, bytes, 5);
    BENCH_CHECK(spdl_cuda_done(&batch, stream) == SPDL_OK);
}

/* As many blocks as there will be, all written. */
static void blocks_fill(spdl_cuda *cuda, size_t bytes) {
    void *data[SLOTS + 1];
    int i;
    for (i = 0; i <= SLOTS; ++i) kit_fill(data[i] = block_new(cuda, bytes), bytes, 5);
    for (i = 0; i <= SLOTS; ++i) block_free(data[i]);
}

static double per_gib(double ns, double bytes) { return ns * 1e-6 * 1024.0 * MIB / bytes; }

/* GB/s, or with `cpu` CPU milliseconds per GiB. */
static double slots_both(size_t bytes, bool cpu) {
    const uint64_t count = count_for(bytes);
    spdl_cuda_stream stream;
    spdl_cuda *cuda;
    uint64_t start, took, i;
    double cpu_ns;
    begin();
    cuda = open_slots(bytes, SLOTS);
    stream = kit_stream(false);
    blocks_fill(cuda, bytes);
    for (i = 0; i < SLOTS; ++i) slot_send(cuda, bytes, stream, false, true);
    CUDA(cudaDeviceSynchronize());
    start = bench_ns();
    cpu_ns = bench_cpu_ns();
    for (i = 0; i < count; ++i) slot_send(cuda, bytes, stream, false, false);
    CUDA(cudaDeviceSynchronize());
    took = bench_ns() - start;
    cpu_ns = bench_cpu_ns() - cpu_ns;
    for (i = 0; i < SLOTS; ++i) slot_send(cuda, bytes, stream, false, true);
    end();
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    return cpu ? per_gib(cpu_ns, (double)bytes * (double)count) : gb_per_s(bytes, count, took);
}

static double slots_rate(const void *arg) { return slots_both(*(const size_t *)arg, false); }
static double slots_cpu(const void *arg) { return slots_both(*(const size_t *)arg, true); }

static double arena_rate(const void *arg) {
    const size_t bytes = *(const size_t *)arg;
    const uint64_t count = count_for(bytes);
    spdl_cuda_batch batch;
    uint64_t start, took, i;
    rig r;
    begin();
    rig_open(&r, bytes, false);
    for (i = 0; i < ARENA_SLOTS; ++i) {
        rig_next(&r, &batch);
        kit_check(r.stream, batch.data, bytes, (uint64_t)(uintptr_t)batch.user);
    }
    CUDA(cudaDeviceSynchronize());
    start = bench_ns();
    for (i = 0; i < count; ++i) rig_next(&r, &batch);
    CUDA(cudaDeviceSynchronize());
    took = bench_ns() - start;
    end();
    rig_close(&r);
    return gb_per_s(bytes, count, took);
}

/* The bare loop: as many slots on both sides, nothing else. */
typedef struct bare {
    void *host[SLOTS], *device[SLOTS];
    cudaStream_t stream;
} bare;

static void bare_open(bare *b, size_t bytes) {
    int i;
    b->stream = (cudaStream_t)kit_stream(false);
    for (i = 0; i < SLOTS; ++i) {
        CUDA(cudaHostAlloc(&b->host[i], bytes, cudaHostAllocDefault));
        CUDA(cudaMalloc(&b->device[i], bytes));
        kit_fill(b->host[i], bytes, 5);
    }
}

static void bare_close(bare *b) {
    int i;
    for (i = 0; i < SLOTS; ++i) {
        CUDA(cudaFreeHost(b->host[i]));
        CUDA(cudaFree(b->device[i]));
    }
    kit_stream_free(b->stream);
}

static double bare_rate(const void *arg) {
    const size_t bytes = *(const size_t *)arg;
    const uint64_t count = count_for(bytes);
    uint64_t start, took, i;
    bare b;
    begin();
    bare_open(&b, bytes);
    for (i = 0; i < SLOTS; ++i)
        CUDA(cudaMemcpyAsync(b.device[i], b.host[i], bytes, cudaMemcpyHostToDevice, b.stream));
    CUDA(cudaDeviceSynchronize());
    start = bench_ns();
    for (i = 0; i < count; ++i)
        CUDA(cudaMemcpyAsync(b.device[i % SLOTS], b.host[i % SLOTS], bytes, cudaMemcpyHostToDevice,
                             b.stream));
    CUDA(cudaDeviceSynchronize());
    took = bench_ns() - start;
    kit_check(b.stream, b.device[0], bytes, 5);
    end();
    bare_close(&b);
    return gb_per_s(bytes, count, took);
}

/* ---- the same ring by hand ---- */

typedef struct ring_by_hand {
    bare b;
    cudaStream_t reader;
    cudaEvent_t copied[SLOTS], read[SLOTS];
} ring_by_hand;

static void by_hand_open(ring_by_hand *r, size_t bytes) {
    const unsigned plain = cudaEventDisableTiming;
    int i;
    bare_open(&r->b, bytes);
    r->reader = (cudaStream_t)kit_stream(false);
    for (i = 0; i < SLOTS; ++i) {
        CUDA(cudaEventCreateWithFlags(&r->copied[i], plain | cudaEventBlockingSync));
        CUDA(cudaEventCreateWithFlags(&r->read[i], plain));
    }
}

static void by_hand_close(ring_by_hand *r) {
    int i;
    for (i = 0; i < SLOTS; ++i) {
        CUDA(cudaEventDestroy(r->copied[i]));
        CUDA(cudaEventDestroy(r->read[i]));
    }
    kit_stream_free(r->reader);
    bare_close(&r->b);
}

/* `look`: the reader compares the batch. */
static void by_hand_step(ring_by_hand *r, uint64_t n, size_t bytes, bool look) {
    const uint64_t i = n % SLOTS;
    const cudaStream_t copies = r->b.stream;
    if (n >= SLOTS) {
        CUDA(cudaEventSynchronize(r->copied[i]));          /* E1 */
        CUDA(cudaStreamWaitEvent(copies, r->read[i], 0));  /* E3 */
    }
    CUDA(cudaMemcpyAsync(r->b.device[i], r->b.host[i], bytes, cudaMemcpyHostToDevice, copies));
    CUDA(cudaEventRecord(r->copied[i], copies));
    CUDA(cudaStreamWaitEvent(r->reader, r->copied[i], 0)); /* E2 */
    if (look) kit_check(r->reader, r->b.device[i], bytes, 5);
    CUDA(cudaEventRecord(r->read[i], r->reader));
}

static double by_hand_rate(const void *arg) {
    const size_t bytes = *(const size_t *)arg;
    const uint64_t count = count_for(bytes);
    uint64_t start, took, n = 0, i;
    ring_by_hand r;
    begin();
    by_hand_open(&r, bytes);
    for (i = 0; i < SLOTS; ++i) by_hand_step(&r, n++, bytes, true);
    CUDA(cudaDeviceSynchronize());
    start = bench_ns();
    for (i = 0; i < count; ++i) by_hand_step(&r, n++, bytes, false);
    CUDA(cudaDeviceSynchronize());
    took = bench_ns() - start;
    for (i = 0; i < SLOTS; ++i) by_hand_step(&r, n++, bytes, true);
    end();
    by_hand_close(&r);
    return gb_per_s(bytes, count, took);
}

/* ---- back ---- */

static double d2h_rate(const void *arg) {
    const size_t bytes = *(const size_t *)arg;
    const uint64_t count = count_for(bytes);
    spdl_cuda_output *out[SLOTS] = { NULL };
    spdl_cuda_stream stream;
    spdl_cuda *cuda;
    uint64_t start = 0, took, i;
    begin();
    cuda = open_both(256, 1, bytes, SLOTS);
    stream = kit_stream(false);
    for (i = 0; i < count + SLOTS; ++i) {
        spdl_cuda_output **o = &out[i % SLOTS];
        if (i == SLOTS) {
            CUDA(cudaDeviceSynchronize());
            start = bench_ns();
        }
        if (*o != NULL) BENCH_CHECK(spdl_cuda_output_wait(*o, SPDL_FOREVER) == SPDL_OK);
        spdl_cuda_output_free(*o);
        BENCH_CHECK(spdl_cuda_output_get(cuda, stream, o, SPDL_FOREVER) == SPDL_OK);
        BENCH_CHECK(spdl_cuda_output_send(*o) == SPDL_OK);
    }
    CUDA(cudaDeviceSynchronize());
    took = bench_ns() - start;
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    return gb_per_s(bytes, count, took);
}

static double d2h_bare(const void *arg) {
    const size_t bytes = *(const size_t *)arg;
    const uint64_t count = count_for(bytes);
    uint64_t start, took, i;
    bare b;
    begin();
    bare_open(&b, bytes);
    start = bench_ns();
    for (i = 0; i < count; ++i)
        CUDA(cudaMemcpyAsync(b.host[i % SLOTS], b.device[i % SLOTS], bytes, cudaMemcpyDeviceToHost,
                             b.stream));
    CUDA(cudaDeviceSynchronize());
    took = bench_ns() - start;
    bare_close(&b);
    return gb_per_s(bytes, count, took);
}

static double pageable_rate(const void *arg) {
    const size_t bytes = *(const size_t *)arg;
    const uint64_t count = count_for(bytes) / 4 + 1;
    void *host = malloc(bytes), *device = NULL;
    uint64_t start, took, i;
    begin();
    BENCH_CHECK(host != NULL);
    kit_fill(host, bytes, 5);
    CUDA(cudaMalloc(&device, bytes));
    CUDA(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice));
    start = bench_ns();
    for (i = 0; i < count; ++i) CUDA(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice));
    CUDA(cudaDeviceSynchronize());
    took = bench_ns() - start;
    kit_check(NULL, device, bytes, 5);
    end();
    CUDA(cudaFree(device));
    free(host);
    return gb_per_s(bytes, count, took);
}

static void size_name(char name[40], const char *kind, size_t bytes) {
    if (bytes >= MIB) snprintf(name, 40, "%s_%zuM", kind, bytes / MIB);
    else snprintf(name, 40, "%s_%zuK", kind, bytes / KIB);
}

static void row_slots_cpu(size_t bytes) {
    char name[40];
    const bench_row row = { name, "ms/GiB", NULL, false, 0, false, 0 };
    size_name(name, "slots_cpu", bytes);
    if (bytes > MOST_BYTES / 4 || !bench_wanted(name)) return;
    bench_compare_sides(&row, 7, slots_cpu, &bytes, NULL, NULL);
}

static void row_rate(const char *kind, size_t bytes, double goal, bench_side_fn ours,
                     bench_side_fn peer, const char *peer_name) {
    char name[40];
    bench_row row = { name, "GB/s", NULL, true, 0, false, 0 };
    size_name(name, kind, bytes);
    row.peer_name = peer_name;
    row.goal_ratio = timed_goal(goal);
    if (bytes > MOST_BYTES / 4 || !bench_wanted(name)) return;
    bench_compare_sides(&row, bytes > 64 * MIB ? 3 : bytes > 16 * MIB ? 7 : 11, ours, &bytes, peer,
                        &bytes);
}

/* ---- overlap ---- */

typedef struct overlap {
    size_t bytes;
    double copy_ns, ratio; /* kernel = ratio * copy */
} overlap;

static double overlap_share(const void *arg) {
    const overlap *o = (const overlap *)arg;
    enum { STEPS = SIMULATED ? 24 : 100 };
    const double kernel_ns = o->copy_ns * o->ratio;
    spdl_cuda_batch batch;
    uint64_t start, took;
    rig r;
    int i;
    begin();
    rig_open(&r, o->bytes, false);
    for (i = 0; i < ARENA_SLOTS; ++i) rig_next(&r, &batch);
    CUDA(cudaDeviceSynchronize());
    start = bench_ns();
    for (i = 0; i < STEPS; ++i) {
        rig_next(&r, &batch);
        kit_spin(r.stream, (uint64_t)kernel_ns);
    }
    CUDA(cudaStreamSynchronize((cudaStream_t)r.stream));
    took = bench_ns() - start;
    end();
    rig_close(&r);
    return STEPS * (kernel_ns > o->copy_ns ? kernel_ns : o->copy_ns) / (double)took;
}

static void row_overlap(double ratio, double goal) {
    char name[40];
    bench_row row = { name, "of 1", NULL, true, 0, false, 0 };
    overlap o;
    snprintf(name, sizeof name, "overlap_%g", ratio);
    row.goal = timed_goal(goal);
    if (!bench_wanted(name)) return;
    o.bytes = SIMULATED ? 2 * MIB : 32 * MIB;
    o.ratio = ratio;
    o.copy_ns = (double)o.bytes / bare_rate(&o.bytes);
    bench_compare_sides(&row, 7, overlap_share, &o, NULL, NULL);
}

/* ---- kernel launches beside the loader ---- */

enum { LAUNCH_GROUP = 1000, LAUNCH_BYTES = MIB };

static double launch_us(rig *r, spdl_cuda_stream stream, double quantile) {
    static double us[LAUNCHES];
    spdl_cuda_batch batch;
    int i;
    for (i = 0; i < LAUNCHES; ++i) {
        uint64_t start;
        if (i % LAUNCH_GROUP == 0) {
            CUDA(cudaStreamSynchronize((cudaStream_t)stream));
            if (r != NULL) rig_next(r, &batch);
            kit_spin(stream, 0);
        }
        start = bench_ns();
        kit_spin(stream, 0);
        us[i] = (double)(bench_ns() - start) * 1e-3;
    }
    CUDA(cudaDeviceSynchronize());
    return bench_quantile(us, LAUNCHES, quantile);
}

static double launch_beside_loader(const void *arg) {
    double us;
    rig r;
    begin();
    __atomic_store_n(&child->made, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&child->taken, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&child->bytes, LAUNCH_BYTES, __ATOMIC_RELEASE);
    rig_open(&r, LAUNCH_BYTES, true);
    us = launch_us(&r, r.stream, *(const double *)arg);
    rig_close(&r);
    __atomic_store_n(&child->bytes, 0, __ATOMIC_RELEASE);
    bench_sleep_ms(5); /* the loader may be writing still */
    return us;
}

static double launch_alone(const void *arg) {
    spdl_cuda_stream stream;
    double us;
    begin();
    stream = kit_stream(false);
    us = launch_us(NULL, stream, *(const double *)arg);
    kit_stream_free(stream);
    return us;
}

static void row_launch(const char *name, double quantile, double goal) {
    bench_row row = { name, "us", "kernels alone", false, 0, false, 0 };
    row.goal_ratio = timed_goal(goal);
    if (!bench_wanted(row.name)) return;
    bench_compare_sides(&row, 7, launch_beside_loader, &quantile, launch_alone, &quantile);
}

/* ---- there and back: an answer to each batch ---- */

enum { INFER_BYTES = SIMULATED ? MIB : 4 * MIB, INFER_BACK = 64 * KIB,
       INFER_BATCHES = SIMULATED ? 24 : 300, INFER_DEEP = 4 };

/* Nanoseconds for all batches, with kernels of kernel_ns. */
static uint64_t infer_all(uint64_t kernel_ns) {
    spdl_cuda_output *out[INFER_DEEP] = { NULL };
    spdl_cuda_stream stream;
    spdl_cuda *cuda;
    uint64_t start, took;
    int i;
    begin();
    cuda = open_both(INFER_BYTES, INFER_DEEP, INFER_BACK, INFER_DEEP);
    stream = kit_stream(false);
    blocks_fill(cuda, INFER_BYTES);
    start = bench_ns();
    for (i = 0; i < INFER_BATCHES + INFER_DEEP; ++i) {
        spdl_cuda_output **o = &out[i % INFER_DEEP];
        spdl_cuda_batch batch;
        if (*o != NULL) BENCH_CHECK(spdl_cuda_output_wait(*o, SPDL_FOREVER) == SPDL_OK);
        spdl_cuda_output_free(*o);
        *o = NULL;
        if (i >= INFER_BATCHES) continue;
        block_send(cuda, block_new(cuda, INFER_BYTES), INFER_BYTES, &batch);
        BENCH_CHECK(spdl_cuda_ready(&batch, stream) == SPDL_OK);
        BENCH_CHECK(spdl_cuda_output_get(cuda, stream, o, SPDL_FOREVER) == SPDL_OK);
        if (kernel_ns > 0) kit_spin(stream, kernel_ns);
        kit_invert(stream, (*o)->dev, batch.data, 1);
        BENCH_CHECK(spdl_cuda_done(&batch, stream) == SPDL_OK);
        BENCH_CHECK(spdl_cuda_output_send(*o) == SPDL_OK);
    }
    took = bench_ns() - start;
    end();
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    return took;
}

static double infer_share(const void *arg) {
    const uint64_t ns = *(const uint64_t *)arg;
    return (double)ns * INFER_BATCHES / (double)infer_all(ns);
}

static double infer_rate(const void *arg) {
    return INFER_BATCHES * 1e9 / (double)infer_all(*(const uint64_t *)arg);
}

/* Each copy waited for before the next thing is begun. */
static double infer_step_by_step(const void *arg) {
    uint64_t start, took;
    bare b;
    int i;
    begin();
    bare_open(&b, INFER_BYTES);
    start = bench_ns();
    for (i = 0; i < INFER_BATCHES; ++i) {
        CUDA(cudaMemcpyAsync(b.device[0], b.host[0], INFER_BYTES, cudaMemcpyHostToDevice,
                             b.stream));
        CUDA(cudaStreamSynchronize(b.stream));
        kit_spin(b.stream, *(const uint64_t *)arg);
        CUDA(cudaMemcpyAsync(b.host[1], b.device[1], INFER_BACK, cudaMemcpyDeviceToHost, b.stream));
        CUDA(cudaStreamSynchronize(b.stream));
    }
    took = bench_ns() - start;
    end();
    bare_close(&b);
    return INFER_BATCHES * 1e9 / (double)took;
}

static void row_infer(void) {
    bench_row share = { "infer_share", "of 1", NULL, true, 0, false, 0 };
    bench_row waits = { "infer_vs_waits", "batches/s", "a wait after each copy",
                        true, 0, false, 0 };
    const size_t bytes = INFER_BYTES;
    uint64_t ns;
    share.goal = timed_goal(0.95);
    waits.goal_ratio = timed_goal(2);
    if (!bench_wanted(share.name) && !bench_wanted(waits.name)) return;
    ns = (uint64_t)((double)bytes / bare_rate(&bytes));
    if (bench_wanted(share.name)) bench_compare_sides(&share, 5, infer_share, &ns, NULL, NULL);
    if (bench_wanted(waits.name))
        bench_compare_sides(&waits, 5, infer_rate, &ns, infer_step_by_step, &ns);
}

/* ---- batches in place ---- */

enum { PLACES = 8, PLACE_BYTES = SIMULATED ? MIB : 4 * MIB };

SPDL_FN(place_source, void, void) {
    *out = (void *)(uintptr_t)(spdl_sequence(task) + 1);
    return SPDL_OK;
}

/* A decoder would write here; what it costs is not what this measures. */
SPDL_FN(place_item, void, void) {
    *out = spdl_buffer(task);
    return *out != NULL ? SPDL_OK : SPDL_E_NOMEM;
}

/* GB/s, or with *cpu CPU nanoseconds for each byte. */
static double in_place(bool cpu) {
    spdl_pipeline_desc desc = { .workers = 2 };
    spdl_cuda_iter_desc iter_desc = { .next = spdl_pipeline_next };
    const uint64_t count = count_for(PLACE_BYTES);
    spdl_pipeline *p = NULL;
    spdl_cuda_stats stats;
    uint64_t start, took, i;
    double cpu_ns;
    rig r;
    memset(&r, 0, sizeof r);
    begin();
    r.cuda = open_slots(PLACE_BYTES, 4);
    r.stream = kit_stream(false);
    desc.allocator = spdl_cuda_allocator(r.cuda);
    BENCH_CHECK(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_SOURCE(place_source), SPDL_PIPE(place_item),
        SPDL_BATCH(PLACES, .item_bytes = PLACE_BYTES / PLACES), SPDL_SINK(3))) == SPDL_OK);
    iter_desc.source = p;
    BENCH_CHECK(spdl_cuda_iter_create(&r.it, r.cuda, &iter_desc) == SPDL_OK);
    for (i = 0; i < 8; ++i) {
        spdl_cuda_batch batch;
        rig_next(&r, &batch);
    }
    start = bench_ns();
    cpu_ns = bench_cpu_ns();
    for (i = 0; i < count; ++i) {
        spdl_cuda_batch batch;
        rig_next(&r, &batch);
    }
    CUDA(cudaDeviceSynchronize());
    took = bench_ns() - start;
    cpu_ns = bench_cpu_ns() - cpu_ns;
    spdl_cuda_get_stats(r.cuda, &stats);
    BENCH_CHECK(stats.pageable_bytes == 0);
    spdl_cuda_iter_destroy(r.it);
    spdl_pipeline_destroy(p);
    spdl_cuda_close(r.cuda);
    kit_stream_free(r.stream);
    return cpu ? per_gib(cpu_ns, (double)count * PLACE_BYTES)
               : gb_per_s(PLACE_BYTES, count, took);
}

static double in_place_rate(const void *arg) { return (void)arg, in_place(false); }
static double in_place_cpu(const void *arg) { return (void)arg, in_place(true); }

static void row_in_place(void) {
    bench_row rate = { "in_place_rate", "GB/s", "a ring by hand", true, 0, false, 0 };
    bench_row cpu = { "in_place_cpu", "ms/GiB", NULL, false, 0, false, 0 };
    const size_t bytes = PLACE_BYTES;
    rate.goal_ratio = timed_goal(0.97);
    cpu.goal = timed_goal(15);
    if (bench_wanted(rate.name))
        bench_compare_sides(&rate, 11, in_place_rate, NULL, by_hand_rate, &bytes);
    if (bench_wanted(cpu.name)) bench_compare_sides(&cpu, 5, in_place_cpu, NULL, NULL, NULL);
}

/* ---- closing, and other devices ---- */

static double close_ms(const void *arg) {
    const uint64_t kernel_ns = SIMULATED ? 100000000 : 1000000000;
    spdl_cuda_stream theirs;
    spdl_cuda_batch batch;
    uint64_t start, took;
    rig r;
    int i;
    (void)arg;
    begin();
    rig_open(&r, MIB, false);
    theirs = kit_stream(false);
    for (i = 0; i < 8; ++i) rig_next(&r, &batch);
    kit_spin(theirs, kernel_ns);
    start = bench_ns();
    spdl_cuda_iter_destroy(r.it);
    took = bench_ns() - start;
    CUDA(cudaDeviceSynchronize());
    spdl_cuda_close(r.cuda);
    kit_stream_free(r.stream);
    kit_stream_free(theirs);
    return (double)took * 1e-6;
}

static void *sends_one(void *arg) {
    slot_send((spdl_cuda *)arg, MIB, NULL, true, false);
    return NULL;
}

/* Asks the driver itself: whether the primary context of a device exists. */
static int contexts_there(void) {
    int (*state)(int device, unsigned *flags, int *active) = NULL;
    const char *named = getenv("SPDL_LIBCUDA");
    void *library = dlopen(named != NULL ? named : "libcuda.so.1", RTLD_NOW);
    void *symbol = library == NULL ? NULL : dlsym(library, "cuDevicePrimaryCtxGetState");
    unsigned flags;
    int i, active, count = 0, devices = 0;
    CUDA(cudaGetDeviceCount(&devices));
    memcpy(&state, &symbol, sizeof symbol);
    for (i = 0; state != NULL && i < devices; ++i)
        if (state(i, &flags, &active) == 0 && active) ++count;
    return count;
}

/* A thread that has set no device sends to the last one. */
static double contexts_elsewhere(const void *arg) {
    int devices = 1, before;
    spdl_cuda_desc desc;
    spdl_cuda *cuda = NULL;
    pthread_t thread;
    (void)arg;
    begin();
    SIMULATED_DEVICES(3);
    CUDA(cudaGetDeviceCount(&devices));
    before = contexts_there();
    memset(&desc, 0, sizeof desc);
    desc.slot_bytes = MIB;
    desc.device = SPDL_CUDA_ORDINAL(devices - 1);
    BENCH_CHECK(spdl_cuda_open(&cuda, &desc) == SPDL_OK);
    BENCH_CHECK(pthread_create(&thread, NULL, sends_one, cuda) == 0);
    pthread_join(thread, NULL);
    devices = contexts_there() - before;
    spdl_cuda_close(cuda);
    return devices > 1 ? devices - 1 : 0; /* its own may have been there */
}

static void row_close(void) {
    bench_row close = { "close_ms", "ms", NULL, false, 0, false, 0 };
    const bench_row contexts = { "contexts", "contexts", NULL, false, 0, false, 0 };
    close.goal = timed_goal(50);
    if (bench_wanted(close.name)) bench_compare_sides(&close, 3, close_ms, NULL, NULL, NULL);
    if (bench_wanted(contexts.name))
        bench_compare_sides(&contexts, 1, contexts_elsewhere, NULL, NULL, NULL);
}

/* ---- many small arrays ---- */

enum { ARRAYS = 64, ARRAY_BYTES = 4 * KIB, PACK_ROUNDS = SIMULATED ? 20 : 1000 };

static unsigned char rows[ARRAYS][ARRAY_BYTES];

static void gather(char *to) {
    int k;
    for (k = 0; k < ARRAYS; ++k) memcpy(to + k * ARRAY_BYTES, rows[k], ARRAY_BYTES);
}

/* What is small is gathered in one block. */
static double packed_us(const void *arg) {
    spdl_cuda_stream stream;
    spdl_cuda *cuda;
    uint64_t start, took;
    int i;
    (void)arg;
    begin();
    cuda = open_slots(ARRAYS * ARRAY_BYTES, SLOTS);
    stream = kit_stream(false);
    blocks_fill(cuda, ARRAYS * ARRAY_BYTES);
    kit_fill(rows, sizeof rows, 5); /* or all of them are one page of zeros */
    start = bench_ns();
    for (i = 0; i < PACK_ROUNDS; ++i) {
        char *data = (char *)block_new(cuda, ARRAYS * ARRAY_BYTES);
        spdl_cuda_batch batch;
        gather(data);
        block_send(cuda, data, ARRAYS * ARRAY_BYTES, &batch);
        BENCH_CHECK(spdl_cuda_ready(&batch, stream) == SPDL_OK);
        BENCH_CHECK(spdl_cuda_done(&batch, stream) == SPDL_OK);
    }
    CUDA(cudaDeviceSynchronize());
    took = bench_ns() - start;
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    return (double)took * 1e-3 / PACK_ROUNDS;
}

static double one_by_one_us(const void *arg) {
    const size_t bytes = (size_t)ARRAYS * ARRAY_BYTES;
    uint64_t start, took;
    bare b;
    int i, k;
    (void)arg;
    begin();
    bare_open(&b, bytes);
    CUDA(cudaDeviceSynchronize());
    start = bench_ns();
    for (i = 0; i < PACK_ROUNDS; ++i)
        for (k = 0; k < ARRAYS; ++k)
            CUDA(cudaMemcpyAsync((char *)b.device[i % SLOTS] + k * ARRAY_BYTES,
                                 (char *)b.host[i % SLOTS] + k * ARRAY_BYTES, ARRAY_BYTES,
                                 cudaMemcpyHostToDevice, b.stream));
    CUDA(cudaDeviceSynchronize());
    took = bench_ns() - start;
    bare_close(&b);
    return (double)took * 1e-3 / PACK_ROUNDS;
}

/* Into as many blocks as the batches have. */
static double gather_rate(const void *arg) {
    uint64_t start, took;
    bare b;
    int i;
    (void)arg;
    begin();
    bare_open(&b, sizeof rows);
    kit_fill(rows, sizeof rows, 5); /* or all of them are one page of zeros */
    start = bench_ns();
    for (i = 0; i < PACK_ROUNDS; ++i) {
        gather((char *)b.host[i % SLOTS]);
        __asm__ volatile("" : : : "memory");
    }
    took = bench_ns() - start;
    bare_close(&b);
    return gb_per_s(sizeof rows, PACK_ROUNDS, took);
}

static void row_packed(void) {
    bench_row row = { "packed_64x4K", "us", "64 cudaMemcpyAsync", false, 0, false, 0 };
    const bench_row bound = { "packed_gather", "GB/s", NULL, true, 0, false, 0 };
    row.goal_ratio = timed_goal(5);
    if (bench_wanted(row.name))
        bench_compare_sides(&row, 7, packed_us, NULL, one_by_one_us, NULL);
    if (bench_wanted(bound.name)) bench_compare_sides(&bound, 7, gather_rate, NULL, NULL, NULL);
}

/* ---- the rest ---- */

enum { STEP_NS = 300000, HELD_STEPS = SIMULATED ? 30 : 200 };

static double held_step_us(const void *arg) {
    spdl_cuda_batch batch;
    uint64_t start, took;
    rig r;
    int i;
    (void)arg;
    begin();
    rig_open(&r, MIB, false);
    for (i = 0; i < 2 * ARENA_SLOTS; ++i) {
        if (i == 3) BENCH_CHECK(spdl_cuda_iter_hold(r.it, 3) == SPDL_OK);
        rig_next(&r, &batch);
    }
    CUDA(cudaDeviceSynchronize());
    start = bench_ns();
    for (i = 0; i < HELD_STEPS; ++i) {
        rig_next(&r, &batch);
        kit_spin(r.stream, STEP_NS);
    }
    CUDA(cudaStreamSynchronize((cudaStream_t)r.stream));
    took = bench_ns() - start;
    rig_close(&r);
    return (double)took * 1e-3 / HELD_STEPS;
}

static double bare_step_us(const void *arg) {
    spdl_cuda_stream stream;
    uint64_t start, took;
    int i;
    (void)arg;
    begin();
    stream = kit_stream(false);
    CUDA(cudaDeviceSynchronize());
    start = bench_ns();
    for (i = 0; i < HELD_STEPS; ++i) kit_spin(stream, STEP_NS);
    CUDA(cudaStreamSynchronize((cudaStream_t)stream));
    took = bench_ns() - start;
    kit_stream_free(stream);
    return (double)took * 1e-3 / HELD_STEPS;
}

static void row_held(void) {
    bench_row row = { "held_step", "us", "kernels alone", false, 0, false, 0 };
    row.goal_ratio = timed_goal(1 / 1.01);
    if (!bench_wanted(row.name)) return;
    bench_compare_sides(&row, 7, held_step_us, NULL, bare_step_us, NULL);
}

/* Device memory is left out of it: there is one slot. */
static double pin_ms(const void *arg) {
    enum { BYTES = 16 * MIB, BLOCKS = PIN_BYTES / BYTES };
    static void *data[BLOCKS];
    uint64_t start, took;
    spdl_cuda *cuda;
    int i;
    (void)arg;
    begin();
    cuda = open_slots(BYTES, 1);
    CUDA(cudaDeviceSynchronize());
    start = bench_ns();
    for (i = 0; i < BLOCKS; ++i) data[i] = block_new(cuda, BYTES);
    took = bench_ns() - start;
    for (i = 0; i < BLOCKS; ++i) block_free(data[i]);
    spdl_cuda_close(cuda);
    return per_gib((double)took, PIN_BYTES);
}

static double host_alloc_ms(const void *arg) {
    void *memory = NULL;
    uint64_t start, took;
    (void)arg;
    begin();
    CUDA(cudaDeviceSynchronize());
    start = bench_ns();
    CUDA(cudaHostAlloc(&memory, PIN_BYTES, cudaHostAllocDefault));
    took = bench_ns() - start;
    CUDA(cudaFreeHost(memory));
    return per_gib((double)took, PIN_BYTES);
}

static void row_pin(void) {
    bench_row row = { "pin", "ms/GiB", "cudaHostAlloc", false, 0, false, 0 };
    row.goal_ratio = timed_goal(2);
    if (!bench_wanted(row.name)) return;
    bench_compare_sides(&row, 7, pin_ms, NULL, host_alloc_ms, NULL);
}

static double pin_arena_ms(const void *arg) {
    const size_t bytes = ARENA_SLOTS * (MOST_BYTES / 32); /* of the loader's arena */
    uint64_t start, took;
    spdl_cuda *cuda;
    (void)arg;
    begin();
    cuda = open_slots(MIB, 1);
    memset(loader_arena(), 1, bytes); /* as one in use */
    CUDA(cudaDeviceSynchronize());
    start = bench_ns();
    BENCH_CHECK(spdl_cuda_adopt(cuda, loader_arena(), bytes) == SPDL_OK);
    took = bench_ns() - start;
    spdl_cuda_close(cuda);
    return per_gib((double)took, (double)bytes);
}

static void row_pin_arena(void) {
    const bench_row row = { "pin_arena", "ms/GiB", "cudaHostAlloc", false, 0, false, 0 };
    if (!bench_wanted(row.name)) return;
    bench_compare_sides(&row, 3, pin_arena_ms, NULL, host_alloc_ms, NULL);
}

/* ---- what the host spends ---- */

enum { WAKES = SIMULATED ? 20 : 200, PACED = SIMULATED ? 100 : 2000, PACED_BYTES = 4 * KIB };

static double paced_median(void (*step)(void *, uint64_t), void *arg) {
    static double us[PACED];
    uint64_t i, start;
    for (i = 0; i < PACED; ++i) {
        usleep(50);
        start = bench_ns();
        step(arg, i);
        us[i] = (double)(bench_ns() - start) * 1e-3;
    }
    CUDA(cudaDeviceSynchronize());
    return bench_quantile(us, PACED, 0.5);
}

static void paced_next(void *arg, uint64_t i) {
    spdl_cuda_batch batch;
    (void)i;
    rig_next((rig *)arg, &batch);
}

static void paced_copy(void *arg, uint64_t i) {
    const bare *b = (const bare *)arg;
    CUDA(cudaMemcpyAsync(b->device[i % SLOTS], b->host[i % SLOTS], PACED_BYTES,
                         cudaMemcpyHostToDevice, b->stream));
}

static void paced_step(void *arg, uint64_t i) {
    by_hand_step((ring_by_hand *)arg, i, PACED_BYTES, false);
}

static double paced_us(const void *arg) {
    double us;
    rig r;
    (void)arg;
    begin();
    rig_open(&r, PACED_BYTES, false);
    us = paced_median(paced_next, &r);
    rig_close(&r);
    return us;
}

static double paced_bare_us(const void *arg) {
    double us;
    bare b;
    (void)arg;
    begin();
    bare_open(&b, PACED_BYTES);
    us = paced_median(paced_copy, &b);
    bare_close(&b);
    return us;
}

static double paced_ring_us(const void *arg) {
    ring_by_hand r;
    double us;
    (void)arg;
    begin();
    by_hand_open(&r, PACED_BYTES);
    us = paced_median(paced_step, &r);
    by_hand_close(&r);
    return us;
}

/* Median microseconds beyond the kernel's own. */
static double wake_us(const void *arg) {
    static double us[WAKES];
    const uint64_t kernel_ns = *(const uint64_t *)arg;
    spdl_cuda_stream stream;
    spdl_cuda *cuda;
    int i;
    begin();
    cuda = open_both(256, 1, 256, 1);
    stream = kit_stream(false);
    for (i = 0; i < WAKES; ++i) {
        spdl_cuda_output *out = NULL;
        uint64_t start;
        BENCH_CHECK(spdl_cuda_output_get(cuda, stream, &out, SPDL_FOREVER) == SPDL_OK);
        start = bench_ns();
        kit_spin(stream, kernel_ns);
        BENCH_CHECK(spdl_cuda_output_send(out) == SPDL_OK);
        BENCH_CHECK(spdl_cuda_output_wait(out, SPDL_FOREVER) == SPDL_OK);
        us[i] = ((double)(bench_ns() - start) - (double)kernel_ns) * 1e-3;
        spdl_cuda_output_free(out);
    }
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    return bench_quantile(us, WAKES, 0.5);
}

static double bare_wake_us(const void *arg) {
    static double us[WAKES];
    const uint64_t kernel_ns = *(const uint64_t *)arg;
    cudaEvent_t event;
    bare b;
    int i;
    begin();
    bare_open(&b, 256);
    CUDA(cudaEventCreateWithFlags(&event, cudaEventBlockingSync | cudaEventDisableTiming));
    for (i = 0; i < WAKES; ++i) {
        const uint64_t start = bench_ns();
        kit_spin(b.stream, kernel_ns);
        CUDA(cudaMemcpyAsync(b.host[0], b.device[0], 256, cudaMemcpyDeviceToHost, b.stream));
        CUDA(cudaEventRecord(event, b.stream));
        CUDA(cudaEventSynchronize(event));
        us[i] = ((double)(bench_ns() - start) - (double)kernel_ns) * 1e-3;
    }
    CUDA(cudaEventDestroy(event));
    bare_close(&b);
    return bench_quantile(us, WAKES, 0.5);
}

static void row_host(void) {
    const bench_row paced = { "paced_us", "us", "bare cudaMemcpyAsync", false, 0, false, 0 };
    const bench_row ring = { "paced_us_ring", "us", "a ring by hand", false, 0, false, 0 };
    static const uint64_t kernels[] = { 20000, 300000 };
    size_t i;
    if (bench_wanted(paced.name))
        bench_compare_sides(&paced, 7, paced_us, NULL, paced_bare_us, NULL);
    if (bench_wanted(ring.name))
        bench_compare_sides(&ring, 7, paced_us, NULL, paced_ring_us, NULL);
    for (i = 0; i < 2; ++i) {
        char name[40];
        bench_row wake = { name, "us", "cudaEventSynchronize", false, 0, false, 0 };
        snprintf(name, sizeof name, "wake_%d", (int)(kernels[i] / 1000));
        if (bench_wanted(name))
            bench_compare_sides(&wake, 5, wake_us, &kernels[i], bare_wake_us, &kernels[i]);
    }
}

static double pinned_share(const void *arg) {
    const size_t bytes = 3 * MIB + 17 * KIB;
    spdl_cuda_stats stats;
    spdl_cuda *cuda;
    (void)arg;
    begin();
    cuda = open_slots(bytes, 1);
    blocks_fill(cuda, bytes);
    spdl_cuda_get_stats(cuda, &stats);
    spdl_cuda_close(cuda);
    return (double)stats.pinned_bytes / ((double)(SLOTS + 1) * (double)bytes);
}

static void row_pinned_bytes(void) {
    const bench_row row = { "pinned_bytes", "of 1", NULL, false, 1.01, false, 0 };
    if (!bench_wanted(row.name)) return;
    bench_compare_sides(&row, 1, pinned_share, NULL, NULL, NULL);
}

#ifdef BENCH_SIMULATED
/* Without questions whether an event is done: how many a wait asks depends on the time it takes. */
static uint64_t work_calls(void) {
    sim_stats stats;
    sim_get_stats(&stats);
    return stats.work_calls - stats.calls[SIM_EventQuery];
}

static double calls_of_a_batch(const void *arg) {
    enum { BATCHES = 200 };
    spdl_cuda_batch batch;
    uint64_t before;
    rig r;
    int i;
    (void)arg;
    begin();
    rig_open(&r, 256 * KIB, false);
    for (i = 0; i < 20; ++i) rig_next(&r, &batch);
    before = work_calls();
    for (i = 0; i < BATCHES; ++i) rig_next(&r, &batch);
    before = work_calls() - before;
    rig_close(&r);
    return (double)before / BATCHES;
}

static void row_calls(void) {
    const bench_row row = { "calls_in", "calls", NULL, false, 6, false, 0 };
    if (!bench_wanted(row.name)) return;
    bench_compare_sides(&row, 3, calls_of_a_batch, NULL, NULL, NULL);
}

static double calls_there_and_back(const void *arg) {
    enum { BATCHES = 200, WARM = 20, DEEP = 2 };
    spdl_cuda_output *out[DEEP] = { NULL };
    uint64_t before = 0;
    spdl_cuda_stream stream;
    spdl_cuda *cuda;
    int i;
    (void)arg;
    begin();
    cuda = open_both(256 * KIB, 3, 4 * KIB, DEEP);
    stream = kit_stream(false);
    for (i = 0; i < WARM + BATCHES; ++i) {
        spdl_cuda_output **o = &out[i % DEEP];
        if (i == WARM) before = work_calls();
        if (*o != NULL) BENCH_CHECK(spdl_cuda_output_wait(*o, SPDL_FOREVER) == SPDL_OK);
        spdl_cuda_output_free(*o);
        slot_send(cuda, 256 * KIB, stream, i < 4, false);
        BENCH_CHECK(spdl_cuda_output_get(cuda, stream, o, SPDL_FOREVER) == SPDL_OK);
        BENCH_CHECK(spdl_cuda_output_send(*o) == SPDL_OK);
    }
    before = work_calls() - before;
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    return (double)before / BATCHES;
}

static void row_calls_out(void) {
    const bench_row row = { "calls_out", "calls", NULL, false, 12, false, 0 };
    if (!bench_wanted(row.name)) return;
    bench_compare_sides(&row, 3, calls_there_and_back, NULL, NULL, NULL);
}

#endif

static double trainer_cpu_ms(const void *arg) {
    const size_t bytes = *(const size_t *)arg;
    const uint64_t count = count_for(bytes) * 4;
    spdl_cuda_batch batch;
    double cpu;
    uint64_t i;
    rig r;
    begin();
    rig_open(&r, bytes, false);
    for (i = 0; i < ARENA_SLOTS; ++i) rig_next(&r, &batch);
    CUDA(cudaDeviceSynchronize());
    cpu = bench_cpu_ns();
    for (i = 0; i < count; ++i) rig_next(&r, &batch);
    cpu = bench_cpu_ns() - cpu;
    rig_close(&r);
    return per_gib(cpu, (double)bytes * (double)count);
}

static void row_trainer_cpu(void) {
    bench_row row = { "trainer_cpu", "ms/GiB", NULL, false, 0, false, 0 };
    const size_t bytes = SIMULATED ? MIB : 8 * MIB;
    row.goal = timed_goal(10);
    if (!bench_wanted(row.name)) return;
    bench_compare_sides(&row, 7, trainer_cpu_ms, &bytes, NULL, NULL);
}

static void print_device(void) {
    spdl_error error;
    FILE *to = bench_opt.json ? stderr : stdout;
    if (SIMULATED)
        fputs("SIMULATION: there is no GPU here. The rows show that the bench runs; the figures\n"
              "say nothing about any device.\n", to);
    else if (spdl_cuda_count(&error) == 0) bench_fail("%s", error.text);
}

int main(int argc, char **argv) {
    static const size_t sizes[] = { 64 * KIB, 256 * KIB, MIB,       4 * MIB,
                                    16 * MIB, 64 * MIB,  256 * MIB };
    const char *const bare_name = "bare cudaMemcpyAsync", *const ring_name = "a ring by hand";
    size_t i;
#ifdef BENCH_SIMULATED
    setenv("SPDL_LIBCUDA", "libcudart_sim.so", 0); /* the one that is loaded */
#endif
    loader_open(); /* before there are threads, and before CUDA is used */
    bench_start("cuda", argc, argv);
    if (!bench_opt.list) print_device();
    for (i = 0; i < sizeof sizes / sizeof sizes[0]; ++i)
        row_rate("slots", sizes[i], sizes[i] >= MIB ? 0.97 : 0.90, slots_rate, by_hand_rate,
                 ring_name);
    for (i = 2; i < sizeof sizes / sizeof sizes[0]; ++i)
        row_rate("arena", sizes[i], 0.97, arena_rate, by_hand_rate, ring_name);
    for (i = 0; i < 5; ++i) row_rate("by_hand", sizes[i], 0, by_hand_rate, bare_rate, bare_name);
    for (i = SIMULATED ? 2 : 3; i < 6; ++i) row_slots_cpu(sizes[i]);
    for (i = 1; i < sizeof sizes / sizeof sizes[0]; ++i)
        row_rate("d2h", sizes[i], sizes[i] >= MIB ? 0.98 : 0, d2h_rate, d2h_bare, bare_name);
    row_rate("pageable", 4 * MIB, 0, slots_rate, pageable_rate, "cudaMemcpy, not pinned");
    row_overlap(0.25, 0);
    row_overlap(0.5, 0);
    row_overlap(1, 0.97);
    row_overlap(2, 0);
    row_overlap(4, 0.99);
    row_launch("launch_p50_us", 0.5, 0);
    row_launch("launch_p99_us", 0.99, 1 / 1.10);
    row_launch("launch_p99.9_us", 0.999, 0);
    row_infer();
    row_in_place();
    row_close();
    row_packed();
    row_held();
    row_pin();
    row_pin_arena();
    row_host();
    row_pinned_bytes();
#ifdef BENCH_SIMULATED
    row_calls();
    row_calls_out();
#endif
    row_trainer_cpu();
    loader_close();
    return 0;
}
