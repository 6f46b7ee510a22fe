/* npz_convert.c - makes a deflated .npz file a stored one, whose arrays are aligned and can be
   viewed without a copy, and measures what that gains: the time to load each file and look at every
   byte, best of several. (Storing takes more disk; where reading the disk is the limit, it may not
   pay.)

   Build:  cc -O2 -I. examples/npz_convert.c -o npz_convert -lpthread
   Run:    ./npz_convert FROM.npz TO.npz */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#include "npz_writer.h"

#include <stdio.h>
#include <stdlib.h>

static volatile uint64_t seen; /* so that looking is not optimised away */

static void look(const void *data, uint64_t bytes) {
    uint64_t sum = 0, word;
    for (uint64_t i = 0; i + 8 <= bytes; i += 8) {
        memcpy(&word, (const char *)data + i, 8);
        sum += word;
    }
    seen = sum;
}

/* Reads an array to fresh memory, which verifies it, and writes it. */
static spdl_result copy(const spdl_npz *npz, size_t index, npz_writer *writer,
                        spdl_error *error) {
    spdl_npy_info info;
    spdl_result result = spdl_npz_info(npz, index, &info, error);
    if (result != SPDL_OK) return result;
    void *data = malloc((size_t)info.bytes + 1); /* that there is none, the next call reports */
    result = spdl_npz_read(npz, index, data, (size_t)info.bytes, error);
    if (result == SPDL_OK)
        result = npz_writer_add(writer, spdl_npz_name(npz, index), info.dtype, info.ndim,
                                info.shape, data, error);
    free(data);
    return result;
}

static spdl_result convert(const char *from, const char *to, spdl_error *error) {
    const spdl_npz_desc desc = { .error = error };
    spdl_npz *npz = NULL;
    npz_writer *writer = NULL;
    spdl_result result = spdl_npz_open(&npz, from, &desc);
    if (result == SPDL_OK) result = npz_writer_open(&writer, to, error);
    for (size_t i = 0; result == SPDL_OK && i < spdl_npz_count(npz); i++)
        result = copy(npz, i, writer, error);
    if (result == SPDL_OK) result = npz_writer_finish(writer, error);
    npz_writer_close(writer); /* without a finish it leaves nothing behind */
    spdl_npz_close(npz);
    return result;
}

/* Loads all arrays to fresh memory, as a training program does with deflated files. */
static spdl_result load_and_look(const char *path, spdl_error *error) {
    const spdl_npz_desc desc = { .error = error };
    spdl_npz_bundle *bundle;
    const spdl_result result = spdl_npz_load(&bundle, path, &desc);
    for (size_t i = 0; result == SPDL_OK && i < bundle->count; i++)
        look(bundle->arrays[i].data, bundle->arrays[i].info.bytes);
    spdl_npz_bundle_free(bundle);
    return result;
}

/* Looks at the bytes where they are, which only stored files allow. */
static spdl_result view_and_look(const char *path, spdl_error *error) {
    const spdl_npz_desc desc = { .error = error };
    spdl_npz *npz;
    spdl_npy_info info;
    const void *data = NULL;
    spdl_result result = spdl_npz_open(&npz, path, &desc);
    for (size_t i = 0; result == SPDL_OK && i < spdl_npz_count(npz); i++) {
        result = spdl_npz_info(npz, i, &info, error);
        if (result == SPDL_OK) result = spdl_npz_view(npz, i, &data, NULL, error);
        if (result == SPDL_OK) look(data, info.bytes);
    }
    spdl_npz_close(npz);
    return result;
}

/* The best of several times, in milliseconds; negative when it fails. */
static double best_ms(spdl_result (*load)(const char *, spdl_error *), const char *path,
                      spdl_error *error) {
    double best = -1;
    for (int i = 0; i < 7; i++) {
        const uint64_t start = spdl_time_ns();
        if (load(path, error) != SPDL_OK) return -1;
        const double ms = (double)(spdl_time_ns() - start) / 1e6;
        if (best < 0 || ms < best) best = ms;
    }
    return best;
}

static double file_mb(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 ? (double)status.st_size / 1e6 : 0;
}

int main(int argc, char **argv) {
    spdl_error error = { .text = "" };
    double before = -1, after = -1;
    if (argc != 3) {
        fprintf(stderr, "usage: npz_convert FROM.npz TO.npz\n");
        return 2;
    }
    if (convert(argv[1], argv[2], &error) == SPDL_OK) {
        before = best_ms(load_and_look, argv[1], &error);
        after = best_ms(view_and_look, argv[2], &error);
    }
    if (before < 0 || after < 0) {
        fprintf(stderr, "npz_convert: %s\n", error.text);
        return 1;
    }
    printf("%s: %.2f MB, loaded in %.3f ms\n", argv[1], file_mb(argv[1]), before);
    printf("%s: %.2f MB, viewed in %.3f ms, %.1f times as fast\n", argv[2], file_mb(argv[2]), after,
           before / after);
    return 0;
}
