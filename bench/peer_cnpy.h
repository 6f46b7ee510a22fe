/* peer_cnpy.h - how cnpy (github.com/rogersce/cnpy, 4e8810b) loads all arrays of an .npz, in C: its
   npz_load reads the local headers one after the other by fread, the header of each array, and its
   data to a vector, which is filled with zeros first; a deflated member goes to a vector, is
   inflated by zlib to another, and copied to a third. Nothing is verified. cnpy takes the sizes
   from the local header, which NumPy 2 does not fill in, so it cannot read deflated files of that;
   here the sizes are given. */
#ifndef PEER_CNPY_H_INCLUDED
#define PEER_CNPY_H_INCLUDED

#include "peer_inflate.h"

/* A std::vector of so many bytes. */
static inline uint8_t *cnpy_vector(size_t bytes) {
    uint8_t *at = (uint8_t *)malloc(bytes > 0 ? bytes : 1);
    if (at != NULL) memset(at, 0, bytes);
    return at;
}

static inline size_t cnpy_header_bytes(const uint8_t *npy) {
    return 10 + (size_t)(npy[8] | npy[9] << 8);
}

/* The data of the member at the position of the file, from its npy header on. */
static inline uint8_t *cnpy_stored(FILE *file, size_t bytes) {
    uint8_t head[65536], *data;
    size_t header;
    if (fread(head, 1, 10, file) != 10) return NULL;
    header = cnpy_header_bytes(head);
    if (fread(head + 10, 1, header - 10, file) != header - 10) return NULL;
    data = cnpy_vector(bytes - header);
    return fread(data, 1, bytes - header, file) == bytes - header ? data : NULL;
}

static inline uint8_t *cnpy_deflated(FILE *file, size_t in_bytes, size_t bytes) {
    uint8_t *in = cnpy_vector(in_bytes), *out = cnpy_vector(bytes), *data = NULL;
#if PEER_ZLIB
    if (fread(in, 1, in_bytes, file) == in_bytes && peer_zlib(in, in_bytes, out, bytes)) {
        const size_t header = cnpy_header_bytes(out);
        data = cnpy_vector(bytes - header);
        memcpy(data, out + header, bytes - header);
    }
#else
    (void)file;
#endif
    free(in);
    free(out);
    return data;
}

/* Loads all and calls each(data) before it frees them; false when that cannot be. */
static inline bool cnpy_load(const char *path, const peer_member *members, size_t count,
                             void (*each)(const uint8_t *data, size_t bytes)) {
    FILE *file = fopen(path, "rb");
    uint8_t local[30], name[65536], **data = (uint8_t **)calloc(count, sizeof *data);
    bool good = file != NULL && data != NULL;
    size_t i;
    for (i = 0; i < count && good; ++i) {
        const peer_member *m = &members[i];
        size_t skip;
        good = fread(local, 1, 30, file) == 30 && memcmp(local, "PK\3\4", 4) == 0;
        skip = (size_t)(local[26] | local[27] << 8) + (size_t)(local[28] | local[29] << 8);
        good = good && skip < sizeof name && fread(name, 1, skip, file) == skip;
        if (good) data[i] = local[8] == 0 ? cnpy_stored(file, m->bytes)
                                          : cnpy_deflated(file, m->in_bytes, m->bytes);
        good = good && data[i] != NULL;
    }
    if (file != NULL) fclose(file);
    for (i = 0; i < count && data != NULL; ++i) {
        if (good) each(data[i], members[i].bytes - members[i].head);
        free(data[i]);
    }
    free(data);
    return good;
}

#endif /* PEER_CNPY_H_INCLUDED */
