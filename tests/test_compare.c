/* Comparing in rounds: the interval against counting by hand, how often it holds the truth, and the
   order in which the arms of a round take turns. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "test.h"

static bool near(double a, double b) {
    const double apart = a > b ? a - b : b - a;
    return apart <= 1e-12 * (a > b ? a : b);
}

static void middle_is_the_geometric_mean(void) {
    uint64_t random = test_seed();
    int i;
    for (i = 0; i < 1000; ++i) {
        const double a = (double)(test_random(&random) >> 11) * 0x1p-60 + 1e-9;
        const double scale = (double)(test_random(&random) >> 40) * 1e-3 + 1e-6;
        CHECK(near(spdl__middle(a * scale, a * scale), a * scale));
        CHECK(near(spdl__middle(a, a * scale * scale), a * scale));
        CHECK(near(spdl__middle(1 / a, 1 / scale) * spdl__middle(a, scale), 1));
    }
    CHECK(spdl__middle(0, 5) < 1e-300);
    CHECK(near(spdl__middle(4, 9), 6) && near(spdl__middle(1e100, 1e-100), 1));
}

/* How many of all throws of n coins have fewer than k heads, by throwing each of them. */
static double share_below(int n, int k) {
    uint32_t throws = (uint32_t)1 << n, one, count = 0;
    for (one = 0; one < throws; ++one) count += __builtin_popcount(one) < k;
    return (double)count / throws;
}

/* The rank is the largest that leaves no more than 5 % at both ends. */
static void rank_is_that_of_all_throws(void) {
    static const int comparisons[] = { 1, 2, 4, 18 };
    int n, c;
    for (n = 0; n <= 16; ++n) {
        for (c = 0; c < 4; ++c) {
            const double most = 0.05 / comparisons[c] / 2;
            const int k = spdl__interval_rank(n, comparisons[c]);
            CHECK(k == 0 || share_below(n, k) <= most);
            CHECK(share_below(n, k + 1) > most);
        }
    }
}

/* What tables of the sign test have, and no tail that is lost in rounding. */
static void rank_of_many_rounds(void) {
    static const struct { int n, rank; } table[] = { { 25, 8 }, { 30, 10 }, { 64, 24 },
                                                     { 100, 40 }, { 1000, 469 } };
    size_t i;
    for (i = 0; i < sizeof table / sizeof table[0]; ++i)
        CHECK_EQ(spdl__interval_rank(table[i].n, 1), table[i].rank);
}

static void rounds_that_are_needed(void) {
    static const struct { int comparisons, least; } table[] = { { 1, 6 }, { 4, 8 }, { 18, 10 } };
    double ratio[16];
    int i, n;
    for (i = 0; i < 3; ++i) {
        for (n = 0; n <= 16; ++n) {
            spdl_interval interval;
            int k;
            for (k = 0; k < n; ++k) ratio[k] = 16 - k;
            interval = spdl__interval(ratio, n, table[i].comparisons);
            CHECK_EQ(interval.known, n >= table[i].least);
            CHECK_EQ(interval.rounds, n);
            if (!interval.known) CHECK(interval.low <= 0 && interval.high > 1e308);
        }
    }
}

static void interval_is_of_order_statistics(void) {
    double odd[] = { 7, 1, 6, 2, 5, 3, 4 }, even[] = { 1, 8, 2, 7, 2, 6, 3, 5 };
    double tied[] = { 1.2, 1, 1.1, 1, 1.3, 1.1, 1.1, 1.2, 1.4 };
    spdl_interval interval = spdl__interval(odd, 7, 1);
    CHECK(near(interval.value, 4) && near(interval.low, 1) && near(interval.high, 7));
    interval = spdl__interval(even, 8, 1);
    CHECK(near(interval.value * interval.value, 15));
    CHECK(near(interval.low, 1) && near(interval.high, 8));
    interval = spdl__interval(tied, 9, 1); /* the second of both ends; two rounds were the same */
    CHECK(near(interval.low, 1) && near(interval.value, 1.1) && near(interval.high, 1.3));
    interval = spdl__interval(odd, 0, 1);
    CHECK(interval.value <= 0 && !interval.known);
}

/* Noise with a long tail to one side, as times have it: never under 1, its median is 1.125. */
static double noise(uint64_t *random) {
    const double u = (double)(test_random(random) >> 11) * 0x1p-53;
    return 1 + u * u * u / (1.001 - u * u);
}

static double median_of_noise(void) { return 1 + 0.125 / (1.001 - 0.25); }

/* How many of `draws` intervals of n rounds hold the true ratio. */
static int held(uint64_t *random, int n, double truth, bool paired, int draws) {
    int i, k, hits = 0;
    for (i = 0; i < draws; ++i) {
        double ratio[30];
        spdl_interval interval;
        for (k = 0; k < n; ++k) /* two noisy sides, or one with a noise that leans to one side */
            ratio[k] = truth * (paired ? noise(random) / noise(random)
                                       : noise(random) / median_of_noise());
        interval = spdl__interval(ratio, n, 1);
        hits += interval.low <= truth && truth <= interval.high;
    }
    return hits;
}

/* In 2000 draws 95 % has a spread of 10: 1860 is four of them below. */
static void interval_holds_the_truth(void) {
    uint64_t random = test_seed();
    int n;
    for (n = 6; n <= 30; ++n) {
        CHECK(held(&random, n, 1.17, true, 2000) >= 1860);
        CHECK(held(&random, n, 0.4, false, 2000) >= 1860);
    }
}

/* Two that are the same: at most 5 % are called different. And two that are not are found. */
static void same_is_no_difference(void) {
    uint64_t random = test_seed();
    int found = 0, i, k;
    CHECK(held(&random, 9, 1, true, 2000) >= 1860);
    for (i = 0; i < 2000; ++i) {
        double ratio[12];
        for (k = 0; k < 12; ++k) ratio[k] = 8 * noise(&random) / noise(&random);
        found += spdl__interval(ratio, 12, 1).low > 1;
    }
    CHECK(found > 1800);
}

/* Several comparisons of the same rounds: all of their intervals hold at once. */
static void comparisons_hold_together(void) {
    uint64_t random = test_seed();
    int i, c, k, hits = 0;
    for (i = 0; i < 2000; ++i) {
        bool all = true;
        for (c = 0; c < 4; ++c) {
            double ratio[12];
            spdl_interval interval;
            for (k = 0; k < 12; ++k) ratio[k] = noise(&random) / noise(&random);
            interval = spdl__interval(ratio, 12, 4);
            all = all && interval.low <= 1 && 1 <= interval.high;
        }
        hits += all;
    }
    CHECK(hits >= 1860);
}

/* In each square every arm stands once in each round and once in each place. */
static void latin_squares_are_latin(void) {
    int arms, square, i, k;
    for (arms = 1; arms <= SPDL__LATIN; ++arms) {
        spdl__latin latin;
        spdl__latin_start(&latin, test_seed(), arms);
        for (square = 0; square < 4; ++square) {
            uint32_t column[SPDL__LATIN] = { 0 };
            for (i = 0; i < arms; ++i) {
                uint32_t row = 0;
                for (k = 0; k < arms; ++k) {
                    const int arm = spdl__latin_arm(&latin, square * arms + i, k);
                    REQUIRE(arm >= 0 && arm < arms);
                    row |= (uint32_t)1 << arm;
                    column[k] |= (uint32_t)1 << arm;
                }
                CHECK_EQ(row, ((uint64_t)1 << arms) - 1);
            }
            for (k = 0; k < arms; ++k) CHECK_EQ(column[k], ((uint64_t)1 << arms) - 1);
        }
    }
}

/* Any order of asking has the same answers; another seed has others; the squares of a seed differ,
   and each arm is first in about as many of them. */
static void latin_squares_are_random(void) {
    enum { ARMS = 5, SQUARES = 1000 };
    const uint64_t seed = test_seed();
    spdl__latin latin, again, other;
    int first[ARMS] = { 0 }, differ = 0, i;
    spdl__latin_start(&latin, seed, ARMS);
    spdl__latin_start(&again, seed, ARMS);
    spdl__latin_start(&other, seed + 1, ARMS);
    for (i = SQUARES - 1; i >= 0; --i) {
        const int arm = spdl__latin_arm(&latin, i * ARMS, 0);
        ++first[arm];
        differ += arm != spdl__latin_arm(&other, i * ARMS, 0);
    }
    for (i = 0; i < SQUARES; ++i) --first[spdl__latin_arm(&again, i * ARMS, 0)];
    for (i = 0; i < ARMS; ++i) CHECK_EQ(first[i], 0);
    CHECK(differ > SQUARES / 2);
    for (i = 0; i < SQUARES; ++i) ++first[spdl__latin_arm(&again, i * ARMS, 0)];
    for (i = 0; i < ARMS; ++i) CHECK(first[i] > 120 && first[i] < 280);
}

/* Two arms: each round either way round, and the one after it the other way. */
static void two_arms_change_places(void) {
    spdl__latin latin;
    int round, begun[2] = { 0 };
    spdl__latin_start(&latin, test_seed(), 2);
    for (round = 0; round < 200; round += 2) {
        const int first = spdl__latin_arm(&latin, round, 0);
        ++begun[first];
        CHECK_EQ(spdl__latin_arm(&latin, round, 1), 1 - first);
        CHECK_EQ(spdl__latin_arm(&latin, round + 1, 0), 1 - first);
        CHECK_EQ(spdl__latin_arm(&latin, round + 1, 1), first);
    }
    CHECK(begun[0] > 20 && begun[1] > 20);
}

TEST_TABLE(compare) {
    TEST_CASE(middle_is_the_geometric_mean), TEST_CASE(rank_is_that_of_all_throws),
    TEST_CASE(rank_of_many_rounds), TEST_CASE(rounds_that_are_needed),
    TEST_CASE(interval_is_of_order_statistics), TEST_CASE(interval_holds_the_truth),
    TEST_CASE(same_is_no_difference), TEST_CASE(comparisons_hold_together),
    TEST_CASE(latin_squares_are_latin), TEST_CASE(latin_squares_are_random),
    TEST_CASE(two_arms_change_places), TEST_END,
};
