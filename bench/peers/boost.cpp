// needs: libboost-dev
// flags:
#include <boost/lockfree/queue.hpp>
#include <boost/lockfree/spsc_queue.hpp>

#include "peer.hpp"

namespace {

struct Spsc {
    boost::lockfree::spsc_queue<uint64_t> queue;

    explicit Spsc(const flow_spec &spec) : queue(spec.capacity) {}
    bool try_push(uint64_t item) { return queue.push(item); }
    bool try_pop(uint64_t &item) { return queue.pop(item); }
    size_t push_n(const uint64_t *items, size_t count) { return queue.push(items, count); }
    size_t pop_n(uint64_t *items, size_t count) { return queue.pop(items, count); }
};

struct Mpmc {
    boost::lockfree::queue<uint64_t, boost::lockfree::fixed_sized<true>> queue;

    explicit Mpmc(const flow_spec &spec) : queue(spec.capacity) {}
    bool try_push(uint64_t item) { return queue.bounded_push(item); }
    bool try_pop(uint64_t &item) { return queue.pop(item); }
};

PEER_TRY(spsc_try, Spsc)
PEER_BATCH(spsc_batch, Spsc)
PEER_TRY(mpmc_try, Mpmc)

const flow_peer table[] = {
    { "boost spsc_queue", FLOW_SPINS, FLOW_SPSC, peer_open<Spsc>, peer_close<Spsc>, nullptr,
      nullptr, { &spsc_try, nullptr, &spsc_batch } },
    { "boost lockfree queue", FLOW_SPINS, FLOW_MPMC, peer_open<Mpmc>, peer_close<Mpmc>, nullptr,
      nullptr, { &mpmc_try, nullptr, nullptr } },
};

} // namespace

PEER_PLUGIN(table);
