/* cuda_flow.h - batches with known bytes on their way through spdl_cuda.h: what test_cuda.c and
   test_cuda_fault.c share. Include it behind spdl_cuda.h with the implementation. */
#ifndef CUDA_FLOW_INCLUDED
#define CUDA_FLOW_INCLUDED

#include "cuda_kit.h"
#include "test.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { FLOW_SLOT = 16 << 10 };

/* ---- what the library says ---- */

static int flow_lines;
static char flow_line[SPDL_TEXT_BYTES + 64];

static inline void flow_log(spdl_log_level level, const char *text, void *user) {
    (void)user;
    if (level == SPDL_LOG_INFO) return;
    ++flow_lines;
    snprintf(flow_line, sizeof flow_line, "%s", text);
}

static inline void flow_log_all(spdl_log_level level, const char *text, void *user) {
    (void)user, (void)level;
    snprintf(flow_line, sizeof flow_line, "%s", text);
}

static inline void flow_quiet(spdl_log_level level, const char *text, void *user) {
    (void)user, (void)level, (void)text;
}

static inline spdl_cuda_desc flow_desc(size_t slot_bytes) {
    spdl_cuda_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.slot_bytes = slot_bytes;
    desc.logger.log_fn = flow_log;
    return desc;
}

static inline spdl_cuda *flow_open(const spdl_cuda_desc *desc) {
    spdl_cuda *cuda = NULL;
    spdl_error error;
    spdl_cuda_desc copy = *desc;
    memset(&error, 0, sizeof error);
    copy.error = &error;
    if (spdl_cuda_open(&cuda, &copy) != SPDL_OK) CHECK_STR(error.text, "");
    REQUIRE(cuda != NULL);
    return cuda;
}

static inline spdl_cuda_stats flow_stats(const spdl_cuda *cuda) {
    spdl_cuda_stats stats;
    spdl_cuda_get_stats(cuda, &stats);
    return stats;
}

/* ---- one batch ---- */

/* Work that reads the batch. */
static inline void flow_read(const spdl_cuda_batch *batch, spdl_cuda_stream stream, uint64_t seed) {
    kit_check(stream, batch->data, batch->bytes, seed);
}

/* Bytes of a batch, behind the work on a stream that it is ready on. */
static inline spdl_result flow_peek(const spdl_cuda_batch *batch, size_t offset, void *to,
                                    size_t bytes, spdl_cuda_stream stream) {
    const char *from = (const char *)batch->data + offset;
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, (cudaStream_t)stream) == 0 &&
                   cudaStreamSynchronize((cudaStream_t)stream) == 0
               ? SPDL_OK
               : SPDL_E_CUDA;
}

/* A block of the allocator, as a batch of a pipeline is one: something in front of slot_bytes. */
enum { FLOW_HEAD = 64 };

static inline void flow_block_free(void *data) {
    char *block = (char *)data - FLOW_HEAD;
    spdl_cuda *cuda = *(spdl_cuda **)(void *)block;
    const spdl_allocator from = spdl_cuda_allocator(cuda);
    from.free_fn(block, FLOW_HEAD + cuda->desc.slot_bytes, from.user);
}

static inline void *flow_block(spdl_cuda *cuda) {
    const spdl_allocator from = spdl_cuda_allocator(cuda);
    char *block =
        (char *)from.alloc_fn(FLOW_HEAD + cuda->desc.slot_bytes, SPDL_BLOCK_ALIGN, from.user);
    if (block == NULL) return NULL;
    *(spdl_cuda **)(void *)block = cuda;
    return block + FLOW_HEAD;
}

/* Known bytes in a block, as a view that gives it back. */
static inline spdl_result flow_fill(spdl_cuda *cuda, spdl_cuda_view *view, size_t bytes,
                                    uint64_t seed) {
    void *data = flow_block(cuda);
    memset(view, 0, sizeof *view);
    if (data == NULL) return SPDL_E_NOMEM;
    kit_fill(data, bytes, seed);
    view->data = view->item = data;
    view->bytes = bytes;
    view->user = (void *)(uintptr_t)seed;
    view->release = flow_block_free;
    return SPDL_OK;
}

static inline spdl_result flow_send(spdl_cuda *cuda, spdl_cuda_batch *batch, size_t bytes,
                                    uint64_t seed, int64_t timeout_ns) {
    spdl_cuda_view view;
    spdl_result result = flow_fill(cuda, &view, bytes, seed);
    if (result != SPDL_OK) return result;
    result = spdl_cuda_send(cuda, &view, batch, timeout_ns);
    if (result != SPDL_OK) flow_block_free(view.item);
    return result;
}

/* A batch there, read on one stream. */
static inline spdl_result flow_batch(spdl_cuda *cuda, spdl_cuda_stream stream, size_t bytes,
                                     uint64_t seed) {
    spdl_cuda_batch batch;
    spdl_result result = flow_send(cuda, &batch, bytes, seed, SPDL_FOREVER);
    if (result != SPDL_OK) return result;
    CHECK_EQ((uintptr_t)batch.user, seed);
    result = spdl_cuda_ready(&batch, stream);
    if (result == SPDL_OK) {
        flow_read(&batch, stream, seed);
        result = spdl_cuda_done(&batch, stream);
    }
    if (result != SPDL_OK) spdl_cuda_batch_free(&batch);
    return result;
}

/* Whether all that was put on a stream is done, at the latest in timeout_ns. */
static inline bool flow_idle(void *stream, int64_t timeout_ns) {
    const uint64_t until = spdl_time_ns() + (uint64_t)timeout_ns;
    while (cudaStreamQuery((cudaStream_t)stream) != cudaSuccess) {
        if (spdl_time_ns() >= until) return false;
        usleep(1000);
    }
    return true;
}

/* Waits for the oldest copy that was not reclaimed. SPDL_EMPTY: there is none. */
static inline spdl_result flow_reap_one(spdl_cuda *cuda, int64_t timeout_ns) {
    spdl_result result = spdl__cuda_usable(cuda);
    if (result != SPDL_OK) return result;
    if (spdl__cuda_in_flight(cuda) == 0) return SPDL_EMPTY;
    result = spdl__cuda_await_copy(cuda, spdl__deadline(timeout_ns), false);
    while (result == SPDL_OK && spdl__cuda_in_flight(cuda) > 0)
        if (spdl__cuda_await_copy(cuda, 0, false) != SPDL_OK) break;
    return result;
}

/* All that was sent has come back. */
static inline void flow_reap(spdl_cuda *cuda) {
    while (flow_reap_one(cuda, SPDL_FOREVER) == SPDL_OK) {}
}

/* ---- an arena, and a source that makes batches in it ---- */

typedef struct flow_item {
    struct flow_source *source;
    uint64_t seed;
    int slot; /* -1: outside of the arena */
    unsigned char *data;
} flow_item;

/* Makes nothing by malloc but items outside of the arena, so that allocations can be counted. */
typedef struct flow_source {
    unsigned char *seen, *written; /* the same memory, as given to the library and to the loader */
    flow_item items[64];
    size_t slot_bytes;
    int slots;
    int busy[64];              /* atomic: 1 while a batch lies in the slot */
    uint64_t next, count;      /* items made, items in all */
    uint64_t ended;            /* `next` at the end of the last epoch */
    uint64_t fails_at;         /* this call returns SPDL_E_IO; 0: none */
    uint64_t released, viewed; /* released: atomic */
    uint64_t takes_us;         /* to make one: the next is there at ready_at */
    uint64_t ready_at;
    int outside;               /* every so many batches lie in malloc'd memory; 0: none */
    bool epochs;               /* it starts over at its end */
    size_t bytes;
} flow_source;

/* The sources are the test's own: an allocation that is made to fail is tried again. */
static inline void *flow_alloc(size_t bytes) {
    void *memory = malloc(bytes);
    if (memory == NULL) memory = malloc(bytes);
    REQUIRE(memory != NULL);
    return memory;
}

static inline void *flow_map(size_t bytes) {
    int tries;
    void *memory = MAP_FAILED;
    for (tries = 0; tries < 2 && memory == MAP_FAILED; ++tries)
        memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    return memory;
}

static inline void flow_source_open(flow_source *s, int slots, uint64_t count) {
    memset(s, 0, sizeof *s);
    s->slot_bytes = FLOW_SLOT;
    s->slots = slots;
    s->count = count;
    s->bytes = FLOW_SLOT - 100;
    s->written = (unsigned char *)flow_map((size_t)slots * FLOW_SLOT);
    s->seen = s->written;
}

static inline void flow_source_close(flow_source *s) {
    CHECK_EQ(__atomic_load_n(&s->released, __ATOMIC_ACQUIRE), s->next);
    munmap(s->written, (size_t)s->slots * FLOW_SLOT);
}

static inline void flow_item_free(void *memory) {
    flow_item *item = (flow_item *)memory;
    flow_source *s = item->source;
    if (item->slot < 0) {
        free(item->data);
        free(item);
    } else {
        CHECK_EQ(__atomic_exchange_n(&s->busy[item->slot], 0, __ATOMIC_RELEASE), 1);
    }
    __atomic_add_fetch(&s->released, 1, __ATOMIC_RELEASE);
}

static inline int flow_free_slot(flow_source *s) {
    int i;
    for (i = 0; i < s->slots; ++i)
        if (__atomic_load_n(&s->busy[i], __ATOMIC_ACQUIRE) == 0) return i;
    return -1;
}

static inline flow_item *flow_item_new(flow_source *s, int slot) {
    flow_item *item = slot < 0 ? (flow_item *)flow_alloc(sizeof *item) : &s->items[slot];
    item->source = s;
    item->seed = s->next++;
    item->slot = slot;
    item->data = slot < 0 ? (unsigned char *)flow_alloc(s->bytes)
                          : s->written + (size_t)slot * s->slot_bytes;
    kit_fill(item->data, s->bytes, item->seed);
    return item;
}

static inline spdl_result flow_next(void *source, void **out, int64_t timeout_ns) {
    flow_source *s = (flow_source *)source;
    const uint64_t until = spdl_time_ns() + (uint64_t)timeout_ns;
    int slot;
    if (s->fails_at > 0 && s->next + 1 == s->fails_at) return SPDL_E_IO;
    if (s->count > 0 && s->next % s->count == 0 && s->next > s->ended) {
        s->ended = s->epochs ? s->next : s->ended;
        return SPDL_END;
    }
    if (s->count == 0) return SPDL_END;
    if (s->takes_us > 0 && spdl_time_ns() < s->ready_at) {
        const uint64_t wait = s->ready_at - spdl_time_ns();
        if (timeout_ns >= 0 && wait > (uint64_t)timeout_ns) return SPDL_TIMEOUT;
        usleep((useconds_t)(wait / 1000));
    }
    while ((slot = flow_free_slot(s)) < 0) {
        if (timeout_ns >= 0 && spdl_time_ns() >= until) return SPDL_TIMEOUT;
        usleep(50);
    }
    if (s->outside > 0 && s->next % (uint64_t)s->outside == 1) slot = -1;
    else __atomic_store_n(&s->busy[slot], 1, __ATOMIC_RELAXED);
    *out = flow_item_new(s, slot);
    s->ready_at = spdl_time_ns() + s->takes_us * 1000;
    return SPDL_OK;
}

static inline spdl_result flow_view(void *memory, spdl_cuda_view *view) {
    flow_item *item = (flow_item *)memory;
    flow_source *s = item->source;
    ++s->viewed;
    view->data = item->slot < 0 ? item->data : s->seen + (item->data - s->written);
    view->bytes = s->bytes;
    view->user = (void *)(uintptr_t)item->seed;
    return SPDL_OK;
}

static inline spdl_cuda_iter_desc flow_iter_desc(flow_source *s) {
    spdl_cuda_iter_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.next = flow_next;
    desc.source = s;
    desc.view = flow_view;
    desc.free_item = flow_item_free;
    return desc;
}

/* Trains on all there is. The result that ended it; *count is how many batches came. */
static inline spdl_result flow_train(spdl_cuda_iter *it, spdl_cuda_stream stream, uint64_t *count) {
    spdl_cuda_batch batch;
    spdl_result result;
    *count = 0;
    while ((result = spdl_cuda_iter_next(it, stream, &batch, SPDL_FOREVER)) == SPDL_OK) {
        flow_read(&batch, stream, (uint64_t)(uintptr_t)batch.user);
        ++*count;
    }
    return result;
}

/* ---- rows that answer each item: as in examples/cuda_infer.cu ---- */

/* What stages fill, in memory of the allocator. */
typedef struct flow_filled {
    uint64_t seed, bytes;
    unsigned char data[4096];
} flow_filled;

typedef struct flow_answers {
    spdl_cuda *cuda;
    void *stream;
    uint64_t kernel_ns, fails_at; /* this launch fails, from 1; 0: none */
    spdl_ring *pending;
    pthread_t thread;
} flow_answers;

typedef struct flow_call {
    spdl_deferred call;
    spdl_cuda_output *out;
} flow_call;

static inline spdl_result flow_failed(spdl_task *task, spdl_cuda *cuda) {
    spdl_error error;
    spdl_cuda_error(cuda, &error);
    return spdl_fail(task, "%.*s", (int)sizeof error.text - 1, error.text);
}

/* One call at a time, so outputs are taken in the order of the items. */
SPDL_FN(flow_launch, flow_filled, spdl_cuda_output) {
    flow_answers *a = (flow_answers *)spdl_ctx(task);
    const spdl_cuda_view view = { in->data, in->bytes, (void *)(uintptr_t)in->seed,
                                  spdl_buffer_free, in };
    spdl_cuda_output *answer = NULL;
    spdl_cuda_batch batch;
    spdl_result result = SPDL_TIMEOUT;
    while (result == SPDL_TIMEOUT && !spdl_stopping(task))
        result = spdl_cuda_output_get(a->cuda, a->stream, &answer, SPDL_SECONDS(0.02));
    if (result == SPDL_TIMEOUT) return SPDL_SKIP;
    if (result != SPDL_OK) return flow_failed(task, a->cuda);
    if (a->fails_at == in->seed + 1) {
        spdl_cuda_output_free(answer);
        return spdl_fail(task, "launch %d failed", (int)in->seed);
    }
    result = spdl_cuda_send(a->cuda, &view, &batch, SPDL_FOREVER);
    if (result == SPDL_OK) {
        spdl_take(task); /* `release` frees it, once it has been read */
        answer->bytes = batch.bytes;
        answer->user = batch.user;
        result = spdl_cuda_ready(&batch, a->stream);
        if (result == SPDL_OK && a->kernel_ns > 0) kit_spin(a->stream, a->kernel_ns);
        if (result == SPDL_OK) kit_invert(a->stream, answer->dev, batch.data, batch.bytes);
        spdl_cuda_batch_free(&batch);
    }
    if (result == SPDL_OK) result = spdl_cuda_output_send(answer);
    *out = answer;
    if (result == SPDL_OK) return SPDL_OK;
    spdl_cuda_output_free(answer);
    return flow_failed(task, a->cuda);
}

SPDL_FN(flow_arrive, spdl_cuda_output, spdl_cuda_output) {
    flow_answers *a = (flow_answers *)spdl_ctx(task);
    const flow_call call = { spdl_defer(task), in };
    CHECK_EQ(spdl_ring_push(a->pending, &call, SPDL_FOREVER), SPDL_OK);
    return SPDL_PENDING;
}

static inline void *flow_answers_run(void *arg) {
    flow_answers *a = (flow_answers *)arg;
    flow_call call;
    spdl_error error;
    while (spdl_ring_pop(a->pending, &call, SPDL_FOREVER) == SPDL_OK) {
        if (spdl_cuda_output_wait(call.out, SPDL_FOREVER) == SPDL_OK) {
            CHECK_EQ(spdl_complete(call.call, SPDL_OK, call.out), SPDL_OK);
            continue;
        }
        spdl_cuda_error(a->cuda, &error);
        CHECK_EQ(spdl_complete_fail(call.call, "%s", error.text), SPDL_OK);
    }
    return NULL;
}

static inline void flow_answers_open(flow_answers *a, spdl_cuda *cuda, void *stream) {
    const spdl_ring_desc desc = { .capacity = 64, .item_bytes = sizeof(flow_call) };
    int tries;
    memset(a, 0, sizeof *a);
    a->cuda = cuda;
    a->stream = stream;
    for (tries = 0; tries < 2 && a->pending == NULL; ++tries)
        if (spdl_ring_create(&a->pending, &desc) != SPDL_OK) a->pending = NULL;
    REQUIRE(a->pending != NULL);
    if (pthread_create(&a->thread, NULL, flow_answers_run, a) != 0)
        REQUIRE(pthread_create(&a->thread, NULL, flow_answers_run, a) == 0);
}

static inline void flow_answers_close(flow_answers *a) {
    spdl_ring_close(a->pending);
    pthread_join(a->thread, NULL);
    spdl_ring_destroy(a->pending, NULL, NULL);
}

#define FLOW_ROWS(answers)                                                                         \
    SPDL_PIPE(flow_launch, .ctx = (answers), .free_item = spdl_cuda_output_free),                  \
        SPDL_PIPE(flow_arrive, .ctx = (answers), .deferred = true, .concurrency = 4,               \
                  .free_item = spdl_cuda_output_free)

/* ---- a child process ---- */

static inline int flow_child_once(int (*run)(void *), void *arg, unsigned seconds, bool loud) {
    int status = 0;
    const pid_t child = fork();
    if (child == 0) {
        alarm(seconds);
        if (!loud && freopen("/dev/null", "w", stderr) == NULL) _exit(1);
        exit(run(arg));
    }
    REQUIRE(child > 0 && waitpid(child, &status, 0) == child);
    if (WIFEXITED(status)) return WEXITSTATUS(status);
    return WTERMSIG(status) == SIGALRM ? -2 : -1;
}

/* The status run ended with in a child; -1: a signal, with -2 for the alarm. Its stderr is shown
   when `loud`. A sanitizer may have a lock of its own taken by another thread when we fork, and the
   child then waits for it: so it is tried once more. */
static inline int flow_child(int (*run)(void *), void *arg, unsigned seconds, bool loud) {
    const int status = flow_child_once(run, arg, seconds, loud);
    if (status != -2 || !TEST_SANITIZED) return status;
    fprintf(stderr, "a child hung for %u s, once more\n", seconds);
    return flow_child_once(run, arg, seconds, loud);
}

/* Copies and kernels of three lengths overlap: `share` gives that of the longer in the whole, best
   of 5 tries, as other programs may have the machine. */
static inline void flow_overlaps(double (*share)(uint64_t copy_ns, uint64_t kernel_ns),
                                 const char *what) {
    static const uint64_t ms[3][2] = { { 4, 4 }, { 2, 6 }, { 6, 2 } };
    int i, tries;
    for (i = 0; i < 3; ++i) {
        double best = 0;
        for (tries = 0; tries < 5 && best < 0.85; ++tries) {
            const double e = share(ms[i][0] * 1000000, ms[i][1] * 1000000);
            if (e > best) best = e;
        }
        printf("   overlap %.3f: %s %d ms, kernel %d ms\n", best, what, (int)ms[i][0],
               (int)ms[i][1]);
        CHECK(best >= 0.85);
    }
}

#endif /* CUDA_FLOW_INCLUDED */
