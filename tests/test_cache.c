/* Caches: what is handed out in which order, who owns it, and what a source may answer. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "test.h"

/* --- items that are counted --- */

typedef struct item {
    uint32_t alive; /* a magic number, so that a second free is seen without a sanitizer */
    int number;
    bool copied;
} item;

enum { ITEM_ALIVE = 0x600d600d };

static int items_made, items_freed, copies_made, copy_fails_at = -1;

static item *item_of(int number) {
    item *made = (item *)test_memory(sizeof(void *), sizeof *made);
    REQUIRE(made != NULL);
    made->alive = ITEM_ALIVE;
    made->number = number;
    made->copied = false;
    ++items_made;
    return made;
}

static void item_free(void *memory) {
    item *it = (item *)memory;
    CHECK_EQ(it->alive, ITEM_ALIVE);
    it->alive = 0;
    ++items_freed;
    test_memory_free(it);
}

static void *item_copy(const void *memory) {
    const item *it = (const item *)memory;
    item *copy;
    CHECK_EQ(it->alive, ITEM_ALIVE);
    if (copies_made++ == copy_fails_at) return NULL;
    copy = item_of(it->number);
    copy->copied = true;
    return copy;
}

/* --- a source in memory, with answers of its own at some calls --- */

typedef struct source {
    int next, count;       /* items are next, next + 1, ... before count */
    int calls, answer_at;  /* call number answer_at is answered with `answer`; -1: none */
    spdl_result answer;
    int64_t timeout_seen;
    int deleted;
} source;

static spdl_result source_next(void *self, void **out, int64_t timeout_ns) {
    source *s = (source *)self;
    CHECK_EQ(s->deleted, 0);
    s->timeout_seen = timeout_ns;
    if (s->calls++ == s->answer_at) return s->answer;
    if (s->next == s->count) return SPDL_END;
    *out = item_of(s->next++);
    return SPDL_OK;
}

static void source_delete(void *self) { ((source *)self)->deleted++; }

static source source_of(int count) {
    const source s = { 0, count, 0, -1, SPDL_OK, 0, 0 };
    return s;
}

static spdl_cache_desc desc_of(source *s, uint64_t num_caches, uint64_t return_caches_after) {
    spdl_cache_desc desc = { 0 };
    desc.next = source_next;
    desc.source = s;
    desc.num_caches = num_caches;
    desc.return_caches_after = return_caches_after;
    desc.free_item = item_free;
    return desc;
}

static spdl_cache *cache_of(const spdl_cache_desc *desc) {
    spdl_cache *cache;
    REQUIRE(spdl_cache_create(&cache, desc) == SPDL_OK);
    return cache;
}

/* The numbers of the next `count` items, as "0 1 2"; an end or error ends the text. With copies
   each item is the caller's. */
static const char *take(spdl_cache *cache, int count, bool copies) {
    static char text[400];
    size_t length = 0;
    text[0] = '\0';
    for (int i = 0; i < count; ++i) {
        item *it = NULL;
        const spdl_result result = spdl_cache_next(cache, (void **)&it, SPDL_FOREVER);
        const char *space = i > 0 ? " " : "";
        if (result != SPDL_OK) {
            snprintf(text + length, sizeof text - length, "%s%s", space, spdl_result_text(result));
            break;
        }
        CHECK_EQ(it->alive, ITEM_ALIVE);
        length += (size_t)snprintf(text + length, sizeof text - length, "%s%d", space, it->number);
        if (copies) item_free(it);
    }
    return text;
}

static void all_is_freed(void) { CHECK_EQ(items_freed, items_made); }

/* --- the parameters --- */

static void caches_are_repeated(void) {
    source s = source_of(1000);
    spdl_cache_desc desc = desc_of(&s, 3, 0);
    spdl_cache *cache = cache_of(&desc);
    CHECK(!cache->warm);
    CHECK_STR(take(cache, 2, false), "0 1");
    CHECK(!cache->warm);
    CHECK_STR(take(cache, 1, false), "2");
    CHECK(cache->warm);
    CHECK_STR(take(cache, 7, false), "0 1 2 0 1 2 0");
    CHECK_EQ(s.next, 3); /* the source is not asked for more than that */
    spdl_cache_destroy(cache);
    all_is_freed();
}

static void caches_are_returned_later(void) {
    source s = source_of(1000);
    spdl_cache_desc desc = desc_of(&s, 3, 5);
    spdl_cache *cache = cache_of(&desc);
    CHECK_STR(take(cache, 4, false), "0 1 2 3");
    CHECK(!cache->warm);
    CHECK_STR(take(cache, 8, false), "4 0 1 2 0 1 2 0");
    CHECK(cache->warm);
    CHECK_EQ(s.next, 5);
    spdl_cache_destroy(cache);
    all_is_freed();
}

static void stop_after_is_exact(void) {
    for (int copies = 0; copies < 2; ++copies) {
        source s = source_of(1000);
        spdl_cache_desc desc = desc_of(&s, 3, 5);
        spdl_cache *cache;
        desc.stop_after = 10;
        if (copies) desc.copy_item = item_copy;
        cache = cache_of(&desc);
        CHECK_STR(take(cache, 100, copies), "0 1 2 3 4 0 1 2 0 1 end of data");
        CHECK_STR(take(cache, 1, copies), "end of data");
        spdl_cache_destroy(cache);
        all_is_freed();
    }
}

static void stop_after_may_come_before_the_cache_is_used(void) {
    source s = source_of(1000);
    spdl_cache_desc desc = desc_of(&s, 3, 3);
    spdl_cache *cache;
    desc.stop_after = 3;
    desc.delete_source = source_delete;
    cache = cache_of(&desc);
    CHECK_STR(take(cache, 9, false), "0 1 2 end of data");
    spdl_cache_destroy(cache);
    CHECK_EQ(s.deleted, 1);
    all_is_freed();
}

static void short_source_goes_straight_to_the_cache(void) {
    source s = source_of(4);
    spdl_cache_desc desc = desc_of(&s, 3, 100);
    spdl_cache *cache = cache_of(&desc);
    CHECK_STR(take(cache, 9, false), "0 1 2 3 0 1 2 0 1");
    CHECK(cache->warm);
    CHECK_EQ(s.calls, 5); /* its end was asked for once */
    spdl_cache_destroy(cache);
    all_is_freed();
}

static void source_shorter_than_the_cache(void) {
    source s = source_of(2);
    spdl_cache_desc desc = desc_of(&s, 5, 0);
    spdl_cache *cache = cache_of(&desc);
    CHECK_STR(take(cache, 7, false), "0 1 0 1 0 1 0");
    spdl_cache_destroy(cache);
    all_is_freed();
}

static void empty_source_ends(void) {
    source s = source_of(0);
    spdl_cache_desc desc = desc_of(&s, 3, 0);
    spdl_cache *cache;
    desc.delete_source = source_delete;
    cache = cache_of(&desc);
    CHECK_STR(take(cache, 3, false), "end of data");
    CHECK_STR(take(cache, 3, false), "end of data");
    CHECK_EQ(s.deleted, 1);
    spdl_cache_destroy(cache);
    CHECK_EQ(s.deleted, 1);
}

static void desc_is_checked(void) {
    source s = source_of(10);
    const spdl_cache_desc good = desc_of(&s, 3, 5);
    spdl_cache_desc desc;
    spdl_cache *cache = NULL;
    spdl_error error;
    void *out = NULL;
    CHECK_EQ(spdl_cache_create(NULL, &good), SPDL_E_INVALID);
    cache = (spdl_cache *)&s;
    CHECK_EQ(spdl_cache_create(&cache, NULL), SPDL_E_INVALID);
    CHECK(cache == NULL);
#define REFUSED(change)                                                                            \
    desc = good;                                                                                   \
    change;                                                                                        \
    cache = (spdl_cache *)&s;                                                                      \
    desc.error = &error;                                                                           \
    CHECK_EQ(spdl_cache_create(&cache, &desc), SPDL_E_INVALID);                                    \
    CHECK_EQ(error.result, SPDL_E_INVALID);                                                        \
    CHECK(cache == NULL)
    REFUSED(desc.return_caches_after = 2);
    CHECK_STR(error.text,
              "cache: return_caches_after is 2, must be at least num_caches, 3");
    REFUSED(desc.next = NULL);
    CHECK_STR(error.text, "cache: next is NULL");
    REFUSED(desc.num_caches = 0);
    REFUSED(desc.num_caches = 0; desc.return_caches_after = 0);
    REFUSED(desc.num_caches = 6);
    REFUSED(desc.stop_after = 4);
    REFUSED(desc.stop_after = 2; desc.return_caches_after = 0);
    REFUSED(desc.num_caches = UINT64_MAX; desc.return_caches_after = 0);
    REFUSED(desc.allocator.alloc_fn = (void *(*)(size_t, size_t, void *))(uintptr_t)1);
    REFUSED(desc.allocator.free_fn = (void (*)(void *, size_t, void *))(uintptr_t)1);
#undef REFUSED
    spdl_cache_destroy(NULL);
    cache = cache_of(&good);
    CHECK_EQ(spdl_cache_next(NULL, &out, 0), SPDL_E_INVALID);
    CHECK_EQ(spdl_cache_next(cache, NULL, 0), SPDL_E_INVALID);
    spdl_cache_destroy(cache);
    CHECK_EQ(s.calls, 0);
}

/* --- what the source answers is passed on, and can be retried --- */

static void answers_are_passed_on(spdl_result answer) {
    for (int at = 0; at < 5; ++at) {
        source s = source_of(1000);
        spdl_cache_desc desc = desc_of(&s, 3, 5);
        spdl_cache *cache = cache_of(&desc);
        char expected[100] = "";
        void *untouched = &s;
        s.answer_at = at;
        s.answer = answer;
        for (int i = 0; i < at; ++i) take(cache, 1, false);
        CHECK_EQ(spdl_cache_next(cache, &untouched, 1234), answer);
        CHECK(untouched == &s);
        CHECK_EQ(s.timeout_seen, 1234);
        CHECK(!cache->warm);
        for (int i = at; i < 5; ++i)
            snprintf(expected + strlen(expected), sizeof expected - strlen(expected), "%d ", i);
        strcat(expected, "0 1 2 0");
        CHECK_STR(take(cache, 5 - at + 4, false), expected);
        spdl_cache_destroy(cache);
        all_is_freed();
    }
}

static void timeouts_are_passed_on(void) { answers_are_passed_on(SPDL_TIMEOUT); }

static void errors_are_passed_on(void) {
    answers_are_passed_on(SPDL_E_STAGE);
    answers_are_passed_on(SPDL_CLOSED);
}

/* --- the source's end --- */

static void source_is_deleted_once(void) {
    for (int taken = 0; taken < 12; ++taken) {
        source s = source_of(taken % 2 ? 4 : 1000);
        spdl_cache_desc desc = desc_of(&s, 3, 5);
        spdl_cache *cache;
        desc.delete_source = source_delete;
        cache = cache_of(&desc);
        take(cache, taken, false);
        CHECK(s.deleted <= 1);
        if (taken >= 6) CHECK_EQ(s.deleted, 1); /* not kept until the cache is destroyed */
        spdl_cache_destroy(cache);
        CHECK_EQ(s.deleted, 1);
        all_is_freed();
    }
}

/* --- ownership --- */

static void items_stay_the_caches(void) {
    source s = source_of(1000);
    spdl_cache_desc desc = desc_of(&s, 2, 4);
    spdl_cache *cache = cache_of(&desc);
    item *first = NULL, *third = NULL, *other = NULL, *again = NULL;
    CHECK_EQ(spdl_cache_next(cache, (void **)&first, 0), SPDL_OK);
    CHECK_EQ(spdl_cache_next(cache, (void **)&other, 0), SPDL_OK);
    CHECK_EQ(spdl_cache_next(cache, (void **)&third, 0), SPDL_OK);
    CHECK_EQ(third->number, 2);
    CHECK_EQ(items_freed, 0); /* the third is not kept, but valid until the next call */
    CHECK_EQ(spdl_cache_next(cache, (void **)&other, 0), SPDL_OK);
    CHECK_EQ(items_freed, 1);
    CHECK_EQ(spdl_cache_next(cache, (void **)&again, 0), SPDL_OK);
    CHECK_EQ(items_freed, 2);
    CHECK(again == first);
    for (int i = 0; i < 100; ++i) take(cache, 1, false);
    CHECK_EQ(items_made, 4);
    CHECK_EQ(items_freed, 2);
    spdl_cache_destroy(cache);
    CHECK_EQ(items_freed, 4);
}

/* The item that was handed out last and is not kept is freed by destroy. */
static void destroy_frees_the_last_item(void) {
    for (int taken = 0; taken < 8; ++taken) {
        source s = source_of(1000);
        spdl_cache_desc desc = desc_of(&s, 2, 6);
        spdl_cache *cache = cache_of(&desc);
        take(cache, taken, false);
        spdl_cache_destroy(cache);
        all_is_freed();
    }
}

static void copies_are_the_callers(void) {
    for (int taken = 0; taken < 12; ++taken) {
        source s = source_of(1000);
        spdl_cache_desc desc = desc_of(&s, 2, 4);
        spdl_cache *cache;
        item *kept[12];
        desc.copy_item = item_copy;
        cache = cache_of(&desc);
        items_made = items_freed = copies_made = 0;
        for (int i = 0; i < taken; ++i) {
            REQUIRE(spdl_cache_next(cache, (void **)&kept[i], 0) == SPDL_OK);
            CHECK_EQ(kept[i]->number, i < 4 ? i : (i - 4) % 2);
            /* only what the cache keeps has to be copied */
            CHECK_EQ(kept[i]->copied, i < 2 || i >= 4);
            for (int k = 0; k < i; ++k) CHECK(kept[k] != kept[i]);
            kept[i]->number = -1; /* the caller may change what is its own */
        }
        for (int i = 0; i < taken; i += 2) item_free(kept[i]);
        spdl_cache_destroy(cache);
        for (int i = 1; i < taken; i += 2) item_free(kept[i]); /* and outlives the cache */
        for (int i = 0; i < taken; ++i) kept[i] = NULL;
        all_is_freed();
    }
}

/* A copy that fails is told, and the item is handed out by the next call. */
static void failed_copies_can_be_retried(void) {
    for (int at = 0; at < 6; ++at) {
        source s = source_of(1000);
        spdl_cache_desc desc = desc_of(&s, 3, 4);
        spdl_cache *cache;
        int numbers[12], count = 0, failures = 0;
        desc.copy_item = item_copy;
        cache = cache_of(&desc);
        items_made = items_freed = copies_made = 0;
        copy_fails_at = at;
        while (count < 10) {
            item *it = NULL;
            const spdl_result result = spdl_cache_next(cache, (void **)&it, 0);
            if (result != SPDL_OK) {
                CHECK_EQ(result, SPDL_E_NOMEM);
                CHECK(it == NULL);
                if (++failures > 1) break;
                continue;
            }
            numbers[count++] = it->number;
            item_free(it);
        }
        CHECK_EQ(failures, 1);
        for (int i = 0; i < count; ++i) CHECK_EQ(numbers[i], i < 4 ? i : (i - 4) % 3);
        spdl_cache_destroy(cache);
        all_is_freed();
    }
    copy_fails_at = -1;
}

static void nothing_has_to_be_freed(void) {
    source s = source_of(1000);
    spdl_cache_desc desc = desc_of(&s, 2, 3);
    spdl_cache *cache;
    item *made[3];
    desc.free_item = NULL;
    cache = cache_of(&desc);
    for (int i = 0; i < 3; ++i) CHECK_EQ(spdl_cache_next(cache, (void **)&made[i], 0), SPDL_OK);
    CHECK_STR(take(cache, 3, false), "0 1 0");
    spdl_cache_destroy(cache);
    CHECK_EQ(items_freed, 0);
    for (int i = 0; i < 3; ++i) item_free(made[i]);
}

static spdl_result next_null(void *self, void **out, int64_t timeout_ns) {
    (void)timeout_ns;
    *out = NULL;
    ++*(int *)self;
    return SPDL_OK;
}

static void null_is_an_item(void) {
    for (int copies = 0; copies < 2; ++copies) {
        spdl_cache_desc desc = { 0 };
        spdl_cache *cache;
        int calls = 0;
        desc.next = next_null;
        desc.source = &calls;
        desc.num_caches = 2;
        desc.return_caches_after = 3;
        desc.free_item = item_free;
        if (copies) desc.copy_item = item_copy;
        cache = cache_of(&desc);
        for (int i = 0; i < 9; ++i) {
            void *out = &calls;
            CHECK_EQ(spdl_cache_next(cache, &out, 0), SPDL_OK);
            CHECK(out == NULL);
        }
        CHECK_EQ(calls, 3);
        spdl_cache_destroy(cache);
    }
}

/* --- in front of a pipeline --- */

static int pipeline_made, pipeline_freed;

static void number_free(void *number) {
    __atomic_fetch_add(&pipeline_freed, 1, __ATOMIC_RELAXED);
    test_memory_free(number);
}

SPDL_FN(count_up, void, int) {
    const uint64_t n = spdl_sequence(task);
    if (n == *(const uint64_t *)spdl_ctx(task)) return SPDL_END;
    *out = (int *)test_memory(sizeof(void *), sizeof(int));
    **out = (int)n;
    __atomic_fetch_add(&pipeline_made, 1, __ATOMIC_RELAXED);
    return SPDL_OK;
}

/* Nothing comes through before the trainer has met a timeout. */
SPDL_FN(late, int, int) {
    const int *timeouts = (const int *)spdl_ctx(task);
    while (__atomic_load_n(timeouts, __ATOMIC_ACQUIRE) == 0) test_sleep_us(1000);
    *out = in;
    return SPDL_OK;
}

SPDL_FN(fail_at_two, int, int) {
    *out = in;
    return *in == 2 ? spdl_fail(task, "two is too many") : SPDL_OK;
}

static void *number_copy(const void *number) {
    int *copy = (int *)test_memory(sizeof(void *), sizeof(int));
    if (copy == NULL) return NULL;
    *copy = *(const int *)number;
    __atomic_fetch_add(&pipeline_made, 1, __ATOMIC_RELAXED);
    return copy;
}

static void delete_pipeline(void *pipeline) { spdl_pipeline_destroy((spdl_pipeline *)pipeline); }

static spdl_cache_desc desc_on(spdl_pipeline *pipeline, uint64_t num_caches, uint64_t after) {
    spdl_cache_desc desc = { 0 };
    desc.next = spdl_pipeline_next;
    desc.source = pipeline;
    desc.num_caches = num_caches;
    desc.return_caches_after = after;
    desc.free_item = number_free;
    desc.delete_source = delete_pipeline;
    return desc;
}

static void caches_a_pipeline(void) {
    for (int variant = 0; variant < 8; ++variant) {
        const bool copies = variant & 1, endless = variant & 2;
        uint64_t count = endless ? UINT64_MAX : 7;
        const spdl_pipeline_desc desc = { .workers = variant & 4 ? 3 : SPDL_INLINE };
        spdl_pipeline *pipeline;
        spdl_cache_desc on;
        spdl_cache *cache;
        REQUIRE(spdl_pipeline_create(&pipeline, &desc, SPDL_STAGES(
                    SPDL_SOURCE(count_up, .ctx = &count, .free_item = number_free),
                    SPDL_SINK(3))) == SPDL_OK);
        on = desc_on(pipeline, 3, endless ? 5 : 0);
        on.stop_after = 50;
        if (copies) on.copy_item = number_copy;
        cache = cache_of(&on);
        for (int i = 0; i < 50; ++i) {
            const int fresh = endless ? 5 : 3;
            int *number = NULL;
            REQUIRE(spdl_cache_next(cache, (void **)&number, SPDL_FOREVER) == SPDL_OK);
            CHECK_EQ(*number, i < fresh ? i : (i - fresh) % 3);
            if (copies) number_free(number);
        }
        CHECK_EQ(spdl_cache_next(cache, (void **)&pipeline, 0), SPDL_END);
        spdl_cache_destroy(cache);
        CHECK_EQ(pipeline_freed, pipeline_made);
    }
}

static void timeouts_of_a_pipeline_can_be_retried(void) {
    uint64_t count = 6;
    const spdl_pipeline_desc desc = { .workers = 2 };
    spdl_pipeline *pipeline;
    spdl_cache_desc on;
    spdl_cache *cache;
    int timeouts = 0;
    REQUIRE(spdl_pipeline_create(&pipeline, &desc, SPDL_STAGES(
                SPDL_SOURCE(count_up, .ctx = &count, .free_item = number_free),
                SPDL_PIPE(late, .ctx = &timeouts),
                SPDL_SINK(1))) == SPDL_OK);
    on = desc_on(pipeline, 2, 6);
    cache = cache_of(&on);
    for (int i = 0; i < 20;) {
        int *number = NULL;
        const spdl_result result = spdl_cache_next(cache, (void **)&number, 1000000);
        if (result == SPDL_TIMEOUT) {
            __atomic_add_fetch(&timeouts, 1, __ATOMIC_RELEASE);
            continue;
        }
        REQUIRE(CHECK_EQ(result, SPDL_OK));
        CHECK_EQ(*number, i < 6 ? i : (i - 6) % 2);
        ++i;
    }
    CHECK(timeouts > 0);
    spdl_cache_destroy(cache);
    CHECK_EQ(pipeline_freed, pipeline_made);
}

static void failures_of_a_pipeline_are_passed_on(void) {
    uint64_t count = 10;
    const spdl_pipeline_desc desc = { .workers = 2 };
    spdl_pipeline *pipeline;
    spdl_cache_desc on;
    spdl_cache *cache;
    int *number;
    REQUIRE(spdl_pipeline_create(&pipeline, &desc, SPDL_STAGES(
                SPDL_SOURCE(count_up, .ctx = &count, .free_item = number_free),
                SPDL_PIPE(fail_at_two),
                SPDL_SINK(3))) == SPDL_OK);
    on = desc_on(pipeline, 1, 5);
    cache = cache_of(&on);
    CHECK_EQ(spdl_cache_next(cache, (void **)&number, SPDL_FOREVER), SPDL_OK);
    CHECK_EQ(spdl_cache_next(cache, (void **)&number, SPDL_FOREVER), SPDL_OK);
    for (int i = 0; i < 3; ++i) /* an error is no end: the cache does not take over */
        CHECK_EQ(spdl_cache_next(cache, (void **)&number, SPDL_FOREVER), SPDL_E_STAGE);
    CHECK(!cache->warm);
    CHECK(strstr(spdl_pipeline_error(pipeline)->text, "two is too many") != NULL);
    spdl_cache_destroy(cache);
    CHECK_EQ(pipeline_freed, pipeline_made);
}

TEST_TABLE(cache) {
    TEST_CASE(caches_are_repeated),
    TEST_CASE(caches_are_returned_later),
    TEST_CASE(stop_after_is_exact),
    TEST_CASE(stop_after_may_come_before_the_cache_is_used),
    TEST_CASE(short_source_goes_straight_to_the_cache),
    TEST_CASE(source_shorter_than_the_cache),
    TEST_CASE(empty_source_ends),
    TEST_CASE(desc_is_checked),
    TEST_CASE(timeouts_are_passed_on),
    TEST_CASE(errors_are_passed_on),
    TEST_CASE(source_is_deleted_once),
    TEST_CASE(items_stay_the_caches),
    TEST_CASE(destroy_frees_the_last_item),
    TEST_CASE(copies_are_the_callers),
    TEST_CASE(failed_copies_can_be_retried),
    TEST_CASE(nothing_has_to_be_freed),
    TEST_CASE(null_is_an_item),
    TEST_CASE(caches_a_pipeline),
    TEST_CASE(timeouts_of_a_pipeline_can_be_retried),
    TEST_CASE(failures_of_a_pipeline_are_passed_on),
    TEST_END,
};
