/* doctor_programs.h - programs whose limit is known, as it was planted: for bench_doctor.c and
   tests/test_doctor.c, which include spdl.h with its implementation first.

   A program is a line of text: rows separated by ';', each a kind, a name and values.

       source | pipe | batch | branch | path | merge  NAME
           calls=2           concurrency; of a batch: its size
           compute=4000      microseconds of counted work: a clock would go on while others run
           sleep=4000        microseconds asleep
           locked=0.7        this share of both holds a lock of the row
           touch=4096        KiB touched for the first time, in each call
           every=40 late=9e4 each 40th call sleeps so long as well
           first=80 cold=8e3 the first 80 calls sleep so long as well
           spread            costs differ from item to item, by a factor of 0.3 to 1.9, mean 1
           passes            hands its input on; the row after a batch always does
           copies            has .copy_item; `flush` is .flush
           alone             a pipe says .serial; buffer=2 is .buffer_size
       trainer               compute, sleep, every, late: of its step, and
           workers=4 sink=3  of the pipeline; 4 and 3 unless given
           items=300         in an epoch; without: no end. `continuous` is .continuous
       and, what whoever runs it has to see to, as bench_doctor.c does,
           cpus=1            the process may use so many
           quota=1           it gets the time of so many (cgroup)
           others=1 share=1  so many other processes compute, for this share of each 1.8 s

   "2n" is twice the processors of the machine. */
#ifndef DOCTOR_PROGRAMS_H_INCLUDED
#define DOCTOR_PROGRAMS_H_INCLUDED

#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define PLANTED_ROWS 12

#define PLANTED_LIMIT(what) (1u << SPDL_LIMIT_##what)

enum { PLANTED_RAISE = 1, PLANTED_REPLAY = 2 }; /* of the doctor's desc */

/* A finding is right if its limit is one of these, and its row. Of the statistics alone `maybe` is
   right, too: what only an experiment can tell, they leave open. */
typedef struct planted {
    const char *name, *rows;
    unsigned flags, limits, maybe;
    const char *stages; /* one of these, a comma after each; NULL: whichever */
} planted;

/* clang-format off */
#define PLANTED_KEYS(X)                                                                            \
    X(calls) X(compute) X(sleep) X(locked) X(touch) X(every) X(late) X(first) X(cold) X(spread)    \
    X(passes) X(copies) X(flush) X(alone) X(buffer) X(workers) X(sink) X(items)            \
    X(continuous) X(cpus) X(quota) X(others) X(share)
/* clang-format on */

#define PLANTED_MEMBER(key) double key;
typedef struct planted_values { PLANTED_KEYS(PLANTED_MEMBER) } planted_values;

typedef struct planted_row {
    spdl_kind kind;
    char name[20];
    planted_values is;
    double speed; /* 2: its calls take half as long */
    pthread_mutex_t lock;
    uint64_t calls;
} planted_row;

/* What is different from the program as it is written. */
typedef struct planted_change {
    int stage;    /* or -1 */
    double speed; /* of its calls; 0: as it is */
    int workers, sink; /* 0: as it is */
    int calls[SPDL_MAX_STAGES]; /* of each stage; 0: as it is */
    bool warm;    /* the first calls are as quick as those after them */
} planted_change;

/* A program that runs. */
typedef struct planted_run {
    planted_row row[PLANTED_ROWS]; /* the last is the trainer */
    int count;                     /* with it */
    uint64_t steps;
    spdl_pipeline *pipeline;
} planted_run;

typedef struct planted_item {
    uint64_t number;
    char body[56];
} planted_item;

/* --- what calls cost --- */

static double planted_turns_ns; /* of planted_work, in a nanosecond */
static uint64_t planted_worked;

static __attribute__((noinline)) uint64_t planted_work(uint64_t turns) {
    uint64_t x = turns;
    while (turns-- > 0) x = (x ^ x >> 29) * 6364136223846793005u + 1442695040888963407u;
    return x;
}

/* Once, before the first program; a sleep of the threads to come is as long as it should be. */
static inline void planted_calibrate(void) {
    uint64_t best = UINT64_MAX;
    int i;
    (void)prctl(PR_SET_TIMERSLACK, 1000L, 0L, 0L, 0L);
    for (i = 0; i < 200; ++i) {
        const uint64_t begun = spdl_time_ns();
        uint64_t took;
        planted_worked += planted_work(100000);
        took = spdl_time_ns() - begun;
        if (took < best) best = took;
    }
    planted_turns_ns = 100000 / (double)best;
}

static inline void planted_sleep(double us) {
    struct timespec t;
    if (us <= 0) return;
    t.tv_sec = (time_t)(us / 1e6);
    t.tv_nsec = (long)((us - 1e6 * (double)t.tv_sec) * 1e3);
    (void)clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL);
}

static inline void planted_compute(double us) {
    if (us <= 0) return;
    __atomic_store_n(&planted_worked, planted_work((uint64_t)(us * 1e3 * planted_turns_ns)),
                     __ATOMIC_RELAXED);
}

static inline void planted_touch(size_t bytes) {
    char *at = (char *)mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                            0);
    size_t i;
    if (at == (char *)MAP_FAILED) return;
    for (i = 0; i < bytes; i += 4096) *(volatile char *)(at + i) = 1;
    (void)munmap(at, bytes);
}

/* One call, for the item of this number. */
static inline void planted_call(planted_row *row, uint64_t number) {
    static const double factors[8] = { 0.3, 0.5, 0.65, 0.8, 1.0, 1.25, 1.6, 1.9 };
    const planted_values *v = &row->is;
    const uint64_t call = __atomic_add_fetch(&row->calls, 1, __ATOMIC_RELAXED);
    double times = 1 / row->speed;
    if (v->spread > 0) times *= factors[(number * 0x9e3779b97f4a7c15u) >> 61];
    planted_compute(times * v->compute * (1 - v->locked));
    planted_sleep(times * v->sleep * (1 - v->locked));
    if (v->locked > 0) {
        pthread_mutex_lock(&row->lock);
        planted_compute(times * v->compute * v->locked);
        planted_sleep(times * v->sleep * v->locked);
        pthread_mutex_unlock(&row->lock);
    }
    if (v->touch > 0) planted_touch((size_t)(times * v->touch * 1024));
    if (v->every > 0 && call % (uint64_t)v->every == 0) planted_sleep(times * v->late);
    if (call <= (uint64_t)v->first) planted_sleep(times * v->cold);
}

/* --- the rows --- */

static inline void *planted_copy(const void *from) {
    void *copy = malloc(sizeof(planted_item));
    if (copy != NULL) memcpy(copy, from, sizeof(planted_item));
    return copy;
}

SPDL_FN(planted_source, void, void) {
    planted_row *row = (planted_row *)spdl_ctx(task);
    const uint64_t number = spdl_sequence(task);
    planted_item *made;
    if (row->is.items > 0 && number >= (uint64_t)row->is.items)
        return SPDL_END;
    made = (planted_item *)calloc(1, sizeof(*made));
    if (made == NULL) return SPDL_E_NOMEM;
    planted_call(row, number);
    made->number = number;
    *out = made;
    return SPDL_OK;
}

SPDL_FN(planted_pipe, void, void) {
    planted_row *row = (planted_row *)spdl_ctx(task);
    if (in == NULL) return SPDL_SKIP; /* .flush, at the end */
    planted_call(row, spdl_sequence(task));
    *out = row->is.passes > 0 ? in : planted_copy(in);
    return *out != NULL ? SPDL_OK : SPDL_E_NOMEM;
}

SPDL_FN(planted_branch, void, void) {
    planted_call((planted_row *)spdl_ctx(task), spdl_sequence(task));
    *out = in;
    return spdl_route(task, (int)(spdl_sequence(task) & 1));
}

/* As spdl_step_fn; ctx is the run. */
static inline void planted_step(void *ctx, void *given) {
    planted_run *run = (planted_run *)ctx;
    (void)given;
    planted_call(&run->row[run->count - 1], run->steps++);
}

/* --- the text --- */

static inline int planted_cores(void) {
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    return cores < 1 ? 1 : (int)cores;
}

/* One word of a row, "key" or "key=value". */
static inline bool planted_word(planted_values *values, const char *word) {
#define PLANTED_KEY(key) { #key, offsetof(planted_values, key) },
    static const struct { const char *key; size_t at; } keys[] = { PLANTED_KEYS(PLANTED_KEY) };
    const size_t length = strcspn(word, "=");
    double value = 1;
    size_t i;
    if (word[length] == '=') {
        char *end;
        value = strtod(word + length + 1, &end);
        if (*end == 'n') value *= planted_cores(), ++end;
        if (*end != '\0') return false;
    }
    for (i = 0; i < sizeof(keys) / sizeof(*keys); ++i)
        if (strlen(keys[i].key) == length && memcmp(keys[i].key, word, length) == 0) {
            memcpy((char *)values + keys[i].at, &value, sizeof(value));
            return true;
        }
    return false;
}

static inline bool planted_row_read(planted_row *row, char *text) {
    static const struct { const char *word; spdl_kind kind; } kinds[] = {
        { "source", SPDL_KIND_SOURCE }, { "pipe", SPDL_KIND_PIPE }, { "batch", SPDL_KIND_BATCH },
        { "branch", SPDL_KIND_BRANCH }, { "path", SPDL_KIND_PATH }, { "merge", SPDL_KIND_MERGE }
    };
    char *rest, *word = strtok_r(text, " ", &rest);
    size_t i;
    memset(row, 0, sizeof(*row));
    row->speed = 1;
    row->is.calls = 1;
    row->is.workers = 4;
    row->is.sink = 3;
    if (word == NULL || pthread_mutex_init(&row->lock, NULL) != 0) return false;
    for (i = 0; i < sizeof(kinds) / sizeof(*kinds); ++i)
        if (strcmp(kinds[i].word, word) == 0) row->kind = kinds[i].kind;
    if (row->kind == SPDL_KIND_NONE && strcmp(word, "trainer") != 0) return false;
    if (row->kind != SPDL_KIND_NONE) {
        if ((word = strtok_r(NULL, " ", &rest)) == NULL) return false;
        (void)snprintf(row->name, sizeof(row->name), "%s", word);
    }
    while ((word = strtok_r(NULL, " ", &rest)) != NULL)
        if (!planted_word(&row->is, word)) return false;
    return true;
}

/* The rows of a program, the trainer last; false: the text is wrong. */
static inline bool planted_read(planted_run *run, const planted *is) {
    char text[512];
    char *rest, *row;
    memset(run, 0, sizeof(*run));
    (void)snprintf(text, sizeof(text), "%s", is->rows);
    for (row = strtok_r(text, ";", &rest); row != NULL; row = strtok_r(NULL, ";", &rest))
        if (run->count == PLANTED_ROWS || !planted_row_read(&run->row[run->count++], row))
            return false;
    return run->count > 1 && run->row[run->count - 1].kind == SPDL_KIND_NONE;
}

/* --- the pipeline --- */

static inline spdl_stage planted_stage(planted_run *run, int i) {
    static spdl_stage nothing;
    planted_row *row = &run->row[i];
    const planted_values *v = &row->is;
    spdl_stage to = nothing;
    to.kind = row->kind;
    to.name = row->name;
    to.file = __FILE__;
    to.ctx = row;
    if (i > 0 && run->row[i - 1].kind == SPDL_KIND_BATCH) row->is.passes = 1;
    if (row->kind == SPDL_KIND_SOURCE) to.fn = &planted_source_is_no_SPDL_FN;
    if (row->kind == SPDL_KIND_BRANCH) to.fn = &planted_branch_is_no_SPDL_FN;
    if (row->kind == SPDL_KIND_BATCH) to.size = (int)v->calls;
    if (row->kind == SPDL_KIND_PIPE) {
        to.fn = &planted_pipe_is_no_SPDL_FN;
        to.concurrency = v->flush > 0 ? 0 : (int)v->calls;
        to.serial = v->alone > 0;
        to.flush = v->flush > 0;
    }
    to.buffer_size = (int)v->buffer;
    if (row->kind == SPDL_KIND_SOURCE) to.continuous = v->continuous > 0;
    if (to.fn != NULL) to.free_item = free;
    if (to.fn != NULL && v->copies > 0) to.copy_item = planted_copy;
    return to;
}

static inline void planted_make_change(planted_run *run, const planted_change *change) {
    planted_values *pool = &run->row[run->count - 1].is;
    int i;
    if (change->stage >= 0 && change->speed > 0) run->row[change->stage].speed = change->speed;
    for (i = 0; i < run->count; ++i)
        if (change->calls[i] > 0) run->row[i].is.calls = change->calls[i];
    for (i = 0; change->warm && i < run->count; ++i) run->row[i].is.first = 0;
    if (change->workers > 0) pool->workers = change->workers;
    if (change->sink > 0) pool->sink = change->sink;
}

/* Warnings are part of some programs. */
static inline void planted_log(spdl_log_level level, const char *text, void *user) {
    (void)user;
    if (level == SPDL_LOG_ERROR) fprintf(stderr, "%s\n", text);
}

/* Makes the program and starts it; `change` and `doctor` may be NULL. `run` has to stay where it
   is. */
static inline spdl_result planted_open(planted_run *run, const planted *is,
                                       const planted_change *change,
                                       const spdl_doctor_desc *doctor, spdl_error *error) {
    spdl_stage rows[PLANTED_ROWS];
    spdl_pipeline_desc desc;
    const planted_values *pool;
    int i;
    if (!planted_read(run, is)) return SPDL_E_INVALID;
    if (change != NULL) planted_make_change(run, change);
    pool = &run->row[run->count - 1].is;
    run->row[0].is.items = pool->items;
    run->row[0].is.continuous = pool->continuous;
    for (i = 0; i < run->count; ++i) rows[i] = planted_stage(run, i);
    rows[run->count - 1].kind = SPDL_KIND_SINK;
    rows[run->count - 1].name = NULL;
    rows[run->count - 1].ctx = NULL;
    rows[run->count - 1].buffer_size = (int)pool->sink;
    memset(&desc, 0, sizeof(desc));
    desc.workers = pool->workers > 0 ? (int)pool->workers : SPDL_INLINE;
    desc.doctor = doctor;
    desc.logger.log_fn = planted_log;
    desc.error = error;
    return spdl_pipeline_create(&run->pipeline, &desc, rows, (size_t)run->count);
}

/* The next item, over ends of epochs. */
static inline spdl_result planted_next(planted_run *run, void **next) {
    spdl_result result = spdl_pipeline_next(run->pipeline, next, SPDL_FOREVER);
    while (result == SPDL_END) {
        if (run->row[0].is.continuous <= 0)
            result = spdl_pipeline_rewind(run->pipeline, 0, SPDL_FOREVER);
        else result = SPDL_OK;
        if (result == SPDL_OK) result = spdl_pipeline_next(run->pipeline, next, SPDL_FOREVER);
    }
    return result;
}

static inline void planted_free(const planted_run *run, void *given) {
    int i;
    for (i = 0; i < run->count; ++i)
        if (run->row[i].kind == SPDL_KIND_BATCH) {
            spdl_batch_free(given);
            return;
        }
    free(given);
}

static inline void planted_close(planted_run *run) {
    int i;
    spdl_pipeline_destroy(run->pipeline);
    for (i = 0; i < run->count; ++i) (void)pthread_mutex_destroy(&run->row[i].lock);
}

/* --- the programs --- */

#define IS(limit) PLANTED_LIMIT(limit)
#define UNSURE (IS(NOT_KNOWN) | IS(CONCURRENCY) | IS(WORKERS))
/* clang-format off */
static const planted planted_programs[] = {
    /* one stage */
    { "compute_1", "source list; pipe decode compute=3000; trainer sleep=500",
      PLANTED_RAISE, IS(CONCURRENCY), 0, "decode," },
    { "compute_beside_read", "source list; pipe read calls=2 sleep=1000 copies;"
      "pipe decode compute=4000 copies; trainer sleep=2000",
      PLANTED_RAISE | PLANTED_REPLAY, IS(CONCURRENCY), 0, "decode," },
    { "sleep_1", "source list; pipe read sleep=3000; trainer sleep=500",
      PLANTED_RAISE, IS(CONCURRENCY), 0, "read," },
    { "read_8ms", "source list; pipe read sleep=8000 copies;"
      "pipe decode calls=2 compute=4000 copies; trainer sleep=2000 workers=6",
      PLANTED_RAISE | PLANTED_REPLAY, IS(CONCURRENCY), 0, "read," },
    { "read_2_calls", "source list; pipe read calls=2 sleep=6000; pipe decode compute=1000;"
      "trainer sleep=700", PLANTED_RAISE, IS(CONCURRENCY), 0, "read," },
    { "varied", "source list; pipe read calls=2 sleep=500 copies;"
      "pipe decode compute=4000 spread copies; trainer sleep=2000",
      PLANTED_RAISE | PLANTED_REPLAY, IS(CONCURRENCY), 0, "decode," },
    { "in_place", "source list sleep=300; pipe augment compute=3000 passes;"
      "pipe check compute=200 passes; trainer sleep=500",
      PLANTED_RAISE, IS(CONCURRENCY), 0, "augment," },
    { "page_faults", "source list; pipe fill touch=4096; pipe check compute=300; trainer sleep=200",
      PLANTED_RAISE, IS(CONCURRENCY), 0, "fill," },
    { "short", "source list; pipe a compute=1; pipe b compute=8; pipe c compute=2; trainer",
      PLANTED_RAISE, IS(NOT_KNOWN) | IS(CONCURRENCY), 0, NULL },
    { "serial", "source list; pipe read calls=2 sleep=500; pipe pack compute=2500 flush;"
      "trainer sleep=500", 0, IS(SERIAL), 0, "pack," },
    { "declared_serial", "source list; pipe pack compute=2500 alone;"
      "pipe check compute=300; trainer sleep=500", PLANTED_RAISE, IS(SERIAL), 0, "pack," },
    { "source", "source list sleep=2500 copies; pipe decode compute=1000 copies; trainer sleep=300",
      PLANTED_REPLAY, IS(SERIAL), 0, "list," },
    /* locks: with `raise`, and as SPDL_DOCTOR=1 meets them */
    { "lock_computing", "source list; pipe decode calls=2 compute=3100 locked=1; trainer sleep=500",
      PLANTED_RAISE, IS(LOCK), UNSURE, "decode," },
    { "lock_sleeping", "source list; pipe read calls=4 sleep=3100 locked=1;"
      "pipe decode compute=500; trainer sleep=500 workers=6",
      PLANTED_RAISE, IS(LOCK), UNSURE, "read," },
    { "lock_in_part", "source list; pipe read calls=4 sleep=3000 locked=0.6;"
      "pipe decode compute=500; trainer sleep=500 workers=8",
      PLANTED_RAISE, IS(LOCK), UNSURE, "read," },
    { "lock_computing_1", "source list; pipe decode calls=2 compute=3100 locked=1;"
      "trainer sleep=500", 0, IS(LOCK), UNSURE, "decode," },
    { "lock_sleeping_1", "source list; pipe read calls=4 sleep=3100 locked=1;"
      "pipe decode compute=500; trainer sleep=500 workers=6", 0, IS(LOCK), UNSURE, "read," },
    { "lock_in_part_1", "source list; pipe read calls=4 sleep=3000 locked=0.6;"
      "pipe decode compute=500; trainer sleep=500 workers=8", 0, IS(LOCK), UNSURE, "read," },
    { "lock_all_workers", "source list; pipe read calls=4 sleep=2000 locked=1; trainer sleep=200",
      0, IS(LOCK), UNSURE, "read," },
    /* processors and workers */
    { "machine", "source list; pipe decode calls=2n compute=3000 copies;"
      "pipe augment calls=1n compute=1500 copies; trainer sleep=500 workers=2n",
      PLANTED_REPLAY, IS(MACHINE), 0, "decode," },
    { "machine_raise", "source list; pipe decode calls=1n compute=4000;"
      "trainer sleep=300 workers=2n", PLANTED_RAISE, IS(MACHINE), 0, "decode," },
    { "one_processor", "source list; pipe decode calls=4 compute=2000; trainer sleep=500 cpus=1",
      0, IS(MACHINE), 0, "decode," },
    { "quota", "source list; pipe decode calls=4 compute=2000; trainer sleep=500 quota=1",
      0, IS(MACHINE), 0, "decode," },
    { "quota_half", "source list; pipe decode calls=2 compute=2000; trainer sleep=500 quota=0.5",
      0, IS(MACHINE), 0, "decode," },
    { "workers", "source list; pipe read calls=8 sleep=4000; pipe check compute=200;"
      "trainer sleep=300", PLANTED_RAISE, IS(WORKERS), 0, NULL },
    { "workers_2", "source list; pipe read calls=4 sleep=4000 copies;"
      "pipe decode compute=500 copies; trainer sleep=300 workers=2",
      PLANTED_RAISE | PLANTED_REPLAY, IS(WORKERS), 0, NULL },
    { "no_workers", "source list; pipe decode compute=2000; trainer sleep=2000 workers=0",
      0, IS(WORKERS), 0, NULL },
    /* the consumer */
    { "trainer", "source list; pipe decode calls=2 compute=1500; trainer sleep=6000",
      PLANTED_RAISE, IS(CONSUMER), 0, NULL },
    { "trainer_computes", "source list; pipe decode compute=500 copies; trainer compute=5000",
      PLANTED_REPLAY, IS(CONSUMER), 0, NULL },
    { "harm", "source list; pipe decode calls=1n compute=4000; trainer compute=2200 workers=1n",
      0, IS(HARM) | IS(MACHINE), 0, NULL },
    /* more than one, and uneven */
    { "two_limits", "source list; pipe decode sleep=3000; pipe augment sleep=3000;"
      "trainer sleep=500", PLANTED_RAISE, IS(CONCURRENCY), 0, "decode,augment," },
    { "late_calls", "source list; pipe read calls=4 sleep=2000 every=100 late=100000;"
      "trainer sleep=200 workers=8", 0, IS(ROOM), 0, "read," },
    { "late_in_each_100", "source list; pipe read calls=4 sleep=2000 every=100 late=50000;"
      "pipe check compute=100; trainer sleep=200 workers=8", 0, IS(ROOM), 0, "read," },
    { "bursty_source", "source list every=40 late=100000; pipe decode compute=500;"
      "trainer sleep=500", PLANTED_RAISE, IS(SERIAL) | IS(ROOM), IS(NOT_KNOWN), "list," },
    { "late_steps", "source list; pipe decode compute=3000; trainer sleep=500 every=10 late=5000",
      PLANTED_RAISE, IS(CONCURRENCY), 0, "decode," },
    /* batches, branches, ends */
    { "batch_32", "source list; pipe read calls=2 sleep=500; batch group calls=32;"
      "pipe pack compute=300; trainer sleep=1000", PLANTED_RAISE, IS(CONCURRENCY), 0, "read," },
    { "batch_256", "source list; pipe decode compute=40; batch group calls=256;"
      "pipe pack compute=1000; trainer sleep=2000", PLANTED_RAISE, IS(CONCURRENCY), 0, "decode," },
    { "batch_barrier", "source list sleep=300; batch group calls=64; pipe pack compute=300;"
      "trainer sleep=1000", 0, IS(SERIAL), 0, "list," },
    { "branches", "source list; branch split; path small; pipe shrink compute=500; path large;"
      "pipe crop compute=5000; merge join; pipe check compute=100; trainer sleep=500",
      PLANTED_RAISE, IS(CONCURRENCY), 0, "crop," },
    { "epochs", "source list; pipe decode compute=3000; trainer sleep=500 items=37 continuous",
      PLANTED_RAISE, IS(CONCURRENCY), 0, "decode," },
    { "rewinds", "source list; pipe read sleep=3000; trainer sleep=500 items=300",
      PLANTED_RAISE, IS(CONCURRENCY), 0, "read," },
    { "cold_start", "source list; pipe read sleep=500 first=120 cold=8000;"
      "pipe decode compute=2500; trainer sleep=500", PLANTED_RAISE, IS(CONCURRENCY),
      IS(CONCURRENCY), "decode," },
    /* others on the machine: who sleeps, or has a processor, is named all the same */
    { "others", "source list; pipe decode compute=4000; trainer sleep=500 others=1n",
      PLANTED_RAISE, IS(FOREIGN) | IS(MACHINE), 0, NULL },
    { "others_at_times", "source list; pipe decode calls=1n compute=4000;"
      "trainer sleep=500 others=1n share=0.4", 0, IS(FOREIGN) | IS(MACHINE), 0, NULL },
    { "others_and_source", "source list compute=2000; pipe decode compute=100;"
      "trainer sleep=200 others=1", 0, IS(SERIAL) | IS(FOREIGN), 0, NULL },
    { "others_and_sleep", "source list; pipe read sleep=4000; trainer sleep=500 others=1n",
      PLANTED_RAISE, IS(CONCURRENCY), 0, "read," },
    { "others_and_lock", "source list; pipe read calls=4 sleep=2000 locked=1;"
      "trainer sleep=500 others=1n workers=6", PLANTED_RAISE, IS(LOCK), UNSURE, "read," },
    { "others_and_trainer", "source list; pipe decode compute=300; trainer sleep=5000 others=1",
      0, IS(CONSUMER), IS(FOREIGN), NULL }
};
/* clang-format on */
#undef UNSURE
#undef IS
#define PLANTED_PROGRAMS (sizeof(planted_programs) / sizeof(*planted_programs))

/* Of the statistics alone `open` is true. */
static inline bool planted_right(const planted *is, const spdl_finding *found,
                                 const planted_run *run, bool open) {
    char name[24];
    if (!((is->limits | (open ? is->maybe : 0)) >> found->limit & 1)) return false;
    if (is->stages == NULL || found->limit == SPDL_LIMIT_NOT_KNOWN) return true;
    if (found->stage < 0) return false;
    (void)snprintf(name, sizeof(name), "%s,", run->row[found->stage].name);
    return strstr(is->stages, name) != NULL;
}

#endif /* DOCTOR_PROGRAMS_H_INCLUDED */
