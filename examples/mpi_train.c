/* mpi_train.c - a training on several machines: each rank takes its part of one global shuffle, and
   the run goes on from a checkpoint on any number of ranks. The losses are the same for 1, 2 and 4
   ranks, bit for bit: gradients are summed as whole numbers (of 2^-32), in whatever order. With
   `loaders n` the last n ranks only load, for trainers whose own processors are full.

   Needs:  libopenmpi-dev openmpi-bin
   Build:  mpicc -O2 -I. examples/mpi_train.c -o mpi_train -lpthread -lm
   Run:    mpirun -n 4 ./mpi_train [steps N] [loaders N] [slow RANK] [checkpoint FILE] */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include "digits_net.h"
#include <mpi.h>
#include <stdio.h>
#include <time.h>

enum { GLOBAL = 32, RANKS = 32, IMAGES = 2000, SLOPES = sizeof(layers) / sizeof(float) };
#define ONE 4294967296.0
typedef struct { char at[SPDL_STATE_BYTES]; } position;
typedef struct { spdl_sampler *sampler; spdl_pipeline *p; } share;
typedef struct { long step; int world; double loss; model net; position of[RANKS]; } checkpoint;
static uint8_t pixels[IMAGES][PIXELS], labels[IMAGES];
static uint64_t images, hash;
static int rank, world, trainers, slow = -1;
static spdl_error error;

static void fail(const char *what, int number) {
    fprintf(stderr, "rank %d of %d: %s (%d)\n", rank, world, what, number);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static void read_digits(const char *pattern) {
    spdl_files *files;
    spdl_files_desc desc = { .error = &error };
    if (spdl_files_open(&files, pattern, &desc) != SPDL_OK) fail(error.text, 0);
    for (uint64_t i = 0; i < spdl_files_count(files); i++) {
        spdl_npz_bundle *file = NULL;
        spdl_npz_desc npz = { .error = &error };
        if (spdl_npz_load(&file, spdl_files_path(files, i), &npz) != SPDL_OK) fail(error.text, 0);
        const spdl_npz_array *from = spdl_npz_bundle_find(file, "images");
        const spdl_npz_array *label = spdl_npz_bundle_find(file, "labels");
        if (!from || !label || images + label->info.bytes > IMAGES
            || from->info.bytes != label->info.bytes * PIXELS) fail(spdl_files_path(files, i), 0);
        memcpy(pixels[images], from->data, from->info.bytes);
        memcpy(labels + images, label->data, label->info.bytes);
        images += label->info.bytes;
        spdl_npz_bundle_free(file);
    }
    hash = spdl_files_hash(files); /* so a checkpoint of other data is refused */
    spdl_files_close(files);
}

SPDL_FN(decode, spdl_index, sample) {
    samples *one = samples_new(1, pixels[in->index], &labels[in->index]);
    if (!one || !(*out = (sample *)spdl_buffer(task))) return free(one), SPDL_E_NOMEM;
    samples_vary(one, spdl_item_key(task)); /* the same on whatever rank */
    **out = one->at[0];
    free(one);
    if (slow == rank) nanosleep(&(struct timespec){ 0, 2000000 }, NULL);
    return SPDL_OK;
}

/* The pipeline of one trainer, which goes on where the trainers of the checkpoint were. */
static share open_share(int trainer, const checkpoint *c) {
    const char *texts[RANKS];
    share s = { NULL, NULL };
    spdl_sampler_desc order = { .order = SPDL_SAMPLE_SHUFFLED, .count = images, .seed = 1998,
                                .draws = images / GLOBAL * GLOBAL,
                                .ranks = { trainer, trainers }, .error = &error };
    spdl_pipeline_desc desc = { .workers = 2, .seed = 1998, .data_hash = hash, .error = &error };
    for (int i = 0; i < c->world; i++) texts[i] = c->of[i].at;
    if (spdl_sampler_create(&s.sampler, &order) != SPDL_OK
        || spdl_pipeline_create(&s.p, &desc, SPDL_STAGES(
               SPDL_INDEX(s.sampler, .continuous = true),
               SPDL_PIPE(decode, .concurrency = 2),
               SPDL_BATCH(GLOBAL / trainers, .item_bytes = sizeof(sample)),
               SPDL_SINK(3))) != SPDL_OK
        || (c->world && spdl_state_load(s.p, texts, c->world, SPDL_FOREVER, &error) != SPDL_OK))
        fail(error.text, 0);
    return s;
}

static spdl_batch *next(spdl_pipeline *p, position *after, MPI_Comm comm) {
    spdl_batch *batch;
    spdl_result result;
    for (int all = 0; !all;) { /* rows that drop items: all ranks end an epoch where one does */
        all = (result = SPDL_NEXT(p, &batch, SPDL_FOREVER)) == SPDL_OK;
        if (comm != MPI_COMM_NULL) MPI_Allreduce(MPI_IN_PLACE, &all, 1, MPI_INT, MPI_MIN, comm);
        for (; !all && result == SPDL_OK; result = SPDL_NEXT(p, &batch, SPDL_FOREVER))
            spdl_batch_free(batch);
        if (result < 0) fail(spdl_pipeline_error(p)->text, result);
    }
    if (spdl_state_save(p, after->at, sizeof after->at) < 0) fail(after->at, 0);
    return batch;
}

/* The same from a rank that loads. */
static void receive(int from, sample *batch, int bytes, position *after) {
    MPI_Request request[2];
    const uint64_t since = spdl_time_ns();
    MPI_Irecv(after, sizeof *after, MPI_BYTE, from, 0, MPI_COMM_WORLD, &request[0]);
    MPI_Irecv(batch, bytes, MPI_BYTE, from, 1, MPI_COMM_WORLD, &request[1]);
    for (int done = 0; MPI_Testall(2, request, &done, MPI_STATUSES_IGNORE), !done;) {
        if (spdl_time_ns() - since > 20000000000u) fail("nothing for 20 s from rank", from);
        nanosleep(&(struct timespec){ 0, 50000 }, NULL);
    }
}

/* A step on the global batch; returns its mean loss. */
static double learn(model *net, const sample *batch, int count, MPI_Comm comm) {
    static int64_t sum[SLOPES + 1];
    static union { samples set; char room[sizeof(samples) + sizeof(sample)]; } one;
    float *slope = (float *)&net->slope;
    memset(sum, 0, sizeof sum);
    one.set.count = 1;
    for (int n = 0; n < count; n++) {
        one.set.at[0] = batch[n];
        sum[SLOPES] += llrint(model_learn(net, &one.set) * ONE);
        for (size_t i = 0; i < SLOPES; i++) sum[i] += llrint(slope[i] * ONE);
        memset(&net->slope, 0, sizeof net->slope);
    }
    MPI_Allreduce(MPI_IN_PLACE, sum, SLOPES + 1, MPI_INT64_T, MPI_SUM, comm);
    for (size_t i = 0; i < SLOPES; i++) slope[i] = (float)((double)sum[i] / ONE);
    net->seen = GLOBAL;
    model_step(net);
    return (double)sum[SLOPES] / ONE / GLOBAL;
}

/* Rank 0 names the stage, of all ranks, that was waited for the longest. */
static void name_straggler(const spdl_stats *mine) {
    spdl_stats *all = (spdl_stats *)calloc((size_t)world, sizeof *all);
    const spdl_stage_stats *most = &all[0].stage[0];
    int who = 0;
    MPI_Gather(mine, sizeof *mine, MPI_BYTE, all, sizeof *mine, MPI_BYTE, 0, MPI_COMM_WORLD);
    for (int i = 0; rank == 0 && i < world; i++)
        for (int k = 0; k < all[i].stage_count; k++)
            if (all[i].stage[k].exposed_ns > most->exposed_ns) most = &all[who = i].stage[k];
    if (rank == 0 && most->exposed_ns > 0)
        printf("straggler: rank %d, stage '%s', waited for %.0f ms of %.0f\n", who, most->name,
               (double)most->exposed_ns / 1e6, (double)all[who].elapsed_ns / 1e6);
    free(all);
}

int main(int argc, char **argv) {
    static checkpoint c;
    static sample received[GLOBAL];
    static spdl_stats stats;
    static position after;
    share of[RANKS] = { { NULL, NULL } };
    const char *path = NULL;
    char fresh[4096 + 8];
    int steps = 90, loaders = 0;
    MPI_Comm comm;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &world); /* workers do not call MPI */
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    for (int i = 1; i + 1 < argc; i += 2)
        if (!strcmp(argv[i], "checkpoint")) path = argv[i + 1];
        else *(!strcmp(argv[i], "steps") ? &steps : !strcmp(argv[i], "slow") ? &slow : &loaders) =
            atoi(argv[i + 1]);
    trainers = world - loaders;
    if (loaders < 0 || loaders > RANKS || trainers < 1 || GLOBAL % trainers)
        fail("not 1, 2, 4 ... trainers", trainers);
    const int each = GLOBAL / trainers, bytes = each * (int)sizeof(sample);
    MPI_Comm_split(MPI_COMM_WORLD, rank < trainers, rank, &comm);
    read_digits("examples/data/digits_train_*.npz");
    model_init(&c.net, 1998);
    FILE *file = path ? fopen(path, "rb") : NULL;
    if (file && (fread(&c, sizeof c, 1, file) != 1 || fclose(file) || c.world < 1 ||
        c.world > RANKS)) fail(path, 0);
    const long begin = c.step;
    for (int t = 0; t < trainers; t++)
        if (rank == (loaders ? trainers + t % loaders : t)) of[t] = open_share(t, &c);
    for (; c.step < steps; c.step++) {
        for (int t = 0; t < trainers; t++) {
            if (!of[t].p) continue;
            spdl_batch *batch = next(of[t].p, &after, loaders ? MPI_COMM_NULL : comm);
            if (t == rank) {
                c.loss = learn(&c.net, (const sample *)batch->data, each, comm);
            } else {
                MPI_Send(&after, sizeof after, MPI_BYTE, t, 0, MPI_COMM_WORLD);
                MPI_Send(batch->data, bytes, MPI_BYTE, t, 1, MPI_COMM_WORLD);
            }
            spdl_batch_free(batch);
        }
        if (loaders && rank < trainers) {
            receive(trainers + rank % loaders, received, bytes, &after);
            c.loss = learn(&c.net, received, each, comm);
        }
    }
    MPI_Gather(&after, sizeof after, MPI_BYTE, c.of, sizeof after, MPI_BYTE, 0, comm);
    c.world = trainers;
    (void)snprintf(fresh, sizeof fresh, "%s.new", path ? path : ""); /* a kill leaves the old one */
    file = path && rank == 0 && c.step > begin ? fopen(fresh, "wb") : NULL;
    if (file && (fwrite(&c, sizeof c, 1, file) != 1 || fclose(file) || rename(fresh, path)))
        fail(path, 0);
    if (rank == 0) printf("step %ld, loss %.17g\n", c.step, c.loss);
    for (int t = 0; t < trainers; t++) {
        if (of[t].p) spdl_pipeline_stats(of[t].p, &stats);
        spdl_pipeline_destroy(of[t].p);
        spdl_sampler_destroy(of[t].sampler);
    }
    name_straggler(&stats);
    return MPI_Finalize();
}
