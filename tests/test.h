/* test.h - a small test runner: every test runs in a process of its own, under an alarm.

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

   tests/main.c lists the tables. Checks may stand on any thread, and in processes a test forks. A
   test fails when a check failed, when a signal ended it (the alarm is one), and when it ended with
   another status than 0 (a sanitizer's, say). */
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

int test_main(int argc, char **argv, const test_module *modules, size_t count);
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
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { TEST_MESSAGES = 20 }; /* shown of one test: a check may fail a million times */

/* What a test tells the runner, in memory that both processes see. */
typedef struct test_report {
    int failures; /* atomic: any thread adds */
    int skipped;  /* atomic: the first one writes why */
    int done;     /* atomic: the test returned, or left by REQUIRE or TEST_SKIP */
    char why[200];
} test_report;

typedef struct test_state {
    bool list, no_fork;
    unsigned timeout; /* seconds, 0 is none */
    long repeat;
    uint64_t seed; /* of this round */
    const char *name;
    char **filters;
    int filter_count;
    long passed, failed, skipped;
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

static void test_in_child(const test_case *test) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGALRM);
    signal(SIGALRM, SIG_DFL);
    sigprocmask(SIG_UNBLOCK, &set, NULL);
    alarm(test_now.timeout);
    test->run();
    __atomic_store_n(&test_now.report->done, 1, __ATOMIC_RELEASE);
    exit(0); /* not _exit: the leak check runs in here */
}

/* Writes why a process that ended with this status has failed; nothing when it has not. */
static void test_ended(int status, char *why, size_t bytes) {
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM)
        snprintf(why, bytes, "timeout after %u s", test_now.timeout);
    else if (WIFSIGNALED(status))
        snprintf(why, bytes, "signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    else if (WEXITSTATUS(status) != 0)
        snprintf(why, bytes, "exit status %d", WEXITSTATUS(status));
    else if (!__atomic_load_n(&test_now.report->done, __ATOMIC_ACQUIRE))
        snprintf(why, bytes, "the process ended before the test did");
}

static void test_run(const test_case *test, char *why, size_t bytes) {
    int status = 0;
    const pid_t child = test_now.no_fork ? 0 : fork();
    if (test_now.no_fork) {
        test_now.thread = pthread_self();
        if (setjmp(test_now.leave) == 0) test->run();
    } else if (child == 0) {
        test_in_child(test);
    } else if (child < 0 || waitpid(child, &status, 0) != child) {
        snprintf(why, bytes, "no process could be had for it");
    } else {
        test_ended(status, why, bytes);
    }
}

static double test_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void test_judge(const test_case *test) {
    char why[100] = "";
    const double start = test_seconds();
    const test_report *report = test_now.report;
    memset(test_now.report, 0, sizeof *report);
    test_run(test, why, sizeof why);
    if (report->failures > 0 || why[0]) {
        ++test_now.failed;
        printf("FAIL %s: %s%s%d failed checks, seed %llu\n", test_now.name, why, why[0] ? ", " : "",
               report->failures, (unsigned long long)test_now.seed);
    } else if (report->skipped) {
        ++test_now.skipped;
        printf("skip %s: %s\n", test_now.name, report->why);
    } else {
        ++test_now.passed;
        printf("ok   %s (%.0f ms)\n", test_now.name, (test_seconds() - start) * 1e3);
    }
}

static bool test_selected(const char *name) {
    for (int i = 0; i < test_now.filter_count; ++i)
        if (strstr(name, test_now.filters[i])) return true;
    return test_now.filter_count == 0;
}

static void test_each(const test_module *module) {
    char name[200];
    test_now.name = name;
    snprintf(name, sizeof name, "%s", module->name);
    if (!module->tests && test_selected(name)) {
        ++test_now.failed;
        printf("FAIL %s: tests/test_%s.c was not linked\n", name, name);
    }
    for (const test_case *test = module->tests; test && test->name; ++test) {
        snprintf(name, sizeof name, "%s.%s", module->name, test->name);
        if (!test_selected(name)) continue;
        if (test_now.list) puts(name);
        else test_judge(test);
    }
}

static void test_usage(const char *program) {
    fprintf(stderr,
            "usage: %s [--list] [--no-fork] [--repeat N] [--seed N] [PART-OF-A-NAME ...]\n"
            "       TEST_TIMEOUT (seconds for one test, 60) and TEST_SEED are looked at as well\n",
            program);
    exit(2);
}

static void test_options(int argc, char **argv) {
    const char *timeout = getenv("TEST_TIMEOUT"), *seed = getenv("TEST_SEED");
    int i = 1;
    test_now.repeat = 1;
    test_now.timeout = timeout ? (unsigned)strtoul(timeout, NULL, 10) : 60;
    test_now.seed = seed ? strtoull(seed, NULL, 0) : (uint64_t)time(NULL) * 1000 % 1000000007;
    for (; i < argc && strncmp(argv[i], "--", 2) == 0; ++i) {
        const bool more = i + 1 < argc;
        if (strcmp(argv[i], "--list") == 0) test_now.list = true;
        else if (strcmp(argv[i], "--no-fork") == 0) test_now.no_fork = true;
        else if (more && strcmp(argv[i], "--repeat") == 0) test_now.repeat = atol(argv[++i]);
        else if (more && strcmp(argv[i], "--seed") == 0)
            test_now.seed = strtoull(argv[++i], NULL, 0);
        else test_usage(argv[0]);
    }
    test_now.filters = argv + i;
    test_now.filter_count = argc - i;
}

int test_main(int argc, char **argv, const test_module *modules, size_t count) {
    test_options(argc, argv);
    test_now.report = (test_report *)mmap(NULL, sizeof(test_report), PROT_READ | PROT_WRITE,
                                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (test_now.report == MAP_FAILED) return 2;
    setvbuf(stdout, NULL, _IOLBF, 0); /* nothing waits in a buffer when a test forks or dies */
    if (!test_now.list)
        printf("seed %llu (--seed sets it)\n", (unsigned long long)test_now.seed);
    for (long round = 0; round < test_now.repeat; ++round, ++test_now.seed)
        for (size_t i = 0; i < count; ++i) test_each(&modules[i]);
    if (test_now.list) return 0;
    printf("%ld passed, %ld failed", test_now.passed, test_now.failed);
    if (test_now.skipped > 0) printf(", %ld skipped", test_now.skipped);
    printf("\n");
    return test_now.failed > 0 || test_now.passed + test_now.skipped == 0;
}

#endif /* TEST_MAIN */
#endif /* TEST_H_INCLUDED */
