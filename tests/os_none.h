/* A twin of >>os-posix for no system at all, only C: one thread and no files. Rings work as long as
   nothing has to wait, pipelines with workers = 0, npz in memory; threads and files are refused
   with a reason. There is no other thread that could end a sleep, so each times out at once.
   tests/test_os_none.c builds the library on it; a port to another system can begin with a copy:
       #define SPDL_OS_HEADER "tests/os_none.h"
       #define SPDL_IMPLEMENTATION
       #include "spdl.h" */
#include <time.h>

#define SPDL__OS_BARRIER 0

static const char spdl__os_no_files[] = "there are no files here";

struct spdl__os_event {
    uint32_t word;
    uint32_t waiters;
};

struct spdl__os_thread {
    bool refused;
};

SPDL__PRIVATE uint64_t spdl__os_clock_ns(spdl__os_clock which) {
    if (which == SPDL__OS_UNIX) return (uint64_t)time(NULL) * 1000000000u;
    return (uint64_t)((double)clock() * (1e9 / (double)CLOCKS_PER_SEC));
}

SPDL__PRIVATE bool spdl__os_barrier(void) { return false; }

SPDL__PRIVATE bool spdl__os_event_init(spdl__os_event *event) {
    event->word = event->waiters = 0;
    return true;
}

SPDL__PRIVATE void spdl__os_event_fini(spdl__os_event *event) { (void)event; }

SPDL__PRIVATE spdl_result spdl__os_event_sleep(spdl__os_event *event, uint32_t word,
                                               uint64_t deadline) {
    (void)deadline;
    return event->word != word ? SPDL_OK : SPDL_TIMEOUT;
}

SPDL__PRIVATE void spdl__os_event_wake(spdl__os_event *event, int count) {
    (void)count;
    ++event->word;
}

SPDL__PRIVATE bool spdl__os_thread_start(spdl__os_thread *thread, const char *name,
                                         const spdl_policy *policy, size_t stack_bytes,
                                         void *(*entry)(void *), void *arg) {
    (void)thread, (void)name, (void)policy, (void)stack_bytes, (void)entry, (void)arg;
    return false;
}

SPDL__PRIVATE void spdl__os_thread_join(spdl__os_thread *thread) { (void)thread; }

SPDL__PRIVATE uint64_t spdl__os_thread_id(void) { return 1; }

SPDL__PRIVATE void spdl__os_thread_times(const spdl__os_thread *thread, spdl__os_file *file,
                                         uint64_t *cpu_ns, uint64_t *queued_ns) {
    (void)thread, (void)file;
    if (cpu_ns != NULL) *cpu_ns = SPDL__NEVER;
    if (queued_ns != NULL) *queued_ns = SPDL__NEVER;
}

SPDL__PRIVATE void spdl__os_yield(void) {}

SPDL__PRIVATE uint64_t spdl__os_process_id(uint64_t *started) {
    if (started != NULL) *started = 0;
    return 1;
}

SPDL__PRIVATE const char *spdl__os_environment(const char *name) {
    const char *value = getenv(name);
    return value != NULL && *value != '\0' ? value : NULL;
}

SPDL__PRIVATE bool spdl__os_terminal(spdl__os_file *lock) {
    if (lock != NULL) *lock = SPDL__NO_FILE;
    return false;
}

SPDL__PRIVATE const char *spdl__os_stderr_write(const char *text, size_t bytes,
                                                int64_t patience_ns) {
    (void)patience_ns;
    return fwrite(text, 1, bytes, stderr) == bytes ? NULL : "it takes no more";
}

SPDL_API void spdl_process_read(spdl_process_stats *stats) {
    memset(stats, 0, sizeof(*stats));
    stats->time_ns = stats->cpu_ns = spdl_time_ns();
    stats->cores_allowed = 1;
}

SPDL__PRIVATE const char *spdl__os_file_open(spdl__os_file *file, const char *path,
                                             spdl__os_access access, uint64_t *bytes) {
    (void)path, (void)access, (void)bytes;
    *file = SPDL__NO_FILE;
    return spdl__os_no_files;
}

SPDL__PRIVATE const char *spdl__os_file_duplicate(spdl__os_file *file, int from, uint64_t *bytes) {
    (void)from, (void)bytes;
    *file = SPDL__NO_FILE;
    return spdl__os_no_files;
}

SPDL__PRIVATE const char *spdl__os_file_close(spdl__os_file file) {
    (void)file;
    return NULL;
}

SPDL__PRIVATE const char *spdl__os_file_read(spdl__os_file file, void *to, size_t bytes,
                                             uint64_t at, size_t *have) {
    (void)file, (void)to, (void)bytes, (void)at;
    *have = 0;
    return spdl__os_no_files;
}

SPDL__PRIVATE const char *spdl__os_file_write(spdl__os_file file, const void *from, size_t bytes,
                                              uint64_t at) {
    (void)file, (void)from, (void)bytes, (void)at;
    return spdl__os_no_files;
}

SPDL__PRIVATE const char *spdl__os_file_truncate(spdl__os_file file) {
    (void)file;
    return spdl__os_no_files;
}

SPDL__PRIVATE const uint8_t *spdl__os_file_map(spdl__os_file file, uint64_t bytes) {
    (void)file, (void)bytes;
    return NULL;
}

SPDL__PRIVATE void spdl__os_file_unmap(const uint8_t *memory, uint64_t bytes) {
    (void)memory, (void)bytes;
}

SPDL__PRIVATE const char *spdl__os_file_commit(spdl__os_file file, const char *from, const char *to,
                                               bool sync) {
    (void)file, (void)from, (void)to, (void)sync;
    return spdl__os_no_files;
}
