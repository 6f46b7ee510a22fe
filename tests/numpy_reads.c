/* Writes FOLDER/numpy.npz and FOLDER/numpy.npy, for numpy_reads.py, which reads them with NumPy. */
#define SPDL_IMPLEMENTATION
#include "../spdl.h"

#include "../examples/npz_writer.h"

#include <stdio.h>

#define CHECK(call)                                                                                \
    do {                                                                                           \
        if ((call) == SPDL_OK) break;                                                              \
        fprintf(stderr, "%s\n", error.text);                                                       \
        return 1;                                                                                  \
    } while (0)

static uint8_t zeros[1 + 258 * 50];
static const float table[6] = { 0, 1, 2, 3, 4, 5 };

int main(int argc, char **argv) {
    const uint64_t many = sizeof zeros, three = 3, two_three[2] = { 2, 3 };
    npz_writer *w;
    spdl_error error;
    char path[1000];
    if (argc != 2) return 2;
    snprintf(path, sizeof path, "%s/numpy.npz", argv[1]);
    CHECK(npz_writer_open(&w, path, &error));
    CHECK(npz_writer_add(w, "zeros", "|u1", 1, &many, zeros, &error));
    CHECK(npz_writer_add(w, "\xc3\xa4", "<f4", 2, two_three, table, &error));
    CHECK(npz_writer_add(w, "struct", "[('gr\xc3\xb6\xc3\x9f\x65', '<f4'), ('s', '|S4')]", 1,
                              &three, table, &error));
    CHECK(npz_writer_finish(w, &error));
    npz_writer_close(w);
    snprintf(path, sizeof path, "%s/numpy.npy", argv[1]);
    CHECK(npz_writer_open(&w, path, &error));
    CHECK(npz_writer_add(w, "x", "<f4", 2, two_three, table, &error));
    CHECK(npz_writer_finish(w, &error));
    npz_writer_close(w);
    return 0;
}
