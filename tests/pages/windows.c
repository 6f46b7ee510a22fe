/* Moving averages of 16 samples, a window every 4, over series of different lengths, in chunks. */
#include "spdl.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
enum { SERIES = 30, CHUNK = 25, W = 16, STEP = 4 };
typedef struct Chunk {
    int series, n, last;
    double v[CHUNK];
} Chunk;
typedef struct Mean {
    int series, at;
    double mean;
} Mean;
typedef struct Tail {
    int series, n, at;
    double v[W + CHUNK];
} Tail;
static int length(int s) { return s * 37 % 211; } /* some are shorter than a window, one is empty */
static double sample(int s, int t) {
    return (double)((unsigned)(s * 31 + t) * 2654435761u % 1000) / 7;
}
SPDL_FN(read_chunk, spdl_index, Chunk) { /* one series in several chunks */
    size_t *at = (size_t *)spdl_call_state(task);
    const int s = (int)in->index, left = length(s) - (int)*at;
    if ((*out = spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    (*out)->series = s, (*out)->n = left < CHUNK ? left : CHUNK;
    for (int i = 0; i < (*out)->n; i++) (*out)->v[i] = sample(s, (int)*at + i);
    *at += CHUNK;
    return left > CHUNK ? SPDL_AGAIN : SPDL_OK;
}
SPDL_FN(scale, Chunk, Chunk) {
    for (int i = 0; i < in->n; i++) in->v[i] *= 2;
    *out = in;
    return SPDL_OK;
}
SPDL_FN(means, Chunk, Mean) { /* keeps the overlap in ctx; several means a chunk */
    Tail *t = spdl_ctx(task);
    void **begun = spdl_call_state(task);
    if (*begun == NULL) {
        *begun = t; /* only a mark */
        if (t->series != in->series) t->series = in->series, t->n = 0, t->at = 0;
        memcpy(t->v + t->n, in->v, sizeof(double) * (size_t)in->n), t->n += in->n;
    }
    if (t->n < W) return SPDL_SKIP;
    if ((*out = spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    (*out)->series = t->series, (*out)->at = t->at, (*out)->mean = 0;
    for (int i = 0; i < W; i++) (*out)->mean += t->v[i];
    (*out)->mean /= W;
    memmove(t->v, t->v + STEP, sizeof(double) * (size_t)(t->n -= STEP)), t->at += STEP;
    return SPDL_AGAIN;
}
int main(int argc, char **argv) {
    spdl_pipeline *p;
    spdl_batch *b;
    Tail tail = { .series = -1 };
    int n = 0, bad = 0, s = 0, at = 0, total = 0;
    spdl_pipeline_desc desc = { .workers = argc > 1 ? atoi(argv[1]) : 0 };
    if (spdl_pipeline_create(
            &p, &desc,
            SPDL_STAGES(SPDL_COUNT(SERIES),
                        SPDL_PIPE(read_chunk, .again = true, .item_bytes = sizeof(Chunk),
                                  .free_item = spdl_buffer_free),
                        SPDL_PIPE(scale, .concurrency = SPDL_ALL, .free_item = spdl_buffer_free),
                        SPDL_PIPE(means, .ctx = &tail, .again = true, .serial = true,
                                  .item_bytes = sizeof(Mean), .free_item = spdl_buffer_free),
                        SPDL_BATCH(10), SPDL_SINK(4))))
        return 1;
    for (int i = 0; i < SERIES; i++)
        if (length(i) >= W) total += (length(i) - W) / STEP + 1;
    while (SPDL_NEXT(p, &b, SPDL_FOREVER) == SPDL_OK) {
        for (size_t i = 0; i < b->count; i++, n++) {
            const Mean *m = b->items[i];
            double want = 0;
            while (at + W > length(s)) s++, at = 0;
            for (int k = 0; k < W; k++) want += sample(s, at + k) * 2;
            bad += m->series != s || m->at != at || m->mean != want / W;
            at += STEP;
        }
        spdl_batch_free(b);
    }
    if (spdl_pipeline_failed(p)) puts(spdl_pipeline_error(p)->text);
    spdl_pipeline_destroy(p);
    printf("windows: %d of %d, %d bad: %s\n", n, total, bad, bad || n != total ? "WRONG" : "right");
}
