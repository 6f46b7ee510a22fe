/* resume.c - a training that is killed at any moment goes on where its last checkpoint was, and
   ends with the same weights, bit for bit. A checkpoint has the model and the pipeline's position,
   a line of text. Noise comes from spdl_item_key, a seed for each item of each epoch.

   Build:  cc -O2 -I. examples/resume.c -o resume -lpthread -lm
   Run:    ./resume [FOLDER]    (trains without a break, then killed again and again) */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include "digits_net.h"
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { FILES = 48, BATCH = 2, STEPS = 6 * FILES / BATCH, MAX_IMAGES = 360 };

typedef struct { model net; long step; double loss; char position[SPDL_STATE_BYTES]; } checkpoint;

/* The files in another order in every epoch, which is a function of its number. */
SPDL_FN(next_file, void, char) {
    const char *folder = (const char *)spdl_ctx(task);
    int order[FILES];
    uint64_t seed = spdl_epoch(task) + 1;
    if (spdl_sequence(task) == FILES) return SPDL_END;
    for (int i = 0; i < FILES; i++) {
        const int j = dice(&seed, i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    if (!(*out = (char *)malloc(400))) return SPDL_E_NOMEM;
    snprintf(*out, 400, "%.300s/digits_train_%02d.npz", folder, order[spdl_sequence(task)]);
    return SPDL_OK;
}

SPDL_FN(load, char, samples) {
    static const char *const names[] = { "images", "labels" };
    uint8_t data[2][MAX_IMAGES * PIXELS];
    spdl_error error = { .text = "" };
    spdl_npz_desc desc = { .error = &error };
    spdl_npy_info info[2];
    spdl_npz *npz;
    bool good = spdl_npz_open(&npz, in, &desc) == SPDL_OK;
    for (size_t i = 0, at; good && i < 2; i++)
        good = spdl_npz_find(npz, names[i], &at) == SPDL_OK
            && spdl_npz_info(npz, at, &info[i], &error) == SPDL_OK
            && spdl_npz_read(npz, at, data[i], sizeof data[i], &error) == SPDL_OK;
    spdl_npz_close(npz);
    *out = good ? samples_new(info[1].count, data[0], data[1]) : NULL;
    return *out ? SPDL_OK : spdl_fail(task, "%s", error.text);
}

SPDL_FN(augment, samples, samples) {
    samples_vary(in, spdl_item_key(task)); /* the same noise in every run */
    *out = in;
    return SPDL_OK;
}

static bool save(const char *path, const checkpoint *c) {
    char temporary[300]; /* a kill while it is written leaves the old one */
    snprintf(temporary, sizeof temporary, "%s.new", path);
    FILE *file = fopen(temporary, "wb");
    const bool good = file && fwrite(c, sizeof *c, 1, file) == 1 && fclose(file) == 0;
    return good && rename(temporary, path) == 0;
}

static bool read_back(const char *path, checkpoint *c) {
    FILE *file = fopen(path, "rb");
    return file && fread(c, sizeof *c, 1, file) == 1 && fclose(file) == 0;
}

static int tell(const char *text) { return fprintf(stderr, "resume: %s\n", text), 1; }

/* Trains to the end, or up to a step that kills this process. */
static int train(char *folder, const char *path, int workers, long kill_at) {
    static checkpoint c;
    const char *text = c.position;
    spdl_pipeline_desc desc = { .workers = workers, .seed = 1998 };
    spdl_pipeline *p;
    spdl_error error = { .text = "" };
    spdl_result result = SPDL_OK;
    spdl_batch *batch;
    if (spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_SOURCE(next_file, .ctx = folder, .continuous = true, .free_item = free),
            SPDL_PIPE(load, .concurrency = workers, .free_item = free), SPDL_PIPE(augment),
            SPDL_BATCH(BATCH), SPDL_SINK(3))) != SPDL_OK) return 1;
    if (!read_back(path, &c)) model_init(&c.net, 1998);
    else if (spdl_state_load(p, &text, 1, SPDL_FOREVER, &error) != SPDL_OK) return tell(error.text);
    while (c.step < STEPS && result >= 0) {
        if ((result = SPDL_NEXT(p, &batch, SPDL_FOREVER)) != SPDL_OK) continue; /* an epoch ends */
        for (size_t i = 0; i < batch->count; i++) c.loss = model_learn(&c.net, batch->items[i]);
        model_step(&c.net);
        spdl_batch_free(batch);
        if (++c.step == kill_at) raise(SIGKILL); /* after steps that are in no checkpoint */
        if (spdl_state_save(p, c.position, sizeof c.position) < 0) return tell(c.position);
        if (c.step % 5 == 0 && !save(path, &c)) return tell(path);
    }
    if (result < 0) return tell(spdl_pipeline_error(p)->text);
    spdl_pipeline_destroy(p);
    return save(path, &c) ? 0 : tell(path);
}

int main(int argc, char **argv) {
    static checkpoint whole, broken;
    static char here[] = "examples/data";
    int status = 0, kills = 0;
    remove("resume_broken.bin"), remove("resume_whole.bin");
    for (int run = 0; run < 40 && (run < 2 || WIFSIGNALED(status)); run++) {
        const pid_t child = fork();
        const char *path = run == 0 ? "resume_whole.bin" : "resume_broken.bin";
        if (child == 0) _exit(train(argc > 1 ? argv[1] : here, path, run % 3 + 1, run * 12));
        while (waitpid(child, &status, 0) != child && errno == EINTR) continue;
        kills += WIFSIGNALED(status);
    }
    if (!read_back("resume_whole.bin", &whole) || !read_back("resume_broken.bin", &broken))
        return tell("no checkpoint");
    printf("without a break: %ld steps, loss %.17g\nkilled %d times: %ld steps, loss %.17g\n",
           whole.step, whole.loss, kills, broken.step, broken.loss);
    if (status != 0 || memcmp(&whole.net, &broken.net, sizeof whole.net) != 0)
        return tell("the weights differ");
    return remove("resume_broken.bin") | remove("resume_whole.bin");
}
