/* Allocators: every allocation may fail, everything is freed with the size and the alignment it was
   asked for, and what runs allocates nothing. */
#include <stddef.h>

static void *alloc_malloc(size_t bytes);
static void alloc_free(void *memory);

#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#define SPDL_MALLOC(bytes) alloc_malloc(bytes)
#define SPDL_FREE(memory) alloc_free(memory)
#include "../spdl.h"
#include "test.h"

/* What stands behind the default allocator in this file. */
static int default_mallocs, default_frees;

static void *alloc_malloc(size_t bytes) {
    __atomic_fetch_add(&default_mallocs, 1, __ATOMIC_RELAXED);
    return malloc(bytes);
}

static void alloc_free(void *memory) {
    __atomic_fetch_add(&default_frees, 1, __ATOMIC_RELAXED);
    free(memory);
}

/* --- an allocator that counts, checks and fails --- */

typedef struct counting {
    int allocs, frees; /* atomic */
    int64_t live;      /* bytes, atomic */
    int fail_at;       /* the number of the allocation that fails, from 0; -1: none */
    bool for_good;     /* and so do all behind it */
    bool fail_all;     /* from now on */
} counting;

/* In front of every block. A block lies on an odd multiple of its alignment, never on an even one,
   so that nobody can rely on more than was asked for. */
typedef struct block {
    void *start;
    size_t bytes, align;
    counting *owner;
} block;

static void *counting_alloc(size_t bytes, size_t align, void *user) {
    counting *c = (counting *)user;
    const int number = __atomic_fetch_add(&c->allocs, 1, __ATOMIC_RELAXED);
    block *head;
    char *start;
    uintptr_t at;
    CHECK(bytes > 0);
    CHECK(align >= sizeof(void *) && (align & (align - 1)) == 0);
    const int fail_at = __atomic_load_n(&c->fail_at, __ATOMIC_RELAXED);
    const bool fails = number == fail_at || (c->for_good && fail_at >= 0 && number > fail_at);
    if (fails || __atomic_load_n(&c->fail_all, __ATOMIC_RELAXED)) {
        __atomic_fetch_add(&c->frees, 1, __ATOMIC_RELAXED); /* nothing to free */
        return NULL;
    }
    start = (char *)test_memory(sizeof(void *), bytes + sizeof(block) + 3 * align);
    REQUIRE(start != NULL);
    at = ((uintptr_t)start + sizeof(block) + align - 1) & ~(uintptr_t)(align - 1);
    if ((at & align) == 0) at += align;
    head = (block *)(void *)(start + (at - (uintptr_t)start) - sizeof(block));
    head->start = start;
    head->bytes = bytes;
    head->align = align;
    head->owner = c;
    __atomic_fetch_add(&c->live, (int64_t)bytes, __ATOMIC_RELAXED);
    memset(head + 1, 0xa5, bytes);
    return head + 1;
}

static void counting_free(void *memory, size_t bytes, void *user) {
    counting *c = (counting *)user;
    block *head = (block *)memory - 1;
    REQUIRE(memory != NULL && head->owner == c);
    CHECK_EQ(bytes, head->bytes);
    head->owner = NULL;
    memset(memory, 0x5a, bytes);
    __atomic_fetch_add(&c->frees, 1, __ATOMIC_RELAXED);
    __atomic_fetch_sub(&c->live, (int64_t)bytes, __ATOMIC_RELAXED);
    test_memory_free(head->start);
}

static spdl_allocator allocator_of(counting *c) {
    const spdl_allocator allocator = { counting_alloc, counting_free, c };
    return allocator;
}

/* Every block is back, and nothing came from elsewhere. */
static void all_is_back(const counting *c) {
    CHECK_EQ(c->live, 0);
    CHECK_EQ(c->frees, c->allocs);
    if (TEST_POSIX) CHECK_EQ(default_mallocs, 0); /* Windows paths need memory to be opened */
}

/* Creates, uses and destroys something; c->fail_at says what fails. */
typedef spdl_result (*attempt)(counting *c);

/* Lets the first, second, ... allocation fail until one attempt gets through. */
static void every_allocation_may_fail(attempt attempt_one, int at_least) {
    for (int k = 0;; ++k) {
        counting c = { 0 };
        spdl_result result;
        c.fail_at = k;
        result = attempt_one(&c);
        all_is_back(&c);
        if (result == SPDL_OK) {
            CHECK(c.allocs <= k); /* it did not need that many */
            CHECK(k >= at_least);
            return;
        }
        CHECK_EQ(result, SPDL_E_NOMEM);
        CHECK(c.allocs > k);
        REQUIRE(k < 200);
    }
}

static int logged;

static void log_count(spdl_log_level level, const char *text, void *user) {
    (void)user;
    if (level == SPDL_LOG_WARN) return; /* more concurrency than workers */
    CHECK(strstr(text, "out of memory") != NULL);
    ++logged;
}

static void told_out_of_memory(spdl_result result, const spdl_error *error) {
    CHECK_EQ(error->result, result);
    if (result == SPDL_OK) return;
    CHECK_EQ(error->stage, -1);
    CHECK(error->text[0] != 0 && strstr(error->text, "spdl: ") == NULL);
    CHECK(strstr(error->text, "out of memory") != NULL);
}

/* --- rings --- */

static spdl_result attempt_ring(counting *c, spdl_ring_mode mode) {
    spdl_ring_desc desc = { 0 };
    spdl_ring *ring = (spdl_ring *)c;
    spdl_result result;
    desc.capacity = 5;
    desc.item_bytes = 56;
    desc.mode = mode;
    desc.allocator = allocator_of(c);
    result = spdl_ring_create(&ring, &desc);
    CHECK((ring == NULL) == (result != SPDL_OK));
    spdl_ring_destroy(ring, NULL, NULL);
    return result;
}

static spdl_result attempt_mpmc(counting *c) { return attempt_ring(c, SPDL_RING_MPMC); }
static spdl_result attempt_spsc(counting *c) { return attempt_ring(c, SPDL_RING_SPSC); }

static void ring_without_memory(void) {
    every_allocation_may_fail(attempt_mpmc, 1);
    every_allocation_may_fail(attempt_spsc, 1);
}

/* --- pools --- */

static spdl_result attempt_pool(counting *c) {
    spdl_pool_desc desc = { 0 };
    spdl_pool *pool = (spdl_pool *)c;
    spdl_error error;
    spdl_result result;
    desc.workers = 3;
    desc.allocator = allocator_of(c);
    desc.error = &error;
    result = spdl_pool_create(&pool, &desc);
    CHECK((pool == NULL) == (result != SPDL_OK));
    told_out_of_memory(result, &error);
    spdl_pool_destroy(pool);
    return result;
}

static void pool_without_memory(void) { every_allocation_may_fail(attempt_pool, 3); }

/* --- pipelines --- */

static uint64_t source_count;

SPDL_FN(numbers, void, void) {
    if (spdl_sequence(task) == source_count) return SPDL_END;
    *out = (void *)(uintptr_t)(spdl_sequence(task) + 1);
    return SPDL_OK;
}

SPDL_FN(pass, void, void) {
    *out = in;
    return SPDL_OK;
}

SPDL_FN(look, spdl_batch, void) {
    CHECK(in->count >= 1);
    *out = (void *)(uintptr_t)(in->sequence + 1);
    return SPDL_OK;
}

SPDL_FN(pass_batch, spdl_batch, spdl_batch) {
    *out = in;
    return SPDL_OK;
}

static spdl_result init_ok(void *ctx, int worker, void **local) {
    (void)worker;
    *local = ctx;
    return SPDL_OK;
}

static void fini_ok(void *ctx, int worker, void *local) {
    (void)worker;
    CHECK(ctx == local);
}

static const spdl_stage shortest[] = { SPDL_SOURCE(numbers), SPDL_SINK(3) };

static const spdl_stage shape_of_pipes[] = {
    SPDL_SOURCE(numbers),
    SPDL_PIPE(pass, .concurrency = 4, .buffer_size = 7),
    SPDL_PIPE(pass, .concurrency = 2, .output_order = SPDL_ORDER_COMPLETION),
    SPDL_SINK(3),
};

static const spdl_stage shape_with_batches[] = {
    SPDL_SOURCE(numbers, .init = init_ok, .fini = fini_ok),
    SPDL_BATCH(4),
    SPDL_PIPE(look, .init = init_ok, .fini = fini_ok, .concurrency = 3),
    SPDL_BATCH(2, .drop_last = true),
    SPDL_SINK(2),
};

typedef struct shape {
    const spdl_stage *rows;
    size_t count;
    bool batches; /* are what comes out */
} shape;

#define SHAPE(rows, batches) { rows, sizeof(rows) / sizeof(rows[0]), batches }

static const shape shapes[] = {
    SHAPE(shortest, false),
    SHAPE(shape_of_pipes, false),
    SHAPE(shape_with_batches, true),
};

static const shape *shape_tried;
static int workers_tried;
static spdl_pool *pool_tried;

static void run_to_the_end(spdl_pipeline *p, bool batches) {
    void *item;
    spdl_result result;
    while ((result = spdl_pipeline_next(p, &item, SPDL_FOREVER)) == SPDL_OK)
        if (batches) spdl_batch_free(item);
    CHECK_EQ(result, SPDL_END);
}

static const spdl_doctor_desc *doctor_tried;

static spdl_result attempt_pipeline(counting *c) {
    spdl_pipeline_desc desc = { 0 };
    spdl_pipeline *p = (spdl_pipeline *)c;
    spdl_error error;
    spdl_result result;
    const int before = logged;
    desc.workers = pool_tried != NULL ? 0 : TEST_WORKERS(workers_tried);
    desc.pool = pool_tried;
    desc.doctor = doctor_tried;
    desc.allocator = allocator_of(c);
    desc.logger.log_fn = log_count;
    desc.error = &error;
    result = spdl_pipeline_create(&p, &desc, shape_tried->rows, shape_tried->count);
    CHECK((p == NULL) == (result != SPDL_OK));
    CHECK_EQ(logged, before); /* it is in the error */
    told_out_of_memory(result, &error);
    if (p != NULL) run_to_the_end(p, shape_tried->batches);
    spdl_pipeline_destroy(p);
    return result;
}

static void pipelines_without_memory(int workers) {
    workers_tried = workers;
    source_count = 20;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; ++i) {
        shape_tried = &shapes[i];
        every_allocation_may_fail(attempt_pipeline, 4);
    }
}

static void pipeline_of_the_caller_without_memory(void) { pipelines_without_memory(0); }
static void pipeline_of_workers_without_memory(void) { pipelines_without_memory(3); }

static void pipeline_with_a_doctor_without_memory(void) {
    static const spdl_doctor_desc watches = { .seconds = 1e9, .quiet = true };
    doctor_tried = &watches;
    pipelines_without_memory(0);
    doctor_tried = NULL;
}

static void pipeline_on_a_pool_without_memory(void) {
    counting c = { 0 };
    spdl_pool_desc desc = { 0 };
    c.fail_at = -1;
    desc.workers = 2;
    desc.allocator = allocator_of(&c);
    REQUIRE(spdl_pool_create(&pool_tried, &desc) == SPDL_OK);
    pipelines_without_memory(0);
    spdl_pool_destroy(pool_tried);
    all_is_back(&c);
}

/* --- caches --- */

static spdl_result next_nothing(void *source, void **item, int64_t timeout_ns) {
    (void)source;
    (void)timeout_ns;
    *item = NULL;
    return SPDL_OK;
}

static spdl_result attempt_cache(counting *c) {
    spdl_cache_desc desc = { 0 };
    spdl_cache *cache = (spdl_cache *)c;
    spdl_result result;
    void *item;
    desc.next = next_nothing;
    desc.num_caches = 5;
    desc.allocator = allocator_of(c);
    result = spdl_cache_create(&cache, &desc);
    CHECK((cache == NULL) == (result != SPDL_OK));
    for (int i = 0; i < 20 && cache != NULL; ++i)
        CHECK_EQ(spdl_cache_next(cache, &item, 0), SPDL_OK);
    if (cache != NULL) CHECK_EQ(c->allocs, 2); /* all of them were made by create */
    spdl_cache_destroy(cache);
    return result;
}

static void cache_without_memory(void) { every_allocation_may_fail(attempt_cache, 2); }

/* --- steady state --- */

static void running_allocates_nothing(const spdl_stage *rows, size_t count, int workers,
                                      bool batches, uint64_t items) {
    counting c = { 0 };
    spdl_pipeline_desc desc = { 0 };
    spdl_pipeline *p;
    int made;
    c.fail_at = -1;
    desc.workers = TEST_WORKERS(workers);
    desc.allocator = allocator_of(&c);
    source_count = items;
    REQUIRE(spdl_pipeline_create(&p, &desc, rows, count) == SPDL_OK);
    made = __atomic_load_n(&c.allocs, __ATOMIC_RELAXED);
    run_to_the_end(p, batches);
    CHECK_EQ(c.allocs, made);
    CHECK_EQ(c.frees, 0);
    spdl_pipeline_destroy(p);
    all_is_back(&c);
}

static const spdl_stage shape_of_batches[] = {
    SPDL_SOURCE(numbers),
    SPDL_PIPE(pass),
    SPDL_BATCH(256),
    SPDL_SINK(4),
};

/* The last item fills a batch, and there is no memory for one that nobody needs: no failure. */
static void no_batch_is_missed_at_the_end(void) {
    for (int workers = 0; workers < 3; ++workers) {
        counting c = { 0 };
        spdl_pipeline_desc desc = { 0 };
        spdl_pipeline *p;
        void *batch[32];
        size_t ahead, count = 0;
        c.fail_at = -1;
        desc.workers = TEST_WORKERS(workers);
        desc.allocator = allocator_of(&c);
        source_count = 0;
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_TABLE(shape_of_batches)) == SPDL_OK);
        ahead = (size_t)p->node[2].blocks->spares;
        spdl_pipeline_destroy(p);
        REQUIRE(ahead < 32);
        source_count = ahead * (uint64_t)shape_of_batches[2].size;
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_TABLE(shape_of_batches)) == SPDL_OK);
        __atomic_store_n(&c.fail_all, true, __ATOMIC_RELAXED);
        while (count < 32 && spdl_pipeline_next(p, &batch[count], SPDL_SECONDS(15)) == SPDL_OK)
            ++count;
        CHECK_EQ(count, ahead);
        CHECK(!spdl_pipeline_failed(p));
        while (count > 0) spdl_batch_free(batch[--count]);
        spdl_pipeline_destroy(p);
        all_is_back(&c);
    }
}

static const uint64_t many = TEST_SANITIZED ? 5000 : 100000;

static void pipes_allocate_nothing(void) {
    running_allocates_nothing(SPDL_TABLE(shape_of_pipes), 0, false, many);
    running_allocates_nothing(SPDL_TABLE(shape_of_pipes), 3, false, many);
}

static void batches_allocate_nothing(void) {
    running_allocates_nothing(SPDL_TABLE(shape_with_batches), 0, true, many);
    running_allocates_nothing(SPDL_TABLE(shape_with_batches), 3, true, many);
}

/* Batches that a stage passes on wait on the edges behind it as well. */
static void batches_passed_on_allocate_nothing(void) {
    static const spdl_stage rows[] = {
        SPDL_SOURCE(numbers),
        SPDL_BATCH(2),
        SPDL_PIPE(pass_batch, .concurrency = 4, .buffer_size = 20),
        SPDL_PIPE(pass_batch, .buffer_size = 10),
        SPDL_PIPE(pass_batch),
        SPDL_SINK(20),
    };
    running_allocates_nothing(SPDL_TABLE(rows), 0, true, many / 5);
    running_allocates_nothing(SPDL_TABLE(rows), 3, true, many / 5);
}

static void batches_of_batches_allocate_nothing(void) {
    static const spdl_stage rows[] = {
        SPDL_SOURCE(numbers),
        SPDL_BATCH(2),
        SPDL_PIPE(pass_batch, .concurrency = 2),
        SPDL_BATCH(3),
        SPDL_SINK(4),
    };
    running_allocates_nothing(SPDL_TABLE(rows), 0, true, many / 5);
    running_allocates_nothing(SPDL_TABLE(rows), 3, true, many / 5);
}

static void rings_and_jobs_allocate_nothing(void) {
    counting c = { 0 };
    spdl_ring_desc ring_desc = { 0 };
    spdl_pool_desc pool_desc = { 0 };
    spdl_ring *ring;
    spdl_pool *pool;
    uint64_t item = 1;
    int made;
    c.fail_at = -1;
    ring_desc.capacity = 3;
    ring_desc.allocator = pool_desc.allocator = allocator_of(&c);
    pool_desc.workers = 2;
    REQUIRE(spdl_ring_create(&ring, &ring_desc) == SPDL_OK);
    REQUIRE(spdl_pool_create(&pool, &pool_desc) == SPDL_OK);
    made = c.allocs;
    for (uint64_t i = 0; i < many; ++i) {
        CHECK_EQ(spdl_ring_push(ring, &item, SPDL_FOREVER), SPDL_OK);
        CHECK_EQ(spdl_ring_pop(ring, &item, SPDL_FOREVER), SPDL_OK);
    }
    for (int i = 0; i < 1000; ++i) CHECK_EQ(spdl_pool_drain(pool, 0), SPDL_OK);
    CHECK_EQ(c.allocs, made);
    spdl_pool_destroy(pool);
    spdl_ring_destroy(ring, NULL, NULL);
    all_is_back(&c);
}

/* --- batches that the trainer keeps: the one place where a running pipeline allocates --- */

enum { KEPT = 60 };

static void kept_batches_are_allocated(void) {
    for (int order = 0; order < 2; ++order) {
        static const spdl_stage rows[] = { SPDL_SOURCE(numbers), SPDL_BATCH(3), SPDL_SINK(2) };
        counting c = { 0 };
        spdl_pipeline_desc desc = { 0 };
        spdl_pipeline *p;
        spdl_batch *kept[KEPT];
        c.fail_at = -1;
        desc.workers = 2;
        desc.allocator = allocator_of(&c);
        source_count = 3 * KEPT;
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_TABLE(rows)) == SPDL_OK);
        for (int i = 0; i < KEPT; ++i)
            REQUIRE(SPDL_NEXT(p, &kept[i], SPDL_FOREVER) == SPDL_OK);
        if (order) spdl_pipeline_destroy(p); /* the batches outlive the pipeline */
        for (int i = 0; i < KEPT; ++i) {
            CHECK_EQ(kept[i]->count, 3);
            CHECK_EQ(kept[i]->sequence, i);
            CHECK_EQ((uintptr_t)kept[i]->items[1], 3 * i + 2);
            spdl_batch_free(kept[i]);
        }
        if (!order) spdl_pipeline_destroy(p);
        all_is_back(&c);
    }
}

/* --- what a place costs --- */

static counting created(const spdl_stage *rows, size_t count) {
    counting c = { .fail_at = -1 }, made;
    spdl_pipeline_desc desc = { .workers = SPDL_INLINE, .allocator = allocator_of(&c) };
    spdl_pipeline *p;
    REQUIRE(spdl_pipeline_create(&p, &desc, rows, count) == SPDL_OK);
    made = c;
    spdl_pipeline_destroy(p);
    all_is_back(&c);
    return made;
}

/* Of a place more, bytes and allocations. */
static int64_t place_bytes(int from, int to, int concurrency, size_t item_bytes, int *allocs) {
    spdl_stage rows[] = { SPDL_SOURCE(numbers), SPDL_PIPE(pass), SPDL_PIPE(pass), SPDL_SINK(2) };
    counting few, many_more;
    rows[1].concurrency = concurrency;
    rows[1].item_bytes = item_bytes;
    rows[1].buffer_size = from;
    few = created(SPDL_TABLE(rows));
    rows[1].buffer_size = to;
    many_more = created(SPDL_TABLE(rows));
    *allocs = many_more.allocs - few.allocs;
    return (many_more.live - few.live + to - from - 1) / (to - from);
}

/* The figures are those of >>memory. */
static void a_place_costs_what_the_header_says(void) {
    static const size_t items[] = { 1, 8, 64, 65, 1000, 4096 };
    int allocs;
    for (int parallel = 0; parallel < 2; ++parallel) /* half of each ring is not needed */
        CHECK_EQ(place_bytes(512, 8192, 1 + parallel, 0, &allocs),
                 2 * sizeof(spdl__slot) << parallel);
    CHECK(sizeof(spdl__slot) <= 32);
    for (size_t i = 0; i < sizeof(items) / sizeof(items[0]) && !SPDL__DEBUGS; ++i) {
        const size_t bytes = (items[i] + sizeof(spdl__block) + 63) / 64 * 64;
        CHECK_EQ(place_bytes(2100, 4000, 1, items[i], &allocs), bytes); /* the same ring */
        CHECK_EQ(allocs, 0); /* they share one */
        CHECK_EQ(place_bytes(100, 120, 1, items[i], &allocs), (items[i] + 64 + 127) / 128 * 128);
    }
    (void)place_bytes(10, 12, 1, 65536, &allocs);
    CHECK_EQ(allocs, 2); /* of pages of their own */
}

/* A batch of 4096 small items has a buffer for each. */
static void small_items_before_a_batch_cost_little(void) {
    static const spdl_stage rows[] = { SPDL_SOURCE(numbers, .item_bytes = 64), SPDL_BATCH(4096),
                                       SPDL_SINK(16) };
    const counting made = created(SPDL_TABLE(rows));
    if (SPDL__DEBUGS) return;
    CHECK(made.live < (64 + 64) * 65536 + (1 << 20));
    CHECK(made.allocs < 30);
}

/* A row with its own allocator gets each block from it: a loader process passes them on. */
static void an_allocator_of_a_row_makes_each_block(void) {
    for (int own = 0; own < 2; ++own) {
        counting c = { .fail_at = -1 };
        const spdl_allocator allocator = allocator_of(&c);
        spdl_stage rows[] = { SPDL_SOURCE(numbers), SPDL_PIPE(pass, .item_bytes = 64),
                              SPDL_SINK(5) };
        spdl_pipeline_desc desc = { .workers = SPDL_INLINE };
        spdl_pipeline *p;
        if (own) rows[1].allocator = &allocator;
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_TABLE(rows)) == SPDL_OK);
        CHECK_EQ(p->node[1].blocks->spares, 4 + 5 + 1);
        CHECK_EQ(c.allocs, own ? 1 + 10 : 0);
        spdl_pipeline_destroy(p);
        CHECK_EQ(c.live, 0);
        CHECK_EQ(c.frees, c.allocs);
    }
}

/* The buffer that returned last is used again, and no other is looked at. A walk over all of them
   would hold the lock for milliseconds. */
static void one_returned_buffer_is_looked_at(void) {
    enum { BUFFERS = 5, LAST = BUFFERS - 1 };
    counting c = { .fail_at = -1 };
    const spdl_allocator allocator = allocator_of(&c);
    spdl__batch_pool *pool = spdl__batch_pool_make(&allocator, 0, 64, 0, false, BUFFERS, 0);
    spdl__block *used[BUFFERS];
    REQUIRE(pool != NULL);
    for (int i = 0; i < BUFFERS; ++i) REQUIRE((used[i] = spdl__block_get(pool)) != NULL);
    for (int i = 0; i < BUFFERS; ++i) spdl_buffer_free(used[i] + 1);
    used[LAST - 1]->next = (spdl__block *)(uintptr_t)64; /* a walk ends with a fault */
    CHECK(spdl__block_get(pool) == used[LAST]);
    used[LAST - 1]->next = used[LAST - 2];
    for (int i = LAST - 1; i >= 0; --i) CHECK(spdl__block_get(pool) == used[i]);
    CHECK_EQ(c.allocs, 1 + BUFFERS);
    for (int i = 0; i < BUFFERS; ++i) spdl_buffer_free(used[i] + 1);
    spdl__batch_pool_drop(pool, NULL);
    all_is_back(&c);
}

/* Without memory for one more batch the pipeline fails, names the batch row, and loses nothing. */
static void kept_batches_may_fail(void) {
    static const spdl_stage rows[] = { SPDL_SOURCE(numbers), SPDL_BATCH(3), SPDL_SINK(2) };
    for (int workers = 0; workers < 3; ++workers) {
        counting c = { 0 };
        spdl_pipeline_desc desc = { 0 };
        spdl_pipeline *p;
        spdl_batch *kept[KEPT];
        spdl_result result = SPDL_OK;
        const spdl_error *error;
        int count = 0;
        c.fail_at = -1;
        desc.workers = TEST_WORKERS(workers);
        desc.allocator = allocator_of(&c);
        source_count = 3 * KEPT;
        REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_TABLE(rows)) == SPDL_OK);
        __atomic_store_n(&c.fail_all, true, __ATOMIC_RELAXED);
        while (count < KEPT && result == SPDL_OK) {
            result = SPDL_NEXT(p, &kept[count], SPDL_FOREVER);
            count += result == SPDL_OK;
        }
        CHECK_EQ(result, SPDL_E_NOMEM);
        CHECK(count > 0 && count < KEPT);
        error = spdl_pipeline_error(p);
        CHECK_EQ(error->result, SPDL_E_NOMEM);
        CHECK_EQ(error->stage, 1);
        CHECK_STR(error->stage_name, "batch");
        CHECK(strstr(error->text, "memory") != NULL);
        for (int i = 0; i < count; ++i) {
            CHECK_EQ(kept[i]->sequence, i);
            spdl_batch_free(kept[i]);
        }
        spdl_pipeline_destroy(p);
        all_is_back(&c);
    }
}

/* --- running out of memory on the way --- */

enum { MOST_KEPT = 400 };
static int made, gone; /* items, atomic */
static bool may_begin; /* atomic: whether create has returned */

SPDL_FN(makes, void, void) {
    while (!__atomic_load_n(&may_begin, __ATOMIC_ACQUIRE)) test_sleep_us(100);
    if (spdl_sequence(task) == source_count) return SPDL_END;
    *out = (void *)(uintptr_t)(spdl_sequence(task) + 1);
    __atomic_fetch_add(&made, 1, __ATOMIC_RELAXED);
    return SPDL_OK;
}

static void item_gone(void *it) {
    CHECK(it != NULL);
    __atomic_fetch_add(&gone, 1, __ATOMIC_RELAXED);
}

/* Each item becomes 20, by SPDL_AGAIN. */
SPDL_FN(scatter, void, void) {
    void **state = spdl_call_state(task);
    const long k = (long)(intptr_t)*state;
    *out = (char *)in + 1000 * k + 1000;
    *state = (void *)(intptr_t)(k + 1);
    __atomic_fetch_add(&made, 1, __ATOMIC_RELAXED);
    return k < 19 ? SPDL_AGAIN : SPDL_OK;
}

/* Batches in turn; every fifth is dropped. */
SPDL_FN(deal, spdl_batch, spdl_batch) {
    *out = in;
    if (in->sequence % 5 == 4) return SPDL_SKIP;
    return spdl_route(task, (int)(in->sequence % 2));
}

static spdl_batch *held[MOST_KEPT];
static int held_count; /* atomic */

/* What it drops it holds, so that the row of batches needs memory for others. */
SPDL_FN(drops_some, spdl_batch, spdl_batch) {
    *out = in;
    if (in->sequence % 4 != 1) return SPDL_OK;
    spdl_take(task);
    held[__atomic_fetch_add(&held_count, 1, __ATOMIC_RELAXED)] = in;
    return SPDL_SKIP;
}

static const spdl_stage shape_of_one_to_many[] = {
    SPDL_SOURCE(makes, .free_item = item_gone),
    SPDL_PIPE(scatter, .again = true, .free_item = item_gone),
    SPDL_BATCH(4),
    SPDL_SINK(2),
};

static const spdl_stage shape_with_paths[] = {
    SPDL_SOURCE(makes, .free_item = item_gone),
    SPDL_BATCH(4),
    SPDL_BRANCH(deal),
    SPDL_PATH("left"),
    SPDL_PIPE(drops_some),
    SPDL_PATH("right"),
    SPDL_BRANCH(deal),
    SPDL_PATH("in"),
    SPDL_PIPE(drops_some, .concurrency = 2),
    SPDL_PATH("out"),
    SPDL_MERGE(),
    SPDL_MERGE(),
    SPDL_SINK(2),
};

static void told_which_stage(const spdl_pipeline *p) {
    const spdl_error *error = spdl_pipeline_error(p);
    CHECK_EQ(error->result, SPDL_E_NOMEM);
    CHECK(error->stage > 0);
    CHECK(error->stage_name[0] != '\0');
    CHECK(strstr(error->text, "memory") != NULL);
}

/* Takes everything, and keeps it until the end, so that more and more is needed. The allocation
   `fail_at` fails, counted from 0 behind create. Whether the run came so far. */
static bool runs_out_of_memory(const shape *of, int workers, int fail_at, bool for_good) {
    counting c = { 0 };
    spdl_pipeline_desc desc = { 0 };
    spdl_pipeline *p;
    spdl_batch *kept[MOST_KEPT];
    spdl_result result = SPDL_OK;
    int count = 0;
    bool failed;
    c.fail_at = -1;
    c.for_good = for_good;
    desc.workers = TEST_WORKERS(workers);
    desc.allocator = allocator_of(&c);
    made = gone = held_count = 0;
    __atomic_store_n(&may_begin, false, __ATOMIC_RELEASE);
    REQUIRE(spdl_pipeline_create(&p, &desc, of->rows, of->count) == SPDL_OK);
    __atomic_store_n(&c.fail_at, c.allocs + fail_at, __ATOMIC_RELAXED);
    __atomic_store_n(&may_begin, true, __ATOMIC_RELEASE);
    while (count < MOST_KEPT && result == SPDL_OK) {
        result = SPDL_NEXT(p, &kept[count], SPDL_FOREVER);
        count += result == SPDL_OK;
    }
    failed = __atomic_load_n(&c.allocs, __ATOMIC_RELAXED) > c.fail_at;
    CHECK_EQ(result, failed ? SPDL_E_NOMEM : SPDL_END);
    if (failed) told_which_stage(p);
    for (int i = 0; i < count; ++i) spdl_batch_free(kept[i]);
    spdl_pipeline_destroy(p);
    for (int i = 0; i < held_count; ++i) spdl_batch_free(held[i]);
    CHECK_EQ(gone, made);
    all_is_back(&c);
    return failed;
}

/* What is made is delivered or freed, whichever allocation fails, and the stage is told. */
static void every_allocation_on_the_way_may_fail(void) {
    static const shape of[] = { SHAPE(shape_of_one_to_many, true), SHAPE(shape_with_paths, true) };
    static const int crowds[] = { 0, 1, 4 };
    for (int i = 0; i < 2 * 3 * 2; ++i) {
        int k = 0;
        source_count = i % 2 ? 400 : 30;
        while (runs_out_of_memory(&of[i % 2], crowds[i / 4], k, i / 2 % 2)) {
            k += TEST_SANITIZED ? 4 : 1;
            REQUIRE(k < 1000);
        }
        CHECK(k >= 40);
    }
}

/* --- the default allocator --- */

static void default_memory_is_aligned(void) {
    spdl_allocator none;
    memset(&none, 0, sizeof none);
    for (size_t align = 1; align <= 4096; align *= 2) {
        for (size_t bytes = 1; bytes < 300; bytes += 37) {
            void *memory = spdl__alloc(&none, bytes, align);
            REQUIRE(memory != NULL);
            CHECK_EQ((uintptr_t)memory % align, 0);
            CHECK_EQ((uintptr_t)memory % sizeof(void *), 0);
            memset(memory, 1, bytes);
            spdl__free(&none, memory, bytes);
        }
    }
    CHECK_EQ(default_mallocs, default_frees);
    CHECK(default_mallocs > 0);
    spdl__free(&none, NULL, 0);
    CHECK_EQ(default_mallocs, default_frees);
}

static void sizes_that_overflow_are_refused(void) {
    spdl_allocator none;
    memset(&none, 0, sizeof none);
    CHECK(spdl__alloc(&none, SIZE_MAX, 64) == NULL);
    CHECK(spdl__alloc(&none, SIZE_MAX - 64, 64) == NULL);
    CHECK(spdl__alloc_zeroed(&none, SIZE_MAX / 2, 3) == NULL);
    CHECK(spdl__alloc_zeroed(&none, SIZE_MAX / 4 + 1, SIZE_MAX / 4 + 1) == NULL);
    if (TEST_POSIX) CHECK_EQ(default_mallocs, 0); /* Windows paths need memory to be opened */
}

static void default_memory_comes_back(void) {
    spdl_pipeline_desc desc = { 0 };
    spdl_pipeline *p;
    desc.workers = 2;
    source_count = 100;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_TABLE(shape_with_batches)) == SPDL_OK);
    CHECK(default_mallocs > 0);
    run_to_the_end(p, true);
    spdl_pipeline_destroy(p);
    CHECK_EQ(default_mallocs, default_frees);
}

/* --- memory of freed items --- */

enum { FILES = 4, READS = 200, LARGE = 1 << 15, FLIGHT = 12 };
static char file_folder[100], file_path[FILES][120];
static size_t file_bytes[FILES];

/* Writes .npy files. Each byte of the data is the number of the file. */
static void write_files(size_t first, size_t step) {
    test_folder(file_folder, sizeof file_folder);
    for (int i = 0; i < FILES; ++i) {
        char head[128], text[100];
        FILE *out;
        file_bytes[i] = first + step * (size_t)i;
        snprintf(text, sizeof text, "{'descr': '|u1', 'fortran_order': False, 'shape': (%lu,), }",
                 (unsigned long)file_bytes[i]);
        memset(head, ' ', sizeof head);
        memcpy(head, "\x93NUMPY\x01\0v", 10);
        memcpy(head + 10, text, strlen(text));
        snprintf(file_path[i], sizeof file_path[i], "%s/%d.npy", file_folder, i);
        REQUIRE((out = fopen(file_path[i], "wb")) != NULL);
        REQUIRE(fwrite(head, 1, 128, out) == 128);
        for (size_t k = 0; k < file_bytes[i]; ++k) putc(i, out);
        REQUIRE(fclose(out) == 0);
    }
}

SPDL_FN(path_of_file, spdl_index, char) {
    (void)task;
    *out = file_path[in->index % FILES];
    return SPDL_OK;
}

/* An allocator that counts large blocks, too. */
typedef struct large_counting {
    counting all;
    int made, there; /* atomic */
} large_counting;

static void *large_alloc(size_t bytes, size_t align, void *user) {
    large_counting *c = (large_counting *)user;
    void *memory = counting_alloc(bytes, align, &c->all);
    if (memory == NULL || bytes < LARGE) return memory;
    __atomic_fetch_add(&c->made, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&c->there, 1, __ATOMIC_RELAXED);
    return memory;
}

static void large_free(void *memory, size_t bytes, void *user) {
    large_counting *c = (large_counting *)user;
    if (bytes >= LARGE) __atomic_fetch_sub(&c->there, 1, __ATOMIC_RELAXED);
    counting_free(memory, bytes, &c->all);
}

static void log_nothing(spdl_log_level level, const char *text, void *user) {
    (void)level, (void)text, (void)user;
}

/* The desc must outlive the pipeline. At once in use are about 2 calls, 4 results and 1 bundle. */
static spdl_result start_files(spdl_pipeline **p, int workers, uint64_t reads,
                               spdl_npz_desc *npz, large_counting *c, int fail_at) {
    spdl_error error = { 0 };
    spdl_pipeline_desc desc = { 0 };
    memset(npz, 0, sizeof *npz);
    memset(c, 0, sizeof *c);
    c->all.fail_at = fail_at;
    npz->allocator.alloc_fn = large_alloc;
    npz->allocator.free_fn = large_free;
    npz->allocator.user = c;
    desc.workers = TEST_WORKERS(workers);
    desc.allocator = allocator_of(&c->all);
    desc.error = &error;
    desc.logger.log_fn = log_nothing;
    return spdl_pipeline_create(p, &desc, SPDL_STAGES(
        SPDL_COUNT(reads), SPDL_PIPE(path_of_file, .buffer_size = 2),
        SPDL_NPZ(npz, .concurrency = workers < 2 ? 1 : 2), SPDL_SINK(2)));
}

/* It must be of file `number`, and it can be changed. */
static void check_bundle(const spdl_npz_bundle *bundle, uint64_t number) {
    const int file = (int)(number % FILES);
    uint8_t *data = (uint8_t *)bundle->arrays[0].data;
    if (!CHECK_EQ(bundle->arrays[0].info.bytes, file_bytes[file])) return;
    CHECK(data[0] == file && memcmp(data, data + 1, file_bytes[file] - 1) == 0);
    CHECK_EQ((uintptr_t)data % 64, 0);
    memset(data, 0xff, file_bytes[file]);
}

/* Files of one size, and of sizes of which the larger blocks fit all. */
static void bundles_use_memory_again(void) {
    for (int mixed = 0; mixed < 2; ++mixed) {
        write_files(270000, mixed ? 90000 : 0);
        for (int workers = 0; workers < 3; ++workers) {
            large_counting c;
            spdl_npz_desc npz;
            spdl_npz_bundle *bundle;
            spdl_pipeline *p;
            uint64_t n = 0;
            REQUIRE(start_files(&p, workers, READS, &npz, &c, -1) == SPDL_OK);
            for (; SPDL_NEXT(p, &bundle, SPDL_FOREVER) == SPDL_OK; spdl_npz_bundle_free(bundle))
                check_bundle(bundle, n++);
            CHECK_EQ(n, READS);
            CHECK(c.made >= 1 && c.made <= (mixed ? 5 * FLIGHT : FLIGHT));
            CHECK(c.there >= 1 && c.there <= FLIGHT);
            spdl_pipeline_destroy(p);
            all_is_back(&c.all);
        }
        test_folder_remove(file_folder);
    }
}

static int mallocs_of_records(size_t bytes) {
    spdl_pipeline_desc desc = { 0 };
    spdl_record *record;
    spdl_pipeline *p;
    int mallocs, n = 0;
    write_files(bytes, 0);
    desc.workers = 2;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_COUNT(READS, .buffer_size = 2), SPDL_PIPE(path_of_file, .buffer_size = 2),
        SPDL_READ(.concurrency = 2), SPDL_SINK(2))) == SPDL_OK);
    mallocs = __atomic_load_n(&default_mallocs, __ATOMIC_RELAXED);
    for (; SPDL_NEXT(p, &record, SPDL_FOREVER) == SPDL_OK; spdl_record_free(record)) {
        CHECK_EQ(record->bytes, bytes + 128);
        CHECK_EQ(record->data[bytes + 127], n++ % FILES);
        CHECK_EQ(record->data[bytes + 128], 0);
        CHECK_STR(record->name, file_path[(n - 1) % FILES]);
    }
    CHECK_EQ(n, READS);
    mallocs = __atomic_load_n(&default_mallocs, __ATOMIC_RELAXED) - mallocs;
    spdl_pipeline_destroy(p);
    CHECK_EQ(default_mallocs, default_frees);
    test_folder_remove(file_folder);
    return mallocs;
}

static void records_use_memory_again(void) {
    CHECK(mallocs_of_records(100000) <= FLIGHT || !TEST_POSIX);
    CHECK(mallocs_of_records(1000) >= READS - FLIGHT); /* malloc is as fast */
}

/* The allocator of a row by itself. */
static void kept_memory_has_bounds(void) {
    enum { MB = 1 << 20, MANY = 400 };
    large_counting c;
    spdl_npz_desc npz;
    spdl_pipeline *p;
    spdl_allocator row;
    void *at[MANY];
    REQUIRE(start_files(&p, 0, READS, &npz, &c, -1) == SPDL_OK);
    row = p->node[2].reuse->own;
    c.made = c.there = 0;
#define NEW(bytes) spdl__alloc(&row, bytes, 64)
    for (int i = 0; i < 3; ++i) REQUIRE((at[i] = NEW(MB)) != NULL);
    for (int i = 0; i < 3; ++i) spdl__free(&row, at[i], MB);
    CHECK(c.made == 3 && c.there == 3);
    CHECK(NEW(MB) == at[2]); /* the last one, which a cache may hold */
    CHECK(NEW(MB * 2 / 3) == at[1]);
    CHECK(c.made == 3);
    at[3] = NEW(MB / 3); /* less than half of a block; 3 MB were in use at once */
    CHECK(at[3] != at[0] && c.made == 4 && c.there == 3);
    spdl__free(&row, at[1], MB * 2 / 3);
    spdl__free(&row, at[2], MB);
    at[4] = NEW(8 * MB); /* all that is kept goes first */
    CHECK(c.made == 5 && c.there == 2);
    spdl__free(&row, at[3], MB / 3);
    spdl__free(&row, at[4], 8 * MB);
    CHECK(c.there == 2);
    at[0] = NEW(MB); /* 8 MB are too many for it */
    CHECK(c.made == 6 && c.there == 1);
    spdl__free(&row, at[0], MB);
    for (int i = 0; i < MANY; ++i) REQUIRE((at[i] = NEW(LARGE)) != NULL);
    for (int i = 0; i < MANY; ++i) spdl__free(&row, at[i], LARGE);
    CHECK(c.there >= 6 && c.there < 40); /* what can be in flight */
    REQUIRE((at[0] = NEW(LARGE - 1)) != NULL && (at[1] = NEW(LARGE)) != NULL);
    spdl_pipeline_destroy(p);
    CHECK_EQ(c.there, 1);
    spdl__free(&row, at[0], LARGE - 1); /* before the large one */
    spdl__free(&row, at[1], LARGE);
    all_is_back(&c.all);
#undef NEW
}

static spdl_npz_bundle *mailbox; /* atomic */

/* Frees what the consumer sends, until it sends itself. */
static void *free_bundles(void *end) {
    for (;;) {
        spdl_npz_bundle *bundle = __atomic_exchange_n(&mailbox, NULL, __ATOMIC_ACQ_REL);
        if (bundle == end) return NULL;
        spdl_npz_bundle_free(bundle);
    }
}

static void post(spdl_npz_bundle *bundle) {
    spdl_npz_bundle *none = NULL;
    while (!__atomic_compare_exchange_n(&mailbox, &none, bundle, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_RELAXED))
        none = NULL;
}

/* Another thread frees, also while the pipeline ends. The last ones are freed later. */
static void bundles_outlive_their_row(void) {
    enum { LEFT = 5 };
    write_files(1000, 80000);
    for (int workers = 0; workers < 3; ++workers) {
        static spdl_npz_bundle end;
        large_counting c;
        spdl_npz_desc npz;
        spdl_npz_bundle *left[LEFT], *bundle;
        spdl_pipeline *p;
        test_thread thread;
        REQUIRE(start_files(&p, workers, READS, &npz, &c, -1) == SPDL_OK);
        REQUIRE(test_thread_start(&thread, free_bundles, &end));
        for (uint64_t n = 0; n < READS / 2; ++n) {
            REQUIRE(SPDL_NEXT(p, &bundle, SPDL_FOREVER) == SPDL_OK);
            check_bundle(bundle, n);
            post(bundle);
        }
        for (int i = 0; i < LEFT; ++i) REQUIRE(SPDL_NEXT(p, &left[i], SPDL_FOREVER) == SPDL_OK);
        spdl_pipeline_destroy(p);
        post(&end);
        test_join(thread);
        CHECK_EQ(c.there, LEFT - 2); /* two of them are small */
        for (int i = 0; i < LEFT; ++i) {
            check_bundle(left[i], READS / 2 + (uint64_t)i);
            spdl_npz_bundle_free(left[i]);
        }
        all_is_back(&c.all);
    }
    test_folder_remove(file_folder);
}

static void every_allocation_of_a_file_may_fail(void) {
    write_files(50000, 100000);
    for (int k = 0, done = 0; !done; ++k) {
        large_counting c;
        spdl_npz_desc npz;
        spdl_npz_bundle *bundle;
        spdl_pipeline *p;
        spdl_result result = start_files(&p, 0, 2 * FILES, &npz, &c, k);
        for (uint64_t n = 0; result == SPDL_OK; ++n) {
            result = SPDL_NEXT(p, &bundle, SPDL_FOREVER);
            if (result != SPDL_OK) break;
            check_bundle(bundle, n);
            spdl_npz_bundle_free(bundle);
        }
        CHECK_EQ(result, c.all.allocs > k ? SPDL_E_NOMEM : SPDL_END);
        done = result == SPDL_END;
        spdl_pipeline_destroy(p);
        all_is_back(&c.all);
        REQUIRE(k < 300);
    }
    test_folder_remove(file_folder);
}

TEST_TABLE(alloc) {
    TEST_CASE(ring_without_memory),
    TEST_CASE(pool_without_memory),
    TEST_CASE(pipeline_of_the_caller_without_memory),
    TEST_CASE(pipeline_of_workers_without_memory),
    TEST_CASE(pipeline_with_a_doctor_without_memory),
    TEST_CASE(pipeline_on_a_pool_without_memory),
    TEST_CASE(cache_without_memory),
    TEST_CASE(pipes_allocate_nothing),
    TEST_CASE(batches_allocate_nothing),
    TEST_CASE(no_batch_is_missed_at_the_end),
    TEST_CASE(batches_passed_on_allocate_nothing),
    TEST_CASE(batches_of_batches_allocate_nothing),
    TEST_CASE(rings_and_jobs_allocate_nothing),
    TEST_CASE(kept_batches_are_allocated),
    TEST_CASE(a_place_costs_what_the_header_says),
    TEST_CASE(small_items_before_a_batch_cost_little),
    TEST_CASE(an_allocator_of_a_row_makes_each_block),
    TEST_CASE(one_returned_buffer_is_looked_at),
    TEST_CASE(kept_batches_may_fail),
    TEST_CASE(every_allocation_on_the_way_may_fail),
    TEST_CASE(default_memory_is_aligned),
    TEST_CASE(sizes_that_overflow_are_refused),
    TEST_CASE(default_memory_comes_back),
    TEST_CASE(bundles_use_memory_again),
    TEST_CASE(records_use_memory_again),
    TEST_CASE(kept_memory_has_bounds),
    TEST_CASE(bundles_outlive_their_row),
    TEST_CASE(every_allocation_of_a_file_may_fail),
    TEST_END,
};
