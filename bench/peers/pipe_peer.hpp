/* pipe_peer.hpp - what the files of the pipelines' peers share. Each gives the `run` of a
   pipe_peer, see pipe.h. */
#ifndef PIPE_PEER_HPP_INCLUDED
#define PIPE_PEER_HPP_INCLUDED

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <deque>

#include "../pipe.h"

struct Numbered {
    void *item;
    uint64_t number;
};

#define PIPE_PLUGIN(table)                                                                         \
    extern "C" int pipe_plugin(const pipe_peer **peers) {                                          \
        *peers = table;                                                                            \
        return int(sizeof table / sizeof table[0]);                                                \
    }                                                                                              \
    extern "C" int pipe_plugin(const pipe_peer **peers)

#endif /* PIPE_PEER_HPP_INCLUDED */
