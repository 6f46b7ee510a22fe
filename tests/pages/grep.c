/* Parallel grep over a tree: path:line:text, in the order of the files. */
#include "spdl.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct Line {
    spdl_record *rec;
    long number;
} Line;
typedef struct Counter {
    long line;
} Counter;
static void line_free(void *p) {
    Line *l = p;
    spdl_record_free(l->rec);
    free(l);
}
SPDL_FN(number, spdl_record, Line) { /* one call at a time, in order */
    Counter *c = spdl_ctx(task);
    if (in->offset == 0) c->line = 0; /* a new file */
    if ((*out = malloc(sizeof(Line))) == NULL) return SPDL_E_NOMEM;
    spdl_take(task);
    (*out)->rec = in, (*out)->number = ++c->line;
    return SPDL_OK;
}
SPDL_FN(match, Line, Line) {
    if (strstr((char *)in->rec->data, (char *)spdl_ctx(task)) == NULL) return SPDL_SKIP;
    *out = in;
    return SPDL_OK;
}
static char *got, *want;
static size_t got_n, want_n;
static void loop(const char *path, const char *word, FILE *to) {
    FILE *f = fopen(path, "r");
    char *s = NULL;
    size_t cap = 0;
    ssize_t n;
    long k = 0;
    while ((n = getline(&s, &cap, f)) > 0) {
        while (n && (s[n - 1] == '\n' || s[n - 1] == '\r')) s[--n] = 0;
        ++k;
        if (strstr(s, word)) fprintf(to, "%s:%ld:%s\n", path, k, s);
    }
    free(s);
    fclose(f);
}
int main(int argc, char **argv) {
    const char *word = "spdl", *dir = "examples/packages";
    spdl_pipeline *p;
    spdl_files *files;
    Line *l;
    Counter c = { 0 };
    spdl_pipeline_desc desc = { .workers = argc > 1 ? atoi(argv[1]) : 0 };
    spdl_files_desc fd = { .recursive = true };
    if (spdl_files_open(&files, dir, &fd) != SPDL_OK) return puts("no files"), 1;
    FILE *a = open_memstream(&got, &got_n), *b = open_memstream(&want, &want_n);
    if (spdl_pipeline_create(
            &p, &desc,
            SPDL_STAGES(SPDL_FILES(files), SPDL_LINES(NULL),
                        SPDL_PIPE(number, .ctx = &c, .serial = true, .free_item = line_free),
                        SPDL_PIPE(match, .ctx = (void *)word, .concurrency = SPDL_ALL,
                                  .free_item = line_free),
                        SPDL_SINK(64))) != SPDL_OK)
        return 1;
    while (SPDL_NEXT(p, &l, SPDL_FOREVER) == SPDL_OK) {
        fprintf(a, "%s:%ld:%s\n", l->rec->name, l->number, (char *)l->rec->data);
        line_free(l);
    }
    if (spdl_pipeline_failed(p)) puts(spdl_pipeline_error(p)->text);
    spdl_pipeline_destroy(p);
    for (uint64_t i = 0; i < spdl_files_count(files); i++) loop(spdl_files_path(files, i), word, b);
    fclose(a), fclose(b);
    printf("grep: %zu bytes, %zu expected: %s\n", got_n, want_n,
           strcmp(got, want) ? "WRONG" : "right");
    free(got), free(want);
    spdl_files_close(files);
}
