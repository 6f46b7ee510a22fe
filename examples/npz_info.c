/* npz_info.c - prints name, type, shape, order and size of every array in .npz and .npy files,
   after reading each one to its end, checksum included.

   Build:  cc -O2 -I. examples/npz_info.c -o npz_info -lpthread
   Run:    ./npz_info FILE... */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static void shape_text(const spdl_npy_info *info, char *text, size_t bytes) {
    size_t used = (size_t)snprintf(text, bytes, "(");
    for (int i = 0; i < info->ndim && used < bytes; i++)
        used += (size_t)snprintf(text + used, bytes - used, "%s%" PRIu64, i ? ", " : "",
                                 info->shape[i]);
    if (used < bytes) snprintf(text + used, bytes - used, info->ndim == 1 ? ",)" : ")");
}

static spdl_result read_array(const spdl_npz *npz, size_t index, const spdl_npy_info *info,
                              spdl_error *error) {
    void *data = malloc(info->bytes ? (size_t)info->bytes : 1);
    spdl_result result = SPDL_E_NOMEM;
    if (data) result = spdl_npz_read(npz, index, data, (size_t)info->bytes, error);
    else snprintf(error->text, sizeof error->text, "no memory for %" PRIu64 " bytes", info->bytes);
    free(data);
    return result;
}

static spdl_result print_array(const spdl_npz *npz, size_t index, spdl_error *error) {
    spdl_npy_info info;
    char shape[256];
    spdl_result result = spdl_npz_info(npz, index, &info, error);
    if (result == SPDL_OK) result = read_array(npz, index, &info, error);
    if (result != SPDL_OK) return result;
    shape_text(&info, shape, sizeof shape);
    printf("  %-16s %-8s %-20s %-8s %-8s %12" PRIu64 " bytes\n", spdl_npz_name(npz, index),
           info.descr, shape, info.fortran_order ? "Fortran" : "C",
           spdl_npz_stored(npz, index) ? "stored" : "deflated", info.bytes);
    return SPDL_OK;
}

static spdl_result print_file(const char *path) {
    spdl_error error = { .text = "" };
    const spdl_npz_desc desc = { .error = &error };
    spdl_npz *npz;
    spdl_result result = spdl_npz_open_file(&npz, path, &desc);
    if (result == SPDL_OK) {
        const size_t count = spdl_npz_count(npz);
        printf("%s: %zu array%s\n", path, count, count == 1 ? "" : "s");
        for (size_t i = 0; i < count && result == SPDL_OK; i++)
            result = print_array(npz, i, &error);
    }
    spdl_npz_close(npz);
    if (result != SPDL_OK)
        fprintf(stderr, "npz_info: %s (%s)\n", error.text, spdl_result_text(result));
    return result;
}

int main(int argc, char **argv) {
    int bad = 0;
    if (argc < 2) {
        fprintf(stderr, "usage: npz_info FILE...\n");
        return 2;
    }
    for (int i = 1; i < argc; i++) bad += print_file(argv[i]) != SPDL_OK;
    return bad ? 1 : 0;
}
