// What >>cpp adds: stages that throw, rows of lambdas, owners, SPDL_NEXT. Compiled by
// check-warnings; run by check-headers in C++11 and C++20, once without exceptions.
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"

#ifdef __cpp_exceptions
SPDL_FN(throws_before_exception, int, int) {
    if (*in >= 0) throw 1; /* spdl.h and nothing else: std::exception is not known yet */
    *out = in;
    return SPDL_OK;
}
#endif

#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

static int failures;
static std::atomic<int> alive(0);

#define CHECK(condition) check((condition), #condition, __LINE__)

static void check(bool right, const char *text, int line) {
    if (right) return;
    ++failures;
    std::printf("tests/cpp.cpp:%d: %s\n", line, text);
}

struct Number {
    long value;
    explicit Number(long from) : value(from) { ++alive; }
    Number(const Number &) = delete;
    Number &operator=(const Number &) = delete;
    ~Number() { --alive; }
};

namespace other {
struct Number {};
}

static const int crowds[] = { 0, 1, 4 };

SPDL_FN(count_to_100, void, Number) {
    if (spdl_sequence(task) == 100) return SPDL_END;
    *out = new Number(static_cast<long>(spdl_sequence(task)));
    return SPDL_OK;
}

static void silent(spdl_log_level, const char *, void *) {}

static spdl_pipeline_desc with_workers(int workers) {
    spdl_pipeline_desc desc = {};
    desc.workers = workers == 0 ? SPDL_INLINE : workers;
    desc.logger.log_fn = silent;
    return desc;
}

/* How many items there are, the sum of their values, and how it ended. */
struct Taken {
    int count;
    long sum;
    spdl_result end;
};

static Taken take(spdl_pipeline *p) {
    Taken taken = { 0, 0, SPDL_OK };
    while (std::unique_ptr<Number> number =
               spdl_next<std::unique_ptr<Number> >(p, SPDL_SECONDS(15), &taken.end)) {
        ++taken.count;
        taken.sum += number->value;
    }
    return taken;
}

#ifdef __cpp_exceptions
struct Odd {};

/* Of 0, 1, 2 ...: 3 and 13 throw an exception, 7 something else, after the result was made. */
SPDL_FN(fragile, Number, Number) {
    std::unique_ptr<Number> made(new Number(in->value + 1000));
    if (in->value % 10 == 3) throw std::runtime_error("no " + std::to_string(in->value) + " %s");
    if (in->value % 10 == 7) throw Odd();
    *out = made.release();
    return SPDL_OK;
}

/* Throws what it is asked to, after it has asked for something itself. */
enum Act { DEFER, TAKE, ROUTE };
SPDL_FN(acts, Number, Number) {
    const Act act = *static_cast<const Act *>(spdl_ctx(task));
    *out = NULL;
    if (act == DEFER) (void)spdl_defer(task);
    if (act == ROUTE) (void)spdl_route(task, 1);
    if (act == TAKE) {
        spdl_take(task);
        delete in;
    }
    throw std::logic_error("acted");
}

SPDL_FN(source_throws, void, Number) {
    if (spdl_sequence(task) == 5) throw std::runtime_error("unplugged");
    *out = new Number(1);
    return SPDL_OK;
}

static void a_throw_is_a_failure(int workers) {
    spdl_pipeline_desc desc = with_workers(workers);
    spdl_pipeline *p = nullptr;
    CHECK(spdl_pipeline_create(
              &p, &desc,
              SPDL_STAGES(SPDL_SOURCE(count_to_100).with_free_item(spdl_delete<Number>),
                          SPDL_PIPE(fragile).with_concurrency(4)
                              .with_free_item(spdl_delete<Number>),
                          SPDL_SINK(2))) == SPDL_OK);
    const Taken taken = take(p);
    CHECK(taken.count == 3 && taken.sum == 3003 && taken.end == SPDL_E_STAGE);
    CHECK(spdl_pipeline_failed(p));
    CHECK(std::strcmp(spdl_pipeline_error(p)->text, "stage 1 'fragile', item 3: no 3 %s") ==
          0);
    spdl_pipeline_destroy(p);
    CHECK(alive == 0);
}

static void budgets_count_throws(int workers) {
    spdl_pipeline_desc desc = with_workers(workers);
    spdl_pipeline *p = nullptr;
    CHECK(spdl_pipeline_create(
              &p, &desc,
              SPDL_STAGES(SPDL_SOURCE(count_to_100).with_free_item(spdl_delete<Number>),
                          SPDL_PIPE(fragile).with_max_failures(20).with_concurrency(4)
                              .with_free_item(spdl_delete<Number>),
                          SPDL_SINK(2))) == SPDL_OK);
    const Taken taken = take(p);
    CHECK(taken.count == 80 && taken.end == SPDL_END);
    spdl_pipeline_destroy(p);
    CHECK(alive == 0);
}

static void what_is_no_exception_has_a_text(int workers) {
    spdl_pipeline_desc desc = with_workers(workers);
    spdl_pipeline *p = nullptr;
    auto odd = [](spdl_task *, Number *, Number **) -> spdl_result { throw Odd(); };
    CHECK(spdl_pipeline_create(
              &p, &desc,
              SPDL_STAGES(SPDL_SOURCE(count_to_100).with_free_item(spdl_delete<Number>),
                          spdl_pipe<Number, Number>("odd", odd), SPDL_SINK(2))) == SPDL_OK);
    CHECK(take(p).end == SPDL_E_STAGE);
    CHECK(std::strcmp(spdl_pipeline_error(p)->text,
                      "stage 1 'odd', item 0: threw something that is no std::exception") ==
          0);
    spdl_pipeline_destroy(p);
    CHECK(alive == 0);
}

/* An exception keeps its type, whichever worker threw it; those that were tolerated are freed. */
static void an_exception_is_thrown_again(int workers, int tolerated) {
    struct Bad : std::runtime_error {
        long value;
        explicit Bad(long from) : std::runtime_error("bad"), value(from) {}
    };
    spdl_pipeline_desc desc = with_workers(workers);
    spdl_pipeline *p = nullptr;
    auto bad = [](spdl_task *, Number *in, Number **out) -> spdl_result {
        if (in->value % 10 == 3) throw Bad(in->value);
        *out = in;
        return SPDL_OK;
    };
    long caught = -1;
    CHECK(spdl_pipeline_create(
              &p, &desc,
              SPDL_STAGES(SPDL_SOURCE(count_to_100).with_free_item(spdl_delete<Number>),
                          spdl_pipe<Number, Number>("bad", bad).with_concurrency(1)
                              .with_max_failures(tolerated),
                          SPDL_SINK(2))) == SPDL_OK);
    const std::unique_ptr<spdl_pipeline, spdl_deleter> owner(p);
    spdl_rethrow(p);
    CHECK(take(p).end == (tolerated < 10 ? SPDL_E_STAGE : SPDL_END));
    for (int round = 0; round < 2; ++round) {
        try {
            spdl_rethrow(p);
        } catch (const Bad &thrown) {
            caught = thrown.value;
        }
        CHECK(caught == (tolerated < 10 ? 3 + 10 * tolerated : -1));
    }
}

/* Item 1 throws, and item 0 after the consumer has caught that. */
static void what_was_thrown_stays() {
    for (int i = 0; i < 20; ++i) {
        spdl_pipeline_desc desc = with_workers(2);
        spdl_pipeline *p = nullptr;
        std::atomic<bool> caught(false);
        std::string text;
        auto bad = [&caught](spdl_task *, Number *in, Number **out) -> spdl_result {
            while (in->value == 0 && !caught) std::this_thread::yield();
            if (in->value < 2)
                throw std::runtime_error("a text on the heap of " + std::to_string(in->value));
            *out = in;
            return SPDL_OK;
        };
        CHECK(spdl_pipeline_create(
                  &p, &desc,
                  SPDL_STAGES(SPDL_SOURCE(count_to_100).with_free_item(spdl_delete<Number>),
                              spdl_pipe<Number, Number>("bad", bad).with_concurrency(2),
                              SPDL_SINK(2))) == SPDL_OK);
        while (!spdl_pipeline_failed(p)) std::this_thread::yield();
        for (int k = 0; k < 300; ++k) {
            try {
                spdl_rethrow(p);
            } catch (const std::runtime_error &thrown) {
                caught = true; /* `thrown` is in use */
                text = thrown.what();
            }
            CHECK(text == "a text on the heap of 1");
        }
        CHECK(take(p).end == SPDL_E_STAGE);
        CHECK(std::strstr(spdl_pipeline_error(p)->text, "item 1: a text on the heap of 1"));
        spdl_pipeline_destroy(p);
        CHECK(alive == 0);
    }
}

static void one_that_knows_no_exception_fails_too(int workers) {
    spdl_pipeline_desc desc = with_workers(workers);
    spdl_pipeline *p = nullptr;
    int zero = 0;
    auto make = [&](spdl_task *, void *, int **out) {
        *out = &zero;
        return SPDL_OK;
    };
    int *item;
    CHECK(spdl_pipeline_create(&p, &desc,
                               SPDL_STAGES(spdl_source<int>("make", make),
                                           SPDL_PIPE(throws_before_exception), SPDL_SINK(2))) ==
          SPDL_OK);
    CHECK(SPDL_NEXT(p, &item, SPDL_SECONDS(15)) == SPDL_E_STAGE);
    CHECK(std::strstr(spdl_pipeline_error(p)->text, "include <exception>") != nullptr);
    spdl_pipeline_destroy(p);
}

/* What a call has asked for before it threw is undone, its input freed once. */
static void what_a_call_asked_for_is_undone(int workers) {
    static const Act all[] = { DEFER, TAKE, ROUTE };
    for (const Act &act : all) {
        spdl_pipeline_desc desc = with_workers(workers);
        spdl_pipeline *p = nullptr;
        const spdl_stage row = SPDL_PIPE(acts).with_ctx(const_cast<Act *>(&act))
                                   .with_max_failures(-1).with_free_item(spdl_delete<Number>);
        spdl_stage rows[] = { SPDL_SOURCE(count_to_100).with_free_item(spdl_delete<Number>),
                              row.with_deferred(act == DEFER), SPDL_SINK(2),
                              SPDL_SINK(2), SPDL_SINK(2), SPDL_SINK(2) };
        size_t size = 3;
        if (act == ROUTE) {
            rows[1].kind = SPDL_KIND_BRANCH;
            rows[2] = SPDL_PATH("left");
            rows[3] = SPDL_PATH("right");
            rows[4] = SPDL_MERGE();
            size = 6;
        }
        CHECK(spdl_pipeline_create(&p, &desc, rows, size) == SPDL_OK);
        const Taken taken = take(p);
        CHECK(taken.count == 0 && taken.end == SPDL_END);
        spdl_pipeline_destroy(p);
        CHECK(alive == 0);
    }
}

/* Four of each, but a throw at the third of one that is odd. */
SPDL_FN(streams, Number, Number) {
    Number **state = reinterpret_cast<Number **>(spdl_call_state(task));
    if (*state == nullptr) *state = new Number(0);
    if (in->value % 2 == 1 && (*state)->value == 2) throw std::runtime_error("cut off");
    *out = new Number(in->value);
    return ++(*state)->value == 4 ? SPDL_OK : SPDL_AGAIN;
}

static void a_stream_may_throw(int workers) {
    spdl_pipeline_desc desc = with_workers(workers);
    spdl_pipeline *p = nullptr;
    CHECK(spdl_pipeline_create(
              &p, &desc,
              SPDL_STAGES(SPDL_SOURCE(count_to_100).with_free_item(spdl_delete<Number>),
                          SPDL_PIPE(streams).with_again(true).with_concurrency(2)
                              .with_output_order(SPDL_ORDER_COMPLETION)
                              .with_free_state(spdl_delete<Number>).with_max_failures(-1)
                              .with_free_item(spdl_delete<Number>),
                          SPDL_SINK(2))) == SPDL_OK);
    const Taken taken = take(p);
    CHECK(taken.count == 50 * 4 + 50 * 2 && taken.end == SPDL_END);
    spdl_pipeline_destroy(p);
    CHECK(alive == 0);
}

/* Epochs go on after calls that threw, and a stop at any point frees what there is. */
static void epochs_and_stops(int workers) {
    for (int until = 0; until < 170; until += 1 + until / 8) {
        spdl_pipeline_desc desc = with_workers(workers);
        spdl_pipeline *p = nullptr;
        int taken = 0, ends = 0;
        CHECK(spdl_pipeline_create(
                  &p, &desc,
                  SPDL_STAGES(SPDL_SOURCE(count_to_100).with_continuous(true).with_buffer_size(1)
                                  .with_free_item(spdl_delete<Number>),
                              SPDL_PIPE(fragile).with_concurrency(2)
                                  .with_max_failures(-1)
                                  .with_free_item(spdl_delete<Number>),
                              SPDL_SINK(1))) == SPDL_OK);
        while (taken < until) {
            spdl_result result;
            if (spdl_next<std::unique_ptr<Number> >(p, SPDL_SECONDS(15), &result)) ++taken;
            if (result == SPDL_OK) continue;
            CHECK(result == SPDL_END && taken == 80 * ++ends);
            if (result != SPDL_END) break;
        }
        spdl_pipeline_destroy(p);
        CHECK(alive == 0);
    }
}

static void a_source_may_throw(int workers) {
    spdl_pipeline_desc desc = with_workers(workers);
    spdl_pipeline *p = nullptr;
    CHECK(spdl_pipeline_create(
              &p, &desc,
              SPDL_STAGES(SPDL_SOURCE(source_throws).with_free_item(spdl_delete<Number>),
                          SPDL_SINK(2))) == SPDL_OK);
    const Taken taken = take(p);
    CHECK(taken.count == 5 && taken.end == SPDL_E_STAGE);
    CHECK(std::strstr(spdl_pipeline_error(p)->text, "unplugged") != nullptr);
    spdl_pipeline_destroy(p);
    CHECK(alive == 0);
}
#endif

/* A lambda with captures, one without in place, and a function, called by several threads. */
static void rows_may_be_lambdas(int workers) {
    spdl_pipeline_desc desc = with_workers(workers);
    spdl_pipeline *p = nullptr;
    std::atomic<long> seen(0);
    uint64_t made = 0;
    auto source = [&made](spdl_task *, void *, Number **out) mutable {
        if (made == 500) return SPDL_END;
        *out = new Number(static_cast<long>(made++));
        return SPDL_OK;
    };
    const auto add = [&seen](spdl_task *task, const Number *in, Number **out) {
        if (in->value % 5 == 4) return SPDL_SKIP;
        if (in->value < 0) return spdl_fail(task, "negative");
        ++seen;
        *out = new Number(in->value + 1);
        return SPDL_OK;
    };
    CHECK(spdl_pipeline_create(
              &p, &desc,
              SPDL_STAGES(spdl_source<Number>("numbers", source)
                              .with_free_item(spdl_delete<Number>),
                          spdl_pipe<const Number, Number>("add", add).with_concurrency(4)
                              .with_free_item(spdl_delete<Number>),
                          spdl_pipe<Number, Number>("pass", [](spdl_task *, Number *in,
                                                               Number **out) {
                              *out = in;
                              return SPDL_OK;
                          }),
                          SPDL_SINK(3))) == SPDL_OK);
    CHECK(spdl__pipeline_find(p, "add") == 1 && spdl__pipeline_find(p, "pass") == 2);
    const Taken taken = take(p);
    CHECK(taken.count == 400 && taken.sum == 100000);
    CHECK(seen == 400 && made == 500);
    spdl_pipeline_destroy(p);
    CHECK(alive == 0);
}

/* A class with stages: the row has its functions and the object. */
struct Loader {
    int factor;
    uint64_t count;
    spdl_result next(spdl_task *task, void *, Number **out) const {
        if (spdl_sequence(task) == count) return SPDL_END;
        *out = new Number(1);
        return SPDL_OK;
    }
    spdl_result scale(spdl_task *, Number *in, Number **out) {
        in->value *= factor;
        *out = in;
        return SPDL_OK;
    }
    /* A lambda that ends with this function: the row has a copy, which has `this`. */
    spdl_stage next_row() {
        const auto make = [this](spdl_task *task, void *in, Number **out) {
            return next(task, in, out);
        };
        return spdl_source<Number>("next", make).with_free_item(spdl_delete<Number>);
    }
};

static void functions_of_a_class_are_stages(int workers) {
    spdl_pipeline_desc desc = with_workers(workers);
    Loader loader = { 3, 100 };
    for (int round = 0; round < 2; ++round) {
        spdl_pipeline *p = nullptr;
        const spdl_stage source =
            round == 0 ? loader.next_row()
                       : spdl_source<Number>("next", &Loader::next, &loader)
                             .with_free_item(spdl_delete<Number>);
        char junk[4096]; /* where the lambda of next_row() was */
        std::memset(junk, round, sizeof(junk));
        CHECK(spdl_pipeline_create(
                  &p, &desc,
                  SPDL_STAGES(source,
                              spdl_pipe<Number, Number>("scale", &Loader::scale, &loader)
                                  .with_concurrency(2),
                              SPDL_SINK(2))) == SPDL_OK);
        CHECK(spdl__pipeline_find(p, "next") == 0 && spdl__pipeline_find(p, "scale") == 1);
        const Taken taken = take(p);
        CHECK(taken.count == 100 && taken.sum == 300 && junk[77] == round);
        spdl_pipeline_destroy(p);
        CHECK(alive == 0);
    }
}

/* Captures in place are copied into the row; a larger callable is used where it is. */
static void captures_are_copied_or_pointed_to(int workers) {
    spdl_pipeline_desc desc = with_workers(workers);
    spdl_pipeline *p = nullptr;
    std::atomic<int> calls(0);
    const std::string text = "a string has a destructor";
    int until = 7;
    long more = 5;
    auto large = [text, &calls](spdl_task *, Number *in, Number **out) {
        in->value += static_cast<long>(text.size());
        ++calls;
        *out = in;
        return SPDL_OK;
    };
    CHECK(spdl_pipeline_create(
              &p, &desc,
              SPDL_STAGES(spdl_source<Number>("count",
                                              [until, more](spdl_task *task, void *, Number **out) {
                                                  if (spdl_sequence(task) ==
                                                      static_cast<uint64_t>(until))
                                                      return SPDL_END;
                                                  *out = new Number(more);
                                                  return SPDL_OK;
                                              }).with_free_item(spdl_delete<Number>),
                          spdl_pipe<Number, Number>("large", &large), SPDL_SINK(2))) == SPDL_OK);
    until = 0;
    more = 0;
    const Taken taken = take(p);
    CHECK(taken.count == 7 && taken.sum == 7 * (5 + 25) && calls == 7);
    spdl_pipeline_destroy(p);
    CHECK(alive == 0);
}

/* A lambda that gathers: what it holds is asked for and freed when its run ends. */
static void what_a_lambda_gathered_is_freed(int workers) {
    for (int taken = 20; taken <= 80; taken += 60) {
        spdl_pipeline_desc desc = with_workers(workers);
        spdl_pipeline *p = nullptr;
        Number *kept[32];
        int held = 0;
        auto last_first = [&kept, &held](spdl_task *task, Number *in, Number **out) {
            const bool last = spdl_flushing(task);
            if (!last) spdl_take(task);
            if (!last && held < 32) {
                kept[held++] = in;
                return SPDL_SKIP;
            }
            if (held == 0) return SPDL_SKIP;
            *out = kept[held - 1];
            if (last) --held;
            else kept[held - 1] = in;
            return last ? SPDL_AGAIN : SPDL_OK;
        };
        CHECK(spdl_pipeline_create(
                  &p, &desc,
                  SPDL_STAGES(SPDL_SOURCE(count_to_100).with_free_item(spdl_delete<Number>),
                              spdl_pipe<Number, Number>("last first", last_first)
                                  .with_flush(true).with_again(true)
                                  .with_free_item(spdl_delete<Number>),
                              SPDL_SINK(2))) == SPDL_OK);
        for (int round = 0; round < 2; ++round) {
            for (int i = 0; i < taken; ++i) {
                const std::unique_ptr<Number> number =
                    spdl_next<std::unique_ptr<Number> >(p, SPDL_SECONDS(15));
                CHECK(number && (i >= 68 || number->value == i + 31));
            }
            if (round == 0) CHECK(spdl_pipeline_rewind(p, 0, SPDL_FOREVER) == SPDL_OK);
        }
        spdl_pipeline_destroy(p);
        CHECK(alive == 0);
    }
}

/* Rows that a header for C and C++ can have. */
static void fields_by_spdl_set(int workers) {
    spdl_pipeline_desc desc = with_workers(workers);
    spdl_pipeline *p = nullptr;
    const spdl_stage rows[] = {
        SPDL_SOURCE(count_to_100, SPDL_SET(name, "numbers"), SPDL_SET(buffer_size, 5),
                    SPDL_SET(free_item, spdl_delete<Number>)),
        SPDL_BATCH(8, SPDL_SET(drop_last, true)), SPDL_UNBATCH(SPDL_SET(name, "apart")),
        SPDL_SINK(2)
    };
    CHECK(std::strcmp(rows[0].name, "numbers") == 0 && rows[0].buffer_size == 5);
    CHECK(rows[0].free_item == spdl_delete<Number> && rows[0].kind == SPDL_KIND_SOURCE);
    CHECK(rows[1].size == 8 && rows[1].drop_last && rows[3].buffer_size == 2);
    CHECK(std::strcmp(rows[2].name, "apart") == 0 && rows[1].line > rows[0].line);
    CHECK(spdl_pipeline_create(&p, &desc, SPDL_TABLE(rows)) == SPDL_OK);
    CHECK(take(p).count == 96);
    spdl_pipeline_destroy(p);
    CHECK(alive == 0);
}

static void functions_fit_too() {
    spdl_pipeline_desc desc = with_workers(1);
    spdl_pipeline *p = nullptr;
    uint64_t until = 10;
    spdl_stage rows[] = { SPDL_SOURCE(count_to_100).with_free_item(spdl_delete<Number>),
                          spdl_pipe<Number, Number>("same", [](spdl_task *, Number *in,
                                                               Number **out) {
                              *out = in;
                              return SPDL_OK;
                          }),
                          SPDL_SINK(3) };
    CHECK(spdl_pipeline_create(&p, &desc, SPDL_TABLE(rows)) == SPDL_OK);
    CHECK(take(p).count == 100);
    spdl_pipeline_destroy(p);
    rows[0] = spdl_source<Number>("count", [](spdl_task *task, void *, Number **out) {
        if (spdl_sequence(task) == 7) return SPDL_END;
        *out = new Number(2);
        return SPDL_OK;
    }).with_free_item(spdl_delete<Number>);
    CHECK(spdl_pipeline_create(&p, &desc, SPDL_TABLE(rows)) == SPDL_OK);
    CHECK(take(p).sum == 14);
    spdl_pipeline_destroy(p);
    const auto bound = [&until](spdl_task *task, void *in, Number **out) {
        if (spdl_sequence(task) == until) return SPDL_END;
        return count_to_100(task, in, out);
    };
    rows[0] = spdl_source<Number>("bound", bound).with_free_item(spdl_delete<Number>);
    CHECK(spdl_pipeline_create(&p, &desc, SPDL_TABLE(rows)) == SPDL_OK);
    CHECK(take(p).count == 10);
    spdl_pipeline_destroy(p);
    rows[0] = spdl_source<Number>("function", count_to_100).with_free_item(spdl_delete<Number>);
    CHECK(spdl_pipeline_create(&p, &desc, SPDL_TABLE(rows)) == SPDL_OK);
    CHECK(take(p).count == 100);
    spdl_pipeline_destroy(p);
    CHECK(alive == 0);
}

/* The row has its callable and its ctx: the functions of the row get the ctx. */
static void a_lambda_may_have_a_ctx() {
    spdl_pipeline_desc desc = with_workers(1);
    spdl_pipeline *p = nullptr;
    long captured = 1, of_row = 10, dropped = 0;
    auto add = [&](spdl_task *task, Number *in, Number **out) {
        if (in->value % 10 == 9) return spdl_fail(task, "a nine");
        in->value += captured + *static_cast<long *>(spdl_ctx(task));
        *out = in;
        return SPDL_OK;
    };
    spdl_stage rows[] = { SPDL_SOURCE(count_to_100).with_free_item(spdl_delete<Number>),
                          spdl_pipe<Number, Number>("add", add).with_ctx(&of_row),
                          SPDL_SINK(3) };
    CHECK(spdl_pipeline_create(&p, &desc, rows) == SPDL_OK);
    CHECK(take(p).sum == (0 + 8) * 9 / 2 + 9 * 11);
    spdl_pipeline_destroy(p);
    rows[1] = rows[1].with_max_failures(-1).with_on_drop(
        [](void *ctx, void *, const spdl_error *) { ++*static_cast<long *>(ctx); });
    of_row = 0;
    rows[1].ctx = &dropped;
    CHECK(spdl_pipeline_create(&p, &desc, rows) == SPDL_OK);
    CHECK(take(p).count == 90 && dropped == 10);
    spdl_pipeline_destroy(p);
    CHECK(alive == 0);
}

static spdl_result created(const spdl_stage &before, const spdl_stage &after, const char *text) {
    spdl_error error = {};
    spdl_pipeline_desc desc = with_workers(0);
    spdl_pipeline *p = nullptr;
    desc.error = &error;
    const spdl_result result = spdl_pipeline_create(
        &p, &desc, SPDL_STAGES(SPDL_SOURCE(count_to_100), before, after, SPDL_SINK(1)));
    if (text != nullptr && std::strstr(error.text, text) == nullptr) {
        ++failures;
        std::printf("'%s' is not in '%s'\n", text, error.text);
    }
    spdl_pipeline_destroy(p);
    return result;
}

SPDL_FN(spelled, Number, Number) {
    *out = in;
    return SPDL_OK;
}

SPDL_FN(other_spelled, other::Number, void) { return SPDL_OK; }

/* Types of lambdas and of SPDL_FN are compared, whatever namespace they were named in. */
static void types_are_checked() {
    auto pass = [](spdl_task *, void *, void **) { return SPDL_OK; };
    auto same = [](spdl_task *, Number *in, Number **out) { *out = in; return SPDL_OK; };
    auto keep = [](spdl_task *, const Number *, Number **) { return SPDL_SKIP; };
    auto else_ = [](spdl_task *, other::Number *, other::Number **) { return SPDL_OK; };
    auto plain = [](spdl_task *, Number *, other::Number **) { return SPDL_SKIP; };
    auto batch = [](spdl_task *, spdl_batch *, spdl_batch **) { return SPDL_OK; };
    const spdl_stage number = spdl_pipe<Number, Number>("same", same);
    const spdl_stage stranger = spdl_pipe<other::Number, other::Number>("stranger", else_);
    const spdl_stage batches = spdl_pipe<spdl_batch, spdl_batch>("batches", batch);
    const spdl_stage any = spdl_pipe<void, void>("any", pass);
    char here[100];
    std::snprintf(here, sizeof here, "cpp.cpp:%d: stage 2 'stranger' takes '", number.line + 1);
    CHECK(number.line == __LINE__ - 6);
    CHECK(created(number, number, nullptr) == SPDL_OK);
    CHECK(created(number, spdl_pipe<const Number, Number>("keep", keep), nullptr) == SPDL_OK);
    CHECK(created(number, any, nullptr) == SPDL_OK);
    CHECK(created(any, stranger, nullptr) == SPDL_OK);
    CHECK(created(SPDL_PIPE(spelled), number, nullptr) == SPDL_OK);
    CHECK(created(number, SPDL_PIPE(spelled), nullptr) == SPDL_OK);
    CHECK(created(SPDL_BATCH(2), batches, nullptr) == SPDL_OK);
    CHECK(created(number, stranger, here) == SPDL_E_TYPE);
    CHECK(created(number, stranger, "takes 'other::Number *' but") == SPDL_E_TYPE);
    CHECK(created(number, batches, "takes 'spdl_batch *' but") == SPDL_E_TYPE);
    CHECK(created(SPDL_PIPE(spelled), stranger, "yields 'Number *'") == SPDL_E_TYPE);
    CHECK(created(number, SPDL_PIPE(other_spelled), "yields 'Number *'") == SPDL_E_TYPE);
    CHECK(created(spdl_pipe<Number, other::Number>("plain", plain),
                  SPDL_BATCH_OF(other::Number, 2), nullptr) == SPDL_OK);
    CHECK(created(SPDL_BATCH_OF(other::Number, 2), batches, "takes 'other::Number *' but") ==
          SPDL_E_TYPE);
    CHECK(created(SPDL_BATCH(2).with_item_bytes(2), batches,
                  "item_bytes is 2, but 'Number' of stage 0 'count_to_100' has 8 bytes") ==
          SPDL_E_INVALID);
    CHECK(created(spdl_pipe<Number, Number>("same", same).with_item_bytes(4), any,
                  "item_bytes is 4, but 'Number' of stage 1 'same' has 8 bytes") ==
          SPDL_E_INVALID);
}

/* Each row says the line where it begins, also one of several lines, and of a lambda in place. */
static void rows_have_their_own_lines() {
    auto same = [](spdl_task *, Number *in, Number **out) { *out = in; return SPDL_OK; };
    const int line = __LINE__;
    const auto rows = SPDL_STAGES(
        SPDL_SOURCE(count_to_100).with_free_item(spdl_delete<Number>),
        spdl_pipe<Number, Number>("same", same),
        spdl_pipe<Number, Number>("place", [](spdl_task *, Number *in, Number **out) {
            *out = in;
            return SPDL_OK;
        }).with_concurrency(2),
        SPDL_PIPE(spelled),
        SPDL_SINK(1));
    const int lines[] = { line + 2, line + 3, line + 4, line + 8, line + 9 };
    spdl_pipeline_desc desc = with_workers(0);
    spdl_error error = {};
    spdl_pipeline *p = nullptr;
    char here[100];
    for (int i = 0; i < 5; ++i) CHECK(rows.row[i].line == lines[i]);
    desc.error = &error;
    std::snprintf(here, sizeof here, "cpp.cpp:%d: stage 1 'batches' takes", __LINE__ + 3);
    const spdl_result result = spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_SOURCE(count_to_100).with_free_item(spdl_delete<Number>),
        spdl_pipe<spdl_batch, Number>("batches", [](spdl_task *, spdl_batch *, Number **) {
            return SPDL_SKIP;
        }),
        SPDL_SINK(1)));
    CHECK(result == SPDL_E_TYPE && std::strstr(error.text, here) != nullptr);
}

static void next_says_why_there_is_none() {
    spdl_pipeline_desc desc = with_workers(1);
    spdl_pipeline *p = nullptr;
    spdl_result result = SPDL_OK;
    std::atomic<bool> go(false);
    auto waits = [&](spdl_task *task, void *, Number **out) {
        if (spdl_sequence(task) == 1) return SPDL_END;
        while (!go) {}
        *out = new Number(5);
        return SPDL_OK;
    };
    CHECK(spdl_pipeline_create(&p, &desc,
                               SPDL_STAGES(spdl_source<Number>("waits", waits)
                                               .with_free_item(spdl_delete<Number>),
                                           SPDL_SINK(1))) == SPDL_OK);
    CHECK(!spdl_next<std::unique_ptr<Number> >(p, 1000000, &result));
    CHECK(result == SPDL_TIMEOUT);
    go = true;
    const std::shared_ptr<Number> number = spdl_next<std::shared_ptr<Number> >(p);
    CHECK(number && number->value == 5);
    Number *none = number.get();
    CHECK(SPDL_NEXT(p, &none, SPDL_FOREVER) == SPDL_END && none == number.get());
    CHECK(!spdl_next<std::unique_ptr<Number> >(p, SPDL_FOREVER, &result) && result == SPDL_END);
    spdl_pipeline_destroy(p);
}

static spdl_result turns(spdl_task *, other::Number *, Number **) { return SPDL_SKIP; }

static void next_is_typed() {
    spdl_pipeline_desc desc = with_workers(2);
    spdl_pipeline *p = nullptr;
    const Number *number = nullptr;
    Number *kept[100];
    void *plain = nullptr;
    int taken = 0;
    CHECK(spdl_pipeline_create(
              &p, &desc,
              SPDL_STAGES(SPDL_SOURCE(count_to_100).with_free_item(spdl_delete<Number>),
                          SPDL_SINK(1))) == SPDL_OK);
    CHECK(SPDL_NEXT(p, &number, SPDL_SECONDS(15)) == SPDL_OK && number->value == 0);
    delete number;
    CHECK(SPDL_NEXT(p, &plain, SPDL_SECONDS(15)) == SPDL_OK);
    spdl_delete<Number>(plain);
    other::Number *stranger = nullptr;
    spdl_result result = SPDL_OK;
    CHECK(SPDL_NEXT(p, &stranger, SPDL_SECONDS(15)) == SPDL_E_TYPE && stranger == nullptr);
    CHECK(!spdl_next<std::unique_ptr<other::Number> >(p, SPDL_FOREVER, &result));
    CHECK(result == SPDL_E_TYPE && !spdl_pipeline_failed(p));
    CHECK(spdl_pipeline_error(p)->result == SPDL_E_TYPE);
    CHECK(std::strcmp(spdl_pipeline_error(p)->text, "SPDL_NEXT into a 'other::Number *', but stage "
                                                    "0 'count_to_100' yields 'Number *'") == 0);
#ifdef __cpp_exceptions
    spdl_rethrow(p);
#endif
    CHECK(SPDL_NEXT(p, &kept[taken++], SPDL_SECONDS(15)) == SPDL_OK);
    CHECK(spdl_pipeline_error(p)->result == SPDL_OK);
    while (SPDL_NEXT(p, &kept[taken], SPDL_SECONDS(15)) == SPDL_OK) ++taken;
    CHECK(taken == 98);
    for (int i = 0; i < taken; ++i) delete kept[i];
    spdl_pipeline_destroy(p);
    CHECK(alive == 0);

    /* failures that are delivered may have another type */
    desc.deliver_failures = true;
    CHECK(spdl_pipeline_create(
              &p, &desc,
              SPDL_STAGES(SPDL_FEED(other::Number),
                          spdl_pipe<other::Number, Number>("turns", turns), SPDL_SINK(1))) ==
          SPDL_OK);
    CHECK(!spdl_next<std::unique_ptr<Number> >(p, 0, &result));
    CHECK(result == SPDL_E_TYPE);
    spdl_pipeline_destroy(p);
}

/* With its input, which next gives; nothing is thrown again. */
static void failures_are_delivered(int workers) {
    spdl_pipeline_desc desc = with_workers(workers);
    spdl_pipeline *p = nullptr;
    auto odd = [](spdl_task *task, Number *in, Number **out) -> spdl_result {
        *out = in;
        if (in->value % 2 == 0) return SPDL_OK;
#ifdef __cpp_exceptions
        throw std::runtime_error("odd");
#endif
        return spdl_fail(task, "odd");
    };
    desc.deliver_failures = true;
    CHECK(spdl_pipeline_create(
              &p, &desc,
              SPDL_STAGES(SPDL_FEED(Number).with_free_item(spdl_delete<Number>),
                          spdl_pipe<Number, Number>("odd", odd).with_concurrency(1),
                          SPDL_SINK(9))) == SPDL_OK);
    for (long i = 0; i < 4; ++i) {
        Number *number = nullptr;
        CHECK(spdl_pipeline_push(p, new Number(i), SPDL_FOREVER) == SPDL_OK);
        CHECK(SPDL_NEXT(p, &number, SPDL_SECONDS(15)) == (i % 2 ? SPDL_E_STAGE : SPDL_OK));
        CHECK(number != nullptr && number->value == i);
        if (i % 2) CHECK(std::strstr(spdl_pipeline_error(p)->text, ": odd") != nullptr);
#ifdef __cpp_exceptions
        spdl_rethrow(p);
#endif
        delete number;
    }
    spdl_pipeline_destroy(p);
    CHECK(alive == 0);
}

static void a_pipeline_may_have_an_owner() {
    spdl_pipeline_desc desc = with_workers(1);
    spdl_pipeline *p = nullptr;
    CHECK(spdl_pipeline_create(
              &p, &desc,
              SPDL_STAGES(SPDL_SOURCE(count_to_100).with_free_item(spdl_delete<Number>),
                          SPDL_SINK(1))) == SPDL_OK);
    std::unique_ptr<spdl_pipeline, spdl_deleter> owner(p);
    CHECK(spdl_next<std::unique_ptr<Number> >(owner.get())->value == 0);
    owner.reset();
    CHECK(alive == 0);
}

int main() {
    for (const int workers : crowds) {
#ifdef __cpp_exceptions
        a_throw_is_a_failure(workers);
        budgets_count_throws(workers);
        what_is_no_exception_has_a_text(workers);
        one_that_knows_no_exception_fails_too(workers);
        an_exception_is_thrown_again(workers, 0);
        an_exception_is_thrown_again(workers, 2);
        an_exception_is_thrown_again(workers, 10);
        what_a_call_asked_for_is_undone(workers);
        a_stream_may_throw(workers);
        epochs_and_stops(workers);
        a_source_may_throw(workers);
#endif
        rows_may_be_lambdas(workers);
        functions_of_a_class_are_stages(workers);
        captures_are_copied_or_pointed_to(workers);
        what_a_lambda_gathered_is_freed(workers);
        fields_by_spdl_set(workers);
        failures_are_delivered(workers);
    }
#ifdef __cpp_exceptions
    what_was_thrown_stays();
#endif
    functions_fit_too();
    a_lambda_may_have_a_ctx();
    rows_have_their_own_lines();
    types_are_checked();
    next_says_why_there_is_none();
    next_is_typed();
    a_pipeline_may_have_an_owner();
    return failures == 0 ? 0 : 1;
}
