// needs: libtbb-dev
// flags: -ltbb
#include <tbb/concurrent_queue.h>

#include "peer.hpp"

namespace {

struct Bounded {
    tbb::concurrent_bounded_queue<uint64_t> queue;

    explicit Bounded(const flow_spec &spec) { queue.set_capacity(std::ptrdiff_t(spec.capacity)); }
    bool try_push(uint64_t item) { return queue.try_push(item); }
    bool try_pop(uint64_t &item) { return queue.try_pop(item); }
    void push(uint64_t item) { queue.push(item); }
    uint64_t pop() {
        uint64_t item;
        queue.pop(item);
        return item;
    }
};

PEER_TRY(bounded_try, Bounded)
PEER_BLOCK(bounded_block, Bounded)

const flow_peer table[] = {
    { "TBB bounded queue", FLOW_SLEEPS, FLOW_SPSC | FLOW_MPMC, peer_open<Bounded>,
      peer_close<Bounded>, nullptr, nullptr, { &bounded_try, &bounded_block, nullptr } },
};

} // namespace

PEER_PLUGIN(table);
