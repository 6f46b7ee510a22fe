/* Whether the functions that spdl_cuda.h takes out of the driver are declared in cuda.h with as
   many arguments, of types that integers and pointers convert to as in its table, and under these
   names. Only to be compiled. */
#define SPDL_IMPLEMENTATION
#include "../spdl.h"
#define SPDL_CUDA_IMPLEMENTATION
#include "../spdl_cuda.h"

#include <cuda.h>

#define TEXT(name) #name
#define NAME(name) TEXT(name)
#define IS(name, version)                                                                          \
    _Static_assert(sizeof(NAME(cu##name)) == sizeof("cu" #name version) ||                         \
                       sizeof(version) == 1, #name)

#define CALL(name, version, parameters, arguments)                                                 \
    int type_##name parameters;                                                                    \
    int type_##name parameters {                                                                   \
        int (*ours) parameters = ((spdl__cuda_api *)0)->name; /* never run */                      \
        IS(name, version);                                                                         \
        (void)ours;                                                                                \
        return (int)cu##name arguments;                                                            \
    }

CALL(Init, "", (unsigned flags), (flags))
CALL(GetErrorString, "", (int error, const char **text), ((CUresult)error, text))
CALL(DeviceGetCount, "", (int *count), (count))
CALL(DeviceGet, "", (int *device, int ordinal), ((CUdevice *)device, ordinal))
CALL(DeviceGetName, "", (char *name, int bytes, int device), (name, bytes, (CUdevice)device))
CALL(DeviceGetAttribute, "", (int *value, int attribute, int device),
     (value, (CUdevice_attribute)attribute, (CUdevice)device))
CALL(DevicePrimaryCtxRetain, "", (void **context, int device),
     ((CUcontext *)context, (CUdevice)device))
CALL(DevicePrimaryCtxRelease, "_v2", (int device), ((CUdevice)device))
CALL(CtxGetCurrent, "", (void **context), ((CUcontext *)context))
CALL(CtxPushCurrent, "_v2", (void *context), ((CUcontext)context))
CALL(CtxPopCurrent, "_v2", (void **context), ((CUcontext *)context))
CALL(CtxGetDevice, "", (int *device), ((CUdevice *)device))
CALL(CtxSynchronize, "", (void), ())
CALL(ThreadExchangeStreamCaptureMode, "", (int *mode), ((CUstreamCaptureMode *)(void *)mode))
CALL(StreamCreate, "", (void **stream, unsigned flags), ((CUstream *)stream, flags))
CALL(StreamDestroy, "_v2", (void *stream), ((CUstream)stream))
CALL(StreamSynchronize, "", (void *stream), ((CUstream)stream))
CALL(StreamWaitEvent, "", (void *stream, void *event, unsigned flags),
     ((CUstream)stream, (CUevent)event, flags))
CALL(StreamIsCapturing, "", (void *stream, int *status),
     ((CUstream)stream, (CUstreamCaptureStatus *)(void *)status))
CALL(StreamGetCtx, "", (void *stream, void **context), ((CUstream)stream, (CUcontext *)context))
CALL(EventCreate, "", (void **event, unsigned flags), ((CUevent *)event, flags))
CALL(EventDestroy, "_v2", (void *event), ((CUevent)event))
CALL(EventRecord, "", (void *event, void *stream), ((CUevent)event, (CUstream)stream))
CALL(EventQuery, "", (void *event), ((CUevent)event))
CALL(EventSynchronize, "", (void *event), ((CUevent)event))
CALL(MemAlloc, "_v2", (uint64_t *memory, size_t bytes), ((CUdeviceptr *)(void *)memory, bytes))
CALL(MemFree, "_v2", (uint64_t memory), ((CUdeviceptr)memory))
CALL(MemHostRegister, "_v2", (void *memory, size_t bytes, unsigned flags), (memory, bytes, flags))
CALL(MemHostUnregister, "", (void *memory), (memory))
CALL(PointerGetAttributes, "", (unsigned count, int *attribute, void **data, uint64_t pointer),
     (count, (CUpointer_attribute *)(void *)attribute, data, (CUdeviceptr)pointer))
CALL(MemcpyHtoDAsync, "_v2", (uint64_t to, const void *from, size_t bytes, void *stream),
     ((CUdeviceptr)to, from, bytes, (CUstream)stream))
CALL(MemcpyDtoHAsync, "_v2", (void *to, uint64_t from, size_t bytes, void *stream),
     (to, (CUdeviceptr)from, bytes, (CUstream)stream))

/* Numbers that the table stands on. */
_Static_assert(sizeof(CUdeviceptr) == sizeof(uint64_t), "CUdeviceptr");
_Static_assert((int)CUDA_ERROR_DEINITIALIZED == SPDL__CU_UNLOADING, "errors");
_Static_assert((int)CUDA_ERROR_NOT_READY == SPDL__CU_NOT_READY, "errors");
_Static_assert((int)CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED == SPDL__CU_ALREADY_PINNED, "errors");
_Static_assert((int)CU_STREAM_CAPTURE_MODE_RELAXED == SPDL__CU_RELAXED, "flags");
_Static_assert((int)CU_STREAM_NON_BLOCKING == SPDL__CU_NON_BLOCKING, "flags");
_Static_assert((int)CU_EVENT_BLOCKING_SYNC == SPDL__CU_BLOCKING_SYNC, "flags");
_Static_assert((int)CU_EVENT_DISABLE_TIMING == SPDL__CU_DISABLE_TIMING, "flags");
_Static_assert(CU_MEMHOSTREGISTER_PORTABLE == SPDL__CU_PORTABLE, "flags");
_Static_assert(CU_MEMHOSTREGISTER_READ_ONLY == SPDL__CU_READ_ONLY, "flags");
_Static_assert((int)CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID == SPDL__CU_ATTR_NUMA_NODE, "attr");
_Static_assert((int)CU_MEMORYTYPE_HOST == SPDL__CU_HOST, "attr");
_Static_assert((int)CU_POINTER_ATTRIBUTE_MEMORY_TYPE == SPDL__CU_MEMORY_TYPE, "attr");
_Static_assert((int)CU_POINTER_ATTRIBUTE_IS_MANAGED == SPDL__CU_IS_MANAGED, "attr");
_Static_assert((int)CU_POINTER_ATTRIBUTE_RANGE_START_ADDR == SPDL__CU_RANGE_START, "attr");
_Static_assert((int)CU_POINTER_ATTRIBUTE_RANGE_SIZE == SPDL__CU_RANGE_SIZE, "attr");
_Static_assert((int)CUDA_ERROR_OUT_OF_MEMORY == SPDL__CU_OUT_OF_MEMORY, "errors");
_Static_assert((int)CUDA_ERROR_STREAM_CAPTURE_IMPLICIT == SPDL__CU_IMPLICIT, "errors");
