/* The measuring core: intervals against counting how often they hold the truth, rounds that are
   dropped, and the order in which the arms of a round take turns. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "test.h"

static bool is_near(double a, double b, double off) {
    const double apart = a > b ? a - b : b - a;
    return apart <= off * (a > b ? a : b);
}

static double uniform(uint64_t *random) { return (double)(test_random(random) >> 11) * 0x1p-53; }

static void roots_and_quantiles(void) {
    static const struct { int freedom, comparisons; double t; } table[] = {
        { 4, 1, 2.776 }, { 9, 1, 2.262 }, { 30, 1, 2.042 }, { 9, 2, 2.685 }, { 9, 10, 3.690 }
    };
    uint64_t random = test_seed();
    for (int i = 0; i < 1000; ++i) {
        const double a = uniform(&random) * 1e6;
        CHECK(is_near(spdl__root(a * a), a, 1e-12) &&
              is_near(spdl__root(a) * spdl__root(a), a, 1e-12));
    }
    CHECK(spdl__root(0) <= 0 && is_near(spdl__root(1e-100), 1e-50, 1e-12));
    for (size_t i = 0; i < sizeof table / sizeof table[0]; ++i) /* of a book */
        CHECK(is_near(spdl__student(table[i].freedom, table[i].comparisons), table[i].t, 0.015));
}

/* A window of `arm` in each of n rounds, `gain` times as fast in arm 1, with noise of its time. */
static void play(spdl__rounds *r, uint64_t *random, int arms, int n, double gain, double noise) {
    spdl__rounds_start(r, test_random(random), arms);
    for (int i = 0; i < n; ++i) {
        bool complete;
        do {
            const int arm = spdl__rounds_arm(r);
            const double off = uniform(random) - 0.5;
            complete = spdl__rounds_window(r, 100 * (arm == 1 ? gain : 1), 4e8 * (1 + noise * off));
        } while (!complete);
        CHECK(spdl__rounds_next(r, false) == (i < SPDL__ROUNDS - 1));
    }
}

/* Sums, not means of ratios: what a third of the windows have does not vanish. */
static void ratios_are_of_sums(void) {
    spdl__rounds r;
    spdl_interval is;
    spdl__rounds_start(&r, 1, 2);
    for (int i = 0; i < 6; ++i) {
        for (int k = 0; k < 2; ++k) {
            const int arm = spdl__rounds_arm(&r);
            spdl__rounds_window(&r, arm == 0 ? 100 : i % 3 == 0 ? 600 : 60, 1e9);
        }
        spdl__rounds_next(&r, false);
    }
    is = spdl__rounds_ratio(&r, 1, 0, 0, 1);
    CHECK(is_near(spdl__rounds_rate(&r, 0, 0, -1), 100, 1e-12));
    CHECK(is_near(is.value, 2.4, 1e-12) && is.known && is.rounds == 6);
    CHECK(is.low < 1.4 && is.high > 4); /* of which little is known */
    CHECK(is_near(spdl__rounds_rate(&r, 0, 1, -1), 170, 1e-12));
    CHECK(is_near(spdl__rounds_rate(&r, 1, 1, 0), (4 * 60 + 600) / 5.0, 1e-12));
}

static void few_rounds_say_nothing(void) {
    uint64_t random = test_seed();
    spdl__rounds r;
    for (int n = 0; n < 8; ++n) {
        spdl_interval is;
        play(&r, &random, 2, n, 1, 0.1);
        is = spdl__rounds_ratio(&r, 1, 0, 0, 1);
        CHECK_EQ(is.known, n >= SPDL__ROUNDS_LEAST);
        CHECK_EQ(is.rounds, n);
        if (!is.known) CHECK(is.low <= 0 && is.high > 1e308);
    }
}

/* An arm in which nothing passes has no ratio that is known, nor has one by it. */
static void an_arm_without_items(void) {
    uint64_t random = test_seed();
    spdl__rounds r;
    spdl_interval is;
    play(&r, &random, 2, 9, 0, 0.1);
    is = spdl__rounds_ratio(&r, 1, 0, 0, 1);
    CHECK(!is.known && is.value <= 0 && is.rounds == 9);
    is = spdl__rounds_ratio(&r, 0, 1, 1, 1);
    CHECK(!is.known && is.value <= 0);
}

/* Dropped rounds do not count where others are left, and do where they are all there is. */
static void rounds_are_dropped(void) {
    for (int clean = 0; clean < 9; ++clean) {
        spdl__rounds r;
        spdl__rounds_start(&r, 7, 2);
        for (int i = 0; i < 9; ++i) {
            for (int k = 0; k < 2; ++k)
                spdl__rounds_window(&r, spdl__rounds_arm(&r) == 1 && i < clean ? 200 : 100, 1e9);
            spdl__rounds_next(&r, i >= clean);
        }
        CHECK_EQ(spdl__rounds_clean(&r), clean >= SPDL__ROUNDS_LEAST);
        CHECK_EQ(spdl__rounds_ratio(&r, 1, 0, 0, 1).rounds,
                 clean >= SPDL__ROUNDS_LEAST ? clean : 9);
        CHECK(is_near(spdl__rounds_ratio(&r, 1, 0, 0, 1).value,
                      clean >= SPDL__ROUNDS_LEAST ? 2 : 1 + clean / 9.0, 1e-12));
    }
}

/* Rounds that are dropped are made again, but not so often that the load of then is another. */
static void rounds_are_made_again(void) {
    spdl__rounds r;
    int again = 0;
    spdl__rounds_start(&r, 7, 2);
    CHECK(!spdl__rounds_again(&r));
    for (int i = 0; i < 40; ++i) {
        spdl__rounds_next(&r, i >= 10);
        again += spdl__rounds_again(&r);
    }
    CHECK_EQ(again, 11);
    spdl__rounds_start(&r, 7, 2);
    spdl__rounds_next(&r, true); /* the first one is */
    CHECK(spdl__rounds_again(&r));
}

/* In 1000 draws 95 % has a spread of 7: 920 is four of them below. With few rounds it is a little
   less sure of itself than it says. */
static void interval_holds_the_truth(void) {
    static const double gains[] = { 1, 1.17, 0.4, 4 };
    uint64_t random = test_seed();
    spdl__rounds r;
    for (int n = 5; n <= 20; n += 5)
        for (int g = 0; g < 4; ++g) {
            int held = 0;
            for (int i = 0; i < 1000; ++i) {
                spdl_interval is;
                play(&r, &random, 2, n, gains[g], 0.2);
                is = spdl__rounds_ratio(&r, 1, 0, 0, 1);
                held += is.low <= gains[g] && gains[g] <= is.high;
            }
            if (!CHECK(held >= 915)) printf("    %d rounds, %g: %d\n", n, gains[g], held);
        }
}

/* Several comparisons of the same rounds: all of their intervals hold at once. */
static void comparisons_hold_together(void) {
    uint64_t random = test_seed();
    spdl__rounds r;
    int hits = 0;
    for (int i = 0; i < 1000; ++i) {
        bool all = true;
        play(&r, &random, 6, 8, 1, 0.2);
        for (int arm = 2; arm < 6; ++arm) {
            const spdl_interval is = spdl__rounds_ratio(&r, arm, 0, 1, 4);
            all = all && is.low <= 1 && 1 <= is.high;
        }
        hits += all;
    }
    CHECK(hits >= 915);
}

/* Each round has each arm once, and no arm follows one and the same more often than by chance. */
static void orders_are_drawn_afresh(void) {
    enum { ARMS = 4, ROUNDS = 6000 };
    static int follows[ARMS][ARMS];
    uint64_t random = test_seed();
    spdl__rounds r;
    int last = -1;
    for (int i = 0; i < ROUNDS; ++i) {
        unsigned seen = 0;
        if (i % SPDL__ROUNDS == 0) spdl__rounds_start(&r, test_random(&random), ARMS);
        for (int k = 0; k < ARMS; ++k) {
            const int arm = spdl__rounds_arm(&r);
            seen |= 1u << arm;
            if (k > 0) ++follows[last][arm];
            last = arm;
            spdl__rounds_window(&r, 1, 1);
        }
        CHECK_EQ(seen, (1u << ARMS) - 1);
        spdl__rounds_next(&r, false);
    }
    for (int a = 0; a < ARMS; ++a) /* 1500 each */
        for (int b = 0; b < ARMS; ++b)
            CHECK(a == b || (follows[a][b] > 1300 && follows[a][b] < 1700));
}

/* Three of the longest gaps, and not under the least; at least eight items. */
static void windows_are_longer_than_gaps(void) {
    CHECK_EQ(spdl__window_ns(SPDL__NEVER, 2, 0, 0), SPDL__WINDOW_NS);
    CHECK_EQ(spdl__window_ns(SPDL__NEVER, 2, SPDL__WINDOW_NS / 4, 1000), SPDL__WINDOW_NS);
    CHECK_EQ(spdl__window_ns(SPDL__NEVER, 2, 1000000000, 1000), 3000000000u);
    CHECK_EQ(spdl__window_ns(SPDL__NEVER, 2, 1000000000, 1e9), 8000000000u);
}

/* Enough rounds fit in a short time, with as much time again between windows; gaps are first. */
static void a_short_time_has_enough_rounds(void) {
    const uint64_t budget = 2 * SPDL__WINDOW_NS;
    for (int arms = 2; arms <= SPDL__ARMS; ++arms) {
        const uint64_t length = spdl__window_ns(budget, arms, 1000, 1000);
        CHECK(2 * SPDL__ROUNDS_LEAST * length * (uint64_t)arms <= budget);
        CHECK(length > 0 && length < SPDL__WINDOW_NS);
        CHECK_EQ(spdl__window_ns(budget, arms, SPDL__WINDOW_NS, 1000), 3 * SPDL__WINDOW_NS);
    }
}

/* Items of 9 short steps and a long one: what lies in a window counts, whole or in part, so that on
   average a window has as many as its share of the period. */
static void windows_count_parts(void) {
    static spdl__rounds r;
    const uint64_t shorts = 2000, whole = 9 * shorts + 182000, length = 3 * 182000;
    double items = 0;
    uint64_t now = 1000000;
    spdl__window w;
    spdl__rounds_start(&r, test_seed(), 2);
    for (int i = 0; i < 4000; ++i) {
        int step = 0;
        spdl__window_begin(&w, &r, now, length, 182000); /* a long step has just ended */
        CHECK(w.begin >= now && w.begin <= now + length && w.end - w.begin == length);
        do now += step++ % 10 == 9 ? 182000 : shorts;
        while (!spdl__window_item(&w, now));
        CHECK(w.gap_ns == 182000 && w.at == now && now >= w.end);
        items += w.items / 4000;
    }
    CHECK(items > 0.97 * 10 * (double)length / (double)whole &&
          items < 1.03 * 10 * (double)length / (double)whole);
    spdl__window_begin(&w, &r, 1000, 100, 0); /* without a gap it begins at once */
    CHECK(w.begin == 1000 && !spdl__window_item(&w, 1050) && spdl__window_item(&w, 1150));
    CHECK(w.items > 1.49 && w.items < 1.51);
}

TEST_TABLE(compare) {
    TEST_CASE(roots_and_quantiles), TEST_CASE(ratios_are_of_sums),
    TEST_CASE(few_rounds_say_nothing), TEST_CASE(rounds_are_dropped),
    TEST_CASE(rounds_are_made_again),
    TEST_CASE(an_arm_without_items),
    TEST_CASE(interval_holds_the_truth), TEST_CASE(comparisons_hold_together),
    TEST_CASE(orders_are_drawn_afresh), TEST_CASE(windows_are_longer_than_gaps),
    TEST_CASE(a_short_time_has_enough_rounds), TEST_CASE(windows_count_parts), TEST_END,
};
