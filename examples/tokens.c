/* tokens.c - windows of tokens out of shards as llm.c writes them, in batches without a copy: the
   source writes inputs and targets straight into the batch, and spdl_batch_free gives its memory
   back to the next one. A window carries its position, so training goes on after a checkpoint
   exactly where the trainer was, not where the source had got to. Another pipeline has what the
   model is validated on: every epoch of it is the same few batches, read ahead while the trainer
   trains. Without arguments it takes three shards that it makes itself.

   Build:  cc -O2 -I. examples/tokens.c -o tokens -lpthread
   Run:    ./tokens [SHARD.bin ...]     (256 int32 of header, the third counts the uint16 tokens) */
#define _GNU_SOURCE
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { TOKENS = 256, BATCH = 8, STEPS = 60, SAVED = 25, VALIDATED = 5, HEADER = 256, MADE = 30000 };

typedef struct Window {
    uint64_t position;
    int32_t inputs[TOKENS], targets[TOKENS];
} Window;

typedef struct Shard {
    FILE *file;
    uint64_t windows;
} Shard;

typedef struct Loader {
    const Shard *shards;
    int count;
    uint64_t from, epoch; /* the first window's position; windows in an epoch, or 0 */
} Loader;

SPDL_FN(read_window, void, Window) {
    const Loader *loader = spdl_ctx(task);
    const uint64_t number = spdl_sequence(task), position = loader->from + number;
    uint64_t at = position;
    uint16_t tokens[TOKENS + 1]; /* the last target is the first input of the next window */
    int i = 0;
    if (loader->epoch && number == loader->epoch) return SPDL_END;
    for (; at >= loader->shards[i].windows; i = (i + 1) % loader->count)
        at -= loader->shards[i].windows;
    if (pread(fileno(loader->shards[i].file), tokens, sizeof tokens,
              (off_t)(HEADER * sizeof(int32_t) + at * TOKENS * sizeof *tokens)) != sizeof tokens)
        return spdl_fail(task, "shard %d ends at window %d", i, (int)at);
    if ((*out = spdl_buffer(task)) == NULL) return SPDL_E_NOMEM; /* its place in the batch */
    (*out)->position = position;
    for (i = 0; i < TOKENS; i++) {
        (*out)->inputs[i] = tokens[i];
        (*out)->targets[i] = tokens[i + 1];
    }
    return SPDL_OK;
}

static spdl_pipeline *start(Loader *loader) {
    const spdl_pipeline_desc desc = { .workers = 1 };
    spdl_pipeline *p;
    if (spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_SOURCE(read_window, .ctx = loader, .continuous = loader->epoch > 0),
            SPDL_BATCH(BATCH, .item_bytes = sizeof(Window)),
            SPDL_SINK(3))) != SPDL_OK) exit(1); /* the log says why */
    return p;
}

/* Stands for training: takes up to `steps` batches, or what is left of an epoch. *state depends on
   every token, *next is the position after them. */
static void take(spdl_pipeline *p, int steps, uint64_t *state, uint64_t *next) {
    spdl_batch *batch;
    while (steps-- > 0 && SPDL_NEXT(p, &batch, SPDL_FOREVER) == SPDL_OK) {
        const Window *w = batch->data; /* one after the other: what a GPU gets in one copy */
        for (size_t i = 0; i < batch->count; *next = w[i++].position + 1)
            for (int t = 0; t < TOKENS; t++)
                *state = *state * 31 + (uint64_t)(w[i].inputs[t] ^ w[i].targets[t] << 8);
        spdl_batch_free(batch);
    }
    if (!spdl_pipeline_failed(p)) return;
    fprintf(stderr, "%s\n", spdl_pipeline_error(p)->text);
    exit(1);
}

static bool open_shard(Shard *shard, const char *path) {
    int32_t header[HEADER] = { 20240520, 1, MADE };
    shard->file = path ? fopen(path, "rb") : tmpfile();
    if (shard->file != NULL && path == NULL) {
        fwrite(header, sizeof header, 1, shard->file);
        for (unsigned i = 0; i < MADE; i++)
            fwrite(&(uint16_t){ (uint16_t)(i * i * 40503u >> 3) }, 2, 1, shard->file);
        rewind(shard->file);
    }
    if (shard->file == NULL || fread(header, sizeof header, 1, shard->file) != 1) return false;
    shard->windows = header[2] > TOKENS ? (uint64_t)(header[2] - 1) / TOKENS : 0;
    return shard->windows > 0;
}

int main(int argc, char **argv) {
    Shard shards[64];
    const int count = argc > 64 ? 64 : argc > 1 ? argc - 1 : 3;
    Loader all = { shards, count, 0, 0 }, few = { shards, count, 7, VALIDATED * BATCH }, rest = all;
    uint64_t model = 1, next = 0, saved = 0, checked, ignored;
    for (int i = 0; i < count; i++)
        if (!open_shard(&shards[i], argc > 1 ? argv[i + 1] : NULL)) return perror("shard"), 1;
    spdl_pipeline *train = start(&all), *validate = start(&few), *resumed;
    for (int step = 0; step < STEPS; step += 5) {
        checked = model;
        if (step == SAVED) rest.from = next, saved = model; /* the checkpoint: of the trainer */
        take(validate, VALIDATED + 1, &checked, &ignored); /* up to SPDL_END: the next epoch */
        take(train, 5, &model, &next);
    }
    resumed = start(&rest);
    take(resumed, STEPS - SAVED, &saved, &next);
    printf("%d steps, and again from window %d on: %s\n", STEPS, (int)rest.from,
           saved == model ? "the same" : "different");
    spdl_pipeline_destroy(train);
    spdl_pipeline_destroy(validate);
    spdl_pipeline_destroy(resumed);
    for (int i = 0; i < count; i++) fclose(shards[i].file);
    return saved != model;
}
