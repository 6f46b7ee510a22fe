/* Three epochs through a shuffle buffer; stop in the middle of the second, save, load, continue. */
#include "spdl.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
enum { N = 500, KEPT = 32, EPOCHS = 3, BATCH = 8, STOP = 90 };
typedef struct Job {
    int id;
    uint64_t noise;
} Job;
typedef struct Reservoir {
    int count;
    Job *job[KEPT];
    uint64_t rng;
} Reservoir;
SPDL_FN(make, void, Job) {
    const uint64_t i = spdl_sequence(task);
    if (i == N) return SPDL_END;
    if ((*out = calloc(1, sizeof(Job))) == NULL) return SPDL_E_NOMEM;
    (*out)->id = (int)(spdl_epoch(task) * 1000 + i);
    return SPDL_OK;
}
SPDL_FN(shuffle, Job, Job) { /* as in HOWTO */
    Reservoir *r = spdl_ctx(task);
    const bool last = spdl_flushing(task);
    if (!last) spdl_take(task);
    if (!last && r->count < KEPT) return r->job[r->count++] = in, SPDL_SKIP;
    if (r->count == 0) return SPDL_SKIP;
    const uint64_t random = spdl_item_key(task) + (uint64_t)r->count;
    const int k = (int)(random % (uint64_t)r->count);
    *out = r->job[k];
    r->job[k] = last ? r->job[--r->count] : in;
    return last ? SPDL_AGAIN : SPDL_OK;
}
SPDL_FN(noise, Job, Job) {
    in->noise = spdl_item_key(task);
    *out = in;
    return SPDL_OK;
}
static spdl_pipeline *start(Reservoir *r, int workers, int conc) {
    spdl_pipeline *p;
    spdl_pipeline_desc desc = { .workers = workers, .seed = 5 };
    return spdl_pipeline_create(
               &p, &desc,
               SPDL_STAGES(
                   SPDL_SOURCE(make, .continuous = true, .free_item = free),
                   SPDL_PIPE(shuffle, .ctx = r, .flush = true, .again = true, .free_item = free),
                   SPDL_PIPE(noise, .concurrency = conc, .free_item = free), SPDL_BATCH(BATCH),
                   SPDL_SINK(3))) == SPDL_OK
               ? p
               : NULL;
}
static int run(spdl_pipeline *p, int batches, Job *to) { /* returns the number of jobs */
    int n = 0;
    spdl_batch *b;
    spdl_result r;
    while (batches && spdl_pipeline_epoch(p) < EPOCHS) {
        if ((r = SPDL_NEXT(p, &b, SPDL_FOREVER)) == SPDL_END) continue;
        if (r != SPDL_OK) {
            puts(spdl_pipeline_error(p)->text);
            break;
        }
        for (size_t i = 0; i < b->count; i++) to[n++] = *(Job *)b->items[i];
        spdl_batch_free(b), batches--;
    }
    return n;
}
static void empty(Reservoir *r) {
    while (r->count) free(r->job[--r->count]);
}
int main(int argc, char **argv) {
    static Job one[2000], two[2000];
    static int seen[5000];
    char text[SPDL_STATE_BYTES];
    const char *texts[] = { text };
    static Reservoir r1, r2, r3;
    spdl_error error;
    int w = argc > 1 ? atoi(argv[1]) : 0, bad = 0, moved = 0;
    spdl_pipeline *p = start(&r1, w, SPDL_ALL);
    const int n = run(p, -1, one);
    spdl_pipeline_destroy(p), empty(&r1);
    p = start(&r2, w, SPDL_ALL);
    int m = run(p, STOP, two);
    if (spdl_state_save(p, text, sizeof text) < 0) return puts(text), 1;
    spdl_pipeline_destroy(p), empty(&r2);
    p = start(&r3, 3, 2); /* another number of workers */
    if (spdl_state_load(p, texts, 1, SPDL_FOREVER, &error) != SPDL_OK) return puts(error.text), 1;
    m += run(p, -1, two + m);
    spdl_pipeline_destroy(p), empty(&r3);
    for (int i = 0; i < n; i++) {
        seen[one[i].id]++;
        moved += one[i].id % 1000 != i % N;
        bad += one[i].id != two[i].id || one[i].noise != two[i].noise;
    }
    for (int e = 0; e < EPOCHS; e++)
        for (int i = 0; i < N; i++) bad += seen[e * 1000 + i] != 1;
    for (int i = 0; i < 3 && argc > 2; i++) printf("%s\n", text);
    printf("shufres: %d, with a stop %d, %d moved, %d bad: %s\n", n, m, moved, bad,
           n != N * EPOCHS || m != n || bad || moved < 1000 ? "WRONG" : "right");
}
