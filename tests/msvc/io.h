/* io.h - what spdl.h takes from Microsoft's <io.h>, for clang in its MSVC mode. */
#pragma once
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
intptr_t __cdecl _get_osfhandle(int);
#ifdef __cplusplus
}
#endif
