/* The verdict: its class, stage and cure, on numbers made up at the borders of each class, and on
   programs with a fault planted in them. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "test.h"
#ifdef __GLIBC__
#include <malloc.h>
#endif

static bool says(const char *text, const char *words) { return strstr(text, words) != NULL; }

static void sleep_us(int64_t us) { test_sleep_us(us); }

/* --- numbers made up --- */

/* A second of a list, a read and a decode; the trainer waits half of it. The machine has 8 cores of
   which 1 is used. */
static spdl_stats second(void) {
    static const char *const names[] = { "list", "read", "decode" };
    spdl_stats s;
    memset(&s, 0, sizeof s);
    s.elapsed_ns = s.process_ns = 1000000000;
    s.wait_ns = s.step_ns = 500000000;
    s.first_item_ns = 1000;
    s.delivered = 100;
    s.workers = 8;
    s.stage_count = 3;
    s.cores = 8;
    s.cores_allowed = 8;
    s.may_doctor = true;
    s.process_cpu_ns = 1000000000;
    s.others_cpu_ns = 1;
    for (int i = 0; i < 3; ++i) {
        spdl_stage_stats *stage = &s.stage[i];
        snprintf(stage->name, sizeof stage->name, "%s", names[i]);
        stage->kind = i == 0 ? SPDL_KIND_SOURCE : SPDL_KIND_PIPE;
        stage->concurrency = 1;
        stage->in_order = true;
        stage->tasks = stage->split_calls = 100;
        stage->busy_ns = stage->cpu_ns = 10000000;
        stage->p50_ns = stage->p99_ns = stage->max_ns = 100000;
        s.edge[i].buffer_size = 2;
    }
    return s;
}

/* Busy for so long, in `cpu` of it computing, the rest asleep. */
static void busy(spdl_stats *s, int i, double seconds, double cpu) {
    spdl_stage_stats *stage = &s->stage[i];
    stage->busy_ns = (uint64_t)(seconds * 1e9 + 0.5);
    stage->cpu_ns = (uint64_t)(cpu * seconds * 1e9 + 0.5);
    stage->blocked_ns = stage->busy_ns - stage->cpu_ns;
    stage->p50_ns = stage->p99_ns = stage->max_ns = stage->busy_ns / stage->tasks;
    stage->exposed_ns = 500000000;
}

static bool is(const spdl_stats *s, spdl_limit limit, int stage, const char *words) {
    char text[800];
    spdl_finding finding;
    const spdl_limit found = spdl_stats_find(s, &finding);
    const int row = finding.stage;
    spdl_stats_verdict(s, text, sizeof text);
    if (found == limit && row == stage && says(text, words) &&
        (limit != SPDL_LIMIT_NOT_KNOWN || !says(text, "Write ")))
        return true;
    printf("    class %d of row %d, not %d of %d, \"%s\":\n    %s\n", (int)found, row, (int)limit,
           stage, words, text);
    return false;
}

/* Whether the table has a share of over 100 %. */
static bool over_all(const spdl_stats *s) {
    char text[4000], share[8];
    bool over = false;
    spdl_stats_text(s, text, sizeof text);
    for (int i = 101; i < 500; ++i) {
        snprintf(share, sizeof share, " %d%%", i);
        over |= says(text, share);
    }
    return over;
}

static bool writes(const spdl_finding *f) {
    int settings = f->workers + f->buffer_size;
    for (int i = 0; i < SPDL_MAX_STAGES; ++i) settings += f->concurrency[i];
    return settings > 0;
}

static bool lacks(const spdl_stats *s, const char *words) {
    char text[800];
    spdl_stats_verdict(s, text, sizeof text);
    return !says(text, words);
}

#define DOUBT ". It gains less if its calls wait for each other."
#define TRY ". It gains less if its calls wait for each other. SPDL_DOCTOR=30,raise tries it."
#define AGAIN                                                                                      \
    ". If the last step gained nothing, take it back: its calls wait for each other. "             \
    "SPDL_DOCTOR=30 finds out."

/* 16 calls that sleep wake together. They wait for processors that are idle at other times, and a
   third of their places is held by results that wait for an earlier call. */
static void calls_that_wake_together(void) {
    spdl_stats s = second();
    s.default_workers = true;
    s.workers = 15;
    s.next_works = true;
    s.wait_ns = 990000000;
    s.step_ns = 10000000;
    s.cores = 2;
    s.cores_allowed = 2;
    s.process_cpu_ns = 700000000;
    s.others_cpu_ns = 0;
    s.stage[2].concurrency = 16;
    busy(&s, 2, 10.6, 0.06);
    s.stage[2].runnable_known = true;
    s.stage[2].runnable_ns = s.stage[2].busy_ns / 4;
    s.stage[2].blocked_ns -= s.stage[2].runnable_ns;
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 2, "busy 66 % of the time (concurrency 16), asleep. "
                                            "Write .concurrency = 92: up to 2x"));
    busy(&s, 2, 10.6, 0.6); /* as many that compute lack processors */
    s.stage[2].runnable_ns = s.stage[2].busy_ns / 4;
    s.stage[2].blocked_ns -= s.stage[2].runnable_ns;
    CHECK(is(&s, SPDL_LIMIT_MACHINE, 2, "waited for a processor, 25 %"));
}

static void concurrency_up_to_the_next_limit(void) {
    spdl_stats s = second();
    busy(&s, 2, 0.96, 1); /* not over twice as much as now */
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 2, "busy 96 % of the time (concurrency 1), computing. "
                                            "Write .concurrency = 2: up to 2x" TRY));
    s.step_ns = 240000000;
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 2, "Write .concurrency = 2: up to 2x" TRY));
    s.stage[2].concurrency = 4;
    busy(&s, 2, 3.84, 0.1);
    s.process_cpu_ns = 500000000;
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 2, "asleep. Write .concurrency = 17 and workers = 17: "
                                            "up to 4x" AGAIN));
    busy(&s, 1, 0.75, 0); /* another row is next */
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 2, "Write .concurrency = 6: up to 1.3x. If the last"));
    s.workers = 5;
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 2, "Write .concurrency = 6 and workers = 7: up to 1.3x"));
    s = second();
    busy(&s, 2, 0.96, 1);
    s.process_cpu_ns = 6000000000u; /* the processors are next */
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 2, "Write .concurrency = 2: up to 1.3x"));
    s.process_ns = 0; /* they are not known: one more */
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 2, "Write .concurrency = 2"));
}

static void two_that_are_as_busy(void) {
    spdl_finding f;
    spdl_stats s = second();
    busy(&s, 1, 0.95, 0);
    busy(&s, 2, 0.96, 0);
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 2, "Write .concurrency = 2 for stage 1 'read' and stage 2 "
                                            "'decode': up to 2x"));
    spdl_stats_find(&s, &f);
    CHECK(f.concurrency[1] == 2 && f.concurrency[2] == 2 && f.workers == 0);
    CHECK(f.gain > 1.9 && f.gain <= 2);
    s.stage[1].alone = true; /* it may not have more: little helps */
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 2, "Write .concurrency = 2: up to 1.05x. It gains less if "
                                            "its calls wait for each other, or stage 1 'read' "
                                            "keeps a pace."));
    busy(&s, 1, 0.98, 0);
    busy(&s, 2, 0.985, 0); /* nothing helps */
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 2, "(concurrency 1), asleep. More calls at a time would "
                                            "gain less than 3 %."));
    spdl_stats_find(&s, &f);
    CHECK(f.concurrency[1] == 0 && f.concurrency[2] == 0 && f.workers == 0 && f.gain == 0);
}

/* Also where all workers are in their calls. */
static void two_that_have_all_workers(void) {
    spdl_stats s = second();
    s.stage[1].concurrency = s.stage[2].concurrency = 4;
    busy(&s, 1, 3.9, 0);
    busy(&s, 2, 3.91, 0);
    CHECK(is(&s, SPDL_LIMIT_WORKERS, 2, "Write .concurrency = 8 for stage 1 'read' and stage 2 "
                                        "'decode' and workers = 16: up to 2x"));
}

/* All that are as busy have to change; each with its number. */
static void three_that_are_as_busy(void) {
    spdl_stats s = second();
    spdl_finding f;
    s.stage_count = 4;
    s.stage[3] = s.stage[2];
    s.edge[3] = s.edge[2];
    snprintf(s.stage[3].name, sizeof s.stage[3].name, "augment");
    s.step_ns = 100000000;
    busy(&s, 1, 0.95, 0.3);
    busy(&s, 2, 0.96, 0.3);
    busy(&s, 3, 0.95, 0.3);
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 2, "Write .concurrency = 2 for stage 1 'read' and stage 2 "
                                            "'decode' and stage 3 'augment': up to 2x"));
    s.stage[3].concurrency = 2;
    busy(&s, 3, 1.9, 0.3);
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 2, "Write .concurrency = 2 for stage 1 'read' and stage 2 "
                                            "'decode' and .concurrency = 4 for stage 3 'augment'"));
    spdl_stats_find(&s, &f);
    CHECK(f.concurrency[0] == 0 && f.concurrency[3] == 4);
    s.step_ns = 950000000; /* the consumer is next, in turn with them */
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 2, ".concurrency = 3 for stage 3 'augment': up to 1.05x"));
}

/* A setting is one that create takes, and at most twice what there is. */
static void settings_that_can_be_written(void) {
    spdl_stats s = second();
    spdl_finding f;
    s.workers = 4;
    s.step_ns = 200000000;
    s.stage[1].concurrency = 8; /* more than the workers can make */
    busy(&s, 1, 3.5, 0);
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 1, "(concurrency 8), asleep. Write .concurrency = 20 and "
                                            "workers = 20: up to 4.4x"));
    busy(&s, 1, 3.5, 0.3);
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 1, "(concurrency 8), asleep. Write workers = 8: up to"));
    s.workers = 200;
    s.stage[1].concurrency = 200;
    busy(&s, 1, 199, 0);
    CHECK(is(&s, SPDL_LIMIT_WORKERS, 1, "Write .concurrency = 255 and workers = 255: up to 1.3x"));
    s.workers = 255;
    s.stage[1].concurrency = 255;
    busy(&s, 1, 254, 0);
    CHECK(is(&s, SPDL_LIMIT_WORKERS, 1, "less than 3 %: there can be no more workers."));
    s.stage[1].deferred = true;
    s.stage[1].concurrency = 3000;
    busy(&s, 1, 2999, 0);
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 1, "Write .concurrency = 4096: up to 1.4x"));
    s.stage[1].concurrency = 4096; /* as many as there can be */
    busy(&s, 1, 3700, 0);
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 1, "More calls at a time would gain less than 3 %."));
    spdl_stats_find(&s, &f);
    CHECK(!writes(&f) && f.gain == 0);
    s.workers = 0;
    busy(&s, 1, 0.9, 0);
    s.stage[1].deferred = false;
    spdl_stats_find(&s, &f);
    s.may_doctor = false;
    s.next_works = true;
    CHECK(is(&s, SPDL_LIMIT_WORKERS, 1, "Write workers = 5: up to 5.6x"));
    CHECK(lacks(&s, "SPDL_DOCTOR")); /* which has no workers to try */
    s = second();
    busy(&s, 2, 0.95, 1);
    s.process_cpu_ns = 7300000000u;
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 2, "Write .concurrency = 2: up to 1.1x"));
}

/* A source with a thread of its own takes no worker away. */
static void threads_of_a_source(void) {
    spdl_stats s = second();
    s.workers = 2;
    s.stage[0].threads = 1;
    busy(&s, 1, 0.97, 0);
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 1, "asleep. Write .concurrency = 2: up to 2x"));
}

static void rows_that_may_be_the_limit(void) {
    spdl_stats s = second();
    busy(&s, 2, 0.80, 1);
    s.stage[2].exposed_ns = 0;
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 2, ""));
    busy(&s, 2, 0.79, 1); /* so the consumer's item has to have been there */
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 2, ""));
    s.stage[2].exposed_ns = 0;
    CHECK(is(&s, SPDL_LIMIT_NOT_KNOWN, -1, "not known: SPDL_DOCTOR=30 measures it."));
    busy(&s, 2, 0.49, 1);
    CHECK(is(&s, SPDL_LIMIT_NOT_KNOWN, -1, "no stage was busy more than 49 %"));
    s.stage[2].concurrency = 2; /* with two it is not that simple */
    busy(&s, 2, 1.58, 1);
    CHECK(is(&s, SPDL_LIMIT_NOT_KNOWN, -1, "no stage was busy more than 79 %"));
    s.delivered = 100000;
    s.stage[2].mean_ns = 15800000;
    CHECK(is(&s, SPDL_LIMIT_NOT_KNOWN, -1, "larger buffer_size (16 to 64), as items are short"));
    s.stage[2].mean_ns = 0; /* all of them are */
    CHECK(is(&s, SPDL_LIMIT_NOT_KNOWN, -1, "no call takes as long as handing an item on. Try "
                                           ".buffer_size = 32 in all rows and SPDL_SINK(32), or "
                                           "pass batches."));
    s.edge[2].buffer_size = 32;
    CHECK(is(&s, SPDL_LIMIT_NOT_KNOWN, -1, "handing an item on. Do more in one call, or pass"));
}

static void sleep_locks_serial_rows_and_sources(void) {
    spdl_stats s = second();
    busy(&s, 1, 0.97, 0.49);
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 1, "asleep. Write .concurrency = 2: up to 2x"));
    busy(&s, 1, 0.97, 0.51);
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 1, "computing"));
    s.stage[1].call_ns = s.stage[1].busy_ns - 1; /* of a call that still runs nothing is known */
    CHECK(lacks(&s, "computing"));
    s.stage[1].call_ns = 0;
    s.stage[1].concurrency = 4;
    s.workers = 4; /* all in calls */
    busy(&s, 1, 3.9, 0.15);
    CHECK(is(&s, SPDL_LIMIT_WORKERS, 1, AGAIN));
    s.stage[1].lock_found = true; /* by a doctor: it need not look like one */
    CHECK(is(&s, SPDL_LIMIT_LOCK, 1, "asleep. Its calls wait for each other, as for a lock, or"));
    s.workers = 8;
    CHECK(is(&s, SPDL_LIMIT_LOCK, 1, "asleep. Its calls wait for each other"));
    s = second();
    busy(&s, 1, 0.97, 1);
    s.stage[1].alone = true;
    s.stage[1].blocked_ns = 600000000;
    CHECK(is(&s, SPDL_LIMIT_SERIAL, 1, " If it keeps a rate, that is the limit. Else make it "
                                       "cheaper"));
    s.stage[1].blocked_ns = 0;
    CHECK(is(&s, SPDL_LIMIT_SERIAL, 1, "computing, one call at a time, as its row allows no more "
                                       "(.serial, .flush or .again). Make it cheaper, or split"));
    s = second();
    busy(&s, 0, 0.97, 0);
    CHECK(is(&s, SPDL_LIMIT_SERIAL, 0, "asleep, one call at a time. If it waits for its data or "
                                       "keeps a rate, that is the limit. Else move the waiting "
                                       "into a stage."));
    s.stage[0].from = true;
    CHECK(is(&s, SPDL_LIMIT_SERIAL, 0, "(concurrency 1). It waits for what it takes from: see the "
                                       "verdict of that pipeline."));
    s = second();
    busy(&s, 0, 0.97, 1);
    CHECK(is(&s, SPDL_LIMIT_SERIAL, 0, "computing, one call at a time. Move work from the source"));
    s = second();
    busy(&s, 2, 0.97, 1);
    s.minor_faults = 800000; /* 0.4 s of them */
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 2, "takes 8000 page faults for each item of the consumer: "
                                            "use memory again, such as by spdl_buffer. Write "));
    s.minor_faults = 400000;
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 2, "computing. Write"));
}

static void processors_that_are_used_up(void) {
    spdl_stats s = second();
    s.cores = 2;
    s.cores_allowed = 2;
    s.stage[2].concurrency = 2;
    busy(&s, 2, 1.8, 1);
    s.process_cpu_ns = 1850000000;
    CHECK(is(&s, SPDL_LIMIT_MACHINE, 2, "used up (1.85 of 2), most of all by stage 2 'decode'."));
    s.process_cpu_ns = 1820000000; /* not yet */
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 2, "Write .concurrency = 3: up to 1.1x"));
    s.process_cpu_ns = 1960000000;
    busy(&s, 2, 1.8, 0.4); /* and nothing is left that would be worth it */
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 2, "less than 3 %: 1.96 of 2 processors are used."));
    s.process_cpu_ns = 1850000000;
    busy(&s, 2, 0.8, 1); /* somebody else's threads in this process */
    CHECK(is(&s, SPDL_LIMIT_NOT_KNOWN, -1, "mostly outside of the stages"));
}

/* Other programs are the limit only for who waits for a processor. */
static void processors_that_others_have(void) {
    spdl_stats s = second();
    s.cores = 2;
    s.cores_allowed = 2;
    s.process_cpu_ns = 900000000;
    s.others_cpu_ns = 950000000;
    busy(&s, 2, 0.97, 0.9);
    s.stage[2].runnable_known = true;
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 2, ""));
    s.stage[2].runnable_ns = 97000000;
    s.stage[2].blocked_ns = 0;
    CHECK(is(&s, SPDL_LIMIT_FOREIGN, 2, "other programs used 0.95 of 2 processors, and calls of "
                                        "stage 2 'decode' waited for one 10 % of their time. Write "
                                        ".concurrency = 2: up to 2x" TRY " Other "
                                        "programs use 0.95 of 2 processors: while they do, it "
                                        "gains less."));
    s.stage[2].deferred = true; /* no processor limits its calls */
    CHECK(lacks(&s, "while they do"));
    s.stage[2].deferred = false;
    s.stage[2].alone = true;
    CHECK(is(&s, SPDL_LIMIT_FOREIGN, 2, "of their time. Stop them, or give this program more"));
    s.stage[2].alone = false;
    s.others_cpu_ns = 0; /* of them nothing is known yet */
    CHECK(is(&s, SPDL_LIMIT_MACHINE, 2, "calls of stage 2 'decode' waited for a processor, 10 %"));
    s.stage[1].concurrency = 4; /* a row that computes more, and waits for none */
    busy(&s, 1, 0.95, 1);
    CHECK(is(&s, SPDL_LIMIT_MACHINE, 2, "calls of stage 2 'decode' waited for a processor, 10 %"));
    busy(&s, 1, 0.01, 1);
    s.stage[1].concurrency = 1;
    s.stage[2].runnable_known = false; /* nor whether it waited */
    s.stage[2].cpu_ns = s.stage[2].busy_ns;
    s.stage[2].runnable_ns = 0;
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 2, "computing. Write"));
    busy(&s, 2, 0.97, 0.9);
    s.stage[2].runnable_known = true;
    s.stage[2].runnable_ns = 97000000;
    s.stage[2].blocked_ns = 0;
    s.others_cpu_ns = 950000000;
    s.cores = 4; /* they have two of their own */
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 2, ""));
    s.cores = 2;
    busy(&s, 1, 0.98, 0); /* sleeps all the time, whoever computes beside it */
    s.stage[1].runnable_known = true;
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 1, "asleep"));
    s = second();
    s.cores = 2;
    s.cores_allowed = 2;
    busy(&s, 0, 0.99, 0.99); /* a source that has a processor of its own */
    s.stage[0].runnable_known = true;
    s.process_cpu_ns = s.others_cpu_ns = 1000000000;
    CHECK(is(&s, SPDL_LIMIT_SERIAL, 0, "computing"));
}

static void workers_that_are_too_few(void) {
    spdl_stats s = second();
    s.workers = 2;
    s.stage[1].concurrency = 4;
    busy(&s, 1, 1.85, 0);
    CHECK(is(&s, SPDL_LIMIT_WORKERS, 1, "all 2 workers were busy, most of all with stage 1 'read', "
                                        "asleep. Write workers = 4: up to 2x" AGAIN));
    s.stage[1].concurrency = 2;
    busy(&s, 1, 1.9, 0);
    CHECK(is(&s, SPDL_LIMIT_WORKERS, 1, "Write .concurrency = 4 and workers = 4: up to 2x"));
}

/* The thread in next is one more, where it works, and makes the consumer's steps, too. */
static void threads_in_next(void) {
    spdl_stats s = second();
    s.workers = 1;
    s.next_works = true;
    s.stage[1].concurrency = 4;
    s.step_ns = 10000000;
    busy(&s, 1, 1.95, 0);
    CHECK(is(&s, SPDL_LIMIT_WORKERS, 1, "the only worker was busy, most of all with stage 1 "
                                        "'read', asleep. Write workers = 3: up to 2x"));
    CHECK(!over_all(&s));
    s.workers = 0; /* it does all: as many as the next limit needs */
    busy(&s, 1, 0.97, 0);
    CHECK(is(&s, SPDL_LIMIT_WORKERS, 1, "the only thread was busy, as there are no workers, most "
                                        "of all with stage 1 'read', asleep. Write workers = 4: "
                                        "up to 4x"));
}

/* Where .workers is 0 a row's number provides the threads, so it is advised alone. */
static void threads_by_default(void) {
    spdl_stats s = second();
    spdl_finding f;
    s.workers = 1;
    s.next_works = s.default_workers = true;
    s.step_ns = 1000000;
    s.process_cpu_ns = 20000000;
    busy(&s, 1, 0.99, 0.02);
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 1, "(concurrency 1), asleep. Write .concurrency = 16: up "
                                            "to 16x" TRY));
    s.workers = 15;
    s.stage[1].concurrency = 16;
    busy(&s, 1, 15.9, 0.02);
    s.process_cpu_ns = 320000000;
    CHECK(is(&s, SPDL_LIMIT_WORKERS, 1, "Write .concurrency = 255: up to 16x" AGAIN));
    s.stage[1].runnable_ns = s.stage[1].busy_ns / 4; /* beside others its calls sleep as much */
    s.stage[1].blocked_ns -= s.stage[1].runnable_ns;
    CHECK(is(&s, SPDL_LIMIT_WORKERS, 1, "Write .concurrency = 255"));
    s.stage[1].runnable_ns = 0;
    busy(&s, 1, 9.6, 0.02); /* order keeps some places empty: more calls fill others */
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 1, "busy 60 % of the time (concurrency 16), asleep. Write "
                                            ".concurrency = 255"));
    s.stage[1].exposed_ns = 0; /* the consumer does not wait for them */
    CHECK(is(&s, SPDL_LIMIT_NOT_KNOWN, -1, ""));
    busy(&s, 1, 15.9, 0.3); /* calls that compute, too, get no more than twice as many */
    s.process_cpu_ns = 1000000000;
    CHECK(is(&s, SPDL_LIMIT_WORKERS, 1, "Write .concurrency = 32: up to 2x" AGAIN));
    s.workers = 3; /* two rows need more threads than either has calls */
    s.stage[1].concurrency = s.stage[2].concurrency = 2;
    busy(&s, 1, 1.95, 0.3);
    busy(&s, 2, 1.95, 0.3);
    CHECK(is(&s, SPDL_LIMIT_WORKERS, 1, "Write .concurrency = 8 for stage 1 'read' and stage 2 "
                                        "'decode': up to 2x" AGAIN));
    spdl_stats_find(&s, &f);
    CHECK(f.workers == 0);
    busy(&s, 1, 1.95, 0);
    busy(&s, 2, 1.2, 0); /* the next limit sleeps, too: both at once */
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 1, "for stage 1 'read' and "));
    spdl_stats_find(&s, &f);
    CHECK(f.concurrency[1] > 8 && f.concurrency[2] > 8 && f.workers == 0);
    s.stage[1].concurrency = s.stage[2].concurrency = 4; /* no row does: next leaves then */
    busy(&s, 1, 1.95, 0.3);
    busy(&s, 2, 1.95, 0.3);
    CHECK(is(&s, SPDL_LIMIT_WORKERS, 1, "Write workers = 8: up to 2x" AGAIN));
    s.default_workers = false; /* .next_works_ns is written: it stays */
    CHECK(is(&s, SPDL_LIMIT_WORKERS, 1, "Write workers = 7: up to 2x" AGAIN));
}

/* Frames that poll: what they find counts, not how long they are. */
static void consumers_that_poll(void) {
    spdl_stats s = second();
    s.wait_ns = 0;
    s.step_ns = 990000000;
    s.polls = 900;
    s.edge[2].readiness = 0.1;
    busy(&s, 1, 0.97, 0);
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 1, "90 % of the polls found nothing: stage 1 'read' was "
                                            "busy 97 % of the time (concurrency 1), asleep. Write "
                                            ".concurrency = 8: up to 7.8x"));
    s.polls = 4;
    CHECK(is(&s, SPDL_LIMIT_CONSUMER, -1, "Loading keeps up"));
}

/* A call that hangs is named, whatever else is said. */
static void calls_that_hang(void) {
    spdl_stats s = second();
    s.elapsed_ns = s.process_ns = 2000000000;
    s.stage[2].in_flight = 1;
    s.stage[2].call_ns = 4000000000u;
    s.stage[2].call_item = 5;
    CHECK(is(&s, SPDL_LIMIT_NOT_KNOWN, -1, " stage 2 'decode' has been in one call for 4.00 s "
                                           "(item 5)."));
    s.delivered = 0;
    CHECK(is(&s, SPDL_LIMIT_NOT_KNOWN, -1, "Nothing was delivered: the consumer did not call "
                                           "next. stage 2 'decode' has been in one call"));
    s.stage[2].call_ns = 900000000;
    CHECK(lacks(&s, "has been in"));
    s.stage[2].call_ns = 1100000000; /* others took half as long */
    s.stage[2].max_ns = 500000000;
    CHECK(lacks(&s, "has been in"));
}

/* Workers that a pool of several pipelines has elsewhere. */
static void workers_of_a_shared_pool(void) {
    spdl_stats s = second();
    s.workers = 2;
    s.shared_pool = true;
    s.stage[1].concurrency = 2;
    busy(&s, 1, 0.98, 0);
    s.stage[1].exposed_ns = 100000000;
    s.stage[1].exposed_idle_ns = 400000000;
    CHECK(is(&s, SPDL_LIMIT_WORKERS, 1, "items were ready, but the workers of its pool were in "
                                        "other pipelines. Write .workers = 4 in the "
                                        "spdl_pool_desc: up to 2x."));
    CHECK(lacks(&s, "wait for each other") && lacks(&s, "SPDL_DOCTOR"));
    s.stage[1].concurrency = 1; /* they would change nothing */
    CHECK(is(&s, SPDL_LIMIT_WORKERS, 1, "were in other pipelines. More calls at a time would gain "
                                        "less than 3 %."));
    s.stage[1].concurrency = 2;
    s.stage[1].exposed_ns = 450000000; /* most of its calls hide that others had no worker */
    s.stage[1].exposed_idle_ns = 50000000;
    CHECK(is(&s, SPDL_LIMIT_NOT_KNOWN, -1, ""));
    s.edge[0].readiness = 0.9; /* though their items were ready */
    CHECK(is(&s, SPDL_LIMIT_WORKERS, 1, "in other pipelines. Write .workers = 4"));
    s.stage[1].runnable_known = true; /* also beside other programs: its calls sleep */
    s.stage[1].runnable_ns = s.stage[1].blocked_ns / 4;
    s.stage[1].blocked_ns -= s.stage[1].runnable_ns;
    s.cores = 2;
    s.cores_allowed = 2;
    s.process_cpu_ns = 100000000;
    s.others_cpu_ns = 1900000000;
    CHECK(is(&s, SPDL_LIMIT_WORKERS, 1, "in other pipelines. Write .workers = 4"));
    s = second();
    s.workers = 2;
    s.shared_pool = true;
    s.stage[1].concurrency = 2;
    busy(&s, 1, 0.98, 0);
    s.stage[1].exposed_ns = 100000000;
    s.stage[1].exposed_idle_ns = 400000000;
    s.shared_pool = false;
    CHECK(is(&s, SPDL_LIMIT_NOT_KNOWN, -1, ""));
    s.shared_pool = true; /* no pool has more than 256 threads */
    s.workers = 200;
    CHECK(is(&s, SPDL_LIMIT_WORKERS, 1, "in other pipelines. Write .workers = 255 in the "
                                        "spdl_pool_desc: up to 1.3x"));
    s.workers = 256;
    CHECK(is(&s, SPDL_LIMIT_WORKERS, 1, "were in other pipelines.") && lacks(&s, "Write"));
}

/* Nothing took any time. */
static void rows_without_work(void) {
    spdl_stats s = second();
    spdl_finding f;
    s.workers = 0;
    s.step_ns = s.process_cpu_ns = 0;
    for (int i = 0; i < 3; ++i) {
        s.stage[i].busy_ns = s.stage[i].cpu_ns = 0;
        s.stage[i].mean_ns = 10000;
    }
    for (int pushed = 0; pushed < 2; ++pushed) {
        CHECK_EQ(spdl_stats_find(&s, &f), pushed ? SPDL_LIMIT_ROOM : SPDL_LIMIT_WORKERS);
        CHECK((pushed || !writes(&f)) && f.gain == 0);
        s.stage[0].kind = SPDL_KIND_FEED;
        s.stage[0].failures = 50;
    }
    s.stage[0].kind = SPDL_KIND_SOURCE; /* the workers were elsewhere */
    s.workers = 2;
    s.shared_pool = true;
    s.stage[1].exposed_idle_ns = 400000000;
    CHECK_EQ(spdl_stats_find(&s, &f), SPDL_LIMIT_WORKERS);
    CHECK(!writes(&f) && f.gain == 0);
    s.shared_pool = false; /* calls waited for a processor all the time, some of them long */
    s.workers = 8;
    s.stage[1].concurrency = 4;
    busy(&s, 1, 1.4, 0);
    s.stage[1].runnable_ns = s.stage[1].busy_ns;
    s.stage[1].p50_ns = 2000000;
    s.stage[1].max_ns = 200000000;
    CHECK_EQ(spdl_stats_find(&s, &f), SPDL_LIMIT_ROOM);
    CHECK(!writes(&f) && f.gain == 0);
    s.stage_count = 0; /* no rows at all: nothing is read before the first */
    CHECK(is(&s, SPDL_LIMIT_NOT_KNOWN, -1, "The consumer waited 50 % of its time"));
}

static void order_and_batches(void) {
    spdl_stats s = second();
    s.stage[1].concurrency = 4;
    busy(&s, 1, 1.4, 0.01);
    s.stage[1].p50_ns = 2000000;
    s.stage[1].p99_ns = s.stage[1].max_ns = 200000000;
    s.step_ns = 100000000;
    CHECK(is(&s, SPDL_LIMIT_ROOM, 1, "took up to 200 ms, where half take 2.00 ms, and held back "
                                      "the rest. Write .buffer_size = 200, or .output_order = "
                                      "SPDL_ORDER_COMPLETION: up to 2.9x."));
    s.stage_count = 2; /* the last row: its edge is the sink */
    CHECK(is(&s, SPDL_LIMIT_ROOM, 1, "Write SPDL_SINK(200), or .output_order"));
    s.stage_count = 3;
    s.edge[1].buffer_size = 4096; /* it can have no more */
    CHECK(is(&s, SPDL_LIMIT_ROOM, 1, "held back the rest.") && lacks(&s, "Write"));
    s.edge[1].buffer_size = 2;
    s.stage[2].kind = SPDL_KIND_MERGE; /* of paths that are in order */
    CHECK(is(&s, SPDL_LIMIT_ROOM, 1, "Write .buffer_size = 200: up to 2.9x"));
    s.stage[2].in_order = false;
    CHECK(is(&s, SPDL_LIMIT_ROOM, 1, "Write .buffer_size = 200, or .output_order"));
    s.stage[2].kind = SPDL_KIND_PIPE;
    s.stage[1].max_ns = s.stage[1].p99_ns = 19000000; /* not rare */
    CHECK(is(&s, SPDL_LIMIT_NOT_KNOWN, -1, ""));
    s.stage[1].max_ns = 200000000; /* one that was slow, and does not explain the wait */
    s.stage[1].busy_ns = 400000000;
    CHECK(is(&s, SPDL_LIMIT_NOT_KNOWN, -1, ""));
    s.stage[1].busy_ns = 1400000000;
    s.stage[1].in_order = false; /* nothing is held back */
    CHECK(is(&s, SPDL_LIMIT_NOT_KNOWN, -1, ""));
    s.stage[1].concurrency = 1; /* but by a single call */
    s.stage[1].busy_ns = 600000000;
    CHECK(is(&s, SPDL_LIMIT_ROOM, 1, "and held back the rest. Write .buffer_size = "));
    s = second();
    s.stage[2].kind = SPDL_KIND_BATCH;
    busy(&s, 2, 0, 0);
    s.stage[1].exposed_ns = 400000000;
    CHECK(is(&s, SPDL_LIMIT_BATCH, 2, "had a batch full. Write a smaller size in that row, or a "
                                      "larger SPDL_SINK."));
    s.stage_count = 4;
    s.stage[3] = s.stage[1];
    s.stage[3].exposed_ns = 0;
    CHECK(is(&s, SPDL_LIMIT_BATCH, 2, "or a larger .buffer_size in it."));
}

/* Results wait for a place and the consumer for results, in turn. */
static void room_in_the_sink(void) {
    spdl_stats s = second();
    spdl_finding f;
    s.stage[2].concurrency = 4;
    busy(&s, 2, 2.2, 0);
    s.stage[2].exposed_ns = 0;
    s.stage[2].p50_ns = 10000000;
    s.stage[2].p90_ns = s.stage[2].p99_ns = s.stage[2].max_ns = 90000000;
    s.step_p50_ns = s.step_p99_ns = s.step_max_ns = s.step_mean_ns = 5000000;
    s.edge[2].put_wait_ns = 5000000000u; /* of several results at once */
    s.edge[2].elapsed_ns = s.elapsed_ns;
    CHECK(is(&s, SPDL_LIMIT_ROOM, 2, ": finished items wait behind slower ones: calls of stage 2 "
                                     "'decode' take 10.0 ms (p50) to 90.0 ms and leave in order. "
                                     "Write SPDL_SINK(17): up to 1.8x."));
    s.stage_count = 4; /* calls of a path, behind its merge */
    s.stage[3] = s.stage[0];
    s.edge[3] = s.edge[2];
    s.stage[3].kind = SPDL_KIND_MERGE;
    s.stage[3].p50_ns = s.stage[3].p99_ns = s.stage[3].max_ns = 0;
    CHECK(is(&s, SPDL_LIMIT_ROOM, 3, "calls of stage 2 'decode' take 10.0 ms (p50) to 90.0 ms"));
    s.stage_count = 3;
    s.edge[2].buffer_size = 18; /* which holds them */
    CHECK(spdl_stats_find(&s, &f) != SPDL_LIMIT_ROOM && !writes(&f));
    s.edge[2].buffer_size = 3;
    s.stage[2].p90_ns = s.stage[2].p99_ns = s.stage[2].max_ns = 15000000; /* they hardly vary */
    CHECK(spdl_stats_find(&s, &f) != SPDL_LIMIT_ROOM);
    s.step_p50_ns = 1000000;
    s.step_max_ns = 90000000;
    CHECK(is(&s, SPDL_LIMIT_ROOM, 2, ": its steps are uneven, 1.00 ms (p50) to 90.0 ms, and the "
                                     "sink of 3 does not bridge that. Write SPDL_SINK(17): up to "
                                     "1.8x."));
    s.step_max_ns = 6000000; /* longer runs of steps than the sink bridges: of a size unknown */
    CHECK(spdl_stats_find(&s, &f) != SPDL_LIMIT_ROOM);
}

/* Slow calls that are half of all are not rare: more of them at a time help, not a buffer. */
static void slow_calls_that_are_not_rare(void) {
    spdl_stats s = second();
    spdl_finding f;
    s.stage[1].concurrency = 4;
    busy(&s, 1, 1.4, 0.01);
    s.stage[1].p50_ns = 2000000;
    s.stage[1].p90_ns = s.stage[1].p99_ns = s.stage[1].max_ns = 200000000;
    CHECK(spdl_stats_find(&s, &f) == SPDL_LIMIT_NOT_KNOWN);
    s.stage[1].p90_ns = 19000000;
    CHECK(spdl_stats_find(&s, &f) == SPDL_LIMIT_ROOM);
}

/* More is pushed at once than the feed holds, whatever else the machine does. */
static void room_of_a_feed(void) {
    spdl_stats s = second();
    s.stage[0].kind = SPDL_KIND_FEED;
    s.stage[0].failures = 400;
    busy(&s, 1, 0.09, 0.9);
    s.stage[1].runnable_known = true;
    s.stage[1].runnable_ns = s.stage[1].busy_ns - s.stage[1].cpu_ns;
    s.stage[1].blocked_ns = 0;
    s.cores = 2;
    s.cores_allowed = 2;
    s.process_cpu_ns = 90000000;
    s.others_cpu_ns = 1900000000;
    CHECK(is(&s, SPDL_LIMIT_ROOM, 0, "more came at once than its buffer_size. Write .buffer_size = "
                                     "4."));
    s.edge[0].readiness = 0.9; /* requests wait all the time */
    CHECK(is(&s, SPDL_LIMIT_FOREIGN, -1, "other programs used 1.90 of 2 processors"));
}

/* Estimates of which the sum is more than the whole. */
static void shares_in_the_table(void) {
    spdl_stats s = second();
    busy(&s, 1, 0.97, 0);
    s.stage[1].mean_ns = 9700000;
    s.stage[1].blocked_ns = s.stage[1].busy_ns / 100 * 102;
    CHECK(!over_all(&s));
}

static void consumers_that_have_enough(void) {
    spdl_stats s = second();
    s.step_ns = 960000000;
    s.wait_ns = 49000000;
    busy(&s, 2, 0.99, 1);
    CHECK(is(&s, SPDL_LIMIT_CONSUMER, -1,
             "Loading keeps up: the consumer waited 4.9 % of its time. spdl_headspace measures "
             "what its own steps lose to loading."));
    s.consumer_runnable_ns = 48000000;
    CHECK(is(&s, SPDL_LIMIT_HARM, -1, "But for 5 % of its own steps other threads of this program "
                                      "had its processor: write .policy.polite"));
    s.others_cpu_ns = 900000000; /* our rows have more */
    CHECK(is(&s, SPDL_LIMIT_HARM, -1, ""));
    s.others_cpu_ns = 1100000000;
    CHECK(is(&s, SPDL_LIMIT_FOREIGN, -1, "other programs had its processor"));
    s.wait_ns = 51000000;
    CHECK(is(&s, SPDL_LIMIT_CONCURRENCY, 2, ""));
    s.delivered = 0;
    CHECK(is(&s, SPDL_LIMIT_NOT_KNOWN, -1, "Nothing was delivered: the consumer "));
}

/* Numbers of any kind give a text that fits, and no value that is out of range. */
static void numbers_of_any_kind(void) {
    uint64_t state = test_seed();
    for (int round = 0; round < 20000; ++round) {
        spdl_stats s = second();
        char text[1200];
        spdl_finding f;
        uint64_t *const numbers[] = {
            &s.elapsed_ns, &s.wait_ns, &s.step_ns, &s.delivered, &s.process_ns, &s.process_cpu_ns,
            &s.others_cpu_ns, &s.minor_faults, &s.consumer_runnable_ns,
            &s.stage[1].busy_ns,
            &s.stage[1].cpu_ns, &s.stage[1].blocked_ns, &s.stage[1].p50_ns, &s.stage[1].max_ns,
            &s.stage[1].exposed_ns, &s.stage[1].tasks, &s.stage[1].split_calls
        };
        for (int k = 0; k < 6; ++k)
            *numbers[test_random(&state) % (sizeof numbers / sizeof numbers[0])] =
                test_random(&state) >> (test_random(&state) % 64);
        s.workers = (int)(test_random(&state) % 5);
        s.stage[1].concurrency = 1 + (int)(test_random(&state) % 4096);
        s.next_works = test_random(&state) % 2;
        s.polls = test_random(&state) % 4 == 0 ? test_random(&state) >> 40 : 0;
        REQUIRE((unsigned)spdl_stats_find(&s, &f) <= SPDL_LIMIT_FOREIGN);
        REQUIRE(f.stage >= -1 && f.stage < 3 && f.workers <= 255 && f.gain >= 0);
        if (f.limit != SPDL_LIMIT_ROOM) {
            for (int i = 0; i < 3; ++i)
                REQUIRE(f.concurrency[i] <= 4096 &&
                        f.concurrency[i] <= 16 * s.stage[i].concurrency);
            REQUIRE((s.workers == 0 || f.workers <= 16 * (s.workers + 1)) && f.buffer_size == 0);
        }
        REQUIRE(!writes(&f) || f.gain >= 1.03);
        REQUIRE((size_t)spdl_stats_verdict(&s, text, sizeof text) < sizeof text);
        REQUIRE(!says(text, "= -") && !says(text, "= 0"));
    }
}

/* A number at a border, or any. */
static uint64_t some_number(uint64_t *state) {
    static const uint64_t borders[] = { 0, 1, 2, 100, 900, 100000, 10000000, 100000000, 400000000,
                                        600000000, 790000000, 810000000, 960000000, 1000000000,
                                        2000000000, 3900000000u };
    if (test_random(state) % 8 == 0) return test_random(state) >> (test_random(state) % 64);
    return borders[test_random(state) % (sizeof borders / sizeof borders[0])];
}

static bool one_in(uint64_t *state, unsigned n) { return test_random(state) % n == 0; }

/* Rows of every kind with numbers of any kind, pushed or not, on pools of any kind. */
static spdl_stats any_stats(uint64_t *state) {
    spdl_stats s = second();
    const int most = 1 + (int)(test_random(state) % 5);
    s.workers = (int)(test_random(state) % 5);
    s.next_works = one_in(state, 2);
    s.default_workers = s.next_works && s.workers > 0 && one_in(state, 2);
    s.shared_pool = one_in(state, 3);
    s.may_doctor = one_in(state, 2);
    s.cores = one_in(state, 2) ? 2 : 8;
    s.cores_allowed = s.cores;
    s.polls = one_in(state, 4) ? some_number(state) : 0;
    if (one_in(state, 2)) s.delivered = some_number(state);
    if (one_in(state, 2)) s.wait_ns = some_number(state);
    if (one_in(state, 2)) s.step_ns = some_number(state);
    if (one_in(state, 2)) s.process_cpu_ns = some_number(state);
    if (one_in(state, 2)) s.others_cpu_ns = some_number(state);
    if (one_in(state, 4)) s.elapsed_ns = some_number(state);
    if (one_in(state, 4)) s.consumer_runnable_ns = some_number(state);
    if (one_in(state, 8)) s.minor_faults = some_number(state);
    s.step_p50_ns = some_number(state);
    s.step_p99_ns = s.step_max_ns = s.step_p50_ns + some_number(state);
    s.answer_wait_ns = some_number(state);
    for (int i = 0; i < most; ++i) {
        spdl_stage_stats *stage = &s.stage[i];
        spdl_edge_stats *edge = &s.edge[i];
        *stage = s.stage[one_in(state, 2)];
        stage->kind = i == 0 ? (one_in(state, 3) ? SPDL_KIND_FEED : SPDL_KIND_SOURCE)
                      : one_in(state, 2) ? SPDL_KIND_PIPE
                                         : (spdl_kind)(SPDL_KIND_PIPE + test_random(state) % 5);
        snprintf(stage->name, sizeof stage->name, "row");
        stage->concurrency = (int)(test_random(state) % 5);
        stage->busy_ns = some_number(state);
        stage->cpu_ns = spdl__min(some_number(state), stage->busy_ns);
        stage->runnable_ns = one_in(state, 2) ? 0 : stage->busy_ns - stage->cpu_ns;
        stage->blocked_ns = stage->busy_ns - stage->cpu_ns - stage->runnable_ns;
        stage->p50_ns = some_number(state);
        stage->p99_ns = stage->max_ns = stage->p50_ns + some_number(state);
        stage->mean_ns = stage->p50_ns;
        stage->tasks = stage->split_calls = some_number(state);
        stage->exposed_ns = some_number(state);
        stage->exposed_idle_ns = one_in(state, 2) ? some_number(state) : 0;
        stage->skips = one_in(state, 3) ? some_number(state) : 0;
        stage->failures = one_in(state, 3) ? some_number(state) : 0;
        stage->call_ns = one_in(state, 4) ? some_number(state) : 0;
        stage->alone = one_in(state, 4);
        stage->from = i == 0 && one_in(state, 4);
        stage->deferred = one_in(state, 6);
        stage->threads = i == 0 && one_in(state, 4);
        stage->in_order = one_in(state, 2);
        stage->lock_found = one_in(state, 10);
        stage->runnable_known = one_in(state, 2);
        edge->buffer_size = 1 + (int)(test_random(state) % 5000);
        edge->readiness = (double)(test_random(state) % 11) / 10;
        edge->put_wait_ns = some_number(state);
        edge->elapsed_ns = spdl__max(s.elapsed_ns, 1);
        edge->depth = one_in(state, 2);
    }
    s.stage_count = one_in(state, 20) ? 0 : most;
    return s;
}

/* Also with what a doctor has found. */
static void numbers_of_rows_of_any_kind(void) {
    static const spdl_interval gains[] = { { 2, 1.8, 2.2, 9, true }, { 0.9, 0.8, 1.2, 9, true },
                                           { 1.2, 0.9, 1.5, 9, true },
                                           { 1.01, 1.005, 1.5, 9, true },
                                           { 1.5, 0, 9, 1, false } };
    static const spdl__change changes[] = { { true, "It changed." }, { false, "It changed." } };
    uint64_t state = 1; /* the same at first, so that each branch is taken */
    for (int round = 0; round < 3000; ++round) {
        if (round == 2700) state = test_seed();
        const spdl_stats s = any_stats(&state);
        spdl__found f = spdl__find(&s);
        spdl_finding finding;
        char verdict[1200], table[9000];
        spdl__text t = spdl__text_start(verdict, sizeof verdict);
        REQUIRE(spdl_stats_find(&s, NULL) == f.is.limit);
        REQUIRE(spdl_stats_find(&s, &finding) == finding.limit && finding.limit == f.is.limit);
        REQUIRE(f.is.stage >= -1 && (f.is.stage < s.stage_count || f.is.stage <= 0));
        REQUIRE(f.is.gain >= 0);
        REQUIRE(f.is.workers >= 0 && f.is.workers <= 255);
        REQUIRE(f.is.buffer_size >= 0 && f.is.buffer_size <= 10000);
        for (int i = 0; i < SPDL_MAX_STAGES; ++i)
            REQUIRE(f.is.concurrency[i] == 0 ||
                    (i < s.stage_count && f.is.concurrency[i] > s.stage[i].concurrency));
        REQUIRE(!writes(&f.is) || f.is.gain >= 1.03 || s.stage[0].kind == SPDL_KIND_FEED);
        f.doctor = one_in(&state, 2);
        f.raises = f.doctor && one_in(&state, 2);
        if (f.raises && writes(&f.is) && one_in(&state, 2)) f.measured = &gains[round % 5];
        if (one_in(&state, 10)) f.change = &changes[round % 2];
        spdl__verdict(&t, &s, &f);
        REQUIRE(t.length > 0 && t.length < sizeof verdict);
        REQUIRE((size_t)spdl_stats_text(&s, table, sizeof table) < sizeof table);
        for (int k = 0; k < 2; ++k) {
            const char *text = k ? table : verdict;
            REQUIRE(!says(text, "nan") && !says(text, "inf") && !says(text, "-nan"));
            REQUIRE(!says(text, "= -") && !says(text, "= 0"));
        }
    }
}

/* --- programs --- */

/* What a stage does with each item; a lock is held meanwhile. */
typedef struct job {
    long sleeps_us, computes_us;
    int slow_every; /* this many calls: one takes 80 ms */
    bool locks;
    int calls;
    test_mutex lock;
} job;

static void compute(long us) {
    struct timespec begun, now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begun);
    do
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    while ((now.tv_sec - begun.tv_sec) * 1000000 + (now.tv_nsec - begun.tv_nsec) / 1000 < us);
}

static void job_do(job *j) {
    const int call = __atomic_fetch_add(&j->calls, 1, __ATOMIC_RELAXED);
    if (j->locks) test_lock(&j->lock);
    if (j->sleeps_us > 0) sleep_us(j->sleeps_us);
    if (j->computes_us > 0) compute(j->computes_us);
    if (j->slow_every > 0 && call % j->slow_every == 0) sleep_us(80000);
    if (j->locks) test_unlock(&j->lock);
}

SPDL_FN(list, void, void) {
    (void)in;
    job_do((job *)spdl_ctx(task));
    *out = spdl_ctx(task);
    return SPDL_OK;
}

SPDL_FN(work, void, void) {
    job_do((job *)spdl_ctx(task));
    *out = in;
    return SPDL_OK;
}

/* What a row allows is in its statistics. */
static void rows_of_one_call(void) {
    job none = { .calls = 0 };
    spdl_pipeline_desc desc = { .workers = 2 };
    spdl_pipeline *p;
    spdl_stats stats;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_SOURCE(list, .ctx = &none), SPDL_PIPE(work, .ctx = &none),
        SPDL_PIPE(work, .ctx = &none, .again = true),
        SPDL_PIPE(work, .ctx = &none, .again = true, .output_order = SPDL_ORDER_COMPLETION),
        SPDL_SINK(3))) == SPDL_OK);
    spdl_pipeline_stats(p, &stats);
    spdl_pipeline_destroy(p);
    CHECK(!stats.stage[1].alone && stats.stage[2].alone && !stats.stage[3].alone);
}

typedef struct program {
    const char *name;
    job source, stage;
    int concurrency; /* as its row says it; 0: not */
    bool serial;
    int workers, items, step_us;
    spdl_limit limit, also; /* either is right */
    int row; /* at fault */
    const char *cure;
} program;

/* Whether others used the machine, or that is not known. */
static bool shared(const spdl_stats *s) {
    uint64_t runnable = s->workers_runnable_ns + s->consumer_runnable_ns;
    for (int i = 0; i < s->stage_count; ++i) runnable += s->stage[i].runnable_ns;
    return s->others_cpu_ns == 0 || s->others_cpu_ns > s->process_ns / 10 ||
           runnable > s->elapsed_ns / 20;
}

typedef enum judgement { WRONG, RIGHT, DISTURBED } judgement;

/* Runs it, and says whether the verdict is the right one. On a machine that others use another one
   may be true, too: that shows nothing, and is never a pass. */
static judgement runs(program *it, char *text, size_t bytes) {
    spdl_pipeline_desc desc = { .workers = TEST_WORKERS(it->workers) };
    spdl_pipeline *p;
    spdl_stats stats;
    spdl_finding f;
    spdl_limit limit;
    void *item;
    it->stage.lock = (test_mutex)TEST_MUTEX;
    it->source.calls = it->stage.calls = 0;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_SOURCE(list, .ctx = &it->source),
        SPDL_PIPE(work, .name = "slow", .ctx = &it->stage, .concurrency = it->concurrency,
                  .serial = it->serial),
        SPDL_SINK(3))) == SPDL_OK);
    for (int i = 0; i < it->items && spdl_pipeline_next(p, &item, SPDL_FOREVER) == SPDL_OK; ++i)
        if (it->step_us > 0) sleep_us(it->step_us);
    spdl_pipeline_stats(p, &stats);
    spdl_pipeline_destroy(p);
    limit = spdl_stats_find(&stats, &f);
    spdl_stats_verdict(&stats, text, bytes);
    if ((limit == it->limit || limit == it->also) && f.stage == it->row && says(text, it->cure))
        return RIGHT;
    return shared(&stats) ? DISTURBED : WRONG;
}

static void program_check(program it) {
    char text[800] = "";
    judgement was = WRONG;
    int wrong = 0;
    for (int i = 0; i < 4 && was != RIGHT; ++i) {
        was = runs(&it, text, sizeof text);
        wrong += was == WRONG;
    }
    if (was != RIGHT && wrong == 0) TEST_SKIP("others use this machine");
    if (!CHECK(was == RIGHT)) printf("    %s: %s\n", it.name, text);
}

static void stages_that_compute(void) {
    TEST_JUDGES_COSTS();
    const program alone = { .name = "computes", .stage = { .computes_us = 3000 },
                            .workers = 4, .items = 120, .limit = SPDL_LIMIT_CONCURRENCY, .row = 1,
                            .cure = "Write .concurrency = " };
    program full = alone, serial = alone;
    program_check(alone);
    full.concurrency = 4;
    full.limit = SPDL_LIMIT_MACHINE; /* with more than 4 cores it is not */
    full.cure = "make that stage cheaper";
    if (sysconf(_SC_NPROCESSORS_ONLN) <= 4) program_check(full);
    serial.serial = true;
    serial.limit = SPDL_LIMIT_SERIAL;
    serial.cure = "split the row";
    program_check(serial);
}

static void stages_that_sleep(void) {
    TEST_JUDGES_COSTS();
    const program alone = { .name = "sleeps", .stage = { .sleeps_us = 3000 },
                            .workers = 4, .items = 120, .limit = SPDL_LIMIT_CONCURRENCY, .row = 1,
                            .cure = "Write .concurrency = " };
    program all = alone;
    program_check(alone);
    all.concurrency = 4;
    all.items = 400;
    all.limit = SPDL_LIMIT_WORKERS;
    all.also = SPDL_LIMIT_CONCURRENCY; /* the row has as many calls as there are workers */
    all.cure = "workers = ";
    program_check(all);
}

/* Whatever is said of a lock, it leads to the doctor. */
static void stages_with_a_lock(void) {
    TEST_JUDGES_COSTS();
    program it = { .name = "sleeps under a lock", .stage = { .sleeps_us = 3000, .locks = true },
                   .concurrency = 4, .workers = 8, .items = 120,
                   .limit = SPDL_LIMIT_CONCURRENCY, .row = 1, .also = SPDL_LIMIT_WORKERS,
                   .cure = "take it back: its calls wait for each other" };
    program_check(it);
}

static void sources_and_trainers(void) {
    TEST_JUDGES_COSTS();
    const program list_slow = { .name = "source", .source = { .sleeps_us = 4000 },
                                .workers = 4, .items = 100,
                                .limit = SPDL_LIMIT_SERIAL, .row = 0,
                                .cure = "Else move the waiting into a stage" };
    const program slow_step = { .name = "trainer", .stage = { .sleeps_us = 200 }, .concurrency = 2,
                                .workers = 4, .items = 60, .step_us = 6000,
                                .limit = SPDL_LIMIT_CONSUMER, .row = -1,
                                .cure = "Loading keeps up" };
    program_check(list_slow);
    program_check(slow_step);
}

static void rare_slow_calls(void) {
    TEST_JUDGES_COSTS();
    const program it = { .name = "rare", .stage = { .sleeps_us = 1000, .slow_every = 60 },
                         .concurrency = 4, .workers = 8, .items = 600,
                         .limit = SPDL_LIMIT_ROOM, .row = 1, .cure = "Write SPDL_SINK(" };
    program_check(it);
}

/* What the verdict says of `p` after `items` of them; the pipeline is gone then. */
static const char *verdict_after(spdl_pipeline *p, int items, spdl_stats *stats) {
    static char text[1200];
    void *item;
    while (items-- > 0 && spdl_pipeline_next(p, &item, SPDL_FOREVER) == SPDL_OK) {}
    spdl_pipeline_stats(p, stats);
    spdl_stats_verdict(stats, text, sizeof text);
    spdl_pipeline_destroy(p);
    return text;
}

static spdl_pipeline *made(const spdl_pipeline_desc *desc, const spdl_stage *rows, size_t count) {
    spdl_pipeline *p;
    REQUIRE(spdl_pipeline_create(&p, desc, rows, count) == SPDL_OK);
    return p;
}

/* On a machine that others use another sentence may be true: that shows nothing. */
static void said(const char *text, const char *words, const spdl_stats *stats) {
    if (says(text, words)) return;
    if (shared(stats)) TEST_SKIP("others use this machine");
    CHECK(says(text, words));
    printf("    not \"%s\":\n    %s\n", words, text);
}

static void no_log(spdl_log_level level, const char *text, void *user) {
    (void)level, (void)text, (void)user;
}

static void programs_with_three_equal_rows(void) {
    TEST_JUDGES_COSTS();
    job none = { .calls = 0 }, sleeps = { .sleeps_us = 3000 };
    spdl_pipeline_desc desc = { .workers = 6 };
    spdl_finding f;
    spdl_stats stats;
    const char *text = verdict_after(made(&desc, SPDL_STAGES(
        SPDL_SOURCE(list, .ctx = &none), SPDL_PIPE(work, .name = "a", .ctx = &sleeps),
        SPDL_PIPE(work, .name = "b", .ctx = &sleeps), SPDL_PIPE(work, .name = "c", .ctx = &sleeps),
        SPDL_SINK(3))), 100, &stats);
    spdl_stats_find(&stats, &f);
    if (f.concurrency[1] > 1 && f.concurrency[2] > 1 && f.concurrency[3] > 1) return;
    said(text, "Write .concurrency = N for all three", &stats);
}

/* A step in ten takes 90 ms; the sink holds what is loaded meanwhile, if it can. */
static void programs_with_steps_in_bursts(void) {
    TEST_JUDGES_COSTS();
    job none = { .calls = 0 }, loads = { .sleeps_us = 8000 };
    spdl_pipeline_desc desc = { .workers = 2 };
    spdl_finding f;
    spdl_stats stats;
    void *item;
    char text[1200];
    spdl_pipeline *p = made(&desc, SPDL_STAGES(SPDL_SOURCE(list, .ctx = &none),
                                               SPDL_PIPE(work, .name = "load", .ctx = &loads),
                                               SPDL_SINK(3)));
    for (int i = 0; i < 100; ++i) {
        REQUIRE(spdl_pipeline_next(p, &item, SPDL_FOREVER) == SPDL_OK);
        sleep_us(i % 10 == 9 ? 90000 : 1000);
    }
    spdl_pipeline_stats(p, &stats);
    spdl_stats_verdict(&stats, text, sizeof text);
    spdl_pipeline_destroy(p);
    said(text, "its steps are uneven, ", &stats);
    CHECK(stats.step_max_ns >= 90000000 && stats.step_p50_ns >= 1000000);
    stats.consumer_runnable_ns = 0;
    CHECK(spdl_stats_find(&stats, &f) == SPDL_LIMIT_ROOM && f.stage == 1 && f.buffer_size >= 6);
    CHECK(shared(&stats) || (f.buffer_size >= 10 && f.buffer_size < 16));
    stats.consumer_runnable_ns = stats.step_ns / 2; /* steps were slow because others ran */
    CHECK(spdl_stats_find(&stats, &f) != SPDL_LIMIT_ROOM);
}

static void programs_that_poll(void) {
    TEST_JUDGES_COSTS();
    job none = { .calls = 0 }, sleeps = { .sleeps_us = 10000 };
    spdl_pipeline_desc desc = { .workers = 4 };
    spdl_stats stats;
    void *item;
    char text[1200];
    spdl_pipeline *p = made(&desc, SPDL_STAGES(SPDL_SOURCE(list, .ctx = &none),
                                               SPDL_PIPE(work, .ctx = &sleeps), SPDL_SINK(3)));
    for (int i = 0; i < 40; i += spdl_pipeline_next(p, &item, 0) == SPDL_OK) sleep_us(1000);
    spdl_pipeline_stats(p, &stats);
    spdl_stats_verdict(&stats, text, sizeof text);
    spdl_pipeline_destroy(p);
    CHECK(!says(text, "keeps up"));
    said(text, " of the polls found nothing: stage 1 'work' was busy", &stats);
}

SPDL_FN(fails, void, void) {
    job_do((job *)spdl_ctx(task));
    *out = in;
    return spdl_sequence(task) % 10 < 7 ? spdl_fail(task, "bad") : SPDL_OK;
}

static void programs_whose_calls_fail(void) {
    TEST_JUDGES_COSTS();
    job none = { .calls = 0 }, sleeps = { .sleeps_us = 3000 };
    spdl_pipeline_desc desc = { .workers = 8, .logger = { no_log, NULL } };
    spdl_stats stats;
    const char *text = verdict_after(made(&desc, SPDL_STAGES(
        SPDL_SOURCE(list, .ctx = &none),
        SPDL_PIPE(fails, .ctx = &sleeps, .concurrency = 2, .max_failures = -1), SPDL_SINK(3))), 60,
        &stats);
    CHECK(stats.stage[1].busy_ns > stats.elapsed_ns);
    CHECK(says(text, "70 % of the calls of stage 1 'fails' fail."));
    said(text, "Write .concurrency = ", &stats);
}

/* The thread in next is one more, with workers or without. */
static void programs_whose_next_works(void) {
    TEST_JUDGES_COSTS();
    static const char *const words[] = { "Write workers = 4: up to 4x",
                                         "Write workers = 3: up to 2x" };
    job none = { .calls = 0 }, sleeps = { .sleeps_us = 3000 };
    for (int workers = 0; workers < 2; ++workers) {
        spdl_pipeline_desc desc = { .workers = TEST_WORKERS(workers), .logger = { no_log, NULL } };
        spdl_stats stats;
        const char *text;
        if (workers > 0) desc.next_works_ns = SPDL_FOREVER;
        text = verdict_after(made(&desc, SPDL_STAGES(
            SPDL_SOURCE(list, .ctx = &none), SPDL_PIPE(work, .ctx = &sleeps, .concurrency = 4),
            SPDL_SINK(3))), 100, &stats);
        CHECK(!over_all(&stats) && stats.next_works);
        said(text, words[workers], &stats);
    }
}

static void programs_that_take_from_another(void) {
    job none = { .calls = 0 }, sleeps = { .sleeps_us = 4000 };
    spdl_pipeline_desc desc = { .workers = 2 };
    spdl_stats stats;
    spdl_pipeline *first = made(&desc, SPDL_STAGES(
        SPDL_SOURCE(list, .ctx = &none), SPDL_PIPE(work, .ctx = &sleeps), SPDL_SINK(3)));
    const char *text = verdict_after(made(&desc, SPDL_STAGES(
        SPDL_FROM(void, spdl_pipeline_next, first), SPDL_PIPE(work, .ctx = &none), SPDL_SINK(3))),
        60, &stats);
    CHECK(stats.stage[0].from && !stats.stage[1].from);
    said(text, "It waits for what it takes from: see the verdict of that pipeline.", &stats);
    spdl_pipeline_destroy(first);
}

/* Sleeps until its turn, 200 times a second. */
SPDL_FN(paces, void, void) {
    uint64_t *turn = (uint64_t *)spdl_ctx(task);
    const uint64_t now = spdl_time_ns();
    *turn = *turn + 5000000 > now ? *turn + 5000000 : now;
    if (*turn > now) sleep_us((int64_t)((*turn - now) / 1000));
    *out = in;
    return SPDL_OK;
}

/* Workers that such a row sleeps in are too few, but more of them do not help. */
static void programs_that_keep_a_pace(void) {
    TEST_JUDGES_COSTS();
    job none = { .calls = 0 }, sleeps = { .sleeps_us = 7000 };
    spdl_pipeline_desc desc = { .workers = 2 };
    for (int serial = 0; serial < 2; ++serial) {
        uint64_t turn = 0;
        spdl_stats stats;
        const char *text = verdict_after(made(&desc, SPDL_STAGES(
            SPDL_SOURCE(list, .ctx = &none),
            SPDL_PIPE(paces, .name = "limit", .ctx = &turn, .serial = serial == 1),
            SPDL_PIPE(work, .name = "decode", .ctx = &sleeps, .concurrency = 2), SPDL_SINK(4))),
            200, &stats);
        said(text, "wait for each other, or stage 1 'limit' keeps a pace.", &stats);
        CHECK(!says(text, ".concurrency = 2 for stage 1 'limit'"));
    }
}

/* Many small blocks of one arena: nothing in the numbers shows how calls hold each other up. */
SPDL_FN(parses, void, void) {
    void *node[32];
    for (int i = 0; i < 60; ++i) {
        for (int k = 0; k < 32; ++k) {
            node[k] = malloc(2000);
            REQUIRE(node[k] != NULL);
            *(volatile char *)node[k] = 1;
        }
        for (int k = 0; k < 32; ++k) free(node[k]);
    }
    *out = in;
    return SPDL_OK;
}

static void programs_in_one_arena(void) {
    TEST_JUDGES_COSTS();
    job none = { .calls = 0 };
    spdl_pipeline_desc desc = { .workers = 3 };
    spdl_stats stats;
    const char *text;
#ifdef M_ARENA_MAX
    mallopt(M_ARENA_MAX, 1);
#endif
    text = verdict_after(made(&desc, SPDL_STAGES(SPDL_SOURCE(list, .ctx = &none),
                                                 SPDL_PIPE(parses), SPDL_SINK(3))), 1500, &stats);
    CHECK(!says(text, "about"));
    said(text, "x. It gains less if its calls wait for each other", &stats);
}

/* Items wait in all rows of a full pipeline: only the limit has a number for it. */
static void programs_with_epochs(void) {
    TEST_JUDGES_COSTS();
    job slow = { .sleeps_us = 5000 }, quick = { .sleeps_us = 3500 };
    spdl_pipeline_desc desc = { .workers = 12 };
    spdl_stats stats;
    char table[4000], *row;
    void *item;
    spdl_pipeline *p = made(&desc, SPDL_STAGES(
        SPDL_COUNT(20, .continuous = true),
        SPDL_PIPE(work, .name = "a", .ctx = &slow, .concurrency = 4),
        SPDL_PIPE(work, .name = "b", .ctx = &quick, .concurrency = 4),
        SPDL_PIPE(work, .name = "c", .ctx = &quick, .concurrency = 4), SPDL_SINK(3)));
    for (int i = 0; i < 400;) i += spdl_pipeline_next(p, &item, SPDL_FOREVER) == SPDL_OK;
    spdl_pipeline_stats(p, &stats);
    spdl_pipeline_destroy(p);
    spdl_stats_text(&stats, table, sizeof table);
    said(table, "stage 1 'a' was busy", &stats);
    for (row = strtok(table, "\n"); row != NULL; row = strtok(NULL, "\n")) {
        if (strncmp(row, "  b ", 4) == 0 || strncmp(row, "  c ", 4) == 0)
            CHECK(strlen(row) < 95 || strspn(row + 94, " ") == strlen(row + 94));
        if (strncmp(row, "> ", 2) == 0) CHECK(strncmp(row, "> a ", 4) == 0 || shared(&stats));
    }
}

/* Written out, the default is advised as it is not written; .serial is not. */
static void rows_of_one_call_are_raised(void) {
    TEST_JUDGES_COSTS();
    static const char *const words[] = { "Write .concurrency = ", "Write .concurrency = ",
                                         "More calls at a time would gain less than 3 %" };
    job none = { .calls = 0 }, sleeps = { .sleeps_us = 4000 };
    for (int i = 0; i < 3; ++i) {
        spdl_pipeline_desc desc = { .workers = 1 };
        spdl_stats stats;
        const char *text = verdict_after(made(&desc, SPDL_STAGES(
            SPDL_SOURCE(list, .ctx = &none),
            SPDL_PIPE(work, .ctx = &sleeps, .concurrency = i % 2, .serial = i == 2),
            SPDL_SINK(3))), 60, &stats);
        CHECK_EQ(stats.stage[1].alone, i == 2);
        said(text, words[i], &stats);
    }
}

static int warnings_of_threads;
static void count_warnings(spdl_log_level level, const char *text, void *user) {
    (void)user;
    warnings_of_threads +=
        level == SPDL_LOG_WARN && says(text, "concurrency is 4, but it has only");
}

/* More calls than threads: also of the thread in next alone, and of a pool that is shared. */
static void rows_with_too_few_threads_are_warned_of(void) {
    const spdl_pool_desc two = { .workers = 2 };
    job none = { .calls = 0 };
    spdl_pool *pool;
    REQUIRE(spdl_pool_create(&pool, &two) == SPDL_OK);
    for (int i = 0; i < 4; ++i) {
        spdl_pipeline_desc desc = { .workers = i == 1 ? 1 : i == 3 ? 4 : SPDL_INLINE,
                                    .logger = { count_warnings, NULL } };
        warnings_of_threads = 0;
        if (i == 2) desc.workers = 0;
        if (i == 2) desc.pool = pool;
        spdl_pipeline_destroy(made(&desc, SPDL_STAGES(
            SPDL_SOURCE(list, .ctx = &none), SPDL_PIPE(work, .ctx = &none, .concurrency = 4),
            SPDL_SINK(3))));
        CHECK_EQ(warnings_of_threads, i != 3);
    }
    spdl_pool_destroy(pool);
}

/* More is pushed than is answered. */
static void requests_that_are_dropped(void) {
    job finds = { .sleeps_us = 3000 };
    spdl_pipeline_desc desc = { .workers = 2 };
    spdl_pipeline *p;
    spdl_stats stats;
    spdl_finding f;
    char text[800];
    void *item;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_FEED(void, .buffer_size = 2, .drop_oldest = true),
        SPDL_PIPE(work, .name = "find_path", .ctx = &finds), SPDL_SINK(64))) == SPDL_OK);
    for (int i = 0; i < 200; ++i) {
        REQUIRE(spdl_pipeline_push(p, &finds, SPDL_FOREVER) == SPDL_OK);
        while (spdl_pipeline_next(p, &item, 0) == SPDL_OK) {}
        sleep_us(1000);
    }
    spdl_pipeline_stats(p, &stats);
    spdl_pipeline_destroy(p);
    spdl_stats_find(&stats, &f);
    spdl_stats_verdict(&stats, text, sizeof text);
    CHECK(says(text, " of 200 requests were dropped: "));
    if (f.stage == 1 && says(text, "stage 1 'find_path' was busy")) return;
    if (shared(&stats)) TEST_SKIP("others use this machine");
    CHECK(false);
    printf("    row %d: %s\n", f.stage, text);
}

/* Pushes that find no room are counted, too. */
static void requests_that_are_refused(void) {
    job finds = { .sleeps_us = 3000 };
    spdl_pipeline_desc desc = { .workers = 1 };
    spdl_pipeline *p;
    spdl_finding finding;
    spdl_stats stats;
    char text[4000];
    uint64_t refused = 0;
    void *item;
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_FEED(void, .buffer_size = 2), SPDL_PIPE(work, .ctx = &finds), SPDL_SINK(4))) ==
        SPDL_OK);
    for (int i = 0; i < 60; ++i) {
        refused += spdl_pipeline_push(p, &finds, 0) != SPDL_OK;
        while (spdl_pipeline_next(p, &item, 0) == SPDL_OK) {}
        sleep_us(500);
    }
    spdl_pipeline_stats(p, &stats);
    spdl_pipeline_destroy(p);
    CHECK(refused > 0);
    CHECK_EQ(stats.stage[0].failures, refused);
    CHECK_EQ(stats.stage[0].tasks, 60 - refused);
    spdl_stats_text(&stats, text, sizeof text);
    CHECK(says(text, " of 60 requests were refused: ") && says(text, " refused\n"));
    CHECK(!says(text, "nan"));
    CHECK(spdl_stats_find(&stats, &finding) != SPDL_LIMIT_SERIAL);
    CHECK(finding.stage != 0); /* a feed makes no calls: it limits nothing */
    CHECK(finding.gain == 0 || finding.gain >= 1.03);
}

/* The process was read, and what a snapshot has of it does not go backwards. */
static void process_in_the_numbers(void) {
    job none = { .calls = 0 }, computes = { .computes_us = 2000 };
    spdl_pipeline_desc desc = { .workers = 2 };
    spdl_stats before, now;
    spdl_pipeline *p;
    void *item;
    memset(&before, 0, sizeof before);
    REQUIRE(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_SOURCE(list, .ctx = &none), SPDL_PIPE(work, .ctx = &computes), SPDL_SINK(3))) ==
        SPDL_OK);
    for (int i = 0; i < 40; ++i) {
        REQUIRE(spdl_pipeline_next(p, &item, SPDL_FOREVER) == SPDL_OK);
        spdl_pipeline_stats(p, &now);
        CHECK(now.process_ns >= before.process_ns);
        CHECK(now.process_cpu_ns >= before.process_cpu_ns);
        CHECK(now.others_cpu_ns >= before.others_cpu_ns || now.others_cpu_ns == 0 ||
              before.others_cpu_ns - now.others_cpu_ns < 50000000); /* ticks against a clock */
        CHECK(now.consumer_runnable_ns >= before.consumer_runnable_ns);
        before = now;
    }
    CHECK(now.process_cpu_ns > 40000000 && now.process_ns > 0);
    CHECK(now.cores >= 1 && now.cores_allowed > 0);
    spdl_pipeline_destroy(p);
}

TEST_TABLE(verdict) {
    TEST_CASE(calls_that_wake_together),
    TEST_CASE(concurrency_up_to_the_next_limit),
    TEST_CASE(two_that_are_as_busy),
    TEST_CASE(two_that_have_all_workers),
    TEST_CASE(three_that_are_as_busy),
    TEST_CASE(threads_in_next),
    TEST_CASE(threads_by_default),
    TEST_CASE(consumers_that_poll),
    TEST_CASE(calls_that_hang),
    TEST_CASE(workers_of_a_shared_pool),
    TEST_CASE(rows_without_work),
    TEST_CASE(settings_that_can_be_written),
    TEST_CASE(threads_of_a_source),
    TEST_CASE(rows_of_one_call),
    TEST_CASE(rows_that_may_be_the_limit),
    TEST_CASE(sleep_locks_serial_rows_and_sources),
    TEST_CASE(processors_that_are_used_up),
    TEST_CASE(processors_that_others_have),
    TEST_CASE(workers_that_are_too_few),
    TEST_CASE(order_and_batches),
    TEST_CASE(room_in_the_sink),
    TEST_CASE(slow_calls_that_are_not_rare),
    TEST_CASE(room_of_a_feed),
    TEST_CASE(shares_in_the_table),
    TEST_CASE(consumers_that_have_enough),
    TEST_CASE(numbers_of_any_kind),
    TEST_CASE(numbers_of_rows_of_any_kind),
    TEST_CASE(stages_that_compute),
    TEST_CASE(stages_that_sleep),
    TEST_CASE(stages_with_a_lock),
    TEST_CASE(sources_and_trainers),
    TEST_CASE(rare_slow_calls),
    TEST_CASE(programs_with_three_equal_rows),
    TEST_CASE(programs_with_steps_in_bursts),
    TEST_CASE(programs_that_poll),
    TEST_CASE(programs_whose_calls_fail),
    TEST_CASE(programs_whose_next_works),
    TEST_CASE(programs_that_take_from_another),
    TEST_CASE(programs_that_keep_a_pace),
    TEST_CASE(programs_in_one_arena),
    TEST_CASE(programs_with_epochs),
    TEST_CASE(rows_of_one_call_are_raised),
    TEST_CASE(rows_with_too_few_threads_are_warned_of),
    TEST_CASE(requests_that_are_dropped),
    TEST_CASE(requests_that_are_refused),
    TEST_CASE(process_in_the_numbers),
    TEST_END,
};
