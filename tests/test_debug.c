/* What SPDL_DEBUG finds. The asserts are off, so that the results behind them can be seen. */
#define SPDL_DEBUG
#define NDEBUG
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"

#include "test.h"

#include <pthread.h>

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
    for (int m = SPDL_RING_MPMC; m <= SPDL_RING_SPSC; ++m) {
        const bool spsc = m == SPDL_RING_SPSC;
        spdl_ring *ring = ring_of((spdl_ring_mode)m);
        uint64_t item = 7, moved = 9;
        ring->pushing = ring->popping = 1;
        CHECK_EQ(spdl_ring_push(ring, &item, 0), spsc ? SPDL_E_INVALID : SPDL_OK);
        CHECK_EQ(spdl_ring_count(ring), spsc ? 0 : 1);
        CHECK_EQ(spdl_ring_try_push_n(ring, &item, 1, &moved), spsc ? SPDL_E_INVALID : SPDL_OK);
        CHECK_EQ(moved, spsc ? 0 : 1);
        CHECK_EQ(spdl_ring_try_pop(ring, &item), spsc ? SPDL_E_INVALID : SPDL_OK);
        if (m == SPDL_RING_SPSC) {
            CHECK_EQ(spdl_ring_commit(ring, 1), SPDL_E_INVALID);
            CHECK_EQ(spdl_ring_release(ring, 0), SPDL_E_INVALID);
        }
        spdl_ring_destroy(ring, NULL, NULL);
    }
}

static void one_thread_on_each_side_is_fine(void) {
    for (int m = SPDL_RING_MPMC; m <= SPDL_RING_SPSC; ++m) {
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

static void *push_one(void *arg) {
    const uint64_t item = 7;
    CHECK_EQ(spdl_ring_push((spdl_ring *)arg, &item, SPDL_FOREVER), SPDL_OK);
    return NULL;
}

static void *pop_one(void *arg) {
    uint64_t item;
    CHECK_EQ(spdl_ring_pop((spdl_ring *)arg, &item, SPDL_FOREVER), SPDL_OK);
    return NULL;
}

/* A side may change hands: that is no misuse. */
static void a_side_may_change_hands(void) {
    for (int mode = SPDL_RING_MPMC; mode <= SPDL_RING_SPSC; ++mode) {
        spdl_ring *ring = ring_of((spdl_ring_mode)mode);
        pthread_t thread;
        for (int i = 0; i < 3; ++i) {
            REQUIRE(pthread_create(&thread, NULL, push_one, ring) == 0);
            pthread_join(thread, NULL);
            push_one(ring);
            REQUIRE(pthread_create(&thread, NULL, pop_one, ring) == 0);
            pthread_join(thread, NULL);
            pop_one(ring);
        }
        spdl_ring_destroy(ring, NULL, NULL);
    }
}

/* Every call on a ring that was closed with one item inside. */
static void use_after_close(void) {
    for (int mode = SPDL_RING_MPMC; mode <= SPDL_RING_SPSC; ++mode) {
        spdl_ring *ring = ring_of((spdl_ring_mode)mode);
        uint64_t item = 9, moved = 5;
        void *slots = NULL;
        const bool spsc = mode == SPDL_RING_SPSC;
        CHECK_EQ(spdl_ring_try_push(ring, &item), SPDL_OK);
        if (spsc) CHECK_EQ(spdl_ring_reserve(ring, 1, &slots, &moved, 0), SPDL_OK);
        spdl_ring_close(ring);
        spdl_ring_close(ring);
        if (spsc) CHECK_EQ(spdl_ring_commit(ring, 1), SPDL_CLOSED);
        CHECK_EQ(spdl_ring_try_push(ring, &item), SPDL_CLOSED);
        CHECK_EQ(spdl_ring_push(ring, &item, SPDL_FOREVER), SPDL_CLOSED);
        CHECK_EQ(spdl_ring_try_push_n(ring, &item, 1, &moved), SPDL_CLOSED);
        CHECK_EQ(spdl_ring_push_n(ring, &item, 1, &moved, SPDL_FOREVER), SPDL_CLOSED);
        CHECK_EQ(moved, 0);
        if (spsc) CHECK_EQ(spdl_ring_reserve(ring, 1, &slots, &moved, SPDL_FOREVER), SPDL_CLOSED);
        CHECK_EQ(spdl_ring_count(ring), 1);
        CHECK_EQ(spdl_ring_try_pop(ring, &item), SPDL_OK);
        for (int i = 0; i < 2; ++i) {
            CHECK_EQ(spdl_ring_try_pop(ring, &item), SPDL_CLOSED);
            CHECK_EQ(spdl_ring_pop(ring, &item, SPDL_FOREVER), SPDL_CLOSED);
            CHECK_EQ(spdl_ring_try_pop_n(ring, &item, 1, &moved), SPDL_CLOSED);
            CHECK_EQ(spdl_ring_pop_n(ring, &item, 1, &moved, SPDL_FOREVER), SPDL_CLOSED);
            if (spsc)
                CHECK_EQ(spdl_ring_peek(ring, 1, &slots, &moved, SPDL_FOREVER), SPDL_CLOSED);
        }
        CHECK_EQ(spdl_ring_count(ring), 0);
        spdl_ring_destroy(ring, NULL, NULL);
    }
}

TEST_TABLE(debug) {
    TEST_CASE(two_threads_on_a_side_for_one),
    TEST_CASE(one_thread_on_each_side_is_fine),
    TEST_CASE(a_side_may_change_hands),
    TEST_CASE(use_after_close),
    TEST_END,
};
