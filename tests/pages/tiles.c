/* Each image gives 4 x 4 tiles; each tile is augmented at random, the same at any number of
 * workers. */
#include "spdl.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
enum { IMAGES = 40, SIDE = 64, T = 16, PER = 16, BATCH = 10 };
typedef struct Image {
    int id;
    uint8_t px[SIDE][SIDE];
} Image;
typedef struct Tile {
    int image, tile;
    uint64_t key;
    uint8_t px[T][T];
} Tile;
static void draw(Image *im, int id) {
    im->id = id;
    for (int y = 0; y < SIDE; y++)
        for (int x = 0; x < SIDE; x++) im->px[y][x] = (uint8_t)(id * 7 + y * 3 + x * x);
}
static void cut(const Image *im, int k, Tile *t) {
    memset(t, 0, sizeof *t);
    t->image = im->id, t->tile = k;
    for (int y = 0; y < T; y++) memcpy(t->px[y], &im->px[k / 4 * T + y][k % 4 * T], T);
}
static void augment(Tile *t, uint64_t key) { /* brightness, flip */
    t->key = key;
    for (int y = 0; y < T; y++)
        for (int x = 0; x < T; x++) t->px[y][x] = (uint8_t)(t->px[y][x] + key % 64);
    if (key >> 32 & 1)
        for (int y = 0; y < T / 2; y++)
            for (int x = 0; x < T; x++) {
                uint8_t s = t->px[y][x];
                t->px[y][x] = t->px[T - 1 - y][x];
                t->px[T - 1 - y][x] = s;
            }
}
SPDL_FN(load, spdl_index, Image) {
    if ((*out = spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    draw(*out, (int)in->index);
    return SPDL_OK;
}
SPDL_FN(tiles, Image, Tile) {
    size_t *k = (size_t *)spdl_call_state(task);
    if ((*out = spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    cut(in, (int)*k, *out);
    return ++*k < PER ? SPDL_AGAIN : SPDL_OK;
}
SPDL_FN(randomly, Tile, Tile) {
    uint64_t key = spdl_item_key(task);
    augment(in, key);
    *out = in;
    return SPDL_OK;
}
int main(int argc, char **argv) {
    spdl_pipeline *p;
    spdl_batch *b;
    Image *im = malloc(sizeof *im);
    Tile want;
    int n = 0, bad = 0, same = 0;
    uint64_t sum = 0, last = 0;
    spdl_pipeline_desc desc = { .workers = argc > 1 ? atoi(argv[1]) : 0, .seed = 42 };
    if (spdl_pipeline_create(
            &p, &desc,
            SPDL_STAGES(SPDL_COUNT(IMAGES),
                        SPDL_PIPE(load, .concurrency = SPDL_ALL, .item_bytes = sizeof(Image),
                                  .free_item = spdl_buffer_free),
                        SPDL_PIPE(tiles, .again = true, .item_bytes = sizeof(Tile),
                                  .free_item = spdl_buffer_free),
                        SPDL_PIPE(randomly, .concurrency = SPDL_ALL), SPDL_BATCH_OF(Tile, BATCH),
                        SPDL_SINK(3))))
        return 1;
    while (SPDL_NEXT(p, &b, SPDL_FOREVER) == SPDL_OK) {
        for (size_t i = 0; i < b->count; i++, n++) {
            Tile *t = (Tile *)b->data + i;
            draw(im, n / PER), cut(im, n % PER, &want), augment(&want, t->key);
            bad += memcmp(&want, t, sizeof want) != 0;
            same += n % PER && t->key == last;
            last = t->key, sum = spdl_hash(sum, t, sizeof *t);
        }
        spdl_batch_free(b);
    }
    if (spdl_pipeline_failed(p)) puts(spdl_pipeline_error(p)->text);
    spdl_pipeline_destroy(p), free(im);
    printf("tiles: %d of %d, %d bad, %d with the key of the last tile, sum %016llx: %s\n", n,
           IMAGES * PER, bad, same, (unsigned long long)sum,
           n != IMAGES * PER || bad || same ? "WRONG" : "right");
}
