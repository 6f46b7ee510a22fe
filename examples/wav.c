/* wav.c - a window out of each WAV file of a folder: a stage of one's own on stdio. It reads RIFF
   files of PCM (8 bits without a sign, 16, 24 or 32 with one) or floats of 32 bits, and hands on
   one second as floats, from a start that spdl_item_key draws: the same in every run.

   Build:  cc -O2 -I. examples/wav.c -o wav -lpthread
   Run:    ./wav [FOLDER/]    (without one it writes some files first) */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct Sound { int channels, rate, frames; float *at; } Sound;

static void sound_free(void *sound) {
    if (sound) free(((Sound *)sound)->at);
    free(sound);
}

static uint32_t number(const uint8_t *at, int bytes) {
    uint32_t n = 0;
    while (bytes-- > 0) n = n << 8 | at[bytes];
    return n;
}

typedef struct Format { uint32_t code, channels, rate, bits, bytes; } Format;
/* Goes through the chunks up to the data, where the file is left; NULL, or what is wrong. */
static const char *find_data(FILE *file, Format *f) {
    uint8_t head[12], format[16];
    if (fread(head, 12, 1, file) != 1 || memcmp(head, "RIFF", 4) || memcmp(head + 8, "WAVE", 4))
        return "no WAV file";
    for (;;) {
        if (fread(head, 8, 1, file) != 1) return "no data in it";
        f->bytes = number(head + 4, 4);
        if (!memcmp(head, "data", 4)) return f->channels ? NULL : "data, and no format before them";
        long rest = (long)f->bytes + (f->bytes & 1); /* a chunk of odd length has a byte more */
        if (!memcmp(head, "fmt ", 4)) {
            if (rest < 16 || fread(format, 16, 1, file) != 1) return "its head is cut off";
            rest -= 16;
            f->code = number(format, 2), f->channels = number(format + 2, 2);
            f->rate = number(format + 4, 4), f->bits = number(format + 14, 2);
            if (!(f->code == 1 && f->bits && f->bits % 8 == 0 && f->bits <= 32)
                && !(f->code == 3 && f->bits == 32)) return "samples of another format";
            if (!f->channels || !f->rate) return "no channels, or no rate";
        }
        if (fseek(file, rest, SEEK_CUR)) return "it cannot be read";
    }
}

static float sample(const uint8_t *at, const Format *f) {
    const int bytes = (int)f->bits / 8;
    const uint32_t raw = number(at, bytes) << (32 - f->bits);
    float value;
    if (f->code == 1) return (float)(int32_t)(bytes == 1 ? raw ^ 0x80000000u : raw) / 2147483648.f;
    memcpy(&value, &raw, sizeof value);
    return value;
}

SPDL_FN(load, char, Sound) {
    Format f = { 0, 0, 0, 0, 0 };
    FILE *file = fopen(in, "rb");
    const char *wrong = file ? find_data(file, &f) : "it cannot be opened";
    const size_t frame = f.channels * (f.bits / 8), all = frame ? f.bytes / frame : 0;
    const size_t frames = all < f.rate ? all : f.rate;
    const size_t start = wrong ? 0 : spdl_item_key(task) % (all - frames + 1);
    Sound *made = (Sound *)calloc(1, sizeof *made);
    uint8_t *bytes = (uint8_t *)malloc(frames * frame + 1);
    if (made) made->at = (float *)malloc((frames * f.channels + 1) * sizeof(float));
    if (!wrong && (!made || !made->at || !bytes || fseek(file, (long)(start * frame), SEEK_CUR)))
        wrong = "there is no memory for it, or it cannot be read";
    if (!wrong && fread(bytes, 1, frames * frame, file) != frames * frame) wrong = "it is cut off";
    if (!wrong) {
        made->channels = (int)f.channels, made->rate = (int)f.rate, made->frames = (int)frames;
        for (size_t i = 0; i < frames * f.channels; i++)
            made->at[i] = sample(bytes + i * (f.bits / 8), &f);
    }
    free(bytes);
    if (file) fclose(file);
    if (!wrong) return *out = made, SPDL_OK;
    sound_free(made);
    return spdl_fail(task, "%s: %s", in, wrong);
}

/* Two seconds of 8000 frames; the last file has less than one. */
static void write_some(void) {
    static const uint8_t head[44] = "RIFF\0\0\0\0WAVEfmt \20\0\0\0\1\0\1\0\100\37\0\0"
                                    "\200\76\0\0\2\0\20\0data";
    for (int i = 0; i < 4; i++) {
        const uint32_t bytes = i < 3 ? 32000 : 6000;
        char name[32];
        snprintf(name, sizeof name, "wav_%d.wav", i);
        FILE *file = fopen(name, "wb");
        if (!file || fwrite(head, 40, 1, file) != 1) perror(name), exit(1);
        for (int k = 0; k < 4; k++) fputc((int)(bytes >> 8 * k & 255), file);
        for (uint32_t k = 0; k < bytes / 2; k++) fputc(0, file), fputc(i * 16, file);
        fclose(file);
    }
}

int main(int argc, char **argv) {
    spdl_files *files;
    spdl_pipeline *p;
    Sound *sound;
    char pattern[400];
    spdl_error error;
    const spdl_files_desc desc = { .error = &error };
    if (argc < 2) write_some();
    snprintf(pattern, sizeof pattern, "%s*.wav", argc > 1 ? argv[1] : "wav_");
    if (spdl_files_open(&files, pattern, &desc) != SPDL_OK) return puts(error.text), 1;
    if (spdl_pipeline_create(&p, &(spdl_pipeline_desc){ .seed = 1 }, SPDL_STAGES(
            SPDL_FILES(files), SPDL_PIPE(load, .concurrency = SPDL_ALL, .free_item = sound_free),
            SPDL_SINK(4))) != SPDL_OK) return 1;
    for (; SPDL_NEXT(p, &sound, SPDL_FOREVER) == SPDL_OK; sound_free(sound))
        printf("%d frames of %d channels at %d Hz, the first is %g\n", sound->frames,
               sound->channels, sound->rate, sound->frames ? (double)sound->at[0] : 0.0);
    const int failed = spdl_pipeline_failed(p);
    if (failed) puts(spdl_pipeline_error(p)->text);
    spdl_pipeline_destroy(p);
    spdl_files_close(files);
    return failed;
}
