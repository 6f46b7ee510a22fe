/* bench.h - what the benchmarks share: clock, options, medians, interleaved rounds, rows.

   A row compares us with a peer from the same run. Each round runs both, in turns who goes first;
   what is printed is the median of each side over the rounds, and a ratio that says how many times
   better we are, whichever way the unit runs: the median of the rounds' ratios. Beside it stands
   what the true ratio lies between, with 95 % (a sign test; if the peer is the best of several, for
   all of them at once): 0.97 to 1.02 is no difference. With fewer than 6 rounds nothing can be
   said. In a row without a peer it is about our value. Every run checks the number and the order
   of its items; a wrong one ends the program with status 1. A missed goal does not: machines
   differ. "others had 12 %" is the share of the processors that other programs had during the row,
   as far as it is 2 % or more: a row of a machine that is not calm says so.

   Options of every benchmark:
       --json     one JSON object per line (the line about the machine goes to stderr)
       --quick    about a third of the time
       --all      every peer of a row, where there are several
       --list     the names of the rows
       TEXT       only the rows with TEXT in their name */
#ifndef BENCH_H_INCLUDED
#define BENCH_H_INCLUDED

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* The Makefile passes what it compiled with; alone, only this much is known. */
#ifndef BENCH_FLAGS
#ifdef __OPTIMIZE__
#define BENCH_FLAGS "optimised, flags not told"
#else
#define BENCH_FLAGS "NOT OPTIMISED"
#endif
#endif

#define BENCH_MAX_ROUNDS 64
#define BENCH_HANG_SECONDS 60

typedef struct bench_options {
    const char *bench; /* the first field of a JSON row */
    const char *filter;
    bool json;
    bool quick;
    bool all;
    bool list;
} bench_options;

/* One line of output. Zero goals are not there. */
typedef struct bench_row {
    const char *name;
    const char *unit;
    const char *peer_name; /* NULL: no peer */
    bool more_is_better;
    double goal;       /* at most this much, or at least when more is better */
    bool goal_is_zero; /* nothing at all */
    double goal_ratio; /* at least this much better than the peer */
} bench_row;

/* What some rows add; a NULL is not there. */
typedef struct bench_note {
    const char *text; /* a column of the table, before the goal */
    const char *more; /* further lines of the table, each with its newline */
    const char *json; /* further members of the object, each with a comma before it */
} bench_note;

/* One row's rounds. */
typedef struct bench_sides {
    const double *ours, *peer; /* a value for each round; peer is NULL when row->peer_name is */
    int rounds;
    int peers; /* the peer is the best of so many; 0: of one */
} bench_sides;

/* One measurement of one side; `arg` describes the case. */
typedef double (*bench_side_fn)(const void *arg);

/* A moment, for the share of the processors that other programs had since then. */
typedef struct bench_moment {
    uint64_t ns;
    double busy_ns; /* of the processors this process may use, by anybody, and stolen by the host */
    double own_ns;  /* of this process and its children that have ended */
} bench_moment;

static bench_options bench_opt;
static bench_moment bench_row_begun;
static char bench_now_running[64];
static char bench_now_beside[64];

/* ---- clock and load ---- */

static inline uint64_t bench_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline void bench_sleep_until(uint64_t ns) {
    struct timespec t;
    t.tv_sec = (time_t)(ns / 1000000000u);
    t.tv_nsec = (long)(ns % 1000000000u);
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) != 0) {
    }
}

static inline void bench_sleep_ms(int ms) {
    bench_sleep_until(bench_ns() + (uint64_t)ms * 1000000u);
}

static inline double bench_timeval_ns(struct timeval t) {
    return (double)t.tv_sec * 1e9 + (double)t.tv_usec * 1e3;
}

/* CPU time of the whole process so far. */
static inline double bench_cpu_ns(void) {
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    return bench_timeval_ns(use.ru_utime) + bench_timeval_ns(use.ru_stime);
}

/* CPU time the process uses per second while the caller sleeps: 1.0 is one core. */
static inline double bench_idle_cores(void) {
    const double cpu = bench_cpu_ns();
    const uint64_t start = bench_ns();
    bench_sleep_ms(bench_opt.quick ? 300 : 1000);
    return (bench_cpu_ns() - cpu) / (double)(bench_ns() - start);
}

static inline int bench_cores(void) {
    const long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : (int)n;
}

/* ---- other programs ---- */

static inline double bench_own_ns(void) {
    struct rusage ended;
    getrusage(RUSAGE_CHILDREN, &ended);
    return bench_cpu_ns() + bench_timeval_ns(ended.ru_utime) + bench_timeval_ns(ended.ru_stime);
}

/* The processors this process may use; returns how many. */
static inline int bench_allowed(cpu_set_t *may) {
    int i;
    if (sched_getaffinity(0, sizeof *may, may) == 0) return CPU_COUNT(may);
    CPU_ZERO(may);
    for (i = 0; i < bench_cores(); ++i) CPU_SET((size_t)i, may);
    return bench_cores();
}

static inline bench_moment bench_moment_now(void) {
    bench_moment now = { bench_ns(), 0, bench_own_ns() };
    FILE *file = fopen("/proc/stat", "r");
    unsigned long long user, nice, sys, idle, wait, irq, soft, stolen;
    cpu_set_t may;
    char line[256];
    unsigned cpu;
    bench_allowed(&may);
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (sscanf(line, "cpu%u %llu %llu %llu %llu %llu %llu %llu %llu", &cpu, &user, &nice, &sys,
                   &idle, &wait, &irq, &soft, &stolen) != 9 ||
            cpu >= CPU_SETSIZE || !CPU_ISSET(cpu, &may)) {
            continue;
        }
        now.busy_ns += (double)(user + nice + sys + irq + soft + stolen) * 1e9 /
                       (double)sysconf(_SC_CLK_TCK);
    }
    if (file != NULL) fclose(file);
    return now;
}

/* The share of the processors that other programs have had since then: the witness of a row. */
static inline double bench_others(const bench_moment *since) {
    const bench_moment now = bench_moment_now();
    cpu_set_t may;
    const double all = (double)(now.ns - since->ns) * bench_allowed(&may);
    const double others = (now.busy_ns - since->busy_ns) - (now.own_ns - since->own_ns);
    return others > 0 && all > 0 ? others / all : 0;
}

/* A crowd: one program on each processor this process may use, which never rests. */
#define BENCH_MAX_CROWD 64

typedef struct bench_crowd {
    pid_t pid[BENCH_MAX_CROWD];
    int count;
} bench_crowd;

static inline void bench_pin(int cpu);

static inline bool bench_matches(const char *name) {
    return bench_opt.filter == NULL || strstr(name, bench_opt.filter) != NULL;
}

/* If this row is wanted. The crowd is part of what "others had" in it. */
static inline void bench_crowd_come(bench_crowd *crowd, const char *row) {
    cpu_set_t may;
    const int count = bench_matches(row) && !bench_opt.list ? bench_allowed(&may) : 0;
    const pid_t parent = getpid();
    for (crowd->count = 0; crowd->count < count && crowd->count < BENCH_MAX_CROWD; ++crowd->count) {
        const pid_t child = fork();
        if (child == 0) {
            bench_pin(crowd->count);
            while (getppid() == parent) {
                const uint64_t until = bench_ns() + 1000000;
                while (bench_ns() < until) {
                }
            }
            _exit(0);
        }
        crowd->pid[crowd->count] = child;
    }
}

static inline void bench_crowd_go(bench_crowd *crowd) {
    while (crowd->count > 0) {
        const pid_t child = crowd->pid[--crowd->count];
        if (child <= 0) continue;
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
    }
}

/* Ties the calling thread to a CPU, where that can be done: 0 is the first this process may use,
   and with fewer CPUs than asked for nothing is done. */
static inline void bench_pin(int cpu) {
#ifdef CPU_SETSIZE
    cpu_set_t allowed;
    cpu_set_t one;
    size_t i;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) <= cpu) return;
    for (i = 0; i < CPU_SETSIZE; ++i) {
        if (!CPU_ISSET(i, &allowed) || cpu-- > 0) continue;
        CPU_ZERO(&one);
        CPU_SET(i, &one);
        pthread_setaffinity_np(pthread_self(), sizeof one, &one);
        return;
    }
#else
    (void)cpu;
#endif
}

static inline void bench_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");
#else
    __asm__ __volatile__("" ::: "memory");
#endif
}

/* ---- failing ---- */

static inline void bench_fail(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "bench: row %s: ", bench_now_running);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    exit(1);
}

#define BENCH_CHECK(what)                                                                          \
    do {                                                                                           \
        if (!(what)) bench_fail("%s:%d: %s", __FILE__, __LINE__, #what);                           \
    } while (0)

/* A hang names its row instead of holding up whoever waits for the table. */
static inline void bench_on_alarm(int signal_number) {
    static const char text[] = "bench: no end in sight in row ";
    ssize_t told = write(2, text, sizeof text - 1);
    told += write(2, bench_now_running, strlen(bench_now_running));
    told += write(2, ", ", bench_now_beside[0] != '\0' ? 2 : 0);
    told += write(2, bench_now_beside, strlen(bench_now_beside));
    told += write(2, "\n", 1);
    _exit(told > 0 ? signal_number : 1);
}

/* ---- numbers ---- */

static inline int bench_compare(const void *a, const void *b) {
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts the values. */
static inline double bench_quantile(double *values, size_t count, double q) {
    qsort(values, count, sizeof *values, bench_compare);
    return values[(size_t)(q * (double)(count - 1) + 0.5)];
}

static inline double bench_ratio(const bench_row *row, double ours, double peer) {
    const double least = 1e-3; /* an idle process can measure as exactly nothing */
    if (ours < least) ours = least;
    if (peer < least) peer = least;
    return row->more_is_better ? ours / peer : peer / ours;
}

/* Enough digits to compare, few enough to read. */
static inline const char *bench_number(char *buffer, size_t bytes, double value) {
    const int decimals = value >= 1000 ? 0 : value >= 100 ? 1 : value >= 1 ? 2 : 4;
    snprintf(buffer, bytes, "%.*f", decimals, value);
    return buffer;
}

/* ---- rows ---- */

#ifdef SPDL_IMPLEMENTATION_INCLUDED /* peers that are built alone print nothing */

static inline void bench_goal_text(const bench_row *row, char *buffer, size_t bytes) {
    const char *sign = row->more_is_better ? ">=" : "<=";
    buffer[0] = '\0';
    if (row->goal_is_zero) {
        snprintf(buffer, bytes, "0 %s", row->unit);
    } else if (row->goal > 0 && row->goal_ratio > 0) {
        snprintf(buffer, bytes, "%s %g %s, ratio >= %g", sign, row->goal, row->unit,
                 row->goal_ratio);
    } else if (row->goal > 0) {
        snprintf(buffer, bytes, "%s %g %s", sign, row->goal, row->unit);
    } else if (row->goal_ratio > 0) {
        snprintf(buffer, bytes, "ratio >= %g", row->goal_ratio);
    }
}

static inline bool bench_goal_met(const bench_row *row, double ours, double ratio) {
    if (row->goal_is_zero && ours > 0) return false;
    if (row->goal > 0 && (row->more_is_better ? ours < row->goal : ours > row->goal)) return false;
    return row->goal_ratio <= 0 || ratio >= row->goal_ratio;
}

static inline void bench_print_json(const bench_row *row, double ours, double peer,
                                    const spdl_interval *is, const char *goal,
                                    const bench_note *note) {
    const char *what = row->peer_name != NULL ? "ratio" : "ours";
    printf("{\"bench\":\"%s\",\"case\":\"%s\",\"ours\":%.6g,\"unit\":\"%s\"", bench_opt.bench,
           row->name, ours, row->unit);
    if (row->peer_name != NULL) {
        printf(",\"peer\":%.6g,\"peer_name\":\"%s\",\"ratio\":%.4g", peer, row->peer_name,
               is->value);
    }
    if (is->known) printf(",\"%s_low\":%.4g,\"%s_high\":%.4g", what, is->low, what, is->high);
    if (is->rounds > 0) printf(",\"rounds\":%d", is->rounds);
    if (goal[0] != '\0') printf(",\"goal\":\"%s\"", goal);
    printf(",\"others\":%.3f", bench_others(&bench_row_begun));
    if (note != NULL && note->json != NULL) fputs(note->json, stdout);
    puts("}");
}

static inline void bench_print_table(const bench_row *row, double ours, double peer,
                                     const spdl_interval *is, const char *goal,
                                     const bench_note *note) {
    char a[32];
    char b[32];
    char between[72] = "";
    const double ratio = row->peer_name != NULL ? is->value : 0;
    const double others = bench_others(&bench_row_begun);
    if (is->known && row->peer_name != NULL) {
        snprintf(between, sizeof between, "%.2f to %.2f", is->low, is->high);
    } else if (is->known) {
        snprintf(between, sizeof between, "%s to %s", bench_number(a, sizeof a, is->low),
                 bench_number(b, sizeof b, is->high));
    }
    printf("%-22s %10s %-6s", row->name, bench_number(a, sizeof a, ours), row->unit);
    if (row->peer_name != NULL) {
        printf(" %10s %6.2f  %-14s  %-24s", bench_number(b, sizeof b, peer), ratio, between,
               row->peer_name);
    } else if (goal[0] != '\0' || note != NULL || is->known) {
        printf(" %10s %6s  %-14s  %-24s", "", "", between, "");
    }
    if (note != NULL && note->text != NULL) printf(" %-20s", note->text);
    if (goal[0] != '\0') {
        printf(" %s: %s", goal, bench_goal_met(row, ours, ratio) ? "met" : "MISSED");
    }
    if (others >= 0.02) printf(" (others had %.0f %%)", 100 * others);
    putchar('\n');
    if (note != NULL && note->more != NULL) fputs(note->more, stdout);
}

/* Of the sum over rounds but this one (-1: of all): ours, or how many times better it is. */
static inline double bench_sum(const bench_row *row, const bench_sides *sides, int but) {
    double ours = 0, peer = 0;
    int i, n = 0;
    for (i = 0; i < sides->rounds; ++i) {
        if (i == but) continue;
        ours += sides->ours[i];
        if (row->peer_name != NULL) peer += sides->peer[i];
        ++n;
    }
    return row->peer_name != NULL ? bench_ratio(row, ours, peer) : n > 0 ? ours / n : 0;
}

/* As the measuring core of spdl.h has it: sums, and a jackknife over rounds. NULL: no rounds. */
static inline spdl_interval bench_interval(const bench_row *row, const bench_sides *sides) {
    double without[BENCH_MAX_ROUNDS], half;
    spdl_interval is = { 0, 0, 0, 0, false };
    int i;
    if (sides == NULL) return is;
    is.rounds = sides->rounds;
    is.value = bench_sum(row, sides, -1);
    is.low = is.high = is.value;
    if (sides->rounds < SPDL__ROUNDS_LEAST) return is;
    for (i = 0; i < sides->rounds; ++i) without[i] = bench_sum(row, sides, i);
    half = spdl__jackknife(without, sides->rounds, sides->peers > 0 ? sides->peers : 1);
    is.low -= half;
    is.high += half;
    is.known = true;
    return is;
}

/* `sides` and `note` may be NULL. */
static inline void bench_print_noted(const bench_row *row, double ours, double peer,
                                     const bench_sides *sides, const bench_note *note) {
    spdl_interval is = bench_interval(row, sides);
    char goal[64];
    if (is.rounds == 0 && row->peer_name != NULL) is.value = bench_ratio(row, ours, peer);
    bench_goal_text(row, goal, sizeof goal);
    if (bench_opt.json) {
        bench_print_json(row, ours, peer, &is, goal, note);
    } else {
        bench_print_table(row, ours, peer, &is, goal, note);
    }
    fflush(stdout);
}

static inline void bench_print(const bench_row *row, double ours, double peer) {
    bench_print_noted(row, ours, peer, NULL, NULL);
}

static inline double bench_median(const double *values, int count) {
    double sorted[BENCH_MAX_ROUNDS];
    memcpy(sorted, values, (size_t)count * sizeof *values);
    return bench_quantile(sorted, (size_t)count, 0.5);
}

/* The row of these rounds. */
static inline void bench_print_sides(const bench_row *row, const bench_sides *sides,
                                     const bench_note *note) {
    const double peer = row->peer_name != NULL ? bench_median(sides->peer, sides->rounds) : 0;
    bench_print_noted(row, bench_median(sides->ours, sides->rounds), peer, sides, note);
}

#endif /* SPDL_IMPLEMENTATION_INCLUDED */

/* Whether the row is wanted; arms the alarm for it. */
static inline bool bench_wanted(const char *name) {
    if (!bench_matches(name)) return false;
    if (bench_opt.list) {
        puts(name);
        return false;
    }
    snprintf(bench_now_running, sizeof bench_now_running, "%.63s", name);
    bench_row_begun = bench_moment_now();
    alarm(BENCH_HANG_SECONDS);
    return true;
}

/* The side of the row that runs now, for whoever reads of a hang; the alarm is its own. */
static inline void bench_now_with(const char *side) {
    snprintf(bench_now_beside, sizeof bench_now_beside, "%s", side);
    alarm(BENCH_HANG_SECONDS);
}

static inline int bench_rounds(int rounds) { return bench_opt.quick ? (rounds + 2) / 3 : rounds; }

#ifdef SPDL_IMPLEMENTATION_INCLUDED
/* Runs and prints a row. `peer` is NULL when row->peer_name is. */
static inline void bench_compare_sides(const bench_row *row, int rounds, bench_side_fn ours,
                                       const void *ours_arg, bench_side_fn peer,
                                       const void *peer_arg) {
    double a[BENCH_MAX_ROUNDS] = { 0 };
    double b[BENCH_MAX_ROUNDS] = { 0 };
    const bench_sides sides = { a, b, bench_rounds(rounds), 1 };
    int i;
    for (i = 0; i < sides.rounds; ++i) {
        if (peer != NULL && i % 2 == 1) b[i] = peer(peer_arg);
        a[i] = ours(ours_arg);
        if (peer != NULL && i % 2 == 0) b[i] = peer(peer_arg);
    }
    bench_print_sides(row, &sides, NULL);
}
#endif

/* Elapsed nanoseconds of a run of `items` items. */
typedef double (*bench_run_fn)(const void *arg, uint64_t items);

/* How many items a run needs to take target_ms; grows from a short run, so that a slow side costs
   no more than a fast one. */
static inline uint64_t bench_calibrate(bench_run_fn run, const void *arg, uint64_t least,
                                       double target_ms) {
    const double target = target_ms * 1e6 * (bench_opt.quick ? 0.5 : 1.0);
    uint64_t items = least;
    double took = run(arg, items);
    while (took < target / 8) {
        items *= 4;
        took = run(arg, items);
    }
    items = (uint64_t)((double)items * target / took);
    return items < least ? least : items;
}

/* ---- start ---- */

static inline void bench_cpu_name(char *buffer, size_t bytes) {
    char line[256];
    FILE *file = fopen("/proc/cpuinfo", "r");
    snprintf(buffer, bytes, "unknown CPU");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || colon == NULL) continue;
        line[strcspn(line, "\n")] = '\0';
        snprintf(buffer, bytes, "%.100s", colon + 2);
        break;
    }
    if (file != NULL) fclose(file);
}

static inline void bench_print_machine(FILE *to) {
    char cpu[128];
    double load = 0;
    bench_cpu_name(cpu, sizeof cpu);
    if (getloadavg(&load, 1) != 1) load = 0;
#if defined(__clang__)
    fprintf(to, "machine: %s, %d cores, load %.1f; clang %s; %s\n", cpu, bench_cores(), load,
            __clang_version__, BENCH_FLAGS);
#else
    fprintf(to, "machine: %s, %d cores, load %.1f; gcc %s; %s\n", cpu, bench_cores(), load,
            __VERSION__, BENCH_FLAGS);
#endif
}

#ifdef SPDL_IMPLEMENTATION_INCLUDED
/* One index of a shuffle, in ns: the same arithmetic in each run shows how calm the machine is. */
static inline double bench_witness_ns(void) {
    const spdl_sampler_desc desc = { .order = SPDL_SAMPLE_SHUFFLED, .count = 20000000 };
    const uint64_t items = 200000;
    double least = 1e9;
    spdl_sampler *s;
    spdl_index item;
    if (spdl_sampler_create(&s, &desc) != SPDL_OK) return 0;
    for (int i = 0; i < 9; ++i) {
        const uint64_t since = bench_ns();
        for (uint64_t k = 0; k < items; ++k)
            if (spdl_sampler_item(s, 0, k, &item) != SPDL_OK) exit(1);
        const double each = (double)(bench_ns() - since) / (double)items;
        if (i > 0 && each < least) least = each;
    }
    spdl_sampler_destroy(s);
    return least;
}
#endif

static inline void bench_start(const char *bench, int argc, char **argv) {
    int i;
    bench_opt.bench = bench;
    for (i = 1; i < argc; ++i) {
        if (strcmp(argv[i], "--json") == 0) {
            bench_opt.json = true;
        } else if (strcmp(argv[i], "--quick") == 0) {
            bench_opt.quick = true;
        } else if (strcmp(argv[i], "--all") == 0) {
            bench_opt.all = true;
        } else if (strcmp(argv[i], "--list") == 0) {
            bench_opt.list = true;
        } else if (argv[i][0] == '-') {
            fprintf(stderr, "usage: bench_%s [--json] [--quick] [--all] [--list] [TEXT]\n",
                    bench);
            exit(2);
        } else {
            bench_opt.filter = argv[i];
        }
    }
    signal(SIGALRM, bench_on_alarm);
    if (bench_opt.list) return;
    bench_print_machine(bench_opt.json ? stderr : stdout);
#ifdef SPDL_IMPLEMENTATION_INCLUDED
    fprintf(bench_opt.json ? stderr : stdout, "witness: %.1f ns an index (13.2 on a calm machine "
            "like that of README.md)\n", bench_witness_ns());
#endif
    if (bench_opt.json) return;
    printf("%-22s %10s %-6s %10s %6s  %-14s  %-24s %s\n", bench, "ours", "unit", "peer", "ratio",
           "95 % between", "peer is", "goal");
    fflush(stdout);
}

#endif /* BENCH_H_INCLUDED */
