/* image_folder.c - the JPEG files of a folder as tensors of up to 16 x 64 x 64 x 3 bytes:
       next_name -> read -> decode (libjpeg-turbo, on any worker) -> batch -> collate
   Files that cannot be decoded are left out, as long as they are few, and named at the end.

   Needs:  apt-get install libjpeg62-turbo-dev
   Build:  cc -O2 -I. examples/image_folder.c -o image_folder -lpthread -ljpeg
   Run:    ./image_folder FOLDER */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <dirent.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <jpeglib.h> /* needs stdio.h */

enum { SIDE = 64, BATCH = 16, MAX_BROKEN = 10, LINE_BYTES = 512 };

typedef struct { uint8_t pixels[SIDE][SIDE][3]; } Image;
typedef struct { size_t count; Image image[BATCH]; } Tensor;

SPDL_FN(next_name, void, char) {
    const struct dirent *entry = readdir((DIR *)spdl_ctx(task));
    if (!entry) return SPDL_END;
    if (entry->d_name[0] == '.') return SPDL_SKIP;
    *out = strdup(entry->d_name);
    return *out ? SPDL_OK : SPDL_E_NOMEM;
}

/* Each value is the mean of a box of them. */
static void shrink(JSAMPARRAY rows, int width, int height, Image *image) {
    for (int n = 0; n < SIDE * SIDE * 3; n++) {
        const int x = n / 3 % SIDE, y = n / 3 / SIDE, channel = n % 3;
        const int left = x * width / SIDE, right = (x + 1) * width / SIDE;
        const int top = y * height / SIDE, bottom = (y + 1) * height / SIDE;
        int sum = 0, count = 0;
        for (int j = top; j < bottom || j == top; j++)
            for (int i = left; i < right || i == left; i++, count++)
                sum += rows[j][3 * i + channel];
        image->pixels[y][x][channel] = (uint8_t)(sum / count);
    }
}

/* libjpeg fails by calling `leave`. Of damaged data it only warns: here that is a failure, too. */
typedef struct {
    struct jpeg_decompress_struct jpeg; /* first, so that libjpeg's pointer to it leads here */
    struct jpeg_error_mgr errors;
    jmp_buf escape;
} Decoder;

static void leave(j_common_ptr jpeg) { longjmp(((Decoder *)jpeg)->escape, 1); }
static void heed(j_common_ptr jpeg, int level) { if (level < 0) leave(jpeg); }

static bool read_image(Decoder *d, const spdl_record *file, Image *image) {
    struct jpeg_decompress_struct *jpeg = &d->jpeg;
    jpeg->err = jpeg_std_error(&d->errors);
    d->errors.error_exit = leave;
    d->errors.emit_message = heed;
    if (setjmp(d->escape)) return false;
    jpeg_create_decompress(jpeg);
    jpeg_mem_src(jpeg, file->data, file->bytes);
    jpeg_read_header(jpeg, TRUE);
    jpeg->out_color_space = JCS_RGB;
    jpeg_start_decompress(jpeg);
    const JSAMPARRAY rows = jpeg->mem->alloc_sarray(
        (j_common_ptr)jpeg, JPOOL_IMAGE, 3 * jpeg->output_width, jpeg->output_height);
    while (jpeg->output_scanline < jpeg->output_height)
        jpeg_read_scanlines(jpeg, rows + jpeg->output_scanline, 1);
    shrink(rows, (int)jpeg->output_width, (int)jpeg->output_height, image);
    return jpeg_finish_decompress(jpeg);
}

/* What fails is told to main, too, through a ring of lines that any worker may push to. */
SPDL_FN(decode, spdl_record, Image) {
    char why[JMSG_LENGTH_MAX] = "no memory", line[LINE_BYTES];
    Decoder d = { .errors = { .error_exit = NULL } };
    *out = (Image *)malloc(sizeof **out);
    const bool good = *out && read_image(&d, in, *out);
    if (d.jpeg.err && !good) d.errors.format_message((j_common_ptr)&d.jpeg, why);
    jpeg_destroy_decompress(&d.jpeg);
    if (good) return SPDL_OK;
    free(*out);
    snprintf(line, sizeof line, "%s: %s", in->name, why);
    spdl_ring_try_push((spdl_ring *)spdl_ctx(task), line);
    return spdl_fail(task, "%s", line);
}

SPDL_FN(collate, spdl_batch, Tensor) {
    if ((*out = (Tensor *)calloc(1, sizeof **out)) == NULL) return SPDL_E_NOMEM;
    for (size_t i = 0; i < in->count; i++)
        (*out)->image[(*out)->count++] = *(const Image *)in->items[i];
    return SPDL_OK;
}

int main(int argc, char **argv) {
    static spdl_stats stats;
    const spdl_ring_desc lines = { .capacity = 2 * MAX_BROKEN, .item_bytes = LINE_BYTES };
    char text[LINE_BYTES];
    size_t images = 0;
    spdl_ring *broken;
    spdl_pipeline *p;
    Tensor *batch;
    DIR *folder = argc == 2 && chdir(argv[1]) == 0 ? opendir(".") : NULL;
    if (!folder) return fprintf(stderr, "usage: image_folder FOLDER\n"), 2;
    if (spdl_ring_create(&broken, &lines) != SPDL_OK) return puts("out of memory"), 1;
    if (spdl_pipeline_create(&p, NULL, SPDL_STAGES(
            SPDL_SOURCE(next_name, .ctx = folder, .free_item = free),
            SPDL_READ(.concurrency = SPDL_ALL), /* the bytes of each file */
            SPDL_PIPE(decode, .ctx = broken, .concurrency = SPDL_ALL, .max_failures = MAX_BROKEN,
                      .free_item = free),
            SPDL_BATCH(BATCH),
            SPDL_PIPE(collate, .free_item = free),
            SPDL_SINK(3))) != SPDL_OK) return 1;
    for (; SPDL_NEXT(p, &batch, SPDL_FOREVER) == SPDL_OK; free(batch))
        images += batch->count; /* a trainer would take its step here */
    spdl_pipeline_stats(p, &stats);
    spdl_stats_verdict(&stats, text, sizeof text);
    printf("%zu images, %.0f a second\n%s\n", images,
           (double)images * 1e9 / (double)stats.elapsed_ns, text);
    while (spdl_ring_try_pop(broken, text) == SPDL_OK) printf("left out: %s\n", text);
    const bool failed = spdl_pipeline_failed(p);
    if (failed) fprintf(stderr, "image_folder: %s\n", spdl_pipeline_error(p)->text);
    spdl_pipeline_destroy(p);
    spdl_ring_destroy(broken, NULL, NULL);
    closedir(folder);
    return failed || images == 0;
}
