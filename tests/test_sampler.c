/* Orders and their chance, ranks, runs that go on elsewhere, mixtures. */
#include "flow.h"

#include <float.h>
#include <math.h>

/* --- a sampler in a line --- */

static spdl_sampler *sampler_of(spdl_sampler_desc desc, const char *file, int line) {
    spdl_sampler *s = NULL;
    spdl_error error;
    desc.error = &error;
    if (!test_check_eq(spdl_sampler_create(&s, &desc), SPDL_OK, file, line, "create"))
        fprintf(stderr, "%s\n", error.text);
    REQUIRE(s != NULL);
    return s;
}

#define SAMPLER(...) sampler_of((spdl_sampler_desc){ __VA_ARGS__ }, __FILE__, __LINE__)
#define SHUFFLED(...) SAMPLER(.order = SPDL_SAMPLE_SHUFFLED, __VA_ARGS__)

static spdl_mixture *mixture_of(spdl_mixture_desc desc, const char *file, int line) {
    spdl_mixture *m = NULL;
    spdl_error error;
    desc.error = &error;
    if (!test_check_eq(spdl_mixture_create(&m, &desc), SPDL_OK, file, line, "create"))
        fprintf(stderr, "%s\n", error.text);
    REQUIRE(m != NULL);
    return m;
}

#define MIXTURE(...) mixture_of((spdl_mixture_desc){ __VA_ARGS__ }, __FILE__, __LINE__)
#define WEIGHTS(...)                                                                               \
    .weights = (const double[]){ __VA_ARGS__ },                                                    \
    .sources = sizeof((const double[]){ __VA_ARGS__ }) / sizeof(double)
#define LENGTHS(...) .lengths = (const uint64_t[]){ __VA_ARGS__ }

static uint64_t index_at(spdl_sampler *s, uint64_t epoch, uint64_t position) {
    spdl_index it;
    REQUIRE(spdl_sampler_at(s, epoch, position, &it) == SPDL_OK);
    CHECK_EQ(it.position, position);
    CHECK_EQ(it.epoch, epoch);
    return it.index;
}

static void refused(const spdl_sampler_desc *desc, const char *text, const char *file, int line) {
    spdl_sampler_desc copy = *desc;
    spdl_sampler *s = (spdl_sampler *)&copy;
    spdl_error error;
    copy.error = &error;
    test_check_eq(spdl_sampler_create(&s, &copy), SPDL_E_INVALID, file, line, text);
    test_check(s == NULL, file, line, "%s", "no sampler");
    test_check_str(error.text, text, file, line, "why");
}

#define REFUSED(text, ...) refused(&(spdl_sampler_desc){ __VA_ARGS__ }, text, __FILE__, __LINE__)

/* --- shuffles --- */

/* Every index once, and found again. */
static void a_shuffle_is_a_bijection(void) {
    static bool seen[70000];
    for (uint64_t n = 1; n <= 70000;
         n = n < 300 || (n > 4000 && n < 4300) ? n + 1 : n * 9 / 8 + 1) {
        spdl_sampler *s = SHUFFLED(.count = n, .seed = n);
        memset(seen, 0, sizeof seen);
        for (uint64_t p = 0; p < n; ++p) {
            const uint64_t index = index_at(s, 5, p);
            uint64_t at = 0;
            if (!CHECK(index < n && !seen[index])) break;
            seen[index] = true;
            if (!CHECK(spdl_sampler_position_of(s, 5, index, &at) == SPDL_OK && at == p)) break;
        }
        spdl_sampler_destroy(s);
    }
}

static void nobody_has_items_beyond_the_end(void) {
    spdl_sampler *s = SAMPLER(.count = (uint64_t)1 << 63, .ranks = { 1, 4 });
    spdl_index it;
    CHECK(spdl_sampler_length(s, 0) == (uint64_t)1 << 61);
    CHECK_EQ(spdl_sampler_item(s, 0, ((uint64_t)1 << 61) - 1, &it), SPDL_OK);
    CHECK(it.position == ((uint64_t)1 << 63) - 3);
    for (int bits = 61; bits < 64; ++bits)
        CHECK_EQ(spdl_sampler_item(s, 0, (uint64_t)1 << bits, &it), SPDL_END);
    spdl_sampler_destroy(s);
}

static void any_size_up_to_2_to_the_63_is_shuffled(void) {
    uint64_t random = test_seed();
    for (int bits = 1; bits <= 63; ++bits)
        for (int k = -1; k <= 1; ++k) {
            const uint64_t n = ((uint64_t)1 << bits) + (uint64_t)(bits == 63 && k > 0 ? 0 : k);
            spdl_sampler *s = SHUFFLED(.count = n);
            for (int i = 0; i < 200; ++i) {
                const uint64_t p = i < 2 ? (n - 1) * (uint64_t)i : test_random(&random) % n;
                uint64_t at = 0;
                CHECK_EQ(spdl_sampler_position_of(s, ~0u, index_at(s, ~0u, p), &at), SPDL_OK);
                CHECK(at == p);
            }
            spdl_sampler_destroy(s);
        }
}

/* All n! orders, by number: each about as often as any other one. */
static double factorial_chi_square(bool epochs, uint64_t n, long each) {
    static long found[40320];
    long orders = 1;
    double sum = 0;
    for (uint64_t i = 2; i <= n; ++i) orders *= (long)i;
    memset(found, 0, sizeof found);
    spdl_sampler *s = SHUFFLED(.count = n, .seed = 9);
    for (long draw = 0; draw < orders * each; ++draw) {
        long number = 0;
        uint64_t order[8];
        if (!epochs) s->desc.seed = (uint64_t)draw, s->ready = false;
        for (uint64_t p = 0; p < n; ++p) {
            order[p] = index_at(s, epochs ? (uint64_t)draw : 0, p);
            long before = (long)order[p];
            for (uint64_t q = 0; q < p; ++q) before -= order[q] < order[p];
            number = number * (long)(n - p) + before;
        }
        ++found[number];
    }
    spdl_sampler_destroy(s);
    for (long i = 0; i < orders; ++i)
        sum += (double)((found[i] - each) * (found[i] - each)) / (double)each;
    return orders < 2 ? 0 : (sum - (double)(orders - 1)) / sqrt(2.0 * (double)(orders - 1));
}

static void all_orders_of_few_are_as_likely(void) {
    const uint64_t most = TEST_SANITIZED ? 6 : 8;
    for (uint64_t n = 2; n <= most; ++n) {
        const long each = n < 7 ? 200 : 20;
        CHECK(fabs(factorial_chi_square(true, n, each)) < 5);
        if (n < 8) CHECK(fabs(factorial_chi_square(false, n, each)) < 5);
    }
}

/* --- ours beside a true shuffle, and beside one that is none --- */

typedef enum shuffler { OURS, TRUE, WEAK } shuffler;

static void shuffle_by(shuffler who, spdl_sampler *s, uint64_t epoch, uint32_t *order, uint32_t n,
                       uint64_t *random) {
    const uint32_t start = (uint32_t)(test_random(random) % n);
    for (uint32_t i = 0; i < n; ++i) {
        const uint32_t j = (uint32_t)(test_random(random) % (i + 1));
        if (who == OURS) order[i] = (uint32_t)index_at(s, epoch, i);
        if (who == WEAK) order[i] = (uint32_t)((start + (uint64_t)i * (n / 2 + 1)) % n);
        if (who == TRUE) order[i] = order[j], order[j] = i;
    }
}

enum { COUNTS = 6 };
static const char *const count_names[COUNTS] = { "in place", "next to next", "ascents", "odd",
                                                 "in order", "in place again" };

/* Sums over orders of n of what has a mean and a variance known for all orders; deviations from the
   mean and variances are added up. */
typedef struct count_sums {
    double off[COUNTS], variance[COUNTS];
} count_sums;

static bool order_is_odd(const uint32_t *order, uint32_t n) {
    static bool seen[4096];
    bool odd = false;
    memset(seen, 0, n);
    for (uint32_t i = 0; i < n; ++i)
        for (uint32_t at = order[i]; !seen[i] && at != i; at = order[at]) {
            seen[at] = true;
            odd = !odd;
        }
    return odd;
}

static void count_order(count_sums *sums, const uint32_t *order, const uint32_t *before,
                        uint32_t n) {
    double counts[COUNTS] = { 0 }, mean[COUNTS], variance[COUNTS];
    const double m = n, middle = (m - 1) / 2;
    for (uint32_t i = 0; i < n; ++i) {
        counts[0] += order[i] == i;
        counts[1] += i > 0 && order[i] == order[i - 1] + 1;
        counts[2] += i > 0 && order[i] > order[i - 1];
        counts[4] += (i - middle) * (order[i] - middle);
        counts[5] += order[i] == before[i];
    }
    counts[3] = order_is_odd(order, n);
    mean[0] = 1, variance[0] = 1;
    mean[1] = (m - 1) / m, variance[1] = 1 - 1 / (m * m) + 1 / m; /* about */
    mean[2] = (m - 1) / 2, variance[2] = (m + 1) / 12;
    mean[3] = 0.5, variance[3] = 0.25;
    mean[4] = 0, variance[4] = m * m * (m * m - 1) * (m + 1) / 144;
    mean[5] = 1, variance[5] = 1;
    for (int c = 0; c < COUNTS; ++c) { /* each order counts the same, whatever its n */
        sums->off[c] += (counts[c] - mean[c]) / sqrt(variance[c]);
        sums->variance[c] += 1;
    }
}

static double worst_of(const count_sums *sums, bool say) {
    double worst = 0;
    for (int c = 0; c < COUNTS; ++c) {
        const double sigma = fabs(sums->off[c]) / sqrt(sums->variance[c]);
        if (sigma > worst) worst = sigma;
        if (say && sigma > 5) fprintf(stderr, "%s: %.1f sigma\n", count_names[c], sigma);
    }
    return worst;
}

static void every_size_is_as_a_true_shuffle(void) {
    static uint32_t order[2][4096];
    uint64_t random = test_seed();
    count_sums sums[3];
    memset(sums, 0, sizeof sums);
    for (uint32_t n = 3; n <= 4096; n += TEST_SANITIZED ? 61 : n < 200 ? 1 : 3) {
        spdl_sampler *s = SHUFFLED(.count = n, .seed = 11);
        for (int who = 0; who < 3; ++who) {
            const uint32_t rounds = who == OURS ? 4 : 2;
            if (who != OURS && n % 8 != 0) continue; /* what shows that the test can tell */
            for (uint32_t e = 0; e <= rounds; ++e) {
                shuffle_by((shuffler)who, s, e, order[e % 2], n, &random);
                if (e > 0) count_order(&sums[who], order[e % 2], order[(e - 1) % 2], n);
            }
        }
        spdl_sampler_destroy(s);
    }
    CHECK(worst_of(&sums[OURS], true) < 5);
    CHECK(worst_of(&sums[TRUE], true) < 5);
    if (!TEST_SANITIZED) CHECK(worst_of(&sums[WEAK], false) > 5);
}

/* Where an index comes, the distance of neighbours, and what four corners of a square have in
   common: what a network of too few rounds shows first. */
static double table_sigma(const long *found, size_t count, double expected) {
    double sum = 0;
    for (size_t i = 0; i < count; ++i)
        sum += ((double)found[i] - expected) * ((double)found[i] - expected) / expected;
    return (sum - (double)count) / sqrt(2.0 * (double)count);
}

static double network_sigma(uint32_t n, int orders, int rounds) {
    enum { CELLS = 32 };
    static long place[CELLS * CELLS], step[70000], corner[70000];
    static uint32_t order[70000];
    spdl__shuffle shuffle;
    double worst;
    uint32_t corners = 0;
    memset(&shuffle, 0, sizeof shuffle);
    memset(place, 0, sizeof place), memset(step, 0, sizeof step), memset(corner, 0, sizeof corner);
    for (int e = 0; e < orders; ++e) {
        spdl__shuffle_set(&shuffle, spdl__hashed(3, (uint64_t)e), n);
        for (int r = rounds; r < 5; ++r) shuffle.key_of[r] = 0;
        const uint32_t row = (uint32_t)1 << shuffle.shift;
        for (uint32_t i = 0; i < n; ++i) order[i] = (uint32_t)spdl__shuffle_at(&shuffle, i, false);
        for (uint32_t i = 0; i < n; ++i) {
            ++place[i * CELLS / n * CELLS + order[i] * CELLS / n];
            ++step[(order[(i + 1) % n] + n - order[i]) % n];
            if (i + row + 1 >= n) continue;
            ++corner[((uint64_t)order[i] + order[i + row + 1] + 2 * n - order[i + 1] -
                      order[i + row]) % n];
            ++corners;
        }
    }
    worst = fabs(table_sigma(place, CELLS * CELLS, (double)n * orders / (CELLS * CELLS)));
    const double steps = fabs(table_sigma(step + 1, n - 1, (double)n * orders / (n - 1)));
    const double squares = fabs(table_sigma(corner, n, (double)corners / n));
    if (steps > worst) worst = steps;
    return squares > worst ? squares : worst;
}

static void a_large_shuffle_has_no_pattern(void) {
    static const uint32_t sizes[] = { 4128, 5024, 8192, 20000, 65536 };
    const int items = TEST_SANITIZED ? 1000000 : 8000000;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; ++i)
        CHECK(network_sigma(sizes[i], items / (int)sizes[i], 5) < 5);
    if (!TEST_SANITIZED) CHECK(network_sigma(4128, items / 4128, 2) > 5); /* the rest have no key */
}

/* How much two orders have in common: indices in the same place, and the correlation. */
static void check_unlike(spdl_sampler *a, spdl_sampler *b, uint64_t ea, uint64_t eb, uint32_t n) {
    double same = 0, together = 0;
    const double middle = (n - 1) / 2.0;
    for (uint32_t i = 0; i < n; ++i) {
        const double x = (double)index_at(a, ea, i), y = (double)index_at(b, eb, i);
        same += x == y;
        together += (x - middle) * (y - middle);
    }
    CHECK(same < 12); /* a Poisson number of mean 1: one in 1e9 */
    CHECK(fabs(together) / ((double)n * n / 12) < 6 * sqrt(n));
}

static void seeds_and_epochs_share_no_order(void) {
    static const uint32_t sizes[] = { 1000, 5000, 50000 };
    for (size_t i = 0; i < 3; ++i)
        for (uint64_t seed = 0; seed < 10; ++seed) {
            spdl_sampler *a = SHUFFLED(.count = sizes[i], .seed = seed);
            spdl_sampler *b = SHUFFLED(.count = sizes[i], .seed = seed + 1);
            check_unlike(a, b, 0, 0, sizes[i]);
            check_unlike(a, b, 1, 0, sizes[i]); /* where both are added, this is the same */
            check_unlike(a, a, seed, seed + 1, sizes[i]);
            spdl_sampler_destroy(a);
            spdl_sampler_destroy(b);
        }
}

/* --- other orders --- */

/* The indices of an epoch, as a text. */
static const char *epoch_text(spdl_sampler *s, uint64_t epoch) {
    static notes n;
    spdl_index it;
    n.length = 0;
    for (uint64_t i = 0; spdl_sampler_item(s, epoch, i, &it) == SPDL_OK; ++i)
        note(&n, i ? " %ld" : "%ld", (long)it.index);
    if (n.length == 0) n.text[0] = '\0';
    return n.text;
}

static void the_default_is_one_after_the_other(void) {
    spdl_sampler *s = SAMPLER(.count = 5), *none = SAMPLER(.count = 0);
    spdl_sampler *some = SHUFFLED(.count = 100, .draws = 10);
    uint64_t at;
    CHECK_STR(epoch_text(s, 0), "0 1 2 3 4");
    CHECK_STR(epoch_text(none, 3), "");
    CHECK_EQ(spdl_sampler_length(some, 7), 10);
    long found = 0;
    for (uint64_t i = 0; i < 100; ++i)
        if (spdl_sampler_position_of(some, 2, i, &at) == SPDL_OK)
            found += index_at(some, 2, at) == i;
        else CHECK_EQ(spdl_sampler_position_of(some, 2, i, &at), SPDL_E_NOT_FOUND);
    CHECK_EQ(found, 10);
    CHECK_EQ(spdl_sampler_position_of(s, 0, 5, &at), SPDL_E_NOT_FOUND);
    spdl_sampler_destroy(s);
    spdl_sampler_destroy(none);
    spdl_sampler_destroy(some);
}

static void blocks_are_read_in_one_go(void) {
    static const uint64_t sizes[] = { 3, 0, 7, 1, 2000, 0, 30, 1200 };
    for (int how = 0; how < 4; ++how) {
        spdl_sampler *s = how < 2
            ? SAMPLER(.order = SPDL_SAMPLE_BLOCKS, .count = 3241, .block_sizes = sizes,
                      .blocks = 8, .shuffle_inside = how == 1, .seed = 4)
            : SAMPLER(.order = SPDL_SAMPLE_BLOCKS, .count = 3241, .block = 100,
                      .shuffle_inside = how == 3, .seed = 4);
        bool shuffled = false;
        for (uint64_t epoch = 0; epoch < 5; ++epoch) {
            static bool seen[3241];
            long jumps = 0, changes = 0, block = -1;
            memset(seen, 0, sizeof seen);
            for (uint64_t p = 0, last = ~0u; p < 3241; ++p) {
                const uint64_t index = index_at(s, epoch, p);
                uint64_t at = 0;
                long b = (long)(index / 100);
                if (how < 2)
                    for (uint64_t sum = sizes[b = 0]; index >= sum;) sum += sizes[++b];
                CHECK(index < 3241 && !seen[index]);
                seen[index] = true;
                jumps += index != last + 1;
                changes += b != block;
                block = b;
                last = index;
                CHECK_EQ(spdl_sampler_position_of(s, epoch, index, &at), SPDL_OK);
                if (p % 50 == 0) (void)index_at(s, epoch, p * 7 % 3241); /* not in order */
                CHECK_EQ(at, p);
            }
            CHECK_EQ(changes, how < 2 ? 6 : 33);
            if (how % 2) CHECK(jumps > 2000);
            else CHECK(jumps <= changes); /* less where two follow each other */
            if (index_at(s, epoch, 0) != index_at(s, epoch + 1, 0)) shuffled = true;
        }
        CHECK(shuffled);
        spdl_sampler_destroy(s);
    }
}

static void weights_are_drawn_by(void) {
    static double w[] = { 3, 0, 1, 1e-9, 6, 0.5, 0 };
    double sum = 10.5, chi = 0;
    long found[7] = { 0 };
    for (int size = 0; size < 3; ++size) {
        double scaled[7];
        for (int i = 0; i < 7; ++i) scaled[i] = w[i] * (size == 0 ? 1 : size == 1 ? 1e307 : 1e-300);
        spdl_sampler *s = SAMPLER(.order = SPDL_SAMPLE_WEIGHTED, .count = 7, .weights = scaled,
                                  .draws = 200000, .seed = 12);
        memset(scaled, 0, sizeof scaled); /* they were copied */
        memset(found, 0, sizeof found);
        for (uint64_t p = 0; p < 200000; ++p) ++found[index_at(s, 1, p)];
        CHECK_EQ(found[1] + found[3] + found[6], 0);
        chi = 0;
        for (int i = 0; i < 7; ++i)
            if (w[i] > 1e-3)
                chi += pow((double)found[i] - 2e5 * w[i] / sum, 2) / (2e5 * w[i] / sum);
        CHECK(chi < 25); /* 3 degrees of freedom */
        CHECK_EQ(index_at(s, 1, 777), index_at(s, 1, 777));
        spdl_sampler_destroy(s);
    }
}

/* Large tables: the sum of what each index is drawn with is its weight. */
static void every_weight_has_its_share_of_the_table(void) {
    uint64_t random = test_seed();
    static double w[5000], share[5000];
    for (int round = 0; round < 20; ++round) {
        const uint64_t n = 1 + test_random(&random) % 5000;
        double sum = 0;
        for (uint64_t i = 0; i < n; ++i) {
            const double u = (double)(test_random(&random) >> 11) * 0x1p-53;
            sum += w[i] = round % 4 == 3 && i % 3 ? 0 : pow(u + 1e-12, round % 5);
            share[i] = 0;
        }
        if (sum == 0) continue;
        spdl_sampler *s = SAMPLER(.order = SPDL_SAMPLE_WEIGHTED, .count = n, .weights = w);
        for (uint64_t i = 0; i < n; ++i) {
            const double keep = (double)s->alias[i].keep * 0x1p-64;
            share[i] += keep;
            REQUIRE(s->alias[i].other < n);
            share[s->alias[i].other] += 1 - keep;
        }
        for (uint64_t i = 0; i < n; ++i) {
            CHECK(fabs(share[i] / (double)n - w[i] / sum) < 1e-12);
            if (w[i] == 0) CHECK(share[i] == 0);
        }
        spdl_sampler_destroy(s);
    }
}

/* Each order of 4 has the probability that drawing without putting back gives it. */
static void without_replacement_the_draws_are_exact(void) {
    static const double w[] = { 4, 1, 0, 2, 0.5 };
    static const uint64_t with[] = { 0, 1, 3, 4 };
    enum { EPOCHS = 60000 };
    static long found[5][5][5][5];
    double chi = 0;
    spdl_sampler *s = SAMPLER(.order = SPDL_SAMPLE_WEIGHTED_ONCE, .count = 5, .weights = w);
    CHECK_EQ(spdl_sampler_length(s, 0), 4);
    memset(found, 0, sizeof found);
    for (uint64_t e = 0; e < EPOCHS; ++e)
        ++found[index_at(s, e, 0)][index_at(s, e, 1)][index_at(s, e, 2)][index_at(s, e, 3)];
    for (int a = 0; a < 4; ++a)
        for (int b = 0; b < 4; ++b)
            for (int c = 0; c < 4; ++c)
                for (int d = 0; d < 4; ++d) {
                    if (a == b || a == c || a == d || b == c || b == d || c == d) continue;
                    const uint64_t i = with[a], j = with[b], k = with[c], l = with[d];
                    const double p = w[i] / 7.5 * w[j] / (7.5 - w[i]) * w[k] / (w[k] + w[l]);
                    chi += pow((double)found[i][j][k][l] - p * EPOCHS, 2) / (p * EPOCHS);
                }
    CHECK(chi < 23 + 5 * sqrt(46)); /* 24 orders */
    for (uint64_t i = 0, at = 9; i < 5; ++i) {
        const spdl_result result = spdl_sampler_position_of(s, 3, i, &at);
        CHECK_EQ(result, i == 2 ? SPDL_E_NOT_FOUND : SPDL_OK);
        if (i != 2) CHECK_EQ(index_at(s, 3, at), i);
    }
    spdl_sampler_destroy(s);
}

/* The logarithm in it, and weights from one end of the numbers to the other. */
static void keys_of_any_weight_are_in_order(void) {
    static const double w[] = { 5e-324, 1e-310, DBL_MIN, 1e-200, 1, 3, 1e300, DBL_MAX };
    uint64_t random = test_seed();
    for (int i = 0; i < 10000; ++i) {
        const uint64_t x = test_random(&random) >> (i % 60);
        const double exact = -log2(((double)x + 0.5) / 0x1p64);
        if (x < 1000) continue;
        CHECK(fabs((double)spdl__minus_log2(x) * 0x1p-52 - exact) < 1 / (double)x + 1e-13);
        for (int k = 1; k < 8; ++k)
            CHECK(spdl__draw_key(x, w[k]) < spdl__draw_key(x, w[k - 1]));
        CHECK(spdl__draw_key(x, 1) < spdl__draw_key(x / 2, 1));
    }
    CHECK(spdl__draw_key(0, 5e-324) > spdl__draw_key(1000, 5e-324));
    CHECK(spdl__draw_key(UINT64_MAX, DBL_MAX) < spdl__draw_key(UINT64_MAX - 9999, DBL_MAX));
}

static uint64_t by_length(void *ctx, uint64_t epoch, uint64_t position) {
    return position * *(uint64_t *)ctx + epoch;
}

static void a_curriculum_is_what_it_says(void) {
    uint64_t step = 2, at;
    spdl_index it;
    spdl_sampler *s = SAMPLER(.order = SPDL_SAMPLE_CURRICULUM, .count = 8, .draws = 5,
                              .index_fn = by_length, .ctx = &step);
    CHECK_EQ(index_at(s, 1, 3), 7);
    CHECK_EQ(spdl_sampler_at(s, 0, 4, &it), SPDL_E_INVALID);
    CHECK_EQ(it.index, 8);
    CHECK_EQ(spdl_sampler_at(s, 0, 5, &it), SPDL_END);
    CHECK_EQ(spdl_sampler_position_of(s, 0, 1, &at), SPDL_E_UNSUPPORTED);
    spdl_pipeline *p = START(2, SPDL_INDEX(s), SPDL_SINK(3));
    for (void *i = NULL; spdl_pipeline_next(p, &i, SPDL_SECONDS(15)) == SPDL_OK;)
        spdl_buffer_free(i);
    failed_with(p, 0, "spdl: stage 0 'spdl_index', item 4: index_fn gave 8 for position 4 of epoch "
                      "0, must be less than count, 8");
    spdl_pipeline_destroy(p);
    spdl_sampler_destroy(s);
}

static void nobody_frees(void *memory, size_t bytes, void *user) {
    (void)memory, (void)bytes, (void)user;
}

static void what_makes_no_sense_is_refused(void) {
    static const double none[] = { 0, 0 }, inf[] = { 1, INFINITY }, nan_[] = { NAN, 1 },
                        minus[] = { 1, -0.5 }, some[] = { 0, 2 };
    static const uint64_t blocks[] = { 3, 8 }, huge[] = { 3, UINT64_MAX };
    REFUSED("spdl: sampler: the sum of weights is 0", .order = SPDL_SAMPLE_WEIGHTED, .count = 2,
            .weights = none);
    REFUSED("spdl: sampler: the sum of weights is 0", .order = SPDL_SAMPLE_WEIGHTED,
            .weights = some);
    REFUSED("spdl: sampler: weights[1] is inf, must be a number that is not negative",
            .order = SPDL_SAMPLE_WEIGHTED, .count = 2, .weights = inf);
    REFUSED("spdl: sampler: weights[0] is nan, must be a number that is not negative",
            .order = SPDL_SAMPLE_WEIGHTED_ONCE, .count = 2, .weights = nan_);
    REFUSED("spdl: sampler: weights[1] is -0.5, must be a number that is not negative",
            .order = SPDL_SAMPLE_WEIGHTED, .count = 2, .weights = minus);
    REFUSED("spdl: sampler: weights is NULL", .order = SPDL_SAMPLE_WEIGHTED, .count = 2);
    REFUSED("spdl: sampler: draws is 2, but only 1 indices have a weight",
            .order = SPDL_SAMPLE_WEIGHTED_ONCE, .count = 2, .draws = 2, .weights = some);
    REFUSED("spdl: sampler: draws is 3, but each of the 2 indices comes once", .count = 2,
            .draws = 3);
    REFUSED("spdl: sampler: world is 0, must be at least 1", .ranks = { 3, 0 });
    REFUSED("spdl: sampler: world is -1, must be at least 1", .ranks = { 0, -1 });
    REFUSED("spdl: sampler: rank is -1, must be from 0 to world - 1, which is 3",
            .ranks = { -1, 4 });
    REFUSED("spdl: sampler: rank is 4, must be from 0 to world - 1, which is 3", .ranks = { 4, 4 });
    REFUSED("spdl: sampler: count or draws is more than 2^63", .count = UINT64_MAX);
    REFUSED("spdl: sampler: order or tail is none that there is", .order = (spdl_sampler_order)99);
    REFUSED("spdl: sampler: order or tail is none that there is", .tail = (spdl_tail)-1);
    REFUSED("spdl: sampler: index_fn is NULL", .order = SPDL_SAMPLE_CURRICULUM, .count = 1);
    REFUSED("spdl: sampler: set block, or block_sizes and blocks, to what is read in one go",
            .order = SPDL_SAMPLE_BLOCKS, .count = 10);
    REFUSED("spdl: sampler: the sum of block_sizes is not count", .order = SPDL_SAMPLE_BLOCKS,
            .count = 10, .block_sizes = blocks, .blocks = 2);
    REFUSED("spdl: sampler: the sum of block_sizes is not count", .order = SPDL_SAMPLE_BLOCKS,
            .count = 2, .block_sizes = huge, .blocks = 2);
    REFUSED("spdl: sampler: mixture or samplers is NULL", .order = SPDL_SAMPLE_MIXTURE);
    REFUSED("spdl: sampler: set both functions of the allocator or none",
            .allocator = { .free_fn = nobody_frees });
    CHECK_EQ(spdl_sampler_create(NULL, NULL), SPDL_E_INVALID);
}

/* --- ranks --- */

static void check_ranks(uint64_t count, int world, spdl_tail tail, const char *lengths) {
    notes n = { .length = 0 };
    long *times = (long *)calloc(count + 1, sizeof *times);
    long total = 0;
    for (int rank = 0; rank < world; ++rank) {
        spdl_sampler *s = SHUFFLED(.count = count, .ranks = { rank, world }, .tail = tail,
                                   .seed = 3);
        const uint64_t length = spdl_sampler_length(s, 2);
        spdl_index it;
        note(&n, rank ? " %ld" : "%ld", (long)length);
        for (uint64_t i = 0; i < length; ++i, ++total) {
            REQUIRE(spdl_sampler_item(s, 2, i, &it) == SPDL_OK);
            ++times[it.index];
            CHECK_EQ(it.position, (i * (uint64_t)world + (uint64_t)rank) % count);
        }
        CHECK_EQ(spdl_sampler_item(s, 2, length, &it), SPDL_END);
        CHECK_EQ(spdl_sampler_item(s, 2, UINT64_MAX, &it), SPDL_END);
        spdl_sampler_destroy(s);
    }
    CHECK_STR(n.text, lengths);
    for (uint64_t i = 0; i < count; ++i) {
        CHECK(times[i] <= 1 || tail == SPDL_TAIL_PAD);
        CHECK(times[i] >= 1 || tail == SPDL_TAIL_DROP);
    }
    free(times);
}

static void ranks_share_an_epoch(void) {
    check_ranks(26, 4, SPDL_TAIL_KEEP, "7 7 6 6");
    check_ranks(26, 4, SPDL_TAIL_DROP, "6 6 6 6");
    check_ranks(26, 4, SPDL_TAIL_PAD, "7 7 7 7");
    check_ranks(11, 4, SPDL_TAIL_KEEP, "3 3 3 2");
    check_ranks(11, 4, SPDL_TAIL_DROP, "2 2 2 2");
    check_ranks(11, 4, SPDL_TAIL_PAD, "3 3 3 3");
    check_ranks(3, 5, SPDL_TAIL_KEEP, "1 1 1 0 0");
    check_ranks(3, 5, SPDL_TAIL_DROP, "0 0 0 0 0");
    check_ranks(3, 5, SPDL_TAIL_PAD, "1 1 1 1 1");
    check_ranks(1, 5, SPDL_TAIL_PAD, "1 1 1 1 1");
    check_ranks(0, 2, SPDL_TAIL_PAD, "0 0");
    check_ranks(8, 4, SPDL_TAIL_KEEP, "2 2 2 2");
}

static void check_env(const char *const *set, spdl_result result, int rank, int world,
                      const char *text) {
    static const char *const all[] = { "RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK",
                                       "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE",
                                       "SLURM_PROCID", "SLURM_NTASKS" };
    spdl_ranks ranks = { 77, 78 };
    spdl_error error;
    for (size_t i = 0; i < 8; ++i) unsetenv(all[i]);
    for (; *set != NULL; set += 2) setenv(set[0], set[1], 1);
    CHECK_EQ(spdl_ranks_from_env(&ranks, &error), result);
    CHECK_EQ(ranks.rank, rank);
    CHECK_EQ(ranks.world, world);
    CHECK_STR(error.text, text);
    CHECK_EQ(spdl_ranks_from_env(&ranks, NULL), result);
}

#define ENV(result, rank, world, text, ...)                                                        \
    check_env((const char *const[]){ __VA_ARGS__, NULL }, result, rank, world, text)

static void ranks_come_from_the_environment(void) {
    ENV(SPDL_E_NOT_FOUND, 0, 1, "", NULL);
    ENV(SPDL_OK, 3, 8, "", "RANK", "3", "WORLD_SIZE", "8", "SLURM_PROCID", "0", "SLURM_NTASKS",
        "9");
    ENV(SPDL_OK, 1, 2, "", "OMPI_COMM_WORLD_RANK", "1", "OMPI_COMM_WORLD_SIZE", "2",
        "SLURM_PROCID", "0", "SLURM_NTASKS", "1");
    ENV(SPDL_OK, 0, 1, "", "PMI_RANK", "0", "PMI_SIZE", "1");
    ENV(SPDL_OK, 1023, 1024, "", "SLURM_PROCID", "1023", "SLURM_NTASKS", "1024");
    ENV(SPDL_E_NOT_FOUND, 0, 1, "", "SLURM_NTASKS", "4"); /* salloc without srun */
    ENV(SPDL_E_INVALID, 77, 78, "spdl: ranks: RANK is set, but WORLD_SIZE is not", "RANK", "3");
    ENV(SPDL_E_INVALID, 77, 78, "spdl: ranks: RANK is 4 and WORLD_SIZE is 4, must be a number and "
        "a larger one", "RANK", "4", "WORLD_SIZE", "4");
    ENV(SPDL_E_INVALID, 77, 78, "spdl: ranks: PMI_RANK is -1 and PMI_SIZE is 4, must be a number "
        "and a larger one", "PMI_RANK", "-1", "PMI_SIZE", "4");
    ENV(SPDL_E_INVALID, 77, 78, "spdl: ranks: RANK is 1 and WORLD_SIZE is 99999999999, must be a "
        "number and a larger one", "RANK", "1", "WORLD_SIZE", "99999999999");
    ENV(SPDL_E_INVALID, 77, 78, "spdl: ranks: RANK is 1x and WORLD_SIZE is 2, must be a number and "
        "a larger one", "RANK", "1x", "WORLD_SIZE", "2");
}

/* Order depends on (seed, epoch) alone: five epochs after ten others are as fresh ones. */
static void orders_have_no_memory(void) {
    static const spdl_sampler_order orders[] = { SPDL_SAMPLE_SHUFFLED, SPDL_SAMPLE_BLOCKS,
                                                 SPDL_SAMPLE_WEIGHTED, SPDL_SAMPLE_WEIGHTED_ONCE };
    double w[300];
    for (int i = 0; i < 300; ++i) w[i] = i % 10;
    for (size_t k = 0; k < 4; ++k) {
        const spdl_sampler_desc desc = { .order = orders[k], .count = 300, .weights = w,
                                         .seed = 6, .block = k == 1 ? 9 : 0 };
        spdl_sampler *a = sampler_of(desc, __FILE__, __LINE__);
        char first[4000];
        for (uint64_t e = 0; e < 10; ++e) (void)epoch_text(a, e);
        snprintf(first, sizeof first, "%s", epoch_text(a, 5));
        spdl_sampler *b = sampler_of(desc, __FILE__, __LINE__);
        CHECK_STR(epoch_text(b, 5), first);
        CHECK(strcmp(epoch_text(b, 4), first) != 0);
        spdl_sampler_destroy(a);
        spdl_sampler_destroy(b);
    }
}

/* A run may go on on another machine, with another compiler or version: the hash of many items. */
static void orders_are_the_same_everywhere(void) {
    static const uint64_t golden[] = {
        0x4e4ea1615593a915u, 0xf08cb5244e9f2665u, 0x45927c8effd56ae3u,
        0x7e9e5b36f77b74dfu, 0xd838b81506c71874u, 0x20078d9c80a5bae0u,
        0xf1d2483dc98ef591u };
    double w[500];
    uint64_t hash = 0;
    for (int i = 0; i < 500; ++i) w[i] = i % 7 * 0.1 + i % 3;
    spdl_mixture *m = MIXTURE(.weights = w, .sources = 500);
    for (int k = 0; k < 6; ++k) {
        spdl_sampler *s = SAMPLER(.order = (spdl_sampler_order)(k < 5 ? k : SPDL_SAMPLE_SHUFFLED),
                                  .count = k == 5 ? 1000000007 : 500, .weights = w, .seed = 77,
                                  .block = k == SPDL_SAMPLE_BLOCKS ? 30 : 0);
        for (uint64_t e = 0; e < 3; ++e)
            for (uint64_t p = 0; p < 300; ++p) {
                const uint64_t index = index_at(s, e, p);
                hash = spdl__hashed(hash, index);
            }
        if (!CHECK(hash == golden[k])) fprintf(stderr, "0x%llxu,\n", (unsigned long long)hash);
        spdl_sampler_destroy(s);
    }
    for (uint64_t p = 0; p < 2000; ++p) {
        uint64_t index;
        uint32_t source;
        CHECK_EQ(spdl_mixture_at(m, p * p, &source, &index), SPDL_OK);
        hash = spdl__hashed(spdl__hashed(hash, source), index);
    }
    if (!CHECK(hash == golden[6])) fprintf(stderr, "0x%llxu,\n", (unsigned long long)hash);
    spdl_mixture_destroy(m);
}

/* --- the row --- */

/* The indices that a pipeline delivers up to an end, with their epoch. */
static const char *taken_text(spdl_pipeline *p, uint64_t epoch, long most) {
    static notes n;
    void *taken = NULL;
    n.length = 0;
    n.text[0] = '\0';
    for (long i = 0; i < most && spdl_pipeline_next(p, &taken, SPDL_SECONDS(15)) == SPDL_OK; ++i) {
        const spdl_index *it = (const spdl_index *)taken;
        CHECK_EQ(it->epoch, epoch);
        note(&n, i ? " %ld" : "%ld", (long)it->index);
        spdl_buffer_free(taken);
    }
    return n.text;
}

static const char *last_two(const char *text) {
    const char *at = strrchr(text, ' ');
    while (*--at != ' ') {}
    return at + 1;
}

SPDL_FN(look_up, spdl_index, spdl_index) {
    if (in->index % 3 == 0) sleep_us(50);
    *out = in;
    return SPDL_OK;
}

static void a_row_makes_the_items_of_a_rank(void) {
    for (int i = 0; i < CROWDS; ++i) {
        spdl_sampler *s = SHUFFLED(.count = 50, .ranks = { 1, 3 }, .seed = 8);
        spdl_sampler *same = SHUFFLED(.count = 50, .ranks = { 1, 3 }, .seed = 8);
        spdl_pipeline *p = START(crowds[i], SPDL_INDEX(s, .continuous = true, .name = "order"),
                                 SPDL_PIPE(look_up, .concurrency = 4), SPDL_SINK(3));
        CHECK_EQ(spdl_pipeline_find(p, "order"), 0);
        for (uint64_t epoch = 0; epoch < 3; ++epoch)
            CHECK_STR(taken_text(p, epoch, 99), epoch_text(same, epoch));
        CHECK_EQ(spdl_pipeline_rewind(p, 15, SPDL_FOREVER), SPDL_OK); /* seek */
        CHECK_STR(taken_text(p, 0, 99), last_two(epoch_text(same, 0)));
        spdl_pipeline_destroy(p);
        spdl_sampler_destroy(s);
        spdl_sampler_destroy(same);
    }
}

static void a_row_without_a_sampler_fails(void) {
    spdl_pipeline *p = START(1, SPDL_INDEX(NULL), SPDL_SINK(1));
    void *it = NULL;
    CHECK_EQ(spdl_pipeline_next(p, &it, SPDL_SECONDS(15)), SPDL_E_STAGE);
    failed_with(p, 0, "spdl: stage 0 'spdl_index', item 0: its sampler is NULL");
    spdl_pipeline_destroy(p);
}

/* In a batch in place the items lie one after the other. */
static void items_lie_in_batches_in_place(void) {
    spdl_sampler *s = SHUFFLED(.count = 10, .seed = 2);
    spdl_pipeline *p = START(2, SPDL_INDEX(s), SPDL_BATCH(4, .item_bytes = sizeof(spdl_index)),
                             SPDL_SINK(2));
    spdl_batch *batch = NULL;
    uint64_t position = 0;
    while (SPDL_NEXT(p, &batch, SPDL_SECONDS(15)) == SPDL_OK) {
        for (size_t i = 0; i < batch->count; ++i, ++position) {
            const spdl_index *it = (const spdl_index *)batch->data + i;
            CHECK_EQ(it->position, position);
            CHECK_EQ(it->index, index_at(s, 0, position));
        }
        spdl_batch_free(batch);
    }
    CHECK_EQ(position, 10);
    spdl_pipeline_destroy(p);
    spdl_sampler_destroy(s);
}

/* --- positions that are left out, and runs that go on --- */

static void positions_are_skipped(void) {
    spdl_sampler *s = SAMPLER(.count = 12), *two = SAMPLER(.count = 12, .ranks = { 1, 2 });
    spdl_index it;
    CHECK_EQ(spdl_sampler_skip(s, 1, 3, 8), SPDL_OK);
    CHECK_STR(epoch_text(s, 0), "0 1 2 3 4 5 6 7 8 9 10 11");
    CHECK_STR(epoch_text(s, 1), "0 1 2 8 9 10 11");
    CHECK_EQ(spdl_sampler_length(s, 1), 7);
    CHECK_EQ(spdl_sampler_item(s, 1, 3, &it), SPDL_OK);
    CHECK_EQ(it.position, 8);
    CHECK_EQ(spdl_sampler_skip(s, 1, 6, 10), SPDL_OK); /* of it 6 and 7 are gone already */
    CHECK_STR(epoch_text(s, 1), "0 1 2 10 11");
    CHECK_EQ(spdl_sampler_skip(s, 1, 11, 99), SPDL_OK);
    CHECK_STR(epoch_text(s, 1), "0 1 2 10");
    CHECK_EQ(spdl_sampler_skip(s, 1, 0, 1), SPDL_OK);
    CHECK_STR(epoch_text(s, 1), "1 2 10");
    CHECK_EQ(spdl_sampler_skip(s, 1, 5, 4), SPDL_E_INVALID);
    CHECK_EQ(spdl_sampler_skip(s, 1, 4, 4), SPDL_OK);
    CHECK_EQ(spdl_sampler_skip(s, 1, 0, 99), SPDL_OK);
    CHECK_STR(epoch_text(s, 1), "");
    for (uint64_t i = 0; i < 40; ++i)
        CHECK_EQ(spdl_sampler_skip(s, 2, 0, i % 12), SPDL_OK); /* which become one */
    CHECK_STR(epoch_text(s, 2), "11");
    spdl_result result = SPDL_OK;
    for (uint64_t e = 5; result == SPDL_OK && e < 40; ++e) result = spdl_sampler_skip(s, e, 1, 2);
    CHECK_EQ(result, SPDL_E_LIMIT);
    CHECK_EQ(spdl_sampler_skip(two, 0, 3, 6), SPDL_OK);
    CHECK_STR(epoch_text(two, 0), "1 6 8 10");
    spdl_sampler_destroy(s);
    spdl_sampler_destroy(two);
}

/* A run on `world` ranks of `count` positions that is interrupted, and goes on on others, again and
   again within an epoch; what was delivered is noted. */
typedef struct run_model {
    uint64_t count;
    spdl_tail tail;
    int world;
    spdl_sampler *s[16];
    uint64_t at[16];
    bool *had;
    spdl_mixture *mixture; /* NULL: shuffled */
    spdl_sampler *one;     /* its only source */
    long delivered, most_text;
} run_model;

static void run_start(run_model *m, int world) {
    m->world = world;
    for (int r = 0; r < world; ++r) {
        m->s[r] = m->mixture
            ? SAMPLER(.order = SPDL_SAMPLE_MIXTURE, .mixture = m->mixture, .samplers = &m->one,
                      .seed = 5, .draws = m->count, .ranks = { r, world }, .tail = m->tail)
            : SHUFFLED(.count = m->count, .seed = 5, .ranks = { r, world }, .tail = m->tail,
                       .data_hash = 1);
        m->at[r] = 0;
    }
}

static void run_take(run_model *m, int rank, uint64_t items) {
    spdl_index it;
    while (items-- > 0 && spdl_sampler_item(m->s[rank], 3, m->at[rank], &it) == SPDL_OK) {
        CHECK(!m->had[it.position]);
        m->had[it.position] = true;
        ++m->at[rank];
        ++m->delivered;
    }
}

/* The lowest number that is left, of those a rank has yet to take, in the order of positions. */
static void check_ascending(run_model *m) {
    for (int r = 0; r < m->world; ++r) {
        spdl_index it;
        uint64_t last = 0;
        for (uint64_t i = m->at[r]; spdl_sampler_item(m->s[r], 3, i, &it) == SPDL_OK; ++i) {
            CHECK(i == m->at[r] || it.position > last);
            last = it.position;
        }
    }
}

/* What a position says of a sampler from an epoch on; returns its length. */
static int describe(const spdl_sampler *s, uint64_t epoch, char text[SPDL_STATE_BYTES]) {
    spdl__line line;
    line.length = 0;
    line.full = false;
    spdl__sampler_describe(s, epoch, &line);
    CHECK(!line.full && line.text[0] == ' ');
    memcpy(text, line.text + 1, line.length - 1);
    text[line.length - 1] = '\0';
    return (int)line.length - 1;
}

static void run_move(run_model *m, int world) {
    char text[16][1024];
    uint64_t done[16];
    spdl_error error;
    uint64_t in_hand[16], local;
    const int before = m->world;
    for (int r = 0; r < before; ++r) {
        const int length = describe(m->s[r], 3, text[r]);
        if (length > m->most_text) m->most_text = length;
        CHECK(length < 1024);
        done[r] = m->at[r];
        in_hand[r] = spdl__sampler_global(m->s[r], 3, m->at[r]);
        if (in_hand[r] != SPDL__NEVER) /* asked of any rank */
            CHECK_EQ(spdl__sampler_dealt(m->s[before - 1], 3, (uint64_t)r, (uint64_t)before,
                                         m->at[r]), in_hand[r]);
        if (r < before - 1) spdl_sampler_destroy(m->s[r]);
    }
    spdl_sampler_destroy(m->s[before - 1]);
    run_start(m, world);
    for (int r = 0; r < world; ++r) {
        CHECK_EQ(spdl__sampler_differs(m->s[r], text[r % before], &error), SPDL_OK);
        CHECK_EQ(spdl__sampler_adopt(m->s[r], text[r % before], &error), SPDL_OK);
        if (!CHECK_EQ(spdl__sampler_resume(m->s[r], 3, done, before, &error), SPDL_OK))
            fprintf(stderr, "%s\n", error.text);
    }
    for (int r = 0; r < before; ++r) { /* what was in hand is one rank's now, and only one's */
        int owners = 0;
        for (int w = 0; in_hand[r] != SPDL__NEVER && w < world; ++w)
            if (spdl__sampler_mine(m->s[w], 3, in_hand[r], &local)) {
                ++owners;
                const uint64_t at = spdl__sampler_global(m->s[w], 3, local);
                CHECK(at == in_hand[r] || at == SPDL__NEVER); /* never: dropped now */
            }
        CHECK_EQ(owners, in_hand[r] != SPDL__NEVER);
    }
}

static void run_finish(run_model *m) {
    long left = 0;
    for (int r = 0; r < m->world; ++r) run_take(m, r, UINT64_MAX);
    for (uint64_t p = 0; p < m->count; ++p) left += !m->had[p];
    CHECK_EQ(m->delivered + left, m->count);
    CHECK(m->tail == SPDL_TAIL_DROP ? left < m->world : left == 0);
    for (int r = 0; r < m->world; ++r) spdl_sampler_destroy(m->s[r]);
    spdl_sampler_destroy(m->one);
    spdl_mixture_destroy(m->mixture);
    free(m->had);
}

static void run_begin(run_model *m, uint64_t count, spdl_tail tail, int world, bool mixed) {
    memset(m, 0, sizeof *m);
    m->count = count;
    m->tail = tail;
    if (mixed) {
        m->one = SAMPLER(.count = 10);
        m->mixture = MIXTURE(WEIGHTS(1));
    }
    m->had = (bool *)calloc(count + 1, 1);
    run_start(m, world);
}

/* From any number of ranks to any other, three times in an epoch: nothing lost, nothing twice. */
static void nothing_is_lost_between_worlds(void) {
    uint64_t random = test_seed();
    for (int from = 1; from <= 16; ++from)
        for (int to = 1; to <= 16; ++to)
            for (int how = 0; how < 8; ++how) {
                run_model m;
                run_begin(&m, 1 + test_random(&random) % 200,
                          how % 2 ? SPDL_TAIL_DROP : SPDL_TAIL_KEEP, from, how >= 4);
                for (int moves = 0; moves < 3; ++moves) {
                    const uint64_t level = test_random(&random) % 8;
                    for (int r = 0; r < m.world; ++r)
                        run_take(&m, r, how % 4 < 2 ? level : test_random(&random) %
                                                              (how % 4 == 2 ? 4 : 20));
                    run_move(&m, moves % 2 ? from : to);
                    check_ascending(&m);
                }
                run_finish(&m);
            }
}

/* Ranks that are level, a batch that all their numbers divide: the batches are the same. */
static void level_ranks_keep_the_order(void) {
    for (int tail = 0; tail < 3; ++tail)
        for (int from = 1; from <= 12; ++from)
            for (int to = 1; to <= 12; ++to) {
                uint64_t done[12];
                spdl_sampler *s[12], *one = SHUFFLED(.count = 1000, .seed = 1);
                spdl_error error;
                for (int r = 0; r < from; ++r) done[r] = (uint64_t)(360 / from);
                if (360 % from) goto next;
                for (int r = 0; r < to; ++r) {
                    s[r] = SHUFFLED(.count = 1000, .seed = 1, .ranks = { r, to },
                                    .tail = (spdl_tail)tail);
                    CHECK_EQ(spdl__sampler_resume(s[r], 0, done, from, &error), SPDL_OK);
                    CHECK(s[r]->edits <= 1 && (s[r]->edits == 0 || s[r]->edit[0].world == 0));
                }
                for (uint64_t n = 360; n < 1000 + (tail == SPDL_TAIL_PAD ? (uint64_t)to : 0); ++n) {
                    const uint64_t r = (n - 360) % (uint64_t)to, k = (n - 360) / (uint64_t)to;
                    spdl_index it;
                    if (spdl_sampler_item(s[r], 0, k, &it) == SPDL_OK)
                        CHECK_EQ(it.index, index_at(one, 0, n % 1000));
                    else CHECK(tail == SPDL_TAIL_DROP ? n >= 1000 - (uint64_t)to
                                                      : n >= 1000);
                }
                for (int r = 0; r < to; ++r) {
                    CHECK(spdl_sampler_length(s[r], 1) >= 1000 / (uint64_t)to); /* all again */
                    spdl_sampler_destroy(s[r]);
                }
            next:
                spdl_sampler_destroy(one);
            }
}

/* One rank is far ahead: the text stays short, and goes on being when all have passed it. */
static void texts_of_what_is_left_stay_short(void) {
    run_model m;
    run_begin(&m, 100000, SPDL_TAIL_KEEP, 16, false);
    for (int move = 0; move < 12; ++move) {
        for (int r = 0; r < m.world; ++r) run_take(&m, r, (uint64_t)(20 + r % 3 * (move % 5)));
        run_move(&m, 1 + (move * 5 + 3) % 16);
    }
    CHECK(m.most_text < 400);
    run_finish(&m);
}

/* One that would be too long is not written beyond its end, and says that it is not whole. */
static void a_text_that_does_not_fit_says_so(void) {
    const uint64_t half = (uint64_t)1 << 62;
    spdl_sampler *s = SAMPLER(.count = 2 * half);
    spdl__line line;
    for (uint64_t e = 0; e < 16; ++e)
        CHECK_EQ(spdl_sampler_skip(s, UINT64_MAX - e, half, 2 * half - e), SPDL_OK);
    line.length = 0;
    line.full = false;
    spdl__sampler_describe(s, 0, &line);
    CHECK(line.full && line.length < SPDL_STATE_BYTES);
    spdl_sampler_destroy(s);
}

/* What the skip of a loss spike says is kept by a run that goes on. */
static void skips_go_on_with_a_run(void) {
    spdl_sampler *a = SAMPLER(.count = 40), *b = SAMPLER(.count = 40, .ranks = { 0, 2 });
    const uint64_t had = 5;
    char text[1024];
    spdl_error error;
    spdl_ranks ranks;
    CHECK_EQ(spdl_sampler_skip(a, 0, 1, 3), SPDL_OK); /* gone on with at 7 */
    CHECK_EQ(spdl_sampler_skip(a, 0, 10, 30), SPDL_OK);
    CHECK_EQ(spdl_sampler_skip(a, 1, 0, 38), SPDL_OK);
    CHECK(describe(a, 0, text) < 1024);
    CHECK(spdl__sampler_rank_of(text, &ranks) && ranks.rank == 0 && ranks.world == 1);
    CHECK_EQ(spdl__sampler_adopt(b, text, &error), SPDL_OK);
    CHECK_EQ(spdl__sampler_resume(b, 0, &had, 1, &error), SPDL_OK);
    CHECK_STR(epoch_text(b, 0), "7 9 31 33 35 37 39");
    CHECK_STR(epoch_text(b, 1), "38");
    CHECK_EQ(spdl__sampler_resume(b, 1, &had, 1, &error), SPDL_OK);
    CHECK_STR(epoch_text(b, 1), "");
    CHECK_EQ(b->edits, 1);
    spdl_sampler_destroy(a);
    spdl_sampler_destroy(b);
}

static void check_differs(const char *text, spdl_sampler *s, const char *why) {
    spdl_error error;
    CHECK(spdl__sampler_differs(s, text, &error) < 0);
    CHECK_STR(error.text, why);
}

static void another_run_is_told_from_ours(void) {
    static const double w[] = { 1, 2, 3 }, v[] = { 1, 2, 4 };
    char text[1024], line[1200];
    spdl_error error;
    spdl_sampler *s = SHUFFLED(.count = 10, .seed = 4, .data_hash = 0xabc);
    spdl_sampler *other = SHUFFLED(.count = 11, .seed = 4, .data_hash = 0xabc);
    spdl_sampler *data = SHUFFLED(.count = 10, .seed = 4);
    spdl_sampler *order = SAMPLER(.count = 10, .seed = 4);
    spdl_sampler *one = SAMPLER(.order = SPDL_SAMPLE_WEIGHTED, .count = 3, .weights = w);
    spdl_sampler *two = SAMPLER(.order = SPDL_SAMPLE_WEIGHTED, .count = 3, .weights = v);
    const int length = describe(s, 0, text);
    CHECK_EQ(length, strlen(text));
    CHECK_STR(text, "order=shuffled count=10 draws=10 seed=4 tail=keep data=0000000000000abc "
                    "spec=0000000000000000 rank=0/1");
    snprintf(line, sizeof line, "spdl.state.1 epoch=3 %s crc=77\n", text);
    CHECK_EQ(spdl__sampler_differs(s, line, &error), SPDL_OK);
    check_differs(line, other, "count of the sampler is 11, that of the saved run was 10");
    check_differs(line, data, "data of the sampler is 0000000000000000, that of the saved run was "
                              "0000000000000abc: it is another data set");
    check_differs(line, order, "order of the sampler is sequential, that of the saved run was "
                               "shuffled");
    check_differs("spdl.state.1 order=shuffled count=10", s,
                  "it says nothing of the sampler's draws");
    check_differs("", s, "it says nothing of the sampler's order");
    CHECK(describe(one, 0, text) > 0);
    CHECK(spdl__sampler_differs(two, text, &error) == SPDL_E_INVALID);
    CHECK(strncmp(error.text, "spec of the sampler is ", 23) == 0);
    CHECK(strstr(error.text, ": weights, blocks or mixture differ") != NULL);
    spdl_sampler_destroy(s), spdl_sampler_destroy(other), spdl_sampler_destroy(data);
    spdl_sampler_destroy(order), spdl_sampler_destroy(one), spdl_sampler_destroy(two);
}

/* One of a mixture of two samplers: of what differs all is in the text. */
static void describe_mixed(int which, char text[1024]) {
    static const double w[] = { 1, 2 }, v[] = { 1, 3 };
    const spdl_mixture_change change = { 50, which == 1 ? v : w };
    const spdl_sampler_order order = which == 2 ? SPDL_SAMPLE_SEQUENTIAL : SPDL_SAMPLE_SHUFFLED;
    spdl_mixture *m = MIXTURE(.weights = v, .sources = 2, .changes = &change, .change_count = 1);
    spdl_sampler *part[] = { SAMPLER(.order = order, .draws = 4, .count = which == 2 ? 5 : 4),
                             SAMPLER(.order = SPDL_SAMPLE_BLOCKS, .count = 9, .block = 3,
                                     .shuffle_inside = which == 3) };
    spdl_sampler *s = SAMPLER(.order = SPDL_SAMPLE_MIXTURE, .mixture = m, .samplers = part,
                              .draws = 100);
    CHECK(describe(s, 0, text) > 0);
    spdl_sampler_destroy(s), spdl_sampler_destroy(part[0]), spdl_sampler_destroy(part[1]);
    spdl_mixture_destroy(m);
}

static void other_parts_of_a_mixture_are_told(void) {
    char text[2][1024];
    describe_mixed(0, text[0]);
    for (int which = 0; which < 4; ++which) {
        describe_mixed(which, text[1]);
        CHECK((strcmp(text[0], text[1]) == 0) == (which == 0));
    }
}

static void texts_that_make_no_sense_are_refused(void) {
    static const char *const bad[] = {
        "left=", "left=x", "left=1", "left=1:", "left=1:5", "left=1:5+", "left=1:5+3,",
        "left=1:5+3x", "left=1:0/1", "left=1:2/1", "left=1:2/1.", "left=1:2/1.1.1", "left=1:2/1*3",
        "left=1:2/1*0",
        "left=1:2/1*", "left=1:99999999/1", "left=1:2/99.1", "left=1:500+1", "left=1:1+99999999999",
        "left=99999999999999999999999:1+1", "left=1:2/1.-1", "left=1:2/0*2/3",
    };
    spdl_sampler *s = SAMPLER(.count = 100);
    spdl_error error;
    spdl_ranks ranks;
    char text[1024];
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; ++i)
        if (!CHECK(spdl__sampler_adopt(s, bad[i], &error) == SPDL_E_FORMAT))
            fprintf(stderr, "%s\n", bad[i]);
    CHECK_STR(error.text, "spdl: state: what it says is left (left=) makes no sense");
    CHECK_EQ(spdl__sampler_adopt(s, "a left=1:4/1.0*2.3,1:5+2,2:0+1 b", &error), SPDL_OK);
    CHECK(describe(s, 0, text) > 0);
    CHECK_STR(strstr(text, " left="), " left=1:4/1.0*2.3,1:5+2,2:0+1");
    CHECK_EQ(spdl__sampler_adopt(s, "nothing of it", &error), SPDL_OK);
    CHECK_EQ(s->edits, 0);
    CHECK(!spdl__sampler_rank_of("rank=2/2", &ranks) && !spdl__sampler_rank_of("rank=", &ranks));
    CHECK(!spdl__sampler_rank_of("", &ranks) && !spdl__sampler_rank_of("xrank=0/2", &ranks));
    const uint64_t had[2] = { 1, 60 };
    CHECK_EQ(spdl__sampler_resume(s, 0, had, 2, &error), SPDL_E_INVALID);
    CHECK_STR(error.text, "spdl: state: rank 1 of 2 has had 60 items of an epoch of 100");
    spdl_sampler_destroy(s);
}

/* 1,000 ranks, and data that would not fit any memory. */
static void a_thousand_ranks_cost_nothing(void) {
    static uint64_t level[1000], ahead[1000];
    spdl_error error;
    char text[1024];
    const uint64_t count = (uint64_t)1 << 50;
    for (int r = 0; r < 1000; ++r) {
        level[r] = (uint64_t)1 << 30;
        ahead[r] = level[r] + (r < 400);
    }
    for (int r = 0; r < 1000; ++r) {
        spdl_sampler *s = SHUFFLED(.count = count, .ranks = { r, 1000 });
        spdl_index it;
        CHECK_EQ(spdl__sampler_resume(s, 0, r % 2 ? level : ahead, 1000, &error), SPDL_OK);
        CHECK(s->edits == 1 && s->edit[0].done == NULL && s->helds == 0); /* no memory */
        CHECK_EQ(spdl_sampler_item(s, 0, 0, &it), SPDL_OK);
        CHECK_EQ(it.position, level[0] * 1000 + (uint64_t)(r % 2 ? 0 : 400) + (uint64_t)r);
        CHECK(describe(s, 0, text) < 250);
        spdl_sampler_destroy(s);
    }
}

/* A hash that is the same on every machine, and changes with every byte. */
static void hashes_tell_bytes_apart(void) {
    char text[40] = "shard-000.tar";
    const uint64_t hash = spdl_hash(0, text, 13);
    CHECK(hash == 0xc139639a7ff9f963u);
    for (int i = 0; i < 13 * 8; ++i) {
        text[i / 8] = (char)(text[i / 8] ^ 1 << i % 8);
        CHECK(spdl_hash(0, text, 13) != hash);
        text[i / 8] = (char)(text[i / 8] ^ 1 << i % 8);
    }
    CHECK(spdl_hash(0, text, 14) != hash && spdl_hash(1, text, 13) != hash);
    CHECK(spdl_hash(0, "", 0) != spdl_hash(0, "\0", 1) && spdl_hash(0, NULL, 0) != 0);
}

/* --- mixtures --- */

/* The sources at the first positions, and the number of each item where there is place. */
static const char *mixed_text(const spdl_mixture *m, uint64_t first, uint64_t count) {
    static notes n;
    uint32_t source = 0;
    uint64_t index;
    n.length = 0;
    n.text[0] = '\0';
    for (uint64_t p = first; p < first + count; ++p) {
        if (spdl_mixture_at(m, p, &source, &index) != SPDL_OK) break;
        note(&n, p > first ? " %ld" : "%ld", (long)source);
    }
    return n.text;
}

/* The farthest any source is off its share, after any number of positions up to `most`; each one's
   items come in order. */
static double farthest_off(const spdl_mixture *m, const double *w, uint32_t n, uint64_t most) {
    static uint64_t had[65536];
    double worst = 0, sum = 0;
    memset(had, 0, sizeof had);
    for (uint32_t i = 0; i < n; ++i) sum += w[i];
    for (uint64_t p = 0; p < most; ++p) {
        uint32_t source = n;
        uint64_t index = 0;
        REQUIRE(spdl_mixture_at(m, p, &source, &index) == SPDL_OK);
        REQUIRE(source < n && index == had[source]);
        ++had[source];
        for (uint32_t k = n < 64 ? 0 : source; k < (n < 64 ? n : source + 1); ++k) {
            const double off = fabs((double)had[k] - w[k] / sum * (double)(p + 1));
            if (off > worst) worst = off;
        }
    }
    for (uint32_t k = 0; k < n; ++k) {
        const double off = fabs((double)had[k] - w[k] / sum * (double)most);
        if (off > worst) worst = off;
    }
    return worst;
}

static double weight_like(int kind, uint32_t i, uint64_t *random) {
    const double u = (double)(test_random(random) >> 11) * 0x1p-53 + 1e-9;
    switch (kind) {
    case 0: return u;
    case 1: return pow(10, 3 * u);
    case 2: return (double)(1 + test_random(random) % 4);
    case 3: return pow(2, -(double)(i % 60));
    case 4: return i % 3 ? 1 : 1e-4 * u;
    case 5: return 1.0 / (i + 1);
    case 6: return pow(10, 9 * u);
    default: return i % 5 == 1 ? 0 : 1 + u;
    }
}

static void nobody_is_far_off_his_share(void) {
    static double w[65536];
    uint64_t random = test_seed();
    double worst = 0, most = 0, off;
    long within = 0, tried = 0;
    for (int round = 0; round < (TEST_SANITIZED ? 60 : 400); ++round) {
        const uint32_t n = 1 + (uint32_t)(test_random(&random) % (round % 10 ? 12 : 200));
        for (uint32_t i = 0; i < n; ++i) w[i] = weight_like(round % 8, i, &random);
        spdl_mixture *m = MIXTURE(.weights = w, .sources = n);
        off = farthest_off(m, w, n, n < 64 ? 5000 : 20000);
        CHECK(off <= spdl_mixture_error(m) + 1e-9);
        if (n <= 4) CHECK(spdl_mixture_error(m) <= 1 + 1e-6);
        CHECK(spdl_mixture_error(m) < 1.7);
        if (n <= 8) ++tried, within += spdl_mixture_error(m) <= 1 + 1e-6;
        if (off > worst) worst = off;
        if (spdl_mixture_error(m) > most) most = spdl_mixture_error(m);
        spdl_mixture_destroy(m);
    }
    printf("off by %.3f at most, %.3f by proof; by 1 or less %ld of %ld with up to 8 weights\n",
           worst, most, within, tried);
}

static void any_ratio_is_kept(void) {
    static const double a[] = { 1e6, 1 }, b[] = { 0.001, 0.999 }, c[] = { 1e308, 5e-324 },
                        d[] = { 1e308, 1e308, 1e308 }, e[] = { 5e-324, 1e-323 };
    spdl_mixture *m = MIXTURE(.weights = a, .sources = 2);
    uint32_t source;
    uint64_t index;
    CHECK(farthest_off(m, a, 2, 2000000) <= 0.5 + 1e-9);
    for (uint64_t k = 1; k < 1000000; k *= 10) { /* the small one's item k, anywhere */
        long found = 0;
        for (uint64_t p = k * 1000001 - 500002; p < k * 1000001 - 499998; ++p) {
            CHECK_EQ(spdl_mixture_at(m, p, &source, &index), SPDL_OK);
            if (source == 1) ++found, CHECK_EQ(index, k - 1);
        }
        CHECK_EQ(found, 1);
    }
    spdl_mixture_destroy(m);
    m = MIXTURE(.weights = b, .sources = 2);
    CHECK(farthest_off(m, b, 2, 100000) <= 0.5 + 1e-9);
    spdl_mixture_destroy(m);
    m = MIXTURE(.weights = c, .sources = 2);
    CHECK_STR(mixed_text(m, 0, 5), "0 0 0 0 0");
    CHECK_STR(mixed_text(m, SPDL__MOST - 3, 5), "0 0 0");
    CHECK_EQ(spdl_mixture_length(m), SPDL__MOST);
    spdl_mixture_destroy(m);
    m = MIXTURE(.weights = d, .sources = 3);
    CHECK_STR(mixed_text(m, 0, 7), "0 1 2 0 1 2 0");
    spdl_mixture_destroy(m);
    m = MIXTURE(.weights = e, .sources = 2);
    CHECK_STR(mixed_text(m, 0, 6), "1 0 1 1 0 1");
    spdl_mixture_destroy(m);
    m = MIXTURE(WEIGHTS(0, 3, 0, 1));
    CHECK_STR(mixed_text(m, 0, 8), "1 3 1 1 1 3 1 1");
    spdl_mixture_destroy(m);
    m = MIXTURE(WEIGHTS(7));
    CHECK_STR(mixed_text(m, 5, 3), "0 0 0");
    CHECK_EQ(spdl_mixture_error(m), 0);
    spdl_mixture_destroy(m);
}

static void sixty_five_thousand_sources_are_mixed(void) {
    static double w[65536];
    uint64_t random = test_seed();
    for (int kind = 0; kind < 3; ++kind) {
        for (uint32_t i = 0; i < 65536; ++i) w[i] = kind == 0 ? 1 : weight_like(kind, i, &random);
        spdl_mixture *m = MIXTURE(.weights = w, .sources = 65536);
        const double off = farthest_off(m, w, 65536, 200000);
        CHECK(off <= spdl_mixture_error(m) + 1e-9 && spdl_mixture_error(m) < 1.7);
        CHECK(kind == 1 || spdl_mixture_error(m) < 1.3);
        spdl_mixture_destroy(m);
    }
}

/* Far out, as near the beginning. */
static void positions_are_asked_for_in_any_order(void) {
    uint64_t random = test_seed();
    spdl_mixture *m = MIXTURE(WEIGHTS(0.31, 7, 0.02, 1.5, 2, 2, 2));
    for (int i = 0; i < 200; ++i) {
        const uint64_t first = test_random(&random) >> (2 + i % 50);
        uint64_t next[7], index;
        uint32_t source;
        memset(next, 0xff, sizeof next);
        for (uint64_t p = first; p < first + 300; ++p) {
            REQUIRE(spdl_mixture_at(m, p, &source, &index) == SPDL_OK);
            CHECK(next[source] == UINT64_MAX || next[source] == index);
            next[source] = index + 1;
        }
        if (first > 1000)
            CHECK(fabs((double)next[1] / (7 / 14.83) / ((double)first + 300) - 1) < 0.02);
    }
    spdl_mixture_destroy(m);
}

static void sources_end_as_they_are_told(void) {
    spdl_mixture *m = MIXTURE(WEIGHTS(1, 1), LENGTHS(2, 9));
    CHECK_EQ(spdl_mixture_length(m), 4);
    CHECK_STR(mixed_text(m, 0, 9), "0 1 0 1");
    spdl_mixture_destroy(m);
    m = MIXTURE(WEIGHTS(1, 1), LENGTHS(9, 0));
    CHECK_STR(mixed_text(m, 0, 9), "0");
    spdl_mixture_destroy(m);
    m = MIXTURE(WEIGHTS(1, 1, 0), LENGTHS(2, 4, 7), .at_end = SPDL_MIXTURE_GO_ON);
    CHECK_STR(mixed_text(m, 0, 9), "0 1 0 1 1 1");
    spdl_mixture_destroy(m);
    m = MIXTURE(WEIGHTS(4, 2, 1), LENGTHS(8, 100, 100), .at_end = SPDL_MIXTURE_GO_ON);
    CHECK_EQ(spdl_mixture_length(m), 208); /* the rest keep their ratio, 2 to 1 */
    const char *text = mixed_text(m, 14, 12);
    long ones = 0;
    for (; *text; ++text) ones += *text == '1';
    CHECK_EQ(ones, 8);
    spdl_mixture_destroy(m);
    m = MIXTURE(WEIGHTS(1, 1), LENGTHS(2, 3), .at_end = SPDL_MIXTURE_REPEAT);
    CHECK_EQ(spdl_mixture_length(m), SPDL__MOST);
    uint32_t source;
    uint64_t index;
    for (uint64_t p = 0; p < 30; ++p) {
        CHECK_EQ(spdl_mixture_at(m, p, &source, &index), SPDL_OK);
        CHECK_EQ(source, p % 2);
        CHECK_EQ(index, p / 2 % (source + 2));
    }
    spdl_mixture_destroy(m);
}

/* All items of all sources, each once. */
static void going_on_leaves_nothing_over(void) {
    uint64_t random = test_seed();
    for (int round = 0; round < 24; ++round) {
        double w[30];
        uint64_t length[30], had[30] = { 0 }, sum = 0;
        const uint32_t n = 1 + (uint32_t)(test_random(&random) % 30);
        for (uint32_t i = 0; i < n; ++i) {
            w[i] = weight_like(round % 8, i, &random);
            length[i] = test_random(&random) % 50;
            if (w[i] * 1e12 > 1) sum += length[i];
            else w[i] = 0;
        }
        if (n == 1) w[0] = 1;
        spdl_mixture_desc desc = { .weights = w, .sources = n, .lengths = length,
                                   .at_end = SPDL_MIXTURE_GO_ON };
        spdl_mixture *m = mixture_of(desc, __FILE__, __LINE__);
        for (uint64_t p = 0; p < spdl_mixture_length(m); ++p) {
            uint32_t source;
            uint64_t index;
            REQUIRE(spdl_mixture_at(m, p, &source, &index) == SPDL_OK);
            CHECK_EQ(index, had[source]);
            ++had[source];
        }
        CHECK(n == 1 || spdl_mixture_length(m) == sum);
        for (uint32_t i = 0; i < n; ++i) CHECK_EQ(had[i], w[i] > 0 ? length[i] : 0);
        spdl_mixture_destroy(m);
    }
}

static void weights_change_at_positions(void) {
    static const double first[] = { 1, 0 }, second[] = { 1, 1 }, third[] = { 0, 1 };
    static const spdl_mixture_change changes[] = { { 4, second }, { 10, third } };
    spdl_mixture *m = MIXTURE(.weights = first, .sources = 2, .changes = changes,
                              .change_count = 2);
    uint32_t source;
    uint64_t index;
    CHECK_STR(mixed_text(m, 0, 14), "0 0 0 0 1 0 1 0 1 0 1 1 1 1"); /* who had less begins */
    CHECK_EQ(spdl_mixture_at(m, 1000, &source, &index), SPDL_OK);
    CHECK_EQ(index, 993);
    spdl_mixture_destroy(m);
    m = MIXTURE(.weights = first, .sources = 2, .changes = changes, .change_count = 2,
                LENGTHS(6, 5), .at_end = SPDL_MIXTURE_GO_ON);
    CHECK_STR(mixed_text(m, 0, 14), "0 0 0 0 1 0 1 0 1 1 1");
    spdl_mixture_destroy(m);
}

static void mixture_refused(const char *text, spdl_mixture_desc desc) {
    spdl_mixture *m = (spdl_mixture *)&desc;
    spdl_error error;
    desc.error = &error;
    CHECK_EQ(spdl_mixture_create(&m, &desc), SPDL_E_INVALID);
    CHECK(m == NULL);
    CHECK_STR(error.text, text);
}

static void mixtures_that_make_no_sense_are_refused(void) {
    static const double one[] = { 1, 1 }, none[] = { 0, 0 };
    static const spdl_mixture_change twice[] = { { 4, one }, { 4, one } }, zero[] = { { 4, none } };
    static const uint64_t lengths[] = { 1, 0 };
    mixture_refused("spdl: mixture: sources is 0, must be from 1 to 65536",
                    (spdl_mixture_desc){ .weights = one });
    mixture_refused("spdl: mixture: sources is 65537, must be from 1 to 65536",
                    (spdl_mixture_desc){ .sources = 65537 });
    mixture_refused("spdl: mixture: weights is NULL", (spdl_mixture_desc){ .sources = 2 });
    mixture_refused("spdl: mixture: the sum of weights is 0",
                    (spdl_mixture_desc){ .sources = 2, .weights = none });
    mixture_refused("spdl: mixture: weights[1] is -1, must be a number that is not negative",
                    (spdl_mixture_desc){ WEIGHTS(1, -1) });
    mixture_refused("spdl: mixture: weights[0] is nan, must be a number that is not negative",
                    (spdl_mixture_desc){ WEIGHTS(NAN, 1) });
    mixture_refused("spdl: mixture: at_end is 7", (spdl_mixture_desc){
                        WEIGHTS(1), .at_end = (spdl_mixture_end)7 });
    mixture_refused("spdl: mixture: changes[1] is not after the one before it", (spdl_mixture_desc){
                        WEIGHTS(1, 2), .changes = twice, .change_count = 2 });
    mixture_refused("spdl: mixture: changes is NULL", (spdl_mixture_desc){
                        WEIGHTS(1, 2), .change_count = 1 });
    mixture_refused("spdl: mixture: changes: the sum of weights is 0", (spdl_mixture_desc){
                        WEIGHTS(1, 2), .changes = zero, .change_count = 1 });
    mixture_refused("spdl: mixture: lengths[1] is 0", (spdl_mixture_desc){
                        WEIGHTS(1, 2), .lengths = lengths, .at_end = SPDL_MIXTURE_REPEAT });
    CHECK_EQ(spdl_mixture_create(NULL, NULL), SPDL_E_INVALID);
}

/* Pipelines take the same order from sources of the same weight, also where some of them end. */
static void a_merge_of_equal_weights_is_the_same(void) {
    uint64_t random = test_seed();
    for (int round = 0; round < 12; ++round) {
        uint64_t length[3];
        char expected[2000];
        size_t at = 0;
        uint32_t source;
        uint64_t index;
        for (int i = 0; i < 3; ++i) length[i] = test_random(&random) % 12;
        spdl_mixture *m = MIXTURE(WEIGHTS(1, 1, 1), .lengths = length,
                                  .at_end = SPDL_MIXTURE_GO_ON);
        expected[0] = '\0';
        for (uint64_t p = 0; spdl_mixture_at(m, p, &source, &index) == SPDL_OK; ++p)
            at += (size_t)sprintf(expected + at, p ? " %d" : "%d", (int)(100 * source + index));
        RUN(START(crowds[round % CROWDS], SPDL_PATH("a", .weight = 2),
                  SPDL_SOURCE(count_up, SCRIPT(.count = (long)length[0]), .free_item = item_free),
                  SPDL_PATH("b", .weight = 2),
                  SPDL_SOURCE(count_up, SCRIPT(.count = (long)length[1]), .free_item = item_free),
                  FOLLOW(.plus = 100), SPDL_PATH("c", .weight = 2),
                  SPDL_SOURCE(count_up, SCRIPT(.count = (long)length[2]), .free_item = item_free),
                  FOLLOW(.plus = 200), SPDL_MERGE(.merge_order = SPDL_MERGE_WEIGHTED),
                  SPDL_SINK(1)),
            expected, SPDL_END);
        spdl_mixture_destroy(m);
    }
}

/* Three data sets in a pipeline: each pass through one is an order of its own. */
static void samplers_are_mixed(void) {
    static const double w[] = { 5, 2, 1 };
    spdl_mixture *m = MIXTURE(.weights = w, .sources = 3);
    for (int i = 0; i < CROWDS; ++i) {
        spdl_sampler *of[] = { SHUFFLED(.count = 40, .seed = 1), SHUFFLED(.count = 30, .seed = 2),
                               SAMPLER(.count = 7) };
        spdl_sampler *s = SAMPLER(.order = SPDL_SAMPLE_MIXTURE, .mixture = m, .samplers = of,
                                  .draws = 500, .ranks = { i % 2, 2 });
        spdl_pipeline *p = START(crowds[i], SPDL_INDEX(s, .continuous = true),
                                 SPDL_PIPE(look_up, .concurrency = 3), SPDL_SINK(3));
        uint64_t k = 0;
        for (uint64_t epoch = 0; epoch < 3; ++epoch) {
            k = 0;
            for (void *v = NULL; spdl_pipeline_next(p, &v, SPDL_SECONDS(15)) == SPDL_OK; ++k) {
                const spdl_index *it = (const spdl_index *)v;
                const uint64_t position = it->position, all = epoch * 500 + position;
                uint32_t source = 9;
                uint64_t index = 0;
                CHECK_EQ(spdl_mixture_at(m, all, &source, &index), SPDL_OK);
                CHECK_EQ(it->position / 2, k);
                CHECK_EQ(it->epoch, epoch);
                CHECK_EQ(it->source, source);
                spdl_sampler *fresh = source == 2 ? SAMPLER(.count = 7)
                                                  : SHUFFLED(.count = 40 - 10 * source,
                                                             .seed = source + 1);
                const uint64_t length = spdl_sampler_length(fresh, 0);
                CHECK_EQ(it->index, index_at(fresh, index / length, index % length));
                spdl_sampler_destroy(fresh);
                spdl_buffer_free(v);
            }
            CHECK_EQ(k, 250);
        }
        spdl_pipeline_destroy(p);
        spdl_sampler_destroy(s);
        for (int j = 0; j < 3; ++j) spdl_sampler_destroy(of[j]);
    }
    spdl_mixture_destroy(m);
}

/* Two sources of the same weight on two ranks, four on four: nobody has one of them alone; and a
   run that goes on on as many ranks goes on as it would have. */
static void ranks_share_each_source(void) {
    spdl_sampler *of[4], *s[4], *on[4];
    uint64_t had[4];
    spdl_error error;
    for (int i = 0; i < 4; ++i) of[i] = SHUFFLED(.count = 100, .seed = (uint64_t)i);
    spdl_mixture *m = MIXTURE(WEIGHTS(1, 1, 1, 1));
    for (int world = 2; world <= 4; world += 2) {
        bool seen[4000] = { false };
        for (int r = 0; r < world; ++r) {
            long found[4] = { 0 };
            s[r] = SAMPLER(.order = SPDL_SAMPLE_MIXTURE, .mixture = m, .samplers = of,
                           .draws = 4000, .ranks = { r, world });
            for (uint64_t k = 0; k < 4000 / (uint64_t)world; ++k) {
                spdl_index it;
                CHECK_EQ(spdl_sampler_item(s[r], 1, k, &it), SPDL_OK);
                CHECK(!seen[it.position] && it.position / (uint64_t)world == k);
                seen[it.position] = true;
                ++found[it.source];
            }
            for (int i = 0; i < 4; ++i) CHECK(fabs((double)found[i] - 1000.0 / world) < 100);
            had[r] = 37;
        }
        for (int r = 0; r < world; ++r) {
            on[r] = SAMPLER(.order = SPDL_SAMPLE_MIXTURE, .mixture = m, .samplers = of,
                            .draws = 4000, .ranks = { r, world });
            CHECK_EQ(spdl__sampler_resume(on[r], 1, had, world, &error), SPDL_OK);
            for (uint64_t k = 37; k < 4000 / (uint64_t)world; ++k)
                CHECK_EQ(spdl__sampler_global(on[r], 1, k - 37), spdl__sampler_global(s[r], 1, k));
        }
        for (int r = 0; r < world; ++r) spdl_sampler_destroy(s[r]), spdl_sampler_destroy(on[r]);
    }
    spdl_mixture_destroy(m);
    for (int i = 0; i < 4; ++i) spdl_sampler_destroy(of[i]);
}

static void mixtures_with_lengths_start_over_each_epoch(void) {
    spdl_sampler *of[] = { SHUFFLED(.count = 6, .seed = 1), SHUFFLED(.count = 3, .seed = 2) };
    spdl_mixture *m = MIXTURE(WEIGHTS(1, 1), LENGTHS(6, 3), .at_end = SPDL_MIXTURE_GO_ON);
    spdl_sampler *s = SAMPLER(.order = SPDL_SAMPLE_MIXTURE, .mixture = m, .samplers = of);
    for (uint64_t epoch = 0; epoch < 3; ++epoch) {
        uint64_t at[2] = { 0, 0 };
        CHECK_EQ(spdl_sampler_length(s, epoch), 9);
        for (uint64_t p = 0; p < 9; ++p) {
            spdl_index it;
            CHECK_EQ(spdl_sampler_item(s, epoch, p, &it), SPDL_OK);
            CHECK_EQ(it.index, index_at(of[it.source], epoch, at[it.source]));
            ++at[it.source];
        }
        CHECK(at[0] == 6 && at[1] == 3);
    }
    spdl_sampler_destroy(s);
    spdl_mixture_destroy(m);
    m = MIXTURE(WEIGHTS(1, 1), LENGTHS(6, 4));
    REFUSED("spdl: sampler: samplers[1] has another length than its source in the mixture",
            .order = SPDL_SAMPLE_MIXTURE, .mixture = m, .samplers = of);
    spdl_mixture_destroy(m);
    m = MIXTURE(WEIGHTS(1, 1));
    spdl_sampler *ranked[] = { of[0], SAMPLER(.count = 3, .ranks = { 0, 2 }) };
    REFUSED("spdl: sampler: draws is 0, but the mixture does not end",
            .order = SPDL_SAMPLE_MIXTURE, .mixture = m, .samplers = of);
    REFUSED("spdl: sampler: samplers[1] has ranks of its own; give them to the one of the mixture",
            .order = SPDL_SAMPLE_MIXTURE, .mixture = m, .samplers = ranked, .draws = 1);
    spdl_mixture_destroy(m);
    spdl_sampler_destroy(ranked[1]);
    spdl_sampler_destroy(of[0]), spdl_sampler_destroy(of[1]);
}

/* --- memory --- */

static long blocks_alive, blocks_until_none;

static void *meagre_alloc(size_t bytes, size_t align, void *user) {
    void *memory = NULL;
    (void)user;
    if (blocks_until_none-- == 0 || posix_memalign(&memory, align < 8 ? 8 : align, bytes))
        return NULL;
    ++blocks_alive;
    return memory;
}

static void meagre_free(void *memory, size_t bytes, void *user) {
    (void)bytes, (void)user;
    free(memory);
    --blocks_alive;
}

/* Whichever allocation fails, it is told, and nothing leaks. */
static void no_memory_is_told(void) {
    static const double w[] = { 1, 2, 3, 4, 5 };
    static const uint64_t lengths[] = { 9, 8, 7, 6, 5 };
    const spdl_allocator meagre = { meagre_alloc, meagre_free, NULL };
    for (int order = 0; order < 7; ++order)
        for (long fail = 0, result = SPDL_E_NOMEM; result != SPDL_OK; ++fail) {
            const bool blocks = order == SPDL_SAMPLE_BLOCKS;
            spdl_error error = { .result = SPDL_OK };
            spdl_sampler *s = NULL;
            spdl_mixture *m = NULL;
            spdl_sampler_desc desc = { .order = (spdl_sampler_order)order, .count = 5, .weights = w,
                                       .block = blocks, .shuffle_inside = blocks,
                                       .index_fn = by_length, .allocator = meagre,
                                       .error = &error };
            spdl_mixture_desc mix = { .weights = w, .sources = 5, .lengths = lengths,
                                      .at_end = SPDL_MIXTURE_GO_ON, .allocator = meagre,
                                      .error = &error };
            blocks_until_none = fail;
            result = order == SPDL_SAMPLE_MIXTURE ? spdl_mixture_create(&m, &mix)
                                                  : spdl_sampler_create(&s, &desc);
            if (result != SPDL_OK) CHECK_EQ(result, SPDL_E_NOMEM);
            if (result != SPDL_OK) CHECK(error.result == SPDL_E_NOMEM && error.text[0] != '\0');
            if (!CHECK(fail < 20)) break;
            blocks_until_none = -1;
            spdl_sampler_destroy(s);
            spdl_mixture_destroy(m);
            CHECK_EQ(blocks_alive, 0);
        }
}

TEST_TABLE(sampler) {
    TEST_CASE(a_shuffle_is_a_bijection),
    TEST_CASE(any_size_up_to_2_to_the_63_is_shuffled),
    TEST_CASE(nobody_has_items_beyond_the_end),
    TEST_CASE(all_orders_of_few_are_as_likely),
    TEST_CASE(every_size_is_as_a_true_shuffle),
    TEST_CASE(a_large_shuffle_has_no_pattern),
    TEST_CASE(seeds_and_epochs_share_no_order),
    TEST_CASE(the_default_is_one_after_the_other),
    TEST_CASE(blocks_are_read_in_one_go),
    TEST_CASE(weights_are_drawn_by),
    TEST_CASE(every_weight_has_its_share_of_the_table),
    TEST_CASE(without_replacement_the_draws_are_exact),
    TEST_CASE(keys_of_any_weight_are_in_order),
    TEST_CASE(a_curriculum_is_what_it_says),
    TEST_CASE(what_makes_no_sense_is_refused),
    TEST_CASE(ranks_share_an_epoch),
    TEST_CASE(ranks_come_from_the_environment),
    TEST_CASE(orders_have_no_memory),
    TEST_CASE(orders_are_the_same_everywhere),
    TEST_CASE(a_row_makes_the_items_of_a_rank),
    TEST_CASE(a_row_without_a_sampler_fails),
    TEST_CASE(items_lie_in_batches_in_place),
    TEST_CASE(positions_are_skipped),
    TEST_CASE(nothing_is_lost_between_worlds),
    TEST_CASE(level_ranks_keep_the_order),
    TEST_CASE(texts_of_what_is_left_stay_short),
    TEST_CASE(a_text_that_does_not_fit_says_so),
    TEST_CASE(skips_go_on_with_a_run),
    TEST_CASE(another_run_is_told_from_ours),
    TEST_CASE(other_parts_of_a_mixture_are_told),
    TEST_CASE(texts_that_make_no_sense_are_refused),
    TEST_CASE(a_thousand_ranks_cost_nothing),
    TEST_CASE(hashes_tell_bytes_apart),
    TEST_CASE(nobody_is_far_off_his_share),
    TEST_CASE(any_ratio_is_kept),
    TEST_CASE(sixty_five_thousand_sources_are_mixed),
    TEST_CASE(positions_are_asked_for_in_any_order),
    TEST_CASE(sources_end_as_they_are_told),
    TEST_CASE(going_on_leaves_nothing_over),
    TEST_CASE(weights_change_at_positions),
    TEST_CASE(mixtures_that_make_no_sense_are_refused),
    TEST_CASE(a_merge_of_equal_weights_is_the_same),
    TEST_CASE(samplers_are_mixed),
    TEST_CASE(ranks_share_each_source),
    TEST_CASE(mixtures_with_lengths_start_over_each_epoch),
    TEST_CASE(no_memory_is_told),
    TEST_END,
};
