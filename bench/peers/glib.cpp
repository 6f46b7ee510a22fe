// needs: libglib2.0-dev pkg-config
// flags: $(pkg-config --cflags --libs glib-2.0)
#include <glib.h>

#include "peer.hpp"

namespace {

struct Async {
    GAsyncQueue *queue;

    explicit Async(const flow_spec &) : queue(g_async_queue_new()) {}
    ~Async() { g_async_queue_unref(queue); }
    bool try_push(uint64_t item) {
        push(item);
        return true;
    }
    bool try_pop(uint64_t &item) {
        item = reinterpret_cast<uint64_t>(g_async_queue_try_pop(queue));
        return item != 0;
    }
    void push(uint64_t item) { g_async_queue_push(queue, reinterpret_cast<void *>(item)); }
    uint64_t pop() { return reinterpret_cast<uint64_t>(g_async_queue_pop(queue)); }
};

PEER_TRY(async_try, Async)
PEER_BLOCK(async_block, Async)

const flow_peer table[] = {
    { "GAsyncQueue", FLOW_UNBOUNDED, FLOW_SPSC | FLOW_MPMC, peer_open<Async>, peer_close<Async>,
      nullptr, nullptr, { &async_try, &async_block, nullptr } },
};

} // namespace

PEER_PLUGIN(table);
