/* peer.hpp - what the files of the C++ peers share. A queue is a class with

       Queue(const flow_spec &)          the capacity, as near as the queue comes to it
       bool try_push(item), try_pop(item &)
       void push(item), item pop()       that sleep, if it has such
       size_t push_n(items, n), pop_n(items, n)

   and PEER_TRY, PEER_BLOCK, PEER_BATCH make the thread mains of it. Queues that want something of
   each thread define Local. */
#ifndef PEER_HPP_INCLUDED
#define PEER_HPP_INCLUDED

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "../flow.h"

template <class Queue> static void *peer_open(const flow_spec *spec) { return new Queue(*spec); }
template <class Queue> static void peer_close(void *queue) { delete static_cast<Queue *>(queue); }

template <class Queue> FLOW_INLINE bool peer_try_push(void *queue, void *, uint64_t item) {
    return static_cast<Queue *>(queue)->try_push(item);
}
template <class Queue> FLOW_INLINE bool peer_try_pop(void *queue, void *, uint64_t *item) {
    return static_cast<Queue *>(queue)->try_pop(*item);
}
template <class Queue> FLOW_INLINE bool peer_push(void *queue, void *, uint64_t item) {
    static_cast<Queue *>(queue)->push(item);
    return true;
}
template <class Queue> FLOW_INLINE bool peer_pop(void *queue, void *, uint64_t *item) {
    *item = static_cast<Queue *>(queue)->pop();
    return true;
}
template <class Queue>
FLOW_INLINE size_t peer_push_n(void *queue, void *, const uint64_t *items, size_t count) {
    return static_cast<Queue *>(queue)->push_n(items, count);
}
template <class Queue>
FLOW_INLINE size_t peer_pop_n(void *queue, void *, uint64_t *items, size_t count) {
    return static_cast<Queue *>(queue)->pop_n(items, count);
}

#define PEER_TRY(name, Queue) FLOW_CALLS(name, peer_try_push<Queue>, peer_try_pop<Queue>)
#define PEER_BLOCK(name, Queue) FLOW_CALLS(name, peer_push<Queue>, peer_pop<Queue>)
#define PEER_BATCH(name, Queue) FLOW_CALLS_N(name, peer_push_n<Queue>, peer_pop_n<Queue>)

#define PEER_PLUGIN(table)                                                                         \
    extern "C" int FLOW_PLUGIN(const flow_peer **peers) {                                          \
        *peers = table;                                                                            \
        return int(sizeof table / sizeof table[0]);                                                \
    }                                                                                              \
    extern "C" int FLOW_PLUGIN(const flow_peer **peers)

static inline size_t peer_power_of_2(size_t least) {
    size_t size = 1;
    while (size < least) size *= 2;
    return size;
}

#endif /* PEER_HPP_INCLUDED */
