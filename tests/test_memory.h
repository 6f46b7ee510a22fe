/* test_memory.h - the memory of tests: the address that was freed last is handed out first, to
   whichever thread asks. Included by test.h, for the one file that defines TEST_MAIN.

   Code that identifies items by their addresses is wrong if a new item has the address of a freed
   one. With malloc this is rare; with this memory it happens each time.

   Freed memory is poisoned. A second free and a write to freed memory fail the test. A test that
   reads freed memory finds no item there.

   With AddressSanitizer every second block goes back to malloc, which keeps it from use for long,
   and reports each access. The other blocks are poisoned until they are handed out. With
   ThreadSanitizer all blocks go back to malloc, which hands out what the thread freed last. A list
   of our own would order the threads that share it, and hide races. */
#ifndef TEST_MEMORY_H_INCLUDED
#define TEST_MEMORY_H_INCLUDED

/* Not TEST_SANITIZED, which slow builds set, too. */
#if defined(__SANITIZE_ADDRESS__)
#define TEST_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TEST_ASAN 1
#endif
#endif
#ifndef TEST_ASAN
#define TEST_ASAN 0
#endif

#if TEST_ASAN
void __asan_poison_memory_region(void const volatile *memory, size_t bytes);
void __asan_unpoison_memory_region(void const volatile *memory, size_t bytes);
#else
#define __asan_poison_memory_region(memory, bytes) ((void)(memory), (void)(bytes))
#define __asan_unpoison_memory_region(memory, bytes) ((void)(memory), (void)(bytes))
#endif

enum {
    TEST_HEAD = 64,        /* bytes in front of a block, and its alignment */
    TEST_WIDE = 256,       /* the same of the others */
    TEST_SIZES = 11,       /* of blocks: 64 bytes, 128 and so on up to 64 KiB */
    TEST_STACKS = 2 * TEST_SIZES, /* a freed block of each size; then of the wide ones */
    TEST_PLACES = 1 << 20, /* blocks with a place; later ones go back to malloc */
    TEST_POISON = 0xdb,
    TEST_POISONED = 4096, /* bytes of a block, at most */
    TEST_USED = 0x17e4b10c,
    TEST_FREED = 0x17e4dead
};

/* In front of the memory that a test gets. */
typedef struct test_block {
    void *start;
    uint32_t place; /* 0: none */
    int stack;
    int state; /* atomic */
} test_block;

/* The freed blocks. Links are here, so that no thread reads a block that another thread has taken.
   A block in use is not here, or LeakSanitizer would miss its leak. */
static struct {
    test_block *block;
    uint32_t below; /* atomic: a place, 0: none */
} test_places[TEST_PLACES];
static uint32_t test_places_used = 1;     /* atomic */
static uint64_t test_stacks[TEST_STACKS]; /* atomic: changes << 32 | the place on top, or 0 */
static uint32_t test_frees;                /* atomic */

static size_t test_room(int stack) { return (size_t)TEST_HEAD << stack % TEST_SIZES; }

static void test_push(test_block *block) {
    uint64_t *stack = &test_stacks[block->stack];
    uint64_t top = __atomic_load_n(stack, __ATOMIC_RELAXED), next;
    test_places[block->place].block = block;
    do {
        __atomic_store_n(&test_places[block->place].below, (uint32_t)top, __ATOMIC_RELAXED);
        next = ((top >> 32) + 1) << 32 | block->place;
    } while (!__atomic_compare_exchange_n(stack, &top, next, false, __ATOMIC_ACQ_REL,
                                          __ATOMIC_RELAXED));
}

/* NULL: there is none. */
static test_block *test_pop(int number) {
    uint64_t *stack = &test_stacks[number];
    uint64_t top = __atomic_load_n(stack, __ATOMIC_ACQUIRE), next;
    test_block *block;
    do {
        if ((uint32_t)top == 0) return NULL;
        next = ((top >> 32) + 1) << 32 |
               __atomic_load_n(&test_places[(uint32_t)top].below, __ATOMIC_RELAXED);
    } while (!__atomic_compare_exchange_n(stack, &top, next, false, __ATOMIC_ACQ_REL,
                                          __ATOMIC_ACQUIRE));
    block = test_places[(uint32_t)top].block;
    test_places[(uint32_t)top].block = NULL;
    return block;
}

static void test_poison(test_block *block) {
    const size_t room = test_room(block->stack);
    __asan_unpoison_memory_region(block + 1, room); /* the end, which nobody had asked for */
    memset(block + 1, TEST_POISON, room < (size_t)TEST_POISONED ? room : (size_t)TEST_POISONED);
    __asan_poison_memory_region(block + 1, room);
}

static void test_unpoison(test_block *block, size_t bytes) {
    const size_t room = test_room(block->stack);
    const size_t all = room < (size_t)TEST_POISONED ? room : (size_t)TEST_POISONED;
    const unsigned char *at = (const unsigned char *)(block + 1);
    size_t i = 0;
    __asan_unpoison_memory_region(block + 1, room);
    while (i < all && at[i] == TEST_POISON) ++i;
    test_check(i == all, __FILE__, __LINE__, "CHECK(byte %zu of freed memory is as it was)", i);
    __asan_poison_memory_region(at + bytes, room - bytes);
}

static test_block *test_block_new(size_t head, size_t bytes, int stack) {
    const size_t room = stack < TEST_STACKS ? test_room(stack) : bytes;
    char *start = (char *)test_system_memory(head, head + room);
    test_block *block;
    if (start == NULL) return NULL;
    block = (test_block *)(void *)(start + head) - 1;
    block->start = start;
    block->stack = stack;
    block->place = 0;
    if (stack == TEST_STACKS) return block;
    block->place = __atomic_fetch_add(&test_places_used, 1, __ATOMIC_RELAXED);
    if (block->place >= TEST_PLACES) block->place = 0;
    __asan_poison_memory_region((char *)(block + 1) + bytes, room - bytes);
    return block;
}

void *test_memory(size_t align, size_t bytes) {
    const size_t head = align <= TEST_HEAD   ? (size_t)TEST_HEAD
                        : align <= TEST_WIDE ? (size_t)TEST_WIDE
                                             : align;
    const int last = head == TEST_HEAD ? TEST_SIZES - 1 : TEST_STACKS - 1;
    test_block *block = NULL;
    int stack = head == TEST_HEAD ? 0 : TEST_SIZES;
    if (bytes > SIZE_MAX / 2) return NULL;
    while (stack < last && test_room(stack) < bytes) ++stack;
    if (TEST_TSAN || head > TEST_WIDE || test_room(stack) < bytes) stack = TEST_STACKS;
    else block = test_pop(stack);
    if (block != NULL) test_unpoison(block, bytes);
    else block = test_block_new(head, bytes, stack);
    if (block == NULL) return NULL;
    __atomic_store_n(&block->state, TEST_USED, __ATOMIC_RELAXED);
    return block + 1;
}

void test_memory_free(void *memory) {
    test_block *block;
    int state;
    bool keep;
    if (memory == NULL) return;
    block = (test_block *)memory - 1;
    state = __atomic_exchange_n(&block->state, TEST_FREED, __ATOMIC_RELAXED);
    if (!test_check(state == TEST_USED, __FILE__, __LINE__, "CHECK(memory is freed once)")) return;
    keep = !TEST_ASAN || __atomic_fetch_add(&test_frees, 1, __ATOMIC_RELAXED) % 2 == 0;
    if (block->place == 0 || !keep) {
        test_system_free(block->start);
        return;
    }
    test_poison(block);
    test_push(block);
}

#endif /* TEST_MEMORY_H_INCLUDED */
