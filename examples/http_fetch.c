/* http_fetch.c - up to 256 HTTP requests in flight from a pipeline with one worker. Its stage only
   announces that a call will be completed later (spdl_defer) and hands the request to a thread that
   runs libcurl's multi interface, which keeps connections, repeats what fails and completes calls.
   Fetches PREFIX0, PREFIX1, ... and compares with one request at a time.

   Needs:  apt-get install libcurl4-openssl-dev
   Build:  cc -O2 -I. examples/http_fetch.c -o http_fetch -lpthread -lcurl
   Run:    ./http_fetch PREFIX COUNT */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <curl/curl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { IN_FLIGHT = 256, TIMEOUT_MS = 500, TRIES = 3 };

typedef struct {
    char url[256], body[1024];
    size_t bytes;
    int tries;
    spdl_deferred call;
} Page;

/* Only its own thread touches `multi`, but for waking it up. */
typedef struct {
    CURLM *multi;
    spdl_ring *pages; /* to be fetched */
    pthread_t thread;
    CURL *idle[IN_FLIGHT];
    int idle_count, in_flight, repeats, timeouts;
} Client;
typedef struct { const char *prefix; uint64_t count; } List;

SPDL_FN(next_page, void, Page) {
    const List *list = (const List *)spdl_ctx(task);
    if (spdl_sequence(task) == list->count) return SPDL_END;
    if ((*out = (Page *)calloc(1, sizeof **out)) == NULL) return SPDL_E_NOMEM;
    snprintf((*out)->url, sizeof (*out)->url, "%s%" PRIu64, list->prefix, spdl_sequence(task));
    return SPDL_OK;
}

SPDL_FN(fetch, Page, Page) {
    Client *client = (Client *)spdl_ctx(task);
    in->call = spdl_defer(task);
    if (spdl_ring_try_push(client->pages, &in) != SPDL_OK) return spdl_fail(task, "no client");
    curl_multi_wakeup(client->multi);
    return SPDL_PENDING;
}

static size_t keep(char *data, size_t size, size_t n, void *user) {
    Page *page = (Page *)user;
    if (size * n > sizeof page->body - page->bytes) return 0; /* too long: curl says so */
    memcpy(page->body + page->bytes, data, size * n);
    page->bytes += size * n;
    return size * n;
}

static void begin(Client *client, Page *page) {
    CURL *easy = client->idle_count ? client->idle[--client->idle_count] : curl_easy_init();
    page->bytes = 0;
    page->tries++;
    client->in_flight++;
    curl_easy_setopt(easy, CURLOPT_URL, page->url);
    curl_easy_setopt(easy, CURLOPT_PRIVATE, page);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, page);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, keep);
    curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, (long)TIMEOUT_MS);
    curl_easy_setopt(easy, CURLOPT_FAILONERROR, 1L); /* 400 and more */
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_multi_add_handle(client->multi, easy);
}

/* A request has ended, well or not. After spdl_complete the page is the pipeline's. */
static void end(Client *client, CURL *easy, CURLcode code) {
    Page *page;
    curl_easy_getinfo(easy, CURLINFO_PRIVATE, (char **)&page);
    curl_multi_remove_handle(client->multi, easy);
    client->idle[client->idle_count++] = easy;
    client->in_flight--;
    client->timeouts += code == CURLE_OPERATION_TIMEDOUT;
    if (code == CURLE_OK) {
        spdl_complete(page->call, SPDL_OK, page);
    } else if (page->tries < TRIES) {
        client->repeats++;
        begin(client, page);
    } else {
        spdl_complete_fail(page->call, "%s: %s, %d times", page->url, curl_easy_strerror(code),
                           page->tries);
    }
}

static void *run_client(void *arg) {
    Client *client = (Client *)arg;
    for (spdl_result result;;) {
        CURLMsg *message;
        Page *page;
        int left;
        while ((result = spdl_ring_try_pop(client->pages, &page)) == SPDL_OK) begin(client, page);
        curl_multi_perform(client->multi, &left);
        while ((message = curl_multi_info_read(client->multi, &left)) != NULL)
            end(client, message->easy_handle, message->data.result);
        if (result == SPDL_CLOSED && client->in_flight == 0) break; /* no wakeup would follow */
        curl_multi_poll(client->multi, NULL, 0, 1000, NULL);
    }
    while (client->idle_count) curl_easy_cleanup(client->idle[--client->idle_count]);
    return NULL;
}

static bool client_open(Client *client) {
    const spdl_ring_desc desc = { .capacity = IN_FLIGHT };
    client->multi = curl_multi_init();
    if (!client->multi || spdl_ring_create(&client->pages, &desc) != SPDL_OK) return false;
    curl_multi_setopt(client->multi, CURLMOPT_MAXCONNECTS, (long)IN_FLIGHT); /* that are kept */
    return pthread_create(&client->thread, NULL, run_client, client) == 0;
}

static void client_close(Client *client) {
    spdl_ring_close(client->pages);
    curl_multi_wakeup(client->multi);
    pthread_join(client->thread, NULL);
    curl_multi_cleanup(client->multi);
    spdl_ring_destroy(client->pages, NULL, NULL);
}

/* Returns pages per second, 0 when not one came. */
static double fetch_all(Client *client, List list, int in_flight) {
    static spdl_stats stats;
    uint64_t pages = 0;
    spdl_pipeline *p;
    void *page;
    if (spdl_pipeline_create(&p, &(spdl_pipeline_desc){ .workers = 1 }, SPDL_STAGES(
            SPDL_SOURCE(next_page, .ctx = &list, .free_item = free),
            SPDL_PIPE(fetch, .ctx = client, .concurrency = in_flight, .deferred = true,
                      .output_order = SPDL_ORDER_COMPLETION, .max_failures = -1),
            SPDL_SINK(64))) != SPDL_OK) return 0;
    for (; spdl_pipeline_next(p, &page, SPDL_FOREVER) == SPDL_OK; pages++) free(page);
    if (spdl_pipeline_failed(p)) puts(spdl_pipeline_error(p)->text);
    spdl_pipeline_stats(p, &stats);
    spdl_pipeline_destroy(p);
    printf("%3d in flight: %4" PRIu64 " pages, %" PRIu64 " not to be had\n", in_flight, pages,
           stats.stage[1].failures);
    return (double)pages * 1e9 / (double)stats.elapsed_ns;
}

int main(int argc, char **argv) {
    Client client = { .multi = NULL };
    if (argc != 3 || strlen(argv[1]) > 200) return puts("http_fetch PREFIX(<= 200 B) COUNT"), 2;
    if (curl_global_init(CURL_GLOBAL_DEFAULT) || !client_open(&client)) return puts("no curl"), 1;
    const uint64_t count = strtoull(argv[2], NULL, 10);
    const double one = fetch_all(&client, (List){ argv[1], 20 }, 1);
    const double many = fetch_all(&client, (List){ argv[1], count }, IN_FLIGHT);
    client_close(&client);
    curl_global_cleanup();
    printf("%.0f times as many; %d tries were repeated, %d had timed out\n",
           one > 0 ? many / one : 0, client.repeats, client.timeouts);
    return one > 0 && many > 0 ? 0 : 1;
}
