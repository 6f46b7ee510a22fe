/* fuzz.h - what the fuzz targets share: blocks against guard pages, a little writing of ZIP, and a
   driver for where there is no libFuzzer.

   A target is a file tests/fuzz_X.c with LLVMFuzzerTestOneInput and a corpus in tests/corpus/X.
   Built with FUZZ_DRIVER it has a main of its own, which tries the corpus and then changed pieces
   of it, always the same ones for a seed:

       cc -g -O1 -DFUZZ_DRIVER tests/fuzz_npz.c -o fuzz_npz -lpthread
       ./fuzz_npz [-runs=N] [-seconds=N] [-seed=N] FILE or DIRECTORY ...

   An input that ends the driver is left in crash-X beside it. */
#ifndef FUZZ_H_INCLUDED
#define FUZZ_H_INCLUDED

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

/* What must hold whatever the input is. */
#define FUZZ_CHECK(what)                                                                           \
    do {                                                                                           \
        if (!(what)) fuzz_fail(__FILE__, __LINE__, #what);                                         \
    } while (0)

static inline void fuzz_fail(const char *file, int line, const char *what) {
    fprintf(stderr, "%s:%d: does not hold: %s\n", file, line, what);
    abort();
}

/* ---- blocks between pages that cannot be touched ---- */

#define FUZZ_ROOM ((size_t)1 << 20) /* of a block */
enum { FUZZ_BLOCKS = 8 };

/* The block `which`, of so many bytes. It ends at a guard page, or begins behind one. Its bytes are
   gone when it is asked for again. */
static inline uint8_t *fuzz_block(int which, size_t bytes, bool at_end) {
    static uint8_t *blocks[FUZZ_BLOCKS];
    const size_t guard = 65536; /* a page, whatever the machine */
    if (bytes > FUZZ_ROOM || which >= FUZZ_BLOCKS) abort();
    if (blocks[which] == NULL) {
        void *map = mmap(NULL, FUZZ_ROOM + 2 * guard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                         0);
        if (map == MAP_FAILED) abort();
        blocks[which] = (uint8_t *)map + guard;
        if (mprotect(blocks[which], FUZZ_ROOM, PROT_READ | PROT_WRITE) != 0) abort();
    }
    return blocks[which] + (at_end ? FUZZ_ROOM - bytes : 0);
}

/* One for output: filled with what nobody writes. */
static inline uint8_t *fuzz_out(int which, size_t bytes, bool at_end) {
    return (uint8_t *)memset(fuzz_block(which, bytes, at_end), 0xa5, bytes);
}

static inline uint8_t *fuzz_copy(int which, const uint8_t *data, size_t bytes, bool at_end) {
    uint8_t *at = fuzz_block(which, bytes, at_end);
    if (bytes > 0) memcpy(at, data, bytes);
    return at;
}

/* ---- bytes that a target makes ---- */

typedef struct fuzz_bytes {
    uint8_t *at;
    size_t count;
    size_t room;
} fuzz_bytes;

static inline void fuzz_put(fuzz_bytes *to, const void *from, size_t count) {
    if (count == 0) return;
    if (to->count + count > to->room) abort();
    memcpy(to->at + to->count, from, count);
    to->count += count;
}

/* A little-endian number of so many bytes. */
static inline void fuzz_put_le(fuzz_bytes *to, uint64_t value, int count) {
    for (; count > 0; --count, value >>= 8) {
        const uint8_t byte = (uint8_t)value;
        fuzz_put(to, &byte, 1);
    }
}

/* Four bits at a time: another way than that of the library. */
static inline uint32_t fuzz_crc(const uint8_t *data, size_t bytes) {
    uint32_t table[16];
    uint32_t crc = 0xffffffff;
    uint32_t i;
    int bit;
    for (i = 0; i < 16; ++i) {
        for (table[i] = i, bit = 0; bit < 4; ++bit) {
            table[i] = (table[i] >> 1) ^ ((table[i] & 1) != 0 ? 0xedb88320u : 0);
        }
    }
    for (; bytes > 0; --bytes, ++data) {
        crc ^= *data;
        crc = (crc >> 4) ^ table[crc & 15];
        crc = (crc >> 4) ^ table[crc & 15];
    }
    return ~crc;
}

/* A member, for its header and for its entry in the directory. */
typedef struct fuzz_member {
    const char *name;
    uint16_t method;
    uint32_t crc;
    uint32_t csize;
    uint32_t usize;
    uint32_t offset;
} fuzz_member;

static inline void fuzz_put_local(fuzz_bytes *to, fuzz_member *m) {
    const size_t name = strlen(m->name);
    m->offset = (uint32_t)to->count;
    fuzz_put_le(to, 0x04034b50, 4);
    fuzz_put_le(to, 20, 4); /* version, flags */
    fuzz_put_le(to, m->method, 2);
    fuzz_put_le(to, 0x210000, 4); /* 1980-01-01 */
    fuzz_put_le(to, m->crc, 4);
    fuzz_put_le(to, m->csize, 4);
    fuzz_put_le(to, m->usize, 4);
    fuzz_put_le(to, name, 4); /* and no extra field */
    fuzz_put(to, m->name, name);
}

static inline void fuzz_put_entry(fuzz_bytes *to, const fuzz_member *m) {
    const size_t name = strlen(m->name);
    fuzz_put_le(to, 0x02014b50, 4);
    fuzz_put_le(to, 0x140014, 4); /* versions */
    fuzz_put_le(to, 0, 2);
    fuzz_put_le(to, m->method, 2);
    fuzz_put_le(to, 0x210000, 4);
    fuzz_put_le(to, m->crc, 4);
    fuzz_put_le(to, m->csize, 4);
    fuzz_put_le(to, m->usize, 4);
    fuzz_put_le(to, name, 2);
    fuzz_put_le(to, 0, 8); /* extra, comment, disk, attributes */
    fuzz_put_le(to, 0, 4);
    fuzz_put_le(to, m->offset, 4);
    fuzz_put(to, m->name, name);
}

static inline void fuzz_put_end(fuzz_bytes *to, size_t entries, size_t directory) {
    const size_t bytes = to->count - directory;
    fuzz_put_le(to, 0x06054b50, 4);
    fuzz_put_le(to, 0, 4);
    fuzz_put_le(to, entries, 2);
    fuzz_put_le(to, entries, 2);
    fuzz_put_le(to, bytes, 4);
    fuzz_put_le(to, directory, 4);
    fuzz_put_le(to, 0, 2);
}

#define FUZZ_NPY_HEAD 128

/* The header of an array of `count` bytes. */
static inline void fuzz_npy_head(uint8_t *to, size_t count) {
    char text[FUZZ_NPY_HEAD];
    int length = snprintf(text, sizeof text,
                          "{'descr': '|u1', 'fortran_order': False, 'shape': (%zu,), }", count);
    memset(to, ' ', FUZZ_NPY_HEAD);
    memcpy(to, "\x93NUMPY\x01\x00\x76\x00", 10);
    memcpy(to + 10, text, (size_t)length);
    to[FUZZ_NPY_HEAD - 1] = '\n';
}

/* ---- the driver ---- */
#ifdef FUZZ_DRIVER

#include <dirent.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>

#define FUZZ_LONGEST 65536

typedef struct fuzz_input {
    uint8_t *at;
    size_t bytes;
} fuzz_input;

static struct {
    fuzz_input *inputs;
    size_t count, room;
    uint64_t random;
    char crash[512];
    uint8_t now[FUZZ_LONGEST];
    size_t now_bytes;
    int status;
} fuzz_driver;

static uint64_t fuzz_random(uint64_t below) {
    uint64_t z = (fuzz_driver.random += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (z ^ (z >> 31)) % below;
}

/* Leaves the input and dies of the signal. */
static void fuzz_on_signal(int signal_number) {
    static const char text[] = "\nfuzz: the input is in ";
    FILE *file = fopen(fuzz_driver.crash, "wb");
    if (file != NULL) {
        fwrite(fuzz_driver.now, 1, fuzz_driver.now_bytes, file);
        fclose(file);
    }
    fprintf(stderr, "%s%s (signal %d)\n", text, fuzz_driver.crash, signal_number);
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

static void fuzz_try(void) {
    alarm(20);
    LLVMFuzzerTestOneInput(fuzz_driver.now, fuzz_driver.now_bytes);
}

static void fuzz_add_file(const char *path) {
    fuzz_input input;
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        fprintf(stderr, "fuzz: cannot open %s\n", path);
        exit(2);
    }
    input.at = (uint8_t *)malloc(FUZZ_LONGEST);
    if (input.at == NULL) abort();
    input.bytes = fread(input.at, 1, FUZZ_LONGEST, file);
    fclose(file);
    if (fuzz_driver.count == fuzz_driver.room) {
        fuzz_driver.room = 2 * fuzz_driver.room + 16;
        fuzz_driver.inputs = (fuzz_input *)realloc(fuzz_driver.inputs,
                                                   fuzz_driver.room * sizeof(fuzz_input));
        if (fuzz_driver.inputs == NULL) abort();
    }
    fuzz_driver.inputs[fuzz_driver.count++] = input;
}

static int fuzz_by_name(const struct dirent **a, const struct dirent **b) {
    return strcmp((*a)->d_name, (*b)->d_name);
}

static void fuzz_add(const char *path) {
    struct dirent **entries = NULL;
    const int count = scandir(path, &entries, NULL, fuzz_by_name);
    int i;
    if (count < 0) fuzz_add_file(path);
    for (i = 0; i < count; ++i) {
        char file[1024];
        struct stat status;
        snprintf(file, sizeof file, "%s/%s", path, entries[i]->d_name);
        if (stat(file, &status) == 0 && S_ISREG(status.st_mode)) fuzz_add_file(file);
        free(entries[i]);
    }
    free(entries);
}

/* Takes away `less` bytes at a place and makes room for `more`. */
static uint8_t *fuzz_resize(size_t at, size_t less, size_t more) {
    uint8_t *now = fuzz_driver.now;
    size_t rest;
    if (less > fuzz_driver.now_bytes - at) less = fuzz_driver.now_bytes - at;
    if (fuzz_driver.now_bytes - less + more > FUZZ_LONGEST) more = less;
    rest = fuzz_driver.now_bytes - at - less;
    memmove(now + at + more, now + at + less, rest);
    fuzz_driver.now_bytes = at + more + rest;
    return now + at;
}

/* A number that somebody may have forgotten. */
static void fuzz_odd_number(size_t at) {
    static const uint64_t odd[] = { 0, 1, 22, 30, 46, 0x7f, 0x80, 0xff, 258, 0x7fff, 0x8000, 0xffff,
                                    0x7fffffff, 0xffffffff, INT64_MAX, UINT64_MAX };
    uint64_t value = odd[fuzz_random(sizeof odd / sizeof odd[0])];
    size_t bytes = (size_t)1 << fuzz_random(4);
    if (fuzz_random(4) == 0) value = fuzz_driver.now_bytes - fuzz_random(64);
    for (; bytes > 0 && at < fuzz_driver.now_bytes; --bytes, ++at, value >>= 8) {
        fuzz_driver.now[at] = (uint8_t)value;
    }
}

/* A piece of one of the inputs, put in or over what is there. */
static void fuzz_splice(size_t at) {
    const fuzz_input *from = &fuzz_driver.inputs[fuzz_random(fuzz_driver.count)];
    const size_t first = (size_t)fuzz_random(from->bytes + 1);
    size_t bytes = (size_t)fuzz_random((fuzz_random(4) == 0 ? from->bytes - first : 64) + 1);
    const size_t less = fuzz_random(2) == 0 ? 0 : bytes;
    uint8_t *to;
    if (bytes > from->bytes - first) bytes = from->bytes - first;
    if (fuzz_driver.now_bytes + bytes > FUZZ_LONGEST) return;
    to = fuzz_resize(at, less, bytes);
    memcpy(to, from->at + first, bytes);
}

static void fuzz_insert(size_t at, uint8_t byte) {
    if (fuzz_driver.now_bytes < FUZZ_LONGEST) *fuzz_resize(at, 0, 1) = byte;
}

static void fuzz_mutate(void) {
    const size_t at = (size_t)fuzz_random(fuzz_driver.now_bytes + 1);
    const bool there = at < fuzz_driver.now_bytes;
    switch (fuzz_random(8)) {
    case 0:
    case 1:
        if (there) fuzz_driver.now[at] ^= (uint8_t)(1u << fuzz_random(8));
        break;
    case 2:
        if (there) fuzz_driver.now[at] = (uint8_t)fuzz_random(256);
        break;
    case 3: fuzz_odd_number(at); break;
    case 4: fuzz_resize(at, (size_t)fuzz_random(32), 0); break;
    case 5: fuzz_insert(at, (uint8_t)fuzz_random(256)); break;
    case 6: fuzz_splice(at); break;
    default:
        if (fuzz_random(8) == 0) fuzz_driver.now_bytes = at;
        break;
    }
}

static void fuzz_start_from(size_t index) {
    const fuzz_input *input = &fuzz_driver.inputs[index];
    memcpy(fuzz_driver.now, input->at, input->bytes);
    fuzz_driver.now_bytes = input->bytes;
}

static long fuzz_run(long runs, long seconds) {
    const time_t end = time(NULL) + seconds;
    long run;
    size_t i;
    for (i = 0; i < fuzz_driver.count; ++i) {
        fuzz_start_from(i);
        fuzz_try();
    }
    for (run = 0; seconds > 0 ? time(NULL) < end : run < runs; ++run) {
        uint64_t times = 1 + fuzz_random(1 + fuzz_random(8));
        fuzz_start_from((size_t)fuzz_random(fuzz_driver.count));
        for (; times > 0; --times) fuzz_mutate();
        fuzz_try();
    }
    return run;
}

int main(int argc, char **argv) {
    const char *name = strrchr(argv[0], '/');
    long runs = 10000;
    long seconds = 0;
    int i;
    snprintf(fuzz_driver.crash, sizeof fuzz_driver.crash, "%.*scrash-%.64s",
             name != NULL ? (int)(name + 1 - argv[0]) : 0, argv[0],
             name != NULL ? name + 1 : argv[0]);
    for (i = 1; i < argc; ++i) {
        const char *arg = argv[i];
        if (strncmp(arg, "-runs=", 6) == 0) runs = atol(arg + 6);
        else if (strncmp(arg, "-seconds=", 9) == 0) seconds = atol(arg + 9);
        else if (strncmp(arg, "-seed=", 6) == 0) fuzz_driver.random = (uint64_t)atoll(arg + 6);
        else fuzz_add(arg);
    }
    if (fuzz_driver.count == 0) fuzz_add_file("/dev/null");
    signal(SIGSEGV, fuzz_on_signal);
    signal(SIGBUS, fuzz_on_signal);
    signal(SIGABRT, fuzz_on_signal);
    signal(SIGFPE, fuzz_on_signal);
    signal(SIGALRM, fuzz_on_signal);
    runs = fuzz_run(runs, seconds);
    printf("%s: %zu inputs, %ld changed ones\n", argv[0], fuzz_driver.count, runs);
    return 0;
}
#endif /* FUZZ_DRIVER */

#endif /* FUZZ_H_INCLUDED */
