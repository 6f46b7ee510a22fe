/* bench_npz.c - reading .npy and .npz against libdeflate, ISA-L, zlib, numpy.load and SPDL.

       make bench-npz           makes the data first: bench/make_npz_data.py, needs NumPy
       build/bench/bench_npz [--json] [--quick] [--list] [TEXT]

   inflate_X           deflated arrays of content X, one spdl_npz_read after the other, no CRC;
                       MB/s of what comes out, 10^6 bytes; inflate_isal_X, inflate_zlib_X likewise
   inflate_crc_X       the same with the CRC verified on both sides
   inflate_*geomean    the geometric mean of the contents that are not trivial (not zeros, random)
   lanes_*, small_1kb* all members by one spdl_npz_load_memory, no CRC
   load_*              a stored file, or a deflated one, from its path to arrays, and a look at each
                       page: against a loop of fread as cnpy has it (peer_cnpy.h)
   load_1mb_pieces     against open, pread and CRC in pieces of 128 KB; load_1mb_no_crc without CRC
   deflated_vs_numpy   a file of float32 from its path to arrays
   compressible_*      the same with masks, and with sparse data, into memory that is used again
   stored_view_us      256 MB, from the path to a pointer
   stored_sum_*        the same and a sum of every byte; the limit is mmap and the sum
   member_parse_us     4,096 stored arrays of 1 KB in memory: opened, each looked at, closed
   npy_*               a .npy file of 1 KB: from its path to memory; described, in memory
   crc32*              1 MB, GB/s
   compile_ms, code_kb what NPZ adds to a program at -O2

   Peers get the compressed bytes and the sizes as they are, we get the archive. Every output is
   compared with what was read first with its CRC verified. Photos and tokens are synthetic. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define SPDL_IMPLEMENTATION
#include "../spdl.h"

#include "../examples/npz_writer.h"
#include "bench.h"
#include "peer_cnpy.h"
#include "peer_inflate.h"

#include <fcntl.h>
#include <math.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define ROUNDS 9
#define GAP 1024 /* free bytes after each output */
#define RUN_NS 15e6

static char data_path[256];
static peer_python python;
static volatile uint64_t sink;

/* ---- archives ---- */

typedef struct archive {
    uint8_t *file; /* mapped */
    size_t file_bytes;
    spdl_npz *npz;     /* does not verify */
    spdl_npz *checked; /* does */
    peer_member *members;
    size_t count;
    size_t bytes; /* of all members */
    size_t room;  /* of the output */
    uint8_t *out;
    uint8_t *expected;
} archive;

static const char *path_of(const char *name) {
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", data_path, name);
    return path;
}

static uint8_t *map_file(const char *path, size_t *bytes) {
    struct stat status;
    void *map;
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &status) != 0) bench_fail("%s is not there: make bench-npz", path);
    *bytes = (size_t)status.st_size;
    map = mmap(NULL, *bytes, PROT_READ, MAP_PRIVATE | MAP_POPULATE, fd, 0);
    BENCH_CHECK(map != MAP_FAILED);
    close(fd);
    return (uint8_t *)map;
}

static void *memory(size_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    BENCH_CHECK(at != MAP_FAILED);
    madvise(at, bytes, MADV_HUGEPAGE);
    memset(at, 0, bytes);
    return at;
}

static spdl_npz *open_bytes(const uint8_t *file, size_t bytes, bool verify) {
    spdl_npz *npz = NULL;
    spdl_npz_desc desc = { 0 };
    desc.no_crc = !verify;
    BENCH_CHECK(spdl_npz_open_memory(&npz, file, bytes, "bench", &desc) == SPDL_OK);
    return npz;
}

static void read_each(const archive *a, const spdl_npz *npz) {
    size_t i;
    for (i = 0; i < a->count; ++i) {
        const peer_member *m = &a->members[i];
        BENCH_CHECK(spdl_npz_read(npz, i, a->out + m->at + m->head, m->bytes - m->head, NULL) ==
                    SPDL_OK);
    }
}

static void archive_open(archive *a, const char *name) {
    char file[64];
    size_t i;
    snprintf(file, sizeof file, "%s.npz", name);
    a->file = map_file(path_of(file), &a->file_bytes);
    a->npz = open_bytes(a->file, a->file_bytes, false);
    a->checked = open_bytes(a->file, a->file_bytes, true);
    a->members = peer_members(a->file, a->file_bytes, GAP, &a->count);
    BENCH_CHECK(spdl_npz_count(a->npz) == a->count);
    a->room = a->members[a->count - 1].at + a->members[a->count - 1].bytes + GAP;
    a->out = (uint8_t *)memory(a->room);
    a->expected = (uint8_t *)memory(a->room);
    for (a->bytes = 0, i = 0; i < a->count; ++i) {
        const peer_member *m = &a->members[i];
        a->bytes += m->bytes;
    }
    read_each(a, a->checked);
    memcpy(a->expected, a->out, a->room);
}

static void archive_close(archive *a) {
    spdl_npz_close(a->npz);
    spdl_npz_close(a->checked);
    munmap(a->file, a->file_bytes);
    munmap(a->out, a->room);
    munmap(a->expected, a->room);
    free(a->members);
}

/* So that bytes that were there before do not pass for those that should have come. */
static void spoil(const archive *a) {
    size_t at;
    for (at = 0; at < a->room; at += 1024) a->out[at] ^= 0x5a;
}

static void compare(const archive *a) {
    size_t i;
    for (i = 0; i < a->count; ++i) {
        const size_t at = a->members[i].at + a->members[i].head;
        BENCH_CHECK(memcmp(a->out + at, a->expected + at, a->members[i].bytes -
                           a->members[i].head) == 0);
    }
}

/* ---- loading into memory that is used again ---- */

static struct {
    uint8_t *at;
    size_t room, used;
} reused;

static void *reused_alloc(size_t bytes, size_t align, void *user) {
    const size_t at = (reused.used + align - 1) & ~(align - 1);
    (void)user;
    BENCH_CHECK(at + bytes <= reused.room);
    reused.used = at + bytes;
    return reused.at + at;
}

static void reused_free(void *block, size_t bytes, void *user) {
    (void)block, (void)bytes, (void)user;
}

/* All arrays; they are there until the next call. */
static const spdl_npz_bundle *load_reused(const archive *a, const char *path) {
    spdl_npz_bundle *bundle = NULL;
    spdl_npz_desc desc = { 0 };
    if (reused.room == 0) {
        reused.room = (size_t)640 << 20;
        reused.at = (uint8_t *)memory(reused.room);
    }
    reused.used = 0;
    desc.allocator.alloc_fn = reused_alloc;
    desc.allocator.free_fn = reused_free;
    desc.no_crc = path == NULL;
    BENCH_CHECK((path != NULL ? spdl_npz_load(&bundle, path, &desc)
                              : spdl_npz_load_memory(&bundle, a->file, a->file_bytes, "bench",
                                                     &desc)) == SPDL_OK);
    return bundle;
}

static void compare_loaded(const archive *a, const spdl_npz_bundle *bundle) {
    size_t i;
    for (i = 0; i < a->count; ++i) {
        const peer_member *m = &a->members[i];
        BENCH_CHECK(memcmp(bundle->arrays[i].data, a->expected + m->at + m->head,
                           m->bytes - m->head) == 0);
    }
}

/* ---- who decodes ---- */

enum {
    OURS, OURS_CRC, LANES, LIBDEFLATE, LIBDEFLATE_CRC, ISAL, ZLIB, SIDES
};

static const char *const side_name[SIDES] = {
    "own", "own", "own", "libdeflate", "libdeflate", "ISA-L", "zlib"
};

static bool side_there(int side) {
    if (side >= LIBDEFLATE && side <= LIBDEFLATE_CRC) return PEER_LIBDEFLATE;
    if (side == ISAL) return PEER_ISAL;
    return side != ZLIB || PEER_ZLIB;
}

static void decode_peer(const archive *a, peer_inflate_fn inflate_one, peer_crc_fn crc) {
    size_t i;
    for (i = 0; i < a->count; ++i) {
        const peer_member *m = &a->members[i];
        BENCH_CHECK(inflate_one(m->in, m->in_bytes, a->out + m->at, m->bytes));
        if (crc != NULL) sink += crc(a->out + m->at, m->bytes);
    }
}

static const spdl_npz_bundle *loaded; /* by the last LANES */

static void decode(const archive *a, int side) {
    switch (side) {
    case OURS: read_each(a, a->npz); break;
    case OURS_CRC: read_each(a, a->checked); break;
    case LANES: loaded = load_reused(a, NULL); break;
    case LIBDEFLATE: decode_peer(a, peer_libdeflate, NULL); break;
    case LIBDEFLATE_CRC: decode_peer(a, peer_libdeflate, peer_libdeflate_crc); break;
    case ISAL: decode_peer(a, peer_isal, NULL); break;
    default: decode_peer(a, peer_zlib, NULL); break;
    }
}

/* MB/s of one side, over as many passes as fill the time of a run. */
static double decode_rate(const archive *a, int side) {
    uint64_t start;
    double took;
    int passes = 0;
    spoil(a);
    start = bench_ns();
    do {
        decode(a, side);
        ++passes;
        took = (double)(bench_ns() - start);
    } while (took < RUN_NS);
    if (side == LANES) compare_loaded(a, loaded);
    else compare(a);
    return (double)a->bytes * passes * 1e3 / took;
}

/* ---- contents ---- */

typedef struct content {
    const char *name;
    const char *lanes; /* its row, NULL: none */
    double lanes_goal;
    bool counts; /* in the geometric means */
} content;

static const content contents[] = {
    { "f32_normal", "lanes_f32", 1.6, true },
    { "f16_normal", "lanes_f16", 1.6, true },
    { "f32_relu", "lanes_relu", 0, true },
    { "f32_bf16", "lanes_bf16", 0, true },
    { "int8", "lanes_int8", 0, true },
    { "photos_u8", "lanes_photos", 1.2, true },
    { "photos_f32", "lanes_photos_f32", 0, true },
    { "tokens_i64", "lanes_i64", 0, true },
    { "tokens_u16", "lanes_u16", 0, true },
    { "labels", "lanes_labels", 0, true },
    { "sparse", "lanes_sparse", 0, true },
    { "small_f32", "small_1kb", 1.3, true },
    { "small_i64", "small_1kb_i64", 1.3, true },
    { "large_mixed", NULL, 0, true },
    { "large_f32", NULL, 0, false },
    { "large_photos", NULL, 0, false },
    { "zeros", "lanes_zeros", 0, false },
    { "random", "lanes_random", 0, false },
};

/* A row of a content: two sides of it. */
typedef struct pair {
    char name[48];
    int ours;
    int peer;
    double goal;
} pair;

typedef struct geomean {
    double logs[SIDES][BENCH_MAX_ROUNDS]; /* the sum over contents, round by round */
    int count;
} geomean;

static const pair mean_rows[] = {
    { "inflate_geomean", OURS, LIBDEFLATE, 1.0 },
    { "inflate_isal_geomean", OURS, ISAL, 0 },
    { "inflate_zlib_geomean", OURS, ZLIB, 0 },
    { "inflate_crc_geomean", OURS_CRC, LIBDEFLATE_CRC, 0 },
};
#define MEAN_ROWS (sizeof mean_rows / sizeof mean_rows[0])

static void add_pair(pair *pairs, size_t *count, const char *format, const char *name, int ours,
                     int peer, double goal) {
    pair *p = &pairs[*count];
    if (name == NULL) return;
    snprintf(p->name, sizeof p->name, format, name);
    p->ours = ours;
    p->peer = peer;
    p->goal = goal;
    if (side_there(peer) && side_there(ours)) ++*count;
}

/* The rows of a content; ISA-L and zlib are left to the arrays that are not huge. */
static size_t pairs_of(const content *c, pair *pairs) {
    size_t count = 0;
    const bool large = c->lanes == NULL;
    add_pair(pairs, &count, "inflate_%s", c->name, OURS, LIBDEFLATE, c->counts ? 0.93 : 0);
    add_pair(pairs, &count, "inflate_crc_%s", c->name, OURS_CRC, LIBDEFLATE_CRC, 0);
    add_pair(pairs, &count, "inflate_isal_%s", large ? NULL : c->name, OURS, ISAL, 0);
    add_pair(pairs, &count, "inflate_zlib_%s", large ? NULL : c->name, OURS, ZLIB, 0);
    add_pair(pairs, &count, "%s", c->lanes, LANES, LIBDEFLATE, c->lanes_goal);
    return count;
}

static void print_pair(const pair *p, double rates[SIDES][BENCH_MAX_ROUNDS]) {
    const bench_row row = { p->name, "MB/s", side_name[p->peer], true, 0, false, p->goal };
    const bench_sides sides = { rates[p->ours], rates[p->peer], bench_rounds(ROUNDS), 1 };
    bench_print_sides(&row, &sides, NULL);
}

static void measure(const archive *a, const bool *sides, double rates[SIDES][BENCH_MAX_ROUNDS]) {
    const int rounds = bench_rounds(ROUNDS);
    int round;
    int i;
    for (round = 0; round < rounds; ++round) {
        for (i = 0; i < SIDES; ++i) {
            const int side = (i + round) % SIDES;
            rates[side][round] = sides[side] ? decode_rate(a, side) : 0;
        }
    }
}

static void row_content(const content *c, bool for_mean, geomean *mean) {
    pair pairs[8];
    bool wanted[8];
    bool sides[SIDES] = { false };
    bool any = for_mean && c->counts;
    double rates[SIDES][BENCH_MAX_ROUNDS];
    archive a;
    const size_t count = pairs_of(c, pairs);
    int round;
    size_t i;
    for (i = 0; i < count; ++i) {
        wanted[i] = bench_wanted(pairs[i].name);
        any = any || wanted[i];
        if (wanted[i]) sides[pairs[i].ours] = sides[pairs[i].peer] = true;
    }
    if (!any) return;
    for (i = 0; i < MEAN_ROWS && for_mean && c->counts; ++i) {
        sides[mean_rows[i].ours] = true;
        sides[mean_rows[i].peer] = side_there(mean_rows[i].peer);
    }
    archive_open(&a, c->name);
    measure(&a, sides, rates);
    archive_close(&a);
    for (i = 0; i < count; ++i) {
        if (wanted[i]) print_pair(&pairs[i], rates);
    }
    if (!c->counts) return;
    ++mean->count;
    for (i = 0; i < SIDES; ++i) {
        for (round = 0; round < bench_rounds(ROUNDS) && sides[i]; ++round)
            mean->logs[i][round] += log(rates[i][round]);
    }
}

static void rows_of_contents(void) {
    static geomean mean;
    bool wanted[MEAN_ROWS];
    bool any = false;
    int round;
    size_t i;
    size_t k;
    for (i = 0; i < MEAN_ROWS; ++i) {
        wanted[i] = side_there(mean_rows[i].peer) && bench_wanted(mean_rows[i].name);
        any = any || wanted[i];
    }
    for (i = 0; i < sizeof contents / sizeof contents[0]; ++i) {
        row_content(&contents[i], any, &mean);
    }
    for (k = 0; k < SIDES && any; ++k) {
        for (round = 0; round < bench_rounds(ROUNDS); ++round)
            mean.logs[k][round] = exp(mean.logs[k][round] / mean.count);
    }
    for (i = 0; i < MEAN_ROWS; ++i) {
        if (wanted[i]) print_pair(&mean_rows[i], mean.logs);
    }
}

/* ---- files ---- */

/* What both sides of a row do with a file. */
typedef struct file_case {
    const char *file;
    const char *operation; /* of the Python peer */
    int repeats;           /* ours */
    int peer_repeats;
    double unit; /* nanoseconds */
    double per;  /* how many of what is counted are in the file, 0: one */
    archive *into;
} file_case;

static double python_side(const void *arg) {
    const file_case *c = (const file_case *)arg;
    const double ns =
        peer_python_ns(&python, c->operation, c->peer_repeats, path_of(c->file));
    return ns / c->unit / (c->per > 0 ? c->per : 1);
}

static double since(const file_case *c, uint64_t start, int repeats) {
    return (double)(bench_ns() - start) / c->unit / (c->per > 0 ? c->per : 1) / repeats;
}

static uint64_t add_up(const uint8_t *data, size_t bytes) {
    uint64_t sums[8] = { 0 };
    uint64_t words[8];
    size_t i;
    for (; bytes >= sizeof words; bytes -= sizeof words, data += sizeof words) {
        memcpy(words, data, sizeof words);
        for (i = 0; i < 8; ++i) sums[i] += words[i];
    }
    for (; bytes > 0; --bytes, ++data) sums[0] += *data;
    return sums[0] + sums[1] + sums[2] + sums[3] + sums[4] + sums[5] + sums[6] + sums[7];
}

static spdl_npz *open_path(const char *file) {
    spdl_npz *npz = NULL;
    BENCH_CHECK(spdl_npz_open(&npz, path_of(file), NULL) == SPDL_OK);
    return npz;
}

static const uint8_t *view(const spdl_npz *npz, size_t index) {
    const void *data = NULL;
    BENCH_CHECK(spdl_npz_view(npz, index, &data, NULL, NULL) == SPDL_OK);
    return (const uint8_t *)data;
}

static double view_file(const void *arg) {
    const file_case *c = (const file_case *)arg;
    const uint64_t start = bench_ns();
    int times = 0;
    do {
        spdl_npz *npz = open_path(c->file);
        sink += (uintptr_t)view(npz, 0);
        spdl_npz_close(npz);
        ++times;
    } while ((double)(bench_ns() - start) < RUN_NS);
    return since(c, start, times);
}

static double sum_file(const void *arg) {
    const file_case *c = (const file_case *)arg;
    const uint64_t start = bench_ns();
    spdl_npz *npz = open_path(c->file);
    sink += add_up(view(npz, 0), (size_t)256 << 20);
    spdl_npz_close(npz);
    return since(c, start, 1);
}

static double sum_mapping(const void *arg) {
    const file_case *c = (const file_case *)arg;
    const uint64_t start = bench_ns();
    const int fd = open(path_of(c->file), O_RDONLY | O_CLOEXEC);
    struct stat status;
    void *map;
    BENCH_CHECK(fd >= 0 && fstat(fd, &status) == 0);
    map = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    BENCH_CHECK(map != MAP_FAILED);
    sink += add_up((const uint8_t *)map + 256, (size_t)256 << 20);
    munmap(map, (size_t)status.st_size);
    close(fd);
    return since(c, start, 1);
}

/* From the path to arrays in memory that is used again. */
static double load_file(const void *arg) {
    const file_case *c = (const file_case *)arg;
    const uint64_t start = bench_ns();
    const spdl_npz_bundle *bundle = load_reused(c->into, path_of(c->file));
    const double took = since(c, start, 1);
    compare_loaded(c->into, bundle);
    return took;
}

/* The same to fresh memory, as a program does it, which looks at each page. */
static void look(const uint8_t *data, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 4096) sink += data[at];
}

static double load_fresh(const void *arg) {
    const file_case *c = (const file_case *)arg;
    const uint64_t start = bench_ns();
    size_t i;
    int k;
    for (k = 0; k < c->repeats; ++k) {
        spdl_npz_bundle *bundle = NULL;
        BENCH_CHECK(spdl_npz_load(&bundle, path_of(c->file), NULL) == SPDL_OK);
        for (i = 0; i < bundle->count; ++i)
            look((const uint8_t *)bundle->arrays[i].data, (size_t)bundle->arrays[i].info.bytes);
        spdl_npz_bundle_free(bundle);
    }
    return since(c, start, c->repeats);
}

static double load_cnpy(const void *arg) {
    const file_case *c = (const file_case *)arg;
    const archive *a = c->into;
    const uint64_t start = bench_ns();
    int k;
    for (k = 0; k < c->repeats; ++k)
        BENCH_CHECK(cnpy_load(path_of(c->file), a->members, a->count, look));
    return since(c, start, c->repeats);
}

/* The least that verifies: pread and CRC in pieces of 128 KB. */
static double load_pieces(const void *arg) {
    const file_case *c = (const file_case *)arg;
    const uint64_t start = bench_ns();
    static spdl__crc sums;
    int k;
    if (sums.table[0][1] == 0) spdl__crc_init(&sums);
    for (k = 0; k < c->repeats; ++k) {
        const int fd = open(path_of(c->file), O_RDONLY | O_CLOEXEC);
        struct stat status;
        uint8_t *data;
        uint32_t crc = 0;
        size_t at, bytes, piece;
        BENCH_CHECK(fd >= 0 && fstat(fd, &status) == 0);
        bytes = (size_t)status.st_size;
        BENCH_CHECK((data = (uint8_t *)malloc(bytes)) != NULL);
        for (at = 0; at < bytes; at += piece) {
            piece = bytes - at < 131072 ? bytes - at : 131072;
            BENCH_CHECK(pread(fd, data + at, piece, (off_t)at) == (ssize_t)piece);
            crc = spdl__crc_add(&sums, crc, data + at, piece);
        }
        sink += crc;
        look(data, bytes);
        free(data);
        close(fd);
    }
    return since(c, start, c->repeats);
}

static double load_trusting(const void *arg) {
    const file_case *c = (const file_case *)arg;
    const spdl_npz_desc desc = { .no_crc = true };
    const uint64_t start = bench_ns();
    size_t i;
    int k;
    for (k = 0; k < c->repeats; ++k) {
        spdl_npz_bundle *bundle = NULL;
        BENCH_CHECK(spdl_npz_load(&bundle, path_of(c->file), &desc) == SPDL_OK);
        for (i = 0; i < bundle->count; ++i)
            look((const uint8_t *)bundle->arrays[i].data, (size_t)bundle->arrays[i].info.bytes);
        spdl_npz_bundle_free(bundle);
    }
    return since(c, start, c->repeats);
}

/* As examples/npz_writer.h makes it: such an array is lent. */
static void make_aligned(void) {
    static float data[1 << 18];
    static const uint64_t shape[] = { 1 << 18 };
    npz_writer *w = NULL;
    size_t i;
    if (bench_opt.list) return;
    for (i = 0; i < 1 << 18; ++i) data[i] = (float)i;
    BENCH_CHECK(npz_writer_open(&w, path_of("aligned_1mb.npz"), NULL) == SPDL_OK);
    BENCH_CHECK(npz_writer_add(w, "x", "<f4", 1, shape, data, NULL) == SPDL_OK);
    BENCH_CHECK(npz_writer_finish(w, NULL) == SPDL_OK);
    npz_writer_close(w);
}

/* A file, by these two sides. */
static void row_of_file(const char *name, const char *what, int repeats, double goal,
                        const char *peer_name, bench_side_fn ours, bench_side_fn peer) {
    const bench_row row = { name, "ms", peer_name, false, 0, false, goal };
    char file[64];
    file_case c = { file, NULL, repeats, 1, 1e6, 0, NULL };
    archive a;
    if (!bench_wanted(name)) return;
    snprintf(file, sizeof file, "%s.npz", what);
    archive_open(&a, what);
    c.into = &a;
    bench_compare_sides(&row, ROUNDS, ours, &c, peer, &c);
    archive_close(&a);
}

static void row_vs_cnpy(const char *name, const char *what, int repeats, double goal) {
    row_of_file(name, what, repeats, goal, "cnpy's loop", load_fresh, load_cnpy);
}

static void row_with_python(bench_row row, const char *peer_name, bench_side_fn ours,
                            const file_case *c) {
    const char *of = strncmp(c->operation, "spdl", 4) == 0 ? "spdl" : "numpy";
    const bool there = strstr(python.versions, of) != NULL;
    if (there) row.peer_name = peer_name;
    bench_compare_sides(&row, ROUNDS, ours, c, there ? python_side : NULL, c);
}

static void row_stored_view(void) {
    const bench_row row = { "stored_view_us", "us", NULL, false, 20, false, 0 };
    const file_case c = { "stored_256mb.npz", "numpy_load", 1, 1, 1e3, 0, NULL };
    if (bench_wanted(row.name)) row_with_python(row, "numpy.load", view_file, &c);
}

static void rows_stored_sum(void) {
    const bench_row numpy = { "stored_sum_vs_numpy", "ms", NULL, false, 0, false, 4 };
    const bench_row spdl = { "stored_sum_vs_spdl", "ms", NULL, false, 0, false, 3 };
    const bench_row mapped = { "stored_sum_vs_spdl_map", "ms", NULL, false, 0, false, 0 };
    const bench_row limit = { "stored_sum_vs_mmap", "ms", "mmap+sum", false, 0, false, 0.9 };
    file_case c = { "stored_256mb.npz", "numpy_sum", 1, 1, 1e6, 0, NULL };
    if (bench_wanted(numpy.name)) row_with_python(numpy, "numpy.load", sum_file, &c);
    c.operation = "spdl_sum";
    if (bench_wanted(spdl.name)) row_with_python(spdl, "SPDL, file read", sum_file, &c);
    c.operation = "spdl_mapped_sum";
    if (bench_wanted(mapped.name)) row_with_python(mapped, "SPDL, file mapped", sum_file, &c);
    if (!bench_wanted(limit.name)) return;
    bench_compare_sides(&limit, 2 * ROUNDS + 1, sum_file, &c, sum_mapping, &c);
}

static void row_load(const char *name, const char *what, const char *operation,
                     const char *peer, double goal) {
    const bench_row row = { name, "ms", NULL, false, 0, false, goal };
    char file[64];
    file_case c = { file, operation, 1, 1, 1e6, 0, NULL };
    archive a;
    if (!bench_wanted(name)) return;
    snprintf(file, sizeof file, "%s.npz", what);
    archive_open(&a, what);
    c.into = &a;
    row_with_python(row, peer, load_file, &c);
    archive_close(&a);
}

/* ---- small things ---- */

static double parse_members(const void *arg) {
    const file_case *c = (const file_case *)arg;
    const archive *a = c->into;
    const uint64_t start = bench_ns();
    int i;
    for (i = 0; i < c->repeats; ++i) {
        spdl_npz *npz = open_bytes(a->file, a->file_bytes, true);
        size_t k;
        for (k = 0; k < a->count; ++k) sink += (uintptr_t)view(npz, k);
        spdl_npz_close(npz);
    }
    return since(c, start, c->repeats);
}

static void row_member_parse(void) {
    const bench_row row = { "member_parse_us", "us", NULL, false, 0.1, false, 0 };
    file_case c = { "stored_small.npz", "spdl_memory", 10, 1, 1e3, 4096, NULL };
    archive a;
    if (!bench_wanted(row.name)) return;
    archive_open(&a, "stored_small");
    c.into = &a;
    row_with_python(row, "SPDL, in memory", parse_members, &c);
    archive_close(&a);
}

static double npy_file(const void *arg) {
    const file_case *c = (const file_case *)arg;
    const uint64_t start = bench_ns();
    uint8_t data[1024];
    int i;
    for (i = 0; i < c->repeats; ++i) {
        spdl_npz *npz = open_path(c->file);
        BENCH_CHECK(spdl_npz_read(npz, 0, data, sizeof data, NULL) == SPDL_OK);
        spdl_npz_close(npz);
        sink += data[i % 1024];
    }
    return since(c, start, c->repeats);
}

/* What the system alone takes. */
static double npy_file_limit(const void *arg) {
    const file_case *c = (const file_case *)arg;
    const uint64_t start = bench_ns();
    uint8_t data[2048];
    int i;
    for (i = 0; i < c->repeats; ++i) {
        struct stat status;
        const int fd = open(path_of(c->file), O_RDONLY | O_CLOEXEC);
        BENCH_CHECK(fd >= 0 && fstat(fd, &status) == 0);
        BENCH_CHECK(read(fd, data, sizeof data) == (ssize_t)status.st_size);
        close(fd);
        sink += data[i % 1024];
    }
    return since(c, start, c->repeats);
}

static uint8_t npy_bytes[1152];

static double npy_header(const void *arg) {
    const file_case *c = (const file_case *)arg;
    const uint64_t start = bench_ns();
    spdl_npy_info info;
    int i;
    for (i = 0; i < c->repeats; ++i) {
        spdl_npz *npz = open_bytes(npy_bytes, sizeof npy_bytes, true);
        BENCH_CHECK(spdl_npz_info(npz, 0, &info, NULL) == SPDL_OK);
        spdl_npz_close(npz);
        sink += info.count;
    }
    return since(c, start, c->repeats);
}

static void rows_npy(void) {
    const bench_row file = { "npy_file_1kb_us", "us", NULL, false, 1.5, false, 0 };
    const bench_row limit = { "npy_file_1kb_vs_read", "us", "open+fstat+read+close", false, 0,
                              false, 0 };
    const bench_row header = { "npy_header_us", "us", NULL, false, 0.33, false, 0 };
    file_case c = { "small.npy", "numpy_npy", 2000, 50, 1e3, 0, NULL };
    size_t bytes;
    uint8_t *map;
    if (bench_wanted(file.name)) row_with_python(file, "numpy.load", npy_file, &c);
    if (bench_wanted(limit.name)) {
        bench_compare_sides(&limit, ROUNDS, npy_file, &c, npy_file_limit, &c);
    }
    if (!bench_wanted(header.name)) return;
    map = map_file(path_of(c.file), &bytes);
    BENCH_CHECK(bytes == sizeof npy_bytes);
    memcpy(npy_bytes, map, bytes);
    munmap(map, bytes);
    c.operation = "spdl_npy_memory";
    c.repeats = 20000;
    c.peer_repeats = 1000;
    row_with_python(header, "SPDL load_npy, memory", npy_header, &c);
}

/* ---- CRC ---- */

typedef struct crc_case {
    const archive *a;
    peer_crc_fn crc; /* NULL: ours */
} crc_case;

/* GB/s over the one member of the archive, which stays in the cache. */
static double crc_rate(const void *arg) {
    const crc_case *c = (const crc_case *)arg;
    const peer_member *m = &c->a->members[0];
    const int repeats = 500;
    const uint64_t start = bench_ns();
    spdl__crc own;
    int i;
    spdl__crc_init(&own);
    for (i = 0; i < repeats; ++i)
        sink += c->crc != NULL ? c->crc(m->in, m->bytes) : spdl__crc_add(&own, 0, m->in, m->bytes);
    return (double)m->bytes * repeats / (double)(bench_ns() - start);
}

static void row_crc(const archive *a, const char *name, const char *peer_name, peer_crc_fn crc,
                    double goal) {
    const bench_row row = { name, "GB/s", peer_name, true, 0, false, goal };
    const crc_case ours = { a, NULL };
    const crc_case peer = { a, crc };
    if (crc == NULL || !bench_wanted(name)) return;
    bench_compare_sides(&row, ROUNDS, crc_rate, &ours, crc_rate, &peer);
}

static void rows_crc(void) {
    archive a;
    if (!bench_opt.list) archive_open(&a, "stored_1mb");
    row_crc(&a, "crc32", "libdeflate", peer_libdeflate_crc, 0.9);
    row_crc(&a, "crc32_isal", "ISA-L", peer_isal_crc, 0);
    row_crc(&a, "crc32_zlib", "zlib", peer_zlib_crc, 0);
    if (!bench_opt.list) archive_close(&a);
}

/* ---- what the sections cost a program ---- */

/* The script prints one number. */
static double size_script(const void *what) {
    char command[128];
    char line[64] = "";
    FILE *script;
    snprintf(command, sizeof command, "bench/npz_size.sh %s", (const char *)what);
    script = popen(command, "r");
    BENCH_CHECK(script != NULL && fgets(line, sizeof line, script) != NULL);
    BENCH_CHECK(pclose(script) == 0);
    return atof(line);
}

static void row_size(const char *name, const char *unit, int rounds) {
    const bench_row row = { name, unit, NULL, false, 0, false, 0 };
    if (!bench_wanted(name)) return;
    bench_compare_sides(&row, rounds, size_script, name, NULL, NULL);
}

/* ---- start ---- */

static void start(void) {
    const char *directory = getenv("BENCH_NPZ_DATA");
    const char *program = getenv("BENCH_NPZ_PYTHON");
    snprintf(data_path, sizeof data_path, "%s", directory != NULL ? directory : "build/bench/npz");
    if (bench_opt.list) return;
    signal(SIGPIPE, SIG_IGN);
    peer_tell_missing();
    peer_python_start(&python, program != NULL ? program : "python3", "bench/npz_peers.py");
    if (python.versions[0] != '\0') fprintf(stderr, "peers: %s\n", python.versions);
}

int main(int argc, char **argv) {
    bench_start("npz", argc, argv);
    start();
    rows_of_contents();
    row_vs_cnpy("load_1kb", "stored_1kb", 2000, 0.95);
    row_vs_cnpy("load_64kb", "stored_64kb", 1000, 0.95);
    row_of_file("load_1mb_pieces", "stored_1mb", 200, 0.95, "pread, CRC by pieces", load_fresh,
                load_pieces);
    make_aligned();
    row_of_file("load_1mb_no_crc", "aligned_1mb", 200, 1.8, "cnpy's loop", load_trusting,
                load_cnpy);
    row_vs_cnpy("load_stored_1mb", "stored_1mb", 200, 0);
    row_vs_cnpy("load_stored_256mb", "stored_256mb", 1, 1.3);
    row_vs_cnpy("load_stored_small", "stored_small", 1, 1.3);
    if (PEER_ZLIB) row_vs_cnpy("load_deflated", "f32_normal", 1, 2);
    row_load("deflated_vs_numpy", "f32_normal", "numpy_load", "numpy.load", 0);
    row_load("deflated_vs_spdl", "f32_normal", "spdl_load", "SPDL", 0);
    row_load("compressible_vs_spdl", "labels", "spdl_load", "SPDL", 4);
    row_load("sparse_vs_spdl", "sparse", "spdl_load", "SPDL", 4);
    row_stored_view();
    rows_stored_sum();
    row_member_parse();
    rows_npy();
    rows_crc();
    row_size("compile_ms", "ms", 5);
    row_size("code_kb", "KB", 1);
    return 0;
}
