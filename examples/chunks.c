/* chunks.c - a file of binary chunks, as trainers of chess engines read them: each chunk is decoded
   on any worker, most of its positions are filtered out, the rest is shuffled and packed into
   batches of one size. Then it is compared with a plain loop. Without an argument it makes a file.

   Build:  cc -O2 -I. examples/chunks.c -o chunks -lpthread */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <stdio.h>
#include <stdlib.h>
enum { ENTRIES = 512, CHUNKS = 400, KEPT = 4096, BATCH = 256, LEAST_PLY = 16, MOST_SCORE = 3000 };

typedef struct Entry { uint64_t occupied; int16_t score; uint16_t ply; uint32_t move; } Entry;
typedef struct Chunk { Entry entry[ENTRIES]; } Chunk;
typedef struct Position { int32_t score; uint8_t count, square[64]; } Position;
typedef struct Piece { int count; Position position[ENTRIES]; } Piece;
typedef struct Batch { int count; Position position[BATCH]; } Batch;

typedef struct Mixer {
    uint64_t random;
    int at, kept; /* in its input; in the reservoir */
    Position reservoir[KEPT];
    Batch batch;
} Mixer;

SPDL_FN(next_chunk, void, Chunk) {
    FILE *file = (FILE *)spdl_ctx(task);
    if ((*out = (Chunk *)spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    const size_t bytes = fread(*out, 1, sizeof **out, file);
    if (bytes == sizeof **out) return SPDL_OK;
    return bytes == 0 && !ferror(file) ? SPDL_END : spdl_fail(task, "a chunk is cut off");
}

static bool read_entry(const Entry *entry, Position *position) {
    if (entry->ply < LEAST_PLY || abs(entry->score) > MOST_SCORE) return false;
    position->score = entry->score;
    position->count = 0;
    for (int square = 0; square < 64; square++)
        if (entry->occupied >> square & 1) position->square[position->count++] = (uint8_t)square;
    return true;
}

SPDL_FN(decode, Chunk, Piece) {
    if ((*out = (Piece *)spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    (*out)->count = 0;
    for (int i = 0; i < ENTRIES; i++)
        (*out)->count += read_entry(&in->entry[i], &(*out)->position[(*out)->count]);
    return SPDL_OK;
}

/* One at random leaves the reservoir; `with` takes its place, or it becomes smaller. */
static void draw(Mixer *mixer, const Position *with) {
    mixer->random = mixer->random * 6364136223846793005u + 1442695040888963407u;
    Position *drawn = &mixer->reservoir[(mixer->random >> 33) % (uint64_t)mixer->kept];
    mixer->batch.position[mixer->batch.count++] = *drawn;
    *drawn = with ? *with : mixer->reservoir[--mixer->kept];
}

/* Full batches go out (.again), at the end those of the reservoir (.flush). */
SPDL_FN(mix, Piece, Batch) {
    Mixer *mixer = (Mixer *)spdl_ctx(task);
    const bool last = spdl_flushing(task);
    while (mixer->batch.count < BATCH && (last ? mixer->kept > 0 : mixer->at < in->count)) {
        const Position *next = last ? NULL : &in->position[mixer->at++];
        if (next && mixer->kept < KEPT) mixer->reservoir[mixer->kept++] = *next;
        else draw(mixer, next);
    }
    const bool full = mixer->batch.count == BATCH;
    if (!full) mixer->at = 0; /* all of this piece was used */
    if (mixer->batch.count == 0 || (!full && !last)) return SPDL_SKIP;
    if ((*out = (Batch *)spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    **out = mixer->batch;
    mixer->batch.count = 0;
    return full ? SPDL_AGAIN : SPDL_OK;
}

static uint64_t sum_of(const Position *position) {
    uint64_t sum = (uint64_t)(position->score + 40000);
    for (int i = 0; i < position->count; i++) sum = sum * 31 + position->square[i];
    return sum;
}

static void make_file(FILE *file) {
    uint64_t x = 1;
    for (int i = 0; i < CHUNKS * ENTRIES; i++) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        const Entry entry = { x, (int16_t)(x >> 40), (uint16_t)(x >> 33 & 127), 0 };
        fwrite(&entry, sizeof entry, 1, file);
    }
    rewind(file);
}

int main(int argc, char **argv) {
    static Mixer mixer;
    static Chunk chunk;
    Position one;
    FILE *file = argc > 1 ? fopen(argv[1], "rb") : tmpfile();
    uint64_t sum = 0, expected = 0;
    int all = 0, kept = 0;
    spdl_pipeline *p;
    Batch *batch;
    if (file == NULL) return perror(argc > 1 ? argv[1] : "a temporary file"), 1;
    if (argc < 2) make_file(file);
    if (spdl_pipeline_create(&p, NULL, SPDL_STAGES(
            SPDL_SOURCE(next_chunk, .ctx = file, .item_bytes = sizeof(Chunk)),
            SPDL_PIPE(decode, .concurrency = SPDL_ALL, .item_bytes = sizeof(Piece)),
            SPDL_PIPE(mix, .ctx = &mixer, .again = true, .flush = true,
                      .item_bytes = sizeof(Batch)),
            SPDL_SINK(3))) != SPDL_OK) return 1;
    for (; SPDL_NEXT(p, &batch, SPDL_FOREVER) == SPDL_OK; spdl_buffer_free(batch))
        for (int i = 0; i < batch->count; i++, kept++) sum += sum_of(&batch->position[i]);
    if (spdl_pipeline_failed(p)) return puts(spdl_pipeline_error(p)->text), 1;
    spdl_pipeline_destroy(p);
    for (rewind(file); fread(&chunk, sizeof chunk, 1, file) == 1; all += ENTRIES)
        for (int i = 0; i < ENTRIES; i++)
            if (read_entry(&chunk.entry[i], &one)) expected += sum_of(&one);
    fclose(file);
    printf("%d of %d positions, as a plain loop: %s\n", kept, all, sum == expected ? "yes" : "no");
    return sum != expected;
}
