// needs: libcds-dev
// flags: -lcds
#include <cds/container/vyukov_mpmc_cycle_queue.h>
#include <cds/container/weak_ringbuffer.h>

#include "peer.hpp"

namespace {

/* Le, Guatto, Cohen, Pop 2013. */
struct Weak {
    cds::container::WeakRingBuffer<uint64_t> queue;

    explicit Weak(const flow_spec &spec) : queue(peer_power_of_2(spec.capacity)) {}
    bool try_push(uint64_t item) { return queue.push(item); }
    bool try_pop(uint64_t &item) { return queue.pop(item); }
    /* All or nothing: what it cannot take whole, it is offered by halves. */
    size_t push_n(const uint64_t *items, size_t count) {
        for (; count > 0; count /= 2) {
            if (queue.push(items, count)) return count;
        }
        return 0;
    }
    size_t pop_n(uint64_t *items, size_t count) {
        for (; count > 0; count /= 2) {
            if (queue.pop(items, count)) return count;
        }
        return 0;
    }
};

struct Vyukov {
    cds::container::VyukovMPMCCycleQueue<uint64_t> queue;

    explicit Vyukov(const flow_spec &spec) : queue(peer_power_of_2(spec.capacity)) {}
    bool try_push(uint64_t item) { return queue.enqueue(item); }
    bool try_pop(uint64_t &item) { return queue.dequeue(item); }
};

PEER_TRY(weak_try, Weak)
PEER_BATCH(weak_batch, Weak)
PEER_TRY(vyukov_try, Vyukov)

const flow_peer table[] = {
    { "cds WeakRingBuffer", FLOW_SPINS, FLOW_SPSC, peer_open<Weak>, peer_close<Weak>, nullptr,
      nullptr, { &weak_try, nullptr, &weak_batch } },
    { "cds Vyukov queue", FLOW_SPINS, FLOW_SPSC | FLOW_MPMC, peer_open<Vyukov>, peer_close<Vyukov>,
      nullptr, nullptr, { &vyukov_try, nullptr, nullptr } },
};

} // namespace

PEER_PLUGIN(table);
