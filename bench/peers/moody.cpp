// needs: libconcurrentqueue-dev
// flags:
#include <concurrentqueue/blockingconcurrentqueue.h>
#include <concurrentqueue/concurrentqueue.h>

#include "peer.hpp"

namespace {

/* The fastest way to use it: a token for each thread and side. Not bounded by try_enqueue, which
   only never allocates: one producer may hold all blocks for good, and then the others starve. */
template <class Base> struct Tokens {
    Base *queue;
    typename Base::producer_token_t producer;
    typename Base::consumer_token_t consumer;

    explicit Tokens(Base *of) : queue(of), producer(*of), consumer(*of) {}
};

typedef moodycamel::ConcurrentQueue<uint64_t> Plain;
typedef moodycamel::BlockingConcurrentQueue<uint64_t> Blocking;

template <class Base> void *open_queue(const flow_spec *spec) {
    const size_t producers = size_t(spec->producers + spec->consumers);
    return new Base(spec->capacity, producers, 0);
}
template <class Base> void close_queue(void *queue) { delete static_cast<Base *>(queue); }
template <class Base> void *enter(void *queue) {
    return new Tokens<Base>(static_cast<Base *>(queue));
}
template <class Base> void leave(void *local) { delete static_cast<Tokens<Base> *>(local); }

template <class Base> FLOW_INLINE bool push(void *queue, void *local, uint64_t item) {
    return static_cast<Base *>(queue)->enqueue(static_cast<Tokens<Base> *>(local)->producer, item);
}
template <class Base> FLOW_INLINE bool try_pop(void *queue, void *local, uint64_t *item) {
    return static_cast<Base *>(queue)->try_dequeue(static_cast<Tokens<Base> *>(local)->consumer,
                                                   *item);
}
FLOW_INLINE bool pop(void *queue, void *local, uint64_t *item) {
    static_cast<Blocking *>(queue)->wait_dequeue(static_cast<Tokens<Blocking> *>(local)->consumer,
                                                 *item);
    return true;
}
FLOW_INLINE size_t push_n(void *queue, void *local, const uint64_t *items, size_t count) {
    const bool ok = static_cast<Plain *>(queue)->enqueue_bulk(
        static_cast<Tokens<Plain> *>(local)->producer, items, count);
    return ok ? count : 0;
}
FLOW_INLINE size_t pop_n(void *queue, void *local, uint64_t *items, size_t count) {
    return static_cast<Plain *>(queue)->try_dequeue_bulk(
        static_cast<Tokens<Plain> *>(local)->consumer, items, count);
}

FLOW_CALLS(plain_try, push<Plain>, try_pop<Plain>)
FLOW_CALLS_N(plain_batch, push_n, pop_n)
FLOW_CALLS(blocking_block, push<Blocking>, pop)

const unsigned can = FLOW_SPSC | FLOW_MPMC | FLOW_UNORDERED;
const flow_peer table[] = {
    { "moody cq", FLOW_UNBOUNDED, can, open_queue<Plain>, close_queue<Plain>, enter<Plain>,
      leave<Plain>, { &plain_try, nullptr, &plain_batch } },
    { "moody blocking cq", FLOW_UNBOUNDED, can, open_queue<Blocking>,
      close_queue<Blocking>, enter<Blocking>, leave<Blocking>,
      { nullptr, &blocking_block, nullptr } },
};

} // namespace

PEER_PLUGIN(table);
