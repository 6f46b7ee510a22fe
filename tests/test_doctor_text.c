/* The doctor's report as text, JSON and page, of reports made here: every outcome and class, and
   fields that hold what they never should. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "test.h"

#include <locale.h>
#include <math.h>

/* --- reports --- */

static spdl_interval between(double low, double value, double high) {
    spdl_interval made = { 0 };
    made.value = value;
    made.low = low;
    made.high = high;
    made.rounds = 12;
    made.known = true;
    return made;
}

static void add_row(spdl_doctor_report *r, const char *name, spdl_kind kind, int concurrency,
                    double cpu_ms, double blocked_ms) {
    spdl_doctor_row *row = &r->row[r->row_count++];
    snprintf(row->name, sizeof row->name, "%s", name);
    row->kind = kind;
    row->concurrency = concurrency;
    row->visits = 1;
    row->cpu_ns = 1e6 * cpu_ms;
    row->blocked_ns = 1e6 * blocked_ms;
    row->mean_ns = row->cpu_ns + row->blocked_ns;
    row->load = 239 * row->mean_ns * 1e-9 / concurrency;
    row->most = row->mean_ns > 0 ? 1e9 * concurrency / row->mean_ns : HUGE_VAL;
    row->twice = row->load > 0.9 ? 1.94 : 1;
}

static void add_arm(spdl_doctor_report *r, const char *name, int stage, double rate) {
    spdl_doctor_arm *arm = &r->arm[r->arm_count++];
    snprintf(arm->name, sizeof arm->name, "%s", name);
    arm->stage = stage;
    arm->rounds = 12;
    arm->confirming = r->arm_count > 4;
    for (int i = 0; i < arm->rounds; ++i) arm->rate[i] = (float)(rate * (0.99 + 0.002 * i));
    arm->rate[3] = 0;
}

/* A pipeline whose `decode` computes 4 ms, one call at a time: it replays, and slows as well. */
static void report_of_decode(spdl_doctor_report *r) {
    memset(r, 0, sizeof *r);
    r->outcome = SPDL_DOCTOR_LIMIT;
    r->limit = SPDL_LIMIT_CONCURRENCY;
    r->stage = 2;
    r->next_stage = -1;
    r->seconds = 10.2;
    r->workers = 4;
    r->cores = 2;
    r->cores_used = 0.99;
    r->others_used = 0.02;
    r->step_ns = 2.06e6;
    r->step_cpu_ns = 0.31e6;
    r->today = 239;
    r->model = 244;
    r->ceiling = 484.4;
    r->waiting = 0.51;
    r->harm = 0.002;
    r->hours = 31;
    r->hours_less = 15.7;
    r->same = between(0.99, 1.002, 1.01);
    r->noise = 0.015;
    r->replays = true;
    r->cached = between(2.01, 2.02, 2.03);
    r->trainer_asleep = between(0.98, 0.995, 1.01);
    r->next_limit = SPDL_LIMIT_TRAINER;
    r->next_rate = 484.4;
    r->rounds = 14;
    r->dropped = 2;
    snprintf(r->verdict, sizeof r->verdict,
             "stage 'decode' holds the trainer back: it computes, one call at a time, and 1.01 of "
             "2 processors are free. Write .concurrency = 3: 1.98x was measured.");
    add_row(r, "list", SPDL_KIND_SOURCE, 1, 0, 0);
    add_row(r, "read", SPDL_KIND_PIPE, 4, 0.01, 1.05);
    add_row(r, "decode", SPDL_KIND_PIPE, 1, 4, 0.0);
    add_row(r, "collate", SPDL_KIND_PIPE, 1, 0.1, 0);
    add_row(r, "sink", SPDL_KIND_SINK, 1, 0, 0);
    r->row[1].method = r->row[2].method = SPDL_DOCTOR_REPLAYED;
    r->row[1].replayed = between(0.99, 1.01, 1.03);
    r->row[2].replayed = between(2.00, 2.01, 2.03);
    r->row[2].computing = between(0.81, 0.83, 0.85);
    r->row[2].asleep = between(0.82, 0.84, 0.86);
    r->row[2].delay_ns = 0.8e6;
    r->row[3].method = SPDL_DOCTOR_SLOWED;
    r->row[3].computing = between(0.98, 0.997, 1.01);
    r->row[3].delay_ns = 0.04e6;
    r->trial_count = 2;
    r->trial[0].stage = r->trial[1].stage = 2;
    r->trial[0].from = 1;
    r->trial[0].to = r->trial[1].from = 2;
    r->trial[1].to = 3;
    r->trial[0].predicted = 1.98;
    r->trial[0].measured = between(1.93, 1.95, 1.98);
    r->trial[1].predicted = 1.02;
    r->trial[1].measured = between(1.01, 1.015, 1.02);
    r->trial[0].kept = r->trial[1].kept = true;
    add_arm(r, "as it is", -1, 239);
    add_arm(r, "same again", -1, 239.4);
    add_arm(r, "after read", 1, 242);
    add_arm(r, "after decode", 2, 483);
    add_arm(r, "decode 1 -> 2", 2, 466);
}

static double anything(uint64_t *state) {
    static const double odd[] = { 0, -1, 1, 0.5, 1e-30, 1e30, 1e300, 999.6, 1e12, -1e300, 1e18 };
    const uint64_t k = test_random(state) % 14;
    return k == 11 ? (double)NAN : k == 12 ? HUGE_VAL : k == 13 ? -HUGE_VAL : odd[k];
}

static spdl_interval any_interval(uint64_t *state) {
    spdl_interval made = { 0 };
    made.value = anything(state);
    made.low = anything(state);
    made.high = anything(state);
    made.rounds = (int)test_random(state);
    made.known = test_random(state) & 1;
    return made;
}

static void any_name(char *name, size_t bytes, uint64_t *state) {
    static const char *const odd[] = { "", "</pre><b>\"&'", "a\x01\n\t\x7f", "\xff\xf0\x28\x8c\x28",
                                       "%s%n%d", "\xc3\xa4\xc3\xb6 \xe2\x82\xac", "a b  c" };
    const uint64_t k = test_random(state) % 9;
    if (k < 7) {
        snprintf(name, bytes, "%s", odd[k]);
    } else {
        memset(name, k == 7 ? 'w' : '<', bytes - 1);
        name[bytes - 1] = '\0';
    }
}

static void any_row(spdl_doctor_row *row, uint64_t *state) {
    double *const numbers[] = { &row->visits, &row->mean_ns, &row->cpu_ns, &row->runnable_ns,
                                &row->blocked_ns, &row->load, &row->most, &row->twice,
                                &row->delay_ns };
    for (size_t k = 0; k < sizeof numbers / sizeof numbers[0]; ++k) *numbers[k] = anything(state);
    any_name(row->name, sizeof row->name, state);
    row->kind = (spdl_kind)(test_random(state) % 20);
    row->method = (spdl_doctor_method)(test_random(state) % 5);
    row->concurrency = (int)test_random(state);
    row->replayed = any_interval(state);
    row->computing = any_interval(state);
    row->asleep = any_interval(state);
}

/* Everything is full, and nothing as it should be. */
static void report_hostile(spdl_doctor_report *r, uint64_t *state) {
    double *const numbers[] = { &r->seconds, &r->cores, &r->cores_used, &r->others_used,
                                &r->step_ns, &r->step_cpu_ns, &r->today, &r->model, &r->ceiling,
                                &r->waiting, &r->harm, &r->hours, &r->hours_less,
                                &r->noise };
    int *const counts[] = { &r->stage, &r->next_stage, &r->workers, &r->rounds, &r->dropped };
    memset(r, 0, sizeof *r);
    for (size_t k = 0; k < sizeof numbers / sizeof numbers[0]; ++k) *numbers[k] = anything(state);
    for (size_t k = 0; k < sizeof counts / sizeof counts[0]; ++k)
        *counts[k] = (int)test_random(state);
    if (test_random(state) & 1) r->stage = (int)(test_random(state) % SPDL_MAX_STAGES);
    r->outcome = (spdl_doctor_outcome)(test_random(state) % 9);
    if (test_random(state) & 1) r->outcome = SPDL_DOCTOR_LIMIT;
    r->limit = (spdl_limit)(test_random(state) % 20);
    r->same = any_interval(state);
    r->cached = any_interval(state);
    r->trainer_asleep = any_interval(state);
    r->row_count = SPDL_MAX_STAGES;
    r->trial_count = SPDL_DOCTOR_TRIALS;
    r->arm_count = 2 * SPDL_DOCTOR_ARMS;
    for (int i = 0; i < r->row_count; ++i) any_row(&r->row[i], state);
    for (int i = 0; i < r->trial_count; ++i) {
        spdl_doctor_trial *trial = &r->trial[i];
        trial->change = (spdl_doctor_change)(test_random(state) % 4);
        trial->stage = (int)(test_random(state) % 40) - 2;
        trial->from = (int)test_random(state);
        trial->to = (int)test_random(state);
        trial->predicted = anything(state);
        trial->measured = any_interval(state);
        trial->kept = test_random(state) & 1;
    }
    for (int i = 0; i < r->arm_count; ++i) {
        spdl_doctor_arm *arm = &r->arm[i];
        any_name(arm->name, sizeof arm->name, state);
        arm->rounds = (int)(test_random(state) % 100);
        for (int k = 0; k < SPDL_DOCTOR_ROUNDS; ++k) arm->rate[k] = (float)anything(state);
    }
    any_name(r->verdict, sizeof r->verdict, state);
}

/* --- what is written --- */

typedef int (*write_fn)(const spdl_doctor_report *report, char *buffer, size_t bytes);

static const write_fn writers[] = { spdl_doctor_text, spdl_doctor_json, spdl_doctor_html };

/* All of it; to be freed. */
static char *written(write_fn fn, const spdl_doctor_report *r) {
    const int length = fn(r, NULL, 0);
    char *text = (char *)malloc((size_t)length + 1);
    REQUIRE(length > 0 && text != NULL);
    CHECK_EQ(fn(r, text, (size_t)length + 1), length);
    CHECK_EQ(strlen(text), length);
    CHECK_EQ(text[length - 1], '\n');
    return text;
}

static bool says(const char *text, const char *words) { return strstr(text, words) != NULL; }

/* The same, wherever the text has its ends of lines. */
static bool says_wrapped(const char *text, const char *words) {
    char *line = strdup(text);
    bool found;
    size_t to = 0;
    for (size_t i = 0; text[i] != '\0'; ++i) {
        const char c = text[i] == '\n' ? ' ' : text[i];
        if (c != ' ' || (to > 0 && line[to - 1] != ' ')) line[to++] = c;
    }
    line[to] = '\0';
    found = says(line, words);
    free(line);
    return found;
}

static int count_of(const char *text, const char *words) {
    int count = 0;
    for (const char *at = strstr(text, words); at; at = strstr(at + 1, words)) ++count;
    return count;
}

/* Lines of at most 80 characters, without control characters. */
static bool fits_a_terminal(const char *text) {
    int column = 0;
    for (const char *at = text; *at != '\0';) {
        const int length = spdl__utf8(at);
        if (length == 0 || (*at != '\n' && ((unsigned char)*at < 0x20 || *at == 0x7f)))
            return false;
        column = *at == '\n' ? 0 : column + 1;
        if (column > 80) return false;
        at += length;
    }
    return true;
}

/* --- readers, strict --- */

static const char *json_value(const char *at);

static const char *json_string(const char *at) {
    if (*at++ != '"') return NULL;
    while (*at != '"') {
        const int length = spdl__utf8(at);
        if (length == 0 || (unsigned char)*at < 0x20) return NULL;
        if (*at == '\\' && at[1] != 'u') return NULL;
        at += *at == '\\' ? 2 : length;
    }
    return at + 1;
}

static const char *json_list(const char *at, bool object) {
    const char end = object ? '}' : ']';
    if (*++at == end) return at + 1;
    for (;; ++at) {
        while (*at == '\n') ++at;
        if (object) {
            at = json_string(at);
            if (at == NULL || *at++ != ':') return NULL;
        }
        at = json_value(at);
        if (at == NULL) return NULL;
        if (*at == end) return at + 1;
        if (*at != ',') return NULL;
    }
}

/* What comes after the value at `at`; NULL when there is none. */
static const char *json_value(const char *at) {
    static const char *const words[] = { "true", "false", "null" };
    const char *number = at + (*at == '-');
    while (*at == '\n') ++at;
    if (*at == '"') return json_string(at);
    if (*at == '{' || *at == '[') return json_list(at, *at == '{');
    for (int i = 0; i < 3; ++i)
        if (strncmp(at, words[i], strlen(words[i])) == 0) return at + strlen(words[i]);
    if (strspn(number, "0123456789") == 0) return NULL;
    number += strspn(number, "0123456789");
    if (*number != '.') return number;
    return strspn(number + 1, "0123456789") ? number + 1 + strspn(number + 1, "0123456789") : NULL;
}

static bool is_json(const char *text) {
    const char *end = json_value(text);
    return end != NULL && strcmp(end, "\n") == 0;
}

/* The tag at `at`, its attributes quoted: where it ends, and its name. NULL when it is none. */
static const char *html_tag(const char *at, char name[16]) {
    const size_t length = strspn(at, "/!abcdefghijklmnopqrstuvwxyz123456789");
    if (length == 0 || length > 15) return NULL;
    memcpy(name, at, length);
    name[length] = '\0';
    for (at += length; *at != '>'; ++at) {
        if (*at == '\'') at = strchr(at + 1, '\'');
        if (at == NULL || *at == '\0' || *at == '<' || *at == '&') return NULL;
    }
    return at + 1;
}

/* Every element is closed where it has to be, and every & begins an entity. */
static bool is_page(const char *at) {
    char open[16][16], name[16];
    int depth = 0;
    while (*at != '\0') {
        const int length = spdl__utf8(at);
        if (length == 0) return false;
        if (*at == '&' && (at[1] != '#' || at[2 + strspn(at + 2, "0123456789")] != ';'))
            return false;
        at += length;
        if (at[-1] != '<') continue;
        at = html_tag(at, name);
        if (at == NULL) return false;
        if (name[0] == '/' && (depth == 0 || strcmp(open[--depth], name + 1) != 0)) return false;
        if (name[0] == '/' || name[0] == '!' || at[-2] == '/' || strcmp(name, "meta") == 0)
            continue;
        if (depth == 16) return false;
        memcpy(open[depth++], name, sizeof name);
    }
    return depth == 0;
}

/* --- tests --- */

static void text_of_a_limit(void) {
    static spdl_doctor_report r;
    char *text;
    report_of_decode(&r);
    text = written(spdl_doctor_text, &r);
    CHECK(fits_a_terminal(text));
    CHECK(strncmp(text, "spdl doctor: stage 'decode' holds the trainer back:", 50) == 0);
    CHECK(says_wrapped(text, "10.2 s, 14 rounds (2 dropped: others had processors) with a "
                             "noise of 1.5 %, 4 workers, 0.99 of 2 processors used, 0.02 by "
                             "others; items were repeated: what the trainer learned is void"));
    CHECK(says(text, "\n  trainer          on kept items        483/s    2.02x  2.01 to 2.03"));
    CHECK(says(text, "\n                   asleep +20 %         238/s     -1 %  -2 to +1 %"));
    CHECK(says(text, "\n> decode           replayed             480/s    2.01x  2.00 to 2.03"
                     "         12\n"));
    CHECK(says(text, "computing +20 %      198/s    -17 %  -19 to -15 %         12\n"));
    CHECK(says(text, "asleep +20 %         201/s    -16 %  -18 to -14 %         12\n"));
    CHECK(says(text, "\n  as it is                              239/s\n"));
    CHECK(says(text, "\n> decode              1  4.00 ms 100%   0%     0%   96%    250/s    "
                     "1.94x\n"));
    CHECK(strstr(text, "collate          computing +40 %") < strstr(text, "> decode"));
    CHECK(strstr(text, "read             replayed") > strstr(text, "> decode"));
    CHECK_EQ(count_of(text, "\n> "), 2);
    CHECK(says(text, "\n  decode           conc 1 -> 2           1.98x    1.95x  1.93 to 1.98     "
                     "kept\n"));
    CHECK_EQ(count_of(text, "write: "), 1); /* the later of two that were kept */
    CHECK(says(text, "\nwrite: .concurrency = 3 in the row of 'decode'\n"));
    CHECK(says_wrapped(text, "waited 51.0 % of the time for items, and for a processor in 0.2 %"));
    CHECK(says_wrapped(text, "at most 15.7 h less of 31.0 h: worth the work."));
    CHECK(says(text, "not known: ") && says(text, "replayed: results"));
    free(text);
    r.replays = false;
    text = written(spdl_doctor_text, &r);
    CHECK(!says(text, "replayed: ") && !says_wrapped(text, "repeated"));
    free(text);
}

static void text_says_when_to_stop(void) {
    static spdl_doctor_report r;
    char *text;
    report_of_decode(&r);
    r.hours_less = 0.4;
    text = written(spdl_doctor_text, &r);
    CHECK(says_wrapped(text, "at most 0.4 h less of 31.0 h: leave it."));
    free(text);
    r.hours = r.hours_less = 0;
    text = written(spdl_doctor_text, &r);
    CHECK(!says(text, "h less") && says(text, "headspace: "));
    free(text);
}

static void text_of_cold_files(void) {
    static spdl_doctor_report r;
    char *text;
    report_of_decode(&r);
    text = written(spdl_doctor_text, &r);
    CHECK(!says(text, "cold: "));
    CHECK(says(text, "not known: how it is with other data, or with files that are not in memory"));
    free(text);
    r.cools = true;
    r.from_cache = r.cold_from_cache = -1;
    text = written(spdl_doctor_text, &r);
    CHECK(says(text, "\ncold: not known: no file was seen"));
    CHECK(says(text, "not known: how it is with other data.\n"));
    free(text);
    text = written(spdl_doctor_json, &r);
    CHECK(says(text, "\"cools\":true,\"cold_files\":0,") && says(text, "\"from_cache\":null,"));
    free(text);
    r.cold_files = 3;
    r.cold_bytes = 1.5e9;
    r.cold = (spdl_interval){ 0.31, 0.28, 0.35, 8, true };
    text = written(spdl_doctor_text, &r);
    CHECK(says_wrapped(text, "cold: with 3 files of 1.50 GB not in memory 0.31x (0.28 to 0.35)"));
    CHECK(says_wrapped(text, "Of what is read - is in the page cache as it is, - then"));
    free(text);
    r.from_cache = 1;
    r.cold_from_cache = 0.04;
    text = written(spdl_doctor_text, &r);
    CHECK(says_wrapped(text, "Of what is read 100% is in the page cache as it is, 4% then"));
    CHECK(says_wrapped(text, "A warm cache makes reading look free"));
    free(text);
    r.cold_from_cache = 0.9; /* others are read than were taken out */
    text = written(spdl_doctor_text, &r);
    CHECK(says_wrapped(text, "90% of what was read was there all the same: how it is without is "
                             "not known."));
    CHECK(!says(text, "0.31x"));
    free(text);
}

static void text_of_changes(void) {
    static spdl_doctor_report r;
    char *text;
    report_of_decode(&r);
    r.trial[0].change = SPDL_DOCTOR_WORKERS;
    r.trial[0].stage = -1;
    r.trial[1].change = SPDL_DOCTOR_BUFFER;
    text = written(spdl_doctor_text, &r);
    CHECK(says(text, " workers 1 -> 2 ") && says(text, " buffer 2 -> 3 "));
    CHECK(says(text, "write: .workers = 2 in spdl_pipeline_desc\n"));
    CHECK(says(text, "write: SPDL_SINK(3)\n"));
    free(text);
    r.trial[0].change = SPDL_DOCTOR_POLITE;
    r.trial[0].to = 1;
    text = written(spdl_doctor_text, &r);
    CHECK(says(text, " SCHED_BATCH "));
    CHECK(says(text, "write: .policy.sched = SPDL_SCHED_BATCH in spdl_pipeline_desc\n"));
    free(text);
    r.trial[0].to = 2;
    r.trial[0].kept = r.trial[1].kept = false;
    r.trial[0].measured.known = false;
    text = written(spdl_doctor_text, &r);
    CHECK(!says(text, "write: "));
    CHECK(says(text, "  too few rounds   undone\n") && says(text, " polite "));
    free(text);
}

/* What takes less of the trainer's processors, and what does not. */
static void harm_names_what_helps(void) {
    static spdl__doctor d;
    spdl__text text = spdl__text_start(d.report.verdict, sizeof d.report.verdict);
    d.report.harm = 0.3;
    d.report.waiting = 0.01;
    spdl__doctor_say_harm(&text, &d);
    CHECK(says(d.report.verdict, "30 % of a step it waits for one, and 1.0 % of the time for "
                                 "items. Use fewer workers, or write .policy.polite = true (not "
                                 "tried). A loader process (spdl_loader_open) takes as much "
                                 "without that: what it keeps away is crashes and memory."));
}

/* What is not a limit is said in a few lines; and every outcome and class has its word. */
static void every_outcome_and_class(void) {
    static spdl_doctor_report r;
    char seen[7][16];
    for (int outcome = 0; outcome <= SPDL_DOCTOR_DISAGREE; ++outcome) {
        for (int limit = 0; limit <= SPDL_LIMIT_REQUESTS; ++limit) {
            char *text[3], key[64];
            report_of_decode(&r);
            r.outcome = (spdl_doctor_outcome)outcome;
            r.limit = (spdl_limit)limit;
            if (limit & 1) r.verdict[0] = '\0';
            r.trial_count = outcome == SPDL_DOCTOR_LIMIT ? 2 : 0;
            for (int k = 0; k < 3; ++k) text[k] = written(writers[k], &r);
            CHECK(fits_a_terminal(text[0]) && !says(text[0], "other\n"));
            CHECK(outcome == SPDL_DOCTOR_LIMIT || count_of(text[0], "\n") <= 10);
            CHECK(is_json(text[1]) && !says(text[1], "\"other\""));
            CHECK(is_page(text[2]));
            snprintf(key, sizeof key, "\"limit\":\"%s\"", spdl__found_limits[limit]);
            CHECK(says(text[1], key));
            snprintf(seen[outcome], sizeof seen[outcome], "%.15s",
                     strstr(text[1], "\"outcome\":") + 10);
            for (int k = 0; k < 3; ++k) free(text[k]);
        }
        for (int k = 0; k < outcome; ++k) CHECK(strcmp(seen[k], seen[outcome]) != 0);
    }
    CHECK_EQ(sizeof spdl__found_limits / sizeof(char *) - 1, SPDL_LIMIT_REQUESTS + 1);
    CHECK_EQ(sizeof spdl__found_outcomes / sizeof(char *) - 1, SPDL_DOCTOR_DISAGREE + 1);
}

static void empty_reports(void) {
    static spdl_doctor_report r;
    memset(&r, 0, sizeof r);
    for (int outcome = 0; outcome <= SPDL_DOCTOR_DISAGREE; ++outcome) {
        char *text[3];
        r.outcome = (spdl_doctor_outcome)outcome;
        for (int k = 0; k < 3; ++k) text[k] = written(writers[k], &r);
        CHECK(fits_a_terminal(text[0]) && is_json(text[1]) && is_page(text[2]));
        for (int k = 0; k < 3; ++k) CHECK(!says(text[k], "nan") && !says(text[k], "inf"));
        for (int k = 0; k < 3; ++k) free(text[k]);
    }
}

static void hostile_reports(void) {
    static spdl_doctor_report r;
    uint64_t state = test_seed();
    for (int i = 0; i < (TEST_SANITIZED ? 20 : 100); ++i) {
        char *text[3];
        report_hostile(&r, &state);
        for (int k = 0; k < 3; ++k) text[k] = written(writers[k], &r);
        CHECK(fits_a_terminal(text[0]));
        CHECK(is_json(text[1]));
        CHECK(is_page(text[2]));
        CHECK(!says(text[2], "<b>"));
        CHECK(strlen(text[0]) < SPDL__FOUND_BYTES); /* it is whole on the page */
        CHECK_EQ(count_of(text[1], "\"confirming\""), 2 * SPDL_DOCTOR_ARMS);
        CHECK_EQ(count_of(text[1], "\"delay_ns\""), SPDL_MAX_STAGES);
        for (int k = 0; k < 3; ++k) CHECK(!says(text[k], "nan%") && !says(text[k], "inf%"));
        for (int k = 0; k < 3; ++k) free(text[k]);
    }
    r.row_count = r.trial_count = r.arm_count = -7;
    for (int k = 0; k < 3; ++k) free(written(writers[k], &r));
    r.row_count = r.trial_count = r.arm_count = 1 << 30;
    for (int k = 0; k < 3; ++k) free(written(writers[k], &r));
}

/* As snprintf: whatever the size, the same length and a prefix of the same text. */
static void buffers_of_every_size(void) {
    static spdl_doctor_report r;
    report_of_decode(&r);
    for (int k = 0; k < 3; ++k) {
        char *whole = written(writers[k], &r);
        const size_t length = strlen(whole);
        for (size_t bytes = 0; bytes <= length + 1; bytes += k == 0 || bytes < 300 ? 1 : 61) {
            char *part = (char *)malloc(bytes + 1);
            REQUIRE(part != NULL);
            memset(part, '#', bytes + 1);
            CHECK_EQ(writers[k](&r, part, bytes), length);
            CHECK_EQ(part[bytes], '#');
            if (bytes > 0) {
                CHECK_EQ(strlen(part), bytes - 1 < length ? bytes - 1 : length);
                CHECK(strncmp(part, whole, bytes - 1) == 0);
            }
            free(part);
        }
        free(whole);
    }
}

/* The bytes of a struct that no field of its table has, padding left out. */
static size_t left_out(const spdl__found_field *field, size_t bytes) {
    size_t at = 0, left = 0;
    for (;; ++field) {
        const size_t next = field->name != NULL ? field->at : bytes;
        if (next >= at + 8) left += next - at;
        if (field->name == NULL) return left;
        at = next + (field->type == 'v'   ? sizeof(spdl_interval)
                     : field->type == 'd' ? sizeof(double)
                     : field->type == 'r' ? sizeof ((spdl_doctor_arm *)0)->rate
                     : field->type == 'b' ? 1 : sizeof(int));
        if (field->type == 's') at = field[1].name != NULL ? field[1].at : bytes;
    }
}

static void json_has_every_field(void) {
    static spdl_doctor_report r;
    char *text;
    report_of_decode(&r);
    text = written(spdl_doctor_json, &r);
    CHECK_EQ(left_out(spdl__found_fields, sizeof r),
             offsetof(spdl_doctor_report, verdict) - offsetof(spdl_doctor_report, row_count));
    CHECK_EQ(left_out(spdl__found_row_fields, sizeof r.row[0]), 0);
    CHECK_EQ(left_out(spdl__found_trial_fields, sizeof r.trial[0]), 0);
    CHECK_EQ(left_out(spdl__found_arm_fields, sizeof r.arm[0]), 0);
    CHECK(says(text, ",\"row\":[\n{\"name\":\"list\",") && says(text, "],\"trial\":[\n{"));
    CHECK(says(text, "],\"arm\":[\n{") && says(text, ",\"rate\":["));
    CHECK(strncmp(text, "{\"schema\":\"spdl.doctor.1\",", 26) == 0);
    CHECK(says(text, "\"outcome\":\"limit\",\"limit\":\"concurrency\",\"stage\":2,"));
    CHECK(says(text, "\"computing\":{\"value\":0.830000,\"low\":0.810000,\"high\":0.850000,"
                     "\"rounds\":12}"));
    CHECK(says(text, "\"replayed\":{\"value\":0,\"low\":null,\"high\":null,\"rounds\":0}"));
    CHECK(says(text, "\"most\":null"));           /* a row that calls nothing */
    CHECK(says(text, ",0,238.5"));                /* the round that was dropped */
    CHECK(says(text, "\"kind\":\"source\""));
    free(text);
}

static void a_locale_changes_no_point(void) {
    static spdl_doctor_report r;
    char *plain[2], *other[2];
    report_of_decode(&r);
    for (int k = 0; k < 2; ++k) plain[k] = written(writers[1 + k], &r);
    if (setlocale(LC_ALL, "de_DE.UTF-8") == NULL) TEST_SKIP("no locale with a comma");
    for (int k = 0; k < 2; ++k) other[k] = written(writers[1 + k], &r);
    setlocale(LC_ALL, "C");
    CHECK_STR(other[0], plain[0]);
    CHECK(is_page(other[1]));
    CHECK_EQ(count_of(other[1], ",0%'"), 0); /* places on the page */
    for (int k = 0; k < 2; ++k) free(plain[k]), free(other[k]);
}

static void page_of_a_limit(void) {
    static spdl_doctor_report r;
    char *page;
    report_of_decode(&r);
    page = written(spdl_doctor_html, &r);
    CHECK(is_page(page));
    CHECK(!says(page, "http") && !says(page, " src=") && !says(page, "@import"));
    CHECK(!says(page, "<script"));
    CHECK(says(page, "<h1>stage &#39;decode&#39; holds the trainer back"));
    CHECK(says(page, "--hot:") && says(page, "prefers-color-scheme:dark"));
    CHECK_EQ(count_of(page, "</style>"), 1);
    CHECK_EQ(count_of(page, "<circle"), 5 * 11); /* a round of each was dropped */
    CHECK_EQ(count_of(page, "<svg"), 8 + 4 + 5);
    CHECK_EQ(count_of(page, "<line"), 3 * (7 + 2));
    CHECK(says(page, "<p class='hot'>decode replayed: 480/s, 2.01x (2.00 to 2.03), 97 % of the "
                     "gap</p>"));
    CHECK(says(page, "<rect x='49.8%' y='2' width='49.3%' height='10' class='more'/>"));
    CHECK(says(page, "<pre class='card scroll'>spdl doctor: "));
    free(page);
}

TEST_TABLE(doctor_text) {
    TEST_CASE(text_of_a_limit),
    TEST_CASE(text_says_when_to_stop),
    TEST_CASE(text_of_cold_files),
    TEST_CASE(text_of_changes),
    TEST_CASE(harm_names_what_helps),
    TEST_CASE(every_outcome_and_class),
    TEST_CASE(empty_reports),
    TEST_CASE(hostile_reports),
    TEST_CASE(buffers_of_every_size),
    TEST_CASE(json_has_every_field),
    TEST_CASE(a_locale_changes_no_point),
    TEST_CASE(page_of_a_limit),
    TEST_END
};
