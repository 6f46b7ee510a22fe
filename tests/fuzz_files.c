/* Feeds any bytes to what reads tar archives, lines and lists of files. The first byte picks which
   of them, how, and the side of the guard page of what is in memory. Records have to be pieces of
   the file, and what is refused is told in a text. */
#define SPDL_STATIC
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#include "fuzz.h"

enum { BLOCK_FILE };

static char path[64];
static spdl_error error;

static void remove_file(void) { remove(path); }

/* In memory, where there is such a folder. */
static void put_file(const uint8_t *data, size_t bytes) {
    FILE *file;
    if (path[0] == '\0') {
        const char *folder = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
        snprintf(path, sizeof path, "%s/spdl_fuzz_%ld", folder, (long)getpid());
        atexit(remove_file);
    }
    file = fopen(path, "wb");
    if (file == NULL || fwrite(data, 1, bytes, file) != bytes) abort();
    fclose(file);
}

static void check_result(spdl_result result) {
    FUZZ_CHECK((result < 0) == (error.text[0] != '\0'));
    FUZZ_CHECK(result >= 0 || result == error.result);
}

static void check_record(const spdl_record *record, const uint8_t *data, size_t bytes) {
    FUZZ_CHECK(record->offset <= bytes && record->bytes <= bytes - record->offset);
    FUZZ_CHECK(memcmp(record->data, data + record->offset, record->bytes) == 0);
    FUZZ_CHECK(record->data[record->bytes] == 0 && strlen(record->name) < 4096);
}

/* How many records there are. */
static uint64_t try_records(const uint8_t *data, size_t bytes, spdl__records_kind kind,
                            bool group) {
    spdl_records_desc desc = { group, kind == SPDL__RECORDS_LINES ? 1000 : 20000,
                               { NULL, NULL, NULL }, &error };
    spdl__records *records;
    spdl_record *record = NULL;
    spdl_result result;
    uint64_t count = 0, last = 0;
    FUZZ_CHECK(spdl__records_open(&records, path, kind, &desc) == SPDL_OK);
    while ((result = spdl__records_next(records, &record, &error)) == SPDL_OK) {
        const spdl_record *r = record;
        for (; r != NULL; r = r->next, ++count) {
            check_record(r, data, bytes);
            FUZZ_CHECK(r->offset >= last && (group || r == record));
            last = r->offset;
        }
        spdl_record_free(record);
    }
    check_result(result);
    FUZZ_CHECK(count <= bytes);
    spdl__records_close(records);
    return result == SPDL_END ? count : UINT64_MAX;
}

/* Only names of its own: a list may name any file of the machine, but not here. */
static void try_list(const uint8_t *data, size_t bytes) {
    char list[80];
    spdl_files_desc desc = { false, { NULL, NULL, NULL }, &error };
    spdl_files *files;
    if (memchr(data, '/', bytes) != NULL) return;
    snprintf(list, sizeof list, "@%s", path);
    check_result(spdl_files_open(&files, list, &desc));
    if (files != NULL) (void)spdl_files_hash(files);
    spdl_files_close(files);
}

/* Gives every block that is not empty the checksum it should have: what is behind that is read. */
static void repair(uint8_t *at, size_t bytes) {
    char text[16];
    for (; bytes >= 512; at += 512, bytes -= 512) {
        unsigned sum = 0;
        int i;
        for (i = 0; i < 512; ++i) sum += at[i];
        if (sum == 0) continue;
        for (i = 148; i < 156; ++i) sum += ' ' - (unsigned)at[i];
        snprintf(text, sizeof text, "%06o", sum);
        memcpy(at + 148, text, 8);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    const unsigned how = bytes > 0 ? data[0] : 0;
    const spdl_files_desc desc = { false, { NULL, NULL, NULL }, &error };
    spdl_files *files;
    uint8_t *at;
    if (bytes < 2 || bytes > 200000) return 0;
    at = fuzz_copy(BLOCK_FILE, data + 1, --bytes, (how & 8) != 0);
    if (how % 8 == 0 && (how & 32) != 0) repair(at, bytes);
    memset(&error, 0, sizeof error);
    put_file(at, bytes);
    FUZZ_CHECK(spdl_files_open(&files, path, &desc) == SPDL_OK);
    FUZZ_CHECK(files->at[0].bytes == bytes);
    switch (how % 8) {
    case 1: (void)try_records(at, bytes, SPDL__RECORDS_LINES, false); break;
    case 5: try_list(at, bytes); break;
    default: (void)try_records(at, bytes, SPDL__RECORDS_TAR, (how & 16) != 0); break;
    }
    spdl_files_close(files);
    return 0;
}
