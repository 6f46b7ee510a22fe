/* doctor.c - which stage holds a trainer back, and what is there to gain? A known worked example of
   a loader in Python took five edited copies of the program to say it: the trainer on one batch on
   the device, on batches in memory, on kept results of the transformation, on kept raw data, and
   the whole. Here one run of 30 s measures all five and names the stage.

   Build:  cc -O2 -I. examples/doctor.c -o doctor -lpthread
   Run:    ./doctor         as it is: names the transformation
           ./doctor 1       with the transformation cured: names loading
           ./doctor 2       with both cured: says stop
           ./doctor 0 60    for 60 s instead of 30

   A program of yours needs no change, the environment does the same for its own loop. Without
   `replay` its items are what they always are, and rows are slowed down instead:
           SPDL_DOCTOR=1,replay ./train
           SPDL_DOCTOR=1 ./train

   Times are those of the original (a batch of 256), 100 times as fast. It has 4 workers and a
   thread that collates, here 5 workers do all: 104 steps/s are 0.89 there. Every stage sleeps:
   loading as if for storage, the transformation as if for a decoder, the step as if for its device.
   So ratios are the same on any machine; and more workers than 5 would help as well, which the
   doctor says too; SPDL_DOCTOR=30,raise would try it. */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BATCH = 256, SHARD = 32 };

/* Of a batch, in us; the first three are shared by the workers. So 5 workers load, transform and
   collate 5e6 / (21686 + 23256 + 3096) = 104 batches/s; 4 calls transform 4e6 / 23256 = 172; one
   collates 1e6 / 3096 = 323; the trainer makes 1e6 / (104 + 2899) = 333 steps/s, without transfer
   345. */
typedef struct Costs { double load, transform, collate, transfer, step; } Costs;
static const Costs costs[] = {
    { 21686, 23256, 3096, 104, 2899 }, /* as it is */
    { 21686,  9564, 3096, 104, 2899 }, /* decodes at the size that is needed: 146 batches/s */
    {  1084,  9564, 3096, 104, 2899 }, /* and reads from a disk nearby: 323 */
};
static Costs cost;

typedef struct Shard { uint64_t file; float sample[SHARD]; } Shard; /* a sample is one number */
typedef struct Batch { float sample[BATCH]; bool on_device; } Batch;

/* Sleeps as long as the work would take; if a sleep was too long, the next is shorter. */
static void takes(double us) {
    static _Thread_local double owed_ns;
    const uint64_t begun = spdl_time_ns();
    owed_ns += 1e3 * us;
    if (owed_ns <= 0) return;
    nanosleep(&(struct timespec){ .tv_nsec = (long)owed_ns }, NULL);
    owed_ns -= (double)(spdl_time_ns() - begun);
}

static void *shard_copy(const void *from) { /* another like it: it may be replayed */
    void *copy = malloc(sizeof(Shard));
    return copy != NULL ? memcpy(copy, from, sizeof(Shard)) : NULL;
}

SPDL_FN(list, void, Shard) { /* the name of a file */
    if ((*out = (Shard *)malloc(sizeof(Shard))) == NULL) return SPDL_E_NOMEM;
    (*out)->file = spdl_sequence(task);
    return SPDL_OK;
}

SPDL_FN(load, Shard, Shard) { /* raw data */
    if ((*out = (Shard *)shard_copy(in)) == NULL) return SPDL_E_NOMEM;
    takes(cost.load * SHARD / BATCH);
    for (int i = 0; i < SHARD; ++i) (*out)->sample[i] = (float)(in->file % 256);
    return SPDL_OK;
}

SPDL_FN(transform, Shard, Shard) { /* decoded, cropped, normalised */
    if ((*out = (Shard *)spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    takes(cost.transform * SHARD / BATCH);
    for (int i = 0; i < SHARD; ++i) (*out)->sample[i] = in->sample[i] / 255;
    return SPDL_OK;
}

SPDL_FN(collate, spdl_batch, Batch) { /* shards become a batch */
    if ((*out = (Batch *)spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    takes(cost.collate);
    for (int i = 0; i < BATCH; ++i)
        (*out)->sample[i] = ((const Shard *)in->items[i / SHARD])->sample[i % SHARD];
    (*out)->on_device = false;
    return SPDL_OK;
}

/* One step. A batch that the trainer has had before is on the device already. */
static void step(void *ctx, void *item) {
    (void)ctx;
    Batch *batch = (Batch *)item;
    takes(cost.step + (batch->on_device ? 0 : cost.transfer));
    batch->on_device = true;
}

int main(int argc, char **argv) {
    const int cured = argc > 1 ? atoi(argv[1]) : 0;
    const spdl_doctor_desc doctor = { .replay = true, .seconds = argc > 2 ? atof(argv[2]) : 0 };
    spdl_pipeline *p;
    spdl_result result;
    if (cured < 0 || cured > 2) return fprintf(stderr, "usage: doctor [0|1|2 [SECONDS]]\n"), 2;
    cost = costs[cured];
    result = spdl_pipeline_create(&p, &(spdl_pipeline_desc){ .workers = 5, .doctor = &doctor },
        SPDL_STAGES(
            SPDL_SOURCE(list, .free_item = free),
            /* what it makes may be replayed; buffers may be without a function */
            SPDL_PIPE(load, .concurrency = 4, .free_item = free, .copy_item = shard_copy),
            SPDL_PIPE(transform, .concurrency = 4, .item_bytes = sizeof(Shard)),
            SPDL_BATCH(BATCH / SHARD, .buffer_size = 1),
            SPDL_PIPE(collate, .serial = true, .item_bytes = sizeof(Batch)),
            SPDL_SINK(1)));
    if (result == SPDL_OK) result = spdl_doctor_run(p, step, NULL);
    spdl_pipeline_destroy(p);
    return result == SPDL_OK ? 0 : 1;
}
