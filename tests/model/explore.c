/* Runs small concurrent programs under a model of C11 memory, very many times: each time with other
   choices of which thread goes on and of which value a load gives. It checks that no two threads
   touch plain memory without order between them, that nobody sleeps for ever, and what the program
   itself checks.

   The program, the unmodified spdl.h with it, is compiled with -fsanitize=thread. That makes the
   compiler call a function at each access to memory; here are those functions, in place of the
   sanitizer's. Threads are coroutines; they change places at atomic accesses and system calls.

   The model: each atomic word keeps a history of its stores. A load may give any of them that is
   not older than one the thread knows of. A thread knows what it has read and written; what another
   knew at a release it learns when it acquires the store, or one that a read-modify-write put on
   top of it. Sequentially consistent fences share what they know. The expedited membarrier is such
   a fence in each other thread, at some moment during the call, in any order.

   Narrower than C11: stores enter the history in the order in which they were run, and a load never
   gives a store that is yet to come; a history keeps KEPT stores; after STALE old values in a row a
   load gives the newest. Futexes: who wakes is before who is woken, as in Linux.

   usage: explore [--runs N] [--seed N] [--first] [--replay N] [--list] [NAME ...]
   --first ends with the first failure. --replay N takes the seed of a failure, runs that execution
   once more and prints its accesses. */
#include "explore.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>

#define WORDS 32      /* atomic words in one run */
#define KEPT 16       /* stores of each */
#define STALE 3       /* old values in a row */
#define ARENA 4096    /* bytes of modelled memory */
#define GRAIN 4       /* bytes for which races are told apart */
#define STEPS 4000    /* of one run, before it counts as endless */
#define DEPTH 4096    /* choices of one run when all are tried */
#define PREEMPTIONS 2 /* then, in each run */
#define OLD_VALUES 2  /* then, in each run */
#define STACK (64 * 1024)
#define NOBODY 255

/* What a thread knows: the newest store of each word, and how far each thread had come. */
typedef struct view {
    uint16_t word[WORDS];
    uint16_t clock[8];
} view;

typedef struct store {
    uint64_t value;
    view released;
} store;

typedef struct word {
    unsigned char *address;
    unsigned last; /* index of the newest store */
    unsigned char stale[EXPLORE_THREADS];
    store history[KEPT];
} word;

typedef struct thread {
    jmp_buf context;
    ucontext_t first;
    bool made;
    enum { READY, ASLEEP, DONE } state;
    const void *sleeps_on;
    bool may_time_out;
    view now;      /* what it knows */
    view acquired; /* what an acquire fence would add */
    view fenced;   /* what it knew at its last fence: its relaxed stores release that */
} thread;

typedef struct grain {
    unsigned char word; /* index + 1 of the atomic word that lies here */
    unsigned char writer;
    uint16_t wrote;
    uint16_t read[EXPLORE_THREADS];
} grain;

static _Alignas(64) unsigned char arena[ARENA];
static size_t arena_used;
static grain grains[ARENA / GRAIN];
static word words[WORDS];
static int word_count;
static thread threads[EXPLORE_THREADS];
static _Alignas(64) unsigned char stacks[EXPLORE_THREADS][STACK];
static thread *self; /* NULL: before and after the threads run */
static jmp_buf out;
static view fences; /* what the last sequentially consistent fence knew */
static const explore_scenario *scenario;
static const char *names[ARENA / GRAIN];
static unsigned steps, switch_every, old_every;
static bool tracing, exhaustive;
static char failure[256];

/* ---- choices ---- */

static uint64_t random_state;
static unsigned char chosen[DEPTH], choices[DEPTH];
static unsigned depth, decided, preemptions, old_values;

static unsigned draw(unsigned n) { /* xorshift64* */
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (unsigned)((random_state * 0x2545f4914f6cdd1dull >> 33) % n);
}

/* One of n: at random, or the next one that has not been tried. */
static unsigned choose(unsigned n) {
    if (n < 2) return 0;
    if (!exhaustive) return draw(n);
    if (depth == DEPTH) explore_fail("too many choices");
    if (depth == decided) {
        chosen[depth] = 0;
        choices[depth] = (unsigned char)n;
        decided++;
    }
    return chosen[depth++];
}

/* Sets the next run of an exhaustive search; false when all were run. */
static bool next_choices(void) {
    while (decided > 0 && chosen[decided - 1] + 1 == choices[decided - 1]) decided--;
    if (decided == 0) return false;
    chosen[decided - 1]++;
    return true;
}

/* ---- telling ---- */

static int number(const thread *t) { return (int)(t - threads); }

static void trace(const char *what, const void *address, uint64_t value, const char *more) {
    const size_t at = (size_t)((const unsigned char *)address - arena) / GRAIN;
    char name[32];
    if (!tracing || self == NULL) return;
    snprintf(name, sizeof(name), "+%zu", at * GRAIN);
    if (address == NULL) name[0] = 0;
    printf("    %d %-9s %-16s %llx %s\n", number(self), what,
           address != NULL && at < ARENA / GRAIN && names[at] != NULL ? names[at] : name,
           (unsigned long long)value, more);
}

void explore_fail(const char *format, ...) {
    va_list args;
    int i;
    if (failure[0] == 0) {
        va_start(args, format);
        vsnprintf(failure, sizeof(failure), format, args);
        va_end(args);
    }
    if (self == NULL) return;
    for (i = 0; i < EXPLORE_THREADS; i++) threads[i].made = false;
    self = NULL;
    _longjmp(out, 1);
}

void explore_name(const void *address, const char *name) {
    names[(size_t)((const unsigned char *)address - arena) / GRAIN] = name;
}

void *explore_alloc(size_t bytes) {
    void *memory = arena + arena_used;
    arena_used += (bytes + 15) & ~(size_t)15;
    if (arena_used > ARENA) abort();
    return memory;
}

/* ---- threads ---- */

static void go_to(thread *next) {
    thread *from = self;
    if (next == from || _setjmp(from->context) != 0) return;
    self = next;
    if (next->made) _longjmp(next->context, 1);
    next->made = true;
    setcontext(&next->first);
}

/* Those who can go on, the caller first if it is one. Sleep that may end by itself does so now and
   then. */
static unsigned runnable(thread **list) {
    unsigned n = 0;
    int i;
    if (self->state == READY) list[n++] = self;
    for (i = 0; i < scenario->threads; i++)
        if (&threads[i] != self && (threads[i].state == READY ||
                                    (threads[i].state == ASLEEP && threads[i].may_time_out)))
            list[n++] = &threads[i];
    return n;
}

/* A place where another thread may go on. */
static void point(void) {
    thread *list[EXPLORE_THREADS];
    unsigned n;
    if (self == NULL) return;
    if (++steps > STEPS) explore_fail("no end in sight");
    if (exhaustive ? preemptions == PREEMPTIONS : draw(switch_every) != 0) return;
    n = runnable(list);
    n = choose(n);
    if (n != 0) preemptions++;
    go_to(list[n]);
}

/* The caller cannot go on. */
static void block(void) {
    thread *list[EXPLORE_THREADS];
    const unsigned n = runnable(list);
    if (n > 0)
        go_to(list[choose(n)]);
    else if (_setjmp(self->context) == 0)
        _longjmp(out, 1);
}

static void thread_main(void) {
    for (;;) { /* once in each run */
        explore_thread(scenario->plan, number(self));
        self->state = DONE;
        block();
    }
}

/* ---- memory ---- */

static void learn(view *to, const view *from) {
    int i;
    for (i = 0; i < WORDS; i++)
        if (to->word[i] < from->word[i]) to->word[i] = from->word[i];
    for (i = 0; i < 8; i++)
        if (to->clock[i] < from->clock[i]) to->clock[i] = from->clock[i];
}

static void fence(thread *t) {
    learn(&t->now, &t->acquired);
    learn(&t->now, &fences);
    fences = t->fenced = t->now;
    t->now.clock[number(t)]++;
}

static grain *grain_of(const volatile void *address) {
    const uintptr_t at = (uintptr_t)address - (uintptr_t)arena;
    return at < ARENA ? &grains[at / GRAIN] : NULL;
}

static uint64_t memory(const word *w) { return w->history[w->last % KEPT].value; }

static word *word_at(const volatile void *address, int bytes) {
    grain *const g = grain_of(address);
    word *w;
    uint32_t small = 0;
    if (g == NULL) explore_fail("an atomic access outside the memory that is modelled");
    if (g->word != 0) return &words[g->word - 1];
    if (g->writer != NOBODY) explore_fail("a plain write to an atomic word");
    if (word_count == WORDS) explore_fail("too many atomic words");
    w = &words[word_count++];
    g->word = (unsigned char)word_count;
    if (bytes == 8) grain_of((const volatile char *)address + GRAIN)->word = g->word;
    memset(w->stale, 0, sizeof(w->stale));
    memset(&w->history[0], 0, sizeof(w->history[0]));
    w->address = (unsigned char *)(uintptr_t)address;
    w->last = 0;
    memcpy(bytes == 8 ? (void *)&w->history[0].value : (void *)&small, w->address, (size_t)bytes);
    if (bytes == 4) w->history[0].value = small;
    return w;
}

static bool acquires(int order) { return order == 1 || order == 2 || order >= 4; }
static bool releases(int order) { return order >= 3; }

/* Which store a load gives. */
static unsigned pick(const word *w) {
    const unsigned at = (unsigned)(w - words);
    unsigned oldest = self->now.word[at];
    unsigned n;
    if (w->last >= KEPT && oldest < w->last - (KEPT - 1)) oldest = w->last - (KEPT - 1);
    n = w->last - oldest + 1;
    if (w->stale[number(self)] == STALE) n = 1;
    if (exhaustive ? old_values == OLD_VALUES : draw(old_every) != 0) n = 1;
    n = choose(n);
    if (n != 0) old_values++;
    return w->last - n;
}

static uint64_t read_store(word *w, unsigned index, int order) {
    const store *s = &w->history[index % KEPT];
    unsigned char *stale = &w->stale[number(self)];
    *stale = (unsigned char)(index == w->last ? 0 : *stale + 1);
    self->now.word[w - words] = (uint16_t)index;
    learn(acquires(order) ? &self->now : &self->acquired, &s->released);
    trace("load", w->address, s->value, index == w->last ? "" : "(old)");
    return s->value;
}

/* `under`: a read-modify-write hands on what the store below it released. */
static void write_store(word *w, int bytes, uint64_t value, int order, const view *under) {
    store *s;
    const uint32_t small = (uint32_t)value;
    memcpy(w->address, bytes == 8 ? (const void *)&value : (const void *)&small, (size_t)bytes);
    s = &w->history[++w->last % KEPT];
    self->now.word[w - words] = (uint16_t)w->last;
    s->value = value;
    s->released = releases(order) ? self->now : self->fenced;
    if (under != NULL) learn(&s->released, under);
    self->now.clock[number(self)]++;
    trace("store", w->address, value, releases(order) ? "release" : "");
}

static uint64_t atomic_load(const volatile void *address, int bytes, int order) {
    word *w;
    if (self == NULL) return bytes == 8 ? *(const volatile uint64_t *)address
                                        : *(const volatile uint32_t *)address;
    point();
    w = word_at(address, bytes);
    return read_store(w, pick(w), order);
}

static void atomic_store(volatile void *address, int bytes, uint64_t value, int order) {
    point();
    write_store(word_at(address, bytes), bytes, value, order, NULL);
}

enum change { SET, ADD, SUB, OR };

static uint64_t atomic_change(volatile void *address, int bytes, enum change change,
                              uint64_t value, int order) {
    word *w;
    uint64_t old;
    view under;
    point();
    w = word_at(address, bytes);
    old = read_store(w, w->last, order);
    under = w->history[w->last % KEPT].released;
    if (change == ADD) value = old + value;
    if (change == SUB) value = old - value;
    if (change == OR) value = old | value;
    write_store(w, bytes, bytes == 8 ? value : (uint32_t)value, order, &under);
    return old;
}

static bool atomic_cas(volatile void *address, int bytes, uint64_t expected, uint64_t value,
                       int order, int failed, uint64_t *seen) {
    word *w;
    unsigned index;
    view under;
    point();
    w = word_at(address, bytes);
    index = pick(w);
    if (w->history[index % KEPT].value == expected) index = w->last; /* only that can be replaced */
    if (w->history[index % KEPT].value != expected) {
        *seen = read_store(w, index, failed);
        return false;
    }
    *seen = read_store(w, index, order);
    under = w->history[index % KEPT].released;
    write_store(w, bytes, value, order, &under);
    return true;
}

/* A plain access: is it ordered with those of other threads? */
static void plain(const volatile void *address, size_t bytes, bool writes) {
    const uintptr_t first = (uintptr_t)address / GRAIN;
    const uintptr_t last = ((uintptr_t)address + bytes - 1) / GRAIN;
    uintptr_t at;
    int i, me;
    if (self == NULL || grain_of(address) == NULL || bytes == 0) return;
    me = number(self);
    for (at = first; at <= last; at++) {
        grain *const g = &grains[at - (uintptr_t)arena / GRAIN];
        if (g->word != 0) explore_fail("a plain access to an atomic word");
        if (g->writer != NOBODY && g->wrote > self->now.clock[g->writer])
            explore_fail("a race: %s after a write of thread %d, at +%zu",
                         writes ? "a write" : "a read", g->writer,
                         (size_t)(at * GRAIN - (uintptr_t)arena));
        for (i = 0; writes && i < scenario->threads; i++)
            if (g->read[i] > self->now.clock[i])
                explore_fail("a race: a write after a read of thread %d, at +%zu", i,
                             (size_t)(at * GRAIN - (uintptr_t)arena));
        if (writes) {
            g->writer = (unsigned char)me;
            g->wrote = self->now.clock[me];
        } else {
            g->read[me] = self->now.clock[me];
        }
    }
}

void *explore_copy(void *to, const void *from, size_t bytes) {
    plain(from, bytes, false);
    plain(to, bytes, true);
    return memcpy(to, from, bytes);
}

/* ---- what the compiler calls ---- */

#define CHANGE(bits, name, change)                                                                 \
    uint##bits##_t __tsan_atomic##bits##_##name(volatile uint##bits##_t *p, uint##bits##_t value,  \
                                                int order);                                        \
    uint##bits##_t __tsan_atomic##bits##_##name(volatile uint##bits##_t *p, uint##bits##_t value,  \
                                                int order) {                                       \
        return (uint##bits##_t)atomic_change(p, bits / 8, change, value, order);                   \
    }
#define ATOMICS(bits)                                                                              \
    uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t *p, int order);        \
    uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t *p, int order) {       \
        return (uint##bits##_t)atomic_load(p, bits / 8, order);                                    \
    }                                                                                              \
    void __tsan_atomic##bits##_store(volatile uint##bits##_t *p, uint##bits##_t value, int order); \
    void __tsan_atomic##bits##_store(volatile uint##bits##_t *p, uint##bits##_t value,             \
                                     int order) {                                                  \
        atomic_store(p, bits / 8, value, order);                                                   \
    }                                                                                              \
    int __tsan_atomic##bits##_compare_exchange_strong(                                             \
        volatile uint##bits##_t *p, uint##bits##_t *expected, uint##bits##_t value, int order,     \
        int failed);                                                                               \
    int __tsan_atomic##bits##_compare_exchange_strong(                                             \
        volatile uint##bits##_t *p, uint##bits##_t *expected, uint##bits##_t value, int order,     \
        int failed) {                                                                              \
        uint64_t seen;                                                                             \
        const bool done = atomic_cas(p, bits / 8, *expected, value, order, failed, &seen);         \
        if (!done) *expected = (uint##bits##_t)seen;                                               \
        return done;                                                                               \
    }                                                                                              \
    CHANGE(bits, exchange, SET)                                                                    \
    CHANGE(bits, fetch_add, ADD)                                                                   \
    CHANGE(bits, fetch_sub, SUB)                                                                   \
    CHANGE(bits, fetch_or, OR)
ATOMICS(32)
ATOMICS(64)

#define PLAIN(bytes)                                                                               \
    void __tsan_read##bytes(void *p);                                                              \
    void __tsan_read##bytes(void *p) { plain(p, bytes, false); }                                   \
    void __tsan_write##bytes(void *p);                                                             \
    void __tsan_write##bytes(void *p) { plain(p, bytes, true); }
PLAIN(1)
PLAIN(2)
PLAIN(4)
PLAIN(8)
PLAIN(16)

void __tsan_init(void);
void __tsan_init(void) {}
void __tsan_func_entry(void *caller);
void __tsan_func_entry(void *caller) { (void)caller; }
void __tsan_func_exit(void);
void __tsan_func_exit(void) {}
void __tsan_read_range(void *p, size_t bytes);
void __tsan_read_range(void *p, size_t bytes) { plain(p, bytes, false); }
void __tsan_write_range(void *p, size_t bytes);
void __tsan_write_range(void *p, size_t bytes) { plain(p, bytes, true); }
void __tsan_atomic_signal_fence(int order);
void __tsan_atomic_signal_fence(int order) { (void)order; }
void __tsan_atomic_thread_fence(int order);
void __tsan_atomic_thread_fence(int order) {
    if (self == NULL) return;
    if (order != 5) explore_fail("a fence that is not modelled");
    point();
    trace("fence", NULL, 0, "");
    fence(self);
}

/* ---- what the system is asked for ---- */

static long futex_wait(const void *address, uint32_t value, bool may_time_out) {
    point();
    if (memory(word_at(address, 4)) != value) {
        errno = EAGAIN;
        return -1;
    }
    trace("sleep", address, value, "");
    self->state = ASLEEP;
    self->sleeps_on = address;
    self->may_time_out = may_time_out;
    block();
    if (self->state == READY) return 0;
    self->state = READY;
    trace("timeout", address, value, "");
    errno = ETIMEDOUT;
    return -1;
}

static long futex_wake(const void *address, long count) {
    long woken = 0;
    point();
    trace("wake", address, (uint64_t)count, "");
    for (; woken < count; woken++) {
        thread *sleepers[EXPLORE_THREADS];
        thread *t;
        unsigned n = 0;
        for (t = threads; t < threads + scenario->threads; t++)
            if (t->state == ASLEEP && t->sleeps_on == address) sleepers[n++] = t;
        if (n == 0) break;
        t = sleepers[choose(n)];
        t->state = READY;
        learn(&t->now, &self->now);
        trace("wakes", NULL, (uint64_t)number(t), "");
    }
    return woken;
}

static long membarrier(long command) {
    const long expedited = 1 << 3;
    unsigned left = (1u << scenario->threads) - 1;
    if (!scenario->membarrier) return -1;
    if (command != expedited || self == NULL) return 0;
    trace("heavy", NULL, 0, "");
    fence(self);
    while (left != 0) {
        unsigned t = exhaustive ? 0 : choose((unsigned)scenario->threads);
        while ((left >> t & 1) == 0) t = (t + 1) % (unsigned)scenario->threads;
        left &= ~(1u << t);
        point();
        fence(&threads[t]);
    }
    fence(self);
    trace("heavy end", NULL, 0, "");
    return 0;
}

long explore_syscall(long system_call, ...) {
    va_list args;
    const void *address;
    long first, second;
    const void *timeout;
    va_start(args, system_call);
    if (system_call == SYS_membarrier) {
        first = va_arg(args, long);
        va_end(args);
        return membarrier(first);
    }
    if (system_call != SYS_futex) abort();
    address = va_arg(args, const void *);
    first = va_arg(args, long) & 127;
    second = va_arg(args, long);
    timeout = va_arg(args, const void *);
    va_end(args);
    return first == 1 ? futex_wake(address, second)
                      : futex_wait(address, (uint32_t)second, timeout != NULL);
}

/* ---- runs ---- */

static void begin(void) {
    int i;
    size_t at;
    arena_used = 0;
    word_count = 0;
    steps = depth = preemptions = old_values = 0;
    failure[0] = 0;
    memset(&fences, 0, sizeof(fences));
    explore_begin(scenario->plan);
    for (at = 0; at < arena_used / GRAIN; at++) {
        memset(&grains[at], 0, sizeof(grains[at]));
        grains[at].writer = NOBODY;
    }
    for (i = 0; i < scenario->threads; i++) {
        thread *t = &threads[i];
        memset(&t->now, 0, sizeof(t->now));
        t->acquired = t->fenced = t->now;
        t->now.clock[i] = 1;
        t->state = READY;
        if (t->made) continue;
        getcontext(&t->first);
        t->first.uc_stack.ss_sp = stacks[i];
        t->first.uc_stack.ss_size = STACK;
        makecontext(&t->first, thread_main, 0);
    }
}

/* One run; false when something was wrong. */
static bool run(uint64_t seed) {
    static thread *volatile first;
    int i;
    random_state = (seed + 1) * 0x9e3779b97f4a7c15ull;
    draw(2);
    switch_every = 1u << draw(5);
    old_every = 1u << draw(4);
    begin();
    if (_setjmp(out) == 0) {
        first = &threads[choose((unsigned)scenario->threads)];
        self = first;
        if (self->made) _longjmp(self->context, 1);
        self->made = true;
        setcontext(&self->first);
    }
    self = NULL;
    for (i = 0; i < scenario->threads && failure[0] == 0; i++)
        if (threads[i].state != DONE) {
            explore_fail("thread %d sleeps for ever", i);
            for (i = 0; i < EXPLORE_THREADS; i++) threads[i].made = false;
        }
    if (failure[0] == 0) explore_end(scenario->plan);
    return failure[0] == 0;
}

static void rerun(uint64_t seed) {
    tracing = true;
    depth = 0;
    run(seed);
    tracing = false;
    printf("    %s\n", failure[0] != 0 ? failure : "nothing was wrong");
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* All runs of one scenario. */
static bool explore(const explore_scenario *which, uint64_t seed, unsigned long runs) {
    const double start = seconds();
    unsigned long done = 0;
    bool good = true, more = true;
    scenario = which;
    exhaustive = which->exhaustive;
    decided = 0;
    if (exhaustive) runs *= 10; /* at most */
    while (good && more && done < runs) {
        good = run(seed + done);
        if (!good) break;
        done++;
        more = !exhaustive || next_choices();
    }
    printf("%s %-74s %7lu %s %5.1f s\n", good ? "ok " : "BAD", which->name, done,
           exhaustive && !more ? "all " : "runs", seconds() - start);
    if (!good) {
        printf("    %s%s; replay: --replay %lu\n", failure,
               exhaustive ? " (exhaustive)" : "", (unsigned long)seed + done);
        if (exhaustive) rerun(seed + done);
    }
    exhaustive = false;
    fflush(stdout);
    return good;
}

static bool wanted(const char *name, int count, char **words_given) {
    int i;
    for (i = 0; i < count; i++)
        if (strstr(name, words_given[i]) != NULL) return true;
    return count == 0;
}

int main(int argc, char **argv) {
    const explore_scenario *list;
    const int count = explore_scenarios(&list);
    unsigned long runs = 100000, seed = 1;
    const char *replay = NULL;
    int i, passed = 0, failed = 0, arg = 1;
    bool first = false;
    for (; arg < argc && argv[arg][0] == '-'; arg++) {
        if (strcmp(argv[arg], "--list") == 0) {
            for (i = 0; i < count; i++) puts(list[i].name);
            return 0;
        }
        if (strcmp(argv[arg], "--first") == 0) {
            first = true;
            continue;
        }
        if (arg + 1 == argc) return 2;
        if (strcmp(argv[arg], "--runs") == 0)
            runs = strtoul(argv[++arg], NULL, 10);
        else if (strcmp(argv[arg], "--seed") == 0)
            seed = strtoul(argv[++arg], NULL, 10);
        else if (strcmp(argv[arg], "--replay") == 0)
            replay = argv[++arg];
        else
            return 2;
    }
    for (i = 0; i < count && !(first && failed > 0); i++) {
        if (!wanted(list[i].name, argc - arg, argv + arg)) continue;
        if (replay != NULL) {
            scenario = &list[i];
            rerun(strtoul(replay, NULL, 10));
        } else if (explore(&list[i], seed, runs)) {
            passed++;
        } else {
            failed++;
        }
    }
    if (replay == NULL) printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
