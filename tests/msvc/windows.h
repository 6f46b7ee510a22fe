/* windows.h - what spdl.h takes from the Windows SDK, as it is declared there, for clang in its
   MSVC mode. Some of the macros that the SDK leaves behind are here, too. */
#pragma once
#if !defined(WIN32_LEAN_AND_MEAN) || !defined(NOMINMAX)
#error "spdl.h takes the lean part, without min and max"
#endif
#define near
#define far
#define IN
#define OUT
#define CONST const
#define VOID void
#define TEXT(quote) L##quote
#define TRUE 1
#define FALSE 0
#define CreateFile CreateFileW
#define _WIN32_WINNT 0x0a00
#define WINAPI __stdcall
#define WIN_API(type) __declspec(dllimport) type __stdcall
#ifdef __cplusplus
extern "C" {
#endif

typedef int BOOL;
typedef unsigned short WORD;
typedef unsigned long DWORD;
typedef unsigned UINT;
typedef long LONG, HRESULT, LSTATUS;
typedef void *HANDLE;
typedef const wchar_t *PCWSTR;
#ifdef _WIN64
typedef unsigned long long ULONG_PTR, DWORD_PTR, SIZE_T;
typedef long long LONG_PTR, INT_PTR;
#else
typedef unsigned long ULONG_PTR, DWORD_PTR, SIZE_T;
typedef long LONG_PTR;
typedef int INT_PTR;
#endif
typedef struct HINSTANCE__ *HMODULE;
typedef struct HKEY__ *HKEY;
typedef INT_PTR(WINAPI *FARPROC)(void);
typedef DWORD(WINAPI *LPTHREAD_START_ROUTINE)(void *);
typedef struct _SECURITY_ATTRIBUTES SECURITY_ATTRIBUTES;
typedef union _LARGE_INTEGER {
    struct {
        DWORD LowPart;
        LONG HighPart;
    } u;
    long long QuadPart;
} LARGE_INTEGER;
typedef struct _FILETIME {
    DWORD dwLowDateTime, dwHighDateTime;
} FILETIME;
typedef struct _RTL_SRWLOCK {
    void *Ptr;
} SRWLOCK;
typedef struct _RTL_CONDITION_VARIABLE {
    void *Ptr;
} CONDITION_VARIABLE;
#pragma warning(push)
#pragma warning(disable : 4201)
typedef struct _OVERLAPPED {
    ULONG_PTR Internal, InternalHigh;
    union {
        struct {
            DWORD Offset, OffsetHigh;
        };
        void *Pointer;
    };
    HANDLE hEvent;
} OVERLAPPED;
#pragma warning(pop)
#define MAX_PATH 260
typedef struct _WIN32_FIND_DATAW {
    DWORD dwFileAttributes;
    FILETIME ftCreationTime, ftLastAccessTime, ftLastWriteTime;
    DWORD nFileSizeHigh, nFileSizeLow, dwReserved0, dwReserved1;
    wchar_t cFileName[MAX_PATH], cAlternateFileName[14];
} WIN32_FIND_DATAW;
typedef struct _BY_HANDLE_FILE_INFORMATION {
    DWORD dwFileAttributes;
    FILETIME ftCreationTime, ftLastAccessTime, ftLastWriteTime;
    DWORD dwVolumeSerialNumber, nFileSizeHigh, nFileSizeLow, nNumberOfLinks, nFileIndexHigh;
    DWORD nFileIndexLow;
} BY_HANDLE_FILE_INFORMATION;

#define ALL_PROCESSOR_GROUPS 0xffff
#define CP_UTF8 65001
#define CREATE_ALWAYS 2
#define CREATE_NEW 1
#define CREATE_SUSPENDED 0x4
#define ERROR_ACCESS_DENIED 5L
#define ERROR_ALREADY_EXISTS 183L
#define ERROR_BAD_NETPATH 53L
#define ERROR_BROKEN_PIPE 109L
#define ERROR_DIRECTORY 267L
#define ERROR_DISK_FULL 112L
#define ERROR_FILENAME_EXCED_RANGE 206L
#define ERROR_FILE_EXISTS 80L
#define ERROR_FILE_NOT_FOUND 2L
#define ERROR_HANDLE_DISK_FULL 39L
#define ERROR_HANDLE_EOF 38L
#define ERROR_INVALID_HANDLE 6L
#define ERROR_INVALID_NAME 123L
#define ERROR_LOCK_VIOLATION 33L
#define ERROR_NOT_ENOUGH_MEMORY 8L
#define ERROR_NO_DATA 232L
#define ERROR_NO_MORE_FILES 18L
#define ERROR_NO_UNICODE_TRANSLATION 1113L
#define ERROR_OUTOFMEMORY 14L
#define ERROR_PATH_NOT_FOUND 3L
#define ERROR_SHARING_VIOLATION 32L
#define ERROR_TOO_MANY_OPEN_FILES 4L
#define ERROR_USER_MAPPED_FILE 1224L
#define ERROR_WRITE_PROTECT 19L
#define FILE_APPEND_DATA 0x4
#define FILE_ATTRIBUTE_DIRECTORY 0x10
#define FILE_ATTRIBUTE_NORMAL 0x80
#define FILE_FLAG_BACKUP_SEMANTICS 0x02000000
#define FILE_MAP_COPY 0x1
#define FILE_MAP_READ 0x4
#define FILE_SHARE_DELETE 0x4
#define FILE_SHARE_READ 0x1
#define FILE_SHARE_WRITE 0x2
#define FILE_TYPE_DISK 0x1
#define FILE_TYPE_PIPE 0x3
#define GENERIC_READ (0x80000000L)
#define GENERIC_WRITE (0x40000000L)
#define HKEY_LOCAL_MACHINE ((HKEY)(ULONG_PTR)((LONG)0x80000002))
#define INFINITE 0xffffffff
#define INVALID_FILE_ATTRIBUTES ((DWORD)-1)
#define INVALID_HANDLE_VALUE ((HANDLE)(LONG_PTR)-1)
#define MB_ERR_INVALID_CHARS 0x8
#define MOVEFILE_REPLACE_EXISTING 0x1
#define MOVEFILE_WRITE_THROUGH 0x8
#define OPEN_ALWAYS 4
#define OPEN_EXISTING 3
#define PAGE_READONLY 0x02
#define PAGE_WRITECOPY 0x08
#define PIPE_NOWAIT 0x1
#define RRF_RT_REG_DWORD 0x10
#define STACK_SIZE_PARAM_IS_A_RESERVATION 0x10000
#define SYNCHRONIZE (0x00100000L)

WIN_API(void) AcquireSRWLockExclusive(SRWLOCK *);
WIN_API(BOOL) CloseHandle(HANDLE);
WIN_API(HANDLE) CreateFileMappingW(HANDLE, SECURITY_ATTRIBUTES *, DWORD, DWORD, DWORD, PCWSTR);
WIN_API(HANDLE) CreateFileW(PCWSTR, DWORD, DWORD, SECURITY_ATTRIBUTES *, DWORD, DWORD, HANDLE);
WIN_API(HANDLE) CreateThread(SECURITY_ATTRIBUTES *, SIZE_T, LPTHREAD_START_ROUTINE, void *, DWORD,
                             DWORD *);
WIN_API(BOOL) FindClose(HANDLE);
WIN_API(HANDLE) FindFirstFileW(PCWSTR, WIN32_FIND_DATAW *);
WIN_API(BOOL) FindNextFileW(HANDLE, WIN32_FIND_DATAW *);
WIN_API(BOOL) FlushFileBuffers(HANDLE);
WIN_API(void) FlushProcessWriteBuffers(void);
WIN_API(DWORD) GetActiveProcessorCount(WORD);
WIN_API(HANDLE) GetCurrentProcess(void);
WIN_API(DWORD) GetCurrentProcessId(void);
WIN_API(HANDLE) GetCurrentThread(void);
WIN_API(DWORD) GetCurrentThreadId(void);
WIN_API(DWORD) GetEnvironmentVariableW(PCWSTR, wchar_t *, DWORD);
WIN_API(DWORD) GetFileAttributesW(PCWSTR);
WIN_API(BOOL) GetFileInformationByHandle(HANDLE, BY_HANDLE_FILE_INFORMATION *);
WIN_API(DWORD) GetFileType(HANDLE);
WIN_API(DWORD) GetFullPathNameW(PCWSTR, DWORD, wchar_t *, wchar_t **);
WIN_API(DWORD) GetLastError(void);
WIN_API(HMODULE) GetModuleHandleW(PCWSTR);
WIN_API(BOOL) GetNamedPipeHandleStateW(HANDLE, DWORD *, DWORD *, DWORD *, DWORD *, wchar_t *,
                                       DWORD);
WIN_API(FARPROC) GetProcAddress(HMODULE, const char *);
WIN_API(BOOL) GetProcessAffinityMask(HANDLE, DWORD_PTR *, DWORD_PTR *);
WIN_API(BOOL) GetProcessTimes(HANDLE, FILETIME *, FILETIME *, FILETIME *, FILETIME *);
WIN_API(BOOL) GetSystemTimes(FILETIME *, FILETIME *, FILETIME *);
WIN_API(void) GetSystemTimePreciseAsFileTime(FILETIME *);
WIN_API(void *) MapViewOfFile(HANDLE, DWORD, DWORD, DWORD, SIZE_T);
WIN_API(BOOL) MoveFileExW(PCWSTR, PCWSTR, DWORD);
WIN_API(int) MultiByteToWideChar(UINT, DWORD, const char *, int, wchar_t *, int);
WIN_API(BOOL) QueryPerformanceCounter(LARGE_INTEGER *);
WIN_API(BOOL) QueryPerformanceFrequency(LARGE_INTEGER *);
WIN_API(BOOL) QueryThreadCycleTime(HANDLE, unsigned long long *);
WIN_API(LSTATUS) RegGetValueW(HKEY, PCWSTR, PCWSTR, DWORD, DWORD *, void *, DWORD *);
WIN_API(BOOL) ReadFile(HANDLE, void *, DWORD, DWORD *, OVERLAPPED *);
WIN_API(void) ReleaseSRWLockExclusive(SRWLOCK *);
WIN_API(DWORD) ResumeThread(HANDLE);
WIN_API(BOOL) SetNamedPipeHandleState(HANDLE, DWORD *, DWORD *, DWORD *);
WIN_API(DWORD_PTR) SetThreadAffinityMask(HANDLE, DWORD_PTR);
WIN_API(BOOL) SetThreadPriority(HANDLE, int);
WIN_API(void) Sleep(DWORD);
WIN_API(BOOL) SleepConditionVariableSRW(CONDITION_VARIABLE *, SRWLOCK *, DWORD, DWORD);
WIN_API(BOOL) SwitchToThread(void);
WIN_API(BOOL) UnmapViewOfFile(const void *);
WIN_API(DWORD) WaitForSingleObject(HANDLE, DWORD);
WIN_API(void) WakeAllConditionVariable(CONDITION_VARIABLE *);
WIN_API(void) WakeConditionVariable(CONDITION_VARIABLE *);
WIN_API(int) WideCharToMultiByte(UINT, DWORD, PCWSTR, int, char *, int, const char *, BOOL *);
WIN_API(BOOL) WriteFile(HANDLE, const void *, DWORD, DWORD *, OVERLAPPED *);
#ifdef __cplusplus
}
#endif
