/* webdataset.c - images with labels out of tar shards, as webdataset has them: members of one key,
   the path up to the first dot of the name, are a sample.
       SPDL_FILES -> SPDL_TAR (.group: a sample after the other) -> decode -> batch in place
   One shard is read after the other, so the samples come in order. The manifest's hash tells
   whether a later run sees the same shards. Without an argument it makes shards of its own in a
   folder.

   Build:  cc -O2 -I. examples/webdataset.c -o webdataset -lpthread
   Run:    ./webdataset ["shards/train-*.tar"]     (members KEY.img of 64 bytes, KEY.cls) */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

enum { PIXELS = 64, BATCH = 32, SHARDS = 4, SAMPLES = 300, BLOCK = 512 };

typedef struct Example {
    float pixels[PIXELS];
    int32_t label;
} Example;

/* The member of a sample whose name has this behind its first dot. */
static const spdl_record *member(const spdl_record *sample, const char *extension) {
    for (; sample != NULL; sample = sample->next) {
        const char *slash = strrchr(sample->name, '/');
        const char *dot = strchr(slash != NULL ? slash : sample->name, '.');
        if (dot != NULL && strcmp(dot + 1, extension) == 0) break;
    }
    return sample;
}

SPDL_FN(decode, spdl_record, Example) {
    const spdl_record *image = member(in, "img"), *label = member(in, "cls");
    if (image == NULL || label == NULL || image->bytes != PIXELS)
        return spdl_fail(task, "%s: no image of %d bytes with a label", in->name, PIXELS);
    if ((*out = spdl_buffer(task)) == NULL) return SPDL_E_NOMEM; /* its place in the batch */
    for (int i = 0; i < PIXELS; i++) (*out)->pixels[i] = (float)image->data[i] / 255;
    (*out)->label = (int32_t)strtol((const char *)label->data, NULL, 10); /* a zero follows it */
    return SPDL_OK;
}

static void put_member(FILE *tar, const char *key, const char *kind, const void *data, int bytes) {
    char head[BLOCK] = { 0 };
    unsigned sum = 0;
    snprintf(head, 100, "%s.%s", key, kind);
    snprintf(head + 124, 12, "%011o", (unsigned)bytes);
    memcpy(head + 156, "0", 1);
    memcpy(head + 257, "ustar\00000", 8);
    memset(head + 148, ' ', 8);
    for (int i = 0; i < BLOCK; i++) sum += (unsigned char)head[i];
    snprintf(head + 148, 8, "%06o", sum);
    fwrite(head, 1, BLOCK, tar);
    memset(head, 0, BLOCK);
    memcpy(head, data, (size_t)bytes);
    fwrite(head, 1, BLOCK, tar);
}

static void make_shards(const char *folder) {
    char text[64], zeros[2 * BLOCK] = { 0 };
    unsigned char image[PIXELS];
    mkdir(folder, 0777);
    for (int i = 0; i < SHARDS; i++) {
        snprintf(text, sizeof text, "%s/train-%06d.tar", folder, i);
        FILE *tar = fopen(text, "wb");
        if (tar == NULL) perror(text), exit(1);
        for (int k = 0; k < SAMPLES; k++) {
            for (int j = 0; j < PIXELS; j++) image[j] = (unsigned char)(i * SAMPLES + k + j);
            snprintf(text, sizeof text, "sample/%06d", i * SAMPLES + k);
            put_member(tar, text, "img", image, PIXELS);
            put_member(tar, text, "cls", k % 10 > 4 ? "1" : "0", 1);
        }
        fwrite(zeros, sizeof zeros, 1, tar);
        fclose(tar);
    }
}

int main(int argc, char **argv) {
    spdl_error error;
    const spdl_files_desc named = { .error = &error };
    const spdl_records_desc grouped = { .group = true, .max_bytes = 1 << 20 };
    spdl_files *files;
    spdl_pipeline *p;
    spdl_batch *batch;
    size_t samples = 0, labels = 0;
    double light = 0;
    if (argc < 2) make_shards("shards");
    if (spdl_files_open(&files, argc < 2 ? "shards/train-*.tar" : argv[1], &named) != SPDL_OK)
        return fprintf(stderr, "webdataset: %s\n", error.text), 1;
    if (spdl_pipeline_create(&p, NULL, SPDL_STAGES(
            SPDL_FILES(files),
            SPDL_TAR(&grouped, .buffer_size = 16),
            SPDL_PIPE(decode, .concurrency = SPDL_ALL),
            SPDL_BATCH(BATCH, .item_bytes = sizeof(Example)),
            SPDL_SINK(3))) != SPDL_OK) return 1;
    for (; SPDL_NEXT(p, &batch, SPDL_FOREVER) == SPDL_OK; spdl_batch_free(batch)) {
        const Example *e = batch->data; /* one after the other: a trainer takes its step here */
        for (size_t i = 0; i < batch->count; i++, samples++) {
            labels += (size_t)e[i].label;
            for (int j = 0; j < PIXELS; j++) light += e[i].pixels[j];
        }
    }
    printf("%zu samples in %llu shards (%016llx), %zu of label 1, light %.3f\n", samples,
           (unsigned long long)spdl_files_count(files), (unsigned long long)spdl_files_hash(files),
           labels, light / (double)(samples * PIXELS));
    const bool failed = spdl_pipeline_failed(p); /* the log has said why */
    spdl_pipeline_destroy(p);
    spdl_files_close(files);
    return failed || samples == 0;
}
