/* Feeds any text to what reads text: saved positions, of one rank or of several, and the
   environment (SPDL_STATS, SPDL_TRACE, SPDL_DOCTOR, ranks). Names of rows are any bytes, and the
   lines of a report have to be JSON and UTF-8 with any of them. The first byte picks which. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "fuzz.h"

static char folder[40];
static spdl_error error;

static void quiet(spdl_log_level level, const char *text, void *user) {
    (void)level, (void)text, (void)user;
}

SPDL_FN(five, void, void) {
    if (spdl_sequence(task) == 5) return SPDL_END;
    *out = (void *)folder;
    return SPDL_OK;
}

SPDL_FN(pass, void, void) {
    *out = in;
    return SPDL_OK;
}

/* --- positions --- */

/* The text, or with `edits` that of the pipeline itself with other bytes: each pair is a place and
   a byte. With a sum that fits if `repaired`. It ends within SPDL_STATE_BYTES, or it does not. */
static void state_text(char *to, const spdl_pipeline *p, const uint8_t *data, size_t bytes,
                       unsigned how) {
    const bool repaired = (how & 2) != 0, edits = (how & 32) != 0;
    const size_t room = SPDL_STATE_BYTES - 16;
    size_t length = bytes < room ? bytes : room;
    memset(to, 0, SPDL_STATE_BYTES + 8);
    if (edits) {
        FUZZ_CHECK(spdl_state_save(p, to, SPDL_STATE_BYTES) > 0);
        *strstr(to, " sum=") = '\0';
        length = strlen(to);
        for (size_t i = 0; i + 1 < bytes; i += 2)
            if (data[i + 1] != 0) to[data[i] % length] = (char)data[i + 1];
    } else {
        memcpy(to, data, length);
    }
    if (repaired) {
        length = strlen(to);
        snprintf(to + length, 16, " sum=%08x", (unsigned)spdl__state_sum(to, length));
    } else if (length == room) {
        memset(to, 'x', SPDL_STATE_BYTES);
    }
}

static void try_state(const uint8_t *data, size_t bytes, unsigned how) {
    static char text[2][SPDL_STATE_BYTES + 8];
    const char *const texts[] = { text[0], text[1] };
    const size_t first = how & 8 ? bytes / 2 : bytes;
    spdl_sampler_desc order = { 0 };
    spdl_sampler *sampler = NULL;
    spdl_pipeline_desc desc = { 0 };
    spdl_pipeline *p = NULL;
    spdl_result result;
    void *item;
    order.count = 10;
    order.ranks.world = how & 4 ? 2 : 1;
    desc.logger.log_fn = quiet;
    if (spdl_sampler_create(&sampler, &order) != SPDL_OK) abort();
    result = how & 16 ? spdl_pipeline_create(&p, &desc, SPDL_STAGES(SPDL_INDEX(sampler),
                                                                     SPDL_SINK(1)))
                      : spdl_pipeline_create(&p, &desc, SPDL_STAGES(SPDL_SOURCE(five),
                                                                     SPDL_BATCH(2), SPDL_SINK(1)));
    if (result != SPDL_OK) abort();
    state_text(text[0], p, data, first, how);
    state_text(text[1], p, data + first, bytes - first, how);
    memset(&error, 0, sizeof error);
    result = spdl_state_load(p, texts, how & 8 ? 2 : 1, SPDL_FOREVER, &error);
    FUZZ_CHECK((result < 0) == (error.text[0] != '\0') && strlen(error.text) < SPDL_TEXT_BYTES);
    for (int i = 0; i < 12; ++i) { /* whatever it says the worst is another position */
        result = spdl_pipeline_next(p, &item, SPDL_FOREVER);
        FUZZ_CHECK(result == SPDL_OK || result == SPDL_END);
        if (result != SPDL_OK) break;
        if (how & 16) spdl_buffer_free(item);
        else spdl_batch_free(item);
    }
    spdl_pipeline_destroy(p);
    spdl_sampler_destroy(sampler);
}

/* --- JSON --- */

static const uint8_t *skip_value(const uint8_t *at);

/* A character of UTF-8 that is no control character. */
static const uint8_t *skip_character(const uint8_t *at) {
    int more = *at < 0x80 ? 0 : *at >= 0xc2 && *at < 0xe0 ? 1 : *at >= 0xe0 && *at < 0xf0 ? 2 : 3;
    FUZZ_CHECK(*at >= ' ' && (*at < 0x80 || (*at >= 0xc2 && *at < 0xf5)));
    for (++at; more > 0; --more, ++at) FUZZ_CHECK((*at & 0xc0) == 0x80);
    return at;
}

static const uint8_t *skip_string(const uint8_t *at) {
    FUZZ_CHECK(*at++ == '"');
    while (*at != '"') {
        if (*at == '\\') FUZZ_CHECK(strchr("\"\\/bfnrtu", *++at) != NULL && *at != '\0');
        at = skip_character(at);
    }
    return at + 1;
}

static const uint8_t *skip_members(const uint8_t *at, uint8_t end, bool names) {
    if (*++at == end) return at + 1;
    for (;; ++at) {
        if (names) at = skip_string(at);
        if (names) FUZZ_CHECK(*at++ == ':');
        while (*at == ' ') ++at;
        at = skip_value(at);
        while (*at == ' ') ++at;
        if (*at == end) return at + 1;
        FUZZ_CHECK(*at == ',');
        while (at[1] == ' ') ++at;
    }
}

static const uint8_t *skip_value(const uint8_t *at) {
    const size_t word = strspn((const char *)at, "+-.0123456789eEtrufalsn");
    if (*at == '{') return skip_members(at, '}', true);
    if (*at == '[') return skip_members(at, ']', false);
    if (*at == '"') return skip_string(at);
    FUZZ_CHECK(word > 0);
    return at + word;
}

static void check_report(const char *path) {
    static char text[1 << 18];
    FILE *file = fopen(path, "rb");
    size_t length;
    const uint8_t *at = (const uint8_t *)text;
    if (file == NULL) return;
    length = fread(text, 1, sizeof text - 1, file);
    text[length] = '\0';
    while (*at != '\0') {
        at = skip_value(at);
        FUZZ_CHECK(*at == '\n');
        ++at;
    }
    fclose(file);
    remove(path);
}

/* --- the environment --- */

/* The next line of the input, without what could leave the folder. */
static const char *next_line(const uint8_t **data, size_t *bytes, char *to, size_t room) {
    size_t length = 0;
    while (*bytes > 0 && **data != '\n') {
        const char c = (char)**data;
        if (length + 1 < room && c != '\0' && c != '/' && c != '%') to[length++] = c;
        ++*data;
        --*bytes;
    }
    if (*bytes > 0) ++*data;
    if (*bytes > 0) --*bytes;
    to[length] = '\0';
    return to;
}

/* Tables and doctors go to stderr: not while many are tried, unless FUZZ_LOUD is set. */
static void hush(bool on) {
    static int loud = -1;
    const int nothing = on && getenv("FUZZ_LOUD") == NULL ? open("/dev/null", O_WRONLY) : -1;
    if (loud < 0) loud = dup(2);
    if (nothing >= 0) dup2(nothing, 2);
    if (nothing >= 0) close(nothing);
    if (!on) dup2(loud, 2);
}

static void try_environment(const uint8_t *data, size_t bytes) {
    static const char *const names[] = { "SPDL_STATS", "SPDL_DOCTOR", "RANK", "WORLD_SIZE",
                                         "SPDL_TRACE" };
    char value[200], path[300], report[80], row[100], other[100];
    spdl_pipeline_desc desc = { 0 };
    spdl_report_desc to_file = { 0 };
    spdl_pipeline *p = NULL;
    spdl_ranks ranks;
    void *item;
    memset(&error, 0, sizeof error);
    for (int i = 0; i < 5; ++i) {
        next_line(&data, &bytes, value, sizeof value);
        snprintf(path, sizeof path, "%s%s", i == 4 ? folder : "", value);
        if (value[0] != '\0') setenv(names[i], path, 1);
        else unsetenv(names[i]);
    }
    hush(true);
    (void)spdl_ranks_from_env(&ranks, &error);
    next_line(&data, &bytes, row, sizeof row);
    next_line(&data, &bytes, other, sizeof other);
    snprintf(report, sizeof report, "%sreport", folder);
    to_file.json = report;
    desc.report = &to_file;
    desc.logger.log_fn = quiet;
    desc.error = &error;
    if (spdl_pipeline_create(&p, &desc, SPDL_STAGES(SPDL_SOURCE(five, .name = row),
                                                    SPDL_PIPE(pass, .name = other),
                                                    SPDL_SINK(1))) == SPDL_OK)
        while (spdl_pipeline_next(p, &item, SPDL_FOREVER) == SPDL_OK) {}
    else
        FUZZ_CHECK(error.text[0] != '\0');
    spdl_pipeline_destroy(p);
    hush(false);
    for (int i = 0; i < 5; ++i) unsetenv(names[i]);
    check_report(report);
}

static void remove_folder(void) {
    char command[100];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    if (system(command) != 0) return;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    const unsigned how = bytes > 0 ? data[0] : 0;
    if (bytes < 2 || bytes > 5000) return 0;
    if (folder[0] == '\0') {
        snprintf(folder, sizeof folder, "%s/spdl_fuzz_XXXXXX",
                 access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
        if (mkdtemp(folder) == NULL) abort();
        atexit(remove_folder);
        strcat(folder, "/");
    }
    if (how & 1) try_environment(data + 1, bytes - 1);
    else try_state(data + 1, bytes - 1, how);
    return 0;
}
