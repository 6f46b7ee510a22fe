/* loader_work.h - how bench_loader makes the bytes of an item, the same code for us and for the
   peers in Python, who call it in loader_work.so. */
#ifndef LOADER_WORK_H_INCLUDED
#define LOADER_WORK_H_INCLUDED

#include <stddef.h>
#include <stdint.h>

/* Writes them `rounds` times: once is memory speed, LOADER_DECODE the cost of a JPEG of that many
   pixels. Then the first word is `number`, and the last one ~number. At least 16 bytes. */
#define LOADER_DECODE 64
static inline void loader_work(void *to, size_t bytes, uint64_t number, int rounds) {
    uint64_t *word = (uint64_t *)to;
    const size_t count = bytes / sizeof *word;
    size_t i;
    int round;
    for (i = 0; i < count; ++i) word[i] = number + i;
    for (round = 1; round < rounds; ++round) {
        __asm__ __volatile__("" ::: "memory"); /* no two rounds at once */
        for (i = 0; i < count; ++i) word[i] += number ^ i;
    }
    word[0] = number;
    word[count - 1] = ~number;
}

static inline int loader_work_is(const void *data, size_t bytes, uint64_t number) {
    const uint64_t *word = (const uint64_t *)data;
    return word[0] == number && word[bytes / sizeof *word - 1] == ~number;
}

#endif /* LOADER_WORK_H_INCLUDED */
