/* spdl_cuda.h - v0.1.0 - CUDA companion of spdl.h - SPDX-License-Identifier: MIT

   DO THIS: in exactly one C or C++ file of your program,

       #define SPDL_IMPLEMENTATION
       #include "spdl.h"
       #define SPDL_CUDA_IMPLEMENTATION
       #include "spdl_cuda.h"

   and link the CUDA runtime (-lcudart, or -lcudart_static -ldl -lrt -lpthread). Plain C on the CUDA
   runtime API: nvcc is not needed. The declarations need no CUDA header.

   So far it holds one thing: a probe that says which devices there are, and if there are none, why.

   CONTENTS (search for the tag)
       >>probe                  declarations
       >>probe-impl  >>license  implementation

   License (MIT) at the end of the file. */

#ifndef SPDL_CUDA_H_INCLUDED
#define SPDL_CUDA_H_INCLUDED

#ifndef SPDL_H_INCLUDED
#error "include spdl.h before spdl_cuda.h"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ============================================================================================= */
/* >>probe */

#define SPDL_CUDA_MAX_DEVICES 16

typedef struct spdl_cuda_device {
    char name[64];
    int major, minor;      /* compute capability */
    uint64_t memory_bytes; /* of the device, in all */
} spdl_cuda_device;

typedef struct spdl_cuda_info {
    int device_count;    /* that can be used; the first SPDL_CUDA_MAX_DEVICES are described */
    int driver_version;  /* the CUDA version the driver supports, 12040 for 12.4; 0: no driver */
    int runtime_version; /* of the runtime that is linked */
    char reason[160];    /* why there is no device; empty when there is one */
    spdl_cuda_device device[SPDL_CUDA_MAX_DEVICES];
} spdl_cuda_info;

/* Says which CUDA devices there are, or why there is none: no driver, a driver older than the
   runtime, no device, or what the runtime says. Never fails; makes no context and leaves no CUDA
   error behind that the runtime can clear.
   Returns: nothing; *info is filled in whatever happens.
   Threads: any.
   Blocks:  while the driver starts, the first time.
   Owns:    nothing. */
SPDL_API void spdl_cuda_probe(spdl_cuda_info *info);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* SPDL_CUDA_H_INCLUDED */

/* ============================================================================================= */
/* IMPLEMENTATION                                                                                */
/* ============================================================================================= */

#if defined(SPDL_CUDA_IMPLEMENTATION) && !defined(SPDL_CUDA_IMPLEMENTATION_INCLUDED)
#define SPDL_CUDA_IMPLEMENTATION_INCLUDED

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>

/* ============================================================================================= */
/* >>probe-impl
   Any thread; no state. cudaDriverGetVersion comes first because it is the one call that succeeds,
   and leaves no error, on a machine without a driver; cudaGetDeviceCount does not even write its
   result there. */

SPDL__UNUSED static void spdl__cuda_reason(spdl_cuda_info *info, const char *call,
                                           cudaError_t error) {
    (void)snprintf(info->reason, sizeof(info->reason), "%s: %s", call, cudaGetErrorString(error));
    (void)cudaGetLastError(); /* clears it, unless it is one that stays */
}

SPDL__UNUSED static bool spdl__cuda_describe(spdl_cuda_info *info, int i) {
    spdl_cuda_device *device = &info->device[i];
    struct cudaDeviceProp properties;
    const cudaError_t error = cudaGetDeviceProperties(&properties, i);
    if (error != cudaSuccess) {
        spdl__cuda_reason(info, "cudaGetDeviceProperties", error);
        return false;
    }
    (void)snprintf(device->name, sizeof(device->name), "%.63s", properties.name);
    device->major = properties.major;
    device->minor = properties.minor;
    device->memory_bytes = properties.totalGlobalMem;
    return true;
}

SPDL_API void spdl_cuda_probe(spdl_cuda_info *info) {
    cudaError_t error;
    int i, count = 0;
    memset(info, 0, sizeof(*info));
    (void)cudaRuntimeGetVersion(&info->runtime_version);
    error = cudaDriverGetVersion(&info->driver_version);
    if (error != cudaSuccess || info->driver_version == 0) {
        (void)snprintf(info->reason, sizeof(info->reason), "no NVIDIA driver was found");
        return;
    }
    error = cudaGetDeviceCount(&count);
    if (error == cudaErrorInsufficientDriver)
        (void)snprintf(info->reason, sizeof(info->reason),
                       "the driver supports CUDA %d.%d, the program is linked with %d.%d",
                       info->driver_version / 1000, info->driver_version % 1000 / 10,
                       info->runtime_version / 1000, info->runtime_version % 1000 / 10);
    else if (error != cudaSuccess)
        spdl__cuda_reason(info, "cudaGetDeviceCount", error);
    else if (count == 0)
        (void)snprintf(info->reason, sizeof(info->reason), "the driver sees no device");
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        return;
    }
    for (i = 0; i < count && i < SPDL_CUDA_MAX_DEVICES; ++i)
        if (!spdl__cuda_describe(info, i)) return;
    info->device_count = count;
}

#endif /* SPDL_CUDA_IMPLEMENTATION */

/* ============================================================================================= */
/* >>license
   MIT License

   Copyright (c) 2026 the spdl.h authors

   Permission is hereby granted, free of charge, to any person obtaining a copy
   of this software and associated documentation files (the "Software"), to deal
   in the Software without restriction, including without limitation the rights
   to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
   copies of the Software, and to permit persons to whom the Software is
   furnished to do so, subject to the following conditions:

   The above copyright notice and this permission notice shall be included in all
   copies or substantial portions of the Software.

   THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
   IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
   FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
   AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
   LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
   OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
   SOFTWARE. */
