/* train_digits.c - trains a small network on handwritten digits (see data/README.md) through
       next_path (48 NPZ files, in a new order every epoch) -> load -> augment -> batch -> sink
   and then tells who waited for whom, and what there is to gain from faster loading.

   Build:  cc -O2 -I. examples/train_digits.c -o train_digits -lpthread -lm
   Windows: gcc -O2 -I. examples/train_digits.c -o train_digits.exe
        or: cl /O2 /std:c11 /I. examples\train_digits.c
   Run:    ./train_digits [FOLDER] */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#define DIGITS_HIDDEN 1024 /* a step takes 2 ms */
#include "digits_net.h"
#include "thread.h"
#include <stdio.h>

enum { FILES = 48, BATCH = 2, STEPS = FILES / BATCH, EPOCHS = 60 };

typedef struct { char path[FILES][400]; int order[FILES]; uint64_t seed; } file_list;

/* All images of a file, or NULL with error->text. */
static samples *read_samples(const char *path, spdl_error *error) {
    spdl_npz_desc desc = { .error = error };
    spdl_npz_bundle *file = NULL;
    samples *made = NULL;
    if (spdl_npz_load(&file, path, &desc) == SPDL_OK) {
        const spdl_npz_array *images = spdl_npz_bundle_find(file, "images");
        const spdl_npz_array *labels = spdl_npz_bundle_find(file, "labels");
        if (spdl_npz_expect(images, "u1", 3, (uint64_t[]){ 0, 8, 8 }, error) == SPDL_OK
            && spdl_npz_expect(labels, "u1", 1, images->info.shape, error) == SPDL_OK)
            made = samples_new(labels->info.count, images->data, labels->data);
    }
    spdl_npz_bundle_free(file);
    return made;
}

SPDL_FN(next_path, void, char) {
    file_list *files = (file_list *)spdl_ctx(task);
    const uint64_t n = spdl_sequence(task);
    if (n == FILES * EPOCHS) return SPDL_END;
    for (int i = FILES - 1; n % FILES == 0 && i > 0; i--) { /* an epoch begins: shuffle */
        const int j = dice(&files->seed, i + 1), kept = files->order[i];
        files->order[i] = files->order[j];
        files->order[j] = kept;
    }
    *out = files->path[files->order[n % FILES]];
    return SPDL_OK;
}

SPDL_FN(load, char, samples) {
    spdl_error error;
    *out = read_samples(in, &error);
    return *out ? SPDL_OK : spdl_fail(task, "%s", error.text);
}

SPDL_FN(augment, samples, samples) {
    samples_vary(in, spdl_sequence(task)); /* the same noise whichever worker runs this */
    *out = in;                             /* changed in place and passed on */
    return SPDL_OK;
}

static spdl_pipeline *open_pipeline(file_list *files, spdl_error *error) {
    spdl_pipeline *p;
    const spdl_pipeline_desc desc = { .name = "digits", .error = error };
    files->seed = 1;
    for (int i = 0; i < FILES; i++) files->order[i] = i;
    if (spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_SOURCE(next_path, .ctx = files),
            SPDL_PIPE(load, .concurrency = SPDL_ALL, .free_item = free),
            SPDL_PIPE(augment, .concurrency = SPDL_ALL),
            SPDL_BATCH(BATCH),
            SPDL_SINK(3))) != SPDL_OK) return NULL;
    return p;
}

/* The next batch; when all epochs are over the first one again. */
static spdl_result next_epoch(void *pipeline, void **item, int64_t timeout_ns) {
    spdl_pipeline *p = (spdl_pipeline *)pipeline;
    spdl_result result = spdl_pipeline_next(p, item, timeout_ns);
    if (result == SPDL_END && (result = spdl_pipeline_rewind(p, 0, SPDL_FOREVER)) == SPDL_OK)
        result = spdl_pipeline_next(p, item, timeout_ns);
    return result;
}

/* Trains until the data end. Returns the steps per second after the first epoch, 0 on failure. */
static double train(model *m, spdl_next_fn next, void *source, spdl_free_fn release) {
    const bool show = shows_stderr();
    uint64_t step = 0, start = 0;
    spdl_result result;
    void *item;
    model_init(m, 1998);
    while ((result = next(source, &item, SPDL_FOREVER)) == SPDL_OK) {
        const spdl_batch *batch = (const spdl_batch *)item;
        float loss = 0;
        for (size_t i = 0; i < batch->count; i++)
            loss += model_learn(m, (const samples *)batch->items[i]) / (float)batch->count;
        model_step(m);
        if (release) release(item);
        if (++step == STEPS) start = spdl_time_ns();
        if (show && step % STEPS == 0)
            fprintf(stderr, "\repoch %3d of %d  loss %6.3f", (int)(step / STEPS), EPOCHS,
                    (double)loss);
    }
    if (show) fprintf(stderr, "\r%32s\r", "");
    return result == SPDL_END ? (double)(step - STEPS) * 1e9 / (double)(spdl_time_ns() - start) : 0;
}

/* One step of the loop above, for spdl_headspace. */
static void step(void *ctx, void *item) {
    model *m = (model *)ctx;
    const spdl_batch *batch = (const spdl_batch *)item;
    for (size_t i = 0; i < batch->count; i++) model_learn(m, (const samples *)batch->items[i]);
    model_step(m);
}

/* What loading costs a step: the same loop beside one on batches that were kept. */
static bool measure(model *m, file_list *files, spdl_headspace_report *report, spdl_error *error) {
    spdl_pipeline *p = open_pipeline(files, error);
    const spdl_headspace_desc desc = { .next = next_epoch, .source = p, .step = step, .ctx = m,
        .free_item = spdl_batch_free, .kept = STEPS, .seconds = 10, .error = error };
    if (shows_stderr()) fprintf(stderr, "measuring for 10 s what loading costs ...");
    model_init(m, 1998);
    const bool done = p && spdl_headspace(&desc, report) == SPDL_OK;
    spdl_pipeline_destroy(p);
    return done;
}

int main(int argc, char **argv) {
    static model trained, other; /* what the other one learns is void */
    static file_list files;
    static spdl_stats stats;
    static char text[16384];
    const char *folder = argc > 1 ? argv[1] : "examples/data";
    static spdl_headspace_report headspace;
    double today = 0, accuracy = 0;
    bool measured = false;
    spdl_error error = { .text = "" };
    for (int i = 0; i < FILES; i++)
        snprintf(files.path[i], sizeof files.path[i], "%.300s/digits_train_%02d.npz", folder, i);
    snprintf(text, sizeof text, "%.300s/digits_test.npz", folder);

    samples *test = read_samples(text, &error);
    spdl_pipeline *p = test ? open_pipeline(&files, &error) : NULL;
    if (p) today = train(&trained, spdl_pipeline_next, p, spdl_batch_free);
    if (p) spdl_pipeline_stats(p, &stats);
    if (p && spdl_pipeline_failed(p)) error = *spdl_pipeline_error(p);
    spdl_pipeline_destroy(p);
    if (today > 0) measured = measure(&other, &files, &headspace, &error);
    if (shows_stderr()) fprintf(stderr, "\r%48s\r", "");
    if (measured) accuracy = model_accuracy(&trained, test);
    free(test);
    if (accuracy < 0.95) {
        fprintf(stderr, "train_digits: %s\n", measured ? "accuracy is below 95 %" : error.text);
        return 1;
    }
    spdl_stats_text(&stats, text, sizeof text);
    printf("test accuracy %.1f %% after %d epochs\n\n%s\n", 100 * accuracy, EPOCHS, text);
    printf("%s\n", headspace.text);
    return 0;
}
