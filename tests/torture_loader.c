/* Ends the processes of a loader at random points, over and over: what was handed out before is
   whole and in order, how it ended is told, and nobody is left.

       make torture-loader                 1,000 points of each kind (minutes)
       build/torture_loader 20 [seed]      20 of each

   It prints how long it takes until an end is told (of a supervisor: trainers look every 10 ms),
   and fails when something is wrong. */
#define _GNU_SOURCE
#include <stdint.h>
#include <unistd.h>

/* Points where timing decides: the process of a child may end there. */
static void torture_point(const char *id);
#define SPDL_TEST_POINT(id) torture_point(id)
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "loader.h"

#include <sys/prctl.h>

#define SAY(...) (void)(printf(__VA_ARGS__), fflush(stdout))

static struct {
    int64_t countdown; /* points that are passed; negative: none ends */
    uint32_t done;
} *shared;

static pid_t trainer;
static uint64_t dice = 1;
static int wrong, passed, failed; /* checks of this kind; kinds */

static uint64_t throw_dice(uint64_t below) {
    dice ^= dice << 13, dice ^= dice >> 7, dice ^= dice << 17;
    return dice % below;
}

static void torture_point(const char *id) {
    (void)id;
    if (shared == NULL || getpid() == trainer) return;
    if (__atomic_load_n(&shared->countdown, __ATOMIC_RELAXED) < 0) return;
    if (__atomic_fetch_sub(&shared->countdown, 1, __ATOMIC_RELAXED) == 0) kill(getpid(), SIGKILL);
}

#define HOLDS(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            ++wrong;                                                                               \
            SAY("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                            \
        }                                                                                          \
    } while (0)

static void nobody_is_left(void) { HOLDS(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD); }

/* --- how long an end takes to be told --- */

static uint64_t told[100000];
static size_t told_count;

static int by_size(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void tell(const char *kind, int points) {
    qsort(told, told_count, sizeof told[0], by_size);
    SAY("%-44s %5d points", kind, points);
    if (told_count > 0)
        SAY(", told after %.2f ms (p50), %.2f (p99), %.2f (max)",
            (double)told[told_count / 2] / 1e6, (double)told[told_count * 99 / 100] / 1e6,
            (double)told[told_count - 1] / 1e6);
    SAY("%s\n", wrong ? ": WRONG" : "");
    told_count = 0;
    failed += wrong != 0;
    passed += wrong == 0;
    wrong = 0;
}

/* --- a run --- */

enum { ITEMS = 300 };

static spdl_loader *open_run(spdl_loader_desc *desc, fate *harm) {
    spdl_loader *l = NULL;
    spdl_error error;
    desc->error = &error;
    desc->pipeline.logger.log_fn = log_nothing;
    if (spdl_loader_open(&l, desc, SPDL_STAGES(
            RECORDS(ITEMS), SPDL_PIPE(copied, .item_bytes = sizeof(record)),
            SPDL_PIPE(meets_its_fate, .ctx = harm), IN_BATCHES(3), SPDL_SINK(2))) == SPDL_OK)
        return l;
    ++wrong;
    SAY("%s\n", error.text);
    return NULL;
}

/* Takes all there is: batches have to be whole and in order. How it ended; *next: items. */
static spdl_result take_run(spdl_loader *l, uint64_t *next) {
    spdl_loader_batch batch;
    spdl_result result;
    while ((result = spdl_loader_next(l, &batch, SPDL_SECONDS(20))) == SPDL_OK) {
        for (size_t i = 0; i < batch.count; ++i, ++*next)
            HOLDS(record_is((const record *)batch.data + i, *next, 0));
        HOLDS(spdl_loader_done(l, &batch) == SPDL_OK);
    }
    return result;
}

/* In a call: crashes and exits are named with stage and item. */
static void ends_in_a_call(fate_how how, const char *kind, int points) {
    for (int k = 0; k < points; ++k) {
        spdl_loader_desc desc = desc_of(1 + (int)throw_dice(2));
        fate harm = { .at = throw_dice(ITEMS), .how = how };
        spdl_loader *l;
        uint64_t next = 0;
        if ((l = open_run(&desc, &harm)) == NULL) return;
        HOLDS(take_run(l, &next) == SPDL_E_PROCESS);
        HOLDS(next <= harm.at);
        HOLDS(strstr(spdl_loader_error(l)->text, "stage 2 'meets_its_fate', item ") != NULL);
        HOLDS(spdl_loader_error(l)->item == harm.at || how == EXIT_0);
        spdl_loader_close(l);
        nobody_is_left();
    }
    tell(kind, points);
}

/* From outside, at any time. */
static void is_killed(int points) {
    for (int k = 0; k < points; ++k) {
        spdl_loader_desc desc = desc_of((int)throw_dice(3));
        fate harm = { .at = UINT64_MAX, .how = KILL };
        spdl_loader_status status;
        spdl_loader *l;
        uint64_t next = 0, since;
        if ((l = open_run(&desc, &harm)) == NULL) return;
        while (spdl_loader_get_status(l, &status), status.pid == 0) usleep(20);
        usleep((useconds_t)throw_dice(1500));
        since = spdl_time_ns();
        kill((pid_t)status.pid, SIGKILL);
        HOLDS(take_run(l, &next) == SPDL_E_PROCESS);
        told[told_count++] = spdl_time_ns() - since;
        HOLDS(strstr(spdl_loader_error(l)->text, "was killed by SIGKILL") != NULL);
        spdl_loader_close(l);
        nobody_is_left();
    }
    tell("killed at any time", points);
}

/* At the points where timing decides, and started again: all is there, once and in order. */
static void is_started_again(int points) {
    int starts = 0;
    for (int k = 0; k < points; ++k) {
        spdl_loader_desc desc = desc_of(1 + (int)throw_dice(2));
        fate harm = { .at = UINT64_MAX, .how = KILL };
        spdl_loader_status status;
        spdl_loader *l;
        uint64_t next = 0;
        desc.max_restarts = 1;
        desc.slot_count = 1 + (int)throw_dice(4);
        __atomic_store_n(&shared->countdown, (int64_t)throw_dice(600), __ATOMIC_RELAXED);
        if ((l = open_run(&desc, &harm)) == NULL) return;
        HOLDS(take_run(l, &next) == SPDL_END);
        HOLDS(next == ITEMS);
        spdl_loader_get_status(l, &status);
        starts += status.restarts;
        __atomic_store_n(&shared->countdown, -1, __ATOMIC_RELAXED);
        spdl_loader_close(l);
        nobody_is_left();
    }
    HOLDS(starts > points / 4); /* the others were over before */
    tell("killed where it matters, and started again", points);
}

static void is_stopped(int points) {
    for (int k = 0; k < points; ++k) {
        spdl_loader_desc desc = desc_of(1);
        fate harm = { .at = throw_dice(ITEMS), .how = k % 2 ? STOP : HANG, .done = &shared->done };
        spdl_loader *l;
        uint64_t next = 0;
        shared->done = 0;
        desc.hang_timeout = 0.03;
        desc.max_restarts = 2; /* the machine may be busy */
        if ((l = open_run(&desc, &harm)) == NULL) return;
        HOLDS(take_run(l, &next) == SPDL_END);
        HOLDS(next == ITEMS);
        spdl_loader_close(l);
        nobody_is_left();
    }
    tell("stopped or hung, and started again", points);
}

/* The trainer is killed: everybody ends. This process is who orphans come to. */
static void loses_its_trainer(int points) {
    for (int k = 0; k < points; ++k) {
        spdl_loader_status status;
        int pipes[2];
        pid_t child;
        uint64_t since;
        HOLDS(pipe(pipes) == 0);
        child = fork();
        if (child == 0) {
            spdl_loader_desc desc = desc_of(2);
            fate harm = { .at = UINT64_MAX, .how = KILL };
            spdl_loader *l;
            uint64_t next = 0;
            trainer = getpid();
            l = open_run(&desc, &harm);
            while (spdl_loader_get_status(l, &status), status.pid == 0) usleep(20);
            if (write(pipes[1], &status, sizeof status) < 0) _exit(1);
            (void)take_run(l, &next);
            for (;;) pause();
        }
        HOLDS(read(pipes[0], &status, sizeof status) == (ssize_t)sizeof status);
        usleep((useconds_t)throw_dice(2000));
        since = spdl_time_ns();
        kill(child, SIGKILL);
        HOLDS(waitpid(child, NULL, 0) == child);
        HOLDS(waitpid((pid_t)status.supervisor, NULL, 0) == (pid_t)status.supervisor);
        told[told_count++] = spdl_time_ns() - since;
        HOLDS(kill((pid_t)status.pid, 0) != 0);
        close(pipes[0]);
        close(pipes[1]);
        nobody_is_left();
    }
    tell("the trainer is killed: all are gone", points);
}

static void loses_its_supervisor(int points) {
    for (int k = 0; k < points; ++k) {
        spdl_loader_desc desc = desc_of(1);
        fate harm = { .at = UINT64_MAX, .how = KILL };
        spdl_loader_status status;
        spdl_loader *l;
        uint64_t next = 0, since;
        spdl_result result;
        if ((l = open_run(&desc, &harm)) == NULL) return;
        while (spdl_loader_get_status(l, &status), status.pid == 0) usleep(20);
        usleep((useconds_t)throw_dice(1500));
        since = spdl_time_ns();
        kill((pid_t)status.supervisor, SIGKILL);
        result = take_run(l, &next);
        HOLDS(result == SPDL_E_PROCESS || (result == SPDL_END && next == ITEMS));
        told[told_count++] = spdl_time_ns() - since;
        spdl_loader_close(l); /* it has waited for the supervisor: now its child is ours */
        HOLDS(waitpid((pid_t)status.pid, NULL, 0) == (pid_t)status.pid);
        nobody_is_left();
    }
    tell("the supervisor is killed", points);
}

/* Whatever is written over what is shared, nothing happens to the trainer. */
static void is_scribbled_over(int points) {
    for (int k = 0; k < points; ++k) {
        spdl_loader_desc desc = desc_of(1);
        fate harm = { .at = UINT64_MAX, .how = KILL };
        spdl_loader_batch batch;
        spdl_loader *l;
        desc.hang_timeout = 0.05;
        if ((l = open_run(&desc, &harm)) == NULL) return;
        for (int i = 0; i < 10; ++i) {
            const spdl_result result = spdl_loader_next(l, &batch, 1000000);
            char *at = (char *)l->shared + throw_dice(l->layout.data / 8) * 8;
            const uint64_t with = throw_dice(3) ? throw_dice(UINT64_MAX) : throw_dice(40);
            HOLDS(result == SPDL_OK || result == SPDL_TIMEOUT || result < 0);
            HOLDS(result >= 0 || spdl_loader_error(l)->result == result);
            if (result == SPDL_OK) {
                HOLDS((char *)batch.data >= l->slot_memory && batch.count <= 3 &&
                      (char *)batch.data + batch.bytes <= (char *)l->shared + l->layout.bytes);
                HOLDS(spdl_loader_done(l, &batch) == SPDL_OK);
            } else if (result != SPDL_TIMEOUT) {
                break;
            }
            memcpy(at, &with, 1 + throw_dice(8));
        }
        spdl_loader_close(l);
        nobody_is_left();
    }
    tell("scribbles, 10 in each", points);
}

/* --- runs that are killed and go on --- */

enum { LINES = 120 };

static char whole[LINES][300];
static int table_of, line_count;

SPDL_FN(keyed, spdl_index, record) {
    if ((*out = (record *)spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    record_make(*out, in->index, spdl_item_key(task) % 251);
    return SPDL_OK;
}

SPDL_FN(several, record, record) { /* 0 to 2 of each, one call after the other */
    void **made = spdl_call_state(task);
    const uintptr_t so_far = (uintptr_t)*made;
    if (so_far == in->number % 3) return SPDL_SKIP;
    if ((*out = (record *)spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    **out = *in;
    (*out)->epoch += so_far + 1;
    *made = (void *)(so_far + 1);
    return SPDL_AGAIN;
}

/* A table by its number: filters, one to many, batches whole or not. */
static spdl_result open_table(spdl_loader **l, spdl_pipeline **p, spdl_sampler *s, int workers) {
    const uint64_t t = (uint64_t)table_of;
    spdl_loader_desc desc = desc_of(workers);
    spdl_stage rows[6];
    size_t n = 0;
    rows[n++] = (spdl_stage)SPDL_INDEX(s, .continuous = true);
    rows[n++] = (spdl_stage)SPDL_PIPE(keyed, .item_bytes = sizeof(record), .concurrency = 3);
    if (t & 1) rows[n++] = (spdl_stage)SPDL_PIPE(two_of_three, .concurrency = 2);
    if (t & 2) rows[n++] = (spdl_stage)SPDL_PIPE(several, .item_bytes = sizeof(record),
                                                 .again = true, .free_item = spdl_buffer_free);
    rows[n] = (spdl_stage)SPDL_BATCH(1, .item_bytes = sizeof(record), .drop_last = (t & 4) != 0);
    rows[n++].size = 1 + (int)(t / 8 % 5);
    rows[n++] = (spdl_stage)SPDL_SINK(2);
    desc.pipeline.seed = t;
    desc.pipeline.logger.log_fn = log_nothing;
    desc.slot_count = 1 + (int)(t % 4);
    desc.max_restarts = 9;
    return l != NULL ? spdl_loader_open(l, &desc, rows, n)
                     : spdl_pipeline_create(p, &desc.pipeline, rows, n);
}

/* Goes on from a text, takes lines and writes them with the text after each to `file`, up to so
   many; then dies. */
static void take_lines(const char *text, int at, int most, bool loads, int workers, FILE *file) {
    const spdl_sampler_desc order = { .count = 20 + (uint64_t)table_of % 13, .seed = 1,
                                      .order = SPDL_SAMPLE_SHUFFLED };
    char line[300], after[SPDL_STATE_BYTES] = "";
    spdl_loader *l = NULL;
    spdl_pipeline *p = NULL;
    spdl_sampler *s = NULL;
    spdl_error error;
    if (spdl_sampler_create(&s, &order) != SPDL_OK) _exit(3);
    if (open_table(loads ? &l : NULL, &p, s, workers) != SPDL_OK) _exit(4);
    if (text[0] != '\0' && (l ? spdl_loader_state_load(l, &text, 1, SPDL_FOREVER, &error)
                              : spdl_state_load(p, &text, 1, SPDL_FOREVER, &error)) != SPDL_OK) {
        SAY("%s\n", error.text);
        _exit(5);
    }
    for (; at < most && at < LINES; ++at) {
        spdl_loader_batch batch = { .count = 0 };
        spdl_batch *own = NULL;
        const spdl_result result = l ? spdl_loader_next(l, &batch, SPDL_SECONDS(20))
                                     : SPDL_NEXT(p, &own, SPDL_SECONDS(20));
        const record *items = (const record *)(own ? own->data : batch.data);
        const size_t count = own ? own->count : batch.count;
        int length = sprintf(line, "%d", (int)result);
        if (result < 0 || result == SPDL_TIMEOUT) _exit(6);
        for (size_t i = 0; i < count; ++i)
            length += sprintf(line + length, " %d.%d", (int)items[i].number, (int)items[i].epoch);
        if (own != NULL) spdl_batch_free(own);
        else if (result == SPDL_OK) (void)spdl_loader_done(l, &batch);
        if ((l ? spdl_loader_state_save(l, after, sizeof after)
               : spdl_state_save(p, after, sizeof after)) < 0) _exit(7);
        (void)fprintf(file, "%s\n%s\n", line, after);
        (void)fflush(file);
    }
    _exit(0);
}

/* Any table, killed at any time, with a loader or without, at other workers: the same lines. */
static void goes_on(int points) {
    static char text[SPDL_STATE_BYTES], line[300];
    FILE *file = tmpfile();
    int kills = 0;
    for (int k = 0; k < points; ++k) {
        table_of = (int)throw_dice(4000);
        uint64_t whole_us = 1;
        for (int run = 0, at = 0; run < 60 && (run == 0 || at < line_count); ++run) {
            const uint64_t start = spdl_time_ns();
            int status = 0;
            pid_t child;
            rewind(file);
            if (ftruncate(fileno(file), 0) != 0) return;
            if (run == 0) text[0] = '\0';
            child = fork();
            trainer = child == 0 ? getpid() : trainer;
            if (child == 0)
                take_lines(text, run < 2 ? 0 : at, run == 0 ? LINES : at + (int)throw_dice(60),
                           run > 0 && throw_dice(2), (int)throw_dice(4), file);
            if (run > 0) usleep((useconds_t)throw_dice(whole_us));
            if (run > 0) kill(child, SIGKILL);
            HOLDS(waitpid(child, &status, 0) == child);
            if (run == 0) whole_us = 1 + (spdl_time_ns() - start) / 1000;
            kills += WIFSIGNALED(status);
            HOLDS(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
            rewind(file);
            if (run == 1) at = 0;
            for (; fgets(line, sizeof line, file) != NULL && strchr(line, '\n') != NULL; ++at) {
                char after[SPDL_STATE_BYTES];
                if (fgets(after, sizeof after, file) == NULL || strchr(after, '\n') == NULL) break;
                after[strcspn(after, "\n")] = '\0';
                if (run == 0) strcpy(whole[at], line);
                else HOLDS(strcmp(whole[at], line) == 0);
                if (run > 0) strcpy(text, after);
            }
            if (run == 0) line_count = at, at = 0;
            for (int i = 0; i < 300 && waitpid(-1, NULL, WNOHANG) >= 0; ++i) usleep(1000);
        }
    }
    fclose(file);
    HOLDS(kills > points / 2);
    tell("killed runs go on, with a loader and without", points);
}

int main(int argc, char **argv) {
    const int points = argc > 1 ? atoi(argv[1]) : 1000;
    dice = argc > 2 ? strtoull(argv[2], NULL, 10) : (spdl_time_ns() | 1);
    SAY("seed %llu\n", (unsigned long long)dice);
    trainer = getpid();
    shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) return 1;
    shared->countdown = -1;
    HOLDS(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0);
    ends_in_a_call(CRASH, "segmentation faults", points);
    ends_in_a_call(ABORT, "aborts", points);
    ends_in_a_call(EXIT_17, "exits with 17", points);
    ends_in_a_call(EXIT_0, "exits with 0", points);
    is_killed(points);
    is_started_again(points);
    is_stopped(points);
    loses_its_trainer(points);
    loses_its_supervisor(points);
    is_scribbled_over(points);
    goes_on(points);
    SAY("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
