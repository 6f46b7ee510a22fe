/* loader_work.c - becomes build/bench/loader_work.so, for bench/loader_peers.py. */
#include "loader_work.h"

void work(void *to, size_t bytes, uint64_t number, int rounds);

void work(void *to, size_t bytes, uint64_t number, int rounds) {
    loader_work(to, bytes, number, rounds);
}
