/* make_jpegs.c - writes a folder of JPEG files for examples/image_folder.c: so many good ones of
   many sizes, one that is cut off, and one that is text.
   cc -O2 tests/make_jpegs.c -o make_jpegs -ljpeg && ./make_jpegs FOLDER COUNT */
#include <stdio.h>
#include <stdlib.h>

#include <jpeglib.h>

static unsigned char *encode(int width, int height, unsigned seed, unsigned long *bytes) {
    struct jpeg_compress_struct jpeg;
    struct jpeg_error_mgr errors;
    unsigned char row[3 * 640], *data = NULL;
    JSAMPROW rows[] = { row };
    jpeg.err = jpeg_std_error(&errors);
    jpeg_create_compress(&jpeg);
    jpeg_mem_dest(&jpeg, &data, bytes);
    jpeg.image_width = (JDIMENSION)width;
    jpeg.image_height = (JDIMENSION)height;
    jpeg.input_components = 3;
    jpeg.in_color_space = JCS_RGB;
    jpeg_set_defaults(&jpeg);
    jpeg_start_compress(&jpeg, TRUE);
    for (int y = 0; y < height; y++) {
        for (int i = 0; i < 3 * width; i++)
            row[i] = (unsigned char)((unsigned)(i * y) / 64 + seed * (unsigned)(1 + i % 3));
        jpeg_write_scanlines(&jpeg, rows, 1);
    }
    jpeg_finish_compress(&jpeg);
    jpeg_destroy_compress(&jpeg);
    return data;
}

static int write_file(const char *folder, const char *name, const void *data, size_t bytes) {
    char path[1000];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    if (!file) return perror(path), 1;
    const int bad = fwrite(data, 1, bytes, file) != bytes;
    return fclose(file) != 0 || bad;
}

int main(int argc, char **argv) {
    static const char text[] = "This is no picture.\n";
    int bad = 0;
    if (argc != 3) return fprintf(stderr, "usage: make_jpegs FOLDER COUNT\n"), 2;
    for (int i = 0; i < atoi(argv[2]); i++) {
        char name[40];
        unsigned long bytes = 0;
        unsigned char *data = encode(20 + i * 37 % 600, 20 + i * 53 % 400, (unsigned)i, &bytes);
        snprintf(name, sizeof name, "image_%04d.jpg", i);
        bad += write_file(argv[1], name, data, bytes);
        if (i == 1) bad += write_file(argv[1], "cut.jpg", data, bytes * 2 / 3);
        free(data);
    }
    bad += write_file(argv[1], "notes.jpg", text, sizeof text - 1);
    return bad ? 1 : 0;
}
