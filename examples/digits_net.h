/* digits_net.h - the images and the network of train_digits.c: 64 inputs, 64 or
   DIGITS_HIDDEN ReLUs, softmax over 10 classes; gradient descent with momentum. Plain C, and
   nothing of spdl in it. */
#ifndef DIGITS_NET_H
#define DIGITS_NET_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef DIGITS_HIDDEN
#define DIGITS_HIDDEN 64
#endif
enum { SIDE = 8, PIXELS = SIDE * SIDE, HIDDEN = DIGITS_HIDDEN, CLASSES = 10 };

typedef struct { int label; float pixel[PIXELS]; } sample;
typedef struct { size_t count; sample at[]; } samples;
typedef struct { float w1[PIXELS][HIDDEN], w2[HIDDEN][CLASSES]; } layers;
typedef struct { layers weight, slope, speed; size_t seen; } model; /* seen: images in slope */

static int dice(uint64_t *seed, int sides) { /* 0 to sides - 1 */
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (int)((*seed >> 33) % (uint64_t)sides);
}

/* Images with pixels scaled to 0..1, for free(); NULL when there is no memory. */
static samples *samples_new(size_t count, const uint8_t *pixels, const uint8_t *labels) {
    samples *made = (samples *)malloc(sizeof *made + count * sizeof made->at[0]);
    for (size_t n = 0; made && n < count; n++) {
        made->at[n].label = labels[n] % CLASSES;
        for (size_t i = 0; i < PIXELS; i++)
            made->at[n].pixel[i] = (float)pixels[n * PIXELS + i] / 16;
    }
    if (made) made->count = count;
    return made;
}

/* Moves every other image by up to a pixel and adds noise to all. */
static void samples_vary(samples *set, uint64_t seed) {
    for (size_t n = 0; n < set->count; n++) {
        const sample from = set->at[n];
        const int move = dice(&seed, 2);
        const int dx = move * (dice(&seed, 3) - 1), dy = move * (dice(&seed, 3) - 1);
        for (int i = 0; i < PIXELS; i++) {
            const int x = i % SIDE + dx, y = i / SIDE + dy;
            const bool inside = x >= 0 && x < SIDE && y >= 0 && y < SIDE;
            const float noise = (float)(dice(&seed, 201) - 100) / 1000;
            set->at[n].pixel[i] = (inside ? from.pixel[y * SIDE + x] : 0) + noise;
        }
    }
}

static void model_init(model *m, uint64_t seed) {
    float *weight = (float *)&m->weight;
    memset(m, 0, sizeof *m);
    for (size_t i = 0; i < sizeof m->weight / sizeof *weight; i++)
        weight[i] = (float)(dice(&seed, 501) - 250) / 1000; /* -0.25 to 0.25 */
}

static inline void add(float *restrict to, const float *restrict from, float times, int count) {
    for (int i = 0; i < count; i++) to[i] += times * from[i];
}

/* Fills the activations of the hidden layer and the probabilities; returns the likeliest class. */
static int model_run(const layers *w, const float *x, float hidden[HIDDEN], float p[CLASSES]) {
    int best = 0;
    float sum = 0;
    memset(hidden, 0, HIDDEN * sizeof *hidden);
    memset(p, 0, CLASSES * sizeof *p);
    for (int i = 0; i < PIXELS; i++) add(hidden, w->w1[i], x[i], HIDDEN);
    for (int j = 0; j < HIDDEN; j++) {
        hidden[j] = hidden[j] > 0 ? hidden[j] : 0;
        add(p, w->w2[j], hidden[j], CLASSES);
    }
    for (int k = 0; k < CLASSES; k++) best = p[k] > p[best] ? k : best;
    for (int k = 0; k < CLASSES; k++) sum += p[k] = expf(p[k]);
    for (int k = 0; k < CLASSES; k++) p[k] /= sum;
    return best;
}

/* Adds the gradient of these images; returns their mean loss. */
static float model_learn(model *m, const samples *set) {
    float hidden[HIDDEN], back[HIDDEN], p[CLASSES], loss = 0;
    for (const sample *s = set->at; s < set->at + set->count; s++) {
        model_run(&m->weight, s->pixel, hidden, p);
        loss -= logf(p[s->label] + 1e-9f);
        p[s->label] -= 1;
        for (int j = 0; j < HIDDEN; j++) {
            float sum = 0;
            for (int k = 0; k < CLASSES; k++) sum += p[k] * m->weight.w2[j][k];
            back[j] = hidden[j] > 0 ? sum : 0;
            add(m->slope.w2[j], p, hidden[j], CLASSES);
        }
        for (int i = 0; i < PIXELS; i++) add(m->slope.w1[i], back, s->pixel[i], HIDDEN);
    }
    m->seen += set->count;
    return loss / (float)set->count;
}

/* Goes one step down the mean gradient of the images since the last step. */
static void model_step(model *m) {
    float *weight = (float *)&m->weight, *slope = (float *)&m->slope, *speed = (float *)&m->speed;
    for (size_t i = 0; i < sizeof m->weight / sizeof *weight; i++) {
        speed[i] = 0.9f * speed[i] - 6.4f / HIDDEN * slope[i] / (float)m->seen;
        weight[i] += speed[i];
    }
    memset(&m->slope, 0, sizeof m->slope);
    m->seen = 0;
}

static inline double model_accuracy(const model *m, const samples *test) {
    float hidden[HIDDEN], p[CLASSES];
    int right = 0;
    for (size_t n = 0; n < test->count; n++)
        right += model_run(&m->weight, test->at[n].pixel, hidden, p) == test->at[n].label;
    return right / (double)test->count;
}

#endif
