/* cuda_frame.c - a game at 60 frames a second streams its assets: threads of its own fill pinned
   slots, and each frame sends what is there and uses what has arrived. No call of the frame waits:
   every timeout is 0. Plain C; without a GPU it runs on the CPU.

   Build:  cc -O2 -I. examples/cuda_frame.c -o cuda_frame -lpthread -ldl
   Run:    ./cuda_frame */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#define SPDL_CUDA_IMPLEMENTATION
#include "spdl_cuda.h"

#include <poll.h>

enum { ASSETS = 60, BYTES = 1 << 20, FRAMES = 300, FRAME_NS = 1000000000 / 60 };

/* Reads an asset into a slot; one takes 5 ms. This thread may wait, the frame does not. */
SPDL_FN(read_asset, void, spdl_cuda_host) {
    const uint64_t n = spdl_sequence(task);
    if (n == ASSETS) return SPDL_END;
    spdl_result result = spdl_cuda_host_take(task, spdl_ctx(task), out);
    if (result != SPDL_OK) return result;
    memset(spdl_cuda_host_at(*out, 0), (int)n, BYTES);
    (*out)->user = (void *)(uintptr_t)n;
    poll(NULL, 0, 5);
    return SPDL_OK;
}

typedef struct Streaming {
    spdl_cuda *cuda;
    spdl_pipeline *assets;
    spdl_cuda_host *read;       /* but not sent: no device slot was free */
    spdl_cuda_batch on_its_way; /* of one at a time, if `sent` */
    bool sent;
    int used;
} Streaming;

/* What a frame does for assets; SPDL_END: there will be no more. */
static spdl_result stream_assets(Streaming *s, spdl_cuda_stream stream) {
    spdl_result result = SPDL_OK;
    if (s->sent && spdl_cuda_arrived(&s->on_its_way, 0) == SPDL_OK) {
        spdl_cuda_ready(&s->on_its_way, stream); /* at no cost: it has arrived */
        /* draw<<<..., stream>>>(s->on_its_way.dev) */
        spdl_cuda_done(&s->on_its_way, stream);
        s->sent = false;
        s->used++;
    }
    if (s->read == NULL && !s->sent) result = SPDL_NEXT(s->assets, &s->read, 0);
    if (s->read != NULL && spdl_cuda_send(s->read, &s->on_its_way, 0) == SPDL_OK) {
        s->read = NULL;
        s->sent = true;
    }
    return result;
}

static bool play(Streaming *s) {
    const spdl_cuda_stream stream = NULL;
    uint64_t longest = 0;
    int frame = 0;
    for (; frame < FRAMES && s->used < ASSETS; frame++) {
        const uint64_t start = spdl_time_ns();
        uint64_t took;
        if (stream_assets(s, stream) < 0) return false;
        took = spdl_time_ns() - start;
        longest = took > longest ? took : longest;
        if (took < FRAME_NS) poll(NULL, 0, (int)((FRAME_NS - took) / 4000000)); /* short frames */
    }
    printf("%d assets of %d MiB in %d frames; streaming took %.3f ms of one at most\n", s->used,
           BYTES >> 20, frame, (double)longest / 1e6);
    return s->used == ASSETS;
}

int main(void) {
    const spdl_cuda_desc slots = { .array = { { .name = "asset", .type = "u1", .ndim = 1,
                                                .shape = { BYTES } } } };
    const spdl_pipeline_desc threads = { .workers = 1 };
    Streaming s = { 0 };
    bool played = false;
    if (spdl_cuda_open(&s.cuda, &slots) != SPDL_OK) return 1;
    if (spdl_pipeline_create(&s.assets, &threads, SPDL_STAGES(
            SPDL_SOURCE(read_asset, .ctx = s.cuda, .free_item = spdl_cuda_host_free),
            SPDL_SINK(2))) == SPDL_OK) played = play(&s);
    spdl_pipeline_destroy(s.assets);
    spdl_cuda_host_free(s.read);
    spdl_cuda_close(s.cuda);
    return played ? 0 : 1;
}
