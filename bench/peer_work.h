/* peer_work.h - the work of bench_peers: one shared object, which sides in C link and sides in
   Python call by ctypes. An item is made of its number alone, by any thread; a consumer adds up
   what it got, so that two sums are equal only if the same bytes came in the same order. */
#ifndef PEER_WORK_H_INCLUDED
#define PEER_WORK_H_INCLUDED

#include <stddef.h>
#include <stdint.h>

typedef enum peer_kind {
    PEER_JPEG,     /* reads a JPEG of 500 x 375, decodes it, and resizes it to 224 x 224 */
    PEER_FILE,     /* reads a file of 4 KB */
    PEER_TOKENS,   /* reads a window of 4 x 1,024 tokens, and converts it to int32 */
    PEER_TAIL,     /* computes 0.2 ms, one in a hundred 10 ms */
    PEER_HTTP,     /* gets 8 KB from the server of the bench */
    PEER_STORED,   /* reads an array of 1.5 MB out of an .npz */
    PEER_DEFLATED, /* the same, deflated */
    PEER_IO,       /* sleeps, then computes 0.2 ms and makes 4 KB */
    PEER_KINDS
} peer_kind;

#define PEER_FILES 64000
#define PEER_FILE_BYTES 4096
#define PEER_PAGE_BYTES 8192
#define PEER_SHARDS 16 /* of each kind of .npz */
#define PEER_ARRAY_BYTES (128 * 64 * 64 * 3)

/* What items are made from: the folder with the files, and the port of the server. `late_us` is how
   long each read waits first. Before any other call, in the process that makes items. */
void peer_open(const char *folder, int kind, int late_us, int port);

/* Not 0: what that kind needs was not there when this was compiled. */
int peer_lacks(int kind);

/* Makes the files of all kinds but .npz, where they are missing. 0: made. */
int peer_files(const char *folder);
int peer_jpegs(const char *folder); /* only those of PEER_JPEG */

size_t peer_item_bytes(void);

/* Makes an item. 0: it could not be made. */
int peer_make(uint64_t number, void *item);

/* The same bytes without the wait and the computing, for the sum that must come out. */
int peer_remake(uint64_t number, void *item);

/* The sum with these bytes behind it. */
uint64_t peer_take(uint64_t sum, const void *data, size_t bytes);

/* A step of the consumer: computes so long on each of so many threads. */
void peer_step(double ms, int threads);

void peer_page(uint64_t number, void *page); /* what the server answers */

#endif /* PEER_WORK_H_INCLUDED */
