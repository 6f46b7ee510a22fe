/* switches.c - a pipeline in builds with SPDL_NO_NPZ, SPDL_NO_REPORT, SPDL_NO_THREADS, some of
   them or none: items and statistics come as ever; a desc or a variable that asks for a report or a
   trace in vain is one warning, and workers where there are no threads are an error.
   tests/check_headers.sh runs it, tests/check_warnings.sh compiles it as C and C++. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"

#ifdef SPDL_NO_THREADS
static const bool threads = false;
#else
static const bool threads = true;
#endif
static int warnings;
static char warned[SPDL_TEXT_BYTES];

static void on_log(spdl_log_level level, const char *text, void *user) {
    (void)user;
    if (level != SPDL_LOG_WARN) return;
    ++warnings;
    snprintf(warned, sizeof warned, "%s", text);
}

SPDL_FN(count_up, void, void) {
    if (spdl_sequence(task) == 1000) return SPDL_END;
    *out = (void *)(uintptr_t)(spdl_sequence(task) + 1);
    return SPDL_OK;
}

SPDL_FN(pass, void, void) {
    spdl_trace_begin(task, "pass");
    spdl_trace_end(task);
    *out = in;
    return SPDL_OK;
}

/* Whether everything comes in order and is counted. */
static bool run(const spdl_pipeline_desc *desc) {
    spdl_pipeline *p;
    spdl_stats stats;
    void *item;
    uintptr_t taken = 0;
    char text[4096];
    if (spdl_pipeline_create(&p, desc, SPDL_STAGES(SPDL_SOURCE(count_up), SPDL_PIPE(pass),
                                                   SPDL_SINK(3))) != SPDL_OK)
        return false;
    while (spdl_pipeline_next(p, &item, SPDL_FOREVER) == SPDL_OK)
        if ((uintptr_t)item != ++taken) return false;
    spdl_pipeline_stats(p, &stats);
    spdl_pipeline_destroy(p);
    return taken == 1000 && stats.delivered == 1000 && stats.stage[1].tasks == 1000 &&
           stats.stage[1].busy_ns > 0 && (stats.stage[1].split_calls > 0) == threads &&
           spdl_stats_text(&stats, text, sizeof text) > 100;
}

/* A sampler's items; mixtures, ranks and all of it need C alone. */
static bool sample(const spdl_pipeline_desc *desc) {
    spdl_sampler_desc order;
    spdl_sampler *s;
    spdl_pipeline *p;
    void *item;
    uint64_t sum = 0;
    memset(&order, 0, sizeof order);
    order.count = 2000;
    order.order = SPDL_SAMPLE_SHUFFLED;
    if (spdl_sampler_create(&s, &order) != SPDL_OK) return false;
    if (spdl_pipeline_create(&p, desc, SPDL_STAGES(SPDL_INDEX(s), SPDL_SINK(3))) != SPDL_OK)
        return false;
    while (spdl_pipeline_next(p, &item, SPDL_FOREVER) == SPDL_OK) {
        sum += ((const spdl_index *)item)->index;
        spdl_buffer_free(item);
    }
    spdl_pipeline_destroy(p);
    spdl_sampler_destroy(s);
    return sum == 1999 * 1000;
}

int main(void) {
    spdl_pipeline_desc desc;
    spdl_doctor_desc doctor;
    memset(&desc, 0, sizeof desc);
    desc.workers = threads ? 2 : SPDL_INLINE;
    desc.logger.log_fn = on_log;
    memset(&doctor, 0, sizeof doctor);
    doctor.quiet = true;
    unsetenv("SPDL_DOCTOR");
    unsetenv("SPDL_STATS");
    unsetenv("SPDL_REPORT");
    unsetenv("SPDL_TRACE");
    if (!run(&desc) || !sample(&desc) || warnings != 0) return 1;
#ifdef SPDL_NO_REPORT
    setenv("SPDL_STATS", "0", 1);
    if (!run(&desc) || warnings != 0) return 2;
    setenv("SPDL_STATS", "5", 1);
    if (!run(&desc) || warnings != 1 || strstr(warned, "SPDL_STATS is ignored") == NULL) return 3;
    desc.trace = "/nowhere/t.json";
    if (!run(&desc) || warnings != 2 || strstr(warned, "desc.trace is ignored") == NULL) return 4;
    if (strstr(warned, "SPDL_NO_REPORT") == NULL) return 5;
    unsetenv("SPDL_STATS");
    desc.trace = NULL;
    setenv("SPDL_DOCTOR", "0", 1);
    if (!run(&desc) || warnings != 2) return 9;
    setenv("SPDL_DOCTOR", "1,replay", 1);
    if (!run(&desc) || warnings != 3 || strstr(warned, "SPDL_DOCTOR is ignored") == NULL) return 10;
    unsetenv("SPDL_DOCTOR");
    desc.doctor = &doctor;
    if (!run(&desc) || warnings != 4 || strstr(warned, "SPDL_NO_REPORT") == NULL) return 11;
    desc.doctor = NULL;
#else
    desc.doctor = &doctor;
    if (!run(&desc) || warnings != 0) return 12;
    desc.doctor = NULL;
    desc.trace = "/nowhere/t.json";
    if (!run(&desc) || warnings != 1 ||
        strstr(warned, threads ? "No such file" : "could not be opened") == NULL)
        return 6;
#endif
    desc.workers = 1;
    desc.trace = NULL;
    if (run(&desc) != threads) return 8;
#ifndef SPDL_NO_NPZ
    {
        spdl_npz *npz;
        if (spdl_npz_open(&npz, "/nowhere/a.npz", NULL) == SPDL_OK) return 7;
    }
#endif
    return 0;
}
