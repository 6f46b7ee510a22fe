/* The tests of every module in one program; --help tells its options. */
#define TEST_MAIN
#include "test.h"

/* One word per module. The tables are weak, so that a module can be linked and tested alone; one
   that is missing is reported as a failure. (`make lint` looks whether one is not in this list.) */
#define MODULES(X)                                                                                 \
    X(core) X(alloc) X(ring) X(debug) X(mistakes) X(pool) X(pipeline) X(rows) X(lifetime)          \
    X(next) X(ready) X(flow) X(batch) X(branch) X(again) X(rewind) X(state) X(source) X(defer)     \
    X(fail) X(push) X(contract) X(mutants) X(chance) X(stats) X(report) X(trace) X(loader)         \
    X(cache) X(sampler) X(compare) X(headspace) X(doctor) X(doctor_text) X(npz) X(npz_file)        \
    X(npz_write) X(inflate) X(npz_cover) X(npz_in_pieces) X(files) X(tokens) X(os_none) X(guests)  \
    X(grow) X(wait) X(verdict) X(stress)

#define DECLARE(module) extern const test_case test_table_##module[] __attribute__((weak));
#define ROW(module) { #module, test_table_##module },

/* Those that compare times, or shares of the processors. */
static const char *const clocks[] = {
    "ring.timeout", "ring.condvar_timeout", "pool.idle_", "branch.a_merge_that_waits",
    "contract.ready_", "contract.time_is_booked", "contract.pipelines_on_a_pool",
    "doctor_text.programs_", "headspace.planted_", "push.a_batch_is_as_late", "push.a_higher_",
    "push.a_push_is_never_", "push.answers_are_timed", "push.concurrency_", "push.polite_",
    "loader.a_close_is_", "pipeline.gaps_wake_", "stats.failures_", "stats.slow_",
    "stats.process_is_", "stats.process_sees_", "stats.reference_", "stats.steps_", "stats.time",
    "stats.wait",
    "report.intervals_add_", "report.intervals_have_", "report.intervals_without_", "report.table_",
    "trace.computing_", "trace.crowded_", "trace.mixed_", "trace.sleeping_", "trace.times_",
    "verdict.stages_", "verdict.sources_", "verdict.programs_", "verdict.rows_of_one_call_are",
    "verdict.rare_", "verdict.requests_", NULL,
};

MODULES(DECLARE)

int main(int argc, char **argv) {
    const test_module modules[] = { MODULES(ROW) };
    return test_main(argc, argv, modules, sizeof modules / sizeof modules[0], clocks);
}
