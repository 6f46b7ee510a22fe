// needs: libglib2.0-dev pkg-config
// flags: $(pkg-config --cflags --libs glib-2.0)
#include <glib.h>

#include "pipe_peer.hpp"

namespace {

/* An item is one job, which calls all the stages. */
struct Job {
    void *item;
    uint64_t number;
};

void run_numbered(gpointer data, gpointer outlet) {
    const Job *job = static_cast<const Job *>(data);
    pipe_outlet *o = static_cast<pipe_outlet *>(outlet);
    pipe_put(o, job->number, pipe_work(o->spec, job->item));
}

void run_any(gpointer item, gpointer outlet) {
    pipe_outlet *o = static_cast<pipe_outlet *>(outlet);
    pipe_put(o, 0, pipe_work(o->spec, item));
}

/* In order a job has the number of its place in the window, and is free when that is. */
void run_pool(pipe_outlet *o) {
    static Job jobs[PIPE_MAX_LIVE];
    const bool ordered = !o->spec->unordered;
    GThreadPool *pool = g_thread_pool_new(ordered ? run_numbered : run_any, o,
                                          pipe_threads(o->spec), FALSE, nullptr);
    uint64_t number = 0;
    void *item = nullptr;
    while (pipe_feed(o, number, &item)) {
        Job *job = &jobs[number & o->mask];
        if (ordered) *job = Job{ item, number };
        g_thread_pool_push(pool, ordered ? job : item, nullptr);
        ++number;
    }
    g_thread_pool_free(pool, pipe_stopped(o), TRUE);
}

const pipe_peer table[] = {
    { "GLib thread pool", run_pool, nullptr, nullptr, nullptr, nullptr },
};

} // namespace

PIPE_PLUGIN(table);
