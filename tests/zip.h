/* zip.h - numbers for tests that make a ZIP file by hand. */
#ifndef ZIP_H_INCLUDED
#define ZIP_H_INCLUDED

#include <stdint.h>

/* Each writes a number, little-endian, and returns its end. */
static inline uint8_t *put16(uint8_t *to, uint64_t value) {
    to[0] = (uint8_t)value;
    to[1] = (uint8_t)(value >> 8);
    return to + 2;
}

static inline uint8_t *put32(uint8_t *to, uint64_t value) {
    return put16(put16(to, value), value >> 16);
}

static inline uint8_t *put64(uint8_t *to, uint64_t value) {
    return put32(put32(to, value), value >> 32);
}

#endif /* ZIP_H_INCLUDED */
