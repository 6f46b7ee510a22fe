// needs: g++
// flags: -fopenmp
#include <omp.h>

#include "pipe_peer.hpp"

namespace {

/* An item is one task, which calls all the stages. The thread that makes them waits for the task
   whose place comes next, and meanwhile runs others. */
void make_tasks(pipe_outlet *o) {
    [[maybe_unused]] static char places[PIPE_MAX_LIVE];
    const uint64_t live = uint64_t(o->spec->live);
    uint64_t number = 0;
    for (;;) {
        const uint64_t place = number % live;
        void *item = nullptr;
#pragma omp taskwait depend(inout : places[place])
        if (!pipe_feed(o, number, &item)) break;
#pragma omp task firstprivate(item, number) depend(inout : places[place])
        if (!pipe_stopped(o)) pipe_put(o, number, pipe_work(o->spec, item));
        ++number;
    }
}

void run_tasks(pipe_outlet *o) {
#pragma omp parallel num_threads(pipe_threads(o->spec))
#pragma omp single
    make_tasks(o);
}

const pipe_peer table[] = {
    { "OpenMP tasks", run_tasks, nullptr, nullptr, nullptr, nullptr },
};

} // namespace

PIPE_PLUGIN(table);
