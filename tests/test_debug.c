/* What SPDL_DEBUG finds. The asserts are off, so that the results behind them can be seen. */
#define SPDL_DEBUG
#define NDEBUG
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"

#include "test.h"

static spdl_ring *ring_of(spdl_ring_mode mode) {
    spdl_ring *ring = NULL;
    spdl_ring_desc desc = { 0 };
    desc.capacity = 4;
    desc.mode = mode;
    REQUIRE(spdl_ring_create(&ring, &desc) == SPDL_OK);
    return ring;
}

/* A second thread comes while one is inside: simulated by the mark that the first one leaves. */
static void two_threads_on_a_side_for_one(void) {
    for (int m = SPDL_RING_MPMC; m <= SPDL_RING_SPMC; ++m) {
        const bool one_producer = m == SPDL_RING_SPSC || m == SPDL_RING_SPMC;
        const bool one_consumer = m == SPDL_RING_SPSC || m == SPDL_RING_MPSC;
        spdl_ring *ring = ring_of((spdl_ring_mode)m);
        uint64_t item = 7, moved = 9;
        ring->pushing = ring->popping = 1;
        CHECK_EQ(spdl_ring_push(ring, &item, 0), one_producer ? SPDL_E_INVALID : SPDL_OK);
        CHECK_EQ(spdl_ring_count(ring), one_producer ? 0 : 1);
        CHECK_EQ(spdl_ring_try_push_n(ring, &item, 1, &moved),
                 one_producer ? SPDL_E_INVALID : SPDL_OK);
        CHECK_EQ(moved, one_producer ? 0 : 1);
        CHECK_EQ(spdl_ring_try_pop(ring, &item),
                 one_consumer ? SPDL_E_INVALID : one_producer ? SPDL_EMPTY : SPDL_OK);
        if (m == SPDL_RING_SPSC) {
            CHECK_EQ(spdl_ring_commit(ring, 1), SPDL_E_INVALID);
            CHECK_EQ(spdl_ring_release(ring, 0), SPDL_E_INVALID);
        }
        spdl_ring_destroy(ring, NULL, NULL);
    }
}

static void one_thread_on_each_side_is_fine(void) {
    for (int m = SPDL_RING_MPMC; m <= SPDL_RING_SPMC; ++m) {
        spdl_ring *ring = ring_of((spdl_ring_mode)m);
        uint64_t item = 0;
        for (uint64_t i = 0; i < 100; ++i) {
            CHECK_EQ(spdl_ring_push(ring, &i, SPDL_FOREVER), SPDL_OK);
            CHECK_EQ(spdl_ring_pop(ring, &item, SPDL_FOREVER), SPDL_OK);
            CHECK_EQ(item, i);
        }
        spdl_ring_close(ring);
        CHECK_EQ(spdl_ring_pop(ring, &item, SPDL_FOREVER), SPDL_CLOSED);
        spdl_ring_destroy(ring, NULL, NULL);
    }
}

TEST_TABLE(debug) {
    TEST_CASE(two_threads_on_a_side_for_one),
    TEST_CASE(one_thread_on_each_side_is_fine),
    TEST_END,
};
