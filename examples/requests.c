/* requests.c - requests to a service that loses some: 64 are under way on one worker, each has a
   deadline, and is tried again when that has passed. The answers come in order. A thread with the
   requests that are under way is the timer. Here it plays the service, too, which answers after 1
   to 5 ms, or never.

   Build:  cc -O2 -I. examples/requests.c -o requests -lpthread
   Run:    ./requests [REQUESTS] */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include "thread.h"
#include <stdio.h>
#include <stdlib.h>

enum { AT_ONCE = 64, TRIES = 8, DEADLINE_MS = 20 };

typedef struct Request {
    uint64_t number, answer_ns, deadline_ns; /* answer_ns: when the service answers this try */
    int tries;
    spdl_deferred call;
    struct Request *next;
} Request;

static spdl_ring *sent; /* from the stage to the timer */
static long again;

/* Sends a try: the service loses every 11th. */
static void send_request(Request *r) {
    const uint64_t now = spdl_time_ns(), dice = r->number * 31 + (uint64_t)r->tries++ * 17;
    r->answer_ns = dice % 11 == 0 ? UINT64_MAX : now + (1 + dice % 5) * 1000000;
    r->deadline_ns = now + DEADLINE_MS * 1000000;
}

SPDL_FN(request, spdl_index, Request) {
    Request *r = calloc(1, sizeof *r);
    if (r == NULL) return SPDL_E_NOMEM;
    r->number = in->index;
    r->call = spdl_defer(task);
    send_request(r);
    if (spdl_ring_try_push(sent, &r) != SPDL_OK) return free(r), SPDL_E_LIMIT; /* it has room */
    return SPDL_PENDING; /* the worker is free */
}

/* Whether a request is over: it was answered, or its last deadline has passed. */
static bool settle(Request *r) {
    const uint64_t now = spdl_time_ns();
    if (now >= r->answer_ns) {
        spdl_complete(r->call, SPDL_OK, r);
        return true;
    }
    if (now < r->deadline_ns) return false;
    if (r->tries < TRIES) {
        send_request(r);
        again++;
        return false;
    }
    spdl_complete_fail(r->call, "request %d: no answer after %d tries", (int)r->number, r->tries);
    free(r);
    return true;
}

static void *timer(void *arg) {
    Request *under_way[AT_ONCE];
    spdl_result result = SPDL_OK;
    int count = 0, i;
    while (result != SPDL_CLOSED) {
        while (count < AT_ONCE &&
               (result = spdl_ring_try_pop(sent, &under_way[count])) == SPDL_OK) count++;
        for (i = 0; i < count;) /* another one takes the place of one that is over */
            if (settle(under_way[i])) under_way[i] = under_way[--count];
            else i++;
        thread_sleep_ms(1);
    }
    return arg;
}

int main(int argc, char **argv) {
    const uint64_t count = argc > 1 ? strtoull(argv[1], NULL, 10) : 2000;
    uint64_t got = 0;
    spdl_ring_desc desc = { .capacity = AT_ONCE };
    int bad;
    Request *r;
    thread clock;
    spdl_pipeline *p;
    if (spdl_ring_create(&sent, &desc) != SPDL_OK || !thread_start(&clock, timer, NULL)) return 1;
    if (spdl_pipeline_create(&p, &(spdl_pipeline_desc){ .workers = 1 }, SPDL_STAGES(
            SPDL_COUNT(count),
            SPDL_PIPE(request, .concurrency = AT_ONCE, .free_item = free, .deferred = true),
            SPDL_SINK(AT_ONCE))) != SPDL_OK) return 1;
    for (; SPDL_NEXT(p, &r, SPDL_FOREVER) == SPDL_OK; free(r))
        if (r->number != got++) puts("out of order");
    bad = spdl_pipeline_failed(p);
    if (bad) puts(spdl_pipeline_error(p)->text);
    spdl_pipeline_destroy(p); /* waits for the calls that are under way */
    spdl_ring_close(sent);
    thread_join(&clock);
    spdl_ring_destroy(sent, NULL, NULL);
    printf("%d answers; %s\n", (int)got, again > 0 ? "some took another try" : "each at once");
    return bad || got != count;
}
