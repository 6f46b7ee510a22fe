/* Runs what examples/HOWTO.md answers: check_howto.sh writes its blocks into howto_blocks.h. */
#include "howto_blocks.h"

static int failures;

static void is(int got, int wanted, const char *what) {
    if (got == wanted) return;
    failures++;
    printf("%s: %d, not %d\n", what, got, wanted);
}

/* How many items there are; their ids go into *sum. */
static int all(spdl_pipeline *p, long *sum) {
    int count = 0;
    Job *job;
    for (*sum = 0; SPDL_NEXT(p, &job, SPDL_FOREVER) == SPDL_OK; free(job)) count++, *sum += job->id;
    spdl_pipeline_destroy(p);
    return count;
}

static Job *job_new(int id) {
    Job *job = (Job *)calloc(1, sizeof *job);
    if (job == NULL) exit(1);
    job->id = id;
    return job;
}

static spdl_ring *ring_new(uint64_t capacity) {
    spdl_ring *ring;
    if (spdl_ring_create(&ring, &(spdl_ring_desc){ .capacity = capacity }) != SPDL_OK) exit(1);
    return ring;
}

static void fill(spdl_ring *ring, int from, int to) {
    for (int i = from; i < to; i++) {
        Job *job = job_new(i);
        if (spdl_ring_try_push(ring, &job) != SPDL_OK) exit(1);
    }
    spdl_ring_close(ring);
}

static void sources(void) {
    long sum;
    Job *job;
    spdl_ring *ring = ring_new(64);
    Rings rings = { ring_new(64), ring_new(64) };
    spdl_pipeline *p;
    is(all(start(SPDL_STAGES(JOBS, SPDL_SINK(3))), &sum), 100, "no source");
    fill(ring, 0, 50);
    is(all(from_ring(ring), &sum), 50, "several producers");
    is((int)sum, 1225, "several producers");
    fill(rings.normal, 0, 10);
    fill(rings.urgent, 10, 20);
    p = with_priority(&rings);
    is(SPDL_NEXT(p, &job, SPDL_FOREVER), SPDL_OK, "priority");
    is(job->id, 10, "priority: the first");
    free(job);
    is(all(p, &sum), 19, "priority");
    is(all(start(SPDL_STAGES(SPDL_SOURCE(side_by_side, .free_item = free), SPDL_SINK(3))), &sum),
       100, "shards");
    is((int)sum, 4950, "shards");
    spdl_ring_destroy(ring, NULL, NULL);
    spdl_ring_destroy(rings.urgent, NULL, NULL);
    spdl_ring_destroy(rings.normal, NULL, NULL);
}

static void requests(void) {
    spdl_pipeline *p = server();
    Job *job;
    void *item = NULL;
    long sum;
    uint64_t turn = 0, since = spdl_time_ns();
    job = job_new(1);
    job->cancelled = 1;
    is(spdl_pipeline_push(p, job, SPDL_FOREVER), SPDL_OK, "push");
    is(spdl_pipeline_push(p, job_new(21), SPDL_FOREVER), SPDL_OK, "push");
    is(spdl_pipeline_next(p, &item, SPDL_FOREVER), SPDL_E_STAGE, "cancel");
    is(item == job, 1, "cancel: the item comes back");
    free(item);
    is(SPDL_NEXT(p, &job, SPDL_FOREVER), SPDL_OK, "cancel: the next one");
    is(job->answer, 42, "cancel: the next one");
    free(job);
    spdl_pipeline_destroy(p);
    is(all(start(SPDL_STAGES(JOBS, FETCH, SPDL_SINK(3))), &sum), 100, "retry");
    is(all(start(SPDL_STAGES(JOBS, SPDL_PIPE(every_ms, .ctx = &turn), SPDL_SINK(3))), &sum), 100,
       "rate");
    is(spdl_time_ns() - since > 90000000, 1, "rate: 100 items take 99 ms");
}

SPDL_FN(ten_of_each, Job, Job) { /* as the lines of a file */
    intptr_t *made = (intptr_t *)(void *)spdl_call_state(task);
    *out = job_new(in->id * 10 + (int)*made);
    return ++*made < 10 ? SPDL_AGAIN : SPDL_OK;
}
SPDL_FN(all_of_one, Job, Job) { /* as the lines of one file */
    intptr_t *made = (intptr_t *)(void *)spdl_call_state(task);
    if (in->id > 0) return SPDL_SKIP;
    *out = job_new((int)*made);
    return ++*made < 1000 ? SPDL_AGAIN : SPDL_OK;
}

SPDL_FN(job_of, const spdl_record, Job) {
    (void)task;
    *out = job_new(atoi((const char *)in->data));
    return SPDL_OK;
}

/* 1,000 numbers, as lines of a file or as members of an archive. */
static spdl_files *numbers_in_a_file(bool tar) {
    static const char path[] = "howto_shuffle.tmp";
    FILE *file = fopen(path, "wb");
    spdl_files *files;
    if (file == NULL) exit(1);
    for (int i = 0; i < 1000; i++) {
        union {
            char text[1024];
            struct { char name[100], mode[8], ids[16], bytes[12], time[12], sum[8], kind; } head;
        } block;
        unsigned sum = 8 * ' ';
        memset(&block, 0, sizeof block);
        if (!tar) fprintf(file, "%d\n", i);
        if (!tar) continue;
        snprintf(block.head.name, sizeof block.head.name, "%d", i);
        memcpy(block.head.bytes, "00000000004", 12);
        block.head.kind = '0';
        for (int k = 0; k < 512; k++) sum += (unsigned char)block.text[k];
        snprintf(block.head.sum, sizeof block.head.sum, "%06o", sum);
        snprintf(block.text + 512, 5, "%04d", i);
        fwrite(&block, 1, sizeof block, file);
    }
    for (int i = 0; tar && i < 1024; i++) fputc(0, file);
    if (fclose(file) != 0 || spdl_files_open(&files, path, NULL) != SPDL_OK) exit(1);
    return files;
}

/* The reservoir behind each kind of row: few items still follow their neighbour. */
static void shuffles(void) {
    for (int kind = 0; kind < 6; kind++) {
        static Reservoir reservoir;
        spdl_files *files = kind > 3 ? numbers_in_a_file(kind == 5) : NULL;
        const spdl_stage lines = SPDL_LINES(NULL), members = SPDL_TAR(NULL);
        const spdl_stage spread = SPDL_PIPE(ten_of_each, .again = true, .free_item = free);
        const spdl_stage one = SPDL_PIPE(all_of_one, .again = true, .free_item = free);
        spdl_pipeline *p =
            kind == 0   ? start(SPDL_STAGES(JOBS, SHUFFLE(&reservoir), SPDL_SINK(3)))
            : kind == 1 ? start(SPDL_STAGES(JOBS, spread, SHUFFLE(&reservoir), SPDL_SINK(3)))
            : kind == 2 ? start(SPDL_STAGES(JOBS, one, SHUFFLE(&reservoir), SPDL_SINK(3)))
            : kind > 3  ? start(SPDL_STAGES(SPDL_FILES(files), kind == 4 ? lines : members,
                                            SPDL_PIPE(job_of, .free_item = free),
                                            SHUFFLE(&reservoir), SPDL_SINK(3)))
                        : start(SPDL_STAGES(JOBS, spread, SPDL_BATCH(100), SPDL_UNBATCH(),
                                            SHUFFLE(&reservoir), SPDL_SINK(3)));
        int count = 0, follow = 0, last = -1;
        long sum = 0;
        Job *job;
        for (; SPDL_NEXT(p, &job, SPDL_FOREVER) == SPDL_OK; free(job)) {
            follow += job->id == last + 1;
            last = job->id;
            sum += job->id;
            count++;
        }
        is(count, kind == 0 ? 100 : 1000, "shuffle: all items");
        is(sum == (long)count * (count - 1) / 2, 1, "shuffle: each once");
        is(follow * 10 < count, 1, "shuffle: neighbours are apart");
        spdl_pipeline_destroy(p);
        if (files != NULL) remove(spdl_files_path(files, 0));
        spdl_files_close(files);
    }
}

static void groups(void) {
    static Pack *bucket[BUCKETS];
    static Reservoir reservoir;
    spdl_pipeline *p = start(SPDL_STAGES(JOBS, SPDL_PIPE(pack, .ctx = bucket, .flush = true,
                                         .again = true, .free_item = free), SPDL_SINK(3)));
    Pack *to;
    Job *job;
    Piece *piece;
    int jobs = 0, moved = 0, count = 0;
    uint64_t seen[2] = { 0, 0 };
    while (SPDL_NEXT(p, &to, SPDL_FOREVER) == SPDL_OK) {
        is(to->count * to->longest < BUDGET + 64, 1, "buckets: the budget");
        for (int i = 0; i < to->count; i++, jobs++) {
            is(to->job[i]->length * 2 >= to->longest, 1, "buckets: lengths");
            free(to->job[i]);
        }
        free(to);
    }
    is(jobs, 100, "buckets");
    spdl_pipeline_destroy(p);
    p = start(SPDL_STAGES(JOBS, SPDL_BATCH(10), SPDL_SINK(3)));
    is(grow(p), 5, "growing batches: 1, 1, 2, 2, 3 and one left");
    spdl_pipeline_destroy(p);
    p = start(SPDL_STAGES(JOBS, SHUFFLE(&reservoir), SPDL_SINK(3)));
    for (; SPDL_NEXT(p, &job, SPDL_FOREVER) == SPDL_OK; free(job)) {
        moved += job->id != count++;
        seen[job->id / 64] |= (uint64_t)1 << job->id % 64;
    }
    is(count, 100, "shuffle");
    is(moved > 50 && seen[0] == UINT64_MAX && seen[1] == ((uint64_t)1 << 36) - 1, 1, "shuffle");
    spdl_pipeline_destroy(p);
    shuffles();
    p = start(SPDL_STAGES(JOBS, PIECES, SPDL_SINK(3)));
    for (count = 0; SPDL_NEXT(p, &piece, SPDL_FOREVER) == SPDL_OK; count++) {
        is(piece->bytes[PIECE - 1], count / 10, "pieces");
        spdl_buffer_free(piece);
    }
    is(count, 1000, "pieces");
    spdl_pipeline_destroy(p);
}

static void epochs(void) {
    spdl_pipeline *p = start(SPDL_STAGES(
        SPDL_SOURCE(balanced, .continuous = true, .free_item = free), SPDL_SINK(3)));
    Job *job;
    long sum;
    int of[CLASSES] = { 0, 0, 0 };
    for (int epoch = 0; epoch < 2; epoch++)
        for (; SPDL_NEXT(p, &job, SPDL_FOREVER) == SPDL_OK; free(job))
            of[job->id < 4 ? 0 : job->id < 34 ? 1 : 2]++;
    is(of[0] == 20 && of[1] == 20 && of[2] == 20, 1, "balance");
    spdl_pipeline_destroy(p);
    p = start(SPDL_STAGES(JOBS, SPDL_SINK(3)));
    is(validate(p), 50, "validation");
    is(validate(p), 50, "validation again");
    spdl_pipeline_destroy(p);
    is(all(start(SPDL_STAGES(JOBS, LONG_WINDOW, FETCH, SPDL_SINK(3))), &sum), 100, "slow items");
    is(all(start(SPDL_STAGES(JOBS, ANY_ORDER, SPDL_SINK(3))), &sum), 100, "slow items");
}

SPDL_FN(tone, void, Block) {
    if ((*out = (Block *)calloc(1, sizeof(Block))) == NULL) return SPDL_E_NOMEM;
    (*out)->frame[0] = 1;
    return SPDL_OK;
}

static void names(void) {
    static const char *const good[] = { "a", "a/b.jpg", "..a", "a..", "a/..b", ".a/.", "\xc3\xa9" };
    static const char *const bad[] = { "", "/a", "..", "../a", "a/..", "a/../b", "a\\b", "C:a",
                                       "a\nb", "a-name-that-is-too-long-for-its-place" };
    char path[24];
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++)
        is(member_path(path, sizeof path, "to", good[i]) && strcmp(path + 3, good[i]) == 0, 1,
           "a member of a tar");
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        is(member_path(path, sizeof path, "to", bad[i]), 0, "a name that leaves the folder");
}

static void others(void) {
    names();
    spdl_ring *home = ring_new(8);
    Audio audio = { start(SPDL_STAGES(SPDL_SOURCE(tone, .free_item = free), SPDL_SINK(4))),
                    ring_new(64), 0 };
    spdl_pipeline *p = start(SPDL_STAGES(JOBS, SPDL_SINK(3)));
    Object *object;
    Block *block;
    char text[2000];
    float to[FRAMES];
    int heard = 0, count = 0;
    is(until_interrupted(start(SPDL_STAGES(JOBS, SPDL_SINK(3)))), 50, "Ctrl-C");
    is(validate(p), 50, "metrics");
    is(metrics(p, text, sizeof text) < (int)sizeof text &&
           strstr(text, "spdl_tasks_total{stage=\"make\"} ") != NULL, 1, "metrics");
    spdl_pipeline_destroy(p);
    while (heard < 10 && audio.late < 1000000) {
        audio_callback(&audio, to);
        heard += to[0] > 0;
    }
    is(heard, 10, "audio");
    while (spdl_ring_try_pop(audio.used, &block) == SPDL_OK) free(block);
    spdl_pipeline_destroy(audio.blocks);
    spdl_ring_destroy(audio.used, NULL, NULL);
    p = start(SPDL_STAGES(OBJECTS(home), SPDL_SINK(3)));
    for (; SPDL_NEXT(p, &object, SPDL_FOREVER) == SPDL_OK; object_back(object)) count++;
    is(count, 1000, "objects");
    spdl_pipeline_destroy(p);
    while (spdl_ring_try_pop(home, &object) == SPDL_OK) free(object);
    spdl_ring_destroy(home, NULL, NULL);
}

int main(void) {
    sources();
    requests();
    groups();
    epochs();
    others();
    return failures != 0;
}
