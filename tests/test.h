/* test.h - a small test runner: every test runs in a process of its own, under an alarm; with
   --jobs several at a time, and what one prints is shown when it has ended.

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

   tests/main.c lists the tables, and the tests that run alone. Checks may stand on any thread, and
   in processes a test forks. A test fails when a check failed, when a signal ended it (the alarm is
   one), and when it ended with another status than 0 (a sanitizer's, say). */
#ifndef TEST_H_INCLUDED
#define TEST_H_INCLUDED

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
#ifdef SPDL_OS_POSIX
#define TEST_LINUX 0
#else
#define TEST_LINUX 1
#endif
#define TEST_NEEDS_LINUX()                                                                         \
    do {                                                                                           \
        if (!TEST_LINUX) TEST_SKIP("of Linux");                                                    \
    } while (0)

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

#ifdef __cplusplus
extern "C" {
#endif

/* `alone`: how the names of those begin that run beside no other test; ends in NULL. */
int test_main(int argc, char **argv, const test_module *modules, size_t count,
              const char *const *alone);
bool test_check(bool held, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
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

#ifdef __cplusplus
}
#endif

/* ============================================================================================= */
/* The runner, for the one file that defines TEST_MAIN. */
#ifdef TEST_MAIN

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    TEST_MESSAGES = 20, /* shown of one test: a check may fail a million times */
    TEST_SLOWEST = 40,  /* tests that --slow shows */
};

/* What a test tells the runner, in memory that both processes see. */
typedef struct test_report {
    int failures; /* atomic: any thread adds */
    int skipped;  /* atomic: the first one writes why */
    int done;     /* atomic: the test returned, or left by REQUIRE or TEST_SKIP */
    char why[200];
} test_report;

/* A test that runs, has run, or is skipped. */
typedef struct test_job {
    const test_case *test;
    char name[200];
    test_report *report;
    FILE *output; /* of one that runs beside others, else NULL */
    pid_t child;  /* 0: none */
    double start;
} test_job;

/* What a test took, in seconds. */
typedef struct test_time {
    char name[200];
    double wall, cpu;
} test_time;

typedef struct test_state {
    bool list, no_fork, slow;
    unsigned timeout; /* seconds, 0 is none */
    long repeat, jobs;
    uint64_t seed; /* of this round */
    char **filters;
    int filter_count;
    const char *const *alone;
    long passed, failed, skipped;
    test_job *job;   /* `jobs` of them */
    long running;
    test_time *times; /* --slow */
    size_t time_count, time_room;
    /* of the test that runs in this process */
    const char *name;
    test_report *report;
    pthread_t thread; /* without fork: the thread that can jump to `leave` */
    jmp_buf leave;
} test_state;

static test_state test_now;

/* One write for the whole message, so that the lines of several threads stay whole. */
__attribute__((format(printf, 3, 0))) static void test_tell(const char *file, int line,
                                                            const char *format, va_list args) {
    char text[1024], what[800];
    int length;
    vsnprintf(what, sizeof what, format, args);
    length = snprintf(text, sizeof text, "%.200s:%d: %s failed\n", file, line, what);
    if (write(STDERR_FILENO, text, (size_t)length) < 0) return; /* there is nobody else to tell */
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
    if (!test_now.no_fork) _exit(0); /* from any thread, without waiting for the others */
    if (pthread_equal(pthread_self(), test_now.thread)) longjmp(test_now.leave, 1);
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

/* Writes why a process that ended with this status has failed; nothing when it has not. */
static void test_ended(const test_report *report, int status, char *why, size_t bytes) {
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM)
        snprintf(why, bytes, "timeout after %u s", test_now.timeout);
    else if (WIFSIGNALED(status))
        snprintf(why, bytes, "signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    else if (WEXITSTATUS(status) != 0)
        snprintf(why, bytes, "exit status %d", WEXITSTATUS(status));
    else if (!__atomic_load_n(&report->done, __ATOMIC_ACQUIRE))
        snprintf(why, bytes, "the process ended before the test did");
}

static double test_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static double test_cpu(const struct rusage *usage) {
    const struct timeval user = usage->ru_utime, system = usage->ru_stime;
    return (double)(user.tv_sec + system.tv_sec) + (double)(user.tv_usec + system.tv_usec) * 1e-6;
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

static void test_show_output(test_job *job) {
    char text[4096];
    size_t length;
    if (job->output == NULL) return;
    rewind(job->output);
    while ((length = fread(text, 1, sizeof text, job->output)) > 0)
        fwrite(text, 1, length, stdout);
    fclose(job->output);
}

static void test_judge(test_job *job, const char *why, double cpu) {
    const test_report *report = job->report;
    const double wall = test_seconds() - job->start;
    test_show_output(job);
    test_note_time(job->name, wall, cpu);
    if (report->failures > 0 || why[0]) {
        ++test_now.failed;
        printf("FAIL %s: %s%s%d failed checks, seed %llu\n", job->name, why, why[0] ? ", " : "",
               report->failures, (unsigned long long)test_now.seed);
    } else if (report->skipped) {
        ++test_now.skipped;
        printf("skip %s: %s\n", job->name, report->why);
    } else {
        ++test_now.passed;
        printf("ok   %s (%.0f ms)\n", job->name, wall * 1e3);
    }
}

/* Waits until one test has ended. */
static void test_wait(void) {
    struct rusage usage;
    char why[100] = "";
    int status = 0;
    const pid_t child = wait4(-1, &status, 0, &usage);
    for (long i = 0; i < test_now.jobs; ++i) {
        test_job *job = &test_now.job[i];
        if (job->child == 0 || (job->child != child && child >= 0)) continue;
        if (child < 0) snprintf(why, sizeof why, "its process is lost");
        else test_ended(job->report, status, why, sizeof why);
        job->child = 0;
        --test_now.running;
        test_judge(job, why, child < 0 ? 0 : test_cpu(&usage));
    }
}

static void test_without_fork(test_job *job) {
    test_now.thread = pthread_self();
    if (setjmp(test_now.leave) == 0) job->test->run();
    test_judge(job, "", 0);
}

/* Starts a test when it may run: beside no other if `alone`, else beside less than `jobs`. */
static void test_start(const test_case *test, const char *name, bool alone) {
    test_job *job = test_now.job;
    while (test_now.running >= (alone ? 1 : test_now.jobs)) test_wait();
    while (job->child != 0) ++job;
    memset(job->report, 0, sizeof *job->report);
    job->test = test;
    job->output = alone || test_now.jobs == 1 ? NULL : tmpfile();
    snprintf(job->name, sizeof job->name, "%s", name);
    test_now.name = job->name;
    test_now.report = job->report;
    job->start = test_seconds();
    if (test_now.no_fork) {
        test_without_fork(job);
        return;
    }
    job->child = fork();
    if (job->child == 0) test_in_child(job);
    if (job->child > 0) {
        ++test_now.running;
    } else {
        job->child = 0;
        test_judge(job, "no process could be had for it", 0);
    }
}

static bool test_selected(const char *name) {
    for (int i = 0; i < test_now.filter_count; ++i)
        if (strstr(name, test_now.filters[i])) return true;
    return test_now.filter_count == 0;
}

static bool test_runs_alone(const char *name) {
    for (const char *const *start = test_now.alone; start && *start; ++start)
        if (strncmp(name, *start, strlen(*start)) == 0) return true;
    return false;
}

/* The tests of a module that run alone, or those that do not; with one job all of them. */
static void test_each(const test_module *module, bool alone) {
    char name[200];
    if (!module->tests && !alone && test_selected(module->name)) {
        ++test_now.failed;
        printf("FAIL %s: tests/test_%s.c was not linked\n", module->name, module->name);
    }
    for (const test_case *test = module->tests; test && test->name; ++test) {
        snprintf(name, sizeof name, "%s.%s", module->name, test->name);
        if (!test_selected(name)) continue;
        if (test_now.jobs > 1 && test_runs_alone(name) != alone) continue;
        if (test_now.list) puts(name);
        else test_start(test, name, alone);
    }
}

static void test_round(const test_module *modules, size_t count) {
    for (size_t i = 0; i < count; ++i) test_each(&modules[i], false);
    while (test_now.running > 0) test_wait();
    for (size_t i = 0; i < count && test_now.jobs > 1; ++i) test_each(&modules[i], true);
    while (test_now.running > 0) test_wait();
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
            "usage: %s [--list] [--no-fork] [--slow] [--jobs N] [--repeat N] [--seed N]\n"
            "       [PART-OF-A-NAME ...]\n"
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
        else if (strcmp(argv[i], "--no-fork") == 0) test_now.no_fork = true;
        else if (strcmp(argv[i], "--slow") == 0) test_now.slow = true;
        else if (more && strcmp(argv[i], "--jobs") == 0) test_now.jobs = atol(argv[++i]);
        else if (more && strcmp(argv[i], "--repeat") == 0) test_now.repeat = atol(argv[++i]);
        else if (more && strcmp(argv[i], "--seed") == 0)
            test_now.seed = strtoull(argv[++i], NULL, 0);
        else test_usage(argv[0]);
    }
    test_now.filters = argv + i;
    test_now.filter_count = argc - i;
}

static bool test_make_jobs(void) {
    const size_t count = (size_t)test_now.jobs;
    test_report *reports = (test_report *)mmap(NULL, count * sizeof *reports,
                                               PROT_READ | PROT_WRITE,
                                               MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    test_now.job = (test_job *)calloc(count, sizeof *test_now.job);
    if (reports == MAP_FAILED || test_now.job == NULL) return false;
    for (size_t i = 0; i < count; ++i) test_now.job[i].report = &reports[i];
    return true;
}

int test_main(int argc, char **argv, const test_module *modules, size_t count,
              const char *const *alone) {
    test_options(argc, argv);
    test_now.alone = alone;
    if (test_now.no_fork || test_now.list || test_now.jobs < 1) test_now.jobs = 1;
    if (!test_make_jobs()) return 2;
    setvbuf(stdout, NULL, _IOLBF, 0); /* nothing waits in a buffer when a test forks or dies */
    if (!test_now.list)
        printf("seed %llu (--seed sets it)\n", (unsigned long long)test_now.seed);
    for (long round = 0; round < test_now.repeat; ++round, ++test_now.seed)
        test_round(modules, count);
    if (test_now.list) return 0;
    test_show_times();
    printf("%ld passed, %ld failed", test_now.passed, test_now.failed);
    if (test_now.skipped > 0) printf(", %ld skipped", test_now.skipped);
    printf("\n");
    return test_now.failed > 0 || test_now.passed + test_now.skipped == 0;
}

#endif /* TEST_MAIN */
#endif /* TEST_H_INCLUDED */
