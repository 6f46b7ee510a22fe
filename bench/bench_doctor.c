/* bench_doctor.c - is the advice right? Programs with a limit that was planted.

       make bench-doctor                                     about 20 minutes on 2 cores
       make bench-doctor ARGS="--all --raw doctor.jsonl"     3 repeats, each about twice as long
       make bench-doctor ARGS="--sum doctor.jsonl"           the table of a file again

   A row for each program of doctor_programs.h: the share of repeats with the right limit and row,
   by the doctor and by the verdict alone (the statistics of --watch seconds, 2). The doctor has
   --seconds (14; --all 30, --quick 8). Then the advised settings are typed: two pipelines, one with
   them, take turns in windows (8; --all 24). A repeat in which other programs had more than 5 % of
   the processors is marked "disturbed" and made once more; the calmer one counts. Rows at the end:

   doctor_right         programs whose limit and row the doctor names in most repeats
   verdict_right        the same of the verdict alone
   said_is_a_bound      gains without a measurement that are not less than the truth
   doctor_worse         programs in which the doctor is right less often than the verdict
   intervals_hold       intervals of the doctor that have something in common with the truth's
   said_err, measured_err   distance of both gains from the truth, percent
   aa_no_difference     two equal arms are no difference
   kept_and_worse       settings that were kept, and are worse in truth
   unused_overhead_pct  a pipeline whose doctor is done against one without, 1-us stages

   --raw FILE    appends each repeat as a line of JSON: the figures, and the doctor's report
   --sum FILE    runs nothing: the rows of all repeats in the file */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "bench.h"
#include "doctor_programs.h"
#include <sys/stat.h>
#include <sys/wait.h>

#define REPEATS_MOST 3
#define DISTURBED 0.05 /* share of the processors that others had */
#define OTHERS_MOST 64
#define BRIEFS_MOST 2048

/* One repeat, as it stands in a file. Gains are 0 where there are none. */
#define BRIEF_KEYS(X)                                                                              \
    X(verdict) X(doctor) X(said) X(measured) X(low) X(high) X(truth) X(true_low) X(true_high)      \
    X(kept) X(same) X(no_difference) X(others) X(disturbed)
#define BRIEF_MEMBER(key) double key;
typedef struct brief {
    char program[24];
    BRIEF_KEYS(BRIEF_MEMBER)
} brief;
static brief briefs[BRIEFS_MOST];
static int brief_count;

static struct {
    double seconds, watch;
    int repeats, windows;
    const char *raw, *sum;
} asked;

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

static void open_or_fail(planted_run *run, const planted *is, const planted_change *change,
                         const spdl_doctor_desc *doctor) {
    spdl_error error;
    memset(&error, 0, sizeof error);
    if (planted_open(run, is, change, doctor, &error) != SPDL_OK)
        bench_fail("it cannot be made: %s", error.text);
}

/* Steps for so long, and 8 at least, once what lay in buffers is gone. */
static double window(planted_run *run, uint64_t length, double *ns) {
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
        if (since != 0) ++items;
        else if (++passed >= (uint64_t)lay && now - set > length / 5) since = now;
    } while (since == 0 || now - since < length || items < 8);
    *ns = (double)(now - since);
    return (double)items;
}

/* Two pipelines in turns. */
static spdl_interval compared(planted_run run[2], int windows) {
    static spdl__rounds r;
    spdl__rounds_start(&r, bench_ns(), 2);
    do {
        double ns, items;
        do items = window(&run[spdl__rounds_arm(&r)], SPDL__WINDOW_NS, &ns);
        while (!spdl__rounds_window(&r, items, ns));
    } while (spdl__rounds_next(&r, false) && r.round < windows);
    return spdl__rounds_ratio(&r, 1, 0, 0, 1);
}

/* How many times as fast the program is with the settings typed. */
static spdl_interval truth_of(const planted *is, const spdl_finding *found) {
    static planted_run run[2];
    const planted_change none = { -1, 0, 0, 0, { 0 }, true };
    planted_change change = { -1, 0, found->workers, 0, { 0 }, true };
    spdl_interval truth;
    bench_now_with("as it really is");
    memcpy(change.calls, found->concurrency, sizeof change.calls);
    open_or_fail(&run[0], is, &none, NULL);
    if (found->buffer_size > 0 && found->stage == run[0].count - 2)
        change.sink = found->buffer_size;
    open_or_fail(&run[1], is, &change, NULL);
    truth = compared(run, asked.windows);
    planted_close(&run[0]);
    planted_close(&run[1]);
    return truth;
}

/* ---- a repeat ---- */

/* What the statistics alone say after some seconds. */
static spdl_finding watched(const planted *is, char *text, size_t bytes) {
    static planted_run run;
    static spdl_stats stats;
    spdl_finding found;
    double ns;
    open_or_fail(&run, is, NULL, NULL);
    (void)window(&run, 100000000, &ns);
    spdl_pipeline_stats(run.pipeline, &stats);
    (void)window(&run, (uint64_t)(1e9 * asked.watch), &ns);
    spdl_pipeline_stats(run.pipeline, &stats);
    spdl_stats_find(&stats, &found);
    spdl_stats_verdict(&stats, text, bytes);
    planted_close(&run);
    return found;
}

typedef struct repeat {
    brief is;
    spdl__doctor_report report;
    char verdict[1024];
} repeat;

/* NULL, or why the program cannot be had here. */
static const char *run_repeat(repeat *one, const planted *is) {
    static planted_run run;
    const bench_moment begun = bench_moment_now();
    brief *b = &one->is;
    spdl__doctor_report *r = &one->report;
    surroundings around;
    spdl_doctor_desc doctor;
    spdl_finding found;
    const char *reason = around_begins(&around, is);
    if (reason != NULL) return reason;
    memset(b, 0, sizeof *b);
    memset(&doctor, 0, sizeof doctor);
    (void)snprintf(b->program, sizeof b->program, "%s", is->name);
    doctor.seconds = asked.seconds;
    doctor.quiet = true;
    doctor.raise = (is->flags & PLANTED_RAISE) != 0;
    doctor.replay = (is->flags & PLANTED_REPLAY) != 0;
    found = watched(is, one->verdict, sizeof one->verdict);
    open_or_fail(&run, is, NULL, &doctor);
    if (spdl_doctor_run(run.pipeline, planted_step, &run) != SPDL_OK)
        bench_fail("spdl_doctor_run has failed");
    *r = run.pipeline->doctor->report;
    planted_close(&run);
    b->verdict = planted_right(is, &found, &run, true);
    b->doctor = planted_right(is, &r->finding, &run, false);
    b->same = r->same.known;
    b->no_difference = r->same.known && r->same.low <= 1 && r->same.high >= 1;
    b->kept = r->kept;
    if (around.others == 0 && spdl__finding_has(&r->finding)) {
        const spdl_interval truth = truth_of(is, &r->finding);
        b->said = r->finding.gain;
        b->truth = truth.value;
        b->true_low = truth.low;
        b->true_high = truth.high;
        if (r->measured.known) {
            b->measured = r->measured.value;
            b->low = r->measured.low;
            b->high = r->measured.high;
        }
    }
    b->others = around.others == 0 ? bench_others(&begun) : 0;
    b->disturbed = b->others > DISTURBED;
    around_ends(&around);
    return NULL;
}

/* A disturbed repeat is made once more. */
static const char *run_calm(repeat *best, const planted *is) {
    static repeat again;
    const char *reason = run_repeat(best, is);
    if (reason != NULL || best->is.disturbed == 0) return reason;
    reason = run_repeat(&again, is);
    if (reason == NULL && again.is.others < best->is.others) *best = again;
    return reason;
}

static void write_repeat(const repeat *one, FILE *raw) {
    static char json[1 << 16];
    const brief *b = &one->is;
    const char *comma = ",\"sum\":[";
    spdl__doctor_json(&one->report, json, sizeof json);
    json[strcspn(json, "\n")] = '\0';
    fprintf(raw, "{\"program\":\"%s\"", b->program);
#define BRIEF_WRITE(key) fprintf(raw, "%s%.6g", comma, b->key), comma = ",";
    BRIEF_KEYS(BRIEF_WRITE)
    fprintf(raw, "],\"report\":%s}\n", json);
    fflush(raw);
}

/* Adds what was wrong, and what was said and is true, to the lines of a row. */
static void note_repeat(const repeat *one, char *more, size_t bytes) {
    const brief *b = &one->is;
    if (b->verdict < 0.5)
        snprintf(more + strlen(more), bytes - strlen(more), "    verdict: %.300s\n", one->verdict);
    if (b->doctor < 0.5)
        snprintf(more + strlen(more), bytes - strlen(more), "    doctor: %.300s\n",
                 one->report.verdict);
    if (b->truth > 0)
        snprintf(more + strlen(more), bytes - strlen(more),
                 "    said %.2fx, measured %.2fx (%.2f to %.2f), true %.2fx (%.2f to %.2f)\n",
                 b->said, b->measured, b->low, b->high, b->truth, b->true_low, b->true_high);
}

/* The lines of write_repeat. */
static void read_briefs(const char *path) {
    static char line[1 << 17];
    FILE *from = fopen(path, "r");
    if (from == NULL) bench_fail("cannot read %s", path);
    while (brief_count < BRIEFS_MOST && fgets(line, sizeof line, from) != NULL) {
        const char *at = strstr(line, "\"sum\":[");
        brief *b = &briefs[brief_count++];
        if (at == NULL || sscanf(line, "{\"program\":\"%23[^\"]", b->program) != 1)
            bench_fail("%s has a line that is none of --raw", path);
        at += 6;
#define BRIEF_READ(key) at += strcspn(at, "[,") + 1; b->key = strtod(at, NULL);
        BRIEF_KEYS(BRIEF_READ)
    }
    (void)fclose(from);
}

/* ---- what is printed ---- */

static struct { int programs, verdict, doctor, worse; } right;

static void row_program(size_t program, FILE *raw) {
    const planted *is = &planted_programs[program];
    char note_text[64], json[64], more[8192] = "";
    const bench_row row = { is->name, "right", "verdict", true, 0.95, false, 0 };
    const bench_note note = { note_text, more, json };
    double sums[2] = { 0, 0 }, others = 0;
    int i, all = 0, disturbed = 0;
    static repeat one;
    if (!bench_wanted(is->name)) return;
    for (i = 0; asked.sum == NULL && i < asked.repeats; ++i) {
        const char *reason;
        if (brief_count == BRIEFS_MOST) bench_fail("too many repeats");
        bench_now_with("the doctor");
        alarm(2 * (BENCH_HANG_SECONDS + 6 * (unsigned)asked.seconds));
        reason = run_calm(&one, is);
        if (reason == NULL) {
            briefs[brief_count++] = one.is;
            if (raw != NULL) write_repeat(&one, raw);
            note_repeat(&one, more, sizeof more);
            continue;
        }
        fprintf(bench_opt.json ? stderr : stdout, "%-22s skipped: %s\n", is->name, reason);
        return;
    }
    for (i = 0; i < brief_count; ++i) {
        if (strcmp(briefs[i].program, is->name) != 0) continue;
        ++all;
        sums[0] += briefs[i].verdict;
        sums[1] += briefs[i].doctor;
        others += briefs[i].others;
        disturbed += briefs[i].disturbed > 0;
    }
    if (all == 0) return;
    ++right.programs;
    right.verdict += sums[0] > all / 2.0;
    right.doctor += sums[1] > all / 2.0;
    right.worse += sums[1] < sums[0];
    snprintf(note_text, sizeof note_text, disturbed > 0 ? "of %d, %d disturbed" : "of %d", all,
             disturbed);
    snprintf(json, sizeof json, ",\"repeats\":%d,\"others\":%.3g", all, others / all);
    bench_print_noted(&row, sums[1] / all, sums[0] / all, NULL, &note);
}

/* |said / truth - 1| in percent. */
static void row_errors(const char *what, size_t at, double goal_90, double goal_most) {
    static double error[BRIEFS_MOST];
    const struct { const char *name; double quantile, goal; } kinds[] = {
        { "p50", 0.5, 0 }, { "p90", 0.9, goal_90 }, { "max", 1, goal_most }
    };
    char name[40], text[32];
    const bench_note note = { text, NULL, NULL };
    int i, count = 0;
    for (i = 0; i < brief_count; ++i) {
        double said;
        memcpy(&said, (const char *)&briefs[i] + at, sizeof said);
        if (said <= 0 || briefs[i].truth <= 0) continue;
        said = 100 * (said / briefs[i].truth - 1);
        error[count++] = said < 0 ? -said : said;
    }
    snprintf(text, sizeof text, "of %d", count);
    for (i = 0; i < 3; ++i) {
        const bench_row row = { name, "%", NULL, false, kinds[i].goal, false, 0 };
        snprintf(name, sizeof name, "%s_err_%s", what, kinds[i].name);
        if (bench_opt.list) puts(name);
        else if (count > 0)
            bench_print_noted(&row, bench_quantile(error, (size_t)count, kinds[i].quantile), 0,
                              NULL, &note);
    }
}

/* `many` of `all`. A goal of 0: there must be none; below 0: no goal. */
static void row_share(const char *name, int many, int all, double goal) {
    const bool none = goal == 0;
    const bench_row row = { name, none ? "cases" : "share", NULL, !none, goal > 0 ? goal : 0, none,
                            0 };
    char text[32];
    const bench_note note = { text, NULL, NULL };
    snprintf(text, sizeof text, "%d of %d", many, all);
    if (bench_opt.list) puts(name);
    else if (all > 0)
        bench_print_noted(&row, none ? many : (double)many / all, 0, NULL, &note);
}

static void rows_of_all(void) {
    int i, intervals = 0, meet = 0, same = 0, none = 0, kept = 0, worse = 0, said = 0, bounds = 0;
    for (i = 0; i < brief_count; ++i) {
        const brief *b = &briefs[i];
        same += b->same > 0;
        none += b->no_difference > 0;
        kept += b->kept > 0;
        worse += b->kept > 0 && b->truth > 0 && b->true_high < 1;
        said += b->said > 0 && b->truth > 0;
        bounds += b->said > 0 && b->truth > 0 && 1.03 * b->said >= b->true_low;
        if (b->measured <= 0 || b->truth <= 0) continue;
        ++intervals;
        meet += b->low <= b->true_high && b->true_low <= b->high;
    }
    row_errors("said", offsetof(brief, said), 0, 0);
    row_errors("measured", offsetof(brief, measured), 8, 15);
    row_share("aa_no_difference", none, same, 0.95);
    row_share("kept_and_worse", worse, kept, 0);
    row_share("verdict_right", right.verdict, right.programs, -1);
    row_share("doctor_right", right.doctor, right.programs, 0.95);
    row_share("said_is_a_bound", bounds, said, 0.95);
    row_share("doctor_worse", right.worse, right.programs, 0);
    row_share("intervals_hold", meet, intervals, 0.9);
}

/* ---- what a doctor costs that is done ---- */

static void row_overhead(void) {
    static const planted quick = { "unused_overhead_pct", "source list; pipe a compute=1;"
                                   "pipe b compute=1; pipe c compute=1; trainer sink=64",
                                   0, 0, 0, NULL };
    const bench_row row = { quick.name, "%", NULL, false, 0, false, 0 };
    static planted_run run[2];
    spdl_doctor_desc doctor;
    spdl_interval is;
    char text[64];
    const bench_note note = { text, NULL, NULL };
    if (!bench_wanted(quick.name) || asked.sum != NULL) return;
    memset(&doctor, 0, sizeof doctor);
    doctor.seconds = 0.05; /* too short for a trial: the rows stay as they are */
    doctor.quiet = true;
    open_or_fail(&run[0], &quick, NULL, &doctor);
    open_or_fail(&run[1], &quick, NULL, NULL);
    BENCH_CHECK(spdl_doctor_run(run[0].pipeline, planted_step, &run[0]) == SPDL_OK);
    is = compared(run, bench_opt.quick ? 6 : 20);
    planted_close(&run[0]);
    planted_close(&run[1]);
    snprintf(text, sizeof text, "%+.1f to %+.1f", 100 * (is.low - 1), 100 * (is.high - 1));
    bench_print_noted(&row, 100 * (is.value - 1), 0, NULL, &note);
}

/* ---- options ---- */

/* Takes those that bench_start does not know out of argv. */
static int take_options(int argc, char **argv) {
    int i, count = 1;
    for (i = 1; i < argc; ++i) {
        const bool value = i + 1 < argc;
        if (value && strcmp(argv[i], "--raw") == 0) asked.raw = argv[++i];
        else if (value && strcmp(argv[i], "--sum") == 0) asked.sum = argv[++i];
        else if (value && strcmp(argv[i], "--seconds") == 0) asked.seconds = atof(argv[++i]);
        else if (value && strcmp(argv[i], "--watch") == 0) asked.watch = atof(argv[++i]);
        else argv[count++] = argv[i];
    }
    return count;
}

int main(int argc, char **argv) {
    FILE *raw = NULL;
    size_t i;
    bench_start("doctor", take_options(argc, argv), argv);
    asked.repeats = bench_opt.all ? REPEATS_MOST : 1;
    asked.windows = bench_opt.all ? 24 : 8;
    if (!(asked.seconds > 0)) asked.seconds = bench_opt.all ? 30 : bench_opt.quick ? 8 : 14;
    if (!(asked.watch > 0)) asked.watch = 2;
    if (asked.sum != NULL) {
        read_briefs(asked.sum);
    } else if (!bench_opt.list) {
        planted_calibrate();
        fprintf(bench_opt.json ? stderr : stdout,
                "%d programs, %d repeats of %g s and up to %d s for the truth: about %.0f min\n",
                (int)PLANTED_PROGRAMS, asked.repeats, asked.seconds, asked.windows,
                (double)PLANTED_PROGRAMS * asked.repeats *
                    (asked.seconds + asked.watch + asked.windows) / 60);
        fflush(stdout);
        if (asked.raw != NULL && (raw = fopen(asked.raw, "a")) == NULL)
            bench_fail("cannot write %s", asked.raw);
    }
    for (i = 0; i < PLANTED_PROGRAMS; ++i) row_program(i, raw);
    rows_of_all();
    row_overhead();
    if (raw != NULL) fclose(raw);
    return 0;
}
