/* The ring core of spdl.h by itself, as a model checker would take it: tests/check_core_alone.sh
   cuts the section out, and it is included here as ring_core.inc. Nothing of a system or of the C
   library is there, the helpers are plain functions, and one thread runs through both modes. */
#include "../spdl.h" /* the declarations, which include stddef.h, stdint.h and stdbool.h */

#define SPDL__PRIVATE SPDL__UNUSED static
#define SPDL__INLINE SPDL__UNUSED static inline
#define SPDL__NOINLINE SPDL__UNUSED static
#define SPDL__PREFETCHES
#define SPDL__LIKELY(condition) (condition)
typedef uint64_t spdl__word64;
#define SPDL_CACHE_LINE 64
#define SPDL_TEST_POINT(id) ((void)(id))

static void *core_copy(void *to, const void *from, size_t bytes) {
    size_t i;
    for (i = 0; i < bytes; ++i) ((unsigned char *)to)[i] = ((const unsigned char *)from)[i];
    return to;
}
#define memcpy core_copy

#define HELPERS(type, suffix)                                                                      \
    SPDL__PRIVATE type spdl__load##suffix(const type *p) { return *p; }                            \
    SPDL__PRIVATE type spdl__load_relaxed##suffix(const type *p) { return *p; }                    \
    SPDL__PRIVATE void spdl__store##suffix(type *p, type value) { *p = value; }                    \
    SPDL__PRIVATE void spdl__store_relaxed##suffix(type *p, type value) { *p = value; }            \
    SPDL__PRIVATE type spdl__or##suffix(type *p, type bits) {                                      \
        const type old = *p;                                                                       \
        *p |= bits;                                                                                \
        return old;                                                                                \
    }
HELPERS(uint32_t, 32)
HELPERS(uint64_t, )

SPDL__PRIVATE bool spdl__cas_relaxed(uint64_t *p, uint64_t *expected, uint64_t desired) {
    if (*p == *expected) {
        *p = desired;
        return true;
    }
    *expected = *p;
    return false;
}
SPDL__PRIVATE uint64_t spdl__min(uint64_t a, uint64_t b) { return a < b ? a : b; }
SPDL__PRIVATE uint64_t spdl__max(uint64_t a, uint64_t b) { return a > b ? a : b; }
SPDL__PRIVATE void spdl__prefetch_write(const void *p) { (void)p; }
SPDL__PRIVATE void spdl__barrier_quick(void) {}

#include "ring_core.inc"

enum { MAX_CAPACITY = 5, MAX_WORDS = 3, ITEMS = 20 };

typedef struct driver {
    spdl__ring_core ring;
    uint64_t slots[8 * (MAX_WORDS + 1)];
    uint64_t words; /* of an item */
    uint64_t in, out;
} driver;

static void driver_start(driver *d, spdl_ring_mode mode, uint64_t capacity, uint64_t words,
                         bool quick) {
    static const driver zero;
    *d = zero;
    d->words = words;
    d->ring.store = (unsigned char *)d->slots;
    spdl__ring_core_shape(&d->ring, mode, capacity, (size_t)words * sizeof(uint64_t), quick);
    spdl__ring_core_start(&d->ring);
}

static spdl_result push_one(driver *d) {
    uint64_t item[MAX_WORDS], moved = 0, i;
    uint32_t waiting;
    spdl_result result = SPDL_OK;
    for (i = 0; i < d->words; ++i) item[i] = d->in * 10 + i;
    if (!spdl__ring_quick_push(&d->ring, item, &waiting))
        result = d->ring.mode == SPDL_RING_SPSC ? spdl__spsc_push_n(&d->ring, item, 1, &moved)
                                                : spdl__mpmc_push_n(&d->ring, item, 1, &moved);
    d->in += result == SPDL_OK;
    return result;
}

static spdl_result pop_one(driver *d) {
    uint64_t item[MAX_WORDS] = { 0 }, moved = 0, i;
    uint32_t waiting;
    spdl_result result = SPDL_OK;
    if (!spdl__ring_quick_pop(&d->ring, item, &waiting))
        result = d->ring.mode == SPDL_RING_SPSC ? spdl__spsc_pop_n(&d->ring, item, 1, &moved)
                                                : spdl__mpmc_pop_n(&d->ring, item, 1, &moved);
    if (result != SPDL_OK) return result;
    for (i = 0; i < d->words; ++i)
        if (item[i] != d->out * 10 + i) return SPDL_E_INVALID;
    d->out++;
    return SPDL_OK;
}

/* Fills, empties and so on; then closes with an item inside. */
static bool runs(driver *d) {
    while (d->out < ITEMS) {
        while (d->in < d->out + d->ring.capacity)
            if (push_one(d) != SPDL_OK) return false;
        if (push_one(d) != SPDL_FULL) return false;
        while (d->out < d->in)
            if (pop_one(d) != SPDL_OK) return false;
        if (pop_one(d) != SPDL_EMPTY) return false;
    }
    if (push_one(d) != SPDL_OK) return false;
    spdl__ring_core_close(&d->ring);
    return push_one(d) == SPDL_CLOSED && pop_one(d) == SPDL_OK && pop_one(d) == SPDL_CLOSED;
}

int main(void) {
    static driver d;
    uint64_t capacity, words;
    int mode, quick;
    for (mode = SPDL_RING_MPMC; mode <= SPDL_RING_SPSC; ++mode)
        for (capacity = 1; capacity <= MAX_CAPACITY; ++capacity)
            for (words = 1; words <= MAX_WORDS; ++words)
                for (quick = 0; quick < 2; ++quick) {
                    driver_start(&d, (spdl_ring_mode)mode, capacity, words, quick != 0);
                    if (!runs(&d)) return 1;
                }
    return 0;
}
