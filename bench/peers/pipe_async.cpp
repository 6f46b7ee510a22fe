// needs: g++
// flags:
#include <future>
#include <vector>

#include "pipe_peer.hpp"

namespace {

/* A call of std::async, which is a thread, for each so many items. */
void run_calls(pipe_outlet *o) {
    const size_t batch = o->spec->batch > 0 ? size_t(o->spec->batch) : 1;
    std::deque<std::future<void>> calls;
    uint64_t number = 0;
    for (bool more = true; more;) {
        std::vector<void *> items;
        void *item = nullptr;
        while (items.size() < batch && (more = pipe_feed(o, number + items.size(), &item))) {
            items.push_back(item);
        }
        const uint64_t first = number;
        number += items.size();
        calls.push_back(std::async(std::launch::async, [o, first, items] {
            for (size_t i = 0; i < items.size() && !pipe_stopped(o); ++i) {
                pipe_put(o, first + i, pipe_work(o->spec, items[i]));
            }
        }));
        while (calls.size() > 1 &&
               calls.front().wait_for(std::chrono::seconds(0)) == std::future_status::ready) {
            calls.pop_front();
        }
    }
}

const pipe_peer table[] = {
    { "std::async", run_calls, nullptr, nullptr, nullptr, nullptr },
};

} // namespace

PIPE_PLUGIN(table);
