/* thread.h - what examples take from the system, POSIX or Windows: threads, the terminal. */
#ifndef EXAMPLE_THREAD_H
#define EXAMPLE_THREAD_H

#include <stdbool.h>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#include <io.h>

typedef struct thread {
    void *(*run)(void *arg);
    void *arg, *handle;
} thread;

static inline DWORD WINAPI thread_main(void *of) {
    ((thread *)of)->run(((thread *)of)->arg);
    return 0;
}

/* *t stays in place until thread_join. */
static inline bool thread_start(thread *t, void *(*run)(void *arg), void *arg) {
    t->run = run;
    t->arg = arg;
    t->handle = CreateThread(NULL, 0, thread_main, t, 0, NULL);
    return t->handle != NULL;
}

static inline void thread_join(thread *t) {
    WaitForSingleObject(t->handle, INFINITE);
    CloseHandle(t->handle);
}

static inline void thread_sleep_ms(int ms) { Sleep((DWORD)ms); }

static inline bool shows_stderr(void) { return _isatty(2) != 0; }
#else
#include <poll.h>
#include <pthread.h>
#include <unistd.h>

typedef pthread_t thread;

static inline bool thread_start(thread *t, void *(*run)(void *arg), void *arg) {
    return pthread_create(t, NULL, run, arg) == 0;
}

static inline void thread_join(thread *t) { pthread_join(*t, NULL); }
static inline void thread_sleep_ms(int ms) { poll(NULL, 0, ms); }
static inline bool shows_stderr(void) { return isatty(2) != 0; }
#endif

#endif /* EXAMPLE_THREAD_H */
