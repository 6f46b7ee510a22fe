/* bench_loader.c - the loader process, against a futex and against the loaders of Python.

       make bench-loader ARGS="[--json] [--quick] [--list] [TEXT]"

   Items are bytes that loader_work.h makes: the same code in every process of every side, at memory
   speed (fill) or at that of a JPEG decoder (decode). Whoever takes them looks at the first and the
   last word. A side of Python runs in processes that stay, stopped while we run; what may be ready
   is taken before its clock starts, and before ours.

   handoff_SIZE      batches that were made ahead, one slot: the trainer gives it back, the child
                     hands the next one over. Half of a round, against the best of three ping-pongs
                     by futex between two processes: sleeping at once (which is told), after a
                     spin of 2 us, and after one of 50 us; of batches that nobody writes or reads.
                     handoff alone is of 8 MiB; crowd_*: beside a busy loop on each processor
   ready_next        next when the batch is there already, ready_done the done after it, which
                     wakes a child that had no slot left; each time after 0.5 ms of computing
   trainer_ms_per_gib  CPU of the trainer's process for batches of 8 MiB that are filled
   open_ms           from the call of open to the first batch of 64 KiB
   vs_mp_queue       filled batches of 8 MiB, made by one thread, against a multiprocessing.Queue of
                     NumPy arrays; _64k: of 64 KiB; _made: 8 MiB that are there already, which we
                     copy into the slot
   vs_spdl_arena     the same of 32 MiB against SPDL's iterate_in_subprocess with an arena, the
                     better of its two kinds; _made: as above
   vs_torch, vs_grain  batches of 32 images of 147 KiB that are decoded, one worker for each
                     processor, against PyTorch's DataLoader and Grain's mp_prefetch with as many
                     processes; _fill: images that are filled
   kill_report_ms    a child is killed at a random moment: from there to the failure that next
                     returns. _segv, _exit0: what a stage does to its process. Each is the median of
                     20; the longest of all is told */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define SPDL_IMPLEMENTATION
#include "../spdl.h"

#include "bench.h"
#include "loader_work.h"
#include "peer_python.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))
#define ROUNDS 7
#define READY 4 /* batches that may wait, as of the peers */
#define MIB ((size_t)1 << 20)
#define IMAGE ((size_t)224 * 224 * 3)

/* What the stages do. */
typedef struct shape {
    size_t bytes; /* of an item */
    int rounds;   /* of loader_work; 0: a copy of `made`; -1: nothing */
    int batch;    /* 0: items are batches */
    int workers;
    int slots;
    void *made;
    int64_t bad; /* this item does `harm`; -1: none */
    int harm;    /* SIGKILL, SIGSEGV; 0: exit(0) */
    uint64_t *when;
} shape;

static int cores(void) {
    cpu_set_t may;
    const int n = sched_getaffinity(0, sizeof may, &may) != 0 ? bench_cores() : CPU_COUNT(&may);
    return n < 2 ? 2 : n > 64 ? 64 : n;
}

static void *shared_page(void) {
    void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    BENCH_CHECK(page != MAP_FAILED);
    return page;
}

/* ---- ours ---- */

SPDL_FN(number, void, void) {
    (void)in, (void)out, (void)task;
    return SPDL_OK;
}

static void do_harm(const shape *is) {
    __atomic_store_n(is->when, bench_ns(), __ATOMIC_RELEASE);
    if (is->harm == 0) exit(0);
    raise(is->harm);
}

SPDL_FN(make, void, void) {
    const shape *is = (const shape *)spdl_ctx(task);
    const uint64_t number = spdl_sequence(task);
    if ((*out = spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    if ((int64_t)number == is->bad) do_harm(is);
    if (is->rounds > 0) loader_work(*out, is->bytes, number, is->rounds);
    if (is->rounds == 0) memcpy(*out, is->made, is->bytes);
    return SPDL_OK;
}

/* Failures that are wanted are no news. */
static void say_nothing(spdl_log_level level, const char *text, void *user) {
    (void)level, (void)text, (void)user;
}

/* The ctx of its stage stays until the next one is opened. */
static spdl_loader *ours_open(const shape *the_shape) {
    static shape copy;
    shape *is = &copy;
    spdl_stage items[] = { SPDL_SOURCE(number), SPDL_PIPE(make), SPDL_SINK(2) };
    spdl_stage batches[] = { SPDL_SOURCE(number), SPDL_PIPE(make), SPDL_BATCH(1), SPDL_SINK(2) };
    spdl_stage *rows = the_shape->batch > 0 ? batches : items;
    spdl_loader_desc desc;
    spdl_loader *l;
    spdl_error error;
    *is = *the_shape;
    memset(&desc, 0, sizeof desc);
    desc.pipeline.workers = is->workers;
    desc.slot_count = is->slots > 0 ? is->slots : READY;
    desc.error = &error;
    if (is->when != NULL) desc.logger.log_fn = say_nothing;
    rows[1].ctx = is;
    rows[1].concurrency = is->workers;
    if (is->batch > 0) batches[2].size = is->batch;
    rows[is->batch > 0 ? 2 : 1].item_bytes = is->bytes;
    if (spdl_loader_open(&l, &desc, rows, is->batch > 0 ? 4 : 3) != SPDL_OK) {
        bench_fail("%s", error.text);
    }
    return l;
}

static void ours_take(spdl_loader *l, const shape *is, uint64_t count) {
    const uint64_t step = is->batch > 0 ? (uint64_t)is->batch : 1;
    spdl_loader_batch b;
    uint64_t i;
    memset(&b, 0, sizeof b);
    for (i = 0; i < count; ++i) {
        const char *last;
        if (spdl_loader_next(l, &b, SPDL_FOREVER) != SPDL_OK) {
            bench_fail("%s", spdl_loader_error(l)->text);
        }
        last = (const char *)b.data + (step - 1) * is->bytes;
        BENCH_CHECK(b.bytes == step * is->bytes);
        if (is->rounds > 0) {
            BENCH_CHECK(loader_work_is(last, is->bytes, (b.sequence + 1) * step - 1));
        }
        BENCH_CHECK(spdl_loader_done(l, &b) == SPDL_OK);
    }
}

/* Nanoseconds per batch; in *cpu_ns those of this process, may be NULL. */
static double ours_ns(const shape *is, uint64_t count, double *cpu_ns) {
    spdl_loader *l = ours_open(is);
    uint64_t start;
    double ns, cpu;
    ours_take(l, is, 2 * READY);
    cpu = bench_cpu_ns();
    start = bench_ns();
    ours_take(l, is, count);
    ns = (double)(bench_ns() - start) / (double)count;
    if (cpu_ns != NULL) *cpu_ns = (bench_cpu_ns() - cpu) / (double)count;
    spdl_loader_close(l);
    return ns;
}

/* ---- the best ping-pong ---- */

typedef struct pingpong {
    uint32_t to;
    char pad[124];
    uint32_t from;
} pingpong;

static void futex_set(uint32_t *word, uint32_t value) {
    if (__atomic_exchange_n(word, value, __ATOMIC_SEQ_CST) >> 31) {
        syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
    }
}

/* The top bit says that somebody sleeps. */
static void futex_await(uint32_t *word, uint32_t value, uint64_t spin_ns) {
    const uint64_t until = bench_ns() + spin_ns;
    uint32_t now;
    while ((now = __atomic_load_n(word, __ATOMIC_ACQUIRE)) != value) {
        if (spin_ns > 0 && bench_ns() < until) {
            bench_pause();
            continue;
        }
        if (now >> 31 == 0 && !__atomic_compare_exchange_n(word, &now, now | 1u << 31, false,
                                                           __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            continue;
        syscall(SYS_futex, word, FUTEX_WAIT, now | 1u << 31, NULL, NULL, 0);
    }
}

/* Half of a round, in ns. */
static double pingpong_ns(uint64_t spin_ns, uint32_t times) {
    pingpong *p = (pingpong *)shared_page();
    uint64_t start;
    uint32_t i;
    const pid_t child = fork();
    BENCH_CHECK(child >= 0);
    for (i = 1; child == 0 && i <= times; ++i) {
        futex_await(&p->to, i, spin_ns);
        futex_set(&p->from, i);
    }
    if (child == 0) _exit(0);
    start = bench_ns();
    for (i = 1; i <= times; ++i) {
        futex_set(&p->to, i);
        futex_await(&p->from, i, spin_ns);
    }
    start = bench_ns() - start;
    BENCH_CHECK(waitpid(child, NULL, 0) == child);
    munmap(p, 4096);
    return (double)start / 2 / times;
}

/* In *asleep the one that sleeps at once. */
static double pingpong_best_ns(double *asleep) {
    static const uint64_t spins[] = { 0, 2000, 50000 };
    double best = 0;
    int i;
    for (i = 0; i < COUNT(spins); ++i) {
        const double ns = pingpong_ns(spins[i], bench_opt.quick ? 1000 : 4000);
        if (i == 0) *asleep = ns;
        if (i == 0 || ns < best) best = ns;
    }
    return best;
}

/* ---- handing over ---- */

static double handoff_ns(const shape *is) {
    const uint64_t times = bench_opt.quick ? 1000 : 4000;
    return ours_ns(is, times, NULL) / 2;
}

/* The sizes take turns with the ping-pong, so that all have the same machine. */
#define HANDOFFS 4

static void rows_handoff(const char *const *names, const size_t *bytes, int count) {
    static double ours[HANDOFFS][BENCH_MAX_ROUNDS];
    double peer[BENCH_MAX_ROUNDS], asleep[BENCH_MAX_ROUNDS];
    bool wanted[HANDOFFS], any = false;
    char told[64], json[64];
    const bench_note note = { told, NULL, json };
    const int rounds = bench_rounds(9);
    int round, i;
    for (i = 0; i < count; ++i) any |= wanted[i] = bench_wanted(names[i]);
    for (round = 0; any && round < rounds; ++round) {
        bench_now_with("ping-pong");
        if (round % 2 == 0) peer[round] = pingpong_best_ns(&asleep[round]);
        for (i = 0; i < count; ++i) {
            const shape is = { bytes[i], -1, 0, 1, 1, NULL, -1, 0, NULL };
            bench_now_with(names[i]);
            if (wanted[i]) ours[i][round] = handoff_ns(&is);
        }
        if (round % 2 == 1) peer[round] = pingpong_best_ns(&asleep[round]);
    }
    if (any) {
        snprintf(told, sizeof told, "sleeping %.0f ns", bench_median(asleep, rounds));
        snprintf(json, sizeof json, ",\"peer_asleep\":%.6g", bench_median(asleep, rounds));
    }
    for (i = 0; i < count; ++i) {
        const bench_row row = { names[i], "ns", "futex ping-pong", false, 0, false, 1 / 1.1 };
        const bench_sides sides = { ours[i], peer, rounds, 1 };
        if (wanted[i]) bench_print_sides(&row, &sides, &note);
    }
}

static void rows_handoffs(void) {
    static const char *const calm[] = { "handoff_64b", "handoff_64k", "handoff", "handoff_64m" };
    static const char *const crowded[] = { "crowd_handoff_64b" };
    static const size_t bytes[] = { 64, 64 << 10, 8 << 20, 64 << 20 };
    bench_crowd crowd;
    rows_handoff(calm, bytes, HANDOFFS);
    bench_crowd_come(&crowd, crowded[0]);
    rows_handoff(crowded, bytes, 1);
    bench_crowd_go(&crowd);
}

static uint64_t clock_ns(void) {
    const uint64_t start = bench_ns();
    int i;
    for (i = 0; i < 1000; ++i) bench_ns();
    return (bench_ns() - start) / 1001;
}

/* Of next, in [0], and of done, in [1], each time after some computing; reading the clock is
   taken off. */
static void ready_ns(const shape *is, double *median) {
    enum { TIMES = 200 };
    const uint64_t clock = clock_ns();
    double took[2][TIMES];
    spdl_loader *l = ours_open(is);
    spdl_loader_batch b;
    int i;
    memset(&b, 0, sizeof b);
    ours_take(l, is, READY);
    for (i = 0; i < TIMES; ++i) {
        const uint64_t until = bench_ns() + 500000;
        uint64_t start, between, end;
        while ((start = bench_ns()) < until) {
        }
        BENCH_CHECK(spdl_loader_next(l, &b, SPDL_FOREVER) == SPDL_OK);
        between = bench_ns();
        BENCH_CHECK(spdl_loader_done(l, &b) == SPDL_OK);
        end = bench_ns();
        took[0][i] = (double)(between - start) - (double)clock;
        took[1][i] = (double)(end - between) - (double)clock;
    }
    spdl_loader_close(l);
    for (i = 0; i < 2; ++i) median[i] = bench_quantile(took[i], TIMES, 0.5);
}

static void rows_ready(void) {
    static const char *const names[] = { "ready_next", "ready_done" };
    const shape is = { 64, -1, 0, 1, 8, NULL, -1, 0, NULL };
    const int rounds = bench_rounds(ROUNDS);
    double value[2][BENCH_MAX_ROUNDS], median[2];
    bool wanted[2], any = false;
    int i, k;
    for (k = 0; k < 2; ++k) any |= wanted[k] = bench_wanted(names[k]);
    for (i = 0; any && i < rounds; ++i) {
        ready_ns(&is, median);
        for (k = 0; k < 2; ++k) value[k][i] = median[k];
    }
    for (k = 0; k < 2; ++k) {
        const bench_row row = { names[k], "ns", NULL, false, 0, false, 0 };
        const bench_sides sides = { value[k], NULL, rounds, 1 };
        if (wanted[k]) bench_print_sides(&row, &sides, NULL);
    }
}

static double gib_ms(const void *arg) {
    const shape *is = (const shape *)arg;
    const double batches = (double)((size_t)1 << 30) / (double)is->bytes;
    double cpu;
    ours_ns(is, (uint64_t)(bench_opt.quick ? batches : 2 * batches), &cpu);
    return cpu * batches / 1e6;
}

static double open_ms(const void *arg) {
    double took[9];
    int i;
    for (i = 0; i < COUNT(took); ++i) {
        const uint64_t start = bench_ns();
        spdl_loader *l = ours_open((const shape *)arg);
        ours_take(l, (const shape *)arg, 1);
        took[i] = (double)(bench_ns() - start) / 1e6;
        spdl_loader_close(l);
    }
    return bench_quantile(took, COUNT(took), 0.5);
}

static void rows_alone(void) {
    const bench_row cpu = { "trainer_ms_per_gib", "ms", NULL, false, 1, false, 0 };
    const bench_row start = { "open_ms", "ms", NULL, false, 0, false, 0 };
    const shape large = { 8 * MIB, 1, 0, 1, 0, NULL, -1, 0, NULL };
    const shape small = { MIB / 16, 1, 0, 1, 0, NULL, -1, 0, NULL };
    if (bench_wanted(cpu.name)) bench_compare_sides(&cpu, ROUNDS, gib_ms, &large, NULL, NULL);
    if (bench_wanted(start.name)) bench_compare_sides(&start, ROUNDS, open_ms, &small, NULL, NULL);
}

/* ---- Python ---- */

static peer_python python;
static pid_t python_group; /* of its processes */

/* While we run they do not: Grain's compute when nobody takes anything. */
static void python_runs(bool runs) {
    if (python_group > 0) BENCH_CHECK(kill(-python_group, runs ? SIGCONT : SIGSTOP) == 0);
}

/* The best of the operations in `names`, which blanks separate: batches a second. */
static double python_rate(const char *names, const shape *is, int count) {
    char what[64], list[64], *name;
    double best = 0;
    snprintf(what, sizeof what, "%zu:%d:%d", is->bytes, is->rounds, is->batch);
    snprintf(list, sizeof list, "%s", names);
    python_runs(true);
    for (name = strtok(list, " "); name != NULL; name = strtok(NULL, " ")) {
        double ns;
        bench_now_with(name);
        ns = peer_python_ns(&python, name, count, what);
        if (ns > 0 && 1e9 / ns > best) best = 1e9 / ns;
    }
    python_runs(false);
    return best;
}

typedef struct python_case {
    bench_row row;
    const char *package, *operations;
    shape is;
    int count, ours_count; /* batches of a round */
} python_case;

static void python_start(void) {
    const char *program = getenv("BENCH_LOADER_PYTHON");
    const bool set = program != NULL && program[0] != '\0';
    if (python.from != NULL) return;
    peer_python_begin(&python, set ? program : "python3", "bench/loader_peers.py");
    if (python.versions[0] != '\0') {
        python_group = (pid_t)peer_python_ns(&python, "group", 0, "-");
    }
}

/* MiB a second. Without the peer ours alone. */
static void row_python(python_case c) {
    const size_t batch = c.is.bytes * (size_t)(c.is.batch > 0 ? c.is.batch : 1);
    const double mib = (double)batch / (double)MIB;
    double ours[BENCH_MAX_ROUNDS], peer[BENCH_MAX_ROUNDS];
    bench_sides sides = { ours, peer, bench_rounds(ROUNDS), 1 };
    const int less = bench_opt.quick ? 3 : 1;
    bool there;
    int i;
    if (!bench_wanted(c.row.name)) return;
    python_start();
    there = strstr(python.versions, c.package) != NULL;
    if (!there) fprintf(stderr, "%s: %s is not installed\n", c.row.name, c.package);
    if (!there) c.row.peer_name = NULL;
    if (!there) c.row.goal_ratio = 0;
    if (strchr(c.operations, ' ') != NULL) sides.peers = 2;
    if (c.is.rounds == 0) BENCH_CHECK((c.is.made = malloc(c.is.bytes)) != NULL);
    if (c.is.rounds == 0) memset(c.is.made, 1, c.is.bytes);
    for (i = 0; i < sides.rounds; ++i) {
        if (there && i % 2 == 1) peer[i] = mib * python_rate(c.operations, &c.is, c.count / less);
        bench_now_with("ours");
        ours[i] = mib * 1e9 / ours_ns(&c.is, (uint64_t)(c.ours_count / less), NULL);
        if (there && i % 2 == 0) peer[i] = mib * python_rate(c.operations, &c.is, c.count / less);
    }
    python_runs(true);
    if (there) peer_python_ns(&python, "stop", 0, "-");
    free(c.is.made);
    bench_print_sides(&c.row, &sides, NULL);
}

static void rows_python(void) {
    const int n = cores();
    const char *const queue = "mp.Queue", *const arena = "SPDL arena";
    const char *const torch = "torch DataLoader", *const grain = "Grain mp_prefetch";
    const char *const kinds = "spdl_pool spdl_ring";
#define SHAPE(bytes, rounds, batch, workers)                                                       \
    { bytes, rounds, batch, workers, 0, NULL, -1, 0, NULL }
    const python_case cases[] = {
        { { "vs_mp_queue", "MiB/s", queue, true, 0, false, 20 }, "numpy", "mp_queue",
          SHAPE(8 * MIB, 1, 0, 1), 30, 150 },
        { { "vs_mp_queue_64k", "MiB/s", queue, true, 0, false, 0 }, "numpy", "mp_queue",
          SHAPE(MIB / 16, 1, 0, 1), 2000, 20000 },
        { { "vs_mp_queue_made", "MiB/s", queue, true, 0, false, 0 }, "numpy", "mp_queue",
          SHAPE(8 * MIB, 0, 0, 1), 30, 150 },
        { { "vs_spdl_arena", "MiB/s", arena, true, 0, false, 1.5 }, "spdl", kinds,
          SHAPE(32 * MIB, 1, 0, 1), 18, 60 },
        { { "vs_spdl_arena_made", "MiB/s", arena, true, 0, false, 0 }, "spdl", kinds,
          SHAPE(32 * MIB, 0, 0, 1), 18, 60 },
        { { "vs_torch", "MiB/s", torch, true, 0, false, 1 }, "torch", "torch",
          SHAPE(IMAGE, LOADER_DECODE, 32, n), 30, 45 },
        { { "vs_torch_fill", "MiB/s", torch, true, 0, false, 0 }, "torch", "torch",
          SHAPE(IMAGE, 1, 32, n), 90, 450 },
        { { "vs_grain", "MiB/s", grain, true, 0, false, 1 }, "grain", "grain",
          SHAPE(IMAGE, LOADER_DECODE, 32, n), 30, 45 },
        { { "vs_grain_fill", "MiB/s", grain, true, 0, false, 0 }, "grain", "grain",
          SHAPE(IMAGE, 1, 32, n), 45, 450 },
    };
    int i;
    for (i = 0; i < COUNT(cases); ++i) row_python(cases[i]);
}

/* ---- failures ---- */

typedef struct killer {
    int64_t pid;
    uint64_t after_ns;
    uint64_t *when;
} killer;

static void *kill_later(void *arg) {
    const killer *k = (const killer *)arg;
    bench_sleep_until(bench_ns() + k->after_ns);
    __atomic_store_n(k->when, bench_ns(), __ATOMIC_RELEASE);
    BENCH_CHECK(kill((pid_t)k->pid, SIGKILL) == 0);
    return NULL;
}

/* Batches until the failure; all that come before it are in order. */
static double report_ms(const shape *is, uint32_t chance) {
    spdl_loader *l = ours_open(is);
    spdl_loader_status status;
    spdl_loader_batch b;
    pthread_t thread;
    spdl_result result;
    uint64_t taken = 0;
    double ms;
    killer k;
    memset(&b, 0, sizeof b);
    ours_take(l, is, taken = 2);
    while (spdl_loader_get_status(l, &status), status.pid == 0) usleep(20);
    k.pid = status.pid;
    k.after_ns = chance % 4000000;
    k.when = is->when;
    if (is->bad < 0) BENCH_CHECK(pthread_create(&thread, NULL, kill_later, &k) == 0);
    while ((result = spdl_loader_next(l, &b, SPDL_FOREVER)) == SPDL_OK) {
        BENCH_CHECK(b.sequence == taken++ && loader_work_is(b.data, is->bytes, b.sequence));
        BENCH_CHECK(spdl_loader_done(l, &b) == SPDL_OK);
    }
    ms = (double)(bench_ns() - __atomic_load_n(is->when, __ATOMIC_ACQUIRE)) / 1e6;
    if (is->bad < 0) pthread_join(thread, NULL);
    if (result != SPDL_E_PROCESS) bench_fail("result %d: %s", result, spdl_loader_error(l)->text);
    spdl_loader_close(l);
    return ms;
}

static void row_report(const char *name, int harm) {
    enum { TIMES = 20 };
    const bench_row row = { name, "ms", NULL, false, 5, false, 0 };
    shape is = { 65536, 4, 0, 1, 0, NULL, -1, harm, NULL };
    double ms[BENCH_MAX_ROUNDS], each[TIMES], most = 0;
    const bench_sides sides = { ms, NULL, bench_rounds(ROUNDS), 1 };
    uint32_t chance = 12345;
    char told[64], json[64];
    const bench_note note = { told, NULL, json };
    int round, i;
    if (!bench_wanted(name)) return;
    is.when = (uint64_t *)shared_page();
    for (round = 0; round < sides.rounds; ++round) {
        for (i = 0; i < TIMES; ++i) {
            chance = chance * 1664525u + 1013904223u;
            is.bad = harm == SIGKILL ? -1 : 3 + (int64_t)(chance >> 8) % 200;
            each[i] = report_ms(&is, chance >> 4);
            if (each[i] > most) most = each[i];
        }
        ms[round] = bench_quantile(each, TIMES, 0.5);
    }
    munmap(is.when, 4096);
    snprintf(told, sizeof told, "longest %.1f", most);
    snprintf(json, sizeof json, ",\"longest\":%.4g", most);
    bench_print_sides(&row, &sides, &note);
}

int main(int argc, char **argv) {
    bench_start("loader", argc, argv);
    rows_handoffs();
    rows_ready();
    rows_alone();
    row_report("kill_report_ms", SIGKILL);
    row_report("kill_report_segv_ms", SIGSEGV);
    row_report("kill_report_exit0_ms", 0);
    rows_python();
    return 0;
}
