// Every kind of row and every field, in C++ before and since designated initialisers: compiled by
// check-warnings, run by check-headers.
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"

#include <atomic>
#include <cstdio>
#include <cstring>

struct Number {
    long value;
};

static std::atomic<int> alive(0);

static Number *make(long value) {
    ++alive;
    return new Number{ value };
}

static void destroy(void *item) {
    --alive;
    delete static_cast<Number *>(item);
}

static spdl_result init(void *, int, void **) { return SPDL_OK; }
static void fini(void *, int, void *) {}

SPDL_FN(count, void, Number) {
    if (spdl_sequence(task) == 10) return SPDL_END;
    *out = make(static_cast<long>(spdl_sequence(task)));
    return SPDL_OK;
}

SPDL_FN(by_parity, Number, Number) {
    *out = in;
    return spdl_route(task, static_cast<int>(in->value % 2));
}

SPDL_FN(twice, Number, Number) {
    void **state = spdl_call_state(task);
    *out = make(*state == nullptr ? in->value : in->value + 100);
    if (*state != nullptr) return SPDL_OK;
    *state = make(0);
    return SPDL_AGAIN;
}

SPDL_FN(pass, Number, Number) {
    *out = in;
    return SPDL_OK;
}

SPDL_FN(later, Number, Number) {
    const spdl_deferred deferred = spdl_defer(task);
    return spdl_complete(deferred, SPDL_OK, in) == SPDL_OK ? SPDL_PENDING : SPDL_E_INVALID;
}

SPDL_FN(halve, spdl_batch, spdl_batch) {
    *out = in;
    return spdl_route(task, static_cast<int>(spdl_sequence(task) % 2));
}

static void dropped(void *, void *, const spdl_error *) {}

static const spdl_stage plain[] = {
#if __cplusplus >= 202002L
    SPDL_SOURCE(count, .buffer_size = 1, .continuous = true, .free_item = destroy),
    SPDL_PIPE(twice, .concurrency = 1, .again = true, .free_item = destroy,
              .free_state = destroy, .init = init, .fini = fini),
    SPDL_BRANCH(by_parity, .max_failures = 2, .on_drop = dropped),
    SPDL_PATH("even", .buffer_size = 4),
    SPDL_PIPE(later, .concurrency = 4, .output_order = SPDL_ORDER_COMPLETION, .deferred = true),
    SPDL_PATH("odd"),
    SPDL_PIPE(pass, .max_failures = -1),
    SPDL_MERGE(.output_order = SPDL_ORDER_COMPLETION),
    SPDL_BATCH(2, .item_bytes = 0, .drop_last = false),
    SPDL_BATCH(1),
    SPDL_UNBATCH(),
    SPDL_BRANCH(halve),
    SPDL_PATH("left"),
    SPDL_PATH("right"),
    SPDL_MERGE(),
    SPDL_SINK(1),
#else
    SPDL_SOURCE(count).with_buffer_size(1).with_continuous(true).with_free_item(destroy),
    SPDL_PIPE(twice).with_concurrency(1).with_again(true).with_free_item(destroy)
        .with_free_state(destroy).with_init(init).with_fini(fini),
    SPDL_BRANCH(by_parity).with_max_failures(2).with_on_drop(dropped),
    SPDL_PATH("even").with_buffer_size(4),
    SPDL_PIPE(later).with_concurrency(4).with_output_order(SPDL_ORDER_COMPLETION)
        .with_deferred(true),
    SPDL_PATH("odd"),
    SPDL_PIPE(pass).with_max_failures(-1),
    SPDL_MERGE().with_output_order(SPDL_ORDER_COMPLETION),
    SPDL_BATCH(2).with_item_bytes(0).with_drop_last(false),
    SPDL_BATCH(1),
    SPDL_UNBATCH(),
    SPDL_BRANCH(halve),
    SPDL_PATH("left"),
    SPDL_PATH("right"),
    SPDL_MERGE(),
    SPDL_SINK(1),
#endif
};

static const spdl_stage fed[] = {
#if __cplusplus >= 202002L
    SPDL_FEED(Number, .name = "feed", .buffer_size = 2, .drop_oldest = true, .free_item = destroy),
    SPDL_PIPE(pass, .ctx = nullptr, .flush = false),
    SPDL_BRANCH(by_parity),
    SPDL_PATH("a"),
    SPDL_PATH("b"),
    SPDL_MERGE(),
#else
    SPDL_FEED(Number).with_name("feed").with_buffer_size(2).with_drop_oldest(true)
        .with_free_item(destroy),
    SPDL_PIPE(pass).with_ctx(nullptr).with_flush(false),
    SPDL_BRANCH(by_parity),
    SPDL_PATH("a"),
    SPDL_PATH("b"),
    SPDL_MERGE(),
#endif
    SPDL_SINK(4),
};

static spdl_pipeline *inner;

static spdl_result next(void *, void **item, int64_t timeout_ns) {
    return spdl_pipeline_next(inner, item, timeout_ns);
}

static const spdl_stage joined[] = {
#if __cplusplus >= 202002L
    SPDL_FROM(Number, next, nullptr, .name = "inner", .continuous = true, .free_item = destroy),
    SPDL_BATCH(4),
    SPDL_SINK(1),
#else
    SPDL_FROM(Number, next, nullptr).with_name("inner").with_continuous(true)
        .with_free_item(destroy),
    SPDL_BATCH(4),
    SPDL_SINK(1),
#endif
};

static const spdl_stage blocking[] = {
#if __cplusplus >= 202002L
    SPDL_SOURCE(count, .threads = 1, .continuous = true, .free_item = destroy),
#else
    SPDL_SOURCE(count).with_threads(1).with_continuous(true).with_free_item(destroy),
#endif
    SPDL_SINK(2),
};

/* The sum of what one epoch of batches holds. */
static long sum_of_epoch(spdl_pipeline *p) {
    long sum = 0;
    void *item;
    while (spdl_pipeline_next(p, &item, SPDL_SECONDS(10)) == SPDL_OK) {
        const spdl_batch *batch = static_cast<const spdl_batch *>(item);
        for (size_t i = 0; i < batch->count; ++i)
            sum += static_cast<const Number *>(batch->items[i])->value;
        spdl_batch_free(item);
    }
    return sum;
}

/* Two epochs: 0 to 9, and each again with 100 more. */
static bool runs(int workers) {
    spdl_pipeline_desc desc = {};
    spdl_pipeline *p = nullptr;
    desc.workers = workers == 0 ? SPDL_INLINE : workers;
    if (spdl_pipeline_create(&p, &desc, SPDL_TABLE(plain)) != SPDL_OK) return false;
    const bool right = sum_of_epoch(p) == 1090 && sum_of_epoch(p) == 1090;
    if (!right) std::puts(spdl_pipeline_error(p)->text);
    spdl_pipeline_destroy(p);
    return right;
}

static bool can_be_joined() {
    spdl_pipeline *p = nullptr;
    spdl_pipeline_desc desc = {};
    desc.workers = 1;
    if (spdl_pipeline_create(&inner, &desc, SPDL_TABLE(blocking)) != SPDL_OK ||
        spdl_pipeline_create(&p, &desc, SPDL_TABLE(joined)) != SPDL_OK)
        return false;
    const bool right = sum_of_epoch(p) == 45;
    spdl_pipeline_destroy(p);
    spdl_pipeline_destroy(inner);
    return right;
}

static bool can_be_fed() {
    spdl_pipeline *p = nullptr;
    void *item;
    long sum = 0;
    spdl_pipeline_desc desc = {};
    desc.workers = SPDL_INLINE;
    if (spdl_pipeline_create(&p, &desc, SPDL_TABLE(fed)) != SPDL_OK) return false;
    for (long i = 1; i <= 3; ++i) /* without a worker the first one makes way */
        if (spdl_pipeline_push(p, make(i), 0) != SPDL_OK) return false;
    spdl_pipeline_push_end(p);
    while (spdl_pipeline_next(p, &item, SPDL_SECONDS(10)) == SPDL_OK) {
        sum += static_cast<Number *>(item)->value;
        destroy(item);
    }
    spdl_pipeline_destroy(p);
    return sum == 5;
}

// Fields of a row of the library that are set stay.
static bool keep_their_fields() {
#if __cplusplus >= 202002L
    const spdl_stage rows[] = {
        SPDL_TAR(nullptr, .item_bytes = 64, .again = true, .free_item = destroy,
                 .free_state = destroy),
    };
    return rows[0].again && rows[0].free_item == destroy && rows[0].free_state == destroy &&
           rows[0].item_bytes == 64;
#else
    return true;
#endif
}

// A list of files, and what their rows make of them: lines here.
static bool can_be_files() {
    static const spdl_records_desc short_lines = { false, 200,
                                                   { nullptr, nullptr, nullptr }, nullptr };
    spdl_pipeline_desc desc = {};
    spdl_files *files = nullptr;
    spdl_pipeline *p = nullptr;
    uint64_t count = 0;
    void *item;
    desc.workers = 1;
    if (spdl_files_open(&files, __FILE__, nullptr) != SPDL_OK) return false;
    const spdl_stage stages[] = {
#if __cplusplus >= 202002L
        SPDL_FILES(files, .continuous = false),
        SPDL_LINES(&short_lines, .name = "short"),
#else
        SPDL_FILES(files).with_continuous(false),
        SPDL_LINES(&short_lines).with_name("short"),
#endif
        SPDL_SINK(3),
    };
    const spdl_stage others[] = { SPDL_COUNT(9), SPDL_FILES_AT(files), SPDL_TAR(nullptr),
                                  SPDL_READ() };
    if (others[1].ctx != files || others[1].kind != SPDL_KIND_PIPE || others[1].again ||
        others[2].free_item != spdl_record_free || others[2].free_state != spdl__records_close ||
        !others[2].again || others[3].free_item != spdl_record_free || others[3].again ||
        !keep_their_fields() ||
        spdl_pipeline_create(&p, &desc, stages) != SPDL_OK)
        return false;
    for (; spdl_pipeline_next(p, &item, SPDL_SECONDS(10)) == SPDL_OK; ++count)
        spdl_record_free(item);
    const bool right = count > 100;
    spdl_pipeline_destroy(p);
    spdl_files_close(files);
    return right;
}

#if __cplusplus >= 202002L
/* Compiled without a warning: fields that are left out have initialisers. */
static bool can_leave_fields_out() {
    const spdl_ring_desc ring{ .capacity = 3 };
    const spdl_pool_desc pool{ .workers = 1, .policy = { .polite = true } };
    const spdl_pipeline_desc pipeline{ .workers = 1, .logger = { .user = nullptr } };
    const spdl_sampler_desc sampler{ .count = 9, .ranks = { .rank = 1 } };
    const spdl_loader_desc loader{ .pipeline = { .workers = 1 }, .slot_count = 2 };
    const spdl_files_desc files{ .recursive = true };
    const spdl_npz_desc npz{ .no_crc = true };
    return ring.item_bytes == 0 && pool.queue_size == 0 && pipeline.seed == 0 &&
           sampler.seed == 0 && loader.max_restarts == 0 && files.error == nullptr &&
           npz.max_bytes == 0;
}
#else
static bool can_leave_fields_out() { return true; }
#endif

/* The items of a sampler, as before C++20 and since. */
static bool can_be_sampled() {
    spdl_sampler_desc desc = spdl_sampler_desc();
    spdl_pipeline *p;
    spdl_sampler *s;
    spdl_index *it;
    uint64_t taken = 0;
    desc.count = 9;
    if (spdl_sampler_create(&s, &desc) != SPDL_OK) return false;
#if __cplusplus >= 202002L
    const spdl_stage rows[] = { SPDL_INDEX(s, .name = "order"), SPDL_SINK(2) };
#else
    const spdl_stage rows[] = { SPDL_INDEX(s).with_name("order"), SPDL_SINK(2) };
#endif
    if (spdl_pipeline_create(&p, nullptr, SPDL_TABLE(rows)) != SPDL_OK) return false;
    while (SPDL_NEXT(p, &it, SPDL_SECONDS(10)) == SPDL_OK) {
        taken += it->index == taken;
        spdl_buffer_free(it);
    }
    const bool named = spdl__pipeline_find(p, "order") == 0;
    spdl_pipeline_destroy(p);
    spdl_sampler_destroy(s);
    return taken == 9 && named;
}

int main() {
    return can_leave_fields_out() && can_be_sampled() && runs(0) && can_be_fed() &&
                   can_be_joined() && can_be_files() &&
                   alive == 0
               ? 0
               : 1;
}
