/* event_loop.c - a thread that must not block takes items from a pipeline between its other events.
   It calls next with a timeout of 0. After SPDL_TIMEOUT the library calls `ready` once, when there
   is something: `ready` makes a file descriptor readable, and the loop waits in poll for that one
   and for its own. With libuv write uv_async_send in `ready`, in Qt QMetaObject::invokeMethod with
   Qt::QueuedConnection, in SDL SDL_PushEvent. Those two take a lock: with them do not call
   spdl_pipeline_stop in a signal handler, where `ready` would run.

   Build:  cc -O2 -I. examples/event_loop.c -o event_loop -lpthread
   Run:    ./event_loop */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/eventfd.h>
#endif

enum { ITEMS = 300, TICK_MS = 10 };

/* --- an event that poll can wait for --- */

typedef struct Event { int wait_fd, signal_fd; } Event;

static bool event_open(Event *event) {
#ifdef __linux__
    event->wait_fd = event->signal_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    return event->wait_fd >= 0;
#else
    int ends[2];
    if (pipe(ends) != 0) return false;
    for (int i = 0; i < 2; i++) (void)fcntl(ends[i], F_SETFL, O_NONBLOCK);
    event->wait_fd = ends[0];
    event->signal_fd = ends[1];
    return true;
#endif
}

/* On the thread that made the item: it only wakes the loop. */
static void ready(void *event) {
    const uint64_t one = 1;
    if (write(((Event *)event)->signal_fd, &one, sizeof one) < 0) {} /* full: it is readable */
}

static void event_clear(const Event *event) {
    uint64_t count;
    while (read(event->wait_fd, &count, sizeof count) > 0) {}
}

/* --- what is loaded --- */

SPDL_FN(request, void, uint64_t) {
    if (spdl_sequence(task) == ITEMS) return SPDL_END;
    if ((*out = malloc(sizeof **out)) == NULL) return SPDL_E_NOMEM;
    **out = spdl_sequence(task);
    return SPDL_OK;
}

SPDL_FN(decode, uint64_t, uint64_t) { /* 1 ms of something */
    const uint64_t end = spdl_time_ns() + 1000000;
    while (spdl_time_ns() < end) {}
    *out = in;
    return SPDL_OK;
}

int main(void) {
    Event event;
    spdl_pipeline *p;
    uint64_t *item, taken = 0, longest = 0;
    spdl_result result = SPDL_TIMEOUT;
    int ticks = 0, woken = 0;
    if (!event_open(&event)) return perror("event_loop"), 1;
    const spdl_pipeline_desc desc = { .ready_fn = ready, .ready_user = &event };
    if (spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_SOURCE(request, .free_item = free),
            SPDL_PIPE(decode, .concurrency = SPDL_ALL),
            SPDL_SINK(4))) != SPDL_OK) return 1; /* the log says which row and why */
    for (bool loaded = true; result == SPDL_TIMEOUT; loaded = true) {
        const uint64_t since = spdl_time_ns();
        event_clear(&event); /* before next: a call of `ready` after it is not lost */
        while ((result = SPDL_NEXT(p, &item, 0)) == SPDL_OK) {
            taken += *item == taken;
            free(item);
        }
        if (spdl_time_ns() - since > longest) longest = spdl_time_ns() - since;
        while (result == SPDL_TIMEOUT && loaded) { /* sockets, timers, windows stand here too */
            struct pollfd fds[] = { { .fd = event.wait_fd, .events = POLLIN } };
            const int count = poll(fds, 1, TICK_MS);
            if (count == 0) ticks++; /* the loop's own work */
            else loaded = false;
        }
        woken += !loaded;
    }
    if (spdl_pipeline_failed(p)) puts(spdl_pipeline_error(p)->text);
    spdl_pipeline_destroy(p);
    printf("%d items in order, the loop was woken %d times and ticked %d times; it was never away "
           "for longer than %.1f ms\n", (int)taken, woken, ticks, (double)longest * 1e-6);
    return taken != ITEMS;
}
