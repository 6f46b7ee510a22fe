/* branch_merge.c - messages of three kinds take three paths: texts are read one by one, pictures
   wait until there are four, as a model likes them, the rest goes straight on; then they are one
   stream again, in the order in which they are done.

   Build:  cc -O2 -I. examples/branch_merge.c -o branch_merge -lpthread
   Run:    ./branch_merge */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { MESSAGES = 30 };

typedef enum Kind { TEXT, PICTURE, OTHER } Kind;

typedef struct Message {
    uint64_t number;
    Kind kind;
    char label[64];
} Message;

SPDL_FN(receive, void, Message) {
    static const Kind kinds[] = { TEXT, TEXT, PICTURE, TEXT, OTHER, PICTURE, TEXT };
    const uint64_t number = spdl_sequence(task);
    if (number == MESSAGES) return SPDL_END;
    *out = (Message *)calloc(1, sizeof **out);
    if (!*out) return SPDL_E_NOMEM;
    (*out)->number = number;
    (*out)->kind = kinds[number % 7];
    return SPDL_OK;
}

/* The branch: the number of the path is that of its row below. */
SPDL_FN(by_kind, Message, Message) {
    *out = in;
    return spdl_route(task, (int)in->kind);
}

SPDL_FN(read_text, Message, Message) {
    snprintf(in->label, sizeof in->label, "%d words", (int)(3 + in->number % 5));
    *out = in;
    return SPDL_OK;
}

/* Many in and many out: a call for each message that leaves the batch. */
SPDL_FN(look_at, spdl_batch, Message) {
    uintptr_t *at = (uintptr_t *)spdl_call_state(task); /* 0 in the first call */
    *out = (Message *)in->items[*at];
    in->items[*at] = NULL; /* the message is ours */
    snprintf((*out)->label, sizeof (*out)->label, "%d of %d looked at", (int)*at + 1,
             (int)in->count);
    return ++*at < in->count ? SPDL_AGAIN : SPDL_OK;
}

int main(void) {
    static const char *const names[] = { "text", "picture", "other" };
    const spdl_pipeline_desc desc = { .workers = 4 };
    int came[MESSAGES] = { 0 }, missing = 0;
    spdl_pipeline *p;
    Message *message;
    const spdl_result made = spdl_pipeline_create(&p, &desc, SPDL_STAGES(
        SPDL_SOURCE(receive, .free_item = free),
        SPDL_BRANCH(by_kind),
            SPDL_PATH("text"),
                SPDL_PIPE(read_text, .concurrency = 2),
            SPDL_PATH("picture"),
                SPDL_BATCH(4),
                SPDL_PIPE(look_at, .again = true, .free_item = free),
            SPDL_PATH("other"),
        SPDL_MERGE(.output_order = SPDL_ORDER_COMPLETION),
        SPDL_SINK(8)));
    if (made != SPDL_OK) return 1; /* the log says which row and why */
    while (SPDL_NEXT(p, &message, SPDL_FOREVER) == SPDL_OK) {
        printf("%2" PRIu64 " %-8s %s\n", message->number, names[message->kind], message->label);
        came[message->number]++;
        free(message);
    }
    if (spdl_pipeline_failed(p)) puts(spdl_pipeline_error(p)->text);
    spdl_pipeline_destroy(p);
    for (int i = 0; i < MESSAGES; i++) missing += came[i] != 1;
    printf("%d messages, %d of them not exactly once\n", MESSAGES, missing);
    return missing ? 1 : 0;
}
