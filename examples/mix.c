/* mix.c - two pipelines are mixed into one stream, three items of the first for each of the second,
   until both have ended: as a language model reads web pages and books.

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
    const spdl_pipeline_desc desc = { .workers = 1 };
    spdl_pipeline *p;
    if (spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_SOURCE(read_one, .ctx = kind, .free_item = free),
            SPDL_SINK(4))) != SPDL_OK) exit(1); /* the log says which row and why */
    return p;
}

int main(void) {
    static char web[] = "web", book[] = "book";
    spdl_pipeline *from_web = open_texts(web), *from_books = open_texts(book), *mix;
    Text *text;
    int taken = 0;
    if (spdl_pipeline_create(&mix, NULL, SPDL_STAGES(
            SPDL_PATH("web", .weight = 3),
                SPDL_FROM(Text, spdl_pipeline_next_fn, from_web, .free_item = free),
            SPDL_PATH("book", .weight = 1),
                SPDL_FROM(Text, spdl_pipeline_next_fn, from_books, .free_item = free),
            SPDL_MERGE(.merge_order = SPDL_MERGE_WEIGHTED),
            SPDL_SINK(4))) != SPDL_OK) return 1;
    for (; SPDL_NEXT(mix, &text, SPDL_FOREVER) == SPDL_OK; taken++) {
        puts(text->line);
        free(text);
    }
    if (spdl_pipeline_failed(mix)) puts(spdl_pipeline_error(mix)->text);
    spdl_pipeline_destroy(mix); /* before those it takes from */
    spdl_pipeline_destroy(from_books);
    spdl_pipeline_destroy(from_web);
    return taken == 18 ? 0 : 1;
}
