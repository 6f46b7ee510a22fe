/* mpi_serve.c - machines beside the trainer: ranks 0 to k - 1 train, and each other rank runs a
   pipeline over its share of the data. A trainer requests `window` batches in advance. A server
   sends each one out of the memory of the batch, which returns to its row after the send.

   The order is fixed: turn n is a batch of server n % servers, for trainer n % trainers. Together
   all servers give each item once an epoch; one that has no batch left sends an empty one. With
   each batch goes the text of the position after it. A checkpoint has the texts of batches that
   were used, not of those under way. So a run that was killed goes on exactly, with as many servers
   and any number of trainers. A server that fails is an error at the trainer, with its rank. If a
   rank hangs, the error has the rank that was waited for.

   MPI_THREAD_FUNNELED is enough, because main alone calls MPI, and workers never do. Under
   MPI_THREAD_MULTIPLE every call of MPI would take locks.

   Needs:  libopenmpi-dev openmpi-bin
   Build:  mpicc -O2 -I. examples/mpi_serve.c -o mpi_serve -lpthread
   Run:    mpirun -n 4 ./mpi_serve [trainers 1] [turns N] [load MS] [window 4] [timeout SECONDS]
               [checkpoint FILE] [every STEPS] [fail RANK]; with -n 1 rank 0 loads by itself */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <errno.h>
#include <mpi.h>
#include <stdio.h>
#include <time.h>

enum { ITEMS = 1921, BATCH = 32, VALUES = 1020, RANKS = 32, EPOCHS = 64, SENDS = 128 };
enum { REQUEST, ANSWER, DATA }; /* tags */
typedef struct { uint64_t index, key; uint32_t value[VALUES]; } sample;
typedef struct { int count; char text[SPDL_STATE_BYTES]; } answer; /* -1: the text is an error */
typedef struct { uint64_t items[EPOCHS], sum[EPOCHS], order, batches; } model; /* all are sums */
typedef struct { int64_t turn; int servers; model net; char text[RANKS][SPDL_STATE_BYTES]; }
    checkpoint; /* every turn before .turn was used; the texts are those of the servers */

static int trainers = 1, turns, load = 20, window = 4, timeout = 20, every = 100, fails = -1;
static int rank, world, servers, rounds; /* turns of a server in an epoch */
static const char *path;
static checkpoint begin;
#define FAIL(format, ...) /* ends all ranks */ \
    (fprintf(stderr, "rank %d: " format "\n", rank, __VA_ARGS__), MPI_Abort(MPI_COMM_WORLD, 1))

static void nap(uint64_t since, int seconds, const char *who, int from) {
    if (spdl_time_ns() - since > (uint64_t)seconds * 1000000000u)
        FAIL("nothing for %d s from %s, rank %d: it hangs, or waits for one", seconds, who, from);
    nanosleep(&(struct timespec){ 0, 50000 }, NULL); /* leaves the processor to others */
}

SPDL_FN(make, spdl_index, sample) {
    if ((*out = (sample *)spdl_buffer(task)) == NULL) return SPDL_E_NOMEM; /* in the batch */
    (*out)->index = in->index;
    (*out)->key = spdl_item_key(task); /* for random numbers: the same on whatever server */
    for (uint64_t i = 0; i < VALUES; i++)
        (*out)->value[i] = (uint32_t)((in->index * VALUES + i) ^ (*out)->key);
    return SPDL_OK;
}

SPDL_FN(prepare, spdl_batch, spdl_batch) { /* the slow stage */
    nanosleep(&(struct timespec){ load / 1000, load % 1000 * 1000000 }, NULL);
    if (rank == fails && in->sequence == 5) return spdl_fail(task, "no cats in this batch");
    *out = in;
    return SPDL_OK;
}

static spdl_pipeline *open_share(spdl_sampler **sampler, int server) {
    spdl_pipeline *p = NULL;
    spdl_error error;
    const char *text = begin.text[server];
    const spdl_sampler_desc order = { .order = SPDL_SAMPLE_SHUFFLED, .count = ITEMS, .seed = 7,
                                      .ranks = { server, servers }, .error = &error };
    const spdl_pipeline_desc desc = { .workers = 2, .seed = 7, .error = &error };
    if (spdl_sampler_create(sampler, &order) != SPDL_OK
        || spdl_pipeline_create(&p, &desc, SPDL_STAGES(
               SPDL_INDEX(*sampler, .continuous = true),
               SPDL_PIPE(make),
               SPDL_BATCH_OF(sample, BATCH),
               SPDL_PIPE(prepare),
               SPDL_SINK(3))) != SPDL_OK
        || (*text && spdl_state_load(p, &text, 1, SPDL_FOREVER, &error) != SPDL_OK))
        FAIL("%s", error.text);
    return p;
}

/* The batch of a turn, and its answer. The batch is NULL if the server has no more in this epoch,
   or has failed. Returns false after a timeout. */
static bool take(spdl_pipeline *p, int64_t turn, spdl_batch **batch, answer *to, int64_t wait_ns) {
    const uint64_t epoch = (uint64_t)(turn / servers / rounds);
    spdl_result result = SPDL_END;
    *batch = NULL;
    while (result == SPDL_END && spdl_pipeline_epoch(p) <= epoch)
        result = SPDL_NEXT(p, batch, wait_ns);
    if (result == SPDL_TIMEOUT) return false;
    to->count = *batch ? (int)(*batch)->count : result == SPDL_END ? 0 : -1;
    if (to->count < 0) {
        const char *why = spdl_pipeline_failed(p) ? spdl_pipeline_error(p)->text
                                                  : spdl_result_text(result);
        (void)snprintf(to->text, sizeof to->text, "%s", why);
    } else if (spdl_state_save(p, to->text, sizeof to->text) < 0) to->count = -1;
    return true;
}

/* Sends batches until all trainers have ended. */
static void serve(spdl_pipeline *p, int server) {
    static struct { answer answer; spdl_batch *batch; MPI_Request part[2]; } send[SENDS], *at;
    int credit[RANKS] = { 0 }, ended = 0, done, more;
    uint64_t first = 0, next = 0, since = spdl_time_ns();
    int64_t turn = begin.turn + (server - begin.turn % servers + servers) % servers;
    MPI_Status status;
    while (ended < trainers || first < next) {
        const int to = (int)((turn - begin.turn) % trainers);
        while (MPI_Iprobe(MPI_ANY_SOURCE, REQUEST, MPI_COMM_WORLD, &done, &status), done) {
            MPI_Recv(&more, 1, MPI_INT, status.MPI_SOURCE, REQUEST, MPI_COMM_WORLD, &status);
            credit[status.MPI_SOURCE] += more;
            ended += !more;
            since = spdl_time_ns();
        }
        for (at = &send[first % SENDS]; first < next; at = &send[++first % SENDS]) {
            if (MPI_Testall(2, at->part, &done, MPI_STATUSES_IGNORE), !done) break;
            spdl_batch_free(at->batch); /* MPI needs its memory no more */
        }
        if (credit[to] > 0 && next - first < SENDS) {
            at = &send[next % SENDS]; /* waits briefly: sends go on inside of calls of MPI only */
            if (!take(p, turn, &at->batch, &at->answer, 100000)) continue;
            MPI_Isend(&at->answer, (int)(offsetof(answer, text) + strlen(at->answer.text) + 1),
                      MPI_BYTE, to, ANSWER, MPI_COMM_WORLD, &at->part[0]);
            MPI_Isend(at->batch ? at->batch->data : NULL,
                      at->batch ? (int)(at->batch->count * sizeof(sample)) : 0,
                      MPI_BYTE, to, DATA, MPI_COMM_WORLD, &at->part[1]);
            since = spdl_time_ns();
            credit[to]--, next++, turn += servers;
        } else nap(since, 2 * timeout, "trainer", to); /* one that waits for a server fails first */
    }
}

static void await(MPI_Request *request, int count, int from) {
    const uint64_t since = spdl_time_ns();
    for (int done = 0; MPI_Testall(count, request, &done, MPI_STATUSES_IGNORE), !done;)
        nap(since, timeout, "server", from);
}

/* A step of the training. Here it adds hashes, so that the order of additions does not count. */
static void learn(model *net, int64_t turn, const sample *data, size_t count) {
    const int64_t epoch = turn / servers / rounds;
    for (size_t i = 0; i < count; i++) net->sum[epoch] += spdl_hash(0, &data[i], sizeof *data);
    net->items[epoch] += count;
    net->order += spdl_hash((uint64_t)turn, data, count * sizeof *data);
    net->batches += count > 0;
}

/* Joins the parts of all trainers in rank 0, which writes them. */
static void save(checkpoint part, checkpoint *all, MPI_Comm comm) {
    char fresh[4096];
    *all = part;
    for (int s = 0; s < servers; s++) { /* which trainer used the last turn of the server? */
        const int64_t last = part.turn - 1 - (part.turn - 1 - s + servers) % servers;
        if (rank != (last < begin.turn ? 0 : (last - begin.turn) % trainers))
            memset(part.text[s], 0, sizeof part.text[s]);
    }
    MPI_Reduce(&part.net, &all->net, sizeof(model) / 8, MPI_UINT64_T, MPI_SUM, 0, comm);
    MPI_Reduce(part.text, all->text, sizeof part.text, MPI_BYTE, MPI_BOR, 0, comm);
    if (!path || rank != 0) return;
    (void)snprintf(fresh, sizeof fresh, "%s.new", path); /* a kill leaves the old one */
    FILE *file = fopen(fresh, "wb");
    if (!file || fwrite(all, sizeof *all, 1, file) != 1 || fclose(file) || rename(fresh, path))
        FAIL("%s: %s", fresh, strerror(errno));
}

/* Learns from the batches of its turns, from the servers or from a pipeline of its own. */
static void train(spdl_pipeline *own, MPI_Comm comm) {
    static checkpoint now, all;
    static struct { answer answer; MPI_Request part[3]; sample data[BATCH]; } slots[RANKS], *at;
    static const int one = 1, none = 0;
    const uint64_t since = spdl_time_ns();
    int64_t step = 0, wanted = 0;
    now = begin;
    if (rank != 0) memset(&now.net, 0, sizeof now.net); /* rank 0 has the sums */
    for (; now.turn < turns; step++) {
        for (; !own && wanted < step + window; wanted++) { /* receives first, then the request */
            const int64_t turn = begin.turn + wanted * trainers + rank;
            const int from = trainers + (int)(turn % servers);
            if (turn >= turns) break;
            at = &slots[wanted % window];
            MPI_Irecv(&at->answer, sizeof at->answer, MPI_BYTE, from, ANSWER, MPI_COMM_WORLD,
                      &at->part[0]);
            MPI_Irecv(at->data, sizeof at->data, MPI_BYTE, from, DATA, MPI_COMM_WORLD,
                      &at->part[1]);
            MPI_Isend(&one, 1, MPI_INT, from, REQUEST, MPI_COMM_WORLD, &at->part[2]);
        }
        const int64_t turn = now.turn + rank;
        if (turn < turns) {
            const int s = (int)(turn % servers), from = own ? rank : trainers + s;
            spdl_batch *batch = NULL;
            at = &slots[step % window];
            if (own) (void)take(own, turn, &batch, &at->answer, SPDL_FOREVER);
            else await(at->part, 3, from);
            if (at->answer.count < 0) FAIL("server, rank %d: %s", from, at->answer.text);
            learn(&now.net, turn, batch ? (sample *)batch->data : at->data,
                  (size_t)at->answer.count);
            memcpy(now.text[s], at->answer.text, sizeof now.text[s]);
            spdl_batch_free(batch);
        }
        now.turn = now.turn + trainers < turns ? now.turn + trainers : turns;
        if (step % every == every - 1) save(now, &all, comm);
    }
    const double seconds = (double)(spdl_time_ns() - since) / 1e9;
    save(now, &all, comm);
    for (int e = 0; rank == 0 && e < EPOCHS && all.net.items[e]; e++)
        printf("epoch %d: %d items, sum %016llx\n", e, (int)all.net.items[e],
               (unsigned long long)all.net.sum[e]);
    const double batches = (double)(all.net.batches - begin.net.batches);
    if (rank == 0)
        printf("order %016llx\n%.0f batches in %.2f s: %.1f a second\n",
               (unsigned long long)all.net.order, batches, seconds, batches / seconds);
    for (int s = 0; !own && s < servers; s++) {
        MPI_Isend(&none, 1, MPI_INT, trainers + s, REQUEST, MPI_COMM_WORLD, slots[0].part);
        await(slots[0].part, 1, trainers + s);
    }
}

int main(int argc, char **argv) {
    const struct { const char *name; int *value; } option[] = {
        { "trainers", &trainers }, { "turns", &turns }, { "load", &load }, { "window", &window },
        { "timeout", &timeout }, { "every", &every }, { "fail", &fails }, { NULL, NULL } };
    spdl_sampler *sampler = NULL;
    spdl_pipeline *p = NULL;
    FILE *file = NULL;
    MPI_Comm comm;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &world);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    for (int i = 1, o = 0; i < argc; i += 2, o = 0) {
        while (option[o].name && strcmp(argv[i], option[o].name)) o++;
        if (i + 1 < argc && !strcmp(argv[i], "checkpoint")) path = argv[i + 1];
        else if (i + 1 < argc && option[o].name) *option[o].value = atoi(argv[i + 1]);
        else FAIL("'%s': see the head of mpi_serve.c", argv[i]);
    }
    servers = world == 1 ? 1 : world - trainers; /* alone: its own server */
    if (trainers < 1 || servers < 1 || world > RANKS) FAIL("%d trainers of %d", trainers, world);
    rounds = ((ITEMS + servers - 1) / servers + BATCH - 1) / BATCH; /* for the largest share */
    if (!turns) turns = 2 * rounds * servers;
    if (turns < 1 || turns > EPOCHS * rounds * servers || load < 0 || window < 1 || window > RANKS
        || timeout < 1 || every < 1) FAIL("%s", "a number is out of its range");
    if (rank == 0 && path && (file = fopen(path, "rb")) == NULL && errno != ENOENT)
        FAIL("%s: %s", path, strerror(errno));
    if (file && (fread(&begin, sizeof begin, 1, file) != 1 || fclose(file)
                 || begin.servers != servers)) FAIL("%s: not of %d servers", path, servers);
    MPI_Bcast(&begin, sizeof begin, MPI_BYTE, 0, MPI_COMM_WORLD);
    begin.servers = servers;
    MPI_Comm_split(MPI_COMM_WORLD, rank < trainers, rank, &comm);
    if (rank >= trainers || world == 1) p = open_share(&sampler, world == 1 ? 0 : rank - trainers);
    if (rank < trainers) train(p, comm);
    else serve(p, rank - trainers);
    spdl_pipeline_destroy(p);
    spdl_sampler_destroy(sampler);
    return MPI_Finalize();
}
