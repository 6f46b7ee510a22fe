/* Result texts, the version, the clock, memory and locks. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "test.h"

static void result_texts_are_told(void) {
#define SAME(name, value, text)                                                                    \
    CHECK_EQ(name, value);                                                                         \
    CHECK_STR(spdl_result_text(name), text);
    SPDL__RESULT_LIST(SAME)
#undef SAME
}

/* Errors are negative and outcomes are not: callers test with `< 0`. */
static void result_signs_tell_errors(void) {
    CHECK_EQ(SPDL_OK, 0);
#define SIGN(name, value, text) CHECK((strncmp(#name, "SPDL_E_", 7) == 0) == (name < 0));
    SPDL__RESULT_LIST(SIGN)
#undef SIGN
}

static void result_texts_differ(void) {
#define ITS_TEXT(name, value, text) text,
    static const char *const texts[] = { SPDL__RESULT_LIST(ITS_TEXT) };
#undef ITS_TEXT
    const size_t count = sizeof texts / sizeof texts[0];
    for (size_t i = 0; i < count; ++i) {
        CHECK(strlen(texts[i]) > 0 && strlen(texts[i]) < 64);
        for (size_t k = i + 1; k < count; ++k) CHECK(strcmp(texts[i], texts[k]) != 0);
    }
}

static void result_text_of_an_unknown_value(void) {
    static const int values[] = { 1000, -1000, 77, INT32_MAX, INT32_MIN };
    for (size_t i = 0; i < sizeof values / sizeof values[0]; ++i)
        CHECK_STR(spdl_result_text((spdl_result)values[i]), "unknown result");
}

static void result_is_an_int_wide(void) { CHECK_EQ(sizeof(spdl_result), sizeof(int)); }

static void version_is_its_three_numbers(void) {
    char text[64];
    snprintf(text, sizeof text, "%d.%d.%d", SPDL_VERSION_MAJOR, SPDL_VERSION_MINOR,
             SPDL_VERSION_PATCH);
    CHECK_STR(spdl_version(), text);
    CHECK_EQ(SPDL_VERSION,
             SPDL_VERSION_MAJOR * 10000 + SPDL_VERSION_MINOR * 100 + SPDL_VERSION_PATCH);
    CHECK(SPDL_VERSION_MINOR < 100 && SPDL_VERSION_PATCH < 100);
}

static void time_is_the_monotonic_clock(void) {
#if TEST_POSIX
    struct timespec now;
    uint64_t before, between, after;
    before = spdl_time_ns();
    REQUIRE(clock_gettime(CLOCK_MONOTONIC, &now) == 0);
    after = spdl_time_ns();
    between = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    CHECK(before <= between && between <= after);
#else
    TEST_SKIP("needs the clocks of POSIX");
#endif
}

static void time_measures_a_sleep(void) {
    const uint64_t start = spdl_time_ns();
    test_sleep_us(20000);
    CHECK(spdl_time_ns() - start >= 20 * 1000 * 1000);
}

/* A time that one thread has published is never later than one another thread reads after it. */
typedef struct published {
    uint64_t latest;
    int rounds;
} published;

static void *publish(void *arg) {
    published *p = (published *)arg;
    for (int i = 0; i < p->rounds; ++i) {
        const uint64_t seen = __atomic_load_n(&p->latest, __ATOMIC_SEQ_CST);
        const uint64_t now = spdl_time_ns();
        if (!CHECK(now >= seen)) break;
        __atomic_store_n(&p->latest, now, __ATOMIC_SEQ_CST);
    }
    return NULL;
}

static void time_never_goes_backwards(void) {
    published shared = { 0, TEST_SANITIZED ? 10000 : 100000 };
    test_thread threads[4];
    for (int i = 0; i < 4; ++i) REQUIRE(test_thread_start(&threads[i], publish, &shared));
    for (int i = 0; i < 4; ++i) test_join(threads[i]);
}

static void timeouts_are_nanoseconds(void) {
    const uint64_t two = 2; /* no warning of -Wconversion */
    CHECK(SPDL_FOREVER < 0);
    CHECK_EQ(SPDL_SECONDS(2), 2000000000);
    CHECK_EQ(SPDL_SECONDS(two), 2000000000);
    CHECK_EQ(SPDL_SECONDS(0.25), 250000000);
    CHECK_EQ(SPDL_SECONDS(0), 0);
}

/* Structs with 64-bit words that are atomic are made so, on 32-bit processors, too. */
static void memory_is_aligned_to_8(void) {
    const spdl_allocator usual = { NULL, NULL, NULL };
    for (size_t bytes = 1; bytes < 100; ++bytes) {
        void *memory = spdl__alloc(&usual, bytes, 1);
        REQUIRE(memory != NULL);
        CHECK_EQ((uintptr_t)memory % 8, 0);
        memset(memory, 0, bytes);
        spdl__free(&usual, memory, bytes);
    }
    CHECK_EQ(offsetof(spdl__ring_core, tail) % 8, 0);
    CHECK_EQ(offsetof(spdl__ring_core, head) % 8, 0);
}

/* --- locks --- */

typedef struct locked {
    spdl__os_event parked;
    uint32_t lock[2];
    long count[2]; /* under the lock of the same index */
} locked;

static void *count_under_locks(void *arg) {
    locked *l = (locked *)arg;
    const int rounds = TEST_SANITIZED ? 2000 : 20000;
    for (int i = 0; i < rounds; ++i) {
        const int k = i & 1;
        spdl__lock(&l->lock[k], &l->parked);
        ++l->count[k];
        if (i % 64 == 0) test_yield();
        spdl__unlock(&l->lock[k], &l->parked);
    }
    return NULL;
}

static void locks_exclude_and_wake(void) {
    enum { THREADS = 4 };
    test_thread threads[THREADS];
    locked l;
    memset(&l, 0, sizeof l);
    REQUIRE(spdl__os_event_init(&l.parked));
    for (int i = 0; i < THREADS; ++i)
        REQUIRE(test_thread_start(&threads[i], count_under_locks, &l));
    for (int i = 0; i < THREADS; ++i) test_join(threads[i]);
    CHECK_EQ(l.count[0] + l.count[1], THREADS * (TEST_SANITIZED ? 2000 : 20000));
    CHECK_EQ(l.lock[0] + l.lock[1], 0);
    spdl__os_event_fini(&l.parked);
}

/* Returns the processor time that the wait took. */
static void *wait_for_the_lock(void *arg) {
    locked *l = (locked *)arg;
    uint64_t before, after;
    spdl__os_thread_times(NULL, &before, NULL);
    spdl__lock(&l->lock[0], &l->parked);
    spdl__os_thread_times(NULL, &after, NULL);
    spdl__unlock(&l->lock[0], &l->parked);
    l->count[0] = (long)(after - before);
    return NULL;
}

static void a_held_lock_is_waited_for_asleep(void) {
    test_thread thread;
    locked l;
    memset(&l, 0, sizeof l);
    REQUIRE(spdl__os_event_init(&l.parked));
    spdl__lock(&l.lock[0], &l.parked);
    REQUIRE(test_thread_start(&thread, wait_for_the_lock, &l));
    while (__atomic_load_n(&l.lock[0], __ATOMIC_RELAXED) != 2) test_sleep_us(100);
    test_sleep_us(50000);
    spdl__unlock(&l.lock[0], &l.parked);
    test_join(thread);
    CHECK(l.count[0] < 10000000);
    spdl__os_event_fini(&l.parked);
}

/* --- memory and names --- */

/* A block whose bytes cannot be counted is refused; what is there stays. */
static void room_that_cannot_be_counted(void) {
    static const size_t many[][3] = { { 0, SIZE_MAX / 2, 8 }, { SIZE_MAX / 4, 2, 8 },
                                      { 0, SIZE_MAX / 4 + 1, 1 } };
    const spdl_allocator heap = { NULL, NULL, NULL };
    char blocks[64] = { 0 }, *block = blocks + 32; /* gcc looks at what would be before one */
    *block = 7;
    for (int i = 0; i < 3; ++i) {
        size_t room = many[i][0];
        CHECK(spdl__room_for(&heap, block, &room, many[i][0], many[i][1], many[i][2]) == NULL);
        CHECK_EQ(room, many[i][0]);
    }
    CHECK_EQ(*block, 7);
}

static void names_are_shortened(void) {
    static const struct {
        const char *name, *is;
    } rows[] = { { "1234567", "1234567" }, { "12345678", "1234..." }, { "", "" },
                 { "a\nb\x7f", "a?b?" }, { "\1\2\3\4\5\6\7\1\2", "????..." } };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) {
        char to[8];
        spdl__printable(to, sizeof to, rows[i].name);
        CHECK_STR(to, rows[i].is);
    }
}

/* Broken pipes are an error, and no signal: not even one that waits. */
static void writes_raise_no_signal(void) {
#if TEST_POSIX
    sigset_t waiting;
    int ends[2], kept = dup(STDERR_FILENO);
    const char *reason;
    signal(SIGPIPE, SIG_DFL);
    REQUIRE(pipe(ends) == 0 && close(ends[0]) == 0 && kept >= 0);
    reason = spdl__os_file_write(ends[1], "x", 1);
    CHECK(reason != NULL && strcmp(reason, strerror(EPIPE)) == 0);
    REQUIRE(dup2(ends[1], STDERR_FILENO) >= 0);
    reason = spdl__os_stderr_write("x", 1, 1000000);
    REQUIRE(dup2(kept, STDERR_FILENO) >= 0);
    CHECK(reason != NULL && strcmp(reason, strerror(EPIPE)) == 0);
    CHECK(sigpending(&waiting) == 0 && sigismember(&waiting, SIGPIPE) == 0);
    close(ends[1]), close(kept);
#else
    TEST_SKIP("SIGPIPE is of POSIX");
#endif
}

/* --- what a user with fewer rights can say --- */

#if defined(__linux__) && !TEST_SANITIZED && !defined(SPDL_OS_POSIX)
#include <sys/wait.h>
#include <sys/xattr.h>

static const char asked[] = "SPDL_TEST_RIGHTS"; /* the program below has it, and looks */

static bool copy_of_myself(const char *path) {
    static char piece[65536];
    FILE *from = fopen("/proc/self/exe", "rb"), *to = fopen(path, "wb");
    size_t bytes = 0;
    bool whole = from != NULL && to != NULL;
    while (whole && (bytes = fread(piece, 1, sizeof piece, from)) > 0)
        whole = fwrite(piece, 1, bytes, to) == bytes;
    if (from != NULL) fclose(from);
    if (to != NULL) whole = fclose(to) == 0 && whole;
    return whole && chmod(path, 0755) == 0;
}

/* A file with a capability has the ids of its user, and more rights than the user. */
static void the_environment_of_a_file_with_rights_is_not_read(void) {
    static const uint32_t overrides[5] = { 0x02000001, 1u << 1, 0, 0, 0 }; /* dac_override */
    const char *name = "core.the_environment_of_a_file_with_rights_is_not_read";
    char folder[64], path[100], room[SPDL__OS_VARIABLE];
    int status = 0;
    pid_t child;
    if (getenv(asked) != NULL)
        _exit(getauxval(23) == 0 ? 77 : spdl__os_environment(asked, room) != NULL ? 1 : 0);
    if (geteuid() != 0) TEST_SKIP("needs root");
    test_folder(folder, sizeof folder);
    snprintf(path, sizeof path, "%s/copy", folder);
    REQUIRE(chmod(folder, 0755) == 0 && copy_of_myself(path));
    if (setxattr(path, "security.capability", overrides, sizeof overrides, 0) != 0) {
        test_folder_remove(folder);
        TEST_SKIP("this file system has no capabilities");
    }
    child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        if (setgid(65534) != 0 || setuid(65534) != 0 || setenv(asked, "1", 1) != 0) _exit(77);
        (void)execl(path, path, "--no-fork", name, (char *)NULL);
        _exit(77);
    }
    REQUIRE(waitpid(child, &status, 0) == child && WIFEXITED(status));
    test_folder_remove(folder);
    if (WEXITSTATUS(status) == 77) TEST_SKIP("this file system gives no rights");
    CHECK_EQ(WEXITSTATUS(status), 0);
}
#else
static void the_environment_of_a_file_with_rights_is_not_read(void) {
    TEST_SKIP("capabilities of files are Linux's");
}
#endif

TEST_TABLE(core) {
    TEST_CASE(writes_raise_no_signal),
    TEST_CASE(the_environment_of_a_file_with_rights_is_not_read),
    TEST_CASE(room_that_cannot_be_counted),
    TEST_CASE(names_are_shortened),
    TEST_CASE(result_texts_are_told),
    TEST_CASE(result_signs_tell_errors),
    TEST_CASE(result_texts_differ),
    TEST_CASE(result_text_of_an_unknown_value),
    TEST_CASE(result_is_an_int_wide),
    TEST_CASE(version_is_its_three_numbers),
    TEST_CASE(time_is_the_monotonic_clock),
    TEST_CASE(time_measures_a_sleep),
    TEST_CASE(time_never_goes_backwards),
    TEST_CASE(timeouts_are_nanoseconds),
    TEST_CASE(memory_is_aligned_to_8),
    TEST_CASE(locks_exclude_and_wake),
    TEST_CASE(a_held_lock_is_waited_for_asleep),
    TEST_END,
};
