/* peer_http.h - pages over HTTP for bench_peers: a server in a process of its own, which answers
   each request 5 ms late on connections that it keeps, and a client of many requests at a time in
   one thread (libcurl's multi interface). */
#ifndef PEER_HTTP_H_INCLUDED
#define PEER_HTTP_H_INCLUDED

#include "bench.h"
#include "peer_work.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

enum { HTTP_LATE_NS = 5000000, HTTP_WAITING = 4096 };

/* ---- the server: one thread ---- */

typedef struct http_answer {
    int to;
    uint64_t number, due_ns;
} http_answer;

typedef struct http_server {
    pid_t pid;
    int port;
} http_server;

/* Requests come whole: they are short. */
static inline bool http_read(int from, http_answer *answer) {
    char text[2048];
    const ssize_t bytes = recv(from, text, sizeof text - 1, 0);
    if (bytes <= 0) return false;
    text[bytes] = '\0';
    answer->to = from;
    answer->number = strtoull(text + strlen("GET /"), NULL, 10);
    answer->due_ns = bench_ns() + HTTP_LATE_NS;
    return true;
}

static inline void http_write(const http_answer *answer) {
    static char reply[256 + PEER_PAGE_BYTES];
    const int head =
        snprintf(reply, 256, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n", PEER_PAGE_BYTES);
    char *at = reply;
    ssize_t left = head + PEER_PAGE_BYTES, put = 0;
    uint64_t page[PEER_PAGE_BYTES / 8];
    peer_page(answer->number, page);
    memcpy(reply + head, page, sizeof page);
    for (; left > 0 && (put = send(answer->to, at, (size_t)left, MSG_NOSIGNAL)) > 0; left -= put) {
        at += put;
    }
}

static inline void http_accept(int poll, int listener) {
    const int on = 1, socket = accept(listener, NULL, NULL);
    struct epoll_event event = { .events = EPOLLIN, .data = { .fd = socket } };
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    epoll_ctl(poll, EPOLL_CTL_ADD, socket, &event);
}

static inline void http_serve(int listener, pid_t parent) {
    static http_answer waiting[HTTP_WAITING];
    struct epoll_event event[64] = { { .events = EPOLLIN, .data = { .fd = listener } } };
    const int poll = epoll_create1(0);
    uint64_t head = 0, tail = 0;
    epoll_ctl(poll, EPOLL_CTL_ADD, listener, event);
    while (getppid() == parent) {
        const uint64_t now = bench_ns();
        int count, wait = 1000;
        while (head < tail && waiting[head % HTTP_WAITING].due_ns <= now) {
            http_write(&waiting[head++ % HTTP_WAITING]);
        }
        if (head < tail) wait = (int)((waiting[head % HTTP_WAITING].due_ns - now) / 1000000) + 1;
        count = epoll_wait(poll, event, 64, wait);
        for (int i = 0; i < count; ++i) {
            if (event[i].data.fd == listener) http_accept(poll, listener);
            else if (http_read(event[i].data.fd, &waiting[tail % HTTP_WAITING])) ++tail;
            else close(event[i].data.fd);
        }
    }
    _exit(0);
}

static inline http_server http_begin(void) {
    struct sockaddr_in at = { .sin_family = AF_INET };
    socklen_t bytes = sizeof at;
    const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const pid_t parent = getpid();
    http_server server = { 0, 0 };
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    BENCH_CHECK(bind(listener, (struct sockaddr *)&at, bytes) == 0 && listen(listener, 512) == 0);
    BENCH_CHECK(getsockname(listener, (struct sockaddr *)&at, &bytes) == 0);
    server.port = ntohs(at.sin_port);
    server.pid = fork();
    if (server.pid == 0) http_serve(listener, parent);
    close(listener);
    return server;
}

static inline void http_end(const http_server *server) {
    if (server->pid <= 0) return;
    kill(server->pid, SIGKILL);
    waitpid(server->pid, NULL, 0);
}

/* CPU time of the server so far: a part of the bench. */
static inline double http_cpu_ns(const http_server *server) {
    struct timespec used = { 0, 0 };
    clockid_t its;
    if (server->pid <= 0 || clock_getcpuclockid(server->pid, &its) != 0) return 0;
    clock_gettime(its, &used);
    return (double)used.tv_sec * 1e9 + (double)used.tv_nsec;
}

/* ---- the client ---- */

#if __has_include(<curl/curl.h>)
#include <curl/curl.h>
#define PEER_CURL 1

enum { HTTP_MOST = 512 };

typedef struct http_page {
    uint64_t number;
    char *data, *at;
    spdl_deferred call; /* of ours */
} http_page;

typedef struct http_client {
    CURLM *multi;
    CURL *idle[HTTP_MOST];
    int idle_count, in_flight, port;
    void (*end)(void *ctx, http_page *page);
    void *ctx;
} http_client;

static inline size_t http_keep(char *data, size_t size, size_t n, void *user) {
    http_page *page = (http_page *)user;
    if (size * n > PEER_PAGE_BYTES - (size_t)(page->at - page->data)) return 0;
    memcpy(page->at, data, size * n);
    page->at += size * n;
    return size * n;
}

static inline void http_client_open(http_client *c, int port) {
    memset(c, 0, sizeof *c);
    c->multi = curl_multi_init();
    c->port = port;
    curl_multi_setopt(c->multi, CURLMOPT_MAXCONNECTS, (long)HTTP_MOST);
}

static inline void http_client_close(http_client *c) {
    while (c->idle_count > 0) curl_easy_cleanup(c->idle[--c->idle_count]);
    curl_multi_cleanup(c->multi);
}

static inline void http_get(http_client *c, http_page *page) {
    CURL *easy = c->idle_count > 0 ? c->idle[--c->idle_count] : curl_easy_init();
    char url[64];
    snprintf(url, sizeof url, "http://127.0.0.1:%d/%llu", c->port,
             (unsigned long long)page->number);
    page->at = page->data;
    c->in_flight++;
    curl_easy_setopt(easy, CURLOPT_URL, url);
    curl_easy_setopt(easy, CURLOPT_PRIVATE, page);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, page);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, http_keep);
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_multi_add_handle(c->multi, easy);
}

/* Calls end(page) for all that have come. */
static inline void http_run(http_client *c) {
    CURLMsg *message;
    http_page *page;
    int left;
    curl_multi_perform(c->multi, &left);
    while ((message = curl_multi_info_read(c->multi, &left)) != NULL) {
        CURL *easy = message->easy_handle;
        BENCH_CHECK(message->data.result == CURLE_OK);
        curl_easy_getinfo(easy, CURLINFO_PRIVATE, (char **)&page);
        curl_multi_remove_handle(c->multi, easy);
        c->idle[c->idle_count++] = easy;
        c->in_flight--;
        c->end(c->ctx, page);
    }
}
#else
#define PEER_CURL 0
#endif

#endif /* PEER_HTTP_H_INCLUDED */
