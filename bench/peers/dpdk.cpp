// needs: libdpdk-dev pkg-config
// flags: $(pkg-config --cflags libdpdk) -lrte_ring -lrte_eal
//
// The ring is set up in memory of its own, so no EAL, root or huge pages are needed.
#include <cstdlib>
#include <new>

#include <rte_ring.h>

#include "peer.hpp"

namespace {

template <unsigned flags> struct Ring {
    rte_ring *ring;

    explicit Ring(const flow_spec &spec) {
        const unsigned count = unsigned(peer_power_of_2(spec.capacity + 1));
        const size_t bytes = size_t(rte_ring_get_memsize(count));
        ring = static_cast<rte_ring *>(std::aligned_alloc(128, (bytes + 127) / 128 * 128));
        if (ring == nullptr) throw std::bad_alloc();
        if (rte_ring_init(ring, "bench", spec.capacity, flags | RING_F_EXACT_SZ) != 0) {
            bench_fail("rte_ring_init");
        }
    }
    ~Ring() { std::free(ring); }
};

struct Single : Ring<RING_F_SP_ENQ | RING_F_SC_DEQ> {
    using Ring::Ring;
    bool try_push(uint64_t item) {
        return rte_ring_sp_enqueue(ring, reinterpret_cast<void *>(item)) == 0;
    }
    bool try_pop(uint64_t &item) {
        return rte_ring_sc_dequeue(ring, reinterpret_cast<void **>(&item)) == 0;
    }
    size_t push_n(const uint64_t *items, size_t count) {
        return rte_ring_sp_enqueue_burst(ring, reinterpret_cast<void *const *>(items),
                                         unsigned(count), nullptr);
    }
    size_t pop_n(uint64_t *items, size_t count) {
        return rte_ring_sc_dequeue_burst(ring, reinterpret_cast<void **>(items), unsigned(count),
                                         nullptr);
    }
};

/* The default, and two forms for more threads than cores: relaxed tail sync, head tail sync. */
template <unsigned flags> struct Multi : Ring<flags> {
    using Ring<flags>::Ring;
    bool try_push(uint64_t item) {
        return rte_ring_enqueue(this->ring, reinterpret_cast<void *>(item)) == 0;
    }
    bool try_pop(uint64_t &item) {
        return rte_ring_dequeue(this->ring, reinterpret_cast<void **>(&item)) == 0;
    }
};

typedef Multi<0> Default;
typedef Multi<RING_F_MP_RTS_ENQ | RING_F_MC_RTS_DEQ> Rts;
typedef Multi<RING_F_MP_HTS_ENQ | RING_F_MC_HTS_DEQ> Hts;

PEER_TRY(single_try, Single)
PEER_BATCH(single_batch, Single)
PEER_TRY(default_try, Default)
PEER_TRY(rts_try, Rts)
PEER_TRY(hts_try, Hts)

const flow_peer table[] = {
    { "rte_ring SP/SC", FLOW_SPINS, FLOW_SPSC, peer_open<Single>, peer_close<Single>, nullptr,
      nullptr, { &single_try, nullptr, &single_batch } },
    { "rte_ring MP/MC", FLOW_SPINS, FLOW_MPMC, peer_open<Default>, peer_close<Default>, nullptr,
      nullptr, { &default_try, nullptr, nullptr } },
    { "rte_ring RTS", FLOW_SPINS, FLOW_MPMC, peer_open<Rts>, peer_close<Rts>, nullptr, nullptr,
      { &rts_try, nullptr, nullptr } },
    { "rte_ring HTS", FLOW_SPINS, FLOW_MPMC, peer_open<Hts>, peer_close<Hts>, nullptr, nullptr,
      { &hts_try, nullptr, nullptr } },
};

} // namespace

PEER_PLUGIN(table);
