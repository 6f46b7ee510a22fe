/* peer_work.c - becomes build/bench/peer_work.so, for bench_peers.c and bench/peer_rows.py. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "peer_work.h"

#include "peer_inflate.h"
#include "pipe.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#if __has_include(<curl/curl.h>) && !defined(PEER_NO_CURL)
#include <curl/curl.h>
#define PEER_CURL 1
#else
#define PEER_CURL 0
#endif
#if __has_include(<jpeglib.h>)
#define PEER_JPEGS 1
const pipe_jpeg_calls *pipe_jpeg_plugin(void);
#else
#define PEER_JPEGS 0
#define pipe_jpeg_plugin() NULL
#endif

enum {
    WIDTH = 500,
    HEIGHT = 375,
    SIDE = 224,
    JPEGS = 64,
    TOKENS = 4 * 1024,
    ALL_TOKENS = 32 << 20,
    TAIL_US = 200,
    IO_US = 200,
    IO_BYTES = 4096,
    TAIL_SLOW = 50,
    TAIL_EACH = 100,
    NPZ_HEAD = 128
};

static struct {
    char folder[512];
    int kind, late_us, port;
    int tokens; /* the file */
    const pipe_jpeg_calls *jpeg;
} with;

static const size_t item_bytes[PEER_KINDS] = { SIDE * SIDE * 3,  PEER_FILE_BYTES,
                                               (TOKENS + 1) * 4, 64,
                                               PEER_PAGE_BYTES,  PEER_ARRAY_BYTES,
                                               PEER_ARRAY_BYTES, IO_BYTES };

size_t peer_item_bytes(void) { return item_bytes[with.kind]; }

int peer_lacks(int kind) {
    if (kind == PEER_JPEG) return !PEER_JPEGS;
    if (kind == PEER_HTTP) return !PEER_CURL;
    return kind == PEER_DEFLATED && !PEER_ZLIB;
}

void peer_open(const char *folder, int kind, int late_us, int port) {
    char path[600];
    snprintf(with.folder, sizeof with.folder, "%s", folder);
    with.kind = kind;
    with.late_us = late_us;
    with.port = port;
    with.jpeg = pipe_jpeg_plugin();
    snprintf(path, sizeof path, "%s/tokens.bin", folder);
    if (with.tokens == 0 && kind == PEER_TOKENS) with.tokens = open(path, O_RDONLY | O_CLOEXEC);
#if PEER_CURL
    if (kind == PEER_HTTP) curl_global_init(CURL_GLOBAL_DEFAULT);
#endif
}

/* ---- what a thread keeps ---- */

enum { FILE_BYTES = 2 * PEER_ARRAY_BYTES, PIXEL_BYTES = PEER_ARRAY_BYTES + 128 };

typedef struct own {
    unsigned char *file;   /* FILE_BYTES */
    unsigned char *pixels; /* PIXEL_BYTES: an image, or an array with its header */
    void *easy;            /* a connection */
#if PEER_ZLIB
    z_stream *stream;
#endif
} own;

static pthread_key_t own_key;
static pthread_once_t own_once = PTHREAD_ONCE_INIT;

static void own_end(void *arg) {
    own *o = (own *)arg;
#if PEER_ZLIB
    if (o->stream != NULL) inflateEnd(o->stream);
    free(o->stream);
#endif
#if PEER_CURL
    if (o->easy != NULL) curl_easy_cleanup(o->easy);
#endif
    free(o->file);
    free(o->pixels);
    free(o);
}

static void own_begin(void) { pthread_key_create(&own_key, own_end); }

static own *own_of_thread(void) {
    own *o;
    pthread_once(&own_once, own_begin);
    o = (own *)pthread_getspecific(own_key);
    if (o != NULL) return o;
    o = (own *)peer_alloc(sizeof *o);
    memset(o, 0, sizeof *o);
    o->file = (unsigned char *)malloc(FILE_BYTES);
    o->pixels = (unsigned char *)malloc(PIXEL_BYTES);
    if (o->file == NULL || o->pixels == NULL) abort();
    pthread_setspecific(own_key, o);
    return o;
}

/* ---- time ---- */

static void compute(double ms) {
    volatile uint64_t x = 1;
    struct timespec begun, now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begun);
    do {
        for (int i = 0; i < 2000; ++i) x = x * 3 + 1;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    } while ((double)(now.tv_sec - begun.tv_sec) * 1e3 +
                 (double)(now.tv_nsec - begun.tv_nsec) * 1e-6 <
             ms);
}

static void *compute_main(void *ms) {
    compute(*(double *)ms);
    return NULL;
}

void peer_step(double ms, int threads) {
    pthread_t helper[64];
    int i;
    if (ms <= 0) return;
    for (i = 1; i < threads; ++i) peer_thread(&helper[i], compute_main, &ms);
    compute(ms);
    while (i > 1) pthread_join(helper[--i], NULL);
}

static void late(void) {
    const struct timespec wait = { 0, with.late_us * 1000L };
    if (with.late_us > 0) nanosleep(&wait, NULL);
}

/* ---- files ---- */

/* Reads up to so many bytes; returns how many, or 0. */
static size_t read_file(const char *path, void *to, size_t most) {
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    size_t got = 0;
    ssize_t more = file >= 0;
    while (more > 0 && got < most) {
        more = read(file, (char *)to + got, most - got);
        if (more > 0) got += (size_t)more;
    }
    if (file >= 0) close(file);
    return more < 0 ? 0 : got;
}

static int write_file(const char *path, const void *from, size_t bytes) {
    FILE *file = fopen(path, "wb");
    const size_t put = file != NULL ? fwrite(from, 1, bytes, file) : 0;
    return file != NULL && fclose(file) == 0 && put == bytes;
}

static void fill(uint64_t number, void *to, size_t bytes) {
    uint64_t *word = (uint64_t *)to;
    size_t i;
    for (i = 0; i < bytes / 8; ++i) word[i] = (number + 1) * 0x9E3779B97F4A7C15u + i;
}

static const char *file_path(char *path, const char *folder, uint64_t number) {
    snprintf(path, 600, "%s/files/%03u/%u", folder, (unsigned)(number / 1000), (unsigned)number);
    return path;
}

static const char *jpeg_path(char *path, const char *folder, uint64_t number) {
    snprintf(path, 600, "%s/jpeg/%u.jpg", folder, (unsigned)number);
    return path;
}

static int make_small_files(const char *folder) {
    uint64_t item[PEER_FILE_BYTES / 8];
    char path[600];
    int good = 1;
    for (uint64_t i = 0; i < PEER_FILES && good; ++i) {
        if (i % 1000 == 0) {
            snprintf(path, sizeof path, "%s/files/%03u", folder, (unsigned)(i / 1000));
            mkdir(path, 0777);
        }
        fill(i, item, sizeof item);
        good = write_file(file_path(path, folder, i), item, sizeof item);
    }
    return good;
}

static int make_jpegs(const char *folder) {
    const pipe_jpeg_calls *calls = pipe_jpeg_plugin();
    char path[600];
    int good = 1;
    for (unsigned i = 0; i < JPEGS && good && calls != NULL; ++i) {
        pipe_jpeg made;
        calls->make(i, WIDTH, HEIGHT, &made);
        good = write_file(jpeg_path(path, folder, i), made.bytes, made.size);
        free(made.bytes);
    }
    return good;
}

int peer_jpegs(const char *folder) {
    char path[600];
    snprintf(path, sizeof path, "%s/jpeg", folder);
    if (mkdir(folder, 0777) != 0 && errno != EEXIST) return -1;
    if (mkdir(path, 0777) != 0 && errno != EEXIST) return -1;
    return make_jpegs(folder) ? 0 : -1;
}

static int make_tokens(const char *folder) {
    uint16_t *tokens = (uint16_t *)peer_alloc(ALL_TOKENS * sizeof *tokens);
    char path[600];
    int good;
    for (uint32_t i = 0; i < ALL_TOKENS; ++i) tokens[i] = (uint16_t)(i * 2654435761u >> 15);
    snprintf(path, sizeof path, "%s/tokens.bin", folder);
    good = write_file(path, tokens, ALL_TOKENS * sizeof *tokens);
    free(tokens);
    return good;
}

int peer_files(const char *folder) {
    char path[600];
    snprintf(path, sizeof path, "%s/made", folder);
    if (access(path, R_OK) == 0) return 0;
    for (const char *const *part = (const char *const[]){ "", "/files", "/jpeg", NULL }; *part;
         ++part) {
        snprintf(path, sizeof path, "%s%s", folder, *part);
        if (mkdir(path, 0777) != 0 && errno != EEXIST) return -1;
    }
    if (!make_small_files(folder) || !make_jpegs(folder) || !make_tokens(folder)) return -1;
    snprintf(path, sizeof path, "%s/made", folder);
    return write_file(path, "", 0) ? 0 : -1;
}

/* ---- items ---- */

static void resize(const unsigned char *from, unsigned char *to) {
    for (int y = 0; y < SIDE; ++y) {
        const int sy = y * (HEIGHT - 1) * 256 / (SIDE - 1), top = sy >> 8, v = sy & 255;
        const unsigned char *a = from + top * WIDTH * 3;
        const unsigned char *b = top + 1 < HEIGHT ? a + WIDTH * 3 : a;
        for (int x = 0; x < SIDE; ++x) {
            const int sx = x * (WIDTH - 1) * 256 / (SIDE - 1), left = (sx >> 8) * 3, u = sx & 255;
            const int right = left + 3 < WIDTH * 3 ? left + 3 : left;
            for (int c = 0; c < 3; ++c) {
                const int up = a[left + c] * (256 - u) + a[right + c] * u;
                const int down = b[left + c] * (256 - u) + b[right + c] * u;
                *to++ = (unsigned char)((up * (256 - v) + down * v) >> 16);
            }
        }
    }
}

static int make_jpeg(uint64_t number, void *item) {
    own *mine = own_of_thread();
    pipe_jpeg jpeg = { mine->file, 0 };
    char path[600];
    jpeg.size = read_file(jpeg_path(path, with.folder, number % JPEGS), mine->file, FILE_BYTES);
    if (jpeg.size == 0 || !with.jpeg->decode(&jpeg, WIDTH, HEIGHT, mine->pixels)) return 0;
    resize(mine->pixels, (unsigned char *)item);
    return 1;
}

static int make_tokens_of(uint64_t number, void *item) {
    uint16_t window[TOKENS + 1];
    int32_t *to = (int32_t *)item;
    const uint64_t at = number * TOKENS % (ALL_TOKENS - TOKENS - 1);
    if (pread(with.tokens, window, sizeof window, (off_t)(2 * at)) != (ssize_t)sizeof window) {
        return 0;
    }
    for (int i = 0; i <= TOKENS; ++i) to[i] = window[i];
    return 1;
}

#if PEER_ZLIB
static int inflate_array(own *mine, const peer_member *member, void *item) {
    z_stream *z = mine->stream;
    if (z == NULL) {
        z = mine->stream = (z_stream *)calloc(1, sizeof *z);
        if (z == NULL || inflateInit2(z, -MAX_WBITS) != Z_OK) return 0;
    }
    if (inflateReset(z) != Z_OK) return 0;
    z->next_in = (Bytef *)(uintptr_t)member->in;
    z->avail_in = (uInt)member->in_bytes;
    z->next_out = mine->pixels;
    z->avail_out = PEER_ARRAY_BYTES + NPZ_HEAD;
    if (inflate(z, Z_FINISH) != Z_STREAM_END || z->avail_out != 0) return 0;
    memcpy(item, mine->pixels + NPZ_HEAD, PEER_ARRAY_BYTES);
    return 1;
}
#else
static int inflate_array(own *mine, const peer_member *member, void *item) {
    (void)mine, (void)member, (void)item;
    return 0;
}
#endif

/* The one array of a shard, as a loop by hand has it: the file in memory, then zlib. */
static int make_array(uint64_t number, void *item) {
    const char *kind = with.kind == PEER_DEFLATED ? "deflated" : "stored";
    own *mine = own_of_thread();
    char path[600];
    size_t bytes, count;
    peer_member *member;
    int good;
    snprintf(path, sizeof path, "%s/npz/%s_%02u.npz", with.folder, kind,
             (unsigned)(number % PEER_SHARDS));
    bytes = read_file(path, mine->file, FILE_BYTES);
    if (bytes == 0) return 0;
    member = peer_members(mine->file, bytes, 0, &count);
    good = count == 1 && member->bytes == PEER_ARRAY_BYTES + NPZ_HEAD;
    if (good && member->deflated) {
        good = inflate_array(mine, member, item);
    } else if (good) {
        memcpy(item, member->in + NPZ_HEAD, PEER_ARRAY_BYTES);
    }
    free(member);
    return good;
}

void peer_page(uint64_t number, void *page) { fill(number, page, PEER_PAGE_BYTES); }

#if PEER_CURL
typedef struct page {
    char *at;
    size_t left;
} page;

static size_t keep(char *data, size_t size, size_t n, void *user) {
    page *to = (page *)user;
    if (size * n > to->left) return 0;
    memcpy(to->at, data, size * n);
    to->at += size * n;
    to->left -= size * n;
    return size * n;
}

/* The connection is the thread's, and is kept. */
static int make_page(uint64_t number, void *item) {
    own *mine = own_of_thread();
    page to = { (char *)item, PEER_PAGE_BYTES };
    char url[64];
    CURL *easy = mine->easy != NULL ? mine->easy : curl_easy_init();
    mine->easy = easy;
    snprintf(url, sizeof url, "http://127.0.0.1:%d/%llu", with.port, (unsigned long long)number);
    curl_easy_setopt(easy, CURLOPT_URL, url);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, &to);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, keep);
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    return curl_easy_perform(easy) == CURLE_OK && to.left == 0;
}
#else
static int make_page(uint64_t number, void *item) {
    (void)number, (void)item;
    return 0;
}
#endif

static int make_tail(uint64_t number, void *item) {
    compute(TAIL_US * 1e-3 * (number % TAIL_EACH == 37 ? TAIL_SLOW : 1));
    fill(number, item, item_bytes[PEER_TAIL]);
    return 1;
}

int peer_remake(uint64_t number, void *item) {
    char path[600];
    switch (with.kind) {
    case PEER_JPEG:
        return make_jpeg(number, item);
    case PEER_FILE:
        return read_file(file_path(path, with.folder, number % PEER_FILES), item,
                         PEER_FILE_BYTES) == PEER_FILE_BYTES;
    case PEER_TOKENS:
        return make_tokens_of(number, item);
    case PEER_STORED:
    case PEER_DEFLATED:
        return make_array(number, item);
    default:
        fill(number, item, item_bytes[with.kind]);
        return 1;
    }
}

int peer_make(uint64_t number, void *item) {
    if (with.kind == PEER_HTTP) return make_page(number, item);
    if (with.kind == PEER_TAIL) return make_tail(number, item);
    late();
    if (with.kind == PEER_IO) compute(IO_US * 1e-3);
    return peer_remake(number, item);
}

/* One word of each 512 bytes, and the last one. */
uint64_t peer_take(uint64_t sum, const void *data, size_t bytes) {
    const char *at = (const char *)data;
    uint64_t word;
    for (size_t i = 0; i + 8 <= bytes; i += 512) {
        memcpy(&word, at + i, 8);
        sum = (sum ^ word) * 0x9E3779B97F4A7C15u;
        sum ^= sum >> 29;
    }
    memcpy(&word, at + bytes - 8, 8);
    return (sum ^ word) * 0x9E3779B97F4A7C15u;
}
