/* spdl_cuda.h where things go wrong: on the stand-in for the CUDA runtime, which can be told to
   fail, to leave out an edge, to have no device, and which counts. Allocations of this program are
   counted, and made to fail, by the linker's --wrap. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#define SPDL_CUDA_IMPLEMENTATION
#include "../spdl_cuda.h"

#include "cuda_flow.h"

#include <signal.h>
#include "cudart_sim.h"

#include <errno.h>

/* ---- what the program asks the system for ---- */

static long wrap_calls;   /* atomic, since wrap_start */
static long wrap_fail_in; /* atomic: that call fails; 0: none */

static bool wrapped(void) {
    __atomic_add_fetch(&wrap_calls, 1, __ATOMIC_RELAXED);
    if (__atomic_load_n(&wrap_fail_in, __ATOMIC_RELAXED) == 0) return false;
    return __atomic_sub_fetch(&wrap_fail_in, 1, __ATOMIC_RELAXED) == 0;
}

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *memory, size_t bytes);
void *__real_aligned_alloc(size_t align, size_t bytes);
int __real_posix_memalign(void **memory, size_t align, size_t bytes);
void *__real_mmap(void *at, size_t bytes, int protection, int flags, int file, off_t offset);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*run)(void *), void *arg);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes);
void *__wrap_aligned_alloc(size_t align, size_t bytes);
int __wrap_posix_memalign(void **memory, size_t align, size_t bytes);
void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int file, off_t offset);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*run)(void *), void *arg);

void *__wrap_malloc(size_t bytes) { return wrapped() ? NULL : __real_malloc(bytes); }

void *__wrap_calloc(size_t count, size_t bytes) {
    return wrapped() ? NULL : __real_calloc(count, bytes);
}

void *__wrap_realloc(void *memory, size_t bytes) {
    return wrapped() ? NULL : __real_realloc(memory, bytes);
}

void *__wrap_aligned_alloc(size_t align, size_t bytes) {
    return wrapped() ? NULL : __real_aligned_alloc(align, bytes);
}

int __wrap_posix_memalign(void **memory, size_t align, size_t bytes) {
    return wrapped() ? ENOMEM : __real_posix_memalign(memory, align, bytes);
}

/* Where the next large mapping goes, over one of the test's; NULL: where the system likes. */
static void *wrap_map_at;

void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int file, off_t offset) {
    if (wrap_map_at != NULL && bytes >= (size_t)2 << 20) {
        at = wrap_map_at;
        wrap_map_at = NULL;
        flags |= MAP_FIXED;
    }
    if (!wrapped()) return __real_mmap(at, bytes, protection, flags, file, offset);
    errno = ENOMEM;
    return MAP_FAILED;
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*run)(void *), void *arg) {
    return wrapped() ? EAGAIN : __real_pthread_create(thread, attributes, run, arg);
}

static long wrap_getpid_calls; /* atomic */
pid_t __real_getpid(void);
pid_t __wrap_getpid(void);

pid_t __wrap_getpid(void) {
    __atomic_add_fetch(&wrap_getpid_calls, 1, __ATOMIC_RELAXED);
    return __real_getpid();
}

/* ---- shared ---- */

static spdl_cuda_desc small(void) {
    spdl_cuda_desc desc = flow_desc(FLOW_SLOT);
    desc.device_slots = 2;
    return desc;
}

static void nothing_is_wrong(void) {
    sim_stats stats;
    sim_get_stats(&stats);
    CHECK_EQ(stats.violations, 0);
    CHECK_STR(sim_violation(), "");
    CHECK_EQ(stats.mode_depth, 0);
}

static void nothing_is_left(void) {
    nothing_is_wrong();
    CHECK_EQ(sim_leaks(), 0);
}

static sim_stats sim_now(void) {
    sim_stats stats;
    sim_get_stats(&stats);
    return stats;
}

/* Opens what cannot be opened: the result is the one expected, with a text, and nothing is left. */
static void refuses(const spdl_cuda_desc *desc, spdl_result expected, const char *word) {
    spdl_cuda_desc copy = *desc;
    spdl_cuda *cuda = (spdl_cuda *)&copy;
    spdl_error error;
    memset(&error, 0, sizeof error);
    copy.error = &error;
    CHECK_EQ(spdl_cuda_open(&cuda, &copy), expected);
    CHECK(cuda == NULL);
    CHECK_EQ(error.result, expected);
    if (strstr(error.text, word) == NULL) CHECK_STR(error.text, word);
    nothing_is_left();
}

/* ---- devices ---- */

static void without_a_device_open_says_why(void) {
    int devices;
    for (devices = -1; devices <= 0; ++devices) {
        const spdl_cuda_desc desc = small();
        spdl_error error;
        sim_set_devices(devices);
        CHECK_EQ(spdl_cuda_count(&error), 0);
        CHECK(error.text[0] != '\0');
        refuses(&desc, SPDL_E_NOT_FOUND, error.text);
        sim_reset();
    }
    sim_fail_nth(1, (cudaError_t)802); /* of a container: the system is not yet initialised */
    {
        const spdl_cuda_desc desc = small();
        refuses(&desc, SPDL_E_NOT_FOUND, "cuInit: unknown error"); /* it has no text here */
    }
    sim_reset();
    sim_set_devices(0);
    sim_drop(SIM_Init, SIM_ANY_STREAM); /* a driver that starts without a device */
    {
        const spdl_cuda_desc desc = small();
        refuses(&desc, SPDL_E_NOT_FOUND, "there is no device: the driver sees no device");
    }
    sim_reset();
}

static void a_device_that_is_not_there_is_told(void) {
    spdl_cuda_desc desc = small();
    sim_set_devices(2);
    desc.device = SPDL_CUDA_ORDINAL(2);
    refuses(&desc, SPDL_E_NOT_FOUND, "2");
    desc.device = -1;
    refuses(&desc, SPDL_E_INVALID, "device");
    CHECK_EQ(cudaGetLastError(), cudaSuccess);
    sim_reset();
}

static void on_device(int device, spdl_cuda_stream *stream, spdl_cuda **cuda) {
    spdl_cuda_desc desc = small();
    desc.device = SPDL_CUDA_ORDINAL(device);
    *cuda = flow_open(&desc);
    CHECK_EQ(cudaSetDevice(device), cudaSuccess);
    *stream = kit_stream(false);
    CHECK_EQ(cudaSetDevice(0), cudaSuccess);
}

/* Batches go to both devices in turns, and device 0 stays the current one. Streams without a name
   of their own are those of the batch's device. */
static void devices_stand_side_by_side(void) {
    spdl_cuda_stream stream[2];
    spdl_cuda *cuda[2];
    uint64_t i;
    int current = -1;
    sim_set_devices(2);
    kit_disorder(test_seed());
    on_device(0, &stream[0], &cuda[0]);
    on_device(1, &stream[1], &cuda[1]);
    CHECK_EQ(flow_stats(cuda[1]).device, 1);
    for (i = 0; i < 60; ++i) {
        CHECK_EQ(flow_batch(cuda[i % 2], stream[i % 2], FLOW_SLOT, i), SPDL_OK);
        CHECK_EQ(cudaGetDevice(&current), cudaSuccess);
        CHECK_EQ(current, 0);
    }
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_close(cuda[1]);
    spdl_cuda_close(cuda[0]);
    CHECK_EQ(cudaGetDevice(&current), cudaSuccess);
    CHECK_EQ(current, 0);
    kit_stream_free(stream[0]);
    kit_stream_free(stream[1]);
    nothing_is_left();
    sim_reset();
}

/* A kernel that takes its time before it reads a batch: 100 ms, or until it is let go. */
typedef struct slow_reader {
    const void *device;
    unsigned char seen[64];
    int held; /* atomic */
} slow_reader;

static void read_late(void *arg) {
    slow_reader *r = (slow_reader *)arg;
    do usleep(100000);
    while (__atomic_load_n(&r->held, __ATOMIC_ACQUIRE));
    if (r->device != NULL) memcpy(r->seen, sim_view(r->device), sizeof r->seen);
}

static void launch_on(int device, cudaStream_t stream, slow_reader *reader) {
    CHECK_EQ(cudaSetDevice(device), cudaSuccess);
    sim_launch(stream, read_late, reader, 0);
    CHECK_EQ(cudaSetDevice(0), cudaSuccess);
}

static spdl_cuda_batch sent(spdl_cuda *cuda, uint64_t seed) {
    spdl_cuda_batch batch;
    REQUIRE(flow_send(cuda, &batch, 4096, seed, SPDL_FOREVER) == SPDL_OK);
    return batch;
}

/* Whatever call fails when a batch is given back that was read on the legacy stream of a device
   that is not current, its slot is not written while that kernel runs. */
static void a_failed_done_waits_for_the_right_device(void) {
    for (unsigned n = 1; n <= 8; ++n) {
        slow_reader reader = { NULL, { 0 }, 0 };
        spdl_cuda_desc desc = small();
        spdl_cuda_batch batch, next;
        spdl_cuda *cuda = NULL;
        sim_set_devices(2);
        desc.device = SPDL_CUDA_ORDINAL(1);
        desc.device_slots = 1;
        REQUIRE(spdl_cuda_open(&cuda, &desc) == SPDL_OK);
        batch = sent(cuda, 7);
        CHECK_EQ(spdl_cuda_ready(&batch, cudaStreamLegacy), SPDL_OK);
        reader.device = batch.data;
        launch_on(1, cudaStreamLegacy, &reader);
        sim_fail_nth(n, cudaErrorInvalidValue);
        spdl_cuda_batch_free(&batch);
        sim_fail_nth(0, cudaSuccess);
        if (flow_send(cuda, &next, 4096, 8, SPDL_FOREVER) == SPDL_OK) spdl_cuda_batch_free(&next);
        CHECK_EQ(cudaSetDevice(1), cudaSuccess);
        CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
        CHECK_EQ(cudaSetDevice(0), cudaSuccess);
        if (!CHECK_EQ(kit_differ(reader.seen, sizeof reader.seen, 7), 0))
            fprintf(stderr, "   call %u failed\n", n);
        spdl_cuda_close(cuda);
        CHECK_STR(sim_violation(), ""); /* what could not be ended is left */
        sim_reset();
    }
}

static void *frees_a_batch(void *arg) {
    spdl_cuda_batch_free(arg);
    return NULL;
}

/* A kernel reads a batch on a thread's own stream while another thread gives the batch back, or the
   same one and a call fails: the slot is free after the kernel. */
static void a_threads_stream_is_waited_for(void) {
    int own;
    for (own = 0; own < 2; ++own) {
        slow_reader reader = { NULL, { 0 }, 0 };
        spdl_cuda_desc desc = small();
        spdl_cuda_batch batch, next;
        spdl_cuda *cuda;
        pthread_t thread;
        desc.device_slots = 1;
        cuda = flow_open(&desc);
        batch = sent(cuda, 7);
        CHECK_EQ(spdl_cuda_ready(&batch, cudaStreamPerThread), SPDL_OK);
        reader.device = batch.data;
        launch_on(0, cudaStreamPerThread, &reader);
        if (own) {
            sim_fail_nth(2, cudaErrorInvalidValue);
            spdl_cuda_batch_free(&batch);
            CHECK(sim_failed());
        } else {
            REQUIRE(pthread_create(&thread, NULL, frees_a_batch, &batch) == 0);
            pthread_join(thread, NULL);
        }
        CHECK_EQ(kit_differ(reader.seen, sizeof reader.seen, 7), 0);
        next = sent(cuda, 8);
        spdl_cuda_batch_free(&next);
        spdl_cuda_close(cuda);
        nothing_is_left();
        sim_reset();
    }
}

/* Numbers of copies are used up while a kernel holds the copies back: a send without patience comes
   back before the kernel has ended. */
static void a_send_keeps_its_time(void) {
    static _Alignas(4096) char memory[16384];
    slow_reader reader = { NULL, { 0 }, 1 };
    spdl_cuda_desc desc = small();
    spdl_cuda_stream stream = kit_stream(false);
    spdl_cuda_view view = { 0 };
    spdl_cuda *cuda = NULL;
    spdl_result result = SPDL_OK;
    desc.device_slots = 3;
    REQUIRE(spdl_cuda_open(&cuda, &desc) == SPDL_OK);
    CHECK_EQ(spdl_cuda_adopt(cuda, memory, sizeof memory), SPDL_OK);
    view.data = memory;
    view.bytes = 4096;
    launch_on(0, (cudaStream_t)stream, &reader);
    for (int i = 0; i < 20 && result == SPDL_OK; ++i) {
        spdl_cuda_batch batch;
        result = spdl_cuda_send(cuda, &view, &batch, 0);
        if (result != SPDL_OK) break;
        CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
        CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
    }
    CHECK_EQ(result, SPDL_TIMEOUT);
    __atomic_store_n(&reader.held, 0, __ATOMIC_RELEASE);
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    nothing_is_left();
    sim_reset();
}

/* The second stream has the handle of the first, whose kernel still runs when it is destroyed. A
   third one holds the batch meanwhile. The next copy waits for all of them. */
static void a_stream_where_another_was_is_no_reader(void) {
    slow_reader reader = { NULL, { 0 }, 0 };
    void *holds = kit_stream(false), *stream = kit_stream(false), *first = stream;
    spdl_cuda_desc desc = small();
    spdl_cuda_batch batch, next;
    spdl_cuda *cuda;
    desc.device_slots = 1;
    cuda = flow_open(&desc);
    batch = sent(cuda, 7);
    CHECK_EQ(spdl_cuda_ready(&batch, holds), SPDL_OK);
    CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
    reader.device = batch.data;
    launch_on(0, (cudaStream_t)stream, &reader);
    CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
    kit_stream_free(stream);
    stream = kit_stream(false);
    CHECK(stream == first);
    CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
    CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
    CHECK_EQ(spdl_cuda_done(&batch, holds), SPDL_OK);
    next = sent(cuda, 8);
    spdl_cuda_batch_free(&next);
    spdl_cuda_close(cuda);
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
    CHECK_EQ(kit_differ(reader.seen, sizeof reader.seen, 7), 0);
    kit_stream_free(stream);
    kit_stream_free(holds);
    nothing_is_left();
    sim_reset();
}

static unsigned char adopted[2 * FLOW_SLOT] __attribute__((aligned(4096)));

static void *arena_alloc(size_t bytes, size_t align, void *user) {
    *(int *)user += bytes < FLOW_SLOT;
    return bytes < FLOW_SLOT ? adopted + FLOW_SLOT : test_memory(align, bytes);
}

static void arena_free(void *memory, size_t bytes, void *user) {
    *(int *)user -= bytes < FLOW_SLOT;
    if ((unsigned char *)memory != adopted + FLOW_SLOT) test_memory_free(memory);
}

/* The caller's allocator hands out memory of an arena that was adopted. */
static void memory_of_an_arena_goes_back_to_its_allocator(void) {
    spdl_cuda_desc desc = small();
    spdl_allocator allocator;
    int count = 0;
    spdl_cuda *cuda = flow_open(&desc);
    void *memory;
    CHECK_EQ(spdl_cuda_adopt(cuda, adopted, sizeof adopted), SPDL_OK);
    cuda->desc.allocator.alloc_fn = arena_alloc;
    cuda->desc.allocator.free_fn = arena_free;
    cuda->desc.allocator.user = &count;
    allocator = spdl_cuda_allocator(cuda);
    memory = allocator.alloc_fn(64, 64, allocator.user);
    CHECK_EQ(count, 1);
    allocator.free_fn(memory, 64, allocator.user);
    CHECK_EQ(count, 0);
    memory = allocator.alloc_fn(FLOW_SLOT, 64, allocator.user);
    CHECK((unsigned char *)memory != adopted);
    allocator.free_fn(memory, FLOW_SLOT, allocator.user);
    memset(&cuda->desc.allocator, 0, sizeof cuda->desc.allocator);
    spdl_cuda_close(cuda);
    nothing_is_left();
    sim_reset();
}

/* When close returns nobody reads the slots. */
static void closing_waits_for_recorded_readers(void) {
    slow_reader reader = { NULL, { 0 }, 0 };
    spdl_cuda_desc desc = small();
    void *stream = kit_stream(false);
    spdl_cuda_batch batch;
    spdl_cuda *cuda;
    desc.device_slots = 1;
    cuda = flow_open(&desc);
    batch = sent(cuda, 7);
    CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
    reader.device = batch.data;
    launch_on(0, (cudaStream_t)stream, &reader);
    CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
    spdl_cuda_close(cuda);
    CHECK_EQ(cudaStreamQuery((cudaStream_t)stream), cudaSuccess);
    CHECK_EQ(kit_differ(reader.seen, sizeof reader.seen, 7), 0);
    kit_stream_free(stream);
    nothing_is_left();
    sim_reset();
}

typedef struct waiter {
    spdl_cuda *cuda;
    spdl_result result;
} waiter;

/* NULL means the stream of the device of the spdl_cuda, whichever is current for the caller. */
static void the_legacy_stream_of_another_device(void) {
    spdl_cuda_stream stream, none[] = { NULL, cudaStreamLegacy, cudaStreamPerThread };
    spdl_cuda *cuda;
    uint64_t i;
    int current = -1;
    sim_set_devices(2);
    kit_disorder(test_seed());
    on_device(1, &stream, &cuda);
    for (i = 0; i < 30; ++i) {
        spdl_cuda_batch batch = sent(cuda, i);
        CHECK_EQ(spdl_cuda_ready(&batch, none[i % 3]), SPDL_OK);
        CHECK_EQ(cudaSetDevice(1), cudaSuccess);
        kit_check(none[i % 3], batch.data, batch.bytes, i);
        CHECK_EQ(cudaSetDevice(0), cudaSuccess);
        CHECK_EQ(spdl_cuda_done(&batch, none[i % 3]), SPDL_OK);
        CHECK_EQ(cudaGetDevice(&current), cudaSuccess);
        CHECK_EQ(current, 0);
    }
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    nothing_is_left();
    sim_reset();
}

static void too_little_device_memory_is_told(void) {
    spdl_cuda_desc desc = small();
    sim_set_device_memory(2 * FLOW_SLOT - 1);
    refuses(&desc, SPDL_E_NOMEM, "cuMemAlloc");
    sim_reset();
}

/* ---- pinning ---- */

/* Its blocks come back when their copies are done (E4), and nothing else is different. */
static void what_cannot_be_pinned_is_used_as_it_is(void) {
    spdl_cuda_desc desc = small();
    void *stream = kit_stream(false);
    spdl_cuda *cuda;
    uint64_t i;
    kit_disorder(test_seed());
    sim_set_pin_limit(100);
    sim_pageable_late(true);
    flow_lines = 0;
    desc.output_bytes = 1000;
    cuda = flow_open(&desc);
    CHECK_EQ(flow_lines, 1);
    CHECK(strstr(flow_line, "pin") != NULL);
    for (i = 0; i < 40; ++i) CHECK_EQ(flow_batch(cuda, stream, FLOW_SLOT, i), SPDL_OK);
    CHECK_EQ(kit_wrong(), 0);
    CHECK_EQ(flow_lines, 1);
    CHECK_EQ(flow_stats(cuda).pinned_bytes, 0);
    CHECK_EQ(flow_stats(cuda).pageable_bytes, 40 * FLOW_SLOT);
    CHECK_EQ(sim_now().pageable_copies, 40);
    CHECK_EQ(cudaGetLastError(), cudaSuccess);
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    nothing_is_left();
    sim_reset();
}

static void an_arena_that_cannot_be_pinned_is_used(void) {
    spdl_cuda_desc desc = small();
    void *stream = kit_stream(false);
    flow_source s;
    spdl_cuda *cuda = flow_open(&desc);
    spdl_cuda_iter *it = NULL;
    spdl_cuda_iter_desc iter_desc;
    uint64_t count = 0;
    kit_disorder(test_seed());
    flow_source_open(&s, 4, 30);
    sim_set_pin_limit(1);
    sim_pageable_late(true);
    flow_lines = 0;
    CHECK_EQ(spdl_cuda_adopt(cuda, s.seen, 4 * FLOW_SLOT), SPDL_OK);
    CHECK_EQ(flow_lines, 1);
    iter_desc = flow_iter_desc(&s);
    REQUIRE(spdl_cuda_iter_create(&it, cuda, &iter_desc) == SPDL_OK);
    CHECK_EQ(flow_train(it, stream, &count), SPDL_END);
    CHECK_EQ(count, 30);
    CHECK_EQ(kit_wrong(), 0);
    CHECK_EQ(flow_stats(cuda).pageable_bytes, 30 * s.bytes);
    spdl_cuda_iter_destroy(it);
    spdl_cuda_close(cuda);
    flow_source_close(&s);
    kit_stream_free(stream);
    nothing_is_left();
    sim_reset();
}

/* Both adopt it, on two devices; the first has pinned it for all. */
static void an_arena_is_shared(void) {
    spdl_cuda_stream stream[2];
    spdl_cuda *cuda[2];
    flow_source s;
    int i;
    sim_set_devices(2);
    on_device(0, &stream[0], &cuda[0]);
    on_device(1, &stream[1], &cuda[1]);
    flow_source_open(&s, 4, 40);
    CHECK_EQ(spdl_cuda_adopt(cuda[0], s.seen, 4 * FLOW_SLOT), SPDL_OK);
    CHECK_EQ(spdl_cuda_adopt(cuda[1], s.seen, 4 * FLOW_SLOT), SPDL_OK);
    for (i = 0; i < 40; ++i) {
        spdl_cuda_view view;
        spdl_cuda_batch batch;
        void *item = NULL;
        memset(&view, 0, sizeof view);
        while (flow_next(&s, &item, 0) == SPDL_TIMEOUT) { /* both may have what it waits for */
            CHECK(flow_reap_one(cuda[0], SPDL_SECONDS(0.001)) >= 0);
            CHECK(flow_reap_one(cuda[1], SPDL_SECONDS(0.001)) >= 0);
        }
        CHECK_EQ(flow_view(item, &view), SPDL_OK);
        view.release = flow_item_free;
        view.item = item;
        REQUIRE(spdl_cuda_send(cuda[i % 2], &view, &batch, SPDL_FOREVER) == SPDL_OK);
        CHECK_EQ(spdl_cuda_ready(&batch, stream[i % 2]), SPDL_OK);
        flow_read(&batch, stream[i % 2], (uint64_t)(uintptr_t)batch.user);
        CHECK_EQ(spdl_cuda_done(&batch, stream[i % 2]), SPDL_OK);
    }
    CHECK_EQ(kit_wrong(), 0);
    CHECK_EQ(sim_now().pageable_copies, 0);
    CHECK_EQ(flow_stats(cuda[0]).pageable_bytes + flow_stats(cuda[1]).pageable_bytes, 0);
    spdl_cuda_close(cuda[1]);
    spdl_cuda_close(cuda[0]);
    flow_source_close(&s);
    kit_stream_free(stream[0]);
    kit_stream_free(stream[1]);
    nothing_is_left();
    sim_reset();
}

/* Memory that cannot be read until it is read for the first time, by the driver's copy. */
static struct {
    spdl_cuda *cuda;
    void *data;
    int touched, locked;
} touch;

static void touched(int signal_number) {
    (void)signal_number;
    ++touch.touched;
    if (pthread_mutex_trylock(&touch.cuda->lock) == 0) pthread_mutex_unlock(&touch.cuda->lock);
    else ++touch.locked;
    (void)mprotect(touch.data, FLOW_SLOT, PROT_READ);
}

/* The driver copies it on the thread that sends: others can send meanwhile. */
static void pageable_memory_is_copied_without_the_lock(void) {
    struct sigaction handle = { .sa_handler = touched }, before;
    spdl_cuda_desc desc = small();
    void *stream = kit_stream(false);
    spdl_cuda_view view = { .bytes = FLOW_SLOT };
    spdl_cuda_batch batch;
    int i;
    touch.cuda = flow_open(&desc);
    touch.data = mmap(NULL, FLOW_SLOT, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(touch.data != MAP_FAILED);
    view.data = touch.data;
    kit_fill(touch.data, FLOW_SLOT, 8);
    CHECK_EQ(sigaction(SIGSEGV, &handle, &before), 0);
    for (i = 1; i <= 8; ++i) { /* more often than there are slots: E3 holds, too */
        CHECK_EQ(mprotect(touch.data, FLOW_SLOT, PROT_NONE), 0);
        CHECK_EQ(spdl_cuda_send(touch.cuda, &view, &batch, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(touch.touched, i);
        CHECK_EQ(touch.locked, 0);
        CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
        flow_read(&batch, stream, 8);
        CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
    }
    CHECK_EQ(sigaction(SIGSEGV, &before, NULL), 0);
    CHECK_EQ(kit_wrong(), 0);
    CHECK_EQ(flow_stats(touch.cuda).pageable_bytes, 8 * FLOW_SLOT);
    spdl_cuda_close(touch.cuda);
    munmap(touch.data, FLOW_SLOT);
    kit_stream_free(stream);
    nothing_is_left();
    sim_reset();
}

typedef struct sending {
    spdl_cuda_output *out;
    spdl_result result;
} sending;

static void *sends_an_output(void *arg) {
    sending *s = (sending *)arg;
    s->result = spdl_cuda_output_send(s->out);
    return NULL;
}

/* The driver copies to such memory before the call returns, which may be after long kernels: only
   the thread that sends waits for them. */
static void outputs_that_are_not_pinned_hold_up_nobody(void) {
    static unsigned char memory[100];
    const spdl_cuda_view view = { .data = memory, .bytes = sizeof memory };
    spdl_cuda_desc desc = small();
    void *stream = kit_stream(false);
    spdl_cuda_batch batch;
    spdl_cuda *cuda;
    pthread_t thread;
    sending s = { NULL, SPDL_TIMEOUT };
    desc.output_bytes = 1000;
    sim_set_pin_limit(1);
    cuda = flow_open(&desc);
    REQUIRE(spdl_cuda_output_get(cuda, stream, &s.out, SPDL_FOREVER) == SPDL_OK);
    sim_hold();
    REQUIRE(pthread_create(&thread, NULL, sends_an_output, &s) == 0);
    while (sim_now().copies == 0) usleep(1000);
    CHECK_EQ(spdl_cuda_send(cuda, &view, &batch, 0), SPDL_OK);
    CHECK_EQ(flow_reap_one(cuda, 0), SPDL_TIMEOUT);
    sim_release();
    pthread_join(thread, NULL);
    CHECK_EQ(s.result, SPDL_OK);
    CHECK_EQ(spdl_cuda_output_wait(s.out, SPDL_FOREVER), SPDL_OK);
    spdl_cuda_output_free(s.out);
    CHECK_EQ(spdl_cuda_arrived(&batch, SPDL_FOREVER), SPDL_OK);
    spdl_cuda_batch_free(&batch);
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    nothing_is_left();
    sim_reset();
}

/* Neither the system is asked for each batch, nor the driver twice for what others have pinned. */
static void a_batch_asks_no_more_than_it_must(void) {
    spdl_cuda_desc desc = small();
    spdl_cuda *cuda = flow_open(&desc);
    void *stream = kit_stream(false), *data = NULL;
    spdl_cuda_view view;
    spdl_cuda_batch batch;
    uint64_t asked;
    long calls;
    int i;
    memset(&view, 0, sizeof view);
    CHECK_EQ(cudaHostAlloc(&data, FLOW_SLOT, cudaHostAllocDefault), cudaSuccess);
    kit_fill(data, FLOW_SLOT, 2);
    view.data = data;
    view.bytes = FLOW_SLOT;
    asked = sim_now().calls[SIM_PointerGetAttribute];
    calls = __atomic_load_n(&wrap_getpid_calls, __ATOMIC_RELAXED);
    for (i = 0; i < 10; ++i) {
        CHECK_EQ(spdl_cuda_send(cuda, &view, &batch, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
        flow_read(&batch, stream, 2);
        CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
    }
    CHECK_EQ(sim_now().calls[SIM_PointerGetAttribute] - asked, 10);
    CHECK_EQ(__atomic_load_n(&wrap_getpid_calls, __ATOMIC_RELAXED), calls);
    CHECK_EQ(kit_wrong(), 0);
    CHECK_EQ(flow_stats(cuda).pageable_bytes, 0);
    spdl_cuda_close(cuda);
    CHECK_EQ(cudaFreeHost(data), cudaSuccess);
    kit_stream_free(stream);
    nothing_is_left();
    sim_reset();
}

static void send_slot(spdl_cuda *cuda, void *stream, char *base, size_t slot, size_t n) {
    spdl_cuda_view view;
    spdl_cuda_batch batch;
    memset(&view, 0, sizeof view);
    view.data = base + n * slot;
    view.bytes = slot;
    kit_fill(base + n * slot, 64, n);
    kit_fill(base + (n + 1) * slot - 64, 64, n);
    CHECK_EQ(spdl_cuda_send(cuda, &view, &batch, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
    kit_check(stream, batch.data, 64, n);
    kit_check(stream, (char *)batch.data + slot - 64, 64, n);
    CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
}

/* Registered in pieces of at most 1 GiB: what lies across a border goes by two copies. */
static void large_arenas_are_pinned_in_pieces(void) {
    const size_t slot = ((size_t)3 << 20) + 4096, count = 900; /* 2.6 GiB, nearly all untouched */
    const size_t gib = (size_t)1 << 30;
    spdl_cuda_desc desc = small();
    void *stream = kit_stream(false);
    spdl_cuda *cuda;
    size_t n;
    char *base = (char *)mmap(NULL, slot * count, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(base != MAP_FAILED);
    desc.slot_bytes = slot;
    cuda = flow_open(&desc);
    CHECK_EQ(spdl_cuda_adopt(cuda, base, slot * count), SPDL_OK);
    CHECK(sim_now().largest_pin <= gib);
    CHECK_EQ(flow_stats(cuda).pinned_bytes, slot * count);
    for (n = 0; n < 3; ++n) {
        const size_t border = n * gib / slot; /* the slot that it lies in, and those beside */
        if (n > 0) send_slot(cuda, stream, base, slot, border - 1);
        send_slot(cuda, stream, base, slot, border);
        send_slot(cuda, stream, base, slot, border + 1);
    }
    send_slot(cuda, stream, base, slot, count - 1);
    CHECK_EQ(kit_wrong(), 0);
    CHECK_EQ(sim_now().copies, 9 + 2);
    CHECK_EQ(flow_stats(cuda).pageable_bytes, 0);
    spdl_cuda_close(cuda);
    munmap(base, slot * count);
    kit_stream_free(stream);
    nothing_is_left();
    sim_reset();
}

/* One piece of an arena stays registered, the others do not. */
static void pieces_are_unpinned_each_by_itself(void) {
    const size_t bytes = ((size_t)5 << 29) + 4096;
    char *base = (char *)mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    bool unpins = false;
    uint64_t n;
    REQUIRE(base != MAP_FAILED);
    for (n = 1; n < 100 && !unpins; ++n) {
        spdl_cuda_desc desc = small();
        spdl_cuda *cuda = flow_open(&desc);
        CHECK_EQ(spdl_cuda_adopt(cuda, base, bytes), SPDL_OK);
        CHECK_EQ(sim_now().pins, 3);
        sim_fail_nth(n, cudaErrorInvalidValue);
        spdl_cuda_close(cuda);
        unpins = strstr(sim_failed_call(), "Unregister") != NULL;
        if (unpins) nothing_is_wrong();
        if (unpins) CHECK_EQ(sim_now().pins, 1);
        sim_reset();
    }
    CHECK(unpins);
    munmap(base, bytes);
}

static bool mapped(const char *page) {
    return msync((void *)(uintptr_t)page, 4096, MS_ASYNC) == 0;
}

/* On a border of huge pages, wherever the system maps them: what is before and behind is given
   back, and no more than that. */
static void large_blocks_begin_at_huge_pages(void) {
    const size_t huge = (size_t)2 << 20, bytes = huge + 4096; /* with FLOW_HEAD, in pages */
    char *region = (char *)__real_mmap(NULL, 16 * huge, PROT_NONE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    void *stream = kit_stream(false);
    spdl_cuda_desc desc = small();
    spdl_cuda *cuda;
    size_t i;
    REQUIRE(region != MAP_FAILED);
    region += -(uintptr_t)region & (huge - 1);
    desc.slot_bytes = huge;
    cuda = flow_open(&desc);
    for (i = 0; i < 3; ++i) { /* on a border, behind one, before one */
        char *at = region + (i + 1) * 4 * huge + (i == 1 ? 4096 : 0) - (i == 2 ? 4096 : 0);
        char *from = region + (i + 1) * 4 * huge + (i == 1 ? huge : 0);
        void *block;
        wrap_map_at = at;
        block = flow_block(cuda);
        CHECK(wrap_map_at == NULL);
        CHECK((char *)block - FLOW_HEAD == from);
        CHECK(mapped(from) && mapped(from + bytes - 4096));
        CHECK(!mapped(from + bytes) && !mapped(at + bytes + huge - 4096));
        CHECK(mapped(at + bytes + huge) && mapped(at - 4096));
        CHECK(i == 0 || (!mapped(at) && !mapped(from - 4096)));
        CHECK_EQ(flow_stats(cuda).pinned_bytes, (i + 1) * bytes);
        kit_fill(block, 100, i);
        kit_fill((char *)block + huge - 100, 100, i);
        CHECK_EQ(kit_differ(block, 100, i), 0);
    }
    spdl_cuda_close(cuda); /* with the blocks in use: they end with it */
    for (i = 0; i < 3; ++i)
        CHECK(!mapped(region + (i + 1) * 4 * huge + (i == 1 ? huge : 0)));
    kit_stream_free(stream);
    nothing_is_left();
    sim_reset();
}

/* What the program has pinned itself. */
static void *theirs(size_t bytes, uint64_t seed) {
    void *memory = NULL;
    REQUIRE(cudaHostAlloc(&memory, bytes, cudaHostAllocDefault) == cudaSuccess);
    kit_fill(memory, bytes, seed);
    return memory;
}

/* Sends it, and compares it on the device. Returns true if a call has failed. A failed question
   about the memory changes nothing; any other failed call makes the send fail. */
static bool send_theirs(spdl_cuda *cuda, void *stream, const void *memory, uint64_t seed) {
    const spdl_cuda_view view = { .data = memory, .bytes = FLOW_SLOT };
    spdl_cuda_batch batch;
    const spdl_result result = spdl_cuda_send(cuda, &view, &batch, SPDL_FOREVER);
    const bool failed = sim_failed(), asks = strstr(sim_failed_call(), "PointerGet") != NULL;
    sim_fail_nth(0, cudaSuccess);
    CHECK(result == SPDL_OK || (failed && !asks && result == SPDL_E_CUDA));
    if (result != SPDL_OK) return failed;
    CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
    flow_read(&batch, stream, seed);
    CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
    flow_reap(cuda);
    return failed;
}

/* A driver that knows of no beginning and end: a page after the other. Managed memory may move, so
   it is as pageable. */
static void the_driver_may_know_less(void) {
    spdl_cuda_desc desc = small();
    void *stream = kit_stream(false), *memory = theirs(FLOW_SLOT, 3);
    spdl_cuda *cuda = flow_open(&desc);
    sim_set_ranges(false);
    CHECK(!send_theirs(cuda, stream, memory, 3));
    CHECK_EQ(sim_now().copies, FLOW_SLOT / 4096);
    CHECK_EQ(flow_stats(cuda).pageable_bytes, 0);
    sim_set_ranges(true);
    sim_set_managed(true);
    CHECK(!send_theirs(cuda, stream, memory, 3));
    CHECK_EQ(sim_now().copies, FLOW_SLOT / 4096 + 1);
    CHECK_EQ(flow_stats(cuda).pageable_bytes, FLOW_SLOT);
    CHECK_EQ(kit_wrong(), 0);
    CHECK_EQ(cudaFreeHost(memory), cudaSuccess);
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    nothing_is_left();
    sim_reset();
}

/* Each call of a send fails once. */
static void a_send_of_their_memory_may_fail(void) {
    bool failed = true;
    uint64_t n;
    for (n = 1; n < 50 && failed; ++n) {
        spdl_cuda_desc desc = small();
        void *stream = kit_stream(false), *memory = theirs(FLOW_SLOT, n);
        spdl_cuda *cuda = flow_open(&desc);
        sim_fail_nth(n, cudaErrorInvalidValue);
        failed = send_theirs(cuda, stream, memory, n);
        CHECK(!send_theirs(cuda, stream, memory, n));
        CHECK_EQ(flow_stats(cuda).device_free, 2);
        CHECK_EQ(kit_wrong(), 0);
        CHECK_EQ(cudaFreeHost(memory), cudaSuccess);
        spdl_cuda_close(cuda);
        kit_stream_free(stream);
        CHECK_STR(sim_violation(), "");
        CHECK_EQ(sim_leaks(), 0);
        sim_reset();
    }
    CHECK(n > 8 && n < 50);
}

static void a_node_is_asked_for(void) {
    static const int nodes[] = { -1, 0, 63, 64, 1000 };
    size_t i;
    for (i = 0; i < sizeof nodes / sizeof nodes[0]; ++i) {
        spdl_cuda_desc desc = small();
        spdl_cuda *cuda;
        sim_set_numa_node(nodes[i]);
        cuda = flow_open(&desc);
        CHECK_EQ(flow_batch(cuda, NULL, 1000, i), SPDL_OK);
        CHECK_EQ(kit_wrong(), 0);
        spdl_cuda_close(cuda);
        nothing_is_left();
        sim_reset();
    }
}

static void *takes_blocks(void *arg) {
    int i;
    for (i = 0; i < 20; ++i) {
        void *block = flow_block((spdl_cuda *)arg);
        CHECK(block != NULL);
        if (block != NULL) flow_block_free(block);
    }
    return NULL;
}

/* Pipelines may be made at the same time (ThreadSanitizer sees what they share). */
static void any_thread_may_take_blocks(void) {
    spdl_cuda_desc desc = small();
    spdl_cuda *cuda = flow_open(&desc);
    pthread_t thread[2];
    int i;
    for (i = 0; i < 2; ++i)
        if (pthread_create(&thread[i], NULL, takes_blocks, cuda) != 0) abort();
    for (i = 0; i < 2; ++i) pthread_join(thread[i], NULL);
    spdl_cuda_close(cuda);
    nothing_is_left();
    sim_reset();
}

enum { BLOCKS = 1024, FINDS = 100000 /* look-ups */ };

/* Takes blocks in one order, looks each up many times, gives them back in another. Returns the time
   of a look-up. */
static double find_ns(int blocks) {
    static void *block[BLOCKS];
    spdl_cuda_desc desc = small();
    spdl_cuda *cuda = flow_open(&desc);
    uint64_t start, took;
    int i, k;
    for (i = 0; i < blocks; ++i) REQUIRE((block[i] = flow_block(cuda)) != NULL);
    start = spdl_time_ns();
    for (k = 0; k < FINDS / blocks; ++k)
        for (i = 0; i < blocks; ++i) {
            const spdl__cuda_slab *slab = spdl__slab_find(cuda, block[i], FLOW_SLOT);
            if (slab == NULL || slab->base + FLOW_HEAD != block[i]) REQUIRE(false);
        }
    took = spdl_time_ns() - start;
    for (i = 0; i < 2; ++i) { /* the last byte of a block, and one more */
        const char *end = (const char *)block[i] - FLOW_HEAD + FLOW_SLOT + 4096;
        CHECK(spdl__slab_find(cuda, end - 1, 1) != NULL);
        CHECK(spdl__slab_find(cuda, end - 1, 2) == NULL);
    }
    CHECK(spdl__slab_find(cuda, &desc, 1) == NULL);
    CHECK(spdl__slab_find(cuda, NULL, 1) == NULL);
    for (i = 0; i < blocks; ++i) flow_block_free(block[i * 5 % blocks]);
    for (i = 0; i < blocks; ++i) REQUIRE((block[i] = flow_block(cuda)) != NULL); /* the same */
    CHECK_EQ(flow_stats(cuda).pinned_bytes, (size_t)blocks * (FLOW_SLOT + 4096));
    for (i = 0; i < blocks; ++i) flow_block_free(block[i]);
    spdl_cuda_close(cuda);
    nothing_is_left();
    sim_reset();
    return (double)took / (FINDS / blocks * blocks);
}

/* By address: a walk over all would take hundreds of times as long. */
static void many_blocks_are_found_as_fast(void) {
    double few = 1, many = 1e9;
    int tries;
    for (tries = 0; tries < 5 && many >= 40 * few; ++tries) { /* other programs may run */
        few = find_ns(4);
        many = find_ns(BLOCKS);
    }
    printf("   %.0f ns in 4 blocks, %.0f ns in %d\n", few, many, BLOCKS);
    CHECK(many < 40 * few);
}

/* ---- whose device, stream and memory it is ---- */

static unsigned contexts(void) { return sim_now().contexts; }

static void *sends_from_afar(void *arg) {
    spdl_cuda *cuda = (spdl_cuda *)arg;
    spdl_cuda_batch batch;
    uint64_t i;
    for (i = 0; i < 10; ++i) {
        if (!CHECK_EQ(flow_send(cuda, &batch, 4096, i, SPDL_FOREVER), SPDL_OK)) break;
        CHECK_EQ(spdl_cuda_arrived(&batch, SPDL_FOREVER), SPDL_OK);
        spdl_cuda_batch_free(&batch);
        (void)flow_reap_one(cuda, 0);
    }
    return NULL;
}

/* Of three devices, one is used, by threads of which none has said which: no other gets a context,
   and the thread that has one keeps it. */
static void no_context_is_made_elsewhere(void) {
    spdl_cuda_desc desc = small();
    spdl_cuda *cuda;
    pthread_t thread[3];
    flow_source s;
    int i, current = -1;
    sim_set_devices(3);
    desc.device = SPDL_CUDA_ORDINAL(1);
    desc.output_bytes = 100;
    cuda = flow_open(&desc);
    flow_source_open(&s, 4, 0);
    CHECK_EQ(spdl_cuda_adopt(cuda, s.seen, 4 * FLOW_SLOT), SPDL_OK);
    for (i = 0; i < 3; ++i)
        REQUIRE(pthread_create(&thread[i], NULL, sends_from_afar, cuda) == 0);
    for (i = 0; i < 3; ++i) pthread_join(thread[i], NULL);
    CHECK_EQ(contexts(), 1u << 1);
    CHECK_EQ(cudaSetDevice(2), cudaSuccess);
    (void)sends_from_afar(cuda);
    CHECK_EQ(cudaGetDevice(&current), cudaSuccess);
    CHECK_EQ(current, 2);
    spdl_cuda_close(cuda);
    CHECK_EQ(contexts(), 3u << 1);
    flow_source_close(&s);
    nothing_is_left();
    sim_reset();
}

/* 0 means the device of the calling thread. */
static void the_callers_device_is_the_default(void) {
    int i;
    for (i = -1; i < 3; ++i) {
        spdl_cuda_desc desc = small();
        spdl_cuda *cuda;
        sim_set_devices(3);
        if (i >= 0) CHECK_EQ(cudaSetDevice(i), cudaSuccess);
        cuda = flow_open(&desc);
        CHECK_EQ(flow_stats(cuda).device, i < 0 ? 0 : i);
        spdl_cuda_close(cuda);
        nothing_is_left();
        sim_reset();
    }
}

static void streams_of_other_devices_are_refused(void) {
    spdl_cuda_stream stream[2];
    spdl_cuda *cuda[2];
    spdl_cuda_batch batch;
    spdl_cuda_output *out = NULL;
    spdl_cuda_desc desc = small();
    sim_set_devices(2);
    on_device(1, &stream[1], &cuda[1]);
    desc.output_bytes = 10;
    cuda[0] = flow_open(&desc);
    batch = sent(cuda[0], 1);
    CHECK_EQ(spdl_cuda_ready(&batch, stream[1]), SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_output_get(cuda[0], stream[1], &out, SPDL_FOREVER), SPDL_E_INVALID);
    CHECK_EQ(flow_stats(cuda[0]).output_free, 4);
    spdl_cuda_batch_free(&batch);
    spdl_cuda_close(cuda[1]);
    spdl_cuda_close(cuda[0]);
    kit_stream_free(stream[1]);
    nothing_is_left();
    sim_reset();
}

typedef struct other_thread {
    const spdl_cuda_batch *batch;
    spdl_cuda_iter *it;
    spdl_result done, next;
} other_thread;

static void *is_done_elsewhere(void *arg) {
    other_thread *o = (other_thread *)arg;
    spdl_cuda_batch batch;
    if (o->batch != NULL) o->done = spdl_cuda_done(o->batch, cudaStreamPerThread);
    if (o->it != NULL)
        o->next = spdl_cuda_iter_next(o->it, cudaStreamPerThread, &batch, SPDL_FOREVER);
    return NULL;
}

static void done_elsewhere(other_thread *o) {
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, is_done_elsewhere, o) == 0);
    pthread_join(thread, NULL);
}

/* cudaStreamPerThread is another stream on each thread: what was put on that of one is not over
   when that of another says so. */
static void a_threads_stream_is_its_own(void) {
    spdl_cuda_desc desc = small();
    spdl_cuda *cuda = flow_open(&desc);
    spdl_cuda_iter *it = NULL;
    spdl_cuda_iter_desc iter_desc;
    spdl_cuda_batch batch;
    other_thread o = { &batch, NULL, SPDL_OK, SPDL_OK };
    flow_source s;
    batch = sent(cuda, 1);
    CHECK_EQ(spdl_cuda_ready(&batch, cudaStreamPerThread), SPDL_OK);
    done_elsewhere(&o);
    CHECK_EQ(o.done, SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_done(&batch, cudaStreamPerThread), SPDL_OK);
    flow_source_open(&s, 4, 4);
    iter_desc = flow_iter_desc(&s);
    REQUIRE(spdl_cuda_iter_create(&it, cuda, &iter_desc) == SPDL_OK);
    CHECK_EQ(spdl_cuda_iter_next(it, cudaStreamPerThread, &batch, SPDL_FOREVER), SPDL_OK);
    o.batch = NULL;
    o.it = it;
    done_elsewhere(&o);
    CHECK_EQ(o.next, SPDL_E_INVALID);
    CHECK_EQ(spdl_cuda_iter_next(it, cudaStreamPerThread, &batch, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ((uintptr_t)batch.user, 1);
    spdl_cuda_iter_destroy(it);
    spdl_cuda_close(cuda);
    flow_source_close(&s);
    nothing_is_left();
    sim_reset();
}

/* A kernel of somebody else that does not end: closing an iterator does not wait for it. */
static void closing_waits_for_nobody_else(void) {
    slow_reader reader = { NULL, { 0 }, 1 };
    spdl_cuda_desc desc = small();
    spdl_cuda *cuda = flow_open(&desc);
    void *stream = kit_stream(false), *theirs = kit_stream(false);
    spdl_cuda_iter *it = NULL;
    spdl_cuda_iter_desc iter_desc;
    spdl_cuda_batch batch;
    flow_source s;
    flow_source_open(&s, 4, 10);
    iter_desc = flow_iter_desc(&s);
    REQUIRE(spdl_cuda_iter_create(&it, cuda, &iter_desc) == SPDL_OK);
    CHECK_EQ(spdl_cuda_iter_next(it, stream, &batch, SPDL_FOREVER), SPDL_OK);
    launch_on(0, (cudaStream_t)theirs, &reader);
    spdl_cuda_iter_destroy(it);
    CHECK_EQ(__atomic_load_n(&reader.held, __ATOMIC_ACQUIRE), 1);
    __atomic_store_n(&reader.held, 0, __ATOMIC_RELEASE);
    spdl_cuda_close(cuda);
    flow_source_close(&s);
    kit_stream_free(stream);
    kit_stream_free(theirs);
    nothing_is_left();
    sim_reset();
}

static void count_release(void *item) { ++*(int *)item; }

/* The copy out of memory that is not pinned is held: the send returns all the same (E4 is the
   copy's event), and so does another one. */
static void memory_that_is_not_pinned_waits_for_its_event(void) {
    static unsigned char memory[2][4096];
    spdl_cuda_desc desc = small();
    spdl_cuda *cuda = flow_open(&desc);
    spdl_cuda_batch batch[2];
    int i, released = 0;
    sim_pageable_late(true);
    sim_hold();
    for (i = 0; i < 2; ++i) {
        const spdl_cuda_view view = { memory[i], 4096, NULL, count_release, &released };
        CHECK_EQ(spdl_cuda_send(cuda, &view, &batch[i], 0), SPDL_OK);
    }
    CHECK_EQ(flow_reap_one(cuda, 0), SPDL_TIMEOUT); /* they are still read */
    CHECK_EQ(spdl_cuda_arrived(&batch[1], 0), SPDL_TIMEOUT);
    CHECK_EQ(released, 0);
    sim_release();
    CHECK_EQ(spdl_cuda_arrived(&batch[1], SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(released, 2);
    spdl_cuda_batch_free(&batch[0]);
    spdl_cuda_batch_free(&batch[1]);
    spdl_cuda_close(cuda);
    nothing_is_left();
    sim_reset();
}

/* All device slots are in the caller's hands: next says so, and goes on when one is not. */
static void next_does_not_wait_for_its_caller(void) {
    spdl_cuda_desc desc = small();
    spdl_cuda *cuda = flow_open(&desc);
    spdl_cuda_iter *it = NULL;
    spdl_cuda_iter_desc iter_desc;
    spdl_cuda_batch held[2], batch;
    spdl_error error;
    flow_source s;
    uint64_t count;
    int i;
    for (i = 0; i < 2; ++i)
        held[i] = sent(cuda, 7);
    flow_source_open(&s, 4, 10);
    iter_desc = flow_iter_desc(&s);
    REQUIRE(spdl_cuda_iter_create(&it, cuda, &iter_desc) == SPDL_OK);
    CHECK_EQ(spdl_cuda_iter_next(it, NULL, &batch, SPDL_FOREVER), SPDL_E_LIMIT);
    spdl_cuda_error(cuda, &error);
    CHECK(strstr(error.text, "not done with") != NULL);
    spdl_cuda_batch_free(&held[0]);
    CHECK_EQ(flow_train(it, NULL, &count), SPDL_END);
    CHECK_EQ(count, 10);
    spdl_cuda_iter_destroy(it);
    spdl_cuda_batch_free(&held[1]);
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_close(cuda);
    flow_source_close(&s);
    nothing_is_left();
    sim_reset();
}

/* A trainer may map the loader's arena to be read only. */
static void memory_that_may_only_be_read_is_pinned(void) {
    spdl_cuda_desc desc = small();
    spdl_cuda *cuda;
    void *memory = mmap(NULL, 4 * FLOW_SLOT, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    cuda = flow_open(&desc);
    CHECK_EQ(spdl_cuda_adopt(cuda, memory, 4 * FLOW_SLOT), SPDL_OK);
    CHECK_EQ(flow_stats(cuda).pinned_bytes, 4 * FLOW_SLOT);
    spdl_cuda_close(cuda);
    munmap(memory, 4 * FLOW_SLOT);
    nothing_is_left();
    sim_reset();
}

static void *waits_for_a_slot(void *arg) {
    waiter *w = (waiter *)arg;
    spdl_cuda_batch batch;
    w->result = flow_send(w->cuda, &batch, 1000, 2, SPDL_FOREVER);
    if (w->result == SPDL_OK) spdl_cuda_batch_free(&batch);
    return NULL;
}

static void log_to(spdl_log_level level, const char *text, void *user) {
    if (level == SPDL_LOG_WARN) snprintf((char *)user, SPDL_TEXT_BYTES, "%s", text);
}

/* After a second, once: who has them. Who waits for ever goes on when there is one. */
static void a_long_wait_says_who_has_the_slots(void) {
    char line[SPDL_TEXT_BYTES] = "";
    spdl_cuda_desc desc = small();
    spdl_cuda_output *out = NULL;
    spdl_cuda_batch held[2], none, other[2];
    spdl_cuda *without; /* outputs */
    pthread_t thread;
    waiter w;
    int i;
    desc.logger = (spdl_logger){ log_to, line };
    without = flow_open(&desc);
    desc = small();
    desc.output_bytes = 1000;
    desc.output_slots = 3;
    w = (waiter){ flow_open(&desc), SPDL_TIMEOUT };
    flow_lines = 0;
    for (i = 0; i < 2; ++i) {
        held[i] = sent(w.cuda, 1);
        other[i] = sent(without, 1);
    }
    REQUIRE(spdl_cuda_output_get(w.cuda, cudaStreamLegacy, &out, SPDL_FOREVER) == SPDL_OK);
    REQUIRE(pthread_create(&thread, NULL, waits_for_a_slot, &w) == 0);
    CHECK_EQ(flow_send(without, &none, 1000, 2, SPDL_SECONDS(1.05)), SPDL_TIMEOUT);
    CHECK_EQ(flow_send(w.cuda, &none, 1000, 2, SPDL_SECONDS(1.05)), SPDL_TIMEOUT);
    for (i = 0; i < 2; ++i) {
        spdl_cuda_batch_free(&held[i]);
        spdl_cuda_batch_free(&other[i]);
    }
    pthread_join(thread, NULL);
    CHECK(strstr(line, "hold 2 of 2 device slots") != NULL);
    CHECK(strstr(line, "not freed: 0 of 0") != NULL);
    CHECK_EQ(w.result, SPDL_OK);
    CHECK_EQ(flow_lines, 1);
    CHECK(strstr(flow_line, "hold 2 of 2 device slots") != NULL);
    CHECK(strstr(flow_line, "not freed: 1 of 3") != NULL);
    spdl_cuda_output_free(out);
    spdl_cuda_close(without);
    spdl_cuda_close(w.cuda);
    nothing_is_left();
    sim_reset();
}

/* ---- processes ---- */

static spdl_cuda *exit_cuda;

static int leaves_without_closing(void *arg) {
    spdl_cuda_desc desc = small();
    exit_cuda = flow_open(&desc);
    CHECK_EQ(flow_batch(exit_cuda, NULL, 1000, 1), SPDL_OK);
    if (arg != NULL) return 8;
    sim_unload();
    return 8;
}

static void closes_late(void) {
    sim_unload();
    spdl_cuda_close(exit_cuda);
}

static int closes_while_it_unloads(void *arg) {
    atexit(closes_late);
    return leaves_without_closing(arg);
}

/* LeakSanitizer would find what the first one leaves: it is still held by exit_cuda. */
static void leaving_is_quiet(void) {
    int arg = 0;
    CHECK_EQ(flow_child(leaves_without_closing, NULL, 10, true), 8);
    CHECK_EQ(flow_child(leaves_without_closing, &arg, 10, true), 8);
    CHECK_EQ(flow_child(closes_while_it_unloads, &arg, 10, true), 8);
}

static void a_runtime_that_unloads_is_let_go(void) {
    spdl_cuda_desc desc = small();
    void *stream = kit_stream(false);
    spdl_cuda *cuda = flow_open(&desc);
    spdl_error error;
    uint64_t before;
    CHECK_EQ(flow_batch(cuda, stream, 1000, 1), SPDL_OK);
    sim_unload();
    CHECK(flow_batch(cuda, stream, 1000, 1) < 0);
    spdl_cuda_error(cuda, &error);
    CHECK(error.result < 0);
    CHECK(strstr(error.text, "cuda") != NULL);
    before = sim_now().work_calls;
    spdl_cuda_close(cuda);
    CHECK(sim_now().work_calls - before <= 2); /* one, to find out */
    sim_reset();
}

/* A capture that forbids waiting calls, of every thread: none of ours spoils it. */
static void captures_survive_all_calls(void) {
    static unsigned char pageable[4096];
    const spdl_cuda_view view = { .data = pageable, .bytes = 4096 };
    spdl_cuda_desc desc = small();
    cudaStream_t captured = (cudaStream_t)kit_stream(false);
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaGraph_t graph = NULL;
    void *stream = kit_stream(false);
    spdl_cuda_output *out = NULL;
    spdl_cuda_batch batch;
    spdl_cuda *cuda;
    flow_source s;
    flow_source_open(&s, 1, 0);
    REQUIRE(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal) == cudaSuccess);
    desc.output_bytes = 1000;
    cuda = flow_open(&desc);
    CHECK_EQ(spdl_cuda_adopt(cuda, s.seen, FLOW_SLOT), SPDL_OK);
    CHECK_EQ(spdl_cuda_send(cuda, &view, &batch, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(spdl_cuda_arrived(&batch, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
    sim_fail_nth(2, cudaErrorInvalidValue); /* its end cannot be recorded, and is waited for */
    spdl_cuda_batch_free(&batch);
    CHECK(sim_failed());
    CHECK_EQ(spdl_cuda_output_get(cuda, stream, &out, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(spdl_cuda_output_send(out), SPDL_OK);
    CHECK_EQ(spdl_cuda_output_wait(out, SPDL_FOREVER), SPDL_OK);
    spdl_cuda_output_free(out);
    CHECK(!flow_stats(cuda).lost);
    spdl_cuda_close(cuda);
    CHECK_EQ(cudaStreamIsCapturing(captured, &status), cudaSuccess);
    CHECK_EQ(status, cudaStreamCaptureStatusActive);
    CHECK_EQ(cudaStreamEndCapture(captured, &graph), cudaSuccess);
    CHECK(graph != NULL);
    flow_source_close(&s);
    kit_stream_free(stream);
    kit_stream_free(captured);
    nothing_is_left();
    sim_reset();
}

/* ---- errors that stay ---- */

static void a_lost_device_stays_lost(void) {
    spdl_cuda_desc desc = small();
    void *stream = kit_stream(false);
    spdl_cuda *cuda = flow_open(&desc);
    spdl_cuda_view view = { 0 };
    spdl_cuda_batch batch;
    spdl_error first, last;
    uint64_t i;
    CHECK_EQ(flow_batch(cuda, stream, 1000, 1), SPDL_OK);
    CHECK_EQ(sim_launch_failing((cudaStream_t)stream, cudaErrorIllegalAddress), cudaSuccess);
    CHECK_EQ(cudaStreamSynchronize((cudaStream_t)stream), cudaErrorIllegalAddress);
    CHECK_EQ(flow_batch(cuda, stream, 1000, 2), SPDL_E_CUDA_LOST);
    spdl_cuda_error(cuda, &first);
    CHECK_EQ(first.result, SPDL_E_CUDA_LOST);
    CHECK(strstr(first.text, "cuda") != NULL);
    CHECK(strstr(first.text, "cudaErrorIllegalAddress") != NULL); /* what CUDA says */
    for (i = 0; i < 10; ++i) CHECK_EQ(flow_batch(cuda, stream, 1000, i), SPDL_E_CUDA_LOST);
    CHECK_EQ(spdl_cuda_send(cuda, &view, &batch, SPDL_FOREVER), SPDL_E_CUDA_LOST);
    CHECK_EQ(spdl_cuda_adopt(cuda, &first, FLOW_SLOT), SPDL_E_CUDA_LOST);
    spdl_cuda_error(cuda, &last);
    CHECK_STR(last.text, first.text);
    CHECK(flow_stats(cuda).lost);
    spdl_cuda_close(cuda);
    sim_reset();
}

static void errors_that_stay_are_known(void) {
    static const int code[] = { 201, 214, 220, 226, 700, 702, 709, 710, 714, 715,
                                716, 717, 718, 719, 721, 810, 911, 999 };
    size_t i;
    for (i = 0; i < sizeof(code) / sizeof(code[0]); ++i) {
        spdl_cuda_desc desc = small();
        spdl_cuda *cuda = flow_open(&desc);
        const bool fault = code[i] >= 700 && code[i] < 800;
        spdl_error error;
        bool fine;
        sim_poison((cudaError_t)code[i]);
        fine = CHECK_EQ(flow_batch(cuda, NULL, 1000, 1), SPDL_E_CUDA_LOST);
        spdl_cuda_error(cuda, &error);
        fine = CHECK(strstr(error.text, "lost to this process") != NULL) && fine;
        fine = CHECK_EQ(strstr(error.text, "of whomever, did it") != NULL, fault) && fine;
        if (!fine) fprintf(stderr, "   error %d\n", code[i]);
        spdl_cuda_close(cuda);
        sim_reset();
    }
}

static void *waits_for_an_output(void *arg) {
    waiter *w = (waiter *)arg;
    spdl_cuda_output *out = NULL;
    w->result = spdl_cuda_output_get(w->cuda, cudaStreamLegacy, &out, SPDL_FOREVER);
    return NULL;
}

/* The device is lost while somebody waits for an output: none will come. */
static void a_lost_device_wakes_all(void) {
    spdl_cuda_desc desc = small();
    spdl_cuda_output *out = NULL;
    pthread_t thread;
    waiter w;
    desc.output_bytes = 1000;
    desc.output_slots = 1;
    w = (waiter){ flow_open(&desc), SPDL_OK };
    REQUIRE(spdl_cuda_output_get(w.cuda, cudaStreamLegacy, &out, SPDL_FOREVER) == SPDL_OK);
    REQUIRE(pthread_create(&thread, NULL, waits_for_an_output, &w) == 0);
    usleep(20000);
    sim_poison(cudaErrorIllegalAddress);
    CHECK_EQ(spdl_cuda_output_send(out), SPDL_E_CUDA_LOST);
    spdl_cuda_output_free(out);
    pthread_join(thread, NULL);
    CHECK_EQ(w.result, SPDL_E_CUDA_LOST);
    spdl_cuda_close(w.cuda);
    sim_reset();
}

static void writes_over(void *item) { memset(item, 0x5a, 1000); }

/* What a copy has read comes back when the device is lost, too, and behind the copy: whoever writes
   to it then does not race with it. */
static void a_lost_device_lets_go_of_arenas(void) {
    spdl_cuda_desc desc = small();
    spdl_cuda *cuda = flow_open(&desc);
    char *arena = (char *)flow_map(2 * FLOW_SLOT);
    spdl_cuda_view view;
    spdl_cuda_batch batch;
    REQUIRE(spdl_cuda_adopt(cuda, arena, 2 * FLOW_SLOT) == SPDL_OK);
    memset(&view, 0, sizeof(view));
    view.data = view.item = arena;
    view.bytes = 1000;
    view.release = writes_over;
    CHECK_EQ(spdl_cuda_send(cuda, &view, &batch, SPDL_FOREVER), SPDL_OK);
    usleep(50000); /* orders nothing, but the copy has run */
    CHECK_EQ(arena[0], 0);
    sim_poison(cudaErrorIllegalAddress);
    CHECK_EQ(spdl_cuda_ready(&batch, NULL), SPDL_E_CUDA_LOST);
    spdl_cuda_close(cuda);
    CHECK_EQ(arena[999], 0x5a);
    CHECK_EQ(munmap(arena, 2 * FLOW_SLOT), 0);
    sim_reset();
}

/* Somebody else resets the device: everything is gone, and every call says so. */
static void a_reset_device_is_an_error(void) {
    spdl_cuda_desc desc = small();
    spdl_cuda *cuda = flow_open(&desc);
    void *stream;
    uint64_t i;
    CHECK_EQ(flow_batch(cuda, NULL, 1000, 1), SPDL_OK);
    CHECK_EQ(cudaDeviceReset(), cudaSuccess);
    stream = kit_stream(false);
    for (i = 0; i < 10; ++i) CHECK(flow_batch(cuda, stream, 1000, i) < 0);
    spdl_cuda_close(cuda);
    sim_reset();
}

/* ---- the n-th call fails ---- */

static bool failed_early; /* before the close of a path: then nothing may be left */

static void path_ends(void) { failed_early = failed_early && sim_failed(); }

static void close_path(spdl_cuda *cuda) {
    path_ends();
    spdl_cuda_close(cuda);
}

typedef struct path {
    const char *name;
    spdl_result (*run)(void *stream);
} path;

/* A call that failed once can be repeated. */
static spdl_result repeat_batch(spdl_cuda *cuda, void *stream, uint64_t seed) {
    spdl_result result = SPDL_OK;
    int tries;
    for (tries = 0; tries < 3; ++tries) {
        result = flow_batch(cuda, stream, 2000, seed);
        if (result != SPDL_E_CUDA) break;
    }
    return result;
}

static spdl_result path_slots(void *stream) {
    spdl_cuda_desc desc = small();
    spdl_cuda *cuda = NULL;
    spdl_result result = spdl_cuda_open(&cuda, &desc);
    uint64_t i;
    for (i = 0; i < 7 && result == SPDL_OK; ++i) result = repeat_batch(cuda, stream, i);
    for (i = 0; i < 3 && result == SPDL_OK; ++i) result = repeat_batch(cuda, NULL, i);
    close_path(cuda);
    return result;
}

static spdl_result path_pageable(void *stream) {
    sim_set_pin_limit(1);
    sim_pageable_late(true);
    return path_slots(stream);
}

static spdl_result path_second_device(void *stream) {
    spdl_cuda_desc desc = small();
    spdl_cuda *cuda = NULL;
    spdl_result result;
    uint64_t i;
    (void)stream;
    desc.device = SPDL_CUDA_ORDINAL(1);
    result = spdl_cuda_open(&cuda, &desc);
    for (i = 0; i < 5 && result == SPDL_OK; ++i) {
        spdl_cuda_batch batch;
        result = flow_send(cuda, &batch, 2000, i, SPDL_FOREVER);
        if (result != SPDL_OK) break;
        result = spdl_cuda_ready(&batch, NULL);
        spdl_cuda_batch_free(&batch);
    }
    close_path(cuda);
    return result;
}

static spdl_result view_and_peek(spdl_cuda *cuda, flow_source *s, void *stream) {
    unsigned char back[100];
    spdl_cuda_batch batch;
    spdl_cuda_view view;
    void *item = NULL;
    spdl_result result = flow_next(s, &item, SPDL_SECONDS(2));
    if (result != SPDL_OK) return result;
    memset(&view, 0, sizeof view);
    CHECK_EQ(flow_view(item, &view), SPDL_OK);
    view.release = flow_item_free;
    view.item = item;
    result = spdl_cuda_send(cuda, &view, &batch, SPDL_FOREVER);
    if (result != SPDL_OK) {
        flow_item_free(item);
        return result;
    }
    result = spdl_cuda_ready(&batch, stream);
    if (result == SPDL_OK) result = flow_peek(&batch, 0, back, sizeof back, stream);
    if (result == SPDL_OK)
        CHECK_EQ(kit_differ(back, sizeof back, (uint64_t)(uintptr_t)batch.user), 0);
    if (result == SPDL_OK) result = spdl_cuda_done(&batch, stream);
    if (result != SPDL_OK) spdl_cuda_batch_free(&batch);
    return result;
}

static spdl_result path_arena(void *stream) {
    spdl_cuda_desc desc = small();
    spdl_cuda *cuda = NULL;
    flow_source s;
    spdl_result result = spdl_cuda_open(&cuda, &desc);
    if (result != SPDL_OK) return result;
    flow_source_open(&s, 8, 8);
    s.outside = 3;
    result = spdl_cuda_adopt(cuda, s.seen, 8 * FLOW_SLOT);
    while (result == SPDL_OK) result = view_and_peek(cuda, &s, stream);
    if (result == SPDL_END) result = SPDL_OK;
    close_path(cuda);
    flow_source_close(&s);
    return result;
}

static spdl_result iterate(void *stream, int hold) {
    spdl_cuda_desc desc = small();
    spdl_cuda *cuda = NULL;
    spdl_cuda_iter *it = NULL;
    spdl_cuda_iter_desc iter_desc;
    spdl_cuda_batch batch;
    flow_source s;
    int i;
    spdl_result result = spdl_cuda_open(&cuda, &desc);
    if (result != SPDL_OK) return result;
    flow_source_open(&s, 4, 9);
    s.outside = 4;
    iter_desc = flow_iter_desc(&s);
    result = spdl_cuda_adopt(cuda, s.seen, 4 * FLOW_SLOT);
    if (result == SPDL_OK) result = spdl_cuda_iter_create(&it, cuda, &iter_desc);
    for (i = 0; result == SPDL_OK; ++i) {
        if (i == 3) result = spdl_cuda_iter_hold(it, hold);
        if (i == 7 && result == SPDL_OK) result = spdl_cuda_iter_hold(it, 0);
        if (result == SPDL_OK) result = spdl_cuda_iter_next(it, stream, &batch, SPDL_FOREVER);
        if (result == SPDL_OK) flow_read(&batch, stream, (uint64_t)(uintptr_t)batch.user);
    }
    spdl_cuda_iter_destroy(it);
    close_path(cuda);
    flow_source_close(&s);
    return result == SPDL_END ? SPDL_OK : result;
}

static spdl_result path_iterator(void *stream) { return iterate(stream, 0); }
static spdl_result path_hold(void *stream) { return iterate(stream, 2); }

static spdl_result path_outputs(void *stream) {
    spdl_cuda_desc desc = small();
    spdl_cuda *cuda = NULL;
    spdl_result result;
    uint64_t i;
    desc.output_bytes = 1000;
    desc.output_slots = 2;
    result = spdl_cuda_open(&cuda, &desc);
    for (i = 0; i < 7 && result == SPDL_OK; ++i) {
        spdl_cuda_output *out = NULL;
        result = spdl_cuda_output_get(cuda, stream, &out, SPDL_FOREVER);
        if (result == SPDL_OK && i % 4 != 3) result = spdl_cuda_output_send(out);
        if (result == SPDL_OK && i % 4 == 1) result = spdl_cuda_output_wait(out, SPDL_FOREVER);
        if (result == SPDL_OK && i % 4 == 2) result = spdl_cuda_output_wait(out, SPDL_SECONDS(5));
        spdl_cuda_output_free(out);
    }
    close_path(cuda);
    return result;
}

SPDL_FN(path_source, void, flow_filled) {
    if (spdl_sequence(task) == 9) return SPDL_END;
    *out = (flow_filled *)spdl_buffer(task);
    if (*out == NULL) return SPDL_E_NOMEM;
    (*out)->seed = spdl_sequence(task);
    (*out)->bytes = sizeof (*out)->data;
    kit_fill((*out)->data, sizeof (*out)->data, (*out)->seed);
    return SPDL_OK;
}

/* In place there, kernels, and back, by rows of a pipeline. */
static spdl_result path_rows(void *stream) {
    spdl_pipeline_desc workers = { .workers = 2, .logger = { flow_quiet, NULL } };
    spdl_cuda_desc desc = small();
    spdl_cuda *cuda = NULL;
    spdl_pipeline *p = NULL;
    spdl_cuda_output *out = NULL;
    flow_answers answers;
    spdl_result result;
    desc.slot_bytes = desc.output_bytes = sizeof(((flow_filled *)NULL)->data);
    result = spdl_cuda_open(&cuda, &desc);
    if (result != SPDL_OK) return result;
    flow_answers_open(&answers, cuda, stream);
    workers.allocator = spdl_cuda_allocator(cuda);
    result = spdl_pipeline_create(&p, &workers, SPDL_STAGES(
        SPDL_SOURCE(path_source, .item_bytes = sizeof(flow_filled), .free_item = spdl_buffer_free),
        FLOW_ROWS(&answers), SPDL_SINK(2)));
    while (result == SPDL_OK) {
        result = SPDL_NEXT(p, &out, SPDL_FOREVER);
        if (result == SPDL_OK) spdl_cuda_output_free(out);
    }
    spdl_pipeline_destroy(p);
    flow_answers_close(&answers);
    close_path(cuda);
    /* an item that fails has a text, and no other code */
    return result == SPDL_END ? SPDL_OK : result == SPDL_E_STAGE ? SPDL_E_CUDA : result;
}

static const path paths[] = {
    { "slots", path_slots },
    { "pageable", path_pageable },
    { "second device", path_second_device },
    { "arena", path_arena },
    { "iterator", path_iterator },
    { "hold", path_hold },
    { "outputs", path_outputs },
    { "rows", path_rows },
};

/* With a sanitizer, which takes its time, each sixth call. */
enum { PATHS = sizeof paths / sizeof paths[0], SWEEP_MOST = 3000,
       FAILING_STEP = TEST_SANITIZED ? 6 : 1 };

/* Runs a path with the n-th call failing, once or for ever. False: it makes fewer calls. */
static bool run_failing(const path *p, uint64_t n, cudaError_t error, bool for_ever) {
    spdl_result result;
    bool failed;
    void *stream;
    char call[64];
    failed_early = true;
    sim_set_devices(2);
    stream = kit_stream(false);
    if (for_ever) sim_poison_nth(n, error);
    else sim_fail_nth(n, error);
    result = p->run(stream);
    failed = sim_failed();
    snprintf(call, sizeof call, "%s", sim_failed_call());
    if (!for_ever || !failed) {
        bool fine;
        sim_fail_nth(0, cudaSuccess);
        fine = CHECK_EQ(kit_wrong(), 0);
        kit_stream_free(stream);
        if (failed && (!failed_early || strstr(call, "Unregister") || strstr(call, "Ctx") ||
                       strstr(call, "ExchangeMode")))
            CHECK_STR(sim_violation(), ""); /* what could not be ended is left */
        else
            nothing_is_left();
        if (!failed) CHECK_EQ(result, SPDL_OK);
        else fine = CHECK(result == SPDL_OK || result == SPDL_E_CUDA || result == SPDL_E_NOMEM ||
                          result == SPDL_E_NOT_FOUND) && fine;
        if (!fine) fprintf(stderr, "   in path %s, call %d, %s\n", p->name, (int)n, call);
    } else if (!CHECK(result == SPDL_E_CUDA_LOST || result == SPDL_E_CUDA || result == SPDL_OK ||
                      result == SPDL_E_NOT_FOUND || result == SPDL_E_NOMEM)) {
        fprintf(stderr, "   %d in path %s, call %d, %s\n", result, p->name, (int)n, call);
    }
    sim_reset();
    return failed;
}

/* With FAILING_STEP another part of the calls for each error. */
static void sweep(cudaError_t error, bool for_ever) {
    const uint64_t step = FAILING_STEP;
    size_t i;
    uint64_t n;
    for (i = 0; i < PATHS; ++i) {
        for (n = 1 + (i + (uint64_t)error) % step; n < SWEEP_MOST; n += step)
            if (!run_failing(&paths[i], n, error, for_ever)) break;
        CHECK(n > 20 && n < SWEEP_MOST);
    }
}

static void each_call_may_fail_once(void) { sweep(cudaErrorInvalidValue, false); }
static void each_call_may_run_out_of_memory(void) { sweep(cudaErrorMemoryAllocation, false); }
static void the_device_may_be_lost_at_each_call(void) { sweep(cudaErrorIllegalAddress, true); }
static void the_runtime_may_unload_at_each_call(void) { sweep(cudaErrorCudartUnloading, true); }

static void counting_survives_everything(void) {
    spdl_error error;
    uint64_t n;
    for (n = 1; n < 50; ++n) {
        int count;
        sim_set_devices(2);
        sim_fail_nth(n, cudaErrorUnknown);
        count = spdl_cuda_count(&error);
        CHECK_EQ(count > 0, error.text[0] == '\0');
        CHECK_EQ(cudaPeekAtLastError(), cudaSuccess);
        if (!sim_failed()) break;
        sim_reset();
    }
    CHECK_EQ(n, 3); /* the first that did not fail: Init and GetDeviceCount did */
    sim_reset();
}

/* Of two copies that are done one is reaped, the call for the other fails: the next reap has it. */
static void a_reap_may_fail_in_the_middle(void) {
    static unsigned char memory[100];
    int partly = 0;
    bool failed = true;
    uint64_t n;
    for (n = 1; n < 50 && failed; ++n) {
        spdl_cuda_desc desc = small();
        spdl_cuda *cuda = flow_open(&desc);
        spdl_cuda_batch batch[2];
        spdl_result result;
        int i, released = 0;
        for (i = 0; i < 2; ++i) {
            const spdl_cuda_view view = { memory, 100, NULL, count_release, &released };
            REQUIRE(spdl_cuda_send(cuda, &view, &batch[i], 0) == SPDL_OK);
        }
        CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
        sim_fail_nth(n, cudaErrorInvalidValue);
        result = flow_reap_one(cuda, 0);
        failed = sim_failed();
        sim_fail_nth(0, cudaSuccess);
        CHECK(result == SPDL_OK || (failed && result == SPDL_E_CUDA));
        CHECK_EQ(released > 0, result == SPDL_OK);
        CHECK(failed || released == 2);
        partly += released == 1;
        flow_reap(cuda);
        CHECK_EQ(released, 2);
        for (i = 0; i < 2; ++i) spdl_cuda_batch_free(&batch[i]);
        spdl_cuda_close(cuda);
        CHECK_EQ(released, 2);
        CHECK_STR(sim_violation(), "");
        CHECK_EQ(sim_leaks(), 0);
        sim_reset();
    }
    CHECK(partly > 0 && n < 50);
}

/* A source of one slot waits for the copies: each call fails once. Every batch before an error
   comes, once; one that stays is returned again. */
static bool one_slot_failing(uint64_t n) {
    spdl_cuda_desc desc = small();
    spdl_cuda *cuda = flow_open(&desc);
    spdl_cuda_iter *it = NULL;
    spdl_cuda_iter_desc iter_desc;
    spdl_result result = SPDL_OK;
    flow_source s;
    uint64_t count = 0, more = 1;
    bool failed;
    flow_source_open(&s, 1, 5);
    REQUIRE(spdl_cuda_adopt(cuda, s.seen, FLOW_SLOT) == SPDL_OK);
    iter_desc = flow_iter_desc(&s);
    REQUIRE(spdl_cuda_iter_create(&it, cuda, &iter_desc) == SPDL_OK);
    sim_fail_nth(n, cudaErrorInvalidValue);
    result = flow_train(it, NULL, &count);
    failed = sim_failed();
    CHECK(result == SPDL_END || (failed && result == SPDL_E_CUDA));
    CHECK(result != SPDL_END || count == 5);
    if (result == SPDL_E_CUDA && flow_train(it, NULL, &more) == SPDL_END) CHECK_EQ(count + more, 5);
    sim_fail_nth(0, cudaSuccess);
    spdl_cuda_iter_destroy(it);
    CHECK_EQ(kit_wrong(), 0);
    CHECK_EQ(flow_stats(cuda).device_free, 2);
    spdl_cuda_close(cuda);
    flow_source_close(&s);
    CHECK_STR(sim_violation(), "");
    sim_reset();
    return failed;
}

static void a_wait_for_items_may_fail(void) {
    uint64_t n = 1;
    while (n < 200 && one_slot_failing(n)) n += FAILING_STEP;
    CHECK(n > 20 && n < 200);
}

static unsigned char borrowed[3][100];

static spdl_result borrowed_next(void *source, void **out, int64_t timeout_ns) {
    int *n = (int *)source;
    (void)timeout_ns;
    if (*n == 3) return SPDL_END;
    *out = borrowed[(*n)++];
    return SPDL_OK;
}

static spdl_result borrowed_view(void *item, spdl_cuda_view *view) {
    view->data = item;
    view->bytes = 100;
    return SPDL_OK;
}

/* Items that nobody frees, where each call fails once. */
static void borrowed_items_may_fail(void) {
    bool failed = true;
    uint64_t n;
    for (n = 1; n < 200 && failed; n += FAILING_STEP) {
        spdl_cuda_desc desc = small();
        spdl_cuda *cuda = flow_open(&desc);
        spdl_cuda_iter *it = NULL;
        int i = 0;
        const spdl_cuda_iter_desc iter_desc = { .next = borrowed_next, .source = &i,
                                                .view = borrowed_view };
        spdl_cuda_batch batch;
        spdl_result result = SPDL_OK;
        REQUIRE(spdl_cuda_iter_create(&it, cuda, &iter_desc) == SPDL_OK);
        sim_fail_nth(n, cudaErrorInvalidValue);
        while (result == SPDL_OK) result = spdl_cuda_iter_next(it, NULL, &batch, SPDL_FOREVER);
        failed = sim_failed();
        sim_fail_nth(0, cudaSuccess);
        CHECK(result == SPDL_END || (failed && result == SPDL_E_CUDA));
        spdl_cuda_iter_destroy(it);
        CHECK_EQ(flow_stats(cuda).device_free, 2);
        spdl_cuda_close(cuda);
        CHECK_STR(sim_violation(), "");
        CHECK_EQ(sim_leaks(), 0);
        sim_reset();
    }
    CHECK(n > 10 && n < 200);
}

/* Each request to the system fails once: memory, mappings, threads. */
static void each_allocation_may_fail(void) {
    size_t i;
    long n;
    for (i = 0; i < PATHS; ++i) {
        for (n = 1; n < SWEEP_MOST; ++n) {
            void *stream;
            spdl_result result;
            bool failed;
            sim_set_devices(2);
            stream = kit_stream(false);
            /* those of the source are the test's own */
            __atomic_store_n(&wrap_fail_in, n, __ATOMIC_RELAXED);
            result = paths[i].run(stream);
            failed = __atomic_exchange_n(&wrap_fail_in, 0, __ATOMIC_RELAXED) <= 0;
            CHECK_EQ(kit_wrong(), 0);
            kit_stream_free(stream);
            nothing_is_left();
            sim_reset();
            if (!CHECK(result == SPDL_OK || result == SPDL_E_NOMEM || result == SPDL_E_THREAD ||
                       result == SPDL_E_CUDA))
                fprintf(stderr, "   %d in path %s, allocation %ld\n", result, paths[i].name, n);
            if (!failed) break;
        }
        CHECK(n > 1 && n < SWEEP_MOST);
    }
}

/* ---- gates ---- */

enum { GATE_WARM = 20, GATE_BATCHES = 200 };

typedef struct gate {
    sim_stats sim;
    spdl_cuda_stats cuda;
    long allocations;
} gate;

static gate gate_now(const spdl_cuda *cuda) {
    gate g;
    g.sim = sim_now();
    g.cuda = flow_stats(cuda);
    g.allocations = __atomic_load_n(&wrap_calls, __ATOMIC_RELAXED);
    return g;
}

/* What is sent ahead, up to three batches, and what two waits call, may be of batches outside of
   the run. A little more than 6 calls a batch cannot hide all the same. */
static void gate_check(const char *what, const gate *a, const gate *b, double most) {
    const uint64_t copies = b->sim.copies - a->sim.copies; /* one for each batch */
    const double sent = copies > GATE_BATCHES ? (double)copies : GATE_BATCHES;
    const double work = (double)(b->sim.work_calls - a->sim.work_calls) / sent;
    const double checks = (double)(b->sim.thread_calls - a->sim.thread_calls) / sent;
    printf("   %s: %.2f CUDA calls a batch, %.2f looks at state\n", what, work, checks);
    CHECK(copies + 3 >= GATE_BATCHES && copies <= GATE_BATCHES + 3);
    CHECK(work <= 6.0 + 2.0 / GATE_BATCHES);
    CHECK(checks <= most);
    CHECK_EQ(b->sim.creations - a->sim.creations, 0);
    CHECK_EQ(b->sim.calls[SIM_LaunchHostFunc], 0);
    CHECK_EQ(b->allocations - a->allocations, 0);
}

static void slots_cost_no_more_than_they_may(void) {
    spdl_cuda_desc desc = small();
    void *stream = kit_stream(false);
    spdl_cuda *cuda;
    gate before = { 0 }, after;
    uint64_t i;
    desc.device_slots = 3;
    cuda = flow_open(&desc);
    for (i = 0; i < GATE_WARM; ++i) CHECK_EQ(flow_batch(cuda, stream, FLOW_SLOT, i), SPDL_OK);
    before = gate_now(cuda);
    for (i = 0; i < GATE_BATCHES; ++i) CHECK_EQ(flow_batch(cuda, stream, FLOW_SLOT, i), SPDL_OK);
    after = gate_now(cuda);
    gate_check("slots", &before, &after, 8.0);
    CHECK_EQ(kit_wrong(), 0);
    CHECK_EQ(after.cuda.pageable_bytes, 0);
    CHECK(after.sim.pinned_bytes <= 5 * (FLOW_SLOT + 4096)); /* slots, and one or two */
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    nothing_is_left();
    sim_reset();
}

/* The memory of the arena is shut to the host where the library sees it: a copy by the CPU would be
   a fault. The loader writes, and the device reads, through another mapping of it. */
static void shut_arena_open(flow_source *s, int slots, uint64_t count) {
    const size_t bytes = (size_t)slots * FLOW_SLOT;
    const int file = memfd_create("arena", MFD_CLOEXEC);
    flow_source_open(s, slots, count);
    munmap(s->written, bytes);
    REQUIRE(file >= 0 && ftruncate(file, (off_t)bytes) == 0);
    s->written = (unsigned char *)mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    s->seen = (unsigned char *)mmap(NULL, bytes, PROT_NONE, MAP_SHARED, file, 0);
    REQUIRE(s->written != MAP_FAILED && s->seen != MAP_FAILED);
    close(file);
    sim_alias(s->seen, bytes, s->written);
}

static void arena_costs(double copy_ns) {
    spdl_cuda_desc desc = small();
    void *stream = kit_stream(false);
    spdl_cuda *cuda;
    spdl_cuda_iter *it = NULL;
    spdl_cuda_iter_desc iter_desc;
    spdl_cuda_batch batch;
    flow_source s;
    gate before = { 0 }, after;
    uint64_t i;
    if (copy_ns > 0) sim_model((double)FLOW_SLOT / (copy_ns * 1e-9), 0);
    desc.device_slots = 3;
    cuda = flow_open(&desc);
    shut_arena_open(&s, 8, GATE_WARM + GATE_BATCHES + 4);
    REQUIRE(spdl_cuda_adopt(cuda, s.seen, 8 * FLOW_SLOT) == SPDL_OK);
    iter_desc = flow_iter_desc(&s);
    REQUIRE(spdl_cuda_iter_create(&it, cuda, &iter_desc) == SPDL_OK);
    for (i = 0; i < GATE_WARM + GATE_BATCHES; ++i) {
        if (i == GATE_WARM) before = gate_now(cuda);
        REQUIRE(spdl_cuda_iter_next(it, stream, &batch, SPDL_FOREVER) == SPDL_OK);
        flow_read(&batch, stream, i);
    }
    after = gate_now(cuda);
    gate_check("arena", &before, &after, 8.0);
    CHECK_EQ(after.allocations - before.allocations, 0);
    CHECK_EQ(after.sim.creations - before.sim.creations, 0);
    CHECK_EQ(after.sim.pageable_copies, 0);
    CHECK_EQ(after.cuda.pinned_bytes, 8 * FLOW_SLOT);
    spdl_cuda_iter_destroy(it);
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_close(cuda);
    munmap(s.seen, 8 * FLOW_SLOT);
    flow_source_close(&s);
    kit_stream_free(stream);
    nothing_is_left();
    sim_reset();
}

/* When copies take no time, and when they are what is waited for. */
static void the_arena_costs_no_more_than_it_may(void) {
    arena_costs(0);
    arena_costs(200000);
}

/* There and back: the batch and its output, each waited for one round later. How often a wait asks
   before it sleeps is a matter of time. */
static void in_and_out_cost_no_more_than_they_may(void) {
    spdl_cuda_desc desc = small();
    void *stream = kit_stream(false);
    spdl_cuda_output *out[2] = { NULL, NULL };
    spdl_cuda *cuda;
    gate before = { 0 }, after;
    uint64_t i, calls;
    desc.device_slots = 3;
    desc.output_bytes = 1000;
    desc.output_slots = 2;
    cuda = flow_open(&desc);
    for (i = 0; i < GATE_WARM + GATE_BATCHES; ++i) {
        if (i == GATE_WARM) before = gate_now(cuda);
        if (out[i % 2] != NULL) CHECK_EQ(spdl_cuda_output_wait(out[i % 2], SPDL_FOREVER), SPDL_OK);
        spdl_cuda_output_free(out[i % 2]);
        CHECK_EQ(flow_batch(cuda, stream, FLOW_SLOT, i), SPDL_OK);
        REQUIRE(spdl_cuda_output_get(cuda, stream, &out[i % 2], SPDL_FOREVER) == SPDL_OK);
        CHECK_EQ(spdl_cuda_output_send(out[i % 2]), SPDL_OK);
    }
    after = gate_now(cuda);
    calls = after.sim.work_calls - before.sim.work_calls -
            (after.sim.calls[SIM_EventQuery] - before.sim.calls[SIM_EventQuery]);
    printf("   in and out: %.2f CUDA calls a batch\n", (double)calls / GATE_BATCHES);
    CHECK(calls <= 12 * GATE_BATCHES);
    CHECK_EQ(after.sim.creations - before.sim.creations, 0);
    CHECK_EQ(after.allocations - before.allocations, 0);
    CHECK_EQ(after.sim.pageable_copies, 0);
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_close(cuda);
    kit_stream_free(stream);
    nothing_is_left();
    sim_reset();
}

/* How much of the longer of the two, copies and kernels, is left of the whole time: by the clock of
   the simulated device. */
static double overlap(uint64_t copy_ns, uint64_t kernel_ns) {
    enum { BATCHES = 24 };
    spdl_cuda_desc desc = small();
    void *stream = kit_stream(false);
    spdl_cuda *cuda;
    spdl_cuda_iter *it = NULL;
    spdl_cuda_iter_desc iter_desc;
    spdl_cuda_batch batch;
    flow_source s;
    sim_stats stats;
    double longer;
    desc.device_slots = 3;
    cuda = flow_open(&desc);
    flow_source_open(&s, 8, BATCHES);
    sim_model((double)s.bytes / ((double)copy_ns * 1e-9), 0);
    REQUIRE(spdl_cuda_adopt(cuda, s.seen, 8 * FLOW_SLOT) == SPDL_OK);
    iter_desc = flow_iter_desc(&s);
    REQUIRE(spdl_cuda_iter_create(&it, cuda, &iter_desc) == SPDL_OK);
    while (spdl_cuda_iter_next(it, stream, &batch, SPDL_FOREVER) == SPDL_OK)
        kit_spin(stream, kernel_ns);
    spdl_cuda_iter_destroy(it);
    CHECK_EQ(kit_wrong(), 0);
    sim_get_stats(&stats);
    spdl_cuda_close(cuda);
    flow_source_close(&s);
    kit_stream_free(stream);
    sim_reset();
    longer = (double)(stats.copy_ns > stats.kernel_ns ? stats.copy_ns : stats.kernel_ns);
    return longer / (double)(stats.last_ns - stats.first_ns);
}

static void copies_hide_behind_kernels(void) {
    flow_overlaps(overlap, "copy");
}

/* ---- an edge is missing ----
   Each edge is judged by itself, in every build: what has to come first is held, and what has to
   come behind it is given time to run. It runs only with the edge left out; then the bytes are
   wrong. ThreadSanitizer sees the race as well. */

typedef enum edge { E1, E2, E3, E4 } edge;

typedef struct broken {
    edge edge;
    bool missing;
} broken;

static void writes_all_over(void *memory) {
    volatile unsigned char *to = (volatile unsigned char *)memory;
    size_t i;
    for (i = 0; i < 4096; ++i) to[i] = 0x5a;
}

/* How long to wait for what must not happen, and may when the edge is missing. */
static int64_t patience(const broken *b) { return SPDL_SECONDS(b->missing ? 20 : 0.03); }

/* The memory is released while its copy is held. */
static void run_e1(const broken *b, spdl_cuda *cuda, void *stream) {
    static unsigned char pageable[4096];
    void *memory = b->edge == E4 ? pageable : flow_block(cuda);
    const spdl_cuda_view view = { memory, 4096, NULL, writes_all_over, memory };
    spdl_cuda_batch batch;
    kit_fill(memory, 4096, 3);
    sim_pageable_late(true);
    sim_hold();
    REQUIRE(spdl_cuda_send(cuda, &view, &batch, 0) == SPDL_OK);
    if (b->missing) sim_drop(SIM_EventQuery, SIM_ANY_STREAM);
    CHECK_EQ(flow_reap_one(cuda, patience(b)), b->missing ? SPDL_OK : SPDL_TIMEOUT);
    sim_release();
    CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
    flow_read(&batch, stream, 3);
    CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
    flow_reap(cuda);
    CHECK_EQ(((unsigned char *)memory)[4095], 0x5a);
    if (b->edge == E1) flow_block_free(memory);
}

/* The stream reads the batch while its copy is held. */
static void run_e2(const broken *b, spdl_cuda *cuda, void *stream) {
    spdl_cuda_batch batch;
    sim_hold();
    batch = sent(cuda, 3);
    if (b->missing) sim_drop(SIM_StreamWaitEvent, (cudaStream_t)stream);
    CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
    flow_read(&batch, stream, 3);
    CHECK_EQ(flow_idle(stream, patience(b)), b->missing);
    sim_release();
    CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
}

typedef struct gated { /* a kernel that waits, and then reads */
    const void *device;
    uint32_t open; /* relaxed, so that it orders nothing */
    long wrong;
} gated;

static void read_behind_gate(void *arg) {
    gated *g = (gated *)arg;
    while (__atomic_load_n(&g->open, __ATOMIC_RELAXED) == 0) usleep(1000);
    g->wrong = kit_differ(sim_view(g->device), 4096, 3);
}

/* The next batch comes into the slot while the last one is still read. */
static void run_e3(const broken *b, spdl_cuda *cuda, void *stream) {
    static gated kernel;
    spdl_cuda_batch batch = sent(cuda, 3), next;
    CHECK_EQ(spdl_cuda_arrived(&batch, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
    kernel.device = batch.data;
    REQUIRE(sim_launch((cudaStream_t)stream, read_behind_gate, &kernel, 0) == cudaSuccess);
    CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
    if (b->missing) sim_drop(SIM_StreamWaitEvent, (cudaStream_t)cuda->stream);
    next = sent(cuda, 4);
    CHECK_EQ(flow_idle(cuda->stream, patience(b)), b->missing);
    __atomic_store_n(&kernel.open, 1, __ATOMIC_RELAXED);
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
    if (kernel.wrong != 0) _exit(65);
    spdl_cuda_batch_free(&next);
}

static int run_broken(void *arg) {
    static void (*const run[])(const broken *, spdl_cuda *, void *) = { run_e1, run_e2, run_e3,
                                                                        run_e1 };
    const broken *b = (const broken *)arg;
    spdl_cuda_desc desc = small();
    void *stream = kit_stream(false);
    spdl_cuda *cuda;
    desc.device_slots = 1;
    cuda = flow_open(&desc);
    run[b->edge](b, cuda, stream);
    sim_drop_none();
    if (kit_wrong() != 0) _exit(65);
    spdl_cuda_close(cuda);
    sim_reset();
    return 0;
}

/* With the edge the bytes are right; without it they are not, or ThreadSanitizer says so (66). */
static void is_needed(edge which) {
    broken b = { which, false };
    int status;
    CHECK_EQ(flow_child(run_broken, &b, 30, true), 0);
    b.missing = true;
    status = flow_child(run_broken, &b, 60, false);
    if (!CHECK(status == 65 || status == 66)) fprintf(stderr, "   ended with %d\n", status);
}

static void without_e1_it_is_caught(void) { is_needed(E1); }
static void without_e2_it_is_caught(void) { is_needed(E2); }
static void without_e3_it_is_caught(void) { is_needed(E3); }
static void without_e4_it_is_caught(void) { is_needed(E4); }

/* Everything late, by hand and by the iterator, out of memory that is pinned or not. */
static int run_late(void *arg) {
    const int kind = *(const int *)arg;
    spdl_cuda_desc desc = small();
    void *stream = kit_stream(false);
    flow_source s;
    spdl_cuda *cuda;
    uint64_t i, count;
    kit_disorder(test_seed() + (uint64_t)getpid());
    if (kind & 1) sim_set_pin_limit(1);
    sim_pageable_late(true);
    cuda = flow_open(&desc);
    flow_source_open(&s, 3, 60);
    if (kind & 2) {
        spdl_cuda_iter *it = NULL;
        spdl_cuda_iter_desc iter_desc = flow_iter_desc(&s);
        CHECK_EQ(spdl_cuda_adopt(cuda, s.seen, 3 * FLOW_SLOT), SPDL_OK);
        REQUIRE(spdl_cuda_iter_create(&it, cuda, &iter_desc) == SPDL_OK);
        CHECK_EQ(flow_train(it, stream, &count), SPDL_END);
        spdl_cuda_iter_destroy(it);
    } else {
        for (i = 0; i < 40; ++i) CHECK_EQ(flow_batch(cuda, stream, FLOW_SLOT, i), SPDL_OK);
    }
    if (kit_wrong() != 0) _exit(65);
    spdl_cuda_close(cuda);
    flow_source_close(&s);
    kit_stream_free(stream);
    nothing_is_left();
    sim_reset();
    return 0;
}

static void all_edges_are_enough(void) {
    int kind;
    for (kind = 0; kind < 4; ++kind) CHECK_EQ(flow_child(run_late, &kind, 30, true), 0);
}

/* ---- drivers and devices of other kinds ---- */

/* Codes with which a driver does not start, of MPS, and of a device that others have. Open has the
   reason. If one is returned later, every call returns it, and close ends. */
static void errors_of_a_start_are_told(void) {
    static const int code[] = { 46, 802, 803, 804, 805, 806, 807, 808, 809 };
    size_t i;
    int k;
    for (i = 0; i < sizeof code / sizeof code[0]; ++i) {
        spdl_cuda_desc desc = small();
        void *stream = NULL;
        spdl_cuda *cuda = NULL;
        spdl_cuda_iter *it = NULL;
        spdl_cuda_iter_desc iter_desc;
        spdl_cuda_batch batch;
        spdl_error error;
        flow_source s;
        char number[16];
        sim_poison((cudaError_t)code[i]);
        desc.error = &error;
        CHECK_EQ(spdl_cuda_open(&cuda, &desc), SPDL_E_NOT_FOUND);
        CHECK(strstr(error.text, "cuInit: ") != NULL);
        sim_reset();
        stream = kit_stream(false);
        cuda = flow_open(&desc);
        flow_source_open(&s, 4, 9);
        iter_desc = flow_iter_desc(&s);
        CHECK_EQ(spdl_cuda_adopt(cuda, s.seen, 4 * FLOW_SLOT), SPDL_OK);
        REQUIRE(spdl_cuda_iter_create(&it, cuda, &iter_desc) == SPDL_OK);
        CHECK_EQ(spdl_cuda_iter_next(it, stream, &batch, SPDL_FOREVER), SPDL_OK);
        sim_poison((cudaError_t)code[i]);
        for (k = 0; k < 3; ++k) {
            CHECK_EQ(spdl_cuda_iter_next(it, stream, &batch, SPDL_FOREVER), SPDL_E_CUDA);
            CHECK_EQ(flow_batch(cuda, stream, 1000, 1), SPDL_E_CUDA);
        }
        spdl_cuda_error(cuda, &error);
        snprintf(number, sizeof number, "(%d)", code[i]);
        CHECK(strstr(error.text, number) != NULL);
        spdl_cuda_iter_destroy(it);
        spdl_cuda_close(cuda);
        flow_source_close(&s);
        sim_reset();
    }
}

/* The driver begins nothing before somebody asks: no call of ours waits without a question. */
static void gathered_work_is_asked_for(void) {
    spdl_cuda_desc desc = small();
    spdl_cuda_iter_desc iter_desc;
    void *stream = kit_stream(false);
    spdl_cuda_iter *it = NULL;
    spdl_cuda_output *out = NULL;
    spdl_cuda_batch batch;
    spdl_cuda *cuda;
    flow_source s;
    uint64_t i, count;
    sim_gather(true);
    desc.output_bytes = 1000;
    cuda = flow_open(&desc);
    flow_source_open(&s, 3, 30);
    iter_desc = flow_iter_desc(&s);
    CHECK_EQ(spdl_cuda_adopt(cuda, s.seen, 3 * FLOW_SLOT), SPDL_OK);
    REQUIRE(spdl_cuda_iter_create(&it, cuda, &iter_desc) == SPDL_OK);
    CHECK_EQ(spdl_cuda_iter_next(it, stream, &batch, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(sim_now().first_ns, 0); /* sent ahead, and not begun */
    for (i = 1; i < 4; ++i) {
        flow_read(&batch, stream, (uint64_t)(uintptr_t)batch.user);
        CHECK_EQ(spdl_cuda_iter_next(it, stream, &batch, SPDL_FOREVER), SPDL_OK);
    }
    CHECK(sim_now().first_ns != 0); /* later calls ask */
    CHECK_EQ(flow_train(it, stream, &count), SPDL_END);
    CHECK_EQ(count, 26);
    spdl_cuda_iter_destroy(it);
    for (i = 0; i < 20; ++i) CHECK_EQ(flow_batch(cuda, stream, FLOW_SLOT, i), SPDL_OK);
    batch = sent(cuda, 7);
    CHECK_EQ(spdl_cuda_arrived(&batch, SPDL_SECONDS(20)), SPDL_OK);
    spdl_cuda_batch_free(&batch);
    for (i = 0; i < 4; ++i) {
        CHECK_EQ(spdl_cuda_output_get(cuda, stream, &out, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(spdl_cuda_output_send(out), SPDL_OK);
        CHECK_EQ(spdl_cuda_output_wait(out, i % 2 ? SPDL_FOREVER : SPDL_SECONDS(20)), SPDL_OK);
        spdl_cuda_output_free(out);
    }
    batch = sent(cuda, 8);
    spdl_cuda_batch_free(&batch); /* close waits for its copy */
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_close(cuda);
    flow_source_close(&s);
    kit_stream_free(stream);
    nothing_is_left();
    sim_reset();
}

/* As of a Jetson before compute capability 7.2. */
static void pins_nothing(cudaError_t error, const char *text) {
    spdl_cuda_desc desc = small();
    void *stream = kit_stream(false);
    flow_source s;
    spdl_cuda *cuda;
    uint64_t i;
    sim_set_pin_limit(1);
    sim_set_pin_error(error);
    flow_lines = 0;
    cuda = flow_open(&desc);
    flow_source_open(&s, 4, 9);
    CHECK_EQ(spdl_cuda_adopt(cuda, s.seen, 4 * FLOW_SLOT), SPDL_OK);
    CHECK_EQ(flow_lines, 1);
    CHECK(strstr(flow_line, text) != NULL);
    for (i = 0; i < 10; ++i) CHECK_EQ(flow_batch(cuda, stream, FLOW_SLOT, i), SPDL_OK);
    CHECK_EQ(kit_wrong(), 0);
    CHECK_EQ(flow_lines, 1);
    CHECK_EQ(flow_stats(cuda).pinned_bytes, 0);
    CHECK_EQ(flow_stats(cuda).pageable_bytes, 10 * FLOW_SLOT);
    CHECK(!flow_stats(cuda).lost);
    spdl_cuda_close(cuda);
    flow_source_close(&s);
    kit_stream_free(stream);
    nothing_is_left();
    sim_reset();
}

/* An unknown error of a pin loses no device, as programs in the field went on after one. */
static void a_device_that_pins_nothing_is_used(void) {
    pins_nothing(cudaErrorNotSupported, "(801); going on, slower");
    pins_nothing(cudaErrorUnknown, "(999); going on, slower");
}

/* The driver has another context for such a stream: it is refused, and nothing is lost. */
static void streams_of_green_contexts_are_refused(void) {
    spdl_cuda_desc desc = small();
    spdl_cuda_iter_desc iter_desc;
    void *green = kit_stream(false), *stream = kit_stream(false);
    spdl_cuda_output *out = NULL;
    spdl_cuda_iter *it = NULL;
    spdl_cuda_batch batch;
    spdl_error error;
    spdl_cuda *cuda;
    flow_source s;
    uint64_t count;
    sim_make_green((cudaStream_t)green);
    desc.output_bytes = 1000;
    cuda = flow_open(&desc);
    flow_source_open(&s, 4, 5);
    batch = sent(cuda, 7);
    CHECK_EQ(spdl_cuda_ready(&batch, green), SPDL_E_INVALID);
    spdl_cuda_error(cuda, &error);
    CHECK(strstr(error.text, "a context that is not the device's primary") != NULL);
    CHECK_EQ(spdl_cuda_ready(&batch, stream), SPDL_OK);
    kit_check(stream, batch.data, 4096, 7);
    CHECK_EQ(spdl_cuda_done(&batch, stream), SPDL_OK);
    CHECK_EQ(spdl_cuda_output_get(cuda, green, &out, SPDL_FOREVER), SPDL_E_INVALID);
    CHECK_EQ(flow_stats(cuda).output_free, 4);
    iter_desc = flow_iter_desc(&s);
    REQUIRE(spdl_cuda_iter_create(&it, cuda, &iter_desc) == SPDL_OK);
    CHECK_EQ(spdl_cuda_iter_next(it, green, &batch, SPDL_FOREVER), SPDL_E_INVALID);
    CHECK_EQ(flow_train(it, stream, &count), SPDL_END);
    CHECK_EQ(count, 5); /* the one that was offered, too */
    CHECK_EQ(kit_wrong(), 0);
    spdl_cuda_iter_destroy(it);
    spdl_cuda_close(cuda);
    flow_source_close(&s);
    kit_stream_free(stream);
    kit_stream_free(green);
    nothing_is_left();
    sim_reset();
}

/* ---- waits ---- */

SPDL_FN(stop_item, spdl_index, void) {
    *out = spdl_buffer(task);
    if (*out == NULL) return SPDL_E_NOMEM;
    memset(*out, (int)in->index, FLOW_SLOT / 4);
    return SPDL_OK;
}

typedef struct stopped_next {
    spdl_cuda_iter *it;
    spdl_result result;
    uint32_t over; /* atomic */
} stopped_next;

static void *nexts_for_ever(void *arg) {
    stopped_next *n = (stopped_next *)arg;
    spdl_cuda_batch batch;
    do n->result = spdl_cuda_iter_next(n->it, NULL, &batch, SPDL_FOREVER);
    while (n->result == SPDL_OK);
    __atomic_store_n(&n->over, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* The wait of CUDA for an event has no other end: with a time limit next returns in time, with
   SPDL_FOREVER when the copy is done. Both are said at spdl_cuda_iter_next. */
static void a_stop_wakes_no_wait_for_a_copy(void) {
    spdl_cuda_desc desc = small();
    spdl_pipeline_desc pipeline = { .workers = 2 };
    spdl_cuda_iter_desc iter_desc = { .next = spdl_pipeline_next };
    stopped_next n = { NULL, SPDL_OK, 0 };
    spdl_cuda *cuda = flow_open(&desc);
    spdl_pipeline *p = NULL;
    spdl_cuda_batch batch;
    pthread_t thread;
    int i;
    pipeline.allocator = spdl_cuda_allocator(cuda);
    REQUIRE(spdl_pipeline_create(&p, &pipeline, SPDL_STAGES(
        SPDL_COUNT(1000), SPDL_PIPE(stop_item), SPDL_BATCH(4, .item_bytes = FLOW_SLOT / 4),
        SPDL_SINK(2))) == SPDL_OK);
    iter_desc.source = p;
    REQUIRE(spdl_cuda_iter_create(&n.it, cuda, &iter_desc) == SPDL_OK);
    sim_hold();
    for (i = 0; i < 2; ++i) /* SPDL_FOREVER would sleep here, too, if the pipeline is slow */
        CHECK_EQ(spdl_cuda_iter_next(n.it, NULL, &batch, SPDL_SECONDS(20)), SPDL_OK);
    CHECK_EQ(spdl_cuda_iter_next(n.it, NULL, &batch, SPDL_SECONDS(0.02)), SPDL_TIMEOUT);
    CHECK_EQ(spdl_pipeline_stop(p, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(spdl_cuda_iter_next(n.it, NULL, &batch, SPDL_SECONDS(0.02)), SPDL_TIMEOUT);
    REQUIRE(pthread_create(&thread, NULL, nexts_for_ever, &n) == 0);
    usleep(50000);
    CHECK_EQ(__atomic_load_n(&n.over, __ATOMIC_ACQUIRE), 0);
    sim_release();
    pthread_join(thread, NULL);
    CHECK_EQ(n.result, SPDL_CLOSED);
    spdl_cuda_iter_destroy(n.it);
    spdl_pipeline_destroy(p);
    spdl_cuda_close(cuda);
    nothing_is_left();
    sim_reset();
}

/* Each question takes locks of the driver, which kernel launches of other threads need. */
static void a_wait_asks_and_does_nothing_else(void) {
    spdl_cuda_desc desc = small();
    spdl_cuda_output *out = NULL;
    sim_stats before, after;
    uint64_t waits = 0;
    spdl_cuda *cuda;
    desc.output_bytes = 1000;
    cuda = flow_open(&desc);
    REQUIRE(spdl_cuda_output_get(cuda, NULL, &out, SPDL_FOREVER) == SPDL_OK);
    sim_hold();
    CHECK_EQ(spdl_cuda_output_send(out), SPDL_OK);
    before = after = sim_now();
    for (; after.calls[SIM_EventQuery] < before.calls[SIM_EventQuery] + 20; ++waits) {
        CHECK_EQ(spdl_cuda_output_wait(out, SPDL_SECONDS(0.02)), SPDL_TIMEOUT);
        after = sim_now();
    }
    CHECK(after.thread_calls - before.thread_calls <= 5 * waits);
    sim_release();
    CHECK_EQ(spdl_cuda_output_wait(out, SPDL_FOREVER), SPDL_OK);
    spdl_cuda_output_free(out);
    spdl_cuda_close(cuda);
    nothing_is_left();
    sim_reset();
}

/* ---- memory ---- */

typedef struct shown {
    const void *block, *arena, *host;
} shown;

/* Whether the memory can be read: a bit for each. */
static int reads_in_a_child(void *arg) {
    const shown *s = (const shown *)arg;
    int tube[2];
    if (pipe(tube) != 0) return 99;
    return (syscall(SYS_write, tube[1], s->block, 1) == 1 ? 1 : 0) |
           (syscall(SYS_write, tube[1], s->arena, 1) == 1 ? 2 : 0) |
           (syscall(SYS_write, tube[1], s->host, 1) == 1 ? 4 : 0);
}

/* Pages that the device reads do not move when a process forks: the child has only arenas. */
static void blocks_are_not_in_a_child(void) {
    static shown s;
    spdl_cuda_desc desc = small();
    spdl_cuda_output *out = NULL;
    spdl_cuda *cuda;
    void *block;
    flow_source source;
    desc.output_bytes = 1000;
    cuda = flow_open(&desc);
    flow_source_open(&source, 1, 0);
    CHECK_EQ(spdl_cuda_adopt(cuda, source.seen, FLOW_SLOT), SPDL_OK);
    REQUIRE(spdl_cuda_output_get(cuda, NULL, &out, SPDL_FOREVER) == SPDL_OK);
    REQUIRE((block = flow_block(cuda)) != NULL);
    s = (shown){ block, source.seen, out->host };
    CHECK_EQ(reads_in_a_child(&s), 7);
    CHECK_EQ(flow_child(reads_in_a_child, &s, 20, true), 2);
    flow_block_free(block);
    spdl_cuda_output_free(out);
    spdl_cuda_close(cuda);
    flow_source_close(&source);
    nothing_is_left();
    sim_reset();
}

TEST_TABLE(cuda_fault) {
    TEST_CASE(without_a_device_open_says_why),
    TEST_CASE(a_device_that_is_not_there_is_told),
    TEST_CASE(devices_stand_side_by_side),
    TEST_CASE(a_failed_done_waits_for_the_right_device),
    TEST_CASE(a_threads_stream_is_waited_for),
    TEST_CASE(a_send_keeps_its_time),
    TEST_CASE(closing_waits_for_recorded_readers),
    TEST_CASE(a_stream_where_another_was_is_no_reader),
    TEST_CASE(memory_of_an_arena_goes_back_to_its_allocator),
    TEST_CASE(the_legacy_stream_of_another_device),
    TEST_CASE(too_little_device_memory_is_told),
    TEST_CASE(what_cannot_be_pinned_is_used_as_it_is),
    TEST_CASE(an_arena_that_cannot_be_pinned_is_used),
    TEST_CASE(an_arena_is_shared),
    TEST_CASE(pageable_memory_is_copied_without_the_lock),
    TEST_CASE(outputs_that_are_not_pinned_hold_up_nobody),
    TEST_CASE(a_batch_asks_no_more_than_it_must),
    TEST_CASE(large_arenas_are_pinned_in_pieces),
    TEST_CASE(pieces_are_unpinned_each_by_itself),
    TEST_CASE(large_blocks_begin_at_huge_pages),
    TEST_CASE(the_driver_may_know_less),
    TEST_CASE(a_send_of_their_memory_may_fail),
    TEST_CASE(a_node_is_asked_for),
    TEST_CASE(any_thread_may_take_blocks),
    TEST_CASE(many_blocks_are_found_as_fast),
    TEST_CASE(no_context_is_made_elsewhere),
    TEST_CASE(the_callers_device_is_the_default),
    TEST_CASE(streams_of_other_devices_are_refused),
    TEST_CASE(a_threads_stream_is_its_own),
    TEST_CASE(closing_waits_for_nobody_else),
    TEST_CASE(memory_that_is_not_pinned_waits_for_its_event),
    TEST_CASE(next_does_not_wait_for_its_caller),
    TEST_CASE(memory_that_may_only_be_read_is_pinned),
    TEST_CASE(a_long_wait_says_who_has_the_slots),
    TEST_CASE(leaving_is_quiet),
    TEST_CASE(a_runtime_that_unloads_is_let_go),
    TEST_CASE(captures_survive_all_calls),
    TEST_CASE(a_lost_device_stays_lost),
    TEST_CASE(errors_that_stay_are_known),
    TEST_CASE(a_lost_device_wakes_all),
    TEST_CASE(a_lost_device_lets_go_of_arenas),
    TEST_CASE(a_reset_device_is_an_error),
    TEST_CASE(each_call_may_fail_once),
    TEST_CASE(each_call_may_run_out_of_memory),
    TEST_CASE(the_device_may_be_lost_at_each_call),
    TEST_CASE(the_runtime_may_unload_at_each_call),
    TEST_CASE(counting_survives_everything),
    TEST_CASE(a_reap_may_fail_in_the_middle),
    TEST_CASE(a_wait_for_items_may_fail),
    TEST_CASE(borrowed_items_may_fail),
    TEST_CASE(each_allocation_may_fail),
    TEST_CASE(slots_cost_no_more_than_they_may),
    TEST_CASE(the_arena_costs_no_more_than_it_may),
    TEST_CASE(in_and_out_cost_no_more_than_they_may),
    TEST_CASE(copies_hide_behind_kernels),
    TEST_CASE(without_e1_it_is_caught),
    TEST_CASE(without_e2_it_is_caught),
    TEST_CASE(without_e3_it_is_caught),
    TEST_CASE(without_e4_it_is_caught),
    TEST_CASE(all_edges_are_enough),
    TEST_CASE(errors_of_a_start_are_told),
    TEST_CASE(gathered_work_is_asked_for),
    TEST_CASE(a_device_that_pins_nothing_is_used),
    TEST_CASE(streams_of_green_contexts_are_refused),
    TEST_CASE(a_stop_wakes_no_wait_for_a_copy),
    TEST_CASE(a_wait_asks_and_does_nothing_else),
    TEST_CASE(blocks_are_not_in_a_child),
    TEST_END
};
