/* cuda_devices.c - one loader feeds two devices. Each device has a spdl_cuda. Both adopt the arena
   of the loader: the first pins it for all devices, the second finds it pinned. With one device,
   both are on that one.

   Build:  cc -O2 -I. examples/cuda_devices.c -o cuda_devices -lpthread -ldl
   Run:    ./cuda_devices */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#define SPDL_CUDA_IMPLEMENTATION
#include "spdl_cuda.h"

enum { DEVICES = 2, TOKENS = 1 << 15, BATCHES = 100 };

typedef struct Batch {
    int32_t token[TOKENS];
} Batch;

/* Runs in the loader's process. */
SPDL_FN(load, void, Batch) {
    int i;
    if (spdl_sequence(task) == BATCHES) return SPDL_END;
    *out = spdl_buffer(task);
    if (*out == NULL) return SPDL_E_NOMEM;
    for (i = 0; i < TOKENS; ++i) (*out)->token[i] = (int32_t)spdl_sequence(task) + i;
    return SPDL_OK;
}

/* A spdl_cuda on each device, for batches out of the loader's arena. */
static bool open_devices(spdl_cuda *cuda[DEVICES], spdl_loader *loader, spdl_error *error) {
    const int count = spdl_cuda_count(error);
    void *arena;
    size_t bytes;
    int i;
    spdl_loader_arena(loader, &arena, &bytes, NULL);
    for (i = 0; i < DEVICES; ++i) {
        const spdl_cuda_desc slots = { .slot_bytes = sizeof(Batch),
                                       .error = error,
                                       .device = SPDL_CUDA_ORDINAL(i < count ? i : 0) };
        if (spdl_cuda_open(&cuda[i], &slots) != SPDL_OK) return false;
        if (spdl_cuda_adopt(cuda[i], arena, bytes) != SPDL_OK) {
            spdl_cuda_error(cuda[i], error);
            return false;
        }
    }
    return true;
}

/* Batches go to the devices in turns. The loader has more slots than all devices together, so it
   never waits for one whose copy is done. */
static int share_out(spdl_cuda *cuda[DEVICES], spdl_loader *loader) {
    spdl_cuda_stats stats;
    spdl_cuda_batch batch;
    void *item;
    int n = 0, i;
    while (spdl_loader_next_fn(loader, &item, SPDL_FOREVER) == SPDL_OK) {
        const spdl_loader_batch *b = item;
        const spdl_cuda_view view = {
            .data = b->data, .bytes = b->bytes, .item = item, .release = spdl_loader_batch_free
        };
        if (spdl_cuda_send(cuda[n % DEVICES], &view, &batch, SPDL_FOREVER) != SPDL_OK) break;
        spdl_cuda_ready(&batch, NULL);
        n += b->bytes == sizeof(Batch); /* cudaSetDevice; train<<<...>>>(batch.data) */
        spdl_cuda_done(&batch, NULL);
    }
    for (i = 0; i < DEVICES; ++i) {
        spdl_cuda_get_stats(cuda[i], &stats);
        printf("device %d: %llu batches, %llu bytes of them not pinned\n", stats.device,
               (unsigned long long)stats.batches, (unsigned long long)stats.pageable_bytes);
    }
    return n;
}

int main(void) {
    spdl_error error = { 0 };
    const spdl_loader_desc desc = { .pipeline = { .workers = 2 }, .slot_count = 12,
                                    .error = &error };
    spdl_cuda *cuda[DEVICES] = { NULL };
    spdl_loader *loader = NULL;
    int n = 0, i;
    if (spdl_loader_open(&loader, &desc, SPDL_STAGES(
            SPDL_SOURCE(load, .item_bytes = sizeof(Batch)), SPDL_SINK(2))) == SPDL_OK &&
        open_devices(cuda, loader, &error))
        n = share_out(cuda, loader);
    for (i = DEVICES; i-- > 0;) spdl_cuda_close(cuda[i]); /* what pinned the arena goes last */
    spdl_loader_close(loader);
    if (error.result != SPDL_OK) puts(error.text);
    return n != BATCHES && error.result != SPDL_E_NOT_FOUND; /* without a GPU: nothing to show */
}
