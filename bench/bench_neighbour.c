/* bench_neighbour.c - a trainer beside a loader: threads of its process, or a process of their own,
   polite (desc.policy.polite) or not.

       make bench-neighbour ARGS="[--json] [--quick] [--list] [TEXT]"

   A step of the trainer is 1 ms of computing and a sleep of 100 us, as one who launches work on a
   device. The loader has as many workers as there are processors, at least 2. KIND is greedy
   (threads), polite (polite threads), child (a loader process), child_polite (a polite one). Each
   run is a process of its own, and all kinds and "alone" take turns.

   Greedy: items of about 1 ms without end; after each step the trainer takes all that are ready.
   step_rate_KIND    steps a second, against the trainer alone
   loader_rate_KIND  items a second, against the threads that are not polite
   step_p999_us_KIND, wake_p999_us_KIND  the longest step and the latest wake-up of a thousand;
                     below them p50 and p99
   Equal: one item of 0.6 ms for each step, which is all that the loader makes.
   equal_rate_KIND   steps a second, against the trainer alone
   longest_wait_ms   of polite; longest_wait_ms_KIND of the others: the longest wait for an item of
                     a run, in which eight may be ready
   ..._foreign       the same beside two endless loops in other processes of the same session

   Last comes a table of these: which to use when. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define SPDL_IMPLEMENTATION
#include "../spdl.h"

#include "bench.h"
#include "loader_work.h"

#include <sys/mman.h>
#include <sys/wait.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))
#define IMAGE ((size_t)224 * 224 * 3)
#define SLEEP_NS 100000
#define MOST_STEPS 4096
#define WARM 20 /* steps before the clock starts */

typedef enum kind { GREEDY, POLITE, CHILD, CHILD_POLITE, ALONE, KINDS } kind;

static const char *const kind_names[] = { "greedy", "polite", "child", "child_polite", "alone" };

/* What happens in a run, and what came out. */
typedef struct run {
    kind kind;
    bool equal, foreign;
    double steps, items;    /* a second */
    double step[3], wake[3]; /* p50, p99, p99.9, in us */
    double longest_ms;
} run;

static int workers;
static uint64_t step_turns;               /* of 1 ms */
static int greedy_rounds, equal_rounds;   /* of loader_work, for 1 and 0.6 ms */
static volatile uint64_t turned;

static void turn(uint64_t turns) {
    uint64_t x = turned, i;
    for (i = 0; i < turns; ++i) x = x * 6364136223846793005u + 1442695040888963407u;
    turned = x;
}

/* Other programs make it longer, none makes it shorter. */
static void calibrate(void) {
    void *image = malloc(IMAGE);
    double turns = 1e18, work = 1e18;
    int i;
    BENCH_CHECK(image != NULL);
    for (i = 0; i < 200; ++i) {
        const uint64_t start = bench_ns();
        uint64_t between;
        turn(100000);
        between = bench_ns();
        loader_work(image, IMAGE, 1, 8);
        if ((double)(between - start) < turns) turns = (double)(between - start);
        if ((double)(bench_ns() - between) < work) work = (double)(bench_ns() - between);
    }
    step_turns = (uint64_t)(1e6 / turns * 100000);
    greedy_rounds = (int)(1e6 / work * 8 + 0.5);
    equal_rounds = (int)(0.6e6 / work * 8 + 0.5);
    free(image);
}

/* ---- the loader ---- */

SPDL_FN(number, void, void) {
    (void)in, (void)out, (void)task;
    return SPDL_OK;
}

SPDL_FN(decode, void, void) {
    if ((*out = spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    loader_work(*out, IMAGE, spdl_sequence(task), *(const int *)spdl_ctx(task));
    return SPDL_OK;
}

typedef struct line {
    spdl_pipeline *threads; /* or */
    spdl_loader *process;
} line;

static line line_open(const run *r) {
    spdl_stage rows[] = { SPDL_SOURCE(number), SPDL_PIPE(decode, .item_bytes = IMAGE),
                          SPDL_SINK(8) };
    spdl_error error;
    spdl_loader_desc desc;
    line l = { NULL, NULL };
    spdl_result result = SPDL_OK;
    memset(&desc, 0, sizeof desc);
    rows[1].ctx = r->equal ? &equal_rounds : &greedy_rounds;
    rows[1].concurrency = workers;
    desc.error = desc.pipeline.error = &error;
    desc.pipeline.workers = workers;
    desc.pipeline.policy.polite = r->kind == POLITE || r->kind == CHILD_POLITE;
    if (r->kind == CHILD || r->kind == CHILD_POLITE) {
        rows[2].buffer_size = 4; /* and as many slots */
        result = spdl_loader_open(&l.process, &desc, SPDL_TABLE(rows));
    } else if (r->kind != ALONE) {
        result = spdl_pipeline_create(&l.threads, &desc.pipeline, SPDL_TABLE(rows));
    }
    if (result != SPDL_OK) bench_fail("%s", error.text);
    return l;
}

/* Whether there was an item. */
static bool line_take(line l, int64_t timeout_ns) {
    spdl_result result = SPDL_TIMEOUT;
    spdl_loader_batch b;
    void *item;
    memset(&b, 0, sizeof b);
    if (l.process != NULL) {
        result = spdl_loader_next(l.process, &b, timeout_ns);
        if (result == SPDL_OK) BENCH_CHECK(spdl_loader_done(l.process, &b) == SPDL_OK);
    } else if (l.threads != NULL) {
        result = spdl_pipeline_next(l.threads, &item, timeout_ns);
        if (result == SPDL_OK) spdl_buffer_free(item);
    }
    BENCH_CHECK(result == SPDL_OK || result == SPDL_TIMEOUT);
    return result == SPDL_OK;
}

static void line_close(line l) {
    spdl_loader_close(l.process);
    spdl_pipeline_destroy(l.threads);
}

/* ---- the trainer ---- */

static void quantiles(double *values, size_t count, double *to) {
    to[0] = bench_quantile(values, count, 0.5);
    to[1] = bench_quantile(values, count, 0.99);
    to[2] = bench_quantile(values, count, 0.999);
}

/* The time that was waited for an item, in ns; counts what was taken. */
static uint64_t take(line l, const run *r, uint64_t *items) {
    const uint64_t start = bench_ns();
    if (r->equal && r->kind != ALONE) {
        BENCH_CHECK(line_take(l, SPDL_FOREVER));
        ++*items;
        return bench_ns() - start;
    }
    while (line_take(l, 0)) ++*items;
    return 0;
}

static void train(run *r) {
    static double step_us[MOST_STEPS], wake_us[MOST_STEPS];
    const uint64_t ns = bench_opt.quick ? 400000000u : 1000000000u;
    const line l = line_open(r);
    uint64_t start = bench_ns(), items = 0;
    int64_t i;
    bench_sleep_ms(30); /* its buffer fills */
    for (i = -WARM; i < MOST_STEPS; ++i) {
        const uint64_t before = bench_ns();
        uint64_t now, waited;
        if (i <= 0) start = before, items = 0;
        if (i > 0 && before - start >= ns) break;
        turn(step_turns);
        now = bench_ns();
        bench_sleep_until(now + SLEEP_NS);
        if (i >= 0) step_us[i] = (double)(now - before) / 1e3;
        if (i >= 0) wake_us[i] = (double)(bench_ns() - now - SLEEP_NS) / 1e3;
        waited = take(l, r, &items);
        if (i >= 0 && (double)waited / 1e6 > r->longest_ms) r->longest_ms = (double)waited / 1e6;
    }
    r->steps = (double)i * 1e9 / (double)(bench_ns() - start);
    r->items = (double)items * 1e9 / (double)(bench_ns() - start);
    quantiles(step_us, (size_t)i, r->step);
    quantiles(wake_us, (size_t)i, r->wake);
    line_close(l);
}

static void loops_begin(pid_t *loop, int count) {
    int i;
    for (i = 0; i < count; ++i) {
        loop[i] = fork();
        BENCH_CHECK(loop[i] >= 0);
        if (loop[i] == 0) alarm(BENCH_HANG_SECONDS);
        while (loop[i] == 0) turn(1000);
    }
}

static void loops_end(const pid_t *loop, int count) {
    int i;
    for (i = 0; i < count; ++i) {
        kill(loop[i], SIGKILL);
        waitpid(loop[i], NULL, 0);
    }
}

/* In a process of its own. */
static run measure(kind k, bool equal, bool foreign) {
    run *shared = (run *)mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t loop[2], trainer;
    int status;
    run got;
    BENCH_CHECK(shared != MAP_FAILED);
    memset(&got, 0, sizeof got);
    got.kind = k, got.equal = equal, got.foreign = foreign;
    *shared = got;
    if (foreign) loops_begin(loop, 2);
    bench_now_with(kind_names[k]);
    trainer = fork();
    BENCH_CHECK(trainer >= 0);
    if (trainer == 0) {
        signal(SIGALRM, bench_on_alarm);
        alarm(BENCH_HANG_SECONDS);
        train(shared);
        exit(0);
    }
    BENCH_CHECK(waitpid(trainer, &status, 0) == trainer);
    if (foreign) loops_end(loop, 2);
    BENCH_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    got = *shared;
    munmap(shared, sizeof *shared);
    return got;
}

/* ---- rows ---- */

/* [foreign][equal][kind][round] */
static run runs[2][2][KINDS][BENCH_MAX_ROUNDS];
static bool has_run[2][2];
static int rounds;

static void run_all(bool foreign, bool equal) {
    int round, i;
    if (has_run[foreign][equal]) return;
    has_run[foreign][equal] = true;
    for (round = 0; round < rounds; ++round) {
        for (i = 0; i < KINDS; ++i) {
            const kind k = (kind)((i + round) % KINDS);
            runs[foreign][equal][k][round] = measure(k, equal, foreign);
        }
    }
}

typedef double (*value_fn)(const run *r);

static double steps_of(const run *r) { return r->steps; }
static double items_of(const run *r) { return r->items; }
static double longest_of(const run *r) { return r->longest_ms; }
static double step_p999_of(const run *r) { return r->step[2]; }
static double wake_p999_of(const run *r) { return r->wake[2]; }

static void values_of(double *to, value_fn value, const run *from) {
    int i;
    for (i = 0; i < rounds; ++i) to[i] = value(&from[i]);
}

static double median_of(value_fn value, const run *from) {
    double values[BENCH_MAX_ROUNDS];
    values_of(values, value, from);
    return bench_median(values, rounds);
}

/* p50 and p99 of a row of p99.9. */
static const char *others_of(const run *from, bool steps, char *text, size_t bytes) {
    double p[2][BENCH_MAX_ROUNDS];
    int i, k;
    for (k = 0; k < 2; ++k) {
        for (i = 0; i < rounds; ++i) p[k][i] = steps ? from[i].step[k] : from[i].wake[k];
    }
    snprintf(text, bytes, "p50 %.0f, p99 %.0f", bench_median(p[0], rounds),
             bench_median(p[1], rounds));
    return text;
}

/* A row of each kind but `peer`, with which it is compared; KINDS: with none. */
typedef struct family {
    const char *name, *unit;
    value_fn value;
    bool equal, more_is_better;
    kind peer;
    double goal, goal_ratio; /* of the polite ones */
} family;

static const family families[] = {
    { "step_rate", "step/s", steps_of, false, true, ALONE, 0, 0.97 },
    { "loader_rate", "item/s", items_of, false, true, GREEDY, 0, 0.75 },
    { "step_p999_us", "us", step_p999_of, false, false, KINDS, 0, 0 },
    { "wake_p999_us", "us", wake_p999_of, false, false, KINDS, 0, 0 },
    { "equal_rate", "step/s", steps_of, true, true, ALONE, 0, 0.97 },
    { "longest_wait_ms", "ms", longest_of, true, false, KINDS, 0.2, 0 },
};

static void row_name(char *name, size_t bytes, const family *f, kind k, bool foreign) {
    const bool bare = f->value == longest_of && k == POLITE;
    snprintf(name, bytes, "%s%s%s%s", f->name, bare ? "" : "_", bare ? "" : kind_names[k],
             foreign ? "_foreign" : "");
}

static void row_print(const family *f, kind k, bool foreign) {
    const bool polite = (k == POLITE || k == CHILD_POLITE) && !foreign;
    const bool percentile = f->value == step_p999_of || f->value == wake_p999_of;
    run(*const of)[BENCH_MAX_ROUNDS] = runs[foreign][f->equal];
    double ours[BENCH_MAX_ROUNDS], peer[BENCH_MAX_ROUNDS];
    const bench_sides sides = { ours, peer, rounds, 1 };
    bench_row row = { NULL, NULL, NULL, false, 0, false, 0 };
    char name[64], text[64], json[96];
    bench_note note = { NULL, NULL, NULL };
    row_name(name, sizeof name, f, k, foreign);
    if (!bench_wanted(name)) return;
    run_all(foreign, f->equal);
    row.name = name, row.unit = f->unit, row.more_is_better = f->more_is_better;
    if (f->peer != KINDS) row.peer_name = kind_names[f->peer];
    if (polite) row.goal = f->goal, row.goal_ratio = f->goal_ratio;
    values_of(ours, f->value, of[k]);
    if (f->peer != KINDS) values_of(peer, f->value, of[f->peer]);
    if (percentile) {
        note.text = others_of(of[k], f->value == step_p999_of, text, sizeof text);
        snprintf(json, sizeof json, ",\"others\":\"%s\"", text);
        note.json = json;
    }
    bench_print_sides(&row, &sides, &note);
}

static void rows(bool foreign) {
    int i, k;
    for (i = 0; i < COUNT(families); ++i) {
        for (k = 0; k < ALONE; ++k) {
            if (families[i].peer != (kind)k) row_print(&families[i], (kind)k, foreign);
        }
    }
}

/* ---- which to use when ---- */

static double share(value_fn value, bool foreign, bool equal, kind k, kind of) {
    return median_of(value, runs[foreign][equal][k]) / median_of(value, runs[foreign][equal][of]);
}

/* Of the trainer's steps, and of the loader's items. */
static void print_cell(bool foreign, kind k) {
    printf("   %4.2f  %4.2f  %7.2f", share(steps_of, foreign, false, k, ALONE),
           share(items_of, foreign, false, k, GREEDY),
           median_of(longest_of, runs[foreign][true][k]));
}

static void print_choice(void) {
    static const char *const what[] = { "threads", "polite threads", "a loader process",
                                        "a polite loader process" };
    int k;
    if (bench_opt.json || bench_opt.list || bench_opt.filter != NULL) return;
    puts("\nWhich to use when: steps of what the trainer does alone, items of what greedy threads "
         "load,\nthe longest wait for an item (ms) of a loader that has to make one for each step");
    printf("%-24s   %-21s   %-21s\n", "", "alone on the machine", "beside two busy loops");
    printf("%-24s   steps items  wait ms   steps items  wait ms\n", "");
    for (k = 0; k < ALONE; ++k) {
        printf("%-24s", what[k]);
        print_cell(false, (kind)k);
        print_cell(true, (kind)k);
        putchar('\n');
    }
}

int main(int argc, char **argv) {
    bench_start("neighbour", argc, argv);
    rounds = bench_rounds(7);
    workers = bench_cores() < 2 ? 2 : bench_cores() > 64 ? 64 : bench_cores();
    calibrate();
    rows(false);
    rows(true);
    print_choice();
    return 0;
}
