/* The library on a system that has neither threads nor files: the twin in os_none.h takes the place
   of the one in the header. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#define SPDL_OS_HEADER "tests/os_none.h"
#include "../spdl.h"
#include "test.h"

/* What would wait for another thread times out at once. */
static void rings_without_threads(void) {
    static const spdl_ring_mode modes[] = { SPDL_RING_MPMC, SPDL_RING_SPSC };
    for (int i = 0; i < 2; ++i) {
        spdl_ring_desc desc = { .capacity = 3, .mode = modes[i] };
        spdl_ring *ring;
        REQUIRE(spdl_ring_create(&ring, &desc) == SPDL_OK);
        for (uintptr_t lap = 0; lap < 20; ++lap) {
            void *item = NULL;
            for (uintptr_t k = 0; k < 3; ++k) {
                item = (void *)(lap * 3 + k);
                CHECK_EQ(spdl_ring_push(ring, &item, SPDL_FOREVER), SPDL_OK);
            }
            CHECK_EQ(spdl_ring_try_push(ring, &item), SPDL_FULL);
            CHECK_EQ(spdl_ring_push(ring, &item, SPDL_FOREVER), SPDL_TIMEOUT);
            for (uintptr_t k = 0; k < 3; ++k) {
                CHECK_EQ(spdl_ring_pop(ring, &item, SPDL_FOREVER), SPDL_OK);
                CHECK_EQ((uintptr_t)item, lap * 3 + k);
            }
            CHECK_EQ(spdl_ring_pop(ring, &item, SPDL_SECONDS(1)), SPDL_TIMEOUT);
        }
        spdl_ring_destroy(ring, NULL, NULL);
    }
}

SPDL_FN(count_to_ten, void, int) {
    if (spdl_sequence(task) == 10) return SPDL_END;
    if ((*out = (int *)malloc(sizeof(int))) == NULL) return SPDL_E_NOMEM;
    **out = (int)spdl_sequence(task);
    return SPDL_OK;
}

SPDL_FN(twice, int, int) {
    *in *= 2;
    *out = in;
    return SPDL_OK;
}

static void pipelines_without_threads(void) {
    spdl_error error;
    spdl_pipeline_desc desc = { .error = &error };
    spdl_pipeline *p = NULL;
    for (desc.workers = 0; desc.workers < 2; ++desc.workers) {
        const spdl_result result = spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_SOURCE(count_to_ten, .free_item = free),
            SPDL_PIPE(twice, .free_item = free, .concurrency = 4),
            SPDL_BATCH(3), SPDL_SINK(2)));
        spdl_batch *batch;
        int at = 0;
        if (desc.workers > 0) { /* the twin has none to give */
            CHECK_EQ(result, SPDL_E_THREAD);
            CHECK(strstr(error.text, "thread 0 of 1 could not be created") != NULL);
            break;
        }
        REQUIRE(result == SPDL_OK);
        while (SPDL_NEXT(p, &batch, SPDL_FOREVER) == SPDL_OK) {
            for (size_t i = 0; i < batch->count; ++i, at += 2)
                CHECK_EQ(*(int *)batch->items[i], at);
            spdl_batch_free(batch);
        }
        CHECK_EQ(at, 20);
        spdl_pipeline_destroy(p);
    }
}

/* An array in memory can be read, one in a file cannot. */
static void arrays_without_files(void) {
    static const char head[] = "\x93NUMPY\1\0\x76\0{'descr': '|u1', 'fortran_order': False, "
                               "'shape': (3,), }";
    unsigned char bytes[128 + 3], data[3] = { 0 };
    spdl_error error;
    spdl_npz_desc desc = { .error = &error };
    spdl_npz *npz = NULL;
    memset(bytes, ' ', sizeof bytes);
    memcpy(bytes, head, sizeof head - 1);
    bytes[127] = '\n';
    memcpy(bytes + 128, "\1\2\3", 3);
    REQUIRE(spdl_npz_open_memory(&npz, bytes, sizeof bytes, "three", &desc) == SPDL_OK);
    CHECK_EQ(spdl_npz_read(npz, 0, data, sizeof data, NULL), SPDL_OK);
    CHECK(memcmp(data, "\1\2\3", 3) == 0);
    spdl_npz_close(npz);
    CHECK_EQ(spdl_npz_open_file(&npz, "three.npz", &desc), SPDL_E_IO);
    CHECK(strstr(error.text, "there are no files here") != NULL);
}

TEST_TABLE(os_none) {
    TEST_CASE(rings_without_threads),
    TEST_CASE(pipelines_without_threads),
    TEST_CASE(arrays_without_files),
    TEST_END,
};
