/* Train and validation split by hash, two epochs, an early stop in each. */
#include "spdl.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
enum { N = 1000, BATCH = 16, STOP = 20, EPOCHS = 2 };
typedef struct Row {
    uint64_t id, epoch;
} Row;
static bool is_val(uint64_t id) { return spdl_hash(99, &id, sizeof id) % 5 == 0; }
SPDL_FN(pick, spdl_index, Row) {
    bool val = spdl_ctx(task) != NULL;
    if (is_val(in->index) != val) return SPDL_SKIP;
    if ((*out = spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    (*out)->id = in->index, (*out)->epoch = in->epoch;
    return SPDL_OK;
}
static spdl_sampler *sampler(spdl_sampler_order order) {
    spdl_sampler *s;
    spdl_sampler_desc d = { .order = order, .count = N, .seed = 7 };
    return spdl_sampler_create(&s, &d) == SPDL_OK ? s : NULL;
}
static int val_pass(spdl_pipeline *v, int *bad) { /* early stop after 3 batches */
    spdl_batch *b;
    int seen = 0;
    uint64_t id = 0;
    if (spdl_pipeline_rewind(v, 0, SPDL_FOREVER)) return -1;
    for (int k = 0; k < 3 && SPDL_NEXT(v, &b, SPDL_FOREVER) == SPDL_OK; k++) {
        for (size_t i = 0; i < b->count; i++, seen++, id++) {
            while (!is_val(id)) id++;
            *bad += ((Row *)b->data)[i].id != id;
        }
        spdl_batch_free(b);
    }
    return seen;
}
int main(int argc, char **argv) {
    spdl_pipeline *t, *v;
    spdl_batch *b;
    int bad = 0, seen = 0, val = 0;
    spdl_sampler *st = sampler(SPDL_SAMPLE_SHUFFLED), *sv = sampler(SPDL_SAMPLE_SEQUENTIAL),
                 *ref = sampler(SPDL_SAMPLE_SHUFFLED);
    spdl_pipeline_desc desc = { .workers = argc > 1 ? atoi(argv[1]) : 0 };
    if (spdl_pipeline_create(
            &t, &desc,
            SPDL_STAGES(SPDL_INDEX(st, .continuous = true), SPDL_PIPE(pick, .concurrency = 4),
                        SPDL_BATCH_OF(Row, BATCH, .drop_last = true), SPDL_SINK(3))))
        return 1;
    if (spdl_pipeline_create(&v, &desc,
                             SPDL_STAGES(SPDL_INDEX(sv),
                                         SPDL_PIPE(pick, .ctx = &desc, .concurrency = 4),
                                         SPDL_BATCH_OF(Row, BATCH), SPDL_SINK(3))))
        return 1;
    for (uint64_t e = 0; e < EPOCHS; e++) {
        int batches = 0;
        uint64_t pos = 0;
        while (SPDL_NEXT(t, &b, SPDL_FOREVER) == SPDL_OK) {
            if (batches++ < STOP)
                for (size_t i = 0; i < b->count; i++, seen++) {
                    Row *r = (Row *)b->data + i;
                    spdl_index want;
                    do
                        if (spdl_sampler_item(ref, e, pos++, &want))
                            return puts("END too early"), 1;
                    while (is_val(want.index));
                    bad += r->id != want.index || r->epoch != e;
                }
            spdl_batch_free(b);
        } /* after the stop the rest of the epoch is drained: I found no way to go to the next epoch
           */
        val += val_pass(v, &bad);
    }
    if (spdl_pipeline_failed(t)) puts(spdl_pipeline_error(t)->text);
    spdl_pipeline_destroy(t), spdl_pipeline_destroy(v);
    spdl_sampler_destroy(st), spdl_sampler_destroy(sv), spdl_sampler_destroy(ref);
    printf("split: %d train, %d val rows, %d bad: %s\n", seen, val, bad,
           bad || seen != EPOCHS * STOP * BATCH || val != EPOCHS * 3 * BATCH ? "WRONG" : "right");
}
