/* tar.c - the members of tar files (ustar, pax, GNU) in memory that does not grow with the files: a
   stage that returns SPDL_AGAIN hands on one member, and is called again with the same file when
   there is room for the next. Prints size, sum of the bytes and name of each member.

   Build:  cc -O2 -I. examples/tar.c -o tar -lpthread
   Run:    ./tar FILE.tar ... */
#define SPDL_IMPLEMENTATION
#include "spdl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 512, TEXT = 8192, LARGEST = 1 << 28 };

typedef struct Member {
    char name[TEXT];
    size_t bytes, sum;
    unsigned char data[];
} Member;

static int alive, most; /* members in memory: now, and at most */
static void member_free(void *member) {
    __atomic_sub_fetch(&alive, 1, __ATOMIC_RELAXED);
    free(member);
}

static uint64_t octal(const char *field, int digits) {
    char text[16];
    snprintf(text, sizeof text, "%.*s", digits, field);
    return strtoull(text, NULL, 8);
}

static bool header_ok(const char *head) {
    uint64_t sum = 0;
    for (int i = 0; i < BLOCK; i++) sum += i >= 148 && i < 156 ? ' ' : (unsigned char)head[i];
    return memcmp(head + 257, "ustar", 5) == 0 && octal(head + 148, 8) == sum;
}

/* The path among records "LENGTH KEY=VALUE\n". */
static bool pax_path(char *text, size_t bytes, char *name) {
    char *key;
    for (size_t length; bytes > 0; text += length, bytes -= length) {
        length = strtoul(text, &key, 10);
        if (length > bytes || key >= text + length || text[length - 1] != '\n') return false;
        text[length - 1] = '\0';
        if (strncmp(key, " path=", 6) == 0) snprintf(name, TEXT, "%s", key + 6);
    }
    return true;
}

static void tar_close(void *file) { fclose((FILE *)file); }

SPDL_FN(next_member, char, Member) {
    FILE **file = (FILE **)spdl_state(task); /* NULL in the first call with this input */
    char head[BLOCK], name[TEXT] = "";
    if (*file == NULL && (*file = fopen(in, "rb")) == NULL) return spdl_fail(task, "no %s", in);
    for (;;) {
        if (fread(head, 1, BLOCK, *file) != BLOCK) return spdl_fail(task, "%s: cut", in);
        if (head[0] == '\0') return SPDL_SKIP; /* the end: no more of this input */
        const char kind = head[156] ? head[156] : '0';
        const uint64_t bytes = kind >= '1' && kind <= '6' ? 0 : octal(head + 124, 12);
        if (!header_ok(head) || bytes > LARGEST) return spdl_fail(task, "%s: no tar file", in);
        Member *member = (Member *)calloc(1, sizeof *member + bytes + 1);
        if (member == NULL) return SPDL_E_NOMEM;
        const int now = __atomic_add_fetch(&alive, 1, __ATOMIC_RELAXED);
        if (now > most) most = now; /* one call at a time */
        bool ok = fread(member->data, 1, bytes, *file) == bytes &&
                  fseek(*file, (long)((BLOCK - bytes % BLOCK) % BLOCK), SEEK_CUR) == 0;
        if (ok && (kind == '0' || kind == '7')) {
            if (!name[0]) /* of two fields; the first one is of ustar only */
                snprintf(name, TEXT, "%.155s%s%.100s", head[262] ? "" : head + 345,
                         head[262] || !head[345] ? "" : "/", head);
            memcpy(member->name, name, TEXT);
            member->bytes = bytes;
            *out = member;
            return SPDL_AGAIN;
        }
        if (kind == 'L') snprintf(name, TEXT, "%s", (char *)member->data);
        else if (kind == 'x') ok = ok && pax_path((char *)member->data, bytes, name);
        else name[0] = '\0'; /* a folder, a link */
        member_free(member);
        if (!ok) return spdl_fail(task, "%s: cut", in);
    }
}

SPDL_FN(add_up, Member, Member) {
    for (size_t i = 0; i < in->bytes; i++) in->sum += in->data[i];
    *out = in;
    return SPDL_OK;
}

SPDL_FN(next_file, void, char) {
    char ***left = (char ***)spdl_ctx(task);
    if (**left == NULL) return SPDL_END;
    *out = *(*left)++;
    return SPDL_OK;
}

int main(int argc, char **argv) {
    const spdl_pipeline_desc desc = { .workers = 3 };
    char **left = argv + (argc > 0);
    spdl_pipeline *p;
    Member *member;
    if (spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_SOURCE(next_file, .ctx = &left),
            SPDL_PIPE(next_member, .again = true, .free_state = tar_close,
                      .free_item = member_free),
            SPDL_PIPE(add_up, .concurrency = 2),
            SPDL_SINK(4))) != SPDL_OK) return 1;
    while (spdl_pipeline_next(p, (void **)&member, SPDL_FOREVER) == SPDL_OK) {
        printf("%zu %zu %s\n", member->bytes, member->sum, member->name);
        member_free(member);
    }
    const bool failed = spdl_pipeline_failed(p);
    if (failed) fprintf(stderr, "%s\n", spdl_pipeline_error(p)->text);
    fprintf(stderr, "at most %d members in memory\n", most);
    spdl_pipeline_destroy(p);
    return failed;
}
