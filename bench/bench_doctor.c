/* bench_doctor.c - whether the doctor is right: programs with a limit that was planted.

       make bench-doctor
       make bench-doctor ARGS="--all --plot doctor.svg --raw doctor.jsonl"
       make bench-doctor ARGS="--all --part 3/20 --raw doctor.jsonl"    a piece, added to the file
       make bench-doctor ARGS="--sum doctor.jsonl --plot doctor.svg"    what all pieces come to

   A row for each program of doctor_programs.h: the share of repeats with the right verdict. Each
   repeat runs the doctor for --seconds (10; with --quick 6), in 5 repeats (--quick 2, --all 20).
   Then the change it has kept, or else the first one it tried, is really made, and calls of the row
   it blames really take half as long: two pipelines, as it is and with the change, in 6 rounds of
   150-ms windows. From these:

   predict_err_p50..    predicted by the model, against the truth: of changes that were kept, and of
                        "twice" of a row that limits
   measured_err_p50..   the doctor's own trial, against the truth: where it gives an interval
   interval_holds       the printed 95 % interval holds the truth (its interval has an error, too)
   aa_no_difference     nothing against nothing is no difference
   worse_left           changes that were kept, and are worse in truth: in 5 of 6 rounds or more
   wrong_claims         verdicts that name a wrong limit, or find nothing to gain where there is
   unused_overhead_pct  a pipeline whose doctor is done against one without, 1-us stages

   --plot FILE   what was said against the truth, as an SVG
   --raw FILE    each repeat as a line of JSON: the doctor's report, and what is true: median, low
                 and high of the change number `trial`, and of the row's calls in half the time;
                 "sum" is what the rows are made of. The file is added to
   --part K/N    only the Kth of N pieces, each with some repeats of every program, so that hours
                 can be spread; with --raw
   --sum FILE    runs nothing: the rows of all repeats in the file

   On a machine that others use verdicts are "foreign", which is not right in most rows; beside each
   row stand how many, and the processors that others had. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "bench.h"
#include "doctor_programs.h"
#include <math.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define TRUTH_ROUNDS 6
#define TRUTH_NS 150000000
#define REPEATS_MOST 20
#define POINTS_MOST 2048
#define OTHERS_MOST 64

/* Something the doctor said about a change, and what the change does. */
typedef struct point {
    const char *program;
    double said, low, high; /* no interval: 0, 0 */
    double truth;
    bool predicted; /* by the model; else measured */
    bool claimed;
} point;

/* One repeat. */
typedef struct repeat {
    spdl_doctor_report report;
    bool right;
    bool tried, halved; /* there is a truth of the first trial; of the row that limits */
    spdl_interval trial, twice;
    bool worse;         /* with the change in all rounds of the truth but one */
    double others;      /* processors that other programs had */
} repeat;

/* What the rows are made of, from a repeat or a line of a file. */
#define BRIEF_KEYS(X)                                                                              \
    X(right) X(foreign) X(wrong) X(same) X(no_difference) X(kept) X(worse) X(said) X(low) X(high)  \
    X(predicted) X(truth) X(twice) X(true_twice) X(others)
#define BRIEF_MEMBER(key) double key;
typedef struct brief {
    char program[24];
    BRIEF_KEYS(BRIEF_MEMBER)
} brief;
#define BRIEFS_MOST 2048
static brief briefs[BRIEFS_MOST];
static int brief_count;

static struct {
    double seconds;
    int repeats;
    const char *plot, *raw, *sum;
    int part, parts; /* from 1; 0: all */
} asked;

static point points[POINTS_MOST];
static int point_count;
static struct {
    int repeats, intervals, held, same, no_difference, worse, wrong;
} total;

/* ---- what is around a program ---- */

/* Other processes, the processors it may use, and the time it gets of them. */
typedef struct surroundings {
    pid_t other[OTHERS_MOST];
    int others;
    cpu_set_t cpus; /* before */
    bool fewer;
    char group[256], before[256]; /* the cgroup made, and the file that leads out of it */
} surroundings;

static bool file_write(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    bool wrote;
    if (file == NULL) return false;
    wrote = fputs(text, file) >= 0;
    return fclose(file) == 0 && wrote;
}

/* Into a group of its own, below the one it is in. `line` is one of /proc/self/cgroup. */
static bool quota_at(surroundings *around, const char *line, double cores) {
    const char *names = strchr(line, ':'), *path = names != NULL ? strchr(names + 1, ':') : NULL;
    const bool old = path != NULL && strncmp(names, ":cpu", 4) == 0 && strchr(":,", names[4]);
    char at[320], text[64];
    if (path == NULL || (!old && path != names + 1)) return false;
    (void)snprintf(at, sizeof at, "/sys/fs/cgroup%s%.*s%.*s", old ? "/" : "",
                   (int)(path - names - 1), names + 1, (int)strcspn(path + 1, "\n"), path + 1);
    (void)snprintf(around->before, sizeof around->before, "%.200s/cgroup.procs", at);
    (void)snprintf(around->group, sizeof around->group, "%.200s/spdl_doctor_%d", at,
                   (int)getpid());
    if (mkdir(around->group, 0755) != 0) return false;
    (void)snprintf(at, sizeof at, "%s/%s", around->group, old ? "cpu.cfs_quota_us" : "cpu.max");
    (void)snprintf(text, sizeof text, old ? "%d\n" : "%d 100000\n", (int)(cores * 1e5));
    if (file_write(at, text)) {
        (void)snprintf(at, sizeof at, "%s/cgroup.procs", around->group);
        (void)snprintf(text, sizeof text, "%d\n", (int)getpid());
        if (file_write(at, text)) return true;
    }
    (void)rmdir(around->group);
    return false;
}

static bool quota_begins(surroundings *around, double cores) {
    FILE *file = fopen("/proc/self/cgroup", "r");
    char line[512];
    bool done = false;
    while (file != NULL && !done && fgets(line, sizeof line, file) != NULL)
        done = quota_at(around, line, cores);
    if (file != NULL) fclose(file);
    if (!done) around->group[0] = '\0';
    return done;
}

/* Computes for this share of each 1.8 s, until it is killed. */
static void other_process(double share) {
    (void)prctl(PR_SET_PDEATHSIG, (long)SIGKILL, 0L, 0L, 0L);
    for (;;) {
        const uint64_t begun = spdl_time_ns();
        while ((double)(spdl_time_ns() - begun) < 1.8e9 * share) planted_compute(100);
        if (share < 1) planted_sleep(1.8e6 * (1 - share));
    }
}

/* Before the program is opened. NULL, or why it cannot be had here. */
static const char *around_begins(surroundings *around, const planted *is) {
    planted_run run;
    const planted_values *v;
    memset(around, 0, sizeof *around);
    if (!planted_read(&run, is)) return "its text is wrong";
    v = &run.row[run.count - 1].is;
    if (v->quota > 0 && !quota_begins(around, v->quota))
        return "no cgroup can be made here";
    if (v->cpus > 0 && sched_getaffinity(0, sizeof around->cpus, &around->cpus) == 0) {
        int wanted = (int)v->cpus;
        cpu_set_t cpus = around->cpus;
        size_t i;
        for (i = 0; i < CPU_SETSIZE; ++i)
            if (CPU_ISSET(i, &cpus) && wanted-- <= 0) CPU_CLR(i, &cpus);
        around->fewer = sched_setaffinity(0, sizeof cpus, &cpus) == 0;
    }
    while (around->others < (int)v->others && around->others < OTHERS_MOST) {
        const pid_t child = fork();
        if (child == 0) other_process(v->share > 0 ? v->share : 1);
        if (child < 0) break;
        around->other[around->others++] = child;
    }
    return NULL;
}

/* After it was closed. */
static void around_ends(surroundings *around) {
    char text[64];
    while (around->others > 0) {
        (void)kill(around->other[--around->others], SIGKILL);
        (void)waitpid(around->other[around->others], NULL, 0);
    }
    if (around->fewer) (void)sched_setaffinity(0, sizeof around->cpus, &around->cpus);
    if (around->group[0] == '\0') return;
    (void)snprintf(text, sizeof text, "%d\n", (int)getpid());
    (void)file_write(around->before, text);
    (void)rmdir(around->group);
}

/* ---- what is true ---- */

/* Items/s in one window, when what lay in buffers is gone. */
static double window_rate(planted_run *run) {
    const uint64_t set = bench_ns();
    uint64_t since = 0, items = 0, passed = 0, now;
    int i, lay = (int)run->row[run->count - 1].is.sink;
    for (i = 0; i < run->count; ++i)
        lay = run->row[i].kind == SPDL_KIND_BATCH ? 8 : lay + 2 + (int)run->row[i].is.calls;
    do {
        void *item;
        if (planted_next(run, &item) != SPDL_OK) bench_fail("a pipeline has ended");
        planted_step(run, item);
        planted_free(run, item);
        now = bench_ns();
        if (since != 0) {
            ++items;
        } else if (++passed >= (uint64_t)lay && now - set > 60000000) {
            since = now;
        }
    } while (since == 0 || now - since < TRUTH_NS || items < 8);
    return 1e9 * (double)items / (double)(now - since);
}

static void open_or_fail(planted_run *run, const planted *is, const planted_change *change,
                         const spdl_doctor_desc *doctor) {
    spdl_error error;
    memset(&error, 0, sizeof error);
    if (planted_open(run, is, change, doctor, &error) != SPDL_OK)
        bench_fail("it cannot be made: %s", error.text);
}

/* How many times as fast the program is with the change. *but_one: no more in all rounds but
   one. */
static spdl_interval truth_of(const planted *is, const planted_change *change, double *but_one) {
    static planted_run run[2];
    double ratio[TRUTH_ROUNDS];
    spdl_interval truth;
    const planted_change none = { -1, 0, 0, 0, 0, true, 0 };
    int i;
    bench_now_with("as it really is");
    open_or_fail(&run[0], is, &none, NULL);
    open_or_fail(&run[1], is, change, NULL);
    for (i = 0; i < TRUTH_ROUNDS; ++i) {
        double rate[2];
        rate[i % 2] = window_rate(&run[i % 2]);
        rate[1 - i % 2] = window_rate(&run[1 - i % 2]);
        ratio[i] = rate[1] / rate[0];
    }
    planted_close(&run[0]);
    planted_close(&run[1]);
    truth = spdl__interval(ratio, TRUTH_ROUNDS, 1); /* sorts them */
    *but_one = ratio[TRUTH_ROUNDS - 2];
    return truth;
}

/* ---- a repeat ---- */

/* The change that was kept, or the first. */
static const spdl_doctor_trial *tried_of(const spdl_doctor_report *r) {
    int i = 0;
    while (i < r->trial_count && !r->trial[i].kept) ++i;
    return &r->trial[i < r->trial_count ? i : 0];
}

static void find_truth(repeat *at, const planted *is) {
    const spdl_doctor_report *r = &at->report;
    planted_change change = { -1, 0, 0, 0, 0, true, 0 };
    double but_one;
    at->tried = tried_of(r)->measured.rounds > 0;
    at->halved = r->outcome == SPDL_DOCTOR_LIMIT && r->stage >= 0 && r->limit != SPDL_LIMIT_LOCK &&
                 r->row[r->stage].twice > 0;
    if (at->tried) {
        const spdl_doctor_trial *trial = tried_of(r);
        change.stage = trial->change == SPDL_DOCTOR_CONCURRENCY ? trial->stage : -1;
        change.calls = trial->change == SPDL_DOCTOR_CONCURRENCY ? trial->to : 0;
        change.workers = trial->change == SPDL_DOCTOR_WORKERS ? trial->to : 0;
        change.sink = trial->change == SPDL_DOCTOR_BUFFER ? trial->to : 0;
        change.manners = trial->change == SPDL_DOCTOR_POLITE ? trial->to : 0;
        at->trial = truth_of(is, &change, &but_one);
        at->worse = but_one < 1;
    }
    if (at->halved) {
        const planted_change faster = { r->stage, 2, 0, 0, 0, true, 0 };
        at->twice = truth_of(is, &faster, &but_one);
    }
}

/* NULL, or why the program cannot be had here. */
static const char *run_repeat(repeat *at, const planted *is) {
    static planted_run run;
    surroundings around;
    spdl_doctor_desc doctor;
    spdl_process_stats before, after;
    const char *reason = around_begins(&around, is);
    if (reason != NULL) return reason;
    memset(at, 0, sizeof *at);
    memset(&doctor, 0, sizeof doctor);
    doctor.seconds = asked.seconds;
    doctor.quiet = true;
    doctor.raise = (is->flags & PLANTED_RAISE) != 0;
    doctor.replay = (is->flags & PLANTED_REPLAY) != 0;
    open_or_fail(&run, is, NULL, &doctor);
    spdl_process_read(&before);
    if (spdl_doctor_run(run.pipeline, planted_step, &run, &at->report) != SPDL_OK)
        bench_fail("spdl_doctor_run has failed");
    spdl_process_read(&after);
    planted_close(&run);
    at->right = planted_right(is, &at->report);
    at->others = (double)(int64_t)(after.others_ns - before.others_ns) /
                 (double)(after.time_ns - before.time_ns);
    if (around.others == 0) find_truth(at, is);
    around_ends(&around);
    return NULL;
}

static brief brief_of(const repeat *at, const planted *is) {
    const spdl_doctor_report *r = &at->report;
    brief b;
    memset(&b, 0, sizeof b);
    (void)snprintf(b.program, sizeof b.program, "%s", is->name);
    b.right = at->right;
    b.foreign = r->outcome == SPDL_DOCTOR_FOREIGN;
    b.wrong = !at->right && (r->outcome == SPDL_DOCTOR_LIMIT || r->outcome == SPDL_DOCTOR_NOTHING ||
                             (r->outcome == SPDL_DOCTOR_BURSTY && r->limit != 0));
    b.same = r->same.known;
    b.no_difference = r->same.known && r->same.low <= 1 && r->same.high >= 1;
    b.others = at->others;
    if (at->tried) {
        const spdl_doctor_trial *trial = tried_of(r);
        b.kept = trial->kept;
        b.worse = trial->kept && at->worse;
        b.truth = at->trial.value;
        b.predicted = trial->predicted;
        if (trial->measured.known) {
            b.said = trial->measured.value;
            b.low = trial->measured.low;
            b.high = trial->measured.high;
        }
    }
    if (at->halved) {
        b.twice = r->row[r->stage].twice;
        b.true_twice = at->twice.value;
    }
    return b;
}

static void add_point(const brief *b, double said, double low, double high, double truth,
                      bool predicted, bool claimed) {
    const point to = { b->program, said, low, high, truth, predicted, claimed };
    if (point_count < POINTS_MOST && said > 0 && truth > 0) points[point_count++] = to;
}

static void count_brief(const brief *b) {
    ++total.repeats;
    total.wrong += b->wrong > 0;
    total.same += b->same > 0;
    total.no_difference += b->no_difference > 0;
    total.worse += b->worse > 0;
    if (b->said > 0 && b->truth > 0) {
        ++total.intervals;
        total.held += b->low <= b->truth && b->truth <= b->high;
    }
    add_point(b, b->said, b->low, b->high, b->truth, false, b->kept > 0);
    add_point(b, b->predicted, 0, 0, b->truth, true, b->kept > 0);
    add_point(b, b->twice, 0, 0, b->true_twice, true, true);
}

static void keep_brief(const brief *b) {
    if (brief_count == BRIEFS_MOST) bench_fail("there are more than %d repeats", BRIEFS_MOST);
    briefs[brief_count] = *b;
    count_brief(&briefs[brief_count++]); /* points keep its name */
}

/* The lines that raw_line has written. */
static void read_briefs(const char *path) {
    static char line[1 << 18];
    FILE *from = fopen(path, "r");
    if (from == NULL) bench_fail("cannot read %s", path);
    while (fgets(line, sizeof line, from) != NULL) {
        const char *at = strstr(line, "\"sum\":[");
        brief b;
        memset(&b, 0, sizeof b);
        if (at == NULL || sscanf(line, "{\"program\":\"%23[^\"]", b.program) != 1)
            bench_fail("%s has a line that is none of --raw", path);
        at += 6;
#define BRIEF_READ(key) at += strcspn(at, "[,") + 1; b.key = strtod(at, NULL);
        BRIEF_KEYS(BRIEF_READ)
        keep_brief(&b);
    }
    (void)fclose(from);
}

/* ---- what is printed ---- */

static void raw_line(FILE *to, const repeat *at, const brief *b) {
    static char json[1 << 17];
    const char *c, *before = ",\"sum\":[";
    if (spdl_doctor_json(&at->report, json, sizeof json) >= (int)sizeof json)
        bench_fail("its report does not fit");
    fprintf(to, "{\"program\":\"%s\"", b->program);
#define BRIEF_WRITE(key) fprintf(to, "%s%.6g", before, b->key), before = ",";
    BRIEF_KEYS(BRIEF_WRITE)
    fputs("]", to);
    if (at->tried)
        fprintf(to, ",\"trial\":%d,\"true\":[%.4f,%.4f,%.4f]",
                (int)(tried_of(&at->report) - at->report.trial), at->trial.value, at->trial.low,
                at->trial.high);
    if (at->halved)
        fprintf(to, ",\"true_twice\":[%.4f,%.4f,%.4f]", at->twice.value, at->twice.low,
                at->twice.high);
    fputs(",\"report\":", to);
    for (c = json; *c != '\0'; ++c)
        if (*c != '\n') fputc(*c, to);
    fputs("}\n", to);
    fflush(to);
}

/* |said / true - 1| in percent, of one program (NULL: all); how many. */
static int errors_of(double *error, const char *program, bool predicted, bool claimed) {
    int i, count = 0;
    for (i = 0; i < point_count; ++i) {
        const point *at = &points[i];
        const double off = 100 * (at->said / at->truth - 1);
        if (at->predicted != predicted || (claimed && !at->claimed)) continue;
        if (program == NULL || strcmp(program, at->program) == 0)
            error[count++] = off < 0 ? -off : off;
    }
    return count;
}

/* The repeats of a program that are asked for; what was wrong goes into `more`. NULL, or why it
   cannot be had here. */
static const char *run_program(size_t program, FILE *raw, char *more, size_t bytes) {
    const planted *is = &planted_programs[program];
    static repeat at;
    size_t used = 0;
    int i;
    for (i = 0; i < asked.repeats; ++i) {
        const char *reason;
        brief b;
        if (asked.parts > 0 && (i + (int)program) % asked.parts != asked.part - 1) continue;
        bench_now_with("the doctor");
        alarm(BENCH_HANG_SECONDS + 4 * (unsigned)asked.seconds);
        reason = run_repeat(&at, is);
        if (reason != NULL) return reason;
        b = brief_of(&at, is);
        keep_brief(&b);
        if (raw != NULL) raw_line(raw, &at, &b);
        if (at.right || used + 512 > bytes) continue;
        used += (size_t)snprintf(more + used, bytes - used, "    %s, %s: %.300s\n",
                                 spdl__found_word(spdl__found_outcomes, at.report.outcome),
                                 spdl__found_word(spdl__found_limits, at.report.limit),
                                 at.report.verdict);
    }
    return NULL;
}

static void row_program(size_t program, FILE *raw) {
    const planted *is = &planted_programs[program];
    const bench_row row = { is->name, "right", NULL, true, 0.95, false, 0 };
    static double error[POINTS_MOST];
    char text[96], json[160], more[4096] = "";
    const bench_note note = { text, more, json };
    int i, all = 0, predicted, measured;
    double right = 0, foreign = 0, others = 0, off[2] = { 0, 0 };
    const char *reason;
    if (!bench_wanted(is->name)) return;
    reason = asked.sum == NULL ? run_program(program, raw, more, sizeof more) : NULL;
    if (reason != NULL)
        fprintf(bench_opt.json ? stderr : stdout, "%-22s skipped: %s\n", is->name, reason);
    for (i = 0; i < brief_count; ++i) {
        if (strcmp(briefs[i].program, is->name) != 0) continue;
        ++all;
        right += briefs[i].right;
        foreign += briefs[i].foreign;
        others += briefs[i].others;
    }
    if (all == 0) return;
    predicted = errors_of(error, is->name, true, true);
    if (predicted > 0) off[0] = bench_quantile(error, (size_t)predicted, 0.5);
    measured = errors_of(error, is->name, false, false);
    if (measured > 0) off[1] = bench_quantile(error, (size_t)measured, 0.5);
    snprintf(text, sizeof text, "of %d, off %4.1f %4.1f %%, others %.2f, foreign %.0f", all, off[0],
             off[1], others / all, foreign);
    snprintf(json, sizeof json, ",\"repeats\":%d,\"predict_err\":%.3g,\"measured_err\":%.3g,"
             "\"others\":%.3g,\"foreign\":%.0f", all, off[0], off[1], others / all, foreign);
    bench_print_noted(&row, right / all, 0, NULL, &note);
}

static void row_errors(const char *what, bool predicted) {
    static const struct { const char *name; double quantile, goal; } kinds[] = {
        { "p50", 0.5, 3 }, { "p90", 0.9, 8 }, { "max", 1, 15 }
    };
    static double error[POINTS_MOST];
    const int count = errors_of(error, NULL, predicted, predicted);
    char name[40], text[32], json[32];
    const bench_note note = { text, NULL, json };
    int i;
    for (i = 0; i < 3; ++i) {
        const bench_row row = { name, "%", NULL, false, kinds[i].goal, false, 0 };
        snprintf(name, sizeof name, "%s_err_%s", what, kinds[i].name);
        snprintf(text, sizeof text, "of %d", count);
        snprintf(json, sizeof json, ",\"of\":%d", count);
        if (bench_opt.list) puts(name);
        else if (count > 0)
            bench_print_noted(&row, bench_quantile(error, (size_t)count, kinds[i].quantile), 0,
                              NULL, &note);
    }
}

/* `many` of `all`; with a goal of 0 there are to be none. */
static void row_share(const char *name, int many, int all, double goal) {
    const bench_row row = { name, goal > 0 ? "share" : "cases", NULL, goal > 0, goal, goal <= 0,
                            0 };
    char text[32], json[32];
    const bench_note note = { text, NULL, json };
    snprintf(text, sizeof text, "%d of %d", many, all);
    snprintf(json, sizeof json, ",\"of\":%d", all);
    if (bench_opt.list) puts(name);
    else if (all > 0)
        bench_print_noted(&row, goal > 0 ? (double)many / all : many, 0, NULL, &note);
}

/* ---- what a doctor costs that is not there, or done ---- */

static void row_overhead(void) {
    static const planted quick = { "unused_overhead_pct", "source list; pipe a compute=1;"
                                   "pipe b compute=1; pipe c compute=1; trainer sink=64",
                                   0, 0, 0, NULL };
    const bench_row row = { quick.name, "%", NULL, false, 0, false, 0 };
    static planted_run run[3]; /* without, the same again, with one that is done */
    static spdl_doctor_report report;
    double itself[BENCH_MAX_ROUNDS], pct[BENCH_MAX_ROUNDS];
    const bench_sides sides = { pct, NULL, bench_rounds(42), 0 };
    spdl_interval same, done;
    spdl_doctor_desc doctor;
    char text[64], json[64];
    const bench_note note = { text, NULL, json };
    int i, k;
    if (!bench_wanted(quick.name) || asked.parts > 0 || asked.sum != NULL) return;
    memset(&doctor, 0, sizeof doctor);
    doctor.seconds = 0.05; /* too short for a trial: the rows stay as they are */
    doctor.quiet = true;
    for (i = 0; i < 3; ++i) open_or_fail(&run[i], &quick, NULL, i == 2 ? &doctor : NULL);
    BENCH_CHECK(spdl_doctor_run(run[2].pipeline, planted_step, &run[2], &report) == SPDL_OK);
    for (i = 0; i < report.trial_count; ++i) BENCH_CHECK(!report.trial[i].kept);
    for (i = 0; i < sides.rounds; ++i) {
        double rate[3];
        bench_now_with("a doctor that is done");
        for (k = 0; k < 3; ++k) rate[(i + k) % 3] = window_rate(&run[(i + k) % 3]);
        itself[i] = rate[0] / rate[1];
        pct[i] = 100 * (rate[0] / rate[2] - 1);
    }
    for (i = 0; i < 3; ++i) planted_close(&run[i]);
    same = spdl__interval(itself, sides.rounds, 1);
    done = bench_interval(&row, &sides);
    snprintf(text, sizeof text, "%s, itself %+.1f to %+.1f",
             done.low <= 0 && done.high >= 0 ? "no difference" : "a difference",
             100 * (same.low - 1), 100 * (same.high - 1));
    snprintf(json, sizeof json, ",\"itself_low\":%.3g,\"itself_high\":%.3g",
             100 * (same.low - 1), 100 * (same.high - 1));
    bench_print_sides(&row, &sides, &note);
}

/* ---- the plot ---- */

#define PLOT_SIZE 520.0
#define PLOT_LEAST 0.5
#define PLOT_MOST 5.0

/* Where a ratio is, on a logarithmic scale. */
static double plot_at(double ratio) {
    if (ratio < PLOT_LEAST) ratio = PLOT_LEAST;
    if (ratio > PLOT_MOST) ratio = PLOT_MOST;
    return PLOT_SIZE * log(ratio / PLOT_LEAST) / log(PLOT_MOST / PLOT_LEAST);
}

static void plot_point(FILE *to, const point *at) {
    const double x = 60 + plot_at(at->truth), y = 20 + PLOT_SIZE - plot_at(at->said);
    const double off = 100 * (at->said / at->truth - 1);
    fprintf(to, "<g class=\"%s\"><title>%s: %.2f, in truth %.2f (%+.1f %%)</title>",
            at->predicted ? "model" : "trial", at->program, at->said, at->truth, off);
    if (at->low > 0 && at->high < 1e6)
        fprintf(to, "<path d=\"M%.1f %.1fV%.1f\"/>", x, 20 + PLOT_SIZE - plot_at(at->low),
                20 + PLOT_SIZE - plot_at(at->high));
    if (at->predicted)
        fprintf(to, "<rect x=\"%.1f\" y=\"%.1f\" width=\"6\" height=\"6\"/></g>\n", x - 3, y - 3);
    else fprintf(to, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\"/></g>\n", x, y);
}

static void plot_axes(FILE *to) {
    static const double ticks[] = { 0.5, 0.7, 1, 1.5, 2, 3, 4, 5 };
    const double end = 20 + PLOT_SIZE;
    size_t i;
    for (i = 0; i < sizeof ticks / sizeof *ticks; ++i) {
        const double at = plot_at(ticks[i]);
        fprintf(to, "<path class=\"grid\" d=\"M60 %.1fh%.0fM%.1f 20v%.0f\"/>"
                    "<text x=\"52\" y=\"%.1f\" text-anchor=\"end\">%g</text>"
                    "<text x=\"%.1f\" y=\"%.0f\" text-anchor=\"middle\">%g</text>\n",
                end - at, PLOT_SIZE, 60 + at, PLOT_SIZE, end - at + 4, ticks[i], 60 + at, end + 18,
                ticks[i]);
    }
    fprintf(to, "<path class=\"band\" d=\"M60 %.1fV%.1fL%.1f 20H%.1fV%.1fL%.1f %.1fZ\"/>"
                "<path class=\"line\" d=\"M60 %.1fL%.1f 20\"/>\n",
            end, end - plot_at(PLOT_LEAST * 1.08), 60 + plot_at(PLOT_MOST / 1.08),
            60 + PLOT_SIZE, 20 + PLOT_SIZE - plot_at(PLOT_MOST / 1.08),
            60 + plot_at(PLOT_LEAST * 1.08), end, end, 60 + PLOT_SIZE);
    fprintf(to, "<text x=\"%.0f\" y=\"%.0f\" text-anchor=\"middle\">throughput with the change "
                "really made, as it is = 1</text><text transform=\"translate(16 %.0f) "
                "rotate(-90)\" text-anchor=\"middle\">as the doctor said</text>\n",
            60 + PLOT_SIZE / 2, end + 40, 20 + PLOT_SIZE / 2);
}

static void plot_write(const char *path) {
    FILE *to = fopen(path, "w");
    int i;
    if (to == NULL) {
        fprintf(stderr, "bench: cannot write %s\n", path);
        exit(1);
    }
    fprintf(to, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" "
                "font-family=\"system-ui,sans-serif\" font-size=\"12\">\n"
                "<style>svg{background:#fff;color:#333}text{fill:currentColor}path{fill:none}"
                ".grid{stroke:#8883}.band{fill:#8882}.line{stroke:#888}.trial circle{fill:#0072b2}"
                ".trial path{stroke:#0072b2;opacity:.5}.model rect{fill:none;stroke:#d55e00}"
                "@media(prefers-color-scheme:dark){svg{background:#111;color:#ccc}}</style>\n",
            PLOT_SIZE + 80, PLOT_SIZE + 70);
    plot_axes(to);
    for (i = 0; i < point_count; ++i)
        if (!points[i].predicted || points[i].claimed) plot_point(to, &points[i]);
    fprintf(to, "<g class=\"trial\"><circle cx=\"76\" cy=\"36\" r=\"3\"/></g><text x=\"86\" "
                "y=\"40\">tried, with the 95 %% interval printed</text><g class=\"model\"><rect "
                "x=\"73\" y=\"51\" width=\"6\" height=\"6\"/></g><text x=\"86\" y=\"58\">predicted "
                "by the model; band: 8 %% off</text>\n</svg>\n");
    if (fclose(to) != 0) exit(1);
}

/* ---- options ---- */

/* Takes those that bench_start does not know out of argv. */
static int take_options(int argc, char **argv) {
    int i, count = 1;
    for (i = 1; i < argc; ++i) {
        const bool value = i + 1 < argc;
        if (value && strcmp(argv[i], "--plot") == 0) asked.plot = argv[++i];
        else if (value && strcmp(argv[i], "--raw") == 0) asked.raw = argv[++i];
        else if (value && strcmp(argv[i], "--sum") == 0) asked.sum = argv[++i];
        else if (value && strcmp(argv[i], "--part") == 0) {
            if (sscanf(argv[++i], "%d/%d", &asked.part, &asked.parts) != 2 || asked.part < 1 ||
                asked.part > asked.parts) {
                fprintf(stderr, "bench: --part is \"%s\", must be K/N\n", argv[i]);
                exit(1);
            }
        }
        else if (value && strcmp(argv[i], "--seconds") == 0) asked.seconds = atof(argv[++i]);
        else argv[count++] = argv[i];
    }
    return count;
}

int main(int argc, char **argv) {
    FILE *raw = NULL;
    size_t i;
    bench_start("doctor", take_options(argc, argv), argv);
    asked.repeats = bench_opt.all ? REPEATS_MOST : bench_opt.quick ? 2 : 5;
    if (!(asked.seconds > 0)) asked.seconds = bench_opt.quick ? 6 : 10;
    if (asked.sum != NULL) {
        read_briefs(asked.sum);
        asked.raw = NULL;
    } else if (!bench_opt.list) {
        planted_calibrate();
        fprintf(bench_opt.json ? stderr : stdout,
                "%d programs, %d repeats of %g s and some 5 s for the truth: up to %.0f min\n",
                (int)PLANTED_PROGRAMS, asked.repeats, asked.seconds,
                (double)PLANTED_PROGRAMS * asked.repeats * (asked.seconds + 6) / 60 /
                    (asked.parts > 0 ? asked.parts : 1));
        fflush(stdout);
        if (asked.raw != NULL && (raw = fopen(asked.raw, "a")) == NULL) {
            fprintf(stderr, "bench: cannot write %s\n", asked.raw);
            return 1;
        }
    }
    for (i = 0; i < PLANTED_PROGRAMS; ++i) row_program(i, raw);
    row_errors("predict", true);
    row_errors("measured", false);
    row_share("interval_holds", total.held, total.intervals, 0.9);
    row_share("aa_no_difference", total.no_difference, total.same, 0.95);
    row_share("worse_left", total.worse, total.repeats, 0);
    row_share("wrong_claims", total.wrong, total.repeats, 0);
    row_overhead();
    if (asked.plot != NULL && !bench_opt.list) plot_write(asked.plot);
    if (raw != NULL) fclose(raw);
    return 0;
}
