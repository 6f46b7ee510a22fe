// needs: libreaderwriterqueue-dev
// flags:
#include <readerwriterqueue/readerwritercircularbuffer.h>
#include <readerwriterqueue/readerwriterqueue.h>

#include "peer.hpp"

namespace {

struct Reader {
    moodycamel::ReaderWriterQueue<uint64_t> queue;

    explicit Reader(const flow_spec &spec) : queue(spec.capacity) {}
    bool try_push(uint64_t item) { return queue.try_enqueue(item); }
    bool try_pop(uint64_t &item) { return queue.try_dequeue(item); }
};

struct Circular {
    moodycamel::BlockingReaderWriterCircularBuffer<uint64_t> queue;

    explicit Circular(const flow_spec &spec) : queue(spec.capacity) {}
    bool try_push(uint64_t item) { return queue.try_enqueue(item); }
    bool try_pop(uint64_t &item) { return queue.try_dequeue(item); }
    void push(uint64_t item) { queue.wait_enqueue(item); }
    uint64_t pop() {
        uint64_t item;
        queue.wait_dequeue(item);
        return item;
    }
};

PEER_TRY(reader_try, Reader)
PEER_TRY(circular_try, Circular)
PEER_BLOCK(circular_block, Circular)

const flow_peer table[] = {
    { "readerwriterqueue", FLOW_SPINS, FLOW_SPSC, peer_open<Reader>, peer_close<Reader>, nullptr,
      nullptr, { &reader_try, nullptr, nullptr } },
    { "moody circular buffer", FLOW_SLEEPS, FLOW_SPSC, peer_open<Circular>, peer_close<Circular>,
      nullptr, nullptr, { &circular_try, &circular_block, nullptr } },
};

} // namespace

PEER_PLUGIN(table);
