/* tokens.c - windows of tokens out of shards, in batches without a copy. The sampler shuffles them,
   SPDL_BATCH gathers indices, and one call reads all windows of a batch into one block, which
   spdl_buffer_free gives back. tokens.h knows the shards of NumPy, llm.c and nanoGPT. Every few
   steps the model is validated: always on the same batches of another file, of a pipeline that is
   stopped and rewound. A checkpoint has the position as a line of text. Without an argument it
   takes shards that it makes itself.

   Build:  cc -O2 -I. examples/tokens.c -o tokens -lpthread
   Run:    ./tokens ['SHARDS-*.bin' VALIDATION.bin]    (without a header: uint16) */
#define _GNU_SOURCE
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#include "tokens.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { LENGTH = 256, BATCH = 8, STEPS = 60, SAVED = 25, VALIDATED = 5, MADE = 4, COUNT = 30000 };

typedef struct Set {
    spdl_files *files;
    Tokens tokens;
    spdl_sampler *sampler;
    spdl_pipeline *p;
} Set;
typedef struct Block { uint32_t window[BATCH][LENGTH + 1]; } Block;

/* One call reads the windows of a batch of indices. */
SPDL_FN(read_windows, spdl_batch, Block) {
    const Tokens *tokens = spdl_ctx(task);
    spdl_error error;
    if ((*out = spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    for (size_t i = 0; i < in->count; i++) {
        const uint64_t window = ((spdl_index *)in->items[i])->index;
        if (tokens_read(tokens, window * LENGTH, LENGTH + 1, (*out)->window[i], &error) != SPDL_OK)
            return spdl_fail(task, "%s", error.text);
    }
    return SPDL_OK;
}

/* *set stays in place until close_set: the pipeline has the address of its tokens. */
static void open_set(Set *set, const char *path, spdl_sampler_order how) {
    spdl_error error;
    const spdl_files_desc listed = { .error = &error };
    spdl_sampler_desc order = { .order = how, .seed = 7, .error = &error };
    spdl_pipeline_desc desc = { .error = &error };
    spdl_result result = spdl_files_open(&set->files, path, &listed);
    if (result == SPDL_OK) result = tokens_open(&set->tokens, set->files, 2, &error);
    if (result == SPDL_OK) order.count = tokens_windows(&set->tokens, LENGTH);
    if (result == SPDL_OK) result = spdl_sampler_create(&set->sampler, &order);
    if (result == SPDL_OK) desc.data_hash = spdl_files_hash(set->files); /* of these shards alone */
    if (result == SPDL_OK)
        result = spdl_pipeline_create(&set->p, &desc, SPDL_STAGES(
            SPDL_INDEX(set->sampler, .continuous = true),
            SPDL_BATCH(BATCH, .drop_last = true),
            SPDL_PIPE(read_windows, .ctx = &set->tokens, .item_bytes = sizeof(Block),
                      .free_item = spdl_buffer_free),
            SPDL_SINK(3)));
    if (result != SPDL_OK) puts(error.text), exit(1);
}

static void close_set(Set *set) {
    spdl_pipeline_destroy(set->p);
    spdl_sampler_destroy(set->sampler);
    tokens_close(&set->tokens);
    spdl_files_close(set->files);
}

/* Stands for training: `steps` batches. The model depends on every token. */
static void take(spdl_pipeline *p, int steps, uint64_t *model) {
    Block *block;
    spdl_result result;
    while (steps > 0 && (result = SPDL_NEXT(p, &block, SPDL_FOREVER)) >= 0) {
        if (result == SPDL_END) continue; /* of an epoch */
        for (size_t i = 0; i < BATCH; i++) {
            const uint32_t *inputs = block->window[i], *targets = inputs + 1;
            for (int t = 0; t < LENGTH; t++)
                *model = *model * 31 + (inputs[t] ^ targets[t] << 8);
        }
        spdl_buffer_free(block);
        steps--;
    }
    if (spdl_pipeline_failed(p)) puts(spdl_pipeline_error(p)->text), exit(1);
}

static void make_shard(const char *path, unsigned seed) {
    int32_t header[256] = { 20240520, 1, COUNT };
    FILE *file = fopen(path, "wb");
    if (file == NULL) perror(path), exit(1);
    fwrite(header, sizeof header, 1, file);
    for (unsigned i = seed; i < seed + COUNT; i++)
        fwrite(&(uint16_t){ (uint16_t)(i * i * 40503u >> 3) }, 2, 1, file);
    if (fclose(file) != 0) perror(path), exit(1);
}

int main(int argc, char **argv) {
    char folder[] = "/tmp/spdl_tokens_XXXXXX", path[MADE][64], all[64], text[SPDL_STATE_BYTES];
    const char *texts[] = { text };
    uint64_t model = 1, saved = 0, checked;
    spdl_error error;
    Set train, check;
    if (argc < 3 && mkdtemp(folder) == NULL) return perror(folder), 1;
    for (int i = 0; i < MADE && argc < 3; i++) {
        snprintf(path[i], sizeof path[i], "%s/%s%d.bin", folder, i > 0 ? "train" : "check", i);
        make_shard(path[i], (unsigned)i * COUNT);
    }
    snprintf(all, sizeof all, "%s/train*.bin", folder);
    open_set(&train, argc < 3 ? all : argv[1], SPDL_SAMPLE_SHUFFLED);
    open_set(&check, argc < 3 ? path[0] : argv[2], SPDL_SAMPLE_SEQUENTIAL);
    for (int step = 0; step < STEPS; step += 5) {
        if (step == SAVED && spdl_state_save(train.p, text, sizeof text) < 0) return puts(text), 1;
        if (step == SAVED) saved = model;
        checked = model;
        spdl_pipeline_rewind(check.p, 0, SPDL_FOREVER); /* the same batches, read ahead meanwhile */
        take(check.p, VALIDATED, &checked);
        take(train.p, 5, &model);
    }
    if (spdl_state_load(train.p, texts, 1, SPDL_FOREVER, &error) != SPDL_OK)
        return puts(error.text), 1;
    take(train.p, STEPS - SAVED, &saved);
    printf("%d steps, and again from step %d on: %s\n", STEPS, SAVED,
           saved == model ? "the same" : "different");
    close_set(&train);
    close_set(&check);
    for (int i = 0; i < MADE && argc < 3; i++) unlink(path[i]);
    if (argc < 3) rmdir(folder);
    return saved != model;
}
