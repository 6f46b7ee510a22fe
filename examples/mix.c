/* mix.c - two pipelines are mixed into one stream, three items of the first for each of the second,
   until both have ended: as a language model reads web pages and books. A source that blocks, as
   this one may, has a thread of its own.

   Build:  cc -O2 -I. examples/mix.c -o mix -lpthread
   Run:    ./mix */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct Text {
    char line[64];
} Text;

/* The source of either pipeline: its ctx says of what. */
SPDL_FN(read_one, void, Text) {
    const char *kind = (const char *)spdl_ctx(task);
    if (spdl_sequence(task) == 9) return SPDL_END;
    *out = (Text *)malloc(sizeof **out);
    if (!*out) return SPDL_E_NOMEM;
    snprintf((*out)->line, sizeof (*out)->line, "%s %d", kind, (int)spdl_sequence(task));
    return SPDL_OK;
}

static spdl_pipeline *open_texts(char *kind) {
    spdl_pipeline *p;
    if (spdl_pipeline_create(&p, NULL, SPDL_STAGES(
            SPDL_SOURCE(read_one, .ctx = kind, .free_item = free),
            SPDL_SINK(4))) != SPDL_OK) exit(1); /* the log says which row and why */
    return p;
}

/* The source of the mixture asks the next functions of both: in turn as their shares say, and the
   other one when the first has ended. */
typedef struct Mix {
    spdl_pipeline *from[2];
    int share[2], taken[2];
    bool ended[2];
} Mix;

SPDL_FN(take_next, void, Text) {
    Mix *mix = (Mix *)spdl_ctx(task);
    for (;;) {
        /* the one that is further behind its share */
        int i = mix->taken[1] * mix->share[0] < mix->taken[0] * mix->share[1];
        spdl_result result;
        if (mix->ended[i]) i = !i;
        if (mix->ended[i]) return SPDL_END;
        while ((result = SPDL_NEXT(mix->from[i], out, SPDL_SECONDS(0.05))) == SPDL_TIMEOUT)
            if (spdl_stopping(task)) return SPDL_SKIP;
        if (result < 0) return spdl_fail(task, "%s", spdl_pipeline_error(mix->from[i])->text);
        mix->taken[i]++;
        if (result == SPDL_OK) return SPDL_OK;
        mix->ended[i] = true;
    }
}

int main(void) {
    static char web[] = "web", book[] = "book";
    Mix mix = { .from = { open_texts(web), open_texts(book) }, .share = { 3, 1 } };
    spdl_pipeline *p;
    Text *text;
    int taken = 0;
    if (spdl_pipeline_create(&p, NULL, SPDL_STAGES(
            SPDL_SOURCE(take_next, .ctx = &mix, .threads = 1, .free_item = free),
            SPDL_SINK(4))) != SPDL_OK) return 1;
    for (; SPDL_NEXT(p, &text, SPDL_FOREVER) == SPDL_OK; taken++) {
        puts(text->line);
        free(text);
    }
    if (spdl_pipeline_failed(p)) puts(spdl_pipeline_error(p)->text);
    spdl_pipeline_destroy(p); /* before those it takes from */
    spdl_pipeline_destroy(mix.from[1]);
    spdl_pipeline_destroy(mix.from[0]);
    return taken == 18 ? 0 : 1;
}
