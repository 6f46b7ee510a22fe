/* tar.c - the members of tar files (ustar, pax, GNU) in memory that does not grow with the files:
   SPDL_TAR hands on one member, and goes on with the same file when there is room for the next.
   The folder, pattern or list of files is opened by spdl_files_open. Prints size, sum of the bytes
   and name of each member, in order.

   Build:  cc -O2 -I. examples/tar.c -o tar -lpthread
   Run:    ./tar "train-*.tar"     (or a folder, a file, @LIST) */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <stdio.h>

/* Adding up stands for decoding: on any worker, up to two at a time. */
SPDL_FN(add_up, spdl_record, spdl_record) {
    uint64_t sum = 0;
    for (size_t i = 0; i < in->bytes; i++) sum += in->data[i];
    in->offset = sum; /* where it was in the file is not needed any more */
    *out = in;
    return SPDL_OK;
}

int main(int argc, char **argv) {
    spdl_error error;
    const spdl_files_desc named = { .error = &error };
    spdl_files *files;
    spdl_pipeline *p;
    spdl_record *member;
    if (argc != 2) return fprintf(stderr, "usage: tar FILES\n"), 2;
    if (spdl_files_open(&files, argv[1], &named) != SPDL_OK)
        return fprintf(stderr, "tar: %s\n", error.text), 1;
    if (spdl_pipeline_create(&p, NULL, SPDL_STAGES(
            SPDL_FILES(files),
            SPDL_TAR(NULL),
            SPDL_PIPE(add_up, .concurrency = SPDL_ALL),
            SPDL_SINK(4))) != SPDL_OK) return spdl_files_close(files), 1;
    for (; SPDL_NEXT(p, &member, SPDL_FOREVER) == SPDL_OK; spdl_record_free(member))
        printf("%zu %llu %s\n", member->bytes, (unsigned long long)member->offset, member->name);
    const bool failed = spdl_pipeline_failed(p); /* the log has said why */
    spdl_pipeline_destroy(p);
    spdl_files_close(files);
    return failed;
}
