/* Orders and their chance, ranks, runs that go on elsewhere, mixtures. */
#define ITEMS_PRIVATE
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

/* What a sampler of a mixture finds sources with. */
static spdl__mixture *mixture_of(spdl_sampler_desc desc) {
    spdl__mixture *m = spdl__mixture_make(&desc);
    REQUIRE(m != NULL);
    return m;
}

static void mixture_free(spdl__mixture *m) {
    const spdl_allocator by_malloc = { NULL, NULL, NULL };
    spdl__free(&by_malloc, m, 0);
}

#define MIXTURE(...) mixture_of((spdl_sampler_desc){ __VA_ARGS__ })
#define MIXED(...) SAMPLER(.order = SPDL_SAMPLE_MIXTURE, __VA_ARGS__)
#define WEIGHTS(...)                                                                               \
    .weights = (const double[]){ __VA_ARGS__ },                                                    \
    .sources = sizeof((const double[]){ __VA_ARGS__ }) / sizeof(double)

static uint64_t index_at(spdl_sampler *s, uint64_t epoch, uint64_t position) {
    spdl_index it;
    REQUIRE(spdl__sampler_get(s, epoch, position, &it) == SPDL_OK);
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

/* Every index once. */
static void a_shuffle_is_a_bijection(void) {
    static bool seen[70000];
    for (uint64_t n = 1; n <= 70000;
         n = n < 300 || (n > 4000 && n < 4300) ? n + 1 : n * 9 / 8 + 1) {
        spdl_sampler *s = SHUFFLED(.count = n, .seed = n);
        memset(seen, 0, sizeof seen);
        for (uint64_t p = 0; p < n; ++p) {
            const uint64_t index = index_at(s, 5, p);
            if (!CHECK(index < n && !seen[index])) break;
            seen[index] = true;
        }
        spdl_sampler_destroy(s);
    }
}

static void nobody_has_items_beyond_the_end(void) {
    spdl_sampler *s = SAMPLER(.count = (uint64_t)1 << 63, .ranks = { 1, 4 });
    spdl_index it;
    CHECK(spdl_sampler_count(s, 0) == (uint64_t)1 << 61);
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
            uint64_t got[100], at = test_random(&random) % n;
            const uint64_t most = n < 100 ? n : 100;
            for (uint64_t i = 0; i < most; ++i) {
                got[i] = index_at(s, ~0u, (at + i) % n);
                CHECK(got[i] < n);
                for (uint64_t j = 0; j < i; ++j) CHECK(got[j] != got[i]);
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

typedef enum shuffler { OURS, FAIR, WEAK } shuffler;

static void shuffle_by(shuffler who, spdl_sampler *s, uint64_t epoch, uint32_t *order, uint32_t n,
                       uint64_t *random) {
    const uint32_t start = (uint32_t)(test_random(random) % n);
    for (uint32_t i = 0; i < n; ++i) {
        const uint32_t j = (uint32_t)(test_random(random) % (i + 1));
        if (who == OURS) order[i] = (uint32_t)index_at(s, epoch, i);
        if (who == WEAK) order[i] = (uint32_t)((start + (uint64_t)i * (n / 2 + 1)) % n);
        if (who == FAIR) order[i] = order[j], order[j] = i;
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
    CHECK(worst_of(&sums[FAIR], true) < 5);
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
        for (uint32_t i = 0; i < n; ++i) order[i] = (uint32_t)spdl__shuffle_at(&shuffle, i);
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

static uint64_t by_length(void *ctx, uint64_t epoch, uint64_t position) {
    return position * *(uint64_t *)ctx + epoch;
}

static void a_function_is_what_it_says(void) {
    uint64_t step = 2;
    spdl_index it;
    spdl_sampler *s = SAMPLER(.order = SPDL_SAMPLE_FUNCTION, .count = 8, .draws = 5,
                              .index_fn = by_length, .ctx = &step);
    CHECK_EQ(index_at(s, 1, 3), 7);
    CHECK_EQ(spdl_sampler_item(s, 0, 4, &it), SPDL_E_INVALID);
    CHECK_EQ(it.index, 8);
    CHECK_EQ(spdl_sampler_item(s, 0, 5, &it), SPDL_END);
    spdl_pipeline *p = START(2, SPDL_INDEX(s), SPDL_SINK(3));
    for (void *i = NULL; spdl_pipeline_next(p, &i, SPDL_SECONDS(15)) == SPDL_OK;)
        spdl_buffer_free(i);
    failed_with(p, 0, "stage 0 'spdl_index', item 4: index_fn gave 8 for position 4 of epoch "
                      "0, must be less than count, 8");
    spdl_pipeline_destroy(p);
    spdl_sampler_destroy(s);
}

static void the_default_is_one_after_the_other(void) {
    spdl_sampler *s = SAMPLER(.count = 5), *some = SHUFFLED(.count = 100, .draws = 10);
    CHECK_STR(epoch_text(s, 0), "0 1 2 3 4");
    CHECK_EQ(spdl_sampler_count(some, 7), 10);
    spdl_sampler_destroy(s);
    spdl_sampler_destroy(some);
}

/* Each once; a block from its begin to its end; the short one anywhere between the others. */
static void blocks_are_read_in_one_go(void) {
    static const uint64_t counts[] = { 3241, 3200, 100, 99, 1, 410000 };
    for (size_t how = 0; how < sizeof counts / sizeof counts[0]; ++how) {
        static bool seen[410000];
        const uint64_t count = counts[how];
        const long blocks = (long)((count + 99) / 100);
        spdl_sampler *s = SAMPLER(.order = SPDL_SAMPLE_BLOCKS, .count = count, .block = 100,
                                  .seed = 4);
        bool shuffled = blocks < 2, moves = count % 100 == 0 || blocks < 2;
        for (uint64_t epoch = 0; epoch < 5; ++epoch) {
            long jumps = 0, changes = 0, block = -1;
            memset(seen, 0, sizeof seen);
            for (uint64_t p = 0, last = ~0u; p < count; ++p) {
                const uint64_t index = index_at(s, epoch, p);
                REQUIRE(index < count && !seen[index]);
                seen[index] = true;
                jumps += index != last + 1;
                changes += (long)(index / 100) != block;
                block = (long)(index / 100);
                if (block == blocks - 1 && p + 100 < count) moves = true;
                last = index;
                if (p % 50 == 0) (void)index_at(s, epoch, p * 7 % count); /* not in order */
            }
            CHECK_EQ(changes, blocks);
            CHECK(jumps <= changes); /* less where two follow each other */
            if (index_at(s, epoch, 0) != index_at(s, epoch + 1, 0)) shuffled = true;
        }
        CHECK(shuffled && moves);
        spdl_sampler_destroy(s);
    }
}

static void nobody_frees(void *memory, size_t bytes, void *user) {
    (void)memory, (void)bytes, (void)user;
}

static void what_makes_no_sense_is_refused(void) {
    REFUSED("sampler: count is 0, must be the number of items", .seed = 1);
    REFUSED("sampler: count is 0, must be the number of items",
            .order = SPDL_SAMPLE_FUNCTION, .draws = 4);
    REFUSED("sampler: draws is 3, more than count, 2", .count = 2,
            .draws = 3);
    REFUSED("sampler: rank is 3 and world 0, but rank must be 0 to world - 1",
            .ranks = { 3, 0 });
    REFUSED("sampler: rank is 0 and world -1, but rank must be 0 to world - 1",
            .ranks = { 0, -1 });
    REFUSED("sampler: rank is -1 and world 4, but rank must be 0 to world - 1",
            .ranks = { -1, 4 });
    REFUSED("sampler: rank is 4 and world 4, but rank must be 0 to world - 1", .ranks = { 4, 4 });
    REFUSED("sampler: count or draws is more than 2^63", .count = UINT64_MAX);
    REFUSED("sampler: count or draws is more than 2^63", .count = 1, .draws = UINT64_MAX);
    REFUSED("sampler: order or tail is unknown", .order = (spdl_sampler_order)99);
    REFUSED("sampler: order or tail is unknown", .tail = (spdl_tail)-1);
    REFUSED("sampler: index_fn is NULL", .order = SPDL_SAMPLE_FUNCTION, .count = 1);
    REFUSED("sampler: block is 0, must be the number of indices in a block",
            .order = SPDL_SAMPLE_BLOCKS, .count = 10);
    REFUSED("sampler: set both functions of the allocator or none",
            .allocator = { .free_fn = nobody_frees });
    CHECK_EQ(spdl_sampler_create(NULL, NULL), SPDL_E_INVALID);
    spdl_index found;
    spdl_sampler *s = (spdl_sampler *)&found;
    CHECK_EQ(spdl_sampler_create(&s, NULL), SPDL_E_INVALID);
    CHECK(s == NULL);
    s = SAMPLER(.count = 3);
    CHECK_EQ(spdl_sampler_item(s, 0, 0, NULL), SPDL_E_INVALID);
    CHECK_EQ(spdl_sampler_item(NULL, 0, 0, &found), SPDL_E_INVALID);
    spdl_sampler_destroy(s);
    spdl_sampler_destroy(NULL);
}

/* --- ranks --- */

static void check_ranks(uint64_t count, int world, spdl_tail tail, const char *lengths) {
    notes n = { .length = 0 };
    long *times = (long *)calloc(count + 1, sizeof *times);
    long total = 0;
    for (int rank = 0; rank < world; ++rank) {
        spdl_sampler *s = SHUFFLED(.count = count, .ranks = { rank, world }, .tail = tail,
                                   .seed = 3);
        const uint64_t length = spdl_sampler_count(s, 2);
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
    check_ranks(8, 4, SPDL_TAIL_KEEP, "2 2 2 2");
}

static void check_env(const char *const *set, spdl_result result, int rank, int world,
                      const char *text) {
    static const char *const all[] = { "RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK",
                                       "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE",
                                       "SLURM_PROCID", "SLURM_NTASKS" };
    spdl_ranks ranks = { 77, 78 };
    spdl_error error;
    for (size_t i = 0; i < 8; ++i) test_setenv(all[i], NULL);
    for (; *set != NULL; set += 2) test_setenv(set[0], set[1]);
    CHECK_EQ(spdl_ranks_from_env(&ranks, &error), result);
    CHECK_EQ(ranks.rank, rank);
    CHECK_EQ(ranks.world, world);
    CHECK_STR(error.text, text);
    CHECK_EQ(spdl_ranks_from_env(&ranks, NULL), result);
}

#define ENV(result, rank, world, text, ...)                                                        \
    check_env((const char *const[]){ __VA_ARGS__, NULL }, result, rank, world, text)

static void ranks_come_from_the_environment(void) {
    CHECK_EQ(spdl_ranks_from_env(NULL, NULL), SPDL_E_INVALID);
    ENV(SPDL_E_NOT_FOUND, 0, 1, "", NULL);
    ENV(SPDL_OK, 3, 8, "", "RANK", "3", "WORLD_SIZE", "8", "SLURM_PROCID", "0", "SLURM_NTASKS",
        "9");
    ENV(SPDL_OK, 1, 2, "", "OMPI_COMM_WORLD_RANK", "1", "OMPI_COMM_WORLD_SIZE", "2",
        "SLURM_PROCID", "0", "SLURM_NTASKS", "1");
    ENV(SPDL_OK, 0, 1, "", "PMI_RANK", "0", "PMI_SIZE", "1");
    ENV(SPDL_OK, 1023, 1024, "", "SLURM_PROCID", "1023", "SLURM_NTASKS", "1024");
    ENV(SPDL_E_NOT_FOUND, 0, 1, "", "SLURM_NTASKS", "4"); /* salloc without srun */
    ENV(SPDL_E_INVALID, 77, 78, "ranks: RANK is set, but WORLD_SIZE is not", "RANK", "3");
    ENV(SPDL_E_INVALID, 77, 78, "ranks: RANK is 4 and WORLD_SIZE is 4, must be two numbers, "
        "the second one larger", "RANK", "4", "WORLD_SIZE", "4");
    ENV(SPDL_E_INVALID, 77, 78, "ranks: PMI_RANK is -1 and PMI_SIZE is 4, must be two numbers, "
        "the second one larger", "PMI_RANK", "-1", "PMI_SIZE", "4");
    ENV(SPDL_E_INVALID, 77, 78, "ranks: RANK is 1 and WORLD_SIZE is 99999999999, must be two "
        "numbers, the second one larger", "RANK", "1", "WORLD_SIZE", "99999999999");
    ENV(SPDL_E_INVALID, 77, 78, "ranks: RANK is 1 and WORLD_SIZE is 2x, must be two numbers, "
        "the second one larger", "RANK", "1", "WORLD_SIZE", "2x");
    ENV(SPDL_E_INVALID, 77, 78, "ranks: RANK is 1x and WORLD_SIZE is 2, must be two numbers, "
        "the second one larger", "RANK", "1x", "WORLD_SIZE", "2");
}

/* Order depends on (seed, epoch) alone: five epochs after ten others are as fresh ones. */
static void orders_have_no_memory(void) {
    for (int k = 0; k < 3; ++k) {
        const spdl_sampler_desc desc = {
            .order = k ? SPDL_SAMPLE_BLOCKS : SPDL_SAMPLE_SHUFFLED, .count = 300, .seed = 6,
            .block = k == 1 ? 9 : 10
        };
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
    static const uint64_t golden[] = { 0x4e4ea1615593a915u, 0xf08cb5244e9f2665u,
                                       0x876a774ef7db5b17u, 0xcb89116e0f0ee824u,
                                       0x5457e89ed09cf489u };
    double w[500];
    uint64_t hash = 0;
    for (int i = 0; i < 500; ++i) w[i] = i % 7 * 0.1 + i % 3;
    spdl__mixture *m = MIXTURE(.weights = w, .sources = 500);
    for (int k = 0; k < 4; ++k) {
        spdl_sampler *s = SAMPLER(.order = (spdl_sampler_order)(k < 3 ? k : SPDL_SAMPLE_SHUFFLED),
                                  .count = k == 3 ? 1000000007 : 500, .seed = 77,
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
        index = spdl__mixture_get(m, p * p, &source);
        hash = spdl__hashed(spdl__hashed(hash, source), index);
    }
    if (!CHECK(hash == golden[4])) fprintf(stderr, "0x%llxu,\n", (unsigned long long)hash);
    mixture_free(m);
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
        CHECK_EQ(spdl__pipeline_find(p, "order"), 0);
        for (uint64_t epoch = 0; epoch < 3; ++epoch)
            CHECK_STR(taken_text(p, epoch, 99), epoch_text(same, epoch));
        CHECK_EQ(spdl_pipeline_rewind(p, 15, SPDL_FOREVER), SPDL_OK); /* seek */
        CHECK_STR(taken_text(p, 0, 99), last_two(epoch_text(same, 0)));
        spdl_pipeline_destroy(p);
        spdl_sampler_destroy(s);
        spdl_sampler_destroy(same);
    }
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

/* --- runs that go on --- */

/* What a position says of a sampler from an epoch on; returns its length. */
static int describe(const spdl_sampler *s, uint64_t epoch, char text[SPDL_STATE_BYTES]) {
    char fields[SPDL_STATE_BYTES];
    spdl__text t = spdl__text_start(fields, sizeof fields);
    spdl__sampler_describe(s, epoch, &t);
    CHECK(fields[0] == ' ');
    memcpy(text, fields + 1, t.length);
    return (int)t.length - 1;
}

/* What remains from a position on is dealt in order, to any number of ranks; other epochs are
   whole. */
static void the_rest_of_an_epoch_is_dealt_anew(void) {
    for (int tail = 0; tail < 3; ++tail)
        for (int to = 1; to <= 12; ++to) {
            spdl_sampler *s[12], *one = SHUFFLED(.count = 1000, .seed = 1);
            for (int r = 0; r < to; ++r) {
                s[r] = SHUFFLED(.count = 1000, .seed = 1, .ranks = { r, to },
                                .tail = (spdl_tail)tail);
                s[r]->from = 360;
            }
            for (uint64_t n = 360; n < 1000 + (tail == SPDL_TAIL_PAD ? (uint64_t)to : 0); ++n) {
                const uint64_t r = (n - 360) % (uint64_t)to, k = (n - 360) / (uint64_t)to;
                spdl_index it;
                if (spdl_sampler_item(s[r], 0, k, &it) == SPDL_OK)
                    CHECK_EQ(it.index, index_at(one, 0, n % 1000));
                else CHECK(tail == SPDL_TAIL_DROP ? n >= 1000 - (uint64_t)to : n >= 1000);
            }
            for (int r = 0; r < to; ++r) {
                CHECK(spdl_sampler_count(s[r], 1) >= 1000 / (uint64_t)to);
                spdl_sampler_destroy(s[r]);
            }
            spdl_sampler_destroy(one);
        }
}

/* 1,000 ranks, and data that would not fit any memory. */
static void a_thousand_ranks_cost_nothing(void) {
    char text[1024];
    const uint64_t count = (uint64_t)1 << 50;
    for (int r = 0; r < 1000; ++r) {
        spdl_sampler *s = SHUFFLED(.count = count, .ranks = { r, 1000 });
        spdl_index it;
        s->from = 1000 * ((uint64_t)1 << 30);
        CHECK(s->shuffle.table == NULL);
        CHECK_EQ(spdl_sampler_item(s, 0, 0, &it), SPDL_OK);
        CHECK_EQ(it.position, s->from + (uint64_t)r);
        CHECK(describe(s, 0, text) < 250);
        CHECK_STR(strstr(text, " from="), " from=0:1073741824000");
        CHECK(describe(s, 1, text) < 250 && strstr(text, " from=") == NULL);
        spdl_sampler_destroy(s);
    }
}

static void check_differs(const char *text, spdl_sampler *s, const char *why) {
    spdl_error error;
    CHECK(spdl__sampler_differs(s, text, &error) < 0);
    CHECK_STR(error.text, why);
}

static void another_run_is_told_from_ours(void) {
    char text[1024], line[1200];
    spdl_error error;
    spdl_sampler *s = SHUFFLED(.count = 10, .seed = 4);
    spdl_sampler *other = SHUFFLED(.count = 11, .seed = 4), *order = SAMPLER(.count = 10);
    spdl_sampler *one = SAMPLER(.order = SPDL_SAMPLE_BLOCKS, .count = 9, .block = 2);
    spdl_sampler *two = SAMPLER(.order = SPDL_SAMPLE_BLOCKS, .count = 9, .block = 3);
    const int length = describe(s, 0, text);
    CHECK_EQ(length, strlen(text));
    CHECK_STR(text, "order=shuffled count=10 draws=10 seed=4 tail=keep spec=0000000000000000 "
                    "rank=0/1");
    snprintf(line, sizeof line, "spdl.state.1 epoch=3 %s crc=77\n", text);
    CHECK_EQ(spdl__sampler_differs(s, line, &error), SPDL_OK);
    check_differs(line, other, "the sampler's count is 11, in the saved run it was 10");
    check_differs(line, order, "the sampler's order is sequential, in the saved run it was "
                               "shuffled");
    check_differs("spdl.state.1 order=shuffled count=10", s,
                  "it has no draws of a sampler");
    check_differs("", s, "it has no order of a sampler");
    CHECK(describe(one, 0, text) > 0);
    CHECK(spdl__sampler_differs(two, text, &error) == SPDL_E_INVALID);
    CHECK(strncmp(error.text, "the sampler's spec is ", 22) == 0);
    CHECK(strstr(error.text, ": blocks, mixture or seed of a source differ") != NULL);
    spdl_sampler_destroy(s), spdl_sampler_destroy(other), spdl_sampler_destroy(order);
    spdl_sampler_destroy(one), spdl_sampler_destroy(two);
}

/* One of a mixture of two samplers: of what differs all is in the text. */
static void describe_mixed(int which, char text[1024]) {
    static const double w[] = { 1, 2 }, v[] = { 1, 3 };
    const spdl_sampler_order order = which == 2 ? SPDL_SAMPLE_SEQUENTIAL : SPDL_SAMPLE_SHUFFLED;
    spdl_sampler *part[] = { SAMPLER(.order = order, .draws = 4, .count = which == 2 ? 5 : 4),
                             SAMPLER(.order = SPDL_SAMPLE_BLOCKS, .count = 9,
                                     .block = which == 3 ? 4 : 3) };
    spdl_sampler *s = MIXED(.weights = which == 1 ? w : v, .sources = 2, .samplers = part,
                            .draws = 100);
    CHECK(describe(s, 0, text) > 0);
    spdl_sampler_destroy(s), spdl_sampler_destroy(part[0]), spdl_sampler_destroy(part[1]);
}

static void other_parts_of_a_mixture_are_told(void) {
    char text[2][1024];
    describe_mixed(0, text[0]);
    for (int which = 0; which < 4; ++which) {
        describe_mixed(which, text[1]);
        CHECK((strcmp(text[0], text[1]) == 0) == (which == 0));
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
static const char *mixed_text(const spdl__mixture *m, uint64_t first, uint64_t count) {
    static notes n;
    uint32_t source = 0;
    n.length = 0;
    n.text[0] = '\0';
    for (uint64_t p = first; p < first + count && p < SPDL__MOST; ++p) {
        (void)spdl__mixture_get(m, p, &source);
        note(&n, p > first ? " %ld" : "%ld", (long)source);
    }
    return n.text;
}

/* The farthest any source is off its share, after any number of positions up to `most`; each one's
   items come in order. */
static double farthest_off(const spdl__mixture *m, const double *w, uint32_t n, uint64_t most) {
    static uint64_t had[65536];
    double worst = 0, sum = 0;
    memset(had, 0, sizeof had);
    for (uint32_t i = 0; i < n; ++i) sum += w[i];
    for (uint64_t p = 0; p < most; ++p) {
        uint32_t source = n;
        uint64_t index = 0;
        index = spdl__mixture_get(m, p, &source);
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
    double worst = 0, off;
    for (int round = 0; round < (TEST_SANITIZED ? 60 : 400); ++round) {
        const uint32_t n = 1 + (uint32_t)(test_random(&random) % (round % 10 ? 12 : 200));
        for (uint32_t i = 0; i < n; ++i) w[i] = weight_like(round % 8, i, &random);
        spdl__mixture *m = MIXTURE(.weights = w, .sources = n);
        off = farthest_off(m, w, n, n < 64 ? 5000 : 20000);
        if (off > worst) worst = off;
        mixture_free(m);
    }
    CHECK(worst < 1.7);
    printf("off by %.3f at most\n", worst);
}

static void any_ratio_is_kept(void) {
    static const double a[] = { 1e6, 1 }, b[] = { 0.001, 0.999 }, c[] = { 1e308, 5e-324 },
                        d[] = { 1e308, 1e308, 1e308 }, e[] = { 5e-324, 1e-323 };
    spdl__mixture *m = MIXTURE(.weights = a, .sources = 2);
    uint32_t source;
    uint64_t index;
    CHECK(farthest_off(m, a, 2, 2000000) <= 0.5 + 1e-9);
    for (uint64_t k = 1; k < 1000000; k *= 10) { /* the small one's item k, anywhere */
        long found = 0;
        for (uint64_t p = k * 1000001 - 500002; p < k * 1000001 - 499998; ++p) {
            index = spdl__mixture_get(m, p, &source);
            if (source == 1) ++found, CHECK_EQ(index, k - 1);
        }
        CHECK_EQ(found, 1);
    }
    mixture_free(m);
    m = MIXTURE(.weights = b, .sources = 2);
    CHECK(farthest_off(m, b, 2, 100000) <= 0.5 + 1e-9);
    mixture_free(m);
    m = MIXTURE(.weights = c, .sources = 2);
    CHECK_STR(mixed_text(m, 0, 5), "0 0 0 0 0");
    CHECK_STR(mixed_text(m, SPDL__MOST - 3, 5), "0 0 0");
    mixture_free(m);
    m = MIXTURE(.weights = d, .sources = 3);
    CHECK_STR(mixed_text(m, 0, 7), "0 2 1 0 2 1 0");
    mixture_free(m);
    m = MIXTURE(.weights = e, .sources = 2);
    CHECK_STR(mixed_text(m, 0, 6), "1 0 1 1 0 1");
    mixture_free(m);
    m = MIXTURE(WEIGHTS(0, 3, 0, 1));
    CHECK_STR(mixed_text(m, 0, 8), "1 3 1 1 1 3 1 1");
    mixture_free(m);
    m = MIXTURE(WEIGHTS(7));
    CHECK_STR(mixed_text(m, 5, 3), "0 0 0");
    mixture_free(m);
}

static void sixty_five_thousand_sources_are_mixed(void) {
    static double w[65536];
    uint64_t random = test_seed();
    for (int kind = 0; kind < 3; ++kind) {
        for (uint32_t i = 0; i < 65536; ++i) w[i] = kind == 0 ? 1 : weight_like(kind, i, &random);
        spdl__mixture *m = MIXTURE(.weights = w, .sources = 65536);
        const double off = farthest_off(m, w, 65536, 200000);
        CHECK(off < 1.7);
        mixture_free(m);
    }
}

/* Far out, as near the beginning. */
static void positions_are_asked_for_in_any_order(void) {
    uint64_t random = test_seed();
    spdl__mixture *m = MIXTURE(WEIGHTS(0.31, 7, 0.02, 1.5, 2, 2, 2));
    for (int i = 0; i < 200; ++i) {
        const uint64_t first = test_random(&random) >> (2 + i % 50);
        uint64_t next[7], index;
        uint32_t source;
        memset(next, 0xff, sizeof next);
        for (uint64_t p = first; p < first + 300; ++p) {
            index = spdl__mixture_get(m, p, &source);
            CHECK(next[source] == UINT64_MAX || next[source] == index);
            next[source] = index + 1;
        }
        if (first > 1000)
            CHECK(fabs((double)next[1] / (7 / 14.83) / ((double)first + 300) - 1) < 0.02);
    }
    mixture_free(m);
}

#define NO_MIXTURE(text, ...)                                                                      \
    REFUSED(text, .order = SPDL_SAMPLE_MIXTURE, .draws = 1, .samplers = of, __VA_ARGS__)

static void mixtures_that_make_no_sense_are_refused(void) {
    static const double none[] = { 0, 0 };
    spdl_sampler *of[] = { SAMPLER(.count = 6), SAMPLER(.count = 3), NULL };
    NO_MIXTURE("sampler: sources is 0, must be from 1 to 65536", .weights = none);
    NO_MIXTURE("sampler: sources is 65537, must be from 1 to 65536", .sources = 65537);
    NO_MIXTURE("sampler: weights or samplers is NULL", .sources = 2);
    REFUSED("sampler: weights or samplers is NULL", .order = SPDL_SAMPLE_MIXTURE, .draws = 1,
            WEIGHTS(1));
    NO_MIXTURE("sampler: the sum of weights is 0", .sources = 2, .weights = none);
    NO_MIXTURE("sampler: weights[1] is -1, must be a number that is not negative", WEIGHTS(1, -1));
    NO_MIXTURE("sampler: weights[0] is nan, must be a number that is not negative",
               WEIGHTS(NAN, 1));
    NO_MIXTURE("sampler: samplers[2] is NULL", WEIGHTS(1, 1, 1));
    NO_MIXTURE("sampler: count is set, but a mixture has that of its sources", WEIGHTS(1),
               .count = 1);
    REFUSED("sampler: draws is 0, but the mixture does not end",
            .order = SPDL_SAMPLE_MIXTURE, .samplers = of, WEIGHTS(1, 1));
    spdl_sampler_destroy(of[0]), spdl_sampler_destroy(of[1]);
}

/* Three data sets in a pipeline: each pass through one is an order of its own. */
/* Positions of all epochs together end before 2^63. */
static void a_mixture_ends(void) {
    static const double w[] = { 1, 3 };
    const uint64_t last = (((uint64_t)1 << 63) - 1) / 10 - 1;
    spdl_sampler *of[] = { SAMPLER(.count = 5), SHUFFLED(.count = 7) };
    spdl_sampler *s = MIXED(.weights = w, .sources = 2, .samplers = of, .draws = 10);
    spdl_index found;
    CHECK_EQ(spdl_sampler_item(s, last, 9, &found), SPDL_OK);
    CHECK(found.position == 9 && found.epoch == last && found.index < (found.source ? 7 : 5));
    CHECK_EQ(spdl_sampler_item(s, last, 10, &found), SPDL_END);
    CHECK_EQ(spdl_sampler_item(s, last + 2, 0, &found), SPDL_END);
    CHECK_EQ(spdl_sampler_item(s, UINT64_MAX, 0, &found), SPDL_END);
    spdl_sampler_destroy(s);
    spdl_sampler_destroy(of[0]), spdl_sampler_destroy(of[1]);
}

static void samplers_are_mixed(void) {
    static const double w[] = { 5, 2, 1 };
    spdl__mixture *m = MIXTURE(.weights = w, .sources = 3);
    for (int i = 0; i < CROWDS; ++i) {
        spdl_sampler *of[] = { SHUFFLED(.count = 40, .seed = 1), SHUFFLED(.count = 30, .seed = 2),
                               SAMPLER(.count = 7) };
        spdl_sampler *s = MIXED(.weights = w, .sources = 3, .samplers = of, .draws = 500,
                                .ranks = { i % 2, 2 });
        spdl_pipeline *p = START(crowds[i], SPDL_INDEX(s, .continuous = true),
                                 SPDL_PIPE(look_up, .concurrency = 3), SPDL_SINK(3));
        uint64_t k = 0;
        for (uint64_t epoch = 0; epoch < 3; ++epoch) {
            k = 0;
            for (void *v = NULL; spdl_pipeline_next(p, &v, SPDL_SECONDS(15)) == SPDL_OK; ++k) {
                const spdl_index *it = (const spdl_index *)v;
                const uint64_t position = it->position, all = epoch * 500 + position;
                uint32_t source = 9;
                const uint64_t index = spdl__mixture_get(m, all, &source);
                CHECK_EQ(it->position / 2, k);
                CHECK_EQ(it->epoch, epoch);
                CHECK_EQ(it->source, source);
                spdl_sampler *fresh = source == 2 ? SAMPLER(.count = 7)
                                                  : SHUFFLED(.count = 40 - 10 * source,
                                                             .seed = source + 1);
                const uint64_t length = spdl_sampler_count(fresh, 0);
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
    mixture_free(m);
}

/* Two sources of the same weight on two ranks, four on four: nobody has one of them alone; and a
   run that goes on on as many ranks goes on as it would have. */
static void ranks_share_each_source(void) {
    spdl_sampler *of[8][4], *s[4], *on[4];
    for (int i = 0; i < 32; ++i) of[i / 4][i % 4] = SHUFFLED(.count = 100, .seed = (uint64_t)i % 4);
    for (int world = 2; world <= 4; world += 2) {
        bool seen[4000] = { false };
        for (int r = 0; r < world; ++r) {
            long found[4] = { 0 };
            s[r] = MIXED(WEIGHTS(1, 1, 1, 1), .samplers = of[r], .draws = 4000,
                         .ranks = { r, world });
            for (uint64_t k = 0; k < 4000 / (uint64_t)world; ++k) {
                spdl_index it;
                CHECK_EQ(spdl_sampler_item(s[r], 1, k, &it), SPDL_OK);
                CHECK(!seen[it.position] && it.position / (uint64_t)world == k);
                seen[it.position] = true;
                ++found[it.source];
            }
            for (int i = 0; i < 4; ++i) CHECK(fabs((double)found[i] - 1000.0 / world) < 100);
        }
        for (int r = 0; r < world; ++r) {
            on[r] = MIXED(WEIGHTS(1, 1, 1, 1), .samplers = of[4 + r], .draws = 4000,
                          .ranks = { r, world });
            on[r]->from_epoch = 1;
            on[r]->from = 37 * (uint64_t)world;
            for (uint64_t k = 37; k < 4000 / (uint64_t)world; ++k)
                CHECK_EQ(spdl__sampler_global(on[r], 1, k - 37), spdl__sampler_global(s[r], 1, k));
        }
        for (int r = 0; r < world; ++r) spdl_sampler_destroy(s[r]), spdl_sampler_destroy(on[r]);
    }
    for (int i = 0; i < 32; ++i) spdl_sampler_destroy(of[i / 4][i % 4]);
}

static void samplers_of_a_mixture_have_no_ranks(void) {
    spdl_sampler *of[] = { SHUFFLED(.count = 6, .seed = 1), SHUFFLED(.count = 3, .seed = 2) };
    spdl_sampler *ranked[] = { of[0], SAMPLER(.count = 3, .ranks = { 0, 2 }) };
    REFUSED("sampler: samplers[1] has ranks of its own; set the ranks of the mixture instead",
            .order = SPDL_SAMPLE_MIXTURE, WEIGHTS(1, 1), .samplers = ranked, .draws = 1);
    spdl_sampler_destroy(ranked[1]);
    spdl_sampler_destroy(of[0]), spdl_sampler_destroy(of[1]);
}

/* --- memory --- */

static long blocks_alive, blocks_until_none;

static void *meagre_alloc(size_t bytes, size_t align, void *user) {
    void *memory = blocks_until_none-- == 0 ? NULL : test_memory(align, bytes);
    (void)user;
    if (memory == NULL) return NULL;
    ++blocks_alive;
    return memory;
}

static void meagre_free(void *memory, size_t bytes, void *user) {
    (void)bytes, (void)user;
    test_memory_free(memory);
    --blocks_alive;
}

/* Whichever allocation fails, it is told, and nothing leaks. */
static void no_memory_is_told(void) {
    static const double w[] = { 1, 2, 3, 4, 5 };
    const spdl_allocator meagre = { meagre_alloc, meagre_free, NULL };
    spdl_sampler *of[5];
    for (int i = 0; i < 5; ++i) of[i] = SAMPLER(.count = 9);
    for (int order = 0; order <= SPDL_SAMPLE_MIXTURE; ++order)
        for (long fail = 0, result = SPDL_E_NOMEM; result != SPDL_OK; ++fail) {
            spdl_error error = { .result = SPDL_OK };
            spdl_sampler *s = NULL;
            const bool mixes = order == SPDL_SAMPLE_MIXTURE;
            spdl_sampler_desc desc = { .order = (spdl_sampler_order)order, .count = mixes ? 0 : 5,
                                       .draws = 5, .block = 1, .index_fn = by_length,
                                       .weights = w, .sources = 5, .samplers = of,
                                       .allocator = meagre, .error = &error };
            blocks_until_none = fail;
            result = spdl_sampler_create(&s, &desc);
            if (result != SPDL_OK) CHECK_EQ(result, SPDL_E_NOMEM);
            if (result != SPDL_OK) CHECK(error.result == SPDL_E_NOMEM && error.text[0] != '\0');
            if (!CHECK(fail < 20)) break;
            blocks_until_none = -1;
            spdl_sampler_destroy(s);
            CHECK_EQ(blocks_alive, 0);
        }
    for (int i = 0; i < 5; ++i) spdl_sampler_destroy(of[i]);
}

static void no_log(spdl_log_level level, const char *text, void *user) {
    (void)level, (void)text, (void)user;
}

/* One pipeline or mixture at a time; a sampler in use is not destroyed. */
static void a_sampler_serves_one(void) {
    spdl_sampler *s = SHUFFLED(.count = 1000), *of[] = { s, s }, *mixed = NULL;
    const spdl_pipeline_desc quiet = { .logger.log_fn = no_log };
    const spdl_pipeline_desc meagre = { .logger.log_fn = no_log, .workers = 2,
                                        .allocator = { meagre_alloc, meagre_free, NULL } };
    spdl_pipeline *p = START(2, SPDL_INDEX(s), SPDL_SINK(3)), *other = NULL;
    void *index;
    long got = 0, fail = 0;
    CHECK_EQ(spdl_pipeline_create(&other, &quiet, SPDL_STAGES(SPDL_INDEX(s), SPDL_SINK(3))),
             SPDL_E_INVALID);
    CHECK(other == NULL);
    NO_MIXTURE("sampler: a pipeline or a mixture uses samplers[0]: make one for each", WEIGHTS(1));
    spdl_sampler_destroy(s);
    for (; spdl_pipeline_next(p, &index, SPDL_SECONDS(15)) == SPDL_OK; ++got)
        spdl_buffer_free(index);
    CHECK_EQ(got, 1000);
    spdl_pipeline_destroy(p);
    NO_MIXTURE("sampler: a pipeline or a mixture uses samplers[1]: make one for each",
               WEIGHTS(1, 1));
    mixed = MIXED(.draws = 10, .samplers = of, WEIGHTS(1));
    CHECK_EQ(spdl_pipeline_create(&other, &quiet, SPDL_STAGES(SPDL_INDEX(s), SPDL_SINK(3))),
             SPDL_E_INVALID);
    spdl_sampler_destroy(s);
    spdl_sampler_destroy(mixed);
    for (blocks_until_none = 0;; blocks_until_none = fail) { /* one that is not made keeps none */
        ++fail;
        if (spdl_pipeline_create(&other, &meagre, SPDL_STAGES(SPDL_INDEX(s), SPDL_SINK(3))) ==
            SPDL_OK)
            break;
    }
    blocks_until_none = -1;
    CHECK(fail > 2);
    spdl_pipeline_destroy(other);
    spdl_sampler_destroy(s);
}

/* While a pipeline uses it, nobody else reads its items. */
static void items_of_a_sampler_in_use_are_refused(void) {
    spdl_sampler_desc desc = { .count = 9 };
    spdl_sampler *s = NULL;
    spdl_pipeline *p = NULL;
    spdl_index it;
    REQUIRE(spdl_sampler_create(&s, &desc) == SPDL_OK);
    CHECK_EQ(spdl_sampler_item(s, 0, 0, &it), SPDL_OK);
    REQUIRE(spdl_pipeline_create(&p, NULL, SPDL_STAGES(SPDL_INDEX(s), SPDL_SINK(1))) == SPDL_OK);
    CHECK_EQ(spdl_sampler_item(s, 0, 0, &it), SPDL_E_INVALID);
    spdl_pipeline_destroy(p);
    CHECK_EQ(spdl_sampler_item(s, 0, 8, &it), SPDL_OK);
    spdl_sampler_destroy(s);
}

TEST_TABLE(sampler) {
    TEST_CASE(items_of_a_sampler_in_use_are_refused),
    TEST_CASE(a_sampler_serves_one),
    TEST_CASE(a_shuffle_is_a_bijection),
    TEST_CASE(any_size_up_to_2_to_the_63_is_shuffled),
    TEST_CASE(nobody_has_items_beyond_the_end),
    TEST_CASE(all_orders_of_few_are_as_likely),
    TEST_CASE(every_size_is_as_a_true_shuffle),
    TEST_CASE(a_large_shuffle_has_no_pattern),
    TEST_CASE(seeds_and_epochs_share_no_order),
    TEST_CASE(a_function_is_what_it_says),
    TEST_CASE(the_default_is_one_after_the_other),
    TEST_CASE(blocks_are_read_in_one_go),
    TEST_CASE(what_makes_no_sense_is_refused),
    TEST_CASE(ranks_share_an_epoch),
    TEST_CASE(ranks_come_from_the_environment),
    TEST_CASE(orders_have_no_memory),
    TEST_CASE(orders_are_the_same_everywhere),
    TEST_CASE(a_row_makes_the_items_of_a_rank),
    TEST_CASE(items_lie_in_batches_in_place),
    TEST_CASE(the_rest_of_an_epoch_is_dealt_anew),
    TEST_CASE(a_thousand_ranks_cost_nothing),
    TEST_CASE(another_run_is_told_from_ours),
    TEST_CASE(other_parts_of_a_mixture_are_told),
    TEST_CASE(hashes_tell_bytes_apart),
    TEST_CASE(nobody_is_far_off_his_share),
    TEST_CASE(any_ratio_is_kept),
    TEST_CASE(sixty_five_thousand_sources_are_mixed),
    TEST_CASE(positions_are_asked_for_in_any_order),
    TEST_CASE(mixtures_that_make_no_sense_are_refused),
    TEST_CASE(a_mixture_ends),
    TEST_CASE(samplers_are_mixed),
    TEST_CASE(ranks_share_each_source),
    TEST_CASE(samplers_of_a_mixture_have_no_ranks),
    TEST_CASE(no_memory_is_told),
    TEST_END,
};
