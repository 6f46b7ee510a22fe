/* Runs concurrent programs under a model of C11 memory, very many times: each time with other
   choices of which thread goes on and of which value a load gives. It checks that no two threads
   touch plain memory without order between them, that memory is not used after it was freed, that
   nobody sleeps for ever, and what the program itself checks.

   The program, the unmodified spdl.h with it, is compiled with -fsanitize=thread. That makes the
   compiler call a function at each access to memory; here are those functions, in place of the
   sanitizer's. Threads are coroutines; they change places at atomic accesses and system calls.

   The model: each atomic word keeps a history of its stores. A load may give any of them that is
   not older than one the thread knows of. A thread knows what it has read and written; what another
   knew at a release it learns when it acquires the store, or one that a read-modify-write put on
   top of it. Sequentially consistent fences share what they know. The expedited membarrier is such
   a fence in each other thread, at some moment during the call, in any order. Plain accesses to a
   word are allowed while only one thread can reach it. A thread that a futex wakes knows what the
   waker knew, as in Linux.

   Narrower than C11: stores enter the history in the order in which they were run; a history keeps
   KEPT stores; after STALE old values in a row a load gives the newest. A load never gives a store
   that is yet to come. For words given to explore_watch such a load is looked for instead: see
   check_loads. A sequentially consistent load, store or change is only an acquire, a release or
   both. A sleep ends by a wake or its timeout. Real condition variables may also end it without.

   usage: explore [--runs N] [--seconds N] [--seed N] [--first] [--replay N] [--list]
                  [--sites FILE] [--weaken ADDRESS,...] [NAME or =WHOLE_NAME ...]
   Each scenario ends after --runs (a tenth of them if it is long) or --seconds. --first ends with
   the first failure. --replay N takes the seed of a failure, runs that execution once more and
   prints its accesses with their places in the source. --sites writes a line for each atomic access
   of the program: its address in the file, its order, how often it ran, how often it gave an old
   value, and how often its order gave the thread new knowledge. --weaken makes the accesses at
   these addresses relaxed; a fence there is left out. */
#include "explore.h"

#include <errno.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#define WORDS 1024            /* atomic words in one run */
#define KEPT 8                /* stores of each */
#define STALE 3               /* old values in a row */
#define ARENA (1024 * 1024)   /* bytes of modelled memory */
#define ROUND 16              /* bytes to which allocations are rounded */
#define BLOCKS 512            /* allocations of one run */
#define LOCKS 16              /* mutexes of one run */
#define STEPS 100000          /* of one run, before it counts as endless */
#define CHANGES 4             /* of priorities in one run */
#define DEPTH 4096            /* choices of one run when all are tried */
#define PREEMPTIONS 2         /* then, in each run */
#define OLD_VALUES 2          /* then, in each run */
#define STACK (512 * 1024)
#define TEXT (2 * 1024 * 1024) /* bytes of the program, at most */
#define NOBODY 255

/* What a thread knows: how far each thread had come, and the newest store of each word. Words from
   `count` on are zero. */
typedef struct view {
    uint16_t clock[EXPLORE_THREADS];
    unsigned count;
    uint16_t word[WORDS];
} view;

typedef struct store {
    uint64_t value;
    uint16_t heard[EXPLORE_THREADS]; /* see check_loads */
    view released;
} store;

typedef struct word {
    unsigned char *address;
    int bytes;
    unsigned last; /* index of the newest store */
    bool plainly;  /* that was a plain one: its value is in memory */
    unsigned char stale[EXPLORE_THREADS];
    uint16_t stored[EXPLORE_THREADS]; /* clock of each thread at its last store */
    store history[KEPT];
} word;

typedef struct thread {
    jmp_buf context;
    ucontext_t first;
    bool made;
    enum { READY, ASLEEP, DONE } state;
    const void *sleeps_on;
    bool may_time_out;
    void *(*entry)(void *arg); /* NULL: explore_thread */
    void *arg;
    int priority;
    unsigned site; /* of its last access */
    view now;      /* what it knows */
    view acquired; /* what an acquire fence would add */
    view fenced;   /* what it knew at its last fence: its relaxed stores release that */
    uint16_t heard[EXPLORE_THREADS];
} thread;

/* A byte of modelled memory. Clocks of the last accesses. */
typedef struct grain {
    uint32_t run;  /* the last one that touched it */
    uint16_t word; /* index + 1 of the atomic word that it is in */
    uint16_t wrote;
    uint16_t read[EXPLORE_THREADS];
    uint16_t loaded[EXPLORE_THREADS]; /* atomically */
    unsigned char writer;
    bool watched;
} grain;

/* An allocation; it counts as a write of its bytes. */
typedef struct block {
    size_t bytes;
    unsigned char by;
    uint16_t when;
    bool set, freed;
} block;

typedef struct lock {
    const void *address;
    const thread *owner;
    view released;
} lock;

/* What became of an access of the program, by its address in the file. */
typedef struct site {
    uint32_t ran, old, news;
    unsigned char order;
    bool weak;
} site;

static _Alignas(256) unsigned char arena[ARENA];
static size_t arena_used;
static grain grains[ARENA];
static block blocks[BLOCKS];
static int block_count;
static uint16_t block_at[ARENA / ROUND]; /* index + 1 */
static const char *names[ARENA];
static word words[WORDS];
static int word_count;
static lock locks[LOCKS];
static int lock_count;
static thread threads[EXPLORE_THREADS];
static int thread_count;
static _Alignas(64) unsigned char stacks[EXPLORE_THREADS][STACK];
static site sites[TEXT];
static unsigned at_site; /* the last access; 0: none of the program */
static const view nothing;
static thread *self; /* NULL: before and after the threads run */
static jmp_buf out;
static view fences; /* what the last sequentially consistent fence knew */
static const explore_scenario *scenario;
static uint32_t runs_begun;
static unsigned steps, switch_every, old_every;
static uint64_t now_ns, tick_ns;
static bool tracing, exhaustive;
static bool by_priority;             /* the ready thread of the highest one runs */
static unsigned change_at[CHANGES]; /* steps at which the thread that runs gets the lowest */
static int lowest;
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

/* ---- messages ---- */

extern char __executable_start;

/* The access behind a call of the program: the address of its last byte in the file. */
static unsigned site_of(const void *returns_to) {
    const size_t at = (size_t)returns_to - (size_t)&__executable_start - 1;
    return at < TEXT ? (unsigned)at : 0;
}

/* The function and the line, with those that it was inlined into. */
static void print_place(unsigned at) {
    static char *known[TEXT];
    char command[128], line[256];
    size_t length = 0;
    FILE *places;
    if (at == 0) return;
    if (known[at] == NULL) {
        snprintf(command, sizeof(command), "addr2line -fips -e /proc/%d/exe %x", (int)getpid(), at);
        known[at] = (char *)calloc(1, 1024);
        places = popen(command, "r");
        if (known[at] == NULL || places == NULL) abort();
        while (fgets(line, sizeof(line), places) != NULL && length + sizeof(line) < 1024) {
            const char *name = strstr(line, "by) ") != NULL ? strstr(line, "by) ") + 4 : line;
            char *more = strstr(line, " (discriminator");
            if (more == NULL) more = line + strcspn(line, "\n");
            *more = 0;
            length += (size_t)snprintf(known[at] + length, 1024 - length, "%s%s",
                                       length > 0 ? " < " : "", name);
        }
        pclose(places);
    }
    printf("  [%s]", known[at]);
}

static int number(const thread *t) { return (int)(t - threads); }

static size_t offset_of(const volatile void *address) {
    return (size_t)((uintptr_t)address - (uintptr_t)arena);
}

static void trace(const char *what, const volatile void *address, uint64_t value,
                  const char *more) {
    const size_t at = offset_of(address);
    char name[32];
    if (!tracing || self == NULL) return;
    snprintf(name, sizeof(name), "+%zu", at);
    if (address == NULL) name[0] = 0;
    printf("    %d %-9s %-16s %llx %s", number(self), what,
           at < ARENA && names[at] != NULL ? names[at] : name,
           (unsigned long long)value, more);
    print_place(at_site);
    puts("");
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

void explore_name(const void *address, const char *name) { names[offset_of(address)] = name; }

/* ---- what threads know ---- */

static void later(uint16_t *clocks, const uint16_t *others) {
    int i;
    for (i = 0; i < EXPLORE_THREADS; i++)
        clocks[i] = clocks[i] < others[i] ? others[i] : clocks[i];
}

/* Returns true if there was anything new. */
static bool learn(view *to, const view *from) {
    unsigned grown = 0, i;
    for (i = 0; i < EXPLORE_THREADS; i++) grown |= to->clock[i] < from->clock[i];
    later(to->clock, from->clock);
    for (i = 0; i < from->count; i++) {
        grown |= to->word[i] < from->word[i];
        to->word[i] = to->word[i] < from->word[i] ? from->word[i] : to->word[i];
    }
    if (to->count < from->count) to->count = from->count;
    return grown != 0;
}

static void set_view(view *to, const view *from) {
    if (to->count > from->count)
        memset(&to->word[from->count], 0, (to->count - from->count) * sizeof(to->word[0]));
    memcpy(to, from, offsetof(view, word) + from->count * sizeof(from->word[0]));
}

/* What the thread does next is unknown to those who learn what it knows up to here. */
static void tick(thread *t) {
    if (++t->now.clock[number(t)] == UINT16_MAX) explore_fail("the clock of a thread is full");
}

/* Returns true if the thread learned anything new. */
static bool fence(thread *t) {
    const bool by_loads = learn(&t->now, &t->acquired), by_fences = learn(&t->now, &fences);
    set_view(&fences, &t->now);
    set_view(&t->fenced, &t->now);
    tick(t);
    return by_loads || by_fences;
}

static void see(view *v, const word *w, unsigned index) {
    const unsigned at = (unsigned)(w - words);
    if (v->count <= at) v->count = at + 1;
    v->word[at] = (uint16_t)index;
}

/* ---- threads ---- */

static void go_to(thread *next) {
    thread *from = self;
    if (next == from) return;
    from->site = at_site;
    if (_setjmp(from->context) != 0) {
        at_site = self->site;
        return;
    }
    self = next;
    if (next->made) _longjmp(next->context, 1);
    next->made = true;
    setcontext(&next->first);
}

/* Those who can go on, the caller first if it is ready. Sleep that may time out does so now and
   then. */
static unsigned runnable(thread **list) {
    unsigned n = 0;
    thread *t;
    if (self->state == READY) list[n++] = self;
    for (t = threads; t < threads + thread_count; t++)
        if (t->state == READY ? t != self : t->state == ASLEEP && t->may_time_out) list[n++] = t;
    return n;
}

static thread *one_of(thread **list, unsigned n) {
    thread *first = NULL;
    unsigned i;
    for (i = 0; by_priority && i < n; i++)
        if ((list[i]->state == READY || draw(64) == 0) &&
            (first == NULL || first->priority < list[i]->priority))
            first = list[i];
    return first != NULL ? first : list[choose(n)];
}

/* A place where another thread may go on. */
static void point(void) {
    thread *list[EXPLORE_THREADS], *next;
    int i;
    if (self == NULL) return;
    if (++steps > STEPS) explore_fail("no end in sight");
    for (i = 0; by_priority && i < CHANGES; i++)
        if (steps == change_at[i]) self->priority = --lowest;
    if (!by_priority && (exhaustive ? preemptions == PREEMPTIONS : draw(switch_every) != 0)) return;
    next = one_of(list, runnable(list));
    if (next != self) preemptions++;
    go_to(next);
}

/* The caller cannot go on. */
static void block_thread(void) {
    thread *list[EXPLORE_THREADS];
    const unsigned n = runnable(list);
    if (n > 0) go_to(one_of(list, n));
    else if (_setjmp(self->context) == 0) _longjmp(out, 1);
}

/* Returns false after a timeout. */
static bool sleep_on(const void *address, bool may_time_out) {
    bool woken;
    trace("sleep", address, may_time_out, "");
    self->state = ASLEEP;
    self->sleeps_on = address;
    self->may_time_out = may_time_out;
    block_thread();
    woken = self->state == READY;
    self->state = READY;
    if (!woken) trace("timeout", address, 0, "");
    return woken;
}

/* Wakes up to `count` threads that sleep on the address. Returns how many. `orders`: they learn
   what the caller knows. */
static long wake_sleepers(const void *address, long count, bool orders) {
    long woken = 0;
    for (; woken < count; woken++) {
        thread *sleepers[EXPLORE_THREADS], *t;
        unsigned n = 0;
        for (t = threads; t < threads + thread_count; t++)
            if (t->state == ASLEEP && t->sleeps_on == address) sleepers[n++] = t;
        if (n == 0) break;
        t = sleepers[choose(n)];
        t->state = READY;
        if (orders) {
            (void)learn(&t->now, &self->now);
            tick(self);
        }
        trace("wakes", NULL, (uint64_t)number(t), "");
    }
    return woken;
}

static void thread_main(void) {
    for (;;) { /* once in each run */
        if (self->entry != NULL) self->entry(self->arg);
        else explore_thread(scenario->plan, number(self));
        self->state = DONE;
        (void)wake_sleepers(self, EXPLORE_THREADS, false);
        block_thread();
    }
}

/* ---- memory ---- */

void *explore_alloc_at(size_t bytes, size_t align) {
    const size_t mask = (align < ROUND ? ROUND : align) - 1;
    const size_t first = (arena_used + mask) & ~mask;
    const size_t end = (first + bytes + ROUND - 1) / ROUND * ROUND;
    const bool begun = self != NULL;
    size_t at;
    if (end > ARENA || block_count == BLOCKS) {
        fprintf(stderr, "explore: no room for %zu bytes\n", bytes);
        abort();
    }
    arena_used = end;
    blocks[block_count++] = (block){ .bytes = bytes,
                                     .by = begun ? (unsigned char)number(self) : NOBODY,
                                     .when = begun ? self->now.clock[number(self)] : 0 };
    for (at = first; at < end; at += ROUND) block_at[at / ROUND] = (uint16_t)block_count;
    return arena + first;
}

void *explore_alloc(size_t bytes) { return explore_alloc_at(bytes, ROUND); }

static bool is_modelled(const volatile void *address) { return offset_of(address) < ARENA; }

static block *block_of(const volatile void *address) {
    const size_t at = offset_of(address);
    const unsigned index = at < arena_used ? block_at[at / ROUND] : 0;
    if (index == 0) explore_fail("an access to memory that is nobody's, at +%zu", at);
    if (blocks[index - 1].freed) explore_fail("an access to freed memory, at +%zu", at);
    return &blocks[index - 1];
}

static grain *grain_of(const volatile void *address) {
    const block *b = block_of(address);
    grain *g = &grains[offset_of(address)];
    if (g->run == runs_begun) return g;
    *g = (grain){ .run = runs_begun, .writer = b->by, .wrote = b->when };
    return g;
}

void explore_watch(const void *address) { grain_of(address)->watched = true; }

static void race(const char *what, const char *after, int other, const volatile void *address) {
    explore_fail("a race: %s of thread %d after %s of thread %d, at +%zu", what, number(self),
                 after, other, offset_of(address));
}

/* An atomic access is ordered with the plain ones of others. */
static void check_atomic(const grain *g, bool writes, const volatile void *address) {
    const char *what = writes ? "an atomic write" : "an atomic read";
    int i;
    if (g->writer != NOBODY && g->wrote > self->now.clock[g->writer])
        race(what, "a plain write", g->writer, address);
    for (i = 0; writes && i < thread_count; i++)
        if (g->read[i] > self->now.clock[i]) race(what, "a plain read", i, address);
}

static uint64_t in_memory(const volatile void *address, int bytes) {
    return bytes == 8 ? *(const volatile uint64_t *)address : *(const volatile uint32_t *)address;
}

static void set_memory(volatile void *address, int bytes, uint64_t value) {
    if (bytes == 8) *(volatile uint64_t *)address = value;
    else *(volatile uint32_t *)address = (uint32_t)value;
}

/* A store that nobody has released. */
static store *push_store(word *w) {
    store *s = &w->history[++w->last % KEPT];
    if (w->last > UINT16_MAX) explore_fail("the history of a word is full");
    set_view(&s->released, &nothing);
    memset(s->heard, 0, sizeof(s->heard));
    return s;
}

static word *word_of(const grain *g) {
    word *w = &words[g->word - 1];
    if (w->plainly) w->history[w->last % KEPT].value = in_memory(w->address, w->bytes);
    w->plainly = false;
    return w;
}

static word *word_at(volatile void *address, int bytes) {
    grain *const g = grain_of(address);
    word *w;
    int i;
    check_atomic(g, true, address);
    if (g->word != 0) return word_of(g);
    if (word_count == WORDS) explore_fail("too many atomic words");
    w = &words[word_count++];
    for (i = 0; i < bytes; i++)
        grain_of((const volatile char *)address + i)->word = (uint16_t)word_count;
    memset(w->stale, 0, sizeof(w->stale));
    memset(w->stored, 0, sizeof(w->stored));
    w->plainly = false;
    w->address = (unsigned char *)(uintptr_t)address;
    w->bytes = bytes;
    w->last = (unsigned)-1;
    push_store(w)->value = in_memory(address, bytes);
    return w;
}

static bool acquires(int order) { return order == 1 || order == 2 || order >= 4; }
static bool releases(int order) { return order >= 3; }

/* Which store a load gives. */
static unsigned pick(const word *w) {
    unsigned oldest = self->now.word[w - words];
    unsigned n;
    if (w->last >= KEPT && oldest < w->last - (KEPT - 1)) oldest = w->last - (KEPT - 1);
    n = w->last - oldest + 1;
    if (w->stale[number(self)] == STALE) n = 1;
    if (exhaustive ? old_values == OLD_VALUES : draw(old_every) != 0) n = 1;
    n = choose(n);
    if (n != 0) old_values++;
    return w->last - n;
}

/* A processor may run a load after the stores behind it, so that the load gives what another thread
   stores in return. It is a failure if that is possible for a watched word: this thread stores to
   it, and knows of a read-modify-write that another thread has made after its own load of the word,
   but not of the load. `heard` is the newest read-modify-write of each thread that this thread
   knows of by acquired stores. (Behind a swap that fails nobody uses what was loaded.) */
static void check_loads(const word *w) {
    const grain *g = grain_of(w->address);
    int i;
    for (i = 0; i < thread_count && g->watched; i++)
        if (g->loaded[i] > self->now.clock[i] && self->heard[i] > g->loaded[i])
            explore_fail("thread %d may have loaded what thread %d stores later, at +%zu", i,
                         number(self), offset_of(w->address));
}

static uint64_t read_store(word *w, unsigned index, int order) {
    const store *s = &w->history[index % KEPT];
    unsigned char *stale = &w->stale[number(self)];
    *stale = (unsigned char)(index == w->last ? 0 : *stale + 1);
    sites[at_site].old += index != w->last;
    see(&self->now, w, index);
    if (acquires(order)) {
        later(self->heard, s->heard);
        sites[at_site].news += learn(&self->now, &s->released);
    } else {
        (void)learn(&self->acquired, &s->released);
    }
    trace("load", w->address, s->value, index == w->last ? "" : "(old)");
    return s->value;
}

/* `changes`: a read-modify-write, which hands on what the store below it released. */
static void write_store(word *w, uint64_t value, int order, bool changes) {
    const store *under = &w->history[w->last % KEPT];
    const int me = number(self);
    store *s;
    check_loads(w);
    if (changes) self->heard[me] = (uint16_t)(self->now.clock[me] + 1);
    set_memory(w->address, w->bytes, value);
    s = push_store(w);
    s->value = value;
    memcpy(s->heard, self->heard, sizeof(s->heard));
    see(&self->now, w, w->last);
    set_view(&s->released, releases(order) ? &self->now : &self->fenced);
    if (changes) (void)learn(&s->released, &under->released);
    w->stored[me] = self->now.clock[me];
    tick(self);
    trace("store", w->address, value, releases(order) ? "release" : "");
}

/* A word to which nobody has stored needs no history. */
static uint64_t atomic_load(const volatile void *address, int bytes, int order) {
    grain *g;
    word *w;
    point();
    if (self == NULL || !is_modelled(address)) return in_memory(address, bytes);
    g = grain_of(address);
    check_atomic(g, false, address);
    g->loaded[number(self)] = self->now.clock[number(self)];
    if (g->word == 0) {
        trace("load", address, in_memory(address, bytes), "(first)");
        return in_memory(address, bytes);
    }
    w = word_of(g);
    return read_store(w, pick(w), order);
}

static void atomic_store(volatile void *address, int bytes, uint64_t value, int order) {
    point();
    if (self == NULL) set_memory(address, bytes, value);
    else write_store(word_at(address, bytes), value, order, false);
}

enum change { SET, ADD, SUB, OR };

static uint64_t atomic_change(volatile void *address, int bytes, enum change change,
                              uint64_t value, int order) {
    word *w = NULL;
    uint64_t old;
    point();
    if (self != NULL) w = word_at(address, bytes);
    old = w != NULL ? read_store(w, w->last, order) : in_memory(address, bytes);
    if (change == ADD) value = old + value;
    if (change == SUB) value = old - value;
    if (change == OR) value = old | value;
    if (bytes == 4) value = (uint32_t)value;
    if (w != NULL) write_store(w, value, order, true);
    else set_memory(address, bytes, value);
    return old;
}

static bool atomic_cas(volatile void *address, int bytes, uint64_t *expected, uint64_t value,
                       int order, int failed) {
    const uint64_t wants = *expected;
    word *w;
    unsigned index;
    point();
    if (self == NULL) {
        *expected = in_memory(address, bytes);
        if (*expected == wants) set_memory(address, bytes, value);
        return *expected == wants;
    }
    w = word_at(address, bytes);
    index = pick(w);
    if (w->history[index % KEPT].value == wants) index = w->last; /* only that can be replaced */
    if (w->history[index % KEPT].value != wants) {
        *expected = read_store(w, index, failed);
        return false;
    }
    (void)read_store(w, index, order);
    write_store(w, value, order, true);
    return true;
}

/* A plain access to a word: ordered after all stores to it, a write also after all loads. What is
   written becomes its newest value, once it is in memory. */
static void plain_word(const grain *g, bool writes, const volatile void *address) {
    const char *what = writes ? "a plain write" : "a plain read";
    word *w = word_of(g);
    int i;
    for (i = 0; i < thread_count; i++) {
        if (w->stored[i] > self->now.clock[i]) race(what, "an atomic write", i, address);
        if (writes && g->loaded[i] > self->now.clock[i]) race(what, "an atomic read", i, address);
    }
    if (!writes || address != w->address) return;
    (void)push_store(w);
    w->plainly = true;
    see(&self->now, w, w->last);
    w->stored[number(self)] = self->now.clock[number(self)];
}

/* A plain access to a byte: is it ordered with those of other threads? */
static void plain_byte(const volatile void *address, bool writes) {
    const char *what = writes ? "a write" : "a read";
    const int me = number(self);
    grain *const g = grain_of(address);
    int i;
    if (g->writer != NOBODY && g->wrote > self->now.clock[g->writer])
        race(what, "a write", g->writer, address);
    for (i = 0; writes && i < thread_count; i++) {
        if (g->read[i] > self->now.clock[i]) race(what, "a read", i, address);
        if (g->word == 0 && g->loaded[i] > self->now.clock[i])
            race(what, "an atomic read", i, address);
    }
    if (g->word != 0) plain_word(g, writes, address);
    if (writes) {
        g->writer = (unsigned char)me;
        g->wrote = self->now.clock[me];
    } else {
        g->read[me] = self->now.clock[me];
    }
}

static void plain(const volatile void *address, size_t bytes, bool writes) {
    size_t i;
    if (self == NULL || !is_modelled(address)) return;
    for (i = 0; i < bytes; i++) plain_byte((const volatile char *)address + i, writes);
}

#define SITE (at_site = site_of(__builtin_return_address(0)))

/* Counts as a write of what the run has touched. */
void explore_free(void *memory) {
    block *b;
    size_t i;
    SITE;
    if (memory == NULL) return;
    if (!is_modelled(memory)) explore_fail("a free of what was not allocated");
    b = block_of(memory);
    if (b->by != NOBODY && self != NULL && b->when > self->now.clock[b->by])
        race("a free", "the allocation", b->by, memory);
    for (i = 0; i < b->bytes; i++)
        if (grains[offset_of(memory) + i].run == runs_begun) plain((char *)memory + i, 1, true);
    b->freed = true;
}

void *explore_copy(void *to, const void *from, size_t bytes) {
    SITE;
    plain(from, bytes, false);
    plain(to, bytes, true);
    return memcpy(to, from, bytes);
}

/* The first one of a whole block counts as a part of the allocation. */
void *explore_set(void *to, int value, size_t bytes) {
    block *b = bytes > 0 && is_modelled(to) ? block_of(to) : NULL;
    const bool fresh = b != NULL && !b->set && bytes == b->bytes;
    SITE;
    if (b != NULL) b->set = true;
    if (!fresh) plain(to, bytes, true);
    return memset(to, value, bytes);
}

int explore_vprint(char *to, size_t bytes, const char *format, va_list args) {
    const int length = vsnprintf(to, bytes, format, args);
    SITE;
    if ((size_t)length + 1 < bytes) bytes = (size_t)length + 1;
    plain(to, bytes, true);
    return length;
}

int explore_print(char *to, size_t bytes, const char *format, ...) {
    va_list args;
    int length;
    va_start(args, format);
    length = explore_vprint(to, bytes, format, args);
    va_end(args);
    return length;
}

/* ---- what the compiler calls ---- */

/* Counts an atomic access. Returns the order in which it is run. */
static int order_at(const void *returns_to, int order) {
    site *s;
    at_site = site_of(returns_to);
    s = &sites[at_site];
    s->order = (unsigned char)order;
    if (self != NULL) s->ran++;
    return s->weak ? 0 : order;
}
#define ORDER order_at(__builtin_return_address(0), order)

#define CHANGE(bits, name, change) \
    uint##bits##_t __tsan_atomic##bits##_##name(volatile uint##bits##_t *p, uint##bits##_t value, \
                                                int order); \
    uint##bits##_t __tsan_atomic##bits##_##name(volatile uint##bits##_t *p, uint##bits##_t value, \
                                                int order) { \
        return (uint##bits##_t)atomic_change(p, bits / 8, change, value, ORDER); \
    }
#define ATOMICS(bits) \
    uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t *p, int order); \
    uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t *p, int order) { \
        return (uint##bits##_t)atomic_load(p, bits / 8, ORDER); \
    } \
    void __tsan_atomic##bits##_store(volatile uint##bits##_t *p, uint##bits##_t value, int order); \
    void __tsan_atomic##bits##_store(volatile uint##bits##_t *p, uint##bits##_t value, \
                                     int order) { \
        atomic_store(p, bits / 8, value, ORDER); \
    } \
    int __tsan_atomic##bits##_compare_exchange_strong( \
        volatile uint##bits##_t *p, uint##bits##_t *expected, uint##bits##_t value, int order, \
        int failed); \
    int __tsan_atomic##bits##_compare_exchange_strong( \
        volatile uint##bits##_t *p, uint##bits##_t *expected, uint##bits##_t value, int order, \
        int failed) { \
        uint64_t seen = *expected; \
        const int as = ORDER; \
        const bool done = atomic_cas(p, bits / 8, &seen, value, as, as == 0 ? 0 : failed); \
        *expected = (uint##bits##_t)seen; \
        return done; \
    } \
    CHANGE(bits, exchange, SET) \
    CHANGE(bits, fetch_add, ADD) \
    CHANGE(bits, fetch_sub, SUB) \
    CHANGE(bits, fetch_or, OR)
ATOMICS(32)
ATOMICS(64)

#define PLAIN(bytes) \
    void __tsan_read##bytes(void *p); \
    void __tsan_read##bytes(void *p) { \
        SITE; \
        plain(p, bytes, false); \
    } \
    void __tsan_write##bytes(void *p); \
    void __tsan_write##bytes(void *p) { \
        SITE; \
        plain(p, bytes, true); \
    }
PLAIN(1)
PLAIN(2)
PLAIN(4)
PLAIN(8)
PLAIN(16)

void __tsan_read_range(void *p, size_t bytes);
void __tsan_read_range(void *p, size_t bytes) {
    SITE;
    plain(p, bytes, false);
}
void __tsan_write_range(void *p, size_t bytes);
void __tsan_write_range(void *p, size_t bytes) {
    SITE;
    plain(p, bytes, true);
}
void __tsan_init(void);
void __tsan_init(void) {}
void __tsan_func_entry(void *caller);
void __tsan_func_entry(void *caller) { (void)caller; }
void __tsan_func_exit(void);
void __tsan_func_exit(void) {}
void __tsan_atomic_signal_fence(int order);
void __tsan_atomic_signal_fence(int order) { (void)order; }
void __tsan_atomic_thread_fence(int order);
void __tsan_atomic_thread_fence(int order) {
    if (self == NULL) return;
    if (order != 5) explore_fail("a fence that is not modelled");
    if (ORDER == 0) return;
    point();
    trace("fence", NULL, 0, "");
    sites[at_site].news += fence(self);
}

/* ---- what the system is asked for ---- */

static long futex_wait(const void *address, uint32_t value, bool may_time_out) {
    const grain *g;
    point();
    g = grain_of(address);
    if (g->word != 0) (void)word_of(g);
    if (in_memory(address, 4) != value) {
        errno = EAGAIN;
        return -1;
    }
    if (sleep_on(address, may_time_out)) return 0;
    errno = ETIMEDOUT;
    return -1;
}

static long futex_wake(const void *address, long count) {
    point();
    trace("wake", address, (uint64_t)count, "");
    return wake_sleepers(address, count, true);
}

static long membarrier(long command) {
    const long expedited = 1 << 3;
    unsigned left = (1u << thread_count) - 1;
    if (!scenario->membarrier) return -1;
    if (command != expedited || self == NULL) return 0;
    trace("heavy", NULL, 0, "");
    (void)fence(self);
    while (left != 0) {
        unsigned t = exhaustive ? 0 : choose((unsigned)thread_count);
        while ((left >> t & 1) == 0) t = (t + 1) % (unsigned)thread_count;
        left &= ~(1u << t);
        point();
        (void)fence(&threads[t]);
    }
    (void)fence(self);
    trace("heavy end", NULL, 0, "");
    return 0;
}

long explore_syscall(long system_call, ...) {
    va_list args;
    const void *address = NULL, *timeout = NULL;
    long first = 0, second = 0;
    SITE;
    va_start(args, system_call);
    if (system_call == SYS_membarrier) first = va_arg(args, long);
    if (system_call == SYS_futex) {
        address = va_arg(args, const void *);
        first = va_arg(args, long) & 127;
        second = va_arg(args, long);
        timeout = va_arg(args, const void *);
    }
    va_end(args);
    if (system_call == SYS_membarrier) return membarrier(first);
    if (system_call != SYS_futex) return 0; /* signals, names */
    return first == 1 ? futex_wake(address, second)
                      : futex_wait(address, (uint32_t)second, timeout != NULL);
}

/* ---- threads, mutexes and the clock, for a program that has them ---- */

static void start_thread(thread *t, void *(*entry)(void *arg), void *arg) {
    set_view(&t->now, &nothing);
    set_view(&t->acquired, &nothing);
    set_view(&t->fenced, &nothing);
    memset(t->heard, 0, sizeof(t->heard));
    t->now.clock[number(t)] = 1;
    t->state = READY;
    t->entry = entry;
    t->arg = arg;
    t->priority = exhaustive ? 0 : (int)draw(1000);
    if (t->made) return;
    getcontext(&t->first);
    t->first.uc_stack.ss_sp = stacks[number(t)];
    t->first.uc_stack.ss_size = STACK;
    makecontext(&t->first, thread_main, 0);
}

int explore_spawn(void *(*entry)(void *arg), void *arg) {
    thread *t;
    SITE;
    if (thread_count == EXPLORE_THREADS) explore_fail("too many threads");
    point();
    t = &threads[thread_count];
    start_thread(t, entry, arg);
    (void)learn(&t->now, &self->now);
    tick(self);
    trace("spawn", NULL, (uint64_t)thread_count, "");
    return thread_count++;
}

void explore_join(int which) {
    thread *t = &threads[which];
    SITE;
    point();
    while (t->state != DONE) (void)sleep_on(t, false);
    (void)learn(&self->now, &t->now);
    trace("joined", NULL, (uint64_t)which, "");
}

int explore_self(void) { return self == NULL ? EXPLORE_THREADS : number(self); }

/* Another thread goes on, if there is one that can. */
void explore_yield(void) {
    thread *list[EXPLORE_THREADS];
    unsigned n;
    SITE;
    if (self == NULL) return;
    if (++steps > STEPS) explore_fail("no end in sight");
    self->priority = --lowest;
    n = runnable(list);
    if (n > 1) go_to(one_of(list + 1, n - 1));
}

uint64_t explore_clock(void) {
    if (self != NULL) now_ns += tick_ns / 2 + (exhaustive ? 0 : draw((unsigned)tick_ns));
    return now_ns;
}

static lock *lock_at(const void *address) {
    lock *l = locks;
    while (l < locks + lock_count && l->address != address) l++;
    if (l < locks + lock_count) return l;
    if (lock_count == LOCKS) explore_fail("too many mutexes");
    lock_count++;
    l->address = address;
    l->owner = NULL;
    set_view(&l->released, &nothing);
    return l;
}

void explore_lock(const void *mutex) {
    lock *l;
    SITE;
    if (self == NULL) return;
    point();
    l = lock_at(mutex);
    while (l->owner != NULL) (void)sleep_on(l, false);
    l->owner = self;
    (void)learn(&self->now, &l->released);
}

static void unlock(const void *mutex) {
    lock *l = lock_at(mutex);
    if (l->owner != self) explore_fail("an unlock of what is not locked");
    l->owner = NULL;
    set_view(&l->released, &self->now);
    tick(self);
    (void)wake_sleepers(l, EXPLORE_THREADS, false);
}

void explore_unlock(const void *mutex) {
    SITE;
    if (self == NULL) return;
    unlock(mutex);
    point();
}

bool explore_cond_wait(const void *condition, const void *mutex, bool may_time_out) {
    bool woken;
    SITE;
    unlock(mutex);
    woken = sleep_on(condition, may_time_out);
    explore_lock(mutex);
    return woken;
}

void explore_cond_wake(const void *condition, bool all) {
    SITE;
    if (self == NULL) return;
    point();
    trace("wake", condition, all, "");
    (void)wake_sleepers(condition, all ? EXPLORE_THREADS : 1, false);
}

/* ---- runs ---- */

static void begin(void) {
    int i;
    memset(block_at, 0, arena_used / ROUND * sizeof(block_at[0]));
    arena_used = 0;
    word_count = block_count = lock_count = thread_count = 0;
    steps = depth = preemptions = old_values = 0;
    at_site = 0;
    failure[0] = 0;
    now_ns = 1000000000;
    lowest = 0;
    runs_begun++;
    set_view(&fences, &nothing);
    explore_begin(scenario->plan);
    thread_count = scenario->threads;
    for (i = 0; i < thread_count; i++) start_thread(&threads[i], NULL, NULL);
}

/* How this run chooses. A long scenario has preemptions that are rarer, and in a third of its runs
   only a few: then threads have priorities. */
static void set_chances(uint64_t seed) {
    const unsigned rarely = scenario->is_long ? 10 : 5;
    int i;
    random_state = (seed + 1) * 0x9e3779b97f4a7c15ull;
    draw(2);
    switch_every = 1u << draw(rarely);
    old_every = 1u << draw(rarely - 1);
    tick_ns = exhaustive ? 100 : (uint64_t)4 << 3 * draw(5); /* 4 ns to 16 us */
    by_priority = scenario->is_long && draw(3) == 0;
    for (i = 0; i < CHANGES; i++) change_at[i] = by_priority ? draw(16u << draw(10)) : 0;
}

/* One run; false when something was wrong. */
static bool run(uint64_t seed) {
    int i;
    set_chances(seed);
    begin();
    if (_setjmp(out) == 0) {
        self = &threads[choose((unsigned)scenario->threads)];
        if (self->made) _longjmp(self->context, 1);
        self->made = true;
        setcontext(&self->first);
    }
    self = NULL;
    for (i = 0; i < thread_count && failure[0] == 0; i++)
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
    (void)run(seed);
    tracing = false;
    printf("    %s\n", failure[0] != 0 ? failure : "nothing was wrong");
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* All runs of one scenario. */
static bool explore(const explore_scenario *which, uint64_t seed, unsigned long runs,
                    double longest) {
    const double start = seconds();
    unsigned long done = 0;
    bool good = true, more = true;
    scenario = which;
    exhaustive = which->exhaustive;
    decided = 0;
    if (exhaustive) runs *= 10; /* at most */
    if (which->is_long) runs /= 10;
    while (more && done < runs && (done % 64 != 0 || seconds() - start < longest)) {
        good = run(seed + done);
        if (!good) break;
        done++;
        more = !exhaustive || next_choices();
    }
    printf("%s %-74s %7lu %s %5.1f s\n", good ? "ok " : "BAD", which->name, done,
           exhaustive && !more ? "all " : "runs", seconds() - start);
    if (!good) {
        printf("    %s%s; replay: --replay %lu\n", failure, exhaustive ? " (exhaustive)" : "",
               (unsigned long)seed + done);
        print_place(at_site);
        puts("");
        if (exhaustive) rerun(seed + done);
    }
    exhaustive = false;
    fflush(stdout);
    return good;
}

static void write_sites(const char *path) {
    FILE *file = fopen(path, "w");
    size_t i;
    if (file == NULL) abort();
    for (i = 1; i < TEXT; i++)
        if (sites[i].ran > 0)
            fprintf(file, "%zx %d %u %u %u\n", i, sites[i].order, sites[i].ran, sites[i].old,
                    sites[i].news);
    fclose(file);
}

static void weaken(const char *list) {
    char *end;
    for (;; list = end + 1) {
        const unsigned long at = strtoul(list, &end, 16);
        if (end == list || at >= TEXT) exit(2);
        sites[at].weak = true;
        if (*end != ',') return;
    }
}

static bool wanted(const char *name, int count, char **given) {
    int i;
    for (i = 0; i < count; i++)
        if (given[i][0] == '=' ? strcmp(name, given[i] + 1) == 0 : strstr(name, given[i]) != NULL)
            return true;
    return count == 0;
}

int main(int argc, char **argv) {
    const explore_scenario *list;
    const int count = explore_scenarios(&list);
    unsigned long runs = 0, seed = 1;
    const char *replay = NULL, *to = NULL;
    double longest = 1e9;
    int i, passed = 0, failed = 0, arg = 1;
    bool first = false;
    for (; arg < argc && argv[arg][0] == '-'; arg++) {
        const char *name = argv[arg];
        if (strcmp(name, "--list") == 0) {
            for (i = 0; i < count; i++) puts(list[i].name);
            return 0;
        }
        if (strcmp(name, "--first") == 0) {
            first = true;
            continue;
        }
        if (++arg == argc) return 2;
        if (strcmp(name, "--runs") == 0) runs = strtoul(argv[arg], NULL, 10);
        else if (strcmp(name, "--seconds") == 0) longest = atof(argv[arg]);
        else if (strcmp(name, "--seed") == 0) seed = strtoul(argv[arg], NULL, 10);
        else if (strcmp(name, "--replay") == 0) replay = argv[arg];
        else if (strcmp(name, "--sites") == 0) to = argv[arg];
        else if (strcmp(name, "--weaken") == 0) weaken(argv[arg]);
        else return 2;
    }
    if (runs == 0) runs = longest < 1e9 ? 1000000000 : 100000;
    for (i = 0; i < count && !(first && failed > 0); i++) {
        if (!wanted(list[i].name, argc - arg, argv + arg)) continue;
        if (replay != NULL) {
            scenario = &list[i];
            rerun(strtoul(replay, NULL, 10));
        } else if (explore(&list[i], seed, runs, longest)) {
            passed++;
        } else {
            failed++;
        }
    }
    if (to != NULL) write_sites(to);
    if (replay == NULL) printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
