/* peer_python.h - a Python that runs what it is told: asked over two pipes, times itself.

   The script's first line tells the versions of what it has. Then each line it reads is OPERATION
   REPEATS PATH, and its answer the nanoseconds of one repetition, or ! and why there are none. */
#ifndef PEER_PYTHON_H_INCLUDED
#define PEER_PYTHON_H_INCLUDED

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct peer_python {
    FILE *to;
    FILE *from;
    char versions[128]; /* "numpy 2.1.0, spdl 0.8.0"; empty: not there */
} peer_python;

static inline bool peer_python_spawn(peer_python *p, const char *python, const char *script) {
    int to[2];
    int from[2];
    pid_t child;
    if (pipe(to) != 0 || pipe(from) != 0) return false;
    child = fork();
    if (child == 0) {
        if (dup2(to[0], 0) < 0 || dup2(from[1], 1) < 0) _exit(127);
        close(to[1]);
        close(from[0]);
        execlp(python, python, script, (char *)NULL);
        _exit(127);
    }
    close(to[0]);
    close(from[1]);
    p->to = fdopen(to[1], "w");
    p->from = fdopen(from[0], "r");
    return child > 0 && p->to != NULL && p->from != NULL;
}

/* Starts the script, which ends when the pipe does, with this process. */
static inline void peer_python_begin(peer_python *p, const char *python, const char *script) {
    memset(p, 0, sizeof *p);
    if (!peer_python_spawn(p, python, script) ||
        fgets(p->versions, sizeof p->versions, p->from) == NULL) {
        p->versions[0] = '\0';
    }
    p->versions[strcspn(p->versions, "\n")] = '\0';
}

/* The answer; false when it could not be done, which is said. */
static inline bool peer_python_ask(peer_python *p, const char *operation, int repeats,
                                   const char *path, char *answer, int bytes) {
    fprintf(p->to, "%s %d %s\n", operation, repeats, path);
    fflush(p->to);
    if (fgets(answer, bytes, p->from) == NULL) snprintf(answer, (size_t)bytes, "!it ended\n");
    if (answer[0] != '!') return true;
    fprintf(stderr, "peer %s: %s", operation, answer + 1);
    return false;
}

/* Nanoseconds of one repetition; below zero when it could not be done. */
static inline double peer_python_ns(peer_python *p, const char *operation, int repeats,
                                    const char *path) {
    char line[512];
    return peer_python_ask(p, operation, repeats, path, line, sizeof line) ? atof(line) : -1;
}

#endif /* PEER_PYTHON_H_INCLUDED */
