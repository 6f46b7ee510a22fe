/* The decoder and the CRC by themselves: what reads .npz files is in test_npz.c. Streams are made
   here by a small encoder that does not compress but uses all that deflate has, so that what they
   must become is known. Input and output lie against pages that may not be touched. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "test.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MAP_ANONYMOUS
#define MAP_ANONYMOUS MAP_ANON
#endif

/* ============================================================================================= */
/* Numbers and memory */

static uint64_t random_state;

static unsigned below(unsigned bound) { return (unsigned)(test_random(&random_state) % bound); }

/* Memory whose last byte is followed by a page that may not be touched. */
typedef struct guarded {
    uint8_t *at;
    size_t bytes;
    void *map;
    size_t map_bytes;
} guarded;

static guarded guarded_new(size_t bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    guarded g;
    g.bytes = bytes;
    g.map_bytes = (bytes + page - 1) / page * page + page;
    g.map = mmap(NULL, g.map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (g.map == MAP_FAILED) abort();
    g.at = (uint8_t *)g.map + g.map_bytes - page;
    if (mprotect(g.at, page, PROT_NONE) != 0) abort();
    g.at -= bytes;
    return g;
}

static void guarded_free(guarded g) { munmap(g.map, g.map_bytes); }

/* The last `bytes` bytes of the memory, filled from somewhere. */
static uint8_t *guarded_tail(const guarded *g, const void *from, size_t bytes) {
    uint8_t *at = g->at + g->bytes - bytes;
    if (bytes > 0) memcpy(at, from, bytes);
    return at;
}

/* ============================================================================================= */
/* An encoder: any tokens, any codes */

#define MOST 2000000 /* of either; a block of 3000 tokens makes less than half of it */

typedef struct stream {
    uint8_t *in, *out; /* deflated, and what that becomes */
    size_t in_bytes, out_bytes, room; /* for either */
    uint64_t held;
    unsigned held_bits;
} stream;

static void put_bits(stream *s, unsigned value, unsigned count) {
    s->held |= (uint64_t)value << s->held_bits;
    for (s->held_bits += count; s->held_bits >= 8; s->held_bits -= 8, s->held >>= 8) {
        if (s->in_bytes == s->room) abort();
        s->in[s->in_bytes++] = (uint8_t)s->held;
    }
}

static void put_byte(stream *s, unsigned byte) {
    if (s->out_bytes == s->room) abort();
    s->out[s->out_bytes++] = (uint8_t)byte;
}

/* A prefix code: the length of each symbol's code, and the code with its first bit lowest. */
typedef struct code {
    uint8_t length[288];
    unsigned bits[288];
} code;

static void code_assign(code *c, unsigned symbols) {
    unsigned next = 0;
    for (unsigned length = 1; length <= 15; ++length, next *= 2)
        for (unsigned symbol = 0; symbol < symbols; ++symbol) {
            if (c->length[symbol] != length) continue;
            c->bits[symbol] = 0;
            for (unsigned bit = 0; bit < length; ++bit)
                c->bits[symbol] |= (next >> bit & 1) << (length - 1 - bit);
            ++next;
        }
}

/* A complete code of `used` of the symbols: begins as one leaf, which is split until there are
   enough. Symbol `needed` is among them. `lean` makes long codes. */
static void code_random(code *c, unsigned symbols, unsigned used, unsigned needed, bool lean) {
    uint8_t leaves[288] = { 0 };
    unsigned count = 1, at;
    memset(c, 0, sizeof *c);
    while (count < used) {
        at = lean ? count - 1 : below(count);
        if (leaves[at] >= (lean && used - count < 100 ? 15 : 13)) at = below(count);
        if (leaves[at] == 15) continue;
        leaves[count++] = ++leaves[at];
    }
    if (count == 1) leaves[0] = 1; /* a lone code of one bit is allowed */
    for (unsigned i = 0; i < count; ++i) {
        at = i == 0 ? needed : below(symbols);
        while (c->length[at] > 0) at = (at + 1) % symbols;
        c->length[at] = leaves[i];
    }
    code_assign(c, symbols);
}

static void put_symbol(stream *s, const code *c, unsigned symbol) {
    put_bits(s, c->bits[symbol], c->length[symbol]);
}

static const uint16_t length_base[29] = { 3,  4,  5,  6,   7,   8,   9,   10,  11, 13,
                                          15, 17, 19, 23,  27,  31,  35,  43,  51, 59,
                                          67, 83, 99, 115, 131, 163, 195, 227, 258 };
static const uint8_t length_extra[29] = { 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2,
                                          2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0 };

/* A match, if the codes have symbols for one that fits what is there. */
static bool put_match(stream *s, const code *litlen, const code *dist, unsigned near) {
    const unsigned length_symbol = below(29), dist_symbol = below(near);
    const unsigned dist_extra = dist_symbol < 4 ? 0 : dist_symbol / 2 - 1;
    const unsigned dist_base =
        dist_symbol < 4 ? dist_symbol + 1 : ((2 + dist_symbol % 2) << dist_extra) + 1;
    const unsigned more = below(1u << length_extra[length_symbol]);
    const unsigned further = below(1u << dist_extra);
    unsigned length = length_base[length_symbol] + more;
    if (litlen->length[257 + length_symbol] == 0 || dist->length[dist_symbol] == 0) return false;
    if (dist_base + further > s->out_bytes) return false;
    put_symbol(s, litlen, 257 + length_symbol);
    put_bits(s, more, length_extra[length_symbol]);
    put_symbol(s, dist, dist_symbol);
    put_bits(s, further, dist_extra);
    for (; length > 0; --length) put_byte(s, s->out[s->out_bytes - (dist_base + further)]);
    return true;
}

static void put_literal(stream *s, const code *litlen, unsigned kinds) {
    unsigned byte = below(kinds), tries = 256;
    while (litlen->length[byte] == 0 && tries-- > 0) byte = (byte + 1) & 255;
    if (litlen->length[byte] == 0) return;
    put_symbol(s, litlen, byte);
    put_byte(s, byte);
}

static void put_tokens(stream *s, const code *litlen, const code *dist, unsigned tokens) {
    const unsigned matches = below(101), near = below(4) == 0 ? 4 : 30;
    const unsigned kinds = below(2) == 0 ? 256 : 1 + below(8);
    for (; tokens > 0; --tokens)
        if (below(100) >= matches || !put_match(s, litlen, dist, near))
            put_literal(s, litlen, kinds);
    put_symbol(s, litlen, 256);
}

static void put_stored(stream *s, unsigned bytes) {
    put_bits(s, 0, 2);
    if (s->held_bits > 0) put_bits(s, 0, 8 - s->held_bits);
    put_bits(s, bytes, 16);
    put_bits(s, bytes ^ 0xffff, 16);
    for (; bytes > 0; --bytes) {
        const unsigned byte = below(256);
        put_bits(s, byte, 8);
        put_byte(s, byte);
    }
}

static void put_fixed(stream *s, unsigned tokens) {
    code litlen, dist;
    for (unsigned i = 0; i < 288; ++i)
        litlen.length[i] = i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8;
    memset(dist.length, 5, 32);
    code_assign(&litlen, 288);
    code_assign(&dist, 32);
    put_bits(s, 1, 2);
    put_tokens(s, &litlen, &dist, tokens);
}

/* The lengths of both codes, zeros as runs; 0 to 12 have codes of 4 bits, the others of 5. */
static void put_lengths(stream *s, const uint8_t *lengths, unsigned count) {
    code pre;
    static const uint8_t place[19] = { 16, 17, 18, 0, 8,  7, 9,  6, 10, 5,
                                       11, 4,  12, 3, 13, 2, 14, 1, 15 };
    memset(&pre, 0, sizeof pre);
    memset(pre.length, 4, 13);
    memset(pre.length + 13, 5, 6);
    code_assign(&pre, 19);
    for (unsigned i = 0; i < 19; ++i) put_bits(s, pre.length[place[i]], 3);
    for (unsigned i = 0, run; i < count; i += run) {
        for (run = 1; i + run < count && lengths[i + run] == lengths[i] && run < 138;) ++run;
        if (lengths[i] == 0 && run >= 11) {
            put_symbol(s, &pre, 18);
            put_bits(s, run - 11, 7);
        } else if (lengths[i] == 0 && run >= 3) {
            put_symbol(s, &pre, 17);
            put_bits(s, run - 3, 3);
        } else {
            put_symbol(s, &pre, lengths[i]);
            run = run >= 4 && run <= 7 ? run : 1;
            if (run == 1) continue;
            put_symbol(s, &pre, 16);
            put_bits(s, run - 4, 2);
        }
    }
}

static void put_dynamic(stream *s, unsigned tokens) {
    uint8_t lengths[286 + 30];
    code litlen, dist;
    const bool lean = below(4) == 0;
    code_random(&litlen, 286, 1 + below(286), 256, lean);
    code_random(&dist, 30, 1 + below(30), below(30), lean);
    if (below(8) == 0) memset(&dist, 0, sizeof dist); /* no distances at all */
    memcpy(lengths, litlen.length, 286);
    memcpy(lengths + 286, dist.length, 30);
    put_bits(s, 2, 2);
    put_bits(s, 29, 5);
    put_bits(s, 29, 5);
    put_bits(s, 15, 4);
    put_lengths(s, lengths, 286 + 30);
    put_tokens(s, &litlen, &dist, tokens);
}

static stream *stream_new_of(size_t room) {
    stream *s = (stream *)calloc(1, sizeof *s);
    if (s == NULL) abort();
    s->room = room;
    s->in = (uint8_t *)malloc(room);
    s->out = (uint8_t *)malloc(room);
    if (s->in == NULL || s->out == NULL) abort();
    return s;
}

static stream *stream_new(void) { return stream_new_of(MOST); }

static void stream_free(stream *s) {
    free(s->in);
    free(s->out);
    free(s);
}

/* A stream of some blocks of any kind, of about so many tokens each. */
static void stream_make(stream *s, uint64_t seed, unsigned blocks, unsigned tokens) {
    random_state = seed;
    s->in_bytes = s->out_bytes = 0;
    s->held = s->held_bits = 0;
    for (; blocks > 0; --blocks) {
        const unsigned kind = below(8), some = below(tokens + 1);
        if (s->out_bytes > MOST / 2) blocks = 1;
        put_bits(s, blocks == 1, 1);
        if (kind == 0) put_stored(s, some);
        else if (kind == 1) put_fixed(s, some);
        else put_dynamic(s, some);
    }
    if (s->held_bits > 0) put_bits(s, 0, 8 - s->held_bits);
}

/* ============================================================================================= */
/* Decoding */

typedef struct outcome {
    spdl__inflate_mode mode;
    const char *reason;
    size_t made, used;
    uint32_t crc;
} outcome;

static spdl__crc *tables(void) {
    static spdl__crc crc; /* a test is one process with one thread */
    if (crc.table[0][1] == 0) spdl__crc_init(&crc);
    return &crc;
}

/* What decoding has come to; FULL and nothing more to come is DONE. */
static outcome outcome_of(spdl__inflate *s, spdl__inflate_mode mode) {
    outcome o;
    if (mode == SPDL__INFLATE_FULL) mode = spdl__inflate_run(s, s->out);
    o.mode = mode;
    o.reason = mode == SPDL__INFLATE_FAILED ? s->reason : "";
    o.made = (size_t)(s->out - s->base);
    o.used = (size_t)(s->in - s->in_begin);
    o.crc = spdl__crc_add(tables(), 0, s->base, o.made);
    return o;
}

/* In one go. `room` bytes behind the input may be looked at. */
static outcome decode(const uint8_t *in, size_t bytes, uint8_t *out, size_t limit, size_t room) {
    spdl__inflate s;
    spdl__inflate_init(&s, in, bytes, out);
    s.in_room += room;
    return outcome_of(&s, spdl__inflate_run(&s, out + limit));
}

/* With a limit that is never far enough for the fast loop. */
static outcome decode_with_care(const uint8_t *in, size_t bytes, uint8_t *out, size_t limit) {
    spdl__inflate s;
    spdl__inflate_mode mode = SPDL__INFLATE_FULL;
    spdl__inflate_init(&s, in, bytes, out);
    while (mode == SPDL__INFLATE_FULL && (size_t)(s.out - out) < limit) {
        const size_t left = limit - (size_t)(s.out - out);
        mode = spdl__inflate_run(&s, s.out + (left < 20 ? left : 20));
    }
    return outcome_of(&s, mode);
}

enum { SLACK = SPDL__INFLATE_FAST_OUT };

/* With SLACK bytes behind `limit` that may be overwritten, and up to four stops before it. */
static outcome decode_with_slack(const uint8_t *in, size_t bytes, uint8_t *out, size_t limit) {
    spdl__inflate s;
    spdl__inflate_mode mode = SPDL__INFLATE_FULL;
    spdl__inflate_init(&s, in, bytes, out);
    s.slack = true;
    for (unsigned stops = below(5); stops > 0 && mode == SPDL__INFLATE_FULL; --stops) {
        uint8_t *stop = s.out + below((unsigned)(limit - (size_t)(s.out - out)) + 1);
        mode = spdl__inflate_run(&s, stop);
        CHECK(s.out <= stop && (mode != SPDL__INFLATE_FULL || s.out == stop));
    }
    if (mode == SPDL__INFLATE_FULL) mode = spdl__inflate_run(&s, out + limit);
    return outcome_of(&s, mode);
}

static bool same(outcome a, outcome b) {
    return CHECK_EQ(a.mode, b.mode) && CHECK_STR(a.reason, b.reason) && CHECK_EQ(a.made, b.made) &&
           CHECK_EQ(a.crc, b.crc);
}

static void becomes(const stream *s, outcome o) {
    CHECK_EQ(o.mode, SPDL__INFLATE_DONE);
    CHECK_STR(o.reason, "");
    CHECK_EQ(o.made, s->out_bytes);
    CHECK_EQ(o.crc, spdl__crc_add(tables(), 0, s->out, s->out_bytes));
}

/* Fast, with care, with room behind the input or the output: all yield what was encoded. */
static void random_streams(void) {
    stream *s = stream_new();
    for (unsigned seed = 0; seed < (TEST_SANITIZED ? 60 : 400); ++seed) {
        guarded in, out;
        stream_make(s, seed, 1 + seed % 5, seed % 3 == 0 ? 40 : 3000);
        in = guarded_new(s->in_bytes);
        out = guarded_new(s->out_bytes + SLACK);
        memcpy(in.at, s->in, s->in_bytes);
        becomes(s, decode_with_slack(in.at, s->in_bytes, out.at, s->out_bytes));
        guarded_free(out);
        out = guarded_new(s->out_bytes);
        becomes(s, decode(in.at, s->in_bytes, out.at, s->out_bytes, 0));
        becomes(s, decode_with_care(in.at, s->in_bytes, out.at, s->out_bytes));
        becomes(s, decode(s->in, s->in_bytes, out.at, s->out_bytes, 100));
        if (s->out_bytes > 0)
            CHECK_EQ(decode(in.at, s->in_bytes, out.at + 1, s->out_bytes - 1, 0).mode,
                     SPDL__INFLATE_FULL); /* it makes more than that */
        guarded_free(in);
        guarded_free(out);
    }
    stream_free(s);
}

/* Decodes to 16 bits for a byte, in steps of so many; true if these are what was encoded. */
static bool widened(const stream *s, const uint8_t *in, uint8_t *out, size_t step) {
    spdl__inflate state;
    spdl__inflate_mode mode = SPDL__INFLATE_FULL;
    uint16_t value;
    spdl__inflate_init(&state, in, s->in_bytes, out);
    state.wide = 1;
    while (mode == SPDL__INFLATE_FULL && (size_t)(state.out - out) < 2 * s->out_bytes) {
        const size_t left = 2 * s->out_bytes - (size_t)(state.out - out);
        mode = spdl__inflate_run(&state, state.out + (left < step ? left : step));
    }
    if (mode == SPDL__INFLATE_FULL) mode = spdl__inflate_run(&state, state.out);
    if (!CHECK_EQ(mode, SPDL__INFLATE_DONE)) return false;
    if (!CHECK_EQ((size_t)(state.out - out), 2 * s->out_bytes)) return false;
    for (size_t i = 0; i < s->out_bytes; ++i) {
        memcpy(&value, out + 2 * i, 2);
        if (!CHECK_EQ(value, s->out[i])) return false;
    }
    return true;
}

/* Wide output, fast and with care, against guard pages. */
static void wide_streams(void) {
    stream *s = stream_new();
    for (unsigned seed = 0; seed < (TEST_SANITIZED ? 40 : 300); ++seed) {
        guarded in, out;
        stream_make(s, seed, 1 + seed % 5, seed % 3 == 0 ? 40 : 3000);
        in = guarded_new(s->in_bytes);
        out = guarded_new(2 * s->out_bytes);
        memcpy(in.at, s->in, s->in_bytes);
        const bool good = widened(s, in.at, out.at, SIZE_MAX) && widened(s, in.at, out.at, 20) &&
                          widened(s, in.at, out.at, 1000);
        guarded_free(in);
        guarded_free(out);
        if (!good) break;
    }
    stream_free(s);
}

/* A stream that ends early is refused as such, wherever it ends; what comes behind it is not taken
   for its rest, though it may be looked at. */
static void truncated_anywhere(void) {
    stream *s = stream_new();
    for (unsigned seed = 1; seed < 12; ++seed) {
        guarded in, out;
        stream_make(s, seed, 3, 300);
        in = guarded_new(s->in_bytes);
        out = guarded_new(s->out_bytes);
        for (size_t bytes = 0; bytes < s->in_bytes; ++bytes) {
            const uint8_t *at = guarded_tail(&in, s->in, bytes);
            outcome o = decode(at, bytes, out.at, s->out_bytes, 0);
            CHECK_EQ(o.mode, SPDL__INFLATE_FAILED);
            CHECK_STR(o.reason, "the deflate stream is cut off");
            o = decode(s->in, bytes, out.at, s->out_bytes, s->in_bytes - bytes);
            CHECK_EQ(o.mode, SPDL__INFLATE_FAILED);
            CHECK_STR(o.reason, "the deflate stream is cut off");
        }
        guarded_free(in);
        guarded_free(out);
    }
    stream_free(s);
}

/* Damaged streams: the fast loop must come to the same end as the careful decoder, with the same
   bytes and the same reason. */
static void damaged_anyhow(void) {
    stream *s = stream_new();
    guarded in = guarded_new(20000), out = guarded_new(20000);
    unsigned failed = 0, rounds = TEST_SANITIZED ? 1000 : 20000;
    for (unsigned round = 0; round < rounds; ++round) {
        uint8_t *at;
        outcome o;
        if (round % 50 == 0) {
            uint64_t seed = test_seed() + round * 1000;
            do stream_make(s, seed++, 2, 200);
            while (s->in_bytes > in.bytes || s->out_bytes > out.bytes || s->in_bytes < 10);
        }
        at = guarded_tail(&in, s->in, s->in_bytes);
        for (unsigned k = 1 + below(3); k > 0; --k)
            at[below(4) == 0 ? below(10) : below((unsigned)s->in_bytes)] ^=
                (uint8_t)(1u << below(8));
        o = decode(at, s->in_bytes, out.at, out.bytes, 0);
        if (o.mode == SPDL__INFLATE_FAILED) ++failed;
        if (!same(o, decode_with_care(at, s->in_bytes, out.at, out.bytes))) break;
        if (o.made > out.bytes - SLACK) continue;
        if (!same(o, decode_with_slack(at, s->in_bytes, out.at, out.bytes - SLACK))) break;
    }
    CHECK(failed > rounds / 2);
    guarded_free(in);
    guarded_free(out);
    stream_free(s);
}

/* ============================================================================================= */
/* Lanes */

#define MEMBERS 12

/* Any number of lanes yields what each stream alone does, whatever the others do; pieces too. */
static void lanes_yield_the_same(unsigned count, size_t piece) {
    stream *members[MEMBERS];
    guarded in[MEMBERS], out[MEMBERS];
    spdl__inflate state[SPDL__INFLATE_LANES], *lanes[SPDL__INFLATE_LANES];
    spdl__inflate_tables fixed;
    unsigned which[SPDL__INFLATE_LANES], next = 0, used = 0;
    spdl__inflate_build_fixed(&fixed);
    for (unsigned i = 0; i < MEMBERS; ++i) {
        members[i] = stream_new();
        stream_make(members[i], i * 10 + count, 1 + i % 4, i % 5 == 0 ? 30 : 3000);
        if (i == 7) members[i]->in_bytes /= 2;
        in[i] = guarded_new(members[i]->in_bytes);
        out[i] = guarded_new(members[i]->out_bytes);
        memcpy(in[i].at, members[i]->in, members[i]->in_bytes);
    }
    for (; used < count; ++used) lanes[used] = &state[used];
    for (unsigned i = 0; i < count; ++i, ++next) {
        which[i] = next;
        spdl__inflate_init(lanes[i], in[next].at, members[next]->in_bytes, out[next].at);
        lanes[i]->fixed = &fixed;
    }
    while (used > 0) {
        spdl__inflate_mode mode;
        unsigned lane, i;
        for (i = 0; i < used; ++i) {
            const size_t made = (size_t)(lanes[i]->out - lanes[i]->base);
            const size_t left = members[which[i]]->out_bytes - made;
            lanes[i]->limit = lanes[i]->out + (left < piece ? left : piece);
        }
        lane = spdl__inflate_run_lanes(lanes, used, &mode);
        REQUIRE(lane < used);
        i = which[lane];
        if (mode == SPDL__INFLATE_FULL &&
            (size_t)(lanes[lane]->out - lanes[lane]->base) < members[i]->out_bytes)
            continue; /* the next piece of it */
        if (i == 7) CHECK_EQ(mode, SPDL__INFLATE_FAILED);
        else becomes(members[i], outcome_of(lanes[lane], mode));
        if (next < MEMBERS) {
            which[lane] = next;
            spdl__inflate_init(lanes[lane], in[next].at, members[next]->in_bytes, out[next].at);
            ++next;
        } else {
            lanes[lane] = lanes[--used];
            which[lane] = which[used];
        }
    }
    for (unsigned i = 0; i < MEMBERS; ++i) {
        guarded_free(in[i]);
        guarded_free(out[i]);
        stream_free(members[i]);
    }
}

static void lanes_of_any_number(void) {
    for (unsigned count = 1; count <= SPDL__INFLATE_LANES; ++count) {
        lanes_yield_the_same(count, MOST);
        lanes_yield_the_same(count, 1000);
        lanes_yield_the_same(count, 77);
    }
}

/* ============================================================================================= */
/* One stream by several threads */

#define HELPERS 3

static void *helper(void *split) {
    spdl__split_help((spdl__split *)split);
    return NULL;
}

/* Decodes with helpers. `head` bytes are decoded before, to where a header would be. */
static outcome decode_split(const stream *s, uint8_t *out, size_t limit, size_t head) {
    pthread_t threads[HELPERS];
    spdl_allocator allocator;
    spdl__split split;
    spdl__inflate inflate;
    spdl__inflate_mode mode;
    outcome o;
    memset(&allocator, 0, sizeof allocator);
    memset(&o, 0, sizeof o);
    spdl__inflate_init(&inflate, s->in, s->in_bytes, out);
    spdl__inflate_run(&inflate, out + head);
    inflate.limit = out + limit;
    if (!CHECK(spdl__split_open(&split, &inflate, HELPERS + 1, &allocator))) return o;
    for (int i = 0; i < HELPERS; ++i)
        if (pthread_create(&threads[i], NULL, helper, &split) != 0) abort();
    do mode = spdl__split_step(&split);
    while (mode == SPDL__INFLATE_BLOCK);
    spdl__split_stop(&split);
    for (int i = 0; i < HELPERS; ++i) pthread_join(threads[i], NULL);
    o = outcome_of(&inflate, mode);
    spdl__split_close(&split);
    return o;
}

/* Chunks are found, used, and make no difference; nor do those that cannot be used. */
static void split_yields_the_same(void) {
    stream *s = stream_new();
    uint8_t *out = (uint8_t *)malloc(MOST);
    if (out == NULL) abort();
    for (unsigned seed = 0; seed < (TEST_SANITIZED ? 10 : 60); ++seed) {
        do stream_make(s, test_seed() + seed * 1000 + s->out_bytes, 40, 3000);
        while (s->out_bytes < 60000);
        becomes(s, decode_split(s, out, s->out_bytes, seed % 2 == 0 ? 0 : 128));
    }
    free(out);
    stream_free(s);
}

/* A stream of which chunks are known to be of use: literals only, so that nothing looks back. */
static void split_uses_chunks(void) {
    stream *s = stream_new();
    uint8_t *out = (uint8_t *)malloc(MOST);
    spdl_allocator allocator;
    spdl__inflate inflate;
    spdl__split split;
    spdl__split_lanes lanes = { { NULL }, 0 };
    unsigned used = 0;
    code litlen, dist;
    uint8_t lengths[286 + 30];
    if (out == NULL) abort();
    memset(&allocator, 0, sizeof allocator);
    memset(&litlen, 0, sizeof litlen);
    memset(&dist, 0, sizeof dist);
    memset(litlen.length, 8, 255);
    litlen.length[255] = litlen.length[256] = 9; /* a complete code of 257 symbols */
    dist.length[0] = dist.length[1] = 1;
    code_assign(&litlen, 286);
    code_assign(&dist, 30);
    memcpy(lengths, litlen.length, 286);
    memcpy(lengths + 286, dist.length, 30);
    for (int block = 0; block < 30; ++block) {
        put_bits(s, block == 29, 1);
        put_bits(s, 2, 2);
        put_bits(s, 29, 5);
        put_bits(s, 29, 5);
        put_bits(s, 15, 4);
        put_lengths(s, lengths, 286 + 30);
        for (int i = 0; i < 12000; ++i) put_literal(s, &litlen, 256);
        put_symbol(s, &litlen, 256);
    }
    put_bits(s, 0, 7);
    spdl__inflate_init(&inflate, s->in, s->in_bytes, out);
    inflate.limit = out + s->out_bytes;
    REQUIRE(spdl__split_open(&split, &inflate, 2, &allocator));
    for (;;) { /* the helper's work is done in between, by this thread */
        const uint32_t number = split.front + 1;
        spdl__inflate_mode mode;
        while (spdl__split_turn(&split, &lanes)) continue;
        if (number < split.chunks) {
            const spdl__split_chunk *chunk = &split.slot[number % split.slots];
            used += chunk->done == number + 1 && chunk->wide + chunk->bytes > 12000;
        }
        mode = spdl__split_step(&split);
        if (mode == SPDL__INFLATE_BLOCK) continue;
        becomes(s, outcome_of(&inflate, mode));
        break;
    }
    CHECK(used >= split.chunks - 2);
    spdl__split_stop(&split);
    spdl__split_close(&split);
    free(out);
    stream_free(s);
}

/* Damage is told as one thread tells it. */
static void split_of_damaged(void) {
    stream *s = stream_new();
    uint8_t *out = (uint8_t *)malloc(MOST);
    if (out == NULL) abort();
    for (unsigned round = 0; round < (TEST_SANITIZED ? 10 : 100); ++round) {
        do stream_make(s, test_seed() + round * 1000 + s->out_bytes, 30, 3000);
        while (s->out_bytes < 60000);
        if (round % 4 == 0) s->in_bytes -= 1 + below((unsigned)s->in_bytes / 2);
        else s->in[below((unsigned)s->in_bytes)] ^= (uint8_t)(1u << below(8));
        if (!same(decode_split(s, out, s->out_bytes, 0),
                  decode(s->in, s->in_bytes, out, s->out_bytes, 0)))
            break;
    }
    free(out);
    stream_free(s);
}

/* Blocks go on behind one that says it is the last: it is the last all the same. */
static void split_ends_where_the_stream_does(void) {
    stream *s = stream_new();
    uint8_t *out = (uint8_t *)malloc(MOST);
    spdl__inflate inflate;
    if (out == NULL) abort();
    do stream_make(s, test_seed() + s->out_bytes, 40, 3000);
    while (s->out_bytes < 60000);
    spdl__inflate_init(&inflate, s->in, s->in_bytes, out);
    inflate.by_block = true;
    while (spdl__inflate_run(&inflate, out + s->out_bytes) == SPDL__INFLATE_BLOCK) {
        const uint64_t bit = spdl__split_at(&inflate);
        outcome whole;
        if (!spdl__inflate_block(&inflate) || inflate.last_block) break;
        s->in[bit / 8] ^= (uint8_t)(1u << bit % 8);
        whole = decode(s->in, s->in_bytes, s->out, s->out_bytes, 0);
        CHECK_EQ(whole.mode, SPDL__INFLATE_DONE);
        if (!same(decode_split(s, s->out, s->out_bytes, 0), whole)) break;
        s->in[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    free(out);
    stream_free(s);
}

/* ============================================================================================= */
/* One large member of an archive by the workers of a pool */

#define LARGE 12000000 /* room for a stream that is split */

/* One stored block: the header of a .npy file of bytes, whose number is put in at the end. */
static void put_npy_header(stream *s) {
    static const char head[11] = "\x93NUMPY\1\0v\0";
    put_bits(s, 0, 3);
    put_bits(s, 0, 5);
    put_bits(s, 128, 16);
    put_bits(s, 128 ^ 0xffff, 16);
    for (int i = 0; i < 128; ++i) {
        const unsigned byte = i < 10 ? (uint8_t)head[i] : i < 127 ? ' ' : '\n';
        put_bits(s, byte, 8);
        put_byte(s, byte);
    }
}

static void end_npy_header(stream *s) {
    char text[118];
    const int length =
        snprintf(text, sizeof text, "{'descr': '|u1', 'fortran_order': False, 'shape': (%zu,), }",
                 s->out_bytes - 128);
    memcpy(s->out + 10, text, (size_t)length);
    memcpy(s->in + 5 + 10, text, (size_t)length);
}

/* A block of 63 literals to a match, which reaches back up to 32 KB: chunks have marks to resolve,
   and yet it does not grow too much to be split. */
static void put_mixed(stream *s, unsigned tokens) {
    uint8_t lengths[286 + 30];
    code litlen, dist;
    code_random(&litlen, 286, 286, 256, false);
    code_random(&dist, 30, 30, 0, false);
    memcpy(lengths, litlen.length, 286);
    memcpy(lengths + 286, dist.length, 30);
    put_bits(s, 2, 2);
    put_bits(s, 29, 5);
    put_bits(s, 29, 5);
    put_bits(s, 15, 4);
    put_lengths(s, lengths, 286 + 30);
    for (; tokens > 0; --tokens)
        if (below(64) > 0 || !put_match(s, &litlen, &dist, 30)) put_literal(s, &litlen, 256);
    put_symbol(s, &litlen, 256);
}

static stream *large_stream(void) {
    stream *s = stream_new_of(LARGE);
    random_state = test_seed();
    put_npy_header(s);
    put_bits(s, 0, 1);
    put_stored(s, 40000); /* no match reaches back to the header, which is changed in the end */
    while (s->in_bytes < SPDL__SPLIT_LEAST + 50000) {
        put_bits(s, 0, 1);
        put_mixed(s, 20000);
    }
    put_bits(s, 1, 1);
    put_mixed(s, 100);
    if (s->held_bits > 0) put_bits(s, 0, 8 - s->held_bits);
    end_npy_header(s);
    return s;
}

static uint8_t *append(uint8_t *at, const void *from, size_t bytes) {
    memcpy(at, from, bytes);
    return at + bytes;
}

/* An archive of this stream, "a", whose directory says that it becomes what it does. */
static uint8_t *zip_of(const stream *s, size_t *bytes) {
    static const uint8_t local[6] = { 'P', 'K', 3, 4, 20, 0 };
    static const uint8_t entry[8] = { 'P', 'K', 1, 2, 20, 0, 20, 0 };
    static const uint8_t end[8] = { 'P', 'K', 5, 6, 0, 0, 0, 0 };
    uint8_t common[24] = { 0, 0, 8 }; /* flags, method, time, CRC, both sizes, length of name */
    uint8_t *zip = (uint8_t *)calloc(1, s->in_bytes + 200), *at = zip;
    const uint32_t number[3] = { spdl__crc_add(tables(), 0, s->out, s->out_bytes),
                                 (uint32_t)s->in_bytes, (uint32_t)s->out_bytes };
    if (zip == NULL) abort();
    for (int i = 0; i < 12; ++i) common[8 + i] = (uint8_t)(number[i / 4] >> 8 * (i % 4));
    common[20] = 1;
    at = append(at, local, sizeof local);
    at = append(at, common, sizeof common);
    *at++ = 'a';
    at = append(at, s->in, s->in_bytes);
    const size_t start = (size_t)(at - zip);
    at = append(at, entry, sizeof entry);
    at = append(at, common, sizeof common);
    at += 14; /* comment, disk, attributes, and the place of the member: all 0 */
    *at++ = 'a';
    const size_t directory = (size_t)(at - zip) - start;
    at = append(at, end, sizeof end);
    at[0] = at[2] = 1;
    for (int i = 0; i < 4; ++i) at[4 + i] = (uint8_t)(directory >> 8 * i);
    for (int i = 0; i < 4; ++i) at[8 + i] = (uint8_t)(start >> 8 * i);
    *bytes = (size_t)(at - zip) + 14;
    return zip;
}

/* What is seen of a split when its memory is freed, and of its helpers. */
static struct {
    int opened; /* atomic: blocks for parts that were allocated */
    int blocks; /* atomic: all blocks that are not freed */
    int chunks; /* atomic: slots that held one */
} seen;

static void *seeing_alloc(size_t bytes, size_t align, void *user) {
    void *memory = NULL;
    (void)user;
    if (posix_memalign(&memory, align, bytes) != 0) return NULL;
    __atomic_fetch_add(&seen.blocks, 1, __ATOMIC_RELAXED);
    if (bytes == sizeof(spdl__many_parts)) __atomic_fetch_add(&seen.opened, 1, __ATOMIC_RELAXED);
    return memory;
}

static void seeing_free(void *memory, size_t bytes, void *user) {
    (void)user;
    if (bytes > 1000000) { /* only the memory of a split is so large, with 3 slots or more */
        const spdl__split_chunk *slot =
            (const spdl__split_chunk *)(const void *)((const char *)memory + 2 * SPDL__SPLIT_MARK);
        for (int i = 0; i < 3; ++i)
            __atomic_fetch_add(&seen.chunks, slot[i].done > 0, __ATOMIC_RELAXED);
    }
    __atomic_fetch_sub(&seen.blocks, memory != NULL, __ATOMIC_RELAXED);
    free(memory);
}

/* Reads the one array of the archive with the pool; true if it is what the stream becomes. */
static bool read_in_parts(const spdl_npz *npz, spdl_pool *pool, const stream *s, uint8_t *out) {
    spdl_npz_request request = { 0, out, s->out_bytes - 128, SPDL_SKIP };
    spdl_error error = { 0 };
    memset(out, 0x55, request.bytes);
    const spdl_result result = spdl_npz_read_many(npz, &request, 1, pool, &error);
    if (!CHECK_EQ(result, SPDL_OK)) fprintf(stderr, "%s\n", error.text);
    return CHECK_EQ(request.result, SPDL_OK) &&
           CHECK(memcmp(out, s->out + 128, request.bytes) == 0);
}

static spdl_npz *open_zip(const uint8_t *zip, size_t bytes) {
    spdl_npz *npz = NULL;
    spdl_error error = { 0 };
    spdl_npz_desc desc = { 0 };
    desc.error = &error;
    desc.allocator.alloc_fn = seeing_alloc;
    desc.allocator.free_fn = seeing_free;
    memset(&seen, 0, sizeof seen);
    if (!CHECK_EQ(spdl_npz_open_memory(&npz, zip, bytes, "large", &desc), SPDL_OK)) {
        fprintf(stderr, "%s\n", error.text);
        test_leave();
    }
    return npz;
}

static spdl_pool *new_pool(int workers) {
    spdl_pool *pool = NULL;
    spdl_pool_desc desc = { 0 };
    desc.workers = workers;
    REQUIRE(spdl_pool_create(&pool, &desc) == SPDL_OK);
    return pool;
}

/* With a pool a large member is decoded in parts, by whoever has time; it is the same as without.
   Chunks have been decoded, and nothing of them is left. */
static void large_member_in_parts(void) {
    static const int workers[] = { 1, 2, 5 };
    stream *s = large_stream();
    uint8_t *out = (uint8_t *)malloc(s->out_bytes), *zip;
    size_t bytes;
    if (out == NULL) abort();
    zip = zip_of(s, &bytes);
    for (size_t i = 0; i < sizeof workers / sizeof workers[0]; ++i) {
        spdl_pool *pool = new_pool(workers[i]);
        spdl_npz *npz = open_zip(zip, bytes);
        const int most = TEST_SANITIZED ? 2 : 8;
        int rounds = 0;
        CHECK(read_in_parts(npz, NULL, s, out));
        CHECK_EQ(spdl_npz_read(npz, 0, out, s->out_bytes - 128, NULL), SPDL_OK);
        CHECK(memcmp(out, s->out + 128, s->out_bytes - 128) == 0);
        CHECK_EQ(seen.opened, 0); /* without a pool there is nobody */
        while (rounds < most && read_in_parts(npz, pool, s, out)) ++rounds;
        CHECK_EQ(seen.opened, rounds);
        CHECK(seen.chunks > 0);
        spdl_npz_close(npz);
        spdl_pool_destroy(pool);
        CHECK_EQ(seen.blocks, 0);
    }
    free(zip);
    free(out);
    stream_free(s);
}

typedef struct large {
    const spdl_npz *npz;
    spdl_pool *pool;
    const stream *s;
} large;

static void read_large(void *arg, int worker, void *local) {
    const large *of = (const large *)arg;
    uint8_t *out = (uint8_t *)malloc(of->s->out_bytes);
    (void)worker;
    (void)local;
    if (out == NULL) abort();
    CHECK(read_in_parts(of->npz, of->pool, of->s, out));
    free(out);
}

/* Workers that read in parts on their own pool: nobody may be free to help, and nobody waits for
   help. The archive is closed before the pool is: what came too late looks at nothing of it. */
static void large_member_on_workers(void) {
    const int jobs = TEST_SANITIZED ? 2 : 4;
    stream *s = large_stream();
    size_t bytes;
    uint8_t *zip = zip_of(s, &bytes);
    for (int workers = 1; workers < 4; workers += 2) {
        spdl_npz *npz = open_zip(zip, bytes);
        large of = { npz, new_pool(workers), s };
        for (int i = 0; i < jobs; ++i)
            CHECK_EQ(spdl_pool_submit(of.pool, read_large, &of, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(spdl_pool_drain(of.pool, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(seen.opened, jobs);
        spdl_npz_close(npz);
        spdl_pool_destroy(of.pool);
        CHECK_EQ(seen.blocks, 0);
    }
    free(zip);
    stream_free(s);
}

/* Damage is told by parts as it is told without, but for the byte it is near to. */
static void large_member_damaged(void) {
    stream *s = large_stream();
    uint8_t *out = (uint8_t *)malloc(s->out_bytes), *zip;
    spdl_pool *pool = new_pool(2);
    size_t bytes;
    if (out == NULL) abort();
    zip = zip_of(s, &bytes);
    for (int round = 0; round < (TEST_SANITIZED ? 2 : 12); ++round) {
        const size_t at = 1000 + below((unsigned)s->in_bytes - 2000);
        spdl_error error = { 0 }, plain = { 0 };
        spdl_npz_request request = { 0, out, s->out_bytes - 128, SPDL_SKIP };
        zip[at] ^= 0x10;
        spdl_npz *npz = open_zip(zip, bytes);
        const spdl_result result = spdl_npz_read_many(npz, &request, 1, pool, &error);
        CHECK(result == SPDL_E_CHECKSUM || result == SPDL_E_FORMAT);
        CHECK_EQ(seen.opened, 1);
        CHECK_EQ(spdl_npz_read(npz, 0, out, s->out_bytes - 128, &plain), result);
        if (result == SPDL_E_FORMAT) CHECK_STR(strrchr(error.text, ':'), strrchr(plain.text, ':'));
        else CHECK_STR(error.text, plain.text);
        spdl_npz_close(npz);
        zip[at] ^= 0x10;
    }
    spdl_pool_destroy(pool);
    free(zip);
    free(out);
    stream_free(s);
}

/* ============================================================================================= */
/* CRC */

/* Bit by bit, as the definition has it. */
static uint32_t crc_by_definition(uint32_t crc, const uint8_t *data, size_t bytes) {
    crc = ~crc;
    for (size_t i = 0; i < bytes; ++i) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0u);
    }
    return ~crc;
}

/* Every way this processor has, at every length around the sizes of their steps. */
static void crc_in_every_way(void) {
    guarded data = guarded_new(3000);
    spdl__crc crc;
    spdl__crc_init(&crc);
    for (size_t i = 0; i < data.bytes; ++i) data.at[i] = (uint8_t)below(256);
    for (int way = (int)crc.way; way >= 0; --way) {
        crc.way = (spdl__crc_way)way;
        CHECK_EQ(spdl__crc_add(&crc, 0, (const uint8_t *)"123456789", 9), 0xcbf43926);
        CHECK_EQ(spdl__crc_add(&crc, 0, NULL, 0), 0);
        for (size_t bytes = 0; bytes < 1400; ++bytes) {
            const uint8_t *at = data.at + data.bytes - bytes;
            const uint32_t start = (uint32_t)bytes * 2654435761u;
            CHECK_EQ(spdl__crc_add(&crc, start, at, bytes), crc_by_definition(start, at, bytes));
        }
        CHECK_EQ(spdl__crc_add(&crc, 0, data.at + 1, 2999),
                 crc_by_definition(0, data.at + 1, 2999));
    }
    guarded_free(data);
}

TEST_TABLE(inflate) {
    TEST_CASE(random_streams), TEST_CASE(wide_streams), TEST_CASE(truncated_anywhere),
    TEST_CASE(damaged_anyhow), TEST_CASE(lanes_of_any_number), TEST_CASE(split_yields_the_same),
    TEST_CASE(split_uses_chunks), TEST_CASE(split_of_damaged),
    TEST_CASE(split_ends_where_the_stream_does), TEST_CASE(large_member_in_parts),
    TEST_CASE(large_member_on_workers), TEST_CASE(large_member_damaged),
    TEST_CASE(crc_in_every_way), TEST_END
};
