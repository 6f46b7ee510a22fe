/* SPDL_INFLATE: another decoder in place of the one in the header. The one here knows a single
   stream, which is none at all for the other. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

static bool inflate_toy(uint8_t *out, size_t out_bytes, const uint8_t *in, size_t in_bytes);
#define SPDL_INFLATE(out, out_bytes, in, in_bytes) inflate_toy(out, out_bytes, in, in_bytes)

#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "test.h"

static int toy_calls;

/* "toy" becomes as many t as there is room for. */
static bool inflate_toy(uint8_t *out, size_t out_bytes, const uint8_t *in, size_t in_bytes) {
    ++toy_calls;
    if (in_bytes != 3 || memcmp(in, "toy", 3) != 0) return false;
    memset(out, 't', out_bytes);
    return true;
}

static spdl__inflate_mode whole(const char *in, size_t bytes, uint8_t *out, size_t room,
                                size_t *made) {
    spdl__inflate s;
    spdl__inflate_mode mode;
    spdl__inflate_init(&s, (const uint8_t *)in, bytes, out);
    mode = spdl__inflate_whole(&s, out + room);
    *made = (size_t)(s.out - out);
    return mode;
}

static void other_decoder_is_asked(void) {
    uint8_t out[5] = { 0 };
    size_t made;
    CHECK_EQ(whole("toy", 3, out, 5, &made), SPDL__INFLATE_DONE);
    CHECK_EQ(made, 5);
    CHECK(memcmp(out, "ttttt", 5) == 0);
    CHECK_EQ(toy_calls, 1);
}

/* What it refuses is decoded here, and judged here. */
static void own_decoder_judges_what_it_refuses(void) {
    static const char stored[] = "\x01\x02\x00\xfd\xffhi"; /* one stored block of two bytes */
    uint8_t out[5] = { 0 };
    size_t made;
    CHECK_EQ(whole(stored, 7, out, 2, &made), SPDL__INFLATE_DONE);
    CHECK(made == 2 && memcmp(out, "hi", 2) == 0);
    CHECK_EQ(whole(stored, 7, out, 1, &made), SPDL__INFLATE_FULL); /* it makes more */
    CHECK_EQ(whole(stored, 7, out, 5, &made), SPDL__INFLATE_DONE); /* it makes less */
    CHECK_EQ(made, 2);
    CHECK_EQ(whole(stored, 6, out, 2, &made), SPDL__INFLATE_FAILED);
    CHECK_EQ(toy_calls, 4);
}

TEST_TABLE(inflate_hook) {
    TEST_CASE(other_decoder_is_asked), TEST_CASE(own_decoder_judges_what_it_refuses), TEST_END
};
