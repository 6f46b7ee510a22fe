/* loader.h - what test_loader.c and torture_loader.c share: items whose every byte is known, and
   stages that end their process in each way. Included once, after the header itself. */
#ifndef LOADER_H_INCLUDED
#define LOADER_H_INCLUDED

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct record {
    uint64_t number, epoch;
    uint8_t fill[112]; /* a torn one is seen */
} record;

typedef struct counts {
    uint64_t items, made;
} counts;

static inline void record_make(record *r, uint64_t number, uint64_t epoch) {
    r->number = number;
    r->epoch = epoch;
    memset(r->fill, (int)(number * 31 + epoch), sizeof r->fill);
}

static inline bool record_is(const record *r, uint64_t number, uint64_t epoch) {
    const uint8_t fill = (uint8_t)(number * 31 + epoch);
    size_t i = 0;
    while (i < sizeof r->fill && r->fill[i] == fill) ++i;
    return r->number == number && r->epoch == epoch && i == sizeof r->fill;
}

/* As many records as its ctx says. */
SPDL_FN(records, void, record) {
    if (spdl_sequence(task) >= (uint64_t)(uintptr_t)spdl_ctx(task)) return SPDL_END;
    if ((*out = (record *)spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    record_make(*out, spdl_sequence(task), spdl_epoch(task));
    return SPDL_OK;
}

#define RECORDS(...) RECORDS_ROW(__VA_ARGS__, .item_bytes = sizeof(record))
#define RECORDS_ROW(count, ...) SPDL_SOURCE(records, .ctx = (void *)(uintptr_t)(count), __VA_ARGS__)
#define IN_BATCHES(size) SPDL_BATCH(size, .item_bytes = sizeof(record))

static inline spdl_result record_after_record(void *source, void **item, int64_t timeout_ns) {
    static record made[64];
    counts *c = (counts *)source;
    record *r = &made[c->made % 64];
    (void)timeout_ns;
    if (c->made == c->items) return SPDL_END;
    record_make(r, c->made++, 0);
    *item = r;
    return SPDL_OK;
}

SPDL_FN(copied, record, record) {
    if ((*out = (record *)spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    **out = *in;
    return SPDL_OK;
}

SPDL_FN(two_of_three, record, record) {
    if (in->number % 3 == 1) return SPDL_SKIP;
    *out = in;
    return SPDL_OK;
}

SPDL_FN(batches_pass, spdl_batch, spdl_batch) {
    *out = in;
    return SPDL_OK;
}

/* What happens to a process at one item. */
typedef enum fate_how { FAIL, CRASH, ABORT, KILL, EXIT_0, EXIT_17, HANG, STOP } fate_how;

typedef struct fate {
    uint64_t at;
    fate_how how;
    uint32_t *done; /* shared: once is enough; or NULL: each time */
} fate;

static inline uint32_t *shared_flag(void) {
    void *memory = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return memory != MAP_FAILED ? (uint32_t *)memory : NULL;
}

SPDL_FN(meets_its_fate, record, record) {
    const fate *f = (const fate *)spdl_ctx(task);
    *out = in;
    if (in->number != f->at ||
        (f->done != NULL && __atomic_exchange_n(f->done, 1, __ATOMIC_ACQ_REL) != 0))
        return SPDL_OK;
    switch (f->how) {
    case FAIL: return spdl_fail(task, "as planned");
    case CRASH: *(volatile int *)(uintptr_t)8 = 1; break;
    case ABORT: abort();
    case KILL: kill(getpid(), SIGKILL); break;
    case EXIT_0: _exit(0);
    case EXIT_17: _exit(17);
    case HANG: break;
    case STOP: kill(getpid(), SIGSTOP); break;
    }
    for (;;) pause(); /* a signal may come a little later */
}

static inline void log_nothing(spdl_log_level level, const char *text, void *user) {
    (void)level, (void)text, (void)user;
}

/* A sanitizer may have a thread. */
static inline spdl_loader_desc desc_of(int workers) {
    spdl_loader_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.pipeline.workers = workers == 0 ? SPDL_INLINE : workers;
    desc.fork_with_threads = true;
    desc.logger.log_fn = log_nothing;
    return desc;
}

/* A sanitizer catches faults itself, and uses memory. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TEST_FAULTS_CAUGHT 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define TEST_FAULTS_CAUGHT 1
#endif
#endif
#ifndef TEST_FAULTS_CAUGHT
#define TEST_FAULTS_CAUGHT 0
#endif
#endif
