/* library.h - what spdl.h takes from the C library, as Microsoft declares it, for clang in its MSVC
   mode: no headers of Windows are needed to look at every line as MSVC would see it. */
#ifndef MSVC_LIBRARY_H_INCLUDED
#define MSVC_LIBRARY_H_INCLUDED

#include <stddef.h>
#include <stdarg.h>

#ifdef __cplusplus
extern "C" {
#endif
typedef struct _iobuf FILE;
FILE *__acrt_iob_func(unsigned);
#define stderr (__acrt_iob_func(2))
#define SEEK_SET 0
#define SEEK_END 2
#define EOF (-1)
int fprintf(FILE *, const char *, ...);
int snprintf(char *, size_t, const char *, ...);
int vsnprintf(char *, size_t, const char *, va_list);
FILE *fopen(const char *, const char *);
int fclose(FILE *);
int fflush(FILE *);
int ferror(FILE *);
int fputs(const char *, FILE *);
int fseek(FILE *, long, int);
long ftell(FILE *);
size_t fread(void *, size_t, size_t, FILE *);
size_t fwrite(const void *, size_t, size_t, FILE *);
int remove(const char *);
int rename(const char *, const char *);

void *malloc(size_t);
void *realloc(void *, size_t);
void free(void *);
char *getenv(const char *);
void qsort(void *, size_t, size_t, int (*)(const void *, const void *));
double strtod(const char *, char **);
long strtol(const char *, char **, int);
unsigned long long strtoull(const char *, char **, int);

void *memchr(const void *, int, size_t);
int memcmp(const void *, const void *, size_t);
void *memcpy(void *, const void *, size_t);
void *memmove(void *, const void *, size_t);
void *memset(void *, int, size_t);
char *strchr(const char *, int);
int strcmp(const char *, const char *);
char *strcpy(char *, const char *);
size_t strcspn(const char *, const char *);
char *strerror(int);
size_t strlen(const char *);
int strncmp(const char *, const char *, size_t);
char *strpbrk(const char *, const char *);
char *strrchr(const char *, int);
size_t strspn(const char *, const char *);
char *strstr(const char *, const char *);
size_t wcslen(const wchar_t *);
int wcsncmp(const wchar_t *, const wchar_t *, size_t);

int *_errno(void);
#define errno (*_errno())
#define ENOENT 2
#define EINTR 4
#define EIO 5
#define EBADF 9
#define EAGAIN 11
#define ENOMEM 12
#define EACCES 13
#define EBUSY 16
#define EEXIST 17
#define EXDEV 18
#define ENOTDIR 20
#define EISDIR 21
#define EINVAL 22
#define EMFILE 24
#define EFBIG 27
#define ENOSPC 28
#define EROFS 30
#define EPIPE 32
#define ENAMETOOLONG 38
#define ENOTEMPTY 41
#define ENODEV 19
#define EPERM 1

void _wassert(const wchar_t *, const wchar_t *, unsigned);
#define assert(condition) ((condition) ? (void)0 : _wassert(L"", L"", __LINE__))
#ifdef __cplusplus
}
#endif
#endif
