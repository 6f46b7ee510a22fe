/* Runs what examples/HOWTO.md answers: check_howto.sh writes its blocks into howto_blocks.h, and
   those with a library into files of their own. */
#define _GNU_SOURCE /* sched_getcpu */
#include <sched.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "howto_blocks.h"
#ifdef HOWTO_zlib
#include "howto_zlib.h"
#endif
#ifdef HOWTO_zstd
#include "howto_zstd.h"
#endif

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

static void nap(void) {
    const struct timespec rest = { 0, 200000 };
    nanosleep(&rest, NULL);
}

/* The pipeline has failed, and its error has this text. */
static void failed(spdl_pipeline *p, const char *text, const char *what) {
    is(spdl_pipeline_failed(p) && strstr(spdl_pipeline_error(p)->text, text) != NULL, 1, what);
}

/* What ends a pipeline whose other results are jobs. */
static spdl_result ends(spdl_pipeline *p) {
    Job *job;
    spdl_result result;
    while ((result = SPDL_NEXT(p, &job, SPDL_FOREVER)) == SPDL_OK) free(job);
    return result;
}

/* An urgent item that is pushed last, or while the normal ring is closed already, still arrives. */
static void last_urgent(void) {
    for (int round = 0; round < 21; round++) {
        Rings rings = { ring_new(64), ring_new(64) };
        Job *job = NULL;
        if (round == 20) spdl_ring_close(rings.normal);
        spdl_pipeline *p = with_priority(&rings);
        is(SPDL_NEXT(p, &job, SPDL_SECONDS(0.003)), SPDL_TIMEOUT, "priority: no item, no end");
        fill(rings.urgent, round, round + 1);
        spdl_ring_close(rings.normal);
        is(SPDL_NEXT(p, &job, SPDL_FOREVER), SPDL_OK, "priority: the last urgent item");
        is(job == NULL ? -1 : job->id, round, "priority: the last urgent item");
        free(job);
        is(ends(p), SPDL_END, "priority: the end");
        spdl_pipeline_destroy(p);
        while (spdl_ring_try_pop(rings.urgent, &job) == SPDL_OK) free(job);
        spdl_ring_destroy(rings.urgent, NULL, NULL);
        spdl_ring_destroy(rings.normal, NULL, NULL);
    }
}

static void sources(void) {
    long sum;
    Job *job;
    spdl_ring *ring = ring_new(64);
    Rings rings = { ring_new(64), ring_new(64) };
    spdl_pipeline *p;
    is(all(start(SPDL_STAGES(JOBS, SPDL_SINK(3))), &sum), 100, "no source");
    fill(ring, 0, 50);
    is(busy(ring), 1, "several producers: a long queue");
    is(all(from_ring(ring), &sum), 50, "several producers");
    is((int)sum, 1225, "several producers");
    is(busy(ring), 0, "several producers: no queue");
    fill(rings.normal, 0, 10);
    fill(rings.urgent, 10, 20);
    p = with_priority(&rings);
    is(SPDL_NEXT(p, &job, SPDL_FOREVER), SPDL_OK, "priority");
    is(job->id, 10, "priority: the first");
    free(job);
    is(all(p, &sum), 19, "priority");
    last_urgent();
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
    Rate rate = { 1000000, 0 }, slow = { 1100000000, 0 };
    uint64_t since = spdl_time_ns();
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
    is(all(start(SPDL_STAGES(JOBS, SPDL_PIPE(in_turn, .ctx = &rate), SPDL_SINK(3))), &sum), 100,
       "rate");
    is(spdl_time_ns() - since > 90000000, 1, "rate: 100 items take 99 ms");
    p = start(SPDL_STAGES(JOBS, SPDL_PIPE(in_turn, .ctx = &slow), SPDL_SINK(3)));
    since = spdl_time_ns();
    for (int i = 0; i < 2; i++) {
        is(SPDL_NEXT(p, &job, SPDL_FOREVER), SPDL_OK, "rate");
        free(job);
    }
    is(spdl_time_ns() - since > 1000000000, 1, "rate: less than one item a second");
    spdl_pipeline_destroy(p);
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

SPDL_FN(of_length, Job, Job) { /* 1 to 50, or the length in ctx for one of them */
    const int length = *(const int *)spdl_ctx(task);
    if (in->id == 70 && length >= 0) in->length = length;
    *out = in;
    return SPDL_OK;
}
SPDL_FN(of_one, Job, Job) { return in->length = 1, *out = in, SPDL_OK; }

static void packs(void) {
    static Pack *bucket[BUCKETS + 4];
    static const int lengths[] = { -1, 1, LONGEST, 0, LONGEST + 1, 500 };
    Pack *to;
    for (int k = 0; k < 6; k++) {
        int length = lengths[k], jobs = 0, packs = 0, short_ones = 0;
        spdl_pipeline *p = start(SPDL_STAGES(JOBS, SPDL_PIPE(of_length, .ctx = &length),
                                             PACKS(bucket), SPDL_SINK(3)));
        for (; SPDL_NEXT(p, &to, SPDL_FOREVER) == SPDL_OK; pack_free(to), packs++) {
            int longest = 0;
            for (int i = 0; i < to->count; i++, jobs++) {
                is(to->job[i]->length * 2 >= to->longest, 1, "buckets: lengths");
                if (to->job[i]->length > longest) longest = to->job[i]->length;
            }
            is(to->longest, longest, "buckets: the longest");
            is(to->count * longest <= BUDGET, 1, "buckets: the budget, with padding");
            short_ones += to->count * 2 * longest < BUDGET;
        }
        is(jobs < 100, k > 2, "buckets: all items");
        is(spdl_pipeline_failed(p), k > 2, "buckets: a length without a bucket");
        if (k > 2) failed(p, " tokens", "buckets: a length without a bucket");
        is(short_ones <= BUCKETS, 1, "buckets: only the last ones are short");
        spdl_pipeline_destroy(p);
        for (int b = 0; b < BUCKETS + 4; b++) is(bucket[b] == NULL, 1, "buckets: none is left");
    }
    spdl_pipeline *p = start(SPDL_STAGES(SPDL_COUNT(2 * BUDGET + 1),
                                         SPDL_PIPE(make, .free_item = free), SPDL_PIPE(of_one),
                                         PACKS(bucket), SPDL_SINK(3)));
    for (int i = 0; i < 3; i++) {
        is(SPDL_NEXT(p, &to, SPDL_FOREVER), SPDL_OK, "buckets: short items");
        is(to->count, i < 2 ? BUDGET : 1, "buckets: short items");
        pack_free(to);
    }
    spdl_pipeline_destroy(p);
    p = start(SPDL_STAGES(JOBS, PACKS(bucket), SPDL_SINK(3))); /* destroy frees what is inside */
    if (SPDL_NEXT(p, &to, SPDL_FOREVER) == SPDL_OK) pack_free(to);
    spdl_pipeline_destroy(p);
}

SPDL_FN(fails_at_40, Job, Job) {
    if (in->id == 40) return spdl_fail(task, "a 40");
    *out = in;
    return SPDL_OK;
}

static void groups(void) {
    static Reservoir reservoir;
    Job *job;
    Piece *piece;
    int moved = 0, count = 0, steps;
    uint64_t seen[2] = { 0, 0 };
    packs();
    spdl_pipeline *p = start(SPDL_STAGES(JOBS, SPDL_BATCH(10), SPDL_SINK(3)));
    is(grow(p, &steps), SPDL_END, "growing batches");
    is(steps, 6, "growing batches: 1, 1, 2, 2, 3 and one left");
    spdl_pipeline_destroy(p);
    p = start(SPDL_STAGES(JOBS, SPDL_PIPE(fails_at_40), SPDL_BATCH(10), SPDL_SINK(3)));
    is(grow(p, &steps), SPDL_E_STAGE, "growing batches: a failure is no end");
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
    spdl_pipeline *p = start(SPDL_STAGES(BALANCED, SPDL_SINK(3)));
    Job *job;
    long sum;
    int of[CLASSES] = { 0, 0, 0 };
    for (int epoch = 0; epoch < 2; epoch++)
        for (; SPDL_NEXT(p, &job, SPDL_FOREVER) == SPDL_OK; free(job))
            of[job->id < 4 ? 0 : job->id < 34 ? 1 : 2]++;
    is(of[0] == 20 && of[1] == 20 && of[2] == 20, 1, "balance");
    spdl_pipeline_destroy(p);
    first[1] = 34;
    first[2] = 34; /* class 1 has no items */
    p = start(SPDL_STAGES(BALANCED, SPDL_SINK(3)));
    is(ends(p), SPDL_E_STAGE, "balance: an empty class");
    failed(p, "class 1 has no items", "balance: an empty class");
    spdl_pipeline_destroy(p);
    p = start(SPDL_STAGES(JOBS, SPDL_SINK(3)));
    is(validate(p), 50, "validation");
    is(validate(p), 50, "validation again");
    spdl_pipeline_destroy(p);
    p = start(SPDL_STAGES(JOBS, SPDL_PIPE(fails_at_40), SPDL_SINK(3)));
    is(validate(p), -1, "validation: a failure is no result");
    spdl_pipeline_destroy(p);
    is(all(start(SPDL_STAGES(JOBS, LONG_WINDOW, FETCH, SPDL_SINK(3))), &sum), 100, "slow items");
    is(all(start(SPDL_STAGES(JOBS, ANY_ORDER, SPDL_SINK(3))), &sum), 100, "slow items");
}

/* Every block is heard once and in order; all of them are back at the end. */
static void audio_blocks(int wanted) {
    static Audio audio;
    float to[FRAMES];
    int heard = 0;
    memset(&audio, 0, sizeof audio);
    is(audio_open(&audio), SPDL_OK, "audio");
    while (heard < wanted && (audio.result == SPDL_OK || audio.result == SPDL_TIMEOUT)) {
        audio_callback(&audio, to);
        if (heard % 100 == 50) nap(); /* the sink and the ring are full, or empty */
        if (audio.result != SPDL_OK) is(to[0] == 0, 1, "audio: silence");
        if (audio.result == SPDL_OK) is((int)to[FRAMES - 1], ++heard, "audio: each block once");
    }
    is(heard, wanted < 1000 ? wanted : 1000, "audio");
    if (wanted > 1000) is(audio.result, SPDL_END, "audio: the end");
    const int late = audio.late;
    for (int i = 0; wanted > 1000 && i < 10; i++) audio_callback(&audio, to);
    if (wanted > 1000) is(audio.late, late, "audio: after the end nothing is late");
    spdl_pipeline_destroy(audio.blocks);
    is(audio.lost, 0, "audio: no block is lost");
    is((int)spdl_ring_count(audio.unused), BLOCKS, "audio: all blocks are back");
    spdl_ring_destroy(audio.unused, NULL, NULL);
}

/* A text that does not fit is refused, and nothing behind the buffer is written. */
static void metrics_of(spdl_pipeline *p) {
    char text[2000];
    const int full = metrics(p, text, sizeof text);
    is(full > 0 && strstr(text, "spdl_tasks_total{stage=\"make\"} ") != NULL, 1, "metrics");
    for (int bytes = 0; bytes < full + 5; bytes++) {
        int behind = 0;
        memset(text, 1, sizeof text);
        is(metrics(p, text, (size_t)bytes), bytes > full ? full : -1, "metrics: a small buffer");
        for (size_t i = (size_t)bytes; i < sizeof text; i++) behind += text[i] != 1;
        is(behind, 0, "metrics: nothing behind the buffer");
    }
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
    spdl_pipeline *p = start(SPDL_STAGES(JOBS, SPDL_SINK(3)));
    Object *object;
    int count = 0;
    for (int i = 0; i < 2; i++) { /* the second time, too */
        is(until_interrupted(start(SPDL_STAGES(JOBS, SPDL_SINK(3))), &count), SPDL_OK, "Ctrl-C");
        is(count, 50, "Ctrl-C");
        is(signal(SIGINT, SIG_DFL) == SIG_DFL, 1, "Ctrl-C: the next one ends the program");
    }
    is(until_interrupted(start(SPDL_STAGES(JOBS, SPDL_PIPE(fails_at_40), SPDL_SINK(3))), &count),
       SPDL_E_STAGE, "Ctrl-C: a failure");
    is(validate(p), 50, "metrics");
    metrics_of(p);
    spdl_pipeline_destroy(p);
    for (int i = 0; i < 20; i++) audio_blocks(i < 19 ? 7 * i : 2000);
    count = 0;
    p = start(SPDL_STAGES(OBJECTS(home), SPDL_SINK(3)));
    Object *held[20] = { NULL }; /* more than the ring holds: some are freed */
    for (; SPDL_NEXT(p, &object, SPDL_FOREVER) == SPDL_OK; held[count++ % 20] = object) {
        if (object->grown == NULL && (object->grown = (float *)malloc(4000)) == NULL) exit(1);
        if (held[count % 20] != NULL) object_back(held[count % 20]);
    }
    for (int i = 0; i < 20; i++) object_back(held[i]);
    is(count, 1000, "objects");
    spdl_pipeline_destroy(p);
    is((int)spdl_ring_count(home), 8, "objects: the ring is full");
    spdl_ring_destroy(home, object_free, NULL);
}

/* A path in the folder of this run. */
static const char *in_folder(const char *name) {
    static char path[4][512];
    static int at;
    const char *folder = getenv("HOWTO_FOLDER");
    at = (at + 1) % 4;
    snprintf(path[at], sizeof path[at], "%s/%s", folder == NULL ? "." : folder, name);
    return path[at];
}

static void write_file(const char *name, const void *bytes, size_t count) {
    FILE *file = fopen(in_folder(name), "wb");
    if (file == NULL || fwrite(bytes, 1, count, file) != count || fclose(file) != 0) exit(1);
}

static spdl_files *files_of(const char *name) {
    spdl_files *files;
    if (spdl_files_open(&files, in_folder(name), NULL) != SPDL_OK) exit(1);
    return files;
}

typedef struct Pusher { spdl_pipeline *p; spdl_ring *ring; } Pusher;
static void *pusher(void *arg) {
    push_in_time(((Pusher *)arg)->p, ((Pusher *)arg)->ring);
    return NULL;
}

/* How many items the next batch has; they are those from `from` on. */
static int in_batch(spdl_pipeline *p, int from) {
    spdl_batch *batch;
    int count = 0;
    if (SPDL_NEXT(p, &batch, SPDL_FOREVER) != SPDL_OK) return -1;
    for (size_t i = 0; i < batch->count; i++) {
        if (batch->items[i] == NULL) continue;
        is(((Job *)batch->items[i])->id, from + count++, "in time: the order");
    }
    spdl_batch_free(batch);
    return count;
}

static void in_time(void) {
    Pusher by = { start(SPDL_STAGES(REQUESTS, SPDL_SINK(3))), ring_new(64) };
    pthread_t thread;
    for (int i = 0; i < 11; i++) {
        Job *job = job_new(i);
        is(spdl_ring_try_push(by.ring, &job), SPDL_OK, "in time");
    }
    pthread_create(&thread, NULL, pusher, &by);
    is(in_batch(by.p, 0), 8, "in time: a full batch");
    is(in_batch(by.p, 8), 3, "in time: a late batch, though nothing follows");
    fill(by.ring, 11, 12);
    is(in_batch(by.p, 11), 1, "in time: the last one");
    is(in_batch(by.p, 12), -1, "in time: the end");
    pthread_join(thread, NULL);
    spdl_pipeline_destroy(by.p);
    spdl_ring_destroy(by.ring, NULL, NULL);
    Pusher stopped = { start(SPDL_STAGES(REQUESTS, SPDL_SINK(3))), ring_new(2) };
    Job *job = job_new(0);
    is(spdl_pipeline_stop(stopped.p, SPDL_FOREVER), SPDL_OK, "in time: a stop");
    is(spdl_ring_try_push(stopped.ring, &job), SPDL_OK, "in time: a stop");
    push_in_time(stopped.p, stopped.ring);
    job = job_new(1);
    is(spdl_ring_try_push(stopped.ring, &job), SPDL_CLOSED, "in time: no producer waits for ever");
    free(job);
    spdl_pipeline_destroy(stopped.p);
    spdl_ring_destroy(stopped.ring, NULL, NULL);
}

static void live(void) {
    static spdl_stats stats;
    Job *job = NULL;
    spdl_pipeline *p = start(SPDL_STAGES(LIVE, SPDL_PIPE(decode_video), SPDL_SINK(8)));
    is(newest(p, &job, 0), SPDL_TIMEOUT, "newest: none");
    for (int i = 0; i < 40; i++) {
        is(spdl_pipeline_push(p, job_new(i), SPDL_FOREVER), SPDL_OK, "newest");
        do {
            nap();
            spdl_pipeline_stats(p, &stats);
        } while (stats.edge[1].depth <= i % 4);
        if (i % 4 < 3) continue; /* a step lasts four frames */
        is(newest(p, &job, SPDL_FOREVER), SPDL_OK, "newest");
        is(job->id, i, "newest: the frame pushed last");
        free(job);
    }
    is(spdl_pipeline_push(p, job_new(40), SPDL_FOREVER), SPDL_OK, "newest");
    is(spdl_pipeline_push_end(p), SPDL_OK, "newest: the end");
    is(newest(p, &job, SPDL_FOREVER), SPDL_OK, "newest: the last one before the end");
    is(job->id, 40, "newest: the last one before the end");
    free(job);
    is(newest(p, &job, SPDL_FOREVER), SPDL_END, "newest: the end");
    spdl_pipeline_destroy(p);
    p = start(SPDL_STAGES(LIVE, SPDL_PIPE(decode_video), SPDL_SINK(8)));
    for (int i = 0; i < 30; i++) (void)spdl_pipeline_push(p, job_new(i), 0);
    spdl_pipeline_destroy(p);
}

SPDL_FN(held, Sized, Sized) {
    size_t *seen = (size_t *)spdl_ctx(task);
    const size_t now = __atomic_load_n(&bytes_inside, __ATOMIC_RELAXED);
    if (now > seen[in->bytes > BOUND]) seen[in->bytes > BOUND] = now;
    *out = in;
    return SPDL_OK;
}
static void bounded(void) {
    size_t sizes[41], seen[2] = { 0, 0 };
    for (size_t i = 0; i < 40; i++) sizes[i] = i == 20 ? 50000 : 1 + i * 997 % 4000;
    sizes[40] = 0;
    for (int round = 0; round < 2; round++) {
        spdl_pipeline *p = start(SPDL_STAGES(BOUNDED(sizes), SPDL_PIPE(held, .ctx = seen),
                                             SPDL_SINK(50)));
        Sized *item;
        int count = 0;
        for (; count < (round ? 40 : 5); count++) {
            is(SPDL_NEXT(p, &item, SPDL_FOREVER), SPDL_OK, "bytes");
            is(item->bytes == sizes[count], 1, "bytes: the order");
            nap();
            sized_free(item);
        }
        if (round) is(SPDL_NEXT(p, &item, SPDL_FOREVER), SPDL_END, "bytes: the end");
        spdl_pipeline_destroy(p);
        is((int)bytes_inside, 0, "bytes: none are left");
    }
    is(seen[0] <= BOUND && seen[0] > 4000, 1, "bytes: several items, within the bound");
    is(seen[1] == 50000, 1, "bytes: the large one alone");
}

static char taken[100];
static void *taker(void *shared) {
    Job *job;
    spdl_result result;
    while ((result = shared_next((Shared *)shared, &job)) == SPDL_OK) {
        __atomic_add_fetch(&taken[job->id], 1, __ATOMIC_RELAXED);
        free(job);
    }
    return (void *)(intptr_t)result;
}

static void consumers(void) {
    Shared shared = { PTHREAD_MUTEX_INITIALIZER, start(SPDL_STAGES(JOBS, SPDL_SINK(3))) };
    pthread_t thread[4];
    spdl_ring *preview = ring_new(16);
    spdl_pipeline *p;
    Frame *frame, *shown;
    int count = 0, last = -1;
    for (int i = 0; i < 4; i++) pthread_create(&thread[i], NULL, taker, &shared);
    for (int i = 0; i < 4; i++) {
        void *result;
        pthread_join(thread[i], &result);
        is((int)(intptr_t)result, SPDL_END, "several consumers: none is refused");
    }
    for (int i = 0; i < 100; i++) is(taken[i], 1, "several consumers: each item once");
    spdl_pipeline_destroy(shared.p);
    p = start(SPDL_STAGES(CAPTURE, SPDL_PIPE(to_preview, .ctx = preview), SPDL_SINK(3)));
    for (; SPDL_NEXT(p, &frame, SPDL_FOREVER) == SPDL_OK; frame_free(frame)) {
        is(frame->id, count++, "tee: all frames, in order");
        if (count % 20 || spdl_ring_try_pop(preview, &shown) != SPDL_OK) continue;
        is(shown->id > last, 1, "tee: the preview, in order");
        last = shown->id;
        frame_free(shown);
    }
    is(count, 200, "tee: all frames");
    spdl_pipeline_destroy(p);
    spdl_ring_close(preview);
    for (; spdl_ring_pop(preview, &shown, SPDL_FOREVER) == SPDL_OK; frame_free(shown), last = -1)
        is(shown->references, 1, "tee: only the preview has it");
    is(last, -1, "tee: the preview gets the rest, and its end");
    spdl_ring_destroy(preview, NULL, NULL);
}

SPDL_FN(video_first, Job, Job) {
    in->length = in->id >= 60 && in->id % 2;
    *out = in;
    return SPDL_OK;
}
#define FIFTY SPDL_COUNT(50), SPDL_PIPE(make, .concurrency = 2, .free_item = free)

static void streams(void) {
    spdl_pipeline *p = start(SPDL_STAGES(JOBS, SPDL_PIPE(video_first), PLAYED, SPDL_SINK(3)));
    Job *job;
    Pair *both;
    int count = 0;
    for (; SPDL_NEXT(p, &job, SPDL_FOREVER) == SPDL_OK; free(job)) {
        is(job->id, count++, "audio and video: the order of the file");
        is(job->answer, job->length ? 2 : 1, "audio and video: its own decoder");
    }
    is(count, 100, "audio and video");
    spdl_pipeline_destroy(p);
    for (int shorter = 0; shorter < 2; shorter++) {
        spdl_pipeline *two[2] = { start(SPDL_STAGES(JOBS, SPDL_SINK(3))), NULL };
        two[1] = shorter ? start(SPDL_STAGES(FIFTY, SPDL_SINK(3)))
                         : start(SPDL_STAGES(JOBS, SPDL_SINK(3)));
        p = start(SPDL_STAGES(PAIRS(two), SPDL_SINK(3)));
        for (count = 0; SPDL_NEXT(p, &both, SPDL_FOREVER) == SPDL_OK; pair_free(both), count++)
            is(both->left->id == count && both->right->id == count, 1, "pairs: one of each");
        is(count, shorter ? 50 : 100, "pairs");
        is(spdl_pipeline_failed(p), shorter, "pairs: a stream that ends first");
        if (shorter) failed(p, "pair 50: left ok, right end of data", "pairs: which one");
        (void)spdl_pipeline_stop(p, SPDL_FOREVER);
        is(spdl_pipeline_rewind(two[0], 0, SPDL_FOREVER), SPDL_OK, "pairs: again");
        is(spdl_pipeline_rewind(two[1], 0, SPDL_FOREVER), SPDL_OK, "pairs: again");
        is(spdl_pipeline_rewind(p, 0, SPDL_FOREVER), SPDL_OK, "pairs: again");
        for (count = 0; SPDL_NEXT(p, &both, SPDL_FOREVER) == SPDL_OK; pair_free(both), count++)
            is(both->left->id == count && both->right->id == count, 1, "pairs: again");
        is(count, shorter ? 50 : 100, "pairs: again");
        spdl_pipeline_destroy(p);
        spdl_pipeline_destroy(two[0]);
        spdl_pipeline_destroy(two[1]);
    }
}

static void finds(void) {
    static Work work = { .lock = PTHREAD_MUTEX_INITIALIZER };
    static char seen[PAGES];
    int *page, count = 0, where = -1;
    add(&work, 0);
    spdl_pipeline *p = start(SPDL_STAGES(SPDL_SOURCE(found, .ctx = &work, .threads = 1),
                             SPDL_PIPE(visit, .ctx = &work, .concurrency = 2), SPDL_SINK(3)));
    for (; SPDL_NEXT(p, &page, SPDL_FOREVER) == SPDL_OK; count++) is(seen[*page]++, 0, "finds");
    is(count, PAGES, "finds: all pages, each once");
    spdl_pipeline_destroy(p);
    Job *job;
    p = start(SPDL_STAGES(JOBS, SPDL_PIPE(search, .ctx = &where), SPDL_SINK(3)));
    is(SPDL_NEXT(p, &job, SPDL_FOREVER), SPDL_CLOSED, "found enough");
    is(where, 30, "found enough: what was found");
    spdl_pipeline_destroy(p);
}

static void kinds(void) {
    spdl_pipeline *p = start(SPDL_STAGES(JOBS, ONE_KIND, SPDL_SINK(3)));
    spdl_batch *batch;
    Job *job;
    int of[2] = { 0, 0 }, count = 0;
    for (; SPDL_NEXT(p, &batch, SPDL_FOREVER) == SPDL_OK; spdl_batch_free(batch)) {
        const int kind = ((Job *)batch->items[0])->length > 25;
        for (size_t i = 0; i < batch->count; i++, of[kind]++)
            is(((Job *)batch->items[i])->length > 25, kind, "one kind");
    }
    is(of[0], 50, "one kind: the short ones");
    is(of[1], 48, "one kind: the long ones, without the last batch");
    spdl_pipeline_destroy(p);

    Kinds two;
    spdl_sampler *mixed;
    const spdl_sampler_desc common = { .order = SPDL_SAMPLE_SHUFFLED, .count = COMMON, .seed = 1 };
    const spdl_sampler_desc rare = { .order = SPDL_SAMPLE_SHUFFLED, .count = RARE, .seed = 2 };
    if (spdl_sampler_create(&two.common, &common) != SPDL_OK ||
        spdl_sampler_create(&two.rare, &rare) != SPDL_OK ||
        kinds_mixed(&mixed, &two) != SPDL_OK) exit(1);
    p = start(SPDL_STAGES(SPDL_INDEX(mixed, .continuous = true), SPDL_BATCH(8), SPDL_SINK(3)));
    for (int epoch = 0; epoch < 3; epoch++) {
        char seen[COMMON + RARE] = { 0 };
        for (count = 0; SPDL_NEXT(p, &batch, SPDL_FOREVER) == SPDL_OK; spdl_batch_free(batch)) {
            int rares = 0;
            for (size_t i = 0; i < batch->count; i++) {
                const uint64_t index = ((spdl_index *)batch->items[i])->index;
                rares += index >= COMMON;
                seen[index]++;
            }
            is(rares, 2, "mixed kinds: two rare ones in each batch");
            count++;
        }
        is(count, 10, "mixed kinds");
        for (int i = 0; i < COMMON; i++) is(seen[i], 1, "mixed kinds: each common one once");
        for (int i = COMMON; i < COMMON + RARE; i++)
            is(seen[i] >= 2 && seen[i] <= 4, 1, "mixed kinds: rare ones in turn");
    }
    spdl_pipeline_destroy(p);
    spdl_sampler_destroy(mixed);
    spdl_sampler_destroy(two.common);
    spdl_sampler_destroy(two.rare);

    p = start(SPDL_STAGES(JOBS, INFER, SPDL_SINK(3)));
    for (count = 0; SPDL_NEXT(p, &job, SPDL_FOREVER) == SPDL_OK; free(job), count++)
        is(job->id == count && job->answer == 2 * count, 1, "unbatch: answers in order");
    is(count, 100, "unbatch");
    spdl_pipeline_destroy(p);
}

/* Two epochs of random numbers. */
static void draw(int drawn[2][100], int workers, uint64_t seed) {
    spdl_pipeline *p;
    Job *job;
    const spdl_pipeline_desc desc = { .workers = workers, .seed = seed };
    if (spdl_pipeline_create(&p, &desc, SPDL_STAGES(SPDL_COUNT(100, .continuous = true),
            SPDL_PIPE(make, .concurrency = 2, .free_item = free),
            SPDL_PIPE(augment, .concurrency = 4), SPDL_SINK(3))) != SPDL_OK) exit(1);
    for (int epoch = 0; epoch < 2; epoch++)
        for (; SPDL_NEXT(p, &job, SPDL_FOREVER) == SPDL_OK; free(job))
            drawn[epoch][job->id] = job->length < 0 ? -job->answer : job->answer;
    spdl_pipeline_destroy(p);
}

static void randoms(void) {
    int one[2][100], four[2][100], other[2][100], flips = 0, same = 0;
    draw(one, 1, 7);
    draw(four, 4, 7);
    draw(other, 4, 8);
    is(memcmp(one, four, sizeof one), 0, "random numbers: the same with 4 workers");
    for (int i = 0; i < 100; i++) {
        flips += one[0][i] < 0;
        same += (one[0][i] == one[1][i]) + (one[0][i] == other[0][i]);
        for (int k = 0; k < i; k++) same += one[0][i] == one[0][k];
    }
    is(flips > 25 && flips < 75, 1, "random numbers: about half are flipped");
    is(same < 5, 1, "random numbers: other items, epochs and seeds have others");
}

/* What a mixture of 300, 40 and 20 items draws in two epochs. */
static uint64_t mixture(const double *weights, int which, int seen[2][360]) {
    static const uint64_t counts[3] = { 300, 40, 20 }, before[3] = { 0, 300, 340 };
    spdl_sampler *sources[3], *mixed;
    spdl_index item;
    for (int i = 0; i < 3; i++) {
        const spdl_sampler_desc one = { .order = SPDL_SAMPLE_SHUFFLED, .count = counts[i] };
        if (spdl_sampler_create(&sources[i], &one) != SPDL_OK) exit(1);
    }
    spdl_sampler_desc desc = { .order = SPDL_SAMPLE_MIXTURE, .sources = 3, .weights = weights,
                               .samplers = sources };
    desc.draws = which == 0 ? 360 : draws_until(&desc, which == 2);
    memset(seen, 0, 2 * sizeof *seen);
    is(spdl_sampler_create(&mixed, &desc), SPDL_OK, "mixture: its draws");
    for (uint64_t epoch = 0; mixed != NULL && epoch < 2; epoch++)
        for (uint64_t i = 0; spdl_sampler_item(mixed, epoch, i, &item) == SPDL_OK; i++)
            seen[epoch][before[item.source] + item.index]++;
    spdl_sampler_destroy(mixed);
    for (int i = 0; i < 3; i++) spdl_sampler_destroy(sources[i]);
    return desc.draws;
}

static void mixtures(void) {
    static const double counts[] = { 300, 40, 20 }, equal[] = { 1, 1, 1 }, odd[] = { 7, 2, 0.3 };
    int seen[2][360];
    is((int)mixture(counts, 0, seen), 360, "mixture");
    for (int i = 0; i < 720; i++) is(seen[i / 360][i % 360], 1, "mixture: each item once an epoch");
    is((int)mixture(equal, 1, seen), 54, "mixture: until the first source ends");
    for (int i = 0; i < 360; i++) is(seen[0][i] < 2, 1, "mixture: nothing twice");
    is((int)mixture(equal, 2, seen), 906, "mixture: until each source was seen");
    for (int i = 0; i < 360; i++) is(seen[0][i] > 0, 1, "mixture: each item");
    (void)mixture(odd, 1, seen);
    for (int i = 0; i < 360; i++) is(seen[0][i] < 2, 1, "odd mixture: nothing twice");
    (void)mixture(odd, 2, seen);
    for (int i = 0; i < 360; i++) is(seen[0][i] > 0, 1, "odd mixture: each item");
    for (int none = 0; none < 3; none++) { /* a source that is never drawn */
        static const int from[] = { 0, 300, 340, 360 };
        double weights[3] = { 1, 1, 1 };
        weights[none] = 0;
        for (int all_of = 0; all_of < 2; all_of++) {
            const uint64_t draws = mixture(weights, 1 + all_of, seen);
            const uint64_t least = none == 2 ? 40 : 20, most = none == 0 ? 40 : 300;
            is(draws <= 2 * most + 4 && draws + 8 >= 2 * (all_of ? most : least), 1,
               "weight 0: the draws");
            for (int i = 0; i < 360; i++) {
                const bool never = i >= from[none] && i < from[none + 1];
                is(never ? seen[0][i] == 0 : all_of ? seen[0][i] > 0 : seen[0][i] < 2, 1,
                   all_of ? "weight 0: each item of the others" : "weight 0: nothing twice");
            }
        }
    }
}

static int stepped, step_ids[3 * IMAGES];
static void step(Job *job) { step_ids[stepped++] = job->id; }

static void in_memory(void) {
    const spdl_sampler_desc order = { .order = SPDL_SAMPLE_SHUFFLED, .count = IMAGES, .seed = 3 };
    spdl_sampler *sampler;
    int count = 0, of[IMAGES] = { 0 };
    if (spdl_sampler_create(&sampler, &order) != SPDL_OK) exit(1);
    spdl_pipeline *p = start(SPDL_STAGES(SPDL_INDEX(sampler, .continuous = true), DECODED(&count),
                                         SPDL_SINK(3)));
    is(run_epochs(p, 3, step), SPDL_END, "in memory");
    is(stepped, 3 * IMAGES, "in memory: three epochs");
    for (int i = 0; i < 3 * IMAGES; i++) of[step_ids[i]]++;
    for (int i = 0; i < IMAGES; i++) is(of[i], 3, "in memory: each once an epoch");
    is(memcmp(step_ids, step_ids + IMAGES, IMAGES * sizeof(int)) != 0, 1, "in memory: shuffled");
    is(count, IMAGES, "in memory: decoded once");
    spdl_pipeline_destroy(p);
    stepped = 0;
    p = start(SPDL_STAGES(SPDL_COUNT(IMAGES), DECODED(&count), SPDL_SINK(3)));
    is(run_epochs(p, 3, step), SPDL_END, "in memory: a table without .continuous");
    is(stepped, IMAGES, "in memory: has one epoch");
    spdl_pipeline_destroy(p);
    stepped = 0;
    p = start(SPDL_STAGES(SPDL_COUNT(IMAGES + 1, .continuous = true), DECODED(&count),
                          SPDL_SINK(3)));
    is(run_epochs(p, 3, step), SPDL_E_STAGE, "in memory: more than the table has");
    failed(p, "100 is not in the table", "in memory: more than the table has");
    spdl_pipeline_destroy(p);
    is(count, IMAGES, "in memory: still decoded once");
    spdl_sampler_destroy(sampler);
    for (int i = 0; i < IMAGES; i++) free(decoded[i]);
}

static void lines(void) {
    static const char good[] = "0,5\n1,6\r\n2,7", bad[] = "0,5\nnone\n";
    Job *job;
    int count = 0;
    write_file("good.csv", good, sizeof good - 1);
    write_file("bad.csv", bad, sizeof bad - 1);
    spdl_files *files = files_of("good.csv");
    spdl_pipeline *p = start(SPDL_STAGES(CSV(files), SPDL_SINK(3)));
    for (; SPDL_NEXT(p, &job, SPDL_FOREVER) == SPDL_OK; free(job), count++)
        is(job->id == count && job->length == count + 5, 1, "lines");
    is(count, 3, "lines");
    spdl_pipeline_destroy(p);
    spdl_files_close(files);
    files = files_of("bad.csv");
    p = start(SPDL_STAGES(CSV(files), SPDL_SINK(3)));
    is(SPDL_NEXT(p, &job, SPDL_FOREVER), SPDL_OK, "lines: the good one first");
    free(job);
    is(SPDL_NEXT(p, &job, SPDL_FOREVER), SPDL_E_STAGE, "lines: a bad one");
    failed(p, "bad.csv: byte 4: not two numbers", "lines: where it is");
    spdl_pipeline_destroy(p);
    spdl_files_close(files);
}

/* A file of lines and that file cut off: the numbers of the lines, and an error. */
#if defined(HOWTO_zlib) || defined(HOWTO_zstd)
static void packed_lines(const char *name, const spdl_stage *row, int wanted, bool cut,
                         const char *end) {
    spdl_files *files = files_of(name);
    const spdl_stage rows[] = { SPDL_FILES(files), *row, SPDL_SINK(3) };
    spdl_pipeline *p = start(SPDL_TABLE(rows));
    char *line, text[400];
    int count = 0;
    for (; SPDL_NEXT(p, &line, SPDL_FOREVER) == SPDL_OK; spdl_buffer_free(line), count++) {
        snprintf(text, sizeof text, "line %d %0*d%s", count, 1 + count % 300, 7, end);
        is(strcmp(line, text), 0, name);
    }
    is(cut ? count > 0 && count < wanted : count == wanted, 1, name);
    if (cut) failed(p, name, name);
    is(spdl_pipeline_failed(p), cut, name);
    spdl_pipeline_destroy(p);
    p = start(SPDL_TABLE(rows)); /* a stop in the middle closes the file */
    if (SPDL_NEXT(p, &line, SPDL_FOREVER) == SPDL_OK) spdl_buffer_free(line);
    spdl_pipeline_destroy(p);
    spdl_files_close(files);
}
static void cut_file(const char *name, const char *to) {
    static char bytes[1 << 20];
    FILE *file = fopen(in_folder(name), "rb");
    if (file == NULL) exit(1);
    const size_t count = fread(bytes, 1, sizeof bytes, file);
    fclose(file);
    write_file(to, bytes, count - 20);
}
#endif

#ifdef HOWTO_zlib
static void gzips(void) {
    const spdl_stage row = GZ_LINES;
    for (int part = 0; part < 2; part++) { /* two streams, as of cat a.gz b.gz */
        gzFile file = gzopen(in_folder("text.gz"), part ? "ab" : "wb");
        for (int i = 0; i < 1500; i++)
            gzprintf(file, "line %d %0*d\n", part * 1500 + i, 1 + (part * 1500 + i) % 300, 7);
        gzclose(file);
    }
    cut_file("text.gz", "cut.gz");
    packed_lines("text.gz", &row, 3000, false, "\n");
    packed_lines("cut.gz", &row, 3000, true, "\n");
}
#endif

#ifdef HOWTO_zstd
static void zstds(void) {
    static char text[1 << 20], bytes[2 << 20];
    const spdl_stage row = ZST_LINES;
    size_t at = 0, length = 0;
    for (int i = 0; i < 3000; i++) {
        length += (size_t)snprintf(text + length, sizeof text - length, "line %d %0*d\n", i,
                                   1 + i % 300, 7);
        if (i != 1499 && i != 2999) continue; /* two frames */
        const size_t some = ZSTD_compress(bytes + at, sizeof bytes - at, text, length, 1);
        if (ZSTD_isError(some)) exit(1);
        at += some;
        length = 0;
    }
    write_file("text.zst", bytes, at);
    cut_file("text.zst", "cut.zst");
    for (int blocks = 1; blocks < 4; blocks++) { /* the text ends where a block ends */
        memset(text, 'x', (size_t)blocks * BLOCK);
        for (int i = 0; i < blocks * 1024; i++) text[i * 64 + 63] = '\n';
        const size_t some = ZSTD_compress(bytes, sizeof bytes, text, (size_t)blocks * BLOCK, 1);
        write_file("whole.zst", bytes, some);
        spdl_files *files = files_of("whole.zst");
        spdl_pipeline *p = start(SPDL_STAGES(SPDL_FILES(files), ZST_LINES, SPDL_SINK(3)));
        char *line;
        int count = 0;
        for (; SPDL_NEXT(p, &line, SPDL_FOREVER) == SPDL_OK; spdl_buffer_free(line)) count++;
        is(count, blocks * 1024, "zstd: whole blocks");
        is(spdl_pipeline_failed(p), 0, "zstd: whole blocks");
        spdl_pipeline_destroy(p);
        spdl_files_close(files);
    }
    packed_lines("text.zst", &row, 3000, false, "");
    packed_lines("cut.zst", &row, 3000, true, "");
}
#endif

static void put(uint8_t *to, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) to[i] = (uint8_t)(value >> 8 * i);
}

static void tf_record_files(void) {
    static uint8_t file[20000];
    size_t at = 0;
    for (int i = 0; i < 20; i++) {
        const size_t bytes = (size_t)(i * 37 % 400);
        put(file + at, bytes, 8);
        memset(file + at + 12, i, bytes);
        at += 12 + bytes + 4;
    }
    write_file("good.tfrecord", file, at);
    write_file("cut.tfrecord", file, at - 5);
    for (int cut = 0; cut < 2; cut++) {
        spdl_files *files = files_of(cut ? "cut.tfrecord" : "good.tfrecord");
        spdl_pipeline *p = start(SPDL_STAGES(SPDL_FILES(files), TF_RECORDS, SPDL_SINK(3)));
        Blob *blob;
        int count = 0;
        for (; SPDL_NEXT(p, &blob, SPDL_FOREVER) == SPDL_OK; free(blob), count++) {
            is((int)blob->bytes, count * 37 % 400, "TFRecord: its bytes");
            for (size_t i = 0; i < blob->bytes; i++) is(blob->data[i], count, "TFRecord: its data");
        }
        is(count, cut ? 19 : 20, "TFRecord");
        is(spdl_pipeline_failed(p), cut, "TFRecord");
        if (cut) failed(p, "cut.tfrecord: byte 3", "TFRecord: where it is cut");
        spdl_pipeline_destroy(p);
        spdl_files_close(files);
    }
}

static void rows_by_number(void) {
    static uint8_t file[16 + 20 * 784];
    const spdl_sampler_desc order = { .order = SPDL_SAMPLE_SHUFFLED, .count = 20, .seed = 3 };
    spdl_sampler *sampler;
    uint8_t *row;
    Blob *blob;
    int seen[20] = { 0 };
    if (spdl_sampler_create(&sampler, &order) != SPDL_OK) exit(1);
    for (size_t i = 0; i < 20; i++) memset(file + 16 + i * 784, (int)i, 784);
    write_file("images.idx", file, sizeof file);
    Rows rows = { fileno(fopen(in_folder("images.idx"), "rb")), 784, 16 };
    spdl_pipeline *p = start(SPDL_STAGES(SPDL_INDEX(sampler), SPDL_PIPE(fixed_row, .ctx = &rows,
                             .concurrency = 2, .item_bytes = rows.bytes,
                             .free_item = spdl_buffer_free), SPDL_SINK(3)));
    for (; SPDL_NEXT(p, &row, SPDL_FOREVER) == SPDL_OK; spdl_buffer_free(row)) {
        is(row[0] == row[783] && row[0] < 20, 1, "rows: whole ones");
        seen[row[0]]++;
    }
    for (int i = 0; i < 20; i++) is(seen[i], 1, "rows: each once");
    spdl_pipeline_destroy(p);
    rows.bytes = 1000; /* too many */
    p = start(SPDL_STAGES(SPDL_INDEX(sampler), SPDL_PIPE(fixed_row, .ctx = &rows,
              .item_bytes = rows.bytes, .free_item = spdl_buffer_free), SPDL_SINK(3)));
    while (SPDL_NEXT(p, &row, SPDL_FOREVER) == SPDL_OK) spdl_buffer_free(row);
    failed(p, "is not in the file", "rows: none behind the file");
    spdl_pipeline_destroy(p);

    uint64_t at = 4 + 21 * 4 + 10; /* a shard of MosaicML: offsets, ten bytes of JSON, samples */
    put(file + 4 + 21 * 4, at + 300, 4); /* could be an offset, but is JSON */
    put(file, 20, 4);
    put(file + 4, at, 4);
    for (size_t i = 0; i < 20; i++) {
        memset(file + at, (int)i, i + 1);
        put(file + 8 + i * 4, at += i + 1, 4);
    }
    write_file("shard.mds", file, at);
    int shard = fileno(fopen(in_folder("shard.mds"), "rb"));
    p = start(SPDL_STAGES(SPDL_INDEX(sampler), SPDL_PIPE(mds_sample, .ctx = &shard,
              .concurrency = 2, .free_item = free), SPDL_SINK(3)));
    for (; SPDL_NEXT(p, &blob, SPDL_FOREVER) == SPDL_OK; free(blob)) {
        is((int)blob->bytes, blob->data[0] + 1, "MDS: its bytes");
        is(blob->data[blob->bytes - 1], blob->data[0], "MDS: its data");
        seen[blob->data[0]]++;
    }
    for (int i = 0; i < 20; i++) is(seen[i], 2, "MDS: each once");
    spdl_pipeline_destroy(p);
    p = start(SPDL_STAGES(SPDL_COUNT(21), SPDL_PIPE(mds_sample, .ctx = &shard, .free_item = free),
                          SPDL_SINK(3)));
    while (SPDL_NEXT(p, &blob, SPDL_FOREVER) == SPDL_OK) free(blob);
    failed(p, "no sample 20", "MDS: none behind the last");
    spdl_pipeline_destroy(p);
    spdl_sampler_destroy(sampler);
}

static void arrays_in_a_tar(void) {
    static uint8_t tar[4 * 512];
    static const char head[] = "{'descr': '<i4', 'fortran_order': False, 'shape': (3,), }";
    unsigned sum = 0;
    memcpy(tar, "a.npy", 5);
    memcpy(tar + 100, "0000644", 7);
    memcpy(tar + 124, "00000000214", 11); /* 140 bytes */
    memcpy(tar + 257, "ustar\00000", 8);
    tar[156] = '0';
    memset(tar + 148, ' ', 8);
    for (int i = 0; i < 512; i++) sum += tar[i];
    snprintf((char *)tar + 148, 8, "%06o", sum);
    memcpy(tar + 512, "\x93NUMPY\1\0\x76\0", 10);
    memset(tar + 522, ' ', 118);
    memcpy(tar + 522, head, sizeof head - 1);
    tar[639] = '\n';
    for (int i = 0; i < 3; i++) put(tar + 640 + i * 4, (uint64_t)(i * 1000), 4);
    write_file("a.tar", tar, sizeof tar);
    spdl_files *files = files_of("a.tar");
    spdl_npz_bundle *bundle;
    spdl_pipeline *p = start(SPDL_STAGES(SPDL_FILES(files), ARRAYS, SPDL_SINK(3)));
    int count = 0;
    for (; SPDL_NEXT(p, &bundle, SPDL_FOREVER) == SPDL_OK; spdl_npz_bundle_free(bundle), count++)
        is(bundle->arrays[0].info.count == 3 && ((int32_t *)bundle->arrays[0].data)[2] == 2000, 1,
           "arrays in a tar: the numbers");
    is(count, 1, "arrays in a tar");
    spdl_pipeline_destroy(p);
    tar[512] = 'x'; /* no array */
    write_file("a.tar", tar, sizeof tar);
    p = start(SPDL_STAGES(SPDL_FILES(files), ARRAYS, SPDL_SINK(3)));
    is(SPDL_NEXT(p, &bundle, SPDL_FOREVER), SPDL_E_STAGE, "arrays in a tar: no array");
    failed(p, "a.npy", "arrays in a tar: its name");
    spdl_pipeline_destroy(p);
    spdl_files_close(files);
}

static void blocks(void) {
    spdl_sampler *sampler;
    spdl_index item;
    uint64_t before = 0, seen = 0;
    int starts = 0;
    if (by_blocks(&sampler, 60, 10, (spdl_ranks){ 0, 1 }) != SPDL_OK) exit(1);
    for (uint64_t i = 0; i < 60; i++, before = item.index) {
        is(spdl_sampler_item(sampler, 0, i, &item), SPDL_OK, "blocks");
        is(i % 10 == 0 ? item.index % 10 == 0 : item.index == before + 1, 1, "blocks: in order");
        starts += i % 10 == 0 && item.index == i;
        seen |= (uint64_t)1 << item.index;
    }
    is(seen == ((uint64_t)1 << 60) - 1, 1, "blocks: each row once");
    is(starts < 6, 1, "blocks: shuffled");
    spdl_sampler_destroy(sampler);
    if (by_blocks(&sampler, 100, 10, (spdl_ranks){ 2, 3 }) != SPDL_OK) exit(1);
    is((int)spdl_sampler_count(sampler, 0), 33, "blocks: ranks");
    spdl_sampler_destroy(sampler);
}

static void some_files(void) {
    static const char *const names[] = { "cat/0.txt", "cat/1.txt", "dog/0.txt" };
    spdl_files *files;
    spdl_npz_bundle *bundle;
    int bytes, count = 0;
    char folder[512];
    if (spdl_files_open(&files, "examples/data/digits_t*.npz", NULL) != SPDL_OK) exit(1);
    spdl_pipeline *p = start(SPDL_STAGES(LABELS(files), SPDL_SINK(3)));
    for (; SPDL_NEXT(p, &bundle, SPDL_FOREVER) == SPDL_OK; spdl_npz_bundle_free(bundle), count++)
        is(bundle->count == 1 && strcmp(bundle->arrays[0].name, "labels") == 0, 1, "some arrays");
    is(count, (int)spdl_files_count(files), "some arrays: of each file");
    spdl_pipeline_destroy(p);
    spdl_files_close(files);
    snprintf(folder, sizeof folder, "%s", in_folder("classes"));
    (void)mkdir(folder, 0700);
    (void)mkdir(in_folder("classes/cat"), 0700);
    (void)mkdir(in_folder("classes/dog"), 0700);
    for (int i = 0; i < 3; i++) {
        char name[40];
        snprintf(name, sizeof name, "classes/%s", names[i]);
        write_file(name, "x", 1);
    }
    is(open_classes(&files, folder), SPDL_OK, "classes");
    is((int)spdl_files_count(files), 3, "classes: the files of all folders");
    for (uint64_t i = 0; i < 3; i++) {
        const char *class = class_of(spdl_files_path(files, i), &bytes);
        is(bytes == 3 && memcmp(class, names[i], 3) == 0, 1, "classes: their names");
    }
    is(class_of("0.txt", &bytes) != NULL && bytes == 0, 1, "classes: a path without a folder");
    spdl_files_close(files);
}

static void examined_step(void *ctx, void *item) { *(int *)ctx += ((Job *)item)->id >= 0; }

static void examines(void) {
    char line[100] = "";
    int taken_by_it = 0;
    is(examine(in_folder("doctor.jsonl"), examined_step, &taken_by_it), SPDL_OK, "doctor");
    FILE *file = fopen(in_folder("doctor.jsonl"), "r");
    if (file == NULL || fgets(line, sizeof line, file) == NULL) is(0, 1, "doctor: its report");
    is(strstr(line, "spdl.doctor.1") != NULL && taken_by_it > 100, 1, "doctor: its report");
    if (file != NULL) fclose(file);
}

SPDL_FN(deep, Job, Job) { /* needs more than the stack that a thread has by default */
    volatile char much[16 << 20];
    for (size_t i = 0; i < sizeof much; i += 4096) much[i] = (char)i;
    *out = in;
    return much[4096 * 7] == (char)(4096 * 7) ? SPDL_OK : SPDL_E_INVALID;
}
static pthread_t consumer;
SPDL_FN(whose, Job, Job) { /* is this the thread in next? */
    nap();
    __atomic_add_fetch((int *)spdl_ctx(task), pthread_equal(pthread_self(), consumer) != 0,
                       __ATOMIC_RELAXED);
    *out = in;
    return SPDL_OK;
}

static spdl_pipeline *made_with(spdl_pipeline_desc desc, const spdl_stage *rows, size_t count) {
    spdl_pipeline *p;
    if (spdl_pipeline_create(&p, &desc, rows, count) != SPDL_OK) exit(1);
    return p;
}

static void threads(void) {
    int frames = 0, own = 0, all_own = 0;
    long sum;
    is(all(start(SPDL_STAGES(JOBS, DECODE(&frames), SPDL_SINK(3))), &sum), 100, "state");
    is(frames, 100, "state: each frame by one decoder");
    is(all(made_with(deep_stacks, SPDL_STAGES(JOBS, SPDL_PIPE(deep), SPDL_SINK(3))), &sum), 100,
       "stacks");
    consumer = pthread_self();
    is(all(made_with(all_cores(), SPDL_STAGES(JOBS, SPDL_PIPE(whose, .ctx = &own,
           .concurrency = SPDL_ALL), SPDL_SINK(3))), &sum), 100, "next works");
    is(own > 0 && own < 100, 1, "next works: beside the workers");
    is(all(made_with(one_thread, SPDL_STAGES(JOBS, SPDL_PIPE(whose, .ctx = &all_own),
           SPDL_SINK(3))), &sum), 100, "inline");
    is(all_own, 100, "inline: all calls are on this thread");
}

SPDL_FN(twice, Job, Job) { return in->answer = 2 * in->id, *out = in, SPDL_OK; }
SPDL_FN(thrice, Job, Job) { return in->answer = 3 * in->id, *out = in, SPDL_OK; }

typedef struct Submit { spdl_pool *pool; Job jobs[300]; int done; spdl_result result; } Submit;
static void *submits(void *arg) {
    Submit *s = (Submit *)arg;
    s->result = run_jobs(s->pool, s->jobs, 300);
    for (int i = 0; i < 300; i++) s->done += s->jobs[i].answer != 0;
    return NULL;
}
static bool let_go;
static void job_holds(void *arg, int worker, void *local) {
    (void)worker, (void)local;
    __atomic_add_fetch((int *)arg, 1, __ATOMIC_RELAXED);
    while (!__atomic_load_n(&let_go, __ATOMIC_RELAXED)) nap();
}

/* A stop of the pool refuses the rest of the jobs. When run_jobs returns, those before are done. */
static void refused_jobs(void) {
    static Submit s;
    pthread_t thread;
    int held = 0, others = 0;
    if (open_pool(&s.pool) != SPDL_OK) exit(1);
    for (int i = 0; i < 300; i++) s.jobs[i].id = i + 1;
    for (int i = 0; i < 2; i++)
        is(spdl_pool_submit(s.pool, job_holds, &held, SPDL_FOREVER), SPDL_OK, "refused jobs");
    while (__atomic_load_n(&held, __ATOMIC_RELAXED) < 2) nap();
    pthread_create(&thread, NULL, submits, &s);
    nap();
    while (spdl_pool_submit(s.pool, job_holds, &held, 0) == SPDL_OK) others++; /* till it is full */
    is(spdl_pool_stop(s.pool, 0), SPDL_TIMEOUT, "refused jobs");
    for (int i = 0; i < 100; i++) nap();
    __atomic_store_n(&let_go, true, __ATOMIC_RELAXED);
    pthread_join(thread, NULL);
    is(s.result, SPDL_CLOSED, "refused jobs");
    is(s.done + others, 32, "refused jobs: those before are done");
    spdl_pool_destroy(s.pool);
}

static void pools(void) {
    spdl_pool *pool;
    Job jobs[300] = { { 0 } }, *job;
    if (open_pool(&pool) != SPDL_OK) exit(1);
    spdl_pipeline *p = on_pool(pool, SPDL_STAGES(JOBS, SPDL_PIPE(twice), SPDL_SINK(3)));
    for (int i = 0; i < 300; i++) jobs[i].id = i;
    is(run_jobs(pool, jobs, 300), SPDL_OK, "jobs");
    for (int i = 0; i < 300; i++) is(jobs[i].answer, 2 * i, "jobs: all are done");
    is(no_more_jobs(pool), SPDL_OK, "jobs");
    is(run_jobs(pool, jobs, 1), SPDL_CLOSED, "jobs: none after a stop");
    for (int i = 0; i < 100; i++) {
        const bool odd = (i + 10) / 25 % 2;
        if (i % 25 == 15) /* four times */
            is(odd ? go_on(&p, pool, SPDL_STAGES(JOBS, SPDL_PIPE(thrice), SPDL_SINK(3)))
                   : go_on(&p, pool, SPDL_STAGES(JOBS, SPDL_PIPE(twice), SPDL_SINK(3))),
               SPDL_OK, "other rows");
        is(SPDL_NEXT(p, &job, SPDL_FOREVER), SPDL_OK, "other rows");
        is(job->id, i, "other rows: at the next item");
        is(job->answer, (odd ? 3 : 2) * i, "other rows: by the other rows");
        free(job);
    }
    is(SPDL_NEXT(p, &job, SPDL_FOREVER), SPDL_END, "other rows: the end");
    spdl_pipeline_destroy(p);
    const spdl_stage fewer[] = { JOBS, SPDL_PIPE(check, .max_failures = -1), SPDL_SINK(3) };
    int last = -1;
    p = on_pool(pool, SPDL_TABLE(fewer)); /* some items are dropped */
    for (int i = 0; i < 90; i++) {
        if (i % 20 == 10) is(go_on(&p, pool, SPDL_TABLE(fewer)), SPDL_OK, "other rows: drops");
        is(SPDL_NEXT(p, &job, SPDL_FOREVER), SPDL_OK, "other rows: drops");
        is(job->id, last + (last % 10 == 2 ? 2 : 1), "other rows: drops");
        last = job->id;
        free(job);
    }
    is(go_on(&p, pool, SPDL_STAGES(JOBS, SPDL_BATCH(3), SPDL_SINK(3))), SPDL_E_INVALID,
       "other rows: of another kind");
    spdl_pipeline_destroy(p);
    spdl_pool_destroy(pool);
    refused_jobs();
}

#ifdef __linux__
typedef struct Large { char bytes[1 << 20]; } Large;
SPDL_FN(large, spdl_index, Large) {
    int *elsewhere = (int *)spdl_ctx(task);
    if ((*out = (Large *)spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    memset(*out, (int)in->index, sizeof(Large));
    if (sched_getcpu() != elsewhere[0]) elsewhere[1]++;
    return SPDL_OK;
}

SPDL_FN(scheduled, Job, Job) {
    const bool idle = sched_getscheduler(0) == SCHED_IDLE;
    *(int *)spdl_ctx(task) += idle && getpriority(PRIO_PROCESS, 0) == 19;
    *out = in;
    return SPDL_OK;
}

SPDL_FN(bad_squares, spdl_index, int) {
    if ((*out = (int *)spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    **out = 1;
    return in->index == 50 ? spdl_fail(task, "a 50") : SPDL_OK;
}

static void nodes(void) {
    cpu_set_t may;
    int at[2] = { 0, 0 }, count = 0;
    spdl_batch *batch;
    spdl_loader *loader;
    spdl_error error;
    if (sched_getaffinity(0, sizeof may, &may) != 0) exit(1);
    while (!CPU_ISSET((size_t)at[0], &may)) at[0]++;
    spdl_pipeline *p = made_with(on_node(at, 1), SPDL_STAGES(SPDL_COUNT(20),
                                 SPDL_PIPE(large, .ctx = at), SPDL_BATCH_OF(Large, 4),
                                 SPDL_SINK(2)));
    for (; SPDL_NEXT(p, &batch, SPDL_FOREVER) == SPDL_OK; spdl_batch_free(batch), count++) {
        is(((Large *)batch->data)[3].bytes[9], 4 * count + 3, "nodes: the data");
        is((uintptr_t)batch->data % HUGE_PAGE < 4096, 1, "nodes: at a huge page");
    }
    is(count, 5, "nodes");
    is(at[1], 0, "nodes: no call is elsewhere");
    spdl_pipeline_destroy(p);
    is(open_loader(&loader, 1000, &error), SPDL_E_LIMIT, "loader: over its bound");
    is(strstr(error.text, "arena_bytes") != NULL, 1, "loader: over its bound");
    is(open_loader(&loader, 1 << 20, &error), SPDL_OK, "loader");
    is(sum_of_pass(loader), 328350, "loader: the first pass");
    is(sum_of_pass(loader), 328350, "loader: again");
    spdl_loader_close(loader);
    const spdl_loader_desc failing = { .pipeline = { .workers = 2 }, .fork_with_threads = true };
    is(spdl_loader_open(&loader, &failing, SPDL_STAGES(SPDL_COUNT(100), SPDL_PIPE(bad_squares),
           SPDL_BATCH_OF(int, 10), SPDL_SINK(2))), SPDL_OK, "loader");
    is(sum_of_pass(loader), -1, "loader: a failure is no sum");
    spdl_loader_close(loader);
    spdl_loader_batch some = { 0 };
    int ends[2], sum = 0, idle = 0;
    is(polled_loader(&loader, ends), SPDL_OK, "polled loader");
    while (polled_next(loader, ends[0], &some) == SPDL_OK) {
        for (size_t i = 0; i < some.count; i++) sum += ((int *)some.data)[i];
        is(spdl_loader_done(loader, &some), SPDL_OK, "polled loader");
    }
    is(sum, 328350, "polled loader");
    spdl_loader_close(loader);
    close(ends[0]);
    close(ends[1]);
    long ids;
    is(all(made_with(background, SPDL_STAGES(JOBS, SPDL_PIPE(scheduled, .ctx = &idle),
           SPDL_SINK(3))), &ids), 100, "background");
    is(idle, 100, "background: each call");
}
#endif

SPDL_FN(hangs, Job, Job) {
    while (in->id == 5 && !__atomic_load_n((bool *)spdl_ctx(task), __ATOMIC_RELAXED)) nap();
    *out = in;
    return SPDL_OK;
}

static void watches(void) {
    FILE *file = tmpfile();
    char line[SPDL_TEXT_BYTES];
    long sum;
    int of[4] = { 0, 0, 0, 0 }, id, stage;
    if (file == NULL) exit(1);
    is(all(made_with(with_log(file), SPDL_STAGES(JOBS, CHECK(file), SPDL_SINK(3))), &sum), 90,
       "log");
    rewind(file);
    while (fgets(line, sizeof line, file) != NULL) {
        if (sscanf(line, "job %d:", &id) == 1) is(id, 3 + 10 * of[0]++, "log: who was dropped");
        of[1] += strncmp(line, "info: ", 6) == 0 && strstr(line, "a 3") != NULL;
        of[2] += strncmp(line, "warning: ", 9) == 0 && strstr(line, "10 of 100 items") != NULL;
    }
    fclose(file);
    is(of[0], 10, "log: all who were dropped");
    is(of[1], 10, "log: each failure");
    is(of[2], 1, "log: the sum of them");

    Zones zones = { 0, 0 };
    is(all(made_with(with_profiler(&zones), SPDL_STAGES(JOBS, SPDL_SINK(3))), &sum), 100, "zones");
    is(zones.open >= 200, 1, "zones: each call");
    is(zones.closed, zones.open, "zones: each ends on its thread");

    bool released = false;
    uint64_t item = 0;
    spdl_pipeline *p = start(SPDL_STAGES(JOBS, SPDL_PIPE(hangs, .ctx = &released), SPDL_SINK(3)));
    Job *job;
    for (int i = 0; i < 5; i++) {
        is(SPDL_NEXT(p, &job, SPDL_FOREVER), SPDL_OK, "hangs: the items before");
        free(job);
    }
    do {
        is(SPDL_NEXT(p, &job, SPDL_SECONDS(0.02)), SPDL_TIMEOUT, "hangs");
    } while ((stage = stage_that_hangs(p, 10000000, &item)) < 0);
    is(stage, 2, "hangs: the stage");
    is((int)item, 5, "hangs: the item");
    __atomic_store_n(&released, true, __ATOMIC_RELAXED);
    is(all(p, &sum), 95, "hangs: the rest");
}

int main(void) {
    sources();
    requests();
    groups();
    epochs();
    others();
    in_time();
    live();
    bounded();
    consumers();
    streams();
    finds();
    kinds();
    randoms();
    mixtures();
    in_memory();
    lines();
#ifdef HOWTO_zlib
    gzips();
#endif
#ifdef HOWTO_zstd
    zstds();
#endif
    tf_record_files();
    rows_by_number();
    arrays_in_a_tar();
    blocks();
    some_files();
    threads();
    pools();
    examines();
#ifdef __linux__
    nodes();
#endif
    watches();
    return failures != 0;
}
