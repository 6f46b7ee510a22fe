/* npz_info.c - prints name, type, shape and size of every array in .npz and .npy files, after
   reading each to its end, checksum included. With --json one object per array and line.

   Build:  cc -O2 -I. examples/npz_info.c -o npz_info -lpthread
   Windows: gcc -O2 -I. examples/npz_info.c -o npz_info.exe
        or: cl /O2 /std:c11 /I. examples\npz_info.c
   Run:    ./npz_info [--json] FILE... */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static void print_shape(const uint64_t *shape, int ndim, const char *open, const char *close) {
    printf("%s", open);
    for (int i = 0; i < ndim; i++) printf("%s%" PRIu64, i ? ", " : "", shape[i]);
    printf("%s", close);
}

/* A string as JSON has it; names are UTF-8 already. */
static void print_json_string(const char *text) {
    putchar('"');
    for (; *text; text++) {
        if ((unsigned char)*text < 32) printf("\\u%04x", (unsigned)*text);
        else if (*text == '"' || *text == '\\') printf("\\%c", *text);
        else putchar(*text);
    }
    putchar('"');
}

/* Reads an array as a whole, which verifies it. */
static spdl_result read_array(const spdl_npz *npz, size_t index, const spdl_npy_info *info,
                              spdl_error *error) {
    void *data = malloc(info->bytes ? (size_t)info->bytes : 1);
    spdl_result result = SPDL_E_NOMEM;
    if (data) result = spdl_npz_read(npz, index, data, (size_t)info->bytes, error);
    else snprintf(error->text, sizeof error->text, "no memory for %" PRIu64 " bytes", info->bytes);
    free(data);
    return result;
}

static void print_json(const char *path, const char *name, const spdl_npy_info *info) {
    printf("{\"file\": ");
    print_json_string(path);
    printf(", \"name\": ");
    print_json_string(name);
    printf(", \"kind\": \"%c\", \"itemsize\": %" PRIu64 ", \"descr\": ", info->kind,
           info->itemsize);
    print_json_string(info->dtype);
    print_shape(info->shape, info->ndim, ", \"shape\": [", "], ");
    printf("\"bytes\": %" PRIu64 ", \"stored\": %s}\n", info->bytes,
           info->stored ? "true" : "false");
}

static spdl_result print_array(const spdl_npz *npz, const char *path, size_t index, bool json,
                               spdl_error *error) {
    spdl_npy_info info;
    spdl_result result = spdl_npz_info(npz, index, &info, error);
    if (result == SPDL_OK) result = read_array(npz, index, &info, error);
    if (result != SPDL_OK) return result;
    if (json) print_json(path, spdl_npz_name(npz, index), &info);
    if (json) return SPDL_OK;
    printf("  %-16s %-8s ", spdl_npz_name(npz, index), info.dtype);
    print_shape(info.shape, info.ndim, "(", info.ndim == 1 ? ",)" : ")");
    printf(" %s, %" PRIu64 " bytes\n", info.stored ? "stored" : "deflated", info.bytes);
    return SPDL_OK;
}

static spdl_result print_file(const char *path, bool json) {
    spdl_error error = { .text = "" };
    const spdl_npz_desc desc = { .error = &error };
    spdl_npz *npz;
    spdl_result result = spdl_npz_open(&npz, path, &desc);
    if (result == SPDL_OK && !json) printf("%s: %zu arrays\n", path, spdl_npz_count(npz));
    for (size_t i = 0; result == SPDL_OK && i < spdl_npz_count(npz); i++)
        result = print_array(npz, path, i, json, &error);
    spdl_npz_close(npz);
    if (result != SPDL_OK)
        fprintf(stderr, "npz_info: %s (%s)\n", error.text, spdl_result_text(result));
    return result;
}

int main(int argc, char **argv) {
    const bool json = argc > 1 && strcmp(argv[1], "--json") == 0;
    int bad = 0;
    if (argc < 2 + json) fprintf(stderr, "usage: npz_info [--json] FILE...\n");
    for (int i = 1 + json; i < argc; i++) bad += print_file(argv[i], json) != SPDL_OK;
    return argc < 2 + json ? 2 : bad ? 1 : 0;
}
