/* The decoder and the CRC by themselves: what reads .npz files is in test_npz.c. Streams are made
   here by a small encoder that does not compress but uses all that deflate has, so that what they
   must become is known. Input and output lie against pages that may not be touched. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "test.h"

/* ============================================================================================= */
/* Numbers and memory */

static uint64_t random_state;

static unsigned below(unsigned bound) { return (unsigned)(test_random(&random_state) % bound); }

/* Memory whose last byte is followed by a page that may not be touched. */
typedef struct guarded {
    uint8_t *at;
    size_t bytes;
} guarded;

static guarded guarded_new(size_t bytes) {
    guarded g;
    g.bytes = bytes;
    g.at = (uint8_t *)test_guarded(bytes);
    return g;
}

static void guarded_free(guarded g) { test_guarded_free(g.at, g.bytes); }

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
    size_t in_bytes, out_bytes;
    uint64_t held;
    unsigned held_bits;
} stream;

static void put_bits(stream *s, unsigned value, unsigned count) {
    s->held |= (uint64_t)value << s->held_bits;
    for (s->held_bits += count; s->held_bits >= 8; s->held_bits -= 8, s->held >>= 8) {
        if (s->in_bytes == MOST) abort();
        s->in[s->in_bytes++] = (uint8_t)s->held;
    }
}

static void put_byte(stream *s, unsigned byte) {
    if (s->out_bytes == MOST) abort();
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
static bool put_match(stream *s, const code *litlen, const code *dist, unsigned reach) {
    const unsigned length_symbol = below(29), dist_symbol = below(reach);
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
    const unsigned matches = below(101), reach = below(4) == 0 ? 4 : 30;
    const unsigned kinds = below(2) == 0 ? 256 : 1 + below(8);
    for (; tokens > 0; --tokens)
        if (below(100) >= matches || !put_match(s, litlen, dist, reach))
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

static stream *stream_new(void) {
    stream *s = (stream *)calloc(1, sizeof *s);
    if (s == NULL) abort();
    s->in = (uint8_t *)malloc(MOST);
    s->out = (uint8_t *)malloc(MOST);
    if (s->in == NULL || s->out == NULL) abort();
    return s;
}

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

static const spdl__inflate_tables *fixed(void) {
    static spdl__inflate_tables made;
    if (made.litlen_bits == 0) spdl__inflate_build_fixed(&made);
    return &made;
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

/* In one go. */
static outcome decode(const uint8_t *in, size_t bytes, uint8_t *out, size_t limit) {
    spdl__inflate s;
    spdl__inflate_init(&s, fixed(), in, bytes, out);
    return outcome_of(&s, spdl__inflate_run(&s, out + limit));
}

/* With a limit that is never far enough for the fast loop. */
static outcome decode_with_care(const uint8_t *in, size_t bytes, uint8_t *out, size_t limit) {
    spdl__inflate s;
    spdl__inflate_mode mode = SPDL__INFLATE_FULL;
    spdl__inflate_init(&s, fixed(), in, bytes, out);
    while (mode == SPDL__INFLATE_FULL && (size_t)(s.out - out) < limit) {
        const size_t left = limit - (size_t)(s.out - out);
        mode = spdl__inflate_run(&s, s.out + (left < 20 ? left : 20));
    }
    return outcome_of(&s, mode);
}

enum { SLACK = SPDL__INFLATE_FAST_OUT };

/* With SLACK bytes after `limit` that may be overwritten, and up to four stops before it. */
static outcome decode_with_slack(const uint8_t *in, size_t bytes, uint8_t *out, size_t limit) {
    spdl__inflate s;
    spdl__inflate_mode mode = SPDL__INFLATE_FULL;
    spdl__inflate_init(&s, fixed(), in, bytes, out);
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

/* The code of a block's end is longer than the first level of the table. */
static void ends_with_long_codes(void) {
    stream *s = stream_new();
    guarded out;
    for (unsigned longest = 11; longest <= 15; ++longest)
        for (unsigned literals = 0; literals < 12; ++literals) {
            uint8_t lengths[286 + 30] = { 0 };
            code litlen;
            memset(&litlen, 0, sizeof litlen);
            s->in_bytes = s->out_bytes = s->held = s->held_bits = 0;
            for (unsigned i = 0; i < longest; ++i) litlen.length[i] = (uint8_t)(i + 1);
            litlen.length[256] = (uint8_t)longest;
            code_assign(&litlen, 286);
            memcpy(lengths, litlen.length, 286);
            put_bits(s, 0, 1);
            put_bits(s, 2, 2);
            put_bits(s, 29, 5);
            put_bits(s, 29, 5);
            put_bits(s, 15, 4);
            put_lengths(s, lengths, 286 + 30);
            for (unsigned i = 0; i < literals; ++i) put_literal(s, &litlen, longest);
            put_symbol(s, &litlen, 256);
            put_bits(s, 1, 1);
            put_stored(s, 100);
            out = guarded_new(s->out_bytes + SLACK);
            becomes(s, decode(s->in, s->in_bytes, out.at, s->out_bytes));
            becomes(s, decode_with_care(s->in, s->in_bytes, out.at, s->out_bytes));
            becomes(s, decode_with_slack(s->in, s->in_bytes, out.at, s->out_bytes));
            guarded_free(out);
        }
    stream_free(s);
}

/* Fast, with care, with room after the output: all yield what was encoded. */
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
        becomes(s, decode(in.at, s->in_bytes, out.at, s->out_bytes));
        becomes(s, decode_with_care(in.at, s->in_bytes, out.at, s->out_bytes));
        if (s->out_bytes > 0)
            CHECK_EQ(decode(in.at, s->in_bytes, out.at + 1, s->out_bytes - 1).mode,
                     SPDL__INFLATE_FULL); /* it makes more than that */
        guarded_free(in);
        guarded_free(out);
    }
    stream_free(s);
}

/* A stream that ends early is refused as such, wherever it ends. */
static void truncated_anywhere(void) {
    stream *s = stream_new();
    for (unsigned seed = 1; seed < 12; ++seed) {
        guarded in, out;
        stream_make(s, seed, 3, 300);
        in = guarded_new(s->in_bytes);
        out = guarded_new(s->out_bytes);
        for (size_t bytes = 0; bytes < s->in_bytes; ++bytes) {
            const uint8_t *at = guarded_tail(&in, s->in, bytes);
            outcome o = decode(at, bytes, out.at, s->out_bytes);
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
        o = decode(at, s->in_bytes, out.at, out.bytes);
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
    unsigned which[SPDL__INFLATE_LANES], next = 0, used = 0;
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
        spdl__inflate_init(lanes[i], fixed(), in[next].at, members[next]->in_bytes,
                           out[next].at);
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
            spdl__inflate_init(lanes[lane], fixed(), in[next].at, members[next]->in_bytes,
                               out[next].at);
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
    static uint8_t copy[1500];
    guarded data = guarded_new(3000);
    spdl__crc crc;
    spdl__crc_init(&crc);
    for (size_t i = 0; i < data.bytes; ++i) data.at[i] = (uint8_t)below(256);
    for (int way = crc.folds ? 1 + crc.wide : 0; way >= 0;
         way = way > 33 ? 33 : way > 1 ? 1 : way - 1) {
        crc.folds = way > 0;
        crc.wide = crc.folds ? way - 1 : 0;
        spdl__crc_fill(&crc);
        CHECK_EQ(spdl__crc_add(&crc, 0, (const uint8_t *)"123456789", 9), 0xcbf43926);
        CHECK_EQ(spdl__crc_add(&crc, 0, NULL, 0), 0);
        for (size_t bytes = 0; bytes < 1400; ++bytes) {
            const uint8_t *at = data.at + data.bytes - bytes;
            const uint32_t start = (uint32_t)bytes * 2654435761u;
            CHECK_EQ(spdl__crc_add(&crc, start, at, bytes), crc_by_definition(start, at, bytes));
            memset(copy, 0xa5, sizeof copy);
            CHECK_EQ(spdl__crc_copy(&crc, start, copy + 1, at, bytes),
                     crc_by_definition(start, at, bytes));
            CHECK(memcmp(copy + 1, at, bytes) == 0 && copy[0] == 0xa5 && copy[bytes + 1] == 0xa5);
        }
        CHECK_EQ(spdl__crc_add(&crc, 0, data.at + 1, 2999),
                 crc_by_definition(0, data.at + 1, 2999));
    }
    guarded_free(data);
}

TEST_TABLE(inflate) {
    TEST_CASE(ends_with_long_codes), TEST_CASE(random_streams),
    TEST_CASE(truncated_anywhere), TEST_CASE(damaged_anyhow),
    TEST_CASE(lanes_of_any_number), TEST_CASE(crc_in_every_way), TEST_END
};
