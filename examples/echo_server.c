/* echo_server.c - a server on one thread that never waits in push or next. Requests come from a
   Unix socket, workers answer them, and epoll waits for all that can happen. While the feed is full
   the server does not read the socket: its buffer fills, and the client waits (back-pressure).
   `ready` wakes the server if there is an answer to send, or after SPDL_FULL room to push. Nine of
   ten requests are notes without an answer: for those only the call for room comes.

   Needs:  Linux (epoll, eventfd)
   Build:  cc -O2 -I. examples/echo_server.c -o echo_server -lpthread
   Run:    ./echo_server */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include "thread.h"
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

enum { REQUESTS = 2000, REFUSED = -1 };
typedef struct Request { int number, answer; } Request;

SPDL_FN(answer, Request, Request) {
    const uint64_t end = spdl_time_ns() + 20000; /* some work */
    while (spdl_time_ns() < end) {}
    if (in->number % 10 != 0) return SPDL_SKIP;
    if (in->number % 40 == 0) return spdl_fail(task, "request %d is bad", in->number);
    in->answer = 2 * in->number;
    *out = in;
    return SPDL_OK;
}

static void ready(void *event) { /* on any thread: it only wakes the server */
    const uint64_t one = 1;
    if (write(*(int *)event, &one, sizeof one) < 0) {} /* full: it is readable */
}

typedef struct Server {
    spdl_pipeline *p;
    int socket, event;
    Request *in, *out; /* that wait for room in the feed, and in the socket; or NULL */
    bool ended;        /* the client sends no more */
} Server;

/* Pushes until the feed is full, or there is no request. */
static void take_requests(Server *s) {
    for (;; s->in = NULL) {
        if (s->in == NULL) {
            Request got;
            const ssize_t bytes = s->ended ? -1 : recv(s->socket, &got, sizeof got, MSG_DONTWAIT);
            if (bytes == 0) s->ended = true, (void)spdl_pipeline_push_end(s->p);
            if (bytes <= 0) return; /* epoll reports the next one */
            if ((s->in = malloc(sizeof got)) == NULL) exit(1);
            *s->in = got;
        }
        if (spdl_pipeline_push(s->p, s->in, 0) != SPDL_OK) return; /* `ready` reports room */
    }
}

/* Sends until there is no answer, or the client does not read. */
static spdl_result send_answers(Server *s) {
    for (;; free(s->out), s->out = NULL) {
        if (s->out == NULL) {
            const spdl_result result = SPDL_NEXT(s->p, &s->out, 0);
            if (result == SPDL_E_STAGE) s->out->answer = REFUSED; /* of one request */
            else if (result != SPDL_OK) return result; /* `ready` reports the next answer */
        }
        if (send(s->socket, s->out, sizeof *s->out, MSG_DONTWAIT) < 0) return SPDL_TIMEOUT;
    }
}

static int answers, refusals; /* of the client */

static bool read_answer(int socket, int flags) {
    Request r;
    if (recv(socket, &r, sizeof r, flags) != sizeof r) return false;
    return ++*(r.answer == REFUSED ? &refusals : &answers) > 0;
}

static void *client(void *arg) {
    const int socket = *(int *)arg;
    for (Request r = { 1, 0 }; r.number <= REQUESTS; r.number++) {
        if (send(socket, &r, sizeof r, 0) < 0) break;
        while (read_answer(socket, MSG_DONTWAIT)) {}
    }
    shutdown(socket, SHUT_WR);
    while (read_answer(socket, 0)) {}
    return NULL;
}

int main(void) {
    int ends[2];
    thread other;
    uint64_t count;
    Server s = { .event = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC) };
    const int poller = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = { .events = EPOLLIN };
    const spdl_pipeline_desc desc = { .workers = 2, .deliver_failures = true, .ready_fn = ready,
                                      .ready_user = &s.event };
    if (spdl_pipeline_create(&s.p, &desc, SPDL_STAGES(
            SPDL_FEED(Request, .buffer_size = 8, .free_item = free),
            SPDL_PIPE(answer, .concurrency = 2), SPDL_SINK(8))) != SPDL_OK) return 1;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) != 0 || /* packets stay whole */
        epoll_ctl(poller, EPOLL_CTL_ADD, s.event, &event) != 0 ||
        epoll_ctl(poller, EPOLL_CTL_ADD, s.socket = ends[0], &event) != 0 ||
        !thread_start(&other, client, &ends[1])) return perror("echo_server"), 1;
    for (;; (void)epoll_wait(poller, &event, 1, -1)) {
        if (read(s.event, &count, sizeof count) < 0) {} /* clears it before push and next */
        take_requests(&s);
        if (send_answers(&s) != SPDL_TIMEOUT) break;
        event.events = (s.in == NULL && !s.ended ? EPOLLIN : 0) | (s.out != NULL ? EPOLLOUT : 0);
        (void)epoll_ctl(poller, EPOLL_CTL_MOD, s.socket, &event);
    }
    close(s.socket);
    thread_join(&other);
    spdl_pipeline_destroy(s.p);
    printf("%d answers, %d requests refused, the others were notes\n", answers, refusals);
    return answers != 150 || refusals != 50;
}
