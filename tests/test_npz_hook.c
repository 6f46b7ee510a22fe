/* All of test_npz.c once more where SPDL_INFLATE is defined: whole members are decoded by the hook,
   which here is the header's own decoder and counts what it is asked. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

static bool inflate_hook(uint8_t *out, size_t out_bytes, const uint8_t *in, size_t in_bytes);
#define SPDL_INFLATE(out, out_bytes, in, in_bytes) inflate_hook(out, out_bytes, in, in_bytes)

#define test_table_npz test_table_npz_by_hook
#include "test_npz.c"

static int asked, made; /* atomic: workers ask too */
static bool refuses_all;

static bool inflate_hook(uint8_t *out, size_t out_bytes, const uint8_t *in, size_t in_bytes) {
    spdl__inflate_tables fixed;
    spdl__inflate s;
    spdl__inflate_mode mode;
    bool whole;
    __atomic_fetch_add(&asked, 1, __ATOMIC_RELAXED);
    if (refuses_all) return false;
    spdl__inflate_build_fixed(&fixed);
    spdl__inflate_init(&s, &fixed, in, in_bytes, out);
    mode = spdl__inflate_run(&s, out + out_bytes);
    if (mode == SPDL__INFLATE_FULL) mode = spdl__inflate_run(&s, out + out_bytes);
    whole = mode == SPDL__INFLATE_DONE && s.out == out + out_bytes;
    __atomic_fetch_add(&made, whole ? 1 : 0, __ATOMIC_RELAXED);
    return whole;
}

/* One question for each deflated array. */
static int questions(const spdl_npz *npz) {
    int count = 0;
    for (size_t i = 0; i < spdl_npz_count(npz); ++i) count += !is_stored(npz, i);
    return count;
}

static void hook_reads_one_by_one(void) {
    for (int round = 0; round < 2; ++round) {
        spdl_npz *npz = open_fixture("streams.npz");
        refuses_all = round == 1; /* then the decoder of the header does it all the same */
        asked = made = 0;
        check_patterns(npz);
        CHECK(questions(npz) > 5);
        CHECK_EQ(asked, questions(npz));
        CHECK_EQ(made, round == 0 ? asked : 0);
        spdl_npz_close(npz);
    }
}

/* Reads all arrays in one call and compares them with what each alone is. */
static void read_many_by_hook(spdl_pool *pool) {
    enum { MOST = 40, ROOM = 200000 };
    static uint8_t data[MOST][ROOM], one[ROOM];
    spdl_npz *npz = open_fixture("streams.npz");
    spdl_npz_request request[MOST];
    const size_t count = spdl_npz_count(npz);
    REQUIRE(count <= MOST);
    for (size_t i = 0; i < count; ++i) {
        request[i].index = i;
        request[i].data = data[i];
        request[i].bytes = ROOM;
        request[i].result = SPDL_SKIP;
    }
    asked = made = 0;
    CHECK_EQ(spdl_npz_read_many(npz, request, count, pool, NULL), SPDL_OK);
    CHECK_EQ(asked, questions(npz));
    CHECK_EQ(made, asked);
    for (size_t i = 0; i < count; ++i) {
        spdl_npy_info info;
        CHECK_EQ(request[i].result, SPDL_OK);
        REQUIRE(spdl_npz_info(npz, i, &info, NULL) == SPDL_OK);
        REQUIRE(spdl_npz_read(npz, i, one, ROOM, NULL) == SPDL_OK);
        CHECK(memcmp(one, data[i], (size_t)info.bytes) == 0);
    }
    spdl_npz_close(npz);
}

static void hook_reads_many(void) {
    for (int workers = 0; workers < 4; ++workers) {
        spdl_pool *pool = NULL;
        spdl_pool_desc desc = { 0 };
        desc.workers = workers;
        if (workers > 0) REQUIRE(spdl_pool_create(&pool, &desc) == SPDL_OK);
        read_many_by_hook(pool);
        spdl_pool_destroy(pool);
    }
}

TEST_TABLE(npz_hook) {
    TEST_CASE(hook_reads_one_by_one), TEST_CASE(hook_reads_many), TEST_END
};
