/* test.h - a small test runner: every test runs in a process of its own, under a time limit; with
   --jobs several at a time, and what one prints is shown when it has ended. On Windows the program
   starts itself with the name of one test.

   A module's tests are functions without arguments and one table of them:

       #define SPDL_STATIC
       #define SPDL_IMPLEMENTATION
       #include "../spdl.h"
       #include "test.h"

       static void holds_one(void) {
           REQUIRE(make_something());     leaves the test when it fails
           CHECK(a < b);                  these note a failure and go on
           CHECK_EQ(a, 7);                integers and enums; both values are shown
           CHECK_STR(text, "seven");      strings; NULL is allowed
           if (!root) TEST_SKIP("needs root");
       }

       TEST_TABLE(ring) { TEST_CASE(holds_one), TEST_END };

   tests/main.c lists the tables, and the tests that read clocks. Those run alone, and are skipped
   on a machine whose processors are busy, or if they fail while it pauses (POSIX) or under a
   sanitizer. Checks may stand on any thread, and in processes a test forks. A test fails when a
   check failed, when a signal ended it, and when it ended with another status than 0 (a
   sanitizer's, say). An alarm ends a test after its time limit (POSIX). A process that still runs
   gets SIGABRT 1 s later, and SIGKILL 3 s after the alarm.

   Tests take threads, sleeps, folders, memory and variables from here, so that they run on
   Windows, too. What only POSIX has (fork, signals, FIFOs) skips the test there. */
#ifndef TEST_H_INCLUDED
#define TEST_H_INCLUDED

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef _WIN32
#include "test_windows.h"
#else
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#endif

typedef struct test_case {
    const char *name;
    void (*run)(void);
} test_case;

typedef struct test_module {
    const char *name;
    const test_case *tests; /* NULL: not linked, which counts as a failure */
} test_module;

/* clang-format off */
#define TEST_TABLE(module)                                                                         \
    extern const test_case test_table_##module[];                                                  \
    const test_case test_table_##module[] =
#define TEST_CASE(function) { #function, function }
#define TEST_END { NULL, NULL }
/* clang-format on */

/* Tests count workers from 0: none, the consumer does all the work. */
#define TEST_WORKERS(n) ((n) == 0 ? SPDL_INLINE : (n))

/* All but REQUIRE yield whether the check held. A condition may contain commas. */
#define CHECK(...)                                                                                 \
    test_check((__VA_ARGS__) ? true : false, __FILE__, __LINE__, "CHECK(%s)", #__VA_ARGS__)
#define CHECK_EQ(a, b)                                                                             \
    test_check_eq((long long)(a), (long long)(b), __FILE__, __LINE__, #a " == " #b)
#define CHECK_STR(a, b) test_check_str((a), (b), __FILE__, __LINE__, #a " == " #b)
#define REQUIRE(...)                                                                               \
    (test_check((__VA_ARGS__) ? true : false, __FILE__, __LINE__, "REQUIRE(%s)", #__VA_ARGS__)     \
         ? (void)0                                                                                 \
         : test_leave())
#define TEST_SKIP(why) test_skip(why)

/* Whether the library uses what only Linux has. */
#if defined(__linux__) && !defined(SPDL_OS_POSIX)
#define TEST_LINUX 1
#else
#define TEST_LINUX 0
#endif
/* qemu-user may crash in the child of a process with threads. */
#ifndef TEST_EMULATED
#define TEST_EMULATED 0
#endif
#define TEST_NEEDS_FORKS()                                                                         \
    do {                                                                                           \
        if (TEST_EMULATED) TEST_SKIP("an emulator loses the child of a process with threads");     \
    } while (0)

/* For tests that look at what stages cost: a build that makes all of them slower tells nothing. */
#define TEST_JUDGES_COSTS()                                                                        \
    do {                                                                                           \
        if (TEST_SANITIZED) TEST_SKIP("a sanitizer changes what stages cost");                     \
    } while (0)
#define TEST_NEEDS_LINUX()                                                                         \
    do {                                                                                           \
        if (!TEST_LINUX) TEST_SKIP("needs Linux");                                                 \
    } while (0)

/* Whether the system is a POSIX one: for code that Windows cannot compile. */
#ifdef _WIN32
#define TEST_POSIX 0
#else
#define TEST_POSIX 1
#endif

/* Set when a sanitizer makes everything slow: the place to do fewer rounds. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TEST_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define TEST_SANITIZED 1
#endif
#endif
#ifndef TEST_SANITIZED
#define TEST_SANITIZED 0
#endif
#if defined(__SANITIZE_THREAD__)
#define TEST_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TEST_TSAN 1
#endif
#endif
#ifndef TEST_TSAN
#define TEST_TSAN 0
#endif

/* The format is this parameter, its arguments follow. */
#ifdef __MINGW32__
#define TEST_PRINTF(number) __attribute__((format(gnu_printf, number, number + 1)))
#else
#define TEST_PRINTF(number) __attribute__((format(printf, number, number + 1)))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* `clocks`: how the names of those begin that read clocks; ends in NULL. */
int test_main(int argc, char **argv, const test_module *modules, size_t count,
              const char *const *clocks);
TEST_PRINTF(4) bool test_check(bool held, const char *file, int line, const char *format, ...);
bool test_check_eq(long long a, long long b, const char *file, int line, const char *what);
bool test_check_str(const char *a, const char *b, const char *file, int line, const char *what);
void test_leave(void) __attribute__((noreturn));
void test_skip(const char *why) __attribute__((noreturn));

/* The seed of this test: another one for every test and every --repeat, printed when it fails. */
uint64_t test_seed(void);

/* The next of a row of random numbers (splitmix64); start with uint64_t state = test_seed(). */
static inline uint64_t test_random(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* --- the system --- */

#ifdef _WIN32
typedef struct test_started *test_thread;
typedef struct test_mutex { void *word; } test_mutex;
typedef struct test_event { void *word; } test_event;
#define TEST_MUTEX { NULL }
#define TEST_EVENT { NULL }
#else
typedef pthread_t test_thread;
typedef pthread_mutex_t test_mutex;
typedef pthread_cond_t test_event;
#define TEST_MUTEX PTHREAD_MUTEX_INITIALIZER
#define TEST_EVENT PTHREAD_COND_INITIALIZER
#endif

bool test_thread_start(test_thread *thread, void *(*entry)(void *), void *arg);
void test_join(test_thread thread);
void test_detach(test_thread thread);
uint64_t test_thread_id(void); /* of the calling thread */
void test_yield(void);
void test_sleep_us(int64_t us); /* at least so long; returns at once for 0 and less */
uint64_t test_cpu_ns(void);     /* CPU time of this process */

/* Makes a folder and writes its path, in up to 64 bytes. Leaves the test on failure. */
void test_folder(char *path, size_t bytes);
bool test_folder_remove(const char *path); /* and everything in it */

void test_setenv(const char *name, const char *value); /* NULL: removes it */

/* The address that was freed last is handed out first: see test_memory.h. NULL: not to be had.
   Freed by test_memory_free, not by free. */
void *test_memory(size_t align, size_t bytes);
void test_memory_free(void *memory);

/* Memory whose last byte is followed by a page that may not be touched. */
void *test_guarded(size_t bytes);
void test_guarded_free(void *memory, size_t bytes);

/* A mutex begins as (test_mutex)TEST_MUTEX, an event as (test_event)TEST_EVENT. */
void test_lock(test_mutex *mutex);
void test_unlock(test_mutex *mutex);
void test_notify(test_event *event); /* all that wait */
/* Unlocks meanwhile. False: it took longer than that. */
bool test_wait_event(test_event *event, test_mutex *mutex, int64_t us);

#ifdef __cplusplus
}
#endif

/* ============================================================================================= */
/* The runner, for the one file that defines TEST_MAIN. */
#ifdef TEST_MAIN

#include <setjmp.h>
#include <stdarg.h>
#include <time.h>
#ifdef _WIN32
#include <windows.h>
#endif

enum {
    TEST_MESSAGES = 20, /* shown of one test: a check may fail a million times */
    TEST_SLOWEST = 40,  /* tests that --slow shows */
    TEST_DOUBTFUL = 8,  /* tests that --second runs once more */
    TEST_SPINS = 16,    /* threads that test whether the processors are free */
    TEST_PAUSE_MS = 5,  /* the runner woke so late: a failed test that reads clocks is excused;
                           plus 2 ms for each second that the test took */
    TEST_SECOND_S = 30, /* --second: after these no further run of a test begins */
    TEST_ABORT_S = 1,   /* from the alarm to SIGABRT */
    TEST_KILL_S = 3,    /* from the alarm to SIGKILL */
};

/* What a test tells the runner, in memory that both processes see. */
typedef struct test_report {
    int failures; /* atomic: any thread adds */
    int skipped;  /* atomic: the first one writes why */
    int done;     /* atomic: the test returned, or left by REQUIRE or TEST_SKIP */
    char why[200];
} test_report;

/* What became of the tests of a module: with --brief its line. */
typedef struct test_tally {
    const char *module;
    const char *which; /* of its tests: " (clocks)", or nothing */
    int passed, failed, skipped;
    int busy;    /* of the skipped ones: they read clocks */
    int running;
    bool started; /* all of them */
} test_tally;

/* A test that runs, has run, or is skipped. */
typedef struct test_job {
    const test_case *test;
    test_tally *tally;
    char name[200];
    test_report *report;
    FILE *output; /* of one that runs beside others, with --brief of each; else NULL */
    double start;
    bool running;
#ifdef _WIN32
    HANDLE child, family; /* the process, and the job that ends with it */
#else
    pid_t child;
    int sent; /* the last signal of test_end_late, or 0 */
#endif
} test_job;

/* What a test took, in seconds. */
typedef struct test_time {
    char name[200];
    double wall, cpu;
} test_time;

typedef struct test_state {
    bool list, no_fork, slow;
    bool brief; /* a line for each module, and what failed */
    bool busy_too; /* --busy */
    unsigned timeout; /* seconds, 0 is none */
    int repeat, jobs;
    uint64_t seed; /* of this round */
    char **filters;
    int filter_count;
    const char *const *clocks;
    int passed, failed, skipped;
    int second; /* --second */
    bool in_second;
    char doubtful[TEST_DOUBTFUL][200]; /* names of tests of which nothing but checks failed */
    uint64_t doubtful_seed[TEST_DOUBTFUL];
    int doubtful_count;
    test_job *job; /* `jobs` of them */
    test_tally *tally; /* two for each module */
    int running;
    double pause; /* how late the runner woke since the last test was started, in seconds */
    double took;  /* by the test that has just ended, in seconds */
    test_time *times; /* --slow */
    size_t time_count, time_room;
    /* of the test that runs in this process */
    const char *name;
    test_report *report;
    uint64_t thread; /* without fork: the thread that can jump to `leave` */
    jmp_buf leave;
    const char *child; /* Windows: this process runs one test, and that is its report */
} test_state;

static test_state test_now;

static double test_seconds(void);
static int test_processors(void);
static void test_quit(void) __attribute__((noreturn)); /* at once, from any thread, with status 0 */
static void test_write(const char *text, size_t length); /* to stderr, in one piece */
static void *test_shared(size_t bytes); /* memory that the processes of tests see; NULL: none */
static FILE *test_output(void);         /* a file that is gone when it is closed */
static bool test_begin(test_job *job);  /* starts its process; false: none could be had */
static void test_wait(void);            /* until one test has ended, which is judged */

/* One write for the whole message, so that the lines of several threads stay whole. */
static void test_tell(const char *file, int line, const char *format, va_list args) {
    char text[1024], what[800];
    int length;
    vsnprintf(what, sizeof what, format, args);
    length = snprintf(text, sizeof text, "%.200s:%d: %s failed\n", file, line, what);
    test_write(text, (size_t)length);
}

bool test_check(bool held, const char *file, int line, const char *format, ...) {
    va_list args;
    if (held) return true;
    if (__atomic_add_fetch(&test_now.report->failures, 1, __ATOMIC_RELAXED) > TEST_MESSAGES)
        return false;
    va_start(args, format);
    test_tell(file, line, format, args);
    va_end(args);
    return false;
}

bool test_check_eq(long long a, long long b, const char *file, int line, const char *what) {
    return test_check(a == b, file, line, "CHECK_EQ(%s), %lld and %lld,", what, a, b);
}

bool test_check_str(const char *a, const char *b, const char *file, int line, const char *what) {
    const bool same = a && b ? strcmp(a, b) == 0 : a == b;
    return test_check(same, file, line, "CHECK_STR(%s), \"%s\" and \"%s\",", what, a ? a : "(NULL)",
                      b ? b : "(NULL)");
}

void test_leave(void) {
    __atomic_store_n(&test_now.report->done, 1, __ATOMIC_RELEASE);
    if (!test_now.no_fork) test_quit();
    if (test_thread_id() == test_now.thread) longjmp(test_now.leave, 1);
    abort(); /* another thread cannot leave the test; a debugger stops here */
}

void test_skip(const char *why) {
    if (__atomic_exchange_n(&test_now.report->skipped, 1, __ATOMIC_ACQ_REL) == 0)
        snprintf(test_now.report->why, sizeof test_now.report->why, "%s", why);
    test_leave();
}

uint64_t test_seed(void) {
    uint64_t hash = test_now.seed;
    for (const char *c = test_now.name; *c; ++c)
        hash = (hash ^ (unsigned char)*c) * 0x100000001b3u;
    return hash;
}

static void test_note_time(const char *name, double wall, double cpu) {
    test_time *time;
    if (!test_now.slow) return;
    if (test_now.time_count == test_now.time_room) {
        test_now.time_room = 2 * test_now.time_room + 64;
        test_now.times = (test_time *)realloc(test_now.times,
                                              test_now.time_room * sizeof *test_now.times);
        if (test_now.times == NULL) abort();
    }
    time = &test_now.times[test_now.time_count++];
    snprintf(time->name, sizeof time->name, "%s", name);
    time->wall = wall;
    time->cpu = cpu;
}

static void test_show_output(test_job *job, bool shown) {
    char text[4096];
    size_t length;
    if (job->output == NULL) return;
    rewind(job->output);
    while (shown && (length = fread(text, 1, sizeof text, job->output)) > 0)
        fwrite(text, 1, length, stdout);
    fclose(job->output);
}

/* The line of a module, once all of its tests have ended. */
static void test_show_tally(const test_tally *t) {
    if (!test_now.brief || test_now.in_second || !t->started || t->running > 0) return;
    if (t->passed + t->failed + t->skipped == 0) return;
    printf("%s%-*s %4d passed", t->module, 24 - (int)strlen(t->module), t->which, t->passed);
    if (t->failed > 0) printf(", %d failed", t->failed);
    if (t->skipped > 0) printf(", %d skipped", t->skipped);
    if (t->busy > 0) printf(" (%d: the machine is busy; ARGS=--busy runs them)", t->busy);
    printf("\n");
}

static void test_doubt(const char *name) {
    const int count = test_now.doubtful_count;
    if (test_now.in_second) return;
    if (count < TEST_DOUBTFUL) {
        snprintf(test_now.doubtful[count], sizeof test_now.doubtful[0], "%s", name);
        test_now.doubtful_seed[count] = test_now.seed;
    }
    ++test_now.doubtful_count;
}

static bool test_reads_clocks(const char *name) {
    for (const char *const *start = test_now.clocks; start && *start; ++start)
        if (strncmp(name, *start, strlen(*start)) == 0) return true;
    return false;
}

static void *test_spin(void *until) {
    while (test_seconds() < *(const double *)until) {}
    return NULL;
}

/* Whether threads that compute, as many as jobs, at most one a processor, get less than 5 of 6
   parts of the processors. */
static bool test_looks_busy(void) {
    const int processors = test_processors() < TEST_SPINS ? test_processors() : TEST_SPINS;
    const int count = test_now.jobs < processors ? test_now.jobs : processors;
    const double start = test_seconds();
    double until = start + 0.02;
    const uint64_t cpu = test_cpu_ns();
    test_thread threads[TEST_SPINS];
    int n = 0;
    while (n < count && test_thread_start(&threads[n], test_spin, &until)) ++n;
    for (int i = 0; i < n; ++i) test_join(threads[i]);
    return (double)(test_cpu_ns() - cpu) * 1e-9 < (test_seconds() - start) * n * 5 / 6;
}

/* Whether they are busy for longer than a moment. */
static bool test_is_busy(void) {
    if (test_now.busy_too || test_now.no_fork) return false;
    for (int i = 0; i < 3; ++i)
        if (!test_looks_busy()) return false;
    return true;
}

/* Whether the runner woke so late during the last test that its clocks cannot be judged. */
static bool test_paused(void) {
    return 1e3 * test_now.pause >= (double)TEST_PAUSE_MS + 2 * test_now.took;
}

static void test_skips_clocks(const char *name, test_tally *tally) {
    ++test_now.skipped;
    ++tally->skipped;
    ++tally->busy;
    if (test_now.brief) return;
    printf("skip %s: reads clocks, and the machine ", name);
    if (test_paused()) printf("paused for %.0f ms (--busy judges it)\n", 1e3 * test_now.pause);
    else if (test_now.took > 0 && TEST_SANITIZED) printf("is slow under a sanitizer\n");
    else printf("is busy (--busy runs it)\n");
}

static void test_judge(test_job *job, const char *why, double cpu) {
    const test_report *report = job->report;
    const double wall = test_seconds() - job->start;
    const bool fails = report->failures > 0 || why[0];
    test_now.took = wall;
    test_show_output(job, fails || !test_now.brief);
    test_note_time(job->name, wall, cpu);
    if (report->failures > 0 && !why[0] && test_reads_clocks(job->name) && !test_now.busy_too &&
        (TEST_SANITIZED || test_paused() || test_is_busy())) {
        test_skips_clocks(job->name, job->tally);
    } else if (fails) {
        ++test_now.failed;
        ++job->tally->failed;
        if (!why[0]) test_doubt(job->name);
        printf("FAIL %s: %s%s%d failed checks, seed %llu\n", job->name, why, why[0] ? ", " : "",
               report->failures, (unsigned long long)test_now.seed);
    } else if (report->skipped) {
        ++test_now.skipped;
        ++job->tally->skipped;
        printf("skip %s: %s\n", job->name, report->why);
    } else {
        ++test_now.passed;
        ++job->tally->passed;
        if (!test_now.brief) printf("ok   %s (%.0f ms)\n", job->name, wall * 1e3);
    }
    fflush(stdout); /* on Windows no line does that */
}

static void test_without_fork(test_job *job) {
    test_now.thread = test_thread_id();
    if (setjmp(test_now.leave) == 0) job->test->run();
    test_judge(job, "", 0);
}

/* Starts a test when it may run: beside no other if `alone`, else beside less than `jobs`. */
static void test_start(const test_case *test, const char *name, bool alone, test_tally *tally) {
    test_job *job = test_now.job;
    while (test_now.running >= (alone ? 1 : test_now.jobs)) test_wait();
    test_now.pause = test_now.took = 0;
    if (test_reads_clocks(name) && test_is_busy()) {
        test_skips_clocks(name, tally);
        return;
    }
    while (job->running) ++job;
    memset(job->report, 0, sizeof *job->report);
    job->test = test;
    job->tally = tally;
    job->output = !test_now.brief && (alone || test_now.jobs == 1) ? NULL : test_output();
    snprintf(job->name, sizeof job->name, "%s", name);
    test_now.name = job->name;
    test_now.report = job->report;
    job->start = test_seconds();
    if (test_now.no_fork) {
        test_without_fork(job);
        return;
    }
    if (test_begin(job)) {
        job->running = true;
        ++tally->running;
        ++test_now.running;
    } else {
        test_judge(job, "no process could be had for it", 0);
    }
}

static void test_ended(test_job *job, const char *why, double cpu) {
    job->running = false;
    --job->tally->running;
    --test_now.running;
    test_judge(job, why, cpu);
    test_show_tally(job->tally);
}

/* --- the system: POSIX --- */
#ifndef _WIN32

static double test_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static int test_processors(void) { return (int)sysconf(_SC_NPROCESSORS_ONLN); }

static void test_quit(void) { _exit(0); } /* waits for no other thread */

static void test_write(const char *text, size_t length) {
    if (write(STDERR_FILENO, text, length) < 0) return; /* there is nobody else to tell */
}

static void *test_shared(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static FILE *test_output(void) { return tmpfile(); }

static void test_in_child(const test_job *job) {
    sigset_t set;
    if (job->output != NULL) {
        dup2(fileno(job->output), STDOUT_FILENO);
        dup2(fileno(job->output), STDERR_FILENO);
    }
    sigemptyset(&set);
    sigaddset(&set, SIGALRM);
    signal(SIGALRM, SIG_DFL);
    sigprocmask(SIG_UNBLOCK, &set, NULL);
    alarm(test_now.timeout);
    job->test->run();
    __atomic_store_n(&test_now.report->done, 1, __ATOMIC_RELEASE);
    exit(0); /* not _exit: the leak check runs in here */
}

static bool test_begin(test_job *job) {
    job->sent = 0;
    job->child = fork();
    if (job->child == 0) test_in_child(job);
    return job->child > 0;
}

/* Writes why a process that ended with this status has failed; nothing when it has not. */
static void test_why(const test_job *job, int status, char *why, size_t bytes) {
    if (job->sent != 0)
        snprintf(why, bytes, "timeout after %u s, the alarm did not end it", test_now.timeout);
    else if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM)
        snprintf(why, bytes, "timeout after %u s", test_now.timeout);
    else if (WIFSIGNALED(status))
        snprintf(why, bytes, "signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    else if (WEXITSTATUS(status) != 0)
        snprintf(why, bytes, "exit status %d", WEXITSTATUS(status));
    else if (!__atomic_load_n(&job->report->done, __ATOMIC_ACQUIRE))
        snprintf(why, bytes, "the process ended before the test did");
}

static double test_cpu(const struct rusage *usage) {
    const struct timeval user = usage->ru_utime, system = usage->ru_stime;
    return (double)(user.tv_sec + system.tv_sec) + (double)(user.tv_usec + system.tv_usec) * 1e-6;
}

/* Ends what the alarm has not ended. The test may ignore SIGALRM or be stopped by SIGSTOP, and
   ThreadSanitizer delays a handler until the thread calls a function that it intercepts, but not a
   handler of SIGABRT. */
static void test_end_late(double now) {
    for (int i = 0; i < test_now.jobs; ++i) {
        test_job *job = &test_now.job[i];
        const double late = now - job->start - test_now.timeout;
        const int number = late < (double)TEST_KILL_S ? SIGABRT : SIGKILL;
        if (!job->running || test_now.timeout == 0 || late < (double)TEST_ABORT_S) continue;
        if (job->sent == number) continue;
        job->sent = number;
        kill(job->child, number);
    }
}

/* Waits for a process, 2 ms at a time. If the runner wakes late, the machine paused or other
   threads had the processors. They may be the test's own. */
static pid_t test_wait_child(int *status, struct rusage *usage) {
    pid_t child;
    while ((child = wait4(-1, status, WNOHANG, usage)) == 0) {
        const double start = test_seconds();
        double late;
        test_sleep_us(2000);
        late = test_seconds() - start - 0.002;
        if (late > test_now.pause) test_now.pause = late;
        test_end_late(start);
    }
    return child;
}

static void test_wait(void) {
    struct rusage usage;
    char why[100] = "";
    int status = 0;
    const pid_t child = test_wait_child(&status, &usage);
    for (int i = 0; i < test_now.jobs; ++i) {
        test_job *job = &test_now.job[i];
        if (!job->running || (job->child != child && child >= 0)) continue;
        if (child < 0) snprintf(why, sizeof why, "its process is lost");
        else test_why(job, status, why, sizeof why);
        test_ended(job, why, child < 0 ? 0 : test_cpu(&usage));
    }
}

bool test_thread_start(test_thread *thread, void *(*entry)(void *), void *arg) {
    return pthread_create(thread, NULL, entry, arg) == 0;
}

void test_join(test_thread thread) { pthread_join(thread, NULL); }
void test_detach(test_thread thread) { pthread_detach(thread); }
uint64_t test_thread_id(void) { return (uint64_t)(uintptr_t)pthread_self(); }
void test_yield(void) { sched_yield(); }

void test_sleep_us(int64_t us) {
    struct timespec left;
    left.tv_sec = (time_t)(us / 1000000);
    left.tv_nsec = (long)(us % 1000000 * 1000);
    while (us > 0 && nanosleep(&left, &left) != 0 && errno == EINTR) {}
}

void test_lock(test_mutex *mutex) { pthread_mutex_lock(mutex); }
void test_unlock(test_mutex *mutex) { pthread_mutex_unlock(mutex); }
void test_notify(test_event *event) { pthread_cond_broadcast(event); }

bool test_wait_event(test_event *event, test_mutex *mutex, int64_t us) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    us += until.tv_nsec / 1000;
    until.tv_sec += (time_t)(us / 1000000);
    until.tv_nsec = (long)(us % 1000000 * 1000);
    return pthread_cond_timedwait(event, mutex, &until) != ETIMEDOUT;
}

uint64_t test_cpu_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void test_folder(char *path, size_t bytes) {
    const int length = snprintf(path, bytes, "/tmp/spdl_test_XXXXXX");
    REQUIRE((size_t)length < bytes && mkdtemp(path) != NULL);
}

bool test_folder_remove(const char *path) {
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    return system(command) == 0;
}

void test_setenv(const char *name, const char *value) {
    if (value != NULL) setenv(name, value, 1);
    else unsetenv(name);
}

static void *test_system_memory(size_t align, size_t bytes) {
    void *memory = NULL;
    return posix_memalign(&memory, align, bytes) == 0 ? memory : NULL;
}

static void test_system_free(void *memory) { free(memory); }

/* The pages in front of the one that may not be touched. */
static size_t test_pages(size_t bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
}

void *test_guarded(size_t bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), pages = test_pages(bytes);
    char *map = (char *)test_shared(pages + page);
    REQUIRE(map != NULL && mprotect(map + pages, page, PROT_NONE) == 0);
    return map + pages - bytes;
}

void test_guarded_free(void *memory, size_t bytes) {
    const size_t pages = test_pages(bytes);
    munmap((char *)memory - (pages - bytes), pages + (size_t)sysconf(_SC_PAGESIZE));
}

/* --- the system: Windows --- */
#else

static double test_seconds(void) {
    LARGE_INTEGER now, second;
    QueryPerformanceCounter(&now);
    QueryPerformanceFrequency(&second);
    return (double)now.QuadPart / (double)second.QuadPart;
}

static int test_processors(void) {
    SYSTEM_INFO system;
    GetSystemInfo(&system);
    return (int)system.dwNumberOfProcessors;
}

static void test_quit(void) {
    fflush(stdout);
    TerminateProcess(GetCurrentProcess(), 0);
    abort(); /* not reached */
}

static void test_write(const char *text, size_t length) {
    DWORD written;
    fflush(stdout);
    WriteFile(GetStdHandle(STD_ERROR_HANDLE), text, (DWORD)length, &written, NULL);
}

/* What a child is told: the handle of the memory, and where in it its report is. */
static HANDLE test_memory_handle;

static void *test_shared(size_t bytes) {
    SECURITY_ATTRIBUTES inherited;
    memset(&inherited, 0, sizeof inherited);
    inherited.nLength = sizeof inherited;
    inherited.bInheritHandle = TRUE;
    test_memory_handle = CreateFileMappingW(INVALID_HANDLE_VALUE, &inherited, PAGE_READWRITE, 0,
                                            (DWORD)bytes, NULL);
    if (test_memory_handle == NULL) return NULL;
    return MapViewOfFile(test_memory_handle, FILE_MAP_ALL_ACCESS, 0, 0, 0);
}

static FILE *test_output(void) {
    SECURITY_ATTRIBUTES inherited;
    char folder[MAX_PATH], path[MAX_PATH];
    HANDLE file;
    memset(&inherited, 0, sizeof inherited);
    inherited.nLength = sizeof inherited;
    inherited.bInheritHandle = TRUE;
    if (GetTempPathA(sizeof folder, folder) == 0) return NULL;
    if (GetTempFileNameA(folder, "spd", 0, path) == 0) return NULL;
    file = CreateFileA(path, GENERIC_READ | GENERIC_WRITE,
                       FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, &inherited,
                       CREATE_ALWAYS, FILE_ATTRIBUTE_TEMPORARY | FILE_FLAG_DELETE_ON_CLOSE, NULL);
    if (file == INVALID_HANDLE_VALUE) return NULL;
    return _fdopen(_open_osfhandle((intptr_t)file, _O_BINARY), "w+b");
}

/* Starts this program suspended, in a job that ends with it. */
static bool test_process(test_job *job, char *command) {
    STARTUPINFOA start;
    PROCESS_INFORMATION made;
    JOBOBJECT_EXTENDED_LIMIT_INFORMATION limit;
    memset(&start, 0, sizeof start);
    memset(&limit, 0, sizeof limit);
    start.cb = sizeof start;
    start.dwFlags = STARTF_USESTDHANDLES;
    start.hStdInput = GetStdHandle(STD_INPUT_HANDLE);
    start.hStdOutput = GetStdHandle(STD_OUTPUT_HANDLE);
    start.hStdError = GetStdHandle(STD_ERROR_HANDLE);
    if (job->output != NULL)
        start.hStdOutput = start.hStdError = (HANDLE)_get_osfhandle(_fileno(job->output));
    if (!CreateProcessA(NULL, command, NULL, NULL, TRUE, CREATE_SUSPENDED, NULL, NULL, &start,
                        &made))
        return false;
    job->child = made.hProcess;
    job->family = CreateJobObjectW(NULL, NULL);
    limit.BasicLimitInformation.LimitFlags = JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE;
    SetInformationJobObject(job->family, JobObjectExtendedLimitInformation, &limit, sizeof limit);
    AssignProcessToJobObject(job->family, made.hProcess);
    ResumeThread(made.hThread);
    CloseHandle(made.hThread);
    return true;
}

static bool test_begin(test_job *job) {
    char program[MAX_PATH], command[MAX_PATH + 400];
    fflush(stdout);
    GetModuleFileNameA(NULL, program, sizeof program);
    snprintf(command, sizeof command, "\"%s\" --child %llu:%d --seed %llu %s", program,
             (unsigned long long)(uintptr_t)test_memory_handle,
             (int)(job->report - test_now.job[0].report), (unsigned long long)test_now.seed,
             job->name);
    return test_process(job, command);
}

/* Closes what is left of a test's process; how long it has computed. */
static double test_buried(test_job *job) {
    FILETIME begun, ended, system = { 0, 0 }, user = { 0, 0 };
    GetProcessTimes(job->child, &begun, &ended, &system, &user);
    TerminateJobObject(job->family, 1); /* what the test has started ends here */
    CloseHandle(job->family);
    CloseHandle(job->child);
    return ((double)user.dwLowDateTime + (double)system.dwLowDateTime) * 1e-7;
}

static bool test_over(test_job *job) {
    const bool late = test_now.timeout > 0 && test_seconds() - job->start > test_now.timeout;
    char why[100] = "";
    DWORD status = 0;
    if (WaitForSingleObject(job->child, 0) != WAIT_OBJECT_0 && !late) return false;
    GetExitCodeProcess(job->child, &status);
    if (late) snprintf(why, sizeof why, "timeout after %u s", test_now.timeout);
    else if (status != 0) snprintf(why, sizeof why, "exit status %#lx", status);
    else if (!__atomic_load_n(&job->report->done, __ATOMIC_ACQUIRE))
        snprintf(why, sizeof why, "the process ended before the test did");
    test_ended(job, why, test_buried(job));
    return true;
}

static void test_wait(void) {
    HANDLE children[MAXIMUM_WAIT_OBJECTS];
    for (bool over = false; !over && test_now.running > 0;) {
        DWORD count = 0;
        for (int i = 0; i < test_now.jobs; ++i)
            if (test_now.job[i].running) children[count++] = test_now.job[i].child;
        WaitForMultipleObjects(count, children, FALSE, 100); /* then a look at the time limits */
        for (int i = 0; i < test_now.jobs; ++i)
            if (test_now.job[i].running && test_over(&test_now.job[i])) over = true;
    }
}

/* Runs the one test of a process that test_begin has started. */
static int test_as_child(const test_module *modules, size_t count) {
    unsigned long long memory = 0;
    test_report *reports;
    int index = 0;
    sscanf(test_now.child, "%llu:%d", &memory, &index);
    reports = (test_report *)MapViewOfFile((HANDLE)(uintptr_t)memory, FILE_MAP_ALL_ACCESS, 0, 0, 0);
    if (reports == NULL || test_now.filter_count != 1) return 2;
    test_now.report = &reports[index];
    test_now.name = test_now.filters[0];
    SetErrorMode(SEM_NOGPFAULTERRORBOX | SEM_FAILCRITICALERRORS); /* no box to click away */
    _setmode(1, _O_BINARY);
    _setmode(2, _O_BINARY);
    for (size_t i = 0; i < count; ++i)
        for (const test_case *test = modules[i].tests; test != NULL && test->name; ++test) {
            const size_t length = strlen(modules[i].name);
            if (strncmp(test_now.name, modules[i].name, length) != 0) continue;
            if (test_now.name[length] != '.' || strcmp(test_now.name + length + 1, test->name) != 0)
                continue;
            test->run();
            __atomic_store_n(&test_now.report->done, 1, __ATOMIC_RELEASE);
            exit(0);
        }
    return 2;
}

struct test_started {
    HANDLE handle;
    void *(*entry)(void *);
    void *arg;
};

static DWORD WINAPI test_thread_main(void *arg) {
    const struct test_started *thread = (const struct test_started *)arg;
    thread->entry(thread->arg);
    return 0;
}

bool test_thread_start(test_thread *thread, void *(*entry)(void *), void *arg) {
    struct test_started *made = (struct test_started *)malloc(sizeof *made);
    if (made == NULL) return false;
    made->entry = entry;
    made->arg = arg;
    made->handle = CreateThread(NULL, 0, test_thread_main, made, 0, NULL);
    *thread = made;
    return made->handle != NULL;
}

void test_join(test_thread thread) {
    WaitForSingleObject(thread->handle, INFINITE);
    CloseHandle(thread->handle);
    free(thread);
}

void test_detach(test_thread thread) { CloseHandle(thread->handle); } /* keeps its 3 words */
uint64_t test_thread_id(void) { return GetCurrentThreadId(); }
void test_yield(void) { SwitchToThread(); }

/* Sleep() counts in steps of the clock; this ends in time when the steps are smaller. */
void test_sleep_us(int64_t us) {
    const double end = test_seconds() + (double)us * 1e-6;
    for (double left = (double)us * 1e-6; left > 0; left = end - test_seconds())
        Sleep((DWORD)(left * 1e3) + (left > 1e-3 ? 0 : 1));
}

void test_lock(test_mutex *mutex) { AcquireSRWLockExclusive((PSRWLOCK)&mutex->word); }
void test_unlock(test_mutex *mutex) { ReleaseSRWLockExclusive((PSRWLOCK)&mutex->word); }
void test_notify(test_event *event) { WakeAllConditionVariable((PCONDITION_VARIABLE)&event->word); }

bool test_wait_event(test_event *event, test_mutex *mutex, int64_t us) {
    return SleepConditionVariableSRW((PCONDITION_VARIABLE)&event->word, (PSRWLOCK)&mutex->word,
                                     (DWORD)(us / 1000 + 1), 0) != 0;
}

uint64_t test_cpu_ns(void) {
    FILETIME begun, ended, system, user;
    GetProcessTimes(GetCurrentProcess(), &begun, &ended, &system, &user);
    return (((uint64_t)system.dwHighDateTime << 32) + system.dwLowDateTime +
            ((uint64_t)user.dwHighDateTime << 32) + user.dwLowDateTime) * 100;
}

void test_folder(char *path, size_t bytes) {
    char parent[MAX_PATH];
    static unsigned turn;
    int length = 0;
    REQUIRE(GetTempPathA(sizeof parent, parent) > 0);
    do {
        length = snprintf(path, bytes, "%sspdl_%x", parent,
                          ((unsigned)GetCurrentProcessId() << 8) + turn++);
        REQUIRE((size_t)length < bytes && turn < 256);
    } while (!CreateDirectoryA(path, NULL));
    for (char *c = path; *c; ++c)
        if (*c == '\\') *c = '/';
}

bool test_folder_remove(const char *path) {
    char inside[1024];
    WIN32_FIND_DATAA found;
    HANDLE search;
    snprintf(inside, sizeof inside, "%s/*", path);
    search = FindFirstFileA(inside, &found);
    while (search != INVALID_HANDLE_VALUE) {
        snprintf(inside, sizeof inside, "%s/%s", path, found.cFileName);
        if (strcmp(found.cFileName, ".") == 0 || strcmp(found.cFileName, "..") == 0) {
        } else if (found.dwFileAttributes & FILE_ATTRIBUTE_DIRECTORY) {
            test_folder_remove(inside);
        } else {
            DeleteFileA(inside);
        }
        if (FindNextFileA(search, &found)) continue;
        FindClose(search);
        break;
    }
    return RemoveDirectoryA(path) != 0;
}

void test_setenv(const char *name, const char *value) {
    char text[4096];
    snprintf(text, sizeof text, "%s=%s", name, value ? value : "");
    _putenv(text);
}

static void *test_system_memory(size_t align, size_t bytes) {
    return _aligned_malloc(bytes, align);
}

static void test_system_free(void *memory) { _aligned_free(memory); }

enum { TEST_PAGE = 65536 }; /* of all systems, and more */

static size_t test_pages(size_t bytes) { return (bytes + TEST_PAGE - 1) / TEST_PAGE * TEST_PAGE; }

void *test_guarded(size_t bytes) {
    const size_t pages = test_pages(bytes);
    DWORD before;
    char *map = (char *)VirtualAlloc(NULL, pages + TEST_PAGE, MEM_RESERVE | MEM_COMMIT,
                                     PAGE_READWRITE);
    REQUIRE(map != NULL && VirtualProtect(map + pages, TEST_PAGE, PAGE_NOACCESS, &before));
    return map + pages - bytes;
}

void test_guarded_free(void *memory, size_t bytes) {
    VirtualFree((char *)memory - (test_pages(bytes) - bytes), 0, MEM_RELEASE);
}

#endif

static bool test_selected(const char *name) {
    if (test_now.in_second) return strcmp(name, test_now.filters[0]) == 0;
    for (int i = 0; i < test_now.filter_count; ++i)
        if (strstr(name, test_now.filters[i])) return true;
    return test_now.filter_count == 0;
}

/* The tests of a module that read clocks, or those that do not; with one job all of them. */
static void test_each(const test_module *module, bool alone, test_tally *tally) {
    char name[200];
    memset(tally, 0, sizeof *tally);
    tally->module = module->name;
    tally->which = alone ? " (clocks)" : "";
    if (!module->tests && !alone && test_selected(module->name)) {
        ++test_now.failed;
        printf("FAIL %s: tests/test_%s.c was not linked\n", module->name, module->name);
    }
    for (const test_case *test = module->tests; test && test->name; ++test) {
        snprintf(name, sizeof name, "%s.%s", module->name, test->name);
        if (!test_selected(name)) continue;
        if (test_now.jobs > 1 && test_reads_clocks(name) != alone) continue;
        if (test_now.list) puts(name);
        else test_start(test, name, alone, tally);
    }
    tally->started = true;
    test_show_tally(tally);
}

static void test_round(const test_module *modules, size_t count) {
    test_tally *tally = test_now.tally;
    for (size_t i = 0; i < count; ++i) test_each(&modules[i], false, tally++);
    while (test_now.running > 0) test_wait();
    for (size_t i = 0; i < count && test_now.jobs > 1; ++i) test_each(&modules[i], true, tally++);
    while (test_now.running > 0) test_wait();
}

/* Runs tests again of which a check failed, perhaps because of others: each alone, up to N times,
   or until TEST_SECOND_S have passed. If all runs hold it passed; if one is skipped it is skipped.
   Both results are printed. A crash, a hang, a race or a leak is not run again. */
static void test_second_run(const test_module *modules, size_t count) {
    const int jobs = test_now.jobs;
    if (test_now.second == 0 || test_now.doubtful_count > TEST_DOUBTFUL) return;
    test_now.in_second = true;
    test_now.jobs = 1;
    for (int i = 0; i < test_now.doubtful_count; ++i) {
        const int passed = test_now.passed, failed = test_now.failed, skipped = test_now.skipped;
        char *name = test_now.doubtful[i];
        test_now.filters = &name;
        test_now.seed = test_now.doubtful_seed[i];
        const double start = test_seconds();
        int n = 0;
        for (; n < test_now.second && test_now.failed == failed; ++n, ++test_now.seed) {
            if (test_seconds() - start > (double)TEST_SECOND_S) break;
            test_round(modules, count);
        }
        const bool again = test_now.failed > failed, skips = test_now.skipped > skipped;
        if (again) printf("%s: failed again in a second run\n", name);
        else if (skips) printf("%s: failed once, skipped in a second run\n", name);
        else printf("%s: failed once, passed %d times in a second run\n", name, n);
        test_now.passed = passed + !again * !skips;
        test_now.skipped = skipped + !again * skips;
        test_now.failed = failed - !again;
    }
    test_now.in_second = false;
    test_now.jobs = jobs;
}

static int test_slower(const void *a, const void *b) {
    const double x = ((const test_time *)a)->wall, y = ((const test_time *)b)->wall;
    return (x < y) - (x > y);
}

/* The slowest tests, and whether they computed or slept. */
static void test_show_times(void) {
    double wall = 0, cpu = 0;
    if (test_now.time_count == 0) return;
    qsort(test_now.times, test_now.time_count, sizeof *test_now.times, test_slower);
    printf("      ms  ms of processors\n");
    for (size_t i = 0; i < test_now.time_count; ++i) {
        const test_time *time = &test_now.times[i];
        wall += time->wall;
        cpu += time->cpu;
        if (i >= TEST_SLOWEST) continue;
        printf("%8.0f %8.0f  %s\n", time->wall * 1e3, time->cpu * 1e3, time->name);
    }
    printf("%8.0f %8.0f  all %lu\n", wall * 1e3, cpu * 1e3, (unsigned long)test_now.time_count);
}

static void test_usage(const char *program) {
    fprintf(stderr,
            "usage: %s [--list] [--brief] [--no-fork] [--slow] [--jobs N] [--repeat N] [--seed N]\n"
            "       [--second N] [--busy] [PART-OF-A-NAME ...]\n"
            "       TEST_TIMEOUT (seconds for one test, 60) and TEST_SEED are looked at as well\n",
            program);
    exit(2);
}

static void test_options(int argc, char **argv) {
    const char *timeout = getenv("TEST_TIMEOUT"), *seed = getenv("TEST_SEED");
    int i = 1;
    test_now.repeat = test_now.jobs = 1;
    test_now.timeout = timeout ? (unsigned)strtoul(timeout, NULL, 10) : 60;
    test_now.seed = seed ? strtoull(seed, NULL, 0) : (uint64_t)time(NULL) * 1000 % 1000000007;
    for (; i < argc && strncmp(argv[i], "--", 2) == 0; ++i) {
        const bool more = i + 1 < argc;
        if (strcmp(argv[i], "--list") == 0) test_now.list = true;
        else if (strcmp(argv[i], "--brief") == 0) test_now.brief = true;
        else if (strcmp(argv[i], "--no-fork") == 0) test_now.no_fork = true;
        else if (strcmp(argv[i], "--slow") == 0) test_now.slow = true;
        else if (strcmp(argv[i], "--busy") == 0) test_now.busy_too = true;
        else if (more && strcmp(argv[i], "--jobs") == 0) test_now.jobs = atoi(argv[++i]);
        else if (more && strcmp(argv[i], "--repeat") == 0) test_now.repeat = atoi(argv[++i]);
        else if (more && strcmp(argv[i], "--second") == 0) test_now.second = atoi(argv[++i]);
        else if (more && strcmp(argv[i], "--seed") == 0)
            test_now.seed = strtoull(argv[++i], NULL, 0);
        else if (more && strcmp(argv[i], "--child") == 0) test_now.child = argv[++i];
        else test_usage(argv[0]);
    }
    test_now.filters = argv + i;
    test_now.filter_count = argc - i;
}

static bool test_make_jobs(size_t modules) {
    const size_t count = (size_t)test_now.jobs;
    test_report *reports = (test_report *)test_shared(count * sizeof *reports);
    test_now.job = (test_job *)calloc(count, sizeof *test_now.job);
    test_now.tally = (test_tally *)calloc(2 * modules, sizeof *test_now.tally);
    if (reports == NULL || test_now.job == NULL || test_now.tally == NULL) return false;
    for (size_t i = 0; i < count; ++i) test_now.job[i].report = &reports[i];
    return true;
}

int test_main(int argc, char **argv, const test_module *modules, size_t count,
              const char *const *clocks) {
    test_options(argc, argv);
    test_now.clocks = clocks;
    if (test_now.no_fork || test_now.list || test_now.jobs < 1) test_now.jobs = 1;
    if (test_now.no_fork || test_now.list) test_now.brief = false;
#ifdef _WIN32
    if (test_now.child != NULL) return test_as_child(modules, count);
    if (test_now.jobs > MAXIMUM_WAIT_OBJECTS) test_now.jobs = MAXIMUM_WAIT_OBJECTS;
    _setmode(1, _O_BINARY);
#endif
    if (!test_make_jobs(count)) return 2;
    setvbuf(stdout, NULL, _IOLBF, 0); /* nothing waits in a buffer when a test forks or dies */
    if (!test_now.list)
        printf("seed %llu (--seed sets it)\n", (unsigned long long)test_now.seed);
    for (int round = 0; round < test_now.repeat; ++round, ++test_now.seed)
        test_round(modules, count);
    if (test_now.list) return 0;
    --test_now.seed; /* that of the last round */
    test_second_run(modules, count);
    test_show_times();
    printf("%d passed, %d failed", test_now.passed, test_now.failed);
    if (test_now.skipped > 0) printf(", %d skipped", test_now.skipped);
    printf("\n");
    return test_now.failed > 0 || test_now.passed + test_now.skipped == 0;
}

#include "test_memory.h"

#endif /* TEST_MAIN */
#endif /* TEST_H_INCLUDED */
