/* bench_state.c - what it costs to save and load a position.

       make bench-state ARGS="[--json] [--quick] [--list] [TEXT]"

   A source, two stages with a concurrency of 2, batches of 32, 2 workers; the trainer is somewhere
   in an epoch.

   save_us             spdl_state_save, in a table whose order is always the same
   save_index_us       the same with a source of SPDL_INDEX
   text_bytes          length of that text
   load_ms             spdl_state_load until the next batch is there, in a pipeline that runs
   load_first_ms       the same in a new one, spdl_pipeline_create included, against a new one
                       without a load: from its beginning */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"

#include "bench.h"

enum { SAVES = 20000, LOADS = 200 };

SPDL_FN(make_item, void, void) {
    *out = (void *)(uintptr_t)(spdl_sequence(task) + 1);
    return SPDL_OK;
}

SPDL_FN(work, void, void) {
    uint64_t i;
    for (i = (uintptr_t)in % 64 * 16; i > 0; --i) __asm__ volatile("" ::: "memory");
    *out = in;
    return SPDL_OK;
}

SPDL_FN(work_at, spdl_index, void) {
    return work(task, (void *)(uintptr_t)in->index, out);
}

static spdl_pipeline *start_index(spdl_sampler *s) {
    spdl_pipeline_desc desc = { 0 };
    spdl_pipeline *p;
    desc.workers = 2;
    BENCH_CHECK(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_INDEX(s), SPDL_PIPE(work_at, .concurrency = 2), SPDL_BATCH(32), SPDL_SINK(4)))
        == SPDL_OK);
    return p;
}

static spdl_pipeline *start(spdl_order order) {
    spdl_pipeline_desc desc = { 0 };
    spdl_pipeline *p;
    desc.workers = 2;
    BENCH_CHECK(spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_SOURCE(make_item), SPDL_PIPE(work, .concurrency = 2, .output_order = order),
        SPDL_PIPE(work, .concurrency = 2), SPDL_BATCH(32), SPDL_SINK(4))) == SPDL_OK);
    return p;
}

static void take(spdl_pipeline *p, int batches) {
    void *batch;
    while (batches-- > 0) {
        BENCH_CHECK(spdl_pipeline_next(p, &batch, SPDL_FOREVER) == SPDL_OK);
        spdl_batch_free(batch);
    }
}

/* Mean of one, while the workers are at rest: the sink is full. */
static double saves_us(spdl_pipeline *p) {
    char text[SPDL_STATE_BYTES];
    uint64_t begun;
    int i;
    take(p, 100);
    bench_sleep_ms(2);
    begun = bench_ns();
    for (i = 0; i < SAVES; ++i) BENCH_CHECK(spdl_state_save(p, text, sizeof text) > 0);
    begun = bench_ns() - begun;
    spdl_pipeline_destroy(p);
    return (double)begun / 1e3 / SAVES;
}

static double save_us(const void *arg) { return saves_us(start(*(const spdl_order *)arg)); }

static double save_index_us(const void *arg) {
    spdl_sampler_desc desc = { 0 };
    spdl_sampler *s;
    double us;
    (void)arg;
    desc.count = 1000000;
    desc.order = SPDL_SAMPLE_SHUFFLED;
    desc.ranks.world = 8;
    BENCH_CHECK(spdl_sampler_create(&s, &desc) == SPDL_OK);
    us = saves_us(start_index(s));
    spdl_sampler_destroy(s);
    return us;
}

static double text_bytes(const void *arg) {
    spdl_pipeline *p = start(*(const spdl_order *)arg);
    char text[SPDL_STATE_BYTES];
    int length;
    take(p, 100);
    length = spdl_state_save(p, text, sizeof text);
    spdl_pipeline_destroy(p);
    return length;
}

static double load_ms(const void *arg) {
    spdl_pipeline *p = start(*(const spdl_order *)arg);
    char text[SPDL_STATE_BYTES];
    const char *texts[1];
    uint64_t took = 0, begun;
    int i;
    texts[0] = text;
    take(p, 100);
    BENCH_CHECK(spdl_state_save(p, text, sizeof text) > 0);
    for (i = 0; i < LOADS; ++i) {
        take(p, 3);
        begun = bench_ns();
        BENCH_CHECK(spdl_state_load(p, texts, 1, SPDL_FOREVER, NULL) == SPDL_OK);
        take(p, 1);
        took += bench_ns() - begun;
    }
    spdl_pipeline_destroy(p);
    return (double)took / 1e6 / LOADS;
}

/* A new pipeline, up to its first batch. */
static double first_ms(const char *text) {
    uint64_t took = 0, begun;
    int i;
    for (i = 0; i < LOADS / 10; ++i) {
        spdl_pipeline *p;
        begun = bench_ns();
        p = start(SPDL_ORDER_INPUT);
        if (text != NULL)
            BENCH_CHECK(spdl_state_load(p, &text, 1, SPDL_FOREVER, NULL) == SPDL_OK);
        take(p, 1);
        took += bench_ns() - begun;
        spdl_pipeline_destroy(p);
    }
    return (double)took * 10 / 1e6 / LOADS;
}

static double load_first_ms(const void *arg) {
    spdl_pipeline *p = start(*(const spdl_order *)arg);
    char text[SPDL_STATE_BYTES];
    take(p, 100);
    BENCH_CHECK(spdl_state_save(p, text, sizeof text) > 0);
    spdl_pipeline_destroy(p);
    return first_ms(text);
}

static double no_load_ms(const void *arg) {
    (void)arg;
    return first_ms(NULL);
}

int main(int argc, char **argv) {
    static const spdl_order input = SPDL_ORDER_INPUT;
    const struct {
        bench_row row;
        const spdl_order *order;
        bench_side_fn ours, peer;
    } rows[] = {
        { { "save_us", "us", NULL, false, 1, false, 0 }, &input, save_us, NULL },
        { { "save_index_us", "us", NULL, false, 1, false, 0 }, &input, save_index_us, NULL },
        { { "text_bytes", "bytes", NULL, false, 1024, false, 0 }, &input, text_bytes, NULL },
        { { "load_ms", "ms", NULL, false, 0, false, 0 }, &input, load_ms, NULL },
        { { "load_first_ms", "ms", "no load", false, 0, false, 0 }, &input, load_first_ms,
          no_load_ms },
    };
    size_t i;
    bench_start("state", argc, argv);
    for (i = 0; i < sizeof rows / sizeof rows[0]; ++i)
        if (bench_wanted(rows[i].row.name))
            bench_compare_sides(&rows[i].row, 11, rows[i].ours, rows[i].order, rows[i].peer,
                                rows[i].order);
    return 0;
}
