/* With and without CUDA, in C, C++ and CUDA: what is there is told; with a device batches arrive
   and outputs come back, without one open says why. tests/check_cuda.sh builds and runs it. */
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#define SPDL_CUDA_IMPLEMENTATION
#include "../spdl_cuda.h"

#include <stdio.h>

static int failed, passed;

static void check(bool held, const char *what) {
    if (held) ++passed;
    else printf("FAIL %s\n", what);
    if (!held) ++failed;
}

#define CHECK(...) check((__VA_ARGS__), #__VA_ARGS__)

static bool probe(void) {
    spdl_error error;
    int count;
    memset(&error, 0xff, sizeof(error));
    count = spdl_cuda_count(&error);
    CHECK(count >= 0);
    CHECK((count > 0) == (error.result == SPDL_OK && error.text[0] == '\0'));
    if (count > 0) printf("device 0 of %d\n", count);
    else printf("no device: %s\n", error.text);
    return count > 0;
}

static bool arrives(spdl_cuda *cuda, unsigned char value) {
    const spdl_allocator from = spdl_cuda_allocator(cuda);
    spdl_cuda_output *out = NULL;
    spdl_cuda_batch batch;
    spdl_cuda_view view;
    void *data = from.alloc_fn(4096, 64, from.user);
    bool held = data != NULL;
    if (!held) return false;
    memset(data, value, 4096);
    memset(&view, 0, sizeof(view));
    view.data = data;
    view.bytes = 4096;
    held = spdl_cuda_send(cuda, &view, &batch, SPDL_FOREVER) == SPDL_OK &&
           spdl_cuda_ready(&batch, NULL) == SPDL_OK &&
           spdl_cuda_arrived(&batch, SPDL_SECONDS(10)) == SPDL_OK &&
           spdl_cuda_done(&batch, NULL) == SPDL_OK &&
           spdl_cuda_output_get(cuda, NULL, &out, SPDL_FOREVER) == SPDL_OK &&
           spdl_cuda_output_send(out) == SPDL_OK &&
           spdl_cuda_output_wait(out, SPDL_SECONDS(10)) == SPDL_OK;
    spdl_cuda_output_free(out);
    from.free_fn(data, 4096, from.user);
    return held;
}

int main(void) {
    const bool there = probe();
    spdl_cuda_desc desc;
    spdl_error error;
    spdl_cuda *cuda = NULL;
    int i;
    memset(&desc, 0, sizeof(desc));
    memset(&error, 0, sizeof(error));
    desc.slot_bytes = 4096;
    desc.output_bytes = 4096;
    desc.error = &error;
    CHECK(spdl_cuda_open(&cuda, &desc) == (there ? SPDL_OK : SPDL_E_NOT_FOUND));
    CHECK(there == (cuda != NULL) && there == (error.text[0] == '\0'));
    if (cuda == NULL) printf("%s\n", error.text);
    for (i = 0; i < 20 && cuda != NULL; ++i) CHECK(arrives(cuda, (unsigned char)i));
    spdl_cuda_close(cuda);
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}
