/* test_windows.h - what tests take from POSIX and Windows has not: a call skips the test and says
   what it needs. And a few that Windows has under another name. Included by test.h. */
#ifndef TEST_WINDOWS_H_INCLUDED
#define TEST_WINDOWS_H_INCLUDED

#include <direct.h>
#include <errno.h>
#include <fcntl.h>
#include <io.h>
#include <process.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>

#ifdef __cplusplus
extern "C" {
#endif
void test_skip(const char *why) __attribute__((noreturn));
#ifdef __cplusplus
}
#endif

#define mkdir(path, mode) _mkdir(path)
#define ftruncate(file, bytes) _chsize_s((file), (bytes))
#define pipe(ends) _pipe((ends), 65536, _O_BINARY)

/* Processes. */

#define getpid _getpid
#define WNOHANG 1
#define WIFEXITED(status) ((status) == 0)
#define WIFSIGNALED(status) ((status) != 0)
#define WEXITSTATUS(status) (status)
#define WTERMSIG(status) (status)
#define fork() test_fork() /* gcc knows a fork itself */
static inline int test_fork(void) { test_skip("Windows has no fork"); }
static inline pid_t waitpid(pid_t child, int *status, int how) {
    (void)child, (void)status, (void)how;
    test_skip("Windows has no waitpid");
}

/* Signals: sigaction comes first, and skips. */
enum { SIGHUP = 1, SIGQUIT = 3, SIGBUS = 7, SIGKILL = 9, SIGUSR1, SIGUSR2 = 12, SIGPIPE, SIGALRM };
enum { SIGCHLD = 17, SIGXFSZ = 25, SIGPROF = 27, SIGWINCH, SIGTRAP = 5 };
enum { SIG_BLOCK, SIG_UNBLOCK, SIG_SETMASK };
typedef struct sigset_of_test { int none; } sigset_of_test;
#define sigset_t sigset_of_test
struct sigaction {
    void (*sa_handler)(int);
    sigset_t sa_mask;
    int sa_flags;
};
static inline int sigaction(int number, const struct sigaction *is, struct sigaction *was) {
    (void)number, (void)is, (void)was;
    test_skip("Windows has no signals");
}
#define sigemptyset(set) ((void)((set)->none = 0))
#define sigaddset(set, number) ((void)((set)->none = (number)))
#define sigismember(set, number) ((set)->none == (number))
#undef pthread_sigmask
#define pthread_sigmask(how, set, was) kill(0, 0)
#define pthread_kill(thread, number) ((void)(thread))
#define pthread_self() NULL
#define pthread_equal(a, b) ((a) == (b))
static inline int kill(pid_t process, int number) {
    (void)process, (void)number;
    test_skip("Windows has no signals");
}

/* Files. */
enum { O_NONBLOCK = 0, O_NOCTTY = 0, F_SETFL = 0 };
static inline int fcntl(int file, int what, int more) {
    (void)file, (void)what, (void)more;
    test_skip("Windows has no fcntl");
}
static inline int posix_openpt(int how) {
    (void)how;
    test_skip("Windows has no terminals to write to");
}
#define grantpt(file) 0
#define unlockpt(file) 0
#define ptsname(file) ""
static inline int symlink(const char *to, const char *at) {
    (void)to, (void)at;
    test_skip("Windows has no links for everybody");
}
static inline int mkfifo(const char *path, int mode) {
    (void)path, (void)mode;
    test_skip("Windows has no pipes in folders");
}

static inline int truncate(const char *path, int64_t bytes) {
    (void)path, (void)bytes;
    test_skip("Windows truncates no file that is open elsewhere");
}

/* Limits. */
typedef unsigned long long rlim_t;
#define RLIM_INFINITY (~0ull)
enum { RLIMIT_FSIZE = 1, RLIMIT_NOFILE };
struct rlimit {
    rlim_t rlim_cur, rlim_max;
};
static inline int setrlimit(int what, const struct rlimit *limit) {
    (void)what, (void)limit;
    test_skip("Windows has no setrlimit");
}
#define getrlimit(what, limit) setrlimit((what), (limit))

#endif
