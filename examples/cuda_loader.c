/* cuda_loader.c - a loader process to the device in ten lines: spdl_cuda_iter_open opens the
   device, pins the memory of the loader, and sends batches ahead. Nobody copies them on their way
   from the decoder's process to the device. Processes are started before CUDA is opened.

   Build:  cc -O2 -I. examples/cuda_loader.c -o cuda_loader -lpthread -ldl
   Run:    ./cuda_loader */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#define SPDL_CUDA_IMPLEMENTATION
#include "spdl_cuda.h"

enum { IMAGES = 16, PIXELS = 96 * 96, BATCHES = 100 };

typedef struct Image {
    uint8_t pixels[PIXELS];
} Image;

/* Runs in the loader's process. Stands for a decoder. */
SPDL_FN(load, void, Image) {
    if (spdl_sequence(task) == IMAGES * BATCHES) return SPDL_END;
    *out = spdl_buffer(task);
    if (*out == NULL) return SPDL_E_NOMEM;
    memset(*out, (int)(spdl_sequence(task) & 0xff), sizeof **out);
    return SPDL_OK;
}

int main(void) {
    spdl_error error = { 0 };
    const spdl_loader_desc desc = { .pipeline = { .workers = 2 }, .slot_count = 8,
                                    .error = &error };
    spdl_loader *loader = NULL;
    spdl_cuda_iter *it = NULL;
    spdl_cuda_iter_desc ahead = { .next = spdl_loader_next_fn, .error = &error };
    spdl_cuda_batch batch;
    int n = 0;
    if (spdl_loader_open(&loader, &desc, SPDL_STAGES(
            SPDL_SOURCE(load), SPDL_BATCH(IMAGES, .item_bytes = sizeof(Image)),
            SPDL_SINK(2))) == SPDL_OK &&
        (ahead.source = loader, spdl_cuda_iter_open(&it, &ahead) == SPDL_OK))
        while (spdl_cuda_iter_next(it, NULL, &batch, SPDL_FOREVER) == SPDL_OK)
            n += batch.bytes == IMAGES * sizeof(Image); /* train<<<...>>>(batch.data) */
    spdl_cuda_iter_destroy(it); /* before the loader, whose memory it has pinned */
    spdl_loader_close(loader);
    printf("%d batches\n", n);
    if (error.result != SPDL_OK) puts(error.text);
    return n != BATCHES && error.result != SPDL_E_NOT_FOUND; /* without a GPU: nothing to show */
}
