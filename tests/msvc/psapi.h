/* psapi.h - see windows.h. */
#pragma once
#define GetProcessMemoryInfo K32GetProcessMemoryInfo
#ifdef __cplusplus
extern "C" {
#endif
typedef struct _PROCESS_MEMORY_COUNTERS {
    DWORD cb, PageFaultCount;
    SIZE_T PeakWorkingSetSize, WorkingSetSize, QuotaPeakPagedPoolUsage, QuotaPagedPoolUsage;
    SIZE_T QuotaPeakNonPagedPoolUsage, QuotaNonPagedPoolUsage, PagefileUsage, PeakPagefileUsage;
} PROCESS_MEMORY_COUNTERS;
WIN_API(BOOL) GetProcessMemoryInfo(HANDLE, PROCESS_MEMORY_COUNTERS *, DWORD);
#ifdef __cplusplus
}
#endif
