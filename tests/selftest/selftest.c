/* Tests that fail on purpose, in every way a test can; run.sh looks at what the runner says. */
#define TEST_MAIN
#include "../test.h"

static void *check_fails(void *arg) {
    CHECK(arg == NULL && 1 > 2);
    return NULL;
}

static void *require_fails(void *arg) {
    REQUIRE(arg != NULL);
    abort(); /* not reached */
}

static void on_a_thread(void *(*run)(void *)) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, run, NULL) == 0) pthread_join(thread, NULL);
}

static void passes(void) { CHECK(true); }
static void check_on_a_thread(void) { on_a_thread(check_fails); }
static void require_on_a_thread(void) { on_a_thread(require_fails); }

static void check_in_a_fork(void) {
    const pid_t child = fork();
    if (child == 0) {
        CHECK(false);
        _exit(0);
    }
    waitpid(child, NULL, 0);
}

static void check_goes_on(void) {
    CHECK_EQ(6 * 7, 41);
    CHECK_STR("one", "two");
    CHECK_STR(NULL, "two");
}

/* As a machine that pauses: the runner does not run for 20 ms. */
static void fails_beside_a_pause(void) {
    test_sleep_us(10000); /* the runner waits by now */
    kill(getppid(), SIGSTOP);
    test_sleep_us(20000);
    kill(getppid(), SIGCONT);
    test_sleep_us(20000); /* the runner sees that it was late before it sees the end */
    CHECK(false);
}

static void require_leaves(void) {
    REQUIRE(1 > 2);
    CHECK(false); /* not reached */
}

static void check_a_million_times(void) {
    for (int i = 0; i < 1000000; ++i) CHECK(i < 0);
}

/* Fails once: a file is there the second time. */
static void fails_once(void) {
    const char *path = getenv("SELF_TEST_FILE");
    FILE *file = path ? fopen(path, "rb") : NULL;
    if (file != NULL) {
        fclose(file);
        return;
    }
    CHECK(path == NULL);
    file = path ? fopen(path, "wb") : NULL;
    if (file != NULL) fclose(file);
}

static void hangs(void) {
    sigset_t all;
    sigfillset(&all);
    sigdelset(&all, SIGALRM);
    for (;;) sigsuspend(&all);
}

static void spins(void) {
    volatile int forever = 1;
    while (forever) {}
}

static void last_words(int number) {
    static const char text[] = "the last words\n";
    if (write(1, text, sizeof text - 1) > 0) signal(number, SIG_DFL);
    raise(number);
}

static void ignores_the_alarm(void) {
    signal(SIGALRM, SIG_IGN);
    signal(SIGABRT, last_words);
    for (;;) pause();
}

static void stops(void) {
    for (;;) raise(SIGSTOP);
}

static void aborts(void) { abort(); }
static void exits_early(void) { exit(0); }
static void exits_with_66(void) { exit(66); }
static void skips(void) { TEST_SKIP("because it is told to"); }

static void skips_after_a_failure(void) {
    CHECK(false);
    TEST_SKIP("too late");
}

static void *frees_it(void *memory) {
    test_memory_free(memory);
    return NULL;
}

/* On another thread, and for any size of the same power of two. */
static void hands_out_what_was_freed_last(void) {
    char *first = (char *)test_memory(8, 65), *second = (char *)test_memory(8, 65);
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, frees_it, first) == 0);
    pthread_join(thread, NULL);
    CHECK(TEST_SANITIZED || test_memory(64, 128) == first);
    test_memory_free(second);
}

static void frees_twice(void) {
    void *memory = test_memory(8, 24);
    test_memory_free(memory);
    test_memory_free(memory);
}

static void writes_what_it_freed(void) {
    char *memory = (char *)test_memory(8, 24);
    test_memory_free(memory);
    memory[7] = 1;
    CHECK(test_memory(8, 24) == memory);
}

static void shows_its_seed(void) {
    printf("seed of the test %llu\n", (unsigned long long)test_seed());
}

TEST_TABLE(self) {
    TEST_CASE(passes),
    TEST_CASE(check_on_a_thread),
    TEST_CASE(require_on_a_thread),
    TEST_CASE(check_in_a_fork),
    TEST_CASE(fails_beside_a_pause),
    TEST_CASE(check_goes_on),
    TEST_CASE(require_leaves),
    TEST_CASE(check_a_million_times),
    TEST_CASE(hangs),
    TEST_CASE(spins),
    TEST_CASE(ignores_the_alarm),
    TEST_CASE(stops),
    TEST_CASE(aborts),
    TEST_CASE(exits_early),
    TEST_CASE(exits_with_66),
    TEST_CASE(skips),
    TEST_CASE(skips_after_a_failure),
    TEST_CASE(shows_its_seed),
    TEST_CASE(fails_once),
    TEST_CASE(hands_out_what_was_freed_last),
    TEST_CASE(frees_twice),
    TEST_CASE(writes_what_it_freed),
    TEST_END,
};

static const char *const clocks[] = { "self.check_", "self.fails_beside_", NULL };

int main(int argc, char **argv) {
    const test_module modules[] = { { "self", test_table_self }, { "gone", NULL } };
    return test_main(argc, argv, modules, 2, clocks);
}
