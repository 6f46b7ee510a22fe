/* The doctor's report as text and as JSON, what its experiments make of a finding, and whole
   examinations of programs with a planted limit. */
#define SPDL__WINDOW_NS 100000000
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "test.h"
#include "../bench/doctor_programs.h"

static bool says(const char *text, const char *words) { return strstr(text, words) != NULL; }

static spdl_interval around(double value, double off) {
    const spdl_interval is = { value, value - off, value + off, 9, true };
    return is;
}

static spdl__doctor_report report_of_three(void) {
    static const char *const names[] = { "list", "read", "decode" };
    spdl__doctor_report r;
    memset(&r, 0, sizeof r);
    r.tried = true;
    snprintf(r.name, sizeof r.name, "train");
    snprintf(r.verdict, sizeof r.verdict,
             "The consumer waited 76 %% of its time: stage 2 'decode' was busy 97 %% of the time. "
             "Write .concurrency = 4: measured 1.90x (1.80 to 2.00).");
    r.finding.limit = SPDL_LIMIT_CONCURRENCY;
    r.finding.stage = 2;
    r.finding.concurrency[2] = 4;
    r.finding.gain = 1.93;
    r.measured = around(1.9, 0.1);
    r.seconds = 30.1;
    r.workers = 4;
    r.cores = 2;
    r.cores_used = 0.25;
    r.step_ns = 1e6;
    r.today = 245;
    r.ceiling = 1000;
    r.waiting = 0.755;
    r.same = around(0.997, 0.01);
    r.rounds = 12;
    r.dropped = 1;
    r.row_count = 3;
    for (int i = 0; i < 3; ++i) {
        snprintf(r.row[i].name, sizeof r.row[i].name, "%s", names[i]);
        r.row[i].kind = i ? SPDL_KIND_PIPE : SPDL_KIND_SOURCE;
        r.row[i].concurrency = i ? 2 : 1;
        r.row[i].mean_ns = i * 4e6;
        r.row[i].blocked_ns = r.row[i].mean_ns;
    }
    r.row[2].method = SPDL__DOCTOR_SLOWED;
    r.row[2].delay_ns = 1.6e6;
    r.row[2].asleep = around(0.83, 0.02);
    r.row[1].method = SPDL__DOCTOR_REPLAYED;
    r.row[1].replayed = around(1.01, 0.02);
    return r;
}

static void a_report_is_read_at_once(void) {
    static const char expected[] =
        "spdl doctor: train: The consumer waited 76 % of its time: stage 2 'decode' was "
        "busy 97 % of the time. Write .concurrency = 4: measured 1.90x (1.80 to 2.00).\n"
        "30.1 s, 12 rounds (1 made again), 4 workers, 0.25 of 2 processors used, 0.00 by "
        "others.\n"
        "\n"
        "  row              conc    mean  cpu runq  asl    experiment      throughput\n"
        "  consumer            1 1.00 ms                   alone           1.00k/s\n"
        "> decode              2 8.00 ms   0%   0% 100%    asleep +20 %    -17 % (-19 to -15)\n"
        "  read                2 4.00 ms   0%   0% 100%    replayed        1.01x (0.99 to 1.03)\n"
        "  as it is: 245/s; the same again: -0 % (-1 to +1)\n"
        "The consumer waited 75.5 % of its time. Without any loading: 1.00k/s.\n";
    spdl__doctor_report r = report_of_three();
    char text[4000];
    CHECK_EQ(spdl__doctor_text(&r, text, sizeof text), strlen(expected));
    CHECK_STR(text, expected);
    CHECK_EQ(spdl__doctor_text(&r, NULL, 0), strlen(expected));
    r.kept = true;
    spdl__doctor_text(&r, text, sizeof text);
    CHECK(says(text, "in force for the rest"));
}

/* Numbers that are not known, one by one. */
static void a_report_may_lack_numbers(void) {
    static const struct { double value; const char *words; } results[] = {
        { 0, "same again: -\n" }, { -1, "same again: -\n" }, { 2e4, "same again: -\n" },
        { 1.5, "same again: +50 %\n" }
    };
    spdl__doctor_report r = report_of_three();
    char text[4000];
    r.same.known = false;
    for (size_t i = 0; i < sizeof results / sizeof results[0]; ++i) {
        r.same.value = results[i].value;
        spdl__doctor_text(&r, text, sizeof text);
        CHECK(says(text, results[i].words));
    }
    r = report_of_three();
    r.rounds = r.workers = 1;
    r.ceiling = 0;
    r.finding.stage = 0; /* which has no times */
    r.row[2].delay_ns = 100 * r.row[2].mean_ns; /* one of a line that is not the first */
    r.row[2].replayed = around(1.2, 0.1);
    spdl__doctor_text(&r, text, sizeof text);
    CHECK(says(text, ", 1 round (1 made again), 1 worker, "));
    CHECK(says(text, "  alone           -\n") && !says(text, "Without any loading"));
    CHECK(says(text, "> list                1       -    -    -    -   \n"));
    CHECK(says(text, "replayed        1.20x (1.10 to 1.30)\n" /* 48 columns */
                     "                                                 asleep          "));
    r.cached = around(1.4, 0.1);
    r.name[0] = '\0';
    spdl__doctor_text(&r, text, sizeof text);
    CHECK(says(text, "on kept items   1.40x (1.30 to 1.50)\n") && !says(text, " alone "));
    CHECK(says(text, "spdl doctor: The consumer"));
    r.rounds = 0;
    r.replays = true;
    spdl__doctor_text(&r, text, sizeof text);
    CHECK(says(text, " 0 rounds") && says(text, "is void.\n") && !says(text, "throughput"));
}

static void a_report_is_a_line_of_json(void) {
    const spdl__doctor_report r = report_of_three();
    char json[8000];
    const int length = spdl__doctor_json(&r, json, sizeof json);
    CHECK(length < (int)sizeof json && strchr(json, '\n') == json + length - 1);
    CHECK(says(json, "{\"schema\":\"spdl.doctor.1\",\"version\":\""));
    CHECK(says(json, "\"pipeline\":\"train\"") && says(json, "\"seconds\":30.1,"));
    CHECK(says(json, "\"finding\":{\"limit\":\"concurrency\",\"stage\":2,"
                     "\"concurrency\":{\"2\":4},"));
    CHECK(says(json, "\"measured\":{\"value\":1.9,\"low\":1.8,\"high\":2,\"rounds\":9}"));
    CHECK(says(json, "\"cached\":{\"value\":0,\"low\":null,\"high\":null,\"rounds\":0}"));
    CHECK(says(json, "\"name\":\"decode\",\"kind\":\"pipe\",") && says(json, "\"slowed\""));
}

/* The finding of a row with these numbers, after a ladder with these responses; `gain` was
   promised, and the longest call took `slow` times as long as half of them. */
static spdl__found doubted_of(spdl_limit limit, int concurrency, double load, double asleep,
                              double gain, int slow) {
    static spdl__doctor d;
    spdl_stage_stats *stage = &d.seen.stage[1];
    memset(&d, 0, sizeof d);
    d.seen.stage_count = 2;
    d.seen.workers = 8;
    d.seen.elapsed_ns = 1000000000;
    d.seen.delivered = 100;
    stage->kind = SPDL_KIND_PIPE;
    stage->concurrency = concurrency;
    stage->busy_ns = (uint64_t)(load * concurrency * 1e9);
    stage->blocked_ns = stage->busy_ns;
    stage->tasks = 100;
    d.seen.stage[0].concurrency = 1;
    d.found.is.limit = limit;
    d.found.is.stage = 1;
    d.found.is.concurrency[1] = limit == SPDL_LIMIT_CONCURRENCY ? 2 * concurrency : 0;
    d.found.is.gain = gain;
    stage->p50_ns = 1000000;
    stage->max_ns = (uint64_t)slow * stage->p50_ns;
    d.report.row_count = 2;
    d.report.row[1].method = SPDL__DOCTOR_SLOWED;
    d.report.row[1].concurrency = concurrency;
    d.report.row[1].load = load;
    d.report.row[1].asleep = around(asleep, 0.03);
    spdl__doctor_doubts(&d);
    return d.found;
}

/* The next limit is near. */
static spdl__found doubted(spdl_limit limit, int concurrency, double load, double asleep) {
    return doubted_of(limit, concurrency, load, asleep, 1.1, 2);
}

static void a_delay_that_costs_nothing_is_a_lock(void) {
    spdl__found f = doubted(SPDL_LIMIT_CONCURRENCY, 4, 0.99, 1);
    CHECK(f.is.limit == SPDL_LIMIT_LOCK && !spdl__finding_has(&f.is));
    f = doubted(SPDL_LIMIT_WORKERS, 4, 0.99, 0.97);
    CHECK(f.is.limit == SPDL_LIMIT_LOCK);
    f = doubted(SPDL_LIMIT_CONCURRENCY, 4, 0.99, 0.84); /* it follows */
    CHECK(f.is.limit == SPDL_LIMIT_CONCURRENCY && f.is.concurrency[1] == 8);
    f = doubted(SPDL_LIMIT_CONCURRENCY, 4, 0.7, 1); /* it had time left */
    CHECK(f.is.limit == SPDL_LIMIT_CONCURRENCY);
    f = doubted(SPDL_LIMIT_CONCURRENCY, 4, 0.895, 1.01); /* but not that much */
    CHECK(f.is.limit == SPDL_LIMIT_LOCK);
    f = doubted(SPDL_LIMIT_CONCURRENCY, 4, 0.91, 0.93); /* it follows as far as it must */
    CHECK(f.is.limit == SPDL_LIMIT_CONCURRENCY);
    f = doubted_of(SPDL_LIMIT_CONCURRENCY, 4, 0.83, 0.99, 2, 2); /* none of it was left */
    CHECK(f.is.limit == SPDL_LIMIT_LOCK);
    f = doubted_of(SPDL_LIMIT_CONCURRENCY, 4, 0.83, 0.99, 2, 20); /* slow calls hide it */
    CHECK(f.is.limit == SPDL_LIMIT_CONCURRENCY);
    f = doubted_of(SPDL_LIMIT_WORKERS, 4, 0.4, 0.93, 2, 2); /* of all workers it has less */
    CHECK(f.is.limit == SPDL_LIMIT_WORKERS);
    f = doubted(SPDL_LIMIT_CONCURRENCY, 4, 0.99, 0.9); /* on average it follows */
    CHECK(f.is.limit == SPDL_LIMIT_CONCURRENCY);
    f = doubted(SPDL_LIMIT_CONCURRENCY, 1, 0.99, 1); /* nothing to wait for */
    CHECK(f.is.limit == SPDL_LIMIT_NOT_KNOWN && f.is.stage == -1);
}

static int tried_stage;
static uint64_t tried_runnable; /* of 100 ns */

/* Settings of a row: tried, and this came of it. */
static spdl__found tried_for(int rounds, double gain, double measured, double off,
                             int concurrency) {
    static spdl__doctor d;
    static spdl_pipeline p;
    spdl__rounds *r = &d.rounds;
    memset(&d, 0, sizeof d);
    d.p = &p;
    d.found.is.stage = tried_stage;
    d.seen.stage[0].busy_ns = 100;
    d.seen.stage[0].runnable_ns = tried_runnable;
    d.seen.stage_count = 1;
    d.seen.stage[0].concurrency = d.report.row[0].concurrency = concurrency;
    d.seen.stage[0].kind = SPDL_KIND_PIPE;
    d.found.is.limit = SPDL_LIMIT_CONCURRENCY;
    d.found.is.concurrency[0] = 2 * concurrency;
    d.found.is.gain = gain;
    d.arm[2].result = &d.report.measured;
    r->arms = 3;
    r->round = rounds;
    d.found.doctor = d.found.raises = true;
    for (int i = 0; i < rounds; ++i)
        for (int k = 0; k < 3; ++k) {
            r->ns[k][i] = 1e9;
            r->items[k][i] = 100 * (k == 2 ? measured * (1 + off * (i % 2 ? 1 : -1)) : 1);
        }
    spdl__doctor_tried(&d);
    CHECK_EQ(d.report.kept, d.report.measured.low > 1 && d.report.measured.value > 1.03);
    return d.found;
}

static spdl__found tried(double gain, double measured, double off, int concurrency) {
    return tried_for(8, gain, measured, off, concurrency);
}

static void what_was_tried_is_said(void) {
    static spdl_stats s;
    spdl__found f = tried(2, 1.9, 0.02, 1);
    char buffer[600];
    spdl__text text = spdl__text_start(buffer, sizeof buffer);
    CHECK(f.is.limit == SPDL_LIMIT_CONCURRENCY && f.measured != NULL);
    s.stage_count = 1;
    s.stage[0].concurrency = 1;
    spdl__verdict_settings(&text, &s, &f);
    CHECK(says(buffer, " Write .concurrency = 2: measured 1.90x (1.8"));
    f = tried(2, 1, 0.02, 4); /* it should have helped */
    CHECK(f.is.limit == SPDL_LIMIT_LOCK);
    CHECK(!spdl__finding_has(&f.is) && f.is.gain == 0);
    f = tried(2, 1, 0.02, 1); /* a single call waits for nothing */
    CHECK(f.is.limit == SPDL_LIMIT_CONCURRENCY);
    f = tried(1.2, 1.02, 0.2, 4); /* perhaps it does */
    CHECK(f.is.limit == SPDL_LIMIT_CONCURRENCY);
    tried_runnable = 50; /* processors were not there */
    f = tried(2, 1, 0.02, 4);
    CHECK(f.is.limit == SPDL_LIMIT_CONCURRENCY);
    tried_runnable = 0;
    tried_stage = -1; /* of no row */
    f = tried(2, 1, 0.02, 4);
    CHECK(f.is.limit == SPDL_LIMIT_CONCURRENCY);
    tried_stage = 0;
    f = tried(1.05, 1, 0.02, 4); /* not by much */
    CHECK(f.is.limit == SPDL_LIMIT_CONCURRENCY);
    text = spdl__text_start(buffer, sizeof buffer);
    spdl__verdict_settings(&text, &s, &f);
    CHECK(says(buffer, " .concurrency = 8 was tried and does not help: measured 1.00x"));
    f = tried(1.05, 1.06, 0.2, 4); /* as far off as chance goes */
    text = spdl__text_start(buffer, sizeof buffer);
    spdl__verdict_settings(&text, &s, &f);
    CHECK(says(buffer, " was tried, and it is not decided: measured 1.0"));
    f = tried_for(2, 2, 1.5, 0, 4); /* too short for an interval */
    text = spdl__text_start(buffer, sizeof buffer);
    spdl__verdict_settings(&text, &s, &f);
    CHECK_STR(buffer, " .concurrency = 8 was tried, and it is not decided: measured 1.50x in 2 "
                      "rounds.");
    CHECK(!spdl__found_fails(&f) && f.is.limit == SPDL_LIMIT_CONCURRENCY);
    f = tried_for(0, 2, 1, 0, 4);
    CHECK(f.is.limit == SPDL_LIMIT_CONCURRENCY && f.measured == NULL);
}

/* A row with this load and these rounds; what the verdict says of them. */
static const char *verdict_of(int rounds, int buffer_size, bool ended) {
    static spdl__doctor d;
    spdl_stage_stats *stage = &d.seen.stage[1];
    memset(&d, 0, sizeof d);
    d.ended = ended;
    d.seen.stage_count = d.report.row_count = 2;
    d.seen.workers = 8;
    d.seen.elapsed_ns = d.seen.wait_ns = 1000000000;
    d.seen.delivered = stage->tasks = 100;
    stage->kind = SPDL_KIND_PIPE;
    stage->concurrency = d.seen.stage[0].concurrency = 1;
    stage->busy_ns = stage->blocked_ns = 950000000;
    stage->mean_ns = 9500000;
    snprintf(stage->name, sizeof stage->name, "read");
    d.found = spdl__find(&d.seen);
    d.found.doctor = true;
    if (buffer_size > 0) {
        spdl__finding_clear(&d.found.is);
        d.found.is.buffer_size = buffer_size;
    }
    d.report.rounds = d.rounds.round = rounds;
    spdl__doctor_verdict(&d);
    return d.report.verdict;
}

static void what_was_not_measured_is_said(void) {
    static const char slow[] = "cannot slow stage 1 'read': it does not know";
    const char *text = verdict_of(9, 0, false);
    CHECK(says(text, "stage 1 'read' was busy 95 %") && says(text, slow));
    CHECK(!says(text, "There is no interval"));
    CHECK(!says(verdict_of(9, 12, false), slow)); /* a buffer holds no call up */
    text = verdict_of(0, 0, false);
    CHECK(!says(text, slow) && says(text, "0 rounds are too few: give it more seconds."));
    CHECK(says(verdict_of(1, 0, true), "1 round is too few, and the items have ended."));
}

/* Without `raise` none, whatever set_concurrency has left room for. */
static void settings_that_may_be_tried(void) {
    static spdl__doctor d;
    static spdl_pipeline p;
    static spdl__node node;
    d.p = &p;
    p.node = &node;
    p.count = 1;
    node.most = 4;
    d.found.is.concurrency[0] = 2;
    CHECK(!spdl__doctor_may_try(&d));
    d.plan.desc.raise = true;
    CHECK(spdl__doctor_may_try(&d));
    d.found.is.concurrency[0] = 5;
    CHECK(!spdl__doctor_may_try(&d));
    d.found.is.concurrency[0] = 2;
    d.found.is.buffer_size = 8; /* cannot change while it runs */
    CHECK(!spdl__doctor_may_try(&d));
}

/* An advice of 16 times as many calls is tried as far as the pipeline goes. */
static void settings_are_reduced_to_those_that_can_be(void) {
    static spdl__doctor d;
    static spdl_pipeline p;
    static spdl__node node[2];
    spdl_stage_stats *stage = &d.seen.stage[1];
    d.p = &p;
    p.node = node;
    p.count = 2;
    p.spare = 2;
    d.report.workers = d.seen.workers = 2;
    d.seen.stage_count = 2;
    d.seen.elapsed_ns = 1000000000;
    d.seen.delivered = 100;
    d.seen.stage[0].concurrency = node[0].most = 1;
    d.seen.stage[0].busy_ns = 1000000;
    stage->kind = SPDL_KIND_PIPE;
    stage->concurrency = 1;
    stage->busy_ns = stage->blocked_ns = 990000000;
    d.limit[0] = d.limit[1] = 1;
    for (int k = 0; k < 3; ++k) { /* by the row, by the threads, where workers are 0 */
        node[1].most = k == 0 ? 2 : 9;
        d.seen.next_works = d.seen.default_workers = k == 2;
        memset(&d.found, 0, sizeof d.found);
        d.found.is.stage = 1;
        d.found.is.limit = SPDL_LIMIT_CONCURRENCY;
        spdl__find_settings(&d.seen, &d.found, true);
        CHECK_EQ(d.found.is.concurrency[1], 16);
        d.plan.desc.raise = false; /* a doctor that only says it */
        spdl__doctor_reduce(&d);
        CHECK_EQ(d.found.is.concurrency[1], 16);
        d.plan.desc.raise = true;
        spdl__doctor_reduce(&d);
        CHECK_EQ(d.found.is.concurrency[1], k == 0 ? 2 : k == 1 ? 4 : 5);
        CHECK_EQ(d.found.is.workers, k == 2 ? 0 : 4);
        CHECK(d.found.is.gain > (k == 0 ? 1.9 : 3.9) && d.found.is.gain < 5.1);
        CHECK_EQ(spdl__doctor_more(&d), 2);
    }
    d.limit[1] = 5; /* nothing can be tried: the advice stays */
    d.found.is.concurrency[1] = 16;
    spdl__doctor_reduce(&d);
    CHECK_EQ(d.found.is.concurrency[1], 16);
    CHECK(!spdl__doctor_may_try(&d));
}

/* What it has tried and measured it does not doubt. */
static void what_was_measured_is_not_doubted(void) {
    static const spdl_interval gain = { 1.25, 1.23, 1.27, 9, true };
    static spdl__doctor d;
    d.seen.stage_count = d.report.row_count = 1;
    d.seen.workers = 8;
    d.seen.elapsed_ns = d.seen.wait_ns = 1000000000;
    d.seen.delivered = 100;
    d.seen.stage[0].concurrency = 8;
    d.found.is.limit = SPDL_LIMIT_CONCURRENCY;
    d.found.is.concurrency[0] = 11;
    d.found.measured = &gain;
    d.found.doctor = d.found.raises = true;
    d.report.rounds = d.rounds.round = 9;
    spdl__doctor_verdict(&d);
    CHECK(says(d.report.verdict, "Write .concurrency = 11: measured 1.25x (1.23 to 1.27)."));
    CHECK(!says(d.report.verdict, "cannot slow"));
}

/* --- whole examinations --- */

/* Examines a program until its report has these words, with more seconds each time. On a machine
   that others use the last report may say so: that shows nothing. */
static void heals(const planted *is, const char *words) {
    static planted_run run;
    static spdl__doctor_report report;
    spdl_doctor_desc doctor = { .seconds = 6, .raise = true, .quiet = true };
    spdl_error error;
    planted_calibrate();
    for (; doctor.seconds <= 24; doctor.seconds *= 2) {
        REQUIRE(planted_open(&run, is, NULL, &doctor, &error) == SPDL_OK);
        CHECK_EQ(spdl_doctor_run(run.pipeline, planted_step, &run), SPDL_OK);
        report = run.pipeline->doctor->report;
        planted_close(&run);
        if (says(report.verdict, words)) return;
        printf("    %s\n", report.verdict);
    }
    if (report.others_used > 0.5 ||
        (report.others_used > 0.1 && (report.finding.limit == SPDL_LIMIT_FOREIGN ||
                                      report.finding.limit == SPDL_LIMIT_MACHINE)))
        TEST_SKIP("others use this machine");
    CHECK(says(report.verdict, words));
}

static void programs_that_sleep_are_healed(void) {
    TEST_JUDGES_COSTS();
    static const planted is = { "sleep_1", "source list; pipe read sleep=3000; trainer sleep=500",
                                0, 0, 0, NULL };
    heals(&is, ": measured "); /* how many times as many calls depends on the workers */
}

/* Two calls take turns with the lock. With more, results come out of order, which hides it. */
static void programs_with_a_lock_are_told(void) {
    TEST_JUDGES_COSTS();
    static const planted is = { "lock_of_two", "source list; pipe read calls=2 sleep=3100 "
                                "locked=1; pipe decode compute=500; trainer sleep=500 workers=6",
                                0, 0, 0, NULL };
    heals(&is, "Its calls wait for each other, as for a lock");
}

static void programs_without_workers_are_healed(void) {
    TEST_JUDGES_COSTS();
    static const planted is = { "workers_2", "source list; pipe read calls=4 sleep=4000 copies; "
                                "pipe decode compute=500 copies; trainer sleep=300 workers=2",
                                0, 0, 0, NULL };
    heals(&is, "workers = 4: measured ");
}

/* Items a second of a program without a doctor. */
static double plain_rate(const planted *is, double seconds) {
    static planted_run run;
    const uint64_t begun = spdl_time_ns();
    spdl_error error;
    long items = 0;
    void *item;
    REQUIRE(planted_open(&run, is, NULL, NULL, &error) == SPDL_OK);
    for (; (double)(spdl_time_ns() - begun) < 1e9 * seconds; ++items) {
        REQUIRE(planted_next(&run, &item) == SPDL_OK);
        planted_step(&run, item);
        planted_free(&run, item);
    }
    planted_close(&run);
    return 1e9 * (double)items / (double)(spdl_time_ns() - begun);
}

/* Each tenth step is long. A window can begin at any step, so rates are those of the program, and
   equal arms are equal. An interval of 95 % misses the value one time in 20: there is a second
   examination if need be. */
static void programs_with_a_period(void) {
    TEST_JUDGES_COSTS();
    static const planted is = { "period", "source list; pipe load sleep=8000; trainer sleep=500 "
                                "every=10 late=40000", 0, 0, 0, NULL };
    const spdl_doctor_desc doctor = { .seconds = 8, .quiet = true };
    static planted_run run;
    static spdl__doctor_report r;
    const double rate = plain_rate(&is, 3);
    spdl_error error;
    bool rates = false, equal = false;
    for (int i = 0; i < 2; ++i) {
        REQUIRE(planted_open(&run, &is, NULL, &doctor, &error) == SPDL_OK);
        CHECK_EQ(spdl_doctor_run(run.pipeline, planted_step, &run), SPDL_OK);
        r = run.pipeline->doctor->report;
        planted_close(&run);
        rates = r.today > 0.88 * rate && r.today < 1.12 * rate;
        equal = r.same.known && r.same.low < 1.05 && r.same.high > 0.95;
        if (rates && equal) return;
        printf("    %.1f/s, with the doctor %.1f/s; the same again %.2f to %.2f\n", rate, r.today,
               r.same.low, r.same.high);
    }
    if (r.others_used > 0.5) TEST_SKIP("others use this machine");
    CHECK(rates);
    CHECK(equal);
}

TEST_TABLE(doctor_text) {
    TEST_CASE(a_report_is_read_at_once),
    TEST_CASE(a_report_may_lack_numbers),
    TEST_CASE(a_report_is_a_line_of_json),
    TEST_CASE(a_delay_that_costs_nothing_is_a_lock),
    TEST_CASE(what_was_tried_is_said),
    TEST_CASE(what_was_not_measured_is_said),
    TEST_CASE(settings_that_may_be_tried),
    TEST_CASE(settings_are_reduced_to_those_that_can_be),
    TEST_CASE(what_was_measured_is_not_doubted),
    TEST_CASE(programs_that_sleep_are_healed),
    TEST_CASE(programs_with_a_lock_are_told),
    TEST_CASE(programs_without_workers_are_healed),
    TEST_CASE(programs_with_a_period),
    TEST_END,
};
