// needs: libjpeg62-turbo-dev
// flags: -ljpeg -lm
/* Not a peer: what the rows about JPEG call, the same for all; also a part of peer_work.so. */
#include <stdio.h>

#include <jpeglib.h>
#include <math.h>

#include "../pipe.h"

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

/* A picture: slow waves of colour, and noise that makes 256 x 256 of it about 20 KB. */
static void paint(unsigned seed, int width, int height, unsigned char *pixels) {
    uint32_t noise = seed * 2654435761u + 1;
    const double turn = 0.02 + 0.001 * (seed % 16);
    int i;
    for (i = 0; i < width * height * 3; ++i) {
        const double x = turn * (i / 3 % width) + seed;
        const double y = turn * (i / (3 * width)) + i % 3;
        noise = noise * 1664525u + 1013904223u;
        pixels[i] = (unsigned char)(112 + 60 * sin(x) + 50 * cos(x + 2 * y) + (noise >> 27));
    }
}

static void make(unsigned seed, int width, int height, pipe_jpeg *made) {
    struct jpeg_compress_struct c;
    struct jpeg_error_mgr errors;
    unsigned char *pixels = (unsigned char *)peer_alloc((size_t)(width * height * 3));
    paint(seed, width, height, pixels);
    made->bytes = NULL;
    made->size = 0;
    c.err = jpeg_std_error(&errors);
    jpeg_create_compress(&c);
    jpeg_mem_dest(&c, &made->bytes, &made->size);
    c.image_width = (JDIMENSION)width;
    c.image_height = (JDIMENSION)height;
    c.input_components = 3;
    c.in_color_space = JCS_RGB;
    jpeg_set_defaults(&c);
    jpeg_set_quality(&c, 89, TRUE);
    jpeg_start_compress(&c, TRUE);
    while (c.next_scanline < c.image_height) {
        JSAMPROW row = pixels + c.next_scanline * 3 * (JDIMENSION)width;
        jpeg_write_scanlines(&c, &row, 1);
    }
    jpeg_finish_compress(&c);
    jpeg_destroy_compress(&c);
    free(pixels);
}

static bool decode(const pipe_jpeg *jpeg, int width, int height, unsigned char *pixels) {
    struct jpeg_decompress_struct d;
    struct jpeg_error_mgr errors;
    bool well;
    d.err = jpeg_std_error(&errors);
    jpeg_create_decompress(&d);
    jpeg_mem_src(&d, jpeg->bytes, jpeg->size);
    well = jpeg_read_header(&d, TRUE) == JPEG_HEADER_OK && jpeg_start_decompress(&d);
    well = well && d.output_width == (JDIMENSION)width && d.output_height == (JDIMENSION)height &&
           d.output_components == 3;
    while (well && d.output_scanline < d.output_height) {
        JSAMPROW row = pixels + d.output_scanline * 3 * (JDIMENSION)width;
        jpeg_read_scanlines(&d, &row, 1);
    }
    well = well && jpeg_finish_decompress(&d);
    jpeg_destroy_decompress(&d);
    return well;
}

const pipe_jpeg_calls *pipe_jpeg_plugin(void);
const pipe_jpeg_calls *pipe_jpeg_plugin(void) {
    static const pipe_jpeg_calls calls = { "libjpeg-turbo " TEXT(LIBJPEG_TURBO_VERSION), make,
                                           decode };
    return &calls;
}
