/* A device calls a callback from threads of its own; each sample is filtered and summed per
 * channel. */
#include "spdl.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
enum { CHANNELS = 3, SAMPLES = 20000 };
typedef struct Sample {
    int channel, t;
    double v;
} Sample;
typedef void (*callback)(void *user, int channel, int t, double v);
/* The device: not my code. */
typedef struct Device {
    callback fn;
    void *user;
    int channel;
    pthread_t thread;
} Device;
static double value(int c, int t) { return (double)((t * 2654435761u + (unsigned)c) % 1000) - 500; }
static void *device(void *p) {
    Device *d = p;
    for (int t = 0; t < SAMPLES; t++) d->fn(d->user, d->channel, t, value(d->channel, t));
    return NULL;
}
/* Mine. */
typedef struct Push {
    spdl_pipeline *p;
    pthread_mutex_t lock;
    int lost;
} Push;
static void on_sample(void *user, int channel, int t, double v) {
    Push *to = user;
    Sample *s = malloc(sizeof *s);
    *s = (Sample){ channel, t, v };
    pthread_mutex_lock(&to->lock); /* one thread at a time may push */
    if (spdl_pipeline_push(to->p, s, SPDL_FOREVER) != SPDL_OK) free(s), to->lost++;
    pthread_mutex_unlock(&to->lock);
}
SPDL_FN(filter, Sample, Sample) {
    if (in->v < 0) return SPDL_SKIP;
    in->v *= 0.5, *out = in;
    return SPDL_OK;
}
static Push push = { .lock = PTHREAD_MUTEX_INITIALIZER };
static void *ender(void *p) { /* the end of the devices is the end of the input */
    Device *d = p;
    for (int c = 0; c < CHANNELS; c++) pthread_join(d[c].thread, NULL);
    if (spdl_pipeline_push_end(push.p) != SPDL_OK) puts("push_end failed");
    return NULL;
}
int main(int argc, char **argv) {
    Device d[CHANNELS];
    pthread_t end;
    Sample *s;
    int bad = 0;
    double sum[CHANNELS] = { 0 }, want[CHANNELS] = { 0 };
    int n[CHANNELS] = { 0 }, m[CHANNELS] = { 0 }, last[CHANNELS] = { -1, -1, -1 };
    spdl_pipeline_desc desc = { .workers = argc > 1 ? atoi(argv[1]) : 0 };
    if (spdl_pipeline_create(
            &push.p, &desc,
            SPDL_STAGES(SPDL_FEED(Sample, .buffer_size = 256, .free_item = free),
                        SPDL_PIPE(filter, .concurrency = SPDL_ALL, .free_item = free),
                        SPDL_SINK(64))))
        return 1;
    for (int c = 0; c < CHANNELS; c++) {
        d[c] = (Device){ on_sample, &push, c, 0 };
        pthread_create(&d[c].thread, NULL, device, &d[c]);
    }
    pthread_create(&end, NULL, ender, d);
    while (SPDL_NEXT(push.p, &s, SPDL_FOREVER) == SPDL_OK) {
        bad += s->t <= last[s->channel]; /* order within a channel */
        last[s->channel] = s->t, sum[s->channel] += s->v, n[s->channel]++;
        free(s);
    }
    pthread_join(end, NULL);
    if (spdl_pipeline_failed(push.p)) puts(spdl_pipeline_error(push.p)->text);
    spdl_pipeline_destroy(push.p);
    for (int c = 0; c < CHANNELS; c++) {
        for (int t = 0; t < SAMPLES; t++)
            if (value(c, t) >= 0) want[c] += value(c, t) * 0.5, m[c]++;
        bad += want[c] != sum[c] || n[c] != m[c];
    }
    printf("callback: %d of %d samples, %d lost, %d bad: %s\n", n[0] + n[1] + n[2],
           m[0] + m[1] + m[2], push.lost, bad, bad ? "WRONG" : "right");
}
