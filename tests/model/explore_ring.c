/* What explore.c runs: the rings of spdl.h, as users call them. The header is not changed; the
   system calls it makes and the bytes it copies go through the explorer. Each plan is run with the
   membarrier and without: `fences` is a kernel that has none, `quick fences` (in a program of its
   own, with SPDL__OS_BARRIER=0) a system that has none. */
#include "explore.h"

#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#define syscall explore_syscall
#define memcpy explore_copy
#define SPDL_MALLOC(bytes) explore_alloc(bytes)
#define SPDL_FREE(memory) ((void)(memory))
#define SPDL_CACHE_LINE 16
#define SPDL_SPINS 0
#define SPDL_YIELDS 0
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../../spdl.h"

#define ITEMS 8 /* at most, of each producer */

/* SPIN_PUSH: pushes are tried again and again, pops wait; SPIN_POP: the other way round. */
typedef enum way { TRY, BLOCK, TIMED, SPIN_PUSH, SPIN_POP, TRY_BATCH, BATCH } way;
static const char *const way_names[] = { "try",      "block", "timed",   "spin push",
                                         "spin pop", "try_n", "block_n" };
static const char *const mode_names[] = { "mpmc", "spsc" };

typedef struct plan {
    spdl_ring_mode mode;
    unsigned capacity, producers, consumers;
    unsigned items; /* of each producer */
    way way;
    unsigned closers; /* threads that close; in SPSC the producer does, so often, at its end */
    unsigned item_bytes; /* a multiple of 8 */
    bool exhaustive;
    unsigned leave; /* pops that are not done: the ring ends up with as many items */
} plan;

static spdl_ring *ring;
static uint64_t *closed_flag; /* set when a close has returned */
static unsigned char pushed[EXPLORE_THREADS][ITEMS + 1], popped[EXPLORE_THREADS][ITEMS + 1];
static unsigned newest[EXPLORE_THREADS][EXPLORE_THREADS]; /* [consumer][producer] */
static bool told_the_end;

/* An item: producer and number in each of its words. */
static uint64_t item_of(unsigned producer, unsigned i) { return (uint64_t)producer << 8 | i; }

static void make_items(const plan *p, uint64_t *items, unsigned producer, unsigned first,
                       unsigned n) {
    unsigned i, w, each = p->item_bytes / 8;
    for (i = 0; i < n; i++)
        for (w = 0; w < each; w++) items[i * each + w] = item_of(producer, first + i);
}

static void take_items(const plan *p, const uint64_t *items, unsigned consumer, uint64_t n) {
    const unsigned each = p->item_bytes / 8;
    uint64_t k;
    unsigned w;
    for (k = 0; k < n; k++) {
        const uint64_t item = items[k * each];
        const unsigned producer = (unsigned)(item >> 8), i = (unsigned)(item & 255);
        for (w = 1; w < each; w++)
            if (items[k * each + w] != item) explore_fail("a torn item");
        if (producer >= p->producers || i == 0 || i > p->items) explore_fail("no item of ours");
        if (popped[producer][i]++ != 0) explore_fail("an item comes twice");
        if (i <= newest[consumer][producer]) explore_fail("out of order");
        newest[consumer][producer] = i;
        if (p->consumers == 1 && p->way != TIMED && p->way != TRY && p->closers == 0 && i > 1 &&
            !popped[producer][i - 1])
            explore_fail("an item was skipped");
    }
}

/* Has a close returned that is before what this thread does next? */
static bool is_late(const plan *p) { return p->closers > 0 && spdl__load(closed_flag) != 0; }

static void close_it(void) {
    spdl_ring_close(ring);
    spdl__store(closed_flag, 1);
}

/* Pushes up to n items from number `first` on; *moved says how many went in. */
static spdl_result push_some(const plan *p, unsigned me, unsigned first, unsigned n,
                             uint64_t *moved) {
    uint64_t items[ITEMS * 2];
    spdl_result result;
    *moved = 0;
    make_items(p, items, me, first, n);
    switch (p->way) {
    case TRY_BATCH: return spdl__ring_try(ring, true, items, n, moved);
    case BATCH: return spdl_ring_push_n(ring, items, n, moved, -1);
    case TRY: result = spdl_ring_try_push(ring, items); break;
    case SPIN_PUSH:
        do result = spdl_ring_try_push(ring, items);
        while (result == SPDL_FULL);
        break;
    case TIMED: result = spdl_ring_push(ring, items, 1000); break;
    default: result = spdl_ring_push(ring, items, -1); break;
    }
    *moved = result == SPDL_OK;
    return result;
}

static spdl_result pop_some(const plan *p, unsigned me, unsigned n, uint64_t *moved) {
    uint64_t items[ITEMS * 2];
    spdl_result result;
    *moved = 0;
    switch (p->way) {
    case TRY_BATCH: result = spdl__ring_try(ring, false, items, n, moved); break;
    case BATCH: result = spdl_ring_pop_n(ring, items, n, moved, -1); break;
    case TRY: result = spdl_ring_try_pop(ring, items); break;
    case SPIN_POP:
        do result = spdl_ring_try_pop(ring, items);
        while (result == SPDL_EMPTY);
        break;
    case TIMED: result = spdl_ring_pop(ring, items, 1000); break;
    default: result = spdl_ring_pop(ring, items, -1); break;
    }
    if (p->way < TRY_BATCH) *moved = result == SPDL_OK;
    if ((result == SPDL_OK) != (*moved > 0)) explore_fail("pop: %d, %d moved", result, (int)*moved);
    take_items(p, items, me, *moved);
    return result;
}

/* Tries that find no room give up, so that each run ends. */
static void produce(const plan *p, unsigned me) {
    const bool closes = p->mode == SPDL_RING_SPSC && p->closers > 0;
    const unsigned n = p->way >= TRY_BATCH ? 2 : 1;
    unsigned i, k;
    uint64_t moved;
    for (i = 1; i <= p->items;) {
        const bool late = is_late(p);
        const spdl_result result = push_some(p, me, i, i < p->items ? n : 1, &moved);
        if (late && (result != SPDL_CLOSED || moved > 0)) explore_fail("accepted after close");
        for (k = 0; k < moved; k++) pushed[me][i + k] = 1;
        if (result == SPDL_CLOSED && (p->closers == 0 || closes)) explore_fail("closed by nobody");
        if (result == SPDL_CLOSED) return;
        i += result == SPDL_OK ? (unsigned)moved : 1;
    }
    for (k = 0; closes && k < p->closers; k++) {
        close_it();
        if (push_some(p, me, 1, 1, &moved) != SPDL_CLOSED) explore_fail("accepted after close");
    }
}

/* Until the end, or as many as there are for each. */
static void consume(const plan *p, unsigned me) {
    const unsigned total = p->producers * p->items - p->leave;
    const unsigned share = (total + me) / p->consumers; /* they add up to total */
    const bool may_fail = p->way == TRY || p->way == TRY_BATCH || p->way == TIMED;
    unsigned tries = may_fail ? total + 2 : UINT32_MAX;
    uint64_t have = 0, moved;
    for (; tries > 0 && (p->closers > 0 || have < share); tries--) {
        const unsigned n = p->closers > 0 || share - have > 1 ? 2 : 1;
        const spdl_result result = pop_some(p, me, n, &moved);
        have += moved;
        if (result != SPDL_CLOSED) continue;
        if (p->closers == 0) explore_fail("closed by nobody");
        told_the_end = true;
        for (tries = 0; tries < 2; tries++) /* and it stays the end */
            if (pop_some(p, me, 2, &moved) != SPDL_CLOSED) explore_fail("more after the end");
        if (spdl_ring_count(ring) != 0) explore_fail("items are counted after the end");
        return;
    }
}

void explore_thread(const void *of, int thread) {
    const plan *p = (const plan *)of;
    const unsigned me = (unsigned)thread;
    if (me < p->producers) {
        produce(p, me);
    } else if (me < p->producers + p->consumers) {
        consume(p, me - p->producers);
    } else {
        close_it();
    }
}

void explore_begin(const void *of) {
    const plan *p = (const plan *)of;
    spdl_ring_desc desc;
    memset(&desc, 0, sizeof(desc));
    desc.capacity = p->capacity;
    desc.item_bytes = p->item_bytes;
    desc.mode = p->mode;
    if (spdl_ring_create(&ring, &desc) != SPDL_OK) abort();
    closed_flag = (uint64_t *)explore_alloc(sizeof(*closed_flag));
    *closed_flag = 0;
    memset(pushed, 0, sizeof(pushed));
    memset(popped, 0, sizeof(popped));
    memset(newest, 0, sizeof(newest));
    told_the_end = false;
    explore_name(&ring->core.tail, "tail");
    explore_name(&ring->core.head, "head");
    explore_name(&ring->core.pops_waiting, "pops_waiting");
    explore_name(&ring->core.pushes_waiting, "pushes_waiting");
    explore_name(&ring->pops.event.word, "pops.word");
    explore_name(&ring->pushes.event.word, "pushes.word");
    explore_name(closed_flag, "closed_flag");
    explore_name(ring->core.store, "store");
}

static void leftover(void *item, void *of) {
    const plan *p = (const plan *)of;
    take_items(p, (const uint64_t *)item, p->consumers, 1);
}

void explore_end(const void *of) {
    const plan *p = (const plan *)of;
    const uint64_t inside = spdl_ring_count(ring);
    unsigned producer, i;
    if ((ring->core.pops_waiting & SPDL__RING_WAITING) != 0 || ring->core.pushes_waiting != 0)
        explore_fail("somebody is counted as asleep");
    if (inside > p->capacity) explore_fail("more inside than fits");
    if (told_the_end && inside > 0) explore_fail("the end was told before the last item");
    memset(newest[p->consumers], 0, sizeof(newest[0]));
    spdl_ring_destroy(ring, leftover, (void *)(uintptr_t)p);
    for (producer = 0; producer < p->producers; producer++)
        for (i = 1; i <= p->items; i++)
            if (pushed[producer][i] != popped[producer][i])
                explore_fail(pushed[producer][i] ? "item %u of %u is lost"
                                                 : "item %u of %u was refused and came out",
                             i, producer);
}

static const plan plans[] = {
    /* mode, capacity, producers, consumers, items, way, closers, bytes */
    { SPDL_RING_SPSC, 1, 1, 1, 4, TRY, 0, 8, false, 0 },
    { SPDL_RING_SPSC, 2, 1, 1, 6, TRY, 0, 8, false, 0 },
    { SPDL_RING_SPSC, 3, 1, 1, 6, TRY, 1, 8, false, 0 },
    { SPDL_RING_SPSC, 1, 1, 1, 4, BLOCK, 0, 8, false, 0 },
    { SPDL_RING_SPSC, 3, 1, 1, 8, BLOCK, 0, 8, false, 0 },
    { SPDL_RING_SPSC, 1, 1, 1, 4, BLOCK, 1, 8, false, 0 },
    { SPDL_RING_SPSC, 2, 1, 1, 5, BLOCK, 2, 8, false, 0 },
    { SPDL_RING_SPSC, 2, 1, 1, 4, TIMED, 1, 8, false, 0 },
    { SPDL_RING_SPSC, 3, 1, 1, 6, TRY_BATCH, 1, 16, false, 0 },
    { SPDL_RING_SPSC, 3, 1, 1, 8, BATCH, 0, 8, false, 0 },
    { SPDL_RING_SPSC, 2, 1, 1, 6, BATCH, 1, 8, false, 0 },
    { SPDL_RING_MPMC, 2, 1, 2, 4, BLOCK, 1, 8, false, 0 },
    { SPDL_RING_MPMC, 3, 2, 1, 4, BATCH, 1, 16, false, 0 },
    { SPDL_RING_MPMC, 1, 2, 2, 3, TRY, 0, 8, false, 0 },
    { SPDL_RING_MPMC, 2, 2, 2, 3, TRY, 1, 8, false, 0 },
    { SPDL_RING_MPMC, 3, 2, 2, 4, TRY, 0, 16, false, 0 },
    { SPDL_RING_MPMC, 1, 2, 2, 2, BLOCK, 0, 8, false, 0 },
    { SPDL_RING_MPMC, 2, 2, 2, 1, BLOCK, 0, 8, false, 0 }, /* pops pass on a wake */
    { SPDL_RING_MPMC, 2, 2, 2, 2, BLOCK, 0, 8, false, 2 }, /* pushes do */
    { SPDL_RING_MPMC, 2, 2, 2, 3, BLOCK, 0, 8, false, 0 },
    { SPDL_RING_MPMC, 3, 2, 2, 3, BLOCK, 1, 8, false, 0 },
    { SPDL_RING_MPMC, 2, 2, 2, 2, TIMED, 1, 8, false, 0 },
    { SPDL_RING_MPMC, 3, 2, 2, 4, TRY_BATCH, 0, 8, false, 0 },
    { SPDL_RING_MPMC, 3, 2, 2, 4, BATCH, 1, 8, false, 0 },
    { SPDL_RING_SPSC, 1, 1, 1, 3, SPIN_PUSH, 0, 8, false, 0 },
    { SPDL_RING_SPSC, 1, 1, 1, 3, SPIN_POP, 0, 8, false, 0 },
    { SPDL_RING_MPMC, 1, 2, 2, 2, SPIN_PUSH, 0, 8, false, 0 },
    { SPDL_RING_MPMC, 1, 2, 2, 2, SPIN_POP, 0, 8, false, 0 },
    /* nobody pops, or nobody pushes: close wakes them */
    { SPDL_RING_SPSC, 1, 1, 1, 0, BLOCK, 1, 8, false, 0 },
    { SPDL_RING_MPMC, 1, 2, 0, 2, BLOCK, 1, 8, false, 0 },
    { SPDL_RING_MPMC, 3, 0, 3, 0, BLOCK, 1, 8, false, 0 },
    /* every schedule with two preemptions and two old values */
    { SPDL_RING_SPSC, 1, 1, 1, 1, TRY, 1, 8, true, 0 },
    { SPDL_RING_SPSC, 1, 1, 1, 2, BLOCK, 0, 8, true, 0 },
    { SPDL_RING_SPSC, 1, 1, 1, 1, BLOCK, 1, 8, true, 0 },
    { SPDL_RING_MPMC, 1, 1, 1, 1, BLOCK, 1, 8, true, 0 },
    { SPDL_RING_MPMC, 1, 2, 1, 1, TRY, 1, 8, true, 0 },
};

int explore_scenarios(const explore_scenario **list) {
    static explore_scenario made[2 * sizeof(plans) / sizeof(plans[0])];
    const int count = (int)(sizeof(plans) / sizeof(plans[0]));
    int i, n = 0, fences;
    for (fences = !SPDL__OS_BARRIER; fences < 2; fences++)
        for (i = 0; i < count; i++) {
            const plan *p = &plans[i];
            explore_scenario *s = &made[n++];
            snprintf(s->name, sizeof(s->name), "%s %uP%uC capacity %u %s %ux%u bytes%s%s%s%s",
                     mode_names[p->mode], p->producers, p->consumers, p->capacity,
                     way_names[p->way], p->items, p->item_bytes,
                     p->leave > 0 ? " some stay" : "",
                     p->closers == 0 ? "" : p->closers == 1 ? " close" : " two closes",
                     !fences ? "" : SPDL__OS_BARRIER ? " fences" : " quick fences",
                     p->exhaustive ? " exhaustive" : "");
            s->plan = p;
            s->threads = (int)(p->producers + p->consumers);
            if (p->mode == SPDL_RING_MPMC) s->threads += (int)p->closers;
            s->exhaustive = p->exhaustive;
            s->membarrier = !fences;
        }
    *list = made;
    return n;
}
