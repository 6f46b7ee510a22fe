/* cuda_frame.c - a game at 60 frames a second streams its assets: threads of its own read them into
   pinned memory, and each frame sends what is there and uses what has arrived. No call of the frame
   waits: every timeout is 0.

   Build:  cc -O2 -I. examples/cuda_frame.c -o cuda_frame -lpthread -ldl
   Run:    ./cuda_frame */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#define SPDL_CUDA_IMPLEMENTATION
#include "spdl_cuda.h"

#include <poll.h>

enum { ASSETS = 60, BYTES = 1 << 20, FRAMES = 300, FRAME_NS = 1000000000 / 60 };

typedef struct Asset { uint8_t bytes[BYTES]; } Asset;

/* One takes 5 ms. This thread may wait, the frame does not. */
SPDL_FN(read_asset, void, Asset) {
    const uint64_t n = spdl_sequence(task);
    if (n == ASSETS) return SPDL_END;
    *out = spdl_buffer(task);
    if (*out == NULL) return SPDL_E_NOMEM;
    memset(*out, (int)n, sizeof **out);
    poll(NULL, 0, 5);
    return SPDL_OK;
}

typedef struct Streaming {
    spdl_cuda *cuda;
    spdl_pipeline *assets;
    Asset *read;                /* but not sent: no device slot was free */
    spdl_cuda_batch on_its_way; /* of one at a time, if `sent` */
    bool sent;
    int used;
} Streaming;

static void send(Streaming *s) {
    const spdl_cuda_view view = { .data = s->read, .bytes = sizeof *s->read,
                                  .release = spdl_buffer_free, .item = s->read };
    if (spdl_cuda_send(s->cuda, &view, &s->on_its_way, 0) != SPDL_OK) return;
    s->read = NULL; /* `release` gets it, when it has been read */
    s->sent = true;
}

/* What a frame does for assets; SPDL_END: there will be no more. */
static spdl_result stream_assets(Streaming *s, spdl_cuda_stream stream) {
    spdl_result result = SPDL_OK;
    if (s->sent && spdl_cuda_arrived(&s->on_its_way, 0) == SPDL_OK) {
        spdl_cuda_ready(&s->on_its_way, stream); /* at no cost: it has arrived */
        /* draw<<<..., stream>>>(s->on_its_way.data) */
        spdl_cuda_done(&s->on_its_way, stream);
        s->sent = false;
        s->used++;
    }
    if (s->read == NULL && !s->sent) result = SPDL_NEXT(s->assets, &s->read, 0);
    if (s->read != NULL) send(s);
    return result;
}

static bool play(Streaming *s) {
    uint64_t longest = 0;
    int frame = 0;
    for (; frame < FRAMES && s->used < ASSETS; frame++) {
        const uint64_t start = spdl_time_ns();
        if (stream_assets(s, NULL) < 0) return false;
        const uint64_t took = spdl_time_ns() - start;
        longest = took > longest ? took : longest;
        if (took < FRAME_NS) poll(NULL, 0, (int)((FRAME_NS - took) / 4000000)); /* short frames */
    }
    printf("%d assets of %d MiB in %d frames; streaming took %.3f ms of one at most\n", s->used,
           BYTES >> 20, frame, (double)longest / 1e6);
    return s->used == ASSETS;
}

static bool stream(Streaming *s) {
    const spdl_pipeline_desc threads = { .workers = 1, .allocator = spdl_cuda_allocator(s->cuda) };
    const bool played = spdl_pipeline_create(&s->assets, &threads, SPDL_STAGES(
        SPDL_SOURCE(read_asset, .item_bytes = sizeof(Asset), .free_item = spdl_buffer_free),
        SPDL_SINK(2))) == SPDL_OK && play(s);
    spdl_buffer_free(s->read);
    spdl_pipeline_destroy(s->assets);
    return played;
}

int main(void) {
    spdl_error error;
    const spdl_cuda_desc slots = { .slot_bytes = sizeof(Asset), .error = &error };
    Streaming s = { 0 };
    if (spdl_cuda_open(&s.cuda, &slots) != SPDL_OK) {
        puts(error.text); /* without a GPU there is nothing to show */
        return error.result != SPDL_E_NOT_FOUND;
    }
    const bool played = stream(&s);
    spdl_cuda_close(s.cuda);
    return !played;
}
