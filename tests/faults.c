/* Faults of the system: tests/torture_faults.py gives these names to the calls of the library's
   object. FAULT=CLASS:K:once lets call K of a class fail, FAULT=CLASS:K:on that one and all behind
   it; FAULT_COUNT=FILE writes how many calls there were of each class. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef enum fault_class {
    MEMORY, THREADS, ATTRIBUTES, FUTEX, SYSCALLS, MAPS, OPENS, READS, WRITES, FILES, STATS, FORKS,
    SYSCONF, SIGNALS, CLASSES
} fault_class;

static const char *const names[CLASSES] = { "memory", "threads", "attributes", "futex", "syscalls",
                                            "maps", "opens", "reads", "writes", "files", "stats",
                                            "forks", "sysconf", "signals" };
static long counts[CLASSES];
static int which = -1;
static long from;
static int goes_on;

static void tell_counts(void) {
    long all = 0;
    FILE *file;
    for (int i = 0; i < CLASSES; ++i) all += counts[i];
    if (all == 0) return; /* this process only starts another one */
    file = fopen(getenv("FAULT_COUNT"), "w");
    for (int i = 0; file != NULL && i < CLASSES; ++i)
        fprintf(file, "%s %ld\n", names[i], __atomic_load_n(&counts[i], __ATOMIC_RELAXED));
    if (file != NULL) fclose(file);
}

__attribute__((constructor)) static void begin(void) {
    const char *fault = getenv("FAULT");
    char name[20] = "", mode[8] = "";
    if (getenv("FAULT_COUNT") != NULL) atexit(tell_counts);
    if (fault == NULL || sscanf(fault, "%19[a-z]:%ld:%7s", name, &from, mode) != 3) return;
    for (int i = 0; i < CLASSES; ++i)
        if (strcmp(name, names[i]) == 0) which = i;
    goes_on = strcmp(mode, "on") == 0;
}

/* Whether this call fails. */
static int strikes(fault_class of) {
    const long number = __atomic_add_fetch(&counts[of], 1, __ATOMIC_RELAXED);
    if (of == FUTEX && goes_on && number % 2 == 0) return 0; /* else every sleep is a loop */
    return which == (int)of && (goes_on ? number >= from : number == from);
}

static int fails(fault_class of, int error) {
    if (!strikes(of)) return 0;
    errno = error;
    return 1;
}

void *fault_malloc(size_t bytes) { return fails(MEMORY, ENOMEM) ? NULL : malloc(bytes); }

int fault_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*entry)(void *),
                         void *arg) {
    return strikes(THREADS) ? EAGAIN : pthread_create(thread, attr, entry, arg);
}

int fault_pthread_attr_init(pthread_attr_t *attr) {
    return strikes(ATTRIBUTES) ? ENOMEM : pthread_attr_init(attr);
}

int fault_pthread_attr_setstacksize(pthread_attr_t *attr, size_t bytes) {
    return strikes(ATTRIBUTES) ? EINVAL : pthread_attr_setstacksize(attr, bytes);
}

/* A wait for a futex ends early or is interrupted; a wake never fails. Others are not there. */
long fault_syscall(long number, ...) {
    long a[6];
    va_list args;
    va_start(args, number);
    for (int i = 0; i < 6; ++i) a[i] = va_arg(args, long);
    va_end(args);
    if (number == SYS_futex && (a[1] & FUTEX_CMD_MASK) == FUTEX_WAKE) {
        return syscall(number, a[0], a[1], a[2]);
    } else if (number == SYS_futex) {
        const int early = counts[FUTEX] % 3; /* 0: woken for nothing */
        if (fails(FUTEX, early == 1 ? EINTR : EAGAIN)) return early == 0 ? 0 : -1;
    } else if (fails(SYSCALLS, ENOSYS)) {
        return -1;
    }
    return syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

void *fault_mmap(void *at, size_t bytes, int may, int flags, int file, off_t offset) {
    return fails(MAPS, ENOMEM) ? MAP_FAILED : mmap(at, bytes, may, flags, file, offset);
}

int fault_open(const char *path, int flags, ...) {
    mode_t mode = 0;
    va_list args;
    va_start(args, flags);
    if (flags & O_CREAT) mode = va_arg(args, mode_t);
    va_end(args);
    return fails(OPENS, EMFILE) ? -1 : open(path, flags, mode);
}

DIR *fault_opendir(const char *path) { return fails(OPENS, EMFILE) ? NULL : opendir(path); }

ssize_t fault_read(int file, void *to, size_t bytes) {
    return fails(READS, EIO) ? -1 : read(file, to, bytes);
}

ssize_t fault_pread(int file, void *to, size_t bytes, off_t at) {
    return fails(READS, EIO) ? -1 : pread(file, to, bytes, at);
}

ssize_t fault_write(int file, const void *from_, size_t bytes) {
    return fails(WRITES, ENOSPC) ? -1 : write(file, from_, bytes);
}

int fault_ftruncate(int file, off_t bytes) {
    return fails(FILES, ENOSPC) ? -1 : ftruncate(file, bytes);
}

int fault_posix_fallocate(int file, off_t at, off_t bytes) {
    return strikes(FILES) ? ENOSPC : posix_fallocate(file, at, bytes);
}

int fault_fstat(int file, struct stat *to) { return fails(STATS, EIO) ? -1 : fstat(file, to); }

int fault_stat(const char *path, struct stat *to) {
    return fails(STATS, EACCES) ? -1 : stat(path, to);
}

int fault_getrusage(int who, struct rusage *to) {
    return fails(STATS, EINVAL) ? -1 : getrusage(who, to);
}

pid_t fault_fork(void) { return fails(FORKS, EAGAIN) ? -1 : fork(); }
long fault_sysconf(int name) { return fails(SYSCONF, EINVAL) ? -1 : sysconf(name); }

int fault_sigaction(int number, const struct sigaction *now, struct sigaction *before) {
    return fails(SIGNALS, EINVAL) ? -1 : sigaction(number, now, before);
}
