/* cuda_loader.c - the memory of a loader process is pinned where it is (spdl_cuda_adopt), and the
   device reads the batches there: nobody copies them on their way from the decoder's process to the
   device. Processes are started before CUDA is opened.

   Build:  cc -O2 -I. examples/cuda_loader.c -o cuda_loader -lpthread -ldl
   Run:    ./cuda_loader */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#define SPDL_CUDA_IMPLEMENTATION
#include "spdl_cuda.h"

enum { IMAGES = 16, PIXELS = 96 * 96, BATCHES = 100 };

typedef struct Image { uint8_t pixels[PIXELS]; } Image;

/* Runs in the loader's process. Stands for a decoder. */
SPDL_FN(load, void, Image) {
    if (spdl_sequence(task) == IMAGES * BATCHES) return SPDL_END;
    *out = spdl_buffer(task);
    if (*out == NULL) return SPDL_E_NOMEM;
    memset(*out, (int)(spdl_sequence(task) & 0xff), sizeof **out);
    return SPDL_OK;
}

static spdl_loader *open_loader(spdl_error *error) {
    spdl_loader_desc desc = { .pipeline = { .workers = 2 }, .slots = 8, .error = error };
    spdl_loader *loader;
    spdl_loader_open(&loader, &desc, SPDL_STAGES(
        SPDL_SOURCE(load), SPDL_BATCH(IMAGES, .item_bytes = sizeof(Image)), SPDL_SINK(2)));
    return loader;
}

/* What the iterator is to send of an item; it is released when it has been read. */
static spdl_result describe(void *item, spdl_cuda_view *view) {
    const spdl_loader_batch *batch = item;
    view->data = batch->data;
    view->bytes = batch->bytes;
    return SPDL_OK;
}

/* How many batches came. */
static int train(spdl_cuda *cuda, spdl_loader *loader) {
    const spdl_cuda_iter_desc ahead = { .next = spdl_loader_next_fn, .source = loader,
                                        .view = describe, .free_item = spdl_loader_batch_free };
    spdl_cuda_batch batch;
    spdl_cuda_iter *it;
    int n = 0;
    if (spdl_cuda_iter_create(&it, cuda, &ahead) != SPDL_OK) return 0;
    while (spdl_cuda_iter_next(it, NULL, &batch, SPDL_FOREVER) == SPDL_OK)
        n += batch.bytes == IMAGES * sizeof(Image); /* train<<<...>>>(batch.data) */
    spdl_cuda_iter_destroy(it);
    return n;
}

/* Pins the arena, trains, and lets go of it. */
static int run(spdl_loader *loader, spdl_error *error) {
    const spdl_cuda_desc slots = { .slot_bytes = IMAGES * sizeof(Image), .error = error };
    spdl_cuda_stats stats = { 0 };
    spdl_cuda *cuda;
    void *arena;
    size_t bytes;
    int n = 0;
    if (spdl_cuda_open(&cuda, &slots) != SPDL_OK) return 0;
    spdl_loader_arena(loader, &arena, &bytes, NULL);
    if (spdl_cuda_adopt(cuda, arena, bytes) == SPDL_OK) n = train(cuda, loader);
    spdl_cuda_get_stats(cuda, &stats);
    spdl_cuda_close(cuda); /* before the loader: the arena is pinned until then */
    printf("%d batches; %.1f MB are pinned, %llu bytes were sent from elsewhere\n", n,
           (double)stats.pinned_bytes / 1e6, (unsigned long long)stats.pageable_bytes);
    return n;
}

int main(void) {
    spdl_error error = { 0 };
    spdl_loader *loader = open_loader(&error);
    const int n = loader != NULL ? run(loader, &error) : 0;
    spdl_loader_close(loader);
    if (error.result != SPDL_OK) puts(error.text);
    return n != BATCHES && error.result != SPDL_E_NOT_FOUND; /* without a GPU: nothing to show */
}
