/* With and without CUDA, in C, C++ and CUDA: what is there is told, batches arrive, on a device or
   on the CPU, and outputs come back. tests/check_cuda.sh builds and runs it. */
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

static void probe(void) {
    spdl_cuda_info info;
    int i;
    memset(&info, 0xff, sizeof(info));
    spdl_cuda_probe(&info);
    CHECK(info.device_count >= 0);
    CHECK((info.device_count > 0) == (info.reason[0] == '\0'));
    for (i = 0; i < info.device_count && i < SPDL_CUDA_MAX_DEVICES; ++i) {
        printf("device %d: %s, compute capability %d.%d, %.1f GiB\n", i, info.device[i].name,
               info.device[i].major, info.device[i].minor,
               (double)info.device[i].memory_bytes / (1024.0 * 1024.0 * 1024.0));
        CHECK(info.device[i].name[0] != '\0' && info.device[i].memory_bytes > 0);
    }
    if (info.device_count == 0) printf("no device: %s\n", info.reason);
}

static bool arrives(spdl_cuda *cuda, unsigned char value) {
    const uint64_t shape = 1000;
    spdl_cuda_output *out = NULL;
    spdl_cuda_host *host = NULL;
    spdl_cuda_batch batch;
    void *data = NULL;
    if (spdl_cuda_host_get(cuda, &host, SPDL_FOREVER) != SPDL_OK) return false;
    if (spdl_cuda_host_add(host, "x", "u1", 1, &shape, &data) != SPDL_OK) return false;
    memset(data, value, 1000);
    if (spdl_cuda_send(host, &batch, SPDL_FOREVER) != SPDL_OK) return false;
    if (spdl_cuda_ready(&batch, NULL) != SPDL_OK) return false;
    if (spdl_cuda_arrived(&batch, SPDL_SECONDS(10)) != SPDL_OK) return false;
    if (spdl_cuda_done(&batch, NULL) != SPDL_OK) return false;
    if (spdl_cuda_output_get(cuda, NULL, &out, SPDL_FOREVER) != SPDL_OK) return false;
    if (spdl_cuda_output_send(out) != SPDL_OK) return false;
    if (spdl_cuda_output_wait(out, SPDL_SECONDS(10)) != SPDL_OK) return false;
    spdl_cuda_output_free(out);
    return true;
}

int main(void) {
    spdl_cuda_desc desc;
    spdl_error error;
    spdl_cuda *cuda = NULL;
    int i;
    probe();
    memset(&desc, 0, sizeof(desc));
    memset(&error, 0, sizeof(error));
    desc.slot_bytes = 4096;
    desc.output_bytes = 4096;
    desc.error = &error;
    CHECK(spdl_cuda_open(&cuda, &desc) == SPDL_OK);
    if (cuda == NULL) printf("%s\n", error.text);
    for (i = 0; i < 20 && cuda != NULL; ++i) CHECK(arrives(cuda, (unsigned char)i));
    if (cuda != NULL) printf("runs on %s\n", spdl_cuda_on_cpu(cuda) ? "the CPU" : "a device");
    spdl_cuda_close(cuda);
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}
