/* The loader in a process of its own: batches lie in shared memory, and the trainer reads them
   where they were written. A child that is killed is started again at the very next batch; a run
   that stops goes on from a line of text, with a loader or without; the trainer sees the same
   numbers as ever.

       cc -O2 -I. examples/loader_process.c -o loader_process -lpthread

       ./loader_process            nothing happens to it
       ./loader_process kill       every 20 batches it is killed
       ./loader_process resume     after half of the batches another loader goes on
       ./loader_process poison     the image of number 137 makes its stage crash */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { IMAGES = 640, BATCH = 4, PIXELS = 64 * 64 };

static bool poison;

/* The number is all there is to know. */
SPDL_FN(list, void, uint64_t) {
    if (spdl_sequence(task) == IMAGES) return SPDL_END;
    *out = (uint64_t *)spdl_buffer(task);
    if (*out == NULL) return SPDL_E_NOMEM;
    **out = spdl_sequence(task);
    return SPDL_OK;
}

/* Written by the calls for its items: they know where in the batch they are. */
typedef struct image {
    uint64_t number;
    uint8_t pixels[PIXELS];
} image;

SPDL_FN(decode, uint64_t, image) {
    uint64_t random = *in * 2654435761u + 1;
    image *made = (image *)spdl_buffer(task);
    if (made == NULL) return SPDL_E_NOMEM;
    if (poison && *in == 137) abort(); /* a bug of a library, say */
    made->number = *in;
    for (int i = 0; i < PIXELS; ++i) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        made->pixels[i] = (uint8_t)(random >> 56);
    }
    *out = made;
    return SPDL_OK;
}

/* A step of training: here a sum that depends on every pixel, and on the order. */
static uint64_t step(uint64_t model, const image *images, size_t count) {
    for (size_t i = 0; i < count; ++i)
        for (int k = 0; k < PIXELS; k += 16)
            model = model * 31 + images[i].number + images[i].pixels[k];
    return model;
}

static spdl_loader *open_loader(void) {
    spdl_loader_desc desc = { 0 };
    spdl_loader *loader;
    spdl_error error;
    desc.name = "loader_process";
    desc.pipeline.workers = 2;
    desc.max_restarts = poison ? 1 : 50;
    desc.hang_timeout = 10;
    desc.error = &error;
    if (spdl_loader_open(&loader, &desc, SPDL_STAGES(
            SPDL_SOURCE(list, .item_bytes = sizeof(uint64_t)),
            SPDL_PIPE(decode, .concurrency = 2),
            SPDL_BATCH(BATCH, .item_bytes = sizeof(image)),
            SPDL_SINK(2))) == SPDL_OK) return loader;
    fprintf(stderr, "%s\n", error.text);
    exit(1);
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    char text[SPDL_STATE_BYTES];
    const char *const texts[] = { text };
    spdl_loader_status status;
    spdl_loader_batch batch;
    spdl_loader *loader;
    spdl_error error;
    spdl_result result;
    uint64_t model = 0, images = 0;
    poison = strcmp(what, "poison") == 0; /* before open: the child knows what we knew then */
    loader = open_loader();
    while ((result = spdl_loader_next(loader, &batch, SPDL_FOREVER)) == SPDL_OK) {
        model = step(model, (const image *)batch.data, batch.count);
        images += batch.count;
        spdl_loader_done(loader, &batch);
        spdl_loader_get_status(loader, &status);
        if (strcmp(what, "kill") == 0 && batch.sequence % 20 == 10 && status.pid > 0)
            kill((pid_t)status.pid, SIGKILL);
        if (strcmp(what, "resume") != 0 || batch.sequence != IMAGES / BATCH / 2) continue;
        if (spdl_loader_state_save(loader, text, sizeof text) < 0) return puts(text), 1;
        spdl_loader_close(loader); /* the end of this run; text is beside the model */
        loader = open_loader();
        if (spdl_loader_state_load(loader, texts, 1, SPDL_FOREVER, &error) != SPDL_OK)
            return puts(error.text), 1;
    }
    spdl_loader_get_status(loader, &status);
    if (result != SPDL_END) fprintf(stderr, "%s\n", spdl_loader_error(loader)->text);
    printf("%llu images, model %016llx; started again %s\n", (unsigned long long)images,
           (unsigned long long)model, status.restarts > 0 ? "and again" : "never");
    spdl_loader_close(loader);
    return result != SPDL_END;
}
