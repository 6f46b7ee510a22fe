/* The probe of spdl_cuda.h, linked with the real CUDA runtime; run by `make check-cuda`. */

#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#define SPDL_CUDA_IMPLEMENTATION
#include "../spdl_cuda.h"

int main(void) {
    spdl_cuda_info info;
    bool ok;
    int i;
    memset(&info, 0xff, sizeof(info));
    spdl_cuda_probe(&info);
    ok = info.device_count >= 0 && info.runtime_version > 0 &&
         (info.device_count > 0) == (info.reason[0] == '\0');
    for (i = 0; i < info.device_count && i < SPDL_CUDA_MAX_DEVICES; ++i) {
        printf("device %d: %s, compute capability %d.%d, %.1f GiB\n", i, info.device[i].name,
               info.device[i].major, info.device[i].minor,
               (double)info.device[i].memory_bytes / (1024.0 * 1024.0 * 1024.0));
        ok = ok && info.device[i].name[0] != '\0' && info.device[i].memory_bytes > 0;
    }
    if (info.device_count == 0) printf("no device: %s\n", info.reason);
    printf(ok ? "1 passed, 0 failed\n" : "0 passed, 1 failed\n");
    return ok ? 0 : 1;
}
